/* fsdp_optim.h - AdamW, SGD with momentum and a gradient scaler on shards: an extension of fsdp.h

   Each rank updates the rows that it owns. So the optimizer's state is sharded as the parameters
   are, and a step does not communicate. The results are those of torch.optim.AdamW,
   torch.optim.SGD and torch.amp.GradScaler.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_optim.h"              // includes fsdp.h; link with -lm

       fsdp_adamw *opt;
       fsdp_adamw_create(model, NULL, &opt);                   // after the last fsdp_fully_shard
       for (;;) {
           ...                                                 // forward, backward
           if (fsdp_finalize_backward(model)) break;
           if (fsdp_adamw_step(opt, learning_rate(step))) break;
           fsdp_zero_grad(model);
       }                                                       // fsdp_shutdown frees it

   If gradients are f16, scale the loss:

       fsdp_grad_scaler_create(model, NULL, &scaler);
       for (;;) {
           ...                                                 // dloss *= fsdp_grad_scaler_scale
           if (fsdp_finalize_backward(model)) break;
           if (fsdp_grad_scaler_unscale(scaler)) break;        // now clip, if you do
           if (!fsdp_grad_scaler_found_inf(scaler) && fsdp_adamw_step(opt, lr)) break;
           if (fsdp_grad_scaler_update(scaler)) break;
           fsdp_zero_grad(model);
       }

   SPDX-License-Identifier: MIT (full text in fsdp.h)

   ARITHMETIC
     AdamW, update t = 1, 2, ... of a parameter p with gradient g, in this order:
         p = p * (1 - lr*weight_decay)
         m = m + (g - m)*(1 - beta1)                    written g - (g - m)*beta1 when beta1 <= 0.5
         v = v*beta2 + ((1 - beta2)*g)*g
         p = p + (-lr/(1 - beta1^t) * m) / (sqrt(v)/sqrt(1 - beta2^t) + eps)
     SGD:
         g = g + weight_decay*p
         b = g in the first update, else momentum*b + (1 - dampening)*g
         p = p - lr*b, or with nesterov p - lr*(g + momentum*b); without momentum p - lr*g
     This is torch's single-tensor form. Numbers that depend on t and the settings alone are
     computed in f64 and rounded once. Every other operation is rounded to f32 (f64 parameters: to
     f64), in the order of the parentheses; no two are fused. So the bits depend neither on the
     compiler and its flags nor on the number of ranks. (If gcc -Ofast links a program, the whole
     program flushes subnormal numbers to zero.)
   DTYPES
     f32 and f64 parameters have a state of their own dtype. bf16 and f16 parameters have a state in
     f32: the update is computed in f32 and rounded to nearest even when it is stored, so updates
     below half a unit of a 16-bit parameter are lost. For training keep f32 parameters and set
     fsdp_model_desc.param_dtype, or round bf16 parameters stochastically. If gradients have another
     dtype than the parameter (fsdp_model_desc.grad_dtype), they are first converted to the dtype of
     the arithmetic.
   STOCHASTIC ROUNDING (stochastic_rounding of a desc)
     A bf16 parameter takes the bf16 number below or above the f32 result, each with a probability
     in proportion to how near it is. So the mean is the f32 result, and small updates are not lost.
     NaN, infinities, zeros and results that bf16 can represent stay as they are. Results beyond the
     largest bf16 are rounded to nearest. The random bits are a hash of desc.seed, t, the ordinal of
     the parameter and the index of the element in the whole parameter. So parameters have the same
     bits on any number of ranks, on any mesh, on host and device, and in a run that goes on from a
     checkpoint. A checkpoint has t, but not the seed: give the same one again. In a unit that
     tensor parallelism cuts (fsdp_dtensor.h), the whole parameter is this rank's part of it, so the
     bits depend on the number of ranks of tp. f16, f32 and f64 parameters are rounded to nearest.
     Each bf16 parameter is a run of its own.
   UPDATED PARAMETERS
     A step updates the parameters that have a gradient (fsdp_param_view.shard_grad). A parameter
     keeps its value and its state if it is frozen, if no rank used it in this step, or if its group
     is negative: no weight decay, and t stays. Padding is never touched. Neighbouring parameters
     with equal group and t are one run. A step is one record of all runs, and on a GPU one launch
     for each dtype of parameters (of up to 190 runs; with drivers before 530 of 24).
   FREEZE AND THAW (fsdp_set_requires_grad)
     The next step or fsdp_*_state moves the states to the new places of the shards. The state of a
     frozen parameter survives until you thaw it, as in torch. A parameter that you thaw for the
     first time begins with a state of zeros and t = 1.
   HOST OR DEVICE
     The host updates shards in host memory, those of cpu_offload included. The device updates
     shards in its own memory, in the order of the stream COMPUTE: a step does not wait, and the
     scaler waits only for found_inf. The bits are the same.
   MEMORY
     Creation allocates two blocks: tables, and the states. AdamW keeps two numbers for each
     element of this rank's rows, SGD with momentum one. The states are where the updates run.
     fsdp_memory.host_bytes counts host memory only; fsdp_*_nbytes counts both. A step allocates
     nothing, except the first one after a freeze or thaw: it allocates the states again, and for a
     moment both exist.
   DEFAULTS
     Begin a desc with fsdp_adamw_defaults() or fsdp_sgd_defaults(), which have PyTorch's values,
     and change fields. Every number means itself: 0 is 0, not a default. So a desc or a group that
     does not come from these functions, as a zeroed one, is refused. Example:
       fsdp_adamw_desc desc = fsdp_adamw_defaults();
       desc.weight_decay = 0.1;
       desc.num_groups = 2, desc.group = is_bias_or_norm; // your function
       desc.groups[1].weight_decay = 0; */
#include "fsdp.h"

#ifndef FSDP_OPTIM_H
#define FSDP_OPTIM_H

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------- */
/* Kernels on plain arrays, usable without a world or a model.                                    */

// Settings of one update. Every number means itself: 0 is 0.
typedef struct fsdp_adamw_hyper {
    double lr, beta1, beta2, eps, weight_decay;
    int64_t step; // t: 1 in the first update
} fsdp_adamw_hyper;

typedef struct fsdp_sgd_hyper {
    double lr, momentum, dampening, weight_decay;
    int32_t nesterov;
    int32_t reserved;
    int64_t step; // 1 in the first update, where the momentum buffer becomes the gradient
} fsdp_sgd_hyper;

/* fsdp_adamw_update    - one AdamW update of f32 numbers
   fsdp_adamw_update_as - the same for any floating dtypes of p and g
   p, g, m, v  [count] host memory, no two overlap: parameters, gradients, first and second moments.
               m and v are zero before the first update; f64 for f64 parameters, else f32
   dtype, grad_dtype  of p; of g. grad_dtype KEEP: as dtype
   Result      update_as: FSDP_OK; INVALID_ARG (not a floating dtype, a NULL with count > 0,
               count < 0)
   Thread      any
   Source      torch: torch.optim.adam._single_tensor_adam, decoupled_weight_decay */
FSDP_API void fsdp_adamw_update(float *p, const float *g, float *m, float *v, int64_t count,
                                const fsdp_adamw_hyper *hyper);
FSDP_API fsdp_status fsdp_adamw_update_as(fsdp_dtype dtype, void *p, fsdp_dtype grad_dtype,
                                          const void *g, void *m, void *v, int64_t count,
                                          const fsdp_adamw_hyper *hyper);

/* fsdp_sgd_update    - one SGD update of f32 numbers
   fsdp_sgd_update_as - the same for any floating dtypes of p and g
   p, g, b     [count] host memory, no two overlap: parameters, gradients, momentum buffer. b is f64
               for f64 parameters, else f32. If momentum is 0, b is unused and may be NULL
   dtype, grad_dtype  of p; of g. grad_dtype KEEP: as dtype
   Result      update_as: FSDP_OK; INVALID_ARG (not a floating dtype, a NULL with count > 0,
               count < 0)
   Thread      any
   Source      torch: torch.optim.sgd._single_tensor_sgd */
FSDP_API void fsdp_sgd_update(float *p, const float *g, float *b, int64_t count,
                              const fsdp_sgd_hyper *hyper);
FSDP_API fsdp_status fsdp_sgd_update_as(fsdp_dtype dtype, void *p, fsdp_dtype grad_dtype,
                                        const void *g, void *b, int64_t count,
                                        const fsdp_sgd_hyper *hyper);

#ifndef FSDP_MATH_ONLY
/* -------------------------------------------------------------------------------------------- */
/* Optimizers of a model.                                                                         */

typedef struct fsdp_adamw fsdp_adamw;
typedef struct fsdp_sgd fsdp_sgd;

#define FSDP_OPTIM_SAME   (-1.0) // in a group: the weight_decay of the desc
#define FSDP_OPTIM_GROUPS 8

// Defaults: 1 and FSDP_OPTIM_SAME. Those of a desc come from its function of the defaults: change
// fields, and do not replace a group.
typedef struct fsdp_optim_group {
    double lr_scale;          // >= 0. Factor of the step's learning rate
    double weight_decay;      // >= 0, or FSDP_OPTIM_SAME
    uint32_t magic, reserved; // magic: as in the desc
} fsdp_optim_group;

// Returns the group of a parameter: 0 .. num_groups-1, or 0 if there are no groups. If it returns a
// negative number, the optimizer leaves the parameter out. It must return the same on all ranks.
// The library calls it at creation once for each parameter that requires a gradient, and after a
// freeze or thaw for parameters that the optimizer does not have yet.
typedef int (*fsdp_optim_group_fn)(void *user, const fsdp_param_view *param);

typedef struct fsdp_adamw_desc {
    uint32_t size, start_canary;
    double beta1;        // default 0.9;   0 <= beta1 < 1
    double beta2;        // default 0.999; 0 <= beta2 < 1; beta2 and eps must not both be 0
    double eps;          // default 1e-8;  >= 0
    double weight_decay; // default 0.01;  >= 0
    int32_t num_groups;  // 0: no groups; at most FSDP_OPTIM_GROUPS
    int32_t stochastic_rounding; // 1: of bf16 parameters; default 0: to nearest
    fsdp_optim_group groups[FSDP_OPTIM_GROUPS];
    fsdp_optim_group_fn group; // NULL: all parameters are in group 0
    void *user;                // argument of group
    uint64_t seed;             // of stochastic rounding; the same on all ranks
    uint32_t magic, reserved;  // magic: the function of the defaults sets it. Leave it as it is
    uint64_t end_canary;
} fsdp_adamw_desc;

typedef struct fsdp_sgd_desc {
    uint32_t size, start_canary;
    double momentum;     // default 0; >= 0
    double dampening;    // default 0; >= 0
    double weight_decay; // default 0; >= 0
    int32_t nesterov;    // 1: needs momentum > 0 and dampening 0
    int32_t num_groups;  // 0: no groups; at most FSDP_OPTIM_GROUPS
    fsdp_optim_group groups[FSDP_OPTIM_GROUPS];
    fsdp_optim_group_fn group;   // NULL: all parameters are in group 0
    void *user;                  // argument of group
    uint64_t seed;               // of stochastic rounding; the same on all ranks
    int32_t stochastic_rounding; // 1: of bf16 parameters; default 0: to nearest
    uint32_t magic;              // the function of the defaults sets it. Leave it as it is
    uint64_t end_canary;
} fsdp_sgd_desc;

/* fsdp_adamw_defaults, fsdp_sgd_defaults - a desc with the defaults
   Result      PyTorch's defaults of AdamW and SGD; no groups
   Thread      any
   Source      torch: torch.optim.AdamW, torch.optim.SGD */
FSDP_API fsdp_adamw_desc fsdp_adamw_defaults(void);
FSDP_API fsdp_sgd_desc fsdp_sgd_defaults(void);

/* fsdp_adamw_create - an AdamW optimizer of all trainable parameters of a model; commits the model
   desc        NULL: the defaults
   opt         the model owns it: it ends with fsdp_adamw_destroy, the model or the world.
               NULL after a failure
   Result      FSDP_OK; INVALID_ARG (the text names the field, or the parameter whose group is
               wrong; or desc does not come from fsdp_adamw_defaults), UNSUPPORTED (the shards are
               in the memory of a device that cannot update them: set cpu_offload), OUT_OF_MEMORY,
               errors of commit
   Collective  as fsdp_model_commit      Allocates yes
   Source      torch: torch.optim.AdamW */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_adamw_create(fsdp_model *model,
                                                       const fsdp_adamw_desc *desc,
                                                       fsdp_adamw **opt);

