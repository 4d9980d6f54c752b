/* core/snapshot.h - what a step changes, saved and brought back: rehearsals, states of units

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_CORE_SNAPSHOT_H
#define FSDPI_CORE_SNAPSHOT_H

#include "alloc.h"
#include "commit.h"
#include "error.h"
#include "guard.h"
#include "macros.h"
#include "objects.h"
#include "run.h"
#include "step.h"
#include "unit.h"
#include "usage.h"
#include "watch.h"

#include <string.h>

// Owns: the list of what a step changes, and options. One walk measures, saves and restores, so
// that the three cannot differ. Gathered parameters, gradients and shards themselves are not in it.

enum { FSDPI_SAVE, FSDPI_RESTORE };

typedef struct fsdpi_walk {
    char *buf;
    size_t cap, used; // what does not fit is only counted
    int way;          // FSDPI_SAVE, FSDPI_RESTORE
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
    fsdpi_walk_bytes(w, u->use, (size_t)fsdpi_use_words(u) * sizeof *u->use);
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
    fsdpi_walk_bytes(w, &m->given, sizeof m->given);
    fsdpi_walk_bytes(w, &m->release_seq, sizeof m->release_seq);
    fsdpi_walk_bytes(w, &m->ahead_bytes, sizeof m->ahead_bytes);
    fsdpi_walk_bytes(w, &m->num_order, sizeof m->num_order);
    fsdpi_walk_bytes(w, m->order, (size_t)m->num_order * sizeof *m->order); // it does not shrink
    fsdpi_walk_bytes(w, &m->settings, sizeof m->settings);
    fsdpi_walk_bytes(w, &m->grad_enabled, sizeof m->grad_enabled);
    fsdpi_walk_bytes(w, &m->is_last_backward, sizeof m->is_last_backward);
    fsdpi_walk_bytes(w, &m->uneven, sizeof m->uneven);
    fsdpi_walk_bytes(w, &m->grad_hooks, sizeof m->grad_hooks);
    fsdpi_walk_bytes(w, &m->hook_status, sizeof m->hook_status);
    fsdpi_walk_bytes(w, m->hook_error, sizeof m->hook_error);
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
        for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++)
            if (m->units[i]->state.slot[pool]) m->units[i]->state.slot[pool]->held = held;
}

static void fsdpi_model_load(fsdp_model *m, char *buf, size_t size) {
    fsdpi_walk w = {buf, size, 0, FSDPI_RESTORE};
    fsdpi_drain(m->world); // flags of use may still be read
    fsdpi_hold_slots(m, 0);
    fsdpi_walk_model(&w, m);
    fsdpi_hold_slots(m, 1);
}

// While `run` is at work, the model has one extension, and no record runs.
FSDP_API fsdp_status fsdp_rehearse(fsdp_model *model, const fsdp_extension *extension,
                                   fsdp_status (*run)(void *user), void *user) {
    if (!model || !extension || !run)
        return fsdpi_null_of(model, "rehearse", "model, extension or run");
    fsdpi_attached only, *others = model->attached;
    const fsdpi_attached *asked = model->asked;
    only.next = NULL;
    fsdp_status status = fsdpi_commit(model);
    if (!status)
        status = fsdp_desc_read(model->world, &only.e, extension, sizeof only.e, "fsdp_extension");
    if (!status) status = fsdpi_check_units(model, FSDP_CALL_FULL, "rehearse");
    if (status) return status;
    size_t size = fsdpi_model_save(model, NULL, 0);
    char *saved = (char *)fsdpi_model_alloc(model, size);
    if (!saved) return fsdpi_no_memory(model->world, "rehearse", "", size);
    (void)fsdpi_model_save(model, saved, size);
    fsdpi_drain(model->world); // records under way are told to the others
    model->attached = &only;
    model->asked = NULL;
    model->rehearsing++;
    fsdpi_watch(model);
    status = run(user);
    fsdpi_model_load(model, saved, size);
    model->attached = others;
    model->asked = asked;
    model->rehearsing--;
    fsdpi_watch(model);
    fsdpi_model_free(model, saved);
    return status ? status : fsdpi_failed(model->world);
}

/* -------------------------------------------------------------------------------------------- */
// Owns: saved states of units.

// What stands before it: what it was taken of.
typedef struct fsdpi_unit_head {
    const fsdp_unit *unit;
    uint64_t layout;
} fsdpi_unit_head;

typedef struct fsdpi_unit_saved {
    fsdpi_unit_head head;
    fsdpi_state state;
    uint64_t slots;   // which they are: another buffer may later have the address of a freed one
} fsdpi_unit_saved;

FSDP_API size_t fsdp_unit_snapshot(const fsdp_unit *unit, void *buf, size_t cap) {
    fsdpi_unit_saved now;
    if (!unit) return 0;
    if (!buf || cap < sizeof now) return sizeof now;
    memset(&now, 0, sizeof now);
    now.head.unit = unit;
    now.head.layout = unit->model->layout;
    memcpy(&now.state, &unit->state, sizeof now.state);
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++) {
        const fsdp_buf *slot = unit->state.slot[pool];
        now.slots = now.slots * 0x9E3779B97F4A7C15u + (slot ? (uint64_t)slot->number : 0);
    }
    memcpy(buf, &now, sizeof now);
    return sizeof now;
}

// Bytes of the slot of a unit that was gathered ahead: they count towards prefetch_bytes.
static int64_t fsdpi_ahead_bytes(const fsdpi_state *s) {
    return s->ahead ? (int64_t)s->slot[FSDP_POOL_GATHER]->bytes : 0;
}

FSDP_API fsdp_status fsdp_unit_restore(fsdp_unit *unit, const void *buf, size_t nbytes) {
    if (!unit || !buf)
        return fsdpi_null_of(unit ? unit->model : NULL, "unit_restore", "unit or buf");
    fsdp_model *m = unit->model;
    fsdpi_state *s = &unit->state;
    const char *saved = (const char *)buf;
    fsdpi_unit_head head = {NULL, 0};
    if (nbytes == sizeof(fsdpi_unit_saved)) memcpy(&head, saved, sizeof head);
    if (head.unit != unit || head.layout != m->layout)
        return fsdpi_bad(m->world,
                         "[E916] unit_restore: the snapshot of %llu bytes is of another unit than "
                         "'%s', or the layout has changed since: take it again",
                         (unsigned long long)nbytes, unit->desc.name);
    m->ahead_bytes -= fsdpi_ahead_bytes(s);
    memcpy(s, saved + offsetof(fsdpi_unit_saved, state), sizeof *s);
    m->ahead_bytes += fsdpi_ahead_bytes(s);
    s->last_order = -1; // the record of forwards is another one
    if (s->training == FSDP_STATE_PRE_BACKWARD || s->training == FSDP_STATE_POST_BACKWARD)
        m->backward = 1;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++)
        if (s->slot[pool]) fsdpi_hold(m, s->slot[pool]);
    // Marks of use are not saved: they follow where the gradients are.
    if (s->training == FSDP_STATE_PRE_BACKWARD) fsdpi_usage_begin(unit);
    else if (!(fsdpi_held(unit) & FSDPI_HELD_SLOTS)) fsdpi_usage_reduced(unit);
    return FSDP_OK;
}

#endif // FSDPI_CORE_SNAPSHOT_H
