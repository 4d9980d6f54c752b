/* optim/ema.h - the average of the weights

   An average is the only state of this optimizer. A parameter's step is 0 if its average does not
   follow its weights yet, else 1 + the calls of fsdp_ema_update. Invariants: while the average is
   swapped in, fsdp_lock_params keeps code from writing or moving the shards. Between calls, only
   held parameters have step 0: their averages begin in the commit after a thaw. An average that a
   load does not bring begins at the end of the load.
   Callers: programs.

   A part of fsdp_optim.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_OPTIM_H
#include "../../fsdp_optim.h"
#endif
#ifndef FSDPI_OPTIM_EMA_H
#define FSDPI_OPTIM_EMA_H

#include "states.h"
#include "updates.h"

#include <stdio.h>
#include <string.h>

struct fsdp_ema {
    fsdp_optim base;
    fsdp_ema_desc desc;
    int64_t calls; // calls of fsdp_ema_update
    int swapped;
    int warned;                              // 1: E9032 has been logged
    char item[48], step_item[48], label[48]; // names of its items; its own name in texts
    char why[160];                           // reason for the lock while swapped
    int act;                                 // FSDP_EMA_* of the listed updates
    double weight;                           // weight of the listed updates
};

static void fsdpi_ema_fill(fsdp_optim *o, const fsdpi_optim_span *run, double lr, fsdp_update *u) {
    const fsdp_ema *e = (const fsdp_ema *)(void *)o;
    (void)lr;
    u->kind = FSDP_UPDATE_EMA;
    u->scalars[0] = e->weight;
    u->scalars[1] = e->act;
    if (fsdp_dtype_size(run->first->dtype) == sizeof(uint16_t))
        u->second = fsdpi_optim_bits(o, run->first);
}

// Emits the updates of all parameters that have an average. COPY is for those that have none.
static fsdp_status fsdpi_ema_emit(fsdp_ema *e, const char *what, int act, double weight) {
    fsdp_optim *o = &e->base;
    fsdpi_optim_span run = {NULL, NULL, FSDP_DTYPE_KEEP, 0, 0};
    fsdp_status status = FSDP_OK;
    int num = 0;
    e->act = act;
    e->weight = weight;
    for (int i = 0; i < o->num_params && !status; i++) {
        fsdp_param_view v = FSDP_ZERO;
        if ((o->params[i].step == 0) != (act == FSDP_EMA_COPY)) continue;
        v.grad_dtype = o->params[i].dtype;
        status = fsdpi_optim_extend(o, &run, &o->params[i], &v, fsdpi_ema_fill, 1, &num);
    }
    if (!status) status = fsdpi_optim_append(o, &run, fsdpi_ema_fill, 1, &num);
    return status ? status : fsdpi_optim_emit(o->model, o->memory, what, o->updates, num);
}

// Makes tables and states for the model's layout, and begins missing averages by a copy. While the
// average is swapped in none begins, since the shards hold averages.
static fsdp_status fsdpi_ema_begin(fsdp_ema *e, const char *what) {
    fsdp_optim *o = &e->base;
    fsdp_status status = fsdp_params_writable(o->model); // reductions may write them
    if (!status) status = fsdpi_optim_apply_layout(o, what);
    if (status || e->swapped) return status;
    status = fsdpi_ema_emit(e, what, FSDP_EMA_COPY, 1);
    for (int i = 0; i < o->num_params && !status; i++)
        if (o->params[i].step == 0) o->params[i].step = 1;
    return status;
}

static fsdp_status fsdpi_ema_swapped(const fsdp_ema *e, const char *what) {
    if (!e->swapped) return FSDP_OK;
    return fsdp_fail(fsdp_model_world(e->base.model), FSDP_ERR_INVALID_STATE,
                     "[E925] %s: the model has %s, and the weights wait in its place: call "
                     "fsdp_ema_swap first",
                     what, e->label);
}

// Fails if the shards are locked: they may hold something else than weights, such as another
// average.
static fsdp_status fsdpi_ema_reads(fsdp_model *m, const char *what) {
    const char *why = fsdp_lock_reason(m);
    if (!why) return FSDP_OK;
    return fsdp_fail(fsdp_model_world(m), FSDP_ERR_INVALID_STATE, "[E9034] %s: %s", what, why);
}

// Begins the averages that a load of parameters has not brought.
static fsdp_status fsdpi_ema_replaced(fsdp_ema *e) {
    fsdp_optim *o = &e->base;
    int kept = 0, begun = 0;
    for (int i = 0; i < o->num_params; i++) {
        kept |= o->params[i].step != 0;
        begun += o->params[i].step == 0 && o->params[i].numel > 0;
    }
    fsdp_world *w = fsdp_model_world(o->model);
    if (begun && e->calls && fsdp_rank(w) == 0)
        fsdp_warn(w,
                  "[E9031] %s: parameters were loaded without their average, which begins with "
                  "what was loaded: what %lld calls of fsdp_ema_update had averaged is gone (%d "
                  "parameters of this rank)",
                  e->label, (long long)e->calls, begun);
    if (!kept) e->calls = 0;
    return fsdpi_ema_begin(e, "ema");
}

static fsdp_status fsdpi_ema_values(void *user, fsdp_model *model, int event, int ordinal) {
    fsdp_ema *e = (fsdp_ema *)user;
    fsdpi_optim_param *p = fsdpi_optim_find(&e->base, ordinal);
    if (event == FSDP_VALUES_MOVED) return fsdpi_ema_begin(e, "ema");
    if (event == FSDP_VALUES_REPLACED) return fsdpi_ema_replaced(e);
    if (event == FSDP_VALUES_REPLACE && p) p->step = 0;
    if (event != FSDP_VALUES_WRITTEN || !p || e->calls || e->warned) return FSDP_OK;
    e->warned = 1;
    if (fsdp_rank(fsdp_model_world(model)) == 0)
        fsdp_warn(fsdp_model_world(model),
                  "[E9032] param_load: %s was made before, and keeps the weights of then until "
                  "fsdp_ema_update averages: create it after you load",
                  e->label);
    return FSDP_OK;
}

// Describes item `index` for a checkpoint.
static fsdp_status fsdpi_ema_item(void *user, fsdp_model *model, int index, fsdp_state_item *item) {
    fsdp_ema *e = (fsdp_ema *)user;
    fsdp_optim *o = &e->base;
    const int begins = item && !item->sizes_only;
    fsdp_status status = begins ? fsdpi_ema_swapped(e, "state of ema") : FSDP_OK;
    if (begins && index == 0 && !status) {
        status = fsdpi_ema_begin(e, "state of ema");
        for (int i = 0; i < o->num_params && !status; i++) o->params[i].step = 1 + e->calls;
        if (!status && o->place == FSDP_MEMORY_PINNED) // the host reads it in place
            status = fsdp_wait_stream(model, FSDP_STREAM_COMPUTE);
    }
    if (!status) status = fsdpi_optim_item(o, model, index, item);
    // A load writes an equal number of calls for all parameters. One without elements is in no
    // file, and keeps its earlier number.
    const int64_t before = 1 + e->calls;
    for (int i = 0; i < o->num_params && !item && !status; i++)
        if (o->params[i].step && o->params[i].step != before) e->calls = o->params[i].step - 1;
    return status;
}

FSDP_API fsdp_ema_desc fsdp_ema_defaults(void) {
    fsdp_ema_desc d = FSDP_ZERO;
    d.decay = 0.999;
    d.every = 1;
    d.magic = FSDPI_OPTIM_MAGIC;
    return d;
}

// Sets the names of an average and of its items. Without a name the items are `ema` and `ema_step`.
static fsdp_status fsdpi_ema_names(fsdp_ema *e, fsdp_world *w, const char *what) {
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-";
    const char *name = e->desc.name ? e->desc.name : "", *dot = e->desc.name ? "." : "";
    const size_t length = strlen(name);
    if (e->desc.name && (!length || length > 31 || strspn(name, letters) != length))
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E9033] %s: desc.name is '%.60s', expected 1 to 31 letters, digits, '_' "
                         "and '-', or NULL",
                         what, name);
    snprintf(e->item, sizeof e->item, "ema%s%s", dot, name);
    snprintf(e->step_item, sizeof e->step_item, "ema_step%s%s", dot, name);
    snprintf(e->label, sizeof e->label, "the average%s%s%s", length ? " '" : "", name,
             length ? "'" : "");
    snprintf(
        e->why, sizeof e->why,
        "the model has %s of fsdp_ema_create in place of its weights: call fsdp_ema_swap first",
        e->label);
    return FSDP_OK;
}

// Fails unless 0 <= decay <= 1.
static fsdp_status fsdpi_ema_check(fsdp_world *w, const char *what, const char *field,
                                   double decay) {
    if (!fsdpi_optim_bad(decay, HUGE_VAL) && decay <= 1) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_INVALID_ARG, "[E926] %s: %s is %g, expected 0 <= decay <= 1", what,
                     field, decay);
}

FSDP_API fsdp_status fsdp_ema_create(fsdp_model *model, const fsdp_ema_desc *desc, fsdp_ema **ema) {
    static const char *const name = "ema_create";
    fsdp_ema_desc defaults = fsdp_ema_defaults();
    fsdp_ema settings;
    fsdp_optim *base = NULL;
    if (!model || !ema) return fsdp_fail_null(fsdp_model_world(model), name, "model or ema");
    *ema = NULL;
    fsdp_world *w = fsdp_model_world(model);
    memset(&settings, 0, sizeof settings);
    fsdp_ema_desc *d = &settings.desc;
    fsdp_status status = fsdp_desc_read(w, d, desc ? desc : &defaults, sizeof *d, "fsdp_ema_desc");
    settings.base.name = name;
    settings.base.extension.name = "ema";
    settings.base.extension.state = fsdpi_ema_item;
    settings.base.extension.values = fsdpi_ema_values;
    settings.base.num_states = 1;
    settings.base.keeps_bits = 1;
    settings.base.place = d->cpu ? FSDP_MEMORY_PINNED : FSDP_MEMORY_DEVICE;
    if (!status) status = fsdpi_optim_begun(&settings.base, w, d->magic);
    if (!status) status = fsdpi_ema_check(w, name, "desc.decay", d->decay);
    if (!status && (d->every < 1 || d->after < 0))
        status = fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                           "[E927] %s: desc.every is %lld and desc.after %lld, expected >= 1 and "
                           ">= 0",
                           name, (long long)d->every, (long long)d->after);
    if (!status) status = fsdpi_ema_names(&settings, w, name);
    if (!status) status = fsdpi_optim_groups(&settings.base, w, 0, NULL, 0);
    if (!status) status = fsdp_call_begin(model, FSDP_CALL_FULL, name);
    if (!status) status = fsdpi_ema_reads(model, name);
    if (!status)
        status = fsdpi_optim_create(model, &settings.base, (int64_t)sizeof settings, NULL, NULL,
                                    &base);
    if (status) return status;
    fsdp_ema *e = *ema = (fsdp_ema *)(void *)base;
    settings.base = *base;
    *e = settings;
    base->state_names[0] = e->item, base->step_name = e->step_item;
    const double given[] = {d->decay, (double)d->every, (double)d->after, d->decay_at ? 1.0 : 0.0};
    status = fsdpi_optim_agree(base, given, sizeof given);
    if (!status) status = fsdp_agree(model, e->item, sizeof e->item);
    if (!status) status = fsdpi_ema_begin(e, name);
    if (status) fsdp_ema_destroy(e), *ema = NULL;
    return status;
}

FSDP_API fsdp_status fsdp_ema_update(fsdp_ema *ema) {
    static const char *const name = "ema_update";
    if (!ema) return fsdp_fail_null(NULL, name, "ema");
    fsdp_optim *o = &ema->base;
    fsdp_status status = fsdp_call_begin(o->model, FSDP_CALL_FULL, name);
    if (!status) status = fsdpi_ema_swapped(ema, name);
    if (!status) status = fsdpi_ema_reads(o->model, name);
    if (status) return status;
    const fsdp_ema_desc *d = &ema->desc;
    const int64_t call = ema->calls + 1;
    const int acts = call % d->every == 0, copies = call <= d->after;
    double decay = acts && !copies && d->decay_at ? d->decay_at(d->user, call) : d->decay;
    status = fsdpi_ema_check(fsdp_model_world(o->model), name, "what decay_at returned", decay);
    for (int i = 0; i < o->num_params && acts && copies; i++) o->params[i].step = 0;
    if (!status && acts) status = fsdpi_ema_begin(ema, name);
    const double given[] = {(double)call, decay};
    if (!status) status = fsdp_agree(o->model, given, sizeof given);
    if (!status) ema->calls = call;
    if (status || !acts || copies) return status;
    return fsdpi_ema_emit(ema, name, FSDP_EMA_AVERAGE, 1 - decay);
}

FSDP_API fsdp_status fsdp_ema_swap(fsdp_ema *ema) {
    static const char *const name = "ema_swap";
    if (!ema) return fsdp_fail_null(NULL, name, "ema");
    fsdp_model *m = ema->base.model;
    const double given = ema->swapped;
    fsdp_status status = ema->swapped ? fsdp_lock_params(m, NULL) : FSDP_OK;
    if (!status) status = fsdp_call_begin(m, FSDP_CALL_PARAMS_CHANGED, name);
    if (!status) status = fsdpi_ema_begin(ema, name);
    if (!status) status = fsdp_agree(m, &given, sizeof given);
    if (!status)
        status = fsdpi_ema_emit(ema, name, ema->swapped ? FSDP_EMA_SWAP_BACK : FSDP_EMA_SWAP, 0);
    if (!status) status = fsdp_params_changed(m);
    if (!status) ema->swapped = !ema->swapped;
    if (ema->swapped) (void)fsdp_lock_params(m, ema->why);
    return status;
}

FSDP_API int64_t fsdp_ema_nbytes(const fsdp_ema *ema) {
    return ema ? fsdp_optim_nbytes(&ema->base) : 0;
}

FSDP_API void fsdp_ema_destroy(fsdp_ema *ema) {
    if (!ema) return;
    fsdp_model *m = ema->base.model;
    if (ema->swapped && fsdp_ema_swap(ema)) { // swapping fails within a step, or in a failed world
        (void)fsdp_lock_params(m, NULL);
        fsdp_warn(fsdp_model_world(m), "[E233] ema_destroy: the weights could not be swapped back, "
                                       "and are lost: the model has their average");
    }
    fsdp_optim_destroy(&ema->base);
}

#endif // FSDPI_OPTIM_EMA_H
