/* fsdp_muon.h - Muon, an optimizer of whole matrices, on shards: an extension of fsdp.h

   Muon makes the momentum of a matrix orthogonal by products of matrices (Newton-Schulz). Each
   matrix is computed whole by one rank, its owner: the products are shared out among the ranks, and
   parameters have the same bits on any number of ranks. Results are those of torch.optim.Muon.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_muon.h"               // includes fsdp_optim.h; link with -lm

       static int others(void *user, const fsdp_param_view *p) { // what AdamW has
           return fsdp_muon_takes((fsdp_muon *)user, p) ? -1 : 0;
       }
       fsdp_muon_create(model, NULL, &muon);                   // after the last fsdp_fully_shard
       fsdp_adamw_desc desc = fsdp_adamw_defaults();
       desc.group = others, desc.user = muon;
       fsdp_adamw_create(model, &desc, &adamw);
       for (;;) {
           ...                                                 // forward, backward
           if (fsdp_finalize_backward(model)) break;
           if (fsdp_muon_step(muon, 0.02) || fsdp_adamw_step(adamw, 3e-4)) break;
           fsdp_zero_grad(model);
       }                                                       // fsdp_shutdown frees both

   SPDX-License-Identifier: MIT (full text in fsdp.h)

   ARITHMETIC
     Of a matrix p [R, C] with gradient g and momentum buffer b, which begins with zeros:
         b = b + (g - b)*(1 - momentum)
         u = g + (b - g)*momentum                       without nesterov: u = b
         x = u * (1 / max(norm(u), eps))                Frobenius norm, summed in f64
         ns_steps times: s = x x'; x = a*x + (b*s + c*s*s) x            of x', if R > C
         p = p*(1 - lr*weight_decay) - lr*ratio*x
     ratio is sqrt(max(1, R/C)), 0.2*sqrt(max(R, C)) or sqrt(R/C), by `adjust`. All is in f32, each
     operation rounded; the default product adds up with FMA where the processor has it, in an order
     that depends on the shape alone. So bits depend neither on the number of ranks nor on the
     compiler; they depend on whether processors have FMA, and on a `gemm` of yours.
   DTYPES
     f32, bf16 and f16 parameters; momentum in f32. f64 parameters are refused. If desc.dtype is
     BF16, u and x travel as bf16: half of the bytes, and x off by 2^-9 of itself at most. The
     products are then of bf16, too, if there is a `gemm`; the default one is of f32.
   WHICH PARAMETERS
     desc.take chooses them, and may say of how many columns; else rows are the first dim. With
     `flatten` parameters of more than two dims are rows x the rest. Embeddings and heads, which
     have two dims, too, are better left to AdamW. Units of which tensor parallelism cuts the
     parameters are refused.
   OWNERS AND FLIGHTS
     Ranks choose the owners alike, without a message: the matrix that costs most first, to the
     owner that has least. Owners are the ranks of the shard group; with replicas (HSDP, DDP) those
     of all replicas, which then exchange results (desc.replicas).
     Matrices travel in flights, in the order of backward: u to the owners by one all_to_all, x back
     by another one, on the stream EXTENSION. While a flight is computed on COMPUTE, the next one
     travels there and the last one back. A step begins when all gradients are reduced. In the
     all_to_all each pair of ranks sends as much as the pair that sends most, with each shard as
     large as the largest one: a flight of W equal matrices, whose rows W divides, has no padding.
   UPDATED PARAMETERS, FREEZE AND THAW, CHECKPOINTS
     As for AdamW (fsdp_optim.h). The state is "momentum_buffer", as in PyTorch.
   HOST OR DEVICE
     On the host the library has a product. On a device give desc.gemm:
     backends/fsdp_cuda_gemm.h has one for cuBLAS. cpu_offload on a device is refused.
   MEMORY, to the byte; W ranks shard a matrix, V replicas exchange results
     For each element of this rank's rows 4 bytes, the momentum, and tables, as AdamW. All else is
     the same on all ranks. In the pool "muon" on several ranks 2 W N + 2 V W N elements of
     desc.dtype, where N is the most that a pair of ranks sends in a flight; if nothing travels N.
     For products 2 R C elements of the largest matrix and 2 min(R, C)^2 of the one with the
     largest, each rounded up to 64 bytes, 64 bytes, and for fsdp_host_gemm FSDP_HOST_GEMM_BYTES. A
     step allocates nothing, except the first one after a freeze or thaw. */
#include "fsdp_optim.h"
#include "backends/fsdp_host_gemm.h"

#ifndef FSDP_MUON_H
#define FSDP_MUON_H
#ifndef FSDP_MATH_ONLY

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_muon fsdp_muon;

enum { FSDP_MUON_ORIGINAL = 0, FSDP_MUON_MATCH_RMS_ADAMW, FSDP_MUON_SPECTRAL }; // adjust

// What replicas do: all matrices each, or a part each, of which the results are gathered. BY_BYTES:
// what sends less; if both send the same, a part each.
enum { FSDP_MUON_BY_BYTES = 0, FSDP_MUON_ALL_EACH, FSDP_MUON_A_PART_EACH };

