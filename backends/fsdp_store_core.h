/* fsdp_store_core.h - the server as a state machine, without sockets and clocks

   The server's state. Invariants: no call blocks, reads a clock or uses a socket; only
   fsdpi_store_core_disconnect frees a connection; a connection without proof of the token costs no
   more than its struct and FSDPI_STORE_FIRST bytes, for FSDPI_STORE_PROOF_NS.
   Callers: fsdp_store_server.h (fsdpi_store_core_evict), fsdp_nccl.h (fsdpi_store_after),
     fsdp_store.h (fsdpi_store_after) and others.

   A part of fsdp_store.h, which has the protocol.
   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_STORE_CORE_H
#define FSDPI_BACKENDS_STORE_CORE_H

#include "../src/base/hash.h"
#include "../src/base/os.h"
#include "../src/base/text.h"
#include "../src/core/alloc.h"
#include "fsdp_signature.h"
#include "fsdp_store_frames.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

enum {
    FSDPI_CONN_UNTRUSTED, // has not proven the token
    FSDPI_CONN_PROVEN,    // has proven the token, and has not given its rank
    FSDPI_CONN_RANK,
    FSDPI_CONN_ENDING, // `out` is still sent
    FSDPI_CONN_BROKEN  // must be closed and disconnected at once
};

typedef struct fsdpi_conn {
    struct fsdpi_conn *next;
    int fd; // the caller's
    int state, rank, waits;
    int64_t deadline;   // before the proof, and for a connection that is ending
    fsdp_status status; // a rank's, if it is broken: the status of the failure
    const char *why;    // and the reason
    uint8_t nonce[FSDPI_STORE_NONCE];
    fsdpi_seal seal_in, seal_out;
    int is_remote;       // 1: from another host
    char reached[64];    // this host's address of the connection; "": useless for other hosts
    fsdpi_queue in, out; // out: the caller sends and drops these
} fsdpi_conn;

typedef struct fsdpi_store_entry {
    struct fsdpi_store_entry *next;
    uint64_t hash;
    size_t bytes, value_size; // bytes: of the block, which has the key and the value as well
    char *key, *value;
} fsdpi_store_entry;

// A GET without an answer yet.
typedef struct fsdpi_store_wait {
    struct fsdpi_store_wait *next;
    fsdpi_conn *conn;
    uint64_t hash;
    int64_t deadline;
    uint32_t id;
    char key[FSDPI_STORE_KEY_MAX + 1];
} fsdpi_store_wait;

typedef struct fsdpi_store_rank {
    int32_t state;
    int64_t heard_ns; // time of the rank's last frame
    fsdpi_store_beat beat;
} fsdpi_store_rank;

typedef struct fsdpi_store_core {
    fsdp_allocator allocator;
    int size, server_rank; // server_rank: -1: a launcher
    uint8_t token[32];
    char where[256];  // its address, for texts
    char reached[64]; // an address under which other hosts reach this one, once that is known
    int closing, num_conns, num_joined;
    int num_refused, num_old;         // refused for their token, and for their version
    int64_t join_ns, join_timeout_ns; // deadline and timeout of joining
    size_t total;
    fsdpi_failure failure; // status FSDP_OK: none
    fsdpi_store_rank *ranks;
    fsdpi_conn *conns;
    fsdpi_store_wait *waits;
    fsdpi_store_entry *entries[FSDPI_STORE_BUCKETS];
} fsdpi_store_core;

static int64_t fsdpi_store_after(int64_t now, int64_t timeout) {
    return timeout > INT64_MAX - now ? INT64_MAX : now + timeout;
}

static void fsdpi_conn_break(fsdpi_conn *conn, fsdp_status status, const char *why) {
    conn->state = FSDPI_CONN_BROKEN;
    conn->status = status;
    conn->why = why;
}

static void fsdpi_conn_end(fsdpi_conn *conn, int64_t now) {
    conn->state = FSDPI_CONN_ENDING;
    conn->rank = -1;
    conn->deadline = fsdpi_store_after(now, FSDPI_STORE_CLOSE_NS);
}

static void fsdpi_store_core_send(fsdpi_store_core *core, fsdpi_conn *conn, int op, int flags,
                                  uint32_t id, const void *value, size_t bytes) {
    fsdpi_frame f = {(uint16_t)op, (uint16_t)flags, id, 0, bytes, NULL, (const char *)value};
    if (conn->state > FSDPI_CONN_RANK) return;
    if (fsdpi_queue_size(&conn->out) + bytes > FSDPI_STORE_OUT_MAX)
        fsdpi_conn_break(conn, FSDP_ERR_PEER_LOST, "does not read the messages of the store");
    else if (!fsdpi_frame_put(&core->allocator, &conn->out, &f, &conn->seal_out))
        fsdpi_conn_break(conn, FSDP_ERR_OUT_OF_MEMORY,
                         "is cut off: the store has no memory for messages to it");
}

static void fsdpi_store_core_push(fsdpi_store_core *core, int op, const void *value, size_t bytes) {
    for (fsdpi_conn *conn = core->conns; conn; conn = conn->next)
        if (conn->state == FSDPI_CONN_RANK)
            fsdpi_store_core_send(core, conn, op, 0, 0, value, bytes);
}

// Drops the waits of a connection, and those whose deadline has passed.
static void fsdpi_store_core_forget(fsdpi_store_core *core, const fsdpi_conn *conn, int64_t now) {
    for (fsdpi_store_wait **link = &core->waits; *link;) {
        fsdpi_store_wait *wait = *link;
        if (wait->conn != conn && wait->deadline > now) {
            link = &wait->next;
            continue;
        }
        *link = wait->next;
        wait->conn->waits--;
        fsdpi_free(&core->allocator, wait);
    }
}

static void fsdpi_store_core_clear(fsdpi_store_core *core) {
    for (int i = 0; i < FSDPI_STORE_BUCKETS; i++)
        while (core->entries[i]) {
            fsdpi_store_entry *entry = core->entries[i];
            core->entries[i] = entry->next;
            fsdpi_free(&core->allocator, entry);
        }
    core->total = 0;
}

// Sets the world's failure, unless there is one.
static void fsdpi_store_core_judge(fsdpi_store_core *core, const fsdpi_failure *v) {
    char value[FSDPI_FAILURE_BYTES];
    if (core->failure.status || core->closing) return;
    core->failure = *v;
    fsdpi_store_core_push(core, FSDPI_STORE_FAILURE, value, fsdpi_failure_put(value, v));
}

static FSDP_PRINTF(4, 5) void fsdpi_store_core_fail(fsdpi_store_core *core, fsdp_status status,
                                                    int lost, const char *format, ...) {
    fsdpi_failure v;
    va_list args;
    memset(&v, 0, sizeof v);
    v.status = (int32_t)status;
    v.rank = -1;
    v.lost = lost;
    va_start(args, format);
    (void)vsnprintf(v.reason, sizeof v.reason, format, args);
    va_end(args);
    fsdpi_store_core_judge(core, &v);
}

static fsdpi_peer fsdpi_store_core_peer(const fsdpi_store_core *core, int rank, int64_t now) {
    const fsdpi_store_rank *r = &core->ranks[rank];
    fsdpi_peer p;
    memset(&p, 0, sizeof p);
    p.state = r->state;
    p.busy = r->beat.busy;
    p.silent_ns = now - r->heard_ns;
    p.since_ns = fsdpi_store_after(p.silent_ns, r->beat.since_ns);
    memcpy(p.text, r->beat.text, sizeof p.text);
    return p;
}

/* Marks a rank as left: it has sent BYE, or knows that its world has ended. After the last rank a
   launcher's store accepts the next world; without a launcher rank 0 opens another store. */
