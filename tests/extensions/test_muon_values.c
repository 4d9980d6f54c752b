/* test_muon_values.c - Muon compared with a slow model in f64, element by element: parameters and
   matrices of each dtype, matrices of any shape sharded along any dim, on any mesh, frozen, thawed
   and unused; and equal bits on each of these meshes.

   SPDX-License-Identifier: MIT */
#define TAGS BITS | AT_NIGHT(ASAN)
#include "harness.h"
#include "lab.h"
#include <math.h> /* sqrt, fabs */

enum { UNITS = 8, MOST_ROWS = 80, MOST = 960, STEPS = 6 };

typedef struct { /* a parameter */
    int ndim, shard_dim, unit, index;
    int64_t shape[4];
} row_of;
static row_of rows[MOST_ROWS];
static int num_rows;

static int64_t numel_of(const row_of *r) { return lab_numel(r->ndim, r->shape); }

static void add_row(int ndim, int64_t a, int64_t b, int64_t c, int64_t d, int shard_dim) {
    const row_of r = {ndim, shard_dim, 0, 0, {a, b, c, d}};
    CHECK(num_rows < MOST_ROWS && numel_of(&r) <= MOST);
    rows[num_rows++] = r;
}

/* Makes each small shape sharded along each dim, shapes without elements, and larger ones; vectors
   are not Muon's. */
static void make_rows(void) {
    static const int64_t sizes[] = {1, 2, 3, 5};
    static const int64_t cubes[][4] = {{2, 3, 2, 0}, {1, 1, 4, 0}, {3, 1, 2, 0}, {5, 2, 1, 0},
                                       {1, 4, 3, 0}, {2, 2, 2, 3}, {3, 1, 2, 2}, {1, 2, 3, 1}};
    num_rows = 0;
    for (int i = 0; i < 16; i++)
        for (int dim = 0; dim < 2; dim++) add_row(2, sizes[i / 4], sizes[i % 4], 0, 0, dim);
    for (int i = 0; i < 4; i++) add_row(2, i % 2 ? 3 : 0, i % 2 ? 0 : 3, 0, 0, i / 2);
    for (int i = 0; i < 8; i++) {
        const int64_t *s = cubes[i];
        for (int dim = 0; dim < (s[3] ? 4 : 3); dim++)
            add_row(s[3] ? 4 : 3, s[0], s[1], s[2], s[3], dim);
    }
    add_row(2, 24, 40, 0, 0, 0), add_row(2, 40, 24, 0, 0, 1), add_row(2, 17, 33, 0, 0, 1);
    add_row(2, 33, 17, 0, 0, 0), add_row(1, 5, 0, 0, 0, 0), add_row(1, 12, 0, 0, 0, 0);
    for (int p = 0, index = 0; p < num_rows; p++) {
        rows[p].unit = p * UNITS / num_rows;
        index = p && rows[p].unit == rows[p - 1].unit ? index + 1 : 0;
        rows[p].index = index;
    }
}

typedef struct {
    const char *name;
    /* dtype of parameters; of reduced gradients; of u and x when sent */
    fsdp_dtype dtype, grads, travels;
    int adjust, plain, ns_steps; /* plain: without nesterov */
    int columns;                 /* desc.take returns the number of columns */
    int64_t bucket_bytes;
    int narrow;    /* products are in bf16 */
    uint64_t bits; /* recorded with FMA and gcc -O2, on one rank; 0: the test computes products */
} setting;

enum { PLANNED = 1, STEADY };    /* STEADY: the steps of a plan, without the plan */
enum { FLAT, HSDP, DDP, MIXED }; /* mesh; MIXED: units have different ones */

typedef struct {
    const setting *s;
    int mesh, how, lanes, planned;
    uint64_t bits;
    double worst; /* largest difference from the model, in elements of x */
} outcome;

