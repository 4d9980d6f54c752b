/* fsdp_shm_world.h - ranks of one host: common memory, barriers, collectives, and rendezvous

   The implementation of the backend fsdp_shm.h, which says how it works. fsdp_local.h uses it for
   the ranks of a host.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif
#ifndef FSDPI_BACKENDS_SHM_WORLD_H
#define FSDPI_BACKENDS_SHM_WORLD_H

#include "../src/base/hash.h"
#include "../src/base/macros.h"
#include "../src/base/os.h"
#include "../src/base/os_net.h"
#include "../src/base/reduce.h"
#include "../src/base/text.h"
#include "../src/core/alloc.h"
#include "fsdp_comm.h" // the base of all backends
#include "fsdp_memory.h"
#include "fsdp_signature.h"

#include <errno.h>
#include <fcntl.h> // fcntl, struct flock
#include <poll.h>  // poll
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h> // the rendezvous, SCM_RIGHTS
#include <sys/stat.h>   // fstat
#include <sys/un.h> // sockaddr_un
#include <unistd.h>

#define FSDPI_SHM_SLICE_NS  50000000 // longest sleep between checks for aborts and dead peers
#define FSDPI_SHM_SPIN_NS   50000    // longest spin before a sleep: about the cost of waking a core
#define FSDPI_SHM_SPINS     512      // most turns of a spin, even if the clock stands still
#define FSDPI_SHM_SMALL     16384    // bytes up to which each rank computes all of an all_reduce
#define FSDPI_SHM_PIECE     65536    // bytes at a time: peers read them next, from the caches
#define FSDPI_SHM_STREAM    ((size_t)192 << 10) // bytes from which on a copy bypasses the caches
#define FSDPI_SHM_STEP      ((size_t)256 << 20) // memory is reserved in steps of this many bytes
#define FSDPI_SHM_DATA      ((uint64_t)1 << 40) // file offset of allocations; groups lie before it
#define FSDPI_SHM_ARENA     ((uint64_t)1 << 42) // file offsets of one rank's allocations
#define FSDPI_SHM_MAX_BYTES ((size_t)1 << 46)   // most bytes of one allocation, over all ranks
#define FSDPI_SHM_NAP_NS    500000   // first nap of a rank that asks for the file
#define FSDPI_SHM_NAP_MAX   20000000 // its longest one
#define FSDPI_SHM_MAGIC     "fsdpshm1"
#define FSDPI_SHM_KINDS                                                                            \
    (1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER | 1u << FSDP_OP_ALL_REDUCE |          \
     1u << FSDP_OP_BROADCAST | 1u << FSDP_OP_ALL_TO_ALL | 1u << FSDP_OP_SEND | 1u << FSDP_OP_RECV)

enum { FSDPI_SHM_ABSENT = 0, FSDPI_SHM_JOINED, FSDPI_SHM_LEFT };

// One rank in a group; whole cache lines.
typedef struct fsdpi_shm_place {
    uint64_t record[FSDPI_RECORD_WORDS]; // [relaxed]
    uint32_t arrived; // [release] number of the last barrier at which this rank has arrived
    uint32_t pad0[15 - sizeof(fsdpi_signature) / 4 % 16];
    // send and recv
    uint64_t call;   // [release] the last call: its number, and in the low half the other member
    uint32_t done;   // [release] number of the last call that this rank has finished
    uint32_t bell;   // [seq_cst] incremented by another member
    uint32_t asleep; // [seq_cst] 1: this rank sleeps on the bell
    uint32_t closed; // [release] 1: it has left the group
    uint32_t pad1[10];
} fsdpi_shm_place;

/* Common block of a comm: a central barrier, then a place for each rank. `count` counts all
   arrivals so far, modulo 2^32. The arrival that makes it size * number opens barrier `number`. */
typedef struct fsdpi_shm_group {
    uint32_t count; // [release]
    uint32_t pad0[15];
    uint32_t generation; // [release, seq_cst] the last barrier that is open; ranks sleep on it
    uint32_t pad1[15];
    uint32_t sleepers; // [seq_cst]
    uint32_t refs;     // [release] processes
    uint32_t pad2[14];
} fsdpi_shm_group;

// One rank in the world.
typedef struct fsdpi_shm_peer {
    fsdpi_activity trace;
    uint32_t state; // [release] FSDPI_SHM_...
    uint32_t pid;
} fsdpi_shm_peer;

// Threads: a block of the heap that peers use, too, from FSDPI_ALIGN bytes after its start on.
typedef struct fsdpi_shm_block {
    struct fsdpi_shm_block *next;
    fsdp_allocator allocator; // frees the block, for the last user
    int users;                // number of ranks that have not released it
} fsdpi_shm_block;
typedef char fsdpi_shm_block_has_room[FSDPI_ALIGN >= sizeof(fsdpi_shm_block) ? 1 : -1];

// Processes: a map of a peer's allocation that lies at another place than this rank's own.
typedef struct fsdpi_shm_remote {
    char *base;
    uint64_t at;
    size_t part;
} fsdpi_shm_remote;

/* Common block of the world; the peers and the world's group follow. */
typedef struct fsdpi_shm_control {
    uint64_t top;  // [relaxed] processes: file offset of the next group's block
    uint32_t refs; // [release]
    int32_t size;
    uint32_t failed; // [release] 1: a rank is writing `failure`, 2: it is written
    fsdpi_failure failure;
    // threads
    fsdpi_shm_block *blocks;
    fsdp_allocator allocator;
    struct fsdpi_shm_control *next; // in fsdp_threads.common: hosts within one process
    int32_t first;                  // the first world rank of the block
} fsdpi_shm_control;

/* If the world is the local part of another one (fsdp_local.h), boot has rank and size of the whole
   world, and the world's comm has the local ranks. */
typedef struct fsdpi_shm_world {
    fsdpi_comm_world base;
    fsdpi_shm_control *control;
    fsdpi_shm_peer *peers;
    int fd;                 // -1: threads
    int members;            // number of local ranks
    int crowded;            // 1: there are fewer cores than ranks
    uint64_t inode, device; // identify the common file: the program may have closed fd
    void *life;             // a mapping that keeps this rank's lock; NULL: the process keeps it
    int joined;
    size_t page;
    uint64_t next_at;
    uint32_t lock;             // guards the fields below
    uint64_t num_numbers;      // numbers of allocations for which remotes has room
    fsdpi_shm_remote *remotes; // [num_numbers][ranks]
} fsdpi_shm_world;

typedef struct fsdpi_shm_comm {
    fsdpi_comm base;
    fsdpi_shm_group *group;
    fsdpi_shm_place *places;
    uint64_t block; // file offset of the group's block; threads: its address
    uint32_t barrier, waits;
    int64_t spin_ns;        // duration of the spin before a sleep
    const int64_t *since;   // start of the timeout of waits; NULL: each wait has a separate one
    uint32_t calls;         // number of sends and recvs so far
    uint32_t theirs;        // number of the other member's call for this rank; 0: not yet
    fsdpi_shm_place *other; // the member that this rank waits for; NULL: a barrier
    uint64_t small_sums[FSDPI_SHM_SMALL / sizeof(uint64_t)];
    uint32_t met[FSDPI_MAX_SRCS]; // by member: number of its last call for this rank
} fsdpi_shm_comm;

static fsdpi_shm_comm *fsdpi_shm_comm_of(fsdpi_comm *base) {
    return (fsdpi_shm_comm *)(void *)base;
}

static fsdpi_shm_world *fsdpi_shm_world_of(const fsdpi_shm_comm *c) {
    return (fsdpi_shm_world *)(void *)c->base.world;
}

/* -------------------------------------------------------------------------------------------- */
// The failure, in common memory. The first rank that fails writes it. From then on every wait ends,
// and every call returns its status.

// Reads the operation of a rank of the world. Always returns 1.
static int fsdpi_shm_ask(fsdpi_comm *base, int rank, fsdpi_peer *out) {
    const fsdpi_shm_peer *peer = &fsdpi_shm_world_of(fsdpi_shm_comm_of(base))->peers[rank];
    int64_t since_ns;
    memset(out, 0, sizeof *out);
    out->silent_ns = -1;
    if (FSDPI_LOAD(&peer->state) == FSDPI_SHM_ABSENT) return 1;
    out->state = FSDPI_PEER_JOINED; // also if it has left: its last operation is of interest
    out->busy = fsdpi_activity_read(&peer->trace, out->text, sizeof out->text, &since_ns);
    out->since_ns = fsdpi_boot_now(base->boot) - since_ns;
    return 1;
}