/* fsdp_adamw_step - update every parameter that has a gradient; ends with fsdp_params_changed. If
               units hold gradients that are not reduced, or no parameter has a gradient, it logs
               that, once
   lr          this step's learning rate, finite, >= 0. The group's lr_scale multiplies it. If ranks
               give different ones, the next collective of a unit is a MISMATCH
   Result      FSDP_OK; INVALID_ARG (opt NULL, lr), INVALID_STATE (a unit is not idle: call
               fsdp_finalize_backward first); if the world is aborted, its status; after a freeze or
               thaw the errors of create, too. In these cases nothing changes. If the device fails,
               the world is aborted
   Collective  no, but every rank has to do the same; after a freeze or thaw as fsdp_model_commit
   Blocks      for operations under way that read shards. If the device updates: only after a freeze
               or thaw
   Allocates   no; the first step after a freeze or thaw does
   Source      torch: AdamW.step */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_adamw_step(fsdp_adamw *opt, double lr);

/* fsdp_adamw_set_group - change a group's lr_scale and weight_decay from the next step on, also
               while a plan replays. Parameters stay in their groups
   k           0 .. num_groups-1. An optimizer without groups has group 0
   group       begin with fsdp_adamw_defaults().groups[k] or with the desc's, and change fields.
               FSDP_OPTIM_SAME is the weight_decay of the desc
   Result      FSDP_OK; INVALID_ARG (NULL, k, a field, or group does not come from the defaults):
               nothing changes; if the world is aborted, its status
   Collective  no, but every rank has to do the same: if ranks give different groups, the next
               collective of a unit is a MISMATCH
   Note        a checkpoint has no groups: set them again after a load, as you give the lr again
   Source      torch: Optimizer.param_groups */
FSDP_API fsdp_status fsdp_adamw_set_group(fsdp_adamw *opt, int k, const fsdp_optim_group *group);

/* fsdp_adamw_destroy - free an optimizer before its model ends; NULL is allowed
   Blocks      until the device has finished its updates */
FSDP_API void fsdp_adamw_destroy(fsdp_adamw *opt);

/* fsdp_sgd_create, fsdp_sgd_step, fsdp_sgd_set_group, fsdp_sgd_destroy - as the functions of AdamW
   Result      as for AdamW: FSDP_OK; INVALID_ARG, UNSUPPORTED, OUT_OF_MEMORY, INVALID_STATE, or the
               status of an aborted world
   Collective  create: as fsdp_model_commit; step, set_group: as for AdamW; destroy: no
   Blocks      create, set_group: no; step and destroy: as for AdamW
   Allocates   create, and the first step after a freeze or thaw
   Source      torch: torch.optim.SGD */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_sgd_create(fsdp_model *model, const fsdp_sgd_desc *desc,
                                                     fsdp_sgd **opt);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_sgd_step(fsdp_sgd *opt, double lr);
FSDP_API fsdp_status fsdp_sgd_set_group(fsdp_sgd *opt, int k, const fsdp_optim_group *group);
FSDP_API void fsdp_sgd_destroy(fsdp_sgd *opt);

// The state of one parameter, in place: a checkpoint reads it, and writes it to resume. After a
// freeze or thaw of any parameter the pointers are stale. If the device updates the shards, first
// and second are in its memory: use them in the order of COMPUTE. step is always in host memory.
typedef struct fsdp_optim_state {
    fsdp_dtype dtype;     // of first and second
    int32_t group;        // negative: the optimizer does not have it (frozen since creation, or
                          // left out by fsdp_optim_group_fn)
    int64_t numel;        // elements: fsdp_param_view.numel, in the same order, without padding
    void *first, *second; // AdamW: m, v. SGD: momentum buffer or NULL, and NULL
    int64_t *step;        // updates so far; NULL if group is negative
} fsdp_optim_state;

/* fsdp_adamw_state, fsdp_sgd_state - the state of the parameter with this ordinal
   Result      FSDP_OK; INVALID_ARG (NULL, no such ordinal); after a freeze or thaw the errors of
               create, too
   Collective  no; after a freeze or thaw as fsdp_model_commit
   Blocks      no; after a freeze or thaw until the device has finished its updates
   Allocates   no; after a freeze or thaw as create      Source torch: Optimizer.state */
FSDP_API fsdp_status fsdp_adamw_state(fsdp_adamw *opt, int ordinal, fsdp_optim_state *out);
FSDP_API fsdp_status fsdp_sgd_state(fsdp_sgd *opt, int ordinal, fsdp_optim_state *out);

/* fsdp_adamw_nbytes, fsdp_sgd_nbytes - host and device memory of the optimizer in bytes; 0: NULL */
FSDP_API int64_t fsdp_adamw_nbytes(const fsdp_adamw *opt);
FSDP_API int64_t fsdp_sgd_nbytes(const fsdp_sgd *opt);

/* -------------------------------------------------------------------------------------------- */
/* Gradient scaler. In f16 small gradients become zero. So you multiply the loss by a large factor,
   the scale, and the scaler divides the shard gradients by it before they are used. If a gradient
   is infinite or NaN, the scale was too large: all ranks leave the step out, and the scale shrinks.
   After growth_interval good steps in a row the scale grows. Order of calls in a step: backward,
   finalize, unscale, [clip], the optimizer if !found_inf, update.                                */

typedef struct fsdp_grad_scaler fsdp_grad_scaler;

typedef struct fsdp_grad_scaler_desc {
    uint32_t size, start_canary;
    double init_scale;       // 2^-126 .. 2^126;        0: the default, 65536
    double growth_factor;    // > 1;                    0: the default, 2
    double backoff_factor;   // 0 < backoff_factor < 1; 0: the default, 0.5
    int32_t growth_interval; // good steps before the scale grows; 0: the default, 2000
    int32_t reserved;
    uint64_t end_canary;
} fsdp_grad_scaler_desc;

// The state that a checkpoint writes; equal on all ranks.
typedef struct fsdp_grad_scaler_state {
    double scale, growth_factor, backoff_factor;
    int32_t growth_interval;
    int32_t growth_tracker; // good steps in a row: 0 .. growth_interval-1
} fsdp_grad_scaler_state;

/* fsdp_grad_scaler_create - a scaler of all gradients of a model; commits the model
   desc        NULL: defaults
   scaler      the model owns it: it ends with fsdp_grad_scaler_destroy, the model or the world.
               NULL after a failure
   Result      FSDP_OK; INVALID_ARG (the text names the field), UNSUPPORTED (as
               fsdp_adamw_create), OUT_OF_MEMORY, errors of commit
   Collective  as fsdp_model_commit      Allocates yes
   Source      torch: torch.amp.GradScaler */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_grad_scaler_create(fsdp_model *model,
                                                             const fsdp_grad_scaler_desc *desc,
                                                             fsdp_grad_scaler **scaler);

/* fsdp_grad_scaler_scale - the factor for the loss, or for its gradient; f32 can represent it
   Result      the scale, the same on every rank; 1 for NULL
   Source      torch: GradScaler.scale */
FSDP_API double fsdp_grad_scaler_scale(const fsdp_grad_scaler *scaler);

/* fsdp_grad_scaler_unscale - multiply every shard gradient of every unit by 1/scale, and find out
   whether one of them, on any rank of the world, was infinite or NaN before
   Arithmetic  1/scale is rounded to f32; products are rounded to f32 (f64 gradients: f64), then to
               the gradient's dtype. Padding is not touched
   Result      FSDP_OK; INVALID_ARG (NULL), INVALID_STATE: already done in this step (call update
               first), a unit is not idle, or no rank has a gradient (then nothing changes);
               collective errors
   Collective  yes: every rank of the world; one all-reduce of 12 numbers. Ranks also compare their
               scalers in it. If these differ, all ranks get MISMATCH with what differs
   Blocks      yes, at most timeout_ms
   Source      torch: GradScaler.unscale_, found_inf_reduce_handler */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_grad_scaler_unscale(fsdp_grad_scaler *scaler);

/* fsdp_grad_scaler_found_inf - whether unscale found an infinite or NaN gradient in this step
   Result      1: yes, leave the optimizer's step out; 0: no; -1: before unscale, after update,
               after a failed unscale, and for NULL. The same on every rank
   Source      torch: GradScaler.step, found_inf */
FSDP_API int fsdp_grad_scaler_found_inf(const fsdp_grad_scaler *scaler);

/* fsdp_grad_scaler_update - end the step: compute the scale of the next one
   Effect      found_inf 1: scale *= backoff_factor. found_inf 0 for the growth_interval-th time in
               a row: scale *= growth_factor. The scale is rounded to f32. If it would leave
               2^-126 .. 2^126, it stays
   Result      FSDP_OK; INVALID_ARG (NULL), INVALID_STATE (no unscale in this step); if the world is
               aborted, its status
   Collective  no, but every rank has to do the same
   Source      torch: GradScaler.update */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_grad_scaler_update(fsdp_grad_scaler *scaler);

/* fsdp_grad_scaler_get_state - the state for a checkpoint; best called after update
   fsdp_grad_scaler_set_state - restore such a state, and forget a step that has begun. After
               fsdp_model_reset call it with the result of get_state
   Result      FSDP_OK; INVALID_ARG (NULL, or a field: named in the text)
   Collective  no, but every rank has to do the same
   Source      torch: GradScaler.state_dict, load_state_dict */
FSDP_API fsdp_status fsdp_grad_scaler_get_state(const fsdp_grad_scaler *scaler,
                                                fsdp_grad_scaler_state *out);
FSDP_API fsdp_status fsdp_grad_scaler_set_state(fsdp_grad_scaler *scaler,
                                                const fsdp_grad_scaler_state *state);

/* fsdp_grad_scaler_destroy - free a scaler before its model ends; NULL is allowed */
FSDP_API void fsdp_grad_scaler_destroy(fsdp_grad_scaler *scaler);

#endif // FSDP_MATH_ONLY
#ifdef __cplusplus
}
#endif
#endif // FSDP_OPTIM_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_OPTIM_IMPLEMENTED)
#define FSDP_OPTIM_IMPLEMENTED

#include <math.h>   // pow, sqrt, sqrtf, HUGE_VAL
#include <stdio.h>  // snprintf
#include <string.h> // memcpy, memset

#if defined(__GNUC__)
#define FSDPI_OPTIM_RESTRICT __restrict
#define FSDPI_OPTIM_NOINLINE __attribute__((noinline))
#else
#define FSDPI_OPTIM_RESTRICT
#define FSDPI_OPTIM_NOINLINE
#endif

/* -------------------------------------------------------------------------------------------- */
// >>optim kernels
// Owns: the loops over elements. Invariants: the same inputs give the same bits with any compiler
// flags. Pragmas make arithmetic precise. But clang -Ofast fuses a product with a sum in spite of
// its pragma: so one loop stores the products of a block, and another one adds them. Blocks stay in
// the first-level cache. Source: torch.optim, single-tensor functions.

#if defined(__clang__)
#pragma float_control(precise, on, push)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("O3", "no-fast-math", "fp-contract=off")
#endif

#define FSDPI_OPTIM_BLOCK 512 // elements

// The source of the random bits of a stochastic rounding: see fsdp_update.
typedef struct fsdpi_rounding {
    uint64_t key;
    int64_t at, row, pitch;
} fsdpi_rounding;

// The end of murmur3, a hash: each bit of h changes half of the bits.
static inline uint32_t fsdpi_stir(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    return h ^ (h >> 16);
}

// 16 random bits of an element, by products of 32 bits, which processors have for vectors.
static inline uint32_t fsdpi_chance(uint64_t key, uint64_t index) {
    uint32_t high = (uint32_t)(index >> 32) * 0x9E3779B9u + (uint32_t)(key >> 32);
    return fsdpi_stir(fsdpi_stir((uint32_t)index + (uint32_t)key) ^ high) >> 16;
}

/* p has x rounded to nearest. If x lies between two bf16, random bits are added to the 16 bits that
   are cut off; if they carry, p becomes the bf16 further from zero. Beyond the largest bf16 p
   stays: there are no two neighbours. */
