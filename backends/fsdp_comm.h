/* fsdp_comm.h - the comm base: the parts of fsdp_comm_ops that all backends share

   Each call of fsdp_comm_ops is written once, here. A backend fills one table, fsdpi_transport,
   which has four parts (in capitals below); the data of a call flow through them in one direction:

       open       blocks of memory -> the world is checked -> CONNECT
       split      described -> checked -> MOVE: `show`, `hear` -> compared -> CONNECT
       run        described -> checked -> MOVE: `show`, `hear` -> compared -> moved -> settled
       alloc      MEMORY -> the list of allocations, in which run finds the buffers that peers read
       failure    given to FAILURE, which keeps it for all ranks -> each rank reports it

   A backend's comm and world begin with fsdpi_comm and fsdpi_comm_world; its fsdp_comm_ops are
   fsdpi_comm_split and so on, and an open of one line that names its table.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_COMM_H
#define FSDPI_BACKENDS_COMM_H

#include "../src/base/hash.h"
#include "../src/base/macros.h"
#include "../src/base/os.h"
#include "../src/base/text.h"
#include "../src/core/alloc.h"
#include "../src/core/error.h"
#include "../src/core/flight.h"
#include "fsdp_memory.h" // the list of allocations
#include "fsdp_signature.h" // the signature of a rank's call, and its text

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define FSDPI_MAX_RANKS 4096 // ranks of a comm; FSDPI_MAX_SRCS if the backend itself reduces

typedef struct fsdpi_comm fsdpi_comm;
typedef struct fsdpi_comm_world fsdpi_comm_world;

// The buffer of a collective that peers read.
typedef struct fsdpi_span {
    const void *shared;
    int64_t low, high; // the elements of it that they read
    fsdpi_chunk chunk; // the allocation of these elements; base NULL: peers read none
} fsdpi_span;

/* The table that a backend fills. A function returns FSDP_OK, or the status of fsdpi_comm_error
   (this call fails on this rank) or of fsdpi_comm_fail (the world fails). If a function may be
   NULL, its comment says so. */
typedef struct fsdpi_transport {
    size_t comm_bytes, world_bytes; // sizes of the backend's own structs
    int most_ranks;
    fsdp_caps caps; // open may change those of its world

    /* Connect. All ranks of the world call open. All members of the parent call connect, once they
       have agreed about the new groups; child is NULL if this rank is in no group. Before they
       agree, prepare (may be NULL) makes whatever the child's first member must show. leave ends a
       comm. close ends a world after all its comms have ended and its allocations are free. It
       returns 1 if the world's block may be freed, and 0 if a thread still reads it. */
    fsdp_status (*open)(fsdpi_comm *c);
    fsdp_status (*prepare)(fsdpi_comm *parent, fsdpi_comm *child);
    fsdp_status (*connect)(fsdpi_comm *parent, fsdpi_comm *child, const fsdp_group *group);
    void (*leave)(fsdpi_comm *c);
    int (*close)(fsdpi_comm_world *w);

    /* Move. `show` sends c->now to the ranks that take part in the call, and may start work that
       can run meanwhile. `hear` waits until their signatures lie at c->shown. op and span are NULL
       for a split. When `move_data` is called, every argument is checked, and every rank makes the
       same call. `settle` (may be NULL) comes last, also after a failure: afterwards no work of
       this call is outstanding. If `show` and `hear` are NULL, there are no other ranks to compare
       with, and `ask` is NULL, too. */
    fsdp_status (*show)(fsdpi_comm *c, const fsdp_coll *op, const fsdpi_span *span);
    fsdp_status (*hear)(fsdpi_comm *c, const fsdp_coll *op);
    fsdp_status (*move_data)(fsdpi_comm *c, const fsdp_coll *op, const fsdpi_span *span);
    fsdp_status (*settle)(fsdpi_comm *c, fsdp_status status);

    /* Failure: the first error of the world, equal on all ranks. `tell` sets it, if there is none
       yet, and ends all waits. `failure` reads it, and returns 0 if there is none. `ask` fills *out
       with the known state of a rank of the world, and returns 0 if there is no answer. Any thread
       may call these functions. */
    void (*tell)(fsdpi_comm *c, fsdp_status status, const char *subject, const char *reason);
    int (*failure)(fsdpi_comm_world *w, fsdpi_failure *out);
    int (*ask)(fsdpi_comm *c, int rank, fsdpi_peer *out);

    /* Memory that peers may read, zero-filled. `take` reads chunk->size and fills the other fields;
       after a failure *why is the reason. `advise` adds remedies for a lack of memory to a text. */
    fsdp_status (*take)(fsdpi_comm_world *w, fsdpi_chunk *chunk, const char **why);
    void (*give)(fsdpi_comm_world *w, const fsdpi_chunk *chunk);
    void (*advise)(fsdpi_text *t);
} fsdpi_transport;

// The part of a world that every backend has; its first member.
struct fsdpi_comm_world {
    fsdp_boot boot;
    const fsdpi_transport *transport;
    fsdp_caps caps;
    const uint32_t *failed; // [release] not 0: the world fails, or has failed; NULL: not connected
    fsdpi_activity *trace;  // [release] this rank's activity; NULL: the backend tracks it
    int64_t open_ns;        // time at which open began: one deadline applies to all of it
    int is_trusting;        // 1: ranks do not compare their calls
    fsdpi_chunks chunks;
};

// The part of a comm that every backend has; its first member.
struct fsdpi_comm {
    fsdpi_comm_world *world;
    const fsdp_boot *boot; // the world's
    int is_world;
    uint32_t splits; // number of splits so far
    uint64_t id;     // equal on all members, unique in the world
    int index, size; // this rank's place among the members
    int32_t *ranks;  // [size] world ranks of the members; in the same block
    fsdpi_signature now;
    const char *shown; // signatures of the other members
    size_t step;       // bytes from one signature to the next
    char error[1280];  // text of the last failure
};

/* -------------------------------------------------------------------------------------------- */
// The two ways to fail. fsdpi_comm_error: this call fails on this rank; other ranks are not
// notified. fsdpi_comm_fail: the world fails in this rank's call. A world keeps its first failure.

