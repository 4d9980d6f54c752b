/* llama.h - Llama, Qwen2 and Qwen3 in plain C99: forward and backward of each piece, on floats

   RMSNorm, rotary positions, causal attention with grouped keys and values, SwiGLU, linear maps
   with optional biases and low-rank adapters (LoRA), and a head whose loss is computed in chunks of
   rows. There is no global state, no graph and no autograd: each piece has a function for the
   forward pass and one for the backward pass, and whoever trains calls them in order.

   This file knows nothing about sharding and reads no file. A layer gets its parameters as
   pointers, which may come from malloc or from fsdp_data().

   Gradients of PARAMETERS are always added (+=); gradients of activations are stored. Shapes stand
   in comments: B rows of T positions, N = B*T; C hidden_size, F intermediate_size, H heads and K
   heads of keys and values, D head_dim, V tokens, R rank of adapters.

   Build: include it, and link -lm. Written for -O3 -march=native; examples/common/gemm.h has the
   matrix product.

   SPDX-License-Identifier: MIT */
#ifndef LLAMA_H
#define LLAMA_H

#include "examples/common/gemm.h" // gemm_f32, gemm_sum, gemm_dot, gemm_max, gemm_exp

#include <math.h>   // sqrtf, powf, cosf, sinf, logf, log
#include <stddef.h> // size_t, ptrdiff_t
#include <stdint.h> // int32_t, int64_t
#include <stdlib.h> // malloc, free
#include <string.h> // memset, memcpy

/* ---- sizes and parameters -------------------------------------------------------------------- */

enum { LLAMA_MAX_EOS = 16 };

typedef struct llama_config {
    int hidden, inner, layers, heads, kv_heads, head_dim, vocab;
    int context;                             // max_position_embeddings, or INT_MAX
    int tied;                                // the head is the embedding
    int qkv_bias, o_bias, mlp_bias, qk_norm; // which optional parameters a layer has
    float eps, theta;
    int llama3; // rope_type llama3, with the four numbers that follow
    float factor, low_freq, high_freq, original_context;
    int num_eos, eos[LLAMA_MAX_EOS]; // end tokens
} llama_config;

enum llama_matrix {
    LLAMA_Q,    // (H*D, C)
    LLAMA_K,    // (K*D, C)
    LLAMA_V,    // (K*D, C)
    LLAMA_O,    // (C, H*D)
    LLAMA_GATE, // (F, C)
    LLAMA_UP,   // (F, C)
    LLAMA_DOWN, // (C, F)
    LLAMA_MATRICES
};

// Parameters of a layer. LLAMA_W + LLAMA_Q is the matrix of q, LLAMA_BIAS + LLAMA_Q its bias.
enum llama_param_id {
    LLAMA_W = 0,
    LLAMA_BIAS = LLAMA_W + LLAMA_MATRICES,  // (rows of the matrix)
    LLAMA_A = LLAMA_BIAS + LLAMA_MATRICES,  // (R, columns)
    LLAMA_B = LLAMA_A + LLAMA_MATRICES,     // (rows, R)
    LLAMA_NORM1 = LLAMA_B + LLAMA_MATRICES, // (C), before attention
    LLAMA_NORM2,                            // (C), before the MLP
    LLAMA_NORM_Q,                           // (D), of each head of q
    LLAMA_NORM_K,                           // (D), of each head of k
    LLAMA_PARAMS
};

typedef struct llama_param {
    const void *w; // NULL: the layer does not have it
    float *g;      // its gradient; NULL: frozen
    int kind;      // 0: w points to floats; else llama_acts.convert knows what it is
} llama_param;

typedef struct llama_layer {
    llama_param p[LLAMA_PARAMS];
} llama_layer;

/* Returns the rows of a matrix of a layer, and sets *columns. */
static inline int llama_matrix_size(const llama_config *c, int matrix, int *columns) {
    const int q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    switch (matrix) {
    case LLAMA_Q: *columns = c->hidden; return q;
    case LLAMA_K:
    case LLAMA_V: *columns = c->hidden; return kv;
    case LLAMA_O: *columns = q; return c->hidden;
    case LLAMA_DOWN: *columns = c->inner; return c->hidden;
    default: *columns = c->hidden; return c->inner;
    }
}

/* Returns 1 if a layer has that bias. */
static inline int llama_has_bias(const llama_config *c, int matrix) {
    return matrix < LLAMA_O ? c->qkv_bias : matrix == LLAMA_O ? c->o_bias : c->mlp_bias;
}

/* ---- activations and scratch ----------------------------------------------------------------- */

// Rows of scores that are computed together: the causal triangle above a group is never touched.
enum { LLAMA_ATT_ROWS = 48 };

