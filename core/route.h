/* core/route.h - how a unit gathers and how it reduces: decided once, by one pure function

   It knows no unit and no memory: facts in, a route out. fsdpi_unit_route fills in the facts;
   everybody else follows the route and asks no fact again.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_CORE_ROUTE_H
#define FSDPI_CORE_ROUTE_H

#include <math.h>
#include <string.h>

/* The options of a unit that decide its route: type, name, value in a new unit. They are facts, and
   fields of fsdpi_options. */
#define FSDPI_ROUTE_OPTIONS(X)                                                                     \
    X(uint8_t, sync, 1)                                                                            \
    X(uint8_t, all_reduce, 1)                                                                      \
    X(double, divide_factor, 0) /* 0: the number of ranks */

// What a route is decided by.
typedef struct fsdpi_facts {
    int32_t shards, replicas; // W, R: ranks that shard, ranks that replicate
    // Of the unit's layout. The dtypes are those of the part whose gradients the flags travel with.
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
    // Options.
    uint8_t hook, custom; // an all-reduce hook is set; the caller all-reduces over replicas itself
#define FSDP_X(type, name, initial) type name;
    FSDPI_ROUTE_OPTIONS(FSDP_X)
#undef FSDP_X
} fsdpi_facts;

enum {                   // where a gather reads
    FSDPI_GATHER_ALIAS,  // nothing is gathered: the full parameters are the shards
    FSDPI_GATHER_SHARDS, // peers read the shards
    FSDPI_GATHER_STAGED  // peers read this rank's part of the slot, which is filled before
};

// What happens to gradients behind post_backward, in the words of fsdp_model_describe.
#define FSDPI_STEP_LIST(X)                                                                         \
    X(END, "")                                                                                     \
    X(WROTE, "written")                                                                            \
    X(KEEP, "keep in the slot")                                                                    \
    X(SUM, "add up in the reduce input")                                                           \
    X(FOLD, "chunk_cat in the slot")                                                               \
    X(USERS, "flags of use")                                                                       \
    X(SCATTER_FUSED, "reduce_scatter that casts, divides and adds to the shard gradient")          \
    X(SCATTER, "reduce_scatter into the shard gradient")                                           \
    X(RESCALE, "divide the shard gradient")                                                        \
    X(PARTIAL_FUSED, "reduce_scatter that adds to the sums of the shard group")                    \
    X(PARTIAL, "reduce_scatter to the sums of the shard group")                                    \
    X(REPLICAS, "all_reduce over the replicas")                                                    \
    X(HOOK, "all_reduce_hook")                                                                     \
    X(OUT, "divide, cast and add to the shard gradient")                                           \
    X(DONE, "done")

enum {
#define FSDP_X(name, text) FSDPI_STEP_##name,
    FSDPI_STEP_LIST(FSDP_X)
#undef FSDP_X
        FSDPI_STEP_COUNT
};

enum { FSDPI_COLLECT_STEPS = 3, FSDPI_REDUCE_STEPS = 8 }; // with their END

typedef struct fsdpi_route {
    uint8_t gather;      // FSDPI_GATHER_*
    uint8_t write_shard; // the caller writes the shard gradient itself, which needs no reduction
    uint8_t from_input;  // one shard: what is reduced further is the reduce input itself
    uint8_t grads_ahead; // gradients are read by a reduction while the next unit's are written
    uint8_t collect[FSDPI_COLLECT_STEPS]; // what was written is brought together on this rank
    uint8_t reduce[FSDPI_REDUCE_STEPS];   // and reduced; none: no reduction is due
    // A reduction divides by `factor` in all: what goes in by `before`, and sums of the shard
    // group, as the backend stores them, by `sums`, both powers of two; in step `divides` by the
    // rest (OUT: in the last one, which may be SCATTER_FUSED or RESCALE).
    double before, sums, factor;
    uint8_t divides; // FSDPI_STEP_*
} fsdpi_route;

// One part that is stored as it is gathered, in memory that peers can read.
static int fsdpi_facts_plain(const fsdpi_facts *f) {
    return f->one_part && f->stored == f->gathered && !f->extended && !f->offload;
}

/* Must gradients be brought to the reduce dtype before the reduction? Not if it can read narrower
   ones: as a fused reduction does, or the last copy of a single rank where no hook looks on. */
static int fsdpi_facts_convert(const fsdpi_facts *f, int hook) {
    if (!f->one_train) return 1;
    if (f->gathered == f->reduce) return 0;
    int widens = f->reduce == FSDP_F32 && fsdp_dtype_size(f->gathered) == 2;
    int reads = f->shards > 1 ? f->fuses : f->replicas == 1 && !hook;
    return !(widens && reads);
}

