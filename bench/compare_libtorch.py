#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""compare_libtorch.py - the GPT of examples/libtorch in C++, plain and sharded, next to PyTorch's
FullyShardedDataParallel (fully_shard) and DistributedDataParallel in Python over Gloo, in one run

    make torch && build/venv/bin/python bench/compare_libtorch.py [--program build/torch/train_gpt]
        [--steps 20] [--batch 4] [--layers 6] [--width 256] [--rounds 3] [--ranks 1,2,4] FILE

All train with the same initial values, data and AdamW. It prints for each program the loss of the
last step, the milliseconds of CPU time that a rank needs for a step, and its largest memory: medians
over rounds, in which the programs take turns. CPU time depends little on other work of the machine.
Each rank uses one thread.
"""
import argparse
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import time

HEADS, CONTEXT, BYTES = 4, 64, 256


def gpt(layers, width):
    """The module of examples/libtorch/train_gpt.cpp, with its names of parameters."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln1, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
            self.proj, self.ln2 = nn.Linear(width, width), nn.LayerNorm(width)
            self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            heads = (x.size(0), CONTEXT, 3, HEADS, width // HEADS)
            q, k, v = self.qkv(self.ln1(x)).view(heads).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(x.shape))
            return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(BYTES, width), nn.Embedding(CONTEXT, width)
            self.lnf, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
            self.h = nn.ModuleList(Block() for _ in range(layers))

        def forward(self, tokens):
            x = self.wte(tokens[:, :CONTEXT]) + self.wpe(torch.arange(CONTEXT))
            for block in self.h:
                x = block(x)
            x = self.head(self.lnf(x)).view(-1, BYTES)
            return F.cross_entropy(x, tokens[:, 1:].reshape(-1))

    torch.manual_seed(1)
    return GPT()


def tokens_of(text, step, batch, first, count):
    """Sequences first .. first + count - 1 of a step."""
    import torch
    starts = [(step * batch + b) * 977 % (len(text) - CONTEXT - 1)
              for b in range(first, first + count)]
    return torch.tensor([list(text[at:at + CONTEXT + 1]) for at in starts])


def rank_main(mode, rank, ranks, port, o):
    """One rank of a Python program; rank 0 prints what train_gpt prints."""
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank),
                      WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    model = gpt(o.layers, o.width)
    if mode == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with open(o.file, "rb") as f:
        text = f.read()
    times = []
    for step in range(o.steps):
        begin = time.process_time()
        mine = o.batch // ranks
        tokens = tokens_of(text, step, o.batch, rank * mine, mine)
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        times.append(time.process_time() - begin)
        loss = loss.detach().double()
        dist.all_reduce(loss)
    if rank == 0:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(f"step {o.steps - 1} loss {float(loss) / ranks:.7f}")
        print(f"rank 0: {1e3 * statistics.median(times):.1f} ms of CPU a step (median), at most "
              f"{memory} MB of memory", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure(mode, ranks, o):
    """(last loss, milliseconds, MB) of one run."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    clean["OMP_NUM_THREADS"] = "1"
    options = [f"--{name}={getattr(o, name)}" for name in ("steps", "batch", "layers", "width")]
    if mode in ("DDP", "FSDP2"):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        commands = [[sys.executable, os.path.abspath(__file__), o.file, *options,
                     f"--child={mode},{rank},{ranks},{port}"] for rank in range(ranks)]
    else:
        words = [word for option in options for word in option.split("=")]
        launcher = [] if mode == "plain" else [o.launcher, "-n", str(ranks)]
        way = {"plain": ["--plain"], "checkpoint": ["--checkpoint"]}.get(mode, [])
        commands = [launcher + [o.program, *way, *words, o.file]]
    started = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=clean,
                                universal_newlines=True) for c in commands]
    said = "".join(p.communicate()[0] for p in started)
    if any(p.returncode for p in started):
        sys.exit(f"{mode} on {ranks} ranks failed:\n{said}")
    loss = re.findall(r"^step \d+ loss (\S+)$", said, re.M)[-1]
    ms, mb = re.search(r"([\d.]+) ms of CPU a step .* at most (\d+) MB", said).groups()
    return float(loss), float(ms), int(mb)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file")
    parser.add_argument("--program", default="build/torch/train_gpt")
    parser.add_argument("--launcher", default="tools/fsdprun")
    for name, value in (("steps", 20), ("batch", 4), ("layers", 6), ("width", 256), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.child:
        mode, rank, ranks, port = o.child.split(",")
        return rank_main(mode, int(rank), int(ranks), int(port), o)
    runs = [("plain", 1)] + [(mode, ranks) for ranks in map(int, o.ranks.split(","))
                             for mode in ("fsdp.h", "checkpoint", "FSDP2", "DDP")]
    found = {run: [] for run in runs}
    for _ in range(o.rounds):
        for mode, ranks in runs:
            found[mode, ranks].append(measure(mode, ranks, o))
    print("program,ranks,loss,cpu_ms,cpu_ms_min,cpu_ms_max,mb")
    for (mode, ranks), values in found.items():
        loss, ms, mb = zip(*values)
        print(f"{mode},{ranks},{loss[0]:.7f},{statistics.median(ms):.1f},{min(ms):.1f},"
              f"{max(ms):.1f},{statistics.median(mb):.0f}")


if __name__ == "__main__":
    main()
