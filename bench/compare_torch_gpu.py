#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""compare_torch_gpu.py - a step of the GPT on one GPU: train_gpt_cuda beside PyTorch, in one run

    python3 bench/compare_torch_gpu.py [--program build/nccl/examples/train_gpt_cuda]
        [--numbers bf16,f32,tf32] [--rounds 3] [--steps 40] [--small]

In turn, for each kind of numbers and round: train_gpt_cuda --plain, PyTorch without sharding,
train_gpt_cuda, PyTorch with fully_shard on each block. The model is GPT-2 with 12 layers of 768
channels, 12 heads, a context of 1,024, 8 sequences and tokens of one byte; a step is forward,
backward, clipping to a norm of 1 and AdamW. PyTorch has scaled_dot_product_attention and the fused
AdamW; bf16 is autocast without sharding, and a MixedPrecisionPolicy with it. A time is that of the
steps behind the first ten, divided by their number, with waits for the GPU at both ends (ours: at
each tenth step); of it the median over rounds. It needs torch with CUDA (written for 2.11) and
`make nccl`. It has run on a CPU only, with --small.

--small: a tiny model, to try the script; without a GPU it runs on the CPU, beside the program of
`make NCCL=stub BUILD=build/stub cuda-trainers`. Its times mean nothing.

Writes $FSDP_BUILD/compare_torch_gpu.csv, with the columns of bench_gpu.csv. Exit status: 0 each
goal is reached, 1 one is missed or something failed, 77 skipped: no torch, or no GPU.
"""
import argparse
import contextlib
import csv
import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time

from fsdp_step import Torch

SKIPPED, WARM_UP, VOCAB = 77, 10, 256
LARGE = {"layers": 12, "heads": 12, "channels": 768, "context": 1024, "batch": 8}
SMALL = {"layers": 2, "heads": 2, "channels": 32, "context": 32, "batch": 2}
GOALS = (  # who, beside whom, text, how large the ratio of the times of the two may be
    (("bf16", "ours plain"), ("bf16", "torch plain"),
     "a step in bf16 takes at most 1.3 times PyTorch's", 1.3),
    (("bf16", "ours sharded"), ("bf16", "torch sharded"),
     "a sharded step in bf16 is at least 1.6 times faster than fully_shard's", 1 / 1.6),
)


def define_gpt(shape):
    """examples/gpt/gpt.h as a module; in a function, because torch is for its own process."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    c, heads = shape["channels"], shape["heads"]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(c), nn.LayerNorm(c)
            self.qkv, self.attproj = nn.Linear(c, 3 * c), nn.Linear(c, c)
            self.fc, self.fcproj = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

        def forward(self, x):
            b, t, _ = x.shape
            qkv = self.qkv(self.ln1(x)).view(b, t, 3, heads, c // heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.attproj(y.transpose(1, 2).reshape(b, t, c))
            return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCAB, c), nn.Embedding(shape["context"], c)
            self.layers = nn.ModuleList(Block() for _ in range(shape["layers"]))
            self.lnf = nn.LayerNorm(c)
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, tokens):
            x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
            for layer in self.layers:
                x = layer(x)
            return F.linear(self.lnf(x), self.wte.weight)

    return Gpt()


def shard(model, device, numbers):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if numbers == "bf16" else None)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def train(device, shape, numbers, how, steps):
    """Seconds of a step of PyTorch, and the last loss."""
    import torch
    from torch.nn import functional as F

    torch.set_float32_matmul_precision("high" if numbers == "tf32" else "highest")
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    model = define_gpt(shape).to(device)
    narrow = contextlib.nullcontext
    if how == "sharded":
        shard(model, device, numbers)
    elif numbers == "bf16":
        narrow = lambda: torch.autocast(device, dtype=torch.bfloat16)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                              fused=True)
    text = torch.randint(VOCAB, (shape["batch"], shape["context"] + 1), device=device)
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            wait()
            begin = time.monotonic()
        with narrow():
            logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.float().view(-1, VOCAB), text[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
    wait()
    return (time.monotonic() - begin) / steps, loss.item()


def torch_rank(rank, world, path, pipe):
    """The process of PyTorch: trains what it is asked for until it is asked for nothing."""
    import torch
    import torch.distributed as dist

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method="file://" + path,
                            rank=rank, world_size=world)
    while (request := pipe.recv()) is not None:
        pipe.send(train(device, *request))
        if device == "cuda":
            torch.cuda.empty_cache()  # the other program has its own
    dist.destroy_process_group()


