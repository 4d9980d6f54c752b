/* stub_nccl.c - NCCL on the host: ranks, which are threads or processes, share an anonymous file in
   which they show each other their data, and wait without limit, as NCCL does. Sums are the
   library's own (src/base/reduce.h), in rank order. See stub.h. For tests only.

   Ranks find each other by the id: it names a file descriptor of the process that made it, which
   the others open below /proc. Nothing is left, however a rank ends.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls, also with -std=c99 */
#endif
#undef FSDP_STUB_NCCL
#define FSDP_STUB_NCCL 23102 /* this library has every feature */
#include "stub_core.h"

#define FSDP_STATIC
#define FSDP_IMPLEMENTATION
#include "../../src/base/reduce.h"

#include <fcntl.h>       /* open */
#include <pthread.h>     /* pthread_create, pthread_mutex_lock */
#include <sched.h>       /* sched_yield */
#include <stdio.h>       /* snprintf */
#include <stdlib.h>      /* calloc, free, getenv */
#include <string.h>      /* memcpy, memset */
#include <sys/mman.h>    /* mmap */
#include <sys/syscall.h> /* SYS_futex, SYS_memfd_create */
#include <time.h>        /* clock_gettime */
#include <unistd.h>      /* ftruncate, getpid, close */

enum { RANKS = 64, ALIGN = 2 << 20, YIELDS = 8, YIELD_NS = 50000 };
#define STAGE ((size_t)262144) /* bytes that a rank shows at once */
#define PIECE ((size_t)16384)  /* bytes of a message */
enum { WORDS = 8 };
#define MAGIC 0x6662757473ull

#define LOAD(p)     __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define STORE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)

enum kind {
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_REDUCE,
    BROADCAST,
    ALL_TO_ALL,
    SEND,
    RECV,
    INIT,
    SPLIT,
    WINDOW,
    FINALIZE
};
static const char *const kind_names[] = {"ncclAllGather",   "ncclReduceScatter",
                                         "ncclAllReduce",   "ncclBroadcast",
                                         "ncclAlltoAll",    "ncclSend",
                                         "ncclRecv",        "ncclCommInitRank",
                                         "ncclCommSplit",   "ncclCommWindowRegister",
                                         "ncclCommFinalize"};

/* ---- the file that ranks share --------------------------------------------------------------- */

/* Data that a rank shows: its number of arrivals, and its next operation. */
typedef struct member {
    uint32_t arrived, joined;
    uint64_t record[WORDS];
    uint64_t host, device; /* a hash of the host's name; the GPU */
    uint64_t pad[5];
} member;

/* A channel from one rank to another: full while sent != taken. */
typedef struct channel {
    uint32_t sent, taken, bytes, pad;
    char data[PIECE];
} channel;

typedef struct shared {
    uint64_t magic, nonce;
    uint32_t bell; /* changes when all have arrived, and with each message; a futex */
    int32_t size, version, pad;
    member members[RANKS];
} shared; /* followed by size * size channels, then a stage for each rank */

/* A mapped file: ranks that are threads share a mapping. */
typedef struct mapping {
    struct mapping *next;
    shared *at;
    size_t bytes;
    int pid, fd, refs; /* fd: in the process that made the id, until all have arrived; then -1 */
    uint64_t nonce;
} mapping;

typedef struct where { /* contents of an id */
    uint64_t magic, nonce;
    int32_t pid, fd;
} where;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static mapping *mappings;
static int async_all, is_set_up;
static uint64_t host_hash; /* from the variables at the process's first init; 0: none */
static char warning[256];

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

static void take_lock(void) {
    pthread_mutex_lock(&lock);
    if (is_set_up) return;
    is_set_up = 1;
    pthread_atfork(before_fork, after_fork, after_fork);
}

/* Large sums connect ranks in NCCL; here they take long and connect nothing. */
static void __attribute__((constructor)) leave_cold(void) { setenv("FSDP_NCCL_WARM_UP", "0", 0); }

static ncclResult_t warn(ncclResult_t result, const char *text) {
    take_lock();
    snprintf(warning, sizeof warning, "%s", text);
    pthread_mutex_unlock(&lock);
    return result;
}

static size_t file_bytes(int size) {
    return sizeof(shared) + (size_t)(size * size) * sizeof(channel) + (size_t)size * STAGE;
}

static channel *channel_of(shared *s, int from, int to) {
    return (channel *)(void *)(s + 1) + from * s->size + to;
}

static char *stage_of(shared *s, int rank) {
    return (char *)channel_of(s, s->size, 0) + (size_t)rank * STAGE;
}

/* Makes a file; the caller's process keeps it open for the others. */
static int make_file(where *w) {
    static uint64_t made;
    struct timespec t;
    shared *s;
    memset(w, 0, sizeof *w);
    clock_gettime(CLOCK_MONOTONIC, &t);
    w->magic = MAGIC;
    w->pid = (int32_t)getpid();
    w->nonce = ((uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec) * 64u +
               __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED) % 64u;
    w->fd = (int32_t)syscall(SYS_memfd_create, "stub-nccl", 1 /* MFD_CLOEXEC */);
    if (w->fd < 0 || ftruncate(w->fd, (off_t)sizeof *s)) return 0;
    s = (shared *)mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, w->fd, 0);
    if (s == MAP_FAILED) return 0;
    s->magic = w->magic;
    s->nonce = w->nonce;
    munmap((void *)s, sizeof *s);
    mapping *m = (mapping *)calloc(1, sizeof *m);
    if (!m) stub_die("out of memory");
    m->pid = w->pid;
    m->fd = w->fd;
    m->nonce = w->nonce;
    take_lock();
    m->next = mappings;
    mappings = m;
    pthread_mutex_unlock(&lock);
    return 1;
}

static mapping *find_mapping(uint64_t nonce) {
    mapping *m = mappings;
    while (m && (m->nonce != nonce || m->pid != getpid())) m = m->next;
    return m;
}

static int open_mapping(mapping *m, const where *w, int size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)w->pid, (int)w->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return 0;
    void *at = MAP_FAILED;
    m->bytes = file_bytes(size);
    if (!ftruncate(fd, (off_t)m->bytes))
        at = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return 0;
    m->at = (shared *)at;
    if (m->at->magic == w->magic && m->at->nonce == w->nonce) return 1;
    munmap(at, m->bytes); /* another file: the process that made the id is gone */
    m->at = NULL;
    return 0;
}

static mapping *attach(const where *w, int size) {
    take_lock();
    mapping *m = find_mapping(w->nonce);
    if (!m) {
        m = (mapping *)calloc(1, sizeof *m);
        if (!m) stub_die("out of memory");
        m->pid = (int)getpid();
        m->fd = -1;
        m->nonce = w->nonce;
        m->next = mappings;
        mappings = m;
    }
    if (!m->at && !open_mapping(m, w, size)) m = NULL;
    if (m) m->refs++;
    pthread_mutex_unlock(&lock);
    return m;
}

/* All ranks have arrived: the file need not be opened again. */
static void close_file(mapping *m) {
    take_lock();
    if (m->fd >= 0) close(m->fd);
    m->fd = -1;
    pthread_mutex_unlock(&lock);
}

