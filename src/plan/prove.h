/* plan/prove.h - the proof that a plan may run

   Callers: programs and make.h (fsdpi_plan_prove_one).

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_PROVE_H
#define FSDPI_PLAN_PROVE_H

#include "../core/step.h"
#include "listing.h"
#include "memory.h"
#include "objects.h"
#include "text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Proves listings, or refutes them. docs/plan.md lists what is proven and assumed. A listing is
// walked in the order of issue. Each stream has a vector clock, each piece of memory the clocks of
// its last accesses. The caller acts on COMPUTE: it reads gathered parameters until they are
// released, and writes gradients until GRADS_WRITTEN. The rules of waits and of bytes are written
// here again (fsdpi_plan_derive, fsdpi_plan_check_numbers) and not taken from core/run.h: so the
// proof checks the core's rules, too.

// An access: its stream, the stream's tick and, for the text, the line.
typedef struct fsdpi_plan_touch {
    int32_t stream, line, call; // line -1: the caller's own
    uint32_t tick;              // 0: none
} fsdpi_plan_touch;

typedef struct fsdpi_plan_clock {
    uint32_t at[FSDP_STREAM_COUNT];
} fsdpi_plan_clock;

typedef struct fsdpi_plan_mark { // an event
    fsdpi_plan_clock clock;
    int32_t stream, is_set;
} fsdpi_plan_mark;

// A slot, or a unit's part of a block.
typedef struct fsdpi_plan_region {
    fsdpi_plan_touch write, read[FSDP_STREAM_COUNT];
    fsdpi_plan_mark ready, avail; // events of a slot, or of a whole block
    int32_t unit, held;           // held: 1: the unit holds the slot
    int32_t full, version;        // full: gather 1: issued, 2: waited for, 3: read
    int32_t grads;                // FSDPI_PLAN_EMPTY, ...
    int32_t summed;               // 1: over replicas, in place
} fsdpi_plan_region;

// State of gradients in a slot.
enum {
    FSDPI_PLAN_EMPTY,
    FSDPI_PLAN_TOUCHED, // the caller has written them, and no op reports it
    FSDPI_PLAN_FRESH,   // no reduction has read them
    FSDPI_PLAN_TAKEN    // a reduction has
};

// Slots of the arena, sorted by offset, to find those that share memory.
typedef struct fsdpi_plan_reach {
    int64_t offset, end; // end: the largest one up to here
    int32_t slot;
} fsdpi_plan_reach;

typedef struct fsdpi_plan_prover {
    fsdp_model *model;
    const fsdpi_plan_listing *l;
    fsdp_plan_proof *out;
    fsdpi_plan_clock now[FSDP_STREAM_COUNT];
    fsdpi_plan_region *slots, *shards, *grads; // [fsdpi_plan_events], [units], [units]
    fsdpi_plan_reach *reach;                   // [num_reach]
    int32_t *upto, num_reach;                  // [slots] last index in `reach` that may share
    int32_t *version, *gathered, *written;     // [units] of shards; slots of parameters, gradients
    int32_t *collects, *opened;                // [units] gathers from others; the caller reads now
    // By group and label: the first collective of this sort; tick 0: none.
    fsdpi_plan_touch first[FSDPI_PLAN_COMMS][FSDP_LABEL_COUNT];
    int64_t held_bytes, arena;
    int32_t call, line, walk;
} fsdpi_plan_prover;

static int fsdpi_plan_actor(const fsdpi_plan_prover *v, int stream) {
    return v->l->mode == FSDP_RUN_INLINE ? FSDP_STREAM_COMPUTE : stream;
}

static void fsdpi_plan_say_call(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int call) {
    fsdpi_plan_put(o, "call %d %s", call, fsdpi_call_name(l->calls[call].call));
    if (l->calls[call].index >= 0) fsdpi_plan_put_unit(o, l, l->calls[call].index);
}

static void fsdpi_plan_say_line(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int line) {
    const fsdpi_plan_line *at = &l->lines[line];
    const fsdpi_plan_member *m = &l->members[at->members];
    fsdpi_plan_put(o, "op %d %s", line, fsdp_op_name(at->kind));
    fsdpi_plan_put_unit(o, l, m->unit);
    if (at->num_members > 1) {
        fsdpi_plan_put(o, " ..");
        fsdpi_plan_put_unit(o, l, m[at->num_members - 1].unit);
    }
}

static void fsdpi_plan_refuted(fsdpi_plan_prover *v, int how) {
    if (!v->out->refuted) v->out->refuted = how;
}

// Returns the buffer for the two lines of a counterexample. Only the first refutation counts.
static fsdpi_plan_out fsdpi_plan_counter(const fsdpi_plan_prover *v) {
    fsdpi_plan_out o = {v->out->text, sizeof v->out->text, 0, 0};
    if (v->out->refuted) o.buf = NULL, o.cap = 0;
    return o;
}

static void fsdpi_plan_say_place(fsdpi_plan_out *o, const fsdpi_plan_prover *v, int place) {
    const fsdpi_plan_slot *slot = place >= 0 ? &v->l->slots[place] : NULL;
    fsdpi_plan_put_place(o, place);
    if (slot && slot->offset >= 0)
        fsdpi_plan_put(o, " [%lld, %lld)", (long long)slot->offset,
                       (long long)(slot->offset + slot->bytes));
}

static void fsdpi_plan_say_touch(fsdpi_plan_out *o, const fsdpi_plan_prover *v,
                                 const fsdpi_plan_touch *t) {
    fsdpi_plan_say_call(o, v->l, t->call);
    fsdpi_plan_put(o, ":");
    if (t->line < 0) fsdpi_plan_put(o, " the caller on COMPUTE");
    else {
        fsdpi_plan_put(o, " ");
        fsdpi_plan_say_line(o, v->l, t->line);
        fsdpi_plan_put(o, " on %s", fsdpi_plan_streams[t->stream]);
    }
}

// Refutes: two accesses, one of them a write, are not ordered by an event.
static void fsdpi_plan_race(fsdpi_plan_prover *v, const fsdpi_plan_touch *now, int place,
                            int writes, const fsdpi_plan_touch *then, int wrote) {
    fsdpi_plan_out o = fsdpi_plan_counter(v);
    fsdpi_plan_say_touch(&o, v, now);
    fsdpi_plan_put(&o, writes ? " writes" : " reads");
    fsdpi_plan_say_place(&o, v, place);
    fsdpi_plan_put(&o, "\n");
    fsdpi_plan_say_touch(&o, v, then);
    fsdpi_plan_put(&o, " has %s it last, and no event lies between", wrote ? "written" : "read");
    fsdpi_plan_refuted(v, FSDP_PROOF_RACE);
}

static int fsdpi_plan_is_ordered(const fsdpi_plan_prover *v, const fsdpi_plan_touch *then,
                                 int stream) {
    return then->tick <= v->now[stream].at[then->stream];
}

static void fsdpi_plan_check_touch(fsdpi_plan_prover *v, const fsdpi_plan_region *r, int place,
                                   const fsdpi_plan_touch *now, int writes) {
    if (!fsdpi_plan_is_ordered(v, &r->write, now->stream))
        fsdpi_plan_race(v, now, place, writes, &r->write, 1);
    for (int s = 0; s < FSDP_STREAM_COUNT && writes; s++)
        if (!fsdpi_plan_is_ordered(v, &r->read[s], now->stream))
            fsdpi_plan_race(v, now, place, writes, &r->read[s], 0);
}

static int fsdpi_plan_overlap(const fsdpi_plan_slot *a, const fsdpi_plan_slot *b) {
    return a->offset >= 0 && b->offset >= 0 && a->offset < b->offset + b->bytes &&
           b->offset < a->offset + a->bytes;
}

static int fsdpi_plan_by_offset(const void *a, const void *b) {
    int64_t x = ((const fsdpi_plan_reach *)a)->offset, y = ((const fsdpi_plan_reach *)b)->offset;
    return (x > y) - (x < y);
}

static fsdp_status fsdpi_plan_find_reach(fsdpi_plan_prover *v) {
    const fsdpi_plan_listing *l = v->l;
    size_t num = (size_t)l->num_slots;
    fsdp_status status = fsdpi_plan_alloc(v->model, num * sizeof *v->reach, (void **)&v->reach);
    if (!status) status = fsdpi_plan_alloc(v->model, num * sizeof *v->upto, (void **)&v->upto);
    if (status) return status;
    for (int i = 0; i < l->num_slots; i++) {
        const fsdpi_plan_slot *slot = &l->slots[i];
        fsdpi_plan_reach reach = {slot->offset, slot->offset + slot->bytes, i};
        if (slot->offset >= 0) v->reach[v->num_reach++] = reach;
    }
    qsort(v->reach, (size_t)v->num_reach, sizeof *v->reach, fsdpi_plan_by_offset);
    for (int i = 1; i < v->num_reach; i++)
        if (v->reach[i].end < v->reach[i - 1].end) v->reach[i].end = v->reach[i - 1].end;
    for (int i = 0; i < l->num_slots; i++) {
        int64_t end = l->slots[i].offset + l->slots[i].bytes;
        int low = 0, high = l->slots[i].offset >= 0 ? v->num_reach : 0;
        while (low < high) { // number that begin before its end
            int middle = low + (high - low) / 2;
            if (v->reach[middle].offset < end) low = middle + 1;
            else high = middle;
        }
        v->upto[i] = low - 1;
    }
    return FSDP_OK;
}

// Returns the next slot, from `reach[*at]` down, that shares memory with a slot; -1: none.
static int fsdpi_plan_shares(const fsdpi_plan_prover *v, int place, int *at) {
    const fsdpi_plan_slot *slots = v->l->slots;
    while (*at >= 0 && v->reach[*at].end > slots[place].offset) {
        int i = v->reach[(*at)--].slot;
        if (i != place && fsdpi_plan_overlap(&slots[i], &slots[place])) return i;
    }
    return -1;
}

// Notes an access of a unit's parameters or gradients, or of a slot. Checks it against all that
// share memory.
static void fsdpi_plan_access(fsdpi_plan_prover *v, int unit, int place, int stream, int line,
                              int writes) {
    const fsdpi_plan_listing *l = v->l;
    fsdpi_plan_touch now = {stream, line, v->call, v->now[stream].at[stream]};
    int event = fsdpi_plan_event_of(l, unit, place),
        is_block = place == FSDPI_PLAN_SHARDS || place == FSDPI_PLAN_GRADS;
    if (event < 0 || (is_block && unit < 0)) return;
    fsdpi_plan_region *r = !is_block                    ? &v->slots[event]
                           : place == FSDPI_PLAN_SHARDS ? &v->shards[unit]
                                                        : &v->grads[unit];
    v->out->accesses++;
    for (int i, at = place >= 0 ? v->upto[place] : -1; (i = fsdpi_plan_shares(v, place, &at)) >= 0;)
        fsdpi_plan_check_touch(v, &v->slots[i], place, &now, writes);
    fsdpi_plan_check_touch(v, r, place, &now, writes);
    if (writes) r->write = now;
    else r->read[stream] = now;
}

static void fsdpi_plan_join_clock(fsdpi_plan_prover *v, int stream, const fsdpi_plan_mark *mark) {
    int adds = 0;
    if (!mark->is_set || mark->stream == stream) return;
    for (int s = 0; s < FSDP_STREAM_COUNT; s++) {
        adds |= mark->clock.at[s] > v->now[stream].at[s];
        if (mark->clock.at[s] > v->now[stream].at[s]) v->now[stream].at[s] = mark->clock.at[s];
    }
    v->out->waits++;
    v->out->waits_implied += !adds;
}

static void fsdpi_plan_set_mark(const fsdpi_plan_prover *v, int stream, fsdpi_plan_mark *mark) {
    mark->clock = v->now[stream];
    mark->stream = stream;
    mark->is_set = 1;
}

// Returns the region with the events of a place; NULL: none.
static fsdpi_plan_region *fsdpi_plan_events_of(fsdpi_plan_prover *v, int unit, int place) {
    int event = fsdpi_plan_event_of(v->l, unit, place);
    return event >= 0 ? &v->slots[event] : NULL;
}

// Applies the rule of waits. A read waits for the last write. A write waits for the last write, or
// for the slot's release if that is later.
static void fsdpi_plan_derive(fsdpi_plan_prover *v, int stream, const fsdpi_plan_region *src,
                              const fsdpi_plan_region *dst) {
    if (src) fsdpi_plan_join_clock(v, stream, &src->ready);
    if (dst && dst != src)
        fsdpi_plan_join_clock(v, stream, dst->avail.is_set ? &dst->avail : &dst->ready);
}

// Refutes with two lines of text: one describes the current line, the other the error.
static void fsdpi_plan_wrong(fsdpi_plan_prover *v, int how, const char *what, int unit, int place) {
    fsdpi_plan_out o = fsdpi_plan_counter(v);
    fsdpi_plan_say_call(&o, v->l, v->call);
    if (v->line >= 0) {
        fsdpi_plan_put(&o, ": ");
        fsdpi_plan_say_line(&o, v->l, v->line);
    }
    fsdpi_plan_put(&o, "\n%s", what);
    if (unit >= 0) fsdpi_plan_put_unit(&o, v->l, unit);
    if (place != FSDPI_PLAN_NONE) fsdpi_plan_say_place(&o, v, place);
    fsdpi_plan_refuted(v, how);
}

/* -------------------------------------------------------------------------------------------- */
// Effects of a line on slots.

