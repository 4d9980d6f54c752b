/* fsdp_fake.h - a backend without other ranks: one process plays one rank of a world of any size

   -DFSDP_BACKEND_FAKE compiles it in, in addition to the other backends. It is never the default:
   fsdp_world_desc.backend = "fake", or FSDP_BACKEND=fake, chooses it. It needs no launcher, no
   store and no job name, and sends nothing:

       fsdp_world_desc d = FSDP_ZERO;
       d.backend = "fake";
       d.rank = 37, d.world_size = 4096;

   It is for shapes, memory, numbers of calls and bytes, gradient paths and plans of worlds that you
   do not have. The bytes of results are wrong on purpose, except where all ranks hold equal data:

       all_gather      the part of this rank, in the places of all ranks
       reduce_scatter  this rank's slice of its own source, cast, scaled and accumulated
       all_to_all      the source as it is
       all_reduce      scaled, where a scale is given; otherwise nothing
       broadcast, send, recv, barrier   nothing

   Arguments are checked as in every backend. Since no rank is late and none disagrees, a call
   completes at once, and there are no deadlines.

   With fsdp_fake.addresses and the device of fsdp_fake_device_ops memory is addresses only, so that
   the model may be of any size, too: ops run, and move nothing (tools/fsdpfit).

   Source: torch: torch/csrc/distributed/c10d/FakeProcessGroup.hpp,
   torch/testing/_internal/distributed/fake_pg.py (FakeStore).

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif

#ifndef FSDP_FAKE_H
#define FSDP_FAKE_H
#ifndef FSDP_MATH_ONLY

#ifdef __cplusplus
extern "C" {
#endif

// clang-format off
// Pass its address as fsdp_world_desc.user, or NULL: then all is 0 and nothing is counted. It must
// live as long as the world. Set the first two at any time when no collective is running.
typedef struct fsdp_fake {
    uint32_t size, start_canary;
    int32_t sum_all; // 1: sums are as if every rank held this rank's data: size times as much
    int32_t refuse;  // 1: every collective fails with UNSUPPORTED, which ends the world
    int32_t addresses; // 1: memory of alloc is addresses, and nothing moves. Set it before the
                       // world begins, as the next one
    int32_t plain;   // 1: reductions neither cast, scale nor accumulate, as NCCL's
    int64_t given[FSDP_MEMORY_PINNED + 1]; // with addresses: bytes by FSDP_MEMORY_* that are in use
    uint64_t bus_bytes; // bytes copied between pinned and device memory. You may set it to 0
    // Calls and bytes on all comms of the world together, by FSDP_OP_*. Bytes are those that a rank
    // must receive, with n ranks and b bytes per part: (n-1)*b in all_gather, reduce_scatter and
    // all_to_all; 2*(n-1)/n of an all_reduce's bytes; all bytes of a broadcast and a recv; none in
    // a send. You may set them to 0.
    uint64_t calls[FSDP_OP_COUNT], wire_bytes[FSDP_OP_COUNT];
    uint64_t end_canary;
} fsdp_fake;

/* fsdp_fake_comm_ops - the table of this backend, named "fake"
   Result      never NULL; static
   open        INVALID_ARG if boot->user is neither NULL nor a fsdp_fake; no device that gets the
               same pointer may take it for something else. After a failure error_text(NULL) has
               the text, for the calling thread
   split       does not wait; a rank with color < 0 gets NULL
   run         different comms may run in different threads at the same time. Supports all_to_all,
               send and recv, too. Buffers that peers would read must come from alloc. Reductions
               on floats cast, scale and accumulate
   alloc       from the allocator, zero-filled
   abort       from any thread      poll never blocks
   Memory      4 bytes for each rank of a comm, and a bit for each one of its parent
   Limits      2^20 ranks. A world of 1 rank opens no backend
   Thread      any */
// clang-format on
FSDP_API const fsdp_comm_ops *fsdp_fake_comm_ops(void);

