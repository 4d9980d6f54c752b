/* fsdp_gloo.h - the backend for several hosts without accelerators: collectives over TCP, and
   through shared memory inside a host

   -DFSDP_BACKEND_GLOO compiles it in; the program is linked with the object of fsdp_gloo.cc:

       g++ -O2 -c backends/fsdp_gloo.cc
       cc -DFSDP_BACKEND_GLOO -I. prog.c fsdp_gloo.o -lgloo -lstdc++ -pthread -lm

   How it works
   - The Gloo library is the transport: connections between all members of a comm, and a thread that
     serves them. The library makes the collectives: each rank sends every member what that member
     needs, once, straight from buffer to buffer: (W-1)/W of a buffer.
   - Gloo serves remote members, which are on other hosts. Local members (fsdp_local.h; `local` in
     names) share memory: they exchange signatures there, and read each other's buffers while
     remote data arrive. If all members of a comm are local, the comm does not use Gloo.
   - A collective begins with one message to each member: the signature of this rank's call,
     followed by small data. All ranks compare the signatures before they use any data. Larger data
     go in separate messages, whose slot is computed from the signature: if ranks disagree, the
     slots do not match, and no rank receives more than it expects.
   - A rank posts the receive for a peer's next message in advance: a small collective takes one
     message in each direction, and an all_reduce in two rounds takes one more.
   - In a short collective the caller reads and writes its messages itself, and Gloo's thread
     sleeps: a message wakes one thread. Gloo's thread moves the messages of long collectives, and
     all messages while this rank waits for something else.
   - Bytes on the network: a rank sends each of the F remote members FSDPI_GLOO_HEAD bytes, and
     with W members and S bytes on the full side in addition:
       all_gather, reduce_scatter; all_to_all with a source of S bytes    F S / W
       all_reduce                up to 32 KiB: F S; larger: 2 F S / W
       broadcast up to 32 KiB    F S from the root
       a larger broadcast        2 F S / W from the root, nothing to members on its host; from each
                                 other rank S / W to each member on neither its nor the root's host
       send                      S to a remote member, otherwise nothing
     Segments of up to 32 KiB together (less in groups of more than 43 ranks) and regions of an
     all_reduce of at most 32 KiB follow the 256 bytes, each rounded up to 64 bytes. A larger
     all_reduce or broadcast is cut into regions of whole groups of 64 elements, so the last ones
     may be shorter or empty.
   - Sums run in rank order (fsdpi_reduce): the bits equal those of every other backend on CPUs.
   - Members connect to each other without Gloo: each side proves to the other that it knows the
     job's token. Then Gloo gets the sockets. No rank listens after its comm is open.
   - Ranks meet at a store (fsdp_store.h), which also distributes the failure of the job. Every
     wait has a deadline, and ends at once after a failure. If a rank ends, its connections to the
     store and to its peers close: so the other ranks notice it, even during a transfer.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif

#ifndef FSDP_GLOO_H
#define FSDP_GLOO_H
#ifndef FSDP_MATH_ONLY

#ifdef __cplusplus
extern "C" {
#endif

// clang-format off
/* fsdp_gloo_comm_ops - the table of this backend, named "gloo"
   Result      never NULL; static
   open        a process or a thread per rank; boot->store names the store. After a failure
               error_text(NULL) returns the text, for the calling thread
   split       blocks until every rank of the parent has called it, and the members are connected
   run         different comms may run in different threads of a rank at the same time. Supports
               all_to_all, send and recv, too. Buffers that the backend shm would read from peers
               must come from alloc here, too. Returns INVALID_ARG and UNSUPPORTED before this
               rank sends its signature
   alloc       does not wait; zero-filled. Uses the allocator; if this host has other ranks, shared
               memory as in shm
   close       groups before their world. Waits until its peers have closed the comm too, or have
               failed: the last messages are then delivered. Waits at most half a second for the
               world, and half a second for all groups together that peers keep open
   abort       from any thread      poll never blocks
   Memory      a comm of W members that are not all on one host: messages of 2..32 KiB, 3 for each
               member; and 8 MiB from its first large reduction on
   Limits      FSDPI_MAX_SRCS ranks, Linux with IPv4 on its loopback interface. A peer must prove
               that it knows the job's token; afterwards data are neither checked nor encrypted: the
               network must be trusted. From open on the process ignores SIGPIPE, except if it has a
               handler, or all ranks are on one host
   Thread      any */
// clang-format on
FSDP_API const fsdp_comm_ops *fsdp_gloo_comm_ops(void);

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_GLOO_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_GLOO_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_GLOO_IMPLEMENTED

#include "../src/base/os.h"
#include "../src/base/os_net.h"
#include "../src/base/reduce.h"
#include "../src/base/text.h"
#include "../src/core/alloc.h"
#include "../src/core/flight.h"
#include "fsdp_comm.h"      // the base of all backends
#include "fsdp_gloo_shim.h" // the transport
#include "fsdp_local.h" // ranks of one host
#include "fsdp_memory.h"
#include "fsdp_shm_world.h"
#include "fsdp_signature.h"
#include "fsdp_store.h"
#include "fsdp_store_frames.h"
#include "fsdp_store_server.h"
#include "fsdp_store_sockets.h"
#include "fsdp_store_token.h"
#include "fsdp_store_world.h" // rendezvous, and the world's failure

#include <errno.h> // EMFILE, ENFILE
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define FSDPI_GLOO_KINDS                                                                           \
    (1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER | 1u << FSDP_OP_ALL_REDUCE |          \
     1u << FSDP_OP_BROADCAST | 1u << FSDP_OP_ALL_TO_ALL | 1u << FSDP_OP_SEND | 1u << FSDP_OP_RECV)
#define FSDPI_GLOO_HEAD       256                // bytes of a message before its data
#define FSDPI_GLOO_SMALL      ((size_t)32 << 10) // most bytes of data after a signature
#define FSDPI_GLOO_MESSAGES   ((size_t)4 << 20)  // bytes of a comm's messages, above 2 KiB each
#define FSDPI_GLOO_SCRATCH    ((size_t)8 << 20)  // bytes of a comm for data that it reduces
#define FSDPI_GLOO_PIECE      ((size_t)1 << 20)  // most bytes that are reduced at a time
#define FSDPI_GLOO_SHORT      ((size_t)2 << 20)  // most bytes that move without Gloo's thread
#ifndef FSDPI_GLOO_GATHER
#define FSDPI_GLOO_GATHER ((size_t)16 << 20) // most bytes of one message: each has a timeout
#endif
#define FSDPI_GLOO_CLOSE_NS 500000000          // close handshakes: all groups; then the world
#define FSDPI_GLOO_GRACE      20                 // ms for messages sent before a failure
#define FSDPI_GLOO_ALONE_NS   200000000          // wait after the store's end, see fsdpi_gloo_lost
#define FSDPI_GLOO_CALLERS    64       // most connections at a time without proof of the token
#define FSDPI_GLOO_AGAIN_NS   20000000 // delay before a failed call to a member is repeated

// Slots: signatures of collectives, signatures of pairs, and data. A data slot also has the hash
// of the signature, and a phase.
#define FSDPI_GLOO_SLOT_RECORD ((uint64_t)0x40 << 56)
#define FSDPI_GLOO_SLOT_PAIR   ((uint64_t)0x41 << 56)
#define FSDPI_GLOO_SLOT_DATA   ((uint64_t)0x42 << 56)

typedef char fsdpi_gloo_head_has_room[FSDPI_GLOO_HEAD >= sizeof(fsdpi_signature) ? 1 : -1];
typedef struct fsdpi_gloo_comm fsdpi_gloo_comm;

typedef struct fsdpi_gloo_world {
    fsdpi_store_world base;
    fsdp_gloo_device *device; // NULL: all ranks are local
    fsdpi_local_hosts hosts;
    fsdpi_comm *local;     // the ranks of this host; NULL: there are no others
    fsdpi_activity trace; // until near has one
    int64_t close_ns;  // time left for the close handshakes of all groups together
    uint32_t lock;        // guards the list
    fsdpi_gloo_comm *comms;
} fsdpi_gloo_world;

// Messages between this rank and one member.
typedef struct fsdpi_gloo_peer {
    fsdp_gloo_buffer *in[2]; // signatures, alternating: one is posted while the other is used
    fsdp_gloo_buffer *out;
    fsdp_gloo_buffer *scratch; // partial values that the member sends
    fsdp_gloo_buffer *rx, *tx; // data of this operation
    uint32_t recvs, sends;     // posted to rx and tx, and not yet waited for
    int showing;               // 1: the send of `out` is outstanding
    int arrived;               // 1: the member's signature of this operation has arrived
} fsdpi_gloo_peer;

// Position of a loop over the large strips of a collective. All zero: the start.
typedef struct fsdpi_gloo_walk {
    uint32_t strip;
    size_t used, at, pieces; // bytes after a signature; elements of this strip's regions; pieces
} fsdpi_gloo_walk;

struct fsdpi_gloo_comm {
    fsdpi_comm base;
    fsdpi_gloo_comm *next;
    fsdpi_comm *local; // the members of this host; NULL: there are no others
    int turn, closed;
    int overlaps;               // 1: Gloo's thread moves messages while this rank works
    fsdp_gloo_context *context; // to members of other hosts; NULL: there are none
    uint32_t lock;              // guards `waiting`
    fsdp_gloo_buffer *waiting;  // the buffer that this rank waits for now
    size_t small_bytes;               // most bytes of data after a signature
    char *messages;             // in[0], in[1] and out of each member
    char *scratch;
    size_t piece, depth;            // bytes of one piece of one member, pieces of one member
    fsdpi_gloo_walk ahead;          // pieces whose receives are posted
    int at[FSDPI_MAX_SRCS];         // the members' indices in `local`; -1: a remote member
    const char *of[FSDPI_MAX_SRCS]; // local members' buffers in this operation
    fsdpi_gloo_peer peers[FSDPI_MAX_SRCS];
};

/* A strip of a collective's data: member k's region begins at full + k * part, counted in elements,
   and ends at the next one or at `total`; this rank's own data is at `shard` of the other side. */
typedef struct fsdpi_gloo_strip {
    size_t full, shard, part, total;
} fsdpi_gloo_strip;

/* -------------------------------------------------------------------------------------------- */
// Waits. A message, a failure, a lost peer or the deadline ends them.

static fsdpi_gloo_comm *fsdpi_gloo_of(fsdpi_comm *base) { return (fsdpi_gloo_comm *)(void *)base; }

static fsdpi_gloo_world *fsdpi_gloo_world_of(const fsdpi_gloo_comm *c) {
    return (fsdpi_gloo_world *)(void *)c->base.world;
}

static fsdpi_store *fsdpi_gloo_store(const fsdpi_gloo_comm *c) {
    return fsdpi_gloo_world_of(c)->base.store;
}

static int fsdpi_gloo_failed(const fsdpi_gloo_comm *c) { return fsdpi_comm_failed(&c->base); }

// Returns 1 if all members are local: then Gloo is not used.
static int fsdpi_gloo_is_local(const fsdpi_gloo_comm *c) {
    return c->local && c->local->size == c->base.size;
}

// Returns 1 if member k is on another host: then its data go through Gloo.
static int fsdpi_gloo_is_far(const fsdpi_gloo_comm *c, int k) {
    return c->at[k] < 0 && k != c->base.index;
}

static fsdp_status fsdpi_gloo_local_result(fsdpi_gloo_comm *c, fsdp_status status) {
    return fsdpi_local_result(&c->base, c->local, status);
}

