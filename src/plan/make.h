/* plan/make.h - from a recorded step to a plan that every rank has

   Makes fsdpi_plan_variant, in fsdp_finalize_backward of the recorded step, while every unit is
   idle. A rank that has failed still takes part in each agreement, since the others wait for it.
   State: the variants of fsdp_plan, and its arena.
   Callers: api.h (fsdpi_plan_drop_all).

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_MAKE_H
#define FSDPI_PLAN_MAKE_H

#include "../core/step.h"
#include "join.h"
#include "listing.h"
#include "memory.h"
#include "objects.h"
#include "passes.h"
#include "place.h"
#include "prove.h"
#include "simulate.h"
#include "tape.h"
#include "text.h"

#include <stdio.h>
#include <string.h>

static uint32_t fsdpi_plan_passes(const fsdp_plan *p) {
    uint32_t all = (1u << FSDP_PASS_COUNT) - 1;
    uint32_t usual = all & ~(1u << FSDP_PASS_ONCE);
    return ((usual & ~p->desc.without) | p->desc.with) & all;
}

// Disables planning: all later steps run eagerly, and fsdp_plan_why returns `text`.
static void fsdpi_plan_refuse(fsdp_plan *p, const char *text) {
    p->mode = FSDP_PLAN_REFUSED;
    snprintf(p->why, sizeof p->why, "%.*s", (int)sizeof p->why - 1, text);
}

// Calls fsdpi_plan_refuse, and logs `text` as an error.
static void fsdpi_plan_refuse_loudly(fsdp_plan *p, fsdp_status status, const char *text) {
    fsdpi_plan_refuse(p, text);
    (void)fsdp_fail(p->world, status, "[E966] plan: steps run eagerly from now on: %s", text);
}

// Reserves memory for all slots of the variants, and `more`, so that a slot can be retired without
// an allocation.
static fsdp_status fsdpi_plan_retired_room(fsdp_plan *p, int more) {
    int room = p->num_retired_bufs + more;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < p->num_kinds; i++) room += p->kinds[i]->listing.num_slots;
    while (!status && p->cap_retired_bufs < room) // the list doubles when it is full
        status = fsdpi_plan_grow(p->model, (void **)&p->retired_bufs, p->cap_retired_bufs,
                                 &p->cap_retired_bufs, sizeof *p->retired_bufs);
    return status;
}

/* Destroys the slots of dropped plans that no unit holds. `all`: also the held ones, since the
   model ends. */
static void fsdpi_plan_sweep(fsdp_plan *p, int all) {
    int kept = 0;
    for (int i = 0; i < p->num_retired_bufs; i++) {
        if (p->retired_bufs[i]->held && !all) {
            p->retired_bufs[kept++] = p->retired_bufs[i];
            continue;
        }
        p->retired_bufs[i]->held = 0;
        fsdp_buf_destroy(p->model, p->retired_bufs[i]);
    }
    p->num_retired_bufs = kept;
}

// Frees a variant's slots. lasting: also those that outlast a step. A slot that a unit holds is
// retired.
static void fsdpi_plan_bufs_free(fsdp_plan *p, fsdpi_plan_variant *k, int lasting) {
    for (int i = 0; i < k->listing.num_slots && k->bufs; i++) {
        const fsdpi_plan_slot *slot = &k->listing.slots[i];
        if (!k->bufs[i] || (slot->offset < 0 && !lasting)) continue;
        if (slot->carried_over) k->bufs[i] = NULL; // not the plan's
        else if (!k->bufs[i]->held) fsdp_buf_destroy(p->model, k->bufs[i]);
        else p->retired_bufs[p->num_retired_bufs++] = k->bufs[i];
        k->bufs[i] = NULL;
    }
}

static void fsdpi_plan_variant_free(fsdp_plan *p, fsdpi_plan_variant *k) {
    if (!k) return;
    (void)fsdp_wait_stream(p->model, -1); // outstanding ops read its lists
    if (p->last == k) p->last = NULL;
    fsdpi_plan_bufs_free(p, k, 1);
    fsdpi_plan_tape_free(p, &k->tape);
    fsdpi_plan_listing_end(p->model, &k->listing);
    fsdpi_plan_free(p->model, k->begin);
    fsdpi_plan_free(p->model, k->calls);
    fsdpi_plan_free(p->model, k->bufs);
    fsdpi_plan_free(p->model, k);
}

