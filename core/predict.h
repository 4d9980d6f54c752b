/* core/predict.h - memory: what is allocated, what will be, and the model in words

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// The steps of a prediction: units that never reshard are open around those that do.
static fsdp_status fsdpi_rehearse(fsdp_model *m) {
    static const uint8_t calls[] = {FSDP_CALL_PRE_FORWARD, FSDP_CALL_POST_FORWARD,
                                    FSDP_CALL_PRE_BACKWARD, FSDP_CALL_POST_BACKWARD};
    fsdp_status status = FSDP_OK;
    int reshards = 0;
    for (int i = 0; i < m->num_units; i++)
        reshards |= m->units[i]->options.reshard_after_forward != FSDP_RESHARD_NEVER;
    for (int back = 0; back < 2; back++) {
        const uint8_t *call = calls + 2 * back;
        for (int pass = 0; pass < 3; pass++) { // open those around, run others, close those around
            for (int i = 0; i < m->num_units && !status; i++) {
                fsdp_unit *u = m->units[back ? m->num_units - 1 - i : i];
                int around = u->options.reshard_after_forward == FSDP_RESHARD_NEVER && reshards &&
                             m->desc.reshard_after_forward != FSDP_RESHARD_NEVER;
                if (around != (pass != 1)) continue;
                if (pass < 2) status = fsdpi_step(u, fsdpi_lookup(u, call[0]));
                for (int k = 0; back && k < u->desc.num_params; k++)
                    *fsdpi_use(u, k) |= FSDPI_USE_USED | FSDPI_USE_WRITTEN;
                if (pass > 0 && !status) status = fsdpi_step(u, fsdpi_lookup(u, call[1]));
            }
        }
    }
    return status ? status : fsdpi_finalize(m);
}

// A copy of a unit as it was made, with its own marks of use. NULL: no memory.
static fsdp_unit *fsdpi_unit_copy(fsdp_model *dry, const fsdp_unit *u) {
    size_t parts = (size_t)u->desc.num_params * sizeof *u->layout.parts,
           params = fsdpi_params_bytes(u);
    fsdp_unit *copy = (fsdp_unit *)fsdpi_model_alloc(dry, sizeof *copy + parts + params);
    if (!copy) return NULL;
    *copy = *u;
    copy->model = dry;
    copy->params = (fsdpi_param *)(void *)(copy + 1);
    copy->layout.parts = (fsdpi_part *)(void *)((char *)copy->params + params);
    memcpy(copy->params, u->params, params);
    memcpy(copy->layout.parts, u->layout.parts, parts);
    for (int k = 0; k < copy->layout.num_parts; k++)
        if (copy->layout.parts[k].extended)
            copy->layout.parts[k].extended = copy->params +
                                             (copy->layout.parts[k].extended - u->params);
    fsdpi_unit_unbuild(copy);
    memset(&copy->usage, 0, sizeof copy->usage);
    copy->usage.use = (uint64_t *)(void *)(copy->params + u->desc.num_params);
    copy->state = fsdpi_state_new();
    copy->options.sync = copy->options.all_reduce = copy->options.reshard_after_backward = 1;
    fsdpi_unit_route(copy);
    return copy;
}

// A device without memory: all that is asked of it while no record runs.
static fsdp_status fsdpi_none_alloc(fsdp_device *device, int kind, size_t size, void **ptr) {
    (void)device, (void)kind, (void)size;
    *ptr = (void *)(uintptr_t)FSDPI_ALIGN; // an address that nobody reads or writes
    return FSDP_OK;
}
static void fsdpi_none_free(fsdp_device *device, int kind, void *ptr, size_t size) {
    (void)device, (void)kind, (void)ptr, (void)size;
}
static fsdp_status fsdpi_none_event(fsdp_device *device, void **native) {
    (void)device;
    *native = NULL;
    return FSDP_OK;
}

// An extension that takes every record: none runs.
static int fsdpi_take_all(void *user, fsdp_model *model, fsdp_op *op) {
    (void)user, (void)model, (void)op;
    return 1;
}

// A copy of a model in a copy of its world, where nothing runs and no memory is had: so it walks
// the same schedule, and counts.
typedef struct fsdpi_rehearsal {
    fsdp_model model; // the first member
    fsdp_world world;
    uint32_t state; // of the world
    fsdp_device_ops device;
    fsdpi_attached taker;
} fsdpi_rehearsal;

static void fsdpi_dry_free(fsdp_model *dry) {
    if (!dry) return;
    for (int i = 0; i < dry->num_units; i++) {
        fsdpi_model_free(dry, dry->units[i]->usage.flags);
        dry->units[i]->usage.flags = NULL;
    }
    fsdpi_uncommit(dry);
    fsdpi_model_free_buffers(dry);
    for (int i = 0; i < dry->num_units; i++) fsdpi_model_free(dry, dry->units[i]);
    fsdpi_model_free(dry, dry->units);
    fsdp_allocator allocator = dry->world->boot.allocator;
    fsdpi_free(&allocator, dry);
}

static void fsdpi_dry_world(fsdpi_rehearsal *r, const fsdp_world *w) {
    r->world.boot = w->boot;
    r->world.rank = w->rank;
    r->world.size = 1; // a failure here is of this rank alone
    r->world.log_level = w->log_level;
    r->world.caps = w->caps;
    r->world.mode = w->mode;
    r->world.state = &r->state;
    r->state = 1;
    r->world.device = w->device;
    r->world.device_ops = &r->device;
    r->device.flags = w->device_ops->flags;
    r->device.alloc = fsdpi_none_alloc;
    r->device.free = fsdpi_none_free;
    r->device.event = fsdpi_none_event;
    r->taker.e.op = fsdpi_take_all;
    r->model.world = &r->world;
    r->model.attached = &r->taker;
    r->model.watch = FSDPI_OPS;
}

// Flags of use are written by the host: they are the only memory that a step touches.
static fsdp_status fsdpi_dry_flags(fsdp_model *dry) {
    for (int i = 0; i < dry->num_units; i++) dry->units[i]->usage.flags = NULL;
    for (int i = 0; i < dry->num_units; i++) {
        fsdp_unit *u = dry->units[i];
        size_t bytes = fsdpi_flags_bytes(u);
        u->usage.flags = bytes ? (char *)fsdpi_model_alloc(dry, bytes) : NULL;
        if (bytes && !u->usage.flags) return FSDP_ERR_OUT_OF_MEMORY;
        u->usage.wide = bytes ? u->usage.flags + bytes / 2 : NULL;
    }
    return FSDP_OK;
}

// A copy of the model that has run a step and counted the memory. *out: to be freed in any case.
static fsdp_status fsdpi_dry_run(const fsdp_model *m, fsdp_model **out) {
    fsdp_world *w = m->world;
    if (m->num_units == 0)
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E205] prediction: the model has no units: call fsdp_fully_shard first");
    fsdpi_rehearsal *r = (fsdpi_rehearsal *)fsdpi_alloc(&w->boot.allocator, sizeof *r);
    if (!r) return fsdpi_no_memory(w, "prediction", "", sizeof *r);
    fsdp_model *dry = *out = &r->model;
    fsdpi_dry_world(r, w);
    dry->desc = m->desc;
    dry->info = m->info;
    dry->grad_enabled = dry->is_last_backward = 1;
    dry->num_params = m->num_params;
    dry->units = (fsdp_unit **)fsdpi_model_alloc(dry, (size_t)m->num_units * sizeof *dry->units);
    fsdp_status status = fsdpi_failed(w);
    if (!dry->units) status = FSDP_ERR_OUT_OF_MEMORY;
    for (int i = 0; !status && i < m->num_units; i++) {
        dry->units[i] = fsdpi_unit_copy(dry, m->units[i]);
        if (dry->units[i]) dry->num_units++;
        else status = FSDP_ERR_OUT_OF_MEMORY;
    }
    if (!status) status = fsdpi_commit(dry);
    if (!status) status = fsdpi_dry_flags(dry);
    if (!status) status = fsdpi_rehearse(dry);
    return status ? fsdp_fail(w, status, "[E306] predict: %s", fsdp_status_text(status)) : FSDP_OK;
}

// Allocate the slots that a step will take, as the prediction counts them.
static fsdp_status fsdpi_reserve(fsdp_model *m) {
    fsdp_model *dry = NULL;
    fsdp_status status = fsdpi_commit(m);
    if (status) return status;
    status = fsdpi_dry_run(m, &dry);
    for (int i = 0; !status && i < dry->num_classes; i++) { // the model's own has been found before
        const fsdpi_class *wanted = &dry->classes[i];
        int at = fsdpi_class_find(m, wanted->pool, wanted->bytes);
        if (at < 0) status = FSDP_ERR_OUT_OF_MEMORY;
        while (!status && m->classes[at].count < wanted->count)
            status = fsdpi_class_add(m, &m->classes[at]);
    }
    fsdpi_dry_free(dry);
    return fsdpi_fail_together(m->world, status);
}

FSDP_API fsdp_status fsdp_model_reserve(fsdp_model *model) {
    return model ? fsdpi_reserve(model) : fsdpi_null(NULL, "model_reserve", "model");
}

// Bytes of the full parameters of a unit and of their gradients.
static int64_t fsdpi_unsharded(const fsdp_unit *u) {
    int64_t bytes = 0;
    for (int i = 0; i < u->desc.num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        bytes += fsdpi_bytes(p->lay.numel, p->dtype);
        if (p->requires_grad)
            bytes += fsdpi_bytes(p->lay.numel, fsdpi_grad_dtype(u->model, p->dtype));
    }
    return bytes;
}

static void fsdpi_memory(const fsdp_model *m, fsdp_memory *out) {
    memset(out, 0, sizeof *out);
    for (int pool = 0; pool < FSDP_POOL_MAX; pool++) {
        out->pool_bytes[pool] = m->pool_bytes[pool];
        out->pool_slots[pool] = m->pool_slots[pool];
        out->total_bytes += m->pool_bytes[pool];
    }
    for (int i = 0; i < m->num_units; i++) out->unsharded_bytes += fsdpi_unsharded(m->units[i]);
    out->host_bytes = m->host_bytes;
}

FSDP_API fsdp_status fsdp_model_memory(const fsdp_model *model, fsdp_memory *out) {
    if (!model || !out) return fsdpi_null(NULL, "model_memory", "model or out");
    fsdpi_memory(model, out);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_unit_memory(const fsdp_unit *unit, fsdp_memory *out) {
    if (!unit || !out) return fsdpi_null(NULL, "unit_memory", "unit or out");
    const fsdp_buf *held[FSDP_POOL_COUNT] = {NULL};
    held[FSDP_POOL_GATHER] = unit->state.slot[FSDP_POOL_GATHER];
    held[FSDP_POOL_SLICE] = unit->state.slot[FSDP_POOL_SLICE];
    held[FSDP_POOL_GRAD] = unit->state.slot[FSDP_POOL_GRAD];
    held[FSDP_POOL_RIN] = unit->state.slot[FSDP_POOL_RIN];
    held[FSDP_POOL_ROUT] = unit->state.slot[FSDP_POOL_ROUT];
    memset(out, 0, sizeof *out);
    for (int k = 0; k < unit->layout.num_parts; k++) {
        const fsdpi_part *part = &unit->layout.parts[k];
        fsdp_dtype grad = fsdpi_grad_dtype(unit->model, part->dtype);
        out->pool_bytes[FSDP_POOL_SHARD] += fsdpi_bytes(
            part->train.shard_numel + part->frozen.shard_numel, part->dtype);
        out->pool_bytes[FSDP_POOL_SGRAD] += fsdpi_bytes(part->train.shard_numel, grad);
    }
    for (int pool = 0; pool < FSDP_POOL_COUNT; pool++) {
        int slot = pool >= FSDP_POOL_GATHER && pool <= FSDP_POOL_ROUT ? unit->layout.classes[pool]
                                                                      : -1;
        if (slot >= 0) out->pool_bytes[pool] = (int64_t)unit->model->classes[slot].bytes;
        out->pool_slots[pool] = held[pool] != NULL;
        out->total_bytes += out->pool_bytes[pool];
    }
    out->unsharded_bytes = fsdpi_unsharded(unit);
    return FSDP_OK;
}

static void fsdpi_describe_param(fsdpi_text *t, const fsdp_unit *u, const fsdpi_param *p) {
    fsdpi_say(t, "    %-24s %-4s [", p->name, fsdp_dtype_name(p->dtype));
    for (int d = 0; d < p->lay.ndim; d++)
        fsdpi_say(t, "%s%lld", d ? ", " : "", (long long)p->lay.shape[d]);
    fsdpi_say(t, "] dim %d, rows %lld..%lld of %lld a rank, %s%s%s\n", p->lay.shard_dim,
              (long long)p->lay.start, (long long)(p->lay.start + p->lay.rows),
              (long long)p->lay.chunk,
              p->num_strings  ? "extension"
              : p->lay.direct ? "direct"
                              : "packed",
              p->requires_grad ? "" : ", frozen",
              fsdpi_part_of(u, p)->param_dtype == p->dtype ? "" : ", cast");
}

// "    gradients: written, keep in the slot; reduced: chunk_cat in the slot, flags of use, ..."
static void fsdpi_describe_steps(fsdpi_text *t, const char *title, const uint8_t *step) {
    static const char *const texts[FSDPI_STEP_COUNT] = {FSDPI_STEP_LIST(FSDPI_TEXT_OF)};
    fsdpi_say(t, "%s", title);
    if (!*step) fsdpi_say(t, " not now");
    for (const char *comma = " "; *step; step++, comma = ", ")
        if (*step != FSDPI_STEP_DONE) fsdpi_say(t, "%s%s", comma, texts[*step]);
}

static void fsdpi_describe_route(fsdpi_text *t, const fsdp_unit *u) {
    static const char *const gathers[] = {"nothing: the full parameters are the shards",
                                          "the shards as they are",
                                          "this rank's part of the slot, which is filled before"};
    const fsdpi_route *r = &u->route[u->state.grads.shard == FSDPI_GRADS_REDUCED];
    fsdpi_say(t, "    gathered: %s\n", gathers[r->gather]);
    if (u->layout.num_train == 0) return;
    if (r->write_shard) {
        fsdpi_say(t, "    gradients: written into the shard gradient\n");
        return;
    }
    fsdpi_describe_steps(t, "    gradients:", r->collect);
    fsdpi_describe_steps(t, "\n    reduction:", r->reduce);
    fsdpi_say(t, "\n");
}

FSDP_API size_t fsdp_model_describe(const fsdp_model *model, char *buf, size_t cap) {
    fsdpi_text t = {buf, buf ? cap : 0, 0};
    fsdp_memory mem;
    if (buf && cap) buf[0] = 0;
    if (!model) return 0;
    fsdpi_memory(model, &mem);
    fsdpi_say(&t, "model: %d units, %d parameters, rank %d of %d; collectives run ",
              model->num_units, model->num_params, model->world->rank, model->world->size);
    fsdpi_say_mode(&t, model->world);
    fsdpi_say(&t, "\n");
    for (int i = 0; i < model->num_units; i++) {
        const fsdp_unit *u = model->units[i];
        fsdp_memory own;
        (void)fsdp_unit_memory(u, &own);
        fsdpi_say(&t,
                  "  unit %d '%s': %d shards x %d replicas, gathered as %s, reduced in %s, "
                  "reshard_after_forward %d; bytes: shard %lld, gradient %lld, gathered %lld, "
                  "unsharded %lld\n",
                  i, u->desc.name, fsdpi_shards(u), fsdpi_replicas(u),
                  fsdp_dtype_name(u->layout.gather_dtype), fsdp_dtype_name(u->layout.reduce_dtype),
                  u->options.reshard_after_forward, (long long)own.pool_bytes[FSDP_POOL_SHARD],
                  (long long)own.pool_bytes[FSDP_POOL_SGRAD],
                  (long long)own.pool_bytes[FSDP_POOL_GATHER], (long long)own.unsharded_bytes);
        fsdpi_describe_route(&t, u);
        for (int k = 0; k < u->desc.num_params; k++) fsdpi_describe_param(&t, u, &u->params[k]);
    }
    fsdpi_say(&t, "  memory:");
    for (int pool = 0; pool < FSDP_POOL_MAX; pool++)
        if (mem.pool_bytes[pool])
            fsdpi_say(&t, " %s %lld in %d,", fsdp_model_pool_name(model, pool),
                      (long long)mem.pool_bytes[pool], mem.pool_slots[pool]);
    fsdpi_say(&t, " total %lld bytes\n", (long long)mem.total_bytes);
    return t.used;
}

FSDP_API fsdp_status fsdp_model_predict(const fsdp_model *model, fsdp_memory *out) {
    fsdp_model *dry = NULL;
    if (!model || !out) return fsdpi_null(NULL, "model_predict", "model or out");
    fsdp_status status = fsdpi_dry_run(model, &dry);
    if (!status) {
        fsdpi_memory(dry, out);
        out->host_bytes = model->host_bytes;
    }
    fsdpi_dry_free(dry);
    return status;
}

FSDP_API fsdp_status fsdp_model_counters(const fsdp_model *model, fsdp_counters *out) {
    if (!model || !out) return fsdpi_null(NULL, "model_counters", "model or out");
    *out = model->counters;
    return FSDP_OK;
}
