/* core/grads.h - gradients: written, collected, reduced

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_CORE_GRADS_H
#define FSDPI_CORE_GRADS_H

#include "error.h"
#include "gather.h"
#include "guard.h"
#include "layout.h"
#include "objects.h"
#include "ops.h"
#include "pool.h"
#include "route.h"
#include "run.h"
#include "usage.h"

// Owns: fsdpi_grads. What happens to gradients is decided by the unit's route; here stand its
// steps. Invariants: at most one of the slots GRAD and RIN holds what a reduction will read when it
// begins; whoever gives a slot back names its last reader.
// Source: torch: FSDPParamGroup.post_backward, foreach_reduce.

// The route for what the shard gradient holds now.
static const fsdpi_route *fsdpi_route_now(const fsdp_unit *u) {
    return &u->route[u->state.grads.shard == FSDPI_GRADS_REDUCED];
}

// The pool of the slot that a reduction reads, and the dtype in it.
static int fsdpi_input(const fsdp_unit *u) {
    return u->state.grads.newest == FSDPI_GRADS_SUMMED ? FSDP_POOL_RIN : FSDP_POOL_GRAD;
}
static fsdp_dtype fsdpi_input_dtype(const fsdp_unit *u) {
    return u->state.grads.newest == FSDPI_GRADS_SUMMED
               ? u->layout.reduce_dtype
               : u->layout.parts[u->layout.users_part].param_dtype;
}

// The caller's stream writes a buffer from here on: it waits for those who read it.
static fsdp_status fsdpi_caller_writes(fsdp_unit *u, fsdp_buf *buf) {
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_USE, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE);
    op.dst = buf;
    return fsdpi_emit(u->model, &op);
}

// One rank: gradients are written where they end. Zeros are put there before the first ones.
static fsdp_status fsdpi_write_shard(fsdp_unit *u) {
    fsdpi_grads *g = &u->state.grads;
    const fsdpi_part *part = u->layout.parts;
    fsdp_buf *shard = fsdpi_flat_of(u, part)->grad;
    int undefined = g->shard == FSDPI_GRADS_NONE;
    if (g->shard == FSDPI_GRADS_ZERO) g->shard = FSDPI_GRADS_NONE;
    g->newest = FSDPI_GRADS_IN_SHARD;
    return undefined ? fsdpi_emit_fill(u->model, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, shard,
                                       part->dtype, part->train.base, u->layout.train_numel, 0)
                     : fsdpi_caller_writes(u, shard);
}

/* Where gradients will be written: zero, or what earlier microbatches left. */
static fsdp_status fsdpi_do_grads(fsdp_unit *u) {
    fsdpi_grads *g = &u->state.grads;
    if (u->layout.num_train == 0 || g->newest == FSDPI_GRADS_WRITTEN) return FSDP_OK;
    if (fsdpi_route_now(u)->write_shard && g->newest != FSDPI_GRADS_SUMMED)
        return fsdpi_write_shard(u);
    fsdp_status status = fsdpi_acquire(u, FSDP_POOL_GRAD, &u->state.slot[FSDP_POOL_GRAD]);
    if (status) return status;
    g->newest = FSDPI_GRADS_WRITTEN;
    return fsdpi_emit_kind(u, FSDPI_OPS_ZERO);
}

/* -------------------------------------------------------------------------------------------- */
// The steps of a route, in the order of FSDPI_STEP_LIST. Steps that read the reduce input do
// nothing where only sums of the shard group wait for their all-reduce.

// The caller has written the slot.
static fsdp_status fsdpi_step_wrote(fsdp_unit *u) {
    fsdp_buf *slot = u->state.slot[FSDP_POOL_GRAD];
    fsdpi_mark(u->model->world, FSDP_STREAM_COMPUTE, &slot->ready, NULL);
    return fsdpi_marker(u, FSDP_OP_WROTE, FSDP_STREAM_COMPUTE, slot);
}