/* Returns the number of columns of a matrix; 0: not a matrix. */
static int64_t columns_of(const setting *s, const row_of *r) {
    const int64_t numel = numel_of(r), last = r->shape[r->ndim - 1];
    if (r->ndim == 1) return s->columns && numel == 12 ? 4 : 0;
    if (numel == 0) return 1;
    if (!s->columns) return numel / r->shape[0];
    if (r->ndim > 2) return last > 1 ? last : numel;
    return r->shard_dim ? numel : last;
}
static int take_columns(void *user, const fsdp_param_view *v) {
    const row_of *r = (const row_of *)v->user;
    const int64_t columns = columns_of((const setting *)user, r);
    if (r->ndim == 2 && (!r->shard_dim || columns <= 1)) return 1;
    return (int)columns;
}

/* ---- the model ------------------------------------------------------------------------------- */

typedef struct {
    float momentum[MOST_ROWS][MOST];
    char was[MOST_ROWS][MOST * 4], now[MOST_ROWS][MOST * 4];
    double x[MOST_ROWS][MOST]; /* update of this step */
    int updated[MOST_ROWS], frozen[MOST_ROWS];
} truth;

/* y = a (m x k) times b (k x n), or times the transpose of b */
static void multiply(double *y, const double *a, const double *b, int64_t m, int64_t n, int64_t k,
                     int transposed) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t l = 0; l < k; l++)
                sum += a[i * k + l] * (transposed ? b[j * k + l] : b[l * n + j]);
            y[i * n + j] = sum;
        }
}
static void transpose(double *y, const double *x, int64_t r, int64_t c) {
    for (int64_t i = 0; i < r * c; i++) y[i % c * r + i / c] = x[i];
}

/* Orthogonalizes x, of any shape, as a wide matrix. */
static void orthogonalize(double *x, int64_t r, int64_t c, int ns_steps) {
    double wide[MOST], s[MOST], t[MOST], y[MOST], norm = 0;
    const int64_t n = r < c ? r : c, m = r < c ? c : r;
    CHECK(n * n <= MOST);
    for (int64_t i = 0; i < r * c; i++) norm += x[i] * x[i];
    norm = sqrt(norm) > 1e-7 ? sqrt(norm) : 1e-7;
    for (int64_t i = 0; i < r * c; i++) x[i] /= norm;
    if (r > c) transpose(wide, x, r, c);
    else memcpy(wide, x, sizeof wide);
    for (int k = 0; k < ns_steps; k++) {
        multiply(s, wide, wide, n, n, m, 1);
        multiply(t, s, s, n, n, n, 0);
        for (int64_t i = 0; i < n * n; i++) t[i] = -4.7750 * s[i] + 2.0315 * t[i];
        multiply(y, t, wide, n, m, n, 0);
        for (int64_t i = 0; i < n * m; i++) wide[i] = 3.4445 * wide[i] + y[i];
    }
    if (r > c) transpose(x, wide, c, r);
    else memcpy(x, wide, sizeof wide);
}

/* Gradients have few digits, so that each dtype has them exactly; in the first step some are zero.
   For products in bf16 they are near 4 times the identity: otherwise rounding errors grow with the
   ratio of the singular values. */
static int poisoned = -1; /* the parameter whose first gradient is a NaN */
static double gradient(const setting *s, int step, int p, int64_t i) {
    const double x = (double)(lab_hash((uint64_t)step, (uint64_t)p, (uint64_t)i, 3) % 127) / 16 - 4;
    const int64_t columns = columns_of(s, &rows[p]);
    if (p == poisoned && i == 0) return LAB_NAN;
    if (step == 0 && p % 11 == 5) return 0;
    return s->narrow && columns ? (i / columns == i % columns ? 4 : x / 32) : x;
}
static int steady; /* all steps are equal, for a plan */
static int uses(int step, int p) { return steady || (step + p) % 5 != 0; }
static double rate_of(int step) { return 0.02 * (step + 1); }

LAB_PRECISE_BEGIN
/* The momentum and u have the bits of these operations. */
static void advance(const setting *s, truth *t, int step, int p) {
    const double momentum = 0.95;
    volatile float weight = (float)(1 - momentum), rest = (float)momentum, d, product;
    for (int64_t i = 0; i < numel_of(&rows[p]); i++) {
        volatile float g = (float)gradient(s, step, p, i), b = t->momentum[p][i], u;
        d = g - b, product = d * weight, b = b + product;
        t->momentum[p][i] = b;
        d = b - g, product = d * rest, u = g + product;
        if (s->plain) u = b;
        t->x[p][i] = s->travels == FSDP_BF16 ? lab_round(FSDP_BF16, (double)u) : (double)u;
    }
}
LAB_PRECISE_END