/* -------------------------------------------------------------------------------------------- */
// Slots that units hold when a step begins.

// Returns the i-th slot that units may hold when a step of this variant begins; NULL: not held.
static fsdp_buf *fsdpi_plan_begins_with(const fsdpi_plan_variant *k, int i) {
    return k->begin[i / FSDPI_PLAN_HELD_COUNT]
        .state.slot[FSDP_POOL_GATHER + i % FSDPI_PLAN_HELD_COUNT];
}

static int fsdpi_plan_variant_has(const fsdpi_plan_variant *k, const fsdp_buf *buf) {
    for (int i = 0; i < k->listing.num_slots && k->bufs; i++)
        if (k->bufs[i] == buf && !k->listing.slots[i].carried_over) return 1;
    return 0;
}

static int fsdpi_plan_is_part(const fsdp_plan *p, const fsdp_buf *buf) {
    const fsdp_buf *arena = p->arena;
    return arena && buf->ptr >= arena->ptr && buf->ptr < arena->ptr + arena->bytes;
}

/* Returns 1 if a slot that a unit holds when a step of this variant begins will be destroyed or
   overwritten. A pool's slot that no unit holds now is freed by fsdp_pools_trim. A part of the
   arena is overwritten by the next replay. A dropped plan's slot is freed by fsdpi_plan_sweep; a
   fleeting variant is dropped next. */
static int fsdpi_plan_is_fleeting(const fsdp_plan *p, const fsdpi_plan_variant *k) {
    for (int i = 0; i < p->num_units * FSDPI_PLAN_HELD_COUNT; i++) {
        const fsdp_buf *slot = fsdpi_plan_begins_with(k, i);
        int owner = 0;
        if (!slot) continue;
        if (fsdpi_plan_is_part(p, slot)) return 1;
        for (int n = 0; n < p->num_retired_bufs; n++)
            if (p->retired_bufs[n] == slot) return 1;
        while (owner < p->num_kinds && !fsdpi_plan_variant_has(p->kinds[owner], slot)) owner++;
        if (owner < p->num_kinds ? p->kinds[owner]->fleeting : !slot->held) return 1;
    }
    return 0;
}

// Marks the fleeting variants. One that begins with a slot of a fleeting one is fleeting, too: it
// was recorded later, so that it comes later in the list.
static void fsdpi_plan_find_fleeting(fsdp_plan *p) {
    for (int i = 0; i < p->num_kinds; i++)
        p->kinds[i]->fleeting = fsdpi_plan_is_fleeting(p, p->kinds[i]);
}

// Returns the bytes of a plan's tables.
static int64_t fsdpi_plan_host_bytes(const fsdpi_plan_variant *k) {
    const fsdpi_plan_tape *t = &k->tape;
    const fsdpi_plan_listing *l = &k->listing;
    size_t bytes = (size_t)t->cap_ops * sizeof *t->ops + (size_t)t->cap_pairs * sizeof *t->pairs +
                   (size_t)t->cap_uses * sizeof *t->uses + (size_t)l->cap_lines * sizeof *l->lines +
                   (size_t)l->cap_members * sizeof *l->members +
                   (size_t)l->choice.cap_acts * sizeof *l->choice.acts +
                   (size_t)k->num_calls * sizeof *k->calls;
    return (int64_t)bytes;
}

// Returns the bytes of the slots that the model has now, made by eager steps.
static int64_t fsdpi_plan_pool_bytes(const fsdp_plan *p) {
    int64_t bytes = 0;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_REDUCE_OUT; pool++)
        bytes += p->model->pool_bytes[pool];
    return bytes;
}

// Makes the tape of a variant's program. bufs NULL: without memory.
static fsdp_status fsdpi_plan_tape_make(fsdp_plan *p, fsdpi_plan_variant *k,
                                        const fsdpi_plan_decisions *choice, fsdp_buf *const *bufs,
                                        int num_bufs, fsdpi_plan_tape *out) {
    fsdpi_plan_tape raw;
    fsdpi_plan_lowering show;
    memset(out, 0, sizeof *out);
    fsdpi_plan_lowering_new(&show, p, &raw, k, choice, bufs, num_bufs);
    fsdp_status status = fsdpi_plan_lower(&show);
    if (!status) status = fsdpi_plan_arrange(&show, out);
    fsdpi_plan_lowering_end(&show);
    fsdpi_plan_tape_free(p, &raw);
    return status;
}

