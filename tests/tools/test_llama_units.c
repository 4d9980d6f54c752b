/* test_llama_units.c - examples/llama/llama.h: each piece compared with plain formulas in double, and
   each gradient with central differences of these formulas.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "examples/llama/llama.h"

/* Returns a number in [-1, 1). */
static double noise(uint64_t *state) { return (double)(h_rand64(state) >> 11) * 0x1p-52 - 1.0; }

static float *floats(uint64_t *state, ptrdiff_t numel, double mean, double scale) {
    float *x = (float *)malloc((size_t)(numel ? numel : 1) * sizeof *x);
    CHECK(x != NULL);
    for (ptrdiff_t i = 0; i < numel; i++) x[i] = (float)(mean + scale * noise(state));
    return x;
}
static double *doubles(const float *x, ptrdiff_t numel) {
    double *d = (double *)malloc((size_t)(numel ? numel : 1) * sizeof *d);
    CHECK(d != NULL);
    for (ptrdiff_t i = 0; i < numel; i++) d[i] = (double)x[i];
    return d;
}

/* ---- the pieces as formulas in double -------------------------------------------------------- */

static void ref_norm(double *y, const double *x, const double *w, int rows, int cols, double eps) {
    for (int i = 0; i < rows; i++) {
        double square = 0.0;
        for (int j = 0; j < cols; j++) square += x[i * cols + j] * x[i * cols + j] / cols;
        for (int j = 0; j < cols; j++)
            y[i * cols + j] = x[i * cols + j] / sqrt(square + eps) * w[j];
    }
}

static double ref_frequency(const llama_config *c, int i) {
    const double f = pow((double)c->theta, -2.0 * i / c->head_dim), wave = 2 * acos(-1.0) / f;
    if (!c->llama3 || wave < (double)(c->original_context / c->high_freq)) return f;
    if (wave > (double)(c->original_context / c->low_freq)) return f / (double)c->factor;
    const double s = ((double)c->original_context / wave - (double)c->low_freq) /
                     (double)(c->high_freq - c->low_freq);
    return (1 - s) * f / (double)c->factor + s * f;
}

static void ref_rope(const llama_config *c, double *x, int B, int T, int heads) {
    const int D = c->head_dim;
    for (int i = 0; i < B * T * heads * D; i++) {
        const int d = i % D, t = i / (D * heads) % T;
        if (d >= D / 2) continue;
        const double angle = t * ref_frequency(c, d), l = x[i], r = x[i + D / 2];
        x[i] = l * cos(angle) - r * sin(angle);
        x[i + D / 2] = r * cos(angle) + l * sin(angle);
    }
}

static void ref_attention(const llama_config *c, double *o, const double *q, const double *k,
                          const double *v, int B, int T) {
    const int H = c->heads, K = c->kv_heads, D = c->head_dim;
    double *p = (double *)malloc((size_t)T * sizeof *p);
    CHECK(p != NULL);
    for (int i = 0; i < B * T * H; i++) {
        const int h = i % H, t = i / H % T, b = i / (H * T);
        double total = 0.0;
        for (int s = 0; s <= t; s++) {
            double dot = 0.0;
            for (int d = 0; d < D; d++)
                dot += q[i * D + d] * k[((b * T + s) * K + h / (H / K)) * D + d];
            total += p[s] = exp(dot / sqrt((double)D));
        }
        for (int d = 0; d < D; d++) {
            o[i * D + d] = 0.0;
            for (int s = 0; s <= t; s++)
                o[i * D + d] += p[s] / total * v[((b * T + s) * K + h / (H / K)) * D + d];
        }
    }
    free(p);
}

typedef struct net {
    llama_config c;
    int B, T, rank;
    double lora_scale;
    llama_acts acts;
    llama_layer layer;       // floats
    double *w[LLAMA_PARAMS]; // equal values
    ptrdiff_t numel[LLAMA_PARAMS];
    double *room; // of the formulas
} net;

