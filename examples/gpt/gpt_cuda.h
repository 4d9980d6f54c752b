/* gpt_cuda.h - the functions of gpt.h on a GPU: products by cuBLAS, all else by simple kernels

   Same pieces, same order, with a gpt_cuda in front that says on which stream. Nothing here waits
   for the GPU, and nothing but create and destroy allocates; cuBLAS takes memory of its own. A failure is kept in the gpt_cuda;
   what is called after it does nothing.

   Numbers. Parameters, their gradients, activations and the gradients of activations are all of one
   type E: float, or gpu_bf16 (gpt_cuda.bf16). So nothing is converted between two kernels: each one
   loads E, computes in f32 registers and stores E. f32 remain the residual stream (bf16, of 8 bits,
   would lose what a layer adds to it), logits, statistics of norms, and all sums, those of cuBLAS
   included. Sums have a fixed order, no atomics: two runs give the same bits.

   Memory. A kernel takes less time for its arithmetic than for its bytes. Therefore it loads and
   stores 16 bytes at once, does all that is to be done between two products (bias and GELU; bias,
   residual and norm; bias and the order of heads), and attention leaves out the future: see there.

   Gradients of parameters are stored (=), where gpt.h adds (+=): a step is one backward, so that
   nothing is there to add to. wte alone is used twice: the head stores its gradient, and the
   embedding, whose backward is the last one, adds to it.

   SPDX-License-Identifier: MIT */
#ifndef GPT_CUDA_H
#define GPT_CUDA_H

#include "examples/common/cuda.h" // gpu_*
#include "examples/gpt/gpt.h"     // gpt_config

struct gpt_cuda : gpu_math {
    int bf16;     // 1: E is gpu_bf16; 0: float
    char *memory; // one allocation: the arrays below, then gpt_arrays
    size_t nbytes;
    uint8_t *inputs, *targets; // (B, T)
    double *loss;              // (1), mean of the rows
    char *arrays;
};

/* ---- residual and layer norm ----------------------------------------------------------------- */

// sums(2, groups, cols): of d, and of d times the normed x
template <class E> struct gpt_sum_norm {
    float *sums;
    const E *d;
    const float *x, *mean, *rstd;
    int rows, cols, groups;
    GPU_RUN void run(int64_t warp) const {
        const gpu_tile_of tile(warp, rows, cols);
        for (int c = tile.left + GPU_8 * gpu_lane(); c < tile.right; c += GPU_STRIDE) {
            gpu_8 sum = {}, sum_n = {};
            for (int i = tile.top; i < tile.bottom; i++) {
                const gpu_8 di = gpu_load(d + (int64_t)i * cols, c, cols);
                const gpu_8 xi = gpu_load(x + (int64_t)i * cols, c, cols);
                const float m = mean[i], s = rstd[i];
                sum = gpu_add(sum, di);
                for (int k = 0; k < GPU_8; k++) sum_n.at[k] += di.at[k] * ((xi.at[k] - m) * s);
            }
            gpu_store(sums + (int64_t)tile.group * cols, c, cols, sum);
            gpu_store(sums + ((int64_t)groups + tile.group) * cols, c, cols, sum_n);
        }
    }
};

// x = add + branch + bias: the end of a branch
template <class E> struct gpt_residual {
    float *x;
    const float *add;
    const E *branch, *bias;
    int C;
    GPU_RUN gpu_8 part(int64_t row, int c) const {
        const gpu_8 b = gpu_add(gpu_load(branch + row * C, c, C), gpu_load(bias, c, C));
        const gpu_8 sum = gpu_add(gpu_load(add + row * C, c, C), b);
        gpu_store(x + row * C, c, C, sum);
        return sum;
    }
    GPU_RUN void run(int64_t row) const {
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) part(row, c);
    }
};

// The norm of the rows of x; if there is a branch, x is made of it first.
template <class E> struct gpt_norm_rows {
    E *out;
    float *mean, *rstd;
    const float *x;
    const E *w, *b;
    int C;
    gpt_residual<E> residual; // its x is x; x NULL: none
    GPU_RUN void run(int64_t row) const {
        const float *xi = x + row * C;
        float sum = 0.0f, squares = 0.0f;
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            const gpu_8 v = residual.x ? residual.part(row, c) : gpu_load(xi, c, C);
            for (int k = 0; k < GPU_8; k++) sum += v.at[k];
        }
        const float m = gpu_join_sum(sum) / (float)C;
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            const gpu_8 v = gpu_load(xi, c, C);
            for (int k = 0; k < GPU_8; k++) {
                if (c + k < C) squares += (v.at[k] - m) * (v.at[k] - m);
            }
        }
        const float s = 1.0f / sqrtf(gpu_join_sum(squares) / (float)C + GPT_LN_EPS);
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            const gpu_8 wc = gpu_load(w, c, C), bc = gpu_load(b, c, C);
            gpu_8 v = gpu_load(xi, c, C);
            for (int k = 0; k < GPU_8; k++) v.at[k] = (v.at[k] - m) * s * wc.at[k] + bc.at[k];
            gpu_store(out + row * C, c, C, v);
        }
        if (gpu_lane() == 0) mean[row] = m, rstd[row] = s;
    }
};

