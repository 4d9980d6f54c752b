/* fsdp_nccl.h - the backend for GPUs: collectives by NCCL, in the order of CUDA streams

   -DFSDP_BACKEND_NCCL compiles it in, with the device of fsdp_cuda.h; how to build: there, and
   docs/gpu.md. It needs NCCL 2.18, and uses newer features if header and library both have them.

   How it works
   - A collective of the core is one NCCL group: an operation per segment, straight between the
     buffers. Averages are sums; the core scales, in kernels of its own.
   - A call does not wait: it enqueues an operation on its stream, and an event after it. A thread,
     the watchdog, polls these events. The world ends if an operation is not done `timeout_ns` after
     it could have begun, if NCCL reports an error, or if the store (fsdp_store.h) reports a
     failure. Then all communicators are aborted, which also ends kernels that wait on the device.
   - The poll of an event can hang while another thread is inside CUDA (a cudaFree waits for the
     device, and so for a missing peer). A second thread, the monitor, does not call CUDA: it
     detects that the watchdog hangs, or that a call of NCCL does not return. The monitor aborts
     the communicators.
   - NCCL does not compare the calls of ranks, and hangs if they disagree. So each rank keeps a list
     of its enqueued operations, with times and states. After a deadline, members show each other
     their operations: the text names a rank that has called something else (MISMATCH), or has
     not come (TIMEOUT). FSDP_NCCL_CHECK=1 compares before every collective, which waits for it.
   - Calls of NCCL that may wait for other ranks (making, splitting and closing communicators) run
     in a thread, which is abandoned after the deadline.
   - Ranks meet at the store, which also distributes NCCL's id, and reports dead ranks.

   ENVIRONMENT
     FSDP_NCCL_COMMS      1: gathers and reductions share a communicator (less memory, no overlap of
                          the two); default 2
     FSDP_NCCL_REGISTER   0 (default): buffers are not registered; 1: with ncclCommRegister, from
                          NCCL 2.26 on; 2, from 2.29.7 on: as symmetric windows, and gathers by the
                          copy engines where NCCL can: a lost peer then blocks the GPU's stream
                          until the process ends. With 1 and 2, ranks that use memory together must
                          allocate equal sizes in the same order
     FSDP_NCCL_WARM_UP    1 (default): a communicator runs operations of 64 KiB and 32 MiB when it
                          is made, in which NCCL connects the ranks in the ways that a training
                          uses; 0: the first steps do that
     FSDP_NCCL_CHECK      1: compare the calls of all ranks before every collective (slow)
     NCCL_LAUNCH_ORDER_IMPLICIT   NCCL's own, from 2.26 on; with 1 two communicators do not wait for
                          each other's room on the GPU. If it is not set, fsdprun sets it to 1. If
                          header and library are 2.31.2 or newer, communicators are made that way.
                          Otherwise fsdp_init sets it while the process has one thread, or warns

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif

#ifndef FSDP_NCCL_H
#define FSDP_NCCL_H
#ifndef FSDP_MATH_ONLY

#ifdef __cplusplus
extern "C" {
#endif

// clang-format off
/* fsdp_nccl_comm_ops - the table of this backend, named "nccl"
   Result      never NULL; static
   open        one GPU per rank, and a process or a thread for each. boot->store names the store.
               After a failure error_text(NULL) returns the text, for the calling thread
   split       blocks until every rank of the parent has called it and the groups are connected
   run         with a stream: enqueues, and returns; poll and the next call report a later
               failure. Without a stream: blocks until complete. One thread at a time enqueues;
               another may call run of another comm meanwhile. Supports all_to_all, send and recv,
               too. A collective without elements does nothing, and does not wait for peers
   alloc       device memory; waits for the device, but not for other ranks. If memory is to be
               registered: from 1 MiB on memory of NCCL, in steps of the device's granularity
   close       groups before their world. Waits for peers to close the comm too, about half a
               second for all comms together, and then for NCCL to end it, at most five seconds; if
               the world fails meanwhile, some seconds more. If peers keep a comm, it stays until
               the process ends
   abort       from any thread      poll never blocks
   Memory      NCCL's for a communicator: some hundred MiB of the device (NCCL_BUFFSIZE,
               NCCL_MAX_CTAS); 2,048 events
   Order       all ranks enqueue the collectives of all comms in the same order
   Limits      4,096 ranks, Linux. A trusted network, as NCCL's own. No fork after open.
               Sums of f16 and bf16 are rounded at every hop, in an order that NCCL chooses
   Thread      any */
// clang-format on
FSDP_API const fsdp_comm_ops *fsdp_nccl_comm_ops(void);

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_NCCL_H

#ifndef FSDP_MATH_ONLY
#include "fsdp_cuda.h" // the device
#endif

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_NCCL_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_NCCL_IMPLEMENTED

#include "../src/base/macros.h"
#include "../src/base/os.h"
#include "../src/base/text.h"
#include "../src/core/alloc.h"
#include "fsdp_comm.h" // the base of all backends
#include "fsdp_memory.h"
#include "fsdp_signature.h"
#include "fsdp_store.h"
#include "fsdp_store_core.h"
#include "fsdp_store_frames.h"
#include "fsdp_store_world.h" // rendezvous, and the world's failure

#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#if NCCL_VERSION_CODE < 21800
#error "fsdp_nccl.h needs NCCL 2.18 or newer: this is the header of an older one"
#endif

#define FSDPI_NCCL_KINDS                                                                           \
    (1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER | 1u << FSDP_OP_ALL_REDUCE |          \
     1u << FSDP_OP_BROADCAST | 1u << FSDP_OP_ALL_TO_ALL | 1u << FSDP_OP_SEND | 1u << FSDP_OP_RECV)
#define FSDPI_NCCL_WORKS     1024                  // operations that are watched
#define FSDPI_NCCL_LARGE     ((size_t)1 << 20)     // bytes from which on memory is registered
#define FSDPI_NCCL_PERIOD_NS ((int64_t)20000000)   // period of the watchdog
#define FSDPI_NCCL_IDLE_NS   ((int64_t)100000000)  // period of an idle watchdog; of the monitor
#define FSDPI_NCCL_SHOW_NS   ((int64_t)500000000)  // for late members to show their operations
#define FSDPI_NCCL_LEFT_NS   ((int64_t)200000000)  // for data of a rank that has shut down
#define FSDPI_NCCL_ABORT_NS  ((int64_t)2000000000) // for communicators to end
#ifndef FSDPI_NCCL_CLOSE_NS                        // a test waits longer: its machine may be slow
#define FSDPI_NCCL_CLOSE_NS ((int64_t)500000000)   // for peers to close a comm, too
#endif
#define FSDPI_NCCL_END_NS     ((int64_t)5000000000) // for NCCL to end a comm: its threads sleep
#define FSDPI_NCCL_LAST_NS    ((int64_t)700000000)  // for a call to end, once all is aborted
#define FSDPI_NCCL_NAP_NS     50000                 // first nap of a thread that polls
#define FSDPI_NCCL_NAP_MAX    1000000               // its longest one
#define FSDPI_NCCL_GRACE_NS   ((int64_t)3000000000) // head start of this rank's watchdog
#define FSDPI_NCCL_BEHIND_NS  ((int64_t)1000000000) // head start of the watchdogs of peers
#define FSDPI_NCCL_SHOWN      8                     // operations that are logged after a failure
#define FSDPI_NCCL_WARM_BYTES ((size_t)32 << 20)    // bytes of a warm-up's largest operation

#define FSDPI_NCCL_ORDER "NCCL_LAUNCH_ORDER_IMPLICIT"

// A library that is older than the header lacks these functions. Its version is compared before
// they are called.
#if NCCL_VERSION_CODE >= 22907
#pragma weak ncclCommMemStats
#endif
#if NCCL_VERSION_CODE >= 23102
#pragma weak ncclAllGatherConfig
#pragma weak ncclReduceScatterConfig
#pragma weak ncclAllReduceConfig
#pragma weak ncclBroadcastConfig
#endif

// From 2.31 on a collective can have a separate configuration, and a communicator an order of
// launches. Before: `how` is NULL.
#if NCCL_VERSION_CODE >= 23102
typedef ncclCollConfig_t fsdpi_nccl_how;
#define FSDPI_NCCL_CONFIGURES(version) ((version) >= 23102)
#define FSDPI_NCCL_RUN(name, how, ...) ((how) ? name##Config(__VA_ARGS__, how) : name(__VA_ARGS__))
#else
typedef struct fsdpi_nccl_how fsdpi_nccl_how;
#define FSDPI_NCCL_CONFIGURES(version) ((void)(version), 0)
#define FSDPI_NCCL_RUN(name, how, ...) ((void)(how), name(__VA_ARGS__))
#endif

// Strict C99 hides setenv.
extern int fsdpi_nccl_setenv(const char *name, const char *value, int replace) __asm__("setenv");

typedef struct fsdpi_nccl_comm fsdpi_nccl_comm;

// One enqueued operation. The thread that enqueues it writes it; the watchdog also writes `state`.
enum { FSDPI_NCCL_WORK_NONE, FSDPI_NCCL_WORK_ISSUED, FSDPI_NCCL_WORK_DONE };
typedef struct fsdpi_flight {
    fsdpi_signature record;
    uint64_t comm_id, comm_seq; // the comm's id; number of the operation on it
    fsdpi_nccl_comm *comm;      // valid while ISSUED; NULL: closed
    cudaEvent_t begin, event;   // before and after the operation
    int64_t *ended_ns;          // ended_ns of the fsdp_coll
    uint32_t state;
} fsdpi_flight;

// A buffer that one communicator has registered.
typedef struct fsdpi_nccl_registration {
    struct fsdpi_nccl_registration *next;
    fsdpi_nccl_comm *comm;
    char *base;
    void *handle; // NULL: NCCL cannot register it
} fsdpi_nccl_registration;

// The allocator of memory, in fsdpi_chunk.at.
enum { FSDPI_NCCL_CUDA, FSDPI_NCCL_OWN };

typedef struct fsdpi_nccl_world {
    fsdpi_store_world base;
    int version; // the library's
    int registers, warms_up;
    int64_t comm_bytes; // all comms together: caps.comm_bytes
    fsdpi_cuda_place place;
    int is_left;          // 1: the watchdog hangs and uses this block; do not call CUDA
    int64_t close_ns;     // time left for the close handshakes of all comms together
    uint32_t issue;       // lock: one thread at a time calls NCCL
    uint32_t lock;        // guards comms and registrations
    uint32_t flight_lock; // guards entries of `flights`
    int64_t inside_ns;    // start of a call that should only enqueue, or 0
    int64_t asking_ns;    // start of the watchdog's query of an event, or 0
    fsdpi_nccl_comm *comms;
    fsdpi_nccl_registration *registrations;
    fsdpi_flight *flights;   // [FSDPI_NCCL_WORKS]
    uint64_t issued, looked; // operations so far; all before number `looked` are done
    pthread_t watchdog, monitor;
    int num_threads;
    uint32_t stop, changed, gone; // changed: both threads sleep on it; gone: the watchdog has ended
    uint32_t watches;             // 1: the watchdog looks each FSDPI_NCCL_PERIOD_NS
    uint32_t aborting, aborted;   // communicators are being aborted; have been aborted
} fsdpi_nccl_world;

struct fsdpi_nccl_comm {
    fsdpi_comm base;
    fsdpi_nccl_comm *next;
    ncclComm_t nccl;
    cudaStream_t stream; // for calls without one
    uint64_t seq, done;  // number of operations so far; of the last one that is done
    int64_t idle_ns;     // time at which the last one was found done
    int64_t error_ns;    // time of NCCL's first error, or 0
    int64_t left_ns;     // time at which a member was first found to have left, or 0
    void *made_by;       // the call that made the communicator
    int64_t bytes;       // device memory that the communicator took
    int has_told;        // > 0: the result of its first registration has been logged
    uint32_t is_cold;    // 1: its ranks are connecting
    // To compare the calls of members: device memory for this rank's signature and for all
    // signatures, and the host's copy of all signatures.
    fsdpi_signature *records, *shown;
    fsdpi_flight *showing; // the operation that brings them
};

/* -------------------------------------------------------------------------------------------- */
// Texts and statuses of failures.

static fsdpi_nccl_comm *fsdpi_nccl_of(fsdpi_comm *base) { return (fsdpi_nccl_comm *)(void *)base; }

static fsdpi_nccl_world *fsdpi_nccl_world_of(const fsdpi_nccl_comm *c) {
    return (fsdpi_nccl_world *)(void *)c->base.world;
}

static const fsdp_boot *fsdpi_nccl_boot(const fsdpi_nccl_world *w) { return &w->base.base.boot; }