static void update(const setting *s, truth *t, int step, int p) {
    const int64_t columns = columns_of(s, &rows[p]), numel = numel_of(&rows[p]);
    t->updated[p] = columns > 0 && numel > 0 && uses(step, p) && !t->frozen[p];
    if (!t->updated[p]) return;
    advance(s, t, step, p);
    orthogonalize(t->x[p], numel / columns, columns, s->ns_steps ? s->ns_steps : 5);
}

/* Checks a parameter after a step against the model. An element of x may be off by 5e-5, and by a
   relative 2^-8 if it was sent as bf16; the last step rounds three times. */
static void compare(outcome *o, const truth *t, int step, int p) {
    const setting *s = o->s;
    const fsdp_dtype dtype = s->dtype;
    const int64_t numel = numel_of(&rows[p]), columns = columns_of(s, &rows[p]);
    const double r = columns ? (double)numel / (double)columns : 1, c = (double)columns;
    const double ratio = s->adjust == FSDP_MUON_SPECTRAL          ? sqrt(r / c)
                         : s->adjust == FSDP_MUON_MATCH_RMS_ADAMW ? 0.2 * sqrt(r > c ? r : c)
                                                                  : sqrt(r > c ? r / c : 1);
    const int group = p % 2;
    const double lr = rate_of(step) * (group ? 0.5 : 1), decay = lr * (group ? 0 : 0.1);
    double difference = 0, length = 0;
    for (int64_t i = 0; i < numel; i++) {
        const double was = lab_get(t->was[p], dtype, i), got = lab_get(t->now[p], dtype, i);
        if (!t->updated[p]) {
            W_CHECK(lab_same(got, was), "parameter %d[%lld] has changed", p, (long long)i);
            continue;
        }
        const double x = t->x[p][i], want = was * (1 - decay) - lr * ratio * x;
        const double off = 5e-5 + (s->travels == FSDP_BF16 ? fabs(x) / 256 : 0),
                     e = lr * ratio * off + 3 * (fabs(was) + fabs(want)) / 16777216;
        difference += pow(got - want, 2), length += pow(lr * ratio * x, 2);
        if (s->narrow) continue;
        W_CHECK(got >= lab_round(dtype, want - e) && got <= lab_round(dtype, want + e),
                "step %d, parameter %d[%lld] of %g x %g: %.9g, expected %.9g, at most %g off", step,
                p, (long long)i, r, c, got, want, e);
        if (dtype == FSDP_F32 && s->travels != FSDP_BF16)
            o->worst = fmax(o->worst, fabs(got - want) / (lr * ratio));
    }
    if (!s->narrow || !(length > 0)) return;
    o->worst = fmax(o->worst, sqrt(difference / length));
    W_CHECK(difference <= 0.06 * 0.06 * length, "parameter %d: %g of its update off", p,
            sqrt(difference / length));
}

/* A product in bf16: only the sums are rounded, at the end. */
static fsdp_status narrow_gemm(void *user, void *stream, int64_t m, int64_t n, int64_t k,
                               float alpha, const void *a, int64_t lda, int a_transposed,
                               const void *b, int64_t ldb, int b_transposed, float beta, void *c,
                               int64_t ldc, fsdp_dtype dtype) {
    static __thread double x[MOST], y[MOST];
    CHECK(user == rows && !stream && dtype == FSDP_BF16);
    lab_load(x, a, dtype, (a_transposed ? k : m) * lda);
    lab_load(y, b, dtype, (b_transposed ? n : k) * ldb);
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0, old = beta < 0 || beta > 0 ? lab_get(c, dtype, i * ldc + j) : 0;
            for (int64_t l = 0; l < k; l++)
                sum += x[a_transposed ? l * lda + i : i * lda + l] *
                       y[b_transposed ? j * ldb + l : l * ldb + j];
            lab_put(c, dtype, i * ldc + j, (double)alpha * sum + (double)beta * old);
        }
    return FSDP_OK;
}

/* ---- the library ----------------------------------------------------------------------------- */

