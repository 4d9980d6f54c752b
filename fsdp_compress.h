/* fsdp_compress.h - gradients sent as bf16 and summed in f32: an extension of fsdp.h

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_compress.h"           // includes fsdp.h; link with -lm

       md.param_dtype = FSDP_BF16;                             // what backward writes
       md.reduce_dtype = FSDP_F32;
       ...                                                     // fsdp_model_create
       if (fsdp_compress_create(model, NULL)) return 1;        // before the first step

   A reduction in f32 by NCCL sends f32; a reduction in bf16 sends half of that, but rounds the sum
   at every hop, in an order that NCCL chooses. With this extension a reduce-scatter is an
   all_to_all of bf16, whose receiver sums in f32, in the order of the ranks: half the bytes of f32,
   no rounding of sums, and the same bits in every run.

   SPDX-License-Identifier: MIT (full text in fsdp.h)

   WHAT IT CHANGES
     Reductions over the shards in f32 or bf16, of f32, bf16 and f16 parameters. f16 and f64
     reductions, the all-reduce over the replicas of HSDP and DDP, and units with a function of
     fsdp_set_custom_reduce_scatter stay as they are.
   ARITHMETIC
     Each rank rounds its f32 gradients to bf16, to nearest even. If backward wrote bf16 and nothing
     was added to it in f32 since (microbatches without gradient sync), nothing is lost. The sum of
     rank 0, 1, ... is one of f32; it is then scaled, added and cast as the reduction asks for: one
     in bf16 stores its sums in bf16, so set reduce_dtype to f32.
     Shared memory and Gloo do all that in one pass already, if backward writes bf16 and the
     reduction runs in f32, with the same bits: attach the extension there only if backward writes
     f32 gradients, which it compresses. A gradient that is not bf16 is off by 2^-8 of itself at
     most, and so is the sum, of the sum of their absolute values.
   COST
     A reduction over W ranks is a copy to bf16, the all_to_all, W copies that add, and one to the
     result, in the order of the stream REDUCE: with many ranks and small units the launches of
     these copies take longer than what they do. fsdp_counters counts the reduce-scatter, which does
     not run, and the all_to_all.
   MEMORY
     One buffer in the pool "compress" of fsdp_memory: of the largest reduction 2 bytes for each
     element to send and to receive, and 4 for each element of a shard. It is allocated in the first
     step, and again if a larger reduction comes. */
#include "fsdp.h"

#ifndef FSDP_COMPRESS_H
#define FSDP_COMPRESS_H
#ifdef FSDP_MATH_ONLY
#error "fsdp_compress.h has no pure functions: with FSDP_MATH_ONLY leave it out"
#else

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_compress fsdp_compress;

/* fsdp_compress_create - send the gradients of a model as bf16 from the next reduction on
   compress    the model owns it: it ends with fsdp_compress_destroy, the model or the world. NULL:
               you do not need it. NULL in it after a failure
   Result      FSDP_OK; INVALID_ARG (model NULL), INVALID_STATE (a unit is not idle), UNSUPPORTED
               (the backend has no all_to_all), OUT_OF_MEMORY
   Collective  no, but every rank has to do the same: otherwise the next reduction is a MISMATCH
   Allocates   yes; in the first step too
   Source      torch: FSDPModule.set_custom_reduce_scatter */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_compress_create(fsdp_model *model,
                                                          fsdp_compress **compress);

/* fsdp_compress_destroy - reduce again as the backend does; NULL is allowed. Between steps
   Collective  yes: every rank of the mesh      Blocks for operations under way */
FSDP_API void fsdp_compress_destroy(fsdp_compress *compress);

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_COMPRESS_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_COMPRESS_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_COMPRESS_IMPLEMENTED
#include "src/replicate/compress.h"
#endif // FSDP_IMPLEMENTATION
