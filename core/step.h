/* core/step.h - the end of a step: finalize, zero_grad, reset

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// The caller's stream will write shards: it comes behind gathers under way, which read them.
static fsdp_status fsdpi_shards_writable(fsdp_model *m) {
    fsdp_status status = fsdpi_failed(m->world);
    for (int i = 0; i < m->num_units && !status; i++) {
        fsdp_unit *u = m->units[i];
        if (u->state.storage == FSDP_STORAGE_IN_FLIGHT && u->state.slot[FSDP_POOL_GATHER])
            status = fsdpi_emit_use(m, u, FSDP_LABEL_GATHER, u->state.slot[FSDP_POOL_GATHER]);
    }
    return status;
}

// Shards are as the caller's stream has left them: later gathers come after.
static void fsdpi_shards_written(fsdp_model *m) {
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++)
        if (m->flats[d].shard)
            fsdpi_mark(m->world, FSDP_STREAM_COMPUTE, &m->flats[d].shard->ready, m->flats[d].shard);
}

// The caller's stream waits for all shard gradients; what has none is zero; who used what is read.
static fsdp_status fsdpi_grads_ready(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < m->num_units && !status; i++) {
        fsdp_unit *u = m->units[i];
        if (u->layout.num_train == 0 || u->state.grads.shard != FSDPI_GRADS_NONE) continue;
        for (int k = 0; k < u->layout.num_parts && !status; k++) {
            const fsdpi_part *part = &u->layout.parts[k];
            if (part->num_train)
                status = fsdpi_emit_fill(
                    m, u, FSDP_LABEL_FINAL, FSDP_STREAM_COMPUTE, fsdpi_flat_of(u, part)->grad,
                    fsdpi_grad_dtype(m, part->dtype), part->train.base, part->train.shard_numel, 0);
        }
        u->state.grads.shard = FSDPI_GRADS_ZERO;
    }
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++) {
        if (m->flats[d].grad) status = fsdpi_emit_use(m, NULL, FSDP_LABEL_FINAL, m->flats[d].grad);
        if (!status && m->flats[d].grad && m->grad_hooks) // they may have written shards
            status = fsdpi_emit_use(m, NULL, FSDP_LABEL_FINAL, m->flats[d].shard);
    }
    if (status) return status;
    int asks = 0;
    for (int i = 0; i < m->num_units; i++)
        if (m->units[i]->usage.counted && fsdpi_ranks(m->units[i]) > 1)
            asks |= fsdpi_usage_known(m->units[i]);
    int waits = asks || m->desc.cpu_offload || m->world->mode != FSDPI_NATIVE;
    if (waits) status = fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
    if (!status && asks) status = fsdpi_usage_read(m);
    for (int i = 0; i < m->num_units && !status; i++) {
        fsdp_unit *u = m->units[i];
        if (!u->usage.counted) continue;
        if (asks) fsdpi_usage_learn(u);
        if (waits && !u->state.slot[FSDP_POOL_ROUT]) u->usage.in_flight = 0; // their copy is done
        u->usage.counted = 0;
    }
    return status;
}

static void fsdpi_forget_forwards(fsdp_model *m) {
    m->num_order = 0;
    for (int i = 0; i < m->num_units; i++) {
        m->units[i]->state.forwards = 0;
        m->units[i]->state.last_order = -1;
    }
}

static fsdp_status fsdpi_finalize(fsdp_model *m) {
    fsdp_status status = fsdpi_run_units(m, FSDP_CALL_FINALIZE);
    if (!status) status = fsdpi_grads_ready(m);
    if (status) return status;
    for (int i = 0; i < m->num_units; i++) m->units[i]->told = 0;
    m->backward = 0;
    m->step++;
    fsdpi_pools_rewind(m);
    if (m->is_last_backward) fsdpi_forget_forwards(m);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_params_changed(fsdp_model *model) {
    fsdp_status status = fsdpi_model_call(model, FSDP_CALL_PARAMS_CHANGED, 1);
    if (!status) fsdpi_shards_written(model);
    return model ? fsdpi_remember(model, status) : status;
}

FSDP_API fsdp_status fsdp_finalize_backward(fsdp_model *model) {
    fsdp_status status = model ? fsdpi_failed(model->world) : FSDP_OK;
    if (status) return status;
    if (model && (model->watch & FSDPI_CALLS) &&
        fsdpi_answered(model, NULL, FSDP_CALL_FINALIZE, &status))
        return status;
    status = fsdpi_model_call(model, FSDP_CALL_FINALIZE, 0);
    if (!status) status = fsdpi_finalize(model);
    if (!status && model->step == 1 && !model->rehearsing) status = fsdpi_replicas_check(model);
    if (status || !model->hook_status) return status;
    status = model->hook_status;
    model->hook_status = FSDP_OK;
    fsdpi_set_error(model->world, model->hook_error);
    return status;
}

/* Memory for a getter that fails, so that a trainer that looks at statuses later does not crash
   before: one block of this rank alone, as large as the largest slot, for all. Finalize reports the
   failure again. NULL only where there is no memory either. */
