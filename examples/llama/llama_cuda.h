/* llama_cuda.h - the functions of llama.h on a GPU: products by cuBLAS, all else by simple kernels

   Same pieces, same order, with a llama_cuda in front that says on which stream. Only create and
   destroy allocate, and nothing waits for the GPU. It computes training in full; adapters, frozen
   parameters of other types and the cache of a generation are left to llama.h.

   Numbers. Parameters, their gradients, activations and the gradients of activations are all of one
   type E: float, or gpu_bf16 (llama_cuda.bf16). f32 remain the residual stream, logits, the
   log-sum-exp of attention, and all sums. The sum over the vocabulary is a double. Sums have a
   fixed order, no atomics: two runs give the same bits.

   Attention has no matrix of T x T: a warp has one query, takes one key after the other, and scales
   what it has summed whenever the largest score grows. The backward computes the probabilities
   again from the log-sum-exp: a warp has a query for dq, and a key, with all queries of its group,
   for dk and dv. It was not run on a GPU, and nothing is said here of its speed.

   Gradients of parameters are always added (+=); gradients of activations are stored.

   SPDX-License-Identifier: MIT */
#ifndef LLAMA_CUDA_H
#define LLAMA_CUDA_H

#include "examples/common/cuda.h" // gpu_*
#include "examples/llama/llama.h" // llama_config, llama_acts_desc

enum { LLAMA_CUDA_HEAD = 256 }; // the largest head_dim: a warp has one head in its registers

struct llama_cuda : gpu_math {
    llama_config c;
    llama_acts_desc desc;
    int bf16;              // 1: E is gpu_bf16; 0: float
    char *memory, *arrays; // one allocation: the arrays below, then llama_arrays
    size_t nbytes;
    int32_t *tokens, *labels; // (N)
    double *loss;             // (1), the sum of a pass
};

// Those with a dimension of layers have one layer only with desc.recompute.
template <class E> struct llama_arrays {
    float *x;               // (L+1, N, C): the residual stream
    float *mid;             // (layers, N, C): the same between attention and MLP
    float *lse;             // (layers, N, H)
    E *q, *o, *k, *v;       // (layers, N, H*D) and (layers, N, K*D)
    E *q_raw, *k_raw;       // the same before their norms, with qk_norm
    E *gate, *up;           // (layers, N, F)
    E *n, *d1, *d2, *dx;    // (N, C), d1: (N, max(C, H*D))
    E *act, *dgate, *dup;   // (N, F)
    E *dq, *dk, *dv;        // as q, k, v
    float *delta;           // (N, H): sums of the backward of attention
    float *rms, *sums;      // (N * H): of rows; sums of groups of rows
    float *cos_at, *sin_at; // (T, D/2)
    float *logits;          // (loss_rows, V)
    E *dlogits;             // (loss_rows, V)
    double *row_loss;       // (N)
};

/* ---- RMSNorm --------------------------------------------------------------------------------- */

template <class X> GPU_DEVICE float llama_rms_of(const X *x, int C, float eps) {
    float squares = 0.0f;
    for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
        const gpu_8 v = gpu_load(x, c, C);
        for (int k = 0; k < GPU_8; k++) squares += v.at[k] * v.at[k];
    }
    return 1.0f / sqrtf(gpu_join_sum(squares) / (float)C + eps);
}

// X: float for the residual stream, E for heads
template <class E, class X> struct llama_norm_rows {
    E *out;
    const X *x;
    const E *w;
    int C;
    float eps;
    GPU_RUN void run(int64_t row) const {
        const X *xi = x + row * C;
        const float r = llama_rms_of(xi, C, eps);
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            const gpu_8 wc = gpu_load(w, c, C);
            gpu_8 v = gpu_load(xi, c, C);
            for (int k = 0; k < GPU_8; k++) v.at[k] *= r * wc.at[k];
            gpu_store(out + row * C, c, C, v);
        }
    }
};

template <class E, class X> struct llama_norm_rows_backward {
    E *dx;
    const E *dout;
    const X *x;
    const E *w;
    const float *rms;
    int add, C;
    GPU_RUN void run(int64_t row) const {
        const E *doi = dout + row * C;
        const X *xi = x + row * C;
        const float r = rms[row];
        float sum = 0.0f;
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            const gpu_8 d = gpu_load(doi, c, C), wc = gpu_load(w, c, C), v = gpu_load(xi, c, C);
            for (int k = 0; k < GPU_8; k++) sum += d.at[k] * wc.at[k] * v.at[k];
        }
        sum = gpu_join_sum(sum) * r * r / (float)C;
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            const gpu_8 d = gpu_load(doi, c, C), wc = gpu_load(w, c, C), v = gpu_load(xi, c, C);
            gpu_8 all = {};
            if (add) all = gpu_load(dx + row * C, c, C);
            for (int k = 0; k < GPU_8; k++) all.at[k] += r * (d.at[k] * wc.at[k] - v.at[k] * sum);
            gpu_store(dx + row * C, c, C, all);
        }
    }
};