static void fsdpi_store_core_leave(fsdpi_store_core *core, int rank) {
    int left = 0;
    core->ranks[rank].state = FSDPI_PEER_LEFT;
    for (int r = 0; r < core->size; r++) left += core->ranks[r].state == FSDPI_PEER_LEFT;
    if (left < core->size || core->server_rank >= 0) return;
    memset(core->ranks, 0, (size_t)core->size * sizeof *core->ranks);
    memset(&core->failure, 0, sizeof core->failure);
    core->num_joined = 0;
    core->join_ns = INT64_MAX;
    fsdpi_store_core_clear(core);
}

static FSDP_PRINTF(5, 6) void fsdpi_store_core_refuse(fsdpi_store_core *core, fsdpi_conn *conn,
                                                      int status, int64_t now, const char *format,
                                                      ...) {
    char text[400];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fsdpi_store_core_send(core, conn, FSDPI_STORE_REFUSED, status, 0, text, strlen(text));
    if (conn->state != FSDPI_CONN_BROKEN) fsdpi_conn_end(conn, now);
}

static void fsdpi_store_core_join(fsdpi_store_core *core, fsdpi_conn *conn, int rank,
                                  int64_t timeout, int64_t left, int64_t now) {
    char value[4];
    fsdpi_store_rank *r = &core->ranks[rank];
    memset(r, 0, sizeof *r);
    r->state = FSDPI_PEER_JOINED;
    r->heard_ns = now;
    conn->state = FSDPI_CONN_RANK;
    conn->rank = rank;
    if (!core->reached[0]) memcpy(core->reached, conn->reached, sizeof core->reached);
    (void)fsdpi_le_put(value, (uint32_t)core->server_rank, 4);
    fsdpi_store_core_send(core, conn, FSDPI_STORE_REPLY, FSDP_OK, 0, value, sizeof value);
    if (fsdpi_store_after(now, left) < core->join_ns) { // the first one whose time is over
        core->join_ns = fsdpi_store_after(now, left);
        core->join_timeout_ns = timeout;
    }
    if (++core->num_joined < core->size) return;
    core->join_ns = INT64_MAX;
    fsdpi_store_core_push(core, FSDPI_STORE_ALL_JOINED, core->reached, strlen(core->reached));
}

