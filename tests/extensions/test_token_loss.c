/* test_token_loss.c - a loss that is the mean over the tokens of all ranks and microbatches, which
   have different numbers of tokens: gradients of sums, and the number of tokens as divide factor.
   Compared with a loop in f64 over all tokens, on 1 to 4 ranks, for every way to reduce.
   SPDX-License-Identifier: MIT */
#define TAGS GLOO
#include "harness.h"
#include "lab.h"
#include "fsdp_plan.h"
#include "fsdp_replicate.h"
#include <math.h> // fabs, sqrt

enum { L = 2, D = 5, N = D * D + D, STEPS = 7, MAX_TOKENS = 40 };
static const double LR = 0.2, MAX_NORM = 0.4;

static double noise(int k) { return (double)((k * 37 + k / 7 * 11) % 41 - 20) / 20; }
static double start(int l, int k) { return 0.3 * noise(l * 100 + k); }
static double input(int step, int token, int i) { return noise(step * 997 + token * 13 + i); }

/* Tokens of a step: none in step 4. Each token is in a cell, which is a rank's microbatch; some
   cells have none, others many. */
static int tokens_of(int step) { return step == 4 ? 0 : 11 + step * 7 % 29; }
static int cell_of(int step, int token, int cells) {
    const int at = (int)((unsigned)(token * 40503 + step * 9176) % 1000);
    return (int)((long)at * at * cells / 1000000);
}

/* ---- a loop over all tokens ------------------------------------------------------------------ */

typedef struct {
    double w[L][N], loss[STEPS], norm[STEPS];
} outcome;

/* Adds the gradient of one token's loss, |y - (x reversed)|^2 / 2; returns the loss. */
static double token(double (*w)[N], double (*g)[N], int step, int t) {
    double x[L + 1][D], d[D], loss = 0;
    for (int i = 0; i < D; i++) x[0][i] = input(step, t, i);
    for (int l = 0; l < L; l++)
        for (int i = 0; i < D; i++) {
            x[l + 1][i] = x[l][i] + w[l][D * D + i];
            for (int j = 0; j < D; j++) x[l + 1][i] += w[l][i * D + j] * x[l][j];
        }
    for (int i = 0; i < D; i++) {
        d[i] = x[L][i] - x[0][D - 1 - i];
        loss += d[i] * d[i] / 2;
    }
    for (int l = L - 1; l >= 0; l--) {
        double dx[D];
        for (int i = 0; i < D; i++) dx[i] = d[i];
        for (int i = 0; i < D; i++) {
            g[l][D * D + i] += d[i];
            for (int j = 0; j < D; j++) {
                g[l][i * D + j] += d[i] * x[l][j];
                dx[j] += w[l][i * D + j] * d[i];
            }
        }
        memcpy(d, dx, sizeof d);
    }
    return loss;
}

static void reference(outcome *o) {
    for (int l = 0; l < L; l++)
        for (int k = 0; k < N; k++) o->w[l][k] = start(l, k);
    for (int step = 0; step < STEPS; step++) {
        double g[L][N] = {{0}}, squares = 0;
        const int n = tokens_of(step);
        o->loss[step] = 0;
        for (int t = 0; t < n; t++) o->loss[step] += token(o->w, g, step, t) / n;
        for (int l = 0; l < L; l++)
            for (int k = 0; k < N && n; k++) g[l][k] /= n, squares += g[l][k] * g[l][k];
        o->norm[step] = sqrt(squares);
        const double scale = o->norm[step] > MAX_NORM ? MAX_NORM / o->norm[step] : 1;
        for (int l = 0; l < L; l++)
            for (int k = 0; k < N; k++) o->w[l][k] -= LR * scale * g[l][k];
    }
}

/* ---- training on ranks ----------------------------------------------------------------------- */

enum { FSDP, HSDP, DDP, BUCKETS };
typedef struct {
    const char *name;
    int ranks, how, planned, micro, last_only, of_means, joins;
} form;

typedef struct {
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *u[L];
    fsdp_replicate *rep;
} rig;

static void fill(void *user, const fsdp_param_view *b) {
    (void)user;
    const int first = b->name[0] == 'b' ? D * D : 0; /* w, then b, in each layer */
    for (int64_t k = 0; k < b->numel; k++)
        ((float *)b->data)[k] = (float)start(b->name[1] - '0', first + (int)fsdp_view_index(b, k));
}

