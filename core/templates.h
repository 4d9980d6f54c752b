/* core/templates.h - the records that hooks emit, made once at commit

   A part of fsdp.h, which includes it.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// Owns: a unit's templates. A template is a record in which everything that does not change from
// step to step stands already; the hook that emits it says only what has changed. Slots are named
// by their pool, since a unit holds another one at another time.

static fsdp_status fsdpi_call_pre_gather(const fsdp_op *op, void *stream);
static fsdp_status fsdpi_call_post_gather(const fsdp_op *op, void *stream);
static fsdp_status fsdpi_call_all_reduce_hook(const fsdp_op *op, void *stream);

typedef struct fsdpi_templates { // that are being made
    fsdp_unit *unit;
    fsdpi_template *next;
} fsdpi_templates;

static fsdp_op *fsdpi_template_add(fsdpi_templates *t, int kind, int label, int stream, int src,
                                   int dst) {
    fsdpi_template *one = t->next++;
    one->op = fsdpi_op(t->unit->model, t->unit, kind, label, stream);
    one->src = (uint8_t)src;
    one->dst = (uint8_t)dst;
    return &one->op;
}

// A copy, a collective over a group, or an all_reduce, if there is anything to do.
static fsdp_op *fsdpi_template_work(fsdpi_templates *t, int kind, int label, int stream,
                                    const fsdpi_work *work, int src, fsdp_dtype dtype, int dst,
                                    fsdp_dtype out_dtype) {
    if (work->count == 0) return NULL;
    fsdp_op *op = fsdpi_template_add(t, kind, label, stream, src, dst);
    fsdpi_op_work(op, dtype, out_dtype, work);
    return op;
}

static void fsdpi_template_group(fsdp_op *op, fsdp_comm *comm, int size) {
    if (!op) return;
    op->comm = comm;
    op->group_size = size;
    op->bytes = fsdpi_op_bytes(op);
}

static void fsdpi_template_call(fsdpi_templates *t, const fsdpi_param *p, int label, int stream,
                                int src, int dst,
                                fsdp_status (*call)(const fsdp_op *op, void *stream)) {
    fsdp_op *op = fsdpi_template_add(t, FSDP_OP_CALL, label, stream, src, dst);
    op->root = p ? (int32_t)(p - t->unit->params) : -1;
    op->call = call;
}

// Between a part's blocks of shards or shard gradients and the unit's slots.
static void fsdpi_template_part(fsdpi_templates *t, const fsdpi_part *part, int kind) {
    const fsdpi_layout *l = &t->unit->layout;
    const fsdpi_flat_block *flat = fsdpi_flat_of(t->unit, part);
    fsdp_dtype grad = fsdpi_grad_dtype(t->unit->model, part->dtype), full = part->param_dtype;
    int gather = FSDP_STREAM_GATHER, reduce = FSDP_STREAM_REDUCE;
    fsdpi_template *before = t->next;
    if (kind == FSDPI_OPS_COPY_IN && part->extended)
        fsdpi_template_call(t, part->extended, FSDP_LABEL_PRE_GATHER, gather, FSDP_POOL_SHARD,
                            FSDP_POOL_GATHER, fsdpi_call_pre_gather);
    else if (kind == FSDPI_OPS_COPY_IN)
        (void)fsdpi_template_work(t, FSDP_OP_COPY, FSDP_LABEL_COPY_IN, gather, &part->copy_in,
                                  FSDP_POOL_SHARD, part->dtype, FSDP_POOL_GATHER, full);
    else if (kind == FSDPI_OPS_COPY_OUT && part->extended)
        fsdpi_template_call(t, part->extended, FSDP_LABEL_POST_GATHER, gather, FSDP_POOL_GATHER,
                            FSDP_POOL_GATHER, fsdpi_call_post_gather);
    else if (kind == FSDPI_OPS_COPY_OUT)
        (void)fsdpi_template_work(t, FSDP_OP_COPY, FSDP_LABEL_COPY_OUT, gather, &part->copy_out,
                                  FSDP_POOL_GATHER, full, FSDP_POOL_GATHER, full);
    else if (kind == FSDPI_OPS_SUM)
        (void)fsdpi_template_work(t, FSDP_OP_COPY, FSDP_LABEL_ACC, reduce, &part->acc,
                                  FSDP_POOL_GRAD, full, FSDP_POOL_RIN, l->reduce_dtype);
    else if (kind == FSDPI_OPS_FOLD_DIVIDED)
        (void)fsdpi_template_work(t, FSDP_OP_COPY, FSDP_LABEL_ACC, reduce, &part->acc,
                                  FSDP_POOL_GRAD, full, FSDP_POOL_GRAD, l->reduce_dtype);
    else if (part->num_train > 0)
        (void)fsdpi_template_work(t, FSDP_OP_COPY, FSDP_LABEL_RED_OUT,
                                  fsdpi_replicas(t->unit) > 1 ? FSDP_STREAM_ALLREDUCE : reduce,
                                  &part->red_out, FSDP_POOL_ROUT, l->reduce_dtype, FSDP_POOL_SGRAD,
                                  grad);
    if (t->next == before) return;
    if (before->src == FSDP_POOL_SHARD) before->op.src = flat->shard;
    if (before->dst == FSDP_POOL_SGRAD) before->op.dst = flat->grad;
}

// Gathers of the unit, and what is kept of them.
static void fsdpi_template_gather(fsdpi_templates *t, int kind) {
    const fsdp_unit *u = t->unit;
    const fsdpi_layout *l = &u->layout;
    fsdp_dtype dtype = l->gather_dtype;
    fsdp_op *op;
    int staged = u->route[0].gather == FSDPI_GATHER_STAGED, gather = FSDP_STREAM_GATHER;
    int src = staged ? FSDP_POOL_GATHER : FSDP_POOL_SHARD;
    if (kind == FSDPI_OPS_WAIT) {
        int alias = u->route[0].gather == FSDPI_GATHER_ALIAS;
        op = fsdpi_template_add(t, FSDP_OP_USE, FSDP_LABEL_GATHER, FSDP_STREAM_COMPUTE,
                                alias ? FSDP_POOL_SHARD : FSDP_POOL_GATHER, FSDP_POOL_SHARD);
        if (alias) op->src = fsdpi_flat_of(u, l->parts)->shard;
    } else if (kind == FSDPI_OPS_GATHER && fsdpi_shards(u) > 1) {
        op = fsdpi_template_work(t, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, gather, &l->all_gather,
                                 src, dtype, FSDP_POOL_GATHER, dtype);
        if (!op) return;
        op->in_place = (uint8_t)staged;
        if (!staged) op->src = fsdpi_flat_of(u, l->parts)->shard;
        fsdpi_template_group(op, u->desc.info.shard_comm, fsdpi_shards(u));
    } else if (kind == FSDPI_OPS_SLICE) {
        (void)fsdpi_template_work(t, FSDP_OP_COPY, FSDP_LABEL_SLICE, FSDP_STREAM_COMPUTE,
                                  &l->slice_copy, FSDP_POOL_GATHER, dtype, FSDP_POOL_SLICE, dtype);
    } else if (kind == FSDPI_OPS_SLICE_GATHER) {
        op = fsdpi_template_work(t, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, gather, &l->slice_gather,
                                 FSDP_POOL_SLICE, dtype, FSDP_POOL_GATHER, dtype);
        fsdpi_template_group(op, u->desc.slice_comm, u->desc.slices);
    }
}

// The reduction, but for what is done part by part.
static void fsdpi_template_reduce(fsdpi_templates *t, int kind) {
    const fsdp_unit *u = t->unit;
    const fsdpi_layout *l = &u->layout;
    const fsdpi_part *part = &l->parts[l->users_part];
    fsdp_buf *sgrad = fsdpi_flat_of(u, part)->grad;
    fsdp_dtype full = part->param_dtype, grad = fsdpi_grad_dtype(u->model, part->dtype);
    fsdp_op *op = NULL;
    int copy = FSDP_OP_COPY, stream = FSDP_STREAM_REDUCE, all = FSDP_STREAM_ALLREDUCE;
    int shard = kind == FSDPI_OPS_SCATTER, gradients = FSDP_POOL_GRAD, sums = FSDP_POOL_ROUT;
    if (kind == FSDPI_OPS_ZERO && l->grad_bytes > 0) {
        op = fsdpi_template_add(t, FSDP_OP_ZERO, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, 0,
                                gradients);
        op->dtype = op->out_dtype = FSDP_U8;
        op->count = op->bytes = (uint64_t)l->grad_bytes;
    } else if (kind == FSDPI_OPS_FOLD) {
        (void)fsdpi_template_work(t, copy, FSDP_LABEL_ACC, stream, &part->chunk_cat, gradients,
                                  full, gradients, full);
    } else if (kind == FSDPI_OPS_USERS) {
        op = fsdpi_template_work(t, copy, FSDP_LABEL_USERS, stream, &l->users, 0, full, gradients,
                                 full);
    } else if (shard || kind == FSDPI_OPS_PARTIAL) {
        if (fsdpi_shards(u) == 1) return;
        op = fsdpi_template_work(t, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, stream,
                                 shard ? &l->reduce_scatter : &l->to_rout, gradients, full,
                                 shard ? FSDP_POOL_SGRAD : sums, shard ? grad : l->reduce_dtype);
        fsdpi_template_group(op, u->desc.reduce_comm, fsdpi_shards(u));
        if (op && shard) op->dst = sgrad;
    } else if (kind == FSDPI_OPS_RESCALE) {
        op = fsdpi_template_work(t, copy, FSDP_LABEL_RED_OUT, stream, &part->rescale,
                                 FSDP_POOL_SGRAD, grad, FSDP_POOL_SGRAD, grad);
        if (op) op->src = op->dst = sgrad;
    } else if (kind == FSDPI_OPS_ADD) {
        op = fsdpi_template_work(t, copy, FSDP_LABEL_PARTIAL, stream, &l->partial, sums,
                                 l->reduce_dtype, FSDP_POOL_SGRAD, l->reduce_dtype);
        if (op) op->accumulate = 1;
    } else if (kind == FSDPI_OPS_REPLICAS && fsdpi_replicas(u) > 1) {
        op = fsdpi_template_work(t, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, all, &l->partial, sums,
                                 l->reduce_dtype, sums, l->reduce_dtype);
        if (op) op->in_place = 1;
        fsdpi_template_group(op, u->desc.replicate_comm, fsdpi_replicas(u));
    } else if (kind == FSDPI_OPS_HOOK) {
        fsdpi_template_call(t, NULL, FSDP_LABEL_ALL_REDUCE_HOOK,
                            fsdpi_replicas(u) > 1 ? all : stream, sums, sums,
                            fsdpi_call_all_reduce_hook);
    }
}

static int fsdpi_templates_max(const fsdp_unit *u) {
    return FSDPI_OPS_COUNT + 5 * u->layout.num_parts;
}

// All of a unit: its blocks and lists are there.
static void fsdpi_templates_make(fsdp_unit *u) {
    fsdpi_layout *l = &u->layout;
    fsdpi_templates t = {u, l->ops};
    for (int kind = 0; kind < FSDPI_OPS_COUNT; kind++) {
        int each = kind == FSDPI_OPS_COPY_IN || kind == FSDPI_OPS_COPY_OUT ||
                   kind == FSDPI_OPS_SUM || kind == FSDPI_OPS_FOLD_DIVIDED || kind == FSDPI_OPS_OUT;
        int trains = kind >= FSDPI_OPS_ZERO && l->num_train == 0;
        l->ops_begin[kind] = (uint16_t)(t.next - l->ops);
        if (trains) continue;
        for (int k = 0; k < l->num_parts && each; k++) fsdpi_template_part(&t, &l->parts[k], kind);
        if (!each && kind < FSDPI_OPS_ZERO) fsdpi_template_gather(&t, kind);
        if (!each && kind >= FSDPI_OPS_ZERO) fsdpi_template_reduce(&t, kind);
    }
    l->ops_begin[FSDPI_OPS_COUNT] = (uint16_t)(t.next - l->ops);
}

/* Emits the records of one kind. Their slots are those that the unit holds now; whoever names other
   buffers has written them into the template. */
