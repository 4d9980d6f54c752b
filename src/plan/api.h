/* plan/api.h - steps recorded, replayed and left; the public functions

   fsdp_plan. A step begins with the first call after a finalize. If the plan has a tape for its
   variant, it replays calls from it while they are those of the program.
   State: fsdp_plan.mode, and the position in the program or in the tape.
   Callers: programs.

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_API_H
#define FSDPI_PLAN_API_H

#include "../base/macros.h"
#include "../core/gather.h"
#include "../core/objects.h"
#include "../core/step.h"
#include "listing.h"
#include "make.h"
#include "memory.h"
#include "objects.h"
#include "place.h"
#include "replay.h"
#include "settings.h"
#include "simulate.h"
#include "snapshot.h"
#include "tape.h"

#include <stdio.h>
#include <string.h>

static void fsdpi_plan_say(fsdp_plan *p, const fsdpi_plan_call *expected, const fsdp_unit *unit,
                           int call) {
    if (!expected)
        snprintf(p->why, sizeof p->why, "options changed before call %d, %s '%.120s'", p->at,
                 fsdpi_call_name(call), fsdp_unit_label(unit));
    else
        snprintf(p->why, sizeof p->why, "expected %s '%.120s' (call %d of %d), got %s '%.120s'",
                 fsdpi_call_name(expected->call), fsdp_unit_label(expected->unit), p->at,
                 p->kind->num_calls, fsdpi_call_name(call), fsdp_unit_label(unit));
}

// Orders a variant's places: COMPUTE waits for earlier users of their memory, and later users wait
// for COMPUTE.
static fsdp_status fsdpi_plan_pass_by(fsdp_plan *p, const fsdpi_plan_variant *k) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < k->listing.num_slots && !status; i++) {
        fsdp_op op;
        if (k->listing.slots[i].offset < 0) continue;
        fsdp_op_init(&op, p->model, NULL, FSDP_OP_WAIT, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);
        op.what = "plan";
        op.dst = k->bufs[i];
        status = fsdp_emit(p->model, &op);
    }
    return status;
}

/* Orders two variants. They share the arena's memory, but each has its own slots and events. If
   streams run at the same time, the slots of this variant must wait for those of the previous
   one. */
static fsdp_status fsdpi_plan_hand_over(fsdp_plan *p) {
    fsdp_status status = FSDP_OK;
    if (p->last && p->last != p->kind && p->mode_of_world != FSDP_RUN_INLINE) {
        status = fsdpi_plan_pass_by(p, p->last);
        if (!status) status = fsdpi_plan_pass_by(p, p->kind);
    }
    p->last = p->kind;
    return status;
}

// Binds a variant whose arena has been replaced. If that fails on a rank, the step runs eagerly on
// all ranks.
static fsdp_status fsdpi_plan_bind_again(fsdp_plan *p) {
    fsdpi_plan_variant *k = p->kind;
    fsdp_status status = fsdpi_plan_agree(p, k, fsdpi_plan_bind(p, k), 0);
    k->unbound = status != FSDP_OK;
    if (!status) return FSDP_OK;
    fsdpi_plan_drop_kind(p, k);
    p->kind = NULL;
    p->mode = FSDP_PLAN_EAGER;
    snprintf(p->why, sizeof p->why, "%s", "the tape could not be made again for a new arena");
    return fsdp_world_status(p->world);
}

// Drops variants until there is room for a new one. Slots that units hold remain until they are
// released. A variant that was never replayed is of no use.
static void fsdpi_plan_make_room(fsdp_plan *p) {
    while (p->num_kinds >= p->desc.most_kinds) {
        int oldest = 0;
        for (int i = 1; i < p->num_kinds; i++)
            if (p->kinds[i]->used_at < p->kinds[oldest]->used_at) oldest = i;
        p->differ += !p->kinds[oldest]->replayed;
        fsdpi_plan_drop(p, oldest);
    }
}