static int fsdpi_nccl_failed(const fsdpi_nccl_world *w) {
    return fsdpi_comm_world_failed(&w->base.base);
}

// Adds a failed call of NCCL, with NCCL's last warning, which says more than its code.
static void fsdpi_nccl_say(fsdpi_text *t, ncclResult_t result, const char *what) {
    const char *more = ncclGetLastError(NULL);
    fsdpi_text_add(t, "[E820] %s: NCCL error %d (%s)", what, (int)result,
                   ncclGetErrorString(result));
    if (more && *more) fsdpi_text_add(t, "; its last warning: %s", more);
    fsdpi_text_add(t, "; set NCCL_DEBUG=WARN to see more");
}

// Returns 1 if the result may stand for a broken connection, which does not name the rank that has
// died or left.
static int fsdpi_nccl_is_anonymous(ncclResult_t result) {
    return result == ncclRemoteError || result == ncclSystemError || result == ncclInternalError;
}

static void fsdpi_nccl_say_left(fsdpi_text *t, const fsdpi_nccl_comm *c, int k) {
    fsdpi_text_add(t, "[E827] rank %d has shut down", (int)c->base.ranks[k]);
}

static fsdp_status fsdpi_nccl_result(fsdpi_nccl_comm *c, ncclResult_t result, const char *what) {
    char text[FSDPI_REASON];
    fsdpi_text t = {text, sizeof text, 0};
    int left = -1;
    if (result == ncclSuccess) return FSDP_OK;
    if (fsdpi_nccl_is_anonymous(result))
        left = fsdpi_store_world_await_cause(&c->base, -1, FSDPI_STORE_CAUSE_NS);
    if (fsdpi_comm_failed(&c->base)) return fsdpi_comm_report(&c->base); // the cause of the result
    if (left >= 0) {
        fsdpi_nccl_say_left(&t, c, left);
        return fsdpi_comm_fail(&c->base, FSDP_ERR_PEER_LOST, "%s", text);
    }
    if (result == ncclInProgress)
        fsdpi_text_add(
            &t,
            "[E821] %s is in progress and not done within %.1f s: set NCCL_DEBUG=INFO to see more",
            what, (double)c->base.boot->timeout_ns * 1e-9);
    else fsdpi_nccl_say(&t, result, what);
    return fsdpi_comm_fail(&c->base, result == ncclInProgress ? FSDP_ERR_TIMEOUT : FSDP_ERR_BACKEND,
                           "%s", text);
}

static fsdp_status fsdpi_nccl_cuda(fsdpi_nccl_comm *c, cudaError_t e, const char *what) {
    char text[320];
    fsdp_status status = fsdpi_cuda_status(text, sizeof text, fsdpi_nccl_world_of(c)->place.ordinal,
                                           (int)e, what);
    if (!status) return FSDP_OK;
    if (fsdpi_comm_failed(&c->base)) return fsdpi_comm_report(&c->base);
    return fsdpi_comm_fail(&c->base, status, "%s", text);
}

/* Waits for a call in progress, and returns its result. With NCCL_COMM_BLOCKING=0 a communicator is
   non-blocking: a call may return while it is in progress, and no other call is allowed until it
   has ended. */
static ncclResult_t fsdpi_nccl_settle(fsdpi_nccl_comm *c, ncclResult_t result, ncclComm_t nccl) {
    int64_t start = fsdpi_boot_now(c->base.boot), nap_ns = 0;
    while (result == ncclInProgress) {
        ncclResult_t asked = ncclCommGetAsyncError(nccl, &result);
        if (asked != ncclSuccess) return asked;
        if (result != ncclInProgress) break;
        if (fsdpi_comm_failed(&c->base)) return ncclInternalError;
        if (fsdpi_boot_now(c->base.boot) - start > c->base.boot->timeout_ns) break;
        fsdpi_nap(&nap_ns, FSDPI_NCCL_NAP_NS, FSDPI_NCCL_NAP_MAX);
    }
    return result;
}

/* -------------------------------------------------------------------------------------------- */
// Calls of NCCL that may wait for other ranks. Each runs in its own thread, and the caller waits
// until a deadline. Then the thread and its communicators are abandoned, since NCCL cannot end such
// a call.

enum {
    FSDPI_NCCL_NONE,
    FSDPI_NCCL_MAKE,
    FSDPI_NCCL_PART,
    FSDPI_NCCL_WINDOW,
    FSDPI_NCCL_FORGET,
    FSDPI_NCCL_END,
    FSDPI_NCCL_ABORT
};

typedef struct fsdpi_nccl_call {
    int kind, ordinal;
    int size, rank, color; // for MAKE and PART
    ncclUniqueId id;
    ncclConfig_t config;
    ncclComm_t parent, out; // out: the result; for END: the communicator that ends
    ncclComm_t *list;       // for ABORT: [size]; in one group, as they may wait for each other
    int is_grouped;
    void *base, *handle; // for WINDOW; for FORGET: the registration that ends
    size_t bytes;
    int is_window;
    char name[64];
    ncclResult_t result;
    pthread_t thread;
    uint32_t taken; // 1: its thread makes the call, or the caller has abandoned it before
    uint32_t state; // FSDPI_CALL_*; the caller sleeps on it
} fsdpi_nccl_call;

enum { FSDPI_CALL_RUNS, FSDPI_CALL_DONE, FSDPI_CALL_LEFT }; // LEFT: its caller has abandoned it

// Claims a call: its thread, to make it, or its caller, to prevent that. A call whose thread begins
// late must not be made on a communicator that has ended meanwhile.
static int fsdpi_nccl_call_take(fsdpi_nccl_call *call) {
    return !__atomic_exchange_n(&call->taken, 1u, __ATOMIC_SEQ_CST);
}

static ncclResult_t fsdpi_nccl_settle_plain(ncclResult_t result, ncclComm_t nccl) {
    int64_t nap_ns = 0;
    while (result == ncclInProgress && nccl) { // the thread's caller has the deadline
        fsdpi_nap(&nap_ns, FSDPI_NCCL_NAP_NS, FSDPI_NCCL_NAP_MAX);
        if (ncclCommGetAsyncError(nccl, &result) != ncclSuccess) return ncclSystemError;
    }
    return result;
}

typedef struct fsdpi_nccl_tail {
    ncclComm_t *list;
    int size;
} fsdpi_nccl_tail;

// Aborts the first of a list, and the others in another thread. Returns when all have ended.
static void *fsdpi_nccl_abort_main(void *arg) {
    const fsdpi_nccl_tail *t = (const fsdpi_nccl_tail *)arg;
    fsdpi_pin_library();
    if (t->size == 0) return NULL;
    fsdpi_nccl_tail rest = {t->list + 1, t->size - 1};
    pthread_t thread;
    int has_thread = rest.size > 0 && !pthread_create(&thread, NULL, fsdpi_nccl_abort_main, &rest);
    (void)ncclCommAbort(t->list[0]);
    if (has_thread) (void)pthread_join(thread, NULL);
    else (void)fsdpi_nccl_abort_main(&rest);
    return NULL;
}

/* Aborts communicators. They may wait for each other: so one group aborts all. Before NCCL 2.22 a
   group cannot abort, and each communicator gets a thread. Results are ignored. */
static void fsdpi_nccl_call_abort(const fsdpi_nccl_call *call) {
    fsdpi_nccl_tail all = {call->list, call->size};
    if (!call->is_grouped) {
        (void)fsdpi_nccl_abort_main(&all);
        return;
    }
    (void)ncclGroupStart();
    for (int i = 0; i < call->size; i++) (void)ncclCommAbort(call->list[i]);
    (void)ncclGroupEnd();
}

#if NCCL_VERSION_CODE >= 21900
static ncclResult_t fsdpi_nccl_call_forget(const fsdpi_nccl_call *call) {
#if NCCL_VERSION_CODE >= 22703
    if (call->is_window) return ncclCommWindowDeregister(call->parent, (ncclWindow_t)call->handle);
#endif
    return ncclCommDeregister(call->parent, call->handle);
}
#endif

// An abandoned thread may use its block after the world and its allocator have ended.
static const fsdp_allocator fsdpi_nccl_heap = {fsdpi_libc_alloc, fsdpi_libc_free, NULL};

static void *fsdpi_nccl_call_main(void *arg) {
    fsdpi_nccl_call *call = (fsdpi_nccl_call *)arg;
    fsdpi_pin_library();
    (void)cudaSetDevice(call->ordinal);
    switch (fsdpi_nccl_call_take(call) ? call->kind : FSDPI_NCCL_NONE) {
    case FSDPI_NCCL_MAKE:
        call->result = ncclCommInitRankConfig(&call->out, call->size, call->id, call->rank,
                                              &call->config);
        call->result = fsdpi_nccl_settle_plain(call->result, call->out);
        break;
    case FSDPI_NCCL_PART:
        call->result = ncclCommSplit(call->parent, call->color, call->rank, &call->out,
                                     &call->config);
        call->result = fsdpi_nccl_settle_plain(call->result, call->parent);
        if (call->result == ncclSuccess && call->out)
            call->result = fsdpi_nccl_settle_plain(ncclInProgress, call->out);
        break;
#if NCCL_VERSION_CODE >= 22703
    case FSDPI_NCCL_WINDOW: {
        ncclWindow_t window = NULL;
        call->result = ncclCommWindowRegister(call->parent, call->base, call->bytes, &window,
                                              NCCL_WIN_COLL_SYMMETRIC);
        call->result = fsdpi_nccl_settle_plain(call->result, call->parent);
        call->handle = (void *)window;
        break;
    }
#endif
#if NCCL_VERSION_CODE >= 21900
    case FSDPI_NCCL_FORGET: call->result = fsdpi_nccl_call_forget(call); break;
#endif
    case FSDPI_NCCL_END:
        call->result = ncclCommFinalize(call->out);
        call->result = fsdpi_nccl_settle_plain(call->result, call->out);
        if (call->result == ncclSuccess) call->result = ncclCommDestroy(call->out);
        else (void)ncclCommAbort(call->out);
        break;
    case FSDPI_NCCL_ABORT: fsdpi_nccl_call_abort(call); break;
    default: call->result = ncclInvalidArgument; break;
    }
    int makes = call->kind == FSDPI_NCCL_MAKE || call->kind == FSDPI_NCCL_PART;
    if (__atomic_exchange_n(&call->state, FSDPI_CALL_DONE, __ATOMIC_SEQ_CST) != FSDPI_CALL_LEFT) {
        fsdpi_futex_wake_all(&call->state, 0);
    } else {
        if (makes && call->out) (void)ncclCommAbort(call->out); // no other thread has it
        if (call->list != &call->out) fsdpi_free(&fsdpi_nccl_heap, call->list);
        fsdpi_free(&fsdpi_nccl_heap, call);
    }
    return NULL;
}

static int fsdpi_nccl_call_start(fsdpi_nccl_call *call) {
    return !pthread_create(&call->thread, NULL, fsdpi_nccl_call_main, call);
}

// Waits for a call. Returns 1 if it has returned. `stop`: NULL, or a world whose failure ends the
// wait.
static int fsdpi_nccl_call_wait(fsdpi_nccl_call *call, const fsdp_boot *boot, int64_t timeout_ns,
                                fsdpi_nccl_world *stop) {
    int64_t start = fsdpi_boot_now(boot);
    while (__atomic_load_n(&call->state, __ATOMIC_SEQ_CST) == FSDPI_CALL_RUNS) {
        if (fsdpi_boot_now(boot) - start > timeout_ns) return 0;
        if (stop && fsdpi_nccl_failed(stop)) return 0;
        fsdpi_futex_wait(&call->state, FSDPI_CALL_RUNS, 5000000, 0);
    }
    return 1;
}

// Joins the thread of a call that has returned; otherwise abandons thread and block, and sets *call
// to NULL.
static void fsdpi_nccl_call_end(fsdpi_nccl_call **call) {
    pthread_t thread = (*call)->thread;
    if (__atomic_exchange_n(&(*call)->state, FSDPI_CALL_LEFT, __ATOMIC_SEQ_CST)) {
        (void)pthread_join(thread, NULL);
        return;
    }
    (void)pthread_detach(thread);
    *call = NULL;
}

// Makes a call without other ranks. Returns 1, and frees the block, if the call has returned; 0 if
// thread and block are abandoned.
static int fsdpi_nccl_bounded(fsdpi_nccl_call *call, const fsdp_boot *boot, int64_t timeout_ns,
                              fsdpi_nccl_world *stop) {
    if (!fsdpi_nccl_call_start(call)) (void)fsdpi_nccl_call_main(call); // no thread could be made
    else {
        (void)fsdpi_nccl_call_wait(call, boot, timeout_ns, stop);
        fsdpi_nccl_call_end(&call);
    }
    if (!call) return 0;
    fsdpi_free(&fsdpi_nccl_heap, call);
    return 1;
}

