/* test_checkpoint_train.c - checkpoints of a run: it resumes with the same bits; saves beside
   training, with how much memory; ranks whose disks are slow; and what PyTorch's tests of
   state_dict ask for.

   SPDX-License-Identifier: MIT */
#include "lab_ckmodel.h"

/* ---- a net that is trained ------------------------------------------------------------------- */

static const ck_param net_rows[] = {{0, "w", FSDP_F32, 2, {7, 5}, 0, 0, 0},
                                    {0, "b", FSDP_F32, 1, {7}, 0, 0, 0},
                                    {1, "w", FSDP_F32, 2, {5, 7}, 1, 0, 0},
                                    {1, "frozen", FSDP_F32, 1, {3}, 0, 1, 0},
                                    {2, "w", FSDP_F32, 2, {130, 9}, 0, 0, 0}};
static const ck_net net = {net_rows, 5};
enum { UNITS = 3, STEPS = 20, HALF = 10 };

typedef struct run_case {
    const char *name;
    ck_layout first, second;
    int same;  /* bits; else 1e-6 */
    int micro; /* batches of a step; all but the last do not reduce */
} run_case;

static double noise(int step, int micro, int rank, int64_t element) {
    uint64_t h = lab_hash((uint64_t)step, (uint64_t)micro, (uint64_t)rank, (uint64_t)element);
    return (double)(h >> 40) / 16777216.0 - 0.5;
}
static void start_value(void *user, const fsdp_param_view *block) {
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        lab_put(block->data, block->dtype, k,
                noise(-1, (int)strlen(block->name) + ck_row(block)->unit, 0,
                      fsdp_view_index(block, k)));
}

/* Gradients depend on the parameters, the step and, if a run is continued on the same mesh, the
   rank. scale: of a scaler; in one step of seven a gradient is infinite. */
static void batch(ck_model *m, int step, int micro, int by_rank, double scale) {
    fsdp_world *w = m->w;
    for (int u = 0; u < UNITS; u++) lab_forward(w, m->unit[u]);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(w, fsdp_pre_backward(m->unit[u]));
        fsdp_param_view v = FSDP_ZERO;
        while (fsdp_next_param(m->model, &v)) {
            if (v.unit != m->unit[u] || !v.requires_grad) continue;
            const float *data = (const float *)fsdp_data(v.unit, v.index);
            float *grad = (float *)fsdp_grad(v.unit, v.index);
            CHECK(data && grad);
            for (int64_t k = 0; k < lab_full_numel(&v); k++)
                grad[k] += (float)(scale * ((double)data[k] * 0.25 + noise(step, micro,
                                                                           by_rank ? m->r->rank : 0,
                                                                           k + 1000 * v.ordinal)));
            if (m->scaler && step % 7 == 5) grad[0] = (float)LAB_INF;
        }
        CALL(w, fsdp_post_backward(m->unit[u]));
    }
    CALL(w, fsdp_finalize_backward(m->model));
}
static void train_step(ck_model *m, int step, int micro, int by_rank) {
    double scale = fsdp_grad_scaler_scale(m->scaler);
    for (int b = 0; b < micro; b++) {
        CALL(m->w, fsdp_set_requires_gradient_sync(m->model, NULL, b == micro - 1));
        batch(m, step, b, by_rank, scale);
    }
    if (m->scaler) CALL(m->w, fsdp_grad_scaler_unscale(m->scaler));
    if (fsdp_grad_scaler_found_inf(m->scaler) != 1) {
        if (m->adamw) CALL(m->w, fsdp_adamw_step(m->adamw, 0.01));
        if (m->sgd) CALL(m->w, fsdp_sgd_step(m->sgd, 0.05));
    }
    if (m->scaler) CALL(m->w, fsdp_grad_scaler_update(m->scaler));
    CALL(m->w, fsdp_zero_grad(m->model));
}
static void begin_run(ck_model *m, lab_rank *r, fsdp_world *w, const ck_layout *at) {
    fsdp_grad_scaler_desc sd = FSDP_ZERO;
    ck_layout plain = *at;
    plain.scaler = 0;
    ck_make(m, r, w, &net, at);
    m->at = &plain;
    ck_optimizers(m);
    m->at = at;
    sd.growth_interval = 3;
    if (at->scaler) CALL(w, fsdp_grad_scaler_create(m->model, &sd, &m->scaler));
    ck_open(m, NULL);
    CALL(w, fsdp_init_params(m->model, start_value, NULL));
}

/* All parameters and the scale, of a run that was not interrupted. */
static void keep_result(ck_model *m, const char *name) {
    fsdp_param_view v = FSDP_ZERO;
    float *all = (float *)lab_zeros(4096, sizeof *all);
    char path[600];
    int64_t at = 0;
    while (fsdp_next_param(m->model, &v)) {
        CALL(m->w, fsdp_param_full(v.unit, v.index, all + at));
        at += lab_full_numel(&v);
    }
    all[at++] = (float)fsdp_grad_scaler_scale(m->scaler);
    snprintf(path, sizeof path, "%s/%s", h_tmpdir(), name);
    if (m->r->rank == 0) ck_spit(path, all, at * 4);
    free(all);
}
static void same_result(double most) {
    char a[600], b[600];
    int64_t a_bytes, b_bytes;
    snprintf(a, sizeof a, "%s/whole", h_tmpdir());
    snprintf(b, sizeof b, "%s/resumed", h_tmpdir());
    char *x = ck_slurp(a, &a_bytes), *y = ck_slurp(b, &b_bytes);
    CHECK(x && y && a_bytes == b_bytes && a_bytes > 4 * 1000);
    for (int64_t k = 0; k < a_bytes / 4; k++) {
        float p = ((float *)(void *)x)[k], q = ((float *)(void *)y)[k];
        CHECK_MSG(most > 0 ? (double)(p - q) <= most && (double)(q - p) <= most
                           : !memcmp(&p, &q, sizeof p),
                  "parameter %lld: %.9g when resumed, %.9g else", (long long)k, (double)q,
                  (double)p);
    }
    free(x);
    free(y);
}

