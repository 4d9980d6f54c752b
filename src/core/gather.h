/* core/gather.h - full parameters: unshard, wait, reshard, prefetch

   State: a unit's slots GATHER and SLICE, and its storage state.
   Callers: the rows of step.h.
   Source: torch: FSDPParamGroup.unshard, wait_for_unshard, reshard.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_GATHER_H
#define FSDPI_CORE_GATHER_H

#include "../base/macros.h"
#include "error.h"
#include "objects.h"
#include "pool.h"
#include "grad_path.h"
#include "template.h"

// The steps of an all-gather. The layout and the storage state decide which of them run.
static const fsdpi_step
    fsdpi_copy_in = {FSDPI_STEP_COPY_IN, FSDP_POOL_SHARD, FSDP_POOL_GATHER, 0, 1},
    fsdpi_gather_shards = {FSDPI_STEP_GATHER, FSDP_POOL_SHARD, FSDP_POOL_GATHER, 0, 1},
    fsdpi_gather_staged = {FSDPI_STEP_GATHER, FSDP_POOL_GATHER, FSDP_POOL_GATHER, 0, 1},
    fsdpi_copy_out = {FSDPI_STEP_COPY_OUT, FSDP_POOL_GATHER, FSDP_POOL_GATHER, 0, 1},
    fsdpi_slice = {FSDPI_STEP_SLICE, FSDP_POOL_GATHER, FSDP_POOL_SLICE,
                   FSDPI_ACQUIRES | FSDPI_RELEASES, 1},
    fsdpi_gather_slices = {FSDPI_STEP_SLICE_GATHER, FSDP_POOL_SLICE, FSDP_POOL_GATHER,
                           FSDPI_RELEASES, 1};
static const fsdpi_step fsdpi_waits[] =
    { // by fsdpi_unit_layout.gather: the buffer of the full parameters
        {FSDPI_STEP_WAIT, FSDP_POOL_SHARD, FSDPI_NOWHERE, 0, 1},
        {FSDPI_STEP_WAIT, FSDP_POOL_GATHER, FSDPI_NOWHERE, 0, 1},
        {FSDPI_STEP_WAIT, FSDP_POOL_GATHER, FSDPI_NOWHERE, 0, 1}};

// Calls the unit's callback, if readability differs from what its last call said. A dry run changes
// no memory. `readable` 0 comes before the memory is released.
static FSDPI_NOINLINE void fsdpi_call_back(fsdp_unit *u, int readable) {
    if (!u->callback || u->called_readable == readable || u->model->dry_run) return;
    u->called_readable = readable;
    u->callback(u, readable, u->callback_user);
}
static void fsdpi_call_all_back(fsdp_model *m) { // none is readable any more
    for (int i = 0; m->unit_callbacks && i < m->num_units; i++) fsdpi_call_back(m->units[i], 0);
}

static fsdp_status fsdpi_end_gather(fsdp_unit *u) {
    fsdpi_state *s = &u->state;
    if (s->storage != FSDP_STORAGE_IN_FLIGHT) return FSDP_OK;
    FSDPI_TRY(fsdpi_emit_step(u, &fsdpi_waits[u->layout.gather]));
    if (s->ahead) u->model->ahead_bytes -= (int64_t)s->slot[FSDP_POOL_GATHER]->bytes;
    s->ahead = 0;
    s->storage = FSDP_STORAGE_UNSHARDED;
    return FSDP_OK;
}

static fsdp_status fsdpi_do_wait(fsdp_unit *u) {
    FSDPI_TRY(fsdpi_end_gather(u));
    if (u->callback && u->state.storage == FSDP_STORAGE_UNSHARDED) fsdpi_call_back(u, 1);
    return FSDP_OK;
}

// Frees the full parameters. COMPUTE waits even for an all-gather that has no use: it still reads
// shards, here and on peers, and the caller may write shards next.
static fsdp_status fsdpi_do_reshard(fsdp_unit *u) {
    fsdpi_state *s = &u->state;
    if (u->callback) fsdpi_call_back(u, 0);
    fsdp_status status = fsdpi_end_gather(u);
    s->storage = FSDP_STORAGE_SHARDED;
    s->stale = 0;
    fsdp_status gather = fsdpi_release(u, &s->slot[FSDP_POOL_GATHER], FSDP_STREAM_COMPUTE);
    fsdp_status slice = fsdpi_release(u, &s->slot[FSDP_POOL_SLICE], FSDP_STREAM_COMPUTE);
    return status ? status : gather ? gather : slice;
}

// Notes that shards have been written: the next unshard gathers the unit again.
static fsdp_status fsdpi_do_stale(fsdp_unit *u) {
    u->state.stale = u->state.storage != FSDP_STORAGE_SHARDED;
    return FSDP_OK;
}

static int fsdpi_is_gathered(const fsdp_unit *u) { // or in flight
    return u->state.storage == FSDP_STORAGE_IN_FLIGHT || u->state.storage == FSDP_STORAGE_UNSHARDED;
}

static fsdp_status fsdpi_do_unshard(fsdp_unit *u) {
    fsdpi_state *s = &u->state;
    const int gather = u->layout.gather;
    if (s->stale) {
        s->stale = 0;
        FSDPI_TRY(fsdpi_do_reshard(u));
    }
    if (fsdpi_is_gathered(u)) return FSDP_OK;
    if (gather != FSDPI_GATHER_ALIAS)
        FSDPI_TRY(fsdpi_acquire(u, FSDP_POOL_GATHER, &s->slot[FSDP_POOL_GATHER]));
    if (s->slot[FSDP_POOL_SLICE]) { // over fewer ranks, and no copy out
        FSDPI_TRY(fsdpi_emit_step(u, &fsdpi_gather_slices));
    } else if (gather != FSDPI_GATHER_ALIAS) {
        const int staged = gather == FSDPI_GATHER_STAGED;
        if (staged) FSDPI_TRY(fsdpi_emit_step(u, &fsdpi_copy_in));
        FSDPI_TRY(fsdpi_emit_step(u, staged ? &fsdpi_gather_staged : &fsdpi_gather_shards));
        FSDPI_TRY(fsdpi_emit_step(u, &fsdpi_copy_out));
    }
    s->storage = FSDP_STORAGE_IN_FLIGHT;
    return FSDP_OK;
}

static fsdp_status fsdpi_do_unshard_backward(fsdp_unit *u) {
    return u->options.unshard_in_backward ? fsdpi_do_unshard(u) : FSDP_OK;
}

// Applies reshard_after_forward: keeps all full parameters, none, or 1/n of them in SLICE.
static fsdp_status fsdpi_do_reshard_forward(fsdp_unit *u) {
    if (u->options.reshard_after_forward == FSDP_RESHARD_NEVER) return FSDP_OK;
    if (u->options.reshard_after_forward == FSDP_RESHARD_ALWAYS) return fsdpi_do_reshard(u);
    if (u->callback) fsdpi_call_back(u, 0);
    FSDPI_TRY(fsdpi_emit_step(u, &fsdpi_slice));
    u->state.storage = FSDP_STORAGE_SHARDED_POST_FORWARD;
    return FSDP_OK;
}

// Reshards after backward, if the option is set. An all-gather still in flight was a prefetch
// without a use: the last backward reshards it. An earlier backward keeps it, and makes COMPUTE
// wait for it if there are gradient hooks: they follow COMPUTE and may write shards.
static fsdp_status fsdpi_do_reshard_backward(fsdp_unit *u) {
    int in_flight = u->state.storage == FSDP_STORAGE_IN_FLIGHT;
    if (in_flight ? u->model->options.is_last_backward : u->options.reshard_after_backward)
        return fsdpi_do_reshard(u);
    if (!in_flight || !u->model->grad_hooks) return FSDP_OK;
    return fsdpi_emit_step(u, &fsdpi_waits[u->layout.gather]);
}

// Gathers a unit before its use, unless all prefetches would hold more than prefetch_bytes.
static fsdp_status fsdpi_prefetch(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int slot = u->layout.classes[FSDP_POOL_GATHER];
    int64_t bytes = slot < 0 ? 0 : (int64_t)m->classes[slot].bytes, most = m->desc.prefetch_bytes;
    if ((fsdpi_is_gathered(u) && !u->state.stale) || (most && m->ahead_bytes + bytes > most))
        return FSDP_OK;
    fsdp_status status = fsdpi_do_unshard(u);
    if (status || !u->state.slot[FSDP_POOL_GATHER]) return status;
    u->state.ahead = 1;
    m->ahead_bytes += bytes;
    return FSDP_OK;
}

static fsdp_status fsdpi_do_prefetch_forward(fsdp_unit *u) {
    for (int i = 0; i < u->options.num_prefetch[FSDPI_FORWARD]; i++)
        FSDPI_TRY(fsdpi_prefetch(u->model->units[u->options.prefetch[FSDPI_FORWARD][i]]));
    return FSDP_OK;
}

/* Prefetches the units set for backward; without any, the unit whose forward preceded this one's.
   By default the latter is off if ops run inline: the all-gather would block, not overlap. */
static fsdp_status fsdpi_do_prefetch_backward(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int at = u->state.last_order, policy = m->desc.implicit_prefetch;
    if (at >= 0) u->state.last_order = m->order[at].previous;
    for (int i = 0; i < u->options.num_prefetch[FSDPI_BACKWARD]; i++) {
        fsdp_unit *target = m->units[u->options.prefetch[FSDPI_BACKWARD][i]];
        if (target->options.unshard_in_backward) FSDPI_TRY(fsdpi_prefetch(target));
    }
    int overlaps = policy == FSDP_PREFETCH_DEFAULT ? m->world->mode != FSDP_RUN_INLINE
                                                   : policy == FSDP_PREFETCH_ALWAYS;
    if (u->options.num_prefetch[FSDPI_BACKWARD] || at <= 0 || !overlaps ||
        !m->order[at - 1].unit->options.unshard_in_backward)
        return FSDP_OK;
    return fsdpi_prefetch(m->order[at - 1].unit);
}

#endif // FSDPI_CORE_GATHER_H
