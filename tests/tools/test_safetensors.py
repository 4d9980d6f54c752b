#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""test_safetensors.py - checkpoints beside the programs that others read them with: safetensors,
PyTorch's distributed checkpoint, FSDP2 with AdamW, huggingface_hub and transformers. Tests whose
modules are not installed are skipped. By hand: PYTHON=... with them, or

    FSDP_BUILD=build venv/bin/python tests/tools/test_safetensors.py

It needs tools/fsdpck and build/tests/probe_checkpoint, whose model and values are those of
tests/golden/checkpoints."""
import contextlib
import filecmp
import functools
import glob
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings

from harness import Skip, check, run, sh

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
BUILD = os.path.abspath(os.environ.get("FSDP_BUILD", os.path.join(ROOT, "build")))
PROBE = os.path.join(BUILD, "tests", "probe_checkpoint")
FSDPCK = os.environ.get("FSDPCK") or os.path.join(ROOT, "tools", "fsdpck")
MASK = (1 << 64) - 1
SHAPES = {"w": (37, 19), "b": (19,), "side": (5, 37), "tiny": (2,), "frozen": (7,), "half": (3, 4, 5)}
TRAINED = ("w", "b", "side", "tiny")
STEP = 17
warnings.filterwarnings("ignore")


def needs(*modules):
    """A test with a directory of its own, skipped where a module or a program is missing."""
    def decorate(test):
        @functools.wraps(test)
        def wrapped():
            for name in modules:
                try:
                    importlib.import_module(name)
                except ImportError:
                    raise Skip(f"no Python module {name}: pip install torch transformers")
            for program in (PROBE, FSDPCK):
                if not os.access(program, os.X_OK):
                    raise Skip(f"no {program} here: make")
            with tempfile.TemporaryDirectory() as folder:
                test(folder)
        return wrapped
    return decorate


# ---- values ---------------------------------------------------------------------------------------


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def fill(name, shape, dtype=None):
    import torch
    seed, count = 0x811C9DC5, 1
    for byte in name.encode():
        seed = ((seed ^ byte) * 0x01000193) & 0xFFFFFFFF
    for size in shape:
        count *= size
    values = [(mix((seed + 0x9E3779B97F4A7C15 * i) & MASK) >> 40) / 16777216.0 - 0.5
              for i in range(count)]
    return torch.tensor(values).reshape(shape).to(dtype or torch.float32)


def expected():
    """What the probe saves: names of files and whole tensors."""
    import torch
    out = {}
    for layer in range(2):
        for name, shape in SHAPES.items():
            full = f"layers.{layer}.{name}"
            out[full] = fill(full, shape, {"frozen": torch.bfloat16,
                                           "half": torch.float16}.get(name))
            if name in TRAINED:
                for state in ("exp_avg", "exp_avg_sq"):
                    out[f"optim.state.{full}.{state}"] = fill(f"optim.state.{full}.{state}", shape)
                out[f"optim.state.{full}.step"] = torch.tensor(float(STEP + layer),
                                                               dtype=torch.float64)
    return out


def same(got, want, name):
    import torch
    check(got.shape == want.shape, f"{name}: {got.shape}, expected {want.shape}")
    check(torch.equal(got.double(), want.double()), f"{name} has other values")


def saved(folder, ranks=3):
    """A checkpoint of the C library."""
    sh(f"{PROBE} save {ranks} {folder}/run")
    return f"{folder}/run/step-{STEP:08d}"


def loaded(path, ranks, *more):
    """Loads it in C; how many tensors of each rank were right, how many missing."""
    lines = sh(" ".join([PROBE, "load", str(ranks), path, *more])).splitlines()
    lines = [line.split() for line in lines if line.startswith("rank ")]
    check(len(lines) == ranks, str(lines))
    return sorted((int(w[2]), int(w[6])) for w in lines)


# ---- safetensors ----------------------------------------------------------------------------------


def boxes_of(path, files):
    """The tensors of a checkpoint, from the boxes of its files; and how many elements of each."""
    import torch
    from safetensors import safe_open
    whole, seen = {}, {}
    names = sorted(glob.glob(path + "/*.safetensors"))
    check(len(names) == files, str(names))
    for number, file in enumerate(names):
        with safe_open(file, "pt") as f:
            metadata = f.metadata()
            check(metadata["fsdp.writer"] == f"{number + 1}/{files}", str(metadata))
            boxes = json.loads(metadata["DCP_SHARDING_INFO"])
            check(sorted(boxes) == sorted(f.keys()), "sharding info of each tensor")
            for name in f.keys():
                box, at = f.get_tensor(name), boxes[name]["saved_offsets"]
                shape = boxes[name]["global_shape"]
                all_of = whole.setdefault(name, torch.zeros(shape, dtype=box.dtype))
                place = tuple(slice(a, a + n) for a, n in zip(at, box.shape))
                all_of[place] = box
                seen[name] = seen.get(name, 0) + box.numel()
    return whole, seen


@needs("torch", "safetensors")
def test_python_reads_c(folder):
    """Every file opens; boxes put together are the tensors; nothing is there twice."""
    whole, seen = boxes_of(saved(folder), 3)
    want = expected()
    check(sorted(whole) == sorted(want), str(sorted(set(whole) ^ set(want))))
    for name, tensor in want.items():
        check(whole[name].dtype == tensor.dtype, name)
        check(seen[name] == tensor.numel(), f"{name}: {seen[name]} elements")
        same(whole[name], tensor, name)


@needs("torch", "safetensors")
def test_export_has_the_bytes_of_save_file(folder):
    import torch
    from safetensors.torch import save_file
    sh(f"{FSDPCK} export {saved(folder)} {folder}/out --with-optimizer")
    check(os.listdir(f"{folder}/out") == ["model.safetensors"])
    save_file(expected(), f"{folder}/want.safetensors", {"format": "pt"})
    check(filecmp.cmp(f"{folder}/out/model.safetensors", f"{folder}/want.safetensors", False))
    odd = {"\u00e4\u20ac\U0001f600": torch.arange(3), 'q"\\\n\x01\x7f': torch.zeros(2, 0),
           "b": torch.ones((), dtype=torch.bfloat16), "a": torch.full((5,), 2, dtype=torch.uint8)}
    save_file(odd, f"{folder}/odd.safetensors", {"format": "pt"})
    sh(f"{FSDPCK} export {folder}/odd.safetensors {folder}/odd")
    check(filecmp.cmp(f"{folder}/odd/model.safetensors", f"{folder}/odd.safetensors", False))


@needs("torch", "safetensors", "huggingface_hub")
def test_export_splits_as_huggingface_hub(folder):
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import save_file
    tensors = {k: v for k, v in sorted(expected().items())}
    tensors = {k: v for k, v in tensors.items() if not k.startswith("optim.")}
    save_file(tensors, f"{folder}/from.safetensors", {"format": "pt"})
    several = 0
    for limit in (1, 75, 76, 77, 600, 815, 2811, 2812, 2813, 3600, 100000):
        os.mkdir(f"{folder}/want")
        save_torch_state_dict(tensors, f"{folder}/want", max_shard_size=limit)
        sh(f"{FSDPCK} export {folder}/from.safetensors {folder}/out --max-file-bytes {limit}")
        names = sorted(os.listdir(f"{folder}/want"))
        check(sorted(os.listdir(f"{folder}/out")) == names, f"{limit}: {names}")
        several += len(names) > 2
        for name in names:
            ours, theirs = f"{folder}/out/{name}", f"{folder}/want/{name}"
            if not name.endswith(".json"):
                check(filecmp.cmp(ours, theirs, False), f"{limit}: {name}")
                continue
            with open(ours, encoding="utf-8") as f, open(theirs, encoding="utf-8") as g:
                check(json.load(f) == json.load(g), f"{limit}: {name}")
        shutil.rmtree(f"{folder}/want")
        shutil.rmtree(f"{folder}/out")
    check(several >= 8, f"several files in {several} cases")


# ---- PyTorch --------------------------------------------------------------------------------------


def torch_ranks(ranks, function, *arguments):
    """Runs a function of this file on some ranks of PyTorch over Gloo."""
    import torch.multiprocessing as mp
    with tempfile.TemporaryDirectory() as meet:
        mp.spawn(torch_rank, args=(ranks, meet, function, arguments), nprocs=ranks)


def torch_rank(rank, ranks, meet, function, arguments):
    import torch
    import torch.distributed as dist
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}/store", rank=rank, world_size=ranks)
    function(*arguments)
    dist.destroy_process_group()


def read_by_dcp(path):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    mesh, want = init_device_mesh("cpu", (dist.get_world_size(),)), expected()
    got = {name: distribute_tensor(torch.zeros_like(t), mesh, [Shard(t.dim() - 1)]) if t.dim()
           else torch.zeros_like(t) for name, t in want.items()}
    with contextlib.redirect_stdout(io.StringIO()):
        dcp.load(got, storage_reader=HuggingFaceStorageReader(path))
    for name, tensor in want.items():
        same(got[name].full_tensor() if tensor.dim() else got[name], tensor, name)


@needs("torch", "safetensors")
def test_dcp_reads_c(folder):
    path = saved(folder)
    sh(f"{FSDPCK} reshard {path} {folder}/cut --ranks 2")
    for ranks in (1, 2):
        torch_ranks(ranks, read_by_dcp, path)
        torch_ranks(ranks, read_by_dcp, f"{folder}/cut")


@needs("torch", "safetensors")
def test_torch_consolidates_c(folder):
    """Its consolidator takes no tensors of integers, and makes those without dims 0, also of its own
    files: so steps are not compared."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files)
    want = expected()
    os.mkdir(f"{folder}/out")
    consolidate_safetensors_files(saved(folder), f"{folder}/out", {name: 1 for name in want})
    got = {}
    for file in glob.glob(f"{folder}/out/*.safetensors"):
        got.update(load_file(file))
    check(sorted(got) == sorted(want), str(sorted(got)))
    for name, tensor in want.items():
        if tensor.dim():
            same(got[name], tensor, name)


