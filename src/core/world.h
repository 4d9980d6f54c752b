/* core/world.h - a world begins and ends; collectives on host data

   State: fsdp_world: rank, size, backend, device, streams or worker threads, communicators.
   Callers: programs and replicas.h (fsdpi_host_collective).

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_WORLD_H
#define FSDPI_CORE_WORLD_H

#include "../base/hash.h"
#include "../base/os.h"
#include "../base/text.h"
#include "alloc.h"
#include "backends.h"
#include "error.h"
#include "flight.h"
#include "host.h"
#include "launch.h"
#include "mesh.h"
#include "model.h"
#include "objects.h"
#include "report.h"
#include "run.h"
#include "shard_math.h"
#include "timeline.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// Takes fields that the desc leaves open from the environment, and checks all of them.
static fsdp_status fsdpi_world_resolve(fsdp_world *w, fsdp_world_desc *d) {
    if (d->world_size == 0) {
        FSDPI_TRY(fsdpi_env_ranks(w, d));
        if (d->world_size == 1) fsdpi_tell_alone(w);
    }
    if (d->timeout_ms == 0)
        FSDPI_TRY(fsdpi_world_env_int(w, "FSDP_TIMEOUT_MS", 1, 0x7FFFFFFF, &d->timeout_ms));
    // FSDP_LANES: the name of version 0.1, until 0.4.
    const char *const threads = fsdpi_env("FSDP_COMM_THREADS") ? "FSDP_COMM_THREADS" : "FSDP_LANES";
    if (d->comm_threads == 0 && fsdpi_env(threads)) {
        FSDPI_TRY(fsdpi_world_env_int(w, threads, 0, 2, &d->comm_threads));
        if (d->comm_threads == 0) d->comm_threads = -1;
    }
    if (d->log_level == FSDP_LOG_DEFAULT) FSDPI_TRY(fsdpi_env_log_level(w, &d->log_level));
    if (d->world_size < 1 || d->rank < 0 || d->rank >= d->world_size)
        return fsdpi_invalid_arg(
            w, "[E508] rank is %d, world_size is %d, expected 0 <= rank < world_size", d->rank,
            d->world_size);
    if (d->timeout_ms < 0 || d->comm_threads < -1 || d->comm_threads > 2 || d->local_rank < 0 ||
        d->log_level < 0 || d->log_level > FSDP_LOG_NONE)
        return fsdpi_invalid_arg(
            w,
            "[E151] fsdp_world_desc: timeout_ms %d, comm_threads %d, local_rank %d, "
            "log_level %d: expected >= 0, -1..2, >= 0 and 0..%d",
            d->timeout_ms, d->comm_threads, d->local_rank, d->log_level, FSDP_LOG_NONE);
    if (!d->allocator.alloc != !d->allocator.free)
        return fsdpi_invalid_arg(
            w, "[E152] fsdp_world_desc.allocator: alloc or free is NULL: give both or none");
    if (!d->allocator.alloc) {
        d->allocator.alloc = fsdpi_libc_alloc;
        d->allocator.free = fsdpi_libc_free;
    }
    if (!d->clock.now_ns) d->clock.now_ns = fsdpi_monotonic_ns;
    return FSDP_OK;
}

static fsdp_status fsdpi_table_check(fsdp_world *w, const char *what, uint32_t version,
                                     uint32_t size, uint32_t want_version, size_t want_size) {
    if (version == want_version && size == want_size) return FSDP_OK;
    return fsdpi_invalid_arg(
        w, "[E153] %s table has version %u and size %u, expected %u and %u: use the same fsdp.h",
        what, version, size, want_version, (unsigned)want_size);
}

#define FSDPI_BOUNCE 65536 // bytes at a time, in a collective on host data

// Chooses backend and device. A world of one rank has no backend.
static fsdp_status fsdpi_world_choose(fsdp_world *w, const fsdp_world_desc *d) {
    const char *name = d->backend ? d->backend : fsdpi_env("FSDP_BACKEND");
    int is_spread;
    FSDPI_TRY(fsdpi_env_is_spread(w, d, &is_spread));
    const fsdpi_backend *b = fsdpi_find_backend(name, is_spread);
    w->device_ops = d->device_ops             ? d->device_ops
                    : b->name && !d->comm_ops ? b->device_ops()
                                              : fsdpi_host_ops();
    int is_missing = !b->name && !d->comm_ops;
    if (w->size == 1 && (!is_missing || !name || d->device_ops)) return FSDP_OK;
    if (is_missing) {
        char text[128];
        fsdpi_text compiled = {text, sizeof text, 0};
        for (b = fsdpi_backends; b->name; b++) fsdpi_text_add(&compiled, " %s", b->name);
        return fsdp_fail(w, FSDP_ERR_UNSUPPORTED,
                         "[E520] backend '%s'%s is not compiled in: this program has%s. For gloo, "
                         "build with -DFSDP_BACKEND_GLOO (docs/cluster.md); for nccl: docs/gpu.md",
                         name        ? name
                         : is_spread ? "gloo"
                                     : "",
                         d->backend || !is_spread ? "" : ", for ranks on several hosts,",
                         b == fsdpi_backends ? " none" : text);
    }
    w->comm_ops = d->comm_ops ? d->comm_ops : b->comm_ops();
    if (fsdpi_ranks_meet(w->comm_ops)) FSDPI_TRY(fsdpi_job_check(w, d));
    if (!is_spread || d->comm_ops || !b->one_host) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_UNSUPPORTED,
                     "[E521] backend '%s' serves one host, the launcher has started ranks on "
                     "several hosts: set FSDP_BACKEND=gloo (docs/cluster.md)",
                     b->name);
}

static fsdp_status fsdpi_world_open_comm(fsdp_world *w) {
    if (!w->comm_ops) return FSDP_OK;
    FSDPI_TRY(fsdpi_table_check(w, "a backend's", w->comm_ops->version, w->comm_ops->size,
                                FSDP_COMM_VERSION, sizeof *w->comm_ops));
    fsdp_op op = FSDP_ZERO;
    op.kind = FSDPI_OPEN;
    op.what = w->job;
    fsdpi_flight_op *flight = w->flight ? fsdpi_flight_begin(w, &op) : NULL;
    fsdp_status status = w->comm_ops->open(&w->boot, &w->caps, &w->comm);
    if (flight && !status) fsdpi_flight_end(w, flight);
    if (status) {
        const char *text = w->comm_ops->error_text(NULL);
        w->comm = NULL;
        fsdpi_set_error(w, text);
        fsdpi_log(w, FSDP_LOG_ERROR, status, text);
        return status;
    }
    w->reduce_comm = w->comm;
    w->num_comms = 2; // comm and reduce_comm
    if (w->flight) fsdpi_flight_add(w, w->comm, 1, "world", NULL, w->size, w->rank);
    uint32_t needed = 1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER |
                      1u << FSDP_OP_ALL_REDUCE | 1u << FSDP_OP_BROADCAST;
    if ((w->caps.kinds & needed) != needed)
        return fsdp_fail(
            w, FSDP_ERR_UNSUPPORTED,
            "[E522] backend %s lacks all_gather, reduce_scatter, all_reduce or broadcast",
            w->comm_ops->name);
    status = w->comm_ops->alloc(w->comm, FSDPI_BOUNCE, &w->bounce);
    if (status) {
        w->bounce = NULL;
        return fsdpi_world_fail(w, status, "%s", w->comm_ops->error_text(w->comm));
    }
    return FSDP_OK;
}

// Opens the flight record. If that fails, training continues without one.
static void fsdpi_world_open_flight(fsdp_world *w, const fsdp_world_desc *d) {
    const char *dir = d->flight_record ? d->flight_record : fsdpi_env("FSDP_FLIGHT_RECORD");
    const char *why = dir ? fsdpi_flight_open(w, dir) : NULL;
    if (why)
        fsdp_warn(w,
                  "[E553] there is no flight record in directory '%s': %s: give a directory that "
                  "can be written, on a disk with %u KiB free for each rank",
                  dir, why, (unsigned)(sizeof(fsdpi_flight_record) >> 10));
}

static fsdp_status fsdpi_world_open_device(fsdp_world *w) {
    FSDPI_TRY(fsdpi_table_check(w, "a device's", w->device_ops->version, w->device_ops->size,
                                FSDP_DEVICE_VERSION, sizeof *w->device_ops));
    fsdp_status status = w->device_ops->open(&w->boot, &w->device);
    if (status) {
        w->device = NULL;
        return fsdpi_device_error(w, status, "open a context");
    }
    return FSDP_OK;
}

// Sets w->id, equal on all ranks: the sum of their random numbers or, with a backend that the
// program gives, a hash of the job's name.
static fsdp_status fsdpi_world_agree_id(fsdp_world *w, int is_given) {
    int64_t sum = (int64_t)w->id;
    if (is_given && w->size > 1) sum = (int64_t)(1 + (fsdpi_hash_text(w->job) >> 24));
    else if (w->size > 1 && fsdpi_ranks_meet(w->comm_ops))
        FSDPI_TRY(fsdp_all_reduce(w, NULL, &sum, 1, FSDP_I64, FSDP_SUM));
    w->id = (uint64_t)sum;
    if (w->flight) __atomic_store_n(&w->flight->id, w->id, __ATOMIC_RELEASE);
    return FSDP_OK;
}

// Makes the streams of a device, or worker threads. If two collectives may run at once, also makes
// a second communicator.
static fsdp_status fsdpi_world_open_streams(fsdp_world *w, int threads) {
    fsdp_status status = FSDP_OK;
    w->mode_reason = threads ? "as fsdp_world_desc.comm_threads or FSDP_COMM_THREADS says"
                     : w->caps.mode_reason ? w->caps.mode_reason
                                           : "by default";
    if (!threads) threads = w->caps.default_comm_threads;
    if (w->device_ops->flags & FSDP_DEVICE_ASYNC) {
        w->mode = FSDP_RUN_STREAMS;
        for (int s = 0; s < FSDP_STREAM_EXTENSION && !status; s++)
            status = w->device_ops->stream(w->device, s, &w->streams[s]);
        w->own_stream = w->streams[FSDP_STREAM_COMPUTE];
        if (!status) status = w->device_ops->event(w->device, &w->fence);
        for (unsigned i = 0; i < FSDP_STREAM_COUNT * FSDPI_DEVICE_EVENTS && !status; i++)
            status = w->device_ops->event(w->device, &w->points[i].event);
        if (status) return fsdpi_device_error(w, status, "make a stream");
    } else if (threads > 0) {
        w->mode = FSDP_RUN_THREADS;
        int two = threads > 1 && (w->size == 1 || w->caps.comm_threads > 1);
        status = fsdpi_worker_start(w, FSDP_STREAM_GATHER);
        if (!status && two) status = fsdpi_worker_start(w, FSDP_STREAM_REDUCE);
        if (!status && !two) w->workers[FSDP_STREAM_REDUCE] = w->workers[FSDP_STREAM_GATHER];
        w->workers[FSDP_STREAM_ALLREDUCE] = w->workers[FSDP_STREAM_REDUCE];
        if (status) return fsdpi_fail_together(w, status);
    }
    if (w->size == 1 || w->mode == FSDP_RUN_INLINE || w->caps.comm_threads < 2) return FSDP_OK;
    int32_t *ranks = (int32_t *)fsdpi_alloc(&w->boot.allocator, (size_t)w->size * sizeof *ranks);
    if (!ranks)
        return fsdpi_fail_together(
            w, fsdpi_no_memory(w, "list of ranks", "", (size_t)w->size * sizeof *ranks));
    for (int r = 0; r < w->size; r++) ranks[r] = r;
    fsdp_group group = {
        0, w->rank, w->size, FSDP_STREAM_REDUCE, ranks, "reductions of comm threads"};
    status = fsdpi_split(w, w->comm, &group, 2, &w->reduce_comm);
    fsdpi_free(&w->boot.allocator, ranks);
    if (status) w->reduce_comm = w->comm;
    return status;
}

static void fsdpi_world_close(fsdp_world *w) {
    fsdpi_workers_stop(w);
    fsdpi_timeline_close(w);
    w->streams[FSDP_STREAM_COMPUTE] = w->own_stream;
    for (int s = 0; s < FSDP_STREAM_COUNT; s++)
        if (w->streams[s]) w->device_ops->destroy(w->device, w->streams[s], NULL);
    if (w->fence) w->device_ops->destroy(w->device, NULL, w->fence);
    for (unsigned i = 0; i < FSDP_STREAM_COUNT * FSDPI_DEVICE_EVENTS; i++)
        if (w->points[i].event) w->device_ops->destroy(w->device, NULL, w->points[i].event);
    if (w->comm && w->reduce_comm != w->comm) w->comm_ops->close(w->reduce_comm);
    if (w->bounce) w->comm_ops->free(w->comm, w->bounce, FSDPI_BOUNCE);
    if (w->comm) w->comm_ops->close(w->comm);
    if (w->device) w->device_ops->close(w->device);
    fsdpi_flight_close(w);
    fsdp_allocator allocator = w->boot.allocator;
    (void)munmap(w->state, sizeof *w->state);
    fsdpi_free(&allocator, w);
}

static void fsdpi_world_messages(fsdp_world *w, const fsdp_world_desc *d) {
    w->rank = d->world_size > 0 ? d->rank : -1; // -1: unknown
    w->boot.log_level = d->log_level == FSDP_LOG_NONE ? 0
                        : d->log_level                ? d->log_level
                                                      : FSDP_LOG_WARN;
    w->boot.logger = d->logger;
    if (!d->logger.log) w->boot.logger.log = fsdpi_stderr_log;
}

static fsdp_status fsdpi_world_make(fsdp_world *early, fsdp_world_desc *d, fsdp_world **out) {
    FSDPI_TRY(fsdpi_world_resolve(early, d));
    FSDPI_TRY(fsdpi_job_name(early, d, early->job, sizeof early->job));
    FSDPI_TRY(fsdpi_store_name(early, d, early->store, sizeof early->store));
    fsdp_world *w = (fsdp_world *)fsdpi_alloc(&d->allocator, sizeof *w);
    if (w) w->state = fsdpi_fork_word(1);
    if (!w || !w->state) {
        fsdpi_free(&d->allocator, w);
        return fsdpi_no_memory(early, "fsdp_init", "", sizeof *w);
    }
    memcpy(w->job, early->job, sizeof w->job);
    memcpy(w->store, early->store, sizeof w->store);
    fsdpi_world_messages(w, d);
    w->boot.rank = w->rank;
    w->size = w->boot.size = d->world_size;
    w->boot.local_rank = d->local_rank;
    w->boot.hung = &w->hung;
    w->boot.threads = d->threads;
    w->boot.allocator = d->allocator;
    w->boot.clock = d->clock;
    w->boot.user = d->user;
    w->boot.job = w->job;
    w->boot.store = w->store;
    if (!fsdpi_random(&w->id, sizeof w->id)) // soon after the start of the system
        w->id = fsdpi_hash((uint64_t)fsdpi_system_ns(0), (uint64_t)(uintptr_t)w);
    w->id = 1 + (w->id >> 24); // so that sums over many ranks do not overflow
    fsdp_status status = fsdpi_world_choose(w, d);
    if (!status && !d->timeout_ms) // on GPUs, first compilations and connections take long
        d->timeout_ms = w->device_ops->flags & FSDP_DEVICE_ASYNC ? 600000 : 60000;
    w->boot.timeout_ns = (int64_t)d->timeout_ms * 1000000;
    if (!status) fsdpi_world_open_flight(w, d);
    if (!status) status = fsdpi_world_open_comm(w);
    if (!status) status = fsdpi_world_open_device(w);
    if (!status) status = fsdpi_world_open_streams(w, d->comm_threads);
    if (!status) status = fsdpi_world_agree_id(w, d->comm_ops != NULL);
    if (status && w->comm) status = fsdpi_fail_together(w, status); // the peers have joined, too
    if (status) {
        fsdpi_set_error(early, fsdp_last_error(w));
        if (w->flight && w->flight->state == FSDPI_FLIGHT_RUNS)
            fsdpi_flight_fail(w->flight, fsdpi_now(w), status, fsdp_last_error(w));
        fsdpi_world_close(w);
        return status;
    }
    char text[160];
    fsdpi_text t = {text, sizeof text, 0};
    fsdpi_text_add(&t, "collectives run ");
    fsdpi_say_mode(&t, w);
    if (w->rank == 0 && w->size > 1) fsdpi_log(w, FSDP_LOG_INFO, FSDP_OK, text);
    *out = w;
    return FSDP_OK;
}

FSDP_API FSDP_COLD fsdp_status fsdp_init(const fsdp_world_desc *desc, fsdp_world **world) {
    fsdp_world_desc d;
    fsdp_world early = FSDP_ZERO; // has rank, log level and errors until the world exists
    if (!world) return fsdp_fail_null(NULL, "fsdp_init", "world");
    *world = NULL;
    FSDPI_TRY(fsdp_desc_read(NULL, &d, desc, sizeof d, "fsdp_world_desc"));
    fsdpi_world_messages(&early, &d);
    fsdp_status status = fsdpi_world_make(&early, &d, world);
    if (status) fsdpi_set_error(NULL, early.error);
    return status;
}

FSDP_API FSDP_COLD fsdp_status fsdp_shutdown(fsdp_world *world) {
    if (!world) return FSDP_OK;
    if (fsdpi_is_child(world)) return fsdpi_failed(world);
    fsdpi_drain(world);
    while (world->models) {
        fsdp_model *m = world->models;
        world->models = m->next;
        fsdpi_model_close(m);
    }
    while (world->meshes) {
        fsdp_mesh *mesh = world->meshes;
        world->meshes = mesh->next;
        fsdpi_mesh_free(mesh);
    }
    fsdp_status failed = fsdpi_failed(world);
    fsdpi_world_close(world);
    return failed;
}

FSDP_API void fsdp_abort(fsdp_world *world, const char *why) {
    if (!world) return;
    (void)fsdpi_world_fail(world, FSDP_ERR_ABORTED, "rank %d: [E401] it aborted the world: %s",
                           world->rank, why ? why : "no reason given");
}

FSDP_API fsdp_status fsdp_set_stream(fsdp_world *world, void *native) {
    if (!world) return fsdp_fail_null(NULL, "set_stream", "world");
    FSDPI_TRY(fsdpi_failed(world));
    if (world->mode != FSDP_RUN_STREAMS)
        return fsdp_fail(world, FSDP_ERR_UNSUPPORTED,
                         "[E803] set_stream: device %s has no streams: omit the call on it",
                         world->device_ops->name);
    void **compute = &world->streams[FSDP_STREAM_COMPUTE];
    if (!native) native = world->own_stream;
    fsdp_status status = world->device_ops->record(world->device, *compute, world->fence);
    if (!status) status = world->device_ops->wait(world->device, native, world->fence);
    if (status) return fsdpi_device_fail(world, status, "ordering streams of");
    *compute = native;
    return FSDP_OK;
}

FSDP_API int fsdp_rank(const fsdp_world *world) { return world ? world->rank : -1; }
FSDP_API int fsdp_world_size(const fsdp_world *world) { return world ? world->size : -1; }
FSDP_API int fsdp_local_rank(const fsdp_world *w) { return w ? w->boot.local_rank : -1; }
FSDP_API const char *fsdp_last_error(const fsdp_world *world) {
    if (!world) return fsdpi_thread_error;
    return fsdpi_failed(world) ? world->failure : world->error;
}

FSDP_API fsdp_status fsdp_world_status(const fsdp_world *world) {
    return world ? fsdpi_failed(world) : FSDP_ERR_INVALID_ARG;
}

FSDP_API int fsdp_world_has(const fsdp_world *world, int kind) {
    return world && world->comm_ops && kind >= 0 && kind < FSDP_OP_COUNT &&
           (world->caps.kinds & 1u << kind) != 0;
}

/* -------------------------------------------------------------------------------------------- */
// Collectives on host data.