static int fsdpi_comm_world_failed(const fsdpi_comm_world *w) {
    return w->failed && FSDPI_LOAD(w->failed);
}
static int fsdpi_comm_failed(const fsdpi_comm *c) { return fsdpi_comm_world_failed(c->world); }

// Writes the text for error_text. Returns `status`.
static FSDP_PRINTF(3, 4) fsdp_status
    fsdpi_comm_error(fsdpi_comm *c, fsdp_status status, const char *format, ...) {
    char reason[FSDPI_REASON];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    fsdpi_text t = {c->error, sizeof c->error, 0};
    fsdpi_text_add(&t, "rank %d: ", c->boot->rank);
    fsdpi_say_op(&t, &c->now);
    fsdpi_text_add(&t, ": %s", reason);
    return status;
}

// Writes this rank's operation, as the subject of a failure.
static void fsdpi_comm_subject(const fsdpi_comm *c, char *subject, size_t cap) {
    fsdpi_text t = {subject, cap, 0};
    fsdpi_say_op(&t, &c->now);
}

// Returns the status of a failed world, and writes this rank's text: its number, its call and the
// failure.
static fsdp_status fsdpi_comm_report(fsdpi_comm *c) {
    fsdpi_failure v;
    char subject[sizeof v.subject];
    if (!c->world->transport->failure(c->world, &v)) {
        (void)fsdpi_comm_error(c, FSDP_ERR_INTERNAL,
                               "[E298] a wait has ended without a reason: please report");
        c->world->transport->tell(c, FSDP_ERR_INTERNAL, "", c->error);
        return FSDP_ERR_INTERNAL;
    }
    fsdpi_comm_subject(c, subject, sizeof subject);
    if (v.rank < 0)
        return fsdpi_comm_error(c, (fsdp_status)v.status, "[E488] the store reports: %s", v.reason);
    if (!v.subject[0] || v.rank == c->boot->rank)
        return fsdpi_comm_error(c, (fsdp_status)v.status, "%s", v.reason);
    if (!strcmp(v.subject, subject))
        return fsdpi_comm_error(c, (fsdp_status)v.status, "[E489] rank %d reports: %s", (int)v.rank,
                                v.reason);
    return fsdpi_comm_error(c, (fsdp_status)v.status, "[E406] rank %d failed in %s: %s",
                            (int)v.rank, v.subject, v.reason);
}

// Fails the world, and returns its status. A reason that does not begin with a rank is about this
// rank, whose number is put first.
static FSDP_PRINTF(3, 4) fsdp_status
    fsdpi_comm_fail(fsdpi_comm *c, fsdp_status status, const char *format, ...) {
    char text[FSDPI_REASON], reason[FSDPI_REASON], subject[192];
    fsdpi_text t = {reason, sizeof reason, 0};
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const char *said = *text == '[' ? text + strcspn(text, " ") + 1 : text; // after the id
    if (strncmp(said, "rank", 4) != 0) fsdpi_text_add(&t, "rank %d: ", c->boot->rank);
    fsdpi_text_add(&t, "%s", text);
    fsdpi_comm_subject(c, subject, sizeof subject);
    c->world->transport->tell(c, status, subject, reason);
    return fsdpi_comm_report(c);
}

static FSDPI_UNUSED fsdp_status fsdpi_comm_no_memory(fsdpi_comm *c, const char *what,
                                                     size_t bytes) {
    return fsdpi_comm_fail(c, FSDP_ERR_OUT_OF_MEMORY,
                           "[E307] the allocator has returned NULL for %llu bytes of memory: %s",
                           (unsigned long long)bytes, what);
}

// Fails the world. Any thread may call it: it does not read c->now, as a worker thread may be in a
// collective of the same comm.
static void fsdpi_comm_abort(fsdp_comm *comm, fsdp_status status, const char *why) {
    fsdpi_comm *c = (fsdpi_comm *)(void *)comm;
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    if (!why || strncmp(why, "rank ", 5) != 0)
        fsdpi_text_add(&t, "[E409] aborted by rank %d: ", c->boot->rank);
    fsdpi_text_add(&t, "%s", why ? why : "no reason given");
    c->world->transport->tell(c, status ? status : FSDP_ERR_ABORTED, "", reason);
}

static fsdp_status fsdpi_comm_poll(fsdp_comm *comm) {
    fsdpi_comm *c = (fsdpi_comm *)(void *)comm;
    return fsdpi_comm_failed(c) ? fsdpi_comm_report(c) : FSDP_OK;
}

static const char *fsdpi_comm_error_text(fsdp_comm *comm) {
    return comm ? ((fsdpi_comm *)(void *)comm)->error : fsdpi_thread_error;
}

// Adds "rank 2" or "ranks 0, 1, 3": the marked ranks of the list. ranks NULL: 0 to count - 1.
static void fsdpi_say_ranks(fsdpi_text *t, const int32_t *ranks, int count, const uint8_t *marked) {
    int total = 0, said = 0;
    for (int k = 0; k < count; k++) total += marked[k] != 0;
    fsdpi_text_add(t, total > 1 ? "ranks" : "rank");
    for (int k = 0; k < count && said < 16; k++)
        if (marked[k]) fsdpi_text_add(t, "%s %d", said++ ? "," : "", ranks ? (int)ranks[k] : k);
    if (total > said) fsdpi_text_add(t, " and %d more", total - said);
}

#define FSDPI_MUTE "the store does not answer: it is stopped, or this host is cut off from it"

// Adds the last operation of a rank.
static FSDPI_UNUSED void fsdpi_say_last(fsdpi_text *t, fsdpi_comm *c, int rank) {
    fsdpi_peer peer;
    if (c->world->transport->ask(c, rank, &peer)) fsdpi_say_peer(t, &peer);
    else fsdpi_text_add(t, FSDPI_MUTE);
}

/* -------------------------------------------------------------------------------------------- */
// The ranks to blame for missing members. A rank that waits for another one is not to blame.

#define FSDPI_TRAIL 16 // most ranks of a trail
#define FSDPI_ASKED 64 // most missing members about which it asks

