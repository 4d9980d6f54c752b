/* test_nccl_faults.c - ranks of the NCCL backend that die, stall, differ, arrive late or never;
   errors of NCCL and CUDA; a device that does not finish its work; and leaks. Runs on the stubs of
   tests/stubs, whose collectives never notice a dead peer, like NCCL's within one host: the store
   and an abort must. No call may block forever, and every rank must get a status that names the
   culprit.

   Ranks are processes, streams are asynchronous, and the host cannot read device memory.

   SPDX-License-Identifier: MIT */
#define TAGS NO(SHM) | STUB
#include "harness.h"
#include <glob.h>
#include "stubs/stub.h"

/* The library calls these three through functions of this test. */
static cudaError_t late_device(int device);
static ncclResult_t faulty_init(ncclComm_t *comm, int size, ncclUniqueId id, int rank,
                                ncclConfig_t *config);
static ncclResult_t faulty_split(ncclComm_t comm, int color, int key, ncclComm_t *child,
                                 ncclConfig_t *config);
#define ncclCommInitRankConfig faulty_init
#define ncclCommSplit          faulty_split
#define cudaSetDevice          late_device
#define LIBRARY_WHOLE
#include "library.c"
#include "lab.h"
#undef ncclCommInitRankConfig
#undef ncclCommSplit
#undef cudaSetDevice
#include "faults.h"

enum { WIDTH = 24, FLIGHTS = 1024 };

static job *my_job; /* job of this rank, for all its threads */
static int my_rank;

static void is_me(job *j, int rank) { my_job = j, my_rank = rank; }
static job *make_job(int world, int timeout_ms, void (*body)(job *, int)) {
    job *j = new_job("nccl", world, timeout_ms, body);
    j->begin = is_me, j->lanes = 2, j->lasts = 1;
    return j;
}

/* Checks that all ranks learn of the failure in time, and that their shutdown takes at most 3
   seconds. */
static void all_in_time(const job *j, int except, int limit_ms) {
    all_know(j, except, limit_ms);
    for (int k = 0; k < j->world; k++)
        J_CHECK(j, k == except || shutdown_ms(j, k) <= allowed_ms(j, 3000),
                "rank %d: shutdown took %d ms", k, shutdown_ms(j, k));
}

/* ---- what ranks do --------------------------------------------------------------------------- */

typedef struct {
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
    fsdp_adamw *adamw;
} trainer;
/* Kernel arguments: grad += w / 8, once the gate is open; NULL: there is no gate. */
typedef struct {
    const float *w;
    float *grad;
    size_t count;
    const int *gate;
} work;

static void work_body(const void *params, unsigned block_index) {
    const work *k = (const work *)params;
    long ns = 0;
    (void)block_index;
    while (k->gate && !__atomic_load_n(k->gate, __ATOMIC_ACQUIRE)) h_nap(&ns);
    for (size_t i = 0; i < k->count; i++) k->grad[i] += k->w[i] / 8;
}

static void launch(const void *w, void *grad, size_t count, const int *gate) {
    work k = {(const float *)w, (float *)grad, count, gate};
    (void)fsdp_stub_launch(work_body, &k, sizeof k, 1, cudaStreamLegacy);
}

static fsdp_status make_trainer(trainer *t, fsdp_world *world) {
    t->world = world;
    TRY(make_model(my_job, world, WIDTH, &t->model, t->unit));
    return fsdp_adamw_create(t->model, NULL, &t->adamw);
}

static fsdp_status forward(trainer *t, int u) {
    TRY(fsdp_pre_forward(t->unit[u]));
    (void)fsdp_data(t->unit[u], 0);
    return fsdp_post_forward(t->unit[u]);
}

static fsdp_status train_step(job *j, trainer *t, int step) {
    int rank = fsdp_rank(t->world);
    double loss = rank + step;
    at(j, rank, step ? AT_STEP : AT_FIRST);
    for (int u = 0; u < UNITS; u++) TRY(forward(t, u));
    for (int u = UNITS; u-- > 0;) {
        TRY(fsdp_pre_backward(t->unit[u]));
        launch(fsdp_data(t->unit[u], 0), fsdp_grad(t->unit[u], 0), WIDTH * WIDTH, NULL);
        launch(fsdp_data(t->unit[u], 1), fsdp_grad(t->unit[u], 1), WIDTH, NULL);
        TRY(fsdp_post_backward(t->unit[u]));
    }
    at(j, rank, AT_FINALIZE);
    TRY(fsdp_finalize_backward(t->model));
    TRY(fsdp_adamw_step(t->adamw, 1e-3));
    TRY(fsdp_zero_grad(t->model));
    return fsdp_all_reduce(t->world, NULL, &loss, 1, FSDP_F64, FSDP_SUM);
}

static void train(job *j, int rank) {
    fsdp_world_desc d = desc_of(j, rank);
    fsdp_world *world;
    trainer t;
    at(j, rank, AT_INIT);
    fsdp_status status = fsdp_init(&d, &world);
    at(j, rank, AT_SPLIT);
    if (!status) status = make_trainer(&t, world);
    for (int step = 0; !status && step < j->rounds; step++) {
        if (j->quirk && is_victim(j, rank) && step == j->odd_step) {
            at(j, rank, AT_ODD);
            mark(j);
            j->quirk(j, world);
        }
        status = train_step(j, &t, step);
    }
    leave(j, rank, world, status);
}

TEST(nccl_faults, watchdog_sees_a_hang) { watchdog(); }

TEST(nccl_faults, undisturbed) {
    for (int world = 1; world <= RANKS; world++) {
        job *j = make_job(world, 20000, train);
        j->rounds = 20;
        int64_t begin = now_ns();
        start(j);
        J_CHECK(j, !finish(j, 20000), "a rank hangs");
        all_got(j, -1, FSDP_OK, NULL);
        h_message("W=%d: %d ms", world, (int)((now_ns() - begin) / 1000000));
    }
}