static void ref_linear(const net *n, int matrix, double *y, const double *x) {
    int in, out = llama_matrix_size(&n->c, matrix, &in);
    const double *bias = n->w[LLAMA_BIAS + matrix];
    const double *w = n->w[LLAMA_W + matrix];
    const double *A = n->w[LLAMA_A + matrix], *B = n->w[LLAMA_B + matrix];
    for (int i = 0; i < n->B * n->T; i++) {
        for (int o = 0; o < out; o++) {
            double sum = bias ? bias[o] : 0.0;
            for (int j = 0; j < in; j++) sum += x[i * in + j] * w[o * in + j];
            for (int r = 0; A && r < n->rank; r++) {
                double low = 0.0;
                for (int j = 0; j < in; j++) low += x[i * in + j] * A[r * in + j];
                sum += n->lora_scale * low * B[o * n->rank + r];
            }
            y[i * out + o] = sum;
        }
    }
}

static void ref_layer(const net *n, double *y, const double *x) {
    const llama_config *c = &n->c;
    const int N = n->B * n->T, C = c->hidden, F = c->inner, H = c->heads, K = c->kv_heads;
    const int D = c->head_dim, Q = H * D, KV = K * D;
    const double eps = (double)c->eps;
    double *h = n->room, *q = h + N * C, *k = q + N * Q, *v = k + N * KV, *o = v + N * KV;
    double *mid = o + N * Q, *gate = mid + N * C, *up = gate + N * F;
    ref_norm(h, x, n->w[LLAMA_NORM1], N, C, eps);
    ref_linear(n, LLAMA_Q, q, h), ref_linear(n, LLAMA_K, k, h), ref_linear(n, LLAMA_V, v, h);
    if (c->qk_norm) {
        ref_norm(q, q, n->w[LLAMA_NORM_Q], N * H, D, eps);
        ref_norm(k, k, n->w[LLAMA_NORM_K], N * K, D, eps);
    }
    ref_rope(c, q, n->B, n->T, H), ref_rope(c, k, n->B, n->T, K);
    ref_attention(c, o, q, k, v, n->B, n->T);
    ref_linear(n, LLAMA_O, mid, o);
    for (int i = 0; i < N * C; i++) mid[i] += x[i];
    ref_norm(h, mid, n->w[LLAMA_NORM2], N, C, eps);
    ref_linear(n, LLAMA_GATE, gate, h), ref_linear(n, LLAMA_UP, up, h);
    for (int i = 0; i < N * F; i++) gate[i] *= up[i] / (1.0 + exp(-gate[i]));
    ref_linear(n, LLAMA_DOWN, y, gate);
    for (int i = 0; i < N * C; i++) y[i] += mid[i];
}

/* ---- a layer with all its options ------------------------------------------------------------ */

enum { BIASES = 1, QK_NORM = 2, LORA = 4, LLAMA3 = 8 };

static ptrdiff_t param_numel(const net *n, int param) {
    const llama_config *c = &n->c;
    int in, out = llama_matrix_size(c, param % LLAMA_MATRICES, &in);
    if (param >= LLAMA_NORM1) {
        if (param < LLAMA_NORM_Q) return c->hidden;
        return c->qk_norm ? c->head_dim : 0;
    }
    if (param < LLAMA_BIAS) return (ptrdiff_t)in * out;
    if (param < LLAMA_A) return llama_has_bias(c, param % LLAMA_MATRICES) ? out : 0;
    return (ptrdiff_t)n->rank * (param < LLAMA_B ? in : out);
}

static void net_create(net *n, llama_config c, int options, int B, int T, uint64_t *state) {
    llama_acts_desc desc;
    memset(n, 0, sizeof *n);
    memset(&desc, 0, sizeof desc);
    c.qkv_bias = c.o_bias = c.mlp_bias = (options & BIASES) != 0;
    c.qk_norm = (options & QK_NORM) != 0, c.llama3 = (options & LLAMA3) != 0;
    c.eps = 1e-5f, c.theta = 50.0f, c.layers = 1;
    c.factor = 4.0f, c.low_freq = 1.0f, c.high_freq = 4.0f, c.original_context = 24.0f;
    n->c = c, n->B = B, n->T = T, n->rank = options & LORA ? 3 : 0, n->lora_scale = 0.75;
    desc.rows = B, desc.context = T, desc.loss_rows = 3, desc.rank = n->rank;
    desc.lora_scale = 0.75f;
    CHECK_EQ_INT(llama_acts_create(&n->c, &desc, &n->acts), 0);
    for (int i = 0; i < LLAMA_PARAMS; i++) {
        n->numel[i] = param_numel(n, i);
        if (!n->numel[i]) continue;
        float *w = floats(state, n->numel[i], i < LLAMA_NORM1 ? 0.0 : 1.0, 0.5);
        n->layer.p[i].w = w;
        n->w[i] = doubles(w, n->numel[i]);
        n->layer.p[i].g = (float *)calloc((size_t)n->numel[i], sizeof(float));
        CHECK(n->layer.p[i].g != NULL);
    }
    const int width = 2 * c.hidden + 2 * (c.heads + c.kv_heads) * c.head_dim + 2 * c.inner;
    n->room = (double *)malloc((size_t)(B * T * width + 1) * sizeof *n->room);
    CHECK(n->room != NULL);
}

