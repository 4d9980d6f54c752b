/* core/params.h - parameters as the caller sees them: views, init, load, full, broadcast

   State: fsdp_model.full_seg, full_copy and full_block, the lists of fsdp_param_full.
   Callers: programs and extend.h (fsdpi_updates_on_device).

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_PARAMS_H
#define FSDPI_CORE_PARAMS_H

#include "alloc.h"
#include "commit.h"
#include "error.h"
#include "flight.h"
#include "layout.h"
#include "objects.h"
#include "ops.h"
#include "pool.h"
#include "replicas.h"
#include "run.h"
#include "shard_math.h"
#include "template.h"
#include "step.h"
#include "unit.h"
#include "ext_dispatch.h"

#include <string.h>

// Copies elements [from, from + num) of rank k's padded shard to their places in the full tensor.
static void fsdpi_scatter_piece(const fsdpi_param *p, int world, int k, int64_t from, int64_t num,
                                const char *piece, char *full, size_t size) {
    int dim = p->lay.shard_dim;
    int64_t inner = fsdpi_numel(p->lay.shape, dim + 1, p->lay.ndim);
    fsdp_range range = fsdpi_range(p->lay.shape[dim], world, k);
    int64_t row = range.count * inner, pitch = p->lay.shape[dim] * inner; // shard's; tensor's
    int64_t outer = fsdpi_numel(p->lay.shape, 0, dim);
    while (num > 0 && from < row * outer) {
        int64_t column = from % row, run = fsdpi_min(row - column, num);
        int64_t to = from / row * pitch + range.start * inner + column;
        memcpy(full + (size_t)to * size, piece, (size_t)run * size);
        piece += (size_t)run * size;
        from += run;
        num -= run;
    }
}

// Makes the scratch buffer: room for the largest padded parameter, but at most about fill_bytes. If
// the host cannot read the buffer, also makes one in host memory.
static fsdp_status fsdpi_full_scratch(fsdp_model *m) {
    int64_t largest = 0;
    for (int i = 0; i < m->num_units; i++) {
        const fsdp_unit *u = m->units[i];
        for (int k = 0; k < u->desc.num_params; k++) {
            // In the widest dtype, and at least one element of every rank.
            int64_t bytes = fsdpi_min(fsdpi_shards(u) * u->params[k].lay.shard_numel * 8,
                                      m->desc.fill_bytes);
            if (bytes < 8 * fsdpi_shards(u)) bytes = 8 * fsdpi_shards(u);
            if (bytes > largest) largest = bytes;
        }
    }
    FSDPI_TRY(fsdpi_buf_new(m, FSDP_POOL_SCRATCH, (size_t)largest, &m->full_scratch));
    if (fsdpi_is_host(m->world)) return FSDP_OK;
    m->full_copy = (char *)fsdpi_model_alloc(m, m->full_scratch->bytes);
    return m->full_copy ? FSDP_OK
                        : fsdpi_no_memory(m->world, "param_full", "", m->full_scratch->bytes);
}

/* Gathers one parameter, or its gradient, in its stored dtype. Gathers all shards piece by piece to
   the scratch buffer, and copies each piece to its places in `full`. */
