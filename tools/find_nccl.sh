#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# find_nccl.sh - finds the CUDA toolkit and NCCL, and proves both by a program that is compiled,
# linked and run.
#
#   tools/find_nccl.sh             prints what was found (comments) and variables for make
#   tools/find_nccl.sh -o FILE     the same into FILE, only if it changes; here only the comments
#   tools/find_nccl.sh -g ...      fails without a GPU, too
#
# The first place that works is taken:
#   CUDA    $CUDA_HOME, $CUDA_PATH, nvcc in PATH (also NVIDIA's HPC SDK), /usr/local/cuda,
#           $CONDA_PREFIX, wheels of $PYTHON
#   NCCL    $NCCL_HOME, $NCCL_ROOT, pkg-config, wheel of $PYTHON, $CONDA_PREFIX, the HPC SDK,
#           beside CUDA or where the compiler looks
#   cuBLAS  beside CUDA, the HPC SDK, $CONDA_PREFIX, wheels of $PYTHON; without it one example is
#           left out
# Where one of the first two variables of a line is set, only that place counts. On failure: each
# place with what is wrong there, then what to install; exit status 1.
set -uo pipefail
cc=${CC:-cc} python=${PYTHON:-python3} output='' tried='' need_gpu=''
oldest=21800 # the first with ncclCommSplit
while [ $# != 0 ]; do
    case $1 in
    -g) need_gpu=yes ;;
    -o) output=${2:?-o needs a file} && shift ;;
    -h | --help) sed -n '3,/^set /{/^#/s/^# \{0,1\}//p;}' "$0" && exit ;;
    *) echo "usage: ${0##*/} [-g] [-o FILE]; --help tells more" >&2 && exit 2 ;;
    esac
    shift
done
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT

failed() { tried+="  $1: $2"$'\n' && return 1; } # PLACE WHY
give_up() { # WHAT HINT...
    printf 'No %s was found that can be used. Looked at:\n%s' "$1" "$tried" >&2
    shift && printf '%s\n' "$@" >&2
    exit 1
}
excerpt() { grep -iE -m 2 'error|cannot|not found|undefined' "$tmp/log" || tail -n 2 "$tmp/log"; }
version() { echo "$(($1 / 10000)).$(($1 / 100 % 100)).$(($1 % 100))"; } # 22809

# The directory of a wheel of NVIDIA; of several names, those that are there.
wheel() {
    local name found=1
    for name; do
        "$python" -c "import nvidia.$name as m; print(list(m.__path__)[0])" 2>/dev/null && found=0
    done
    return $found
}

# The first directory below ROOT that has libNAME.so or libNAME.so.N: library_dir ROOT NAME
library_dir() {
    local dir
    for dir in "$1"/lib64 "$1"/lib "$1"/targets/*/lib \
        "$1/lib/$($cc -print-multiarch 2>/dev/null)"; do
        compgen -G "$dir/lib$2.so*" >/dev/null && echo "$dir" && return
    done
    return 1
}

# The directory below ROOT that has a header: include_dir ROOT HEADER
include_dir() {
    local dir
    for dir in "$1"/include "$1"/targets/*/include; do
        [ -e "$dir/$2" ] && echo "$dir" && return
    done
    return 1
}

# Directories of NVIDIA's HPC SDK beside a toolkit of it: hpc_sdk ROOT PART
hpc_sdk() {
    local up
    for up in "$1/.." "$1/../.."; do
        compgen -G "$up/$2/${cuda_version:-*}" || compgen -G "$up/$2"
    done
}

# Flags that link libNAME of a directory and find it again at run time. Wheels have no libNAME.so.
link() { # DIR NAME
    local file=''
    if [ -e "$1/lib$2.so" ]; then
        file=-l$2
    else
        file=$(compgen -G "$1/lib$2.so.*" | sort -V | tail -n 1) && file=-l:${file##*/}
    fi
    echo "-L$1 $file -Wl,-rpath,$1"
}

# Not for directories that the compiler searches anyway: C++ headers need their order.
include() { case $1 in /usr/include) ;; *) echo "-isystem $1" ;; esac; }

# ---- CUDA ---------------------------------------------------------------------------------------

# Code for the GPUs of data centres that the toolkit knows, and for those that are to come. (Flags
# as all-major ask for GPUs that are too old for the kernels; native, without a GPU, too.)
find_archs() { # ARCH...
    local known arch last=''
    known=$("$nvcc" --list-gpu-arch 2>/dev/null) nvcc_arch=''
    for arch; do
        grep -qx "compute_$arch" <<<"$known" || continue
        nvcc_arch+="-gencode arch=compute_$arch,code=sm_$arch " last=$arch
    done
    nvcc_arch+=${last:+-gencode arch=compute_$last,code=compute_$last}
    nvcc_arch=${nvcc_arch:--arch=sm_80}
}