static fsdp_status fsdpi_plan_lower_eager(fsdp_plan *p, fsdpi_plan_variant *k,
                                          fsdpi_plan_tape *raw) {
    fsdpi_plan_lowering show;
    fsdpi_plan_lowering_new(&show, p, raw, k, NULL, NULL, 0);
    fsdp_status status = fsdpi_plan_lower(&show);
    fsdpi_plan_lowering_end(&show);
    return status;
}

static fsdp_status fsdpi_plan_too_large(fsdp_plan *p, const fsdpi_plan_variant *k, int call,
                                        int64_t bytes, int64_t most) {
    char text[FSDPI_PLAN_TEXT];
    const fsdpi_plan_call *at = &k->calls[call];
    snprintf(text, sizeof text, "call %d %s '%.100s': slots need %lld bytes, %lld are allowed",
             call, fsdpi_call_name(at->call), fsdp_unit_label(at->unit), (long long)bytes,
             (long long)most);
    fsdpi_plan_refuse_loudly(p, FSDP_ERR_OUT_OF_MEMORY, text);
    return FSDP_ERR_OUT_OF_MEMORY;
}

// Makes the decisions, a tape without memory, and places.
static fsdp_status fsdpi_plan_try(fsdp_plan *p, fsdpi_plan_variant *k, fsdpi_plan_facts *f,
                                  uint32_t passes, int64_t most, int *worst) {
    fsdpi_plan_listing *l = &k->listing;
    int decides = (passes & ~(1u << FSDP_PASS_ARENA)) != 0;
    fsdpi_plan_decisions_end(p, &l->choice);
    fsdpi_plan_tape_free(p, &k->tape);
    fsdp_status status = decides ? fsdpi_plan_decide(p, f, passes, most, &l->choice, worst)
                                 : FSDP_OK;
    if (!status)
        status = fsdpi_plan_tape_make(p, k, decides ? &l->choice : NULL, NULL, 0, &k->tape);
    return status ? status : fsdpi_plan_place(p, &k->tape, l, passes, 0);
}

/* Finds a plan that fits into `most` bytes. Tries all of these passes, each time with fewer
   units kept. If that does not fit, it leaves out the passes that take memory, and finally all. */
static fsdp_status fsdpi_plan_fit(fsdp_plan *p, fsdpi_plan_variant *k, fsdpi_plan_facts *f,
                                  uint32_t all, int64_t most) {
    const uint32_t keep = 1u << FSDP_PASS_KEEP, arena = 1u << FSDP_PASS_ARENA;
    const uint32_t sets[3] = {all, all & (keep | arena), all & arena};
    const fsdpi_plan_listing *l = &k->listing;
    int worst = 0;
    for (int i = 0; i < 3; i++) {
        int64_t budget = most;
        for (int tries = 0; tries < 8 && budget >= 0; tries++) {
            fsdp_status status = fsdpi_plan_try(p, k, f, sets[i], budget, &worst);
            if (status || l->bytes <= most) return status;
            if (!(sets[i] & keep)) break;
            budget -= l->bytes - most;
        }
    }
    return fsdpi_plan_too_large(p, k, worst, l->bytes, most);
}

/* Chooses the passes. Without costs it takes all. With costs it tries one after the other, and
   takes a pass if the step is not slower with it. At equal times fewer collectives win. */
static fsdp_status fsdpi_plan_weigh(fsdp_plan *p, fsdpi_plan_variant *k, fsdpi_plan_facts *f,
                                    int64_t most) {
    const int weighed[3] = {FSDP_PASS_BUCKET, FSDP_PASS_KEEP, FSDP_PASS_AHEAD};
    uint32_t all = fsdpi_plan_passes(p), taken = all;
    int64_t least = INT64_MAX, fewest = INT64_MAX;
    fsdp_status status = FSDP_OK;
    if (!p->desc.cost) return fsdpi_plan_fit(p, k, f, all, most);
    for (int i = 0; i < 3; i++) taken &= ~(1u << weighed[i]);
    for (int i = -1; i < 3 && !status; i++) { // -1: none of the three
        uint32_t tried = i < 0 ? taken : taken | (all & 1u << weighed[i]);
        int64_t takes = 0, collectives = 0;
        if (i >= 0 && tried == taken) continue;
        status = fsdpi_plan_fit(p, k, f, tried, most);
        if (!status) status = fsdpi_plan_time_kind(p, k, &takes, &collectives);
        if (takes > least || (takes == least && collectives > fewest)) continue;
        taken = tried;
        least = takes;
        fewest = collectives;
    }
    return status ? status : fsdpi_plan_fit(p, k, f, taken, most);
}