// Handles the first call of a step: finds its variant.
static fsdp_status fsdpi_plan_begin(fsdp_plan *p) {
    fsdp_status status = FSDP_OK;
    p->open = 1;
    p->at = p->num_calls = p->lost = p->broken = 0;
    p->next = NULL;
    p->settings = fsdpi_plan_settings(p->model);
    p->options = fsdpi_plan_options(p->model);
    p->why[0] = 0;
    p->kind = NULL;
    fsdpi_plan_sweep(p, 0);
    if (!p->num_kinds) fsdpi_plan_drop_all(p); // units have released the arena by now
    fsdpi_plan_states_now(p, p->begin);
    for (int i = 0; i < p->num_kinds && !p->kind; i++)
        if (p->kinds[i]->options == p->options &&
            memcmp(p->kinds[i]->begin, p->begin, (size_t)p->num_units * sizeof *p->begin) == 0)
            p->kind = p->kinds[i];
    p->mode = p->kind ? FSDP_PLAN_REPLAYING : p->warm ? FSDP_PLAN_WARM_UP : FSDP_PLAN_RECORDING;
    if (p->mode == FSDP_PLAN_RECORDING) fsdpi_plan_make_room(p);
    if (p->kind && p->kind->unbound) status = fsdpi_plan_bind_again(p);
    if (p->num_kinds && !p->kind && !p->why[0])
        snprintf(p->why, sizeof p->why, "%s",
                 "another kind of step: options, or what units hold, are not those of a plan");
    return p->kind && !status ? fsdpi_plan_hand_over(p) : status;
}

// Returns 1 if the options are those at the step's beginning, except for divide factors, which ops
// renew.
static int fsdpi_plan_same_options(fsdp_plan *p) {
    uint64_t now = fsdpi_plan_settings(p->model);
    if (now != p->settings && fsdpi_plan_options(p->model) != p->options) return 0;
    p->settings = now;
    return 1;
}

// Returns 1 if a unit's reduction waits for a later call.
static int fsdpi_plan_has_deferred(const fsdp_plan *p, const fsdpi_plan_act *act) {
    return act->what == FSDPI_PLAN_COLLECT && act->why == FSDPI_PLAN_WHY_JOINED &&
           act->call < p->at && act->at >= p->at;
}

/* Leaves the plan. Deferred reductions are made now, with the options of the eager step. */
static fsdp_status fsdpi_plan_stop_replay(fsdp_plan *p) {
    fsdp_status status = FSDP_OK;
    if (!p->open || p->mode != FSDP_PLAN_REPLAYING) return FSDP_OK;
    const fsdpi_plan_decisions *c = &p->kind->listing.choice;
    p->left++;
    p->next = NULL;
    p->mode = FSDP_PLAN_EAGER;
    for (int i = 0; i < c->num_acts && !status; i++)
        if (fsdpi_plan_has_deferred(p, &c->acts[i]))
            status = fsdpi_plan_reduce_waiting(p->units[c->acts[i].unit]);
    return status;
}

// Runs the rest of the step eagerly; strict: the next call fails.
static fsdp_status fsdpi_plan_leave(fsdp_plan *p) {
    p->kind->left++;
    p->broken = p->desc.strict;
    return fsdpi_plan_stop_replay(p);
}

// Handles a setter. If no reduction is deferred, the next call finds out whether options have
// changed.
static fsdp_status fsdpi_plan_setter(fsdp_plan *p) {
    int owes = 0;
    if (!p->open || p->mode != FSDP_PLAN_REPLAYING) return FSDP_OK;
    const fsdpi_plan_decisions *c = &p->kind->listing.choice;
    for (int i = 0; i < c->num_acts; i++) owes |= fsdpi_plan_has_deferred(p, &c->acts[i]);
    if (!owes) return FSDP_OK;
    snprintf(p->why, sizeof p->why,
             "options changed before call %d, while gradients waited for a later one", p->at);
    return fsdpi_plan_leave(p);
}

/* Handles a write to shards or their gradients within a step, which no plan contains: values
   that were gathered or accumulated before it may have changed. */
static fsdp_status fsdpi_plan_written(fsdp_plan *p, int call) {
    if (!p->open || (p->mode != FSDP_PLAN_REPLAYING && p->mode != FSDP_PLAN_RECORDING))
        return FSDP_OK;
    snprintf(p->why, sizeof p->why,
             "%s inside of a step, before call %d: make it between finalize and the next forward",
             fsdpi_call_name(call), p->mode == FSDP_PLAN_REPLAYING ? p->at : p->num_calls);
    if (p->mode == FSDP_PLAN_REPLAYING) return fsdpi_plan_leave(p);
    p->mode = FSDP_PLAN_EAGER;
    p->differ++;
    return FSDP_OK;
}