// 1: Muon takes this parameter; 0: it does not; n > 1: it does, as a matrix of n columns, whatever
// its dims. It must return the same on all ranks and in each call.
typedef int (*fsdp_muon_take_fn)(void *user, const fsdp_param_view *param);

typedef struct fsdp_muon_desc {
    uint32_t size, start_canary;
    double weight_decay;  // default 0.1;  >= 0
    double momentum;      // default 0.95; 0 <= momentum < 1
    double eps;           // default 1e-7; >= 1e-30
    double a, b, c;       // defaults 3.4445, -4.7750, 2.0315: finite
    int32_t ns_steps;     // default 5; 1..99
    int32_t nesterov;     // default 1
    int32_t adjust;       // default FSDP_MUON_ORIGINAL
    int32_t flatten;      // 1: takes parameters of more than two dims, as rows x the rest
    int32_t replicas;     // default FSDP_MUON_BY_BYTES
    fsdp_dtype dtype;     // of u and x: default FSDP_F32; FSDP_BF16
    int64_t flight_bytes; // default 64 MiB; >= 1: of whole matrices of an owner, but at least one
    int32_t num_groups;   // 0: no groups; at most FSDP_OPTIM_GROUPS
    int32_t reserved;
    fsdp_optim_group groups[FSDP_OPTIM_GROUPS];
    fsdp_optim_group_fn group; // NULL: all matrices are in group 0
    fsdp_muon_take_fn take;    // NULL: all of two dims; with flatten of two or more
    void *user;                // argument of group and take
    fsdp_gemm_fn gemm;         // NULL: fsdp_host_gemm. A failure of it ends the world
    void *gemm_user;           // argument of gemm
    uint32_t magic, reserved2; // magic: fsdp_muon_defaults sets it. Leave it as it is
    uint64_t end_canary;
} fsdp_muon_desc;

/* fsdp_muon_defaults - a desc with the defaults
   Result      those of torch.optim.Muon; no groups      Thread any      Source torch.optim.Muon */
FSDP_API fsdp_muon_desc fsdp_muon_defaults(void);

/* fsdp_muon_create - a Muon optimizer of a model's matrices; commits the model
   desc        NULL: the defaults
   muon        the model owns it: it ends with fsdp_muon_destroy, the model or the world. NULL after
               a failure
   Result      FSDP_OK; INVALID_ARG (the text names the field, or the parameter), UNSUPPORTED (a
               unit that tensor parallelism cuts; a device without desc.gemm; cpu_offload on a
               device; the backend has no all_to_all), OUT_OF_MEMORY, errors of commit
   Collective  as fsdp_model_commit, and over the world: groups are made for the stream EXTENSION.
               If ranks give other descs, or take other matrices, the next collective is a MISMATCH
   Blocks      while groups are made      Allocates yes      Source torch: torch.optim.Muon */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_muon_create(fsdp_model *model, const fsdp_muon_desc *desc,
                                                      fsdp_muon **muon);

/* fsdp_muon_step - update every matrix that has a gradient; ends with fsdp_params_changed
   lr          this step's learning rate, finite, >= 0. The group's lr_scale multiplies it. If ranks
               give different ones, this step's first collective is a MISMATCH; if it has none, the
               next one of a unit
   Result      FSDP_OK; as fsdp_adamw_step; collective errors, after which the world has ended. If
               one rank has no memory, the others wait for it until their time is over
   Collective  yes: every rank of the mesh; after a freeze or thaw as fsdp_muon_create
   Blocks      inline and with lanes: for the ranks that send, at most timeout_ms; on streams: no
   Allocates   no; the first step after a freeze or thaw does      Source torch: Muon.step */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_muon_step(fsdp_muon *muon, double lr);

/* fsdp_muon_set_group - as fsdp_adamw_set_group
   Result      as there      Collective as there */
FSDP_API fsdp_status fsdp_muon_set_group(fsdp_muon *muon, int k, const fsdp_optim_group *group);

/* fsdp_muon_takes    - 1 if Muon takes this parameter, whether it is frozen or not. NULL: 0
   fsdp_muon_nbytes   - host and device memory of the optimizer in bytes; 0: NULL
   fsdp_muon_describe - as text: matrices, how many of them this rank computes, flights, bytes that
               it receives in a step, what replicas do. Writes at most cap bytes with the end, and
               returns the length of the whole text, as snprintf */
FSDP_API int fsdp_muon_takes(const fsdp_muon *muon, const fsdp_param_view *param);
FSDP_API int64_t fsdp_muon_nbytes(const fsdp_muon *muon);
FSDP_API size_t fsdp_muon_describe(const fsdp_muon *muon, char *text, size_t cap);

/* fsdp_muon_destroy - free an optimizer before its model ends; NULL is allowed. First end the
               optimizers whose groups ask fsdp_muon_takes
   Collective  yes: every rank of the mesh      Blocks for operations under way */
FSDP_API void fsdp_muon_destroy(fsdp_muon *muon);

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_MUON_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_MUON_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_MUON_IMPLEMENTED

#include "muon/flights.h"