// Runs a barrier of the local members. It fails if one of them has ended.
static fsdp_status fsdpi_gloo_local_barrier(fsdpi_gloo_comm *c) {
    if (!c->local) return FSDP_OK;
    return fsdpi_gloo_local_result(c, fsdpi_shm_barrier(fsdpi_shm_comm_of(c->local), "finished"));
}

// Fails the world because member k is lost, for the reason `how`. say_last: the text also names the
// member's last operation, which may be the cause.
static fsdp_status fsdpi_gloo_gone(fsdpi_gloo_comm *c, int k, const char *how, int say_last) {
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    fsdpi_text_add(&t, say_last ? "[E752] rank %d %s; " : "[E751] rank %d %s",
                   (int)c->base.ranks[k], how);
    if (say_last) fsdpi_say_last(&t, &c->base, (int)c->base.ranks[k]);
    return fsdpi_comm_fail(&c->base, FSDP_ERR_PEER_LOST, "%s", reason);
}

static fsdp_status fsdpi_gloo_closed(fsdpi_gloo_comm *c, int k) {
    return fsdpi_gloo_gone(c, k, c->base.is_world ? "has shut down" : "has closed this group", 0);
}

static char *fsdpi_gloo_message(const fsdpi_gloo_comm *c, int k, int which);

static fsdp_status fsdpi_gloo_no_descriptor(fsdpi_gloo_comm *c) {
    return fsdpi_comm_fail(&c->base, FSDP_ERR_IO,
                           "[E753] this process has too many open files: raise ulimit -n");
}

/* Fails the world because the connection to member k broke. A member that loses another one closes
   its own connections, too: so the culprit is the first lost member, or a local member that has
   ended. If the store reports a failure or a shutdown meanwhile, that is the cause. */
static fsdp_status fsdpi_gloo_lost(fsdpi_gloo_comm *c, int k, const char *how) {
    fsdpi_store *store = fsdpi_gloo_store(c);
    int first = fsdp_gloo_context_first_lost(c->context);
    int gone = c->local ? fsdpi_local_gone(c->local) : -1;
    if (first >= 0 && !fsdpi_is_pair(c->base.now.kind)) k = first;
    for (int j = 0; j < c->base.size && gone >= 0 && !fsdpi_is_pair(c->base.now.kind); j++)
        if (c->at[j] == gone) k = j, how = "it has ended";
    fsdpi_signature record;
    char text[300];
    for (int turn = 0; turn < 2 && c->messages; turn++) { // send and recv do not count as turns
        memcpy(&record, fsdpi_gloo_message(c, k, turn), sizeof record);
        if (record.kind == FSDPI_CLOSE) return fsdpi_gloo_closed(c, k);
    }
    (void)snprintf(text, sizeof text, "is out of reach of rank %d (%s)", c->base.boot->rank, how);
    // A store that was closed in order reports no cause. The wait lets other ranks notice the same
    // loss before this rank closes its connections, too.
    int cause = fsdpi_store_world_await_cause(
        &c->base, k, fsdpi_store_ended(store) ? FSDPI_GLOO_ALONE_NS : FSDPI_STORE_CAUSE_NS);
    if (cause == FSDPI_CAUSE_FAILURE) return fsdpi_comm_report(&c->base);
    return fsdpi_gloo_gone(c, k, cause == k ? "has shut down" : text, cause != k);
}

// Fails the world because the deadline passed in a wait for member k. Names all missing members.
static fsdp_status fsdpi_gloo_late(fsdpi_gloo_comm *c, int k) {
    uint8_t missing[FSDPI_MAX_SRCS];
    const char *verb = !c->messages ? "connected" : c->peers[k].arrived ? "finished" : "come";
    memset(missing, 0, sizeof missing);
    missing[k] = 1;
    // A signature that has arrived is found without delay; the wait for any other ends after 1 ms.
    for (int j = 0; j < c->base.size && c->messages && !c->peers[k].arrived; j++) {
        if (fsdpi_gloo_is_far(c, j))
            missing[j] |= !c->peers[j].arrived &&
                          fsdp_gloo_wait_recv(c->peers[j].in[c->turn], 1) != FSDP_GLOO_OK;
        else if (j != c->base.index) missing[j] = !fsdpi_local_has_come(c->local, c->at[j]);
    }
    return fsdpi_store_world_late(&c->base, missing, verb);
}

// Returns the status for the transport's result of a call for member k. Fails the world if needed.
static fsdp_status fsdpi_gloo_result(fsdpi_gloo_comm *c, int k, int result) {
    if (result == FSDP_GLOO_OK) return FSDP_OK;
    if (result == FSDP_GLOO_ABORTED) return fsdpi_comm_report(&c->base);
    if (result == FSDP_GLOO_TIMEOUT) return fsdpi_gloo_late(c, k);
    if (strstr(fsdp_gloo_error(), strerror(EMFILE)) || strstr(fsdp_gloo_error(), strerror(ENFILE)))
        return fsdpi_gloo_no_descriptor(c);
    if (result == FSDP_GLOO_NO_MEMORY)
        return fsdpi_comm_fail(&c->base, FSDP_ERR_OUT_OF_MEMORY,
                               "[E754] Gloo has no memory for a message: free host memory");
    if (result != FSDP_GLOO_LOST)
        return fsdpi_comm_fail(&c->base, FSDP_ERR_BACKEND, "[E755] Gloo has failed: %s",
                               fsdp_gloo_error());
    return fsdpi_gloo_lost(c, k, fsdp_gloo_error());
}

static int fsdpi_gloo_await(fsdp_gloo_buffer *buffer, int is_send, int64_t timeout_ms) {
    return is_send ? fsdp_gloo_wait_send(buffer, timeout_ms)
                   : fsdp_gloo_wait_recv(buffer, timeout_ms);
}

// Waits for `buffer`, until a failure of the world at the latest. Returns the transport's result.
static int fsdpi_gloo_await_abortable(fsdpi_gloo_comm *c, fsdp_gloo_buffer *buffer, int is_send,
                                      int64_t timeout_ms) {
    fsdpi_lock(&c->lock);
    int failed = fsdpi_gloo_failed(c); // fsdpi_gloo_wake runs after the failure is set
    c->waiting = failed ? NULL : buffer;
    fsdpi_unlock(&c->lock);
    int result = failed ? FSDP_GLOO_ABORTED : fsdpi_gloo_await(buffer, is_send, timeout_ms);
    fsdpi_lock(&c->lock);
    c->waiting = NULL;
    fsdpi_unlock(&c->lock);
    return result;
}

/* Waits for one message from or to member k. A message that was sent before the failure still
   counts: an operation that succeeded on other ranks also succeeds here. */
static fsdp_status fsdpi_gloo_wait(fsdpi_gloo_comm *c, int k, fsdp_gloo_buffer *buffer, int is_send,
                                   int64_t timeout_ns) {
    fsdpi_activity *trace = FSDPI_LOAD(&c->base.world->trace);
    fsdpi_trace_wait(trace, (int)c->base.ranks[k]);
    int result = fsdpi_gloo_await_abortable(c, buffer, is_send, (timeout_ns + 999999) / 1000000);
    int more = result;
    if (result == FSDP_GLOO_OK) fsdpi_trace_wait(trace, -1);
    for (int i = 0; i < 2 && more == FSDP_GLOO_ABORTED; i++) { // waits may have been ended twice
        more = fsdpi_gloo_await(buffer, is_send, FSDPI_GLOO_GRACE);
        if (more == FSDP_GLOO_OK) return FSDP_OK;
    }
    return fsdpi_gloo_result(c, k, result);
}

// Ends all waits if the world has failed. The store's thread calls it.
static void fsdpi_gloo_wake(void *user) {
    fsdpi_gloo_world *w = (fsdpi_gloo_world *)user;
    fsdpi_lock(&w->lock);
    for (fsdpi_gloo_comm *c = w->comms; c && fsdpi_gloo_failed(c); c = c->next) {
        fsdpi_lock(&c->lock);
        if (c->waiting) fsdp_gloo_abort(c->waiting);
        fsdpi_unlock(&c->lock);
        if (c->local) fsdpi_local_wake(c->local);
    }
    fsdpi_unlock(&w->lock);
}

static void fsdpi_gloo_beat(void *user, fsdpi_store_beat *out) {
    fsdpi_gloo_world *w = (fsdpi_gloo_world *)user;
    int64_t since_ns;
    out->busy = fsdpi_activity_read(FSDPI_LOAD(&w->base.base.trace), out->text, sizeof out->text,
                                    &since_ns);
    out->since_ns = fsdpi_boot_now(&w->base.base.boot) - since_ns;
}

/* -------------------------------------------------------------------------------------------- */
// The message that begins each collective. Invariants: before a member sends its message number n,
// it has posted the receives for number n of every other member. The buffer of a posted operation
// lives until the operation has completed, or its context was closed.

static char *fsdpi_gloo_message(const fsdpi_gloo_comm *c, int k, int which) { // in 0, in 1, out
    return c->messages + (3 * (size_t)k + (size_t)which) * (FSDPI_GLOO_HEAD + c->small_bytes);
}

static fsdp_status fsdpi_gloo_expect(fsdpi_gloo_comm *c, int turn) {
    for (int k = 0; k < c->base.size; k++) {
        if (!fsdpi_gloo_is_far(c, k)) continue;
        fsdp_status status = fsdpi_gloo_result(c, k,
                                               fsdp_gloo_recv(c->peers[k].in[turn], k,
                                                              FSDPI_GLOO_SLOT_RECORD, 0,
                                                              FSDPI_GLOO_HEAD + c->small_bytes));
        if (status) return status;
    }
    return FSDP_OK;
}

// Sends member k the signature, and the data after it.
static fsdp_status fsdpi_gloo_show_one(fsdpi_gloo_comm *c, int k, uint64_t slot, size_t bytes) {
    memcpy(fsdpi_gloo_message(c, k, 2), &c->base.now, sizeof c->base.now);
    int result = fsdp_gloo_send(c->peers[k].out, k, slot, 0, bytes);
    c->peers[k].arrived = 0;
    c->peers[k].showing = result == FSDP_GLOO_OK;
    return fsdpi_gloo_result(c, k, result);
}

// Sends the signature and data to all remote members; each rank begins with a different one.
static fsdp_status fsdpi_gloo_show_all(fsdpi_gloo_comm *c, size_t bytes) {
    c->turn ^= 1;
    if (c->messages) c->base.shown = fsdpi_gloo_message(c, 0, c->turn);
    fsdp_status status = fsdpi_gloo_expect(c, !c->turn); // the one after this one
    for (int i = 1; i < c->base.size && !status; i++) {
        int k = (c->base.index + i) % c->base.size;
        if (fsdpi_gloo_is_far(c, k))
            status = fsdpi_gloo_show_one(c, k, FSDPI_GLOO_SLOT_RECORD, FSDPI_GLOO_HEAD + bytes);
    }
    return status;
}

// Waits for the signature of member k.
static fsdp_status fsdpi_gloo_hear_one(fsdpi_gloo_comm *c, int k, int64_t timeout_ns) {
    fsdpi_signature record;
    fsdp_status status = fsdpi_gloo_wait(c, k, c->peers[k].in[c->turn], 0, timeout_ns);
    if (status) return status;
    memcpy(&record, fsdpi_gloo_message(c, k, c->turn), sizeof record);
    if (record.kind == FSDPI_CLOSE) return fsdpi_gloo_closed(c, k);
    c->peers[k].arrived = 1;
    return FSDP_OK;
}

