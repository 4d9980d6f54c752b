/* core/step.h - the calls of a step: the transition table, and the end

   A public call looks up its row in fsdpi_rows and runs the row's actions. A call without a row
   changes nothing. An action emits ops and never calls a backend; it does nothing if its goal is
   reached. State: fsdpi_state.training and forwards, and fsdp_model.backward and order.
   Source: torch: FSDPState, FSDPParamGroup.
   Callers: programs, options.h (fsdpi_param_call), params.h (fsdpi_model_call), attach.h
     (fsdpi_refuse_in_dry_run) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_STEP_H
#define FSDPI_CORE_STEP_H

#include "../base/macros.h"
#include "../base/text.h"
#include "alloc.h"
#include "commit.h"
#include "error.h"
#include "flight.h"
#include "gather.h"
#include "grad_path.h"
#include "grads.h"
#include "guard.h"
#include "layout.h"
#include "objects.h"
#include "ops.h"
#include "pool.h"
#include "replicas.h"
#include "run.h"
#include "unit.h"
#include "ext_dispatch.h"

#include <stdio.h>

// Limit of fsdp_model.order per unit. Forwards beyond it are counted, but backward does not
// prefetch for them.
#define FSDPI_ORDER_PER_UNIT 64

// Notes a forward whose backward is due. Backward prefetches the units in the reverse order.
static fsdp_status fsdpi_do_note_forward(fsdp_unit *u) {
    fsdp_model *m = u->model;
    if (!m->options.grad_enabled) return FSDP_OK;
    if (m->num_order < FSDPI_ORDER_PER_UNIT * m->num_units) {
        if (m->num_order == m->cap_order) {
            fsdp_status status = fsdpi_grow(m, (void **)&m->order, m->num_order, &m->cap_order,
                                            sizeof *m->order, "post_forward of unit", u->desc.name);
            if (status) return fsdpi_fail_together(m->world, status);
        }
        m->order[m->num_order].unit = u;
        m->order[m->num_order].previous = u->state.last_order;
        u->state.last_order = m->num_order++;
    }
    u->state.forwards++;
    return FSDP_OK;
}

static fsdp_status fsdpi_do_begin_backward(fsdp_unit *u) {
    // Otherwise another backward may follow.
    u->state.forwards -= u->model->options.is_last_backward;
    u->model->backward = 1;
    return FSDP_OK;
}

enum { FSDPI_I = 1, FSDPI_F = 2, FSDPI_P = 4, FSDPI_B = 8, FSDPI_ALL = 15 }; // 1 << training state
enum { FSDPI_KEEP = 255 };                                                   // next: no change

enum {                // conditions of a row in addition to the training state: fsdpi_row.asks
    FSDPI_DUE = 1,    // a forward waits for its backward
    FSDPI_REFUSE = 2, // the call fails if a unit holds unreduced gradients
    FSDPI_TELL = 4    // the call logs a warning if a unit holds unreduced gradients
};

typedef struct fsdpi_row {
    uint8_t from[2]; // sets of training states: outside backward, inside
    uint8_t asks;                            // a set of FSDPI_DUE, ...
    uint8_t next;                            // training state after the call, or FSDPI_KEEP
    fsdp_status (*actions[6])(fsdp_unit *u); // in order; NULL ends them
} fsdpi_row;

// clang-format off
// The rows of each call, in the order of FSDP_CALL_LIST. A row without training states is unused.
static const fsdpi_row fsdpi_rows[FSDP_CALL_COUNT][3] = {
//    from: outside, inside backward       asks  next        actions
    { // pre_forward
        {{FSDPI_I | FSDPI_F, 0}, 0, FSDP_STATE_FORWARD,
            {fsdpi_do_unshard, fsdpi_do_wait, fsdpi_do_prefetch_forward}},
        // Recompute: first, a unit nested in the backward of others; second, the unit whose
        // backward runs.
        {{0, FSDPI_I | FSDPI_B}, FSDPI_DUE, FSDP_STATE_FORWARD, {fsdpi_do_unshard, fsdpi_do_wait}},
        {{0, FSDPI_P}, 0, FSDPI_KEEP, {fsdpi_do_unshard, fsdpi_do_wait}},
    },
    { // post_forward
        {{FSDPI_F, 0}, 0, FSDP_STATE_IDLE, {fsdpi_do_note_forward, fsdpi_do_reshard_forward}},
        {{0, FSDPI_F}, 0, FSDP_STATE_IDLE, {NULL}},
        {{0, FSDPI_P}, 0, FSDPI_KEEP, {NULL}},
    },
    { // pre_backward
        {{FSDPI_I | FSDPI_B, FSDPI_I | FSDPI_B}, FSDPI_DUE, FSDP_STATE_PRE_BACKWARD,
            {fsdpi_do_unshard_backward, fsdpi_do_wait, fsdpi_do_grads,
             fsdpi_do_prefetch_backward, fsdpi_do_begin_backward}},
        {{0, FSDPI_P}, 0, FSDPI_KEEP, {NULL}},
    },
    { // post_backward
        {{0, FSDPI_P}, 0, FSDP_STATE_POST_BACKWARD, {fsdpi_do_reshard_backward, fsdpi_do_reduce}},
    },
    {{{FSDPI_ALL, FSDPI_ALL}, 0, FSDPI_KEEP, {fsdpi_do_unshard}}}, // unshard
    {{{FSDPI_ALL, FSDPI_ALL}, 0, FSDPI_KEEP, {fsdpi_do_wait}}}, // wait
    {{{FSDPI_I | FSDPI_B, FSDPI_I | FSDPI_B}, 0, FSDPI_KEEP, {fsdpi_do_reshard}}}, // reshard
    { // finalize
        {{FSDPI_P, FSDPI_P}, 0, FSDP_STATE_IDLE, {fsdpi_do_reshard_backward, fsdpi_do_reduce}},
        {{FSDPI_I | FSDPI_B, FSDPI_I | FSDPI_B}, 0, FSDP_STATE_IDLE,
            {fsdpi_do_reshard_backward, fsdpi_do_leftovers}},
    },
    {{{FSDPI_ALL, FSDPI_ALL}, 0, FSDPI_KEEP, {NULL}}}, // data
    {{{0, FSDPI_P}, 0, FSDPI_KEEP, {NULL}}}, // grad
    {{{FSDPI_I, 0}, FSDPI_TELL, FSDPI_KEEP, {fsdpi_do_stale}}}, // params_changed
    {{{FSDPI_I, 0}, FSDPI_REFUSE, FSDPI_KEEP, {fsdpi_do_stale}}}, // load
    {{{FSDPI_I, 0}, 0, FSDPI_KEEP, {NULL}}}, // full
    {{{FSDPI_I, 0}, FSDPI_TELL, FSDPI_KEEP, {fsdpi_do_zero_grad}}}, // zero_grad
    {{{FSDPI_I, 0}, FSDPI_TELL, FSDPI_KEEP, {NULL}}}, // clip
    {{{FSDPI_I, 0}, FSDPI_REFUSE, FSDPI_KEEP, {NULL}}}, // set_requires_grad
    {{{FSDPI_I | FSDPI_B, FSDPI_I | FSDPI_B}, 0, FSDPI_KEEP, {NULL}}}, // set
    {{{FSDPI_ALL, FSDPI_ALL}, 0, FSDP_STATE_IDLE, {fsdpi_do_reset}}}, // reset
    {{{FSDPI_ALL, FSDPI_ALL}, 0, FSDPI_KEEP, {NULL}}}, // extension
};
// clang-format on

static const char *fsdpi_call_name(int call) {
    static const char *const names[FSDP_CALL_COUNT] = {FSDP_CALL_LIST(FSDPI_TEXT_OF)};
    return names[call];
}

// A unit's position in a step, as the table sees it. open: 1 if the parameters can be read. Only
// getters depend on it, and the table does not.
typedef struct fsdpi_unit_position {
    int training, backward, forwards, open;
} fsdpi_unit_position;

static const fsdpi_row *fsdpi_row_at(const fsdpi_unit_position *at, int call) {
    for (int i = 0; i < 3; i++) {
        const fsdpi_row *row = &fsdpi_rows[call][i];
        if ((row->from[at->backward] >> at->training & 1) &&
            (!(row->asks & FSDPI_DUE) || at->forwards > 0))
            return row;
    }
    return NULL;
}
static const fsdpi_row *fsdpi_lookup(const fsdp_unit *u, int call) {
    const fsdpi_unit_position at = {u->state.training, u->model->backward, u->state.forwards, 0};
    return fsdpi_row_at(&at, call);
}

// Returns the first of at most `depth` hooks that make a call possible, or -1. It applies each hook
// to a copy of the position: pre_forward opens the parameters, post_forward outside backward adds a
// forward that waits, pre_backward takes one and starts backward, finalize ends backward.
static int fsdpi_next_hook(const fsdpi_unit_position *from, int call, int depth) {
    static const int hooks[] = {FSDP_CALL_PRE_FORWARD, FSDP_CALL_POST_FORWARD,
                                FSDP_CALL_PRE_BACKWARD, FSDP_CALL_POST_BACKWARD,
                                FSDP_CALL_FINALIZE};
    for (int i = 0; i < 5; i++) {
        fsdpi_unit_position at = *from;
        const int hook = hooks[i], begins = hook == FSDP_CALL_PRE_BACKWARD;
        const fsdpi_row *row = fsdpi_row_at(from, hook);
        if (!row) continue;
        if (row->next != FSDPI_KEEP) at.training = row->next;
        at.open = hook == FSDP_CALL_PRE_FORWARD; // fsdpi_wrong_call handles a backward that is due
        at.forwards += hook == FSDP_CALL_POST_FORWARD && !from->backward;
        at.forwards -= begins && (row->asks & FSDPI_DUE);
        at.backward = begins || (from->backward && hook != FSDP_CALL_FINALIZE);
        if (fsdpi_row_at(&at, call) && (call != FSDP_CALL_DATA || at.open)) return hook;
        if (depth > 1 && fsdpi_next_hook(&at, call, depth - 1) >= 0) return hook;
    }
    return -1;
}

// Returns the position as a clause for texts.
static const char *fsdpi_position_text(const fsdpi_unit_position *at) {
    static const char *const idle[2][2] = {
        // [inside backward][a forward waits for its backward]
        {"is idle, and no forward of it waits for a backward",
         "has run forward, and its backward has not begun"},
        {"has no forward that waits for a backward, and the model's backward has not ended",
         "has run forward, and its turn in the model's backward has not come"}};
    if (at->training == FSDP_STATE_FORWARD) return "is in forward, which has not ended";
    if (at->training == FSDP_STATE_PRE_BACKWARD) return "is in backward, which has not ended";
    if (at->training == FSDP_STATE_IDLE) return idle[at->backward][at->forwards > 0];
    return at->forwards > 0 ? "has run a backward, and a forward of it waits for another one"
                            : "has run its backward, and the model's backward has not ended";
}

// Fails with the hook that the table expects before this call.
static fsdp_status fsdpi_wrong_call(fsdp_unit *u, int call, const char *what) {
    const fsdpi_unit_position at = {u->state.training, u->model->backward, u->state.forwards,
                                    u->state.storage == FSDP_STORAGE_UNSHARDED};
    int first = -1;
    if (call == FSDP_CALL_DATA && at.forwards > 0 && at.training != FSDP_STATE_FORWARD)
        first = FSDP_CALL_PRE_BACKWARD; // a forward would be possible, too, but a backward is due
    for (int depth = 1; depth < 5 && first < 0; depth++) first = fsdpi_next_hook(&at, call, depth);
    int is_off = !u->model->options.grad_enabled && at.forwards == 0;
    const char *also = call == FSDP_CALL_DATA ? ", and its parameters are not gathered"
                       : is_off               ? " (gradients are off: fsdp_set_grad_enabled)"
                                              : "";
    return fsdpi_fail_once(u, call, FSDP_ERR_INVALID_STATE,
                           "[E206] %s: unit '%s' %s%s: call fsdp_%s first", what, u->desc.name,
                           fsdpi_position_text(&at), also,
                           first < 0 ? "model_reset" : fsdpi_call_name(first));
}

static uint8_t fsdpi_next_state(const fsdp_unit *u, const fsdpi_row *row) {
    return row->next == FSDPI_KEEP ? u->state.training : row->next;
}

// Runs the actions of a row for a unit, then sets the unit's training state.
static fsdp_status fsdpi_apply_row(fsdp_unit *u, const fsdpi_row *row) {
    const uint8_t next = fsdpi_next_state(u, row);
    u->model->call_state = next; // set again: an extension that saw the marker may have called
    FSDPI_GUARD(fsdpi_open_unit(u));
    for (int i = 0; row->actions[i]; i++) FSDPI_TRY(row->actions[i](u));
    u->state.training = next;
    FSDPI_GUARD(fsdpi_close_unit(u));
    FSDPI_GUARD(fsdpi_close_free(u->model));
#ifdef FSDPI_DEBUG
    return fsdpi_unit_check(u);
#else
    return FSDP_OK;
#endif
}

// Returns 1 if the unit holds unreduced gradients of earlier microbatches. Only outside backward.
static int fsdpi_holds_grads(const fsdp_unit *u) { return (fsdpi_held(u) & FSDPI_HELD_SLOTS) != 0; }

static FSDPI_NOINLINE fsdp_status fsdpi_refuse_waiting(const fsdp_unit *u, const char *what) {
    return fsdp_fail(u->model->world, FSDP_ERR_INVALID_STATE,
                     "[E203] %s: unit '%s' holds gradients that are not reduced: run a "
                     "backward with sync, or drop them by fsdp_model_reset",
                     what, u->desc.name);
}

// Fails or warns, as the call's row says, because a unit holds unreduced gradients. PyTorch does
// not report them: they enter the next reduction.
static FSDPI_NOINLINE fsdp_status fsdpi_not_reduced(const fsdp_unit *u, int call,
                                                    const char *what) {
    fsdp_model *m = u->model;
    if (fsdpi_rows[call][0].asks == FSDPI_REFUSE) return fsdpi_refuse_waiting(u, what);
    if (!m->dry_run && !(m->reported_calls >> call & 1)) {
        m->reported_calls |= 1u << call;
        fsdp_warn(m->world,
                  "[E218] %s: unit '%s' holds gradients that are not reduced. It keeps them, and "
                  "the next reduction adds them to its own: turn sync on "
                  "(fsdp_set_requires_gradient_sync) before the last microbatch, or drop them by "
                  "fsdp_model_reset",
                  what, u->desc.name);
    }
    return FSDP_OK;
}

// Set of calls that write or move shards, or change shard gradients.
static const uint32_t fsdpi_wants_shards = 1u << FSDP_CALL_PARAMS_CHANGED | 1u << FSDP_CALL_LOAD |
                                           1u << FSDP_CALL_CLIP | 1u << FSDP_CALL_REQUIRES_GRAD;

// Returns FSDP_OK if the call is possible for all units. `what`: the call's name in texts.
static fsdp_status fsdpi_check_units(fsdp_model *m, int call, const char *what) {
    if (m->write_lock_text && fsdpi_wants_shards >> call & 1)
        return fsdp_fail(m->world, FSDP_ERR_INVALID_STATE, "[E231] %s: %s", what,
                         m->write_lock_text);
    for (int i = 0; i < m->num_units; i++)
        if (!fsdpi_lookup(m->units[i], call)) return fsdpi_wrong_call(m->units[i], call, what);
    for (int i = 0; fsdpi_rows[call][0].asks && i < m->num_units; i++)
        if (fsdpi_holds_grads(m->units[i])) return fsdpi_not_reduced(m->units[i], call, what);
    return FSDP_OK;
}

// Runs the call's row for every unit. Requires that each has one: fsdpi_check_units.
static fsdp_status fsdpi_run_units(fsdp_model *m, int call) {
    for (int i = 0; i < m->num_units; i++)
        FSDPI_TRY(fsdpi_apply_row(m->units[i], fsdpi_lookup(m->units[i], call)));
    return FSDP_OK;
}

// Fails in a dry run: the call makes a lasting change, which a dry run could not undo.
static FSDPI_NOINLINE fsdp_status fsdpi_refuse_in_dry_run(fsdp_model *m, const char *what) {
    fsdp_status status = fsdpi_failed(m->world);
    if (status || !m->dry_run) return status;
    return fsdp_fail(m->world, FSDP_ERR_INVALID_STATE,
                     "[E214] %s: a dry run cannot undo it: call it before or afterwards", what);
}

// Shows extensions a marker op that precedes the ops of a public call.
static FSDPI_NOINLINE fsdp_status fsdpi_show_call(fsdp_model *m, const fsdp_unit *u, int call,
                                                  const char *what) {
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_HOOK, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);
    if (!u) op.what = what;
    op.count = (uint64_t)call;
    return fsdpi_show(m, &op);
}

// Begins a call of the whole model: its ops carry the state IDLE, and a marker precedes them.
static fsdp_status fsdpi_announce(fsdp_model *m, int call, const char *what) {
    m->call_state = FSDP_STATE_IDLE;
    return m->listeners & FSDPI_LISTEN_OPS ? fsdpi_show_call(m, NULL, call, what) : FSDP_OK;
}

// Begins a call of the whole model: checks the arguments and the world, commits, checks the table
// and shows the marker. If `run` is set, the call writes shards or gradients: extensions are
// notified first, and the row of each unit runs.
static fsdp_status fsdpi_model_call(fsdp_model *m, int call, int run) {
    if (!m) return fsdp_fail_null(NULL, fsdpi_call_name(call), "model");
    fsdp_status status = fsdpi_commit(m);
    if (!status && m->world->flight) fsdpi_flight_call(m->world, call, NULL);
    const char *what = fsdpi_call_name(call);
    if (!status && run && (m->listeners & FSDPI_LISTEN_CALLS))
        (void)fsdpi_ext_offer_call(m, NULL, call, &status);
    if (!status) status = fsdpi_check_units(m, call, what);
    if (!status) status = fsdpi_announce(m, call, what);
    return status || !run ? status : fsdpi_run_units(m, call);
}

// Returns `status`, the failure of the world, in which no parameter is readable.
static FSDPI_NOINLINE fsdp_status fsdpi_world_is_failed(fsdp_model *m, fsdp_status status) {
    fsdpi_call_all_back(m);
    return status;
}

// Keeps the first failed status and its text: fsdp_finalize_backward returns them again.
static FSDPI_NOINLINE fsdp_status fsdpi_hook_failed(fsdp_model *m, fsdp_status status) {
    if (fsdpi_failed(m->world)) fsdpi_call_all_back(m);
    if (m->hook_status) return status;
    snprintf(m->hook_error, sizeof m->hook_error, "%s", fsdp_last_error(m->world));
    m->hook_failures++;
    return m->hook_status = status;
}

// Ends a call. Records the events that are due on COMPUTE, since the caller's work comes next.
static inline fsdp_status fsdpi_keep_status(fsdp_model *m, fsdp_status status) {
    if (!status && m->world->order[FSDP_STREAM_COMPUTE].due)
        status = fsdpi_record_event(m->world, FSDP_STREAM_COMPUTE);
    return status ? fsdpi_hook_failed(m, status) : FSDP_OK;
}

// Ends a call that writes shards or their gradients, of unit u or (NULL) of all units.
static fsdp_status fsdpi_writing_ends(fsdp_model *m, fsdp_unit *u, int call, fsdp_status status) {
    if (!m) return status;
    status = fsdpi_keep_status(m, status);
    if (m->listeners & FSDPI_LISTEN_RETURNS) fsdpi_tell_returned(m, u, call, NULL);
    return status;
}

FSDPI_MERGED fsdp_status fsdpi_run_call(fsdp_unit *u, int call) {
    fsdp_model *m = u->model;
    const fsdpi_row *row = fsdpi_lookup(u, call);
    if (!row) return fsdpi_wrong_call(u, call, fsdpi_call_name(call));
    if (m->listeners & FSDPI_LISTEN_OPS) {
        m->call_state = fsdpi_next_state(u, row);
        FSDPI_TRY(fsdpi_show_call(m, u, call, NULL));
    }
    return fsdpi_apply_row(u, row);
}

// Runs a unit's call, and notifies extensions when it has ended.
static FSDPI_NOINLINE fsdp_status fsdpi_timed_call(fsdp_unit *u, int call) {
    fsdp_status status = FSDP_OK;
    const fsdpi_attached *answered = fsdpi_ext_offer_call(u->model, u, call, &status);
    if (!answered) status = fsdpi_run_call(u, call);
    status = fsdpi_keep_status(u->model, status);
    fsdpi_tell_returned(u->model, u, call, answered);
    return status;
}

static fsdp_status fsdpi_unit_call(fsdp_unit *u, int call) {
    if (!u) return fsdp_fail_null(NULL, fsdpi_call_name(call), "unit");
    fsdp_model *m = u->model;
    fsdp_status status = fsdpi_failed(m->world);
    if (status) return fsdpi_world_is_failed(m, status);
    if (!m->committed) status = fsdpi_commit(m);
    if (status) return fsdpi_hook_failed(m, status);
    if (m->listeners & FSDPI_LISTEN_CALLS) {
        if (m->listeners & FSDPI_LISTEN_RETURNS) return fsdpi_timed_call(u, call);
        if (fsdpi_ext_offer_call(m, u, call, &status)) return fsdpi_keep_status(m, status);
    }
    return fsdpi_keep_status(m, fsdpi_run_call(u, call));
}

FSDP_API fsdp_status fsdp_pre_forward(fsdp_unit *unit) {
    return fsdpi_unit_call(unit, FSDP_CALL_PRE_FORWARD);
}
FSDP_API fsdp_status fsdp_post_forward(fsdp_unit *unit) {
    return fsdpi_unit_call(unit, FSDP_CALL_POST_FORWARD);
}
FSDP_API fsdp_status fsdp_pre_backward(fsdp_unit *unit) {
    return fsdpi_unit_call(unit, FSDP_CALL_PRE_BACKWARD);
}
FSDP_API fsdp_status fsdp_post_backward(fsdp_unit *unit) {
    return fsdpi_unit_call(unit, FSDP_CALL_POST_BACKWARD);
}
FSDP_API fsdp_status fsdp_unshard(fsdp_unit *u) { return fsdpi_unit_call(u, FSDP_CALL_UNSHARD); }
FSDP_API fsdp_status fsdp_wait(fsdp_unit *unit) { return fsdpi_unit_call(unit, FSDP_CALL_WAIT); }
FSDP_API fsdp_status fsdp_reshard(fsdp_unit *u) { return fsdpi_unit_call(u, FSDP_CALL_RESHARD); }

static fsdp_status fsdpi_param_call(fsdp_unit *u, int index, int call) {
    if (!u) return fsdp_fail_null(NULL, fsdpi_call_name(call), "unit");
    return fsdpi_check_index(u, index, fsdpi_call_name(call));
}

/* -------------------------------------------------------------------------------------------- */
// The end of a step, getters and calls between steps.

