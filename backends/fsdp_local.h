/* fsdp_local.h - shared memory between the ranks of one host, within a world of several hosts

   A backend whose ranks meet at a store opens a world of shared memory for the ranks of one host,
   the local ranks (`local` in names). That world has the rank numbers of the whole world, but only
   the local ranks as members, and memory that peers read comes from it. A failure goes to the
   store, and every wait ends with the failure that the store keeps. If the store has ended, or does
   not answer, the first failure of a local rank applies to all local ranks.

   Rank 0 decides once which ranks share memory, from facts that all ranks publish in the store: two
   ranks do if their hosts and users are equal, and both can share memory.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_LOCAL_H
#define FSDPI_BACKENDS_LOCAL_H

#include "../src/base/os.h"
#include "../src/base/reduce.h"
#include "../src/base/text.h"
#include "../src/core/alloc.h"
#include "fsdp_comm.h"
#include "fsdp_shm_world.h" // the memory, and collectives in it
#include "fsdp_signature.h"
#include "fsdp_store.h"
#include "fsdp_store_frames.h"
#include "fsdp_store_world.h" // rendezvous, and the world's failure

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define FSDPI_LOCAL_TICKET 16

typedef struct fsdpi_local_world {
    fsdpi_shm_world shm;
    fsdpi_store_world *outer;
    char job[64];
} fsdpi_local_world;

// The ranks of a world that share a host.
typedef struct fsdpi_local_hosts {
    uint8_t ticket[FSDPI_LOCAL_TICKET]; // a secret name of the worlds of shared memory
    int32_t first[FSDPI_MAX_SRCS];      // by rank: the first rank that shares memory with it
    int32_t comm_threads;                      // default number of worker threads; 0: no default
} fsdpi_local_hosts;

// The facts that a rank publishes in the store.
typedef struct fsdpi_local_shown {
    char host[96], user[48]; // "": not known
    int32_t most;            // ranks of the world that may share memory; 0: this rank cannot
    int32_t cores;           // cores that this rank may use
} fsdpi_local_shown;

/* -------------------------------------------------------------------------------------------- */
// Failures. All of them go to the store.

static fsdpi_store_world *fsdpi_local_outer(const fsdpi_comm_world *w) {
    return ((const fsdpi_local_world *)(const void *)w)->outer;
}

static int fsdpi_local_has(const fsdpi_comm *base, int rank) {
    int has = 0;
    for (int k = 0; k < base->size; k++) has |= base->ranks[k] == rank;
    return has;
}

// Returns a member that has ended; -1: none.
static int fsdpi_local_gone(const fsdpi_comm *base) {
    const fsdpi_shm_world *w = (const fsdpi_shm_world *)(const void *)base->world;
    for (int k = 0; k < base->size; k++) {
        int rank = (int)base->ranks[k];
        if (rank == base->boot->rank) continue;
        if (FSDPI_LOAD(&w->peers[rank].state) == FSDPI_SHM_LEFT) return k;
        if (fsdpi_shm_has_file(w) && fsdpi_shm_is_dead(w, rank)) return k;
    }
    return -1;
}

/* Gives a failure to the store, and to the local ranks. If the store has ended or does not answer,
   the local ranks agree on the first failure. Each would otherwise name the peer whose end it has
   noticed. */
static void fsdpi_local_tell(fsdpi_comm *c, fsdp_status status, const char *subject,
                             const char *reason) {
    fsdpi_store *store = fsdpi_local_outer(c->world)->store;
    const int64_t until = fsdpi_boot_now(c->boot) + FSDPI_STORE_ABORT_NS;
    fsdpi_failure first;
    fsdpi_shm_tell(c, status, subject, reason);
    (void)fsdpi_shm_failure(c->world, &first); // shared memory has a failure now
    int is_first = first.rank == c->boot->rank;
    while (!is_first && !fsdpi_store_ended(store) && fsdpi_boot_now(c->boot) < until)
        fsdpi_sleep_ns(1000000);
    if (!is_first || fsdpi_store_ended(store)) fsdpi_store_judge(store, &first);
    fsdpi_store_abort(store, status, subject, reason);
}

static int fsdpi_local_failure(fsdpi_comm_world *w, fsdpi_failure *out) {
    return fsdpi_store_world_failure(&fsdpi_local_outer(w)->base, out);
}

