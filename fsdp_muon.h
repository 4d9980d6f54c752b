/* fsdp_muon.h - Muon, an optimizer of whole matrices, on shards: an extension of fsdp.h

   Muon makes the momentum of a matrix orthogonal by products of matrices (Newton-Schulz). Each
   matrix is computed whole by one rank, its owner: the products are shared out among the ranks, and
   parameters have the same bits on any number of ranks. The formula is that of torch.optim.Muon,
   computed in f32.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_muon.h"               // includes fsdp_optim.h; link with -lm

       static int others(void *user, const fsdp_param_view *p) { // what AdamW has
           return fsdp_muon_takes((fsdp_muon *)user, p) ? -1 : 0;
       }
       fsdp_muon_create(model, NULL, &muon);                   // after the last fsdp_fully_shard
       fsdp_adamw_desc desc = fsdp_adamw_defaults();
       desc.group = others, desc.user = muon;
       fsdp_adamw_create(model, &desc, &adamw);                // fsdp_shutdown frees both
       ...                                                     // behind fsdp_finalize_backward:
       if (fsdp_muon_step(muon, 0.02) || fsdp_adamw_step(adamw, 3e-4)) break;

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
     BF16, u and x travel as bf16: half of the bytes, and x off by 2^-8 of itself at most. The
     products are then of bf16, too, if there is a `gemm`; the default one is of f32.
   WHICH PARAMETERS
     Those that desc.take chooses, and that require a gradient. Embeddings and heads, which have two
     dims, too, are better left to AdamW. Units that tensor parallelism cuts are refused.
   OWNERS AND FLIGHTS
     Ranks choose the owners alike, without a message: the matrix that costs most first, to the
     owner that has least. Owners are the ranks of the shard group; with replicas (HSDP, DDP) that
     compute a part each (desc.replicas) those of all replicas, which then exchange results.
     Matrices travel in flights, in the order of backward: u to the owners by one all_to_all, x back
     by another one, on the stream EXTENSION. While a flight is computed on COMPUTE, the next one
     travels there and the last one back. In the all_to_all each pair of ranks sends as much as the
     pair that sends most, with each shard as large as the largest one: a flight of W equal
     matrices, whose rows W divides, has no padding.
   UPDATED PARAMETERS, FREEZE AND THAW, CHECKPOINTS
     As for AdamW (fsdp_optim.h). The state is "momentum_buffer" alone, as in PyTorch.
   MEMORY, to the byte; W ranks shard a matrix, V replicas exchange results
     For each element of this rank's rows 4 bytes, the momentum, and tables, as AdamW. All else is
     in the pool "muon", and the same on all ranks. For flights 2 W N + 2 V W N elements of
     desc.dtype, where N is the most that a pair of ranks sends in a flight; if nothing travels, N.
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
    double a, b, c;       // defaults 3.4445, -4.7750, 2.0315; -1e30 to 1e30
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
    fsdp_gemm_fn gemm;         // NULL: fsdp_host_gemm. On a device give one, as fsdp_cuda_gemm
    void *gemm_user;           // argument of gemm. If gemm fails, the world ends
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
               device without desc.gemm, or with cpu_offload; the backend has no all_to_all),
               OUT_OF_MEMORY, errors of commit
   Collective  as fsdp_model_commit, and over the world: groups are made for the stream EXTENSION.
               If ranks give other descs, or take other matrices, the next collective is a MISMATCH;
               if they make other groups (desc.replicas), with worker threads a TIMEOUT
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

#include "src/muon/flights.h"

#include <stdio.h>  // snprintf
#include <string.h> // memset

/* -------------------------------------------------------------------------------------------- */
// >>muon
// Owns: the buffers of flights, and the room for products.

static void fsdpi_muon_free_buffers(fsdp_muon *o) {
    for (int i = 0; i < FSDPI_MUON_BUFS; i++) {
        if (i <= FSDPI_MUON_U || o->travels) fsdp_buf_destroy(o->base.model, o->bufs[i]);
        o->bufs[i] = NULL;
    }
}