// Returns the bytes that a unit's slot must have; 0: texts do not contain them.
static int64_t fsdpi_plan_needs(const fsdpi_plan_listing *l, int pool, int unit) {
    if (unit < 0) return 0;
    return pool == FSDP_POOL_GATHER ? l->units[unit].gather_bytes
           : pool == FSDP_POOL_GRAD ? l->units[unit].grad_bytes
                                    : 0;
}

static void fsdpi_plan_see_acquire(fsdpi_plan_prover *v, const fsdpi_plan_member *m) {
    const fsdpi_plan_listing *l = v->l;
    if (m->dst < 0) return;
    fsdpi_plan_region *r = &v->slots[m->dst];
    const fsdpi_plan_slot *slot = &l->slots[m->dst];
    if (r->held) fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "the slot is held by", r->unit, m->dst);
    for (int i, at = v->upto[m->dst]; (i = fsdpi_plan_shares(v, m->dst, &at)) >= 0;)
        if (v->slots[i].held)
            fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "its memory is held by", v->slots[i].unit, i);
    if (slot->offset >= 0 && slot->offset + slot->bytes > v->arena)
        fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "the arena ends before", -1, m->dst);
    r->held = 1;
    r->unit = m->unit;
    r->full = r->summed = 0;
    r->grads = FSDPI_PLAN_EMPTY;
    v->held_bytes += slot->bytes;
    if (v->held_bytes > v->out->bytes) v->out->bytes = v->held_bytes;
    if (v->held_bytes > l->bytes)
        fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "slots need more bytes than the plan has, with", -1,
                         m->dst);
    if (slot->bytes < fsdpi_plan_needs(l, slot->pool, m->unit))
        fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "the slot is too small for", m->unit, m->dst);
    if (slot->pool == FSDP_POOL_GRAD && m->unit >= 0) v->written[m->unit] = m->dst;
    if (slot->pool != FSDP_POOL_GATHER || m->unit < 0) return;
    v->gathered[m->unit] = m->dst;
}

