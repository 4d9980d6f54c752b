/* core/predict.h - a prediction of memory: a step of a copy that runs nothing; why memory is short

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_PREDICT_H
#define FSDPI_CORE_PREDICT_H

#include "alloc.h"
#include "commit.h"
#include "error.h"
#include "model.h"
#include "objects.h"
#include "os.h"
#include "pool.h"
#include "report.h"
#include "run.h"
#include "step.h"
#include "unit.h"

#include <string.h>

// The steps of a prediction: units that never reshard are open around those that do.
static fsdp_status fsdpi_predict_step(fsdp_model *m) {
    static const uint8_t calls[] = {FSDP_CALL_PRE_FORWARD, FSDP_CALL_POST_FORWARD,
                                    FSDP_CALL_PRE_BACKWARD, FSDP_CALL_POST_BACKWARD};
    int reshards = 0;
    for (int i = 0; i < m->num_units; i++)
        reshards |= m->units[i]->options.reshard_after_forward != FSDP_RESHARD_NEVER;
    for (int back = 0; back < 2; back++) {
        const uint8_t *call = calls + 2 * back;
        for (int pass = 0; pass < 3; pass++) { // open those around, run others, close those around
            for (int i = 0; i < m->num_units; i++) {
                fsdp_unit *u = m->units[back ? m->num_units - 1 - i : i];
                int around = u->options.reshard_after_forward == FSDP_RESHARD_NEVER && reshards &&
                             m->desc.reshard_after_forward != FSDP_RESHARD_NEVER;
                if (around != (pass != 1)) continue;
                if (pass < 2) FSDPI_TRY(fsdpi_apply_row(u, fsdpi_lookup(u, call[0])));
                for (int k = 0; back && k < u->desc.num_params; k++)
                    if (u->params[k].requires_grad) *fsdpi_use(u, k) |= FSDPI_USE_USED;
                if (pass > 0) FSDPI_TRY(fsdpi_apply_row(u, fsdpi_lookup(u, call[1])));
            }
        }
    }
    return fsdpi_finalize(m);
}

// Walks a microbatch that keeps what `step` says, and the last one. Any others between them need no
// more memory: they meet what the last one meets.
static fsdp_status fsdpi_predict_microbatches(fsdp_model *m, const fsdp_predict_desc *step) {
    const int keeps = step->without_sync || step->without_all_reduce || step->without_reshard;
    for (int left = keeps; left >= 0; left--) {
        for (int i = 0; i < m->num_units; i++) {
            fsdpi_options *o = &m->units[i]->options;
            o->sync = !left || !step->without_sync;
            o->all_reduce = o->sync && (!left || !step->without_all_reduce);
            o->reshard_after_backward = !left || !step->without_reshard;
            fsdpi_unit_facts(m->units[i]);
        }
        FSDPI_TRY(fsdpi_predict_step(m));
    }
    return FSDP_OK;
}

// A copy of a unit as it was made, with its own marks of use. NULL: no memory.
static fsdp_unit *fsdpi_unit_copy(fsdp_model *dry, const fsdp_unit *u) {
    size_t parts = (size_t)u->desc.num_params * sizeof *u->layout.parts,
           params = fsdpi_params_bytes(u);
    fsdp_unit *copy = (fsdp_unit *)fsdpi_model_alloc(dry, sizeof *copy + parts + params);
    if (!copy) return NULL;
    *copy = *u;
    copy->model = dry;
    copy->params = (fsdpi_param *)(void *)(copy + 1);
    copy->layout.parts = (fsdpi_dtype_group *)(void *)((char *)copy->params + params);
    memcpy(copy->params, u->params, params);
    memcpy(copy->layout.parts, u->layout.parts, parts);
    for (int k = 0; k < copy->layout.num_parts; k++)
        if (copy->layout.parts[k].extended)
            copy->layout.parts[k].extended = copy->params +
                                             (copy->layout.parts[k].extended - u->params);
    fsdpi_unit_unbuild(copy);
    copy->use = (uint64_t *)(void *)(copy->params + u->desc.num_params);
    memset(copy->use, 0, 8 * (size_t)u->use_words);
    copy->state = fsdpi_state_new();
    fsdpi_unit_facts(copy);
    return copy;
}

// A device without memory: all that is asked of it while no record runs.
static fsdp_status fsdpi_none_alloc(fsdp_device *device, int kind, size_t size, void **ptr) {
    (void)device, (void)kind, (void)size;
    *ptr = (void *)(uintptr_t)FSDPI_ALIGN; // an address that is never read or written
    return FSDP_OK;
}
static void fsdpi_none_free(fsdp_device *device, int kind, void *ptr, size_t size) {
    (void)device, (void)kind, (void)ptr, (void)size;
}
static fsdp_status fsdpi_none_event(fsdp_device *device, void **native) {
    (void)device;
    *native = NULL;
    return FSDP_OK;
}

// An extension that takes every record: none runs.
static int fsdpi_take_all(void *user, fsdp_model *model, fsdp_op *op) {
    (void)user, (void)model, (void)op;
    return 1;
}

// A copy of a model in a copy of its world, where nothing runs and no memory is had: so it walks
// the same schedule, and counts.
typedef struct fsdpi_prediction {
    fsdp_model model; // the first member
    fsdp_world world;
    uint32_t state; // of the world
    fsdp_device_ops device;
    fsdpi_attached taker;
} fsdpi_prediction;

static void fsdpi_predict_free(fsdp_model *dry) {
    if (!dry) return;
    fsdpi_uncommit(dry);
    fsdpi_model_free_buffers(dry);
    for (int i = 0; i < dry->num_units; i++) fsdpi_model_free(dry, dry->units[i]);
    fsdpi_model_free(dry, dry->units);
    fsdp_allocator allocator = dry->world->boot.allocator;
    fsdpi_free(&allocator, dry);
}

// What a prediction has otherwise than the model. All zero: nothing, but a failure has no text.
typedef struct fsdpi_change {
    int shards;             // ranks that shard each unit; 0: as many as now
    int reshards, offloads; // 1: reshard_after_forward of all units; cpu_offload
} fsdpi_change;

static fsdp_status fsdpi_change_unit(fsdp_unit *u, const fsdpi_change *change) {
    int fixed = u->desc.slices && !change->reshards; // sizes that belong to the number of ranks
    for (int k = 0; k < u->desc.num_params; k++) fixed |= u->params[k].num_strings;
    if (change->shards && fixed) return FSDP_ERR_UNSUPPORTED;
    if (change->shards) u->desc.info.shard_mesh_size = change->shards;
    if (change->reshards) u->options.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    if (change->reshards) u->desc.slices = 0;
    return fsdpi_unit_arrange(u);
}

static void fsdpi_predict_world(fsdpi_prediction *r, const fsdp_world *w) {
    r->world.boot = w->boot;
    r->world.rank = w->rank;
    r->world.size = 1; // a failure here is of this rank alone
    r->world.log_level = w->log_level;
    r->world.caps = w->caps;
    r->world.mode = w->mode;
    r->world.state = &r->state;
    r->state = 1;
    r->world.device = w->device;
    r->world.device_ops = &r->device;
    r->device.flags = w->device_ops->flags;
    r->device.alloc = fsdpi_none_alloc;
    r->device.free = fsdpi_none_free;
    r->device.event = fsdpi_none_event;
    r->taker.e.op = fsdpi_take_all;
    r->model.world = &r->world;
    r->model.attached = &r->taker;
    r->model.listeners = FSDPI_LISTEN_OPS;
}

// A copy of the model that has run a step and counted the memory. change: NULL: none, and failures
// have texts. *out: to be freed in any case.
static fsdp_status fsdpi_predict_copy(const fsdp_model *m, const fsdpi_change *change,
                                      const fsdp_predict_desc *step, fsdp_model **out) {
    const fsdp_predict_desc whole = FSDP_ZERO;
    fsdp_world *w = m->world;
    if (m->num_units == 0 && !change)
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E205] prediction: the model has no units: call fsdp_fully_shard first");
    fsdpi_prediction *r = (fsdpi_prediction *)fsdpi_alloc(&w->boot.allocator, sizeof *r);
    if (!r && change) return FSDP_ERR_OUT_OF_MEMORY;
    if (!r) return fsdpi_no_memory(w, "prediction", "", sizeof *r);
    fsdp_model *dry = *out = &r->model;
    fsdpi_predict_world(r, w);
    if (change) r->world.log_level = 0;
    dry->desc = m->desc;
    dry->desc.cpu_offload |= change && change->offloads;
    if (change && change->reshards) dry->desc.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    dry->info = m->info;
    dry->grad_enabled = dry->is_last_backward = 1;
    dry->num_params = m->num_params;
    dry->units = (fsdp_unit **)fsdpi_model_alloc(dry, (size_t)m->num_units * sizeof *dry->units);
    fsdp_status status = fsdpi_failed(w);
    if (!dry->units) status = FSDP_ERR_OUT_OF_MEMORY;
    for (int i = 0; !status && i < m->num_units; i++) {
        dry->units[i] = fsdpi_unit_copy(dry, m->units[i]);
        if (dry->units[i]) dry->num_units++;
        else status = FSDP_ERR_OUT_OF_MEMORY;
        if (!status && change) status = fsdpi_change_unit(dry->units[i], change);
    }
    if (!status) status = fsdpi_commit(dry);
    if (!status) status = fsdpi_predict_microbatches(dry, step ? step : &whole);
    if (!status || change) return status;
    return fsdp_fail(w, status, "[E306] predict: %s", fsdp_status_text(status));
}

// Allocates the slots that a step will take, as the prediction counts them.
FSDP_API fsdp_status fsdp_model_reserve(fsdp_model *model) {
    fsdp_model *dry = NULL;
    if (!model) return fsdpi_null(NULL, "model_reserve", "model");
    FSDPI_TRY(fsdpi_commit(model));
    fsdp_status status = fsdpi_predict_copy(model, NULL, NULL, &dry);
    for (int i = 0; !status && i < dry->num_classes; i++) {
        const fsdpi_slot_class *wanted = &dry->classes[i];
        int at = fsdpi_slot_class_find(model, wanted->pool, wanted->bytes);
        if (at < 0) status = FSDP_ERR_OUT_OF_MEMORY;
        while (!status && model->classes[at].count < wanted->count)
            status = fsdpi_slot_class_add(model, &model->classes[at]);
    }
    fsdpi_predict_free(dry);
    return fsdpi_fail_together(model->world, status);
}

FSDP_API fsdp_status fsdp_model_predict_step(const fsdp_model *model, const fsdp_predict_desc *desc,
                                             fsdp_memory *out) {
    fsdp_model *dry = NULL;
    fsdp_predict_desc step;
    if (!model || !out) return fsdpi_null_of(model, "model_predict", "model or out");
    FSDPI_TRY(fsdp_desc_read(model->world, &step, desc, sizeof step, "fsdp_predict_desc"));
    fsdp_status status = fsdpi_predict_copy(model, NULL, &step, &dry);
    if (!status) {
        fsdpi_fill_memory(dry, out);
        out->host_bytes = model->host_bytes;
    }
    fsdpi_predict_free(dry);
    return status;
}
FSDP_API fsdp_status fsdp_model_predict(const fsdp_model *model, fsdp_memory *out) {
    return fsdp_model_predict_step(model, NULL, out);
}

/* -------------------------------------------------------------------------------------------- */
// Owns: the text about memory in errors of allocation. It stands on the parts that allocate, so a
// model has its address.

