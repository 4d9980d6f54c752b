#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""tp_step - an MLP under tensor parallelism beside PyTorch's parallelize_module, in turn.

  bench/tp_step.py [--bench build/gloo/bench/bench_tp_step] [--ranks 2] [--widths 64,1024] ...

Both take the same values (noise() of bench_tp_step.c) and one thread for each rank. "pass" is
forward and backward; "plain" is the same products of the same sizes without communication; "extra"
is the median of the difference of two passes one behind the other. Set FSDP_BACKEND=gloo for the
transport that PyTorch uses. Needs torch and numpy; writes $FSDP_BUILD/tp_step.csv. Exit status 1:
losses differ by more than --tolerance.
"""
import argparse
import csv
import os
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from fsdp_step import Torch, noise  # noqa: E402

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"


def values(which, shape, scale):
    """Elements of a whole tensor: weight() and feed() of bench_tp_step.c."""
    import numpy as np
    import torch

    place = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(which << 32)
    return torch.from_numpy((noise(place) / scale).astype(np.float32).reshape(shape))


def make_mlp(width, part):
    """part: of the hidden channels, for products without communication."""
    import torch
    from torch import nn

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.net1 = nn.Linear(width, 4 * width // part)
            self.net2 = nn.Linear(4 * width // part, width, bias=False)

        def forward(self, x):
            return self.net2(torch.tanh(self.net1(x)))

    mlp, scale = Mlp(), width ** 0.5
    if part == 1:
        mlp.net1.weight.data = values(0, (4 * width, width), scale)
        mlp.net1.bias.data = values(2, (4 * width,), scale)
        mlp.net2.weight.data = values(1, (width, 4 * width), scale)
    return mlp


def torch_rank(rank, world, path, pipe):
    """One process of PyTorch: (width, tokens, sequence, steps), until it is asked for nothing."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                                   parallelize_module)

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    while (request := pipe.recv()) is not None:
        width, tokens, sequence, steps = request
        outside = Shard(0) if sequence else Replicate()
        mlp, plain = make_mlp(width, 1), make_mlp(width, world)
        parallelize_module(mlp, mesh, {"net1": ColwiseParallel(input_layouts=outside),
                                       "net2": RowwiseParallel(output_layouts=outside)})
        whole = values(3, (tokens, width), 1)
        x = whole.chunk(world)[rank].clone() if sequence else whole.clone()
        whole.requires_grad_(), x.requires_grad_()

        def one(module, inputs):
            begin = time.monotonic_ns()
            loss = module(inputs).square().sum() / (tokens * width)
            loss.backward()
            return (time.monotonic_ns() - begin) / 1e3, loss.detach()

        loss = one(mlp, x)[1]
        if sequence:
            dist.all_reduce(loss)
        times = []
        for _ in range(steps + 3):
            dist.barrier()
            without = one(plain, whole)[0]
            dist.barrier()
            times.append((one(mlp, x)[0], without))
        times = times[3:]
        pipe.send({"pass_us": statistics.median(t[0] for t in times),
                   "plain_us": statistics.median(t[1] for t in times),
                   "extra_us": statistics.median(t[0] - t[1] for t in times),
                   "pass_min_us": min(t[0] for t in times), "loss": loss.item()})
    dist.destroy_process_group()


def ours(args, width, sequence):
    done = subprocess.run(
        [args.bench, "--ranks", str(args.ranks), "--width", str(width), "--tokens",
         str(args.tokens), "--sequence", str(sequence), "--steps", str(args.steps)],
        stdout=subprocess.PIPE, text=True, check=True)
    names = "width tokens ranks sequence steps pass_us plain_us extra_us pass_min_us plain_min_us loss"
    return dict(zip(names.split(), map(float, done.stdout.splitlines()[-1].split(",")), strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", default="build/gloo/bench/bench_tp_step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--widths", default="64,256,1024")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of losses, relative")
    args = parser.parse_args()
    path = os.path.join(os.environ.get("FSDP_BUILD", "."), "tp_step.csv")
    print(f"{path}\nmedians, us          pass    (torch)      extra    (torch)   ratio  pass ratio")
    lines = []
    torch = Torch(args.ranks, torch_rank)
    for width in (int(text) for text in args.widths.split(",")):
        for sequence in (0, 1):
            mine, theirs = [], []
            for _ in range(args.rounds):
                mine.append(ours(args, width, sequence))
                theirs.append(torch.ask((width, args.tokens, sequence, args.steps))[0])
            line = {"width": width, "tokens": args.tokens, "ranks": args.ranks,
                    "sequence": sequence, "backend": os.environ.get("FSDP_BACKEND", "default")}
            for key in ("pass_us", "plain_us", "extra_us", "pass_min_us"):
                line[key] = statistics.median(row[key] for row in mine)
                line["torch_" + key] = statistics.median(row[key] for row in theirs)
            line["loss_difference"] = max(abs(a["loss"] - b["loss"]) / abs(b["loss"])
                                          for a, b in zip(mine, theirs, strict=True))
            lines.append(line)
            print(f"{width:>5} {'sequence' if sequence else 'plain':<9}{line['pass_us']:>10.0f} "
                  f"{line['torch_pass_us']:>10.0f} {line['extra_us']:>10.0f} "
                  f"{line['torch_extra_us']:>10.0f} "
                  f"{line['torch_extra_us'] / line['extra_us']:>7.1f} "
                  f"{line['torch_pass_us'] / line['pass_us']:>10.2f}", flush=True)
    torch.close()
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, lines[0].keys())
        table.writeheader()
        table.writerows(lines)
    worst = max(line["loss_difference"] for line in lines)
    print(f"losses differ by at most {worst:.1e}, relative (allowed {args.tolerance:.0e})")
    return worst > args.tolerance


if __name__ == "__main__":
    sys.exit(main())