/* Makes a call together with all members. After the deadline the world fails, and communicators are
   aborted, which ends most calls. Sets *call to NULL if it was abandoned. */
static fsdp_status fsdpi_nccl_together(fsdpi_nccl_comm *c, fsdpi_nccl_call **call,
                                       const char *what) {
    const fsdp_boot *boot = c->base.boot;
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    int takes = (*call)->kind == FSDPI_NCCL_PART; // no other thread calls NCCL meanwhile
    int64_t left = boot->timeout_ns;
    if ((*call)->kind == FSDPI_NCCL_MAKE) left = fsdpi_comm_left_to_open(c->base.world);
    if (takes) fsdpi_lock(&w->issue);
    if (FSDPI_LOAD(&w->aborting)) (void)fsdpi_nccl_call_take(*call);
    int is_done = fsdpi_nccl_call_start(*call);
    if (is_done) is_done = fsdpi_nccl_call_wait(*call, boot, left, w);
    else (*call)->kind = FSDPI_NCCL_NONE;
    if (!is_done) (void)fsdpi_nccl_call_take(*call); // before another thread can abort comms
    if (takes) fsdpi_unlock(&w->issue);
    if ((*call)->kind == FSDPI_NCCL_NONE)
        return fsdpi_comm_fail(
            &c->base, FSDP_ERR_OUT_OF_MEMORY,
            "[E822] the system refused to start a thread for a call: raise ulimit -u");
    if (!is_done && !fsdpi_comm_failed(&c->base)) {
        (void)fsdpi_comm_fail(&c->base, FSDP_ERR_TIMEOUT,
                              "[E824] %s has not returned within %.1f s: find out whether the "
                              "ranks reach each other (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)",
                              what, (double)boot->timeout_ns * 1e-9);
    }
    if (!is_done && (*call)->kind != FSDPI_NCCL_MAKE) // an abort does not end MAKE
        (void)fsdpi_nccl_call_wait(*call, boot, FSDPI_NCCL_LAST_NS, NULL);
    fsdpi_nccl_call_end(call);
    return *call ? fsdpi_nccl_result(c, (*call)->result, what) : fsdpi_comm_report(&c->base);
}

static fsdpi_nccl_call *fsdpi_nccl_call_new(const fsdpi_nccl_world *w, int kind) {
    fsdpi_nccl_call *call = (fsdpi_nccl_call *)fsdpi_alloc(&fsdpi_nccl_heap, sizeof *call);
    if (!call) return NULL;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    call->kind = kind;
    call->ordinal = w->place.ordinal;
    call->config = config;
    return call;
}

/* -------------------------------------------------------------------------------------------- */
// The list of issued operations, and the thread that polls them. The enqueuing thread writes an
// entry, and then `issued`. Only the watchdog marks it done.

static fsdpi_flight *fsdpi_nccl_work(fsdpi_nccl_world *w, uint64_t number) {
    return &w->flights[number % FSDPI_NCCL_WORKS];
}

// Returns 1 if an event has happened; *e: an error, or success. Holds no lock, as CUDA may hang.
static int fsdpi_nccl_is_done(fsdpi_nccl_world *w, cudaEvent_t event, cudaError_t *e) {
    __atomic_store_n(&w->asking_ns, fsdpi_boot_now(fsdpi_nccl_boot(w)), __ATOMIC_RELEASE);
    *e = cudaEventQuery(event);
    if (*e != cudaSuccess) (void)cudaGetLastError();
    __atomic_store_n(&w->asking_ns, 0, __ATOMIC_RELEASE);
    if (*e == cudaSuccess) return 1;
    if (*e == cudaErrorNotReady) *e = cudaSuccess;
    return 0;
}

static void fsdpi_nccl_mark_done(fsdpi_flight *f, int64_t now) {
    if (f->comm) { // NULL if the comm was closed meanwhile
        if (f->comm_seq > f->comm->done) f->comm->done = f->comm_seq; // not in order
        f->comm->idle_ns = now;
    }
    if (f->ended_ns) __atomic_store_n(f->ended_ns, now, __ATOMIC_RELAXED);
    FSDPI_STORE(&f->state, FSDPI_NCCL_WORK_DONE);
}

// Returns the comm of an operation if it is the comm's oldest one that is not done, otherwise NULL.
static fsdpi_nccl_comm *fsdpi_nccl_waits(const fsdpi_flight *f) {
    return f->comm && f->comm->done + 1 == f->comm_seq ? f->comm : NULL;
}

static int fsdpi_nccl_is_late(const fsdpi_flight *f, int64_t now) {
    const fsdpi_nccl_comm *c = fsdpi_nccl_waits(f);
    if (!c) return 0;
    int64_t since = c->idle_ns > f->record.since_ns ? c->idle_ns : f->record.since_ns;
    return now - since > c->base.boot->timeout_ns;
}

// Returns 1 if an operation is not done. *out: the oldest such operation, otherwise the last one;
// on: only operations of this comm count.
static int fsdpi_nccl_doing(fsdpi_nccl_world *w, const fsdpi_nccl_comm *on, fsdpi_signature *out) {
    int is_busy = 0;
    memset(out, 0, sizeof *out);
    fsdpi_lock(&w->flight_lock);
    uint64_t issued = w->issued, i = __atomic_load_n(&w->looked, __ATOMIC_ACQUIRE);
    if (i == issued && i > 0) i--;
    for (; i < issued && !is_busy; i++) {
        const fsdpi_flight *f = fsdpi_nccl_work(w, i);
        if (on && f->comm != on) continue;
        is_busy = FSDPI_LOAD(&f->state) == FSDPI_NCCL_WORK_ISSUED;
        *out = f->record;
    }
    fsdpi_unlock(&w->flight_lock);
    return is_busy;
}

// Fills a beat with this rank's operation. The store's thread calls it.
static void fsdpi_nccl_beat(void *user, fsdpi_store_beat *out) {
    fsdpi_nccl_world *w = (fsdpi_nccl_world *)user;
    fsdpi_signature record;
    out->text[0] = 0;
    out->busy = w->flights ? fsdpi_nccl_doing(w, NULL, &record) : 0;
    if (!w->flights || !record.kind) return;
    fsdpi_text t = {out->text, sizeof out->text, 0};
    fsdpi_say_op(&t, &record);
    out->since_ns = fsdpi_boot_now(fsdpi_nccl_boot(w)) - record.since_ns;
}

static void fsdpi_nccl_wake(void *user) {
    fsdpi_nccl_world *w = (fsdpi_nccl_world *)user;
    __atomic_add_fetch(&w->changed, 1u, __ATOMIC_SEQ_CST);
    fsdpi_futex_wake_all(&w->changed, 0);
}

// The operation on a comm that a rank shows to the other members after a deadline.
typedef struct fsdpi_nccl_shown {
    uint64_t comm_seq, has_begun; // has_begun: earlier work on the device is done
    fsdpi_signature record;
} fsdpi_nccl_shown;

static void fsdpi_nccl_show_key(char *key, size_t cap, const fsdpi_nccl_comm *c, int k) {
    (void)snprintf(key, cap, "nccl/late/%016llx/%d", (unsigned long long)c->base.id,
                   (int)c->base.ranks[k]);
}

// The members' states of an operation that is not done at its deadline.
typedef struct fsdpi_nccl_lateness {
    uint8_t absent[FSDPI_MAX_RANKS], busy[FSDPI_MAX_RANKS]; // not enqueued; not begun by its device
    int num_absent, num_busy, who; // who: a member with another call, or -1
    fsdpi_signature other;         // the signature of that call
} fsdpi_nccl_lateness;

/* Shows this rank's operation, and reads those of the other members. Members that wait in the same
   operation show it at about the same time, as their deadlines are equal. */
static void fsdpi_nccl_compare_late(fsdpi_nccl_comm *c, const fsdpi_nccl_shown *mine,
                                    fsdpi_nccl_lateness *late) {
    fsdpi_store *store = fsdpi_store_world_of(&c->base)->store;
    int64_t start = fsdpi_boot_now(c->base.boot);
    char key[64];
    fsdpi_nccl_show_key(key, sizeof key, c, c->base.index);
    (void)fsdpi_store_set_within(store, key, mine, sizeof *mine, FSDPI_STORE_ASK_NS);
    memset(late, 0, sizeof *late);
    late->who = -1;
    for (int k = 0; k < c->base.size; k++) {
        fsdpi_nccl_shown shown = *mine;
        size_t bytes = 0;
        int64_t left = FSDPI_NCCL_SHOW_NS - (fsdpi_boot_now(c->base.boot) - start);
        fsdpi_nccl_show_key(key, sizeof key, c, k);
        fsdp_status status = k == c->base.index
                                 ? FSDP_OK
                                 : fsdpi_store_get(store, key, &shown, sizeof shown, &bytes,
                                                   left > 1000000 ? left : 1000000);
        late->absent[k] = status != FSDP_OK || shown.comm_seq < mine->comm_seq;
        late->num_absent += late->absent[k];
        if (status || shown.comm_seq != mine->comm_seq) continue;
        late->busy[k] = !shown.has_begun;
        late->num_busy += late->busy[k];
        if (shown.record.key == mine->record.key || late->who >= 0) continue;
        late->other = shown.record;
        late->who = k;
    }
}

// Fails the world because an operation is not done in time. The text names the ranks to blame.
static void fsdpi_nccl_late(fsdpi_nccl_comm *c, const fsdpi_flight *f, int has_begun) {
    char reason[FSDPI_REASON], subject[192];
    fsdpi_text t = {reason, sizeof reason, 0}, s = {subject, sizeof subject, 0};
    fsdpi_nccl_lateness late;
    fsdpi_nccl_shown mine;
    double seconds = (double)c->base.boot->timeout_ns * 1e-9;
    if (fsdpi_comm_failed(&c->base)) return;
    mine.comm_seq = f->comm_seq;
    mine.has_begun = (uint64_t)has_begun;
    mine.record = f->record;
    fsdpi_nccl_compare_late(c, &mine, &late);
    fsdpi_say_op(&s, &f->record);
    if (late.who >= 0) fsdpi_say_two(&t, &c->base, &f->record, late.who, &late.other);
    else if (late.num_absent > 0) {
        if (!fsdpi_say_late(&t, &c->base, late.absent, "come")) return; // another rank was first
    } else if (late.num_busy > 0) {
        fsdpi_text_add(&t, "[E825] ");
        fsdpi_say_ranks(&t, c->base.ranks, c->base.size, late.busy);
        fsdpi_text_add(
            &t,
            " %s enqueued it, but work before it on the device is not done within %.1f s: find a "
            "kernel that does not end, or raise FSDP_TIMEOUT_MS if a step takes longer",
            late.num_busy > 1 ? "have" : "has", seconds);
    } else {
        fsdpi_text_add(
            &t,
            "[E826] all ranks have begun it, and it is not done within %.1f s: find out "
            "whether the network hangs (NCCL_DEBUG=INFO), or whether two communicators have "
            "no room beside your kernels (FSDP_NCCL_COMMS=1, NCCL_LAUNCH_ORDER_IMPLICIT=1)",
            seconds);
    }
    if (FSDPI_LOAD(&c->is_cold))
        fsdpi_text_add(
            &t, "; it is a first operation, in which NCCL connects the ranks: find out whether "
                "they reach each other (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)");
    fsdpi_store_world_tell(&c->base, late.who >= 0 ? FSDP_ERR_MISMATCH : FSDP_ERR_TIMEOUT, subject,
                           reason);
}

// Fails the world because member k has shut down, so that an operation cannot end.
static void fsdpi_nccl_tell_left(fsdpi_nccl_comm *c, int k, const fsdpi_signature *record) {
    char reason[FSDPI_REASON], subject[192];
    fsdpi_text t = {reason, sizeof reason, 0}, s = {subject, sizeof subject, 0};
    fsdpi_nccl_say_left(&t, c, k);
    fsdpi_say_op(&s, record);
    fsdpi_store_world_tell(&c->base, FSDP_ERR_PEER_LOST, subject, reason);
}

// Returns 1, and fails the world, if a member has shut down, so that this operation cannot end. The
// member's earlier data have FSDPI_NCCL_LEFT_NS to arrive.
static int fsdpi_nccl_left(fsdpi_nccl_comm *c, const fsdpi_flight *f, int64_t now) {
    int k = fsdpi_store_world_cause(&c->base, -1, now);
    if (k < 0) return 0;
    if (!c->left_ns) c->left_ns = now;
    if (now - c->left_ns < FSDPI_NCCL_LEFT_NS) return 0;
    fsdpi_nccl_tell_left(c, k, &f->record);
    return 1;
}