// Makes the caller's stream wait for all shard gradients. Sets them to zero where a unit has none.
static fsdp_status fsdpi_grads_ready(fsdp_model *m) {
    for (int i = 0; i < m->num_units; i++) {
        fsdp_unit *u = m->units[i];
        if (u->layout.num_train == 0 || u->state.shard_grad != FSDPI_SHARD_GRAD_NONE) continue;
        for (int k = 0; k < u->layout.num_parts; k++) {
            const fsdpi_dtype_group *part = &u->layout.parts[k];
            if (part->num_train)
                FSDPI_TRY(fsdpi_emit_fill(m, u, FSDP_LABEL_FINAL, FSDP_STREAM_COMPUTE,
                                          fsdpi_flat_of(u, part)->grad,
                                          fsdpi_grad_dtype(m, part->dtype), part->train.base,
                                          part->train.shard_numel, 0));
        }
        u->state.shard_grad = FSDPI_SHARD_GRAD_ZERO;
    }
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        if (!m->flats[d].grad) continue;
        FSDPI_TRY(fsdpi_emit_use(m, NULL, FSDP_LABEL_FINAL, m->flats[d].grad));
        if (m->grad_hooks) // they may have written shards
            FSDPI_TRY(fsdpi_emit_use(m, NULL, FSDP_LABEL_FINAL, m->flats[d].shard));
    }
    int waits = m->desc.cpu_offload || m->world->mode != FSDP_RUN_STREAMS;
    return waits ? fsdpi_sync(m->world, FSDP_STREAM_COMPUTE) : FSDP_OK;
}