static void fsdpi_shm_tell(fsdpi_comm *base, fsdp_status status, const char *subject,
                           const char *reason) {
    const fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    const fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    fsdpi_failure *failure = &w->control->failure;
    uint32_t none = 0;
    if (__atomic_compare_exchange_n(&w->control->failed, &none, 1u, 0, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE)) {
        failure->status = (int32_t)status;
        failure->rank = base->boot->rank;
        failure->lost = -1;
        fsdpi_copy_name(failure->subject, sizeof failure->subject, subject);
        fsdpi_copy_name(failure->reason, sizeof failure->reason, reason);
        FSDPI_STORE(&w->control->failed, 2u);
    }
    // Ranks that sleep in other groups see the failure after at most FSDPI_SHM_SLICE_NS.
    fsdpi_shm_group *group = (fsdpi_shm_group *)(void *)(w->peers + w->control->size);
    fsdpi_futex_wake_all(&group->generation, w->fd >= 0);
    if (!base->is_world) fsdpi_futex_wake_all(&c->group->generation, w->fd >= 0);
}

static int fsdpi_shm_failure(fsdpi_comm_world *base, fsdpi_failure *out) {
    const fsdpi_shm_control *control = ((fsdpi_shm_world *)(void *)base)->control;
    for (int i = 0; i < 100 && FSDPI_LOAD(&control->failed) == 1; i++) fsdpi_sleep_ns(100000);
    uint32_t failed = FSDPI_LOAD(&control->failed);
    if (failed == 2) *out = control->failure;
    if (failed != 1) return failed == 2;
    memset(out, 0, sizeof *out);
    out->status = FSDP_ERR_ABORTED;
    fsdpi_copy_name(out->reason, sizeof out->reason,
                    "a rank ended while it was reporting a failure");
    return 1;
}

/* -------------------------------------------------------------------------------------------- */
// Barriers and waits. A wait ends when all ranks have arrived, the world has failed, a peer has
// ended, or the deadline has passed. Numbers of barriers and calls, and counts, are compared modulo
// 2^32.

// Returns the number of the other member's send or recv for this rank; 0: it has not begun one. The
// other member stays in that call until this rank has finished, too.
static uint32_t fsdpi_shm_call_of(const fsdpi_shm_comm *c, const fsdpi_shm_place *other) {
    uint64_t call = FSDPI_LOAD(&other->call);
    uint32_t number = (uint32_t)(call >> 32), member = (uint32_t)call;
    return member == (uint32_t)c->base.index && number != c->met[other - c->places] ? number : 0;
}

// Returns 1 if this rank's wait is over: for its last barrier, or for the other member of a pair.
static int fsdpi_shm_is_open(const fsdpi_shm_comm *c) {
    if (!c->other) return (int32_t)(FSDPI_LOAD(&c->group->generation) - c->barrier) >= 0;
    if (!c->theirs) return fsdpi_shm_call_of(c, c->other) != 0;
    return (int32_t)(FSDPI_LOAD(&c->other->done) - c->theirs) >= 0;
}

static struct flock fsdpi_shm_byte(int rank) {
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
}

// Locks this rank's byte of the common file. If the system cannot do it by a mapping, the process
// has the lock, and loses it if it closes any descriptor of the file.
static int fsdpi_shm_live(fsdpi_shm_world *w) {
    struct flock lock = fsdpi_shm_byte(w->base.boot.rank);
    w->life = fsdpi_lock_by_mapping(w->fd, w->page, &lock);
    return w->life || !fcntl(w->fd, F_SETLK, &lock);
}

// Returns 1 if the process of a rank has ended without close: then its byte is no longer locked.
static int fsdpi_shm_is_dead(const fsdpi_shm_world *w, int rank) {
    struct flock lock = fsdpi_shm_byte(rank);
    return fcntl(w->fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

// Returns 1 if w->fd is still the common file. If the program has closed it, the number may belong
// to another file.
static int fsdpi_shm_has_file(const fsdpi_shm_world *w) {
    struct stat now;
    return w->fd >= 0 && !fstat(w->fd, &now) && (uint64_t)now.st_dev == w->device &&
           (uint64_t)now.st_ino == w->inode;
}

static void fsdpi_shm_set_file(fsdpi_shm_world *w, int fd) {
    struct stat now;
    w->fd = fd;
    if (fd < 0 || fstat(fd, &now)) return;
    w->device = (uint64_t)now.st_dev;
    w->inode = (uint64_t)now.st_ino;
}

#define FSDPI_SHM_CLOSED                                                                           \
    "the program has closed the library's descriptor of the common file: let it close only those " \
    "that it has opened"

static fsdp_status fsdpi_shm_closed(fsdpi_shm_comm *c) {
    return fsdpi_comm_fail(&c->base, FSDP_ERR_BACKEND, "[E621] " FSDPI_SHM_CLOSED " (%d is not it)",
                           fsdpi_shm_world_of(c)->fd);
}

// Fails if the world has failed, or if a rank for which this rank waits has left or died. thorough:
// also asks the kernel for dead processes.
static fsdp_status fsdpi_shm_check_peers(fsdpi_shm_comm *c, int thorough) {
    // The world of c may not know the failure in common memory yet.
    if (FSDPI_LOAD(&fsdpi_shm_world_of(c)->control->failed)) {
        c->base.world->transport->tell(&c->base, FSDP_ERR_ABORTED, "", "");
        return fsdpi_comm_report(&c->base);
    }
    thorough = thorough && fsdpi_shm_has_file(fsdpi_shm_world_of(c));
    for (int k = 0; k < c->base.size; k++) {
        int rank = c->base.ranks[k];
        fsdpi_shm_peer *peer = &fsdpi_shm_world_of(c)->peers[rank];
        uint32_t state = FSDPI_LOAD(&peer->state);
        int left = state == FSDPI_SHM_LEFT || FSDPI_LOAD(&c->places[k].closed);
        if (c->other && c->other != &c->places[k]) continue;
        if (rank == c->base.boot->rank || state == FSDPI_SHM_ABSENT) continue;
        if (!left && !(thorough && fsdpi_shm_is_dead(fsdpi_shm_world_of(c), rank))) continue;
        // The peer may have opened the barrier before it ended. A rank that closes sets its state
        // before it drops its lock.
        if (fsdpi_shm_is_open(c)) return FSDP_OK;
        uint32_t has_closed = FSDPI_LOAD(&c->places[k].closed);
        left = FSDPI_LOAD(&peer->state) == FSDPI_SHM_LEFT;
        char reason[FSDPI_REASON];
        fsdpi_text t = {reason, sizeof reason, 0};
        if (left) fsdpi_text_add(&t, "[E601] rank %d has shut down; ", rank);
        else if (has_closed) fsdpi_text_add(&t, "[E622] rank %d has closed this group; ", rank);
        else fsdpi_text_add(&t, "[E602] rank %d has died (process %u); ", rank, peer->pid);
        fsdpi_say_last(&t, &c->base, rank);
        return fsdpi_comm_fail(&c->base, FSDP_ERR_PEER_LOST, "%s", reason);
    }
    return FSDP_OK;
}

// Returns 1 if this rank waits for member k.
static int fsdpi_shm_lacks(const fsdpi_shm_comm *c, int k) {
    return c->other ? c->other == &c->places[k] && !fsdpi_shm_is_open(c)
                    : (int32_t)(FSDPI_LOAD(&c->places[k].arrived) - c->barrier) < 0;
}

// Publishes the first rank for which this rank waits; waits 0: none.
static void fsdpi_shm_show_wait(const fsdpi_shm_comm *c, int waits) {
    int k = 0;
    while (waits && k < c->base.size && !fsdpi_shm_lacks(c, k)) k++;
    fsdpi_trace_wait(c->base.world->trace, waits && k < c->base.size ? (int)c->base.ranks[k] : -1);
}

// Fails the world after the deadline; the text names missing ranks. Returns FSDP_OK if all ranks
// have just arrived.
static fsdp_status fsdpi_shm_late(fsdpi_shm_comm *c, const char *verb) {
    uint8_t missing[FSDPI_MAX_SRCS];
    int total = 0;
    for (int k = 0; k < c->base.size; k++) {
        missing[k] = (uint8_t)fsdpi_shm_lacks(c, k);
        total += missing[k];
    }
    if (total == 0) return FSDP_OK;
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    if (!fsdpi_say_late(&t, &c->base, missing, verb)) return fsdpi_comm_report(&c->base);
    return fsdpi_comm_fail(&c->base, FSDP_ERR_TIMEOUT, "%s", reason);
}

static void fsdpi_shm_arrive(fsdpi_shm_comm *c) {
    fsdpi_shm_group *group = c->group;
    c->other = NULL;
    c->barrier++;
    __atomic_store_n(&c->places[c->base.index].arrived, c->barrier, __ATOMIC_RELEASE);
    if (__atomic_add_fetch(&group->count, 1u, __ATOMIC_ACQ_REL) !=
        c->barrier * (uint32_t)c->base.size)
        return;
    // Either this load sees the sleeper, or the sleeper's futex call sees the new generation.
    __atomic_store_n(&group->generation, c->barrier, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&group->sleepers, __ATOMIC_SEQ_CST))
        fsdpi_futex_wake_all(&group->generation, fsdpi_shm_world_of(c)->fd >= 0);
}

/* Spins before a sleep, and returns 1 if the wait is over. A spin without success makes the next
   one shorter; every 64th has the full time. If ranks share cores, each turn yields the core to
   another thread: to let the core sleep and wake it costs five times as much. */
static int fsdpi_shm_spin(fsdpi_shm_comm *c) {
    const fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    const fsdp_boot *boot = &w->base.boot;
    int64_t most = ++c->waits % 64 ? c->spin_ns : FSDPI_SHM_SPIN_NS;
    int64_t end = fsdpi_boot_now(boot) + most;
    for (int i = 0; i < FSDPI_SHM_SPINS && (!i || fsdpi_boot_now(boot) < end); i++) {
        if (w->crowded) fsdpi_yield();
        for (int k = 0; k < 16 && !w->crowded && !fsdpi_shm_is_open(c); k++) fsdpi_pause();
        if (!fsdpi_shm_is_open(c)) continue;
        c->spin_ns = FSDPI_SHM_SPIN_NS;
        return 1;
    }
    c->spin_ns /= 4;
    return 0;
}

// Sleeps until the barrier is open, or the pair's other member has arrived.
static fsdp_status fsdpi_shm_sleep(fsdpi_shm_comm *c, const char *verb) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    fsdpi_shm_place *me = &c->places[c->base.index];
    uint32_t *word = c->other ? &me->bell : &c->group->generation,
             *sleepers = c->other ? &me->asleep : &c->group->sleepers;
    int64_t start = c->since ? *c->since : fsdpi_boot_now(&w->base.boot);
    for (int turn = 0;; turn++) {
        uint32_t seen = FSDPI_LOAD(word);
        fsdpi_shm_show_wait(c, !fsdpi_shm_is_open(c));
        if (fsdpi_shm_is_open(c)) return FSDP_OK;
        if (fsdpi_comm_failed(&c->base)) return fsdpi_comm_report(&c->base);
        fsdp_status status = fsdpi_shm_check_peers(c, turn > 0);
        int64_t left = w->base.boot.timeout_ns - (fsdpi_boot_now(&w->base.boot) - start);
        if (!status && left <= 0) status = fsdpi_shm_late(c, verb);
        if (status) return status;
        __atomic_add_fetch(sleepers, 1u, __ATOMIC_SEQ_CST);
        fsdpi_futex_wait(word, seen,
                         left > 0 && left < FSDPI_SHM_SLICE_NS ? left : FSDPI_SHM_SLICE_NS,
                         w->fd >= 0);
        __atomic_sub_fetch(sleepers, 1u, __ATOMIC_SEQ_CST);
    }
}