static void net_destroy(net *n) {
    for (int i = 0; i < LLAMA_PARAMS; i++) {
        free((void *)(uintptr_t)n->layer.p[i].w);
        free(n->layer.p[i].g);
        free(n->w[i]);
    }
    free(n->room);
    llama_acts_destroy(&n->acts);
}

/* Returns sum(y * dy) of the layer's output y in double. */
static double net_value(const net *n, const double *x, const float *dy, double *y) {
    double sum = 0.0;
    ref_layer(n, y, x);
    for (int i = 0; i < n->B * n->T * n->c.hidden; i++) sum += y[i] * (double)dy[i];
    return sum;
}

/* Compares a gradient with central differences in each element of `at`. */
static double check_gradient(const net *n, const char *what, double *at, ptrdiff_t numel,
                             const float *got, const double *x, const float *dy, double *y) {
    double largest = 0.0, worst = 0.0;
    for (int pass = 0; pass < 2; pass++) {
        for (ptrdiff_t i = 0; i < numel; i++) {
            const double was = at[i], step = 1e-5;
            at[i] = was + step;
            const double above = net_value(n, x, dy, y);
            at[i] = was - step;
            const double slope = (above - net_value(n, x, dy, y)) / (2 * step);
            at[i] = was;
            if (!pass) largest = fabs(slope) > largest ? fabs(slope) : largest;
            else if (fabs(slope - (double)got[i]) > worst) worst = fabs(slope - (double)got[i]);
        }
    }
    CHECK_MSG(worst <= 1e-5 * largest + 1e-7, "%s: wrong by %g, the largest is %g", what, worst,
              largest);
    return largest > 0.0 ? worst / largest : 0.0;
}

static const struct {
    const char *name;
    llama_config c; // hidden, inner, layers, heads, kv_heads, head_dim, vocab
    int options, B, T;
} layers[] = {
    {"plain", {.hidden = 12, .inner = 20, .heads = 4, .kv_heads = 2, .head_dim = 6}, 0, 2, 5},
    {"biases", {.hidden = 9, .inner = 13, .heads = 3, .kv_heads = 1, .head_dim = 4}, BIASES, 1, 7},
    {"qk_norm",
     {.hidden = 8, .inner = 11, .heads = 2, .kv_heads = 2, .head_dim = 10},
     QK_NORM | BIASES,
     2,
     4},
    {"lora", {.hidden = 10, .inner = 9, .heads = 4, .kv_heads = 1, .head_dim = 2}, LORA, 1, 6},
    {"all",
     {.hidden = 7, .inner = 17, .heads = 6, .kv_heads = 3, .head_dim = 4},
     BIASES | QK_NORM | LORA | LLAMA3,
     2,
     3},
    {"one_token",
     {.hidden = 4, .inner = 5, .heads = 1, .kv_heads = 1, .head_dim = 2},
     LLAMA3,
     1,
     1}};

/* A whole layer: its output, the gradient of its input and of each parameter, in every element.
   Gradients of parameters are added: a second backward doubles them. */