static void fsdpi_forget_forwards(fsdp_model *m) {
    m->num_order = 0;
    for (int i = 0; i < m->num_units; i++) {
        m->units[i]->state.forwards = 0;
        m->units[i]->state.last_order = -1;
    }
}

static fsdp_status fsdpi_finalize(fsdp_model *m) {
    FSDPI_TRY(fsdpi_run_units(m, FSDP_CALL_FINALIZE));
    FSDPI_TRY(fsdpi_grads_ready(m));
    for (int i = 0; i < m->num_units; i++) m->units[i]->reported_calls = 0;
    m->backward = 0;
    m->step++;
    fsdpi_pools_rewind(m);
    if (m->options.is_last_backward) fsdpi_forget_forwards(m);
    return FSDP_OK;
}

static fsdp_status fsdpi_finalize_call(fsdp_model *model) {
    fsdp_status status = fsdpi_model_call(model, FSDP_CALL_FINALIZE, 0);
    if (!status) status = fsdpi_finalize(model);
    if (!status && model->step == 1 && !model->dry_run) status = fsdpi_replicas_check(model);
    if (status || !model->hook_status) return status;
    status = model->hook_status;
    model->hook_status = FSDP_OK;
    fsdpi_set_error(model->world, model->hook_error);
    return status;
}

