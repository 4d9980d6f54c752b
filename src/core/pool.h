/* core/pool.h - buffers, slot classes, and units that acquire and release slots

   State: a model's buffers, and the slots of its classes. A slot class is a pool and a size. Its
   first acquire allocates one or two slots. Later ones take the free slot that was released first;
   a slot is added if none is free. No decision depends on an event or the clock: memory is equal on
   all ranks and in all runs. A slot's first writer waits for the event of the slot's last release.
   Callers: gather.h, grads.h and template.h (slots); commit.h, extend.h and params.h (buffers).

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_POOL_H
#define FSDPI_CORE_POOL_H

#include "../base/macros.h"
#include "../base/text.h"
#include "alloc.h"
#include "error.h"
#include "grad_path.h"
#include "guard.h"
#include "layout.h"
#include "objects.h"
#include "ops.h"
#include "run.h"
#include "ext_dispatch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fsdpi_buf_free(fsdp_model *m, fsdp_buf *buf) {
    fsdp_world *w = m->world;
    if (!buf || fsdpi_is_child(w)) return;
    if (!buf->is_view) {
        m->pool_slots[buf->pool]--;
        m->pool_bytes[buf->pool] -= (int64_t)buf->bytes;
    }
    size_t room = buf->bytes;
    char *ptr = buf->is_view ? NULL : buf->ptr;
    if (ptr) FSDPI_GUARD((room = fsdpi_room(w, buf), ptr = fsdpi_open_room(w, buf)));
    if (ptr && w->comm && !buf->pinned) w->comm_ops->free(w->comm, ptr, room);
    else if (ptr)
        w->device_ops->free(w->device, buf->pinned ? FSDP_MEMORY_PINNED : FSDP_MEMORY_DEVICE, ptr,
                            room);
    fsdpi_model_free(m, buf);
}

// Returns 1 if the options of tools/fsdpfit describe the model. Sets *stored to its stored dtype.
// In a model that reshards, one unit may never do so: it is the unit `root` of the tool.
static int fsdpi_is_uniform(const fsdp_model *m, fsdp_dtype *stored) {
    const fsdp_model_desc *d = &m->desc;
    int uniform = m->num_units > 0 && !m->mixed && !d->grad_dtype && !d->implicit_prefetch &&
                  !d->prefetch_bytes && d->direct_min == FSDPI_DIRECT_MIN &&
                  m->info.shard_mesh_size * m->info.replicate_mesh_size == m->world->size;
    *stored = m->num_units ? m->units[0]->params[0].dtype : FSDP_F32;
    for (int i = 0, roots = 0; i < m->num_units; i++) {
        const fsdp_unit *u = m->units[i];
        const int reshard = u->options.reshard_after_forward;
        if (reshard != d->reshard_after_forward)
            uniform &= reshard == FSDP_RESHARD_NEVER && !roots++;
        uniform &= u->desc.policy_dtype == d->param_dtype &&
                   u->desc.policy_reduce == d->reduce_dtype && !u->options.num_prefetch[0] &&
                   !u->options.num_prefetch[1];
        for (int k = 0; k < u->desc.num_params; k++)
            uniform &= u->params[k].dtype == *stored && u->params[k].requires_grad &&
                       !u->params[k].lay.shard_dim && !u->params[k].num_strings;
    }
    return uniform;
}

// Adds the command line of tools/fsdpfit that predicts a step's memory, or what to give the tool.
static void fsdpi_say_fsdpfit(const fsdp_model *m, fsdpi_text *t) {
    const fsdp_model_desc *d = &m->desc;
    const fsdp_world *w = m->world;
    fsdp_dtype stored;
    if (!fsdpi_is_uniform(m, &stored)) {
        fsdpi_text_add(t, "give tools/fsdpfit the shapes, the mesh and the dtypes of the units");
        return;
    }
    fsdpi_text_add(t, "fsdpfit SHAPES --ranks %d", w->size);
    if (m->info.replicate_mesh_size > 1)
        fsdpi_text_add(t, " --mesh %dx%d", m->info.replicate_mesh_size, m->info.shard_mesh_size);
    if (stored != FSDP_F32) fsdpi_text_add(t, " --store %s", fsdp_dtype_name(stored));
    if (d->param_dtype) fsdpi_text_add(t, " --param %s", fsdp_dtype_name(d->param_dtype));
    if (d->reduce_dtype) fsdpi_text_add(t, " --reduce %s", fsdp_dtype_name(d->reduce_dtype));
    if (d->reshard_after_forward != FSDP_RESHARD_ALWAYS)
        fsdpi_text_add(t, " --reshard %d",
                       d->reshard_after_forward > 0 ? d->reshard_after_forward : 0);
    if (w->mode == FSDP_RUN_THREADS)
        fsdpi_text_add(t, " --comm-threads %d",
                       w->workers[FSDP_STREAM_REDUCE] == w->workers[FSDP_STREAM_GATHER] ? 1 : 2);
    if (w->mode == FSDP_RUN_STREAMS) fsdpi_text_add(t, " --streams");
    if (d->cpu_offload) fsdpi_text_add(t, " --cpu-offload");
}

// Fails because `bytes` of memory cannot be allocated. The text has `what`, `reason` (the
// allocator's own text, cut), what the model holds and needs, and the command that tells the rest.
static FSDP_COLD fsdp_status fsdpi_alloc_failed(fsdp_model *m, fsdp_status status, int64_t bytes,
                                                const char *what, const char *reason) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    char text[FSDPI_TEXT];
    fsdpi_text t = {text, sizeof text, 0};
    int64_t holds = 0;
    double unit = 1; // bytes of the unit in which the text gives numbers
    int k = 0;
    for (int pool = 0; pool < FSDP_POOL_MAX; pool++) holds += m->pool_bytes[pool];
    for (; k < 4 && (double)(holds + bytes) >= 1024 * unit; k++) unit *= 1024;
    fsdpi_text_add(&t, "%s: %.300s; the model needs at least %.4g %s and holds %.4g", what, reason,
                   (double)(holds + bytes) / unit, units[k], (double)holds / unit);
    const char *comma = " (";
    for (int pool = 0; pool < FSDP_POOL_MAX; pool++) {
        if (!m->pool_bytes[pool] || pool == FSDP_POOL_SCRATCH) continue; // scratch: a few bytes
        fsdpi_text_add(&t, "%s%.32s %.4g", comma, fsdp_model_pool_name(m, pool),
                       (double)m->pool_bytes[pool] / unit);
        comma = ", ";
    }
    fsdpi_text_add(&t, "%s. For all that a step needs: ", *comma == ',' ? ")" : "");
    fsdpi_say_fsdpfit(m, &t);
    return fsdp_fail(m->world, status, "%s", text);
}

// Returns 1 if the host can read the buffer.
static int fsdpi_is_readable(const fsdp_world *w, const fsdp_buf *buf) {
    return buf->pinned || fsdpi_is_host(w);
}

// Makes a buffer of pinned memory, or of device memory that peers can read, and counts it in
// `pool`. bytes: rounded up to the alignment, at least 1.
static fsdp_status fsdpi_buf_make(fsdp_model *m, int pool, size_t bytes, int pinned,
                                  fsdp_buf **out) {
    fsdp_world *w = m->world;
    fsdp_buf *buf = (fsdp_buf *)fsdpi_model_alloc(m, sizeof *buf);
    *out = NULL;
    if (!buf)
        return fsdpi_no_memory(w, "a buffer of", fsdp_model_pool_name(m, pool), sizeof *buf);
    buf->bytes = (size_t)fsdpi_aligned(m, (int64_t)(bytes ? bytes : 1));
    buf->pool = buf->acquired_pool = (uint8_t)pool;
    buf->pinned = (uint8_t)pinned;
    buf->number = ++m->num_bufs;
    const int shared = w->comm && !pinned, kind = pinned ? FSDP_MEMORY_PINNED : FSDP_MEMORY_DEVICE;
    size_t room = buf->bytes;
    void *ptr = NULL;
    FSDPI_GUARD((room = fsdpi_room(w, buf)));
    fsdp_status status = shared ? w->comm_ops->alloc(w->comm, room, &ptr)
                                : w->device_ops->alloc(w->device, kind, room, &ptr);
    if (status) {
        char what[100];
        snprintf(what, sizeof what, "[E305] %lld bytes for %s cannot be allocated",
                 (long long)buf->bytes, fsdp_model_pool_name(m, pool));
        status = fsdpi_alloc_failed(m, status, (int64_t)buf->bytes, what,
                                    shared ? w->comm_ops->error_text(w->comm)
                                           : fsdpi_device_text(w, status));
        fsdpi_model_free(m, buf);
        return status;
    }
    buf->ptr = (char *)ptr;
    FSDPI_GUARD(fsdpi_close_room(w, buf));
    m->pool_slots[pool]++;
    m->pool_bytes[pool] += (int64_t)buf->bytes;
    m->counters.allocations++;
    *out = buf;
    return FSDP_OK;
}

static fsdp_status fsdpi_buf_new(fsdp_model *m, int pool, size_t bytes, fsdp_buf **out) {
    int offloaded = m->desc.cpu_offload &&
                    (pool == FSDP_POOL_SHARD || pool == FSDP_POOL_SHARD_GRAD);
    return fsdpi_buf_make(m, pool, bytes, offloaded, out);
}

static fsdp_status fsdpi_slot_class_add(fsdp_model *m, fsdpi_slot_class *c) {
    fsdp_status status = fsdpi_grow(m, (void **)&c->slots, c->count, &c->cap, sizeof *c->slots,
                                    "a list of", fsdp_pool_name(c->pool));
    if (!status) status = fsdpi_buf_new(m, c->pool, c->bytes, &c->slots[c->count]);
    if (status) return status;
    fsdp_buf *slot = c->slots[c->count++];
    if (slot->ptr && fsdpi_can_close(m->world)) slot->guard = FSDPI_IS_OPEN;
    return FSDP_OK;
}

// Sets *out to the free slot of a class that was released first, or to a new one.
static inline fsdp_status fsdpi_slot_class_take(fsdp_model *m, fsdpi_slot_class *c,
                                                fsdp_buf **out) {
    fsdp_buf *best = NULL;
    if (c->count == 0) { // the first acquire
        const int depth = c->ahead && m->world->mode != FSDP_RUN_INLINE ? 2 : 1;
        while (c->count < depth) FSDPI_TRY(fsdpi_slot_class_add(m, c));
    }
    for (int i = 0; i < c->count; i++) {
        fsdp_buf *buf = c->slots[i];
        if (!buf->held && (!best || buf->released < best->released)) best = buf;
    }
    if (!best) {
        FSDPI_TRY(fsdpi_slot_class_add(m, c));
        best = c->slots[c->count - 1];
    }
    *out = best;
    return FSDP_OK;
}

// Resets the order of releases between steps, so that the next step takes the slots in equal order.
static void fsdpi_pools_rewind(fsdp_model *m) {
    FSDPI_GUARD(fsdpi_close_free(m));
    for (int i = 0; i < m->num_classes; i++)
        for (int k = 0; k < m->classes[i].count; k++) {
            m->classes[i].slots[k]->released = 0;
            if (!m->classes[i].slots[k]->held)
                FSDPI_GUARD(fsdpi_turn(m, m->classes[i].slots[k], 0));
        }
    m->release_seq = 0;
}

/* -------------------------------------------------------------------------------------------- */
// Slot classes, and units that acquire and release slots.

