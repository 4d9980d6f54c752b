/* core/predict.h - predicts memory by a dry run of a copy

   A copy of the model in a copy of its world runs the rows of a step. An extension takes every op,
   so that none runs, and the device gives addresses without memory. The copy's pools then have the
   bytes that a step allocates. Callers: the public functions below, and tools/fsdpfit.c.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_PREDICT_H
#define FSDPI_CORE_PREDICT_H

#include "alloc.h"
#include "commit.h"
#include "error.h"
#include "objects.h"
#include "pool.h"
#include "report.h"
#include "run.h"
#include "step.h"
#include "unit.h"

#include <string.h>

// Runs a step of the copy. Units that never reshard are open around those that do, unless in_order
// is set.
static fsdp_status fsdpi_predict_step(fsdp_model *m, int in_order) {
    static const uint8_t calls[] = {FSDP_CALL_PRE_FORWARD, FSDP_CALL_POST_FORWARD,
                                    FSDP_CALL_PRE_BACKWARD, FSDP_CALL_POST_BACKWARD};
    int reshards = 0; // some unit does, and others may be open around it
    for (int i = 0; i < m->num_units && !in_order; i++)
        reshards |= m->units[i]->options.reshard_after_forward != FSDP_RESHARD_NEVER;
    for (int back = 0; back < 2; back++) {
        const uint8_t *call = calls + 2 * back;
        for (int pass = 0; pass < 3; pass++) { // open these units, run the others, close these
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

// Predicts a microbatch that keeps what `step` says, and the last one. Others between them begin
// with the memory of the last one, and release no more than it does.
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
        FSDPI_TRY(fsdpi_predict_step(m, step->in_order));
    }
    return FSDP_OK;
}

// Returns a copy of a unit in its initial state, with its own marks of use; NULL: no memory.
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
    for (int i = 0; i < copy->desc.num_params; i++) copy->params[i].early = NULL;
    copy->callback = NULL;
    copy->use = (uint64_t *)(void *)(copy->params + u->desc.num_params);
    memset(copy->use, 0, 8 * (size_t)u->use_words);
    copy->state = fsdpi_state_new();
    fsdpi_unit_facts(copy);
    return copy;
}

// Allocates no memory. This and the next function are a device without memory, for the calls that
// a model makes while no op runs.
static fsdp_status fsdpi_none_alloc(fsdp_device *device, int kind, size_t size, void **ptr) {
    (void)device, (void)kind, (void)size;
    *ptr = (void *)(uintptr_t)FSDPI_ALIGN; // never read or written
    return FSDP_OK;
}
static void fsdpi_none_free(fsdp_device *device, int kind, void *ptr, size_t size) {
    (void)device, (void)kind, (void)ptr, (void)size;
}

// Takes every op, so that none runs: `op` of the extension.
static int fsdpi_take_all(void *user, fsdp_model *model, fsdp_op *op) {
    (void)user, (void)model, (void)op;
    return 1;
}

// A copy of a model in a copy of its world.
typedef struct fsdpi_prediction {
    fsdp_model model; // the first member
    fsdp_world world;
    uint32_t state; // the world's state
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

static void fsdpi_predict_world(fsdpi_prediction *r, const fsdp_world *w) {
    r->world.boot = w->boot;
    r->world.rank = w->rank;
    r->world.size = 1; // no other rank gets a failure of the copy
    r->world.caps = w->caps;
    r->world.mode = w->mode;
    r->world.state = &r->state;
    r->state = 1;
    r->world.device = w->device;
    r->world.device_ops = &r->device;
    r->device.flags = w->device_ops->flags;
    r->device.alloc = fsdpi_none_alloc;
    r->device.free = fsdpi_none_free;
    r->taker.e.op = fsdpi_take_all;
    r->model.world = &r->world;
    r->model.attached = &r->taker;
    r->model.listeners = FSDPI_LISTEN_OPS;
}

// Makes a copy of the model that has run a step and counted its memory. The caller frees *out with
// fsdpi_predict_free, also after a failure.
static FSDP_COLD fsdp_status fsdpi_predict_copy(const fsdp_model *m, const fsdp_predict_desc *step,
                                                fsdp_model **out) {
    fsdp_world *w = m->world;
    if (m->num_units == 0)
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E205] prediction: the model has no units: call fsdp_fully_shard first");
    fsdpi_prediction *r = (fsdpi_prediction *)fsdpi_alloc(&w->boot.allocator, sizeof *r);
    if (!r) return fsdpi_no_memory(w, "prediction", "", sizeof *r);
    fsdp_model *dry = *out = &r->model;
    fsdpi_predict_world(r, w);
    dry->desc = m->desc;
    dry->info = m->info;
    dry->options = fsdpi_first_options;
    dry->num_params = m->num_params;
    dry->units = (fsdp_unit **)fsdpi_model_alloc(dry, (size_t)m->num_units * sizeof *dry->units);
    fsdp_status status = fsdpi_failed(w);
    if (!dry->units) status = FSDP_ERR_OUT_OF_MEMORY;
    for (int i = 0; !status && i < m->num_units; i++) {
        dry->units[i] = fsdpi_unit_copy(dry, m->units[i]);
        if (dry->units[i]) dry->num_units++;
        else status = FSDP_ERR_OUT_OF_MEMORY;
    }
    if (!status) status = fsdpi_commit(dry);
    if (!status) status = fsdpi_predict_microbatches(dry, step);
    if (!status) return FSDP_OK;
    return fsdp_fail(w, status, "[E306] predict: %s", fsdp_status_text(status));
}

FSDP_API fsdp_status fsdp_model_reserve(fsdp_model *model) {
    const fsdp_predict_desc whole = FSDP_ZERO;
    fsdp_model *dry = NULL;
    if (!model) return fsdp_fail_null(NULL, "model_reserve", "model");
    FSDPI_TRY(fsdpi_commit(model));
    fsdp_status status = fsdpi_predict_copy(model, &whole, &dry);
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
    fsdp_status status = fsdpi_predict_copy(model, &step, &dry);
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

#endif // FSDPI_CORE_PREDICT_H