/* ---- making communicators -------------------------------------------------------------------- */

/* number of the call that the victim does not make; 0: it makes all */
static int odd_init, odd_split;
static int dies; /* 1: it dies there; 0: it hangs */

/* Replaces a call of NCCL in the victim, in the thread of that call. */
static void odd_call(int *left) {
    if (*left == 0 || --*left > 0) return;
    mark(my_job);
    if (dies) (void)raise(SIGKILL);
    for (;;) pause();
}

static ncclResult_t faulty_init(ncclComm_t *comm, int size, ncclUniqueId id, int rank,
                                ncclConfig_t *config) {
    if (my_job && my_rank == my_job->victim) odd_call(&odd_init);
    return ncclCommInitRankConfig(comm, size, id, rank, config);
}

static ncclResult_t faulty_split(ncclComm_t comm, int color, int key, ncclComm_t *child,
                                 ncclConfig_t *config) {
    if (my_job && my_rank == my_job->victim) odd_call(&odd_split);
    return ncclCommSplit(comm, color, key, child, config);
}

static const struct {
    const char *name;
    int world, victim, init, split; /* split: the first one is open's own, for reductions */
} makings[] = {{"init/W=2", 2, 1, 1, 0},
               {"init/W=3/rank_0", 3, 0, 1, 0},
               {"split/W=3/reduce", 3, 2, 0, 1},
               {"split/W=4/mesh", 4, 1, 0, 2}};

static job *make_making(int world, int victim, int init, int split, int timeout_ms) {
    job *j = make_job(world, timeout_ms, train);
    j->victim = victim, odd_init = init, odd_split = split;
    return j;
}

TEST_P(nccl_faults, rank_dies_while_communicators_are_made, makings) {
    job *j = make_making(row->world, row->victim, row->init, row->split, 20000);
    dies = 1;
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    J_CHECK(j, WIFSIGNALED(j->rank[row->victim].how), "the victim has not died");
    all_got(j, row->victim, FSDP_ERR_PEER_LOST, NULL);
    all_name(j, row->victim, row->victim);
    all_in_time(j, row->victim, 1000);
}

/* Counts this rank, and waits until `count` have been counted. */
static void await_ranks(job *j, int count) {
    __atomic_add_fetch(&j->gate, 1, __ATOMIC_SEQ_CST);
    for (long ns = 0; __atomic_load_n(&j->gate, __ATOMIC_SEQ_CST) < count;) h_nap(&ns);
}

static int is_late; /* 1: delays the next thread that is about to call NCCL */

/* All ranks wait until the others have arrived; then the victim dies, and the rest find their
   communicators destroyed. */
static cudaError_t late_device(int device) {
    long ns = 0;
    if (!__atomic_exchange_n(&is_late, 0, __ATOMIC_SEQ_CST)) return cudaSetDevice(device);
    await_ranks(my_job, my_job->world);
    if (my_rank == my_job->victim) mark(my_job), (void)raise(SIGKILL);
    while (stub_live(STUB_COMMS) > 0) h_nap(&ns);
    return cudaSetDevice(device);
}

static void splits_late(job *j, int rank) {
    fsdp_world_desc d = desc_of(j, rank);
    fsdp_world *world;
    trainer t;
    fsdp_status status = fsdp_init(&d, &world);
    is_late = 1;
    if (!status) status = make_trainer(&t, world);
    leave(j, rank, world, status);
}
TEST(nccl_faults, thread_of_a_split_is_late) {
    job *j = make_job(3, 20000, splits_late);
    j->victim = 1;
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    all_got(j, j->victim, FSDP_ERR_PEER_LOST, NULL);
    all_name(j, j->victim, j->victim);
    all_in_time(j, j->victim, 1000);
}

/* The process survives, and can end. */
TEST_P(nccl_faults, making_a_communicator_hangs, makings) {
    job *j = make_making(row->world, row->victim, row->init, row->split, 600);
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    all_got(j, -1, FSDP_ERR_TIMEOUT, "NCCL_SOCKET_IFNAME");
    all_in_time(j, -1, 1000 + j->timeout_ms);
    for (int k = 0; k < row->world; k++)
        J_CHECK(j, strstr(j->rank[k].text, row->init ? "ncclCommInitRankConfig" : "ncclCommSplit"),
                "rank %d does not name the call", k);
}

/* ---- kill -9 at seeded points ---------------------------------------------------------------- */

typedef struct {
    const char *name;
    int place, delay_us; /* the kill comes up to delay_us after the victim's arrival */
} point;
static const point points[] = {
    {"open", AT_INIT, 60000},  {"split", AT_SPLIT, 30000},      {"first step", AT_FIRST, 8000},
    {"steps", AT_STEP, 30000}, {"finalize", AT_FINALIZE, 2000}, {"shutdown", AT_CLOSE, 20000},
};
enum { POINTS = (int)(sizeof points / sizeof points[0]) };

/* Modes of the backend: comparing signatures, one communicator or two, calls in progress. */
static const char *const modes[][2] = {{"FSDP_NCCL_CHECK", "1"},
                                       {"FSDP_NCCL_COMMS", "1"},
                                       {"NCCL_COMM_BLOCKING", "0"},
                                       {"FSDP_NCCL_REGISTER", "2"}};
enum { MODES = (int)(sizeof modes / sizeof modes[0]) };

