/* replicate/unused.h - unused parameters, found among the replicas

   Finds which parameters were used. A reduced bucket has gradients of all its trainable parameters,
   zeros where no rank wrote. While the reductions run, the replicas find the maximum of their use,
   and after finalize the gradients that no rank wrote are dropped. A rank that used all parameters
   knows the result. With post-accumulate hooks that is too late: such a bucket finds the use before
   its reduction, and leaves unused parameters out.
   State: the map of used parameters, and the ops in progress that compare it.
   Callers: create.h (fsdpi_rep_destroy) and step.h (fsdpi_rep_find_hooks).
   Source: torch: Reducer.all_reduce_local_used_map, finalize_bucket_dense.

   A part of fsdp_replicate.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_REPLICATE_H
#include "../../fsdp_replicate.h"
#endif
#ifndef FSDPI_REPLICATE_UNUSED_H
#define FSDPI_REPLICATE_UNUSED_H

#include "objects.h"

// Makes an op. Ranks compare states of ops, and may come here after different calls.
static fsdp_op fsdpi_rep_op(const fsdp_replicate *rep, int kind, int stream) {
    fsdp_op op;
    fsdp_op_init(&op, rep->model, NULL, kind, rep->label, stream);
    op.state = FSDP_STATE_POST_BACKWARD;
    return op;
}

// Sends the use of a part: copies this rank's to `mine` and `ours`, then takes the maximum.
static fsdp_status fsdpi_rep_send(fsdp_replicate *rep, const fsdp_block *part) {
    int32_t *mine = (int32_t *)fsdp_buf_ptr(rep->mine);
    int64_t count = part->width / 4, first = part->src / 4;
    fsdp_status status = FSDP_OK;
    for (int64_t i = first; i < first + count && !status; i++) {
        int32_t used = rep->params[rep->members[i]].used;
        if (mine[i] == used) continue;
        if (rep->copying) status = fsdp_wait_stream(rep->model, FSDP_STREAM_ALLREDUCE);
        rep->copying = 0;
        mine[i] = used;
    }
    fsdp_op op = fsdpi_rep_op(rep, FSDP_OP_COPY, FSDP_STREAM_ALLREDUCE);
    op.dtype = op.out_dtype = FSDP_U8;
    op.count = (uint64_t)part->width;
    op.list = part;
    op.list_count = 1;
    op.src = rep->mine;
    op.dst = rep->ours;
    if (!status) status = fsdp_emit(rep->model, &op);
    rep->copying = 1;
    op = fsdpi_rep_op(rep, FSDP_OP_ALL_REDUCE, FSDP_STREAM_ALLREDUCE);
    op.dtype = op.out_dtype = FSDP_I32;
    op.count = (uint64_t)count;
    op.redop = FSDP_MAX;
    op.in_place = 1;
    op.comm = rep->comm;
    op.group_size = fsdp_mesh_size(rep->mesh, 0);
    op.src = op.dst = rep->ours;
    op.src_ptr = op.dst_ptr = (char *)fsdp_buf_ptr(rep->ours) + part->dst;
    return status ? status : fsdp_emit(rep->model, &op);
}

// Waits for the replicas' use of a part, and reads it. A world of one rank knows it.
static fsdp_status fsdpi_rep_receive(fsdp_replicate *rep, const fsdp_block *part) {
    int64_t first = part->src / 4;
    for (int64_t i = first; i < first + part->width / 4 && !rep->comm; i++)
        rep->found[i] = rep->params[rep->members[i]].used;
    if (!rep->comm) return FSDP_OK;
    fsdp_op op = fsdpi_rep_op(rep, FSDP_OP_WAIT, FSDP_STREAM_COMPUTE);
    op.src = rep->ours;
    fsdp_status status = fsdp_emit(rep->model, &op);
    if (!status)
        status = fsdp_transfer(rep->model, rep->found + first,
                               (char *)fsdp_buf_ptr(rep->ours) + part->dst, part->width);
    rep->copying = 0;
    return status;
}

// Returns 1 if this rank did not use all trainable parameters of a bucket.
static int fsdpi_rep_lacks(const fsdpi_rep_unit *b) {
    for (int i = 0; i < b->shown.num_params; i++)
        if (!b->rep->params[b->shown.params[i]].used) return 1;
    return 0;
}

static int32_t fsdpi_rep_found(const fsdpi_rep_unit *b, const fsdpi_rep_param *p) {
    return b->rep->found[b->members - b->rep->members + p->index];
}

// Marks parameters that another rank used as used here, before the reduction of a bucket with
// hooks.
static fsdp_status fsdpi_rep_join_use(fsdpi_rep_unit *b) {
    fsdp_replicate *rep = b->rep;
    if (!rep->comm || !b->has_hooks || !fsdp_requires_gradient_sync(b->unit)) return FSDP_OK;
    fsdp_status status = fsdpi_rep_send(rep, &b->part);
    if (status || !fsdpi_rep_lacks(b)) return status;
    status = fsdpi_rep_receive(rep, &b->part);
    for (int i = 0; i < b->shown.num_params && !status; i++) {
        const fsdpi_rep_param *p = &rep->params[b->shown.params[i]];
        if (!p->used && fsdpi_rep_found(b, p)) (void)fsdp_grad(b->unit, p->index);
    }
    return status;
}

static uint8_t fsdpi_rep_has_grad(const fsdp_replicate *rep, int param) {
    fsdp_param_view v = FSDP_ZERO;
    (void)fsdpi_rep_view(rep, param, &v);
    return v.shard_grad != NULL;
}

/* Notes, when the model's backward begins, which parameters have gradients of earlier ones. If
   zero_grad has dropped that of `witness`, it has dropped all, so that one test is usually
   enough. */