// Brings gradients to the reduce input, where earlier microbatches may be: cast, divided, added.
static fsdp_status fsdpi_step_sum(fsdp_unit *u) {
    fsdp_buf **input = &u->state.slot[FSDP_POOL_RIN];
    int adds = *input != NULL;
    fsdp_status status = adds ? FSDP_OK : fsdpi_acquire(u, FSDP_POOL_RIN, input);
    if (!status && !adds && u->layout.pad_rin)
        status = fsdpi_emit_fill(u->model, u, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE, *input,
                                 u->layout.reduce_dtype, 0, u->layout.reduce_numel, 0);
    fsdpi_each(u, FSDPI_OPS_SUM, 1.0 / u->state.grads.divided, adds);
    if (!status) status = fsdpi_emit_kind(u, FSDPI_OPS_SUM);
    u->state.grads.newest = FSDPI_GRADS_SUMMED;
    return status ? status : fsdpi_release(u, &u->state.slot[FSDP_POOL_GRAD], FSDP_STREAM_REDUCE);
}

// They stay where they were written, unless earlier ones are in the reduce input.
static fsdp_status fsdpi_step_keep(fsdp_unit *u) {
    return u->state.slot[FSDP_POOL_RIN] ? fsdpi_step_sum(u) : FSDP_OK;
}

// The gradients in the slot become a reduce input where they are.
static fsdp_status fsdpi_step_fold(fsdp_unit *u) {
    if (u->state.grads.newest != FSDPI_GRADS_WRITTEN) return FSDP_OK;
    if (u->state.grads.divided == 1) return fsdpi_emit_kind(u, FSDPI_OPS_FOLD);
    fsdpi_each(u, FSDPI_OPS_FOLD_DIVIDED, 1.0 / u->state.grads.divided, 0);
    return fsdpi_emit_kind(u, FSDPI_OPS_FOLD_DIVIDED);
}

// num_train flags for every rank ride along.
static fsdp_status fsdpi_step_users(fsdp_unit *u) {
    int input = fsdpi_input(u);
    fsdpi_template *t = u->layout.ops[FSDPI_OPS_USERS];
    if (u->state.grads.newest == FSDPI_GRADS_NOWHERE) return FSDP_OK;
    fsdpi_usage_send(u, fsdpi_route_now(u)->factor / u->state.grads.divided);
    t->dst = (uint8_t)input;
    t->op.src_ptr = input == FSDP_POOL_RIN ? u->usage.wide : u->usage.flags;
    fsdpi_op_cast(&t->op, fsdpi_input_dtype(u), fsdpi_input_dtype(u));
    return fsdpi_emit_kind(u, FSDPI_OPS_USERS);
}

// A record multiplies by `share`, and where `step` divides, by share / factor.
static void fsdpi_divide(const fsdp_unit *u, int step, double share, fsdp_op *op) {
    const fsdpi_route *route = fsdpi_route_now(u);
    int divides = route->divides == step;
    op->factor = route->factor;
    op->share = divides ? share : 0;
    op->scale = divides ? share / route->factor : share;
}

// Reads the reduce input, over the shard group, and gives it back.
static fsdp_status fsdpi_scatter(fsdp_unit *u, int kind, int step, double share, int accumulate) {
    int input = fsdpi_input(u);
    fsdpi_template *t = u->layout.ops[kind];
    if (u->state.grads.newest == FSDPI_GRADS_NOWHERE) return FSDP_OK;
    const fsdpi_work *works = kind == FSDPI_OPS_SCATTER ? u->layout.reduce_scatter
                                                        : u->layout.to_rout;
    const fsdpi_work *work = &works[input == FSDP_POOL_RIN];
    t->src = (uint8_t)input;
    t->op.accumulate = (uint8_t)accumulate;
    t->op.list = work->segs;
    t->op.list_count = (uint32_t)work->num;
    fsdpi_divide(u, step, share, &t->op);
    fsdpi_usage_agree(u, &t->op);
    fsdpi_op_cast(&t->op, fsdpi_input_dtype(u), t->op.out_dtype);
    fsdp_status status = fsdpi_emit_kind(u, kind);
    u->state.grads.newest = FSDPI_GRADS_NOWHERE;
    return status ? status : fsdpi_release(u, &u->state.slot[input], FSDP_STREAM_REDUCE);
}

