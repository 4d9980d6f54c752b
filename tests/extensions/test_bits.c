/* test_bits.c - recorded bits of sums, norms and optimizers: fails if a compiler, its flags or a
   machine produces other bits. The inputs are multiples of 2^-20, so that this file itself computes
   exactly.

   SPDX-License-Identifier: MIT */
#define TAGS BITS | GLOO
#include "harness.h"
#include "fsdp_muon.h"
#include "fsdp_optim.h"
#include "lab_net.h"

enum { RANKS = 4, UNITS = 3, ROWS = 24, COLUMNS = 40, STEPS = 30 };

static float draw(uint64_t a, uint64_t b) {
    return (float)(int32_t)(lab_hash(a, b, 0, 0) >> 44) / 1048576.0f - 0.5f;
}
static void put(void *to, fsdp_dtype dtype, int64_t i, float x) {
    CHECK_OK(fsdp_convert(lab_at(to, dtype, i), dtype, &x, FSDP_F32, 1));
}

static void recorded(uint64_t hash, uint64_t want, const char *what) {
    CHECK_MSG(hash == want, "%s: the hash is 0x%016llx, recorded with gcc -O2 is 0x%016llx", what,
              (unsigned long long)hash, (unsigned long long)want);
}

/* ---- sums ------------------------------------------------------------------------------------ */

static const struct sum_of {
    const char *name;
    fsdp_dtype dtype;
    uint64_t hash;
} sums[] = {{"f32", FSDP_F32, 0xba965b06fbbd1e55},
            {"f64", FSDP_F64, 0x0eb3c503c1a08b9c},
            {"bf16", FSDP_BF16, 0xa3781d5c964c1434},
            {"f16", FSDP_F16, 0xd8f41f737e78ed3c}};

static void sum(lab_rank *r) {
    enum { COUNT = 1003 };
    const struct sum_of *s = (const struct sum_of *)r->arg;
    uint64_t hash = 0;
    double x[COUNT], scale = r->rank % 2 ? 64 : 1; /* values fit any of these dtypes */
    for (int i = 0; i < COUNT; i++)
        put(x, s->dtype, i, draw((uint64_t)r->rank, (uint64_t)i) * (float)scale);
    CALL(r->w, fsdp_all_reduce(r->w, NULL, x, COUNT, s->dtype, FSDP_SUM));
    lab_fold(&hash, x, COUNT * fsdp_dtype_size(s->dtype));
    recorded(hash, s->hash, s->name);
}
TEST_P(bits, sums, sums) { lab_run(RANKS, NULL, sum, (void *)(uintptr_t)row); }

/* ---- training -------------------------------------------------------------------------------- */

enum { ADAMW, SGD, MUON };
static const struct training {
    const char *name;
    int optimizer, stochastic;
    fsdp_dtype dtype, param, reduce;
    uint64_t hash;
} trainings[] = {
    {"adamw_f32", ADAMW, 0, FSDP_F32, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0x059c97a8ec162180},
    {"adamw_f64", ADAMW, 0, FSDP_F64, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0xfbed2a3f3b25b031},
    {"adamw_bf16", ADAMW, 0, FSDP_BF16, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0x6dd91ca5215d5614},
    {"adamw_bf16_stochastic", ADAMW, 1, FSDP_BF16, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP,
     0x44fcca051ef00f3a},
    {"adamw_f32_of_bf16", ADAMW, 0, FSDP_F32, FSDP_BF16, FSDP_F32, 0x9d4360098c4c063c},
    {"sgd_f32", SGD, 0, FSDP_F32, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0x854cfec0ba10a67a},
    {"muon_f32", MUON, 0, FSDP_F32, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0x362c398c06f5e407},
};

static void init(void *user, const fsdp_param_view *v) {
    (void)user;
    for (int64_t k = 0; k < v->numel; k++)
        put(v->data, v->dtype, k,
            draw(1000 + (uint64_t)v->ordinal, (uint64_t)fsdp_view_index(v, k)));
}

