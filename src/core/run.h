/* core/run.h - how ops run: at once, in worker threads, on a device's streams;
   fsdpi_emit, which issues every op of a model

   State: a world's workers, and the clocks and device events of its streams; fsdp_model.seq.
   Callers: extend.h (fsdpi_drain), world.h (fsdpi_worker_start), params.h (fsdpi_transfer) and
     others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_RUN_H
#define FSDPI_CORE_RUN_H

#include "../base/hash.h"
#include "../base/macros.h"
#include "../base/os.h"
#include "alloc.h"
#include "error.h"
#include "flight.h"
#include "host.h"
#include "mesh.h"
#include "objects.h"
#include "shard_math.h"
#include "timeline.h"
#include "ext_dispatch.h"

#include <poll.h>
#include <pthread.h>
#include <string.h>

/* Bytes that a rank reads from the others: (group_size-1) times its own part. For an all_reduce,
   the least that it has to receive, however a backend does it. */
static inline uint64_t fsdpi_coll_bytes(int kind, uint64_t group_size, uint64_t nbytes) {
    if (kind == FSDP_OP_ALL_GATHER || kind == FSDP_OP_REDUCE_SCATTER || kind == FSDP_OP_ALL_TO_ALL)
        return (group_size - 1) * nbytes;
    if (kind == FSDP_OP_ALL_REDUCE)
        return (2 * (group_size - 1) * nbytes + group_size - 1) / group_size;
    return kind == FSDP_OP_SEND ? 0 : nbytes;
}

// Reports that a function of the user has failed inside an op: the world fails.
static fsdp_status fsdpi_user_fail(fsdp_world *w, const fsdp_op *op, fsdp_status result) {
    int fatal = result > FSDP_ERR_INVALID_STATE && result <= FSDP_ERR_INTERNAL;
    return fsdpi_world_fail(
        w, fatal ? result : FSDP_ERR_ABORTED,
        "rank %d: [E402] your function for %s (%s) of unit '%s' returned %d (%s)", w->rank,
        fsdp_op_name(op->kind), fsdp_op_label(op), op->what, (int)result, fsdp_status_name(result));
}

// Returns the user's function for a unit's collective in a step, or NULL. Collectives of param_full
// have none.
static fsdp_custom_comm fsdpi_custom_comm(const fsdp_op *op, void **user) {
    int which = op->label == FSDP_LABEL_GATHER     ? FSDPI_CUSTOM_GATHER
                : op->label == FSDP_LABEL_REDUCE   ? FSDPI_CUSTOM_SCATTER
                : op->label == FSDP_LABEL_REPLICAS ? FSDPI_CUSTOM_ALL_REDUCE
                                                   : FSDPI_CUSTOM_COUNT;
    if (which == FSDPI_CUSTOM_COUNT) return NULL;
    *user = op->unit->options.custom_user[which];
    return op->unit->options.custom[which];
}

