/* bench_comm.c - compares collectives of the backends with memcpy, a raw TCP stream and Gloo's own
   ring collectives, in one run, by the same processes, one of each in turn.

       build/bench/bench_comm [--backend shm,gloo] [--ranks 2,4] [--sizes 4K,64K,1M,16M,64M,256M]
                              [--seconds 0.5] [--cold 64M] [--csv]
       tools/bench_report -o build/bench_comm.svg build/bench_comm.csv      as a picture

   A size is that of the full side, B bytes on each of W ranks, which are processes; of f32, but
   for "reduce_bf16", a reduce_scatter of bf16 to f32.
     memcpy  of n bytes reads n and writes n; it is given the n that reads and writes what an
             operation has to at least: (W-1)/W*B an all_gather in place, (B + B/W)/2 a
             reduce_scatter, (B + 2*B/W)/2 one of bf16 to f32, the sum of the first two an
             all_reduce. It reads and writes what the operation of shm does: memory that shm has
             allocated, at the same distances from pages, no other rank's
     meet    what an all_reduce in shared memory cannot do without: the memcpy that moves what its
             reduce_scatter does, a meeting, and a memcpy of what the others have just written,
             from their caches; a last meeting, after which the caller may write its memory. It
             sums nothing. For a reduce_scatter: the same sum between two meetings, of as many bytes
             of this rank's own memory: what it costs that memory is another rank's is the difference
     tcp     every pair of ranks exchanges over loopback what the operation has to move: B/W each
             way, an all_reduce twice that; one thread, no protocol, nothing is added up
     bare    the same as messages of Gloo's, from buffers that are there: what a collective over Gloo
             cannot do without, if Gloo's own thread moves it
     gloo    over TCP, though all ranks are on this host: FSDP_GLOO_NEAR=1, unless it is set
     ring    gloo::allgather, gloo::allreduce; Gloo has no reduce_scatter that is correct
   A sample is the time from the first rank's start to the last one's end, after a barrier that all
   leave awake, of one operation or, where these are short, of several in a row, divided by their number. From 1 MiB on
   it is one, and before it each rank writes 64 MiB of its own (--cold; 0: it does not), so that the
   caches have nothing of a rival before. Buffers lie at five places in turn. A ratio is the median
   of those of rounds, in which each rival has one sample; in brackets are its 10th and 90th
   percentiles. Results are checked once per size. Writes $FSDP_BUILD/bench_comm.csv; --csv writes
   the same to stdout.

   With -DFSDP_BACKEND_SHM -DFSDP_BACKEND_GLOO both backends and the ring are there, which needs
   fsdp_gloo.cc and bench/gloo_ring.cc, -lgloo and -lstdc++; without, only shm.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls under -std=c99 too */
#endif
#include "bench/bench.h"
#include <arpa/inet.h>   // htonl
#include <errno.h>       // errno
#include <netinet/in.h>  // sockaddr_in
#include <netinet/tcp.h> // TCP_NODELAY
#include <poll.h>        // poll
#include <pthread.h>     // barrier between processes
#include <signal.h>      // kill
#include <string.h>      // memcpy
#include <sys/mman.h>    // mmap
#include <sys/prctl.h>   // a rank ends with its parent
#include <sys/socket.h>  // socket
#include <sys/wait.h>    // wait
#include <unistd.h>      // fork
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
#ifdef FSDP_BACKEND_GLOO
#include "bench/gloo_ring.h"
#endif

enum { WORLD_MAX = 8, SIZES_MAX = 16, LONG_RUN = 4 << 20, COLD_RUN = 1 << 20 };
typedef enum { GATHER = 0, SCATTER, SCATTER_BF16, REDUCE, OPS } op_kind;
// Bytes by which buffers are moved: lines, the halves of a page, pages.
enum { PLACES = 5, SLACK = 65536 + 64 };
static const size_t places[PLACES] = {0, 64, 2112, 4096, 65536};
typedef enum { SHM = 0, GLOO, RING, TCP, BARE, COPY, MEET, RIVALS } rival;
enum { BACKENDS = 2 }; // the first two rivals
static const char *const op_names[OPS] = {"all_gather", "reduce_scatter", "reduce_bf16",
                                          "all_reduce"};
