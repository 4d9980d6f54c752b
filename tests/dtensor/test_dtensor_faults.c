/* test_dtensor_faults.c - a rank dies or stops within a redistribution, between its two
   collectives, with the blocking call or with begin: the others end within their deadline, with a
   status and a text that name the rank, and those that wait for it name the redistribution. Ranks
   are processes on the backend of FSDP_BACKEND: shared memory, Gloo, and NCCL on the stubs of
   tests/stubs.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "library.c"
#include "lab.h"
#include "faults.h"

/* A tensor that is sharded over both dims of a mesh (2, 2) is gathered in two steps. */
enum { SIDE = 8, ODD_STEP = 3, WORLD = 4 };

typedef struct {
    job *j;
    fsdp_world *world;
    fsdp_model *model;
    fsdp_dmesh *dm;
    fsdp_redistribution *gather;
    float *part, *whole;
    int step, seen, label; /* seen: collectives of this step's redistribution */
} mover;

/* The victim takes part in the first collective, and leaves before the second. */
static int leaves(void *user, fsdp_model *model, fsdp_op *op) {
    mover *t = (mover *)user;
    job *j = t->j;
    const int rank = fsdp_rank(t->world);
    (void)model;
    if (op->label != t->label || op->kind != FSDP_OP_ALL_GATHER) return 0;
    if (++t->seen != 2 || t->step != j->odd_step || !is_victim(j, rank)) return 0;
    (void)fsdp_wait_stream(t->model, -1);
    mark(j);
    (void)raise(*(const int *)j->extra);
    return 0;
}

static fsdp_status make_mover(mover *t) {
    static const char *const names_of[2] = {"dp", "tp"};
    const int32_t mesh[2] = {2, 2};
    const int64_t shape[2] = {SIDE, SIDE};
    const fsdp_placement cut[2] = {{FSDP_SHARD, 0, 0, 0}, {FSDP_SHARD, 1, 0, 0}};
    const fsdp_placement whole[2] = {{FSDP_REPLICATE, 0, 0, 0}, {FSDP_REPLICATE, 0, 0, 0}};
    fsdp_mesh_desc md = FSDP_ZERO;
    fsdp_dmesh_desc dd = FSDP_ZERO;
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_extension watcher = FSDP_ZERO;
    fsdp_mesh *m;
    md.ndim = 2;
    for (int i = 0; i < 2; i++) md.shape[i] = mesh[i], md.names[i] = names_of[i];
    TRY(fsdp_mesh_create(t->world, &md, &m));
    TRY(fsdp_model_create(t->world, NULL, &t->model));
    dd.mesh = m, dd.overlap = 1;
    TRY(fsdp_dmesh_create(t->model, &dd, &t->dm));
    TRY(fsdp_dmesh_alloc(t->dm, SIDE * SIDE * 4, (void **)&t->part));
    TRY(fsdp_dmesh_alloc(t->dm, SIDE * SIDE * 4, (void **)&t->whole));
    d.name = "middle";
    TRY(fsdp_spec_init(&d.from, 2, mesh, cut, FSDP_F32, 2, shape));
    TRY(fsdp_spec_init(&d.to, 2, mesh, whole, FSDP_F32, 2, shape));
    TRY(fsdp_redistribution_create(t->dm, &d, &t->gather));
    t->label = fsdp_label_register(t->model, "activation");
    watcher.op = leaves, watcher.user = t;
    return fsdp_attach(t->model, &watcher);
}

static fsdp_status move(mover *t) {
    const int rank = fsdp_rank(t->world);
    fsdp_redistribution_info info;
    TRY(fsdp_redistribution_get(t->gather, &info));
    CHECK_EQ_INT(info.route.num_collectives, 2);
    at(t->j, rank, AT_STEP);
    t->seen = 0;
    for (int i = 0; i < SIDE * SIDE / WORLD; i++) t->part[i] = (float)(rank * 100 + i + t->step);
    if (t->j->offload) { /* here: uses begin and wait */
        TRY(fsdp_redistribute_begin(t->gather, t->whole, t->part));
        TRY(fsdp_redistribute_wait(t->gather));
    } else TRY(fsdp_redistribute(t->gather, t->whole, t->part));
    TRY(fsdp_wait_stream(t->model, -1));
    for (int i = 0; i < SIDE * SIDE; i++) {
        const int row = i / SIDE, column = i % SIDE, half = SIDE / 2;
        const int from = row / half * 2 + column / half;
        CHECK(t->whole[i] == (float)(from * 100 + row % half * half + column % half + t->step));
    }
    return FSDP_OK;
}

