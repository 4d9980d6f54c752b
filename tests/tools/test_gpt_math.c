/* test_gpt_math.c - examples/gpt/gpt.h: products, functions and gradients compared with plain
   formulas.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "examples/gpt/gpt.h"

/* Returns a number in [-1, 1). */
static float noise(uint64_t *state) {
    return (float)((double)(h_rand64(state) >> 11) * 0x1p-52 - 1.0);
}

static float *noise_array(uint64_t *state, size_t numel, float scale) {
    float *x = (float *)malloc((numel ? numel : 1) * sizeof *x);
    CHECK(x != NULL);
    for (size_t i = 0; i < numel; i++) x[i] = scale * noise(state);
    return x;
}

/* ---- products -------------------------------------------------------------------------------- */

/* Compares c = or += op(a) op(b) with three loops; leading dimensions are larger than needed,
   and the elements between the rows must not change. */
static void check_matmul(int flags, int m, int n, int k, uint64_t *state) {
    const int lda = (flags & GEMM_TRANS_A ? m : k) + 3;
    const int ldb = (flags & GEMM_TRANS_B ? k : n) + 1;
    const int ldc = n + 2;
    const size_t c_numel = (size_t)m * (size_t)ldc;
    float *a = noise_array(state, (size_t)(flags & GEMM_TRANS_A ? k : m) * (size_t)lda, 1.0f);
    float *b = noise_array(state, (size_t)(flags & GEMM_TRANS_B ? n : k) * (size_t)ldb, 1.0f);
    float *c = noise_array(state, c_numel, 1.0f);
    float *was = (float *)malloc(c_numel * sizeof *was);
    CHECK(was != NULL);
    memcpy(was, c, c_numel * sizeof *was);
    gemm_f32(flags, m, n, k, a, lda, b, ldb, c, ldc);
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < ldc; j++) {
            double sum = (double)was[i * ldc + j];
            if (j < n) {
                if (!(flags & GEMM_ADD)) sum = 0.0;
                for (int p = 0; p < k; p++) {
                    const float x = flags & GEMM_TRANS_A ? a[p * lda + i] : a[i * lda + p];
                    const float y = flags & GEMM_TRANS_B ? b[j * ldb + p] : b[p * ldb + j];
                    sum += (double)x * (double)y;
                }
            }
            if (j >= n) {
                CHECK_NEAR(c[i * ldc + j], sum, 0.0);
            } else {
                CHECK_NEAR(c[i * ldc + j], sum, 1e-5 + 1e-6 * k);
            }
        }
    }
    free(was);
    free(c);
    free(b);
    free(a);
}

TEST(gpt_math, matmul) {
    static const int sizes[][3] = {{1, 1, 1},    {6, 16, 8},     {5, 15, 3},    {7, 17, 129},
                                   {48, 33, 8},  {12, 32, 40},   {400, 18, 20}, {13, 50, 300},
                                   {7, 70, 701}, {391, 35, 1289}};
    uint64_t state = h_seed();
    for (int flags = 0; flags < 8; flags++) {
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            check_matmul(flags, sizes[s][0], sizes[s][1], sizes[s][2], &state);
        }
    }
}

/* ---- functions ------------------------------------------------------------------------------- */

TEST(gpt_math, exp) {
    double worst = 0.0;
    for (double x = -86.9; x < 87.9; x += 0.0011) {
        const double error = fabs((double)gemm_exp((float)x) / exp((double)(float)x) - 1.0);
        if (error > worst) worst = error;
    }
    h_message("largest relative error of gemm_exp: %.2g", worst);
    CHECK(worst < 3e-7);
    CHECK(gemm_exp(-1e30f) >= 0.0f && gemm_exp(-1e30f) < 1e-37f);
    CHECK(gemm_exp(1e30f) > 1e38f && gemm_exp(1e30f) < INFINITY);
    CHECK_NEAR(gemm_exp(0.0f), 1.0, 0.0);
}

TEST(gpt_math, gelu) {
    for (int i = -800; i <= 800; i++) {
        const double v = 0.0125 * i;
        const double u = 0.7978845608028654 * (v + 0.044715 * v * v * v);
        const double slope = 0.7978845608028654 * (1.0 + 3 * 0.044715 * v * v);
        const double tanh_u = tanh(u);
        float x = (float)v, out, d = 1.5f;
        gpt_gelu_forward(&out, &x, 1);
        gpt_gelu_backward(&d, &x, 1);
        CHECK_NEAR(out, 0.5 * v * (1.0 + tanh_u), 2e-6);
        CHECK_NEAR(d, 1.5 * (0.5 * (1.0 + tanh_u) + 0.5 * v * (1.0 - tanh_u * tanh_u) * slope),
                   5e-6);
    }
}