// Polls an operation.
enum { FSDPI_LOOK_DONE, FSDPI_LOOK_BUSY, FSDPI_LOOK_ENDS }; // ENDS: the world ends because of it
static int fsdpi_nccl_look(fsdpi_nccl_world *w, fsdpi_flight *f) {
    cudaError_t e, ignored;
    int result = FSDPI_LOOK_BUSY, has_begun = 0;
    if (FSDPI_LOAD(&f->state) != FSDPI_NCCL_WORK_ISSUED) return FSDPI_LOOK_DONE;
    int is_done = fsdpi_nccl_is_done(w, f->event, &e);
    int64_t now = fsdpi_boot_now(fsdpi_nccl_boot(w)); // the poll may have taken long
    fsdpi_lock(&w->lock);                             // keeps comms from being closed
    if (is_done && (FSDPI_LOAD(&w->aborting) || FSDPI_LOAD(&w->stop)))
        f->ended_ns = NULL; // an abort may have ended it; its flight record may be closed
    if (is_done) fsdpi_nccl_mark_done(f, now);
    int is_late = !is_done && e == cudaSuccess && fsdpi_nccl_is_late(f, now);
    fsdpi_unlock(&w->lock);
    if (is_done) return FSDPI_LOOK_DONE;
    if (is_late) has_begun = fsdpi_nccl_is_done(w, f->begin, &ignored);
    if (FSDPI_LOAD(&w->stop)) return FSDPI_LOOK_ENDS; // the store may be closed
    fsdpi_lock(&w->lock);
    fsdpi_nccl_comm *c = fsdpi_nccl_waits(f);
    if (c && e != cudaSuccess) {
        char text[400];
        (void)fsdpi_cuda_status(text, sizeof text, w->place.ordinal, (int)e, "work on the device");
        fsdpi_store_abort(w->base.store, FSDP_ERR_BACKEND, "", text);
        result = FSDPI_LOOK_ENDS;
    } else if (c && is_late) {
        fsdpi_nccl_late(c, f, has_begun);
        result = FSDPI_LOOK_ENDS;
    } else if (c && fsdpi_nccl_left(c, f, now)) {
        result = FSDPI_LOOK_ENDS;
    }
    fsdpi_unlock(&w->lock);
    return result;
}

// Polls all outstanding operations. Returns 1 if there are any.
static int fsdpi_nccl_look_all(fsdpi_nccl_world *w) {
    uint64_t issued = __atomic_load_n(&w->issued, __ATOMIC_SEQ_CST); // after `watches` is 0
    int is_busy = 0, result = FSDPI_LOOK_DONE;
    for (uint64_t i = w->looked; i < issued && result != FSDPI_LOOK_ENDS; i++) {
        result = fsdpi_nccl_look(w, fsdpi_nccl_work(w, i));
        if (result == FSDPI_LOOK_DONE && i == w->looked)
            __atomic_store_n(&w->looked, i + 1, __ATOMIC_RELEASE);
        is_busy |= result != FSDPI_LOOK_DONE;
    }
    return is_busy;
}

/* Handles an error that NCCL reports for a comm. If a member has left, its data will not arrive: an
   outstanding operation fails, and a comm without one has lost nothing. Otherwise fails the world
   with NCCL's error, if the store does not find a cause in time. */
static void fsdpi_nccl_error(fsdpi_nccl_comm *c, ncclResult_t result) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    fsdpi_signature record;
    if (!c->error_ns) c->error_ns = fsdpi_boot_now(c->base.boot);
    int64_t wait_ns = fsdpi_nccl_is_anonymous(result) ? FSDPI_STORE_CAUSE_NS : 0;
    int cause = fsdpi_store_world_cause(&c->base, -1, fsdpi_store_after(c->error_ns, wait_ns));
    if (cause >= 0 && c->done < c->seq) {
        (void)fsdpi_nccl_doing(w, c, &record);
        fsdpi_nccl_tell_left(c, cause, &record);
    }
    if (cause != FSDPI_CAUSE_UNKNOWN) return;
    fsdpi_text_add(&t, "rank %d: on '%s': ", fsdpi_nccl_boot(w)->rank, c->base.now.comm);
    fsdpi_nccl_say(&t, result, "NCCL reports");
    fsdpi_store_abort(w->base.store, FSDP_ERR_BACKEND, "", reason);
}

/* Asks NCCL for asynchronous errors: a connection that broke, a peer that aborted. Returns 1 if
   there is an error. It asks only while no other thread calls NCCL, because the query may complete
   a call in progress. */
static int fsdpi_nccl_ask_errors(fsdpi_nccl_world *w) {
    int any = 0;
    if (!fsdpi_try_lock(&w->issue)) return 0;
    fsdpi_lock(&w->lock);
    for (fsdpi_nccl_comm *c = w->comms; c; c = c->next) {
        ncclResult_t result = ncclSuccess;
        if (!c->nccl || ncclCommGetAsyncError(c->nccl, &result) != ncclSuccess) continue;
        if (result == ncclSuccess || result == ncclInProgress) continue;
        any = 1;
        fsdpi_nccl_error(c, result);
    }
    fsdpi_unlock(&w->lock);
    fsdpi_unlock(&w->issue);
    return any;
}

// Fails the world if a call that should return at once has not returned in time.
static void fsdpi_nccl_look_inside(fsdpi_nccl_world *w) {
    int64_t now = fsdpi_boot_now(fsdpi_nccl_boot(w)), limit = fsdpi_nccl_boot(w)->timeout_ns;
    int64_t inside = __atomic_load_n(&w->inside_ns, __ATOMIC_ACQUIRE),
            asking = __atomic_load_n(&w->asking_ns, __ATOMIC_ACQUIRE);
    int is_asking = asking && now - asking - FSDPI_NCCL_BEHIND_NS > limit;
    if (!is_asking && (!inside || now - inside <= limit)) return;
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    fsdpi_text_add(
        &t,
        is_asking ? "rank %d: [E828] CUDA has not returned within %.1f s: find out whether a "
                    "thread waits for the device (cudaFree, cudaMalloc, cudaDeviceSynchronize), "
                    "which waits for a peer"
                  : "rank %d: [E829] a call of NCCL has not returned within %.1f s: find out "
                    "whether the ranks reach each other (NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO)",
        fsdpi_nccl_boot(w)->rank, (double)limit * 1e-9);
    if (!is_asking && fsdpi_cuda_is_one("CUDA_LAUNCH_BLOCKING"))
        fsdpi_text_add(&t, ", or unset CUDA_LAUNCH_BLOCKING, with which it waits for all ranks");
    fsdpi_store_abort(w->base.store, FSDP_ERR_TIMEOUT, "", reason);
}

static void fsdpi_nccl_say_work(fsdpi_text *t, const fsdpi_flight *f, int64_t now) {
    // Two comms of one mesh have one name; ids are equal on all ranks.
    fsdpi_text_add(t, "%04llx #%llu ", (unsigned long long)(f->comm_id & 0xFFFF),
                   (unsigned long long)f->comm_seq);
    fsdpi_say_op(t, &f->record);
    if (f->record.kind < FSDP_OP_COUNT)
        fsdpi_text_add(t, ", %llu elements of %s in %u segments, key %016llx",
                       (unsigned long long)f->record.count, fsdp_dtype_name(f->record.dtype),
                       f->record.num_segs, (unsigned long long)f->record.key);
    fsdpi_text_add(t, ", for %.3f s", (double)(now - f->record.since_ns) * 1e-9);
}

// Logs operations that are not done, after a failure.
static void fsdpi_nccl_dump(fsdpi_nccl_world *w) {
    int64_t now = fsdpi_boot_now(fsdpi_nccl_boot(w));
    uint64_t issued = __atomic_load_n(&w->issued, __ATOMIC_ACQUIRE);
    char text[500];
    int said = 0;
    uint64_t i = issued > FSDPI_NCCL_WORKS ? issued - FSDPI_NCCL_WORKS : 0;
    fsdpi_lock(&w->flight_lock);
    for (; i < issued; i++) {
        const fsdpi_flight *f = fsdpi_nccl_work(w, i);
        if (FSDPI_LOAD(&f->state) != FSDPI_NCCL_WORK_ISSUED || said++ >= FSDPI_NCCL_SHOWN) continue;
        fsdpi_text t = {text, sizeof text, 0};
        fsdpi_text_add(&t, "under way: ");
        fsdpi_nccl_say_work(&t, f, now);
        fsdpi_boot_log(fsdpi_nccl_boot(w), FSDP_LOG_INFO, text);
    }
    fsdpi_unlock(&w->flight_lock);
}

/* Takes the lock `issue`, as a communicator must not be aborted while it is used. Waits at most
   FSDPI_NCCL_ABORT_NS for a thread inside NCCL, which may hang. Returns 0 if it has no lock. */
static int fsdpi_nccl_try_issue(fsdpi_nccl_world *w) {
    int64_t start = fsdpi_boot_now(fsdpi_nccl_boot(w)), nap_ns = 0;
    int locked = fsdpi_try_lock(&w->issue);
    while (!locked && fsdpi_boot_now(fsdpi_nccl_boot(w)) - start < FSDPI_NCCL_ABORT_NS) {
        fsdpi_nap(&nap_ns, FSDPI_NCCL_NAP_NS, FSDPI_NCCL_NAP_MAX);
        locked = fsdpi_try_lock(&w->issue);
    }
    return locked;
}

// Aborts all communicators in one group, since they may wait for each other.
static void fsdpi_nccl_abort_all(fsdpi_nccl_world *w) {
    int num = 0;
    __atomic_store_n(&w->aborting, 1u, __ATOMIC_SEQ_CST); // operations that end later are not done
    int locked = fsdpi_nccl_try_issue(w);
    fsdpi_lock(&w->lock);
    for (fsdpi_nccl_comm *c = w->comms; c; c = c->next) num += c->nccl != NULL;
    fsdpi_nccl_call *call = fsdpi_nccl_call_new(w, FSDPI_NCCL_ABORT);
    ncclComm_t *list = call ? (ncclComm_t *)fsdpi_alloc(&fsdpi_nccl_heap,
                                                        ((size_t)num + 1) * sizeof *list)
                            : NULL;
    for (fsdpi_nccl_comm *c = w->comms; c && list; c = c->next) {
        if (c->nccl) list[call->size++] = c->nccl;
        c->nccl = NULL;
    }
    fsdpi_unlock(&w->lock);
    if (list) {
        call->list = list;
        call->is_grouped = w->version >= 22200;
    }
    if (!list) fsdpi_free(&fsdpi_nccl_heap, call);
    else if (fsdpi_nccl_bounded(call, fsdpi_nccl_boot(w), FSDPI_NCCL_ABORT_NS, NULL))
        fsdpi_free(&fsdpi_nccl_heap, list); // otherwise the abandoned thread still uses it
    __atomic_store_n(&w->aborted, 1u, __ATOMIC_SEQ_CST);
    if (locked) fsdpi_unlock(&w->issue);
}

static void *fsdpi_nccl_watchdog(void *arg) {
    fsdpi_nccl_world *w = (fsdpi_nccl_world *)arg;
    fsdpi_pin_library();
    (void)cudaSetDevice(w->place.ordinal);
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode); // a poll must not end a capture
    uint32_t last = 0;
    while (!FSDPI_LOAD(&w->stop)) {
        uint32_t changed = FSDPI_LOAD(&w->changed);
        int is_busy = changed != last; // the thread that woke it may issue more soon
        last = changed;
        __atomic_store_n(&w->watches, 0u, __ATOMIC_SEQ_CST);
        is_busy |= fsdpi_nccl_look_all(w);
        if (FSDPI_LOAD(&w->stop)) break; // the store may be closed
        if (!fsdpi_nccl_failed(w)) is_busy |= fsdpi_nccl_ask_errors(w);
        __atomic_store_n(&w->watches, (uint32_t)is_busy, __ATOMIC_SEQ_CST);
        fsdpi_futex_wait(&w->changed, changed, is_busy ? FSDPI_NCCL_PERIOD_NS : FSDPI_NCCL_IDLE_NS,
                         0);
    }
    __atomic_store_n(&w->gone, 1u, __ATOMIC_SEQ_CST);
    fsdpi_futex_wake_all(&w->gone, 0);
    return NULL;
}

static void *fsdpi_nccl_monitor(void *arg) {
    fsdpi_nccl_world *w = (fsdpi_nccl_world *)arg;
    fsdpi_pin_library();
    while (!FSDPI_LOAD(&w->stop)) {
        uint32_t changed = FSDPI_LOAD(&w->changed);
        if (!fsdpi_nccl_failed(w)) fsdpi_nccl_look_inside(w);
        if (fsdpi_nccl_failed(w) && !w->aborted) {
            fsdpi_nccl_dump(w);
            fsdpi_nccl_abort_all(w);
        }
        fsdpi_futex_wait(&w->changed, changed, FSDPI_NCCL_IDLE_NS, 0);
    }
    return NULL;
}

