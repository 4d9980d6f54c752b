/* plan/snapshot.h - what a step changes, saved and restored: dry runs, states of units

   The list of all that a step changes, and options. One walk measures, saves and restores, so that
   the three cannot differ. It does not contain gathered parameters, gradients and shards.
   Callers: tape.h (fsdpi_plan_save_unit) and api.h (fsdpi_plan_restore_unit).

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_SNAPSHOT_H
#define FSDPI_PLAN_SNAPSHOT_H

#include "../core/alloc.h"
#include "../core/commit.h"
#include "../core/error.h"
#include "../core/grads.h"
#include "../core/guard.h"
#include "../base/macros.h"
#include "../core/objects.h"
#include "../core/grad_path.h"
#include "../core/run.h"
#include "../core/step.h"
#include "../core/ext_dispatch.h"
#include "objects.h"

#include <string.h>

enum { FSDPI_SAVE, FSDPI_RESTORE };

typedef struct fsdpi_walk {
    char *buf;
    size_t cap, used; // bytes that do not fit are only counted
    int way;          // FSDPI_SAVE or FSDPI_RESTORE
} fsdpi_walk;

static void fsdpi_walk_bytes(fsdpi_walk *w, void *field, size_t size) {
    if (size == 0) return;
    if (w->used + size <= w->cap) {
        if (w->way == FSDPI_SAVE) memcpy(w->buf + w->used, field, size);
        else memcpy(field, w->buf + w->used, size);
    }
    w->used += size;
}

static void fsdpi_walk_buf(fsdpi_walk *w, fsdp_buf *buf) {
    if (!buf) return;
    fsdpi_walk_bytes(w, &buf->ready, sizeof buf->ready);
    fsdpi_walk_bytes(w, &buf->avail, sizeof buf->avail);
    fsdpi_walk_bytes(w, &buf->released, sizeof buf->released);
    fsdpi_walk_bytes(w, &buf->held, sizeof buf->held);
}

static void fsdpi_walk_unit(fsdpi_walk *w, fsdp_unit *u) {
    fsdpi_walk_bytes(w, &u->state, sizeof u->state);
    fsdpi_walk_bytes(w, &u->options, sizeof u->options);
    fsdpi_walk_bytes(w, &u->facts, sizeof u->facts);
    fsdpi_walk_bytes(w, &u->route, sizeof u->route);
    fsdpi_walk_bytes(w, u->use, (size_t)u->use_words * sizeof *u->use);
    fsdpi_walk_bytes(w, &u->reported_calls, sizeof u->reported_calls);
    for (int i = 0; i < u->desc.num_params; i++) {
        fsdpi_param *p = &u->params[i];
        fsdpi_walk_bytes(w, &p->grad_hook, sizeof p->grad_hook);
        fsdpi_walk_bytes(w, &p->grad_hook_user, sizeof p->grad_hook_user);
    }
}

static void fsdpi_walk_model(fsdpi_walk *w, fsdp_model *m) {
    fsdpi_walk_bytes(w, &m->backward, sizeof m->backward);
    fsdpi_walk_bytes(w, &m->call_state, sizeof m->call_state);
    fsdpi_walk_bytes(w, &m->seq, sizeof m->seq);
    fsdpi_walk_bytes(w, &m->step, sizeof m->step);
    fsdpi_walk_bytes(w, &m->agreed_hash, sizeof m->agreed_hash);
    fsdpi_walk_bytes(w, &m->release_seq, sizeof m->release_seq);
    fsdpi_walk_bytes(w, &m->ahead_bytes, sizeof m->ahead_bytes);
    fsdpi_walk_bytes(w, &m->num_order, sizeof m->num_order);
    fsdpi_walk_bytes(w, m->order, (size_t)m->num_order * sizeof *m->order); // it does not shrink
    fsdpi_walk_bytes(w, &m->settings, sizeof m->settings);
    fsdpi_walk_bytes(w, &m->options, sizeof m->options);
    fsdpi_walk_bytes(w, &m->grad_hooks, sizeof m->grad_hooks);
    fsdpi_walk_bytes(w, &m->hook_status, sizeof m->hook_status);
    fsdpi_walk_bytes(w, m->hook_error, sizeof m->hook_error);
    fsdpi_walk_bytes(w, &m->hook_failures, sizeof m->hook_failures);
    fsdpi_walk_bytes(w, &m->norm_type, sizeof m->norm_type);
    fsdpi_walk_bytes(w, &m->counters, sizeof m->counters);
    for (int i = 0; i < m->num_units; i++) fsdpi_walk_unit(w, m->units[i]);
    for (int i = 0; i < m->num_classes; i++)
        for (int k = 0; k < m->classes[i].count; k++) fsdpi_walk_buf(w, m->classes[i].slots[k]);
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        fsdpi_walk_buf(w, m->flats[d].shard);
        fsdpi_walk_buf(w, m->flats[d].grad);
    }
    fsdpi_walk_buf(w, m->scalar);
}

static size_t fsdpi_model_save(fsdp_model *m, char *buf, size_t cap) {
    fsdpi_walk w = {buf, cap, 0, FSDPI_SAVE};
    fsdpi_walk_model(&w, m);
    return w.used;
}

// Slots may be an extension's, which no class lists.
static FSDPI_NOINLINE void fsdpi_hold_slots(const fsdp_model *m, uint8_t held) {
    for (int i = 0; i < m->num_units; i++)
        for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_REDUCE_OUT; pool++)
            if (m->units[i]->state.slot[pool]) m->units[i]->state.slot[pool]->held = held;
}

static void fsdpi_model_load(fsdp_model *m, char *buf, size_t size) {
    fsdpi_walk w = {buf, size, 0, FSDPI_RESTORE};
    fsdpi_drain(m->world); // worker threads may still be running ops
    fsdpi_hold_slots(m, 0);
    fsdpi_walk_model(&w, m);
    fsdpi_hold_slots(m, 1);
}

/* Runs calls of a step as a dry run. `run` makes hooks, fsdp_unshard and similar calls, and may
   restore units to earlier states. Only `extension` is attached: its `op` receives the ops, none
   of which runs, and its `buffer` supplies every slot. Afterwards the model is as before,
   options included. A call with a lasting effect fails. */