// Returns the call for the comm of local members, where the other rank of a pair has another index.
static fsdp_coll fsdpi_gloo_local_call(const fsdpi_gloo_comm *c, const fsdp_coll *op) {
    fsdp_coll call = *op;
    call.root = c->at[op->root];
    return call;
}

static int fsdpi_gloo_is_near_pair(const fsdpi_gloo_comm *c, const fsdp_coll *op) {
    return op && fsdpi_is_pair(op->kind) && !fsdpi_gloo_is_far(c, (int)op->root);
}

// Copies the signature of a local member to its place among all signatures.
static void fsdpi_gloo_take_record(fsdpi_gloo_comm *c, int k) {
    fsdpi_signature record = fsdpi_signature_of(c->local, c->at[k]);
    memcpy(fsdpi_gloo_message(c, k, c->turn), &record, sizeof record);
}

// Waits for the signatures of the local members. The timeout counts from the operation's start.
static fsdp_status fsdpi_gloo_hear_local(fsdpi_gloo_comm *c) {
    fsdpi_shm_comm *local = fsdpi_shm_comm_of(c->local);
    local->since = &c->base.now.since_ns;
    fsdp_status status = fsdpi_gloo_local_result(c, fsdpi_shm_hear(c->local, NULL));
    local->since = NULL;
    for (int k = 0; k < c->base.size && !status; k++)
        if (c->at[k] >= 0 && k != c->base.index) fsdpi_gloo_take_record(c, k);
    return status;
}

static fsdp_status fsdpi_gloo_hear_pair(fsdpi_gloo_comm *c, const fsdp_coll *op) {
    int k = (int)op->root;
    if (fsdpi_gloo_is_far(c, k)) return fsdpi_gloo_hear_one(c, k, c->base.boot->timeout_ns);
    fsdp_coll call = fsdpi_gloo_local_call(c, op);
    fsdp_status status = fsdpi_gloo_local_result(c, fsdpi_shm_hear(c->local, &call));
    if (!status) fsdpi_gloo_take_record(c, k);
    return status;
}

static fsdp_status fsdpi_gloo_hear(fsdpi_comm *base, const fsdp_coll *op) {
    fsdpi_gloo_comm *c = fsdpi_gloo_of(base);
    int64_t deadline = base->now.since_ns + base->boot->timeout_ns;
    fsdp_status status = FSDP_OK;
    if (fsdpi_gloo_is_local(c)) return fsdpi_gloo_local_result(c, fsdpi_shm_hear(c->local, op));
    if (op && fsdpi_is_pair(op->kind)) return fsdpi_gloo_hear_pair(c, op);
    for (int i = 1; i < base->size && !status; i++) {
        int k = (base->index + i) % base->size;
        if (fsdpi_gloo_is_far(c, k))
            status = fsdpi_gloo_hear_one(c, k, deadline - fsdpi_boot_now(base->boot));
    }
    return status || !c->local ? status : fsdpi_gloo_hear_local(c);
}

/* -------------------------------------------------------------------------------------------- */
// Data in separate messages, straight from and to the caller's buffers.

static uint64_t fsdpi_gloo_slot(const fsdpi_gloo_comm *c, int phase) {
    return FSDPI_GLOO_SLOT_DATA | (c->base.now.key >> 16 & ~(uint64_t)0xFF) | (uint64_t)phase;
}

static fsdp_status fsdpi_gloo_post(fsdpi_gloo_comm *c, int k, int is_send, const void *base,
                                   int phase, size_t offset, size_t bytes) {
    fsdpi_gloo_peer *peer = &c->peers[k];
    fsdp_gloo_buffer **buffer = is_send ? &peer->tx : &peer->rx;
    int result = FSDP_GLOO_OK;
    if (!*buffer) // fsdpi_check has checked offsets: the buffer is all memory from base on
        result = fsdp_gloo_buffer_create(c->context, (void *)(uintptr_t)base, SIZE_MAX / 4, buffer);
    while (result == FSDP_GLOO_OK && bytes > 0) {
        size_t now = bytes < FSDPI_GLOO_GATHER ? bytes : FSDPI_GLOO_GATHER;
        result = is_send ? fsdp_gloo_send(*buffer, k, fsdpi_gloo_slot(c, phase), offset, now)
                         : fsdp_gloo_recv(*buffer, k, fsdpi_gloo_slot(c, phase), offset, now);
        if (result == FSDP_GLOO_OK) *(is_send ? &peer->sends : &peer->recvs) += 1;
        offset += now, bytes -= now;
    }
    return fsdpi_gloo_result(c, k, result);
}

// Waits for posted data, then frees the buffers, also after a failure. Returns the first failure.
static fsdp_status fsdpi_gloo_finish(fsdpi_gloo_comm *c, fsdp_status status) {
    int64_t timeout_ns = c->base.boot->timeout_ns;
    for (int i = 1; i < c->base.size && !status; i++) {
        int k = (c->base.index + i) % c->base.size;
        fsdpi_gloo_peer *peer = &c->peers[k];
        for (; peer->recvs > 0 && !status; peer->recvs -= !status)
            status = fsdpi_gloo_wait(c, k, peer->rx, 0, timeout_ns);
    }
    for (int k = 0; k < c->base.size && !status; k++)
        for (; c->peers[k].sends > 0 && !status; c->peers[k].sends -= !status)
            status = fsdpi_gloo_wait(c, k, c->peers[k].tx, 1, timeout_ns);
    if (status && c->context && !c->closed) {
        fsdp_gloo_context_close(c->context);
        c->closed = 1;
    }
    for (int k = 0; k < c->base.size; k++) {
        fsdp_gloo_buffer_destroy(c->peers[k].rx);
        fsdp_gloo_buffer_destroy(c->peers[k].tx);
        c->peers[k].rx = c->peers[k].tx = NULL;
        c->peers[k].recvs = c->peers[k].sends = 0;
    }
    return status;
}

static size_t fsdpi_gloo_begin_of(const fsdpi_gloo_strip *s, int k) {
    return s->full + s->part * (size_t)k;
}

static size_t fsdpi_gloo_count_of(const fsdpi_gloo_strip *s, int k) {
    size_t before = s->part * (size_t)k;
    return before >= s->total ? 0 : s->total - before < s->part ? s->total - before : s->part;
}

// Returns 1 if member k reads the whole broadcast from the root: it is the root or on its host.
static int fsdpi_gloo_has_all(const fsdpi_gloo_comm *c, const fsdp_coll *op, int k) {
    return op->kind == FSDP_OP_BROADCAST &&
           (k == op->root || fsdpi_local_is(&fsdpi_gloo_world_of(c)->hosts, (int)c->base.ranks[k],
                                            (int)c->base.ranks[op->root]));
}

