#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""goals.py - measures the goals of docs/performance.md anew, one topic after the other

    python3 bench/goals.py [--runs 3] [--only hooks,shm,...] [--state quiet] [--keep DIR]

Runs the benchmarks of each topic `--runs` times, writes bench/results/TOPIC.csv, from which
tools/bench_report draws the pictures, and prints each goal with what was measured: the median of the
runs' medians, all of them in brackets, and whether it is reached. Needs the programs that it
names (make bench BUILD=..., see docs/performance.md), torch for the topics torch and steps, and for
wire the right to make a network namespace. Nothing else may run on the machine, except for memory.
With --keep what the benchmarks wrote stays in DIR, and what is there already is not measured again.

  hooks      bench_host
  shm        bench_comm: shared memory beside memcpy, and what stands in the way ("meet")
  shm_small  bench_comm, 4 ranks, 4 and 64 KiB
  torch      compare_torch.py and bench_comm over TCP: beside PyTorch, and beside a raw stream
  steps      fsdp_step.py, with shared memory within the host and over TCP
  wire       bench_step over loopback that is shaped to 10 and 2 Gbit/s, inline and with threads
  memory     train_gpt as `make run` starts it, on 1 to 32 ranks: the bytes of each rank
"""
import argparse
import csv
import datetime
import os
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MACHINE = "2 shared x86-64 cores, a virtual machine, gcc 12.2 -O2, Debian 12"
COMM, GLOO_COMM = "build/bench/bench_comm", "build/gloo/bench/bench_comm"
STEP = "build/gloo/bench/bench_step"
OPS = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter f32",
       "reduce_bf16": "reduce_scatter bf16 to f32", "all_reduce": "all_reduce"}
MODELS = {("mlp", "tiny"): "MLP 64 x 16 wide", ("mlp", "large"): "MLP 6 x 1,024 wide",
          ("gpt", "tiny"): "GPT 16 x 32 wide", ("gpt", "large"): "GPT 6 x 256 wide"}
# Words that several pictures need.
OURS, STREAM = "fsdp.h over shared memory", "the raw TCP stream"
BOUND = "copies or sums of as many bytes, and barriers"
OF_BOUND = ("The second series is there to compare: for a reduce_scatter the same sum in memory of "
            "the rank's own, between two barriers; for an all_reduce two memcpys, each followed by "
            "a barrier, without a sum.")
OF_STREAM = ("The stream is a plain TCP socket between each pair of ranks: it moves the bytes of "
             "the operation and does nothing with them.")
OF_THREADS = ("A thread of the rank runs collectives while the rank computes. Inline: "
            "they run within the call.")
args = argparse.Namespace()
goals = []  # lines of the table


def size_of(text):
    size = int(text)
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def run(name, command, file, **variables):
    """The lines of the csv that a benchmark writes: of each run a list."""
    done = []
    for k in range(args.runs):
        kept = os.path.join(args.keep, f"{name}.{k}.csv")
        if not os.path.exists(kept):
            words = [f"{key}={value}" for key, value in variables.items()] + command
            print("$", " ".join(words), flush=True)
            env = {**os.environ, "FSDP_BUILD": args.keep, **variables}
            subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
            os.replace(os.path.join(args.keep, file), kept)
        with open(kept, encoding="utf-8", newline="") as lines:
            done.append(list(csv.DictReader(lines)))
    return done


def write(topic, title, axis, command, better, lines, **more):
    """lines: (panel, row, series, value, low, high, goal[, times]), or dicts as a benchmark wrote
    them."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True,
                            capture_output=True, check=True).stdout.strip()
    head = {"title": title, "axis": axis, "spread": None, "note": None, "machine": MACHINE,
            "date": datetime.date.today().isoformat(), "commit": commit, "state": args.state,
            "command": command, "better": better, **more}
    with open(os.path.join(ROOT, "bench", "results", topic + ".csv"), "w", encoding="utf-8",
              newline="") as file:
        for key, value in head.items():
            if value:
                file.write(f"# {key}: {value}\n")
        table = csv.writer(file, lineterminator="\n")
        if isinstance(lines[0], dict):
            table.writerow(lines[0].keys())
            table.writerows(line.values() for line in lines)
        else:
            names = ["panel", "row", "series", "value", "low", "high", "goal", "times"]
            table.writerow(names[:len(lines[0])])
            table.writerows([f"{x:.3g}" if isinstance(x, float) else x for x in line]
                            for line in lines)


