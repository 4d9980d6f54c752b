/* core/ext_dispatch.h - calls the callbacks of extensions, in the order in which they are attached

   State: fsdp_model.listeners, offered_to and ext_depth. If listeners is 0, the calls of a step and
   ops skip these functions. fsdp_attach is in attach.h.
   Callers: programs, run.h (fsdpi_tell_ran), attach.h (fsdpi_update_listeners), step.h
     (fsdpi_ext_offer_call) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_EXT_DISPATCH_H
#define FSDPI_CORE_EXT_DISPATCH_H

#include "../base/macros.h"
#include "../base/text.h"
#include "flight.h"
#include "objects.h"

/* Offers a call to the extensions, after the flight record has noted it. Returns the extension that
   answered the call, with the result in *status, or NULL. If an extension makes calls in its
   callback, these are offered only to later extensions. */
static FSDPI_NOINLINE const fsdpi_attached *fsdpi_ext_offer_call(fsdp_model *m, fsdp_unit *u,
                                                                 int call, fsdp_status *status) {
    const fsdpi_attached *asker = m->offered_to, *answered = NULL;
    if (m->world->flight) fsdpi_flight_call(m->world, call, u ? u->desc.name : NULL);
    m->ext_depth++;
    for (const fsdpi_attached *a = asker ? asker->next : m->attached; a && !answered; a = a->next) {
        if (!a->e.call) continue;
        m->offered_to = a;
        if (a->e.call(a->e.user, m, u, call, status)) answered = a;
    }
    m->offered_to = asker;
    m->ext_depth--;
    return answered;
}

// Notifies the extensions to which a call was offered that it has ended. answered: the last of
// them, or NULL: all.
static FSDPI_NOINLINE void fsdpi_tell_returned(fsdp_model *m, fsdp_unit *u, int call,
                                               const fsdpi_attached *answered) {
    const fsdpi_attached *end = answered ? answered->next : NULL;
    m->ext_depth++;
    for (const fsdpi_attached *a = m->offered_to ? m->offered_to->next : m->attached; a != end;
         a = a->next)
        if (a->e.returned) a->e.returned(a->e.user, m, u, call);
    m->ext_depth--;
}

/* Shows a copy of an op to each extension until one takes it. Returns nonzero if one took it, or in
   a dry run: the op must not run. An extension may change the copy, except for its kind, its order
   and the fields that decide the order. */
static int fsdpi_ext_offer_op(fsdp_model *m, fsdp_op *op) {
    const fsdp_op was = *op;
    int taken = 0;
    m->ext_depth++;
    for (const fsdpi_attached *a = m->attached; a && !taken; a = a->next) {
        if (!a->e.op) continue;
        taken = a->e.op(a->e.user, m, op);
        op->kind = was.kind, op->stream = was.stream, op->seq = was.seq;
        op->src = was.src, op->dst = was.dst;
        op->num_waits = was.num_waits;
        memcpy(op->wait, was.wait, sizeof op->wait);
        if (!op->call) op->call = was.call;
    }
    m->ext_depth--;
    return taken | m->dry_run;
}

// Returns a slot that an extension supplies, or NULL. If `released` is not NULL, notifies
// extensions that the unit releases that slot.
static FSDPI_NOINLINE fsdp_buf *fsdpi_ext_offer_slot(fsdp_unit *u, int pool, fsdp_buf *released) {
    fsdp_buf *slot = NULL;
    u->model->ext_depth++;
    for (const fsdpi_attached *a = u->model->attached; a && !slot; a = a->next) {
        fsdp_buf *answer = a->e.buffer ? a->e.buffer(a->e.user, u->model, u, pool, released) : NULL;
        if (!released) slot = answer;
    }
    u->model->ext_depth--;
    return slot;
}

static void fsdpi_tell_model(fsdp_model *m, const fsdp_op *op, int64_t begin_ns, int64_t end_ns) {
    for (const fsdpi_attached *a = m->attached; a; a = a->next)
        if (a->e.ran) a->e.ran(a->e.user, m, op, begin_ns, end_ns);
}