template <class E> struct gpt_norm_rows_backward {
    E *dx;
    const E *dout;
    const float *x, *mean, *rstd;
    const E *w;
    int add, C;
    GPU_RUN void run(int64_t row) const {
        const E *doi = dout + row * C;
        const float *xi = x + row * C;
        E *dxi = dx + row * C;
        const float m = mean[row], s = rstd[row];
        float sum_g = 0.0f, sum_gn = 0.0f; // as in gpt.h
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            const gpu_8 d = gpu_load(doi, c, C), wc = gpu_load(w, c, C), v = gpu_load(xi, c, C);
            for (int k = 0; k < GPU_8; k++) {
                const float g = d.at[k] * wc.at[k];
                sum_g += g;
                sum_gn += g * ((v.at[k] - m) * s);
            }
        }
        const float mean_g = gpu_join_sum(sum_g) / (float)C;
        const float mean_gn = gpu_join_sum(sum_gn) / (float)C;
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            const gpu_8 d = gpu_load(doi, c, C), wc = gpu_load(w, c, C), v = gpu_load(xi, c, C);
            gpu_8 sum = {};
            if (add) sum = gpu_load(dxi, c, C);
            for (int k = 0; k < GPU_8; k++) {
                sum.at[k] += s * (d.at[k] * wc.at[k] - mean_g - (v.at[k] - m) * s * mean_gn);
            }
            gpu_store(dxi, c, C, sum);
        }
    }
};

/* dx(BT, C) = or += the gradient; dw(C) and db(C) = */
template <class E>
static void gpt_norm_backward(gpt_cuda *gpu, float *sums, E *dx, int add, E *dw, E *db,
                              const E *dout, const float *x, const E *w, const float *mean,
                              const float *rstd, int BT, int C) {
    const int groups = (int)gpu_pieces(BT, GPU_SUM_ROWS);
    const gpt_sum_norm<E> some = {sums, dout, x, mean, rstd, BT, C, groups};
    const gpt_norm_rows_backward<E> rows = {dx, dout, x, mean, rstd, w, add, C};
    gpu_launch(gpu, gpu_tiles(BT, C), some);
    gpu_join_groups(gpu, db, dw, sums, BT, C);
    gpu_launch(gpu, BT, rows);
}

/* ---- bias and GELU --------------------------------------------------------------------------- */

// out = gelu(fc + bias). The sum is not stored: the backward adds once more.
template <class E> struct gpt_gelu {
    E *out;
    const E *fc, *bias;
    int cols;
    GPU_RUN void run(int64_t row) const {
        for (int c = GPU_8 * gpu_lane(); c < cols; c += GPU_STRIDE) {
            gpu_8 x = gpu_add(gpu_load(fc + row * cols, c, cols), gpu_load(bias, c, cols));
            for (int k = 0; k < GPU_8; k++) {
                const float v = x.at[k];
                x.at[k] = v / (1.0f + expf(-GPT_GELU_A * (v + GPT_GELU_B * v * v * v)));
            }
            gpu_store(out + row * cols, c, cols, x);
        }
    }
};

// d: gradient of the output, becomes that of the input; its columns are summed on the way.
template <class E> struct gpt_gelu_slope {
    E *d;
    float *sums;
    const E *fc, *bias;
    int rows, cols;
    GPU_RUN void run(int64_t warp) const {
        const gpu_tile_of tile(warp, rows, cols);
        for (int c = tile.left + GPU_8 * gpu_lane(); c < tile.right; c += GPU_STRIDE) {
            const gpu_8 b = gpu_load(bias, c, cols);
            gpu_8 sum = {};
            for (int i = tile.top; i < tile.bottom; i++) {
                const gpu_8 x = gpu_add(gpu_load(fc + (int64_t)i * cols, c, cols), b);
                gpu_8 di = gpu_load(d + (int64_t)i * cols, c, cols);
                for (int k = 0; k < GPU_8; k++) {
                    const float v = x.at[k];
                    const float s = 1.0f /
                                    (1.0f + expf(-GPT_GELU_A * (v + GPT_GELU_B * v * v * v)));
                    const float slope = GPT_GELU_A * (1.0f + 3.0f * GPT_GELU_B * v * v);
                    di.at[k] *= s + v * s * (1.0f - s) * slope;
                }
                sum = gpu_add(sum, di);
                gpu_store(d + (int64_t)i * cols, c, cols, di);
            }
            gpu_store(sums + (int64_t)tile.group * cols, c, cols, sum);
        }
    }
};

/* ---- causal self-attention ------------------------------------------------------------------- */

// Two arrays differ from gpt.h: qkv of a block is kept as (3, B, H, T, S), so that all heads are
// one batched product, and datt is (B, H, T, T).
//
// Scores of the future are not needed. As in gpt.h, positions are computed in spans: those of a
// span look at the columns up to its end, and what is right of them is neither written nor read.
// With a context of 1,024 that leaves out 3/8 of the bytes and of the arithmetic.
enum { GPT_SPAN = 256 };

// Returns the end of the columns of position t.
GPU_SHARED int gpt_span_end(int t, int T) {
    const int end = (t / GPT_SPAN + 1) * GPT_SPAN;
    return end < T ? end : T;
}