def fsdp2_model():
    """The part of the model that FSDP2 can have in one group, its optimizer, and names."""
    import torch
    from torch.distributed.fsdp import fully_shard

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in TRAINED:
                setattr(self, name, torch.nn.Parameter(torch.zeros(SHAPES[name])))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer(), Layer()])

    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def fsdp2_state(model, optimizer):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, get_model_state_dict, get_optimizer_state_dict)
    state = dict(get_model_state_dict(model))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for name, value in get_optimizer_state_dict(model, optimizer, options=options).items():
        state["optim." + name] = value
    return state


def resume_fsdp2(path):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions, set_model_state_dict, set_optimizer_state_dict)
    model, optimizer = fsdp2_model()
    state = fsdp2_state(model, optimizer)
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    with contextlib.redirect_stdout(io.StringIO()):
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path))
    state.update(tensors)
    set_model_state_dict(model, {k: v for k, v in state.items() if not k.startswith("optim.")})
    set_optimizer_state_dict(model, optimizer,
                             {k[6:]: v for k, v in state.items() if k.startswith("optim.")},
                             options=StateDictOptions(flatten_optimizer_state_dict=True))
    want, looked = expected(), 0
    for name, parameter in model.named_parameters():
        same(parameter.full_tensor(), want[name], name)
        states = optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            same(states[key].full_tensor(), want[f"optim.state.{name}.{key}"], f"{name} {key}")
        check(float(states["step"]) == STEP + int(name.split(".")[1]), f"{name}: {states['step']}")
        looked += 4
    check(looked == 32, f"{looked} tensors")
    for parameter in model.parameters():  # the training continues
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    check(float(optimizer.state[parameter]["step"]) == STEP + 2)