#include <math.h>   // fabs, HUGE_VAL
#include <stdio.h>  // snprintf
#include <string.h> // memset

#if defined(__clang__)
#pragma float_control(precise, on, push)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("no-fast-math", "fp-contract=off")
#endif

/* -------------------------------------------------------------------------------------------- */
// >>muon
// Owns: the buffers of flights.

static int64_t fsdpi_muon_align(int64_t nbytes) { return (nbytes + 63) / 64 * 64; }

static void fsdpi_muon_free_buffers(fsdp_muon *o) {
    fsdp_model *m = o->base.model;
    fsdp_buf **all[] = {&o->u, &o->x, &o->whole[0], &o->whole[1]};
    for (int i = 0; i < 4; i++) {
        fsdp_buf_destroy(m, *all[i]);
        *all[i] = NULL;
    }
    fsdp_free(m, o->base.memory, o->room, o->room_bytes);
    o->room = NULL;
    o->room_bytes = 0;
}

static fsdp_status fsdpi_muon_buffers(fsdp_muon *o) {
    fsdp_model *m = o->base.model;
    int64_t size = (int64_t)fsdp_dtype_size(o->desc.dtype), sent = 0, got = 0;
    int64_t element = (int64_t)fsdp_dtype_size(o->dtype);
    fsdp_buf **all[] = {&o->whole[0], &o->whole[1], &o->u, &o->x};
    fsdp_status status = FSDP_OK;
    o->most = o->square = 0;
    for (int i = 0; i < o->num; i++) {
        const fsdpi_muon_matrix *a = &o->matrices[i];
        int64_t least = fsdpi_muon_least(a->rows, a->columns);
        if (a->rows * a->columns > o->most) o->most = a->rows * a->columns;
        if (least * least > o->square) o->square = least * least;
    }
    for (int i = 0; i < o->num_flights; i++) {
        const fsdpi_muon_flight *f = &o->flights[i];
        if (f->all.count > sent) sent = f->all.count;
        if (f->all.count * f->replicas > got) got = f->all.count * f->replicas;
    }
    for (int i = o->travels ? 0 : 2; i < (o->travels ? 4 : 3) && sent && !status; i++)
        status = fsdp_buf_create(m, o->pool, FSDP_MEMORY_DEVICE, (i < 2 ? sent : got) * size,
                                 all[i]);
    o->room_bytes = 64 + 2 * fsdpi_muon_align(o->most * element) +
                    2 * fsdpi_muon_align(o->square * element) +
                    (o->desc.gemm == fsdp_host_gemm ? FSDP_HOST_GEMM_BYTES : 0);
    if (sent && !status)
        status = fsdp_alloc(m, o->base.memory, o->room_bytes, "muon: no memory for products",
                            &o->room);
    if (!o->room) o->room_bytes = 0;
    if (o->desc.gemm == fsdp_host_gemm && o->room)
        o->desc.gemm_user = (char *)o->room + o->room_bytes - FSDP_HOST_GEMM_BYTES;
    return status;
}

