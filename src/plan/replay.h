/* plan/replay.h - ops emitted again, and reductions that have waited

   Callers: api.h (fsdpi_plan_reduce_waiting) and tape.h (fsdpi_plan_reduce_waiting).

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_REPLAY_H
#define FSDPI_PLAN_REPLAY_H

#include "../base/hash.h"
#include "../base/os.h"
#include "../core/error.h"
#include "../core/extend.h"
#include "../core/grads.h"
#include "../core/guard.h"
#include "../core/objects.h"
#include "../core/ops.h"
#include "../core/run.h"
#include "../core/template.h"
#include "../core/unit.h"
#include "memory.h"
#include "objects.h"

// Sets the fields of a tape's op that differ from step to step.
static inline void fsdpi_plan_renew(const fsdp_model *m, fsdp_op *op) {
    op->timed = 0;
    op->step = m->step;
    op->given = m->agreed_hash;
    if (!fsdpi_plan_bits(op->factor)) return; // most ops have no factor
    op->factor = op->unit->facts.divide_factor;
    if (op->share != 0) op->scale = op->share / op->factor;
    if (op->comm && op->what == op->unit->desc.name) // a bucketed op has its own name
        fsdpi_set_compared(op->unit, op->agree[FSDP_AGREE_ACCUMULATE], op);
}

// Returns 1 for the hook of a parameter without gradient, which is not called. A replay reduces as
// if all parameters were used.
static inline int fsdpi_plan_is_unused_hook(const fsdp_op *op) {
    const int has = FSDPI_USE_USED | FSDPI_USE_REDUCED;
    return op->label == FSDP_LABEL_GRAD_HOOK && !(*fsdpi_use(op->unit, op->root) & has);
}

// Sets which parameters of its units are used in a bucketed reduction.
static void fsdpi_plan_agree_joined(const fsdp_plan *p, const fsdpi_plan_tape *t,
                                    const fsdpi_plan_group *joined) {
    fsdp_op *op = &t->ops[joined->op], one = *op;
    if (op->kind == FSDP_OP_ALL_GATHER) return;
    op->what_hash = op->agree[FSDP_AGREE_USED] = 0;
    op->unused = NULL;
    for (int i = 0; i < joined->num_members; i++) {
        const fsdp_unit *u = p->units[t->members[joined->members + i].unit];
        fsdpi_set_compared(u, op->agree[FSDP_AGREE_ACCUMULATE], &one);
        op->what_hash = fsdpi_hash(op->what_hash, one.what_hash);
        op->agree[FSDP_AGREE_USED] = (uint8_t)fsdpi_hash(op->agree[FSDP_AGREE_USED],
                                                         one.agree[FSDP_AGREE_USED]);
        if (!op->unused) op->unused = one.unused;
    }
}

// Emits ops in inline mode without an extension that receives ops: no event orders them, and a
// marker only says which slot a unit holds.
static fsdp_status fsdpi_plan_emit_alone(fsdp_model *m, fsdp_op *ops, int count) {
    fsdp_status status = fsdpi_failed(m->world);
    for (fsdp_op *op = ops; op < ops + count && !status; op++) {
        if (op->kind >= FSDP_OP_HOOK) {
            if (op->kind == FSDP_OP_ACQUIRE && op->dst) fsdpi_hold(m, op->dst);
            if (op->kind == FSDP_OP_RELEASE && op->src) op->src->held = 0;
            continue;
        }
        if (fsdpi_plan_is_unused_hook(op)) continue;
        fsdpi_plan_renew(m, op);
        op->seq = ++m->seq;
        m->counters.calls[op->kind]++;
        m->counters.bytes[op->kind] += op->bytes;
        status = fsdpi_execute(m->world, op, NULL);
    }
    return status;
}

/* Emits ops of a tape, as hooks do (fsdpi_emit), without further checks. The ops must not change
   until they have run: worker threads read their lists. */
static fsdp_status fsdpi_plan_emit(fsdp_model *m, fsdp_op *ops, int count) {
    if (m->world->mode == FSDP_RUN_INLINE && !(m->listeners & FSDPI_LISTEN_RECORDS))
        return fsdpi_plan_emit_alone(m, ops, count);
    fsdp_status status = fsdpi_failed(m->world);
    const int shown = m->listeners & FSDPI_LISTEN_OPS;
    for (fsdp_op *op = ops; op < ops + count && !status; op++) {
        if (fsdpi_plan_is_unused_hook(op)) continue;
        fsdpi_plan_renew(m, op);
        const int is_marker = op->kind >= FSDP_OP_HOOK;
        if (is_marker) fsdpi_do_marker(m, op);
        if (!is_marker) status = fsdpi_emit(m, op);
        else if (shown) status = fsdpi_show(m, op);
    }
    return status;
}

// Reduces the unreduced gradients of an earlier post_backward, as finalize would.
static fsdp_status fsdpi_plan_reduce_waiting(fsdp_unit *u) {
    FSDPI_TRY(fsdpi_failed(u->model->world));
    FSDPI_GUARD(fsdpi_open_unit(u));
    return fsdpi_do_leftovers(u);
}

#endif // FSDPI_PLAN_REPLAY_H
