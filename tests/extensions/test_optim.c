/* test_optim.c - AdamW and SGD: kernels compared with PyTorch and with a slow model bit by bit,
   then optimizers of models on 1 to 4 ranks compared with these kernels on full tensors.

   SPDX-License-Identifier: MIT */
#define TAGS BITS | VALGRIND | AT_NIGHT(ASAN)
#include "harness.h"
#include "golden.h"
#include <math.h> /* sqrt, pow */
#include "library.c"
#include "lab_net.h"

enum { MOST = 1100 }; /* elements: more than two blocks of the kernels */

/* ---- PyTorch's numbers ----------------------------------------------------------------------- */

typedef struct {
    int sgd, step;
    fsdp_adamw_hyper a;
    fsdp_sgd_hyper s;
    int64_t numel;
    uint64_t seed;
    float *p, *g, *m, *v;
} run;

static void read_opt(run *r, golden *g) {
    const char *kind = golden_word(g);
    memset(r, 0, sizeof *r);
    r->sgd = strcmp(kind, "sgd") == 0;
    CHECK_MSG(r->sgd || strcmp(kind, "adamw") == 0, "optimizer '%s'", kind);
    if (r->sgd) {
        r->s.lr = golden_num(g), r->s.momentum = golden_num(g), r->s.dampening = golden_num(g);
        r->s.nesterov = golden_num(g) > 0, r->s.weight_decay = golden_num(g);
    } else {
        r->a.lr = golden_num(g), r->a.beta1 = golden_num(g), r->a.beta2 = golden_num(g);
        r->a.eps = golden_num(g), r->a.weight_decay = golden_num(g);
    }
}

static void read_tensor(run *r, golden *g) {
    r->numel = golden_int(g), r->seed = golden_seed(g);
    CHECK(r->numel >= 0);
    float **all[] = {&r->p, &r->g, &r->m, &r->v};
    for (int i = 0; i < 4; i++) *all[i] = (float *)lab_zeros((size_t)r->numel, sizeof(float));
    golden_fill(r->p, r->seed, r->numel, 2);
}

static double worst;

static void compare(golden *g, const char *what, int64_t numel, const float *got) {
    for (int64_t i = 0; i < numel && !g->error[0]; i++) {
        double want = golden_num(g), d = fabs((double)got[i] - want),
               limit = 4e-6 + 4e-6 * fabs(want);
        if (d > worst) worst = d;
        CHECK_MSG(d <= limit, "case %s: %s[%lld] is %.9g, expected %.9g", g->name, what,
                  (long long)i, (double)got[i], want);
    }
}

TEST(golden_optim, kernels, NO(VALGRIND)) {
    golden g;
    run r;
    int64_t runs = 0, steps = 0;
    memset(&r, 0, sizeof r);
    GOLDEN_OPEN(&g, "optim.txt", "optim");
    while (golden_case(&g)) {
        while (golden_line(&g)) {
            if (golden_is(&g, "opt")) read_opt(&r, &g), runs++;
            else if (golden_is(&g, "clip")) break; /* read below */
            else if (golden_is(&g, "tensor")) read_tensor(&r, &g);
            else if (golden_is(&g, "step")) {
                int64_t last = golden_int(&g);
                for (; r.step < last; steps++) {
                    r.a.step = r.s.step = ++r.step;
                    golden_fill(r.g, r.seed + (uint64_t)r.step, r.numel, 2);
                    if (r.sgd) fsdp_sgd_update(r.p, r.g, r.m, r.numel, &r.s);
                    else fsdp_adamw_update(r.p, r.g, r.m, r.v, r.numel, &r.a);
                }
                compare(&g, "parameter", r.numel, r.p);
            } else if (golden_is(&g, "state")) {
                const char *name = golden_word(&g);
                compare(&g, name, r.numel, strcmp(name, "exp_avg_sq") == 0 ? r.v : r.m);
            }
        }
        free(r.p), free(r.g), free(r.m), free(r.v);
        memset(&r, 0, sizeof r);
    }
    GOLDEN_CLOSE(&g);
    h_message("%lld optimizers, %lld steps, largest difference %.2g", (long long)runs,
              (long long)steps, worst);
}

/* ---- AdamW, bit by bit ---------------------------------------------------------------------- */

/* Computed from the formulas with every operation rounded; the last parameters are bit patterns. */
static const struct {
    const char *name;
    double lr[3], beta1, beta2, eps, decay;
    float p[4], g[3][4];
    uint32_t want[4];
} vectors[] = {
    {"decay",
     {1e-3, 1e-3, 1e-3},
     0.9,
     0.999,
     1e-8,
     0.01,
     {1, -2, 0.5f, 3},
     {{0.1f, -0.2f, 0.3f, -0.4f}, {0.05f, 0.25f, -0.3f, 0}, {-0.1f, 0.2f, 0.1f, 1}},
     {0x3f7f7825, 0xbffff12f, 0x3eff73d4, 0x40401350}},
    {"small",
     {6e-4, 6e-4, 6e-4},
     0.9,
     0.95,
     1e-8,
     0.1,
     {0.02f, -0.013f, 0.0071f, 1},
     {{1e-3f, -2e-3f, 5e-4f, 3e-2f}, {2e-3f, 1e-3f, -5e-4f, -1e-2f}, {-1e-3f, 4e-3f, 1e-4f, 2e-2f}},
     {0x3c981f4f, 0xbc4ceb10, 0x3bd50201, 0x3f7fa510}},
    {"place_of_eps",
     {1e-2, 1e-2, 1e-2},
     0.9,
     0.999,
     1e-6,
     0,
     {1, 1, -1, 0},
     {{1e-7f, 1e-6f, -1e-5f, 1e-8f}, {1e-7f, -1e-6f, 1e-5f, 0}, {2e-7f, 1e-6f, 1e-5f, -1e-8f}},
     {0x3f7f3a3e, 0x3f7e5b89, 0xbf7ebb35, 0xb911d919}},
    {"schedule_and_far_lerp",
     {1e-3, 5e-4, 2.5e-4},
     0.4,
     0.99,
     1e-8,
     0.05,
     {10, -0.25f, 100, -1e-3f},
     {{5, -0.5f, 123.456f, 1e-4f}, {-3, 0.25f, -65.5f, 2e-4f}, {1.5f, 0.125f, 7.75f, -3e-4f}},
     {0x411ff878, 0xbe7f127a, 0x42c7fb0b, 0xbb1ca3af}},
    {"no_gradient",
     {0.1, 0.1, 0.1},
     0.9,
     0.999,
     1e-8,
     0.1,
     {1, -1, 1.0f / 3, 2},
     {{0, 0, 0, 0}, {0, 0, 0, 1}, {0, 0, 0, 0}},
     {0x3f786585, 0xbf786585, 0x3ea59903, 0x3fe79aa2}},
};

TEST_P(optim, adamw_vectors, vectors) {
    float p[4], m[4] = {0, 0, 0, 0}, v[4] = {0, 0, 0, 0};
    memcpy(p, row->p, sizeof p);
    for (int t = 0; t < 3; t++) {
        fsdp_adamw_hyper h = {row->lr[t], row->beta1, row->beta2, row->eps, row->decay, t + 1};
        fsdp_adamw_update(p, row->g[t], m, v, 4, &h);
    }
    for (int i = 0; i < 4; i++)
        CHECK_MSG(lab_bits32(p[i]) == row->want[i], "%d: %a, 0x%08x", i, (double)p[i],
                  lab_bits32(p[i]));
}

/* ---- kernels against a slow model ------------------------------------------------------------ */

/* Every result passes through one of these, which rounds it to the type. Intermediate values are
   volatile, so that no compiler optimizes across them. */
static double round_to(int wide, double x) {
    volatile float f = (float)x;
    return wide ? x : (double)f;
}
static double add(int wide, double a, double b) {
    volatile double x = a + b; /* rounding a sum of two f32 twice equals rounding it once */
    return round_to(wide, x);
}
static double mul(int wide, double a, double b) {
    volatile double x = a * b;
    return round_to(wide, x);
}
static double quotient(int wide, double a, double b) {
    volatile double x = a / b;
    return round_to(wide, x);
}
static double root(int wide, double a) {
    volatile double x = sqrt(a);
    return round_to(wide, x);
}

