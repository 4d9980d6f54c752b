/* test_optim_memory.c - Muon and the average of the weights without memory: each allocation of a
   call fails once, on all ranks and on each rank only. A rank whose allocation failed gets an
   error, and the call leaves nothing; if the rank calls again, the training continues with equal
   bits, or the world has failed on all ranks.

   SPDX-License-Identifier: MIT */
#define TAGS SLOW
#include "harness.h"
#include "lab_net.h"

enum { NUM = 7, UNITS = 3, STEPS = 3, LIVES = LAB_WORLDS - 1 };

static const lab_param rows[NUM] = {
    {0, "a.w", FSDP_F32, 0, 0, 2, 0, {7, 12}},  {0, "a.b", FSDP_F32, 0, 0, 1, 0, {7}},
    {0, "a.f", FSDP_F32, 0, 1, 2, 0, {9, 5}},   {0, "a.k", FSDP_F32, 0, 0, 2, 1, {6, 10}},
    {1, "b.w", FSDP_F32, 0, 0, 2, 0, {16, 16}}, {2, "c.h", FSDP_BF16, 0, 0, 2, 0, {9, 6}},
    {2, "c.f", FSDP_BF16, 0, 1, 2, 0, {8, 3}}};
static const lab_net net = {rows, NUM, UNITS};

enum { MUON_CREATE, MUON_STEP, MUON_SET_GROUP, EMA_CREATE, EMA_UPDATE, EMA_SWAP, NONE, COMMIT };

typedef struct {
    const char *name;
    int call, world, lanes, replicas; /* replicas: for HSDP; they share the matrices */
    int places, ends; /* places: minimum number of allocations; ends: some failures end the world */
} row_of;

typedef struct {
    const row_of *row;
    int victim; /* -1: all ranks */
    uint64_t bits[8];
    int failed[LIVES], ended[LIVES]; /* by allocation: number of ranks */
} board;

typedef struct { /* one rank */
    lab_rank *r;
    board *b;
    lab_built m;
    fsdp_muon *muon;
    fsdp_ema *ema;
    uint64_t bits;
} life;

static fsdp_status call_of(life *l, int call) {
    fsdp_muon_desc d = fsdp_muon_defaults();
    fsdp_optim_group g = d.groups[0];
    d.bucket_bytes = 400, d.replicas = FSDP_MUON_A_PART_EACH;
    g.lr_scale = 0.5;
    if (call == MUON_CREATE) return fsdp_muon_create(l->m.model, &d, &l->muon);
    if (call == MUON_STEP) return fsdp_muon_step(l->muon, 0.02);
    if (call == MUON_SET_GROUP) return fsdp_muon_set_group(l->muon, 0, &g);
    if (call == COMMIT) return fsdp_model_commit(l->m.model);
    if (call == EMA_CREATE) return fsdp_ema_create(l->m.model, NULL, &l->ema);
    return call == EMA_UPDATE ? fsdp_ema_update(l->ema) : fsdp_ema_swap(l->ema);
}

static int64_t model_bytes(const lab_built *m) {
    fsdp_memory memory;
    int64_t bytes;
    if (fsdp_model_memory(m->model, &memory)) return 0;
    bytes = memory.host_bytes;
    for (int i = 0; i < (int)(sizeof memory.pool_bytes / sizeof *memory.pool_bytes); i++)
        bytes += memory.pool_bytes[i];
    return bytes;
}

/* Runs a call with failing memory. Returns its status, which shows whether an allocation has
   failed. */
static fsdp_status call_in_want(life *l, int call, int n) {
    const board *b = l->b;
    fsdp_world *w = l->m.w;
    w_heap *heap = l->r->heap;
    const int victim = n >= 0 && b->row->call == call && (b->victim < 0 || b->victim == l->r->rank);
    const int64_t live = heap->live, bytes = model_bytes(&l->m);
    const int failures = heap->failures;
    if (victim) w_fail(heap, n);
    fsdp_status status = call_of(l, call);
    w_fail(heap, -1);
    if (!victim || heap->failures == failures) return status;
    __atomic_add_fetch(&l->b->failed[n], 1, __ATOMIC_SEQ_CST);
    if (!status || fsdp_world_status(w)) return status;
    CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
    if (call == MUON_CREATE || call == EMA_CREATE) {
        W_CHECK(model_bytes(&l->m) == bytes, "%lld bytes are left",
                (long long)(model_bytes(&l->m) - bytes));
        /* a group may keep some */
        W_CHECK(heap->live == live || b->row->lanes, "%lld blocks are left",
                (long long)(heap->live - live));
    }
    CHECK((call == MUON_CREATE ? (void *)l->muon : l->ema) == NULL || call % 3);
    return call_of(l, call);
}

static fsdp_status backward(const lab_built *m, int step) {
    fsdp_status status = FSDP_OK;
    for (int u = 0; u < UNITS && !status; u++) {
        status = fsdp_pre_forward(m->unit[u]);
        if (!status) status = fsdp_post_forward(m->unit[u]);
    }
    for (int u = UNITS - 1; u >= 0 && !status; u--) {
        status = fsdp_pre_backward(m->unit[u]);
        for (int p = 0; p < NUM && !status; p++) {
            if (rows[p].unit != u || m->frozen[p]) continue;
            void *g = lab_grad(m, p);
            for (int64_t i = 0; fsdp_rank(m->w) == 0 && i < lab_numel_of(&net, p); i++)
                lab_put(g, rows[p].dtype, i, lab_value(100 * (step + 1) + p, i));
        }
        if (!status) status = fsdp_post_backward(m->unit[u]);
    }
    return status ? status : fsdp_finalize_backward(m->model);
}

