/* test_sweep.c - set-up and shutdown without enough memory or descriptors. In fsdp_init, meshes and
   their groups, a model and fsdp_shutdown each allocation of a rank fails in turn, or the rank has
   one descriptor more than in the last life. Each such life ends in time, with a status and a text
   if something failed, and leaves no memory, descriptor, thread or file. The next life, in the same
   process, succeeds.

   SPDX-License-Identifier: MIT */
#define TAGS SLOW | GLOO
#include "lab.h"
#include <sys/resource.h> /* setrlimit */

enum { WORLD = 2, LIVES_MAX = 400, TRIES = 3 };

typedef struct {
    const char *name;
    int victim, descriptors, persistent; /* descriptors: these are short, otherwise memory */
    int stride;
} sweep_row;
static const sweep_row rows[] = {{"memory/rank=0", 0, 0, 0, 5},
                                 {"memory/rank=1", 1, 0, 1, 5},
                                 {"descriptors/rank=0", 0, 1, 1, 1},
                                 {"descriptors/rank=1", 1, 1, 1, 1}},
                       long_rows[] = {{"memory/rank=0", 0, 0, 0, 1},
                                      {"memory/rank=1", 1, 0, 0, 1},
                                      {"memory/rank=0/for_good", 0, 0, 1, 1},
                                      {"memory/rank=1/for_good", 1, 0, 1, 1}};

/* In shared memory. */
typedef struct {
    const sweep_row *row;
    int came[LIVES_MAX][TRIES + 1], goes_on[LIVES_MAX]; /* goes_on: the victim was still short */
    int failed, unharmed;
    fsdp_status status[LIVES_MAX][WORLD];
} board;

static void meet(int *came) {
    long ns = 0;
    __atomic_add_fetch(came, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(came, __ATOMIC_SEQ_CST) < WORLD) h_nap(&ns);
}

/* Counts that must be unchanged after a life. named: files in /dev/shm and /tmp with the job's
   name. */
typedef struct {
    int fds, threads, own_tmp, named;
} traces;

static int named(const char *path) {
    int n = 0;
    DIR *dir = opendir(path);
    for (struct dirent *e; dir && (e = readdir(dir)) != NULL;)
        n += strstr(e->d_name, w_job("sweep")) != NULL;
    if (dir) closedir(dir);
    return n;
}

static traces look(void) {
    traces t = {h_entries("/proc/self/fd"), h_entries("/proc/self/task"), h_entries(h_tmpdir()),
                named("/dev/shm") + named("/tmp")};
    return t;
}

static fsdp_status groups(fsdp_world *w) {
    fsdp_mesh *grid, *slice, *flat;
    fsdp_mesh_desc d = FSDP_ZERO;
    const int32_t dims[2] = {0, 1};
    float x = 1;
    d.ndim = 2;
    d.shape[0] = 1, d.shape[1] = WORLD;
    d.names[0] = "a", d.names[1] = "b";
    fsdp_status status = fsdp_mesh_create(w, &d, &grid);
    if (!status) status = fsdp_mesh_slice(grid, &dims[1], 1, &slice);
    if (!status) status = fsdp_mesh_flatten(grid, "ab", &flat);
    if (!status) status = fsdp_all_reduce(w, slice, &x, 1, FSDP_F32, FSDP_SUM);
    if (!status && x != WORLD) h_fail(H_HERE("all_reduce"), "%g", (double)x);
    if (!status) status = fsdp_barrier(w);
    return status;
}

static fsdp_status model(fsdp_world *w) {
    fsdp_model *m = NULL;
    fsdp_unit *u;
    fsdp_param_desc p[2] = {fsdp_mat("w", 7, 16), fsdp_vec("b", 5)};
    fsdp_unit_desc d = FSDP_ZERO;
    d.params = p, d.num_params = 2;
    fsdp_status status = fsdp_model_create(w, NULL, &m);
    if (!status) status = fsdp_fully_shard(m, &d, &u);
    if (!status) status = fsdp_model_reserve(m);
    if (!status) status = fsdp_pre_forward(u);
    if (!status) status = fsdp_post_forward(u);
    return status;
}

/* Runs a life. Returns the first failure, and its text in `text`. */
static fsdp_status live(int rank, const char *job, int timeout_ms, w_heap *heap, int64_t fails_at,
                        int persistent, char *text, size_t cap) {
    fsdp_world_desc d = w_desc(rank, WORLD, NULL, job, 0);
    fsdp_world *w = NULL;
    d.timeout_ms = timeout_ms;
    w_heap_use(heap, &d);
    heap->fail_at = fails_at, heap->persistent = persistent;
    fsdp_status status = fsdp_init(&d, &w);
    if (!status) status = groups(w);
    if (!status) status = model(w);
    snprintf(text, cap, "%s", fsdp_last_error(w));
    if (!status) status = fsdp_barrier(w);
    fsdp_status ended = fsdp_shutdown(w);
    return status ? status : ended;
}

