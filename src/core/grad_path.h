/* core/grad_path.h - the steps of a reduction, and the function that chooses them

   The functions here are pure: they know no unit and no memory. Facts go in, steps come out. Which
   steps a reduction takes is decided here alone; whether a unit is reduced at all, by
   fsdpi_do_reduce. template.h makes records of steps; a step without work has none.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_GRAD_PATH_H
#define FSDPI_CORE_GRAD_PATH_H

#include <math.h>
#include <string.h>

/* The options of a unit that decide its route: type, name, value in a new unit. They are facts, and
   fields of fsdpi_options. */
#define FSDPI_GRAD_PATH_OPTIONS(X)                                                                 \
    X(uint8_t, sync, 1)                                                                            \
    X(uint8_t, all_reduce, 1)                                                                      \
    X(double, divide_factor, 0) /* 0: the number of ranks */

// What a route is decided by.
typedef struct fsdpi_facts {
    int32_t shards, replicas; // W, R: ranks that shard, ranks that replicate
    // Of the unit's layout. The dtypes are those of its first part with trainables.
    uint8_t one_part;    // all parameters are stored in one dtype and gathered in one dtype
    uint8_t one_train;   // all trainable ones are
    uint8_t extended;    // a parameter is gathered by functions of the user
    fsdp_dtype stored;   // of the shard
    fsdp_dtype gathered; // of the full parameter, and of the gradient that the caller writes
    fsdp_dtype grad;     // of the shard gradient
    fsdp_dtype reduce;   // of the reduction
    // Of the model and its world.
    uint8_t offload; // shards and their gradients lie in pinned host memory
    uint8_t fuses;   // the backend's reduce_scatter casts, scales and adds
    uint8_t debug;   // what is given back becomes NaN, or is poisoned
    // Options. divide_factor is the number that divides, never 0.
    uint8_t hook;              // an all-reduce hook is set
    uint8_t custom_all_reduce; // a function of the user all-reduces; it may not scale
#define FSDP_X(type, name, initial) type name;
    FSDPI_GRAD_PATH_OPTIONS(FSDP_X)
#undef FSDP_X
} fsdpi_facts;

enum {                   // where a gather reads
    FSDPI_GATHER_ALIAS,  // nothing is gathered: the full parameters are the shards
    FSDPI_GATHER_SHARDS, // peers read the shards
    FSDPI_GATHER_STAGED  // peers read this rank's part of the slot, which is filled before
};

/* The kinds of steps. A step is one record, or one record for each part of the unit: name, op,
   label, stream (COUNT: that of the last copy), group, blocks or segments, function, and the words
   of fsdp_model_describe. */
#define FSDPI_STEP_LIST(X)                                                                         \
    X(COPY_IN, COPY, COPY_IN, GATHER, NO_GROUP, PART(copy_in), fsdpi_call_pre_gather, "cast")      \
    X(GATHER, ALL_GATHER, GATHER, GATHER, SHARDS, UNIT(all_gather), NULL, "all_gather")            \
    X(COPY_OUT, COPY, COPY_OUT, GATHER, NO_GROUP, PART(copy_out), fsdpi_call_post_gather,          \
      "copy out")                                                                                  \
    X(SLICE, COPY, SLICE, COMPUTE, NO_GROUP, UNIT(slice_copy), NULL, "keep a slice")               \
    X(SLICE_GATHER, ALL_GATHER, GATHER, GATHER, SLICES, UNIT(slice_gather), NULL,                  \
      "all_gather of slices")                                                                      \
    X(WAIT, USE, GATHER, COMPUTE, NO_GROUP, NO_WORK, NULL, "wait")                                 \
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

enum { // those from ZERO_GRAD on are of gradients
#define FSDP_X(name, op, label, stream, group, work, call, text) FSDPI_STEP_##name,
    FSDPI_STEP_LIST(FSDP_X)
#undef FSDP_X
        FSDPI_STEP_COUNT
};

