/* test_llama_cuda_math.cpp - each kernel of llama_cuda.h compared with its function of llama.h, then a
   layer and a model of both, at odd sizes

   With the stand-ins of tests/stubs, where a kernel is a loop and a warp has one lane.

   Bounds. Both sides read the same numbers, rounded to the type E of the kernels before. In f32 they
   differ by the order of sums and by exp: at most 2e-5 of the largest element. A kernel rounds what it
   stores to E once, so that bf16, of 8 bits, adds 2^-8 of the element itself. The backward of attention
   reads the rounded output of the forward, too: that bound is derived where it is used. A layer rounds
   at most 16 times in a row: 16 * 2^-8 of the norm of an array.

   SPDX-License-Identifier: MIT */
#define TAGS NO(SHM) | STUB | STUB_ASAN
#include "harness.h"

#ifdef FSDP_BACKEND_NCCL
#include <cuda_runtime_api.h>
#endif
#ifdef FSDP_CUDA_EMULATION

#include "examples/llama/llama_cuda.h"
#include "stubs/stub.h"

#include <type_traits>
#include <vector>

typedef std::vector<float> floats;

struct size_row {
    const char *name;
    int B, T, H, K, D, C, F, V;
};
static const size_row sizes[] = {
    {"one_token", 1, 1, 1, 1, 2, 3, 5, 7},        {"group_of_3", 1, 17, 3, 1, 6, 10, 9, 31},
    {"groups_of_2", 3, 5, 4, 2, 10, 12, 20, 60},  {"long", 2, 50, 2, 2, 14, 24, 40, 257},
    {"largest_head", 1, 3, 2, 1, 256, 16, 8, 33}, {"wide", 1, 19, 4, 4, 8, 264, 300, 300}};

static uint64_t state;

static float draw(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(state >> 32) * (1.0f / 1073741824.0f); /* -2 to 2 */
}

template <class E> static E narrow(float x) {
    E e;
    gpu_set(&e, x);
    return e;
}

// Numbers of type E, with others after the end that must stay.
enum { AFTER = 24 };
template <class E> struct array {
    std::vector<E> e;
    explicit array(const floats &x) : e(x.size() + AFTER) {
        for (size_t i = 0; i < e.size(); i++) e[i] = narrow<E>(i < x.size() ? x[i] : 77.0f);
    }
    E *at() { return e.data(); }
};

/* Draws numbers that E can hold. */
template <class E> static floats drawn(size_t n, float factor = 1.0f) {
    floats x(n);
    for (size_t i = 0; i < n; i++) x[i] = gpu_wide(narrow<E>(draw() * factor));
    return x;
}

template <class E> static double unit() { return std::is_same<E, float>::value ? 0.0 : 1.0 / 256; }

/* `more`: what else an element may be off. */
template <class E>
static void same(const char *what, const E *got, const floats &want, double more = 0.0) {
    double largest = 0.0;
    for (float w : want) largest = fmax(largest, fabs((double)w));
    for (size_t i = 0; i < want.size(); i++) {
        const double w = (double)want[i], d = fabs((double)gpu_wide(got[i]) - w);
        CHECK_MSG(d <= 2e-5 * largest + unit<E>() * fabs(w) + more, "%s[%zu]: %.9g, expected %.9g",
                  what, i, (double)gpu_wide(got[i]), w);
    }
}
template <class E>
static void same(const char *what, array<E> &got, const floats &want, double more = 0.0) {
    same(what, got.at(), want, more);
    for (size_t i = want.size(); i < got.e.size(); i++)
        CHECK_MSG(gpu_wide(got.e[i]) == 77.0f, "%s: written after its end", what);
}

static void start(llama_cuda *gpu, const size_row *s) {
    stub_set(STUB_SYNC, 1);
    state = 7;
    memset((void *)gpu, 0, sizeof *gpu);
    gpu->c.hidden = s->C, gpu->c.inner = s->F, gpu->c.heads = s->H, gpu->c.kv_heads = s->K;
    gpu->c.head_dim = s->D, gpu->c.vocab = s->V, gpu->c.layers = 1, gpu->c.theta = 500.0f;
    gpu->c.eps = 1e-2f; /* so large that its place matters */
    gpu->desc.rows = s->B, gpu->desc.context = s->T, gpu->desc.loss_rows = 3;
    gpu->compute = CUBLAS_COMPUTE_32F;
}

