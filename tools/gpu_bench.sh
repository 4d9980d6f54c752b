#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# gpu_bench.sh - the numbers of `make gpu-bench`: prints them and writes $FSDP_BUILD/bench_gpu.csv.
#
#   tools/gpu_bench.sh [--small]    --small: sizes for a trial, whose numbers mean nothing
#
# FSDP_BUILD is the directory of the build with NCCL. Several ranks share the first GPU: what their
# collectives take says nothing about GPUs that are connected.
set -uo pipefail
dir=${FSDP_BUILD:?run this by: make gpu-bench} csv=$FSDP_BUILD/bench_gpu.csv small=''
case ${1-} in
--small) small=$1 ;;
?*) echo "usage: ${0##*/} [--small]" >&2 && exit 2 ;;
esac
export FSDP_BACKEND=nccl
GPU_NAME=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null |
    sed -n '1s/, / driver /p')
export GPU_NAME
rm -f "$csv"

failed=0
"$dir/bench/bench_gpu" $small || failed=1
for ranks in 2 3 4; do
    tools/fsdprun -n $ranks tools/one_gpu.sh "$dir/bench/bench_gpu" $small || failed=1
done

# Seconds of a step without its first ones, which warm up: train NAME OPTION...
gpt='--steps 60 --layers 12 --heads 12 --channels 768 --context 1024 --batch 8 --sample 0'
[ -z "$small" ] ||
    gpt='--steps 12 --layers 2 --heads 2 --channels 32 --context 32 --batch 2 --sample 0'
train() {
    "$dir/examples/train_gpt_cuda" $gpt "${@:2}" --csv "$dir/$1.csv" >"$dir/$1.log" 2>&1 ||
        { tail -n 5 "$dir/$1.log" && return 1; }
    awk -F, 'NR > 1 && !begin && $1 >= 5 { begin = $1; from = $4 }
             NR > 1 { end = $1; to = $4 }
             END { print (to - from) / (end - begin) }' "$dir/$1.csv"
}
median() { tr ' ' '\n' <<<"$*" | sort -g | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }

# The trainer with and without the library on one rank, in turn.
overhead() { # [OPTION [OPTION-WITH]]: of both, and of the one with the library
    local with='' without='' run
    for run in 1 2 3; do
        with+=" $(train with $1 ${2-})" && without+=" $(train without --plain $1)" || return
    done
    with=$(median $with) without=$(median $without)
    awk -v day="$(date +%F)" -v gpu="${GPU_NAME:-CUDA device}" -v with="$with" \
        -v without="$without" -v what="step of the GPT${1:+ $1}${2:+ $2} beside --plain" \
        -v command="train_gpt_cuda $gpt $*" \
        -v goal="$([ -n "${2-}" ] || echo 1.02)" 'BEGIN {
        printf "%s: %.3f ms beside %.3f, ratio %.3f\n", what, with * 1e3, without * 1e3,
               with / without >"/dev/stderr"
        printf "%s,%s,%s,%s,%.4f,ms,%.4f,%.4f,%s\n", day, gpu, command, what, with * 1e3,
               without * 1e3, with / without, goal
    }' >>"$csv"
}
if [ -x "$dir/examples/train_gpt_cuda" ]; then
    overhead '' && overhead --bf16 && overhead '' --graph || failed=1
else
    echo 'skipped: no train_gpt_cuda (no cuBLAS when it was built?)'
fi
echo "$csv"
exit $failed