// Runs a collective. recorded: its entry in the flight record, or NULL.
static fsdp_status fsdpi_run_collective(fsdp_world *w, const fsdp_op *op, void *stream,
                                        fsdpi_flight_op *recorded) {
    fsdp_coll c; // every field is set here
    c.kind = op->kind;
    c.dtype = op->dtype;
    c.out_dtype = op->out_dtype;
    c.redop = op->redop;
    c.in_place = op->in_place;
    c.accumulate = op->accumulate;
    c.label = op->label;
    c.state = op->state;
    c.scale = op->scale;
    c.root = op->root;
    c.segs = (const fsdp_seg *)op->list;
    c.num_segs = op->list_count;
    c.count = op->count;
    c.src = op->src_ptr;
    c.dst = op->dst_ptr;
    c.seq = op->seq;
    c.what = op->what;
    c.unused = op->unused;
    c.stream = stream;
    // What ranks must agree on in addition to kind, dtype and count, which backends compare. seq is
    // not in it, since ranks may have other local ops. What fsdp_agree was given is in it only for
    // the groups of a unit and for clip: other groups may have other optimizers.
    uint64_t factor;
    memcpy(&factor, &op->factor, sizeof factor);
    uint64_t root = op->kind == FSDP_OP_BROADCAST ? (uint64_t)(uint32_t)op->root << 40 : 0;
    uint64_t how = root | (uint64_t)op->out_dtype << 32 | (uint64_t)op->redop << 24 |
                   (uint64_t)op->label << 16 | (uint64_t)op->state << 8 | op->accumulate;
    uint64_t given = op->unit || op->label == FSDP_LABEL_CLIP ? op->given : 0;
    const uint64_t alike[] = {how, op->step + given + factor};
    c.fingerprint = fsdpi_hash_words(op->what_hash, alike, 2);
    memcpy(c.agree, op->agree, sizeof c.agree);
    c.agree[FSDP_AGREE_FACTOR] = (uint8_t)(factor * 0x9E3779B97F4A7C15u >> 56);
    c.agree[FSDP_AGREE_STEP] = (uint8_t)op->step;
    c.agree[FSDP_AGREE_GIVEN] = (uint8_t)given;
    void *user;
    fsdp_custom_comm custom = fsdpi_custom_comm(op, &user);
    c.ended_ns = recorded && stream ? &recorded->end_ns : NULL;
    if (recorded) recorded->fingerprint = c.fingerprint;
    fsdp_status status = custom ? custom(user, w->comm_ops, op->comm, &c)
                                : w->comm_ops->run(op->comm, &c);
    const char *text = status ? w->comm_ops->error_text(op->comm) : "";
    if (status && custom && !*text) return fsdpi_user_fail(w, op, status);
    return status ? fsdpi_world_fail(w, status, "%s", text) : FSDP_OK;
}

