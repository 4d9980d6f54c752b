/* test_golden_train.c - repeats PyTorch's training runs, recorded in tests/golden/train_*.txt, on
   thread ranks, and compares the gradients of the first step, the losses of every step and rank,
   norms and final parameters. Worker threads, layout and kind of reduction must not change a bit.
   Every case is run.

   SPDX-License-Identifier: MIT */
#define TAGS SLOW | AT_NIGHT(ASAN | GLOO | NCCL)
#include "harness.h"
#include "golden.h"
#include <math.h> /* fabs, frexp, ldexp, nearbyint */
#include "lab.h"

enum { STEPS = 10, MAX_LAYERS = 16, MAX_PARAMS = 64, MAX_OPTS = 4, MAX_RANKS = 64 };

/* ---- a case ---------------------------------------------------------------------------------- */

typedef struct {
    char name[24]; /* its first letter is its role in the model */
    int unit, index, shard_dim, trains, ndim;
    int64_t shape[FSDP_MAX_DIMS], numel;
    int64_t at; /* index of its first value in an array over all parameters */
    uint64_t seed;
    double scale;
    int64_t grads; /* number of values in the record `grad`; 0: none */
} param;

typedef struct { /* one optimizer */
    int sgd;
    double lr, a, b, c, decay; /* sgd: momentum, dampening, nesterov; adamw: betas, eps */
    double *loss, *norm, *final;
    int losses, norms, finals; /* records seen */
} opt;

typedef struct {
    char name[64];
    int replicas, shards, ranks, raf, layers, micro, no_sync, no_all_reduce;
    int tied[MAX_LAYERS + 1], cond;
    fsdp_dtype param_dtype, reduce_dtype; /* KEEP: not given */
    fsdp_dtype type, sum_type;            /* dtype of all values; of the reduction */
    int64_t dims[MAX_LAYERS + 1], batch, total, most, wide;
    uint64_t seed;
    double divide, clip_p, max_norm; /* 0: not given */
    int num_params, num_opts, grads, clips, w[MAX_LAYERS + 1], b[MAX_LAYERS + 1], u[MAX_LAYERS + 1],
        s;
    param params[MAX_PARAMS];
    double *grad, *clipped;
    opt opts[MAX_OPTS];
} test_case;

static fsdp_dtype read_dtype(golden *g) {
    const char *word = golden_word(g);
    if (!strcmp(word, "-")) return FSDP_DTYPE_KEEP;
    for (fsdp_dtype d = 1; d < FSDP_DTYPE_COUNT; d++)
        if (!strcmp(word, fsdp_dtype_name(d))) return d;
    golden_fail(g, "'%s' is no dtype", word);
    return FSDP_DTYPE_KEEP;
}

/* Reads an integer from lowest to highest. On failure sets an error, and returns lowest. */
static int read_int(golden *g, int lowest, int highest) {
    int64_t x = golden_int(g);
    if (x >= lowest && x <= highest) return (int)x;
    golden_fail(g, "%lld is not in %d..%d", (long long)x, lowest, highest);
    return lowest;
}

static void read_param(test_case *c, golden *g) {
    param *p = &c->params[c->num_params];
    if (c->num_params == MAX_PARAMS || c->grad) golden_fail(g, "too many parameters, or too late");
    if (read_int(g, 0, MAX_PARAMS) != c->num_params) golden_fail(g, "out of order");
    if (g->error[0]) return;
    p->unit = read_int(g, 0, c->layers);
    snprintf(p->name, sizeof p->name, "%s", golden_word(g));
    p->shard_dim = read_int(g, 0, FSDP_MAX_DIMS - 1), p->trains = read_int(g, 0, 1);
    p->seed = golden_seed(g), p->scale = golden_num(g);
    p->ndim = read_int(g, 1, 2);
    golden_ints(g, p->ndim, p->shape);
    p->numel = lab_numel(p->ndim, p->shape);
    for (int i = 0; i < c->num_params; i++) p->index += c->params[i].unit == p->unit;
    int *place = p->unit && p->name[0] == 'w'    ? &c->w[p->unit]
                 : p->unit && p->name[0] == 'b'  ? &c->b[p->unit]
                 : p->unit && p->name[0] == 'u'  ? &c->u[p->unit]
                 : !p->unit && p->name[0] == 's' ? &c->s
                                                 : NULL;
    int64_t rows = c->dims[p->unit ? p->unit : c->layers], columns = 1;
    if (p->unit && p->name[0] == 'w') columns = c->dims[p->unit - 1];
    if (!place || *place >= 0 || p->shape[0] != rows || p->numel != rows * columns)
        golden_fail(g, "parameter %s does not belong to the model", p->name);
    if (place) *place = c->num_params;
    p->at = c->total;
    c->total += p->numel;
    if (p->numel > c->most) c->most = p->numel;
    c->num_params++;
}