static FSDPI_OPTIM_NOINLINE void fsdpi_round_row(uint16_t *FSDPI_OPTIM_RESTRICT p,
                                                 const float *FSDPI_OPTIM_RESTRICT x, size_t count,
                                                 uint64_t key, uint64_t index) {
    for (size_t i = 0; i < count; i++) {
        uint32_t u, nearest = p[i];
        memcpy(&u, &x[i], sizeof u);
        uint32_t chosen = (u + fsdpi_chance(key, index + i)) >> 16;
        p[i] = (uint16_t)((u & 0x7FFFFFFFu) > 0x7F7F0000u ? nearest : chosen);
    }
}

// Stores f32 results of 16-bit parameters; the first is element i of a run.
static void fsdpi_optim_store(void *p, fsdp_dtype dtype, const float *x, size_t count,
                              const fsdpi_rounding *r, int64_t i) {
    (void)fsdp_convert(p, dtype, x, FSDP_F32, (int64_t)count);
    for (size_t done = 0, n; r && done < count; done += n, i += (int64_t)n) {
        int64_t column = i % r->row;
        n = count - done;
        if ((int64_t)n > r->row - column) n = (size_t)(r->row - column);
        fsdpi_round_row((uint16_t *)p + done, x + done, n, r->key,
                        (uint64_t)(r->at + i / r->row * r->pitch + column));
    }
}