// Makes buffers for the places of a variant, and its tape with their addresses.
static fsdp_status fsdpi_plan_bind(fsdp_plan *p, fsdpi_plan_variant *k) {
    fsdpi_plan_listing *l = &k->listing;
    fsdpi_plan_tape old = k->tape;
    fsdp_buf **bufs = NULL;
    fsdp_status status = fsdpi_plan_retired_room(p, l->num_slots);
    if (!k->bufs && !status)
        status = fsdpi_plan_alloc(p->model, (size_t)(l->num_slots + 1) * sizeof *k->bufs,
                                  (void **)&k->bufs);
    if (!status) fsdpi_plan_bufs_free(p, k, 0);
    for (int i = 0; i < l->num_slots && !status; i++) {
        const fsdpi_plan_slot *slot = &l->slots[i];
        if (k->bufs[i]) continue;
        for (int u = 0; u < old.num_uses && slot->carried_over; u++)
            if (old.uses[u].slot == i)
                k->bufs[i] = fsdpi_plan_carried_slot(&old, p->units[old.uses[u].unit],
                                                     &old.uses[u]);
        if (k->bufs[i]) continue;
        status = slot->offset < 0
                     ? fsdp_buf_create(p->model, p->pool, FSDP_MEMORY_DEVICE, slot->bytes,
                                       &k->bufs[i])
                     : fsdp_buf_view(p->model, p->arena, slot->offset, slot->bytes, &k->bufs[i]);
    }
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)(old.num_uses + 1) * sizeof *bufs,
                                  (void **)&bufs);
    for (int i = 0; i < old.num_uses && !status; i++) bufs[i] = k->bufs[old.uses[i].slot];
    memset(&k->tape, 0, sizeof k->tape);
    if (!status)
        status = fsdpi_plan_tape_make(p, k, l->choice.managed ? &l->choice : NULL, bufs,
                                      old.num_uses, &k->tape);
    if (!status && (k->tape.num_uses != old.num_uses || k->tape.num_ops != old.num_ops))
        status = fsdp_fail(p->world, FSDP_ERR_INTERNAL,
                           "[E972] plan: the dry run with slots has %d ops and %d uses of "
                           "slots, expected %d and %d",
                           k->tape.num_ops, k->tape.num_uses, old.num_ops, old.num_uses);
    if (!status) { // uses share slots now, so that only the first dry run can tell them apart
        if (old.num_uses) memcpy(k->tape.uses, old.uses, (size_t)old.num_uses * sizeof *old.uses);
        if (old.num_ops) memcpy(k->tape.pairs, old.pairs, (size_t)old.num_ops * sizeof *old.pairs);
    }
    fsdpi_plan_tape_free(p, &old);
    fsdpi_plan_free(p->model, bufs);
    return status;
}

// Drops a variant, and the variants whose steps begin with a slot of it.
static void fsdpi_plan_drop(fsdp_plan *p, int index) {
    fsdpi_plan_variant *k = p->kinds[index];
    if (p->kind == k) p->kind = NULL;
    p->num_kinds--;
    for (int i = index; i < p->num_kinds; i++) p->kinds[i] = p->kinds[i + 1];
    for (int i = p->num_kinds - 1; i >= 0; i--)
        for (int n = 0; i < p->num_kinds && n < p->num_units * FSDPI_PLAN_HELD_COUNT; n++) {
            const fsdp_buf *slot = fsdpi_plan_begins_with(p->kinds[i], n);
            if (!slot || !fsdpi_plan_variant_has(k, slot)) continue;
            fsdpi_plan_drop(p, i);
            n = -1; // this index has another variant, or none
        }
    fsdpi_plan_variant_free(p, k);
}

static void fsdpi_plan_drop_kind(fsdp_plan *p, const fsdpi_plan_variant *k) {
    for (int i = 0; i < p->num_kinds; i++)
        if (p->kinds[i] == k) {
            fsdpi_plan_drop(p, i);
            return;
        }
}

