/* optim/scaler.h - the gradient scaler

   The scale, and its state within a step. Invariants: all ranks have equal states; the scale and
   its reciprocal are normal f32 numbers.
   State: fsdp_grad_scaler.
   Callers: programs.

   A part of fsdp_optim.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_OPTIM_H
#include "../../fsdp_optim.h"
#endif
#ifndef FSDPI_OPTIM_SCALER_H
#define FSDPI_OPTIM_SCALER_H

#include "../base/float.h"
#include "kernels.h"
#include "states.h"
#include "updates.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

struct fsdp_grad_scaler {
    fsdp_model *model;
    fsdp_extension extension;
    fsdp_grad_scaler_state state;
    double saved[5];       // the state in the order of its fields, for a checkpoint
    int lent;              // 1: a checkpoint has the address of `saved`, and may write to it
    int memory;            // FSDP_MEMORY_HOST or _DEVICE, where updates run
    int found;             // -1: no unscale in this step
    fsdp_update *updates;  // for one unscale: at most one per parameter
    int32_t *device_found; // `found` of its updates, in device memory; 0 between steps; or NULL
};

#define FSDPI_SCALE_MIN 1.1754943508222875e-38 // 2^-126
#define FSDPI_SCALE_MAX 8.5070591730234616e+37 // 2^126

static int fsdpi_scale_ok(double x) {
    return !fsdpi_is_nan(x) && x >= FSDPI_SCALE_MIN && x <= FSDPI_SCALE_MAX;
}

// Returns the scale times a factor as f32, or the scale if the product is out of range.
static double fsdpi_rescaled(double scale, double factor) {
    double x = scale * factor;
    return fsdpi_scale_ok(x) ? (double)(float)x : scale;
}

static fsdp_status fsdpi_scaler_check(fsdp_world *w, const char *what,
                                      const fsdp_grad_scaler_state *s) {
    const char *field = NULL, *expected = NULL;
    double given = 0;
    if (!fsdpi_scale_ok(s->scale)) field = "scale", given = s->scale, expected = "2^-126 .. 2^126";
    else if (fsdpi_is_nan(s->growth_factor) || !(s->growth_factor > 1) ||
             !(s->growth_factor < HUGE_VAL))
        field = "growth_factor", given = s->growth_factor, expected = "a finite number > 1";
    else if (fsdpi_optim_bad(s->backoff_factor, 1) || s->backoff_factor == 0)
        field = "backoff_factor", given = s->backoff_factor, expected = "> 0 and < 1";
    else if (s->growth_interval < 1)
        field = "growth_interval", given = s->growth_interval, expected = ">= 1";
    else if (s->growth_tracker < 0 || s->growth_tracker >= s->growth_interval)
        field = "growth_tracker", given = s->growth_tracker, expected = "0 .. growth_interval-1";
    if (!field) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_INVALID_ARG, "[E943] %s: %s is %g, expected %s", what, field,
                     given, expected);
}

enum { FSDPI_FOUND_BYTES = 8 }; // bytes

// Lists the gradients; adjacent ones share a run. Sets *any if there is one, even if it is empty.
static int fsdpi_scaler_list(const fsdp_grad_scaler *g, int32_t *found, int32_t *any) {
    fsdp_param_view v = FSDP_ZERO;
    const char *end = NULL; // end of the last run
    int num = 0;
    while (fsdp_next_param(g->model, &v)) {
        if (v.shard_grad) *any = 1;
        if (!v.shard_grad || v.numel == 0) continue;
        int joins = end == (char *)v.shard_grad && g->updates[num - 1].grad_dtype == v.grad_dtype;
        fsdp_update *u = &g->updates[joins ? num - 1 : num++];
        end = (char *)v.shard_grad + v.numel * (int64_t)fsdp_dtype_size(v.grad_dtype);
        if (joins) {
            u->count += v.numel;
            continue;
        }
        memset(u, 0, sizeof *u);
        u->kind = FSDP_UPDATE_UNSCALE;
        u->dtype = u->grad_dtype = (uint8_t)v.grad_dtype;
        u->count = v.numel;
        u->grad = v.shard_grad;
        u->found = found;
        u->scalars[0] = (double)(float)(1 / g->state.scale);
    }
    return num;
}

static void fsdpi_scaler_free(void *user) {
    fsdp_grad_scaler *g = (fsdp_grad_scaler *)user;
    fsdp_free(g->model, FSDP_MEMORY_DEVICE, g->device_found, FSDPI_FOUND_BYTES);
    fsdp_free(g->model, FSDP_MEMORY_HOST, g, 0);
}

// Reads from the device whether its updates have found a bad gradient.
static fsdp_status fsdpi_scaler_read_found(fsdp_grad_scaler *g, int32_t *found) {
    static const int32_t none = 0;
    fsdp_status status = fsdp_transfer(g->model, found, g->device_found, sizeof *found);
    if (status || !*found) return status;
    return fsdp_transfer(g->model, g->device_found, &none, sizeof none);
}

static void fsdpi_scaler_numbers(const fsdp_grad_scaler_state *s, double *n) {
    n[0] = s->scale;
    n[1] = s->growth_factor;
    n[2] = s->backoff_factor;
    n[3] = s->growth_interval;
    n[4] = s->growth_tracker;
}

// Takes the maxima of found and any over all ranks. The same collective checks that all ranks'
// states are equal, by the maxima of each number and of its negative.
static fsdp_status fsdpi_scaler_meet(const fsdp_grad_scaler *g, const char *what, int32_t *found,
                                     int32_t *any) {
    static const char *const fields[5] = {"scale", "growth_factor", "backoff_factor",
                                          "growth_interval", "growth_tracker"};
    fsdp_world *w = fsdp_model_world(g->model);
    double most[12];
    fsdpi_scaler_numbers(&g->state, most);
    for (int i = 0; i < 5; i++) most[5 + i] = -most[i];
    most[10] = *found;
    most[11] = *any;
    fsdp_status status = fsdp_all_reduce(w, NULL, most, 12, FSDP_F64, FSDP_MAX);
    *found = (int32_t)most[10];
    *any = (int32_t)most[11];
    for (int i = 0; i < 5 && !status; i++)
        if (most[i] > -most[5 + i])
            status = fsdp_fail(w, FSDP_ERR_MISMATCH,
                               "[E949] %s: ranks disagree about %s: it is %g on one and %g on "
                               "another: give all of them the same desc and state",
                               what, fields[i], -most[5 + i], most[i]);
    return status;
}

// Describes the checkpoint item: the state as numbers.
static fsdp_status fsdpi_scaler_item(void *user, fsdp_model *model, int index,
                                     fsdp_state_item *item) {
    fsdp_grad_scaler *g = (fsdp_grad_scaler *)user;
    double *n = g->saved;
    const int sizes = item && item->sizes_only;
    (void)model;
    if (!item && !g->lent) return FSDP_OK;
    if (!sizes) g->lent = item != NULL;
    if (!item) {
        double whole = 2147483647; // the largest int32_t; other values become -1, which is refused
        fsdp_grad_scaler_state s = {n[0], n[1], n[2], -1, -1};
        if (n[3] >= 0 && n[3] <= whole) s.growth_interval = (int32_t)n[3];
        if (n[4] >= 0 && n[4] <= whole) s.growth_tracker = (int32_t)n[4];
        return fsdp_grad_scaler_set_state(g, &s);
    }
    if (index > 0) return FSDP_OK;
    if (!sizes) fsdpi_scaler_numbers(&g->state, n);
    item->name = "state";
    item->dtype = FSDP_F64;
    item->memory = FSDP_MEMORY_HOST;
    item->ndim = 1;
    item->numel = item->shape[0] = 5;
    item->data = n;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_grad_scaler_create(fsdp_model *model, const fsdp_grad_scaler_desc *desc,
                                             fsdp_grad_scaler **scaler) {
    static const char *const name = "grad_scaler_create";
    fsdp_grad_scaler_desc d;
    if (!model || !scaler) return fsdp_fail_null(fsdp_model_world(model), name, "model or scaler");
    *scaler = NULL;
    fsdp_world *w = fsdp_model_world(model);
    fsdp_status status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_grad_scaler_desc");
    if (status) return status;
    fsdp_grad_scaler_state s = {d.init_scale, d.growth_factor, d.backoff_factor, d.growth_interval,
                                0};
    if (!fsdpi_is_nan(s.scale) && s.scale == 0) s.scale = 65536;
    if (!fsdpi_is_nan(s.growth_factor) && s.growth_factor == 0) s.growth_factor = 2;
    if (!fsdpi_is_nan(s.backoff_factor) && s.backoff_factor == 0) s.backoff_factor = 0.5;
    if (s.growth_interval == 0) s.growth_interval = 2000;
    int memory = FSDP_MEMORY_HOST;
    char text[96];
    void *room, *device_found = NULL;
    status = fsdpi_scaler_check(w, name, &s);
    if (!status) status = fsdp_update_place(model, name, &memory);
    snprintf(text, sizeof text, "%s: no memory", name);
    int64_t most = fsdp_num_params(model), head = (int64_t)(sizeof **scaler + 63) / 64 * 64;
    if (!status)
        status = fsdp_alloc(model, FSDP_MEMORY_HOST, head + most * (int64_t)sizeof(fsdp_update),
                            text, &room);
    if (status) return status;
    fsdp_grad_scaler *g = (fsdp_grad_scaler *)room;
    g->model = model;
    g->updates = (fsdp_update *)(void *)((char *)room + head);
    g->memory = memory;
    g->state = s;
    g->state.scale = (double)(float)s.scale;
    g->found = -1;
    g->extension.name = "grad_scaler";
    g->extension.user = g;
    g->extension.state = fsdpi_scaler_item;
    g->extension.destroy = fsdpi_scaler_free;
    if (memory == FSDP_MEMORY_DEVICE)
        status = fsdp_alloc(model, memory, FSDPI_FOUND_BYTES, text, &device_found);
    g->device_found = (int32_t *)device_found;
    if (!status) status = fsdp_attach(model, &g->extension);
    if (status) fsdpi_scaler_free(g);
    else *scaler = g;
    return status;
}

FSDP_API void fsdp_grad_scaler_destroy(fsdp_grad_scaler *scaler) {
    // unscale has waited for all ops that use its memory
    if (scaler) (void)fsdp_detach(scaler->model, &scaler->extension);
}

FSDP_API double fsdp_grad_scaler_scale(const fsdp_grad_scaler *scaler) {
    return scaler ? scaler->state.scale : 1;
}

FSDP_API int fsdp_grad_scaler_found_inf(const fsdp_grad_scaler *scaler) {
    return scaler ? scaler->found : -1;
}

FSDP_API fsdp_status fsdp_grad_scaler_unscale(fsdp_grad_scaler *scaler) {
    static const char *const name = "grad_scaler_unscale";
    if (!scaler) return fsdp_fail_null(NULL, name, "the scaler");
    fsdp_model *m = scaler->model;
    fsdp_world *w = fsdp_model_world(m);
    fsdp_status status = fsdp_call_begin(m, FSDP_CALL_CLIP, name);
    if (status) return status;
    if (scaler->found >= 0)
        return fsdp_fail(
            w, FSDP_ERR_INVALID_STATE,
            "[E946] %s: it was already called in this step: call fsdp_grad_scaler_update first",
            name);
    if (!scaler->device_found) status = fsdp_wait_stream(m, -1); // reductions write the gradients
    int32_t seen[2] = {0, 0};                                    // not finite; any
    if (!status) {
        int num = fsdpi_scaler_list(scaler, scaler->device_found ? scaler->device_found : &seen[0],
                                    &seen[1]);
        status = fsdpi_optim_emit(m, scaler->memory, name, scaler->updates, num);
    }
    if (!status && scaler->device_found) status = fsdpi_scaler_read_found(scaler, &seen[0]);
    if (!status) status = fsdpi_scaler_meet(scaler, name, &seen[0], &seen[1]);
    if (status) return status;
    if (!seen[1])
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E948] %s: no parameter has a gradient: call this after "
                         "fsdp_finalize_backward and before fsdp_zero_grad",
                         name);
    scaler->found = seen[0];
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_grad_scaler_update(fsdp_grad_scaler *scaler) {
    static const char *const name = "grad_scaler_update";
    if (!scaler) return fsdp_fail_null(NULL, name, "the scaler");
    fsdp_world *w = fsdp_model_world(scaler->model);
    fsdp_grad_scaler_state *s = &scaler->state;
    fsdp_status status = fsdp_world_status(w);
    if (status) return status;
    if (scaler->found < 0)
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E950] %s: nothing has unscaled the gradients of this step: call "
                         "fsdp_grad_scaler_unscale first",
                         name);
    if (scaler->found) {
        s->scale = fsdpi_rescaled(s->scale, s->backoff_factor);
        s->growth_tracker = 0;
    } else if (++s->growth_tracker == s->growth_interval) {
        s->scale = fsdpi_rescaled(s->scale, s->growth_factor);
        s->growth_tracker = 0;
    }
    scaler->found = -1;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_grad_scaler_get_state(const fsdp_grad_scaler *scaler,
                                                fsdp_grad_scaler_state *out) {
    if (!scaler || !out)
        return fsdp_fail_null(fsdp_model_world(scaler ? scaler->model : NULL),
                              "grad_scaler_get_state", "the scaler or out");
    *out = scaler->state;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_grad_scaler_set_state(fsdp_grad_scaler *scaler,
                                                const fsdp_grad_scaler_state *state) {
    static const char *const name = "grad_scaler_set_state";
    if (!scaler || !state)
        return fsdp_fail_null(fsdp_model_world(scaler ? scaler->model : NULL), name,
                              "the scaler or state");
    fsdp_status status = fsdpi_scaler_check(fsdp_model_world(scaler->model), name, state);
    if (status) return status;
    scaler->state = *state;
    scaler->state.scale = (double)(float)state->scale;
    scaler->found = -1;
    return FSDP_OK;
}

#endif // FSDPI_OPTIM_SCALER_H