template <class X> struct llama_rms_rows {
    float *rms;
    const X *x;
    int C;
    float eps;
    GPU_RUN void run(int64_t row) const {
        const float r = llama_rms_of(x + row * C, C, eps);
        if (gpu_lane() == 0) rms[row] = r;
    }
};

// sums(groups, cols): of d times the normed x
template <class E, class X> struct llama_sum_norm {
    float *sums;
    const E *d;
    const X *x;
    const float *rms;
    int rows, cols;
    GPU_RUN void run(int64_t warp) const {
        const gpu_tile_of tile(warp, rows, cols);
        for (int c = tile.left + GPU_8 * gpu_lane(); c < tile.right; c += GPU_STRIDE) {
            gpu_8 sum = {};
            for (int i = tile.top; i < tile.bottom; i++) {
                const gpu_8 di = gpu_load(d + (int64_t)i * cols, c, cols);
                const gpu_8 xi = gpu_load(x + (int64_t)i * cols, c, cols);
                for (int k = 0; k < GPU_8; k++) sum.at[k] += di.at[k] * xi.at[k] * rms[i];
            }
            gpu_store(sums + (int64_t)tile.group * cols, c, cols, sum);
        }
    }
};

template <class E, class X>
static void llama_cuda_norm(llama_cuda *gpu, E *out, const X *x, const void *w, int rows, int C) {
    const llama_norm_rows<E, X> kernel = {out, x, (const E *)w, C, gpu->c.eps};
    gpu_launch(gpu, rows, kernel);
}

/* dx(rows, C) = or += the gradient; dw(C) +=. Without add dx may be dout. */
template <class E, class X>
static void llama_cuda_norm_backward(llama_cuda *gpu, const llama_arrays<E> &a, E *dx, int add,
                                     void *dw, const E *dout, const X *x, const void *w, int rows,
                                     int C) {
    const llama_rms_rows<X> rms = {a.rms, x, C, gpu->c.eps};
    const llama_sum_norm<E, X> some = {a.sums, dout, x, a.rms, rows, C};
    const llama_norm_rows_backward<E, X> back = {dx, dout, x, (const E *)w, a.rms, add, C};
    gpu_launch(gpu, rows, rms);
    gpu_launch(gpu, gpu_tiles(rows, C), some);
    gpu_join_groups(gpu, (E *)dw, (E *)NULL, a.sums, rows, C, 1);
    gpu_launch(gpu, rows, back);
}

/* ---- small pieces ---------------------------------------------------------------------------- */

// y += bias
template <class E> struct llama_add_bias {
    E *y;
    const E *bias;
    int C;
    GPU_RUN void run(int64_t row) const {
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            gpu_store(y + row * C, c, C,
                      gpu_add(gpu_load(y + row * C, c, C), gpu_load(bias, c, C)));
        }
    }
};

// y = x + branch
template <class E> struct llama_residual {
    float *y;
    const float *x;
    const E *branch;
    int C;
    GPU_RUN void run(int64_t row) const {
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            gpu_store(y + row * C, c, C,
                      gpu_add(gpu_load(x + row * C, c, C), gpu_load(branch + row * C, c, C)));
        }
    }
};

// Rotates the pairs (i, i + D/2) of a head; sign -1: back
template <class E> struct llama_rotate {
    E *x;
    const float *cos_at, *sin_at;
    int T, heads, D;
    float sign;
    GPU_RUN void run(int64_t warp) const {
        const int half = D / 2;
        const int64_t at = warp / heads % T * half;
        E *head = x + warp * D;
        for (int i = gpu_lane(); i < half; i += GPU_LANES) {
            const float l = gpu_wide(head[i]), r = gpu_wide(head[i + half]);
            const float c = cos_at[at + i], s = sign * sin_at[at + i];
            gpu_set(&head[i], l * c - r * s);
            gpu_set(&head[i + half], r * c + l * s);
        }
    }
};

template <class E> struct llama_swiglu {
    E *out;
    const E *gate, *up;
    int F;
    GPU_RUN void run(int64_t row) const {
        for (int c = GPU_8 * gpu_lane(); c < F; c += GPU_STRIDE) {
            const gpu_8 u = gpu_load(up + row * F, c, F);
            gpu_8 g = gpu_load(gate + row * F, c, F);
            for (int k = 0; k < GPU_8; k++) g.at[k] = g.at[k] / (1.0f + expf(-g.at[k])) * u.at[k];
            gpu_store(out + row * F, c, F, g);
        }
    }
};