// Runs a collective, and enters it into the flight record. One that fails stays there as an
// operation that has not ended.
static FSDPI_NOINLINE fsdp_status fsdpi_run_recorded(fsdp_world *w, const fsdp_op *op,
                                                     void *stream) {
    fsdpi_flight_op *recorded = fsdpi_flight_begin(w, op);
    recorded->on_stream = stream != NULL;
    fsdp_status status = fsdpi_run_collective(w, op, stream, recorded);
    if (!stream && !status) fsdpi_flight_end(w, recorded);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// How ops run, inline or in worker threads, and events. A worker is one thread with a FIFO of ops;
// an event is a position in a worker's order. Invariants: ops of one stream run in the order of
// issue. COMPUTE is the caller's own thread: its earlier work is done.

#define FSDPI_WORKER_OPS 64 // ops issued ahead per worker; issuing one more waits

struct fsdpi_worker {
    fsdp_world *world;
    pthread_t thread;
    uint64_t issued;             // ops issued so far, by the caller's thread
    uint32_t head;               // [release, seq_cst] published; low 32 bits of a count
    uint32_t done;               // [release, seq_cst] finished; low 32 bits of a count
    uint32_t asleep;             // [seq_cst] the worker sleeps on head
    uint32_t waited_for;         // [seq_cst] another thread sleeps on done
    uint32_t stop;               // [release, seq_cst]
    uint32_t is_here;            // [release]
    fsdp_op ring[FSDPI_WORKER_OPS];
};

// Returns the text of a call of the device table that has failed.
static const char *fsdpi_device_text(const fsdp_world *w, fsdp_status status) {
    const char *text = w->device_ops->error_text ? w->device_ops->error_text(w->device) : "";
    return *text ? text : fsdp_status_text(status);
}

// Reports that a call of the device table has failed. The world continues.
static fsdp_status fsdpi_device_error(fsdp_world *w, fsdp_status status, const char *what) {
    return fsdp_fail(w, status, "[E801] the library could not %s on device %s: %s", what,
                     w->device_ops->name, fsdpi_device_text(w, status));
}

static int fsdpi_is_host(const fsdp_world *w) {
    return (w->device_ops->flags & FSDP_DEVICE_HOST) != 0;
}

// Returns 1 if the library poisons memory that the caller must not touch (guard.h). It does not if
// a device has the memory, or runs ops in an order of its own.
static inline int fsdpi_is_guarded(const fsdp_world *w) {
    return FSDPI_ASAN && fsdpi_is_host(w) && w->mode != FSDP_RUN_STREAMS;
}
// Returns 1 if there is memory to poison. The device of a prediction (predict.h) has no memory and
// no `copy`.
static inline int fsdpi_can_close(const fsdp_world *w) {
    return fsdpi_is_guarded(w) && w->device_ops->copy != NULL;
}

// Reports that the work of an op has failed: a function of the user, or the device.
static FSDPI_NOINLINE fsdp_status fsdpi_work_failed(fsdp_world *w, const fsdp_op *op,
                                                    fsdp_status status) {
    if (op->kind == FSDP_OP_CALL) return fsdpi_user_fail(w, op, status);
    return fsdpi_world_fail(w, status, "rank %d: [E802] %s (%s) of '%s' failed on device %s: %s",
                            w->rank, fsdp_op_name(op->kind), fsdp_op_label(op), op->what,
                            w->device_ops->name, fsdpi_device_text(w, status));
}

// Does the work of an op. `stream`: native, or NULL.
static fsdp_status fsdpi_execute(fsdp_world *w, const fsdp_op *op, void *stream) {
    const fsdp_device_ops *d = w->device_ops;
    fsdp_status status;
    switch (op->kind) {
    case FSDP_OP_WAIT: return FSDP_OK;
    case FSDP_OP_COPY: status = d->copy(w->device, stream, op); break;
    case FSDP_OP_ZERO: status = d->zero(w->device, stream, op); break;
    case FSDP_OP_NORM: status = d->norm(w->device, stream, op); break;
    case FSDP_OP_CALL: status = op->call(op, stream); break;
    case FSDP_OP_UPDATE:
        status = op->call
                     ? op->call(op, stream)
                     : d->update(w->device, stream, (const fsdp_update *)op->list, op->list_count);
        break;
    default:
        return w->flight ? fsdpi_run_recorded(w, op, stream)
                         : fsdpi_run_collective(w, op, stream, NULL);
    }
    return status ? fsdpi_work_failed(w, op, status) : FSDP_OK;
}

// Does the work of an op whose times an extension wants. On a stream the op's entry is the one that
// fsdpi_timeline_reach has made.
static FSDPI_NOINLINE fsdp_status fsdpi_execute_timed(fsdp_world *w, const fsdp_op *op,
                                                      void *stream) {
    fsdpi_timed *one = stream && w->timeline ? w->timeline->reached : NULL;
    fsdp_status missed = FSDP_OK;
    if (one && one->op.num_waits) missed = w->device_ops->record(w->device, stream, one->begin);
    int64_t begin = fsdpi_now(w);
    fsdp_status status = fsdpi_execute(w, op, stream);
    if (one && !status && !missed) missed = w->device_ops->record(w->device, stream, one->end);
    if (one) one->state = status || missed ? FSDPI_TIMED_FAILED : FSDPI_TIMED_ENDS;
    if (!stream && !status) fsdpi_tell_ran(w, op, begin, fsdpi_now(w));
    return status;
}

static inline fsdp_status fsdpi_run_op(fsdp_world *w, const fsdp_op *op, void *stream) {
    return op->timed ? fsdpi_execute_timed(w, op, stream) : fsdpi_execute(w, op, stream);
}

// Waits until the worker has finished `seq` ops: it spins for a short time, then sleeps.
static void fsdpi_worker_wait(fsdpi_worker *worker, uint64_t seq) {
    for (int spin = 0; spin < 200; spin++) {
        if ((int32_t)(FSDPI_LOAD(&worker->done) - (uint32_t)seq) >= 0) return;
        fsdpi_pause();
    }
    for (;;) {
        __atomic_store_n(&worker->waited_for, 1u, __ATOMIC_SEQ_CST);
        uint32_t done = __atomic_load_n(&worker->done, __ATOMIC_SEQ_CST);
        if ((int32_t)(done - (uint32_t)seq) >= 0) return;
        fsdpi_futex_wait(&worker->done, done, 50000000, 0);
    }
}

// Waits until other workers have finished what an op of the worker `own` (NULL: COMPUTE) waits for.
static void fsdpi_worker_await(fsdp_world *w, const fsdpi_worker *own, fsdp_op *op) {
    const int timed = op->timed && op->num_waits;
    const int64_t reached = timed ? fsdpi_now(w) : 0;
    for (int i = 0; i < op->num_waits; i++) {
        fsdpi_worker *other = w->workers[op->wait[i].stream];
        if (other && other != own) fsdpi_worker_wait(other, op->wait[i].seq);
    }
    if (timed) op->waited_ns = fsdpi_now(w) - reached;
}

static void *fsdpi_worker_main(void *arg) {
    fsdpi_worker *worker = (fsdpi_worker *)arg;
    fsdp_world *w = worker->world;
    uint32_t next = 0;
    fsdpi_pin_library();
    FSDPI_STORE(&worker->is_here, 1u);
    for (;;) {
        for (int spin = 0; spin < 200 && FSDPI_LOAD(&worker->head) == next; spin++) fsdpi_pause();
        while (__atomic_load_n(&worker->head, __ATOMIC_SEQ_CST) == next) {
            if (FSDPI_LOAD(&worker->stop)) return NULL;
            __atomic_store_n(&worker->asleep, 1u, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&worker->head, __ATOMIC_SEQ_CST) == next &&
                !FSDPI_LOAD(&worker->stop))
                fsdpi_futex_wait(&worker->head, next, 50000000, 0);
            __atomic_store_n(&worker->asleep, 0u, __ATOMIC_SEQ_CST);
        }
        fsdp_op *op = &worker->ring[next % FSDPI_WORKER_OPS];
        fsdpi_worker_await(w, worker, op);
        if (!fsdpi_failed(w))
            (void)fsdpi_run_op(w, op, NULL); // after a failure the world stays failed
        next++;
        __atomic_store_n(&worker->done, next, __ATOMIC_SEQ_CST);
        if (__atomic_exchange_n(&worker->waited_for, 0u, __ATOMIC_SEQ_CST))
            fsdpi_futex_wake_all(&worker->done, 0);
    }
}

