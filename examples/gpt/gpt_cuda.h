/* gpt_cuda.h - the functions of gpt.h on a GPU: products by cuBLAS, all else by simple kernels

   Same pieces, same order, same arrays (gpt_acts, in device memory), with a gpt_cuda in front that
   says on which stream. Nothing here waits for the GPU, and nothing but create and destroy
   allocates. A failure is kept in the gpt_cuda; what is called after it does nothing.

   Parameters and their gradients are f32, or bf16 (gpt_cuda.bf16): then both sides of a product
   with a parameter are bf16, its sums f32. Activations are f32. Sums have a fixed order: no
   atomics, so that two runs give the same bits.

   Gradients of parameters are stored (=), where gpt.h adds (+=): a step is one backward, so that
   nothing is there to add to. wte alone is used twice: the head stores its gradient, and the
   embedding, whose backward is the last one, adds to it.

   Two arrays differ from gpt.h: qkv of a block is kept as (3, B, H, T, S), so that all heads are
   one batched product, and datt is (B, H, T, T).

   A kernel is a struct: its members are the arguments, and run() is what one block of threads does.
   Without a GPU (the stand-in headers of tests/stubs) run() is an ordinary function, and a block
   has one thread.

   SPDX-License-Identifier: MIT */
#ifndef GPT_CUDA_H
#define GPT_CUDA_H

#include <cublas_v2.h>    // cublasGemmStridedBatchedEx
#include <cuda_runtime.h> // cudaMalloc, kernels
#include <math.h>         // expf, logf, sqrtf

#include "examples/gpt/gpt.h"

typedef struct gpt_cuda {
    cublasHandle_t blas;
    cudaStream_t stream;
    int bf16;
    const char *failed, *error; // the first failure: of what, and its text; NULL: none
    char *memory;               // what follows, in one allocation
    uint8_t *inputs, *targets;  // (B, T)
    double *loss;               // (1), mean of the rows
    float *row_loss;            // (B, T)
    float *sums;                // partial sums of columns
    float *dqkv;                // (B, T, 3C)
    uint16_t *half[2];          // (B, T, 4C or V) in bf16: the two sides of a product
} gpt_cuda;

static inline void gpt_cuda_check(gpt_cuda *gpu, cudaError_t error, const char *what) {
    if (error == cudaSuccess || gpu->error) return;
    gpu->failed = what;
    gpu->error = cudaGetErrorString(error);
}

/* ---- what a kernel is ------------------------------------------------------------------------ */

#ifdef FSDP_CUDA_EMULATION
#define GPT_DEVICE static inline
#define GPT_RUN    inline
enum { GPT_THREADS = 1 };
GPT_DEVICE int gpt_thread() { return 0; }

template <class Kernel> static void gpt_kernel(const void *kernel, unsigned block) {
    ((const Kernel *)kernel)->run((int)block);
}
#else
#define GPT_DEVICE static __device__ __forceinline__
#define GPT_RUN    __device__ __forceinline__
enum { GPT_THREADS = 256 };
GPT_DEVICE int gpt_thread() { return (int)threadIdx.x; }

template <class Kernel> static __global__ void gpt_kernel(const Kernel kernel) {
    kernel.run((int)blockIdx.x);
}
#endif

template <class Kernel>
static void gpt_launch(gpt_cuda *gpu, int64_t blocks, const Kernel &kernel) {
    if (blocks > INT32_MAX) gpt_cuda_check(gpu, cudaErrorInvalidConfiguration, "a kernel");
    if (blocks == 0 || gpu->error) return;
#ifdef FSDP_CUDA_EMULATION
    gpt_cuda_check(
        gpu,
        fsdp_stub_launch(gpt_kernel<Kernel>, &kernel, sizeof kernel, (unsigned)blocks, gpu->stream),
        "a kernel");
#else
    gpt_kernel<Kernel><<<(unsigned)blocks, GPT_THREADS, 0, gpu->stream>>>(kernel);
    gpt_cuda_check(gpu, cudaGetLastError(), "a kernel");
#endif
}

// Elements of an array, or columns of a matrix, that one block of threads does.
enum { GPT_CHUNK = 1024, GPT_COLUMNS = 256, GPT_SUM_ROWS = 64 };

static inline int64_t gpt_pieces(int64_t count, int size) { return (count + size - 1) / size; }

GPT_DEVICE int64_t gpt_end(int64_t begin, int size, int64_t count) {
    return begin + size < count ? begin + size : count;
}

struct gpt_sum_of {
    template <class T> static GPT_RUN T join(T a, T b) { return a + b; }
};
struct gpt_max_of {
    template <class T> static GPT_RUN T join(T a, T b) { return a > b ? a : b; }
};