TEST(gpt_math, layernorm) {
    enum { BT = 3, C = 21 };
    uint64_t state = h_seed();
    float *x = noise_array(&state, BT * C, 3.0f);
    float *w = noise_array(&state, C, 1.0f), *b = noise_array(&state, C, 1.0f);
    float out[BT * C], mean[BT], rstd[BT];
    gpt_layernorm_forward(out, mean, rstd, x, w, b, BT, C);
    for (int i = 0; i < BT; i++) {
        double m = 0.0, v = 0.0;
        for (int c = 0; c < C; c++) m += (double)x[i * C + c] / C;
        for (int c = 0; c < C; c++) v += pow((double)x[i * C + c] - m, 2.0) / C;
        CHECK_NEAR(mean[i], m, 1e-6);
        CHECK_NEAR(rstd[i], 1.0 / sqrt(v + 1e-5), 1e-6);
        for (int c = 0; c < C; c++) {
            const double n = ((double)x[i * C + c] - m) / sqrt(v + 1e-5);
            CHECK_NEAR(out[i * C + c], n * (double)w[c] + (double)b[c], 3e-6);
        }
    }
    free(b);
    free(w);
    free(x);
}

/* Softmax of scores over the past, one query at a time. T is larger than one group of rows. */
TEST(gpt_math, attention) {
    enum { B = 2, T = 101, C = 12, H = 3, S = C / H };
    uint64_t state = h_seed();
    float *qkv = noise_array(&state, B * T * 3 * C, 2.0f);
    float *att = noise_array(&state, B * H * T * T, 1.0f);
    float *out = noise_array(&state, B * T * C, 1.0f);
    gpt_attention_forward(out, att, qkv, B, T, C, H);
    for (int bth = 0; bth < B * T * H; bth++) {
        const int b = bth / (T * H), t = bth / H % T, h = bth % H;
        const float *q = qkv + ((b * T + t) * 3) * C + h * S;
        double p[T], total = 0.0;
        for (int s = 0; s <= t; s++) {
            const float *k = qkv + ((b * T + s) * 3 + 1) * C + h * S;
            double dot = 0.0;
            for (int i = 0; i < S; i++) dot += (double)q[i] * (double)k[i];
            total += p[s] = exp(dot / sqrt((double)S));
        }
        for (int i = 0; i < S; i++) {
            double y = 0.0;
            for (int s = 0; s <= t; s++) {
                y += p[s] / total * (double)qkv[((b * T + s) * 3 + 2) * C + h * S + i];
            }
            CHECK_NEAR(out[(b * T + t) * C + h * S + i], y, 3e-6);
        }
    }
    free(out);
    free(att);
    free(qkv);
}

/* ---- the whole model ------------------------------------------------------------------------- */

typedef struct {
    gpt_config cfg;
    int num_params;
    gpt_param_spec *specs; // embedding unit first, then block by block
    float **w, **g;
    gpt_acts acts;
    uint8_t *tokens;
    int16_t *targets;
    int counted; // targets that are not ignored, over which the loss is the mean
} net;

static void net_create(net *n, const gpt_config *cfg, uint64_t *state) {
    const size_t tokens = (size_t)cfg->batch * (size_t)cfg->context;
    n->cfg = *cfg;
    n->counted = 0;
    n->num_params = GPT_EMBED_PARAM_COUNT + cfg->layers * GPT_BLOCK_PARAM_COUNT;
    n->specs = (gpt_param_spec *)calloc((size_t)n->num_params, sizeof *n->specs);
    n->w = (float **)calloc((size_t)n->num_params, sizeof(float *));
    n->g = (float **)calloc((size_t)n->num_params, sizeof(float *));
    n->tokens = (uint8_t *)malloc(tokens);
    n->targets = (int16_t *)malloc(tokens * sizeof *n->targets);
    CHECK(n->specs && n->w && n->g && n->tokens && n->targets);
    CHECK_EQ_INT(gpt_acts_create(cfg, &n->acts), 0);
    gpt_embed_specs(cfg, n->specs);
    for (int l = 0; l < cfg->layers; l++) {
        gpt_block_specs(cfg, n->specs + GPT_EMBED_PARAM_COUNT + l * GPT_BLOCK_PARAM_COUNT);
    }
    for (int i = 0; i < n->num_params; i++) {
        const size_t numel = (size_t)gpt_spec_numel(&n->specs[i]);
        n->w[i] = noise_array(state, numel, 0.5f); // far from the usual start: not near zero
        for (size_t k = 0; k < numel; k++) n->w[i][k] += n->specs[i].mean;
        n->g[i] = (float *)calloc(numel, sizeof(float));
        CHECK(n->g[i] != NULL);
    }
    for (size_t i = 0; i < tokens; i++) {
        n->tokens[i] = (uint8_t)(h_rand64(state) % (uint64_t)cfg->vocab);
        n->targets[i] = (int16_t)(h_rand64(state) % (uint64_t)cfg->vocab);
        if (i % 5 == 3) n->targets[i] = GPT_IGNORED;
        n->counted += n->targets[i] != GPT_IGNORED;
    }
}