// What a layer keeps from its forward for its backward.
typedef struct llama_kept {
    float *q, *o;         // (N, H*D): queries after RoPE; what attention returns
    float *k, *v;         // (N, K*D), or (cache, K*D): keys after RoPE; values
    float *lse;           // (B, H, T): log of the sum of e^score
    float *mid;           // (N, C): the residual stream between attention and MLP
    float *gate, *up;     // (N, F)
    float *q_raw, *k_raw; // before their norms, with qk_norm
} llama_kept;

typedef struct llama_acts_desc {
    int rows, context; // the most rows of a call, and T
    int loss_rows;     // rows of a chunk of the loss
    int rank;          // of adapters; 0: none
    float lora_scale;  // alpha / rank
    int recompute;     // 1: all layers share one llama_kept; call forward before each backward
    int cache;         // to generate: positions of one row whose keys and values stay; else 0
    // Writes elements first .. first + count - 1 of a parameter of that kind as floats. NULL: every
    // kind is 0
    void (*convert)(float *to, const void *w, int kind, int64_t first, int64_t count);
    const struct llama_engine *engine; // of llama_model.h; NULL: this file computes
} llama_acts_desc;

// Memory of a forward and a backward; one allocation.
typedef struct llama_acts {
    llama_acts_desc desc;
    float *memory;
    size_t nbytes;
    int past;         // positions in the cache, which the next rows follow; 0 without a cache
    llama_kept *kept; // [layers]
    float *x;   // (layers + 1, N, C): the residual stream before each layer and after the last
    float *n;   // (N, C): the output of the last norm
    float *dx;  // (N, C): gradient of the residual stream
    float *d1;  // (N, max(C, H*D))
    float *d2;  // (N, C)
    float *act; // (N, F): the input of down_proj
    float *dgate, *dup;     // (N, F)
    float *dq, *dk, *dv;    // as q, k, v
    float *low, *dlow;      // (N, R): x A^T and its gradient
    float *att;             // (2, 48, T), with a cache (2, 48, cache)
    float *cos_at, *sin_at; // (T, D/2), with a cache (cache, D/2)
    float *logits;          // (loss_rows, V)
    float *room;            // of converted parameters
    int64_t room_numel;
    void *own; // of an engine, which has arrays of its own
} llama_acts;

// An allocation that is measured first: base NULL.
typedef struct llama_room {
    float *base;
    size_t used;
    int overflow;
} llama_room;

static inline float *llama_take(llama_room *m, size_t rows, size_t cols) {
    const size_t most = (size_t)PTRDIFF_MAX / sizeof(float) - m->used;
    if (cols && rows > most / cols) {
        m->overflow = 1;
        return NULL;
    }
    m->used += rows * cols;
    return m->base ? m->base + (m->used - rows * cols) : NULL;
}

static inline void llama_kept_place(const llama_config *c, size_t N, llama_room *m, llama_kept *a) {
    const size_t q = (size_t)c->heads * (size_t)c->head_dim;
    const size_t kv = (size_t)c->kv_heads * (size_t)c->head_dim;
    memset(a, 0, sizeof *a);
    a->q = llama_take(m, N, q), a->o = llama_take(m, N, q);
    a->k = llama_take(m, N, kv), a->v = llama_take(m, N, kv);
    a->lse = llama_take(m, N, (size_t)c->heads);
    a->mid = llama_take(m, N, (size_t)c->hidden);
    a->gate = llama_take(m, N, (size_t)c->inner), a->up = llama_take(m, N, (size_t)c->inner);
    if (c->qk_norm) a->q_raw = llama_take(m, N, q), a->k_raw = llama_take(m, N, kv);
}

/* Returns the positions that a row can have. */
static inline int llama_positions(const llama_acts_desc *d) {
    return d->cache ? d->cache : d->context;
}