static fsdp_status fsdpi_worker_start(fsdp_world *w, int stream) {
    fsdpi_worker *worker = (fsdpi_worker *)fsdpi_alloc(&w->boot.allocator, sizeof *worker);
    if (!worker) return fsdpi_no_memory(w, "worker thread", "", sizeof *worker);
    worker->world = w;
    int rc = pthread_create(&worker->thread, NULL, fsdpi_worker_main, worker);
    if (rc) {
        fsdpi_free(&w->boot.allocator, worker);
        return fsdp_fail(w, FSDP_ERR_OUT_OF_MEMORY,
                         "[E302] the system cannot start a worker thread: %s", strerror(rc));
    }
    w->workers[stream] = worker;
    while (!FSDPI_LOAD(&worker->is_here)) fsdpi_futex_wait(&worker->is_here, 0, 50000, 0);
    return FSDP_OK;
}

// Makes the stream EXTENSION at its first op. On a device it is another stream. With worker threads
// it is another thread, if collectives of several streams may run at the same time.
static fsdp_status fsdpi_extension_stream(fsdp_world *w) {
    const int s = FSDP_STREAM_EXTENSION;
    if (w->mode == FSDP_RUN_STREAMS && !w->streams[s]) {
        fsdp_status status = w->device_ops->stream(w->device, s, &w->streams[s]);
        if (status) w->streams[s] = NULL;
        return status ? fsdpi_device_error(w, status, "make a stream") : FSDP_OK;
    }
    if (w->mode != FSDP_RUN_THREADS || w->workers[s]) return FSDP_OK;
    if (w->size == 1 || w->caps.comm_threads > 1) return fsdpi_worker_start(w, s);
    w->workers[s] = w->workers[FSDP_STREAM_GATHER];
    return FSDP_OK;
}