// Follows the model's layout: the optimizer's table, owners, flights and buffers.
static fsdp_status fsdpi_muon_follow(fsdp_muon *o, const char *what) {
    fsdp_status status = fsdpi_optim_follow(&o->base, what);
    if (status || o->laid == o->base.laid) return status;
    fsdpi_muon_free_buffers(o);
    int64_t before = fsdpi_optim_host_bytes(o->base.model);
    status = fsdpi_muon_plan(o, what);
    if (!status) status = fsdpi_muon_buffers(o);
    o->host_bytes = fsdpi_optim_host_bytes(o->base.model) - before;
    for (int i = 0; i < o->num && !status; i++) {
        const fsdpi_muon_matrix *m = &o->matrices[i];
        const int64_t given[] = {m->ordinal, m->owner, m->at, m->columns};
        status = fsdp_agree(o->base.model, given, sizeof given);
    }
    if (!status) o->laid = o->base.laid;
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// >>muon step
// Owns: the records of a step. Invariants: those that read or write u, x or `whole` name these
// buffers, so that COMPUTE and EXTENSION wait for each other; `room` is COMPUTE's alone. Lists of
// records on COMPUTE are read when they are emitted.

static fsdp_op fsdpi_muon_record(const fsdp_muon *o, int kind, int stream, fsdp_buf *src,
                                 fsdp_buf *dst) {
    fsdp_op op;
    fsdp_op_init(&op, o->base.model, NULL, kind, o->label, stream);
    op.what = "muon_step";
    op.src = src, op.dst = dst;
    op.dtype = op.out_dtype = (uint8_t)o->desc.dtype;
    return op;
}

static fsdp_status fsdpi_muon_copy(const fsdp_muon *o, fsdp_op op, const fsdp_block *blocks,
                                   int num) {
    op.list = blocks, op.list_count = (uint32_t)num;
    for (int i = 0; i < num; i++) op.count += (uint64_t)(blocks[i].width * blocks[i].height);
    return fsdp_emit(o->base.model, &op);
}

// View of a matrix. Returns whether it has a gradient.
static int fsdpi_muon_view(const fsdp_muon *o, const fsdpi_muon_matrix *m, fsdp_param_view *v) {
    const fsdpi_optim_param *p = &o->base.params[m->param];
    return !fsdp_param_view_get(p->unit, p->index, v) && v->shard_grad;
}

static int64_t fsdpi_muon_place(const fsdpi_muon_flight *f, const fsdpi_muon_matrix *m) {
    return m->owner * f->part + m->at;
}

static fsdp_buf *fsdpi_muon_whole(const fsdp_muon *o, const fsdpi_muon_flight *f) {
    return o->travels ? o->whole[(f - o->flights) % 2] : o->u;
}

// A record on `stream` has read the buffer: what writes it next waits for that.
static fsdp_status fsdpi_muon_release(const fsdp_muon *o, int stream, fsdp_buf *buf) {
    fsdp_op op = fsdpi_muon_record(o, FSDP_OP_RELEASE, stream, buf, NULL);
    return fsdp_emit(o->base.model, &op);
}

// Exchanges the parts of the shard group; a group of one rank copies its own.
static fsdp_status fsdpi_muon_exchange(const fsdp_muon *o, const fsdpi_muon_flight *f,
                                       fsdp_buf *from, int64_t begin, fsdp_buf *to, int64_t end) {
    const fsdp_block all = {0, 0, f->part, 1, f->part, f->part};
    fsdp_op op = fsdpi_muon_record(o, f->comm ? FSDP_OP_ALL_TO_ALL : FSDP_OP_COPY,
                                   f->comm ? FSDP_STREAM_EXTENSION : FSDP_STREAM_COMPUTE, from, to);
    op.src_ptr = fsdpi_muon_part(o, from, begin);
    op.dst_ptr = fsdpi_muon_part(o, to, end);
    if (!f->comm) return fsdpi_muon_copy(o, op, &all, 1);
    op.comm = f->comm, op.group_size = f->shards, op.count = (uint64_t)f->part;
    op.unit = o->base.params[o->matrices[f->first].param].unit; // so that ranks compare lr here
    fsdp_status status = fsdp_emit(o->base.model, &op);
    return status ? status : fsdpi_muon_release(o, FSDP_STREAM_EXTENSION, from);
}

// Updates the momentum of a flight, and sends u to the owners. Sets whether there is a gradient.
static fsdp_status fsdpi_muon_send(fsdp_muon *o, fsdpi_muon_flight *f) {
    int num = 0;
    f->is_used = 0;
    for (int i = f->first; i < f->first + f->num; i++) {
        const fsdpi_muon_matrix *m = &o->matrices[i];
        fsdpi_optim_param *p = &o->base.params[m->param];
        fsdp_param_view v = FSDP_ZERO;
        if (!fsdpi_muon_view(o, m, &v)) continue;
        p->step++;
        f->is_used = 1;
        if (v.numel == 0) continue;
        fsdp_update *u = &o->base.updates[num++];
        memset(u, 0, sizeof *u);
        u->kind = FSDP_UPDATE_MOMENTUM;
        u->dtype = (uint8_t)o->desc.dtype, u->grad_dtype = (uint8_t)v.grad_dtype;
        u->count = v.numel;
        u->grad = v.shard_grad;
        u->first = o->base.states[0][0] + (size_t)p->state * sizeof(float);
        u->param = fsdpi_muon_part(o, o->u, fsdpi_muon_place(f, m));
        u->scalars[0] = 1 - o->desc.momentum, u->scalars[1] = o->desc.momentum;
        u->scalars[2] = o->desc.nesterov != 0;
    }
    fsdp_status status = fsdpi_optim_emit_on(o->base.model, o->base.memory, "muon_step",
                                             o->base.updates, num, NULL, o->u);
    // Without rows here it is sent all the same: a write after that has to know of this one.
    fsdp_op none = fsdpi_muon_record(o, FSDP_OP_ZERO, FSDP_STREAM_COMPUTE, NULL, o->u);
    if (!status && num == 0 && f->is_used) status = fsdp_emit(o->base.model, &none);
    if (status || !f->is_used || !o->travels) return status;
    return fsdpi_muon_exchange(o, f, o->u, f->replica * f->all.count, fsdpi_muon_whole(o, f), 0);
}

// Brings x of a flight back to the shards, and to the replicas.
static fsdp_status fsdpi_muon_bring(const fsdp_muon *o, const fsdpi_muon_flight *f) {
    if (!f->is_used || !o->travels) return FSDP_OK;
    fsdp_status status = fsdpi_muon_exchange(o, f, fsdpi_muon_whole(o, f), 0, o->x,
                                             f->replica * f->all.count);
    if (status || !f->replicas_comm) return status;
    fsdp_op op = fsdpi_muon_record(o, FSDP_OP_ALL_GATHER, FSDP_STREAM_EXTENSION, o->x, o->x);
    op.unit = o->base.params[o->matrices[f->first].param].unit; // so that ranks compare lr here
    op.comm = f->replicas_comm, op.group_size = f->replicas, op.in_place = 1;
    op.list = &f->all, op.list_count = 1;
    op.count = (uint64_t)f->all.count;
    return fsdp_emit(o->base.model, &op);
}

// Updates the parameters of a flight.
static fsdp_status fsdpi_muon_apply(fsdp_muon *o, const fsdpi_muon_flight *f, double lr) {
    fsdp_buf *x = o->travels ? o->x : o->u;
    int num = 0;
    for (int i = f->first; i < f->first + f->num && f->is_used; i++) {
        const fsdpi_muon_matrix *m = &o->matrices[i];
        const fsdpi_optim_param *p = &o->base.params[m->param];
        const fsdp_optim_group *g = &o->base.groups[p->group];
        double rows = (double)m->rows, columns = (double)m->columns, rate = lr * g->lr_scale;
        double ratio = o->desc.adjust == FSDP_MUON_MATCH_RMS_ADAMW
                           ? (rows > columns ? rows : columns)
                           : rows / columns;
        volatile double decay = rate * g->weight_decay; // rounded before it is subtracted
        fsdp_param_view v = FSDP_ZERO;
        if (!fsdpi_muon_view(o, m, &v) || v.numel == 0) continue;
        if (o->desc.adjust == FSDP_MUON_ORIGINAL && ratio < 1) ratio = 1;
        fsdpi_sqrt(1, &ratio, &ratio, 1);
        if (o->desc.adjust == FSDP_MUON_MATCH_RMS_ADAMW) ratio *= 0.2;
        fsdp_update *u = &o->base.updates[num++];
        memset(u, 0, sizeof *u);
        u->kind = FSDP_UPDATE_MUON;
        u->dtype = (uint8_t)v.dtype, u->grad_dtype = (uint8_t)o->desc.dtype;
        u->count = v.numel;
        u->grad = fsdpi_muon_part(o, x, fsdpi_muon_place(f, m));
        u->param = v.shard;
        u->scalars[0] = 1 - decay, u->scalars[1] = rate * ratio;
    }
    fsdp_status status = fsdpi_optim_emit_on(o->base.model, o->base.memory, "muon_step",
                                             o->base.updates, num, x, NULL);
    return status ? status : fsdpi_muon_release(o, FSDP_STREAM_COMPUTE, x);
}

typedef struct fsdpi_muon_work { // one matrix at its owner
    const fsdp_muon *o;
    int64_t rows, columns, side; // side: of the squares
    char *x, *y, *s, *t;
    int part; // of an iteration: which products
} fsdpi_muon_work;

// Part 0: s = x x'. Part 1, where t is s, and y is x: t = b t + c s s', y = a y + t x. Of tall x:
// s = x' x, and y = a y + x t.
static fsdp_status fsdpi_muon_products(const fsdp_op *op, void *stream) {
    const fsdpi_muon_work *w = (const fsdpi_muon_work *)op->list;
    const fsdp_muon *o = w->o;
    const fsdp_muon_desc *d = &o->desc;
    const int tall = w->rows > w->columns;
    const int64_t n = w->side, c = w->columns;
    if (w->part == 0)
        return d->gemm(d->gemm_user, stream, n, n, tall ? w->rows : c, 1, w->x, c, tall, w->x, c,
                       !tall, 0, w->s, n, o->dtype);
    fsdp_status status = d->gemm(d->gemm_user, stream, n, n, n, (float)d->c, w->s, n, 0, w->s, n, 1,
                                 (float)d->b, w->t, n, o->dtype);
    if (status) return status;
    return d->gemm(d->gemm_user, stream, w->rows, c, n, 1, tall ? w->x : w->t, tall ? c : n, 0,
                   tall ? w->t : w->x, c, 0, (float)d->a, w->y, c, o->dtype);
}

static fsdp_status fsdpi_muon_call(fsdpi_muon_work *w, int part) {
    fsdp_op op = fsdpi_muon_record(w->o, FSDP_OP_CALL, FSDP_STREAM_COMPUTE, NULL, NULL);
    op.call = fsdpi_muon_products, op.list = w, op.list_count = 1;
    w->part = part;
    return fsdp_emit(w->o->base.model, &op);
}

// A copy within `room`.
static fsdp_status fsdpi_muon_duplicate(const fsdp_muon *o, void *to, const void *from,
                                        int64_t count) {
    const fsdp_block all = {0, 0, count, 1, count, count};
    fsdp_op op = fsdpi_muon_record(o, FSDP_OP_COPY, FSDP_STREAM_COMPUTE, NULL, NULL);
    op.dtype = op.out_dtype = (uint8_t)o->dtype;
    op.src_ptr = from, op.dst_ptr = to;
    return fsdpi_muon_copy(o, op, &all, 1);
}

// x *= 1 / max(norm(x), eps)
static fsdp_status fsdpi_muon_normalize(const fsdp_muon *o, char *x, int64_t count) {
    const fsdp_block all = {0, 0, count, 1, count, count};
    fsdp_op op = fsdpi_muon_record(o, FSDP_OP_NORM, FSDP_STREAM_COMPUTE, NULL, NULL);
    fsdp_update u;
    memset(&u, 0, sizeof u);
    u.kind = FSDP_UPDATE_UNSCALE;
    u.dtype = u.grad_dtype = op.dtype = (uint8_t)o->dtype;
    u.count = count;
    u.grad = x, u.first = o->room;
    u.scalars[0] = o->desc.eps;
    op.out_dtype = FSDP_F64, op.norm_type = 2;
    op.src_ptr = x, op.dst_ptr = o->room;
    op.list = &all, op.list_count = 1, op.count = (uint64_t)count;
    fsdp_status status = fsdp_emit(o->base.model, &op);
    return status
               ? status
               : fsdpi_optim_emit_on(o->base.model, o->base.memory, "muon_step", &u, 1, NULL, NULL);
}

// Copies the rows of all ranks together to x, or back.
static fsdp_status fsdpi_muon_pieces(const fsdp_muon *o, const fsdpi_muon_flight *f,
                                     const fsdpi_muon_matrix *m, char *x, int back) {
    fsdp_buf *whole = fsdpi_muon_whole(o, f);
    fsdp_op op = fsdpi_muon_record(o, FSDP_OP_COPY, FSDP_STREAM_COMPUTE, back ? NULL : whole,
                                   back ? whole : NULL);
    // Without travels the parts of all owners lie in u; this rank is the only one.
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
    if (back) op.src_ptr = x, op.dtype = (uint8_t)o->dtype;
    else op.dst_ptr = x, op.out_dtype = (uint8_t)o->dtype;
    return fsdpi_muon_copy(o, op, o->blocks, num);
}

// Computes the matrices of a flight that this rank owns.
static fsdp_status fsdpi_muon_compute(const fsdp_muon *o, const fsdpi_muon_flight *f) {
    const int64_t element = (int64_t)fsdp_dtype_size(o->dtype);
    const int64_t matrix = fsdpi_muon_align(o->most * element);
    fsdp_status status = FSDP_OK;
    for (int i = f->first; i < f->first + f->num && !status; i++) {
        const fsdpi_muon_matrix *m = &o->matrices[i];
        char *at = (char *)o->room + 64;
        fsdpi_muon_work w = {
            o,  m->rows,     m->columns,      fsdpi_muon_least(m->rows, m->columns),
            at, at + matrix, at + 2 * matrix, NULL,
            0};
        fsdp_param_view v = FSDP_ZERO;
        w.t = w.s + fsdpi_muon_align(o->square * element);
        if (m->owner != f->replica * f->shards + f->rank || !fsdpi_muon_view(o, m, &v)) continue;
        status = fsdpi_muon_pieces(o, f, m, w.x, 0);
        if (!status) status = fsdpi_muon_normalize(o, w.x, m->rows * m->columns);
        for (int step = 0; step < o->desc.ns_steps && !status; step++) {
            status = fsdpi_muon_call(&w, 0);
            if (!status) status = fsdpi_muon_duplicate(o, w.t, w.s, w.side * w.side);
            if (!status) status = fsdpi_muon_duplicate(o, w.y, w.x, m->rows * m->columns);
            if (!status) status = fsdpi_muon_call(&w, 1);
            char *next = w.y;
            w.y = w.x, w.x = next;
        }
        if (!status) status = fsdpi_muon_pieces(o, f, m, w.x, 1);
    }
    return status;
}

FSDP_API fsdp_status fsdp_muon_step(fsdp_muon *muon, double lr) {
    static const char *const name = "muon_step";
    if (!muon) return fsdpi_optim_null(name, "the optimizer");
    fsdp_model *model = muon->base.model;
    fsdp_status status = fsdpi_optim_begin(&muon->base, lr, name);
    if (!status) status = fsdpi_muon_follow(muon, name);
    if (!status) status = fsdp_agree(model, &lr, sizeof lr);
    const int ahead = muon->travels, num = muon->num_flights;
    int used = 0;
    if (!status && ahead && num) status = fsdpi_muon_send(muon, muon->flights);
    for (int i = 0; i < num && !status; i++) {
        fsdpi_muon_flight *f = &muon->flights[i];
        if (!ahead) status = fsdpi_muon_send(muon, f);
        else if (i + 1 < num) status = fsdpi_muon_send(muon, f + 1); // while f is computed
        if (!status) status = fsdpi_muon_compute(muon, f);
        if (!status && ahead && i > 0) status = fsdpi_muon_apply(muon, f - 1, lr);
        if (!status) status = fsdpi_muon_bring(muon, f);
        if (!status && (!ahead || i + 1 == num)) status = fsdpi_muon_apply(muon, f, lr);
        used |= f->is_used;
    }
    if (!status && num && !used) fsdpi_optim_tell(&muon->base, name);
    return status ? status : fsdp_params_changed(model);
}

/* -------------------------------------------------------------------------------------------- */
// >>muon life

static void fsdpi_muon_free(void *user) {
    fsdpi_muon_free_buffers((fsdp_muon *)user);
    fsdpi_optim_free(user);
}

FSDP_API fsdp_muon_desc fsdp_muon_defaults(void) {
    fsdp_muon_desc d = FSDP_ZERO;
    d.weight_decay = 0.1, d.momentum = 0.95, d.eps = 1e-7;
    d.a = 3.4445, d.b = -4.7750, d.c = 2.0315;
    d.ns_steps = 5, d.nesterov = 1, d.dtype = FSDP_F32;
    d.flight_bytes = 64 << 20;
    d.magic = FSDPI_OPTIM_MAGIC;
    fsdpi_optim_no_groups(d.groups);
    return d;
}

// The settings that have a range of whole numbers.
static fsdp_status fsdpi_muon_ranges(fsdp_world *w, const char *name, const fsdp_muon_desc *d) {
    const struct {
        const char *field;
        int64_t value, least, most;
    } all[] = {{"ns_steps", d->ns_steps, 1, 99},
               {"adjust", d->adjust, FSDP_MUON_ORIGINAL, FSDP_MUON_SPECTRAL},
               {"replicas", d->replicas, FSDP_MUON_BY_BYTES, FSDP_MUON_A_PART_EACH},
               {"flight_bytes", d->flight_bytes, 1, INT64_MAX}};
    for (int i = 0; i < 4; i++)
        if (all[i].value < all[i].least || all[i].value > all[i].most)
            return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                             "[E9013] %s: desc.%s is %lld, expected %lld..%lld", name, all[i].field,
                             (long long)all[i].value, (long long)all[i].least,
                             (long long)all[i].most);
    if (!(d->eps >= 1e-30)) // 1/eps is a number of f32
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E9019] %s: desc.eps is %g, expected at least 1e-30", name, d->eps);
    if (d->dtype == FSDP_F32 || d->dtype == FSDP_BF16) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_INVALID_ARG, "[E9014] %s: desc.dtype is %s, expected f32 or bf16",
                     name, fsdp_dtype_name(d->dtype));
}