static FSDP_COLD fsdp_status fsdpi_gather_full(fsdp_unit *u, const fsdpi_param *p, fsdp_buf *block,
                                               fsdp_dtype dtype, char *full) {
    fsdp_model *m = u->model;
    int world = fsdpi_shards(u);
    size_t size = fsdp_dtype_size(dtype);
    if (world == 1) {
        FSDPI_TRY(fsdpi_emit_use(m, u, FSDP_LABEL_FULL, block));
        if (!full) return FSDP_OK;
        return fsdpi_transfer(m->world, full, block->ptr + (size_t)p->lay.shard_offset * size,
                              (size_t)p->lay.numel * size);
    }
    fsdp_status status = m->full_scratch ? FSDP_OK : fsdpi_full_scratch(m);
    if (status) return fsdpi_fail_together(m->world, status);
    int64_t step = (int64_t)(m->full_scratch->bytes / ((size_t)world * size));
    const char *pieces = m->full_copy ? m->full_copy : m->full_scratch->ptr;
    for (int64_t at = 0; at < p->lay.shard_numel; at += step) {
        int64_t num = fsdpi_min(step, p->lay.shard_numel - at);
        fsdp_seg seg = {0, 0, num};
        m->full_seg = seg; // if the call fails, a worker thread may still read it afterwards
        m->full_block = fsdpi_row_block(p->lay.shard_offset + at,
                                        u->desc.info.shard_mesh_rank * num, num);
        fsdp_op in = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_FULL, FSDP_STREAM_GATHER);
        fsdp_op op = fsdpi_op(m, u, FSDP_OP_ALL_GATHER, FSDP_LABEL_FULL, FSDP_STREAM_GATHER);
        fsdpi_op_list own = {&m->full_block, NULL, 1, (uint64_t)num},
                      all = {NULL, &m->full_seg, 1, (uint64_t)num};
        op.in_place = 1; // peers may not be able to read the shards
        op.comm = u->desc.info.shard_comm;
        op.group_size = world;
        FSDPI_TRY(fsdpi_emit_work(m, &in, block, dtype, m->full_scratch, dtype, &own));
        FSDPI_TRY(fsdpi_emit_work(m, &op, m->full_scratch, dtype, m->full_scratch, dtype, &all));
        FSDPI_TRY(fsdpi_emit_use(m, u, FSDP_LABEL_FULL, m->full_scratch));
        FSDPI_TRY(m->full_copy ? fsdpi_transfer(m->world, m->full_copy, m->full_scratch->ptr,
                                                (size_t)(world * num) * size)
                               : fsdpi_sync(m->world, FSDP_STREAM_COMPUTE));
        for (int k = 0; k < world && full; k++)
            fsdpi_scatter_piece(p, world, k, at, num, pieces + (size_t)(k * num) * size, full,
                                size);
    }
    return FSDP_OK;
}

static void fsdpi_view(const fsdp_unit *u, int index, fsdp_param_view *v) {
    const fsdpi_param *p = &u->params[index];
    const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_dtype_group_of(u, p));
    *v = fsdpi_view_static(u, index);
    if ((*fsdpi_use(u, index) & FSDPI_USE_REDUCED) && !u->model->backward)
        v->shard_grad = flat->grad->ptr + fsdpi_bytes(p->lay.shard_offset, v->grad_dtype);
}

// Commits the model, before a caller gets the address of shards. With offload the host reads
// shards, so it waits until the device has done its work on them.
static fsdp_status fsdpi_shards_readable(fsdp_model *m) {
    if (!m->committed) FSDPI_TRY(fsdpi_commit(m));
    return m->desc.cpu_offload ? fsdpi_sync(m->world, FSDP_STREAM_COMPUTE) : FSDP_OK;
}

