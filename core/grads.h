/* core/grads.h - gradients: written, collected, reduced

   A part of fsdp.h, which includes it.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// Zero what the caller's backward does not store to: padding, in its own slot layout.
static fsdp_status fsdpi_zero_padding(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int world = fsdpi_shards(u);
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < u->num_params && !status; i++) {
        const fsdpi_param *p = &u->params[i];
        if (!p->requires_grad) continue;
        status = fsdpi_emit_fill(m, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, u->grad,
                                 fsdpi_part_of(u, p)->param_dtype, p->grad_offset + p->lay.numel,
                                 world * p->lay.shard_numel - p->lay.numel, 0);
    }
    for (int k = 0; k < u->num_parts && u->pad_rin && !status; k++) {
        const fsdpi_part *part = &u->parts[k];
        int64_t packed = part->train.packed_numel;
        status = fsdpi_emit_fill(
            m, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, u->grad, part->param_dtype,
            part->grad + world * (part->train.shard_numel - packed), world * packed, 0);
    }
    return status;
}

// The caller's stream writes a buffer from here on: it waits for those who read it.
static fsdp_status fsdpi_caller_writes(fsdp_unit *u, fsdp_buf *buf) {
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_USE, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE);
    op.dst = buf;
    return fsdpi_emit(u->model, &op);
}

// One rank whose gradient is the shard gradient as it is written.
static int fsdpi_grad_is_alias(const fsdp_unit *u) {
    fsdp_dtype dtype = u->parts->dtype;
    return fsdpi_ranks(u) == 1 && fsdpi_is_plain(u) && u->reduce_dtype == dtype &&
           fsdpi_grad_dtype(u->model, dtype) == dtype && u->sync && !u->rin &&
           (u->divide_factor == 0 || u->divide_factor == 1) && !u->all_reduce_hook &&
           !(u->model->desc.grads_overwrite && u->has_grad);
}

/* Where gradients will be written: zero, or what earlier microbatches left. */
static fsdp_status fsdpi_do_grads(fsdp_unit *u) {
    fsdp_model *m = u->model;
    if (u->num_train == 0 || u->grad) return FSDP_OK;
    u->grad_alias = (uint8_t)fsdpi_grad_is_alias(u);
    if (u->grad_alias) {
        fsdp_buf *sgrad = fsdpi_flat_of(u, u->parts)->grad;
        int fill = !u->has_grad && !u->grad_is_zero;
        u->grad_is_zero = 0;
        return fill ? fsdpi_emit_fill(m, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, sgrad,
                                      u->parts->dtype, u->parts->train.base, u->train_numel, 0)
                    : fsdpi_caller_writes(u, sgrad);
    }
    fsdp_status status = fsdpi_acquire(u, FSDP_POOL_GRAD, &u->grad);
    if (status) return status;
    if (!m->desc.grads_overwrite)
        return fsdpi_emit_fill(m, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, u->grad, FSDP_U8, 0,
                               u->grad_bytes, 0);
    for (int i = 0; i < u->num_params; i++) u->params[i].written = 0;
    status = fsdpi_zero_padding(u);
    return status ? status : fsdpi_caller_writes(u, u->grad);
}

// With grads_overwrite nothing was zeroed: what this rank did not store must not count.
static fsdp_status fsdpi_zero_unused(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < u->num_params && !status; i++) {
        const fsdpi_param *p = &u->params[i];
        if (!p->requires_grad || p->written) continue;
        status = fsdpi_emit_fill(u->model, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, u->grad,
                                 fsdpi_part_of(u, p)->param_dtype, p->grad_offset, p->lay.numel, 0);
    }
    return status;
}

static double fsdpi_factor(const fsdp_unit *u) {
    return u->divide_factor != 0 ? u->divide_factor : (double)fsdpi_ranks(u);
}