static void fsdpi_plan_see_release(fsdpi_plan_prover *v, const fsdpi_plan_line *line,
                                   const fsdpi_plan_member *m) {
    int actor = fsdpi_plan_actor(v, line->stream);
    fsdpi_plan_region *r = fsdpi_plan_events_of(v, m->unit, m->src);
    if (r && m->src < 0 && !r->avail.is_set) fsdpi_plan_set_mark(v, actor, &r->avail);
    if (m->src < 0) return;
    if (!r->held) fsdpi_plan_wrong(v, FSDP_PROOF_USE, "nobody holds", -1, m->src);
    else if (r->unit != m->unit)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "it is held by", r->unit, m->src);
    if (r->grads == FSDPI_PLAN_TOUCHED || r->grads == FSDPI_PLAN_FRESH)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "gradients are in no reduction: those of", m->unit,
                         m->src);
    if (v->l->slots[m->src].pool == FSDP_POOL_GATHER && r->full)
        fsdpi_plan_access(v, m->unit, m->src, FSDP_STREAM_COMPUTE, -1, 0);
    if (!r->avail.is_set) fsdpi_plan_set_mark(v, actor, &r->avail);
    r->held = 0;
    v->held_bytes -= v->l->slots[m->src].bytes;
    if (m->unit >= 0 && v->gathered[m->unit] == m->src) v->gathered[m->unit] = -1;
    if (m->unit >= 0 && v->written[m->unit] == m->src) v->written[m->unit] = -1;
}