static void whole_run(lab_rank *r) {
    const run_case *c = (const run_case *)r->arg;
    char dir[512];
    ck_model m;
    fsdp_world *w = lab_world(r, 0, c->first.lanes, NULL);
    begin_run(&m, r, w, &c->first);
    for (int step = 0; step < STEPS; step++) {
        if (step == HALF) ck_save(&m, ck_dir(dir, "run"), step);
        train_step(&m, step, c->micro, c->same);
    }
    keep_result(&m, "whole");
    ck_end(&m);
    CHECK_OK(fsdp_shutdown(w));
}
static void resumed_run(lab_rank *r) {
    const run_case *c = (const run_case *)r->arg;
    char dir[512], path[FSDP_CHECKPOINT_PATH];
    int64_t step;
    ck_model m;
    fsdp_world *w = lab_world(r, 1, c->second.lanes, NULL);
    begin_run(&m, r, w, &c->second);
    train_step(&m, 99, 1, 0); /* whatever was before */
    CALL(w, fsdp_checkpoint_find(m.ck, ck_dir(dir, "run"), -1, path, sizeof path, &step));
    CHECK_EQ_INT(step, HALF);
    CALL(w, fsdp_checkpoint_load(m.ck, path, NULL));
    for (; step < STEPS; step++) train_step(&m, (int)step, c->micro, c->same);
    keep_result(&m, "resumed");
    ck_end(&m);
    CHECK_OK(fsdp_shutdown(w));
}
static void run_as(const ck_layout *at, void (*body)(lab_rank *r), const run_case *c) {
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1, how.processes = at->processes;
    lab_run(at->size, &how, body, (void *)(uintptr_t)c);
}
#define FSDP(size, optim, scaler, lanes, processes)                                                \
    { "fsdp", size, CK_FSDP, 0, 0, 0, optim, scaler, 0, 0, 0, lanes, processes }
#define HSDP22(optim)                                                                              \
    { "hsdp", 4, CK_HSDP, 2, 2, 0, optim, 0, 0, 0, 0, 0, 0 }
static const run_case runs[] = {
    {"adamw/inline", FSDP(2, CK_ADAMW, 0, 0, 0), FSDP(2, CK_ADAMW, 0, 0, 0), 1, 1},
    {"adamw/lanes", FSDP(3, CK_ADAMW, 0, 2, 0), FSDP(3, CK_ADAMW, 0, 2, 0), 1, 1},
    {"adamw/inline_to_lane", FSDP(2, CK_ADAMW, 0, 0, 0), FSDP(2, CK_ADAMW, 0, 1, 0), 1, 1},
    {"adamw/processes", FSDP(2, CK_ADAMW, 0, 0, 1), FSDP(2, CK_ADAMW, 0, 0, 1), 1, 1},
    {"momentum/inline", FSDP(2, CK_MOMENTUM, 0, 0, 0), FSDP(2, CK_MOMENTUM, 0, 0, 0), 1, 1},
    {"sgd/inline", FSDP(2, CK_SGD, 0, 0, 0), FSDP(2, CK_SGD, 0, 0, 0), 1, 1},
    {"scaler/inline", FSDP(2, CK_ADAMW, 1, 0, 0), FSDP(2, CK_ADAMW, 1, 0, 0), 1, 1},
    {"scaler/lanes", FSDP(2, CK_MOMENTUM, 1, 2, 0), FSDP(2, CK_MOMENTUM, 1, 2, 0), 1, 2},
    {"accumulation/inline", FSDP(3, CK_ADAMW, 0, 0, 0), FSDP(3, CK_ADAMW, 0, 0, 0), 1, 3},
    {"hsdp/inline", HSDP22(CK_ADAMW), HSDP22(CK_ADAMW), 1, 1},
    {"1_to_3", FSDP(1, CK_ADAMW, 0, 0, 0), FSDP(3, CK_ADAMW, 0, 0, 0), 0, 1},
    {"4_to_2", FSDP(4, CK_MOMENTUM, 1, 0, 0), FSDP(2, CK_MOMENTUM, 1, 0, 0), 0, 2},
    {"3_to_hsdp", FSDP(3, CK_ADAMW, 0, 0, 0), HSDP22(CK_ADAMW), 0, 1},
    {"hsdp_to_1", HSDP22(CK_SGD), FSDP(1, CK_SGD, 0, 0, 0), 0, 1},
};
TEST_P(checkpoint_run, resumes, runs) {
    run_as(&row->first, whole_run, row);
    run_as(&row->second, resumed_run, row);
    same_result(row->same ? 0 : 1e-6);
}