static const char *const rival_names[RIVALS] = {"shm",  "gloo",   "ring", "tcp",
                                                "bare", "memcpy", "meet"};

typedef struct {
    uint32_t rivals; // bit 1 << rival
    int worlds[SIZES_MAX], num_worlds, num_sizes, csv;
    size_t sizes[SIZES_MAX], bytes_max, cold;
    double seconds;
} options;

// Common memory. Rank 0 writes what is next; the gate orders it.
typedef struct {
    pthread_barrier_t gate;
    int64_t start[WORLD_MAX], end[WORLD_MAX]; // times of one sample
    int32_t op, who, repeats, check, quit, is_cold;
    uint32_t awake; // how often ranks were, since the beginning
    size_t bytes, place;
    char *common; // [the largest size] of all ranks, for MEET
    char dir[64]; // where Gloo's ring meets
} board;

typedef struct {
    const fsdp_comm_ops *ops;
    fsdp_comm *comm;
    char *full, *shard;
} backend;

typedef struct {
    board *b;
    const options *opt;
    int rank, world;
    backend backends[BACKENDS];
    void *ring;
    int sockets[WORLD_MAX];
    char *from, *to; // buffers of the other rivals
    char *cold;
} worker;

/* ---- rivals ---------------------------------------------------------------------------------- */

static void fail(const worker *w, const char *what, const char *why) {
    fprintf(stderr, "bench_comm: rank %d of %d: %s: %s\n", w->rank, w->world, what, why);
    fflush(NULL);
    _exit(1);
}

static void run_backend(worker *w, backend *k) {
    const board *b = w->b;
    fsdp_coll c;
    memset(&c, 0, sizeof c);
    c.dtype = b->op == SCATTER_BF16 ? FSDP_BF16 : FSDP_F32;
    c.out_dtype = FSDP_F32, c.scale = 1.0, c.what = "bench", c.redop = FSDP_SUM;
    fsdp_seg seg = {0, 0, (int64_t)(b->bytes / fsdp_dtype_size(c.dtype)) / w->world};
    char *full = k->full + b->place, *shard = k->shard + b->place;
    if (b->op == REDUCE) {
        c.kind = FSDP_OP_ALL_REDUCE;
        c.count = b->bytes / sizeof(float);
        c.src = c.dst = full;
    } else {
        c.kind = b->op == GATHER ? FSDP_OP_ALL_GATHER : FSDP_OP_REDUCE_SCATTER;
        c.segs = &seg, c.num_segs = 1, c.count = (uint64_t)seg.count;
        c.in_place = b->op == GATHER;
        c.src = full;
        c.dst = b->op == GATHER ? full : shard;
    }
    if (k->ops->run(k->comm, &c)) fail(w, op_names[b->op], k->ops->error_text(k->comm));
}

#ifdef FSDP_BACKEND_GLOO
static void run_ring(worker *w) {
    const board *b = w->b;
    gloo_ring *ring = (gloo_ring *)w->ring;
    int failed = b->op == GATHER
                     ? gloo_ring_all_gather(ring, w->to, b->bytes / (size_t)w->world)
                     : gloo_ring_all_reduce(ring, (float *)(void *)w->to, b->bytes / sizeof(float));
    if (failed) fail(w, op_names[b->op], "Gloo's ring failed");
}

static void run_bare(worker *w) {
    size_t part = w->b->bytes / (size_t)w->world;
    for (int k = 0; k < (w->b->op == REDUCE ? 2 : 1); k++)
        if (gloo_ring_exchange((gloo_ring *)w->ring, w->from, w->to, w->opt->bytes_max, part))
            fail(w, op_names[w->b->op], "Gloo's messages failed");
}
#endif

// Moves what is ready; 1 if something was, and *at is further.
static int moved(worker *w, ssize_t count, size_t *at) {
    if (count > 0) *at += (size_t)count;
    if (count == 0 || (count < 0 && errno != EAGAIN)) fail(w, "tcp", strerror(errno));
    return count > 0;
}