static int fsdpi_slot_class_find(fsdp_model *m, int pool, size_t bytes) {
    bytes = (size_t)fsdpi_aligned(m, (int64_t)(bytes ? bytes : 1));
    for (int i = 0; i < m->num_classes; i++)
        if (m->classes[i].pool == pool && m->classes[i].bytes == bytes) return i;
    if (fsdpi_grow(m, (void **)&m->classes, m->num_classes, &m->cap_classes, sizeof *m->classes,
                   "list of pools", ""))
        return -1;
    fsdpi_slot_class *c = &m->classes[m->num_classes];
    memset(c, 0, sizeof *c);
    c->pool = pool;
    c->bytes = bytes;
    return m->num_classes++;
}

static fsdp_status fsdpi_unit_classes(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int64_t bytes[FSDP_POOL_COUNT] = {0};
    int64_t none = u->layout.num_train ? 0 : -1,
            reduce = fsdpi_bytes(u->layout.reduce_numel, u->layout.reduce_dtype);
    int alias = u->layout.gather == FSDPI_GATHER_ALIAS;
    bytes[FSDP_POOL_GATHER] = alias ? -1 : u->layout.slot_bytes;
    bytes[FSDP_POOL_SLICE] = u->desc.slices ? u->layout.slice_bytes : -1;
    bytes[FSDP_POOL_GRAD] = none ? none : u->layout.grad_bytes;
    bytes[FSDP_POOL_REDUCE_IN] = none ? none : reduce;
    bytes[FSDP_POOL_REDUCE_OUT] = none ? none : reduce / fsdpi_shards(u);
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_REDUCE_OUT; pool++) {
        u->layout.classes[pool] = -1;
        if (bytes[pool] < 0) continue;
        int at = fsdpi_slot_class_find(m, pool, (size_t)bytes[pool]);
        if (at < 0) return FSDP_ERR_OUT_OF_MEMORY;
        u->layout.classes[pool] = at;
        m->classes[at].ahead |= (pool == FSDP_POOL_GATHER && m->classes[at].units++ > 0) ||
                                (pool == FSDP_POOL_GRAD && u->layout.grads_ahead) ||
                                (pool == FSDP_POOL_REDUCE_OUT && fsdpi_replicas(u) > 1);
    }
    return FSDP_OK;
}