// rows(B, T, parts, H, S) <-> heads(parts, B, H, T, S); to heads with the bias, if there is one
template <class E> struct gpt_heads {
    E *rows, *heads;
    const E *bias;               // (parts, H, S)
    int B, T, H, S, parts, join; // join: from heads to rows
    GPU_RUN void run(int64_t row) const {
        const int C = H * S, t = (int)(row % T), pieces = (S + GPU_8 - 1) / GPU_8;
        for (int i = gpu_lane(); i < parts * H * pieces; i += GPU_LANES) {
            const int part = i / pieces / H, h = i / pieces % H, s = i % pieces * GPU_8;
            const int64_t head = ((int64_t)part * B + row / T) * H + h;
            E *in_heads = heads + (head * T + t) * S,
              *in_row = rows + row * parts * C + i / pieces * S;
            gpu_8 x = gpu_load(join ? in_heads : in_row, s, S);
            if (bias) x = gpu_add(x, gpu_load(bias + i / pieces * S, s, S));
            gpu_store(join ? in_row : in_heads, s, S, x);
        }
    }
};

// Scores of a row become probabilities; zero in the future of its span. The largest score and the
// sum of the exponentials are found in one pass: the sum follows when a larger score comes.
template <class E> struct gpt_softmax {
    E *att;
    int T;
    float scale;
    GPU_RUN void run(int64_t row) const {
        E *p = att + row * T;
        const int t = (int)(row % T), seen = t + 1, end = gpt_span_end(t, T);
        float max = gpu_wide(p[0]), sum = 0.0f;
        for (int j = GPU_8 * gpu_lane(); j < seen; j += GPU_STRIDE) {
            const gpu_8 x = gpu_load(p, j, end);
            const float before = max;
            for (int k = 0; k < GPU_8; k++) {
                if (j + k < seen) max = gpu_larger(max, x.at[k]);
            }
            sum *= expf((before - max) * scale);
            for (int k = 0; k < GPU_8; k++) {
                if (j + k < seen) sum += expf((x.at[k] - max) * scale);
            }
        }
        const float top = gpu_join_max(max);
        const float norm = 1.0f / gpu_join_sum(sum * expf((max - top) * scale));
        for (int j = GPU_8 * gpu_lane(); j < end; j += GPU_STRIDE) {
            gpu_8 x = gpu_load(p, j, end);
            for (int k = 0; k < GPU_8; k++) {
                x.at[k] = j + k < seen ? expf((x.at[k] - top) * scale) * norm : 0.0f;
            }
            gpu_store(p, j, end, x);
        }
    }
};

// Gradients of probabilities become those of the unscaled scores: zero where a probability is.
template <class E> struct gpt_softmax_backward {
    E *datt;
    const E *att;
    int T;
    float scale;
    GPU_RUN void run(int64_t row) const {
        E *d = datt + row * T;
        const E *p = att + row * T;
        const int end = gpt_span_end((int)(row % T), T);
        float sum = 0.0f;
        for (int j = GPU_8 * gpu_lane(); j < end; j += GPU_STRIDE) {
            const gpu_8 pj = gpu_load(p, j, end), dj = gpu_load(d, j, end);
            for (int k = 0; k < GPU_8; k++) sum += pj.at[k] * dj.at[k];
        }
        const float mean = gpu_join_sum(sum);
        for (int j = GPU_8 * gpu_lane(); j < end; j += GPU_STRIDE) {
            const gpu_8 pj = gpu_load(p, j, end);
            gpu_8 dj = gpu_load(d, j, end);
            for (int k = 0; k < GPU_8; k++) dj.at[k] = pj.at[k] * (dj.at[k] - mean) * scale;
            gpu_store(d, j, end, dj);
        }
    }
};

template <class E>
static void gpt_move_heads(gpt_cuda *gpu, const gpt_config *cfg, E *rows, E *heads, const E *bias,
                           int parts, int join) {
    const int B = cfg->batch, T = cfg->context, H = cfg->heads, S = cfg->channels / H;
    const gpt_heads<E> kernel = {rows, heads, bias, B, T, H, S, parts, join};
    gpu_launch(gpu, (int64_t)B * T, kernel);
}

/* y(B, H, T, S) from qkv(3, B, H, T, S); att(B, H, T, T) keeps the probabilities */
template <class E>
static void gpt_attention_forward_on(gpt_cuda *gpu, const gpt_config *cfg, E *y, E *att,
                                     const E *qkv) {
    const int T = cfg->context, S = cfg->channels / cfg->heads, BH = cfg->batch * cfg->heads;
    const long long TS = (long long)T * S, TT = (long long)T * T; // elements of a head
    const E *q = qkv, *k = q + BH * TS, *v = k + BH * TS;
    const gpt_softmax<E> softmax = {att, T, 1.0f / sqrtf((float)S)};
    for (int t = 0; t < T; t += GPT_SPAN) {
        const int end = gpt_span_end(t, T), rows = end - t;
        gpu_matmul(gpu, GEMM_TRANS_B, rows, end, S, gpu_matrix(q + (long long)t * S, S, TS),
                   gpu_matrix(k, S, TS), gpu_matrix(att + (long long)t * T, T, TT), BH);
    }
    gpu_launch(gpu, (int64_t)BH * T, softmax);
    for (int t = 0; t < T; t += GPT_SPAN) {
        const int end = gpt_span_end(t, T), rows = end - t;
        gpu_matmul(gpu, 0, rows, S, end, gpu_matrix(att + (long long)t * T, T, TT),
                   gpu_matrix(v, S, TS), gpu_matrix(y + (long long)t * S, S, TS), BH);
    }
}

