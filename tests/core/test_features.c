/* test_features.c - hooks of gradients, an optimizer in backward; addresses; sums in f16
   Threads train a small net, also over Gloo and NCCL. Parameters are compared bit by bit with lab_net.h, ops
   with what an observer sees. Gradients are small integers, so that their sum is exact in any order. A step is
   g = sum/N, p -= lr*g in f32.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | NCCL | AT_NIGHT(TSAN)
#include "harness.h"
#include <math.h> /* fabs, pow */
#include "lab_net.h"

enum { UNITS = 3, PARAMS = 4, ALL = UNITS * PARAMS, MOST = LAB_NUMEL, RANKS = 4 };

/* Uneven, empty on some ranks, without elements, sharded by columns, more than one block. */
static const lab_param net_rows[ALL] = {
    {0, "p0", FSDP_F32, 0, 0, 2, 0, {7, 5}},    {0, "p1", FSDP_F32, 0, 0, 1, 0, {3}},
    {0, "p2", FSDP_F32, 0, 0, 2, 1, {6, 4}},    {0, "p3", FSDP_F32, 0, 0, 1, 0, {0}},
    {1, "p0", FSDP_F32, 0, 0, 2, 0, {40, 16}},  {1, "p1", FSDP_F32, 0, 0, 1, 0, {1}},
    {1, "p2", FSDP_F32, 0, 0, 1, 0, {17}},      {1, "p3", FSDP_F32, 0, 0, 1, 0, {8}},
    {2, "p0", FSDP_F32, 0, 0, 3, 0, {9, 2, 3}}, {2, "p1", FSDP_F32, 0, 0, 1, 0, {5}},
    {2, "p2", FSDP_F32, 0, 0, 2, 1, {2, 9}},    {2, "p3", FSDP_F32, 0, 0, 1, 0, {64}}};
static const lab_net net = {net_rows, ALL, UNITS};

/* ---- one rank's test ------------------------------------------------------------------------- */

typedef struct job job;
enum { MESH_1D, MESH_HSDP };

typedef struct config { /* of a run; the same on all ranks */
    int world, lanes, mesh, variant;
    int reduce_unused; /* fsdp_set_reduce_scatter_unused_params */
    int64_t direct_min;
    void (*body)(job *j);
} config;

struct job {
    int rank, n;
    config *c;
    fsdp_world *w;
    lab_built m;
    lab_truth t;
    int step;
    lab_log log;
};

/* ---- the net --------------------------------------------------------------------------------- */

static float initial(int p, int64_t k) { return (float)((p * 31 + k * 7) % 63 - 31) / 16; }

/* What a rank uses: with reduce_unused others than other ranks; without all ranks use the same. */
static int used(const job *j, int p, int rank, int step) {
    if (p == 2 * PARAMS + 1) return step % 2; /* by nobody in every other step */
    return (p + (j->c->reduce_unused ? rank : 0) + step) % 4 != 0 || rank < 0;
}
/* Has it a gradient after a backward? With reduce_unused zeros, where nobody used it. */
static int anybody(const job *j, int p) {
    int any = j->c->reduce_unused;
    for (int r = 0; r < j->n; r++) any |= used(j, p, r, j->step);
    return any;
}
static float gradient(int p, int64_t k, int rank, int step) {
    return (float)((p * 5 + k * 3 + rank * 11 + step * 17) % 31 - 15);
}

static void fill_rows(void *user, const fsdp_param_view *block) {
    (void)user;
    int p = lab_row_of(&net, block);
    for (int64_t k = 0; k < block->numel; k++)
        lab_put(block->data, block->dtype, k, (double)initial(p, fsdp_view_index(block, k)));
}

static void make_model(job *j) {
    fsdp_model_desc md = FSDP_ZERO;
    if (j->c->mesh == MESH_HSDP) md.mesh = lab_hsdp(j->w, 2, j->n / 2);
    md.direct_min = j->c->direct_min, md.debug = 1;
    lab_begin(&j->m, &net, j->w);
    j->m.model = lab_model(j->w, &md);
    lab_watch(&j->log, j->w, j->m.model);
    for (int p = 0; p < ALL; p++)
        for (int64_t k = 0; k < lab_numel_of(&net, p); k++) j->t.weight[p][k] = initial(p, k);
    for (int u = 0; u < UNITS; u++) {
        fsdp_param_desc d[LAB_PARAMS];
        const int count = lab_descs(&j->m, u, d);
        j->m.unit[u] = lab_unit(j->w, j->m.model, NULL, d, count);
        CALL(j->w,
             fsdp_set_reduce_scatter_unused_params(j->m.model, j->m.unit[u], j->c->reduce_unused));
    }
    CALL(j->w, fsdp_init_params(j->m.model, fill_rows, NULL));
}