TEST_P(llama_units, layer, layers, AT_NIGHT(ASAN)) {
    net n;
    uint64_t state = h_seed();
    double worst = 0.0;
    net_create(&n, row->c, row->options, row->B, row->T, &state);
    const int numel = n.B * n.T * n.c.hidden;
    float *x = floats(&state, numel, 0.0, 1.5), *dy = floats(&state, numel, 0.0, 1.0);
    float *out = floats(&state, numel, 0.0, 1.0);
    double *xd = doubles(x, numel), *y = doubles(x, numel);
    llama_layer_forward(&n.c, &n.acts, &n.layer, 0, x, out, n.B);
    ref_layer(&n, y, xd);
    for (int i = 0; i < numel; i++) CHECK_NEAR(out[i], y[i], 1e-5);
    memcpy(n.acts.dx, dy, (size_t)numel * sizeof *dy);
    llama_layer_backward(&n.c, &n.acts, &n.layer, 0, x, n.B);
    worst = check_gradient(&n, "x", xd, numel, n.acts.dx, xd, dy, y);
    for (int i = 0; i < LLAMA_PARAMS; i++) {
        char what[24];
        snprintf(what, sizeof what, "parameter %d", i);
        const double error = check_gradient(&n, what, n.w[i], n.numel[i], n.layer.p[i].g, xd, dy,
                                            y);
        if (error > worst) worst = error;
    }
    float *once = floats(&state, n.numel[LLAMA_W], 0.0, 0.0);
    memcpy(once, n.layer.p[LLAMA_W].g, (size_t)n.numel[LLAMA_W] * sizeof *once);
    memcpy(n.acts.dx, dy, (size_t)numel * sizeof *dy);
    llama_layer_backward(&n.c, &n.acts, &n.layer, 0, x, n.B);
    for (ptrdiff_t i = 0; i < n.numel[LLAMA_W]; i++)
        CHECK_NEAR(n.layer.p[LLAMA_W].g[i], 2.0f * once[i], 1e-5);
    h_message("largest relative error of a gradient: %.2g", worst);
    free(once), free(y), free(xd), free(out), free(dy), free(x);
    net_destroy(&n);
}

/* Frozen parameters get no gradient, and change no other one. */
TEST(llama_units, frozen) {
    uint64_t state = h_seed(), again = state;
    net n, f;
    net_create(&n, layers[4].c, layers[4].options, 2, 3, &state);
    net_create(&f, layers[4].c, layers[4].options, 2, 3, &again);
    for (int i = 0; i < LLAMA_PARAMS; i++) {
        if (i >= LLAMA_A && i < LLAMA_NORM1) continue;
        free(f.layer.p[i].g);
        f.layer.p[i].g = NULL;
    }
    const int numel = n.B * n.T * n.c.hidden;
    float *x = floats(&state, numel, 0.0, 1.5), *dy = floats(&state, numel, 0.0, 1.0);
    float *out = floats(&state, numel, 0.0, 1.0);
    net *both[2] = {&n, &f};
    for (int i = 0; i < 2; i++) {
        net *m = both[i];
        llama_layer_forward(&m->c, &m->acts, &m->layer, 0, x, out, m->B);
        memcpy(m->acts.dx, dy, (size_t)numel * sizeof *dy);
        llama_layer_backward(&m->c, &m->acts, &m->layer, 0, x, m->B);
    }
    CHECK_EQ_MEM(f.acts.dx, n.acts.dx, (size_t)numel * sizeof(float));
    for (int i = LLAMA_A; i < LLAMA_NORM1; i++)
        CHECK_EQ_MEM(f.layer.p[i].g, n.layer.p[i].g, (size_t)n.numel[i] * sizeof(float));
    free(out), free(dy), free(x);
    net_destroy(&f);
    net_destroy(&n);
}

/* ---- pieces at sizes that a whole layer does not have ---------------------------------------- */

