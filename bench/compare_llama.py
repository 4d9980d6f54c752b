#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains a Llama of Hugging Face by examples/llama/train_llama and by transformers on PyTorch, in
one run on the same rows, and compares losses, CPU seconds, tokens per second and memory.

  bench/compare_llama.py MODEL TOKENS [--steps 5] [--batch 4] [--context 128] [--ranks 1 2] [--lora R]

With --lora both train the same new adapter of rank R of all matrices, PyTorch by PEFT.
PyTorch runs in one process with as many threads as there are ranks. CPU seconds are those of all
threads and ranks, from start to end, less those of a run with one step; memory is the peak RSS of
the largest process. Needs torch and transformers, with --lora also peft.
"""
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time

MASK = (1 << 64) - 1


def mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def pick(rows, seed, place):
    """The row at a place of the training, as llama_data_pick."""
    key = mix((mix(seed) + place // rows) & MASK)
    x, half = place % rows, 1
    while 1 << 2 * half < rows:
        half += 1
    ones = (1 << half) - 1
    while True:
        for step in range(4):
            left, right = x >> half, x & ones
            turn = (key + step * 0x9E3779B97F4A7C15 + right) & MASK
            x = right << half | (left ^ (mix(turn) & ones))
        if x < rows:
            return x


def rate(args, step):
    warmup = args.steps // 10
    if step < warmup:
        return args.lr * (step + 1) / warmup
    done = (step - warmup) / (args.steps - warmup)
    return args.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def torch_side(args):
    """Trains by PyTorch, and writes the JSON lines of train_llama."""
    import struct
    import torch
    from transformers import AutoModelForCausalLM
    torch.set_num_threads(args.torch)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.adapter:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, args.adapter, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    data = open(args.tokens, "rb").read()
    magic, _, count = struct.unpack("<3i", data[:12])
    code = "H" if magic == 20240520 else "I"
    tokens = struct.unpack(f"<{count}{code}", data[1024:])
    rows = (count - 1) // args.context
    groups = [{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(args.run):
        begin = time.monotonic()
        at = [pick(rows, 1, step * args.batch + i) * args.context for i in range(args.batch)]
        chosen = torch.tensor([tokens[a:a + args.context + 1] for a in at])
        logits = model(chosen[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), chosen[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in adamw.param_groups:
            group["lr"] = rate(args, step)
        adamw.step()
        adamw.zero_grad()
        print(json.dumps({"loss": loss.item(), "norm": norm.item(),
                          "seconds": time.monotonic() - begin}), flush=True)


def measure(command, out):
    """Returns the lines of a run, its CPU seconds, and MB of RSS."""
    env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    if "--torch" in command:
        del env["OMP_NUM_THREADS"]
    with open(out, "w") as file:
        child = subprocess.Popen(command, stdout=file, env=env)
        _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)}: status {status}")
    lines = [json.loads(line) for line in open(out) if line.startswith("{")]
    return lines, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def side(args, ranks, by_torch, folder):
    """Returns losses, CPU seconds of a step, tokens per second and MB."""
    results = []
    for steps in (1, args.steps):
        out = os.path.join(folder, "out")
        if by_torch:
            command = [sys.executable, __file__, *sys.argv[1:], "--torch", str(ranks), "--run",
                       str(steps), "--adapter", args.adapter]
            results.append(measure(command, out))
            continue
        lines = os.path.join(folder, f"lines.{ranks}.{steps}")
        command = [args.program, "--model", args.model, "--data", args.tokens, "--ranks",
                   str(ranks), "--steps", str(steps), "--warmup", str(args.steps // 10),
                   "--batch", str(args.batch), "--context", str(args.context), "--lr",
                   str(args.lr), "--json", lines]
        if args.adapter:
            command += ["--adapter", args.adapter]
        _, cpu, rss = measure(command, out)
        results.append(([json.loads(line) for line in open(lines)], cpu, rss))
    (_, first_cpu, _), (lines, cpu, rss) = results
    steady = sorted(line["seconds"] for line in lines[1:])
    speed = args.batch * args.context / steady[len(steady) // 2]
    return lines, (cpu - first_cpu) / (args.steps - 1), speed, rss


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokens")
    parser.add_argument("--program", default="examples/llama/train_llama")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--lora", type=int, help="train adapters of this rank")
    parser.add_argument("--adapter", default="", help=argparse.SUPPRESS)
    parser.add_argument("--torch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch:
        return torch_side(args)
    print("ranks or threads        CPU s/step   tokens/s    RSS MB   largest difference of a loss")
    with tempfile.TemporaryDirectory() as folder:
        if args.lora:
            args.adapter = os.path.join(folder, "adapter")
            subprocess.run([args.program, "--model", args.model, "--lora", str(args.lora),
                            "--export", args.adapter], check=True, stdout=subprocess.DEVNULL)
        for ranks in args.ranks:
            theirs = side(args, ranks, True, folder)
            ours = side(args, ranks, False, folder)
            worst = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(ours[0], theirs[0]))
            for name, s in (("torch", theirs), ("train_llama", ours)):
                print(f"{ranks} {name:20} {s[1]:11.2f} {s[2]:10.0f} {s[3]:9.0f}"
                      + (f"   {worst:.1e}" if s is ours else ""))
            print(f"{ranks} ratio {ours[1] / theirs[1]:26.2f} {ours[2] / theirs[2]:10.2f} "
                  f"{ours[3] / theirs[3]:9.2f}", flush=True)


if __name__ == "__main__":
    main()