// Reports an op that has run to the extensions of its model, or of all models if it belongs to
// none. Worker threads only run ops of models.
static void fsdpi_tell_ran(fsdp_world *w, const fsdp_op *op, int64_t begin_ns, int64_t end_ns) {
    if (op->model) fsdpi_tell_model(op->model, op, begin_ns, end_ns);
    for (fsdp_model *m = op->model ? NULL : w->models; m; m = m->next)
        fsdpi_tell_model(m, op, begin_ns, end_ns);
}

// Notifies all extensions of an event of parameters, until one fails. Returns its status.
static fsdp_status fsdpi_tell_values(fsdp_model *m, int event, int ordinal) {
    fsdp_status status = FSDP_OK;
    for (const fsdpi_attached *a = m->attached; a && !status; a = a->next)
        if (a->e.values) status = a->e.values(a->e.user, m, event, ordinal);
    return status;
}

// Sets fsdp_model.listeners from the callbacks of the extensions and from the flight record.
static void fsdpi_update_listeners(fsdp_model *m) {
    int watch = m->world->flight ? FSDPI_LISTEN_CALLS : 0;
    for (const fsdpi_attached *a = m->attached; a; a = a->next) {
        if (a->e.call) watch |= FSDPI_LISTEN_CALLS;
        if (a->e.returned) watch |= FSDPI_LISTEN_CALLS | FSDPI_LISTEN_RETURNS;
        if (a->e.op) watch |= FSDPI_LISTEN_OPS;
        if (a->e.buffer) watch |= FSDPI_LISTEN_SLOTS;
        if (a->e.ran) watch |= FSDPI_LISTEN_TIMES;
    }
    if (m->dry_run) watch |= FSDPI_LISTEN_OPS | FSDPI_LISTEN_SLOTS; // even without callbacks
    m->listeners = (uint8_t)watch;
}

/* -------------------------------------------------------------------------------------------- */
// Names of ops, labels and pools.

FSDP_API const char *fsdp_op_name(int kind) {
    static const char *const names[FSDP_OP_COUNT] = {FSDP_OP_LIST(FSDPI_TEXT_OF)};
    return kind >= 0 && kind < FSDP_OP_COUNT ? names[kind] : "?";
}

FSDP_API const char *fsdp_label_name(int label) {
    static const char *const names[FSDP_LABEL_COUNT] = {FSDP_LABEL_LIST(FSDPI_TEXT_OF)};
    if (label >= FSDP_LABEL_COUNT && label - FSDP_LABEL_COUNT < FSDPI_NAMES) return "extension";
    return label >= 0 && label < FSDP_LABEL_COUNT ? names[label] : "?";
}

FSDP_API const char *fsdp_pool_name(int pool) {
    static const char *const names[FSDP_POOL_COUNT] = {FSDP_POOL_LIST(FSDPI_TEXT_OF)};
    if (pool >= FSDP_POOL_COUNT && pool < FSDP_POOL_MAX) return "extension";
    return pool >= 0 && pool < FSDP_POOL_COUNT ? names[pool] : "?";
}

static const char *fsdpi_label(const fsdp_model *m, int label) {
    int own = label - FSDP_LABEL_COUNT;
    return m && own >= 0 && own < m->labels.count ? m->labels.text[own] : fsdp_label_name(label);
}

FSDP_API const char *fsdp_op_label(const fsdp_op *op) {
    return op ? fsdpi_label(op->model, op->label) : "?";
}

FSDP_API const char *fsdp_model_pool_name(const fsdp_model *model, int pool) {
    int own = pool - FSDP_POOL_COUNT;
    return model && own >= 0 && own < model->pools.count ? model->pools.text[own]
                                                         : fsdp_pool_name(pool);
}

#endif // FSDPI_CORE_EXT_DISPATCH_H