static void fsdpi_workers_stop(fsdp_world *w) {
    for (int s = 0; s < FSDP_STREAM_COUNT; s++) {
        fsdpi_worker *worker = w->workers[s];
        if (!worker) continue;
        for (int t = s; t < FSDP_STREAM_COUNT; t++)
            if (w->workers[t] == worker) w->workers[t] = NULL;
        __atomic_store_n(&worker->stop, 1u, __ATOMIC_SEQ_CST);
        fsdpi_futex_wake_all(&worker->head, 0);
        (void)pthread_join(worker->thread, NULL);
        fsdpi_free(&w->boot.allocator, worker);
    }
}

// Returns the failure of the world if the backend knows one, otherwise FSDP_OK.
static fsdp_status fsdpi_backend_poll(fsdp_world *w) {
    fsdp_status status = w->comm && w->comm_ops->poll ? w->comm_ops->poll(w->comm) : FSDP_OK;
    return status ? fsdpi_world_fail(w, status, "%s", w->comm_ops->error_text(w->comm)) : FSDP_OK;
}

// Reports that a call of the device table has failed outside an op. It also fails if a peer has
// ended and so has stopped a collective: then the backend's text says more.
static fsdp_status fsdpi_device_fail(fsdp_world *w, fsdp_status status, const char *what) {
    fsdp_status known = fsdpi_backend_poll(w);
    if (known) return known;
    return fsdpi_world_fail(w, status, "rank %d: [E804] %s device %s failed: %s", w->rank, what,
                            w->device_ops->name, fsdpi_device_text(w, status));
}

#define FSDPI_FENCE_NS       ((int64_t)50000000)   // from one look at the world to the next
#define FSDPI_FENCE_GRACE_NS ((int64_t)3000000000) // after the deadline: the backend may say more
#define FSDPI_FENCE_LAST_NS  ((int64_t)2000000000) // after a failure: collectives end meanwhile

// Waits on the host for the fence, until the deadline. If the world fails meanwhile, its
// collectives end, and the host does not wait much longer.
static fsdp_status fsdpi_await_fence(fsdp_world *w) {
    int64_t start = w->boot.clock.now_ns(w->boot.clock.user), waited = 0;
    int64_t limit = w->boot.timeout_ns + FSDPI_FENCE_GRACE_NS;
    for (;;) {
        if (fsdpi_failed(w)) limit = fsdpi_min(limit, FSDPI_FENCE_LAST_NS + waited);
        int64_t slice = fsdpi_min(limit - waited, FSDPI_FENCE_NS);
        fsdp_status status = w->device_ops->sync(w->device, w->fence, slice > 0 ? slice : 0);
        if (status != FSDP_ERR_TIMEOUT) return status;
        waited = w->boot.clock.now_ns(w->boot.clock.user) - start;
        if (waited >= limit) FSDPI_STORE(&w->hung, 1u);
        if (waited >= limit) return status;
        (void)fsdpi_backend_poll(w);
    }
}

// Sets *event to the current end of `stream`. A device event is recorded lazily, when another
// stream first waits for it. If more work follows at once, that is too late: pass the buffer as
// `due`, and the event is recorded before that work. Otherwise `due` is NULL.
static inline void fsdpi_mark(fsdp_world *w, int stream, fsdp_event *event, const fsdp_buf *due) {
    fsdpi_stream_clock *o = &w->order[stream];
    event->stream = stream;
    if (w->mode == FSDP_RUN_STREAMS) event->seq = ++o->clock[stream];
    else event->seq = w->workers[stream] ? w->workers[stream]->issued : 1;
    if (due && due->ptr && w->mode == FSDP_RUN_STREAMS) // in a dry run ptr may be NULL
        o->due_buf = o->due++ ? NULL : due;
}

// Records a device event: a point after all marks of a stream so far.
static fsdp_status fsdpi_record_event(fsdp_world *w, int stream) {
    fsdpi_stream_clock *o = &w->order[stream];
    fsdpi_device_event *p =
        &w->points[(unsigned)stream * FSDPI_DEVICE_EVENTS + o->recorded++ % FSDPI_DEVICE_EVENTS];
    memcpy(p->clock, o->clock, sizeof p->clock);
    o->due = 0;
    fsdp_status status = w->device_ops->record(w->device, w->streams[stream], p->event);
    return status ? fsdpi_device_fail(w, status, "recording an event on") : FSDP_OK;
}