FSDP_API fsdp_status fsdp_finalize_backward(fsdp_model *model) {
    if (!model) return fsdp_fail_null(NULL, "finalize_backward", "model");
    fsdp_status status = fsdpi_failed(model->world);
    if (status) return fsdpi_world_is_failed(model, status);
    const fsdpi_attached *answered = NULL;
    if (model->listeners & FSDPI_LISTEN_CALLS)
        answered = fsdpi_ext_offer_call(model, NULL, FSDP_CALL_FINALIZE, &status);
    if (!answered) status = fsdpi_finalize_call(model);
    if (model->listeners & FSDPI_LISTEN_RETURNS)
        fsdpi_tell_returned(model, NULL, FSDP_CALL_FINALIZE, answered);
    if (!status && model->world->flight) fsdpi_flight_step_end(model->world, model->step);
    if (status && fsdpi_failed(model->world)) fsdpi_call_all_back(model);
    return status;
}

/* Returns memory for a getter that has failed, so that a trainer that checks statuses later does
   not crash. All getters of a model share one block of pinned memory, in which the largest
   parameter fits in any dtype. Keeps `status` for fsdp_finalize_backward. Returns NULL if there is
   no model or no memory. */
FSDP_API void *fsdp_fallback_ptr(fsdp_model *model, fsdp_status status) {
    fsdp_world *w = model ? model->world : NULL;
    int64_t bytes = 8;
    if (!w) return NULL;
    if (!fsdpi_failed(w)) (void)fsdpi_keep_status(model, status);
    for (int i = 0; i < model->num_units; i++)
        for (int k = 0; k < model->units[i]->desc.num_params; k++) {
            const int64_t numel = model->units[i]->params[k].lay.numel;
            if (8 * numel > bytes) bytes = 8 * numel;
        }
    if ((int64_t)model->fallback_bytes >= bytes) return model->fallback;
    fsdpi_fallback_free(model);
    status = w->device_ops->alloc(w->device, FSDP_MEMORY_PINNED, (size_t)bytes, &model->fallback);
    if (!status) model->fallback_bytes = (size_t)bytes;
    if (!status) return model->fallback;
    model->fallback = NULL;
    (void)fsdp_fail(w, status,
                    "[E310] no %lld bytes for a getter that has failed, which gives NULL: %s",
                    (long long)bytes, fsdpi_device_text(w, status));
    return NULL;
}

