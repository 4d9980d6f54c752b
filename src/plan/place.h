/* plan/place.h - where slots lie

   Assigns slots (fsdpi_plan_slot) to uses. Uses that never overlap in time may share memory. A use
   that is held at the end of the step has memory of its own, which outlasts the step.
   Callers: make.h (fsdpi_plan_place) and api.h (fsdpi_plan_place).

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_PLACE_H
#define FSDPI_PLAN_PLACE_H

#include "memory.h"
#include "objects.h"

#include <string.h>

// A run of adjacent uses counts as one piece, from the first to the last of them.
typedef struct fsdpi_plan_piece {
    int32_t head, from, to;
    int64_t bytes, offset;
} fsdpi_plan_piece;

typedef struct fsdpi_plan_places {
    fsdpi_plan_piece *pieces;
    int32_t num;
    int32_t *order; // [num]
    int32_t *alike; // [num] slots of equal size and pool, found by fsdpi_plan_pool_fit
    int64_t *kept;  // [num] offsets of the best order
    int64_t bytes;
} fsdpi_plan_places;

static fsdpi_plan_piece fsdpi_plan_piece_of(const fsdpi_plan_tape *t, int head) {
    fsdpi_plan_piece piece = {head, t->uses[head].from, t->uses[head].to, 0, -1};
    for (int i = head; i >= 0; i = t->uses[i].next_adjacent) {
        if (t->uses[i].from < piece.from) piece.from = t->uses[i].from;
        if (t->uses[i].to > piece.to) piece.to = t->uses[i].to;
        piece.bytes += t->uses[i].bytes;
    }
    return piece;
}

// Returns 1 if one comes before another. Order 0: by size; 1: by first use; 2: by size times life.
static int fsdpi_plan_comes_before(const fsdpi_plan_piece *a, const fsdpi_plan_piece *b,
                                   int order) {
    double x = (double)a->bytes, y = (double)b->bytes;
    if (order == 2) x *= a->to - a->from, y *= b->to - b->from;
    if (order != 1 && x != y) return x > y;
    return a->from != b->from ? a->from < b->from : a->head < b->head;
}

// Places the pieces by first fit in one order. Returns the bytes of all.
static int64_t fsdpi_plan_first_fit(fsdpi_plan_places *pl, int order) {
    int64_t whole = 0;
    for (int i = 0; i < pl->num; i++) {
        int k = i;
        for (;
             k > 0 && fsdpi_plan_comes_before(&pl->pieces[i], &pl->pieces[pl->order[k - 1]], order);
             k--)
            pl->order[k] = pl->order[k - 1];
        pl->order[k] = i;
    }
    for (int i = 0; i < pl->num; i++) {
        fsdpi_plan_piece *piece = &pl->pieces[pl->order[i]];
        int64_t at = 0;
        for (int moved = 1; moved;) { // up to the first gap between overlapping pieces
            moved = 0;
            for (int k = 0; k < i; k++) {
                const fsdpi_plan_piece *other = &pl->pieces[pl->order[k]];
                if (other->from > piece->to || piece->from > other->to ||
                    other->offset >= at + piece->bytes || at >= other->offset + other->bytes)
                    continue;
                at = other->offset + other->bytes;
                moved = 1;
            }
        }
        piece->offset = at;
        if (at + piece->bytes > whole) whole = at + piece->bytes;
    }
    return whole;
}

static void fsdpi_plan_best_fit(fsdpi_plan_places *pl) {
    pl->bytes = INT64_MAX;
    for (int order = 0; order < 3; order++) {
        int64_t bytes = fsdpi_plan_first_fit(pl, order);
        if (bytes >= pl->bytes) continue;
        pl->bytes = bytes;
        for (int i = 0; i < pl->num; i++) pl->kept[i] = pl->pieces[i].offset;
    }
    for (int i = 0; i < pl->num; i++) pl->pieces[i].offset = pl->kept[i];
}

// Returns 1 if an equal slot is filled while this one is in use, as in the core's pools.
static int fsdpi_plan_is_ahead(const fsdpi_plan_tape *t, const fsdpi_plan_use *use) {
    for (int i = 0; i < t->num_uses && use->pool == FSDP_POOL_GATHER; i++)
        if (t->uses[i].pool == use->pool && t->uses[i].bytes == use->bytes &&
            t->uses[i].unit != use->unit)
            return 1;
    for (int i = 0; i < t->num_ops; i++) {
        int at = use->pool == FSDP_POOL_GRAD ? t->pairs[i].src : t->pairs[i].dst;
        int reads = use->pool == FSDP_POOL_GRAD && (t->ops[i].kind == FSDP_OP_REDUCE_SCATTER ||
                                                    t->ops[i].kind == FSDP_OP_ALL_REDUCE);
        int sums = use->pool == FSDP_POOL_REDUCE_OUT && t->ops[i].kind == FSDP_OP_ALL_REDUCE;
        if ((reads || sums) && at >= 0 && t->uses[at].pool == use->pool &&
            t->uses[at].bytes == use->bytes)
            return 1;
    }
    return 0;
}

/* Places the pieces as the pools would: slots per size, the least recently released one first.
   deep: two slots from the beginning where one is filled while the other is in use. again: all
   slots that the last call has found, as in pools that earlier steps have filled. */