static void net_destroy(net *n) {
    for (int i = 0; i < n->num_params; i++) free(n->w[i]), free(n->g[i]);
    gpt_acts_destroy(&n->acts);
    free(n->targets);
    free(n->tokens);
    free(n->g);
    free(n->w);
    free(n->specs);
}

static double net_forward(net *n) {
    const gpt_config *cfg = &n->cfg;
    gpt_acts *a = &n->acts;
    gpt_embed_forward(cfg, n->w, n->tokens, gpt_x(cfg, a, 0));
    for (int l = 0; l < cfg->layers; l++) {
        float **w = n->w + GPT_EMBED_PARAM_COUNT + l * GPT_BLOCK_PARAM_COUNT;
        gpt_block_forward(cfg, w, &a->blocks[l], a->tmp, gpt_x(cfg, a, l), gpt_x(cfg, a, l + 1));
    }
    gpt_head_forward(cfg, n->w, a, gpt_x(cfg, a, cfg->layers));
    return gpt_loss_forward(cfg, a, n->targets) / n->counted;
}

static void net_backward(net *n) {
    const gpt_config *cfg = &n->cfg;
    gpt_acts *a = &n->acts;
    gpt_loss_backward(cfg, a, n->targets, 1.0f / (float)n->counted);
    gpt_head_backward(cfg, n->w, n->g, a, gpt_x(cfg, a, cfg->layers));
    for (int l = cfg->layers - 1; l >= 0; l--) {
        const int at = GPT_EMBED_PARAM_COUNT + l * GPT_BLOCK_PARAM_COUNT;
        gpt_block_backward(cfg, n->w + at, n->g + at, &a->blocks[l], a, gpt_x(cfg, a, l));
    }
    gpt_embed_backward(cfg, n->g, n->tokens, a->dx);
}

/* Returns the slope of the loss along `direction` of parameter i, by the difference of two
   steps. */
static double slope(net *n, int i, const float *direction, float step) {
    const size_t numel = (size_t)gpt_spec_numel(&n->specs[i]);
    float *was = (float *)malloc(numel * sizeof *was);
    double loss[2];
    CHECK(was != NULL);
    memcpy(was, n->w[i], numel * sizeof *was);
    for (int side = 0; side < 2; side++) {
        const float h = side ? -step : step;
        for (size_t k = 0; k < numel; k++) n->w[i][k] = was[k] + h * direction[k];
        loss[side] = net_forward(n);
    }
    memcpy(n->w[i], was, numel * sizeof *was);
    free(was);
    return (loss[0] - loss[1]) / (2.0 * (double)step);
}

static const struct {
    const char *name;
    gpt_config cfg;
} nets[] = {{"small", {2, 5, 12, 3, 2, 11}},
            {"one_token", {1, 1, 4, 1, 1, 3}},
            {"odd", {3, 7, 15, 5, 1, 19}},
            {"long", {1, 101, 8, 2, 1, 13}},
            {"wide", {1, 3, 136, 2, 1, 256}}};

/* Compares each gradient with finite differences: along random directions, and in single
   elements. The loss is computed in float, so that the step is large and the tolerance is not
   small. */
TEST_P(gpt_math, gradients, nets, AT_NIGHT(ASAN)) {
    net n;
    uint64_t state = h_seed();
    double worst = 0.0;
    net_create(&n, &row->cfg, &state);
    net_forward(&n);
    net_backward(&n);
    for (int i = 0; i < n.num_params; i++) {
        const size_t numel = (size_t)gpt_spec_numel(&n.specs[i]);
        for (int trial = 0; trial < 6; trial++) {
            float *direction = noise_array(&state, numel, trial < 2 ? 1.0f : 0.0f);
            double expected = 0.0, size = 0.0;
            if (trial >= 2) direction[h_rand64(&state) % numel] = 1.0f;
            for (size_t k = 0; k < numel; k++) {
                expected += (double)n.g[i][k] * (double)direction[k];
                size += (double)direction[k] * (double)direction[k];
            }
            const float step = (float)(6e-3 / sqrt(size));
            // the difference's error, of order step^2, cancels in this mean
            const double got =
                (4.0 * slope(&n, i, direction, step) - slope(&n, i, direction, 2.0f * step)) / 3.0;
            const double error = fabs(got - expected) / sqrt(size);
            const double scale = fabs(expected) / sqrt(size);
            CHECK_MSG(error <= 1e-3 + 4e-3 * scale, "%s, parameter %d, trial %d: %g, expected %g",
                      n.specs[i].name, i, trial, got, expected);
            if (error > worst) worst = error;
            free(direction);
        }
    }
    h_message("%d parameters, largest error %.2g", n.num_params, worst);
    net_destroy(&n);
}