# What lets nvcc use several cores, as far as it knows it: for several GPUs, and within one.
find_jobs() {
    local option help
    help=$("$nvcc" --help 2>/dev/null) nvcc_jobs=''
    for option in threads split-compile; do
        ! grep -q -- "^--$option " <<<"$help" || nvcc_jobs+="--$option 0 "
    done
}

# Sets nvcc, nvcc_arch, cuda_version, cuda_flags, cuda_libs.
cuda_at() { # PLACE ROOT [NVCC]
    local dir headers
    nvcc=${3:-$2/bin/nvcc}
    [ -d "$2" ] || failed "$1" 'no such directory' || return
    [ -x "$nvcc" ] || failed "$1" "no ${nvcc#"$2/"}" || return
    headers=$(include_dir "$2" cuda_runtime_api.h) ||
        failed "$1" 'no include/cuda_runtime_api.h (the part cuda-cudart-dev)' || return
    dir=$(library_dir "$2" cudart) || failed "$1" 'no libcudart.so in its lib64 or lib' || return
    cuda_version=$("$nvcc" --version 2>&1 | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    find_archs 80 90 100
    find_jobs
    echo '__global__ void kernel() {}' >"$tmp/kernel.cu"
    "$nvcc" $nvcc_arch -c -o "$tmp/kernel.o" "$tmp/kernel.cu" >"$tmp/log" 2>&1 ||
        failed "$1" "nvcc does not compile: $(excerpt)" || return
    cuda_flags=$(include "$headers") cuda_libs=$(link "$dir" cudart)
    printf '#include <cuda_runtime_api.h>\n%s\n' \
        'int main(void) { int n; return (int)cudaRuntimeGetVersion(&n); }' >"$tmp/cuda.c"
    # shellcheck disable=SC2086
    { $cc -o "$tmp/cuda" "$tmp/cuda.c" $cuda_flags $cuda_libs && "$tmp/cuda"; } >"$tmp/log" 2>&1 ||
        failed "$1" "a program is not linked, or does not run: $(excerpt)" || return
    cuda_place=$1 cuda_root=$2
}

find_cuda() {
    local root nvcc_root
    root=${CUDA_HOME:-${CUDA_PATH:-}}
    if [ -n "$root" ]; then
        [ -n "${CUDA_HOME:-}" ] && cuda_at "CUDA_HOME=$root" "$root" && return
        [ -z "${CUDA_HOME:-}" ] && cuda_at "CUDA_PATH=$root" "$root" && return
        tried+=$'  (unset it to have other places looked at)\n'
        return 1
    fi
    if nvcc_root=$(readlink -f "$(command -v nvcc)") && [ -n "$nvcc_root" ]; then
        root=${nvcc_root%/bin/nvcc}
        cuda_at "nvcc in PATH, $root" "$root" && return
        [ ! -d "$root/../cuda" ] || cuda_at "HPC SDK, $root" "$root/../cuda" "$nvcc_root" && return
    else
        failed 'nvcc in PATH' 'none'
    fi
    cuda_at /usr/local/cuda /usr/local/cuda && return
    [ -z "${CONDA_PREFIX:-}" ] || cuda_at "CONDA_PREFIX=$CONDA_PREFIX" "$CONDA_PREFIX" && return
    if root=$(wheel cu13); then
        cuda_at "wheels of $python, $root" "$root"
    elif root=$(wheel cuda_runtime) && nvcc_root=$(wheel cuda_nvcc); then
        cuda_at "wheels of $python, $root" "$root" "$nvcc_root/bin/nvcc"
    else
        failed "wheels of $python" 'no nvidia-cuda-nvcc with nvidia-cuda-runtime'
    fi
}

# ---- cuBLAS -------------------------------------------------------------------------------------

cublas_probe='#include <cublas_v2.h>
int main(void) { return cublasGetStatusString(CUBLAS_STATUS_SUCCESS) == 0; }'

# Sets cublas_flags, cublas_libs, cublas_root.
cublas_at() { # ROOT
    local headers dir
    headers=$(include_dir "$1" cublas_v2.h) || failed "$1" 'no cublas_v2.h' || return
    dir=$(library_dir "$1" cublas) || failed "$1" 'no libcublas.so' || return
    cublas_flags=$(include "$headers") cublas_libs=$(link "$dir" cublas)
    [ "$cublas_flags" != "$cuda_flags" ] || cublas_flags=''
    echo "$cublas_probe" >"$tmp/cublas.c"
    # shellcheck disable=SC2086
    $cc -o "$tmp/cublas" "$tmp/cublas.c" $cuda_flags $cublas_flags $cublas_libs $cuda_libs \
        >"$tmp/log" 2>&1 || failed "$1" "a program is not compiled or linked: $(excerpt)" || return
    cublas_root=$1
}

find_cublas() {
    local root
    while read -r root; do
        [ -z "$root" ] || ! cublas_at "$root" || return 0
    done < <(echo "$cuda_root"; hpc_sdk "$cuda_root" math_libs; echo "${CONDA_PREFIX:-}"
        wheel cu13 cublas)
    cublas_flags='' cublas_libs='' cublas_root=''
}

# ---- NCCL ---------------------------------------------------------------------------------------

probe='#include <nccl.h>
#include <stdio.h>
int main(void) {
    int library = 0, runtime = 0;
    if (ncclGetVersion(&library) != ncclSuccess) return 1;
    (void)cudaRuntimeGetVersion(&runtime);
    printf("%d %d\n", NCCL_VERSION_CODE, library);
    return 0;
}'

# Sets nccl_header, nccl_library (versions), nccl_file, nccl_cuda.
nccl_probe() { # PLACE; flags and libraries are in nccl_flags, nccl_libs
    local versions
    echo "$probe" >"$tmp/probe.c"
    # shellcheck disable=SC2086
    $cc -o "$tmp/probe" "$tmp/probe.c" $nccl_flags $cuda_flags $nccl_libs $cuda_libs \
        >"$tmp/log" 2>&1 || failed "$1" "the probe is not compiled or linked: $(excerpt)" || return
    versions=$("$tmp/probe" 2>"$tmp/log") ||
        failed "$1" "the probe does not run: $(excerpt)" || return
    read -r nccl_header nccl_library <<<"$versions"
    nccl_file=$(ldd "$tmp/probe" | awk '$1 ~ /libnccl/ {print $3}')
    nccl_cuda=$(grep -aoE -m 1 'NCCL version [0-9.]+\+cuda[0-9.]+' "${nccl_file:-/dev/null}" |
        sed -n '1s/.*+cuda//p')
    [ "$nccl_header" -ge "$oldest" ] && [ "$nccl_library" -ge "$oldest" ] ||
        failed "$1" "is of version $(version "$nccl_header") (header) and \
$(version "$nccl_library") (library), older than $(version "$oldest")" || return
    [ $((nccl_header / 100)) -le $((nccl_library / 100)) ] ||
        failed "$1" "its header, $(version "$nccl_header"), is newer than the library that the \
program loads, $(version "$nccl_library") ($nccl_file)" || return
    nccl_place=$1
}

nccl_at() { # PLACE INCLUDE-DIR LIBRARY-DIR
    [ -e "$2/nccl.h" ] || failed "$1" "no nccl.h in $2" || return
    compgen -G "$3/libnccl.so*" >/dev/null || failed "$1" "no libnccl.so.2 in ${3:-its lib}" ||
        return
    nccl_flags=$(include "$2") nccl_libs=$(link "$3" nccl)
    nccl_probe "$1"
}
nccl_below() { # PLACE ROOT
    nccl_at "$1" "$(include_dir "$2" nccl.h || echo "$2/include")" \
        "$(library_dir "$2" nccl || echo "$2/lib")"
}

find_nccl() {
    local root
    root=${NCCL_HOME:-${NCCL_ROOT:-}}
    if [ -n "$root" ]; then
        [ -n "${NCCL_HOME:-}" ] && nccl_below "NCCL_HOME=$root" "$root" && return
        [ -z "${NCCL_HOME:-}" ] && nccl_below "NCCL_ROOT=$root" "$root" && return
        tried+=$'  (unset it to have other places looked at)\n'
        return 1
    fi
    if pkg-config --exists nccl 2>/dev/null; then
        nccl_at 'pkg-config nccl' "$(pkg-config --variable=includedir nccl)" \
            "$(pkg-config --variable=libdir nccl)" && return
    else
        failed 'pkg-config nccl' 'not known'
    fi
    if root=$(wheel nccl); then
        nccl_below "wheel of $python, $root" "$root" && return
    else
        failed "wheel of $python" "no module nvidia.nccl"
    fi
    if [ -n "${CONDA_PREFIX:-}" ]; then
        nccl_below "CONDA_PREFIX=$CONDA_PREFIX" "$CONDA_PREFIX" && return
    fi
    while read -r root; do
        nccl_below "HPC SDK, $root" "$root" && return
    done < <(hpc_sdk "$cuda_root" comm_libs | sed 's|$|/nccl|')
    nccl_flags='' nccl_libs=-lnccl
    nccl_probe "beside CUDA or where $cc looks"
}

# ---- a GPU ---------------------------------------------------------------------------------------

gpu_probe='#include <cuda_runtime_api.h>
#include <stdio.h>
int main(void) {
    int count = 0, device = 0, major = 0, minor = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaSuccess) e = cudaFree(NULL);
    if (e != cudaSuccess) printf("cudaGetDeviceCount: %s\n", cudaGetErrorString(e));
    if (e == cudaSuccess && !count) puts("cudaGetDeviceCount: 0");
    for (; e == cudaSuccess && device < count; device++) {
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
        printf("# GPU %d: compute capability %d.%d\n", device, major, minor);
    }
    return e != cudaSuccess || !count;
}'