static void moves(job *j, int rank) {
    fsdp_world_desc d = desc_of(j, rank);
    mover t;
    memset(&t, 0, sizeof t);
    t.j = j;
    at(j, rank, AT_INIT);
    fsdp_status status = fsdp_init(&d, &t.world);
    if (!status) status = make_mover(&t);
    for (; !status && t.step < j->rounds; t.step++) status = move(&t);
    leave(j, rank, t.world, status);
}

typedef struct {
    const char *name;
    int victim, lanes, beside;
} where;
static const where wheres[] = {
    {"rank_0", 0, 0, 0}, {"rank_3", 3, 0, 0}, {"rank_2/lanes", 2, 2, 0}, {"rank_1/begun", 1, 2, 1}};

static job *make_job(const where *w, int timeout_ms, const int *signal) {
    job *j = new_job(NULL, WORLD, timeout_ms, moves);
    j->victim = w->victim, j->lanes = w->lanes, j->offload = w->beside;
    j->odd_step = ODD_STEP, j->rounds = 2 * ODD_STEP;
    j->begin = environment, j->extra = signal;
    return j;
}

/* Returns 1 if the text names the victim. With a store, which is in rank 0, a rank that waits for a
   rank other than 0 may say that the store does not answer. */
static int blames(const job *j, int rank) {
    const char *text = j->rank[rank].text;
    return names(text, rank, j->victim) ||
           (getenv("FSDP_BACKEND") && j->victim == 0 && strstr(text, "the store does not answer"));
}
/* Checks that all others have this status and name the rank; at least its partner in the second
   collective names the redistribution. */
static void all_blame(const job *j, fsdp_status status, int limit_ms) {
    int in_the_middle = 0;
    all_got(j, j->victim, status, NULL);
    for (int k = 0; k < WORLD; k++)
        J_CHECK(j, k == j->victim || blames(j, k), "rank %d does not name rank %d", k, j->victim);
    all_know(j, j->victim, limit_ms);
    for (int k = 0; k < WORLD; k++)
        in_the_middle += k != j->victim && strstr(j->rank[k].text, "'middle'") != NULL;
    J_CHECK(j, in_the_middle > 0 || (on_nccl() && j->lanes), "nobody says in what it was");
}

TEST_P(dtensor_faults, undisturbed, wheres) {
    job *j = make_job(row, 20000, NULL);
    j->victim = -1;
    start(j);
    J_CHECK(j, !finish(j, 20000), "a rank hangs");
    all_got(j, -1, FSDP_OK, NULL);
}

TEST_P(dtensor_faults, rank_dies_in_the_middle, wheres) {
    static const int how = SIGKILL;
    job *j = make_job(row, 20000, &how);
    start(j);
    J_CHECK(j, !finish(j, 10000), "a rank hangs");
    J_CHECK(j, WIFSIGNALED(j->rank[row->victim].how), "the victim has not died");
    all_blame(j, FSDP_ERR_PEER_LOST, 1000);
}

TEST_P(dtensor_faults, rank_stops_in_the_middle, wheres, SLOW | (row->beside ? 0 : AT_NIGHT(ASAN))) {
    static const int how = SIGSTOP;
    job *j = make_job(row, 1000, &how);
    start(j);
    J_CHECK(j, await_results(j, row->victim, 10000), "a rank hangs");
    kill(j->pid[row->victim], SIGCONT);
    J_CHECK(j, !finish(j, 10000), "a rank hangs after the victim goes on");
    all_blame(j, FSDP_ERR_TIMEOUT, 1500 + j->timeout_ms);
    J_CHECK(j, in_order(&j->rank[row->victim]) && j->rank[row->victim].status, "the victim");
}
