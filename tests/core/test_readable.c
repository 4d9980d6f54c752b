/* test_readable.c - when parameters can be read: the callback of a unit, reshard modes that are set
   for a while; loads of a unit before the model's first layout, parameters without dimensions

   test_model.c and plan.h check the callback after every call of random programs. Here are the
   ways in which parameters cease to be readable, by name, and the values.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | NCCL
#include "harness.h"
#include "lab.h"

typedef struct {
    const char *name;
    int ranks;
} rank_count;
static const rank_count ranks_1_to_4[] = {{"W=1", 1}, {"W=2", 2}, {"W=3", 3}, {"W=4", 4}};

enum { ROWS = 7, COLS = 3, NUMEL = ROWS * COLS, RANKS = 4 };

/* Element k of parameter p: small integers, exact in bf16. */
static float value(int p, int64_t k) { return (float)((p * 37 + k * 5) % 101 - 50); }
static void fill(int p, float *to) {
    for (int k = 0; k < NUMEL; k++) to[k] = value(p, k);
}

/* ---- the callback ---------------------------------------------------------------------------- */

typedef struct {
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *u;
    char seen[64]; /* "+" readable, "-" no more; of a second callback "p" and "m" */
    const void *at;
} watched;

static void note(watched *x, fsdp_unit *u, int readable, const char *marks) {
    const size_t n = strlen(x->seen);
    CHECK(u == x->u && n + 1 < sizeof x->seen);
    x->seen[n] = marks[!readable];
    x->seen[n + 1] = 0;
    if (fsdp_world_status(x->w)) return;
    const float *data = (const float *)fsdp_data_as(u, 0, FSDP_F32);
    if (readable) x->at = data;
    CHECK(data && data == x->at);
    for (int k = 0; k < NUMEL; k++) CHECK(data[k] == value(0, k)); /* before release, too */
}
static void first(fsdp_unit *u, int readable, void *user) {
    note((watched *)user, u, readable, "+-");
}
static void second(fsdp_unit *u, int readable, void *user) {
    note((watched *)user, u, readable, "pm");
}

static void open_watched(watched *x, fsdp_world *w, int reshard) {
    fsdp_param_desc p = fsdp_mat("w", ROWS, COLS);
    fsdp_unit_desc like = FSDP_ZERO;
    float full[NUMEL];
    memset(x, 0, sizeof *x);
    like.reshard_after_forward = reshard;
    x->w = w;
    x->m = lab_model(w, NULL);
    x->u = lab_unit(w, x->m, &like, &p, 1);
    fill(0, full);
    CALL(w, fsdp_param_load(x->u, 0, full));
    CALL(w, fsdp_set_unit_callback(x->u, first, x));
}
#define SEEN(x, text) CHECK_EQ_STR((x)->seen, text), (x)->seen[0] = 0