static int group_of(void *user, const fsdp_param_view *v) {
    (void)user;
    return (int)((const row_of *)v->user - rows) % 2;
}

static void first_values(void *user, const fsdp_param_view *block) {
    const uint64_t p = (uint64_t)((const row_of *)block->user - rows);
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        lab_put(block->data, block->dtype, k,
                (double)(lab_hash(p, (uint64_t)fsdp_view_index(block, k), 1, 2) % 4001) / 1024 - 2);
}

static fsdp_mesh_info mesh_of(fsdp_world *w, fsdp_mesh *const mesh[2], int which) {
    static const struct {
        int mesh, kind, shard, replicate;
    } infos[] = {{0, FSDP_MESH_INFO_FSDP, 0, -1},
                 {1, FSDP_MESH_INFO_HSDP, 1, 0},
                 {0, FSDP_MESH_INFO_DDP, -1, 0},
                 {1, FSDP_MESH_INFO_HSDP, 0, 1}};
    fsdp_mesh_info info;
    CALL(w, fsdp_mesh_info_init(mesh[infos[which].mesh], infos[which].kind, infos[which].shard,
                                infos[which].replicate, &info));
    return info;
}

static void build(lab_rank *r, const outcome *o, fsdp_model **model, fsdp_unit **unit) {
    const setting *s = o->s;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh *mesh[2] = {NULL, NULL};
    md.grad_dtype = s->grads;
    CALL(r->w, fsdp_mesh_1d(r->w, "all", &mesh[0]));
    if (o->mesh == HSDP || o->mesh == MIXED) mesh[1] = lab_hsdp(r->w, 2, r->size / 2);
    *model = lab_model(r->w, &md);
    for (int u = 0, p = 0; u < UNITS; u++) {
        fsdp_param_desc d[MOST_ROWS];
        fsdp_unit_desc ud = FSDP_ZERO;
        fsdp_mesh_info info = mesh_of(r->w, mesh, o->mesh == MIXED ? u % 4 : o->mesh);
        int count = 0;
        for (; p < num_rows && rows[p].unit == u; p++) {
            d[count] = lab_desc(rows[p].ndim, rows[p].shape, rows[p].shard_dim, s->dtype, 0);
            d[count++].user = &rows[p];
        }
        ud.mesh_info = &info;
        unit[u] = lab_unit(r->w, *model, &ud, d, count);
    }
    CALL(r->w, fsdp_init_params(*model, first_values, NULL));
    CALL(r->w, fsdp_set_gradient_divide_factor(*model, NULL, 1));
}

/* Rank 0 has the gradients, the others have zeros. */
static void backward(const lab_rank *r, const setting *s, const truth *t, fsdp_model *model,
                     fsdp_unit *const *unit, int step) {
    for (int u = 0; u < UNITS; u++) lab_forward(r->w, unit[u]);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(r->w, fsdp_pre_backward(unit[u]));
        for (int p = 0; p < num_rows; p++) {
            if (rows[p].unit != u || t->frozen[p] || !uses(step, p)) continue;
            void *grad = fsdp_grad(unit[u], rows[p].index);
            const fsdp_dtype dtype = lab_view(r->w, unit[u], rows[p].index).dtype;
            for (int64_t i = 0; r->rank == 0 && i < numel_of(&rows[p]); i++)
                lab_put(grad, dtype, i, gradient(s, step, p, i));
        }
        CALL(r->w, fsdp_post_backward(unit[u]));
    }
    CALL(r->w, fsdp_finalize_backward(model));
}

static void check_momentum(const lab_rank *r, const truth *t, const setting *s, fsdp_model *model) {
    fsdp_state_item item = FSDP_ZERO;
    fsdp_param_view v = FSDP_ZERO;
    int64_t compared = 0;
    while (fsdp_next_param(model, &v)) {
        const int p = (int)((const row_of *)v.user - rows);
        do CALL(r->w, fsdp_next_state(model, &item));
        while (item.name && (item.ordinal != v.ordinal || strcmp(item.name, "momentum_buffer")));
        W_CHECK(!item.name == !columns_of(s, &rows[p]), "parameter %d", p);
        CHECK(!item.name || (item.memory == FSDP_MEMORY_HOST && item.sharded));
        for (int64_t k = 0; item.name && k < v.numel; k++, compared++)
            W_CHECK(!memcmp((float *)item.data + k, &t->momentum[p][fsdp_view_index(&v, k)], 4),
                    "momentum of %d[%lld]: %.9g, expected %.9g", p,
                    (long long)fsdp_view_index(&v, k), (double)((float *)item.data)[k],
                    (double)t->momentum[p][fsdp_view_index(&v, k)]);
        memset(&item, 0, sizeof item);
    }
    CHECK(compared > 0 || r->size > 1);
}

