#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# gpu_test.sh - the tests of `make gpu-test`: first those that tell most of a GPU. Goes on behind a
# failure; needs no network.
#
#   tools/gpu_test.sh [--build] [--minutes=N] [PART[/NAME]...]   the parts, or what of a part
#                               begins with NAME; none: all. N: only what ends within N minutes
#   tools/gpu_test.sh --list    their names
#   tools/gpu_test.sh --table   lines PART NAME SECONDS HOW KIND ARGUMENT...; SECONDS are guessed
#                               for an H200; HOW: alone, or beside others
#   tools/gpu_test.sh --plan SECONDS JOBS   of a table at the input: run or left, PART, NAME
#
#   first      what the backend takes for granted of CUDA, and two ranks of NCCL alone
#   kernels    the kernels beside the CPU's code
#   parity     losses beside the CPU's: the GPT, also without the library or as a graph; Llamas
#   multi      a GPU for each rank, where there are several
#   ranks      several ranks share the first GPU: losses, conformance
#   faults     ranks that die, stall or differ
#   nets       trainings of several ranks on the first GPU
#   sanitizer  compute-sanitizer on the kernels
#   bench      tools/gpu_bench.sh
#
# FSDP_BUILD is the directory of the build with NCCL. Prints a line PASS, FAIL or SKIP for each
# name, and a total at the end, also into $FSDP_BUILD/gpu_test/summary.txt; beside it is the output
# of each. FSDP_GPUS: how many there are. FSDP_GPU_JOBS: how many names run at a time, else one for
# four cores and 12 GiB of the GPU. FSDP_GPU_SINCE: when the minutes began, in seconds since 1970.
set -uo pipefail

skip() { echo "$*" && exit 77; }
die() { echo "$*" && exit 1; }

# ---- the table ----------------------------------------------------------------------------------

gpus=${FSDP_GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')}

# Tests with ranks took 1.4 to 2 s on an H200, one after the other. Of each program of `nets`: how
# many it has.
tests_of() {
    case $1 in
    test_replicate) echo 102 ;; test_plan) echo 63 ;; test_fully_shard_init) echo 35 ;;
    test_fully_shard_training) echo 49 ;; test_fully_shard_comm) echo 39 ;;
    test_features) echo 5 ;; test_edges) echo 34 ;; *) echo 16 ;;
    esac
}

table() {
    local w t of only but
    echo 'first cuda 10 alone program test_gpu_first:cuda.*'
    echo 'first pair 10 alone program test_gpu_first:nccl_alone.*'
    echo 'kernels kernels 15 alone program test_cuda_kernels'
    echo 'parity W=1 6 beside parity 1'
    for w in 2 4; do
        [ "$gpus" -lt 2 ] || multi $w
    done
    for w in 2 3; do echo "ranks parity.W=$w 8 beside parity $w"; done
    echo 'parity llama 20 beside llama'
    for w in plain graph bf16 tf32; do echo "parity $w 6 beside parity 1 $w"; done
    for w in 2 3 1 4; do
        of=nccl/processes/W=$w only='' but=''
        for t in absent abort lost mismatch; do only+=":*$t*/$of" but+=":-*$t*/$of"; done
        [[ $w = [14] ]] || echo "faults conformance.W=$w 20 beside program conformance$only"
        echo "ranks conformance.W=$w 40 beside program conformance:*/$of$but"
    done
    echo 'faults agree 70 beside program test_agree'
    echo 'faults replicas 26 beside program test_replicate_faults'
    for t in $(tools/variants.sh programs nccl); do
        case $t in
        *_faults* | test_agree) ;;
        *) echo "nets $t $(($(tests_of "$t") * 17 / 10)) beside program $t" ;;
        esac
    done | sort -s -k 3,3nr # the longest ones first, as others run beside them
    for t in memcheck racecheck synccheck; do echo "sanitizer $t 120 alone sanitizer $t"; done
    echo 'bench bench 120 alone bench'
    [ "$gpus" -ge 2 ] || for w in 2 4; do multi $w; done
}
multi() { # RANKS
    local some=1 # it is skipped
    [ "$gpus" -lt "$1" ] || some=50
    echo "multi parity.W=$1 $some alone parity_apart $1"
    echo "multi conformance.W=$1 $some alone apart $1 conformance:*/nccl/*/W=$1"
    [ "$1" = 2 ] || echo "multi edges $some alone apart 4 test_edges"
}