// Reads the state of a rank from the store, which also has the time of its last beat. If the store
// does not answer, reads it from common memory.
static int fsdpi_local_ask(fsdpi_comm *c, int rank, fsdpi_peer *out) {
    return fsdpi_store_world_ask_of(fsdpi_local_outer(c->world), rank, out) ||
           (fsdpi_local_has(c, rank) && fsdpi_shm_ask(c, rank, out));
}

// Wakes threads that sleep in the comm, after a failure. Any thread may call it.
static void fsdpi_local_wake(fsdpi_comm *base) {
    fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    int shared = fsdpi_shm_world_of(c)->fd >= 0;
    fsdpi_futex_wake_all(&c->group->generation, shared);
    fsdpi_futex_wake_all(&c->places[base->index].bell, shared);
}

// clang-format off
static const fsdpi_transport fsdpi_local_transport = {
    sizeof(fsdpi_shm_comm), sizeof(fsdpi_local_world), FSDPI_MAX_SRCS,
    {FSDPI_SHM_KINDS, FSDP_CAP_FUSED_REDUCE, 2, 0, NULL, NULL},
    fsdpi_shm_open_world, fsdpi_shm_prepare, fsdpi_shm_connect, fsdpi_shm_leave, fsdpi_shm_close,
    fsdpi_shm_show, fsdpi_shm_hear, fsdpi_shm_move, NULL,
    fsdpi_local_tell, fsdpi_local_failure, fsdpi_local_ask,
    fsdpi_shm_take, fsdpi_shm_give, fsdpi_advise_host};
// clang-format on

/* -------------------------------------------------------------------------------------------- */
// Discovery of local ranks. Invariant: all ranks use the result of rank 0.

// Returns 1 if this process can map a file that other ranks map, too.
static int fsdpi_local_can_share(void) {
    int fd = fsdpi_shared_file();
    if (fd >= 0) (void)close(fd);
    return fd >= 0 && !fsdpi_files_are_limited();
}

/* Collects this rank's facts. The host is its kernel, and the network namespace, in which ranks see
   each other's abstract sockets. The user is there since only ranks of one user share memory. */
static void fsdpi_local_say_host(const fsdp_boot *boot, int most, fsdpi_local_shown *shown) {
    char id[64] = "";
    const uint64_t net = fsdpi_namespace("net"), user = fsdpi_namespace("user");
    fsdpi_text host = {shown->host, sizeof shown->host, 0};
    fsdpi_text name = {shown->user, sizeof shown->user, 0};
    memset(shown, 0, sizeof *shown);
    shown->most = most;
    shown->cores = fsdpi_cores();
    if (boot->threads) {
        fsdpi_text_add(&host, "one process");
        return;
    }
    if (!fsdpi_local_can_share()) shown->most = 0;
    if (!fsdpi_boot_text(id, sizeof id) || !net || !user) return;
    fsdpi_text_add(&host, "%s %llu", id, (unsigned long long)net);
    fsdpi_text_add(&name, "%llu %lu", (unsigned long long)user, (unsigned long)getuid());
}

// Returns 1 if ranks j <= k may share memory, by the facts that they publish.
static int fsdpi_local_share(const fsdpi_local_shown *all, int j, int k) {
    int most = all[k].most;
    return j == k ||
           (all[k].host[0] && most && !strcmp(all[j].host, all[k].host) &&
            !strcmp(all[j].user, all[k].user) && all[j].most == most && j / most == k / most);
}

static void fsdpi_local_key(char *key, size_t cap, int rank) {
    (void)snprintf(key, cap, "near/%d", rank);
}

// Fails the world because a rank has not published its facts before the deadline.
static fsdp_status fsdpi_local_late(fsdpi_comm *c, int rank) {
    uint8_t missing[FSDPI_MAX_SRCS];
    memset(missing, 0, sizeof missing);
    missing[rank] = 1;
    return fsdpi_store_world_late(c, missing, "connected");
}

/* Returns the default number of worker threads. Across hosts the caller can compute while bytes
   travel: one thread, and a second one if a core is free for it. Within a host there are none,
   since no call waits for a network. */