// Returns 1 if a unit has gradients with elements. Slots of other units are not checked.
static int fsdpi_plan_has_grads(const fsdpi_plan_prover *v, int unit) {
    return unit < 0 || v->l->units[unit].grad_bytes > 0;
}

static void fsdpi_plan_see_wrote(fsdpi_plan_prover *v, const fsdpi_plan_member *m) {
    fsdpi_plan_region *r = fsdpi_plan_events_of(v, m->unit, m->dst);
    if (!r) return;
    if (fsdpi_plan_has_grads(v, m->unit))
        fsdpi_plan_access(v, m->unit, m->dst, FSDP_STREAM_COMPUTE, -1, 1);
    fsdpi_plan_set_mark(v, FSDP_STREAM_COMPUTE, &r->ready);
    if (m->dst < 0) return;
    if (!v->slots[m->dst].held) fsdpi_plan_wrong(v, FSDP_PROOF_USE, "nobody holds", -1, m->dst);
    else if (v->slots[m->dst].unit != m->unit)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "it is held by", v->slots[m->dst].unit, m->dst);
    if (v->slots[m->dst].grads == FSDPI_PLAN_TAKEN)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "a reduction has read gradients: those of", m->unit,
                         m->dst);
    if (fsdpi_plan_has_grads(v, m->unit)) v->slots[m->dst].grads = FSDPI_PLAN_FRESH;
}

// Checks and updates gradients in a slot: zeroed, copied, reduced.
static void fsdpi_plan_see_grads(fsdpi_plan_prover *v, const fsdpi_plan_line *line,
                                 const fsdpi_plan_member *m) {
    fsdpi_plan_region *src = m->src >= 0 ? &v->slots[m->src] : NULL,
                      *dst = m->dst >= 0 ? &v->slots[m->dst] : NULL;
    int sums = line->label == FSDP_LABEL_ACC || line->label == FSDP_LABEL_REDUCE ||
               line->label == FSDP_LABEL_PARTIAL || line->label == FSDP_LABEL_REPLICAS ||
               line->label == FSDP_LABEL_RED_OUT;
    if (!fsdpi_plan_has_grads(v, m->unit)) {
        if (line->kind == FSDP_OP_COPY && line->label == FSDP_LABEL_ACC)
            fsdpi_plan_wrong(v, FSDP_PROOF_USE,
                             "its gradients have no elements, says the head:", m->unit,
                             FSDPI_PLAN_NONE);
        return;
    }
    if (dst && line->label == FSDP_LABEL_GRADS && dst->grads != FSDPI_PLAN_EMPTY &&
        line->kind == FSDP_OP_ZERO)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "gradients are there already: those of", m->unit,
                         m->dst);
    if (dst && dst->summed && line->kind != FSDP_OP_WAIT && line->kind != FSDP_OP_CALL &&
        src == dst)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "they are summed over replicas already: those of",
                         m->unit, m->dst);
    if (!sums || line->kind == FSDP_OP_WAIT) return;
    if (dst && line->kind == FSDP_OP_ZERO && dst->grads != FSDPI_PLAN_EMPTY)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "gradients are there already: those of", m->unit,
                         m->dst);
    if (dst && m->src <= FSDPI_PLAN_HELD) dst->grads = FSDPI_PLAN_FRESH; // from an earlier step
    if (!src) return;
    // Copies take parts of a slot, so there may be several; a collective takes all of it.
    if (src->grads != FSDPI_PLAN_FRESH &&
        (src->grads != FSDPI_PLAN_TAKEN || line->kind != FSDP_OP_COPY || src == dst))
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "no gradients wait there: those of", m->unit, m->src);
    if (src != dst) src->grads = FSDPI_PLAN_TAKEN;
    if (src != dst && dst) dst->grads = FSDPI_PLAN_FRESH;
    if (dst) dst->summed = line->label == FSDP_LABEL_REPLICAS;
}