FSDP_API void *fsdp_undefined(fsdp_model *model, fsdp_status status) {
    fsdp_world *w = model ? model->world : NULL;
    int64_t bytes = 1;
    if (!w) return NULL;
    if (!fsdpi_failed(w)) (void)fsdpi_remember(model, status);
    for (int i = 0; i < model->num_units; i++) {
        const fsdp_unit *u = model->units[i];
        if (u->layout.slot_bytes > bytes) bytes = u->layout.slot_bytes;
        if (u->layout.grad_bytes > bytes) bytes = u->layout.grad_bytes;
    }
    if ((int64_t)model->undefined_bytes >= bytes) return model->undefined;
    fsdpi_undefined_free(model);
    status = w->device_ops->alloc(w->device, FSDP_MEMORY_DEVICE, (size_t)bytes, &model->undefined);
    if (!status) model->undefined_bytes = (size_t)bytes;
    if (!status) return model->undefined;
    model->undefined = NULL;
    (void)fsdp_fail(w, status,
                    "[E310] no %lld bytes for a getter that has failed, which gives NULL: %s",
                    (long long)bytes, fsdpi_device_text(w, status));
    return NULL;
}

static inline int fsdpi_has_param(const fsdp_unit *u, int index) {
    return u && index >= 0 && index < u->desc.num_params;
}

// May a getter give what it is asked for?
static inline fsdp_status fsdpi_getter_check(fsdp_unit *u, int index, int call) {
    int exists = fsdpi_has_param(u, index);
    fsdp_status status = u ? fsdpi_failed(u->model->world) : FSDP_OK;
    if (!status && !exists) status = fsdpi_param_call(u, index, call);
    if (status) return status;
    if (fsdpi_lookup(u, call) &&
        (call != FSDP_CALL_DATA || u->state.storage == FSDP_STORAGE_UNSHARDED))
        return FSDP_OK;
    return fsdpi_wrong_call(u, call, fsdpi_call_name(call));
}

FSDP_API void *fsdp_data(fsdp_unit *unit, int index) {
    fsdp_status status = fsdpi_getter_check(unit, index, FSDP_CALL_DATA);
    if (status) return fsdp_undefined(unit ? unit->model : NULL, status);
    const fsdpi_param *p = &unit->params[index];
    if (unit->route[0].gather == FSDPI_GATHER_ALIAS)
        return fsdpi_flat_of(unit, unit->layout.parts)->shard->ptr +
               fsdpi_bytes(p->lay.shard_offset, p->dtype);
    return unit->state.slot[FSDP_POOL_GATHER]->ptr +
           fsdpi_bytes(p->lay.full_offset, fsdpi_part_of(unit, p)->param_dtype);
}

