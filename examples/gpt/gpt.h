/* gpt.h - a GPT-2 in plain C99: forward and backward of every piece, on float pointers

   Pre-LayerNorm blocks, causal self-attention, tanh-approximated GELU, learned positions, and an
   embedding that is also the output head. Tokens are bytes. There is no global state, no graph and
   no autograd: each piece is a function for the forward pass and one for the backward pass, and
   whoever trains calls them in order.

   This file knows nothing about sharding. A transformer block gets its parameters as an array of
   pointers in the order of `enum gpt_block_param`; they may come from malloc or from fsdp_data_f32().

   Gradients of PARAMETERS are always added (+=), gradients of activations are stored.
   Shapes stand in comments: B sequences, T positions, C channels, H heads, S = C/H channels of a
   head, V tokens.

   Build: include it; define GEMM_BLAS and link OpenBLAS to replace the matrix product; -lm.
   Written for -O3: inner loops have the shape that compilers vectorise without -ffast-math.

   SPDX-License-Identifier: MIT */
#ifndef GPT_H
#define GPT_H

#include "examples/common/gemm.h" // gemm_f32, gemm_sum, gemm_dot, gemm_max, gemm_exp

#include <math.h>   // sqrtf, logf
#include <stddef.h> // size_t, ptrdiff_t
#include <stdint.h> // uint8_t, uint32_t
#include <stdlib.h> // malloc, free
#include <string.h> // memset, memcpy

/* ---- sizes and parameters -------------------------------------------------------------------- */

typedef struct {
    int batch;    // B, sequences in one call
    int context;  // T, positions in one call
    int channels; // C, a multiple of heads
    int heads;    // H
    int layers;   // L
    int vocab;    // V, at most 256: tokens are bytes
} gpt_config;

enum { GPT_IGNORED = -1 }; // a target that does not count in the loss

// Parameters of one transformer block, in this order everywhere.
enum gpt_block_param {
    GPT_LN1W,     // (C)
    GPT_LN1B,     // (C)
    GPT_QKVW,     // (3C, C)
    GPT_QKVB,     // (3C)
    GPT_ATTPROJW, // (C, C)
    GPT_ATTPROJB, // (C)
    GPT_LN2W,     // (C)
    GPT_LN2B,     // (C)
    GPT_FCW,      // (4C, C)
    GPT_FCB,      // (4C)
    GPT_FCPROJW,  // (C, 4C)
    GPT_FCPROJB,  // (C)
    GPT_BLOCK_PARAM_COUNT
};

// Parameters outside the blocks.
enum gpt_embed_param {
    GPT_WTE,  // (V, C), also the output head
    GPT_WPE,  // (T, C)
    GPT_LNFW, // (C)
    GPT_LNFB, // (C)
    GPT_EMBED_PARAM_COUNT
};

// A parameter's initial values: mean + std * standard normal.
typedef struct {
    const char *name;
    int rows;
    int cols; // 0: a vector of `rows` elements
    float mean;
    float std;
} gpt_param_spec;

static inline gpt_param_spec gpt_spec(const char *name, int rows, int cols, float mean, float std) {
    gpt_param_spec spec;
    spec.name = name;
    spec.rows = rows;
    spec.cols = cols;
    spec.mean = mean;
    spec.std = std;
    return spec;
}

static inline int64_t gpt_spec_numel(const gpt_param_spec *spec) {
    return (int64_t)spec->rows * (spec->cols ? spec->cols : 1);
}

static inline void gpt_block_specs(const gpt_config *cfg,
                                   gpt_param_spec out[GPT_BLOCK_PARAM_COUNT]) {
    const int C = cfg->channels;
    // The two projections that write into the residual stream start smaller, so that its variance
    // does not grow with the number of layers (GPT-2, section 2.3).
    const float proj_std = 0.02f / sqrtf(2.0f * (float)cfg->layers);
    out[GPT_LN1W] = gpt_spec("ln1w", C, 0, 1.0f, 0.0f);
    out[GPT_LN1B] = gpt_spec("ln1b", C, 0, 0.0f, 0.0f);
    out[GPT_QKVW] = gpt_spec("qkvw", 3 * C, C, 0.0f, 0.02f);
    out[GPT_QKVB] = gpt_spec("qkvb", 3 * C, 0, 0.0f, 0.0f);
    out[GPT_ATTPROJW] = gpt_spec("attprojw", C, C, 0.0f, proj_std);
    out[GPT_ATTPROJB] = gpt_spec("attprojb", C, 0, 0.0f, 0.0f);
    out[GPT_LN2W] = gpt_spec("ln2w", C, 0, 1.0f, 0.0f);
    out[GPT_LN2B] = gpt_spec("ln2b", C, 0, 0.0f, 0.0f);
    out[GPT_FCW] = gpt_spec("fcw", 4 * C, C, 0.0f, 0.02f);
    out[GPT_FCB] = gpt_spec("fcb", 4 * C, 0, 0.0f, 0.0f);
    out[GPT_FCPROJW] = gpt_spec("fcprojw", C, 4 * C, 0.0f, proj_std);
    out[GPT_FCPROJB] = gpt_spec("fcprojb", C, 0, 0.0f, 0.0f);
}