def command_of(program, shape, numbers, how, steps):
    """Of train_gpt_cuda. It looks at its loss every ten steps, and waits for the GPU there only."""
    command = [program, "--sample", "0", "--steps", str(WARM_UP + steps), "--log-every", "10"]
    for name, value in shape.items():
        command += ["--" + name, str(value)]
    command += ["--" + numbers] if numbers != "f32" else []
    return command + (["--plain"] if how == "plain" else [])


def seconds_of(table):
    """Seconds of a step behind the first ten, from the lines of train_gpt_cuda --csv."""
    rows = [row for row in csv.DictReader(table) if int(row["step"]) >= WARM_UP]
    first, last = rows[0], rows[-1]
    return ((float(last["seconds"]) - float(first["seconds"])) /
            (int(last["step"]) - int(first["step"])))


def ours(program, shape, numbers, how, steps):
    """Seconds of a step of train_gpt_cuda."""
    environment = dict(os.environ, FSDP_BACKEND="nccl")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "steps.csv")
        command = command_of(program, shape, numbers, how, steps) + ["--csv", path]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout[-2000:]}")
        with open(path, newline="", encoding="utf-8") as file:
            return seconds_of(file)


def measure(args, shape, torch):
    """{(numbers, who): seconds of a step}, medians over the rounds."""
    seen = {}
    for _ in range(args.rounds):
        for numbers in args.numbers:
            for how in ("plain", "sharded"):
                request = (shape, numbers, how, args.steps)
                seen.setdefault((numbers, "ours " + how), []).append(ours(args.program, *request))
                (seconds, loss), = torch.ask(request)
                if not loss < 8.0:  # ln 256 is 5.5
                    sys.exit(f"PyTorch, {numbers}, {how}: a loss of {loss}")
                seen.setdefault((numbers, "torch " + how), []).append(seconds)
    return {key: statistics.median(values) for key, values in seen.items()}


def goals_of(times):
    """[(text, ratio of the times, how large it may be)] of the goals that were measured."""
    return [(text, times[who] / times[beside], most)
            for who, beside, text, most in GOALS if who in times and beside in times]


def show(times, goals):
    print("a step, ms        ours  PyTorch   ratio")
    for numbers in dict.fromkeys(key[0] for key in times):
        for how in ("plain", "sharded"):
            us, they = times[numbers, "ours " + how] * 1e3, times[numbers, "torch " + how] * 1e3
            print(f"{numbers:<5}{how:<8} {us:8.2f} {they:8.2f} {us / they:7.2f}")
        for who in ("ours", "torch"):
            more = times[numbers, who + " sharded"] / times[numbers, who + " plain"] - 1
            print(f"{numbers:<5}sharding makes a step {more:+.1%} longer: {who}")
    for text, ratio, most in goals:
        print(f"goal: {text}: {ratio if most >= 1 else 1 / ratio:.2f}, "
              f"{'reached' if ratio <= most else 'missed'}")


def write(path, args, shape, device, times):
    limits = {who: most for who, _, _, most in GOALS}
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["date", "device", "command", "what", "value", "unit", "beside", "ratio",
                        "goal"])
        for numbers, who in times:
            if who.startswith("ours "):
                how = who.split()[1]
                us, they = times[numbers, who] * 1e3, times[numbers, "torch " + how] * 1e3
                command = command_of("train_gpt_cuda", shape, numbers, how, args.steps)
                table.writerow([datetime.date.today(), device, " ".join(command),
                                f"step of the GPT {numbers} {how} beside PyTorch", f"{us:.4f}",
                                "ms", f"{they:.4f}", f"{us / they:.4f}",
                                f"{limits[numbers, who]:.4f}" if (numbers, who) in limits else ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default="build/nccl/examples/train_gpt_cuda")
    parser.add_argument("--numbers", default="bf16,f32,tf32", type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="that are timed; tens")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    try:
        import torch
    except ModuleNotFoundError:
        print("skipped: no module torch for " + sys.executable)
        return SKIPPED
    if not args.small and not torch.cuda.is_available():
        print("skipped: PyTorch finds no GPU")
        return SKIPPED
    if not os.access(args.program, os.X_OK):
        sys.exit(f"no {args.program}: make nccl builds it")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    path = os.path.join(os.environ.get("FSDP_BUILD", "."), "compare_torch_gpu.csv")
    print(f"{path}\n{device}, PyTorch {torch.__version__}", flush=True)
    shape = SMALL if args.small else LARGE
    torch_process = Torch(1, torch_rank)
    times = measure(args, shape, torch_process)
    torch_process.close()
    goals = goals_of(times)
    show(times, goals)
    write(path, args, shape, device, times)
    return int(not args.small and any(ratio > most for _, ratio, most in goals))


if __name__ == "__main__":
    sys.exit(main())
