/* core/ops.h - makes ops: copies, fills, collectives, waits and markers

   Callers: clip.h (fsdpi_op), grads.h (fsdpi_op), params.h (fsdpi_emit_use) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_OPS_H
#define FSDPI_CORE_OPS_H

#include "layout.h"
#include "../base/macros.h"
#include "objects.h"
#include "run.h"
#include "ext_dispatch.h"

#include <string.h>

// Returns an op with the labels of the model and the unit. The caller sets the other fields.
static FSDPI_NOINLINE fsdp_op fsdpi_op(const fsdp_model *m, const fsdp_unit *u, int kind, int label,
                                       int stream) {
    fsdp_op op;
    memset(&op, 0, offsetof(fsdp_op, wait)); // num_waits says how many of them are set
    op.kind = (uint8_t)kind;
    op.label = (uint8_t)label;
    op.stream = (uint8_t)stream;
    op.state = m->call_state;
    op.scale = 1.0;
    op.model = (fsdp_model *)(uintptr_t)m;
    op.unit = u;
    op.what = u ? u->desc.name : fsdpi_label(m, label);
    op.what_hash = u ? u->layout.hash : (uint64_t)label;
    if (u) memcpy(op.agree, u->layout.agree, sizeof op.agree);
    op.step = m->step;
    op.given = m->agreed_hash;
    return op;
}

// Shows extensions a marker op: an event of a buffer, as ACQUIRE or RELEASE.
static FSDPI_NOINLINE fsdp_status fsdpi_show_buf(fsdp_model *m, const fsdp_unit *u, int kind,
                                                 int stream, fsdp_buf *buf) {
    fsdp_op op = fsdpi_op(m, u, kind, FSDP_LABEL_NONE, stream);
    if (kind == FSDP_OP_RELEASE) op.src = buf;
    else op.dst = buf;
    op.pool = buf->acquired_pool;
    op.slot = buf->number;
    return fsdpi_show(m, &op);
}

static inline fsdp_status fsdpi_marker(fsdp_unit *u, int kind, int stream, fsdp_buf *buf) {
    return u->model->listeners & FSDPI_LISTEN_OPS ? fsdpi_show_buf(u->model, u, kind, stream, buf)
                                                  : FSDP_OK;
}

// Fills elements [from, from + count) of a buffer with a byte. Emits nothing if count is 0.
static fsdp_status fsdpi_emit_fill(fsdp_model *m, const fsdp_unit *u, int label, int stream,
                                   fsdp_buf *dst, fsdp_dtype dtype, int64_t from, int64_t count,
                                   uint8_t fill) {
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_ZERO, label, stream);
    if (count == 0) return FSDP_OK;
    op.fill = fill;
    op.dtype = op.out_dtype = (uint8_t)dtype;
    op.count = (uint64_t)count;
    op.bytes = (uint64_t)fsdpi_bytes(count, dtype);
    op.dst = dst;
    op.dst_ptr = dst->ptr + fsdpi_bytes(from, dtype);
    return fsdpi_emit(m, &op);
}

// Returns the bytes that a copy or a fill writes, or that a rank receives in a collective.
static uint64_t fsdpi_op_bytes(const fsdp_op *op) {
    if (op->kind == FSDP_OP_COPY || op->kind == FSDP_OP_ZERO)
        return op->count * fsdp_dtype_size(op->out_dtype);
    return fsdpi_coll_bytes(op->kind, (uint64_t)op->group_size,
                            op->count * fsdp_dtype_size(op->dtype));
}

// Sets an op's dtypes, its blocks or segments, and its counts of elements and bytes.
static void fsdpi_op_work(fsdp_op *op, fsdp_dtype dtype, fsdp_dtype out_dtype,
                          const fsdpi_op_list *work) {
    op->count = work->count;
    op->dtype = (uint8_t)dtype;
    op->out_dtype = (uint8_t)out_dtype;
    op->list = op->kind == FSDP_OP_COPY ? (const void *)work->blocks : work->segs;
    op->list_count = op->list ? (uint32_t)work->num : 0;
    op->bytes = fsdpi_op_bytes(op);
}

/* Emits a copy over blocks, a collective over segments, or an all_reduce of work->count elements,
   from src in dtype to dst in out_dtype. Requires the group of a collective in *op, and scale,
   accumulate and in_place if they differ from the defaults. Emits nothing if work->count is 0. */
static fsdp_status fsdpi_emit_work(fsdp_model *m, fsdp_op *op, fsdp_buf *src, fsdp_dtype dtype,
                                   fsdp_buf *dst, fsdp_dtype out_dtype, const fsdpi_op_list *work) {
    if (work->count == 0) return FSDP_OK;
    fsdpi_op_work(op, dtype, out_dtype, work);
    op->src = src;
    op->dst = dst;
    op->src_ptr = src->ptr;
    op->dst_ptr = dst->ptr;
    return fsdpi_emit(m, op);
}

// Makes COMPUTE, the caller's stream, wait until buf has been written.
static fsdp_status fsdpi_emit_use(fsdp_model *m, const fsdp_unit *u, int label, fsdp_buf *buf) {
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_WAIT, label, FSDP_STREAM_COMPUTE);
    op.src = buf;
    return fsdpi_emit(m, &op);
}

#endif // FSDPI_CORE_OPS_H