// Sends `part` bytes to each other rank and receives as many from it.
static void stream(worker *w, size_t part) {
    size_t sent[WORLD_MAX] = {0}, received[WORLD_MAX] = {0};
    for (;;) {
        struct pollfd p[WORLD_MAX];
        nfds_t open = 0;
        int progress = 0;
        for (int k = 1; k < w->world; k++) {
            int r = (w->rank + k) % w->world, fd = w->sockets[r];
            size_t at = (size_t)r * part;
            if (sent[r] < part)
                progress |= moved(
                    w,
                    send(fd, w->from + at + sent[r], part - sent[r], MSG_DONTWAIT | MSG_NOSIGNAL),
                    &sent[r]);
            if (received[r] < part)
                progress |= moved(
                    w, recv(fd, w->to + at + received[r], part - received[r], MSG_DONTWAIT),
                    &received[r]);
            p[open].fd = fd;
            p[open].events = (short)((sent[r] < part ? POLLOUT : 0) |
                                     (received[r] < part ? POLLIN : 0));
            open += p[open].events != 0;
        }
        if (!open) return;
        if (!progress) (void)poll(p, open, -1);
    }
}

static void run_copy(worker *w) {
    size_t full = w->b->bytes, part = full / (size_t)w->world;
    const char *from = w->from + w->b->place;
    char *to = w->to + w->b->place;
    if (w->b->op == GATHER || w->b->op == REDUCE) memcpy(to, from, full - part);
    if (w->b->op == SCATTER || w->b->op == REDUCE) memcpy(to, from, (full + part) / 2);
    if (w->b->op == SCATTER_BF16) memcpy(to, from, (full + 2 * part) / 2);
}

/* A core that slept takes as long to wake as a short operation does: all are awake before the first
   one starts. */
static void wake(const worker *w) {
    board *b = w->b;
    uint32_t size = (uint32_t)w->world, all;
    all = __atomic_fetch_add(&b->awake, 1u, __ATOMIC_SEQ_CST) / size * size + size;
    while ((int32_t)(__atomic_load_n(&b->awake, __ATOMIC_SEQ_CST) - all) < 0) (void)sched_yield();
}

static void run_sum(worker *w) {
    fsdp_dtype dtype = w->b->op == SCATTER_BF16 ? FSDP_BF16 : FSDP_F32;
    size_t part = w->b->bytes / (size_t)w->world;
    const char *srcs[WORLD_MAX];
    for (int k = 0; k < w->world; k++) srcs[k] = w->from + w->b->place + (size_t)k * part;
    wake(w);
    fsdpi_reduce(w->to + w->b->place, FSDP_F32, srcs, w->world, dtype,
                 part / fsdp_dtype_size(dtype), 1.0, 0, FSDP_SUM);
    wake(w);
}

static void run_meet(worker *w) {
    size_t full = w->b->bytes, part = full / (size_t)w->world, mine = (size_t)w->rank * part;
    char *common = w->b->common;
    memcpy(w->to, w->from, (full - part) / 2);
    memcpy(common + mine, w->from + mine, part);
    wake(w);
    for (int k = 1; k < w->world; k++) {
        size_t at = (size_t)((w->rank + k) % w->world) * part;
        memcpy(w->to + at, common + at, part);
    }
    wake(w);
}

static void run(worker *w) {
    int who = w->b->who;
    if (who < BACKENDS) run_backend(w, &w->backends[who]);
#ifdef FSDP_BACKEND_GLOO
    else if (who == RING) run_ring(w);
    else if (who == BARE) run_bare(w);
#endif
    else if (who == COPY) run_copy(w);
    else if (who == MEET && w->b->op == REDUCE) run_meet(w);
    else if (who == MEET) run_sum(w);
    else
        for (int k = 0; k < (w->b->op == REDUCE ? 2 : 1); k++)
            stream(w, w->b->bytes / (size_t)w->world);
}

/* ---- a sample, on every rank ----------------------------------------------------------------- */

static int takes_part(const worker *w, int who, int op) {
    int is_scatter = op == SCATTER || op == SCATTER_BF16;
    return (w->opt->rivals >> who & 1) && !(who == RING && is_scatter) &&
           !(who == MEET && op == GATHER);
}

// Before a check: small whole numbers, so that sums are exact. Element i of rank r is i%100 + r.
static void fill(const worker *w, char *at) {
    fsdp_dtype dtype = w->b->op == SCATTER_BF16 ? FSDP_BF16 : FSDP_F32;
    size_t size = fsdp_dtype_size(dtype), count = w->b->bytes / size;
    size_t part = count / (size_t)w->world;
    for (size_t i = 0; i < count; i++) {
        int is_mine = w->b->op != GATHER || i / part == (size_t)w->rank;
        float x = is_mine ? (float)(i % 100) + (float)w->rank : -1.0f;
        (void)fsdp_convert(at + i * size, dtype, &x, FSDP_F32, 1);
    }
}