// Calls the callbacks of units whose parameters a call of the tape makes readable (1), or which
// cease to be (0), also if they lie in another slot afterwards.
static FSDPI_NOINLINE void fsdpi_plan_call_back(const fsdpi_plan_step *step, int readable) {
    for (int i = 0; i < step->num_states; i++) {
        fsdp_unit *u = step->states[i].unit;
        const fsdpi_state *next = &step->states[i].saved.state;
        const int is = next->storage == FSDP_STORAGE_UNSHARDED;
        const int moves = next->slot[FSDP_POOL_GATHER] != u->state.slot[FSDP_POOL_GATHER];
        if (readable ? is : !is || moves) fsdpi_call_back(u, readable);
    }
}

/* Replays one call. Ops are emitted first: in a reduction, ranks compare which parameters are
   used, and after its states none is. */
static fsdp_status fsdpi_plan_replay(fsdp_plan *p, const fsdpi_plan_step *step) {
    p->next = step + 1;
    p->at++;
    for (int i = 0; i < step->num_joined; i++)
        fsdpi_plan_agree_joined(p, &p->kind->tape, &step->joined[i]);
    if (p->model->unit_callbacks) fsdpi_plan_call_back(step, 0);
    fsdp_status status = fsdpi_plan_emit(p->model, step->ops, step->num_ops);
    for (int i = 0; i < step->num_states; i++)
        fsdpi_plan_restore_unit(step->states[i].unit, &step->states[i].saved);
    if (p->model->unit_callbacks && !status) fsdpi_plan_call_back(step, 1);
    return status;
}

static void fsdpi_plan_record(fsdp_plan *p, fsdp_unit *unit, int call) {
    fsdpi_plan_call one = {unit, call, fsdpi_plan_index(unit)};
    if (!fsdpi_plan_same_options(p)) {
        p->mode = FSDP_PLAN_EAGER;
        p->differ++;
        snprintf(p->why, sizeof p->why, "%s", "options changed inside of the step");
        return;
    }
    // Without memory this rank continues to the end of the step, where the other ranks wait for it.
    p->lost |= fsdpi_plan_grow(p->model, (void **)&p->calls, p->num_calls, &p->cap_calls,
                               sizeof one) != FSDP_OK;
    if (!p->lost) p->calls[p->num_calls++] = one;
}

// Makes a variant of the recorded step, at its end. finalized: result of finalize.
static fsdp_status fsdpi_plan_recorded(fsdp_plan *p, fsdp_status finalized) {
    fsdpi_plan_variant *k = NULL;
    size_t begin = (size_t)p->num_units * sizeof *k->begin,
           calls = (size_t)p->num_calls * sizeof *k->calls;
    fsdp_status status = finalized ? finalized : p->lost ? FSDP_ERR_OUT_OF_MEMORY : FSDP_OK;
    if (!status)
        status = fsdpi_plan_grow(p->model, (void **)&p->kinds, p->num_kinds, &p->cap_kinds,
                                 sizeof *p->kinds);
    p->recorded += !finalized;
    if (!status) status = fsdpi_plan_alloc(p->model, sizeof *k, (void **)&k);
    if (!status) status = fsdpi_plan_alloc(p->model, begin, (void **)&k->begin);
    if (!status) status = fsdpi_plan_alloc(p->model, calls, (void **)&k->calls);
    if (!status) {
        memcpy(k->begin, p->begin, begin);
        memcpy(k->calls, p->calls, calls);
        k->plan = p;
        k->options = p->options;
        k->num_calls = p->num_calls;
    }
    int made = !finalized;
    status = fsdpi_plan_make(p, status ? NULL : k, &made);
    if (!status && p->mode != FSDP_PLAN_REFUSED && !made) { // the next equal step has a plan
        snprintf(p->why, sizeof p->why, "%s",
                 "it failed on a rank, or began with gradients or parameters of another step");
        fsdpi_plan_variant_free(p, k);
        return FSDP_OK;
    }
    if (!status && p->mode != FSDP_PLAN_REFUSED) {
        k->used_at = p->steps;
        p->kinds[p->num_kinds++] = k;
        p->mode = FSDP_PLAN_REPLAYING; // from the next step on, if it is like this one
        return FSDP_OK;
    }
    fsdpi_plan_variant_free(p, k);
    if (!fsdp_world_status(p->world))
        fsdpi_plan_drop_all(p); // eager steps have their own slots
    return status;
}