/* Takes back this rank's arrival after a failed wait. The caller may overwrite its buffers now: a
   late peer that still copies them must not end the same call with success. The world has failed,
   so this rank arrives at no other barrier. */
static void fsdpi_shm_withdraw(fsdpi_shm_comm *c) {
    fsdpi_shm_place *me = &c->places[c->base.index];
    if (c->other) {
        FSDPI_STORE(&me->done, c->calls - 1);
    } else {
        FSDPI_STORE(&me->arrived, c->barrier - 1);
        __atomic_sub_fetch(&c->group->count, 1u, __ATOMIC_ACQ_REL);
    }
    fsdpi_release_fence();
}

// Waits until the barrier is open, or the pair's other member has arrived. verb: the participle in
// the text "rank 1 has not VERB".
static fsdp_status fsdpi_shm_wait(fsdpi_shm_comm *c, const char *verb) {
    if (fsdpi_shm_is_open(c) || fsdpi_shm_spin(c)) return FSDP_OK;
    fsdp_status status = fsdpi_shm_sleep(c, verb);
    if (status) fsdpi_shm_withdraw(c);
    return status;
}

static fsdp_status fsdpi_shm_barrier(fsdpi_shm_comm *c, const char *verb) {
    fsdpi_shm_arrive(c);
    return fsdpi_shm_wait(c, verb);
}

/* -------------------------------------------------------------------------------------------- */
// Memory that peers may read, and its address in this process. Invariants: a range has real memory
// before a rank can touch it. No range of the file is used twice: so new memory is zero, a late
// reader sees no new data, and a file offset identifies one allocation forever. Freed memory stays
// readable, since a peer may not have seen a failure yet: the file has zeros there, and threads
// keep the block. The call of such a peer fails (fsdpi_shm_withdraw).

static void fsdpi_shm_give_back(const fsdpi_shm_world *w, uint64_t at, size_t bytes) {
    if (!fsdpi_shm_has_file(w)) return;
    fsdpi_file_give_back(w->fd, at, bytes);
}

/* Gives a range of the file real memory, in steps. Checks the free memory before each step: all
   ranks allocate at the same time, and the kernel would kill processes instead of refusing. */
static int fsdpi_shm_reserve(const fsdpi_shm_world *w, uint64_t at, size_t bytes) {
    const char *whose;
    int is_small = bytes < FSDPI_SHM_STEP / 256;
    if (!fsdpi_shm_has_file(w) || (!is_small && (int64_t)bytes > fsdpi_memory_left(&whose)))
        return 0;
    for (size_t done = 0; done < bytes;) {
        size_t step = bytes - done < FSDPI_SHM_STEP ? bytes - done : FSDPI_SHM_STEP;
        int refused = !is_small && (int64_t)step * w->members > fsdpi_memory_left(&whose);
        if (!refused && !fsdpi_file_reserve(w->fd, at + done, step)) {
            done += step;
        } else if (refused || errno != EINTR) {
            fsdpi_shm_give_back(w, at, done);
            return 0;
        }
    }
    return 1;
}

static char *fsdpi_shm_map(const fsdpi_shm_world *w, uint64_t at, size_t bytes) {
    if (!fsdpi_shm_has_file(w)) return NULL;
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, w->fd, (off_t)at);
    return base == MAP_FAILED ? NULL : (char *)base;
}

static size_t fsdpi_shm_round(const fsdpi_shm_world *w, size_t bytes) {
    return (bytes + w->page - 1) / w->page * w->page;
}

/* Threads: allocates a block that `users` ranks must release. Holds the lock, so that the check of
   free memory counts the blocks of other ranks. */
static char *fsdpi_shm_share(fsdpi_shm_world *w, size_t bytes, int users) {
    const char *whose;
    fsdpi_shm_block *block = NULL;
    fsdpi_lock(&w->base.boot.threads->lock);
    if (bytes < FSDPI_SHM_STEP / 256 || (int64_t)bytes < fsdpi_memory_left(&whose))
        block = (fsdpi_shm_block *)fsdpi_alloc(&w->base.boot.allocator, FSDPI_ALIGN + bytes);
    if (block) {
        block->allocator = w->base.boot.allocator;
        block->users = users;
        block->next = w->control->blocks;
        w->control->blocks = block;
    }
    fsdpi_unlock(&w->base.boot.threads->lock);
    return block ? (char *)block + FSDPI_ALIGN : NULL;
}