/* Ends both threads. Returns 0 if the watchdog hangs inside CUDA: it is abandoned with the memory
   that it uses. */
static int fsdpi_nccl_stop(fsdpi_nccl_world *w) {
    int64_t start = fsdpi_boot_now(fsdpi_nccl_boot(w));
    FSDPI_STORE(&w->stop, 1u);
    fsdpi_nccl_wake(w);
    if (w->num_threads > 1) (void)pthread_join(w->monitor, NULL);
    if (w->num_threads == 0) return 1;
    while (!__atomic_load_n(&w->gone, __ATOMIC_SEQ_CST)) {
        if (fsdpi_boot_now(fsdpi_nccl_boot(w)) - start > FSDPI_NCCL_ABORT_NS) {
            (void)pthread_detach(w->watchdog);
            return 0;
        }
        fsdpi_futex_wait(&w->gone, 0, 5000000, 0);
    }
    (void)pthread_join(w->watchdog, NULL);
    return 1;
}

/* -------------------------------------------------------------------------------------------- */
// Collectives as groups of NCCL.

static ncclDataType_t fsdpi_nccl_dtype(int dtype) {
    switch (dtype) {
    case FSDP_F32: return ncclFloat32;
    case FSDP_F64: return ncclFloat64;
    case FSDP_F16: return ncclFloat16;
    case FSDP_BF16: return (ncclDataType_t)9; // ncclBfloat16, which older headers hide from C
    case FSDP_I32: return ncclInt32;
    case FSDP_I64: return ncclInt64;
    case FSDP_I16: return ncclFloat16; // it is moved, never summed
    default: return ncclUint8;
    }
}

static ncclRedOp_t fsdpi_nccl_redop(int redop) {
    return redop == FSDP_MAX ? ncclMax : redop == FSDP_MIN ? ncclMin : ncclSum;
}

// Sends every member's part to every other member: a pair of messages each.
static ncclResult_t fsdpi_nccl_all_to_all(const fsdpi_nccl_comm *c, const fsdp_coll *op,
                                          cudaStream_t stream) {
    size_t part = (size_t)op->count * fsdp_dtype_size(op->dtype);
    ncclDataType_t type = fsdpi_nccl_dtype(op->dtype);
    ncclResult_t result = ncclSuccess;
    for (int k = 0; k < c->base.size && result == ncclSuccess; k++) {
        const char *src = (const char *)op->src + (size_t)k * part;
        char *dst = (char *)op->dst + (size_t)k * part;
        result = ncclSend(src, (size_t)op->count, type, k, c->nccl, stream);
        if (result == ncclSuccess)
            result = ncclRecv(dst, (size_t)op->count, type, k, c->nccl, stream);
    }
    return result;
}

#if NCCL_VERSION_CODE >= 23102
/* Returns the tag of a collective for NCCL's profilers: the kind in the highest byte, then the last
   seven characters of the unit's name. */
static uint64_t fsdpi_nccl_tag(const fsdp_coll *op) {
    const size_t length = op->what ? strlen(op->what) : 0;
    uint64_t tag = 0;
    for (size_t i = length > 7 ? length - 7 : 0; i < length; i++)
        tag = tag << 8 | (unsigned char)op->what[i];
    return (uint64_t)op->kind << 56 | tag;
}
#endif

// Enqueues one segment of a gather or scatter.
static ncclResult_t fsdpi_nccl_segment(const fsdpi_nccl_comm *c, const fsdp_coll *op,
                                       const fsdp_seg *seg, cudaStream_t stream,
                                       const fsdpi_nccl_how *how) {
    size_t size = fsdp_dtype_size(op->dtype), count = (size_t)seg->count;
    ncclDataType_t type = fsdpi_nccl_dtype(op->dtype);
    char *dst = (char *)op->dst;
    const char *src = (const char *)op->src;
    if (op->kind == FSDP_OP_REDUCE_SCATTER)
        return FSDPI_NCCL_RUN(ncclReduceScatter, how, src + (size_t)seg->full * size,
                              dst + (size_t)seg->shard * size, count, type, ncclSum, c->nccl,
                              stream);
    dst += (size_t)seg->full * size;
    src = op->in_place ? dst + (size_t)c->base.index * count * size
                       : src + (size_t)seg->shard * size;
    return FSDPI_NCCL_RUN(ncclAllGather, how, src, dst, count, type, c->nccl, stream);
}

// A further kind: a send to a peer and a recv from it, at the same time.
enum { FSDPI_NCCL_SWAP = FSDP_OP_COUNT };

static ncclResult_t fsdpi_nccl_operation(const fsdpi_nccl_comm *c, const fsdp_coll *op,
                                         cudaStream_t stream, const fsdpi_nccl_how *how) {
    ncclDataType_t type = fsdpi_nccl_dtype(op->dtype);
    size_t count = (size_t)op->count;
    int peer = (int)op->root;
    ncclResult_t result = ncclSuccess;
    switch (op->kind) {
    case FSDP_OP_ALL_REDUCE:
        return FSDPI_NCCL_RUN(ncclAllReduce, how, op->dst, op->dst, count, type,
                              fsdpi_nccl_redop(op->redop), c->nccl, stream);
    case FSDP_OP_BROADCAST:
        return FSDPI_NCCL_RUN(ncclBroadcast, how, op->dst, op->dst, count, type, peer, c->nccl,
                              stream);
    case FSDP_OP_ALL_TO_ALL: return fsdpi_nccl_all_to_all(c, op, stream);
    case FSDP_OP_SEND: return ncclSend(op->src, count, type, peer, c->nccl, stream);
    case FSDP_OP_RECV: return ncclRecv(op->dst, count, type, peer, c->nccl, stream);
    case FSDPI_NCCL_SWAP:
        result = ncclSend(op->src, count, type, peer, c->nccl, stream);
        return result != ncclSuccess ? result
                                     : ncclRecv(op->dst, count, type, peer, c->nccl, stream);
    default:
        for (uint32_t i = 0; i < op->num_segs && result == ncclSuccess; i++)
            if (op->segs[i].count > 0)
                result = fsdpi_nccl_segment(c, op, &op->segs[i], stream, how);
        return result;
    }
}

/* Logs once whether NCCL has accepted the first registration. NCCL does not report whether it then
   runs gathers by copy engines. NCCL before 2.19 registers nothing. */
static FSDPI_UNUSED void fsdpi_nccl_tell_path(fsdpi_nccl_comm *c, const void *handle) {
    const fsdp_boot *boot = c->base.boot;
    char text[FSDPI_REASON];
    if (c->has_told++ || c->base.index != 0) return;
    if (!handle) {
        (void)snprintf(text, sizeof text,
                       "[E839] NCCL registers no buffers of '%s', which FSDP_NCCL_REGISTER asks "
                       "for: its collectives go through NCCL's own",
                       c->base.now.comm);
        fsdpi_boot_log(boot, FSDP_LOG_WARN, text);
    } else if (fsdpi_nccl_world_of(c)->registers == 2) {
        (void)snprintf(text, sizeof text,
                       "buffers of '%s' are symmetric windows, and its gathers ask for copy "
                       "engines; whether NCCL uses them is unknown (NCCL_DEBUG=INFO)",
                       c->base.now.comm);
        fsdpi_boot_log(boot, FSDP_LOG_INFO, text);
    }
}

/* Registers the allocation of p with this communicator, in the first collective that uses it. All
   members do so in the same collective, since they run equal operations. */
static ncclResult_t fsdpi_nccl_register(fsdpi_nccl_comm *c, const void *p) {
#if NCCL_VERSION_CODE >= 21900
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    fsdpi_nccl_registration *r;
    fsdpi_chunk chunk = {NULL, 0, 0, 0, 0};
    fsdpi_lock(&w->base.base.chunks.lock);
    int i = fsdpi_chunk_before(&w->base.base.chunks, (uintptr_t)p);
    if (i >= 0) chunk = w->base.base.chunks.list[i];
    fsdpi_unlock(&w->base.base.chunks.lock);
    if (chunk.at != FSDPI_NCCL_OWN || (const char *)p >= chunk.base + chunk.size)
        return ncclSuccess;
    for (r = w->registrations; r; r = r->next)
        if (r->comm == c && r->base == chunk.base) return ncclSuccess;
    r = (fsdpi_nccl_registration *)fsdpi_alloc(&fsdpi_nccl_boot(w)->allocator, sizeof *r);
    if (!r) return ncclSystemError;
    r->comm = c;
    r->base = chunk.base;
    ncclResult_t result = ncclSuccess;
    if (w->registers == 1) {
        result = ncclCommRegister(c->nccl, chunk.base, chunk.size, &r->handle);
        result = fsdpi_nccl_settle(c, result, c->nccl);
    } else {
        fsdpi_nccl_call *call = fsdpi_nccl_call_new(w, FSDPI_NCCL_WINDOW);
        result = ncclSystemError;
        if (call) {
            call->parent = c->nccl;
            call->base = chunk.base;
            call->bytes = chunk.size;
            if (!fsdpi_nccl_together(c, &call, "ncclCommWindowRegister")) {
                result = ncclSuccess;
                r->handle = call->handle;
            }
            fsdpi_free(&fsdpi_nccl_heap, call);
        }
    }
    fsdpi_lock(&w->lock);
    r->next = w->registrations;
    w->registrations = r;
    fsdpi_unlock(&w->lock);
    if (result == ncclSuccess) fsdpi_nccl_tell_path(c, r->handle);
    return result;
#else
    (void)c, (void)p;
    return ncclSuccess;
#endif
}

// Ends a registration, if needed. Returns 0 if NCCL does not return.
static int fsdpi_nccl_unregister(fsdpi_nccl_world *w, const fsdpi_nccl_registration *r) {
    if (!r->handle || !r->comm->nccl) return 1; // the abort of a communicator ends registrations
    fsdpi_nccl_call *call = fsdpi_nccl_call_new(w, FSDPI_NCCL_FORGET);
    if (!call) return 1;
    call->parent = r->comm->nccl;
    call->handle = r->handle;
    call->is_window = w->registers == 2;
    return fsdpi_nccl_bounded(call, fsdpi_nccl_boot(w), FSDPI_NCCL_ABORT_NS, NULL);
}

static void fsdpi_nccl_await_abort(fsdpi_nccl_world *w);

// Fails the world after a hung deregistration. From now on no memory is freed, since it may still
// be registered.
static void fsdpi_nccl_kept(fsdpi_nccl_world *w) {
    char reason[200];
    (void)snprintf(reason, sizeof reason,
                   "rank %d: [E830] NCCL has not returned from ending a registration within %.1f "
                   "s: set FSDP_NCCL_REGISTER=0",
                   fsdpi_nccl_boot(w)->rank, (double)FSDPI_NCCL_ABORT_NS * 1e-9);
    if (fsdpi_nccl_boot(w)->hung) FSDPI_STORE(fsdpi_nccl_boot(w)->hung, 1u);
    fsdpi_store_abort(w->base.store, FSDP_ERR_TIMEOUT, "", reason);
}

/* Ends the registrations of a comm, or (c NULL) of an allocation. NCCL may wait for peers and the
   device: so this function does not hold the watchdog's lock. If the device or NCCL hangs once, it
   makes no more calls. */
static void fsdpi_nccl_unregister_all(fsdpi_nccl_world *w, const fsdpi_nccl_comm *c,
                                      const char *base) {
    fsdpi_nccl_registration *mine = NULL, *r;
    if (!w->registrations) return;
    if (fsdpi_nccl_failed(w)) fsdpi_nccl_await_abort(w);
    fsdpi_lock(&w->issue);
    fsdpi_lock(&w->lock);
    for (fsdpi_nccl_registration **at = &w->registrations; (r = *at) != NULL;) {
        if (c ? r->comm != c : r->base != base) {
            at = &r->next;
            continue;
        }
        *at = r->next;
        r->next = mine;
        mine = r;
    }
    fsdpi_unlock(&w->lock);
    while ((r = mine) != NULL) {
        mine = r->next;
        if (!fsdpi_boot_is_hung(fsdpi_nccl_boot(w)) && !fsdpi_nccl_unregister(w, r))
            fsdpi_nccl_kept(w);
        fsdpi_free(&fsdpi_nccl_boot(w)->allocator, r);
    }
    fsdpi_unlock(&w->issue);
}