// Runs a collective on data in host or device memory. Copies the data through memory that peers may
// read, FSDPI_BOUNCE bytes at a time.
static fsdp_status fsdpi_host_collective(fsdp_world *w, fsdp_comm *comm, fsdp_op *op, char *data,
                                         int64_t count) {
    size_t size = fsdp_dtype_size(op->dtype);
    int64_t step = (int64_t)(FSDPI_BOUNCE / size);
    op->in_place = 1;
    op->what_hash = fsdpi_hash_text(op->what);
    op->comm = comm;
    op->src_ptr = op->dst_ptr = w->bounce;
    fsdpi_drain(w); // worker threads may use the communicator
    int64_t at = 0;
    do {
        int64_t num = fsdpi_min(step, count - at);
        op->count = (uint64_t)num;
        op->bytes = fsdpi_coll_bytes(op->kind, (uint64_t)op->group_size, (uint64_t)num * size);
        char *piece = data + (size_t)at * size;
        FSDPI_TRY(fsdpi_transfer(w, w->bounce, piece, (size_t)num * size));
        FSDPI_TRY(fsdpi_emit_world(w, op, NULL));
        FSDPI_TRY(fsdpi_transfer(w, piece, w->bounce, (size_t)num * size));
        at += num;
    } while (at < count);
    return FSDP_OK;
}