/* T is larger than two groups of rows; differences along random directions. */
TEST(llama_units, attention) {
    enum { B = 2, T = 101, H = 6, K = 2, D = 4 };
    net n;
    uint64_t state = h_seed();
    llama_config c;
    memset(&c, 0, sizeof c);
    c.hidden = 4, c.inner = 4, c.heads = H, c.kv_heads = K, c.head_dim = D;
    net_create(&n, c, 0, B, T, &state);
    llama_kept *kept = &n.acts.kept[0];
    float *in[3] = {kept->q, kept->k, kept->v}, *dout = floats(&state, B * T * H * D, 0.0, 1.0);
    const float *got[3] = {n.acts.dq, n.acts.dk, n.acts.dv};
    const int numel[3] = {B * T * H * D, B * T * K * D, B * T * K * D};
    double *at[3], *o = doubles(dout, B * T * H * D);
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < numel[i]; j++) in[i][j] = (float)(2.0 * noise(&state));
        at[i] = doubles(in[i], numel[i]);
    }
    llama_attention_forward(&n.c, &n.acts, kept, B);
    ref_attention(&n.c, o, at[0], at[1], at[2], B, T);
    for (int i = 0; i < numel[0]; i++) CHECK_NEAR(kept->o[i], o[i], 5e-6);
    llama_attention_backward(&n.c, &n.acts, kept, dout, B);
    for (int trial = 0; trial < 12; trial++) {
        const int i = trial % 3;
        double value[2] = {0, 0}, want = 0.0, size = 0.0;
        double *direction = doubles(in[i], numel[i]);
        for (int j = 0; j < numel[i]; j++) {
            direction[j] = noise(&state);
            want += direction[j] * (double)got[i][j];
            size += fabs(direction[j] * (double)got[i][j]);
        }
        for (int side = 0; side < 2; side++) {
            for (int j = 0; j < numel[i]; j++)
                at[i][j] = (double)in[i][j] + (side ? -1e-5 : 1e-5) * direction[j];
            ref_attention(&n.c, o, at[0], at[1], at[2], B, T);
            for (int j = 0; j < numel[0]; j++) value[side] += o[j] * (double)dout[j];
        }
        for (int j = 0; j < numel[i]; j++) at[i][j] = (double)in[i][j];
        CHECK_NEAR((value[0] - value[1]) / 2e-5, want, 1e-6 * size + 1e-6);
        free(direction);
    }
    for (int i = 0; i < 3; i++) free(at[i]);
    free(o), free(dout);
    net_destroy(&n);
}

/* Backward rotates back; frequencies of both rope types, over all wave lengths. */
TEST(llama_units, rope) {
    for (int type = 0; type < 2; type++) {
        net n;
        uint64_t state = h_seed();
        llama_config c;
        memset(&c, 0, sizeof c);
        c.hidden = 4, c.inner = 4, c.heads = 2, c.kv_heads = 1, c.head_dim = 32;
        net_create(&n, c, type ? LLAMA3 : 0, 2, 9, &state);
        n.c.theta = 500000.0f, n.c.original_context = 8192.0f;
        for (int i = 0; i < 16; i++) {
            const double f = ref_frequency(&n.c, i);
            CHECK_NEAR((double)llama_frequency(&n.c, i) / f, 1.0, 2e-6);
        }
        const int numel = 2 * 9 * 2 * 32;
        float *x = floats(&state, numel, 0.0, 1.0), *was = floats(&state, numel, 0.0, 0.0);
        memcpy(was, x, (size_t)numel * sizeof *x);
        llama_rope(&n.acts, x, 2, 2, 32, 1.0f);
        CHECK(memcmp(x, was, (size_t)numel * sizeof *x) != 0);
        llama_rope(&n.acts, x, 2, 2, 32, -1.0f);
        for (int i = 0; i < numel; i++) CHECK_NEAR(x[i], was[i], 1e-6);
        free(was), free(x);
        net_destroy(&n);
    }
}

/* Without add dx may be dout, and dw may be NULL; with add the gradient is added. */
TEST(llama_units, norm) {
    enum { ROWS = 3, COLS = 21 };
    uint64_t state = h_seed();
    float *x = floats(&state, ROWS * COLS, 0.0, 3.0), *w = floats(&state, COLS, 1.0, 0.5);
    float *dy = floats(&state, ROWS * COLS, 0.0, 1.0), *dx = floats(&state, ROWS * COLS, 0.0, 1.0);
    float was[ROWS * COLS], dw[COLS] = {0};
    memcpy(was, dx, sizeof was);
    llama_norm_backward(dx, 1, dw, dy, x, w, ROWS, COLS, 1e-5f);
    llama_norm_backward(dy, 0, NULL, dy, x, w, ROWS, COLS, 1e-5f);
    for (int i = 0; i < ROWS * COLS; i++) CHECK_NEAR(dx[i] - was[i], dy[i], 1e-6);
    CHECK(dw[0] != 0.0f && dw[COLS - 1] != 0.0f);
    free(dx), free(dy), free(w), free(x);
}