static void build(rig *x, fsdp_world *w, const form *f) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_param_desc p[2 * L] = {fsdp_mat("w0", D, D), fsdp_vec("b0", D), fsdp_mat("w1", D, D),
                                fsdp_vec("b1", D)};
    memset(x, 0, sizeof *x);
    x->w = w;
    if (f->how == HSDP) md.mesh = lab_mesh2(w, 2, f->ranks / 2, "dp_replicate", "dp_shard");
    if (f->how == DDP || f->how == BUCKETS) {
        fsdp_mesh *mesh;
        CALL(w, fsdp_mesh_1d(w, "dp", &mesh));
        CALL(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &info));
        md.mesh_info = &info;
    }
    x->m = lab_model(w, &md);
    if (f->how == BUCKETS) {
        fsdp_replicate_desc d = FSDP_ZERO;
        d.params = p, d.num_params = 2 * L, d.bucket_bytes = D * D * 4;
        CALL(w, fsdp_replicate_create(x->m, &d, &x->rep));
    }
    for (int l = 0; l < L && !x->rep; l++) x->u[l] = lab_unit(w, x->m, NULL, p + 2 * l, 2);
    CALL(w, fsdp_init_params(x->m, fill, NULL));
}

static float *param(const rig *x, int l, int p, int grad) {
    if (x->rep)
        return (float *)(grad ? fsdp_replicate_grad(x->rep, 2 * l + p)
                              : fsdp_replicate_data(x->rep, 2 * l + p));
    return (float *)(grad ? fsdp_grad(x->u[l], p) : fsdp_data(x->u[l], p));
}

/* Reads a layer's parameters, or adds a gradient to it. */
static void layer(const rig *x, int l, double *w, const double *g) {
    for (int p = 0; p < 2; p++) {
        float *at = param(x, l, p, g != NULL);
        for (int k = 0; k < (p ? D : D * D); k++)
            if (g) at[k] += (float)g[p * D * D + k];
            else w[p * D * D + k] = (double)at[k];
    }
}

/* One microbatch of this rank. Returns the summed loss, or the mean with of_means. */
static double microbatch(rig *x, const form *f, int step, int cell) {
    double w[L][N], g[L][N] = {{0}}, loss = 0;
    int counted = 0;
    if (x->rep) CALL(x->w, fsdp_replicate_pre_forward(x->rep));
    for (int l = 0; l < L; l++) {
        if (!x->rep) CALL(x->w, fsdp_pre_forward(x->u[l]));
        layer(x, l, w[l], NULL);
        if (!x->rep) CALL(x->w, fsdp_post_forward(x->u[l]));
    }
    if (x->rep) CALL(x->w, fsdp_replicate_post_forward(x->rep));
    for (int t = 0; t < tokens_of(step); t++)
        if (cell_of(step, t, f->ranks * f->micro) == cell) loss += token(w, g, step, t), counted++;
    for (int l = 0; l < L && f->of_means && counted; l++)
        for (int k = 0; k < N; k++) g[l][k] /= counted * f->micro;
    for (int l = L - 1; l >= 0; l--) {
        if (!x->rep) CALL(x->w, fsdp_pre_backward(x->u[l]));
        layer(x, l, NULL, g[l]);
        if (x->rep) CALL(x->w, fsdp_replicate_ready(x->rep, 2 * l, 2));
        else CALL(x->w, fsdp_post_backward(x->u[l]));
    }
    if (x->rep) CALL(x->w, fsdp_replicate_post_backward(x->rep));
    CALL(x->w, fsdp_finalize_backward(x->m));
    return loss;
}

