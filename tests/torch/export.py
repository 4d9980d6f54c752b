#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""export.py - the module in Python that has the names of examples/libtorch/train_gpt.cpp
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


MODULES = """
struct BlockImpl : torch::nn::Module {
    torch::nn::Linear a{nullptr};
    BlockImpl() { a = register_module("a", torch::nn::Linear(8, 8)); }
    torch::Tensor forward(torch::Tensor x) { return x + a(x); }
};
TORCH_MODULE(Block);
struct NetImpl : torch::nn::Module {
    std::vector<Block> blocks;
    NetImpl() {
        for (int i = 0; i < 2; i++) blocks.push_back(register_module(std::to_string(i), Block()));
    }
    torch::Tensor embed(torch::Tensor x) { return x; }
    torch::Tensor loss(torch::Tensor x, torch::Tensor y) { return torch::mse_loss(x, y); }
};
TORCH_MODULE(Net);
struct Batch { torch::Tensor input, target; };
static std::vector<Batch> batches(int, int) { return {}; }
using torch::Tensor;
"""


def test_document_compiles():
    """Both columns of docs/from-libtorch.md are programs."""
    with open(os.path.join(ROOT, "docs/from-libtorch.md"), encoding="utf-8") as f:
        rows = re.search(r"^// before +// after\n(.*?)^```", f.read(), re.M | re.S).group(0)
    at = rows.index("// after")
    for which in (slice(0, at), slice(at, None)):
        lines = [line[which] for line in rows.split("\n")[1:-1]]
        last = max(i for i, line in enumerate(lines) if line.startswith("#include"))
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/program.cpp", "w", encoding="utf-8") as f:
                f.write("\n".join(lines[:last + 1] + [MODULES] + lines[last + 1:]) + "\n")
            sh(f"c++ -std=c++20 -fsyntax-only -I{ROOT} -isystem {TORCH}/include "
               f"-isystem {TORCH}/include/torch/csrc/api/include {folder}/program.cpp")


if __name__ == "__main__":
    if os.path.exists(PYTHON) and not os.environ.get("TORCH_TEST_RUNS"):
        os.execve(PYTHON, [PYTHON, *sys.argv], dict(os.environ, TORCH_TEST_RUNS="1"))
    run("torch_export", globals())