FSDP_API fsdp_status fsdp_param_view_get(fsdp_unit *unit, int index, fsdp_param_view *out) {
    if (out) memset(out, 0, sizeof *out);
    if (!unit || !out)
        return fsdpi_null_of(unit ? unit->model : NULL, "param_view_get", "unit or out");
    FSDPI_TRY(fsdpi_shards_readable(unit->model));
    FSDPI_TRY(fsdpi_check_index(unit, index, "param_view_get"));
    fsdpi_view(unit, index, out);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_param_at(fsdp_model *model, int ordinal, fsdp_param_view *out) {
    if (out) memset(out, 0, sizeof *out);
    if (!model || !out) return fsdpi_null_of(model, "param_at", "model or out");
    for (int i = 0; i < model->num_units; i++) {
        fsdp_unit *u = model->units[i];
        int first = u->params[0].ordinal;
        if (ordinal >= first && ordinal < first + u->desc.num_params)
            return fsdp_param_view_get(u, ordinal - first, out);
    }
    return fsdpi_invalid_arg(model->world,
                             "[E168] param_at: the model has no parameter %d, expected 0..%d",
                             ordinal, model->num_params - 1);
}

FSDP_API int fsdp_next_param(fsdp_model *model, fsdp_param_view *view) {
    if (!model || !view) return 0;
    fsdp_unit *u = view->unit;
    int index = u ? view->index + 1 : 0;
    if (!u && model->num_units == 0) return 0;
    if (!u) u = model->units[0];
    if (index == u->desc.num_params) {
        if (u->desc.index + 1 == model->num_units) return 0;
        u = model->units[u->desc.index + 1];
        index = 0;
    }
    return fsdpi_keep_status(u->model, fsdp_param_view_get(u, index, view)) == FSDP_OK;
}

// Returns `memory` of a view, or fails if the caller expects another dtype.
static void *fsdpi_view_as(const fsdp_param_view *v, void *memory, fsdp_dtype has, fsdp_dtype asked,
                           const char *what) {
    if (!memory || has == asked || fsdpi_failed(v->unit->model->world)) return memory;
    if (memory == v->shard_grad)
        return fsdpi_wrong_dtype(v->unit, v->index, FSDP_CALL_ZERO_GRAD, what, "has a gradient in",
                                 has, asked, "view.grad_dtype", "grad_dtype of the model");
    return fsdpi_wrong_dtype(v->unit, v->index, FSDP_CALL_LOAD, what, "is stored as", has, asked,
                             "view.dtype", "dtype of its desc");
}
FSDP_API void *fsdp_view_data_as(const fsdp_param_view *view, fsdp_dtype dtype) {
    return view ? fsdpi_view_as(view, view->data, view->dtype, dtype, "view_data_as") : NULL;
}
FSDP_API void *fsdp_view_shard_as(const fsdp_param_view *view, fsdp_dtype dtype) {
    return view ? fsdpi_view_as(view, view->shard, view->dtype, dtype, "view_shard_as") : NULL;
}
FSDP_API void *fsdp_view_grad_as(const fsdp_param_view *view, fsdp_dtype dtype) {
    return view ? fsdpi_view_as(view, view->shard_grad, view->grad_dtype, dtype, "view_grad_as")
                : NULL;
}

FSDP_API int64_t fsdp_view_index(const fsdp_param_view *view, int64_t k) {
    int64_t index = 0, stride = 1;
    if (!view) return -1;
    for (int d = view->ndim - 1; d >= 0; d--) {
        int64_t size = view->local_shape[d] ? view->local_shape[d] : 1;
        index += (view->start[d] + k % size) * stride;
        k /= size;
        stride *= view->shape[d];
    }
    return index;
}

// Marks shards as written by the caller's stream: later gathers wait for it.
static void fsdpi_shards_written(fsdp_model *m) {
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++)
        if (m->flats[d].shard)
            fsdpi_mark(m->world, FSDP_STREAM_COMPUTE, &m->flats[d].shard->ready, m->flats[d].shard);
}

// Begins a call in which the host writes shards. Waits for gathers that still read them.
static fsdp_status fsdpi_load(fsdp_model *m) {
    FSDPI_TRY(fsdpi_model_call(m, FSDP_CALL_LOAD, 1));
    fsdpi_drain(m->world);
    return fsdpi_failed(m->world);
}

// Returns 1 if optimizers update shards on the device: the host cannot read the shards, or would
// have to wait for the device's streams. The host updates offloaded shards.
static int fsdpi_updates_on_device(const fsdp_model *m) {
    const fsdp_world *w = m->world;
    return !m->desc.cpu_offload && w->device_ops->update &&
           (!fsdpi_is_host(w) || w->mode == FSDP_RUN_STREAMS);
}