/* One body for both types of the arithmetic: in it, fsdpi_real is double if wide, else float. */
#define FSDPI_IN_REAL(wide, ...)                                                                   \
    do {                                                                                           \
        if (wide) {                                                                                \
            typedef double fsdpi_real;                                                             \
            __VA_ARGS__                                                                            \
        } else {                                                                                   \
            typedef float fsdpi_real;                                                              \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    } while (0)

/* out = sqrt(x), correctly rounded, by instructions. Compilers do not vectorise the C library's
   functions because of errno, and clang -Ofast makes estimates of them in spite of its pragmas. */
#if defined(__GNUC__) && defined(__SSE2__)
#ifdef __AVX__
#define FSDPI_VEX "v"
#else
#define FSDPI_VEX
#endif
typedef float fsdpi_f32x4 __attribute__((vector_size(16)));

static inline void fsdpi_sqrt_16(int wide, char *out, const char *x, size_t nbytes) { // at most 16
    fsdpi_f32x4 v = {0, 0, 0, 0};
    memcpy(&v, x, nbytes);
    if (wide) __asm__(FSDPI_VEX "sqrtpd {%1, %0|%0, %1}" : "=x"(v) : "x"(v));
    else __asm__(FSDPI_VEX "sqrtps {%1, %0|%0, %1}" : "=x"(v) : "x"(v));
    memcpy(out, &v, nbytes);
}
static void fsdpi_sqrt(int wide, void *out, const void *x, size_t count) {
    size_t nbytes = count * (wide ? sizeof(double) : sizeof(float)), at = 0;
    char *to = (char *)out;
    const char *from = (const char *)x;
    for (; at + 16 <= nbytes; at += 16) fsdpi_sqrt_16(wide, to + at, from + at, 16);
    if (at < nbytes) fsdpi_sqrt_16(wide, to + at, from + at, nbytes - at);
}
#undef FSDPI_VEX
#else
static void fsdpi_sqrt(int wide, void *out, const void *x, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (wide) ((double *)out)[i] = sqrt(((const double *)x)[i]);
        else ((float *)out)[i] = sqrtf(((const float *)x)[i]);
}
#endif

// y += x
static void fsdpi_add(int wide, void *y, const void *x, size_t count) {
    FSDPI_IN_REAL(wide, {
        fsdpi_real *FSDPI_OPTIM_RESTRICT to = (fsdpi_real *)y;
        const fsdpi_real *FSDPI_OPTIM_RESTRICT from = (const fsdpi_real *)x;
        for (size_t i = 0; i < count; i++) to[i] = to[i] + from[i];
    });
}

// y = a * x
static void fsdpi_scale(int wide, void *y, double a, const void *x, size_t count) {
    FSDPI_IN_REAL(wide, {
        fsdpi_real *FSDPI_OPTIM_RESTRICT to = (fsdpi_real *)y;
        const fsdpi_real *FSDPI_OPTIM_RESTRICT from = (const fsdpi_real *)x, factor = (fsdpi_real)a;
        for (size_t i = 0; i < count; i++) to[i] = factor * from[i];
    });
}

// Numbers that depend only on the settings and t.
typedef struct fsdpi_adamw_scalars {
    double decay;       // 1 - lr*weight_decay
    double lerp;        // 1 - beta1
    double beta2, gain; // beta2, 1 - beta2
    double root, eps;   // sqrt(1 - beta2^t), eps
    double rate;        // -lr/(1 - beta1^t)
} fsdpi_adamw_scalars;

// Calls pow by a pointer that compilers do not see through: -Ofast would give other numbers.
static double fsdpi_pow(double x, int64_t y) {
    double (*volatile function)(double, double) = pow;
    return function(x, (double)y);
}

static fsdpi_adamw_scalars fsdpi_adamw_prepare(const fsdp_adamw_hyper *h) {
    fsdpi_adamw_scalars k;
    volatile double decay = h->lr * h->weight_decay; // rounded before it is subtracted: not fused
    double bias1 = 1 - fsdpi_pow(h->beta1, h->step), bias2 = 1 - fsdpi_pow(h->beta2, h->step);
    k.decay = 1 - decay;
    k.lerp = 1 - h->beta1;
    k.beta2 = h->beta2;
    k.gain = 1 - h->beta2;
    fsdpi_sqrt(1, &k.root, &bias2, 1);
    k.eps = h->eps;
    k.rate = -(h->lr / bias1);
    return k;
}

static FSDPI_OPTIM_NOINLINE void fsdpi_adamw_block(int wide, void *params, const void *grads,
                                                   void *first, void *second, size_t count,
                                                   const fsdpi_adamw_scalars *k) {
    FSDPI_IN_REAL(wide, {
        fsdpi_real *FSDPI_OPTIM_RESTRICT p = (fsdpi_real *)params;
        const fsdpi_real *FSDPI_OPTIM_RESTRICT g = (const fsdpi_real *)grads;
        fsdpi_real *FSDPI_OPTIM_RESTRICT m = (fsdpi_real *)first;
        fsdpi_real *FSDPI_OPTIM_RESTRICT v = (fsdpi_real *)second;
        fsdpi_real to_m[FSDPI_OPTIM_BLOCK], to_v[FSDPI_OPTIM_BLOCK];
        fsdpi_real decay = (fsdpi_real)k->decay, weight = (fsdpi_real)k->lerp,
                   beta2 = (fsdpi_real)k->beta2, gain = (fsdpi_real)k->gain,
                   root = (fsdpi_real)k->root, eps = (fsdpi_real)k->eps, rate = (fsdpi_real)k->rate;
        int from_g = weight >= (fsdpi_real)0.5; // torch.lerp starts from the nearer end
        if (from_g) weight = weight - 1;
        for (size_t i = 0; i < count; i++) {
            fsdpi_real d = g[i] - m[i], scaled = gain * g[i];
            to_m[i] = d * weight;
            to_v[i] = scaled * g[i];
            v[i] = v[i] * beta2;
            p[i] = p[i] * decay;
        }
        if (from_g) memcpy(m, g, count * sizeof *m);
        for (size_t i = 0; i < count; i++) {
            m[i] = m[i] + to_m[i];
            v[i] = v[i] + to_v[i];
        }
        fsdpi_sqrt(wide, to_v, v, count);
        for (size_t i = 0; i < count; i++) {
            fsdpi_real den = to_v[i] / root, num = rate * m[i];
            den = den + eps;
            num = num / den;
            p[i] = p[i] + num;
        }
    });
}

// A block of gradients in the type of the arithmetic, f64 if wide: in place, or converted to tmp.
static const void *fsdpi_optim_grads(double *tmp, int wide, const void *g, fsdp_dtype dtype,
                                     size_t count) {
    if (wide) return fsdp_cast_if_needed(tmp, FSDP_F64, g, dtype, (int64_t)count);
    float *narrow = (float *)(void *)tmp;
    if (dtype != FSDP_F64) return fsdp_cast_if_needed(narrow, FSDP_F32, g, dtype, (int64_t)count);
    for (size_t i = 0; i < count; i++) narrow[i] = (float)((const double *)g)[i];
    return narrow;
}

static void fsdpi_adamw(fsdp_dtype dtype, void *p, fsdp_dtype grad_dtype, const void *g, void *m,
                        void *v, int64_t count, const fsdpi_adamw_scalars *k,
                        const fsdpi_rounding *r) {
    size_t size = fsdp_dtype_size(dtype), wide = dtype == FSDP_F64 ? sizeof(double) : sizeof(float);
    double g64[FSDPI_OPTIM_BLOCK];
    float p32[FSDPI_OPTIM_BLOCK];
    for (size_t at = 0; at < (size_t)count; at += FSDPI_OPTIM_BLOCK) {
        size_t n = (size_t)count - at < FSDPI_OPTIM_BLOCK ? (size_t)count - at : FSDPI_OPTIM_BLOCK;
        char *pp = (char *)p + at * size, *mm = (char *)m + at * wide, *vv = (char *)v + at * wide;
        const void *gg = (const char *)g + at * fsdp_dtype_size(grad_dtype);
        gg = fsdpi_optim_grads(g64, dtype == FSDP_F64, gg, grad_dtype, n);
        if (size < wide) (void)fsdp_convert(p32, FSDP_F32, pp, dtype, (int64_t)n);
        fsdpi_adamw_block(dtype == FSDP_F64, size < wide ? (void *)p32 : pp, gg, mm, vv, n, k);
        if (size < wide) fsdpi_optim_store(pp, dtype, p32, n, r, (int64_t)at);
    }
}

typedef struct fsdpi_sgd_scalars {
    double lr, momentum, gain, weight_decay; // gain: 1 - dampening
    double nesterov, fresh;                  // 0 or 1; fresh: the buffer takes the gradient
} fsdpi_sgd_scalars;

static fsdpi_sgd_scalars fsdpi_sgd_prepare(const fsdp_sgd_hyper *h) {
    fsdpi_sgd_scalars k;
    k.lr = h->lr;
    k.momentum = h->momentum;
    k.gain = 1 - h->dampening;
    k.weight_decay = h->weight_decay;
    k.nesterov = h->nesterov ? 1 : 0;
    k.fresh = h->step <= 1 ? 1 : 0;
    return k;
}

static FSDPI_OPTIM_NOINLINE void fsdpi_sgd_block(int wide, void *p, const void *g, void *buffer,
                                                 size_t count, const fsdpi_sgd_scalars *k) {
    FSDPI_IN_REAL(wide, {
        fsdpi_real d[FSDPI_OPTIM_BLOCK], product[FSDPI_OPTIM_BLOCK];
        fsdpi_real *b = (fsdpi_real *)buffer, momentum = (fsdpi_real)k->momentum;
        memcpy(d, g, count * sizeof *d);
        if (k->weight_decay > 0) {
            fsdpi_scale(wide, product, k->weight_decay, p, count);
            fsdpi_add(wide, d, product, count);
        }
        if (k->momentum > 0 && k->fresh > 0) {
            memcpy(b, d, count * sizeof *b);
        } else if (k->momentum > 0) {
            fsdpi_scale(wide, product, k->gain, d, count);
            for (size_t i = 0; i < count; i++) b[i] = b[i] * momentum;
            fsdpi_add(wide, b, product, count);
        }
        if (k->momentum > 0 && k->nesterov > 0) {
            fsdpi_scale(wide, product, k->momentum, b, count);
            fsdpi_add(wide, d, product, count);
        }
        fsdpi_scale(wide, product, -k->lr, k->momentum > 0 && !(k->nesterov > 0) ? b : d, count);
        fsdpi_add(wide, p, product, count);
    });
}

static void fsdpi_sgd(fsdp_dtype dtype, void *p, fsdp_dtype grad_dtype, const void *g, void *b,
                      int64_t count, const fsdpi_sgd_scalars *k, const fsdpi_rounding *r) {
    size_t size = fsdp_dtype_size(dtype), wide = dtype == FSDP_F64 ? sizeof(double) : sizeof(float);
    double g64[FSDPI_OPTIM_BLOCK];
    float p32[FSDPI_OPTIM_BLOCK];
    for (size_t at = 0; at < (size_t)count; at += FSDPI_OPTIM_BLOCK) {
        size_t n = (size_t)count - at < FSDPI_OPTIM_BLOCK ? (size_t)count - at : FSDPI_OPTIM_BLOCK;
        char *pp = (char *)p + at * size, *bb = b ? (char *)b + at * wide : NULL;
        const void *gg = (const char *)g + at * fsdp_dtype_size(grad_dtype);
        gg = fsdpi_optim_grads(g64, dtype == FSDP_F64, gg, grad_dtype, n);
        if (size < wide) (void)fsdp_convert(p32, FSDP_F32, pp, dtype, (int64_t)n);
        fsdpi_sgd_block(dtype == FSDP_F64, size < wide ? (void *)p32 : pp, gg, bb, n, k);
        if (size < wide) fsdpi_optim_store(pp, dtype, p32, n, r, (int64_t)at);
    }
}

// b += (g - b) * s[0]; u = g + (b - g) * s[1], or b. Products are stored before they are added.
static FSDPI_OPTIM_NOINLINE void fsdpi_momentum_block(float *u, const float *g, float *b,
                                                           size_t count, const double *s) {
    float products[FSDPI_OPTIM_BLOCK], weight = (float)s[0], momentum = (float)s[1];
    for (size_t i = 0; i < count; i++) products[i] = (g[i] - b[i]) * weight;
    for (size_t i = 0; i < count; i++) b[i] = b[i] + products[i];
    for (size_t i = 0; i < count; i++) products[i] = (b[i] - g[i]) * momentum;
    if (s[2] > 0)
        for (size_t i = 0; i < count; i++) u[i] = g[i] + products[i];
    else memcpy(u, b, count * sizeof *u);
}

// p = p * s[0] - s[1] * x
static FSDPI_OPTIM_NOINLINE void fsdpi_muon_block(float *p, const float *x, size_t count,
                                                       const double *s) {
    float products[FSDPI_OPTIM_BLOCK], decay = (float)s[0], rate = (float)s[1];
    for (size_t i = 0; i < count; i++) products[i] = rate * x[i];
    for (size_t i = 0; i < count; i++) p[i] = p[i] * decay;
    for (size_t i = 0; i < count; i++) p[i] = p[i] - products[i];
}

// Both kinds of updates of Muon, in f32.
static void fsdpi_muon(const fsdp_update *u, const fsdpi_rounding *r) {
    size_t size = fsdp_dtype_size(u->dtype);
    double g64[FSDPI_OPTIM_BLOCK];
    float p32[FSDPI_OPTIM_BLOCK];
    for (size_t at = 0; at < (size_t)u->count; at += FSDPI_OPTIM_BLOCK) {
        size_t rest = (size_t)u->count - at, n = rest < FSDPI_OPTIM_BLOCK ? rest : FSDPI_OPTIM_BLOCK;
        char *p = (char *)u->param + at * size;
        const void *g = (const char *)u->grad + at * fsdp_dtype_size(u->grad_dtype);
        const float *grad = (const float *)fsdpi_optim_grads(g64, 0, g, u->grad_dtype, n);
        float *to = size == sizeof *p32 ? (float *)(void *)p : p32;
        if (u->kind == FSDP_UPDATE_MOMENTUM) {
            fsdpi_momentum_block(to, grad, (float *)u->first + at, n, u->scalars);
        } else {
            if (to == p32) (void)fsdp_convert(p32, FSDP_F32, p, u->dtype, (int64_t)n);
            fsdpi_muon_block(to, grad, n, u->scalars);
        }
        if (to == p32) fsdpi_optim_store(p, u->dtype, p32, n, r, (int64_t)at);
    }
}

FSDP_API void fsdp_adamw_update(float *p, const float *g, float *m, float *v, int64_t count,
                                const fsdp_adamw_hyper *hyper) {
    (void)fsdp_adamw_update_as(FSDP_F32, p, FSDP_F32, g, m, v, count, hyper);
}

FSDP_API fsdp_status fsdp_adamw_update_as(fsdp_dtype dtype, void *p, fsdp_dtype grad_dtype,
                                          const void *g, void *m, void *v, int64_t count,
                                          const fsdp_adamw_hyper *hyper) {
    if (grad_dtype == FSDP_DTYPE_KEEP) grad_dtype = dtype;
    if (!fsdp_dtype_is_float(dtype) || !fsdp_dtype_is_float(grad_dtype) || count < 0 || !hyper)
        return FSDP_ERR_INVALID_ARG;
    if (count == 0) return FSDP_OK;
    if (!p || !g || !m || !v) return FSDP_ERR_INVALID_ARG;
    fsdpi_adamw_scalars k = fsdpi_adamw_prepare(hyper);
    fsdpi_adamw(dtype, p, grad_dtype, g, m, v, count, &k, NULL);
    return FSDP_OK;
}

FSDP_API void fsdp_sgd_update(float *p, const float *g, float *b, int64_t count,
                              const fsdp_sgd_hyper *hyper) {
    (void)fsdp_sgd_update_as(FSDP_F32, p, FSDP_F32, g, b, count, hyper);
}

FSDP_API fsdp_status fsdp_sgd_update_as(fsdp_dtype dtype, void *p, fsdp_dtype grad_dtype,
                                        const void *g, void *b, int64_t count,
                                        const fsdp_sgd_hyper *hyper) {
    if (grad_dtype == FSDP_DTYPE_KEEP) grad_dtype = dtype;
    if (!fsdp_dtype_is_float(dtype) || !fsdp_dtype_is_float(grad_dtype) || count < 0 || !hyper)
        return FSDP_ERR_INVALID_ARG;
    if (count == 0) return FSDP_OK;
    if (!p || !g || (!b && hyper->momentum > 0)) return FSDP_ERR_INVALID_ARG;
    fsdpi_sgd_scalars k = fsdpi_sgd_prepare(hyper);
    fsdpi_sgd(dtype, p, grad_dtype, g, b, count, &k, NULL);
    return FSDP_OK;
}

#ifndef FSDP_MATH_ONLY
// Is a number infinite or NaN? The bits of its exponent say so, with -Ofast, too.
static inline uint32_t fsdpi_is_bad_f32(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (u & 0x7F800000u) == 0x7F800000u;
}
static inline uint32_t fsdpi_is_bad_f64(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return (u & 0x7FF0000000000000u) == 0x7FF0000000000000u;
}

// x *= factor; non-zero if one of them was not finite
static FSDPI_OPTIM_NOINLINE uint32_t fsdpi_unscale_block(int wide, void *data, size_t count,
                                                         float factor) {
    uint32_t bad = 0;
    FSDPI_IN_REAL(wide, {
        fsdpi_real *x = (fsdpi_real *)data;
        for (size_t i = 0; i < count; i++)
            bad |= wide ? fsdpi_is_bad_f64((double)x[i]) : fsdpi_is_bad_f32((float)x[i]);
        for (size_t i = 0; i < count; i++) x[i] = x[i] * (fsdpi_real)factor;
    });
    return bad;
}

static uint32_t fsdpi_unscale(fsdp_dtype dtype, void *x, int64_t count, float factor) {
    size_t size = fsdp_dtype_size(dtype);
    float x32[FSDPI_OPTIM_BLOCK];
    uint32_t bad = 0;
    for (size_t at = 0; at < (size_t)count; at += FSDPI_OPTIM_BLOCK) {
        size_t n = (size_t)count - at < FSDPI_OPTIM_BLOCK ? (size_t)count - at : FSDPI_OPTIM_BLOCK;
        void *xx = (char *)x + at * size;
        if (size < sizeof *x32) (void)fsdp_convert(x32, FSDP_F32, xx, dtype, (int64_t)n);
        bad |= fsdpi_unscale_block(dtype == FSDP_F64, size < sizeof *x32 ? x32 : xx, n, factor);
        if (size < sizeof *x32) (void)fsdp_convert(xx, dtype, x32, FSDP_F32, (int64_t)n);
    }
    return bad;
}

/* -------------------------------------------------------------------------------------------- */
// >>update
// Owns: updates as records. Invariant: a record has all that an update needs, so that the loops
// above and a device do the same. It is still between the pragmas.

// Makes one update with the loops. A record has the scalars of the kernels, in their order.
static void fsdpi_optim_host_update(const fsdp_update *u) {
    fsdpi_adamw_scalars adamw;
    fsdpi_sgd_scalars sgd;
    const fsdpi_rounding rounding = {u->key, u->at, u->row, u->pitch};
    const fsdpi_rounding *r = u->rounds && u->dtype == FSDP_BF16 ? &rounding : NULL;
    if (u->kind == FSDP_UPDATE_ADAMW) {
        memcpy(&adamw, u->scalars, sizeof adamw);
        fsdpi_adamw(u->dtype, u->param, u->grad_dtype, u->grad, u->first, u->second, u->count,
                    &adamw, r);
    } else if (u->kind == FSDP_UPDATE_SGD) {
        memcpy(&sgd, u->scalars, sizeof sgd);
        fsdpi_sgd(u->dtype, u->param, u->grad_dtype, u->grad, u->first, u->count, &sgd, r);
    } else if (u->kind == FSDP_UPDATE_MOMENTUM || u->kind == FSDP_UPDATE_MUON) {
        fsdpi_muon(u, r);
    } else if (u->first) {
        double norm;
        fsdpi_sqrt(1, &norm, u->first, 1);
        norm = 1 / (norm < u->scalars[0] ? u->scalars[0] : norm);
        (void)fsdpi_unscale(u->grad_dtype, u->grad, u->count, (float)norm);
    } else {
        *u->found |= (int32_t)fsdpi_unscale(u->grad_dtype, u->grad, u->count, (float)u->scalars[0]);
    }
}

static fsdp_status fsdpi_optim_call(const fsdp_op *op, void *stream) {
    const fsdp_update *runs = (const fsdp_update *)op->list;
    (void)stream;
    for (uint32_t i = 0; i < op->list_count; i++) fsdpi_optim_host_update(&runs[i]);
    return FSDP_OK;
}

// Emits the runs of a step: the device updates them in the order of COMPUTE, or the loops do. The
// record names the first run. src, dst: buffers that it reads and writes, or NULL.
static fsdp_status fsdpi_optim_emit(fsdp_model *m, int memory, const char *what,
                                    const fsdp_update *runs, int num, fsdp_buf *src,
                                    fsdp_buf *dst) {
    fsdp_op op;
    if (num == 0) return FSDP_OK;
    const int param = runs->param != NULL;
    fsdp_op_init(&op, m, NULL, FSDP_OP_UPDATE, fsdp_label_register(m, "optimizer"),
                 FSDP_STREAM_COMPUTE);
    op.what = what;
    op.src = src, op.dst = dst;
    op.dtype = runs->grad_dtype;
    op.out_dtype = param ? runs->dtype : runs->grad_dtype;
    op.src_ptr = runs->grad;
    op.dst_ptr = param ? runs->param : runs->grad;
    op.list = runs;
    op.list_count = (uint32_t)num;
    for (int i = 0; i < num; i++) {
        op.count += (uint64_t)runs[i].count;
        op.bytes += (uint64_t)runs[i].count *
                    fsdp_dtype_size(param ? runs[i].dtype : runs[i].grad_dtype);
    }
    if (memory == FSDP_MEMORY_HOST) op.call = fsdpi_optim_call;
    return fsdp_emit(m, &op);
}

static fsdp_status fsdpi_optim_copy(fsdp_model *m, int memory, void *dst, const void *src,
                                    size_t nbytes) {
    if (memory == FSDP_MEMORY_DEVICE) return fsdp_transfer(m, dst, src, (int64_t)nbytes);
    memcpy(dst, src, nbytes);
    return FSDP_OK;
}

static int64_t fsdpi_optim_host_bytes(const fsdp_model *m) {
    fsdp_memory memory;
    return fsdp_model_memory(m, &memory) ? 0 : memory.host_bytes;
}

static int fsdpi_optim_is_nan(double x) { // by bits: correct with -Ofast, too
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits & 0x7FFFFFFFFFFFFFFFu) > 0x7FF0000000000000u;
}

