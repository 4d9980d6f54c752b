/* core/guard.h - AddressSanitizer: poisons memory that the caller must not touch

   Callers: pool.h (fsdpi_turn), step.h (fsdpi_open_unit), plan/replay.h (fsdpi_open_unit) and
     others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_GUARD_H
#define FSDPI_CORE_GUARD_H

#include "error.h"
#include "layout.h"
#include "objects.h"
#include "../base/os.h"
#include "run.h"

/* The state of this file is fsdp_buf.guard: whether a buffer is open, or closed, that is poisoned.
   While a call runs, the slots of its unit are open. After a call the caller may touch only these:
   a free slot             closed, once the last op that uses it is done
   GATHER, of a unit that is gathered   open: its parameters
   GRAD, in PRE_BACKWARD   open: gradients. Between microbatches all of it is closed
   SLICE, REDUCE_IN, REDUCE_OUT        open while a unit holds them: the library and peers use them
   after every buffer      closed: FSDPI_REDZONE bytes
   A slot has FSDPI_SPOTS addresses (spots), and moves to the next one at each acquire: a stale
   pointer of the caller points at a closed spot. Invariant: memory that an issued op, a peer (which
   may be a thread) or an extension may touch is open. So shards, shard gradients and memory of
   extensions are always open. */

// Calls a function of this file where AddressSanitizer sees memory.
#define FSDPI_GUARD(call)                                                                          \
    do {                                                                                           \
        if (FSDPI_ASAN) (void)call;                                                                \
    } while (0)

enum { FSDPI_REDZONE = 4096 * FSDPI_ASAN, FSDPI_SPOTS = 1 + 3 * FSDPI_ASAN };

static inline size_t fsdpi_stride(const fsdp_buf *buf) { return buf->bytes + FSDPI_REDZONE; }
static inline char *fsdpi_spot(const fsdp_buf *buf, int spot) {
    return buf->ptr - (buf->spot - spot) * (ptrdiff_t)fsdpi_stride(buf);
}

// Returns the bytes of memory that a buffer takes, with its spots and red zones.
static inline size_t fsdpi_room(const fsdp_world *w, const fsdp_buf *buf) {
    int slot = buf->pool >= FSDP_POOL_GATHER && buf->pool <= FSDP_POOL_REDUCE_OUT;
    return fsdpi_can_close(w) ? (size_t)(slot ? FSDPI_SPOTS : 1) * fsdpi_stride(buf) : buf->bytes;
}

// Closes the spare memory of a new buffer.
static inline void fsdpi_close_room(const fsdp_world *w, const fsdp_buf *buf) {
    if (buf->ptr && fsdpi_can_close(w))
        fsdpi_poison(buf->ptr + buf->bytes, fsdpi_room(w, buf) - buf->bytes);
}
// Opens all memory of a buffer before it is freed. Returns its first address.
static inline char *fsdpi_open_room(const fsdp_world *w, const fsdp_buf *buf) {
    if (!fsdpi_can_close(w)) return buf->ptr;
    fsdpi_unpoison(fsdpi_spot(buf, 0), fsdpi_room(w, buf));
    return fsdpi_spot(buf, 0);
}

static inline int fsdpi_guards(const fsdp_model *m, const fsdp_buf *buf) {
    return FSDPI_ASAN && buf && buf->guard && !m->dry_run;
}

static inline void fsdpi_open(const fsdp_model *m, fsdp_buf *buf) {
    if (!fsdpi_guards(m, buf)) return;
    fsdpi_unpoison(buf->ptr, buf->bytes);
    buf->guard = FSDPI_IS_OPEN;
}

// Moves a slot to a spot, unless an extension listens: it may emit ops again that have the present
// address.
static inline void fsdpi_turn(const fsdp_model *m, fsdp_buf *buf, int spot) {
    if (!fsdpi_guards(m, buf) || m->listeners) return;
    buf->ptr = fsdpi_spot(buf, spot);
    buf->spot = (uint8_t)spot;
}

// Marks a buffer that an extension gives to a unit as in use. Opens all spots: the extension's ops
// may have any of them.
static inline void fsdpi_hold(const fsdp_model *m, fsdp_buf *buf) {
    buf->held = 1;
    if (!fsdpi_guards(m, buf)) return;
    for (int k = 0; k < FSDPI_SPOTS; k++) fsdpi_unpoison(fsdpi_spot(buf, k), buf->bytes);
    buf->guard = FSDPI_IS_OPEN;
}

// Returns 1 if the last op before the slot's release has run. Worker threads run ops later than
// they are issued.
static inline int fsdpi_is_given_back(const fsdp_model *m, const fsdp_buf *buf) {
    const fsdpi_worker *worker = m->world->workers[buf->avail.stream];
    return !buf->avail.seq || !worker ||
           (int32_t)(FSDPI_LOAD(&worker->done) - (uint32_t)buf->avail.seq) >= 0;
}

// Closes a slot of parameters or gradients, except for the parameters or gradients themselves if
// `shows` is set. Does nothing until the slot's last user has run: a unit without elements writes
// nothing into its slot, and so has not waited.
static inline void fsdpi_close(const fsdp_unit *u, int pool, int shows) {
    const fsdp_buf *slot = u->state.slot[pool];
    if (!fsdpi_guards(u->model, slot) || !fsdpi_is_given_back(u->model, slot)) return;
    fsdpi_poison(slot->ptr, slot->bytes);
    for (int i = 0; i < u->desc.num_params && shows; i++) {
        const fsdpi_param *p = &u->params[i];
        fsdp_dtype dtype = fsdpi_dtype_group_of(u, p)->param_dtype;
        int64_t at = pool == FSDP_POOL_GRAD ? p->grad_offset : p->lay.full_offset;
        if (pool == FSDP_POOL_GATHER || p->requires_grad)
            fsdpi_unpoison(slot->ptr + fsdpi_bytes(at, dtype),
                           (size_t)fsdpi_bytes(p->lay.numel, dtype));
    }
}

static inline void fsdpi_open_unit(fsdp_unit *u) {
    fsdpi_open(u->model, u->state.slot[FSDP_POOL_GATHER]);
    fsdpi_open(u->model, u->state.slot[FSDP_POOL_GRAD]);
}

static inline void fsdpi_close_unit(const fsdp_unit *u) {
    if (!FSDPI_ASAN) return;
    if (u->state.storage == FSDP_STORAGE_UNSHARDED) fsdpi_close(u, FSDP_POOL_GATHER, 1);
    fsdpi_close(u, FSDP_POOL_GRAD, u->state.training == FSDP_STATE_PRE_BACKWARD);
}

// Closes free slots whose last op has run. Does nothing in a failed world: peers may still read
// slots that this rank has released.
static inline void fsdpi_close_free(const fsdp_model *m) {
    for (int i = 0; FSDPI_ASAN && i < m->num_classes && !fsdpi_failed(m->world); i++)
        for (int k = 0; k < m->classes[i].count; k++) {
            fsdp_buf *buf = m->classes[i].slots[k];
            if (!fsdpi_guards(m, buf) || buf->held || buf->guard == FSDPI_IS_CLOSED ||
                !fsdpi_is_given_back(m, buf))
                continue;
            fsdpi_poison(buf->ptr, buf->bytes);
            buf->guard = FSDPI_IS_CLOSED;
        }
}

#endif // FSDPI_CORE_GUARD_H
