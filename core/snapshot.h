/* core/snapshot.h - what a step changes, saved and brought back

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

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
    fsdpi_walk_bytes(w, &m->given, sizeof m->given);
    fsdpi_walk_bytes(w, &m->release_seq, sizeof m->release_seq);
    fsdpi_walk_bytes(w, &m->ahead_bytes, sizeof m->ahead_bytes);
    fsdpi_walk_bytes(w, &m->num_order, sizeof m->num_order);
    fsdpi_walk_bytes(w, m->order, (size_t)m->num_order * sizeof *m->order); // it does not shrink
    fsdpi_walk_bytes(w, &m->hook_status, sizeof m->hook_status);
    fsdpi_walk_bytes(w, m->hook_error, sizeof m->hook_error);
    fsdpi_walk_bytes(w, &m->norm_type, sizeof m->norm_type);
    fsdpi_walk_bytes(w, &m->counters, sizeof m->counters);
    for (int i = 0; i < m->num_units; i++) fsdpi_walk_unit(w, m->units[i]);
    for (int i = 0; i < m->num_classes; i++)
        for (int k = 0; k < m->classes[i].count; k++) fsdpi_walk_buf(w, m->classes[i].slots[k]);
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        fsdpi_walk_buf(w, m->flats[d].shard);
        fsdpi_walk_buf(w, m->flats[d].grad);
    }
    fsdpi_walk_buf(w, m->scalar);
}

// What a snapshot was taken of: slots may be others since.
typedef struct fsdpi_taken_of {
    const void *owner; // model or unit
    uint64_t layout, trims, size;
    int64_t slots;
} fsdpi_taken_of;

static fsdpi_taken_of fsdpi_taken_now(const fsdp_model *m, const void *owner, size_t size) {
    fsdpi_taken_of now = {owner, m->layout, m->trims, size, 0};
    for (int i = 0; i < m->num_classes; i++) now.slots += m->classes[i].count;
    return now;
}

// Is it of this model or unit, as that is now?
static fsdp_status fsdpi_taken_check(fsdp_model *m, const void *owner, const void *buf,
                                     size_t nbytes, const char *what) {
    fsdpi_taken_of then, now = fsdpi_taken_now(m, owner, nbytes);
    int good = nbytes >= sizeof then;
    if (good) memcpy(&then, buf, sizeof then);
    if (good && memcmp(&then, &now, sizeof now) == 0) return FSDP_OK;
    return fsdpi_bad(m->world,
                     "[E916] %s: the snapshot of %llu bytes is of another model or unit, or slots "
                     "were made or freed since: take it again",
                     what, (unsigned long long)nbytes);
}

FSDP_API size_t fsdp_model_snapshot(const fsdp_model *model, void *buf, size_t cap) {
    size_t head = sizeof(fsdpi_taken_of);
    fsdpi_walk w = {(char *)buf, buf ? cap : 0, head, FSDPI_SAVE};
    if (!model || !model->committed) return 0;
    fsdpi_walk_model(&w, (fsdp_model *)(uintptr_t)model); // which saving does not change
    fsdpi_taken_of now = fsdpi_taken_now(model, model, w.used);
    if (w.cap >= head) memcpy(buf, &now, head);
    return w.used;
}

FSDP_API fsdp_status fsdp_model_restore(fsdp_model *model, const void *buf, size_t nbytes) {
    if (!model || !buf) return fsdpi_null_of(model, "model_restore", "model or buf");
    fsdp_status status = fsdpi_taken_check(model, model, buf, nbytes, "model_restore");
    if (status) return status;
    fsdpi_walk w = {(char *)(uintptr_t)buf, nbytes, sizeof(fsdpi_taken_of), FSDPI_LOAD};
    fsdpi_drain(model->world); // flags of use may still be read
    fsdpi_walk_model(&w, model);
    return fsdpi_failed(model->world);
}

FSDP_API size_t fsdp_unit_snapshot(const fsdp_unit *unit, void *buf, size_t cap) {
    size_t head = sizeof(fsdpi_taken_of), size = head + sizeof unit->state;
    if (!unit) return 0;
    if (!buf || cap < size) return size;
    fsdpi_taken_of now = fsdpi_taken_now(unit->model, unit, size);
    memcpy(buf, &now, head);
    memcpy((char *)buf + head, &unit->state, sizeof unit->state);
    return size;
}

// Bytes of the slot of a unit that was gathered ahead: they count towards prefetch_bytes.
static int64_t fsdpi_ahead_bytes(const fsdpi_state *s) {
    return s->ahead ? (int64_t)s->slot[FSDP_POOL_GATHER]->bytes : 0;
}

FSDP_API fsdp_status fsdp_unit_restore(fsdp_unit *unit, const void *buf, size_t nbytes) {
    if (!unit || !buf)
        return fsdpi_null_of(unit ? unit->model : NULL, "unit_restore", "unit or buf");
    fsdp_model *m = unit->model;
    fsdpi_state *s = &unit->state;
    fsdp_status status = fsdpi_taken_check(m, unit, buf, nbytes, "unit_restore");
    if (status) return status;
    m->ahead_bytes -= fsdpi_ahead_bytes(s);
    memcpy(s, (const char *)buf + sizeof(fsdpi_taken_of), sizeof *s);
    m->ahead_bytes += fsdpi_ahead_bytes(s);
    s->last_order = -1; // the record of forwards is another one
    if (s->training == FSDP_STATE_PRE_BACKWARD || s->training == FSDP_STATE_POST_BACKWARD)
        m->backward = 1;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++)
        if (s->slot[pool]) s->slot[pool]->held = 1;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_unit_flag_use(fsdp_unit *unit) {
    if (!unit) return fsdpi_null(NULL, "unit_flag_use", "unit");
    fsdp_status status = fsdpi_failed(unit->model->world);
    if (!status && unit->usage.flags && fsdpi_ranks(unit) > 1)
        fsdpi_usage_send(unit, fsdpi_route_now(unit)->factor / unit->state.grads.divided);
    return status;
}