FSDP_API void *fsdp_grad(fsdp_unit *unit, int index) {
    if (fsdpi_has_param(unit, index) && !unit->params[index].requires_grad) return NULL;
    fsdp_status status = fsdpi_getter_check(unit, index, FSDP_CALL_GRAD);
    if (status) return fsdp_undefined(unit ? unit->model : NULL, status);
    const fsdpi_param *p = &unit->params[index];
    *fsdpi_use(unit, index) |= FSDPI_USE_USED | FSDPI_USE_WRITTEN;
    if (unit->state.grads.newest == FSDPI_GRADS_IN_SHARD)
        return fsdpi_flat_of(unit, unit->layout.parts)->grad->ptr +
               fsdpi_bytes(p->lay.shard_offset, p->dtype);
    return unit->state.slot[FSDP_POOL_GRAD]->ptr +
           fsdpi_bytes(p->grad_offset, fsdpi_part_of(unit, p)->param_dtype);
}

// The getter, unless the caller expects another dtype.
static void *fsdpi_get_as(fsdp_unit *u, int index, fsdp_dtype dtype, int call,
                          void *(*get)(fsdp_unit *unit, int index)) {
    const fsdpi_param *p = fsdpi_has_param(u, index) ? &u->params[index] : NULL;
    fsdp_dtype has = p ? fsdpi_part_of(u, p)->param_dtype : dtype;
    if (has == dtype || (call == FSDP_CALL_GRAD && !p->requires_grad) ||
        fsdpi_failed(u->model->world))
        return get(u, index);
    fsdp_status status = fsdpi_bad(
        u->model->world,
        "[E230] %s: parameter '%s' of unit '%s' is gathered as %s, but you ask for %s: ask for "
        "what fsdp_data_dtype says, or change param_dtype",
        fsdpi_call_name(call), p->name, u->desc.name, fsdp_dtype_name(has), fsdp_dtype_name(dtype));
    return fsdp_undefined(u->model, status);
}
FSDP_API void *fsdp_data_as(fsdp_unit *unit, int index, fsdp_dtype dtype) {
    return fsdpi_get_as(unit, index, dtype, FSDP_CALL_DATA, fsdp_data);
}
FSDP_API void *fsdp_grad_as(fsdp_unit *unit, int index, fsdp_dtype dtype) {
    return fsdpi_get_as(unit, index, dtype, FSDP_CALL_GRAD, fsdp_grad);
}

FSDP_API fsdp_dtype fsdp_data_dtype(fsdp_unit *unit, int index) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_DATA);
    if (!status) return fsdpi_part_of(unit, &unit->params[index])->param_dtype;
    if (unit) (void)fsdpi_remember(unit->model, status);
    return FSDP_DTYPE_KEEP;
}

FSDP_API fsdp_status fsdp_zero_grad(fsdp_model *model) {
    fsdp_status status = fsdpi_model_call(model, FSDP_CALL_ZERO_GRAD, 1);
    return model ? fsdpi_remember(model, status) : status;
}

FSDP_API fsdp_status fsdp_model_reset(fsdp_model *model) {
    if (!model) return fsdpi_null(NULL, "model_reset", "model");
    fsdp_status status = fsdpi_failed(model->world);
    if (status) return status;
    if ((model->watch & FSDPI_CALLS) && fsdpi_answered(model, NULL, FSDP_CALL_RESET, &status))
        return status;
    fsdpi_drain(model->world);
    if (model->layout == 0) return FSDP_OK; // no unit has begun anything; an extension may have
    status = fsdpi_announce(model, NULL, FSDP_CALL_RESET, "model_reset", FSDP_STATE_IDLE);
    if (!status) status = fsdpi_run_units(model, FSDP_CALL_RESET);
    fsdpi_forget_forwards(model);
    model->backward = 0;
    model->hook_status = FSDP_OK;
    fsdpi_pools_rewind(model);
    return status;
}
