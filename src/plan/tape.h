/* plan/tape.h - dry runs: from a program and decisions to ops and states

   Makes fsdpi_plan_tape. A dry run of the program goes through the core's own rows. The decisions
   of the plan are executed there by public calls. So a program could reach every state of a replay
   itself, and can leave the plan at any call.
   Callers: join.h (fsdpi_plan_add_op), make.h (fsdpi_plan_tape_free), api.h (fsdpi_plan_tape_free)
     and others.

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_TAPE_H
#define FSDPI_PLAN_TAPE_H

#include "../core/error.h"
#include "../core/extend.h"
#include "memory.h"
#include "objects.h"
#include "replay.h"
#include "snapshot.h"

#include <string.h>

static void fsdpi_plan_tape_free(fsdp_plan *p, fsdpi_plan_tape *t) {
    for (int i = 0; i < t->num_made; i++) fsdpi_plan_free(p->model, t->made[i]);
    void *const lists[] = {t->ops,     t->pairs,     t->states, t->uses,    t->bufs,  t->made,
                           t->ops_at,  t->own,       t->groups, t->members, t->steps, t->own_end,
                           t->storage, t->states_at, t->held,   t->holds,   t->hooks};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) fsdpi_plan_free(p->model, lists[i]);
    memset(t, 0, sizeof *t);
}

static fsdp_status fsdpi_plan_tape_new(fsdp_plan *p, fsdpi_plan_tape *t, int num_calls) {
    int32_t **const lists[] = {&t->ops_at, &t->states_at, &t->own, &t->own_end};
    fsdp_status status = FSDP_OK;
    memset(t, 0, sizeof *t);
    for (size_t i = 0; i < sizeof lists / sizeof *lists && !status; i++)
        status = fsdpi_plan_alloc(p->model, (size_t)(num_calls + 1) * sizeof(int32_t),
                                  (void **)lists[i]);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)num_calls + 1, (void **)&t->storage);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)num_calls + 1, (void **)&t->holds);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)p->num_units, (void **)&t->held);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)(num_calls + 1) * sizeof *t->steps,
                                  (void **)&t->steps);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)num_calls * sizeof *t->hooks,
                                  (void **)&t->hooks);
    return status;
}

static fsdp_status fsdpi_plan_add_op(fsdp_plan *p, fsdpi_plan_tape *t, const fsdp_op *op,
                                     fsdpi_plan_pair pair) {
    fsdp_status status = fsdpi_plan_grow(p->model, (void **)&t->ops, t->num_ops, &t->cap_ops,
                                         sizeof *t->ops);
    if (!status)
        status = fsdpi_plan_grow(p->model, (void **)&t->pairs, t->num_ops, &t->cap_pairs,
                                 sizeof *t->pairs);
    if (status) return status;
    t->ops[t->num_ops] = *op;
    t->pairs[t->num_ops++] = pair;
    return FSDP_OK;
}

static fsdp_status fsdpi_plan_add_state(fsdp_plan *p, fsdpi_plan_tape *t, fsdp_unit *unit,
                                        const fsdpi_plan_saved *saved) {
    FSDPI_TRY(fsdpi_plan_grow(p->model, (void **)&t->states, t->num_states, &t->cap_states,
                              sizeof *t->states));
    t->states[t->num_states].unit = unit;
    memcpy(&t->states[t->num_states++].saved, saved, sizeof *saved); // padding too
    return FSDP_OK;
}

static int fsdpi_plan_index(const fsdp_unit *unit) { return unit ? unit->desc.index : -1; }

// Returns the bytes of the slots of one pool that a unit takes; 0: none.
static int64_t fsdpi_plan_slot_bytes(const fsdp_unit *unit, int pool) {
    int slots = unit->layout.classes[pool];
    return slots < 0 ? 0 : (int64_t)unit->model->classes[slots].bytes;
}

static int fsdpi_plan_holds(const fsdp_unit *unit) { // any slot
    int holds = 0;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_REDUCE_OUT; pool++)
        holds |= unit->state.slot[pool] != NULL;
    return holds;
}

static void fsdpi_plan_states_now(const fsdp_plan *p, fsdpi_plan_saved *out) {
    for (int i = 0; i < p->num_units; i++) fsdpi_plan_save_unit(p->units[i], &out[i]);
}

static void fsdpi_plan_restore_all(const fsdp_plan *p, const fsdpi_plan_saved *saved) {
    for (int i = 0; i < p->num_units; i++) fsdpi_plan_restore_unit(p->units[i], &saved[i]);
}

/* -------------------------------------------------------------------------------------------- */
// The dry run.