/* Divides m among the arrays of a; with m->base NULL it only measures. */
static inline void llama_acts_place(const llama_config *c, llama_room *m, llama_acts *a) {
    const llama_acts_desc *d = &a->desc;
    const size_t N = (size_t)d->rows * (size_t)d->context, T = (size_t)llama_positions(d);
    const size_t C = (size_t)c->hidden, F = (size_t)c->inner, half = (size_t)c->head_dim / 2;
    const size_t q = (size_t)c->heads * (size_t)c->head_dim;
    const size_t kv = (size_t)c->kv_heads * (size_t)c->head_dim, L = (size_t)c->layers;
    llama_kept shared;
    for (size_t l = 0; l < L; l++) {
        if (l == 0 || !d->recompute) llama_kept_place(c, N, m, &shared);
        if (d->cache) shared.k = llama_take(m, T, kv), shared.v = llama_take(m, T, kv);
        if (a->kept) a->kept[l] = shared;
    }
    a->x = llama_take(m, N * (L + 1), C);
    a->n = llama_take(m, N, C), a->dx = llama_take(m, N, C), a->d2 = llama_take(m, N, C);
    a->d1 = llama_take(m, N, C > q ? C : q);
    a->act = llama_take(m, N, F), a->dgate = llama_take(m, N, F), a->dup = llama_take(m, N, F);
    a->dq = llama_take(m, N, q), a->dk = llama_take(m, N, kv), a->dv = llama_take(m, N, kv);
    a->low = llama_take(m, N, (size_t)d->rank), a->dlow = llama_take(m, N, (size_t)d->rank);
    a->att = llama_take(m, 2 * LLAMA_ATT_ROWS, T);
    a->cos_at = llama_take(m, T, half), a->sin_at = llama_take(m, T, half);
    a->logits = llama_take(m, (size_t)d->loss_rows, (size_t)c->vocab);
    a->room_numel = !d->convert ? 0 : (int64_t)((F > q ? F : q) * C); // the largest matrix
    a->room = llama_take(m, 1, (size_t)a->room_numel);
}

/* Returns 1/theta^(2i/D), scaled as rope_type says. */
static inline float llama_frequency(const llama_config *c, int i) {
    const float f = 1.0f / powf(c->theta, (float)(2 * i) / (float)c->head_dim);
    if (!c->llama3) return f;
    const float wave = 6.283185307179586f / f, original = c->original_context;
    if (wave < original / c->high_freq) return f;
    if (wave > original / c->low_freq) return f / c->factor;
    const float s = (original / wave - c->low_freq) / (c->high_freq - c->low_freq);
    return (1.0f - s) * f / c->factor + s * f;
}

/* Returns the bytes of llama_acts_create without its table of layers; 0: more than memory can
   have. */
static inline size_t llama_acts_nbytes(const llama_config *c, const llama_acts_desc *desc) {
    llama_acts a;
    llama_room m = {NULL, 0, 0};
    memset(&a, 0, sizeof a);
    a.desc = *desc;
    llama_acts_place(c, &m, &a);
    return m.overflow ? 0 : m.used * sizeof(float);
}

static inline void llama_acts_destroy(llama_acts *a) {
    free(a->kept);
    free(a->memory);
    memset(a, 0, sizeof *a);
}

/* Returns 0, or -1 if memory is short; then nothing is allocated. */
static inline int llama_acts_create(const llama_config *c, const llama_acts_desc *desc,
                                    llama_acts *a) {
    llama_room m = {NULL, 0, 0};
    const int half = c->head_dim / 2;
    memset(a, 0, sizeof *a);
    a->nbytes = llama_acts_nbytes(c, desc);
    if (!a->nbytes) return -1;
    a->kept = (llama_kept *)calloc((size_t)c->layers, sizeof *a->kept);
    a->memory = (float *)malloc(a->nbytes);
    if (!a->kept || !a->memory) {
        llama_acts_destroy(a);
        return -1;
    }
    a->desc = *desc;
    m.base = a->memory;
    llama_acts_place(c, &m, a);
    for (int i = 0; i < half; i++) {
        const float f = llama_frequency(c, i);
        for (int t = 0; t < llama_positions(desc); t++) {
            a->cos_at[(ptrdiff_t)t * half + i] = cosf((float)t * f);
            a->sin_at[(ptrdiff_t)t * half + i] = sinf((float)t * f);
        }
    }
    return 0;
}

/* Returns the residual stream of B rows before `layer` (layer = layers: after the last one). */
static inline float *llama_x(const llama_config *c, const llama_acts *a, int layer) {
    return a->x +
           (size_t)layer * (size_t)a->desc.rows * (size_t)a->desc.context * (size_t)c->hidden;
}

/* Returns elements first .. first + count - 1 of a parameter as floats: its own, or in a->room
   until the next call. */
static inline const float *llama_floats(llama_acts *a, const llama_param *p, int64_t first,
                                        int64_t count) {
    if (!p->kind) return (const float *)p->w + first;
    a->desc.convert(a->room, p->w, p->kind, first, count);
    return a->room;
}

/* ---- RMSNorm --------------------------------------------------------------------------------- */

static inline float llama_rms(const float *x, int cols, float eps) {
    return 1.0f / sqrtf(gemm_dot(x, x, cols) / (float)cols + eps);
}