/* fsdp_fake_device_ops - the table of a device whose memory is addresses: its ops do nothing
   streams     1: it orders them on streams, as a GPU does; 0: the host waits for each
   Result      never NULL; static
   open        with fsdp_world_desc.user: a fsdp_fake, whose given it counts
   Thread      any */
FSDP_API const fsdp_device_ops *fsdp_fake_device_ops(int streams);

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_FAKE_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_FAKE_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_FAKE_IMPLEMENTED

#include "fsdp_comm.h" // the base of all backends
#include "fsdp_memory.h"
#include "fsdp_signature.h"
#include "../src/core/alloc.h"
#include "../src/base/os.h"
#include "../src/base/reduce.h"
#include "../src/core/run.h"

#include <string.h>

#define FSDPI_FAKE_RANKS (1 << 20)
#define FSDPI_FAKE_KINDS                                                                           \
    (1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER | 1u << FSDP_OP_ALL_REDUCE |          \
     1u << FSDP_OP_BROADCAST | 1u << FSDP_OP_ALL_TO_ALL | 1u << FSDP_OP_SEND | 1u << FSDP_OP_RECV)

typedef struct fsdpi_fake_world {
    fsdpi_comm_world base;
    fsdp_fake *fake, none; // the user's, or `none`
    uint32_t failed, lock; // not 0: the world has failed; guards `why`
    fsdpi_failure why;
    uintptr_t next; // with addresses: address of the next allocation
} fsdpi_fake_world;

static fsdpi_fake_world *fsdpi_fake_world_of(const fsdpi_comm *c) {
    return (fsdpi_fake_world *)(void *)c->world;
}

/* -------------------------------------------------------------------------------------------- */
// Connect and failure. There are no other ranks.

static fsdp_status fsdpi_fake_open_world(fsdpi_comm *c) {
    fsdpi_fake_world *w = fsdpi_fake_world_of(c);
    fsdp_fake *fake = (fsdp_fake *)c->boot->user;
    w->base.failed = &w->failed;
    w->fake = fake ? fake : &w->none;
    // The library writes the counts where this header has them: no other size will do.
    if (w->fake->size != 0 && w->fake->size != sizeof *fake)
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                                "[E543] fsdp_world_desc.user has size %u, expected a fsdp_fake "
                                "with 0 or %u, or NULL: zero the struct before you fill it",
                                (unsigned)w->fake->size, (unsigned)sizeof *fake);
    if (w->fake->start_canary || w->fake->end_canary)
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                                "[E544] fsdp_world_desc.user: a canary of the fsdp_fake is not 0: "
                                "zero the struct before use");
    if (w->fake->plain) w->base.caps.flags = 0;
    return FSDP_OK;
}

static fsdp_status fsdpi_fake_connect(fsdpi_comm *parent, fsdpi_comm *child, const fsdp_group *g) {
    (void)parent, (void)child, (void)g;
    return FSDP_OK;
}

static void fsdpi_fake_leave(fsdpi_comm *c) { (void)c; }

static int fsdpi_fake_close(fsdpi_comm_world *w) {
    (void)w;
    return 1;
}

static void fsdpi_fake_tell(fsdpi_comm *c, fsdp_status status, const char *subject,
                            const char *reason) {
    fsdpi_fake_world *w = fsdpi_fake_world_of(c);
    fsdpi_lock(&w->lock);
    if (!w->failed) {
        w->why.status = (int32_t)status;
        w->why.rank = c->boot->rank;
        w->why.lost = -1;
        fsdpi_copy_name(w->why.subject, sizeof w->why.subject, subject);
        fsdpi_copy_name(w->why.reason, sizeof w->why.reason, reason);
        FSDPI_STORE(&w->failed, 1u);
    }
    fsdpi_unlock(&w->lock);
}

static int fsdpi_fake_failure(fsdpi_comm_world *base, fsdpi_failure *out) {
    fsdpi_fake_world *w = (fsdpi_fake_world *)(void *)base;
    fsdpi_lock(&w->lock); // a thread that sets the failure has ended
    *out = w->why;
    fsdpi_unlock(&w->lock);
    return FSDPI_LOAD(&w->failed) != 0;
}