// Bytes of the model itself on the device, without those of extensions.
static int64_t fsdpi_on_device(const fsdp_model *m) {
    int64_t bytes = 0;
    for (int pool = m->desc.cpu_offload ? (int)FSDP_POOL_GATHER : 0; pool < FSDP_POOL_COUNT; pool++)
        bytes += m->pool_bytes[pool];
    return bytes;
}

// What it needs with a change; INT64_MAX: that cannot be predicted.
static int64_t fsdpi_need(const fsdp_model *m, const fsdpi_change *change) {
    fsdp_model *dry = NULL;
    int64_t bytes = fsdpi_predict_copy(m, change, NULL, &dry) ? INT64_MAX : fsdpi_on_device(dry);
    fsdpi_predict_free(dry);
    return bytes;
}

// A change in words, or "": there is none. More ranks are tried in steps of an eighth, until the
// model needs at most `most`, or there are twice as many. A world of one rank knows no backend.
static fsdpi_change fsdpi_find_change(const fsdp_model *m, int which, int64_t most, fsdpi_text *t) {
    fsdpi_change change = FSDP_ZERO;
    const fsdp_unit *open = NULL;
    const int now = m->info.shard_mesh_size, replicas = m->info.replicate_mesh_size;
    int opens = 0;
    for (int i = 0; i < m->num_units; i++)
        if (m->units[i]->options.reshard_after_forward != FSDP_RESHARD_ALWAYS)
            open = m->units[i], opens++;
    change.reshards = which == 0, change.offloads = which == 1;
    if (which == 0 && open) fsdpi_text_add(t, "with reshard_after_forward");
    if (which == 0 && opens == 1) fsdpi_text_add(t, " on '%.32s'", open->desc.name);
    if (which == 1 && !fsdpi_is_host(m->world) && !m->desc.cpu_offload)
        fsdpi_text_add(t, "with cpu_offload");
    if (which < 2 || m->world->size == 1 || m->mixed) return change;
    do change.shards += change.shards ? (now + 7) / 8 : now + (now + 7) / 8;
    while (change.shards < 2 * now && fsdpi_need(m, &change) > most);
    fsdpi_text_add(t, "with %d ranks in place of %d", change.shards * replicas, now * replicas);
    return change;
}