static inline int fsdpi_has_param(const fsdp_unit *u, int index) {
    return u && index >= 0 && index < u->desc.num_params;
}

// Returns FSDP_OK if a getter may return a pointer to a parameter or its gradient now.
static inline fsdp_status fsdpi_getter_check(fsdp_unit *u, int index, int call) {
    int exists = fsdpi_has_param(u, index);
    fsdp_status status = u ? fsdpi_failed(u->model->world) : FSDP_OK;
    if (!status && !exists) status = fsdpi_param_call(u, index, call);
    if (status) return status;
    if (fsdpi_lookup(u, call) &&
        (call != FSDP_CALL_DATA || u->state.storage == FSDP_STORAGE_UNSHARDED))
        return FSDP_OK;
    return fsdpi_wrong_call(u, call, fsdpi_call_name(call));
}

FSDP_API void *fsdp_data(fsdp_unit *unit, int index) {
    fsdp_status status = fsdpi_getter_check(unit, index, FSDP_CALL_DATA);
    if (status) return fsdp_fallback_ptr(unit ? unit->model : NULL, status);
    const fsdpi_param *p = &unit->params[index];
    if (unit->layout.gather == FSDPI_GATHER_ALIAS)
        return fsdpi_flat_of(unit, unit->layout.parts)->shard->ptr +
               fsdpi_bytes(p->lay.shard_offset, p->dtype);
    return unit->state.slot[FSDP_POOL_GATHER]->ptr +
           fsdpi_bytes(p->lay.full_offset, fsdpi_dtype_group_of(unit, p)->param_dtype);
}

