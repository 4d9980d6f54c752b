/* core/ops.h - op records, and fsdpi_emit, the only door to the tables

   A part of fsdp.h, which includes it.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// Owns: fsdpi_emit, the only door to the device and comm tables. It numbers a record, counts it,
// shows it to the observer, derives what it waits for from the buffers it reads and writes, and
// runs it.

FSDP_API const char *fsdp_op_name(int kind) {
    static const char *const names[FSDP_OP_COUNT] = {
#define FSDP_X(name, text) text,
        FSDP_OP_LIST(FSDP_X)
#undef FSDP_X
    };
    return kind >= 0 && kind < FSDP_OP_COUNT ? names[kind] : "?";
}

FSDP_API const char *fsdp_label_name(int label) {
    static const char *const names[FSDP_LABEL_COUNT] = {
#define FSDP_X(name, text) text,
        FSDP_LABEL_LIST(FSDP_X)
#undef FSDP_X
    };
    return label >= 0 && label < FSDP_LABEL_COUNT ? names[label] : "?";
}

// A record with the model's labels; the caller fills in the rest.
static FSDPI_NOINLINE fsdp_op fsdpi_op(const fsdp_model *m, const fsdp_unit *u, int kind, int label,
                                       int stream) {
    fsdp_op op;
    memset(&op, 0, sizeof op);
    op.kind = (uint8_t)kind;
    op.label = (uint8_t)label;
    op.stream = (uint8_t)stream;
    op.state = m->call_state;
    op.scale = 1.0;
    op.unit = u;
    op.what = u ? u->desc.name : fsdp_label_name(label);
    op.what_hash = u ? u->layout.hash : (uint64_t)label;
    op.step = m->step;
    return op;
}

static int fsdpi_must_wait(const fsdp_world *w, const fsdp_event *event, int stream) {
    return w->mode != FSDPI_INLINE && event->seq != 0 && event->stream != stream;
}

/* Three rules. Reading waits for the last write by another stream; writing too (one writer at a
   time); the first write after acquire waits for the last consumer's release. */
static fsdp_status fsdpi_emit(fsdp_model *m, fsdp_op *op) {
    fsdp_world *w = m->world;
    fsdp_status status = fsdpi_failed(w);
    if (status) return status;
    op->seq = ++m->seq;
    m->counters.calls[op->kind]++;
    m->counters.bytes[op->kind] += op->bytes;
    if (m->dry) return FSDP_OK;
    int num = 0;
    if (op->src && fsdpi_must_wait(w, &op->src->ready, op->stream))
        op->wait[num++] = op->src->ready;
    if (op->dst && op->dst != op->src) {
        fsdp_event *event = op->dst->avail.seq ? &op->dst->avail : &op->dst->ready;
        if (fsdpi_must_wait(w, event, op->stream)) op->wait[num++] = *event;
    }
    if (op->dst) op->dst->avail.seq = 0;
    if (!(m->driver.op && m->driver.op(m->driver.user, m, op))) status = fsdpi_issue(w, op);
    if (!status && op->dst) status = fsdpi_mark(w, op->stream, &op->dst->ready);
    return status;
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

/* Bytes that a copy writes, or that a rank has to receive. Of a gather or scatter that is the part
   of each other rank; of an all_reduce, which is a scatter and a gather of 1/R of it, 2 (R-1)/R of
   the whole, rounded up. */
static uint64_t fsdpi_op_bytes(const fsdp_op *op) {
    if (op->kind == FSDP_OP_COPY) return op->count * fsdp_dtype_size(op->out_dtype);
    uint64_t bytes = op->count * fsdp_dtype_size(op->dtype), ranks = (uint64_t)op->group_size;
    if (ranks < 2) return 0;
    return op->kind == FSDP_OP_ALL_REDUCE ? 2 * bytes - 2 * bytes / ranks : (ranks - 1) * bytes;
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

// The same work in other dtypes.
static void fsdpi_op_cast(fsdp_op *op, fsdp_dtype dtype, fsdp_dtype out_dtype) {
    op->dtype = (uint8_t)dtype;
    op->out_dtype = (uint8_t)out_dtype;
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

/* Give a slot back; `stream` is its last consumer. With debug, what is released becomes NaN. */
static fsdp_status fsdpi_release(fsdp_unit *u, fsdp_buf **slot, int stream) {
    fsdp_model *m = u->model;
    fsdp_buf *buf = *slot;
    if (!buf) return FSDP_OK;
    fsdp_status status = FSDP_ASSERT(m->world, buf->held);
    if (!status && m->desc.debug)
        status = fsdpi_emit_fill(m, u, FSDP_LABEL_NONE, stream, buf, FSDP_U8, 0,
                                 (int64_t)buf->bytes, 0xFF);
    if (!status && buf->avail.seq == 0) // else nobody has written it meanwhile
        status = fsdpi_mark(m->world, stream, &buf->avail);
    buf->held = 0;
    buf->released = ++m->release_seq;
    *slot = NULL;
    return status;
}