// Returns the next entry of the list of operations, once the entry's old operation is done.
static fsdpi_flight *fsdpi_nccl_take(fsdpi_nccl_comm *c) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    int64_t nap_ns = 0;
    while (w->issued - __atomic_load_n(&w->looked, __ATOMIC_ACQUIRE) >= FSDPI_NCCL_WORKS) {
        if (fsdpi_nccl_failed(w)) return NULL;
        fsdpi_nccl_wake(w);
        fsdpi_nap(&nap_ns, FSDPI_NCCL_NAP_NS, FSDPI_NCCL_NAP_MAX);
    }
    return fsdpi_nccl_work(w, w->issued);
}

static void fsdpi_nccl_publish(fsdpi_nccl_comm *c, const fsdp_coll *op, fsdpi_flight *f) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    c->base.now.since_ns = fsdpi_boot_now(fsdpi_nccl_boot(w));
    fsdpi_lock(&w->flight_lock);
    f->record = c->base.now;
    f->comm_id = c->base.id;
    f->comm = c;
    f->comm_seq = ++c->seq;
    f->ended_ns = op->ended_ns;
    FSDPI_STORE(&f->state, FSDPI_NCCL_WORK_ISSUED);
    __atomic_store_n(&w->issued, w->issued + 1, __ATOMIC_RELEASE);
    fsdpi_unlock(&w->flight_lock);
}

// Fails if the stream is being captured. A collective cannot be watched there, since no other
// stream may use its events.
static fsdp_status fsdpi_nccl_not_captured(fsdpi_nccl_comm *c, cudaStream_t stream) {
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    fsdp_status status = fsdpi_nccl_cuda(c, cudaStreamIsCapturing(stream, &capture),
                                         "cudaStreamIsCapturing");
    if (status || capture == cudaStreamCaptureStatusNone) return status;
    return fsdpi_comm_error(&c->base, FSDP_ERR_UNSUPPORTED,
                            "[E831] collectives cannot be captured: " FSDPI_CUDA_NO_GRAPH);
}

// Makes a group with one operation, in which the thread may hang. *result: the group's result.
static fsdp_status fsdpi_nccl_group(fsdpi_nccl_comm *c, const fsdp_coll *op, cudaStream_t stream,
                                    cudaEvent_t begin, ncclResult_t *result) {
    fsdp_status status = FSDP_OK;
    if (fsdpi_nccl_world_of(c)->registers) {
        *result = fsdpi_nccl_register(c, op->dst);
        if (*result == ncclSuccess && op->src && !op->in_place)
            *result = fsdpi_nccl_register(c, op->src);
        status = fsdpi_nccl_result(c, *result, "registering a buffer");
    }
    if (!status) status = fsdpi_nccl_cuda(c, cudaEventRecord(begin, stream), "cudaEventRecord");
    if (status) return status;
    const fsdpi_nccl_how *how = NULL;
#if NCCL_VERSION_CODE >= 23102
    ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
    config.userProfilerTag = fsdpi_nccl_tag(op);
    if (fsdpi_nccl_world_of(c)->registers == 2 && op->kind == FSDP_OP_ALL_GATHER)
        config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
    if (FSDPI_NCCL_CONFIGURES(fsdpi_nccl_world_of(c)->version)) how = &config;
#endif
    *result = ncclGroupStart();
    if (*result != ncclSuccess) return FSDP_OK;
    *result = fsdpi_nccl_operation(c, op, stream, how);
    ncclResult_t end = ncclGroupEnd();
    if (*result == ncclSuccess || *result == ncclInProgress) *result = end;
    return FSDP_OK;
}

// Enqueues one operation, and an event after it, under the lock `issue`. *out: its entry.
static fsdp_status fsdpi_nccl_enqueue(fsdpi_nccl_comm *c, const fsdp_coll *op, cudaStream_t stream,
                                      fsdpi_flight **out) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    ncclResult_t result = ncclSuccess;
    *out = NULL;
    fsdp_status status = fsdpi_nccl_not_captured(c, stream);
    if (status) return status;
    fsdpi_flight *f = fsdpi_nccl_take(c);
    if (!f || !c->nccl || fsdpi_nccl_failed(w)) return fsdpi_comm_report(&c->base);
    __atomic_store_n(&w->inside_ns, fsdpi_boot_now(fsdpi_nccl_boot(w)), __ATOMIC_RELEASE);
    status = fsdpi_nccl_group(c, op, stream, f->begin, &result);
    __atomic_store_n(&w->inside_ns, 0, __ATOMIC_RELEASE);
    if (status) return status;
    if (FSDPI_LOAD(&w->aborting)) return fsdpi_comm_report(&c->base); // an abort ended the call
    status = fsdpi_nccl_result(c, fsdpi_nccl_settle(c, result, c->nccl), fsdp_op_name(op->kind));
    if (!status) status = fsdpi_nccl_cuda(c, cudaEventRecord(f->event, stream), "cudaEventRecord");
    if (status) return status;
    fsdpi_nccl_publish(c, op, f);
    *out = f;
    return FSDP_OK;
}

// Waits for an operation. If it ends because communicators were aborted, it is not done.
static fsdp_status fsdpi_nccl_await(fsdpi_nccl_comm *c, const fsdpi_flight *f) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    cudaError_t e = cudaSuccess;
    int64_t limit = fsdpi_nccl_boot(w)->timeout_ns < INT64_MAX / 2
                        ? fsdpi_nccl_boot(w)->timeout_ns + FSDPI_NCCL_GRACE_NS
                        : INT64_MAX;
    // A watchdog that looks each FSDPI_NCCL_PERIOD_NS finds this operation itself.
    if (!__atomic_load_n(&w->watches, __ATOMIC_SEQ_CST)) fsdpi_nccl_wake(w);
    fsdp_status status = fsdpi_cuda_await(fsdpi_nccl_boot(w), f->event, limit, &w->aborted, &e);
    if (!status && !FSDPI_LOAD(&w->aborting)) return FSDP_OK;
    if (fsdpi_nccl_failed(w)) return fsdpi_comm_report(&c->base);
    if (status == FSDP_ERR_BACKEND) return fsdpi_nccl_cuda(c, e, "work on the device");
    return fsdpi_comm_fail(&c->base, FSDP_ERR_TIMEOUT,
                           "[E832] the device has not finished in time: find a kernel that does "
                           "not end, or raise FSDP_TIMEOUT_MS");
}

/* Copies the signatures of all members, or of one peer, to c->shown. The watchdog watches the
   deadline, and names missing ranks. */
static fsdp_status fsdpi_nccl_show(fsdpi_comm *base, const fsdp_coll *op, const fsdpi_span *span) {
    fsdpi_nccl_comm *c = fsdpi_nccl_of(base);
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    fsdp_seg seg = {0, FSDPI_RECORD_WORDS, FSDPI_RECORD_WORDS};
    fsdp_coll exchange;
    (void)span;
    if (base->size == 1) return FSDP_OK;
    memset(&exchange, 0, sizeof exchange);
    exchange.kind = FSDP_OP_ALL_GATHER;
    exchange.dtype = FSDP_I64;
    exchange.segs = &seg;
    exchange.num_segs = 1;
    exchange.src = exchange.dst = c->records;
    if (op && fsdpi_is_pair(op->kind)) {
        exchange.kind = FSDPI_NCCL_SWAP;
        exchange.dst = c->records + 1 + op->root;
        exchange.count = FSDPI_RECORD_WORDS;
        exchange.root = op->root;
    }
    fsdpi_lock(&w->issue);
    cudaError_t e = cudaMemcpyAsync(c->records, &base->now, sizeof base->now,
                                    cudaMemcpyHostToDevice, c->stream);
    fsdp_status status = fsdpi_nccl_cuda(c, e, "copying records");
    if (!status) status = fsdpi_nccl_enqueue(c, &exchange, c->stream, &c->showing);
    fsdpi_unlock(&w->issue);
    return status;
}

static fsdp_status fsdpi_nccl_hear(fsdpi_comm *base, const fsdp_coll *op) {
    fsdpi_nccl_comm *c = fsdpi_nccl_of(base);
    (void)op;
    if (base->size == 1) return FSDP_OK;
    fsdp_status status = fsdpi_nccl_await(c, c->showing);
    if (status) return status;
    cudaError_t e = cudaMemcpyAsync(c->shown, c->records + 1, (size_t)base->size * sizeof *c->shown,
                                    cudaMemcpyDeviceToHost, c->stream);
    if (e == cudaSuccess) e = cudaStreamSynchronize(c->stream);
    return fsdpi_nccl_cuda(c, e, "copying records");
}

// Enqueues a collective; without a stream also waits for it. A collective without elements does
// nothing, and does not wait for peers.
static fsdp_status fsdpi_nccl_move(fsdpi_comm *base, const fsdp_coll *op, const fsdpi_span *span) {
    fsdpi_nccl_comm *c = fsdpi_nccl_of(base);
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    fsdpi_flight *f = NULL;
    if (span->high <= span->low) {
        if (op->ended_ns) *op->ended_ns = fsdpi_boot_now(fsdpi_nccl_boot(w));
        return FSDP_OK;
    }
    fsdpi_lock(&w->issue);
    fsdp_status status = fsdpi_nccl_enqueue(c, op,
                                            op->stream ? (cudaStream_t)op->stream : c->stream, &f);
    fsdpi_unlock(&w->issue);
    return status || op->stream ? status : fsdpi_nccl_await(c, f);
}

/* -------------------------------------------------------------------------------------------- */
// Opening and closing of communicators, and memory.

static ncclConfig_t fsdpi_nccl_config(const fsdpi_nccl_world *w, fsdpi_nccl_call *call,
                                      const char *name, int gathers) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    (void)snprintf(call->name, sizeof call->name, "fsdp.%s", name);
#if NCCL_VERSION_CODE >= 22703
    config.commName = call->name; // for NCCL's logs and tools
#endif
#if NCCL_VERSION_CODE >= 22803
    if (w->registers == 2 && gathers && w->version >= 22803 && !FSDPI_NCCL_CONFIGURES(w->version))
        config.CTAPolicy = NCCL_CTA_POLICY_ZERO; // from 2.31 on each gather asks for it
#endif
#if NCCL_VERSION_CODE >= 23102
    if (FSDPI_NCCL_CONFIGURES(w->version) && !fsdpi_env(FSDPI_NCCL_ORDER))
        config.launchOrderImplicit = 1;
#endif
    (void)w, (void)gathers;
    return config;
}

// Makes a call whose result is the communicator of c.
static fsdp_status fsdpi_nccl_obtain(fsdpi_nccl_comm *c, fsdpi_nccl_call *call, const char *what) {
    fsdp_status status = fsdpi_nccl_together(c, &call, what);
    c->made_by = call; // kept, as NCCL may keep a pointer to its name
    if (call) c->nccl = call->out;
    return status;
}

static void fsdpi_nccl_enter(fsdpi_nccl_comm *c) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    fsdpi_lock(&w->lock);
    c->next = w->comms;
    w->comms = c;
    fsdpi_unlock(&w->lock);
}

// Runs one operation of a warm-up until it is done.
static fsdp_status fsdpi_nccl_run_cold(fsdpi_nccl_comm *c, int kind, fsdp_coll *op) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    fsdpi_flight *f = NULL;
    op->kind = (uint8_t)kind;
    fsdpi_lock(&w->issue);
    fsdp_status status = fsdpi_nccl_enqueue(c, op, c->stream, &f);
    fsdpi_unlock(&w->issue);
    return status ? status : fsdpi_nccl_await(c, f);
}

// Runs small and large operations of each kind that steps use, in place, in memory of any contents:
// NCCL connects ranks at the first use of each of its algorithms, which it chooses by size.
static fsdp_status fsdpi_nccl_run_large(fsdpi_nccl_comm *c) {
    static const uint8_t kinds[3] = {FSDP_OP_ALL_GATHER, FSDP_OP_REDUCE_SCATTER,
                                     FSDP_OP_ALL_REDUCE};
    size_t members = (size_t)c->base.size;
    void *data = NULL;
    fsdp_status status = fsdpi_nccl_cuda(c, cudaMalloc(&data, FSDPI_NCCL_WARM_BYTES),
                                         "memory of a communicator's first operations");
    for (size_t bytes = FSDPI_NCCL_WARM_BYTES / 512; bytes <= FSDPI_NCCL_WARM_BYTES && !status;
         bytes *= 512) {
        fsdp_seg seg = {0, 0, (int64_t)(bytes / sizeof(float) / members)};
        fsdp_coll op;
        memset(&op, 0, sizeof op);
        op.dtype = FSDP_F32;
        op.segs = &seg;
        op.num_segs = 1;
        op.src = op.dst = data;
        op.count = bytes / sizeof(float);
        for (int i = 0; i < 3 && !status; i++) {
            op.in_place = kinds[i] == FSDP_OP_ALL_GATHER;
            seg.shard = kinds[i] == FSDP_OP_REDUCE_SCATTER ? c->base.index * seg.count : 0;
            status = fsdpi_nccl_run_cold(c, kinds[i], &op);
        }
    }
    if (data && fsdpi_cuda_idle(c->base.boot, c->stream, FSDPI_NCCL_ABORT_NS)) (void)cudaFree(data);
    return status;
}