// Checks the arguments of a collective on host data.
static fsdp_status fsdpi_host_call(fsdp_world *w, const fsdp_mesh *mesh, const void *data,
                                   int64_t count, const char *what) {
    if (!w) return fsdp_fail_null(mesh ? mesh->world : NULL, what, "world");
    FSDPI_TRY(fsdpi_failed(w));
    if (count < 0 || count > INT64_MAX / 8 || (count > 0 && !data))
        return fsdpi_invalid_arg(
            w, "[E104] %s: count is %lld and data is %s, expected 0..2^60 and data", what,
            (long long)count, data ? "given" : "NULL");
    if (mesh && (mesh->world != w || mesh->coord[0] < 0))
        return fsdpi_invalid_arg(
            w, "[E105] %s: give a mesh of this world, on a rank that is in the mesh", what);
    return FSDP_OK;
}

/* Runs a collective over the world (mesh NULL), or over a mesh, dim by dim. A reduction over each
   dim gives the reduction over the mesh. A broadcast first reaches ranks that differ from the root
   only in dim 0, then those that differ in dims 0 and 1, and so on. Other groups broadcast as well
   in that time: a later dim overwrites their data. */
static fsdp_status fsdpi_host_mesh(fsdp_world *w, const fsdp_mesh *mesh, fsdp_op *op, int root,
                                   void *data, int64_t count) {
    fsdp_status status = FSDP_OK;
    for (int d = 0; d < (mesh ? mesh->ndim : 1) && !status; d++) {
        fsdp_comm *comm = mesh ? mesh->gather_comm[d] : w->comm; // NULL: a group of one
        op->group_size = mesh ? mesh->shape[d] : w->size;
        op->root = mesh ? root / fsdpi_mesh_stride(mesh, d) % mesh->shape[d] : root;
        if (comm) status = fsdpi_host_collective(w, comm, op, (char *)data, count);
    }
    return status;
}

