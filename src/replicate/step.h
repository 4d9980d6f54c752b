/* replicate/step.h - the calls of a step

   State: fsdp_replicate.next, the next bucket to reduce, and which gradients are ready.
   Callers: programs and api.h (fsdpi_rep_check).

   A part of fsdp_replicate.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_REPLICATE_H
#include "../../fsdp_replicate.h"
#endif
#ifndef FSDPI_REPLICATE_STEP_H
#define FSDPI_REPLICATE_STEP_H

#include "objects.h"
#include "unused.h"

#include <string.h>

static fsdp_status fsdpi_rep_each(fsdp_replicate *rep, const char *name,
                                  fsdp_status (*call)(fsdp_unit *unit)) {
    if (!rep) return fsdp_fail_null(NULL, name, "rep");
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < rep->num_buckets && !status; k++) status = call(rep->buckets[k].unit);
    return status;
}
FSDP_API fsdp_status fsdp_replicate_pre_forward(fsdp_replicate *rep) {
    fsdp_status status = rep ? fsdp_model_commit(rep->model) : FSDP_OK;
    if (rep && !rep->began) rep->failed = FSDP_OK;
    if (rep && !status) status = fsdpi_rep_apply_layout(rep);
    if (rep && !status) status = fsdpi_rep_find_hooks(rep);
    return status ? status : fsdpi_rep_each(rep, "replicate_pre_forward", fsdp_pre_forward);
}
FSDP_API fsdp_status fsdp_replicate_post_forward(fsdp_replicate *rep) {
    return fsdpi_rep_each(rep, "replicate_post_forward", fsdp_post_forward);
}

static fsdp_status fsdpi_rep_keep(fsdp_replicate *rep, fsdp_status status) {
    if (rep && !rep->failed) rep->failed = status;
    return status;
}

// Checks that the parameters exist. If `fresh`, also that none of them is ready yet.
static fsdp_status fsdpi_rep_check(const fsdp_replicate *rep, const char *call, int first,
                                   int count, int fresh) {
    if (!rep) return fsdp_fail_null(NULL, call, "rep");
    fsdp_world *world = fsdp_model_world(rep->model);
    if (first < 0 || count < 0 || count > rep->num_params - first)
        return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                         "[E960] %s: first is %d, count is %d, expected parameters of 0..%d", call,
                         first, count, rep->num_params - 1);
    for (int i = first; fresh && i < first + count; i++) {
        fsdp_param_view v = FSDP_ZERO;
        if (!rep->params[i].ready) continue;
        (void)fsdpi_rep_view(rep, i, &v);
        return fsdp_fail(world, FSDP_ERR_INVALID_STATE,
                         "[E961] %s: parameter '%s' (%s) is ready already in this backward: write "
                         "its gradient first, then call fsdp_replicate_ready once",
                         call, v.name, fsdp_unit_label(v.unit));
    }
    return FSDP_OK;
}

// Opens a bucket: its message begins, and its gradients can be written.
static fsdp_status fsdpi_rep_open(fsdpi_rep_unit *b) {
    if (b->open) return FSDP_OK;
    fsdp_status status = fsdpi_rep_find_hooks(b->rep);
    if (!status) status = fsdp_pre_backward(b->unit);
    if (status) return status;
    b->open = b->rep->began = 1;
    return FSDP_OK;
}

// Reduces the next bucket: it is complete, or the backward ends.
static fsdp_status fsdpi_rep_reduce(fsdp_replicate *rep) {
    fsdpi_rep_unit *b = &rep->buckets[rep->next];
    fsdp_status status = fsdpi_rep_open(b);
    if (!status) status = fsdpi_rep_join_use(b);
    if (!status) status = fsdp_post_backward(b->unit);
    if (status) return status;
    b->due = 1;
    b->sends |= fsdp_requires_gradient_sync(b->unit);
    rep->next++;
    return FSDP_OK;
}

// Returns the result of a getter that fails, as those of fsdp.h do.
static void *fsdpi_rep_undefined(fsdp_replicate *rep, fsdp_status status) {
    return rep ? fsdp_fallback_ptr(rep->model, fsdpi_rep_keep(rep, status)) : NULL;
}

// Returns the data of a parameter, for all getters. dtype KEEP: any.
static void *fsdpi_rep_data(fsdp_replicate *rep, int param, fsdp_dtype dtype) {
    fsdp_status status = fsdpi_rep_check(rep, "replicate_data", param, 1, 0);
    if (status) return fsdpi_rep_undefined(rep, status);
    const fsdpi_rep_param *p = &rep->params[param];
    fsdp_unit *unit = rep->buckets[p->bucket].unit;
    return dtype ? fsdp_data_as(unit, p->index, dtype) : fsdp_data(unit, p->index);
}
static void *fsdpi_rep_grad(fsdp_replicate *rep, int param, fsdp_dtype dtype) {
    int alive = rep && !fsdp_world_status(fsdp_model_world(rep->model));
    fsdp_status status = fsdpi_rep_check(rep, "replicate_grad", param, 1, alive);
    if (status) return fsdpi_rep_undefined(rep, status);
    fsdpi_rep_param *p = &rep->params[param];
    fsdpi_rep_unit *b = &rep->buckets[p->bucket];
    if (alive) (void)fsdpi_rep_keep(rep, fsdpi_rep_open(b)); // the next call fails too
    void *grad = dtype ? fsdp_grad_as(b->unit, p->index, dtype) : fsdp_grad(b->unit, p->index);
    p->used |= grad != NULL;
    return grad;
}
FSDP_API void *fsdp_replicate_data(fsdp_replicate *rep, int param) {
    return fsdpi_rep_data(rep, param, FSDP_DTYPE_KEEP);
}
FSDP_API void *fsdp_replicate_grad(fsdp_replicate *rep, int param) {
    return fsdpi_rep_grad(rep, param, FSDP_DTYPE_KEEP);
}
FSDP_API void *fsdp_replicate_data_as(fsdp_replicate *rep, int param, fsdp_dtype dtype) {
    return fsdpi_rep_data(rep, param, dtype);
}
FSDP_API void *fsdp_replicate_grad_as(fsdp_replicate *rep, int param, fsdp_dtype dtype) {
    return fsdpi_rep_grad(rep, param, dtype);
}

FSDP_API fsdp_status fsdp_replicate_ready(fsdp_replicate *rep, int first, int count) {
    fsdp_status status = rep ? fsdp_world_status(fsdp_model_world(rep->model)) : FSDP_OK;
    if (!status) status = fsdpi_rep_check(rep, "replicate_ready", first, count, 1);
    for (int i = first; !status && i < first + count; i++) // before any change
        status = fsdpi_rep_open(&rep->buckets[rep->params[i].bucket]);
    if (status) return fsdpi_rep_keep(rep, status);
    for (int i = first + count - 1; i >= first; i--) {
        rep->params[i].ready = 1;
        rep->buckets[rep->params[i].bucket].pending--;
        rep->seen[rep->num_seen++] = i;
    }
    while (!status && !rep->late && rep->next < rep->num_buckets &&
           rep->buckets[rep->next].pending == 0)
        status = fsdpi_rep_reduce(rep);
    return fsdpi_rep_keep(rep, status);
}

FSDP_API fsdp_status fsdp_replicate_post_backward(fsdp_replicate *rep) {
    if (!rep) return fsdp_fail_null(NULL, "replicate_post_backward", "rep");
    fsdp_status status = FSDP_OK;
    while (!status && rep->next < rep->num_buckets) status = fsdpi_rep_reduce(rep);
    if (status) return status;
    status = rep->failed;
    if (rep->num_seen == rep->num_params) {
        memcpy(rep->order, rep->seen, (size_t)rep->num_params * sizeof *rep->order);
        rep->num_order = rep->num_params;
    }
    fsdpi_rep_clear(rep);
    return status;
}

#endif // FSDPI_REPLICATE_STEP_H