find_gpu() {
    echo "$gpu_probe" >"$tmp/gpu.c"
    # shellcheck disable=SC2086
    $cc -o "$tmp/gpu" "$tmp/gpu.c" $cuda_flags $cuda_libs >"$tmp/log" 2>&1 ||
        failed "the probe" "is not compiled or linked: $(excerpt)" || return
    gpus=$("$tmp/gpu" 2>&1) && return
    if command -v nvidia-smi >/dev/null; then
        failed "$gpus" "nvidia-smi says: $(nvidia-smi -L 2>&1 | tail -n 1)"
    else
        failed "$gpus" 'nvidia-smi is not installed'
    fi
}

# ---- both ---------------------------------------------------------------------------------------

report() {
    echo "# CUDA $cuda_version: $cuda_root ($cuda_place)"
    echo "# NCCL $(version "$nccl_library")${nccl_cuda:+ for CUDA $nccl_cuda}: $nccl_file," \
        "header $(version "$nccl_header") ($nccl_place)"
    [ -z "$nccl_cuda" ] || [ "${nccl_cuda%%.*}" = "${cuda_version%%.*}" ] ||
        echo "# warning: this NCCL was made for CUDA $nccl_cuda, the toolkit is $cuda_version"
    [ -z "$need_gpu" ] || echo "$gpus"
    if [ -n "$cublas_root" ]; then
        [ "$cublas_root" = "$cuda_root" ] || echo "# cuBLAS: $cublas_root"
    else
        echo "# warning: no cuBLAS was found: the GPT in CUDA is left out. Looked at:"
        sed 's/^/# /' <<<"${no_cublas%$'\n'}"
    fi
    echo "NVCC = $nvcc"
    echo "NVCC_ARCH ?= $nvcc_arch"
    echo "NVCC_JOBS = $nvcc_jobs"
    echo "CUDA_FLAGS = $cuda_flags"
    echo "CUDA_LIBS = $cuda_libs"
    echo "CUBLAS_FLAGS = $cublas_flags"
    echo "CUBLAS_LIBS = $cublas_libs"
    echo "NCCL_FLAGS = $nccl_flags"
    echo "NCCL_LIBS = $nccl_libs"
}