/* out(rows, cols) = x / sqrt(mean(x^2) + eps) * w(cols) */
static inline void llama_norm_forward(float *out, const float *x, const float *w, ptrdiff_t rows,
                                      int cols, float eps) {
    for (ptrdiff_t i = 0; i < rows; i++, x += cols, out += cols) {
        const float r = llama_rms(x, cols, eps);
        for (int j = 0; j < cols; j++) out[j] = x[j] * r * w[j];
    }
}

/* dx(rows, cols) = or += the gradient; dw(cols) +=, or NULL. Without add dx may be dout. */
static inline void llama_norm_backward(float *dx, int add, float *dw, const float *dout,
                                       const float *x, const float *w, ptrdiff_t rows, int cols,
                                       float eps) {
    for (ptrdiff_t i = 0; i < rows; i++, x += cols, dx += cols, dout += cols) {
        const float r = llama_rms(x, cols, eps);
        float lane[8] = {0}, sum = 0.0f;
        int j = 0;
        for (; j + 8 <= cols; j += 8) {
            for (int k = 0; k < 8; k++) lane[k] += dout[j + k] * w[j + k] * x[j + k];
        }
        for (int k = 0; k < 8; k++) sum += lane[k];
        for (; j < cols; j++) sum += dout[j] * w[j] * x[j];
        sum *= r * r / (float)cols;
        for (j = 0; dw && j < cols; j++) dw[j] += dout[j] * x[j] * r;
        if (add) {
            for (j = 0; j < cols; j++) dx[j] += r * (dout[j] * w[j] - x[j] * sum);
        } else {
            for (j = 0; j < cols; j++) dx[j] = r * (dout[j] * w[j] - x[j] * sum);
        }
    }
}

/* ---- rotary positions ------------------------------------------------------------------------ */

/* Rotates the pairs (i, i + D/2) of each head of x(B, T, heads, D), whose positions start at
   a->past; sign -1: back, which is also the backward pass. */
static inline void llama_rope(const llama_acts *a, float *x, int B, int heads, int D, float sign) {
    const int T = a->desc.context, half = D / 2;
    for (int b = 0; b < B; b++) {
        for (int t = 0; t < T; t++) {
            const ptrdiff_t at = (ptrdiff_t)(a->past + t) * half;
            const float *c = a->cos_at + at, *s = a->sin_at + at;
            for (int h = 0; h < heads; h++, x += D) {
                for (int i = 0; i < half; i++) {
                    const float l = x[i], r = x[i + half];
                    x[i] = l * c[i] - sign * r * s[i];
                    x[i + half] = r * c[i] + sign * l * s[i];
                }
            }
        }
    }
}

/* ---- attention ------------------------------------------------------------------------------- */

/* o and lse of kept, from its q, k and v; k and v begin with a->past earlier positions. */
static inline void llama_attention_forward(const llama_config *c, const llama_acts *a,
                                           const llama_kept *kept, int B) {
    const int T = a->desc.context, H = c->heads, D = c->head_dim, group = H / c->kv_heads;
    const int q_row = H * D, kv_row = c->kv_heads * D, past = a->past, all = past + T;
    const float scale = 1.0f / sqrtf((float)D);
    for (int bh = 0; bh < B * H; bh++) {
        const ptrdiff_t at_q = (ptrdiff_t)(bh / H) * T * q_row + bh % H * D;
        const ptrdiff_t at_kv = (ptrdiff_t)(bh / H) * T * kv_row + bh % H / group * D;
        float *lse = kept->lse + (ptrdiff_t)bh * T;
        for (int t0 = 0; t0 < T; t0 += LLAMA_ATT_ROWS) {
            const int rows = T - t0 < LLAMA_ATT_ROWS ? T - t0 : LLAMA_ATT_ROWS;
            const int cols = past + t0 + rows;
            const ptrdiff_t group_q = at_q + (ptrdiff_t)t0 * q_row;
            gemm_f32(GEMM_TRANS_B, rows, cols, D, kept->q + group_q, q_row, kept->k + at_kv, kv_row,
                     a->att, all);
            for (int r = 0; r < rows; r++) {
                float *p = a->att + (ptrdiff_t)r * all;
                const int seen = past + t0 + r + 1;
                const float max = gemm_max(p, seen);
                for (int j = 0; j < seen; j++) p[j] = gemm_exp((p[j] - max) * scale);
                const float sum = gemm_sum(p, seen), norm = 1.0f / sum;
                lse[t0 + r] = max * scale + logf(sum);
                for (int j = 0; j < seen; j++) p[j] *= norm;
                for (int j = seen; j < cols; j++) p[j] = 0.0f; // later positions of the group
            }
            gemm_f32(0, rows, D, cols, a->att, all, kept->v + at_kv, kv_row, kept->o + group_q,
                     q_row);
        }
    }
}