// Sets the event of a release; `stream` is the slot's last consumer. The event is due at once,
// except for REDUCE_IN and REDUCE_OUT on REDUCE: that stream also writes them next, and needs none.
static void fsdpi_mark_released(fsdp_world *w, int stream, fsdp_buf *buf) {
    int due = stream != FSDP_STREAM_REDUCE || buf->acquired_pool == FSDP_POOL_GRAD;
    if (buf->avail.seq == 0) // otherwise no op has written it since the last release
        fsdpi_mark(w, stream, &buf->avail, due ? buf : NULL);
}

// Sets *out to a slot that an extension supplies, or to NULL. Fails if the slot is in use or
// smaller than `bytes`, or if there is none in a dry run.
static FSDPI_NOINLINE fsdp_status fsdpi_ext_slot(fsdp_unit *u, int pool, size_t bytes,
                                                 fsdp_buf **out) {
    fsdp_model *m = u->model;
    fsdp_buf *buf = m->listeners & FSDPI_LISTEN_SLOTS ? fsdpi_ext_offer_slot(u, pool, NULL) : NULL;
    *out = buf;
    if (buf) buf->acquired_pool = (uint8_t)pool;
    if (buf ? !buf->held && buf->bytes >= bytes : !m->dry_run) return FSDP_OK;
    return fsdpi_invalid_arg(
        m->world, "[E915] an extension gave '%s' a slot of %llu bytes%s for %s, expected %llu free",
        u->desc.name, (unsigned long long)(buf ? buf->bytes : 0), buf && buf->held ? " in use" : "",
        fsdp_pool_name(pool), (unsigned long long)bytes);
}