typedef struct fsdpi_plan_lowering {
    fsdp_plan *plan;
    fsdpi_plan_tape *tape;
    const fsdpi_plan_variant *kind;
    const fsdpi_plan_decisions *choice; // NULL: eager
    fsdp_buf *const *bufs;           // [uses]; NULL: buffers without memory
    int num_bufs;
    fsdp_status status;
    int own;                // the call whose own work is running; -1
    int64_t next;           // address of the next buffer without memory
    fsdpi_plan_saved *last; // [units] their states after the previous call
    uint8_t *seen;          // [units] outlines of these; 0: an op or an act since
    int32_t *acts;          // [num_acts][2] where the ops of each act begin and end
} fsdpi_plan_lowering;

// Returns the use that has a buffer now: the last one that acquired it.
static int fsdpi_plan_use_of(const fsdpi_plan_tape *t, const fsdp_buf *buf) {
    int i = buf ? t->num_uses - 1 : -1;
    while (i >= 0 && t->bufs[i] != buf) i--;
    return i;
}

// Returns a slot for each use, in the order of acquiring: `buffer` in the dry run.
static fsdp_buf *fsdpi_plan_lower_slot(void *user, fsdp_model *model, fsdp_unit *unit, int pool,
                                       fsdp_buf *released) {
    fsdpi_plan_lowering *s = (fsdpi_plan_lowering *)user;
    fsdpi_plan_tape *t = s->tape;
    fsdpi_plan_use use;
    fsdp_buf *buf = NULL;
    int n = t->num_uses;
    if (released) return NULL;
    memset(&use, 0, sizeof use);
    use.unit = fsdpi_plan_index(unit);
    use.pool = pool;
    use.bytes = fsdpi_plan_slot_bytes(unit, pool);
    use.slot = use.next_adjacent = -1;
    fsdp_status status = fsdpi_plan_grow(model, (void **)&t->uses, n, &t->cap_uses, sizeof use);
    if (!status)
        status = fsdpi_plan_grow(model, (void **)&t->bufs, n, &t->cap_bufs, sizeof *t->bufs);
    if (!status && s->bufs && n >= s->num_bufs)
        status = fsdp_fail(s->plan->world, FSDP_ERR_INTERNAL,
                           "[E1030] plan: '%.200s' takes slot %d, and its plan has %d slots",
                           fsdp_unit_name(unit), n, s->num_bufs);
    if (!status && s->bufs) buf = s->bufs[n];
    else if (!status) status = fsdpi_buf_place(model, (char *)(uintptr_t)s->next, use.bytes, &buf);
    s->next += use.bytes;
    if (status) s->status = status;
    if (!buf) return NULL;
    t->uses[n] = use;
    t->bufs[n] = buf;
    t->num_uses++;
    return buf;
}

// Returns the training and storage state of a unit as one number, not 0. After a call only those
// units are saved and compared that were called, had an op or an act, or have another outline.
static uint8_t fsdpi_plan_outline(const fsdp_unit *unit) {
    const int state = (int)fsdp_unit_state(unit), storage = (int)fsdp_unit_storage(unit);
    return (uint8_t)(1 + state * FSDP_STORAGE_COUNT + storage);
}

// Notes an op: `op` in the dry run.
static int fsdpi_plan_lower_op(void *user, fsdp_model *model, fsdp_op *op) {
    fsdpi_plan_lowering *s = (fsdpi_plan_lowering *)user;
    int unit = s->own >= 0 && op->unit == s->kind->calls[s->own].unit ? -1 // it is called
                                                                      : fsdpi_plan_index(op->unit);
    if (unit >= 0) s->seen[unit] = 0;
    fsdpi_plan_pair pair = {fsdpi_plan_use_of(s->tape, op->src),
                            fsdpi_plan_use_of(s->tape, op->dst)};
    if (op->kind == FSDP_OP_HOOK && s->own >= 0) s->tape->hooks[s->own] = *op;
    if (op->kind == FSDP_OP_HOOK || op->model != model || s->status) return 1;
    s->status = fsdpi_plan_add_op(s->plan, s->tape, op, pair);
    return 1;
}

static fsdp_status fsdpi_plan_make_call(fsdp_unit *unit, int call) {
    static fsdp_status (*const calls[])(fsdp_unit *) = {
        fsdp_pre_forward, fsdp_post_forward, fsdp_pre_backward, fsdp_post_backward,
        fsdp_unshard,     fsdp_wait,         fsdp_reshard}; // in the order of FSDP_CALL_LIST
    return calls[call](unit);
}

