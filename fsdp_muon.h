/* fsdp_muon.h - Muon, an optimizer of whole matrices, on shards: an extension of fsdp.h

   Muon makes the momentum of a matrix orthogonal by products of matrices (Newton-Schulz). Each
   matrix is computed whole by one rank, its owner: the products are shared out among the ranks, and
   parameters have the same bits on any number of ranks. The formula is that of torch.optim.Muon,
   computed in f32.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_muon.h"               // includes fsdp_optim.h; link with -lm

       static int others(void *user, const fsdp_param_view *p) { // AdamW's group
           return fsdp_muon_takes((fsdp_muon *)user, p) ? -1 : 0;
       }
       fsdp_muon_create(model, NULL, &muon);                   // after the last fsdp_fully_shard
       fsdp_adamw_desc desc = fsdp_adamw_defaults();
       desc.group = others, desc.user = muon;
       fsdp_adamw_create(model, &desc, &adamw);                // fsdp_shutdown frees both
       ...                                                     // after fsdp_finalize_backward:
       if (fsdp_muon_step(muon, 0.02) || fsdp_adamw_step(adamw, 3e-4)) break;

   SPDX-License-Identifier: MIT (full text in fsdp.h)

   ARITHMETIC
     Of a matrix p [R, C] with gradient g and momentum buffer b, which begins with zeros:
         b = b + (g - b)*(1 - momentum)
         u = g + (b - g)*momentum                       without nesterov: u = b
         x = u * (1 / max(norm(u), eps))                Frobenius norm, summed in f64
         ns_steps times: s = x x'; x = a*x + (b*s + c*s*s) x            of x', if R > C
         p = p*(1 - lr*weight_decay) - lr*ratio*x
     ratio is sqrt(max(1, R/C)), 0.2*sqrt(max(R, C)) or sqrt(R/C), by `adjust`. All is in f32, each
     operation rounded; the default product adds up with FMA where the processor has it, in an order
     that depends on the shape alone. So bits depend neither on the number of ranks nor on the
     compiler; they depend on whether processors have FMA, and on a `gemm` of yours.
   DTYPES
     f32, bf16 and f16 parameters; momentum in f32. f64 parameters are refused. If desc.dtype is
     BF16, u and x travel as bf16: half of the bytes, and x off by 2^-8 of itself at most. The
     products are then of bf16, too, if there is a `gemm`; the default one is of f32.
   WHICH PARAMETERS
     Those that desc.take chooses, and that require a gradient. Embeddings and heads, which have two
     dims, too, are better left to AdamW. Units that tensor parallelism cuts are refused.
   OWNERS AND BUCKETS
     All ranks choose the same owners, without a message: the matrix that costs most first, to the
     owner that has least. Owners are the ranks of the shard group; with replicas (HSDP, DDP) that
     compute a part each (desc.replicas) those of all replicas, which then exchange results.
     Matrices travel in buckets, in the order of backward: u to the owners by one all_to_all, x back
     by another one, on the stream EXTENSION. While a bucket is computed on COMPUTE, the next one
     travels there and the last one back. In the all_to_all each pair of ranks sends as much as the
     pair that sends most, with each shard as large as the largest one: a bucket of W equal
     matrices, whose rows W divides, has no padding.
   UPDATED PARAMETERS, FREEZE AND THAW, CHECKPOINTS
     As for AdamW (fsdp_optim.h). The only state is "momentum_buffer", as in PyTorch.
   MEMORY, to the byte; W ranks shard a matrix, V replicas exchange results
     For each element of this rank's rows 4 bytes, the momentum, and tables, as AdamW. All else is
     in the pool "muon", and the same on all ranks. For buckets 2 W N + 2 V W N elements of
     desc.dtype, where N is the most that a pair of ranks sends in a bucket; if nothing travels, N.
     For products 2 R C elements of the largest matrix and 2 min(R, C)^2 of the one with the
     largest, each rounded up to 64 bytes, 64 bytes, and for fsdp_host_gemm FSDP_HOST_GEMM_BYTES. A
     step allocates nothing, except the first one after a freeze or thaw. */
#include "fsdp_optim.h"
#include "backends/fsdp_host_gemm.h"

#ifndef FSDP_MUON_H
#define FSDP_MUON_H
#ifdef FSDP_MATH_ONLY
#error "fsdp_muon.h has no pure functions: with FSDP_MATH_ONLY leave it out"
#else