// Handles the end of a step.
static int fsdpi_plan_finalize(fsdp_plan *p, fsdp_status *status) {
    fsdpi_plan_variant *k = p->kind;
    p->open = 0;
    p->next = NULL;
    p->steps++;
    if (p->mode == FSDP_PLAN_WARM_UP && --p->warm == 0) {
        p->mode = FSDP_PLAN_RECORDING; // from the next step on
        return 0;
    }
    if (p->mode == FSDP_PLAN_REPLAYING) {
        k->replayed++;
        p->replayed++;
        k->used_at = p->steps;
        k->left = 0;
        p->differ = 0;
    }
    if (p->mode == FSDP_PLAN_EAGER && k && k->left >= FSDPI_PLAN_MOST_MISSES) {
        fsdpi_plan_drop_kind(p, k);
        p->differ++;
    }
    if (p->differ >= FSDPI_PLAN_MOST_MISSES) {
        char text[FSDPI_PLAN_TEXT];
        snprintf(text, sizeof text, "steps differ from each other: %.400s", p->why);
        fsdpi_plan_refuse_loudly(p, FSDP_ERR_INVALID_STATE, text);
        fsdpi_plan_drop_all(p);
    }
    if (p->mode != FSDP_PLAN_RECORDING) return 0;
    *status = fsdp_finalize_backward(p->model); // calls later extensions, and the core
    if (fsdp_world_status(p->world)) return 1;
    fsdp_status made = fsdpi_plan_recorded(p, *status); // even on failure: the others wait
    if (!*status) *status = made;
    return 1;
}

// Handles any call except the expected one of a replay.
static int fsdpi_plan_look(fsdp_plan *p, fsdp_unit *unit, int call, fsdp_status *status) {
    fsdp_model *model = p->model;
    int ends = call == FSDP_CALL_RESET || call == FSDP_CALL_FINALIZE;
    if (call == FSDP_CALL_SET) {
        *status = fsdpi_plan_setter(p);
        return 0;
    }
    if (call == FSDP_CALL_ZERO_GRAD || call == FSDP_CALL_PARAMS_CHANGED || call == FSDP_CALL_LOAD) {
        *status = fsdpi_plan_written(p, call);
        return 0;
    }
    if (p->mode == FSDP_PLAN_PAUSED)
        p->open = !ends && (p->open || model->options.grad_enabled); // as below
    if (call == FSDP_CALL_RESET) p->open = 0, p->next = NULL;
    if (p->mode >= FSDP_PLAN_PAUSED || call == FSDP_CALL_RESET) return 0;
    if (!p->open && !model->options.grad_enabled) return 0; // an evaluation is no step
    if (!p->open && model->options.uneven) {                // nor has it one program
        p->mode = FSDP_PLAN_EAGER;
        snprintf(p->why, sizeof p->why, "%s", "uneven inputs: ranks make other calls in this step");
        return 0;
    }
    // Extensions get finalize before the core commits, so commit first.
    *status = fsdp_model_commit(model);
    if (!*status && !p->open) *status = fsdpi_plan_begin(p);
    if (*status) return 1;
    if (p->mode == FSDP_PLAN_REPLAYING) {
        const fsdpi_plan_call *next = p->at < p->kind->num_calls ? &p->kind->calls[p->at] : NULL;
        int same = fsdpi_plan_same_options(p);
        if (same && next && next->unit == unit && next->call == call) {
            if (!unit) return fsdpi_plan_finalize(p, status);
            *status = fsdpi_plan_replay(p, &p->kind->tape.steps[p->at]);
            return 1;
        }
        fsdpi_plan_say(p, same ? next : NULL, unit, call);
        *status = fsdpi_plan_leave(p);
        if (*status) return 1;
    }
    if (p->broken) {
        p->broken = 0;
        *status = fsdp_fail(p->world, FSDP_ERR_INVALID_STATE, "[E976] plan: %s", p->why);
        return 1;
    }
    if (p->mode == FSDP_PLAN_RECORDING) fsdpi_plan_record(p, unit, call);
    return unit ? 0 : fsdpi_plan_finalize(p, status);
}

