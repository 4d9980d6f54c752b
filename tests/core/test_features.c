/* test_features.c - hooks of gradients that wait or fail; addresses; sums in f16. Ranks are threads,
   also over Gloo and NCCL.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | NCCL | AT_NIGHT(TSAN)
#include "harness.h"
#include <math.h> /* isfinite, isinf */
#include "lab.h"

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
static void grad_hook_fails(lab_rank *r) {
    fsdp_status of_hook = *(const fsdp_status *)r->arg;
    const fsdp_status expected = of_hook == FSDP_ERR_IO ? FSDP_ERR_IO : FSDP_ERR_ABORTED;
    const fsdp_param_desc p = fsdp_mat("a", 9, 2);
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *u = lab_unit(r->w, m, NULL, &p, 1);
    CALL(r->w, fsdp_set_post_accumulate_hook(u, 0, refuses, &of_hook));
    lab_forward(r->w, u);
    (void)fsdp_pre_backward(u);
    (void)fsdp_grad(u, 0);
    (void)fsdp_post_backward(u);
    CHECK_STATUS(fsdp_finalize_backward(m), expected);
    CHECK_STATUS(fsdp_world_status(r->w), expected);
    CHECK_STATUS(fsdp_pre_forward(u), expected);
    lib_drain(r->w); /* nobody reads of_hook any more */
}
TEST(hooks, failure_of_an_optimizer_in_backward) {
    for (int k = 0; k < 2 * 4 * 3; k++) {
        fsdp_status of_hook = k % 2 ? FSDP_ERR_IO : FSDP_ERR_INVALID_STATE;
        lab_how how = FSDP_ZERO;
        how.lanes = k / 8;
        lab_run(1 + k / 2 % 4, &how, grad_hook_fails, &of_hook);
    }
}

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