// Notes the state of a unit if it has changed since the previous call.
static fsdp_status fsdpi_plan_note(fsdpi_plan_lowering *s, int unit) {
    fsdp_plan *p = s->plan;
    fsdpi_plan_saved *last = &s->last[unit], now;
    s->seen[unit] = fsdpi_plan_outline(p->units[unit]);
    fsdpi_plan_save_unit(p->units[unit], &now);
    if (memcmp(last, &now, sizeof now) == 0) return FSDP_OK;
    memcpy(last, &now, sizeof now);
    return fsdpi_plan_add_state(p, s->tape, p->units[unit], &now);
}

// Checks at the end that fsdpi_plan_lower_calls has noted every state change.
static fsdp_status fsdpi_plan_all_noted(const fsdpi_plan_lowering *s) {
    const fsdp_plan *p = s->plan;
    fsdpi_plan_saved now;
    for (int u = 0; u < p->num_units; u++) {
        fsdpi_plan_save_unit(p->units[u], &now);
        if (memcmp(&s->last[u], &now, sizeof now) != 0)
            return fsdp_fail(p->world, FSDP_ERR_INTERNAL,
                             "[E929] plan: '%.200s' has changed without a record",
                             fsdp_unit_label(p->units[u]));
    }
    return FSDP_OK;
}

static int fsdpi_plan_is_late(const fsdpi_plan_act *act) {
    return act->what != FSDPI_PLAN_GATHER || act->late;
}

// Runs the acts of a call: those before its own work, or those after it (late).
static fsdp_status fsdpi_plan_do_acts(fsdpi_plan_lowering *s, int call, int *at, int late) {
    const fsdpi_plan_decisions *c = s->choice;
    fsdp_status status = FSDP_OK;
    for (; *at < c->num_acts && c->acts[*at].call == call && !status; ++*at) {
        const fsdpi_plan_act *act = &c->acts[*at];
        if (fsdpi_plan_is_late(act) != late) break;
        s->seen[act->unit] = 0;
        s->acts[2 * *at] = s->tape->num_ops;
        if (act->what == FSDPI_PLAN_GATHER) status = fsdp_unshard(s->plan->units[act->unit]);
        if (act->what == FSDPI_PLAN_FREE) status = fsdp_reshard(s->plan->units[act->unit]);
        if (act->what == FSDPI_PLAN_REDUCE) {
            status = fsdp_set_requires_gradient_sync(s->plan->model, s->plan->units[act->unit], 1);
            if (!status) status = fsdpi_plan_reduce_waiting(s->plan->units[act->unit]);
        }
        s->acts[2 * *at + 1] = s->tape->num_ops;
    }
    return status;
}

// Sets options so that hooks of managed units neither prefetch nor free.
static fsdp_status fsdpi_plan_manage(fsdpi_plan_lowering *s) {
    fsdp_plan *p = s->plan;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < p->num_units && !status; i++) {
        fsdp_unit *u = p->units[i];
        status = fsdp_set_modules_to_forward_prefetch(u, NULL, 0);
        if (!status && s->choice->waits[i])
            status = fsdp_set_requires_gradient_sync(p->model, u, 0);
        if (!s->choice->managed[i] || status) continue;
        status = fsdp_set_reshard_after_forward(p->model, u, FSDP_RESHARD_NEVER);
        if (!status) status = fsdp_set_reshard_after_backward(p->model, u, 0);
        if (!status) status = fsdp_set_unshard_in_backward(p->model, u, 0);
    }
    return status;
}

