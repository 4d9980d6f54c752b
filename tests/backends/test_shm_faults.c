/* test_shm_faults.c - ranks of the shm backend that die, stall, differ or never arrive; lack of
   memory; leaks; and how ranks wait. conformance.c has the contract of all backends.

   SPDX-License-Identifier: MIT */
#define TAGS TSAN
#include "harness.h"
#include <dirent.h>         /* opendir */
#include <linux/filter.h>   /* sock_filter */
#include <linux/seccomp.h>  /* SECCOMP_MODE_FILTER */
#include <poll.h>           /* poll */
#include <sched.h>          /* sched_setaffinity */
#include <sys/prctl.h>      /* prctl */
#include <sys/resource.h>   /* setrlimit */
static int longest_poll_ms; /* longest timeout of poll() that the library has used */
static int recorded_poll(struct pollfd *p, nfds_t count, int ms) {
    if (ms > longest_poll_ms) longest_poll_ms = ms;
    return poll(p, count, ms);
}
#define poll recorded_poll
#define LIBRARY_WHOLE
#include "library.c"
#include "lab.h"

enum { COUNT = 64, BLOCK = 4096 };

typedef struct {
    int world, threads, timeout_ms;
    int64_t (*now)(void *);
    fsdp_allocator allocator;
    char job[64];
    fsdp_threads common;
    int pids[8]; /* pids of the ranks that store them; shared memory */
    int there;   /* number of ranks that have reached a certain place */
    void *extra;
} setup;

/* Returns a setup in memory that forked ranks share. */
static setup *make_setup(int world, int threads, int timeout_ms) {
    setup *s = (setup *)mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                             -1, 0);
    CHECK(s != (setup *)MAP_FAILED);
    s->world = world, s->threads = threads, s->timeout_ms = timeout_ms, s->now = fsdpi_monotonic_ns;
    s->common.size = world;
    s->allocator.alloc = fsdpi_libc_alloc;
    s->allocator.free = fsdpi_libc_free;
    snprintf(s->job, sizeof s->job, "faults-%d-%lld", (int)getpid(), (long long)h_now_ms());
    return s;
}

static void run(setup *s, h_rank_fn fn) {
    if (s->threads) h_ranks_thread(s->world, fn, s);
    else h_ranks_proc(s->world, fn, s);
}

typedef struct {
    const fsdp_comm_ops *ops;
    fsdp_comm *comm;
    char *src, *dst;
    uint64_t seq;
} rank_state;

static fsdp_status open_as(rank_state *r, setup *s, int rank, int world) {
    fsdp_boot b;
    fsdp_caps caps;
    memset(&b, 0, sizeof b);
    memset(r, 0, sizeof *r);
    b.rank = rank, b.size = world, b.timeout_ns = (int64_t)s->timeout_ms * 1000000, b.job = s->job;
    b.threads = s->threads ? &s->common : NULL;
    b.allocator = s->allocator, b.clock.now_ns = s->now;
    r->ops = fsdp_shm_comm_ops();
    return r->ops->open(&b, &caps, &r->comm);
}

static rank_state begin(int rank, setup *s) {
    rank_state r;
    fsdp_status status = open_as(&r, s, rank, s->world);
    CHECK_MSG(!status, "%s", r.ops->error_text(NULL));
    CHECK_OK(r.ops->alloc(r.comm, BLOCK, (void **)&r.src));
    CHECK_OK(r.ops->alloc(r.comm, BLOCK, (void **)&r.dst));
    return r;
}

/* is_there counts this rank; await_ranks waits until `count` ranks are there. */
static void is_there(setup *s) { __atomic_add_fetch(&s->there, 1, __ATOMIC_SEQ_CST); }
static void await_ranks(setup *s, int count) {
    while (__atomic_load_n(&s->there, __ATOMIC_SEQ_CST) < count) usleep(300);
}

static const fsdp_seg seg = {0, 0, COUNT};

static fsdp_coll coll(rank_state *r, int kind, const char *what, int state) {
    fsdp_coll c;
    memset(&c, 0, sizeof c);
    c.kind = (uint8_t)kind, c.dtype = c.out_dtype = FSDP_F32, c.state = (uint8_t)state,
    c.scale = 1.0;
    c.what = what, c.seq = ++r->seq, c.src = r->src, c.dst = r->dst, c.count = COUNT;
    if (kind == FSDP_OP_ALL_GATHER || kind == FSDP_OP_REDUCE_SCATTER) c.segs = &seg, c.num_segs = 1;
    return c;
}

static fsdp_status one(rank_state *r, fsdp_comm *comm, int kind, const char *what, int state) {
    fsdp_coll c = coll(r, kind, what, state);
    return r->ops->run(comm, &c);
}

static fsdp_comm *group_of_all(rank_state *r, int rank, int world, const char *name) {
    int32_t all[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    fsdp_group g = {0, rank, world, 0, all, name};
    fsdp_comm *out;
    fsdp_status status = r->ops->split(r->comm, &g, &out);
    CHECK_MSG(!status, "%s", r->ops->error_text(r->comm));
    return out;
}

static void says(const char *text, const char *part) {
    CHECK_MSG(strstr(text, part), "\"%s\" does not say \"%s\"", text, part);
}
/* No rank names itself as another one that has failed. */
static void told(rank_state *r, const char *part) {
    const char *text = r->ops->error_text(r->comm);
    char itself[2][32];
    CHECK(!strncmp(text, "rank ", 5));
    snprintf(itself[0], sizeof itself[0], " rank %d reports: ", atoi(text + 5));
    snprintf(itself[1], sizeof itself[1], " rank %d failed in ", atoi(text + 5));
    CHECK_MSG(!strstr(text, itself[0]) && !strstr(text, itself[1]), "%s", text);
    says(text, part);
}

/* ---- a rank that dies ------------------------------------------------------------------------ */

typedef struct {
    const char *name;
    int kind, inside;
} death;
static const death deaths[] = {{"all_gather", FSDP_OP_ALL_GATHER, 0},
                               {"reduce_scatter", FSDP_OP_REDUCE_SCATTER, 0},
                               {"all_reduce", FSDP_OP_ALL_REDUCE, 0},
                               {"broadcast", FSDP_OP_BROADCAST, 0},
                               {"split", -1, 0},
                               {"all_gather/inside", FSDP_OP_ALL_GATHER, 1},
                               {"reduce_scatter/inside", FSDP_OP_REDUCE_SCATTER, 1}};

static void *die_soon(void *arg) {
    (void)arg;
    usleep(30000);
    h_rank = 1;
    h_die(SIGKILL);
}

static void await_death(int pid) {
    for (char state = 'R'; state != 'Z' && state != 'X'; usleep(1000)) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        FILE *f = fopen(path, "r");
        if (!f || fscanf(f, "%*d (%*[^)]) %c", &state) != 1) state = 'X';
        if (f) fclose(f);
    }
}

