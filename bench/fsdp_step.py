#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""fsdp_step.py - the training steps of bench_step.c in PyTorch's fully_shard over Gloo, both
programs in turn in one run: losses must be equal, times are compared

    FSDP_BACKEND=gloo python3 bench/fsdp_step.py [--bench build/bench/bench_step] [--model mlp,gpt]
        [--case tiny,large,example] [--ranks 2,4] [--comm-threads 0,2] [--rounds 3] [--steps N]
        [--compiled]

Models, first values, data and AdamW are those of bench_step.c, f32, one compute thread per rank.
"pass" is forward and backward, "optim" the optimizer and zero_grad; medians over steps, then over
rounds. "extra" is what sharding adds to a pass for each unit: (sharded - plain) / units, where
plain ranks train a copy of their own at the same time without communication. "plan": the same of
steps from a plan (fsdp_plan.h, its defaults), whose losses have to be those without one. With
--compiled PyTorch runs once more with each layer compiled by torch.compile. Needs torch and numpy; writes $FSDP_BUILD/fsdp_step.csv. Exit status 1: losses differ by more than
--tolerance.
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
os.environ["OPENBLAS_NUM_THREADS"] = "1"
WARM_UP = 3
SHAPES = {  # layers, width, batch of a rank, positions, heads, steps: as in bench_step.c
    ("mlp", "tiny"): (64, 16, 4, 1, 0, 100), ("mlp", "large"): (6, 1024, 64, 1, 0, 20),
    ("gpt", "tiny"): (16, 32, 1, 16, 4, 100), ("gpt", "large"): (6, 256, 4, 64, 4, 20),
    ("gpt", "example"): (4, 128, 3, 64, 4, 100),
}
GPT_VOCAB = 256


