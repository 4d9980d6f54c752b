/* core/ops.h - op records, prepared once at commit; fsdpi_emit, the only door to the tables

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
#include "route.h"
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

// Somebody watches: `seen`, a copy, is shown and may come back changed. NULL: it does not run.
static FSDPI_NOINLINE const fsdp_op *fsdpi_watched(fsdp_model *m, const fsdp_op *op,
                                                   fsdp_op *seen) {
    int works = op->kind < FSDP_OP_HOOK && op->kind != FSDP_OP_USE;
    int32_t size;
    *seen = *op;
    seen->comm_number = (uint16_t)fsdpi_comm_number(m->world, op->comm, &size);
    seen->timed = works && (m->watch & FSDPI_TIMES);
    void *user;
    seen->custom = op->comm && op->unit && fsdpi_custom_comm(op, &user);
    return fsdpi_taken(m, seen) || op->kind >= FSDP_OP_HOOK ? NULL : seen;
}

static FSDPI_NOINLINE fsdp_status fsdpi_emit_ordered(fsdp_model *m, fsdp_op *op) {
    fsdp_world *w = m->world;
    fsdp_status status = FSDP_OK;
    if (w->mode != FSDPI_INLINE) fsdpi_derive_waits(op);
    fsdp_op seen;
    const fsdp_op *runs = m->watch & FSDPI_RECORDS ? fsdpi_watched(m, op, &seen) : op;
    if (runs) status = fsdpi_issue(w, runs);
    if (op->dst) op->dst->avail.seq = 0; // what an extension emits in its place waits for it, too
    // Gathers, and what extensions issue, go on while others wait for what is there.
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

// Bytes that a copy writes, or that a rank has to receive.
static uint64_t fsdpi_op_bytes(const fsdp_op *op) {
    if (op->kind == FSDP_OP_COPY) return op->count * fsdp_dtype_size(op->out_dtype);
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

// The same work in other dtypes, or mostly the same ones.
static inline void fsdpi_op_cast(fsdp_op *op, fsdp_dtype dtype, fsdp_dtype out_dtype) {
    if (op->dtype == dtype && op->out_dtype == out_dtype) return;
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

/* -------------------------------------------------------------------------------------------- */
// Owns: a unit's templates. A template is a record in which everything that does not change from
// step to step stands already; the hook that emits it says only what has changed. Slots are named
// by their pool, since a unit holds another one at another time.

// A view but for the gradient, whose presence is known to the caller's thread only.
static fsdp_param_view fsdpi_view_static(const fsdp_unit *u, int index) {
    const fsdpi_param *p = &u->params[index];
    const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_part_of(u, p));
    fsdp_param_view v = FSDP_ZERO;
    v.unit = u->model->units[u->desc.index];
    v.name = p->name;
    v.unit_name = u->desc.name;
    v.user = p->user;
    v.unit_user = u->desc.user;
    v.ordinal = p->ordinal;
    v.index = index;
    v.dtype = p->dtype;
    v.grad_dtype = fsdpi_grad_dtype(u->model, p->dtype);
    v.ndim = p->lay.ndim;
    v.shard_dim = p->lay.shard_dim;
    v.requires_grad = p->requires_grad;
    v.has_hook = p->grad_hook != NULL;
    memcpy(v.shape, p->lay.shape, sizeof v.shape);
    memcpy(v.local_shape, p->lay.shape, sizeof v.local_shape);
    v.start[v.shard_dim] = p->lay.start;
    v.local_shape[v.shard_dim] = p->lay.local_numel ? p->lay.rows : 0;
    v.numel = p->lay.local_numel;
    v.data = v.shard = flat->shard->ptr + fsdpi_bytes(p->lay.shard_offset, p->dtype);
    return v;
}

static fsdp_status fsdpi_call_pre_gather(const fsdp_op *op, void *stream) {
    const fsdpi_param *p = &op->unit->params[op->root];
    fsdp_param_view v = fsdpi_view_static(op->unit, op->root);
    void *strings[FSDP_GATHER_TENSORS];
    for (int i = 0; i < p->num_strings; i++)
        strings[i] = (char *)op->dst_ptr + p->string_offset[i] +
                     op->unit->desc.info.shard_mesh_rank * p->string_bytes[i];
    return p->extension.pre_all_gather(p->extension.user, &v, strings, stream);
}

static fsdp_status fsdpi_call_post_gather(const fsdp_op *op, void *stream) {
    const fsdpi_param *p = &op->unit->params[op->root];
    fsdp_param_view v = fsdpi_view_static(op->unit, op->root);
    fsdp_dtype dtype = fsdpi_part_of(op->unit, p)->param_dtype;
    const void *gathered[FSDP_GATHER_TENSORS];
    for (int i = 0; i < p->num_strings; i++)
        gathered[i] = (char *)op->dst_ptr + p->string_offset[i];
    return p->extension.post_all_gather(
        p->extension.user, &v, gathered,
        (char *)op->dst_ptr + fsdpi_bytes(p->lay.full_offset, dtype), dtype, stream);
}