/* Every way that begins and ends a gather, and those that do neither. */
static void ways(lab_rank *r) {
    static const int modes[] = {FSDP_RESHARD_ALWAYS, FSDP_RESHARD_NEVER, 2};
    for (int i = 0; i < (r->size == RANKS ? 3 : 2); i++) {
        const int never = modes[i] == FSDP_RESHARD_NEVER;
        fsdp_memory memory;
        watched x;
        open_watched(&x, r->w, modes[i]);
        CALL(r->w, fsdp_model_commit(x.m));
        CALL(r->w, fsdp_model_predict(x.m, &memory)); /* its step gathers nothing */
        SEEN(&x, "");
        CALL(r->w, fsdp_pre_forward(x.u));
        SEEN(&x, "+");
        CALL(r->w, fsdp_wait(x.u)); /* it is readable already */
        SEEN(&x, "");
        CALL(r->w, fsdp_post_forward(x.u));
        SEEN(&x, never ? "" : "-");
        CALL(r->w, fsdp_pre_backward(x.u));
        SEEN(&x, never ? "" : "+");
        CALL(r->w, fsdp_post_backward(x.u));
        SEEN(&x, "-");
        CALL(r->w, fsdp_finalize_backward(x.m));
        CALL(r->w, fsdp_unshard(x.u)); /* in flight: not readable yet */
        SEEN(&x, "");
        CALL(r->w, fsdp_reshard(x.u)); /* a gather without a use */
        SEEN(&x, "");
        CALL(r->w, fsdp_unshard(x.u));
        CALL(r->w, fsdp_wait(x.u));
        SEEN(&x, "+");
        CALL(r->w, fsdp_params_changed(x.m)); /* stale: gathered again at the next use */
        SEEN(&x, "");
        CALL(r->w, fsdp_unshard(x.u));
        SEEN(&x, "-");
        CALL(r->w, fsdp_wait(x.u));
        SEEN(&x, "+");
        CALL(r->w, fsdp_set_requires_grad(x.u, 0, 0)); /* a new layout */
        SEEN(&x, "-");
        CALL(r->w, fsdp_set_requires_grad(x.u, 0, 1));
        lab_forward(r->w, x.u);
        CALL(r->w, fsdp_pre_backward(x.u));
        SEEN(&x, never ? "+" : "+-+");
        CALL(r->w, fsdp_finalize_backward(x.m)); /* ends a backward that post_backward has not */
        SEEN(&x, "-");
        CALL(r->w, fsdp_pre_forward(x.u));
        CALL(r->w, fsdp_model_reset(x.m));
        SEEN(&x, "+-");
        CALL(r->w, fsdp_unshard(x.u));
        CALL(r->w, fsdp_wait(x.u));
        CALL(r->w, fsdp_set_unit_callback(x.u, second, &x)); /* the old one's address is stale */
        SEEN(&x, "+-p");
        CALL(r->w, fsdp_set_unit_callback(x.u, NULL, NULL));
        SEEN(&x, "m");
        CALL(r->w, fsdp_set_unit_callback(x.u, first, &x));
        SEEN(&x, "+");
        fsdp_model_destroy(x.m);
        SEEN(&x, "-");
    }
    CHECK_STATUS(fsdp_set_unit_callback(NULL, first, NULL), FSDP_ERR_INVALID_ARG);
}
TEST_P(unit_callback, ways, ranks_1_to_4) { lab_run(row->ranks, NULL, ways, NULL); }

static void casts(lab_rank *r) {
    watched x;
    open_watched(&x, r->w, FSDP_RESHARD_NEVER);
    lab_forward(r->w, x.u);
    SEEN(&x, "+");
    CALL(r->w, fsdp_model_reset(x.m));
    CALL(r->w, fsdp_unshard(x.u));
    CALL(r->w, fsdp_wait(x.u));
    SEEN(&x, "-+");
    CALL(r->w, fsdp_model_cast(x.m, FSDP_BF16));
    SEEN(&x, "-");
}
TEST(unit_callback, cast) { lab_run(2, NULL, casts, NULL); }

/* The world fails while the parameters are readable: the next call, whichever it is, says so before
   it returns, and destroy does not say it again. */
static void failure(lab_rank *r) {
    const int call = *(const int *)r->arg;
    watched x;
    open_watched(&x, r->w, FSDP_RESHARD_ALWAYS);
    CALL(r->w, fsdp_pre_forward(x.u));
    SEEN(&x, "+");
    CALL(r->w, fsdp_barrier(r->w));
    fsdp_abort(r->w, "test");
    fsdp_status status = call == 0   ? fsdp_post_forward(x.u)
                         : call == 1 ? fsdp_finalize_backward(x.m)
                         : call == 2 ? fsdp_model_reset(x.m)
                                     : FSDP_ERR_INTERNAL;
    CHECK(status != FSDP_OK);
    if (call < 3) SEEN(&x, "-");
    fsdp_model_destroy(x.m);
    SEEN(&x, call < 3 ? "" : "-");
}
TEST(unit_callback, failure, NO(NCCL)) {
    for (int call = 0; call < 4; call++) lab_run(2, NULL, failure, &call);
}