static void fsdpi_plan_see_gather(fsdpi_plan_prover *v, const fsdpi_plan_line *line,
                                  const fsdpi_plan_member *m) {
    int fills = line->kind == FSDP_OP_ALL_GATHER ||
                (m->unit >= 0 && !v->collects[m->unit] && line->label == FSDP_LABEL_COPY_IN);
    int copies = line->kind == FSDP_OP_COPY && line->label == FSDP_LABEL_COPY_IN;
    int gathers = line->label == FSDP_LABEL_GATHER || line->label == FSDP_LABEL_COPY_IN ||
                  line->label == FSDP_LABEL_COPY_OUT || line->label == FSDP_LABEL_PRE_GATHER ||
                  line->label == FSDP_LABEL_POST_GATHER || line->label == FSDP_LABEL_NONE;
    if (m->dst >= 0 && !gathers && v->l->slots[m->dst].pool == FSDP_POOL_GATHER)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "parameters lie there: those of", m->unit, m->dst);
    if (m->dst >= 0 && m->unit >= 0 && v->slots[m->dst].full && copies && v->collects[m->unit])
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "it is gathered already:", m->unit, m->dst);
    if (m->dst >= 0 && line->kind == FSDP_OP_COPY && line->label == FSDP_LABEL_COPY_OUT &&
        (v->slots[m->dst].full == 0 || v->slots[m->dst].full == 3))
        fsdpi_plan_wrong(v, FSDP_PROOF_USE,
                         v->slots[m->dst].full ? "it is in use:" : "nothing was gathered:", m->unit,
                         m->dst);
    if (m->dst >= 0 && fills && m->unit >= 0) {
        if (v->slots[m->dst].full && line->kind == FSDP_OP_ALL_GATHER)
            fsdpi_plan_wrong(v, FSDP_PROOF_USE, "it is gathered already:", m->unit, m->dst);
        v->slots[m->dst].full = 1;
        v->slots[m->dst].version = v->version[m->unit];
    }
    if (line->kind == FSDP_OP_WAIT && line->label == FSDP_LABEL_GATHER && m->src >= 0 &&
        line->stream == FSDP_STREAM_COMPUTE && v->slots[m->src].full == 1)
        v->slots[m->src].full = 2;
}

/* Checks that all collectives of one sort on a group are on one stream, so that they begin in
   the order of issue on all ranks. A world with one communicator runs gathers and reductions on
   two streams; then the backend keeps the order of issue. */
static void fsdpi_plan_see_comm(fsdpi_plan_prover *v, const fsdpi_plan_line *line) {
    if (line->comm < 0) return;
    fsdpi_plan_touch now = {line->stream, v->line, v->call, 1},
                     *first = &v->first[line->comm][line->label];
    if (!first->tick) *first = now;
    if (first->stream == now.stream) return;
    fsdpi_plan_out o = fsdpi_plan_counter(v);
    fsdpi_plan_say_touch(&o, v, &now);
    fsdpi_plan_put(&o, " runs on %s\n", v->l->comms[line->comm]);
    fsdpi_plan_say_touch(&o, v, first);
    fsdpi_plan_put(&o, " is of the same sort, and nothing orders the two on all ranks");
    fsdpi_plan_refuted(v, FSDP_PROOF_DEADLOCK);
}

static void fsdpi_plan_see_op(fsdpi_plan_prover *v, const fsdpi_plan_line *line) {
    int actor = fsdpi_plan_actor(v, line->stream);
    const fsdpi_plan_member *m = &v->l->members[line->members];
    v->out->ops++;
    v->now[actor].at[actor]++;
    fsdpi_plan_see_comm(v, line);
    // The other members have ops of their own for it.
    fsdpi_plan_region *dst_events = fsdpi_plan_events_of(v, m->unit, m->dst);
    fsdpi_plan_derive(v, actor, fsdpi_plan_events_of(v, m->unit, m->src), dst_events);
    if (dst_events) dst_events->avail.is_set = 0;
    for (int i = 0; i < line->num_members; i++) {
        int src = m[i].src, dst = m[i].dst, uses = line->kind == FSDP_OP_WAIT;
        for (int k = 0; k < 2; k++)
            if ((k ? dst : src) >= 0 && !v->slots[k ? dst : src].held)
                fsdpi_plan_wrong(v, FSDP_PROOF_USE, "nobody holds", -1, k ? dst : src);
            else if ((k ? dst : src) >= 0 && m[i].unit != v->slots[k ? dst : src].unit)
                fsdpi_plan_wrong(v, FSDP_PROOF_USE, "it is held by", v->slots[k ? dst : src].unit,
                                 k ? dst : src);
        if (!uses && src != FSDPI_PLAN_NONE)
            fsdpi_plan_access(v, m[i].unit, src, actor, v->line, 0);
        if (!uses && dst != FSDPI_PLAN_NONE)
            fsdpi_plan_access(v, m[i].unit, dst, actor, v->line, 1);
        fsdpi_plan_see_grads(v, line, &m[i]);
        fsdpi_plan_see_gather(v, line, &m[i]);
        if (line->label == FSDP_LABEL_GRAD_HOOK && m[i].unit >= 0) v->version[m[i].unit]++;
    }
    if (dst_events) fsdpi_plan_set_mark(v, actor, &dst_events->ready);
}