static fsdp_status fold(life *l) {
    static __thread char full[LAB_NUMEL * 8];
    fsdp_status status = FSDP_OK;
    for (int p = 0; p < NUM && !status; p++) {
        status = fsdp_param_full(lab_unit_of(&l->m, p), l->m.index[p], full);
        lab_fold(&l->bits, full, lab_nbytes_of(&net, p));
    }
    return status;
}

/* A training of three steps: after the first one a matrix is frozen and another one thawed. */
static fsdp_status train(life *l, int n) {
    fsdp_status status = call_in_want(l, MUON_CREATE, n);
    if (!status) status = call_in_want(l, EMA_CREATE, n);
    for (int step = 0; step < STEPS && !status; step++) {
        const int last = step == STEPS - 1 ? n : -1;
        if (step == STEPS - 1) lab_freeze(&l->m, 0, 1), lab_freeze(&l->m, 2, 0);
        if (step == STEPS - 1) lab_freeze(&l->m, 6, 0);
        status = call_in_want(l, COMMIT, last); /* it also updates the average's layout */
        if (!status) status = backward(&l->m, step);
        if (!status) status = call_in_want(l, MUON_SET_GROUP, last);
        if (!status) status = call_in_want(l, MUON_STEP, last);
        if (!status) status = fsdp_zero_grad(l->m.model);
        if (!status && (step < STEPS - 1 || l->b->row->call != EMA_SWAP))
            status = call_in_want(l, EMA_UPDATE, last);
        if (!status) status = call_in_want(l, EMA_SWAP, last);
        if (!status) status = fold(l); /* hash of the averages */
        if (!status) status = call_in_want(l, EMA_SWAP, -1);
        if (!status) status = fold(l);
    }
    return status;
}

static void live(lab_rank *r) {
    board *b = (board *)r->arg;
    for (int n = -1; n < LIVES - 1; n++) {
        life l;
        fsdp_model_desc md = FSDP_ZERO;
        memset(&l, 0, sizeof l);
        snprintf(w_case, sizeof w_case, "%s, victim %d, allocation %d, rank %d", b->row->name,
                 b->victim, n, r->rank);
        fsdp_world *w = lab_world(r, n + 1, b->row->lanes, NULL);
        l.r = r, l.b = b;
        if (b->row->replicas) md.mesh = lab_hsdp(w, b->row->replicas, r->size / b->row->replicas);
        lab_build(&l.m, &net, w, &md);
        CALL(w, fsdp_init_params(l.m.model, lab_fill, NULL));
        CALL(w, fsdp_set_gradient_divide_factor(l.m.model, NULL, 1));
        CALL(w, fsdp_model_commit(l.m.model));
        const fsdp_status status = train(&l, n);
        if (n < 0) CALL(w, status);
        if (n < 0) b->bits[r->rank] = l.bits;
        W_CHECK(!status == !fsdp_world_status(w), "%s", fsdp_status_name(status));
        W_CHECK(status || l.bits == b->bits[r->rank], "it goes on with other bits");
        if (status) {
            const char *text = fsdp_last_error(w);
            W_CHECK(strstr(text, "[E") && strstr(text, "rank "), "%s", text);
            __atomic_add_fetch(&b->ended[n], 1, __ATOMIC_SEQ_CST);
        }
        (void)fsdp_shutdown(w);
        h_mark(1);
        h_await_marks(1, (n + 2) * r->size); /* the last rank frees memory that threads share */
        W_CHECK(r->heap->live == 0, "%lld blocks are left", (long long)r->heap->live);
        if (n < 0) continue;
        W_CHECK(b->ended[n] == 0 || (b->row->ends && b->ended[n] == r->size),
                "the world has ended on %d ranks", b->ended[n]);
        if (!b->failed[n]) {
            W_CHECK(b->row->places ? n >= b->row->places : n == 0, "%d places", n);
            return;
        }
    }
    W_CHECK(0, "there is no end");
}

/* If there is no memory for a group, the world fails. */
static const row_of calls[] = {{"muon_create", MUON_CREATE, 3, 0, 0, 12, 0},
                               {"muon_create/lanes", MUON_CREATE, 2, 2, 0, 12, 1},
                               {"muon_create/replicas", MUON_CREATE, 4, 2, 2, 12, 1},
                               {"muon_step", MUON_STEP, 3, 0, 0, 10, 0},
                               {"muon_set_group", MUON_SET_GROUP, 2, 0, 0, 0, 0},
                               {"ema_create", EMA_CREATE, 3, 0, 0, 3, 0},
                               {"ema_update", EMA_UPDATE, 3, 0, 0, 0, 0},
                               {"ema_swap", EMA_SWAP, 3, 0, 0, 0, 0},
                               {"commit", COMMIT, 3, 0, 0, 10, 1},
                               {"commit/alone", COMMIT, 1, 0, 0, 10, 0}};

TEST_P(optim_memory, each_allocation, calls) {
    for (int victim = -1; victim < row->world; victim++) {
        board *b = (board *)lab_zeros(1, sizeof *b);
        lab_how how = FSDP_ZERO;
        b->row = row, b->victim = victim;
        how.bare = 1, how.job = "optim_memory";
        h_shared->marks[1] = 0;
        lab_run(row->world, &how, live, b);
        free(b);
    }
}