/* dqkv(3, B, H, T, S) from dy(B, H, T, S); datt(B, H, T, T): room. A span of rows has all that its
   queries need; a span of columns, from its own rows down, what its keys and values need. */
template <class E>
static void gpt_attention_backward_on(gpt_cuda *gpu, const gpt_config *cfg, E *dqkv, E *datt,
                                      const E *dy, const E *qkv, const E *att) {
    const int T = cfg->context, S = cfg->channels / cfg->heads, BH = cfg->batch * cfg->heads;
    const long long TS = (long long)T * S, TT = (long long)T * T;
    const E *q = qkv, *k = q + BH * TS, *v = k + BH * TS;
    E *dq = dqkv, *dk = dq + BH * TS, *dv = dk + BH * TS;
    const gpt_softmax_backward<E> softmax = {datt, att, T, 1.0f / sqrtf((float)S)};
    for (int t = 0; t < T; t += GPT_SPAN) {
        const int end = gpt_span_end(t, T), rows = end - t;
        gpu_matmul(gpu, GEMM_TRANS_B, rows, end, S, gpu_matrix(dy + (long long)t * S, S, TS),
                   gpu_matrix(v, S, TS), gpu_matrix(datt + (long long)t * T, T, TT), BH);
    }
    gpu_launch(gpu, (int64_t)BH * T, softmax);
    for (int t = 0; t < T; t += GPT_SPAN) {
        const int end = gpt_span_end(t, T), span = end - t, below = T - t;
        const long long at = (long long)t * S, row = (long long)t * T, corner = row + t;
        gpu_matmul(gpu, 0, span, S, end, gpu_matrix(datt + row, T, TT), gpu_matrix(k, S, TS),
                   gpu_matrix(dq + at, S, TS), BH);
        gpu_matmul(gpu, GEMM_TRANS_A, span, S, below, gpu_matrix(datt + corner, T, TT),
                   gpu_matrix(q + at, S, TS), gpu_matrix(dk + at, S, TS), BH);
        gpu_matmul(gpu, GEMM_TRANS_A, span, S, below, gpu_matrix(att + corner, T, TT),
                   gpu_matrix(dy + at, S, TS), gpu_matrix(dv + at, S, TS), BH);
    }
}

/* ---- embedding and loss ---------------------------------------------------------------------- */

template <class E> struct gpt_embed {
    float *x;
    const E *wte, *wpe;
    const uint8_t *tokens;
    int T, C;
    GPU_RUN void run(int64_t row) const {
        const E *te = wte + (int64_t)tokens[row] * C, *pe = wpe + row % T * C;
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            gpu_store(x + row * C, c, C, gpu_add(gpu_load(te, c, C), gpu_load(pe, c, C)));
        }
    }
};

// A row of zeros with a one at its token.
template <class E> struct gpt_one_hot {
    E *rows;
    const uint8_t *tokens;
    int V;
    GPU_RUN void run(int64_t row) const {
        const int token = tokens[row];
        for (int v = GPU_8 * gpu_lane(); v < V; v += GPU_STRIDE) {
            gpu_8 x;
            for (int k = 0; k < GPU_8; k++) x.at[k] = v + k == token ? 1.0f : 0.0f;
            gpu_store(rows + row * V, v, V, x);
        }
    }
};

template <class E> struct gpt_positions_backward {
    E *g;
    const E *dx;
    int B, T, C;
    GPU_RUN void run(int64_t t) const {
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            gpu_8 sum = {};
            for (int b = 0; b < B; b++) {
                sum = gpu_add(sum, gpu_load(dx + ((int64_t)b * T + t) * C, c, C));
            }
            gpu_store(g + t * C, c, C, sum);
        }
    }
};

// Loss of a row, and the gradients of its logits in the mean loss. A token is a byte, so that the
// registers of a warp have room for the row: it is read once.
enum { GPT_HELD = 256 / GPU_STRIDE };

template <class E> struct gpt_cross_entropy {
    E *dlogits;
    float *row_loss;
    const float *logits;
    const uint8_t *targets;
    int V;
    float share;
    GPU_RUN void run(int64_t row) const {
        const float *of = logits + row * V;
        const int target = targets[row], first = GPU_8 * gpu_lane();
        gpu_8 p[GPT_HELD];
        float max = of[target], sum = 0.0f;
        for (int i = 0; i < GPT_HELD; i++) {
            const int v = first + i * GPU_STRIDE;
            p[i] = gpu_load(of, v, V);
            for (int k = 0; k < GPU_8; k++) {
                if (v + k < V) max = gpu_larger(max, p[i].at[k]);
            }
        }
        max = gpu_join_max(max);
        for (int i = 0; i < GPT_HELD; i++) {
            for (int k = 0; k < GPU_8; k++) {
                p[i].at[k] = expf(p[i].at[k] - max);
                if (first + i * GPU_STRIDE + k < V) sum += p[i].at[k];
            }
        }
        const float total = gpu_join_sum(sum);
        for (int i = 0; i < GPT_HELD; i++) {
            const int v = first + i * GPU_STRIDE;
            for (int k = 0; k < GPU_8; k++) {
                p[i].at[k] = (p[i].at[k] / total - (v + k == target ? 1.0f : 0.0f)) * share;
            }
            gpu_store(dlogits + row * V, v, V, p[i]);
        }
        if (gpu_lane() == 0) row_loss[row] = logf(total) - (of[target] - max);
    }
};