static fsdp_status fsdpi_muon_settings(fsdp_model *model, const char *name, fsdpi_optim *o,
                                       const fsdp_muon_desc *d) {
    fsdp_world *w = fsdp_model_world(model);
    const double coefficients[] = {d->a, d->b, d->c};
    fsdp_param_view v = FSDP_ZERO;
    fsdp_status status = fsdpi_optim_begun(o, w, d->magic);
    if (!status)
        status = fsdpi_optim_setting(w, name, "desc.weight_decay", d->weight_decay, HUGE_VAL);
    if (!status) status = fsdpi_optim_setting(w, name, "desc.momentum", d->momentum, 1);
    if (!status) status = fsdpi_optim_setting(w, name, "desc.eps", d->eps, HUGE_VAL);
    for (int i = 0; i < 3 && !status; i++)
        status = fsdpi_optim_setting(w, name, "the absolute value of desc.a, b or c",
                                     fabs(coefficients[i]), HUGE_VAL);
    if (!status) status = fsdpi_muon_ranges(w, name, d);
    if (!status) status = fsdpi_optim_groups(o, w, d->num_groups, d->groups, d->weight_decay);
    if (!status) status = fsdp_model_commit(model);
    while (!status && fsdp_next_param(model, &v))
        if (fsdpi_muon_group((void *)(uintptr_t)d, &v) >= 0)
            status = fsdpi_muon_check(w, name, d, &v);
    return status;
}

