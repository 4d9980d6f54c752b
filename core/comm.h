/* core/comm.h - compiled-in backends, and the one place that turns an op record into a collective

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

/* The one with this name; NULL: the first one that can serve the job, on the device of the very
   first, since a program does not move to GPUs by itself. The last entry: there is none. */
static const fsdpi_backend *fsdpi_find_backend(const char *name, int is_spread) {
    const fsdpi_backend *first = fsdpi_backends, *b = first;
    while (b->name && (name ? strcmp(name, b->name) != 0
                            : (is_spread && b->one_host) || b->alone ||
                                  b->device_ops != first->device_ops))
        b++;
    return b;
}

// Do ranks meet, so that they need a name for their job?
static int fsdpi_ranks_meet(const fsdp_comm_ops *ops) {
    const fsdpi_backend *b = fsdpi_backends;
    while (b->name && b->comm_ops() != ops) b++;
    return !b->alone;
}

/* What a rank reads from the others. Of a collective (group_size-1) times its own part; of an
   all_reduce, however a backend does it, what it has to receive at least. */
static inline uint64_t fsdpi_coll_bytes(int kind, uint64_t group_size, uint64_t nbytes) {
    if (kind == FSDP_OP_ALL_GATHER || kind == FSDP_OP_REDUCE_SCATTER || kind == FSDP_OP_ALL_TO_ALL)
        return (group_size - 1) * nbytes;
    if (kind == FSDP_OP_ALL_REDUCE)
        return (2 * (group_size - 1) * nbytes + group_size - 1) / group_size;
    return kind == FSDP_OP_SEND ? 0 : nbytes;
}

// A function of the user's has failed inside an op: the world cannot go on.
static fsdp_status fsdpi_user_fail(fsdp_world *w, const fsdp_op *op, fsdp_status result) {
    int fatal = result > FSDP_ERR_INVALID_STATE && result <= FSDP_ERR_INTERNAL;
    return fsdpi_world_fail(
        w, fatal ? result : FSDP_ERR_ABORTED,
        "rank %d: [E402] your function for %s (%s) of unit '%s' returned %d (%s)", w->rank,
        fsdp_op_name(op->kind), fsdp_op_label(op), op->what, (int)result, fsdp_status_name(result));
}

// The user's function for a unit's collective of a step; not for those of param_full.
static fsdp_custom_comm fsdpi_custom_comm(const fsdp_op *op, void **user) {
    int which = op->label == FSDP_LABEL_GATHER     ? 0
                : op->label == FSDP_LABEL_REDUCE   ? 1
                : op->label == FSDP_LABEL_REPLICAS ? 2
                                                   : -1;
    if (which < 0) return NULL;
    *user = op->unit->options.custom_user[which];
    return op->unit->options.custom[which];
}

static fsdp_status fsdpi_run_collective(fsdp_world *w, const fsdp_op *op, void *stream) {
    fsdp_coll c; // every field is set here
    c.kind = op->kind;
    c.dtype = op->dtype;
    c.out_dtype = op->out_dtype;
    c.redop = op->redop;
    c.in_place = op->in_place;
    c.accumulate = op->accumulate;
    c.label = op->label;
    c.state = op->state;
    c.scale = op->scale;
    c.root = op->root;
    c.segs = (const fsdp_seg *)op->list;
    c.num_segs = op->list_count;
    c.count = op->count;
    c.src = op->src_ptr;
    c.dst = op->dst_ptr;
    c.seq = op->seq;
    c.what = op->what;
    c.stream = stream;
    // What ranks must agree on beside kind, dtype and count, which backends compare, too; not seq:
    // they may differ in local ops. Beyond the groups of a unit they may have other optimizers.
    uint64_t factor = fsdpi_bits(op->factor);
    uint64_t root = op->kind == FSDP_OP_BROADCAST ? (uint64_t)(uint32_t)op->root << 40 : 0;
    uint64_t how = root | (uint64_t)op->out_dtype << 32 | (uint64_t)op->redop << 24 |
                   (uint64_t)op->label << 16 | (uint64_t)op->state << 8 | op->accumulate;
    uint64_t given = op->unit || op->label == FSDP_LABEL_CLIP ? op->given : 0;
    c.fingerprint = fsdpi_hash(fsdpi_hash(op->what_hash, how), op->step + given + factor);
    memcpy(c.agree, op->agree, sizeof c.agree);
    c.agree[FSDP_AGREE_FACTOR] = (uint8_t)(factor * 0x9E3779B97F4A7C15u >> 56);
    c.agree[FSDP_AGREE_STEP] = (uint8_t)op->step;
    c.agree[FSDP_AGREE_GIVEN] = (uint8_t)given;
    void *user;
    fsdp_custom_comm custom = fsdpi_custom_comm(op, &user);
    fsdp_status status = custom ? custom(user, w->comm_ops, op->comm, &c)
                                : w->comm_ops->run(op->comm, &c);
    const char *text = status ? w->comm_ops->error_text(op->comm) : "";
    if (status && custom && !*text) return fsdpi_user_fail(w, op, status);
    return status ? fsdpi_world_fail(w, status, "%s", text) : FSDP_OK;
}