static void slow_adamw(int w, double *p, double g, double *m, double *v,
                       const volatile fsdp_adamw_hyper *h) {
    volatile double decay = h->lr * h->weight_decay, keep = 1 - decay, rest1 = 1 - h->beta1,
                    rest2 = 1 - h->beta2;
    volatile double power1 = pow(h->beta1, (double)h->step),
                    power2 = pow(h->beta2, (double)h->step);
    volatile double bias1 = 1 - power1, bias2 = 1 - power2, rate = -(h->lr / bias1),
                    corrected = sqrt(bias2);
    double weight = round_to(w, rest1), d = add(w, g, -*m);
    *p = mul(w, *p, round_to(w, keep));
    *m = weight < 0.5 ? add(w, *m, mul(w, weight, d)) : add(w, g, -mul(w, d, add(w, 1, -weight)));
    *v = add(w, mul(w, *v, round_to(w, h->beta2)), mul(w, mul(w, round_to(w, rest2), g), g));
    double den = add(w, quotient(w, root(w, *v), round_to(w, corrected)), round_to(w, h->eps));
    *p = add(w, *p, quotient(w, mul(w, round_to(w, rate), *m), den));
}

static void slow_sgd(int w, double *p, double g, double *b, const volatile fsdp_sgd_hyper *h) {
    volatile double rest = 1 - h->dampening;
    double momentum = round_to(w, h->momentum), d = g;
    if (h->weight_decay != 0) d = add(w, d, mul(w, round_to(w, h->weight_decay), *p));
    if (h->momentum != 0) {
        if (h->step == 1) *b = d;
        else *b = add(w, mul(w, momentum, *b), mul(w, round_to(w, rest), d));
        d = h->nesterov ? add(w, d, mul(w, momentum, *b)) : *b;
    }
    *p = add(w, *p, mul(w, round_to(w, -h->lr), d));
}

static const struct {
    const char *name;
    fsdp_dtype dtype;
} dtypes[] = {{"f32", FSDP_F32}, {"f64", FSDP_F64}, {"bf16", FSDP_BF16}, {"f16", FSDP_F16}};

/* Random settings, three steps; the last part of the array is a span of any length. Gradients have
   any dtype and are first converted to the type of the arithmetic. */
TEST_P(optim, kernels, dtypes) {
    static double p_[MOST + 1], g[MOST], m[MOST + 1], v[MOST + 1], want[MOST];
    char *p = (char *)p_;
    static double slow_m[MOST], slow_v[MOST];
    uint64_t rng = h_seed();
    fsdp_dtype dtype = row->dtype, state = dtype == FSDP_F64 ? FSDP_F64 : FSDP_F32;
    int w = dtype == FSDP_F64;
    int64_t elements = 0;
    for (int n = 0; n < 120; n++) {
        int64_t count = n < 40 ? n : 1 + (int64_t)(h_rand64(&rng) % (MOST - 1)),
                size = (int64_t)fsdp_dtype_size(dtype);
        fsdp_adamw_hyper a = {
            lab_uniform(&rng) * 0.1, lab_uniform(&rng), 0.5 + lab_uniform(&rng) / 2, 1e-8, 0, 0};
        fsdp_sgd_hyper s = {lab_uniform(&rng) * 0.1, 0, 0, 0, 0, 0, 0};
        int sgd = n % 2;
        fsdp_dtype grad = n % 8 < 4 ? dtype : dtypes[n / 8 % 4].dtype;
        if (n % 3) a.weight_decay = s.weight_decay = lab_uniform(&rng);
        if (n % 5) s.momentum = lab_uniform(&rng);
        if (n % 7 < 3) s.dampening = lab_uniform(&rng);
        s.nesterov = n % 4 > 1;
        memset(m, 0, sizeof m), memset(v, 0, sizeof v), memset(p_, 0x77, sizeof p_);
        memset(slow_m, 0, sizeof slow_m), memset(slow_v, 0, sizeof slow_v);
        for (int64_t i = 0; i < count; i++) lab_put(p, dtype, i, lab_uniform(&rng) * 4 - 2);
        memcpy(want, p, sizeof want);
        for (int t = 1; t <= 3; t++) {
            a.step = s.step = t;
            for (int64_t i = 0; i < count; i++) {
                lab_put(g, grad, i, (lab_uniform(&rng) - 0.5) / (double)(1 + h_rand64(&rng) % 100));
                double x = lab_get(want, dtype, i), y = round_to(w, lab_get(g, grad, i));
                if (sgd) slow_sgd(w, &x, y, &slow_m[i], &s);
                else slow_adamw(w, &x, y, &slow_m[i], &slow_v[i], &a);
                lab_put(want, dtype, i, x);
            }
            fsdp_dtype given = n % 8 < 4 ? FSDP_DTYPE_KEEP : grad;
            if (sgd)
                CHECK_OK(
                    fsdp_sgd_update_as(dtype, p, given, g, s.momentum > 0 ? m : NULL, count, &s));
            else CHECK_OK(fsdp_adamw_update_as(dtype, p, given, g, m, v, count, &a));
            CHECK_EQ_MEM(p, want, (size_t)(count * size));
            for (int64_t i = 0; i < count; i++) {
                CHECK(lab_bits(lab_get(m, state, i)) == lab_bits(slow_m[i]));
                CHECK(lab_bits(lab_get(v, state, i)) == lab_bits(slow_v[i]));
            }
            elements += count;
        }
        CHECK(p[count * size] == 0x77); /* nothing is written after the end */
    }
    h_message("%s: %lld updates", row->name, (long long)elements);
}

TEST(optim, kernels_refuse) {
    float x[4] = {1, 2, 3, 4}, y[4] = {1, 2, 3, 4}, m[4], v[4];
    fsdp_adamw_hyper a = {0.1, 0.9, 0.99, 1e-8, 0, 1};
    fsdp_sgd_hyper s = {0.1, 0.9, 0, 0, 0, 0, 1};
    const fsdp_dtype f = FSDP_F32;
    const int bad = FSDP_ERR_INVALID_ARG;
    CHECK_STATUS(fsdp_adamw_update_as(FSDP_I32, x, f, y, m, v, 4, &a), bad);
    CHECK_STATUS(fsdp_adamw_update_as(FSDP_DTYPE_KEEP, x, f, y, m, v, 4, &a), bad);
    CHECK_STATUS(fsdp_adamw_update_as(f, x, FSDP_I32, y, m, v, 4, &a), bad);
    CHECK_STATUS(fsdp_adamw_update_as(f, x, FSDP_DTYPE_COUNT, y, m, v, 4, &a), bad);
    CHECK_STATUS(fsdp_adamw_update_as(f, x, f, y, m, v, -1, &a), bad);
    CHECK_STATUS(fsdp_adamw_update_as(f, x, f, y, m, v, 4, NULL), bad);
    CHECK_STATUS(fsdp_adamw_update_as(f, NULL, f, y, m, v, 4, &a), bad);
    CHECK_STATUS(fsdp_adamw_update_as(f, x, f, NULL, m, v, 4, &a), bad);
    CHECK_STATUS(fsdp_adamw_update_as(f, x, f, y, NULL, v, 4, &a), bad);
    CHECK_STATUS(fsdp_adamw_update_as(f, x, f, y, m, NULL, 4, &a), bad);
    CHECK_STATUS(fsdp_sgd_update_as(FSDP_U8, x, f, y, m, 4, &s), bad);
    CHECK_STATUS(fsdp_sgd_update_as(f, x, FSDP_U8, y, m, 4, &s), bad);
    CHECK_STATUS(fsdp_sgd_update_as(f, x, -1, y, m, 4, &s), bad);
    CHECK_STATUS(fsdp_sgd_update_as(f, x, f, y, m, -1, &s), bad);
    CHECK_STATUS(fsdp_sgd_update_as(f, x, f, y, m, 4, NULL), bad);
    CHECK_STATUS(fsdp_sgd_update_as(f, NULL, f, y, m, 4, &s), bad);
    CHECK_STATUS(fsdp_sgd_update_as(f, x, f, NULL, m, 4, &s), bad);
    CHECK_STATUS(fsdp_sgd_update_as(f, x, f, y, NULL, 4, &s), bad);
    CHECK_OK(fsdp_adamw_update_as(f, NULL, f, NULL, NULL, NULL, 0, &a));
    CHECK_OK(fsdp_sgd_update_as(FSDP_F64, NULL, f, NULL, NULL, 0, &s));
    CHECK(x[0] == 1 && x[3] == 4);
}

/* ---- models ---------------------------------------------------------------------------------- */

enum { NUM = 13, UNITS = 4, STEPS = 6, BIG = 256 };

/* Uneven parameters, empty on some ranks, without elements, sharded by columns, direct with
   direct_min 1. The tag is the group. */