static void fsdpi_plan_pool_fit(const fsdpi_plan_tape *t, fsdpi_plan_places *pl, int deep,
                                int again) {
    int num = 0; // slots; order[n]: the last piece in slot n
    pl->bytes = 0;
    for (int i = 0; i < pl->num; i++) {
        fsdpi_plan_piece *piece = &pl->pieces[i];
        int best = -1, slots = 0;
        for (int n = 0; n < num; n++) {
            const fsdpi_plan_piece *other = &pl->pieces[pl->order[n]];
            if (other->bytes != piece->bytes ||
                t->uses[other->head].pool != t->uses[piece->head].pool)
                continue;
            slots++;
            if (other->to < piece->from && (best < 0 || other->to < pl->pieces[pl->order[best]].to))
                best = n;
        }
        int depth = deep && slots == 1 && fsdpi_plan_is_ahead(t, &t->uses[piece->head]) ? 2 : 1;
        if (again) depth = pl->alike[i];
        if (best < 0 || slots < depth) {
            best = num++;
            piece->offset = pl->bytes;
            pl->bytes += piece->bytes;
        } else {
            piece->offset = pl->pieces[pl->order[best]].offset;
        }
        pl->order[best] = i;
    }
    for (int i = 0; i < pl->num; i++) {
        const fsdpi_plan_piece *piece = &pl->pieces[i];
        pl->alike[i] = 0;
        for (int n = 0; n < num; n++) {
            const fsdpi_plan_piece *other = &pl->pieces[pl->order[n]];
            pl->alike[i] += other->bytes == piece->bytes &&
                            t->uses[other->head].pool == t->uses[piece->head].pool;
        }
    }
}

// Returns the most bytes held at one op: a lower bound for any placement.
static int64_t fsdpi_plan_bound(const fsdpi_plan_places *pl) {
    int64_t most = 0;
    for (int i = 0; i < pl->num; i++) { // some piece begins where it is reached
        int64_t now = 0;
        for (int k = 0; k < pl->num; k++)
            if (pl->pieces[k].from <= pl->pieces[i].from && pl->pieces[k].to >= pl->pieces[i].from)
                now += pl->pieces[k].bytes;
        if (now > most) most = now;
    }
    return most;
}

static fsdp_status fsdpi_plan_slot_for(fsdp_plan *p, fsdpi_plan_listing *l, fsdpi_plan_use *use,
                                       int64_t offset) {
    fsdpi_plan_slot slot = {offset, use->bytes, use->pool, 0};
    for (int i = 0; i < l->num_slots && offset >= 0; i++)
        if (l->slots[i].offset == offset && l->slots[i].bytes == use->bytes &&
            l->slots[i].pool == use->pool) {
            use->slot = i;
            return FSDP_OK;
        }
    fsdp_status status = fsdpi_plan_grow(p->model, (void **)&l->slots, l->num_slots, &l->cap_slots,
                                         sizeof slot);
    use->slot = l->num_slots;
    if (!status) l->slots[l->num_slots++] = slot;
    return status;
}