static fsdp_status fsdpi_step_scatter_fused(fsdp_unit *u) {
    return fsdpi_scatter(u, FSDPI_OPS_SCATTER, FSDPI_STEP_OUT, u->state.grads.divided,
                         u->state.grads.shard == FSDPI_GRADS_REDUCED);
}
static fsdp_status fsdpi_step_scatter(fsdp_unit *u) {
    return fsdpi_scatter(u, FSDPI_OPS_SCATTER, FSDPI_STEP_SCATTER, 1, 0);
}

static fsdp_status fsdpi_step_rescale(fsdp_unit *u) {
    fsdpi_template *const *ops = &u->layout.ops[FSDPI_OPS_RESCALE];
    for (fsdpi_template *t = ops[0]; t != ops[1]; t++)
        fsdpi_divide(u, FSDPI_STEP_OUT, u->state.grads.divided, &t->op);
    return fsdpi_emit_kind(u, FSDPI_OPS_RESCALE);
}

static fsdp_status fsdpi_step_partial_fused(fsdp_unit *u) {
    fsdp_buf **sums = &u->state.slot[FSDP_POOL_ROUT];
    int adds = *sums != NULL;
    if (u->state.grads.newest == FSDPI_GRADS_NOWHERE) return FSDP_OK;
    fsdp_status status = adds ? FSDP_OK : fsdpi_acquire(u, FSDP_POOL_ROUT, sums);
    return status ? status : fsdpi_scatter(u, FSDPI_OPS_PARTIAL, FSDPI_STEP_PARTIAL, 1, adds);
}

// The backend cannot add: fresh sums, and a copy that adds them to those that wait.
static fsdp_status fsdpi_step_partial(fsdp_unit *u) {
    fsdpi_grads *g = &u->state.grads;
    fsdp_buf **sums = &u->state.slot[FSDP_POOL_ROUT], *waiting = *sums;
    if (g->newest == FSDPI_GRADS_NOWHERE) return FSDP_OK;
    if (!waiting) g->summed = g->divided * fsdpi_route_now(u)->sums; // those that wait decided it
    fsdp_status status = fsdpi_acquire(u, FSDP_POOL_ROUT, sums);
    if (!status)
        status = fsdpi_scatter(u, FSDPI_OPS_PARTIAL, FSDPI_STEP_PARTIAL, g->divided / g->summed, 0);
    if (status || !waiting) return status;
    fsdpi_template *const *add = &u->layout.ops[FSDPI_OPS_ADD];
    if (add[0] != add[1]) add[0]->op.dst = waiting;
    status = fsdpi_emit_kind(u, FSDPI_OPS_ADD);
    if (!status) status = fsdpi_release(u, sums, FSDP_STREAM_REDUCE);
    *sums = waiting;
    return status;
}

// What is reduced further: the sums of the shard group, or with one shard the reduce input.
static int fsdpi_sums(const fsdp_unit *u) {
    return fsdpi_route_now(u)->from_input ? fsdpi_input(u) : FSDP_POOL_ROUT;
}
static fsdp_dtype fsdpi_sums_dtype(const fsdp_unit *u) {
    return fsdpi_route_now(u)->from_input ? fsdpi_input_dtype(u) : u->layout.reduce_dtype;
}

static fsdp_status fsdpi_step_replicas(fsdp_unit *u) {
    const fsdpi_route *route = fsdpi_route_now(u);
    fsdpi_grads *g = &u->state.grads;
    fsdpi_template *t = u->layout.ops[FSDPI_OPS_REPLICAS];
    t->src = t->dst = (uint8_t)fsdpi_sums(u);
    g->summed = (route->from_input ? g->divided : g->summed) / route->sums;
    fsdpi_divide(u, FSDPI_STEP_REPLICAS, route->sums, &t->op);
    fsdpi_usage_agree(u, &t->op);
    fsdpi_op_cast(&t->op, fsdpi_sums_dtype(u), fsdpi_sums_dtype(u));
    return fsdpi_emit_kind(u, FSDPI_OPS_REPLICAS);
}

static fsdp_status fsdpi_step_hook(fsdp_unit *u) {
    fsdpi_template *t = u->layout.ops[FSDPI_OPS_HOOK];
    t->src = t->dst = (uint8_t)fsdpi_sums(u);
    return fsdpi_emit_kind(u, FSDPI_OPS_HOOK);
}

