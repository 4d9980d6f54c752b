/* core/grad_path.h - the steps of a reduction, and the function that chooses them

   The functions here are pure: they compute a gradient path, a list of steps, from the facts of a
   unit. Only they decide which steps a reduction takes; fsdpi_do_reduce decides whether a unit is
   reduced. template.h makes ops of steps; a step without work has none.
   Callers: unit.h, grads.h and report.h (fsdpi_grad_path_of).
   Source: torch: FSDPParamGroup.post_backward, foreach_reduce.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_GRAD_PATH_H
#define FSDPI_CORE_GRAD_PATH_H

#include <math.h>

/* The options of a unit that decide its gradient path: type, name, value in a new unit. They are
   fields of fsdpi_facts and of fsdpi_options. */
#define FSDPI_GRAD_PATH_OPTIONS(X)                                                                 \
    X(uint8_t, sync, 1)                                                                            \
    X(uint8_t, all_reduce, 1)                                                                      \
    X(double, divide_factor, 0) /* 0: the number of ranks */

// The facts of a unit that decide its gradient path.
typedef struct fsdpi_facts {
    int32_t shards, replicas; // W, R: ranks that shard, ranks that replicate
    // From the unit's layout. The dtypes are those of its first dtype group with trainables.
    uint8_t one_part;    // 1: the unit has one dtype group
    uint8_t one_train;   // 1: at most one dtype group has trainables
    uint8_t extended;    // 1: the first dtype group has a gather extension
    fsdp_dtype stored;   // dtype of the shard
    fsdp_dtype gathered; // dtype of the full parameter, and of the gradient that the caller writes
    fsdp_dtype grad;     // dtype of the shard gradient
    fsdp_dtype reduce;   // dtype of the reduction
    // From the model and its world.
    uint8_t offload; // 1: shards and shard gradients lie in pinned host memory
    uint8_t fuses;   // 1: the backend's reduce_scatter casts, scales and adds
    uint8_t debug;   // 1: released slots become NaN, or are poisoned
    // From the options. divide_factor is the effective divisor, never 0.
    uint8_t hook;              // 1: an all-reduce hook is set
    uint8_t custom_all_reduce; // 1: a function of the user all-reduces; it may not scale
#define FSDP_X(type, name, initial) type name;
    FSDPI_GRAD_PATH_OPTIONS(FSDP_X)
#undef FSDP_X
} fsdpi_facts;

enum {                   // the memory that an all-gather reads
    FSDPI_GATHER_ALIAS,  // no all-gather: the full parameters are the shards
    FSDPI_GATHER_SHARDS, // peers read the shards
    FSDPI_GATHER_STAGED  // peers read this rank's chunk of the slot, which COPY_IN fills
};

/* The kinds of steps. A step is one op, or one op for each dtype group of the unit. Columns: name,
   op, label, stream (COUNT: ALLREDUCE with replicas, otherwise REDUCE), group, blocks or segments,
   function, and the text in fsdp_model_describe. */
#define FSDPI_STEP_LIST(X)                                                                         \
    X(COPY_IN, COPY, COPY_IN, GATHER, NO_GROUP, PART(copy_in), fsdpi_call_pre_gather, "cast")      \
    X(GATHER, ALL_GATHER, GATHER, GATHER, SHARDS, UNIT(all_gather), NULL, "all_gather")            \
    X(COPY_OUT, COPY, COPY_OUT, GATHER, NO_GROUP, PART(copy_out), fsdpi_call_post_gather,          \
      "copy out")                                                                                  \
    X(SLICE, COPY, SLICE, COMPUTE, NO_GROUP, UNIT(slice_copy), NULL, "keep a slice")               \
    X(SLICE_GATHER, ALL_GATHER, GATHER, GATHER, SLICES, UNIT(slice_gather), NULL,                  \
      "all_gather of slices")                                                                      \
    X(WAIT, WAIT, GATHER, COMPUTE, NO_GROUP, NO_WORK, NULL, "wait")                                \
    X(ZERO_GRAD, ZERO, GRADS, COMPUTE, NO_GROUP, UNIT(whole_grad), NULL, "zero")                   \
    X(ZERO_IN, ZERO, ACC, REDUCE, NO_GROUP, UNIT(padded_in), NULL, "zero the padding")             \
    X(TO_IN, COPY, ACC, REDUCE, NO_GROUP, PART(to_in), NULL, "add up in the reduce input")         \
    X(FOLD, COPY, ACC, REDUCE, NO_GROUP, PART(chunk_cat), NULL, "chunk_cat in the slot")           \
    X(DIVIDE, COPY, ACC, REDUCE, NO_GROUP, PART(divide), NULL, "chunk_cat and divide in the slot") \
    X(SCATTER, REDUCE_SCATTER, REDUCE, REDUCE, SUMS, UNIT(reduce_scatter), NULL,                   \
      "reduce_scatter to the shard gradient")                                                      \
    X(RESCALE, COPY, RED_OUT, REDUCE, NO_GROUP, PART(rescale), NULL, "divide the shard gradient")  \
    X(TO_OUT, REDUCE_SCATTER, REDUCE, REDUCE, SUMS, UNIT(to_out), NULL,                            \
      "reduce_scatter to the sums of the shard group")                                             \
    X(ADD, COPY, PARTIAL, REDUCE, NO_GROUP, UNIT(whole_out), NULL, "add to the sums that wait")    \
    X(REPLICAS, ALL_REDUCE, REPLICAS, ALLREDUCE, REPLICAS, UNIT(whole_out), NULL,                  \
      "all_reduce over the replicas")                                                              \
    X(HOOK, CALL, ALL_REDUCE_HOOK, COUNT, NO_GROUP, NO_WORK, fsdpi_call_all_reduce_hook,           \
      "all_reduce_hook")                                                                           \
    X(TO_SHARD, COPY, RED_OUT, COUNT, NO_GROUP, PART(to_shard), NULL,                              \
      "divide, cast and add to the shard gradient")

