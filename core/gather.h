/* core/gather.h - parameters: gathered, waited for, freed, prefetched

   A part of fsdp.h, which includes it.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// The sharded block that a plain unit's gathers read, and what a wait for an alias waits for.
static fsdp_buf *fsdpi_shard_of(const fsdp_unit *u) { return fsdpi_flat_of(u, u->parts)->shard; }

static fsdp_status fsdpi_do_wait(fsdp_unit *u) {
    fsdp_model *m = u->model;
    if (u->storage != FSDP_STORAGE_IN_FLIGHT) return FSDP_OK;
    fsdp_status status = fsdpi_emit_use(m, u, FSDP_LABEL_GATHER,
                                        u->gather ? u->gather : fsdpi_shard_of(u));
    if (status) return status;
    if (u->ahead) m->ahead_bytes -= (int64_t)u->gather->bytes;
    u->ahead = 0;
    u->storage = FSDP_STORAGE_UNSHARDED;
    return FSDP_OK;
}

// A gather that nobody waited for still reads shards, here and on the peers, which the caller may
// write next: the caller's stream waits for it too.
static fsdp_status fsdpi_do_reshard(fsdp_unit *u) {
    fsdp_status status = fsdpi_do_wait(u);
    u->storage = FSDP_STORAGE_SHARDED;
    u->stale = 0;
    fsdp_status gather = fsdpi_release(u, &u->gather, FSDP_STREAM_COMPUTE);
    fsdp_status slice = fsdpi_release(u, &u->slice, FSDP_STREAM_COMPUTE);
    return status ? status : gather ? gather : slice;
}

// Shards have been written: what was gathered before is not used again.
static fsdp_status fsdpi_do_stale(fsdp_unit *u) {
    u->stale = u->storage != FSDP_STORAGE_SHARDED;
    return FSDP_OK;
}

// A view but for the gradient, whose presence is known to the caller's thread only.
static fsdp_param_view fsdpi_view_static(const fsdp_unit *u, int index) {
    const fsdpi_param *p = &u->params[index];
    const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_part_of(u, p));
    fsdp_param_view v;
    memset(&v, 0, sizeof v);
    v.unit = u->model->units[u->index];
    v.name = p->name;
    v.unit_name = u->name;
    v.user = p->user;
    v.unit_user = u->user;
    v.ordinal = p->ordinal;
    v.index = index;
    v.dtype = p->dtype;
    v.grad_dtype = fsdpi_grad_dtype(u->model, p->dtype);
    v.ndim = p->lay.ndim;
    v.shard_dim = p->lay.shard_dim;
    v.requires_grad = p->requires_grad;
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
                     op->unit->info.shard_mesh_rank * p->string_bytes[i];
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

// A user's function about a parameter (or the unit: NULL), in the order of a stream.
static fsdp_status fsdpi_emit_call(fsdp_unit *u, const fsdpi_param *p, int label, int stream,
                                   fsdp_buf *src, fsdp_buf *dst,
                                   fsdp_status (*call)(const fsdp_op *op, void *stream)) {
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_CALL, label, stream);
    op.root = p ? (int32_t)(p - u->params) : -1;
    op.src = src;
    op.dst = dst;
    op.src_ptr = src->ptr;
    op.dst_ptr = dst->ptr;
    op.call = call;
    return fsdpi_emit(u->model, &op);
}

// This rank's own part of the slot: casts, or the strings of extensions.
static fsdp_status fsdpi_copy_in(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < u->num_parts && !status; k++) {
        fsdpi_part *part = &u->parts[k];
        fsdp_buf *shard = fsdpi_flat_of(u, part)->shard;
        fsdp_op in = fsdpi_op(u->model, u, FSDP_OP_COPY, FSDP_LABEL_COPY_IN, FSDP_STREAM_GATHER);
        status = part->extended
                     ? fsdpi_emit_call(u, part->extended, FSDP_LABEL_PRE_GATHER, FSDP_STREAM_GATHER,
                                       shard, u->gather, fsdpi_call_pre_gather)
                     : fsdpi_emit_work(u->model, &in, shard, part->dtype, u->gather,
                                       part->param_dtype, &part->copy_in);
    }
    return status;
}

// What was gathered becomes contiguous parameters.
static fsdp_status fsdpi_copy_out(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < u->num_parts && !status; k++) {
        fsdpi_part *part = &u->parts[k];
        fsdp_op out = fsdpi_op(u->model, u, FSDP_OP_COPY, FSDP_LABEL_COPY_OUT, FSDP_STREAM_GATHER);
        status = part->extended ? fsdpi_emit_call(u, part->extended, FSDP_LABEL_POST_GATHER,
                                                  FSDP_STREAM_GATHER, u->gather, u->gather,
                                                  fsdpi_call_post_gather)
                                : fsdpi_emit_work(u->model, &out, u->gather, part->param_dtype,
                                                  u->gather, part->param_dtype, &part->copy_out);
    }
    return status;
}

static fsdp_status fsdpi_gather_shards(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int staged = !fsdpi_is_plain(u); // my part is brought to the slot before
    fsdp_status status = staged ? fsdpi_copy_in(u) : FSDP_OK;
    if (!status && fsdpi_shards(u) > 1) {
        fsdp_op op = fsdpi_op(m, u, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, FSDP_STREAM_GATHER);
        op.in_place = (uint8_t)staged;
        op.comm = u->info.shard_comm;
        op.group_size = fsdpi_shards(u);
        status = fsdpi_emit_work(m, &op, staged ? u->gather : fsdpi_shard_of(u), u->gather_dtype,
                                 u->gather, u->gather_dtype, &u->all_gather);
    }
    return status ? status : fsdpi_copy_out(u);
}

// From what was kept after forward, over fewer ranks; everything is in its last place already.
static fsdp_status fsdpi_gather_slices(fsdp_unit *u) {
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, FSDP_STREAM_GATHER);
    op.comm = u->slice_comm;
    op.group_size = u->slices;
    fsdp_status status = fsdpi_emit_work(u->model, &op, u->slice, u->gather_dtype, u->gather,
                                         u->gather_dtype, &u->slice_gather);
    fsdp_status released = fsdpi_release(u, &u->slice, FSDP_STREAM_GATHER);
    return status ? status : released;
}

static fsdp_status fsdpi_do_unshard(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    if (u->stale) {
        u->stale = 0;
        status = fsdpi_do_reshard(u);
    }
    if (status || u->storage == FSDP_STORAGE_IN_FLIGHT || u->storage == FSDP_STORAGE_UNSHARDED)
        return status;
    if (!fsdpi_gather_is_alias(u)) {
        status = fsdpi_acquire(u, FSDP_POOL_GATHER, &u->gather);
        if (!status) status = u->slice ? fsdpi_gather_slices(u) : fsdpi_gather_shards(u);
    }
    if (!status) u->storage = FSDP_STORAGE_IN_FLIGHT;
    return status;
}

static fsdp_status fsdpi_do_unshard_backward(fsdp_unit *u) {
    return u->unshard_in_backward ? fsdpi_do_unshard(u) : FSDP_OK;
}

// Keep 1/n of what was gathered, or nothing, or all of it.
static fsdp_status fsdpi_do_reshard_forward(fsdp_unit *u) {
    fsdp_model *m = u->model;
    if (u->reshard_after_forward == FSDP_RESHARD_NEVER) return FSDP_OK;
    if (u->reshard_after_forward == FSDP_RESHARD_ALWAYS) return fsdpi_do_reshard(u);
    fsdp_status status = fsdpi_acquire(u, FSDP_POOL_SLICE, &u->slice);
    if (status) return status;
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_SLICE, FSDP_STREAM_COMPUTE);
    status = fsdpi_emit_work(m, &op, u->gather, u->gather_dtype, u->slice, u->gather_dtype,
                             &u->slice_copy);
    if (!status) status = fsdpi_release(u, &u->gather, FSDP_STREAM_COMPUTE);
    if (!status) u->storage = FSDP_STORAGE_SHARDED_POST_FORWARD;
    return status;
}

// What is still in flight was a prefetch that nobody used.
static fsdp_status fsdpi_do_reshard_backward(fsdp_unit *u) {
    return u->reshard_after_backward || u->storage == FSDP_STORAGE_IN_FLIGHT ? fsdpi_do_reshard(u)
                                                                             : FSDP_OK;
}

// Gather a unit ahead of its use, unless that would hold more memory than prefetches may.
static fsdp_status fsdpi_prefetch(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int idle = u->storage != FSDP_STORAGE_IN_FLIGHT && u->storage != FSDP_STORAGE_UNSHARDED;
    int slot = u->classes[FSDP_POOL_GATHER];
    int64_t bytes = slot < 0 ? 0 : (int64_t)m->classes[slot].bytes, most = m->desc.prefetch_bytes;
    if ((!idle && !u->stale) || (most && m->ahead_bytes + bytes > most)) return FSDP_OK;
    fsdp_status status = fsdpi_do_unshard(u);
    if (status || !u->gather) return status;
    u->ahead = 1;
    m->ahead_bytes += bytes;
    return FSDP_OK;
}

static fsdp_status fsdpi_do_prefetch_forward(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < u->num_prefetch[0] && !status; i++)
        status = fsdpi_prefetch(u->model->units[u->prefetch[0][i]]);
    return status;
}

/* The units that were named; else the one whose forward came before this one's: it is gathered
   while this one computes. An inline device would only block earlier. */
static fsdp_status fsdpi_do_prefetch_backward(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int at = u->last_order, policy = m->desc.implicit_prefetch;
    fsdp_status status = FSDP_OK;
    if (at >= 0) u->last_order = m->order[at].previous;
    for (int i = 0; i < u->num_prefetch[1] && !status; i++) {
        fsdp_unit *target = m->units[u->prefetch[1][i]];
        if (target->unshard_in_backward) status = fsdpi_prefetch(target);
    }
    int hides = policy == FSDP_PREFETCH_DEFAULT ? m->world->mode != FSDPI_INLINE
                                                : policy == FSDP_PREFETCH_ALWAYS;
    if (u->num_prefetch[1] || at <= 0 || !hides || !m->order[at - 1].unit->unshard_in_backward)
        return status;
    return fsdpi_prefetch(m->order[at - 1].unit);
}