/* An f16 sum has to stay in range. A fused backend sums in f32, and divides what it stores: sums
   that go on to the replicas by a power of two, which loses nothing. For another backend a power of
   two divides what goes in. Source: torch: _get_gradient_divide_factors. */
static void fsdpi_facts_divide(const fsdpi_facts *f, fsdpi_route *r) {
    int ranks = f->shards * f->replicas, narrow = f->reduce == FSDP_F16 && ranks > 1;
    int stores = narrow && f->fuses && !f->custom, goes_on = stores && f->replicas > 1;
    double factor = f->divide_factor != 0 ? f->divide_factor : (double)ranks, before = 1, sums = 1;
    while (narrow && !stores && fmod(factor, before) == 0 && factor / before > before) before *= 2;
    while (goes_on && sums < f->shards && 2 * sums <= factor) sums *= 2;
    r->factor = factor;
    r->before = before;
    r->sums = sums;
    r->divides = (uint8_t)(goes_on  ? FSDPI_STEP_REPLICAS
                           : stores ? FSDPI_STEP_PARTIAL
                                    : FSDPI_STEP_OUT);
}

// Can gradients be written where they end? One rank, nothing to convert, divide or show.
static int fsdpi_facts_write_shard(const fsdpi_facts *f) {
    return f->shards * f->replicas == 1 && fsdpi_facts_plain(f) && f->reduce == f->stored &&
           f->grad == f->stored && f->sync && (f->divide_factor == 0 || f->divide_factor == 1) &&
           !f->hook;
}

// The sums of the shard group, over W > 1 ranks. Returns whether they are the shard gradient.
static int fsdpi_route_scatter(const fsdpi_facts *f, int adds, uint8_t **step) {
    // A fused backend sums in f32 or f64; a narrower reduce dtype has to be rounded to, as upstream
    // does, so that nothing can be fused with it.
    int wide = f->reduce == FSDP_F32 || f->reduce == FSDP_F64;
    int is_last = f->replicas == 1 && f->one_train && !f->hook && !f->offload;
    if (is_last && f->fuses && wide) {
        *(*step)++ = FSDPI_STEP_SCATTER_FUSED;
        return 1;
    }
    if (is_last && !f->fuses && f->reduce == f->grad && !adds) {
        *(*step)++ = FSDPI_STEP_SCATTER;
        *(*step)++ = FSDPI_STEP_RESCALE;
        return 1;
    }
    *(*step)++ = f->fuses && wide ? FSDPI_STEP_PARTIAL_FUSED : FSDPI_STEP_PARTIAL;
    return 0;
}

// The route for these facts. adds: to a reduced gradient that the shard gradient holds already.
static fsdpi_route fsdpi_route_of(const fsdpi_facts *f, int adds) {
    fsdpi_route r;
    uint8_t *step = r.collect;
    int ranks = f->shards * f->replicas, plain = fsdpi_facts_plain(f), reduced = 0;
    int copies = f->debug && f->shards == 1; // on one rank, too, a kept pointer finds NaN or poison
    int due = f->sync && (f->all_reduce || f->shards > 1 || f->replicas == 1);
    int sum = fsdpi_facts_convert(f, f->hook) || (!due && f->gathered != f->reduce);
    memset(&r, 0, sizeof r);
    r.gather = (uint8_t)(!plain || copies ? FSDPI_GATHER_STAGED
                         : f->shards > 1  ? FSDPI_GATHER_SHARDS
                                          : FSDPI_GATHER_ALIAS);
    r.write_shard = (uint8_t)fsdpi_facts_write_shard(f);
    r.from_input = f->shards == 1;
    r.grads_ahead = (uint8_t)!fsdpi_facts_convert(f, 0);
    fsdpi_facts_divide(f, &r);
    *step++ = FSDPI_STEP_WROTE;
    *step = (uint8_t)(sum ? FSDPI_STEP_SUM : FSDPI_STEP_KEEP);
    if (!due) return r;
    step = r.reduce;
    *step++ = FSDPI_STEP_FOLD;
    if (ranks > 1) *step++ = FSDPI_STEP_USERS;
    if (f->shards > 1) reduced = fsdpi_route_scatter(f, adds, &step);
    if (f->replicas > 1 && !f->all_reduce) return r; // the sums wait for a later all-reduce
    if (f->replicas > 1) *step++ = FSDPI_STEP_REPLICAS;
    if (f->hook) *step++ = FSDPI_STEP_HOOK;
    if (!reduced) *step++ = FSDPI_STEP_OUT;
    *step = FSDPI_STEP_DONE;
    return r;
}

#endif // FSDPI_CORE_ROUTE_H