// Handles the beginning or end of a call. After a post_* call the caller may not read what it read
// before.
static void fsdpi_plan_see_call(fsdpi_plan_prover *v, int ends) {
    const fsdpi_plan_call *call = &v->l->calls[v->call];
    int u = call->index, slot = u >= 0 ? v->gathered[u] : -1;
    int posts = call->call == FSDP_CALL_POST_FORWARD || call->call == FSDP_CALL_POST_BACKWARD;
    int back = call->call == FSDP_CALL_PRE_BACKWARD || call->call == FSDP_CALL_POST_BACKWARD;
    int reads = u >= 0 && call->call <= FSDP_CALL_POST_BACKWARD && v->l->units[u].reads & 1 << back;
    v->line = -1;
    if (!ends) {
        v->now[FSDP_STREAM_COMPUTE].at[FSDP_STREAM_COMPUTE]++;
        if (posts && u >= 0 && v->opened[u] && (slot < 0 || v->slots[slot].full < 3))
            fsdpi_plan_wrong(v, FSDP_PROOF_USE, "its parameters were freed while in use:", u,
                             FSDPI_PLAN_NONE);
        if (posts && u >= 0) v->opened[u] = 0;
        if (posts && slot >= 0 && v->slots[slot].full > !reads) // else only waited-for ones
            fsdpi_plan_access(v, u, slot, FSDP_STREAM_COMPUTE, -1, 0);
        int writes = call->call == FSDP_CALL_POST_BACKWARD && fsdpi_plan_has_grads(v, u),
            grads = u >= 0 && writes ? v->written[u] : -1;
        if (grads >= 0) {
            fsdpi_plan_access(v, u, grads, FSDP_STREAM_COMPUTE, -1, 1);
            if (v->slots[grads].grads == FSDPI_PLAN_TAKEN)
                fsdpi_plan_wrong(v, FSDP_PROOF_USE, "a reduction has read gradients: those of", u,
                                 grads);
            v->slots[grads].grads = FSDPI_PLAN_TOUCHED;
        }
        return;
    }
    if (call->call == FSDP_CALL_PRE_BACKWARD && u >= 0 && v->written[u] >= 0 &&
        fsdpi_plan_has_grads(v, u)) // the caller writes from here on
        fsdpi_plan_access(v, u, v->written[u], FSDP_STREAM_COMPUTE, -1, 1);
    if (posts || !reads) return;
    if (slot < 0 || v->slots[slot].full < 2) {
        fsdpi_plan_wrong(v, FSDP_PROOF_USE,
                         slot < 0               ? "its parameters are not gathered:"
                         : !v->slots[slot].full ? "nothing was gathered to the slot of"
                                                : "nobody has waited for the gather of",
                         u, slot < 0 ? FSDPI_PLAN_NONE : slot);
    } else if (v->slots[slot].version != v->version[u]) {
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "shards were written after the gather of", u, slot);
    } else {
        fsdpi_plan_access(v, u, slot, FSDP_STREAM_COMPUTE, -1, 0);
        v->slots[slot].full = 3;
        v->opened[u] = 1;
    }
}

/* Models steps of other variants between two steps: they fill the slots that units hold at the
   beginning of this one, and reduce and release those held at its end. */
static void fsdpi_plan_see_between(fsdpi_plan_prover *v, fsdpi_plan_region *r) {
    fsdpi_plan_join_clock(v, FSDP_STREAM_COMPUTE, &r->ready);
    fsdpi_plan_join_clock(v, FSDP_STREAM_COMPUTE, &r->avail);
    fsdpi_plan_set_mark(v, FSDP_STREAM_COMPUTE, &r->ready);
    r->avail.is_set = 0;
    r->grads = FSDPI_PLAN_TAKEN;
}

/* Models the core's finalize: COMPUTE waits for shards, their gradients, and gathers without a
   wait (outstanding ones: in fsdp_params_writable). Then the caller writes shards. */
static void fsdpi_plan_see_end(fsdpi_plan_prover *v) {
    const fsdpi_plan_listing *l = v->l;
    fsdpi_plan_region *grads = fsdpi_plan_events_of(v, -1, FSDPI_PLAN_GRADS);
    fsdpi_plan_region *shards = fsdpi_plan_events_of(v, -1, FSDPI_PLAN_SHARDS);
    fsdpi_plan_join_clock(v, FSDP_STREAM_COMPUTE, &grads->ready);
    fsdpi_plan_join_clock(v, FSDP_STREAM_COMPUTE, &shards->ready); // hooks may have written them
    for (int i = 0; i < l->num_slots; i++)
        if (v->slots[i].held && v->slots[i].full == 1)
            fsdpi_plan_join_clock(v, FSDP_STREAM_COMPUTE, &v->slots[i].ready);
    v->line = -1;
    v->now[FSDP_STREAM_COMPUTE].at[FSDP_STREAM_COMPUTE]++;
    for (int u = 0; u < l->num_units; u++) {
        if (fsdpi_plan_has_grads(v, u))
            fsdpi_plan_access(v, u, FSDPI_PLAN_GRADS, FSDP_STREAM_COMPUTE, -1, 0);
        fsdpi_plan_access(v, u, FSDPI_PLAN_SHARDS, FSDP_STREAM_COMPUTE, -1, 1);
        v->version[u]++;
    }
    fsdpi_plan_set_mark(v, FSDP_STREAM_COMPUTE, &shards->ready);
    for (int i = 0; i < fsdpi_plan_events(l); i++) {
        int lasts = i < l->num_slots && l->slots[i].offset < 0;
        if (lasts || i >= l->num_slots + 2) fsdpi_plan_see_between(v, &v->slots[i]);
    }
    for (int i = 0; i < l->num_slots; i++) {
        if (!v->slots[i].held) continue;
        if (l->slots[i].offset >= 0 && l->slots[i].pool != FSDP_POOL_GATHER)
            fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "held when the step ends, by", v->slots[i].unit,
                             i);
        // Finalize frees the slots of a unit that is open to the end.
        fsdpi_plan_member m = {v->slots[i].unit, i, FSDPI_PLAN_NONE};
        fsdpi_plan_line line;
        memset(&line, 0, sizeof line);
        line.stream = FSDP_STREAM_COMPUTE;
        fsdpi_plan_see_release(v, &line, &m);
    }
}