// Runs the first operations, which connect the members, so that the first step does not.
static fsdp_status fsdpi_nccl_warm_up(fsdpi_nccl_comm *c) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    int64_t start = fsdpi_boot_now(c->base.boot);
    fsdp_seg seg = {0, 0, 1};
    fsdp_coll op;
    char text[FSDPI_REASON];
    FSDPI_STORE(&c->is_cold, 1u);
    fsdp_status status = fsdpi_nccl_show(&c->base, NULL, NULL);
    if (!status) status = fsdpi_nccl_hear(&c->base, NULL);
    memset(&op, 0, sizeof op);
    op.dtype = FSDP_I64;
    op.count = 1;
    op.segs = &seg;
    op.num_segs = 1;
    op.src = c->records + 1;
    op.dst = c->records;
    if (!status) status = fsdpi_nccl_run_cold(c, FSDP_OP_ALL_REDUCE, &op);
    if (!status) status = fsdpi_nccl_run_cold(c, FSDP_OP_REDUCE_SCATTER, &op);
    if (!status && w->warms_up) status = fsdpi_nccl_run_large(c);
    FSDPI_STORE(&c->is_cold, 0u);
    if (status) return status;
    (void)snprintf(text, sizeof text, "%d ranks of '%s' are connected, within %.2f s",
                   (int)c->base.size, c->base.now.comm,
                   (double)(fsdpi_boot_now(c->base.boot) - start) * 1e-9);
    if (c->base.index == 0) fsdpi_boot_log(c->base.boot, FSDP_LOG_INFO, text);
    return FSDP_OK;
}

// Adds the communicator's device memory to the world's sum. NCCL reports it from 2.29.7 on.
static void fsdpi_nccl_count_bytes(fsdpi_nccl_comm *c) {
#if NCCL_VERSION_CODE >= 22907
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    uint64_t bytes = 0;
    fsdpi_lock(&w->issue);
    if (w->version >= 22907 && c->nccl &&
        ncclCommMemStats(c->nccl, ncclStatGpuMemTotal, &bytes) == ncclSuccess)
        c->bytes = (int64_t)bytes;
    fsdpi_unlock(&w->issue);
    __atomic_add_fetch(&w->comm_bytes, c->bytes, __ATOMIC_SEQ_CST);
#else
    (void)c;
#endif
}

// Begins the use of a new communicator: makes memory to compare calls, and runs the first meeting.
static fsdp_status fsdpi_nccl_begin(fsdpi_nccl_comm *c) {
    size_t members = (size_t)c->base.size;
    void *records = NULL;
    c->shown = (fsdpi_signature *)fsdpi_alloc(&c->base.boot->allocator, members * sizeof *c->shown);
    c->base.shown = (const char *)c->shown;
    c->base.step = sizeof *c->shown;
    cudaError_t e = cudaStreamCreateWithFlags(&c->stream, cudaStreamNonBlocking);
    if (e == cudaSuccess) e = cudaMalloc(&records, (1 + members) * sizeof *c->records);
    c->records = (fsdpi_signature *)records;
    fsdp_status status = fsdpi_nccl_cuda(c, e, "a stream and memory of a communicator");
    if (!status && !c->shown)
        status = fsdpi_comm_no_memory(&c->base, "records", members * sizeof *c->shown);
    if (!status && members > 1) status = fsdpi_nccl_warm_up(c);
    if (!status) fsdpi_nccl_count_bytes(c);
    return status;
}

// Waits until the monitor has aborted the communicators of a failed world.
static void fsdpi_nccl_await_abort(fsdpi_nccl_world *w) {
    int64_t start = fsdpi_boot_now(fsdpi_nccl_boot(w)), nap_ns = 0;
    while (w->num_threads > 1 && !FSDPI_LOAD(&w->aborted) &&
           fsdpi_boot_now(fsdpi_nccl_boot(w)) - start < 3 * FSDPI_NCCL_ABORT_NS) {
        fsdpi_nccl_wake(w);
        fsdpi_nap(&nap_ns, FSDPI_NCCL_NAP_NS, FSDPI_NCCL_NAP_MAX);
    }
}

// Writes the store key of member k's close message; for k == size, of member 0's reply.
static void fsdpi_nccl_bye_key(char *key, size_t cap, const fsdpi_nccl_comm *c, int k) {
    (void)snprintf(key, cap, "nccl/bye/%016llx/%d", (unsigned long long)c->base.id, k);
}

static void fsdpi_nccl_say_bye(const fsdpi_nccl_comm *c, int k, char says) {
    char key[64];
    fsdpi_nccl_bye_key(key, sizeof key, c, k);
    (void)fsdpi_store_set_within(fsdpi_store_world_of(&c->base)->store, key, &says, 1,
                                 FSDPI_NCCL_CLOSE_NS);
}

// Returns 1 if member k, or for k == size member 0's reply, agrees to close before `until`.
static int fsdpi_nccl_hears_bye(const fsdpi_nccl_comm *c, int k, int64_t until) {
    fsdpi_store *store = fsdpi_store_world_of(&c->base)->store;
    int64_t left = until - fsdpi_boot_now(c->base.boot);
    char key[64], says = 0;
    size_t bytes;
    fsdpi_nccl_bye_key(key, sizeof key, c, k);
    return left > 0 && !fsdpi_store_get(store, key, &says, 1, &bytes, left) && says;
}

// Runs member 0's side of the close handshake: reads all close messages, twice, since a member that
// gives up overwrites its message; then replies. Returns 1 if all members close the comm.
static int fsdpi_nccl_bye_of_all(const fsdpi_nccl_comm *c, int64_t until) {
    int all = 1;
    for (int pass = 0; pass < 2; pass++)
        for (int k = 1; k < c->base.size && all; k++) all = fsdpi_nccl_hears_bye(c, k, until);
    fsdpi_nccl_say_bye(c, c->base.size, (char)all);
    return all;
}

static int fsdpi_nccl_bye_of_one(const fsdpi_nccl_comm *c, int64_t until) {
    fsdpi_nccl_say_bye(c, c->base.index, 1);
    int all = fsdpi_nccl_hears_bye(c, c->base.size, until);
    if (!all) fsdpi_nccl_say_bye(c, c->base.index, 0);
    return all;
}

// Runs the close handshake of a comm. Returns 1 if all its members close it.
static int fsdpi_nccl_close_handshake(fsdpi_nccl_comm *c) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    if (w->close_ns <= 0 || c->base.size == 1) return c->base.size == 1;
    int64_t until = fsdpi_boot_now(fsdpi_nccl_boot(w)) + w->close_ns;
    int all = c->base.index == 0 ? fsdpi_nccl_bye_of_all(c, until)
                                 : fsdpi_nccl_bye_of_one(c, until);
    w->close_ns = all ? until - fsdpi_boot_now(fsdpi_nccl_boot(w)) : 0;
    return all;
}

/* Ends a communicator together with its peers. If they keep it, it is abandoned, as NCCL would wait
   for them, and so are all later communicators. In a failed world it has been aborted. */
static void fsdpi_nccl_end(fsdpi_nccl_comm *c) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    fsdpi_lock(&w->lock);
    int ends = c->nccl != NULL;
    fsdpi_unlock(&w->lock);
    ends = ends && w->base.store && !fsdpi_nccl_failed(w) &&
           !fsdpi_boot_is_hung(fsdpi_nccl_boot(w)) && fsdpi_nccl_close_handshake(c);
    if (w->base.store && fsdpi_nccl_failed(w)) fsdpi_nccl_await_abort(w);
    fsdpi_lock(&w->lock);
    ncclComm_t nccl = c->nccl; // from here on the monitor does not use it
    c->nccl = NULL;
    fsdpi_nccl_comm **link = &w->comms;
    while (*link && *link != c) link = &(*link)->next;
    if (*link) *link = c->next;
    for (uint64_t i = __atomic_load_n(&w->looked, __ATOMIC_ACQUIRE); i < w->issued; i++)
        if (fsdpi_nccl_work(w, i)->comm == c) fsdpi_nccl_work(w, i)->comm = NULL;
    fsdpi_unlock(&w->lock);
    int aborts = nccl && w->base.store && fsdpi_nccl_failed(w); // by the monitor: not yet
    fsdpi_nccl_call *call = nccl && (ends || aborts) ? fsdpi_nccl_call_new(w, FSDPI_NCCL_END)
                                                     : NULL;
    if (!call) return;
    if (aborts) {
        call->kind = FSDPI_NCCL_ABORT;
        call->list = &call->out;
        call->size = 1;
    }
    call->out = nccl;
    if (!fsdpi_nccl_bounded(call, fsdpi_nccl_boot(w),
                            aborts ? FSDPI_NCCL_ABORT_NS : FSDPI_NCCL_END_NS, aborts ? NULL : w))
        w->close_ns = 0;
}

// Waits after a failure for operations of calls without a stream, which end with their
// communicators. The core waits for operations on its streams.
static void fsdpi_nccl_rest(fsdpi_nccl_world *w) {
    if (!fsdpi_nccl_failed(w)) return;
    fsdpi_nccl_await_abort(w);
    for (fsdpi_nccl_comm *c = w->comms; c; c = c->next)
        if (c->stream) (void)fsdpi_cuda_idle(fsdpi_nccl_boot(w), c->stream, FSDPI_NCCL_ABORT_NS);
}

static void fsdpi_nccl_give(fsdpi_comm_world *base, const fsdpi_chunk *chunk) {
    fsdpi_nccl_world *w = (fsdpi_nccl_world *)(void *)base;
    if (w->is_left) return;
    fsdpi_nccl_rest(w);
    fsdpi_nccl_unregister_all(w, NULL, chunk->base);
    if (fsdpi_boot_is_hung(&base->boot)) return;
#if NCCL_VERSION_CODE >= 21900
    if (chunk->at == FSDPI_NCCL_OWN) {
        (void)ncclMemFree(chunk->base);
        return;
    }
#endif
    (void)cudaFree(chunk->base);
}

static void fsdpi_nccl_leave(fsdpi_comm *base) {
    fsdpi_nccl_comm *c = fsdpi_nccl_of(base);
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    fsdpi_nccl_unregister_all(w, c, NULL);
    fsdpi_nccl_end(c);
    __atomic_sub_fetch(&w->comm_bytes, c->bytes, __ATOMIC_SEQ_CST);
    // If the world has failed after a copy of signatures, the copy ends, as the communicator has
    // ended.
    if (c->records && fsdpi_cuda_idle(base->boot, c->stream, FSDPI_NCCL_ABORT_NS))
        (void)cudaFree(c->records);
    if (c->stream) (void)cudaStreamDestroy(c->stream);
    fsdpi_free(&fsdpi_nccl_heap, c->made_by);
    fsdpi_free(&base->boot->allocator, c->shown);
    if (!base->is_world) return;
    w->is_left = !fsdpi_nccl_stop(w);
    w->base.base.failed = NULL; // it points into the store
    fsdpi_store_close(w->base.store);
    w->base.store = NULL;
}

static int fsdpi_nccl_close(fsdpi_comm_world *base) {
    fsdpi_nccl_world *w = (fsdpi_nccl_world *)(void *)base;
    if (w->is_left) return 0;
    for (int i = 0; w->flights && i < FSDPI_NCCL_WORKS; i++) {
        if (w->flights[i].begin) (void)cudaEventDestroy(w->flights[i].begin);
        if (w->flights[i].event) (void)cudaEventDestroy(w->flights[i].event);
    }
    fsdpi_cuda_place_close(&w->place);
    fsdpi_free(&base->boot.allocator, w->flights);
    return 1;
}