def says(what, values, goal, better="lower"):
    """One line of the table: a goal is decided by the median of the runs."""
    value = statistics.median(values)
    reached = value <= goal if better == "lower" else value >= goal
    runs = ", ".join(f"{x:.3g}" for x in values)
    goals.append(f"| {what} | {'at most' if better == 'lower' else 'at least'} {goal:g} | "
                 f"{value:.3g} [{runs}] | {'reached' if reached else '**missed**'} |")


def took(lines, *columns):
    """Medians of columns of microseconds, as a text."""
    medians = [statistics.median(float(line[column]) for line in lines) for column in columns]
    divisor, unit = (1000, "ms") if max(medians) >= 1000 else (1, "us")
    return " beside ".join(f"{x / divisor:.3g}" for x in medians) + " " + unit


def point(panel, row, series, lines, column, low, high, goal, better="lower", times=()):
    """A point of a picture, of one line of each run, and its goal's line. One run has no spread."""
    if not lines:
        sys.exit(f"no line for {panel}, {row}, {series}")
    values = [float(line[column]) for line in lines]
    if goal != "":
        says(f"{panel}, {row}, {series}", values, goal, better)
    ends = (min(float(line[low]) for line in lines), max(float(line[high]) for line in lines))
    return (panel, row, series, statistics.median(values),
            *(ends if len(lines) > 1 or low != high else ("", "")), goal,
            took(lines, *times) if times else "")


def same(runs, **wanted):
    """Of each run the line in which these columns have these values."""
    found = [[line for line in run if all(line[k] == str(v) for k, v in wanted.items())]
             for run in runs]
    return [lines[0] for lines in found if lines]


# ---- topics ------------------------------------------------------------------------------------