static void no_error(const gpu_math *gpu) {
    CHECK_MSG(!gpu->error, "%s: %s", gpu->failed ? gpu->failed : "", gpu->error);
    CHECK_EQ_INT(cudaDeviceSynchronize(), 0);
}

/* ---- kernels --------------------------------------------------------------------------------- */

template <class E, class X> static void norms(llama_cuda *gpu, int rows, int C) {
    const size_t n = (size_t)rows * (size_t)C;
    const floats x = drawn<X>(n), w = drawn<E>((size_t)C), dout = drawn<E>(n);
    array<X> gx(x);
    array<E> gw(w), out((floats(n)));
    floats want(n);
    llama_norm_forward(want.data(), x.data(), w.data(), rows, C, gpu->c.eps);
    llama_cuda_norm(gpu, out.at(), gx.at(), gw.at(), rows, C);
    same("norm", out, want);
    for (int how = 0; how < 3; how++) { /* stored, added, stored over dout */
        const floats dx = how == 2 ? dout : drawn<E>(n), dw = drawn<E>((size_t)C);
        floats want_dx = dx, want_dw = dw;
        array<E> gdx(dx), gdw(dw), gdout(dout);
        floats rms((size_t)rows), sums(n + 256);
        llama_arrays<E> a;
        memset((void *)&a, 0, sizeof a);
        a.rms = rms.data(), a.sums = sums.data();
        llama_norm_backward(want_dx.data(), how == 1, want_dw.data(), dout.data(), x.data(),
                            w.data(), rows, C, gpu->c.eps);
        llama_cuda_norm_backward(gpu, a, gdx.at(), how == 1, (void *)gdw.at(),
                                 how == 2 ? gdx.at() : gdout.at(), gx.at(), (void *)gw.at(), rows,
                                 C);
        same("norm dx", gdx, want_dx);
        same("norm dw", gdw, want_dw);
    }
    no_error(gpu);
}
template <class E> static void norms_of(const size_row *s) {
    llama_cuda gpu;
    start(&gpu, s);
    norms<E, float>(&gpu, s->B * s->T, s->C);
    norms<E, E>(&gpu, s->B * s->T * s->H, s->D);
}
TEST_P(llama_cuda_math, norm, sizes, 0) { norms_of<float>(row), norms_of<gpu_bf16>(row); }

template <class E> static void pieces(const size_row *s) {
    llama_cuda gpu;
    start(&gpu, s);
    const int N = s->B * s->T, C = s->C, F = s->F;
    const size_t n = (size_t)N * (size_t)C, f = (size_t)N * (size_t)F;
    const floats y = drawn<E>(n), b = drawn<E>((size_t)C), x = drawn<float>(n);
    array<E> gy(y), gb(b);
    array<float> gx(x), mid((floats(n)));
    floats want(n);
    const llama_residual<E> residual = {mid.at(), gx.at(), gy.at(), C};
    gpu_launch(&gpu, N, residual);
    for (size_t i = 0; i < n; i++) want[i] = x[i] + y[i];
    same("residual", mid, want);
    const llama_add_bias<E> bias = {gy.at(), gb.at(), C};
    gpu_launch(&gpu, N, bias);
    for (size_t i = 0; i < n; i++) want[i] = y[i] + b[i % (size_t)C];
    same("bias", gy, want);
    /* SwiGLU, at small and at large gates */
    const floats gate = drawn<E>(f, 8.0f), up = drawn<E>(f), d = drawn<E>(f);
    array<E> ggate(gate), gup(up), gd(d), gdup((floats(f))), act((floats(f)));
    floats want_act(f), want_d = d, want_dup(f);
    llama_swiglu_forward(want_act.data(), gate.data(), up.data(), (ptrdiff_t)f);
    llama_swiglu_backward(want_d.data(), want_dup.data(), gate.data(), up.data(), (ptrdiff_t)f);
    const llama_swiglu<E> swiglu = {act.at(), ggate.at(), gup.at(), F};
    const llama_swiglu_slope<E> slope = {gd.at(), gdup.at(), ggate.at(), gup.at(), F};
    gpu_launch(&gpu, N, swiglu), gpu_launch(&gpu, N, slope);
    same("swiglu", act, want_act);
    same("swiglu dup", gdup, want_dup);
    same("swiglu dgate", gd, want_d);
    no_error(&gpu);
}
TEST_P(llama_cuda_math, pieces, sizes, 0) { pieces<float>(row), pieces<gpu_bf16>(row); }

