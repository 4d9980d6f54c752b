#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# gpu_test.sh - the tests of `make gpu-test`, in parts of at most eight minutes, in the order of
# what a first contact with a GPU should learn. Goes on behind a failure; needs no network.
#
#   tools/gpu_test.sh [PART[/NAME]...]   the parts, or what of a part begins with NAME; none: all
#   tools/gpu_test.sh --list             their names
#
#   first      what the backend takes for granted of CUDA, and two ranks of NCCL alone
#   kernels    the kernels beside the CPU's code
#   parity     losses of the GPT beside the CPU's: one rank, without the library, as a CUDA graph
#   sanitizer  compute-sanitizer on the kernels
#   ranks      several ranks share the first GPU: conformance, losses
#   nets       trainings of several ranks on the first GPU
#   faults     ranks that die, stall or differ
#   bench      tools/gpu_bench.sh
#   multi      a GPU for each rank, where there are several
#
# FSDP_BUILD is the directory of the build with NCCL. Prints a line PASS, FAIL or SKIP for each
# name, and a total at the end, also into $FSDP_BUILD/gpu_test/summary.txt; beside it is the output
# of each. FSDP_GPU_PART_S: seconds for a part (480). FSDP_GPUS: how many there are.
set -uo pipefail
dir=${FSDP_BUILD:?run this by: make gpu-test} work=$FSDP_BUILD/gpu_test
summary=$work/summary.txt
one_gpu=tools/one_gpu.sh fsdprun='tools/fsdprun -n' limit=${FSDP_GPU_PART_S:-480}
gpus=${FSDP_GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')}
export TEST_TIMEOUT_MULT=${TEST_TIMEOUT_MULT:-10} # GPU contexts take turns
export FSDP_BACKEND=nccl
mkdir -p "$work"

skip() { echo "$*" && exit 77; }
die() { echo "$*" && exit 1; }

# ---- kinds of tests: each ends with 0, 77 (skipped: its last line is the reason) or another status

# A test program; several ranks share the first GPU. What they compute on the host needs memory that
# it can read.
kind_program() { # TEST[:PATTERN]
    local patterns=''
    [[ $1 != *:* ]] || patterns=${1#*:}
    [ -x "$dir/tests/${1%%:*}" ] || skip "no $dir/tests/${1%%:*}"
    FSDP_CUDA_MANAGED=1 FSDP_NCCL_CHECK=1 $one_gpu "$dir/tests/${1%%:*}" --tags=gpu:nccl \
        ${patterns:+"--filter=$patterns"}
}

# The same, with a GPU for each rank.
kind_apart() { # RANKS TEST[:PATTERN]
    [ "$gpus" -ge "$1" ] || skip "needs $1 GPUs, there are $gpus"
    one_gpu='' kind_program "$2"
}

# The tools of compute-sanitizer on the kernels' own tests.
kind_sanitizer() { # TOOL
    local log=$work/$1.log
    command -v compute-sanitizer >/dev/null || skip 'no compute-sanitizer'
    compute-sanitizer --tool "$1" --target-processes all \
        "$dir/tests/test_cuda_kernels" --tags=gpu >"$log" 2>&1 ||
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
kind_parity() { # RANKS [OPTION]
    local program=$dir/examples/train_gpt_cuda
    [ -x "$program" ] || skip "no $program: no cuBLAS when it was built?"
    [ -s "$work/cpu.csv" ] || FSDP_BACKEND=shm train cpu examples/gpt/train_gpt ||
        die 'the CPU program failed'
    train "cuda.$1" $fsdprun "$1" $one_gpu "$program" ${2:+--$2} || die 'failed'
    compare cpu "cuda.$1" 1e-3
}

# A GPU for each rank.
kind_parity_apart() { # RANKS
    [ "$gpus" -ge "$1" ] || skip "needs $1 GPUs, there are $gpus"
    one_gpu='' kind_parity "$1"
}

kind_bench() { tools/gpu_bench.sh ${FSDP_GPU_SMALL:+--small}; }

# ---- their names --------------------------------------------------------------------------------

list() { # PART NAME KIND ARGUMENT...
    local w t some
    echo 'first cuda program test_gpu_first:cuda.*'
    echo 'first pair program test_gpu_first:nccl_alone.*'
    echo 'kernels kernels program test_cuda_kernels'
    echo 'parity W=1 parity 1'
    for w in plain graph; do echo "parity $w parity 1 $w"; done
    for t in memcheck racecheck synccheck; do echo "sanitizer $t sanitizer $t"; done
    for w in 1 2 3 4; do
        echo "ranks conformance.W=$w program conformance:*/nccl/processes/W=$w"
    done
    for w in 2 3; do echo "ranks parity.W=$w parity $w"; done
    for t in $(tools/variants.sh programs nccl); do
        case $t in *_faults*) ;; *) echo "nets $t program $t" ;; esac
    done
    echo 'faults agree program test_agree'
    echo 'faults replicas program test_replicate_faults'
    for some in absent abort lost mismatch; do
        echo "faults conformance.$some program conformance:*$some*/nccl/processes/W=3"
    done
    echo 'bench bench bench'
    for w in 2 4; do
        echo "multi conformance.W=$w apart $w conformance:*/nccl/*/W=$w"
        echo "multi parity.W=$w parity_apart $w"
    done
    echo 'multi edges apart 4 test_edges'
}

wanted() { # PART NAME CHOICE...
    local choice
    [ $# != 2 ] || return 0
    for choice in "${@:3}"; do
        [ "$1" = "${choice%%/*}" ] || continue
        [[ $choice != */* || $2 = "${choice#*/}"* ]] && return 0
    done
    return 1
}

say() { echo "$*" | tee -a "$summary"; }

# ---- the run ------------------------------------------------------------------------------------

if [ "${1-}" = --one ]; then # a job with a limit: runs a kind
    shift && "kind_$@"
    exit
fi
[ "${1-}" != --list ] || { list | awk '{print $1 "/" $2}' && exit; }
set -f # patterns are no file names
passed=0 failed=0 skipped=0 now='' part_end=0
: >"$summary"
rm -f "$work/cpu.csv"
while read -r part name kind arguments; do
    wanted "$part" "$name" "$@" || continue
    [ "$part" = "$now" ] || { now=$part part_end=$((SECONDS + limit)); }
    log=$work/$part.$name.log start=$SECONDS left=$((part_end - SECONDS))
    if [ $left -gt 0 ]; then
        timeout -k 5 $left "$0" --one "$kind" $arguments >"$log" 2>&1 </dev/null
        status=$?
    else
        echo "the part's $limit s are over" >"$log"
        status=77
    fi
    grep -E '^(note: |\[     NOTE \])' "$log" | sed 's/^.*NOTE \] */note: /; s/^/     /'
    ok=$(grep -c '^\[       OK \]' "$log") out=$(grep -c '^\[  SKIPPED \].*(' "$log")
    line="$part/$name ($((SECONDS - start)) s"
    [ "$ok$out" = 00 ] || line+="; $ok tests, $out skipped"
    case $status in
    0) passed=$((passed + 1)) && say "PASS $line)" ;;
    77) skipped=$((skipped + 1)) && say "SKIP $part/$name ($(tail -n 1 "$log"))" ;;
    *)
        failed=$((failed + 1))
        [ $status != 124 ] && [ $status != 137 ] || line+="; over the part's $limit s"
        say "FAIL $line; $log)"
        { grep -E '^\[  FAILED  \].*ms\)|^[a-z_0-9|/]*\.[ch]:[0-9]+:' "$log" ||
            tail -n 15 "$log"; } |
            head -n 20 | cut -c1-300 | sed 's/^/     /'
        ;;
    esac
done < <(list)
[ $((passed + failed + skipped)) != 0 ] || die "no part or name begins so: $*"
say "gpu-test: $passed passed, $failed failed, $skipped skipped, $SECONDS s"
[ $failed = 0 ]