static void train(lab_rank *r) {
    outcome *o = (outcome *)r->arg;
    const setting *s = o->s;
    fsdp_muon_desc d = fsdp_muon_defaults();
    fsdp_unit *unit[UNITS];
    fsdp_model *model;
    fsdp_muon *muon;
    fsdp_plan *plan = NULL;
    truth *t = (truth *)lab_zeros(1, sizeof *t);
    uint64_t bits = 1;
    snprintf(w_case, sizeof w_case, "%s, mesh %d, replicas %d, lanes %d, rank %d of %d", s->name,
             o->mesh, o->how, o->lanes, r->rank, r->size);
    build(r, o, &model, unit);
    d.flatten = !s->columns, d.adjust = s->adjust, d.nesterov = !s->plain, d.replicas = o->how;
    if (s->ns_steps) d.ns_steps = s->ns_steps;
    if (s->travels) d.dtype = s->travels;
    if (s->bucket_bytes) d.bucket_bytes = s->bucket_bytes;
    if (s->columns) d.take = take_columns;
    if (s->narrow) d.gemm = narrow_gemm, d.gemm_user = rows;
    d.num_groups = 2, d.group = group_of, d.user = (void *)(uintptr_t)s;
    d.groups[1].lr_scale = 0.5, d.groups[1].weight_decay = 0;
    CALL(r->w, fsdp_muon_create(model, &d, &muon));
    if (o->planned == PLANNED) CALL(r->w, fsdp_plan_create(model, NULL, &plan));
    for (int p = 0; p < num_rows; p++) {
        const fsdp_param_view v = lab_view(r->w, unit[rows[p].unit], rows[p].index);
        W_CHECK(fsdp_muon_takes(muon, &v) == (columns_of(s, &rows[p]) > 0), "parameter %d", p);
    }
    for (int step = 0; step < STEPS; step++) {
        for (int p = 0; p < num_rows; p++) {
            fsdp_unit *u = unit[rows[p].unit];
            if (!steady && (step == 2 || step == 4) && p % 7 == 3) {
                t->frozen[p] = step == 2;
                CALL(r->w, fsdp_set_requires_grad(u, rows[p].index, step != 2));
            }
            CALL(r->w, fsdp_param_full(u, rows[p].index, t->was[p]));
        }
        backward(r, s, t, model, unit, step);
        CALL(r->w, fsdp_muon_step(muon, rate_of(step)));
        CALL(r->w, fsdp_zero_grad(model));
        for (int p = 0; p < num_rows; p++) {
            const row_of *row = &rows[p];
            CALL(r->w, fsdp_param_full(unit[row->unit], row->index, t->now[p]));
            update(s, t, step, p);
            if (r->rank == 0) compare(o, t, step, p);
            lab_fold(&bits, t->now[p], (size_t)numel_of(row) * fsdp_dtype_size(s->dtype));
        }
        check_momentum(r, t, s, model);
    }
    W_CHECK(!plan || fsdp_plan_state(plan) == FSDP_PLAN_REPLAYING, "%s", fsdp_plan_why(plan));
    if (r->rank == 0) o->bits = bits;
    free(t);
}

static double worst;
static uint64_t bits_of(const setting *s, int world, int mesh, int how, int lanes, int planned) {
    outcome o = {s, mesh, how, lanes, planned, 0, 0};
    lab_how h = FSDP_ZERO;
    h.job = "muon_values", h.lanes = lanes;
    steady = planned != 0;
    make_rows();
    lab_run(world, &h, train, &o);
    if (o.worst > worst) worst = o.worst;
    return o.bits;
}