static void fsdpi_plan_walk(fsdpi_plan_prover *v) {
    const fsdpi_plan_listing *l = v->l;
    int line = 0;
    for (int u = 0; u < l->num_units; u++) v->opened[u] = 0;
    for (v->call = 0; v->call < l->num_calls && !v->out->refuted; v->call++) {
        fsdpi_plan_see_call(v, 0);
        for (; line < l->num_lines && l->lines[line].call == v->call; line++) {
            const fsdpi_plan_line *at = &l->lines[line];
            v->line = line;
            if (at->kind == FSDP_OP_ACQUIRE) fsdpi_plan_see_acquire(v, &l->members[at->members]);
            else if (at->kind == FSDP_OP_RELEASE)
                fsdpi_plan_see_release(v, at, &l->members[at->members]);
            else if (at->kind == FSDP_OP_GRADS_WRITTEN)
                fsdpi_plan_see_wrote(v, &l->members[at->members]);
            else fsdpi_plan_see_op(v, at);
        }
        fsdpi_plan_see_call(v, 1);
    }
    v->call = l->num_calls - 1;
    if (!v->out->refuted) fsdpi_plan_see_end(v);
}

// Checks an op's byte count against its element count and against the size of its slots.
static void fsdpi_plan_check_numbers(fsdpi_plan_prover *v, const fsdpi_plan_line *line) {
    const fsdpi_plan_listing *l = v->l;
    const fsdpi_plan_member *m = &l->members[line->members];
    uint64_t part = line->count * fsdp_dtype_size(line->dtype), room[2] = {0, 0};
    uint64_t size = (uint64_t)l->shards, replicas = (uint64_t)l->replicas, whole = part;
    int known[2] = {1, 1}, all = 1; // all: 1: the numbers agree
    for (int i = 0; i < line->num_members; i++)
        for (int k = 0; k < 2; k++) {
            int place = k ? m[i].dst : m[i].src;
            if (place >= 0) room[k] += (uint64_t)l->slots[place].bytes;
            else known[k] = 0;
        }
    switch (line->kind) {
    case FSDP_OP_COPY: all = line->bytes == line->count * fsdp_dtype_size(line->out_dtype); break;
    case FSDP_OP_ZERO: all = line->bytes == part; break;
    case FSDP_OP_ALL_GATHER:
    case FSDP_OP_REDUCE_SCATTER: // the group shards the unit, or is a part of that group
        whole = line->bytes + part;
        all = part > 0 && whole % part == 0 && size % (whole / part) == 0;
        break;
    case FSDP_OP_ALL_REDUCE:
        all = line->bytes == (2 * (replicas - 1) * part + replicas - 1) / replicas;
        break;
    default: return;
    }
    int reads = line->kind == FSDP_OP_REDUCE_SCATTER || line->kind == FSDP_OP_COPY;
    int writes = line->kind == FSDP_OP_ALL_GATHER || line->kind == FSDP_OP_ZERO;
    if (!all)
        fsdpi_plan_wrong(v, FSDP_PROOF_USE, "its bytes are not those of its elements:", m->unit,
                         FSDPI_PLAN_NONE);
    if ((reads && known[0] && whole > room[0]) || (writes && known[1] && whole > room[1]) ||
        (line->kind == FSDP_OP_COPY && known[1] && line->bytes > room[1]))
        fsdpi_plan_wrong(v, FSDP_PROOF_MEMORY, "it needs more bytes than its slots have:", m->unit,
                         FSDPI_PLAN_NONE);
}

/* Checks that a plan has no more collectives than the eager step, and gathers no more bytes.
   Bucketed reductions may read more bytes: waiting gradients are in reduce_dtype, others may be
   sent in the parameters' dtype. */
static void fsdpi_plan_check_calls(fsdpi_plan_prover *v) {
    const fsdpi_plan_listing *l = v->l;
    if (l->gathers[1] <= l->gathers[0] && l->reductions[1] <= l->reductions[0] &&
        l->replica_ops[1] <= l->replica_ops[0] && l->gather_bytes[1] <= l->gather_bytes[0])
        return;
    fsdpi_plan_out o = fsdpi_plan_counter(v);
    fsdpi_plan_put(&o, "eager: %d gathers of %llu bytes, %d reductions, %d over replicas\n",
                   l->gathers[0], (unsigned long long)l->gather_bytes[0], l->reductions[0],
                   l->replica_ops[0]);
    fsdpi_plan_put(&o, "the plan has more: %d of %llu, %d, %d", l->gathers[1],
                   (unsigned long long)l->gather_bytes[1], l->reductions[1], l->replica_ops[1]);
    fsdpi_plan_refuted(v, FSDP_PROOF_USE);
}