enum { // the places of a unit: FSDP_POOL_SHARD .. FSDP_POOL_REDUCE_OUT, and
    FSDPI_FRESH = FSDP_POOL_REDUCE_OUT + 1, // a second REDUCE_OUT within a call: sums that are
                                            // added to those that wait
    FSDPI_PLACES,
    FSDPI_NOWHERE = FSDPI_PLACES
};

enum {                  // how a step works
    FSDPI_ADDS = 1,     // it adds to what is in `to`
    FSDPI_ACQUIRES = 2, // it acquires the slot `to`
    FSDPI_RELEASES = 4, // it releases the slot `from`
    FSDPI_DIVIDES = 8   // it divides by the gradient divide factor
};

typedef struct fsdpi_step {
    uint8_t kind, from, to, how; // FSDPI_STEP_*; places; a set of FSDPI_ADDS, ...
    double scale;                // what it reads is multiplied by this
} fsdpi_step;

/* Where gradients of a unit are: of microbatches that are not reduced yet, in a slot; reduced ones,
   in the shard gradient. All other state of a reduction follows from this set.

     pre_backward           post_backward
          |
          v
        GRAD  ---- TO_IN, if it is cast, divided or of several parts ---->  REDUCE_IN
        kept without sync                                                   kept without sync
          |                                                                     |
          +--------------------------------+------------------------------------+
                                           |
              one rank: TO_SHARD           |  replicas: TO_OUT, ADD; on one shard it stays there
              shards alone: SCATTER        v
          +----------------------------  REDUCE_OUT   kept without all_reduce
          v                                |
     SHARD_GRAD  <------ TO_SHARD  <------ REPLICAS, HOOK

   After a unit's backward GRAD and REDUCE_IN are never held both. REDUCE_OUT is held only if W > 1
   and R > 1. fsdpi_unit_check (grads.h) asserts what else holds. */
enum {
    FSDPI_HELD_GRAD = 1,
    FSDPI_HELD_IN = 2,
    FSDPI_HELD_OUT = 4,
    FSDPI_HELD_SHARD = 8, // the shard gradient has a reduced gradient
    FSDPI_HELD_SLOTS = FSDPI_HELD_GRAD | FSDPI_HELD_IN | FSDPI_HELD_OUT
};

enum { FSDPI_GRAD_PATH_STEPS = 7 }; // the longest: sums wait, a backend that does not fuse, a hook

// What is done with the gradients at the end of a backward.
typedef struct fsdpi_grad_path {
    uint8_t num, held; // held: before the first step
    uint8_t done;      // after the last step the shard gradient has everything
    fsdpi_step steps[FSDPI_GRAD_PATH_STEPS];
} fsdpi_grad_path;

// One part that is stored as it is gathered, in memory that peers can read.
static int fsdpi_facts_plain(const fsdpi_facts *f) {
    return f->one_part && f->stored == f->gathered && !f->extended && !f->offload;
}

static int fsdpi_facts_gather(const fsdpi_facts *f) {
    int copies = f->debug && f->shards == 1; // on one rank, too, a kept pointer finds NaN or poison
    return !fsdpi_facts_plain(f) || copies ? FSDPI_GATHER_STAGED
           : f->shards > 1                 ? FSDPI_GATHER_SHARDS
                                           : FSDPI_GATHER_ALIAS;
}

/* Does TO_IN have to copy gradients to REDUCE_IN before they are reduced? Yes, if they are in
   several parts, or in another dtype than that of the reduction. Gradients of 16 bits that are
   reduced in f32 need no copy if the next step widens what it reads: a fused reduce_scatter does,
   and so does TO_SHARD of a single rank, unless an all-reduce hook is shown the reduce input. */
static int fsdpi_facts_copy_first(const fsdpi_facts *f, int hook) {
    int widens = f->reduce == FSDP_F32 && fsdp_dtype_size(f->gathered) == 2;
    int reads = f->shards > 1 ? f->fuses : f->replicas == 1 && !hook;
    return !f->one_train || (f->gathered != f->reduce && !(widens && reads));
}