static void backward(lab_rank *r, fsdp_model *model, fsdp_unit *const *unit, fsdp_dtype dtype,
                     int step) {
    for (int u = 0; u < UNITS; u++) lab_forward(r->w, unit[u]);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(r->w, fsdp_pre_backward(unit[u]));
        for (int p = 0; p < 2; p++) {
            const uint64_t of = (uint64_t)(((step * RANKS + r->rank) * UNITS + u) * 2 + p);
            void *grad = fsdp_grad_as(unit[u], p, dtype);
            for (int i = 0; i < (p ? COLUMNS - u : (ROWS + u) * COLUMNS); i++)
                put(grad, dtype, i, draw(2000 + of, (uint64_t)i));
        }
        CALL(r->w, fsdp_post_backward(unit[u]));
    }
    CALL(r->w, fsdp_finalize_backward(model));
}

static void train(lab_rank *r) {
    const struct training *t = (const struct training *)r->arg;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_adamw_desc ad = fsdp_adamw_defaults();
    fsdp_sgd_desc sd = fsdp_sgd_defaults();
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
    fsdp_adamw *adamw = NULL;
    fsdp_sgd *sgd = NULL;
    fsdp_muon *muon = NULL;
    uint64_t hash = 0;
    double norm = 0;
    md.param_dtype = t->param, md.reduce_dtype = t->reduce;
    model = lab_model(r->w, &md);
    for (int u = 0; u < UNITS; u++) {
        fsdp_param_desc d[2] = {fsdp_mat("w", ROWS + u, COLUMNS), fsdp_vec("b", COLUMNS - u)};
        fsdp_unit_desc ud = FSDP_ZERO;
        d[0].dtype = d[1].dtype = t->dtype;
        unit[u] = lab_unit(r->w, model, &ud, d, 2);
    }
    CALL(r->w, fsdp_init_params(model, init, NULL));
    ad.stochastic_rounding = t->stochastic;
    sd.momentum = 0.9, sd.weight_decay = 0.01, sd.nesterov = 1;
    if (t->optimizer == ADAMW) CALL(r->w, fsdp_adamw_create(model, &ad, &adamw));
    if (t->optimizer == SGD) CALL(r->w, fsdp_sgd_create(model, &sd, &sgd));
    if (t->optimizer == MUON) CALL(r->w, fsdp_muon_create(model, NULL, &muon));
    for (int step = 0; step < STEPS; step++) {
        backward(r, model, unit, t->param ? t->param : t->dtype, step);
        CALL(r->w, fsdp_clip_grad_norm(model, 1, &norm));
        if (adamw) CALL(r->w, fsdp_adamw_step(adamw, 0.01));
        if (sgd) CALL(r->w, fsdp_sgd_step(sgd, 0.01));
        if (muon) CALL(r->w, fsdp_muon_step(muon, 0.01));
        CALL(r->w, fsdp_zero_grad(model));
    }
    for (int u = 0; u < UNITS; u++)
        for (int p = 0; p < 2; p++) {
            static __thread double full[(ROWS + UNITS) * COLUMNS];
            const int count = p ? COLUMNS - u : (ROWS + u) * COLUMNS;
            CALL(r->w, fsdp_param_full(unit[u], p, full));
            lab_fold(&hash, full, (size_t)count * fsdp_dtype_size(t->dtype));
        }
    lab_fold(&hash, &norm, sizeof norm); /* norm of the last step */
    recorded(hash, t->hash, t->name);
}
TEST_P(bits, training, trainings) {
#if defined(__x86_64__)
    if (row->optimizer == MUON && !__builtin_cpu_supports("fma")) SKIP("recorded with FMA");
#elif !defined(__aarch64__)
    if (row->optimizer == MUON) SKIP("recorded with FMA");
#endif
    lab_run(RANKS, NULL, train, (void *)(uintptr_t)row);
}