/* A death after a survivor's last operation may go unnoticed. */
static void check_survivor(const job *j, int k, tally *sum) {
    const report *r = &j->rank[k];
    if (!in_order(r)) wrong(j, sum, "a survivor did not end in order");
    if (shutdown_ms(j, k) > allowed_ms(j, 3000)) wrong(j, sum, "shutdown takes too long");
    if (sum->place != AT_CLOSE || r->status) (void)check_result(j, k, sum);
}

static void one_kill(int i, tally *sum) {
    const point *p = &points[i % POINTS];
    uint64_t random = sum->seed;
    int world = 2 + (int)(h_rand64(&random) % 3);
    job *j = make_job(world, p->place == AT_INIT ? 1000 : 20000, train);
    sum->name = p->name, sum->place = p->place;
    j->victim = (int)(h_rand64(&random) % (uint64_t)world);
    int nth = p->place == AT_STEP || p->place == AT_FINALIZE ? 1 + (int)(h_rand64(&random) % 20)
                                                             : 1;
    if (p->place == AT_CLOSE) j->rounds = 3;
    useconds_t delay = (useconds_t)(h_rand64(&random) % (uint64_t)p->delay_us);
    int mode = (int)(h_rand64(&random) % (2 * MODES));
    if (mode < MODES) setenv(modes[mode][0], modes[mode][1], 1);
    int ended = strike(j, nth, delay, sum);
    if (mode < MODES) unsetenv(modes[mode][0]);
    for (int k = 0; k < world && ended; k++)
        if (k != j->victim) check_survivor(j, k, sum);
    munmap(j, sizeof *j);
}
TEST(nccl_faults, kill_9_at_seeded_points, SECONDS(120)) { kills(20, one_kill); }
TEST(long_nccl_faults, kill_9_at_seeded_points, SECONDS(1200) | AT_NIGHT(STUB)) { kills(200, one_kill); }

/* ---- a rank that stalls, or does not come ---------------------------------------------------- */

static const struct {
    const char *name;
    int world, victim, place, timeout_ms;
} stops[] = {{"W=2/rank_1", 2, 1, AT_STEP, 1000},
             {"W=3/rank_0", 3, 0, AT_FINALIZE, 3000}, /* rank 0 serves the store */
             {"W=4/rank_2", 4, 2, AT_STEP, 1000}};

TEST_P(nccl_faults, stopped_rank_is_a_timeout, stops) {
    job *j = make_job(row->world, row->timeout_ms, train);
    j->victim = row->victim;
    start(j);
    J_CHECK(j, await(j, j->victim, row->place, 8), "it does not run");
    mark(j);
    kill(j->pid[j->victim], SIGSTOP);
    J_CHECK(j, await_results(j, j->victim, 8000), "a rank hangs");
    kill(j->pid[j->victim], SIGCONT);
    J_CHECK(j, !finish(j, 5000), "a rank hangs after the victim goes on");
    all_got(j, -1, FSDP_ERR_TIMEOUT, NULL);
    for (int k = 0; k < row->world; k++) /* or name a rank that waits for it */
        J_CHECK(j, names(j->rank[k].text, k, j->victim) || strstr(j->rank[k].text, "; it is in "),
                "rank %d does not name it", k);
    all_in_time(j, j->victim, 1500 + j->timeout_ms);
}

static void oversleeps(job *j, fsdp_world *world) {
    (void)world;
    usleep((useconds_t)(j->timeout_ms + 1000) * 1000);
}
static void meets_elsewhere(job *j, fsdp_world *world) {
    (void)j;
    (void)fsdp_barrier(world);
}

static const struct {
    const char *name;
    void (*quirk)(job *, fsdp_world *);
    int world, victim, other;
    const char *said;
} absences[] = {{"sleeps", oversleeps, 3, 1, -1, "its last operation was"},
                {"sleeps/rank_0", oversleeps, 2, 0, -1, "its last operation was"},
                {"two_sleep", oversleeps, 3, 1, 2, "ranks 1, 2 have not come"},
                {"is_elsewhere", meets_elsewhere, 3, 2, -1, "it is in "}};

TEST_P(nccl_faults, rank_that_does_not_come, absences) {
    job *j = make_job(row->world, 600, train);
    j->victim = row->victim, j->other = row->other, j->quirk = row->quirk;
    start(j);
    J_CHECK(j, !finish(j, 8000), "a rank hangs");
    all_got(j, -1, FSDP_ERR_TIMEOUT, row->said);
    for (int k = 0; k < row->world; k++)
        J_CHECK(j, is_victim(j, k) || took_ms(j, k) <= j->timeout_ms + allowed_ms(j, 1500),
                "rank %d: after %d ms", k, took_ms(j, k));
    for (int k = 0; k < row->world; k++) {
        if (is_victim(j, k)) continue;
        J_CHECK(j, names(j->rank[k].text, k, row->victim), "rank %d names nobody", k);
        J_CHECK(j, row->other < 0 || names(j->rank[k].text, k, row->other), "only one is named");
    }
}

/* ---- ranks that call something else ---------------------------------------------------------- */

static fsdp_status sums(trainer *t) {
    double x = 1;
    return fsdp_all_reduce(t->world, NULL, &x, 1, FSDP_F64, FSDP_SUM);
}
static fsdp_status sums_two(trainer *t) {
    double x[2] = {1, 1};
    return fsdp_all_reduce(t->world, NULL, x, 2, FSDP_F64, FSDP_SUM);
}
static fsdp_status sums_integers(trainer *t) {
    int64_t x = 1;
    return fsdp_all_reduce(t->world, NULL, &x, 1, FSDP_I64, FSDP_SUM);
}
static fsdp_status takes_most(trainer *t) {
    double x = 1;
    return fsdp_all_reduce(t->world, NULL, &x, 1, FSDP_F64, FSDP_MAX);
}
static fsdp_status sends_to_all(trainer *t) {
    double x = 1;
    return fsdp_broadcast(t->world, NULL, &x, sizeof x, 0);
}
static fsdp_status gathers_0(trainer *t) {
    TRY(forward(t, 0));
    return sums(t);
}
static fsdp_status gathers_1(trainer *t) {
    TRY(forward(t, 1));
    return sums(t);
}