static void forward(job *j) {
    for (int u = 0; u < UNITS; u++) {
        CALL(j->w, fsdp_pre_forward(j->m.unit[u]));
        lab_check_data(&j->m, &j->t, u, FSDP_F32);
        CALL(j->w, fsdp_post_forward(j->m.unit[u]));
    }
}

/* My gradients; the model adds up those of all ranks. */
static void write_grads(job *j, int u) {
    for (int i = 0; i < PARAMS; i++) {
        int p = u * PARAMS + i;
        if (j->m.frozen[p]) {
            CHECK(fsdp_grad(j->m.unit[u], i) == NULL);
            continue;
        }
        for (int r = 0; r < j->n; r++)
            for (int64_t k = 0; k < lab_numel_of(&net, p) && used(j, p, r, j->step); k++)
                j->t.kept[p][k] += (double)gradient(p, k, r, j->step);
        if (anybody(j, p)) j->t.has_kept[p] = 1;
        if (!used(j, p, j->rank, j->step)) continue;
        float *g = (float *)fsdp_grad(j->m.unit[u], i);
        CHECK(g != NULL);
        for (int64_t k = 0; k < lab_numel_of(&net, p); k++)
            g[k] += gradient(p, k, j->rank, j->step);
    }
}

/* Runs a backward. Without `reduces` the gradients wait: the model goes on adding. */
static void backward(job *j, int reduces) {
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(j->w, fsdp_pre_backward(j->m.unit[u]));
        lab_check_data(&j->m, &j->t, u, FSDP_F32);
        write_grads(j, u);
        CALL(j->w, fsdp_post_backward(j->m.unit[u]));
        for (int p = u * PARAMS; p < (u + 1) * PARAMS && reduces; p++)
            if (!j->m.frozen[p] && j->t.has_kept[p]) lab_reduce(&j->t, &net, p, j->n, 0);
    }
    CALL(j->w, fsdp_finalize_backward(j->m.model));
}

static const fsdp_sgd_hyper sgd = {0.0625, 0, 0, 0, 0, 0, 1};

/* ---- starting ranks -------------------------------------------------------------------------- */

static void on_rank(lab_rank *r) {
    config *c = (config *)r->arg;
    job *j = (job *)lab_zeros(1, sizeof *j);
    snprintf(w_case, sizeof w_case, "rank %d of %d, lanes %d, mesh %d, direct_min %lld, variant %d",
             r->rank, r->size, c->lanes, c->mesh, (long long)c->direct_min, c->variant);
    j->c = c, j->rank = r->rank, j->n = r->size, j->w = r->w;
    c->body(j);
    lab_end(r);
    free(j->log.ops);
    free(j);
}

/* The usual settings: worlds of 1 to 4 with both layouts, HSDP, and lanes. */
typedef struct setting {
    int world, lanes, mesh;
    int64_t direct_min;
} setting;
static const setting settings[] = {{1, 0, MESH_1D, 0},
                                   {1, 1, MESH_1D, 1},
                                   {2, 0, MESH_1D, 0},
                                   {2, 1, MESH_1D, 1},
                                   {3, 0, MESH_1D, 1},
                                   {3, 2, MESH_1D, 0},
                                   {4, 0, MESH_1D, FSDP_DIRECT_NEVER},
                                   {4, 2, MESH_1D, 1},
                                   {2, 0, MESH_HSDP, 1},
                                   {4, 0, MESH_HSDP, 0},
                                   {4, 2, MESH_HSDP, 1}};
enum { SETTINGS = sizeof settings / sizeof *settings };

static void everywhere(void (*body)(job *j), int variants) {
    for (int s = 0; s < SETTINGS; s++)
        for (int v = 0; v < variants; v++) {
            const setting *at = &settings[s];
            config c = {at->world, at->lanes, at->mesh, v, s % 3 != 1, at->direct_min, body};
            lab_how how = FSDP_ZERO;
            how.job = "features", how.lanes = c.lanes;
            lab_run(c.world, &how, on_rank, &c);
        }
}