// Sends each remote member k the data at src_at + k * step, and receives the member's data. step 0:
// all members get the same data.
static fsdp_status fsdpi_gloo_exchange(fsdpi_gloo_comm *c, const fsdp_coll *op,
                                       const fsdpi_gloo_strip *s, const void *src, size_t src_at,
                                       size_t step, int phase) {
    size_t size = fsdp_dtype_size(op->dtype);
    int has_all = fsdpi_gloo_has_all(c, op, c->base.index);
    fsdp_status status = FSDP_OK;
    for (int i = 1; i < c->base.size && !status && !has_all; i++) {
        int k = (c->base.index + c->base.size - i) % c->base.size;
        if (fsdpi_gloo_is_far(c, k))
            status = fsdpi_gloo_post(c, k, 0, op->dst, phase, fsdpi_gloo_begin_of(s, k) * size,
                                     fsdpi_gloo_count_of(s, k) * size);
    }
    for (int i = 1; i < c->base.size && !status; i++) {
        int k = (c->base.index + i) % c->base.size;
        if (fsdpi_gloo_is_far(c, k) && !fsdpi_gloo_has_all(c, op, k))
            status = fsdpi_gloo_post(c, k, 1, src, phase, (src_at + step * (size_t)k) * size,
                                     fsdpi_gloo_count_of(s, c->base.index) * size);
    }
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// The strips of a collective. Small strips travel with the signature, the others separately.

static uint32_t fsdpi_gloo_strips(const fsdp_coll *op) {
    int is_list = op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER;
    return is_list ? op->num_segs : op->count ? 1 : 0;
}

// Returns strip i. Lists and all_to_all have equal regions. Other strips are cut into whole cache
// lines, and the last regions may be short or empty.
static fsdpi_gloo_strip fsdpi_gloo_strip_of(const fsdpi_gloo_comm *c, const fsdp_coll *op,
                                            uint32_t i) {
    fsdpi_gloo_strip s = {0, 0, (size_t)op->count, 0};
    size_t size = (size_t)c->base.size, me = (size_t)c->base.index;
    if (op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER) {
        s.full = (size_t)op->segs[i].full;
        s.shard = (size_t)op->segs[i].shard;
        s.part = (size_t)op->segs[i].count;
        s.total = s.part * size;
    } else if (op->kind == FSDP_OP_ALL_TO_ALL) {
        s.total = s.part * size;
    } else {
        s.total = s.part;
        s.part = ((s.total + size - 1) / size + 63) / 64 * 64;
        s.shard = s.part * me;
    }
    return s;
}

// Returns 1 if a member needs only a region of the strip. An all_reduce that does not fit in a
// message takes two rounds: first sums of regions, as in a reduce_scatter.
static int fsdpi_gloo_is_parted(const fsdpi_gloo_comm *c, const fsdp_coll *op,
                                const fsdpi_gloo_strip *s) {
    if (op->kind == FSDP_OP_ALL_REDUCE)
        return s->total * fsdp_dtype_size(op->dtype) > c->small_bytes;
    return op->kind != FSDP_OP_BROADCAST;
}

// Returns the end of strip s after the signature, if s is small, else `used`. Small strips begin at
// multiples of 64 bytes.
static size_t fsdpi_gloo_place(const fsdpi_gloo_comm *c, const fsdp_coll *op,
                               const fsdpi_gloo_strip *s, size_t used, int *is_small) {
    size_t count = fsdpi_gloo_is_parted(c, op, s) ? s->part : s->total;
    size_t end = (used + count * fsdp_dtype_size(op->dtype) + 63) / 64 * 64;
    *is_small = end <= c->small_bytes;
    return *is_small ? end : used;
}

// Finds the next piece: at most `most` elements of each region of *s, from *at on. Returns 0 if no
// piece is left.
static int fsdpi_gloo_next(const fsdpi_gloo_comm *c, const fsdp_coll *op, fsdpi_gloo_walk *walk,
                           size_t most, fsdpi_gloo_strip *s, size_t *at) {
    for (; walk->strip < fsdpi_gloo_strips(op); walk->strip++, walk->at = 0) {
        int is_small;
        *s = fsdpi_gloo_strip_of(c, op, walk->strip);
        walk->used = fsdpi_gloo_place(c, op, s, walk->used, &is_small);
        if (is_small || walk->at >= s->part) continue;
        *at = walk->at;
        walk->at = most < s->part - walk->at ? walk->at + most : s->part;
        walk->pieces++;
        return 1;
    }
    return 0;
}

// Finds the next small strip, and its offset after a signature. Returns 0 if no strip is left.
static int fsdpi_gloo_next_small(const fsdpi_gloo_comm *c, const fsdp_coll *op,
                                 fsdpi_gloo_walk *walk, fsdpi_gloo_strip *s, size_t *at) {
    int is_small = 0;
    while (!is_small && walk->strip < fsdpi_gloo_strips(op)) {
        *s = fsdpi_gloo_strip_of(c, op, walk->strip++);
        *at = walk->used;
        walk->used = fsdpi_gloo_place(c, op, s, walk->used, &is_small);
    }
    return is_small;
}

// Returns the data of strip s that member k needs, and their bytes. NULL: this rank has none.
static const char *fsdpi_gloo_source(const fsdpi_gloo_comm *c, const fsdp_coll *op,
                                     const fsdpi_gloo_strip *s, int k, size_t *bytes) {
    size_t size = fsdp_dtype_size(op->dtype);
    const char *src = (const char *)op->src, *dst = (const char *)op->dst;
    *bytes = s->part * size;
    switch (op->kind) {
    case FSDP_OP_ALL_GATHER:
        return op->in_place ? dst + fsdpi_gloo_begin_of(s, c->base.index) * size
                            : src + s->shard * size;
    case FSDP_OP_REDUCE_SCATTER:
    case FSDP_OP_ALL_TO_ALL: return src + fsdpi_gloo_begin_of(s, k) * size;
    case FSDP_OP_BROADCAST:
        if (op->root != c->base.index) return NULL;
        break;
    default:
        if (!fsdpi_gloo_is_parted(c, op, s)) break;
        *bytes = fsdpi_gloo_count_of(s, k) * size;
        return dst + fsdpi_gloo_begin_of(s, k) * size;
    }
    *bytes = s->total * size;
    return dst;
}

// Copies small strips after the signatures. Returns their bytes.
static size_t fsdpi_gloo_pack(const fsdpi_gloo_comm *c, const fsdp_coll *op) {
    fsdpi_gloo_walk walk = {0, 0, 0, 0};
    fsdpi_gloo_strip s;
    size_t at, bytes;
    while (fsdpi_gloo_next_small(c, op, &walk, &s, &at))
        for (int k = 0; k < c->base.size; k++) {
            const char *from = fsdpi_gloo_source(c, op, &s, k, &bytes);
            if (fsdpi_gloo_is_far(c, k) && from && bytes)
                memcpy(fsdpi_gloo_message(c, k, 2) + FSDPI_GLOO_HEAD + at, from, bytes);
        }
    return op->kind == FSDP_OP_BROADCAST && op->root != c->base.index ? 0 : walk.used;
}

static void fsdpi_gloo_copy(void *to, const void *from, size_t bytes) {
    if (to != from) fsdpi_shm_copy((char *)to, (const char *)from, bytes);
}

// Returns the data of strip s that this rank needs in local member k's buffer. Large reductions do
// not use it.
static const char *fsdpi_gloo_local_source(const fsdpi_gloo_comm *c, const fsdp_coll *op,
                                           const fsdpi_gloo_strip *s, int k) {
    size_t size = fsdp_dtype_size(op->dtype);
    switch (op->kind) {
    case FSDP_OP_ALL_GATHER:
        return c->of[k] + (op->in_place ? fsdpi_gloo_begin_of(s, k) : s->shard) * size;
    case FSDP_OP_BROADCAST: return c->of[k];
    default:
        return c->of[k] +
               (fsdpi_gloo_is_parted(c, op, s) ? fsdpi_gloo_begin_of(s, c->base.index) * size : 0);
    }
}

// Returns memory for the result of a small all_reduce, until the local members have read dst.
static char *fsdpi_gloo_aside(const fsdpi_gloo_comm *c) {
    return fsdpi_gloo_message(c, c->base.index, 2) + FSDPI_GLOO_HEAD;
}

// Finishes a small strip. Requires the data of every member.
static void fsdpi_gloo_unpack(const fsdpi_gloo_comm *c, const fsdp_coll *op,
                              const fsdpi_gloo_strip *s, size_t at) {
    const char *srcs[FSDPI_MAX_SRCS];
    size_t bytes, size = fsdp_dtype_size(op->dtype);
    char *dst = (char *)op->dst;
    for (int k = 0; k < c->base.size; k++)
        if (k != c->base.index)
            srcs[k] = c->at[k] >= 0 ? fsdpi_gloo_local_source(c, op, s, k)
                                    : fsdpi_gloo_message(c, k, c->turn) + FSDPI_GLOO_HEAD + at;
    srcs[c->base.index] = fsdpi_gloo_source(c, op, s, c->base.index, &bytes);
    if (op->kind == FSDP_OP_BROADCAST) {
        fsdpi_gloo_copy(dst, op->root == c->base.index ? dst : srcs[op->root], s->total * size);
    } else if (op->kind == FSDP_OP_REDUCE_SCATTER) {
        fsdpi_reduce(dst + s->shard * fsdp_dtype_size(op->out_dtype), (fsdp_dtype)op->out_dtype,
                     srcs, c->base.size, (fsdp_dtype)op->dtype, s->part, op->scale, op->accumulate,
                     op->redop);
    } else if (op->kind == FSDP_OP_ALL_REDUCE) {
        int is_parted = fsdpi_gloo_is_parted(c, op, s);
        if (is_parted) dst += fsdpi_gloo_begin_of(s, c->base.index) * size;
        else if (c->local) dst = fsdpi_gloo_aside(c);
        fsdpi_reduce(dst, (fsdp_dtype)op->dtype, srcs, c->base.size, (fsdp_dtype)op->dtype,
                     bytes / size, op->scale, 0, op->redop);
    } else {
        for (int k = 0; k < c->base.size; k++)
            fsdpi_gloo_copy(dst + fsdpi_gloo_begin_of(s, k) * size, srcs[k], bytes);
    }
}

static void fsdpi_gloo_unpack_all(const fsdpi_gloo_comm *c, const fsdp_coll *op) {
    fsdpi_gloo_walk walk = {0, 0, 0, 0};
    fsdpi_gloo_strip s;
    size_t at;
    while (fsdpi_gloo_next_small(c, op, &walk, &s, &at)) fsdpi_gloo_unpack(c, op, &s, at);
}

/* -------------------------------------------------------------------------------------------- */
// Large reductions. The scratch is a ring of `depth` pieces for each remote member. A piece is
// reduced once all members have sent it, while the next ones arrive.

// Returns the scratch of member k.
static char *fsdpi_gloo_scratch_of(const fsdpi_gloo_comm *c, int k) {
    return c->scratch + c->piece * c->depth * (size_t)(k - (k > c->base.index));
}

static fsdp_status fsdpi_gloo_make_scratch(fsdpi_gloo_comm *c) {
    size_t peers = (size_t)c->base.size - 1;
    if (c->scratch || peers == 0) return FSDP_OK;
    size_t each = FSDPI_GLOO_SCRATCH / peers;
    c->piece = each / 2 < FSDPI_GLOO_PIECE ? each / 2 / 64 * 64 : FSDPI_GLOO_PIECE;
    c->depth = each / c->piece;
    each = c->piece * c->depth;
    c->scratch = (char *)fsdpi_alloc_scratch(&c->base.boot->allocator, each * peers);
    int made = c->scratch != NULL;
    for (int k = 0; k < c->base.size && made; k++)
        made = !fsdpi_gloo_is_far(c, k) ||
               fsdp_gloo_buffer_create(c->context, fsdpi_gloo_scratch_of(c, k), each,
                                       &c->peers[k].scratch) == FSDP_GLOO_OK;
    if (made) return FSDP_OK;
    return fsdpi_comm_no_memory(&c->base, "a large reduction", each * peers);
}

static size_t fsdpi_gloo_piece(const fsdpi_gloo_comm *c, const fsdp_coll *op) { // elements
    return (c->piece ? c->piece : FSDPI_GLOO_PIECE) / fsdp_dtype_size(op->dtype);
}

// Returns the number of elements of member k's region in the piece that begins at `at`.
static size_t fsdpi_gloo_piece_of(const fsdpi_gloo_comm *c, const fsdp_coll *op,
                                  const fsdpi_gloo_strip *s, int k, size_t at) {
    size_t count = fsdpi_gloo_count_of(s, k), piece = fsdpi_gloo_piece(c, op);
    return at >= count ? 0 : count - at < piece ? count - at : piece;
}

static const char *fsdpi_gloo_reduced(const fsdp_coll *op) {
    return (const char *)(op->kind == FSDP_OP_REDUCE_SCATTER ? op->src : op->dst);
}

// Posts the receives for the next piece of this rank's region, from all remote members.
static fsdp_status fsdpi_gloo_expect_piece(fsdpi_gloo_comm *c, const fsdp_coll *op) {
    fsdpi_gloo_strip s;
    size_t at, place = c->ahead.pieces;
    fsdp_status status = FSDP_OK;
    if (!c->scratch || !fsdpi_gloo_next(c, op, &c->ahead, fsdpi_gloo_piece(c, op), &s, &at))
        return FSDP_OK;
    size_t bytes = fsdpi_gloo_piece_of(c, op, &s, c->base.index, at) * fsdp_dtype_size(op->dtype);
    for (int j = 1; j < c->base.size && !status && bytes; j++) {
        int k = (c->base.index + c->base.size - j) % c->base.size;
        if (!fsdpi_gloo_is_far(c, k)) continue;
        status = fsdpi_gloo_result(c, k,
                                   fsdp_gloo_recv(c->peers[k].scratch, k, fsdpi_gloo_slot(c, 0),
                                                  place % c->depth * c->piece, bytes));
    }
    return status;
}

// Sends all pieces, each one to every remote member before the next piece.
static fsdp_status fsdpi_gloo_send_pieces(fsdpi_gloo_comm *c, const fsdp_coll *op) {
    fsdpi_gloo_walk walk = {0, 0, 0, 0};
    fsdpi_gloo_strip s;
    size_t at, size = fsdp_dtype_size(op->dtype);
    fsdp_status status = FSDP_OK;
    while (!status && fsdpi_gloo_next(c, op, &walk, fsdpi_gloo_piece(c, op), &s, &at))
        for (int j = 1; j < c->base.size && !status; j++) {
            int k = (c->base.index + j) % c->base.size;
            if (!fsdpi_gloo_is_far(c, k)) continue;
            status = fsdpi_gloo_post(c, k, 1, fsdpi_gloo_reduced(op), 0,
                                     (fsdpi_gloo_begin_of(&s, k) + at) * size,
                                     fsdpi_gloo_piece_of(c, op, &s, k, at) * size);
        }
    return status;
}

// Reduces pieces as they arrive, and posts the receives for the next ones.
static fsdp_status fsdpi_gloo_reduce_pieces(fsdpi_gloo_comm *c, const fsdp_coll *op) {
    int is_list = op->kind == FSDP_OP_REDUCE_SCATTER, me = c->base.index;
    fsdp_dtype out = (fsdp_dtype)(is_list ? op->out_dtype : op->dtype);
    const char *srcs[FSDPI_MAX_SRCS];
    fsdpi_gloo_walk walk = {0, 0, 0, 0};
    fsdpi_gloo_strip s;
    size_t at, place = 0, size = fsdp_dtype_size(op->dtype);
    fsdp_status status = FSDP_OK;
    for (; !status && fsdpi_gloo_next(c, op, &walk, fsdpi_gloo_piece(c, op), &s, &at); place++) {
        size_t count = fsdpi_gloo_piece_of(c, op, &s, me, at);
        for (int k = 0; k < c->base.size && count && !status; k++) {
            srcs[k] = c->of[k] + (fsdpi_gloo_begin_of(&s, me) + at) * size;
            if (!fsdpi_gloo_is_far(c, k)) continue;
            srcs[k] = fsdpi_gloo_scratch_of(c, k) + place % c->depth * c->piece;
            status = fsdpi_gloo_wait(c, k, c->peers[k].scratch, 0, c->base.boot->timeout_ns);
        }
        if (count && !status)
            fsdpi_reduce((char *)op->dst + (s.shard + at) * fsdp_dtype_size(out), out, srcs,
                         c->base.size, (fsdp_dtype)op->dtype, count, op->scale,
                         is_list ? op->accumulate : 0, op->redop);
        if (!status) status = fsdpi_gloo_expect_piece(c, op);
    }
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Collectives. Data travel while the signatures are compared.

static int fsdpi_gloo_is_reduction(const fsdp_coll *op) {
    return op->kind == FSDP_OP_REDUCE_SCATTER || op->kind == FSDP_OP_ALL_REDUCE;
}

static fsdp_status fsdpi_gloo_start_reduction(fsdpi_gloo_comm *c, const fsdp_coll *op) {
    fsdpi_gloo_walk walk = {0, 0, 0, 0};
    fsdpi_gloo_strip s;
    size_t at;
    if (!fsdpi_gloo_next(c, op, &walk, SIZE_MAX, &s, &at)) return FSDP_OK;
    fsdp_status status = fsdpi_gloo_make_scratch(c);
    for (size_t i = 0; i < c->depth && !status; i++) status = fsdpi_gloo_expect_piece(c, op);
    return status ? status : fsdpi_gloo_send_pieces(c, op);
}

// Sends each remote member its region, if this rank is the root; otherwise receives its own region.
static fsdp_status fsdpi_gloo_deal(fsdpi_gloo_comm *c, const fsdp_coll *op,
                                   const fsdpi_gloo_strip *s) {
    size_t size = fsdp_dtype_size(op->dtype);
    int me = c->base.index, root = (int)op->root;
    fsdp_status status = FSDP_OK;
    if (fsdpi_gloo_has_all(c, op, me) && root != me) return FSDP_OK;
    if (root != me)
        return fsdpi_gloo_post(c, root, 0, op->dst, 0, fsdpi_gloo_begin_of(s, me) * size,
                               fsdpi_gloo_count_of(s, me) * size);
    for (int i = 1; i < c->base.size && !status; i++) {
        int k = (me + i) % c->base.size;
        if (!fsdpi_gloo_is_far(c, k)) continue;
        status = fsdpi_gloo_post(c, k, 1, op->dst, 0, fsdpi_gloo_begin_of(s, k) * size,
                                 fsdpi_gloo_count_of(s, k) * size);
    }
    return status;
}

// Posts the first messages of a large strip. They depend on no data of other ranks.
static fsdp_status fsdpi_gloo_start_strip(fsdpi_gloo_comm *c, const fsdp_coll *op,
                                          const fsdpi_gloo_strip *s) {
    size_t size = fsdp_dtype_size(op->dtype), mine = fsdpi_gloo_begin_of(s, c->base.index), bytes;
    int in_place = op->kind == FSDP_OP_ALL_GATHER && op->in_place;
    size_t src_at = in_place ? mine : s->shard; // which is 0 for all_to_all
    if (op->kind == FSDP_OP_BROADCAST) return fsdpi_gloo_deal(c, op, s);
    fsdp_status status = fsdpi_gloo_exchange(c, op, s, in_place ? op->dst : op->src, src_at,
                                             op->kind == FSDP_OP_ALL_TO_ALL ? s->part : 0, 0);
    const char *own = fsdpi_gloo_source(c, op, s, c->base.index, &bytes);
    fsdpi_gloo_copy((char *)op->dst + mine * size, own, bytes);
    return status;
}

static fsdp_status fsdpi_gloo_start(fsdpi_gloo_comm *c, const fsdp_coll *op) {
    fsdpi_gloo_walk walk = {0, 0, 0, 0};
    fsdpi_gloo_strip s;
    size_t at;
    fsdp_status status = FSDP_OK;
    c->ahead = walk;
    if (fsdpi_gloo_is_reduction(op)) return fsdpi_gloo_start_reduction(c, op);
    while (!status && fsdpi_gloo_next(c, op, &walk, SIZE_MAX, &s, &at))
        status = fsdpi_gloo_start_strip(c, op, &s);
    return status;
}

/* Exchanges signatures with member k for send and recv, in a separate slot, between turns. The
   signature of the last turn has been used, so this one takes its place. */
static fsdp_status fsdpi_gloo_show_pair(fsdpi_gloo_comm *c, int k) {
    int result = fsdp_gloo_recv(c->peers[k].in[c->turn], k, FSDPI_GLOO_SLOT_PAIR, 0,
                                sizeof c->base.now);
    fsdp_status status = fsdpi_gloo_result(c, k, result);
    return status ? status : fsdpi_gloo_show_one(c, k, FSDPI_GLOO_SLOT_PAIR, sizeof c->base.now);
}

// Shows the signature to the local members; their copy also names this rank's buffer.
static fsdp_status fsdpi_gloo_show_local(fsdpi_gloo_comm *c, const fsdp_coll *op,
                                         const fsdpi_span *span) {
    c->local->now = c->base.now;
    return fsdpi_gloo_local_result(c, fsdpi_shm_show(c->local, op, span));
}

/* Returns 1 if Gloo's thread moves the messages: there is much to reduce or to copy, or this rank
   also waits for something else (local members, or the opening of a group). */
static int fsdpi_gloo_overlaps(const fsdpi_gloo_comm *c, const fsdp_coll *op) {
    if (!op || c->local) return 1;
    int of_each = op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER ||
                  op->kind == FSDP_OP_ALL_TO_ALL;
    size_t bytes = (size_t)op->count * fsdp_dtype_size(op->dtype);
    return bytes > FSDPI_GLOO_SHORT / (of_each ? (size_t)c->base.size : 1);
}

static fsdp_status fsdpi_gloo_show(fsdpi_comm *base, const fsdp_coll *op, const fsdpi_span *span) {
    fsdpi_gloo_comm *c = fsdpi_gloo_of(base);
    fsdp_status status = FSDP_OK;
    if (fsdpi_gloo_is_local(c)) return fsdpi_gloo_show_local(c, op, span);
    if (fsdpi_gloo_is_near_pair(c, op)) {
        fsdp_coll call = fsdpi_gloo_local_call(c, op);
        return fsdpi_gloo_show_local(c, &call, span);
    }
    c->overlaps = c->context && fsdpi_gloo_overlaps(c, op);
    if (c->overlaps) fsdp_gloo_context_overlap(c->context, 1);
    if (op && fsdpi_is_pair(op->kind)) return fsdpi_gloo_show_pair(c, (int)op->root);
    if (c->local) status = fsdpi_gloo_show_local(c, op, span);
    if (!status) status = fsdpi_gloo_show_all(c, op ? fsdpi_gloo_pack(c, op) : 0);
    return status || !op ? status : fsdpi_gloo_start(c, op);
}

// Finds the buffers that the local members have shown. Requires that all ranks agree.
static fsdp_status fsdpi_gloo_find_local(fsdpi_gloo_comm *c, const fsdpi_span *span) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < c->base.size && !status; k++) {
        c->of[k] = (const char *)span->shared;
        if (c->at[k] >= 0 && k != c->base.index && span->chunk.base)
            status = fsdpi_gloo_local_result(
                c, fsdpi_shm_find(fsdpi_shm_comm_of(c->local), &span->chunk, c->at[k], &c->of[k]));
    }
    return status;
}