// dgate holds the gradient of the output, and becomes that of gate
template <class E> struct llama_swiglu_slope {
    E *dgate, *dup;
    const E *gate, *up;
    int F;
    GPU_RUN void run(int64_t row) const {
        for (int c = GPU_8 * gpu_lane(); c < F; c += GPU_STRIDE) {
            const gpu_8 g = gpu_load(gate + row * F, c, F), u = gpu_load(up + row * F, c, F);
            gpu_8 d = gpu_load(dgate + row * F, c, F), du;
            for (int k = 0; k < GPU_8; k++) {
                const float s = 1.0f / (1.0f + expf(-g.at[k]));
                du.at[k] = d.at[k] * g.at[k] * s;
                d.at[k] *= u.at[k] * s * (1.0f + g.at[k] * (1.0f - s));
            }
            gpu_store(dup + row * F, c, F, du);
            gpu_store(dgate + row * F, c, F, d);
        }
    }
};

/* ---- attention ------------------------------------------------------------------------------- */

// A head in the registers of a warp: a lane has every GPU_LANES-th element.
enum { LLAMA_HELD = LLAMA_CUDA_HEAD / GPU_LANES };
struct llama_held {
    float at[LLAMA_HELD];
};

template <class E> GPU_DEVICE llama_held llama_hold(const E *head, int D) {
    llama_held x;
    for (int i = 0; i < LLAMA_HELD; i++) {
        const int d = gpu_lane() + i * GPU_LANES;
        x.at[i] = d < D ? gpu_wide(head[d]) : 0.0f;
    }
    return x;
}

template <class E> GPU_DEVICE void llama_put(E *head, int D, const llama_held &x) {
    for (int i = 0; i < LLAMA_HELD; i++) {
        const int d = gpu_lane() + i * GPU_LANES;
        if (d < D) gpu_set(&head[d], x.at[i]);
    }
}

// Returns the product with a head in memory, in every lane.
template <class E> GPU_DEVICE float llama_dot(const llama_held &x, const E *head, int D) {
    float sum = 0.0f;
    for (int i = 0; i < LLAMA_HELD; i++) {
        const int d = gpu_lane() + i * GPU_LANES;
        if (d < D) sum += x.at[i] * gpu_wide(head[d]);
    }
    return gpu_join_sum(sum);
}

// x = x * keep + part * head
template <class E>
GPU_DEVICE void llama_mix(llama_held *x, float keep, float part, const E *head, int D) {
    for (int i = 0; i < LLAMA_HELD; i++) {
        const int d = gpu_lane() + i * GPU_LANES;
        if (d < D) x->at[i] = x->at[i] * keep + part * gpu_wide(head[d]);
    }
}

// o and lse of a query; a warp is (row, head), and T rows are a sequence
template <class E> struct llama_attend {
    E *o;
    float *lse;
    const E *q, *k, *v;
    int T, H, K, D;
    float scale;
    GPU_RUN void run(int64_t warp) const {
        const int64_t row = warp / H, first = row / T * T;
        const int kv = (int)(warp % H) / (H / K);
        const llama_held query = llama_hold(q + warp * D, D);
        llama_held sum = {};
        float max = -INFINITY, total = 0.0f;
        for (int64_t j = first; j <= row; j++) {
            const int64_t at = (j * K + kv) * D;
            const float score = llama_dot(query, k + at, D) * scale;
            const float larger = gpu_larger(max, score), keep = expf(max - larger);
            const float p = expf(score - larger);
            total = total * keep + p;
            llama_mix(&sum, keep, p, v + at, D);
            max = larger;
        }
        for (int i = 0; i < LLAMA_HELD; i++) sum.at[i] /= total;
        llama_put(o + warp * D, D, sum);
        if (gpu_lane() == 0) lse[warp] = max + logf(total);
    }
};

// dq of a query, and delta, which llama_attend_keys needs
template <class E> struct llama_attend_queries {
    E *dq;
    float *delta;
    const E *dout, *o, *q, *k, *v;
    const float *lse;
    int T, H, K, D;
    float scale;
    GPU_RUN void run(int64_t warp) const {
        const int64_t row = warp / H, first = row / T * T;
        const int kv = (int)(warp % H) / (H / K);
        const llama_held query = llama_hold(q + warp * D, D), dy = llama_hold(dout + warp * D, D);
        const float mean = llama_dot(dy, o + warp * D, D);
        llama_held sum = {};
        for (int64_t j = first; j <= row; j++) {
            const int64_t at = (j * K + kv) * D;
            const float p = expf(llama_dot(query, k + at, D) * scale - lse[warp]);
            const float ds = p * (llama_dot(dy, v + at, D) - mean) * scale;
            llama_mix(&sum, 1.0f, ds, k + at, D);
        }
        llama_put(dq + warp * D, D, sum);
        if (gpu_lane() == 0) delta[warp] = mean;
    }
};