// Drops all variants. The arena remains while a unit holds a part of it.
static void fsdpi_plan_drop_all(fsdp_plan *p) {
    fsdpi_plan_sweep(p, 0);
    while (p->num_kinds) fsdpi_plan_drop(p, p->num_kinds - 1);
    for (int i = 0; i < p->num_retired_bufs; i++)
        if (fsdpi_plan_is_part(p, p->retired_bufs[i])) return;
    fsdp_buf_destroy(p->model, p->arena);
    p->arena = NULL;
}

// Makes memory for all variants: the arena has the size of the largest need. A dry run uses the
// current options, so a variant with other options is bound when its next step begins.
static fsdp_status fsdpi_plan_bind_all(fsdp_plan *p, fsdpi_plan_variant *k) {
    int64_t bytes = fsdpi_plan_arena_bytes(&k->listing);
    fsdpi_plan_find_fleeting(p);
    for (int i = p->num_kinds - 1; i >= 0; i--)
        if (i < p->num_kinds && p->kinds[i]->fleeting) fsdpi_plan_drop(p, i);
    fsdp_status status = fsdp_pools_trim(p->model);
    if (status) return status;
    if (bytes > fsdp_buf_nbytes(p->arena)) {
        for (int i = 0; i < p->num_kinds; i++) fsdpi_plan_bufs_free(p, p->kinds[i], 0);
        fsdp_buf_destroy(p->model, p->arena);
        p->arena = NULL;
        status = fsdp_buf_create(p->model, p->pool, FSDP_MEMORY_DEVICE, bytes, &p->arena);
        for (int i = 0; i < p->num_kinds && !status; i++) {
            p->kinds[i]->unbound = p->kinds[i]->options != k->options;
            if (!p->kinds[i]->unbound) status = fsdpi_plan_bind(p, p->kinds[i]);
        }
    }
    return status ? status : fsdpi_plan_bind(p, k);
}

/* -------------------------------------------------------------------------------------------- */
// Agreement of the ranks.

// Takes the minimum of each number over all ranks of the model's mesh.
static fsdp_status fsdpi_plan_min_over_ranks(const fsdp_plan *p, int64_t *values, int count) {
    return fsdp_all_reduce(p->world, p->mesh, values, count, FSDP_I64, FSDP_MIN);
}

/* Reports the first call at which a rank differs from rank 0 of the mesh, with both sides. It
   allocates nothing, so that no rank can drop out. */
static fsdp_status fsdpi_plan_differs(fsdp_plan *p, const fsdpi_plan_variant *k) {
    enum { WORDS = 160, HASHES = 64 };
    union {
        char text[WORDS];
        int32_t numbers[WORDS / 4];
    } theirs = {"options or sizes"};
    char first[WORDS];
    uint64_t hashes[HASHES];
    const fsdpi_plan_listing *l = &k->listing;
    int64_t calls = l->num_calls, least = INT64_MAX;
    fsdp_status status = fsdp_broadcast(p->world, p->mesh, &calls, sizeof calls, 0);
    for (int64_t c = 0; c < calls && !status; c++) {
        uint64_t mine = c < l->num_calls ? fsdpi_plan_call_hash(l, (int)c) : 0;
        for (int i = 0; i < HASHES && c % HASHES == 0; i++)
            hashes[i] = c + i < l->num_calls ? fsdpi_plan_call_hash(l, (int)c + i) : 0;
        if (c % HASHES == 0) status = fsdp_broadcast(p->world, p->mesh, hashes, sizeof hashes, 0);
        if (hashes[c % HASHES] != mine && least == INT64_MAX) least = c << 32 | fsdp_rank(p->world);
    }
    if (!status) status = fsdpi_plan_min_over_ranks(p, &least, 1);
    int call = least == INT64_MAX ? -1 : (int)(least >> 32), rank = (int)(least & 0x7FFFFFFF);
    if (call >= 0) fsdpi_plan_call_words(l, call, theirs.text, WORDS);
    else rank = -1;
    memcpy(first, theirs.text, WORDS);
    if (!status) status = fsdp_broadcast(p->world, p->mesh, first, sizeof first, 0);
    if (rank >= 0 && rank != fsdp_rank(p->world)) memset(&theirs, 0, sizeof theirs);
    if (!status && rank >= 0) // one rank sends words, the others send zeros
        status = fsdp_all_reduce(p->world, p->mesh, theirs.numbers, WORDS / 4, FSDP_I32, FSDP_SUM);
    if (status) return status;
    return fsdp_fail(p->world, FSDP_ERR_MISMATCH,
                     "[E973] plan: rank %d differs from the mesh's first rank at call %d: %s, "
                     "expected %s: make the same calls, with the same options, on all ranks",
                     rank, call, theirs.text, first);
}

