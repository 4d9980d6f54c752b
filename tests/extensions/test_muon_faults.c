/* test_muon_faults.c - a rank dies or stops within a bucket of matrices, has another learning rate,
   or takes other matrices: the others end within their deadline, with a status and a text that name
   muon_step and the rank. Ranks are processes on the backend of FSDP_BACKEND: shared memory, Gloo,
   and NCCL on the stubs of tests/stubs.

   SPDX-License-Identifier: MIT */
#define TAGS SLOW | GLOO | NCCL | AT_NIGHT(ASAN)
#include "harness.h"
#include "library.c"
#include "lab_muon.h"
#include "faults.h"

enum { MATRICES = 6, ROWS = 8, COLUMNS = 12, ODD_STEP = 3 };

typedef struct {
    job *j;
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *unit[MATRICES];
    fsdp_muon *muon;
    int step, exchanges; /* exchanges: in this step */
} trainer;

static int how; /* signal for the victim within a bucket; 0: none */

/* Acts before the third all_to_all of a step: the first two buckets have been sent. */
static int watch(void *user, fsdp_model *model, fsdp_op *op) {
    trainer *t = (trainer *)user;
    (void)model;
    if (op->kind != FSDP_OP_ALL_TO_ALL || ++t->exchanges != 3) return 0;
    if (t->step != ODD_STEP || !how || !is_victim(t->j, fsdp_rank(t->world))) return 0;
    mark(t->j);
    (void)raise(how);
    return 0;
}

static int takes_less(void *user, const fsdp_param_view *v) {
    (void)user;
    return v->ordinal != 2;
}

static fsdp_status make_trainer(trainer *t) {
    fsdp_muon_desc d = fsdp_muon_defaults();
    fsdp_extension watcher = FSDP_ZERO;
    TRY(fsdp_model_create(t->world, NULL, &t->model));
    for (int i = 0; i < MATRICES; i++) {
        fsdp_param_desc p = fsdp_mat("w", ROWS, COLUMNS);
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = &p, ud.num_params = 1;
        TRY(fsdp_fully_shard(t->model, &ud, &t->unit[i]));
    }
    TRY(fsdp_init_params(t->model, first_values, NULL));
    d.bucket_bytes = 1; /* one matrix per owner */
    if (on_nccl()) d.gemm = lab_gemm;
    if (t->j->other == -2 && is_victim(t->j, fsdp_rank(t->world))) d.take = takes_less;
    TRY(fsdp_muon_create(t->model, &d, &t->muon));
    watcher.op = watch, watcher.user = t;
    return fsdp_attach(t->model, &watcher);
}

static fsdp_status train_step(trainer *t) {
    const int rank = fsdp_rank(t->world);
    double lr = 0.01;
    at(t->j, rank, AT_STEP);
    for (int i = 0; i < MATRICES; i++) fsdp_pre_forward(t->unit[i]), fsdp_post_forward(t->unit[i]);
    for (int i = MATRICES - 1; i >= 0; i--) {
        fsdp_pre_backward(t->unit[i]);
        float *grad = (float *)fsdp_grad(t->unit[i], 0);
        for (int k = 0; k < ROWS * COLUMNS; k++) grad[k] += (float)((k * 7 + i) % 11 - 5);
        fsdp_post_backward(t->unit[i]);
    }
    TRY(fsdp_finalize_backward(t->model));
    if (t->j->quirk && t->step == ODD_STEP && is_victim(t->j, rank)) lr = 0.02;
    t->exchanges = 0;
    TRY(fsdp_muon_step(t->muon, lr));
    t->step++;
    return fsdp_zero_grad(t->model);
}

static void train(job *j, int rank) {
    fsdp_world_desc d = desc_of(j, rank);
    fsdp_status status;
    trainer t;
    memset(&t, 0, sizeof t);
    t.j = j;
    at(j, rank, AT_INIT);
    status = fsdp_init(&d, &t.world);
    if (!status) status = make_trainer(&t);
    for (int step = 0; !status && step < j->rounds; step++) status = train_step(&t);
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
    j->victim = w->victim, j->lanes = w->lanes, j->rounds = 2 * ODD_STEP;
    j->begin = environment;
    how = 0;
    return j;
}

TEST_P(muon_faults, undisturbed, wheres) {
    job *j = make_job(row, 20000);
    start(j);
    J_CHECK(j, !finish(j, 20000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
}

TEST_P(muon_faults, rank_dies_in_a_bucket, wheres) {
    job *j = make_job(row, 20000);
    how = SIGKILL;
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    J_CHECK(j, WIFSIGNALED(j->rank[row->victim].how), "the victim has not died");
    all_got(j, j->victim, FSDP_ERR_PEER_LOST, on_nccl() && j->lanes ? NULL : "'muon_step'");
    all_name(j, j->victim, j->victim);
    all_know(j, j->victim, 1000);
}

TEST_P(muon_faults, rank_stops_in_a_bucket, wheres) {
    job *j = make_job(row, 1000);
    how = SIGSTOP;
    start(j);
    J_CHECK(j, await_results(j, row->victim, 10000), "a rank hangs");
    kill(j->pid[row->victim], SIGCONT);
    J_CHECK(j, !finish(j, 10000), "a rank hangs after the victim goes on");
    all_got(j, j->victim, FSDP_ERR_TIMEOUT, on_nccl() && j->lanes ? NULL : "'muon_step'");
    all_name(j, j->victim, j->victim);
    all_know(j, j->victim, 1500 + j->timeout_ms);
}

/* Ranks with different settings all get an error at once. */
static void nothing(job *j, fsdp_world *world) { (void)j, (void)world; }
TEST_P(muon_faults, another_learning_rate, wheres) {
    job *j = make_job(row, 5000);
    if (on_nccl() && j->lanes) return; /* not compared */
    j->quirk = nothing;
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    all_got(j, -1, FSDP_ERR_MISMATCH, "'muon_step'");
}
TEST_P(muon_faults, other_matrices, wheres) {
    job *j = make_job(row, 5000);
    if (on_nccl() && j->lanes) return;
    j->other = -2;
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    all_got(j, -1, FSDP_ERR_MISMATCH, NULL);
}
