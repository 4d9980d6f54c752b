/* optim/muon.h - Muon: its buffers, the ops of a step, creation and end

   State: fsdp_muon.
   Callers: programs.

   A part of fsdp_muon.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_MUON_H
#include "../../fsdp_muon.h"
#endif
#ifndef FSDPI_OPTIM_MUON_H
#define FSDPI_OPTIM_MUON_H

#include "adamw_sgd.h"
#include "kernels.h"
#include "muon_schedule.h"
#include "states.h"
#include "updates.h"

#include <stdio.h>
#include <string.h>

/* -------------------------------------------------------------------------------------------- */
// Buffers: the memory for products, and those of buckets.

static void fsdpi_muon_free_buffers(fsdpi_muon_opt *o) {
    for (int i = 0; i < FSDPI_MUON_BUFS; i++) {
        if (i <= FSDPI_MUON_U || o->travels) fsdp_buf_destroy(o->base.model, o->bufs[i]);
        o->bufs[i] = NULL;
    }
    o->base.buffer_bytes = 0;
}

static fsdp_status fsdpi_muon_buffers(fsdpi_muon_opt *o) {
    const int64_t size = (int64_t)fsdp_dtype_size(o->desc.dtype);
    const int64_t element = (int64_t)fsdp_dtype_size(o->dtype);
    const int64_t matrix = (o->most * element + 63) / 64 * 64;
    const int64_t square = (o->square * element + 63) / 64 * 64;
    const int64_t packed = o->desc.gemm == fsdp_host_gemm ? FSDP_HOST_GEMM_BYTES : 0, norm = 64;
    const int memory = o->base.memory == FSDP_MEMORY_HOST ? FSDP_MEMORY_PINNED : FSDP_MEMORY_DEVICE;
    int64_t sent = 0, got = 0;
    for (int i = 0; i < o->num_buckets; i++) {
        const fsdpi_muon_bucket *f = &o->buckets[i];
        if (f->all.count > sent) sent = f->all.count;
        if (f->all.count * f->replicas > got) got = f->all.count * f->replicas;
    }
    if (!sent) return FSDP_OK;
    const int pool = fsdp_pool_register(o->base.model, "muon");
    fsdp_status status = fsdp_buf_create(o->base.model, pool, memory,
                                         norm + 2 * matrix + 2 * square + packed,
                                         &o->bufs[FSDPI_MUON_ROOM]);
    for (int i = FSDPI_MUON_U; i < FSDPI_MUON_BUFS && !status; i++)
        if (i > FSDPI_MUON_U && !o->travels) o->bufs[i] = o->bufs[FSDPI_MUON_U];
        else
            status = fsdp_buf_create(o->base.model, pool, FSDP_MEMORY_DEVICE,
                                     (i < FSDPI_MUON_WHOLE ? got : sent) * size, &o->bufs[i]);
    for (int i = 0; i < FSDPI_MUON_BUFS; i++)
        if (i <= FSDPI_MUON_U || o->travels) o->base.buffer_bytes += fsdp_buf_nbytes(o->bufs[i]);
    if (status) return status;
    o->room = (char *)fsdp_buf_ptr(o->bufs[FSDPI_MUON_ROOM]);
    o->x = o->room + norm, o->y = o->x + matrix, o->s = o->y + matrix, o->t = o->s + square;
    if (packed) o->desc.gemm_user = o->t + square;
    return FSDP_OK;
}