// Releases a block. The last user frees it; after a failure the last rank that closes does.
static void fsdpi_shm_unshare(fsdpi_shm_world *w, void *base) {
    fsdpi_shm_block *block = (fsdpi_shm_block *)(void *)((char *)base - FSDPI_ALIGN);
    fsdpi_lock(&w->base.boot.threads->lock);
    if (--block->users == 0 && !fsdpi_comm_world_failed(&w->base)) {
        fsdp_allocator allocator = block->allocator;
        fsdpi_shm_block **link = &w->control->blocks;
        while (*link != block) link = &(*link)->next;
        *link = block->next;
        fsdpi_free(&allocator, block);
    }
    fsdpi_unlock(&w->base.boot.threads->lock);
}

// Returns the file offset of a rank's allocation. Each rank has a separate range of the file, as
// ranks of other groups may allocate differently.
static uint64_t fsdpi_shm_offset(uint64_t at, int rank) {
    return at + FSDPI_SHM_ARENA * (uint64_t)rank;
}

// Maps the allocations of all local ranks, one after another, into this process.
static char *fsdpi_shm_map_parts(const fsdpi_shm_world *w, const fsdpi_chunk *chunk) {
    size_t part = chunk->part, ranks = (size_t)w->base.boot.size;
    void *base = mmap(NULL, part * ranks, PROT_NONE, MAP_PRIVATE | FSDPI_ANON, -1, 0);
    if (base == MAP_FAILED) return NULL;
    for (size_t r = 0; r < ranks; r++) {
        if (FSDPI_LOAD(&w->peers[r].state) == FSDPI_SHM_ABSENT) continue;
        void *at = mmap((char *)base + r * part, part, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED, w->fd, (off_t)fsdpi_shm_offset(chunk->at, (int)r));
        if (at != MAP_FAILED) continue;
        (void)munmap(base, part * ranks);
        return NULL;
    }
    return (char *)base;
}

static void fsdpi_shm_give(fsdpi_comm_world *base, const fsdpi_chunk *chunk) {
    fsdpi_shm_world *w = (fsdpi_shm_world *)(void *)base;
    size_t ranks = (size_t)w->base.boot.size;
    if (w->fd < 0) {
        fsdpi_shm_unshare(w, chunk->base);
        return;
    }
    (void)munmap(chunk->base, chunk->part * ranks);
    fsdpi_shm_give_back(w, fsdpi_shm_offset(chunk->at, w->base.boot.rank), chunk->part);
}

/* Returns the lowest number that no allocation of this rank has. Peers keep one mapping for each
   number, so freed allocations do not make the number of mappings grow. */
static uint64_t fsdpi_shm_number(const fsdpi_chunks *chunks) {
    uint64_t number = 0;
    for (int i = 0; i < chunks->count; i++)
        if (chunks->list[i].number == number) number++, i = -1;
    return number;
}

// Takes an allocation. `beside` lists this rank's existing allocations, whose numbers are in use.
static FSDP_COLD fsdp_status fsdpi_shm_take_beside(fsdpi_comm_world *base,
                                                   const fsdpi_chunks *beside, fsdpi_chunk *chunk,
                                                   const char **why) {
    fsdpi_shm_world *w = (fsdpi_shm_world *)(void *)base;
    const size_t size = chunk->size;
    *why = "that is more than the backend can address";
    if (size > FSDPI_SHM_MAX_BYTES / (size_t)base->boot.size || w->next_at + size > FSDPI_SHM_ARENA)
        return FSDP_ERR_OUT_OF_MEMORY;
    *why = "the host has not enough memory";
    chunk->at = w->next_at;
    chunk->number = fsdpi_shm_number(beside);
    if (w->fd < 0) {
        chunk->base = fsdpi_shm_share(w, size, 1);
    } else {
        chunk->part = fsdpi_shm_round(w, size ? size : 1);
        w->next_at += chunk->part;
        uint64_t mine = fsdpi_shm_offset(chunk->at, base->boot.rank);
        if (!fsdpi_shm_has_file(w)) {
            *why = FSDPI_SHM_CLOSED;
            return FSDP_ERR_BACKEND;
        }
        if (!fsdpi_shm_reserve(w, mine, chunk->part)) return FSDP_ERR_OUT_OF_MEMORY;
        *why = "the process has not enough address space";
        chunk->base = fsdpi_shm_map_parts(w, chunk);
        if (!chunk->base) fsdpi_shm_give_back(w, mine, chunk->part);
    }
    return chunk->base ? FSDP_OK : FSDP_ERR_OUT_OF_MEMORY;
}

static fsdp_status fsdpi_shm_take(fsdpi_comm_world *w, fsdpi_chunk *chunk, const char **why) {
    return fsdpi_shm_take_beside(w, &w->chunks, chunk, why);
}

// Makes room for allocations of peers up to `number`.
static int fsdpi_shm_grow_remotes(fsdpi_shm_world *w, uint64_t number) {
    size_t ranks = (size_t)w->base.boot.size, num = number < 8 ? 16 : 2 * (size_t)number;
    if (number < w->num_numbers) return 1;
    fsdpi_shm_remote *more = (fsdpi_shm_remote *)fsdpi_alloc(&w->base.boot.allocator,
                                                             num * ranks * sizeof *more);
    if (!more) return 0;
    if (w->remotes) memcpy(more, w->remotes, w->num_numbers * ranks * sizeof *more);
    fsdpi_free(&w->base.boot.allocator, w->remotes);
    w->remotes = more;
    w->num_numbers = num;
    return 1;
}

static void fsdpi_shm_unmap_remote(fsdpi_shm_remote *remote) {
    if (remote->base) (void)munmap(remote->base, remote->part);
    remote->base = NULL;
}

/* Returns the address of a peer's allocation in this process; NULL: no memory. Maps it at the first
   use. An earlier allocation with this number is free, and no rank uses it: the world would have
   failed otherwise. */
static char *fsdpi_shm_map_remote(fsdpi_shm_world *w, int rank, uint64_t at, size_t part,
                                  uint64_t number) {
    char *base = NULL;
    fsdpi_lock(&w->lock);
    if (fsdpi_shm_grow_remotes(w, number)) {
        fsdpi_shm_remote *remote = &w->remotes[number * (size_t)w->base.boot.size + (size_t)rank];
        if (remote->at != at) fsdpi_shm_unmap_remote(remote);
        if (!remote->base) remote->base = fsdpi_shm_map(w, fsdpi_shm_offset(at, rank), part);
        remote->at = at;
        remote->part = part;
        base = remote->base;
    }
    fsdpi_unlock(&w->lock);
    return base;
}

/* -------------------------------------------------------------------------------------------- */
// Collectives. Between the two barriers of an operation every rank may read the buffers that its
// peers have shown. It writes only its own memory, and only ranges that no peer reads in this
// phase.

static uint64_t fsdpi_shm_word(const fsdpi_shm_comm *c, int k, size_t offset) {
    return __atomic_load_n(&c->places[k].record[offset / sizeof(uint64_t)], __ATOMIC_RELAXED);
}

// Wakes a member, for which this rank has written something.
static void fsdpi_shm_ring(fsdpi_shm_comm *c, fsdpi_shm_place *other) {
    // Either this load sees the sleeper, or the sleeper's futex call sees the new number.
    __atomic_add_fetch(&other->bell, 1u, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&other->asleep, __ATOMIC_SEQ_CST))
        fsdpi_futex_wake_all(&other->bell, fsdpi_shm_world_of(c)->fd >= 0);
}

/* Begins a send or recv: the two ranks wait for each other, both compare, and the receiver reads.
   Then each waits until the other one no longer uses its memory and its signature. No barrier
   counts this. */
static void fsdpi_shm_call(fsdpi_shm_comm *c, int k) {
    if (++c->calls == 0) c->calls = 1; // 0 means: no call
    c->other = &c->places[k];
    c->theirs = 0;
    FSDPI_STORE(&c->places[c->base.index].call, (uint64_t)c->calls << 32 | (uint32_t)k);
    fsdpi_shm_ring(c, c->other);
}

