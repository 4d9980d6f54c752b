/* test_rounding.c - stochastic rounding of bf16 parameters by AdamW and SGD: values that never
   change, the mean, equal bits on any mesh, with a plan and from a checkpoint; and a training that
   stalls without it.

   SPDX-License-Identifier: MIT */
#define TAGS BITS | NCCL
#include "harness.h"
#include <math.h> /* sqrt, fabs */
#include "fsdp_checkpoint.h"
#include "fsdp_plan.h"
#include "lab_net.h"

static const struct {
    const char *name;
    int sgd;
} kinds[] = {{"adamw", 0}, {"sgd", 1}};

typedef struct {
    fsdp_adamw *adamw;
    fsdp_sgd *sgd;
} optim;

static optim make_optim(fsdp_world *w, fsdp_model *m, int sgd, int rounds, uint64_t seed) {
    fsdp_adamw_desc a = fsdp_adamw_defaults();
    fsdp_sgd_desc s = fsdp_sgd_defaults();
    optim o = {NULL, NULL};
    a.stochastic_rounding = s.stochastic_rounding = rounds;
    a.seed = s.seed = seed;
    if (sgd) CALL(w, fsdp_sgd_create(m, &s, &o.sgd));
    else CALL(w, fsdp_adamw_create(m, &a, &o.adamw));
    return o;
}
static void step_optim(fsdp_world *w, const optim *o, double lr) {
    if (o->sgd) CALL(w, fsdp_sgd_step(o->sgd, lr));
    else CALL(w, fsdp_adamw_step(o->adamw, lr));
}

/* ---- one vector on one rank: p - lr * g, exactly computed ------------------------------------ */

typedef struct {
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *u;
    int64_t numel;
} vector;

/* Gradients are f32, so that a result is any f32 number. */
static vector make_vector(fsdp_world *w, int64_t numel) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc p = fsdp_vec("v", numel);
    vector v = {w, NULL, NULL, numel};
    p.dtype = FSDP_BF16, md.grad_dtype = FSDP_F32;
    v.m = lab_model(w, &md);
    v.u = lab_unit(w, v.m, NULL, &p, 1);
    return v;
}

/* Computes a step of SGD with lr 1: p - g in f32, rounded with this seed. g has few bits. */
static void descend(vector *v, const uint16_t *p, const uint16_t *g, uint64_t seed, uint16_t *out) {
    CALL(v->w, fsdp_param_load(v->u, 0, p));
    optim o = make_optim(v->w, v->m, 1, 1, seed);
    lab_forward(v->w, v->u);
    CALL(v->w, fsdp_pre_backward(v->u));
    memcpy(fsdp_grad(v->u, 0), g, (size_t)v->numel * sizeof *g);
    CALL(v->w, fsdp_post_backward(v->u));
    CALL(v->w, fsdp_finalize_backward(v->m));
    step_optim(v->w, &o, 1);
    CALL(v->w, fsdp_zero_grad(v->m));
    CALL(v->w, fsdp_param_full(v->u, 0, out));
    fsdp_sgd_destroy(o.sgd);
}

static float of_bf16(uint16_t h) { return lab_from_bits32((uint32_t)h << 16); }

/* Every bf16 number minus zero; inf - inf; and a sixteenth of a unit beyond the largest number. */
static void what_stays(lab_rank *r) {
    enum { ALL = 65536, MORE = ALL + 512 };
    static uint16_t p[MORE], g[MORE], out[MORE];
    volatile float tiny = lab_from_bits32(0x10000), zero = 0;
    const int flushes = lab_bits32(tiny + zero) == 0; /* gcc -Ofast has linked the program */
    vector v = make_vector(r->w, MORE);
    for (int i = 0; i < MORE; i++) {
        p[i] = (uint16_t)(i < ALL ? i : i % 2 ? 0x7F7F : 0x7F80);
        g[i] = (uint16_t)(i < ALL ? 0 : i % 2 ? 0xF97F : 0x7F80); /* about -2^116; inf */
    }
    for (uint64_t seed = 0; seed < 8; seed++) {
        descend(&v, p, g, seed, out);
        for (int i = 0; i < MORE; i++) {
            int nan = i < ALL ? (i & 0x7FFF) > 0x7F80 : !(i % 2);
            if (flushes && (i & 0x7FFF) < 0x80) continue;
            if (nan) W_CHECK((out[i] & 0x7FFF) > 0x7F80, "%d: 0x%04x is no NaN", i, out[i]);
            else W_CHECK(out[i] == p[i], "%d: 0x%04x became 0x%04x", i, p[i], out[i]);
        }
    }
}
TEST(rounding, what_stays) { lab_run(1, NULL, what_stays, NULL); }