/* Fails if a rank has failed so far. status: this rank's. values[0] is reserved for that; each
   other value becomes the minimum over all ranks. */
static fsdp_status fsdpi_plan_together(fsdp_world *w, const fsdp_mesh *mesh, fsdp_status status,
                                       int64_t *values, int count) {
    values[0] = !status;
    fsdp_status reached = fsdp_all_reduce(w, mesh, values, count, FSDP_I64, FSDP_MIN);
    if (reached || values[0]) return reached;
    return status ? status
                  : fsdp_fail(w, FSDP_ERR_OUT_OF_MEMORY,
                              "[E974] plan: another rank could not make the plan: see its log; "
                              "steps run eagerly");
}

// Returns the status on which all ranks agree. Also fails if `hash` is not 0 and differs between
// ranks.
static fsdp_status fsdpi_plan_agree(fsdp_plan *p, const fsdpi_plan_variant *k, fsdp_status status,
                                    uint64_t hash) {
    int64_t values[3] = {0, (int64_t)hash, (int64_t)~hash};
    status = fsdpi_plan_together(p->world, p->mesh, status, values, 3);
    return !status && hash && values[1] != ~values[2] ? fsdpi_plan_differs(p, k) : status;
}

/* -------------------------------------------------------------------------------------------- */

// Refuses a plan if the step depends on more than options and states.
static fsdp_status fsdpi_plan_refusal(fsdp_plan *p, const fsdpi_plan_tape *eager) {
    char text[FSDPI_PLAN_TEXT] = "";
    const fsdp_unit *outside;
    (void)fsdpi_plan_mesh_info(p, &outside);
    if (outside)
        snprintf(text, sizeof text,
                 "unit '%.120s' has other groups of ranks than the others: give all units one mesh",
                 fsdp_unit_label(outside));
    for (int i = 0; i < eager->num_ops && !text[0]; i++)
        if (p->mode_of_world == FSDP_RUN_STREAMS && eager->ops[i].label == FSDP_LABEL_GRAD_HOOK)
            snprintf(text, sizeof text,
                     "unit '%.120s' has a post-accumulate hook, for which the host waits on this "
                     "device",
                     fsdp_unit_label(eager->ops[i].unit));
    if (!text[0]) return FSDP_OK;
    fsdpi_plan_refuse_loudly(p, FSDP_ERR_UNSUPPORTED, text);
    return FSDP_ERR_UNSUPPORTED;
}

// Completes the listing of a variant that has a tape and places.
static fsdp_status fsdpi_plan_finish_listing(fsdp_plan *p, fsdpi_plan_variant *k,
                                             const fsdpi_plan_tape *eager,
                                             const fsdpi_plan_facts *f) {
    fsdpi_plan_count_ops(&k->tape, &k->listing, 1);
    fsdp_status status = fsdpi_plan_list(p, k, &k->tape, &k->listing);
    // A unit without elements gathers nothing. If a unit is gathered when the step begins, its
    // reads are not recorded: its first use reads an earlier step's gather, and `reads` cannot tell
    // it from later ones. That also holds if only some visits find a unit gathered
    // (unshard_in_backward 0).
    for (int u = 0; u < p->num_units; u++) f->order[u] = 0;
    for (int i = 0; i < eager->num_ops; i++) {
        const fsdp_op *op = &eager->ops[i];
        int fills = op->kind == FSDP_OP_ALL_GATHER || op->label == FSDP_LABEL_COPY_IN ||
                    op->label == FSDP_LABEL_PRE_GATHER;
        int u = op->unit && fills ? fsdpi_plan_index(op->unit) : -1;
        if (u >= 0) f->order[u] = eager->held[u] ? 0 : 3;
    }
    for (int c = 0; c + 1 < k->num_calls && !status; c++) { // reads of units in the eager step
        int u = k->calls[c].index, call = k->calls[c].call;
        int phase = call == FSDP_CALL_PRE_FORWARD ? 1 : call == FSDP_CALL_PRE_BACKWARD ? 2 : 0;
        if (eager->storage[c] != FSDP_STORAGE_UNSHARDED) f->order[u] &= ~phase;
        else k->listing.units[u].reads |= phase;
    }
    for (int u = 0; u < p->num_units && !status; u++) k->listing.units[u].reads &= f->order[u];
    return status;
}