// Shows c->base.now and the location of this rank's buffer to the members. A signature does not
// change before all members have read it.
static fsdp_status fsdpi_shm_show(fsdpi_comm *base, const fsdp_coll *op, const fsdpi_span *span) {
    fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    fsdpi_signature *now = &base->now;
    if (span && span->chunk.base) {
        const fsdpi_chunk *mine = &span->chunk;
        now->offset = (uint64_t)(uintptr_t)span->shared;
        if (fsdpi_shm_world_of(c)->fd >= 0) {
            now->offset -= (uint64_t)(uintptr_t)mine->base + mine->part * (size_t)base->boot->rank;
            now->at = mine->at, now->part = mine->part, now->number = mine->number;
        }
    }
    fsdpi_signature_put(c->places[base->index].record, now);
    if (op && fsdpi_is_pair(op->kind)) fsdpi_shm_call(c, (int)op->root);
    else fsdpi_shm_arrive(c);
    return FSDP_OK;
}

static fsdp_status fsdpi_shm_hear(fsdpi_comm *base, const fsdp_coll *op) {
    fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    fsdp_status status = fsdpi_shm_wait(c, "come");
    if (!status && c->other) c->theirs = c->met[op->root] = fsdpi_shm_call_of(c, c->other);
    return status;
}

// Maps the allocation of member k's buffer, if its file offset differs from this rank's own.
static FSDPI_NOINLINE fsdp_status fsdpi_shm_reach(fsdpi_shm_comm *c, int k, const char **out) {
    uint64_t at = fsdpi_shm_word(c, k, offsetof(fsdpi_signature, at)),
             number = fsdpi_shm_word(c, k, offsetof(fsdpi_signature, number));
    size_t part = (size_t)fsdpi_shm_word(c, k, offsetof(fsdpi_signature, part));
    int rank = (int)c->base.ranks[k];
    *out = fsdpi_shm_map_remote(fsdpi_shm_world_of(c), rank, at, part, number);
    if (*out) return FSDP_OK;
    if (!fsdpi_shm_has_file(fsdpi_shm_world_of(c))) return fsdpi_shm_closed(c);
    return fsdpi_comm_fail(&c->base, FSDP_ERR_OUT_OF_MEMORY,
                           "[E603] this process cannot map %llu bytes of rank %d: raise the limits "
                           "of address space (ulimit -v), mappings (vm.max_map_count) or memory",
                           (unsigned long long)part, rank);
}

// Finds the buffer that member k has shown. mine: the allocation of this rank's own buffer.
static fsdp_status fsdpi_shm_find(fsdpi_shm_comm *c, const fsdpi_chunk *mine, int k,
                                  const char **out) {
    uint64_t offset = fsdpi_shm_word(c, k, offsetof(fsdpi_signature, offset));
    fsdp_status status = FSDP_OK;
    if (fsdpi_shm_world_of(c)->fd < 0) {
        *out = (const char *)(uintptr_t)offset;
        return FSDP_OK;
    }
    if (fsdpi_shm_word(c, k, offsetof(fsdpi_signature, at)) == mine->at &&
        fsdpi_shm_word(c, k, offsetof(fsdpi_signature, part)) == mine->part)
        *out = mine->base + mine->part * (size_t)c->base.ranks[k];
    else status = fsdpi_shm_reach(c, k, out);
    if (!status) *out += (ptrdiff_t)offset;
    return status;
}

/* Copies bytes, which may be 0. A large copy would not stay in a cache: it bypasses the caches, and
   alternates between the four pages of a chunk, because memory is faster that way. */
static void fsdpi_shm_copy(char *to, const char *from, size_t bytes) {
    size_t at = 0;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__)
    enum { PAGE = 4096, PAGES = 4 };
    if (bytes >= FSDPI_SHM_STREAM && (uintptr_t)to % 16 == 0) {
        for (; bytes - at >= PAGE * PAGES; at += PAGE * PAGES)
            for (size_t line = 0; line < PAGE; line += 64)
                for (size_t page = 0; page < PAGES; page++) {
                    size_t here = at + page * PAGE + line;
                    __builtin_prefetch(from + here + PAGES * PAGE);
                    fsdpi_stream(to + here, from + here, 64);
                }
        fsdpi_stream_end();
    }
#endif
    if (bytes > at) memcpy(to + at, from + at, bytes - at);
}

// Copies all shards into dst, each from its member. of: the members' buffers.
static void fsdpi_shm_all_gather(const fsdpi_shm_comm *c, const fsdp_coll *op,
                                 const char *const *of) {
    size_t bytes = fsdp_dtype_size(op->dtype);
    for (int i = 0; i < c->base.size; i++) {
        int k = (c->base.index + i) % c->base.size; // each rank begins with a different member
        for (uint32_t s = 0; s < op->num_segs; s++) {
            const fsdp_seg *seg = &op->segs[s];
            size_t full = (size_t)(seg->full + k * seg->count);
            const char *from = of[k] + (op->in_place ? full : (size_t)seg->shard) * bytes;
            char *to = (char *)op->dst + full * bytes;
            if (to != from) fsdpi_shm_copy(to, from, (size_t)seg->count * bytes);
        }
    }
}

static void fsdpi_shm_reduce_scatter(const fsdpi_shm_comm *c, const fsdp_coll *op,
                                     const char *const *of) {
    const char *srcs[FSDPI_MAX_SRCS];
    for (uint32_t s = 0; s < op->num_segs; s++) {
        const fsdp_seg *seg = &op->segs[s];
        if (!seg->count) continue;
        size_t at = (size_t)(seg->full + c->base.index * seg->count) * fsdp_dtype_size(op->dtype);
        for (int k = 0; k < c->base.size; k++) srcs[k] = of[k] + at;
        fsdpi_reduce((char *)op->dst + (size_t)seg->shard * fsdp_dtype_size(op->out_dtype),
                     op->out_dtype, srcs, c->base.size, op->dtype, (size_t)seg->count, op->scale,
                     op->accumulate, op->redop);
    }
}

static void fsdpi_shm_all_to_all(const fsdpi_shm_comm *c, const fsdp_coll *op,
                                 const char *const *of) {
    size_t bytes = (size_t)op->count * fsdp_dtype_size(op->dtype);
    for (int i = 0; i < c->base.size && bytes; i++) {
        int k = (c->base.index + i) % c->base.size;
        fsdpi_shm_copy((char *)op->dst + bytes * (size_t)k, of[k] + bytes * (size_t)c->base.index,
                       bytes);
    }
}

/* Runs an all_reduce. Small: every rank reduces all elements on the stack, and stores them after
   all ranks have read. Large: member k reduces region k in its own buffer, where no other rank
   reads region k; then all ranks collect the regions. */
static fsdp_status fsdpi_shm_all_reduce(fsdpi_shm_comm *c, const fsdp_coll *op,
                                        const char *const *of) {
    const char *srcs[FSDPI_MAX_SRCS];
    size_t bytes = fsdp_dtype_size(op->dtype), count = (size_t)op->count;
    if (c->base.size == 1 && op->scale == 1.0) return FSDP_OK;
    if (count * bytes <= FSDPI_SHM_SMALL) {
        fsdpi_reduce(c->small_sums, op->dtype, of, c->base.size, op->dtype, count, op->scale, 0,
                     op->redop);
        fsdp_status status = fsdpi_shm_barrier(c, "finished");
        if (!status) memcpy(op->dst, c->small_sums, count * bytes);
        return status;
    }
    size_t part = (count / (size_t)c->base.size + 64) / 64 *
                  64; // whole cache lines; the last may be short or empty
    size_t mine = part * (size_t)c->base.index;
    size_t piece = FSDPI_SHM_PIECE / bytes, end = count < mine + part ? count : mine + part;
    for (size_t at = mine; at < end; at += piece) {
        for (int k = 0; k < c->base.size; k++) srcs[k] = of[k] + at * bytes;
        fsdpi_reduce((char *)op->dst + at * bytes, op->dtype, srcs, c->base.size, op->dtype,
                     end - at < piece ? end - at : piece, op->scale, 0, op->redop);
    }
    fsdp_status status = fsdpi_shm_barrier(c, "finished");
    if (status) return status;
    for (int i = 1; i < c->base.size; i++) {
        int k = (c->base.index + i) % c->base.size;
        size_t at = part * (size_t)k;
        if (at >= count) continue;
        fsdpi_shm_copy((char *)op->dst + at * bytes, of[k] + at * bytes,
                       (count - at < part ? count - at : part) * bytes);
    }
    return fsdpi_shm_barrier(c, "finished");
}