find_cuda || give_up 'CUDA toolkit' 'Install one: the package cuda-toolkit of NVIDIA, or' \
    '  pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cublas' \
    'or name one that is there: CUDA_HOME=DIR.'
tried=''
find_cublas
no_cublas=$tried tried=''
find_nccl || give_up "NCCL $(version "$oldest") or newer" 'Install one of:' \
    "  apt-get install libnccl-dev     pip install nvidia-nccl-cu${cuda_version%%.*}" \
    '  conda install -c conda-forge nccl' 'or name one that is there: NCCL_HOME=DIR.'
tried=''
[ -z "$need_gpu" ] || find_gpu || give_up GPU 'Run this where one is, with its driver installed:' \
    'nvidia-smi lists it. A container is started with --gpus all.'
# Code for the GPUs that are here alone, and for newer ones, if the toolkit does not know these.
here=$(sed -n 's/^# GPU.* \([0-9]*\)\.\([0-9]\)$/\1\2/p' <<<"${gpus:-}" | sort -un)
# shellcheck disable=SC2086
[ -z "$here" ] || find_archs $here
[ -z "$here" ] || [ "$nvcc_arch" != -arch=sm_80 ] || find_archs 80 90 100
[ -n "$output" ] || { report && exit; }
report >"$tmp/report"
mkdir -p "$(dirname "$output")"
cmp -s "$tmp/report" "$output" || cp "$tmp/report" "$output"
grep '^#' "$output" | sed 's/^# //'