FSDP_API void *fsdp_grad(fsdp_unit *unit, int index) {
    if (fsdpi_has_param(unit, index) && !unit->params[index].requires_grad) return NULL;
    fsdp_status status = fsdpi_getter_check(unit, index, FSDP_CALL_GRAD);
    if (status) return fsdp_fallback_ptr(unit ? unit->model : NULL, status);
    const fsdpi_param *p = &unit->params[index];
    *fsdpi_use(unit, index) |= FSDPI_USE_USED;
    if (!unit->state.slot[FSDP_POOL_GRAD]) // one rank
        return fsdpi_flat_of(unit, unit->layout.parts)->grad->ptr +
               fsdpi_bytes(p->lay.shard_offset, p->dtype);
    return unit->state.slot[FSDP_POOL_GRAD]->ptr +
           fsdpi_bytes(p->grad_offset, fsdpi_dtype_group_of(unit, p)->param_dtype);
}

// Fails because parameter `index` does not have the dtype `asked`. is, tells, set: clauses of the
// text. Returns the pointer of fsdp_fallback_ptr.
static FSDPI_NOINLINE void *fsdpi_wrong_dtype(fsdp_unit *u, int index, int call, const char *what,
                                              const char *is, fsdp_dtype has, fsdp_dtype asked,
                                              const char *tells, const char *set) {
    fsdp_status status = fsdpi_fail_once(
        u, call, FSDP_ERR_INVALID_ARG,
        "[E230] %s: parameter '%s' of unit '%s' %s %s, but you ask for %s: ask for %s, which %s "
        "tells, and compute in it or convert by fsdp_convert; or set %s",
        what, u->params[index].name, u->desc.name, is, fsdp_dtype_name(has), fsdp_dtype_name(asked),
        fsdp_dtype_name(has), tells, set);
    return fsdp_fallback_ptr(u->model, status);
}

