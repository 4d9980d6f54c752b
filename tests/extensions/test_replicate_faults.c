/* test_replicate_faults.c - a rank that dies, stops or leaves out fsdp_replicate_post_backward
   between two buckets: the others end within their deadline, with a status and a text that name the
   bucket they wait for and the rank. Ranks are processes on the backend of FSDP_BACKEND: shared
   memory, Gloo, and NCCL on the stubs of tests/stubs.

   SPDX-License-Identifier: MIT */
#define TAGS SLOW | GLOO | NCCL | AT_NIGHT(ASAN)
#include "harness.h"
#include "library.c"
#include "lab.h"
#include "faults.h"

/* Three buckets: (5, 4), (3, 2), (1, 0). */
enum { PARAMS = 6, NUMEL = 64, BUCKETS = 3, ODD_STEP = 3 };

typedef struct {
    fsdp_world *world;
    fsdp_model *model;
    fsdp_replicate *rep;
} trainer;

static fsdp_status make_trainer(trainer *t) {
    static const char *const names_of[PARAMS] = {"w0", "b0", "w1", "b1", "w2", "b2"};
    const int64_t cap = 2 * NUMEL * (int64_t)sizeof(float);
    fsdp_param_desc p[PARAMS];
    fsdp_replicate_desc d = FSDP_ZERO;
    for (int i = 0; i < PARAMS; i++) p[i] = fsdp_vec(names_of[i], NUMEL);
    TRY(fsdp_model_create(t->world, NULL, &t->model));
    d.params = p, d.num_params = PARAMS, d.caps = &cap, d.num_caps = 1;
    TRY(fsdp_replicate_create(t->model, &d, &t->rep));
    CHECK_EQ_INT(fsdp_replicate_num_buckets(t->rep), BUCKETS);
    return fsdp_init_params(t->model, first_values, NULL);
}

/* Computes the gradient of parameter i and marks it ready. */
static fsdp_status write_grad(const trainer *t, int i) {
    const float *data = (const float *)fsdp_replicate_data(t->rep, i);
    float *grad = (float *)fsdp_replicate_grad(t->rep, i);
    if (!data || !grad) return fsdp_replicate_ready(t->rep, i, 1); /* returns the reason */
    for (int k = 0; k < NUMEL; k++) grad[k] += data[k] / 8 + (float)fsdp_rank(t->world);
    return fsdp_replicate_ready(t->rep, i, 1);
}

/* Waits until the first bucket is reduced on all ranks, and no rank is in it any more. */
static void meet(job *j, const trainer *t) {
    fsdpi_drain(t->world);
    at(j, fsdp_rank(t->world), AT_ODD);
    for (int k = 0; k < j->world; k++)
        while (!__atomic_load_n(&j->rank[k].visits[AT_ODD], __ATOMIC_SEQ_CST)) usleep(300);
}

static fsdp_status train_step(job *j, trainer *t, int step) {
    const int rank = fsdp_rank(t->world);
    double loss = rank;
    int left_out = 0;
    at(j, rank, AT_STEP);
    TRY(fsdp_replicate_pre_forward(t->rep));
    TRY(fsdp_replicate_post_forward(t->rep));
    for (int i = PARAMS; i-- > 0 && !left_out;) {
        TRY(write_grad(t, i));
        if (step != j->odd_step || i != PARAMS - 2) continue;
        meet(j, t);
        if (!is_victim(j, rank)) continue;
        mark(j);
        left_out = j->quirk != NULL;
        if (!left_out) (void)raise(*(const int *)j->extra);
    }
    if (left_out) j->quirk(j, t->world);
    else TRY(fsdp_replicate_post_backward(t->rep));
    TRY(fsdp_finalize_backward(t->model));
    TRY(fsdp_zero_grad(t->model));
    return fsdp_all_reduce(t->world, NULL, &loss, 1, FSDP_F64, FSDP_SUM);
}

