/* core/usage.h - who used which parameter

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_CORE_USAGE_H
#define FSDPI_CORE_USAGE_H

#include "layout.h"
#include "macros.h"
#include "objects.h"
#include "os.h"
#include "run.h"
#include "unit.h"

// Owns: fsdpi_usage. A parameter is used when the caller asks where its gradient is written. Flags
// of use ride along in every reduction, summed like gradients, so that a parameter that no rank
// used is known without another collective. Who used one need not look.

static uint8_t *fsdpi_use(const fsdp_unit *u, int i) { return (uint8_t *)u->usage.use + i; }

// Hooks look at all parameters of a unit: at eight at a time. One set of marks for each of them.
static inline uint64_t fsdpi_uses(int use) { return 0x0101010101010101u * (uint64_t)use; }

// Those that have the mark `from`, with the mark `to` instead.
static inline uint64_t fsdpi_uses_as(uint64_t uses, int from, int to) {
    return (uses & fsdpi_uses(from)) / (uint64_t)from * (uint64_t)to;
}

// All lose the marks `gone`; who had `from` gets `to`.
static inline void fsdpi_usage_turn(fsdp_unit *u, int gone, int from, int to) {
    for (int k = 0; k < fsdpi_use_words(u); k++) {
        uint64_t uses = u->usage.use[k];
        u->usage.use[k] = (uses & ~fsdpi_uses(gone)) | fsdpi_uses_as(uses, from, to);
    }
}
static FSDPI_NOINLINE void fsdpi_usage_clear(fsdp_unit *u, int use) {
    fsdpi_usage_turn(u, use, 1, 0);
}

static int fsdpi_usage_any(const fsdp_unit *u, int use) {
    uint64_t any = 0;
    for (int k = 0; k < fsdpi_use_words(u); k++) any |= u->usage.use[k] & fsdpi_uses(use);
    return any != 0;
}

// A flag for each trainable, in the two dtypes of a reduction's input. Flags are divided like
// gradients, so that one of `value`, what they are divided by, does not vanish.
static FSDPI_NOINLINE void fsdpi_usage_write(fsdp_unit *u, double value) {
    fsdp_dtype dtypes[2] = {u->layout.parts[u->layout.users_part].param_dtype,
                            u->layout.reduce_dtype};
    char *flags[2] = {u->usage.flags, u->usage.wide};
    if (u->usage.in_flight) fsdpi_drain(u->model->world); // a copy may still read them
    for (int i = 0; i < 2 * u->desc.num_params; i++) {
        int at = u->params[i / 2].train_index, k = i % 2;
        double flag = *fsdpi_use(u, i / 2) & FSDPI_USE_USED ? value : 0;
        if (at >= 0)
            (void)fsdp_convert(flags[k] + (size_t)at * fsdp_dtype_size(dtypes[k]), dtypes[k], &flag,
                               FSDP_F64, 1);
    }
    fsdpi_usage_turn(u, FSDPI_USE_FLAGGED, FSDPI_USE_USED, FSDPI_USE_FLAGGED);
}

/* Brings the flags up to date for a reduction that multiplies sums by value's reciprocal. The flags
   of a step are mostly those of the step before, so that they are seldom written. */
static void fsdpi_usage_send(fsdp_unit *u, double value) {
    uint64_t differs = value != u->usage.value;
    for (int k = 0; k < fsdpi_use_words(u); k++) {
        uint64_t uses = u->usage.use[k];
        differs |= (fsdpi_uses_as(uses, FSDPI_USE_USED, FSDPI_USE_FLAGGED) ^ uses) &
                   fsdpi_uses(FSDPI_USE_FLAGGED);
    }
    if (differs) fsdpi_usage_write(u, value);
    fsdpi_usage_turn(u, FSDPI_USE_USED, FSDPI_USE_USED,
                     u->options.reduce_unused ? 0 : FSDPI_USE_PENDING);
    u->usage.value = value;
    u->usage.in_flight = 1;
}

// A reduction is on its way, with the counts of users. One rank: what it used has a gradient.
static void fsdpi_usage_sent(fsdp_unit *u) {
    u->usage.counted = 1;
    if (fsdpi_ranks(u) == 1)
        fsdpi_usage_turn(u, FSDPI_USE_USED, FSDPI_USE_USED, FSDPI_USE_REDUCED);
    if (!u->options.reduce_unused) fsdpi_usage_clear(u, FSDPI_USE_PENDING);
}