static void killed(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    const death *d = (const death *)s->extra;
    rank_state r = begin(rank, s);
    pthread_t thread;
    s->pids[rank] = (int)getpid();
    CHECK_OK(one(&r, r.comm, FSDP_OP_REDUCE_SCATTER, "h.4", FSDP_STATE_POST_BACKWARD));
    is_there(s);
    if (rank == 1) await_ranks(s, world); /* all ranks have completed the first one */
    if (rank == 1 && !d->inside) usleep(30000), h_die(SIGKILL);
    if (rank == 1) pthread_create(&thread, NULL, die_soon, NULL);
    if (rank == 2 && d->inside) await_death(s->pids[1]);
    int64_t start = h_calm_ms();
    if (d->kind < 0) {
        int32_t all[3] = {0, 1, 2};
        fsdp_group g = {0, rank, world, 0, all, "later"};
        fsdp_comm *out;
        CHECK_STATUS(r.ops->split(r.comm, &g, &out), FSDP_ERR_PEER_LOST);
        CHECK(out == NULL);
    } else {
        CHECK_STATUS(one(&r, r.comm, d->kind, "h.3", FSDP_STATE_FORWARD), FSDP_ERR_PEER_LOST);
        told(&r, " of 'h.3' (forward, op 2): ");
        told(&r, fsdp_op_name(d->kind));
    }
    CHECK(h_calm_ms() - start < 1000);
    told(&r, rank ? "rank 2: " : "rank 0: ");
    told(&r, "rank 1 has died (process ");
    if (!d->inside)
        told(&r, "its last operation was reduce_scatter of 'h.4' (post_backward, op 1), 0.");
    start = h_calm_ms();
    CHECK_STATUS(one(&r, r.comm, FSDP_OP_BROADCAST, "next", 0),
                 FSDP_ERR_PEER_LOST); /* the failure is permanent, and reported at once */
    CHECK(h_calm_ms() - start < 200);
    told(&r, "rank 1 has died");
    told(&r, "broadcast of 'next' (op ");
    r.ops->close(r.comm);
}
TEST_P(shm_faults, killed_rank, deaths) {
    setup *s = make_setup(3, 0, 20000);
    s->extra = (void *)(uintptr_t)row;
    run(s, killed);
}

static void ends_without_closing(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    rank_state r;
    (void)world;
    if (rank == 1) {
        pid_t pid = fork(); /* the rank itself: a test process must not end early */
        if (pid == 0) r = begin(1, s), _exit(0);
        CHECK_EQ_INT(waitpid(pid, NULL, 0), pid);
        return;
    }
    r = begin(0, s);
    CHECK_STATUS(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.0", 0), FSDP_ERR_PEER_LOST);
    told(&r, "rank 1 has died");
    r.ops->close(r.comm);
}
TEST(shm_faults, exit_without_close) { run(make_setup(2, 0, 20000), ends_without_closing); }

/* ---- a rank that stalls ---------------------------------------------------------------------- */

static void stopped(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    rank_state r = begin(rank, s);
    s->pids[rank] = (int)getpid();
    CHECK_OK(one(&r, r.comm, FSDP_OP_REDUCE_SCATTER, "h.4", FSDP_STATE_POST_BACKWARD));
    int64_t start = h_now_ms(), calm = h_calm_ms();
    if (rank == 2) raise(SIGSTOP);
    CHECK_STATUS(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.3", FSDP_STATE_FORWARD), FSDP_ERR_TIMEOUT);
    told(&r, rank == 2 ? ": all_gather of 'h.3' (forward, op 2): [E489] rank "
                       : ": all_gather of 'h.3' (forward, op 2): [E");
    told(&r, "[E403] rank 2 has not come within 1.0 s; its last operation was reduce_scatter of "
             "'h.4' (post_backward, op 1), ");
    int waited = (int)(h_now_ms() - start), waited_calm = (int)(h_calm_ms() - calm);
    if (rank < 2) CHECK_MSG(waited >= 900 && waited_calm <= 1600, "%d ms", waited);
    if (rank == 0) h_message("noticed after %d ms, the deadline is 1000 ms", waited);
    if (rank == 0) usleep(20000), kill(s->pids[world - 1], SIGCONT);
    r.ops->close(r.comm);
}
TEST(shm_faults, stopped_rank) { run(make_setup(3, 0, 1000), stopped); }

static void late(int rank, int world, void *arg) {
    rank_state r = begin(rank, (setup *)arg);
    (void)world;
    if (rank == 1) usleep(300000);
    CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.3", 0));
    if (rank == 0) usleep(300000);
    CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_REDUCE, "h.3", 0));
    r.ops->close(r.comm);
}
TEST(shm_faults, late_rank_is_in_time) {
    run(make_setup(2, 0, 10000), late);
    run(make_setup(2, 1, 10000), late);
}

/* Two ranks wait for each other in different groups: the text says where each one is. */
static void crossed(int rank, int world, void *arg) {
    rank_state r = begin(rank, (setup *)arg);
    fsdp_comm *a = group_of_all(&r, rank, world, "shard"),
              *b = group_of_all(&r, rank, world, "replicate");
    fsdp_comm *mine = rank ? b : a;
    fsdp_status status = one(&r, mine, rank ? FSDP_OP_ALL_REDUCE : FSDP_OP_ALL_GATHER,
                             rank ? "norm" : "h.3", 0);
    CHECK_STATUS(status, FSDP_ERR_TIMEOUT);
    const char *text = r.ops->error_text(mine);
    says(text, "all_reduce of 'norm' on 'replicate' (op 1)");
    says(text, "all_gather of 'h.3' on 'shard' (op 1)");
    says(text, "it is in ");
    r.ops->close(a);
    r.ops->close(b);
    r.ops->close(r.comm);
}
TEST(shm_faults, crossed_groups, SLOW) {
    run(make_setup(2, 0, 600), crossed);
    run(make_setup(2, 1, 600), crossed);
}

static int64_t jump_ns;
static int64_t jumping_clock(void *user) {
    return fsdpi_monotonic_ns(user) + __atomic_load_n(&jump_ns, __ATOMIC_SEQ_CST);
}

