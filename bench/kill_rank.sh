#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# kill_rank.sh - the time from `kill -9` of one rank to the end of the job, while the GPT trains.
#
#   bench/kill_rank.sh [RUNS [RANKS]]    5 runs, 4 ranks; `make examples` builds the program
#
# The victim is the last rank. Prints the time and the error text of each run, then the median.
set -uo pipefail
runs=${1:-5} ranks=${2:-4} program=examples/gpt/train_gpt times=''
[ -x "$program" ] || { echo "no $program: make examples" && exit 1; }
dir=$(mktemp -d) && trap 'rm -rf "$dir"' EXIT
for ((run = 1; run <= runs; run++)); do
    "$program" --ranks "$ranks" --steps 1000000 --sample 0 >"$dir/out" 2>"$dir/err" &
    job=$!
    until grep -q '^step' "$dir/out"; do
        kill -0 $job 2>/dev/null || { cat "$dir/err" && exit 1; }
        sleep 0.05
    done
    victim=$(tr ' ' '\n' <"/proc/$job/task/$job/children" | grep . | tail -n 1)
    begin=$(date +%s%N)
    kill -9 "$victim" && wait $job
    ms=$((($(date +%s%N) - begin) / 1000000)) times+="$ms "
    echo "run $run: $ms ms: $(grep -m 1 'has died' "$dir/err")"
done
echo "median: $(tr ' ' '\n' <<<"$times" | grep . | sort -n | sed -n "$(((runs + 1) / 2))p") ms"