template <class E> static void attention(const size_row *s, int llama3) {
    llama_cuda gpu;
    llama_acts acts;
    llama_kept kept;
    start(&gpu, s);
    gpu.c.llama3 = llama3, gpu.c.factor = 8.0f, gpu.c.low_freq = 1.0f, gpu.c.high_freq = 4.0f;
    gpu.c.original_context = 32.0f;
    CHECK(!llama_acts_create(&gpu.c, &gpu.desc, &acts));
    const int N = s->B * s->T, T = s->T, H = s->H, K = s->K, D = s->D;
    const size_t nq = (size_t)(N * H * D), nk = (size_t)(N * K * D), nl = (size_t)(N * H);
    const floats q = drawn<E>(nq), k = drawn<E>(nk), v = drawn<E>(nk), dy = drawn<E>(nq);
    floats want = q, o(nq), lse(nl), want_lse(nl), kq = q, kk = k, kv = v;
    array<E> gq(q), gk(k), gv(v), gdy(dy), go((floats(nq))), gdq((floats(nq))), gdk((floats(nk))),
        gdv((floats(nk)));
    array<float> glse(lse), delta(lse);
    const float scale = 1.0f / sqrtf((float)D);
    for (int sign = 1; sign >= -1; sign -= 2) { /* turned, and turned back */
        array<E> turned(q);
        const llama_rotate<E> rotate = {turned.at(), acts.cos_at, acts.sin_at, T,
                                        H,           D,           (float)sign};
        gpu_launch(&gpu, N * H, rotate);
        want = q;
        llama_rope(&acts, want.data(), s->B, H, D, (float)sign);
        same("rope", turned, want);
    }
    memset(&kept, 0, sizeof kept);
    kept.q = kq.data(), kept.k = kk.data(), kept.v = kv.data(), kept.o = o.data();
    kept.lse = lse.data();
    llama_attention_forward(&gpu.c, &acts, &kept, s->B);
    const llama_attend<E> attend = {go.at(), glse.at(), gq.at(), gk.at(), gv.at(),
                                    T,       H,         K,       D,       scale};
    gpu_launch(&gpu, N * H, attend);
    same("o", go, o);
    for (int b = 0; b < s->B; b++) /* (B, H, T) there, (B, T, H) here */
        for (int h = 0; h < H; h++)
            for (int t = 0; t < T; t++)
                want_lse[(size_t)((b * T + t) * H + h)] = lse[(size_t)((b * H + h) * T + t)];
    same("lse", glse, want_lse);
    /* delta = dy * o, in which each o is off by 2^-8 of itself; ds by p * scale times that. A query
       adds its keys with weights p whose sum is 1, a key adds all queries of its group. */
    double off = 0.0, largest_q = 0.0, largest_k = 0.0;
    for (size_t r = 0; r < nl; r++) {
        double sum = 0.0;
        for (size_t i = r * (size_t)D; i < (r + 1) * (size_t)D; i++)
            sum += unit<E>() * fabs((double)dy[i] * (double)o[i]);
        off = fmax(off, sum);
    }
    for (float x : q) largest_q = fmax(largest_q, fabs((double)x));
    for (float x : k) largest_k = fmax(largest_k, fabs((double)x));
    off *= (double)scale;
    llama_attention_backward(&gpu.c, &acts, &kept, dy.data(), s->B);
    const llama_attend_queries<E> queries = {gdq.at(), delta.at(), gdy.at(),  go.at(), gq.at(),
                                             gk.at(),  gv.at(),    glse.at(), T,       H,
                                             K,        D,          scale};
    const llama_attend_keys<E> keys = {gdk.at(), gdv.at(), delta.at(), gdy.at(), gq.at(),
                                       gk.at(),  gv.at(),  glse.at(),  T,        H,
                                       K,        D,        scale};
    gpu_launch(&gpu, N * H, queries), gpu_launch(&gpu, N * K, keys);
    same("dq", gdq, floats(acts.dq, acts.dq + nq), off * largest_k);
    same("dk", gdk, floats(acts.dk, acts.dk + nk), off * largest_q * T * (H / K));
    same("dv", gdv, floats(acts.dv, acts.dv + nk));
    no_error(&gpu);
    llama_acts_destroy(&acts);
}
TEST_P(llama_cuda_math, attention, sizes, 0) {
    for (int llama3 = 0; llama3 < 2; llama3++)
        attention<float>(row, llama3), attention<gpu_bf16>(row, llama3);
}