static void other_clock(int rank, int world, void *arg) {
    rank_state r = begin(rank, (setup *)arg);
    int64_t start = h_calm_ms();
    is_there((setup *)arg);
    if (rank == 1) {
        await_ranks((setup *)arg, world);
        while (!r.ops->poll(r.comm) && h_calm_ms() - start < 2000) { /* until rank 0 is inside */
            usleep(1000);
            __atomic_add_fetch(&jump_ns, (int64_t)7200 * 1000000000,
                               __ATOMIC_SEQ_CST); /* two hours later */
        }
    }
    CHECK_STATUS(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.3", 0), FSDP_ERR_TIMEOUT);
    told(&r, "rank 1 has not come within 3600.0 s");
    CHECK(h_calm_ms() - start < 1000);
    r.ops->close(r.comm);
}
TEST(shm_faults, deadlines_follow_the_clock_of_the_desc) {
    setup *s = make_setup(2, 1, 3600000);
    s->now = jumping_clock;
    run(s, other_clock);
}

/* ---- ranks that differ ----------------------------------------------------------------------- */

typedef struct {
    const char *name;
    int threads, field;
    const char *differs, *left, *right;
} mismatch;
enum {
    OTHER_OP,
    OTHER_UNIT,
    OTHER_DTYPE,
    OTHER_COUNT,
    OTHER_STATE,
    OTHER_ROOT,
    OTHER_REDOP,
    OTHER_SEGS
};
// clang-format off
#define ROWS(mode, threads)                                                                        \
    {mode "/op", threads, OTHER_OP, "operation", "all_gather of 'h.3'", "all_reduce of 'h.3'"},    \
    {mode "/unit", threads, OTHER_UNIT, "unit", "all_gather of 'h.3'", "all_gather of 'h.7'"},     \
    {mode "/dtype", threads, OTHER_DTYPE, "dtype", "64 elements of f32", "64 elements of bf16"},   \
    {mode "/count", threads, OTHER_COUNT, "count, segments", "64 elements of", "63 elements of"},  \
    {mode "/state", threads, OTHER_STATE, "state", "'h.3' (forward,", "'h.3' (pre_backward,"},     \
    {mode "/root", threads, OTHER_ROOT, "root", "ranks 0, 1: broadcast", "rank 2: broadcast"},     \
    {mode "/redop", threads, OTHER_REDOP, "reduction", "ranks 0, 1: all_r", "rank 2: all_reduce"}, \
    {mode "/segs", threads, OTHER_SEGS, "segments", "ranks 0, 1: all_g", "rank 2: all_gather"}
// clang-format on
static const mismatch mismatches[] = {ROWS("processes", 0), ROWS("threads", 1)};

static void differ(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    const mismatch *m = (const mismatch *)s->extra;
    rank_state r = begin(rank, s);
    fsdp_seg mine = seg;
    int kind = m->field == OTHER_ROOT    ? FSDP_OP_BROADCAST
               : m->field == OTHER_REDOP ? FSDP_OP_ALL_REDUCE
                                         : FSDP_OP_ALL_GATHER;
    int odd = rank == world - 1;
    fsdp_coll c = coll(&r, odd && m->field == OTHER_OP ? FSDP_OP_ALL_REDUCE : kind,
                       odd && m->field == OTHER_UNIT ? "h.7" : "h.3",
                       odd && m->field == OTHER_STATE ? FSDP_STATE_PRE_BACKWARD
                                                      : FSDP_STATE_FORWARD);
    if (c.segs) c.segs = &mine;
    if (odd && m->field == OTHER_DTYPE) c.dtype = FSDP_BF16;
    if (odd && m->field == OTHER_COUNT) c.count = 63, mine.count = 63;
    if (odd && m->field == OTHER_ROOT) c.root = 1;
    if (odd && m->field == OTHER_REDOP) c.redop = FSDP_MAX;
    if (odd && m->field == OTHER_SEGS) mine.full = 8;
    memset(r.dst, 0x77, BLOCK);
    CHECK_STATUS(r.ops->run(r.comm, &c), FSDP_ERR_MISMATCH);
    for (int i = 0; i < BLOCK; i++) CHECK(r.dst[i] == 0x77); /* no byte has moved */
    told(&r, ": [E404] ranks disagree: ranks 0, 1: ");
    told(&r, "; rank 2: ");
    told(&r, m->differs);
    told(&r, m->left);
    told(&r, m->right);
    r.ops->close(r.comm);
}
TEST_P(shm_faults, mismatch, mismatches) {
    setup *s = make_setup(3, row->threads, 20000);
    s->extra = (void *)(uintptr_t)row;
    run(s, differ);
}

static void other_members(int rank, int world, void *arg) {
    rank_state r = begin(rank, (setup *)arg);
    int32_t ranks[2][3] = {{0, 1, 2}, {1, 2, 0}};
    fsdp_group g = {0, rank ? 1 : 0, world, 0, ranks[rank == 2], "odd"};
    fsdp_comm *out;
    CHECK_STATUS(r.ops->split(r.comm, &g, &out), FSDP_ERR_MISMATCH);
    CHECK(out == NULL);
    told(&r, "the members of the group");
    r.ops->close(r.comm);
}
TEST(shm_faults, other_members_of_a_group) {
    run(make_setup(3, 0, 20000), other_members);
    run(make_setup(3, 1, 20000), other_members);
}

static void abort_reaches_groups(int rank, int world, void *arg) {
    rank_state r = begin(rank, (setup *)arg);
    int32_t ranks[2] = {0, 1};
    fsdp_group g = {rank < 2 ? 0 : -1, rank < 2 ? rank : -1, 2, 0, ranks, "pair"};
    fsdp_comm *pair;
    int64_t start = h_calm_ms();
    CHECK_OK(r.ops->split(r.comm, &g, &pair));
    is_there((setup *)arg);
    if (rank == 2) {
        await_ranks((setup *)arg, world);
        usleep(20000); /* so that they most likely wait inside */
        r.ops->abort(r.comm, FSDP_ERR_ABORTED, "rank 2 aborted the world: out of data");
    }
    fsdp_comm *mine = rank == 0 ? pair : r.comm;
    CHECK_STATUS(one(&r, mine, FSDP_OP_ALL_GATHER, "h.3", 0), FSDP_ERR_ABORTED);
    says(r.ops->error_text(mine), "(op 1): rank 2 aborted the world: out of data");
    CHECK(h_calm_ms() - start < 1000);
    if (pair) r.ops->close(pair);
    r.ops->close(r.comm);
}
TEST(shm_faults, abort_reaches_ranks_in_groups) {
    run(make_setup(3, 0, 20000), abort_reaches_groups);
    run(make_setup(3, 1, 20000), abort_reaches_groups);
}

/* A rank whose call fails may overwrite or free its buffers, while a late peer still copies them in
   the same call: then the call of the peer fails, too. Rank 1 is late, rank 0 fails since rank 2
   aborts. */
typedef struct {
    const char *name;
    int kind, count;
} late_call;
static const late_call late_calls[] = {
    {"all_gather", FSDP_OP_ALL_GATHER, COUNT},
    {"reduce_scatter", FSDP_OP_REDUCE_SCATTER, COUNT},
    {"small_all_reduce", FSDP_OP_ALL_REDUCE, COUNT},
    {"large_all_reduce", FSDP_OP_ALL_REDUCE, 2 * FSDPI_SHM_SMALL / 4},
    {"broadcast", FSDP_OP_BROADCAST, COUNT},
    {"all_to_all", FSDP_OP_ALL_TO_ALL, COUNT},
    {"send", FSDP_OP_SEND, COUNT},
};
static setup *late_setup;
static fsdp_status moves_late(fsdpi_comm *c, const fsdp_coll *op, const fsdpi_span *span) {
    is_there(late_setup);
    await_ranks(late_setup, 2); /* rank 0 has freed its memory */
    return fsdpi_shm_transport.move_data(c, op, span);
}
static void fails_before_a_late_peer(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    rank_state r = begin(rank, s);
    fsdpi_comm_world *w = ((fsdpi_comm *)(void *)r.comm)->world;
    fsdpi_transport slow = fsdpi_shm_transport;
    int32_t ranks[2] = {0, 1};
    fsdp_group g = {rank < 2 ? 0 : -1, rank < 2 ? rank : -1, 2, 0, ranks, "pair"};
    fsdp_comm *pair;
    (void)world;
    CHECK_OK(r.ops->split(r.comm, &g, &pair));
    const late_call *call = (const late_call *)s->extra;
    fsdp_coll op = coll(&r, call->kind, "h.3", 0);
    const size_t bytes = 2 * FSDPI_SHM_SMALL;
    void *src, *dst;
    CHECK_OK(r.ops->alloc(r.comm, bytes, &src));
    CHECK_OK(r.ops->alloc(r.comm, bytes, &dst));
    op.count = (uint64_t)call->count, op.src = src, op.dst = dst;
    if (op.kind == FSDP_OP_SEND && rank == 1) op.kind = FSDP_OP_RECV;
    if (fsdpi_is_pair(op.kind)) op.root = !rank;
    slow.move_data = moves_late;
    if (rank == 1) late_setup = s, w->transport = &slow;
    if (rank == 2) {
        await_ranks(s, 1); /* ranks 0 and 1 have compared their calls */
        r.ops->abort(r.comm, FSDP_ERR_ABORTED, "rank 2 is out of data");
    } else {
        CHECK_STATUS(r.ops->run(pair, &op), FSDP_ERR_ABORTED);
        w->transport = &fsdpi_shm_transport;
        r.ops->free(r.comm, src, bytes);
        r.ops->free(r.comm, dst, bytes);
        if (rank == 0) is_there(s);
        r.ops->close(pair);
    }
    r.ops->close(r.comm);
}
TEST_P(shm_faults, call_that_one_rank_has_lost, late_calls) {
    for (int threads = 0; threads < 2; threads++) {
        setup *s = make_setup(3, threads, 20000);
        s->extra = (void *)(uintptr_t)row;
        run(s, fails_before_a_late_peer);
    }
}

/* Over Gloo a rank may know of a failure that its peers do not know yet. It leaves the call, and a
   late peer names it at the deadline. */
static uint32_t own_failed;
static fsdp_status fails_alone(fsdpi_comm *c, const fsdp_coll *op, const fsdpi_span *span) {
    own_failed = 1;
    return fsdpi_shm_transport.move_data(c, op, span);
}
static int own_failure(fsdpi_comm_world *w, fsdpi_failure *out) {
    (void)w;
    memset(out, 0, sizeof *out);
    out->status = FSDP_ERR_CORRUPT;
    return 1;
}
static void leaves_alone(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    rank_state r = begin(rank, s);
    fsdpi_comm_world *w = ((fsdpi_comm *)(void *)r.comm)->world;
    fsdpi_transport mine = fsdpi_shm_transport;
    fsdp_coll op = coll(&r, FSDP_OP_ALL_GATHER, "h.3", 0);
    (void)world;
    if (rank == 0) w->failed = &own_failed, mine.failure = own_failure;
    if (rank == 1) late_setup = s;
    mine.move_data = rank ? moves_late : fails_alone;
    w->transport = &mine;
    CHECK_STATUS(r.ops->run(r.comm, &op), rank ? FSDP_ERR_TIMEOUT : FSDP_ERR_CORRUPT);
    is_there(s);
    if (rank == 1) told(&r, "[E403] rank 0 has not finished within 0.6 s");
    w->transport = &fsdpi_shm_transport;
    await_ranks(s, 3);
    r.ops->close(r.comm);
}
TEST(shm_faults, rank_that_knows_of_a_failure_first, SLOW) {
    run(make_setup(2, 0, 600), leaves_alone);
    run(make_setup(2, 1, 600), leaves_alone);
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* The memory of a group is returned to the host when its last member closes it. */
static void groups_go(int rank, int world, void *arg) {
    rank_state r = begin(rank, (setup *)arg);
    const fsdpi_shm_world *w = fsdpi_shm_world_of((fsdpi_shm_comm *)(void *)r.comm);
    struct stat few, many;
    for (int i = 0; i < 200; i++) {
        fsdp_comm *group = group_of_all(&r, rank, world, "again");
        CHECK_OK(one(&r, group, FSDP_OP_ALL_GATHER, "h.3", 0));
        r.ops->close(group);
        CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_REDUCE, "h.3", 0)); /* all have closed it */
        if (i == 20) CHECK(!fstat(w->fd, &few));
        CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_REDUCE, "h.3", 0));
    }
    CHECK(!fstat(w->fd, &many));
    CHECK_MSG(many.st_blocks <= few.st_blocks + 8, "%lld blocks of 512 bytes, then %lld",
              (long long)few.st_blocks, (long long)many.st_blocks);
    CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_REDUCE, "h.3", 0));
    r.ops->close(r.comm);
}
TEST(shm_faults, memory_of_groups_comes_back) { run(make_setup(2, 0, 20000), groups_go); }