// dk and dv of a key: sums over the queries of its group that come no earlier
template <class E> struct llama_attend_keys {
    E *dk, *dv;
    const float *delta;
    const E *dout, *q, *k, *v;
    const float *lse;
    int T, H, K, D;
    float scale;
    GPU_RUN void run(int64_t warp) const {
        const int64_t row = warp / K, end = row / T * T + T;
        const int group = H / K, head = (int)(warp % K) * group;
        const llama_held key = llama_hold(k + warp * D, D), value = llama_hold(v + warp * D, D);
        llama_held sum_k = {}, sum_v = {};
        for (int h = head; h < head + group; h++) {
            for (int64_t j = row; j < end; j++) {
                const int64_t of = j * H + h, at = of * D;
                const float p = expf(llama_dot(key, q + at, D) * scale - lse[of]);
                const float ds = p * (llama_dot(value, dout + at, D) - delta[of]) * scale;
                llama_mix(&sum_k, 1.0f, ds, q + at, D);
                llama_mix(&sum_v, 1.0f, p, dout + at, D);
            }
        }
        llama_put(dk + warp * D, D, sum_k);
        llama_put(dv + warp * D, D, sum_v);
    }
};

/* ---- embedding and loss ---------------------------------------------------------------------- */

template <class E> struct llama_embed {
    float *x;
    const E *w;
    const int32_t *tokens;
    int C;
    GPU_RUN void run(int64_t row) const {
        const E *from = w + (int64_t)tokens[row] * C;
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            gpu_store(x + row * C, c, C, gpu_load(from, c, C));
        }
    }
};

// g += dx of all rows that have a token: the warp of the first one adds them, in their order
template <class E> struct llama_embed_slope {
    E *g;
    const E *dx;
    const int32_t *tokens;
    int N, C;
    GPU_RUN void run(int64_t row) const {
        const int32_t token = tokens[row];
        float earlier = 0.0f;
        for (int64_t i = gpu_lane(); i < row; i += GPU_LANES) {
            if (tokens[i] == token) earlier = 1.0f;
        }
        if (gpu_join_max(earlier) > 0.0f) return;
        E *to = g + (int64_t)token * C;
        for (int c = GPU_8 * gpu_lane(); c < C; c += GPU_STRIDE) {
            gpu_8 sum = gpu_load(to, c, C);
            for (int64_t i = row; i < N; i++) {
                if (tokens[i] == token) sum = gpu_add(sum, gpu_load(dx + i * C, c, C));
            }
            gpu_store(to, c, C, sum);
        }
    }
};

// Loss of a row, and scale times the gradients of its logits. A negative label does not count.
template <class E> struct llama_cross_entropy {
    E *dlogits;
    double *row_loss;
    const float *logits;
    const int32_t *labels;
    int V;
    double scale;
    GPU_RUN void run(int64_t row) const {
        const float *of = logits + row * V;
        const int label = labels[row];
        float max = -INFINITY;
        double sum = 0.0;
        for (int v = gpu_lane(); v < V; v += GPU_LANES) max = gpu_larger(max, of[v]);
        max = gpu_join_max(max);
        for (int v = gpu_lane(); v < V; v += GPU_LANES) sum += (double)expf(of[v] - max);
        sum = gpu_join_sum(sum);
        const float part = label < 0 ? 0.0f : (float)(scale / sum);
        for (int v = gpu_lane(); v < V; v += GPU_LANES) {
            const float p = part * expf(of[v] - max);
            gpu_set(&dlogits[row * V + v], v == label ? p - (float)scale : p);
        }
        if (gpu_lane() == 0) {
            row_loss[row] = label < 0 ? 0.0 : log(sum) - (double)(of[label] - max);
        }
    }
};

struct llama_sum_losses {
    double *loss;
    const double *row_loss;
    int N;
    GPU_RUN void run(int64_t) const {
        double sum = 0.0;
        for (int i = gpu_lane(); i < N; i += GPU_LANES) sum += row_loss[i];
        sum = gpu_join_sum(sum);
        if (gpu_lane() == 0) *loss = sum;
    }
};

/* ---- arrays ---------------------------------------------------------------------------------- */

