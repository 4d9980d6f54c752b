#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""compare_ddp.py - the passes of bench_replicate.c in PyTorch's DistributedDataParallel over Gloo,
both programs in turn in one run: losses and gradients must be equal, times are compared

    FSDP_BACKEND=gloo python3 bench/compare_ddp.py [--bench build/bench/bench_replicate]
        [--ranks 2,4] [--kib 16,256] [--rounds 3] [--steps 30] [--batch 1]

The net is that of bench_replicate.c: 160 layers y = x * w with one parameter of --kib KiB each, f32,
one compute thread per rank. A row stands beside each of its rows:
  plain    no DDP: each rank trains a copy of its own
  units    bucket_cap_mb so small that each parameter has a bucket
  buckets  DDP's defaults, 1 MiB and then 25 MiB
  small    bucket_cap_mb=1
  one      bucket_cap_mb so large that there is one bucket
  buckets with views    the defaults with gradient_as_bucket_view; ours is that of "buckets"
A time is a forward and a backward of rank 0: median over steps behind those in which DDP rebuilds its
buckets, then over rounds. "ratio" is PyTorch's time by ours. "extra" is what a row takes more than
plain, and its ratio leaves the arithmetic of both out (0: the machine was too busy to tell). Needs torch; writes
$FSDP_BUILD/compare_ddp.csv. Exit status 1: losses or gradients differ by more than --tolerance.
"""
import argparse
import csv
import os
import statistics
import subprocess
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"
from fsdp_step import Torch  # noqa: E402: it asks for one thread, too

LAYERS = 160
WARM_UP = 5
# Row, the row of bench_replicate beside it, arguments of DDP or None.
ROWS = (
    ("plain", "plain", None),
    ("units", "units", {"bucket_cap_mb": 1e-3}),
    ("buckets", "buckets", {}),
    ("buckets with views", "buckets", {"gradient_as_bucket_view": True}),
    ("small", "small", {"bucket_cap_mb": 1}),
    ("one", "one", {"bucket_cap_mb": 1 << 20}),
)
GOAL = {("buckets", 16): 2.0}  # times faster; of (row, KiB) over Gloo


def net_class():
    """The net as a module; in a function, because torch is for the ranks alone."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, numel):
            super().__init__()
            place = torch.arange(numel, dtype=torch.int64)
            self.w = nn.ParameterList(
                1.0 + ((place * 7 + layer * 13) % 64 - 32).float() / 8192.0
                for layer in range(LAYERS))

        def forward(self, x):
            for w in self.w:
                x = x * w
            return x

    return Net


def train(rank, world, kib, batch, steps, ddp):
    """(median pass in microseconds, loss, checksum of the gradients, number of buckets)."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    numel = kib * 256
    net = net_class()(numel)
    model = net if ddp is None else DistributedDataParallel(net, **ddp)
    place = torch.arange(numel, dtype=torch.int64)
    samples = torch.arange(rank * batch, (rank + 1) * batch, dtype=torch.int64)[:, None]
    x = ((place * 5 + samples * 11) % 128 + 64).float() / 128.0
    passes = []
    dist.barrier()
    for _ in range(steps + WARM_UP):
        model.zero_grad()
        begin = time.monotonic_ns()
        loss = model(x).mean()
        loss.backward()
        passes.append((time.monotonic_ns() - begin) / 1e3)
    weight = (place % 7 + 1).double()
    checksum = sum((w.grad.double() * weight).sum().item() * (layer + 1)
                   for layer, w in enumerate(net.w))
    buckets = 0
    if ddp is not None:
        data = model._get_ddp_logging_data()
        buckets = len(data["rebuilt_bucket_sizes"].split(","))
    return statistics.median(passes[WARM_UP:]), loss.item(), checksum, buckets


def torch_rank(rank, world, path, pipe):
    """One process of PyTorch: trains what it is asked for until it is asked for nothing."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=world)
    while (request := pipe.recv()) is not None:
        pipe.send(train(rank, world, *request))
    dist.destroy_process_group()