/* -------------------------------------------------------------------------------------------- */
// >>optim
// Owns: an optimizer's memory, and which elements a step updates. Invariants: the table is in the
// order of addresses, and states lie in the order of the table, without padding. So if the shards
// of neighbours touch, their gradients and states touch, too, and one run has all. Table and
// states fit the model's layout unless it has `moved`. It is still between the pragmas, since
// comparisons of settings have to know infinity.

typedef struct fsdpi_optim_param {
    fsdp_unit *unit;
    int32_t index, ordinal; // in the unit, in the model
    int32_t group;
    fsdp_dtype dtype;
    int64_t numel; // of this rank's rows
    int64_t state; // offset of its state, in elements of the state's type
    int64_t step;  // number of updates so far
    char *shard;
} fsdpi_optim_param;

typedef struct fsdpi_optim {
    fsdp_model *model;
    fsdp_extension extension;
    const char *name;
    const char *state_names[2];
    int memory;                                 // updates run on FSDP_MEMORY_HOST or _DEVICE
    int num_params, num_groups, num_states;     // states: numbers for each element
    int rounds;                                 // 1: bf16 is rounded stochastically, by seed
    uint64_t seed;
    double weight_decay;                        // of the desc
    fsdp_optim_group groups[FSDP_OPTIM_GROUPS]; // resolved
    fsdp_optim_group_fn group;
    void *user;
    int moved;                         // 1: the model was laid out anew after the table was made
    int laid;                          // number of tables that were made
    int warned;                        // 1: it has warned that no parameter had a gradient
    fsdpi_optim_param *params, *spare; // spare: room for the next table
    fsdp_update *updates;              // of a step: at most one for each parameter
    char *held;                        // by parameter; 1: frozen, and has a state all the same
    char *states[2][2];                // [first, second][of f32, of f64]; one block
    int64_t state_bytes;               // of that block
    int64_t nbytes;                    // of host memory
} fsdpi_optim;

struct fsdp_adamw {
    fsdpi_optim base;
    fsdp_adamw_hyper hyper;
    fsdpi_adamw_scalars
        scalars[FSDP_OPTIM_GROUPS]; // for the update scalars_step[group]
    int64_t scalars_step[FSDP_OPTIM_GROUPS];
};

struct fsdp_sgd {
    fsdpi_optim base;
    fsdp_sgd_hyper hyper;
};

// A run of elements.
typedef struct fsdpi_optim_run {
    fsdpi_optim_param *first;
    char *grad;
    fsdp_dtype grad_dtype;
    int64_t numel, step;
} fsdpi_optim_run;

// Sets the kind and the scalars of a run's update.
typedef void (*fsdpi_optim_fn)(fsdpi_optim *o, const fsdpi_optim_run *run, double lr,
                               fsdp_update *u);

static int fsdpi_optim_bad(double x, double below) {
    return fsdpi_optim_is_nan(x) || x < 0 || !(x < below);
}

static fsdp_status fsdpi_optim_null(const char *call, const char *which) {
    return fsdp_fail(NULL, FSDP_ERR_INVALID_ARG, "[E935] %s: %s is NULL", call, which);
}

static fsdp_status fsdpi_optim_setting(fsdp_world *w, const char *what, const char *field, double x,
                                       double below) {
    if (!fsdpi_optim_bad(x, below)) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                     "[E930] %s: %s is %g, expected a finite number >= 0%s", what, field, x,
                     below <= 1 ? " and < 1" : "");
}

#define FSDPI_OPTIM_MAGIC 0x4F707469u // in a desc that fsdp_*_defaults has filled

static fsdp_status fsdpi_optim_begun(const fsdpi_optim *o, fsdp_world *w, uint32_t magic) {
    if (magic == FSDPI_OPTIM_MAGIC) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                     "[E921] %s: the desc does not come from fsdp_%s_defaults(): begin with "
                     "fsdp_%s_defaults(), and change the fields that you need",
                     o->name, o->extension.name, o->extension.name);
}

// Takes a group as the caller gives it, if it is a good one. `field`: its name, for texts.
static fsdp_status fsdpi_optim_take_group(fsdpi_optim *o, fsdp_world *w, const char *what,
                                          const char *field, int k,
                                          const fsdp_optim_group *given) {
    fsdp_optim_group g = *given;
    char text[64];
    if (g.magic != FSDPI_OPTIM_MAGIC)
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E922] %s: %s does not come from fsdp_%s_defaults(): change the fields "
                         "of desc.groups[%d], and do not replace all of it",
                         what, field, o->extension.name, k);
    if (g.weight_decay <= FSDP_OPTIM_SAME && g.weight_decay >= FSDP_OPTIM_SAME)
        g.weight_decay = o->weight_decay;
    snprintf(text, sizeof text, "%s.lr_scale", field);
    fsdp_status status = fsdpi_optim_setting(w, what, text, g.lr_scale, HUGE_VAL);
    snprintf(text, sizeof text, "%s.weight_decay", field);
    if (!status) status = fsdpi_optim_setting(w, what, text, g.weight_decay, HUGE_VAL);
    if (!status) o->groups[k] = g;
    return status;
}

static fsdp_status fsdpi_optim_groups(fsdpi_optim *o, fsdp_world *w, int num_groups,
                                      const fsdp_optim_group *groups, double weight_decay) {
    fsdp_status status = FSDP_OK;
    char field[32];
    if (num_groups < 0 || num_groups > FSDP_OPTIM_GROUPS)
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E931] %s: desc.num_groups is %d, expected 0..%d", o->name, num_groups,
                         FSDP_OPTIM_GROUPS);
    o->num_groups = num_groups ? num_groups : 1;
    o->weight_decay = weight_decay;
    o->groups[0].lr_scale = 1;
    o->groups[0].weight_decay = weight_decay;
    for (int i = 0; i < num_groups && !status; i++) {
        snprintf(field, sizeof field, "desc.groups[%d]", i);
        status = fsdpi_optim_take_group(o, w, o->name, field, i, &groups[i]);
    }
    return status;
}

static fsdp_status fsdpi_optim_agree_group(const fsdpi_optim *o, int k) {
    const double group[] = {k, o->groups[k].lr_scale, o->groups[k].weight_decay};
    return fsdp_agree(o->model, group, sizeof group);
}

// Ranks compare the settings with which an optimizer is made.
static fsdp_status fsdpi_optim_agree(const fsdpi_optim *o, const double *given, size_t nbytes) {
    fsdp_status status = fsdp_agree(o->model, given, (int64_t)nbytes);
    if (o->rounds && !status) status = fsdp_agree(o->model, &o->seed, sizeof o->seed);
    for (int i = 0; i < o->num_groups && !status; i++) status = fsdpi_optim_agree_group(o, i);
    return status;
}

// The next step computes its scalars of the new group. So does a step that replays: a plan has its
// records, and no updates.
static fsdp_status fsdpi_optim_set_group(fsdpi_optim *o, const char *what, int k,
                                         const fsdp_optim_group *group) {
    if (!o || !group) return fsdpi_optim_null(what, "the optimizer or group");
    fsdp_world *w = fsdp_model_world(o->model);
    fsdp_status status = fsdp_world_status(w);
    if (status) return status;
    if (k < 0 || k >= o->num_groups)
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E924] %s: the optimizer has no group %d, expected 0..%d", what, k,
                         o->num_groups - 1);
    status = fsdpi_optim_take_group(o, w, what, "group", k, group);
    return status ? status : fsdpi_optim_agree_group(o, k);
}

static fsdpi_optim_param *fsdpi_optim_find(const fsdpi_optim *o, int ordinal) {
    for (int i = 0; i < o->num_params; i++)
        if (o->params[i].ordinal == ordinal) return &o->params[i];
    return NULL;
}

// Makes the table of the present layout, in the order of addresses. It has parameters that require
// a gradient, those of the old table, whose state stays while they are frozen, and those of which a
// checkpoint has states.
static fsdp_status fsdpi_optim_collect(const fsdpi_optim *old, fsdpi_optim *o, const char *what) {
    for (fsdp_dtype dtype = 1; dtype < FSDP_DTYPE_COUNT; dtype++) { // each has a block of its own
        fsdp_param_view v = FSDP_ZERO;
        int begin = o->num_params;
        while (fsdp_next_param(o->model, &v)) {
            if (v.dtype != dtype) continue;
            const fsdpi_optim_param *known = fsdpi_optim_find(old, v.ordinal);
            if (!v.requires_grad && !known && !o->held[v.ordinal]) continue;
            int chosen = known ? known->group : o->group ? o->group(o->user, &v) : 0;
            if (chosen >= o->num_groups)
                return fsdp_fail(fsdp_model_world(o->model), FSDP_ERR_INVALID_ARG,
                                 "[E932] %s: the group of parameter '%s' of unit '%s' is %d, "
                                 "expected at most %d",
                                 what, v.name, v.unit_name, chosen, o->num_groups - 1);
            if (chosen < 0) continue;
            int at = o->num_params++;
            for (; at > begin && o->params[at - 1].shard > (char *)v.shard; at--)
                o->params[at] = o->params[at - 1];
            fsdpi_optim_param p = {v.unit,         v.index, v.ordinal, chosen,
                                   dtype,          v.numel, 0,         known ? known->step : 0,
                                   (char *)v.shard};
            o->params[at] = p;
        }
    }
    return FSDP_OK;
}

static int fsdpi_optim_wide(const fsdpi_optim_param *p) { return p->dtype == FSDP_F64; }

static size_t fsdpi_optim_size(int wide) { return wide ? sizeof(double) : sizeof(float); }

// The number of elements for a row of states: each row begins at a multiple of 64 bytes.
static int64_t fsdpi_optim_room(int64_t numel) {
    return (numel + 15) / 16 * 16;
}

// Makes one block of zeros for all states: first and second numbers of f32, then those of f64.
static fsdp_status fsdpi_optim_alloc_states(fsdpi_optim *o, const char *what) {
    int64_t numel[2] = {0, 0}, total = 0;
    o->state_bytes = 0;
    for (int i = 0; i < o->num_params; i++) {
        fsdpi_optim_param *p = &o->params[i];
        p->state = numel[fsdpi_optim_wide(p)];
        numel[fsdpi_optim_wide(p)] += p->numel;
    }
    for (int wide = 0; wide < 2; wide++)
        total += fsdpi_optim_room(numel[wide]) * (int64_t)fsdpi_optim_size(wide) * o->num_states;
    if (total == 0) return FSDP_OK;
    char text[96];
    void *block;
    snprintf(text, sizeof text, "%s: no memory for a state", what);
    fsdp_status status = fsdp_alloc(o->model, o->memory, total, text, &block);
    if (status) return status;
    char *at = (char *)block;
    o->state_bytes = total;
    for (int wide = 0; wide < 2; wide++)
        for (int k = 0; k < o->num_states; k++) {
            o->states[k][wide] = at;
            at += (size_t)fsdpi_optim_room(numel[wide]) * fsdpi_optim_size(wide);
        }
    return FSDP_OK;
}

// Moves one state of one parameter. After a cast of the model, the host converts it.
static fsdp_status fsdpi_optim_move_one(const fsdpi_optim *old, const fsdpi_optim_param *from,
                                        const fsdpi_optim *o, const fsdpi_optim_param *to, int k) {
    int was = fsdpi_optim_wide(from), is = fsdpi_optim_wide(to);
    size_t in_size = fsdpi_optim_size(was), out_size = fsdpi_optim_size(is);
    double in[512], out[512];
    const int64_t piece = (int64_t)(sizeof in / sizeof *in);
    fsdp_status status = FSDP_OK;
    if (to->numel == 0) return FSDP_OK;
    const char *src = old->states[k][was] + (size_t)from->state * in_size;
    char *dst = o->states[k][is] + (size_t)to->state * out_size;
    if (was == is)
        return fsdpi_optim_copy(o->model, o->memory, dst, src, (size_t)to->numel * in_size);
    for (int64_t at = 0; at < to->numel && !status; at += piece) {
        size_t count = (size_t)(to->numel - at < piece ? to->numel - at : piece);
        status = fsdpi_optim_copy(o->model, o->memory, in, src + (size_t)at * in_size,
                                  count * in_size);
        if (!status)
            status = fsdp_convert(out, is ? FSDP_F64 : FSDP_F32, in, was ? FSDP_F64 : FSDP_F32,
                                  (int64_t)count);
        if (!status)
            status = fsdpi_optim_copy(o->model, o->memory, dst + (size_t)at * out_size, out,
                                      count * out_size);
    }
    return status;
}