// Copies the local members' regions of a large strip.
static void fsdpi_gloo_collect(const fsdpi_gloo_comm *c, const fsdp_coll *op,
                               const fsdpi_gloo_strip *s) {
    int is_own = op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_ALL_TO_ALL;
    size_t size = fsdp_dtype_size(op->dtype);
    for (int i = 1; i < c->base.size; i++) {
        int k = (c->base.index + i) % c->base.size;
        size_t begin = fsdpi_gloo_begin_of(s, k) * size;
        if (c->at[k] >= 0)
            fsdpi_gloo_copy((char *)op->dst + begin,
                            is_own ? fsdpi_gloo_local_source(c, op, s, k) : c->of[k] + begin,
                            fsdpi_gloo_count_of(s, k) * size);
    }
}

// Runs the second round of an all_reduce or broadcast: each member has its region of a large strip,
// or all of it if the root is local, and the members exchange the regions.
static fsdp_status fsdpi_gloo_spread(fsdpi_gloo_comm *c, const fsdp_coll *op,
                                     const fsdpi_gloo_strip *s) {
    fsdp_status status = fsdpi_gloo_finish(c, FSDP_OK);
    if (!status) status = fsdpi_gloo_local_barrier(c);
    if (status) return status;
    int has_all = fsdpi_gloo_has_all(c, op, c->base.index);
    if (has_all && op->root != c->base.index)
        fsdpi_gloo_copy(op->dst, c->of[op->root], s->total * fsdp_dtype_size(op->dtype));
    // A root that fails may overwrite its buffer: nobody forwards a copy before all have one.
    if (has_all) status = fsdpi_gloo_local_barrier(c);
    if (status) return status;
    status = fsdpi_gloo_exchange(c, op, s, op->dst, fsdpi_gloo_begin_of(s, c->base.index), 0, 1);
    if (!status && !has_all) fsdpi_gloo_collect(c, op, s);
    return status;
}

// Reduces data as they arrive, and forwards the results. Requires that all ranks agree, and that
// local members' buffers can be read.
static fsdp_status fsdpi_gloo_complete(fsdpi_gloo_comm *c, const fsdp_coll *op) {
    fsdpi_gloo_walk walk = {0, 0, 0, 0};
    fsdpi_gloo_strip s;
    size_t at;
    fsdp_status status = FSDP_OK;
    fsdpi_gloo_unpack_all(c, op);
    if (fsdpi_gloo_is_reduction(op)) status = fsdpi_gloo_reduce_pieces(c, op);
    int is_sum = op->kind == FSDP_OP_ALL_REDUCE, is_parted = 1;
    if (is_sum) {
        s = fsdpi_gloo_strip_of(c, op, 0);
        is_parted = fsdpi_gloo_is_parted(c, op, &s);
        if (is_parted && !status) status = fsdpi_gloo_spread(c, op, &s);
    }
    while (!status && !fsdpi_gloo_is_reduction(op) &&
           fsdpi_gloo_next(c, op, &walk, SIZE_MAX, &s, &at)) {
        if (op->kind == FSDP_OP_BROADCAST) status = fsdpi_gloo_spread(c, op, &s);
        else fsdpi_gloo_collect(c, op, &s);
    }
    // After the barrier the buffer may be overwritten: local members have read it.
    if (!status) status = fsdpi_gloo_local_barrier(c);
    if (!status && c->local && is_sum && !is_parted)
        fsdpi_gloo_copy(op->dst, fsdpi_gloo_aside(c),
                        (size_t)op->count * fsdp_dtype_size(op->dtype));
    return status;
}

static fsdp_status fsdpi_gloo_move(fsdpi_comm *base, const fsdp_coll *op, const fsdpi_span *span) {
    fsdpi_gloo_comm *c = fsdpi_gloo_of(base);
    if (fsdpi_gloo_is_local(c))
        return fsdpi_gloo_local_result(c, fsdpi_shm_move(c->local, op, span));
    if (fsdpi_gloo_is_near_pair(c, op)) {
        fsdp_coll call = fsdpi_gloo_local_call(c, op);
        return fsdpi_gloo_local_result(c, fsdpi_shm_move(c->local, &call, span));
    }
    if (!fsdpi_is_pair(op->kind)) {
        fsdp_status status = fsdpi_gloo_find_local(c, span);
        return status ? status : fsdpi_gloo_complete(c, op);
    }
    int is_send = op->kind == FSDP_OP_SEND;
    return fsdpi_gloo_post(c, (int)op->root, is_send, is_send ? op->src : op->dst, 2, 0,
                           (size_t)op->count * fsdp_dtype_size(op->dtype));
}

