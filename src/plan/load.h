/* plan/load.h - a plan from a text instead of a recorded step

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_LOAD_H
#define FSDPI_PLAN_LOAD_H

#include "../core/error.h"
#include "../core/step.h"
#include "join.h"
#include "listing.h"
#include "make.h"
#include "memory.h"
#include "objects.h"
#include "parse.h"
#include "passes.h"
#include "place.h"
#include "prove.h"
#include "settings.h"
#include "tape.h"
#include "text.h"

#include <string.h>

// Owns: the way from decisions that somebody wrote to a kind. The text says what calls the program
// makes and what is decided; all else is derived again, and compared with what the text says of it.

static fsdp_status fsdpi_plan_other(const fsdp_plan *p, const char *field, long long theirs,
                                    long long mine) {
    return fsdp_fail(p->world, FSDP_ERR_MISMATCH,
                     "[E989] plan_load: the text is of another model or world: %s is %lld, here it "
                     "is %lld",
                     field, theirs, mine);
}

// Is the text of this model, in a world like this one?
static fsdp_status fsdpi_plan_check_model(const fsdp_plan *p, const fsdpi_plan_listing *l) {
    const fsdp_unit *stranger;
    const fsdp_mesh_info *mesh = fsdpi_plan_mesh_info(p, &stranger);
    if (l->num_units != p->num_units)
        return fsdpi_plan_other(p, "units", l->num_units, p->num_units);
    if (l->num_params != fsdp_num_params(p->model))
        return fsdpi_plan_other(p, "params", l->num_params, fsdp_num_params(p->model));
    if (l->shards != mesh->shard_mesh_size)
        return fsdpi_plan_other(p, "shards", l->shards, mesh->shard_mesh_size);
    if (l->replicas != mesh->replicate_mesh_size)
        return fsdpi_plan_other(p, "replicas", l->replicas, mesh->replicate_mesh_size);
    if (l->mode != p->mode_of_world)
        return fsdp_fail(p->world, FSDP_ERR_MISMATCH,
                         "[E990] plan_load: the text is of a world that runs %s, this one runs %s",
                         fsdpi_plan_modes[l->mode], fsdpi_plan_modes[p->mode_of_world]);
    if (l->model != fsdpi_plan_model_hash(p))
        return fsdp_fail(
            p->world, FSDP_ERR_MISMATCH,
            "[E991] plan_load: the text is of a model with other names, shapes, dtypes "
            "or frozen parameters");
    return FSDP_OK;
}

/* Finds the states in which steps begin: one step by calls leads there, after which gradients are
   dropped. If units hold slots then, a text cannot tell which: so the states are those of now. */
static fsdp_status fsdpi_plan_trial_run(void *user) {
    fsdpi_plan_lowering *s = (fsdpi_plan_lowering *)user;
    fsdp_plan *p = s->plan;
    fsdp_status status = fsdpi_plan_lower_calls(user);
    if (!status) s->call = s->kind->num_calls - 1;
    if (!status) status = fsdp_finalize_backward(p->model);
    if (!status) status = fsdp_params_changed(p->model);
    if (!status) status = fsdp_zero_grad(p->model);
    if (!status) fsdpi_plan_states_now(p, s->last);
    s->lasts = fsdpi_plan_give_back(s);
    if (!status && !s->lasts)
        memcpy(s->kind->begin, s->last, (size_t)p->num_units * sizeof *s->last);
    return status;
}

static fsdp_status fsdpi_plan_find_begin(fsdp_plan *p, fsdpi_plan_variant *k) {
    fsdpi_plan_tape raw;
    fsdpi_plan_lowering show;
    fsdpi_plan_lowering_new(&show, p, &raw, k, NULL, NULL, 0);
    fsdpi_plan_states_now(p, k->begin);
    FSDPI_TRY(fsdpi_check_units(p->model, FSDP_CALL_FULL, "plan_load"));
    for (int i = 0; i < p->num_units * FSDPI_PLAN_HELD_COUNT; i++) {
        const fsdp_buf *slot = fsdpi_plan_begins_with(k, i);
        if (slot && fsdpi_plan_is_part(p, slot))
            return fsdp_fail(p->world, FSDP_ERR_INVALID_STATE,
                             "[E940] plan_load: a unit holds a slot of a plan since a step that "
                             "left it: run a whole step, or call fsdp_model_reset, first");
    }
    fsdp_status status = fsdpi_plan_lower_with(&show, fsdpi_plan_trial_run);
    if (status && !fsdp_world_status(p->world) && status != FSDP_ERR_OUT_OF_MEMORY) {
        const fsdpi_plan_call *at = &k->calls[show.call];
        status = fsdp_fail(p->world, FSDP_ERR_INVALID_ARG,
                           "[E992] plan_load: call %d, %s '%.120s', is not possible where the text "
                           "has it: put the calls in the order of your program. %.300s",
                           show.call, fsdpi_call_name(at->call),
                           fsdp_unit_label(at->unit), fsdp_last_error(p->world));
    }
    fsdpi_plan_lowering_end(&show);
    fsdpi_plan_tape_free(p, &raw);
    return status;
}