// Handles the first frame of a connection, in which a client proves that it knows the token. The
// tag of the answer proves the same for the server. A client that is refused may be a rank of
// another job.
static void fsdpi_store_core_prove(fsdpi_store_core *core, fsdpi_conn *conn, fsdpi_frame *f,
                                   int64_t now) {
    if (f->op == FSDPI_STORE_PROVE && !f->key_size &&
        f->value_size == FSDPI_STORE_NONCE + FSDPI_STORE_TAG) {
        fsdpi_seal_make(&conn->seal_in, core->token, 0, conn->nonce, f->value);
        fsdpi_seal_make(&conn->seal_out, core->token, 1, conn->nonce, f->value);
        if (fsdpi_seal_open(&conn->seal_in, f)) {
            conn->state = FSDPI_CONN_PROVEN;
            fsdpi_store_core_send(core, conn, FSDPI_STORE_PROVEN, 0, 0, NULL, 0);
            return;
        }
        conn->seal_out.on = 0;
        core->num_refused++;
        fsdpi_store_core_refuse(core, conn, 0, now, "%s", FSDPI_STORE_OTHER_JOB);
    } else if (f->op == FSDPI_STORE_HELLO && f->value_size == FSDPI_STORE_HELLO_1) {
        core->num_old++;
        fsdpi_store_core_refuse(core, conn, 0, now, FSDPI_STORE_OTHER_VERSION,
                                (unsigned)FSDPI_STORE_VERSION, 1u);
    } else fsdpi_conn_break(conn, FSDP_OK, NULL);
}

