/* core/snapshot.h - what a step changes, saved and brought back

   A part of fsdp.h, which includes it.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// Owns: the list of what a step changes. One walk measures, saves and restores, so that the three
// cannot differ. Gathered parameters, gradients and shards themselves are not in it.

enum { FSDPI_SAVE, FSDPI_LOAD };

typedef struct fsdpi_walk {
    char *buf;
    size_t cap, used; // what does not fit is only counted
    int way;          // FSDPI_SAVE, FSDPI_LOAD
} fsdpi_walk;

static void fsdpi_walk_bytes(fsdpi_walk *w, void *field, size_t size) {
    if (size == 0) return;
    if (w->used + size <= w->cap) {
        if (w->way == FSDPI_SAVE) memcpy(w->buf + w->used, field, size);
        else memcpy(field, w->buf + w->used, size);
    }
    w->used += size;
}

static void fsdpi_walk_buf(fsdpi_walk *w, fsdp_buf *buf) {
    if (!buf) return;
    fsdpi_walk_bytes(w, &buf->ready, sizeof buf->ready);
    fsdpi_walk_bytes(w, &buf->avail, sizeof buf->avail);
    fsdpi_walk_bytes(w, &buf->released, sizeof buf->released);
    fsdpi_walk_bytes(w, &buf->held, sizeof buf->held);
}

static void fsdpi_walk_unit(fsdpi_walk *w, fsdp_unit *u) {
    fsdpi_walk_bytes(w, &u->state, sizeof u->state);
    fsdpi_walk_bytes(w, &u->usage.value, sizeof u->usage.value);
    fsdpi_walk_bytes(w, &u->usage.in_flight, sizeof u->usage.in_flight);
    fsdpi_walk_bytes(w, &u->usage.counted, sizeof u->usage.counted);
    fsdpi_walk_bytes(w, u->usage.flags, fsdpi_flags_bytes(u));
    for (int i = 0; i < u->desc.num_params; i++)
        fsdpi_walk_bytes(w, &u->params[i].use, sizeof u->params[i].use);
}

static void fsdpi_walk_model(fsdpi_walk *w, fsdp_model *m) {
    fsdpi_walk_bytes(w, &m->backward, sizeof m->backward);
    fsdpi_walk_bytes(w, &m->call_state, sizeof m->call_state);
    fsdpi_walk_bytes(w, &m->seq, sizeof m->seq);
    fsdpi_walk_bytes(w, &m->step, sizeof m->step);
    fsdpi_walk_bytes(w, &m->release_seq, sizeof m->release_seq);
    fsdpi_walk_bytes(w, &m->ahead_bytes, sizeof m->ahead_bytes);
    fsdpi_walk_bytes(w, &m->num_order, sizeof m->num_order);
    fsdpi_walk_bytes(w, &m->hook_status, sizeof m->hook_status);
    fsdpi_walk_bytes(w, &m->counters, sizeof m->counters);
    for (int i = 0; i < m->num_units; i++) fsdpi_walk_unit(w, m->units[i]);
    for (int i = 0; i < m->num_classes; i++)
        for (int k = 0; k < m->classes[i].count; k++) fsdpi_walk_buf(w, m->classes[i].slots[k]);
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        fsdpi_walk_buf(w, m->flats[d].shard);
        fsdpi_walk_buf(w, m->flats[d].grad);
    }
}

FSDP_API size_t fsdp_model_snapshot(const fsdp_model *model, void *buf, size_t cap) {
    fsdpi_walk w = {(char *)buf, buf ? cap : 0, 0, FSDPI_SAVE};
    if (!model || !model->committed) return 0;
    fsdpi_walk_model(&w, (fsdp_model *)(uintptr_t)model); // which saving does not change
    return w.used;
}

FSDP_API fsdp_status fsdp_model_restore(fsdp_model *model, const void *buf, size_t nbytes) {
    if (!model || !buf) return fsdpi_null(model ? model->world : NULL, "model_restore");
    size_t size = fsdp_model_snapshot(model, NULL, 0);
    if (nbytes != size)
        return fsdpi_fail(model->world, FSDP_ERR_INVALID_ARG,
                          "model_restore: the snapshot has %llu bytes, expected %llu: the model "
                          "has been laid out anew, or has got more slots, since it was taken",
                          (unsigned long long)nbytes, (unsigned long long)size);
    fsdpi_walk w = {(char *)(uintptr_t)buf, nbytes, 0, FSDPI_LOAD};
    fsdpi_drain(model->world); // flags of use may still be read
    fsdpi_walk_model(&w, model);
    return fsdpi_failed(model->world);
}

FSDP_API size_t fsdp_unit_snapshot(const fsdp_unit *unit, void *buf, size_t cap) {
    if (!unit) return 0;
    if (buf && cap >= sizeof unit->state) memcpy(buf, &unit->state, sizeof unit->state);
    return sizeof unit->state;
}

FSDP_API fsdp_status fsdp_unit_restore(fsdp_unit *unit, const void *buf, size_t nbytes) {
    fsdpi_state *s = unit ? &unit->state : NULL;
    if (!s || !buf) return fsdpi_null(unit ? unit->model->world : NULL, "unit_restore");
    if (nbytes != sizeof *s)
        return fsdpi_fail(unit->model->world, FSDP_ERR_INVALID_ARG,
                          "unit_restore: the snapshot has %llu bytes, expected %llu",
                          (unsigned long long)nbytes, (unsigned long long)sizeof *s);
    memcpy(s, buf, sizeof *s);
    s->last_order = -1; // the record of forwards is another one
    if (s->training == FSDP_STATE_PRE_BACKWARD || s->training == FSDP_STATE_POST_BACKWARD)
        unit->model->backward = 1;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++)
        if (s->slot[pool]) s->slot[pool]->held = 1;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_unit_flag_use(fsdp_unit *unit) {
    if (!unit) return fsdpi_null(NULL, "unit_flag_use");
    fsdp_status status = fsdpi_failed(unit->model->world);
    if (!status && unit->usage.flags && fsdpi_ranks(unit) > 1)
        fsdpi_usage_send(unit, fsdpi_route_now(unit)->factor / unit->state.grads.divided);
    return status;
}
