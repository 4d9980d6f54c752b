/* bench_checkpoint.c - checkpoints compared with the file calls that they need

       build/bench/bench_checkpoint [--ranks 2] [--mib 256] [--rounds 5] [--dir /tmp]

   save    fsdp_checkpoint_save of 16 f32 tensors, --mib MiB in the whole. plain: the same bytes,
           written by the same ranks with pwrite in pieces of 4 MiB and fsync. Goal: 1.15 times plain
   load    fsdp_checkpoint_load, with and without checksums, of files that the system has in memory.
           plain: pread of the same bytes into memory that was touched before. Goal: 1.1 times plain
   async   how long fsdp_checkpoint_save_async takes to return, after a first one that touches its
           memory. plain: memcpy of the same bytes. Goal: 1.3 times plain
   tiny    save and load of 300 tensors of 8 x 8
   cpu     of the process of rank 0: a busy machine makes times longer, and that hardly
   A time is that of the slowest rank; the rows of a round run in turn, and a ratio is the median of
   the ratios of the rounds. bench/compare_dcp.py compares with PyTorch and dd. Writes
   $FSDP_BUILD/bench_checkpoint.csv.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls under -std=c99 too */
#endif
#include "bench/bench.h"
#include "tests/library.c" /* what it measures */
#include <fcntl.h>         /* open */
#include <sys/resource.h>  /* getrusage */
#include <unistd.h>        /* pread, pwrite, fsync */

enum { ROUNDS_MAX = 64, LARGE = 16, TINY = 300, PIECE = 4 << 20 };
enum {
    SAVE,
    PLAIN_SAVE,
    LOAD,
    LOAD_UNCHECKED,
    PLAIN_LOAD,
    ASYNC,
    PLAIN_COPY,
    TINY_SAVE,
    TINY_LOAD,
    ROWS
};
static const char *const row_names[ROWS] = {"save",           "save plain", "load",
                                            "load unchecked", "load plain", "async blocks",
                                            "async plain",    "tiny save",  "tiny load"};
static const int beside[ROWS] = {PLAIN_SAVE, -1, PLAIN_LOAD, PLAIN_LOAD, -1,
                                 PLAIN_COPY, -1, -1,         -1};
static const double goals[ROWS] = {1.15, 0, 1.1, 1.1, 0, 1.3, 0, 0, 0};

typedef struct job {
    int ranks, mib, rounds;
    const char *dir;
} job;

typedef struct bench {
    const job *j;
    fsdp_world *w;
    fsdp_checkpoint *large, *tiny;
    char *from, *to; /* for plain: a rank's bytes */
    int64_t bytes;
    char run[300], file[400];
    int failed;
} bench;

static fsdp_checkpoint *make_model(fsdp_world *w, int count, int64_t rows, int64_t columns) {
    static fsdp_param_desc p[TINY];
    static char names[TINY][16];
    fsdp_unit_desc d = FSDP_ZERO;
    fsdp_checkpoint *ck = NULL;
    fsdp_model *model;
    fsdp_unit *unit;
    fsdp_param_view v = FSDP_ZERO;
    memset(p, 0, sizeof p);
    for (int i = 0; i < count; i++) {
        snprintf(names[i], sizeof names[i], "w%d", i);
        p[i].name = names[i], p[i].ndim = 2;
        p[i].shape[0] = rows, p[i].shape[1] = columns;
    }
    d.name = "", d.params = p, d.num_params = count;
    if (fsdp_model_create(w, NULL, &model) || fsdp_fully_shard(model, &d, &unit)) return NULL;
    if (fsdp_checkpoint_create(model, NULL, &ck) || fsdp_params_writable(model)) return NULL;
    while (fsdp_next_param(model, &v))
        for (int64_t k = 0; k < v.numel; k++) ((float *)v.shard)[k] = (float)(k * 7919 % 65521);
    return fsdp_params_changed(model) ? NULL : ck;
}

static void plain_save(bench *b) {
    int fd = open(b->file, O_WRONLY | O_CREAT | O_EXCL, 0600);
    int64_t at = 0;
    for (ssize_t n; at < b->bytes && fd >= 0; at += n) {
        size_t piece = b->bytes - at < PIECE ? (size_t)(b->bytes - at) : PIECE;
        if ((n = pwrite(fd, b->from + at, piece, at)) <= 0) break;
    }
    b->failed |= at < b->bytes || fsync(fd) || close(fd);
}
static void plain_load(bench *b) {
    int fd = open(b->file, O_RDONLY);
    int64_t at = 0;
    for (ssize_t n; at < b->bytes && fd >= 0; at += n) {
        size_t piece = b->bytes - at < PIECE ? (size_t)(b->bytes - at) : PIECE;
        if ((n = pread(fd, b->to + at, piece, at)) <= 0) break;
    }
    b->failed |= at < b->bytes || close(fd);
}

static fsdp_status load(bench *b, fsdp_checkpoint *ck, const char *which, int verify) {
    fsdp_checkpoint_load_desc how = FSDP_ZERO;
    char path[500];
    how.verify = verify;
    snprintf(path, sizeof path, "%s/%s/step-00000001", b->run, which);
    return fsdp_checkpoint_load(ck, path, &how);
}
static fsdp_status save(bench *b, fsdp_checkpoint *ck, const char *which, int64_t step, int async) {
    char dir[500];
    snprintf(dir, sizeof dir, "%s/%s", b->run, which);
    return async ? fsdp_checkpoint_save_async(ck, dir, step) : fsdp_checkpoint_save(ck, dir, step);
}

static double cpu_ms(void) {
    struct rusage u;
    (void)getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e3 +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e3;
}