static void fsdpi_store_core_hello(fsdpi_store_core *core, fsdpi_conn *conn, const fsdpi_frame *f,
                                   int64_t now) {
    if (f->op != FSDPI_STORE_HELLO || f->value_size != FSDPI_STORE_HELLO_BYTES) {
        fsdpi_conn_break(conn, FSDP_OK, NULL);
        return;
    }
    int32_t rank = fsdpi_le_i32(f->value), size = fsdpi_le_i32(f->value + 4);
    if (size != core->size || rank < 0 || rank >= size) {
        char text[400];
        (void)snprintf(text, sizeof text,
                       "[E704] rank %d was started as one of %d ranks, but the store at %s was "
                       "opened for %d: give all ranks the same world size",
                       (int)rank, (int)size, core->where, core->size);
        fsdpi_store_core_refuse(core, conn, FSDP_ERR_MISMATCH, now, "%s", text);
        if (core->num_joined < core->size) // a late client must not end a complete world
            fsdpi_store_core_fail(core, FSDP_ERR_MISMATCH, -1, "%s", text);
    } else if (core->ranks[rank].state == FSDPI_PEER_JOINED) {
        fsdpi_store_core_refuse(core, conn, FSDP_ERR_INVALID_ARG, now,
                                "[E705] rank %d has joined already: give each program its own "
                                "rank, each job its own FSDP_JOB_ID or FSDP_TOKEN, and each of the "
                                "worlds that a program has open its own fsdp_world_desc.job",
                                (int)rank);
    } else if (core->ranks[rank].state != FSDPI_PEER_ABSENT) {
        fsdpi_store_core_refuse(core, conn, FSDPI_STORE_LATER, now,
                                "still serves an earlier world of this job");
    } else if (core->failure.status) {
        char value[FSDPI_FAILURE_BYTES];
        fsdpi_store_core_send(core, conn, FSDPI_STORE_FAILURE, 0, 0, value,
                              fsdpi_failure_put(value, &core->failure));
        fsdpi_conn_end(conn, now);
        fsdpi_store_core_leave(core, (int)rank);
    } else {
        fsdpi_store_core_join(core, conn, (int)rank, fsdpi_le_i64(f->value + 8),
                              fsdpi_le_i64(f->value + 16), now);
    }
}

static fsdpi_store_entry **fsdpi_store_core_find(fsdpi_store_core *core, const char *key,
                                                 uint64_t hash) {
    fsdpi_store_entry **link = &core->entries[hash % FSDPI_STORE_BUCKETS];
    while (*link && ((*link)->hash != hash || strcmp((*link)->key, key) != 0))
        link = &(*link)->next;
    return link;
}

static void fsdpi_store_core_remove(fsdpi_store_core *core, fsdpi_store_entry **link) {
    fsdpi_store_entry *entry = *link;
    if (!entry) return;
    *link = entry->next;
    core->total -= entry->bytes;
    fsdpi_free(&core->allocator, entry);
}

/* Answers the waits of a connection (NULL: of all) whose key is there. If a client reads slowly, it
   gets one large value after the other. */
static void fsdpi_store_core_answer(fsdpi_store_core *core, const fsdpi_conn *conn) {
    for (fsdpi_store_wait *wait = core->waits; wait; wait = wait->next) {
        if (conn && wait->conn != conn) continue;
        const fsdpi_store_entry *entry = *fsdpi_store_core_find(core, wait->key, wait->hash);
        if (!entry || fsdpi_queue_size(&wait->conn->out) > FSDPI_STORE_VALUE_MAX) continue;
        fsdpi_store_core_send(core, wait->conn, FSDPI_STORE_REPLY, FSDP_OK, wait->id, entry->value,
                              entry->value_size);
        wait->deadline = INT64_MIN; // so that fsdpi_store_core_forget drops it
    }
    fsdpi_store_core_forget(core, NULL, INT64_MIN);
}

