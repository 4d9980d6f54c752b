#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# gpu_goals.sh - which goals for GPUs hold on this machine's GPU, within six minutes: make gpu-goals
#
#   tools/gpu_goals.sh [--small]    --small: a trial of what is built, whose numbers mean nothing
#
# FSDP_BUILD is the directory of the build with NCCL, which it makes. A line for each goal: holds,
# missed, or unknown (with the reason). The exit status is 1 if a goal is missed.
set -uo pipefail
dir=${FSDP_BUILD:?run this by: make gpu-goals} small=${1-} missed=0
since=$(date +%s) log=$dir/gpu_goals.log
took() { echo $(($(date +%s) - since)); }
within() { timeout -k 5 $((360 - $(took) > 1 ? 360 - $(took) : 1)) "$@"; }
say() { # holds|missed|unknown TEXT
    [ "$1" != missed ] || missed=1
    printf '%-8s %s\n' "$1" "$2"
}
check() { # TEXT COMMAND...
    local text=$1
    shift
    within "$@" >"$log" 2>&1
    case $? in
    0) # what was skipped does not hold
        if grep -qE '^\[       OK \]|^PASS ' "$log"; then say holds "$text"
        else say unknown "$text: $(tail -n 1 "$log")"; fi ;;
    124 | 137) say unknown "$text: no time was left" ;;
    *) say missed "$text: $(grep -m 1 -E '^FAIL |^\[  FAILED' "$log" || tail -n 1 "$log")" ;;
    esac
}
export FSDP_BUILD FSDP_BACKEND=nccl

if [ -z "$small" ]; then
    tools/find_nccl.sh -g -o "$dir/nccl.mk" || exit
    make -s -j "$(nproc)" --no-print-directory BUILD="$dir" NCCL=yes gpu-all tools/fsdprun \
        "$dir"/tests/{test_cuda_kernels,conformance} || exit
    say "$([ "$(took)" -le 40 ] && echo holds || echo missed)" "build: $(took) s, at most 40"
fi
check 'copy.clipped, and all other kernels: equal to the CPU' \
    "$dir/tests/test_cuda_kernels" --filter='*:-long*'
check 'a rank that closes is named: PEER_LOST' tools/gpu_test.sh faults/conformance.W=2

# Rows date,device,command,what,value,unit,beside,ratio,goal. A rate is at least its goal.
rows() { # FILE
    awk -F, 'NR > 1 && $9 != "" {
        holds = $6 == "GB/s" ? $8 >= $9 : $8 <= $9
        printf "%s|%s: %s %s, ratio %s, goal %s\n", holds ? "holds" : "missed", $4, $5, $6, $8, $9
    }' "$1"
}
rm -f "$dir/bench_gpu.csv" "$dir/compare_torch_gpu.csv"
within "$dir/bench/bench_gpu" $small >"$log" 2>&1 || say unknown "kernels: $(tail -n 1 "$log")"
while IFS='|' read -r result text; do say "$result" "$text"; done < <(rows "$dir/bench_gpu.csv")

within python3 bench/compare_torch_gpu.py --program "$dir/examples/train_gpt_cuda" \
    --numbers bf16 ${small:---steps 30} $small >"$log" 2>&1
if [ -s "$dir/compare_torch_gpu.csv" ]; then
    while IFS='|' read -r result text; do say "$result" "$text"; done < <(
        rows "$dir/compare_torch_gpu.csv"
        awk -F, '$4 ~ /bf16 plain/ { plain = $5 } $4 ~ /bf16 sharded/ { with = $5 }
            END { if (plain) printf "%s|sharding on one rank, bf16: %.2f %% longer, at most 1.5\n",
                             with <= 1.015 * plain ? "holds" : "missed", 100 * (with / plain - 1) }
            ' "$dir/compare_torch_gpu.csv")
else
    say unknown "a step of the GPT beside PyTorch: $(tail -n 1 "$log")"
fi
echo "after $(took) s"
exit $missed