// A chain of ranks, each of which waits for the next one. The first one is this rank.
typedef struct fsdpi_trail {
    int count, begin; // begin: index of the rank for which the last one waits; -1: not in the list
    int32_t ranks[FSDPI_TRAIL];
    fsdpi_peer peers[FSDPI_TRAIL];
} fsdpi_trail;

typedef struct fsdpi_blame {
    uint8_t named[FSDPI_MAX_RANKS]; // by world rank
    int total, missing;             // number of named ranks; number of these that are missing here
    int excused, waits_for;         // a missing member, and a named rank for which it waits; or -1
    fsdpi_trail ring;               // ranks that wait for each other; begin -1: there are none
} fsdpi_blame;

enum { FSDPI_BLAME_NONE = -1, FSDPI_BLAME_RING = -2 };

// Returns the duration of silence after which a rank counts as stopped or cut off, in ns.
static int64_t fsdpi_quiet_ns(const fsdp_boot *boot) {
    int64_t least = 350000000 + (int64_t)boot->size * 1000000;
    return boot->timeout_ns / 4 > least ? boot->timeout_ns / 4 : least;
}

/* Follows the waits from a missing member on, and returns the rank to blame. That is the rank with
   the longest silence, if it exceeds fsdpi_quiet_ns (or the member itself, if its silence is more
   than half as long); otherwise the last rank of the trail, if it does not wait.
   Returns `rank` if the store knows nothing of a rank of the trail; FSDPI_BLAME_NONE if the last
   rank waits for an unknown one, or the trail is full; FSDPI_BLAME_RING if ranks wait for each
   other and the store receives beats from them. */
static int fsdpi_follow(fsdpi_comm *c, int rank, fsdpi_trail *trail) {
    int worst = 0, next = rank, last = 0;
    trail->ranks[0] = c->boot->rank;
    memset(&trail->peers[0], 0, sizeof trail->peers[0]);
    for (trail->count = 1, trail->begin = -1; trail->begin < 0; last = trail->count++) {
        fsdpi_peer *peer = &trail->peers[trail->count];
        if (trail->count == FSDPI_TRAIL || next >= c->boot->size) return FSDPI_BLAME_NONE;
        if (!c->world->transport->ask(c, next, peer)) return rank;
        trail->ranks[trail->count] = next;
        if (peer->state != FSDPI_PEER_JOINED) peer->busy = 0; // it no longer waits
        else if (peer->silent_ns > trail->peers[worst].silent_ns) worst = trail->count;
        next = peer->busy - FSDPI_WAITS_FOR;
        if (next < 0 || next == trail->ranks[trail->count]) break; // it waits for no other rank
        for (int i = trail->count; i >= 0; i--)
            if (trail->ranks[i] == next) trail->begin = i;
    }
    if (trail->peers[worst].silent_ns > fsdpi_quiet_ns(c->boot)) // the member may be cut off, too
        return trail->peers[1].silent_ns > trail->peers[worst].silent_ns / 2 ? rank
                                                                             : trail->ranks[worst];
    if (trail->begin < 0)
        return trail->peers[trail->count].busy ? FSDPI_BLAME_NONE : trail->ranks[trail->count];
    if (trail->peers[last].silent_ns >= 0) return FSDPI_BLAME_RING;
    // This backend counts no beats: the rank with the longest running operation is hung.
    for (int i = trail->begin ? trail->begin : 1; i < trail->count; i++)
        if (trail->peers[i].since_ns > trail->peers[last].since_ns) last = i;
    return trail->ranks[last];
}

static void fsdpi_find_blame(fsdpi_comm *c, const uint8_t *missing, fsdpi_blame *b) {
    fsdpi_trail trail;
    memset(b, 0, sizeof *b);
    b->excused = b->ring.begin = -1;
    for (int k = 0, asked = 0; k < c->size && asked < FSDPI_ASKED; k++) {
        if (!missing[k]) continue;
        const int rank = (int)c->ranks[k], guilty = fsdpi_follow(c, rank, &trail);
        asked++;
        if (guilty == FSDPI_BLAME_RING && b->ring.begin < 0) b->ring = trail;
        if (guilty < 0) continue;
        b->total += !b->named[guilty];
        b->named[guilty] = 1;
        if (guilty != rank) b->excused = rank, b->waits_for = guilty;
    }
    for (int k = 0; k < c->size; k++) b->missing += missing[k] && b->named[c->ranks[k]];
}

static void fsdpi_say_host(fsdpi_text *t, const fsdpi_peer *peer) {
    if (peer->host[0]) fsdpi_text_add(t, " (%s)", peer->host);
}

// Adds "ranks 1, 2 have not come within 2.0 s; rank 1: its last operation was ...; rank 0 waits for
// rank 1".
static void fsdpi_say_named(fsdpi_text *t, fsdpi_comm *c, const fsdpi_blame *b, const char *verb) {
    fsdpi_peer peer;
    fsdpi_text_add(t, "[E403] ");
    fsdpi_say_ranks(t, NULL, c->boot->size, b->named);
    fsdpi_text_add(t, " %s not %s within %.1f s", b->total > 1 ? "have" : "has", verb,
                   (double)c->boot->timeout_ns * 1e-9);
    for (int r = 0, said = 0; r < c->boot->size && said < 3; r++) {
        if (!b->named[r]) continue;
        said++;
        fsdpi_text_add(t, "; ");
        const int is_known = c->world->transport->ask(c, r, &peer);
        if (b->total > 1 && is_known) fsdpi_text_add(t, "rank %d: ", r);
        if (is_known) fsdpi_say_peer(t, &peer);
        else fsdpi_text_add(t, FSDPI_MUTE);
        if (!is_known) break; // there is no answer about other ranks, either
        if (peer.silent_ns <= fsdpi_quiet_ns(c->boot)) continue;
        fsdpi_text_add(t, ": it is stopped, or its host");
        fsdpi_say_host(t, &peer);
        fsdpi_text_add(t, " is cut off");
    }
    if (b->excused >= 0) fsdpi_text_add(t, "; rank %d waits for rank %d", b->excused, b->waits_for);
}