static const lab_param net[NUM] = {
    {0, "a.w", FSDP_F32, 0, 0, 2, 0, {7, 5}},  {0, "a.b", FSDP_F32, 1, 0, 1, 0, {3}},
    {0, "a.f", FSDP_F32, 0, 1, 2, 0, {4, 4}},  {0, "a.z", FSDP_F32, 0, 0, 1, 0, {0}},
    {0, "a.k", FSDP_F32, 0, 0, 2, 1, {6, 10}}, {1, "b.w", FSDP_F32, 0, 0, 2, 0, {32, 8}},
    {1, "b.b", FSDP_F32, 1, 0, 1, 0, {16}},    {1, "b.x", FSDP_F32, -1, 0, 1, 0, {5}},
    {1, "b.v", FSDP_F32, 2, 0, 2, 0, {16, 4}}, {2, "c.w", FSDP_F64, 0, 0, 2, 0, {5, 3}},
    {2, "c.b", FSDP_F64, 1, 0, 1, 0, {9}},     {3, "d.w", FSDP_BF16, 0, 0, 2, 0, {9, 4}},
    {3, "d.b", FSDP_BF16, 1, 0, 1, 0, {2}}};
static const lab_net the_net = {net, NUM, UNITS};

/* Returns 1 if ranks use parameter p in a step. */
static int uses(int step, int p) {
    return (step + p) % 3 != 0 || p == 9;
}

typedef struct { /* test of one rank */
    int rank, world, kind, lanes, offload;
    fsdp_dtype grad_dtype;
    int64_t direct_min;
    fsdp_world *w;
    lab_built m;
    int updates[NUM], known[NUM]; /* known: was once trainable */
    lab_optim o;
    double scale[3], decay[3]; /* of each group */
    w_heap *heap;
    /* expected values, exact for any dtype */
    double full[NUM][BIG], first[NUM][BIG], second[NUM][BIG];
} job;

static void fill_rows(void *user, const fsdp_param_view *block) {
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        lab_put(block->data, block->dtype, k,
                golden_value((uint64_t)block->ordinal, (uint64_t)fsdp_view_index(block, k), 2));
}

static void make_model(job *j) {
    fsdp_model_desc md = FSDP_ZERO;
    md.direct_min = j->direct_min;
    md.grad_dtype = j->grad_dtype;
    md.cpu_offload = j->offload;
    lab_build(&j->m, &the_net, j->w, &md);
    for (int p = 0; p < NUM; p++) j->known[p] = !j->m.frozen[p];
    CALL(j->w, fsdp_init_params(j->m.model, fill_rows, NULL));
    for (int p = 0; p < NUM; p++)
        for (int64_t i = 0; i < lab_numel_of(&the_net, p); i++)
            lab_put(j->full[p], net[p].dtype, i, golden_value((uint64_t)p, (uint64_t)i, 2));
}

static void backward(job *j, int step) {
    lab_forwards(&j->m);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(j->w, fsdp_pre_backward(j->m.unit[u]));
        for (int p = 0; p < NUM; p++) {
            if (net[p].unit != u || j->m.frozen[p] || !uses(step, p)) continue;
            void *g = lab_grad(&j->m, p);
            for (int64_t i = 0; i < lab_numel_of(&the_net, p); i++)
                lab_put(g, net[p].dtype, i,
                        golden_value((uint64_t)(1000 * (step + 1) + 100 * j->rank + p), (uint64_t)i,
                                     2));
        }
        CALL(j->w, fsdp_post_backward(j->m.unit[u]));
    }
    CALL(j->w, fsdp_finalize_backward(j->m.model));
}

/* Makes the optimizer, and the expected settings of its groups. */
static double same_decay(const job *j) {
    return !j->o.kind->sgd && !j->o.kind->grouped ? 0.01 : j->o.kind->weight_decay;
}
static void make_optim(job *j) {
    CALL(j->w, lab_make_optim(&j->o, &lab_optim_kinds[j->kind], &j->m));
    for (int k = 0; k < 3; k++) {
        const double own = j->o.kind->grouped ? lab_optim_groups[k].weight_decay : -1;
        j->scale[k] = j->o.kind->grouped ? lab_optim_groups[k].lr_scale : 1;
        j->decay[k] = own < 0 ? same_decay(j) : own;
    }
}

/* Updates full tensors in the same way, with the reduced gradients. */
static void expect(job *j, double lr) {
    static __thread double g[BIG];
    for (int p = 0; p < NUM; p++) {
        int group = j->o.kind->grouped ? net[p].tag : 0;
        if (j->m.frozen[p]) continue;
        const fsdp_param_view view = lab_view_of(&j->m, p);
        CALL(j->w, fsdp_param_full_grad(lab_unit_of(&j->m, p), j->m.index[p], g));
        CHECK_EQ_INT(view.grad_dtype, j->grad_dtype ? j->grad_dtype : net[p].dtype);
        if (!view.shard_grad || group < 0) continue;
        const double decay = j->decay[group], scale = j->scale[group];
        fsdp_adamw_hyper a = {lr * scale, 0.9, 0.999, 1e-8, decay, ++j->updates[p]};
        fsdp_sgd_hyper s = {lr * scale, 0, 0, decay, 0, 0, j->updates[p]};
        if (j->o.kind->beta1 > 0) a.beta1 = j->o.kind->beta1;
        s.momentum = j->o.kind->momentum, s.dampening = j->o.kind->dampening;
        s.nesterov = j->o.kind->nesterov;
        if (j->o.kind->sgd)
            CHECK_OK(fsdp_sgd_update_as(net[p].dtype, j->full[p], view.grad_dtype, g, j->first[p],
                                        lab_numel_of(&the_net, p), &s));
        else
            CHECK_OK(fsdp_adamw_update_as(net[p].dtype, j->full[p], view.grad_dtype, g, j->first[p],
                                          j->second[p], lab_numel_of(&the_net, p), &a));
    }
}

static void check_state(job *j, int p, const fsdp_param_view *view) {
    const fsdp_optim_state s = lab_optim_state(&j->m, &j->o, p);
    size_t size = net[p].dtype == FSDP_F64 ? 8 : 4;
    int group = !j->known[p] ? -1 : j->o.kind->grouped ? net[p].tag : 0;
    W_CHECK(s.group == group, "%s: group %d", net[p].name, s.group);
    if (group < 0) W_CHECK(!s.step && !s.first && !s.second, "%s", net[p].name);
    if (group < 0) return;
    W_CHECK(s.numel == view->numel && *s.step == j->updates[p], "%s: %lld updates, not %d",
            net[p].name, (long long)*s.step, j->updates[p]);
    W_CHECK((s.first != NULL) == (!j->o.sgd || j->o.kind->momentum > 0), "%s", net[p].name);
    W_CHECK((s.second != NULL) == !j->o.sgd, "%s", net[p].name);
    for (int64_t k = 0; k < view->numel; k++) {
        size_t mine = (size_t)k * size, whole = (size_t)fsdp_view_index(view, k) * size;
        if (s.first) CHECK_EQ_MEM((char *)s.first + mine, (char *)j->first[p] + whole, size);
        if (s.second) CHECK_EQ_MEM((char *)s.second + mine, (char *)j->second[p] + whole, size);
    }
}

/* Checks that every element of the flat blocks outside all rows is zero. */
static void check_padding(job *j) {
    for (fsdp_dtype d = 1; d < FSDP_DTYPE_COUNT; d++) {
        fsdp_flat flat;
        fsdp_param_view view = FSDP_ZERO;
        CALL(j->w, fsdp_model_flat(j->m.model, d, &flat));
        size_t nbytes = (size_t)flat.numel * fsdp_dtype_size(d);
        char *taken = (char *)lab_zeros(nbytes + 1, 1);
        while (fsdp_next_param(j->m.model, &view))
            if (view.dtype == d && view.requires_grad)
                memset(taken + ((char *)view.shard - (char *)flat.shards), 1,
                       (size_t)view.numel * fsdp_dtype_size(d));
        for (size_t i = 0; i < nbytes; i++)
            W_CHECK(taken[i] || !((char *)flat.shards)[i], "byte %zu of the padding is not 0", i);
        free(taken);
    }
}

static void check_all(job *j) {
    static __thread double got[BIG];
    for (int p = 0; p < NUM; p++) {
        CALL(j->w, fsdp_param_full(lab_unit_of(&j->m, p), j->m.index[p], got));
        W_CHECK(!memcmp(got, j->full[p], lab_nbytes_of(&the_net, p)),
                "parameter %s is not what one rank alone computes", net[p].name);
        const fsdp_param_view view = lab_view_of(&j->m, p);
        check_state(j, p, &view);
    }
    check_padding(j);
}