/* Divides the memory at `at` among the arrays; the bytes. At NULL it only counts. */
template <class E>
static size_t llama_cuda_place(const llama_config *c, const llama_acts_desc *desc, char *at,
                               llama_arrays<E> *a) {
    const size_t T = (size_t)desc->context, N = (size_t)desc->rows * T, H = (size_t)c->heads;
    const size_t C = (size_t)c->hidden, F = (size_t)c->inner, V = (size_t)c->vocab;
    const size_t D = (size_t)c->head_dim, q = H * D, kv = (size_t)c->kv_heads * D;
    const size_t L = (size_t)c->layers, layers = desc->recompute ? 1 : L;
    const size_t widest = q > C ? q : C, rows = (size_t)desc->loss_rows;
    const size_t groups = (N + GPU_SUM_ROWS - 1) / GPU_SUM_ROWS;
    size_t used = 0;
    gpu_take_array(&a->x, at, &used, (L + 1) * N * C);
    gpu_take_array(&a->mid, at, &used, layers * N * C);
    gpu_take_array(&a->lse, at, &used, layers * N * H);
    gpu_take_array(&a->q, at, &used, layers * N * q);
    gpu_take_array(&a->o, at, &used, layers * N * q);
    gpu_take_array(&a->k, at, &used, layers * N * kv);
    gpu_take_array(&a->v, at, &used, layers * N * kv);
    gpu_take_array(&a->q_raw, at, &used, c->qk_norm ? layers * N * q : 0);
    gpu_take_array(&a->k_raw, at, &used, c->qk_norm ? layers * N * kv : 0);
    gpu_take_array(&a->gate, at, &used, layers * N * F);
    gpu_take_array(&a->up, at, &used, layers * N * F);
    gpu_take_array(&a->n, at, &used, N * C);
    gpu_take_array(&a->d1, at, &used, N * widest);
    gpu_take_array(&a->d2, at, &used, N * C);
    gpu_take_array(&a->dx, at, &used, N * C);
    gpu_take_array(&a->act, at, &used, N * F);
    gpu_take_array(&a->dgate, at, &used, N * F);
    gpu_take_array(&a->dup, at, &used, N * F);
    gpu_take_array(&a->dq, at, &used, N * q);
    gpu_take_array(&a->dk, at, &used, N * kv);
    gpu_take_array(&a->dv, at, &used, N * kv);
    gpu_take_array(&a->delta, at, &used, N * H);
    gpu_take_array(&a->rms, at, &used, N * H);
    // of N rows of C, F or H*D columns, or of N*H rows of D
    gpu_take_array(&a->sums, at, &used, groups * (F > widest ? F : widest) + N * q);
    gpu_take_array(&a->cos_at, at, &used, T * D / 2);
    gpu_take_array(&a->sin_at, at, &used, T * D / 2);
    gpu_take_array(&a->logits, at, &used, rows * V);
    gpu_take_array(&a->dlogits, at, &used, rows * V);
    gpu_take_array(&a->row_loss, at, &used, N);
    return used;
}

template <class E> static llama_arrays<E> llama_arrays_of(const llama_cuda *gpu) {
    llama_arrays<E> a;
    llama_cuda_place(&gpu->c, &gpu->desc, gpu->arrays, &a);
    return a;
}

// Where layer l begins in an array of (layers, N, width).
static inline size_t llama_cuda_at(const llama_cuda *gpu, int l, int width) {
    return (gpu->desc.recompute ? 0 : (size_t)l) * (size_t)gpu->desc.rows *
           (size_t)gpu->desc.context * (size_t)width;
}

template <class E>
static float *llama_cuda_x(const llama_cuda *gpu, const llama_arrays<E> &a, int l) {
    return a.x +
           (size_t)l * (size_t)gpu->desc.rows * (size_t)gpu->desc.context * (size_t)gpu->c.hidden;
}

/* ---- a layer --------------------------------------------------------------------------------- */

// Parameters of a layer on the device, or NULL, and their gradients.
typedef struct llama_cuda_layer {
    const void *w[LLAMA_PARAMS];
    void *g[LLAMA_PARAMS];
} llama_cuda_layer;

/* y(N, out) = x(N, in) W^T + bias */
template <class E>
static void llama_cuda_linear(llama_cuda *gpu, const llama_cuda_layer &p, int matrix, E *y,
                              const E *x, int N) {
    int in, out = llama_matrix_size(&gpu->c, matrix, &in);
    gpu_product_forward(gpu, y, x, (const E *)p.w[LLAMA_W + matrix], N, in, out);
    if (!p.w[LLAMA_BIAS + matrix]) return;
    const llama_add_bias<E> bias = {y, (const E *)p.w[LLAMA_BIAS + matrix], out};
    gpu_launch(gpu, N, bias);
}

/* dx(N, in) = or += the gradient from dy(N, out); gradients of parameters += */
template <class E>
static void llama_cuda_linear_backward(llama_cuda *gpu, const llama_arrays<E> &a,
                                       const llama_cuda_layer &p, int matrix, E *dx, int add,
                                       const E *dy, const E *x, int N) {
    int in, out = llama_matrix_size(&gpu->c, matrix, &in);
    gpu_matmul(gpu, add ? GEMM_ADD : 0, N, in, out, gpu_matrix(dy, out),
               gpu_matrix((const E *)p.w[LLAMA_W + matrix], in), gpu_matrix(dx, in), 1);
    gpu_matmul(gpu, GEMM_TRANS_A | GEMM_ADD, out, in, N, gpu_matrix(dy, out), gpu_matrix(x, in),
               gpu_matrix((const E *)p.g[LLAMA_W + matrix], in), 1);
    if (p.g[LLAMA_BIAS + matrix])
        gpu_bias_backward(gpu, a.sums, (E *)p.g[LLAMA_BIAS + matrix], dy, N, out, 1);
}