/* ---- hooks ----------------------------------------------------------------------------------- */

/* In a worker thread a call that waits for the worker threads would wait for itself. */
typedef struct {
    fsdp_world *w;
    fsdp_status status;
    int calls;
} asking;
static fsdp_status ask_the_world(void *user, fsdp_unit *unit, void *data, int64_t numel,
                                 fsdp_dtype dtype, void *stream) {
    asking *a = (asking *)user;
    float x = 1;
    (void)unit, (void)data, (void)numel, (void)dtype, (void)stream;
    a->calls++;
    a->status = fsdp_all_reduce(a->w, NULL, &x, 1, FSDP_F32, FSDP_SUM);
    return a->status;
}
static void waiting_hook(lab_rank *r) {
    const int lanes = *(const int *)r->arg;
    fsdp_param_desc p = fsdp_mat("a", 8, 2);
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *u = lab_unit(r->w, m, NULL, &p, 1);
    asking a = {r->w, FSDP_OK, 0};
    CALL(r->w, fsdp_set_all_reduce_hook(u, ask_the_world, &a));
    lab_forward(r->w, u);
    CALL(r->w, fsdp_pre_backward(u));
    CHECK(fsdp_grad(u, 0) != NULL);
    fsdp_status status = fsdp_post_backward(u);
    if (!status) status = fsdp_finalize_backward(m);
    CHECK_STATUS(status, lanes ? FSDP_ERR_INVALID_STATE : FSDP_OK);
    if (lanes)
        CHECK_MSG(strstr(fsdp_last_error(r->w), "[E216] a hook that runs in a worker thread"), "%s",
                  fsdp_last_error(r->w));
    CHECK_STATUS(fsdp_shutdown(r->w),
                 status); /* before, the hook may run, as another rank's failed */
    if (a.calls || !lanes) CHECK_STATUS(a.status, status);
    r->w = NULL;
}
TEST(hooks, that_wait_for_themselves) {
    if (!lab_divides()) SKIP("a device has streams in place of worker threads");
    for (int lanes = 0; lanes <= 2; lanes++) {
        lab_how how = FSDP_ZERO;
        how.lanes = lanes;
        lab_run(2, &how, waiting_hook, &lanes);
    }
}

/* Fails. INVALID_STATE ends the world as another failure does, with ABORTED, since no call was refused. */
static fsdp_status refuses(void *user, const fsdp_param_view *v, void *stream) {
    (void)v, (void)stream;
    return *(const fsdp_status *)user;
}
static void grad_hook_fails(job *j) {
    fsdp_status of_hook = j->c->variant ? FSDP_ERR_IO : FSDP_ERR_INVALID_STATE;
    const fsdp_status expected = j->c->variant ? FSDP_ERR_IO : FSDP_ERR_ABORTED;
    make_model(j);
    CALL(j->w, fsdp_set_post_accumulate_hook(j->m.unit[1], 0, refuses, &of_hook));
    forward(j);
    (void)fsdp_pre_backward(j->m.unit[1]);
    (void)fsdp_grad(j->m.unit[1], 0);
    (void)fsdp_post_backward(j->m.unit[1]);
    CHECK_STATUS(fsdp_finalize_backward(j->m.model), expected);
    CHECK_STATUS(fsdp_world_status(j->w), expected);
    CHECK_STATUS(fsdp_pre_forward(j->m.unit[0]), expected);
    lib_drain(j->w); /* nobody reads of_hook any more */
}
TEST(hooks, failure_of_an_optimizer_in_backward) { everywhere(grad_hook_fails, 2); }

/* ---- addresses ------------------------------------------------------------------------------- */

/* Odd sizes after each other, in every dtype, stored as they are gathered and not: full parameters
   and their gradients begin at multiples of 64 bytes, on one rank as on several. On streams of a
   device it is 256. */