/* A reduction divides by `factor` in all: by `before`, a power of two, what goes into an f16 sum,
   so that it stays in range, and by the rest what comes out.
   Source: torch: _get_gradient_divide_factors. */
static double fsdpi_divide_before(const fsdp_unit *u) {
    double before = 1, factor = fsdpi_factor(u);
    if (u->reduce_dtype != FSDP_F16 || fsdpi_ranks(u) == 1) return before;
    while (fmod(factor, before) == 0 && factor / before > before) before *= 2;
    return before;
}

// Gradients as they were written -> `dst` in the reduce dtype: cast, chunk_cat, divided, added.
static fsdp_status fsdpi_emit_acc(fsdp_unit *u, fsdp_buf *dst, int accumulate) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < u->num_parts && !status; k++) {
        fsdpi_part *part = &u->parts[k];
        fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_COPY, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE);
        op.accumulate = (uint8_t)accumulate;
        op.scale = 1.0 / u->before;
        status = fsdpi_emit_work(u->model, &op, u->grad, part->param_dtype, dst, u->reduce_dtype,
                                 &part->acc);
    }
    return status;
}

// Bring gradients to the reduce input, where earlier microbatches may be.
static fsdp_status fsdpi_accumulate(fsdp_unit *u) {
    int held = u->rin != NULL;
    fsdp_status status = held ? FSDP_OK : fsdpi_acquire(u, FSDP_POOL_RIN, &u->rin);
    if (!status && !held && u->pad_rin)
        status = fsdpi_emit_fill(u->model, u, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE, u->rin,
                                 u->reduce_dtype, 0, u->reduce_numel, 0);
    if (!status) status = fsdpi_emit_acc(u, u->rin, held);
    return status ? status : fsdpi_release(u, &u->grad, FSDP_STREAM_REDUCE);
}

// A flag for each trainable, in the two dtypes of a reduction's input. Flags are divided like
// gradients, so that one of `value`, what they are divided by, does not vanish.
static void fsdpi_set_flag(fsdp_unit *u, fsdpi_param *p, double value) {
    fsdp_dtype dtypes[2] = {u->parts[u->users_part].param_dtype, u->reduce_dtype};
    char *flags[2] = {u->flags, u->wide_flags};
    double flag = p->used ? value : 0;
    p->flag = p->used;
    for (int i = 0; i < 2; i++)
        (void)fsdp_convert(flags[i] + (size_t)p->user_index * fsdp_dtype_size(dtypes[i]), dtypes[i],
                           &flag, FSDP_F64, 1);
}

/* Who used which parameter rides along: num_train flags for every rank, summed like gradients. The
   flags of a step are mostly those of the step before, so that they are seldom written. */
static fsdp_status fsdpi_emit_users(fsdp_unit *u, fsdp_buf *input, fsdp_dtype dtype) {
    fsdp_model *m = u->model;
    double value = fsdpi_factor(u) / u->before;
    int anew = value != u->flag_value;
    if (m->dry) return FSDP_OK;
    for (int i = 0; i < u->num_params && !u->reduce_unused; i++)
        u->params[i].pending |= u->params[i].used;
    for (int i = 0; i < u->num_params; i++) {
        fsdpi_param *p = &u->params[i];
        if ((p->used != p->flag || anew) && p->requires_grad) {
            if (u->flags_read) fsdpi_drain(m->world); // a copy may still read them
            u->flags_read = 0;
            fsdpi_set_flag(u, p, value);
        }
        p->used = 0;
    }
    u->flag_value = value;
    u->flags_read = 1;
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_USERS, FSDP_STREAM_REDUCE);
    op.count = u->users.count;
    op.bytes = op.count * fsdp_dtype_size(dtype);
    op.dtype = op.out_dtype = (uint8_t)dtype;
    op.list = u->users.blocks;
    op.list_count = 1;
    op.dst = input;
    op.src_ptr = input == u->rin ? u->wide_flags : u->flags;
    op.dst_ptr = input->ptr;
    return fsdpi_emit(m, &op);
}

