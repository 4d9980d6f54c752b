#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""test_compare_torch_gpu.py - bench/compare_torch_gpu.py: it is skipped where there is nothing to
compare, reads what train_gpt_cuda writes, and judges by the goals. PyTorch is not needed."""
import contextlib
import io
import os
import subprocess
import sys
import tempfile

from harness import Skip, check, run

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
sys.path.insert(0, os.path.join(ROOT, "bench"))
import compare_torch_gpu as tool

REACHED = {("bf16", "ours plain"): 0.0323, ("bf16", "torch plain"): 0.0249,
           ("bf16", "ours sharded"): 0.0340, ("bf16", "torch sharded"): 0.0548,
           ("f32", "ours plain"): 0.130, ("f32", "torch plain"): 0.119,
           ("f32", "ours sharded"): 0.131, ("f32", "torch sharded"): 0.122}


def skipped_with(module):
    """(status, output) where `import torch` gives a module of this text; None: where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "torch.py"), "w", encoding="utf-8") as f:
            f.write(module)
        r = subprocess.run([sys.executable, os.path.join(ROOT, "bench/compare_torch_gpu.py")],
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
                           universal_newlines=True, env=dict(os.environ, PYTHONPATH=folder))
        return r.returncode, r.stdout


def test_skipped():
    for module, says in (("raise ModuleNotFoundError('torch')", "skipped: no module torch"),
                         ("class cuda:\n    is_available = lambda: False",
                          "skipped: PyTorch finds no GPU")):
        status, out = skipped_with(module)
        check(status == 77 and out.startswith(says) and out.count("\n") == 1, f"{status}: {out}")


def verdicts(**changed):
    """What is said of each goal, if these milliseconds of bf16 are others."""
    times = dict(REACHED)
    for who, ms in changed.items():
        times["bf16", who.replace("_", " ")] = ms / 1e3
    goals, out = tool.goals_of(times), io.StringIO()
    with contextlib.redirect_stdout(out):
        tool.show(times, goals)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("goal: ")]
    check([ratio <= most for _, ratio, most in goals] == ["reached" in line for line in lines],
          f"{goals}: {lines}")
    return [line.rsplit(": ", 1)[1] for line in lines]


def test_goals():
    for changed, wanted in (
            ({}, ["1.30, reached", "1.61, reached"]),
            ({"ours_plain": 33}, ["1.33, missed", "1.61, reached"]),
            ({"ours_sharded": 35}, ["1.30, reached", "1.57, missed"]),
            ({"torch_plain": 26, "torch_sharded": 30}, ["1.24, reached", "0.88, missed"])):
        check(verdicts(**changed) == wanted, f"{changed}: {verdicts(**changed)}")
    check(not tool.goals_of({k: v for k, v in REACHED.items() if k[0] == "f32"}), "f32 has no goal")


def test_seconds_of_a_step():
    table = ["step,loss,grad_norm,seconds", "1,5,1,3.0", "2,5,1,3.5", "10,5,1,7.0", "20,5,1,7.5",
             "30,5,1,8.1"]
    check(abs(tool.seconds_of(table) - 1.1 / 20) < 1e-12, tool.seconds_of(table))


def test_ours():
    """The program of the stand-ins takes the options, and its steps have a time."""
    program = os.path.join(ROOT, os.environ.get("FSDP_BUILD", "build"),
                           "stub/examples/train_gpt_cuda")
    if not os.access(program, os.X_OK):
        raise Skip("no " + program)
    shape = {"layers": 1, "heads": 1, "channels": 8, "context": 8, "batch": 1}
    for numbers, how in (("bf16", "plain"), ("tf32", "sharded"), ("f32", "plain")):
        check(tool.ours(program, shape, numbers, how, 10) > 0, f"{numbers} {how}")


if __name__ == "__main__":
    run("compare_torch_gpu", globals())