// Applies the model's layout to the optimizer's table, the owners, buckets and buffers.
static fsdp_status fsdpi_muon_apply_layout(fsdpi_muon_opt *o, const char *what) {
    fsdp_status status = fsdpi_optim_apply_layout(&o->base, what);
    if (status || o->laid == o->base.laid) return status;
    int64_t before = fsdpi_optim_host_bytes(o->base.model);
    fsdpi_muon_free_buffers(o);
    status = fsdpi_muon_plan(o, what);
    if (!status) status = fsdpi_muon_buffers(o);
    o->base.nbytes += fsdpi_optim_host_bytes(o->base.model) - before;
    for (int i = 0; i < o->num && !status; i++) {
        const fsdpi_muon_matrix *m = &o->matrices[i];
        const int64_t given[] = {m->ordinal, m->owner, m->at, m->columns};
        status = fsdp_agree(o->base.model, given, sizeof given);
    }
    if (!status) o->laid = o->base.laid;
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// The ops of a step. Invariants: ops that read or write u, x or whole matrices name these buffers,
// so that COMPUTE and EXTENSION wait for each other; only COMPUTE uses `room`. The list of an op on
// COMPUTE is read when the op is emitted.

static fsdp_op fsdpi_muon_make_op(const fsdpi_muon_opt *o, int kind, int stream, fsdp_buf *src,
                                  fsdp_buf *dst) {
    fsdp_op op;
    fsdp_op_init(&op, o->base.model, NULL, kind, o->label, stream);
    op.what = "muon_step";
    op.src = src, op.dst = dst;
    op.dtype = op.out_dtype = (uint8_t)o->desc.dtype;
    return op;
}

static fsdp_status fsdpi_muon_emit_blocks(const fsdpi_muon_opt *o, fsdp_op op,
                                          const fsdp_block *blocks, int num) {
    op.list = blocks, op.list_count = (uint32_t)num;
    for (int i = 0; i < num; i++) op.count += (uint64_t)(blocks[i].width * blocks[i].height);
    return fsdp_emit(o->base.model, &op);
}

// Emits the first `num` of o->base.updates.
static fsdp_status fsdpi_muon_emit_updates(const fsdpi_muon_opt *o, int num, fsdp_buf *src,
                                           fsdp_buf *dst) {
    return fsdpi_optim_emit_on(o->base.model, o->base.memory, "muon_step", o->base.updates, num,
                               src, dst);
}

static fsdp_update fsdpi_muon_update(int kind, fsdp_dtype dtype, fsdp_dtype grad_dtype, void *param,
                                     void *grad, int64_t count) {
    fsdp_update u;
    memset(&u, 0, sizeof u);
    u.kind = (uint8_t)kind, u.dtype = (uint8_t)dtype, u.grad_dtype = (uint8_t)grad_dtype;
    u.param = param, u.grad = grad, u.count = count;
    return u;
}

// Gets the view of a matrix. Returns 1 if it has a gradient.
static int fsdpi_muon_view(const fsdpi_muon_opt *o, const fsdpi_muon_matrix *m,
                           fsdp_param_view *v) {
    const fsdpi_optim_param *p = &o->base.params[m->param];
    return !fsdp_param_view_get(p->unit, p->index, v) && v->shard_grad;
}

// Returns the address of an element in a buffer of desc.dtype.
static char *fsdpi_muon_at(const fsdpi_muon_opt *o, int buf, int64_t elements) {
    return (char *)fsdp_buf_ptr(o->bufs[buf]) + elements * (int64_t)fsdp_dtype_size(o->desc.dtype);
}

static int fsdpi_muon_whole(const fsdpi_muon_opt *o, const fsdpi_muon_bucket *f) {
    return FSDPI_MUON_WHOLE + (int)(f - o->buckets) % 2;
}

// Emits a release: the next op that writes the buffer waits for the last op on `stream`.
static fsdp_status fsdpi_muon_release(const fsdpi_muon_opt *o, int stream, fsdp_buf *buf) {
    fsdp_op op = fsdpi_muon_make_op(o, FSDP_OP_RELEASE, stream, buf, NULL);
    return fsdp_emit(o->base.model, &op);
}

// Exchanges parts in the shard group. A group of one rank copies its part.
static fsdp_status fsdpi_muon_exchange(const fsdpi_muon_opt *o, const fsdpi_muon_bucket *f,
                                       int from, int64_t begin, int to, int64_t end) {
    const fsdp_block all = {0, 0, f->part, 1, f->part, f->part};
    fsdp_op op = fsdpi_muon_make_op(o, f->comm ? FSDP_OP_ALL_TO_ALL : FSDP_OP_COPY,
                                    f->comm ? FSDP_STREAM_EXTENSION : FSDP_STREAM_COMPUTE,
                                    o->bufs[from], o->bufs[to]);
    op.src_ptr = fsdpi_muon_at(o, from, begin);
    op.dst_ptr = fsdpi_muon_at(o, to, end);
    if (!f->comm) return fsdpi_muon_emit_blocks(o, op, &all, 1);
    op.unit = o->base.params[o->matrices[f->first].param].unit; // so that ranks compare lr here
    op.comm = f->comm, op.group_size = f->shards, op.count = (uint64_t)f->part;
    fsdp_status status = fsdp_emit(o->base.model, &op);
    return status ? status : fsdpi_muon_release(o, FSDP_STREAM_EXTENSION, o->bufs[from]);
}

// Updates the momentum of a bucket, and sends u to the owners. Sets f->is_used.
static fsdp_status fsdpi_muon_send(fsdpi_muon_opt *o, fsdpi_muon_bucket *f) {
    int num = 0;
    f->is_used = 0;
    for (int i = f->first; i < f->first + f->num; i++) {
        const fsdpi_muon_matrix *m = &o->matrices[i];
        fsdp_param_view v = FSDP_ZERO;
        if (!fsdpi_muon_view(o, m, &v)) continue;
        f->is_used = 1;
        if (v.numel == 0) continue;
        fsdp_update *u = &o->base.updates[num++];
        *u = fsdpi_muon_update(FSDP_UPDATE_MOMENTUM, o->desc.dtype, v.grad_dtype,
                               fsdpi_muon_at(o, FSDPI_MUON_U, m->owner * f->part + m->at),
                               v.shard_grad, v.numel);
        u->first = o->base.states[0][0] + (size_t)o->base.params[m->param].state * sizeof(float);
        u->scalars[0] = 1 - o->desc.momentum, u->scalars[1] = o->desc.momentum;
        u->scalars[2] = o->desc.nesterov != 0;
    }
    fsdp_buf *to = o->bufs[FSDPI_MUON_U];
    fsdp_status status = fsdpi_muon_emit_updates(o, num, NULL, to);
    // A rank without rows sends the buffer too: this op makes later writes wait for that.
    fsdp_op none = fsdpi_muon_make_op(o, FSDP_OP_ZERO, FSDP_STREAM_COMPUTE, NULL, to);
    if (!status && num == 0 && f->is_used) status = fsdp_emit(o->base.model, &none);
    if (status || !f->is_used || !o->travels) return status;
    return fsdpi_muon_exchange(o, f, FSDPI_MUON_U, f->replica * f->all.count,
                               fsdpi_muon_whole(o, f), 0);
}

// Sends x of a bucket back to the shards and to the replicas.
static fsdp_status fsdpi_muon_bring(const fsdpi_muon_opt *o, const fsdpi_muon_bucket *f) {
    if (!f->is_used || !o->travels) return FSDP_OK;
    fsdp_status status = fsdpi_muon_exchange(o, f, fsdpi_muon_whole(o, f), 0, FSDPI_MUON_X,
                                             f->replica * f->all.count);
    if (status || !f->replicas_comm) return status;
    fsdp_op op = fsdpi_muon_make_op(o, FSDP_OP_ALL_GATHER, FSDP_STREAM_EXTENSION,
                                    o->bufs[FSDPI_MUON_X], o->bufs[FSDPI_MUON_X]);
    op.unit = o->base.params[o->matrices[f->first].param].unit; // so that ranks compare lr here
    op.comm = f->replicas_comm, op.group_size = f->replicas, op.in_place = 1;
    op.list = &f->all, op.list_count = 1;
    op.count = (uint64_t)f->all.count;
    return fsdp_emit(o->base.model, &op);
}

// Updates the parameters of a bucket.
static fsdp_status fsdpi_muon_apply(fsdpi_muon_opt *o, const fsdpi_muon_bucket *f) {
    const int adamw = o->desc.adjust == FSDP_MUON_MATCH_RMS_ADAMW;
    fsdp_buf *x = o->bufs[FSDPI_MUON_X];
    int num = 0;
    for (int i = f->first; i < f->first + f->num; i++) {
        const fsdpi_muon_matrix *m = &o->matrices[i];
        fsdp_param_view v = FSDP_ZERO;
        if (!fsdpi_muon_view(o, m, &v) || v.numel == 0) continue;
        fsdp_update *u = &o->base.updates[num++];
        *u = fsdpi_muon_update(FSDP_UPDATE_MUON, v.dtype, o->desc.dtype, v.shard,
                               fsdpi_muon_at(o, FSDPI_MUON_X, m->owner * f->part + m->at), v.numel);
        fsdpi_muon_prepare(u->scalars, o->lr, &o->base.groups[o->base.params[m->param].group],
                           (double)(adamw ? m->rows * m->columns / m->side : m->rows),
                           (double)(adamw ? 1 : m->columns), o->desc.adjust == FSDP_MUON_ORIGINAL,
                           adamw ? 0.2 : 1);
    }
    fsdp_status status = fsdpi_muon_emit_updates(o, num, x, NULL);
    return status ? status : fsdpi_muon_release(o, FSDP_STREAM_COMPUTE, x);
}

// Computes s = x x'; for a tall x: s = x' x.
static fsdp_status fsdpi_muon_square(const fsdp_op *op, void *stream) {
    const fsdpi_muon_opt *o = (const fsdpi_muon_opt *)op->list;
    const int64_t n = o->now->side, c = o->now->columns, rows = o->now->rows;
    const int tall = rows > c;
    return o->desc.gemm(o->desc.gemm_user, stream, n, n, tall ? rows : c, 1, o->x, c, tall, o->x, c,
                        !tall, 0, o->s, n, o->dtype);
}

// Computes t = b t + c s s', then y = a y + t x; for tall x: y = a y + x t. Requires t = s, y = x.
static fsdp_status fsdpi_muon_polynomial(const fsdp_op *op, void *stream) {
    const fsdpi_muon_opt *o = (const fsdpi_muon_opt *)op->list;
    const fsdp_muon_desc *d = &o->desc;
    const int64_t n = o->now->side, c = o->now->columns, rows = o->now->rows;
    const int tall = rows > c;
    fsdp_status status = d->gemm(d->gemm_user, stream, n, n, n, (float)d->c, o->s, n, 0, o->s, n, 1,
                                 (float)d->b, o->t, n, o->dtype);
    if (status) return status;
    return d->gemm(d->gemm_user, stream, rows, c, n, 1, tall ? o->x : o->t, tall ? c : n, 0,
                   tall ? o->t : o->x, c, 0, (float)d->a, o->y, c, o->dtype);
}

static fsdp_status fsdpi_muon_call(const fsdpi_muon_opt *o,
                                   fsdp_status (*call)(const fsdp_op *, void *)) {
    fsdp_op op = fsdpi_muon_make_op(o, FSDP_OP_CALL, FSDP_STREAM_COMPUTE, NULL, NULL);
    op.call = call, op.list = o, op.list_count = 1;
    return fsdp_emit(o->base.model, &op);
}

// Computes x = x * (1 / max(norm(x), eps)).
static fsdp_status fsdpi_muon_normalize(const fsdpi_muon_opt *o, int64_t count) {
    const fsdp_block all = {0, 0, count, 1, count, count};
    fsdp_update *u = o->base.updates;
    fsdp_op op = fsdpi_muon_make_op(o, FSDP_OP_NORM, FSDP_STREAM_COMPUTE, NULL, NULL);
    *u = fsdpi_muon_update(FSDP_UPDATE_UNSCALE, o->dtype, o->dtype, NULL, o->x, count);
    u->first = o->room;
    u->scalars[0] = o->desc.eps;
    op.dtype = (uint8_t)o->dtype, op.out_dtype = FSDP_F64, op.norm_type = 2;
    op.src_ptr = o->x, op.dst_ptr = o->room;
    fsdp_status status = fsdpi_muon_emit_blocks(o, op, &all, 1);
    return status ? status : fsdpi_muon_emit_updates(o, 1, NULL, NULL);
}

// Runs an iteration of Newton-Schulz. The next x is in y: exchanges the two addresses.
static fsdp_status fsdpi_muon_iterate(fsdpi_muon_opt *o, int64_t numel, int64_t square) {
    const int64_t element = (int64_t)fsdp_dtype_size(o->dtype);
    const fsdp_block both[] = {
        {(o->x - o->room) / element, (o->y - o->room) / element, numel, 1, numel, numel},
        {(o->s - o->room) / element, (o->t - o->room) / element, square, 1, square, square}};
    fsdp_op op = fsdpi_muon_make_op(o, FSDP_OP_COPY, FSDP_STREAM_COMPUTE, NULL, NULL);
    op.dtype = op.out_dtype = (uint8_t)o->dtype;
    op.src_ptr = op.dst_ptr = o->room;
    fsdp_status status = fsdpi_muon_call(o, fsdpi_muon_square);
    if (!status) status = fsdpi_muon_emit_blocks(o, op, both, 2);
    if (!status) status = fsdpi_muon_call(o, fsdpi_muon_polynomial);
    char *next = o->y;
    o->y = o->x, o->x = next;
    return status;
}

// Copies the rows of all ranks to x, one below the other, or back.
static fsdp_status fsdpi_muon_pieces(const fsdpi_muon_opt *o, const fsdpi_muon_bucket *f,
                                     const fsdpi_muon_matrix *m, int back) {
    fsdp_buf *whole = o->bufs[fsdpi_muon_whole(o, f)];
    fsdp_op op = fsdpi_muon_make_op(o, FSDP_OP_COPY, FSDP_STREAM_COMPUTE, back ? NULL : whole,
                                    back ? whole : NULL);
    int64_t begin = m->at;
    int num = 0;
    for (int k = 0; k < f->shards; k++, begin += f->part) {
        fsdp_range r = {0, m->dim, 0};
        (void)fsdp_shard_range(m->dim, f->shards, k, &r);
        const int64_t width = r.count * m->inner, at = r.start * m->inner;
        const fsdp_block there = {begin, at, width, m->outer, width, m->dim * m->inner},
                         again = {at, begin, width, m->outer, m->dim * m->inner, width};
        if (r.count) o->blocks[num++] = back ? again : there;
    }
    if (back) op.src_ptr = o->x, op.dtype = (uint8_t)o->dtype;
    else op.dst_ptr = o->x, op.out_dtype = (uint8_t)o->dtype;
    return fsdpi_muon_emit_blocks(o, op, o->blocks, num);
}

// Computes those matrices of a bucket that this rank owns.
static fsdp_status fsdpi_muon_compute(fsdpi_muon_opt *o, const fsdpi_muon_bucket *f) {
    fsdp_status status = FSDP_OK;
    for (int i = f->first; i < f->first + f->num && !status; i++) {
        const fsdpi_muon_matrix *m = o->now = &o->matrices[i];
        fsdp_param_view v = FSDP_ZERO;
        if (m->owner != f->me || !fsdpi_muon_view(o, m, &v)) continue;
        status = fsdpi_muon_pieces(o, f, m, 0);
        if (!status) status = fsdpi_muon_normalize(o, m->rows * m->columns);
        for (int step = 0; step < o->desc.ns_steps && !status; step++)
            status = fsdpi_muon_iterate(o, m->rows * m->columns, m->side * m->side);
        if (!status) status = fsdpi_muon_pieces(o, f, m, 1);
    }
    return status;
}

static fsdp_status fsdpi_muon_step(fsdp_optim *base, double lr) {
    static const char *const name = "muon_step";
    fsdpi_muon_opt *muon = (fsdpi_muon_opt *)(void *)base;
    fsdp_status status = fsdpi_optim_begin(&muon->base, lr, name);
    if (!status) status = fsdpi_muon_apply_layout(muon, name);
    if (!status) status = fsdp_agree(muon->base.model, &lr, sizeof lr);
    // While a bucket is computed, the next one travels to the owners, and the last one back.
    const int lag = muon->travels, num = status ? 0 : muon->num_buckets;
    int used = 0;
    muon->lr = lr;
    for (int i = 0; i < num + 2 * lag && !status; i++) {
        const int at = i - lag, computes = at >= 0 && at < num;
        if (i < num) status = fsdpi_muon_send(muon, &muon->buckets[i]);
        if (!status && computes) status = fsdpi_muon_compute(muon, &muon->buckets[at]);
        if (!status && at >= lag) status = fsdpi_muon_apply(muon, &muon->buckets[at - lag]);
        if (!status && computes) status = fsdpi_muon_bring(muon, &muon->buckets[at]);
        if (computes) used |= muon->buckets[at].is_used;
    }
    if (!status && num && !used) fsdpi_optim_tell(&muon->base, name);
    return status ? status : fsdp_params_changed(muon->base.model);
}

/* -------------------------------------------------------------------------------------------- */

static void fsdpi_muon_free(void *user) {
    fsdpi_muon_free_buffers((fsdpi_muon_opt *)user);
    fsdpi_optim_free(user);
}

FSDP_API fsdp_muon_desc fsdp_muon_defaults(void) {
    fsdp_muon_desc d = FSDP_ZERO;
    d.weight_decay = 0.1, d.momentum = 0.95, d.eps = 1e-7;
    d.a = 3.4445, d.b = -4.7750, d.c = 2.0315;
    d.ns_steps = 5, d.nesterov = 1, d.dtype = FSDP_F32;
    d.bucket_bytes = 64 << 20;
    d.magic = FSDPI_OPTIM_MAGIC;
    fsdpi_optim_no_groups(d.groups);
    return d;
}

enum { FSDPI_MUON_RANGES = 10 };

// Checks that the settings are in their ranges and that this world can run them. Commits the model.
// given: out: the settings that ranks compare.
static fsdp_status fsdpi_muon_settings(fsdp_model *model, fsdp_optim *o, const fsdp_muon_desc *d,
                                       double *given) {
    const fsdpi_optim_range ranges[FSDPI_MUON_RANGES] = {
        {"desc.weight_decay", d->weight_decay, 0, FSDPI_OPTIM_FINITE},
        {"desc.momentum", d->momentum, 0, 1},
        {"desc.eps", d->eps, 1e-30, FSDPI_OPTIM_FINITE}, // 1/eps, as a, b and c, is a number of f32
        {"desc.a", d->a, -1e30, 1e30},
        {"desc.b", d->b, -1e30, 1e30},
        {"desc.c", d->c, -1e30, 1e30},
        {"desc.ns_steps", (double)d->ns_steps, 1, 100},
        {"desc.adjust", (double)d->adjust, FSDP_MUON_ORIGINAL, FSDP_MUON_SPECTRAL + 1},
        {"desc.replicas", (double)d->replicas, FSDP_MUON_BY_BYTES, FSDP_MUON_A_PART_EACH + 1},
        {"desc.bucket_bytes", (double)d->bucket_bytes, 1, FSDPI_OPTIM_FINITE}};
    fsdp_world *w = fsdp_model_world(model);
    const char *why = NULL;
    int memory = FSDP_MEMORY_HOST;
    fsdp_status status = fsdpi_optim_begun(o, w, d->magic);
    if (!status) status = fsdpi_optim_ranges(w, o->name, ranges, FSDPI_MUON_RANGES);
    if (!status && d->dtype != FSDP_F32 && d->dtype != FSDP_BF16)
        status = fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                           "[E9014] %s: desc.dtype is %s, expected f32 or bf16", o->name,
                           fsdp_dtype_name(d->dtype));
    if (!status) status = fsdpi_optim_groups(o, w, d->num_groups, d->groups, d->weight_decay);
    if (!status) status = fsdp_update_place(model, o->name, &memory);
    if (status) return status;
    if (fsdp_world_size(w) > 1 && !fsdp_world_has(w, FSDP_OP_ALL_TO_ALL))
        why = "the backend has no all_to_all";
    if (memory == FSDP_MEMORY_HOST && fsdp_model_run_mode(model) == FSDP_RUN_STREAMS)
        why = "the shards are in host memory, and matrices travel in the device's: do not set "
              "cpu_offload";
    if (memory == FSDP_MEMORY_DEVICE && (!d->gemm || d->gemm == fsdp_host_gemm))
        why = "the shards are on a device, and desc.gemm is NULL or the host's: include "
              "backends/fsdp_cuda_gemm.h, and set desc.gemm to fsdp_cuda_gemm";
    if (why) return fsdp_fail(w, FSDP_ERR_UNSUPPORTED, "[E9015] %s: %s", o->name, why);
    for (int i = 0; i < FSDPI_MUON_RANGES; i++) given[i] = ranges[i].value;
    given[FSDPI_MUON_RANGES] = 2. * (double)d->dtype + (d->nesterov != 0);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_muon_create(fsdp_model *model, const fsdp_muon_desc *desc,
                                      fsdp_muon **muon) {
    static const char *const name = "muon_create";
    fsdp_muon_desc d, defaults = fsdp_muon_defaults();
    fsdp_optim settings, *base = NULL;
    double given[FSDPI_MUON_RANGES + 1];
    if (!model || !muon) return fsdp_fail_null(fsdp_model_world(model), name, "model or muon");
    *muon = NULL;
    fsdp_world *w = fsdp_model_world(model);
    const int64_t params = fsdp_num_params(model), ranks = fsdp_world_size(w);
    fsdp_status status = fsdp_desc_read(w, &d, desc ? desc : &defaults, sizeof d, "fsdp_muon_desc");
    memset(&settings, 0, sizeof settings);
    settings.name = name;
    settings.extension.name = "muon";
    settings.extension.destroy = fsdpi_muon_free;
    settings.mark = FSDP_UPDATES_MATRIX;
    settings.step = fsdpi_muon_step;
    settings.state_names[0] = "momentum_buffer";
    settings.num_states = 1;
    if (!status) status = fsdpi_muon_settings(model, &settings, &d, given);
    // The struct, and its tables behind it.
    const int64_t size = (int64_t)sizeof(fsdpi_muon_opt) +
                         params * (int64_t)(sizeof(fsdpi_muon_matrix) + sizeof(fsdpi_muon_bucket)) +
                         ranks * (int64_t)(sizeof(fsdp_block) + 2 * sizeof(int64_t));
    if (!status) status = fsdpi_optim_create(model, &settings, size, fsdpi_muon_group, &d, &base);
    if (status) return status;
    fsdpi_muon_opt *o = (fsdpi_muon_opt *)(void *)base;
    o->matrices = (fsdpi_muon_matrix *)(void *)(o + 1);
    o->buckets = (fsdpi_muon_bucket *)(void *)(o->matrices + params);
    o->blocks = (fsdp_block *)(void *)(o->buckets + params);
    o->loads = (int64_t *)(void *)(o->blocks + ranks);
    o->desc = d;
    if (!d.gemm) o->desc.gemm = fsdp_host_gemm;
    o->dtype = o->desc.gemm == fsdp_host_gemm ? FSDP_F32 : d.dtype;
    o->base.user = &o->desc;
    o->label = fsdp_label_register(model, "muon"); // now, as ranks compare it
    status = o->label < 0 ? FSDP_ERR_INVALID_ARG : fsdpi_muon_apply_layout(o, name);
    // Last, when nothing fails any more: a rank that had no memory and calls again agrees once.
    if (!status) status = fsdpi_optim_agree(base, given, sizeof given);
    if (status) fsdp_optim_destroy(base);
    else *muon = base;
    return status;
}

FSDP_API int fsdp_muon_takes(const fsdp_muon *muon, const fsdp_param_view *param) {
    const fsdpi_muon_opt *o = (const fsdpi_muon_opt *)(const void *)muon;
    return o && param && fsdpi_muon_group((void *)(uintptr_t)&o->desc, param) >= 0;
}

FSDP_API size_t fsdp_muon_describe(const fsdp_muon *opt, char *text, size_t cap) {
    const fsdpi_muon_opt *muon = (const fsdpi_muon_opt *)(const void *)opt;
    int64_t elements = 0;
    int mine = 0, parts = 0;
    for (int i = 0; muon && i < muon->num_buckets; i++) {
        const fsdpi_muon_bucket *f = &muon->buckets[i];
        elements += 2 * (f->shards - 1) * f->part + (f->replicas - 1) * f->all.count;
        parts |= f->replicas > 1;
        for (int k = 0; k < f->num; k++) mine += muon->matrices[f->first + k].owner == f->me;
    }
    if (muon) elements *= (int64_t)fsdp_dtype_size(muon->desc.dtype);
    const int length = snprintf(
        text, cap,
        "muon: %d matrices, of which this rank computes %d; %d buckets; receives %lld bytes in a "
        "step; each replica computes %s; %lld bytes of memory",
        muon ? muon->num : 0, mine, muon ? muon->num_buckets : 0, (long long)elements,
        parts ? "a part" : "all", (long long)fsdp_optim_nbytes(opt));
    return length > 0 ? (size_t)length : 0;
}

#endif // FSDPI_OPTIM_MUON_H