/* ---- embedding, head and loss ---------------------------------------------------------------- */

/* Kind 1: every float is stored twice, as a stand-in for another dtype. */
static void convert_pairs(float *to, const void *w, int kind, int64_t first, int64_t count) {
    const float *from = (const float *)w;
    CHECK_EQ_INT(kind, 1);
    for (int64_t i = 0; i < count; i++) to[i] = from[2 * (first + i)];
}
static float *pairs(const float *x, ptrdiff_t numel) {
    float *twice = (float *)malloc((size_t)(2 * numel) * sizeof *twice);
    CHECK(twice != NULL);
    for (ptrdiff_t i = 0; i < 2 * numel; i++) twice[i] = x[i / 2];
    return twice;
}

static const struct {
    const char *name;
    int C, V, N, loss_rows, convert, every; // every n-th label counts; 0: none
} losses[] = {{"one_chunk", 6, 11, 4, 256, 0, 1},  {"chunks", 5, 300, 23, 4, 0, 1},
              {"few_labels", 5, 259, 23, 4, 0, 5}, {"no_label", 5, 259, 9, 4, 0, 0},
              {"converted", 8, 700, 13, 5, 1, 2},  {"wide", 4, 49152, 3, 2, 0, 1}};

/* Loss, logits and gradients compared with double, for chunks that do not divide N. */
TEST_P(llama_units, loss, losses, 0) {
    const int C = row->C, V = row->V, N = row->N;
    uint64_t state = h_seed();
    llama_config c;
    llama_acts_desc desc;
    llama_acts a;
    memset(&c, 0, sizeof c);
    memset(&desc, 0, sizeof desc);
    c.hidden = C, c.inner = 12, c.layers = 1, c.heads = 2, c.kv_heads = 1, c.head_dim = 2;
    c.vocab = V, c.theta = 1e4f;
    desc.rows = 1, desc.context = N, desc.loss_rows = row->loss_rows;
    if (row->convert) desc.convert = convert_pairs;
    CHECK_EQ_INT(llama_acts_create(&c, &desc, &a), 0);
    float *w = floats(&state, (ptrdiff_t)V * C, 0.0, 2.0), *h = floats(&state, N * C, 0.0, 1.0);
    float *twice = pairs(w, (ptrdiff_t)V * C), *dw = floats(&state, (ptrdiff_t)V * C, 0.0, 0.0);
    float *dh = floats(&state, N * C, 0.0, 1.0), *logits = floats(&state, (ptrdiff_t)N * V, 0, 0);
    double *p = doubles(logits, V), *want_dw = doubles(dw, (ptrdiff_t)V * C), want = 0.0;
    double *want_dh = doubles(dw, N * C < V * C ? N * C : V * C);
    int32_t labels[23];
    const double scale = 0.125;
    llama_param head = {w, dw, 0};
    if (row->convert) head.w = twice, head.kind = 1, head.g = NULL;
    CHECK(N <= 23 && N <= V);
    for (int i = 0; i < N; i++) {
        labels[i] = row->every && i % row->every == 0 ? (int)(h_rand64(&state) % (uint64_t)V)
                                                      : -100;
        double total = 0.0;
        for (int v = 0; v < V; v++) {
            p[v] = 0.0;
            for (int j = 0; j < C; j++) p[v] += (double)h[i * C + j] * (double)w[v * C + j];
            total += exp(p[v]);
        }
        for (int j = 0; j < C; j++) want_dh[i * C + j] = 0.0;
        if (labels[i] < 0) continue;
        want += log(total) - p[labels[i]];
        for (int v = 0; v < V; v++) {
            const double d = scale * (exp(p[v]) / total - (v == labels[i]));
            for (int j = 0; j < C; j++) want_dh[i * C + j] += d * (double)w[v * C + j];
            for (int j = 0; j < C; j++) want_dw[v * C + j] += d * (double)h[i * C + j];
        }
    }
    const double got = llama_loss(&c, &a, &head, h, dh, labels, N, scale, NULL);
    CHECK_NEAR(got, want, 3e-7 * want);
    for (int i = 0; i < N * C; i++) CHECK_NEAR(dh[i], want_dh[i], 1e-6);
    for (int i = 0; !row->convert && i < V * C; i++) CHECK_NEAR(dw[i], want_dw[i], 1e-6);
    memset(dw, 0, (size_t)V * (size_t)C * sizeof *dw);
    CHECK_NEAR(llama_loss(&c, &a, &head, h, NULL, labels, N, 0.0, logits), want, 3e-7 * want);
    for (ptrdiff_t i = 0; i < (ptrdiff_t)V * C; i++) CHECK(dw[i] == 0.0f); // forward only
    for (int i = 0; i < N * V; i++) {
        double dot = 0.0;
        for (int j = 0; j < C; j++) dot += (double)h[i / V * C + j] * (double)w[i % V * C + j];
        CHECK_NEAR(logits[i], dot, 1e-5);
    }
    free(want_dh), free(want_dw), free(p), free(logits), free(dh), free(dw), free(twice), free(h);
    free(w);
    llama_acts_destroy(&a);
}