static void check(worker *w, const float *x) {
    int is_scatter = w->b->op == SCATTER || w->b->op == SCATTER_BF16;
    size_t size = w->b->op == SCATTER_BF16 ? 2 : sizeof(float);
    size_t count = w->b->bytes / size, part = count / (size_t)w->world;
    size_t first = is_scatter ? part * (size_t)w->rank : 0;
    float ranks = (float)w->world;
    if (is_scatter) count = part;
    for (size_t i = 0; i < count; i++) {
        float here = (float)((first + i) % 100);
        float expected = w->b->op == GATHER ? here + (float)(i / part)
                                            : ranks * here + ranks * (ranks - 1) / 2;
        if (x[i] != expected) fail(w, rival_names[w->b->who], "a wrong result");
    }
}

static void checked(worker *w) {
    backend *k = w->b->who < BACKENDS ? &w->backends[w->b->who] : NULL;
    char *full = k ? k->full : w->to;
    int is_scatter = w->b->op == SCATTER || w->b->op == SCATTER_BF16;
    fill(w, full);
    (void)pthread_barrier_wait(&w->b->gate);
    run(w);
    check(w, (const float *)(const void *)(k && is_scatter ? k->shard : full));
    memset(full, 0, w->b->bytes); // sums in place that are repeated stay what they are
}

// 0: that was the last one.
static int sample(worker *w) {
    board *b = w->b;
    (void)pthread_barrier_wait(&b->gate); // what comes next is written
    if (b->quit) return 0;
    if (b->check) {
        checked(w);
    } else {
        for (size_t i = 0; i < w->opt->cold && b->is_cold; i += 64) w->cold[i]++;
        if (b->is_cold) (void)pthread_barrier_wait(&b->gate);
        wake(w);
        b->start[w->rank] = bench_now_ns();
        for (int i = 0; i < b->repeats; i++) run(w);
        b->end[w->rank] = bench_now_ns();
    }
    (void)pthread_barrier_wait(&b->gate);
    return 1;
}

/* ---- rank 0 decides -------------------------------------------------------------------------- */

// Microseconds of one operation.
static double once(worker *w, int who) {
    board *b = w->b;
    b->who = who;
    (void)sample(w);
    int64_t first = b->start[0], last = b->end[0];
    for (int r = 1; r < w->world; r++) {
        if (b->start[r] < first) first = b->start[r];
        if (b->end[r] > last) last = b->end[r];
    }
    return (double)(last - first) * 1e-3 / b->repeats;
}

// ratio: by rival, of its samples to those of its measure.
static void show(const worker *w, FILE *csv, const bench_stats *s, const bench_spread *ratio) {
    const board *b = w->b;
    if (!w->opt->csv) printf("%-14s W=%d %10zu", op_names[b->op], w->world, b->bytes);
    for (int who = 0; who < RIVALS; who++) {
        if (!s[who].samples) {
            if (!w->opt->csv) printf(" %10s", "-");
            continue;
        }
        fprintf(csv, "%s,%d,%zu,%s,%d,%.2f,%.2f,%.2f,%.3f,%.3f,%.3f\n", op_names[b->op], w->world,
                b->bytes, rival_names[who], s[who].samples, s[who].min, s[who].median, s[who].p95,
                ratio[who].median, ratio[who].low, ratio[who].high);
        if (!w->opt->csv) printf(" %10.1f", s[who].median);
    }
    static const struct {
        rival who;
        const char *name;
    } told[] = {{SHM, "shm/memcpy"}, {MEET, "meet/memcpy"}, {GLOO, "gloo/tcp"}, {BARE, "bare/tcp"}};
    for (int i = 0; i < 4 && !w->opt->csv; i++)
        if (s[told[i].who].samples)
            printf("  %s %5.2f [%.2f, %.2f]", told[i].name, ratio[told[i].who].median,
                   ratio[told[i].who].low, ratio[told[i].who].high);
    if (!w->opt->csv) printf("\n");
    fflush(NULL);
}