// Sets a key. If the value cannot be stored, the old one stays.
static fsdp_status fsdpi_store_core_set(fsdpi_store_core *core, const char *key,
                                        const fsdpi_frame *f) {
    uint64_t hash = fsdpi_hash_text(key);
    fsdpi_store_entry **old = fsdpi_store_core_find(core, key, hash);
    size_t bytes = sizeof(fsdpi_store_entry) + f->key_size + 1 + f->value_size;
    if (core->total - (*old ? (*old)->bytes : 0) + bytes > FSDPI_STORE_TOTAL_MAX)
        return FSDP_ERR_OUT_OF_MEMORY;
    fsdpi_store_entry *entry = (fsdpi_store_entry *)fsdpi_alloc(&core->allocator, bytes);
    if (!entry) return FSDP_ERR_OUT_OF_MEMORY;
    entry->hash = hash;
    entry->bytes = bytes;
    entry->value_size = f->value_size;
    entry->key = (char *)(entry + 1);
    entry->value = entry->key + f->key_size + 1;
    memcpy(entry->key, key, f->key_size + 1);
    if (f->value_size) memcpy(entry->value, f->value, f->value_size);
    fsdpi_store_core_remove(core, old);
    fsdpi_store_entry **bucket = &core->entries[hash % FSDPI_STORE_BUCKETS];
    entry->next = *bucket;
    *bucket = entry;
    core->total += bytes;
    fsdpi_store_core_answer(core, NULL);
    return FSDP_OK;
}

static void fsdpi_store_core_get(fsdpi_store_core *core, fsdpi_conn *conn, const char *key,
                                 const fsdpi_frame *f, int64_t now) {
    fsdpi_store_wait *wait = NULL;
    if (conn->waits < FSDPI_STORE_WAITS_MAX)
        wait = (fsdpi_store_wait *)fsdpi_alloc(&core->allocator, sizeof *wait);
    if (!wait) {
        fsdpi_store_core_send(core, conn, FSDPI_STORE_REPLY, FSDP_ERR_OUT_OF_MEMORY, f->id, NULL,
                              0);
        return;
    }
    wait->conn = conn;
    wait->hash = fsdpi_hash_text(key);
    wait->deadline = fsdpi_store_after(now, fsdpi_le_i64(f->value));
    wait->id = f->id;
    memcpy(wait->key, key, f->key_size);
    wait->next = core->waits;
    core->waits = wait;
    conn->waits++;
    fsdpi_store_core_answer(core, conn);
}

static void fsdpi_store_core_ask(fsdpi_store_core *core, fsdpi_conn *conn, const fsdpi_frame *f,
                                 int64_t now) {
    char value[24 + sizeof core->ranks->beat.text], *at = value;
    int32_t rank = fsdpi_le_i32(f->value);
    if (rank < 0 || rank >= core->size) {
        fsdpi_store_core_send(core, conn, FSDPI_STORE_REPLY, FSDP_ERR_INVALID_ARG, f->id, NULL, 0);
        return;
    }
    fsdpi_peer p = fsdpi_store_core_peer(core, (int)rank, now);
    at = fsdpi_le_put(at, (uint32_t)p.state, 4);
    at = fsdpi_le_put(at, (uint32_t)p.busy, 4);
    at = fsdpi_le_put(at, (uint64_t)p.silent_ns, 8);
    at = fsdpi_le_put(at, (uint64_t)p.since_ns, 8);
    memcpy(at, p.text, strlen(p.text));
    fsdpi_store_core_send(core, conn, FSDPI_STORE_REPLY, FSDP_OK, f->id, value,
                          24 + strlen(p.text));
}

static void fsdpi_store_core_bye(fsdpi_store_core *core, fsdpi_conn *conn, int64_t now) {
    char value[4];
    int rank = conn->rank;
    (void)fsdpi_le_put(value, (uint32_t)rank, 4);
    fsdpi_store_core_forget(core, conn, INT64_MIN);
    fsdpi_conn_end(conn, now);
    if (core->num_joined < core->size)
        fsdpi_store_core_fail(core, FSDP_ERR_PEER_LOST, rank,
                              "[E701] rank %d has left before all ranks had joined", rank);
    fsdpi_store_core_push(core, FSDPI_STORE_RANK_LEFT, value, sizeof value);
    fsdpi_store_core_leave(core, rank);
}