typedef struct {
    const char *name;
    fsdp_status (*call)(trainer *), (*odd)(trainer *);
    const char *differs, *said[2]; /* said: texts of either side */
} mismatch;
static const mismatch mismatches[] = {
    {"kind", sums, sends_to_all, "operation", {"all_reduce of 'fsdp_all_reduce'", "broadcast of"}},
    {"count", sums, sums_two, "count", {"1 elements of f64", "2 elements of f64"}},
    {"dtype", sums, sums_integers, "dtype", {"1 elements of f64", "1 elements of i64"}},
    {"reduction", sums, takes_most, "reduction", {"all_reduce", "rank 1"}},
    {"unit", gathers_0, gathers_1, "unit", {"all_gather of 'unit0'", "all_gather of 'unit1'"}},
};

static void differ(job *j, int rank) {
    const mismatch *m = (const mismatch *)j->extra;
    fsdp_world_desc d = desc_of(j, rank);
    fsdp_world *world;
    trainer t;
    fsdp_status status = fsdp_init(&d, &world);
    if (!status) status = make_trainer(&t, world);
    if (!status) status = train_step(j, &t, 0);
    if (rank == j->victim) mark(j);
    if (!status) status = (rank == j->victim ? m->odd : m->call)(&t);
    leave(j, rank, world, status);
}

static void ranks_differ(const mismatch *row, int timeout_ms, int limit_ms) {
    job *j = make_job(3, timeout_ms, differ);
    j->victim = 1, j->extra = row;
    start(j);
    J_CHECK(j, !finish(j, 8000), "a rank hangs");
    all_got(j, -1, FSDP_ERR_MISMATCH, row->said[0]);
    all_got(j, -1, FSDP_ERR_MISMATCH, row->said[1]);
    all_got(j, -1, FSDP_ERR_MISMATCH, row->differs);
    all_name(j, -1, 1);
    all_in_time(j, -1, limit_ms);
}
TEST_P(nccl_faults, ranks_that_differ_get_mismatch_at_the_deadline, mismatches) {
    ranks_differ(row, 600, 600 + 1500);
}
TEST_P(nccl_faults, ranks_that_differ_get_mismatch_at_once, mismatches) {
    setenv("FSDP_NCCL_CHECK", "1", 1);
    ranks_differ(row, 20000, 1000);
}

/* ---- errors that come by themselves ---------------------------------------------------------- */

enum { ASLEEP_MS = 800 };
static void breaks(job *j, fsdp_world *world) {
    (void)j, (void)world;
    stub_async_error(NULL, ncclRemoteError);
}
static void breaks_and_sleeps(job *j, fsdp_world *world) {
    breaks(j, world);
    usleep(ASLEEP_MS * 1000);
}

/* The other rank is late, so that the victim waits when it happens. */
enum { LATE_MS = 800, SOON_MS = 200 };
static void *happens_soon(void *arg) {
    usleep(SOON_MS * 1000);
    mark(my_job);
    if (arg) fsdp_abort((fsdp_world *)arg, "out of data");
    else stub_async_error(NULL, ncclRemoteError);
    return NULL;
}
static void soon(const job *j, fsdp_world *world) {
    pthread_t thread;
    if (h_rank != j->victim) {
        usleep(LATE_MS * 1000);
        return;
    }
    CHECK_EQ_INT(pthread_create(&thread, NULL, happens_soon, world), 0);
    (void)pthread_detach(thread);
}
static void breaks_while_it_waits(job *j, fsdp_world *world) {
    (void)world;
    soon(j, NULL);
}
static void aborts_while_it_waits(job *j, fsdp_world *world) { soon(j, world); }

static const struct {
    const char *name;
    void (*quirk)(job *, fsdp_world *);
    int other, offload, sleeps_ms; /* sleeps_ms: how long the victims are outside the library */
    fsdp_status status;
    const char *said;
} errors[] = {
    {"nccl/training", breaks, -1, 0, 0, FSDP_ERR_BACKEND, "remote error"},
    {"nccl/asleep", breaks_and_sleeps, -1, 0, ASLEEP_MS, FSDP_ERR_BACKEND, "remote error"},
    {"nccl/in_all_reduce", breaks_while_it_waits, 0, 0, LATE_MS, FSDP_ERR_BACKEND, "remote error"},
    {"nccl/in_finalize", breaks_while_it_waits, 0, 1, LATE_MS, FSDP_ERR_BACKEND, "remote error"},
    {"abort/in_all_reduce", aborts_while_it_waits, 0, 0, LATE_MS, FSDP_ERR_ABORTED, "out of data"},
    {"abort/in_finalize", aborts_while_it_waits, 0, 1, LATE_MS, FSDP_ERR_ABORTED, "out of data"},
};

TEST_P(nccl_faults, error_ends_all_ranks, errors) {
    job *j = make_job(3, 20000, train);
    j->victim = 1, j->other = row->other, j->offload = row->offload, j->quirk = row->quirk;
    start(j);
    J_CHECK(j, !finish(j, 8000), "a rank hangs");
    all_got(j, -1, row->status, row->said);
    all_name(j, -1, 1);
    /* NCCL does not say whether a rank has left: the library waits a second for the store to say
       so. */
    int limit_ms = 300 + (row->status == FSDP_ERR_BACKEND ? 1000 : 0);
    for (int k = 0; k < 3; k++) {
        int is_asleep = row->other < 0 ? k == 1 : k == row->other;
        J_CHECK(j, took_ms(j, k) <= (is_asleep ? row->sleeps_ms : 0) + allowed_ms(j, limit_ms),
                "rank %d: after %d ms", k, took_ms(j, k));
    }
    all_in_time(j, -1, limit_ms + row->sleeps_ms);
}

