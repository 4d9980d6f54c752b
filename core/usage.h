/* core/usage.h - which parameters have a gradient

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
#include "unit.h"

/* Owns: fsdp_unit.use. A parameter is USED when the caller asks where its gradient is written; with
   reduce_unused, when backward begins. It is REDUCED when the unit's reduction is on its way. Ranks
   compare in each reduction which parameters are USED. Invariant: if a parameter is USED, the unit
   holds gradients that are not reduced, or is in backward.
   Source: torch: FSDPParamGroup.post_backward, reduce_scatter_unused_params. */

static uint8_t *fsdpi_use(const fsdp_unit *u, int i) { return (uint8_t *)u->use + i; }

// Hooks look at all parameters of a unit, at eight at a time: a mark of each of them.
static inline uint64_t fsdpi_uses(int use) { return 0x0101010101010101u * (uint64_t)use; }

static FSDPI_NOINLINE void fsdpi_usage_clear(fsdp_unit *u, int use) {
    for (int k = 0; k < fsdpi_use_words(u); k++) u->use[k] &= ~fsdpi_uses(use);
}

static int fsdpi_usage_any(const fsdp_unit *u, int use) {
    uint64_t any = 0;
    for (int k = 0; k < fsdpi_use_words(u); k++) any |= u->use[k] & fsdpi_uses(use);
    return any != 0;
}

// With reduce_unused a backward gives all trainables a gradient: zeros where nobody writes. In a
// rehearsal all count as used, since nobody asks where gradients are written.
static void fsdpi_usage_begin(fsdp_unit *u) {
    if (!u->options.reduce_unused && !u->model->rehearsing) return;
    for (int i = 0; i < u->desc.num_params; i++)
        if (u->params[i].requires_grad) *fsdpi_use(u, i) |= FSDPI_USE_USED;
}

// Nothing waits for a reduction any more: what was USED is REDUCED.
static void fsdpi_usage_reduced(fsdp_unit *u) {
    for (int k = 0; k < fsdpi_use_words(u); k++) {
        uint64_t used = u->use[k] & fsdpi_uses(FSDPI_USE_USED);
        u->use[k] = (u->use[k] ^ used) | used * (FSDPI_USE_REDUCED / FSDPI_USE_USED);
    }
}

/* What ranks compare in a reduction: the unit, what it held when the reduction began, and the
   parameters that have no gradient, whose first one is named if ranks differ. */
static void fsdpi_usage_agree(const fsdp_unit *u, int held, fsdp_op *op) {
    uint64_t unused = 0;
    int used = 0;
    op->unused = NULL;
    for (int k = 0; k < fsdpi_use_words(u); k++) // the sum of eight bytes, 0 or 1 each
        used += (int)((u->use[k] & fsdpi_uses(FSDPI_USE_USED)) * fsdpi_uses(1) >> 56);
    for (int i = 0; used < u->layout.num_train && i < u->desc.num_params; i++) {
        if (!u->params[i].requires_grad || *fsdpi_use(u, i) & FSDPI_USE_USED) continue;
        if (!op->unused) op->unused = u->params[i].name;
        unused = fsdpi_hash(unused, (uint64_t)i + 1);
    }
    op->what_hash = fsdpi_hash(fsdpi_hash(u->layout.hash, (uint64_t)held), unused);
    op->agree[FSDP_AGREE_USED] = (uint8_t)(op->unused ? unused | 1 : 0);
    op->agree[FSDP_AGREE_ACCUMULATE] = (uint8_t)held;
}

#endif // FSDPI_CORE_USAGE_H