template <class E> static void ends(const size_row *s) {
    llama_cuda gpu;
    llama_acts acts;
    start(&gpu, s);
    gpu.desc.loss_rows = s->B * s->T;
    CHECK(!llama_acts_create(&gpu.c, &gpu.desc, &acts));
    const int N = s->B * s->T, C = s->C, V = s->V;
    const size_t n = (size_t)N * (size_t)C, vc = (size_t)V * (size_t)C;
    const floats w = drawn<E>(vc), dx = drawn<E>(n), g = drawn<E>(vc);
    std::vector<int32_t> tokens((size_t)N), labels((size_t)N);
    for (size_t i = 0; i < tokens.size(); i++) {
        tokens[i] = (int32_t)((i * i + 3) % (size_t)V % 11); /* some come several times */
        labels[i] = i % 4 == 1 ? -1 : (int32_t)((i * 7 + (size_t)V - 1) % (size_t)V);
    }
    array<E> gw(w), gdx(dx), gg(g);
    array<float> x((floats(n)));
    floats want(n), want_g = g, dxs = dx;
    llama_param embed = {w.data(), want_g.data(), 0};
    llama_embed_forward(&gpu.c, &acts, &embed, want.data(), tokens.data(), N);
    const llama_embed<E> rows = {x.at(), gw.at(), tokens.data(), C};
    gpu_launch(&gpu, N, rows);
    same("embed", x, want);
    acts.dx = dxs.data();
    llama_embed_backward(&gpu.c, &acts, &embed, tokens.data(), N);
    const llama_embed_slope<E> slope = {gg.at(), gdx.at(), tokens.data(), N, C};
    gpu_launch(&gpu, N, slope);
    same("embed g", gg, want_g);
    /* cross entropy of logits: those of llama_loss, whose head is a unit matrix */
    const size_t nv = (size_t)N * (size_t)V;
    const floats logits = drawn<float>(nv, 6.0f);
    array<float> glogits(logits);
    array<E> dlogits((floats(nv)));
    std::vector<double> row_loss((size_t)N + 1, 77.0);
    double loss = 0.0, want_loss = 0.0, total;
    floats want_d(nv);
    for (int i = 0; i < N; i++) {
        floats p(logits.begin() + (ptrdiff_t)i * V, logits.begin() + (ptrdiff_t)(i + 1) * V);
        if (labels[(size_t)i] < 0) continue;
        want_loss += llama_row_loss(p.data(), V, labels[(size_t)i], &total);
        for (int v = 0; v < V; v++)
            want_d[(size_t)(i * V + v)] = 0.125f * (p[(size_t)v] / (float)total -
                                                    (v == labels[(size_t)i] ? 1.0f : 0.0f));
    }
    const llama_cross_entropy<E> entropy = {
        dlogits.at(), row_loss.data(), glogits.at(), labels.data(), V, 0.125};
    const llama_sum_losses sum = {&loss, row_loss.data(), N};
    gpu_launch(&gpu, N, entropy), gpu_launch(&gpu, 1, sum);
    same("dlogits", dlogits, want_d);
    CHECK_NEAR(loss, want_loss, 1e-6 * want_loss);
    CHECK(row_loss[(size_t)N] == 77.0);
    no_error(&gpu);
    llama_acts_destroy(&acts);
}
TEST_P(llama_cuda_math, ends, sizes, 0) { ends<float>(row), ends<gpu_bf16>(row); }

/* ---- a model --------------------------------------------------------------------------------- */

struct kind_row {
    const char *name;
    size_row size;
    int tied, qkv_bias, o_bias, mlp_bias, qk_norm, llama3, recompute;
};
static const kind_row kinds[] = {
    {"llama_tied", {"", 2, 7, 4, 2, 6, 12, 20, 31}, 1, 0, 0, 0, 0, 0, 0},
    {"llama_biases", {"", 1, 5, 3, 1, 10, 9, 13, 17}, 0, 1, 1, 1, 0, 0, 1},
    {"llama3", {"", 3, 21, 2, 2, 14, 24, 40, 60}, 0, 0, 0, 0, 0, 1, 0},
    {"qwen2", {"", 2, 17, 4, 1, 8, 32, 24, 33}, 0, 1, 0, 0, 0, 0, 0},
    {"qwen3", {"", 2, 19, 6, 3, 6, 20, 12, 29}, 1, 0, 0, 0, 1, 0, 1},
    {"wide_mlp", {"", 2, 13, 3, 1, 10, 9, 200, 17}, 0, 0, 0, 1, 0, 0, 0},
    {"qwen3_biases", {"", 1, 1, 2, 1, 2, 3, 5, 7}, 0, 1, 1, 0, 1, 0, 0}};

