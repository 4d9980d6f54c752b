/* bench_shm.c - all_gather and reduce_scatter of the shm backend beside memcpy of the memory
   traffic that they need, in the same run, by the same processes at the same time.

       make bench          or  cc -O2 -I. bench/bench_shm.c -pthread -lm && ./a.out
       gnuplot -e "csv='build/bench_shm.csv'; png='build/bench_shm.png'" bench/bench_shm.gp

   Of B bytes on the full side and W ranks, an all_gather in place has to read and write (W-1)/W*B
   on every rank; a reduce_scatter has to read B and write B/W. memcpy of n bytes does both with n.
   A sample is the time from the first rank's start to the last one's end, after a barrier. */
#define _GNU_SOURCE
#include "bench/bench.h"
#include <string.h>   // memcpy
#include <sys/mman.h> // mmap
#include <sys/wait.h> // waitpid
#define FSDP_IMPLEMENTATION
#include "fsdp.h"

enum { WORLD_MAX = 4, GATHER = 0, SCATTER, COPY };
#define BYTES_MAX ((size_t)256 << 20)
static const char *const names[] = {"all_gather", "reduce_scatter"};

typedef struct {
    int64_t start[WORLD_MAX], end[WORLD_MAX]; // of one sample
    int32_t kind, quit;                       // what comes next, from rank 0
    size_t bytes, copied;
} board;

typedef struct {
    board *b;
    int rank, world;
    const fsdp_comm_ops *ops;
    fsdp_comm *comm;
    char *full, *shard, *tiny, *from, *to; // the last two are memcpy's
} worker;

static void check(worker *w, fsdp_status status) {
    if (!status) return;
    fprintf(stderr, "%s\n", w->ops->error_text(w->comm));
    _exit(1);
}

static void barrier(worker *w) {
    fsdp_coll c;
    memset(&c, 0, sizeof c);
    c.kind = FSDP_OP_ALL_REDUCE, c.dtype = FSDP_F32, c.what = "barrier", c.count = 1;
    c.src = c.dst = w->tiny;
    check(w, w->ops->run(w->comm, &c));
}

static void work(worker *w) {
    board *b = w->b;
    fsdp_seg seg = {0, 0, (int64_t)(b->bytes / sizeof(float)) / w->world};
    fsdp_coll c;
    memset(&c, 0, sizeof c);
    c.kind = b->kind == GATHER ? FSDP_OP_ALL_GATHER : FSDP_OP_REDUCE_SCATTER;
    c.dtype = c.out_dtype = FSDP_F32, c.scale = 1.0, c.what = "bench";
    c.segs = &seg, c.num_segs = 1, c.count = (uint64_t)seg.count;
    c.in_place = b->kind == GATHER;
    c.src = w->full;
    c.dst = b->kind == GATHER ? w->full : w->shard;
    barrier(w);
    b->start[w->rank] = bench_now_ns();
    if (b->kind == COPY) memcpy(w->to, w->from, b->copied);
    else check(w, w->ops->run(w->comm, &c));
    b->end[w->rank] = bench_now_ns();
    barrier(w);
}

// On rank 0: tells the others what to do, does it, and returns microseconds.
static double once(worker *w, int kind) {
    w->b->kind = kind;
    barrier(w);
    work(w);
    int64_t first = w->b->start[0], last = w->b->end[0];
    for (int r = 1; r < w->world; r++) {
        if (w->b->start[r] < first) first = w->b->start[r];
        if (w->b->end[r] > last) last = w->b->end[r];
    }
    return (double)(last - first) * 1e-3;
}

// One of each in turn, so that what else the machine does hits both.
typedef struct {
    worker *w;
    int kind, count;
    double copies[BENCH_SAMPLES_MAX];
} pairs;

static double one_pair(void *arg) {
    pairs *p = (pairs *)arg;
    p->copies[p->count++ % BENCH_SAMPLES_MAX] = once(p->w, COPY);
    return once(p->w, p->kind);
}

static void lead(worker *w, FILE *csv) {
    static pairs p;
    p.w = w;
    for (p.kind = GATHER; p.kind <= SCATTER; p.kind++)
        for (size_t bytes = 4096; bytes <= BYTES_MAX; bytes *= 4) {
            size_t world = (size_t)w->world, part = bytes / world;
            w->b->bytes = bytes;
            w->b->copied = p.kind == GATHER ? bytes - part : (bytes + part) / 2;
            p.count = 0;
            bench_stats op = bench_run(one_pair, &p, 3, 0.8, 2000);
            bench_stats copy = bench_summarize(p.copies + 3, op.samples);
            fprintf(csv, "%s,%d,%zu,%.2f,%.2f,%.2f,%.2f,%.2f,%.3f\n", names[p.kind], w->world,
                    bytes, op.min, op.median, op.p95, copy.min, copy.median,
                    op.median / copy.median);
            fflush(csv);
            printf("%-14s W=%d %10zu bytes: %9.1f us (min %9.1f), memcpy %9.1f (min %9.1f), ratio "
                   "%5.2f, of minima %5.2f\n",
                   names[p.kind], w->world, bytes, op.median, op.min, copy.median, copy.min,
                   op.median / copy.median, op.min / copy.min);
        }
    w->b->quit = 1;
    barrier(w);
}

static void rank_main(board *b, int rank, int world, FILE *csv) {
    worker w = {b, rank, world, fsdp_shm_comm_ops(), NULL, NULL, NULL, NULL, NULL, NULL};
    fsdp_boot boot;
    fsdp_caps caps;
    memset(&boot, 0, sizeof boot);
    boot.rank = rank, boot.size = world, boot.timeout_ns = (int64_t)60 * 1000000000;
    boot.allocator.alloc = fsdpi_libc_alloc, boot.allocator.free = fsdpi_libc_free;
    boot.clock.now_ns = fsdpi_monotonic_ns;
    char job[64];
    snprintf(job, sizeof job, "bench-%d-%d", (int)getppid(), world);
    boot.job = job;
    check(&w, w.ops->open(&boot, &caps, &w.comm));
    check(&w, w.ops->alloc(w.comm, 64, (void **)&w.tiny));
    check(&w, w.ops->alloc(w.comm, BYTES_MAX, (void **)&w.full));
    check(&w, w.ops->alloc(w.comm, BYTES_MAX / (size_t)world, (void **)&w.shard));
    check(&w, w.ops->alloc(w.comm, BYTES_MAX, (void **)&w.from));
    check(&w, w.ops->alloc(w.comm, BYTES_MAX, (void **)&w.to));
    memset(w.from, 1, BYTES_MAX);
    memset(w.to, 1, BYTES_MAX);
    if (rank == 0) lead(&w, csv);
    else
        for (;;) {
            barrier(&w);
            if (b->quit) break;
            work(&w);
        }
    w.ops->close(w.comm);
}

int main(void) {
    FILE *csv = bench_csv(
        "bench_shm", "op,world,bytes,us_min,us_median,us_p95,memcpy_us_min,memcpy_us_median,ratio");
    int failed = 0;
    for (int world = 2; world <= WORLD_MAX; world += 2) {
        board *b = (board *)mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        fflush(NULL);
        for (int rank = 1; rank < world; rank++)
            if (fork() == 0) rank_main(b, rank, world, NULL), _exit(0);
        int status = 0;
        if (fork() == 0) rank_main(b, 0, world, csv), fflush(NULL), _exit(0);
        while (wait(&status) > 0) failed |= status != 0;
        munmap(b, sizeof *b);
    }
    fclose(csv);
    return failed;
}
