/* core/pool.h - buffers and slots

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

// Owns: device memory and its slots. A slot class is (pool, size); its first acquire allocates a
// fixed number of slots, then the least recently released free one is taken, and only if none is
// free is one added. Invariants: no decision looks at an event or the clock, so memory is the same
// on every rank and at every run; a buffer is handed on only after the event of its last consumer.

static void fsdpi_buf_free(fsdp_model *m, fsdp_buf *buf) {
    fsdp_world *w = m->world;
    if (!buf || fsdpi_is_child(w)) return;
    if (!buf->part) {
        m->pool_slots[buf->pool]--;
        m->pool_bytes[buf->pool] -= (int64_t)buf->bytes;
    }
    size_t room = fsdpi_room(w, buf);
    char *ptr = buf->part ? NULL : fsdpi_open_room(w, buf);
    if (ptr && w->comm && !buf->pinned) w->comm_ops->free(w->comm, ptr, room);
    else if (ptr)
        w->device_ops->free(w->device, buf->pinned ? FSDP_MEMORY_PINNED : FSDP_MEMORY_DEVICE, ptr,
                            room);
    fsdpi_model_free(m, buf);
}

// Device memory, where peers can read it.
static fsdp_status fsdpi_buf_alloc(fsdp_model *m, fsdp_buf *buf) {
    fsdp_world *w = m->world;
    void *ptr = NULL;
    int shared = w->comm && !buf->pinned,
        kind = buf->pinned ? FSDP_MEMORY_PINNED : FSDP_MEMORY_DEVICE;
    size_t room = fsdpi_room(w, buf);
    fsdp_status status = shared ? w->comm_ops->alloc(w->comm, room, &ptr)
                                : w->device_ops->alloc(w->device, kind, room, &ptr);
    if (status)
        return fsdp_fail(w, status, "[E305] the library could not allocate %llu bytes for %s: %s",
                         (unsigned long long)buf->bytes, fsdp_model_pool_name(m, buf->pool),
                         shared ? w->comm_ops->error_text(w->comm) : fsdpi_device_text(w, status));
    buf->ptr = (char *)ptr;
    fsdpi_close_room(w, buf);
    return FSDP_OK;
}

// Can the host read it?
static int fsdpi_is_readable(const fsdp_world *w, const fsdp_buf *buf) {
    return buf->pinned || fsdpi_is_host(w);
}

// A buffer of a pool.
static fsdp_status fsdpi_buf_make(fsdp_model *m, int pool, size_t bytes, int pinned,
                                  fsdp_buf **out) {
    fsdp_buf *buf = (fsdp_buf *)fsdpi_model_alloc(m, sizeof *buf);
    *out = NULL;
    if (!buf)
        return fsdpi_no_memory(m->world, "a buffer of", fsdp_model_pool_name(m, pool), sizeof *buf);
    buf->bytes = (size_t)fsdpi_aligned(m, (int64_t)(bytes ? bytes : 1));
    buf->pool = buf->as = (uint8_t)pool;
    buf->pinned = (uint8_t)pinned;
    buf->number = ++m->num_bufs;
    m->pool_slots[pool]++;
    m->pool_bytes[pool] += (int64_t)buf->bytes;
    fsdp_status status = fsdpi_buf_alloc(m, buf);
    if (status) {
        fsdpi_buf_free(m, buf);
        return status;
    }
    m->counters.allocations++;
    *out = buf;
    return FSDP_OK;
}

static fsdp_status fsdpi_buf_new(fsdp_model *m, int pool, size_t bytes, fsdp_buf **out) {
    int offloaded = m->desc.cpu_offload && (pool == FSDP_POOL_SHARD || pool == FSDP_POOL_SGRAD);
    return fsdpi_buf_make(m, pool, bytes, offloaded, out);
}

static fsdp_status fsdpi_class_add(fsdp_model *m, fsdpi_class *c) {
    fsdp_status status = fsdpi_grow(m, (void **)&c->slots, c->count, &c->cap, sizeof *c->slots,
                                    "a list of", fsdp_pool_name(c->pool));
    if (!status) status = fsdpi_buf_new(m, c->pool, c->bytes, &c->slots[c->count]);
    if (status) return status;
    fsdp_buf *slot = c->slots[c->count++];
    if (slot->ptr && fsdpi_can_close(m->world)) slot->guard = FSDPI_IS_OPEN;
    return FSDP_OK;
}

static fsdp_status fsdpi_class_fill(fsdp_model *m, fsdpi_class *c) {
    fsdp_status status = FSDP_OK;
    for (int depth = c->ahead && m->world->mode != FSDPI_INLINE ? 2 : 1;
         !status && c->count < depth;)
        status = fsdpi_class_add(m, c);
    return status;
}

// A free slot of a class: the least recently released one, or a new one.
static inline fsdp_status fsdpi_class_take(fsdp_model *m, fsdpi_class *c, fsdp_buf **out) {
    fsdp_status status = c->count ? FSDP_OK : fsdpi_class_fill(m, c);
    fsdp_buf *best = NULL;
    for (int i = 0; i < c->count; i++) {
        fsdp_buf *buf = c->slots[i];
        if (!buf->held && (!best || buf->released < best->released)) best = buf;
    }
    if (!status && !best) {
        status = fsdpi_class_add(m, c);
        if (!status) best = c->slots[c->count - 1];
    }
    *out = best;
    return status;
}

// Between steps all free slots count as released at one time: the next step takes the same ones.
static void fsdpi_pools_rewind(fsdp_model *m) {
    fsdpi_close_free(m);
    for (int i = 0; i < m->num_classes; i++)
        for (int k = 0; k < m->classes[i].count; k++) {
            m->classes[i].slots[k]->released = 0;
            if (!m->classes[i].slots[k]->held) fsdpi_turn(m, m->classes[i].slots[k], 0);
        }
    m->release_seq = 0;
}