// Moves the states of all parameters to their places in the new block.
static fsdp_status fsdpi_optim_move(const fsdpi_optim *old, const fsdpi_optim *o) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < o->num_params; i++) {
        const fsdpi_optim_param *to = &o->params[i], *from = fsdpi_optim_find(old, to->ordinal);
        for (int k = 0; k < o->num_states && from && !status; k++)
            status = fsdpi_optim_move_one(old, from, o, to, k);
    }
    return status;
}

// Makes table and states for the model's present layout. After a failure the old ones stay.
static fsdp_status fsdpi_optim_follow(fsdpi_optim *o, const char *what) {
    fsdp_model *m = o->model;
    if (!o->moved) return FSDP_OK;
    fsdpi_optim old = *o, next = *o;
    int64_t before = fsdpi_optim_host_bytes(m);
    next.params = old.spare;
    next.spare = old.params;
    next.num_params = 0;
    next.moved = 0;
    next.laid++;
    memset(next.states, 0, sizeof next.states);
    fsdp_status status = fsdpi_optim_collect(&old, &next, what);
    if (!status) status = fsdpi_optim_alloc_states(&next, what);
    if (!status) status = fsdpi_optim_move(&old, &next);
    if (status) {
        fsdp_free(m, next.memory, next.states[0][0], next.state_bytes);
        return status;
    }
    fsdp_free(m, old.memory, old.states[0][0], old.state_bytes); // no update is under way
    next.nbytes += fsdpi_optim_host_bytes(m) - before;
    *o = next;
    return FSDP_OK;
}

static void fsdpi_optim_relayout(void *user, fsdp_model *model) {
    (void)model;
    ((fsdpi_optim *)user)->moved = 1; // the next use follows: that may fail
}

// Items for checkpoints: each parameter's states and its t.
static fsdp_status fsdpi_optim_item(void *user, fsdp_model *model, int index,
                                    fsdp_state_item *item) {
    fsdpi_optim *o = (fsdpi_optim *)user;
    for (int i = 0; !item && i < o->num_params; i++) // they are written in place
        if (o->params[i].step < 0)
            return fsdp_fail(fsdp_model_world(model), FSDP_ERR_INVALID_ARG,
                             "[E933] %s: the step of parameter %d is %lld, expected >= 0", o->name,
                             o->params[i].ordinal, (long long)o->params[i].step);
    if (!item) return FSDP_OK;
    fsdp_status status = fsdpi_optim_follow(o, o->name);
    int place = index / (o->num_states + 1), which = index % (o->num_states + 1);
    if (status || place >= o->num_params) return status;
    fsdpi_optim_param *p = &o->params[place];
    int wide = fsdpi_optim_wide(p);
    item->ordinal = p->ordinal;
    item->name = which < o->num_states ? o->state_names[which] : "step";
    if (which == o->num_states) {
        item->dtype = FSDP_I64;
        item->memory = FSDP_MEMORY_HOST;
        item->numel = 1;
        item->data = &p->step;
        return FSDP_OK;
    }
    item->sharded = 1;
    item->dtype = wide ? FSDP_F64 : FSDP_F32;
    item->memory = o->memory;
    item->data = o->states[which][wide] + (size_t)p->state * fsdpi_optim_size(wide);
    return FSDP_OK;
}

// A checkpoint has states of this parameter. The next use makes room for them: updates under way
// still write to the present room.
static fsdp_status fsdpi_optim_hold(void *user, fsdp_model *model, int ordinal) {
    fsdpi_optim *o = (fsdpi_optim *)user;
    if (o->held[ordinal]) return FSDP_OK;
    o->held[ordinal] = 1;
    o->moved = 1;
    return o->memory == FSDP_MEMORY_DEVICE ? fsdp_wait_stream(model, FSDP_STREAM_COMPUTE) : FSDP_OK;
}

static void fsdpi_optim_free(void *user) {
    fsdpi_optim *o = (fsdpi_optim *)user;
    fsdp_free(o->model, o->memory, o->states[0][0], o->state_bytes);
    fsdp_free(o->model, FSDP_MEMORY_HOST, o, 0);
}

static void fsdpi_optim_destroy(fsdpi_optim *o) {
    if (!o) return;
    if (o->memory == FSDP_MEMORY_DEVICE) (void)fsdp_wait_stream(o->model, FSDP_STREAM_COMPUTE);
    (void)fsdp_detach(o->model, &o->extension);
}

static int64_t fsdpi_optim_nbytes(const fsdpi_optim *o) {
    return o->nbytes + (o->memory == FSDP_MEMORY_DEVICE ? o->state_bytes : 0);
}

// Makes an optimizer of `size` bytes, with settings, tables and the states.
static fsdp_status fsdpi_optim_create(fsdp_model *m, const fsdpi_optim *settings, int64_t size,
                                      fsdp_optim_group_fn group, void *user, fsdpi_optim **out) {
    int memory = FSDP_MEMORY_HOST, most = fsdp_num_params(m);
    char text[96];
    void *room;
    fsdp_status status = fsdp_update_place(m, settings->name, &memory);
    if (status) return status;
    int64_t before = fsdpi_optim_host_bytes(m), head = (size + 63) / 64 * 64;
    snprintf(text, sizeof text, "%s: no memory for a table of %d parameters", settings->name, most);
    status = fsdp_alloc(
        m, FSDP_MEMORY_HOST,
        head + most * (2 * (int64_t)sizeof(fsdpi_optim_param) + (int64_t)sizeof(fsdp_update) + 1),
        text, &room);
    if (status) return status;
    fsdpi_optim *o = (fsdpi_optim *)room;
    *o = *settings;
    o->model = m;
    o->memory = memory;
    o->group = group;
    o->user = user;
    o->params = (fsdpi_optim_param *)(void *)((char *)o + head);
    o->spare = o->params + most;
    o->updates = (fsdp_update *)(void *)(o->spare + most);
    o->held = (char *)(o->updates + most);
    o->moved = 1;
    o->extension.user = o;
    o->extension.relayout = fsdpi_optim_relayout;
    o->extension.state = fsdpi_optim_item;
    o->extension.hold = fsdpi_optim_hold;
    if (!o->extension.destroy) o->extension.destroy = fsdpi_optim_free;
    status = fsdpi_optim_follow(o, o->name);
    if (!status) status = fsdp_attach(m, &o->extension);
    if (status) {
        fsdpi_optim_free(o);
        return status;
    }
    o->nbytes = fsdpi_optim_host_bytes(m) - before;
    *out = o;
    return FSDP_OK;
}

// The end of splitmix64, a generator.
static uint64_t fsdpi_optim_mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// The random bits of a run, which is a part of one parameter. They depend on the places of the
// elements in the whole parameter, and not on this rank or its layout.
static fsdp_status fsdpi_optim_rounds(const fsdpi_optim *o, const fsdpi_optim_run *run,
                                      fsdp_update *u) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_status status = fsdp_param_view_get(run->first->unit, run->first->index, &v);
    uint64_t step = fsdpi_optim_mix(o->seed + (uint64_t)run->step * 0x9E3779B97F4A7C15u);
    u->rounds = 1;
    u->key = fsdpi_optim_mix(step + (uint64_t)(v.ordinal + 1) * 0x9E3779B97F4A7C15u);
    u->at = fsdp_view_index(&v, 0);
    u->row = u->pitch = 1;
    for (int d = v.shard_dim; d < v.ndim; d++) {
        u->row *= v.local_shape[d];
        u->pitch *= v.shape[d];
    }
    return status;
}

// Appends a run to the updates of a step, unless it is empty.
static fsdp_status fsdpi_optim_append(fsdpi_optim *o, const fsdpi_optim_run *run,
                                      fsdpi_optim_fn fill, double lr, int *num) {
    if (run->numel == 0) return FSDP_OK;
    fsdp_update *u = &o->updates[(*num)++];
    int wide = fsdpi_optim_wide(run->first);
    size_t offset = (size_t)run->first->state * fsdpi_optim_size(wide);
    memset(u, 0, sizeof *u);
    u->dtype = (uint8_t)run->first->dtype;
    u->grad_dtype = (uint8_t)run->grad_dtype;
    u->count = run->numel;
    u->param = run->first->shard;
    u->grad = run->grad;
    if (o->states[0][wide]) u->first = o->states[0][wide] + offset;
    if (o->states[1][wide]) u->second = o->states[1][wide] + offset;
    fill(o, run, lr * o->groups[run->first->group].lr_scale, u);
    return o->rounds && u->dtype == FSDP_BF16 ? fsdpi_optim_rounds(o, run, u) : FSDP_OK;
}

// Does the parameter begin where the run ends, so that the run may have both?
static int fsdpi_optim_joins(const fsdpi_optim_run *run, const fsdpi_optim_param *p,
                             const fsdp_param_view *v) {
    return run->numel > 0 && run->first->dtype == p->dtype && run->grad_dtype == v->grad_dtype &&
           run->first->group == p->group && run->step == p->step &&
           run->first->shard + (size_t)run->numel * fsdp_dtype_size(p->dtype) == p->shard &&
           run->grad + (size_t)run->numel * fsdp_dtype_size(v->grad_dtype) ==
               (const char *)v->shard_grad &&
           run->first->state + run->numel == p->state;
}

// Warns once if a step has found no gradient: the text says whether another optimizer has some.
static void fsdpi_optim_tell(fsdpi_optim *o, const char *what) {
    fsdp_param_view v = FSDP_ZERO;
    while (!o->warned && fsdp_next_param(o->model, &v))
        if (v.shard_grad) return;
    if (!o->warned)
        fsdp_warn(fsdp_model_world(o->model),
                  "[E923] %s: no parameter has a gradient, so nothing is updated: run a backward "
                  "with gradient sync (fsdp_set_requires_gradient_sync) before, and call "
                  "fsdp_zero_grad after the step",
                  what);
    o->warned = 1;
}

// May a step with this learning rate be made now?
static fsdp_status fsdpi_optim_begin(const fsdpi_optim *o, double lr, const char *what) {
    fsdp_status status = fsdp_call_begin(o->model, FSDP_CALL_PARAMS_CHANGED, what);
    if (status) return status;
    if (fsdpi_optim_bad(lr, HUGE_VAL))
        return fsdp_fail(fsdp_model_world(o->model), FSDP_ERR_INVALID_ARG,
                         "[E934] %s: lr is %g, expected a finite number >= 0", what, lr);
    return fsdp_params_writable(o->model); // a gather under way may still read the shards
}

static fsdp_status fsdpi_optim_step(fsdpi_optim *o, double lr, const char *what,
                                    fsdpi_optim_fn fill) {
    fsdp_status status = fsdpi_optim_begin(o, lr, what);
    if (!status) status = fsdpi_optim_follow(o, what);
    if (!status) status = fsdp_agree(o->model, &lr, sizeof lr);
    if (status) return status;
    fsdpi_optim_run run = {NULL, NULL, FSDP_DTYPE_KEEP, 0, 0};
    int num = 0; // of updates
    for (int i = 0; i < o->num_params && !status; i++) {
        fsdpi_optim_param *p = &o->params[i];
        fsdp_param_view v = FSDP_ZERO;
        status = fsdp_param_view_get(p->unit, p->index, &v);
        if (status || !v.shard_grad) continue;
        p->step++;
        if (!fsdpi_optim_joins(&run, p, &v) || (o->rounds && p->dtype == FSDP_BF16)) {
            status = fsdpi_optim_append(o, &run, fill, lr, &num);
            run.first = p;
            run.grad = (char *)v.shard_grad;
            run.grad_dtype = v.grad_dtype;
            run.numel = 0;
            run.step = p->step;
        }
        run.numel += p->numel;
    }
    if (!status) status = fsdpi_optim_append(o, &run, fill, lr, &num);
    if (!status) status = fsdpi_optim_emit(o->model, o->memory, what, o->updates, num, NULL, NULL);
    if (!status && o->num_params && !run.first) fsdpi_optim_tell(o, what);
    return status ? status : fsdp_params_changed(o->model);
}