/* Rounds to one of the two neighbours, with mean p - g: over all seeds of an element, over all
   elements of a seed, and independently in adjacent pairs. */
static void mean(lab_rank *r) {
    enum { N = 4096, SEEDS = 128, CLASSES = 32 };
    static uint16_t p[N], g[N], out[N];
    static int ups[N], ups_of[SEEDS][CLASSES], pairs[CLASSES];
    vector v = make_vector(r->w, N);
    double worst = 0;
    for (int i = 0; i < N; i++) { /* 1 and more, or less than -2, of which f units are subtracted */
        p[i] = (uint16_t)(i & CLASSES ? 0xC011 : 0x3F93);
        float unit = i & CLASSES ? -1.0f / 64 : 1.0f / 128, f = (float)(i % CLASSES) / CLASSES;
        float x = -f * unit;
        g[i] = (uint16_t)(lab_bits32(x) >> 16);
        CHECK(of_bf16(g[i]) == x);
    }
    for (int s = 0; s < SEEDS; s++) {
        descend(&v, p, g, (uint64_t)s * 977, out);
        for (int i = 0; i < N; i++) {
            int up = out[i] - p[i];
            W_CHECK(up == 0 || up == 1, "%d: 0x%04x became 0x%04x", i, p[i], out[i]);
            ups[i] += up, ups_of[s][i % CLASSES] += up;
        }
        for (int i = 0; i + CLASSES < N; i++)
            pairs[i % CLASSES] += out[i] != p[i] && out[i + CLASSES] != p[i + CLASSES];
    }
    for (int i = 0; i < N; i++) {
        double f = (double)(i % CLASSES) / CLASSES, sigma = sqrt(SEEDS * f * (1 - f));
        double off = fabs(ups[i] - SEEDS * f);
        CHECK_MSG(off <= 5.5 * sigma, "element %d: %d of %d, expected %g", i, ups[i], SEEDS,
                  SEEDS * f);
    }
    for (int c = 0; c < CLASSES; c++) {
        double f = (double)c / CLASSES, n = N / CLASSES, all = 0;
        for (int s = 0; s < SEEDS; s++) {
            all += ups_of[s][c];
            CHECK_MSG(fabs(ups_of[s][c] - n * f) <= 5.5 * sqrt(n * f * (1 - f)),
                      "seed %d: %d of %g up, expected %g", s, ups_of[s][c], n, n * f);
        }
        double sigma = sqrt(SEEDS * n * f * (1 - f)), off = fabs(all - SEEDS * n * f);
        CHECK_MSG(off <= 4.5 * sigma, "%g of %g up, expected %g", all, SEEDS * n, SEEDS * n * f);
        if (sigma > 0 && off / sigma > worst) worst = off / sigma;
        double both = f * f, tries = (N - CLASSES) / CLASSES * SEEDS;
        CHECK_MSG(fabs(pairs[c] - tries * both) <= 8 * sqrt(tries * both * (1 - both)),
                  "%d of %g pairs, expected %g", pairs[c], tries, tries * both);
    }
    h_message("%d numbers, the mean is at most %.2f standard deviations off", N * SEEDS, worst);
}
TEST(rounding, mean) { lab_run(1, NULL, mean, NULL); }

/* Parameters and steps draw independent numbers: if each of two parameters, or of two steps, rounds
   half of the elements up, a quarter goes up in both. */