static void fsdpi_plan_places_end(fsdp_plan *p, fsdpi_plan_places *pl) {
    fsdpi_plan_free(p->model, pl->pieces);
    fsdpi_plan_free(p->model, pl->order);
    fsdpi_plan_free(p->model, pl->kept);
    fsdpi_plan_free(p->model, pl->alike);
}

/* Returns the slot that a unit held when the step began, and released before it took one that it
   holds at the end: it gets that slot again. So a step leaves units as it found them, and the
   next step is of the same variant. NULL: none. */
static fsdp_buf *fsdpi_plan_carried_slot(const fsdpi_plan_tape *t, const fsdp_unit *unit,
                                         const fsdpi_plan_use *use) {
    for (int i = 0; i < use->from && i < t->num_ops; i++)
        if (t->ops[i].kind == FSDP_OP_RELEASE && t->pairs[i].src < 0 && t->ops[i].unit == unit &&
            t->ops[i].pool == use->pool && fsdp_buf_nbytes(t->ops[i].src) >= use->bytes)
            return t->ops[i].src;
    return NULL;
}

// Places all uses of a tape: sets l->slots, l->bytes and l->bound. eager: as the pools do.
static fsdp_status fsdpi_plan_place(fsdp_plan *p, fsdpi_plan_tape *t, fsdpi_plan_listing *l,
                                    uint32_t passes, int eager) {
    fsdpi_plan_places pl;
    size_t room = (size_t)t->num_uses;
    int64_t lasting = 0;
    memset(&pl, 0, sizeof pl);
    l->num_slots = 0;
    fsdp_status status = fsdpi_plan_alloc(p->model, room * sizeof *pl.pieces, (void **)&pl.pieces);
    if (!status) status = fsdpi_plan_alloc(p->model, room * 4, (void **)&pl.order);
    if (!status) status = fsdpi_plan_alloc(p->model, room * 8, (void **)&pl.kept);
    if (!status) status = fsdpi_plan_alloc(p->model, room * 4, (void **)&pl.alike);
    for (int i = 0; i < t->num_uses && !status; i++) {
        fsdpi_plan_piece piece = fsdpi_plan_piece_of(t, i);
        if (t->uses[i].is_adjacent) continue;
        if (piece.to >= t->num_ops) {
            status = fsdpi_plan_slot_for(p, l, &t->uses[i], -1);
            if (!status)
                l->slots[t->uses[i].slot].carried_over =
                    fsdpi_plan_carried_slot(t, p->units[t->uses[i].unit], &t->uses[i]) != NULL;
            lasting += t->uses[i].bytes;
        } else {
            pl.pieces[pl.num++] = piece;
        }
    }
    int inlined = p->mode_of_world == FSDP_RUN_INLINE;
    if (!status) {
        l->bound = fsdpi_plan_bound(&pl) + lasting;
        int64_t arena = INT64_MAX;
        if (passes & 1u << FSDP_PASS_ARENA && inlined) {
            fsdpi_plan_best_fit(&pl);
            arena = pl.bytes;
        }
        fsdpi_plan_pool_fit(t, &pl, !inlined, 0);
        if (eager) fsdpi_plan_pool_fit(t, &pl, !inlined, 1);
        if (arena < pl.bytes - pl.bytes / 20) {
            for (int i = 0; i < pl.num; i++) pl.pieces[i].offset = pl.kept[i];
            pl.bytes = arena;
        }
    }
    for (int i = 0; i < pl.num && !status; i++) {
        int64_t at = pl.pieces[i].offset;
        for (int u = pl.pieces[i].head; u >= 0 && !status; u = t->uses[u].next_adjacent) {
            status = fsdpi_plan_slot_for(p, l, &t->uses[u], at);
            at += t->uses[u].bytes;
        }
    }
    l->bytes = pl.bytes + lasting;
    fsdpi_plan_places_end(p, &pl);
    return status;
}

#endif // FSDPI_PLAN_PLACE_H