// Fills a parameter. If the host cannot write it in place, the host fills blocks and copies them.
static fsdp_status fsdpi_init_param(fsdp_model *m, const fsdp_param_view *v, fsdp_init_fn fn,
                                    void *user) {
    fsdp_param_view block = *v;
    int64_t rows = v->local_shape[0], row_numel = v->numel / rows;
    int64_t step = m->desc.fill_bytes / fsdpi_bytes(row_numel, v->dtype);
    int in_place = fsdpi_is_readable(m->world, m->flats[v->dtype].shard);
    if (step < 1) step = 1;
    int64_t most = fsdpi_bytes(fsdpi_min(step, rows) * row_numel, v->dtype);
    char *staged = in_place ? NULL : (char *)fsdpi_model_alloc(m, (size_t)most);
    fsdp_status status = FSDP_OK;
    if (!in_place && !staged) return fsdpi_no_memory(m->world, "init_params", "", (size_t)most);
    for (int64_t row = 0; row < rows && !status; row += step) {
        char *place = (char *)v->shard + fsdpi_bytes(row * row_numel, v->dtype);
        block.local_shape[0] = fsdpi_min(step, rows - row);
        block.start[0] = v->start[0] + row;
        block.numel = block.local_shape[0] * row_numel;
        block.data = staged ? staged : place;
        if (staged) memset(staged, 0, (size_t)most); // fn may expect the zeros of a new shard
        fn(user, &block);
        if (staged)
            status = fsdpi_transfer(m->world, place, staged,
                                    (size_t)fsdpi_bytes(block.numel, v->dtype));
    }
    fsdpi_model_free(m, staged);
    return status;
}

FSDP_API FSDP_COLD fsdp_status fsdp_init_params(fsdp_model *model, fsdp_init_fn fn, void *user) {
    fsdp_status status = FSDP_OK;
    if (model) FSDPI_TRY(fsdpi_failed(model->world));
    if (!fn) return fsdpi_null_of(model, "init_params", "fn");
    FSDPI_TRY(fsdpi_load(model));
    fsdp_param_view v = FSDP_ZERO;
    while (!status && fsdp_next_param(model, &v)) {
        status = fsdpi_tell_values(model, FSDP_VALUES_REPLACE, v.ordinal);
        if (v.numel > 0 && !status) status = fsdpi_init_param(model, &v, fn, user);
    }
    if (!status) fsdpi_shards_written(model);
    if (!status) status = fsdpi_tell_values(model, FSDP_VALUES_REPLACED, -1);
    return fsdpi_fail_together(model->world, status);
}

FSDP_API fsdp_status fsdp_model_flat(fsdp_model *model, fsdp_dtype dtype, fsdp_flat *out) {
    if (out) memset(out, 0, sizeof *out);
    if (!model || !out) return fsdpi_null_of(model, "model_flat", "model or out");
    if (!fsdp_dtype_size(dtype))
        return fsdpi_invalid_arg(model->world, "[E169] model_flat: dtype is %d, expected FSDP_*",
                                 dtype);
    FSDPI_TRY(fsdpi_shards_readable(model));
    const fsdpi_flat_block *flat = &model->flats[dtype];
    out->dtype = dtype;
    out->grad_dtype = fsdpi_grad_dtype(model, dtype);
    out->numel = flat->train_numel;
    if (flat->train_numel > 0) {
        out->shards = flat->shard->ptr;
        out->grads = flat->grad->ptr;
    }
    return FSDP_OK;
}

// Copies this rank's rows of a full tensor to `shard`.
static fsdp_status fsdpi_load_rows(const fsdp_unit *u, const fsdpi_param *p, void *shard,
                                   const void *full) {
    const fsdp_layout_param *lay = &p->lay;
    int64_t outer = fsdpi_numel(lay->shape, 0, lay->shard_dim),
            inner = fsdpi_numel(lay->shape, lay->shard_dim + 1, lay->ndim);
    int64_t width = fsdpi_bytes(lay->rows * inner, p->dtype);
    int64_t from = fsdpi_bytes(lay->start * inner, p->dtype);
    int64_t pitch = fsdpi_bytes(lay->shape[lay->shard_dim] * inner, p->dtype);
    fsdp_block rows = {from, 0, width, outer, pitch, width};
    return fsdpi_transfer_rows(u->model->world, shard, full, &rows);
}