template <class E>
static void llama_cuda_rotate(llama_cuda *gpu, const llama_arrays<E> &a, E *x, int N, int heads,
                              float sign) {
    const llama_rotate<E> kernel = {x,     a.cos_at,        a.sin_at, gpu->desc.context,
                                    heads, gpu->c.head_dim, sign};
    gpu_launch(gpu, (int64_t)N * heads, kernel);
}

/* Where q or k of a layer are before their norm. */
template <class E> static E *llama_cuda_raw(const llama_cuda *gpu, E *raw, E *x, size_t at) {
    return (gpu->c.qk_norm ? raw : x) + at;
}

/* x of layer l + 1 from x of layer l, for B rows; keeps what the backward needs */
template <class E>
static void llama_cuda_forward(llama_cuda *gpu, const llama_arrays<E> &a, const llama_cuda_layer &p,
                               int l, int B) {
    const llama_config *c = &gpu->c;
    const int T = gpu->desc.context, N = B * T, C = c->hidden, F = c->inner, D = c->head_dim;
    const int H = c->heads, K = c->kv_heads;
    const size_t at_q = llama_cuda_at(gpu, l, H * D), at_kv = llama_cuda_at(gpu, l, K * D);
    const size_t at_f = llama_cuda_at(gpu, l, F);
    E *q = a.q + at_q, *k = a.k + at_kv, *v = a.v + at_kv, *o = a.o + at_q;
    E *q_raw = llama_cuda_raw(gpu, a.q_raw, a.q, at_q);
    E *k_raw = llama_cuda_raw(gpu, a.k_raw, a.k, at_kv);
    float *x = llama_cuda_x(gpu, a, l), *y = llama_cuda_x(gpu, a, l + 1);
    float *mid = a.mid + llama_cuda_at(gpu, l, C);
    llama_cuda_norm(gpu, a.n, x, p.w[LLAMA_NORM1], N, C);
    llama_cuda_linear(gpu, p, LLAMA_Q, q_raw, a.n, N);
    llama_cuda_linear(gpu, p, LLAMA_K, k_raw, a.n, N);
    llama_cuda_linear(gpu, p, LLAMA_V, v, a.n, N);
    if (c->qk_norm) {
        llama_cuda_norm(gpu, q, q_raw, p.w[LLAMA_NORM_Q], N * H, D);
        llama_cuda_norm(gpu, k, k_raw, p.w[LLAMA_NORM_K], N * K, D);
    }
    llama_cuda_rotate(gpu, a, q, N, H, 1.0f);
    llama_cuda_rotate(gpu, a, k, N, K, 1.0f);
    const llama_attend<E> attend = {
        o, a.lse + llama_cuda_at(gpu, l, H), q, k, v, T, H, K, D, 1.0f / sqrtf((float)D)};
    gpu_launch(gpu, (int64_t)N * H, attend);
    llama_cuda_linear(gpu, p, LLAMA_O, a.d2, o, N);
    const llama_residual<E> middle = {mid, x, a.d2, C};
    gpu_launch(gpu, N, middle);
    llama_cuda_norm(gpu, a.n, mid, p.w[LLAMA_NORM2], N, C);
    llama_cuda_linear(gpu, p, LLAMA_GATE, a.gate + at_f, a.n, N);
    llama_cuda_linear(gpu, p, LLAMA_UP, a.up + at_f, a.n, N);
    const llama_swiglu<E> swiglu = {a.act, a.gate + at_f, a.up + at_f, F};
    gpu_launch(gpu, N, swiglu);
    llama_cuda_linear(gpu, p, LLAMA_DOWN, a.d2, a.act, N);
    const llama_residual<E> end = {y, mid, a.d2, C};
    gpu_launch(gpu, N, end);
}