static fsdp_status fails(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                         const fsdp_coll *coll) {
    (void)user, (void)ops, (void)comm, (void)coll;
    return FSDP_ERR_BACKEND;
}
/* A call fails the world itself: the gather of another unit, or a reduction in finalize. */
static void failing_call(lab_rank *r) {
    const int in_finalize = *(const int *)r->arg;
    fsdp_param_desc p = fsdp_mat("w", ROWS, COLS);
    watched x;
    open_watched(&x, r->w, FSDP_RESHARD_NEVER);
    fsdp_unit *other = lab_unit(r->w, x.m, NULL, &p, 1);
    lab_forward(r->w, x.u);
    if (in_finalize) {
        CALL(r->w, fsdp_set_reshard_after_backward(x.m, NULL, 0));
        CALL(r->w, fsdp_set_custom_reduce_scatter(x.u, fails, NULL));
        CALL(r->w, fsdp_pre_backward(x.u));
        memset(fsdp_grad(x.u, 0), 0, sizeof(float) * NUMEL);
        SEEN(&x, "+");
        CHECK(fsdp_finalize_backward(x.m) != FSDP_OK);
    } else {
        SEEN(&x, "+");
        CALL(r->w, fsdp_set_custom_all_gather(other, fails, NULL));
        CHECK(fsdp_pre_forward(other) != FSDP_OK);
    }
    CHECK(fsdp_world_status(r->w) != FSDP_OK);
    SEEN(&x, "-");
}
TEST(unit_callback, failing_call, NO(NCCL)) {
    for (int where = 0; where < 2; where++) lab_run(2, NULL, failing_call, &where);
}

/* Reshard modes are kept, NEVER is set for a while, as in a generation, and each is set again. A
   mode n is for units that were made with it. */
static void modes_again(lab_rank *r) {
    static const int modes[] = {FSDP_RESHARD_ALWAYS, 2, FSDP_RESHARD_NEVER};
    static const fsdp_storage_state after[] = {
        FSDP_STORAGE_SHARDED, FSDP_STORAGE_SHARDED_POST_FORWARD, FSDP_STORAGE_UNSHARDED};
    fsdp_param_desc p = fsdp_mat("w", ROWS, COLS);
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *unit[3];
    fsdp_unit_desc kept[3];
    for (int u = 0; u < 3; u++) {
        fsdp_unit_desc like = FSDP_ZERO;
        like.reshard_after_forward = modes[u];
        unit[u] = lab_unit(r->w, m, &like, &p, 1);
        CALL(r->w, fsdp_unit_desc_get(unit[u], &kept[u]));
        CHECK_EQ_INT(kept[u].reshard_after_forward, modes[u]);
    }
    for (int pass = 0; pass < 3; pass++) {
        if (pass == 1) CALL(r->w, fsdp_set_reshard_after_forward(m, NULL, FSDP_RESHARD_NEVER));
        for (int u = 0; u < 3 && pass == 2; u++)
            CALL(r->w, fsdp_set_reshard_after_forward(m, unit[u], kept[u].reshard_after_forward));
        for (int u = 0; u < 3; u++) {
            lab_forward(r->w, unit[u]);
            CHECK_EQ_INT(fsdp_unit_storage(unit[u]),
                         pass == 1 ? FSDP_STORAGE_UNSHARDED : after[u]);
            CALL(r->w, fsdp_reshard(unit[u]));
        }
    }
    CHECK_STATUS(fsdp_set_reshard_after_forward(m, NULL, 2), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_set_reshard_after_forward(m, unit[1], 4), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_set_reshard_after_forward(m, unit[0], 2), FSDP_ERR_INVALID_ARG);
    lab_forward(r->w, unit[0]); /* the refused call has changed none */
    CHECK_EQ_INT(fsdp_unit_storage(unit[0]), FSDP_STORAGE_SHARDED);
}
TEST(reshard_modes, kept_and_set_again) { lab_run(RANKS, NULL, modes_again, NULL); }

/* ---- loads before the first layout ----------------------------------------------------------- */

enum { UNITS = 3, FLAT, HYBRID, REPLICATED, MESHES };
typedef struct {
    int mesh, offload, late; /* late: everything is declared first, and commit precedes the loads */
    fsdp_dtype cast;         /* model_cast between two loads of a parameter */
    int freeze;
} early_case;

