/* train_llama.c - fine-tunes a Llama, Qwen2 or Qwen3 model of Hugging Face on N ranks

   Reads a directory with config.json and safetensors, and tokens in the form of llm.c; trains all
   parameters, or adapters over frozen ones; writes checkpoints, and at the end a directory that
   transformers or PEFT loads. Each layer is one unit of fsdp.h. The arithmetic is in llama.h, the
   model in llama_model.h; README.md shows the whole way from a text to a fine-tuned model.

   Build (in the repository's root; `make examples` does it):
       cc -O3 -march=native -ffp-contract=fast -I. examples/llama/train_llama.c -o train_llama \
           -pthread -lm
   With OpenBLAS: add -DGEMM_BLAS $(pkg-config --cflags --libs openblas).
   Run:
       train_llama --model DIR --data tokens.bin                     evaluates
       train_llama --model DIR --sample 504,3575,282                 continues
       train_llama --model DIR --data tokens.bin --ranks 2 --steps 100 --export out
       train_llama --model DIR --data tokens.bin --lora 8 --base q8_0 --steps 100 --export adapter
       tools/fsdprun -n 2 train_llama --model DIR --data tokens.bin --steps 100 --save run --resume

   Losses depend on --seed, --batch and --context, and not on the number of ranks, rounding apart.
   Exit status: 0 done, 1 something failed on the way, 2 the request is impossible: then nothing
   is allocated, read or written.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // getopt_long under -std=c99 too
#endif

#ifndef TRAINER_LIBRARY_APART // the Makefile compiles both at the same time
#define FSDP_IMPLEMENTATION
#endif
#include "fsdp.h" // fsdp_*

#define PROGRAM "train_llama"
#include "examples/llama/llama_host.h" // llama_main

int main(int argc, char **argv) { return llama_main(argc, argv); }