// Adds "rank 0 (10.0.0.1) waits for rank 2 (10.0.0.2), which waits for rank 0, ...".
static void fsdpi_say_ring(fsdpi_text *t, fsdpi_comm *c, fsdpi_trail *ring) {
    const int first = ring->begin, most = first + 4 < ring->count ? first + 4 : ring->count;
    char who[400];
    fsdpi_text names = {who, sizeof who, 0};
    if (!first) (void)c->world->transport->ask(c, c->boot->rank, &ring->peers[0]);
    for (int i = first; i < most; i++) {
        fsdpi_text_add(&names, "%srank %d",
                       i == first       ? ""
                       : i == first + 1 ? " waits for "
                                        : ", which waits for ",
                       (int)ring->ranks[i]);
        fsdpi_say_host(&names, &ring->peers[i]);
    }
    fsdpi_text_add(
        t,
        "[E487] %s, which waits for %srank %d, for %.1f s, and the store hears all of them: "
        "data between them do not arrive. Look at the link between their hosts (a firewall "
        "or a route that drops one direction; an MTU: large frames are lost, try ping -M do "
        "-s 1472), and whether they use their groups in the same order",
        who, most < ring->count ? "others, and they for " : "", (int)ring->ranks[first],
        (double)c->boot->timeout_ns * 1e-9);
    for (int i = first; i < most; i++) {
        fsdpi_text_add(t, "; rank %d: ", (int)ring->ranks[i]);
        fsdpi_say_peer(t, &ring->peers[i]);
    }
}

/* Adds the ranks to blame if the marked members are missing at the deadline. If no missing member
   is to blame, waits up to 100 ms for another rank's failure first. Returns 0 if the world fails
   meanwhile. */
static FSDPI_UNUSED FSDP_COLD int fsdpi_say_late(fsdpi_text *t, fsdpi_comm *c,
                                                 const uint8_t *missing, const char *verb) {
    fsdpi_blame b;
    fsdpi_find_blame(c, missing, &b);
    for (int i = 0; i < 100 && !b.missing && !fsdpi_comm_failed(c); i++) fsdpi_sleep_ns(1000000);
    if (fsdpi_comm_failed(c)) return 0;
    if (!b.total && b.ring.begin >= 0) {
        fsdpi_say_ring(t, c, &b.ring);
        return 1;
    }
    if (!b.total) // the missing members wait for unknown ranks: name the members
        for (int k = 0; k < c->size; k++) b.total += b.named[c->ranks[k]] = missing[k];
    fsdpi_say_named(t, c, &b, verb);
    return 1;
}

/* -------------------------------------------------------------------------------------------- */
// The signature of a call, and the checks of its arguments.

/* Fills the signature c->now of a collective, except its key. No other function does.
   src/core/backend.h says why there are two structs. */
static void fsdpi_describe(fsdpi_comm *c, const fsdp_coll *op, const char *what) {
    fsdpi_signature *r = &c->now;
    fsdpi_copy_name(r->what, sizeof r->what, what);
    r->fingerprint = r->count = r->segs = r->seq = r->block = r->members = 0;
    r->offset = r->at = r->part = r->number = 0;
    r->kind = r->dtype = r->out_dtype = r->redop = r->in_place = r->state = 0;
    r->root = 0, r->num_segs = 0;
    memset(r->agree, 0, sizeof r->agree);
    if (!op) return;
    if (op->unused) {
        const size_t at = strlen(r->what) + 1;
        if (at < sizeof r->what) fsdpi_copy_name(r->what + at, sizeof r->what - at, op->unused);
    }
    r->kind = op->kind, r->dtype = op->dtype, r->redop = op->redop, r->in_place = op->in_place,
    r->state = op->state;
    r->fingerprint = op->fingerprint, r->count = op->count, r->seq = op->seq,
    r->num_segs = op->num_segs;
    memcpy(r->agree, op->agree, sizeof r->agree);
    if (op->kind == FSDP_OP_REDUCE_SCATTER) r->out_dtype = op->out_dtype;
    if (op->kind == FSDP_OP_BROADCAST) r->root = op->root;
    if (fsdpi_is_pair(op->kind))
        r->root = op->root >= 0 && op->root < c->size ? c->ranks[op->root] : -1;
}

static void fsdpi_make_key(fsdpi_signature *r, const fsdp_coll *op) {
    uint64_t words[sizeof r->what / 8 + 5] = {0}, *at = words + sizeof r->what / 8;
    for (uint32_t s = 0; op && s < op->num_segs && op->segs; s++) {
        // Peers read at this offset. In a buffer that only its rank uses, the offsets may differ.
        const int read = r->kind == FSDP_OP_ALL_GATHER && !r->in_place;
        const uint64_t seg[] = {(uint64_t)op->segs[s].full, (uint64_t)op->segs[s].count,
                                read ? (uint64_t)op->segs[s].shard : 0};
        r->segs = fsdpi_hash_words(r->segs, seg, 3);
    }
    const uint8_t kind = r->kind;
    memcpy(words, r->what, strlen(r->what));
    if (kind == FSDP_OP_RECV) r->kind = FSDP_OP_SEND; // a recv matches a send
    memcpy(at, &r->kind, 6);                          // from kind to state
    r->kind = kind;
    at[1] = r->fingerprint, at[2] = r->count, at[3] = r->segs;
    at[4] = fsdpi_is_pair(kind) ? 0 : (uint64_t)(uint32_t)r->root;
    r->key = fsdpi_hash_words(0, words, (int)(sizeof words / sizeof *words));
}

static fsdp_status fsdpi_check_reduction(fsdpi_comm *c, const fsdp_coll *op) {
    if (op->kind != FSDP_OP_REDUCE_SCATTER && op->kind != FSDP_OP_ALL_REDUCE) return FSDP_OK;
    int is_int = op->dtype == FSDP_I32 || op->dtype == FSDP_I64,
        is_float = fsdp_dtype_is_float(op->dtype);
    if (op->kind == FSDP_OP_ALL_REDUCE && !is_int && !is_float)
        return fsdpi_comm_error(
            c, FSDP_ERR_UNSUPPORTED,
            "[E180] this backend cannot reduce %s, expected a floating dtype, i32 or i64",
            fsdp_dtype_name(op->dtype));
    int is_list = op->kind == FSDP_OP_REDUCE_SCATTER;
    int plain = op->scale == 1.0 && (!is_list || (op->out_dtype == op->dtype && !op->accumulate));
    if (is_float ? is_list && !fsdp_dtype_is_float(op->out_dtype) : !is_int || !plain)
        return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED,
                                "[E181] this backend cannot reduce %s to %s%s",
                                fsdp_dtype_name(op->dtype), fsdp_dtype_name(op->out_dtype),
                                plain ? "" : " with a scale or accumulation");
    if (plain || c->world->caps.flags & FSDP_CAP_FUSED_REDUCE) return FSDP_OK;
    return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED,
                            "[E182] this backend cannot cast, scale or accumulate in a reduction");
}

