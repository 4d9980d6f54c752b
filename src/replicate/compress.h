/* replicate/compress.h - gradients sent as bf16, summed in f32

   The ops in place of a reduce-scatter, their lists and memory. Invariant: all are on the stream of
   the reduce-scatter, so that one buffer is enough. It contains the f32 sums, the received parts,
   and the parts to send.
   Callers: programs.

   A part of fsdp_compress.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_COMPRESS_H
#include "../../fsdp_compress.h"
#endif
#ifndef FSDPI_REPLICATE_COMPRESS_H
#define FSDPI_REPLICATE_COMPRESS_H

#include <string.h>

// Lists for the copies of one list of segments. Made once, since outstanding ops read them.
typedef struct fsdpi_compress_lists {
    struct fsdpi_compress_lists *next;
    int64_t bytes;
    int32_t ranks, num;
    fsdp_seg *segs;                 // [num], those of the reduce-scatter
    fsdp_block *pack, *unpack, all; // [num] each; all: one rank's part
} fsdpi_compress_lists;

struct fsdp_compress {
    fsdp_model *model;
    fsdp_extension extension;
    fsdpi_compress_lists *lists;
    fsdp_buf *room;
    int label, pool;
};

// Fills the lists. In the slot, each segment has the parts of all ranks: `pack` collects the parts
// for each rank. `unpack` copies this rank's sums to the shard.
static void fsdpi_compress_fill(fsdpi_compress_lists *p) {
    int64_t at = 0, count = 0;
    for (int32_t i = 0; i < p->num; i++) count += p->segs[i].count;
    const fsdp_block all = {0, 0, count, 1, count, count};
    for (int32_t i = 0; i < p->num; i++) {
        const fsdp_seg *s = &p->segs[i];
        const fsdp_block pack = {s->full, at, s->count, p->ranks, s->count, count},
                         unpack = {at, s->shard, s->count, 1, s->count, s->count};
        p->pack[i] = pack;
        p->unpack[i] = unpack;
        at += s->count;
    }
    p->all = all;
}

static fsdpi_compress_lists *fsdpi_compress_lists_of(fsdp_compress *c, const fsdp_op *op) {
    size_t segs = op->list_count * sizeof(fsdp_seg), blocks = op->list_count * sizeof(fsdp_block);
    fsdpi_compress_lists *p = c->lists;
    void *room;
    while (p && (p->ranks != op->group_size || p->num != (int32_t)op->list_count ||
                 memcmp(p->segs, op->list, segs) != 0))
        p = p->next;
    if (p) return p;
    int64_t bytes = (int64_t)(sizeof *p + segs + 2 * blocks);
    if (fsdp_alloc(c->model, FSDP_MEMORY_HOST, bytes, "compress: no memory for a list", &room))
        return NULL;
    p = (fsdpi_compress_lists *)room;
    p->next = c->lists;
    p->bytes = bytes;
    p->ranks = op->group_size;
    p->num = (int32_t)op->list_count;
    p->segs = (fsdp_seg *)(void *)(p + 1);
    p->pack = (fsdp_block *)(void *)(p->segs + p->num);
    p->unpack = p->pack + p->num;
    memcpy(p->segs, op->list, segs);
    fsdpi_compress_fill(p);
    c->lists = p;
    return p;
}

// Ensures memory for a reduction. All ranks need the same size in the same reduction.
static fsdp_status fsdpi_compress_room(fsdp_compress *c, int64_t nbytes) {
    if (fsdp_buf_nbytes(c->room) >= nbytes) return FSDP_OK;
    fsdp_buf_destroy(c->model, c->room);
    c->room = NULL;
    return fsdp_buf_create(c->model, c->pool, FSDP_MEMORY_DEVICE, nbytes, &c->room);
}

// Makes an op like the reduce-scatter: it has the same unit, and ranks compare the same fields.
static fsdp_op fsdpi_compress_record(const fsdp_compress *c, const fsdp_op *like, int kind) {
    fsdp_op op;
    fsdp_op_init(&op, c->model, like->unit, kind, c->label, like->stream);
    op.what = like->what;
    op.what_hash = like->what_hash;
    op.factor = like->factor;
    memcpy(op.agree, like->agree, sizeof op.agree);
    op.unused = like->unused;
    op.count = like->count;
    op.src = op.dst = c->room;
    op.dtype = FSDP_BF16;
    op.out_dtype = FSDP_F32;
    op.list_count = 1;
    return op;
}

// Sums this rank's part in f32, scales and casts it, and adds it to the shard.
static fsdp_status fsdpi_compress_sum(const fsdp_compress *c, const fsdpi_compress_lists *p,
                                      const fsdp_op *scatter, char *sums, char *received) {
    fsdp_status status = FSDP_OK;
    fsdp_op op = fsdpi_compress_record(c, scatter, FSDP_OP_COPY);
    op.list = &p->all;
    op.dst_ptr = sums;
    for (int32_t k = 0; k < p->ranks && !status; k++) {
        op.src_ptr = received + (size_t)k * scatter->count * sizeof(uint16_t);
        op.accumulate = k > 0;
        status = fsdp_emit(c->model, &op);
    }
    op = fsdpi_compress_record(c, scatter, FSDP_OP_COPY);
    op.dtype = FSDP_F32;
    op.out_dtype = scatter->out_dtype;
    op.scale = scatter->scale;
    op.accumulate = scatter->accumulate;
    op.list = p->unpack;
    op.list_count = (uint32_t)p->num;
    op.src_ptr = sums;
    op.dst = scatter->dst;
    op.dst_ptr = scatter->dst_ptr;
    return status ? status : fsdp_emit(c->model, &op);
}

static fsdp_status fsdpi_compress_reduce(fsdp_compress *c, const fsdp_op *scatter) {
    const fsdpi_compress_lists *p = fsdpi_compress_lists_of(c, scatter);
    int64_t part = (int64_t)scatter->count, whole = part * scatter->group_size * 2;
    if (!p) return FSDP_ERR_OUT_OF_MEMORY;
    fsdp_status status = fsdpi_compress_room(c, part * 4 + whole * 2);
    if (status) return status;
    char *sums = (char *)fsdp_buf_ptr(c->room), *received = sums + part * 4;
    fsdp_op op = fsdpi_compress_record(c, scatter, FSDP_OP_COPY);
    op.dtype = scatter->dtype;
    op.out_dtype = FSDP_BF16;
    op.count *= (uint64_t)p->ranks;
    op.list = p->pack;
    op.list_count = (uint32_t)p->num;
    op.src = scatter->src;
    op.src_ptr = scatter->src_ptr;
    op.dst_ptr = received + whole;
    status = fsdp_emit(c->model, &op);
    op = fsdpi_compress_record(c, scatter, FSDP_OP_ALL_TO_ALL);
    op.out_dtype = FSDP_BF16;
    op.comm = scatter->comm;
    op.group_size = scatter->group_size;
    op.list_count = 0;
    op.src_ptr = received + whole;
    op.dst_ptr = received;
    if (!status) status = fsdp_emit(c->model, &op);
    return status ? status : fsdpi_compress_sum(c, p, scatter, sums, received);
}

/* Replaces a reduce-scatter. If this rank has no memory it runs the reduce-scatter itself, while
   other ranks do not: ranks see that they differ, and the world ends. */