# What of a table ends in time, in its order: names that run beside others share the time.
plan() { # SECONDS JOBS
    awk -v left="$1" -v jobs="$2" '{
        costs = $4 == "alone" ? $3 : $3 / jobs
        fits = costs <= left
        if (fits) left -= costs
        print fits ? "run" : "left", $1, $2
    }'
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
chosen() { # CHOICE...: their lines of the table
    local line part name
    while read -r line; do
        read -r part name _ <<<"$line"
        ! wanted "$part" "$name" "$@" || echo "$line"
    done < <(table)
}

# So many contexts at a time as cores and memory carry.
jobs_here() {
    local cores mib
    cores=$(nproc 2>/dev/null || echo 4)
    mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
    awk -v cores="$cores" -v mib="${mib:-0}" 'BEGIN {
        jobs = int(cores / 4)
        if (mib + 0 && mib / 12288 < jobs) jobs = int(mib / 12288)
        print jobs > 1 ? jobs : 1
    }'
}

set -f # patterns are no file names
case ${1-} in
--list) table | awk '{print $1 "/" $2}' && exit ;;
--table) table && exit ;;
--plan) plan "$2" "$3" && exit ;;
esac

dir=${FSDP_BUILD:?run this by: make gpu-test} work=$FSDP_BUILD/gpu_test
summary=$work/summary.txt
one_gpu=tools/one_gpu.sh fsdprun='tools/fsdprun -n'
export TEST_TIMEOUT_MULT=${TEST_TIMEOUT_MULT:-10} # GPU contexts take turns
export FSDP_BACKEND=nccl
mkdir -p "$work"

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

# Once for all who compare.
cpu_losses() {
    exec 8>"$work/cpu.lock" && flock 8
    [ -s "$work/cpu.csv" ] || FSDP_BACKEND=shm train cpu examples/gpt/train_gpt
    local status=$?
    exec 8>&-
    return $status
}

# The GPT on the GPU learns what the GPT on the CPU learns.
kind_parity() { # RANKS [OPTION]
    local program=$dir/examples/train_gpt_cuda
    [ -x "$program" ] || skip "no $program: no cuBLAS when it was built?"
    cpu_losses || die 'the CPU program failed'
    train "cuda.$1" $fsdprun "$1" $one_gpu "$program" ${2:+--$2} || die 'failed'
    compare cpu "cuda.$1" 1e-3
}

# A GPU for each rank.
kind_parity_apart() { # RANKS
    [ "$gpus" -ge "$1" ] || skip "needs $1 GPUs, there are $gpus"
    one_gpu='' kind_parity "$1"
}

# Golden Llamas on one rank learn what the CPU program learns.
kind_llama() {
    local test=${dir%/nccl}/tests/test_llama_cuda # it runs both programs
    [ -x "$test" ] || skip "no $test"
    [ -x "$dir/examples/train_llama_cuda" ] || skip 'no train_llama_cuda: no cuBLAS?'
    FSDP_BUILD=$dir $one_gpu "$test" --filter='llama_cuda.parity/*,1'
}

kind_bench() { tools/gpu_bench.sh ${FSDP_GPU_SMALL:+--small}; }

# ---- the run ------------------------------------------------------------------------------------

if [ "${1-}" = --one ]; then # a job with a limit: runs a kind
    shift && "kind_$@"
    exit