static fsdp_status fsdpi_check_form(fsdpi_comm *c, const fsdp_coll *op, int is_list, int64_t most) {
    if (op->kind >= FSDP_OP_COUNT || !(c->world->caps.kinds >> op->kind & 1))
        return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED,
                                "[E183] this backend does not have operation %d", op->kind);
    if (!fsdp_dtype_size(op->dtype) || op->count > (uint64_t)most ||
        (is_list && op->num_segs && !op->segs))
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                                "[E184] dtype is %d, count %llu, %u segments at %p: expected "
                                "FSDP_F32, ..., at most %lld elements, and segments",
                                op->dtype, (unsigned long long)op->count, op->num_segs,
                                (const void *)op->segs, (long long)most);
    int is_member = op->root >= 0 && op->root < c->size;
    if (op->kind == FSDP_OP_BROADCAST && !is_member)
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG, "[E185] root is %d, expected 0 to %d",
                                (int)op->root, c->size - 1);
    if (fsdpi_is_pair(op->kind) && (!is_member || op->root == c->index))
        return fsdpi_comm_error(
            c, FSDP_ERR_INVALID_ARG,
            "[E186] the other member is %d, expected 0 to %d, and not this rank's own %d",
            (int)op->root, c->size - 1, c->index);
    return fsdpi_check_reduction(c, op);
}

// Checks the arguments. Fills the span that peers read, except its allocation.
static fsdp_status fsdpi_check(fsdpi_comm *c, const fsdp_coll *op, fsdpi_span *span) {
    int is_list = op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER;
    int64_t most = INT64_MAX / 32 / c->size; // elements: their sums and bytes do not overflow
    fsdp_status status = fsdpi_check_form(c, op, is_list, most);
    if (status) return status;
    int from_shard = op->kind == FSDP_OP_ALL_GATHER && !op->in_place;
    int from_src = from_shard || op->kind == FSDP_OP_REDUCE_SCATTER ||
                   op->kind == FSDP_OP_ALL_TO_ALL || op->kind == FSDP_OP_SEND;
    int64_t low = is_list ? INT64_MAX : 0;
    int64_t high = is_list ? 0
                           : (int64_t)op->count * (op->kind == FSDP_OP_ALL_TO_ALL ? c->size : 1);
    for (uint32_t s = 0; is_list && s < op->num_segs; s++) {
        const fsdp_seg *seg = &op->segs[s];
        if (seg->shard < 0 || seg->full < 0 || seg->count < 0 || seg->shard > most ||
            seg->full > most || seg->count > most)
            return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                                    "[E187] segment %u is {%lld, %lld, %lld}, expected 0 to %lld",
                                    s, (long long)seg->shard, (long long)seg->full,
                                    (long long)seg->count, (long long)most);
        int64_t start = from_shard ? seg->shard : seg->full;
        int64_t end = start + (from_shard ? 1 : c->size) * seg->count;
        if (seg->count && start < low) low = start;
        if (seg->count && end > high) high = end;
    }
    span->shared = from_src ? op->src : op->dst;
    span->low = high == 0 ? 0 : low;
    span->high = high;
    if (high > 0 && (!span->shared || (!op->dst && op->kind != FSDP_OP_SEND)))
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                                "[E188] src is %p and dst is %p, expected both", op->src, op->dst);
    return FSDP_OK;
}

// Finds the allocation of the span that peers read. Fails unless all of it is this rank's.
static fsdp_status fsdpi_find_chunk(fsdpi_comm *c, const fsdp_coll *op, fsdpi_span *span) {
    fsdpi_chunks *chunks = &c->world->chunks;
    uint64_t size = fsdp_dtype_size(op->dtype);
    uintptr_t at = (uintptr_t)span->shared, low = (uintptr_t)span->low * size,
              high = (uintptr_t)span->high * size;
    fsdpi_lock(&chunks->lock);
    int i = fsdpi_chunk_before(chunks, at + low);
    if (i >= 0) span->chunk = chunks->list[i];
    fsdpi_unlock(&chunks->lock);
    uintptr_t mine = (uintptr_t)span->chunk.base + span->chunk.part * (size_t)c->boot->rank;
    if (span->chunk.base && at + low >= mine && at + high <= mine + span->chunk.size)
        return FSDP_OK;
    return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                            "[E189] peers read bytes %llu to %llu of %s, which are not in one "
                            "allocation: allocate them with this backend's alloc",
                            (unsigned long long)low, (unsigned long long)high,
                            span->shared == op->src ? "src" : "dst");
}

static fsdp_status fsdpi_check_world(fsdpi_comm *c) {
    int most = c->world->transport->most_ranks;
    if (c->boot->size < 1 || c->boot->rank < 0 || c->boot->rank >= c->boot->size)
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                                "[E190] rank is %d and size is %d, expected 0 <= rank < size",
                                c->boot->rank, c->boot->size);
    if (c->boot->size > most)
        return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED,
                                "[E191] the world has %d ranks, expected at most %d", c->boot->size,
                                most);
    c->index = c->boot->rank;
    c->size = c->boot->size;
    for (int k = 0; k < c->size; k++) c->ranks[k] = k;
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// The comparison. No rank uses data of peers before all ranks have shown equal signatures.

static uint64_t fsdpi_key_of(const fsdpi_comm *c, int k) {
    if (k == c->index) return c->now.key;
    const void *record = c->shown + c->step * (size_t)k; // it begins with its key
    return __atomic_load_n((const uint64_t *)record, __ATOMIC_RELAXED);
}