static void train(job *j) {
    int64_t before = 0;
    fsdp_memory empty, full;
    make_model(j);
    CALL(j->w, fsdp_model_memory(j->m.model, &empty));
    make_optim(j);
    CALL(j->w, fsdp_model_memory(j->m.model, &full));
    CHECK(full.host_bytes > empty.host_bytes && full.total_bytes == empty.total_bytes);
    int64_t held = lab_optim_nbytes(&j->o);
    CHECK_EQ_INT(full.host_bytes - empty.host_bytes, held);
    for (int step = 0; step < STEPS; step++) {
        double lr = 0.01 * (step + 1);
        snprintf(w_case, sizeof w_case, "%s, rank %d of %d, direct_min %lld, lanes %d, step %d",
                 lab_optim_kinds[j->kind].name, j->rank, j->world, (long long)j->direct_min,
                 j->lanes, step);
        if (step == 3) before = w_allocations(j->heap);
        backward(j, step);
        expect(j, lr);
        CALL(j->w, lab_optim_step(&j->o, lr));
        check_all(j);
        CALL(j->w, fsdp_zero_grad(j->m.model));
    }
    W_CHECK(w_allocations(j->heap) == before, "a step has allocated");
    int updated = 0;
    for (int p = 0; p < NUM; p++) updated += j->updates[p] > 0 && j->updates[p] < STEPS;
    CHECK(updated > 2); /* some parameters were skipped in some steps */
}

typedef struct {
    int kind, lanes, offload;
    fsdp_dtype grad_dtype;
    int64_t direct_min;
    void (*body)(job *j);
} start;

static void on_rank(lab_rank *r) {
    const start *s = (const start *)r->arg;
    job *j = (job *)lab_zeros(1, sizeof *j);
    j->heap = r->heap, j->w = r->w, j->rank = r->rank, j->world = r->size;
    j->kind = s->kind, j->lanes = s->lanes;
    j->direct_min = s->direct_min, j->grad_dtype = s->grad_dtype, j->offload = s->offload;
    s->body(j);
    lab_end(r); /* each world destroys its optimizers */
    free(j);
}

/* Fields that `more` does not set have defaults. */
static void launch_as(int world, int kind, int64_t direct_min, int lanes, const start *more,
                      void (*body)(job *j)) {
    start s = FSDP_ZERO;
    lab_how how = FSDP_ZERO;
    if (more) s = *more;
    s.kind = kind, s.lanes = lanes, s.direct_min = direct_min, s.body = body;
    how.job = "optim", how.lanes = lanes;
    lab_run(world, &how, on_rank, &s);
}
static void launch(int world, int kind, int64_t direct_min, int lanes, void (*body)(job *j)) {
    launch_as(world, kind, direct_min, lanes, NULL, body);
}

TEST_P(optim, sharded, lab_optim_kinds) {
    static const int64_t direct[] = {0, 1, FSDP_DIRECT_NEVER};
    int runs = 0;
    for (int world = 1; world <= 4; world++)
        for (int d = 0; d < 3; d++, runs++)
            launch(world, (int)(row - lab_optim_kinds), direct[d], 0, train);
    for (int world = 2; world <= 3; world++, runs++)
        launch(world, (int)(row - lab_optim_kinds), 1, 1, train);
    h_message("%s: %d models of %d parameters, %d steps each", row->name, runs, NUM, STEPS);
}

/* Shard gradients whose dtype differs from that of the shards: bf16 shards with f32 gradients, f32
   ones with bf16 gradients, f64 ones with f32 gradients and so on. */
static const struct {
    const char *name;
    fsdp_dtype dtype;
} grad_dtypes[] = {{"f32", FSDP_F32}, {"bf16", FSDP_BF16}, {"f64", FSDP_F64}};

TEST_P(optim, grad_dtype, grad_dtypes) {
    static start more;
    more.grad_dtype = row->dtype;
    for (int kind = 1; kind < 4; kind += 2)
        for (int world = 1; world <= 3; world++)
            launch_as(world, kind, world == 2, world == 3, &more, train);
}

/* ---- groups that change ---------------------------------------------------------------------- */

static fsdp_status set_group(const job *j, int k, const fsdp_optim_group *g) {
    return j->o.sgd ? fsdp_sgd_set_group(j->o.sgd, k, g) : fsdp_adamw_set_group(j->o.adamw, k, g);
}

/* Checks that a group is refused; the steps show that the old one remains. */
static void refuse_group(const job *j, int k, const fsdp_optim_group *g, const char *text) {
    CHECK_STATUS(set_group(j, k, g), FSDP_ERR_INVALID_ARG);
    W_CHECK(strstr(fsdp_last_error(j->w), text), "%s", fsdp_last_error(j->w));
}
static void refuse_groups(const job *j) {
    const int num = j->o.kind->grouped ? 3 : 1;
    const double nan = lab_from_bits(0x7FF8000000000000u), inf = lab_from_bits(0x7FF0000000000000u);
    fsdp_optim_group g = fsdp_adamw_defaults().groups[0], none = FSDP_ZERO;
    refuse_group(j, -1, &g, num == 3 ? "no group -1, expected 0..2" : "expected 0..0");
    refuse_group(j, num, &g, "_set_group: the optimizer has no group ");
    CHECK_STATUS(set_group(j, 0, NULL), FSDP_ERR_INVALID_ARG);
    refuse_group(j, 0, &none, "_set_group: group does not come from fsdp_");
    const double bad[] = {-0.5, nan, inf};
    for (int i = 0; i < 3; i++) {
        g = fsdp_sgd_defaults().groups[0], g.lr_scale = bad[i];
        refuse_group(j, num - 1, &g, "_set_group: group.lr_scale is ");
        g = fsdp_sgd_defaults().groups[0], g.weight_decay = bad[i];
        refuse_group(j, num - 1, &g, "_set_group: group.weight_decay is ");
    }
    CHECK_STATUS(fsdp_sgd_set_group(NULL, 0, &g), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_adamw_set_group(NULL, 0, &g), FSDP_ERR_INVALID_ARG);
}

static void change_group(job *j, int step) {
    const int k = j->o.kind->grouped ? step % 3 : 0;
    fsdp_optim_group g = fsdp_adamw_defaults().groups[0];
    g.lr_scale = j->scale[k] = 0.5 * (step % 5);
    if (step % 2) g.weight_decay = 0.02 * step;
    j->decay[k] = step % 2 ? 0.02 * step : same_decay(j);
    CALL(j->w, set_group(j, k, &g));
}

/* Groups change before a backward, after it, or not at all. If planned, all steps use the same
   parameters, so that most of them replay. */
static void groups_change(job *j, int planned) {
    fsdp_plan *plan = NULL;
    int64_t before = 0;
    make_model(j);
    make_optim(j);
    if (planned) CALL(j->w, fsdp_plan_create(j->m.model, NULL, &plan));
    for (int step = 0; step < 2 * STEPS; step++) {
        snprintf(w_case, sizeof w_case, "%s, rank %d of %d, step %d", lab_optim_kinds[j->kind].name,
                 j->rank, j->world, step);
        if (step == STEPS) before = w_allocations(j->heap);
        if (step % 4 == 1) change_group(j, step);
        backward(j, planned ? 3 * step : step);
        if (step % 4 > 1) change_group(j, step);
        refuse_groups(j);
        expect(j, 0.01);
        CALL(j->w, lab_optim_step(&j->o, 0.01));
        check_all(j);
        CALL(j->w, fsdp_zero_grad(j->m.model));
    }
    W_CHECK(w_allocations(j->heap) == before, "a step has allocated");
    if (plan) CHECK_EQ_INT(fsdp_plan_state(plan), FSDP_PLAN_REPLAYING);
    if (j->rank == 0) fsdp_abort(j->w, "a test");
    while (!fsdpi_failed(j->w)) (void)fsdp_barrier(j->w);
    const fsdp_optim_group g = fsdp_adamw_defaults().groups[0];
    CHECK_STATUS(set_group(j, 0, &g), FSDP_ERR_ABORTED);
}
static void eagerly(job *j) { groups_change(j, 0); }
static void by_plan(job *j) { groups_change(j, 1); }

TEST_P(optim, set_group, lab_optim_kinds) {
    for (int world = 1; world <= 3; world++)
        launch(world, (int)(row - lab_optim_kinds), world == 2, world == 3, eagerly);
    launch(1, (int)(row - lab_optim_kinds), 0, 0, by_plan);
    launch(2, (int)(row - lab_optim_kinds), 1, 0, by_plan);
}

/* ---- freeze and thaw ------------------------------------------------------------------------- */

/* Returns 1 if a parameter changes between frozen and trainable before a step. */
static int toggles(int step, int p) {
    if (p == 1) return step == 3; /* frozen for good */
    if (p == 2) return step == 2; /* initially frozen, thawed for the first time */
    if (p == 4 || p == 9) return step == 1 || step == 4;
    if (p == 5) return step == 2 || step == 3 || step == 5;
    return (p == 11 || p == 12) && (step == 2 || step == 5); /* a whole unit */
}

static void toggle(job *j, int step, int *changed) {
    for (int p = *changed = 0; p < NUM; p++) {
        if (!toggles(step, p)) continue;
        lab_freeze(&j->m, p, !j->m.frozen[p]);
        j->known[p] |= !j->m.frozen[p];
        *changed = 1;
    }
}