// Makes all that needs no other rank: a plan without memory, and its proof.
static fsdp_status fsdpi_plan_make_alone(fsdp_plan *p, fsdpi_plan_variant *k, int64_t most) {
    fsdpi_plan_tape eager;
    fsdpi_plan_facts f;
    memset(&eager, 0, sizeof eager);
    memset(&f, 0, sizeof f);
    fsdp_status status = fsdpi_plan_lower_eager(p, k, &eager);
    if (!status) status = fsdpi_plan_refusal(p, &eager);
    if (!status) status = fsdpi_plan_facts_new(p, k, &f);
    if (!status) status = fsdpi_plan_find_spans(p, &f, &eager);
    if (!status) {
        fsdpi_plan_find_base(&f, &eager);
        fsdpi_plan_count_ops(&eager, &k->listing, 0);
        status = fsdpi_plan_weigh(p, k, &f, most);
    }
    if (!status) status = fsdpi_plan_finish_listing(p, k, &eager, &f);
    fsdp_plan_proof proof;
    if (!status) status = fsdpi_plan_prove_one(p->model, &k->listing, &proof);
    if (!status && proof.refuted) {
        status = fsdp_fail(p->world, FSDP_ERR_INTERNAL,
                           "[E975] plan: refuted, so that steps run eagerly: %s", proof.text);
        fsdpi_plan_refuse(p, proof.text);
    }
    fsdpi_plan_facts_end(p, &f);
    fsdpi_plan_tape_free(p, &eager);
    return status;
}

/* Makes the plan of a variant, or gives the reason why there is none. k NULL: this rank has
   none, and takes part in the others' agreements. *made: 0 on entry if the step has failed here.
   0 on return if there is no plan, since the step has failed on some rank, or began with slots
   that will be destroyed. Returns a failure only if the step has failed: ranks that differ, or a
   collective. */
static fsdp_status fsdpi_plan_make(fsdp_plan *p, fsdpi_plan_variant *k, int *made) {
    int64_t model = (int64_t)fsdpi_plan_model_hash(p);
    fsdpi_plan_find_fleeting(p);
    int64_t values[4] = {fsdpi_plan_pool_bytes(p), *made && (!k || !fsdpi_plan_is_fleeting(p, k)),
                         model, ~model};
    fsdp_status status = fsdpi_plan_min_over_ranks(p, values, 4), own;
    *made = (int)values[1];
    if (status || !*made) return status;
    if (values[2] != ~values[3]) { // equal on all ranks
        fsdpi_plan_refuse_loudly(p, FSDP_ERR_UNSUPPORTED,
                                 "ranks have parameters of other sizes, as tensor parallelism that "
                                 "cuts unevenly gives them: a plan is the same on all ranks");
        return FSDP_OK;
    }
    int64_t eager = values[0], most = p->desc.most_bytes ? p->desc.most_bytes : eager;
    if (!p->desc.most_bytes && most < FSDPI_PLAN_LEAST_BYTES) most = FSDPI_PLAN_LEAST_BYTES;
    if (k) k->listing.eager = eager;
    own = k ? fsdpi_plan_make_alone(p, k, most) : FSDP_ERR_OUT_OF_MEMORY;
    if (!own) k->listing.hash = fsdpi_plan_text_hash(&k->listing);
    status = fsdpi_plan_agree(p, k, own, own ? 1 : k->listing.hash);
    if (!status) status = fsdpi_plan_agree(p, k, fsdpi_plan_bind_all(p, k), 0);
    if (!status) return FSDP_OK;
    if (p->mode != FSDP_PLAN_REFUSED) fsdpi_plan_refuse(p, fsdp_last_error(p->world));
    return status == FSDP_ERR_MISMATCH || fsdp_world_status(p->world) ? status : FSDP_OK;
}

#endif // FSDPI_PLAN_MAKE_H