/* Reads `P n v[n]` into the parameter's values in an array over all parameters. */
static int64_t read_values(test_case *c, golden *g, double **all) {
    param *p = &c->params[read_int(g, 0, c->num_params - 1)];
    int64_t count = golden_int(g);
    if (!*all) *all = lab_doubles(c->total);
    if (count && count != p->numel) golden_fail(g, "%lld values", (long long)count);
    if (!g->error[0]) golden_nums(g, count, *all + p->at);
    if (all == &c->grad) p->grads = count;
    if (all == &c->clipped && p->grads != count) golden_fail(g, "as many as in grad");
    return count;
}

static void read_opt(test_case *c, golden *g) {
    if (c->num_opts == MAX_OPTS) golden_fail(g, "too many");
    if (g->error[0]) return;
    opt *o = &c->opts[c->num_opts++];
    const char *kind = golden_word(g);
    o->sgd = !strcmp(kind, "sgd");
    if (!o->sgd && strcmp(kind, "adamw") != 0) golden_fail(g, "optimizer '%s'", kind);
    o->lr = golden_num(g), o->a = golden_num(g), o->b = golden_num(g), o->c = golden_num(g);
    o->decay = golden_num(g);
    o->loss = lab_doubles((int64_t)STEPS * c->ranks * c->micro), o->norm = lab_doubles(STEPS);
}

static void read_result(test_case *c, golden *g) {
    opt *o = c->num_opts ? &c->opts[c->num_opts - 1] : NULL;
    int is_loss = golden_is(g, "loss"), is_norm = golden_is(g, "norm");
    if (!is_loss && !is_norm && !golden_is(g, "final")) return; /* other keys are skipped */
    if (!o) golden_fail(g, "no optimizer");
    if (!o || g->error[0]) return;
    if (is_loss) {
        int step = read_int(g, 0, STEPS - 1), rank = read_int(g, 0, c->ranks - 1);
        if (read_int(g, c->micro, c->micro) != c->micro) return;
        golden_nums(g, c->micro, o->loss + (step * c->ranks + rank) * c->micro);
        o->losses++;
    } else if (is_norm) {
        int step = read_int(g, 0, STEPS - 1);
        o->norm[step] = golden_num(g), o->norms++;
    } else {
        read_values(c, g, &o->final), o->finals++;
    }
}

static void read_header(test_case *c, golden *g) {
    if (golden_is(g, "world")) {
        c->replicas = read_int(g, 1, MAX_RANKS), c->shards = read_int(g, 1, MAX_RANKS);
        c->ranks = c->replicas * c->shards;
    } else if (golden_is(g, "policy")) {
        c->param_dtype = read_dtype(g), c->reduce_dtype = read_dtype(g);
        c->type = c->param_dtype ? c->param_dtype : FSDP_F32;
        c->sum_type = c->reduce_dtype ? c->reduce_dtype : FSDP_F32;
    } else if (golden_is(g, "raf")) c->raf = read_int(g, -1, MAX_RANKS);
    else if (golden_is(g, "dims")) {
        c->layers = read_int(g, 2, MAX_LAYERS + 1) - 1;
        golden_ints(g, c->layers + 1, c->dims);
        for (int i = 0; i <= c->layers; i++)
            if (c->dims[i] > c->wide) c->wide = c->dims[i];
    } else if (golden_is(g, "batch")) c->batch = golden_int(g), c->seed = golden_seed(g);
    else if (golden_is(g, "micro")) {
        c->micro = read_int(g, 1, 1000), c->no_sync = read_int(g, 0, 1);
        c->no_all_reduce = read_int(g, 0, 1);
    } else if (golden_is(g, "tied")) {
        for (int n = read_int(g, 0, c->layers); n > 0; n--) c->tied[read_int(g, 1, c->layers)] = 1;
    } else if (golden_is(g, "cond")) c->cond = read_int(g, 0, 1);
    else if (golden_is(g, "divide")) c->divide = golden_num(g);
    else if (golden_is(g, "clip")) c->clip_p = golden_num(g), c->max_norm = golden_num(g);
    else if (golden_is(g, "param")) read_param(c, g);
    else if (golden_is(g, "grad")) read_values(c, g, &c->grad), c->grads++;
    else if (golden_is(g, "clipped")) read_values(c, g, &c->clipped), c->clips++;
    else if (golden_is(g, "opt")) read_opt(c, g);
    else read_result(c, g);
}