struct gpt_mean_loss {
    double *loss;
    const float *row_loss;
    int BT;
    GPU_RUN void run(int64_t) const {
        double sum = 0.0;
        for (int i = GPU_8 * gpu_lane(); i < BT; i += GPU_STRIDE) {
            const gpu_8 x = gpu_load(row_loss, i, BT);
            for (int k = 0; k < GPU_8; k++) sum += (double)x.at[k];
        }
        sum = gpu_join_sum(sum);
        if (gpu_lane() == 0) *loss = sum / BT;
    }
};

/* ---- arrays ---------------------------------------------------------------------------------- */

// Those of gpt_block_acts have the layers of the model as their first dimension.
template <class E> struct gpt_arrays {
    float *x, *mid;                                   // (L+1, B, T, C), (L, B, T, C)
    float *ln1_mean, *ln1_rstd, *ln2_mean, *ln2_rstd; // (L, B, T)
    E *ln1, *atty, *ln2;                              // (L, B, T, C)
    E *qkv;                                           // (L, 3, B, H, T, S)
    E *att;                                           // (L, B, H, T, T)
    E *fc, *gelu;                                     // (L, B, T, 4C); fc without the bias
    float *lnf_mean, *lnf_rstd, *row_loss;            // (B, T)
    E *lnf;                                           // (B, T, C)
    float *logits;                                    // (B, T, V)
    E *dlogits;                                       // (B, T, V)
    // scratch
    float *sums; // (2, groups of rows, 4C)
    E *dx, *d1;  // (B, T, C); dx: gradient of the residual stream
    E *d3, *d4;  // (B, T, 3C), (B, T, 4C)
    E *datt;     // (B, H, T, T)
};

/* Divides the memory at `at` among the arrays; the bytes. */
template <class E> static size_t gpt_place(const gpt_config *cfg, char *at, gpt_arrays<E> *a) {
    const size_t BT = (size_t)cfg->batch * (size_t)cfg->context, C = (size_t)cfg->channels;
    const size_t L = (size_t)cfg->layers, V = (size_t)cfg->vocab;
    const size_t scores = BT * (size_t)cfg->heads * (size_t)cfg->context;
    const size_t groups = (BT + GPU_SUM_ROWS - 1) / GPU_SUM_ROWS;
    size_t used = 0;
    gpu_take_array(&a->x, at, &used, (L + 1) * BT * C);
    gpu_take_array(&a->mid, at, &used, L * BT * C);
    gpu_take_array(&a->ln1_mean, at, &used, L * BT);
    gpu_take_array(&a->ln1_rstd, at, &used, L * BT);
    gpu_take_array(&a->ln2_mean, at, &used, L * BT);
    gpu_take_array(&a->ln2_rstd, at, &used, L * BT);
    gpu_take_array(&a->ln1, at, &used, L * BT * C);
    gpu_take_array(&a->atty, at, &used, L * BT * C);
    gpu_take_array(&a->ln2, at, &used, L * BT * C);
    gpu_take_array(&a->qkv, at, &used, L * BT * 3 * C);
    gpu_take_array(&a->att, at, &used, L * scores);
    gpu_take_array(&a->fc, at, &used, L * BT * 4 * C);
    gpu_take_array(&a->gelu, at, &used, L * BT * 4 * C);
    gpu_take_array(&a->lnf_mean, at, &used, BT);
    gpu_take_array(&a->lnf_rstd, at, &used, BT);
    gpu_take_array(&a->row_loss, at, &used, BT);
    gpu_take_array(&a->lnf, at, &used, BT * C);
    gpu_take_array(&a->logits, at, &used, BT * V);
    gpu_take_array(&a->dlogits, at, &used, BT * V);
    gpu_take_array(&a->sums, at, &used, 2 * groups * 4 * C);
    gpu_take_array(&a->dx, at, &used, BT * C);
    gpu_take_array(&a->d1, at, &used, BT * C);
    gpu_take_array(&a->d3, at, &used, BT * 3 * C);
    gpu_take_array(&a->d4, at, &used, BT * 4 * C);
    gpu_take_array(&a->datt, at, &used, scores);
    return used;
}

template <class E> static gpt_arrays<E> gpt_arrays_of(const gpt_cuda *gpu, const gpt_config *cfg) {
    gpt_arrays<E> a;
    gpt_place(cfg, gpu->arrays, &a);
    return a;
}

// Parameters, or their gradients, as what they are.
template <class E> struct gpt_params {
    void *const *at;
    E *operator[](int i) const { return (E *)at[i]; }
};

// Where layer l begins in an array of (L, B, T, width).
static inline size_t gpt_layer(const gpt_config *cfg, int l, int width = 1) {
    return (size_t)l * (size_t)cfg->batch * (size_t)cfg->context * (size_t)width;
}

/* ---- the pieces of gpt.h, of either type ----------------------------------------------------- */

template <class E>
static void gpt_cuda_norm_forward(gpt_cuda *gpu, E *out, float *mean, float *rstd, const float *x,
                                  const E *w, const E *b, int BT, int C) {
    const gpt_norm_rows<E> kernel = {out, mean, rstd, x, w, b, C, {NULL, NULL, NULL, NULL, 0}};
    gpu_launch(gpu, BT, kernel);
}