/* ---- NCCL's error, which names no rank, and the store's, which does -------------------------- */

/* From a certain point the clock stands still: only events decide, and the test moves the clock. */
static int64_t stopped_ns; /* 0: the clock runs */
static int64_t stopped_clock(void *user) {
    int64_t at = __atomic_load_n(&stopped_ns, __ATOMIC_SEQ_CST);
    (void)user;
    return at ? at : now_ns();
}

typedef struct {
    const char *name;
    int in_call, left_first; /* in_call: a call of NCCL fails; 0: the watchdog sees the error */
    int deadline_ms;         /* deadline of the call; 0: the default */
    int passes_ms;           /* after the error, before a rank leaves */
    int leaves;
    fsdp_status status;
    const char *said;
} blame;
static const blame blames[] = {
    {"watchdog/error_first", 0, 0, 0, 150, 1, FSDP_ERR_PEER_LOST, "rank 2 has shut down"},
    {"watchdog/left_first", 0, 1, 0, 0, 1, FSDP_ERR_PEER_LOST, "rank 2 has shut down"},
    {"watchdog/nobody_leaves", 0, 0, 0, 1100, 0, FSDP_ERR_BACKEND, "remote error"},
    {"call/error_first", 1, 0, 0, 150, 1, FSDP_ERR_PEER_LOST, "rank 2 has shut down"},
    {"call/nobody_leaves", 1, 0, 0, 1100, 0, FSDP_ERR_BACKEND, "remote error"},
    {"call/deadline", 1, 0, 300, 400, 0, FSDP_ERR_BACKEND, "remote error"}};

static fsdpi_nccl_comm *comm_of(const fsdp_world *world) {
    return (fsdpi_nccl_comm *)(void *)world->comm;
}

/* Waits until the watchdog has looked twice. */
static void await_looks(const fsdpi_comm *c) {
    int64_t before = stub_count("ncclCommGetAsyncError");
    for (long ns = 0; stub_count("ncclCommGetAsyncError") < before + 3 && !fsdpi_comm_failed(c);)
        h_nap(&ns);
}

static void await_left(const fsdpi_comm *c) {
    __atomic_add_fetch(&my_job->gate, 1, __ATOMIC_SEQ_CST); /* now the victim leaves */
    for (long ns = 0; !fsdpi_store_has_left(fsdpi_store_world_of(c)->store, my_job->victim) &&
                      !fsdpi_comm_failed(c);)
        h_nap(&ns);
}

/* Runs in addition to a rank that waits for the victim. */
static void *watches_the_wait(void *arg) {
    const blame *b = (const blame *)my_job->extra;
    const fsdpi_comm *c = (const fsdpi_comm *)arg;
    long ns = 0;
    if (b->left_first) await_left(c);
    if (!b->in_call) stub_async_error(NULL, ncclRemoteError);
    while (b->in_call && !stub_failed() && !fsdpi_comm_failed(c)) h_nap(&ns);
    if (b->left_first) return NULL;
    if (!b->in_call) await_looks(c);
    do { /* if no rank leaves, the wait for a cause may begin after the first time */
        __atomic_add_fetch(&stopped_ns, (int64_t)b->passes_ms * 1000000, __ATOMIC_SEQ_CST);
        h_nap(&ns);
    } while (!b->leaves && !b->deadline_ms && !fsdpi_comm_failed(c));
    if (!b->in_call) await_looks(c);
    if (b->leaves) await_left(c);
    return NULL;
}

static void one_is_to_blame(job *j, int rank) {
    const blame *b = (const blame *)j->extra;
    fsdp_world_desc d = desc_of(j, rank);
    fsdp_world *world;
    pthread_t thread;
    double sum = 1;
    if (rank != j->victim) d.clock.now_ns = stopped_clock;
    fsdp_status status = fsdp_init(&d, &world);
    if (!status) status = fsdp_barrier(world);
    CHECK_MSG(!status, "%s", fsdp_last_error(NULL));
    await_ranks(j, j->world); /* none is in the barrier when the world fails */
    if (rank == j->victim && b->leaves) {
        await_ranks(j, 2 * j->world);
        shuts_down(j, world);
    }
    if (rank == j->victim) {
        for (long ns = 0; !fsdpi_comm_failed(&comm_of(world)->base);) h_nap(&ns);
    } else {
        __atomic_store_n(&stopped_ns, now_ns(), __ATOMIC_SEQ_CST);
        if (b->deadline_ms)
            comm_of(world)->base.world->boot.timeout_ns = (int64_t)b->deadline_ms * 1000000;
        if (b->in_call) stub_fail("ncclAllReduce", 1, ncclRemoteError);
        CHECK_EQ_INT(pthread_create(&thread, NULL, watches_the_wait, &comm_of(world)->base), 0);
    }
    status = fsdp_all_reduce(world, NULL, &sum, 1, FSDP_F64, FSDP_SUM);
    if (rank != j->victim) (void)pthread_join(thread, NULL);
    __atomic_store_n(&stopped_ns, 0, __ATOMIC_SEQ_CST);
    leave(j, rank, world, status);
}

TEST_P(nccl_faults, error_and_who_has_left, blames) {
    job *j = make_job(3, 100000000, one_is_to_blame); /* practically no deadline */
    j->victim = 2, j->extra = row;
    start(j);
    J_CHECK(j, !finish(j, 8000), "a rank hangs");
    all_got(j, row->leaves ? j->victim : -1, row->status, row->said);
}

