/* core/flight.h - the flight record: a file for each rank that outlives its process

   Callers: world.h (fsdpi_now), mesh.h (fsdpi_flight_end), run.h (fsdpi_now) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_FLIGHT_H
#define FSDPI_CORE_FLIGHT_H

#include "../base/hash.h"
#include "../base/macros.h"
#include "../base/os.h"
#include "../base/text.h"
#include "objects.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* The state is the file DIR/JOB.RANK.flight. It is mapped, so all that has been written is in the
   file when the process is killed. tools/fsdptrace reads it at any time, also while the rank
   writes. fsdp_world.flight is NULL if no flight record is wanted. The caller's thread, worker
   threads and backends write operations: each has its own entry. A reader takes an entry only if
   its number matches its place. The number is written after the other fields, except for
   fingerprint, on_stream and end_ns.

   A word that several threads or processes use names its memory order in front of its comment, here
   and in run.h, objects.h and the backends: [relaxed]; [release], and its loads acquire; [seq_cst].
   The gate text.orders compares this with the accesses. */

enum {
    FSDPI_FLIGHT_OPS = 4096, // the last operations; the others: groups and steps
    FSDPI_FLIGHT_COMMS = 128,
    FSDPI_FLIGHT_STEPS = 64,
    FSDPI_FLIGHT_NAME = 64 // bytes of a name (fsdpi_cut)
};
enum { FSDPI_FLIGHT_RUNS = 1, FSDPI_FLIGHT_SHUT_DOWN, FSDPI_FLIGHT_FAILED };
// Kinds of operations that are not collectives.
enum { FSDPI_OPEN = FSDP_OP_COUNT + 1, FSDPI_SPLIT, FSDPI_CLOSE };

// An operation. Times are of the world's clock, in ns. end_ns 0: it has not ended.
typedef struct fsdpi_flight_op {
    int64_t begin_ns;
    int64_t end_ns;              // [relaxed]
    uint64_t count, fingerprint; // elements; what ranks compare, 0: not known
    uint32_t number;             // [release] 1 + the operations before it; 0: is being written
    uint32_t seq;                // fsdp_op.seq; of both the low bits
    uint32_t turn, step;         // 1 + its group's operations before it, 0: send, recv; the step
    int32_t root;
    uint16_t comm, reserved; // its place in comm
    uint8_t kind, dtype, out_dtype, label, state, redop;
    uint8_t on_stream, unused; // 1: a backend on streams notes its end, some time later
    char what[FSDPI_FLIGHT_NAME];
} fsdpi_flight_op;

// A group. Its members are first, first + stride, ...; stride 0: they are no such sequence.
typedef struct fsdpi_flight_comm {
    uint64_t key, members; // the comm in this process; a hash of the members
    int32_t number, size, index, first, stride;
    uint32_t turns; // [relaxed] operations so far
    char name[FSDPI_FLIGHT_NAME];
} fsdpi_flight_comm;

typedef struct fsdpi_flight_step {
    int64_t begin_ns, end_ns; // first call, end of finalize
    int64_t comm_ns;          // in collectives meanwhile, of all worker threads; on streams 0
    uint64_t step;
} fsdpi_flight_step;

struct fsdpi_flight_record {
    char magic[8];
    uint32_t bytes; // size of this struct
    uint32_t state; // [release] FSDPI_FLIGHT_RUNS, ...
    int32_t rank, size, pid, status;
    int64_t pid_began; // field 22 of /proc/PID/stat: another process may get the number
    uint64_t boot, pids, clock; // fsdpi_boot_id, the PID namespace, fsdpi_system_clock_id
    // One moment on CLOCK_REALTIME, on the system's CLOCK_MONOTONIC and on the world's clock.
    int64_t real_ns, mono_ns, opened_ns;
    // A random number, and the sum of those of all ranks (fsdp_world_id); 0: not all have joined.
    uint64_t own_id;
    uint64_t id; // [release]
    int64_t ended_ns;
    char host[64], job[128], backend[16], path[512], failure[FSDPI_TEXT];
    // The last call of the program: FSDP_CALL_*, its unit's name, and when it began.
    int64_t call_ns; // [relaxed]
    uint64_t calls;  // [release]
    uint32_t call, reserved_call;
    char call_what[FSDPI_FLIGHT_NAME]; // "": none
    uint64_t begun;        // [relaxed] operations so far
    uint64_t steps;        // [release] steps so far
    int64_t step_begin_ns; // of the present step, as the next one
    int64_t comm_ns;       // [relaxed]
    uint32_t num_comms;    // [release]
    uint32_t reserved;
    fsdpi_flight_comm comm[FSDPI_FLIGHT_COMMS]; // [0]: operations on no known group
    fsdpi_flight_step last[FSDPI_FLIGHT_STEPS];
    fsdpi_flight_op op[FSDPI_FLIGHT_OPS];
};