static void freeze_and_thaw(job *j) {
    make_model(j);
    make_optim(j);
    for (int step = 0; step < STEPS + 1; step++) {
        int changed;
        snprintf(w_case, sizeof w_case, "%s, rank %d of %d, direct_min %lld, lanes %d, step %d",
                 lab_optim_kinds[j->kind].name, j->rank, j->world, (long long)j->direct_min,
                 j->lanes, step);
        toggle(j, step, &changed);
        if (step % 2) check_all(j); /* read before the first step of a layout */
        backward(j, step);
        expect(j, 0.01);
        int64_t before = w_allocations(j->heap);
        CALL(j->w, lab_optim_step(&j->o, 0.01));
        W_CHECK(changed || w_allocations(j->heap) == before, "a step has allocated");
        check_all(j);
        CALL(j->w, fsdp_zero_grad(j->m.model));
    }
    fsdp_memory all, rest;
    int64_t held = lab_optim_nbytes(&j->o);
    CALL(j->w, fsdp_model_memory(j->m.model, &all));
    lab_optim_destroy(&j->o);
    CALL(j->w, fsdp_model_memory(j->m.model, &rest));
    CHECK_EQ_INT(all.host_bytes - rest.host_bytes, held);
}

TEST_P(optim, freeze_and_thaw, lab_optim_kinds) {
    static const int64_t direct[] = {0, 1, FSDP_DIRECT_NEVER};
    for (int world = 1; world <= 4; world++)
        for (int d = 0; d < 3; d++)
            launch(world, (int)(row - lab_optim_kinds), direct[d], d == 1, freeze_and_thaw);
}

/* A cast converts states in pieces: states of a parameter with several pieces keep their values. */
static void cast_states(lab_rank *r) {
    enum { ROWS = 700, COLUMNS = 3, ELEMENTS = ROWS * COLUMNS };
    static __thread double was[2][ELEMENTS];
    fsdp_param_desc p[2] = {fsdp_vec("first", 5), fsdp_mat("w", ROWS, COLUMNS)};
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *u = lab_unit(r->w, m, NULL, p, 2);
    fsdp_adamw *opt;
    CALL(r->w, fsdp_adamw_create(m, NULL, &opt));
    lab_forward(r->w, u);
    CALL(r->w, fsdp_pre_backward(u));
    for (int i = 0; i < 2; i++)
        for (int64_t k = 0; k < (i ? ELEMENTS : 5); k++) fsdp_grad_f32(u, i)[k] = (float)(k + 1);
    CALL(r->w, fsdp_post_backward(u));
    CALL(r->w, fsdp_finalize_backward(m));
    CALL(r->w, fsdp_adamw_step(opt, 0.1));
    CALL(r->w, fsdp_zero_grad(m));
    static const fsdp_dtype casts[] = {FSDP_F32, FSDP_F64, FSDP_F32};
    for (int cast = 0; cast < 3; cast++) {
        fsdp_state_item item = FSDP_ZERO;
        int seen = 0;
        if (cast) CALL(r->w, fsdp_model_cast(m, casts[cast]));
        for (;;) {
            CALL(r->w, fsdp_next_state(m, &item));
            if (!item.name) break;
            if (!item.sharded || item.ordinal != 1) continue;
            CHECK(item.dtype == casts[cast] && seen < 2);
            for (int64_t k = 0; k < item.numel; k++) {
                const double is = lab_get(item.data, item.dtype, k);
                if (!cast) was[seen][k] = is;
                W_CHECK(lab_same(is, was[seen][k]) && is > 0, "cast %d, %s[%lld]: %g, was %g", cast,
                        item.name, (long long)k, is, was[seen][k]);
            }
            seen++;
        }
        CHECK_EQ_INT(seen, 2);
    }
}
TEST(optim, cast_of_large_states) {
    lab_run(1, NULL, cast_states, NULL);
    lab_run(2, NULL, cast_states, NULL);
}

/* Shards in host memory. An optimizer on a device without an update function needs them, if the
   host cannot read the device's memory. */
static void elsewhere(job *j) {
    static fsdp_device_ops ops;
    fsdp_adamw *a = NULL;
    fsdp_sgd *s = NULL;
    fsdp_grad_scaler *g = NULL;
    make_model(j);
    ops = *fsdpi_host_ops();
    ops.name = "elsewhere";
    ops.flags &= ~(uint32_t)FSDP_DEVICE_HOST;
    const fsdp_device_ops *host = j->w->device_ops;
    j->w->device_ops = &ops;
    fsdp_status expected = j->offload ? FSDP_OK : FSDP_ERR_UNSUPPORTED;
    CHECK_STATUS(fsdp_adamw_create(j->m.model, NULL, &a), expected);
    if (!j->offload)
        CHECK(strstr(fsdp_last_error(j->w), "device elsewhere") &&
              strstr(fsdp_last_error(j->w), "cpu_offload"));
    CHECK_STATUS(fsdp_sgd_create(j->m.model, NULL, &s), expected);
    CHECK_STATUS(fsdp_grad_scaler_create(j->m.model, NULL, &g), expected);
    CHECK(!a == !j->offload && !s == !j->offload && !g == !j->offload);
    j->w->device_ops = host;
}
TEST(optim, offload) {
    static start more;
    launch_as(1, 0, 0, 0, &more, elsewhere);
    more.offload = 1;
    launch_as(1, 0, 0, 0, &more, elsewhere);
    for (int kind = 0; kind < 4; kind++)
        for (int world = 1; world <= 3; world++) {
            launch_as(world, kind, 0, world == 2, &more, train);
            launch_as(world, kind, 1, 0, &more, freeze_and_thaw);
        }
}

/* The optimizer asks for the group of a parameter once, when it is new. */
static __thread int asked[NUM];
static int count_asked(void *user, const fsdp_param_view *v) {
    (void)user;
    asked[v->ordinal]++;
    return v->ordinal == 7 ? -1 : 0;
}

/* No memory for the state of a new layout: the step changes nothing, and the next one works. */
static void thaw_without_memory(job *j) {
    fsdp_adamw_desc d = fsdp_adamw_defaults();
    fsdp_param_view before, after;
    fsdp_optim_state s;
    memset(asked, 0, sizeof asked);
    d.group = count_asked;
    make_model(j);
    CALL(j->w, fsdp_adamw_create(j->m.model, &d, &j->o.adamw));
    backward(j, 1);
    CALL(j->w, fsdp_adamw_step(j->o.adamw, 0.1));
    CALL(j->w, fsdp_zero_grad(j->m.model));
    lab_freeze(&j->m, 2, 0);
    backward(j, 2);
    CALL(j->w, fsdp_param_at(j->m.model, 9, &before));
    double was = lab_get(before.shard, FSDP_F64, 0);
    w_fail(j->heap, 0);
    CHECK_STATUS(fsdp_adamw_step(j->o.adamw, 0.1), FSDP_ERR_OUT_OF_MEMORY);
    w_fail(j->heap, -1);
    CHECK(strstr(fsdp_last_error(j->w), "adamw_step: no memory for a state of "));
    CALL(j->w, fsdp_param_at(j->m.model, 9, &after));
    CHECK(lab_bits(lab_get(after.shard, FSDP_F64, 0)) == lab_bits(was));
    CALL(j->w, fsdp_adamw_step(j->o.adamw, 0.1));
    CHECK(lab_bits(lab_get(after.shard, FSDP_F64, 0)) != lab_bits(was));
    CALL(j->w, fsdp_adamw_state(j->o.adamw, 9, &s));
    CHECK_EQ_INT(*s.step, 2);
    CALL(j->w, fsdp_adamw_state(j->o.adamw, 2, &s));
    CHECK(s.group == 0 && *s.step == uses(2, 2));
    for (int p = 0; p < NUM; p++) /* 2: also in the failed step; 7: has no entry in the table */
        CHECK_MSG(asked[p] == (p == 7   ? 3
                               : p == 2 ? 2
                                        : 1),
                  "%s: asked %d times", net[p].name, asked[p]);
}
TEST(optim, thaw_without_memory) { launch(1, 0, 0, 0, thaw_without_memory); }