// Loads a parameter before the model has its first layout: into a buffer of its own, in host
// memory. So more units can follow, and a model is built with the memory of its shards and a unit.
static FSDP_COLD fsdp_status fsdpi_load_early(fsdp_unit *u, fsdpi_param *p, const void *full) {
    fsdp_model *m = u->model;
    if (m->world->flight) fsdpi_flight_call(m->world, FSDP_CALL_LOAD, u->desc.name);
    if (!p->early || p->old_dtype != p->dtype) { // a cast came between two loads
        fsdp_buf *buf;
        const size_t bytes = (size_t)fsdpi_bytes(p->lay.shard_numel, p->dtype);
        FSDPI_TRY(fsdpi_buf_make(m, FSDP_POOL_SHARD, bytes, 1, &buf));
        fsdpi_buf_free(m, p->early);
        p->early = buf;
    }
    p->old_offset = 0;
    p->old_dtype = p->dtype;
    return fsdpi_load_rows(u, p, p->early->ptr, full);
}

FSDP_API fsdp_status fsdp_param_load(fsdp_unit *unit, int index, const void *full) {
    FSDPI_TRY(fsdpi_param_call(unit, index, FSDP_CALL_LOAD));
    FSDPI_TRY(fsdpi_failed(unit->model->world));
    fsdpi_param *p = &unit->params[index];
    if (!full && p->lay.numel > 0) return fsdpi_null_of(unit->model, "param_load", "full");
    if (!unit->model->num_commits) return fsdpi_load_early(unit, p, full);
    FSDPI_TRY(fsdpi_load(unit->model));
    fsdp_param_view v;
    fsdpi_view(unit, index, &v);
    FSDPI_TRY(fsdpi_load_rows(unit, p, v.shard, full));
    fsdpi_shards_written(unit->model);
    return fsdpi_tell_values(unit->model, FSDP_VALUES_WRITTEN, v.ordinal);
}

FSDP_API fsdp_status fsdp_param_full(fsdp_unit *unit, int index, void *full) {
    FSDPI_TRY(fsdpi_param_call(unit, index, FSDP_CALL_FULL));
    FSDPI_TRY(fsdpi_model_call(unit->model, FSDP_CALL_FULL, 0));
    const fsdpi_param *p = &unit->params[index];
    return fsdpi_gather_full(unit, p, fsdpi_flat_of(unit, fsdpi_dtype_group_of(unit, p))->shard,
                             p->dtype, (char *)full);
}