static fsdp_status fsdpi_optim_state(fsdpi_optim *o, int ordinal, const char *what,
                                     fsdp_optim_state *out) {
    if (!o || !out) return fsdpi_optim_null(what, "the optimizer or out");
    fsdp_world *w = fsdp_model_world(o->model);
    int num = fsdp_num_params(o->model);
    if (ordinal < 0 || ordinal >= num)
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E936] %s: the model has no parameter %d, expected 0..%d", what, ordinal,
                         num - 1);
    fsdp_status status = FSDP_OK;
    if (!fsdp_world_status(w)) { // if the world has failed, the table stays
        status = fsdp_model_commit(o->model);
        if (!status) status = fsdpi_optim_follow(o, what);
    }
    memset(out, 0, sizeof *out);
    out->group = -1;
    fsdpi_optim_param *p = status ? NULL : fsdpi_optim_find(o, ordinal);
    if (!p) return status;
    int wide = fsdpi_optim_wide(p);
    size_t offset = (size_t)p->state * fsdpi_optim_size(wide);
    out->dtype = wide ? FSDP_F64 : FSDP_F32;
    out->group = p->group;
    out->numel = p->numel;
    out->step = &p->step;
    if (o->states[0][wide]) out->first = o->states[0][wide] + offset;
    if (o->states[1][wide]) out->second = o->states[1][wide] + offset;
    return FSDP_OK;
}

// AdamW. The scalars of a group are computed anew if its t or the step's lr has changed.
static void fsdpi_adamw_fill(fsdpi_optim *o, const fsdpi_optim_run *run, double lr,
                             fsdp_update *u) {
    fsdp_adamw *opt = (fsdp_adamw *)(void *)o;
    int group = run->first->group;
    if (opt->scalars_step[group] != run->step) {
        opt->hyper.lr = lr;
        opt->hyper.weight_decay = o->groups[group].weight_decay;
        opt->hyper.step = run->step;
        opt->scalars[group] = fsdpi_adamw_prepare(&opt->hyper);
        opt->scalars_step[group] = run->step;
    }
    u->kind = FSDP_UPDATE_ADAMW;
    memcpy(u->scalars, &opt->scalars[group], sizeof opt->scalars[group]);
}

static void fsdpi_optim_no_groups(fsdp_optim_group *groups) {
    for (int i = 0; i < FSDP_OPTIM_GROUPS; i++) {
        groups[i].lr_scale = 1, groups[i].weight_decay = FSDP_OPTIM_SAME;
        groups[i].magic = FSDPI_OPTIM_MAGIC;
    }
}

FSDP_API fsdp_adamw_desc fsdp_adamw_defaults(void) {
    fsdp_adamw_desc d = FSDP_ZERO;
    d.beta1 = 0.9, d.beta2 = 0.999, d.eps = 1e-8, d.weight_decay = 0.01;
    d.magic = FSDPI_OPTIM_MAGIC;
    fsdpi_optim_no_groups(d.groups);
    return d;
}

FSDP_API fsdp_status fsdp_adamw_create(fsdp_model *model, const fsdp_adamw_desc *desc,
                                       fsdp_adamw **opt) {
    static const char *const name = "adamw_create";
    fsdp_adamw_desc d, defaults = fsdp_adamw_defaults();
    fsdp_adamw settings;
    fsdpi_optim *base = NULL;
    if (!model || !opt) return fsdpi_optim_null(name, "model or opt");
    *opt = NULL;
    fsdp_world *w = fsdp_model_world(model);
    if (!desc) desc = &defaults;
    fsdp_status status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_adamw_desc");
    memset(&settings, 0, sizeof settings);
    settings.base.name = name;
    settings.base.extension.name = "adamw";
    settings.base.state_names[0] = "exp_avg";
    settings.base.state_names[1] = "exp_avg_sq";
    settings.base.num_states = 2;
    settings.base.rounds = d.stochastic_rounding != 0;
    settings.base.seed = d.seed;
    if (!status) status = fsdpi_optim_begun(&settings.base, w, d.magic);
    if (!status) status = fsdpi_optim_setting(w, name, "desc.beta1", d.beta1, 1);
    if (!status) status = fsdpi_optim_setting(w, name, "desc.beta2", d.beta2, 1);
    if (!status) status = fsdpi_optim_setting(w, name, "desc.eps", d.eps, HUGE_VAL);
    if (!status && !(d.beta2 > 0) && !(d.eps > 0)) // a zero gradient would be 0 / 0
        status = fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                           "[E938] %s: desc.beta2 and desc.eps are both 0: give one of them", name);
    if (!status)
        status = fsdpi_optim_setting(w, name, "desc.weight_decay", d.weight_decay, HUGE_VAL);
    if (!status)
        status = fsdpi_optim_groups(&settings.base, w, d.num_groups, d.groups, d.weight_decay);
    if (!status)
        status = fsdpi_optim_create(model, &settings.base, (int64_t)sizeof settings, d.group,
                                    d.user, &base);
    if (status) return status;
    *opt = (fsdp_adamw *)(void *)base;
    (*opt)->hyper.beta1 = d.beta1;
    (*opt)->hyper.beta2 = d.beta2;
    (*opt)->hyper.eps = d.eps;
    const double given[] = {d.beta1, d.beta2, d.eps};
    status = fsdpi_optim_agree(base, given, sizeof given);
    if (status) fsdp_adamw_destroy(*opt), *opt = NULL;
    return status;
}

FSDP_API fsdp_status fsdp_adamw_step(fsdp_adamw *opt, double lr) {
    if (!opt) return fsdpi_optim_null("adamw_step", "the optimizer");
    memset(opt->scalars_step, 0, sizeof opt->scalars_step);
    return fsdpi_optim_step(&opt->base, lr, "adamw_step", fsdpi_adamw_fill);
}

FSDP_API fsdp_status fsdp_adamw_set_group(fsdp_adamw *opt, int k, const fsdp_optim_group *group) {
    return fsdpi_optim_set_group(opt ? &opt->base : NULL, "adamw_set_group", k, group);
}

FSDP_API void fsdp_adamw_destroy(fsdp_adamw *opt) { fsdpi_optim_destroy(opt ? &opt->base : NULL); }

FSDP_API fsdp_status fsdp_adamw_state(fsdp_adamw *opt, int ordinal, fsdp_optim_state *out) {
    return fsdpi_optim_state(opt ? &opt->base : NULL, ordinal, "adamw_state", out);
}

FSDP_API int64_t fsdp_adamw_nbytes(const fsdp_adamw *opt) {
    return opt ? fsdpi_optim_nbytes(&opt->base) : 0;
}

// SGD.
static void fsdpi_sgd_fill(fsdpi_optim *o, const fsdpi_optim_run *run, double lr, fsdp_update *u) {
    fsdp_sgd_hyper hyper = ((fsdp_sgd *)(void *)o)->hyper;
    hyper.lr = lr;
    hyper.weight_decay = o->groups[run->first->group].weight_decay;
    hyper.step = run->step;
    fsdpi_sgd_scalars k = fsdpi_sgd_prepare(&hyper);
    u->kind = FSDP_UPDATE_SGD;
    memcpy(u->scalars, &k, sizeof k);
}

FSDP_API fsdp_sgd_desc fsdp_sgd_defaults(void) {
    fsdp_sgd_desc d = FSDP_ZERO;
    d.magic = FSDPI_OPTIM_MAGIC;
    fsdpi_optim_no_groups(d.groups);
    return d;
}

FSDP_API fsdp_status fsdp_sgd_create(fsdp_model *model, const fsdp_sgd_desc *desc, fsdp_sgd **opt) {
    static const char *const name = "sgd_create";
    fsdp_sgd_desc d, defaults = fsdp_sgd_defaults();
    fsdp_sgd settings;
    fsdpi_optim *base = NULL;
    if (!model || !opt) return fsdpi_optim_null(name, "model or opt");
    *opt = NULL;
    fsdp_world *w = fsdp_model_world(model);
    if (!desc) desc = &defaults;
    fsdp_status status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_sgd_desc");
    memset(&settings, 0, sizeof settings);
    settings.base.name = name;
    settings.base.extension.name = "sgd";
    settings.base.state_names[0] = "momentum_buffer";
    if (!status) status = fsdpi_optim_begun(&settings.base, w, d.magic);
    if (!status) status = fsdpi_optim_setting(w, name, "desc.momentum", d.momentum, HUGE_VAL);
    if (!status) status = fsdpi_optim_setting(w, name, "desc.dampening", d.dampening, HUGE_VAL);
    if (!status)
        status = fsdpi_optim_setting(w, name, "desc.weight_decay", d.weight_decay, HUGE_VAL);
    if (!status && d.nesterov && !(d.momentum > 0 && d.dampening == 0))
        status = fsdp_fail(
            w, FSDP_ERR_INVALID_ARG,
            "[E941] %s: desc.nesterov needs momentum > 0 and dampening 0, got %g and %g", name,
            d.momentum, d.dampening);
    if (!status)
        status = fsdpi_optim_groups(&settings.base, w, d.num_groups, d.groups, d.weight_decay);
    settings.base.num_states = d.momentum > 0;
    settings.base.rounds = d.stochastic_rounding != 0;
    settings.base.seed = d.seed;
    if (!status)
        status = fsdpi_optim_create(model, &settings.base, (int64_t)sizeof settings, d.group,
                                    d.user, &base);
    if (status) return status;
    *opt = (fsdp_sgd *)(void *)base;
    (*opt)->hyper.momentum = d.momentum;
    (*opt)->hyper.dampening = d.dampening;
    (*opt)->hyper.nesterov = d.nesterov;
    const double given[] = {d.momentum, d.dampening, d.nesterov ? 1.0 : 0.0};
    status = fsdpi_optim_agree(base, given, sizeof given);
    if (status) fsdp_sgd_destroy(*opt), *opt = NULL;
    return status;
}

FSDP_API fsdp_status fsdp_sgd_step(fsdp_sgd *opt, double lr) {
    if (!opt) return fsdpi_optim_null("sgd_step", "the optimizer");
    return fsdpi_optim_step(&opt->base, lr, "sgd_step", fsdpi_sgd_fill);
}

FSDP_API fsdp_status fsdp_sgd_set_group(fsdp_sgd *opt, int k, const fsdp_optim_group *group) {
    return fsdpi_optim_set_group(opt ? &opt->base : NULL, "sgd_set_group", k, group);
}

FSDP_API void fsdp_sgd_destroy(fsdp_sgd *opt) { fsdpi_optim_destroy(opt ? &opt->base : NULL); }

FSDP_API fsdp_status fsdp_sgd_state(fsdp_sgd *opt, int ordinal, fsdp_optim_state *out) {
    return fsdpi_optim_state(opt ? &opt->base : NULL, ordinal, "sgd_state", out);
}

FSDP_API int64_t fsdp_sgd_nbytes(const fsdp_sgd *opt) {
    return opt ? fsdpi_optim_nbytes(&opt->base) : 0;
}

/* -------------------------------------------------------------------------------------------- */
// >>grad scaler
// Owns: the scale, and its state within a step. Invariants: the state is the same on all ranks; the
// scale and its reciprocal are normal numbers of f32.

struct fsdp_grad_scaler {
    fsdp_model *model;
    fsdp_extension extension;
    fsdp_grad_scaler_state state;
    double saved[5];      // the state as a checkpoint writes it, in the order of its fields
    int lent;             // 1: a checkpoint has the address of `saved`, and may write there
    int memory;           // updates run on FSDP_MEMORY_HOST or _DEVICE
    int found;            // -1: no unscale in this step
    fsdp_update *updates; // of an unscale: at most one for each parameter
    int32_t *verdict;     // in device memory: the `found` of its updates, 0 between steps; or NULL
};

#define FSDPI_SCALE_MIN 1.1754943508222875e-38 // 2^-126
#define FSDPI_SCALE_MAX 8.5070591730234616e+37 // 2^126

static int fsdpi_scale_ok(double x) {
    return !fsdpi_optim_is_nan(x) && x >= FSDPI_SCALE_MIN && x <= FSDPI_SCALE_MAX;
}