static fsdpi_signature fsdpi_signature_of(const fsdpi_comm *c, int k) {
    if (k == c->index) return c->now;
    const void *record = c->shown + c->step * (size_t)k;
    return fsdpi_signature_get((const uint64_t *)record);
}

// Adds "all_gather of 'h.3' ..., 64 elements of f32".
static void fsdpi_say_call(fsdpi_text *t, const fsdpi_signature *r) {
    fsdpi_say_op(t, r);
    if (r->kind < FSDP_OP_COUNT)
        fsdpi_text_add(t, ", %llu elements of %s", (unsigned long long)r->count,
                       fsdp_dtype_name(r->dtype));
    const size_t at = strlen(r->what) + 1;
    if (at < sizeof r->what && r->what[at])
        fsdpi_text_add(t, ", without a gradient of '%s'", r->what + at);
}

// Adds "ranks disagree: ranks 0, 2: all_gather of ...; rank 1: ...".
static void fsdpi_say_disagreement(fsdpi_text *t, const fsdpi_comm *c) {
    fsdpi_signature first = fsdpi_signature_of(c, 0);
    int kinds = 0; // 1: kinds differ
    fsdpi_text_add(t, "[E404] ranks disagree");
    for (int k = 0; k < c->size; k++) {
        fsdpi_signature record = fsdpi_signature_of(c, k);
        uint8_t equal[FSDPI_MAX_RANKS];
        int is_first = 1;
        for (int j = 0; j < c->size; j++) {
            equal[j] = fsdpi_key_of(c, j) == record.key;
            is_first &= !(equal[j] && j < k);
        }
        if (!is_first) continue;
        fsdpi_text_add(t, k ? "; " : ": ");
        fsdpi_say_ranks(t, c->ranks, c->size, equal);
        fsdpi_text_add(t, ": ");
        fsdpi_say_call(t, &record);
        fsdpi_say_differences(t, &first, &record);
        kinds |= record.kind != first.kind;
    }
    fsdpi_text_add(
        t,
        ". All ranks have to make the same calls in the same order: does one of them alone "
        "evaluate, save or stop%s?",
        kinds ? ", or not use a unit (fsdp_set_reduce_scatter_unused_params)" : "");
}

// Adds the calls of two ranks. Two calls of a pair are compared as if both had the same direction.
static void fsdpi_say_two(fsdpi_text *t, const fsdpi_comm *c, const fsdpi_signature *mine, int k,
                          const fsdpi_signature *theirs) {
    fsdpi_signature like = *theirs;
    if (fsdpi_is_pair(mine->kind) && fsdpi_is_pair(theirs->kind))
        like.kind = mine->kind, like.root = mine->root;
    fsdpi_text_add(t, "[E405] ranks disagree: rank %d: ", c->boot->rank);
    fsdpi_say_call(t, mine);
    fsdpi_text_add(t, "; rank %d: ", (int)c->ranks[k]);
    fsdpi_say_call(t, theirs);
    fsdpi_say_differences(t, mine, &like);
}

// Fails the world unless the ranks agree: one of a pair sends and the other receives; otherwise all
// ranks make the same call.
static fsdp_status fsdpi_comm_compare(fsdpi_comm *c, const fsdp_coll *op) {
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    int same = 1;
    if (op && fsdpi_is_pair(op->kind)) {
        fsdpi_signature theirs = fsdpi_signature_of(c, (int)op->root);
        same = theirs.key == c->now.key && theirs.kind != c->now.kind;
        if (!same) fsdpi_say_two(&t, c, &c->now, (int)op->root, &theirs);
    } else {
        for (int k = 0; k < c->size; k++) same &= fsdpi_key_of(c, k) == c->now.key;
        if (!same) fsdpi_say_disagreement(&t, c);
    }
    if (same) return FSDP_OK;
    // No subject: the text of every rank names its own operation.
    c->world->transport->tell(c, FSDP_ERR_MISMATCH, "", reason);
    return fsdpi_comm_report(c);
}

static fsdp_status fsdpi_comm_meet(fsdpi_comm *c, const fsdp_coll *op, const fsdpi_span *span) {
    if (!c->world->transport->show) return FSDP_OK;
    fsdp_status status = c->world->transport->show(c, op, span);
    if (!status) status = c->world->transport->hear(c, op);
    return status ? status : fsdpi_comm_compare(c, op);
}

// Begins an operation: sets its start time, and publishes it. fsdpi_comm_end ends it.
static void fsdpi_comm_begin(fsdpi_comm *c) {
    c->now.since_ns = fsdpi_boot_now(c->boot);
    if (c->world->trace) fsdpi_activity_begin(c->world->trace, &c->now);
}

static fsdp_status fsdpi_comm_end(fsdpi_comm *c, fsdp_status status) {
    const fsdpi_transport *transport = c->world->transport;
    if (transport->settle) status = transport->settle(c, status);
    if (c->world->trace) fsdpi_activity_end(c->world->trace);
    return status;
}

static fsdp_status fsdpi_comm_run(fsdp_comm *comm, const fsdp_coll *op) {
    fsdpi_comm *c = (fsdpi_comm *)(void *)comm;
    const fsdpi_transport *transport = c->world->transport;
    fsdpi_span span = {NULL, 0, 0, {NULL, 0, 0, 0, 0}};
    fsdpi_describe(c, op, op->what);
    if (fsdpi_comm_failed(c)) return fsdpi_comm_report(c);
    fsdp_status status = fsdpi_check(c, op, &span);
    if (!status && c->size > 1 && span.high > span.low) status = fsdpi_find_chunk(c, op, &span);
    if (status) return status;
    fsdpi_make_key(&c->now, op);
    fsdpi_comm_begin(c);
    if (!c->world->is_trusting) status = fsdpi_comm_meet(c, op, &span);
    if (!status) status = transport->move_data(c, op, &span);
    return fsdpi_comm_end(c, status);
}

/* -------------------------------------------------------------------------------------------- */
// Opening and closing of a world and its groups.