FSDP_API fsdp_status fsdp_param_full_grad(fsdp_unit *unit, int index, void *full) {
    FSDPI_TRY(fsdpi_param_call(unit, index, FSDP_CALL_FULL));
    FSDPI_TRY(fsdpi_failed(unit->model->world));
    const fsdpi_param *p = &unit->params[index];
    fsdp_dtype dtype = fsdpi_grad_dtype(unit->model, p->dtype);
    if (!p->requires_grad)
        return fsdp_fail(unit->model->world, FSDP_ERR_INVALID_STATE,
                         "[E204] param_full_grad: '%s' of unit '%s' is frozen: it has no gradient",
                         p->name, unit->desc.name);
    FSDPI_TRY(fsdpi_model_call(unit->model, FSDP_CALL_FULL, 0));
    if (unit->state.shard_grad == FSDPI_SHARD_GRAD_REDUCED)
        return fsdpi_gather_full(unit, p, fsdpi_flat_of(unit, fsdpi_dtype_group_of(unit, p))->grad,
                                 dtype, (char *)full);
    if (full) memset(full, 0, (size_t)fsdpi_bytes(p->lay.numel, dtype));
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_params_changed(fsdp_model *model) {
    fsdp_status status = fsdpi_model_call(model, FSDP_CALL_PARAMS_CHANGED, 1);
    if (!status) fsdpi_shards_written(model);
    return fsdpi_writing_ends(model, NULL, FSDP_CALL_PARAMS_CHANGED, status);
}

FSDP_API fsdp_status fsdp_params_writable(fsdp_model *model) {
    if (!model) return fsdp_fail_null(NULL, "params_writable", "model");
    FSDPI_TRY(fsdpi_failed(model->world));
    for (int i = 0; i < model->num_units; i++) { // COMPUTE waits for issued gathers
        fsdp_unit *u = model->units[i];
        fsdp_buf *slot = u->state.slot[FSDP_POOL_GATHER];
        if (u->state.storage == FSDP_STORAGE_IN_FLIGHT && slot)
            FSDPI_TRY(fsdpi_emit_use(model, u, FSDP_LABEL_GATHER, slot));
    }
    if (fsdpi_updates_on_device(model)) return FSDP_OK;
    return fsdpi_sync(model->world, FSDP_STREAM_COMPUTE);
}

// Broadcasts the states that extensions keep for the parameters of units begin .. end-1.
static fsdp_status fsdpi_broadcast_states(fsdp_model *m, int begin, int end, const char *what,
                                          int root) {
    fsdp_state_item item = FSDP_ZERO;
    fsdp_param_view v;
    for (;;) {
        FSDPI_TRY(fsdp_next_state(m, &item));
        if (!item.name) return fsdp_state_loaded(m);
        if (item.ordinal < 0) continue;
        FSDPI_TRY(fsdp_param_at(m, item.ordinal, &v));
        if (v.unit->desc.index < begin || v.unit->desc.index >= end || !fsdpi_is_replicated(v.unit))
            continue;
        FSDPI_TRY(fsdpi_replicas_meet(v.unit, FSDP_OP_BROADCAST, what, root, item.data,
                                      fsdpi_bytes(item.numel, item.dtype), FSDP_U8));
    }
}

FSDP_API FSDP_COLD fsdp_status fsdp_model_broadcast(fsdp_model *model, fsdp_unit *unit, int root) {
    static const char *const what = "model_broadcast";
    if (!model) return fsdpi_null_of(unit ? unit->model : NULL, what, "model");
    int begin = unit ? unit->desc.index : 0;
    FSDPI_TRY(fsdpi_failed(model->world));
    FSDPI_TRY(fsdpi_check_owner(model, unit, what));
    int end = unit ? begin + 1 : model->num_units;
    for (int i = begin; i < end; i++) {
        const fsdp_unit *u = model->units[i];
        if (root < 0 || (root >= fsdpi_replicas(u) && (unit || fsdpi_is_replicated(u))))
            return fsdpi_invalid_arg(model->world,
                                     "[E100] %s: root is %d, expected 0..%d of unit '%s'", what,
                                     root, fsdpi_replicas(u) - 1, u->desc.name);
    }
    FSDPI_TRY(fsdp_call_begin(model, FSDP_CALL_PARAMS_CHANGED, what));
    FSDPI_TRY(fsdp_params_writable(model));
    for (int i = begin; i < end; i++) {
        const fsdp_unit *u = model->units[i];
        int different = 0;
        if (fsdpi_is_replicated(u))
            FSDPI_TRY(fsdpi_replicas_compare(u, what, u->layout.hash, &different));
        if (different)
            return fsdp_fail(model->world, FSDP_ERR_MISMATCH,
                             "[E217] %s: replicas describe unit '%s' differently: give the same "
                             "names, shapes, dtypes and requires_grad in the same order on all "
                             "ranks",
                             what, u->desc.name);
    }
    for (int i = begin; i < end; i++) {
        const fsdp_unit *u = model->units[i];
        for (int k = 0; k < u->desc.num_params && fsdpi_is_replicated(u); k++) {
            size_t nbytes;
            char *rows = fsdpi_own_rows(u, &u->params[k], &nbytes);
            FSDPI_TRY(fsdpi_replicas_meet(u, FSDP_OP_BROADCAST, what, root, rows, (int64_t)nbytes,
                                          FSDP_U8));
        }
    }
    FSDPI_TRY(fsdpi_broadcast_states(model, begin, end, what, root));
    return fsdp_params_changed(model);
}

#endif // FSDPI_CORE_PARAMS_H