// Calls the getter if the parameter is gathered in `dtype`; otherwise fails.
static void *fsdpi_get_as(fsdp_unit *u, int index, fsdp_dtype dtype, int call, const char *what,
                          void *(*get)(fsdp_unit *unit, int index)) {
    const fsdpi_param *p = fsdpi_has_param(u, index) ? &u->params[index] : NULL;
    fsdp_dtype has = p ? fsdpi_dtype_group_of(u, p)->param_dtype : dtype;
    if (has == dtype || (call == FSDP_CALL_GRAD && !p->requires_grad) ||
        fsdpi_failed(u->model->world))
        return get(u, index);
    return fsdpi_wrong_dtype(u, index, call, what, "is gathered as", has, dtype, "fsdp_data_dtype",
                             "param_dtype of the model, or keep_dtype of the parameter");
}
FSDP_API void *fsdp_data_as(fsdp_unit *unit, int index, fsdp_dtype dtype) {
    return fsdpi_get_as(unit, index, dtype, FSDP_CALL_DATA, "data_as", fsdp_data);
}
FSDP_API void *fsdp_grad_as(fsdp_unit *unit, int index, fsdp_dtype dtype) {
    return fsdpi_get_as(unit, index, dtype, FSDP_CALL_GRAD, "grad_as", fsdp_grad);
}