static int lowest_free(void) {
    int fd = open("/dev/null", O_RDONLY);
    CHECK(fd >= 0);
    close(fd);
    return fd;
}

static void limit(int fds) {
    struct rlimit l;
    CHECK(!getrlimit(RLIMIT_NOFILE, &l));
    l.rlim_cur = (rlim_t)fds < l.rlim_max ? (rlim_t)fds : l.rlim_max;
    CHECK(!setrlimit(RLIMIT_NOFILE, &l));
}

/* A life with a shortage. Returns 1 if it has to be lived again, with a longer deadline: the machine
   was too busy to get as far as the shortage. */
static int short_life(int rank, board *b, int k, int turn, const char *job) {
    const sweep_row *row = b->row;
    int victim = rank == row->victim, n = k * row->stride, base = lowest_free(), late = 0;
    int timeout_ms = turn == 2 ? 30000 : turn == 1 || k >= 12 ? 2000 : 300;
    int64_t start = h_calm_ms();
    char text[1200];
    w_heap heap;
    if (victim && row->descriptors) limit(base + n);
    fsdp_status status = live(rank, job, timeout_ms, &heap, victim && !row->descriptors ? n : -1,
                              row->persistent, text, sizeof text);
    limit(1024);
    W_CHECK(heap.live == 0, "%lld blocks are left: %s", (long long)heap.live, text);
    W_CHECK(!status || strlen(text) > 8 || !victim, "%s says '%s'", fsdp_status_name(status), text);
    W_CHECK(h_calm_ms() - start < 8000, "it took %lld ms: %s", (long long)(h_calm_ms() - start),
            text);
    b->status[k][rank] = status;
    if (victim) {
        int hit = row->descriptors ? status != FSDP_OK : heap.failures > 0;
        b->failed += status != FSDP_OK;
        b->unharmed += hit && !status;
        b->goes_on[k] = row->descriptors ? status != FSDP_OK : hit;
    }
    meet(&b->came[k][turn]);
    for (int r = 0; r < WORLD; r++) late |= b->status[k][r] == FSDP_ERR_TIMEOUT;
    if (!b->goes_on[k] && late && turn + 1 < TRIES) return 1;
    W_CHECK(b->goes_on[k] || !status, "nothing was short, but %s: %s", fsdp_status_name(status),
            text);
    return 0;
}

/* One life with a shortage, one without. */
static void pair_of_lives(int rank, board *b, int k, const traces *before) {
    char text[1200], job[64];
    w_heap heap;
    snprintf(w_case, sizeof w_case, "%s number %d", b->row->name, k * b->row->stride);
    for (int turn = 0, again = 1; again; turn++) {
        snprintf(job, sizeof job, "%s-%d-%d", w_job("sweep"), k, turn);
        again = short_life(rank, b, k, turn, job);
    }
    strcat(job, "-again");
    fsdp_status status = live(rank, job, 30000, &heap, -1, 0, text, sizeof text);
    W_CHECK(!status, "afterwards: %s: %s", fsdp_status_name(status), text);
    meet(&b->came[k][TRIES]);
    traces now = look();
    W_CHECK(!memcmp(&now, before, sizeof now),
            "descriptors %d of %d, threads %d of %d, files %d of %d, elsewhere %d of %d", now.fds,
            before->fds, now.threads, before->threads, now.own_tmp, before->own_tmp, now.named,
            before->named);
}

static void sweep_rank(int rank, int world, void *arg) {
    board *b = (board *)arg;
    char text[1200];
    w_heap heap;
    (void)world;
    setenv("TMPDIR", h_tmpdir(), 1);
    limit(1024);
    CHECK_OK(live(rank, w_job("sweep-first"), 30000, &heap, -1, 0, text, sizeof text));
    traces before = look();
    int k = 0;
    do {
        CHECK(k < LIVES_MAX);
        pair_of_lives(rank, b, k, &before);
    } while (b->goes_on[k++]);
    if (rank == b->row->victim)
        h_message("%s: %d lives, %d failed, %d went on", b->row->name, k, b->failed, b->unharmed);
}

static void sweep(const sweep_row *row) {
    board *b = (board *)mmap(NULL, sizeof *b, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                             -1, 0);
    CHECK(b != MAP_FAILED);
    b->row = row;
    h_ranks_proc(WORLD, sweep_rank, b);
    CHECK(b->failed > 0);
}

TEST_P(sweep, in_turn, rows) { sweep(row); }
TEST_P(long_sweep, in_turn, long_rows, SECONDS(600) | NIGHT | AT_NIGHT(GLOO)) { sweep(row); }