// What ranks must agree on in a reduction beside the unit; by upstream's rule what was used, too.
static void fsdpi_usage_agree(const fsdp_unit *u, fsdp_op *op) {
    const fsdpi_grads *g = &u->state.grads;
    uint64_t used = 0, adds = (g->shard == FSDPI_GRADS_REDUCED) | (uint64_t)g->waits << 1;
    for (int k = 0; k < fsdpi_use_words(u) && !u->options.reduce_unused; k++)
        used = fsdpi_hash(used, u->usage.use[k] & fsdpi_uses(FSDPI_USE_PENDING));
    op->what_hash = fsdpi_hash(u->layout.hash, used + adds);
    op->agree[FSDP_AGREE_USED] = (uint8_t)used;
    op->agree[FSDP_AGREE_ACCUMULATE] = (uint8_t)adds;
}

// The counts of users of the unit's trainables [from, from + count), as the host reads them.
static void fsdpi_usage_counts(const fsdp_unit *u, int from, int count, float *counts) {
    fsdp_dtype dtype = u->layout.parts[u->layout.users_part].dtype;
    fsdp_dtype grad = fsdpi_grad_dtype(u->model, dtype);
    const fsdpi_flat_block *flat = &u->model->flats[dtype];
    int64_t at = fsdpi_bytes(u->layout.users_base - flat->train_numel + from, grad);
    (void)fsdp_convert(counts, FSDP_F32, flat->users + at, grad, count);
}

// Did a rank use a trainable parameter that has been reduced? The counts are read if need be.
static int fsdpi_usage_of(const fsdp_unit *u, const fsdpi_param *p) {
    float users = 0;
    int reduced = *fsdpi_use(u, (int)(p - u->params)) & FSDPI_USE_REDUCED;
    if (reduced || fsdpi_ranks(u) == 1) return reduced != 0;
    fsdpi_usage_counts(u, p->train_index, 1, &users);
    return users != 0.0f;
}

// Brings the counts of users, which have been reduced, to where the host can read them.
static fsdp_status fsdpi_usage_read(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++) {
        const fsdpi_flat_block *flat = &m->flats[d];
        fsdp_dtype grad = fsdpi_grad_dtype(m, d);
        int64_t bytes = fsdpi_bytes(flat->grad_numel - flat->train_numel, grad);
        if (!flat->users) continue;
        const char *counts = flat->grad->ptr + fsdpi_bytes(flat->train_numel, grad);
        if (counts != flat->users)
            status = fsdpi_transfer(m->world, flat->users, counts, (size_t)bytes);
    }
    return status;
}

/* Marks what this rank used as reduced. Returns whether something is left, for which the host has
   to look at the counts. */
static int fsdpi_usage_known(fsdp_unit *u) {
    int known = 0;
    fsdpi_usage_turn(u, 0, FSDPI_USE_FLAGGED, FSDPI_USE_REDUCED);
    for (int k = 0; k < fsdpi_use_words(u); k++) // the sum of eight bytes
        known += (int)(fsdpi_uses_as(u->usage.use[k], FSDPI_USE_REDUCED, 1) * fsdpi_uses(1) >> 56);
    return known < u->layout.num_train;
}

// Marks what other ranks used: their counts have been read.
static void fsdpi_usage_learn(fsdp_unit *u) {
    float counts[64];
    for (int i = 0, known = 0; i < u->desc.num_params && fsdpi_ranks(u) > 1; i++) {
        int at = u->params[i].train_index;
        if (at < 0) continue;
        if (at == known) { // trainables are numbered in the order of parameters
            int count = u->layout.num_train - at < 64 ? u->layout.num_train - at : 64;
            fsdpi_usage_counts(u, at, count, counts);
            known += count;
        }
        if (counts[at % 64] != 0.0f) *fsdpi_use(u, i) |= FSDPI_USE_REDUCED;
    }
}

FSDP_API int fsdp_unit_follows_use(const fsdp_unit *unit) {
    return unit && !unit->options.reduce_unused;
}

#endif // FSDPI_CORE_USAGE_H
