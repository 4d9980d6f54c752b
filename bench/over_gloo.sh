#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# over_gloo.sh - the benchmarks of `make bench-gloo`: over Gloo, and beside PyTorch where $PYTHON
# (python3) has it. FSDP_BUILD is the directory of the build with Gloo.
set -euo pipefail
python=${PYTHON:-python3} bench=${FSDP_BUILD:?run this by: make bench-gloo}/bench
"$bench/bench_comm"
export FSDP_BACKEND=gloo
"$bench/bench_step"
"$bench/bench_replicate"
"$bench/bench_plan" --steps
"$python" -c 'import torch' 2>/dev/null || { echo "skipped: $python has no torch" && exit 0; }
"$python" bench/compare_torch.py --bench "$bench/bench_comm"
"$python" bench/fsdp_step.py --bench "$bench/bench_step"
"$python" bench/compare_ddp.py --bench "$bench/bench_replicate"
"$python" bench/tp_step.py --bench "$bench/bench_tp_step"