static fsdp_status fsdpi_step_out(fsdp_unit *u) {
    int sums = fsdpi_sums(u);
    fsdpi_template *const *ops = &u->layout.ops[FSDPI_OPS_OUT];
    for (fsdpi_template *t = ops[0]; t != ops[1]; t++) {
        t->src = (uint8_t)sums;
        t->op.accumulate = u->state.grads.shard == FSDPI_GRADS_REDUCED;
        fsdpi_divide(u, FSDPI_STEP_OUT, u->state.grads.summed, &t->op);
        fsdpi_op_cast(&t->op, fsdpi_sums_dtype(u), t->op.out_dtype);
    }
    fsdp_status status = fsdpi_emit_kind(u, FSDPI_OPS_OUT);
    fsdp_status released = fsdpi_release(u, &u->state.slot[sums], fsdpi_out_stream(u));
    return status ? status : released;
}

static fsdp_status fsdpi_call_grad_hook(const fsdp_op *op, void *stream) {
    const fsdp_unit *u = op->unit;
    const fsdpi_param *p = &u->params[op->root];
    const fsdpi_part *part = fsdpi_part_of(u, p);
    fsdp_dtype dtype = fsdpi_grad_dtype(u->model, part->dtype);
    fsdp_param_view v = fsdpi_view_static(op->unit, op->root);
    v.shard_grad = fsdpi_flat_of(u, part)->grad->ptr + fsdpi_bytes(p->lay.shard_offset, dtype);
    return fsdpi_usage_of(u, p) ? p->grad_hook(p->grad_hook_user, &v, stream) : FSDP_OK;
}

// Whoever waits for a parameter's shard gradient is told. On native devices that is at once.
static fsdp_status fsdpi_tell_hooks(fsdp_unit *u, int stream) {
    fsdp_model *m = u->model;
    fsdp_status status = FSDP_OK;
    int any = 0;
    for (int i = 0; i < u->desc.num_params; i++)
        any |= u->params[i].grad_hook && u->params[i].requires_grad;
    if (any && m->world->mode == FSDPI_NATIVE) {
        status = fsdpi_sync(m->world, stream);
        if (!status) status = fsdpi_usage_read(m);
    }
    for (int i = 0; i < u->desc.num_params && any && !status; i++) {
        fsdpi_param *p = &u->params[i];
        const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_part_of(u, p));
        if (!p->grad_hook || !p->requires_grad) continue;
        (void)fsdpi_do_stale(u); // the hook may write shards
        status = fsdpi_emit_call(u, p, FSDP_LABEL_GRAD_HOOK, stream, flat->grad, flat->shard,
                                 fsdpi_call_grad_hook);
    }
    return status;
}

// The shard gradients of a unit are on their way.
static fsdp_status fsdpi_grads_done(fsdp_unit *u, int stream) {
    u->state.grads.shard = FSDPI_GRADS_REDUCED;
    u->state.grads.newest = FSDPI_GRADS_NOWHERE;
    fsdpi_usage_sent(u);
    return u->model->grad_hooks ? fsdpi_tell_hooks(u, stream) : FSDP_OK;
}

static fsdp_status fsdpi_step_done(fsdp_unit *u) {
    return fsdpi_grads_done(u, fsdpi_out_stream(u));
}