// Makes a stream wait for a mark of another stream, unless it has done so: for the first point that
// comes after the mark.
static fsdp_status fsdpi_wait_for(fsdp_world *w, int stream, const fsdp_event *mark) {
    fsdpi_stream_clock *o = &w->order[stream], *other = &w->order[mark->stream];
    const fsdpi_device_event *p = &w->points[(unsigned)mark->stream * FSDPI_DEVICE_EVENTS];
    uint64_t at = other->recorded;
    if (o->clock[mark->stream] >= mark->seq) return FSDP_OK;
    for (; at > 0 && other->recorded - at < FSDPI_DEVICE_EVENTS; at--)
        if (p[(at - 1) % FSDPI_DEVICE_EVENTS].clock[mark->stream] < mark->seq) break;
    if (at == other->recorded) FSDPI_TRY(fsdpi_record_event(w, mark->stream));
    p += at % FSDPI_DEVICE_EVENTS;
    for (int s = 0; s < FSDP_STREAM_COUNT; s++)
        if (o->clock[s] < p->clock[s]) o->clock[s] = p->clock[s];
    fsdp_status status = w->device_ops->wait(w->device, w->streams[stream], p->event);
    return status ? fsdpi_device_fail(w, status, "ordering streams of") : FSDP_OK;
}

// Returns 1, and fails the world, if the calling thread is a worker: a hook there that waits for
// the worker threads would wait for itself.
static int fsdpi_waits_for_itself(fsdp_world *w) {
    int is_worker = 0;
    for (int s = 0; s < FSDP_STREAM_COUNT; s++)
        is_worker |= w->workers[s] && pthread_equal(w->workers[s]->thread, pthread_self());
    if (is_worker)
        (void)fsdpi_world_fail(w, FSDP_ERR_INVALID_STATE,
                               "rank %d: [E216] a hook that runs in a worker thread has called a "
                               "function of the world: communicate by the comm that the hook was "
                               "given, or run inline (FSDP_COMM_THREADS=0)",
                               w->rank);
    return is_worker;
}

// Waits on the host until everything issued so far on a stream is done.
static fsdp_status fsdpi_sync(fsdp_world *w, int stream) {
    if (fsdpi_is_child(w) || fsdpi_waits_for_itself(w)) return fsdpi_failed(w);
    if (w->workers[stream]) fsdpi_worker_wait(w->workers[stream], w->workers[stream]->issued);
    if (!w->fence || !w->streams[stream]) return fsdpi_failed(w);
    fsdp_status status = w->device_ops->record(w->device, w->streams[stream], w->fence);
    if (!status) status = fsdpi_await_fence(w);
    if (status) return fsdpi_device_fail(w, status, "waiting for");
    fsdpi_timeline_tell(w, 0);
    FSDPI_TRY(fsdpi_backend_poll(w)); // a failure that came meanwhile
    return fsdpi_failed(w);
}

static void fsdpi_drain(fsdp_world *w) {
    for (int s = 0; s < FSDP_STREAM_COUNT; s++) (void)fsdpi_sync(w, s);
}