/* -------------------------------------------------------------------------------------------- */
// Move: the effect of each collective on the memory of this rank.

static void fsdpi_fake_all_gather(const fsdpi_comm *c, const fsdp_coll *op) {
    const size_t size = fsdp_dtype_size(op->dtype);
    for (uint32_t s = 0; s < op->num_segs; s++) {
        const fsdp_seg *seg = &op->segs[s];
        const size_t bytes = (size_t)seg->count * size;
        char *dst = (char *)op->dst + (size_t)seg->full * size;
        const char *mine = op->in_place ? dst + (size_t)c->index * bytes
                                        : (const char *)op->src + (size_t)seg->shard * size;
        for (int k = 0; k < c->size && bytes; k++)
            if (dst + (size_t)k * bytes != mine) memmove(dst + (size_t)k * bytes, mine, bytes);
    }
}

// Computes dst (+)= scale * the sum over `ranks` ranks that all have this src.
static void fsdpi_fake_sum(void *dst, fsdp_dtype out, const char *src, fsdp_dtype dtype,
                           size_t count, int ranks, double scale, int accumulate) {
    if (count == 0) return;
    if (fsdp_dtype_is_float(dtype)) {
        fsdpi_reduce(dst, out, &src, 1, dtype, count, scale * ranks, accumulate, FSDP_SUM);
        return;
    }
    fsdpi_reduce(dst, out, &src, 1, dtype, count, 1.0, 0, FSDP_SUM);
    const size_t size = fsdp_dtype_size(dtype);
    for (size_t i = 0; i < count && ranks > 1; i++) {
        char *at = (char *)dst + i * size;
        uint32_t narrow;
        uint64_t wide;
        memcpy(dtype == FSDP_I32 ? (void *)&narrow : (void *)&wide, at, size);
        if (dtype == FSDP_I32) narrow *= (uint32_t)ranks;
        else wide *= (uint64_t)ranks;
        memcpy(at, dtype == FSDP_I32 ? (void *)&narrow : (void *)&wide, size);
    }
}

static void fsdpi_fake_reduce_scatter(const fsdpi_comm *c, const fsdp_coll *op, int ranks) {
    const size_t in = fsdp_dtype_size(op->dtype), out = fsdp_dtype_size(op->out_dtype);
    for (uint32_t s = 0; s < op->num_segs; s++) {
        const fsdp_seg *seg = &op->segs[s];
        fsdpi_fake_sum((char *)op->dst + (size_t)seg->shard * out, (fsdp_dtype)op->out_dtype,
                       (const char *)op->src + (size_t)(seg->full + c->index * seg->count) * in,
                       (fsdp_dtype)op->dtype, (size_t)seg->count, ranks, op->scale, op->accumulate);
    }
}