// Answers a call from the tape, if it is the program's next one: `call` of the extension.
static int fsdpi_plan_answer(void *user, fsdp_model *model, fsdp_unit *unit, int call,
                             fsdp_status *status) {
    fsdp_plan *p = (fsdp_plan *)user;
    const fsdpi_plan_step *expected = p->next; // next step of the current replay
    if (expected && unit && expected->unit == unit && expected->call == call &&
        fsdpi_plan_settings(model) == p->settings) {
        *status = fsdpi_plan_replay(p, expected);
        return 1;
    }
    return fsdpi_plan_look(p, unit, call, status);
}

// Returns the mode of the current step or, between steps, of the next one.
static int fsdpi_plan_mode_now(const fsdp_plan *p) {
    return p->open        ? FSDP_PLAN_EAGER
           : p->num_kinds ? FSDP_PLAN_REPLAYING
           : p->warm      ? FSDP_PLAN_WARM_UP
                          : FSDP_PLAN_RECORDING;
}

// Handles a new layout, possibly within a step. The rest of the step runs eagerly.
static void fsdpi_plan_relayout(void *user, fsdp_model *model) {
    fsdp_plan *p = (fsdp_plan *)user;
    (void)model;
    fsdpi_plan_drop_all(p);
    p->next = NULL;
    if (p->open && p->mode == FSDP_PLAN_REPLAYING) p->left++, p->broken = p->desc.strict;
    if (p->mode == FSDP_PLAN_REPLAYING || p->mode == FSDP_PLAN_RECORDING)
        p->mode = fsdpi_plan_mode_now(p);
    if (p->mode != FSDP_PLAN_REFUSED) // the reason is logged
        snprintf(p->why, sizeof p->why, "%s", "the model has a new layout");
}
static void fsdpi_plan_end(void *user) {
    fsdp_plan *p = (fsdp_plan *)user;
    fsdp_model *m = p->model;
    while (p->num_kinds) fsdpi_plan_drop(p, p->num_kinds - 1);
    fsdpi_plan_sweep(p, 1);
    fsdp_buf_destroy(m, p->arena);
    fsdpi_plan_free(m, p->retired_bufs);
    fsdpi_plan_free(m, p->kinds);
    fsdpi_plan_free(m, p->calls);
    fsdpi_plan_free(m, p->begin);
    fsdpi_plan_free(m, p->compute_ns);
    fsdpi_plan_free(m, p);
}

/* -------------------------------------------------------------------------------------------- */
// The public functions.

static fsdp_status fsdpi_plan_bad(fsdp_model *m, const char *field, long long value,
                                  const char *expected) {
    return fsdp_fail(fsdp_model_world(m), FSDP_ERR_INVALID_ARG,
                     "[E977] plan_create: %s is %lld, expected %s", field, value, expected);
}

static fsdp_status fsdpi_plan_check_desc(fsdp_model *m, const fsdp_plan_desc *d) {
    const uint32_t all = (1u << FSDP_PASS_COUNT) - 1;
    if (d->without & ~all) return fsdpi_plan_bad(m, "without", d->without, "1u << FSDP_PASS_*");
    if (d->with & ~all) return fsdpi_plan_bad(m, "with", d->with, "1u << FSDP_PASS_*");
    if (d->warm_up < 0) return fsdpi_plan_bad(m, "warm_up", d->warm_up, ">= 0");
    if (d->ahead < -1) return fsdpi_plan_bad(m, "ahead", d->ahead, ">= -1");
    if (d->most_kinds < 0) return fsdpi_plan_bad(m, "most_kinds", d->most_kinds, ">= 0");
    if (d->most_bytes < 0) return fsdpi_plan_bad(m, "most_bytes", d->most_bytes, ">= 0");
    if (d->bucket_bytes < -1) return fsdpi_plan_bad(m, "bucket_bytes", d->bucket_bytes, ">= -1");
    if (d->first_bucket_bytes < 0)
        return fsdpi_plan_bad(m, "first_bucket_bytes", d->first_bucket_bytes, ">= 0");
    return FSDP_OK;
}

static void fsdpi_plan_defaults(fsdp_plan *p) {
    fsdp_plan_desc *d = &p->desc;
    if (!d->warm_up) d->warm_up = 1;
    if (!d->most_kinds) d->most_kinds = 8;
    if (!d->bucket_bytes) d->bucket_bytes = 1 << 20;
    if (!d->first_bucket_bytes) d->first_bucket_bytes = d->bucket_bytes;
    if (!d->ahead) d->ahead = p->mode_of_world != FSDP_RUN_INLINE;
    if (d->ahead < 0) d->ahead = 0;
    p->warm = d->warm_up;
}