static fsdp_status fsdpi_run_steps(fsdp_unit *u, const uint8_t *step) {
    // clang-format off
    static fsdp_status (*const steps[FSDPI_STEP_COUNT])(fsdp_unit *u) = {
        NULL, fsdpi_step_wrote, fsdpi_step_keep, fsdpi_step_sum, fsdpi_step_fold, fsdpi_step_users,
        fsdpi_step_scatter_fused, fsdpi_step_scatter, fsdpi_step_rescale, fsdpi_step_partial_fused,
        fsdpi_step_partial, fsdpi_step_replicas, fsdpi_step_hook, fsdpi_step_out, fsdpi_step_done};
    // clang-format on
    fsdp_status status = FSDP_OK;
    for (; *step && !status; step++) status = steps[*step](u);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// The actions.

/* End of a unit's backward. Without sync gradients stay, in the slot where they were written or, if
   they are to be widened, summed in the reduce input; without all_reduce, in the reduce output. */
static fsdp_status fsdpi_do_reduce(fsdp_unit *u) {
    fsdpi_grads *g = &u->state.grads;
    fsdp_buf **slot = u->state.slot;
    fsdp_status status = FSDP_OK;
    if (u->layout.num_train == 0) return FSDP_OK;
    if (!u->options.reduce_unused && !fsdpi_usage_any(u, FSDPI_USE_USED) && !slot[FSDP_POOL_ROUT]) {
        status = fsdpi_release(u, &slot[FSDP_POOL_RIN], FSDP_STREAM_REDUCE);
        fsdp_status grad = fsdpi_release(u, &slot[FSDP_POOL_GRAD], FSDP_STREAM_COMPUTE);
        g->newest = FSDPI_GRADS_NOWHERE;
        return status ? status : grad;
    }
    if (g->newest == FSDPI_GRADS_IN_SHARD) { // others may have written the block: one event for all
        status = fsdpi_caller_writes(u, fsdpi_flat_of(u, u->layout.parts)->grad);
        return status ? status : fsdpi_grads_done(u, FSDP_STREAM_COMPUTE);
    }
    const fsdpi_route *route = fsdpi_route_now(u);
    g->waits = slot[FSDP_POOL_ROUT] != NULL;
    if (!slot[FSDP_POOL_RIN] && !slot[FSDP_POOL_ROUT]) g->divided = g->summed = route->before;
    if (g->newest == FSDPI_GRADS_WRITTEN) status = fsdpi_run_steps(u, route->collect);
    return status ? status : fsdpi_run_steps(u, route->reduce);
}

// Finalize: gradients of earlier microbatches of a unit that this backward did not reach.
static fsdp_status fsdpi_do_leftovers(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    int sums = u->state.slot[FSDP_POOL_ROUT] != NULL,
        input = u->state.grads.newest != FSDPI_GRADS_NOWHERE;
    if (!u->options.sync || !(input || (sums && u->options.all_reduce))) return FSDP_OK;
    for (int k = 0; k < u->layout.num_parts && !status; k++) // the caller may have read it
        if (u->layout.parts[k].num_train)
            status = fsdpi_caller_writes(u, fsdpi_flat_of(u, &u->layout.parts[k])->grad);
    return status ? status : fsdpi_do_reduce(u);
}

static fsdp_status fsdpi_do_zero_grad(fsdp_unit *u) {
    fsdpi_grads *g = &u->state.grads;
    if (g->shard == FSDPI_GRADS_REDUCED) g->shard = FSDPI_GRADS_NONE;
    fsdpi_usage_clear(u, FSDPI_USE_REDUCED);
    return FSDP_OK;
}

// After reset nothing of a step is left. The streams have been drained.
static fsdp_status fsdpi_do_drop(fsdp_unit *u) {
    fsdp_status status = fsdpi_do_reshard(u);
    for (int pool = FSDP_POOL_GRAD; pool <= FSDP_POOL_ROUT; pool++) {
        fsdp_status released = fsdpi_release(u, &u->state.slot[pool], FSDP_STREAM_COMPUTE);
        if (!status) status = released;
    }
    fsdpi_usage_clear(u, FSDPI_USE_USED | FSDPI_USE_PENDING);
    u->usage.counted = 0;
    u->told = 0;
    u->state.grads.newest = FSDPI_GRADS_NOWHERE;
    (void)fsdpi_do_zero_grad(u);
    return status;
}

FSDP_API fsdp_status fsdp_unit_reduce(fsdp_unit *unit) {
    if (!unit) return fsdpi_null(NULL, "unit_reduce", "unit");
    fsdp_status status = fsdpi_failed(unit->model->world);
    if (status || unit->state.training == FSDP_STATE_PRE_BACKWARD) return status;
    fsdpi_open_unit(unit);
    return fsdpi_do_leftovers(unit);
}

FSDP_API fsdp_status fsdp_unit_flag_use(fsdp_unit *unit) {
    if (!unit) return fsdpi_null(NULL, "unit_flag_use", "unit");
    fsdp_status status = fsdpi_failed(unit->model->world);
    if (!status && unit->usage.flags && fsdpi_ranks(unit) > 1)
        fsdpi_usage_send(unit, fsdpi_route_now(unit)->factor / unit->state.grads.divided);
    return status;
}

#endif // FSDPI_CORE_GRADS_H