/* Logits far apart: no overflow. Sums over a large vocabulary are as good as those in double. */
TEST(llama_units, row_loss) {
    enum { V = 49152 };
    float *p = (float *)malloc(V * sizeof *p), few[3] = {300.0f, -300.0f, -300.0f};
    double total, want = 0.0;
    uint64_t state = h_seed();
    CHECK(p != NULL);
    CHECK_NEAR(llama_row_loss(few, 3, 1, &total), 600.0, 1e-3);
    CHECK_NEAR(total, 1.0, 0.0);
    for (int v = 0; v < V; v++) {
        p[v] = (float)noise(&state) - (v % 3 ? 0.0f : 5.0f);
        want += exp((double)p[v]);
    }
    want = log(want) - (double)p[7];
    CHECK_NEAR(llama_row_loss(p, V, 7, &total) / want, 1.0, 1e-7);
    // equal terms: in a running sum of floats their roundings add up
    for (int v = 0; v < V; v++) p[v] = v == 7 ? 0.0f : -0.3f;
    CHECK_NEAR(llama_row_loss(p, V, 7, &total) / log(1.0 + (V - 1) * exp((double)-0.3f)), 1.0,
               1e-7);
    free(p);
}

TEST(llama_units, embedding) {
    enum { C = 3, V = 5, N = 4 };
    static const int32_t tokens[N] = {4, 0, 4, 2};
    llama_config c;
    llama_acts a;
    uint64_t state = h_seed();
    float *w = floats(&state, V * C, 0.0, 1.0), *twice = pairs(w, V * C), g[V * C] = {0};
    float *dx = floats(&state, N * C, 0.0, 1.0), x[N * C];
    llama_param embed = {w, g, 0};
    memset(&c, 0, sizeof c);
    memset(&a, 0, sizeof a);
    c.hidden = C, a.dx = dx, a.desc.convert = convert_pairs;
    for (int kind = 0; kind < 2; kind++) {
        if (kind) embed.w = twice, embed.kind = 1;
        memset(x, 0, sizeof x);
        llama_embed_forward(&c, &a, &embed, x, tokens, N);
        for (int i = 0; i < N * C; i++) CHECK(x[i] == w[tokens[i / C] * C + i % C]);
    }
    llama_embed_backward(&c, &a, &embed, tokens, N);
    for (int j = 0; j < C; j++) {
        CHECK_NEAR(g[4 * C + j], dx[j] + dx[2 * C + j], 1e-6);
        CHECK_NEAR(g[0 * C + j], dx[C + j], 0.0);
        CHECK_NEAR(g[1 * C + j], 0.0, 0.0);
    }
    embed.g = NULL;
    llama_embed_backward(&c, &a, &embed, tokens, N);
    free(dx), free(twice), free(w);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Converted parameters give the bits of floats, and a rank without rows changes nothing. */
TEST(llama_units, converted) {
    uint64_t state = h_seed();
    net n;
    net_create(&n, layers[4].c, layers[4].options, 2, 3, &state);
    const int numel = n.B * n.T * n.c.hidden;
    float *x = floats(&state, numel, 0.0, 1.5), *dy = floats(&state, numel, 0.0, 1.0);
    float *out = floats(&state, numel, 0.0, 1.0), *again = floats(&state, numel, 0.0, 1.0);
    llama_acts_desc desc = n.acts.desc;
    llama_acts a;
    llama_layer other = n.layer;
    desc.convert = convert_pairs;
    CHECK_EQ_INT(llama_acts_create(&n.c, &desc, &a), 0);
    CHECK(a.nbytes > n.acts.nbytes);
    for (int i = 0; i < LLAMA_PARAMS; i++) {
        other.p[i].g = NULL;
        if (!n.numel[i] || (i >= LLAMA_A && i < LLAMA_NORM1)) continue;
        other.p[i].w = pairs((const float *)n.layer.p[i].w, n.numel[i]), other.p[i].kind = 1;
    }
    llama_layer_forward(&n.c, &n.acts, &n.layer, 0, x, out, n.B);
    llama_layer_forward(&n.c, &a, &other, 0, x, again, n.B);
    CHECK_EQ_MEM(again, out, (size_t)numel * sizeof *out);
    memcpy(n.acts.dx, dy, (size_t)numel * sizeof *dy);
    memcpy(a.dx, dy, (size_t)numel * sizeof *dy);
    llama_layer_backward(&n.c, &n.acts, &n.layer, 0, x, n.B);
    llama_layer_backward(&n.c, &a, &other, 0, x, n.B);
    CHECK_EQ_MEM(a.dx, n.acts.dx, (size_t)numel * sizeof *dy);
    llama_layer_forward(&n.c, &n.acts, &n.layer, 0, x, out, 0);
    llama_layer_backward(&n.c, &n.acts, &n.layer, 0, x, 0);
    CHECK_EQ_MEM(again, out, (size_t)numel * sizeof *out);
    CHECK_EQ_MEM(a.dx, n.acts.dx, (size_t)numel * sizeof *dy);
    CHECK_NEAR(llama_loss(&n.c, &a, &other.p[0], x, a.d2, NULL, 0, 1.0, NULL), 0.0, 0.0);
    for (int i = 0; i < LLAMA_PARAMS; i++)
        if (other.p[i].kind) free((void *)(uintptr_t)other.p[i].w);
    free(again), free(out), free(dy), free(x);
    llama_acts_destroy(&a);
    net_destroy(&n);
}

/* Arrays do not overlap and fill the allocation; recompute keeps one layer; sizes that no memory has
   are refused. */
TEST(llama_units, memory) {
    llama_config c;
    llama_acts_desc desc;
    llama_acts a;
    memset(&c, 0, sizeof c);
    memset(&desc, 0, sizeof desc);
    c.hidden = 12, c.inner = 20, c.layers = 3, c.heads = 4, c.kv_heads = 2, c.head_dim = 6;
    c.vocab = 31, c.theta = 1e4f, c.qk_norm = 1;
    desc.rows = 2, desc.context = 5, desc.loss_rows = 4, desc.rank = 3;
    CHECK_EQ_INT(llama_acts_create(&c, &desc, &a), 0);
    CHECK(a.kept[1].q == a.kept[0].k_raw + 10 * 12);
    CHECK((char *)(a.logits + 4 * 31) == (char *)a.memory + a.nbytes);
    const size_t all = a.nbytes, layer = 10 * (4 * 24 + 3 * 12 + 2 * 20 + 4 - 24 + 12);
    llama_acts_destroy(&a);
    desc.recompute = 1;
    CHECK_EQ_INT(llama_acts_create(&c, &desc, &a), 0);
    CHECK(a.kept[2].q == a.kept[0].q);
    CHECK_EQ_INT((all - a.nbytes) / sizeof(float), 2 * layer);
    llama_acts_destroy(&a);
    desc.rows = 2147483647, desc.context = 2147483647;
    CHECK_EQ_INT(llama_acts_nbytes(&c, &desc), 0);
    CHECK_EQ_INT(llama_acts_create(&c, &desc, &a), -1);
    CHECK(a.memory == NULL && a.kept == NULL);
}
