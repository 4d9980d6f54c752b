/* core/templates.h - the records that hooks emit, made once at commit

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// Owns: a unit's templates. A template is a record in which everything that does not change from
// step to step stands already; the hook that emits it says only what has changed. Slots are named
// by their pool, since a unit holds another one at another time.

static fsdp_status fsdpi_call_pre_gather(const fsdp_op *op, void *stream);
static fsdp_status fsdpi_call_post_gather(const fsdp_op *op, void *stream);
static fsdp_status fsdpi_call_all_reduce_hook(const fsdp_op *op, void *stream);

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