static const setting settings[] = {
    {"f32", FSDP_F32, 0, 0, 0, 0, 0, 0, 0, 0, 0x89590b7bc7936b34},
    {"bf16", FSDP_BF16, 0, 0, 0, 0, 0, 0, 0, 0, 0x00f6bb3c26330909},
    {"f16", FSDP_F16, 0, 0, 0, 0, 0, 0, 0, 0, 0xd5489462846135a1},
    {"bf16_grads_f32", FSDP_BF16, FSDP_F32, 0, 0, 0, 0, 0, 0, 0, 0x00f6bb3c26330909},
    {"travels_bf16", FSDP_F32, 0, FSDP_BF16, 0, 0, 0, 0, 700, 0, 0x28bfe2e375679b69},
    {"all_bf16", FSDP_BF16, 0, FSDP_BF16, 0, 0, 0, 0, 0, 0, 0x971e22dc1be7462d},
    {"products_of_bf16", FSDP_F32, 0, FSDP_BF16, 0, 0, 0, 0, 500, 1, 0},
    {"match_rms", FSDP_F32, 0, 0, FSDP_MUON_MATCH_RMS_ADAMW, 0, 0, 0, 0, 0, 0xaf9a0f35de4fce32},
    {"spectral_one_iteration", FSDP_F32, 0, 0, FSDP_MUON_SPECTRAL, 0, 1, 0, 0, 0,
     0x938e063254e2826f},
    {"plain_momentum", FSDP_F32, 0, 0, 0, 1, 2, 0, 1, 0, 0x51bc2f291a3074b6},
    {"columns", FSDP_F32, 0, 0, 0, 0, 0, 1, 300, 0, 0xa78a554053f79c27}};

static int has_fma(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("fma") != 0;
#elif defined(__aarch64__)
    return 1;
#else
    return 0;
#endif
}

/* On one rank x is rounded to bf16 as well if it would be sent so. */
TEST_P(muon_values, ranks, settings) {
    const uint64_t one = bits_of(row, 1, FLAT, 0, 0, 0);
    CHECK_MSG(one == row->bits || row->narrow || !has_fma(),
              "%s: the bits are 0x%016llx, not 0x%016llx", row->name, (unsigned long long)one,
              (unsigned long long)row->bits);
    for (int world = 2; world <= 4; world++)
        CHECK_MSG(bits_of(row, world, FLAT, 0, world == 3 ? 2 : 0, 0) == one,
                  "%d ranks have other bits than one", world);
    if (worst > 0)
        h_message("%s: at most %g off", row->narrow ? "updates" : "elements of x", worst);
}

static const struct {
    const char *name;
    int world, mesh, how, lanes, planned;
} meshes[] = {{"hsdp_by_bytes", 4, HSDP, FSDP_MUON_BY_BYTES, 0, 0},
              {"hsdp_all_each", 4, HSDP, FSDP_MUON_ALL_EACH, 0, 0},
              {"hsdp_a_part_each", 4, HSDP, FSDP_MUON_A_PART_EACH, 2, 0},
              {"ddp_all_each", 3, DDP, FSDP_MUON_ALL_EACH, 0, 0},
              {"ddp_a_part_each", 3, DDP, FSDP_MUON_A_PART_EACH, 0, 0},
              {"mixed_by_bytes", 4, MIXED, FSDP_MUON_BY_BYTES, 2, 0},
              {"mixed_all_each", 4, MIXED, FSDP_MUON_ALL_EACH, 0, 0},
              {"mixed_a_part_each", 4, MIXED, FSDP_MUON_A_PART_EACH, 0, 0},
              {"more_ranks_than_rows", 6, FLAT, 0, 0, 0},
              {"hsdp_planned", 4, HSDP, FSDP_MUON_A_PART_EACH, 0, PLANNED},
              {"ddp_planned", 3, DDP, FSDP_MUON_A_PART_EACH, 2, PLANNED}};