def ours(args, world, kib):
    """{row: its line of bench_replicate's table}."""
    done = subprocess.run(
        [args.bench, "--csv", "--ranks", str(world), "--kib", str(kib), "--rounds", "1", "--steps",
         str(args.steps), "--batch", str(args.batch)],
        stdout=subprocess.PIPE, text=True, check=True)
    return {row["row"]: row for row in csv.DictReader(done.stdout.splitlines())}


def difference(a, b):
    return abs(a - b) / abs(b)


def measure(args, torch, world, kib):
    """The lines of the table for one size, medians over the rounds."""
    seen = {row: [] for row, _, _ in ROWS}
    for _ in range(args.rounds):
        lines = ours(args, world, kib)
        for row, beside, ddp in ROWS:
            ranks = torch.ask((kib, args.batch, args.steps, ddp))
            line = lines[beside]
            seen[row].append({
                "us": float(line["pass_us"]), "torch_us": ranks[0][0],
                "buckets": int(line["buckets"]), "torch_buckets": ranks[0][3],
                "difference": max(
                    difference(float(line["loss"]), statistics.fmean(r[1] for r in ranks)),
                    0 if ddp is None else difference(float(line["checksum"]), ranks[0][2]))})
    plain = [statistics.median(x[key] for x in seen["plain"]) for key in ("us", "torch_us")]
    for row, _, _ in ROWS:
        us, torch_us = (statistics.median(x[key] for x in seen[row]) for key in ("us", "torch_us"))
        ratios = sorted(x["torch_us"] / x["us"] for x in seen[row])
        extra, torch_extra = us - plain[0], torch_us - plain[1]
        goal = GOAL.get((row, kib)) if os.environ.get("FSDP_BACKEND") == "gloo" else None
        ratio = statistics.median(ratios)
        yield {"ranks": world, "kib": kib, "row": row, "buckets": seen[row][0]["buckets"],
               "torch_buckets": seen[row][0]["torch_buckets"], "us": us, "torch_us": torch_us,
               "ratio": ratio, "ratio_min": ratios[0], "ratio_max": ratios[-1], "extra_us": extra,
               "torch_extra_us": torch_extra,
               "extra_ratio": torch_extra / extra if min(extra, torch_extra) > 0 else 0.0,
               "goal": goal or "",
               "verdict": "" if goal is None else "reached" if ratio >= goal else "missed",
               "difference": max(x["difference"] for x in seen[row])}


def show(line):
    goal = f"(goal {line['goal']}: {line['verdict']})" if line["goal"] else ""
    print(f"{line['ranks']:>2} {line['kib']:>4} KiB  {line['row']:<18} {line['buckets']:>4} "
          f"{line['torch_buckets']:>4} {line['us']:>9.0f} {line['torch_us']:>9.0f} "
          f"{line['ratio']:>6.2f} [{line['ratio_min']:.1f}, {line['ratio_max']:.1f}] "
          f"{line['extra_us']:>9.0f} {line['torch_extra_us']:>9.0f} {line['extra_ratio']:>6.2f} "
          f"{line['difference']:>9.1e} {goal}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", default="build/bench/bench_replicate")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--kib", default="16,256", help="of a parameter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative")
    args = parser.parse_args()
    try:
        import torch  # noqa: F401
    except ImportError:
        print("skipped: this python has no torch")
        return 0
    path = os.path.join(os.environ.get("FSDP_BUILD", "."), "compare_ddp.csv")
    print(f"{path}\nload of this machine: {os.getloadavg()[0]:.1f}\n"
          "                                 buckets   us ours     torch  ratio [min, max]    "
          "extra     torch  ratio     diff.")
    lines = []
    for world in (int(text) for text in args.ranks.split(",")):
        torch_ranks = Torch(world, torch_rank)
        for kib in (int(text) for text in args.kib.split(",")):
            for line in measure(args, torch_ranks, world, kib):
                lines.append(line)
                show(line)
        torch_ranks.close()
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, lines[0].keys())
        table.writeheader()
        table.writerows(lines)
    worst = max(line["difference"] for line in lines)
    print(f"losses and gradients differ by at most {worst:.1e}, relative "
          f"(allowed {args.tolerance:.0e}); load now: {os.getloadavg()[0]:.1f}")
    return worst > args.tolerance


if __name__ == "__main__":
    sys.exit(main())