enum { // from ZERO_GRAD on: steps of gradients
#define FSDP_X(name, op, label, stream, group, work, call, text) FSDPI_STEP_##name,
    FSDPI_STEP_LIST(FSDP_X)
#undef FSDP_X
        FSDPI_STEP_COUNT
};

enum { // the places of a unit: FSDP_POOL_SHARD .. FSDP_POOL_REDUCE_OUT, and
    FSDPI_FRESH = FSDP_POOL_REDUCE_OUT + 1, // a second REDUCE_OUT during a call: new sums, which
                                            // ADD adds to those in REDUCE_OUT
    FSDPI_PLACES,
    FSDPI_NOWHERE = FSDPI_PLACES
};

enum {                  // fsdpi_step.how
    FSDPI_ADDS = 1,     // it adds to the content of `to`
    FSDPI_ACQUIRES = 2, // it acquires the slot `to`
    FSDPI_RELEASES = 4, // it releases the slot `from`
    FSDPI_DIVIDES = 8   // it divides by the gradient divide factor
};

typedef struct fsdpi_step {
    uint8_t kind, from, to, how; // FSDPI_STEP_*; places; a set of FSDPI_ADDS, ...
    double scale;                // factor for the input
} fsdpi_step;

/* The gradients that a unit holds: unreduced ones of microbatches in a slot, reduced ones in the
   shard gradient. All other state of a reduction follows from this set.

     pre_backward           post_backward
          |
          v
        GRAD  ---- TO_IN, if it is cast or of several dtype groups ------>  REDUCE_IN
        kept without sync                                                   kept without sync
          |                                                                     |
          +--------------------------------+------------------------------------+
                                           |
              one rank: TO_SHARD           |  replicas: TO_OUT, ADD; on one shard it stays there
              shards only: SCATTER         v
          +----------------------------  REDUCE_OUT   kept without all_reduce
          v                                |
     SHARD_GRAD  <------ TO_SHARD  <------ REPLICAS, HOOK

   After its backward a unit holds at most one of GRAD and REDUCE_IN. It holds REDUCE_OUT only if
   W > 1 and R > 1. fsdpi_unit_check (grads.h) asserts these and further invariants. */
enum {
    FSDPI_HELD_GRAD = 1,
    FSDPI_HELD_IN = 2,
    FSDPI_HELD_OUT = 4,
    FSDPI_HELD_SHARD = 8, // the shard gradient holds a reduced gradient
    FSDPI_HELD_SLOTS = FSDPI_HELD_GRAD | FSDPI_HELD_IN | FSDPI_HELD_OUT
};

enum { FSDPI_GRAD_PATH_STEPS = 7 }; // the longest: REDUCE_OUT held, no fusing backend, a hook

// The steps that a unit takes with its gradients at the end of a backward.
typedef struct fsdpi_grad_path {
    uint8_t num, held; // held: FSDPI_HELD_* before the first step
    uint8_t done;      // 1: after the last step all gradients are in the shard gradient
    fsdpi_step steps[FSDPI_GRAD_PATH_STEPS];
} fsdpi_grad_path;

// Returns 1 if the unit has one dtype group, which is stored as it is gathered, in memory that
// peers can read.
static int fsdpi_facts_plain(const fsdpi_facts *f) {
    return f->one_part && f->stored == f->gathered && !f->extended && !f->offload;
}