// One rank: who used a parameter is known here.
static void fsdpi_own_users(fsdp_unit *u) {
    for (int i = 0; i < u->num_params && !u->model->dry; i++) {
        u->params[i].has_grad |= u->params[i].used;
        u->params[i].used = 0;
    }
}

// What ranks must agree on in a reduction: the unit, the factor; by upstream's rule what was used.
static uint64_t fsdpi_reduce_hash(const fsdp_unit *u, double factor) {
    uint64_t bits;
    memcpy(&bits, &factor, sizeof bits);
    uint64_t h = fsdpi_hash(u->desc_hash, bits);
    for (int i = 0; i < u->num_params && !u->reduce_unused; i++)
        h = fsdpi_hash(h, u->params[i].used | u->params[i].pending);
    return h;
}

// Did any rank use a trainable parameter that has been reduced?
static int fsdpi_was_used(const fsdp_unit *u, const fsdpi_param *p) {
    fsdp_dtype dtype = u->parts[u->users_part].dtype, grad = fsdpi_grad_dtype(u->model, dtype);
    const fsdpi_flat_block *flat = &u->model->flats[dtype];
    int64_t at = fsdpi_bytes(u->users_base - flat->train_numel + p->user_index, grad);
    float users = 0;
    if (p->has_grad || fsdpi_ranks(u) == 1) return p->has_grad;
    (void)fsdp_convert(&users, FSDP_F32, flat->users + at, grad, 1);
    return users != 0.0f;
}

// Bring the counts of users, which have been reduced, to where fsdpi_was_used finds them.
static fsdp_status fsdpi_read_users(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++) {
        const fsdpi_flat_block *flat = &m->flats[d];
        fsdp_dtype grad = fsdpi_grad_dtype(m, d);
        int64_t bytes = fsdpi_bytes(flat->grad_numel - flat->train_numel, grad);
        if (!flat->users) continue;
        const char *counts = flat->grad->ptr + fsdpi_bytes(flat->train_numel, grad);
        if (counts != flat->users)
            status = fsdpi_transfer(m->world, flat->users, counts, (size_t)bytes);
    }
    return status;
}

// Is the sum over the shard group the shard gradient itself: nothing to do behind the reduction?
static int fsdpi_is_straight(const fsdp_unit *u) {
    fsdp_dtype grad = fsdpi_grad_dtype(u->model, u->parts[u->users_part].dtype);
    if (fsdpi_shards(u) == 1 || fsdpi_replicas(u) > 1 || u->train_parts > 1 || u->all_reduce_hook ||
        u->model->desc.cpu_offload)
        return 0;
    return fsdpi_can_fuse(u) ? fsdpi_is_wide(u->reduce_dtype)
                             : u->reduce_dtype == grad && !u->has_grad;
}

/* Reduce input -> the sums over the shard group: to the shard gradient if that is all, else to the
   unit's reduce output, added to what waits there for an all-reduce. */