static fsdp_status fsdpi_muon_buffers(fsdp_muon *o) {
    const int64_t size = (int64_t)fsdp_dtype_size(o->desc.dtype);
    const int64_t element = (int64_t)fsdp_dtype_size(o->dtype);
    const int64_t matrix = (o->most * element + 63) / 64 * 64;
    const int64_t square = (o->square * element + 63) / 64 * 64;
    const int64_t packed = o->desc.gemm == fsdp_host_gemm ? FSDP_HOST_GEMM_BYTES : 0, norm = 64;
    const int memory = o->base.memory == FSDP_MEMORY_HOST ? FSDP_MEMORY_PINNED : FSDP_MEMORY_DEVICE;
    int64_t sent = 0, got = 0;
    for (int i = 0; i < o->num_flights; i++) {
        const fsdpi_muon_flight *f = &o->flights[i];
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
    if (status) return status;
    o->room = (char *)fsdp_buf_ptr(o->bufs[FSDPI_MUON_ROOM]);
    o->x = o->room + norm, o->y = o->x + matrix, o->s = o->y + matrix, o->t = o->s + square;
    if (packed) o->desc.gemm_user = o->t + square;
    return FSDP_OK;
}

// Follows the model's layout: the optimizer's table, owners, flights and buffers.
static fsdp_status fsdpi_muon_apply_layout(fsdp_muon *o, const char *what) {
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
// >>muon step
// Owns: the records of a step. Invariants: those that read or write u, x or whole matrices name
// these buffers, so that COMPUTE and EXTENSION wait for each other; `room` is COMPUTE's alone.
// Lists of records on COMPUTE are read when they are emitted.

static fsdp_op fsdpi_muon_record(const fsdp_muon *o, int kind, int stream, fsdp_buf *src,
                                 fsdp_buf *dst) {
    fsdp_op op;
    fsdp_op_init(&op, o->base.model, NULL, kind, o->label, stream);
    op.what = "muon_step";
    op.src = src, op.dst = dst;
    op.dtype = op.out_dtype = (uint8_t)o->desc.dtype;
    return op;
}

static fsdp_status fsdpi_muon_emit_blocks(const fsdp_muon *o, fsdp_op op, const fsdp_block *blocks,
                                          int num) {
    op.list = blocks, op.list_count = (uint32_t)num;
    for (int i = 0; i < num; i++) op.count += (uint64_t)(blocks[i].width * blocks[i].height);
    return fsdp_emit(o->base.model, &op);
}

// Emits the first updates of the optimizer's list.
static fsdp_status fsdpi_muon_emit_updates(const fsdp_muon *o, int num, fsdp_buf *src,
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

// View of a matrix. Returns whether it has a gradient.
static int fsdpi_muon_view(const fsdp_muon *o, const fsdpi_muon_matrix *m, fsdp_param_view *v) {
    const fsdpi_optim_param *p = &o->base.params[m->param];
    return !fsdp_param_view_get(p->unit, p->index, v) && v->shard_grad;
}

// Address of so many elements of the dtype that travels.
static char *fsdpi_muon_at(const fsdp_muon *o, int buf, int64_t elements) {
    return (char *)fsdp_buf_ptr(o->bufs[buf]) + elements * (int64_t)fsdp_dtype_size(o->desc.dtype);
}

static int fsdpi_muon_whole(const fsdp_muon *o, const fsdpi_muon_flight *f) {
    return FSDPI_MUON_WHOLE + (int)(f - o->flights) % 2;
}

// A record on `stream` has read the buffer: what writes it next waits for that.
static fsdp_status fsdpi_muon_release(const fsdp_muon *o, int stream, fsdp_buf *buf) {
    fsdp_op op = fsdpi_muon_record(o, FSDP_OP_RELEASE, stream, buf, NULL);
    return fsdp_emit(o->base.model, &op);
}

// Exchanges the parts of the shard group; a group of one rank copies its own.
static fsdp_status fsdpi_muon_exchange(const fsdp_muon *o, const fsdpi_muon_flight *f, int from,
                                       int64_t begin, int to, int64_t end) {
    const fsdp_block all = {0, 0, f->part, 1, f->part, f->part};
    fsdp_op op = fsdpi_muon_record(o, f->comm ? FSDP_OP_ALL_TO_ALL : FSDP_OP_COPY,
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

// Updates the momentum of a flight, and sends u to the owners. Sets whether there is a gradient.
static fsdp_status fsdpi_muon_send(fsdp_muon *o, fsdpi_muon_flight *f) {
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
    // Without rows here it is sent all the same: a write after that has to know of this one.
    fsdp_op none = fsdpi_muon_record(o, FSDP_OP_ZERO, FSDP_STREAM_COMPUTE, NULL, to);
    if (!status && num == 0 && f->is_used) status = fsdp_emit(o->base.model, &none);
    if (status || !f->is_used || !o->travels) return status;
    return fsdpi_muon_exchange(o, f, FSDPI_MUON_U, f->replica * f->all.count,
                               fsdpi_muon_whole(o, f), 0);
}

// Brings x of a flight back to the shards, and to the replicas.
static fsdp_status fsdpi_muon_bring(const fsdp_muon *o, const fsdpi_muon_flight *f) {
    if (!f->is_used || !o->travels) return FSDP_OK;
    fsdp_status status = fsdpi_muon_exchange(o, f, fsdpi_muon_whole(o, f), 0, FSDPI_MUON_X,
                                             f->replica * f->all.count);
    if (status || !f->replicas_comm) return status;
    fsdp_op op = fsdpi_muon_record(o, FSDP_OP_ALL_GATHER, FSDP_STREAM_EXTENSION,
                                   o->bufs[FSDPI_MUON_X], o->bufs[FSDPI_MUON_X]);
    op.unit = o->base.params[o->matrices[f->first].param].unit; // so that ranks compare lr here
    op.comm = f->replicas_comm, op.group_size = f->replicas, op.in_place = 1;
    op.list = &f->all, op.list_count = 1;
    op.count = (uint64_t)f->all.count;
    return fsdp_emit(o->base.model, &op);
}

// Updates the parameters of a flight.
static fsdp_status fsdpi_muon_apply(fsdp_muon *o, const fsdpi_muon_flight *f) {
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

// s = x x'; of tall x: s = x' x
static fsdp_status fsdpi_muon_square(const fsdp_op *op, void *stream) {
    const fsdp_muon *o = (const fsdp_muon *)op->list;
    const int64_t n = o->now->side, c = o->now->columns, rows = o->now->rows;
    const int tall = rows > c;
    return o->desc.gemm(o->desc.gemm_user, stream, n, n, tall ? rows : c, 1, o->x, c, tall, o->x, c,
                        !tall, 0, o->s, n, o->dtype);
}

// With t = s and y = x: t = b t + c s s', then y = a y + t x; of tall x: y = a y + x t
static fsdp_status fsdpi_muon_polynomial(const fsdp_op *op, void *stream) {
    const fsdp_muon *o = (const fsdp_muon *)op->list;
    const fsdp_muon_desc *d = &o->desc;
    const int64_t n = o->now->side, c = o->now->columns, rows = o->now->rows;
    const int tall = rows > c;
    fsdp_status status = d->gemm(d->gemm_user, stream, n, n, n, (float)d->c, o->s, n, 0, o->s, n, 1,
                                 (float)d->b, o->t, n, o->dtype);
    if (status) return status;
    return d->gemm(d->gemm_user, stream, rows, c, n, 1, tall ? o->x : o->t, tall ? c : n, 0,
                   tall ? o->t : o->x, c, 0, (float)d->a, o->y, c, o->dtype);
}

static fsdp_status fsdpi_muon_call(const fsdp_muon *o,
                                   fsdp_status (*call)(const fsdp_op *, void *)) {
    fsdp_op op = fsdpi_muon_record(o, FSDP_OP_CALL, FSDP_STREAM_COMPUTE, NULL, NULL);
    op.call = call, op.list = o, op.list_count = 1;
    return fsdp_emit(o->base.model, &op);
}

// x = x * (1 / max(norm(x), eps))
static fsdp_status fsdpi_muon_normalize(const fsdp_muon *o, int64_t count) {
    const fsdp_block all = {0, 0, count, 1, count, count};
    fsdp_update *u = o->base.updates;
    fsdp_op op = fsdpi_muon_record(o, FSDP_OP_NORM, FSDP_STREAM_COMPUTE, NULL, NULL);
    *u = fsdpi_muon_update(FSDP_UPDATE_UNSCALE, o->dtype, o->dtype, NULL, o->x, count);
    u->first = o->room;
    u->scalars[0] = o->desc.eps;
    op.dtype = (uint8_t)o->dtype, op.out_dtype = FSDP_F64, op.norm_type = 2;
    op.src_ptr = o->x, op.dst_ptr = o->room;
    fsdp_status status = fsdpi_muon_emit_blocks(o, op, &all, 1);
    return status ? status : fsdpi_muon_emit_updates(o, 1, NULL, NULL);
}

// An iteration of Newton-Schulz. The next x is in y, and they change places.
static fsdp_status fsdpi_muon_iterate(fsdp_muon *o, int64_t numel, int64_t square) {
    const int64_t element = (int64_t)fsdp_dtype_size(o->dtype);
    const fsdp_block both[] = {
        {(o->x - o->room) / element, (o->y - o->room) / element, numel, 1, numel, numel},
        {(o->s - o->room) / element, (o->t - o->room) / element, square, 1, square, square}};
    fsdp_op op = fsdpi_muon_record(o, FSDP_OP_COPY, FSDP_STREAM_COMPUTE, NULL, NULL);
    op.dtype = op.out_dtype = (uint8_t)o->dtype;
    op.src_ptr = op.dst_ptr = o->room;
    fsdp_status status = fsdpi_muon_call(o, fsdpi_muon_square);
    if (!status) status = fsdpi_muon_emit_blocks(o, op, both, 2);
    if (!status) status = fsdpi_muon_call(o, fsdpi_muon_polynomial);
    char *next = o->y;
    o->y = o->x, o->x = next;
    return status;
}

// Copies the rows of all ranks together to x, or back.
static fsdp_status fsdpi_muon_pieces(const fsdp_muon *o, const fsdpi_muon_flight *f,
                                     const fsdpi_muon_matrix *m, int back) {
    fsdp_buf *whole = o->bufs[fsdpi_muon_whole(o, f)];
    fsdp_op op = fsdpi_muon_record(o, FSDP_OP_COPY, FSDP_STREAM_COMPUTE, back ? NULL : whole,
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

// Computes the matrices of a flight that this rank owns.
static fsdp_status fsdpi_muon_compute(fsdp_muon *o, const fsdpi_muon_flight *f) {
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

FSDP_API fsdp_status fsdp_muon_step(fsdp_muon *muon, double lr) {
    static const char *const name = "muon_step";
    if (!muon) return fsdpi_optim_null(NULL, name, "the optimizer");
    fsdp_status status = fsdpi_optim_begin(&muon->base, lr, name);
    if (!status) status = fsdpi_muon_apply_layout(muon, name);
    if (!status) status = fsdp_agree(muon->base.model, &lr, sizeof lr);
    // While a flight is computed, the next one travels there, and the last one back.
    const int lag = muon->travels, num = status ? 0 : muon->num_flights;
    int used = 0;
    muon->lr = lr;
    for (int i = 0; i < num + 2 * lag && !status; i++) {
        const int at = i - lag, computes = at >= 0 && at < num;
        if (i < num) status = fsdpi_muon_send(muon, &muon->flights[i]);
        if (!status && computes) status = fsdpi_muon_compute(muon, &muon->flights[at]);
        if (!status && at >= lag) status = fsdpi_muon_apply(muon, &muon->flights[at - lag]);
        if (!status && computes) status = fsdpi_muon_bring(muon, &muon->flights[at]);
        if (computes) used |= muon->flights[at].is_used;
    }
    if (!status && num && !used) fsdpi_optim_tell(&muon->base, name);
    return status ? status : fsdp_params_changed(muon->base.model);
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

enum { FSDPI_MUON_RANGES = 10 };

// Are the settings in their ranges, and can this world run them? Commits the model. given: the
// settings that ranks compare.
static fsdp_status fsdpi_muon_settings(fsdp_model *model, fsdpi_optim *o, const fsdp_muon_desc *d,
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
        {"desc.flight_bytes", (double)d->flight_bytes, 1, FSDPI_OPTIM_FINITE}};
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
    fsdpi_optim settings, *base = NULL;
    double given[FSDPI_MUON_RANGES + 1];
    if (!model || !muon) return fsdpi_optim_null(model, name, "model or muon");
    *muon = NULL;
    fsdp_world *w = fsdp_model_world(model);
    const int64_t params = fsdp_num_params(model), ranks = fsdp_world_size(w);
    fsdp_status status = fsdp_desc_read(w, &d, desc ? desc : &defaults, sizeof d, "fsdp_muon_desc");
    memset(&settings, 0, sizeof settings);
    settings.name = name;
    settings.extension.name = "muon";
    settings.extension.destroy = fsdpi_muon_free;
    settings.state_names[0] = "momentum_buffer";
    settings.num_states = 1;
    if (!status) status = fsdpi_muon_settings(model, &settings, &d, given);
    // The struct, and its tables behind it.
    const int64_t size = (int64_t)sizeof(fsdp_muon) +
                         params * (int64_t)(sizeof(fsdpi_muon_matrix) + sizeof(fsdpi_muon_flight)) +
                         ranks * (int64_t)(sizeof(fsdp_block) + 2 * sizeof(int64_t));
    if (!status) status = fsdpi_optim_create(model, &settings, size, fsdpi_muon_group, &d, &base);
    if (status) return status;
    fsdp_muon *o = (fsdp_muon *)(void *)base;
    o->matrices = (fsdpi_muon_matrix *)(void *)(o + 1);
    o->flights = (fsdpi_muon_flight *)(void *)(o->matrices + params);
    o->blocks = (fsdp_block *)(void *)(o->flights + params);
    o->loads = (int64_t *)(void *)(o->blocks + ranks);
    o->desc = d;
    if (!d.gemm) o->desc.gemm = fsdp_host_gemm;
    o->dtype = o->desc.gemm == fsdp_host_gemm ? FSDP_F32 : d.dtype;
    o->base.user = &o->desc;
    o->label = fsdp_label_register(model, "muon"); // now, as ranks compare it
    status = o->label < 0 ? FSDP_ERR_INVALID_ARG : fsdpi_muon_apply_layout(o, name);
    // Last, when nothing fails any more: a rank that had no memory and calls again agrees once.
    if (!status) status = fsdpi_optim_agree(base, given, sizeof given);
    if (status) fsdp_muon_destroy(o);
    else *muon = o;
    return status;
}

FSDP_API fsdp_status fsdp_muon_set_group(fsdp_muon *muon, int k, const fsdp_optim_group *group) {
    return fsdpi_optim_set_group(muon ? &muon->base : NULL, "muon_set_group", k, group);
}

FSDP_API int fsdp_muon_takes(const fsdp_muon *muon, const fsdp_param_view *param) {
    return muon && param && fsdpi_muon_group((void *)(uintptr_t)&muon->desc, param) >= 0;
}

FSDP_API int64_t fsdp_muon_nbytes(const fsdp_muon *muon) {
    if (!muon) return 0;
    int64_t nbytes = fsdpi_optim_nbytes(&muon->base);
    for (int i = 0; i < FSDPI_MUON_BUFS; i++)
        if (i <= FSDPI_MUON_U || muon->travels) nbytes += fsdp_buf_nbytes(muon->bufs[i]);
    return nbytes;
}

FSDP_API size_t fsdp_muon_describe(const fsdp_muon *muon, char *text, size_t cap) {
    int64_t elements = 0;
    int mine = 0, parts = 0;
    for (int i = 0; muon && i < muon->num_flights; i++) {
        const fsdpi_muon_flight *f = &muon->flights[i];
        elements += 2 * (f->shards - 1) * f->part + (f->replicas - 1) * f->all.count;
        parts |= f->replicas > 1;
        for (int k = 0; k < f->num; k++) mine += muon->matrices[f->first + k].owner == f->me;
    }
    if (muon) elements *= (int64_t)fsdp_dtype_size(muon->desc.dtype);
    const int length = snprintf(
        text, cap,
        "muon: %d matrices, of which this rank computes %d; %d flights; receives %lld bytes in a "
        "step; each replica computes %s; %lld bytes of memory",
        muon ? muon->num : 0, mine, muon ? muon->num_flights : 0, (long long)elements,
        parts ? "a part" : "all", (long long)fsdp_muon_nbytes(muon));
    return length > 0 ? (size_t)length : 0;
}

FSDP_API void fsdp_muon_destroy(fsdp_muon *muon) { fsdpi_optim_destroy(muon ? &muon->base : NULL); }

#endif // FSDP_IMPLEMENTATION