static inline void gpt_embed_specs(const gpt_config *cfg,
                                   gpt_param_spec out[GPT_EMBED_PARAM_COUNT]) {
    out[GPT_WTE] = gpt_spec("wte", cfg->vocab, cfg->channels, 0.0f, 0.02f);
    out[GPT_WPE] = gpt_spec("wpe", cfg->context, cfg->channels, 0.0f, 0.01f);
    out[GPT_LNFW] = gpt_spec("lnfw", cfg->channels, 0, 1.0f, 0.0f);
    out[GPT_LNFB] = gpt_spec("lnfb", cfg->channels, 0, 0.0f, 0.0f);
}

/* ---- matmul with bias ------------------------------------------------------------------------ */

/* out(BT, OC) = x(BT, IC) * w(OC, IC)^T + bias(OC) */
static inline void gpt_linear_forward(float *out, const float *x, const float *w, const float *bias,
                                      int BT, int IC, int OC) {
    for (int i = 0; i < BT; i++) memcpy(out + (ptrdiff_t)i * OC, bias, (size_t)OC * sizeof *out);
    gemm_f32(GEMM_TRANS_B | GEMM_ADD, BT, OC, IC, x, IC, w, IC, out, OC);
}

/* dx(BT, IC) = dout(BT, OC) * w;  dw(OC, IC) += dout^T * x;  dbias(OC) += columns of dout */
static inline void gpt_linear_backward(float *dx, float *dw, float *dbias, const float *dout,
                                       const float *x, const float *w, int BT, int IC, int OC) {
    gemm_f32(0, BT, IC, OC, dout, OC, w, IC, dx, IC);
    gemm_f32(GEMM_TRANS_A | GEMM_ADD, OC, IC, BT, dout, OC, x, IC, dw, IC);
    for (int i = 0; i < BT; i++) {
        const float *row = dout + (ptrdiff_t)i * OC;
        for (int o = 0; o < OC; o++) dbias[o] += row[o];
    }
}

/* ---- layer norm ------------------------------------------------------------------------------ */

#define GPT_LN_EPS 1e-5f

/* out(BT, C) = w * (x - mean) / std + b over each row; mean(BT) and rstd(BT) are kept for
   backward */
static inline void gpt_layernorm_forward(float *out, float *mean, float *rstd, const float *x,
                                         const float *w, const float *b, int BT, int C) {
    for (int i = 0; i < BT; i++) {
        const float *xi = x + (ptrdiff_t)i * C;
        float *oi = out + (ptrdiff_t)i * C;
        const float m = gemm_sum(xi, C) / (float)C;
        for (int c = 0; c < C; c++) oi[c] = xi[c] - m;
        const float s = 1.0f / sqrtf(gemm_dot(oi, oi, C) / (float)C + GPT_LN_EPS);
        for (int c = 0; c < C; c++) oi[c] = oi[c] * s * w[c] + b[c];
        mean[i] = m;
        rstd[i] = s;
    }
}

