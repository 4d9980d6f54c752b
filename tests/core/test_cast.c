/* test_cast.c - fsdp_model_cast: shards, gradients and optimizer states in another dtype, from the
   next call on. A model that was made in that dtype, with equal values, continues with equal bits.

   SPDX-License-Identifier: MIT */
#define TAGS NCCL | ONE_GPU
#include "harness.h"
#include "lab.h"

enum { UNITS = 2, PARAMS = 4, MOST = 64 };

typedef struct {
    int lanes, replicas, offload;
    fsdp_dtype from, to, param; /* param: param_dtype */
} setting;

typedef struct {
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *unit[UNITS];
    fsdp_adamw *adamw;
    int steps;
    fsdp_dtype param; /* param_dtype */
} model;

static const int64_t shapes[PARAMS][2] = {{7, 3}, {5, 1}, {4, 8}, {3, 2}};

/* Makes a model. The last parameter of each unit is frozen; that of the second unit has
   integers. */
static void make(model *x, fsdp_world *w, const setting *s, fsdp_dtype dtype) {
    fsdp_model_desc md = FSDP_ZERO;
    memset(x, 0, sizeof *x);
    x->w = w, x->param = s->param;
    md.param_dtype = s->param, md.cpu_offload = s->offload;
    if (s->replicas) md.mesh = lab_hsdp(w, s->replicas, fsdp_world_size(w) / s->replicas);
    x->m = lab_model(w, &md);
    for (int u = 0; u < UNITS; u++) {
        fsdp_param_desc p[PARAMS];
        for (int i = 0; i < PARAMS; i++)
            p[i] = lab_desc(2, shapes[i], i == 2, i == 3 && u == 1 ? FSDP_I32 : dtype, i == 3);
        x->unit[u] = lab_unit(w, x->m, NULL, p, PARAMS);
    }
}
static void optimize(model *x) {
    fsdp_adamw_desc d = fsdp_adamw_defaults();
    CALL(x->w, fsdp_adamw_create(x->m, &d, &x->adamw));
}
static void end(model *x) {
    fsdp_adamw_destroy(x->adamw);
    fsdp_model_destroy(x->m);
}

static double initial(int param, int64_t e) {
    return (double)((param * 37 + e * 11) % 64) / 64 - 0.5;
}
static void fill(void *user, const fsdp_param_view *v) {
    (void)user;
    for (int64_t k = 0; k < v->numel; k++) {
        if (v->dtype == FSDP_I32) ((int32_t *)v->data)[k] = 3;
        else lab_put(v->data, v->dtype, k, initial(v->ordinal, fsdp_view_index(v, k)));
    }
}

/* Runs a step with gradients that every dtype here can hold exactly. */
static void step(model *x) {
    for (int u = 0; u < UNITS; u++) lab_forward(x->w, x->unit[u]);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(x->w, fsdp_pre_backward(x->unit[u]));
        for (int i = 0; i < 3; i++) {
            void *grad = fsdp_grad(x->unit[u], i);
            const fsdp_param_view v = lab_view(x->w, x->unit[u], i);
            for (int64_t e = 0; grad && e < lab_full_numel(&v); e++)
                lab_put(grad, x->param ? x->param : v.dtype, e,
                        (double)((e + x->steps + i) % 8) / 8);
        }
        CALL(x->w, fsdp_post_backward(x->unit[u]));
    }
    CALL(x->w, fsdp_finalize_backward(x->m));
    if (x->adamw) CALL(x->w, fsdp_adamw_step(x->adamw, 0.01));
    x->steps++;
}

/* A parameter's shard, gradient and optimizer state, in f64. */
typedef struct {
    fsdp_dtype dtype;
    int has_grad, has_state;
    int64_t steps;
    double shard[MOST], grad[MOST], first[MOST], second[MOST];
} kept;

static void keep(model *x, kept *all) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(x->m, &v)) {
        kept *k = &all[v.ordinal];
        fsdp_optim_state s = FSDP_ZERO;
        memset(k, 0, sizeof *k);
        k->dtype = v.dtype;
        CHECK(v.numel <= MOST);
        if (v.dtype == FSDP_I32) continue;
        lab_load(k->shard, v.shard, v.dtype, v.numel);
        k->has_grad = v.shard_grad != NULL;
        if (v.shard_grad) lab_load(k->grad, v.shard_grad, v.grad_dtype, v.numel);
        if (!x->adamw || !v.requires_grad) continue;
        CALL(x->w, fsdp_adamw_state(x->adamw, v.ordinal, &s));
        CHECK_EQ_INT(s.dtype, v.dtype == FSDP_F64 ? FSDP_F64 : FSDP_F32);
        k->has_state = 1, k->steps = *s.step;
        lab_load(k->first, s.first, s.dtype, v.numel);
        lab_load(k->second, s.second, s.dtype, v.numel);
    }
}