static fsdp_status fsdpi_shm_move_pair(fsdpi_shm_comm *c, const fsdp_coll *op,
                                       const fsdpi_chunk *mine) {
    const char *src;
    fsdp_status status = FSDP_OK;
    if (op->kind == FSDP_OP_RECV && mine->base) {
        status = fsdpi_shm_find(c, mine, (int)op->root, &src);
        if (!status)
            fsdpi_shm_copy((char *)op->dst, src, (size_t)op->count * fsdp_dtype_size(op->dtype));
    }
    if (status) return status;
    FSDPI_STORE(&c->places[c->base.index].done, c->calls);
    fsdpi_shm_ring(c, c->other);
    return fsdpi_shm_wait(c, "finished");
}

static fsdp_status fsdpi_shm_move(fsdpi_comm *base, const fsdp_coll *op, const fsdpi_span *span) {
    fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    const fsdpi_chunk *mine = &span->chunk;
    const char *of[FSDPI_MAX_SRCS];
    fsdp_status status = FSDP_OK;
    if (c->other) return fsdpi_shm_move_pair(c, op, mine);
    for (int k = 0; k < base->size && !status; k++) {
        int is_read = mine->base && (op->kind != FSDP_OP_BROADCAST || k == op->root);
        of[k] = (const char *)span->shared;
        if (is_read) status = fsdpi_shm_find(c, mine, k, &of[k]);
    }
    if (status) return status;
    if (op->kind == FSDP_OP_ALL_REDUCE) return fsdpi_shm_all_reduce(c, op, of);
    if (op->kind == FSDP_OP_ALL_GATHER) fsdpi_shm_all_gather(c, op, of);
    if (op->kind == FSDP_OP_REDUCE_SCATTER) fsdpi_shm_reduce_scatter(c, op, of);
    if (op->kind == FSDP_OP_ALL_TO_ALL) fsdpi_shm_all_to_all(c, op, of);
    if (op->kind == FSDP_OP_BROADCAST && op->root != base->index)
        fsdpi_shm_copy((char *)op->dst, of[op->root],
                       (size_t)op->count * fsdp_dtype_size(op->dtype));
    return fsdpi_shm_barrier(c, "finished");
}

/* -------------------------------------------------------------------------------------------- */
// Rendezvous, groups, and closing. Invariants: the common block lives until the last rank has
// closed. A rank that has left a world of threads never finds the old block again.

typedef struct fsdpi_shm_hello {
    char magic[8];
    int32_t version, rank, size, reserved;
} fsdpi_shm_hello;

typedef struct fsdpi_shm_answer {
    char magic[8];
    int32_t status;
    char reason[244];
} fsdpi_shm_answer;

static size_t fsdpi_shm_group_bytes(int size) {
    return sizeof(fsdpi_shm_group) + (size_t)size * sizeof(fsdpi_shm_place);
}

static size_t fsdpi_shm_control_bytes(int size) {
    return sizeof(fsdpi_shm_control) + (size_t)size * sizeof(fsdpi_shm_peer) +
           fsdpi_shm_group_bytes(size);
}

static void fsdpi_shm_use_group(fsdpi_shm_comm *c, void *block) {
    c->group = (fsdpi_shm_group *)block;
    c->places = (fsdpi_shm_place *)(void *)(c->group + 1);
    c->base.shown = (const char *)c->places; // a place begins with the signature
    c->base.step = sizeof *c->places;
}

static void fsdpi_shm_use_control(fsdpi_shm_comm *c, void *block) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    w->control = (fsdpi_shm_control *)block;
    w->peers = (fsdpi_shm_peer *)(void *)(w->control + 1);
    if (!w->base.failed) w->base.failed = &w->control->failed;
    w->base.trace = &w->peers[w->base.boot.rank].trace;
    fsdpi_shm_use_group(c, w->peers + w->base.boot.size);
}

static fsdp_status fsdpi_shm_open_threads(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    fsdp_threads *threads = w->base.boot.threads;
    fsdp_status status = FSDP_OK;
    fsdpi_lock(&threads->lock);
    fsdpi_shm_control *block = (fsdpi_shm_control *)threads->common;
    while (block && block->first != c->base.ranks[0]) block = block->next;
    if (!block) {
        block = (fsdpi_shm_control *)fsdpi_alloc(&w->base.boot.allocator,
                                                 fsdpi_shm_control_bytes(w->base.boot.size));
        if (block) {
            block->size = w->base.boot.size;
            block->allocator = w->base.boot.allocator;
            block->first = c->base.ranks[0];
            block->next = (fsdpi_shm_control *)threads->common;
            threads->common = block;
        }
    }
    if (!block) {
        status = fsdpi_comm_error(
            &c->base, FSDP_ERR_OUT_OF_MEMORY,
            "[E604] the allocator has returned NULL for %llu bytes of the common block",
            (unsigned long long)fsdpi_shm_control_bytes(w->base.boot.size));
    } else if (block->size != w->base.boot.size) {
        status = fsdpi_comm_error(
            &c->base, FSDP_ERR_MISMATCH,
            "[E605] this rank has a world size of %d, another one has %d: give all the same",
            w->base.boot.size, (int)block->size);
    } else {
        fsdpi_shm_use_control(c, block);
        fsdpi_shm_peer *me = &w->peers[w->base.boot.rank];
        if (me->state != FSDPI_SHM_ABSENT) {
            status = fsdpi_comm_error(&c->base, FSDP_ERR_INVALID_ARG,
                                      "[E606] another thread has joined as rank %d already: give "
                                      "each thread its own rank",
                                      w->base.boot.rank);
            w->control = NULL;
            w->base.failed = NULL;
        } else {
            w->control->refs++;
            w->joined = 1;
            FSDPI_STORE(&me->state, (uint32_t)FSDPI_SHM_JOINED);
        }
    }
    fsdpi_unlock(&threads->lock);
    return status;
}

#define FSDPI_SHM_LIMITED "[E607] the size of files is limited: run ulimit -f unlimited first"

// Maps the common block of the file, and locks this rank's byte, which shows peers that it lives.
static fsdp_status fsdpi_shm_enter(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    char *block = fsdpi_shm_map(w, 0,
                                fsdpi_shm_round(w, fsdpi_shm_control_bytes(w->base.boot.size)));
    if (!block)
        return fsdpi_comm_error(
            &c->base, FSDP_ERR_OUT_OF_MEMORY,
            "[E608] this process cannot map the common block (errno %d): raise ulimit -v", errno);
    fsdpi_shm_use_control(c, block);
    if (!fsdpi_shm_live(w))
        return fsdpi_comm_error(&c->base, FSDP_ERR_BACKEND,
                                "[E609] this process cannot lock the common file (errno %d)",
                                errno);
    w->peers[w->base.boot.rank].pid = (uint32_t)getpid();
    w->joined = 1;
    FSDPI_STORE(&w->peers[w->base.boot.rank].state, (uint32_t)FSDPI_SHM_JOINED);
    return FSDP_OK;
}

// Waits until a socket is readable. No other call waits for a socket.
static int fsdpi_shm_readable(int fd, int64_t timeout_ns) {
    struct pollfd p;
    p.fd = fd;
    p.events = POLLIN;
    p.revents = 0;
    return poll(&p, 1, (int)(timeout_ns / 1000000) + 1) > 0;
}

// Sends one message, with a descriptor unless `gift` is -1.
static int fsdpi_shm_send(int fd, const void *data, size_t size, int gift) {
    struct iovec io = {(void *)(uintptr_t)data, size};
    struct msghdr m;
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    memset(&m, 0, sizeof m);
    memset(&control, 0, sizeof control);
    m.msg_iov = &io;
    m.msg_iovlen = 1;
    if (gift >= 0) {
        m.msg_control = control.space;
        m.msg_controllen = sizeof control.space;
        struct cmsghdr *h = CMSG_FIRSTHDR(&m);
        h->cmsg_level = SOL_SOCKET;
        h->cmsg_type = SCM_RIGHTS;
        h->cmsg_len = CMSG_LEN(sizeof gift);
        memcpy(CMSG_DATA(h), &gift, sizeof gift);
    }
    return sendmsg(fd, &m, MSG_NOSIGNAL) == (ssize_t)size;
}