/* dx(BT, C) = or += the gradient; dw(C) and db(C) += */
static inline void gpt_layernorm_backward(float *dx, int add, float *dw, float *db,
                                          const float *dout, const float *x, const float *w,
                                          const float *mean, const float *rstd, int BT, int C) {
    for (int i = 0; i < BT; i++) {
        const float *doi = dout + (ptrdiff_t)i * C;
        const float *xi = x + (ptrdiff_t)i * C;
        float *dxi = dx + (ptrdiff_t)i * C;
        const float m = mean[i], s = rstd[i];
        // With n = (x-m)*s and g = dout*w: dx = s * (g - mean(g) - n * mean(g*n)). Two sums over
        // the row first.
        float lane_g[8] = {0}, lane_gn[8] = {0};
        float sum_g = 0.0f, sum_gn = 0.0f;
        int c = 0;
        for (; c + 8 <= C; c += 8) {
            for (int j = 0; j < 8; j++) lane_g[j] += doi[c + j] * w[c + j];
            for (int j = 0; j < 8; j++) lane_gn[j] += doi[c + j] * w[c + j] * ((xi[c + j] - m) * s);
        }
        for (int j = 0; j < 8; j++) sum_g += lane_g[j], sum_gn += lane_gn[j];
        for (; c < C; c++) sum_g += doi[c] * w[c], sum_gn += doi[c] * w[c] * ((xi[c] - m) * s);
        const float mean_g = sum_g / (float)C, mean_gn = sum_gn / (float)C;
        for (c = 0; c < C; c++) dw[c] += doi[c] * ((xi[c] - m) * s);
        for (c = 0; c < C; c++) db[c] += doi[c];
        if (add) {
            for (c = 0; c < C; c++)
                dxi[c] += s * (doi[c] * w[c] - mean_g - (xi[c] - m) * s * mean_gn);
        } else {
            for (c = 0; c < C; c++)
                dxi[c] = s * (doi[c] * w[c] - mean_g - (xi[c] - m) * s * mean_gn);
        }
    }
}

/* ---- GELU ------------------------------------------------------------------------------------ */

// 0.5*x*(1 + tanh(u)) with u = sqrt(2/pi)*(x + 0.044715 x^3) equals x / (1 + exp(-2u)): no
// cancellation, one exp.
#define GPT_GELU_A 1.59576912f // 2*sqrt(2/pi)
#define GPT_GELU_B 0.044715f

/* out(count) = gelu(x) */
static inline void gpt_gelu_forward(float *GEMM_RESTRICT out, const float *GEMM_RESTRICT x,
                                    ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) {
        const float v = x[i];
        out[i] = v / (1.0f + gemm_exp(-GPT_GELU_A * (v + GPT_GELU_B * v * v * v)));
    }
}

/* d(count) holds the gradient of the output and becomes the gradient of the input */
static inline void gpt_gelu_backward(float *GEMM_RESTRICT d, const float *GEMM_RESTRICT x,
                                     ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) {
        const float v = x[i];
        const float s = 1.0f / (1.0f + gemm_exp(-GPT_GELU_A * (v + GPT_GELU_B * v * v * v)));
        d[i] *= s + v * s * (1.0f - s) * GPT_GELU_A * (1.0f + 3.0f * GPT_GELU_B * v * v);
    }
}

/* ---- residual -------------------------------------------------------------------------------- */

/* out(count) = a + b; its backward is the identity, so that callers just keep one gradient and
   add to it */
static inline void gpt_residual_forward(float *out, const float *a, const float *b,
                                        ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) out[i] = a[i] + b[i];
}

/* ---- causal self-attention ------------------------------------------------------------------- */

// Rows of scores that are computed together: position t0+r of a group looks at the columns up to
// the end of its group, the rest of the causal triangle is never touched.
enum { GPT_ATT_ROWS = 48 };

/* out(B, T, C) from qkv(B, T, 3C), heads side by side in each third; att(B, H, T, T) keeps the
   probabilities */
static inline void gpt_attention_forward(float *out, float *att, const float *qkv, int B, int T,
                                         int C, int H) {
    const int S = C / H;
    const float scale = 1.0f / sqrtf((float)S);
    for (int bh = 0; bh < B * H; bh++) {
        const int b = bh / H, h = bh % H;
        const float *q = qkv + (ptrdiff_t)b * T * 3 * C + (ptrdiff_t)h * S; // (T, S), rows 3C apart
        const float *k = q + C;
        const float *v = k + C;
        float *y = out + (ptrdiff_t)b * T * C + (ptrdiff_t)h * S; // (T, S), rows C apart
        for (int t0 = 0; t0 < T; t0 += GPT_ATT_ROWS) {
            const int rows = T - t0 < GPT_ATT_ROWS ? T - t0 : GPT_ATT_ROWS;
            const int cols = t0 + rows;
            float *p = att + ((ptrdiff_t)bh * T + t0) * T; // (rows, cols), rows T apart
            gemm_f32(GEMM_TRANS_B, rows, cols, S, q + (ptrdiff_t)t0 * 3 * C, 3 * C, k, 3 * C, p,
                       T);
            for (int r = 0; r < rows; r++) {
                float *pr = p + (ptrdiff_t)r * T;
                const int seen = t0 + r + 1;
                const float max = gemm_max(pr, seen);
                for (int j = 0; j < seen; j++) pr[j] = gemm_exp((pr[j] - max) * scale);
                const float norm = 1.0f / gemm_sum(pr, seen);
                for (int j = 0; j < seen; j++) pr[j] *= norm;
                for (int j = seen; j < cols; j++) pr[j] = 0.0f; // the future inside the group
            }
            gemm_f32(0, rows, S, cols, p, T, v, 3 * C, y + (ptrdiff_t)t0 * C, C);
        }
    }
}