// A parameter and its gradient on both sides.
template <class E> struct tensor {
    floats w, g;
    array<E> gw, gg;
    explicit tensor(size_t n, float factor)
        : w(drawn<E>(n, factor)), g(drawn<E>(n, 0.01f)), gw(w), gg(g) {}
};

/* The norm of the difference over that of what is expected. */
template <class E>
static void near(const char *what, const E *got, const float *want, size_t n, double most) {
    double d = 0.0, all = 0.0;
    for (size_t i = 0; i < n; i++) {
        const double w = (double)want[i], x = (double)gpu_wide(got[i]) - w;
        d += x * x, all += w * w;
    }
    CHECK_MSG(sqrt(d) <= most * sqrt(all) + 1e-12, "%s: %.3g, expected at most %.3g", what,
              sqrt(d / all), most);
}

/* Two layers between embedding and loss, of fewer rows than there is room for. */
template <class E> static void whole(const kind_row *s) {
    llama_cuda gpu, made;
    llama_acts acts;
    start(&gpu, &s->size);
    llama_config c = gpu.c;
    llama_acts_desc desc = gpu.desc;
    c.layers = 2, c.tied = s->tied, c.qkv_bias = s->qkv_bias, c.o_bias = s->o_bias;
    c.mlp_bias = s->mlp_bias, c.qk_norm = s->qk_norm, c.llama3 = s->llama3;
    c.factor = 8.0f, c.low_freq = 1.0f, c.high_freq = 4.0f, c.original_context = 32.0f;
    desc.rows++, desc.recompute = s->recompute;
    const double limit = std::is_same<E, float>::value ? 2e-5 : 16.0 / 256, scale = 0.125;
    const int bf16 = !std::is_same<E, float>::value, B = s->size.B, N = B * desc.context;
    const size_t C = (size_t)c.hidden, n = (size_t)N * C;
    CHECK_EQ_INT(llama_cuda_create(&c, &desc, bf16, NULL, &made), 0);
    CHECK(!llama_acts_create(&c, &desc, &acts));
    const llama_arrays<E> a = llama_arrays_of<E>(&made);
    const size_t half = (size_t)(c.head_dim / 2 * desc.context);
    CHECK(!memcmp(a.cos_at, acts.cos_at, half * sizeof(float)));
    CHECK(!memcmp(a.sin_at, acts.sin_at, half * sizeof(float)));
    std::vector<tensor<E>> params; /* of a layer each LLAMA_PARAMS, then embedding, norm, head */
    llama_layer layers[2];
    llama_cuda_layer glayers[2];
    memset(layers, 0, sizeof layers), memset(glayers, 0, sizeof glayers);
    params.reserve(2 * LLAMA_PARAMS + 3);
    for (int i = 0; i < 2 * LLAMA_PARAMS; i++) {
        const int p = i % LLAMA_PARAMS;
        int in, out = llama_matrix_size(&c, p % LLAMA_MATRICES, &in);
        size_t numel = p < LLAMA_BIAS ? (size_t)(in * out) : (size_t)out;
        int has = p < LLAMA_BIAS || p >= LLAMA_NORM1;
        if (p >= LLAMA_BIAS && p < LLAMA_A) has = llama_has_bias(&c, p - LLAMA_BIAS);
        if (p >= LLAMA_NORM1) numel = p < LLAMA_NORM_Q ? C : (size_t)c.head_dim;
        if (p >= LLAMA_NORM_Q) has = c.qk_norm;
        params.emplace_back(has ? numel : 0, p < LLAMA_BIAS ? 0.2f : 0.7f);
        if (!has) continue;
        tensor<E> &t = params.back();
        layers[i / LLAMA_PARAMS].p[p].w = t.w.data(), layers[i / LLAMA_PARAMS].p[p].g = t.g.data();
        glayers[i / LLAMA_PARAMS].w[p] = t.gw.at(), glayers[i / LLAMA_PARAMS].g[p] = t.gg.at();
    }
    params.emplace_back((size_t)c.vocab * C, 0.5f), params.emplace_back(C, 0.7f);
    params.emplace_back((size_t)c.vocab * C, 0.5f);
    tensor<E> &embed = params[2 * LLAMA_PARAMS], &norm = params[2 * LLAMA_PARAMS + 1];
    tensor<E> &head = s->tied ? embed : params[2 * LLAMA_PARAMS + 2];
    llama_param pe = {embed.w.data(), embed.g.data(), 0}, ph = {head.w.data(), head.g.data(), 0};
    std::vector<int32_t> tokens((size_t)N), labels((size_t)N);
    for (size_t i = 0; i < tokens.size(); i++) {
        tokens[i] = (int32_t)(i * i % (size_t)c.vocab);
        labels[i] = i % 4 == 1 ? -1 : (int32_t)((i * 7 + 2) % (size_t)c.vocab);
    }
    memcpy(made.tokens, tokens.data(), tokens.size() * sizeof tokens[0]);
    memcpy(made.labels, labels.data(), labels.size() * sizeof labels[0]);
    llama_embed_forward(&c, &acts, &pe, llama_x(&c, &acts, 0), tokens.data(), N);
    llama_cuda_embed(&made, a, embed.gw.at(), N);
    for (int l = 0; l < 2; l++) {
        float *y = llama_x(&c, &acts, l + 1);
        llama_layer_forward(&c, &acts, &layers[l], l, llama_x(&c, &acts, l), y, B);
        llama_cuda_forward(&made, a, glayers[l], l, B);
        near(l ? "x 2" : "x 1", llama_cuda_x(&made, a, l + 1), y, n, limit);
    }
    const float *x = llama_x(&c, &acts, 2);
    llama_norm_forward(acts.n, x, norm.w.data(), N, c.hidden, c.eps);
    const double loss = llama_loss(&c, &acts, &ph, acts.n, acts.d2, labels.data(), N, scale, NULL);
    // an evaluation has no gradients
    llama_cuda_loss(&made, a, norm.gw.at(), NULL, head.gw.at(), NULL, N, 0.0);
    CHECK_NEAR(*made.loss / loss, 1.0, limit);
    llama_cuda_loss(&made, a, norm.gw.at(), norm.gg.at(), head.gw.at(), head.gg.at(), N, scale);
    CHECK_NEAR(*made.loss / loss, 1.0, limit);
    llama_norm_backward(acts.dx, 0, norm.g.data(), acts.d2, x, norm.w.data(), N, c.hidden, c.eps);
    near("dx", a.dx, acts.dx, n, limit);
    for (int l = 1; l >= 0; l--) {
        x = llama_x(&c, &acts, l);
        if (s->recompute) {
            llama_layer_forward(&c, &acts, &layers[l], l, x, llama_x(&c, &acts, l + 1), B);
            llama_cuda_forward(&made, a, glayers[l], l, B);
        }
        llama_layer_backward(&c, &acts, &layers[l], l, x, B);
        llama_cuda_backward(&made, a, glayers[l], l, B);
        near(l ? "dx 1" : "dx 0", a.dx, acts.dx, n, limit);
    }
    llama_embed_backward(&c, &acts, &pe, tokens.data(), N);
    llama_cuda_embed_backward(&made, a, embed.gg.at(), N);
    for (size_t i = 0; i < params.size(); i++) {
        char what[40];
        snprintf(what, sizeof what, "gradient %zu", i);
        near(what, params[i].gg.at(), params[i].g.data(), params[i].g.size(), limit);
        same(what, params[i].gw, params[i].w); /* parameters stay */
    }
    // the arrays are next to each other: none is too small
    CHECK(!memcmp(a.cos_at, acts.cos_at, half * sizeof(float)));
    CHECK(!memcmp(a.sin_at, acts.sin_at, half * sizeof(float)));
    no_error(&made);
    llama_cuda_destroy(&made);
    llama_acts_destroy(&acts);
}
TEST_P(llama_cuda_math, model, kinds, 0) { whole<float>(row), whole<gpu_bf16>(row); }

#else
TEST(llama_cuda_math, needs_stand_ins) { SKIP("no stand-ins: NCCL=stub builds them"); }
#endif
