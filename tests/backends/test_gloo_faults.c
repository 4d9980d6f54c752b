/* test_gloo_faults.c - ranks of the Gloo backend that die, stall, differ, arrive late or never; cut
   and slow links; untrusted peers at the ports; and leaks. No call may block forever, and every
   rank must get a status that names the culprit. conformance.c has the contract of all backends.

   SPDX-License-Identifier: MIT */
#define TAGS NO(SHM) | GLOO
#include "harness.h"
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <sys/epoll.h>    /* epoll_ctl */
#include <sys/resource.h> /* setrlimit */
#include <sys/syscall.h>  /* SYS_epoll_ctl */
/* A quarter, so that arrays of BIG bytes are cut into messages as those of 64 MiB would be. */
#define FSDPI_GLOO_GATHER ((size_t)4 << 20)
#include "library.c"
#include "lab.h"
#include "netns.h"

#ifndef FSDP_BACKEND_GLOO
TEST(gloo_faults, all) { SKIP("the Gloo backend is not compiled in: libgloo-dev, make gloo"); }
#else
#include "faults.h"

enum { WIDTH = 40, BIG = 16 << 20 };

static job *make_job(int world, int timeout_ms, void (*body)(job *, int)) {
    return new_job("gloo", world, timeout_ms, body);
}

/* Jobs from here on: `near` ranks at a time share memory, the others use TCP. 0: all share memory.
   */
static void be_near(int near) {
    char text[16];
    snprintf(text, sizeof text, "%d", near);
    if (near) setenv("FSDP_GLOO_NEAR", text, 1);
    else unsetenv("FSDP_GLOO_NEAR");
}

TEST(gloo_faults, culprits_are_found_in_texts) {
    const char *text = "rank 1: all_gather: ranks 0, 12 have not come; rank 3: it is in "
                       "split. Rank 5 has to";
    static const int expected[] = {1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0};
    for (int k = 0; k < 14; k++) CHECK_EQ_INT(names(text, 1, k), expected[k]);
    CHECK(names(text, 2, 1)); /* text of another rank */
    CHECK(!names("rank 1: it has not come, frank 2, ranks", 1, 2));
}

/* ---- what ranks do --------------------------------------------------------------------------- */

typedef struct {
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
} trainer;
static fsdp_status make_trainer(const job *j, fsdp_world *world, int width, trainer *t) {
    return make_model(j, world, width, &t->model, t->unit);
}

static fsdp_status train_step(fsdp_world *world, trainer *t, int step) {
    double loss = fsdp_rank(world) + step;
    for (int u = 0; u < UNITS; u++) {
        TRY(fsdp_pre_forward(t->unit[u]));
        loss += (double)((float *)fsdp_data(t->unit[u], 0))[step % WIDTH];
        TRY(fsdp_post_forward(t->unit[u]));
    }
    for (int u = UNITS; u-- > 0;) {
        TRY(fsdp_pre_backward(t->unit[u]));
        const float *w = (const float *)fsdp_data(t->unit[u], 0);
        float *dw = (float *)fsdp_grad(t->unit[u], 0), *db = (float *)fsdp_grad(t->unit[u], 1);
        for (int i = 0; i < (WIDTH + u) * WIDTH; i++)
            dw[i] += w[i] * (float)(fsdp_rank(world) + 1) - (float)((i + step) % 11);
        for (int i = 0; i < WIDTH; i++) db[i] += w[i] / 3 + (float)step;
        TRY(fsdp_post_backward(t->unit[u]));
    }
    TRY(fsdp_finalize_backward(t->model));
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(t->model, &v))
        for (int64_t k = 0; k < v.numel; k++)
            ((float *)v.shard)[k] -= 0.03f * ((const float *)v.shard_grad)[k];
    TRY(fsdp_params_changed(t->model));
    TRY(fsdp_zero_grad(t->model));
    return fsdp_all_reduce(world, NULL, &loss, 1, FSDP_F64, FSDP_SUM);
}

static uint64_t bits_of(trainer *t) {
    fsdp_param_view v = FSDP_ZERO;
    uint64_t h = 1;
    while (fsdp_next_param(t->model, &v))
        for (int64_t k = 0; k < v.numel; k++) {
            uint32_t bits;
            memcpy(&bits, (const float *)v.shard + k, sizeof bits);
            h = fsdpi_hash(h, bits);
        }
    return h;
}

/* A training loop with j->rounds steps. */
static void train(job *j, int rank) {
    fsdp_world_desc d = desc_of(j, rank);
    fsdp_world *world;
    trainer t;
    at(j, rank, AT_INIT);
    fsdp_status status = fsdp_init(&d, &world);
    if (!status) {
        at(j, rank, AT_SPLIT);
        status = make_trainer(j, world, j->extra && rank == j->victim ? WIDTH + 1 : WIDTH, &t);
    }
    for (int step = 0; !status && step < j->rounds; step++) {
        at(j, rank, AT_STEP);
        if (j->quirk && is_victim(j, rank) && step == j->odd_step) {
            mark(j);
            j->quirk(j, world);
        }
        status = train_step(world, &t, step);
    }
    if (!status) j->rank[rank].bits = bits_of(&t);
    leave(j, rank, world, status);
}

TEST(gloo_faults, watchdog_sees_a_hang) { watchdog(); }

/* ---- the table itself ------------------------------------------------------------------------ */

typedef struct {
    fsdp_comm *world, *group;
    char *src, *dst;
    size_t bytes;
    fsdp_boot boot;
    uint64_t seq;
} table;

static const fsdp_comm_ops *ops(void) { return fsdp_gloo_comm_ops(); }

static fsdp_status open_table(job *j, int rank, table *t) {
    fsdp_caps caps;
    memset(t, 0, sizeof *t);
    t->boot = boot_of(j, rank);
    t->bytes = j->bytes ? j->bytes : 65536;
    fsdp_status status = ops()->open(&t->boot, &caps, &t->world);
    if (!status) status = ops()->alloc(t->world, t->bytes, (void **)&t->src);
    if (!status) status = ops()->alloc(t->world, t->bytes, (void **)&t->dst);
    return status;
}

static void close_table(table *t) {
    if (t->group) ops()->close(t->group);
    if (t->world) ops()->close(t->world);
}

/* Makes a group of all ranks in reverse order. */
static fsdp_status split_table(table *t) {
    int32_t ranks[RANKS];
    int n = t->boot.size;
    fsdp_group g = {0, n - 1 - t->boot.rank, n, 0, ranks, "backwards"};
    for (int k = 0; k < n; k++) ranks[k] = n - 1 - k;
    return ops()->split(t->world, &g, &t->group);
}

/* Returns an operation on which all ranks agree, as large as the buffers. */
static fsdp_coll coll_of(table *t, int kind, fsdp_seg *seg) {
    uint64_t all = t->bytes / sizeof(float), part = all / (uint64_t)t->boot.size;
    fsdp_coll c;
    memset(&c, 0, sizeof c);
    memset(seg, 0, sizeof *seg);
    c.kind = (uint8_t)kind, c.dtype = c.out_dtype = FSDP_F32, c.scale = 1;
    c.what = "h.3", c.seq = ++t->seq, c.src = t->src, c.dst = t->dst, c.count = all;
    if (kind == FSDP_OP_ALL_REDUCE) c.src = t->dst;
    if (kind == FSDP_OP_ALL_GATHER || kind == FSDP_OP_REDUCE_SCATTER)
        seg->count = (int64_t)part, c.count = part, c.segs = seg, c.num_segs = 1;
    return c;
}

static fsdp_status run_one(table *t, fsdp_comm *comm, int kind, uint64_t count) {
    fsdp_seg seg;
    fsdp_coll c = coll_of(t, kind, &seg);
    if (count) c.count = count;
    return ops()->run(comm, &c);
}

/* Runs operations of all kinds, alternately on the world and on a group that is sometimes made
   again. */
static void loop(job *j, int rank) {
    static const int kinds[] = {FSDP_OP_ALL_GATHER, FSDP_OP_REDUCE_SCATTER, FSDP_OP_ALL_REDUCE,
                                FSDP_OP_BROADCAST, FSDP_OP_ALL_REDUCE};
    table t;
    at(j, rank, AT_INIT);
    fsdp_status status = open_table(j, rank, &t);
    fsdp_comm *comm = t.world;
    for (int i = 0; !status && i < j->rounds; i++) {
        if (i % 8 == 0) {
            if (t.group) ops()->close(t.group);
            t.group = NULL;
            at(j, rank, AT_SPLIT);
            comm = t.world;
            status = split_table(&t);
        }
        for (int k = 0; !status && k < 5; k++) {
            at(j, rank, AT_GATHER + k);
            comm = k & 1 ? t.world : t.group;
            status = run_one(&t, comm, kinds[k], k == 4 ? 1 : 0);
        }
    }
    tell(j, rank, status, status ? ops()->error_text(comm) : "");
    at(j, rank, AT_CLOSE);
    j->rank[rank].again = status && t.world ? (int)run_one(&t, t.world, FSDP_OP_BROADCAST, 1)
                                            : (int)status;
    close_table(&t);
}

/* ---- kill -9 at seeded points ---------------------------------------------------------------- */