// The scale times a factor, as f32; the scale itself, if the product is out of range.
static double fsdpi_rescaled(double scale, double factor) {
    double x = scale * factor;
    return fsdpi_scale_ok(x) ? (double)(float)x : scale;
}

static fsdp_status fsdpi_scaler_check(fsdp_world *w, const char *what,
                                      const fsdp_grad_scaler_state *s) {
    const char *field = NULL, *expected = NULL;
    double given = 0;
    if (!fsdpi_scale_ok(s->scale)) field = "scale", given = s->scale, expected = "2^-126 .. 2^126";
    else if (fsdpi_optim_is_nan(s->growth_factor) || !(s->growth_factor > 1) ||
             !(s->growth_factor < HUGE_VAL))
        field = "growth_factor", given = s->growth_factor, expected = "a finite number > 1";
    else if (fsdpi_optim_bad(s->backoff_factor, 1) || s->backoff_factor == 0)
        field = "backoff_factor", given = s->backoff_factor, expected = "> 0 and < 1";
    else if (s->growth_interval < 1)
        field = "growth_interval", given = s->growth_interval, expected = ">= 1";
    else if (s->growth_tracker < 0 || s->growth_tracker >= s->growth_interval)
        field = "growth_tracker", given = s->growth_tracker, expected = "0 .. growth_interval-1";
    if (!field) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_INVALID_ARG, "[E943] %s: %s is %g, expected %s", what, field,
                     given, expected);
}

enum { FSDPI_VERDICT = 8 }; // bytes

// Lists the gradients; neighbours are one run. *any: there is a gradient, if without elements.
static int fsdpi_scaler_list(const fsdp_grad_scaler *g, int32_t *found, int32_t *any) {
    fsdp_param_view v = FSDP_ZERO;
    const char *end = NULL; // of the last run
    int num = 0;
    while (fsdp_next_param(g->model, &v)) {
        if (v.shard_grad) *any = 1;
        if (!v.shard_grad || v.numel == 0) continue;
        int joins = end == (char *)v.shard_grad && g->updates[num - 1].grad_dtype == v.grad_dtype;
        fsdp_update *u = &g->updates[joins ? num - 1 : num++];
        end = (char *)v.shard_grad + v.numel * (int64_t)fsdp_dtype_size(v.grad_dtype);
        if (joins) {
            u->count += v.numel;
            continue;
        }
        memset(u, 0, sizeof *u);
        u->kind = FSDP_UPDATE_UNSCALE;
        u->dtype = u->grad_dtype = (uint8_t)v.grad_dtype;
        u->count = v.numel;
        u->grad = v.shard_grad;
        u->found = found;
        u->scalars[0] = (double)(float)(1 / g->state.scale);
    }
    return num;
}

static void fsdpi_scaler_free(void *user) {
    fsdp_grad_scaler *g = (fsdp_grad_scaler *)user;
    fsdp_free(g->model, FSDP_MEMORY_DEVICE, g->verdict, FSDPI_VERDICT);
    fsdp_free(g->model, FSDP_MEMORY_HOST, g, 0);
}

// Reads whether the device's updates have found a bad gradient.
static fsdp_status fsdpi_scaler_verdict(fsdp_grad_scaler *g, int32_t *found) {
    static const int32_t none = 0;
    fsdp_status status = fsdp_transfer(g->model, found, g->verdict, sizeof *found);
    if (status || !*found) return status;
    return fsdp_transfer(g->model, g->verdict, &none, sizeof none);
}

static void fsdpi_scaler_numbers(const fsdp_grad_scaler_state *s, double *n) {
    n[0] = s->scale;
    n[1] = s->growth_factor;
    n[2] = s->backoff_factor;
    n[3] = s->growth_interval;
    n[4] = s->growth_tracker;
}

// Takes the maxima of found and any over all ranks. The same collective compares the ranks' states,
// by the largest number and the negative of the smallest one.
static fsdp_status fsdpi_scaler_meet(const fsdp_grad_scaler *g, const char *what, int32_t *found,
                                     int32_t *any) {
    static const char *const fields[5] = {"scale", "growth_factor", "backoff_factor",
                                          "growth_interval", "growth_tracker"};
    fsdp_world *w = fsdp_model_world(g->model);
    double most[12];
    fsdpi_scaler_numbers(&g->state, most);
    for (int i = 0; i < 5; i++) most[5 + i] = -most[i];
    most[10] = *found;
    most[11] = *any;
    fsdp_status status = fsdp_all_reduce(w, NULL, most, 12, FSDP_F64, FSDP_MAX);
    *found = (int32_t)most[10];
    *any = (int32_t)most[11];
    for (int i = 0; i < 5 && !status; i++)
        if (most[i] > -most[5 + i])
            status = fsdp_fail(w, FSDP_ERR_MISMATCH,
                               "[E949] %s: ranks disagree about %s: it is %g on one and %g on "
                               "another: give all of them the same desc and state",
                               what, fields[i], -most[5 + i], most[i]);
    return status;
}

// The item for checkpoints: the state as numbers.
static fsdp_status fsdpi_scaler_item(void *user, fsdp_model *model, int index,
                                     fsdp_state_item *item) {
    fsdp_grad_scaler *g = (fsdp_grad_scaler *)user;
    double *n = g->saved;
    (void)model;
    if (!item && !g->lent) return FSDP_OK;
    g->lent = item != NULL;
    if (!item) {
        double whole = 2147483647; // the largest int32_t; else -1, which is refused
        fsdp_grad_scaler_state s = {n[0], n[1], n[2], -1, -1};
        if (n[3] >= 0 && n[3] <= whole) s.growth_interval = (int32_t)n[3];
        if (n[4] >= 0 && n[4] <= whole) s.growth_tracker = (int32_t)n[4];
        return fsdp_grad_scaler_set_state(g, &s);
    }
    if (index > 0) return FSDP_OK;
    fsdpi_scaler_numbers(&g->state, n);
    item->name = "state";
    item->dtype = FSDP_F64;
    item->memory = FSDP_MEMORY_HOST;
    item->ndim = 1;
    item->numel = item->shape[0] = 5;
    item->data = n;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_grad_scaler_create(fsdp_model *model, const fsdp_grad_scaler_desc *desc,
                                             fsdp_grad_scaler **scaler) {
    static const char *const name = "grad_scaler_create";
    fsdp_grad_scaler_desc d;
    if (!model || !scaler) return fsdpi_optim_null(name, "model or scaler");
    *scaler = NULL;
    fsdp_world *w = fsdp_model_world(model);
    fsdp_status status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_grad_scaler_desc");
    if (status) return status;
    fsdp_grad_scaler_state s = {d.init_scale, d.growth_factor, d.backoff_factor, d.growth_interval,
                                0};
    if (!fsdpi_optim_is_nan(s.scale) && s.scale == 0) s.scale = 65536;
    if (!fsdpi_optim_is_nan(s.growth_factor) && s.growth_factor == 0) s.growth_factor = 2;
    if (!fsdpi_optim_is_nan(s.backoff_factor) && s.backoff_factor == 0) s.backoff_factor = 0.5;
    if (s.growth_interval == 0) s.growth_interval = 2000;
    int memory = FSDP_MEMORY_HOST;
    char text[96];
    void *room, *verdict = NULL;
    status = fsdpi_scaler_check(w, name, &s);
    if (!status) status = fsdp_update_place(model, name, &memory);
    snprintf(text, sizeof text, "%s: no memory", name);
    int64_t most = fsdp_num_params(model), head = (int64_t)(sizeof **scaler + 63) / 64 * 64;
    if (!status)
        status = fsdp_alloc(model, FSDP_MEMORY_HOST, head + most * (int64_t)sizeof(fsdp_update),
                            text, &room);
    if (status) return status;
    fsdp_grad_scaler *g = (fsdp_grad_scaler *)room;
    g->model = model;
    g->updates = (fsdp_update *)(void *)((char *)room + head);
    g->memory = memory;
    g->state = s;
    g->state.scale = (double)(float)s.scale;
    g->found = -1;
    g->extension.name = "grad_scaler";
    g->extension.user = g;
    g->extension.state = fsdpi_scaler_item;
    g->extension.destroy = fsdpi_scaler_free;
    if (memory == FSDP_MEMORY_DEVICE)
        status = fsdp_alloc(model, memory, FSDPI_VERDICT, text, &verdict);
    g->verdict = (int32_t *)verdict;
    if (!status) status = fsdp_attach(model, &g->extension);
    if (status) fsdpi_scaler_free(g);
    else *scaler = g;
    return status;
}

FSDP_API void fsdp_grad_scaler_destroy(fsdp_grad_scaler *scaler) {
    // unscale has waited for all records that use its memory
    if (scaler) (void)fsdp_detach(scaler->model, &scaler->extension);
}

FSDP_API double fsdp_grad_scaler_scale(const fsdp_grad_scaler *scaler) {
    return scaler ? scaler->state.scale : 1;
}

FSDP_API int fsdp_grad_scaler_found_inf(const fsdp_grad_scaler *scaler) {
    return scaler ? scaler->found : -1;
}

FSDP_API fsdp_status fsdp_grad_scaler_unscale(fsdp_grad_scaler *scaler) {
    static const char *const name = "grad_scaler_unscale";
    if (!scaler) return fsdpi_optim_null(name, "the scaler");
    fsdp_model *m = scaler->model;
    fsdp_world *w = fsdp_model_world(m);
    fsdp_status status = fsdp_call_begin(m, FSDP_CALL_CLIP, name);
    if (status) return status;
    if (scaler->found >= 0)
        return fsdp_fail(
            w, FSDP_ERR_INVALID_STATE,
            "[E946] %s: it was already called in this step: call fsdp_grad_scaler_update first",
            name);
    if (!scaler->verdict) status = fsdp_wait_stream(m, -1); // reductions write the gradients
    int32_t seen[2] = {0, 0};                               // not finite; any
    if (!status) {
        int num = fsdpi_scaler_list(scaler, scaler->verdict ? scaler->verdict : &seen[0], &seen[1]);
        status = fsdpi_optim_emit(m, scaler->memory, name, scaler->updates, num, NULL,
                                  NULL);
    }
    if (!status && scaler->verdict) status = fsdpi_scaler_verdict(scaler, &seen[0]);
    if (!status) status = fsdpi_scaler_meet(scaler, name, &seen[0], &seen[1]);
    if (status) return status;
    if (!seen[1])
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E948] %s: no parameter has a gradient: call this after "
                         "fsdp_finalize_backward and before fsdp_zero_grad",
                         name);
    scaler->found = seen[0];
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_grad_scaler_update(fsdp_grad_scaler *scaler) {
    static const char *const name = "grad_scaler_update";
    if (!scaler) return fsdpi_optim_null(name, "the scaler");
    fsdp_world *w = fsdp_model_world(scaler->model);
    fsdp_grad_scaler_state *s = &scaler->state;
    fsdp_status status = fsdp_world_status(w);
    if (status) return status;
    if (scaler->found < 0)
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E950] %s: nothing has unscaled the gradients of this step: call "
                         "fsdp_grad_scaler_unscale first",
                         name);
    if (scaler->found) {
        s->scale = fsdpi_rescaled(s->scale, s->backoff_factor);
        s->growth_tracker = 0;
    } else if (++s->growth_tracker == s->growth_interval) {
        s->scale = fsdpi_rescaled(s->scale, s->growth_factor);
        s->growth_tracker = 0;
    }
    scaler->found = -1;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_grad_scaler_get_state(const fsdp_grad_scaler *scaler,
                                                fsdp_grad_scaler_state *out) {
    if (!scaler || !out) return fsdpi_optim_null("grad_scaler_get_state", "the scaler or out");
    *out = scaler->state;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_grad_scaler_set_state(fsdp_grad_scaler *scaler,
                                                const fsdp_grad_scaler_state *state) {
    static const char *const name = "grad_scaler_set_state";
    if (!scaler || !state) return fsdpi_optim_null(name, "the scaler or state");
    fsdp_status status = fsdpi_scaler_check(fsdp_model_world(scaler->model), name, state);
    if (status) return status;
    scaler->state = *state;
    scaler->state.scale = (double)(float)state->scale;
    scaler->found = -1;
    return FSDP_OK;
}

#endif // FSDP_MATH_ONLY

#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif
#endif // FSDP_IMPLEMENTATION