/* A rank that closes a group in which others wait has left it: the others get an error at once. */
static void group_goes(int rank, int world, void *arg) {
    rank_state r = begin(rank, (setup *)arg);
    fsdp_comm *group = group_of_all(&r, rank, world, "left");
    CHECK_OK(one(&r, group, FSDP_OP_ALL_GATHER, "h.3", 0));
    if (rank == 1) {
        w_sleep_ns(20000000); /* so that the others most likely sleep */
        r.ops->close(group);
        for (int i = 0; i < 1000 && !r.ops->poll(r.comm); i++) w_sleep_ns(5000000);
    } else {
        CHECK_STATUS(one(&r, group, FSDP_OP_ALL_GATHER, "h.4", 0), FSDP_ERR_PEER_LOST);
        const char *text = r.ops->error_text(group);
        CHECK_MSG(strstr(text, "rank 1 has closed this group"), "%s", text);
        r.ops->close(group);
    }
    CHECK_STATUS(r.ops->poll(r.comm), FSDP_ERR_PEER_LOST);
    r.ops->close(r.comm);
}
TEST(shm_faults, group_is_closed_while_others_are_inside) {
    run(make_setup(3, 0, 20000), group_goes);
    run(make_setup(3, 1, 20000), group_goes);
}

/* ---- send and recv --------------------------------------------------------------------------- */

static fsdp_status pair(rank_state *r, int kind, int other, uint64_t count, fsdp_dtype dtype,
                        uint64_t fingerprint) {
    fsdp_coll c = coll(r, kind, "h.3", FSDP_STATE_FORWARD);
    c.root = other, c.count = count, c.dtype = (uint8_t)dtype, c.fingerprint = fingerprint;
    return r->ops->run(r->comm, &c);
}

typedef struct {
    const char *name;
    int threads, kind;
    uint64_t count;
    fsdp_dtype dtype;
    uint64_t fingerprint;
    const char *says, *differs;
} unlike;
// clang-format off
#define UNLIKE(mode, threads)                                                                      \
    {mode "/count", threads, FSDP_OP_RECV, 9, FSDP_F32, 5,                                         \
     "recv of 'h.3' from rank 0 (forward, op 1), 9 elements of f32", " (differs in count)"},       \
    {mode "/dtype", threads, FSDP_OP_RECV, 8, FSDP_BF16, 5,                                        \
     "recv of 'h.3' from rank 0 (forward, op 1), 8 elements of bf16", " (differs in dtype)"},      \
    {mode "/fingerprint", threads, FSDP_OP_RECV, 8, FSDP_F32, 6,                                   \
     "recv of 'h.3' from rank 0 (forward, op 1), 8 elements of f32", " (differs in its settings)"}, \
    {mode "/both_send", threads, FSDP_OP_SEND, 8, FSDP_F32, 5,                                     \
     "send of 'h.3' to rank 0 (forward, op 1), 8 elements of f32", ""}
// clang-format on
static const unlike unlike_pairs[] = {UNLIKE("processes", 0), UNLIKE("threads", 1)};

/* Rank 2 waits in a collective, and gets the error as well. */
static void pairs_differ(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    const unlike *u = (const unlike *)s->extra;
    rank_state r = begin(rank, s);
    (void)world;
    memset(r.dst, 0x77, BLOCK);
    fsdp_status status = rank == 0   ? pair(&r, FSDP_OP_SEND, 1, 8, FSDP_F32, 5)
                         : rank == 1 ? pair(&r, u->kind, 0, u->count, u->dtype, u->fingerprint)
                                     : one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.3", 0);
    CHECK_STATUS(status, FSDP_ERR_MISMATCH);
    for (int i = 0; i < BLOCK; i++) CHECK(r.dst[i] == 0x77); /* no byte has moved */
    told(&r, "ranks disagree: rank ");
    told(&r, "rank 0: send of 'h.3' to rank 1 (forward, op 1), 8 elements of f32");
    told(&r, u->says);
    told(&r, u->differs);
    r.ops->close(r.comm);
}
TEST_P(shm_faults, unlike_pair, unlike_pairs) {
    setup *s = make_setup(3, row->threads, 20000);
    s->extra = (void *)(uintptr_t)row;
    run(s, pairs_differ);
}

/* Rank 0 sends to rank 1, which receives from 2, which receives from 0: each text says for which
   rank the missing one waits instead. */
static void wrong_partner(int rank, int world, void *arg) {
    rank_state r = begin(rank, (setup *)arg);
    static const int others[3] = {1, 2, 0};
    (void)world;
    CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.2", 0)); /* all ranks are there */
    CHECK_STATUS(pair(&r, rank ? FSDP_OP_RECV : FSDP_OP_SEND, others[rank], 8, FSDP_F32, 0),
                 FSDP_ERR_TIMEOUT);
    const char *said[3] = {"rank 1 has not come within 0.6 s; it is in recv of 'h.3' from rank 2",
                           "rank 2 has not come within 0.6 s; it is in recv of 'h.3' from rank 0",
                           "rank 0 has not come within 0.6 s; it is in send of 'h.3' to rank 1"};
    const char *text = r.ops->error_text(r.comm);
    CHECK_MSG(strstr(text, said[0]) || strstr(text, said[1]) || strstr(text, said[2]), "%s", text);
    r.ops->close(r.comm);
}
TEST(shm_faults, pairs_that_do_not_meet, SLOW) {
    run(make_setup(3, 0, 600), wrong_partner);
    run(make_setup(3, 1, 600), wrong_partner);
}