template <class E>
static void gpt_cuda_attention_forward(gpt_cuda *gpu, const gpt_config *cfg, const gpt_arrays<E> &a,
                                       int l, const E *bias) {
    const int C = cfg->channels;
    E *qkv = a.qkv + gpt_layer(cfg, l, 3 * C);
    E *att = a.att + gpt_layer(cfg, l, cfg->heads * cfg->context);
    gpt_move_heads(gpu, cfg, a.d4, qkv, bias, 3, 0);
    gpt_attention_forward_on(gpu, cfg, a.d3, att, qkv);
    gpt_move_heads(gpu, cfg, a.atty + gpt_layer(cfg, l, C), a.d3, (const E *)NULL, 1, 1);
}

template <class E>
static void gpt_cuda_block_forward(gpt_cuda *gpu, const gpt_config *cfg, const gpt_arrays<E> &a,
                                   void *const *w, int l) {
    const gpt_params<E> p = {w};
    const int C = cfg->channels, BT = cfg->batch * cfg->context;
    const size_t row = gpt_layer(cfg, l), at = gpt_layer(cfg, l, C);
    float *x_in = a.x + at, *x_out = a.x + gpt_layer(cfg, l + 1, C), *mid = a.mid + at;
    E *ln2 = a.ln2 + at, *fc = a.fc + 4 * at, *gelu = a.gelu + 4 * at;
    gpt_cuda_norm_forward(gpu, a.ln1 + at, a.ln1_mean + row, a.ln1_rstd + row, x_in, p[GPT_LN1W],
                          p[GPT_LN1B], BT, C);
    gpu_product_forward(gpu, a.d4, a.ln1 + at, p[GPT_QKVW], BT, C, 3 * C);
    gpt_cuda_attention_forward(gpu, cfg, a, l, p[GPT_QKVB]);
    gpu_product_forward(gpu, a.d1, a.atty + at, p[GPT_ATTPROJW], BT, C, C);
    const gpt_residual<E> middle = {mid, x_in, a.d1, p[GPT_ATTPROJB], C};
    const gpt_norm_rows<E> norm = {
        ln2, a.ln2_mean + row, a.ln2_rstd + row, mid, p[GPT_LN2W], p[GPT_LN2B], C, middle};
    gpu_launch(gpu, BT, norm);
    gpu_product_forward(gpu, fc, ln2, p[GPT_FCW], BT, C, 4 * C);
    const gpt_gelu<E> activation = {gelu, fc, p[GPT_FCB], 4 * C};
    gpu_launch(gpu, BT, activation);
    gpu_product_forward(gpu, a.d1, gelu, p[GPT_FCPROJW], BT, 4 * C, C);
    // The norm of the next block is not taken along: its parameters are another unit's.
    const gpt_residual<E> end = {x_out, mid, a.d1, p[GPT_FCPROJB], C};
    gpu_launch(gpu, BT, end);
}

template <class E>
static void gpt_cuda_attention_backward(gpt_cuda *gpu, const gpt_config *cfg,
                                        const gpt_arrays<E> &a, int l) {
    const int C = cfg->channels;
    const E *qkv = a.qkv + gpt_layer(cfg, l, 3 * C);
    const E *att = a.att + gpt_layer(cfg, l, cfg->heads * cfg->context), *none = NULL;
    E *dqkv = a.d4, *dy = a.d4 + gpt_layer(cfg, 1, 3 * C); // sizes of the heads: 3C and C
    gpt_move_heads(gpu, cfg, a.d1, dy, none, 1, 0);
    gpt_attention_backward_on(gpu, cfg, dqkv, a.datt, dy, qkv, att);
    gpt_move_heads(gpu, cfg, a.d3, dqkv, none, 3, 1);
}

template <class E>
static void gpt_cuda_block_backward(gpt_cuda *gpu, const gpt_config *cfg, const gpt_arrays<E> &a,
                                    void *const *w, void *const *grads, int l) {
    const gpt_params<E> p = {w}, g = {grads};
    const int C = cfg->channels, BT = cfg->batch * cfg->context;
    const size_t row = gpt_layer(cfg, l), at = gpt_layer(cfg, l, C);
    // MLP; dx passes through the residual connection, the branch is added to it
    gpu_bias_backward(gpu, a.sums, g[GPT_FCPROJB], a.dx, BT, C);
    gpu_product_backward(gpu, a.d4, g[GPT_FCPROJW], a.dx, a.gelu + 4 * at, p[GPT_FCPROJW], BT,
                         4 * C, C);
    const gpt_gelu_slope<E> activation = {a.d4, a.sums, a.fc + 4 * at, p[GPT_FCB], BT, 4 * C};
    gpu_launch(gpu, gpu_tiles(BT, 4 * C), activation);
    gpu_join_groups(gpu, g[GPT_FCB], (E *)NULL, a.sums, BT, 4 * C);
    gpu_product_backward(gpu, a.d1, g[GPT_FCW], a.d4, a.ln2 + at, p[GPT_FCW], BT, C, 4 * C);
    gpt_norm_backward(gpu, a.sums, a.dx, 1, g[GPT_LN2W], g[GPT_LN2B], a.d1, a.mid + at, p[GPT_LN2W],
                      a.ln2_mean + row, a.ln2_rstd + row, BT, C);
    // attention
    gpu_bias_backward(gpu, a.sums, g[GPT_ATTPROJB], a.dx, BT, C);
    gpu_product_backward(gpu, a.d1, g[GPT_ATTPROJW], a.dx, a.atty + at, p[GPT_ATTPROJW], BT, C, C);
    gpt_cuda_attention_backward(gpu, cfg, a, l);
    gpu_bias_backward(gpu, a.sums, g[GPT_QKVB], a.d3, BT, 3 * C);
    gpu_product_backward(gpu, a.d1, g[GPT_QKVW], a.d3, a.ln1 + at, p[GPT_QKVW], BT, C, 3 * C);
    gpt_norm_backward(gpu, a.sums, a.dx, 1, g[GPT_LN1W], g[GPT_LN1B], a.d1, a.x + at, p[GPT_LN1W],
                      a.ln1_mean + row, a.ln1_rstd + row, BT, C);
}