static void apart(lab_rank *r) {
    enum { N = 1024 };
    fsdp_param_desc p[2] = {fsdp_vec("a", N), fsdp_vec("b", N)};
    uint16_t full[2][N];
    fsdp_model *m = lab_model(r->w, NULL);
    /* ups: of a, up in steps 0 and k; both: of a and b in the first step */
    int ups[4] = {0, 0, 0, 0}, both = 0;
    p[0].dtype = p[1].dtype = FSDP_BF16;
    fsdp_unit *u = lab_unit(r->w, m, NULL, p, 2);
    optim o = make_optim(r->w, m, 1, 1, 5);
    for (int step = 0; step < 4; step++) {
        for (int k = 0; k < 2; k++) {
            for (int i = 0; i < N; i++) full[k][i] = 0x3F80;
            CALL(r->w, fsdp_param_load(u, k, full[k]));
        }
        lab_forward(r->w, u);
        CALL(r->w, fsdp_pre_backward(u));
        for (int k = 0; k < 2; k++)
            for (int i = 0; i < N; i++) lab_put(fsdp_grad(u, k), FSDP_BF16, i, -1.0 / 256);
        CALL(r->w, fsdp_post_backward(u));
        CALL(r->w, fsdp_finalize_backward(m));
        step_optim(r->w, &o, 1);
        CALL(r->w, fsdp_zero_grad(m));
        for (int k = 0; k < 2; k++) CALL(r->w, fsdp_param_full(u, k, full[k]));
        for (int i = 0; i < N; i++) {
            static int first[N];
            if (step == 0) first[i] = full[0][i] != 0x3F80;
            ups[step] += first[i] && full[0][i] != 0x3F80;
            both += step == 0 && full[0][i] != 0x3F80 && full[1][i] != 0x3F80;
        }
    }
    double sigma = sqrt(N * 0.25 * 0.75);
    CHECK_MSG(fabs(both - N * 0.25) < 5 * sigma, "%d of %d go up in both", both, (int)N);
    for (int step = 1; step < 4; step++)
        CHECK_MSG(fabs(ups[step] - N * 0.25) < 5 * sigma, "%d of %d again in step %d", ups[step],
                  (int)N, step);
}
TEST(rounding, apart) { lab_run(1, NULL, apart, NULL); }

/* The random numbers themselves: a training that continues with a later version of the library gets
   equal ones. */
static void known(lab_rank *r) {
    static const uint64_t want[2] = {0xC1F5A5E7766CF1D6u, 0x19FC2E06BFFCE4BCu};
    uint16_t p[64], g[64], out[64];
    vector v = make_vector(r->w, 64);
    for (int i = 0; i < 64; i++) p[i] = 0x3F80, g[i] = 0xBB80; /* 1, plus half a unit */
    for (int s = 0; s < 2; s++) {
        uint64_t ups = 0;
        descend(&v, p, g, s ? 0x123456789ABCDEFu : 0, out);
        for (int i = 0; i < 64; i++) ups |= (uint64_t)(out[i] != p[i]) << i;
        CHECK_MSG(ups == want[s], "0x%016llx", (unsigned long long)ups);
    }
}
TEST(rounding, known) { lab_run(1, NULL, known, NULL); }

/* ---- models ---------------------------------------------------------------------------------- */

enum { NUM = 9, UNITS = 6, STEPS = 8, HALF = 4, BIG = 600 };

/* Uneven parameters, empty on some ranks, sharded by columns or in the middle dim, longer than a
   block of the loops. */
static const lab_param rows[NUM] = {
    {0, "a.w", FSDP_BF16, 0, 0, 2, 0, {7, 5}},     {0, "a.b", FSDP_BF16, 0, 0, 1, 0, {3}},
    {1, "b.f", FSDP_F32, 0, 0, 1, 0, {9}},         {2, "c.k", FSDP_BF16, 0, 0, 2, 1, {6, 10}},
    {3, "d.w", FSDP_BF16, 0, 0, 2, 0, {100, 6}},   {3, "d.x", FSDP_BF16, 0, 1, 1, 0, {5}},
    {3, "d.v", FSDP_BF16, 0, 0, 3, 1, {3, 5, 4}},  {4, "e.h", FSDP_F16, 0, 0, 1, 0, {11}},
    {5, "f.w", FSDP_BF16, 0, 0, 3, 2, {2, 33, 7}},
};
static const lab_net net = {rows, NUM, UNITS};

typedef struct {
    int sgd, replicas, lanes, planned, nearest; /* replicas 0: no mesh */
    uint64_t seed;
    int64_t direct_min;
    int from, to; /* steps; from: step of a checkpoint */
    char dir[400];
} config;

typedef struct { double full[NUM][BIG]; } result;
static result *the_result;