/* What the model needs, what it has, and with what it would need less. extra: bytes that somebody
   else wants. What the model has it can have again: so a change fits if that is enough. */
static void fsdpi_explain(const fsdp_model *m, int64_t extra, fsdpi_text *t) {
    const fsdpi_change none = FSDP_ZERO;
    const int64_t held = fsdpi_on_device(m);
    fsdp_model *dry = NULL;
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    const fsdp_status status = fsdpi_predict_copy(m, &none, NULL, &dry);
    const int64_t need = status ? 0 : fsdpi_on_device(dry);
    double unit = 1;
    int k = 0; // of all numbers of the text
    for (; k < 4 && (double)need >= 1024 * unit; k++) unit *= 1024;
    if (!status) fsdpi_text_add(t, ": the model needs %.4g %s", (double)need / unit, units[k]);
    for (int pool = m->desc.cpu_offload ? FSDP_POOL_GATHER : 0, said = 0;
         pool < FSDP_POOL_SCRATCH && !status; pool++)
        if (dry->pool_bytes[pool])
            fsdpi_text_add(t, "%s%s %.4g", said++ ? ", " : " (", fsdp_pool_name(pool),
                           (double)dry->pool_bytes[pool] / unit);
    fsdpi_predict_free(dry);
    if (status) return;
    fsdpi_text_add(t, ") and has %.4g", (double)held / unit);
    char what[3][80];
    int64_t less[3];
    for (int which = 0; which < 3; which++) {
        fsdpi_text words = {what[which], sizeof what[which], 0};
        const fsdpi_change change = fsdpi_find_change(m, which, held - extra, &words);
        less[which] = words.used ? need - fsdpi_need(m, &change) : 0;
    }
    for (int fits = 1; fits >= 0; fits--)
        for (int which = 0, said = 0; which < 3; which++) {
            if (less[which] <= 0 || (less[which] >= need - held + extra) != fits) continue;
            const char *begin = fits ? ". It would fit " : ". It needs less ";
            fsdpi_text_add(t, "%s%s (-%.4g)", said++ ? ", " : begin, what[which],
                           (double)less[which] / unit);
        }
}

FSDP_API fsdp_status fsdp_model_create(fsdp_world *world, const fsdp_model_desc *desc,
                                       fsdp_model **model) {
    fsdp_status status = fsdpi_model_create(world, desc, model);
    if (!status) (*model)->explain = fsdpi_explain;
    return status;
}

#endif // FSDPI_CORE_PREDICT_H