static void train(job *j, int rank) {
    fsdp_world_desc d = desc_of(j, rank);
    fsdp_status status;
    trainer t;
    memset(&t, 0, sizeof t);
    at(j, rank, AT_INIT);
    status = fsdp_init(&d, &t.world);
    if (!status) status = make_trainer(&t);
    for (int step = 0; !status && step < j->rounds; step++) status = train_step(j, &t, step);
    leave(j, rank, t.world, status);
}

typedef struct {
    const char *name;
    int world, victim, lanes;
} where;
static const where wheres[] = {
    {"W=2/rank_1", 2, 1, 0}, {"W=3/rank_0", 3, 0, 0}, {"W=3/rank_2/lanes", 3, 2, 2}};

static job *make_job(const where *w, int timeout_ms) {
    job *j = new_job(NULL, w->world, timeout_ms, train);
    j->victim = w->victim, j->lanes = w->lanes, j->odd_step = ODD_STEP, j->rounds = 2 * ODD_STEP;
    j->begin = environment;
    return j;
}
/* Checks that the others have this status, and name the second bucket and the rank. */
static void all_blame(const job *j, fsdp_status status, int limit_ms) {
    all_got(j, j->victim, status, on_nccl() && j->lanes ? NULL : "'bucket.1'");
    all_name(j, j->victim, j->victim);
    all_know(j, j->victim, limit_ms);
}

TEST_P(replicate_faults, undisturbed, wheres) {
    job *j = make_job(row, 20000);
    j->victim = -1;
    start(j);
    J_CHECK(j, !finish(j, 20000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
}

TEST_P(replicate_faults, rank_dies_between_buckets, wheres) {
    static const int how = SIGKILL;
    job *j = make_job(row, 20000);
    j->extra = &how;
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    J_CHECK(j, WIFSIGNALED(j->rank[row->victim].how), "the victim has not died");
    all_blame(j, FSDP_ERR_PEER_LOST, 1000);
}

TEST_P(replicate_faults, rank_stops_between_buckets, wheres) {
    static const int how = SIGSTOP;
    job *j = make_job(row, 1000);
    j->extra = &how;
    start(j);
    J_CHECK(j, await_results(j, row->victim, 10000), "a rank hangs");
    kill(j->pid[row->victim], SIGCONT);
    J_CHECK(j, !finish(j, 10000), "a rank hangs after the victim goes on");
    all_blame(j, FSDP_ERR_TIMEOUT, 1500 + j->timeout_ms);
    J_CHECK(j, in_order(&j->rank[row->victim]) && j->rank[row->victim].status, "the victim");
}

/* finalize refuses, and says what is missing. The rank's next call collides with the second bucket,
   or, if reductions have a communicator of their own, the rank counts as missing. */
static void nothing(job *j, fsdp_world *world) { (void)j, (void)world; }
TEST_P(replicate_faults, rank_leaves_out_post_backward, wheres) {
    job *j = make_job(row, 1000);
    const report *r = &j->rank[row->victim];
    const int apart = j->lanes || on_nccl();
    j->quirk = nothing;
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    J_CHECK(j, r->status == FSDP_ERR_INVALID_STATE, "the victim got another status");
    J_CHECK(j,
            strstr(r->text, "'bucket.0'") && strstr(r->text, "1 of 3 are reduced: call "
                                                             "fsdp_replicate_post_backward"),
            "the victim does not know why");
    all_blame(j, apart ? FSDP_ERR_TIMEOUT : FSDP_ERR_MISMATCH, apart ? 1500 + j->timeout_ms : 1000);
    for (int k = 0; k < j->world; k++)
        J_CHECK(j, k == row->victim || strstr(j->rank[k].text, "'fsdp_barrier'"),
                "rank %d does not say where the victim is", k);
}

/* The rank calls nothing more. */
TEST_P(replicate_faults, rank_ends_without_post_backward, wheres) {
    job *j = make_job(row, 20000);
    j->quirk = shuts_down;
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    all_blame(j, FSDP_ERR_PEER_LOST, 1000);
}