/* Checks that each value was rounded once to the new dtype. */
static void check_cast(const kept *before, const kept *after, fsdp_dtype to) {
    for (int p = 0; p < UNITS * PARAMS; p++) {
        const kept *a = &before[p], *b = &after[p];
        if (a->dtype == FSDP_I32) {
            CHECK_EQ_INT(b->dtype, FSDP_I32);
            continue;
        }
        CHECK_EQ_INT(b->dtype, to);
        CHECK_EQ_INT(a->has_grad, b->has_grad);
        CHECK_EQ_INT(a->steps, b->steps);
        for (int e = 0; e < MOST; e++) {
            const fsdp_dtype state = to == FSDP_F64 ? FSDP_F64 : FSDP_F32;
            CHECK_NEAR(b->shard[e], lab_round(to, a->shard[e]), 0);
            CHECK_NEAR(b->grad[e], lab_round(to, a->grad[e]), 0);
            CHECK_NEAR(b->first[e], lab_round(state, a->first[e]), 0);
            CHECK_NEAR(b->second[e], lab_round(state, a->second[e]), 0);
        }
    }
}

/* Writes the values into a model of the right dtype. */
static void give(model *x, const kept *all) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(x->m, &v)) {
        const kept *k = &all[v.ordinal];
        fsdp_optim_state s = FSDP_ZERO;
        if (v.dtype == FSDP_I32) continue;
        lab_store(v.shard, v.dtype, k->shard, v.numel);
        if (!v.requires_grad) continue;
        CALL(x->w, fsdp_adamw_state(x->adamw, v.ordinal, &s));
        lab_store(s.first, s.dtype, k->first, v.numel);
        lab_store(s.second, s.dtype, k->second, v.numel);
        *s.step = k->steps;
    }
    CALL(x->w, fsdp_params_changed(x->m));
}

static void follows(fsdp_world *w, const void *arg) {
    const setting *s = (const setting *)arg;
    static __thread kept before[UNITS * PARAMS], after[UNITS * PARAMS], other[UNITS * PARAMS];
    model a, b;
    make(&a, w, s, s->from);
    CALL(w, fsdp_init_params(a.m, fill, NULL));
    optimize(&a);
    step(&a), step(&a);
    keep(&a, before);
    CALL(w, fsdp_model_cast(a.m, s->to));
    CALL(w, fsdp_model_commit(a.m));
    keep(&a, after);
    check_cast(before, after, s->to);
    make(&b, w, s, s->to);
    CALL(w, fsdp_init_params(b.m, fill, NULL));
    optimize(&b);
    give(&b, after);
    CALL(w, fsdp_zero_grad(a.m));
    for (b.steps = a.steps; b.steps < 4;) {
        step(&a), step(&b);
        keep(&a, after), keep(&b, other);
        CHECK_EQ_MEM(after, other, sizeof after);
        CALL(w, fsdp_zero_grad(a.m));
        CALL(w, fsdp_zero_grad(b.m));
    }
    CALL(w, fsdp_set_requires_grad(a.unit[0], 0, 0)); /* a cast together with a freeze, and back */
    CALL(w, fsdp_model_cast(a.m, s->from));
    keep(&a, before);
    for (int e = 0; e < MOST; e++)
        CHECK_NEAR(before[0].shard[e], lab_round(s->from, other[0].shard[e]), 0);
    step(&a);
    end(&a), end(&b);
}

static const struct {
    const char *name;
    setting s;
} ways[] = {{"f32_f64", {0, 0, 0, FSDP_F32, FSDP_F64, 0}},
            {"f64_f32", {1, 0, 0, FSDP_F64, FSDP_F32, 0}},
            {"f32_bf16", {0, 0, 0, FSDP_F32, FSDP_BF16, 0}},
            {"bf16_f32", {2, 0, 0, FSDP_BF16, FSDP_F32, 0}},
            {"f32_f64_computed_in_bf16", {0, 0, 0, FSDP_F32, FSDP_F64, FSDP_BF16}},
            {"offloaded", {0, 0, 1, FSDP_F32, FSDP_F64, 0}},
            {"replicas", {0, 2, 0, FSDP_F32, FSDP_F64, 0}}};
TEST_P(cast, follows, ways) {
    for (int size = 1; size <= 4; size++) {
        lab_how how = FSDP_ZERO;
        how.lanes = row->s.lanes;
        if (!row->s.replicas || size % row->s.replicas == 0)
            lab_on_worlds(size, &how, follows, &row->s);
    }
}

/* Before the first call that needs a layout a cast moves nothing. */
static void early(fsdp_world *w, const void *arg) {
    const setting s = {0, 0, 0, FSDP_F32, FSDP_F64, 0};
    static __thread kept one[UNITS * PARAMS], other[UNITS * PARAMS];
    model a, b;
    (void)arg;
    make(&a, w, &s, FSDP_F32);
    CALL(w, fsdp_model_cast(a.m, FSDP_BF16));
    CALL(w, fsdp_model_cast(a.m, FSDP_F64));
    make(&b, w, &s, FSDP_F64);
    CALL(w, fsdp_init_params(a.m, fill, NULL));
    CALL(w, fsdp_init_params(b.m, fill, NULL));
    step(&a), step(&b);
    keep(&a, one), keep(&b, other);
    CHECK_EQ_MEM(one, other, sizeof one);
    end(&a), end(&b);
}
TEST(cast, before_the_first_use) {
    for (int size = 1; size <= 3; size++) lab_on_worlds(size, NULL, early, NULL);
}