static int fsdpi_local_comm_threads(const fsdpi_local_shown *all, int size) {
    int are_several = 0, have_cores = 1;
    for (int k = 0; k < size; k++) {
        int ranks = 0;
        for (int j = 0; j < size; j++) ranks += !strcmp(all[j].host, all[k].host);
        are_several |= ranks < size || !all[k].host[0];
        have_cores &= all[k].cores >= 2 * ranks;
    }
    return are_several ? 1 + have_cores : 0;
}

// Reads the facts of all ranks, on rank 0, and publishes the ranks that share memory.
static fsdp_status fsdpi_local_sort(fsdpi_comm *c, fsdpi_local_hosts *hosts) {
    fsdpi_store *store = fsdpi_store_world_of(c)->store;
    const size_t room = (size_t)c->size * sizeof(fsdpi_local_shown);
    fsdpi_local_shown *all = (fsdpi_local_shown *)fsdpi_alloc(&c->boot->allocator, room);
    fsdp_status status = FSDP_OK;
    char key[32];
    if (!all) return fsdpi_comm_no_memory(c, "names of hosts", room);
    for (int k = 0; k < c->size && !status; k++) {
        size_t bytes;
        fsdpi_local_key(key, sizeof key, k);
        status = fsdpi_store_get(store, key, &all[k], sizeof *all, &bytes,
                                 fsdpi_comm_left_to_open(c->world));
        if (status == FSDP_ERR_TIMEOUT) status = fsdpi_local_late(c, k);
        if (!status && bytes != sizeof *all) status = FSDP_ERR_INTERNAL;
        for (hosts->first[k] = 0; !status && !fsdpi_local_share(all, hosts->first[k], k);)
            hosts->first[k]++;
    }
    if (!status) hosts->comm_threads = fsdpi_local_comm_threads(all, c->size);
    fsdpi_free(&c->boot->allocator, all);
    if (status) return status;
    if (!fsdpi_random(hosts->ticket, sizeof hosts->ticket)) return FSDP_ERR_BACKEND;
    return fsdpi_store_set(store, "near", hosts, sizeof *hosts);
}

// Finds the ranks that share memory. All ranks of the world call it.
static fsdp_status fsdpi_local_find(fsdpi_comm *c, fsdpi_local_hosts *hosts) {
    fsdpi_store *store = fsdpi_store_world_of(c)->store;
    char text[FSDPI_REASON], key[32];
    fsdpi_local_shown shown;
    fsdpi_text error = {text, sizeof text, 0};
    int most = FSDPI_MAX_SRCS;
    size_t bytes;
    for (int k = 0; k < c->size; k++) hosts->first[k] = k;
    fsdp_status status = fsdpi_env_int("FSDP_GLOO_NEAR", 1, FSDPI_MAX_SRCS, &most, &error);
    if (status) return fsdpi_comm_fail(c, status, "%s", text);
    if (c->size == 1) return FSDP_OK;
    fsdpi_local_say_host(c->boot, most, &shown);
    fsdpi_local_key(key, sizeof key, c->index);
    status = fsdpi_store_set(store, key, &shown, sizeof shown);
    if (!status) status = fsdpi_store_world_show_host(c);
    if (!status && c->index == 0) status = fsdpi_local_sort(c, hosts);
    if (!status && c->index != 0)
        status = fsdpi_store_get(store, "near", hosts, sizeof *hosts, &bytes,
                                 fsdpi_comm_left_to_open(c->world));
    if (status == FSDP_ERR_TIMEOUT && c->index != 0) return fsdpi_local_late(c, 0);
    if (!status && c->index != 0 && bytes != sizeof *hosts) status = FSDP_ERR_INTERNAL;
    if (fsdpi_comm_failed(c)) return fsdpi_comm_report(c);
    if (!status) return FSDP_OK;
    return fsdpi_comm_fail(
        c, status, "[E761] this rank could not learn from the store of %s who shares its host: %s",
        fsdpi_store_who(store), fsdp_status_name(status));
}

// Deletes the keys. Requires that all ranks have read them.
static void fsdpi_local_forget(fsdpi_comm *c) {
    fsdpi_store *store = fsdpi_store_world_of(c)->store;
    char key[32];
    fsdpi_local_key(key, sizeof key, c->index);
    if (c->size > 1) (void)fsdpi_store_delete(store, key); // a key that stays does no harm
    if (c->size > 1 && c->index == 0) (void)fsdpi_store_delete(store, "near");
}