FSDP_API fsdp_status fsdp_all_reduce(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                     int64_t count, fsdp_dtype dtype, fsdp_redop op) {
    FSDPI_TRY(fsdpi_host_call(world, mesh, data, count, "all_reduce"));
    if (!(fsdp_dtype_is_float(dtype) || dtype == FSDP_I32 || dtype == FSDP_I64) || op < FSDP_SUM ||
        op > FSDP_MIN)
        return fsdpi_invalid_arg(
            world,
            "[E106] all_reduce: dtype is %s and op is %d, expected f32, f64, f16, "
            "bf16, i32 or i64, and FSDP_SUM, FSDP_MAX or FSDP_MIN",
            fsdp_dtype_name(dtype), op);
    fsdp_op record = fsdpi_world_op(FSDP_OP_ALL_REDUCE, FSDP_LABEL_WORLD, "fsdp_all_reduce", dtype);
    record.redop = (uint8_t)op;
    return fsdpi_host_mesh(world, mesh, &record, 0, data, count);
}

FSDP_API fsdp_status fsdp_broadcast(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                    int64_t nbytes, int root) {
    FSDPI_TRY(fsdpi_host_call(world, mesh, data, nbytes, "broadcast"));
    int size = mesh ? fsdpi_mesh_numel(mesh) : world->size;
    if (root < 0 || root >= size)
        return fsdpi_invalid_arg(world, "[E107] broadcast: root is %d, expected 0..%d", root,
                                 size - 1);
    fsdp_op record = fsdpi_world_op(FSDP_OP_BROADCAST, FSDP_LABEL_WORLD, "fsdp_broadcast", FSDP_U8);
    return fsdpi_host_mesh(world, mesh, &record, root, data, nbytes);
}

FSDP_API fsdp_status fsdp_barrier(fsdp_world *world) {
    int32_t one = 1;
    FSDPI_TRY(fsdpi_host_call(world, NULL, &one, 1, "barrier"));
    fsdp_op record = fsdpi_world_op(FSDP_OP_ALL_REDUCE, FSDP_LABEL_WORLD, "fsdp_barrier", FSDP_I32);
    return fsdpi_host_mesh(world, NULL, &record, 0, &one, 1);
}

#endif // FSDPI_CORE_WORLD_H