/* Reads a whole case, and checks that all required records exist. */
static void read_case(test_case *c, golden *g) {
    memset(c, 0, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", g->name);
    memset(c->w, -1, sizeof c->w), memset(c->b, -1, sizeof c->b), memset(c->u, -1, sizeof c->u);
    c->s = -1, c->raf = -1, c->type = c->sum_type = FSDP_F32;
    while (golden_line(g)) read_header(c, g);
    CHECK_MSG(!g->error[0], "%s", g->error);
    CHECK_MSG(c->ranks && c->layers && c->batch && c->micro && c->s >= 0 && c->num_opts,
              "case %s lacks a record", c->name);
    for (int l = 1; l <= c->layers; l++)
        CHECK_MSG(c->w[l] >= 0 && c->b[l] >= 0 && (!c->tied[l] || c->dims[l] == c->dims[l - 1]),
                  "case %s: layer %d", c->name, l);
    int clip = c->clip_p > 0;
    CHECK_MSG(c->grads == c->num_params && c->clips == (clip ? c->num_params : 0),
              "case %s: %d grad, %d clipped", c->name, c->grads, c->clips);
    for (int i = 0; i < c->num_opts; i++) {
        const opt *o = &c->opts[i];
        CHECK_MSG(o->losses == STEPS * c->ranks && o->norms == (clip ? STEPS : 0) &&
                      o->finals == c->num_params,
                  "case %s: %d loss, %d norm, %d final", c->name, o->losses, o->norms, o->finals);
    }
}

static void free_case(test_case *c) {
    free(c->grad), free(c->clipped);
    for (int i = 0; i < c->num_opts; i++)
        free(c->opts[i].loss), free(c->opts[i].norm), free(c->opts[i].final);
}

/* ---- the model ------------------------------------------------------------------------------- */

typedef struct { /* the results of one rank */
    double *loss, norm[STEPS], *grad, *clipped, *final;
    int has_grad[MAX_PARAMS];
} result;

typedef struct { /* one run of a case: optimizer and variant */
    const test_case *c;
    const opt *o;
    int lanes, plain, flat;
    int64_t direct_min;
    result *of; /* [ranks] */
} job;

typedef struct { /* one rank of a run */
    const test_case *c;
    int rank;
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *unit[MAX_LAYERS + 1];
    fsdp_adamw *adamw;
    fsdp_sgd *sgd;
    /* [batch][wide]: input of layer l and its z; for a tied layer also z and h of its first use */
    double *h[MAX_LAYERS + 2], *z[MAX_LAYERS + 1], *z1[MAX_LAYERS + 1], *h1[MAX_LAYERS + 1];
    double *y, *t, *dh, *dz, *dx;                  /* [batch][wide] */
    double *w, *b, *u, *dw, *db, *dw1, *db1, *sum; /* [most] */
} trainer;

/* Returns 1 if this rank uses parameter p. */
static int used(const trainer *t, int p) {
    return t->c->params[p].name[0] != 'u' || (t->c->cond && t->rank != 0);
}

static void load(trainer *t, int p, double *out) {
    const param *q = &t->c->params[p];
    const void *data = fsdp_data(t->unit[q->unit], q->index);
    CHECK(data != NULL);
    lab_load(out, data, t->c->type, q->numel);
}

/* Adds to the gradient as autograd does: rounds the value to its dtype, and the sum again. */
static void add_grad(trainer *t, int p, const double *value) {
    const param *q = &t->c->params[p];
    if (!q->trains) return;
    void *grad = fsdp_grad(t->unit[q->unit], q->index);
    CHECK(grad != NULL);
    lab_load(t->sum, grad, t->c->type, q->numel);
    for (int64_t i = 0; i < q->numel; i++) t->sum[i] = lab_round(t->c->type, t->sum[i] + value[i]);
    lab_store(grad, t->c->type, t->sum, q->numel);
}

/* out[batch][rows] = x[batch][cols] w[rows][cols]^T + b */
static void linear(const trainer *t, int64_t rows, int64_t cols, const double *x, const double *b,
                   double *out) {
    for (int64_t n = 0; n < t->c->batch; n++)
        for (int64_t o = 0; o < rows; o++) {
            double sum = 0;
            for (int64_t i = 0; i < cols; i++) sum += x[n * cols + i] * t->w[o * cols + i];
            out[n * rows + o] = lab_round(t->c->type, sum + b[o]);
        }
}

static void linear_back(trainer *t, int64_t rows, int64_t cols, const double *x, const double *dz,
                        double *dx, double *dw, double *db) {
    int64_t batch = t->c->batch;
    for (int64_t o = 0; o < rows; o++) {
        double sum = 0;
        for (int64_t n = 0; n < batch; n++) sum += dz[n * rows + o];
        db[o] = lab_round(t->c->type, sum);
        for (int64_t i = 0; i < cols; i++) {
            for (int64_t n = (sum = 0, 0); n < batch; n++)
                sum += dz[n * rows + o] * x[n * cols + i];
            dw[o * cols + i] = lab_round(t->c->type, sum);
        }
    }
    for (int64_t n = 0; n < batch; n++)
        for (int64_t i = 0; i < cols; i++) {
            double sum = 0;
            for (int64_t o = 0; o < rows; o++) sum += dz[n * rows + o] * t->w[o * cols + i];
            dx[n * cols + i] = lab_round(t->c->type, sum);
        }
}

static void activate(const trainer *t, int64_t count, const double *z, double *h) {
    for (int64_t i = 0; i < count; i++) h[i] = lab_round(t->c->type, z[i] / (1 + fabs(z[i])));
}
static void activate_back(const trainer *t, int64_t count, const double *z, const double *dh,
                          double *dz) {
    for (int64_t i = 0; i < count; i++) {
        double d = 1 + fabs(z[i]);
        dz[i] = lab_round(t->c->type, dh[i] / (d * d));
    }
}

static void layer(trainer *t, int l) {
    const test_case *c = t->c;
    int64_t rows = c->dims[l], cols = c->dims[l - 1], count = c->batch * rows;
    const double *bias = t->b;
    CALL(t->world, fsdp_pre_forward(t->unit[l]));
    load(t, c->w[l], t->w), load(t, c->b[l], t->b);
    if (c->u[l] >= 0 && used(t, c->u[l])) {
        load(t, c->u[l], t->u);
        for (int64_t i = 0; i < rows; i++) t->u[i] = lab_round(c->type, t->b[i] + t->u[i]);
        bias = t->u;
    }
    if (c->tied[l]) {
        linear(t, rows, cols, t->h[l], bias, t->z1[l]);
        activate(t, count, t->z1[l], t->h1[l]);
        linear(t, rows, cols, t->h1[l], t->b, t->z[l]);
    } else {
        linear(t, rows, cols, t->h[l], bias, t->z[l]);
    }
    if (l == c->layers) memcpy(t->h[l + 1], t->z[l], (size_t)count * sizeof(double));
    else activate(t, count, t->z[l], t->h[l + 1]);
    CALL(t->world, fsdp_post_forward(t->unit[l]));
}

static void layer_back(trainer *t, int l) {
    const test_case *c = t->c;
    int64_t rows = c->dims[l], cols = c->dims[l - 1], count = c->batch * rows;
    CALL(t->world, fsdp_pre_backward(t->unit[l]));
    load(t, c->w[l], t->w);
    if (l == c->layers) memcpy(t->dz, t->dh, (size_t)count * sizeof(double));
    else activate_back(t, count, t->z[l], t->dh, t->dz);
    if (c->tied[l]) { /* the second use comes first */
        linear_back(t, rows, cols, t->h1[l], t->dz, t->dx, t->dw1, t->db1);
        activate_back(t, count, t->z1[l], t->dx, t->dz);
    }
    linear_back(t, rows, cols, t->h[l], t->dz, t->dh, t->dw, t->db);
    if (c->u[l] >= 0 && used(t, c->u[l])) add_grad(t, c->u[l], t->db);
    for (int64_t i = 0; c->tied[l] && i < rows * cols; i++)
        t->dw[i] = lab_round(c->type, t->dw[i] + t->dw1[i]);
    for (int64_t i = 0; c->tied[l] && i < rows; i++)
        t->db[i] = lab_round(c->type, t->db[i] + t->db1[i]);
    add_grad(t, c->w[l], t->dw), add_grad(t, c->b[l], t->db);
    CALL(t->world, fsdp_post_backward(t->unit[l]));
}

/* Runs forward and backward of one microbatch. Returns the loss. */
static double microbatch(trainer *t, int step, int micro) {
    const test_case *c = t->c;
    int64_t last = c->dims[c->layers], count = c->batch * last;
    uint64_t seed = c->seed + 100000 * (uint64_t)step + 1000 * (uint64_t)micro + (uint64_t)t->rank;
    double loss = 0;
    golden_fill_f64(t->h[1], seed, c->batch * c->dims[0], 2);
    golden_fill_f64(t->t, seed + 500, count, 2);
    for (int64_t i = 0; i < c->batch * c->dims[0]; i++) t->h[1][i] = lab_round(c->type, t->h[1][i]);
    CALL(t->world, fsdp_pre_forward(t->unit[0]));
    for (int l = 1; l <= c->layers; l++) layer(t, l);
    double *h = t->h[c->layers + 1];
    load(t, c->s, t->b);
    for (int64_t i = 0; i < count; i++) t->y[i] = lab_round(c->type, h[i] * t->b[i % last]);
    CALL(t->world, fsdp_post_forward(t->unit[0]));

    CALL(t->world, fsdp_pre_backward(t->unit[0]));
    load(t, c->s, t->b);
    memset(t->db, 0, (size_t)last * sizeof(double));
    for (int64_t i = 0; i < count; i++) {
        double off = t->y[i] - t->t[i], dy = lab_round(c->type, 2 * off / (double)count);
        loss += off * off;
        t->db[i % last] += dy * h[i];
        t->dh[i] = lab_round(c->type, dy * t->b[i % last]);
    }
    for (int64_t i = 0; i < last; i++) t->db[i] = lab_round(c->type, t->db[i]);
    add_grad(t, c->s, t->db);
    for (int l = c->layers; l > 0; l--) layer_back(t, l);
    /* in even steps finalize ends the root's backward, as PyTorch's root callback does */
    if (step % 2) CALL(t->world, fsdp_post_backward(t->unit[0]));
    CALL(t->world, fsdp_finalize_backward(t->model));
    return lab_round(FSDP_F32, loss / (double)count);
}

/* ---- a rank ---------------------------------------------------------------------------------- */

static void fill_rows(void *user, const fsdp_param_view *block) {
    const param *p = (const param *)block->user;
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        ((float *)block->data)[k] = (float)golden_value(
            p->seed, (uint64_t)fsdp_view_index(block, k), p->scale);
}

static void make_model(trainer *t, const job *j) {
    const test_case *c = t->c;
    fsdp_model_desc md = FSDP_ZERO;
    if (c->replicas > 1 || !j->flat) /* NULL: the 1-D mesh of all ranks */
        md.mesh = lab_hsdp(t->world, c->replicas, c->shards);
    md.param_dtype = c->param_dtype, md.reduce_dtype = c->reduce_dtype;
    md.direct_min = j->direct_min;
    md.fill_bytes = 256; /* param_full gathers in several pieces */
    md.reshard_after_forward = c->raf > 1 ? c->raf
                               : c->raf   ? FSDP_RESHARD_ALWAYS
                                          : FSDP_RESHARD_NEVER;
    CALL(t->world, fsdp_model_create(t->world, &md, &t->model));
    for (int u = 0; u <= c->layers; u++) {
        fsdp_param_desc d[MAX_PARAMS];
        fsdp_unit_desc ud = FSDP_ZERO;
        int count = 0;
        for (int p = 0; p < c->num_params; p++) {
            const param *q = &c->params[p];
            if (q->unit != u) continue;
            d[count] = lab_desc(q->ndim, q->shape, q->shard_dim, FSDP_F32, !q->trains);
            d[count].name = q->name, d[count++].user = (void *)(uintptr_t)q;
        }
        if (!u && c->raf < 0)
            ud.reshard_after_forward = FSDP_RESHARD_NEVER; /* the root's default */
        t->unit[u] = lab_unit(t->world, t->model, &ud, d, count);
    }
    CALL(t->world, fsdp_set_reduce_scatter_unused_params(t->model, NULL, c->cond));
    if (c->divide > 0) CALL(t->world, fsdp_set_gradient_divide_factor(t->model, NULL, c->divide));
    CALL(t->world, fsdp_init_params(t->model, fill_rows, NULL));
}

static void make_optimizer(trainer *t, const opt *o) {
    fsdp_adamw_desc a = fsdp_adamw_defaults();
    fsdp_sgd_desc s = fsdp_sgd_defaults();
    a.beta1 = o->a, a.beta2 = o->b, a.eps = o->c, a.weight_decay = o->decay;
    s.momentum = o->a, s.dampening = o->b, s.nesterov = o->c > 0, s.weight_decay = o->decay;
    if (o->sgd) CALL(t->world, fsdp_sgd_create(t->model, &s, &t->sgd));
    else CALL(t->world, fsdp_adamw_create(t->model, &a, &t->adamw));
}

/* Gathers all parameters, or their gradients, into `out`. */
static void gather(trainer *t, int grads, double *out, int *has) {
    float *full = (float *)lab_zeros((size_t)t->c->most + 1, sizeof *full);
    for (int p = 0; p < t->c->num_params; p++) {
        const param *q = &t->c->params[p];
        fsdp_param_view view = lab_view(t->world, t->unit[q->unit], q->index);
        if (has) has[p] = view.shard_grad != NULL;
        if (grads && !q->trains) continue;
        if (grads) CALL(t->world, fsdp_param_full_grad(t->unit[q->unit], q->index, full));
        else CALL(t->world, fsdp_param_full(t->unit[q->unit], q->index, full));
        for (int64_t i = 0; i < q->numel; i++) out[q->at + i] = (double)full[i];
    }
    free(full);
}

static void train(trainer *t, const opt *o, result *r) {
    const test_case *c = t->c;
    for (int step = 0; step < STEPS; step++) {
        for (int m = 0; m < c->micro; m++) {
            int last = m == c->micro - 1;
            CALL(t->world, fsdp_set_requires_gradient_sync(t->model, NULL, !c->no_sync || last));
            CALL(t->world, fsdp_set_requires_all_reduce(t->model, NULL, !c->no_all_reduce || last));
            r->loss[step * c->micro + m] = microbatch(t, step, m);
        }
        if (!step) gather(t, 1, r->grad, r->has_grad);
        if (c->clip_p > 0) {
            fsdp_clip_desc clip = FSDP_ZERO;
            clip.max_norm = c->max_norm, clip.norm_type = c->clip_p;
            CALL(t->world, fsdp_clip_grads(t->model, &clip, &r->norm[step]));
            if (!step) gather(t, 1, r->clipped, NULL);
        }
        if (o->sgd) CALL(t->world, fsdp_sgd_step(t->sgd, o->lr));
        else CALL(t->world, fsdp_adamw_step(t->adamw, o->lr));
        CALL(t->world, fsdp_zero_grad(t->model));
    }
    gather(t, 0, r->final, NULL);
}

static void on_rank(lab_rank *r) {
    const job *j = (const job *)r->arg;
    const test_case *c = j->c;
    trainer *t = (trainer *)lab_zeros(1, sizeof *t);
    snprintf(w_case, sizeof w_case, "%s, %s, rank %d, lanes %d, direct_min %lld", c->name,
             j->o->sgd ? "sgd" : "adamw", r->rank, j->lanes, (long long)j->direct_min);
    t->c = c, t->rank = r->rank, t->world = r->w;
    int64_t size = c->batch * c->wide, most = c->most, all = 0;
    for (int pass = 0; pass < 2; pass++) { /* the first pass counts, the second assigns */
        double *at = pass ? lab_doubles(all) : NULL;
        double **wide[] = {&t->y, &t->t, &t->dh, &t->dz, &t->dx};
        double **flat[] = {&t->w, &t->b, &t->u, &t->dw, &t->db, &t->dw1, &t->db1, &t->sum};
        if (pass) t->h[0] = at; /* no layer uses h[0] as its input: it is the block to free */
        all = 0;
#define CUT(place, count) ((void)(pass ? (place) = at + all : NULL), all += (count))
        for (int l = 1; l <= c->layers + 1; l++) CUT(t->h[l], size);
        for (int l = 1; l <= c->layers; l++)
            CUT(t->z[l], size), CUT(t->z1[l], size), CUT(t->h1[l], size);
        for (int i = 0; i < 5; i++) CUT(*wide[i], size);
        for (int i = 0; i < 8; i++) CUT(*flat[i], most);
#undef CUT
    }
    make_model(t, j);
    make_optimizer(t, j->o);
    train(t, j->o, &j->of[r->rank]);
    lab_end(r);
    free(t->h[0]);
    free(t);
}

/* ---- comparison ------------------------------------------------------------------------------ */

enum { GRAD, CLIPPED, LOSS, NORM, FINAL, KINDS };
static const char *const kind_names[KINDS] = {"grad", "clipped", "loss", "norm", "final"};
static double largest[KINDS], share[KINDS]; /* the difference that is nearest to its limit */

/* Returns the largest allowed difference: absolute, but relative for norms. 16-bit sums over
   more than two ranks depend on Gloo, which rounds after each addition: a value may be off by
   two steps of its dtype, and AdamW amplifies that where a gradient is small. */
static double tolerance(const test_case *c, int kind, double want) {
    static const double usual[KINDS] = {1e-6, 1e-6, 1e-6, 4e-6, 4e-6},
                        bf16[KINDS] = {8e-3, 8e-3, 4e-3, 4e-6, 8e-3},
                        f16[KINDS] = {1e-4, 1e-4, 2e-4, 4e-6, 1e-3};
    const int few_bits = c->ranks > 2 && kind != NORM;
    if (few_bits && c->sum_type == FSDP_BF16) return fmax(bf16[kind], fabs(want) / 64);
    if (few_bits && c->sum_type == FSDP_F16) return fmax(f16[kind], fabs(want) / 512);
    return usual[kind];
}

static void compare(const job *j, int kind, const char *what, int64_t i, double got, double want) {
    double difference = fabs(got - want), limit = tolerance(j->c, kind, want);
    if (kind == FINAL && !j->o->sgd && limit > 4e-6) limit = fmax(limit, j->o->lr * STEPS / 32);
    if (kind == NORM) difference /= fabs(want);
    if (difference / limit > share[kind])
        share[kind] = difference / limit, largest[kind] = difference;
    CHECK_MSG(difference <= limit, "case %s, %s: %s %s[%lld] is %.9g, expected %.9g within %g",
              j->c->name, j->o->sgd ? "sgd" : "adamw", kind_names[kind], what, (long long)i, got,
              want, limit);
}

static void check_results(const job *j) {
    const test_case *c = j->c;
    const opt *o = j->o;
    for (int rank = 0; rank < c->ranks; rank++) {
        const result *r = &j->of[rank];
        for (int step = 0; step < STEPS; step++) {
            for (int m = 0; m < c->micro; m++)
                compare(j, LOSS, "of a rank in step", step, r->loss[step * c->micro + m],
                        o->loss[(step * c->ranks + rank) * c->micro + m]);
            if (c->clip_p > 0) compare(j, NORM, "of step", step, r->norm[step], o->norm[step]);
        }
        for (int p = 0; p < c->num_params; p++) {
            const param *q = &c->params[p];
            CHECK_MSG(r->has_grad[p] == (q->grads > 0), "case %s: %s %s a gradient on rank %d",
                      c->name, q->name, r->has_grad[p] ? "has" : "lacks", rank);
            for (int64_t i = 0; i < q->numel; i++) {
                int64_t at = q->at + i; /* zeros where there is no gradient */
                compare(j, GRAD, q->name, i, r->grad[at], c->grad[at]);
                if (c->clipped) compare(j, CLIPPED, q->name, i, r->clipped[at], c->clipped[at]);
                compare(j, FINAL, q->name, i, r->final[at], o->final[at]);
            }
        }
    }
}

/* Checks that two results have the same bits: of one rank in two runs, or of two ranks. */
static void check_same(const job *j, const result *a, const result *b, int losses,
                       const char *whom) {
    size_t all = (size_t)j->c->total * sizeof(double);
    const char *what = NULL;
    if (losses && memcmp(a->loss, b->loss, (size_t)(STEPS * j->c->micro) * sizeof(double)))
        what = "losses";
    if (memcmp(a->norm, b->norm, sizeof a->norm)) what = "norms";
    if (memcmp(a->grad, b->grad, all)) what = "gradients";
    if (memcmp(a->clipped, b->clipped, all)) what = "clipped gradients";
    if (memcmp(a->final, b->final, all)) what = "parameters";
    CHECK_MSG(!what, "case %s, %s: lanes %d, direct_min %lld, %s: %s of other bits than %s",
              j->c->name, j->o->sgd ? "sgd" : "adamw", j->lanes, (long long)j->direct_min,
              j->plain ? "not fused" : "fused", what, whom);
}

static result *make_results(const test_case *c) {
    result *of = (result *)lab_zeros((size_t)c->ranks, sizeof *of);
    for (int r = 0; r < c->ranks; r++) {
        of[r].loss = lab_doubles(STEPS * c->micro), of[r].grad = lab_doubles(c->total);
        of[r].clipped = lab_doubles(c->total), of[r].final = lab_doubles(c->total);
    }
    return of;
}
static void free_results(result *of, int count) {
    for (int r = 0; r < count; r++)
        free(of[r].loss), free(of[r].grad), free(of[r].clipped), free(of[r].final);
    free(of);
}

/* The first variant is the default, which is compared with PyTorch. */
static const struct {
    int lanes, plain, flat;
    int64_t direct_min;
} variants[] = {
    {0, 0, 1, 0}, {2, 0, 0, 0}, {0, 0, 1, 1}, {0, 0, 0, FSDP_DIRECT_NEVER}, {1, 1, 1, 1}};
enum { VARIANTS = sizeof variants / sizeof variants[0] };

static void replay(const test_case *c, const opt *o) {
    result *first = NULL;
    fsdp_comm_ops plain = w_plain();
    for (int v = 0; v < VARIANTS; v++) {
        lab_how how = FSDP_ZERO;
        job j;
        memset(&j, 0, sizeof j);
        j.c = c, j.o = o, j.lanes = variants[v].lanes, j.plain = variants[v].plain;
        j.flat = variants[v].flat, j.direct_min = variants[v].direct_min;
        j.of = make_results(c);
        how.job = "golden_train", how.lanes = j.lanes, how.comm_ops = j.plain ? &plain : NULL;
        lab_run(c->ranks, &how, on_rank, &j);
        if (!v) check_results(&j), first = j.of;
        for (int r = 1; r < c->ranks; r++) check_same(&j, &j.of[r], &j.of[0], 0, "on rank 0");
        /* A backend that does not divide f16 sums rounds them at another point. */
        const int others = j.plain && c->sum_type == FSDP_F16 && c->ranks > 1;
        if (others) check_results(&j);
        for (int r = 0; v && !others && r < c->ranks; r++)
            check_same(&j, &j.of[r], &first[r], 1, "in the first run");
        if (v) free_results(j.of, c->ranks);
    }
    free_results(first, c->ranks);
}

static const struct {
    const char *name;
    int cases;
} files[] = {{"plain", 11}, {"accum", 5}, {"special", 8}, {"clip", 9}, {"mixed", 10}};

TEST_P(golden_train, replay, files, SECONDS(300) | (strcmp(row->name, "clip") ? 0 : NO(NCCL))) {
    static test_case c;
    int cases = 0, runs = 0, length = 0;
    char file[64], text[512] = "";
    golden g;
    snprintf(file, sizeof file, "train_%s.txt", row->name);
    GOLDEN_OPEN(&g, file, "train");
    for (; golden_case(&g); cases++) {
        read_case(&c, &g);
        for (int o = 0; o < c.num_opts; o++, runs++) replay(&c, &c.opts[o]);
        free_case(&c);
    }
    GOLDEN_CLOSE(&g);
    for (int k = 0; k < KINDS; k++)
        if (share[k] > 0)
            length += snprintf(text + length, sizeof text - (size_t)length, "; %s %.1e (%.0f%%)",
                               kind_names[k], largest[k], 100 * share[k]);
    h_message("%s: %d cases run (%d trainings), none left out%s", row->name, cases, runs * VARIANTS,
              text);
    if (strcmp(golden_dir(), GOLDEN_DIR)) CHECK(cases > 0); // a folder of other data
    else CHECK_EQ_INT(cases, row->cases);
}