/* dqkv(B, T, 3C) from dout(B, T, C); datt(48, T) is room for one group of rows */
static inline void gpt_attention_backward(float *dqkv, float *datt, const float *dout,
                                          const float *qkv, const float *att, int B, int T, int C,
                                          int H) {
    const int S = C / H;
    const float scale = 1.0f / sqrtf((float)S);
    memset(dqkv, 0, (size_t)B * (size_t)T * 3 * (size_t)C * sizeof *dqkv);
    for (int bh = 0; bh < B * H; bh++) {
        const int b = bh / H, h = bh % H;
        const ptrdiff_t at = (ptrdiff_t)b * T * 3 * C + (ptrdiff_t)h * S;
        const float *q = qkv + at, *k = q + C, *v = k + C; // (T, S), rows 3C apart
        float *dq = dqkv + at, *dk = dq + C, *dv = dk + C;
        const float *dy = dout + (ptrdiff_t)b * T * C + (ptrdiff_t)h * S;
        for (int t0 = 0; t0 < T; t0 += GPT_ATT_ROWS) {
            const int rows = T - t0 < GPT_ATT_ROWS ? T - t0 : GPT_ATT_ROWS;
            const int cols = t0 + rows;
            const float *p = att + ((ptrdiff_t)bh * T + t0) * T; // (rows, cols), rows T apart
            const float *dy0 = dy + (ptrdiff_t)t0 * C;
            gemm_f32(GEMM_TRANS_B, rows, cols, S, dy0, C, v, 3 * C, datt, T);
            gemm_f32(GEMM_TRANS_A | GEMM_ADD, cols, S, rows, p, T, dy0, C, dv, 3 * C);
            // datt becomes the gradient of the scaled scores: zero where p is zero
            for (int r = 0; r < rows; r++) {
                float *dr = datt + (ptrdiff_t)r * T;
                const float *pr = p + (ptrdiff_t)r * T;
                const float mean = gemm_dot(pr, dr, cols);
                for (int j = 0; j < cols; j++) dr[j] = pr[j] * (dr[j] - mean) * scale;
            }
            gemm_f32(0, rows, S, cols, datt, T, k, 3 * C, dq + (ptrdiff_t)t0 * 3 * C, 3 * C);
            gemm_f32(GEMM_TRANS_A | GEMM_ADD, cols, S, rows, datt, T, q + (ptrdiff_t)t0 * 3 * C,
                       3 * C, dk, 3 * C);
        }
    }
}

/* ---- activations and scratch ----------------------------------------------------------------- */

// Values that a block keeps from its forward for its backward.
typedef struct {
    float *ln1;      // (B, T, C)
    float *ln1_mean; // (B, T)
    float *ln1_rstd; // (B, T)
    float *qkv;      // (B, T, 3C)
    float *att;      // (B, H, T, T)
    float *atty;     // (B, T, C)
    float *mid;      // (B, T, C), the residual stream between attention and MLP
    float *ln2;      // (B, T, C)
    float *ln2_mean; // (B, T)
    float *ln2_rstd; // (B, T)
    float *fc;       // (B, T, 4C), before GELU
    float *gelu;     // (B, T, 4C)
} gpt_block_acts;

// Everything else that a forward and a backward need; one allocation.
typedef struct {
    float *memory;
    size_t nbytes;
    float *x; // (L+1, B, T, C), the residual stream before each block and after the last
    gpt_block_acts *blocks; // [L]
    float *lnf;             // (B, T, C)
    float *lnf_mean;        // (B, T)
    float *lnf_rstd;        // (B, T)
    float *logits;          // (B, T, V), probabilities after gpt_loss_forward, then gradients
    float *tmp;             // (B, T, C)
    float *dx;              // (B, T, C), gradient of the residual stream
    float *d1;              // (B, T, C)
    float *d4;              // (B, T, 4C)
    float *datt;            // (48, T)
} gpt_acts;