// Can gradients be written where they end? One rank, nothing that waits, to convert or to show.
static int fsdpi_facts_write_shard(const fsdpi_facts *f, int held) {
    return f->shards * f->replicas == 1 && !(held & FSDPI_HELD_SLOTS) && fsdpi_facts_plain(f) &&
           f->reduce == f->stored && f->grad == f->stored && f->sync && f->divide_factor == 1 &&
           !f->hook;
}

enum { FSDPI_AT_THE_END = FSDPI_STEP_COUNT };

/* How a reduction divides: all at once in its last step, except for sums in f16 of several ranks,
   which have to stay in range. These are divided in stages:
     - If the backend's reduce_scatter cannot scale, or a function of the user all-reduces: what
       goes in by `before`, and in the last step by the rest of the factor.
     - Else the backend sums in f32 and divides what it stores: with replicas the shard group's sums
       by `sums`, and in REPLICAS by the rest; without replicas TO_OUT divides by the factor.
   `before` and `sums` are powers of two. They do not depend on the factor, which may change while
   gradients wait. They follow from ranks, dtypes, the backend and custom_all_reduce, which may not
   change meanwhile (fsdp_set_custom_all_reduce).
   Source: torch: _get_gradient_divide_factors. */
typedef struct fsdpi_scales {
    double before, sums;
    int divides; // by the rest: FSDPI_STEP_TO_OUT, FSDPI_STEP_REPLICAS, or FSDPI_AT_THE_END
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

// Brings this rank's gradients, old and new, into one slot. Returns which.
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

/* The sums of the shard group, over W > 1 ranks. Returns where they are then. A fused backend sums
   in f32 or f64. A narrower reduce dtype has to be rounded to, as PyTorch does, so that nothing can
   be fused with it. */
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
    if (waits && !fused) to = FSDPI_FRESH; // a copy adds them
    int how = waits && fused ? FSDPI_ADDS : FSDPI_ACQUIRES;
    fsdpi_grad_path_add(r, FSDPI_STEP_TO_OUT, from, to, how | FSDPI_RELEASES | divides,
                        1 / s->sums);
    if (to == FSDPI_FRESH)
        fsdpi_grad_path_add(r, FSDPI_STEP_ADD, to, FSDP_POOL_REDUCE_OUT,
                            FSDPI_ADDS | FSDPI_RELEASES, 1);
    return FSDP_POOL_REDUCE_OUT;
}

// The steps for these facts, where `held` is what the unit holds.
static fsdpi_grad_path fsdpi_grad_path_of(const fsdpi_facts *f, int held) {
    const fsdpi_scales s = fsdpi_facts_scales(f);
    const int reduces = f->sync && (f->all_reduce || f->shards > 1 || f->replicas == 1);
    fsdpi_grad_path r;
    memset(&r, 0, sizeof r);
    r.held = (uint8_t)held;
    int at = fsdpi_grad_path_local(f, s.before, reduces, &r);
    if (!reduces) return r;
    if (at == FSDP_POOL_GRAD)
        fsdpi_grad_path_add(&r, s.before == 1 ? FSDPI_STEP_FOLD : FSDPI_STEP_DIVIDE, at, at, 0,
                            1 / s.before);
    if (f->shards > 1 && at != FSDPI_NOWHERE) at = fsdpi_grad_path_scatter(f, &s, at, &r);
    if (f->replicas > 1 && !f->all_reduce) return r; // the sums wait for a later all-reduce
    r.done = 1;
    if (at == FSDPI_NOWHERE && held & FSDPI_HELD_OUT) at = FSDP_POOL_REDUCE_OUT;
    if (at == FSDPI_NOWHERE || at == FSDP_POOL_SHARD_GRAD) return r; // NOWHERE: written there
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
