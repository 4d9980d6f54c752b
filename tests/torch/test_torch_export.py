#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""test_torch_export.py - the module in Python that has the names of examples/libtorch/train_gpt.cpp
loads the checkpoint of three ranks of it strictly, by fsdpck export, and continues its training.
Run by make torch; TORCH is the folder of the package torch."""
import glob
import json
import os
import re
import sys
import tempfile

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
sys.path[:0] = [os.path.join(ROOT, "tests/tools"), os.path.join(ROOT, "bench")]
from harness import Skip, check, run, sh  # noqa: E402  (paths first)

TORCH = os.environ.get("TORCH", "")
PYTHON = os.path.join(TORCH, "../../../../bin/python3")  # of a virtual environment
PROGRAM = os.path.join(ROOT, os.environ.get("FSDP_BUILD", "build"), "torch/train_gpt")


def loaded(path):
    """The tensors of a safetensors file."""
    import torch
    types = {"F32": torch.float32}
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        data = f.read()
    return {name: torch.frombuffer(bytearray(data[slice(*e["data_offsets"])]),
                                   dtype=types[e["dtype"]]).view(e["shape"])
            for name, e in header.items() if name != "__metadata__"}


def test_loads_strictly():
    for path in (PROGRAM, os.path.join(ROOT, "tools/fsdprun"), os.path.join(ROOT, "tools/fsdpck")):
        if not os.path.exists(path):
            raise Skip(f"there is no {path}: make torch builds it")
    import torch
    from compare_libtorch import gpt, tokens_of
    text = os.path.join(ROOT, "LICENSE")
    small = f"--width 32 --layers 2 --every 1 {text}"
    with tempfile.TemporaryDirectory() as folder:
        sh(f"{ROOT}/tools/fsdprun -n 3 {PROGRAM} --checkpoint --steps 20 --save {folder}/run {small}")
        sh(f"{ROOT}/tools/fsdpck export {folder}/run/step-00000020 {folder}/out")
        tensors = {}
        for path in glob.glob(f"{folder}/out/*.safetensors"):
            tensors.update(loaded(path))
        model = gpt(layers=2, width=32)
        model.load_state_dict(tensors, strict=True)
        # The loss of the next step is that of plain LibTorch in C++, which runs it after the same 20.
        said = sh(f"{PROGRAM} --plain --steps 21 {small}")
        want = float(re.findall(r"^step 20 loss (\S+)$", said, re.M)[0])
        with open(text, "rb") as f, torch.no_grad():
            got = float(model(tokens_of(f.read(), 20, 12, 0, 12)))
        check(abs(got / want - 1) < 1e-6, f"loss {got}, expected {want}")


if __name__ == "__main__":
    if os.path.exists(PYTHON) and not os.environ.get("TORCH_TEST_RUNS"):
        os.execve(PYTHON, [PYTHON, *sys.argv], dict(os.environ, TORCH_TEST_RUNS="1"))
    run("torch_export", globals())