@needs("torch", "safetensors")
def test_fsdp2_resumes_from_c(folder):
    path = saved(folder)
    for ranks in (1, 2):
        torch_ranks(ranks, resume_fsdp2, path)


def save_fsdp2(path):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    model, optimizer = fsdp2_model()
    want = expected()
    state = {k: v for k, v in fsdp2_state(model, optimizer).items() if isinstance(v, torch.Tensor)}
    for name, value in state.items():
        with torch.no_grad():
            if value.dim():
                from torch.distributed.tensor import distribute_tensor
                value.copy_(distribute_tensor(want[name], value.device_mesh, value.placements))
            else:
                value.fill_(float(want[name]))
    with contextlib.redirect_stdout(io.StringIO()):
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))


@needs("torch", "safetensors")
def test_c_loads_what_fsdp2_saved(folder):
    for ranks in (1, 2):
        torch_ranks(ranks, save_fsdp2, f"{folder}/by{ranks}")
        sh(f"{FSDPCK} verify {folder}/by{ranks}")
        for mine in (1, 3):
            found = loaded(f"{folder}/by{ranks}", mine, "partial")
            check(all(missing == 4 for _, missing in found), str(found))  # frozen and half
            # 4 * 8 tensors; on three ranks the last one has only the step of `tiny`
            check(found[-1][0] == 32 and found[0][0] == (32 if mine == 1 else 26), str(found))
        sh(f"{FSDPCK} import {folder}/by{ranks} {folder}/ours{ranks} --ranks 2")
        check(loaded(f"{folder}/ours{ranks}", 1, "partial") == [(32, 4)])