/* ---- the device fails ------------------------------------------------------------------------ */

static void device_fails(job *j, fsdp_world *world) {
    (void)world;
    stub_fail((const char *)j->extra, 1, cudaErrorLaunchFailure); /* sticky */
}

static const struct {
    const char *name;
} calls[] = {{"cudaEventQuery"}, {"cudaEventRecord"}, {"cudaStreamWaitEvent"},
             {"launch"},         {"cudaMemsetAsync"}, {"cudaStreamIsCapturing"}};

TEST_P(nccl_faults, sticky_error_of_the_device, calls) {
    job *j = make_job(3, 20000, train);
    j->victim = 1, j->extra = row->name, j->quirk = device_fails;
    start(j);
    J_CHECK(j, !finish(j, 8000), "a rank hangs");
    all_got(j, -1, FSDP_ERR_BACKEND, "719");
    all_name(j, -1, 1);
    all_in_time(j, -1, 1000);
}

static void never_ends(job *j, fsdp_world *world) {
    (void)world;
    launch(NULL, NULL, 0, &j->gate);
}

static const struct {
    const char *name;
    int world, offload;
} endless[] = {{"W=1/offload", 1, 1}, {"W=3", 3, 0}, {"W=3/offload", 3, 1}};

/* A user's kernel does not end on one rank, which then waits for its device. */
TEST_P(nccl_faults, kernel_that_never_ends, endless) {
    job *j = make_job(row->world, 500, train);
    j->victim = 0, j->offload = row->offload, j->quirk = never_ends;
    start(j);
    J_CHECK(j, await_results(j, -1, 5000), "a rank hangs");
    J_CHECK(j, !finish(j, 8000), "a rank hangs in shutdown");
    all_got(j, -1, FSDP_ERR_TIMEOUT, NULL);
    all_in_time(j, -1, j->timeout_ms + 4000);
}

/* ---- ranks that leave ------------------------------------------------------------------------ */

static const struct {
    const char *name;
    void (*quirk)(job *, fsdp_world *);
    int victim;
    const char *said;
} leavings[] = {{"shutdown/rank_1", shuts_down, 1, "rank 1 has shut down"},
                {"shutdown/rank_0", shuts_down, 0, "rank 0 has shut down"},
                {"exit/rank_1", exits, 1, "rank 1"}};

TEST_P(nccl_faults, rank_that_leaves, leavings) {
    job *j = make_job(3, 20000, train);
    j->victim = row->victim, j->quirk = row->quirk;
    start(j);
    J_CHECK(j, !finish(j, 8000), "a rank hangs");
    all_got(j, row->victim, FSDP_ERR_PEER_LOST, row->said);
    all_in_time(j, row->victim, 1000);
    CHECK_EQ_INT(j->rank[row->victim].status, 0);
}

static void leaves_one_by_one(job *j, int rank) {
    fsdp_world_desc d = desc_of(j, rank);
    fsdp_world *world;
    trainer t;
    const int *apart_ms = (const int *)j->extra;
    fsdp_status status = fsdp_init(&d, &world);
    if (!status) status = make_trainer(&t, world);
    for (int step = 0; !status && step < 3; step++) status = train_step(j, &t, step);
    if (!status) status = fsdp_barrier(world);
    int order = *apart_ms < 0 ? j->world - 1 - rank : rank;
    usleep((useconds_t)(order * abs(*apart_ms)) * 1000);
    leave(j, rank, world, status);
}

static const struct {
    const char *name;
    int world, apart_ms; /* < 0: the last rank first */
} orders[] = {{"0.3s", 3, 300}, {"0.3s/backwards", 3, -300}, {"3s", 2, 3000}};