// Runs an op, or queues it in its stream: for a worker or for the device. It starts after the
// events in wait[].
static fsdp_status fsdpi_issue(fsdp_world *w, fsdp_op *op) {
    if (w->mode == FSDP_RUN_INLINE) return fsdpi_run_op(w, op, NULL);
    if (w->mode == FSDP_RUN_STREAMS) {
        const fsdpi_stream_clock *o = &w->order[op->stream];
        int again = op->stream == FSDP_STREAM_COMPUTE || (op->dst && o->due_buf == op->dst);
        int swap = op->num_waits == 2 && op->wait[0].seq < op->wait[1].seq; // the later one first
        if (o->due && !again) FSDPI_TRY(fsdpi_record_event(w, op->stream));
        if (op->timed) fsdpi_timeline_reach(w, op, w->streams[op->stream]);
        for (int i = 0; i < op->num_waits; i++)
            FSDPI_TRY(fsdpi_wait_for(w, op->stream, &op->wait[i ^ swap]));
        return fsdpi_run_op(w, op, w->streams[op->stream]);
    }
    fsdpi_worker *own = w->workers[op->stream];
    if (own) {
        if (own->issued >= FSDPI_WORKER_OPS)
            fsdpi_worker_wait(own, own->issued - FSDPI_WORKER_OPS + 1);
        own->ring[own->issued % FSDPI_WORKER_OPS] = *op;
        own->issued++;
        __atomic_store_n(&own->head, (uint32_t)own->issued, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&own->asleep, __ATOMIC_SEQ_CST)) fsdpi_futex_wake_all(&own->head, 0);
        return FSDP_OK;
    }
    fsdpi_worker_await(w, NULL, op);
    FSDPI_TRY(fsdpi_failed(w)); // one of these ops may have failed
    return fsdpi_run_op(w, op, NULL);
}

// Derives the waits of an op by three rules. Reading waits for the last write by another stream;
// writing too (one writer at a time); the first write after acquire waits for the last consumer's
// release.
static inline void fsdpi_derive_waits(fsdp_op *op) {
    const fsdp_buf *src = op->src, *dst = op->dst;
    uint8_t num = 0;
    if (src && src->ready.seq != 0 && src->ready.stream != op->stream) op->wait[num++] = src->ready;
    if (dst && dst != src) {
        const fsdp_event *event = dst->avail.seq ? &dst->avail : &dst->ready;
        if (event->seq != 0 && event->stream != op->stream) op->wait[num++] = *event;
    }
    op->num_waits = num;
}

// Shows the op to extensions as `seen`, a copy, which they may change. Returns the op that runs, or
// NULL: none.
static FSDPI_NOINLINE fsdp_op *fsdpi_ext_show_op(fsdp_model *m, const fsdp_op *op, fsdp_op *seen) {
    fsdpi_subgroup group;
    *seen = *op;
    seen->comm_number = (uint16_t)fsdpi_comm_number(m->world, op->comm, &group);
    seen->timed = op->kind < FSDP_OP_HOOK && (m->listeners & FSDPI_LISTEN_TIMES);
    void *user;
    seen->custom = op->comm && op->unit && fsdpi_custom_comm(op, &user);
    return fsdpi_ext_offer_op(m, seen) || op->kind >= FSDP_OP_HOOK ? NULL : seen;
}

static FSDPI_NOINLINE fsdp_status fsdpi_emit_ordered(fsdp_model *m, fsdp_op *op) {
    fsdp_world *w = m->world;
    fsdp_status status = FSDP_OK;
    if (w->mode != FSDP_RUN_INLINE) fsdpi_derive_waits(op);
    fsdp_op seen;
    fsdp_op *runs = m->listeners & FSDPI_LISTEN_RECORDS ? fsdpi_ext_show_op(m, op, &seen) : op;
    if (runs) status = fsdpi_issue(w, runs);
    // Cleared last: an op that an extension emits in place of this one must wait for `avail`, too.
    if (op->dst) op->dst->avail.seq = 0;
    // GATHER and EXTENSION run ahead: their next op may come before a reader of this one.
    unsigned due = 1u << op->stream & (1u << FSDP_STREAM_GATHER | 1u << FSDP_STREAM_EXTENSION);
    if (!status && op->dst) fsdpi_mark(w, op->stream, &op->dst->ready, due ? op->dst : NULL);
    return status;
}

// Issues an op of a model. The op is the caller's: it may be one that is issued again and again.
static fsdp_status fsdpi_emit(fsdp_model *m, fsdp_op *op) {
    FSDPI_TRY(fsdpi_failed(m->world));
    op->seq = ++m->seq;
    m->counters.calls[op->kind]++;
    m->counters.bytes[op->kind] += op->bytes;
    if (m->world->mode == FSDP_RUN_INLINE && !(m->listeners & FSDPI_LISTEN_RECORDS))
        return fsdpi_execute(m->world, op, NULL); // no order to keep
    return fsdpi_emit_ordered(m, op);
}