static void detach(mapping *m) {
    take_lock();
    mapping **link = &mappings;
    if (--m->refs == 0) {
        while (*link != m) link = &(*link)->next;
        *link = m->next;
        if (m->fd >= 0) close(m->fd);
        munmap((void *)m->at, m->bytes);
        free(m);
    }
    pthread_mutex_unlock(&lock);
}

static void futex(uint32_t *word, int is_wake, uint32_t seen) {
    struct timespec t = {0, 1000000};
    if (is_wake) syscall(SYS_futex, word, 1 /* FUTEX_WAKE */, 0x7fffffff, NULL, NULL, 0);
    else syscall(SYS_futex, word, 0 /* FUTEX_WAIT */, seen, &t, NULL, 0);
}

static void ring(shared *s) {
    __atomic_add_fetch(&s->bell, 1u, __ATOMIC_SEQ_CST);
    futex(&s->bell, 1, 0);
}

/* ---- communicators --------------------------------------------------------------------------- */

typedef struct coll {
    ncclComm_t comm;
    enum kind kind;
    const char *src;
    char *dst;
    size_t count, esize;
    int type, op, peer; /* peer: or root */
    cudaStream_t stream;
    uint64_t registered; /* number of the comm's registrations when it was issued */
} coll;

/* Collectives of one group: for one comm, or for all. */
typedef struct batch {
    ncclComm_t comm;
    coll *list;
    int count;
    uint64_t number; /* number among the device's batches, in the order of issue, from 1 */
} batch;

/* A call that waits for peers on the host: inline, or in a separate thread. */
typedef struct job {
    ncclComm_t comm, *child, made; /* child: receives the new handle when the call is over */
    enum kind kind;
    int color, key, blocking, destroys;
    where id;
    uint64_t offset, size; /* place of a window */
    stub_thread thread;
    pthread_t id_of_thread;
    int done;
    ncclResult_t result;
} job;

struct ncclComm {
    struct ncclComm *next; /* list of all comms; under `lock` */
    int rank, size, device, blocking, ctas;
    ncclComm_t parent; /* while a split makes this comm: an abort of the parent ends the split */
    mapping *file;
    uint32_t turn; /* number of arrivals of this rank */
    uint32_t aborted, refs, closed, finalized;
    stub_point last; /* its last launch: operations of one comm run in the order of issue */
    stub_clock clock;
    uint64_t registered, registrations;
    struct registration *kept; /* registered memory; under `lock` */
    int async;
    /* Under the guard, as a watchdog may poll as well. In progress while it runs a call, has polls
       left, or has pending operations, which are launched after the last poll. */
    pthread_mutex_t guard;
    int polls;
    ncclResult_t result;
    job *running;
    batch pending;
    stub_thread issuer;
};

static __thread int depth, group_room;
static __thread batch group;
static __thread job *group_jobs[RANKS];
static __thread int num_jobs;
static __thread ncclResult_t group_error;

static void hold(ncclComm_t c) { __atomic_add_fetch(&c->refs, 1u, __ATOMIC_RELAXED); }

/* Comms that are left at the process's end are no leak: they can be reached from here. */
static ncclComm_t all_comms;

static void drop(ncclComm_t c) {
    ncclComm_t *link = &all_comms;
    if (__atomic_sub_fetch(&c->refs, 1u, __ATOMIC_ACQ_REL)) return;
    take_lock();
    while (*link != c) link = &(*link)->next;
    *link = c->next;
    pthread_mutex_unlock(&lock);
    if (c->file) detach(c->file);
    free(c->pending.list);
    pthread_mutex_destroy(&c->guard);
    free(c);
}

/* Memory that is registered with a comm, as a buffer or as a window. */
typedef struct registration {
    struct registration *next;
    void *ptr;
    int kind;
} registration;

static void end_registration(ncclComm_t c, void *handle) {
    take_lock();
    registration **link = &c->kept;
    while (*link && *link != (registration *)handle) link = &(*link)->next;
    registration *r = *link;
    if (r) *link = r->next;
    pthread_mutex_unlock(&lock);
    if (!r) return;
    stub_register(r->ptr, -1);
    stub_live_add(r->kind, -1);
    free(r);
}

/* Ends the handle, by the first destroy or abort, and its registrations. */
static void close_comm(ncclComm_t c) {
    if (__atomic_exchange_n(&c->closed, 1u, __ATOMIC_ACQ_REL)) return;
    while (c->kept) end_registration(c, c->kept);
    stub_live_add(STUB_COMMS, -1);
    drop(c);
}

static void pause_until_rung(ncclComm_t c, uint32_t seen) { futex(&c->file->at->bell, 0, seen); }