static int fsdpi_shm_receive(int fd, void *data, size_t size, int *gift) {
    struct iovec io = {data, size};
    struct msghdr m;
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    memset(&m, 0, sizeof m);
    m.msg_iov = &io;
    m.msg_iovlen = 1;
    m.msg_control = control.space;
    m.msg_controllen = sizeof control.space;
    *gift = -1;
    if (recvmsg(fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != (ssize_t)size) return 0;
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    if (h && h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS)
        memcpy(gift, CMSG_DATA(h), sizeof *gift);
    *gift = fsdpi_fd(*gift);
    return 1;
}

static int fsdpi_shm_socket(void) {
    return fsdpi_socket(AF_UNIX, SOCK_SEQPACKET);
}

/* Accepts a rank on the first rank, and answers it. It has `left` nanoseconds, at most a second, to
   send its number. If its size or version differs, it can never join, so the world fails. If a
   number comes twice, the second rank belongs to another job and is rejected. */
static fsdp_status fsdpi_shm_admit(fsdpi_shm_comm *c, int listener, int64_t left,
                                   uint8_t *admitted) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    int fd = fsdpi_accept(listener);
    fsdpi_shm_hello hello;
    fsdpi_shm_answer answer;
    fsdpi_text t = {answer.reason, sizeof answer.reason, 0};
    int gift, k = 0;
    memset(&answer, 0, sizeof answer);
    memcpy(answer.magic, FSDPI_SHM_MAGIC, sizeof answer.magic);
    if (fd < 0) return FSDP_OK;
    if (!fsdpi_same_user(fd) || !fsdpi_shm_readable(fd, left < 1000000000 ? left : 1000000000) ||
        !fsdpi_shm_receive(fd, &hello, sizeof hello, &gift)) {
        (void)close(fd);
        return FSDP_OK;
    }
    if (memcmp(hello.magic, answer.magic, sizeof hello.magic) ||
        hello.version != FSDP_COMM_VERSION) {
        answer.status = FSDP_ERR_MISMATCH;
        fsdpi_text_add(
            &t,
            "[E610] rank %d and rank %d were built with different versions of fsdp.h: build "
            "both alike",
            w->base.boot.rank, (int)hello.rank);
    } else if (hello.size != w->base.boot.size) {
        answer.status = FSDP_ERR_MISMATCH;
        fsdpi_text_add(
            &t, "[E611] rank %d has a world size of %d, rank %d has %d: give all ranks the same",
            w->base.boot.rank, w->base.boot.size, (int)hello.rank, (int)hello.size);
    } else if ((k = fsdpi_index_of(&c->base, hello.rank)) == c->base.size || admitted[k]) {
        answer.status = FSDP_ERR_INVALID_ARG;
        fsdpi_text_add(
            &t,
            "[E612] rank %d has joined already: give each process its own rank, and each job "
            "on this host its own FSDP_JOB_ID",
            (int)hello.rank);
    }
    if (fsdpi_shm_send(fd, &answer, sizeof answer, answer.status ? -1 : w->fd) && !answer.status)
        admitted[k] = 1;
    (void)close(fd);
    return answer.status == FSDP_ERR_MISMATCH
               ? fsdpi_comm_fail(&c->base, FSDP_ERR_MISMATCH, "%s", answer.reason)
               : FSDP_OK;
}

// Makes the common file, on the first rank.
static fsdp_status fsdpi_shm_found(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    size_t bytes = fsdpi_shm_round(w, fsdpi_shm_control_bytes(w->base.boot.size));
    if (fsdpi_files_are_limited()) // the common block alone may be too large
        return fsdpi_comm_error(&c->base, FSDP_ERR_UNSUPPORTED, FSDPI_SHM_LIMITED);
    fsdpi_shm_set_file(w, fsdpi_shared_file());
    if (w->fd < 0)
        return fsdpi_comm_error(&c->base, FSDP_ERR_BACKEND,
                                "[E620] rank %d cannot make the common file by memfd_create (errno "
                                "%d): if that is %d, raise ulimit -n; else allow the call in the "
                                "sandbox of this program",
                                w->base.boot.rank, errno, EMFILE);
    if (!fsdpi_shm_reserve(w, 0, bytes))
        return fsdpi_comm_error(&c->base, FSDP_ERR_OUT_OF_MEMORY,
                                "[E613] the host has no memory for the common block (errno %d)",
                                errno);
    fsdp_status status = fsdpi_shm_enter(c);
    if (status) return status;
    w->control->size = w->base.boot.size;
    w->control->top = bytes;
    return FSDP_OK;
}

// Gives the file to the other ranks as they arrive, on the first rank, which waits at the first
// barrier meanwhile.
static FSDP_COLD fsdp_status fsdpi_shm_host(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    uint8_t admitted[FSDPI_MAX_SRCS] = {1};
    struct sockaddr_un name;
    socklen_t length = fsdpi_unix_name("shm", w->base.boot.job, &name);
    int listener = fsdpi_shm_socket(), missing = c->base.size - 1;
    fsdp_status status = FSDP_OK;
    if (listener < 0 || bind(listener, (struct sockaddr *)(void *)&name, length) ||
        listen(listener, c->base.size)) {
        if (listener >= 0 && errno == EADDRINUSE)
            status = fsdpi_comm_error(&c->base, FSDP_ERR_INVALID_ARG,
                                      "[E614] another job with this id is starting on this host: "
                                      "give each job its own id (FSDP_JOB_ID, MASTER_PORT)");
        else
            status = fsdpi_comm_error(&c->base, FSDP_ERR_BACKEND,
                                      "[E615] rank %d cannot listen (errno %d)", w->base.boot.rank,
                                      errno);
    }
    while (!status && missing > 0) {
        int64_t left = w->base.boot.timeout_ns - (fsdpi_boot_now(&w->base.boot) - *c->since);
        if (left <= 0) status = fsdpi_shm_late(c, "come");
        else if (fsdpi_comm_failed(&c->base)) status = fsdpi_comm_report(&c->base);
        else if (!fsdpi_shm_readable(listener,
                                     left < FSDPI_SHM_SLICE_NS ? left : FSDPI_SHM_SLICE_NS))
            status = fsdpi_shm_check_peers(c, 1);
        else status = fsdpi_shm_admit(c, listener, left, admitted);
        missing = c->base.size;
        for (int k = 0; k < c->base.size; k++) missing -= admitted[k];
    }
    if (listener >= 0) (void)close(listener);
    return status;
}

// Asks the first rank for the file until it answers. A connection that breaks may have been to an
// earlier world.
static FSDP_COLD fsdp_status fsdpi_shm_join(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    fsdpi_shm_hello hello = {{0}, FSDP_COMM_VERSION, w->base.boot.rank, w->base.boot.size, 0};
    fsdpi_shm_answer answer;
    struct sockaddr_un name;
    socklen_t length = fsdpi_unix_name("shm", w->base.boot.job, &name);
    int64_t start = *c->since, nap_ns = 0;
    memcpy(hello.magic, FSDPI_SHM_MAGIC, sizeof hello.magic);
    while (w->fd < 0) {
        int fd = fsdpi_shm_socket(), gift = -1, answered = 0;
        if (fd < 0)
            return fsdpi_comm_error(
                &c->base, FSDP_ERR_BACKEND,
                "[E616] this process cannot make a socket (errno %d): raise ulimit -n", errno);
        // EAGAIN: many ranks connect, and the first rank is busy.
        if (!connect(fd, (struct sockaddr *)(void *)&name, length) && fsdpi_same_user(fd) &&
            fsdpi_shm_send(fd, &hello, sizeof hello, -1)) {
            while (!fsdpi_shm_readable(fd, FSDPI_SHM_SLICE_NS) &&
                   fsdpi_boot_now(&w->base.boot) - start < w->base.boot.timeout_ns) {
            }
            answered = fsdpi_shm_receive(fd, &answer, sizeof answer, &gift) &&
                       !memcmp(answer.magic, FSDPI_SHM_MAGIC, sizeof answer.magic);
        }
        (void)close(fd);
        fsdpi_shm_set_file(w, gift);
        if (answered && answer.status)
            return fsdpi_comm_error(&c->base, (fsdp_status)answer.status, "%.*s", 243,
                                    answer.reason);
        if (answered && w->fd < 0)
            return fsdpi_comm_error(&c->base, FSDP_ERR_BACKEND,
                                    "[E623] this process has too many open files to take the "
                                    "common file of rank %d: raise ulimit -n",
                                    (int)c->base.ranks[0]);
        if (w->fd < 0 && fsdpi_boot_now(&w->base.boot) - start >= w->base.boot.timeout_ns)
            return fsdpi_comm_error(
                &c->base, FSDP_ERR_TIMEOUT,
                "[E617] rank %d has not come within %.1f s: start it on this host, as this user, "
                "with this job id (FSDP_JOB_ID, MASTER_PORT)",
                (int)c->base.ranks[0], (double)w->base.boot.timeout_ns * 1e-9);
        if (w->fd < 0) fsdpi_nap(&nap_ns, FSDPI_SHM_NAP_NS, FSDPI_SHM_NAP_MAX);
    }
    fsdp_status status = fsdpi_shm_enter(c);
    // From here on a failure reaches the other ranks. Before, they would wait until the deadline.
    if (!status && fsdpi_files_are_limited())
        return fsdpi_comm_fail(&c->base, FSDP_ERR_UNSUPPORTED, FSDPI_SHM_LIMITED);
    return status;
}