static fsdp_status fsdpi_fake_move(fsdpi_comm *c, const fsdp_coll *op, const fsdpi_span *span) {
    fsdp_fake *fake = fsdpi_fake_world_of(c)->fake;
    const size_t count = (size_t)op->count, size = fsdp_dtype_size(op->dtype);
    const int ranks = fake->sum_all && op->redop == FSDP_SUM ? c->size : 1;
    (void)span;
    if (fake->refuse)
        return fsdpi_comm_fail(c, FSDP_ERR_UNSUPPORTED,
                               "[E545] fsdp_fake.refuse is set, so that nothing communicates: set "
                               "it to 0, or find out who calls");
    const int kind = fake->addresses ? (int)FSDP_OP_COUNT : op->kind; // nothing moves
    if (kind == FSDP_OP_ALL_GATHER) fsdpi_fake_all_gather(c, op);
    if (kind == FSDP_OP_REDUCE_SCATTER) fsdpi_fake_reduce_scatter(c, op, ranks);
    if (kind == FSDP_OP_ALL_REDUCE)
        fsdpi_fake_sum(op->dst, (fsdp_dtype)op->dtype, (const char *)op->dst, (fsdp_dtype)op->dtype,
                       count, ranks, op->scale, 0);
    if (kind == FSDP_OP_ALL_TO_ALL && count && op->dst != op->src)
        memmove(op->dst, op->src, count * (size_t)c->size * size);
    const uint64_t bytes = fsdpi_coll_bytes(op->kind, (uint64_t)c->size, (uint64_t)(count * size));
    __atomic_add_fetch(&fake->calls[op->kind], 1u, __ATOMIC_RELAXED); // worker threads count, too
    __atomic_add_fetch(&fake->wire_bytes[op->kind], bytes, __ATOMIC_RELAXED);
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// Memory: of the host, or addresses. Those of the world, of the device and pinned ones do not meet.

static uintptr_t fsdpi_fake_addresses(uintptr_t *next, int place, size_t size) {
    if (!*next) *next = (uintptr_t)1 << 40 << 10 * place;
    const uintptr_t at = *next;
    *next += (size + 4095) / 4096 * 4096;
    return at;
}

static fsdp_status fsdpi_fake_take(fsdpi_comm_world *base, fsdpi_chunk *chunk, const char **why) {
    fsdpi_fake_world *w = (fsdpi_fake_world *)(void *)base;
    if (!w->fake->addresses) return fsdpi_take_host(base, chunk, why);
    chunk->base = (char *)fsdpi_fake_addresses(&w->next, 0, chunk->size);
    w->fake->given[FSDP_MEMORY_DEVICE] += (int64_t)chunk->size;
    return FSDP_OK;
}

static void fsdpi_fake_give(fsdpi_comm_world *base, const fsdpi_chunk *chunk) {
    fsdp_fake *fake = ((fsdpi_fake_world *)(void *)base)->fake;
    if (fake->addresses) fake->given[FSDP_MEMORY_DEVICE] -= (int64_t)chunk->size;
    else fsdpi_give_host(base, chunk);
}

// clang-format off
static const fsdpi_transport fsdpi_fake_transport = {
    sizeof(fsdpi_comm), sizeof(fsdpi_fake_world), FSDPI_FAKE_RANKS,
    {FSDPI_FAKE_KINDS, FSDP_CAP_FUSED_REDUCE, 2, 0, NULL, NULL},
    fsdpi_fake_open_world, NULL, fsdpi_fake_connect, fsdpi_fake_leave, fsdpi_fake_close,
    NULL, NULL, fsdpi_fake_move, NULL,
    fsdpi_fake_tell, fsdpi_fake_failure, NULL,
    fsdpi_fake_take, fsdpi_fake_give, fsdpi_advise_host};
// clang-format on

static fsdp_status fsdpi_fake_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **out) {
    return fsdpi_comm_open(&fsdpi_fake_transport, boot, caps, out);
}

FSDP_API const fsdp_comm_ops *fsdp_fake_comm_ops(void) {
    static const fsdp_comm_ops ops = {
        FSDP_COMM_VERSION, sizeof(fsdp_comm_ops), "fake",           fsdpi_fake_open,
        fsdpi_comm_split,  fsdpi_comm_close,      fsdpi_comm_run,   fsdpi_comm_alloc,
        fsdpi_comm_free,   fsdpi_comm_error_text, fsdpi_comm_abort, fsdpi_comm_poll,
    };
    return &ops;
}

/* -------------------------------------------------------------------------------------------- */
// The device.

typedef struct fsdpi_fake_device {
    fsdp_allocator allocator;
    fsdp_fake *fake;
    uintptr_t next[FSDP_MEMORY_PINNED + 1];
} fsdpi_fake_device;