static fsdp_status fsdpi_plan_dry_run(fsdp_model *m, const fsdp_extension *extension,
                                      fsdp_status (*run)(void *user), void *user) {
    fsdpi_attached only = {*extension, NULL}, *others = m->attached;
    const fsdpi_attached *asked = m->offered_to;
    FSDPI_TRY(fsdpi_commit(m));
    FSDPI_TRY(fsdpi_check_units(m, FSDP_CALL_FULL, "dry run"));
    size_t size = fsdpi_model_save(m, NULL, 0);
    char *saved = (char *)fsdpi_model_alloc(m, size);
    if (!saved) return fsdpi_no_memory(m->world, "dry run", "", size);
    (void)fsdpi_model_save(m, saved, size);
    fsdpi_drain(m->world); // other extensions must first get all outstanding ops
    m->attached = &only;
    m->offered_to = NULL;
    m->dry_run++;
    fsdpi_update_listeners(m);
    fsdp_status status = run(user);
    fsdpi_model_load(m, saved, size);
    m->attached = others;
    m->offered_to = asked;
    m->dry_run--;
    fsdpi_update_listeners(m);
    fsdpi_model_free(m, saved);
    return status ? status : fsdpi_failed(m->world);
}

/* -------------------------------------------------------------------------------------------- */
// fsdpi_plan_saved, the state of one unit.

/* Saves a unit's state. Equal states with equal slots have equal bytes. A shard gradient that
   has been zero since it was made counts as empty: so a unit that no step has reduced makes no
   other variant. The record of forwards is not saved, since it belongs to one step. */
static void fsdpi_plan_save_unit(const fsdp_unit *u, fsdpi_plan_saved *out) {
    memcpy(&out->state, &u->state, sizeof out->state); // padding too
    if (out->state.shard_grad == FSDPI_SHARD_GRAD_ZERO)
        out->state.shard_grad = FSDPI_SHARD_GRAD_NONE;
    out->state.last_order = -1;
    out->slots = 0;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_REDUCE_OUT; pool++) {
        const fsdp_buf *slot = u->state.slot[pool];
        out->slots = out->slots * 0x9E3779B97F4A7C15u + (slot ? (uint64_t)slot->number : 0);
    }
}

// Returns the bytes of a prefetched unit's slot, which count towards prefetch_bytes.
static int64_t fsdpi_plan_ahead_bytes(const fsdpi_state *s) {
    return s->ahead ? (int64_t)s->slot[FSDP_POOL_GATHER]->bytes : 0;
}

/* Puts a unit into a saved state, with its slots. The ops that lead there are emitted in the
   same call. A backward state begins the model's backward, as the call would. */
static void fsdpi_plan_restore_unit(fsdp_unit *u, const fsdpi_plan_saved *saved) {
    fsdp_model *m = u->model;
    fsdpi_state *s = &u->state;
    m->ahead_bytes -= fsdpi_plan_ahead_bytes(s);
    memcpy(s, &saved->state, sizeof *s);
    m->ahead_bytes += fsdpi_plan_ahead_bytes(s);
    if (s->training == FSDP_STATE_PRE_BACKWARD || s->training == FSDP_STATE_POST_BACKWARD)
        m->backward = 1;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_REDUCE_OUT; pool++)
        if (s->slot[pool]) fsdpi_hold(m, s->slot[pool]);
    // Marks of use are not saved: they follow from the gradients. In a dry run all are used.
    const int waits = fsdpi_held(u) & FSDPI_HELD_SLOTS;
    if (s->training == FSDP_STATE_PRE_BACKWARD || (m->dry_run && waits)) fsdpi_usage_begin(u);
    else if (!waits) fsdpi_usage_reduced(u);
}

#endif // FSDPI_PLAN_SNAPSHOT_H