/* Optimizers that end before their model leave nothing. */
static void destroy_early(job *j) {
    fsdp_adamw *second;
    fsdp_memory before, after;
    make_model(j);
    CALL(j->w, fsdp_model_memory(j->m.model, &before));
    int64_t live = j->heap->live, bytes = j->heap->live_bytes;
    CALL(j->w, lab_make_optim(&j->o, &lab_optim_kinds[j->kind], &j->m));
    CALL(j->w, fsdp_adamw_create(j->m.model, NULL, &second));
    lab_optim_destroy(&j->o);
    fsdp_adamw_destroy(second);
    fsdp_adamw_destroy(NULL);
    fsdp_sgd_destroy(NULL);
    CALL(j->w, fsdp_model_memory(j->m.model, &after));
    CHECK_EQ_INT(after.host_bytes, before.host_bytes);
    CHECK_EQ_INT(j->heap->live, live);
    CHECK_EQ_INT(j->heap->live_bytes, bytes);
    CALL(j->w, fsdp_adamw_create(j->m.model, NULL, &second)); /* the model destroys it */
    fsdp_model_destroy(j->m.model);
}
TEST_P(optim, destroy, lab_optim_kinds) {
    launch(1, (int)(row - lab_optim_kinds), 0, 0, destroy_early);
}

/* Two optimizers share a model: neither changes the other's parameters. */
static int even_ones(void *user, const fsdp_param_view *v) {
    return (v->ordinal % 2 == 0) == (user != NULL) ? 0 : -1;
}

static void two_optimizers(job *j) {
    static __thread double before[NUM][BIG], after[BIG];
    fsdp_adamw_desc a = fsdp_adamw_defaults();
    fsdp_sgd_desc s = fsdp_sgd_defaults();
    make_model(j);
    a.group = s.group = even_ones;
    a.user = &a;
    CALL(j->w, fsdp_adamw_create(j->m.model, &a, &j->o.adamw));
    CALL(j->w, fsdp_sgd_create(j->m.model, &s, &j->o.sgd));
    backward(j, 1);
    for (int turn = 0; turn < 2; turn++) {
        for (int p = 0; p < NUM; p++)
            CALL(j->w, fsdp_param_full(lab_unit_of(&j->m, p), j->m.index[p], before[p]));
        if (turn) CALL(j->w, fsdp_sgd_step(j->o.sgd, 0.5));
        else CALL(j->w, fsdp_adamw_step(j->o.adamw, 0.5));
        for (int p = 0; p < NUM; p++) {
            const fsdp_param_view view = lab_view_of(&j->m, p);
            CALL(j->w, fsdp_param_full(lab_unit_of(&j->m, p), j->m.index[p], after));
            int same = !memcmp(before[p], after, lab_nbytes_of(&the_net, p));
            int mine = (p % 2 == 0) == (turn == 0) && view.shard_grad &&
                       lab_numel_of(&the_net, p) > 0;
            CHECK_MSG(same == !mine, "%s in turn %d", net[p].name, turn);
        }
    }
}
TEST(optim, two_optimizers) { launch(2, 0, 0, 0, two_optimizers); }

/* A gradient is dropped: optimizers and clipping skip it, the other gradients stay, and later ones
   start at zero. Unreduced gradients stay. */
static void ones(const job *j, fsdp_unit *unit, int sync) {
    CALL(j->w, fsdp_set_requires_gradient_sync(j->m.model, NULL, sync));
    lab_forward(j->w, unit);
    CALL(j->w, fsdp_pre_backward(unit));
    for (int i = 0; i < 3; i++) {
        float *grad = (float *)fsdp_grad(unit, i);
        for (int k = 0; k < 12; k++) grad[k] += 1;
    }
    CALL(j->w, fsdp_post_backward(unit));
}
static void check_ones(const job *j, fsdp_unit *unit, float first, float second) {
    for (int i = 0; i < 3; i++) {
        const fsdp_param_view v = lab_view(j->w, unit, i);
        const float want = i == 1 ? second : first;
        W_CHECK((v.shard_grad != NULL) == (want != 0), "parameter %d", i);
        for (int64_t k = 0; v.shard_grad && k < v.numel; k++)
            W_CHECK(((const float *)v.shard_grad)[k] == want, "parameter %d: %g, expected %g", i,
                    (double)((const float *)v.shard_grad)[k], (double)want);
    }
}
static void grad_none(job *j) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc d[3] = {fsdp_mat("a", 4, 3), fsdp_vec("b", 12), fsdp_mat("c", 3, 4)};
    float before[12], after[12];
    double norm = 0;
    md.cpu_offload = j->offload;
    j->m.model = lab_model(j->w, &md);
    fsdp_unit *unit = lab_unit(j->w, j->m.model, NULL, d, 3);
    CALL(j->w, fsdp_adamw_create(j->m.model, NULL, &j->o.adamw));
    CALL(j->w, fsdp_set_grad_none(unit, 1)); /* it has no gradient, and the model no layout */
    ones(j, unit, 1);
    CHECK_STATUS(fsdp_set_grad_none(unit, 1), FSDP_ERR_INVALID_STATE);
    CHECK_MSG(strstr(fsdp_last_error(j->w), "set_grad_none"), "%s", fsdp_last_error(j->w));
    /* repeats the failure of that call */
    CHECK_STATUS(fsdp_finalize_backward(j->m.model), FSDP_ERR_INVALID_STATE);
    check_ones(j, unit, 1, 1);
    CHECK_STATUS(fsdp_set_grad_none(NULL, 0), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_set_grad_none(unit, -1), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_set_grad_none(unit, 3), FSDP_ERR_INVALID_ARG);
    check_ones(j, unit, 1, 1);
    CALL(j->w, fsdp_set_grad_none(unit, 1));
    CALL(j->w, fsdp_set_grad_none(unit, 1)); /* nothing is left to drop */
    check_ones(j, unit, 1, 0);
    CALL(j->w, fsdp_clip_grad_norm(j->m.model, 1e9, &norm));
    CHECK(fabs(norm - sqrt(24.0)) < 1e-12);
    CALL(j->w, fsdp_param_full(unit, 1, before));
    CALL(j->w, fsdp_adamw_step(j->o.adamw, 0.5));
    CALL(j->w, fsdp_param_full(unit, 1, after));
    CHECK_EQ_MEM(before, after, sizeof before);
    CALL(j->w, fsdp_param_full(unit, 0, after));
    CHECK(after[0] != 0);
    ones(j, unit, 1);
    CALL(j->w, fsdp_finalize_backward(j->m.model));
    check_ones(j, unit, 2, 1);
    ones(j, unit, 0);
    CALL(j->w, fsdp_finalize_backward(j->m.model));
    CALL(j->w, fsdp_set_grad_none(unit, 1));
    ones(j, unit, 1);
    CALL(j->w, fsdp_finalize_backward(j->m.model));
    check_ones(j, unit, 4, 2);
    CALL(j->w, fsdp_zero_grad(j->m.model));
    CALL(j->w, fsdp_set_grad_none(unit, 0));
    ones(j, unit, 1);
    CALL(j->w, fsdp_finalize_backward(j->m.model));
    check_ones(j, unit, 1, 1);
}
TEST(optim, grad_none) {
    static start more;
    for (more.offload = 0; more.offload < 2; more.offload++)
        for (int world = 1; world <= 3; world++)
            for (int lanes = 0; lanes < 3; lanes++)
                launch_as(world, 0, 0, lanes, &more, grad_none);
}

/* Adjacent spans without padding in between are one loop; all loops of a step are one op. */
static __thread int64_t loops, looped;
static void count_loop(fsdp_optim *o, const fsdpi_optim_span *r, double lr, fsdp_update *u) {
    loops++;
    looped += r->numel;
    fsdpi_adamw_fill(o, r, lr, u);
}

static void one_loop(job *j) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit *unit[3] = {NULL, NULL, NULL};
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    md.direct_min = 1;
    md.grad_dtype = j->grad_dtype;
    CALL(j->w, fsdp_model_create(j->w, &md, &j->m.model));
    for (int u = 0; u < 3; u++) { /* packed and direct parameters, whose order in memory differs */
        fsdp_param_desc d[4] = {fsdp_vec("b", 16), fsdp_mat("w", 32, 32), fsdp_mat("v", 16, 1),
                                fsdp_mat("x", 64, 16)};
        unit[u] = lab_unit(j->w, j->m.model, NULL, d, 4);
    }
    CALL(j->w, fsdp_adamw_create(j->m.model, NULL, &j->o.adamw));
    for (int step = 0; step < 2; step++) {
        for (int u = 0; u < 3; u++) lab_forward(j->w, unit[u]);
        for (int u = 2; u >= 0; u--) {
            CALL(j->w, fsdp_pre_backward(unit[u]));
            for (int i = 0; i < 4; i++)
                if (step == 0 || u != 1 || i != 1) CHECK(fsdp_grad(unit[u], i) != NULL);
            CALL(j->w, fsdp_post_backward(unit[u]));
        }
        CALL(j->w, fsdp_finalize_backward(j->m.model));
        loops = looped = 0;
        CALL(j->w, fsdp_model_counters(j->m.model, &before));
        CALL(j->w, fsdpi_optim_step(j->o.adamw, 0.1, "test", count_loop));
        CHECK_EQ_INT(looped, (3 * 2080 - (step ? 1024 : 0)) / j->world);
        CHECK_EQ_INT(loops, step ? 2 : 1);
        CALL(j->w, fsdp_model_counters(j->m.model, &after));
        CHECK_EQ_INT(after.calls[FSDP_OP_UPDATE] - before.calls[FSDP_OP_UPDATE], 1);
        CALL(j->w, fsdp_zero_grad(j->m.model));
    }
}
TEST(optim, one_loop) {
    static start more;
    for (int world = 1; world <= 2; world++) {
        more.grad_dtype = FSDP_DTYPE_KEEP;
        launch_as(world, 0, 0, 0, &more, one_loop);
        more.grad_dtype = FSDP_BF16;
        launch_as(world, 0, 0, 0, &more, one_loop);
    }
}

