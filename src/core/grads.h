/* core/grads.h - gradients: the slots they are written to, and their reduction

   State: the slots GRAD, REDUCE_IN and REDUCE_OUT of a unit, the content of its shard gradient, and
   its parameters that have a gradient. At the end of a backward the unit's gradient path gives the
   steps; grad_path.h has a diagram.
   A parameter is USED once the caller has asked for the pointer to its gradient, and REDUCED once
   the unit's reduction has been issued. Each reduction compares across ranks which parameters are
   USED. Invariant: outside backward a parameter is USED only if the unit holds unreduced gradients.
   Callers: the rows of step.h.
   Source: torch: FSDPParamGroup.post_backward, foreach_reduce, reduce_scatter_unused_params.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_GRADS_H
#define FSDPI_CORE_GRADS_H

#include "error.h"
#include "gather.h"
#include "guard.h"
#include "layout.h"
#include "../base/macros.h"
#include "objects.h"
#include "ops.h"
#include "pool.h"
#include "grad_path.h"
#include "run.h"
#include "template.h"
#include "unit.h"

static FSDPI_NOINLINE void fsdpi_usage_clear(fsdp_unit *u, int use) {
    for (int k = 0; k < u->use_words; k++) u->use[k] &= ~(FSDPI_USE_EACH * (uint64_t)use);
}

static int fsdpi_usage_any(const fsdp_unit *u, int use) {
    uint64_t any = 0;
    for (int k = 0; k < u->use_words; k++) any |= u->use[k] & FSDPI_USE_EACH * (uint64_t)use;
    return any != 0;
}

// Marks all trainables as USED if reduce_unused is set: those that the caller does not write have a
// gradient of zeros. Does so in a dry run, too, where no caller asks for pointers to gradients.
static void fsdpi_usage_begin(fsdp_unit *u) {
    if (!u->options.reduce_unused && !u->model->dry_run) return;
    for (int i = 0; i < u->desc.num_params; i++)
        if (u->params[i].requires_grad) *fsdpi_use(u, i) |= FSDPI_USE_USED;
}

// Turns the mark USED of every parameter into REDUCED.
static void fsdpi_usage_reduced(fsdp_unit *u) {
    for (int k = 0; k < u->use_words; k++) {
        uint64_t used = u->use[k] & FSDPI_USE_EACH * FSDPI_USE_USED;
        u->use[k] = (u->use[k] ^ used) | used * (FSDPI_USE_REDUCED / FSDPI_USE_USED);
    }
}

static int fsdpi_held(const fsdp_unit *u) {
    fsdp_buf *const *slot = u->state.slot;
    return (slot[FSDP_POOL_GRAD] ? FSDPI_HELD_GRAD : 0) |
           (slot[FSDP_POOL_REDUCE_IN] ? FSDPI_HELD_IN : 0) |
           (slot[FSDP_POOL_REDUCE_OUT] ? FSDPI_HELD_OUT : 0) |
           (u->state.shard_grad == FSDPI_SHARD_GRAD_REDUCED ? FSDPI_HELD_SHARD : 0);
}

#ifdef FSDPI_DEBUG
#define FSDPI_HOLDS(condition) FSDPI_TRY(FSDP_ASSERT(u->model->world, condition))

/* Checks the invariants of a unit between two calls. With FSDPI_DEBUG, as in the tests with
   AddressSanitizer, each row of the table ends with this check. */