// What follows from acts: who waits for a later call, and from which pre_backward on there is sync.
static void fsdpi_plan_derive_choice(const fsdpi_plan_facts *f, fsdpi_plan_decisions *c) {
    for (int i = 0; i < c->num_acts; i++) {
        fsdpi_plan_act *act = &c->acts[i];
        if (act->what != FSDPI_PLAN_REDUCE) continue;
        c->waits[act->unit] = 1;
        act->at = f->post[act->unit];
    }
    for (int i = 0; i < c->num_acts; i++) {
        const fsdpi_plan_act *act = &c->acts[i];
        int pre = act->call;
        if (act->what != FSDPI_PLAN_COLLECT || c->waits[act->unit]) continue;
        for (int k = 0; k < f->num_calls; k++) // one that collects makes the others reduce
            if (f->kind->calls[k].index == act->unit && c->sync[k] < 0 &&
                f->kind->calls[k].call == FSDP_CALL_PRE_BACKWARD)
                c->sync[k] = 1;
        while (pre > 0 && (f->kind->calls[pre].index != act->unit ||
                           f->kind->calls[pre].call != FSDP_CALL_PRE_BACKWARD))
            pre--;
        c->sync[pre] = 0;
    }
}

static fsdp_status fsdpi_plan_act_refused(const fsdp_plan *p, const fsdpi_plan_act *act,
                                          const char *why) {
    return fsdp_fail(p->world, FSDP_ERR_INVALID_ARG,
                     "[E993] plan_load: a decision is not possible where the text has it: call %d, "
                     "%s '%.200s': %s",
                     act->call, fsdpi_plan_words[act->what], fsdp_unit_label(p->units[act->unit]),
                     why);
}

static int fsdpi_plan_has_act(const fsdpi_plan_decisions *c, int what, int unit, int call) {
    for (int i = 0; i < c->num_acts; i++)
        if (c->acts[i].what == what && c->acts[i].unit == unit &&
            (call < 0 || c->acts[i].call == call))
            return 1;
    return 0;
}

/* What the tape alone does not show: gradients that wait are reduced in this step, and what is kept
   is there. */
static fsdp_status fsdpi_plan_check_acts(const fsdp_plan *p, const fsdpi_plan_facts *f,
                                         const fsdpi_plan_decisions *c) {
    for (int i = 0; i < c->num_acts; i++) {
        const fsdpi_plan_act *act = &c->acts[i];
        int u = act->unit, reduced = 0, ends = 0;
        for (int k = act->call + 1; k + 1 < f->num_calls; k++)
            reduced |= f->kind->calls[k].index == u &&
                       f->kind->calls[k].call == FSDP_CALL_POST_BACKWARD &&
                       !fsdpi_plan_has_act(c, FSDPI_PLAN_COLLECT, u, k);
        for (int k = 0; k < f->num_spans; k++)
            ends |= f->spans[k].owner == u && f->spans[k].end == act->call;
        if (i > 0 && act[-1].call == act->call && act->what == FSDPI_PLAN_GATHER && !act->late &&
            (act[-1].what != FSDPI_PLAN_GATHER || act[-1].late))
            return fsdpi_plan_act_refused(p, act, "it comes before what is done after the call");
        const uint64_t *sort = act->what == FSDPI_PLAN_GATHER ? f->gathers : f->reduces;
        if (i > 0 && fsdpi_plan_is_joined(act - 1, act) &&
            (!sort[u] || sort[u] != sort[act[-1].unit]))
            return fsdpi_plan_act_refused(p, act, "it cannot be joined with the one before it");
        if (act->call + 1 >= f->num_calls)
            return fsdpi_plan_act_refused(p, act, "nothing is decided in finalize_backward");
        if (act->what == FSDPI_PLAN_KEEP && !ends)
            return fsdpi_plan_act_refused(p, act, "by calls it is not freed there");
        if (act->what == FSDPI_PLAN_COLLECT &&
            (f->kind->calls[act->call].index != u ||
             f->kind->calls[act->call].call != FSDP_CALL_POST_BACKWARD))
            return fsdpi_plan_act_refused(p, act, "the call is not its post_backward");
        if (act->what == FSDPI_PLAN_COLLECT && !c->waits[u] && !reduced)
            return fsdpi_plan_act_refused(p, act, "nothing reduces what waits");
        if (act->what == FSDPI_PLAN_REDUCE &&
            (f->posts[u] != 1 || f->last_call[u] != f->post[u] || act->call < f->post[u] ||
             !f->reduces[u] || !fsdpi_plan_has_act(c, FSDPI_PLAN_COLLECT, u, f->post[u])))
            return fsdpi_plan_act_refused(p, act, "its gradients do not wait there");
    }
    for (int k = 0; k < f->num_spans; k++) { // finalize frees what is open, and nothing else
        const fsdpi_plan_span *span = &f->spans[k];
        int last = span->end < f->num_calls, freed = 0;
        for (int i = k + 1; i < f->num_spans; i++) last &= f->spans[i].owner != span->owner;
        for (int i = 0; i < c->num_acts; i++)
            freed |= c->acts[i].what == FSDPI_PLAN_FREE && c->acts[i].unit == span->owner &&
                     c->acts[i].call >= span->end;
        if (last && !freed)
            return fsdp_fail(p->world, FSDP_ERR_INVALID_ARG,
                             "[E962] plan_load: a decision is missing: '%.200s' is not freed after "
                             "its last use in call %d",
                             fsdp_unit_label(p->units[span->owner]), span->end);
    }
    return FSDP_OK;
}