/* A gathered copy from before the step is not used after it. Nor does the step disturb a gather
   that is under way. */
static void gathered_before(job *j) {
    make_model(j);
    make_optim(j);
    for (int step = 0; step < 4; step++) {
        backward(j, step);
        expect(j, 0.1);
        for (int u = 0; u < UNITS; u++) {
            CALL(j->w, fsdp_unshard(j->m.unit[u]));
            if (step % 2) CALL(j->w, fsdp_wait(j->m.unit[u]));
        }
        CALL(j->w, fsdp_adamw_step(j->o.adamw, 0.1));
        CALL(j->w, fsdp_zero_grad(j->m.model));
        CALL(j->w, fsdp_set_grad_enabled(j->m.model, 0));
        for (int u = 0; u < UNITS; u++) {
            CALL(j->w, fsdp_pre_forward(j->m.unit[u]));
            for (int p = 0; p < NUM; p++)
                if (net[p].unit == u)
                    CHECK_EQ_MEM(lab_data(&j->m, p), j->full[p], lab_nbytes_of(&the_net, p));
            CALL(j->w, fsdp_post_forward(j->m.unit[u]));
        }
        CALL(j->w, fsdp_set_grad_enabled(j->m.model, 1));
    }
}
TEST(optim, gathered_before) {
    for (int world = 1; world <= 3; world++)
        for (int lanes = 0; lanes <= 2; lanes++) launch(world, 0, 0, lanes, gathered_before);
}

/* ---- refused --------------------------------------------------------------------------------- */

static int wrong_group(void *user, const fsdp_param_view *v) {
    return v->ordinal == 5 ? *(int *)user : 0;
}