// Returns a hash of the costs; 0: no costs.
static uint64_t fsdpi_plan_hash_cost(const fsdp_plan_cost *cost) {
    fsdp_plan_cost c;
    if (!cost) return 0;
    c = *cost;
    c.compute_ns = NULL;
    return fsdpi_plan_mix_bytes(fsdpi_plan_mix_bytes(0, (const char *)cost->compute_ns,
                                                     (size_t)c.num_compute * sizeof(int64_t)),
                                (const char *)&c, sizeof c);
}

/* Fails unless all ranks create the plan with equal descs. status: this rank's. A failed rank
   continues to the collective, since the others wait there. */
static fsdp_status fsdpi_plan_agree_desc(fsdp_world *w, const fsdp_mesh *mesh,
                                         const fsdp_plan_desc *d, fsdp_status status) {
    static const char *const names[] = {"without",    "with",         "warm_up",
                                        "ahead",      "most_kinds",   "strict",
                                        "most_bytes", "bucket_bytes", "first_bucket_bytes",
                                        "cost"};
    enum { FIELDS = sizeof names / sizeof *names };
    const int64_t mine[FIELDS] = {d->without,
                                  d->with,
                                  d->warm_up,
                                  d->ahead,
                                  d->most_kinds,
                                  d->strict != 0,
                                  d->most_bytes,
                                  d->bucket_bytes,
                                  d->first_bucket_bytes,
                                  (int64_t)(status ? 0 : fsdpi_plan_hash_cost(d->cost))};
    int64_t values[1 + 2 * FIELDS];
    for (int i = 0; i < FIELDS; i++) {
        values[1 + 2 * i] = mine[i];
        values[2 + 2 * i] = ~mine[i];
    }
    status = fsdpi_plan_together(w, mesh, status, values, 1 + 2 * FIELDS);
    for (int i = 0; i < FIELDS && !status; i++) {
        long long least = values[1 + 2 * i], most = ~values[2 + 2 * i];
        if (least != most)
            status = fsdp_fail(w, FSDP_ERR_MISMATCH,
                               "[E937] plan_create: the ranks gave other descs: %s is %lld on one "
                               "and %lld on another: give all the same",
                               names[i], least, most);
    }
    return status;
}

// Reads the desc and its costs. Sets d->cost to NULL or `cost`.
static fsdp_status fsdpi_plan_read_desc(fsdp_model *m, const fsdp_plan_desc *desc,
                                        fsdp_plan_desc *d, fsdp_plan_cost *cost) {
    fsdp_world *w = fsdp_model_world(m);
    fsdp_status status = fsdp_desc_read(w, d, desc, sizeof *d, "fsdp_plan_desc");
    if (!status) status = fsdpi_plan_check_desc(m, d);
    if (status || !d->cost) return status;
    status = fsdp_desc_read(w, cost, d->cost, sizeof *cost, "fsdp_plan_cost");
    d->cost = cost;
    return status ? status : fsdpi_plan_check_cost(w, cost);
}

// Makes the plan, and attaches it to the model. Needs no other rank.
static fsdp_status fsdpi_plan_new(fsdp_model *model, const fsdp_plan_desc *d, const fsdp_mesh *mesh,
                                  fsdp_plan **plan) {
    fsdp_plan *p = NULL;
    if (fsdp_find_extension(model, "plan"))
        return fsdp_fail(fsdp_model_world(model), FSDP_ERR_INVALID_STATE,
                         "[E967] plan_create: the model has a plan: call fsdp_plan_destroy first");
    fsdp_status status = fsdpi_plan_alloc(model, sizeof *p, (void **)&p);
    if (status) return status;
    p->model = model;
    p->world = fsdp_model_world(model);
    p->desc = *d;
    p->desc.cost = NULL;
    p->mesh = mesh;
    p->units = model->units; // a committed model gets no further units
    p->num_units = model->num_units;
    p->mode_of_world = fsdp_model_run_mode(model);
    p->pool = fsdp_pool_register(model, "arena");
    p->extension.name = "plan";
    p->extension.user = p;
    p->extension.call = fsdpi_plan_answer;
    p->extension.relayout = fsdpi_plan_relayout;
    p->memory.name = "memory of a plan";
    p->memory.user = p;
    p->memory.destroy = fsdpi_plan_end;
    fsdpi_plan_defaults(p);
    status = fsdpi_plan_copy_cost(p, d->cost);
    if (!status)
        status = fsdpi_plan_alloc(model, (size_t)p->num_units * sizeof *p->begin,
                                  (void **)&p->begin);
    if (!status && p->pool < 0) status = FSDP_ERR_INVALID_ARG;
    if (!status) status = fsdp_attach(model, &p->memory);
    if (status) {
        fsdpi_plan_end(p);
        return status;
    }
    status = fsdp_attach(model, &p->extension);
    if (status) (void)fsdp_detach(model, &p->memory);
    else *plan = p;
    return status;
}