static FSDP_COLD fsdp_status fsdpi_shm_open_world(fsdpi_comm *base) {
    fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    w->fd = -1;
    w->page = (size_t)sysconf(_SC_PAGESIZE);
    w->next_at = FSDPI_SHM_DATA;
    w->crowded = fsdpi_cores() < base->size;
    c->spin_ns = FSDPI_SHM_SPIN_NS;
    int is_host = !base->boot->threads && base->index == 0;
    w->members = base->size;
    c->since = &base->world->open_ns; // one deadline for all waits of open
    fsdp_status status = base->boot->threads ? fsdpi_shm_open_threads(c)
                         : is_host           ? fsdpi_shm_found(c)
                                             : fsdpi_shm_join(c);
    if (status) return status;
    fsdpi_comm_begin(base);
    status = fsdpi_shm_show(base, NULL, NULL);
    if (!status && is_host && base->size > 1) status = fsdpi_shm_host(c);
    if (!status) status = fsdpi_shm_wait(c, "come");
    c->since = NULL;
    return fsdpi_comm_end(base, status);
}

// Makes the group's block, on its first member. *block: its location, for the other members.
static void *fsdpi_shm_make_group(fsdpi_shm_comm *parent, int size, uint64_t *block) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(parent);
    size_t bytes = fsdpi_shm_group_bytes(size);
    fsdpi_shm_group *group;
    if (w->fd < 0) {
        char *base = fsdpi_shm_share(w, bytes, size);
        *block = (uint64_t)(uintptr_t)base;
        return base;
    }
    bytes = fsdpi_shm_round(w, bytes);
    *block = __atomic_fetch_add(&w->control->top, bytes, __ATOMIC_RELAXED);
    if (!fsdpi_shm_reserve(w, *block, bytes)) return NULL;
    group = (fsdpi_shm_group *)(void *)fsdpi_shm_map(w, *block, bytes);
    if (group) group->refs = (uint32_t)size;
    return group;
}

static void fsdpi_shm_drop_group(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    size_t bytes = fsdpi_shm_round(w, fsdpi_shm_group_bytes(c->base.size));
    if (!fsdpi_comm_failed(&c->base)) { // after a failure peers know the reason already
        FSDPI_STORE(&c->places[c->base.index].closed, 1u);
        fsdpi_futex_wake_all(&c->group->generation, w->fd >= 0);
    }
    if (w->fd < 0) {
        fsdpi_shm_unshare(w, c->group);
        return;
    }
    int last = __atomic_sub_fetch(&c->group->refs, 1u, __ATOMIC_ACQ_REL) == 0;
    (void)munmap((void *)c->group, bytes);
    if (last) fsdpi_shm_give_back(w, c->block, bytes);
}

static FSDP_COLD fsdp_status fsdpi_shm_prepare(fsdpi_comm *parent, fsdpi_comm *child) {
    if (child->index != 0) return FSDP_OK;
    void *block = fsdpi_shm_make_group(fsdpi_shm_comm_of(parent), child->size, &parent->now.block);
    if (!block && !parent->boot->threads &&
        !fsdpi_shm_has_file(fsdpi_shm_world_of(fsdpi_shm_comm_of(parent))))
        return fsdpi_shm_closed(fsdpi_shm_comm_of(parent));
    if (!block)
        return fsdpi_comm_fail(parent, FSDP_ERR_OUT_OF_MEMORY,
                               "[E618] the host has no memory for the block of a group of %d ranks",
                               child->size);
    fsdpi_shm_comm_of(child)->block = parent->now.block;
    fsdpi_shm_use_group(fsdpi_shm_comm_of(child), block);
    return FSDP_OK;
}

// Finds the block that the group's first member has shown. All members of the parent meet.
static FSDP_COLD fsdp_status fsdpi_shm_connect(fsdpi_comm *base, fsdpi_comm *base_child,
                                               const fsdp_group *g) {
    fsdpi_shm_comm *parent = fsdpi_shm_comm_of(base), *child = fsdpi_shm_comm_of(base_child);
    fsdpi_shm_world *w = fsdpi_shm_world_of(parent);
    (void)g;
    if (child) child->spin_ns = FSDPI_SHM_SPIN_NS;
    if (child && !child->group) {
        int first = fsdpi_index_of(base, (int)base_child->ranks[0]);
        child->block = fsdpi_signature_of(base, first).block;
        size_t bytes = fsdpi_shm_round(w, fsdpi_shm_group_bytes(base_child->size));
        void *block = w->fd < 0 ? (void *)(uintptr_t)child->block
                                : fsdpi_shm_map(w, child->block, bytes);
        if (!block && !fsdpi_shm_has_file(w)) return fsdpi_shm_closed(parent);
        if (!block)
            return fsdpi_comm_fail(
                base, FSDP_ERR_OUT_OF_MEMORY,
                "[E619] this process cannot map %llu bytes of the group's block (errno %d)",
                (unsigned long long)bytes, errno);
        fsdpi_shm_use_group(child, block);
    }
    return fsdpi_shm_barrier(parent, "finished");
}

static void fsdpi_shm_leave_threads(fsdpi_shm_world *w) {
    fsdp_threads *threads = w->base.boot.threads;
    fsdpi_shm_control *control = w->control;
    fsdpi_lock(&threads->lock);
    fsdpi_shm_control *all = (fsdpi_shm_control *)threads->common, **link = &all;
    while (*link && *link != control) link = &(*link)->next;
    if (*link) *link = control->next; // a later open makes a new block
    threads->common = all;
    int last = --control->refs == 0;
    fsdpi_unlock(&threads->lock);
    if (!last) return;
    while (control->blocks) {
        fsdpi_shm_block *block = control->blocks;
        fsdp_allocator allocator = block->allocator;
        control->blocks = block->next;
        fsdpi_free(&allocator, block);
    }
    fsdp_allocator allocator = control->allocator;
    fsdpi_free(&allocator, control);
}

static void fsdpi_shm_leave(fsdpi_comm *base) {
    fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    if (!base->is_world && c->group) fsdpi_shm_drop_group(c);
    if (!base->is_world || !w->joined) return;
    // Set before memory is freed: a peer that waits must not take this rank for dead.
    FSDPI_STORE(&w->peers[base->boot->rank].state, (uint32_t)FSDPI_SHM_LEFT);
    fsdpi_futex_wake_all(&c->group->generation, w->fd >= 0);
}

static FSDP_COLD int fsdpi_shm_close(fsdpi_comm_world *base) {
    fsdpi_shm_world *w = (fsdpi_shm_world *)(void *)base;
    for (size_t i = 0; i < w->num_numbers * (size_t)base->boot.size; i++)
        fsdpi_shm_unmap_remote(&w->remotes[i]);
    fsdpi_free(&base->boot.allocator, w->remotes);
    if (w->fd >= 0) {
        if (w->control)
            (void)munmap((void *)w->control,
                         fsdpi_shm_round(w, fsdpi_shm_control_bytes(base->boot.size)));
        if (w->life) (void)munmap(w->life, w->page);
        if (fsdpi_shm_has_file(w)) (void)close(w->fd);
    } else if (w->joined) {
        fsdpi_shm_leave_threads(w);
    }
    return 1;
}

#endif // FSDPI_BACKENDS_SHM_WORLD_H