TEST_P(nccl_faults, ranks_leave_one_by_one, orders) {
    job *j = make_job(row->world, 20000, leaves_one_by_one);
    j->extra = &row->apart_ms;
    start(j);
    J_CHECK(j, !finish(j, 15000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
    for (int k = 0; k < row->world; k++)
        J_CHECK(j, shutdown_ms(j, k) <= allowed_ms(j, 1500), "rank %d: %d ms", k,
                shutdown_ms(j, k));
}

/* ---- the store ends -------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int tcp, is_killed;
} launchers[] = {{"host/killed", 0, 1}, {"tcp/killed", 1, 1}, {"tcp/stopped", 1, 0}};

/* If the server dies, the job fails. If it ends in order, the job continues. */
TEST_P(nccl_faults, launcher_that_serves_ends, launchers) {
    job *j = make_job(3, 20000, train);
    int port = h_free_port();
    if (row->tcp) snprintf(j->store, sizeof j->store, "tcp://127.0.0.1:%d", port);
    j->rounds = row->is_killed ? 1 << 30 : 300;
    launcher_ends(j, row->is_killed);
    all_got(j, -1, row->is_killed ? FSDP_ERR_PEER_LOST : FSDP_OK, row->is_killed ? "launcher" : "");
    if (row->is_killed) all_in_time(j, -1, 1000);
}

/* ---- the flight record ----------------------------------------------------------------------- */

/* Maps the flight record of a rank, whose entries are read from the oldest to the newest. */
static const fsdpi_flight_record *map_record(const char *dir, int rank) {
    char pattern[420];
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/*.%d.flight", dir, rank);
    CHECK_EQ_INT(glob(pattern, 0, NULL, &found), 0);
    CHECK_EQ_INT(found.gl_pathc, 1);
    int fd = open(found.gl_pathv[0], O_RDONLY);
    void *at = mmap(NULL, sizeof(fsdpi_flight_record), PROT_READ, MAP_SHARED, fd, 0);
    CHECK(at != MAP_FAILED);
    close(fd);
    globfree(&found);
    return (const fsdpi_flight_record *)at;
}

static const struct {
    const char *name;
    int odd_step;
} flights[] = {{"few", 5}, {"wraps", 450}};

/* The watchdog notes when an operation on a stream has ended. The operation that a sleeping rank
   has left out has not ended on the others, and every operation before it has. */
TEST_P(nccl_faults, flight_record, flights) {
    job *j = make_job(3, 2000, train);
    char dir[400];
    snprintf(dir, sizeof dir, "%s/flight", h_tmpdir());
    setenv("FSDP_FLIGHT_RECORD", dir, 1);
    j->victim = 1, j->quirk = oversleeps, j->odd_step = row->odd_step;
    start(j);
    J_CHECK(j, !finish(j, 20000), "a rank hangs");
    all_got(j, -1, FSDP_ERR_TIMEOUT, NULL);
    for (int k = 0; k < 3; k++) {
        const fsdpi_flight_record *f = map_record(dir, k);
        const fsdpi_flight_op *open_op = NULL, *last = NULL;
        uint64_t from = f->begun > FSDPI_FLIGHT_OPS ? f->begun - FSDPI_FLIGHT_OPS : 0;
        for (uint64_t i = from; i < f->begun; i++) {
            last = &f->op[i % FSDPI_FLIGHT_OPS];
            CHECK_EQ_INT(last->number, i + 1);
            CHECK(!last->end_ns || last->end_ns >= last->begin_ns);
            if (!last->end_ns && !open_op) open_op = last;
            CHECK_MSG(!open_op || !last->end_ns || last->comm != open_op->comm,
                      "rank %d: a later operation of the group has ended", k);
        }
        CHECK_EQ_INT(f->state, FSDPI_FLIGHT_FAILED);
        CHECK_EQ_INT(f->status, FSDP_ERR_TIMEOUT);
        CHECK_MSG(strstr(f->failure, "rank 1 has not come"), "%s", f->failure);
        CHECK_MSG(strstr(f->failure, "(flight record "), "%s", f->failure);
        CHECK(f->num_comms >= 4); /* none, the world, and the two of the mesh */
        CHECK_MSG(row->odd_step > 100 ? f->begun > FSDPI_FLIGHT_OPS : f->begun > 50, "%d entries",
                  (int)f->begun);
        if (k == j->victim) { /* it slept after the step's last operation, and woke too late */
            if (last == open_op) last = &f->op[(f->begun - 2) % FSDPI_FLIGHT_OPS];
            CHECK(last->end_ns > 0);
            CHECK_EQ_INT(last->kind, FSDP_OP_ALL_REDUCE);
            CHECK_EQ_STR(last->what, "fsdp_all_reduce");
        } else {
            CHECK(open_op);
            const int is_it = open_op->kind == FSDP_OP_ALL_GATHER && !strcmp(open_op->what, "unit0");
            /* on a busy machine the watchdog may not have seen the end of the one before */
            CHECK_MSG(is_it || allowed_ms(j, 0) > 100, "%s", open_op->what);
        }
    }
}

/* ---- more operations under way than there are entries ---------------------------------------- */

static const fsdp_comm_ops *ops(void) { return fsdp_nccl_comm_ops(); }

static void floods(job *j, int rank) {
    fsdp_boot boot = boot_of(j, rank);
    fsdp_caps caps;
    fsdp_comm *world;
    fsdp_coll c;
    void *data = NULL;
    cudaStream_t stream = NULL;
    work k = {NULL, NULL, 0, &j->gate};
    memset(&c, 0, sizeof c);
    fsdp_status status = ops()->open(&boot, &caps, &world);
    CHECK_MSG(!status, "%s", ops()->error_text(NULL));
    CHECK_OK(ops()->alloc(world, 64, &data));
    CHECK_EQ_INT(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), 0);
    CHECK_EQ_INT(fsdp_stub_launch(work_body, &k, sizeof k, 1, stream), 0);
    c.kind = FSDP_OP_ALL_REDUCE, c.dtype = c.out_dtype = FSDP_F32, c.redop = FSDP_MAX;
    c.what = "flood", c.scale = 1, c.count = 16, c.src = c.dst = data, c.stream = stream;
    for (int i = 0; !status && i < j->rounds; i++) {
        c.seq = (uint64_t)i + 1;
        at(j, rank, AT_STEP);
        status = ops()->run(world, &c);
    }
    tell(j, rank, status, ops()->error_text(world));
    while (!__atomic_load_n(&j->gate, __ATOMIC_SEQ_CST)) usleep(1000); /* cudaFree waits for it */
    cudaError_t ended = cudaStreamSynchronize(stream);
    j->rank[rank].again = j->rank[rank].shutdown = (int)ops()->poll(world);
    CHECK_EQ_INT(ended, 0);
    CHECK_EQ_INT(cudaStreamDestroy(stream), 0);
    ops()->close(world);
}

static job *make_flood(int timeout_ms) {
    job *j = make_job(2, timeout_ms, floods);
    j->rounds = 3 * FLIGHTS;
    start(j);
    for (int k = 0; k < 2; k++) J_CHECK(j, await(j, k, AT_STEP, FLIGHTS + 1), "it does not run");
    return j;
}

TEST(nccl_faults, operations_wait_for_an_entry_and_go_on) {
    job *j = make_flood(20000);
    usleep(100000);
    for (int k = 0; k < 2; k++) CHECK_EQ_INT(j->rank[k].visits[AT_STEP], FLIGHTS + 1);
    __atomic_store_n(&j->gate, 1, __ATOMIC_SEQ_CST);
    J_CHECK(j, !finish(j, 20000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
    for (int k = 0; k < 2; k++) CHECK_EQ_INT(j->rank[k].visits[AT_STEP], 3 * FLIGHTS);
}

TEST(nccl_faults, wait_for_an_entry_has_a_deadline) {
    job *j = make_flood(1000);
    J_CHECK(j, await_results(j, -1, 6000), "a rank hangs");
    __atomic_store_n(&j->gate, 1, __ATOMIC_SEQ_CST);
    J_CHECK(j, !finish(j, 8000), "a rank hangs after its deadline");
    all_got(j, -1, FSDP_ERR_TIMEOUT, "work before it on the device is not done within");
    all_in_time(j, -1, j->timeout_ms + 1500);
}

/* ---- nothing is left behind ------------------------------------------------------------------ */

/* Checks that no objects of CUDA and NCCL are left, and none of the library's memory. */
static void nothing_lives(const w_heap *heap, int cycle) {
    for (int kind = 0; kind < STUB_KINDS; kind++)
        CHECK_MSG(stub_live(kind) == 0, "cycle %d: %lld objects of kind %d", cycle,
                  (long long)stub_live(kind), kind);
    CHECK_MSG(heap->live == 0, "cycle %d: %lld blocks", cycle, (long long)heap->live);
}

static void no_quirk(int cycle, int rank, fsdp_world *world) {
    (void)cycle, (void)rank, (void)world;
}
static void one_aborts(int cycle, int rank, fsdp_world *world) {
    if (rank == cycle % fsdp_world_size(world)) fsdp_abort(world, "enough");
}
static void one_breaks(int cycle, int rank, fsdp_world *world) {
    stub_async_error(NULL, rank == cycle % fsdp_world_size(world) ? ncclRemoteError : ncclSuccess);
}
static void one_is_late(int cycle, int rank, fsdp_world *world) {
    /* only from now on: a busy machine may take longer to open the next world */
    world->boot.timeout_ns = comm_of(world)->base.world->boot.timeout_ns = 200000000;
    if (rank == cycle % fsdp_world_size(world)) usleep(400000);
}

typedef struct {
    const char *name;
    void (*quirk)(int cycle, int rank, fsdp_world *world);
    int world, cycles, timeout_ms;
    fsdp_status status;
    size_t heap; /* memory that the stub may keep: streams, and communicators that were given up */
} cycle;
static const cycle cycles[] = {{"in_order", no_quirk, 2, CYCLES, 20000, FSDP_OK, 24 << 10},
                               {"aborted", one_aborts, 3, 20, 20000, FSDP_ERR_ABORTED, 24 << 10},
                               {"broken", one_breaks, 2, 6, 20000, FSDP_ERR_BACKEND, 24 << 10},
                               {"late", one_is_late, 2, 4, 20000, FSDP_ERR_TIMEOUT, 40 << 10}};

static void cycles_main(job *j, int rank) {
    const cycle *c = (const cycle *)j->extra;
    usage half;
    w_heap heap;
    for (int i = 0; i < c->cycles; i++) {
        fsdp_world_desc d = desc_of(j, rank);
        fsdp_world *world;
        trainer t;
        w_heap_use(&heap, &d);
        fsdp_status status = fsdp_init(&d, &world);
        CHECK_MSG(!status, "cycle %d: %s", i, fsdp_last_error(NULL));
        CALL(world, make_trainer(&t, world));
        status = train_step(j, &t, 0); /* another rank may have failed already */
        if (!status) c->quirk(i, rank, world);
        for (int k = 1; !status && k < (c->status ? 1 << 30 : 3); k++)
            status = train_step(j, &t, k);
        CHECK_MSG(status == c->status, "cycle %d: %s", i, fsdp_last_error(world));
        CHECK_STATUS(fsdp_shutdown(world), c->status);
        stub_async_error(NULL, ncclSuccess);
        nothing_lives(&heap, i);
        if (i == c->cycles / 2 - 1) half = usage_now();
    }
    same_usage(half, c->heap);
}

TEST_P(nccl_faults, worlds_leave_nothing, cycles, SECONDS(120)) {
    job *j = make_job(row->world, row->timeout_ms, cycles_main);
    int64_t begin = now_ns();
    j->extra = row;
    start(j);
    J_CHECK(j, !finish(j, 60000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
    h_message("%d cycles of %.1f ms", row->cycles, (double)(now_ns() - begin) * 1e-6 / row->cycles);
}

/* A call of NCCL that does not return is abandoned, with its thread and communicators. */
static void hung_open(job *j, int rank) {
    fsdp_world_desc d = desc_of(j, rank);
    fsdp_world *world;
    trainer t;
    w_heap heap;
    usage before = usage_now();
    w_heap_use(&heap, &d);
    CHECK_STATUS(fsdp_init(&d, &world), FSDP_ERR_TIMEOUT);
    usage now = usage_now();
    CHECK_MSG(now.threads <= before.threads + 2, "%d threads, then %d", before.threads,
              now.threads);
    CHECK_MSG(heap.live <= 1, "%lld blocks", (long long)heap.live);
    for (int kind = 0; kind < STUB_KINDS; kind++)
        CHECK_MSG(stub_live(kind) == 0 || kind == STUB_COMMS, "%lld objects of kind %d",
                  (long long)stub_live(kind), kind);
    CHECK(stub_live(STUB_COMMS) <= 1);
    d = desc_of(j, 0); /* the process is still usable */
    d.world_size = 1;
    CHECK_OK(fsdp_init(&d, &world));
    CALL(world, make_trainer(&t, world));
    CALL(world, train_step(j, &t, 0));
    CHECK_OK(fsdp_shutdown(world));
}

TEST(nccl_faults, hung_open_leaves_a_thread) {
    job *j = make_making(3, 1, 1, 0, 500);
    j->body = hung_open;
    start(j);
    J_CHECK(j, !finish(j, 8000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
}