/* a->dq, dk and dv from dout(N, H*D). The probabilities are computed again. */
static inline void llama_attention_backward(const llama_config *c, const llama_acts *a,
                                            const llama_kept *kept, const float *dout, int B) {
    const int T = a->desc.context, H = c->heads, D = c->head_dim, group = H / c->kv_heads;
    const int q_row = H * D, kv_row = c->kv_heads * D;
    const size_t kv_bytes = (size_t)B * (size_t)T * (size_t)kv_row * sizeof(float);
    const float scale = 1.0f / sqrtf((float)D);
    float *prob = a->att, *dprob = prob + (ptrdiff_t)LLAMA_ATT_ROWS * T;
    memset(a->dk, 0, kv_bytes);
    memset(a->dv, 0, kv_bytes);
    for (int bh = 0; bh < B * H; bh++) {
        const ptrdiff_t at_q = (ptrdiff_t)(bh / H) * T * q_row + bh % H * D;
        const ptrdiff_t at_kv = (ptrdiff_t)(bh / H) * T * kv_row + bh % H / group * D;
        const float *k = kept->k + at_kv, *v = kept->v + at_kv;
        for (int t0 = 0; t0 < T; t0 += LLAMA_ATT_ROWS) {
            const int rows = T - t0 < LLAMA_ATT_ROWS ? T - t0 : LLAMA_ATT_ROWS, cols = t0 + rows;
            const ptrdiff_t group_q = at_q + (ptrdiff_t)t0 * q_row;
            const float *q = kept->q + group_q, *dy = dout + group_q;
            const float *lse = kept->lse + (ptrdiff_t)bh * T + t0;
            gemm_f32(GEMM_TRANS_B, rows, cols, D, q, q_row, k, kv_row, prob, T);
            gemm_f32(GEMM_TRANS_B, rows, cols, D, dy, q_row, v, kv_row, dprob, T);
            for (int r = 0; r < rows; r++) {
                float *p = prob + (ptrdiff_t)r * T, *d = dprob + (ptrdiff_t)r * T;
                const int seen = t0 + r + 1;
                const float l = lse[r];
                for (int j = 0; j < seen; j++) p[j] = gemm_exp(p[j] * scale - l);
                for (int j = seen; j < cols; j++) p[j] = 0.0f;
                const float mean = gemm_dot(p, d, cols);
                for (int j = 0; j < cols; j++) d[j] = p[j] * (d[j] - mean) * scale;
            }
            gemm_f32(GEMM_TRANS_A | GEMM_ADD, cols, D, rows, prob, T, dy, q_row, a->dv + at_kv,
                     kv_row);
            gemm_f32(0, rows, D, cols, dprob, T, k, kv_row, a->dq + group_q, q_row);
            gemm_f32(GEMM_TRANS_A | GEMM_ADD, cols, D, rows, dprob, T, q, q_row, a->dk + at_kv,
                     kv_row);
        }
    }
}

/* ---- linear maps ----------------------------------------------------------------------------- */

/* low(N, R) = lora_scale * x(N, in) * A^T */
static inline void llama_low(const llama_acts *a, float *low, const float *x, const llama_param *A,
                             int N, int in) {
    const int R = a->desc.rank;
    gemm_f32(GEMM_TRANS_B, N, R, in, x, in, (const float *)A->w, in, low, R);
    for (ptrdiff_t i = 0; i < (ptrdiff_t)N * R; i++) low[i] *= a->desc.lora_scale;
}

/* y(N, out) = x(N, in) * W^T + bias + lora_scale * (x A^T) B^T */
static inline void llama_linear_forward(const llama_config *c, llama_acts *a,
                                        const llama_layer *layer, int matrix, float *y,
                                        const float *x, int N) {
    int in, out = llama_matrix_size(c, matrix, &in), add = 0;
    const llama_param *w = &layer->p[LLAMA_W + matrix], *bias = &layer->p[LLAMA_BIAS + matrix];
    const llama_param *A = &layer->p[LLAMA_A + matrix], *B = &layer->p[LLAMA_B + matrix];
    if (bias->w) {
        const float *b = llama_floats(a, bias, 0, out);
        for (int i = 0; i < N; i++) memcpy(y + (ptrdiff_t)i * out, b, (size_t)out * sizeof *y);
        add = GEMM_ADD;
    }
    gemm_f32(GEMM_TRANS_B | add, N, out, in, x, in, llama_floats(a, w, 0, (int64_t)out * in), in, y,
             out);
    if (!A->w) return;
    const int R = a->desc.rank;
    llama_low(a, a->low, x, A, N, in);
    gemm_f32(GEMM_TRANS_B | GEMM_ADD, N, out, R, a->low, R, (const float *)B->w, R, y, out);
}