typedef struct {
    const char *name;
    void (*body)(job *, int);
    int place, delay_us; /* the kill comes up to delay_us after the victim's arrival */
    size_t bytes;
} point;
static const point points[] = {
    {"comm/init", loop, AT_INIT, 40000, 0},
    {"comm/split", loop, AT_SPLIT, 20000, 0},
    {"comm/gather", loop, AT_GATHER, 500, 0},
    {"comm/scatter", loop, AT_SCATTER, 500, 0},
    {"comm/reduce", loop, AT_REDUCE, 500, 0},
    {"comm/broadcast", loop, AT_BROADCAST, 500, 0},
    {"comm/barrier", loop, AT_BARRIER, 300, 0},
    {"comm/close", loop, AT_CLOSE, 10000, 0},
    {"16MiB/gather", loop, AT_GATHER, 10000, BIG},
    {"16MiB/scatter", loop, AT_SCATTER, 15000, BIG},
    {"16MiB/reduce", loop, AT_REDUCE, 20000, BIG},
    {"16MiB/broadcast", loop, AT_BROADCAST, 10000, BIG},
    {"train/init", train, AT_INIT, 40000, 0},
    {"train/split", train, AT_SPLIT, 40000, 0},
    {"train/step", train, AT_STEP, 5000, 0},
    {"train/steps", train, AT_STEP, 50000, 0},
    {"train/close", train, AT_CLOSE, 20000, 0},
};
enum { POINTS = (int)(sizeof points / sizeof points[0]) };

/* A death after a survivor's last operation may go unnoticed. */
static void check_survivor(const job *j, int k, tally *sum) {
    const report *r = &j->rank[k];
    if (sum->place == AT_CLOSE && !r->status) return;
    int64_t limit_ms = check_result(j, k, sum);
    if (shutdown_ms(j, k) > limit_ms) wrong(j, sum, "shutdown takes too long");
    if (!in_order(r)) wrong(j, sum, "a survivor did not end in order");
}

static void one_kill(int i, tally *sum) {
    const point *p = &points[i % POINTS];
    uint64_t random = sum->seed;
    int world = 2 + (int)(h_rand64(&random) % 3);
    job *j = make_job(world, p->place == AT_INIT ? 1500 : 20000, p->body);
    be_near((int)(h_rand64(&random) % 3));
    sum->name = p->name, sum->place = p->place;
    j->bytes = p->bytes;
    j->victim = (int)(h_rand64(&random) % (uint64_t)world);
    j->lanes = (int)(h_rand64(&random) % 3);
    int nth = 1 + (int)(h_rand64(&random) % (p->place == AT_SPLIT ? 2 : p->bytes ? 3 : 20));
    if (p->place == AT_INIT || p->place == AT_CLOSE || p->body == train) nth = 1;
    if (p->place == AT_CLOSE) j->rounds = 3;
    int ended = strike(j, nth, (useconds_t)(h_rand64(&random) % (uint64_t)p->delay_us), sum);
    for (int k = 0; k < world && ended; k++)
        if (k != j->victim) check_survivor(j, k, sum);
    munmap(j, sizeof *j);
}
TEST(gloo_faults, kill_9_at_seeded_points, SECONDS(120)) { kills(POINTS + 7, one_kill); }
TEST(long_gloo_faults, kill_9_at_seeded_points, SECONDS(1200) | AT_NIGHT(GLOO)) {
    kills(5 * POINTS, one_kill);
}

/* ---- a rank that stalls ---------------------------------------------------------------------- */

typedef struct {
    const char *name;
    void (*body)(job *, int);
    int world, victim, lanes, place, delay_us, timeout_ms;
    size_t bytes;
    int near;
} stop;
static const stop stops[] = {
    {"comm/W=2/rank_0", loop, 2, 0, 0, AT_REDUCE, 100, 600, 0, 0},
    {"comm/W=3/rank_2", loop, 3, 2, 0, AT_GATHER, 50, 600, 0, 1},
    {"comm/W=3/rank_1", loop, 3, 1, 0, AT_GATHER, 50, 600, 0, 2},
    {"comm/W=4/rank_1", loop, 4, 1, 0, AT_BROADCAST, 0, 600, 0, 1},
    {"16MiB/W=2/rank_1", loop, 2, 1, 0, AT_GATHER, 4000, 1500, BIG, 1},
    {"16MiB/W=3/rank_0", loop, 3, 0, 0, AT_SCATTER, 6000, 1500, BIG, 2},
    {"train/W=3/rank_0", train, 3, 0, 0, AT_STEP, 300, 600, 0, 0},
    {"train/W=4/rank_3", train, 4, 3, 2, AT_STEP, 300, 600, 0, 2},
    {"train/W=4/rank_2", train, 4, 2, 2, AT_STEP, 300, 600, 0, 1},
};

/* Checks that all ranks but `except` got TIMEOUT within the deadline plus extra_ms, and that they
   name the victim; is_alone: only the victim, unless no store says who waits for whom. If the
   machine does not run the processes in time, a text may name its neighbours. */
static void all_timed_out(job *j, int except, int extra_ms, int is_alone) {
    int64_t busy_ms = allowed_ms(j, 0);
    for (int k = 0; k < j->world; k++) {
        const report *r = &j->rank[k];
        char alone[64];
        snprintf(alone, sizeof alone, "[E403] rank %d has not", j->victim);
        int is_silent = strstr(r->text, "the store does not answer") != NULL; /* the victim's */
        int named = k == j->victim || (is_alone && !is_silent ? strstr(r->text, alone) != NULL
                                                              : names(r->text, k, j->victim));
        if (k == except) continue;
        J_CHECK(j, r->status == FSDP_ERR_TIMEOUT, "rank %d did not get TIMEOUT", k);
        if (!named && busy_ms > 100) h_message("for %d ms busy: %s", (int)busy_ms, r->text);
        else J_CHECK(j, named, "rank %d does not name rank %d", k, j->victim);
        J_CHECK(j, took_ms(j, k) <= j->timeout_ms + allowed_ms(j, extra_ms), "rank %d: after %d ms",
                k, took_ms(j, k));
        if (k == (j->victim + 1) % j->world)
            h_message("noticed after %d ms, the deadline is %d ms", took_ms(j, k), j->timeout_ms);
    }
}

/* Starts the job, and waits until the victim runs. A world with so short a deadline may not open on
   a busy machine: then it starts again. */
static job *start_stop(const stop *row) {
    for (int turn = 0;; turn++) {
        job *j = make_job(row->world, row->timeout_ms, row->body);
        j->victim = row->victim, j->lanes = row->lanes, j->bytes = row->bytes;
        start(j);
        if (await(j, j->victim, row->place, row->bytes ? 2 : 12)) return j;
        J_CHECK(j, turn < 3 && allowed_ms(j, 0) > 0, "it does not run");
        J_CHECK(j, !finish(j, 5000), "a rank hangs");
        for (int k = 0; k < j->world; k++)
            J_CHECK(j, strstr(j->rank[k].text, "has not connected within"), "it does not open");
        munmap(j, sizeof *j);
    }
}

TEST_P(gloo_faults, stopped_rank_is_a_timeout, stops) {
    be_near(row->near);
    job *j = start_stop(row);
    usleep((useconds_t)row->delay_us);
    mark(j);
    kill(j->pid[j->victim], SIGSTOP);
    J_CHECK(j, await_results(j, j->victim, 5000), "a rank hangs");
    /* A rank that shares memory with it cannot tell a stopped rank from one that waits elsewhere.
       */
    all_timed_out(j, j->victim, row->bytes ? 1000 : row->near == 1 ? 200 : 300, 1);
    kill(j->pid[j->victim], SIGCONT);
    J_CHECK(j, !finish(j, 5000), "a rank hangs after the victim goes on");
    all_got(j, -1, FSDP_ERR_TIMEOUT, NULL);
}

/* ---- links ----------------------------------------------------------------------------------- */

static void moves_in(job *j, int rank) {
    (void)j;
    n_enter(n_host[rank]);
}
static job *make_hosts(int world, int timeout_ms, void (*body)(job *, int)) {
    job *j = make_job(world, timeout_ms, body);
    j->begin = moves_in;
    snprintf(j->store, sizeof j->store, "tcp://10.77.0.2:29500");
    return j;
}

/* Returns a job with the bits of a training of `rounds` steps without faults. */
static job *undisturbed(int world, int rounds) {
    job *j = make_job(world, 20000, train);
    j->rounds = rounds;
    start(j);
    J_CHECK(j, !finish(j, 30000), "an undisturbed job hangs");
    all_got(j, -1, FSDP_OK, NULL);
    return j;
}

static void same_bits(const job *j, const job *k) {
    for (int r = 0; r < j->world; r++)
        J_CHECK(j, j->rank[r].bits == k->rank[r].bits && j->rank[r].bits, "rank %d: other bits", r);
}

typedef struct {
    const char *name;
    int world, victim, near;
} cut;
static const cut cuts[] = {{"W=2/router/rank_1", 2, 1, 0},
                           {"W=2/own/rank_1", 2, 1, 1},
                           {"W=2/router/rank_0", 2, 0, 0},
                           {"W=3/router/rank_2", 3, 2, 0},
                           {"W=3/own/rank_0", 3, 0, 1}};

TEST_P(gloo_faults, cut_link_is_a_timeout_on_both_sides, cuts) {
    const char *why = n_hosts(row->world);
    if (why) SKIP(why);
    job *j = make_hosts(row->world, 1000, train);
    j->victim = row->victim;
    start(j);
    for (int k = 0; k < j->world; k++) J_CHECK(j, await(j, k, AT_STEP, 5), "it does not run");
    mark(j);
    if (row->near) n_enter(n_host[row->victim]);
    if (row->near) CHECK_EQ_INT(n_run("ip link set eth0 down"), 0);
    else CHECK_EQ_INT(n_run("ip link set v%d down", row->victim), 0);
    if (row->near) n_enter(n_router);
    J_CHECK(j, !finish(j, 5000), "a rank hangs");
    all_timed_out(j, -1, 500, 0);
    int names_other = 0;
    for (int k = 0; k < j->world; k++)
        names_other |= k != j->victim && names(j->rank[j->victim].text, j->victim, k);
    J_CHECK(j, names_other, "the rank that is cut off names nobody");
}