// All rivals in turn, round after round, so that what else the machine does hits all.
static void compare(worker *w, FILE *csv) {
    static double samples[RIVALS][BENCH_SAMPLES_MAX], ratios[BENCH_SAMPLES_MAX];
    board *b = w->b;
    bench_stats s[RIVALS];
    bench_spread ratio[RIVALS];
    b->check = 1;
    b->place = 0;
    for (int who = 0; who < TCP; who++)
        if (takes_part(w, who, b->op)) (void)once(w, who);
    b->check = 0;
    b->is_cold = w->opt->cold && b->bytes >= COLD_RUN;
    b->repeats = b->is_cold || b->bytes >= LONG_RUN ? 1 : b->bytes >= LONG_RUN / 16 ? 4 : 20;
    int round = -2, most = BENCH_SAMPLES_MAX; // two to warm up
    int64_t end = bench_now_ns() + (int64_t)(w->opt->seconds * 1e9);
    for (; round < most && (round < 2 * PLACES || bench_now_ns() < end); round++)
        for (int who = 0; who < RIVALS; who++) {
            if (!takes_part(w, who, b->op)) continue;
            b->place = places[(round + 2) % PLACES];
            double us = once(w, who);
            if (round >= 0) samples[who][round] = us;
        }
    for (int who = 0; who < RIVALS; who++) { // before summaries sort the samples
        for (int i = 0; i < round; i++)
            ratios[i] = samples[who][i] / samples[who == SHM || who == MEET ? COPY : TCP][i];
        ratio[who] = bench_spread_of(ratios, takes_part(w, who, b->op) ? round : 0);
    }
    for (int who = 0; who < RIVALS; who++)
        s[who] = bench_summarize(samples[who], takes_part(w, who, b->op) ? round : 0);
    show(w, csv, s, ratio);
}

static void lead(worker *w, FILE *csv) {
    for (int op = 0; op < OPS; op++)
        for (int i = 0; i < w->opt->num_sizes; i++) {
            w->b->op = op;
            w->b->bytes = w->opt->sizes[i];
            compare(w, csv);
        }
    w->b->quit = 1;
    (void)sample(w);
}

/* ---- a rank ---------------------------------------------------------------------------------- */

static void open_backend(worker *w, int which) {
    backend *k = &w->backends[which];
    fsdp_boot boot;
    fsdp_caps caps;
    char job[64];
    memset(&boot, 0, sizeof boot);
    boot.rank = boot.local_rank = w->rank, boot.size = w->world;
    boot.timeout_ns = (int64_t)60 * 1000000000;
    boot.allocator.alloc = fsdpi_libc_alloc, boot.allocator.free = fsdpi_libc_free;
    boot.clock.now_ns = fsdpi_monotonic_ns;
    snprintf(job, sizeof job, "bench-%d-%d", (int)getppid(), w->world);
    boot.job = job;
    boot.store = "host:";
#ifdef FSDP_BACKEND_GLOO
    setenv("FSDP_GLOO_NEAR", "1", 0);
    k->ops = which == GLOO ? fsdp_gloo_comm_ops() : fsdp_shm_comm_ops();
#else
    k->ops = fsdp_shm_comm_ops();
#endif
    if (k->ops->open(&boot, &caps, &k->comm)) fail(w, k->ops->name, k->ops->error_text(NULL));
    size_t full = w->opt->bytes_max; // a shard of f32 may be twice as large as one of bf16
    if (k->ops->alloc(k->comm, full + SLACK, (void **)&k->full) ||
        k->ops->alloc(k->comm, 2 * full / (size_t)w->world + SLACK, (void **)&k->shard) ||
        (which == SHM && (k->ops->alloc(k->comm, full + SLACK, (void **)&w->from) ||
                          k->ops->alloc(k->comm, full + SLACK, (void **)&w->to))))
        fail(w, k->ops->name, k->ops->error_text(k->comm));
}