// Returns the index of a world rank, or c->size if it is no member. The search begins at `from`.
static int fsdpi_index_from(const fsdpi_comm *c, int rank, int from) {
    if (rank >= 0 && rank < c->size && c->ranks[rank] == rank) return rank;
    for (int k = from; k < c->size; k++)
        if (c->ranks[k] == rank) return k;
    for (int k = 0; k < from && k < c->size; k++)
        if (c->ranks[k] == rank) return k;
    return c->size;
}

static int fsdpi_index_of(const fsdpi_comm *c, int rank) { return fsdpi_index_from(c, rank, 0); }

// Allocates a comm's block: the backend's struct, the ranks, and `marks` bytes more. NULL: no
// memory.
static fsdpi_comm *fsdpi_comm_block(const fsdp_allocator *a, const fsdpi_transport *transport,
                                    int size, size_t marks) {
    const size_t bytes = (transport->comm_bytes + 7) / 8 * 8;
    char *block = (char *)fsdpi_alloc(a, bytes + (size_t)size * sizeof(int32_t) + marks);
    fsdpi_comm *c = (fsdpi_comm *)(void *)block;
    if (c) c->ranks = (int32_t *)(void *)(block + bytes);
    return c;
}

// Checks a new group's members. Copies them to the child, and their hash to the parent's signature.
static fsdp_status fsdpi_split_members(fsdpi_comm *parent, const fsdp_group *g, int size,
                                       fsdpi_comm *child) {
    uint64_t h = fsdpi_hash((uint64_t)g->color, (uint64_t)g->size);
    uint8_t *seen = (uint8_t *)(child->ranks + size); // a bit for each member of the parent
    int wrong = !size || g->index < 0 || g->index >= size || !g->ranks ||
                g->ranks[g->index] != parent->boot->rank;
    for (int i = 0, at = 0; !wrong && i < size; i++, at++) {
        at = fsdpi_index_from(parent, (int)g->ranks[i], at);
        wrong = at == parent->size || (seen[at / 8] >> at % 8 & 1);
        if (wrong) break;
        seen[at / 8] = (uint8_t)(seen[at / 8] | 1u << at % 8);
        child->ranks[i] = g->ranks[i];
        h = fsdpi_hash(h, (uint64_t)g->ranks[i]);
    }
    if (wrong)
        return fsdpi_comm_error(parent, FSDP_ERR_INVALID_ARG,
                                "[E192] the group has %d ranks and this one is at index %d: "
                                "expected different members of the parent",
                                g->size, g->index);
    parent->now.members = h;
    child->index = g->index;
    child->size = size;
    return FSDP_OK;
}

// Also ends a comm after a failed open or split.
static void fsdpi_comm_close(fsdp_comm *comm);

// Makes the child's block, and fills the fields that need no other rank. *out stays NULL if this
// rank is in no group.
static fsdp_status fsdpi_split_begin(fsdpi_comm *parent, const fsdp_group *g, fsdpi_comm **out) {
    const fsdpi_transport *transport = parent->world->transport;
    fsdpi_describe(parent, NULL, g->name);
    parent->now.kind = FSDPI_SPLIT;
    parent->now.key = FSDPI_SPLIT; // groups differ in names and members: the key has neither
    if (fsdpi_comm_failed(parent)) return fsdpi_comm_report(parent);
    if (g->color < 0) return FSDP_OK;
    const int size = g->size >= 1 && g->size <= parent->size ? g->size : 0;
    const size_t marks = (size_t)parent->size / 8 + 1;
    fsdpi_comm *child = fsdpi_comm_block(&parent->boot->allocator, transport, size, marks);
    if (!child)
        return fsdpi_comm_no_memory(parent, "a group",
                                    transport->comm_bytes + (size_t)size * 4 + marks);
    *out = child;
    child->world = parent->world;
    child->boot = parent->boot;
    fsdp_status status = fsdpi_split_members(parent, g, size, child);
    if (status) return status;
    child->id = fsdpi_hash(fsdpi_hash(parent->id, parent->splits), (uint64_t)g->ranks[0]);
    fsdpi_describe(child, NULL, g->name);
    child->now.kind = FSDPI_SPLIT;
    fsdpi_copy_name(child->now.comm, sizeof child->now.comm, g->name);
    return transport->prepare ? transport->prepare(parent, child) : FSDP_OK;
}

// Fails the world unless all members of a group have named the same members.
static fsdp_status fsdpi_split_compare(fsdpi_comm *parent, const fsdpi_comm *child) {
    for (int i = 0; child && parent->world->transport->show && i < child->size; i++) {
        int k = fsdpi_index_of(parent, (int)child->ranks[i]);
        if (fsdpi_signature_of(parent, k).members != parent->now.members)
            return fsdpi_comm_fail(parent, FSDP_ERR_MISMATCH,
                                   "[E410] ranks %d and %d disagree about the members of the group",
                                   parent->boot->rank, (int)parent->ranks[k]);
    }
    return FSDP_OK;
}

static FSDP_COLD fsdp_status fsdpi_comm_split(fsdp_comm *comm, const fsdp_group *g,
                                              fsdp_comm **out) {
    fsdpi_comm *parent = (fsdpi_comm *)(void *)comm, *child = NULL;
    *out = NULL;
    fsdp_status status = fsdpi_split_begin(parent, g, &child);
    if (!status) {
        parent->splits++;
        fsdpi_comm_begin(parent);
        status = fsdpi_comm_meet(parent, NULL, NULL);
        if (!status) status = fsdpi_split_compare(parent, child);
        if (!status) status = parent->world->transport->connect(parent, child, g);
        status = fsdpi_comm_end(parent, status);
    }
    if (status && child) {
        if (child->error[0]) fsdpi_copy_name(parent->error, sizeof parent->error, child->error);
        fsdpi_comm_close((fsdp_comm *)(void *)child);
        child = NULL;
    }
    *out = (fsdp_comm *)(void *)child;
    return status;
}

static void fsdpi_comm_close(fsdp_comm *comm) {
    fsdpi_comm *c = (fsdpi_comm *)(void *)comm;
    if (!c) return;
    fsdpi_comm_world *w = c->world;
    const fsdpi_transport *transport = w->transport;
    fsdp_allocator allocator = w->boot.allocator;
    int is_world = c->is_world;
    transport->leave(c);
    fsdpi_free(&allocator, c);
    if (!is_world) return;
    for (int i = 0; i < w->chunks.count; i++) transport->give(w, &w->chunks.list[i]);
    fsdpi_free(&allocator, w->chunks.list);
    if (transport->close(w)) fsdpi_free(&allocator, w);
}