// Returns the smallest value size of an op; SIZE_MAX: a client must not send the op.
static size_t fsdpi_store_core_least(int op) {
    switch (op) {
    case FSDPI_STORE_SET:
    case FSDPI_STORE_DELETE:
    case FSDPI_STORE_BYE: return 0;
    case FSDPI_STORE_GET: return 8;
    case FSDPI_STORE_BEAT: return 12;
    case FSDPI_STORE_ASK: return 4;
    case FSDPI_STORE_ABORT: return 12;
    default: return SIZE_MAX;
    }
}

static void fsdpi_store_core_frame(fsdpi_store_core *core, fsdpi_conn *conn, const fsdpi_frame *f,
                                   int64_t now) {
    char key[FSDPI_STORE_KEY_MAX + 1];
    fsdpi_failure v;
    int32_t status = FSDP_OK;
    fsdpi_store_rank *r = &core->ranks[conn->rank];
    if (f->value_size < fsdpi_store_core_least(f->op) ||
        (f->key_size && memchr(f->key, 0, f->key_size))) {
        fsdpi_conn_break(conn, FSDP_ERR_PEER_LOST,
                         "has sent the store a message that is not in its protocol");
        return;
    }
    (void)fsdpi_frame_text(key, sizeof key, f->key, f->key_size);
    r->heard_ns = now;
    switch (f->op) {
    case FSDPI_STORE_SET: status = (int32_t)fsdpi_store_core_set(core, key, f); break;
    case FSDPI_STORE_GET: fsdpi_store_core_get(core, conn, key, f, now); return;
    case FSDPI_STORE_DELETE:
        fsdpi_store_core_remove(core, fsdpi_store_core_find(core, key, fsdpi_hash_text(key)));
        break;
    case FSDPI_STORE_BEAT:
        r->beat.busy = fsdpi_le_i32(f->value);
        r->beat.since_ns = fsdpi_le_i64(f->value + 4);
        (void)fsdpi_frame_text(r->beat.text, sizeof r->beat.text, f->value + 12,
                               f->value_size - 12);
        return;
    case FSDPI_STORE_ASK: fsdpi_store_core_ask(core, conn, f, now); return;
    case FSDPI_STORE_ABORT:
        (void)fsdpi_failure_get(f, &v);
        v.rank = conn->rank;
        fsdpi_store_core_judge(core, &v);
        return;
    default: fsdpi_store_core_bye(core, conn, now); return;
    }
    fsdpi_store_core_send(core, conn, FSDPI_STORE_REPLY, status, f->id, NULL, 0);
}

static int fsdpi_store_core_open(fsdpi_store_core *core, const fsdp_allocator *allocator, int size,
                                 int server_rank, const uint8_t token[32]) {
    memset(core, 0, sizeof *core);
    core->allocator = *allocator;
    core->size = size;
    core->server_rank = server_rank;
    core->join_ns = INT64_MAX;
    memcpy(core->token, token, sizeof core->token);
    core->ranks = (fsdpi_store_rank *)fsdpi_alloc(allocator, (size_t)size * sizeof *core->ranks);
    return core->ranks != NULL;
}

// Makes a connection. Returns NULL if there is no memory.
static fsdpi_conn *fsdpi_store_core_connect(fsdpi_store_core *core,
                                            const uint8_t nonce[FSDPI_STORE_NONCE], int64_t now) {
    fsdpi_conn *conn = (fsdpi_conn *)fsdpi_alloc(&core->allocator, sizeof *conn);
    if (!conn) return NULL;
    conn->rank = -1;
    conn->deadline = fsdpi_store_after(now, FSDPI_STORE_PROOF_NS);
    memcpy(conn->nonce, nonce, sizeof conn->nonce);
    conn->next = core->conns;
    core->conns = conn;
    core->num_conns++;
    fsdpi_store_core_send(core, conn, FSDPI_STORE_CHALLENGE, 0, FSDPI_STORE_VERSION, nonce,
                          sizeof conn->nonce);
    return conn;
}

