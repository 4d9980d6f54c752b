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
#   CUDA  $CUDA_HOME, $CUDA_PATH, nvcc in PATH, /usr/local/cuda, wheels of $PYTHON
#   NCCL  $NCCL_HOME, $NCCL_ROOT, pkg-config, wheel of $PYTHON, $CONDA_PREFIX, beside CUDA or where
#         the compiler looks
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

# The directory of a wheel of NVIDIA.
wheel() { "$python" -c "import nvidia.$1 as m; print(list(m.__path__)[0])" 2>/dev/null; }

# The first directory below ROOT that has libNAME.so or libNAME.so.N: library_dir ROOT NAME
library_dir() {
    local dir
    for dir in "$1"/lib64 "$1"/lib "$1"/targets/*/lib \
        "$1/lib/$($cc -print-multiarch 2>/dev/null)"; do
        compgen -G "$dir/lib$2.so*" >/dev/null && echo "$dir" && return
    done
    return 1
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

# Sets nvcc, cuda_version, cuda_flags, cuda_libs, cublas_libs.
cuda_at() { # PLACE ROOT [NVCC]
    local dir
    nvcc=${3:-$2/bin/nvcc}
    [ -d "$2" ] || failed "$1" 'no such directory' || return
    [ -x "$nvcc" ] || failed "$1" "no ${nvcc#"$2/"}" || return
    [ -e "$2/include/cuda_runtime_api.h" ] ||
        failed "$1" 'no include/cuda_runtime_api.h (the part cuda-cudart-dev)' || return
    dir=$(library_dir "$2" cudart) || failed "$1" 'no libcudart.so in its lib64 or lib' || return
    cuda_version=$("$nvcc" --version 2>&1 | sed -n 's/.*release \([0-9.]*\).*/\1/p')
    echo '__global__ void kernel() {}' >"$tmp/kernel.cu"
    "$nvcc" -c -o "$tmp/kernel.o" "$tmp/kernel.cu" >"$tmp/log" 2>&1 ||
        failed "$1" "nvcc does not compile: $(excerpt)" || return
    cuda_flags=$(include "$2/include") cuda_libs=$(link "$dir" cudart)
    printf '#include <cuda_runtime_api.h>\n%s\n' \
        'int main(void) { int n; return (int)cudaRuntimeGetVersion(&n); }' >"$tmp/cuda.c"
    # shellcheck disable=SC2086
    { $cc -o "$tmp/cuda" "$tmp/cuda.c" $cuda_flags $cuda_libs && "$tmp/cuda"; } >"$tmp/log" 2>&1 ||
        failed "$1" "a program is not linked, or does not run: $(excerpt)" || return
    cublas_libs=$(dir=$(library_dir "$2" cublas) && link "$dir" cublas)
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
        cuda_at "nvcc in PATH, ${nvcc_root%/bin/nvcc}" "${nvcc_root%/bin/nvcc}" && return
    else
        failed 'nvcc in PATH' 'none'
    fi
    cuda_at /usr/local/cuda /usr/local/cuda && return
    if root=$(wheel cu13); then
        cuda_at "wheels of $python, $root" "$root"
    elif root=$(wheel cuda_runtime) && nvcc_root=$(wheel cuda_nvcc); then
        cuda_at "wheels of $python, $root" "$root" "$nvcc_root/bin/nvcc"
    else
        failed "wheels of $python" 'no nvidia-cuda-nvcc with nvidia-cuda-runtime'
    fi
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
    nccl_at "$1" "$2/include" "$(library_dir "$2" nccl || echo "$2/lib")"
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
    [ -n "$cublas_libs" ] || echo "# warning: no libcublas: train_gpt.cu cannot be built"
    echo "NVCC = $nvcc"
    echo "CUDA_FLAGS = $cuda_flags"
    echo "CUDA_LIBS = $cuda_libs"
    echo "CUBLAS_LIBS = $cublas_libs"
    echo "NCCL_FLAGS = $nccl_flags"
    echo "NCCL_LIBS = $nccl_libs"
}

find_cuda || give_up 'CUDA toolkit' 'Install one: the package cuda-toolkit of NVIDIA, or' \
    '  pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cublas' \
    'or name one that is there: CUDA_HOME=DIR.'
tried=''
find_nccl || give_up "NCCL $(version "$oldest") or newer" 'Install one of:' \
    "  apt-get install libnccl-dev     pip install nvidia-nccl-cu${cuda_version%%.*}" \
    '  conda install -c conda-forge nccl' 'or name one that is there: NCCL_HOME=DIR.'
tried=''
[ -z "$need_gpu" ] || find_gpu || give_up GPU 'Run this where one is, with its driver installed:' \
    'nvidia-smi lists it. A container is started with --gpus all.'
[ -n "$output" ] || { report && exit; }
report >"$tmp/report"
mkdir -p "$(dirname "$output")"
cmp -s "$tmp/report" "$output" || cp "$tmp/report" "$output"
grep '^#' "$output" | sed 's/^# //'