typedef struct {
    const char *name;
    void (*body)(job *, int);
    int world, victim, place;
    size_t bytes;
} death;
static const death deaths[] = {{"W=2/train", train, 2, 1, AT_STEP, 0},
                               {"W=3/rank_0", train, 3, 0, AT_STEP, 0},
                               {"W=2/16MiB", loop, 2, 1, AT_GATHER, BIG}};

TEST_P(gloo_faults, kill_9_on_another_host, deaths) {
    const char *why = n_hosts(row->world);
    if (why) SKIP(why);
    job *j = make_hosts(row->world, 20000, row->body);
    j->victim = row->victim, j->bytes = row->bytes;
    start(j);
    J_CHECK(j, await(j, j->victim, row->place, 2), "it does not run");
    usleep(20000);
    mark(j);
    kill(j->pid[j->victim], SIGKILL);
    J_CHECK(j, !finish(j, 5000), "a rank hangs");
    all_got(j, j->victim, FSDP_ERR_PEER_LOST, NULL);
    all_name(j, j->victim, j->victim);
    all_know(j, j->victim, 1000);
}

typedef struct {
    const char *name, *netem; /* netem NULL: a simulated wire */
    int world, delay_us, jitter_us, loss, lanes;
} bad;
static const bad bads[] = {{"wire/20ms", NULL, 2, 20000, 5000, 0, 0},
                           {"wire/1%_lost", NULL, 2, 1000, 1000, 100, 0},
                           {"wire/W=3/lanes", NULL, 3, 5000, 2000, 50, 2},
                           {"netem/20ms", "delay 20ms 5ms", 2, 0, 0, 0, 0},
                           {"netem/1%_lost", "delay 1ms loss 1%", 3, 0, 0, 0, 0}};
enum { STEPS = 8 };