static int fsdpi_facts_gather(const fsdpi_facts *f) {
    int copies = f->debug && f->shards == 1; // stale pointers find NaN or poison
    return !fsdpi_facts_plain(f) || copies ? FSDPI_GATHER_STAGED
           : f->shards > 1                 ? FSDPI_GATHER_SHARDS
                                           : FSDPI_GATHER_ALIAS;
}

/* Returns 1 if TO_IN must copy gradients to REDUCE_IN before they are reduced: they are in several
   dtype groups, or their dtype is not that of the reduction. Gradients of 16 bits that are reduced
   in f32 need no copy if the next step widens its input: a fused reduce_scatter does, and TO_SHARD
   on one rank, unless an all-reduce hook gets the reduce input. */
static int fsdpi_facts_copy_first(const fsdpi_facts *f, int hook) {
    int widens = f->reduce == FSDP_F32 && fsdp_dtype_size(f->gathered) == 2;
    int reads = f->shards > 1 ? f->fuses : f->replicas == 1 && !hook;
    return !f->one_train || (f->gathered != f->reduce && !(widens && reads));
}

// Returns 1 if the caller can write the shard gradient itself: one rank, no unreduced gradients, no
// cast, no division and no hook.
static int fsdpi_facts_write_shard(const fsdpi_facts *f, int held) {
    return f->shards * f->replicas == 1 && !(held & FSDPI_HELD_SLOTS) && fsdpi_facts_plain(f) &&
           f->reduce == f->stored && f->grad == f->stored && f->sync && f->divide_factor == 1 &&
           !f->hook;
}

enum { FSDPI_AT_THE_END = FSDPI_STEP_COUNT };

/* The division in a reduction: once, in the last step, except for sums in f16 of several ranks,
   which must stay in range. These are divided in stages:
     - If the backend's reduce_scatter cannot scale, or a function of the user all-reduces: `before`
       divides the input, and the last step divides by the rest of the factor.
     - Otherwise the backend sums in f32 and divides when it stores: with replicas, TO_OUT divides
       by `sums` and REPLICAS by the rest; without replicas, TO_OUT divides by the factor.
   `before` and `sums` are powers of two. They do not depend on the factor, which may change while a
   unit holds unreduced gradients. They follow from ranks, dtypes, the backend and
   custom_all_reduce, which fsdp_set_custom_all_reduce refuses to change in that time.
   Source: torch: _get_gradient_divide_factors. */
typedef struct fsdpi_scales {
    double before, sums;
    int divides; // step that divides by the rest: TO_OUT, REPLICAS, or FSDPI_AT_THE_END
} fsdpi_scales;

static fsdpi_scales fsdpi_facts_scales(const fsdpi_facts *f) {
    fsdpi_scales s = {1, 1, FSDPI_AT_THE_END};
    int ranks = f->shards * f->replicas;
    if (f->reduce != FSDP_F16 || ranks == 1) return s;
    if (!f->fuses || f->custom_all_reduce) {
        while (fmod(ranks, s.before) == 0 && ranks / s.before > s.before) s.before *= 2;
        return s;
    }
    while (f->replicas > 1 && s.sums < f->shards) s.sums *= 2;
    s.divides = f->replicas > 1 ? FSDPI_STEP_REPLICAS : FSDPI_STEP_TO_OUT;
    return s;
}

static void fsdpi_grad_path_add(fsdpi_grad_path *r, int kind, int from, int to, int how,
                                double scale) {
    fsdpi_step step = {(uint8_t)kind, (uint8_t)from, (uint8_t)to, (uint8_t)how, scale};
    r->steps[r->num++] = step;
}

// Adds the steps that sum this rank's old and new gradients in one slot. Returns the slot's place,
// or FSDPI_NOWHERE if there are none.
static int fsdpi_grad_path_local(const fsdpi_facts *f, double before, int reduces,
                                 fsdpi_grad_path *r) {
    int adds = r->held & FSDPI_HELD_IN ? FSDPI_ADDS : 0;
    if (!(r->held & FSDPI_HELD_GRAD)) return adds ? (int)FSDP_POOL_REDUCE_IN : FSDPI_NOWHERE;
    if (!adds && !fsdpi_facts_copy_first(f, f->hook) && (reduces || f->gathered == f->reduce))
        return FSDP_POOL_GRAD;
    if (!adds)
        fsdpi_grad_path_add(r, FSDPI_STEP_ZERO_IN, FSDPI_NOWHERE, FSDP_POOL_REDUCE_IN,
                            FSDPI_ACQUIRES, 1);
    fsdpi_grad_path_add(r, FSDPI_STEP_TO_IN, FSDP_POOL_GRAD, FSDP_POOL_REDUCE_IN,
                        adds | FSDPI_RELEASES, 1 / before);
    return FSDP_POOL_REDUCE_IN;
}