FSDP_API fsdp_status fsdp_plan_create(fsdp_model *model, const fsdp_plan_desc *desc,
                                      fsdp_plan **plan) {
    fsdp_plan_desc d;
    fsdp_plan *p = NULL;
    fsdp_mesh_info info;
    fsdp_plan_cost cost;
    if (!model || !plan)
        return fsdp_fail_null(fsdp_model_world(model), "plan_create", "model or plan");
    *plan = NULL;
    memset(&d, 0, sizeof d);
    fsdp_status status = fsdp_model_commit(model);
    if (!status) status = fsdp_model_mesh_info(model, &info);
    if (status) return status;
    status = fsdpi_plan_read_desc(model, desc, &d, &cost);
    if (!status) status = fsdpi_plan_new(model, &d, info.mesh, &p);
    status = fsdpi_plan_agree_desc(fsdp_model_world(model), info.mesh, &d, status);
    if (status) fsdp_plan_destroy(p);
    else *plan = p;
    return status;
}

// Lists the eager program, with the slots that pools would give.
static fsdp_status fsdpi_plan_list_calls(fsdp_plan *p, fsdpi_plan_variant *k,
                                         fsdpi_plan_listing *l) {
    fsdpi_plan_tape tape;
    fsdpi_plan_variant plain = *k;
    memset(l, 0, sizeof *l);
    memset(&tape, 0, sizeof tape);
    fsdp_status status = fsdpi_plan_tape_make(p, k, NULL, NULL, 0, &tape);
    if (!status) status = fsdpi_plan_place(p, &tape, l, 0, 1);
    plain.tape = tape;
    if (!status) status = fsdpi_plan_list(p, &plain, &tape, l);
    fsdpi_plan_tape_free(p, &tape);
    return status;
}

FSDP_API fsdp_status fsdp_plan_simulate(const fsdp_plan *plan, int index, int eager,
                                        const fsdp_plan_cost *cost, fsdp_plan_times *out) {
    fsdp_plan_cost c;
    fsdp_status status = plan && eager ? fsdp_model_commit(plan->model) : FSDP_OK;
    if (status) return status; // a new layout has dropped all plans by now
    status = fsdpi_plan_check_index(plan, index, cost && out, "plan_simulate: plan, cost or out");
    if (status) return status;
    fsdp_plan *p = plan->kinds[index]->plan;
    status = fsdp_desc_read(p->world, &c, cost, sizeof c, "fsdp_plan_cost");
    if (!status) status = fsdpi_plan_check_cost(p->world, &c);
    if (!status && eager && plan->kinds[index]->options != fsdpi_plan_options(p->model))
        status = fsdp_fail(p->world, FSDP_ERR_INVALID_STATE,
                           "[E944] plan_simulate: options are not those of plan %d, so that its "
                           "calls would do something else: set them as they were when it was made",
                           index);
    if (status || !eager)
        return status ? status : fsdpi_plan_time(p->model, &plan->kinds[index]->listing, &c, out);
    fsdpi_plan_listing calls;
    status = fsdpi_plan_list_calls(p, plan->kinds[index], &calls);
    if (!status) status = fsdpi_plan_time(p->model, &calls, &c, out);
    fsdpi_plan_listing_end(p->model, &calls);
    return status;
}

FSDP_API void fsdp_plan_destroy(fsdp_plan *plan) {
    if (!plan) return;
    (void)fsdpi_plan_stop_replay(plan);
    if (fsdp_detach(plan->model, &plan->extension)) return;
    fsdpi_plan_drop_all(plan);
    if (!plan->num_retired_bufs)
        (void)fsdp_detach(plan->model, &plan->memory); // otherwise with the model
}

FSDP_API fsdp_plan_mode fsdp_plan_state(const fsdp_plan *plan) {
    return plan ? (fsdp_plan_mode)plan->mode : FSDP_PLAN_MODE_COUNT;
}