/* dx(N, in) = or += the gradient from dy(N, out); gradients of parameters that are not frozen += */
static inline void llama_linear_backward(const llama_config *c, llama_acts *a,
                                         const llama_layer *layer, int matrix, float *dx, int add,
                                         const float *dy, const float *x, int N) {
    int in, out = llama_matrix_size(c, matrix, &in);
    const llama_param *w = &layer->p[LLAMA_W + matrix], *bias = &layer->p[LLAMA_BIAS + matrix];
    const llama_param *A = &layer->p[LLAMA_A + matrix], *B = &layer->p[LLAMA_B + matrix];
    gemm_f32(add ? GEMM_ADD : 0, N, in, out, dy, out, llama_floats(a, w, 0, (int64_t)out * in), in,
             dx, in);
    if (w->g) gemm_f32(GEMM_TRANS_A | GEMM_ADD, out, in, N, dy, out, x, in, w->g, in);
    for (int i = 0; bias->g && i < N; i++) {
        const float *row = dy + (ptrdiff_t)i * out;
        for (int j = 0; j < out; j++) bias->g[j] += row[j];
    }
    if (!A->w) return;
    const int R = a->desc.rank;
    llama_low(a, a->low, x, A, N, in);
    gemm_f32(0, N, R, out, dy, out, (const float *)B->w, R, a->dlow, R);
    for (ptrdiff_t i = 0; i < (ptrdiff_t)N * R; i++) a->dlow[i] *= a->desc.lora_scale;
    if (B->g) gemm_f32(GEMM_TRANS_A | GEMM_ADD, out, R, N, dy, out, a->low, R, B->g, R);
    if (A->g) gemm_f32(GEMM_TRANS_A | GEMM_ADD, R, in, N, a->dlow, R, x, in, A->g, in);
    gemm_f32(GEMM_ADD, N, in, R, a->dlow, R, (const float *)A->w, in, dx, in);
}

/* ---- SwiGLU ---------------------------------------------------------------------------------- */

/* out(count) = silu(gate) * up */
static inline void llama_swiglu_forward(float *GEMM_RESTRICT out, const float *GEMM_RESTRICT gate,
                                        const float *GEMM_RESTRICT up, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) out[i] = gate[i] / (1.0f + gemm_exp(-gate[i])) * up[i];
}

/* dgate(count) holds the gradient of the output, and becomes that of gate; dup(count) = that of
   up */
static inline void llama_swiglu_backward(float *GEMM_RESTRICT dgate, float *GEMM_RESTRICT dup,
                                         const float *GEMM_RESTRICT gate,
                                         const float *GEMM_RESTRICT up, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) {
        const float g = gate[i], s = 1.0f / (1.0f + gemm_exp(-g)), d = dgate[i];
        dup[i] = d * g * s;
        dgate[i] = d * up[i] * s * (1.0f + g * (1.0f - s));
    }
}

/* ---- a layer --------------------------------------------------------------------------------- */

static inline void llama_add(float *GEMM_RESTRICT y, const float *GEMM_RESTRICT x,
                             ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) y[i] += x[i];
}

/* a->n = RMSNorm of x with a layer's parameter */
static inline void llama_layer_norm(const llama_config *c, llama_acts *a, const llama_layer *layer,
                                    int param, const float *x, int N) {
    const float *w = llama_floats(a, &layer->p[param], 0, c->hidden);
    llama_norm_forward(a->n, x, w, N, c->hidden, c->eps);
}

/* Norms and rotates the heads of q or k. With qk_norm raw holds them, else x does. */
static inline void llama_heads_forward(const llama_config *c, llama_acts *a,
                                       const llama_param *norm, float *x, const float *raw, int B,
                                       int heads) {
    const ptrdiff_t rows = (ptrdiff_t)B * a->desc.context * heads;
    const int D = c->head_dim;
    if (raw) llama_norm_forward(x, raw, llama_floats(a, norm, 0, D), rows, D, c->eps);
    llama_rope(a, x, B, heads, D, 1.0f);
}

static inline void llama_heads_backward(const llama_config *c, llama_acts *a,
                                        const llama_param *norm, float *dx, const float *raw, int B,
                                        int heads) {
    const ptrdiff_t rows = (ptrdiff_t)B * a->desc.context * heads;
    const int D = c->head_dim;
    llama_rope(a, dx, B, heads, D, -1.0f);
    if (!raw) return;
    llama_norm_backward(dx, 0, norm->g, dx, raw, llama_floats(a, norm, 0, D), rows, D, c->eps);
}