// x of all threads of the block, joined: the same in every thread. All of them call it.
template <class How, class T> GPT_DEVICE T gpt_join(T x) {
#ifndef FSDP_CUDA_EMULATION
    __shared__ T warps[GPT_THREADS / 32];
    for (int apart = 16; apart > 0; apart /= 2) {
        x = How::join(x, __shfl_xor_sync(0xffffffffu, x, apart));
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = warps[0];
    for (int w = 1; w < GPT_THREADS / 32; w++) x = How::join(x, warps[w]);
    __syncthreads(); // before the next call writes
#endif
    return x;
}

GPT_DEVICE uint32_t gpt_word(float x) {
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    return word;
}

// To the nearest bf16, ties to even; a NaN stays one.
GPT_DEVICE uint16_t gpt_narrow(float x) {
    const uint32_t word = gpt_word(x);
    if ((word & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(word >> 16 | 0x40u);
    return (uint16_t)((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
}

// Element i of a parameter.
GPT_DEVICE float gpt_get(const void *w, int64_t i, int bf16) {
    if (!bf16) return ((const float *)w)[i];
    const uint32_t word = (uint32_t)((const uint16_t *)w)[i] << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

// Element i of a gradient = x
GPT_DEVICE void gpt_put(void *g, int64_t i, float x, int bf16) {
    if (bf16) ((uint16_t *)g)[i] = gpt_narrow(x);
    else ((float *)g)[i] = x;
}

/* ---- matrix product -------------------------------------------------------------------------- */

typedef struct {
    void *data;       // f32, or bf16
    int bf16;         // of a parameter, its gradient, or what is multiplied with one
    int row;          // elements from one row to the next
    long long matrix; // and from one matrix of a batch to the next
} gpt_operand;

static inline gpt_operand gpt_matrix(const void *data, int row, int bf16) {
    gpt_operand x;
    x.data = const_cast<void *>(data);
    x.bf16 = bf16;
    x.row = row;
    x.matrix = 0;
    return x;
}

// Matrices of f32 that follow each other without gaps.
static inline gpt_operand gpt_matrices(const float *data, int rows, int row) {
    gpt_operand x = gpt_matrix(data, row, 0);
    x.matrix = (long long)rows * row;
    return x;
}

/* c(m, n) = or += op(a)(m, k) * op(b)(k, n), `count` times; flags as in gpt_matmul. cuBLAS counts
   by columns: it computes the transposed product, b first. */
static void gpt_cuda_matmul(gpt_cuda *gpu, int flags, int m, int n, int k, gpt_operand a,
                            gpt_operand b, gpt_operand c, int count) {
    const float one = 1.0f, keep = flags & GPT_ADD ? 1.0f : 0.0f;
    if (gpu->error) return;
    const cublasStatus_t status = cublasGemmStridedBatchedEx(
        gpu->blas, flags & GPT_TRANS_B ? CUBLAS_OP_T : CUBLAS_OP_N,
        flags & GPT_TRANS_A ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one, b.data,
        b.bf16 ? CUDA_R_16BF : CUDA_R_32F, b.row, b.matrix, a.data,
        a.bf16 ? CUDA_R_16BF : CUDA_R_32F, a.row, a.matrix, &keep, c.data,
        c.bf16 ? CUDA_R_16BF : CUDA_R_32F, c.row, c.matrix, count, CUBLAS_COMPUTE_32F,
        CUBLAS_GEMM_DEFAULT);
    if (status == CUBLAS_STATUS_SUCCESS) return;
    gpu->failed = "cuBLAS";
    gpu->error = cublasGetStatusString(status);
}

struct gpt_to_half {
    uint16_t *out;
    const float *x;
    int64_t count;
    GPT_RUN void run(int block) const {
        const int64_t begin = (int64_t)block * GPT_CHUNK, end = gpt_end(begin, GPT_CHUNK, count);
        for (int64_t i = begin + gpt_thread(); i < end; i += GPT_THREADS) out[i] = gpt_narrow(x[i]);
    }
};

// x(rows, cols) as it is multiplied with a parameter: in bf16 if those are. side: 0 or 1, which of
// the two places it gets until the next one comes.
static gpt_operand gpt_beside_param(gpt_cuda *gpu, const float *x, int rows, int cols, int side) {
    if (!gpu->bf16) return gpt_matrix(x, cols, 0);
    const gpt_to_half kernel = {gpu->half[side], x, (int64_t)rows * cols};
    gpt_launch(gpu, gpt_pieces(kernel.count, GPT_CHUNK), kernel);
    return gpt_matrix(gpu->half[side], cols, 1);
}

/* ---- sums of columns ------------------------------------------------------------------------- */

// Of d(rows, cols), and with x also of d * (x - mean) * rstd: first of 64 rows at a time.
struct gpt_sum_some {
    float *sums; // (2, groups of rows, cols)
    const float *d, *x, *mean, *rstd;
    int rows, cols, groups;
    GPT_RUN void run(int block) const {
        const int group = block % groups;
        const int64_t left = (int64_t)(block / groups) * GPT_COLUMNS;
        const int64_t top = (int64_t)group * GPT_SUM_ROWS, end = gpt_end(top, GPT_SUM_ROWS, rows);
        for (int64_t c = left + gpt_thread(); c < gpt_end(left, GPT_COLUMNS, cols);
             c += GPT_THREADS) {
            float sum = 0.0f, sum_n = 0.0f;
            for (int64_t i = top; i < end; i++) {
                const float di = d[i * cols + c];
                sum += di;
                if (x) sum_n += di * ((x[i * cols + c] - mean[i]) * rstd[i]);
            }
            sums[(int64_t)group * cols + c] = sum;
            if (x) sums[((int64_t)groups + group) * cols + c] = sum_n;
        }
    }
};

// Then of all groups of rows; these are gradients.
struct gpt_sum_all {
    void *g, *g_n; // g_n NULL: none
    const float *sums;
    int cols, groups, bf16;
    GPT_RUN void run(int block) const {
        const int64_t left = (int64_t)block * GPT_COLUMNS, end = gpt_end(left, GPT_COLUMNS, cols);
        for (int64_t c = left + gpt_thread(); c < end; c += GPT_THREADS) {
            float sum = 0.0f, sum_n = 0.0f;
            for (int64_t i = 0; i < groups; i++) {
                sum += sums[i * cols + c];
                if (g_n) sum_n += sums[(groups + i) * cols + c];
            }
            gpt_put(g, c, sum, bf16);
            if (g_n) gpt_put(g_n, c, sum_n, bf16);
        }
    }
};

static void gpt_cuda_columns(gpt_cuda *gpu, void *g, void *g_n, const float *d, const float *x,
                             const float *mean, const float *rstd, int rows, int cols) {
    const int groups = (int)gpt_pieces(rows, GPT_SUM_ROWS);
    const int64_t pieces = gpt_pieces(cols, GPT_COLUMNS);
    const gpt_sum_some some = {gpu->sums, d, x, mean, rstd, rows, cols, groups};
    const gpt_sum_all all = {g, g_n, gpu->sums, cols, groups, gpu->bf16};
    gpt_launch(gpu, pieces * groups, some);
    gpt_launch(gpu, pieces, all);
}

/* ---- matmul with bias ------------------------------------------------------------------------ */

struct gpt_bias {
    float *out;
    const void *bias;
    const float *add; // NULL: none
    int cols, bf16;
    GPT_RUN void run(int row) const {
        const int64_t at = (int64_t)row * cols;
        for (int c = gpt_thread(); c < cols; c += GPT_THREADS) {
            out[at + c] = gpt_get(bias, c, bf16) + (add ? add[at + c] : 0.0f);
        }
    }
};

/* out(BT, OC) = add + x(BT, IC) * w(OC, IC)^T + bias(OC); add may be NULL */
static void gpt_cuda_linear_forward(gpt_cuda *gpu, float *out, const float *add, const float *x,
                                    const void *w, const void *bias, int BT, int IC, int OC) {
    const gpt_bias kernel = {out, bias, add, OC, gpu->bf16};
    gpt_launch(gpu, BT, kernel);
    gpt_cuda_matmul(gpu, GPT_TRANS_B | GPT_ADD, BT, OC, IC, gpt_beside_param(gpu, x, BT, IC, 0),
                    gpt_matrix(w, IC, gpu->bf16), gpt_matrix(out, OC, 0), 1);
}

/* dx(BT, IC) = dout(BT, OC) * w;  dw(OC, IC) = dout^T * x */
static void gpt_cuda_product_backward(gpt_cuda *gpu, float *dx, void *dw, const float *dout,
                                      const float *x, const void *w, int BT, int IC, int OC) {
    const gpt_operand d = gpt_beside_param(gpu, dout, BT, OC, 0);
    const gpt_operand in = gpt_beside_param(gpu, x, BT, IC, 1);
    gpt_cuda_matmul(gpu, 0, BT, IC, OC, d, gpt_matrix(w, IC, gpu->bf16), gpt_matrix(dx, IC, 0), 1);
    gpt_cuda_matmul(gpu, GPT_TRANS_A, OC, IC, BT, d, in, gpt_matrix(dw, IC, gpu->bf16), 1);
}

/* The same, and dbias(OC) = columns of dout */
static void gpt_cuda_linear_backward(gpt_cuda *gpu, float *dx, void *dw, void *dbias,
                                     const float *dout, const float *x, const void *w, int BT,
                                     int IC, int OC) {
    gpt_cuda_product_backward(gpu, dx, dw, dout, x, w, BT, IC, OC);
    gpt_cuda_columns(gpu, dbias, NULL, dout, NULL, NULL, NULL, BT, OC);
}

/* ---- layer norm ------------------------------------------------------------------------------ */

struct gpt_norm_rows {
    float *out, *mean, *rstd;
    const float *x;
    const void *w, *b;
    int C, bf16;
    GPT_RUN void run(int row) const {
        const float *xi = x + (int64_t)row * C;
        float *oi = out + (int64_t)row * C;
        float sum = 0.0f, squares = 0.0f;
        for (int c = gpt_thread(); c < C; c += GPT_THREADS) sum += xi[c];
        const float m = gpt_join<gpt_sum_of>(sum) / (float)C;
        for (int c = gpt_thread(); c < C; c += GPT_THREADS) squares += (xi[c] - m) * (xi[c] - m);
        const float s = 1.0f / sqrtf(gpt_join<gpt_sum_of>(squares) / (float)C + GPT_LN_EPS);
        for (int c = gpt_thread(); c < C; c += GPT_THREADS) {
            oi[c] = (xi[c] - m) * s * gpt_get(w, c, bf16) + gpt_get(b, c, bf16);
        }
        if (gpt_thread() == 0) mean[row] = m, rstd[row] = s;
    }
};

struct gpt_norm_rows_backward {
    float *dx;
    const float *dout, *x, *mean, *rstd;
    const void *w;
    int add, C, bf16;
    GPT_RUN void run(int row) const {
        const float *doi = dout + (int64_t)row * C, *xi = x + (int64_t)row * C;
        float *dxi = dx + (int64_t)row * C;
        const float m = mean[row], s = rstd[row];
        float sum_g = 0.0f, sum_gn = 0.0f; // as in gpt.h
        for (int c = gpt_thread(); c < C; c += GPT_THREADS) {
            const float g = doi[c] * gpt_get(w, c, bf16);
            sum_g += g;
            sum_gn += g * ((xi[c] - m) * s);
        }
        const float mean_g = gpt_join<gpt_sum_of>(sum_g) / (float)C;
        const float mean_gn = gpt_join<gpt_sum_of>(sum_gn) / (float)C;
        for (int c = gpt_thread(); c < C; c += GPT_THREADS) {
            const float g = doi[c] * gpt_get(w, c, bf16);
            const float d = s * (g - mean_g - (xi[c] - m) * s * mean_gn);
            dxi[c] = add ? dxi[c] + d : d;
        }
    }
};

static void gpt_cuda_layernorm_forward(gpt_cuda *gpu, float *out, float *mean, float *rstd,
                                       const float *x, const void *w, const void *b, int BT,
                                       int C) {
    const gpt_norm_rows kernel = {out, mean, rstd, x, w, b, C, gpu->bf16};
    gpt_launch(gpu, BT, kernel);
}

/* dx(BT, C) = or += the gradient; dw(C) and db(C) = */
static void gpt_cuda_layernorm_backward(gpt_cuda *gpu, float *dx, int add, void *dw, void *db,
                                        const float *dout, const float *x, const void *w,
                                        const float *mean, const float *rstd, int BT, int C) {
    const gpt_norm_rows_backward kernel = {dx, dout, x, mean, rstd, w, add, C, gpu->bf16};
    gpt_cuda_columns(gpu, db, dw, dout, x, mean, rstd, BT, C);
    gpt_launch(gpu, BT, kernel);
}

/* ---- GELU ------------------------------------------------------------------------------------ */

struct gpt_gelu {
    float *out;
    const float *x;
    int64_t count;
    int backward; // out: gradient of the output, becomes that of the input
    GPT_RUN void run(int block) const {
        const int64_t begin = (int64_t)block * GPT_CHUNK, end = gpt_end(begin, GPT_CHUNK, count);
        for (int64_t i = begin + gpt_thread(); i < end; i += GPT_THREADS) {
            const float v = x[i];
            const float s = 1.0f / (1.0f + expf(-GPT_GELU_A * (v + GPT_GELU_B * v * v * v)));
            const float slope = GPT_GELU_A * (1.0f + 3.0f * GPT_GELU_B * v * v);
            if (backward) out[i] *= s + v * s * (1.0f - s) * slope;
            else out[i] = v * s;
        }
    }
};

static void gpt_cuda_gelu(gpt_cuda *gpu, float *out, const float *x, int64_t count, int backward) {
    const gpt_gelu kernel = {out, x, count, backward};
    gpt_launch(gpu, gpt_pieces(count, GPT_CHUNK), kernel);
}

/* ---- causal self-attention ------------------------------------------------------------------- */

// rows(B, T, parts, H, S) <-> heads(parts, B, H, T, S)
struct gpt_heads {
    float *rows, *heads;
    int B, T, H, S, parts, join; // join: from heads to rows
    GPT_RUN void run(int row) const {
        const int C = H * S, b = row / T, t = row % T;
        for (int i = gpt_thread(); i < parts * C; i += GPT_THREADS) {
            const int part = i / C, h = i % C / S, s = i % S;
            const int64_t head = ((int64_t)part * B + b) * H + h;
            float *in_heads = heads + (head * T + t) * S + s;
            float *in_row = rows + (int64_t)row * parts * C + i;
            if (join) *in_row = *in_heads;
            else *in_heads = *in_row;
        }
    }
};

// Scores (T, T) of every head become probabilities; zero in the future.
struct gpt_softmax {
    float *att;
    int T;
    float scale;
    GPT_RUN void run(int row) const {
        float *p = att + (int64_t)row * T;
        const int seen = row % T + 1;
        float max = p[0], sum = 0.0f;
        for (int j = gpt_thread(); j < seen; j += GPT_THREADS) max = gpt_max_of::join(max, p[j]);
        max = gpt_join<gpt_max_of>(max);
        for (int j = gpt_thread(); j < seen; j += GPT_THREADS) sum += expf((p[j] - max) * scale);
        const float norm = 1.0f / gpt_join<gpt_sum_of>(sum);
        for (int j = gpt_thread(); j < T; j += GPT_THREADS) {
            p[j] = j < seen ? expf((p[j] - max) * scale) * norm : 0.0f;
        }
    }
};

// Gradients of probabilities become those of the unscaled scores; zero in the future.
struct gpt_softmax_backward {
    float *datt;
    const float *att;
    int T;
    float scale;
    GPT_RUN void run(int row) const {
        float *d = datt + (int64_t)row * T;
        const float *p = att + (int64_t)row * T;
        const int seen = row % T + 1;
        float sum = 0.0f;
        for (int j = gpt_thread(); j < seen; j += GPT_THREADS) sum += p[j] * d[j];
        const float mean = gpt_join<gpt_sum_of>(sum);
        for (int j = gpt_thread(); j < T; j += GPT_THREADS) {
            d[j] = j < seen ? p[j] * (d[j] - mean) * scale : 0.0f;
        }
    }
};

static void gpt_cuda_heads(gpt_cuda *gpu, const gpt_config *cfg, float *rows, float *heads,
                           int parts, int join) {
    const int B = cfg->batch, T = cfg->context, H = cfg->heads, S = cfg->channels / H;
    const gpt_heads kernel = {rows, heads, B, T, H, S, parts, join};
    gpt_launch(gpu, (int64_t)B * T, kernel);
}

/* out(B, T, C) from qkv(3, B, H, T, S); att(B, H, T, T) keeps the probabilities;
   y(B, T, C): room */
static void gpt_cuda_attention_forward(gpt_cuda *gpu, const gpt_config *cfg, float *out, float *att,
                                       const float *qkv, float *y) {
    const int B = cfg->batch, T = cfg->context, C = cfg->channels, H = cfg->heads, S = C / H;
    const float *q = qkv, *k = q + (int64_t)B * T * C, *v = k + (int64_t)B * T * C;
    const gpt_operand p = gpt_matrices(att, T, T);
    const gpt_softmax softmax = {att, T, 1.0f / sqrtf((float)S)};
    gpt_cuda_matmul(gpu, GPT_TRANS_B, T, T, S, gpt_matrices(q, T, S), gpt_matrices(k, T, S), p,
                    B * H);
    gpt_launch(gpu, (int64_t)B * H * T, softmax);
    gpt_cuda_matmul(gpu, 0, T, S, T, p, gpt_matrices(v, T, S), gpt_matrices(y, T, S), B * H);
    gpt_cuda_heads(gpu, cfg, out, y, 1, 1);
}

/* dqkv(3, B, H, T, S) from dout(B, T, C); datt(B, H, T, T) and dy(B, T, C): room */
static void gpt_cuda_attention_backward(gpt_cuda *gpu, const gpt_config *cfg, float *dqkv,
                                        float *datt, float *dout, const float *qkv,
                                        const float *att, float *dy) {
    const int B = cfg->batch, T = cfg->context, C = cfg->channels, H = cfg->heads, S = C / H;
    const int64_t BTC = (int64_t)B * T * C;
    const gpt_operand q = gpt_matrices(qkv, T, S), k = gpt_matrices(qkv + BTC, T, S);
    const gpt_operand v = gpt_matrices(qkv + 2 * BTC, T, S), dq = gpt_matrices(dqkv, T, S);
    const gpt_operand dk = gpt_matrices(dqkv + BTC, T, S), dv = gpt_matrices(dqkv + 2 * BTC, T, S);
    const gpt_operand p = gpt_matrices(att, T, T), dp = gpt_matrices(datt, T, T);
    const gpt_operand d = gpt_matrices(dy, T, S);
    const gpt_softmax_backward softmax = {datt, att, T, 1.0f / sqrtf((float)S)};
    gpt_cuda_heads(gpu, cfg, dout, dy, 1, 0);
    gpt_cuda_matmul(gpu, GPT_TRANS_B, T, T, S, d, v, dp, B * H);
    gpt_cuda_matmul(gpu, GPT_TRANS_A, T, S, T, p, d, dv, B * H);
    gpt_launch(gpu, (int64_t)B * H * T, softmax);
    gpt_cuda_matmul(gpu, 0, T, S, T, dp, k, dq, B * H);
    gpt_cuda_matmul(gpu, GPT_TRANS_A, T, S, T, dp, q, dk, B * H);
}

/* ---- one transformer block ------------------------------------------------------------------- */

/* x_out(B, T, C) from x_in(B, T, C). w: GPT_BLOCK_PARAM_COUNT pointers. acts: for its scratch. */
static void gpt_cuda_block_forward(gpt_cuda *gpu, const gpt_config *cfg, void *const *w,
                                   gpt_block_acts *a, gpt_acts *acts, const float *x_in,
                                   float *x_out) {
    const int C = cfg->channels, BT = cfg->batch * cfg->context;
    gpt_cuda_layernorm_forward(gpu, a->ln1, a->ln1_mean, a->ln1_rstd, x_in, w[GPT_LN1W],
                               w[GPT_LN1B], BT, C);
    gpt_cuda_linear_forward(gpu, acts->d4, NULL, a->ln1, w[GPT_QKVW], w[GPT_QKVB], BT, C, 3 * C);
    gpt_cuda_heads(gpu, cfg, acts->d4, a->qkv, 3, 0);
    gpt_cuda_attention_forward(gpu, cfg, a->atty, a->att, a->qkv, acts->tmp);
    gpt_cuda_linear_forward(gpu, a->mid, x_in, a->atty, w[GPT_ATTPROJW], w[GPT_ATTPROJB], BT, C, C);
    gpt_cuda_layernorm_forward(gpu, a->ln2, a->ln2_mean, a->ln2_rstd, a->mid, w[GPT_LN2W],
                               w[GPT_LN2B], BT, C);
    gpt_cuda_linear_forward(gpu, a->fc, NULL, a->ln2, w[GPT_FCW], w[GPT_FCB], BT, C, 4 * C);
    gpt_cuda_gelu(gpu, a->gelu, a->fc, (int64_t)BT * 4 * C, 0);
    gpt_cuda_linear_forward(gpu, x_out, a->mid, a->gelu, w[GPT_FCPROJW], w[GPT_FCPROJB], BT, 4 * C,
                            C);
}

/* acts->dx(B, T, C) holds the gradient of x_out and becomes that of x_in; g[...] = the gradients
   of w[...] */
static void gpt_cuda_block_backward(gpt_cuda *gpu, const gpt_config *cfg, void *const *w,
                                    void *const *g, const gpt_block_acts *a, gpt_acts *acts,
                                    const float *x_in) {
    const int C = cfg->channels, BT = cfg->batch * cfg->context;
    float *dx = acts->dx, *d1 = acts->d1, *d4 = acts->d4;
    // MLP; dx passes through the residual connection, the branch is added to it
    gpt_cuda_linear_backward(gpu, d4, g[GPT_FCPROJW], g[GPT_FCPROJB], dx, a->gelu, w[GPT_FCPROJW],
                             BT, 4 * C, C);
    gpt_cuda_gelu(gpu, d4, a->fc, (int64_t)BT * 4 * C, 1);
    gpt_cuda_linear_backward(gpu, d1, g[GPT_FCW], g[GPT_FCB], d4, a->ln2, w[GPT_FCW], BT, C, 4 * C);
    gpt_cuda_layernorm_backward(gpu, dx, 1, g[GPT_LN2W], g[GPT_LN2B], d1, a->mid, w[GPT_LN2W],
                                a->ln2_mean, a->ln2_rstd, BT, C);
    // attention
    gpt_cuda_linear_backward(gpu, d1, g[GPT_ATTPROJW], g[GPT_ATTPROJB], dx, a->atty,
                             w[GPT_ATTPROJW], BT, C, C);
    gpt_cuda_attention_backward(gpu, cfg, d4, acts->datt, d1, a->qkv, a->att, acts->tmp);
    gpt_cuda_heads(gpu, cfg, gpu->dqkv, d4, 3, 1);
    gpt_cuda_linear_backward(gpu, d1, g[GPT_QKVW], g[GPT_QKVB], gpu->dqkv, a->ln1, w[GPT_QKVW], BT,
                             C, 3 * C);
    gpt_cuda_layernorm_backward(gpu, dx, 1, g[GPT_LN1W], g[GPT_LN1B], d1, x_in, w[GPT_LN1W],
                                a->ln1_mean, a->ln1_rstd, BT, C);
}

/* ---- embedding, head and loss ---------------------------------------------------------------- */

struct gpt_embed {
    float *x;
    const void *wte, *wpe;
    const uint8_t *tokens;
    int T, C, bf16;
    GPT_RUN void run(int row) const {
        const int64_t te = (int64_t)tokens[row] * C, pe = (int64_t)(row % T) * C;
        for (int c = gpt_thread(); c < C; c += GPT_THREADS) {
            x[(int64_t)row * C + c] = gpt_get(wte, te + c, bf16) + gpt_get(wpe, pe + c, bf16);
        }
    }
};

// One block of threads for 256 columns of a token: it finds its rows in their order.
struct gpt_embed_tokens_backward {
    void *g;
    const uint8_t *tokens;
    const float *dx;
    int BT, C, V, bf16;
    GPT_RUN void run(int block) const {
        const int token = block % V;
        const int64_t left = (int64_t)(block / V) * GPT_COLUMNS;
        for (int64_t c = left + gpt_thread(); c < gpt_end(left, GPT_COLUMNS, C); c += GPT_THREADS) {
            float sum = 0.0f;
            for (int64_t i = 0; i < BT; i++) {
                if (tokens[i] == token) sum += dx[i * C + c];
            }
            const int64_t at = (int64_t)token * C + c;
            gpt_put(g, at, gpt_get(g, at, bf16) + sum, bf16);
        }
    }
};

struct gpt_embed_positions_backward {
    void *g;
    const float *dx;
    int B, T, C, bf16;
    GPT_RUN void run(int t) const {
        for (int c = gpt_thread(); c < C; c += GPT_THREADS) {
            float sum = 0.0f;
            for (int64_t b = 0; b < B; b++) sum += dx[(b * T + t) * C + c];
            gpt_put(g, (int64_t)t * C + c, sum, bf16);
        }
    }
};

// Loss of a row; its logits become gradients of the mean loss.
struct gpt_cross_entropy {
    float *logits, *row_loss;
    const uint8_t *targets;
    int V;
    float share;
    GPT_RUN void run(int row) const {
        float *p = logits + (int64_t)row * V;
        const int target = targets[row];
        float max = p[0], sum = 0.0f;
        for (int v = gpt_thread(); v < V; v += GPT_THREADS) max = gpt_max_of::join(max, p[v]);
        max = gpt_join<gpt_max_of>(max);
        for (int v = gpt_thread(); v < V; v += GPT_THREADS) sum += expf(p[v] - max);
        const float logit = p[target] - max; // before the join: after it p is overwritten
        const float total = gpt_join<gpt_sum_of>(sum);
        for (int v = gpt_thread(); v < V; v += GPT_THREADS) {
            p[v] = (expf(p[v] - max) / total - (v == target ? 1.0f : 0.0f)) * share;
        }
        if (gpt_thread() == 0) row_loss[row] = logf(total) - logit;
    }
};

struct gpt_mean_loss {
    double *loss;
    const float *row_loss;
    int BT;
    GPT_RUN void run(int) const {
        double sum = 0.0;
        for (int i = gpt_thread(); i < BT; i += GPT_THREADS) sum += (double)row_loss[i];
        sum = gpt_join<gpt_sum_of>(sum);
        if (gpt_thread() == 0) *loss = sum / BT;
    }
};

/* x(B, T, C) = wte[token] + wpe[position]; of gpu->inputs */
static void gpt_cuda_embed_forward(gpt_cuda *gpu, const gpt_config *cfg, void *const *w, float *x) {
    const gpt_embed kernel = {
        x, w[GPT_WTE], w[GPT_WPE], gpu->inputs, cfg->context, cfg->channels, gpu->bf16};
    gpt_launch(gpu, (int64_t)cfg->batch * cfg->context, kernel);
}

/* g[GPT_WTE] += and g[GPT_WPE] = from dx(B, T, C) */
static void gpt_cuda_embed_backward(gpt_cuda *gpu, const gpt_config *cfg, void *const *g,
                                    const float *dx) {
    const int B = cfg->batch, T = cfg->context, C = cfg->channels, V = cfg->vocab;
    const gpt_embed_tokens_backward tokens = {g[GPT_WTE], gpu->inputs, dx, B * T, C, V, gpu->bf16};
    const gpt_embed_positions_backward positions = {g[GPT_WPE], dx, B, T, C, gpu->bf16};
    gpt_launch(gpu, V * gpt_pieces(C, GPT_COLUMNS), tokens);
    gpt_launch(gpu, T, positions);
}

/* acts->logits(B, T, V) from x(B, T, C): final norm, then the product with wte */
static void gpt_cuda_head_forward(gpt_cuda *gpu, const gpt_config *cfg, void *const *w,
                                  gpt_acts *acts, const float *x) {
    const int BT = cfg->batch * cfg->context, C = cfg->channels, V = cfg->vocab;
    gpt_cuda_layernorm_forward(gpu, acts->lnf, acts->lnf_mean, acts->lnf_rstd, x, w[GPT_LNFW],
                               w[GPT_LNFB], BT, C);
    gpt_cuda_matmul(gpu, GPT_TRANS_B, BT, V, C, gpt_beside_param(gpu, acts->lnf, BT, C, 0),
                    gpt_matrix(w[GPT_WTE], C, gpu->bf16), gpt_matrix(acts->logits, V, 0), 1);
}

/* acts->dx(B, T, C) = gradient of x from that of the logits; g = but for wpe, which is not used */
static void gpt_cuda_head_backward(gpt_cuda *gpu, const gpt_config *cfg, void *const *w,
                                   void *const *g, gpt_acts *acts, const float *x) {
    const int BT = cfg->batch * cfg->context, C = cfg->channels, V = cfg->vocab;
    gpt_cuda_product_backward(gpu, acts->d1, g[GPT_WTE], acts->logits, acts->lnf, w[GPT_WTE], BT, C,
                              V);
    gpt_cuda_layernorm_backward(gpu, acts->dx, 0, g[GPT_LNFW], g[GPT_LNFB], acts->d1, x,
                                w[GPT_LNFW], acts->lnf_mean, acts->lnf_rstd, BT, C);
}

/* *gpu->loss = mean cross-entropy in nats; acts->logits become its gradients. Of gpu->targets */
static void gpt_cuda_loss(gpt_cuda *gpu, const gpt_config *cfg, gpt_acts *acts) {
    const int BT = cfg->batch * cfg->context;
    const gpt_cross_entropy rows = {acts->logits, gpu->row_loss, gpu->targets, cfg->vocab,
                                    1.0f / (float)BT};
    const gpt_mean_loss mean = {gpu->loss, gpu->row_loss, BT};
    gpt_launch(gpu, BT, rows);
    gpt_launch(gpu, 1, mean);
}

/* ---- memory ---------------------------------------------------------------------------------- */

// Takes nbytes of memory, aligned for every access; with at->memory NULL it only counts.
static void *gpt_cuda_take(const gpt_cuda *gpu, size_t *used, size_t nbytes) {
    char *at = gpu->memory ? gpu->memory + *used : NULL;
    *used += (nbytes + 255) / 256 * 256;
    return at;
}

static size_t gpt_cuda_place(const gpt_config *cfg, gpt_cuda *gpu, gpt_acts *acts) {
    const size_t BT = (size_t)cfg->batch * (size_t)cfg->context, T = (size_t)cfg->context;
    const size_t C = (size_t)cfg->channels, V = (size_t)cfg->vocab;
    const size_t widest = 4 * C > V ? 4 * C : V, datt = BT * (size_t)cfg->heads * T;
    const size_t groups = (BT + GPT_SUM_ROWS - 1) / GPT_SUM_ROWS;
    size_t used = 0;
    float *at = (float *)gpt_cuda_take(gpu, &used, gpt_acts_numel(cfg, datt) * sizeof(float));
    if (at) gpt_acts_place(cfg, acts, at, datt);
    gpu->inputs = (uint8_t *)gpt_cuda_take(gpu, &used, BT);
    gpu->targets = (uint8_t *)gpt_cuda_take(gpu, &used, BT);
    gpu->loss = (double *)gpt_cuda_take(gpu, &used, sizeof(double));
    gpu->row_loss = (float *)gpt_cuda_take(gpu, &used, BT * sizeof(float));
    gpu->sums = (float *)gpt_cuda_take(gpu, &used, groups * 4 * C * sizeof(float));
    gpu->dqkv = (float *)gpt_cuda_take(gpu, &used, BT * 3 * C * sizeof(float));
    for (int side = 0; side < 2 && gpu->bf16; side++) {
        gpu->half[side] = (uint16_t *)gpt_cuda_take(gpu, &used, BT * widest * sizeof(uint16_t));
    }
    return used;
}

static void gpt_cuda_destroy(gpt_cuda *gpu, gpt_acts *acts) {
    if (gpu->blas) (void)cublasDestroy(gpu->blas);
    if (gpu->memory) (void)cudaFree(gpu->memory);
    free(acts->blocks);
    memset(gpu, 0, sizeof *gpu);
    memset(acts, 0, sizeof *acts);
}

/* On the current device. 0 on success; else gpu->failed and ->error tell, and destroy frees */
static int gpt_cuda_create(const gpt_config *cfg, int bf16, cudaStream_t stream, gpt_cuda *gpu,
                           gpt_acts *acts) {
    memset(gpu, 0, sizeof *gpu);
    memset(acts, 0, sizeof *acts);
    gpu->bf16 = bf16;
    gpu->stream = stream;
    acts->blocks = (gpt_block_acts *)calloc((size_t)cfg->layers, sizeof *acts->blocks);
    if (!acts->blocks) gpt_cuda_check(gpu, cudaErrorMemoryAllocation, "activations");
    const size_t nbytes = gpt_cuda_place(cfg, gpu, acts);
    if (!gpu->error) gpt_cuda_check(gpu, cudaMalloc((void **)&gpu->memory, nbytes), "activations");
    if (gpu->error) return -1;
    gpt_cuda_place(cfg, gpu, acts);
    acts->nbytes = nbytes;
    if (cublasCreate(&gpu->blas) != CUBLAS_STATUS_SUCCESS ||
        cublasSetStream(gpu->blas, stream) != CUBLAS_STATUS_SUCCESS) {
        gpu->failed = "cuBLAS";
        gpu->error = "it could not be started";
        return -1;
    }
    return 0;
}

#endif // GPT_CUDA_H