// Ends a connection on which a frame was changed. The other direction is intact: the rank gets the
// reason.
static void fsdpi_store_core_cut_off(fsdpi_store_core *core, fsdpi_conn *conn, int64_t now) {
    int rank = conn->rank;
    if (rank < 0) {
        fsdpi_conn_break(conn, FSDP_OK, NULL);
        return;
    }
    core->ranks[rank].state = FSDPI_PEER_LOST;
    fsdpi_store_core_fail(core, FSDP_ERR_IO, rank,
                          "[E792] rank %d is cut off: its messages to the store were changed on "
                          "their way, or others were put between them: look at the network "
                          "between them",
                          rank);
    fsdpi_store_core_forget(core, conn, INT64_MIN);
    fsdpi_conn_end(conn, now);
}

// Handles bytes that have arrived on a connection.
static void fsdpi_store_core_feed(fsdpi_store_core *core, fsdpi_conn *conn, const void *data,
                                  size_t size, int64_t now) {
    fsdpi_frame f;
    if (conn->state < FSDPI_CONN_RANK && fsdpi_queue_size(&conn->in) + size > FSDPI_STORE_FIRST) {
        fsdpi_conn_break(conn, FSDP_OK, NULL);
        return;
    }
    if (conn->state > FSDPI_CONN_RANK) return;
    if (!fsdpi_queue_add(&core->allocator, &conn->in, data, size))
        fsdpi_conn_break(conn, FSDP_ERR_OUT_OF_MEMORY,
                         "is cut off: the store has no memory for its messages");
    while (conn->state <= FSDPI_CONN_RANK) {
        int whole = fsdpi_frame_get(&conn->in, &f);
        if (whole == 0) return;
        if (whole < 0) {
            fsdpi_store_core_cut_off(core, conn, now);
            return;
        }
        if (conn->state == FSDPI_CONN_UNTRUSTED) fsdpi_store_core_prove(core, conn, &f, now);
        else if (!fsdpi_seal_open(&conn->seal_in, &f)) fsdpi_store_core_cut_off(core, conn, now);
        else if (conn->state == FSDPI_CONN_PROVEN) fsdpi_store_core_hello(core, conn, &f, now);
        else fsdpi_store_core_frame(core, conn, &f, now);
        fsdpi_frame_drop(&core->allocator, &conn->in);
    }
}

// Frees a connection that has ended, or will be closed. If its rank has not left, it is lost.
static void fsdpi_store_core_disconnect(fsdpi_store_core *core, fsdpi_conn *conn, int64_t now) {
    int rank = conn->rank;
    fsdp_status status = conn->why ? conn->status : FSDP_ERR_PEER_LOST;
    const char *why = conn->why ? conn->why : "has died or ended without fsdp_shutdown";
    fsdpi_conn **link = &core->conns;
    while (*link != conn) link = &(*link)->next;
    *link = conn->next;
    core->num_conns--;
    fsdpi_store_core_forget(core, conn, INT64_MIN);
    fsdpi_queue_free(&core->allocator, &conn->in);
    fsdpi_queue_free(&core->allocator, &conn->out);
    fsdpi_free(&core->allocator, conn);
    if (rank < 0 || core->closing) return;
    char last[400];
    fsdpi_text t = {last, sizeof last, 0};
    core->ranks[rank].state = FSDPI_PEER_LOST;
    fsdpi_peer p = fsdpi_store_core_peer(core, rank, now);
    fsdpi_say_peer(&t, &p);
    fsdpi_store_core_fail(core, status, rank, "[E706] rank %d %s; %s", rank, why, last);
}