static fsdp_status fsdpi_nccl_connect(fsdpi_comm *base, fsdpi_comm *base_child,
                                      const fsdp_group *g) {
    fsdpi_nccl_comm *parent = fsdpi_nccl_of(base), *child = fsdpi_nccl_of(base_child);
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(parent);
    fsdpi_nccl_comm none; // a rank in no group takes part in the split, too
    fsdpi_nccl_call *call = fsdpi_nccl_call_new(w, FSDPI_NCCL_PART);
    if (!call) return fsdpi_comm_no_memory(base, "a call of NCCL", sizeof *call);
    memset(&none, 0, sizeof none);
    none.base = *base;
    if (child) child->base.now.since_ns = base->now.since_ns; // one deadline for the whole split
    fsdpi_lock(&w->lock);
    call->parent = parent->nccl;
    fsdpi_unlock(&w->lock);
    if (!call->parent) {
        fsdpi_free(&fsdpi_nccl_heap, call);
        return fsdpi_comm_report(base);
    }
    // NCCL derives a name from the color. So the color is made of the first member's rank, as other
    // groups may be made at the same time, and of the number of the split.
    call->color = g->color < 0
                      ? NCCL_SPLIT_NOCOLOR
                      : (int)(((uint32_t)g->ranks[0] + base->splits * (uint32_t)base->boot->size) &
                              0x7FFFFFFF);
    call->rank = g->index < 0 ? 0 : g->index;
    call->config = fsdpi_nccl_config(w, call, g->name ? g->name : "group",
                                     g->stream == FSDP_STREAM_GATHER);
    fsdp_status status = fsdpi_nccl_obtain(child ? child : &none, call, "ncclCommSplit");
    fsdpi_free(&fsdpi_nccl_heap, none.made_by);
    if (status && !child) fsdpi_copy_name(base->error, sizeof base->error, none.base.error);
    if (status || !child) return status;
    fsdpi_nccl_enter(child);
    return fsdpi_nccl_begin(child);
}

// Checks the version of the library, which may differ from the header's.
static fsdp_status fsdpi_nccl_versions(fsdpi_nccl_comm *c) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    ncclResult_t result = ncclGetVersion(&w->version);
    if (result == ncclSuccess && w->version >= 21800) {
        // Before 2.29.7 kernels of windows ignore an abort. Before 2.26 NCCL may round an
        // allocation up to 512 MiB.
        int asked = w->registers;
        if (asked == 2 && (w->version < 22907 || NCCL_VERSION_CODE < 22703)) w->registers = 1;
        if (w->version < 22602 || w->place.is_managed) w->registers = 0;
        if (w->registers < asked && c->base.boot->rank == 0)
            fsdpi_boot_log(fsdpi_nccl_boot(w), FSDP_LOG_WARN,
                           "[E837] this NCCL, or managed memory, cannot do what FSDP_NCCL_REGISTER "
                           "asks for: buffers are registered in a lesser way, or not");
        if (w->version >= 22602 && c->base.size > 1 && c->base.boot->rank == 0 &&
            c->base.world->caps.comm_threads > 1 && !fsdpi_env(FSDPI_NCCL_ORDER) &&
            !FSDPI_NCCL_CONFIGURES(w->version))
            fsdpi_boot_log(fsdpi_nccl_boot(w), FSDP_LOG_WARN,
                           "[E838] two communicators can wait for each other's room on the GPU: "
                           "set " FSDPI_NCCL_ORDER
                           "=1 before the program starts, or FSDP_NCCL_COMMS=1");
        return FSDP_OK;
    }
    char text[FSDPI_REASON];
    fsdpi_text t = {text, sizeof text, 0};
    fsdpi_nccl_say(&t, result, "ncclGetVersion");
    if (result != ncclSuccess) return fsdpi_comm_error(&c->base, FSDP_ERR_BACKEND, "%s", text);
    return fsdpi_comm_error(&c->base, FSDP_ERR_UNSUPPORTED,
                            "[E834] the NCCL library is version %d, expected 21800 (2.18) or "
                            "newer, and this program was built with %d: correct LD_LIBRARY_PATH",
                            w->version, NCCL_VERSION_CODE);
}

static fsdp_status fsdpi_nccl_make_works(fsdpi_nccl_comm *c) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    w->flights = (fsdpi_flight *)fsdpi_alloc(&fsdpi_nccl_boot(w)->allocator,
                                             FSDPI_NCCL_WORKS * sizeof *w->flights);
    if (!w->flights)
        return fsdpi_comm_error(&c->base, FSDP_ERR_OUT_OF_MEMORY,
                                "[E835] the allocator has returned NULL for %llu bytes of memory",
                                (unsigned long long)(FSDPI_NCCL_WORKS * sizeof *w->flights));
    cudaError_t e = cudaSuccess;
    for (int i = 0; i < FSDPI_NCCL_WORKS && e == cudaSuccess; i++) {
        e = cudaEventCreateWithFlags(&w->flights[i].begin, cudaEventDisableTiming);
        if (e == cudaSuccess)
            e = cudaEventCreateWithFlags(&w->flights[i].event, cudaEventDisableTiming);
    }
    fsdp_status status = fsdpi_cuda_check(&w->place, (int)e, "making events");
    return status ? fsdpi_comm_error(&c->base, status, "%s", w->place.error) : FSDP_OK;
}

// Makes the world's communicator. Rank 0's process has its root, to which all other ranks connect.
static fsdp_status fsdpi_nccl_meet(fsdpi_nccl_comm *c) {
    static const char *const key = "nccl/id";
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    size_t bytes = 0;
    fsdp_status status = FSDP_OK;
    fsdpi_nccl_call *call = fsdpi_nccl_call_new(w, FSDPI_NCCL_MAKE);
    if (!call) return fsdpi_comm_no_memory(&c->base, "a call of NCCL", sizeof *call);
    c->base.now.since_ns = c->base.world->open_ns;
    if (c->base.boot->rank == 0) {
        status = fsdpi_nccl_result(c, ncclGetUniqueId(&call->id), "ncclGetUniqueId");
        if (!status) status = fsdpi_store_set(w->base.store, key, &call->id, sizeof call->id);
    } else {
        status = fsdpi_store_get(w->base.store, key, &call->id, sizeof call->id, &bytes,
                                 fsdpi_comm_left_to_open(c->base.world));
    }
    if (status) {
        fsdpi_free(&fsdpi_nccl_heap, call);
        if (fsdpi_nccl_failed(w)) return fsdpi_comm_report(&c->base);
        return fsdpi_comm_fail(&c->base, status,
                               "[E836] the id of the communicator did not come through the store");
    }
    call->size = c->base.size;
    call->rank = c->base.index;
    call->config = fsdpi_nccl_config(w, call, "world", 1);
    status = fsdpi_nccl_obtain(c, call, "ncclCommInitRankConfig");
    if (status) return status;
    fsdpi_nccl_enter(c);
    return fsdpi_nccl_begin(c);
}

static fsdp_status fsdpi_nccl_read_environment(fsdpi_comm *c) {
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(fsdpi_nccl_of(c));
    char text[FSDPI_REASON];
    fsdpi_text error = {text, sizeof text, 0};
    int checks = 0;
    fsdp_status status = fsdpi_env_int("FSDP_NCCL_CHECK", 0, 1, &checks, &error);
    if (!status)
        status = fsdpi_env_int("FSDP_NCCL_COMMS", 1, 2, &c->world->caps.comm_threads, &error);
    if (!status) status = fsdpi_env_int("FSDP_NCCL_REGISTER", 0, 2, &w->registers, &error);
    w->warms_up = 1;
    if (!status) status = fsdpi_env_int("FSDP_NCCL_WARM_UP", 0, 1, &w->warms_up, &error);
    c->world->is_trusting = !checks;
    return status ? fsdpi_comm_error(c, status, "%s", text) : FSDP_OK;
}

static fsdp_status fsdpi_nccl_open_world(fsdpi_comm *base) {
    fsdpi_nccl_comm *c = fsdpi_nccl_of(base);
    fsdpi_nccl_world *w = fsdpi_nccl_world_of(c);
    w->close_ns = FSDPI_NCCL_CLOSE_NS;
    w->base.base.caps.comm_bytes = &w->comm_bytes;
    fsdp_status status = fsdpi_nccl_read_environment(base);
    if (status) return status;
    status = fsdpi_cuda_place_open(&w->place, base->boot);
    if (status) return fsdpi_comm_error(base, status, "%s", w->place.error);
    status = fsdpi_nccl_versions(c);
    if (!status) status = fsdpi_nccl_make_works(c);
    if (!status) status = fsdpi_store_world_open(base, fsdpi_nccl_beat, fsdpi_nccl_wake);
    if (status) return status;
    w->num_threads = !pthread_create(&w->watchdog, NULL, fsdpi_nccl_watchdog, w);
    if (w->num_threads) w->num_threads += !pthread_create(&w->monitor, NULL, fsdpi_nccl_monitor, w);
    if (w->num_threads < 2)
        return fsdpi_comm_fail(
            base, FSDP_ERR_OUT_OF_MEMORY,
            "[E823] the system refused to start the watchdog or the monitor: raise ulimit -u");
    return fsdpi_nccl_meet(c);
}

// Allocates device memory. The text of a failure is in place.error.
static fsdp_status fsdpi_nccl_get(fsdpi_nccl_world *w, size_t size, fsdpi_chunk *chunk) {
    void *ptr = NULL;
    fsdp_status status = FSDP_OK;
    chunk->at = FSDPI_NCCL_CUDA;
#if NCCL_VERSION_CODE >= 21900
    if (w->registers && size >= FSDPI_NCCL_LARGE) {
        // No fallback to cudaMalloc: the ranks' buffers would differ.
        ncclResult_t result = ncclMemAlloc(&ptr, size);
        fsdpi_text t = {w->place.error, sizeof w->place.error, 0};
        if (result != ncclSuccess) {
            fsdpi_nccl_say(&t, result, "ncclMemAlloc");
            return FSDP_ERR_OUT_OF_MEMORY;
        }
        chunk->at = FSDPI_NCCL_OWN;
    }
#endif
    if (!ptr) status = fsdpi_cuda_get(&w->place, size, &ptr);
    chunk->base = (char *)ptr;
    return status ? status : fsdpi_cuda_fill(&w->place, ptr, size);
}

static fsdp_status fsdpi_nccl_take_memory(fsdpi_comm_world *base, fsdpi_chunk *chunk,
                                          const char **why) {
    fsdpi_nccl_world *w = (fsdpi_nccl_world *)(void *)base;
    fsdp_status status = fsdpi_nccl_get(w, chunk->size ? chunk->size : 1, chunk);
    if (!status) return FSDP_OK;
    *why = w->place.error;
    if (chunk->base) fsdpi_nccl_give(base, chunk);
    return status;
}

static void fsdpi_nccl_advise(fsdpi_text *t) {
    fsdpi_text_add(t, ". Shard over more GPUs, or set cpu_offload; NCCL takes memory of its own "
                      "(FSDP_NCCL_COMMS=1, NCCL_BUFFSIZE)");
}

// Fails the world, and wakes the watchdog and the monitor.
static void fsdpi_nccl_tell(fsdpi_comm *base, fsdp_status status, const char *subject,
                            const char *reason) {
    fsdpi_store_world_tell(base, status, subject, reason);
    fsdpi_nccl_wake(base->world);
}

// clang-format off
static const fsdpi_transport fsdpi_nccl_transport = {
    sizeof(fsdpi_nccl_comm), sizeof(fsdpi_nccl_world), FSDPI_MAX_RANKS,
    {FSDPI_NCCL_KINDS, 0, 2, 0, NULL, NULL},
    fsdpi_nccl_open_world, NULL, fsdpi_nccl_connect, fsdpi_nccl_leave, fsdpi_nccl_close,
    fsdpi_nccl_show, fsdpi_nccl_hear, fsdpi_nccl_move, NULL,
    fsdpi_nccl_tell, fsdpi_store_world_failure, fsdpi_store_world_ask,
    fsdpi_nccl_take_memory, fsdpi_nccl_give, fsdpi_nccl_advise};
// clang-format on

/* Sets NCCL_LAUNCH_ORDER_IMPLICIT if communicators cannot be configured and this is the only
   thread. NCCL before 2.31 reads it at the first launch. A user's value stays. The environment must
   not change while another thread may read it. */
static void fsdpi_nccl_order_launches(void) {
#if NCCL_VERSION_CODE >= 23102
    int version = 0;
    if (ncclGetVersion(&version) == ncclSuccess && FSDPI_NCCL_CONFIGURES(version)) return;
#endif
    if (fsdpi_is_only_thread())
        (void)fsdpi_nccl_setenv(FSDPI_NCCL_ORDER, "1", 0);
}

static fsdp_status fsdpi_nccl_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **out) {
    fsdpi_nccl_order_launches();
    fsdpi_fill_std_fds(); // NCCL and CUDA may open descriptors at any time
    return fsdpi_comm_open(&fsdpi_nccl_transport, boot, caps, out);
}

FSDP_API const fsdp_comm_ops *fsdp_nccl_comm_ops(void) {
    static const fsdp_comm_ops ops = {
        FSDP_COMM_VERSION, sizeof(fsdp_comm_ops), "nccl",           fsdpi_nccl_open,
        fsdpi_comm_split,  fsdpi_comm_close,      fsdpi_comm_run,   fsdpi_comm_alloc,
        fsdpi_comm_free,   fsdpi_comm_error_text, fsdpi_comm_abort, fsdpi_comm_poll,
    };
    return &ops;
}
#endif // FSDP_IMPLEMENTATION