// Can this world run it?
static fsdp_status fsdpi_muon_place_check(fsdp_model *model, const char *name,
                                          const fsdp_muon_desc *d) {
    fsdp_world *w = fsdp_model_world(model);
    int memory = FSDP_MEMORY_HOST;
    fsdp_status status = fsdp_update_place(model, name, &memory);
    if (status) return status;
    if (memory == FSDP_MEMORY_DEVICE && (!d->gemm || d->gemm == fsdp_host_gemm))
        return fsdp_fail(w, FSDP_ERR_UNSUPPORTED,
                         "[E9015] %s: the shards are on a device, and desc.gemm is NULL or the "
                         "host's: include backends/fsdp_cuda_gemm.h, and set desc.gemm to "
                         "fsdp_cuda_gemm",
                         name);
    if (memory == FSDP_MEMORY_HOST && fsdp_model_run(model) == FSDP_RUN_STREAMS)
        return fsdp_fail(w, FSDP_ERR_UNSUPPORTED,
                         "[E9016] %s: the shards are in host memory, and matrices travel in the "
                         "device's: do not set cpu_offload",
                         name);
    if (fsdp_world_size(w) > 1 && !fsdp_world_has(w, FSDP_OP_ALL_TO_ALL))
        return fsdp_fail(w, FSDP_ERR_UNSUPPORTED, "[E9017] %s: the backend has no all_to_all",
                         name);
    return FSDP_OK;
}