static void train(lab_rank *r) {
    const form *f = (const form *)r->arg;
    outcome want;
    fsdp_plan *plan = NULL;
    double worst = 0;
    int32_t active, shadows = 0;
    rig x;
    build(&x, r->w, f);
    if (f->planned) CALL(r->w, fsdp_plan_create(x.m, NULL, &plan));
    for (int step = 0; step < STEPS; step++) {
        double own = 0, counted, loss = 0, norm;
        for (int t = 0; t < tokens_of(step); t++)
            own += cell_of(step, t, f->ranks * f->micro) / f->micro == r->rank;
        counted = own;
        CALL(r->w, fsdp_all_reduce(r->w, NULL, &counted, 1, FSDP_F64, FSDP_SUM));
        CHECK(counted >= tokens_of(step) && counted <= tokens_of(step));
        /* DDP's join sets its own factor, for the number of ranks: the test's factor is set
           afterwards. */
        if (f->joins) CALL(r->w, fsdp_replicate_join(x.rep, own > 0, 1, &active));
        if (!f->of_means) CALL(r->w, fsdp_set_gradient_divide_factor(x.m, NULL, counted));
        if (f->joins && !(own > 0)) {
            CALL(r->w, fsdp_replicate_shadow(x.rep));
            CALL(r->w, fsdp_finalize_backward(x.m));
            shadows++;
        }
        for (int m = 0; m < f->micro && !(f->joins && !(own > 0)); m++) {
            if (f->last_only)
                CALL(r->w, fsdp_set_requires_gradient_sync(x.m, NULL, m == f->micro - 1));
            loss += microbatch(&x, f, step, r->rank * f->micro + m);
        }
        CALL(r->w, fsdp_all_reduce(r->w, NULL, &loss, 1, FSDP_F64, FSDP_SUM));
        CALL(r->w, fsdp_clip_grad_norm(x.m, MAX_NORM, &norm));
        CALL(r->w, fsdp_params_writable(x.m));
        fsdp_param_view v = FSDP_ZERO;
        while (fsdp_next_param(x.m, &v))
            for (int64_t k = 0; k < v.numel && v.shard_grad; k++) /* none if all ranks shadow */
                ((float *)v.shard)[k] -= (float)LR * ((const float *)v.shard_grad)[k];
        fsdp_params_changed(x.m);
        CALL(r->w, fsdp_zero_grad(x.m));
        reference(&want);
        if (f->of_means) continue;
        CHECK_NEAR(counted > 0 ? loss / counted : 0, want.loss[step], 1e-4 * want.loss[step]);
        CHECK_NEAR(norm, want.norm[step], 1e-4 * want.norm[step]);
    }
    CALL(r->w, fsdp_all_reduce(r->w, NULL, &shadows, 1, FSDP_I32, FSDP_SUM));
    if (f->joins) CHECK(shadows > f->ranks); /* all in step 4, and some rank in another step */
    if (plan) CHECK_EQ_INT(fsdp_plan_state(plan), FSDP_PLAN_REPLAYING);
    for (int l = 0; l < L; l++) {
        double got[N];
        if (x.rep) CALL(r->w, fsdp_replicate_pre_forward(x.rep));
        else CALL(r->w, fsdp_pre_forward(x.u[l]));
        layer(&x, l, got, NULL);
        if (x.rep) CALL(r->w, fsdp_replicate_post_forward(x.rep));
        else CALL(r->w, fsdp_post_forward(x.u[l]));
        for (int k = 0; k < N; k++)
            if (fabs(got[k] - want.w[l][k]) > worst) worst = fabs(got[k] - want.w[l][k]);
    }
    CHECK_MSG(f->of_means ? worst > 1e-3 : worst < 1e-5, "off by %g", worst);
}

static const form forms[] = {
    {"one_rank", 1, FSDP, 0, 1, 0, 0, 0},
    {"one_rank,micro=3", 1, FSDP, 0, 3, 1, 0, 0},
    {"fsdp,W=2", 2, FSDP, 0, 1, 0, 0, 0},
    {"fsdp,W=3,micro=2", 3, FSDP, 0, 2, 0, 0, 0},
    {"fsdp,W=4,micro=3,last_only", 4, FSDP, 0, 3, 1, 0, 0},
    {"hsdp,W=4", 4, HSDP, 0, 1, 0, 0, 0},
    {"hsdp,W=4,micro=3,last_only", 4, HSDP, 0, 3, 1, 0, 0},
    {"ddp,W=3,micro=2", 3, DDP, 0, 2, 0, 0, 0},
    {"ddp,W=2,micro=3,last_only", 2, DDP, 0, 3, 1, 0, 0},
    {"buckets,W=3", 3, BUCKETS, 0, 1, 0, 0, 0},
    {"buckets,join,W=4", 4, BUCKETS, 0, 1, 0, 0, 1},
    {"buckets,W=2,micro=3,last_only", 2, BUCKETS, 0, 3, 1, 0, 0},
    {"plan,W=1", 1, FSDP, 1, 1, 0, 0, 0},
    {"plan,W=3,micro=2", 3, FSDP, 1, 2, 0, 0, 0},
    {"plan,W=2,micro=3,last_only", 2, FSDP, 1, 3, 1, 0, 0},
    {"plan,hsdp,W=4", 4, HSDP, 1, 1, 0, 0, 0},
    {"plan,buckets,W=2", 2, BUCKETS, 1, 1, 0, 0, 0},
};
TEST_P(token_loss, mean_over_all_tokens, forms, row->ranks > 3 ? MANY_RANKS : 0) {
    form f = *row;
    lab_run(f.ranks, NULL, train, &f);
}
/* The mean of the microbatches' means is another loss: the forms above would detect it. */
TEST(token_loss, means_of_means_differ) {
    form f = {"means", 3, FSDP, 0, 2, 0, 1, 0};
    lab_run(f.ranks, NULL, train, &f);
}