/* The sender waits for rank 1, which dies, closes, or aborts; ranks outside the pair may come and
   go. */
enum { PARTNER_DIES, PARTNER_CLOSES, PARTNER_ABORTS, PARTNER_IS_LATE };
static void partner(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    int what = *(int *)s->extra;
    rank_state r = begin(rank, s);
    CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.2", 0));
    is_there(s);
    if (rank == 2) {
        r.ops->close(r.comm);
        return;
    }
    if (rank == 1) {
        await_ranks(s, world);
        usleep(120000); /* so that the sender has most likely found that rank 2 is gone */
        if (what == PARTNER_DIES) h_die(SIGKILL);
        if (what == PARTNER_ABORTS) r.ops->abort(r.comm, FSDP_ERR_CORRUPT, "rank 1 is out of data");
    }
    int64_t start = h_calm_ms();
    if (rank == 0 || what == PARTNER_IS_LATE) {
        int late = what == PARTNER_IS_LATE;
        fsdp_status wanted = late                     ? FSDP_OK
                             : what == PARTNER_ABORTS ? FSDP_ERR_CORRUPT
                                                      : FSDP_ERR_PEER_LOST;
        CHECK_STATUS(pair(&r, rank ? FSDP_OP_RECV : FSDP_OP_SEND, !rank, 8, FSDP_F32, 0), wanted);
        CHECK(h_calm_ms() - start < 1000);
        if (!late) told(&r, "rank 0: send of 'h.3' to rank 1 (forward, op 2): ");
        if (!late)
            told(&r, what == PARTNER_DIES     ? "has died (process "
                     : what == PARTNER_CLOSES ? "has shut down; its last operation was all_g"
                                              : "is out of data");
    }
    r.ops->close(r.comm);
}
TEST(shm_faults, partner_of_a_pair) {
    for (int what = PARTNER_DIES; what <= PARTNER_IS_LATE; what++)
        for (int threads = 0; threads < (what == PARTNER_DIES ? 1 : 2); threads++) {
            setup *s = make_setup(3, threads, 20000);
            s->extra = &what;
            run(s, partner);
        }
}

/* ---- open ------------------------------------------------------------------------------------ */

static void missing_at_open(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    int absent = *(int *)s->extra;
    rank_state r;
    int64_t start = h_calm_ms();
    if (rank == absent) return;
    CHECK_STATUS(open_as(&r, s, rank, world), FSDP_ERR_TIMEOUT);
    CHECK(r.comm == NULL && h_calm_ms() - start < 1500);
    char text[40];
    snprintf(text, sizeof text, "rank %d has not come within 0.8 s", absent);
    says(r.ops->error_text(NULL), text);
    says(r.ops->error_text(NULL), s->job);
}
TEST(shm_faults, rank_missing_at_open, SLOW) {
    for (int v = 0; v < 4; v++) {
        int absent = v & 1 ? 1 : 0;
        setup *s = make_setup(3, v >> 1, 800);
        s->extra = &absent;
        run(s, missing_at_open);
    }
}

/* Files of one rank may not grow. If it is rank 0, which makes the world's file, its open fails; if
   it is rank 1, all ranks get its error. */
static void files_may_not_grow(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    struct rlimit limit = {1, RLIM_INFINITY};
    const int victim = *(int *)s->extra;
    rank_state r;
    if (rank == victim) CHECK_EQ_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
    const fsdp_status status = victim || rank == 0 ? open_as(&r, s, rank, world) : FSDP_OK;
    if (rank == victim) limit.rlim_cur = RLIM_INFINITY, (void)setrlimit(RLIMIT_FSIZE, &limit);
    if (!victim && rank) return;
    if (rank == 2 && status == FSDP_ERR_TIMEOUT) { /* rank 0 had already given up */
        says(r.ops->error_text(NULL), "rank 0 has not come");
        return;
    }
    CHECK_STATUS(status, FSDP_ERR_UNSUPPORTED);
    says(r.ops->error_text(NULL), victim ? "rank 1: [E607]" : "[E607]");
}
TEST(shm_faults, files_are_limited) {
    for (int victim = 0; victim < 2; victim++) {
        setup *s = make_setup(3, 0, 20000);
        s->extra = &victim;
        run(s, files_may_not_grow);
    }
}

static void dies_in_open(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    rank_state r;
    pthread_t thread;
    if (rank == 2) return; /* so that the others wait */
    if (rank == 0) {
        h_shared->state[1] = H_DIES;
        pthread_create(&thread, NULL, die_soon, NULL);
    }
    fsdp_status status = open_as(&r, s, rank, world);
    CHECK(rank == 1); /* a rank that does not reach rank 0 in time waits for its deadline */
    CHECK_MSG(status == FSDP_ERR_PEER_LOST || status == FSDP_ERR_TIMEOUT, "%d", status);
    says(r.ops->error_text(NULL),
         status == FSDP_ERR_TIMEOUT ? "rank 0 has not come" : "rank 0 has died");
}
TEST(shm_faults, rank_0_dies_in_open) { run(make_setup(3, 0, 1500), dies_in_open); }

static void other_world_size(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    rank_state r;
    if (rank == 1) usleep(60000);
    fsdp_status status = open_as(&r, s, rank, rank == 1 ? world + 1 : world);
    if (rank == 2 && status == FSDP_ERR_TIMEOUT) { /* rank 0 had already given up */
        says(r.ops->error_text(NULL), "rank 0 has not come");
    } else {
        CHECK_STATUS(status, FSDP_ERR_MISMATCH);
        says(r.ops->error_text(NULL), "rank 0 has a world size of 3, rank 1 has 4");
    }
}
TEST(shm_faults, other_world_size) { run(make_setup(3, 0, 1500), other_world_size); }

static void other_world_size_thread(int rank, int world, void *arg) {
    rank_state r;
    fsdp_status status = open_as(&r, (setup *)arg, rank, rank == 1 ? world + 1 : world);
    if (status != FSDP_ERR_MISMATCH) CHECK_STATUS(status, FSDP_ERR_TIMEOUT);
    else says(r.ops->error_text(NULL), "a world size of ");
}
TEST(shm_faults, other_world_size_of_a_thread) {
    run(make_setup(2, 1, 200), other_world_size_thread);
}

/* Processes 1 and 2 both claim to be rank 1: the second one is refused. Then rank 2 arrives. */
static void twice(int process, int world, void *arg) {
    setup *s = (setup *)arg;
    rank_state r;
    int rank = process == 0 ? 0 : process == 3 ? 2 : 1, *refused = &s->pids[7];
    (void)world;
    while (process == 3 && !__atomic_load_n(refused, __ATOMIC_SEQ_CST)) usleep(1000);
    fsdp_status status = open_as(&r, s, rank, 3);
    if (status) {
        CHECK_STATUS(status, FSDP_ERR_INVALID_ARG);
        says(r.ops->error_text(NULL), "rank 1 has joined already");
        CHECK_EQ_INT(__atomic_add_fetch(refused, 1, __ATOMIC_SEQ_CST), 1);
        return;
    }
    CHECK_OK(r.ops->alloc(r.comm, BLOCK, (void **)&r.src));
    r.dst = r.src;
    CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_REDUCE, "h.3", 0));
    r.ops->close(r.comm);
}
TEST(shm_faults, rank_that_comes_twice) {
    setup *s = make_setup(4, 0, 20000);
    run(s, twice);
    CHECK_EQ_INT(s->pids[7], 1);
}