// The tables behind the struct.
static int64_t fsdpi_muon_tables(fsdp_muon *o, int64_t params, int64_t ranks) {
    int64_t at = fsdpi_muon_align((int64_t)sizeof *o);
    char *base = (char *)o;
    if (o) o->matrices = (fsdpi_muon_matrix *)(void *)(base + at);
    at += fsdpi_muon_align(params * (int64_t)sizeof *o->matrices);
    if (o) o->flights = (fsdpi_muon_flight *)(void *)(base + at);
    at += fsdpi_muon_align(params * (int64_t)sizeof *o->flights);
    if (o) o->blocks = (fsdp_block *)(void *)(base + at);
    at += fsdpi_muon_align(ranks * (int64_t)sizeof *o->blocks);
    if (o) o->loads = (int64_t *)(void *)(base + at);
    return at + 2 * ranks * (int64_t)sizeof *o->loads;
}

FSDP_API fsdp_status fsdp_muon_create(fsdp_model *model, const fsdp_muon_desc *desc,
                                      fsdp_muon **muon) {
    static const char *const name = "muon_create";
    fsdp_muon_desc d, defaults = fsdp_muon_defaults();
    fsdpi_optim settings, *base = NULL;
    if (!model || !muon) return fsdpi_optim_null(name, "model or muon");
    *muon = NULL;
    fsdp_world *w = fsdp_model_world(model);
    fsdp_status status = fsdp_desc_read(w, &d, desc ? desc : &defaults, sizeof d, "fsdp_muon_desc");
    if (status) return status;
    memset(&settings, 0, sizeof settings);
    settings.name = name;
    settings.extension.name = "muon";
    settings.extension.destroy = fsdpi_muon_free;
    settings.state_names[0] = "momentum_buffer";
    settings.step_name = "step";
    settings.num_states = 1;
    status = fsdpi_muon_settings(model, name, &settings, &d);
    if (!status) status = fsdpi_muon_place_check(model, name, &d);
    int64_t params = fsdp_num_params(model), ranks = fsdp_world_size(w);
    if (!status)
        status = fsdpi_optim_create(model, &settings, fsdpi_muon_tables(NULL, params, ranks),
                                    fsdpi_muon_group, &d, &base);
    if (status) return status;
    fsdp_muon *o = (fsdp_muon *)(void *)base;
    o->desc = d;
    if (!d.gemm) o->desc.gemm = fsdp_host_gemm;
    o->dtype = o->desc.gemm == fsdp_host_gemm ? FSDP_F32 : d.dtype;
    o->base.user = &o->desc;
    o->label = fsdp_label_register(model, "muon");
    o->pool = fsdp_pool_register(model, "muon");
    (void)fsdpi_muon_tables(o, params, ranks);
    const double given[] = {
        d.momentum,       d.eps,          d.a, d.b, d.c, (double)d.ns_steps, d.nesterov ? 1. : 0,
        (double)d.adjust, (double)d.dtype, (double)d.replicas};
    status = o->label < 0 || o->pool < 0 ? FSDP_ERR_INVALID_ARG : fsdpi_muon_follow(o, name);
    if (!status) status = fsdpi_optim_agree(base, given, sizeof given);
    if (status) fsdp_muon_destroy(o);
    else *muon = o;
    return status;
}