static inline size_t gpt_block_acts_numel(const gpt_config *cfg) {
    const size_t BT = (size_t)cfg->batch * (size_t)cfg->context;
    const size_t C = (size_t)cfg->channels;
    return BT * (15 * C + 4) + BT * (size_t)cfg->heads * (size_t)cfg->context;
}

static inline float *gpt_take(float **at, size_t numel) {
    float *p = *at;
    *at += numel;
    return p;
}

/* Divide `at` among the arrays of one block; returns the end, gpt_block_acts_numel further */
static inline float *gpt_block_acts_place(const gpt_config *cfg, gpt_block_acts *acts, float *at) {
    const size_t BT = (size_t)cfg->batch * (size_t)cfg->context;
    const size_t C = (size_t)cfg->channels;
    acts->ln1 = gpt_take(&at, BT * C);
    acts->qkv = gpt_take(&at, BT * 3 * C);
    acts->atty = gpt_take(&at, BT * C);
    acts->mid = gpt_take(&at, BT * C);
    acts->ln2 = gpt_take(&at, BT * C);
    acts->fc = gpt_take(&at, BT * 4 * C);
    acts->gelu = gpt_take(&at, BT * 4 * C);
    acts->att = gpt_take(&at, BT * (size_t)cfg->heads * (size_t)cfg->context);
    acts->ln1_mean = gpt_take(&at, BT);
    acts->ln1_rstd = gpt_take(&at, BT);
    acts->ln2_mean = gpt_take(&at, BT);
    acts->ln2_rstd = gpt_take(&at, BT);
    return at;
}

/* Everything but the array of blocks */
static inline size_t gpt_acts_numel(const gpt_config *cfg) {
    const size_t BT = (size_t)cfg->batch * (size_t)cfg->context;
    const size_t C = (size_t)cfg->channels, L = (size_t)cfg->layers, V = (size_t)cfg->vocab;
    return BT * C * (L + 1) + L * gpt_block_acts_numel(cfg) + BT * (C + 2) + BT * V + BT * C * 7 +
           (size_t)GPT_ATT_ROWS * (size_t)cfg->context;
}

/* Divide memory of gpt_acts_numel floats among the arrays */
static inline void gpt_acts_place(const gpt_config *cfg, gpt_acts *acts, float *memory) {
    const size_t BT = (size_t)cfg->batch * (size_t)cfg->context;
    const size_t C = (size_t)cfg->channels, L = (size_t)cfg->layers, V = (size_t)cfg->vocab;
    float *at = memory;
    acts->memory = memory;
    acts->nbytes = gpt_acts_numel(cfg) * sizeof(float);
    acts->x = gpt_take(&at, BT * C * (L + 1));
    for (size_t l = 0; l < L; l++) at = gpt_block_acts_place(cfg, &acts->blocks[l], at);
    acts->lnf = gpt_take(&at, BT * C);
    acts->lnf_mean = gpt_take(&at, BT);
    acts->lnf_rstd = gpt_take(&at, BT);
    acts->logits = gpt_take(&at, BT * V);
    acts->tmp = gpt_take(&at, BT * C);
    acts->dx = gpt_take(&at, BT * C);
    acts->d1 = gpt_take(&at, BT * C);
    acts->d4 = gpt_take(&at, BT * 4 * C);
    acts->datt = gpt_take(&at, (size_t)GPT_ATT_ROWS * (size_t)cfg->context);
}

/* 0 on success; nothing is allocated on failure */
static inline int gpt_acts_create(const gpt_config *cfg, gpt_acts *acts) {
    float *memory = (float *)malloc(gpt_acts_numel(cfg) * sizeof(float));
    memset(acts, 0, sizeof *acts);
    acts->blocks = (gpt_block_acts *)malloc((size_t)cfg->layers * sizeof *acts->blocks);
    if (!memory || !acts->blocks) {
        free(acts->blocks);
        free(memory);
        memset(acts, 0, sizeof *acts);
        return -1;
    }
    gpt_acts_place(cfg, acts, memory);
    return 0;
}

static inline void gpt_acts_destroy(gpt_acts *acts) {
    free(acts->blocks);
    free(acts->memory);
    memset(acts, 0, sizeof *acts);
}