static void backward(lab_built *m, int step) {
    lab_forwards(m);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(m->w, fsdp_pre_backward(m->unit[u]));
        for (int p = 0; p < NUM; p++) {
            if (rows[p].unit != u || m->frozen[p]) continue;
            void *g = lab_grad(m, p);
            for (int64_t i = 0; fsdp_rank(m->w) == 0 && i < lab_numel_of(&net, p); i++)
                lab_put(g, rows[p].dtype, i, lab_value(100 * (step + 1) + p, i));
        }
        CALL(m->w, fsdp_post_backward(m->unit[u]));
    }
    CALL(m->w, fsdp_finalize_backward(m->model));
}

/* Only rank 0 has gradients, which are summed: all ranks together do what one rank does. */
static void train(lab_rank *r) {
    const config *c = (const config *)r->arg;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_checkpoint *ck = NULL;
    fsdp_plan *plan = NULL;
    lab_built m = FSDP_ZERO;
    char path[FSDP_CHECKPOINT_PATH];
    int64_t step = 0;
    md.direct_min = c->direct_min;
    if (c->replicas) md.mesh = lab_hsdp(r->w, c->replicas, r->size / c->replicas);
    lab_build(&m, &net, r->w, &md);
    CALL(r->w, fsdp_init_params(m.model, lab_fill, NULL));
    CALL(r->w, fsdp_set_gradient_divide_factor(m.model, NULL, 1));
    optim o = make_optim(r->w, m.model, c->sgd, !c->nearest, c->seed);
    if (c->planned) CALL(r->w, fsdp_plan_create(m.model, NULL, &plan));
    if (c->dir[0]) CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &ck));
    if (c->from) {
        CALL(r->w, fsdp_checkpoint_find(ck, c->dir, -1, path, sizeof path, &step));
        CALL(r->w, fsdp_checkpoint_load(ck, path, NULL));
    }
    CHECK_EQ_INT(step, c->from);
    for (; step < c->to; step++) {
        backward(&m, (int)step);
        step_optim(r->w, &o, 0.02);
        CALL(r->w, fsdp_zero_grad(m.model));
    }
    if (ck && !c->from) CALL(r->w, fsdp_checkpoint_save(ck, c->dir, step));
    if (plan) CHECK_EQ_INT(fsdp_plan_state(plan), FSDP_PLAN_REPLAYING);
    for (int p = 0; p < NUM; p++)
        CALL(r->w, fsdp_param_full(lab_unit_of(&m, p), m.index[p],
                                   r->rank ? NULL : the_result->full[p]));
}

static result *run(int world, const config *c) {
    lab_how how = FSDP_ZERO;
    how.job = "rounding", how.lanes = c->lanes;
    the_result = (result *)lab_shared(sizeof *the_result);
    lab_run(world, &how, train, (void *)(uintptr_t)c);
    return the_result;
}

static void same(const result *a, const result *b, const char *what) {
    for (int p = 0; p < NUM; p++)
        CHECK_MSG(!memcmp(a->full[p], b->full[p], lab_nbytes_of(&net, p)), "%s: %s differs", what,
                  rows[p].name);
}
static int differs(const result *a, const result *b, int p) {
    return memcmp(a->full[p], b->full[p], lab_nbytes_of(&net, p)) != 0;
}

/* Another seed, step or parameter gives other bits; other dtypes do not change. */
static void check_effect(const config *like, const result *want) {
    config c = *like;
    c.nearest = 1;
    const result *nearest = run(1, &c);
    c.nearest = 0, c.seed++;
    const result *other = run(1, &c);
    for (int p = 0; p < NUM; p++) {
        int rounds = rows[p].dtype == FSDP_BF16 && !rows[p].frozen && lab_numel_of(&net, p) > 9;
        if (rounds) CHECK(differs(want, nearest, p) && differs(want, other, p));
        else if (rows[p].dtype != FSDP_BF16) CHECK(!differs(want, nearest, p));
    }
}

TEST_P(rounding, ranks, kinds) {
    static const int64_t direct[] = {0, 1, FSDP_DIRECT_NEVER};
    config c = FSDP_ZERO;
    int runs = 1;
    c.sgd = row->sgd, c.seed = 7, c.to = STEPS;
    const result *want = run(1, &c);
    for (int world = 1; world <= 4; world++)
        for (int d = 0; d < 3; d++, runs++) {
            c.direct_min = direct[d], c.lanes = d == 1;
            same(want, run(world, &c), "ranks");
        }
    c.direct_min = 0, c.lanes = 0;
    for (int world = 2; world <= 4; world += 2, runs++) {
        c.replicas = 2;
        same(want, run(world, &c), "replicas");
    }
    c.replicas = 0;
    check_effect(&c, want);
    h_message("%s: %d runs", row->name, runs);
}