def noise(place):
    """[-1, 1) from an array of uint64: noise() of bench_step.c."""
    import numpy as np

    x = (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0 ** -52 - 1.0


def define_models():
    """The two models as modules; in a function, because torch is for the ranks alone."""
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Params(nn.Module):
        """Parameters from (name, shape, mean, bound), numbered from `ordinal` on."""

        def __init__(self, specs, ordinal):
            super().__init__()
            for name, shape, mean, bound in specs:
                place = np.arange(int(np.prod(shape)), dtype=np.uint64)
                place += np.uint64(ordinal << 32)
                value = np.float64(np.float32(mean)) + np.float64(np.float32(bound)) * noise(place)
                data = torch.from_numpy(value.astype(np.float32).reshape(shape))
                setattr(self, name, nn.Parameter(data))
                ordinal += 1

    class MlpLayer(Params):
        def __init__(self, width, layers, ordinal):
            bound = np.float32(1) / np.sqrt(np.float32(width * layers))
            super().__init__([("w", (width, width), 0, bound), ("b", (width,), 0, 0)], ordinal)

        def forward(self, x):
            return x + F.gelu(F.linear(x, self.w, self.b), approximate="tanh")

    class Mlp(nn.Module):
        def __init__(self, shape):
            super().__init__()
            layers, width = shape[:2]
            self.layers = nn.ModuleList(MlpLayer(width, layers, 2 * l) for l in range(layers))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

        @staticmethod
        def loss(y, wanted):
            return F.mse_loss(y, wanted)

    class GptBlock(Params):
        def __init__(self, width, heads, layers, ordinal):
            c, self.heads = width, heads
            proj = np.float32(0.02) / np.sqrt(np.float32(2.0) * np.float32(layers))
            super().__init__([
                ("ln1w", (c,), 1, 0), ("ln1b", (c,), 0, 0),
                ("qkvw", (3 * c, c), 0, 0.02), ("qkvb", (3 * c,), 0, 0),
                ("attprojw", (c, c), 0, proj), ("attprojb", (c,), 0, 0),
                ("ln2w", (c,), 1, 0), ("ln2b", (c,), 0, 0),
                ("fcw", (4 * c, c), 0, 0.02), ("fcb", (4 * c,), 0, 0),
                ("fcprojw", (c, 4 * c), 0, proj), ("fcprojb", (c,), 0, 0)], ordinal)

        def forward(self, x):
            b, t, c = x.shape
            y = F.layer_norm(x, (c,), self.ln1w, self.ln1b)
            qkv = F.linear(y, self.qkvw, self.qkvb).view(b, t, 3, self.heads, c // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y.transpose(1, 2).reshape(b, t, c)
            x = x + F.linear(y, self.attprojw, self.attprojb)
            y = F.layer_norm(x, (c,), self.ln2w, self.ln2b)
            y = F.gelu(F.linear(y, self.fcw, self.fcb), approximate="tanh")
            return x + F.linear(y, self.fcprojw, self.fcprojb)

    class Gpt(Params):
        def __init__(self, shape):
            layers, c, _, context, heads, _ = shape
            super().__init__([("wte", (GPT_VOCAB, c), 0, 0.02), ("wpe", (context, c), 0, 0.01),
                              ("lnfw", (c,), 1, 0), ("lnfb", (c,), 0, 0)], 12 * layers)
            self.layers = nn.ModuleList(
                GptBlock(c, heads, layers, 12 * l) for l in range(layers))

        def forward(self, tokens):
            x = F.embedding(tokens, self.wte) + self.wpe
            for layer in self.layers:
                x = layer(x)
            return F.linear(F.layer_norm(x, x.shape[-1:], self.lnfw, self.lnfb), self.wte)

        @staticmethod
        def loss(logits, targets):
            return F.cross_entropy(logits.view(-1, GPT_VOCAB), targets.view(-1))

    return {"mlp": Mlp, "gpt": Gpt}


def batch(model, shape, sample):
    """Inputs and targets of the samples from `sample` on: fill_batch() of bench_step.c."""
    import numpy as np
    import torch

    _, width, count, context, _, _ = shape
    samples = np.arange(sample, sample + count)[:, None]
    if model == "mlp":
        place = (1 << 48) | (samples * width)
        position = np.arange(width)[None, :]
        pair = [place + position, place + (position + 1) % width]
        return [torch.from_numpy(noise(p.astype(np.uint64)).astype(np.float32)) for p in pair]
    position = np.arange(context)[None, :]
    pair = [samples % 97 + (samples % 5 + 1) * (position + i) for i in (0, 1)]
    return [torch.from_numpy(p % 256) for p in pair]


def train(rank, world, name, shape, how, model_class):
    """(losses of this rank, median pass, median optimizer), in microseconds."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    model, steps = model_class(shape), shape[-1]
    if how == "compiled":
        for layer in model.layers:
            layer.compile()
    if how != "plain":
        mesh = init_device_mesh("cpu", (world,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    losses, passes, updates = [], [], []
    dist.barrier()
    for step in range(steps):
        inputs, targets = batch(name, shape, (step * world + rank) * shape[2])
        begin = time.monotonic_ns()
        loss = model_class.loss(model(inputs), targets)
        loss.backward()
        middle = time.monotonic_ns()
        adamw.step()
        adamw.zero_grad()
        passes.append((middle - begin) / 1e3)
        updates.append((time.monotonic_ns() - middle) / 1e3)
        losses.append(loss.item())
    return losses, statistics.median(passes[WARM_UP:]), statistics.median(updates[WARM_UP:])


def torch_rank(rank, world, path, pipe):
    """One process of PyTorch: trains what it is asked for until it is asked for nothing."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=world)
    models = define_models()
    while (request := pipe.recv()) is not None:
        name, shape, how = request
        pipe.send(train(rank, world, name, shape, how, models[name]))
    dist.destroy_process_group()


class Torch:
    """The processes of PyTorch for one number of ranks; they sleep when they are not asked.

    Each runs target(rank, world, path of a store, pipe) and answers a request with one object."""

    def __init__(self, world, target=torch_rank):
        context = multiprocessing.get_context("spawn")
        self.dir = tempfile.TemporaryDirectory()
        self.pipes, self.ranks = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, daemon=True, args=(
                rank, world, os.path.join(self.dir.name, "store"), theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.ranks.append(process)

    def ask(self, request):
        """The answer of each rank."""
        for pipe in self.pipes:
            pipe.send(request)
        return [pipe.recv() for pipe in self.pipes]

    def train(self, name, shape, how):
        ranks = self.ask((name, shape, how))
        losses = [statistics.fmean(values) for values in zip(*(r[0] for r in ranks))]
        return losses, ranks[0][1], ranks[0][2]

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.ranks:
            process.join()
        self.dir.cleanup()


def ours(args, name, case, shape, world, threads, plan, losses_path):
    """The row of bench_step's table, and its losses."""
    done = subprocess.run(
        [args.bench, "--csv", "--model", name, "--case", case, "--ranks", str(world), "--comm-threads",
         str(threads), "--plan", str(plan), "--steps", str(shape[-1]), "--losses", losses_path],
        stdout=subprocess.PIPE, text=True, check=True)
    row, = csv.DictReader(done.stdout.splitlines())
    with open(losses_path) as file:
        return row, [float(line) for line in file]


def difference(a, b):
    """The largest relative difference of two loss curves."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def measure(args, torch, name, case, world, threads, losses_path):
    """One line of the table, medians over the rounds."""
    shape, rows = SHAPES[name, case], []
    if args.steps:
        shape = (*shape[:-1], args.steps)
    for _ in range(args.rounds):
        row, losses = ours(args, name, case, shape, world, threads, 0, losses_path)
        planned, same = ours(args, name, case, shape, world, threads, 1, losses_path)
        if losses != same:
            sys.exit(f"{name} {case} W={world} threads={threads}: a plan changes losses")
        expected, passes, updates = torch.train(name, shape, "eager")
        _, plain_passes, plain_updates = torch.train(name, shape, "plain")
        compiled = torch.train(name, shape, "compiled") if args.compiled else None
        units = int(row["units"])
        rows.append({
            "pass_us": float(row["pass_us"]), "torch_pass_us": passes,
            "optim_us": float(row["optim_us"]), "torch_optim_us": updates,
            "plain_us": float(row["plain_pass_us"]), "torch_plain_us": plain_passes,
            "plain_optim_us": float(row["plain_optim_us"]), "torch_plain_optim_us": plain_updates,
            "extra_us": float(row["extra_us_per_unit"]),
            "plan_pass_us": float(planned["pass_us"]),
            "plan_extra_us": float(planned["extra_us_per_unit"]),
            "torch_extra_us": (passes - plain_passes) / units,
            "hidden": float(row["hidden"]), "loss_difference": difference(losses, expected)})
        if compiled:
            rows[-1]["torch_compiled_pass_us"] = compiled[1]
    line = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    line["loss_difference"] = max(row["loss_difference"] for row in rows)
    return {"model": name, "case": case, "world": world, "threads": threads,
            "backend": os.environ.get("FSDP_BACKEND", "default"), **line,
            "times_less_extra": line["torch_extra_us"] / line["extra_us"],
            "plan_times_less_extra": line["torch_extra_us"] / line["plan_extra_us"],
            "times_faster_step": (line["torch_pass_us"] + line["torch_optim_us"]) /
                                 (line["pass_us"] + line["optim_us"])}


def show(line):
    print(f"{line['model']:<4} {line['case']:<6} {line['world']:>2} {line['threads']:>5} "
          f"{line['pass_us']:>10.0f} {line['torch_pass_us']:>10.0f} {line['optim_us']:>9.0f} "
          f"{line['torch_optim_us']:>9.0f} {line['extra_us']:>9.1f} "
          f"{line['plan_extra_us']:>9.1f} {line['torch_extra_us']:>9.1f} "
          f"{line['times_less_extra']:>7.1f} {line['plan_times_less_extra']:>7.1f} "
          f"{line['times_faster_step']:>7.2f} "
          f"{line['hidden']:>6.2f} {line['loss_difference']:>9.1e}", flush=True)
    if "torch_compiled_pass_us" in line:
        print(f"  a pass: by calls {line['pass_us']:.0f}, from a plan {line['plan_pass_us']:.0f}; PyTorch "
              f"{line['torch_pass_us']:.0f}, compiled {line['torch_compiled_pass_us']:.0f} us",
              flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", default="build/bench/bench_step")
    parser.add_argument("--model", default="mlp,gpt")
    parser.add_argument("--case", default="tiny,large")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--comm-threads", default="0,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of each; 0: by the case, 20 or 100")
    parser.add_argument("--compiled", action="store_true", help="PyTorch with compiled layers, too")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of losses, relative")
    args = parser.parse_args()
    path = os.path.join(os.environ.get("FSDP_BUILD", "."), "fsdp_step.csv")
    print(f"{path}\nmedians, us           pass     (torch)     optim   (torch) extra/unit   (plan) "
          "  (torch)   ratio  (plan) step ratio hidden  loss diff.")
    lines = []
    with tempfile.TemporaryDirectory() as temporary, open(path, "w", newline="") as file:
        for world in (int(text) for text in args.ranks.split(",")):
            torch = Torch(world)
            for name, case in SHAPES:
                if name not in args.model.split(",") or case not in args.case.split(","):
                    continue
                for threads in (int(text) for text in args.comm_threads.split(",")):
                    lines.append(measure(args, torch, name, case, world, threads,
                                         os.path.join(temporary, "losses")))
                    show(lines[-1])
            torch.close()
        table = csv.DictWriter(file, lines[0].keys())
        table.writeheader()
        table.writerows(lines)
    worst = max(line["loss_difference"] for line in lines)
    print(f"losses differ by at most {worst:.1e}, relative (allowed {args.tolerance:.0e})")
    return worst > args.tolerance


if __name__ == "__main__":
    sys.exit(main())