# ---- transformers ---------------------------------------------------------------------------------


def round_trip(folder, model):
    """A model of transformers to a checkpoint of ours and back, in one file, in several, in bf16."""
    import torch
    from transformers.utils import logging
    logging.disable_progress_bar()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fill(name, parameter.shape))
    model.save_pretrained(f"{folder}/from")
    sh(f"{FSDPCK} import {folder}/from {folder}/step-00000003 --ranks 3")
    sh(f"{FSDPCK} verify {folder}/step-00000003")
    sh(f"{FSDPCK} diff {folder}/from {folder}/step-00000003")
    for name, options in (("one", ""), ("several", "--max-file-bytes 20KB"), ("bf16", "--dtype bf16")):
        sh(f"{FSDPCK} export {folder}/step-00000003 {folder}/{name} {options}")
        files = glob.glob(f"{folder}/{name}/*.safetensors")
        check((len(files) > 1) == (name == "several"), str(files))
        shutil.copy(f"{folder}/from/config.json", f"{folder}/{name}")
        if name == "one":
            check(filecmp.cmp(files[0], f"{folder}/from/model.safetensors", False), "its own bytes")
        got, info = type(model).from_pretrained(f"{folder}/{name}", output_loading_info=True,
                                                dtype="auto" if name != "bf16" else torch.bfloat16)
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            check(not info[key], f"{name}: {key} {info[key]}")
        theirs = dict(model.named_parameters())
        for key, parameter in got.named_parameters():
            want = theirs.pop(key).detach()
            check(torch.equal(parameter.detach(), want.to(parameter.dtype)), f"{name}: {key}")
        check(not theirs, str(list(theirs)))


@needs("torch", "safetensors")
def test_torch_goes_on_with_muon(folder):
    """torch.optim.Muon takes parameters and momentum of a job on three ranks, and its next step is
    the job's: the gradient follows from the momentum before and behind it. PyTorch computes in bf16,
    so that the two differ by up to 6 %."""
    import torch
    program = os.path.join(ROOT, "examples", "gpt", "train_gpt")
    if not hasattr(torch.optim, "Muon") or not os.access(program, os.X_OK):
        raise Skip("no torch.optim.Muon, or no train_gpt: make")
    sh(f"{program} --ranks 3 --optimizer muon --layers 1 --heads 2 --channels 32 --batch 3 "
       f"--context 16 --steps 5 --sample 0 --save-every 1 --keep 9 --save {folder}/run")
    before, after = (boxes_of(f"{folder}/run/step-{step:08d}", 3)[0] for step in (4, 5))
    for name in ("h.0.fcw", "h.0.fcprojw"):
        momentum = f"optim.state.{name}.momentum_buffer"
        check([key for key in before if key.startswith(f"optim.state.{name}.")] == [momentum], name)
        old, new = before[momentum].double(), after[momentum].double()
        p = torch.nn.Parameter(before[name].clone())
        p.grad = (old + (new - old) / 0.05).float()
        muon = torch.optim.Muon([p], lr=1.0, weight_decay=0.0)
        state = muon.state_dict()
        state["state"] = {0: {"momentum_buffer": before[momentum].clone()}}
        muon.load_state_dict(state)
        muon.step()
        check(torch.allclose(muon.state[p]["momentum_buffer"].double(), new, atol=1e-6), name)
        # The job's step equals this one times its learning rate, plus a decay of the parameter.
        took = (after[name] - before[name]).double().flatten()
        basis = torch.stack([(p.detach() - before[name]).double().flatten(),
                             before[name].double().flatten()], 1)
        fit = torch.linalg.lstsq(basis, took[:, None]).solution
        rest = (took - (basis @ fit).flatten()).norm() / took.norm()
        check(fit[0] > 0 and rest < 0.08, f"{name}: {float(rest):.3f} of the step differs")


@needs("torch", "safetensors", "transformers")
def test_transformers_gpt2(folder):
    from transformers import GPT2Config, GPT2LMHeadModel
    round_trip(folder, GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=131,
                                                  n_positions=24, bos_token_id=0,
                                                  eos_token_id=0)))


@needs("torch", "safetensors", "transformers")
def test_transformers_llama(folder):
    from transformers import LlamaConfig, LlamaForCausalLM
    round_trip(folder, LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, tie_word_embeddings=False)))


if __name__ == "__main__":
    os.chdir(ROOT)
    run("safetensors_py", globals())
