/* fsdp_store_world.h - a world whose ranks meet at a store, which distributes failures

   For backends without common memory. The store keeps the world's failure, pushes it to all ranks,
   and makes one itself when a rank is lost. A backend's world begins with fsdpi_store_world; its
   table has the functions below.
   Callers: fsdp_nccl.h (fsdpi_store_world_tell), fsdp_gloo.h (fsdpi_store_world_failure) and
     fsdp_local.h (fsdpi_store_world_of).

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_STORE_WORLD_H
#define FSDPI_BACKENDS_STORE_WORLD_H

#include "../src/base/macros.h"
#include "../src/base/os.h"
#include "../src/base/text.h"
#include "fsdp_comm.h" // the comm base
#include "fsdp_signature.h"
#include "fsdp_store.h" // where ranks meet
#include "fsdp_store_core.h"
#include "fsdp_store_frames.h"
#include "fsdp_store_server.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define FSDPI_STORE_ASK_NS   ((int64_t)80000000)   // for the store to answer about a rank
#define FSDPI_STORE_CAUSE_NS ((int64_t)1000000000) // for the store to find why a connection ended

typedef struct fsdpi_store_world {
    fsdpi_comm_world base;
    fsdpi_store *store; // NULL: the ranks have not met yet
    char job[160];      // name of the job, if ranks are threads
    int is_mute;        // 1: the store has failed to answer, and is not asked again
    int shows_hosts;    // 1: the store has an address of each rank's host
} fsdpi_store_world;

static fsdpi_store_world *fsdpi_store_world_of(const fsdpi_comm *c) {
    return (fsdpi_store_world *)(void *)c->world;
}

/* Meets the other ranks at the store. Ranks that are threads meet on their host, under a name that
   no other job can have. beat and event: see fsdpi_store_desc; their user is the world. */
static fsdp_status fsdpi_store_world_open(fsdpi_comm *c,
                                          void (*beat)(void *user, fsdpi_store_beat *out),
                                          void (*event)(void *user)) {
    fsdpi_store_world *w = fsdpi_store_world_of(c);
    fsdpi_store_desc desc;
    char text[FSDPI_REASON];
    memset(&desc, 0, sizeof desc);
    desc.boot = w->base.boot;
    desc.beat = beat;
    desc.event = event;
    desc.user = w;
    if (desc.boot.threads) {
        (void)snprintf(w->job, sizeof w->job, "%.100s-%d-%p", desc.boot.job, (int)getpid(),
                       (void *)desc.boot.threads);
        desc.boot.job = w->job;
        desc.boot.store = "host:";
    }
    fsdp_status status = fsdpi_store_open(&desc, &w->store, text, sizeof text);
    if (status) return fsdpi_comm_error(c, status, "%s", text);
    w->base.failed = &w->store->judged;
    return FSDP_OK;
}

static void fsdpi_store_world_tell(fsdpi_comm *c, fsdp_status status, const char *subject,
                                   const char *reason) {
    fsdpi_store_abort(fsdpi_store_world_of(c)->store, status, subject, reason);
}

static int fsdpi_store_world_failure(fsdpi_comm_world *w, fsdpi_failure *out) {
    return fsdpi_store_failure(((fsdpi_store_world *)(void *)w)->store, out);
}

static void fsdpi_store_world_host_key(char *key, size_t cap, int rank) {
    (void)snprintf(key, cap, "host/%d", rank);
}

// Publishes an address of this rank's host, for the texts of other ranks. All ranks call it.
static FSDPI_UNUSED fsdp_status fsdpi_store_world_show_host(fsdpi_comm *c) {
    fsdpi_store_world *w = fsdpi_store_world_of(c);
    const char *address = fsdpi_store_address(w->store);
    char key[32];
    fsdpi_store_world_host_key(key, sizeof key, c->boot->rank);
    w->shows_hosts = 1;
    return fsdpi_store_set(w->store, key, address, strlen(address));
}

// Queries the store for the state of a rank. Returns 0 if the store does not answer.
static int fsdpi_store_world_ask_of(fsdpi_store_world *w, int rank, fsdpi_peer *out) {
    char key[32];
    size_t bytes;
    if (FSDPI_LOAD(&w->is_mute)) return 0;
    if (fsdpi_store_ask(w->store, rank, out, FSDPI_STORE_ASK_NS)) {
        FSDPI_STORE(&w->is_mute, 1);
        return 0;
    }
    fsdpi_store_world_host_key(key, sizeof key, rank);
    if (w->shows_hosts) // *out is zeroed, which ends the text
        (void)fsdpi_store_get(w->store, key, out->host, sizeof out->host - 1, &bytes,
                              FSDPI_STORE_ASK_NS / 8);
    return 1;
}

static int fsdpi_store_world_ask(fsdpi_comm *c, int rank, fsdpi_peer *out) {
    return fsdpi_store_world_ask_of(fsdpi_store_world_of(c), rank, out);
}

/* Returns the cause of a transport's error: a member that has left, or one of the constants below.
   A transport names no rank, or only a neighbour (a connection broke, a peer aborted); the store
   finds dead or closed ranks independently. So a failure of the world, or a member that has left,
   is preferred to the transport's error, if it is known before `until`. who: the only member that
   counts, or -1. */
enum { FSDPI_CAUSE_FAILURE = -1, FSDPI_CAUSE_AWAITED = -2, FSDPI_CAUSE_UNKNOWN = -3 };
static int fsdpi_store_world_cause(const fsdpi_comm *c, int who, int64_t until) {
    fsdpi_store *store = fsdpi_store_world_of(c)->store;
    if (fsdpi_comm_failed(c)) return FSDPI_CAUSE_FAILURE;
    for (int k = 0; k < c->size; k++)
        if ((who < 0 ? k != c->index : k == who) && fsdpi_store_has_left(store, (int)c->ranks[k]))
            return k;
    return c->size > 1 && fsdpi_boot_now(c->boot) < until ? FSDPI_CAUSE_AWAITED
                                                          : FSDPI_CAUSE_UNKNOWN;
}

// Waits for fsdpi_store_world_cause in a call of this comm, but not beyond the call's deadline.
// Never returns AWAITED.
static int fsdpi_store_world_await_cause(const fsdpi_comm *c, int who, int64_t close_ns) {
    int64_t until = fsdpi_boot_now(c->boot) + close_ns;
    int64_t deadline = fsdpi_store_after(c->now.since_ns, c->boot->timeout_ns);
    int cause;
    while ((cause = fsdpi_store_world_cause(c, who, until < deadline ? until : deadline)) ==
           FSDPI_CAUSE_AWAITED)
        fsdpi_sleep_ns(1000000);
    return cause;
}

// Fails the world after the deadline, and names the missing members. verb: the participle in the
// text "rank 1 has not VERB".
static FSDPI_UNUSED fsdp_status fsdpi_store_world_late(fsdpi_comm *c, const uint8_t *missing,
                                                       const char *verb) {
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    if (!fsdpi_say_late(&t, c, missing, verb)) return fsdpi_comm_report(c);
    return fsdpi_comm_fail(c, FSDP_ERR_TIMEOUT, "%s", reason);
}

#endif // FSDPI_BACKENDS_STORE_WORLD_H