FSDP_API const char *fsdp_plan_why(const fsdp_plan *plan) { return plan ? plan->why : ""; }

FSDP_API fsdp_status fsdp_plan_pause(fsdp_plan *plan, int paused) {
    if (!plan) return fsdp_fail_null(NULL, "plan_pause", "plan");
    if (plan->mode == FSDP_PLAN_REFUSED || (plan->mode == FSDP_PLAN_PAUSED) == (paused != 0))
        return FSDP_OK;
    if (!paused) { // from the next step on: the rest of this one runs eagerly
        plan->mode = fsdpi_plan_mode_now(plan);
        plan->kind = NULL;
        if (!plan->open) plan->why[0] = 0;
        return FSDP_OK;
    }
    fsdp_status status = fsdpi_plan_stop_replay(plan);
    plan->mode = FSDP_PLAN_PAUSED;
    plan->next = NULL;
    snprintf(plan->why, sizeof plan->why, "%s", "paused by fsdp_plan_pause");
    return status;
}

FSDP_API fsdp_status fsdp_plan_forget(fsdp_plan *plan) {
    if (!plan) return fsdp_fail_null(NULL, "plan_forget", "plan");
    fsdp_status status = fsdpi_plan_stop_replay(plan);
    fsdpi_plan_drop_all(plan);
    plan->kind = NULL;
    plan->next = NULL;
    plan->differ = 0;
    if (plan->mode != FSDP_PLAN_PAUSED) plan->mode = fsdpi_plan_mode_now(plan);
    snprintf(plan->why, sizeof plan->why, "%s", "plans were dropped by fsdp_plan_forget");
    return status;
}

// Counts parameters whose slots are held when backward begins, and the most units gathered at a
// time.
static void fsdpi_plan_count_open(const fsdp_plan *p, const fsdpi_plan_variant *k,
                                  fsdp_plan_report *out) {
    const fsdpi_plan_tape *t = &k->tape;
    int backward = t->ops_at[k->listing.forward_calls], now = 0;
    for (int i = 0; i < t->num_ops; i++) {
        const fsdpi_plan_pair *pair = &t->pairs[i];
        int use = t->ops[i].kind == FSDP_OP_ACQUIRE   ? pair->dst
                  : t->ops[i].kind == FSDP_OP_RELEASE ? pair->src
                                                      : -1;
        if (use < 0 || t->uses[use].pool != FSDP_POOL_GATHER) continue;
        now += t->ops[i].kind == FSDP_OP_ACQUIRE ? 1 : -1;
        if (now > out->most_open) out->most_open = now;
    }
    for (int i = 0; i < t->num_uses; i++)
        if (t->uses[i].pool == FSDP_POOL_GATHER && t->uses[i].from < backward &&
            t->uses[i].to >= backward)
            out->crossing += p->units[t->uses[i].unit]->desc.num_params;
}

FSDP_API fsdp_status fsdp_plan_report_get(const fsdp_plan *plan, int index, fsdp_plan_report *out) {
    fsdp_status status =
        fsdpi_plan_check_index(plan, index, out != NULL, "plan_report_get: plan or out");
    if (status) return status;
    const fsdpi_plan_variant *k = plan->kinds[index];
    const fsdpi_plan_listing *l = &k->listing;
    memset(out, 0, sizeof *out);
    out->calls = l->num_calls;
    out->forward_calls = l->forward_calls;
    out->units = l->num_units;
    out->buckets = k->tape.num_groups;
    for (int i = 0; i < 2; i++) {
        out->ops[i] = l->ops[i];
        out->gathers[i] = l->gathers[i];
        out->reductions[i] = l->reductions[i];
        out->replicas[i] = l->replica_ops[i];
        out->gather_bytes[i] = l->gather_bytes[i];
        out->reduce_bytes[i] = l->reduce_bytes[i];
    }
    out->bytes[0] = l->eager;
    out->bytes[1] = l->bytes;
    out->bound = l->bound;
    fsdpi_plan_count_open(plan, k, out);
    out->hash = l->hash;
    out->replayed = plan->replayed;
    out->left = plan->left;
    out->recorded = plan->recorded;
    out->host_bytes = fsdpi_plan_host_bytes(k);
    return FSDP_OK;
}

#endif // FSDPI_PLAN_API_H