/* The residual stream before block `layer` (layer = L: after the last one), (B, T, C) */
static inline float *gpt_x(const gpt_config *cfg, const gpt_acts *acts, int layer) {
    return acts->x +
           (size_t)layer * (size_t)cfg->batch * (size_t)cfg->context * (size_t)cfg->channels;
}

/* ---- one transformer block ------------------------------------------------------------------- */

/* x_out(B, T, C) from x_in(B, T, C). w: GPT_BLOCK_PARAM_COUNT pointers. tmp(B, T, C) is scratch. */
static inline void gpt_block_forward(const gpt_config *cfg, float *const *w, gpt_block_acts *a,
                                     float *tmp, const float *x_in, float *x_out) {
    const int B = cfg->batch, T = cfg->context, C = cfg->channels;
    const int BT = B * T;
    const ptrdiff_t BTC = (ptrdiff_t)BT * C;
    gpt_layernorm_forward(a->ln1, a->ln1_mean, a->ln1_rstd, x_in, w[GPT_LN1W], w[GPT_LN1B], BT, C);
    gpt_linear_forward(a->qkv, a->ln1, w[GPT_QKVW], w[GPT_QKVB], BT, C, 3 * C);
    gpt_attention_forward(a->atty, a->att, a->qkv, B, T, C, cfg->heads);
    gpt_linear_forward(tmp, a->atty, w[GPT_ATTPROJW], w[GPT_ATTPROJB], BT, C, C);
    gpt_residual_forward(a->mid, x_in, tmp, BTC);
    gpt_layernorm_forward(a->ln2, a->ln2_mean, a->ln2_rstd, a->mid, w[GPT_LN2W], w[GPT_LN2B], BT,
                          C);
    gpt_linear_forward(a->fc, a->ln2, w[GPT_FCW], w[GPT_FCB], BT, C, 4 * C);
    gpt_gelu_forward(a->gelu, a->fc, BTC * 4);
    gpt_linear_forward(tmp, a->gelu, w[GPT_FCPROJW], w[GPT_FCPROJB], BT, 4 * C, C);
    gpt_residual_forward(x_out, a->mid, tmp, BTC);
}

/* acts->dx(B, T, C) holds the gradient of x_out and becomes that of x_in; g[...] += the
   gradients of w[...] */
static inline void gpt_block_backward(const gpt_config *cfg, float *const *w, float *const *g,
                                      const gpt_block_acts *a, gpt_acts *acts, const float *x_in) {
    const int B = cfg->batch, T = cfg->context, C = cfg->channels;
    const int BT = B * T;
    float *dx = acts->dx, *d1 = acts->d1, *d4 = acts->d4;
    // MLP; dx passes through the residual connection, the branch is added to it
    gpt_linear_backward(d4, g[GPT_FCPROJW], g[GPT_FCPROJB], dx, a->gelu, w[GPT_FCPROJW], BT, 4 * C,
                        C);
    gpt_gelu_backward(d4, a->fc, (ptrdiff_t)BT * 4 * C);
    gpt_linear_backward(d1, g[GPT_FCW], g[GPT_FCB], d4, a->ln2, w[GPT_FCW], BT, C, 4 * C);
    gpt_layernorm_backward(dx, 1, g[GPT_LN2W], g[GPT_LN2B], d1, a->mid, w[GPT_LN2W], a->ln2_mean,
                           a->ln2_rstd, BT, C);
    // attention
    gpt_linear_backward(d1, g[GPT_ATTPROJW], g[GPT_ATTPROJB], dx, a->atty, w[GPT_ATTPROJW], BT, C,
                        C);
    gpt_attention_backward(d4, acts->datt, d1, a->qkv, a->att, B, T, C, cfg->heads);
    gpt_linear_backward(d1, g[GPT_QKVW], g[GPT_QKVB], d4, a->ln1, w[GPT_QKVW], BT, C, 3 * C);
    gpt_layernorm_backward(dx, 1, g[GPT_LN1W], g[GPT_LN1B], d1, x_in, w[GPT_LN1W], a->ln1_mean,
                           a->ln1_rstd, BT, C);
}

/* ---- embedding, head and loss ---------------------------------------------------------------- */