// Waits until this rank's messages are sent, and all data have arrived. Returns the first failure.
static fsdp_status fsdpi_gloo_settle(fsdpi_comm *base, fsdp_status status) {
    fsdpi_gloo_comm *c = fsdpi_gloo_of(base);
    for (int k = 0; k < base->size && !status; k++) {
        if (c->peers[k].showing)
            status = fsdpi_gloo_wait(c, k, c->peers[k].out, 1, base->boot->timeout_ns);
        c->peers[k].showing = 0;
    }
    status = fsdpi_gloo_finish(c, status);
    if (c->overlaps) fsdp_gloo_context_overlap(c->context, 0);
    c->overlaps = 0;
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// How members connect to each other, before Gloo gets the connections. Invariant: until a caller
// has proven that it is a member of this comm, it costs one of FSDPI_GLOO_CALLERS places, and no
// more.

/* While a comm opens, each member listens, and publishes its endpoint in the store: the address,
   and a secret ticket. A member calls the members before it. Both prove that they know the job's
   token, with four messages:
   - HELLO, from the caller: ticket[16], i32 caller, nonce[32]
   - PROOF, from the listener: nonce[32], HMAC-SHA256(token, "L", comm, listener, HELLO, nonce)
   - ANSWER, from the caller: HMAC-SHA256(token, "C", comm, listener, HELLO, nonce)
   - WELCOME, from the listener: one byte
   Until WELCOME either side may hang up, and the caller calls again. */
typedef struct fsdpi_gloo_endpoint {
    uint8_t ticket[16];
    fsdpi_store_place place;
} fsdpi_gloo_endpoint;

enum { FSDPI_GLOO_HELLO = 16 + 4 + 32, FSDPI_GLOO_PROOF = 32 + 32, FSDPI_GLOO_ANSWER = 32 };
enum {
    FSDPI_GLOO_CALLS,
    FSDPI_GLOO_WANTS_HELLO,
    FSDPI_GLOO_WANTS_PROOF,
    FSDPI_GLOO_WANTS_ANSWER,
    FSDPI_GLOO_WANTS_WELCOME
};

typedef struct fsdpi_gloo_link {
    int fd, step;     // fd -1: none
    int member;       // member at the other end; -1: not known yet
    int at;           // index in `polls`; -1: not polled
    int64_t since_ns; // time of the connection or HELLO; after a failed call: time to call again
    size_t used;      // bytes of `in`
    uint8_t hello[FSDPI_GLOO_HELLO], nonce[32], in[FSDPI_GLOO_PROOF];
} fsdpi_gloo_link;

typedef struct fsdpi_gloo_connector {
    fsdpi_gloo_comm *c;
    int listener, num_links, missing; // members that are not connected yet
    int64_t deadline;
    fsdpi_gloo_endpoint *doors; // endpoints of the called members, and of this one
    fsdpi_gloo_link *links;     // one for each member that is called; then those that have called
    struct pollfd *polls;
    int fds[FSDPI_MAX_SRCS]; // members' connections; -1: none yet
} fsdpi_gloo_connector;

// Returns 1 if the connection to member k is still missing.
static int fsdpi_gloo_lacks(const fsdpi_gloo_connector *g, int k) {
    return fsdpi_gloo_is_far(g->c, k) && g->fds[k] < 0;
}

static int64_t fsdpi_gloo_now(const fsdpi_gloo_connector *g) {
    return fsdpi_boot_now(g->c->base.boot);
}

// Computes the proof that a side knows the job's token. side: 'L' (listener) or 'C' (caller).
static void fsdpi_gloo_prove(const fsdpi_gloo_connector *g, const fsdpi_gloo_link *l, char side,
                             int to, uint8_t out[32]) {
    uint8_t token[32];
    char text[1 + 8 + 4 + FSDPI_GLOO_HELLO + 32], *at = text;
    *at++ = side;
    at = fsdpi_le_put(at, g->c->base.id, 8);
    at = fsdpi_le_put(at, (uint32_t)to, 4);
    memcpy(at, l->hello, sizeof l->hello);
    memcpy(at + sizeof l->hello, l->nonce, sizeof l->nonce);
    fsdpi_store_token(fsdpi_gloo_store(g->c)->desc.boot.job, token);
    fsdpi_hmac_sha256(token, sizeof token, text, sizeof text, out);
}

// Returns 0 if the bytes are equal. Its time does not depend on the position of a difference.
static int fsdpi_gloo_differ(const uint8_t *a, const uint8_t *b, size_t bytes) {
    int differ = 0;
    for (size_t i = 0; i < bytes; i++) differ |= a[i] ^ b[i];
    return differ;
}

static void fsdpi_gloo_drop(const fsdpi_gloo_connector *g, fsdpi_gloo_link *l) {
    if (l->fd >= 0) (void)close(l->fd);
    l->fd = -1;
    l->since_ns = fsdpi_gloo_now(g) + FSDPI_GLOO_AGAIN_NS;
}

// Sends a message of the handshake. Returns 1 if all bytes were sent, which few bytes into an empty
// socket buffer always are.
static int fsdpi_gloo_say(fsdpi_gloo_link *l, int next, const void *data, size_t bytes) {
    l->step = next;
    l->used = 0;
    return send(l->fd, data, bytes, MSG_NOSIGNAL) == (ssize_t)bytes;
}

static int fsdpi_gloo_admit(fsdpi_gloo_connector *g, fsdpi_gloo_link *l) {
    g->fds[l->member] = l->fd;
    l->fd = -1;
    g->missing--;
    return 1;
}

// Answers HELLO with PROOF. Returns 0 if the caller is no missing member with the right ticket.
static int fsdpi_gloo_greet(fsdpi_gloo_connector *g, fsdpi_gloo_link *l) {
    int me = g->c->base.index;
    uint8_t proof[FSDPI_GLOO_PROOF];
    memcpy(l->hello, l->in, sizeof l->hello);
    l->member = fsdpi_le_i32((const char *)l->in + 16);
    if (fsdpi_gloo_differ(l->in, g->doors[me].ticket, 16) || l->member <= me ||
        l->member >= g->c->base.size || !fsdpi_gloo_lacks(g, l->member) ||
        !fsdpi_random(l->nonce, sizeof l->nonce)) {
        l->member = -1;
        return 0;
    }
    l->since_ns = fsdpi_gloo_now(g);
    memcpy(proof, l->nonce, 32);
    fsdpi_gloo_prove(g, l, 'L', me, proof + 32);
    return fsdpi_gloo_say(l, FSDPI_GLOO_WANTS_ANSWER, proof, sizeof proof);
}

// Handles the message for which the link has waited. Returns 0 if it is wrong.
static int fsdpi_gloo_take(fsdpi_gloo_connector *g, fsdpi_gloo_link *l) {
    int me = g->c->base.index;
    uint8_t expected[32], answer[32];
    if (l->step == FSDPI_GLOO_WANTS_HELLO) return fsdpi_gloo_greet(g, l);
    if (l->step == FSDPI_GLOO_WANTS_WELCOME) return fsdpi_gloo_admit(g, l);
    if (l->step == FSDPI_GLOO_WANTS_PROOF) {
        memcpy(l->nonce, l->in, 32);
        fsdpi_gloo_prove(g, l, 'L', l->member, expected);
        fsdpi_gloo_prove(g, l, 'C', l->member, answer);
        return !fsdpi_gloo_differ(l->in + 32, expected, 32) &&
               fsdpi_gloo_say(l, FSDPI_GLOO_WANTS_WELCOME, answer, sizeof answer);
    }
    fsdpi_gloo_prove(g, l, 'C', me, expected);
    return !fsdpi_gloo_differ(l->in, expected, 32) && g->fds[l->member] < 0 &&
           fsdpi_gloo_say(l, FSDPI_GLOO_WANTS_ANSWER, "", 1) && fsdpi_gloo_admit(g, l);
}

static size_t fsdpi_gloo_wants(const fsdpi_gloo_link *l) {
    return l->step == FSDPI_GLOO_WANTS_HELLO    ? FSDPI_GLOO_HELLO
           : l->step == FSDPI_GLOO_WANTS_PROOF  ? FSDPI_GLOO_PROOF
           : l->step == FSDPI_GLOO_WANTS_ANSWER ? FSDPI_GLOO_ANSWER
                                                : 1;
}

// Reads the bytes that have arrived, but none after WELCOME. Returns 0 if the link must be closed.
static int fsdpi_gloo_listen(fsdpi_gloo_connector *g, fsdpi_gloo_link *l) {
    while (l->fd >= 0) {
        ssize_t got = recv(l->fd, l->in + l->used, fsdpi_gloo_wants(l) - l->used, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return 1;
        if (got <= 0) return 0;
        l->used += (size_t)got;
        if (l->used == fsdpi_gloo_wants(l) && !fsdpi_gloo_take(g, l)) return 0;
    }
    return 1;
}

/* Closes the oldest unproven connection of a caller. of_all: also one that has shown the ticket.
   Returns 0 if there is none. */
static int fsdpi_gloo_evict(fsdpi_gloo_connector *g, int of_all) {
    fsdpi_gloo_link *oldest = NULL;
    for (int i = g->c->base.index; i < g->num_links; i++) {
        fsdpi_gloo_link *l = &g->links[i];
        if (l->fd >= 0 && (of_all || l->member < 0) && (!oldest || l->since_ns < oldest->since_ns))
            oldest = l;
    }
    if (oldest) fsdpi_gloo_drop(g, oldest);
    return oldest != NULL;
}

// Returns a free link for a caller. If there is none, it closes the oldest unproven one; NULL: all
// are proven.
static fsdpi_gloo_link *fsdpi_gloo_seat(fsdpi_gloo_connector *g) {
    for (int turn = 0; turn < 2; turn++) {
        for (int i = g->c->base.index; i < g->num_links; i++)
            if (g->links[i].fd < 0) return &g->links[i];
        if (!fsdpi_gloo_evict(g, 1)) break;
    }
    return NULL;
}

// Returns 1 if a caller waits. accept4 reports EMFILE even without a caller.
static int fsdpi_gloo_is_called(const fsdpi_gloo_connector *g) {
    struct pollfd p = {g->listener, POLLIN, 0};
    return poll(&p, 1, 0) > 0;
}

// Accepts a limited number of callers at a time: members must not wait for untrusted peers.
static fsdp_status fsdpi_gloo_accept(fsdpi_gloo_connector *g) {
    for (int i = 0; i < FSDPI_GLOO_CALLERS; i++) {
        int fd = fsdpi_accept(g->listener);
        int is_full = fd < 0 && (errno == EMFILE || errno == ENFILE);
        if (fd < 0 && (errno == EAGAIN || (is_full && !fsdpi_gloo_is_called(g)))) return FSDP_OK;
        if (is_full && !fsdpi_gloo_evict(g, 0)) return fsdpi_gloo_no_descriptor(g->c);
        fsdpi_gloo_link *l = fd < 0 ? NULL : fsdpi_gloo_seat(g);
        if (fd >= 0 && !l) (void)close(fd);
        if (!l) continue;
        fsdpi_store_prompt(fd);
        l->fd = fd;
        l->member = -1;
        l->since_ns = fsdpi_gloo_now(g);
        l->step = FSDPI_GLOO_WANTS_HELLO;
        l->used = 0;
        if (!fsdpi_gloo_listen(g, l)) fsdpi_gloo_drop(g, l);
    }
    return FSDP_OK;
}

// Sends HELLO on a new connection to a member. Returns 0 if the connection failed.
static int fsdpi_gloo_introduce(fsdpi_gloo_connector *g, fsdpi_gloo_link *l) {
    int why = 0;
    socklen_t size = sizeof why;
    if (getsockopt(l->fd, SOL_SOCKET, SO_ERROR, &why, &size) || why) return 0;
    memcpy(l->hello, g->doors[l->member].ticket, 16);
    (void)fsdpi_le_put((char *)l->hello + 16, (uint32_t)g->c->base.index, 4);
    return fsdpi_random(l->hello + 20, 32) &&
           fsdpi_gloo_say(l, FSDPI_GLOO_WANTS_PROOF, l->hello, sizeof l->hello);
}

static fsdp_status fsdpi_gloo_call(fsdpi_gloo_connector *g, fsdpi_gloo_link *l) {
    const fsdpi_store_place *place = &g->doors[l->member].place;
    l->fd = fsdpi_store_socket(place);
    if (l->fd < 0 && (errno == EMFILE || errno == ENFILE) && !fsdpi_gloo_evict(g, 0))
        return fsdpi_gloo_no_descriptor(g->c);
    l->step = FSDPI_GLOO_CALLS;
    if (l->fd >= 0) fsdpi_store_prompt(l->fd);
    if (l->fd < 0 || (connect(l->fd, &place->at.any, place->size) && errno != EINPROGRESS))
        fsdpi_gloo_drop(g, l);
    return FSDP_OK;
}

// Lists the sockets to poll; the listener is the last one. It lists only open ones: poll refuses
// more sockets than the process may open.
static int fsdpi_gloo_list(fsdpi_gloo_connector *g) {
    int count = 0;
    for (int i = 0; i < g->num_links; i++) {
        struct pollfd p = {g->links[i].fd, POLLIN, 0};
        if (g->links[i].step == FSDPI_GLOO_CALLS) p.events = POLLOUT;
        g->links[i].at = p.fd < 0 ? -1 : count;
        if (p.fd >= 0) g->polls[count++] = p;
    }
    struct pollfd last = {g->listener, POLLIN, 0};
    g->polls[count] = last;
    return count;
}

// Repeats calls that are due, then polls all connections once, for at most 10 ms.
static fsdp_status fsdpi_gloo_turn(fsdpi_gloo_connector *g) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < g->c->base.index && !status; k++)
        if (fsdpi_gloo_lacks(g, k) && g->links[k].fd < 0 &&
            fsdpi_gloo_now(g) >= g->links[k].since_ns)
            status = fsdpi_gloo_call(g, &g->links[k]);
    if (status) return status;
    int count = fsdpi_gloo_list(g);
    if (poll(g->polls, (nfds_t)count + 1, 10) <= 0) return FSDP_OK;
    for (int i = 0; i < g->num_links; i++) {
        fsdpi_gloo_link *l = &g->links[i];
        if (l->at < 0 || !g->polls[l->at].revents) continue;
        if (!(l->step == FSDPI_GLOO_CALLS ? fsdpi_gloo_introduce(g, l) : fsdpi_gloo_listen(g, l)))
            fsdpi_gloo_drop(g, l);
    }
    return g->polls[count].revents ? fsdpi_gloo_accept(g) : FSDP_OK;
}