fi
since=${FSDP_GPU_SINCE:-$(date +%s)}
if [ "${1-}" = --build ]; then
    tools/find_nccl.sh -g -o "$dir/nccl.mk" && make -s -j "$(nproc)" --no-print-directory \
        BUILD="${dir%/nccl}" build-nccl examples/gpt/train_gpt examples/llama/train_llama \
        tools/fsdprun "${dir%/nccl}/tests/test_llama_cuda" || exit
    echo "built within $(($(date +%s) - since)) s" && shift
fi
minutes=''
[[ ${1-} != --minutes=* ]] || { minutes=${1#*=} && shift; }
[[ $minutes =~ ^[0-9]*$ ]] || die "--minutes=$minutes: expected a number"
jobs=${FSDP_GPU_JOBS:-$(jobs_here)} hang=480
now() { echo $(($(date +%s) - since)); }
seconds=$((${minutes:-100000} * 60 - $(now))) SECONDS=0 # of the tests alone from here on
say() { echo "$*" | tee -a "$summary"; }

# Runs a name, and says how it went.
run() { # PART NAME SECONDS HOW KIND ARGUMENT...
    local log=$work/$1.$2.log start=$SECONDS room=$hang status ok out line
    [ $((seconds - SECONDS)) -ge $room ] || room=$((seconds - SECONDS))
    [ $room -gt 0 ] || { say "LEFT $1/$2" && return; }
    timeout -k 5 $room "$0" --one "${@:5}" >"$log" 2>&1 </dev/null
    status=$?
    exec 9>"$work/lock" && flock 9 # one speaks at a time
    grep -E '^(note: |\[     NOTE \])' "$log" | sed 's/^.*NOTE \] */note: /; s/^/     /'
    ok=$(grep -c '^\[       OK \]' "$log") out=$(grep -c '^\[  SKIPPED \].*(' "$log")
    line="$1/$2 ($((SECONDS - start)) s"
    [ "$ok$out" = 00 ] || line+="; $ok tests, $out skipped"
    case $status in
    0) say "PASS $line)" ;;
    77) say "SKIP $1/$2 ($(tail -n 1 "$log"))" ;;
    *)
        [ $status != 124 ] && [ $status != 137 ] || line+="; over its $room s"
        say "FAIL $line; $log)"
        { grep -E '^\[  FAILED  \].*ms\)|^[a-z_0-9|/]*\.[ch]:[0-9]+:' "$log" ||
            tail -n 15 "$log"; } |
            head -n 20 | cut -c1-300 | sed 's/^/     /'
        ;;
    esac
}

: >"$summary"
rm -f "$work/cpu.csv"
chosen "$@" >"$work/table"
[ -s "$work/table" ] || die "no part or name begins so: $*"
plan "$seconds" "$jobs" <"$work/table" >"$work/plan"
under_way=0
while read -r what part name <&3 && read -r line <&4; do
    [ "$what" = run ] || { say "LEFT $part/$name" && continue; }
    read -r _ _ _ how _ <<<"$line"
    # Beside others waits for a place, alone for all.
    while [ $under_way -gt 0 ] && { [ "$how" = alone ] || [ $under_way -ge "$jobs" ]; }; do
        wait -n
        under_way=$((under_way - 1))
    done
    # shellcheck disable=SC2086
    run $line &
    under_way=$((under_way + 1))
    [ "$how" != alone ] || { wait && under_way=0; }
done 3<"$work/plan" 4<"$work/table"
wait
count() { grep -c "^$1 " "$summary"; }
left=$(sed -n 's/^LEFT //p' "$summary" | tr '\n' ' ')
[ -z "$left" ] || say "left out for time: $left"
say "gpu-test: $(count PASS) passed, $(count FAIL) failed, $(count SKIP) skipped," \
    "$(count LEFT) left out for time, $(now) s"
[ "$(count FAIL)" = 0 ]