/* Sets *out to a free slot of `pool`: one of an extension, or of the unit's class. Marks it as in
   use. Requires u->layout.classes[pool] >= 0. On failure the world fails if it has several ranks,
   except in a dry run. */
static fsdp_status fsdpi_acquire(fsdp_unit *u, int pool, fsdp_buf **out) {
    fsdp_model *m = u->model;
    fsdpi_slot_class *c = &m->classes[u->layout.classes[pool]];
    fsdp_buf *buf = NULL;
    fsdp_status status = m->listeners ? fsdpi_ext_slot(u, pool, c->bytes, &buf) : FSDP_OK;
    if (!status && !buf) status = fsdpi_slot_class_take(m, c, &buf);
    if (status) return m->dry_run ? status : fsdpi_fail_together(m->world, status);
    buf->held = 1;
    FSDPI_GUARD(fsdpi_turn(m, buf, (buf->spot + 1) % FSDPI_SPOTS));
    FSDPI_GUARD(fsdpi_open(m, buf));
    *out = buf;
    return m->listeners ? fsdpi_marker(u, FSDP_OP_ACQUIRE, FSDP_STREAM_COMPUTE, buf) : FSDP_OK;
}

static FSDPI_NOINLINE fsdp_status fsdpi_released(fsdp_unit *u, fsdp_buf *buf, int stream) {
    fsdp_status status = fsdpi_marker(u, FSDP_OP_RELEASE, stream, buf);
    if (u->model->listeners & FSDPI_LISTEN_SLOTS)
        (void)fsdpi_ext_offer_slot(u, buf->acquired_pool, buf);
    return status;
}

// Releases a slot, unless *slot is NULL, and sets *slot to NULL. `stream` is its last consumer.
// With debug, fills the slot with NaN.
static fsdp_status fsdpi_release(fsdp_unit *u, fsdp_buf **slot, int stream) {
    fsdp_model *m = u->model;
    fsdp_buf *buf = *slot;
    if (!buf) return FSDP_OK;
    fsdp_status status = FSDP_ASSERT(m->world, buf->held);
    FSDPI_GUARD(fsdpi_open(m, buf));
    if (!status && m->desc.debug)
        status = fsdpi_emit_fill(m, u, FSDP_LABEL_NONE, stream, buf, FSDP_U8, 0,
                                 (int64_t)buf->bytes, 0xFF);
    if (m->world->mode != FSDP_RUN_INLINE) fsdpi_mark_released(m->world, stream, buf);
    buf->held = 0;
    buf->released = ++m->release_seq;
    *slot = NULL;
    if (m->listeners && !status) status = fsdpi_released(u, buf, stream);
    FSDPI_GUARD(fsdpi_close_free(m));
    return status;
}

#endif // FSDPI_CORE_POOL_H