TEST_P(gloo_faults, bad_link_does_not_change_bits, bads) {
    n_wire *w = (n_wire *)shared(sizeof *w);
    w->delay_us = row->delay_us, w->jitter_us = row->jitter_us, w->loss = row->loss;
    const char *why = row->netem ? n_hosts(row->world) : n_wires(row->world, w);
    if (why) SKIP(why);
    for (int h = 0; row->netem && h < row->world; h++)
        if (n_run("tc qdisc add dev v%d root netem %s 2>/dev/null", h, row->netem))
            SKIP("no tc, or a kernel without sch_netem");
    job *j = make_hosts(row->world, 30000, train), *calm = undisturbed(row->world, STEPS);
    j->rounds = STEPS, j->lanes = row->lanes;
    int64_t begin = now_ns();
    start(j);
    J_CHECK(j, !finish(j, 40000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
    same_bits(j, calm);
    h_message("%d steps in %.2f s; %d packets, %d lost", STEPS, (double)(now_ns() - begin) * 1e-9,
              (int)w->carried, (int)w->lost);
    if (!row->netem) CHECK(w->carried > 100 && (!row->loss || w->lost > 0));
    if (!row->netem) n_wire_end(w);
}

/* Returns the number of bytes that a device of a host has sent. */
static uint64_t sent_by(int host, const char *device) {
    unsigned long long bytes = 0;
    char line[512];
    n_enter(n_host[host]);
    FILE *f = fopen("/proc/thread-self/net/dev", "r");
    while (f && fgets(line, sizeof line, f)) {
        const char *at = strstr(line, device);
        if (at) sscanf(at, "%*[^:]: %*u %*u %*u %*u %*u %*u %*u %*u %llu", &bytes);
    }
    if (f) fclose(f);
    n_enter(n_router);
    return bytes;
}

/* Two hosts with two ranks each. The bytes on the network are those of backends/fsdp_gloo.h. A
   gather or scatter of S bytes, of which half are on the other host, costs each rank S / 4 for each
   of the two ranks there, so 2 S in all; an all_reduce costs twice that. A broadcast costs 1.5 S: each of
   the two ranks without the data receives three quarters, and reads the rest from its neighbour.
   Within a host nothing is sent. */
static void two_to_a_host(job *j, int rank) {
    (void)j;
    n_enter(n_host[rank / 2]);
}
TEST(gloo_faults, bytes_between_two_hosts) {
    enum { S = 1 << 20, ROUNDS = 4 };
    const char *why = n_hosts(2);
    if (why) SKIP(why);
    for (int near = 0; near < 2; near++) {
        uint64_t data = (uint64_t)S * ROUNDS * 19 / 2, wire = 0, within = 0;
        be_near(near);
        job *j = make_hosts(4, 20000, loop);
        j->begin = two_to_a_host, j->bytes = S, j->rounds = ROUNDS;
        for (int h = 0; h < 2; h++) wire -= sent_by(h, "eth0"), within -= sent_by(h, "lo");
        start(j);
        J_CHECK(j, !finish(j, 30000), "a rank hangs");
        all_got(j, -1, FSDP_OK, NULL);
        for (int h = 0; h < 2; h++) wire += sent_by(h, "eth0"), within += sent_by(h, "lo");
        h_message("%d of a host share memory: %.3f of the data on the wire, %.3f within hosts",
                  near ? near : 2, (double)wire / (double)data, (double)within / (double)data);
        if (near) CHECK(within > data / 4); /* the counter works */
        else CHECK(wire >= data && wire < data / 8 * 9 && within < S);
    }
}

/* Packets are lost in one direction only: from this rank or to it. */
static const struct {
    const char *name;
    int direction;
} ways[] = {{"from_it", 1}, {"to_it", 2}};

TEST_P(gloo_faults, link_cut_in_one_direction, ways) {
    n_wire *w = (n_wire *)shared(sizeof *w);
    const char *why = n_wires(3, w);
    if (why) SKIP(why);
    job *j = make_hosts(3, 1000, train);
    j->victim = 2;
    start(j);
    for (int k = 0; k < j->world; k++) J_CHECK(j, await(j, k, AT_STEP, 3), "it does not run");
    mark(j);
    __atomic_store_n(&w->cut[2], row->direction, __ATOMIC_SEQ_CST);
    J_CHECK(j, !finish(j, 5000), "a rank hangs");
    /* Where packets still arrive, a rank may first see that a connection has ended: a peer that the
       victim closed its end, or the victim that peers closed theirs. */
    for (int k = 0; k < 3; k++) {
        const report *r = &j->rank[k];
        J_CHECK(j,
                r->status == FSDP_ERR_TIMEOUT ||
                    ((row->direction == 2) == (k != 2) && r->status == FSDP_ERR_PEER_LOST),
                "rank %d got %s", k, fsdp_status_name((fsdp_status)r->status));
        J_CHECK(j, k == 2 ? names(r->text, 2, 0) || names(r->text, 2, 1) : names(r->text, k, 2),
                "rank %d names nobody", k);
        J_CHECK(j, took_ms(j, k) <= j->timeout_ms + allowed_ms(j, 1500), "rank %d: after %d ms", k,
                took_ms(j, k));
    }
    n_wire_end(w);
}

/* ---- who comes, and when --------------------------------------------------------------------- */

static const struct {
    const char *name;
    int world, who;
    const char *store;
} comings[] = {{"host/rank_0", 3, 0, NULL},
               {"host/rank_2", 3, 2, NULL},
               {"tcp/rank_0", 3, 0, "tcp"},
               {"tcp/rank_1", 2, 1, "tcp"}};

static job *make_coming(int world, int timeout_ms, const char *store) {
    job *j = make_job(world, timeout_ms, train);
    int port = h_free_port();
    CHECK(port > 0);
    if (store) snprintf(j->store, sizeof j->store, "tcp://127.0.0.1:%d", port);
    j->rounds = STEPS;
    return j;
}

TEST_P(gloo_faults, late_rank_is_waited_for, comings) {
    job *j = make_coming(row->world, 20000, row->store), *calm = undisturbed(row->world, STEPS);
    j->late_ms[row->who] = 700;
    start(j);
    J_CHECK(j, !finish(j, 20000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
    same_bits(j, calm);
}

TEST_P(gloo_faults, rank_that_never_comes_is_named, comings) {
    job *j = make_coming(row->world, 500, row->store);
    j->victim = row->who;
    j->late_ms[row->who] = -1;
    mark(j);
    start(j);
    J_CHECK(j, !finish(j, 5000), "a rank hangs");
    all_timed_out(j, row->who, 200, 0);
}

/* When the rank arrives, the others have given up. It gets an error, or finds no peer, by its own
   deadline. */
TEST_P(gloo_faults, rank_that_comes_too_late, comings) {
    job *j = make_coming(row->world, 500, row->store);
    j->victim = row->who;
    j->late_ms[row->who] = j->timeout_ms + 200;
    mark(j);
    start(j);
    J_CHECK(j, !finish(j, 6000), "a rank hangs");
    all_timed_out(j, row->who, 200, 0);
    const report *r = &j->rank[row->who];
    J_CHECK(j, r->status == FSDP_ERR_TIMEOUT || r->status == FSDP_ERR_PEER_LOST,
            "the late rank got %s", fsdp_status_name((fsdp_status)r->status));
    J_CHECK(j, took_ms(j, row->who) <= 2 * j->timeout_ms + allowed_ms(j, 400), "too late");
}

/* A rank that reaches the store late, and stops there. */
static void stays_at_the_store(job *j, int rank) {
    fsdpi_store_desc desc;
    fsdpi_store *store;
    char text[FSDPI_REASON];
    table t;
    if (rank != j->victim) {
        tell(j, rank, open_table(j, rank, &t), ops()->error_text(NULL));
        close_table(&t);
        return;
    }
    memset(&desc, 0, sizeof desc);
    desc.boot = boot_of(j, rank);
    usleep((useconds_t)j->timeout_ms * 600);
    CHECK(!fsdpi_store_open(&desc, &store, text, sizeof text));
    while (__atomic_load_n(&j->rank[0].place, __ATOMIC_SEQ_CST) != AT_END) usleep(10000);
    fsdpi_store_close(store);
}
TEST(gloo_faults, set_up_has_one_deadline) {
    job *j = make_job(2, 2000, stays_at_the_store);
    j->victim = 1;
    mark(j);
    start(j);
    J_CHECK(j, !finish(j, 8000), "a rank hangs");
    all_timed_out(j, j->victim, 200, 0);
}

static void pauses(job *j, fsdp_world *world) {
    (void)j, (void)world;
    usleep(400000);
}
TEST(gloo_faults, rank_that_computes_long_is_in_time) {
    job *j = make_job(3, 20000, train), *calm = undisturbed(3, STEPS);
    j->timeout_ms = (int)allowed_ms(j, 1000);
    j->rounds = STEPS, j->victim = 1, j->quirk = pauses;
    start(j);
    J_CHECK(j, !finish(j, 20000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
    same_bits(j, calm);
}

static const struct {
    const char *name, *store;
    int odd;
} tokens[] = {{"host/rank_1", NULL, 1}, {"tcp/rank_0", "tcp", 0}, {"tcp/rank_2", "tcp", 2}};

TEST_P(gloo_faults, wrong_token, tokens) {
    job *j = make_coming(3, 1000, row->store);
    j->victim = row->odd;
    for (int k = 0; k < 3; k++)
        snprintf(j->token[k], sizeof j->token[k], k == row->odd ? "yesterday" : "today");
    mark(j);
    start(j);
    J_CHECK(j, !finish(j, 6000), "a rank hangs");
    for (int k = 0; k < 3; k++) {
        const report *r = &j->rank[k];
        J_CHECK(j, r->status && WIFEXITED(r->how) && r->text[0], "rank %d has joined", k);
        J_CHECK(j, k == row->odd || names(r->text, k, row->odd), "rank %d does not name it", k);
        J_CHECK(j, took_ms(j, k) <= j->timeout_ms + allowed_ms(j, 300), "rank %d: late", k);
    }
    J_CHECK(j, strstr(j->rank[row->odd].text, "FSDP_TOKEN"), "the odd rank names no variable");
}

TEST(gloo_faults, two_jobs_on_one_port) {
    job *calm = undisturbed(2, STEPS), *a = make_coming(2, 20000, "tcp");
    for (int round = 0; round < 4; round++) {
        job *b = make_coming(2, 20000, NULL), *c = make_coming(2, 20000, NULL);
        snprintf(b->store, sizeof b->store, "%s", a->store);
        snprintf(c->store, sizeof c->store, "%s", a->store);
        b->late_ms[round & 1] = 30 * (round & 2); /* varies who gets the port first */
        start(b);
        start(c);
        J_CHECK(b, !finish(b, 20000), "a rank of the first job hangs");
        J_CHECK(c, !finish(c, 20000), "a rank of the second job hangs");
        all_got(b, -1, FSDP_OK, NULL);
        all_got(c, -1, FSDP_OK, NULL);
        same_bits(b, calm);
        same_bits(c, calm);
    }
}

/* ---- untrusted peers at the ports ------------------------------------------------------------ */

enum { KEPT = 200 }; /* connections that an untrusted peer keeps open, silently */

/* Sends nonsense to a port in one of several ways. */
static void pester(const struct sockaddr_in *to, uint64_t *random, int kept[KEPT]) {
    static const char http[] = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    char noise[4096];
    uint64_t way = h_rand64(random) % 8;
    struct linger reset = {1, 0};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) return;
    for (size_t i = 0; i < sizeof noise; i++) noise[i] = (char)h_rand64(random);
    /* the magic number of the store */
    if (way == 3) memcpy(noise, "\x46\x4b\x56\x31\x02\0\0\0", 8);
    int connected = !connect(fd, (const struct sockaddr *)to, sizeof *to) || errno == EINPROGRESS;
    if (connected && way != 4) usleep((useconds_t)(h_rand64(random) % 500));
    size_t size = way == 0 ? 0 : way == 1 ? sizeof http - 1 : h_rand64(random) % sizeof noise;
    if (way == 6) size %= 52; /* shorter than a member's first message */
    if (way == 7) size = 0;
    if (connected && size) (void)!send(fd, way == 1 ? http : noise, size, MSG_NOSIGNAL);
    if (way == 4) setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    if (way >= 5) {
        int *oldest = &kept[h_rand64(random) % KEPT], other = *oldest;
        *oldest = fd, fd = other;
    }
    if (fd > 0) close(fd);
}

/* Finds the addresses with listeners in this namespace: the store, and ranks that connect.
   Listeners at 127.127.127.127 accept no callers. The kernel's socket diagnosis walks only the
   listeners, where /proc/net/tcp walks a table of all connections that are possible. */
static int listening(struct sockaddr_in at[], int max) {
    struct {
        struct nlmsghdr head;
        struct inet_diag_req_v2 wanted;
    } ask = {{sizeof ask, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST | NLM_F_DUMP, 0, 0},
             {AF_INET, IPPROTO_TCP, 0, 0, 1 << TCP_LISTEN, {0, 0, {0}, {0}, 0, {0}}}};
    uint64_t text[1024]; /* aligned as its structs */
    int n = 0, fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG), last = 0;
    if (send(fd, &ask, sizeof ask, 0) != (ssize_t)sizeof ask) last = 1;
    while (!last) {
        ssize_t got = recv(fd, text, sizeof text, 0);
        struct nlmsghdr *head = (struct nlmsghdr *)text;
        last = got <= 0;
        for (; !last && NLMSG_OK(head, got); head = NLMSG_NEXT(head, got)) {
            const struct inet_diag_msg *said = (const struct inet_diag_msg *)NLMSG_DATA(head);
            last = head->nlmsg_type != SOCK_DIAG_BY_FAMILY;
            if (last || n == max) continue;
            memset(&at[n], 0, sizeof *at);
            at[n].sin_family = AF_INET;
            at[n].sin_addr.s_addr = said->id.idiag_src[0];
            at[n++].sin_port = said->id.idiag_sport;
        }
    }
    if (fd >= 0) close(fd);
    return n;
}

enum { STORE_PORT = 29500 };

/* Runs in the namespace of the job, which has no other listeners, until it is killed. */
static void scan(uint64_t seed, int but_port, int *touched) {
    struct sockaddr_in at[64];
    int kept[KEPT] = {0};
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        int n = listening(at, 64), count = 0;
        for (int k = 0; k < n; k++) {
            if (ntohs(at[k].sin_port) == but_port) continue;
            pester(&at[k], &seed, kept);
            count++;
        }
        __atomic_fetch_add(touched, count, __ATOMIC_SEQ_CST);
        if (!count) usleep(200);
    }
}

static pid_t start_scan(uint64_t seed, int but_port, int *touched) {
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) scan(seed, but_port, touched);
    return pid;
}

static void end_scan(pid_t pid) {
    kill(pid, SIGKILL);
    CHECK_EQ_INT(waitpid(pid, NULL, 0), pid);
}

static job *make_lone(int world, void (*body)(job *, int)) {
    job *j = make_job(world, 20000, body);
    snprintf(j->store, sizeof j->store, "tcp://127.0.0.1:%d", STORE_PORT);
    return j;
}

static const struct {
    const char *name;
    int from_the_start; /* also while ranks connect */
} scans[] = {{"training", 0}, {"meeting", 1}};

TEST_P(gloo_faults, port_scanner, scans) {
    const char *why = n_begin(0); /* a new namespace: no other job's ports are touched */
    if (why) SKIP(why);
    be_near(1);
    enum { MANY = 150 };
    job *calm = undisturbed(3, MANY), *j = make_lone(3, train);
    int *touched = (int *)shared(sizeof *touched);
    struct sockaddr_in at[8];
    j->rounds = MANY;
    if (!row->from_the_start) start(j);
    for (int k = 0; k < 3 && !row->from_the_start; k++)
        J_CHECK(j, await(j, k, AT_STEP, 1), "it does not run");
    int count = row->from_the_start ? 0 : listening(at, 8), heard = 0;
    for (int k = 0; k < count; k++) heard += at[k].sin_addr.s_addr != htonl(0x7F7F7F7F);
    CHECK(row->from_the_start || heard == 1); /* only the store listens */
    pid_t scanner = start_scan(h_seed(), 0, touched);
    if (row->from_the_start) start(j);
    J_CHECK(j, !finish(j, 30000), "a rank hangs");
    end_scan(scanner);
    h_message("%d connections by the scanner", *touched);
    CHECK(*touched > 0);
    all_got(j, -1, FSDP_OK, NULL);
    same_bits(j, calm);
}

/* Jobs make groups again and again while untrusted peers call all their listeners. */
static void floods(int jobs) {
    const char *why = n_begin(0);
    if (why) SKIP(why);
    be_near(1);
    int *touched = (int *)shared(sizeof *touched);
    pid_t scanner[3];
    int64_t begin = now_ns();
    for (int k = 0; k < 3; k++)
        scanner[k] = start_scan(h_seed() + (uint64_t)k, STORE_PORT, touched);
    for (int i = 0; i < jobs; i++) {
        job *j = make_lone(3, loop);
        j->rounds = 17; /* 3 groups */
        start(j);
        J_CHECK(j, !finish(j, 30000), "job %d: a rank hangs", i);
        all_got(j, -1, FSDP_OK, NULL);
        munmap(j, sizeof *j);
    }
    for (int k = 0; k < 3; k++) end_scan(scanner[k]);
    h_message("%d jobs in %.1f s, %d connections by untrusted peers to their data ports", jobs,
              (double)(now_ns() - begin) * 1e-9, *touched);
    CHECK(*touched > jobs);
}
TEST(gloo_faults, untrusted_peers_at_data_ports, SECONDS(120)) { floods(W_SLOW ? 4 : 12); }
TEST(long_gloo_faults, untrusted_peers_at_data_ports, SECONDS(1200) | AT_NIGHT(GLOO)) {
    floods(300);
}

/* An attacker on the network's path writes into the connections of a running job: Gloo throws in
   its own thread, and no process is ended by that. */
static const struct {
    const char *name;
    uint64_t slot; /* slot of a message of 1 MiB; 0: noise */
} intrusions[] = {{"longer_than_expected", FSDPI_GLOO_SLOT_RECORD},
                  {"not_expected", FSDPI_GLOO_SLOT_DATA},
                  {"noise", 0}};

static void intrudes(job *j, int rank) {
    uint64_t slot = *(const uint64_t *)j->extra, random = h_seed();
    uint64_t message[6 + 512] = {48 + (1 << 20), 1, slot, 0, 1 << 20, 0};
    table t;
    fsdp_status status = open_table(j, rank, &t);
    for (int i = 0; i < 3 && !status; i++) status = run_one(&t, t.world, FSDP_OP_ALL_REDUCE, 0);
    for (size_t i = slot ? 6 : 0; i < 518; i++) message[i] = h_rand64(&random);
    int written = 0;
    for (int fd = 3; fd < 256 && rank == j->victim; fd++) {
        struct sockaddr_in to;
        socklen_t size = sizeof to;
        if (getpeername(fd, (struct sockaddr *)&to, &size) || to.sin_family != AF_INET) continue;
        written += send(fd, message, slot ? 48 : sizeof message, MSG_NOSIGNAL) > 0;
    }
    CHECK(rank != j->victim || written == j->world - 1);
    mark(j);
    for (int i = 0; i < 3 && !status; i++) status = run_one(&t, t.world, FSDP_OP_ALL_REDUCE, 0);
    tell(j, rank, status, status ? ops()->error_text(t.world) : "");
    close_table(&t);
}
TEST_P(gloo_faults, intruder_on_the_path, intrusions) {
    be_near(1);
    job *j = make_job(3, row->slot ? 20000 : 1500, intrudes);
    j->victim = 1, j->extra = &row->slot; /* so that the store is not a TCP connection */
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    for (int k = 0; k < 3; k++) {
        const report *r = &j->rank[k];
        J_CHECK(j, in_order(r) && r->status, "rank %d: ended %x with %d", k, r->how, r->status);
        J_CHECK(j, !row->slot || strstr(r->text, "E755"), "rank %d does not say why", k);
    }
}

/* A program closes all descriptors that it does not know, including Gloo's. */
static void closes_all(job *j, int rank) {
    table t;
    fsdp_status status = open_table(j, rank, &t);
    for (int i = 0; i < 3 && !status; i++) status = run_one(&t, t.world, FSDP_OP_ALL_REDUCE, 0);
    for (int fd = 3; fd < 256 && rank == j->victim; fd++) close(fd);
    for (int i = 0; i < 3 && !status; i++) status = run_one(&t, t.world, FSDP_OP_ALL_REDUCE, 0);
    tell(j, rank, status, status ? ops()->error_text(t.world) : "");
    close_table(&t);
    at(j, rank, AT_END);
    _exit(0); /* no leak check: Gloo's objects cannot be freed */
}
TEST(gloo_faults, program_closes_all_descriptors) {
    be_near(1);
    job *j = make_job(3, 2000, closes_all);
    j->victim = 1;
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    for (int k = 0; k < 3; k++) {
        const report *r = &j->rank[k];
        J_CHECK(j, in_order(r) && r->status, "rank %d: ended %x with %d", k, r->how, r->status);
        J_CHECK(j, k == 1 || names(r->text, k, 1), "rank %d does not name it", k);
    }
}

/* ---- ranks that differ ----------------------------------------------------------------------- */

enum {
    OTHER_OP,
    OTHER_UNIT,
    OTHER_DTYPE,
    OTHER_OUT_DTYPE,
    OTHER_COUNT,
    OTHER_SEGS,
    OTHER_ROOT,
    OTHER_REDOP,
    OTHER_STATE,
    OTHER_FINGERPRINT
};
typedef struct {
    const char *name;
    int field, kind, odd;
    size_t bytes;
    const char *said;
} mismatch;
static const mismatch mismatches[] = {
    {"op", OTHER_OP, FSDP_OP_ALL_GATHER, 2, 0, "all_reduce of 'h.3'"},
    {"op/16MiB", OTHER_OP, FSDP_OP_REDUCE_SCATTER, 0, BIG, "all_reduce of 'h.3'"},
    {"unit", OTHER_UNIT, FSDP_OP_ALL_GATHER, 1, 0, "'h.7'"},
    {"dtype", OTHER_DTYPE, FSDP_OP_ALL_GATHER, 2, 0, "bf16"},
    {"out_dtype", OTHER_OUT_DTYPE, FSDP_OP_REDUCE_SCATTER, 0, 0, "reduce_scatter"},
    {"size/gather", OTHER_COUNT, FSDP_OP_ALL_GATHER, 2, 0, "100 elements"},
    {"size/gather/16MiB", OTHER_COUNT, FSDP_OP_ALL_GATHER, 0, BIG, "100 elements"},
    {"size/scatter/16MiB", OTHER_COUNT, FSDP_OP_REDUCE_SCATTER, 2, BIG, "100 elements"},
    {"size/reduce/16MiB", OTHER_COUNT, FSDP_OP_ALL_REDUCE, 1, BIG, "100 elements"},
    {"size/broadcast", OTHER_COUNT, FSDP_OP_BROADCAST, 2, 0, "100 elements"},
    {"size/broadcast/root", OTHER_COUNT, FSDP_OP_BROADCAST, 0, BIG, "100 elements"},
    {"segments", OTHER_SEGS, FSDP_OP_ALL_GATHER, 2, 0, "segments"},
    {"root", OTHER_ROOT, FSDP_OP_BROADCAST, 2, 0, "broadcast"},
    {"redop", OTHER_REDOP, FSDP_OP_ALL_REDUCE, 1, 0, "all_reduce"},
    {"state", OTHER_STATE, FSDP_OP_ALL_GATHER, 0, 0, "pre_backward"},
    {"fingerprint", OTHER_FINGERPRINT, FSDP_OP_ALL_REDUCE, 2, 0, "all_reduce"},
};

static void change(fsdp_coll *c, fsdp_seg *seg, int field) {
    if (field == OTHER_OP) c->kind = FSDP_OP_ALL_REDUCE, c->src = c->dst;
    if (field == OTHER_UNIT) c->what = "h.7";
    if (field == OTHER_DTYPE) c->dtype = c->out_dtype = FSDP_BF16;
    if (field == OTHER_OUT_DTYPE) c->out_dtype = FSDP_BF16;
    if (field == OTHER_COUNT) c->count = 100, seg->count = 100;
    if (field == OTHER_SEGS) seg->full = 8, seg->count -= 8, c->count -= 8;
    if (field == OTHER_ROOT) c->root = 1;
    if (field == OTHER_REDOP) c->redop = FSDP_MAX;
    if (field == OTHER_STATE) c->state = FSDP_STATE_PRE_BACKWARD;
    if (field == OTHER_FINGERPRINT) c->fingerprint = 1;
}

static void differ(job *j, int rank) {
    const mismatch *m = (const mismatch *)j->extra;
    table t;
    fsdp_seg seg;
    fsdp_status status = open_table(j, rank, &t);
    for (int i = 0; !status && i < 5; i++) status = run_one(&t, t.world, m->kind, 0);
    if (!status) {
        fsdp_coll c = coll_of(&t, m->kind, &seg);
        at(j, rank, AT_GATHER);
        if (rank == m->odd) change(&c, &seg, m->field);
        status = ops()->run(t.world, &c);
    }
    tell(j, rank, status, t.world ? ops()->error_text(t.world) : "");
    j->rank[rank].again = (int)run_one(&t, t.world, FSDP_OP_BROADCAST, 1);
    close_table(&t);
}
TEST_P(gloo_faults, ranks_that_differ_get_mismatch, mismatches) {
    be_near((int)(row - mismatches) % 3);
    job *j = make_job(3, 20000, differ);
    j->bytes = row->bytes, j->extra = row;
    int64_t begin = now_ns();
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    all_got(j, -1, FSDP_ERR_MISMATCH, row->said);
    for (int k = 0; k < 3; k++) {
        J_CHECK(j, j->rank[k].again == FSDP_ERR_MISMATCH, "rank %d: not the same again", k);
        J_CHECK(j, names(j->rank[k].text, -1, row->odd), "rank %d does not name the odd one", k);
    }
    h_message("all ranks know after %d ms", (int)((now_ns() - begin) / 1000000));
}

/* Two operations, in another order on one rank. */
static void swapped(job *j, int rank) {
    table t;
    fsdp_status status = open_table(j, rank, &t);
    for (int i = 0; i < 2 && !status; i++) {
        int is_first = (i == 0) != (rank == j->victim);
        status = run_one(&t, t.world, is_first ? FSDP_OP_ALL_GATHER : FSDP_OP_REDUCE_SCATTER, 0);
    }
    tell(j, rank, status, status ? ops()->error_text(t.world) : "");
    close_table(&t);
}
TEST(gloo_faults, another_order_is_a_mismatch) {
    for (int victim = 0; victim < 3; victim++) {
        be_near(victim);
        job *j = make_job(3, 20000, swapped);
        j->victim = victim;
        start(j);
        J_CHECK(j, !finish(j, 10000), "a rank hangs");
        all_got(j, -1, FSDP_ERR_MISMATCH, "reduce_scatter of 'h.3'");
        for (int k = 0; k < 3; k++)
            J_CHECK(j, names(j->rank[k].text, -1, victim), "rank %d does not name it", k);
    }
}

TEST(gloo_faults, rank_with_another_model_gets_mismatch) {
    job *j = make_job(3, 20000, train);
    j->victim = 1, j->extra = j;
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    all_got(j, -1, FSDP_ERR_MISMATCH, "rank 1");
}

/* Two ranks wait for each other in different groups: each text says where the other one is. */
static void cross(job *j, int rank) {
    table t;
    fsdp_status status = open_table(j, rank, &t);
    if (!status) status = split_table(&t);
    if (!status) status = run_one(&t, rank ? t.group : t.world, FSDP_OP_ALL_GATHER, 0);
    tell(j, rank, status, status ? ops()->error_text(rank ? t.group : t.world) : "");
    close_table(&t);
}
TEST(gloo_faults, crossed_groups_are_a_timeout) {
    for (int near = 0; near < 2; near++) {
        be_near(near);
        job *j = make_job(2, 500, cross);
        start(j);
        J_CHECK(j, !finish(j, 10000), "a rank hangs");
        all_got(j, -1, FSDP_ERR_TIMEOUT, "on 'backwards' (op 1)");
    }
}

/* ---- the store ends -------------------------------------------------------------------------- */

typedef struct {
    const char *name, *store;
    int killed;
} launcher;
static const launcher launchers[] = {{"host/killed", NULL, 1},
                                     {"tcp/killed", "tcp", 1},
                                     {"host/stopped", NULL, 0},
                                     {"tcp/stopped", "tcp", 0}};

TEST_P(gloo_faults, launcher_that_serves_ends, launchers) {
    job *j = make_coming(3, 20000, row->store), *calm = undisturbed(3, 200);
    j->rounds = row->killed ? 1 << 30 : 200;
    launcher_ends(j, row->killed);
    if (row->killed) {
        all_got(j, -1, FSDP_ERR_PEER_LOST, "launcher");
        all_know(j, -1, 1000);
    } else { /* a store that closes in order is no failure: ranks continue without it */
        all_got(j, -1, FSDP_OK, NULL);
        same_bits(j, calm);
    }
}

/* With a launcher that serves the store, the death of rank 0 is like that of any other rank. */
TEST(gloo_faults, rank_0_dies_while_a_launcher_serves) {
    job *j = make_coming(3, 20000, "tcp");
    pid_t pid = serve(j);
    j->rounds = 1 << 30, j->victim = 0;
    start(j);
    J_CHECK(j, await(j, 0, AT_STEP, 5), "it does not run");
    kill(j->pid[0], SIGKILL);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    all_got(j, 0, FSDP_ERR_PEER_LOST, "rank 0 has died");
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

/* ---- ranks that leave ------------------------------------------------------------------------ */

static void aborts(job *j, fsdp_world *world) {
    (void)j;
    fsdp_abort(world, "out of data");
}
static void *abort_soon(void *world) {
    usleep(50000);
    fsdp_abort((fsdp_world *)world, "out of data");
    return NULL;
}
static void aborts_from_a_thread(job *j, fsdp_world *world) { /* the others wait for this rank */
    pthread_t thread;
    (void)j;
    CHECK_EQ_INT(pthread_create(&thread, NULL, abort_soon, world), 0);
    (void)pthread_join(thread, NULL);
}
static void fails(job *j, fsdp_world *world) {
    float x = 0;
    (void)j;
    CHECK_STATUS(fsdp_all_reduce(world, NULL, &x, 1, FSDP_U8, FSDP_SUM), FSDP_ERR_INVALID_ARG);
    fsdp_abort(world, "it cannot go on");
}

typedef struct {
    const char *name;
    void (*quirk)(job *, fsdp_world *);
    fsdp_status status;
    const char *said;
    int includes_me, lanes;
} leaving;
static const leaving leavings[] = {
    {"exit", exits, FSDP_ERR_PEER_LOST, NULL, 0, 0},
    {"exit/lanes", exits, FSDP_ERR_PEER_LOST, NULL, 0, 2},
    {"shutdown", shuts_down, FSDP_ERR_PEER_LOST, NULL, 0, 0},
    {"shutdown/lanes", shuts_down, FSDP_ERR_PEER_LOST, NULL, 0, 2},
    {"abort", aborts, FSDP_ERR_ABORTED, "aborted the world: out of data", 1, 0},
    {"abort/lanes", aborts, FSDP_ERR_ABORTED, "aborted the world: out of data", 1, 2},
    {"abort/thread", aborts_from_a_thread, FSDP_ERR_ABORTED, "aborted the world: out of data", 1,
     0},
    {"failure", fails, FSDP_ERR_ABORTED, "aborted the world: it cannot go on", 1, 0},
};
static void rank_leaves(const leaving *row, int victim, int near) {
    be_near(near);
    job *j = make_job(3, 20000, train);
    j->victim = victim, j->quirk = row->quirk, j->lanes = row->lanes;
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    all_got(j, row->includes_me ? -1 : victim, row->status, row->said);
    all_name(j, victim, victim);
    all_know(j, victim, 1000);
}
TEST_P(gloo_faults, rank_that_leaves, leavings) {
    for (int near = 0; near < 3; near++) rank_leaves(row, near % 2, near);
    rank_leaves(row, 0, 1); /* rank 0 serves the store */
}

/* A rank closes a group in which others wait: they learn that it has left the group. */
static void closes_group(job *j, int rank) {
    table t;
    fsdp_status status = open_table(j, rank, &t);
    if (!status) status = split_table(&t);
    if (!status) status = run_one(&t, t.group, FSDP_OP_ALL_REDUCE, 0);
    if (!status && rank == j->victim) {
        usleep(50000);
        mark(j);
        ops()->close(t.group);
        t.group = NULL;
        status = run_one(&t, t.world, FSDP_OP_ALL_REDUCE, 1);
    } else if (!status) {
        status = run_one(&t, t.group, FSDP_OP_ALL_GATHER, 0);
    }
    tell(j, rank, status, ops()->error_text(rank == j->victim ? t.world : t.group));
    close_table(&t);
}
TEST(gloo_faults, group_is_closed_while_others_are_inside) {
    for (int near = 0; near < 3; near++) {
        be_near(near);
        job *j = make_job(3, 20000, closes_group);
        j->victim = 1;
        start(j);
        J_CHECK(j, !finish(j, 10000), "a rank hangs");
        all_got(j, -1, FSDP_ERR_PEER_LOST, "rank 1 ");
        all_know(j, 1, 1000);
    }
}

/* Rank 0, which serves the store, leaves in order. The others continue in a group and lose a rank.
   No store passes on the failure then: each rank learns of it from its own connections. */
static void without_a_store(job *j, int rank) {
    int32_t ranks[3] = {1, 2, 3};
    fsdp_group g = {rank ? 1 : -1, rank - 1, 3, 0, ranks, "others"};
    table t;
    fsdp_status status = open_table(j, rank, &t);
    if (!status) status = ops()->split(t.world, &g, &t.group);
    CHECK_MSG(!status, "%s", ops()->error_text(t.world));
    for (int i = 0; !status && t.group && i < j->rounds; i++) {
        at(j, rank, AT_GATHER);
        t.boot.size = 3;
        status = run_one(&t, t.group, FSDP_OP_ALL_GATHER, 0);
    }
    tell(j, rank, status, t.group ? ops()->error_text(t.group) : "");
    close_table(&t);
}
static const struct {
    const char *name;
    size_t bytes;
    int timeout_ms, near;
} storeless[] = {{"64KiB", 0, 3000, 1},
                 {"16MiB", BIG, 3000, 1},
                 {"64KiB/near", 0, 3000, 0},
                 {"16MiB/mixed", BIG, 3000, 2}};
TEST_P(gloo_faults, rank_dies_after_the_store_has_left, storeless) {
    be_near(row->near);
    job *j = make_job(4, row->timeout_ms, without_a_store);
    j->victim = 2, j->bytes = row->bytes;
    start(j);
    J_CHECK(j, await(j, 0, AT_END, 1) && await(j, 2, AT_GATHER, 5), "it does not run");
    usleep(row->bytes ? 5000 : 0);
    mark(j);
    kill(j->pid[2], SIGKILL);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    j->rank[0].failed_ns = j->fault_ns;
    for (int k = 1; k < 4; k += 2) {
        const report *r = &j->rank[k];
        J_CHECK(j, r->status == FSDP_ERR_PEER_LOST, "rank %d got %d", k, r->status);
        J_CHECK(j, names(r->text, k, 2), "rank %d does not name it", k);
    }
    all_know(j, 2, 1000);
}

/* Local ranks need no store to learn that one of them has aborted. */
static void aborts_without_a_store(job *j, int rank) {
    int32_t ranks[2] = {1, 2};
    fsdp_group g = {rank ? 1 : -1, rank - 1, 2, 0, ranks, "others"};
    table t;
    fsdp_status status = open_table(j, rank, &t);
    if (!status) status = ops()->split(t.world, &g, &t.group);
    CHECK_MSG(!status, "%s", ops()->error_text(t.world));
    t.boot.size = 2;
    if (rank == 1) {
        J_CHECK(j, await(j, 0, AT_END, 1), "rank 0 does not leave");
        mark(j);
        ops()->abort(t.world, FSDP_ERR_ABORTED, "out of data");
    }
    if (rank) status = run_one(&t, t.group, FSDP_OP_ALL_GATHER, 0);
    tell(j, rank, status, rank ? ops()->error_text(t.group) : "");
    close_table(&t);
}
TEST(gloo_faults, rank_aborts_after_the_store_has_left) {
    job *j = make_job(3, 20000, aborts_without_a_store);
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    for (int k = 1; k < 3; k++) {
        const report *r = &j->rank[k];
        J_CHECK(j, r->status == FSDP_ERR_ABORTED, "rank %d got %d", k, r->status);
        J_CHECK(j, strstr(r->text, "aborted by rank 1: out of data"), "rank %d: no reason", k);
        J_CHECK(j, took_ms(j, k) <= allowed_ms(j, 1000), "rank %d: after %d ms", k, took_ms(j, k));
    }
}

/* The store exists but is silent: its host is stopped. A rank's own connections are enough to
   notice a death, also in the middle of a message. */
static const struct {
    const char *name, *store;
    int place, near;
} silent[] = {{"host/gather", NULL, AT_GATHER, 1},
              {"tcp/scatter", "tcp", AT_SCATTER, 1},
              {"tcp/reduce", "tcp", AT_REDUCE, 0},
              {"host/broadcast", NULL, AT_BROADCAST, 2},
              {"tcp/broadcast", "tcp", AT_BROADCAST, 1}};
TEST_P(gloo_faults, rank_dies_while_the_store_is_silent, silent) {
    be_near(row->near);
    job *j = make_coming(3, 30000, row->store);
    pid_t pid = serve(j);
    j->body = loop, j->rounds = 1 << 30, j->victim = 2, j->bytes = BIG;
    start(j);
    J_CHECK(j, await(j, 2, row->place, 2), "it does not run");
    usleep(4000);
    kill(pid, SIGSTOP);
    mark(j);
    kill(j->pid[2], SIGKILL);
    J_CHECK(j, await_results(j, 2, 10000), "a rank hangs");
    all_know(j, 2, 5000);
    kill(pid, SIGKILL);
    CHECK_EQ_INT(waitpid(pid, NULL, 0), pid);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    all_got(j, 2, FSDP_ERR_PEER_LOST, NULL);
    all_name(j, 2, 2);
}

/* All ranks leave in order, at different times: no rank takes this for a failure. */
static void leaves_one_by_one(job *j, int rank) {
    fsdp_world_desc d = desc_of(j, rank);
    fsdp_world *world;
    trainer t;
    fsdp_status status = fsdp_init(&d, &world);
    if (!status) status = make_trainer(j, world, WIDTH, &t);
    for (int step = 0; !status && step < 3; step++) status = train_step(world, &t, step);
    if (!status) status = fsdp_barrier(world);
    int order = j->extra ? j->world - 1 - rank : rank;
    usleep((useconds_t)order * 60000);
    fsdp_status ended = fsdp_shutdown(world);
    tell(j, rank, status ? status : ended, "");
}
TEST(gloo_faults, ranks_leave_one_by_one) {
    for (int order = 0; order < 4; order++) {
        be_near(order % 3);
        job *j = make_job(4, 20000, leaves_one_by_one);
        j->extra = order % 2 ? j : NULL;
        start(j);
        J_CHECK(j, !finish(j, 10000), "a rank hangs");
        all_got(j, -1, FSDP_OK, NULL);
    }
}

/* ---- two at once ----------------------------------------------------------------------------- */

TEST(gloo_faults, comm_threads_do_not_change_bits) {
    for (int world = 2; world <= 4; world++) {
        be_near(world - 2);
        job *calm = undisturbed(world, 30), *j = make_job(world, 20000, train);
        j->rounds = 30, j->lanes = 2;
        start(j);
        J_CHECK(j, !finish(j, 20000), "a rank hangs");
        all_got(j, -1, FSDP_OK, NULL);
        same_bits(j, calm);
    }
}

#ifdef FSDP_BACKEND_SHM
TEST(gloo_faults, bits_are_those_of_shm) {
    for (int world = 2; world <= 4; world++) {
        job *j = make_job(world, 20000, train);
        j->rounds = 30, j->backend = "shm";
        start(j);
        J_CHECK(j, !finish(j, 20000), "a rank hangs");
        all_got(j, -1, FSDP_OK, NULL);
        for (int near = 0; near < (world == 2 ? 2 : 3); near++) {
            be_near(near);
            same_bits(j, undisturbed(world, 30));
        }
    }
}
#endif

/* Rows and columns of 2 x 2 ranks, used by two threads at once. */
typedef struct {
    job *j;
    fsdp_comm *comm;
    int rank, peers[2], kind, failures; /* peers: world ranks of this group */
    float *src, *dst;
    fsdp_status status;
} side;
enum { SIDE = 5000 };

static void *side_main(void *arg) {
    side *s = (side *)arg;
    h_rank = s->rank;
    for (int i = 0; !s->status && i < s->j->rounds; i++) {
        fsdp_seg seg = {0, 0, SIDE};
        fsdp_coll c;
        memset(&c, 0, sizeof c);
        c.kind = (uint8_t)s->kind, c.dtype = c.out_dtype = FSDP_F32, c.scale = 1;
        c.what = "side", c.seq = (uint64_t)i + 1, c.count = SIDE;
        c.dst = s->dst, c.src = s->kind == FSDP_OP_ALL_REDUCE ? s->dst : s->src;
        if (s->kind == FSDP_OP_ALL_GATHER) c.segs = &seg, c.num_segs = 1;
        for (int k = 0; k < SIDE; k++) s->src[k] = s->dst[k] = (float)(s->rank + i % 100 + k % 3);
        s->status = ops()->run(s->comm, &c);
        at(s->j, s->rank, s->kind == FSDP_OP_ALL_GATHER ? AT_GATHER : AT_REDUCE);
        for (int k = 0; !s->status && k < SIDE; k++) {
            float a = (float)(s->peers[0] + i % 100 + k % 3),
                  b = (float)(s->peers[1] + i % 100 + k % 3);
            if (s->kind == FSDP_OP_ALL_GATHER)
                s->failures += s->dst[k] < a || s->dst[k] > a || s->dst[SIDE + k] < b ||
                               s->dst[SIDE + k] > b;
            else s->failures += s->dst[k] < a + b || s->dst[k] > a + b;
        }
    }
    return NULL;
}

static void grid(job *j, int rank) {
    side sides[2];
    pthread_t threads[2];
    table t;
    fsdp_status status = open_table(j, rank, &t);
    memset(sides, 0, sizeof sides);
    for (int k = 0; k < 2 && !status; k++) {
        side *s = &sides[k];
        int32_t ranks[2] = {k ? rank % 2 : rank / 2 * 2, k ? rank % 2 + 2 : rank / 2 * 2 + 1};
        fsdp_group g = {ranks[0], k ? rank / 2 : rank % 2, 2, k, ranks, k ? "columns" : "rows"};
        s->j = j, s->rank = rank, s->kind = k ? FSDP_OP_ALL_REDUCE : FSDP_OP_ALL_GATHER;
        s->peers[0] = ranks[0], s->peers[1] = ranks[1];
        status = ops()->split(t.world, &g, &s->comm);
        if (!status) status = ops()->alloc(t.world, SIDE * 4, (void **)&s->src);
        if (!status) status = ops()->alloc(t.world, SIDE * 8, (void **)&s->dst);
    }
    CHECK_MSG(!status, "%s", ops()->error_text(t.world));
    for (int k = 0; k < 2; k++)
        CHECK_EQ_INT(pthread_create(&threads[k], NULL, side_main, &sides[k]), 0);
    for (int k = 0; k < 2; k++) (void)pthread_join(threads[k], NULL);
    CHECK_EQ_INT(sides[0].failures + sides[1].failures, 0);
    CHECK_EQ_INT(sides[0].status, sides[1].status);
    tell(j, rank, sides[0].status, sides[0].status ? ops()->error_text(sides[rank & 1].comm) : "");
    for (int k = 0; k < 2; k++) ops()->close(sides[k].comm);
    close_table(&t);
}
TEST(gloo_faults, rows_and_columns_at_once) {
    for (int near = 0; near < 3; near++) {
        be_near(near);
        job *j = make_job(4, 20000, grid);
        j->rounds = W_SLOW ? 50 : 300;
        start(j);
        J_CHECK(j, !finish(j, 30000), "a rank hangs");
        all_got(j, -1, FSDP_OK, NULL);
    }
}

/* A rank whose files may not grow cannot share memory: it uses TCP next to ranks that do. */
static void files_are_limited(job *j, int rank) {
    struct rlimit limit = {1 << 20, 1 << 20};
    if (rank == j->victim) CHECK_EQ_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
}
TEST(gloo_faults, rank_that_cannot_share_memory) {
    job *calm = undisturbed(3, STEPS);
    for (int victim = 0; victim < 3; victim++) {
        job *j = make_job(3, 20000, train);
        j->victim = victim, j->rounds = STEPS, j->begin = files_are_limited;
        start(j);
        J_CHECK(j, !finish(j, 20000), "a rank hangs");
        all_got(j, -1, FSDP_OK, NULL);
        same_bits(j, calm);
    }
}
TEST(gloo_faults, rows_and_columns_lose_a_rank) {
    for (int victim = 0; victim < 4; victim += 3) {
        job *j = make_job(4, 20000, grid);
        j->victim = victim;
        start(j);
        J_CHECK(j, await(j, victim, AT_REDUCE, 20), "it does not run");
        mark(j);
        kill(j->pid[victim], SIGKILL);
        J_CHECK(j, !finish(j, 10000), "a rank hangs");
        all_got(j, victim, FSDP_ERR_PEER_LOST, victim ? "rank 3 " : "rank 0");
        all_know(j, victim, 1000);
    }
}

/* ---- nothing is left behind ------------------------------------------------------------------ */

static void world_cycles(job *j, int rank) {
    usage first;
    w_heap heap;
    for (int i = 0; i < CYCLES; i++) {
        fsdp_world_desc d = desc_of(j, rank);
        fsdp_world *world;
        trainer t;
        w_heap_use(&heap, &d);
        fsdp_status status = fsdp_init(&d, &world);
        CHECK_MSG(!status, "cycle %d: %s", i, fsdp_last_error(NULL));
        CALL(world, make_trainer(j, world, WIDTH, &t));
        CALL(world, train_step(world, &t, i));
        CHECK_OK(fsdp_shutdown(world));
        CHECK_EQ_INT(heap.live, 0);
        if (i == CYCLES / 2 - 1) first = usage_now();
    }
    same_usage(first, 50 * 256);
    tell(j, rank, FSDP_OK, "");
}
static void worlds(const char *store) {
    job *j = make_coming(2, 20000, store);
    int64_t begin = now_ns();
    j->body = world_cycles;
    start(j);
    J_CHECK(j, !finish(j, 100000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
    h_message("%d cycles of %.1f ms", CYCLES, (double)(now_ns() - begin) * 1e-6 / CYCLES);
}

TEST(gloo_faults, worlds_100_times, SECONDS(120)) { worlds(NULL); }
TEST(long_gloo_faults, worlds_100_times_over_tcp, SECONDS(120) | AT_NIGHT(GLOO)) { worlds("tcp"); }

static void group_cycles(job *j, int rank) {
    usage first;
    table t;
    fsdp_status status = open_table(j, rank, &t);
    for (int i = 0; !status && i < CYCLES; i++) {
        status = split_table(&t);
        if (!status) status = run_one(&t, t.group, FSDP_OP_ALL_REDUCE, 0);
        CHECK_MSG(!status, "cycle %d: %s", i, ops()->error_text(t.world));
        if (t.group) ops()->close(t.group);
        t.group = NULL;
        if (i == CYCLES / 2 - 1) first = usage_now();
    }
    same_usage(first, 50 * 256);
    tell(j, rank, status, "");
    close_table(&t);
}
TEST(gloo_faults, groups_100_times, SECONDS(120)) {
    job *j = make_job(3, 20000, group_cycles);
    int64_t begin = now_ns();
    start(j);
    J_CHECK(j, !finish(j, 100000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
    h_message("%d cycles of %.1f ms", CYCLES, (double)(now_ns() - begin) * 1e-6 / CYCLES);
}

/* A failed world leaks nothing either. The heap needs some 20 worlds until it has all that it
   keeps. */
static void failed_cycles(job *j, int rank) {
    usage first;
    w_heap heap;
    for (int i = 0; i < 60; i++) {
        fsdp_world_desc d = desc_of(j, rank);
        fsdp_world *world;
        w_heap_use(&heap, &d);
        fsdp_status status = fsdp_init(&d, &world); /* may fail: a faster rank may have aborted */
        const char *text = fsdp_last_error(NULL);
        if (!status && rank == i % j->world) fsdp_abort(world, "enough");
        if (!status) status = fsdp_barrier(world), text = fsdp_last_error(world);
        CHECK_MSG(status == FSDP_ERR_ABORTED && strstr(text, "enough"), "cycle %d: %s: '%s'", i,
                  fsdp_status_name(status), text);
        if (world) CHECK_STATUS(fsdp_shutdown(world), FSDP_ERR_ABORTED);
        CHECK_EQ_INT(heap.live, 0);
        if (i == 29) first = usage_now();
    }
    same_usage(first, 50 * 256);
    tell(j, rank, FSDP_OK, "");
}
TEST(gloo_faults, aborted_worlds_leave_nothing) {
    job *j = make_job(3, 20000, failed_cycles);
    start(j);
    J_CHECK(j, !finish(j, 50000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
}

/* Each allocation of rank j->victim fails once: all ranks get an error, and nothing leaks. */
static void one_life(job *j, int rank) {
    fsdp_world_desc d = desc_of(j, rank);
    fsdp_world *world;
    trainer t;
    usage before = usage_now();
    w_heap heap;
    w_heap_use(&heap, &d);
    if (rank == j->victim) heap.fail_at = *(const int *)j->extra;
    at(j, rank, AT_INIT);
    fsdp_status status = fsdp_init(&d, &world);
    const char *text = fsdp_last_error(NULL);
    if (!status) status = make_trainer(j, world, WIDTH, &t);
    if (!status) status = train_step(world, &t, 0);
    if (world) text = fsdp_last_error(world);
    if (status && world) fsdp_abort(world, "no memory");
    tell(j, rank, status, text);
    at(j, rank, AT_CLOSE);
    (void)fsdp_shutdown(world);
    CHECK_EQ_INT(heap.live, 0);
    same_usage(before, 1 << 20);
    j->rank[rank].again = (int)status;
    j->rank[rank].bits = (uint64_t)heap.failures;
}

static void allocations_fail(int victim, int step) {
    int n = 0, injected = 1, names_none = 0, survived = 0;
    for (; injected && n < 2000; n += step) {
        job *j = make_job(2, 2000, one_life);
        j->victim = victim, j->extra = &n;
        start(j);
        J_CHECK(j, !finish(j, 8000), "allocation %d: a rank hangs", n);
        for (int k = 0; k < 2; k++)
            J_CHECK(j, in_order(&j->rank[k]), "allocation %d: rank %d did not end in order", n, k);
        injected = j->rank[victim].bits > 0;
        int status = j->rank[victim].status, other = j->rank[!victim].status;
        /* PEER_LOST: the store has cut off the rank. TIMEOUT: the machine did not run the processes
           in time. */
        int clean = status == FSDP_ERR_OUT_OF_MEMORY || status == FSDP_ERR_PEER_LOST ||
                    (status == FSDP_ERR_TIMEOUT && allowed_ms(j, 0) > 200);
        J_CHECK(j, !status || (injected && clean), "allocation %d", n);
        J_CHECK(j, !other == !status, "allocation %d: the other rank got %d", n, other);
        survived += injected && !status; /* e.g. a connection is refused, and tried again */
        int named = !status || names(j->rank[!victim].text, !victim, victim);
        if (!named) fprintf(stderr, "allocation %d:\n", n), shows(j);
        names_none += !named;
        munmap(j, sizeof *j);
    }
    h_message("rank %d: %d allocations, %d tries survived", victim, n - step, survived);
    CHECK_EQ_INT(names_none, 0);
    CHECK(n > 10 && n < 2000);
}
TEST(gloo_faults, some_allocations_fail, SECONDS(120)) {
    allocations_fail(0, W_SLOW ? 23 : 7);
    be_near(1);
    allocations_fail(1, W_SLOW ? 23 : 7);
}
TEST(long_gloo_faults, every_allocation_fails_once, SECONDS(1200) | AT_NIGHT(GLOO)) {
    for (int near = 0; near < 2; near++) {
        be_near(near);
        allocations_fail(0, 1);
        allocations_fail(1, 1);
    }
}

/* Replaces the C library's epoll_ctl, also for Gloo, so that a later registration fails. */
static int registrations = -1;
int epoll_ctl(int loop, int how, int fd, struct epoll_event *event) {
    if (how == EPOLL_CTL_ADD && registrations >= 0 && registrations-- == 0) {
        errno = ENOSPC;
        return -1;
    }
    return (int)syscall(SYS_epoll_ctl, loop, how, fd, event);
}

/* If the system watches no more descriptors, creating a device fails and leaves nothing: Gloo's
   thread does not use freed objects. */
TEST(gloo_faults, device_that_epoll_refuses) {
    int refused = -1, failed = 1;
    usage before = usage_now();
    for (; failed; refused++) {
        fsdp_gloo_device *device = NULL;
        registrations = refused + 1;
        int result = fsdp_gloo_device_create(&device);
        failed = registrations < 0;
        registrations = -1;
        CHECK_EQ_INT(result, failed ? FSDP_GLOO_INVALID : FSDP_GLOO_OK);
        CHECK((device == NULL) == failed);
        if (device) fsdp_gloo_device_destroy(device);
        usleep(failed ? 20000 : 0); /* time for a thread that might be left */
        same_usage(before, 1 << 20);
    }
    CHECK(refused >= 3);
}

/* Rank j->victim may open only *j->extra more descriptors. */
static void few_descriptors(job *j, int rank) {
    fsdp_world_desc d = desc_of(j, rank);
    fsdp_world *world;
    trainer t;
    struct rlimit few;
    CHECK_EQ_INT(getrlimit(RLIMIT_NOFILE, &few), 0);
    few.rlim_cur = (rlim_t)(dup(STDIN_FILENO) + 1 + *(const int *)j->extra);
    if (rank == j->victim) CHECK_EQ_INT(setrlimit(RLIMIT_NOFILE, &few), 0);
    fsdp_status status = fsdp_init(&d, &world);
    const char *text = fsdp_last_error(NULL);
    if (!status) status = make_trainer(j, world, WIDTH, &t);
    if (!status) status = train_step(world, &t, 0);
    if (world) text = fsdp_last_error(world);
    if (status && world) fsdp_abort(world, "no descriptors");
    tell(j, rank, status, text);
    (void)fsdp_shutdown(world);
    CHECK(open("/dev/null", O_RDONLY) >= 0 || !*(const int *)j->extra);
    at(j, rank, AT_END);
    _exit(0); /* no leak checker: it needs descriptors, and Gloo loses an address if it has none */
}
TEST(gloo_faults, descriptors_run_out) {
    for (int turn = 0; turn < 3; turn++) {
        int more = 0, failed = 1, victim = turn > 0;
        be_near(turn < 2);
        for (; failed && more < 200; more++) {
            job *j = make_job(2, 500, few_descriptors);
            j->victim = victim, j->extra = &more;
            start(j);
            J_CHECK(j, !finish(j, 8000), "%d descriptors: a rank hangs", more);
            for (int k = 0; k < 2; k++) {
                const report *r = &j->rank[k];
                J_CHECK(j, in_order(r), "%d descriptors: rank %d did not end in order: %x", more, k,
                        r->how);
                J_CHECK(j, !r->status == !j->rank[0].status, "%d descriptors", more);
                J_CHECK(j, k == victim || !r->status || names(r->text, k, victim),
                        "%d descriptors: rank %d does not name it", more, k);
            }
            failed = j->rank[!victim].status;
            munmap(j, sizeof *j);
        }
        h_message("rank %d needs %d descriptors", victim, more - 1);
        CHECK(more > 1 && more < 200);
    }
}
#endif