static fsdp_status fsdpi_call_all_reduce_hook(const fsdp_op *op, void *stream) {
    fsdp_unit *u = op->unit->model->units[op->unit->desc.index];
    return u->options.all_reduce_hook(u->options.all_reduce_user, u, op->dst_ptr,
                                      u->layout.train_numel, u->layout.reduce_dtype, stream);
}

// A dtype, and a group, of the unit or of one of its parts.
enum { FSDPI_STORED, FSDPI_FULL, FSDPI_GATHERED, FSDPI_SHARD_GRAD, FSDPI_REDUCED };
enum { FSDPI_NO_GROUP, FSDPI_SHARDS, FSDPI_SLICES, FSDPI_SUMS, FSDPI_REPLICAS };

typedef struct fsdpi_template_row {
    uint8_t op, label, stream; // stream COUNT: that of the last copy to the shard gradients
    uint8_t src, src_dtype, dst, dst_dtype;
    uint8_t each, grads; // a record for each part; of units with trainables
    uint8_t group;
    uint16_t work; // offset of the blocks or segments, in the part or in the layout; 0: none
    fsdp_status (*call)(const fsdp_op *op, void *stream); // for parts with an extension, or CALL
} fsdpi_template_row;

#define FSDPI_PART_WORK(name) offsetof(fsdpi_part, name)
#define FSDPI_UNIT_WORK(name) offsetof(fsdpi_layout, name)
#define FSDPI_COPY            FSDP_OP_COPY
#define FSDPI_AT(pool, dtype) FSDP_POOL_##pool, FSDPI_##dtype

// clang-format off
// In the order of FSDPI_OPS_*.
static const fsdpi_template_row fsdpi_template_rows[FSDPI_OPS_COUNT] = {
//   op, label, stream, from, to, each part?, of gradients?, group, work, call
    {FSDPI_COPY, FSDP_LABEL_COPY_IN, FSDP_STREAM_GATHER, FSDPI_AT(SHARD, STORED),
        FSDPI_AT(GATHER, FULL), 1, 0, 0, FSDPI_PART_WORK(copy_in), fsdpi_call_pre_gather},
    {FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, FSDP_STREAM_GATHER, FSDPI_AT(SHARD, GATHERED),
        FSDPI_AT(GATHER, GATHERED), 0, 0, FSDPI_SHARDS, FSDPI_UNIT_WORK(all_gather), NULL},
    {FSDPI_COPY, FSDP_LABEL_COPY_OUT, FSDP_STREAM_GATHER, FSDPI_AT(GATHER, FULL),
        FSDPI_AT(GATHER, FULL), 1, 0, 0, FSDPI_PART_WORK(copy_out), fsdpi_call_post_gather},
    {FSDPI_COPY, FSDP_LABEL_SLICE, FSDP_STREAM_COMPUTE, FSDPI_AT(GATHER, GATHERED),
        FSDPI_AT(SLICE, GATHERED), 0, 0, 0, FSDPI_UNIT_WORK(slice_copy), NULL},
    {FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, FSDP_STREAM_GATHER, FSDPI_AT(SLICE, GATHERED),
        FSDPI_AT(GATHER, GATHERED), 0, 0, FSDPI_SLICES, FSDPI_UNIT_WORK(slice_gather), NULL},
    {FSDP_OP_USE, FSDP_LABEL_GATHER, FSDP_STREAM_COMPUTE, FSDPI_AT(GATHER, GATHERED),
        FSDPI_AT(SHARD, GATHERED), 0, 0, 0, 0, NULL},
    {FSDP_OP_ZERO, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, FSDPI_AT(SHARD, FULL),
        FSDPI_AT(GRAD, FULL), 0, 1, 0, 0, NULL},
    {FSDPI_COPY, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE, FSDPI_AT(GRAD, FULL),
        FSDPI_AT(RIN, REDUCED), 1, 1, 0, FSDPI_PART_WORK(sum), NULL},
    {FSDPI_COPY, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE, FSDPI_AT(GRAD, FULL),
        FSDPI_AT(GRAD, FULL), 1, 1, 0, FSDPI_PART_WORK(chunk_cat), NULL},
    {FSDPI_COPY, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE, FSDPI_AT(GRAD, FULL),
        FSDPI_AT(GRAD, REDUCED), 1, 1, 0, FSDPI_PART_WORK(divide), NULL},
    {FSDPI_COPY, FSDP_LABEL_USERS, FSDP_STREAM_REDUCE, FSDPI_AT(SHARD, FULL),
        FSDPI_AT(GRAD, FULL), 0, 1, 0, FSDPI_UNIT_WORK(users), NULL},
    {FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, FSDP_STREAM_REDUCE, FSDPI_AT(GRAD, FULL),
        FSDPI_AT(SGRAD, SHARD_GRAD), 0, 1, FSDPI_SUMS, FSDPI_UNIT_WORK(reduce_scatter), NULL},
    {FSDPI_COPY, FSDP_LABEL_RED_OUT, FSDP_STREAM_REDUCE, FSDPI_AT(SGRAD, SHARD_GRAD),
        FSDPI_AT(SGRAD, SHARD_GRAD), 1, 1, 0, FSDPI_PART_WORK(rescale), NULL},
    {FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, FSDP_STREAM_REDUCE, FSDPI_AT(GRAD, FULL),
        FSDPI_AT(ROUT, REDUCED), 0, 1, FSDPI_SUMS, FSDPI_UNIT_WORK(to_rout), NULL},
    {FSDPI_COPY, FSDP_LABEL_PARTIAL, FSDP_STREAM_REDUCE, FSDPI_AT(ROUT, REDUCED),
        FSDPI_AT(SHARD, REDUCED), 0, 1, 0, FSDPI_UNIT_WORK(partial), NULL},
    {FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, FSDP_STREAM_ALLREDUCE, FSDPI_AT(ROUT, REDUCED),
        FSDPI_AT(ROUT, REDUCED), 0, 1, FSDPI_REPLICAS, FSDPI_UNIT_WORK(partial), NULL},
    {FSDP_OP_CALL, FSDP_LABEL_ALL_REDUCE_HOOK, FSDP_STREAM_COUNT, FSDPI_AT(ROUT, REDUCED),
        FSDPI_AT(ROUT, REDUCED), 0, 1, 0, 0, fsdpi_call_all_reduce_hook},
    {FSDPI_COPY, FSDP_LABEL_RED_OUT, FSDP_STREAM_COUNT, FSDPI_AT(ROUT, REDUCED),
        FSDPI_AT(SGRAD, SHARD_GRAD), 1, 1, 0, FSDPI_PART_WORK(red_out), NULL},
};
// clang-format on