// Emits a marker: it is numbered, counted and shown. It waits for nothing and sets no event.
static fsdp_status fsdpi_show(fsdp_model *m, fsdp_op *op) {
    fsdp_status status = fsdpi_failed(m->world);
    if (status || !(m->listeners & FSDPI_LISTEN_OPS)) return status;
    op->seq = ++m->seq;
    m->counters.calls[op->kind]++;
    fsdp_op seen;
    (void)fsdpi_ext_show_op(m, op, &seen);
    return FSDP_OK;
}

// Shows an op that belongs to no model to the extensions of all models, and runs it at once. The
// host makes copies itself if it can. `stream`: native, or NULL.
static fsdp_status fsdpi_emit_world(fsdp_world *w, fsdp_op *op, void *stream) {
    fsdp_op seen = *op;
    fsdpi_subgroup group;
    op->seq = seen.seq = ++w->seq;
    seen.comm_number = (uint16_t)fsdpi_comm_number(w, op->comm, &group);
    for (fsdp_model *m = w->models; m; m = m->next) {
        if (m->listeners & FSDPI_LISTEN_TIMES) seen.timed = 1;
        if ((m->listeners & FSDPI_LISTEN_OPS) && fsdpi_ext_offer_op(m, &seen)) return FSDP_OK;
    }
    if (seen.timed && stream) fsdpi_timeline_reach(w, &seen, stream);
    if (seen.kind != FSDP_OP_COPY || !fsdpi_is_host(w)) return fsdpi_run_op(w, &seen, stream);
    int64_t begin = seen.timed ? fsdpi_now(w) : 0;
    fsdp_status status = fsdpi_host_copy(NULL, NULL, &seen);
    if (seen.timed && !status) fsdpi_tell_ran(w, &seen, begin, fsdpi_now(w));
    return status;
}

// Returns an op that belongs to no model: a transfer, or a collective on host data.
static fsdp_op fsdpi_world_op(int kind, int label, const char *what, fsdp_dtype dtype) {
    fsdp_op op = FSDP_ZERO;
    op.kind = (uint8_t)kind;
    op.label = (uint8_t)label;
    op.what = what;
    op.dtype = op.out_dtype = (uint8_t)dtype;
    op.scale = 1.0;
    return op;
}

/* Copies rows of bytes between host and device memory, or within one of them, after the work of
   COMPUTE; the copy is done on return. So the host waits: a steady step does this only for numbers
   that the host asks for, as a norm. */
static fsdp_status fsdpi_transfer_rows(fsdp_world *w, void *dst, const void *src,
                                       const fsdp_block *rows) {
    fsdp_op op = fsdpi_world_op(FSDP_OP_COPY, FSDP_LABEL_TRANSFER, "transfer", FSDP_U8);
    op.count = op.bytes = (uint64_t)(rows->width * rows->height);
    op.list = rows;
    op.list_count = 1;
    op.src_ptr = src;
    op.dst_ptr = dst;
    if (op.count == 0) return fsdpi_failed(w);
    FSDPI_TRY(fsdpi_sync(w, FSDP_STREAM_COMPUTE)); // it has a deadline; a copy may block for good
    if (fsdpi_is_host(w)) return fsdpi_emit_world(w, &op, NULL);
    FSDPI_TRY(fsdpi_emit_world(w, &op, w->streams[FSDP_STREAM_COMPUTE]));
    return fsdpi_sync(w, FSDP_STREAM_COMPUTE);
}

static fsdp_status fsdpi_transfer(fsdp_world *w, void *dst, const void *src, size_t nbytes) {
    fsdp_block row = {0, 0, (int64_t)nbytes, 1, (int64_t)nbytes, (int64_t)nbytes};
    return fsdpi_transfer_rows(w, dst, src, &row);
}

#endif // FSDPI_CORE_RUN_H