TEST(gpt_math, gradients_accumulate) {
    net n;
    uint64_t state = h_seed();
    net_create(&n, &nets[0].cfg, &state);
    float *once[64];
    CHECK(n.num_params <= 64);
    net_forward(&n);
    net_backward(&n);
    for (int i = 0; i < n.num_params; i++) {
        const size_t nbytes = (size_t)gpt_spec_numel(&n.specs[i]) * sizeof(float);
        once[i] = (float *)malloc(nbytes);
        CHECK(once[i] != NULL);
        memcpy(once[i], n.g[i], nbytes);
    }
    net_forward(&n);
    net_backward(&n);
    for (int i = 0; i < n.num_params; i++) {
        for (int64_t k = 0; k < gpt_spec_numel(&n.specs[i]); k++) {
            CHECK_NEAR(n.g[i][k], 2.0f * once[i][k], 1e-5);
        }
        free(once[i]);
    }
    net_destroy(&n);
}

TEST(gpt_math, attention_is_causal) {
    net n;
    uint64_t state = h_seed();
    net_create(&n, &nets[3].cfg, &state);
    const int T = n.cfg.context, V = n.cfg.vocab, changed = 60;
    float *before = (float *)malloc((size_t)(T * V) * sizeof *before);
    CHECK(before != NULL);
    net_forward(&n);
    memcpy(before, n.acts.logits, (size_t)(T * V) * sizeof *before);
    n.tokens[changed] = (uint8_t)((n.tokens[changed] + 1) % V);
    net_forward(&n);
    for (int i = 0; i < changed * V; i++) CHECK_NEAR(n.acts.logits[i], before[i], 1e-6);
    CHECK(memcmp(n.acts.logits + changed * V, before + changed * V, (size_t)V * sizeof *before));
    free(before);
    net_destroy(&n);
}

/* All tokens equally likely: log V. Logits far apart: no overflow, and no loss of accuracy. */
TEST(gpt_math, loss) {
    net n;
    uint64_t state = h_seed();
    net_create(&n, &nets[1].cfg, &state);
    for (int v = 0; v < 3; v++) n.acts.logits[v] = 5.0f;
    CHECK_NEAR(gpt_loss_forward(&n.cfg, &n.acts, n.targets), log(3.0), 1e-6);
    n.targets[0] = 1;
    n.acts.logits[0] = 300.0f, n.acts.logits[1] = -300.0f, n.acts.logits[2] = -300.0f;
    CHECK_NEAR(gpt_loss_forward(&n.cfg, &n.acts, n.targets), 600.0, 1e-3);
    gpt_loss_backward(&n.cfg, &n.acts, n.targets, 1.0f);
    CHECK_NEAR(n.acts.logits[0], 1.0, 1e-6);
    CHECK_NEAR(n.acts.logits[1], -1.0, 1e-6);
    net_destroy(&n);
}

/* An ignored target adds nothing to the loss and gets no gradient, for any logits. */
TEST(gpt_math, ignored_targets) {
    net n;
    uint64_t state = h_seed();
    net_create(&n, &nets[0].cfg, &state);
    const int BT = n.cfg.batch * n.cfg.context, V = n.cfg.vocab;
    CHECK(n.counted > 0 && n.counted < BT);
    (void)net_forward(&n);
    for (int i = 0; i < BT * V; i++) n.acts.logits[i] = (float)(i % V % 3);
    for (int v = 0; v < V; v++) n.acts.logits[3 * V + v] = NAN;
    double one = 0.0;
    for (int v = 0; v < V; v++) one += exp(v % 3);
    double want = 0.0;
    for (int i = 0; i < BT; i++)
        if (n.targets[i] != GPT_IGNORED) want += log(one) - n.targets[i] % 3;
    CHECK_EQ_INT(n.targets[3], GPT_IGNORED);
    CHECK_NEAR(gpt_loss_forward(&n.cfg, &n.acts, n.targets), want, 1e-5);
    gpt_loss_backward(&n.cfg, &n.acts, n.targets, 0.5f);
    for (int i = 0; i < BT; i++)
        for (int v = 0; v < V; v++) {
            const double p = exp(v % 3) / one - (n.targets[i] == v ? 1.0 : 0.0);
            CHECK_NEAR(n.acts.logits[i * V + v], n.targets[i] == GPT_IGNORED ? 0.0 : 0.5 * p, 1e-6);
        }
    net_destroy(&n);
}