static void early_params(int u, fsdp_param_desc *p) {
    p[0] = fsdp_mat("w", ROWS, COLS);
    p[1] = fsdp_mat("columns", ROWS, COLS);
    p[1].shard_dim = 1;
    p[2] = fsdp_vec("frozen", NUMEL);
    p[2].frozen = 1, p[2].dtype = u == 1 ? FSDP_F64 : FSDP_F32;
    p[3] = fsdp_mat("empty", 0, COLS);
}
/* Loads a parameter from memory that ends with the call. */
static void load_one(fsdp_world *w, fsdp_unit *u, int i, int p, fsdp_dtype dtype) {
    double room[NUMEL];
    for (int k = 0; k < NUMEL; k++) lab_put(room, dtype, k, (double)value(p, k));
    CALL(w, fsdp_param_load(u, i, i == 3 ? NULL : room));
    memset(room, 0x55, sizeof room);
}
static void early_model(lab_rank *r, const early_case *c, double *out) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_unit *unit[UNITS];
    fsdp_memory before, after;
    const int replicas = c->mesh == HYBRID && r->size % 2 == 0 ? 2 : 1;
    if (c->mesh == HYBRID) md.mesh = lab_hsdp(r->w, replicas, r->size / replicas);
    if (c->mesh == REPLICATED) {
        fsdp_mesh *all;
        CALL(r->w, fsdp_mesh_1d(r->w, "all", &all));
        CALL(r->w, fsdp_mesh_info_init(all, FSDP_MESH_INFO_DDP, -1, 0, &info));
        md.mesh_info = &info;
    }
    md.cpu_offload = c->offload;
    fsdp_model *m = lab_model(r->w, &md);
    for (int pass = 0; pass < 1 + c->late; pass++) { /* early: a unit is loaded when declared */
        for (int u = 0; u < UNITS; u++) {
            fsdp_param_desc p[4];
            early_params(u, p);
            if (!pass) unit[u] = lab_unit(r->w, m, NULL, p, 4);
            for (int i = 0; i < 4 && pass == c->late; i++) {
                if (i == 1) load_one(r->w, unit[u], i, 99, FSDP_F32); /* the second one counts */
                load_one(r->w, unit[u], i, 4 * u + i, i == 2 ? p[2].dtype : FSDP_F32);
            }
        }
        if (c->late && !pass) CALL(r->w, fsdp_model_commit(m));
    }
    if (!c->late) CHECK_STATUS(fsdp_param_load(unit[0], 0, NULL), FSDP_ERR_INVALID_ARG);
    if (!c->late) CHECK_STATUS(fsdp_param_load(unit[0], 4, &before), FSDP_ERR_INVALID_ARG);
    fsdp_param_desc desc;
    CALL(r->w, fsdp_param_desc_get(unit[1], 1, &desc)); /* no commit either: a unit can be added */
    CHECK_EQ_STR(desc.name, "columns");
    CHECK(desc.dtype == FSDP_F32 && desc.ndim == 2 && desc.shape[1] == COLS && !desc.frozen);
    CHECK_EQ_INT(desc.shard_dim, 1);
    CALL(r->w, fsdp_param_desc_get(unit[1], 2, &desc));
    CHECK(desc.dtype == FSDP_F64 && desc.frozen && desc.ndim == 1);
    CHECK_STATUS(fsdp_param_desc_get(unit[1], 4, &desc), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_param_desc_get(NULL, 0, &desc), FSDP_ERR_INVALID_ARG);
    if (c->cast) CALL(r->w, fsdp_model_cast(m, c->cast));
    if (c->cast) load_one(r->w, unit[1], 0, 4, c->cast);
    if (c->freeze) CALL(r->w, fsdp_set_requires_grad(unit[1], 0, 0));
    CALL(r->w, fsdp_model_memory(m, &before));
    CALL(r->w, fsdp_model_predict(m, &after));
    CHECK(c->late || before.pool_slots[FSDP_POOL_SHARD] == 4 * UNITS);
    for (int u = 0; u < UNITS; u++) {
        for (int i = 0; i < 4; i++) {
            double room[NUMEL];
            CALL(r->w, fsdp_param_full(unit[u], i, room));
            const fsdp_dtype dtype = lab_view(r->w, unit[u], i).dtype;
            for (int k = 0; k < NUMEL && i < 3; k++) *out++ = lab_get(room, dtype, k);
        }
    }
    CALL(r->w, fsdp_model_memory(m, &before)); /* the buffers of early loads are gone */
    CHECK_EQ_INT(before.pool_bytes[FSDP_POOL_SHARD], after.pool_bytes[FSDP_POOL_SHARD]);
    CHECK_EQ_INT(before.pool_slots[FSDP_POOL_SHARD], after.pool_slots[FSDP_POOL_SHARD]);
    for (int u = 0; u < UNITS; u++) lab_forward(r->w, unit[u]);
    for (int u = UNITS; u-- > 0;) lab_backward(r->w, unit[u]);
    CALL(r->w, fsdp_finalize_backward(m));
    fsdp_model_destroy(m);
}
static void early(lab_rank *r) {
    early_case c = *(const early_case *)r->arg;
    double got[UNITS * 3 * NUMEL], late[UNITS * 3 * NUMEL];
    early_model(r, &c, got);
    c.late = 1;
    early_model(r, &c, late);
    for (int n = 0; n < UNITS * 3 * NUMEL; n++) {
        const int p = n / (3 * NUMEL) * 4 + n / NUMEL % 3;
        W_CHECK(got[n] == (double)value(p, n % NUMEL) && got[n] == late[n],
                "parameter %d, element %d: %g, expected %g", p, n % NUMEL, got[n],
                (double)value(p, n % NUMEL));
    }
}
/* The first commit of a model that was loaded unit by unit. Shards and their gradients are in the
   heap of the test's allocator (offloaded). */
