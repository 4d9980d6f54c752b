#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# gpu_test.sh - the tests of `make gpu-test`, one after the other: GoogleTest's lines of what is
# tested here, between those of the test programs.
#
#   tools/gpu_test.sh [NAME...]    the parts whose names begin with one of these; none: all
#   tools/gpu_test.sh --list       their names
#
# FSDP_BUILD is the directory of the build with NCCL. Several ranks share the first GPU.
set -uo pipefail
dir=${FSDP_BUILD:?run this by: make gpu-test} work=$FSDP_BUILD/gpu_test
one_gpu=tools/one_gpu.sh fsdprun='tools/fsdprun -n'
export TEST_TIMEOUT_MULT=${TEST_TIMEOUT_MULT:-10} # GPU contexts take turns
export FSDP_BACKEND=nccl
mkdir -p "$work"

skip() { echo "$*" && exit 77; }
die() { echo "$*" && exit 1; }

# ---- what is tested here ------------------------------------------------------------------------

# The tools of compute-sanitizer on the kernels' own tests.
test_sanitizer() { # TOOL
    local log=$work/$1.log
    command -v compute-sanitizer >/dev/null || skip 'no compute-sanitizer'
    compute-sanitizer --tool "$1" --target-processes all \
        "$dir/tests/test_cuda_kernels" --filter=-long_* >"$log" 2>&1 ||
        die "$(tail -n 50 "$log")"
    grep -q ' SUMMARY: 0 ' "$log" || die 'no summary'
    ! grep ' SUMMARY: [1-9]' "$log" || die "$(grep -m 20 '^=' "$log")"
}

gpt='--data fsdp.h --steps 10 --layers 2 --heads 2 --channels 64 --context 64 --batch 12 --sample 0'

train() { # CSV COMMAND...
    "${@:2}" $gpt --csv "$work/$1.csv" && [ "$(wc -l <"$work/$1.csv")" = 11 ]
}

# Losses of two runs: compare NAME NAME TOLERANCE
compare() {
    paste -d, "$work/$1.csv" "$work/$2.csv" | awk -F, -v limit="$3" 'NR > 1 {
        d = $2 - $6; d = d < 0 ? -d : d; worst = d > worst ? d : worst; n++
    }
    END { print "note: losses differ by " worst + 0; exit n != 10 || !(worst <= limit) }'
}

# The GPT on the GPU learns what the GPT on the CPU learns.
test_parity() { # RANKS [OPTION]
    local program=$dir/examples/train_gpt_cuda
    [ -x "$program" ] || skip "no $program: no cuBLAS when it was built?"
    FSDP_BACKEND=shm train cpu examples/gpt/train_gpt || die 'the CPU program failed'
    train "cuda.$1" $fsdprun "$1" $one_gpu "$program" ${2:+--$2} || die 'failed'
    compare cpu "cuda.$1" 1e-3
}

# ---- their names, and the programs --------------------------------------------------------------

result() { # NAME KIND ARGUMENT...: runs test_KIND, prints its lines
    local start out status line
    echo "[ RUN      ] gpu.$1"
    start=$(date +%s%N)
    out=$("test_$2" "${@:3}" 2>&1 </dev/null)
    status=$?
    case $status in
    0) line='[       OK ]' && grep '^note: ' <<<"$out" ;;
    77) echo "[  SKIPPED ] gpu.$1 (${out##*$'\n'})" && return ;;
    *) line='[  FAILED  ]' && echo "$out" && echo "gpu.$1: exit code $status" ;;
    esac
    echo "$line gpu.$1 ($((($(date +%s%N) - start) / 1000000)) ms)"
    return "$status"
}

# Tests that compute on the host need memory that it can read, and a GPU that has finished when a
# call returns.
program() { # TEST[:PATTERN]
    local patterns=-long_*
    [[ $1 != *:* ]] || patterns=${1#*:}:$patterns
    FSDP_CUDA_MANAGED=1 CUDA_LAUNCH_BLOCKING=1 FSDP_NCCL_CHECK=1 \
        $one_gpu "$dir/tests/${1%%:*}" "--filter=$patterns"
}

list() {
    echo 'kernels program test_cuda_kernels'
    printf 'sanitizer.%s sanitizer %s\n' {memcheck,racecheck,synccheck}{,}
    local w
    for w in 1 2 3 4; do echo "conformance.W=$w program conformance:*/nccl/processes/W=$w"; done
    for w in 1 2 3; do echo "parity.W=$w parity $w"; done
    for w in plain graph; do echo "parity.$w parity 1 $w"; done
    set -f
    for w in ${NCCL_TESTS-}; do echo "${w%%:*} program $w"; done
}

wanted() { # NAME PREFIX...
    local prefix
    [ $# != 1 ] || return 0
    for prefix in "${@:2}"; do [[ $1 != "$prefix"* ]] || return 0; done
    return 1
}

failed=0 found=0
[ "${1-}" != --list ] || { list | cut -d' ' -f1 && exit; }
set -f # patterns are no file names
while read -r name kind arguments; do
    wanted "$name" "$@" || continue
    found=1
    case $kind in
    program) program "$arguments" ;;
    *) result "$name" "$kind" $arguments ;;
    esac || failed=1
done < <(list)
[ $found = 1 ] || die "no part begins with: $*"
exit $failed