#define FSDPI_FLIGHT_MAGIC "fsdpfl02"

static int64_t fsdpi_now(const fsdp_world *w) { return w->boot.clock.now_ns(w->boot.clock.user); }

/* -------------------------------------------------------------------------------------------- */
// The file.

/* Makes the file, and replaces that of an earlier job. Allocates all blocks before it maps the
   file: a full disk would end the process later. Returns NULL, or the reason why there is no flight
   record; the world works without it. */
static const char *fsdpi_flight_open(fsdp_world *w, const char *dir) {
    char path[sizeof w->flight->path];
    void *at = MAP_FAILED;
    const size_t from = strlen(dir) + 1; // the job's name is a part of the file's name
    if (from + strlen(w->job) + 31 > sizeof path) return "the path is too long";
    if (mkdir(dir, 0777) && errno != EEXIST) return strerror(errno);
    snprintf(path, sizeof path, "%s/%s.%d.flight", dir, *w->job ? w->job : "job", w->rank);
    for (char *c = path + from; *c; c++)
        if (*c == '/' || *c == ':') *c = '-';
    (void)unlink(path);
    int fd = fsdpi_fd(open(path, O_RDWR | O_CREAT | O_EXCL | FSDPI_CLOEXEC, 0644));
    if (fd < 0) return strerror(errno);
    int error = fsdpi_fallocate(fd, 0, (long)sizeof(fsdpi_flight_record));
    if (!error) {
        at = mmap(NULL, sizeof(fsdpi_flight_record), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        error = errno;
    }
    (void)close(fd);
    if (at == MAP_FAILED) {
        (void)unlink(path);
        return strerror(error);
    }
    fsdpi_flight_record *f = (fsdpi_flight_record *)at;
    f->bytes = (uint32_t)sizeof *f;
    f->rank = w->rank;
    f->size = w->size;
    f->pid = (int32_t)getpid();
    f->pid_began = fsdpi_process_began(f->pid, NULL);
    f->pids = fsdpi_namespace("pid");
    f->boot = fsdpi_boot_id(), f->clock = fsdpi_system_clock_id();
    f->own_id = w->id;
    f->real_ns = fsdpi_system_ns(0 /* CLOCK_REALTIME */);
    f->mono_ns = fsdpi_system_ns(1 /* CLOCK_MONOTONIC */);
    f->opened_ns = f->call_ns = fsdpi_now(w);
    (void)fsdpi_gethostname(f->host, sizeof f->host - 1);
    snprintf(f->job, sizeof f->job, "%s", w->job);
    snprintf(f->backend, sizeof f->backend, "%s", w->comm_ops ? w->comm_ops->name : "none");
    memcpy(f->path, path, sizeof path);
    f->num_comms = 1;
    FSDPI_STORE(&f->state, (uint32_t)FSDPI_FLIGHT_RUNS);
    memcpy(f->magic, FSDPI_FLIGHT_MAGIC, sizeof f->magic); // from here on a reader takes it
    w->flight = f;
    return NULL;
}

static void fsdpi_flight_close(fsdp_world *w) {
    fsdpi_flight_record *f = w->flight;
    if (!f) return;
    if (f->state == FSDPI_FLIGHT_RUNS) {
        f->ended_ns = fsdpi_now(w);
        FSDPI_STORE(&f->state, (uint32_t)FSDPI_FLIGHT_SHUT_DOWN);
    }
    w->flight = NULL;
    (void)munmap(f, sizeof *f);
}

// Notes the failure of the world.
static void fsdpi_flight_fail(fsdpi_flight_record *f, int64_t now, fsdp_status status,
                              const char *text) {
    f->ended_ns = now;
    f->status = (int32_t)status;
    snprintf(f->failure, sizeof f->failure, "%s", text);
    FSDPI_STORE(&f->state, (uint32_t)FSDPI_FLIGHT_FAILED);
}

/* -------------------------------------------------------------------------------------------- */
// Groups, operations, calls and steps.

// Adds a group. Only the caller's thread makes groups.
static void fsdpi_flight_add(fsdp_world *w, const fsdp_comm *comm, int number, const char *name,
                             const int32_t *ranks, int size, int index) {
    fsdpi_flight_record *f = w->flight;
    if (!f || !comm || f->num_comms == FSDPI_FLIGHT_COMMS) return;
    fsdpi_flight_comm *c = &f->comm[f->num_comms];
    c->key = (uint64_t)(uintptr_t)comm;
    c->number = number, c->size = size, c->index = index;
    c->first = ranks ? ranks[0] : 0;
    c->stride = ranks && size > 1 ? ranks[1] - ranks[0] : 1;
    for (int k = 0; k < size; k++) {
        int32_t rank = ranks ? ranks[k] : k;
        c->members = fsdpi_hash(c->members, (uint64_t)(uint32_t)rank);
        if (rank != c->first + k * c->stride) c->stride = 0;
    }
    fsdpi_cut(c->name, sizeof c->name, name);
    FSDPI_STORE(&f->num_comms, f->num_comms + 1);
}

// Begins an operation, and returns its entry. One thread at a time uses a group. The code that runs
// the operation writes the fingerprint.
static fsdpi_flight_op *fsdpi_flight_begin(fsdp_world *w, const fsdp_op *op) {
    fsdpi_flight_record *f = w->flight;
    uint64_t key = (uint64_t)(uintptr_t)op->comm;
    uint32_t at = FSDPI_LOAD(&f->num_comms) - 1;
    while (at > 0 && f->comm[at].key != key) at--;
    uint64_t number = __atomic_add_fetch(&f->begun, 1, __ATOMIC_RELAXED);
    fsdpi_flight_op *o = &f->op[(number - 1) % FSDPI_FLIGHT_OPS];
    (void)__atomic_exchange_n(&o->number, 0, __ATOMIC_ACQ_REL);
    fsdpi_release_fence(); // a reader sees the 0 before the writes below
    __atomic_store_n(&o->end_ns, 0, __ATOMIC_RELAXED);
    o->begin_ns = fsdpi_now(w);
    o->count = op->count;
    o->fingerprint = 0;
    o->seq = (uint32_t)op->seq;
    int is_pair = op->kind == FSDP_OP_SEND || op->kind == FSDP_OP_RECV; // two members make it
    o->turn = is_pair ? 0 : __atomic_add_fetch(&f->comm[at].turns, 1, __ATOMIC_RELAXED);
    o->step = (uint32_t)op->step;
    fsdpi_cut(o->what, sizeof o->what, op->what);
    o->comm = (uint16_t)at;
    o->root = op->root;
    o->kind = op->kind, o->dtype = op->dtype, o->out_dtype = op->out_dtype;
    o->label = (uint8_t)op->label, o->state = op->state, o->redop = op->redop;
    o->on_stream = 0;
    FSDPI_STORE(&o->number, (uint32_t)number);
    return o;
}

static void fsdpi_flight_end(fsdp_world *w, fsdpi_flight_op *o) {
    int64_t now = fsdpi_now(w);
    __atomic_store_n(&o->end_ns, now, __ATOMIC_RELAXED);
    __atomic_add_fetch(&w->flight->comm_ns, now - o->begin_ns, __ATOMIC_RELAXED);
}

// Notes a call of the program. what: the unit's name, or the name of an extension's call.
static FSDPI_NOINLINE void fsdpi_flight_call(fsdp_world *w, int call, const char *what) {
    fsdpi_flight_record *f = w->flight;
    int64_t now = fsdpi_now(w);
    f->call = (uint32_t)call;
    if (what) fsdpi_cut(f->call_what, sizeof f->call_what, what);
    else f->call_what[0] = 0;
    __atomic_store_n(&f->call_ns, now, __ATOMIC_RELAXED);
    __atomic_store_n(&f->calls, f->calls + 1, __ATOMIC_RELEASE);
    if (f->step_begin_ns) return;
    f->step_begin_ns = now; // the first call of a step
    __atomic_store_n(&f->comm_ns, 0, __ATOMIC_RELAXED);
}

// Notes the end of a step, at finalize.
static void fsdpi_flight_step_end(fsdp_world *w, uint64_t step) {
    fsdpi_flight_record *f = w->flight;
    fsdpi_flight_step *s = &f->last[f->steps % FSDPI_FLIGHT_STEPS];
    s->begin_ns = f->step_begin_ns;
    s->end_ns = fsdpi_now(w);
    s->comm_ns = __atomic_exchange_n(&f->comm_ns, 0, __ATOMIC_RELAXED);
    s->step = step;
    f->step_begin_ns = 0;
    __atomic_store_n(&f->steps, f->steps + 1, __ATOMIC_RELEASE);
}

#endif // FSDPI_CORE_FLIGHT_H