#ifdef __cplusplus
extern "C" {
#endif

typedef fsdp_optim fsdp_muon;

enum { FSDP_MUON_ORIGINAL = 0, FSDP_MUON_MATCH_RMS_ADAMW, FSDP_MUON_SPECTRAL }; // adjust

// How replicas share the work: each computes all matrices, or each computes a part and they gather
// the results. BY_BYTES: the way that sends less; if both send the same, a part each.
enum { FSDP_MUON_BY_BYTES = 0, FSDP_MUON_ALL_EACH, FSDP_MUON_A_PART_EACH };

// 1: Muon takes this parameter; 0: it does not; n > 1: it does, as a matrix of n columns, whatever
// its dims. It must return the same on all ranks and in each call.
typedef int (*fsdp_muon_take_fn)(void *user, const fsdp_param_view *param);

typedef struct fsdp_muon_desc {
    uint32_t size, start_canary;
    double weight_decay;  // default 0.1;  >= 0
    double momentum;      // default 0.95; 0 <= momentum < 1
    double eps;           // default 1e-7; >= 1e-30
    double a, b, c;       // defaults 3.4445, -4.7750, 2.0315; -1e30 to 1e30
    int32_t ns_steps;     // default 5; 1..99
    int32_t nesterov;     // default 1
    int32_t adjust;       // default FSDP_MUON_ORIGINAL
    int32_t flatten;      // 1: takes parameters of more than two dims, as rows x the rest
    int32_t replicas;     // default FSDP_MUON_BY_BYTES
    fsdp_dtype dtype;     // dtype of u and x: FSDP_F32 (default) or FSDP_BF16
    int64_t bucket_bytes; // default 64 MiB; >= 1: of whole matrices of an owner, but at least one
    int32_t num_groups;   // 0: no groups; at most FSDP_OPTIM_GROUPS
    int32_t reserved;
    fsdp_optim_group groups[FSDP_OPTIM_GROUPS];
    fsdp_optim_group_fn group; // NULL: all matrices are in group 0
    fsdp_muon_take_fn take;    // NULL: all of two dims; with flatten of two or more
    void *user;                // argument of group and take
    fsdp_gemm_fn gemm;         // NULL: fsdp_host_gemm. On a device give one, as fsdp_cuda_gemm
    void *gemm_user;           // argument of gemm. If gemm fails, the world ends
    uint32_t magic, reserved2; // magic: fsdp_muon_defaults sets it. Leave it as it is
    uint64_t end_canary;
} fsdp_muon_desc;

/* fsdp_muon_defaults - a desc with the defaults
   Result      those of torch.optim.Muon; no groups      Thread any      Source torch.optim.Muon */
FSDP_API fsdp_muon_desc fsdp_muon_defaults(void);

/* fsdp_muon_create - a Muon optimizer of a model's matrices; commits the model
   desc        NULL: the defaults
   muon        the model owns it: it ends with fsdp_muon_destroy, the model or the world. NULL after
               a failure
   Result      FSDP_OK; INVALID_ARG (the text names the field, or the parameter), UNSUPPORTED (a
               device without desc.gemm, or with cpu_offload; the backend has no all_to_all),
               OUT_OF_MEMORY, errors of commit
   Collective  as fsdp_model_commit, and over the world: groups are made for the stream EXTENSION.
               If ranks give other descs, or take other matrices, the next collective is a MISMATCH;
               if they make other groups (desc.replicas), with worker threads a TIMEOUT
   Blocks      while groups are made      Allocates yes      Source torch: torch.optim.Muon */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_muon_create(fsdp_model *model, const fsdp_muon_desc *desc,
                                                      fsdp_muon **muon);

/* fsdp_muon_step - update every matrix that has a gradient; ends with fsdp_params_changed
   lr          this step's learning rate, finite, >= 0. The group's lr_scale multiplies it. If ranks
               give different ones, this step's first collective is a MISMATCH; if it has none, the
               next one of a unit
   Result      FSDP_OK; as fsdp_adamw_step; collective errors, after which the world has ended. If
               one rank has no memory, the others wait for it until their time is over
   Collective  yes: every rank of the mesh; after a freeze or thaw as fsdp_muon_create
   Blocks      inline and with comm threads: for the ranks that send, at most timeout_ms; on
               streams: no
   Allocates   no; the first step after a freeze or thaw does      Source torch: Muon.step */
FSDP_MUST_CHECK static inline fsdp_status fsdp_muon_step(fsdp_muon *muon, double lr) {
    return fsdp_optim_step(muon, lr);
}

/* fsdp_muon_takes    - 1 if Muon takes this parameter, whether it is frozen or not. NULL: 0
   fsdp_muon_describe - as text: matrices, how many of them this rank computes, buckets, bytes that
               it receives in a step, what replicas do. Writes at most cap bytes with the end, and
               returns the length of the whole text, as snprintf */
FSDP_API int fsdp_muon_takes(const fsdp_muon *muon, const fsdp_param_view *param);
FSDP_API size_t fsdp_muon_describe(const fsdp_muon *muon, char *text, size_t cap);

/* fsdp_muon_destroy - free an optimizer before its model ends; NULL is allowed. First end the
               optimizers whose groups ask fsdp_muon_takes
   Collective  yes: every rank of the mesh      Blocks for operations under way */
static inline void fsdp_muon_destroy(fsdp_muon *muon) { fsdp_optim_destroy(muon); }

// fsdp_optim_set_group and fsdp_optim_nbytes with the name of the optimizer.
static inline fsdp_status fsdp_muon_set_group(fsdp_muon *muon, int k, const fsdp_optim_group *g) {
    return fsdp_optim_set_group(muon, k, g);
}
static inline int64_t fsdp_muon_nbytes(const fsdp_muon *muon) { return fsdp_optim_nbytes(muon); }

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_MUON_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_MUON_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_MUON_IMPLEMENTED
#include "src/optim/muon.h"
#endif // FSDP_IMPLEMENTATION