static fsdpi_fake_device *fsdpi_fake_device_of(fsdp_device *device) {
    return (fsdpi_fake_device *)(void *)device;
}
static fsdp_status fsdpi_fake_device_open(const fsdp_boot *boot, fsdp_device **out) {
    fsdpi_fake_device *d = (fsdpi_fake_device *)fsdpi_alloc(&boot->allocator, sizeof *d);
    *out = (fsdp_device *)(void *)d;
    if (!d) return FSDP_ERR_OUT_OF_MEMORY;
    d->allocator = boot->allocator;
    d->fake = (fsdp_fake *)boot->user;
    return d->fake ? FSDP_OK : (fsdpi_free(&boot->allocator, d), FSDP_ERR_INVALID_ARG);
}
static void fsdpi_fake_device_close(fsdp_device *device) {
    fsdp_allocator allocator = fsdpi_fake_device_of(device)->allocator;
    fsdpi_free(&allocator, device);
}
static fsdp_status fsdpi_fake_device_alloc(fsdp_device *device, int kind, size_t size, void **ptr) {
    fsdpi_fake_device *d = fsdpi_fake_device_of(device);
    *ptr = (void *)fsdpi_fake_addresses(&d->next[kind], 1 + kind, size);
    d->fake->given[kind] += (int64_t)size;
    return FSDP_OK;
}
static void fsdpi_fake_device_free(fsdp_device *device, int kind, void *ptr, size_t size) {
    if (ptr) fsdpi_fake_device_of(device)->fake->given[kind] -= (int64_t)size;
}
static fsdp_status fsdpi_fake_stream(fsdp_device *device, int stream, void **native) {
    *native = (char *)device + stream; // a handle that is never dereferenced
    return FSDP_OK;
}
static fsdp_status fsdpi_fake_event(fsdp_device *device, void **native) {
    *native = device;
    return FSDP_OK;
}
static void fsdpi_fake_destroy(fsdp_device *device, void *stream, void *event) {
    (void)device, (void)stream, (void)event;
}
static fsdp_status fsdpi_fake_order(fsdp_device *device, void *stream, void *event) {
    (void)device, (void)stream, (void)event;
    return FSDP_OK;
}
static fsdp_status fsdpi_fake_sync(fsdp_device *device, void *event, int64_t timeout_ns) {
    (void)device, (void)event, (void)timeout_ns;
    return FSDP_OK;
}
static fsdp_status fsdpi_fake_work(fsdp_device *device, void *stream, const fsdp_op *op) {
    const int crosses = op->kind == FSDP_OP_COPY && op->src && op->dst;
    (void)stream;
    if (crosses && op->src->pinned != op->dst->pinned)
        fsdpi_fake_device_of(device)->fake->bus_bytes += op->bytes;
    return FSDP_OK;
}
static fsdp_status fsdpi_fake_update(fsdp_device *device, void *stream, const fsdp_update *runs,
                                     uint32_t num) {
    (void)device, (void)stream, (void)runs, (void)num;
    return FSDP_OK;
}

FSDP_API const fsdp_device_ops *fsdp_fake_device_ops(int streams) {
#define FSDPI_FAKE_DEVICE(flags)                                                                   \
    {                                                                                              \
        FSDP_DEVICE_VERSION, sizeof(fsdp_device_ops), flags, "addresses", fsdpi_fake_device_open,  \
            fsdpi_fake_device_close, fsdpi_fake_device_alloc, fsdpi_fake_device_free,              \
            fsdpi_fake_stream, fsdpi_fake_event, fsdpi_fake_destroy, fsdpi_fake_order,             \
            fsdpi_fake_order, fsdpi_fake_sync, NULL, NULL, fsdpi_fake_work, fsdpi_fake_work,       \
            fsdpi_fake_work, fsdpi_fake_update, NULL                                               \
    }
    static const fsdp_device_ops ops[2] = {FSDPI_FAKE_DEVICE(0),
                                           FSDPI_FAKE_DEVICE(FSDP_DEVICE_ASYNC)};
#undef FSDPI_FAKE_DEVICE
    return &ops[streams != 0];
}
#endif // FSDP_IMPLEMENTATION