/* dq, dk and dv from d1, the gradient of what attention returns; back through rotation and norms */
template <class E>
static void llama_cuda_attention_backward(llama_cuda *gpu, const llama_arrays<E> &a,
                                          const llama_cuda_layer &p, int l, int N) {
    const llama_config *c = &gpu->c;
    const int T = gpu->desc.context, H = c->heads, K = c->kv_heads, D = c->head_dim;
    const size_t at_q = llama_cuda_at(gpu, l, H * D), at_kv = llama_cuda_at(gpu, l, K * D);
    const E *q = a.q + at_q, *k = a.k + at_kv, *v = a.v + at_kv, *o = a.o + at_q, *dy = a.d1;
    const float *lse = a.lse + llama_cuda_at(gpu, l, H), scale = 1.0f / sqrtf((float)D);
    const llama_attend_queries<E> queries = {a.dq, a.delta, dy, o, q, k, v, lse, T, H, K, D, scale};
    const llama_attend_keys<E> keys = {a.dk, a.dv, a.delta, dy, q, k, v, lse, T, H, K, D, scale};
    gpu_launch(gpu, (int64_t)N * H, queries);
    gpu_launch(gpu, (int64_t)N * K, keys);
    llama_cuda_rotate(gpu, a, a.dq, N, H, -1.0f);
    llama_cuda_rotate(gpu, a, a.dk, N, K, -1.0f);
    if (!c->qk_norm) return;
    llama_cuda_norm_backward(gpu, a, a.dq, 0, p.g[LLAMA_NORM_Q], a.dq, a.q_raw + at_q,
                             p.w[LLAMA_NORM_Q], N * H, D);
    llama_cuda_norm_backward(gpu, a, a.dk, 0, p.g[LLAMA_NORM_K], a.dk, a.k_raw + at_kv,
                             p.w[LLAMA_NORM_K], N * K, D);
}

/* dx of layer l + 1 becomes that of layer l */
template <class E>
static void llama_cuda_backward(llama_cuda *gpu, const llama_arrays<E> &a,
                                const llama_cuda_layer &p, int l, int B) {
    const llama_config *c = &gpu->c;
    const int N = B * gpu->desc.context, C = c->hidden, F = c->inner;
    const size_t at_f = llama_cuda_at(gpu, l, F);
    const float *x = llama_cuda_x(gpu, a, l), *mid = a.mid + llama_cuda_at(gpu, l, C);
    const llama_swiglu<E> swiglu = {a.act, a.gate + at_f, a.up + at_f, F};
    const llama_swiglu_slope<E> slope = {a.dgate, a.dup, a.gate + at_f, a.up + at_f, F};
    gpu_launch(gpu, N, swiglu);
    llama_cuda_linear_backward(gpu, a, p, LLAMA_DOWN, a.dgate, 0, a.dx, a.act, N);
    gpu_launch(gpu, N, slope);
    llama_cuda_norm(gpu, a.n, mid, p.w[LLAMA_NORM2], N, C);
    llama_cuda_linear_backward(gpu, a, p, LLAMA_GATE, a.d2, 0, a.dgate, a.n, N);
    llama_cuda_linear_backward(gpu, a, p, LLAMA_UP, a.d2, 1, a.dup, a.n, N);
    llama_cuda_norm_backward(gpu, a, a.dx, 1, p.g[LLAMA_NORM2], a.d2, mid, p.w[LLAMA_NORM2], N, C);
    llama_cuda_linear_backward(gpu, a, p, LLAMA_O, a.d1, 0, a.dx,
                               a.o + llama_cuda_at(gpu, l, c->heads * c->head_dim), N);
    llama_cuda_attention_backward(gpu, a, p, l, N);
    llama_cuda_norm(gpu, a.n, x, p.w[LLAMA_NORM1], N, C);
    llama_cuda_linear_backward(gpu, a, p, LLAMA_Q, a.d2, 0, a.dq, a.n, N);
    llama_cuda_linear_backward(gpu, a, p, LLAMA_K, a.d2, 1, a.dk, a.n, N);
    llama_cuda_linear_backward(gpu, a, p, LLAMA_V, a.d2, 1, a.dv, a.n, N);
    llama_cuda_norm_backward(gpu, a, a.dx, 1, p.g[LLAMA_NORM1], a.d2, x, p.w[LLAMA_NORM1], N, C);
}

/* ---- embedding, head and loss ---------------------------------------------------------------- */

/* x of layer 0 = rows of the embedding */
template <class E>
static void llama_cuda_embed(llama_cuda *gpu, const llama_arrays<E> &a, const void *w, int N) {
    const llama_embed<E> kernel = {a.x, (const E *)w, gpu->tokens, gpu->c.hidden};
    gpu_launch(gpu, N, kernel);
}

/* g(V, C) += dx of layer 0 */
template <class E>
static void llama_cuda_embed_backward(llama_cuda *gpu, const llama_arrays<E> &a, void *g, int N) {
    const llama_embed_slope<E> kernel = {(E *)g, a.dx, gpu->tokens, N, gpu->c.hidden};
    gpu_launch(gpu, N, kernel);
}

/* *gpu->loss = the sum over the counted labels, from x of the last layer. scale 0: forward only;
   else dx = the gradient of scale times the sum, and gradients of norm and head +=. */
