/* fsdp_optim.h - AdamW, SGD with momentum, a gradient scaler and an average of the weights, on
   shards: an extension of fsdp.h

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
     bits on any number of ranks, on any mesh, on host and device, and in a run that resumes from a
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
                                const fsdp_adamw_hyper *hypers);
FSDP_API fsdp_status fsdp_adamw_update_as(fsdp_dtype dtype, void *p, fsdp_dtype grad_dtype,
                                          const void *g, void *m, void *v, int64_t count,
                                          const fsdp_adamw_hyper *hypers);

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
                              const fsdp_sgd_hyper *hypers);
FSDP_API fsdp_status fsdp_sgd_update_as(fsdp_dtype dtype, void *p, fsdp_dtype grad_dtype,
                                        const void *g, void *b, int64_t count,
                                        const fsdp_sgd_hyper *hypers);

#ifndef FSDP_MATH_ONLY
/* -------------------------------------------------------------------------------------------- */
/* Optimizers of a model.                                                                         */

typedef struct fsdp_optim fsdp_optim; // AdamW, SGD or Muon (fsdp_muon.h)
typedef fsdp_optim fsdp_adamw, fsdp_sgd;

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
    uint64_t seed;             // seed of stochastic rounding; equal on all ranks
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
    uint64_t seed;               // seed of stochastic rounding; equal on all ranks
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

/* fsdp_adamw_create, fsdp_sgd_create - an optimizer of all trainable parameters of a model; commits
               the model
   desc        NULL: the defaults
   opt         the model owns it: it ends with fsdp_optim_destroy, the model or the world.
               NULL after a failure
   Result      FSDP_OK; INVALID_ARG (the text names the field, or the parameter whose group is
               wrong, or that Muon has; or desc does not come from its function of the defaults),
               UNSUPPORTED (the shards are in the memory of a device that cannot update them: set
               cpu_offload), OUT_OF_MEMORY, errors of commit
   Collective  as fsdp_model_commit      Allocates yes
   Source      torch: torch.optim.AdamW, torch.optim.SGD */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_adamw_create(fsdp_model *model,
                                                       const fsdp_adamw_desc *desc,
                                                       fsdp_adamw **opt);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_sgd_create(fsdp_model *model, const fsdp_sgd_desc *desc,
                                                     fsdp_sgd **opt);

/* fsdp_optim_step - update every parameter that has a gradient; ends with fsdp_params_changed. If
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
   Source      torch: AdamW.step, SGD.step */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_optim_step(fsdp_optim *opt, double lr);

/* fsdp_optim_set_group - change a group's lr_scale and weight_decay from the next step on, also
               while a plan replays. Parameters stay in their groups
   k           0 .. num_groups-1. An optimizer without groups has group 0
   group       begin with the groups[k] of the defaults or of the desc, and change fields.
               FSDP_OPTIM_SAME is the weight_decay of the desc
   Result      FSDP_OK; INVALID_ARG (NULL, k, a field, or group does not come from the defaults):
               nothing changes; if the world is aborted, its status
   Collective  no, but every rank has to do the same: if ranks give different groups, the next
               collective of a unit is a MISMATCH
   Note        a checkpoint has no groups: set them again after a load, as you give the lr again
   Source      torch: Optimizer.param_groups */
FSDP_API fsdp_status fsdp_optim_set_group(fsdp_optim *opt, int k, const fsdp_optim_group *group);

/* fsdp_optim_destroy - free an optimizer before its model ends; NULL is allowed
   Blocks      until the device has finished its updates */
FSDP_API void fsdp_optim_destroy(fsdp_optim *opt);

// The state of one parameter, in place: a checkpoint reads it, and writes it to resume. After a
// freeze or thaw of any parameter the pointers are stale. If the device updates the shards, first
// and second are in its memory: use them in the order of COMPUTE. step is always in host memory.
typedef struct fsdp_optim_state {
    fsdp_dtype dtype;     // dtype of first and second
    int32_t group;        // negative: the optimizer does not have it (frozen since creation, or
                          // left out by fsdp_optim_group_fn)
    int64_t numel;        // elements: fsdp_param_view.numel, in the same order, without padding
    void *first, *second; // AdamW: m, v. SGD, Muon: momentum buffer or NULL, and NULL
    int64_t *step;        // updates so far; NULL if group is negative
} fsdp_optim_state;