/* Two jobs with one id: the second rank 0 is refused while the first job is starting. */
static void two_jobs(int process, int world, void *arg) {
    setup *s = (setup *)arg;
    rank_state r;
    int *refused = &s->pids[7];
    (void)world;
    while (process == 1 && !__atomic_load_n(refused, __ATOMIC_SEQ_CST)) usleep(1000);
    fsdp_status status = open_as(&r, s, process == 1, 2);
    if (status) {
        CHECK_STATUS(status, FSDP_ERR_INVALID_ARG);
        says(r.ops->error_text(NULL), "another job with this id is starting");
        CHECK_EQ_INT(__atomic_add_fetch(refused, 1, __ATOMIC_SEQ_CST), 1);
        return;
    }
    r.ops->close(r.comm);
}
TEST(shm_faults, two_jobs_with_one_id) {
    setup *s = make_setup(3, 0, 20000);
    run(s, two_jobs);
    CHECK_EQ_INT(s->pids[7], 1);
}

static void second_world(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    rank_state first = begin(rank, s), second = begin(rank, s); /* both open, in one job */
    (void)world;
    for (int i = 0; i < 10; i++) {
        CHECK_OK(one(&first, first.comm, FSDP_OP_ALL_GATHER, "a", 0));
        CHECK_OK(one(&second, second.comm, FSDP_OP_ALL_REDUCE, "b", 0));
    }
    first.ops->close(first.comm);
    CHECK_OK(one(&second, second.comm, FSDP_OP_ALL_REDUCE, "b", 0));
    second.ops->close(second.comm);
}
TEST(shm_faults, two_worlds_of_one_job) { run(make_setup(3, 0, 5000), second_world); }

/* Another process has rank 0's name and accepts no connection: its queue is full. */
static socklen_t name_of(const setup *s, struct sockaddr_un *name) {
    memset(name, 0, sizeof *name);
    name->sun_family = AF_UNIX;
    const int used = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "fsdp-shm-%lu-%016llx",
                              (unsigned long)getuid(), (unsigned long long)fsdpi_hash_text(s->job));
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)used);
}
static int socket_of(void) { return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0); }
TEST(shm_faults, rank_0_looks_at_nobody) {
    setup *s = make_setup(3, 0, 700);
    struct sockaddr_un name;
    const socklen_t length = name_of(s, &name);
    const int listener = socket_of();
    int queued = 0;
    rank_state r;
    CHECK_EQ_INT(bind(listener, (struct sockaddr *)(void *)&name, length), 0);
    CHECK_EQ_INT(listen(listener, 1), 0);
    while (!connect(socket_of(), (struct sockaddr *)(void *)&name, length)) queued++;
    CHECK(errno == EAGAIN && queued > 0);
    const int64_t start = h_calm_ms();
    CHECK_STATUS(open_as(&r, s, 1, 3), FSDP_ERR_TIMEOUT);
    CHECK(h_calm_ms() - start < 2000);
    says(r.ops->error_text(NULL), "[E617] rank 0 has not come within 0.7 s");
}

/* A process connects to rank 0 and sends nothing. */
static void silent(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    struct sockaddr_un name;
    const socklen_t length = name_of(s, &name);
    rank_state r;
    if (rank > 0) {
        for (int fd = socket_of(); connect(fd, (struct sockaddr *)(void *)&name, length);)
            usleep(300);
        h_await_marks(0, 1);
        return;
    }
    CHECK_STATUS(open_as(&r, s, rank, world), FSDP_ERR_TIMEOUT);
    CHECK_MSG(longest_poll_ms <= 101, "it was ready to wait for %d ms", longest_poll_ms);
    says(r.ops->error_text(NULL), "has not come within 0.1 s");
    h_mark(0);
}
TEST(shm_faults, guest_that_says_nothing) { run(make_setup(2, 0, 100), silent); }

/* Rank 1 waits for rank 0, then with rank 0 for rank 2: one deadline covers both. Its clock
   advances by 100 ms per reading, but stops at 1.2 s until the rank has joined. */
static int count_maps(const char *what);
static int64_t virtual_ns;
static int64_t virtual_now(void *user) {
    (void)user;
    if (h_rank != 1) return 0;
    if (virtual_ns >= 1200000000) h_mark(0);
    if (virtual_ns < 1200000000 || count_maps("memfd:fsdp")) virtual_ns += 100000000;
    return virtual_ns;
}
static void two_waits(int rank, int world, void *arg) {
    rank_state r;
    if (rank == 2) return;
    if (rank == 0) h_await_marks(0, 1);
    CHECK_STATUS(open_as(&r, (setup *)arg, rank, world), FSDP_ERR_TIMEOUT);
    says(r.ops->error_text(NULL), "rank 2 has not come within 2.0 s");
    if (rank == 1) CHECK_MSG(virtual_ns < 3000000000, "after %lld ns", (long long)virtual_ns);
}
TEST(shm_faults, one_deadline_for_all_of_open) {
    setup *s = make_setup(3, 0, 2000);
    s->now = virtual_now;
    run(s, two_waits);
}

/* A sandbox without memfd_create, and a process that may not open more files. */
static void forbid_memfd(int error) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog filter = {4, code};
    CHECK_EQ_INT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) SKIP("seccomp is not permitted here");
}
static const struct {
    const char *name;
    int error;
} refusals[] = {{"ENOSYS", ENOSYS}, {"EPERM", EPERM}, {"EMFILE", EMFILE}};
TEST_P(shm_faults, no_memfd, refusals) {
    setup *s = make_setup(2, 0, 700);
    struct rlimit few;
    rank_state r;
    char text[80];
    CHECK_EQ_INT(getrlimit(RLIMIT_NOFILE, &few), 0);
    const rlim_t usual = few.rlim_cur;
    few.rlim_cur = 0;
    if (row->error == EMFILE) CHECK_EQ_INT(setrlimit(RLIMIT_NOFILE, &few), 0);
    else forbid_memfd(row->error);
    CHECK_STATUS(open_as(&r, s, 0, 2), FSDP_ERR_BACKEND);
    few.rlim_cur = usual;
    CHECK_EQ_INT(setrlimit(RLIMIT_NOFILE, &few), 0);
    snprintf(text, sizeof text,
             "[E620] rank 0 cannot make the common file by memfd_create (errno %d)", row->error);
    says(r.ops->error_text(NULL), text);
    CHECK(r.comm == NULL);
}

/* Threads: a rank leaves without close. The error of the others names it, and they can open a new
   world. */
static void *volatile left_behind; /* a leak that is meant: an optimizer must leave it reachable */
static void leaves_without_closing(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    rank_state r = begin(rank, s);
    (void)world;
    if (rank == 1) left_behind = r.comm, h_mark(0);
    else CHECK_STATUS(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.3", 0), FSDP_ERR_TIMEOUT);
    if (rank == 0) told(&r, "rank 1 has not come within 1.0 s");
    if (rank == 0) r.ops->close(r.comm), h_mark(1);
    h_await_marks(1, 1);
    r = begin(rank, s);
    CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.3", 0));
    r.ops->close(r.comm);
}
TEST(shm_faults, thread_that_leaves_without_closing) {
    run(make_setup(2, 1, 1000), leaves_without_closing);
}

/* A child was forked while a thread of the rank reported a failure: the child has the lock but not
   the thread. */
TEST(shm_faults, child_of_a_rank_that_fails) {
    fsdp_world_desc d = w_desc(0, 1, NULL, w_job("fails"), 0);
    fsdp_world *w;
    int how;
    CHECK_OK(fsdp_init(&d, &w));
    w->fail_lock = 1;
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) fsdp_abort(w, "not for a child to say"), _exit(7);
    CHECK_EQ_INT(waitpid(child, &how, 0), child);
    CHECK_EQ_INT(how, 7 << 8);
    w->fail_lock = 0;
    CHECK_OK(fsdp_shutdown(w));
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void no_memory(int rank, int world, void *arg) {
    rank_state r = begin(rank, (setup *)arg);
    void *p = &r;
    size_t sizes[3];
    (void)world;
    sizes[0] = SIZE_MAX / 2;
    sizes[1] = (size_t)1 << 44; /* fits the address space */
    sizes[2] = (size_t)sysconf(_SC_PHYS_PAGES) *
               (size_t)sysconf(_SC_PAGESIZE); /* all memory of the machine, for each rank */
    for (int i = 0; i < 3; i++) {
        char number[32];
        int64_t start = h_calm_ms();
        snprintf(number, sizeof number, "alloc of %zu bytes", sizes[i]);
        CHECK_STATUS(r.ops->alloc(r.comm, sizes[i], &p), FSDP_ERR_OUT_OF_MEMORY);
        CHECK(p == NULL && h_calm_ms() - start < 1000);
        told(&r, number);
        told(&r, "MiB left");
    }
    CHECK_OK(r.ops->alloc(r.comm, BLOCK, &p)); /* the world is still usable */
    fsdp_coll c = coll(&r, FSDP_OP_BROADCAST, "h.3", 0);
    c.src = c.dst = p;
    CHECK_OK(r.ops->run(r.comm, &c));
    r.ops->close(r.comm);
}
TEST(shm_faults, no_memory) {
    run(make_setup(2, 0, 5000), no_memory);
    run(make_setup(2, 1, 5000), no_memory);
}

static int count_maps(const char *what) {
    char line[512];
    int n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f)) n += strstr(line, what) != NULL;
    fclose(f);
    return n;
}