static void rank_main(worker *w, FILE *csv) {
    size_t bytes = w->opt->bytes_max;
    for (int k = 0; k < BACKENDS; k++)
        if (w->opt->rivals >> k & 1) open_backend(w, k);
#ifdef FSDP_BACKEND_GLOO
    if ((w->opt->rivals >> RING & 1) &&
        gloo_ring_open(w->b->dir, w->rank, w->world, (gloo_ring **)&w->ring))
        fail(w, "ring", "Gloo could not connect");
#endif
    if (!w->from) w->from = (char *)malloc(bytes + SLACK); // without shm
    if (!w->to) w->to = (char *)malloc(bytes + SLACK);
    w->cold = (char *)calloc(1, w->opt->cold + 1);
    if (!w->from || !w->to || !w->cold) fail(w, "malloc", strerror(errno));
    memset(w->from, 0, bytes + SLACK);
    memset(w->to, 0, bytes + SLACK);
    memset(w->b->common, 0, bytes); // in this process's tables of pages, as the others
    for (int k = 0; k < BACKENDS; k++) // as those are: in this process's tables of pages
        if (w->backends[k].full) memset(w->backends[k].full, 0, bytes + SLACK);
    if (w->rank == 0) lead(w, csv);
    else
        while (sample(w)) {
        }
#ifdef FSDP_BACKEND_GLOO
    if (w->ring) gloo_ring_close((gloo_ring *)w->ring);
#endif
    for (int k = 0; k < BACKENDS; k++)
        if (w->backends[k].comm) w->backends[k].ops->close(w->backends[k].comm);
    fflush(NULL);
    _exit(0);
}

/* ---- the program ----------------------------------------------------------------------------- */

// Two ends of a TCP connection over loopback; exits when there is none.
static void connected(int ends[2]) {
    struct sockaddr_in at;
    socklen_t size = sizeof at;
    int on = 1, server = socket(AF_INET, SOCK_STREAM, 0);
    memset(&at, 0, sizeof at);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(server, (struct sockaddr *)(void *)&at, size) || listen(server, 1) ||
        getsockname(server, (struct sockaddr *)(void *)&at, &size) ||
        connect(ends[0], (struct sockaddr *)(void *)&at, size) ||
        (ends[1] = accept(server, NULL, NULL)) < 0) {
        perror("bench_comm: no loopback connection");
        exit(1);
    }
    (void)setsockopt(ends[0], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(ends[1], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)close(server);
}

static board *open_board(int world, size_t bytes_max) {
    pthread_barrierattr_t shared;
    board *b = (board *)mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                             -1, 0);
    void *common = mmap(NULL, bytes_max, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (b != MAP_FAILED) snprintf(b->dir, sizeof b->dir, "/tmp/bench_comm_XXXXXX");
    if (b == MAP_FAILED || common == MAP_FAILED || !mkdtemp(b->dir)) {
        perror("bench_comm");
        exit(1);
    }
    b->common = (char *)common;
    (void)pthread_barrierattr_init(&shared);
    (void)pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    (void)pthread_barrier_init(&b->gate, &shared, (unsigned)world);
    return b;
}

static void close_board(board *b, size_t bytes_max) {
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", b->dir);
    if (system(command)) fprintf(stderr, "bench_comm: %s stays behind\n", b->dir);
    (void)munmap(b->common, bytes_max);
    (void)munmap(b, sizeof *b);
}

// 1 if a rank failed; the others are then ended.
static int run_world(const options *opt, int world, FILE *csv) {
    static worker w[WORLD_MAX];
    pid_t pids[WORLD_MAX];
    board *b = open_board(world, opt->bytes_max);
    int failed = 0, status, ends[2];
    memset(w, 0, sizeof w);
    for (int r = 0; r < world; r++)
        for (int peer = 0; peer < r; peer++) {
            connected(ends);
            w[r].sockets[peer] = ends[0];
            w[peer].sockets[r] = ends[1];
        }
    fflush(NULL);
    for (int r = 0; r < world; r++) {
        w[r].b = b, w[r].opt = opt, w[r].rank = r, w[r].world = world;
        pids[r] = fork();
        if (pids[r] == 0) (void)prctl(PR_SET_PDEATHSIG, SIGKILL), rank_main(&w[r], csv);
    }
    for (int ended = 0; ended < world; ended++) {
        (void)wait(&status);
        if (WIFSIGNALED(status) && !failed)
            fprintf(stderr, "bench_comm: a rank was killed by signal %d\n", WTERMSIG(status));
        if (status && !failed)
            for (int r = 0; r < world; r++)
                (void)kill(pids[r], SIGTERM); // ended ones are not there
        failed |= status != 0;
    }
    for (int r = 0; r < world; r++)
        for (int peer = 0; peer < world; peer++)
            if (peer != r) (void)close(w[r].sockets[peer]);
    close_board(b, opt->bytes_max);
    return failed;
}