enum { LAYERS = 6 };
static fsdp_model *loaded_model(lab_rank *r, int64_t rows, int frozen_every, fsdp_unit **unit) {
    fsdp_model_desc md = FSDP_ZERO;
    float *full = (float *)lab_zeros((size_t)rows * COLS, sizeof *full);
    md.cpu_offload = 1;
    fsdp_model *m = lab_model(r->w, &md);
    for (int u = 0; u < LAYERS; u++) {
        fsdp_param_desc p[2] = {fsdp_mat("w", rows, COLS), fsdp_vec("b", rows)};
        p[1].frozen = frozen_every && u % frozen_every == 0;
        unit[u] = lab_unit(r->w, m, NULL, p, 2);
        for (int i = 0; i < 2; i++) {
            for (int64_t k = 0; k < rows * (i ? 1 : COLS); k++)
                full[k] = (float)value(2 * u + i, (int)k);
            CALL(r->w, fsdp_param_load(unit[u], i, full));
        }
    }
    free(full);
    return m;
}
static void has_values(lab_rank *r, fsdp_unit **unit, int64_t rows) {
    float *full = (float *)lab_zeros((size_t)rows * COLS, sizeof *full);
    for (int n = 0; n < 2 * LAYERS; n++) {
        CALL(r->w, fsdp_param_full(unit[n / 2], n % 2, full));
        for (int64_t k = 0; k < rows * (n % 2 ? 1 : COLS); k++)
            W_CHECK(full[k] == (float)value(n, (int)k), "parameter %d, element %d", n, (int)k);
    }
    free(full);
}
/* It needs at most one unit more than the model has after it. */
static void commit_peak(lab_rank *r) {
    static const int64_t rows[] = {3001, 4096, 9000};
    fsdp_unit *unit[LAYERS];
    for (int c = 0; c < 6; c++) {
        fsdp_model *m = loaded_model(r, rows[c / 2], c % 2 * 2, unit);
        const int64_t before = r->heap->live_bytes;
        r->heap->peak_bytes = before;
        CALL(r->w, fsdp_model_commit(m));
        const int64_t after = r->heap->live_bytes, peak = r->heap->peak_bytes;
        int64_t one = 4 * (COLS + 1) * ((rows[c / 2] + r->size - 1) / r->size);
#ifdef W_SANITIZED
        one += 2 * LAYERS * 4096; /* the red zones of the loaded buffers */
#endif
        CHECK_MSG(peak <= after + one, "%lld bytes before, %lld after, %lld at most; a unit has %lld",
                  (long long)before, (long long)after, (long long)peak, (long long)one);
        has_values(r, unit, rows[c / 2]);
        fsdp_model_destroy(m);
    }
}
TEST_P(early_load, commit_needs_one_unit_more, ranks_1_to_4) {
    lab_run(row->ranks, NULL, commit_peak, NULL);
}

/* Each of its allocations fails once: values stay, and so do loads and units that come then. */
static void commit_faults(lab_rank *r) {
    int faults = 0;
    for (int n = 0, done = 0; !done; n++) {
        fsdp_unit *unit[LAYERS];
        fsdp_model *m = loaded_model(r, ROWS, 2, unit);
        w_fail(r->heap, n);
        const fsdp_status status = fsdp_model_commit(m);
        w_fail(r->heap, -1);
        done = status == FSDP_OK;
        if (!done) CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY), faults++;
        fsdp_memory memory;
        CALL(r->w, fsdp_model_memory(m, &memory));
        CHECK_MSG(done || !memory.pool_bytes[FSDP_POOL_SHARD_GRAD], "fault %d", n);
        if (!done && n % 3 == 1) { /* one value comes again, and a unit */
            load_one(r->w, unit[3], 0, 99, FSDP_F32);
            load_one(r->w, unit[3], 0, 6, FSDP_F32);
            fsdp_param_desc p = fsdp_vec("late", 5);
            (void)lab_unit(r->w, m, NULL, &p, 1);
        }
        if (!done && n % 3 == 2) CALL(r->w, fsdp_set_requires_grad(unit[1], 0, 0));
        has_values(r, unit, ROWS);
        fsdp_model_destroy(m);
    }
    CHECK(faults > 8);
}
TEST(early_load, commit_survives_each_fault) { lab_run(1, NULL, commit_faults, NULL); }