static void refuse_descs(job *j) {
    static const double bad[] = {-0.5, -2, 1, 1.5};
    double not_numbers[2];
    fsdp_adamw *a = NULL;
    fsdp_sgd *s = NULL;
    not_numbers[0] = lab_from_bits(0x7FF0000000000000u),
    not_numbers[1] = lab_from_bits(0x7FF8000000000000u);
    make_model(j);
    int64_t live = j->heap->live;
    for (int i = 0; i < 6; i++) {
        double x = i < 4 ? bad[i] : not_numbers[i - 4];
        for (int field = 0; field < 6; field++) {
            fsdp_adamw_desc d = fsdp_adamw_defaults();
            d.num_groups = 1;
            double *to[] = {&d.beta1,
                            &d.beta2,
                            &d.eps,
                            &d.weight_decay,
                            &d.groups[0].lr_scale,
                            &d.groups[0].weight_decay};
            /* values of 1 and above are valid there */
            if (field > 1 && (i == 2 || i == 3)) continue;
            *to[field] = x;
            CHECK_STATUS(fsdp_adamw_create(j->m.model, &d, &a), FSDP_ERR_INVALID_ARG);
            CHECK(a == NULL && strstr(fsdp_last_error(j->w), "adamw_create: desc."));
        }
        for (int field = 0; field < 3 && i != 2 && i != 3; field++) {
            fsdp_sgd_desc d = fsdp_sgd_defaults();
            double *to[] = {&d.momentum, &d.dampening, &d.weight_decay};
            *to[field] = x;
            CHECK_STATUS(fsdp_sgd_create(j->m.model, &d, &s), FSDP_ERR_INVALID_ARG);
            CHECK(s == NULL);
        }
    }
    fsdp_adamw_desc d = fsdp_adamw_defaults();
    fsdp_sgd_desc e = fsdp_sgd_defaults();
    d.beta2 = d.eps = 0;
    REFUSED(j->w, fsdp_adamw_create(j->m.model, &d, &a), "[E938] adamw_create");
    d = fsdp_adamw_defaults();
    d.num_groups = 9;
    CHECK_STATUS(fsdp_adamw_create(j->m.model, &d, &a), FSDP_ERR_INVALID_ARG);
    d.num_groups = -1;
    CHECK_STATUS(fsdp_adamw_create(j->m.model, &d, &a), FSDP_ERR_INVALID_ARG);
    d.num_groups = 2, d.start_canary = 1;
    CHECK_STATUS(fsdp_adamw_create(j->m.model, &d, &a), FSDP_ERR_INVALID_ARG);
    d.start_canary = 0, d.end_canary = 1;
    CHECK_STATUS(fsdp_adamw_create(j->m.model, &d, &a), FSDP_ERR_INVALID_ARG);
    d.end_canary = 0, d.size = 4000;
    CHECK_STATUS(fsdp_adamw_create(j->m.model, &d, &a), FSDP_ERR_INVALID_ARG);
    int group = 2;
    d.size = 0, d.group = wrong_group, d.user = &group;
    CHECK_STATUS(fsdp_adamw_create(j->m.model, &d, &a), FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(j->w), "'b.w'"));
    e.nesterov = 1;
    CHECK_STATUS(fsdp_sgd_create(j->m.model, &e, &s), FSDP_ERR_INVALID_ARG);
    e.momentum = 0.9, e.dampening = 0.1;
    CHECK_STATUS(fsdp_sgd_create(j->m.model, &e, &s), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_adamw_create(NULL, NULL, &a), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_adamw_create(j->m.model, NULL, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_sgd_create(NULL, NULL, &s), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_sgd_create(j->m.model, NULL, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_adamw_step(NULL, 0.1), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_sgd_step(NULL, 0.1), FSDP_ERR_INVALID_ARG);
    CHECK(fsdp_adamw_nbytes(NULL) == 0 && fsdp_sgd_nbytes(NULL) == 0);
    CHECK(a == NULL && s == NULL);
    CHECK_EQ_INT(j->heap->live, live);
    fsdp_optim_state state;
    group = 1;
    CALL(j->w, fsdp_adamw_create(j->m.model, &d, &a));
    CHECK_STATUS(fsdp_adamw_state(a, NUM, &state), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_adamw_state(a, -1, &state), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_adamw_state(a, 0, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_adamw_state(NULL, 0, &state), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_sgd_state(NULL, 0, &state), FSDP_ERR_INVALID_ARG);
}
/* A desc or group that was zeroed and partly filled in is not mistaken for one with defaults. */
static void refuse_zeroed(job *j) {
    static const fsdp_optim_group no_rate = {0, 0.1, 0, 0};
    fsdp_adamw_desc d = FSDP_ZERO;
    fsdp_sgd_desc e = FSDP_ZERO;
    fsdp_adamw *a = NULL;
    fsdp_sgd *s = NULL;
    make_model(j);
    REFUSED(j->w, fsdp_adamw_create(j->m.model, &d, &a), "begin with fsdp_adamw_defaults()");
    d.eps = 1e-8, d.beta1 = 0.9, d.beta2 = 0.95, d.weight_decay = 0.1;
    REFUSED(j->w, fsdp_adamw_create(j->m.model, &d, &a), "begin with fsdp_adamw_defaults()");
    e.momentum = 0.9;
    REFUSED(j->w, fsdp_sgd_create(j->m.model, &e, &s), "begin with fsdp_sgd_defaults()");
    d = fsdp_adamw_defaults(), e = fsdp_sgd_defaults();
    d.num_groups = e.num_groups = 2;
    d.groups[1] = e.groups[0] = no_rate;
    REFUSED(j->w, fsdp_adamw_create(j->m.model, &d, &a), "[E922] adamw_create: desc.groups[1]");
    REFUSED(j->w, fsdp_sgd_create(j->m.model, &e, &s), "[E922] sgd_create: desc.groups[0]");
    CHECK(a == NULL && s == NULL);
    d.groups[1] = d.groups[0]; /* a copy of a group with defaults */
    d.groups[1].lr_scale = 0;  /* set on purpose */
    CALL(j->w, fsdp_adamw_create(j->m.model, &d, &a));
}
/* The defaults are PyTorch's, and a 0 set by the caller is a 0: without decay only the gradient
   changes a parameter, so that a parameter with gradient 0 stays. */
static void zero_is_zero(job *j) {
    fsdp_adamw_desc d = fsdp_adamw_defaults();
    CHECK(lab_bits(d.beta1) == lab_bits(0.9) && lab_bits(d.beta2) == lab_bits(0.999));
    CHECK(lab_bits(d.eps) == lab_bits(1e-8) && lab_bits(d.weight_decay) == lab_bits(0.01));
    make_model(j);
    for (int decays = 0; decays < 2; decays++) {
        fsdp_param_view v;
        d.weight_decay = decays ? 0.5 : 0;
        CALL(j->w, fsdp_adamw_create(j->m.model, &d, &j->o.adamw));
        backward(j, 1);
        CALL(j->w, fsdp_param_at(j->m.model, 0, &v));
        CHECK(v.shard_grad && v.numel);
        for (int64_t i = 0; i < v.numel; i++) lab_put(v.shard_grad, v.grad_dtype, i, 0);
        double was = lab_get(v.shard, v.dtype, 0);
        CHECK(was < 0 || was > 0);
        CALL(j->w, fsdp_adamw_step(j->o.adamw, 0.25));
        CHECK((lab_bits(lab_get(v.shard, v.dtype, 0)) == lab_bits(was)) == !decays);
        CALL(j->w, fsdp_zero_grad(j->m.model));
        fsdp_adamw_destroy(j->o.adamw);
    }
    j->o.adamw = NULL;
}
TEST(optim, zero_is_zero) { launch(1, 0, 0, 0, zero_is_zero); }

TEST(optim, create_refuses) { launch(1, 0, 0, 0, refuse_descs); }
TEST(optim, zeroed_descs_are_refused) { launch(1, 0, 0, 0, refuse_zeroed); }

static void expect_unchanged(job *j) {
    for (int p = 0; p < NUM; p++) {
        fsdp_param_view view;
        fsdp_optim_state s;
        CHECK_OK(fsdp_param_view_get(lab_unit_of(&j->m, p), j->m.index[p], &view));
        for (int64_t k = 0; k < view.numel; k++)
            CHECK(lab_bits(lab_get(view.data, net[p].dtype, k)) ==
                  lab_bits(lab_get(j->full[p], net[p].dtype, fsdp_view_index(&view, k))));
        CHECK_OK(fsdp_adamw_state(j->o.adamw, p, &s));
        CHECK(!s.step || *s.step == 0);
    }
}

static void refuse_steps(job *j) {
    make_model(j);
    CALL(j->w, lab_make_optim(&j->o, &lab_optim_kinds[j->kind], &j->m));
    CHECK_OK(fsdp_adamw_step(j->o.adamw, 0.1)); /* no gradients yet: nothing to do */
    expect_unchanged(j);
    backward(j, 1);
    CHECK_STATUS(fsdp_adamw_step(j->o.adamw, -0.1), FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(j->w), "adamw_step: lr is -0.1"));
    CHECK_STATUS(fsdp_adamw_step(j->o.adamw, lab_from_bits(0x7FF0000000000000u)),
                 FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_adamw_step(j->o.adamw, lab_from_bits(0x7FF8000000000000u)),
                 FSDP_ERR_INVALID_ARG);
    expect_unchanged(j);
    CALL(j->w, fsdp_pre_forward(j->m.unit[1]));
    CHECK_STATUS(fsdp_adamw_step(j->o.adamw, 0.1), FSDP_ERR_INVALID_STATE);
    expect_unchanged(j);
    CALL(j->w, fsdp_post_forward(j->m.unit[1]));
    lab_backward(j->w, j->m.unit[1]);
    CHECK_STATUS(fsdp_adamw_step(j->o.adamw, 0.1), FSDP_ERR_INVALID_STATE); /* without finalize */
    expect_unchanged(j);
    CALL(j->w, fsdp_finalize_backward(j->m.model));
    CALL(j->w, fsdp_barrier(j->w));
    if (j->rank == 0) fsdp_abort(j->w, "a test");
    while (!fsdpi_failed(j->w)) (void)fsdp_barrier(j->w);
    CHECK_STATUS(fsdp_adamw_step(j->o.adamw, 0.1), FSDP_ERR_ABORTED);
}
TEST(optim, step_refuses) {
    launch(1, 0, 0, 0, refuse_steps);
    launch(2, 0, 0, 0, refuse_steps);
    launch(2, 0, 1, 1, refuse_steps);
}

/* Each allocation of create fails once: it returns an error and leaves nothing; then it succeeds.
   */
static void out_of_memory(job *j) {
    make_model(j);
    int64_t live = j->heap->live, n = 0;
    fsdp_memory before, after;
    CALL(j->w, fsdp_model_memory(j->m.model, &before));
    for (;; n++) {
        fsdp_adamw *a = NULL;
        w_fail(j->heap, n);
        fsdp_status status = fsdp_adamw_create(j->m.model, NULL, &a);
        w_fail(j->heap, -1);
        if (!status) break;
        CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
        CHECK(a == NULL && j->heap->live == live);
        CALL(j->w, fsdp_model_memory(j->m.model, &after));
        CHECK_EQ_INT(after.host_bytes, before.host_bytes);
    }
    CHECK_EQ_INT(n, 3); /* table, state, and the model's entry for it */
}
TEST(optim, out_of_memory) { launch(1, 0, 0, 0, out_of_memory); }

/* ---- clip_grad_norm against PyTorch's numbers ------------------------------------------------ */

enum { TENSORS = 256 };
typedef struct {
    double p, max_norm, total;
    int count;
    int64_t numel[TENSORS];
    uint64_t seed[TENSORS];
    double *result[TENSORS];
} clip;

/* Every rank has equal gradients, so that their mean is exact for 1, 2 and 4 ranks. */
static void clip_on_rank(lab_rank *r) {
    const clip *c = (const clip *)r->arg;
    fsdp_param_desc p[TENSORS];
    fsdp_world *w = r->w;
    fsdp_model *model = NULL;
    fsdp_unit *unit = NULL;
    fsdp_clip_desc cd = FSDP_ZERO;
    double norm;
    CALL(w, fsdp_model_create(w, NULL, &model));
    for (int i = 0; i < c->count; i++) p[i] = fsdp_vec(NULL, c->numel[i]);
    unit = lab_unit(w, model, NULL, p, c->count);
    lab_forward(w, unit);
    CALL(w, fsdp_pre_backward(unit));
    for (int i = 0; i < c->count; i++)
        golden_fill((float *)fsdp_grad(unit, i), c->seed[i], c->numel[i], 2);
    CALL(w, fsdp_post_backward(unit));
    CALL(w, fsdp_finalize_backward(model));
    cd.max_norm = c->max_norm, cd.norm_type = c->p;
    CALL(w, fsdp_clip_grads(model, &cd, &norm));
    CHECK_NEAR(norm, c->total, 4e-6 + 4e-6 * c->total);
    for (int i = 0; i < c->count; i++) {
        fsdp_param_view v = lab_view(w, unit, i);
        for (int64_t k = 0; k < v.numel; k++) {
            double want = c->result[i][fsdp_view_index(&v, k)];
            CHECK_NEAR((double)((float *)v.shard_grad)[k], want, 4e-6 + 4e-6 * fabs(want));
        }
    }
}

TEST(golden_optim, clip_grad_norm, NO(VALGRIND)) {
    static clip c;
    golden g;
    int cases = 0;
    GOLDEN_OPEN(&g, "optim.txt", "optim");
    while (golden_case(&g)) {
        memset(&c, 0, sizeof c);
        while (golden_line(&g)) {
            if (golden_is(&g, "clip")) {
                c.p = golden_num(&g), c.max_norm = golden_num(&g);
                CHECK(golden_int(&g) <= TENSORS);
            } else if (golden_is(&g, "tensor") && c.p > 0) {
                CHECK(c.count < TENSORS);
                c.numel[c.count] = golden_int(&g);
                c.seed[c.count++] = golden_seed(&g);
            } else if (golden_is(&g, "total")) {
                c.total = golden_num(&g);
            } else if (golden_is(&g, "result")) {
                int64_t i = golden_int(&g);
                CHECK(i >= 0 && i < c.count);
                c.result[i] = (double *)calloc((size_t)c.numel[i] + 1, sizeof **c.result);
                golden_nums(&g, c.numel[i], c.result[i]);
            }
        }
        cases += c.p > 0;
        for (int world = 1; world <= 4 && c.p > 0; world *= 2)
            lab_run(world, NULL, clip_on_rank, &c);
        for (int i = 0; i < c.count; i++) free(c.result[i]);
    }
    GOLDEN_CLOSE(&g);
    CHECK(cases > 0 || strcmp(golden_dir(), GOLDEN_DIR)); /* other data may lack them */
    h_message("%d cases on 1, 2 and 4 ranks", cases);
}