FSDP_API fsdp_dtype fsdp_data_dtype(fsdp_unit *unit, int index) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_DATA);
    if (!status) return fsdpi_dtype_group_of(unit, &unit->params[index])->param_dtype;
    if (unit) (void)fsdpi_keep_status(unit->model, status);
    return FSDP_DTYPE_KEEP;
}

FSDP_API fsdp_status fsdp_zero_grad(fsdp_model *model) {
    return fsdpi_writing_ends(model, NULL, FSDP_CALL_ZERO_GRAD,
                              fsdpi_model_call(model, FSDP_CALL_ZERO_GRAD, 1));
}

FSDP_API fsdp_status fsdp_set_grad_none(fsdp_unit *unit, int index) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_ZERO_GRAD);
    if (!status) status = fsdpi_failed(unit->model->world);
    if (status) return status;
    fsdp_model *m = unit->model;
    (void)fsdpi_ext_offer_call(m, unit, FSDP_CALL_ZERO_GRAD, &status);
    if (!status && !fsdpi_lookup(unit, FSDP_CALL_ZERO_GRAD))
        status = fsdpi_wrong_call(unit, FSDP_CALL_ZERO_GRAD, "set_grad_none");
    if (status || !(*fsdpi_use(unit, index) & FSDPI_USE_REDUCED))
        return fsdpi_writing_ends(m, unit, FSDP_CALL_ZERO_GRAD, status);
    const fsdpi_param *p = &unit->params[index];
    *fsdpi_use(unit, index) &= (uint8_t)~FSDPI_USE_REDUCED;
    status = fsdpi_emit_fill(m, unit, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE,
                             fsdpi_flat_of(unit, fsdpi_dtype_group_of(unit, p))->grad,
                             fsdpi_grad_dtype(m, p->dtype), p->lay.shard_offset, p->lay.shard_numel,
                             0);
    if (!status && m->desc.cpu_offload) status = fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
    return fsdpi_writing_ends(m, unit, FSDP_CALL_ZERO_GRAD, status);
}

FSDP_API fsdp_status fsdp_model_reset(fsdp_model *model) {
    if (!model) return fsdp_fail_null(NULL, "model_reset", "model");
    fsdp_status status = fsdpi_failed(model->world);
    if (status) return fsdpi_world_is_failed(model, status);
    if (fsdpi_ext_offer_call(model, NULL, FSDP_CALL_RESET, &status)) return status;
    fsdpi_drain(model->world);
    if (model->num_commits == 0)
        return FSDP_OK; // no unit has run a call; an extension may have
    status = fsdpi_announce(model, FSDP_CALL_RESET, "model_reset");
    if (!status) status = fsdpi_run_units(model, FSDP_CALL_RESET);
    fsdpi_forget_forwards(model);
    model->backward = 0;
    model->hook_status = FSDP_OK;
    fsdpi_pools_rewind(model);
    return status;
}

FSDP_API fsdp_status fsdp_call_begin(fsdp_model *model, int call, const char *what) {
    if (!model) return fsdp_fail_null(NULL, what ? what : "call_begin", "model");
    FSDPI_TRY(fsdpi_commit(model));
    if (model->world->flight) fsdpi_flight_call(model->world, FSDP_CALL_EXTENSION, what);
    if (call < 0 || call >= FSDP_CALL_COUNT)
        return fsdpi_invalid_arg(model->world,
                                 "[E907] call_begin: call is %d, expected FSDP_CALL_*", call);
    if (!what) what = fsdpi_call_name(call);
    FSDPI_TRY(fsdpi_check_units(model, call, what));
    return fsdpi_announce(model, FSDP_CALL_EXTENSION, what);
}

#endif // FSDPI_CORE_STEP_H