template <class E>
static void gpt_cuda_embed_forward(gpt_cuda *gpu, const gpt_config *cfg, const gpt_arrays<E> &a,
                                   void *const *w) {
    const gpt_params<E> p = {w};
    const gpt_embed<E> kernel = {a.x,         p[GPT_WTE],   p[GPT_WPE],
                                 gpu->inputs, cfg->context, cfg->channels};
    gpu_launch(gpu, (int64_t)cfg->batch * cfg->context, kernel);
}

// The sum over the rows of each token is a product, too: with rows of zeros that have a one at
// their token. The gradients of the logits have been used, and leave them their place.
template <class E>
static void gpt_cuda_embed_backward(gpt_cuda *gpu, const gpt_config *cfg, const gpt_arrays<E> &a,
                                    void *const *grads) {
    const gpt_params<E> g = {grads};
    const int B = cfg->batch, T = cfg->context, C = cfg->channels, V = cfg->vocab;
    const gpt_one_hot<E> ones = {a.dlogits, gpu->inputs, V};
    const gpt_positions_backward<E> positions = {g[GPT_WPE], a.dx, B, T, C};
    gpu_launch(gpu, (int64_t)B * T, ones);
    gpu_matmul(gpu, GEMM_TRANS_A | GEMM_ADD, V, C, B * T, gpu_matrix(a.dlogits, V),
               gpu_matrix(a.dx, C), gpu_matrix(g[GPT_WTE], C), 1);
    gpu_launch(gpu, T, positions);
}

template <class E>
static void gpt_cuda_head_forward(gpt_cuda *gpu, const gpt_config *cfg, const gpt_arrays<E> &a,
                                  void *const *w) {
    const gpt_params<E> p = {w};
    const int BT = cfg->batch * cfg->context, C = cfg->channels;
    gpt_cuda_norm_forward(gpu, a.lnf, a.lnf_mean, a.lnf_rstd, a.x + gpt_layer(cfg, cfg->layers, C),
                          p[GPT_LNFW], p[GPT_LNFB], BT, C);
    gpu_product_forward(gpu, a.logits, a.lnf, p[GPT_WTE], BT, C, cfg->vocab);
}

template <class E>
static void gpt_cuda_loss(gpt_cuda *gpu, const gpt_config *cfg, const gpt_arrays<E> &a) {
    const int BT = cfg->batch * cfg->context;
    const gpt_cross_entropy<E> rows = {a.dlogits,    a.row_loss, a.logits,
                                       gpu->targets, cfg->vocab, 1.0f / (float)BT};
    const gpt_mean_loss mean = {gpu->loss, a.row_loss, BT};
    gpu_launch(gpu, BT, rows);
    gpu_launch(gpu, 1, mean);
}

template <class E>
static void gpt_cuda_head_backward(gpt_cuda *gpu, const gpt_config *cfg, const gpt_arrays<E> &a,
                                   void *const *w, void *const *grads) {
    const gpt_params<E> p = {w}, g = {grads};
    const int BT = cfg->batch * cfg->context, C = cfg->channels;
    gpu_product_backward(gpu, a.d1, g[GPT_WTE], a.dlogits, a.lnf, p[GPT_WTE], BT, C, cfg->vocab);
    gpt_norm_backward(gpu, a.sums, a.dx, 0, g[GPT_LNFW], g[GPT_LNFB], a.d1,
                      a.x + gpt_layer(cfg, cfg->layers, C), p[GPT_LNFW], a.lnf_mean, a.lnf_rstd, BT,
                      C);
}

/* ---- what a trainer calls -------------------------------------------------------------------- */

// w and g: GPT_BLOCK_PARAM_COUNT or GPT_EMBED_PARAM_COUNT pointers. The batch is in gpu->inputs and
// gpu->targets; x of layer l is what block l has as its input, x of layer L what the head has.

/* x of layer 0 = wte[token] + wpe[position] */
static void gpt_cuda_embed_forward(gpt_cuda *gpu, const gpt_config *cfg, void *const *w) {
    if (gpu->bf16) gpt_cuda_embed_forward(gpu, cfg, gpt_arrays_of<gpu_bf16>(gpu, cfg), w);
    else gpt_cuda_embed_forward(gpu, cfg, gpt_arrays_of<float>(gpu, cfg), w);
}