/* x(B, T, C) = wte[token] + wpe[position]; tokens(B, T) */
static inline void gpt_embed_forward(const gpt_config *cfg, float *const *w, const uint8_t *tokens,
                                     float *x) {
    const int T = cfg->context, C = cfg->channels;
    for (int i = 0; i < cfg->batch * T; i++) {
        const float *te = w[GPT_WTE] + (ptrdiff_t)tokens[i] * C;
        const float *pe = w[GPT_WPE] + (ptrdiff_t)(i % T) * C;
        float *xi = x + (ptrdiff_t)i * C;
        for (int c = 0; c < C; c++) xi[c] = te[c] + pe[c];
    }
}

/* g[GPT_WTE] and g[GPT_WPE] += from dx(B, T, C) */
static inline void gpt_embed_backward(const gpt_config *cfg, float *const *g, const uint8_t *tokens,
                                      const float *dx) {
    const int T = cfg->context, C = cfg->channels;
    for (int i = 0; i < cfg->batch * T; i++) {
        float *te = g[GPT_WTE] + (ptrdiff_t)tokens[i] * C;
        float *pe = g[GPT_WPE] + (ptrdiff_t)(i % T) * C;
        const float *di = dx + (ptrdiff_t)i * C;
        for (int c = 0; c < C; c++) te[c] += di[c];
        for (int c = 0; c < C; c++) pe[c] += di[c];
    }
}

/* acts->logits(B, T, V) from x(B, T, C): final norm, then the product with wte */
static inline void gpt_head_forward(const gpt_config *cfg, float *const *w, gpt_acts *acts,
                                    const float *x) {
    const int BT = cfg->batch * cfg->context, C = cfg->channels, V = cfg->vocab;
    gpt_layernorm_forward(acts->lnf, acts->lnf_mean, acts->lnf_rstd, x, w[GPT_LNFW], w[GPT_LNFB],
                          BT, C);
    gemm_f32(GEMM_TRANS_B, BT, V, C, acts->lnf, C, w[GPT_WTE], C, acts->logits, V);
}

/* acts->dx(B, T, C) = gradient of x from that of the logits; g += */
static inline void gpt_head_backward(const gpt_config *cfg, float *const *w, float *const *g,
                                     gpt_acts *acts, const float *x) {
    const int BT = cfg->batch * cfg->context, C = cfg->channels, V = cfg->vocab;
    gemm_f32(0, BT, C, V, acts->logits, V, w[GPT_WTE], C, acts->d1, C);
    gemm_f32(GEMM_TRANS_A | GEMM_ADD, V, C, BT, acts->logits, V, acts->lnf, C, g[GPT_WTE], C);
    gpt_layernorm_backward(acts->dx, 0, g[GPT_LNFW], g[GPT_LNFB], acts->d1, x, w[GPT_LNFW],
                           acts->lnf_mean, acts->lnf_rstd, BT, C);
}

/* Cross-entropy in nats, summed over the targets that count: GPT_IGNORED does not. acts->logits
   become probabilities. targets(B, T) */
static inline double gpt_loss_forward(const gpt_config *cfg, gpt_acts *acts,
                                      const int16_t *targets) {
    const int BT = cfg->batch * cfg->context, V = cfg->vocab;
    double sum = 0.0;
    for (int i = 0; i < BT; i++) {
        if (targets[i] == GPT_IGNORED) continue;
        float *p = acts->logits + (ptrdiff_t)i * V;
        const float max = gemm_max(p, V);
        const float logit = p[targets[i]] - max;
        for (int v = 0; v < V; v++) p[v] = gemm_exp(p[v] - max);
        const float total = gemm_sum(p, V);
        const float norm = 1.0f / total;
        for (int v = 0; v < V; v++) p[v] *= norm;
        sum += (double)logf(total) -
               (double)logit; // from the logits, so that a tiny probability costs no accuracy
    }
    return sum;
}

/* acts->logits: probabilities become gradients of the summed loss, times scale */
static inline void gpt_loss_backward(const gpt_config *cfg, gpt_acts *acts, const int16_t *targets,
                                     float scale) {
    const int BT = cfg->batch * cfg->context, V = cfg->vocab;
    for (int i = 0; i < BT; i++) {
        float *p = acts->logits + (ptrdiff_t)i * V;
        if (targets[i] == GPT_IGNORED) {
            memset(p, 0, (size_t)V * sizeof *p);
            continue;
        }
        p[targets[i]] -= 1.0f;
        for (int v = 0; v < V; v++) p[v] *= scale;
    }
}

#endif // GPT_H