static fsdp_status fsdpi_emit_kind(fsdp_unit *u, int kind) {
    fsdp_model *m = u->model;
    fsdpi_template *t = u->layout.ops + u->layout.ops_begin[kind];
    const fsdpi_template *end = u->layout.ops + u->layout.ops_begin[kind + 1];
    fsdp_status status = FSDP_OK;
    for (; t != end && !status; t++) {
        fsdp_op *op = &t->op;
        if (t->src >= FSDP_POOL_GATHER) op->src = u->state.slot[t->src];
        if (t->dst >= FSDP_POOL_GATHER) op->dst = u->state.slot[t->dst];
        if (op->src) op->src_ptr = op->src->ptr;
        if (op->dst) op->dst_ptr = op->dst->ptr;
        op->state = m->call_state;
        op->step = m->step;
        memset(op->wait, 0, sizeof op->wait);
        status = fsdpi_emit(m, op);
    }
    return status;
}

// The only record of a kind, to be changed before it is emitted; NULL: there is nothing to do.
static fsdp_op *fsdpi_only_op(fsdp_unit *u, int kind) {
    const uint16_t *begin = &u->layout.ops_begin[kind];
    return begin[0] == begin[1] ? NULL : &u->layout.ops[begin[0]].op;
}

// What all records of a kind multiply by, and whether they add to what is there.
static void fsdpi_each(fsdp_unit *u, int kind, double scale, int accumulate) {
    const uint16_t *begin = &u->layout.ops_begin[kind];
    for (int i = begin[0]; i < begin[1]; i++) {
        u->layout.ops[i].op.scale = scale;
        u->layout.ops[i].op.accumulate = (uint8_t)accumulate;
    }
}