// Fails the world if ranks are missing at the deadline of joining.
static void fsdpi_store_core_late(fsdpi_store_core *core) {
    char list[200];
    fsdpi_text t = {list, sizeof list, 0};
    int missing = 0, said = 0;
    for (int r = 0; r < core->size; r++) missing += core->ranks[r].state == FSDPI_PEER_ABSENT;
    core->join_ns = INT64_MAX;
    fsdpi_text_add(&t, missing > 1 ? "ranks" : "rank");
    for (int r = 0; r < core->size && said < 16; r++)
        if (core->ranks[r].state == FSDPI_PEER_ABSENT)
            fsdpi_text_add(&t, "%s %d", said++ ? "," : "", r);
    if (missing > said) fsdpi_text_add(&t, " and %d more", missing - said);
    fsdpi_store_core_fail(
        core, FSDP_ERR_TIMEOUT, -1,
        "[E707] %s %s not joined within %.1f s. The store is at %s: find out what %s there "
        "(FSDP_STORE, MASTER_ADDR and MASTER_PORT give the address, FSDP_TIMEOUT_MS gives the "
        "time)%s",
        list, missing > 1 ? "have" : "has", (double)core->join_timeout_ns * 1e-9, core->where,
        missing > 1 ? "keeps them from getting" : "keeps it from getting",
        core->num_refused ? "; others have called with another token: set FSDP_TOKEN and "
                            "FSDP_JOB_ID to the same values on all ranks"
        : core->num_old   ? "; others have called that speak version 1 of the store's protocol: "
                            "start all ranks with the same build"
                          : "");
}

// Handles all deadlines that have passed. Returns the time of the next call.
static int64_t fsdpi_store_core_expire(fsdpi_store_core *core, int64_t now) {
    if (core->join_ns <= now) fsdpi_store_core_late(core);
    fsdpi_store_core_forget(core, NULL, now);
    int64_t next = core->join_ns;
    for (fsdpi_conn *conn = core->conns; conn; conn = conn->next) {
        if (conn->state == FSDPI_CONN_RANK || conn->state == FSDPI_CONN_BROKEN) continue;
        if (conn->deadline <= now) fsdpi_conn_break(conn, FSDP_OK, NULL);
        else if (conn->deadline < next) next = conn->deadline;
    }
    for (fsdpi_store_wait *wait = core->waits; wait; wait = wait->next)
        if (wait->deadline < next) next = wait->deadline;
    return next;
}

// Returns the worth of a connection, from 0, which is being refused, to 3, a rank's.
static int fsdpi_conn_worth(const fsdpi_conn *conn) {
    if (conn->state == FSDPI_CONN_RANK) return 3;
    // seal_out is on: it has the right token.
    return conn->seal_out.on ? 2 : conn->state == FSDPI_CONN_UNTRUSTED;
}

/* Closes the oldest of the least valuable connections, if there are too many. So connections that
   are being refused do not keep out a rank. Returns 0 if all connections are ranks'. */
static int fsdpi_store_core_evict(fsdpi_store_core *core) {
    fsdpi_conn *least = NULL;
    for (fsdpi_conn *conn = core->conns; conn; conn = conn->next) // newest first
        if (fsdpi_conn_worth(conn) <= (least ? fsdpi_conn_worth(least) : 2)) least = conn;
    if (least) fsdpi_conn_break(least, FSDP_OK, NULL);
    return least != NULL;
}

// Returns 1 if ranks that have yet to connect must get the failure: a lost rank, or a mismatch.
static int fsdpi_store_core_owes(const fsdpi_store_core *core) {
    int absent = 0, status = core->failure.status;
    for (int r = 0; r < core->size; r++) absent += core->ranks[r].state == FSDPI_PEER_ABSENT;
    return (status == FSDP_ERR_PEER_LOST || status == FSDP_ERR_MISMATCH) && absent;
}

static void fsdpi_store_core_say_closing(fsdpi_store_core *core, int64_t now) {
    fsdpi_store_core_push(core, FSDPI_STORE_CLOSING, NULL, 0);
    core->closing = 1;
    for (fsdpi_conn *conn = core->conns; conn; conn = conn->next)
        if (conn->state != FSDPI_CONN_BROKEN) fsdpi_conn_end(conn, now);
}

static void fsdpi_store_core_close(fsdpi_store_core *core) {
    core->closing = 1;
    while (core->conns) fsdpi_store_core_disconnect(core, core->conns, 0);
    fsdpi_store_core_clear(core);
    fsdpi_free(&core->allocator, core->ranks);
}

#endif // FSDPI_BACKENDS_STORE_CORE_H