static int usage(void) {
    fprintf(stderr, "usage: bench_comm [--backend shm,gloo] [--ranks 2,4] "
                    "[--sizes 4K,64K,1M,16M,64M,256M] [--seconds 0.5] [--cold 64M] [--csv]\n"
                    "ranks: 2 to 8; sizes: multiples of 4 bytes per rank; backends: those that "
                    "are compiled in\n");
    return 2;
}

// Numbers with an optional K or M, separated by commas; 0: not such a list.
static int parse_list(const char *text, size_t *out) {
    int count = 0;
    for (char *end; count < SIZES_MAX; text = end + 1) {
        unsigned long long value = strtoull(text, &end, 10);
        if (end == text || !value) return 0;
        if (*end == 'K') value <<= 10, end++;
        else if (*end == 'M') value <<= 20, end++;
        out[count++] = (size_t)value;
        if (!*end) return count;
        if (*end != ',') return 0;
    }
    return 0;
}

static int parse_backends(const char *text, uint32_t *out) {
    uint32_t all = 1u << SHM;
#ifdef FSDP_BACKEND_GLOO
    all |= 1u << GLOO;
#endif
    *out = 1u << TCP | 1u << COPY | 1u << MEET | (all & 1u << GLOO ? 1u << RING | 1u << BARE : 0);
    if (!text) *out |= all;
    for (int k = 0; k < BACKENDS && text; k++)
        if (strstr(text, rival_names[k])) *out |= 1u << k;
    return (*out & 3u & ~all) == 0 && (*out & 3u);
}

static int parse(int argc, char **argv, options *o) {
    const char *backends = NULL, *ranks = "2,4", *sizes = "4K,64K,1M,16M,64M,256M";
    size_t worlds[SIZES_MAX], cold[SIZES_MAX];
    memset(o, 0, sizeof *o);
    o->seconds = 0.5;
    o->cold = (size_t)64 << 20;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--csv")) {
            o->csv = 1;
            continue;
        }
        if (!strcmp(argv[i], "--backend")) backends = value;
        else if (!strcmp(argv[i], "--ranks")) ranks = value;
        else if (!strcmp(argv[i], "--sizes")) sizes = value;
        else if (!strcmp(argv[i], "--seconds")) o->seconds = strtod(value, NULL);
        else if (!strcmp(argv[i], "--cold")) o->cold = parse_list(value, cold) == 1 ? cold[0] : 0;
        else return 0;
        i++;
    }
    o->num_worlds = parse_list(ranks, worlds);
    o->num_sizes = parse_list(sizes, o->sizes);
    for (int k = 0; k < o->num_worlds; k++) {
        o->worlds[k] = (int)worlds[k];
        if (worlds[k] < 2 || worlds[k] > WORLD_MAX) return 0;
        for (int i = 0; i < o->num_sizes; i++)
            if (o->sizes[i] % (worlds[k] * sizeof(float))) return 0;
    }
    for (int i = 0; i < o->num_sizes; i++)
        if (o->sizes[i] > o->bytes_max) o->bytes_max = o->sizes[i];
    return parse_backends(backends, &o->rivals) && o->num_worlds && o->num_sizes && o->seconds >= 0;
}

int main(int argc, char **argv) {
    static const char columns[] =
        "op,world,bytes,who,samples,us_min,us_median,us_p95,to_memcpy_or_tcp,ratio_p10,ratio_p90";
    options o;
    int failed = 0;
    if (!parse(argc, argv, &o)) return usage();
    FILE *csv = o.csv ? stdout : bench_csv("bench_comm", columns);
    if (o.csv) printf("%s\n", columns);
    else
        printf("medians, us        %10s %10s %10s %10s %10s %10s %10s\n", "bytes", rival_names[0],
               rival_names[1], rival_names[2], rival_names[3], rival_names[4], rival_names[5]);
    for (int k = 0; k < o.num_worlds && !failed; k++) failed = run_world(&o, o.worlds[k], csv);
    if (!o.csv) fclose(csv);
    return failed;
}