static int a_size(void *user, int64_t numel, int64_t nbytes[FSDP_GATHER_TENSORS]) {
    (void)user;
    nbytes[0] = numel * 4;
    return 1;
}
static fsdp_status pack(void *user, const fsdp_param_view *v, void *const *out, void *stream) {
    lib_wait(stream);
    (void)user, (void)stream;
    memcpy(out[0], v->shard, (size_t)v->numel * sizeof(float));
    return FSDP_OK;
}
static fsdp_status unpack(void *user, const fsdp_param_view *v, const void *const *in, void *full,
                          fsdp_dtype dtype, void *stream) {
    lib_wait(stream);
    (void)user, (void)v, (void)in, (void)full, (void)dtype, (void)stream;
    return FSDP_OK;
}

/* A refused cast changes nothing. */
static void refused(fsdp_world *w, const void *arg) {
    const setting s = {0, 0, 0, FSDP_F32, FSDP_F64, 0};
    const fsdp_gather_extension extension = {a_size, pack, unpack, NULL};
    fsdp_param_desc d = fsdp_vec("x", 8);
    model a;
    (void)arg;
    make(&a, w, &s, FSDP_F32);
    CALL(w, fsdp_init_params(a.m, fill, NULL));
    CHECK_STATUS(fsdp_model_cast(NULL, FSDP_F64), FSDP_ERR_INVALID_ARG);
    REFUSED_AS(FSDP_ERR_INVALID_ARG, w, fsdp_model_cast(a.m, FSDP_I32), "E171");
    REFUSED_AS(FSDP_ERR_INVALID_ARG, w, fsdp_model_cast(a.m, FSDP_DTYPE_KEEP), "E171");
    REFUSED_AS(FSDP_ERR_INVALID_ARG, w, fsdp_model_cast(a.m, 77), "E171");
    CALL(w, fsdp_pre_forward(a.unit[0]));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, w, fsdp_model_cast(a.m, FSDP_F64), "model_cast");
    CALL(w, fsdp_post_forward(a.unit[0]));
    CALL(w, fsdp_model_reset(a.m));
    CALL(w, fsdp_set_requires_gradient_sync(a.m, NULL, 0));
    step(&a);
    REFUSED_AS(FSDP_ERR_INVALID_STATE, w, fsdp_model_cast(a.m, FSDP_F64), "E203");
    REFUSED_AS(FSDP_ERR_INVALID_STATE, w, fsdp_finalize_backward(a.m), "E203"); /* returned again */
    CALL(w, fsdp_set_requires_gradient_sync(a.m, NULL, 1));
    step(&a);
    CHECK_EQ_INT(lab_view(w, a.unit[0], 0).dtype, FSDP_F32);
    CALL(w, fsdp_model_cast(a.m, FSDP_F64));
    CHECK_EQ_INT(lab_view(w, a.unit[0], 0).dtype, FSDP_F64);
    end(&a);
    d.extension = &extension;
    a.m = lab_model(w, NULL);
    lab_unit(w, a.m, NULL, &d, 1);
    REFUSED_AS(FSDP_ERR_UNSUPPORTED, w, fsdp_model_cast(a.m, FSDP_F64), "E213");
    fsdp_model_destroy(a.m);
}
TEST(cast, refused) {
    for (int size = 1; size <= 2; size++) lab_on_worlds(size, NULL, refused, NULL);
}

/* If any one allocation fails, a second call completes the cast. */
static void out_of_memory(lab_rank *r) {
    const setting s = {0, 0, 0, FSDP_F32, FSDP_F64, 0};
    static kept before[UNITS * PARAMS], after[UNITS * PARAMS];
    int failed = 1;
    for (int n = 0; failed; n++) {
        model a;
        make(&a, r->w, &s, FSDP_F32);
        CALL(r->w, fsdp_init_params(a.m, fill, NULL));
        optimize(&a);
        step(&a);
        keep(&a, before);
        failed = 0;
        w_fail(r->heap, n);
        fsdp_status status = fsdp_model_cast(a.m, FSDP_F64);
        if (!status) status = fsdp_model_commit(a.m);
        if (status) {
            CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
            failed = 1;
            fsdp_memory memory;
            CALL(r->w, fsdp_model_predict(a.m, &memory)); /* for the present layout */
            CALL(r->w, fsdp_model_cast(a.m, FSDP_F64));
            CALL(r->w, fsdp_model_commit(a.m));
        }
        fsdp_optim_state state;
        status = fsdp_adamw_state(a.adamw, 0, &state);
        if (status) {
            CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
            failed = 1;
        }
        w_fail(r->heap, -1);
        keep(&a, after);
        check_cast(before, after, FSDP_F64);
        step(&a);
        end(&a);
        CHECK(n < 200 && (failed || n > 10));
    }
}
TEST(cast, out_of_memory, NO(NCCL | ONE_GPU)) { lab_run(1, NULL, out_of_memory, NULL); }