FSDP_API fsdp_status fsdp_muon_set_group(fsdp_muon *muon, int k, const fsdp_optim_group *group) {
    return fsdpi_optim_set_group(muon ? &muon->base : NULL, "muon_set_group", k, group);
}

FSDP_API int fsdp_muon_takes(const fsdp_muon *muon, const fsdp_param_view *param) {
    return muon && param && fsdpi_muon_group(&((fsdp_muon *)(uintptr_t)muon)->desc, param) >= 0;
}

FSDP_API int64_t fsdp_muon_nbytes(const fsdp_muon *muon) {
    if (!muon) return 0;
    return fsdpi_optim_nbytes(&muon->base) + muon->host_bytes +
           (muon->base.memory == FSDP_MEMORY_DEVICE ? muon->room_bytes : 0) +
           fsdp_buf_nbytes(muon->u) + fsdp_buf_nbytes(muon->x) + fsdp_buf_nbytes(muon->whole[0]) +
           fsdp_buf_nbytes(muon->whole[1]);
}

FSDP_API size_t fsdp_muon_describe(const fsdp_muon *muon, char *text, size_t cap) {
    int64_t elements = 0, size = muon ? (int64_t)fsdp_dtype_size(muon->desc.dtype) : 0;
    int mine = 0, replicas = 1;
    for (int i = 0; muon && i < muon->num_flights; i++) {
        const fsdpi_muon_flight *f = &muon->flights[i];
        elements += 2 * (f->shards - 1) * f->part + (f->replicas - 1) * f->all.count;
        if (f->replicas > replicas) replicas = f->replicas;
        for (int k = f->first; k < f->first + f->num; k++)
            mine += muon->matrices[k].owner == f->replica * f->shards + f->rank;
    }
    int length = snprintf(
        text, cap,
        "muon: %d matrices, of which this rank computes %d; %d flights; receives "
        "%lld bytes in a step; replicas %s; %lld bytes of memory",
        muon ? muon->num : 0, mine, muon ? muon->num_flights : 0, (long long)(elements * size),
        replicas > 1 ? "compute a part each" : "compute all each, if there are any",
        (long long)fsdp_muon_nbytes(muon));
    return length > 0 ? (size_t)length : 0;
}

FSDP_API void fsdp_muon_destroy(fsdp_muon *muon) { fsdpi_optim_destroy(muon ? &muon->base : NULL); }

#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif
#endif // FSDP_IMPLEMENTATION
