/* test_optim_launches.c - the number of kernel launches in a step of an optimizer, of the scaler
   and of clipping, on the CUDA stub: a model with many units, groups and step counts needs no more
   than one parameter.

   SPDX-License-Identifier: MIT */
#define TAGS NO(SHM) | STUB | STUB_ASAN
#include "harness.h"
#include "lab.h"
#include "stubs/stub.h"

/* Layers of a GPT: matrices, which decay, between vectors, which do not. */
enum { LAYERS = 12, PARAMS = 12, WIDTH = 64 };

typedef struct {
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *unit[LAYERS];
    int records, runs; /* updates, since these were set to 0 */
} gpt;

static int see(void *user, fsdp_model *model, fsdp_op *op) {
    gpt *g = (gpt *)user;
    (void)model;
    g->records += op->kind == FSDP_OP_UPDATE;
    if (op->kind == FSDP_OP_UPDATE) g->runs += (int)op->list_count;
    return 0;
}

static void open_gpt(gpt *g, fsdp_dtype dtype) {
    static fsdp_extension watcher;
    fsdp_world_desc d = w_desc(0, 1, NULL, "launches", 0);
    fsdp_param_desc p[PARAMS];
    memset(g, 0, sizeof *g);
    d.backend = "nccl";
    CALL(NULL, fsdp_init(&d, &g->w));
    CALL(g->w, fsdp_model_create(g->w, NULL, &g->m));
    for (int i = 0; i < PARAMS; i++) {
        p[i] = i % 3 ? fsdp_vec(NULL, WIDTH) : fsdp_mat(NULL, WIDTH, WIDTH + i);
        p[i].dtype = dtype;
    }
    for (int l = 0; l < LAYERS; l++) g->unit[l] = lab_unit(g->w, g->m, NULL, p, PARAMS);
    watcher.name = "watcher";
    watcher.user = g;
    watcher.op = see;
    CALL(g->w, fsdp_attach(g->m, &watcher));
}

static int is_frozen(int step, int layer, int param) {
    return step < 2 && layer == 1 && param == 3;
}

/* Gradients are zeros; in even steps one parameter in each third layer has none. */
static void backward(const gpt *g, int step) {
    for (int l = 0; l < LAYERS; l++) lab_forward(g->w, g->unit[l]);
    for (int l = LAYERS - 1; l >= 0; l--) {
        CALL(g->w, fsdp_pre_backward(g->unit[l]));
        for (int i = 0; i < PARAMS; i++)
            if ((step % 2 || l % 3 || i != 4) && !is_frozen(step, l, i))
                CHECK(fsdp_grad(g->unit[l], i) != NULL);
        CALL(g->w, fsdp_post_backward(g->unit[l]));
    }
    CALL(g->w, fsdp_finalize_backward(g->m));
}

static int group_of(void *user, const fsdp_param_view *v) {
    (void)user;
    return v->ndim > 1 ? 0 : 1;
}

/* Returns the number of launches of a call that issues `records` ops. */
static int64_t launches(gpt *g, fsdp_status (*call)(void *), void *arg, int records) {
    int64_t before = stub_count("launch");
    g->records = g->runs = 0;
    CALL(g->w, call(arg));
    CHECK_EQ_INT(g->records, records);
    return stub_count("launch") - before;
}

static fsdp_status adamw(void *opt) { return fsdp_adamw_step((fsdp_adamw *)opt, 0.1); }
static fsdp_status sgd(void *opt) { return fsdp_sgd_step((fsdp_sgd *)opt, 0.1); }
static fsdp_status unscale(void *scaler) {
    return fsdp_grad_scaler_unscale((fsdp_grad_scaler *)scaler);
}
static fsdp_status clip(void *model) { return fsdp_clip_grad_norm((fsdp_model *)model, 1, NULL); }

/* bf16 is rounded stochastically: each parameter is an update of its own. A driver without large
   parameters takes 24 updates in a launch. */
static const struct {
    const char *name;
    fsdp_dtype dtype;
    int driver, least, most; /* least, most: updates in a step */
} models[] = {{"f32", FSDP_F32, 13000, 7 * LAYERS, 9 * LAYERS},
              {"bf16", FSDP_BF16, 13000, PARAMS *LAYERS - 5, PARAMS *LAYERS},
              {"f32,driver_of_12.0", FSDP_F32, 12000, 7 * LAYERS, 9 * LAYERS}};

static void of_a_gpt(int rank, int world, void *arg) {
    const int row = (int)(uintptr_t)arg, is_old = models[row].driver < 12010;
    fsdp_adamw_desc a = fsdp_adamw_defaults();
    fsdp_sgd_desc s = fsdp_sgd_defaults();
    fsdp_adamw *first;
    fsdp_sgd *second;
    fsdp_grad_scaler *scaler;
    fsdp_optim_state state[2];
    gpt g;
    (void)rank, (void)world;
    stub_set(STUB_DRIVER_VERSION, models[row].driver);
    open_gpt(&g, models[row].dtype);
    a.num_groups = s.num_groups = 2, a.group = s.group = group_of;
    a.groups[1].weight_decay = 0, s.groups[1].lr_scale = 2;
    a.stochastic_rounding = s.stochastic_rounding = 1, s.momentum = 0.9;
    CALL(g.w, fsdp_adamw_create(g.m, &a, &first));
    CALL(g.w, fsdp_sgd_create(g.m, &s, &second));
    CALL(g.w, fsdp_grad_scaler_create(g.m, NULL, &scaler));
    CALL(g.w, fsdp_set_requires_grad(g.unit[1], 3, 0)); /* frozen for a while */
    for (int step = 0; step < 4; step++) {
        if (step == 2) CALL(g.w, fsdp_set_requires_grad(g.unit[1], 3, 1));
        backward(&g, step);
        const int64_t unscales = launches(&g, unscale, scaler, 1);
        CHECK_EQ_INT(unscales, (g.runs + 23) / 24 * is_old + !is_old);
        /* the norms of tiles, the norm of all, and the factor: one parameter for each block of a
           list */
        const int64_t clips = launches(&g, clip, g.m, 0);
        if (!is_old) CHECK_EQ_INT(clips, 3);
        const int64_t updates[2] = {launches(&g, adamw, first, 1), launches(&g, sgd, second, 1)};
        W_CHECK(g.runs >= models[row].least && g.runs <= models[row].most, "%d runs", g.runs);
        for (int k = 0; k < 2; k++) CHECK_EQ_INT(updates[k], is_old ? (g.runs + 23) / 24 : 1);
        CALL(g.w, fsdp_grad_scaler_update(scaler));
        CALL(g.w, fsdp_zero_grad(g.m));
    }
    CALL(g.w, fsdp_adamw_state(first, PARAMS + 3, &state[0]));
    CALL(g.w, fsdp_adamw_state(first, PARAMS + 6, &state[1]));
    CHECK_EQ_INT(state[0].group, state[1].group);
    CHECK(*state[0].step == 2 && *state[1].step == 4);
    CALL(g.w, fsdp_shutdown(g.w));
}

TEST_P(optim_launches, of_a_gpt, models) {
    h_ranks_proc(1, of_a_gpt, (void *)(uintptr_t)(row - models));
}