// Returns the time left until the deadline of open, in ns; at least 1.
static FSDPI_UNUSED int64_t fsdpi_comm_left_to_open(const fsdpi_comm_world *w) {
    int64_t left = w->open_ns + w->boot.timeout_ns - fsdpi_boot_now(&w->boot);
    return left > 1 ? left : 1;
}

// Makes a world and its comm of `size` ranks, which get their numbers later. NULL: no memory.
static fsdpi_comm *fsdpi_comm_make(const fsdpi_transport *transport, const fsdp_boot *boot,
                                   int size) {
    fsdpi_comm *c = fsdpi_comm_block(&boot->allocator, transport, size, 0);
    fsdpi_comm_world *w = (fsdpi_comm_world *)fsdpi_alloc(&boot->allocator, transport->world_bytes);
    if (!c || !w) {
        fsdpi_free(&boot->allocator, c);
        fsdpi_free(&boot->allocator, w);
        return NULL;
    }
    w->boot = *boot;
    w->transport = transport;
    w->caps = transport->caps;
    c->world = w;
    c->boot = &w->boot;
    c->is_world = 1;
    c->id = FSDPI_OPEN;
    return c;
}

// Opens a world. After a failure error_text(NULL) returns the text.
static fsdp_status fsdpi_comm_open(const fsdpi_transport *transport, const fsdp_boot *boot,
                                   fsdp_caps *caps, fsdp_comm **out) {
    const int size = boot->size >= 1 && boot->size <= transport->most_ranks ? boot->size : 0;
    fsdpi_comm *c = fsdpi_comm_make(transport, boot, size);
    *out = NULL;
    if (!c) {
        (void)snprintf(fsdpi_thread_error, sizeof fsdpi_thread_error,
                       "rank %d: [E309] the allocator has returned NULL for %llu bytes of memory",
                       boot->rank,
                       (unsigned long long)(transport->comm_bytes + transport->world_bytes +
                                            (size_t)size * 4));
        return FSDP_ERR_OUT_OF_MEMORY;
    }
    fsdpi_comm_world *w = c->world;
    if (!w->boot.job) w->boot.job = "";
    fsdpi_describe(c, NULL, w->boot.job);
    c->now.kind = FSDPI_OPEN;
    w->open_ns = fsdpi_boot_now(boot);
    fsdp_status status = fsdpi_check_world(c);
    int opens = !status;
    if (opens) status = transport->open(c);
    if (!status) {
        *caps = w->caps;
        *out = (fsdp_comm *)(void *)c;
        return FSDP_OK;
    }
    fsdpi_copy_name(fsdpi_thread_error, sizeof fsdpi_thread_error, c->error);
    if (opens) {
        fsdpi_comm_close((fsdp_comm *)(void *)c);
        return status;
    }
    fsdpi_free(&boot->allocator, c);
    fsdpi_free(&boot->allocator, w);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Allocations. A failure does not use c->now: a worker thread may be in a collective of the comm.

static FSDPI_UNUSED void fsdpi_advise_host(fsdpi_text *t) {
    const char *whose;
    int64_t left = fsdpi_memory_left(&whose);
    fsdpi_text_add(
        t, "; %s has %.1f MiB left. Free memory, raise the limit, or shard over more machines",
        whose, (double)left / 1048576);
}

// Takes memory of the world's allocator, for backends that read no memory of other processes.
static FSDPI_UNUSED fsdp_status fsdpi_take_host(fsdpi_comm_world *w, fsdpi_chunk *chunk,
                                                const char **why) {
    const char *whose;
    size_t size = chunk->size;
    if (size >= (size_t)1 << 20 && (int64_t)(size / 2) > fsdpi_memory_left(&whose) / 2) {
        *why = "the host has not enough memory";
        return FSDP_ERR_OUT_OF_MEMORY;
    }
    *why = "the allocator has returned NULL";
    chunk->base = (char *)fsdpi_alloc(&w->boot.allocator, size);
    return chunk->base ? FSDP_OK : FSDP_ERR_OUT_OF_MEMORY;
}

static FSDPI_UNUSED void fsdpi_give_host(fsdpi_comm_world *w, const fsdpi_chunk *chunk) {
    fsdpi_free(&w->boot.allocator, chunk->base);
}

static FSDP_COLD fsdp_status fsdpi_comm_alloc(fsdp_comm *comm, size_t size, void **ptr) {
    fsdpi_comm *c = (fsdpi_comm *)(void *)comm;
    fsdpi_comm_world *w = c->world;
    fsdpi_chunk chunk = {NULL, size, 0, 0, 0};
    const char *why = "";
    *ptr = NULL;
    fsdp_status status = w->transport->take(w, &chunk, &why);
    if (!status && !fsdpi_chunk_insert(&w->chunks, &w->boot.allocator, chunk)) {
        w->transport->give(w, &chunk);
        status = FSDP_ERR_OUT_OF_MEMORY;
        why = "the allocator has returned NULL";
    }
    if (!status) {
        *ptr = chunk.base + chunk.part * (size_t)c->boot->rank;
        return FSDP_OK;
    }
    fsdpi_text t = {c->error, sizeof c->error, 0};
    fsdpi_text_add(&t, "rank %d: [E308] alloc of %llu bytes (%.1f MiB) on each of %d ranks: %s",
                   c->boot->rank, (unsigned long long)size, (double)size / 1048576, c->boot->size,
                   why);
    if (status == FSDP_ERR_OUT_OF_MEMORY) w->transport->advise(&t);
    return status;
}

static void fsdpi_comm_free(fsdp_comm *comm, void *ptr, size_t size) {
    fsdpi_comm_world *w = ((fsdpi_comm *)(void *)comm)->world;
    fsdpi_chunk chunk;
    (void)size;
    if (ptr && fsdpi_chunk_take(&w->chunks, w->boot.rank, ptr, &chunk))
        w->transport->give(w, &chunk);
}

#endif // FSDPI_BACKENDS_COMM_H