static fsdp_status fsdpi_unit_check(const fsdp_unit *u) {
    const fsdpi_state *s = &u->state;
    const fsdpi_facts *f = &u->facts;
    const int held = fsdpi_held(u), writes = s->training == FSDP_STATE_PRE_BACKWARD;
    const int grad = held & FSDPI_HELD_GRAD, in = held & FSDPI_HELD_IN, out = held & FSDPI_HELD_OUT;
    const int gathers = u->layout.gather != FSDPI_GATHER_ALIAS, trains = u->layout.num_train > 0;
    const int gathered = fsdpi_is_gathered(u), used = fsdpi_usage_any(u, FSDPI_USE_USED);
    // Parameters: the storage state says which slots the unit holds.
    FSDPI_HOLDS((s->slot[FSDP_POOL_GATHER] != NULL) == (gathered && gathers));
    FSDPI_HOLDS((s->slot[FSDP_POOL_SLICE] != NULL) ==
                (s->storage == FSDP_STORAGE_SHARDED_POST_FORWARD));
    FSDPI_HOLDS(!s->ahead || (s->storage == FSDP_STORAGE_IN_FLIGHT && gathers));
    FSDPI_HOLDS(!s->stale || s->storage != FSDP_STORAGE_SHARDED);
    FSDPI_HOLDS(s->forwards >= 0);
    // Gradients: a unit holds slots only if it has trainables, and FRESH only during a call.
    FSDPI_HOLDS(trains || !(held & FSDPI_HELD_SLOTS));
    FSDPI_HOLDS(!s->slot[FSDPI_FRESH]);
    // In backward the caller writes GRAD or, on one rank, the shard gradient.
    FSDPI_HOLDS(!writes || !trains || grad || f->shards * f->replicas == 1);
    FSDPI_HOLDS(!writes || !trains || grad || s->shard_grad != FSDPI_SHARD_GRAD_ZERO);
    // Between backwards unreduced gradients are in one slot: in GRAD if they are kept as written.
    FSDPI_HOLDS(writes || !grad || !in);
    FSDPI_HOLDS(writes || !grad || (f->one_train && f->gathered == f->reduce));
    FSDPI_HOLDS(!out || (f->shards > 1 && f->replicas > 1));
    FSDPI_HOLDS(writes || !used || (held & FSDPI_HELD_SLOTS));
    // A plan keeps and reduces gradients as if every parameter were USED.
    FSDPI_HOLDS(writes || used || !(held & FSDPI_HELD_SLOTS) || u->model->listeners);
    // A dry run starts with the marks of the previous step.
    FSDPI_HOLDS(!fsdpi_usage_any(u, FSDPI_USE_REDUCED) || (held & FSDPI_HELD_SHARD) ||
                u->model->dry_run);
    for (int place = FSDP_POOL_GATHER; place < FSDPI_PLACES; place++)
        FSDPI_HOLDS(!s->slot[place] || s->slot[place]->held);
    return FSDP_OK;
}
#undef FSDPI_HOLDS
#endif

// Makes COMPUTE wait until the caller may write `buf`. Later ops on `buf` wait for COMPUTE.
static fsdp_status fsdpi_caller_writes(fsdp_unit *u, fsdp_buf *buf) {
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_WAIT, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE);
    op.dst = buf;
    return fsdpi_emit(u->model, &op);
}

// Prepares the memory that the caller adds gradients to: zeros, or those of earlier microbatches.
static fsdp_status fsdpi_do_grads(fsdp_unit *u) {
    static const fsdpi_step zero = {FSDPI_STEP_ZERO_GRAD, FSDPI_NOWHERE, FSDP_POOL_GRAD,
                                    FSDPI_ACQUIRES, 1};
    const int held = fsdpi_held(u);
    if (u->layout.num_train == 0) return FSDP_OK;
    fsdpi_usage_begin(u);
    if (held & FSDPI_HELD_GRAD) return FSDP_OK;
    if (!fsdpi_facts_write_shard(&u->facts, held)) return fsdpi_emit_step(u, &zero);
    // One rank: the caller writes the shard gradient itself.
    const fsdpi_dtype_group *part = &u->layout.parts[0];
    fsdp_buf *shard = fsdpi_flat_of(u, part)->grad;
    const int undefined = u->state.shard_grad == FSDPI_SHARD_GRAD_NONE;
    if (u->state.shard_grad == FSDPI_SHARD_GRAD_ZERO) u->state.shard_grad = FSDPI_SHARD_GRAD_NONE;
    return undefined ? fsdpi_emit_fill(u->model, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, shard,
                                       part->dtype, part->train.base, u->layout.train_numel, 0)
                     : fsdpi_caller_writes(u, shard);
}

static fsdp_status fsdpi_call_grad_hook(const fsdp_op *op, void *stream) {
    const fsdp_unit *u = op->unit;
    const fsdpi_param *p = &u->params[op->root];
    const fsdpi_dtype_group *part = fsdpi_dtype_group_of(u, p);
    fsdp_dtype dtype = fsdpi_grad_dtype(u->model, part->dtype);
    fsdp_param_view v = fsdpi_view_static(op->unit, op->root);
    v.shard_grad = fsdpi_flat_of(u, part)->grad->ptr + fsdpi_bytes(p->lay.shard_offset, dtype);
    return p->grad_hook(p->grad_hook_user, &v, stream);
}

// Emits the post-accumulate hooks of parameters that have a gradient, in the order of a stream.
static fsdp_status fsdpi_tell_hooks(fsdp_unit *u, int stream) {
    for (int i = 0; i < u->desc.num_params; i++) {
        const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_dtype_group_of(u, &u->params[i]));
        if (!u->params[i].grad_hook || !(*fsdpi_use(u, i) & FSDPI_USE_REDUCED)) continue;
        (void)fsdpi_do_stale(u); // the hook may write shards
        fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_CALL, FSDP_LABEL_GRAD_HOOK, stream);
        op.root = i;
        op.src = flat->grad;
        op.dst = flat->shard;
        op.src_ptr = flat->grad->ptr;
        op.dst_ptr = flat->shard->ptr;
        op.call = fsdpi_call_grad_hook;
        FSDPI_TRY(fsdpi_emit(u->model, &op));
    }
    return FSDP_OK;
}

