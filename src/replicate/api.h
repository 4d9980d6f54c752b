/* replicate/api.h - queries, and calls between steps

   Callers: programs.

   A part of fsdp_replicate.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_REPLICATE_H
#include "../../fsdp_replicate.h"
#endif
#ifndef FSDPI_REPLICATE_API_H
#define FSDPI_REPLICATE_API_H

#include "objects.h"
#include "step.h"

#include <string.h>

FSDP_API fsdp_status fsdp_replicate_unit(const fsdp_replicate *rep, int param, fsdp_unit **unit,
                                         int *index) {
    fsdp_status status = fsdpi_rep_check(rep, "replicate_unit", param, 1, 0);
    if (status) return status;
    if (unit) *unit = rep->buckets[rep->params[param].bucket].unit;
    if (index) *index = rep->params[param].index;
    return FSDP_OK;
}

FSDP_API int fsdp_replicate_param(const fsdp_replicate *rep, const fsdp_param_view *view) {
    for (int k = 0; rep && view && k < rep->num_buckets; k++)
        if (rep->buckets[k].unit == view->unit) return rep->buckets[k].members[view->index];
    return -1;
}

FSDP_API int fsdp_replicate_num_buckets(const fsdp_replicate *rep) {
    return rep ? rep->num_buckets : 0;
}

FSDP_API int fsdp_replicate_members(const fsdp_replicate *rep, int bucket, int32_t *out,
                                    int64_t *nbytes) {
    if (!rep || bucket < 0 || bucket >= rep->num_buckets) return -1;
    const fsdpi_rep_unit *b = &rep->buckets[bucket];
    if (out) memcpy(out, b->members, (size_t)b->num_members * sizeof *out);
    if (nbytes) *nbytes = b->nbytes;
    return b->num_members;
}

FSDP_API fsdp_status fsdp_replicate_order(const fsdp_replicate *rep, int32_t *order) {
    if (!rep || !order)
        return fsdp_fail_null(fsdp_model_world(rep ? rep->model : NULL), "replicate_order",
                              "rep or order");
    if (!rep->num_order)
        return fsdp_fail(fsdp_model_world(rep->model), FSDP_ERR_INVALID_STATE,
                         "[E963] replicate_order: no backward has said of all %d parameters that "
                         "they are ready: call fsdp_replicate_ready for each of them",
                         rep->num_params);
    memcpy(order, rep->order, (size_t)rep->num_params * sizeof *order);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_replicate_broadcast(fsdp_replicate *rep, int root) {
    fsdp_status status = FSDP_OK;
    if (!rep) return fsdp_fail_null(NULL, "replicate_broadcast", "rep");
    for (int k = 0; k < rep->num_buckets && !status; k++)
        status = fsdp_model_broadcast(rep->model, rep->buckets[k].unit, root);
    return status;
}

// Runs a hook in place of a bucket's all-reduce.
static fsdp_status fsdpi_rep_custom(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                                    const fsdp_coll *coll) {
    fsdpi_rep_unit *b = (fsdpi_rep_unit *)user;
    fsdp_replicate_bucket shown = b->shown;
    shown.dtype = (fsdp_dtype)coll->dtype;
    shown.data = coll->dst;
    shown.numel = (int64_t)coll->count;
    return b->rep->hook(b->rep->hook_user, &shown, ops, comm, coll);
}

FSDP_API fsdp_status fsdp_replicate_set_hook(fsdp_replicate *rep, fsdp_replicate_hook hook,
                                             void *user) {
    if (!rep) return fsdp_fail_null(NULL, "replicate_set_hook", "rep");
    fsdp_custom_comm custom = hook ? fsdpi_rep_custom : NULL;
    fsdp_status status = fsdp_call_begin(rep->model, FSDP_CALL_FULL, "replicate_set_hook");
    for (int k = 0; k < rep->num_buckets && !status; k++)
        status = fsdp_set_custom_all_reduce(rep->buckets[k].unit, custom, &rep->buckets[k]);
    if (status) return status;
    rep->hook = hook;
    rep->hook_user = user;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_replicate_join(fsdp_replicate *rep, int has_batch, int divide,
                                         int *active) {
    if (!rep || !active)
        return fsdp_fail_null(fsdp_model_world(rep ? rep->model : NULL), "replicate_join",
                              "rep or active");
    fsdp_model *m = rep->model;
    int32_t ranks = has_batch != 0;
    *active = 0;
    fsdp_status status = fsdp_call_begin(m, FSDP_CALL_FULL, "replicate_join"); // all units are idle
    if (!status)
        status = fsdp_all_reduce(fsdp_model_world(m), rep->mesh, &ranks, 1, FSDP_I32, FSDP_SUM);
    for (int k = 0; k < rep->num_buckets && !status; k++)
        status = fsdp_set_gradient_divide_factor(m, rep->buckets[k].unit, divide ? ranks : 0);
    if (!status)
        status = fsdp_set_uneven_inputs(m, ranks > 0 && ranks < fsdp_mesh_size(rep->mesh, 0));
    if (!status) *active = ranks;
    return status;
}

FSDP_API fsdp_status fsdp_replicate_shadow(fsdp_replicate *rep) {
    fsdp_status status = fsdp_replicate_pre_forward(rep);
    if (!status) status = fsdp_replicate_post_forward(rep);
    return status ? status : fsdp_replicate_post_backward(rep);
}

#endif // FSDPI_REPLICATE_API_H