static void fsdpi_rep_enter(fsdp_replicate *rep) {
    int none = !rep->each && (rep->witness < 0 || !fsdpi_rep_has_grad(rep, rep->witness));
    rep->witness = -1;
    for (int i = 0; i < rep->num_params; i++) {
        rep->params[i].had = none ? 0 : fsdpi_rep_has_grad(rep, i);
        if (rep->params[i].had) rep->witness = i;
    }
    rep->each = 0;
    rep->inside = 1;
}

// Returns 1 if a backward of the bucket has ended since use was settled, and its gradients are
// reduced.
static int fsdpi_rep_is_reduced(const fsdpi_rep_unit *b) {
    fsdp_memory m = FSDP_ZERO;
    if (!b->due || fsdp_unit_memory(b->unit, &m)) return 0;
    return !m.pool_slots[FSDP_POOL_GRAD] && !m.pool_slots[FSDP_POOL_REDUCE_IN] &&
           !m.pool_slots[FSDP_POOL_REDUCE_OUT];
}

// Drops gradients in reduced buckets that no rank wrote.
static fsdp_status fsdpi_rep_settle(fsdp_replicate *rep) {
    fsdp_status status = FSDP_OK;
    int lacks = 0;
    for (int k = 0; k < rep->num_buckets; k++) {
        const fsdpi_rep_unit *b = &rep->buckets[k];
        lacks |= !b->has_hooks && fsdpi_rep_is_reduced(b) && fsdpi_rep_lacks(b);
    }
    if (lacks) status = fsdpi_rep_receive(rep, &rep->whole);
    for (int k = 0; k < rep->num_buckets && !status; k++) {
        fsdpi_rep_unit *b = &rep->buckets[k];
        if (!fsdpi_rep_is_reduced(b)) continue;
        for (int i = 0; i < b->shown.num_params && !status; i++) {
            fsdpi_rep_param *p = &rep->params[b->shown.params[i]];
            if (!b->has_hooks && !p->used && !p->had && !fsdpi_rep_found(b, p))
                status = fsdp_set_grad_none(b->unit, p->index);
            if (p->used) rep->witness = b->shown.params[i];
            else rep->each = 1;
            p->used = 0;
        }
        b->due = b->sends = 0;
    }
    return status;
}

/* Handles finalize. Use is sent before the core finalizes, which waits for all reductions, and
   which may reduce buckets with unreduced gradients of a backward without sync. */
static fsdp_status fsdpi_rep_finalize(fsdp_replicate *rep) {
    fsdp_status status = FSDP_OK;
    int sends = 0;
    if (!rep->inside) fsdpi_rep_enter(rep);
    for (int k = 0; k < rep->num_buckets; k++) {
        fsdpi_rep_unit *b = &rep->buckets[k];
        b->sends |= b->due && fsdp_requires_gradient_sync(b->unit);
        sends |= b->sends && !b->has_hooks && b->shown.num_params > 0;
    }
    if (sends && rep->comm && !rep->sent) {
        rep->sent = 1;
        status = fsdpi_rep_send(rep, &rep->whole);
    }
    if (status) return status;
    status = fsdp_finalize_backward(rep->model); // calls later extensions, then the core
    int ended = !status;                         // or an earlier call failed
    for (int k = 0; k < rep->num_buckets; k++)
        ended |= rep->buckets[k].due && fsdp_unit_state(rep->buckets[k].unit) == FSDP_STATE_IDLE;
    if (!ended || fsdp_world_status(fsdp_model_world(rep->model))) return status;
    rep->sent = rep->inside = 0;
    fsdp_status settled = fsdpi_rep_settle(rep);
    return status ? status : settled;
}