static int all_have_arrived(const ncclComm_t c) {
    const shared *s = c->file->at;
    for (int k = 0; k < c->size; k++)
        if ((int32_t)(__atomic_load_n(&s->members[k].arrived, __ATOMIC_SEQ_CST) - c->turn) < 0)
            return 0;
    return 1;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Arrives, and waits for all others, which the last one wakes. Returns 0 if aborted before that.
   To yield a few times costs less than to sleep and to be woken, but on a machine with much to run
   each time may take long. */
static int meet(ncclComm_t c) {
    shared *s = c->file->at;
    int64_t start = 0;
    __atomic_store_n(&s->members[c->rank].arrived, ++c->turn, __ATOMIC_SEQ_CST);
    if (all_have_arrived(c)) {
        ring(s);
        return 1;
    }
    for (int turn = 0;; turn++) {
        uint32_t seen = LOAD(&s->bell);
        if (all_have_arrived(c)) return 1;
        if (LOAD(&c->aborted) || (c->parent && LOAD(&c->parent->aborted))) return 0;
        if (!start) start = now_ns();
        if (turn < YIELDS && now_ns() - start < YIELD_NS) sched_yield();
        else pause_until_rung(c, seen);
    }
}

static int hang(ncclComm_t c) {
    while (!LOAD(&c->aborted)) pause_until_rung(c, LOAD(&c->file->at->bell));
    return 0;
}

static void show(ncclComm_t c, enum kind kind, uint64_t a, uint64_t b, uint64_t d, uint64_t e) {
    uint64_t *record = c->file->at->members[c->rank].record;
    record[0] = (uint64_t)kind;
    record[1] = a;
    record[2] = b;
    record[3] = d;
    record[4] = e;
}

static const uint64_t *shown(ncclComm_t c, int rank) { return c->file->at->members[rank].record; }

/* Returns 1 if all ranks show the same first n words. */
static int all_agree(ncclComm_t c, int n) {
    for (int k = 0; k < c->size; k++)
        if (memcmp(shown(c, k), shown(c, c->rank), (size_t)n * sizeof(uint64_t))) return 0;
    return 1;
}

/* ---- collectives, as they run in a stream ---------------------------------------------------- */

static void touch_all(const coll *op) {
    size_t one = op->count * op->esize, all = one * (size_t)op->comm->size;
    size_t mine = one * (size_t)op->comm->rank;
    int wide_src = op->kind == REDUCE_SCATTER || op->kind == ALL_TO_ALL;
    int wide_dst = op->kind == ALL_GATHER || op->kind == ALL_TO_ALL;
    int reads = op->src && !(op->kind == BROADCAST && op->peer != op->comm->rank);
    if (reads) fsdp_stub_touch(op->src, wide_src ? all : one, 0);
    if (op->kind == SEND) return;
    if (op->kind == ALL_GATHER && op->src == op->dst + mine) {
        fsdp_stub_touch(op->dst, mine, 1);
        fsdp_stub_touch(op->dst + mine + one, all - mine - one, 1);
    } else if (!(op->kind == BROADCAST && reads && op->src == op->dst)) {
        fsdp_stub_touch(op->dst, wide_dst ? all : one, 1);
    }
}

static fsdp_dtype dtype_of(int type) {
    static const struct {
        int nccl;
        fsdp_dtype own;
    } table[] = {{ncclInt32, FSDP_I32},   {ncclInt64, FSDP_I64},   {ncclFloat16, FSDP_F16},
                 {ncclFloat32, FSDP_F32}, {ncclFloat64, FSDP_F64}, {ncclBfloat16, FSDP_BF16}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (table[i].nccl == type) return table[i].own;
    return (fsdp_dtype)0;
}

/* Returns the elements of one turn: each rank's data must fit on its stage. */
static size_t turn_of(const coll *op) {
    size_t parts = op->kind == REDUCE_SCATTER || op->kind == ALL_TO_ALL ? (size_t)op->comm->size
                                                                        : 1;
    return STAGE / parts / op->esize / 16 * 16;
}

static void show_data(const coll *op, size_t at, size_t n, size_t turn) {
    ncclComm_t c = op->comm;
    char *stage = stage_of(c->file->at, c->rank);
    int parts = op->kind == REDUCE_SCATTER || op->kind == ALL_TO_ALL ? c->size : 1;
    if (op->kind == BROADCAST && op->peer != c->rank) return;
    for (int k = 0; k < parts; k++)
        memcpy(stage + (size_t)k * turn * op->esize,
               op->src + ((size_t)k * op->count + at) * op->esize, n * op->esize);
}

static void take_data(const coll *op, size_t at, size_t n, size_t turn) {
    ncclComm_t c = op->comm;
    const char *srcs[RANKS];
    char *to = op->dst + at * op->esize;
    for (int k = 0; k < c->size; k++) {
        srcs[k] = stage_of(c->file->at, k);
        if (op->kind == REDUCE_SCATTER || op->kind == ALL_TO_ALL)
            srcs[k] += (size_t)c->rank * turn * op->esize;
        char *part = to + (size_t)k * op->count * op->esize;
        int in_place = op->kind == ALL_GATHER && k == c->rank && part == op->src + at * op->esize;
        if ((op->kind == ALL_GATHER && !in_place) || op->kind == ALL_TO_ALL)
            memcpy(part, srcs[k], n * op->esize);
    }
    if (op->kind == BROADCAST && (op->peer != c->rank || op->src != op->dst))
        memcpy(to, srcs[op->peer], n * op->esize);
    if (op->kind != REDUCE_SCATTER && op->kind != ALL_REDUCE) return;
    double scale = op->op == ncclAvg ? 1.0 / c->size : 1.0;
    fsdp_redop redop = op->op == ncclMax ? FSDP_MAX : op->op == ncclMin ? FSDP_MIN : FSDP_SUM;
    fsdp_dtype dtype = dtype_of(op->type);
    fsdpi_reduce(to, dtype, srcs, c->size, dtype, n, scale, 0, redop);
}

/* Ranks that call different operations hang in NCCL, or get garbage. */
static int disagree(const coll *op) {
    size_t parts = op->kind == ALL_GATHER || op->kind == ALL_TO_ALL ? (size_t)op->comm->size : 1;
    if (!stub_get(STUB_GARBAGE)) return hang(op->comm);
    memset(op->dst, 0xEE, parts * op->count * op->esize);
    return meet(op->comm);
}

static int run_coll(const coll *op) {
    ncclComm_t c = op->comm;
    size_t turn = turn_of(op);
    for (size_t at = 0; at < op->count; at += turn) {
        size_t n = op->count - at < turn ? op->count - at : turn;
        show(c, op->kind, op->count, (uint64_t)op->type, (uint64_t)(op->op << 8 | op->peer),
             op->registered);
        show_data(op, at, n, turn);
        if (!meet(c)) return 0;
        if (at == 0 && !all_agree(c, 4)) return disagree(op);
        if (at == 0 && !all_agree(c, 5))
            stub_die("%s: ranks have not registered the same offsets and sizes in the same order",
                     kind_names[op->kind]);
        take_data(op, at, n, turn);
        if (!meet(c)) return 0;
    }
    return 1;
}

/* Moves as much as possible; *done: bytes of this message so far. */
static int run_piece(const coll *op, size_t *done) {
    ncclComm_t c = op->comm;
    shared *s = c->file->at;
    size_t bytes = op->count * op->esize, left = bytes - *done;
    int sends = op->kind == SEND;
    channel *ch = sends ? channel_of(s, c->rank, op->peer) : channel_of(s, op->peer, c->rank);
    uint32_t sent = LOAD(&ch->sent), taken = LOAD(&ch->taken);
    if (sends == (sent != taken)) return 0;
    if (sends) {
        ch->bytes = (uint32_t)(left < PIECE ? left : PIECE);
        memcpy(ch->data, op->src + *done, ch->bytes);
    } else {
        memcpy(op->dst + *done, ch->data, ch->bytes < left ? ch->bytes : left);
    }
    *done += ch->bytes < left ? ch->bytes : left;
    STORE(sends ? &ch->sent : &ch->taken, sends ? sent + 1 : taken + 1);
    ring(s);
    return 1;
}

/* Runs all messages of a group at the same time; those to, or from, one peer in order. */
static int run_messages(const coll *list, int count, size_t *done) {
    ncclComm_t c = list->comm;
    for (;;) {
        uint32_t seen = LOAD(&c->file->at->bell);
        int left = 0, moves = 0;
        for (int i = 0; i < count; i++) {
            int first = list[i].kind == SEND || list[i].kind == RECV;
            if (!first || done[i] == list[i].count * list[i].esize) continue;
            left++;
            for (int j = 0; j < i; j++)
                first &= !(list[j].kind == list[i].kind && list[j].peer == list[i].peer &&
                           done[j] < list[j].count * list[j].esize);
            if (first) moves += run_piece(&list[i], &done[i]);
        }
        if (!left) return 1;
        if (LOAD(&c->aborted)) return 0;
        if (!moves) pause_until_rung(c, seen);
    }
}

/* The SMs of a device: kernels of NCCL hold theirs until all peers have arrived. With a launch
   order, no kernel takes SMs before those that were issued earlier. */
enum { DEVICES = 64 };
static struct {
    int used;
    uint64_t issued, begun;
} rooms[DEVICES];

static uint64_t take_number(const ncclComm_t c) {
    take_lock();
    uint64_t number = ++rooms[c->device].issued;
    pthread_mutex_unlock(&lock);
    return number;
}

static int has_order(void) {
    const char *text = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    return text && atoi(text) && stub_get(STUB_NCCL_VERSION) >= 22602;
}

/* Returns 0 if aborted before SMs were free. */
static int take_room(const batch *b) {
    ncclComm_t c = b->comm;
    int order = has_order(), sms = stub_get(STUB_SMS), taken = 0;
    while (!taken && !LOAD(&c->aborted)) {
        uint32_t bell = LOAD(&c->file->at->bell);
        take_lock();
        taken = rooms[c->device].used + c->ctas <= sms || !rooms[c->device].used;
        taken = taken && (!order || rooms[c->device].begun + 1 >= b->number);
        if (taken) rooms[c->device].used += c->ctas;
        pthread_mutex_unlock(&lock);
        if (!taken) pause_until_rung(c, bell);
    }
    take_lock();
    if (rooms[c->device].begun < b->number) rooms[c->device].begun = b->number;
    pthread_mutex_unlock(&lock);
    return taken;
}

int stub_begun(int device) {
    take_lock();
    int begun = (int)rooms[device].begun;
    pthread_mutex_unlock(&lock);
    return begun;
}

static void give_room(ncclComm_t c) {
    take_lock();
    rooms[c->device].used -= c->ctas;
    pthread_mutex_unlock(&lock);
}

static void run_batch(void *arg) {
    batch *b = (batch *)arg;
    ncclComm_t c = b->comm;
    size_t *done = (size_t *)calloc((size_t)b->count, sizeof *done);
    if (!done) stub_die("out of memory");
    int has_room = take_room(b), ok = has_room && !LOAD(&c->aborted);
    for (int i = 0; i < b->count; i++) touch_all(&b->list[i]);
    for (int i = 0; i < b->count && ok; i++)
        if (b->list[i].kind != SEND && b->list[i].kind != RECV) ok = run_coll(&b->list[i]);
    if (ok) (void)run_messages(b->list, b->count, done);
    if (has_room) give_room(c);
    free(done);
    free(b->list);
    free(b);
    drop(c);
}

/* ---- launches -------------------------------------------------------------------------------- */

typedef struct launch {
    batch *part;
    cudaStream_t stream;
    const stub_point *tails; /* last op of each stream in the group; one more element is free */
    int num_tails;
    stub_thread thread;
    pthread_t id;
    stub_point point;
} launch;

static void *launch_one(void *arg) {
    launch *l = (launch *)arg;
    ncclComm_t c = l->part->comm;
    stub_point *deps = (stub_point *)calloc((size_t)l->num_tails + 1, sizeof *deps);
    if (!deps) stub_die("out of memory");
    memcpy(deps, l->tails, (size_t)l->num_tails * sizeof *deps);
    deps[l->num_tails] = c->last;
    stub_thread_set(l->thread);
    hold(c); /* two holds: for the batch, which may end earlier, and for this call */
    hold(c);
    l->point = stub_submit(l->stream, kind_names[l->part->list[0].kind], run_batch, l->part, deps,
                           l->num_tails + 1, &c->clock);
    c->last = l->point;
    if (stub_get(STUB_BLOCKING)) stub_wait(l->point);
    drop(c);
    free(deps);
    return NULL;
}

/* Returns the collectives of one comm in a group. */
static batch *take_part(const batch *from, ncclComm_t c) {
    batch *part = (batch *)calloc(1, sizeof *part);
    coll *list = (coll *)calloc((size_t)from->count, sizeof *list);
    if (!part || !list) stub_die("out of memory");
    part->comm = c;
    part->list = list;
    for (int i = 0; i < from->count; i++)
        if (from->list[i].comm == c) list[part->count++] = from->list[i];
    return part;
}

/* Issues one op for each comm, on its first stream, after all streams of the group; then all
   streams wait for all ops. Several comms may be ranks of one communicator, so none may wait for
   another here. */
static void launch_batch(const batch *b, stub_thread issuer) {
    stub_thread me = stub_thread_get();
    stub_point *tails = (stub_point *)calloc((size_t)b->count, sizeof *tails);
    launch *launches = (launch *)calloc((size_t)b->count, sizeof *launches);
    stub_point *ends = (stub_point *)calloc((size_t)b->count, sizeof *ends);
    int num_tails = 0, num = 0;
    if (!tails || !launches || !ends) stub_die("out of memory");
    stub_thread_set(issuer);
    for (int i = 0; i < b->count; i++) {
        int k = 0, l = 0;
        while (k < num_tails && tails[k].stream != b->list[i].stream) k++;
        if (k == num_tails) tails[num_tails++] = stub_tail(b->list[i].stream);
        while (l < num && launches[l].part->comm != b->list[i].comm) l++;
        if (l < num) continue;
        launches[l].part = take_part(b, b->list[i].comm);
        launches[l].part->number = take_number(b->list[i].comm);
        launches[l].stream = b->list[i].stream;
        launches[l].thread = issuer;
        num++;
    }
    for (int l = 0; l < num; l++) {
        launches[l].tails = tails;
        launches[l].num_tails = num_tails;
        if (num == 1) launch_one(&launches[l]);
        else if (pthread_create(&launches[l].id, NULL, launch_one, &launches[l]))
            stub_die("no thread for a launch");
    }
    for (int l = 0; l < num; l++) {
        if (num > 1) pthread_join(launches[l].id, NULL);
        ends[l] = launches[l].point;
    }
    for (int k = 0; k < num_tails; k++)
        if (num > 1 || tails[k].stream != launches[0].stream)
            stub_submit(tails[k].stream, "ncclGroupEnd", NULL, NULL, ends, num, NULL);
    stub_thread_set(me);
    free(tails);
    free(launches);
    free(ends);
}

/* ---- calls that wait on the host ------------------------------------------------------------- */

/* Returns 1 if `value` equals the word that the first rank has set. */
static int same(int32_t *word, int32_t value) {
    int32_t seen = LOAD(word);
    if (!seen &&
        __atomic_compare_exchange_n(word, &seen, value, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return 1;
    return seen == value;
}

static void tell_device(const ncclComm_t c, member *me) {
    take_lock();
    if (!host_hash) {
        const char *name = getenv("NCCL_HOSTID");
        host_hash = 14695981039346656037u;
        for (const char *at = name ? name : ""; *at; at++)
            host_hash = (host_hash ^ (unsigned char)*at) * 1099511628211u;
    }
    me->host = host_hash;
    pthread_mutex_unlock(&lock);
    me->device = (uint64_t)c->device;
}

/* As in NCCL: two ranks on one GPU of one apparent host are refused, and the others lose them. */
static ncclResult_t check_devices(ncclComm_t c) {
    const member *all = c->file->at->members;
    const char *many = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    int version = stub_get(STUB_NCCL_VERSION), lost = 0;
    char text[120];
    if (many && atoi(many) && version >= 23003) return ncclSuccess;
    for (int i = 0; i < c->size; i++)
        for (int k = 0; k < c->size; k++) {
            if (i == k || all[i].host != all[k].host || all[i].device != all[k].device) continue;
            lost = 1;
            if (i != c->rank) continue;
            snprintf(text, sizeof text,
                     version >= 23003 ? "Multiple Ranks are using the same GPU/Partition: rank %d "
                                        "and rank %d both on CUDA device %d"
                                      : "Duplicate GPU detected : rank %d and rank %d both on CUDA "
                                        "device %d",
                     i, k, c->device);
            return warn(ncclInvalidUsage, text);
        }
    return lost ? warn(ncclRemoteError, "a peer has gone while it was connected") : ncclSuccess;
}

static ncclResult_t do_init(job *j) {
    ncclComm_t c = j->comm;
    if (stub_is_forked())
        return warn(ncclUnhandledCudaError, "CUDA was in use when this process was forked");
    STORE(&c->file, attach(&j->id, c->size));
    if (!c->file)
        return warn(ncclSystemError, "the process that made the unique id cannot be reached");
    shared *s = c->file->at;
    if (!same(&s->size, c->size))
        return warn(ncclInvalidUsage, "ranks have different numbers of ranks");
    if (!same(&s->version, stub_get(STUB_NCCL_VERSION)))
        return warn(ncclInvalidUsage, "ranks have different versions of the library");
    if (__atomic_exchange_n(&s->members[c->rank].joined, 1u, __ATOMIC_ACQ_REL))
        return warn(ncclInvalidUsage, "two ranks have the same number, or the id is used again");
    tell_device(c, &s->members[c->rank]);
    if (!meet(c)) return warn(ncclInternalError, "aborted while it waited for other ranks");
    close_file(c->file);
    return check_devices(c);
}

static ncclComm_t new_comm(int rank, int size, int device, int blocking) {
    ncclComm_t c = (ncclComm_t)calloc(1, sizeof *c);
    if (!c) stub_die("out of memory");
    c->rank = rank;
    c->size = size;
    c->device = device;
    c->blocking = blocking;
    const char *ctas = getenv("NCCL_MAX_CTAS");
    c->ctas = ctas && atoi(ctas) > 0 && atoi(ctas) < 24 ? atoi(ctas) : 24; /* as in a ring */
    c->refs = 1;
    pthread_mutex_init(&c->guard, NULL);
    take_lock();
    c->next = all_comms;
    all_comms = c;
    pthread_mutex_unlock(&lock);
    stub_live_add(STUB_COMMS, 1);
    return c;
}

/* Returns the caller's new rank among those of its color, and their number. */
static int split_rank(ncclComm_t c, int *size, int *leader) {
    int color = (int)(int64_t)shown(c, c->rank)[1], rank = 0;
    int64_t key = (int64_t)shown(c, c->rank)[2], least = INT64_MAX;
    *size = 0;
    for (int k = 0; k < c->size; k++) {
        int64_t other = (int64_t)shown(c, k)[2];
        if ((int)(int64_t)shown(c, k)[1] != color) continue;
        ++*size;
        rank += other < key || (other == key && k < c->rank);
        if (other < least) {
            least = other;
            *leader = k;
        }
    }
    return rank;
}

/* Exchanges colors and keys, then the file that the first rank of each color has made. */
static ncclResult_t do_split(job *j) {
    ncclComm_t c = j->comm, child = NULL;
    int size = 0, leader = 0, rank = 0;
    static const char aborted[] = "aborted while it waited for other ranks";
    stub_wait(c->last);
    show(c, SPLIT, (uint64_t)(int64_t)j->color, (uint64_t)(int64_t)j->key, 0, 0);
    if (!meet(c)) return warn(ncclInternalError, aborted);
    if (!all_agree(c, 1)) {
        hang(c);
        return warn(ncclInternalError, aborted);
    }
    if (j->color >= 0) rank = split_rank(c, &size, &leader);
    if (!meet(c)) return warn(ncclInternalError, aborted);
    if (j->color >= 0 && c->rank == leader) {
        if (!make_file(&j->id)) return warn(ncclSystemError, "no file for the new communicator");
        show(c, SPLIT, j->id.nonce, (uint64_t)j->id.pid, (uint64_t)j->id.fd, 0);
    }
    if (!meet(c)) return warn(ncclInternalError, aborted);
    if (j->color >= 0) {
        j->id.magic = MAGIC;
        j->id.nonce = shown(c, leader)[1];
        j->id.pid = (int32_t)shown(c, leader)[2];
        j->id.fd = (int32_t)shown(c, leader)[3];
        child = new_comm(rank, size, c->device, j->blocking);
        child->parent = c;
        job init = *j;
        init.comm = child;
        ncclResult_t result = do_init(&init);
        child->parent = NULL;
        if (result) {
            close_comm(child);
            return result;
        }
        child->polls = child->blocking ? 0 : stub_get(STUB_PROGRESS);
    }
    if (!meet(c)) {
        if (child) close_comm(child);
        return warn(ncclInternalError, aborted);
    }
    j->made = child;
    return ncclSuccess;
}

static ncclResult_t do_finalize(job *j) {
    ncclComm_t c = j->comm;
    stub_wait(c->last);
    if (c->file && !c->finalized && !LOAD(&c->aborted)) {
        show(c, FINALIZE, 0, 0, 0, 0);
        if (meet(c) && !all_agree(c, 1)) hang(c);
    }
    c->finalized = 1;
    if (j->destroys) close_comm(c);
    return ncclSuccess;
}

static ncclResult_t do_window(job *j) {
    ncclComm_t c = j->comm;
    stub_wait(c->last);
    show(c, WINDOW, j->offset, j->size, (uint64_t)j->key, 0);
    if (!meet(c)) return warn(ncclInternalError, "aborted while it waited for other ranks");
    if (!all_agree(c, 4)) stub_die("ranks registered windows of other offsets, sizes or flags");
    return meet(c) ? ncclSuccess : ncclInternalError;
}

static void *job_main(void *arg) {
    job *j = (job *)arg;
    ncclComm_t c = j->comm;
    stub_thread_set(j->thread);
    j->result = j->kind == INIT     ? do_init(j)
                : j->kind == SPLIT  ? do_split(j)
                : j->kind == WINDOW ? do_window(j)
                                    : do_finalize(j);
    STORE(&j->done, 1);
    drop(c);
    return NULL;
}

static job *new_job(ncclComm_t c, enum kind kind) {
    job *j = (job *)calloc(1, sizeof *j);
    if (!j) stub_die("out of memory");
    j->comm = c;
    j->kind = kind;
    j->thread = stub_thread_get();
    return j;
}

static void start_job(job *j) {
    hold(j->comm);
    if (pthread_create(&j->id_of_thread, NULL, job_main, j)) stub_die("no thread for a call");
}

/* An init that failed leaves no handle. */
static void give_up(job *init) {
    close_comm(*init->child);
    *init->child = NULL;
}

/* Runs jobs, blocking: one inline, several in threads, as at the end of a group. */
static ncclResult_t run_jobs(job **jobs, int count) {
    ncclResult_t result = ncclSuccess;
    if (count == 1) {
        hold(jobs[0]->comm);
        job_main(jobs[0]);
    }
    for (int i = 0; i < count && count > 1; i++) start_job(jobs[i]);
    for (int i = 0; i < count; i++) {
        if (count > 1) pthread_join(jobs[i]->id_of_thread, NULL);
        if (!result) result = jobs[i]->result;
        if (jobs[i]->kind == SPLIT) *jobs[i]->child = jobs[i]->made;
        if (jobs[i]->result && jobs[i]->kind == INIT) give_up(jobs[i]);
        free(jobs[i]);
    }
    return result;
}

/* Starts a job: in a group it waits for the group's end; on a non-blocking comm it runs in a
   thread. */
static ncclResult_t give_job(job *j, int blocking) {
    ncclComm_t c = j->comm;
    if (!blocking) {
        pthread_mutex_lock(&c->guard);
        c->polls = stub_get(STUB_PROGRESS);
        c->result = ncclSuccess;
        c->running = j;
        start_job(j);
        pthread_mutex_unlock(&c->guard);
        return ncclInProgress;
    }
    if (depth == 0) return run_jobs(&j, 1);
    if (num_jobs == RANKS) stub_die("too many calls in a group");
    group_jobs[num_jobs++] = j;
    return ncclSuccess;
}

static int is_busy(ncclComm_t c) {
    pthread_mutex_lock(&c->guard);
    int busy = c->running || c->polls > 0 || c->pending.count;
    pthread_mutex_unlock(&c->guard);
    return busy;
}

/* ---- the interface: communicators ------------------------------------------------------------ */

#define ENTER(name)                                                                                \
    do {                                                                                           \
        int entered = stub_enter(name);                                                            \
        if (entered) return injected(entered);                                                     \
    } while (0)

/* Converts a code of the CUDA runtime to NCCL's. */
static ncclResult_t injected(int code) {
    ncclResult_t result = code < ncclNumResults ? (ncclResult_t)code : ncclUnhandledCudaError;
    if (depth && !group_error) group_error = result;
    return warn(result, "an injected failure");
}

static ncclResult_t refuse(ncclResult_t result, const char *text) {
    if (depth && !group_error) group_error = result;
    return warn(result, text);
}

ncclResult_t ncclGetVersion(int *version) {
    ENTER("ncclGetVersion");
    *version = stub_get(STUB_NCCL_VERSION);
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    where w;
    ENTER("ncclGetUniqueId");
    memset(id, 0, sizeof *id);
    if (!make_file(&w)) return warn(ncclSystemError, "no file for a communicator");
    memcpy(id->internal, &w, sizeof w);
    return ncclSuccess;
}

/* Returns 1 if a config is blocking; -1: invalid config. The environment overrides it. */
static int config_blocks(const ncclConfig_t *config, int fallback) {
    const char *text = getenv("NCCL_COMM_BLOCKING");
    int blocking = config ? config->blocking : NCCL_CONFIG_UNDEF_INT;
    if (config && (config->magic != 0xcafebeefu || config->size < 24)) return -1;
    if (config && config->size >= 40 && config->minCTAs > config->maxCTAs &&
        config->maxCTAs != NCCL_CONFIG_UNDEF_INT)
        return -1;
    if (text && *text) return atoi(text) != 0;
    return blocking == NCCL_CONFIG_UNDEF_INT ? fallback : blocking != 0;
}

static ncclResult_t init_rank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                              const ncclConfig_t *config) {
    int device = 0, blocking = config_blocks(config, 1);
    where w;
    memcpy(&w, id.internal, sizeof w);
    if (!comm || nranks < 1 || nranks > RANKS || rank < 0 || rank >= nranks || w.magic != MAGIC)
        return refuse(ncclInvalidArgument, "init: number of ranks, rank or id is wrong");
    if (blocking < 0) return refuse(ncclInvalidArgument, "init: the config was not initialised");
    device = stub_thread_get().device;
    *comm = new_comm(rank, nranks, device, blocking);
    job *j = new_job(*comm, INIT);
    j->id = w;
    j->child = comm;
    return give_job(j, blocking);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank) {
    ENTER("ncclCommInitRank");
    return init_rank(comm, nranks, id, rank, NULL);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    ENTER("ncclCommInitRankConfig");
    return init_rank(comm, nranks, id, rank, config);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *child,
                           ncclConfig_t *config) {
    ENTER("ncclCommSplit");
    int blocking = config_blocks(config, comm->blocking);
    *child = NULL;
    if (is_busy(comm)) return refuse(ncclInvalidArgument, "split: the comm is in progress");
    if (blocking < 0 || color < NCCL_SPLIT_NOCOLOR)
        return refuse(ncclInvalidArgument, "split: config or color is wrong");
    job *j = new_job(comm, SPLIT);
    j->child = child;
    j->color = color;
    j->key = key;
    j->blocking = blocking;
    return give_job(j, comm->blocking);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    ENTER("ncclCommFinalize");
    if (is_busy(comm)) return refuse(ncclInvalidArgument, "finalize: the comm is in progress");
    if (comm->finalized) return refuse(ncclInvalidArgument, "finalize: it has been finalized");
    return give_job(new_job(comm, FINALIZE), comm->blocking);
}

/* Waits for a call that runs in a thread, and launches pending operations; not called by an abort.
   */
static void settle(ncclComm_t c, int goes_on) {
    if (c->running) {
        pthread_join(c->running->id_of_thread, NULL);
        c->result = c->running->result;
        if (c->running->kind == SPLIT && goes_on) *c->running->child = c->running->made;
        else if (c->running->made) close_comm(c->running->made); /* no caller will get it */
        free(c->running);
        c->running = NULL;
    }
    c->polls = 0;
    if (c->pending.count && goes_on) launch_batch(&c->pending, c->issuer);
    c->pending.count = 0;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    int entered = stub_enter("ncclCommDestroy");
    if (!comm) return ncclSuccess;
    pthread_mutex_lock(&comm->guard);
    settle(comm, 1);
    pthread_mutex_unlock(&comm->guard);
    job *j = new_job(comm, FINALIZE);
    j->destroys = 1;
    ncclResult_t result = give_job(j, 1);
    return entered ? injected(entered) : result;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    int entered = stub_enter("ncclCommAbort");
    if (!comm) return ncclSuccess;
    STORE(&comm->aborted, 1u);
    mapping *file = LOAD(&comm->file);
    if (file) ring(file->at);
    pthread_mutex_lock(&comm->guard);
    settle(comm, 0);
    pthread_mutex_unlock(&comm->guard);
    close_comm(comm);
    return entered ? injected(entered) : ncclSuccess;
}

/* May be called from another thread while a collective runs. */
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result) {
    ENTER("ncclCommGetAsyncError");
    int async = LOAD(&comm->async);
    *result = (ncclResult_t)(async ? async : LOAD(&async_all));
    if (*result) return ncclSuccess;
    pthread_mutex_lock(&comm->guard);
    if (comm->polls > 0 || (comm->running && !LOAD(&comm->running->done))) {
        if (comm->polls > 0) comm->polls--;
        *result = ncclInProgress;
    } else {
        settle(comm, 1);
        *result = comm->result;
    }
    pthread_mutex_unlock(&comm->guard);
    return ncclSuccess;
}

void stub_async_error(ncclComm_t comm, ncclResult_t code) {
    STORE(comm ? &comm->async : &async_all, (int)code);
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) {
    ENTER("ncclCommCount");
    *count = comm->size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    ENTER("ncclCommUserRank");
    *rank = comm->rank;
    return ncclSuccess;
}

/* Device memory: 1 MiB for each rank. */
ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value) {
    ENTER("ncclCommMemStats");
    if (stub_get(STUB_NCCL_VERSION) < 22907) stub_die("this NCCL has no ncclCommMemStats");
    if (is_busy(comm) || stat != ncclStatGpuMemTotal)
        return refuse(ncclInvalidArgument, "statistics: in progress, or of another kind");
    *value = (uint64_t)comm->size << 20;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {
        "no error",       "unhandled cuda error",       "unhandled system error",
        "internal error", "invalid argument",           "invalid usage",
        "remote error",   "NCCL operation in progress", "timeout"};
    size_t i = (size_t)result;
    return i < sizeof texts / sizeof *texts ? texts[i] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t comm) {
    static __thread char text[sizeof warning];
    (void)comm;
    take_lock();
    memcpy(text, warning, sizeof text);
    pthread_mutex_unlock(&lock);
    return text;
}

/* ---- the interface: groups and collectives --------------------------------------------------- */

static void empty_group(void) {
    free(group.list);
    group.list = NULL;
    group.count = group_room = 0;
}

static void drop_group(void) {
    for (int i = 0; i < num_jobs; i++) {
        if (group_jobs[i]->kind == INIT) give_up(group_jobs[i]);
        free(group_jobs[i]);
    }
    num_jobs = 0;
    empty_group();
    group_error = ncclSuccess;
}

/* Operations on a non-blocking comm are launched after its last poll. */
static void put_off(const batch *b, ncclComm_t c, int polls) {
    batch *part = take_part(b, c);
    pthread_mutex_lock(&c->guard);
    free(c->pending.list);
    c->pending = *part;
    c->polls = polls;
    c->result = ncclSuccess;
    c->issuer = stub_thread_get();
    pthread_mutex_unlock(&c->guard);
    free(part);
}

static ncclResult_t end_group(void) {
    int polls = stub_get(STUB_PROGRESS), late = 0, mixed = 0;
    for (int i = 0; i < group.count; i++) mixed += !group.list[i].comm->blocking;
    if (mixed && mixed < group.count) {
        drop_group();
        return warn(ncclInvalidUsage, "blocking and non-blocking comms in one group");
    }
    for (int i = 0; i < group.count; i++) {
        ncclComm_t c = group.list[i].comm;
        if (!mixed || !polls || c->pending.count) continue;
        put_off(&group, c, polls);
        late = 1;
    }
    if (group.count && !late) launch_batch(&group, stub_thread_get());
    empty_group();
    int jobs = num_jobs;
    num_jobs = 0;
    ncclResult_t result = jobs ? run_jobs(group_jobs, jobs) : ncclSuccess;
    return result ? result : late ? ncclInProgress : ncclSuccess;
}

ncclResult_t ncclGroupStart(void) {
    ENTER("ncclGroupStart");
    depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    int entered = stub_enter("ncclGroupEnd");
    if (depth == 0) return warn(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (entered) (void)injected(entered);
    if (--depth > 0) return group_error;
    ncclResult_t result = group_error;
    if (!result) return end_group();
    drop_group();
    return warn(result, "the group failed: nothing was launched");
}

static size_t size_of_type(int type) {
    static const unsigned char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < (int)sizeof sizes ? sizes[type] : 0;
}

static int overlap(const char *a, size_t na, const char *b, size_t nb) {
    return a < b + nb && b < a + na;
}

/* Each kind has one in-place form; any other overlap is undefined. */
static void check_place(const coll *op) {
    size_t one = op->count * op->esize, all = one * (size_t)op->comm->size;
    size_t mine = one * (size_t)op->comm->rank;
    size_t src = op->kind == REDUCE_SCATTER || op->kind == ALL_TO_ALL ? all : one;
    size_t dst = op->kind == ALL_GATHER || op->kind == ALL_TO_ALL ? all : one;
    int fine = op->src == op->dst;
    if (op->kind == ALL_GATHER) fine = op->src == op->dst + mine;
    if (op->kind == REDUCE_SCATTER) fine = op->dst == op->src + mine;
    if (op->kind == ALL_TO_ALL) fine = 0;
    if (!fine && overlap(op->src, src, op->dst, dst))
        stub_die("%s: send and receive buffers overlap, and not as in place", kind_names[op->kind]);
}

static int is_memory(const void *ptr, size_t bytes) {
    stub_memory m;
    return stub_find(ptr, bytes, &m);
}

static const char *check_coll(const coll *op) {
    size_t one = op->count * op->esize, all = one * (size_t)op->comm->size;
    int wide_src = op->kind == REDUCE_SCATTER || op->kind == ALL_TO_ALL;
    int wide_dst = op->kind == ALL_GATHER || op->kind == ALL_TO_ALL;
    int reduces = op->kind == REDUCE_SCATTER || op->kind == ALL_REDUCE;
    int has_src = op->kind != RECV && !(op->kind == BROADCAST && op->peer != op->comm->rank);
    if (!op->esize) return "a data type that this version does not know";
    if (reduces && !dtype_of(op->type)) return "the stub has no sums of this data type";
    if (reduces && (op->op < 0 || op->op >= ncclNumOps || op->op == ncclProd))
        return "the stub knows sum, avg, max and min";
    if (op->peer < 0 || op->peer >= op->comm->size) return "no such peer or root";
    if (has_src && !is_memory(op->src, wide_src ? all : one))
        return "the send buffer is not in one allocation of the device, or pinned";
    if (op->kind != SEND && !is_memory(op->dst, wide_dst ? all : one))
        return "the receive buffer is not in one allocation of the device, or pinned";
    if (has_src && op->kind != SEND) check_place(op);
    return NULL;
}

static void append(const coll *op) {
    if (group.count == group_room) {
        group_room = group_room ? group_room * 2 : 16;
        group.list = (coll *)realloc(group.list, (size_t)group_room * sizeof *group.list);
        if (!group.list) stub_die("out of memory");
    }
    group.list[group.count++] = *op;
}

static ncclResult_t issue(enum kind kind, const void *src, void *dst, size_t count, int type,
                          int op, int peer, ncclComm_t comm, cudaStream_t stream) {
    ENTER(kind_names[kind]);
    char text[200];
    coll c;
    memset(&c, 0, sizeof c);
    if (!comm) return refuse(ncclInvalidArgument, "no communicator");
    c.comm = comm;
    c.kind = kind;
    c.src = (const char *)src;
    c.dst = (char *)dst;
    c.count = count;
    c.type = type;
    c.esize = size_of_type(type);
    c.op = op;
    c.peer = peer;
    c.stream = stub_stream(stream, comm->device);
    c.registered = comm->registered;
    const char *wrong = is_busy(comm)     ? "the comm is in progress"
                        : comm->finalized ? "the comm has been finalized"
                        : !c.stream ? "the stream is none of the comm's device, or is captured"
                        : count     ? check_coll(&c)
                                    : NULL;
    if (wrong) {
        snprintf(text, sizeof text, "%s: %s", kind_names[kind], wrong);
        return refuse(ncclInvalidArgument, text);
    }
    if (!count) return ncclSuccess;
    append(&c);
    return depth ? ncclSuccess : end_group();
}

ncclResult_t ncclAllGather(const void *src, void *dst, size_t sendcount, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    return issue(ALL_GATHER, src, dst, sendcount, (int)type, 0, 0, comm, stream);
}

ncclResult_t ncclReduceScatter(const void *src, void *dst, size_t recvcount, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return issue(REDUCE_SCATTER, src, dst, recvcount, (int)type, (int)op, 0, comm, stream);
}

ncclResult_t ncclAllReduce(const void *src, void *dst, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return issue(ALL_REDUCE, src, dst, count, (int)type, (int)op, 0, comm, stream);
}

ncclResult_t ncclBroadcast(const void *src, void *dst, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    return issue(BROADCAST, src, dst, count, (int)type, 0, root, comm, stream);
}

ncclResult_t ncclAlltoAll(const void *src, void *dst, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
    return issue(ALL_TO_ALL, src, dst, count, (int)type, 0, 0, comm, stream);
}

/* Configurations have no effect here, but must be valid, and supported by the library's version. */
static ncclResult_t check_config(const ncclCollConfig_t *config) {
    if (!config) return ncclSuccess;
    if (config->magic != 0xcafebeefu || config->size < sizeof *config ||
        config->userProfilerTag >> 63)
        return refuse(ncclInvalidArgument, "the configuration of a collective is wrong");
    if (stub_get(STUB_NCCL_VERSION) < 23102) stub_die("this NCCL has no ncclCollConfig_t");
    return ncclSuccess;
}

ncclResult_t ncclAllGatherConfig(const void *src, void *dst, size_t sendcount, ncclDataType_t type,
                                 ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t *config) {
    ncclResult_t result = check_config(config);
    return result ? result : ncclAllGather(src, dst, sendcount, type, comm, stream);
}

ncclResult_t ncclReduceScatterConfig(const void *src, void *dst, size_t recvcount,
                                     ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                     cudaStream_t stream, const ncclCollConfig_t *config) {
    ncclResult_t result = check_config(config);
    return result ? result : ncclReduceScatter(src, dst, recvcount, type, op, comm, stream);
}

ncclResult_t ncclAllReduceConfig(const void *src, void *dst, size_t count, ncclDataType_t type,
                                 ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t *config) {
    ncclResult_t result = check_config(config);
    return result ? result : ncclAllReduce(src, dst, count, type, op, comm, stream);
}

ncclResult_t ncclBroadcastConfig(const void *src, void *dst, size_t count, ncclDataType_t type,
                                 int root, ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t *config) {
    ncclResult_t result = check_config(config);
    return result ? result : ncclBroadcast(src, dst, count, type, root, comm, stream);
}

ncclResult_t ncclSend(const void *src, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return issue(SEND, src, NULL, count, (int)type, 0, peer, comm, stream);
}

ncclResult_t ncclRecv(void *dst, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return issue(RECV, NULL, dst, count, (int)type, 0, peer, comm, stream);
}

/* ---- the interface: memory ------------------------------------------------------------------- */

ncclResult_t ncclMemAlloc(void **ptr, size_t size) {
    ENTER("ncclMemAlloc");
    size_t rounded = (size + ALIGN - 1) / ALIGN * ALIGN;
    *ptr = NULL;
    if (!size) return warn(ncclInvalidArgument, "ncclMemAlloc: no bytes");
    if (stub_alloc(ptr, rounded, size, ALIGN, cudaMemoryTypeDevice))
        return warn(ncclUnhandledCudaError, "ncclMemAlloc: out of memory");
    return ncclSuccess;
}

/* Does not wait for the device. */
ncclResult_t ncclMemFree(void *ptr) {
    int entered = stub_enter("ncclMemFree");
    stub_memory m;
    if (!ptr) return ncclSuccess;
    if (!stub_find(ptr, 1, &m) || m.align != ALIGN || stub_free(ptr, "ncclMemFree"))
        return warn(ncclInvalidArgument, "ncclMemFree: not from ncclMemAlloc");
    return entered ? injected(entered) : ncclSuccess;
}

/* The offset in the allocation must be equal on all ranks, and so is this number. */
static void count_registration(ncclComm_t c, const char *ptr, size_t size) {
    stub_memory m;
    (void)stub_find(ptr, size, &m);
    uint64_t parts[2] = {(uint64_t)(ptr - m.base), (uint64_t)size};
    for (int i = 0; i < 2; i++)
        c->registered = (c->registered ^ parts[i] ^ ++c->registrations) * 0x9E3779B97F4A7C15ull;
}

static void *keep_registration(ncclComm_t c, void *ptr, int kind) {
    registration *r = (registration *)calloc(1, sizeof *r);
    if (!r) stub_die("out of memory");
    r->ptr = ptr;
    r->kind = kind;
    stub_register(ptr, 1);
    stub_live_add(kind, 1);
    take_lock();
    r->next = c->kept;
    c->kept = r;
    pthread_mutex_unlock(&lock);
    return r;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *ptr, size_t size, void **handle) {
    ENTER("ncclCommRegister");
    *handle = NULL;
    if (is_busy(comm)) return refuse(ncclInvalidArgument, "register: the comm is in progress");
    if (!size || !is_memory(ptr, size))
        return refuse(ncclInvalidArgument, "register: not in one allocation of the device");
    count_registration(comm, (const char *)ptr, size);
    *handle = keep_registration(comm, ptr, STUB_REGISTRATIONS);
    return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
    int entered = stub_enter("ncclCommDeregister");
    hold(comm);
    while (stub_get(STUB_KEEPS)) usleep(1000);
    end_registration(comm, handle);
    drop(comm);
    return entered ? injected(entered) : ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *ptr, size_t size, ncclWindow_t *window,
                                    int flags) {
    ENTER("ncclCommWindowRegister");
    stub_memory m;
    *window = NULL;
    if (is_busy(comm)) return refuse(ncclInvalidArgument, "window: the comm is in progress");
    if (!size || !stub_find(ptr, size, &m) || m.align != ALIGN || (uintptr_t)ptr % 4096)
        return refuse(ncclInvalidArgument, "window: not from ncclMemAlloc, or not aligned to 4096");
    job *j = new_job(comm, WINDOW);
    j->offset = (uint64_t)((char *)ptr - m.base);
    j->size = (uint64_t)size;
    j->key = flags;
    int works = stub_get(STUB_WINDOWS_WORK);
    ncclResult_t result = give_job(j, comm->blocking);
    if (works && (result == ncclSuccess || result == ncclInProgress))
        *window = (ncclWindow_t)keep_registration(comm, ptr, STUB_WINDOWS);
    return result;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
    int entered = stub_enter("ncclCommWindowDeregister");
    hold(comm);
    while (stub_get(STUB_KEEPS)) usleep(1000);
    end_registration(comm, (void *)window);
    drop(comm);
    return entered ? injected(entered) : ncclSuccess;
}