// Makes the calls of the dry run.
static fsdp_status fsdpi_plan_lower_calls(void *user) {
    fsdpi_plan_lowering *s = (fsdpi_plan_lowering *)user;
    fsdp_plan *p = s->plan;
    const fsdpi_plan_variant *k = s->kind;
    fsdpi_plan_tape *t = s->tape;
    fsdp_status status = FSDP_OK;
    int at = 0;
    // The tape depends only on options and `begin`, not on the slots that units hold now or on
    // forwards of earlier steps. So a later dry run takes the same slots.
    fsdpi_hold_slots(p->model, 0);
    p->model->num_order = 0;
    fsdpi_plan_restore_all(p, k->begin);
    memcpy(s->last, k->begin, (size_t)p->num_units * sizeof *s->last);
    for (int i = 0; i < p->num_units; i++) {
        t->held[i] = fsdp_unit_storage(p->units[i]) != FSDP_STORAGE_SHARDED;
        s->seen[i] = fsdpi_plan_outline(p->units[i]);
    }
    if (s->choice) status = fsdpi_plan_manage(s);
    for (int i = 0; i + 1 < k->num_calls && !status && !s->status; i++) {
        const fsdpi_plan_call *call = &k->calls[i];
        t->ops_at[i] = t->num_ops;
        t->states_at[i] = t->num_states;
        if (s->choice) status = fsdpi_plan_do_acts(s, i, &at, 0);
        if (!status && s->choice && s->choice->sync[i] >= 0)
            status = fsdp_set_requires_gradient_sync(p->model, call->unit, s->choice->sync[i]);
        t->own[i] = t->num_ops;
        s->own = i;
        if (!status) status = fsdpi_plan_make_call(call->unit, call->call);
        s->own = -1;
        t->own_end[i] = t->num_ops;
        t->storage[i] = (uint8_t)fsdp_unit_storage(call->unit);
        t->holds[i] = (uint8_t)fsdpi_plan_holds(call->unit);
        if (!status && s->choice) status = fsdpi_plan_do_acts(s, i, &at, 1);
        for (int u = 0; u < p->num_units && !status; u++)
            if (u == call->index || s->seen[u] != fsdpi_plan_outline(p->units[u]))
                status = fsdpi_plan_note(s, u);
    }
    if (!status && !s->status) status = fsdpi_plan_all_noted(s);
    t->ops_at[k->num_calls - 1] = t->ops_at[k->num_calls] = t->num_ops;
    t->states_at[k->num_calls - 1] = t->states_at[k->num_calls] = t->num_states;
    return s->status ? s->status : status;
}

// Makes the calls of the dry run, then releases the slots that units hold.
static fsdp_status fsdpi_plan_lower_all(void *user) {
    const fsdpi_plan_tape *t = ((const fsdpi_plan_lowering *)user)->tape;
    fsdp_status status = fsdpi_plan_lower_calls(user);
    for (int i = 0; i < t->num_uses; i++) t->bufs[i]->held = 0;
    return status;
}

// Sets up a lowering. choice NULL: eager. bufs NULL: without memory.
static void fsdpi_plan_lowering_new(fsdpi_plan_lowering *s, fsdp_plan *p, fsdpi_plan_tape *tape,
                                    const fsdpi_plan_variant *kind,
                                    const fsdpi_plan_decisions *choice, fsdp_buf *const *bufs,
                                    int num_bufs) {
    memset(s, 0, sizeof *s);
    memset(tape, 0, sizeof *tape);
    s->plan = p;
    s->tape = tape;
    s->kind = kind;
    s->choice = choice;
    s->bufs = bufs;
    s->num_bufs = num_bufs;
    s->next = 4096;
    s->own = -1;
}

/* Runs the program through the core's rows, with a choice's decisions or eagerly. bufs: the
   slots of uses, in order. NULL: buffers without memory, which are destroyed at the end. */
static fsdp_status fsdpi_plan_lower(fsdpi_plan_lowering *s) {
    fsdp_plan *p = s->plan;
    fsdp_extension e = FSDP_ZERO;
    int num_acts = s->choice ? s->choice->num_acts : 0;
    e.user = s;
    e.op = fsdpi_plan_lower_op;
    e.buffer = fsdpi_plan_lower_slot;
    fsdp_status status = fsdpi_plan_tape_new(p, s->tape, s->kind->num_calls);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)p->num_units * sizeof *s->last,
                                  (void **)&s->last);
    if (!status) status = fsdpi_plan_alloc(p->model, (size_t)p->num_units, (void **)&s->seen);
    if (!status)
        status = fsdpi_plan_alloc(p->model, 2 * (size_t)num_acts * sizeof *s->acts,
                                  (void **)&s->acts);
    if (!status) status = fsdpi_plan_dry_run(p->model, &e, fsdpi_plan_lower_all, s);
    for (int i = 0; i < s->tape->num_uses && !s->bufs; i++)
        fsdp_buf_destroy(p->model, s->tape->bufs[i]);
    return status;
}

static void fsdpi_plan_lowering_end(fsdpi_plan_lowering *s) {
    fsdpi_plan_free(s->plan->model, s->last);
    fsdpi_plan_free(s->plan->model, s->seen);
    fsdpi_plan_free(s->plan->model, s->acts);
}

#endif // FSDPI_PLAN_TAPE_H