static int fsdpi_compress_op(void *user, fsdp_model *model, fsdp_op *op) {
    (void)model;
    int sends = op->dtype == FSDP_F32 || op->dtype == FSDP_BF16;
    if (op->kind != FSDP_OP_REDUCE_SCATTER || op->label != FSDP_LABEL_REDUCE || op->custom ||
        !sends)
        return 0;
    return fsdpi_compress_reduce((fsdp_compress *)user, op) != FSDP_ERR_OUT_OF_MEMORY;
}

static void fsdpi_compress_free(void *user) {
    fsdp_compress *c = (fsdp_compress *)user;
    fsdp_model *m = c->model;
    fsdp_buf_destroy(m, c->room); // ops that read the lists have run
    while (c->lists) {
        fsdpi_compress_lists *p = c->lists;
        c->lists = p->next;
        fsdp_free(m, FSDP_MEMORY_HOST, p, p->bytes);
    }
    fsdp_free(m, FSDP_MEMORY_HOST, c, 0);
}

FSDP_API fsdp_status fsdp_compress_create(fsdp_model *model, fsdp_compress **compress) {
    void *room;
    if (compress) *compress = NULL;
    if (!model) return fsdp_fail_null(NULL, "compress_create", "model");
    fsdp_world *w = fsdp_model_world(model);
    if (fsdp_world_size(w) > 1 && !fsdp_world_has(w, FSDP_OP_ALL_TO_ALL))
        return fsdp_fail(w, FSDP_ERR_UNSUPPORTED,
                         "[E920] compress_create: the backend has no all_to_all");
    fsdp_status status = fsdp_alloc(model, FSDP_MEMORY_HOST, sizeof(fsdp_compress),
                                    "compress_create: no memory", &room);
    if (status) return status;
    fsdp_compress *c = (fsdp_compress *)room;
    c->model = model;
    c->label = fsdp_label_register(model, "compress");
    c->pool = fsdp_pool_register(model, "compress");
    c->extension.name = "compress";
    c->extension.user = c;
    c->extension.op = fsdpi_compress_op;
    c->extension.destroy = fsdpi_compress_free;
    status = c->label < 0 || c->pool < 0 ? FSDP_ERR_INVALID_ARG : fsdp_attach(model, &c->extension);
    if (status) fsdp_free(model, FSDP_MEMORY_HOST, c, 0);
    else if (compress) *compress = c;
    return status;
}

FSDP_API void fsdp_compress_destroy(fsdp_compress *compress) {
    if (compress) (void)fsdp_detach(compress->model, &compress->extension);
}

#endif // FSDPI_REPLICATE_COMPRESS_H