/* y(N, C) from x(N, C) of layer l; keeps what its backward needs, and with a cache adds keys and
   values to it */
static inline void llama_layer_forward(const llama_config *c, llama_acts *a,
                                       const llama_layer *layer, int l, const float *x, float *y,
                                       int B) {
    const llama_kept *k = &a->kept[l];
    const int N = B * a->desc.context;
    const ptrdiff_t past = (ptrdiff_t)a->past * c->kv_heads * c->head_dim;
    float *new_k = k->k + past, *new_v = k->v + past;
    llama_layer_norm(c, a, layer, LLAMA_NORM1, x, N);
    llama_linear_forward(c, a, layer, LLAMA_Q, k->q_raw ? k->q_raw : k->q, a->n, N);
    llama_linear_forward(c, a, layer, LLAMA_K, k->k_raw ? k->k_raw : new_k, a->n, N);
    llama_linear_forward(c, a, layer, LLAMA_V, new_v, a->n, N);
    llama_heads_forward(c, a, &layer->p[LLAMA_NORM_Q], k->q, k->q_raw, B, c->heads);
    llama_heads_forward(c, a, &layer->p[LLAMA_NORM_K], new_k, k->k_raw, B, c->kv_heads);
    llama_attention_forward(c, a, k, B);
    llama_linear_forward(c, a, layer, LLAMA_O, k->mid, k->o, N);
    llama_add(k->mid, x, (ptrdiff_t)N * c->hidden);
    llama_layer_norm(c, a, layer, LLAMA_NORM2, k->mid, N);
    llama_linear_forward(c, a, layer, LLAMA_GATE, k->gate, a->n, N);
    llama_linear_forward(c, a, layer, LLAMA_UP, k->up, a->n, N);
    llama_swiglu_forward(a->act, k->gate, k->up, (ptrdiff_t)N * c->inner);
    llama_linear_forward(c, a, layer, LLAMA_DOWN, y, a->act, N);
    llama_add(y, k->mid, (ptrdiff_t)N * c->hidden);
}

/* a->dx(N, C) holds the gradient of the layer's output, and becomes that of its input x */
static inline void llama_layer_backward(const llama_config *c, llama_acts *a,
                                        const llama_layer *layer, int l, const float *x, int B) {
    const llama_kept *k = &a->kept[l];
    const llama_param *norm1 = &layer->p[LLAMA_NORM1], *norm2 = &layer->p[LLAMA_NORM2];
    const int N = B * a->desc.context, C = c->hidden;
    // MLP; dx passes through the residual connection, and the branch is added to it
    llama_swiglu_forward(a->act, k->gate, k->up, (ptrdiff_t)N * c->inner);
    llama_linear_backward(c, a, layer, LLAMA_DOWN, a->dgate, 0, a->dx, a->act, N);
    llama_swiglu_backward(a->dgate, a->dup, k->gate, k->up, (ptrdiff_t)N * c->inner);
    llama_layer_norm(c, a, layer, LLAMA_NORM2, k->mid, N);
    llama_linear_backward(c, a, layer, LLAMA_GATE, a->d2, 0, a->dgate, a->n, N);
    llama_linear_backward(c, a, layer, LLAMA_UP, a->d2, 1, a->dup, a->n, N);
    llama_norm_backward(a->dx, 1, norm2->g, a->d2, k->mid, llama_floats(a, norm2, 0, C), N, C,
                        c->eps);
    // attention
    llama_linear_backward(c, a, layer, LLAMA_O, a->d1, 0, a->dx, k->o, N);
    llama_attention_backward(c, a, k, a->d1, B);
    llama_heads_backward(c, a, &layer->p[LLAMA_NORM_Q], a->dq, k->q_raw, B, c->heads);
    llama_heads_backward(c, a, &layer->p[LLAMA_NORM_K], a->dk, k->k_raw, B, c->kv_heads);
    llama_layer_norm(c, a, layer, LLAMA_NORM1, x, N);
    llama_linear_backward(c, a, layer, LLAMA_Q, a->d2, 0, a->dq, a->n, N);
    llama_linear_backward(c, a, layer, LLAMA_K, a->d2, 1, a->dk, a->n, N);
    llama_linear_backward(c, a, layer, LLAMA_V, a->d2, 1, a->dv, a->n, N);
    llama_norm_backward(a->dx, 1, norm1->g, a->d2, x, llama_floats(a, norm1, 0, C), N, C, c->eps);
}

/* ---- embedding, head and loss ---------------------------------------------------------------- */