/* fsdp_optim_state_get - the state of the parameter with this ordinal
   Result      FSDP_OK; INVALID_ARG (NULL, no such ordinal); after a freeze or thaw the errors of
               create, too
   Collective  no; after a freeze or thaw as fsdp_model_commit
   Blocks      no; after a freeze or thaw until the device has finished its updates
   Allocates   no; after a freeze or thaw as create      Source torch: Optimizer.state */
FSDP_API fsdp_status fsdp_optim_state_get(fsdp_optim *opt, int ordinal, fsdp_optim_state *out);

/* fsdp_optim_nbytes - host and device memory of the optimizer in bytes; 0: NULL */
FSDP_API int64_t fsdp_optim_nbytes(const fsdp_optim *opt);

// The same functions with the name of the optimizer.
FSDP_MUST_CHECK static inline fsdp_status fsdp_adamw_step(fsdp_adamw *opt, double lr) {
    return fsdp_optim_step(opt, lr);
}
FSDP_MUST_CHECK static inline fsdp_status fsdp_sgd_step(fsdp_sgd *opt, double lr) {
    return fsdp_optim_step(opt, lr);
}
static inline fsdp_status fsdp_adamw_set_group(fsdp_adamw *opt, int k, const fsdp_optim_group *g) {
    return fsdp_optim_set_group(opt, k, g);
}
static inline fsdp_status fsdp_sgd_set_group(fsdp_sgd *opt, int k, const fsdp_optim_group *g) {
    return fsdp_optim_set_group(opt, k, g);
}
static inline fsdp_status fsdp_adamw_state(fsdp_adamw *opt, int ordinal, fsdp_optim_state *out) {
    return fsdp_optim_state_get(opt, ordinal, out);
}
static inline fsdp_status fsdp_sgd_state(fsdp_sgd *opt, int ordinal, fsdp_optim_state *out) {
    return fsdp_optim_state_get(opt, ordinal, out);
}
static inline int64_t fsdp_adamw_nbytes(const fsdp_adamw *opt) { return fsdp_optim_nbytes(opt); }
static inline int64_t fsdp_sgd_nbytes(const fsdp_sgd *opt) { return fsdp_optim_nbytes(opt); }
static inline void fsdp_adamw_destroy(fsdp_adamw *opt) { fsdp_optim_destroy(opt); }
static inline void fsdp_sgd_destroy(fsdp_sgd *opt) { fsdp_optim_destroy(opt); }

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

/* -------------------------------------------------------------------------------------------- */
/* Average of the weights. Each rank averages the rows that it owns, so nothing is communicated.
   Call fsdp_ema_update after each step of the optimizer. To evaluate, swap, evaluate, swap back:

       if (fsdp_ema_swap(ema)) break;      // the model has the average
       ...                                 // forward
       if (fsdp_ema_swap(ema)) break;      // and its weights again, to the bit

   ARITHMETIC  avg = avg + (w - avg)*(1 - decay), or if 1 - decay >= 0.5, w - (w - avg)*decay, with
               the bits of torch.lerp: the difference is rounded, then product and sum at once, to
               f32 (f64 parameters: f64). The average of a 16-bit parameter is in f32; while it is
               swapped in, the model has it rounded to nearest, and the weights' bits are kept.
   PARAMETERS  All that require a gradient when the average is made, and those that you thaw later:
               their averages begin with their weights at the thaw. A parameter that you freeze
               later stays in the average, as in torch. One that was never trainable has none: it
               would be equal to the weights. A swap leaves it.
   BEGIN ANEW  Averages begin with what fsdp_init_params or a load of a checkpoint gives parameters,
               if the load has no average for them. If updates are lost so, that is logged.
               fsdp_model_broadcast copies averages, too. fsdp_param_load, fsdp_model_cast,
               fsdp_model_reset and your own writes leave them as they are, as in torch.
   WHILE SWAPPED  forward, backward and fsdp_param_full see the average. A step of an optimizer,
               clipping, unscaling, fsdp_ema_update, a save, a load, fsdp_set_requires_grad and
               fsdp_model_cast are INVALID_STATE. A backward gives the gradients at the average:
               call fsdp_zero_grad before the training continues. Your hooks must not write shards.
   SEVERAL     averages of a model, each with a desc.name, are swapped one at a time.
   CHECKPOINTS  have the items `ema` and `ema_step`, or `ema.NAME` and `ema_step.NAME`, from which
               any number of ranks goes on to the bit. Create the average before the load.
   MEMORY      one number of f32 or f64 for each element of this rank's rows, and 2 bytes for each
               of a 16-bit parameter. */