// Where the last copy to the shard gradients runs.
static int fsdpi_out_stream(const fsdp_unit *u) {
    return fsdpi_replicas(u) > 1 ? FSDP_STREAM_ALLREDUCE : FSDP_STREAM_REDUCE;
}

static fsdp_dtype fsdpi_template_dtype(const fsdp_unit *u, const fsdpi_part *part, int which) {
    const fsdp_dtype dtypes[] = {part->dtype, part->param_dtype, u->layout.gather_dtype,
                                 fsdpi_grad_dtype(u->model, part->dtype), u->layout.reduce_dtype};
    return dtypes[which];
}

static void fsdpi_template_group(const fsdp_unit *u, int group, fsdp_op *op) {
    const int sizes[] = {0, fsdpi_shards(u), u->desc.slices, fsdpi_shards(u), fsdpi_replicas(u)};
    fsdp_comm *const comms[] = {NULL, u->desc.info.shard_comm, u->desc.slice_comm,
                                u->desc.reduce_comm, u->desc.replicate_comm};
    op->group_size = sizes[group];
    op->comm = comms[group];
}

// Shards and shard gradients stay where they are; a slot is another one at another time.
static fsdp_buf *fsdpi_template_block(const fsdp_unit *u, const fsdpi_part *part, int pool) {
    const fsdpi_flat_block *flat = fsdpi_flat_of(u, part);
    return pool == FSDP_POOL_SHARD ? flat->shard : pool == FSDP_POOL_SGRAD ? flat->grad : NULL;
}

// One record, for a part or the unit, behind `t`. Returns the next place: `t` if nothing is to do.
static fsdpi_template *fsdpi_template_make(fsdp_unit *u, int kind, const fsdpi_part *part,
                                           fsdpi_template *t) {
    const fsdpi_template_row *row = &fsdpi_template_rows[kind];
    const char *owner = row->each ? (const char *)part : (const char *)&u->layout;
    const fsdpi_work *work = (const fsdpi_work *)(const void *)(owner + row->work);
    int stream = row->stream == FSDP_STREAM_COUNT ? fsdpi_out_stream(u) : row->stream;
    int extended = row->each && row->call && part->extended;
    fsdp_op *op = &t->op;
    *op = fsdpi_op(u->model, u, extended ? (int)FSDP_OP_CALL : row->op, row->label, stream);
    fsdpi_template_group(u, row->group, op);
    if ((row->group && op->group_size < 2) || (row->work && !extended && work->count == 0))
        return t;
    t->begin = 0;
    t->src = row->src;
    t->dst = row->dst;
    if (row->work && !extended)
        fsdpi_op_work(op, fsdpi_template_dtype(u, part, row->src_dtype),
                      fsdpi_template_dtype(u, part, row->dst_dtype), work);
    if (op->kind == FSDP_OP_CALL) {
        op->call = row->call;
        op->root = extended ? (int32_t)(part->extended - u->params) : -1;
    }
    op->src = fsdpi_template_block(u, part, row->src);
    op->dst = fsdpi_template_block(u, part, row->dst);
    return t + 1;
}