static fsdp_status fsdpi_reduce_scatter(fsdp_unit *u, fsdp_buf **input, fsdp_dtype dtype,
                                        uint64_t used, int straight, double scale) {
    fsdp_model *m = u->model;
    const fsdpi_part *part = &u->parts[u->users_part];
    fsdp_buf *sgrad = fsdpi_flat_of(u, part)->grad, *fresh = NULL;
    fsdp_dtype grad = fsdpi_grad_dtype(m, part->dtype), out = straight ? grad : u->reduce_dtype;
    int fused = fsdpi_can_fuse(u), adds = u->rout && fused && fsdpi_is_wide(u->reduce_dtype);
    fsdp_status status = straight || adds ? FSDP_OK : fsdpi_acquire(u, FSDP_POOL_ROUT, &fresh);
    if (status) return status;
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, FSDP_STREAM_REDUCE);
    op.comm = u->reduce_comm;
    op.group_size = fsdpi_shards(u);
    op.what_hash = used;
    if (straight && fused) op.scale = scale;
    op.accumulate = (uint8_t)(straight ? fused && u->has_grad : adds);
    status = fsdpi_emit_work(m, &op, *input, dtype,
                             straight ? sgrad
                             : adds   ? u->rout
                                      : fresh,
                             out, straight ? &u->reduce_scatter : &u->to_rout);
    if (!status) status = fsdpi_release(u, input, FSDP_STREAM_REDUCE);
    if (!status && straight && !fused) {
        fsdp_op rescale = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_RED_OUT, FSDP_STREAM_REDUCE);
        rescale.scale = scale;
        status = fsdpi_emit_work(m, &rescale, sgrad, grad, sgrad, grad, &part->rescale);
    }
    if (!status && fresh && u->rout) {
        fsdp_op add = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_PARTIAL, FSDP_STREAM_REDUCE);
        add.accumulate = 1;
        status = fsdpi_emit_work(m, &add, fresh, out, u->rout, out, &u->partial);
        if (!status) status = fsdpi_release(u, &fresh, FSDP_STREAM_REDUCE);
    } else if (fresh) {
        u->rout = fresh;
    }
    return status;
}

static fsdp_status fsdpi_call_all_reduce_hook(const fsdp_op *op, void *stream) {
    fsdp_unit *u = op->unit->model->units[op->unit->index];
    return u->all_reduce_hook(u->all_reduce_user, u, op->dst_ptr, u->train_numel, u->reduce_dtype,
                              stream);
}

// Where the last copy to the shard gradients runs.
static int fsdpi_out_stream(const fsdp_unit *u) {
    return fsdpi_replicas(u) > 1 ? FSDP_STREAM_ALLREDUCE : FSDP_STREAM_REDUCE;
}

// Sums over the shard group -> shard gradients: over the replicas, the user's hook, divide, cast,
// add to what is there.
static fsdp_status fsdpi_red_out(fsdp_unit *u, fsdp_buf **from, fsdp_dtype dtype, uint64_t used,
                                 double scale) {
    fsdp_model *m = u->model;
    int stream = fsdpi_out_stream(u);
    fsdp_status status = FSDP_OK;
    if (fsdpi_replicas(u) > 1) {
        fsdp_op op = fsdpi_op(m, u, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, stream);
        op.comm = u->replicate_comm;
        op.group_size = fsdpi_replicas(u);
        op.what_hash = used;
        op.in_place = 1;
        status = fsdpi_emit_work(m, &op, *from, dtype, *from, dtype, &u->partial);
    }
    if (!status && u->all_reduce_hook)
        status = fsdpi_emit_call(u, NULL, FSDP_LABEL_ALL_REDUCE_HOOK, stream, *from, *from,
                                 fsdpi_call_all_reduce_hook);
    for (int k = 0; k < u->num_parts && !status; k++) {
        const fsdpi_part *part = &u->parts[k];
        fsdp_op op = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_RED_OUT, stream);
        op.scale = scale;
        op.accumulate = u->has_grad;
        if (part->num_train)
            status = fsdpi_emit_work(m, &op, *from, dtype, fsdpi_flat_of(u, part)->grad,
                                     fsdpi_grad_dtype(m, part->dtype), &part->red_out);
    }
    fsdp_status released = fsdpi_release(u, from, stream);
    return status ? status : released;
}

static fsdp_status fsdpi_call_grad_hook(const fsdp_op *op, void *stream) {
    const fsdp_unit *u = op->unit;
    const fsdpi_param *p = &u->params[op->root];
    const fsdpi_part *part = fsdpi_part_of(u, p);
    fsdp_dtype dtype = fsdpi_grad_dtype(u->model, part->dtype);
    fsdp_param_view v = fsdpi_view_static(op->unit, op->root);
    v.shard_grad = fsdpi_flat_of(u, part)->grad->ptr + fsdpi_bytes(p->lay.shard_offset, dtype);
    return fsdpi_was_used(u, p) ? p->grad_hook(p->grad_hook_user, &v, stream) : FSDP_OK;
}