static void fsdpi_gloo_key(char *key, size_t cap, const fsdpi_gloo_comm *c, int k) {
    (void)snprintf(key, cap, "gloo/%016llx/%d", (unsigned long long)c->base.id, k);
}

// Listens on the address at which peers reach this host.
static fsdp_status fsdpi_gloo_open_door(fsdpi_gloo_connector *g) {
    fsdpi_gloo_endpoint *own = &g->doors[g->c->base.index];
    const char *address = fsdpi_store_address(fsdpi_gloo_store(g->c));
    char said[FSDPI_REASON];
    fsdpi_text t = {said, sizeof said, 0};
    errno = EADDRNOTAVAIL;
    if (fsdpi_store_lookup(&g->c->base.boot->clock, address, g->deadline, &own->place, 1, &t) &&
        fsdpi_random(own->ticket, sizeof own->ticket)) {
        fsdpi_store_set_port(&own->place, 0);
        g->listener = fsdpi_store_listen(&own->place);
    }
    if (g->listener >= 0) return FSDP_OK;
    if (errno == EMFILE || errno == ENFILE) return fsdpi_gloo_no_descriptor(g->c);
    return fsdpi_comm_fail(&g->c->base, FSDP_ERR_BACKEND,
                           "[E760] this rank cannot listen on address %s (%s): set "
                           "FSDP_SOCKET_IFNAME to the interface to use",
                           address, strerror(errno));
}

// Publishes this rank's endpoint, and reads those of the remote members before it.
static fsdp_status fsdpi_gloo_find_doors(fsdpi_gloo_connector *g) {
    fsdpi_gloo_comm *c = g->c;
    fsdpi_store *store = fsdpi_gloo_store(c);
    size_t bytes;
    char key[64];
    fsdpi_gloo_key(key, sizeof key, c, c->base.index);
    fsdp_status status = fsdpi_store_set(store, key, &g->doors[c->base.index],
                                         sizeof(fsdpi_gloo_endpoint));
    for (int k = 0; k < c->base.index && !status; k++) {
        int64_t left = g->deadline - fsdpi_gloo_now(g);
        if (!fsdpi_gloo_is_far(c, k)) continue;
        fsdpi_gloo_key(key, sizeof key, c, k);
        status = fsdpi_store_get(store, key, &g->doors[k], sizeof(fsdpi_gloo_endpoint), &bytes,
                                 left > 0 ? left : 1);
        if (status == FSDP_ERR_TIMEOUT) return fsdpi_gloo_late(c, k);
        if (!status && bytes != sizeof(fsdpi_gloo_endpoint)) status = FSDP_ERR_INTERNAL;
    }
    if (fsdpi_gloo_failed(c)) return fsdpi_comm_report(&c->base);
    if (!status) return FSDP_OK;
    return fsdpi_comm_fail(
        &c->base, status,
        "[E758] this rank could not exchange addresses through the store of %s: %s",
        fsdpi_store_who(store), fsdp_status_name(status));
}

// Runs until all members are connected.
static fsdp_status fsdpi_gloo_gather(fsdpi_gloo_connector *g) {
    fsdpi_gloo_comm *c = g->c;
    fsdp_status status = FSDP_OK;
    while (g->missing > 0 && !status) {
        if (fsdpi_gloo_failed(c)) return fsdpi_comm_report(&c->base);
        int k = 0; // the first one that is missing
        while (!fsdpi_gloo_lacks(g, k)) k++;
        fsdpi_trace_wait(FSDPI_LOAD(&c->base.world->trace), (int)c->base.ranks[k]);
        if (fsdpi_gloo_now(g) >= g->deadline) return fsdpi_gloo_late(c, k);
        status = fsdpi_gloo_turn(g);
    }
    return status;
}

// Hands the connections over to Gloo.
static fsdp_status fsdpi_gloo_hand_over(fsdpi_gloo_connector *g) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < g->c->base.size && !status; k++) {
        if (!fsdpi_gloo_is_far(g->c, k)) continue;
        int result = fsdp_gloo_context_connect(g->c->context, k, g->fds[k]);
        g->fds[k] = -1;
        status = fsdpi_gloo_result(g->c, k, result);
    }
    return status;
}

static void fsdpi_gloo_close_gate(fsdpi_gloo_connector *g) {
    const fsdp_allocator *a = &g->c->base.boot->allocator;
    if (g->listener >= 0) (void)close(g->listener);
    for (int i = 0; i < g->num_links && g->links; i++)
        if (g->links[i].fd >= 0) (void)close(g->links[i].fd);
    for (int k = 0; k < g->c->base.size; k++)
        if (g->fds[k] >= 0) (void)close(g->fds[k]);
    fsdpi_free(a, g->doors);
    fsdpi_free(a, g->links);
    fsdpi_free(a, g->polls);
}

static fsdp_status fsdpi_gloo_open_gate(fsdpi_gloo_connector *g, fsdpi_gloo_comm *c) {
    const fsdp_allocator *a = &c->base.boot->allocator;
    size_t links = (size_t)c->base.size + FSDPI_GLOO_CALLERS;
    memset(g, 0, sizeof *g);
    memset(g->fds, 0xFF, sizeof g->fds);
    g->c = c;
    g->listener = -1;
    for (int k = 0; k < c->base.size; k++) g->missing += fsdpi_gloo_is_far(c, k);
    g->deadline = c->base.now.since_ns + c->base.boot->timeout_ns;
    g->num_links = (int)links;
    g->doors = (fsdpi_gloo_endpoint *)fsdpi_alloc(a, (size_t)c->base.size * sizeof *g->doors);
    g->links = (fsdpi_gloo_link *)fsdpi_alloc(a, links * sizeof *g->links);
    g->polls = (struct pollfd *)fsdpi_alloc(a, (links + 1) * sizeof *g->polls);
    for (int i = 0; g->links && i < g->num_links; i++) {
        g->links[i].fd = -1;
        g->links[i].member = i < c->base.index ? i : -1;
    }
    if (!g->doors || !g->links || !g->polls)
        return fsdpi_comm_no_memory(&c->base, "connections", links * sizeof *g->links);
    return fsdpi_gloo_open_door(g);
}