typedef struct fsdp_ema fsdp_ema;

// Returns the decay of call number `step` of fsdp_ema_update, 1, 2, ...: 0 to 1, the same on all
// ranks. It is called if that call averages.
typedef double (*fsdp_ema_decay_fn)(void *user, int64_t step);

typedef struct fsdp_ema_desc {
    uint32_t size, start_canary;
    double decay;  // default 0.999; 0 <= decay <= 1
    int64_t every; // default 1, >= 1: of the calls of update each such one averages, others only
                   // count
    int64_t after; // default 0, >= 0: of the calls that average, those up to this one copy the
                   // weights
    fsdp_ema_decay_fn decay_at; // instead of decay; NULL: none
    void *user;                 // argument of decay_at
    const char *name; // copied: of one of several averages, 1 to 31 letters, digits, '_' and '-'.
                      // NULL: none
    int32_t cpu; // 1: the average of weights on a device is in pinned host memory, and the device
                 // updates it there
    uint32_t magic; // the function of the defaults sets it. Leave it as it is
    uint64_t end_canary;
} fsdp_ema_desc;

/* fsdp_ema_defaults - a desc with the defaults      Source torch: torch.optim.swa_utils */
FSDP_API fsdp_ema_desc fsdp_ema_defaults(void);

/* fsdp_ema_create - an average of the weights, which begins as a copy of them; commits the model
   desc        NULL: the defaults
   ema         the model owns it: it ends with fsdp_ema_destroy, the model or the world. NULL after
               a failure
   Result      as fsdp_adamw_create; INVALID_STATE if a unit is not idle
   Collective  as fsdp_model_commit      Allocates yes
   Source      torch: torch.optim.swa_utils.AveragedModel, get_ema_multi_avg_fn */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_ema_create(fsdp_model *model, const fsdp_ema_desc *desc,
                                                     fsdp_ema **ema);

/* fsdp_ema_update - average the current weights. Where the device updates, the call launches one
               kernel for each dtype of parameters, and does not wait
   Result      FSDP_OK; INVALID_ARG (NULL, or what decay_at returned), INVALID_STATE (swapped, or a
               unit is not idle); if the world is aborted, its status; errors of commit. In these
               cases nothing changes
   Collective  no, but every rank has to do the same: if ranks give other decays, or one of them
               leaves a call out, the next collective of a unit is a MISMATCH; after a freeze or
               thaw as fsdp_model_commit
   Blocks      as fsdp_adamw_step
   Allocates   no; the commit after a freeze or thaw does, and begins averages
   Source      torch: AveragedModel.update_parameters */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_ema_update(fsdp_ema *ema);

/* fsdp_ema_swap - average and weights change places; in the second call they change back
   Result      as fsdp_ema_update
   Collective, Blocks, Allocates  as fsdp_ema_update */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_ema_swap(fsdp_ema *ema);

/* fsdp_ema_nbytes - its host and device memory in bytes; 0: NULL */
FSDP_API int64_t fsdp_ema_nbytes(const fsdp_ema *ema);

/* fsdp_ema_destroy - free an average before its model ends; NULL is allowed. If it is swapped, the
               weights come back first. If they cannot, as units are not idle, that is logged
   Blocks      until the device has finished its updates */
FSDP_API void fsdp_ema_destroy(fsdp_ema *ema);

#endif // FSDP_MATH_ONLY
#ifdef __cplusplus
}
#endif
#endif // FSDP_OPTIM_H

/* ============================================================================================ */
/* Implementation: the parts that no other part includes, and the loops. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_OPTIM_IMPLEMENTED)
#define FSDP_OPTIM_IMPLEMENTED

#include <math.h>   // pow, sqrt, sqrtf, HUGE_VAL
#include <stdio.h>  // snprintf
#include <string.h> // memcpy, memset

// Arithmetic of the parts is precise with any compiler flags, and comparisons know infinity.
FSDP_PRECISE_BEGIN("O3")
#include "src/optim/kernels.h"
#ifndef FSDP_MATH_ONLY
#include "src/optim/adamw_sgd.h"
#include "src/optim/ema.h"
#include "src/optim/scaler.h"
#endif
FSDP_PRECISE_END
#endif // FSDP_IMPLEMENTATION
