/* core/ops.h - op records; fsdpi_emit, the only door to the tables

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_CORE_OPS_H
#define FSDPI_CORE_OPS_H

#include "error.h"
#include "layout.h"
#include "macros.h"
#include "objects.h"
#include "run.h"
#include "watch.h"

#include <string.h>

// fsdpi_emit numbers a record, counts it, shows it to extensions, derives its waits from the
// buffers that it reads and writes, and runs it.

// A record with the model's labels; the caller fills in the rest.
static FSDPI_NOINLINE fsdp_op fsdpi_op(const fsdp_model *m, const fsdp_unit *u, int kind, int label,
                                       int stream) {
    fsdp_op op;
    memset(&op, 0, offsetof(fsdp_op, wait)); // num_waits of them count
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
    op.given = m->given;
    return op;
}

/* Three rules. Reading waits for the last write by another stream; writing too (one writer at a
   time); the first write after acquire waits for the last consumer's release. */
static inline void fsdpi_derive_waits(fsdp_op *op) {
    const fsdp_buf *src = op->src, *dst = op->dst;
    uint8_t num = 0;
    if (src && src->ready.seq != 0 && src->ready.stream != op->stream) op->wait[num++] = src->ready;
    if (dst && dst != src) {
        const fsdp_event *event = dst->avail.seq ? &dst->avail : &dst->ready;
        if (event->seq != 0 && event->stream != op->stream) op->wait[num++] = *event;
    }
    op->num_waits = num;
}

// Extensions see `seen`, a copy, and may change it. Returns the record that runs, or NULL: none.
static FSDPI_NOINLINE fsdp_op *fsdpi_watched(fsdp_model *m, const fsdp_op *op, fsdp_op *seen) {
    int32_t size;
    *seen = *op;
    seen->comm_number = (uint16_t)fsdpi_comm_number(m->world, op->comm, &size);
    seen->timed = op->kind < FSDP_OP_HOOK && (m->watch & FSDPI_TIMES);
    void *user;
    seen->custom = op->comm && op->unit && fsdpi_custom_comm(op, &user);
    return fsdpi_taken(m, seen) || op->kind >= FSDP_OP_HOOK ? NULL : seen;
}

static FSDPI_NOINLINE fsdp_status fsdpi_emit_ordered(fsdp_model *m, fsdp_op *op) {
    fsdp_world *w = m->world;
    fsdp_status status = FSDP_OK;
    if (w->mode != FSDPI_INLINE) fsdpi_derive_waits(op);
    fsdp_op seen;
    fsdp_op *runs = m->watch & FSDPI_RECORDS ? fsdpi_watched(m, op, &seen) : op;
    if (runs) status = fsdpi_issue(w, runs);
    // Only now, so that a record that an extension has emitted in its place waits for `avail`, too.
    if (op->dst) op->dst->avail.seq = 0;
    // GATHER and EXTENSION run ahead: their next record may come before a reader of this one.
    unsigned due = 1u << op->stream & (1u << FSDP_STREAM_GATHER | 1u << FSDP_STREAM_EXTENSION);
    if (!status && op->dst) fsdpi_mark(w, op->stream, &op->dst->ready, due ? op->dst : NULL);
    return status;
}

// The record is the caller's: it may be one that is issued again and again.
static fsdp_status fsdpi_emit(fsdp_model *m, fsdp_op *op) {
    fsdp_status status = fsdpi_failed(m->world);
    if (status) return status;
    op->seq = ++m->seq;
    m->counters.calls[op->kind]++;
    m->counters.bytes[op->kind] += op->bytes;
    if (m->world->mode == FSDPI_INLINE && !(m->watch & FSDPI_RECORDS))
        return fsdpi_execute(m->world, op, NULL); // no order to keep
    return fsdpi_emit_ordered(m, op);
}

// A marker: numbered, counted and shown. It waits for nothing and sets no event.
static fsdp_status fsdpi_show(fsdp_model *m, fsdp_op *op) {
    fsdp_status status = fsdpi_failed(m->world);
    if (status || !(m->watch & FSDPI_OPS)) return status;
    op->seq = ++m->seq;
    m->counters.calls[op->kind]++;
    fsdp_op seen;
    (void)fsdpi_watched(m, op, &seen);
    return FSDP_OK;
}

// What happens to a buffer, where extensions see records.
static FSDPI_NOINLINE fsdp_status fsdpi_show_buf(fsdp_model *m, const fsdp_unit *u, int kind,
                                                 int stream, fsdp_buf *buf) {
    fsdp_op op = fsdpi_op(m, u, kind, FSDP_LABEL_NONE, stream);
    if (kind == FSDP_OP_RELEASE) op.src = buf;
    else op.dst = buf;
    op.pool = buf->as;
    op.slot = buf->number;
    return fsdpi_show(m, &op);
}

static inline fsdp_status fsdpi_marker(fsdp_unit *u, int kind, int stream, fsdp_buf *buf) {
    return u->model->watch & FSDPI_OPS ? fsdpi_show_buf(u->model, u, kind, stream, buf) : FSDP_OK;
}

// Fill elements [from, from + count) of a buffer with a byte.
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

// Bytes that a copy or a fill writes, or that a rank has to receive.
static uint64_t fsdpi_op_bytes(const fsdp_op *op) {
    if (op->kind == FSDP_OP_COPY || op->kind == FSDP_OP_ZERO)
        return op->count * fsdp_dtype_size(op->out_dtype);
    return fsdpi_coll_bytes(op->kind, (uint64_t)op->group_size,
                            op->count * fsdp_dtype_size(op->dtype));
}

// The record's work: blocks of a copy, segments of a collective, or a number of elements.
static void fsdpi_op_work(fsdp_op *op, fsdp_dtype dtype, fsdp_dtype out_dtype,
                          const fsdpi_work *work) {
    op->count = work->count;
    op->dtype = (uint8_t)dtype;
    op->out_dtype = (uint8_t)out_dtype;
    op->list = op->kind == FSDP_OP_COPY ? (const void *)work->blocks : work->segs;
    op->list_count = op->list ? (uint32_t)work->num : 0;
    op->bytes = fsdpi_op_bytes(op);
}

/* A copy over blocks, a collective over segments, or an all_reduce of work->count elements, from
   src in dtype to dst in out_dtype. The caller has set what is special (scale, accumulate,
   in_place) and a collective's group. An empty one is not issued. */
static fsdp_status fsdpi_emit_work(fsdp_model *m, fsdp_op *op, fsdp_buf *src, fsdp_dtype dtype,
                                   fsdp_buf *dst, fsdp_dtype out_dtype, const fsdpi_work *work) {
    if (work->count == 0) return FSDP_OK;
    fsdpi_op_work(op, dtype, out_dtype, work);
    op->src = src;
    op->dst = dst;
    op->src_ptr = src->ptr;
    op->dst_ptr = dst->ptr;
    return fsdpi_emit(m, op);
}

// COMPUTE, the caller's stream, waits until buf is written.
static fsdp_status fsdpi_emit_use(fsdp_model *m, const fsdp_unit *u, int label, fsdp_buf *buf) {
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_USE, label, FSDP_STREAM_COMPUTE);
    op.src = buf;
    return fsdpi_emit(m, &op);
}

#endif // FSDPI_CORE_OPS_H