// The kind's tape and listing from the acts of `given`.
static fsdp_status fsdpi_plan_load_alone(fsdp_plan *p, fsdpi_plan_variant *k,
                                         const fsdpi_plan_listing *given, const char *text,
                                         size_t length, int ops) {
    fsdpi_plan_tape by_calls;
    fsdpi_plan_facts f;
    fsdpi_plan_listing *l = &k->listing;
    memset(&by_calls, 0, sizeof by_calls);
    memset(&f, 0, sizeof f);
    fsdp_status status = fsdpi_plan_find_begin(p, k);
    if (!status) status = fsdpi_plan_by_calls(p, k, &by_calls);
    if (!status) status = fsdpi_plan_facts_new(p, k, &f);
    if (!status) status = fsdpi_plan_find_spans(p, &f, &by_calls);
    if (!status) status = fsdpi_plan_decisions_new(p, &l->choice, k->num_calls);
    for (int i = 0; i < given->choice.num_acts && !status; i++) {
        const fsdpi_plan_act *act = &given->choice.acts[i];
        status = fsdpi_plan_act_add(p, &l->choice, act->call, act->what, act->late, act->unit,
                                    act->group, act->why, act->at);
    }
    if (!status) {
        memcpy(l->choice.managed, f.managed, (size_t)p->num_units);
        fsdpi_plan_derive_choice(&f, &l->choice);
        status = fsdpi_plan_check_acts(p, &f, &l->choice);
    }
    if (!status) {
        fsdpi_plan_count_ops(&by_calls, l, 0);
        int decides = l->choice.num_acts > 0;
        status = fsdpi_plan_tape_make(p, k, decides ? &l->choice : NULL, NULL, 0, &k->tape);
        if (status && !fsdp_world_status(p->world) && status != FSDP_ERR_OUT_OF_MEMORY)
            status = fsdp_fail(
                p->world, FSDP_ERR_INVALID_ARG,
                "[E968] plan_load: the decisions of the text are not possible together: "
                "%s",
                fsdp_last_error(p->world));
    }
    if (!status) status = fsdpi_plan_place(p, &k->tape, l, fsdpi_plan_passes(p), 0);
    if (!status) status = fsdpi_plan_finish_listing(p, k, &by_calls, &f);
    l->by_calls = given->by_calls;
    fsdp_plan_proof proof;
    if (!status) status = fsdpi_plan_prove_one(p->model, l, &proof);
    if (!status && proof.refuted)
        status = fsdp_fail(p->world, FSDP_ERR_INVALID_ARG, "[E994] plan_load: refuted: %s",
                           proof.text);
    char *printed = NULL;
    size_t size = 0;
    if (!status && ops) status = fsdpi_plan_print(p->model, l, FSDP_PLAN_TEXT_OPS, &printed, &size);
    if (!status && ops) {
        fsdpi_plan_in in;
        memset(&in, 0, sizeof in);
        in.world = p->world;
        in.text = text;
        in.end = text + length - (sizeof "end 0123456789abcdef\n" - 1);
        fsdpi_plan_same_text(&in, printed, size, "what follows from the decisions, ");
        status = in.status;
    }
    fsdpi_plan_free(p->model, printed);
    fsdpi_plan_facts_end(p, &f);
    fsdpi_plan_tape_free(p, &by_calls);
    return status;
}