static void aligned(fsdp_world *w, const void *arg) {
    static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_F64, FSDP_F16, FSDP_BF16};
    static const int64_t shapes[][2] = {{7, 5}, {1, 1}, {64, 3}, {33, 9}, {0, 4}, {128, 128}};
    enum { COUNT = sizeof shapes / sizeof *shapes };
    const uintptr_t bytes = lib_on_streams(w) ? 256 : 64;
    (void)arg;
    for (int c = 0; c < 4 * 5; c++) {
        fsdp_param_desc params[COUNT];
        fsdp_model_desc md = FSDP_ZERO;
        md.param_dtype = c / 4 ? dtypes[c / 4 - 1] : FSDP_DTYPE_KEEP;
        md.direct_min = 1;
        for (int i = 0; i < COUNT; i++)
            params[i] = lab_desc(2, shapes[i], i == 3, dtypes[c % 4], i == 1);
        fsdp_model *m = lab_model(w, &md);
        fsdp_unit *units[2];
        for (int u = 0; u < 2; u++) units[u] = lab_unit(w, m, NULL, params, COUNT - u);
        for (int u = 0; u < 2; u++) lab_forward(w, units[u]);
        for (int u = 1; u >= 0; u--) {
            CALL(w, fsdp_pre_backward(units[u]));
            for (int i = 0; i < COUNT - u; i++) {
                W_CHECK((uintptr_t)fsdp_data(units[u], i) % bytes == 0,
                        "case %d: parameter %d of unit %d is at %p", c, i, u,
                        fsdp_data(units[u], i));
                if (i == 1) continue; /* frozen */
                W_CHECK((uintptr_t)fsdp_grad(units[u], i) % bytes == 0,
                        "case %d: gradient %d of unit %d is at %p", c, i, u,
                        fsdp_grad(units[u], i));
            }
            CALL(w, fsdp_post_backward(units[u]));
        }
        CALL(w, fsdp_finalize_backward(m));
        fsdp_model_destroy(m);
    }
}
TEST(addresses, aligned) {
    for (int size = 1; size <= 4; size++) lab_on_worlds(size, NULL, aligned, NULL);
}

/* ---- sums in f16 ------------------------------------------------------------------------------ */

/* The largest gradients, and the smallest: the mean over the ranks is what each rank has, and must
   neither overflow nor vanish on its way. A backend that does not divide f16 sums itself (upstream's
   NCCL) keeps neither over 4 ranks. */
enum {
    F16_ONCE,
    F16_NO_SYNC,
    F16_NO_ALL_REDUCE,
    F16_HOOK,
    F16_NEW_FACTOR,
    F16_WAITING_FACTOR, /* another one while sums wait for their all-reduce */
    F16_CUSTOM
};
typedef struct {
    int replicas, way, plain;
    fsdp_dtype param;
} f16_case;

static fsdp_status f16_look(void *user, fsdp_unit *u, void *data, int64_t numel, fsdp_dtype dtype,
                            void *stream) {
    lib_wait(stream);
    (void)user, (void)u, (void)stream;
    CHECK_EQ_INT(dtype, FSDP_F16);
    for (int64_t e = 0; e < numel; e++) CHECK(isfinite(lab_get(data, dtype, e)));
    return FSDP_OK;
}

/* An all-reduce of the caller's own makes sums, and divides nothing. */
static fsdp_status f16_custom(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                              const fsdp_coll *coll) {
    (void)user;
    CHECK_NEAR(coll->scale, 1, 0);
    return (ops->run)(comm, coll);
}

static void f16_microbatch(fsdp_world *w, fsdp_model *m, fsdp_unit *unit, fsdp_dtype dtype,
                           double value) {
    lab_forward(w, unit);
    CALL(w, fsdp_pre_backward(unit));
    for (int i = 0; i < 2; i++) {
        const fsdp_param_view v = lab_view(w, unit, i);
        void *grad = fsdp_grad(unit, i);
        for (int64_t e = 0; e < lab_full_numel(&v); e++)
            lab_put(grad, dtype, e, lab_get(grad, dtype, e) + (i ? value : -value));
    }
    CALL(w, fsdp_post_backward(unit));
    CALL(w, fsdp_finalize_backward(m));
}