static void fsdpi_rep_reset(fsdp_replicate *rep) {
    fsdpi_rep_clear(rep);
    rep->inside = rep->sent = 0;
    for (int i = 0; i < rep->num_params; i++) rep->params[i].used = 0;
    for (int k = 0; k < rep->num_buckets; k++) rep->buckets[k].due = rep->buckets[k].sends = 0;
}

static int fsdpi_rep_call(void *user, fsdp_model *model, fsdp_unit *unit, int call,
                          fsdp_status *status) {
    fsdp_replicate *rep = (fsdp_replicate *)user;
    if (call == FSDP_CALL_RESET) fsdpi_rep_reset(rep);
    if (call == FSDP_CALL_ZERO_GRAD && unit) rep->each = 1;
    if (call == FSDP_CALL_SET) rep->changed = 1;
    if (call == FSDP_CALL_PRE_BACKWARD && !rep->inside) fsdpi_rep_enter(rep);
    if (call != FSDP_CALL_FINALIZE) return 0;
    *status = !rep->began
                  ? fsdpi_rep_finalize(rep)
                  : fsdp_fail(fsdp_model_world(model), FSDP_ERR_INVALID_STATE,
                              "[E952] finalize_backward: a backward of unit '%s' and the other "
                              "buckets has begun, and %d of %d are reduced: call "
                              "fsdp_replicate_post_backward first",
                              fsdp_unit_label(rep->buckets[0].unit), rep->next, rep->num_buckets);
    return 1;
}

static void fsdpi_rep_relayout(void *user, fsdp_model *model) {
    (void)model;
    fsdp_replicate *rep = (fsdp_replicate *)user;
    rep->moved = rep->each = 1;
}

static void fsdpi_rep_destroy(void *user) {
    fsdp_replicate *rep = (fsdp_replicate *)user;
    fsdp_buf_destroy(rep->model, rep->mine);
    fsdp_buf_destroy(rep->model, rep->ours);
    fsdp_free(rep->model, FSDP_MEMORY_HOST, rep, 0);
}

// Finds the trainable members of each bucket, and their offsets in its message: those of their
// shards.
static fsdp_status fsdpi_rep_apply_layout(fsdp_replicate *rep) {
    int at = 0, last = 0;
    if (!rep->moved) return FSDP_OK;
    for (int k = 0; k < rep->num_buckets; k++) {
        fsdpi_rep_unit *b = &rep->buckets[k];
        const char *base = NULL;
        b->shown.params = rep->trainable + at;
        b->shown.offsets = rep->offsets + at;
        b->shown.numels = rep->numels + at;
        b->shown.num_params = b->shown.is_last = 0;
        for (int i = 0; i < b->num_members; i++) {
            fsdp_param_view v = FSDP_ZERO;
            fsdp_status status = fsdp_param_view_get(b->unit, i, &v);
            if (status) return status;
            if (!v.requires_grad) continue;
            if (!base) base = (const char *)v.shard;
            rep->trainable[at] = b->members[i];
            rep->numels[at] = v.numel;
            rep->offsets[at++] = ((const char *)v.shard - base) / (int64_t)fsdp_dtype_size(v.dtype);
            b->shown.num_params++;
            last = k;
        }
    }
    rep->buckets[last].shown.is_last = 1;
    rep->moved = 0;
    rep->changed = 1;
    return FSDP_OK;
}

// Finds the buckets with hooks after options have changed. In such a bucket the core leaves out
// parameters that no rank used.
static fsdp_status fsdpi_rep_find_hooks(fsdp_replicate *rep) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < rep->num_buckets && rep->changed && !status; k++) {
        fsdpi_rep_unit *b = &rep->buckets[k];
        int has_hooks = 0;
        for (int i = 0; i < b->num_members; i++) {
            fsdp_param_view v = FSDP_ZERO;
            (void)fsdp_param_view_get(b->unit, i, &v);
            has_hooks |= v.has_hook && v.requires_grad;
        }
        if (has_hooks != b->has_hooks)
            status = fsdp_set_reduce_scatter_unused_params(rep->model, b->unit, !has_hooks);
        b->has_hooks = has_hooks;
    }
    rep->changed = 0;
    return status;
}

#endif // FSDPI_REPLICATE_UNUSED_H