static int fsdpi_has_hooks(const fsdp_unit *u) {
    int any = 0;
    for (int i = 0; i < u->num_params; i++)
        any |= u->params[i].grad_hook && u->params[i].requires_grad;
    return any && !u->model->dry;
}

// The shard gradients of a unit are on their way: whoever waits for a parameter's is told.
static fsdp_status fsdpi_grads_done(fsdp_unit *u, int stream) {
    fsdp_status status = FSDP_OK;
    u->has_grad = u->counted = 1;
    u->grad_is_zero = 0;
    if (fsdpi_ranks(u) == 1) fsdpi_own_users(u);
    if (u->reduce_unused && !u->model->grad_hooks) return FSDP_OK;
    if (u->model->world->mode == FSDPI_NATIVE && fsdpi_has_hooks(u)) { // they are called at once
        status = fsdpi_sync(u->model->world, stream);
        if (!status) status = fsdpi_read_users(u->model);
    }
    for (int i = 0; i < u->num_params && !status; i++) {
        fsdpi_param *p = &u->params[i];
        const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_part_of(u, p));
        p->pending = 0;
        if (!p->grad_hook || !p->requires_grad) continue;
        (void)fsdpi_do_stale(u); // the hook may write shards
        status = fsdpi_emit_call(u, p, FSDP_LABEL_GRAD_HOOK, stream, flat->grad, flat->shard,
                                 fsdpi_call_grad_hook);
    }
    return status;
}

// Is a reduction due now? One shard has no sums to keep but the gradients themselves.
static int fsdpi_syncs(const fsdp_unit *u) {
    return u->sync && (u->all_reduce || fsdpi_shards(u) > 1 || fsdpi_replicas(u) == 1);
}

// What backward wrote goes to where it is summed up, unless it can stay in the slot.
static fsdp_status fsdpi_collect(fsdp_unit *u) {
    int overwrite = u->model->desc.grads_overwrite;
    fsdp_dtype dtype = u->parts[u->users_part].param_dtype;
    fsdp_status status = overwrite ? fsdpi_zero_unused(u) : FSDP_OK;
    if (!u->rin && !u->rout) u->before = fsdpi_divide_before(u); // what waits has been divided
    if (!status && !u->model->dry)                               // the caller wrote it
        status = fsdpi_mark(u->model->world, FSDP_STREAM_COMPUTE, &u->grad->ready);
    if (!status) status = fsdpi_marker(u, FSDP_OP_WROTE, FSDP_STREAM_COMPUTE, u->grad);
    int elsewhere = u->rin || fsdpi_must_convert(u, u->all_reduce_hook != NULL) ||
                    (!fsdpi_syncs(u) && (overwrite || dtype != u->reduce_dtype));
    return status || !elsewhere ? status : fsdpi_accumulate(u);
}

// The gradients in the slot become a reduce input where they are.
static fsdp_status fsdpi_chunk_cat(fsdp_unit *u) {
    fsdpi_part *part = &u->parts[u->users_part];
    if (u->before != 1) return fsdpi_emit_acc(u, u->grad, 0);
    fsdp_op cat = fsdpi_op(u->model, u, FSDP_OP_COPY, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE);
    return fsdpi_emit_work(u->model, &cat, u->grad, part->param_dtype, u->grad, part->param_dtype,
                           &part->chunk_cat);
}

static int fsdpi_any_used(const fsdp_unit *u) {
    int any = u->model->dry;
    for (int i = 0; i < u->num_params; i++) any |= u->params[i].used;
    return any;
}