static double f16_mean(fsdp_world *w, const f16_case *c, double value) {
    const int64_t shape[2] = {5, 3};
    const fsdp_param_desc params[2] = {lab_desc(2, shape, 0, FSDP_F32, 0),
                                       lab_desc(1, shape, 0, FSDP_F32, 0)};
    const fsdp_dtype dtype = c->param ? c->param : FSDP_F32;
    const int waits = c->way == F16_WAITING_FACTOR && c->replicas > 1,
              twice = waits || c->way == F16_NO_SYNC || c->way == F16_NO_ALL_REDUCE;
    double got = 0; /* ranks without rows have the others' */
    fsdp_model_desc md = FSDP_ZERO;
    md.param_dtype = c->param, md.reduce_dtype = FSDP_F16;
    md.mesh = lab_hsdp(w, c->replicas, fsdp_world_size(w) / c->replicas);
    fsdp_model *m = lab_model(w, &md);
    fsdp_unit *unit = lab_unit(w, m, NULL, params, 2);
    if (c->way == F16_HOOK) CALL(w, fsdp_set_all_reduce_hook(unit, f16_look, NULL));
    if (c->way == F16_CUSTOM) CALL(w, fsdp_set_custom_all_reduce(unit, f16_custom, NULL));
    for (int step = 0; step < 2; step++) {
        CALL(w, fsdp_zero_grad(m));
        if (twice) {
            if (c->way == F16_NO_SYNC) CALL(w, fsdp_set_requires_gradient_sync(m, NULL, 0));
            else CALL(w, fsdp_set_requires_all_reduce(m, NULL, 0));
            if (waits) CALL(w, fsdp_set_gradient_divide_factor(m, unit, 1));
            f16_microbatch(w, m, unit, dtype, value / 2);
            CALL(w, fsdp_set_requires_gradient_sync(m, NULL, 1));
            CALL(w, fsdp_set_requires_all_reduce(m, NULL, 1));
        }
        if (waits) CALL(w, fsdp_set_gradient_divide_factor(m, unit, fsdp_world_size(w)));
        if (c->way == F16_NEW_FACTOR) /* flags of use are divided by it, too */
            CALL(w, fsdp_set_gradient_divide_factor(m, unit, (step + 1) * fsdp_world_size(w)));
        f16_microbatch(w, m, unit, dtype, twice ? value / 2 : value);
        int64_t seen = 0;
        for (int i = 0; i < 2; i++) {
            const fsdp_param_view v = lab_view(w, unit, i);
            CHECK(v.shard_grad);
            for (int64_t e = 0; e < v.numel; e++) { /* all elements are alike */
                const double x = lab_get(v.shard_grad, FSDP_F32, e) * (i ? 1 : -1);
                CHECK(seen++ == 0 || lab_same(x, got));
                got = x;
            }
        }
    }
    CALL(w, fsdp_all_reduce(w, NULL, &got, 1, FSDP_F64, FSDP_MAX));
    fsdp_model_destroy(m);
    return got;
}

static void f16_body(fsdp_world *w, const void *arg) {
    const f16_case *c = (const f16_case *)arg;
    const double smallest = 0x1p-24, size = fsdp_world_size(w);
    const double half = c->way == F16_NEW_FACTOR ? 0.5 : 1;
    const int fits = (!c->plain && c->way != F16_CUSTOM) || size < 4;
    CHECK_NEAR(f16_mean(w, c, 1000), 1000 * half, 0);
    if (c->way == F16_WAITING_FACTOR) return;
    const double large = f16_mean(w, c, 60000);
    if (fits) CHECK_NEAR(large, 60000 * half, 0);
    else CHECK(isinf(large));
    if (c->way != F16_ONCE && c->way != F16_HOOK) return; /* halves of it are 0 */
    const double small = f16_mean(w, c, smallest);
    if (!c->plain) CHECK_NEAR(small, smallest, 0);
}

TEST(f16, sums_stay_in_range) {
    static const int sizes[] = {1, 2, 4};
    for (int s = 0; s < 3; s++)
        for (int replicas = 1; replicas <= sizes[s]; replicas *= 2)
            for (int way = 0; way < (lab_divides() ? F16_CUSTOM : 1); way++)
                for (int param = 0; param < 2; param++) {
                    f16_case c = {replicas, way, !lab_divides(),
                                  param ? FSDP_F16 : FSDP_DTYPE_KEEP};
                    lab_on_worlds(sizes[s], NULL, f16_body, &c);
                }
}
TEST(f16, sums_of_a_backend_that_does_not_divide) {
    fsdp_comm_ops plain = w_plain();
    lab_how how = FSDP_ZERO;
    how.comm_ops = &plain;
    for (int replicas = 1; replicas <= 4; replicas *= 2) {
        const f16_case c = {replicas, F16_ONCE, 1, FSDP_F16};
        lab_on_worlds(4, &how, f16_body, &c);
    }
    for (int replicas = 2; replicas <= 4; replicas *= 2) {
        const f16_case c = {replicas, F16_CUSTOM, 0, FSDP_F16};
        lab_on_worlds(4, NULL, f16_body, &c);
    }
}

