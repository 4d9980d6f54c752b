#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""compare_torch.py - collectives of our backends beside PyTorch's ProcessGroupGloo

    python3 bench/compare_torch.py [--bench build/bench/bench_comm] [--backend shm,gloo]
        [--ranks 2,4] [--sizes 64K,1M,16M,64M] [--rounds 3] [--seconds 0.3]

For every number of ranks and size, in turn and several rounds: bench_comm, then the same
operations by processes of PyTorch, which wait in between without using a core. A time is the median
of the rounds' medians; a sample is taken as bench_comm --cold 0 takes it: from the first rank's start to the
last one's end, after a barrier, of several operations in a row where they are short. Buffers are
f32, an all_gather's input is a part of its output, and nobody has more than one compute thread.
Needs torch; writes $FSDP_BUILD/compare_torch.csv.
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
OPS = ("all_gather", "reduce_scatter", "all_reduce")
LONG_RUN = 4 << 20  # bytes from which a sample is one operation, as in bench_comm.c


def goal(op, size):
    """How many times faster than PyTorch an operation should be; None: nothing was promised."""
    if size == 64 << 10 and op != "all_reduce":
        return 3.0
    if size >= 16 << 20:
        return {"reduce_scatter": 2.5, "all_gather": 1.5}.get(op)
    return None


def parse_size(text):
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper())
    return int(text[:-1]) * unit if unit else int(text)


def torch_rank(rank, world, path, bytes_max, gate, pipe):
    """One process of PyTorch: measures what it is asked for until it is asked for nothing."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=world)
    full = torch.zeros(bytes_max // 4)
    shard = torch.zeros(bytes_max // 4 // world)
    while (request := pipe.recv()) is not None:
        op, size, repeats, samples = request
        count = size // 4
        out, part = full[:count], count // world
        calls = {
            "all_gather": lambda: dist.all_gather_into_tensor(
                out, out[rank * part:(rank + 1) * part]),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard[:part], out),
            "all_reduce": lambda: dist.all_reduce(out),
        }
        times = []
        for _ in range(samples):
            gate.wait()
            start = time.monotonic_ns()
            for _ in range(repeats):
                calls[op]()
            times.append((start, time.monotonic_ns()))
        pipe.send(times)
    dist.destroy_process_group()


class Torch:
    """The processes of PyTorch for one number of ranks."""

    def __init__(self, world, bytes_max):
        context = multiprocessing.get_context("spawn")
        self.dir = tempfile.TemporaryDirectory()
        self.gate = context.Barrier(world)
        self.pipes, self.ranks = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=torch_rank, daemon=True,
                args=(rank, world, os.path.join(self.dir.name, "store"), bytes_max, self.gate,
                      theirs))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.ranks.append(process)

    def samples(self, op, size, repeats, count):
        """Microseconds of one operation, `count` times."""
        for pipe in self.pipes:
            pipe.send((op, size, repeats, count))
        ranks = [pipe.recv() for pipe in self.pipes]
        return [(max(end for _, end in times) - min(start for start, _ in times)) / 1e3 / repeats
                for times in zip(*ranks)]

    def median(self, op, size, seconds):
        repeats = 1 if size >= LONG_RUN else 4 if size >= LONG_RUN // 16 else 20
        one = min(self.samples(op, size, repeats, 3)) * repeats * 1e-6
        count = max(5, min(1000, int(seconds / one)))
        return statistics.median(self.samples(op, size, repeats, count))

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.ranks:
            process.join()
        self.dir.cleanup()


def ours(args, world, size):
    """{(op, who): microseconds} of one run of bench_comm."""
    command = [args.bench, "--csv", "--backend", args.backend, "--ranks", str(world), "--sizes",
               str(size), "--seconds", str(args.seconds), "--cold", "0"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = csv.DictReader(done.stdout.splitlines())
    return {(row["op"], row["who"]): float(row["us_median"]) for row in rows}


def measure(args, torch, world, size):
    """{(op, who): microseconds}, medians over the rounds."""
    seen = {}
    for _ in range(args.rounds):
        times = ours(args, world, size)
        times.update({(op, "torch"): torch.median(op, size, args.seconds) for op in OPS})
        for key, value in times.items():
            seen.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in seen.items()}


def show(times, op, world, size, backend, table):
    us, torch = times[op, backend], times[op, "torch"]
    tcp = times[op, "tcp"]
    wanted = goal(op, size)
    verdict = "" if wanted is None else "reached" if torch / us >= wanted else "missed"
    table.writerow([op, world, size, backend, f"{us:.1f}", f"{torch:.1f}", f"{tcp:.1f}",
                    f"{torch / us:.2f}", wanted or "", verdict, f"{us / tcp:.2f}"])
    print(f"{op:<14} W={world} {size:>10} {backend:<5} {us:>10.1f} {torch:>10.1f} {tcp:>10.1f} "
          f"{torch / us:>9.2f}{f' (goal {wanted}: {verdict})' if wanted else ' ' * 20:<20} "
          f"{us / tcp:>6.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", default="build/bench/bench_comm")
    parser.add_argument("--backend", default="shm,gloo")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default="64K,1M,16M,64M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one operation and round")
    args = parser.parse_args()
    sizes = [parse_size(text) for text in args.sizes.split(",")]
    path = os.path.join(os.environ.get("FSDP_BUILD", "."), "compare_torch.csv")
    print(f"{path}\nmedians, us             bytes       {'ours':>10} {'torch':>10} {'tcp':>10} "
          f"torch/ours{'':>19} ours/tcp")
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["op", "world", "bytes", "backend", "us_ours", "us_torch", "us_tcp",
                        "times_faster", "goal", "verdict", "to_tcp"])
        for world in (int(text) for text in args.ranks.split(",")):
            torch = Torch(world, max(sizes))
            for size in sizes:
                times = measure(args, torch, world, size)
                for backend in args.backend.split(","):
                    for op in OPS:
                        show(times, op, world, size, backend, table)
            torch.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