// Reduce what was collected: over the shard group, over the replicas, to the shard gradients.
static fsdp_status fsdpi_reduce_unit(fsdp_unit *u) {
    double factor = fsdpi_factor(u), scale = u->before / factor;
    int straight = fsdpi_is_straight(u), one = fsdpi_shards(u) == 1;
    fsdp_status status = FSDP_OK;
    fsdp_buf **input = u->rin ? &u->rin : &u->grad;
    fsdp_dtype dtype = u->rin ? u->reduce_dtype : u->parts[u->users_part].param_dtype;
    uint64_t used = fsdpi_reduce_hash(u, factor);
    if (*input) {
        if (!u->rin) status = fsdpi_chunk_cat(u);
        if (!status && fsdpi_ranks(u) > 1) status = fsdpi_emit_users(u, *input, dtype);
        if (!status && !one) status = fsdpi_reduce_scatter(u, input, dtype, used, straight, scale);
    }
    if (status || (fsdpi_replicas(u) > 1 && !u->all_reduce)) return status;
    if (!straight)
        status = fsdpi_red_out(u, one ? input : &u->rout, one ? dtype : u->reduce_dtype, used,
                               scale);
    return status ? status : fsdpi_grads_done(u, fsdpi_out_stream(u));
}

/* End of a unit's backward. Without sync gradients stay, in the slot where they were written or, if
   they are to be widened or would be overwritten, summed in the reduce input; without all_reduce,
   in the reduce output. */
static fsdp_status fsdpi_do_reduce(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    if (u->num_train == 0) return FSDP_OK;
    if (!u->reduce_unused && !fsdpi_any_used(u) && !u->rout) {
        status = fsdpi_release(u, &u->rin, FSDP_STREAM_REDUCE);
        fsdp_status grad = fsdpi_release(u, &u->grad, FSDP_STREAM_COMPUTE);
        return status ? status : grad;
    }
    if (u->grad_alias) { // other units may have written the block meanwhile: the event is for both
        status = fsdpi_caller_writes(u, fsdpi_flat_of(u, u->parts)->grad);
        return status ? status : fsdpi_grads_done(u, FSDP_STREAM_COMPUTE);
    }
    if (u->grad) status = fsdpi_collect(u);
    return status || !fsdpi_syncs(u) ? status : fsdpi_reduce_unit(u);
}

// Finalize: gradients of earlier microbatches of a unit that this backward did not reach.
static fsdp_status fsdpi_do_leftovers(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    int waits = u->rout && !u->all_reduce && !u->grad && !u->rin; // for an all-reduce
    if (!u->sync || waits || !(u->grad || u->rin || u->rout)) return FSDP_OK;
    for (int k = 0; k < u->num_parts && !status; k++) // the caller may have read what was reduced
        if (u->parts[k].num_train)
            status = fsdpi_caller_writes(u, fsdpi_flat_of(u, &u->parts[k])->grad);
    return status ? status : fsdpi_do_reduce(u);
}

static fsdp_status fsdpi_do_zero_grad(fsdp_unit *u) {
    u->has_grad = 0;
    for (int i = 0; i < u->num_params; i++) u->params[i].has_grad = 0;
    return FSDP_OK;
}

// After reset nothing of a step is left. The streams have been drained.
static fsdp_status fsdpi_do_drop(fsdp_unit *u) {
    fsdp_buf **slots[3] = {&u->grad, &u->rin, &u->rout};
    fsdp_status status = fsdpi_do_reshard(u);
    for (int i = 0; i < 3; i++) {
        fsdp_status released = fsdpi_release(u, slots[i], FSDP_STREAM_COMPUTE);
        if (!status) status = released;
    }
    for (int i = 0; i < u->num_params; i++) u->params[i].used = u->params[i].pending = 0;
    u->forwards = 0;
    u->last_order = -1;
    u->counted = 0;
    (void)fsdpi_do_zero_grad(u);
    return status;
}
