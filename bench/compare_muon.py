#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""compare_muon.py - steps of bench_muon.c beside Muon on shards of PyTorch's FSDP2 over Gloo

    CPPFLAGS=-DBENCH_ONEDNN LDLIBS=-ldnnl \
        make GLOO=yes BUILD=build/gloo build/gloo/bench/bench_muon
    FSDP_BACKEND=gloo python3 bench/compare_muon.py [--bench build/gloo/bench/bench_muon]
        [--ranks 2] [--matrices 48] [--rounds 3] [--steps 3]

Half of the matrices are 768 x 768, half 768 x 3072; ranks have one thread each. PyTorch's matrices are
DTensors of fully_shard, one module each. What torch.optim.Muon computes is written out on them: the
momentum and the update on shards, and each rank gathers every u (full_tensor) and computes all of it.
"bfloat16": both multiply in bf16 by oneDNN, as torch.optim.Muon does; the matrices of fsdp.h travel as bf16.
"float32": both multiply in f32, fsdp.h by its own fsdp_host_gemm. The programs run in turn. A time is
the median of the rounds' medians; "ratio" is PyTorch's by ours. Needs torch and libdnnl-dev; writes
$FSDP_BUILD/compare_muon.csv.
"""
import argparse
import csv
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["OMP_NUM_THREADS"] = "1"
GOAL = 1.7  # times faster on two ranks: each of ours computes half of the matrices
DTYPES = ("bfloat16", "float32")


def newton_schulz(g, dtype):
    """As torch.optim._muon._zeropower_via_newtonschulz, in any dtype."""
    x = g.to(dtype)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    x.div_(x.norm().clamp(min=1e-7))
    for _ in range(5):
        s = x @ x.T
        x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
    return x.T if tall else x


def torch_rank(rank, world, path, matrices, steps, dtype, pipe):
    """One process of PyTorch: the median step in ms, and the bytes that it receives in one."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=world)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    layers = [torch.nn.Linear(3072 if i % 2 else 768, 768, bias=False) for i in range(matrices)]
    net = torch.nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    params = [layer.weight for layer in layers]
    gradient = [torch.randn(p.shape) for p in params]
    for p, g in zip(params, gradient):
        p.grad = distribute_tensor(g, mesh, [Shard(0)])
    buffers = [torch.zeros_like(p.to_local()) for p in params]
    number = getattr(torch, dtype)
    times = []
    for _ in range(steps + 1):
        dist.barrier()
        begin = time.monotonic_ns()
        with torch.no_grad():
            for p, b in zip(params, buffers):
                g = p.grad.to_local()
                b.lerp_(g, 1 - 0.95)
                u = p.grad._local_tensor.lerp(b, 0.95)
                whole = type(p.grad).from_local(u, mesh, [Shard(0)]).full_tensor()
                x = newton_schulz(whole, number).chunk(world)[rank].to(u.dtype)
                p.to_local().mul_(1 - 0.02 * 0.1).add_(x, alpha=-0.02)
        times.append((time.monotonic_ns() - begin) / 1e6)
    received = sum(p.numel() for p in params) * 4 * (world - 1) // world
    if rank == 0:
        pipe.send((statistics.median(times[1:]), received))
    dist.destroy_process_group()
    del net


def theirs(args, dtype):
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        ranks = [context.Process(target=torch_rank, args=(
            r, args.ranks, path, args.matrices, args.steps, dtype, there))
            for r in range(args.ranks)]
        for rank in ranks:
            rank.start()
        answer = here.recv()
        for rank in ranks:
            rank.join()
    return answer


def ours(args, dtype):
    done = subprocess.run(
        [args.bench, "--ranks", str(args.ranks), "--matrices", str(args.matrices), "--steps",
         str(args.steps), "--bf16", str(int(dtype == "bfloat16"))], stdout=subprocess.PIPE, text=True, check=True)
    row = next(csv.DictReader(done.stdout.splitlines()))
    return float(row["step_ms"]), int(row["bytes_received"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--bench", default="build/gloo/bench/bench_muon")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--matrices", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    try:
        import torch  # noqa: F401
    except ImportError:
        sys.exit("compare_muon.py: no torch: pip install torch")
    programs = {"fsdp.h": ours, "PyTorch": theirs}
    times = {(who, dtype): [] for dtype in DTYPES for who in programs}
    received = {}
    for _ in range(args.rounds):
        for row in times:
            ms, received[row] = programs[row[0]](args, row[1])
            times[row].append(ms)
    median = {row: statistics.median(values) for row, values in times.items()}
    out = os.path.join(os.environ.get("FSDP_BUILD", "."), "compare_muon.csv")
    with open(out, "w", newline="") as f:
        table = csv.writer(f)
        table.writerow(("program", "dtype", "ranks", "matrices", "step_ms", "ratio", "bytes_received"))
        for row, ms in median.items():
            line = (*row, args.ranks, args.matrices, f"{ms:.1f}",
                    f"{median['PyTorch', row[1]] / ms:.2f}", received[row])
            table.writerow(line)
            print("%-8s %-9s %2s ranks %3s matrices %10s ms  ratio %5s  %12s bytes" % line)
    for dtype in DTYPES:
        reached = median["PyTorch", dtype] / median["fsdp.h", dtype] >= GOAL
        print(f"goal {GOAL} times faster in {dtype}: {'reached' if reached else 'missed'}")


if __name__ == "__main__":
    main()