// Connects all members with each other, and hands the connections over.
static fsdp_status fsdpi_gloo_connect_all(fsdpi_gloo_comm *c) {
    fsdpi_gloo_connector gate;
    fsdp_status status = fsdpi_gloo_open_gate(&gate, c);
    if (!status) status = fsdpi_gloo_find_doors(&gate);
    if (!status) status = fsdpi_gloo_gather(&gate);
    if (!status) status = fsdpi_gloo_hand_over(&gate);
    fsdpi_gloo_close_gate(&gate);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Opening of a comm, groups, memory, and closing.

static fsdp_status fsdpi_gloo_make_messages(fsdpi_gloo_comm *c) {
    size_t members = (size_t)c->base.size, each = FSDPI_GLOO_MESSAGES / 3 / members / 64 * 64;
    each = each > FSDPI_GLOO_SMALL ? FSDPI_GLOO_SMALL : each < 2048 ? 2048 : each;
    c->small_bytes = each;
    each += FSDPI_GLOO_HEAD;
    c->messages = (char *)fsdpi_alloc(&c->base.boot->allocator, 3 * members * each);
    if (!c->messages) return fsdpi_comm_no_memory(&c->base, "messages", 3 * members * each);
    c->base.step = 3 * each; // see fsdpi_gloo_message
    for (int k = 0; k < c->base.size; k++) {
        fsdpi_gloo_peer *peer = &c->peers[k];
        fsdp_gloo_buffer **buffers[3] = {&peer->in[0], &peer->in[1], &peer->out};
        for (int i = 0; i < 3 && fsdpi_gloo_is_far(c, k); i++)
            if (fsdp_gloo_buffer_create(c->context, fsdpi_gloo_message(c, k, i), each, buffers[i]))
                return fsdpi_comm_fail(&c->base, FSDP_ERR_OUT_OF_MEMORY,
                                       "[E757] Gloo has no memory for messages of %llu bytes: %s",
                                       (unsigned long long)each, fsdp_gloo_error());
    }
    return fsdpi_gloo_expect(c, 1); // the first turn
}

// Exchanges the first message with all members. Only then deletes this member's endpoint from the
// store: other members may have to read it until then.
static fsdp_status fsdpi_gloo_first_meeting(fsdpi_gloo_comm *c) {
    char key[64];
    c->base.now.key = FSDPI_OPEN;
    fsdp_status status = fsdpi_comm_meet(&c->base, NULL, NULL);
    if (!status) status = fsdpi_gloo_local_barrier(c);
    if (!status) status = fsdpi_gloo_settle(&c->base, FSDP_OK);
    fsdpi_gloo_key(key, sizeof key, c, c->base.index);
    if (!status) (void)fsdpi_store_delete(fsdpi_gloo_store(c), key); // if it fails: no harm
    return status;
}

// Connects the members of a comm.
static fsdp_status fsdpi_gloo_connect_members(fsdpi_gloo_comm *c) {
    fsdpi_gloo_world *w = fsdpi_gloo_world_of(c);
    for (int k = 0, local = 0; k < c->base.size; k++) {
        int is_near = fsdpi_local_is(&w->hosts, (int)c->base.ranks[k], c->base.boot->rank);
        c->at[k] = is_near && c->local ? local++ : -1;
    }
    fsdpi_lock(&w->lock);
    c->next = w->comms;
    w->comms = c;
    fsdpi_unlock(&w->lock);
    if (fsdpi_gloo_is_local(c)) c->base.shown = c->local->shown, c->base.step = c->local->step;
    if (c->base.size == 1 || fsdpi_gloo_is_local(c)) return FSDP_OK;
    if (fsdp_gloo_context_create(w->device, c->base.index, c->base.size, &c->context))
        return fsdpi_comm_fail(&c->base, FSDP_ERR_BACKEND,
                               "[E759] Gloo cannot make a process group: %s", fsdp_gloo_error());
    c->base.now.since_ns = c->base.is_world ? c->base.world->open_ns : fsdpi_boot_now(c->base.boot);
    fsdp_status status = fsdpi_gloo_connect_all(c);
    if (!status) status = fsdpi_gloo_make_messages(c);
    return status ? status : fsdpi_gloo_first_meeting(c);
}

/* Runs the close handshake: sends a close message, and waits for those of the other members, which
   shows that the last messages have arrived. The wait is short, as a member may work for longer or
   keep the group open. */
static void fsdpi_gloo_close_handshake(fsdpi_gloo_comm *c) {
    fsdpi_gloo_world *w = fsdpi_gloo_world_of(c);
    const fsdp_boot *boot = c->base.boot;
    int64_t start = fsdpi_boot_now(boot), own = FSDPI_GLOO_CLOSE_NS;
    int64_t *left_ns = c->base.is_world ? &own : &w->close_ns;
    fsdpi_describe(&c->base, NULL, "");
    c->base.now.kind = FSDPI_CLOSE;
    c->turn ^= 1;
    for (int k = 0; k < c->base.size; k++) {
        if (!fsdpi_gloo_is_far(c, k)) continue;
        memcpy(fsdpi_gloo_message(c, k, 2), &c->base.now, sizeof c->base.now);
        (void)fsdp_gloo_send(c->peers[k].out, k, FSDPI_GLOO_SLOT_RECORD, 0, FSDPI_GLOO_HEAD);
    }
    for (int k = 0; k < c->base.size; k++) {
        int64_t left = *left_ns - (fsdpi_boot_now(boot) - start);
        if (fsdpi_gloo_is_far(c, k) && left > 0)
            (void)fsdpi_gloo_await_abortable(c, c->peers[k].in[c->turn], 0, left / 1000000 + 1);
    }
    if (fsdpi_boot_now(boot) - start >= *left_ns) *left_ns = 0;
    for (int k = 0; k < c->base.size; k++) // queued messages would be lost with the context
        if (fsdpi_gloo_is_far(c, k)) (void)fsdpi_gloo_await(c->peers[k].out, 1, FSDPI_GLOO_GRACE);
}

static void fsdpi_gloo_leave(fsdpi_comm *base) {
    fsdpi_gloo_comm *c = fsdpi_gloo_of(base);
    fsdpi_gloo_world *w = fsdpi_gloo_world_of(c);
    if (c->messages && !c->closed && !fsdpi_gloo_failed(c)) fsdpi_gloo_close_handshake(c);
    fsdpi_lock(&w->lock);
    fsdpi_gloo_comm **link = &w->comms;
    while (*link && *link != c) link = &(*link)->next;
    if (*link) *link = c->next;
    fsdpi_unlock(&w->lock);
    if (c->overlaps) fsdp_gloo_context_overlap(c->context, 0); // the first meeting has failed
    if (c->context) fsdp_gloo_context_destroy(c->context);     // before its buffers
    for (int k = 0; k < c->base.size; k++) {
        fsdp_gloo_buffer_destroy(c->peers[k].in[0]);
        fsdp_gloo_buffer_destroy(c->peers[k].in[1]);
        fsdp_gloo_buffer_destroy(c->peers[k].out);
        fsdp_gloo_buffer_destroy(c->peers[k].scratch);
    }
    fsdpi_free(&base->boot->allocator, c->messages);
    fsdpi_free(&base->boot->allocator, c->scratch);
    if (c->local && base->is_world) fsdpi_shm_leave(c->local); // its memory is still in use
    else fsdpi_comm_close((fsdp_comm *)(void *)c->local);
}

static int fsdpi_gloo_close(fsdpi_comm_world *base) {
    fsdpi_gloo_world *w = (fsdpi_gloo_world *)(void *)base;
    fsdpi_store_close(w->base.store);
    if (w->device) fsdp_gloo_device_destroy(w->device);
    fsdpi_comm_close((fsdp_comm *)(void *)w->local); // the store's thread no longer reads its trace
    return 1;
}

static fsdp_status fsdpi_gloo_connect(fsdpi_comm *parent, fsdpi_comm *child, const fsdp_group *g) {
    fsdpi_gloo_comm *p = fsdpi_gloo_of(parent), *c = fsdpi_gloo_of(child);
    fsdpi_comm *local = NULL;
    fsdp_status status = FSDP_OK;
    if (p->local) status = fsdpi_gloo_local_barrier(p); // all have compared the signatures there
    if (p->local && !status)
        status = fsdpi_local_split(parent, p->local, &fsdpi_gloo_world_of(p)->hosts, child, g,
                                   &local);
    if (child) c->local = local;
    return child && !status ? fsdpi_gloo_connect_members(c) : status;
}

// Opens the world of this host's ranks. This rank's activity then lies in its shared memory, where
// the store's thread reads it, too.
static fsdp_status fsdpi_gloo_connect_local(fsdpi_gloo_comm *c) {
    fsdpi_gloo_world *w = fsdpi_gloo_world_of(c);
    fsdp_status status = fsdpi_local_find(&c->base, &w->hosts);
    if (!status && w->hosts.comm_threads) {
        w->base.base.caps.default_comm_threads = w->hosts.comm_threads;
        w->base.base.caps.mode_reason = w->hosts.comm_threads == 1
                                        ? "as ranks are on several hosts"
                                        : "as ranks are on several hosts, with two cores for each";
    }
    if (!status) status = fsdpi_local_open(&c->base, &w->hosts, &w->local);
    c->local = w->local;
    if (status || !w->local) return status;
    fsdpi_activity_begin(w->local->world->trace, &c->base.now);
    FSDPI_STORE(&w->base.base.trace, w->local->world->trace);
    return FSDP_OK;
}

static fsdp_status fsdpi_gloo_connect_world(fsdpi_gloo_comm *c) {
    fsdpi_gloo_world *w = fsdpi_gloo_world_of(c);
    fsdp_status status = fsdpi_store_world_open(&c->base, fsdpi_gloo_beat, fsdpi_gloo_wake);
    if (!status) status = fsdpi_gloo_connect_local(c);
    if (status) return status;
    if (c->base.size > 1 && !fsdpi_gloo_is_local(c)) {
        fsdpi_fill_std_fds(); // Gloo makes its descriptors itself, at any time
        if (fsdp_gloo_device_create(&w->device))
            return fsdpi_comm_fail(&c->base, FSDP_ERR_BACKEND, "[E756] Gloo cannot start: %s",
                                   fsdp_gloo_error());
    }
    status = fsdpi_gloo_connect_members(c);
    if (!status) fsdpi_local_forget(&c->base);
    return status;
}

// Takes shared memory if this host has other ranks, as they read it; else host memory.
static fsdp_status fsdpi_gloo_take_memory(fsdpi_comm_world *base, fsdpi_chunk *chunk,
                                          const char **why) {
    fsdpi_comm *local = ((fsdpi_gloo_world *)(void *)base)->local;
    return local ? fsdpi_shm_take_beside(local->world, &base->chunks, chunk, why)
                : fsdpi_take_host(base, chunk, why);
}

static void fsdpi_gloo_give_memory(fsdpi_comm_world *base, const fsdpi_chunk *chunk) {
    fsdpi_comm *local = ((fsdpi_gloo_world *)(void *)base)->local;
    if (local) fsdpi_shm_give(local->world, chunk);
    else fsdpi_give_host(base, chunk);
}

static fsdp_status fsdpi_gloo_open_world(fsdpi_comm *base) {
    fsdpi_gloo_comm *c = fsdpi_gloo_of(base);
    fsdpi_gloo_world *w = fsdpi_gloo_world_of(c);
    w->close_ns = FSDPI_GLOO_CLOSE_NS;
    base->world->trace = &w->trace;
    fsdpi_comm_begin(base);
    return fsdpi_comm_end(base, fsdpi_gloo_connect_world(c));
}

static void fsdpi_gloo_tell(fsdpi_comm *c, fsdp_status status, const char *subject,
                            const char *reason) {
    fsdpi_comm *local = ((fsdpi_gloo_world *)(void *)c->world)->local;
    if (local) fsdpi_local_tell(local, status, subject, reason);
    else fsdpi_store_world_tell(c, status, subject, reason);
}

// clang-format off
static const fsdpi_transport fsdpi_gloo_transport = {
    sizeof(fsdpi_gloo_comm), sizeof(fsdpi_gloo_world), FSDPI_MAX_SRCS,
    {FSDPI_GLOO_KINDS, FSDP_CAP_FUSED_REDUCE, 2, 0, NULL, NULL},
    fsdpi_gloo_open_world, NULL, fsdpi_gloo_connect, fsdpi_gloo_leave, fsdpi_gloo_close,
    fsdpi_gloo_show, fsdpi_gloo_hear, fsdpi_gloo_move, fsdpi_gloo_settle,
    fsdpi_gloo_tell, fsdpi_store_world_failure, fsdpi_store_world_ask,
    fsdpi_gloo_take_memory, fsdpi_gloo_give_memory, fsdpi_advise_host};
// clang-format on

static fsdp_status fsdpi_gloo_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **out) {
    return fsdpi_comm_open(&fsdpi_gloo_transport, boot, caps, out);
}

FSDP_API const fsdp_comm_ops *fsdp_gloo_comm_ops(void) {
    static const fsdp_comm_ops ops = {
        FSDP_COMM_VERSION, sizeof(fsdp_comm_ops), "gloo",           fsdpi_gloo_open,
        fsdpi_comm_split,  fsdpi_comm_close,      fsdpi_comm_run,   fsdpi_comm_alloc,
        fsdpi_comm_free,   fsdpi_comm_error_text, fsdpi_comm_abort, fsdpi_comm_poll,
    };
    return &ops;
}
#endif // FSDP_IMPLEMENTATION