/* Ends a unit's backward: runs the unit's gradient path. If no parameter is USED, releases the
   gradient slots instead. Without sync, gradients stay in GRAD, or in REDUCE_IN if they must be
   cast or lie in several dtype groups; without all_reduce, the sums stay in REDUCE_OUT. */
static fsdp_status fsdpi_do_reduce(fsdp_unit *u) {
    fsdp_buf **slot = u->state.slot;
    if (u->layout.num_train == 0) return FSDP_OK;
    if (!fsdpi_usage_any(u, FSDPI_USE_USED)) {
        FSDPI_TRY(fsdpi_release(u, &slot[FSDP_POOL_REDUCE_IN], FSDP_STREAM_REDUCE));
        return fsdpi_release(u, &slot[FSDP_POOL_GRAD], FSDP_STREAM_COMPUTE);
    }
    if (u->state.training == FSDP_STATE_PRE_BACKWARD && slot[FSDP_POOL_GRAD]) { // now written
        fsdpi_mark(u->model->world, FSDP_STREAM_COMPUTE, &slot[FSDP_POOL_GRAD]->ready, NULL);
        if (u->model->listeners & FSDPI_LISTEN_OPS)
            FSDPI_TRY(fsdpi_show_buf(u->model, u, FSDP_OP_GRADS_WRITTEN, FSDP_STREAM_COMPUTE,
                                     slot[FSDP_POOL_GRAD]));
    } else if (u->state.training == FSDP_STATE_PRE_BACKWARD) { // one rank: the shard gradient,
        FSDPI_TRY(fsdpi_caller_writes(u, fsdpi_flat_of(u, u->layout.parts)->grad)); // as an event
    }
    const int held = fsdpi_held(u);
    const fsdpi_grad_path *route = &u->route; // usually that of the previous step
    if (route->held != held) u->route = fsdpi_grad_path_of(&u->facts, held);
    for (int i = 0; i < route->num; i++) FSDPI_TRY(fsdpi_emit_step(u, &route->steps[i]));
    if (!route->done) return FSDP_OK;
    u->state.shard_grad = FSDPI_SHARD_GRAD_REDUCED;
    fsdpi_usage_reduced(u);
    if (!u->model->grad_hooks) return FSDP_OK;
    return fsdpi_tell_hooks(u, route->num ? fsdpi_step_stream(u, FSDPI_STEP_TO_SHARD)
                                          : (int)FSDP_STREAM_COMPUTE);
}

// Reduces, at finalize, the unreduced gradients of a unit that this backward did not reach.
static fsdp_status fsdpi_do_leftovers(fsdp_unit *u) {
    const int held = fsdpi_held(u), input = held & (FSDPI_HELD_GRAD | FSDPI_HELD_IN);
    if (!u->options.sync || !(input || (held & FSDPI_HELD_OUT && u->options.all_reduce)))
        return FSDP_OK;
    for (int k = 0; k < u->layout.num_parts; k++) // COMPUTE may still read the shard gradient
        if (u->layout.parts[k].num_train)
            FSDPI_TRY(fsdpi_caller_writes(u, fsdpi_flat_of(u, &u->layout.parts[k])->grad));
    return fsdpi_do_reduce(u);
}

static fsdp_status fsdpi_do_zero_grad(fsdp_unit *u) {
    if (u->state.shard_grad == FSDPI_SHARD_GRAD_REDUCED)
        u->state.shard_grad = FSDPI_SHARD_GRAD_NONE;
    fsdpi_usage_clear(u, FSDPI_USE_REDUCED);
    return FSDP_OK;
}

// Releases all slots of the unit and clears USED and REDUCED. Requires drained streams.
static fsdp_status fsdpi_do_reset(fsdp_unit *u) {
    fsdp_status status = fsdpi_do_reshard(u);
    for (int place = FSDP_POOL_GRAD; place < FSDPI_PLACES; place++) {
        fsdp_status released = fsdpi_release(u, &u->state.slot[place], FSDP_STREAM_COMPUTE);
        if (!status) status = released;
    }
    fsdpi_usage_clear(u, FSDPI_USE_USED);
    u->reported_calls = 0;
    (void)fsdpi_do_zero_grad(u);
    return status;
}

#endif // FSDPI_CORE_GRADS_H