TEST_P(early_load, values, ranks_1_to_4) {
    static const early_case cases[] = {{FLAT, 0, 0, FSDP_DTYPE_KEEP, 0},
                                       {FLAT, 1, 0, FSDP_DTYPE_KEEP, 0},
                                       {FLAT, 0, 0, FSDP_DTYPE_KEEP, 1},
                                       {FLAT, 0, 0, FSDP_BF16, 0},
                                       {FLAT, 0, 0, FSDP_F64, 1},
                                       {HYBRID, 0, 0, FSDP_DTYPE_KEEP, 0},
                                       {REPLICATED, 0, 0, FSDP_DTYPE_KEEP, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        early_case c = cases[i];
        lab_run(row->ranks, NULL, early, &c);
    }
}

/* A model that ends before its first layout frees what was loaded: lab_run counts. A failed load
   leaves the earlier value. */
static void early_end(lab_rank *r) {
    fsdp_param_desc p[4];
    float full[NUMEL];
    fsdp_model *m = lab_model(r->w, NULL);
    early_params(0, p);
    fsdp_unit *u = lab_unit(r->w, m, NULL, p, 4);
    fill(0, full);
    CALL(r->w, fsdp_param_load(u, 0, full));
    fsdp_model_destroy(m);
    m = lab_model(r->w, NULL);
    u = lab_unit(r->w, m, NULL, p, 4);
    CALL(r->w, fsdp_param_load(u, 0, full));
    for (int at = 0; at < 2; at++) {
        w_fail(r->heap, at);
        float other[NUMEL] = {0};
        const fsdp_status status = fsdp_param_load(u, 1, full);
        CHECK(status == FSDP_OK || status == FSDP_ERR_OUT_OF_MEMORY);
        CHECK(at > 0 || status == FSDP_ERR_OUT_OF_MEMORY);
        w_fail(r->heap, -1);
        CALL(r->w, fsdp_param_load(u, 1, other));
    }
    CALL(r->w, fsdp_param_full(u, 0, full));
    for (int k = 0; k < NUMEL; k++) CHECK(full[k] == value(0, k));
}
TEST(early_load, ends_and_fails) { lab_run(2, NULL, early_end, NULL); }

/* ---- parameters without dimensions ----------------------------------------------------------- */

/* A scalar is a vector of one element: on rank 0, with a gradient as any other. */
static void scalars(lab_rank *r) {
    fsdp_param_desc p[2] = {fsdp_vec("bias", 5), FSDP_ZERO};
    float three = 3;
    p[1].name = "scale"; /* ndim is 0 */
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *u = lab_unit(r->w, m, NULL, p, 2);
    CALL(r->w, fsdp_param_load(u, 1, &three));
    const fsdp_param_view v = lab_view(r->w, u, 1);
    CHECK_EQ_INT(v.ndim, 1);
    CHECK_EQ_INT(v.shape[0], 1);
    CHECK_EQ_INT(v.numel, r->rank == 0);
    CALL(r->w, fsdp_pre_forward(u));
    CHECK(*(const float *)fsdp_data_as(u, 1, FSDP_F32) == 3);
    CALL(r->w, fsdp_post_forward(u));
    CALL(r->w, fsdp_pre_backward(u));
    *(float *)fsdp_grad_as(u, 1, FSDP_F32) = (float)(r->rank + 1);
    CALL(r->w, fsdp_post_backward(u));
    CALL(r->w, fsdp_finalize_backward(m));
    float grad = 0;
    CALL(r->w, fsdp_param_full_grad(u, 1, &grad));
    CHECK(grad * (float)r->size == (float)(r->size * (r->size + 1) / 2));
}
TEST_P(scalar, one_element, ranks_1_to_4) { lab_run(row->ranks, NULL, scalars, NULL); }
