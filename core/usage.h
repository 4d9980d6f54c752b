/* core/usage.h - who used which parameter

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// Owns: fsdpi_usage and fsdpi_param.use. A parameter is used when the caller asks where its
// gradient is written. Flags of use ride along in every reduction, summed like gradients, so that a
// parameter that no rank used is known without another collective. Who used one need not look.

// A flag for each trainable, in the two dtypes of a reduction's input. Flags are divided like
// gradients, so that one of `value`, what they are divided by, does not vanish.
static void fsdpi_usage_flag(fsdp_unit *u, fsdpi_param *p, double value) {
    fsdp_dtype dtypes[2] = {u->layout.parts[u->layout.users_part].param_dtype,
                            u->layout.reduce_dtype};
    char *flags[2] = {u->usage.flags, u->usage.wide};
    int used = (p->use & FSDPI_USE_USED) != 0;
    double flag = used ? value : 0;
    p->use = (uint8_t)((p->use & ~FSDPI_USE_FLAGGED) | (used ? FSDPI_USE_FLAGGED : 0));
    for (int i = 0; i < 2; i++)
        (void)fsdp_convert(flags[i] + (size_t)p->train_index * fsdp_dtype_size(dtypes[i]),
                           dtypes[i], &flag, FSDP_F64, 1);
}

/* Brings the flags up to date for a reduction that multiplies sums by value's reciprocal. The flags
   of a step are mostly those of the step before, so that they are seldom written. */
static void fsdpi_usage_send(fsdp_unit *u, double value) {
    int anew = value != u->usage.value, pending = u->options.reduce_unused ? 0 : FSDPI_USE_PENDING;
    for (int i = 0; i < u->desc.num_params; i++) {
        fsdpi_param *p = &u->params[i];
        int marks = p->use & (FSDPI_USE_USED | FSDPI_USE_FLAGGED);
        int differs = marks == FSDPI_USE_USED || marks == FSDPI_USE_FLAGGED;
        if (marks == 0 && !anew) continue;
        if ((differs || anew) && p->requires_grad) {
            if (u->usage.in_flight) fsdpi_drain(u->model->world); // a copy may still read them
            u->usage.in_flight = 0;
            fsdpi_usage_flag(u, p, value);
        }
        if (p->use & FSDPI_USE_USED) p->use = (uint8_t)((p->use & ~FSDPI_USE_USED) | pending);
    }
    u->usage.value = value;
    u->usage.in_flight = 1;
}

// One rank: what it used has a gradient.
static void fsdpi_usage_own(fsdp_unit *u) {
    for (int i = 0; i < u->desc.num_params; i++) {
        fsdpi_param *p = &u->params[i];
        if (p->use & FSDPI_USE_USED)
            p->use = (uint8_t)((p->use & ~FSDPI_USE_USED) | FSDPI_USE_REDUCED);
    }
}

// Takes marks away, or asks for one, of all parameters.
static void fsdpi_usage_clear(fsdp_unit *u, int use) {
    for (int i = 0; i < u->desc.num_params; i++) u->params[i].use &= (uint8_t)~use;
}

// A reduction is on its way, and the counts of users with it.
static void fsdpi_usage_sent(fsdp_unit *u) {
    u->usage.counted = 1;
    if (fsdpi_ranks(u) == 1) fsdpi_usage_own(u);
    if (!u->options.reduce_unused) fsdpi_usage_clear(u, FSDPI_USE_PENDING);
}
static int fsdpi_usage_any(const fsdp_unit *u, int use) {
    int any = 0;
    for (int i = 0; i < u->desc.num_params; i++) any |= u->params[i].use & use;
    return any;
}

// What ranks must agree on in a reduction beside the unit; by upstream's rule what was used, too.
static void fsdpi_usage_agree(const fsdp_unit *u, double factor, fsdp_op *op) {
    const fsdpi_grads *g = &u->state.grads;
    uint64_t bits, used = 0, adds = (g->shard == FSDPI_GRADS_REDUCED) | (uint64_t)g->waits << 1;
    memcpy(&bits, &factor, sizeof bits);
    for (int i = 0; i < u->desc.num_params && !u->options.reduce_unused; i++)
        used = fsdpi_hash(used, (u->params[i].use & FSDPI_USE_PENDING) != 0);
    op->what_hash = fsdpi_hash(fsdpi_hash(u->layout.hash, bits), fsdpi_hash(used, adds));
    op->agree[FSDP_AGREE_FACTOR] = (uint8_t)fsdpi_hash(1, bits);
    op->agree[FSDP_AGREE_USED] = (uint8_t)used;
    op->agree[FSDP_AGREE_ACCUMULATE] = (uint8_t)adds;
}

// The counts of users of the unit's trainables [from, from + count), as the host reads them.
static void fsdpi_usage_counts(const fsdp_unit *u, int from, int count, float *counts) {
    fsdp_dtype dtype = u->layout.parts[u->layout.users_part].dtype;
    fsdp_dtype grad = fsdpi_grad_dtype(u->model, dtype);
    const fsdpi_flat_block *flat = &u->model->flats[dtype];
    int64_t at = fsdpi_bytes(u->layout.users_base - flat->train_numel + from, grad);
    (void)fsdp_convert(counts, FSDP_F32, flat->users + at, grad, count);
}

// Did a rank use a trainable parameter that has been reduced? The counts are read if need be.
static int fsdpi_usage_of(const fsdp_unit *u, const fsdpi_param *p) {
    float users = 0;
    if ((p->use & FSDPI_USE_REDUCED) || fsdpi_ranks(u) == 1)
        return (p->use & FSDPI_USE_REDUCED) != 0;
    fsdpi_usage_counts(u, p->train_index, 1, &users);
    return users != 0.0f;
}

// Brings the counts of users, which have been reduced, to where the host can read them.
static fsdp_status fsdpi_usage_read(fsdp_model *m) {
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

/* Marks what this rank used as reduced. Returns whether something is left, for which the host has
   to look at the counts. */
static int fsdpi_usage_known(fsdp_unit *u) {
    int asks = 0;
    for (int i = 0; i < u->desc.num_params; i++) {
        fsdpi_param *p = &u->params[i];
        if (p->use & FSDPI_USE_FLAGGED) p->use |= FSDPI_USE_REDUCED;
        asks |= p->requires_grad && !(p->use & FSDPI_USE_REDUCED);
    }
    return asks;
}

// Marks what other ranks used: their counts have been read.
static void fsdpi_usage_learn(fsdp_unit *u) {
    float counts[64];
    for (int i = 0, known = 0; i < u->desc.num_params && fsdpi_ranks(u) > 1; i++) {
        fsdpi_param *p = &u->params[i];
        int at = p->train_index;
        if (!p->requires_grad) continue;
        if (at == known) { // trainables are numbered in the order of parameters
            int count = u->layout.num_train - at < 64 ? u->layout.num_train - at : 64;
            fsdpi_usage_counts(u, at, count, counts);
            known += count;
        }
        if (counts[at % 64] != 0.0f) p->use |= FSDPI_USE_REDUCED;
    }
}