def hooks():
    runs = run("hooks", ["build/bench/bench_host"], "bench_host.csv")
    for mode in ("inline", "streams"):
        for call, goal in (("forward", 80), ("backward", 160)):
            for dtype in ("f32", "bf16"):
                lines = [[line for line in run if (line["mode"], line["call"],
                          line["param_dtype"]) == (mode, call, dtype)] for run in runs]
                says(f"hooks, {call}, {mode}, {dtype}, ns",
                     [statistics.median(float(x["median_ns"]) for x in found) for found in lines],
                     goal)
    middle = sorted(runs, key=lambda run: sum(float(x["median_ns"]) for x in run))[len(runs) // 2]
    write("hooks", "Host cost of the hooks of a unit of 12 parameters", "nanoseconds, median; a "
          "device and a communicator that do nothing", "build/bench/bench_host", "lower", middle,
          spread="from the least to the 95th percentile", scale="linear",
          note="f32, bf16: the type in which parameters are gathered. Inline: a collective runs "
          "within the call; on streams: beside it.")


def shm():
    sizes = "1M,4M,16M,64M,256M"
    command = [COMM, "--backend", "shm", "--sizes", sizes, "--seconds", "1"]
    runs, lines = run("shm", command, "bench_comm.csv"), []
    limits = {"all_gather": (1.1, 1.1), "reduce_scatter": (1.15, 1.3), "reduce_bf16": (1.15, 1.3),
              "all_reduce": (1.2, 1.2)}
    for op, name in OPS.items():
        for world, goal in zip((2, 4), limits[op]):
            for size in sorted({int(line["bytes"]) for line in runs[0]}):
                for who in ("shm", "meet"):
                    found = same(runs, op=op, world=world, bytes=size, who=who)
                    if found:
                        lines.append(point(f"{name}, {world} ranks", size_of(size),
                                           OURS if who == "shm" else BOUND, found,
                                           "to_memcpy_or_tcp", "ratio_p10", "ratio_p90",
                                           goal if who == "shm" else "", times=["us_median"]))
    write("shm", "Shared memory against memcpy", "times as long as a memcpy of the bytes that the "
          f"collective has to read and write; median of {args.runs} runs' medians; 2 cores; sizes "
          "of the whole buffer", " ".join(command), "lower", lines,
          spread="10th to 90th percentile of the rounds", note=OF_BOUND)


def shm_small():
    command = [COMM, "--backend", "shm", "--ranks", "4", "--sizes", "4K,64K", "--seconds", "2"]
    runs, lines = run("shm_small", command, "bench_comm.csv"), []
    for op, name in OPS.items():
        for size in (4 << 10, 64 << 10):
            for who in ("shm", "meet"):
                found = same(runs, op=op, world=4, bytes=size, who=who)
                if found:
                    lines.append(point(name, size_of(size), OURS if who == "shm" else BOUND, found,
                                       "us_median", "us_median", "us_median",
                                       15 if who == "shm" else ""))
    write("shm_small", "Short collectives over shared memory, 4 ranks on 2 cores",
          f"microseconds, median of {args.runs} runs' medians; sizes of the whole buffer",
          " ".join(command), "lower", lines, spread="the range of the runs", note=OF_BOUND,
          scale="linear")


def torch():
    tcp = {"FSDP_GLOO_NEAR": "1", "FSDP_BACKEND": "gloo"}
    compare = [args.python, "bench/compare_torch.py", "--bench", GLOO_COMM, "--backend", "gloo"]
    comm = [GLOO_COMM, "--backend", "gloo", "--sizes", "64K,1M,16M,64M"]
    beside = run("torch", compare, "compare_torch.csv", **tcp)
    alone = run("gloo", comm, "bench_comm.csv", **tcp)
    faster, streams = [], []
    aims = {"all_gather": (3, "", 1.5, 1.5), "reduce_scatter": (3, "", 2.5, 2.5),
            "all_reduce": ("", "", 2, 2)}
    for op in aims:
        for world in (2, 4):
            for i, size in enumerate((64 << 10, 1 << 20, 16 << 20, 64 << 20)):
                panel, row = f"{op}, {world} ranks", size_of(size)
                lines = same(beside, op=op, world=world, bytes=size)
                faster.append(point(panel, row, "fsdp.h over Gloo", lines, "times_faster",
                                    "times_faster", "times_faster", aims[op][i], "higher",
                                    ["us_ours", "us_torch"]))
                wire = [float(x["us_torch"]) / float(x["us_tcp"]) for x in lines]
                faster.append((panel, row, STREAM, statistics.median(wire), min(wire), max(wire),
                               "", took(lines, "us_tcp", "us_torch")))
                for x in lines:
                    x["to_stream"] = float(x["us_ours"]) / float(x["us_tcp"])
                goal = 2 if i == 0 else 1.3
                streams.append(point(panel, row, "fsdp.h over Gloo, in compare_torch.py", lines,
                                     "to_stream", "to_stream", "to_stream", goal,
                                     times=["us_ours"]))
                for who, series in (("gloo", "fsdp.h over Gloo, in bench_comm"),
                                    ("bare", "messages of Gloo alone")):
                    lines = same(alone, op=op, world=world, bytes=size, who=who)
                    streams.append(point(panel, row, series, lines, "to_memcpy_or_tcp",
                                         "ratio_p10", "ratio_p90", goal if who == "gloo" else "",
                                         times=["us_median"]))
    name = "FSDP_GLOO_NEAR=1 FSDP_BACKEND=gloo python3 " + " ".join(compare[1:])
    where = "all ranks on one host, over loopback; sizes of the whole buffer"
    write("torch", "Gloo against PyTorch's ProcessGroupGloo", f"times faster than PyTorch "
          f"{args.torch}; median of {args.runs} runs; {where}", name, "higher", faster,
          spread="the range of the runs", note=OF_STREAM)
    write("gloo_stream", "Gloo against a raw TCP stream", f"times as long as the stream, median; "
          f"{where}", "FSDP_GLOO_NEAR=1 " + " ".join(comm) + "; bench/compare_torch.py", "lower",
          streams, spread=f"the range of {args.runs} runs of compare_torch.py; 10th to 90th "
          "percentile of bench_comm's rounds", note=OF_STREAM + " Two programs measure the same "
          "collective: compare_torch.py in turn with PyTorch, bench_comm in turn with a memcpy and "
          "Gloo's own ring, from cold caches. The messages alone are the same bytes by Gloo, "
          "without fsdp.h, and nothing is added up.")


def steps():
    command = [args.python, "bench/fsdp_step.py", "--bench", STEP, "--comm-threads", "0"]
    ways = [("ranks share memory", run("near", command, "fsdp_step.csv", FSDP_BACKEND="gloo")),
            ("over TCP", run("tcp", command + ["--ranks", "2"], "fsdp_step.csv",
                             FSDP_BACKEND="gloo", FSDP_GLOO_NEAR="1"))]
    lines = []
    for way, runs in ways:
        for world in (2, 4):
            for (model, case), name in MODELS.items():
                found = same(runs, model=model, case=case, world=world, threads=0)
                large = (model, case) == ("gpt", "large")
                for panel, column, goal, times in (
                        ("extra time of each unit", "times_less_extra",
                         30 if case == "tiny" else "", ["extra_us", "torch_extra_us"]),
                        ("a step", "times_faster_step", 2.5 if large else "",
                         ["pass_us", "torch_pass_us"])):
                    if found:
                        lines.append(point(panel, f"{name}, {world} ranks", way, found, column,
                                           column, column, goal, "higher", times))
    lines.sort(key=lambda line: line[0] == "a step")
    write("steps", "Training steps against PyTorch's fully_shard, over Gloo",
          f"times faster than PyTorch {args.torch}, on one host, median of {args.runs} runs; in "
          "brackets the times of fsdp.h and of PyTorch", "FSDP_BACKEND=gloo python3 " +
          " ".join(command[1:]) + "; over TCP with FSDP_GLOO_NEAR=1", "higher", lines,
          spread="the range of the runs", note="In brackets stands for a step its pass, which is a "
          "forward and a backward. The extra time is what sharding adds to a pass for each unit. "
          "Sizes: units and their width. Within a host fsdp.h's ranks share memory by default; "
          "PyTorch uses TCP.", columns=1)


def wire():
    lines = []
    for rate in ("10gbit", "2gbit"):
        command = ["bench/slow_wire.sh", rate, STEP, "--case", "tiny,large", "--ranks", "2",
                   "--comm-threads", "0,1,2"]
        runs = run("wire_" + rate, command, "bench_step.csv", FSDP_BACKEND="gloo",
                   FSDP_GLOO_NEAR="1")
        for (model, case), name in MODELS.items():
            inline = same(runs, model=model, case=case, threads=0)
            for threads, series in ((1, "1 thread"), (2, "2 threads")):
                found = same(runs, model=model, case=case, threads=threads)
                for x, y in zip(found, inline):
                    x["faster"] = float(y["pass_us"]) / float(x["pass_us"])
                lines.append(point(f"{rate[:-4]} Gbit/s", name, series, found, "faster", "faster",
                                   "faster", "", times=["pass_us"]))
    write("wire", "Worker threads compared with inline, over a wire that takes time",
          "times faster than inline, forward and backward of two ranks, over loopback shaped to a rate; median of the runs",
          "FSDP_BACKEND=gloo FSDP_GLOO_NEAR=1 bench/slow_wire.sh 10gbit (and 2gbit) " +
          " ".join(command[2:]), "higher", lines, spread="the range of the runs", note=OF_THREADS,
          scale="linear")


GPT_MEMORY = "examples/gpt/train_gpt --ranks N --batch 32 --steps 3 --save DIR"


def memory_of(ranks):
    """{part: bytes} of a rank, as the trainer says at its end."""
    parts = {"shards": "parameters", "shard gradients": "gradients",
             "AdamW moments": "AdamW's moments"}
    with tempfile.TemporaryDirectory() as folder:
        command = [{"N": str(ranks), "DIR": folder}.get(w, w) for w in GPT_MEMORY.split()]
        text = subprocess.run(command, cwd=ROOT, check=True, text=True, capture_output=True).stdout
    table = {name: (int(predicted.replace(",", "")), int(measured.replace(",", "")))
             for name, predicted, measured in
             re.findall(r"^  (\S.*?) +([\d,]+) +([\d,]+) +(?:[\d,]+|-)$", text, re.M)}
    if any(predicted != measured for predicted, measured in table.values()):
        sys.exit(f"{ranks} ranks: the prediction is not what was measured:\n{text}")
    nbytes = {part: table[name][1] for name, part in parts.items()}
    nbytes["layers gathered now, and their gradients"] = table["total"][1] - sum(nbytes.values())
    return nbytes


def memory():
    lines = [("", f"{ranks} rank{'s' * (ranks > 1)}", part, nbytes, "", "", "")
             for ranks in (1, 2, 4, 8, 16, 32) for part, nbytes in memory_of(ranks).items()]
    write("memory", "Memory of each rank, by the number of ranks", "a GPT of 834,304 parameters in "
          "f32, as make run trains it, without its activations; as predicted, to the byte",
          GPT_MEMORY, "lower", lines, machine="any machine", state="count", form="stack",
          picture="memory.svg", reference="without sharding, on every rank")


TOPICS = {"hooks": hooks, "shm": shm, "shm_small": shm_small, "torch": torch, "steps": steps,
          "wire": wire, "memory": memory}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default=",".join(TOPICS))
    parser.add_argument("--state", default="quiet")
    parser.add_argument("--keep", help="a directory for what the benchmarks write")
    parser.add_argument("--python", default=sys.executable, help="one that has torch")
    parser.add_argument("--torch", default="2.15", help="its version, for the titles")
    parser.parse_args(namespace=args)
    args.keep = os.path.abspath(args.keep or tempfile.mkdtemp(prefix="goals."))
    os.makedirs(args.keep, exist_ok=True)
    for topic in args.only.split(","):
        TOPICS[topic]()
    print("| goal | | measured, median [runs] | |\n|---|---|---|---|")
    print("\n".join(goals))


if __name__ == "__main__":
    main()