// Checks that the numbers in the head are those of the lines.
static void fsdpi_plan_check_counts(fsdpi_plan_prover *v) {
    const fsdpi_plan_listing *l = v->l;
    int gathers = 0, reductions = 0, replicas = 0, ops = 0;
    uint64_t gathered = 0, reduced = 0;
    for (int i = 0; i < l->num_lines; i++) {
        const fsdpi_plan_line *line = &l->lines[i];
        gathers += line->kind == FSDP_OP_ALL_GATHER;
        reductions += line->kind == FSDP_OP_REDUCE_SCATTER;
        replicas += line->kind == FSDP_OP_ALL_REDUCE;
        ops += line->kind < FSDP_OP_HOOK;
        if (line->kind == FSDP_OP_ALL_GATHER) gathered += line->bytes;
        else if (fsdpi_plan_is_collective(line->kind)) reduced += line->bytes;
        v->line = i;
        v->call = line->call;
        if (!v->out->refuted) fsdpi_plan_check_numbers(v, line);
    }
    if (v->out->refuted) return;
    fsdpi_plan_out o = fsdpi_plan_counter(v);
    if (gathers != l->gathers[1] || reductions != l->reductions[1] ||
        replicas != l->replica_ops[1] || ops != l->ops[1]) {
        fsdpi_plan_put(&o, "count gathers %d reductions %d replicas %d ops %d\n", l->gathers[1],
                       l->reductions[1], l->replica_ops[1], l->ops[1]);
        fsdpi_plan_put(&o, "the lines have %d, %d, %d and %d of them", gathers, reductions,
                       replicas, ops);
        fsdpi_plan_refuted(v, FSDP_PROOF_USE);
    } else if (gathered != l->gather_bytes[1] || reduced != l->reduce_bytes[1]) {
        fsdpi_plan_put(&o, "read gathers %llu reductions %llu\n",
                       (unsigned long long)l->gather_bytes[1],
                       (unsigned long long)l->reduce_bytes[1]);
        fsdpi_plan_put(&o, "the lines read %llu and %llu bytes", (unsigned long long)gathered,
                       (unsigned long long)reduced);
        fsdpi_plan_refuted(v, FSDP_PROOF_USE);
    }
    if (!v->out->refuted) fsdpi_plan_check_calls(v);
}

/* Proves one program, which every rank runs: three times, so that effects of a step's end on the
   next one are checked. Tables are of model m. */
static fsdp_status fsdpi_plan_prove_one(fsdp_model *m, const fsdpi_plan_listing *l,
                                        fsdp_plan_proof *out) {
    fsdpi_plan_prover v;
    size_t slots = (size_t)fsdpi_plan_events(l) * sizeof *v.slots,
           units = (size_t)l->num_units * sizeof *v.slots;
    memset(&v, 0, sizeof v);
    memset(out, 0, sizeof *out);
    v.model = m;
    v.l = l;
    v.out = out;
    v.arena = fsdpi_plan_arena_bytes(l);
    out->comms = l->num_comms;
    out->buffers = l->num_slots;
    fsdp_status status = fsdpi_plan_alloc(m, slots, (void **)&v.slots);
    if (!status) status = fsdpi_plan_find_reach(&v);
    if (!status) status = fsdpi_plan_alloc(m, units, (void **)&v.shards);
    if (!status) status = fsdpi_plan_alloc(m, units, (void **)&v.grads);
    if (!status) status = fsdpi_plan_alloc(m, (size_t)l->num_units * 4, (void **)&v.version);
    if (!status) status = fsdpi_plan_alloc(m, (size_t)l->num_units * 4, (void **)&v.gathered);
    if (!status) status = fsdpi_plan_alloc(m, (size_t)l->num_units * 4, (void **)&v.written);
    if (!status) status = fsdpi_plan_alloc(m, (size_t)l->num_units * 4, (void **)&v.collects);
    if (!status) status = fsdpi_plan_alloc(m, (size_t)l->num_units * 4, (void **)&v.opened);
    for (int u = 0; u < l->num_units && !status; u++) v.gathered[u] = v.written[u] = -1;
    for (int u = 0; u < l->num_units && !status; u++) v.collects[u] = l->shards > 1;
    for (v.walk = 0; v.walk < 3 && !status && !out->refuted; v.walk++) fsdpi_plan_walk(&v);
    if (!status && !out->refuted) fsdpi_plan_check_counts(&v);
    if (!status && !out->refuted)
        snprintf(out->text, sizeof out->text,
                 "proven: %lld ops and %lld accesses in %d walks, %lld bytes of %lld",
                 (long long)out->ops, (long long)out->accesses, v.walk, (long long)out->bytes,
                 (long long)l->bytes);
    fsdpi_plan_free(m, v.slots);
    fsdpi_plan_free(m, v.reach);
    fsdpi_plan_free(m, v.upto);
    fsdpi_plan_free(m, v.shards);
    fsdpi_plan_free(m, v.grads);
    fsdpi_plan_free(m, v.version);
    fsdpi_plan_free(m, v.gathered);
    fsdpi_plan_free(m, v.written);
    fsdpi_plan_free(m, v.opened);
    fsdpi_plan_free(m, v.collects);
    return status;
}

FSDP_API fsdp_status fsdp_plan_prove(const fsdp_plan *plan, int index, fsdp_plan_proof *out) {
    fsdp_status status =
        fsdpi_plan_check_index(plan, index, out != NULL, "plan_prove: plan or out");
    return status ? status
                  : fsdpi_plan_prove_one(plan->model, &plan->kinds[index]->listing, out);
}

#endif // FSDPI_PLAN_PROVE_H