/* Each rank allocates and frees blocks of different sizes. The number of peers' blocks that a
   process maps must not grow, and new memory must never be mistaken for old. */
static void unlike_blocks(int rank, int world, void *arg) {
    rank_state r = begin(rank, (setup *)arg);
    int maps = 0;
    for (int round = 0; round < 300; round++) {
        size_t size = (size_t)BLOCK * (size_t)(1 + (rank + round) % world);
        int32_t *p, *extra;
        CHECK_OK(r.ops->alloc(r.comm, size, (void **)&p));
        CHECK_OK(r.ops->alloc(r.comm, size, (void **)&extra));
        fsdp_coll c = coll(&r, FSDP_OP_ALL_GATHER, "h.3", 0);
        c.dtype = FSDP_I32, c.src = round & 1 ? extra : p;
        for (int i = 0; i < COUNT; i++) (round & 1 ? extra : p)[i] = round * 10 + rank;
        CHECK_OK(r.ops->run(r.comm, &c));
        for (int k = 0; k < world; k++)
            CHECK_EQ_INT(((int32_t *)(void *)r.dst)[k * COUNT + COUNT - 1], round * 10 + k);
        r.ops->free(r.comm, p, size);
        r.ops->free(r.comm, extra, size);
        if (round == 20) maps = count_maps("memfd:fsdp");
    }
    if (maps) CHECK_EQ_INT(count_maps("memfd:fsdp"), maps);
    r.ops->close(r.comm);
    CHECK_EQ_INT(count_maps("memfd:fsdp"), 0);
}
TEST(shm_faults, mappings_of_unlike_memory_do_not_grow) {
    run(make_setup(3, 0, 20000), unlike_blocks);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED
#endif
#endif
#ifndef SANITIZED /* sanitizers need much address space */
static rlim_t address_space(void) {
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    CHECK(f != NULL && fscanf(f, "%llu", &pages) == 1);
    fclose(f);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

/* Rank 2 has no address space left for a block of rank 0's: all ranks get an error that names it.
   */
static void no_address_space(int rank, int world, void *arg) {
    enum { LARGE = 8 << 20 };
    rank_state r = begin(rank, (setup *)arg);
    void *p;
    struct rlimit old, less;
    int64_t start = h_calm_ms();
    CHECK_OK(r.ops->alloc(r.comm, rank == 0 ? LARGE : BLOCK, &p));
    CHECK_EQ_INT(getrlimit(RLIMIT_AS, &old), 0);
    less = old;
    less.rlim_cur = address_space() + LARGE / 4;
    if (rank == world - 1) CHECK_EQ_INT(setrlimit(RLIMIT_AS, &less), 0);
    fsdp_coll c = coll(&r, FSDP_OP_BROADCAST, "h.3", 0);
    c.src = c.dst = p;
    CHECK_STATUS(r.ops->run(r.comm, &c), FSDP_ERR_OUT_OF_MEMORY);
    if (rank == world - 1) CHECK_EQ_INT(setrlimit(RLIMIT_AS, &old), 0);
    told(&r, "rank 2: [E603] this process cannot map 8388608 bytes of rank 0: raise the limits of");
    CHECK(h_calm_ms() - start < 2000);
    r.ops->close(r.comm);
}
TEST(shm_faults, no_address_space_for_a_peers_memory) {
    run(make_setup(3, 0, 20000), no_address_space);
}
#endif

/* Every host allocation of rank 1 fails once: it gets an error and leaks nothing, and no rank
   hangs. */
static int64_t live_bytes;
static int fail_at;

static void *failing_alloc(size_t size, size_t align, void *user) {
    if (h_rank == 1 && fail_at-- == 0) return NULL;
    __atomic_fetch_add(&live_bytes, (int64_t)size, __ATOMIC_SEQ_CST);
    return fsdpi_libc_alloc(size, align, user);
}
static void counted_free(void *p, size_t size, void *user) {
    __atomic_fetch_sub(&live_bytes, (int64_t)size, __ATOMIC_SEQ_CST);
    fsdpi_libc_free(p, size, user);
}

static fsdp_status life(int rank, int world, setup *s) {
    int32_t all[2] = {0, 1};
    fsdp_group g = {0, rank, world, 0, all, "group"};
    fsdp_comm *group = NULL;
    rank_state r;
    void *p;
    fsdp_status status = open_as(&r, s, rank, world);
    if (status) return status;
    if (rank == 0) status = r.ops->alloc(r.comm, 100, &p); /* so that rank 1 must map */
    /* exceeds the initial capacity of the table of blocks */
    for (int i = 0; i < 36 && !status; i++) {
        status = r.ops->alloc(r.comm, BLOCK, &p);
        if (i == 0) r.src = r.dst = (char *)p;
    }
    if (!status) status = r.ops->split(r.comm, &g, &group);
    if (!status) status = one(&r, group, FSDP_OP_ALL_REDUCE, "h.3", 0);
    if (status) r.ops->abort(r.comm, status, "rank 1 has no memory"); /* as the core does */
    if (group) r.ops->close(group);
    r.ops->close(r.comm);
    return status;
}

static void failing_memory(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    int *injected = &s->pids[0];
    if (rank == 1) fail_at = *(int *)s->extra;
    fsdp_status status = life(rank, world, s);
    if (rank == 1) *injected = fail_at < 0;
    if (rank == 1) CHECK_STATUS(status, fail_at < 0 ? FSDP_ERR_OUT_OF_MEMORY : FSDP_OK);
    if (!s->threads) CHECK_EQ_INT(live_bytes, 0);
}
TEST(shm_faults, every_allocation_fails_once, SLOW) {
    for (int threads = 0, injected = 1, n = 0; threads < 2;
         threads += !injected, n = injected ? n + 1 : 0) {
        setup *s = make_setup(2, threads, 1000);
        s->allocator.alloc = failing_alloc;
        s->allocator.free = counted_free;
        s->extra = &n;
        run(s, failing_memory);
        CHECK_EQ_INT(live_bytes, 0);
        injected = s->pids[0];
        if (!injected) h_message("%s: %d allocations", threads ? "threads" : "processes", n);
        CHECK(n < 500);
    }
}

/* Threads: a peer that has not noticed a failure yet may still read memory that this rank frees. */
static void free_after_failure(int rank, int world, void *arg) {
    rank_state r = begin(rank, (setup *)arg);
    (void)world;
    CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.3", 0));
    if (rank == 1) r.ops->abort(r.comm, FSDP_ERR_ABORTED, "rank 1 is out of data");
    CHECK_STATUS(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.3", 0), FSDP_ERR_ABORTED);
    memset(r.src, 0x66, BLOCK);
    if (rank == 0) r.ops->free(r.comm, r.src, BLOCK);
    if (rank == 0) CHECK(r.src[0] == 0x66 && r.src[BLOCK - 1] == 0x66);
    r.ops->close(r.comm);
}
static void *poisoned_alloc(size_t size, size_t align, void *user) {
    __atomic_fetch_add(&live_bytes, (int64_t)size, __ATOMIC_SEQ_CST);
    return fsdpi_libc_alloc(size, align, user);
}
static void poisoned_free(void *p, size_t size, void *user) {
    memset(p, 0x5A, size);
    counted_free(p, size, user);
}
TEST(shm_faults, memory_freed_after_a_failure_stays_readable) {
    setup *s = make_setup(2, 1, 5000);
    s->allocator.alloc = poisoned_alloc;
    s->allocator.free = poisoned_free;
    run(s, free_after_failure);
    CHECK_EQ_INT(live_bytes, 0);
}

/* ---- nothing is left behind ------------------------------------------------------------------ */

static int count_shm(void) {
    DIR *dir = opendir("/dev/shm");
    int n = 0;
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}

static int socket_exists(const char *job) {
    char line[512], name[64];
    FILE *f = fopen("/proc/net/unix", "r");
    int found = 0;
    snprintf(name, sizeof name, "fsdp-shm-%lu-%016llx", (unsigned long)getuid(),
             (unsigned long long)fsdpi_hash_text(job));
    while (f && fgets(line, sizeof line, f)) found |= strstr(line, name) != NULL;
    if (f) fclose(f);
    return found;
}

TEST(shm_faults, nothing_is_left_after_kill_9) {
    setup *s = make_setup(3, 0, 5000);
    int shm = count_shm();
    for (int round = 0; round < 2; round++) { /* the second round uses the same id */
        pid_t pid[3];
        memset(s->pids, 0, sizeof s->pids);
        for (int k = 0; k < 3; k++) {
            pid[k] = fork();
            CHECK(pid[k] >= 0);
            if (pid[k]) continue;
            rank_state r = begin(k, s);
            CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.3", 0));
            __atomic_store_n(&s->pids[k], 1, __ATOMIC_SEQ_CST);
            (void)one(&r, r.comm, k ? FSDP_OP_ALL_GATHER : FSDP_OP_COPY, "h.3",
                      0); /* rank 0 does not take part */
            while (pause() < 0) {
            }
        }
        for (int k = 0; k < 3; k++)
            while (!__atomic_load_n(&s->pids[k], __ATOMIC_SEQ_CST)) usleep(1000);
        for (int k = 0; k < 3; k++) kill(pid[k], SIGKILL);
        for (int k = 0; k < 3; k++) CHECK_EQ_INT(waitpid(pid[k], NULL, 0), pid[k]);
        CHECK_EQ_INT(count_shm(), shm);
        CHECK(!socket_exists(s->job));
    }
}

/* ---- waits ----------------------------------------------------------------------------------- */

/* Four ranks on two cores. In a collective they wait for each other twice. Each time a rank hands
   its core to the next one instead of sleeping until it is woken: the number of sleeps is well
   below one per collective (if all slept: 1.5; at a load of 27: 0.6), and the total number of switches stays small. The
   same holds if one rank is always late, by less than it takes to wake a core. */
static const struct {
    const char *name;
    int late_us; /* delay of rank 3 */
} crowds[] = {{"all_at_once", 0}, {"one_late", 30}};

static void hand_over(int rank, int world, void *arg) {
    enum { TIMES = 2000 };
    rank_state r = begin(rank, (setup *)arg);
    int one_late = *(const int *)((setup *)arg)->extra, late_us = rank == 3 ? one_late : 0;
    struct rusage before, after;
    (void)world;
    CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.0", 0));
    CHECK_EQ_INT(getrusage(RUSAGE_SELF, &before), 0);
    for (int i = 0; i < TIMES; i++) {
        for (int64_t end = fsdpi_monotonic_ns(NULL) + late_us * 1000;
             late_us && fsdpi_monotonic_ns(NULL) < end;) {
        }
        CHECK_OK(one(&r, r.comm, FSDP_OP_ALL_GATHER, "h.0", 0));
    }
    CHECK_EQ_INT(getrusage(RUSAGE_SELF, &after), 0);
    long slept = after.ru_nvcsw - before.ru_nvcsw, all = slept + after.ru_nivcsw - before.ru_nivcsw;
    if (rank == 0) h_message("%d collectives: %ld sleeps, %ld switches", TIMES, slept, all);
    CHECK_MSG(slept < TIMES, "%ld sleeps in %d collectives", slept, TIMES);
    CHECK_MSG(all < (one_late ? 80 : 6) * TIMES, "%ld switches in %d collectives", all, TIMES);
    r.ops->close(r.comm);
}
TEST_P(shm_waits, more_ranks_than_cores, crowds) {
    cpu_set_t mine, two;
    setup *s = make_setup(4, 0, 20000);
    int late_us = row->late_us;
    s->extra = &late_us;
    CHECK_EQ_INT(sched_getaffinity(0, sizeof mine, &mine), 0);
    CPU_ZERO(&two);
    for (size_t i = 0; i < CPU_SETSIZE && CPU_COUNT(&two) < 2; i++)
        if (CPU_ISSET(i, &mine)) CPU_SET(i, &two);
    CHECK_EQ_INT(sched_setaffinity(0, sizeof two, &two), 0);
    run(s, hand_over);
}

/* A wait that polls sleeps for longer each time, up to a limit. */
TEST(shm_waits, naps_grow) {
    int64_t ns = 0, last = 0;
    int naps = 0;
    for (; ns < 2000; naps++, last = ns) {
        fsdpi_nap(&ns, 500, 2000);
        CHECK_MSG(naps ? ns > last && ns <= last + last / 8 : ns == 500, "%d: %d", naps, (int)ns);
        CHECK(ns <= 2000 && naps < 20);
    }
    fsdpi_nap(&ns, 500, 2000);
    CHECK_EQ_INT(ns, 2000);
}

/* ---- large copies ---------------------------------------------------------------------------- */

/* A copy of any length copies all bytes and writes no others: tests lengths around the one from
   which it bypasses the caches, and around whole groups of pages above that. */
TEST(shm_faults, copies_of_any_length) {
    static const size_t beyond[] = {0, 1, 15, 64, 4095, 16383, 16384, 16385, 3 * 16384 + 77};
    static const size_t shifts[] = {0, 4, 16, 48};
    const size_t least = FSDPI_SHM_STREAM - 1, most = FSDPI_SHM_STREAM + 4 * 16384, guard = 64;
    unsigned char *from = (unsigned char *)lab_zeros(most + 2 * guard, 1),
                  *to = (unsigned char *)lab_zeros(most + 4 * guard, 1),
                  *model = (unsigned char *)lab_zeros(most + 4 * guard, 1);
    for (size_t i = 0; i < most + 2 * guard; i++) from[i] = (unsigned char)(i % 251 + i / 65536);
    for (size_t n = 0; n < sizeof beyond / sizeof *beyond; n++)
        for (size_t s = 0; s < sizeof shifts / sizeof *shifts; s++) {
            size_t bytes = least + beyond[n], at = guard + shifts[s], read = shifts[s] / 4;
            memset(to, 0xEE, most + 4 * guard);
            memset(model, 0xEE, most + 4 * guard);
            memcpy(model + at, from + read, bytes);
            fsdpi_shm_copy((char *)to + at, (const char *)from + read, bytes);
            CHECK_EQ_MEM(to, model, most + 4 * guard);
        }
    fsdpi_shm_copy(NULL, NULL, 0);
    free(from), free(to), free(model);
}