template <class E>
static void llama_cuda_loss(llama_cuda *gpu, const llama_arrays<E> &a, const void *norm,
                            void *norm_g, const void *head, void *head_g, int N, double scale) {
    const int C = gpu->c.hidden, V = gpu->c.vocab;
    const float *x = llama_cuda_x(gpu, a, gpu->c.layers);
    const E *w = (const E *)head;
    llama_cuda_norm(gpu, a.n, x, norm, N, C);
    for (int first = 0, rows; first < N; first += rows) {
        const E *h = a.n + (size_t)first * (size_t)C;
        E *dh = a.d2 + (size_t)first * (size_t)C;
        rows = N - first < gpu->desc.loss_rows ? N - first : gpu->desc.loss_rows;
        gpu_product_forward(gpu, a.logits, h, w, rows, C, V);
        const llama_cross_entropy<E> entropy = {
            a.dlogits, a.row_loss + first, a.logits, gpu->labels + first, V, scale};
        gpu_launch(gpu, rows, entropy);
        if (scale == 0.0) continue;
        gpu_matmul(gpu, 0, rows, C, V, gpu_matrix(a.dlogits, V), gpu_matrix(w, C),
                   gpu_matrix(dh, C), 1);
        gpu_matmul(gpu, GEMM_TRANS_A | GEMM_ADD, V, C, rows, gpu_matrix(a.dlogits, V),
                   gpu_matrix(h, C), gpu_matrix((const E *)head_g, C), 1);
    }
    const llama_sum_losses sum = {gpu->loss, a.row_loss, N};
    gpu_launch(gpu, 1, sum);
    if (scale == 0.0) return;
    llama_cuda_norm_backward(gpu, a, a.dx, 0, norm_g, a.d2, x, norm, N, C);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Returns the bytes of llama_cuda_create; cuBLAS takes some MiB more. */
static size_t llama_cuda_nbytes(const llama_config *c, const llama_acts_desc *desc, int bf16) {
    llama_arrays<gpu_bf16> half;
    llama_arrays<float> single;
    const size_t N = (size_t)desc->rows * (size_t)desc->context;
    const size_t arrays = bf16 ? llama_cuda_place(c, desc, NULL, &half)
                               : llama_cuda_place(c, desc, NULL, &single);
    return arrays + 2 * ((N * sizeof(int32_t) + 255) / 256 * 256) + 256;
}

static void llama_cuda_destroy(llama_cuda *gpu) {
    gpu_math_stop(gpu);
    if (gpu->memory) (void)cudaFree(gpu->memory);
    memset(gpu, 0, sizeof *gpu);
}

/* Copies the tables of positions. Returns 0, or -1. */
template <class E> static int llama_cuda_tables(llama_cuda *gpu, const llama_arrays<E> &a) {
    const int half = gpu->c.head_dim / 2, T = gpu->desc.context;
    const size_t numel = (size_t)half * (size_t)T, nbytes = numel * sizeof(float);
    float *table = (float *)malloc(2 * nbytes);
    if (!table) return -1;
    for (int i = 0; i < half; i++) {
        const float f = llama_frequency(&gpu->c, i);
        for (int t = 0; t < T; t++) {
            table[(size_t)t * (size_t)half + (size_t)i] = cosf((float)t * f);
            table[numel + (size_t)t * (size_t)half + (size_t)i] = sinf((float)t * f);
        }
    }
    gpu_check(gpu, cudaMemcpyAsync(a.cos_at, table, nbytes, cudaMemcpyHostToDevice, gpu->stream),
              "positions");
    gpu_check(gpu,
              cudaMemcpyAsync(a.sin_at, table + numel, nbytes, cudaMemcpyHostToDevice, gpu->stream),
              "positions");
    gpu_check(gpu, cudaStreamSynchronize(gpu->stream), "positions");
    free(table);
    return gpu->error ? -1 : 0;
}

/* On the current device, of gpu->nbytes. Returns 0; else gpu->failed and ->error tell, if it was
   not the host's memory, and destroy frees. */
static int llama_cuda_create(const llama_config *c, const llama_acts_desc *desc, int bf16,
                             cudaStream_t stream, llama_cuda *gpu) {
    const size_t N = (size_t)desc->rows * (size_t)desc->context;
    size_t used = 0;
    memset(gpu, 0, sizeof *gpu);
    gpu->c = *c, gpu->desc = *desc, gpu->bf16 = bf16, gpu->stream = stream;
    gpu->compute = CUBLAS_COMPUTE_32F;
    gpu->nbytes = llama_cuda_nbytes(c, desc, bf16);
    gpu_check(gpu, cudaMalloc((void **)&gpu->memory, gpu->nbytes), "activations");
    if (gpu->error) return -1;
    gpu_take_array(&gpu->tokens, gpu->memory, &used, N);
    gpu_take_array(&gpu->labels, gpu->memory, &used, N);
    gpu_take_array(&gpu->loss, gpu->memory, &used, 1);
    gpu->arrays = gpu->memory + used;
    if (gpu_math_start(gpu)) return -1;
    return bf16 ? llama_cuda_tables(gpu, llama_arrays_of<gpu_bf16>(gpu))
                : llama_cuda_tables(gpu, llama_arrays_of<float>(gpu));
}

#endif // LLAMA_CUDA_H
