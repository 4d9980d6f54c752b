#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Texts to token files for train_llama, and token numbers to text. Needs transformers.

  tokens.py --model DIR --out train.bin TEXT...        texts; an end token follows each
  tokens.py --model DIR --out train.bin CHATS.jsonl    lines {"prompt": ..., "response": ...} through
                                                       the model's chat template; train.mask says
                                                       which tokens are labels: the responses'
  tokens.py --model DIR --ids "The capital of France is"
  tokens.py --model DIR --text 7042,30,2
"""
import argparse
import json
import os
import struct
import sys
from pathlib import Path


def chat(tokenizer, prompt, response):
    """Returns the tokens of one exchange, and 1 for each token of the response."""
    asked = [{"role": "user", "content": prompt}]
    whole = asked + [{"role": "assistant", "content": response}]
    begin = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    text = tokenizer.apply_chat_template(whole, tokenize=False)
    if not text.startswith(begin):
        sys.exit("tokens.py: the chat template changes a prompt after its response: use texts")
    head = tokenizer(begin, add_special_tokens=False)["input_ids"]
    tail = tokenizer(text[len(begin):], add_special_tokens=False)["input_ids"]
    return head + tail, [0] * len(head) + [1] * len(tail)


def read(tokenizer, path):
    """Returns the tokens of a file and their mask."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        sys.exit(f"tokens.py: {path}: expected a text in UTF-8: {why}")
    if not path.endswith(".jsonl"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        return ids, [1] * len(ids)
    ids, mask = [], []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            more = chat(tokenizer, row["prompt"], row["response"])
        except (ValueError, KeyError, TypeError) as why:
            sys.exit(f'tokens.py: {path}: line {number}: expected {{"prompt": ..., "response": '
                     f"...}}: {why!r}")
        ids += more[0]
        mask += more[1]
    return ids, mask


def write(path, ids, vocab):
    """Writes tokens as llm.c does: 256 numbers of 4 bytes, then 2 or 4 bytes for each token."""
    magic, version, code = (20240520, 1, "H") if vocab <= 1 << 16 else (20240801, 7, "I")
    header = struct.pack("<256i", magic, version, len(ids), *[0] * 253)
    try:
        Path(path).write_bytes(header + struct.pack(f"<{len(ids)}{code}", *ids))
    except OSError as why:
        sys.exit(f"tokens.py: --out {path}: {why.strerror}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out")
    parser.add_argument("--ids")
    parser.add_argument("--text")
    parser.add_argument("files", nargs="*")
    args = parser.parse_args()
    if bool(args.out) != bool(args.files) or not (args.out or args.ids or args.text):
        parser.error("expected --out with files, --ids or --text")
    if not Path(args.model, "tokenizer_config.json").is_file():
        sys.exit(f"tokens.py: --model {args.model}: expected a directory with the tokenizer's files"
                 ", got none with tokenizer_config.json")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no word on PyTorch: it is not needed
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.ids is not None:
        print(",".join(map(str, tokenizer(args.ids, add_special_tokens=False)["input_ids"])))
    if args.text is not None:
        print(tokenizer.decode([int(i) for i in args.text.split(",")]))
    if not args.out:
        return
    ids, mask = [], []
    for path in args.files:
        more = read(tokenizer, path)
        ids += more[0]
        mask += more[1]
    write(args.out, ids, len(tokenizer))
    print(f"{args.out}: {len(ids)} tokens of {len(args.files)} files, {sum(mask)} of them labels")
    if not all(mask):
        path = Path(args.out).with_suffix(".mask")
        path.write_bytes(bytes(mask))
        print(f"{path}: --mask")


if __name__ == "__main__":
    main()