/* x of layer l+1 from x of layer l */
static void gpt_cuda_block_forward(gpt_cuda *gpu, const gpt_config *cfg, void *const *w, int l) {
    if (gpu->bf16) gpt_cuda_block_forward(gpu, cfg, gpt_arrays_of<gpu_bf16>(gpu, cfg), w, l);
    else gpt_cuda_block_forward(gpu, cfg, gpt_arrays_of<float>(gpu, cfg), w, l);
}

/* Logits from x of layer L: final norm, then the product with wte */
static void gpt_cuda_head_forward(gpt_cuda *gpu, const gpt_config *cfg, void *const *w) {
    if (gpu->bf16) gpt_cuda_head_forward(gpu, cfg, gpt_arrays_of<gpu_bf16>(gpu, cfg), w);
    else gpt_cuda_head_forward(gpu, cfg, gpt_arrays_of<float>(gpu, cfg), w);
}

/* *gpu->loss = mean cross-entropy in nats, and its gradients by the logits */
static void gpt_cuda_loss(gpt_cuda *gpu, const gpt_config *cfg) {
    if (gpu->bf16) gpt_cuda_loss(gpu, cfg, gpt_arrays_of<gpu_bf16>(gpu, cfg));
    else gpt_cuda_loss(gpu, cfg, gpt_arrays_of<float>(gpu, cfg));
}

/* dx = gradient of x of layer L; g = but for wpe, which is not used */
static void gpt_cuda_head_backward(gpt_cuda *gpu, const gpt_config *cfg, void *const *w,
                                   void *const *g) {
    if (gpu->bf16) gpt_cuda_head_backward(gpu, cfg, gpt_arrays_of<gpu_bf16>(gpu, cfg), w, g);
    else gpt_cuda_head_backward(gpu, cfg, gpt_arrays_of<float>(gpu, cfg), w, g);
}

/* dx of layer l+1 becomes that of layer l; g[...] = the gradients of w[...] */
static void gpt_cuda_block_backward(gpt_cuda *gpu, const gpt_config *cfg, void *const *w,
                                    void *const *g, int l) {
    if (gpu->bf16) gpt_cuda_block_backward(gpu, cfg, gpt_arrays_of<gpu_bf16>(gpu, cfg), w, g, l);
    else gpt_cuda_block_backward(gpu, cfg, gpt_arrays_of<float>(gpu, cfg), w, g, l);
}

/* g[GPT_WTE] += and g[GPT_WPE] = from dx of layer 0 */
static void gpt_cuda_embed_backward(gpt_cuda *gpu, const gpt_config *cfg, void *const *g) {
    if (gpu->bf16) gpt_cuda_embed_backward(gpu, cfg, gpt_arrays_of<gpu_bf16>(gpu, cfg), g);
    else gpt_cuda_embed_backward(gpu, cfg, gpt_arrays_of<float>(gpu, cfg), g);
}

/* Logits of the last position of the first sequence, on the device, (V) */
static const float *gpt_cuda_last_logits(const gpt_cuda *gpu, const gpt_config *cfg) {
    const float *logits = gpu->bf16 ? gpt_arrays_of<gpu_bf16>(gpu, cfg).logits
                                    : gpt_arrays_of<float>(gpu, cfg).logits;
    return logits + (size_t)(cfg->context - 1) * (size_t)cfg->vocab;
}

static void gpt_cuda_destroy(gpt_cuda *gpu) {
    gpu_math_stop(gpu);
    if (gpu->memory) (void)cudaFree(gpu->memory);
    memset(gpu, 0, sizeof *gpu);
}

/* On the current device. tf32: products of f32 on tensor cores, which take 10 of its 23 bits of
   mantissa. 0 on success; else gpu->failed and ->error tell, and destroy frees.

   It takes gpu->nbytes of device memory, all that a training needs in addition to parameters,
   gradients and moments. With a long context most of it are the probabilities of attention: for
   each of the B*T positions L*H*T numbers, and L*16*C of the other activations. cuBLAS takes some
   MiB more. */
static int gpt_cuda_create(const gpt_config *cfg, int bf16, int tf32, cudaStream_t stream,
                           gpt_cuda *gpu) {
    const size_t BT = (size_t)cfg->batch * (size_t)cfg->context;
    gpt_arrays<gpu_bf16> half;
    gpt_arrays<float> single;
    size_t used = 0;
    memset(gpu, 0, sizeof *gpu);
    gpu->bf16 = bf16;
    gpu->compute = tf32 && !bf16 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    gpu->stream = stream;
    const size_t arrays = bf16 ? gpt_place(cfg, NULL, &half) : gpt_place(cfg, NULL, &single);
    gpu->nbytes = arrays + 2 * gpu_pieces(BT, 256) * 256 + 256;
    gpu_check(gpu, cudaMalloc((void **)&gpu->memory, gpu->nbytes), "activations");
    if (gpu->error) return -1;
    gpu_take_array(&gpu->inputs, gpu->memory, &used, BT);
    gpu_take_array(&gpu->targets, gpu->memory, &used, BT);
    gpu_take_array(&gpu->loss, gpu->memory, &used, 1);
    gpu->arrays = gpu->memory + used;
    return gpu_math_start(gpu);
}

#endif // GPT_CUDA_H