/* ---- an optimizer in backward ---------------------------------------------------------------- */

typedef struct inner { /* of one rank */
    const job *j;
    int calls[ALL];
} inner;
static fsdp_status step_in_backward(void *user, const fsdp_param_view *v, void *stream) {
    lib_wait(stream);
    inner *in = (inner *)user;
    int p = lab_row_of(&net, v);
    (void)stream;
    in->calls[p]++;
    CHECK(v->shard_grad != NULL && v->requires_grad && v->grad_dtype == FSDP_F32);
    CHECK(v->unit == in->j->m.unit[p / PARAMS] && v->index == p % PARAMS);
    fsdp_sgd_update((float *)v->shard, (const float *)v->shard_grad, NULL, v->numel, &sgd);
    return FSDP_OK;
}

static void in_backward(job *j) {
    inner in;
    memset(&in, 0, sizeof in);
    in.j = j;
    make_model(j);
    lab_freeze(&j->m, 10, 1); /* and 9 is used by nobody in every other step */
    for (int p = 0; p < ALL; p++)
        CALL(j->w, fsdp_set_post_accumulate_hook(j->m.unit[p / PARAMS], p % PARAMS,
                                                 step_in_backward, &in));
    for (int n = 0; n < 5; n++) {
        int expected[ALL], first = j->log.num;
        memcpy(expected, in.calls, sizeof expected);
        if (j->c->variant) { /* two microbatches: the hook runs when they are reduced */
            CALL(j->w, fsdp_set_requires_gradient_sync(j->m.model, NULL, 0));
            forward(j);
            backward(j, 0);
            CHECK_EQ_MEM(in.calls, expected, sizeof expected);
            CALL(j->w, fsdp_set_requires_gradient_sync(j->m.model, NULL, 1));
        }
        forward(j);
        backward(j, 1);
        for (int p = 0; p < ALL; p++) expected[p] += !j->m.frozen[p] && j->t.has[p];
        for (int p = 0; p < ALL; p++)
            W_CHECK(in.calls[p] == expected[p], "parameter %d: %d calls, expected %d", p,
                    in.calls[p], expected[p]);
        for (int u = 0; u < UNITS; u++) { /* behind everything else of the unit */
            int hook = lab_next_op(&j->log, first, FSDP_OP_CALL, FSDP_LABEL_GRAD_HOOK,
                                   j->m.unit[u]);
            W_CHECK(hook >= 0 &&
                        lab_next_op(&j->log, hook, -1, FSDP_LABEL_REDUCE, j->m.unit[u]) < 0 &&
                        lab_next_op(&j->log, hook, -1, FSDP_LABEL_RED_OUT, j->m.unit[u]) < 0,
                    "unit %d: the hook comes too early", u);
            const fsdp_op *o =
                &j->log.ops[hook]; /* others wait for it by the blocks that it names */
            CHECK(o->src && o->src_ptr == fsdp_buf_ptr(o->src) && o->dst);
            CHECK(o->dst_ptr == fsdp_buf_ptr(o->dst) && o->dst != o->src);
            if (j->n == 1 && !j->c->variant) /* the caller has written what the hook sees */
                CHECK_EQ_INT(o->stream, FSDP_STREAM_COMPUTE);
        }
        for (int k = first; k < j->log.num; k++) /* a record that divides says by what */
            if (j->log.ops[k].share != 0) CHECK(j->log.ops[k].factor == j->n);
        lab_check_grads(&j->m, &j->t);
        CALL(j->w, fsdp_zero_grad(j->m.model));
        lab_descend_truth(&j->m, &j->t, (float)sgd.lr); /* SGD after backward: the same bits */
        j->step++;
        lab_check_params(&j->m, &j->t);
    }
}
/* PyTorch: test_fully_shard_autograd.py test_post_acc_grad_hook_runs,
   test_post_acc_grad_hook_optim_parity. Done: once per reduction, not for a parameter without a
   gradient. SGD (PyTorch: AdamW with a schedule); the test writes the gradients. */
TEST(hooks, optimizer_in_backward) { everywhere(in_backward, 2); }