/* -------------------------------------------------------------------------------------------- */
// The world of the local ranks, and its groups.

static int fsdpi_local_is(const fsdpi_local_hosts *hosts, int a, int b) {
    return hosts->first[a] == hosts->first[b];
}

// Returns 1 if a member has arrived at this rank's last barrier of the comm.
static int fsdpi_local_has_come(fsdpi_comm *base, int k) {
    const fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    return (int32_t)(FSDPI_LOAD(&c->places[k].arrived) - c->barrier) >= 0;
}

// Returns `status`. A failure in `local` gives c its text.
static fsdp_status fsdpi_local_result(fsdpi_comm *c, const fsdpi_comm *local, fsdp_status status) {
    if (status) fsdpi_copy_name(c->error, sizeof c->error, local->error);
    return status;
}

// Writes the local members of a comm, in its order, and this rank's index among them. Returns their
// number.
static int fsdpi_local_members(const fsdpi_local_hosts *hosts, const fsdpi_comm *c, int32_t *ranks,
                               int *index) {
    int count = 0;
    for (int k = 0; k < c->size; k++) {
        if (!fsdpi_local_is(hosts, (int)c->ranks[k], c->boot->rank)) continue;
        if (k == c->index) *index = count;
        ranks[count++] = c->ranks[k];
    }
    return count;
}

// Opens the world of this host's ranks. *out stays NULL if there are no others.
static fsdp_status fsdpi_local_open(fsdpi_comm *c, const fsdpi_local_hosts *hosts,
                                    fsdpi_comm **out) {
    int32_t ranks[FSDPI_MAX_SRCS];
    int index = 0, count = fsdpi_local_members(hosts, c, ranks, &index);
    if (count < 2) return FSDP_OK;
    fsdpi_comm *local = fsdpi_comm_make(&fsdpi_local_transport, c->boot, count);
    if (!local)
        return fsdpi_comm_no_memory(c, "ranks of this host",
                                    sizeof(fsdpi_shm_comm) + sizeof(fsdpi_local_world));
    fsdpi_local_world *w = (fsdpi_local_world *)local->world;
    fsdpi_text job = {w->job, sizeof w->job, 0};
    for (int i = 0; i < FSDPI_LOCAL_TICKET; i++) fsdpi_text_add(&job, "%02x", hosts->ticket[i]);
    fsdpi_text_add(&job, "-%d", (int)hosts->first[c->index]);
    local->world->boot.job = w->job;
    local->world->failed = c->world->failed;
    local->world->open_ns = c->world->open_ns;
    w->outer = fsdpi_store_world_of(c);
    local->index = index;
    local->size = count;
    memcpy(local->ranks, ranks, (size_t)count * sizeof *ranks);
    local->now = c->now;
    fsdp_status status = fsdpi_local_result(c, local, fsdpi_shm_open_world(local));
    if (!status) *out = local;
    if (!status) return FSDP_OK;
    // Only this rank knows the failure: give it to all ranks.
    const char *why = strstr(local->error, "[E");
    if (!fsdpi_comm_failed(c)) status = fsdpi_comm_fail(c, status, "%s", why ? why : local->error);
    fsdpi_comm_close((fsdp_comm *)(void *)local);
    return status;
}

/* Makes the comm of a group's local members, if there are several. All local members of the parent
   call this. child NULL: this rank is in no group. */
static fsdp_status fsdpi_local_split(fsdpi_comm *parent, fsdpi_comm *local,
                                     const fsdpi_local_hosts *hosts, const fsdpi_comm *child,
                                     const fsdp_group *group, fsdpi_comm **out) {
    int32_t ranks[FSDPI_MAX_SRCS];
    fsdp_group g = *group;
    fsdp_comm *made = NULL;
    int index = 0, count = child ? fsdpi_local_members(hosts, child, ranks, &index) : 0;
    g.ranks = ranks, g.index = index, g.size = count;
    if (count < 2) g.color = -1;
    fsdp_status status = fsdpi_comm_split((fsdp_comm *)(void *)local, &g, &made);
    *out = (fsdpi_comm *)(void *)made;
    return fsdpi_local_result(parent, local, status);
}

#endif // FSDPI_BACKENDS_LOCAL_H