/* Adds the steps that reduce-scatter over the shard group, of W > 1 ranks. Returns the place of the
   sums. A fused backend sums in f32 or f64. In a narrower reduce dtype the sums must be rounded
   first, as PyTorch does: then nothing is fused. */
static int fsdpi_grad_path_scatter(const fsdpi_facts *f, const fsdpi_scales *s, int from,
                                   fsdpi_grad_path *r) {
    const int fused = f->fuses && (f->reduce == FSDP_F32 || f->reduce == FSDP_F64);
    const int is_last = f->replicas == 1 && f->one_train && !f->hook && !f->offload;
    const int adds = r->held & FSDPI_HELD_SHARD ? FSDPI_ADDS : 0, waits = r->held & FSDPI_HELD_OUT;
    if (is_last && fused) {
        fsdpi_grad_path_add(r, FSDPI_STEP_SCATTER, from, FSDP_POOL_SHARD_GRAD,
                            adds | FSDPI_RELEASES | FSDPI_DIVIDES, s->before);
        return FSDP_POOL_SHARD_GRAD;
    }
    if (is_last && !f->fuses && f->reduce == f->grad && !adds) {
        fsdpi_grad_path_add(r, FSDPI_STEP_SCATTER, from, FSDP_POOL_SHARD_GRAD, FSDPI_RELEASES, 1);
        fsdpi_grad_path_add(r, FSDPI_STEP_RESCALE, FSDP_POOL_SHARD_GRAD, FSDP_POOL_SHARD_GRAD,
                            FSDPI_DIVIDES, s->before);
        return FSDP_POOL_SHARD_GRAD;
    }
    int divides = s->divides == FSDPI_STEP_TO_OUT ? FSDPI_DIVIDES : 0;
    int to = FSDP_POOL_REDUCE_OUT;
    if (waits && !fused) to = FSDPI_FRESH; // ADD adds them to REDUCE_OUT
    int how = waits && fused ? FSDPI_ADDS : FSDPI_ACQUIRES;
    fsdpi_grad_path_add(r, FSDPI_STEP_TO_OUT, from, to, how | FSDPI_RELEASES | divides,
                        1 / s->sums);
    if (to == FSDPI_FRESH)
        fsdpi_grad_path_add(r, FSDPI_STEP_ADD, to, FSDP_POOL_REDUCE_OUT,
                            FSDPI_ADDS | FSDPI_RELEASES, 1);
    return FSDP_POOL_REDUCE_OUT;
}

// Returns the gradient path of a unit with these facts that holds `held`, a set of FSDPI_HELD_*.
static fsdpi_grad_path fsdpi_grad_path_of(const fsdpi_facts *f, int held) {
    const fsdpi_scales s = fsdpi_facts_scales(f);
    const int reduces = f->sync && (f->all_reduce || f->shards > 1 || f->replicas == 1);
    fsdpi_grad_path r = FSDP_ZERO;
    r.held = (uint8_t)held;
    int at = fsdpi_grad_path_local(f, s.before, reduces, &r);
    if (!reduces) return r;
    if (at == FSDP_POOL_GRAD)
        fsdpi_grad_path_add(&r, s.before == 1 ? FSDPI_STEP_FOLD : FSDPI_STEP_DIVIDE, at, at, 0,
                            1 / s.before);
    if (f->shards > 1 && at != FSDPI_NOWHERE) at = fsdpi_grad_path_scatter(f, &s, at, &r);
    if (f->replicas > 1 && !f->all_reduce) return r; // the sums stay for a later all-reduce
    r.done = 1;
    if (at == FSDPI_NOWHERE && held & FSDPI_HELD_OUT) at = FSDP_POOL_REDUCE_OUT;
    if (at == FSDPI_NOWHERE || at == FSDP_POOL_SHARD_GRAD) return r; // NOWHERE: the caller wrote it
    if (f->replicas > 1)
        fsdpi_grad_path_add(&r, FSDPI_STEP_REPLICAS, at, at,
                            s.divides == FSDPI_STEP_REPLICAS ? FSDPI_DIVIDES : 0, s.sums);
    if (f->hook) fsdpi_grad_path_add(&r, FSDPI_STEP_HOOK, at, at, 0, 1);
    fsdpi_grad_path_add(&r, FSDPI_STEP_TO_SHARD, at, FSDP_POOL_SHARD_GRAD,
                        FSDPI_RELEASES | (held & FSDPI_HELD_SHARD ? FSDPI_ADDS : 0) |
                            (s.divides == FSDPI_AT_THE_END ? FSDPI_DIVIDES : 0),
                        s.before);
    return r;
}

#endif // FSDPI_CORE_GRAD_PATH_H