/* One row; how long the slowest rank took. */
static double measure(bench *b, int row, double *cpu) {
    fsdp_status status = fsdp_barrier(b->w);
    *cpu = -cpu_ms();
    int64_t begin = bench_now_ns();
    if (row == SAVE) status = save(b, b->large, "large", 1, 0);
    if (row == PLAIN_SAVE) plain_save(b);
    if (row == LOAD) status = load(b, b->large, "large", FSDP_VERIFY_READ);
    if (row == LOAD_UNCHECKED) status = load(b, b->large, "large", FSDP_VERIFY_NONE);
    if (row == PLAIN_LOAD) plain_load(b);
    if (row == ASYNC) status = save(b, b->large, "large", 2, 1);
    if (row == PLAIN_COPY) memcpy(b->to, b->from, (size_t)b->bytes);
    if (row == TINY_SAVE) status = save(b, b->tiny, "tiny", 1, 0);
    if (row == TINY_LOAD) status = load(b, b->tiny, "tiny", FSDP_VERIFY_READ);
    double ms = (double)(bench_now_ns() - begin) / 1e6;
    *cpu += cpu_ms();
    if (row == ASYNC && !status) status = fsdp_checkpoint_wait(b->large);
    if (!status) status = fsdp_all_reduce(b->w, NULL, &ms, 1, FSDP_F64, FSDP_MAX);
    b->failed |= status != FSDP_OK;
    return ms;
}

static int clean(const bench *b) {
    char command[700];
    snprintf(command, sizeof command, "rm -rf '%s'", b->run);
    int32_t failed = fsdp_barrier(b->w) != FSDP_OK || (fsdp_rank(b->w) == 0 && system(command));
    return failed || fsdp_barrier(b->w);
}

static void show(const bench *b, double ms[ROWS][ROUNDS_MAX], double cpu[ROWS][ROUNDS_MAX]) {
    FILE *csv = bench_csv("bench_checkpoint", "row,ranks,mib,min_ms,median_ms,cpu_ms,ratio");
    printf("%d ranks, %d MiB, %d rounds\n%-16s %10s %10s %10s %8s %6s\n", b->j->ranks, b->j->mib,
           b->j->rounds, "", "min ms", "median ms", "cpu ms", "ratio", "goal");
    for (int row = 0; row < ROWS; row++) {
        double ratio[ROUNDS_MAX], times[ROUNDS_MAX];
        int other = beside[row];
        for (int i = 0; i < b->j->rounds; i++)
            ratio[i] = other < 0 ? 0 : ms[row][i] / ms[other][i], times[i] = ms[row][i];
        bench_stats s = bench_summarize(times, b->j->rounds);
        bench_stats r = bench_summarize(ratio, b->j->rounds);
        double used = bench_summarize(cpu[row], b->j->rounds).median;
        printf("%-16s %10.1f %10.1f %10.1f", row_names[row], s.min, s.median, used);
        if (other >= 0) printf(" %8.2f %6.2f", r.median, goals[row]);
        printf("\n");
        fprintf(csv, "%s,%d,%d,%.2f,%.2f,%.2f,%.3f\n", row_names[row], b->j->ranks, b->j->mib,
                s.min, s.median, used, r.median);
    }
    fclose(csv);
}

static int rank_main(fsdp_world *w, void *arg) {
    static double ms[ROWS][ROUNDS_MAX], cpu[ROWS][ROUNDS_MAX], used;
    static bench b;
    b.j = (const job *)arg, b.w = w;
    int64_t rows = (int64_t)b.j->mib * 1048576 / LARGE / 4096;
    b.bytes = (int64_t)b.j->mib * 1048576 / b.j->ranks;
    b.from = (char *)malloc((size_t)b.bytes), b.to = (char *)malloc((size_t)b.bytes);
    b.large = make_model(w, LARGE, rows, 1024), b.tiny = make_model(w, TINY, 8, 8);
    if (!b.from || !b.to || !b.large || !b.tiny) return 1;
    memset(b.from, 1, (size_t)b.bytes), memset(b.to, 2, (size_t)b.bytes);
    for (int i = -1; i < b.j->rounds && !b.failed; i++) { /* the first one warms up */
        snprintf(b.run, sizeof b.run, "%s/bench_checkpoint.%d", b.j->dir, b.j->ranks);
        snprintf(b.file, sizeof b.file, "%s/plain.%d", b.run, fsdp_rank(w));
        if (clean(&b) || (fsdp_rank(w) == 0 && mkdir(b.run, 0700)) || fsdp_barrier(w)) return 1;
        for (int k = 0; k < ROWS; k++) { /* every other round the plain row comes first */
            int row = k;
            if (i % 2 && (k == SAVE || k == PLAIN_SAVE)) row = SAVE + PLAIN_SAVE - k;
            double one = measure(&b, row, &used);
            if (i >= 0) ms[row][i] = one, cpu[row][i] = used;
        }
    }
    if (clean(&b) || b.failed) return 1;
    if (fsdp_rank(w) == 0) show(&b, ms, cpu);
    return 0;
}

int main(int argc, char **argv) {
    job j = {2, 256, 5, "/tmp"};
    fsdp_spawn_desc d = FSDP_ZERO;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--ranks")) j.ranks = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--mib")) j.mib = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--rounds")) j.rounds = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--dir")) j.dir = argv[i + 1];
    }
    if (argc % 2 == 0 || j.ranks < 1 || j.mib < 1 || j.rounds < 1 || j.rounds > ROUNDS_MAX ||
        strlen(j.dir) > 200 || strchr(j.dir, '\'')) {
        fprintf(stderr, "usage: %s [--ranks N] [--mib N] [--rounds N] [--dir DIR]\n", argv[0]);
        return 2;
    }
    d.num_ranks = j.ranks;
    return fsdp_spawn(&d, rank_main, &j) != FSDP_OK;
}