// What stands in no row.
static void fsdpi_template_special(fsdp_unit *u, int kind, fsdpi_template *t) {
    fsdp_op *op = &t->op;
    if (kind == FSDPI_OPS_GATHER && u->route[0].gather == FSDPI_GATHER_STAGED) {
        t->src = FSDP_POOL_GATHER;
        op->in_place = 1;
    } else if (kind == FSDPI_OPS_GATHER) {
        t->begin = fsdpi_bytes(u->layout.gather_begin, (fsdp_dtype)op->dtype);
    } else if (kind == FSDPI_OPS_COPY_IN && op->call) {
        op->label = FSDP_LABEL_PRE_GATHER;
    } else if (kind == FSDPI_OPS_COPY_OUT && op->call) {
        op->label = FSDP_LABEL_POST_GATHER;
    } else if (kind == FSDPI_OPS_WAIT) {
        op->dst = NULL;
        if (u->route[0].gather != FSDPI_GATHER_ALIAS) return;
        t->src = FSDP_POOL_SHARD;
        op->src = fsdpi_flat_of(u, u->layout.parts)->shard;
    } else if (kind == FSDPI_OPS_ZERO) {
        op->src = NULL;
        op->dtype = op->out_dtype = FSDP_U8;
        op->count = op->bytes = (uint64_t)u->layout.grad_bytes;
    } else if (kind == FSDPI_OPS_USERS) {
        op->src = NULL; // host memory
    } else if (kind == FSDPI_OPS_ADD) {
        op->accumulate = 1;
    } else if (kind == FSDPI_OPS_REPLICAS) {
        op->in_place = 1;
    }
}

static int fsdpi_templates_max(const fsdp_unit *u) {
    int max = 0;
    for (int kind = 0; kind < FSDPI_OPS_COUNT; kind++)
        max += fsdpi_template_rows[kind].each ? u->layout.num_parts : 1;
    return max;
}

// All records of a unit: its lists and blocks are there.
static void fsdpi_templates_make(fsdp_unit *u) {
    fsdpi_layout *l = &u->layout;
    fsdpi_template *t = l->ops[0];
    for (int kind = 0; kind < FSDPI_OPS_COUNT; kind++) {
        const fsdpi_template_row *row = &fsdpi_template_rows[kind];
        l->ops[kind] = t;
        if (row->grads && l->num_train == 0) continue;
        for (int k = 0; k < (row->each ? l->num_parts : 1); k++) {
            const fsdpi_part *part = &l->parts[row->each ? k : l->users_part];
            fsdpi_template *next = fsdpi_template_make(u, kind, part, t);
            if (next != t) fsdpi_template_special(u, kind, t);
            t = next;
        }
    }
    l->ops[FSDPI_OPS_COUNT] = t;
}

/* Emits the records of one kind. Their slots are those that the unit holds now; whoever names other
   buffers has written them into the template. */
static fsdp_status fsdpi_emit_kind(fsdp_unit *u, int kind) {
    fsdp_model *m = u->model;
    fsdpi_template *t = u->layout.ops[kind], *end = u->layout.ops[kind + 1];
    fsdp_status status = FSDP_OK;
    for (; t != end && !status; t++) {
        fsdp_op *op = &t->op;
        if (t->src >= FSDP_POOL_GATHER) op->src = u->state.slot[t->src];
        if (t->dst >= FSDP_POOL_GATHER) op->dst = u->state.slot[t->dst];
        if (op->src) op->src_ptr = op->src->ptr + t->begin;
        if (op->dst) op->dst_ptr = op->dst->ptr;
        op->state = m->call_state;
        op->step = m->step;
        op->given = m->given;
        status = fsdpi_emit(m, op);
    }
    return status;
}

// What all records of a kind multiply by, and whether they add to what is there.
static void fsdpi_each(fsdp_unit *u, int kind, double scale, int accumulate) {
    for (fsdpi_template *t = u->layout.ops[kind]; t != u->layout.ops[kind + 1]; t++) {
        t->op.scale = scale;
        t->op.accumulate = (uint8_t)accumulate;
    }
}

#endif // FSDPI_CORE_OPS_H