/* x(N, C) = rows of the embedding(V, C) */
static inline void llama_embed_forward(const llama_config *c, const llama_acts *a,
                                       const llama_param *embed, float *x, const int32_t *tokens,
                                       int N) {
    const int C = c->hidden;
    for (int i = 0; i < N; i++, x += C) {
        const int64_t first = (int64_t)tokens[i] * C;
        if (embed->kind) a->desc.convert(x, embed->w, embed->kind, first, C);
        else memcpy(x, (const float *)embed->w + first, (size_t)C * sizeof *x);
    }
}

/* embed->g(V, C) += a->dx(N, C) */
static inline void llama_embed_backward(const llama_config *c, const llama_acts *a,
                                        const llama_param *embed, const int32_t *tokens, int N) {
    for (int i = 0; embed->g && i < N; i++) {
        llama_add(embed->g + (ptrdiff_t)tokens[i] * c->hidden, a->dx + (ptrdiff_t)i * c->hidden,
                  c->hidden);
    }
}

/* Returns the cross entropy of a row of V logits, in nats. The logits become e^(logit - max),
   and *total their sum. Blocks of 256 are added in double: with eight running f32 sums over all
   of V the loss of 49,152 tokens was wrong by 4e-6. */
static inline double llama_row_loss(float *logits, int V, int label, double *total) {
    const float max = gemm_max(logits, V), logit = logits[label] - max;
    double sum = 0.0;
    for (int v = 0; v < V; v++) logits[v] = gemm_exp(logits[v] - max);
    for (int v = 0; v < V; v += 256) sum += (double)gemm_sum(logits + v, V - v < 256 ? V - v : 256);
    *total = sum;
    return log(sum) - (double)logit;
}

/* logits(rows, V) = h(rows, C) * head^T with `back` 0. Else dh(rows, C) = logits * head, and
   head->g += logits^T h. A head that is converted passes through a->room in groups of rows. */
static inline void llama_head_products(const llama_config *c, llama_acts *a,
                                       const llama_param *head, int back, const float *h, float *dh,
                                       int rows) {
    const int C = c->hidden, V = c->vocab;
    const int most = head->kind && a->room_numel / C < V ? (int)(a->room_numel / C) : V;
    for (int v = 0; v < V; v += most) {
        const int count = V - v < most ? V - v : most;
        const float *w = llama_floats(a, head, (int64_t)v * C, (int64_t)count * C);
        float *logits = a->logits + v;
        if (back) gemm_f32(v ? GEMM_ADD : 0, rows, C, count, logits, V, w, C, dh, C);
        else gemm_f32(GEMM_TRANS_B, rows, count, C, h, C, w, C, logits, V);
    }
    if (back && head->g) {
        gemm_f32(GEMM_TRANS_A | GEMM_ADD, V, C, rows, a->logits, V, h, C, head->g, C);
    }
}

/* Returns the summed cross entropy of the labels(N) that are not negative. h(N, C) are states after
   the last norm. scale 0: forward only; else dh(N, C) = the gradient of scale times the sum, and
   head->g +=. logits_out(N, V) may be NULL. Chunks begin and end with rows that count. */
static inline double llama_loss(const llama_config *c, llama_acts *a, const llama_param *head,
                                const float *h, float *dh, const int32_t *labels, int N,
                                double scale, float *logits_out) {
    const int C = c->hidden, V = c->vocab;
    double loss = 0.0, total;
    for (int first = 0, rows; first < N; first += rows) {
        const float *h0 = h + (ptrdiff_t)first * C;
        float *dh0 = dh + (ptrdiff_t)first * C;
        rows = labels[first] < 0 && !logits_out ? 0 : gemm_min(a->desc.loss_rows, N - first);
        while (!logits_out && rows && labels[first + rows - 1] < 0) rows--;
        if (!rows) {
            if (scale != 0.0) memset(dh0, 0, (size_t)C * sizeof *dh0);
            rows = 1;
            continue;
        }
        llama_head_products(c, a, head, 0, h0, NULL, rows);
        if (logits_out) {
            memcpy(logits_out + (ptrdiff_t)first * V, a->logits,
                   (size_t)rows * (size_t)V * sizeof *logits_out);
        }
        for (int i = 0; i < rows; i++) {
            float *p = a->logits + (ptrdiff_t)i * V;
            const int label = labels[first + i];
            if (label < 0) {
                memset(p, 0, (size_t)V * sizeof *p);
                continue;
            }
            loss += llama_row_loss(p, V, label, &total);
            const float part = (float)(scale / total);
            for (int v = 0; v < V; v++) p[v] *= part;
            p[label] -= (float)scale;
        }
        if (scale != 0.0) llama_head_products(c, a, head, 1, h0, dh0, rows);
    }
    return loss;
}

#endif // LLAMA_H