static fsdp_status fsdpi_plan_load_kind(fsdp_plan *p, const fsdpi_plan_listing *given,
                                        fsdpi_plan_variant **out) {
    fsdpi_plan_variant *k;
    fsdp_status status = fsdpi_plan_alloc(p->model, sizeof *k, (void **)out);
    if (status) return status;
    k = *out;
    status = fsdpi_plan_alloc(p->model, (size_t)p->num_units * sizeof *k->begin,
                              (void **)&k->begin);
    if (!status)
        status = fsdpi_plan_alloc(p->model, (size_t)given->num_calls * sizeof *k->calls,
                                  (void **)&k->calls);
    k->plan = p;
    k->options = fsdpi_plan_options(p->model);
    k->num_calls = given->num_calls;
    for (int c = 0; c < given->num_calls && !status; c++) {
        k->calls[c] = given->calls[c];
        k->calls[c].unit = given->calls[c].index >= 0 ? p->units[given->calls[c].index] : NULL;
    }
    return status;
}

// May a plan be loaded now?
static fsdp_status fsdpi_plan_may_load(const fsdp_plan *p, const char *text) {
    if (!p || !text)
        return fsdp_fail(p ? p->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E995] plan_load: plan or text is NULL");
    if (p->mode == FSDP_PLAN_REFUSED)
        return fsdp_fail(p->world, FSDP_ERR_INVALID_STATE,
                         "[E942] plan_load: steps go by calls for good, so that no plan is used: "
                         "call fsdp_plan_forget first");
    if (p->open || p->num_kinds >= p->desc.most_kinds)
        return fsdp_fail(p->world, FSDP_ERR_INVALID_STATE,
                         "[E996] plan_load: %s: load between steps, and at most %d kinds of steps",
                         p->open ? "a step is under way" : "no place is left", p->desc.most_kinds);
    return FSDP_OK;
}

static fsdp_status fsdpi_plan_load_fits(const fsdp_plan *p, const fsdpi_plan_variant *k) {
    int64_t bytes = k->listing.bytes, most = p->desc.most_bytes;
    if (!most || bytes <= most) return FSDP_OK;
    return fsdp_fail(p->world, FSDP_ERR_OUT_OF_MEMORY,
                     "[E939] plan_load: slots need %lld bytes, %lld are allowed: raise "
                     "fsdp_plan_desc.most_bytes, or keep fewer units",
                     (long long)bytes, (long long)most);
}

FSDP_API fsdp_status fsdp_plan_load(fsdp_plan *plan, const char *text, size_t length) {
    fsdpi_plan_listing given;
    fsdpi_plan_variant *k = NULL;
    int ops = 0;
    memset(&given, 0, sizeof given);
    fsdp_status status = fsdpi_plan_may_load(plan, text);
    if (!plan) return status;
    if (!status) status = fsdpi_plan_parse(plan->model, text, length, &given, &ops);
    if (!status) status = fsdpi_plan_check_model(plan, &given); // commits
    if (!status)
        status = fsdpi_plan_grow(plan->model, (void **)&plan->kinds, plan->num_kinds,
                                 &plan->cap_kinds, sizeof *plan->kinds);
    if (!status) status = fsdpi_plan_load_kind(plan, &given, &k);
    if (!status) status = fsdpi_plan_load_alone(plan, k, &given, text, length, ops);
    if (!status) status = fsdpi_plan_load_fits(plan, k);
    if (!status) k->listing.hash = fsdpi_plan_text_hash(&k->listing);
    status = fsdpi_plan_agree(plan, k, status, status ? 1 : k->listing.hash);
    int binds = !status;
    if (binds) status = fsdpi_plan_agree(plan, k, fsdpi_plan_bind_all(plan, k), 0);
    fsdpi_plan_listing_end(plan->model, &given);
    if (!status) {
        k->used_at = plan->steps;
        plan->kinds[plan->num_kinds++] = k;
        return FSDP_OK;
    }
    fsdpi_plan_variant_free(plan, k);
    if (binds && !fsdp_world_status(plan->world)) { // the other kinds may have lost their places
        fsdpi_plan_drop_all(plan);
        if (plan->mode == FSDP_PLAN_REPLAYING) plan->mode = FSDP_PLAN_RECORDING;
    }
    return status;
}

#endif // FSDPI_PLAN_LOAD_H
