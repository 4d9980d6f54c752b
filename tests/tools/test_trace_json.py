#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""test_trace_json.py - fsdptrace json: a strict reader of Chrome's format takes what a program has
left without a change of it, inline and with lanes; what overlaps is refused."""
import glob
import json
import os
import re
import struct
import subprocess
import sys
import tempfile

from harness import Skip, check, run, sh

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
PROGRAM = os.path.join(ROOT, "examples/gpt/train_gpt")
TOOL = os.path.join(ROOT, "tools/fsdptrace")
CLEAN = {k: v for k, v in os.environ.items()
         if not k.startswith("FSDP_") and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
KEYS = {"M": {"args"}, "C": {"args"}, "X": {"dur", "args"}, "b": {"cat", "id"}, "e": {"cat", "id"}}
BLOCK, SECTIONS, RECORD = 65536, 312, 48  # sizes in the trace's format; offset of its sections


def traced(folder, ranks=2, **env):
    for path in (PROGRAM, TOOL, os.path.join(ROOT, "tools/fsdprun")):
        if not os.path.exists(path):
            raise Skip(f"there is no {path}")
    sh(f"{ROOT}/tools/fsdprun -n {ranks} {PROGRAM} --data {ROOT}/LICENSE --channels 32 --heads 2 "
       "--layers 2 --context 16 --batch 4 --steps 7 --sample 0", cwd=folder,
       env=dict(CLEAN, FSDP_TRACE=folder, FSDP_TRACE_STEPS="2:4", **env))


def convert(folder, status=0):
    """(what the tool says, the path of the JSON)"""
    path = os.path.join(folder, "trace.json")
    r = subprocess.run([TOOL, "json", folder, "-o", path], stdout=subprocess.PIPE,
                       stderr=subprocess.STDOUT, universal_newlines=True, env=CLEAN)
    check(r.returncode == status, f"exit status {r.returncode}: {r.stdout}")
    return r.stdout, path


def once(pairs):
    check(len(pairs) == len({k for k, _ in pairs}), f"a key twice: {pairs}")
    return dict(pairs)


def not_a_number(word):
    raise ValueError(word)


def strict(path):
    """The events, of which each has what its kind has, and no more."""
    with open(path, encoding="utf-8") as f:
        whole = json.load(f, object_pairs_hook=once, parse_constant=not_a_number)
    check(set(whole) == {"displayTimeUnit", "traceEvents"} and whole["displayTimeUnit"] == "ns")
    open_spans = {}
    for e in whole["traceEvents"]:
        check(set(e) == {"ph", "pid", "tid", "ts", "name"} | KEYS[e["ph"]], f"{e}")
        check(e["ts"] >= 0 and e["name"] and isinstance(e["pid"], int), f"{e}")
        check(e["tid"] > 0 and e["tid"] != e["pid"], f"Perfetto takes another thread for it: {e}")
        if e["ph"] in "be":
            open_spans[e["id"]] = open_spans.get(e["id"], 0) + (1 if e["ph"] == "b" else -1)
    check(not any(open_spans.values()), "a span has no end")
    return whole["traceEvents"]


def nested(events):
    """Checks that the X events of each thread nest. Returns (event, the event around it)."""
    pairs, threads = [], {}
    for e in events:
        if e["ph"] == "X":
            threads.setdefault((e["pid"], e["tid"]), []).append(e)
    for own in threads.values():
        around = []
        for e in sorted(own, key=lambda e: (e["ts"], -e["dur"])):
            begin, end = round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)
            while around and around[-1][1] <= begin:
                around.pop()
            check(not around or around[-1][1] >= end, f"{e} overlaps {around and around[-1][0]}")
            pairs.append((e, around[-1][0] if around else None))
            around.append((e, end))
    return pairs


def look_at(folder, lanes):
    said, path = convert(folder)
    check("ranks: 2 of 2" in said, said)
    events = strict(path)
    pairs = nested(events)
    names = {e["name"] for e, _ in pairs}
    for step in ("step 2", "step 3", "step 4"):
        check(step in names, f"no {step}")
    check("step 5" not in names and "step 1" not in names)
    for pattern in (r"\S+ all_gather [\d.]+ k?B", r"\S+ reduce_scatter [\d.]+ k?B",
                    r"\S+ pre_forward", r"finalize_backward"):
        check(any(re.fullmatch(pattern, name) for name in names), f"no {pattern} in {names}")
    collectives = [e for e in events if e["ph"] == "X" and " all_gather " in e["name"]]
    check({e["pid"] for e in collectives} == {0, 1})
    check(all("last_rank" in e["args"] for e in collectives), "one is not matched")
    waits = [(e, out) for e, out in pairs if e["name"].startswith("waits for rank ")]
    check(waits, "nobody has waited")
    for e, out in waits:
        check(out and e["name"] == f"waits for rank {out['args']['last_rank']}", f"{e} in {out}")
        after = [x for x, o in pairs if o is out and x["name"] == "transfer"]
        check(all(x["ts"] >= e["ts"] + e["dur"] - 0.0005 for x in after))
    memory = [e for e in events if e["ph"] == "C" and e["name"] == "gathered parameters"]
    check(memory and all(e["args"]["bytes"] >= 0 for e in memory))
    for pid in (0, 1):
        held = [e["args"]["bytes"] for e in memory if e["pid"] == pid]
        check(held[-1] == 0 and max(held) > 0, f"{held}")
    places = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    check({"steps", "host", "compute", "gather", "reduce"} <= places)
    if lanes:
        check(any(e["name"] == "waits for another stream" for e, _ in pairs))


def test_inline():
    with tempfile.TemporaryDirectory() as folder:
        traced(folder)
        look_at(folder, False)


def test_lanes():
    with tempfile.TemporaryDirectory() as folder:
        traced(folder, FSDP_COMM_THREADS="2")
        look_at(folder, True)


def total(data):
    """The sum of a block, as src/trace/format.h has it."""
    value, mask = len(data), (1 << 64) - 1
    for word in struct.unpack(f"<{len(data) // 8}Q", data):
        value = (value ^ word) * 0x9E3779B97F4A7C15 & mask
        value ^= value >> 29
    return struct.pack("<Q", value)


def test_overlap():
    """Two records of a stream that overlap: no JSON is written, and the text names them."""
    with tempfile.TemporaryDirectory() as folder:
        traced(folder, 1)
        path = glob.glob(os.path.join(folder, "*.trace"))[0]
        with open(path, "rb") as f:
            data = bytearray(f.read())
        check(len(data) < BLOCK)
        at, count = struct.unpack_from("<QQ", data, SECTIONS + 11 * 24)
        records = [at + i * RECORD for i in range(count)]
        calls = [r for r in records if data[r + 44] == 17]  # FSDPI_TR_CALL
        check(len(calls) > 4)
        begin, end = struct.unpack_from("<qq", data, calls[2])
        struct.pack_into("<qq", data, calls[1], begin - 1, end - 1)
        data[-8:] = total(bytes(data[:-8]))
        with open(path, "wb") as f:
            f.write(data)
        said, path = convert(folder, 2)
        check("overlap on a thread" in said, said)
        check(not os.path.exists(path) and not os.path.exists(path + ".new"))


def test_usage():
    if not os.path.exists(TOOL):
        raise Skip("there is no tools/fsdptrace")
    with tempfile.TemporaryDirectory() as folder:
        for args in (["json", folder], ["json", "-o", "x"], ["json", folder, "-o"],
                     ["json", folder, "-o", "x", "--after", "1"], ["why", folder, "-o", "x"]):
            r = subprocess.run([TOOL] + args, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               universal_newlines=True, cwd=folder, env=CLEAN)
            check(r.returncode == 2 and "usage:" in r.stderr, f"{args}: {r.stderr}")
        said, _ = convert(folder, 2)
        check("there are no traces" in said, said)


if __name__ == "__main__":
    run("trace_json", globals())