TEST_P(muon_values, meshes, meshes, row->world > 4 ? MANY_RANKS | AT_NIGHT(GLOO) : AT_NIGHT(GLOO)) {
    static const setting some[] = {{"f32", FSDP_F32, 0, 0, 0, 0, 0, 0, 0, 0, 0},
                                   {"buckets", FSDP_F32, 0, 0, 0, 0, 0, 1, 300, 0, 0},
                                   {"bf16", FSDP_BF16, 0, FSDP_BF16, 0, 0, 0, 0, 1, 0, 0}};
    for (int k = 0; k < 3; k++)
        CHECK_MSG(bits_of(&some[k], row->world, row->mesh, row->how, row->lanes, row->planned) ==
                      bits_of(&some[k], 1, FLAT, 0, 0, row->planned ? STEADY : 0),
                  "%s has other bits than on one rank", some[k].name);
}

/* Three steps. With `odd` detours come in between, which must leave no trace. `without`: a
   parameter that is not compared. */
typedef struct {
    int odd, without;
    uint64_t bits;
} detour;
static void freeze_matrices(const lab_rank *r, truth *t, fsdp_unit *const *unit, int frozen) {
    for (int p = 0; p < num_rows; p++) {
        if (rows[p].ndim == 1) continue;
        CALL(r->w, fsdp_set_requires_grad(unit[rows[p].unit], rows[p].index, !frozen));
        t->frozen[p] = frozen;
    }
}
static void go_astray(const lab_rank *r, truth *t, fsdp_model *model, fsdp_unit *const *unit,
                      fsdp_muon *muon, int step) {
    static const setting plain = {"", FSDP_F32, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    fsdp_ema *ema;
    if (step == 0) { /* dtypes that Muon cannot have */
        CALL(r->w, fsdp_model_cast(model, FSDP_F64));
        REFUSED(r->w, fsdp_muon_step(muon, 0.1), "[E9010] muon_step: Muon would take parameter");
        CALL(r->w, fsdp_model_cast(model, FSDP_F32));
    } else if (step == 1) { /* nothing to update */
        freeze_matrices(r, t, unit, 1);
        backward(r, &plain, t, model, unit, 7);
        CALL(r->w, fsdp_muon_step(muon, 0.1));
        CALL(r->w, fsdp_zero_grad(model));
        freeze_matrices(r, t, unit, 0);
    } else { /* the weights are swapped out */
        CALL(r->w, fsdp_ema_create(model, NULL, &ema));
        CALL(r->w, fsdp_ema_swap(ema));
        REFUSED_AS(FSDP_ERR_INVALID_STATE, r->w, fsdp_muon_step(muon, 0.1),
                   "call fsdp_ema_swap first");
        CALL(r->w, fsdp_model_reset(model));
        CALL(r->w, fsdp_ema_swap(ema));
    }
}
static void wander(lab_rank *r) {
    static const setting plain = {"", FSDP_F32, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    const outcome o = {&plain, FLAT, 0, 0, 0, 0, 0};
    detour *d = (detour *)r->arg;
    fsdp_muon_desc md = fsdp_muon_defaults();
    fsdp_unit *unit[UNITS];
    fsdp_model *model;
    fsdp_muon *muon;
    truth *t = (truth *)lab_zeros(1, sizeof *t);
    uint64_t bits = 1;
    md.flatten = 1, md.bucket_bytes = 500;
    build(r, &o, &model, unit);
    CALL(r->w, fsdp_muon_create(model, &md, &muon));
    for (int step = 0; step < 3; step++) {
        if (d->odd) go_astray(r, t, model, unit, muon, step);
        backward(r, &plain, t, model, unit, step);
        CALL(r->w, fsdp_muon_step(muon, rate_of(step)));
        CALL(r->w, fsdp_zero_grad(model));
    }
    for (int p = 0; p < num_rows; p++) {
        CALL(r->w, fsdp_param_full(unit[rows[p].unit], rows[p].index, t->now[p]));
        for (int64_t i = 0; p == poisoned && i < numel_of(&rows[p]); i++)
            CHECK((lab_bits32(((float *)(void *)t->now[p])[i]) & 0x7FFFFFFF) > 0x7F800000);
        if (p != d->without) lab_fold(&bits, t->now[p], (size_t)numel_of(&rows[p]) * 4);
    }
    if (r->rank == 0) d->bits = bits;
    free(t);
}
TEST(muon_values, detours) {
    detour straight = {0, -1, 0};
    make_rows();
    lab_run(1, NULL, wander, &straight);
    for (int world = 1; world <= 3; world++) {
        detour odd = {1, -1, 0};
        lab_run(world, NULL, wander, &odd);
        CHECK_MSG(odd.bits == straight.bits, "%d ranks have other bits", world);
    }
}

/* A gradient that is NaN makes all of its matrix NaN, and affects no other one. */
TEST(muon_values, poisoned) {
    static const int which[] = {5, 31, 50, 63, 66};
    make_rows();
    for (int k = 0; k < 5; k++) {
        detour good = {0, which[k], 0}, bad = {0, which[k], 0};
        CHECK(numel_of(&rows[which[k]]) > 1 && rows[which[k]].ndim > 1);
        poisoned = -1;
        lab_run(1, NULL, wander, &good);
        poisoned = which[k];
        lab_run(3, NULL, wander, &bad);
        CHECK_MSG(bad.bits == good.bits, "matrix %d has touched others", which[k]);
    }
}

/* The pool, to the byte: buckets of a 10 x 7 matrix, of which a rank has 5 rows or all; and memory
   for products: a norm, two matrices, two squares, and the packed operands. */
typedef struct {
    int mesh, how;
    int64_t bytes;
} memory_row;
static int64_t round_up(int64_t nbytes) { return (nbytes + 63) / 64 * 64; }
static void measure(lab_rank *r) {
    const memory_row *row = (const memory_row *)r->arg;
    fsdp_muon_desc d = fsdp_muon_defaults();
    fsdp_param_desc p = fsdp_mat("w", 10, 7);
    fsdp_mesh *mesh[2] = {NULL, NULL};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_memory memory;
    fsdp_muon *muon;
    char text[300];
    CALL(r->w, fsdp_mesh_1d(r->w, "all", &mesh[0]));
    if (row->mesh == HSDP) mesh[1] = lab_hsdp(r->w, 2, r->size / 2);
    const fsdp_mesh_info info = mesh_of(r->w, mesh, row->mesh);
    md.mesh_info = &info;
    fsdp_model *model = lab_model(r->w, &md);
    (void)lab_unit(r->w, model, NULL, &p, 1);
    d.replicas = row->how;
    CALL(r->w, fsdp_muon_create(model, &d, &muon));
    CALL(r->w, fsdp_model_memory(model, &memory));
    CHECK_EQ_INT(memory.pool_bytes[fsdp_pool_register(model, "muon")], row->bytes);
    CHECK(fsdp_muon_describe(NULL, text, sizeof text) > 0 && strstr(text, "muon: 0 matrices"));
}
TEST(muon_values, memory, NO(ASAN)) { /* there buffers have gaps */
    const int64_t shard = 5 * 7 * 4, whole = 10 * 7 * 4;
    const int64_t room = 64 + 2 * round_up(whole) + 2 * round_up(7 * 7 * 4) + FSDP_HOST_GEMM_BYTES;
    const memory_row all[] = {
        {HSDP, FSDP_MUON_A_PART_EACH, room + 2 * round_up(2 * shard) + 2 * round_up(2 * 2 * shard)},
        {HSDP, FSDP_MUON_ALL_EACH, room + 4 * round_up(2 * shard)},
        {DDP, FSDP_MUON_A_PART_EACH, room + 2 * round_up(whole) + 2 * round_up(4 * whole)},
        {DDP, FSDP_MUON_BY_BYTES, room + round_up(whole)}};
    for (int k = 0; k < 4; k++) lab_run(4, NULL, measure, (void *)(uintptr_t)&all[k]);
}

static int take_negative(void *user, const fsdp_param_view *v) { return (void)user, v ? -1 : 0; }
static void refuse(lab_rank *r) {
    const outcome o = {&settings[0], FLAT, 0, 0, 0, 0, 0};
    fsdp_muon_desc d = fsdp_muon_defaults();
    fsdp_unit *unit[UNITS];
    fsdp_model *model;
    fsdp_muon *muon;
    build(r, &o, &model, unit);
    d.take = take_negative;
    REFUSED(r->w, fsdp_muon_create(model, &d, &muon), "(desc.take: -1)");
}
TEST(muon_values, negative_columns) {
    make_rows();
    lab_run(1, NULL, refuse, NULL);
}