TEST_P(rounding, planned, kinds) {
    config c = FSDP_ZERO;
    c.sgd = row->sgd, c.seed = 7, c.to = STEPS;
    const result *want = run(1, &c);
    c.planned = 1;
    for (int world = 1; world <= 3; world++) same(want, run(world, &c), "planned");
}

TEST_P(rounding, resumed, kinds) {
    config c = FSDP_ZERO;
    c.sgd = row->sgd, c.seed = 7, c.to = STEPS;
    const result *want = run(1, &c);
    snprintf(c.dir, sizeof c.dir, "%s", h_tmpdir());
    c.to = HALF;
    (void)run(3, &c);
    c.from = HALF, c.to = STEPS;
    same(want, run(2, &c), "resumed by 2 ranks");
    same(want, run(4, &c), "resumed by 4 ranks");
    c.replicas = 2;
    same(want, run(4, &c), "resumed by replicas");
}

/* ---- ranks with different settings ----------------------------------------------------------- */

static void disagree(lab_rank *r) {
    int other = *(const int *)r->arg; /* 1: another seed; 0: whether to round stochastically */
    fsdp_model_desc md = FSDP_ZERO;
    lab_built m = FSDP_ZERO;
    lab_build(&m, &net, r->w, &md);
    (void)make_optim(r->w, m.model, 1, other || r->rank, other ? (uint64_t)r->rank : 0);
    fsdp_status status = FSDP_OK;
    for (int u = 0; u < UNITS && !status; u++) status = fsdp_pre_forward(m.unit[u]);
    CHECK_STATUS(status, FSDP_ERR_MISMATCH);
    CHECK_MSG(strstr(fsdp_last_error(r->w), "optimizer"), "%s", fsdp_last_error(r->w));
}
TEST(rounding, disagree) {
    for (int other = 0; other < 2; other++) lab_run(2, NULL, disagree, &other);
}

/* ---- a training that needs stochastic rounding ----------------------------------------------- */

/* w goes from 1 to a half in steps that are smaller than half a unit of bf16. */
static void learn(lab_rank *r) {
    enum { N = 67, MANY = 900 };
    int sgd = *(const int *)r->arg;
    uint16_t full[N];
    double loss[2] = {0, 0};
    for (int rounds = 0; rounds < 2; rounds++) {
        vector v = make_vector(r->w, N);
        for (int i = 0; i < N; i++) full[i] = 0x3F80;
        CALL(r->w, fsdp_param_load(v.u, 0, full));
        optim o = make_optim(r->w, v.m, sgd, rounds, 3);
        for (int step = 0; step < MANY; step++) {
            lab_forward(r->w, v.u);
            CALL(r->w, fsdp_pre_backward(v.u));
            const uint16_t *w = (const uint16_t *)fsdp_data(v.u, 0);
            for (int i = 0; i < N; i++)
                lab_put(fsdp_grad(v.u, 0), FSDP_BF16, i, (double)of_bf16(w[i]) - 0.5);
            CALL(r->w, fsdp_post_backward(v.u));
            CALL(r->w, fsdp_finalize_backward(v.m));
            step_optim(r->w, &o, sgd ? 1e-3 : 3e-4);
            CALL(r->w, fsdp_zero_grad(v.m));
        }
        CALL(r->w, fsdp_param_full(v.u, 0, full));
        for (int i = 0; i < N; i++) {
            double off = (double)of_bf16(full[i]) - 0.5;
            loss[rounds] += off * off / N;
            if (!rounds) CHECK_EQ_INT(full[i], 0x3F80);
        }
    }
    CHECK_MSG(loss[1] < 0.5 * loss[0], "%g, and to nearest %g", loss[1], loss[0]);
    if (r->rank == 0)
        h_message("loss after %d steps: to nearest %.3g, stochastically %.3g", (int)MANY, loss[0],
                  loss[1]);
}
TEST_P(rounding, learns, kinds) {
    int sgd = row->sgd;
    lab_run(2, NULL, learn, &sgd);
}
