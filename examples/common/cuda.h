/* cuda.h - what the trainers for GPUs share: kernels and their launch, numbers of two types, matrix
   products by cuBLAS, sums of columns, and device memory

   Everything takes a gpu_math, which says on which stream. A failure is kept in it; what is called
   after it does nothing.

   A kernel is a struct: its members are the arguments, and run() is what one warp of 32 threads
   does, most often with one row. Lanes of a warp join their sums by shuffles; warps know nothing of
   each other. Without a GPU (the stand-in headers of tests/stubs) run() is an ordinary function,
   and a warp has one lane.

   SPDX-License-Identifier: MIT */
#ifndef EXAMPLES_CUDA_H
#define EXAMPLES_CUDA_H

#include <cublas_v2.h>    // cublasGemmStridedBatchedEx
#include <cuda_runtime.h> // cudaMalloc, kernels
#include <math.h>         // expf, logf, sqrtf
#include <stdint.h>       // uint16_t, int64_t
#include <string.h>       // memcpy

#include "examples/common/gemm.h" // GEMM_ADD, GEMM_TRANS_A, GEMM_TRANS_B

#ifndef FSDP_CUDA_EMULATION
#include <cuda_bf16.h> // __float2bfloat16_rn
#endif

struct gpu_bf16 {
    uint16_t bits;
};

struct gpu_math {
    cublasHandle_t blas;
    cublasComputeType_t compute;
    cudaStream_t stream;
    const char *failed, *error; // the first failure: the call, and its text; NULL: none
};

static inline void gpu_check(gpu_math *gpu, cudaError_t error, const char *what) {
    if (error == cudaSuccess || gpu->error) return;
    gpu->failed = what;
    gpu->error = cudaGetErrorString(error);
}

/* Starts cuBLAS on gpu->stream. Returns 0; else gpu->failed and ->error tell. */
static inline int gpu_math_start(gpu_math *gpu) {
    // If cuBLAS splits a sum, its partial sums stay f32 even if the result is bf16.
    if (cublasCreate(&gpu->blas) == CUBLAS_STATUS_SUCCESS &&
        cublasSetStream(gpu->blas, gpu->stream) == CUBLAS_STATUS_SUCCESS &&
        cublasSetMathMode(gpu->blas, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION) ==
            CUBLAS_STATUS_SUCCESS)
        return 0;
    gpu->failed = "cuBLAS";
    gpu->error = "it could not be started";
    return -1;
}

static inline void gpu_math_stop(gpu_math *gpu) {
    if (gpu->blas) (void)cublasDestroy(gpu->blas);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Device memory of the size, filled with zeros; `what` is for the message. */
static inline void *gpu_alloc(gpu_math *gpu, size_t nbytes, const char *what) {
    void *data = NULL;
    if (gpu->error) return NULL;
    gpu_check(gpu, cudaMalloc(&data, nbytes), what);
    if (data) gpu_check(gpu, cudaMemsetAsync(data, 0, nbytes, gpu->stream), what);
    return data;
}

/* A few bytes from the device; waits for everything before them in the stream. */
static inline void gpu_read(gpu_math *gpu, void *to, const void *from, size_t nbytes) {
    if (gpu->error) return;
    gpu_check(gpu, cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDeviceToHost, gpu->stream),
              "reading a result");
    gpu_check(gpu, cudaStreamSynchronize(gpu->stream), "waiting for a result");
}

// Takes numel elements, aligned for every access; at NULL: it only counts.
template <class E> static void gpu_take_array(E **array, char *at, size_t *used, size_t numel) {
    *array = at ? (E *)(at + *used) : NULL;
    *used += (numel * sizeof(E) + 255) / 256 * 256;
}

/* ---- what a kernel is ------------------------------------------------------------------------ */

#ifdef FSDP_CUDA_EMULATION
#define GPU_DEVICE static inline
#define GPU_SHARED static inline // host and device
#define GPU_RUN    inline
enum { GPU_LANES = 1 };
GPU_DEVICE int gpu_lane() { return 0; }

template <class Kernel> static void gpu_kernel(const void *kernel, unsigned warp) {
    ((const Kernel *)kernel)->run(warp);
}
#else
#define GPU_DEVICE static __device__ __forceinline__
#define GPU_SHARED static __host__ __device__ __forceinline__
#define GPU_RUN    __device__ __forceinline__
enum { GPU_LANES = 32, GPU_WARPS = 8 }; // threads of a warp; warps of a block
GPU_DEVICE int gpu_lane() { return (int)(threadIdx.x % GPU_LANES); }

template <class Kernel>
static __global__ void __launch_bounds__(GPU_LANES *GPU_WARPS)
    gpu_kernel(const Kernel kernel, int64_t warps) {
    const int64_t warp = (int64_t)blockIdx.x * GPU_WARPS + threadIdx.x / GPU_LANES;
    if (warp < warps) kernel.run(warp);
}
#endif

template <class Kernel> static void gpu_launch(gpu_math *gpu, int64_t warps, const Kernel &kernel) {
    if (warps > INT32_MAX) gpu_check(gpu, cudaErrorInvalidConfiguration, "a kernel");
    if (warps == 0 || gpu->error) return;
#ifdef FSDP_CUDA_EMULATION
    gpu_check(
        gpu,
        fsdp_stub_launch(gpu_kernel<Kernel>, &kernel, sizeof kernel, (unsigned)warps, gpu->stream),
        "a kernel");
#else
    const unsigned blocks = (unsigned)((warps + GPU_WARPS - 1) / GPU_WARPS);
    gpu_kernel<Kernel><<<blocks, GPU_LANES * GPU_WARPS, 0, gpu->stream>>>(kernel, warps);
    gpu_check(gpu, cudaGetLastError(), "a kernel");
#endif
}

static inline int64_t gpu_pieces(int64_t count, int size) { return (count + size - 1) / size; }

// x of all lanes, joined: the same in every lane. All of them call it.
template <class X> GPU_DEVICE X gpu_join_sum(X x) {
#ifndef FSDP_CUDA_EMULATION
    for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
#endif
    return x;
}

GPU_DEVICE float gpu_larger(float a, float b) { return a > b ? a : b; }

GPU_DEVICE float gpu_join_max(float x) {
#ifndef FSDP_CUDA_EMULATION
    for (int apart = 16; apart > 0; apart /= 2) {
        x = gpu_larger(x, __shfl_xor_sync(0xffffffffu, x, apart));
    }
#endif
    return x;
}

/* ---- numbers, eight at a time ---------------------------------------------------------------- */

GPU_DEVICE float gpu_wide(float x) { return x; }

GPU_DEVICE float gpu_wide(gpu_bf16 x) {
    const uint32_t word = (uint32_t)x.bits << 16;
    float wide;
    memcpy(&wide, &word, sizeof wide);
    return wide;
}

GPU_DEVICE void gpu_set(float *to, float x) { *to = x; }

// To the nearest bf16, ties to even; a NaN stays one.
GPU_DEVICE void gpu_set(gpu_bf16 *to, float x) {
#ifdef FSDP_CUDA_EMULATION
    uint32_t word;
    memcpy(&word, &x, sizeof word);
    const int is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    to->bits = (uint16_t)(is_nan ? word >> 16 | 0x40u : (word + 0x7fffu + (word >> 16 & 1u)) >> 16);
#else
    to->bits = __bfloat16_as_ushort(__float2bfloat16_rn(x)); // one instruction
#endif
}

// Elements that a lane has in registers: 16 bytes of bf16, or twice 16 of f32.
enum { GPU_8 = 8, GPU_STRIDE = GPU_8 * GPU_LANES };

struct gpu_8 {
    float at[GPU_8];
};

// As many as a thread loads or stores at once. A whole one is copied as such, by accesses of 16 bytes.
template <class E> struct alignas(16) gpu_raw { E at[GPU_8]; };

// Where loads and stores of 16 bytes may be used: with every size that a GPU is good at. Odd sizes
// take the same code, one number after the other.
template <class E> GPU_DEVICE bool gpu_is_whole(const E *row, int i, int end) {
    return i + GPU_8 <= end && (uintptr_t)(row + i) % 16 == 0;
}

// Returns elements i to i+7 of a row; from `end` on they are zeros.
template <class E> GPU_DEVICE gpu_8 gpu_load(const E *row, int i, int end) {
    gpu_raw<E> raw;
    gpu_8 x;
    if (gpu_is_whole(row, i, end)) {
        raw = *reinterpret_cast<const gpu_raw<E> *>(row + i);
    } else {
        for (int k = 0; k < GPU_8; k++)
            gpu_set(&raw.at[k], i + k < end ? gpu_wide(row[i + k]) : 0.0f);
    }
    for (int k = 0; k < GPU_8; k++) x.at[k] = gpu_wide(raw.at[k]);
    return x;
}

template <class E> GPU_DEVICE void gpu_store(E *row, int i, int end, const gpu_8 &x) {
    gpu_raw<E> raw;
    for (int k = 0; k < GPU_8; k++) gpu_set(&raw.at[k], x.at[k]);
    if (gpu_is_whole(row, i, end)) {
        *reinterpret_cast<gpu_raw<E> *>(row + i) = raw;
    } else {
        for (int k = 0; k < GPU_8 && i + k < end; k++) row[i + k] = raw.at[k];
    }
}

GPU_DEVICE gpu_8 gpu_add(gpu_8 a, const gpu_8 &b) {
    for (int k = 0; k < GPU_8; k++) a.at[k] += b.at[k];
    return a;
}

/* ---- matrix product -------------------------------------------------------------------------- */

typedef struct {
    void *data;
    cudaDataType type;
    int row;          // elements from one row to the next
    long long matrix; // and from one matrix of a batch to the next
} gpu_operand;

static inline cudaDataType gpu_type_of(const float *) { return CUDA_R_32F; }
static inline cudaDataType gpu_type_of(const gpu_bf16 *) { return CUDA_R_16BF; }

template <class E>
static inline gpu_operand gpu_matrix(const E *data, int row, long long matrix = 0) {
    gpu_operand x;
    x.data = const_cast<E *>(data);
    x.type = gpu_type_of(data);
    x.row = row;
    x.matrix = matrix;
    return x;
}

/* c(m, n) = or += op(a)(m, k) * op(b)(k, n), `count` times; flags as in gemm_f32. cuBLAS counts
   by columns: it computes the transposed product, b first. */
static void gpu_matmul(gpu_math *gpu, int flags, int m, int n, int k, gpu_operand a, gpu_operand b,
                       gpu_operand c, int count) {
    const float one = 1.0f, keep = flags & GEMM_ADD ? 1.0f : 0.0f;
    if (gpu->error) return;
    const cublasStatus_t status = cublasGemmStridedBatchedEx(
        gpu->blas, flags & GEMM_TRANS_B ? CUBLAS_OP_T : CUBLAS_OP_N,
        flags & GEMM_TRANS_A ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &one, b.data, b.type, b.row,
        b.matrix, a.data, a.type, a.row, a.matrix, &keep, c.data, c.type, c.row, c.matrix, count,
        gpu->compute, CUBLAS_GEMM_DEFAULT);
    if (status == CUBLAS_STATUS_SUCCESS) return;
    gpu->failed = "cuBLAS";
    gpu->error = cublasGetStatusString(status);
}

/* out(BT, OC) = x(BT, IC) * w(OC, IC)^T. Whoever uses it adds the bias. */
template <class E, class Out>
static void gpu_product_forward(gpu_math *gpu, Out *out, const E *x, const E *w, int BT, int IC,
                                int OC) {
    gpu_matmul(gpu, GEMM_TRANS_B, BT, OC, IC, gpu_matrix(x, IC), gpu_matrix(w, IC),
               gpu_matrix(out, OC), 1);
}

/* dx(BT, IC) = dout(BT, OC) * w;  dw(OC, IC) = dout^T * x */
template <class E>
static void gpu_product_backward(gpu_math *gpu, E *dx, E *dw, const E *dout, const E *x, const E *w,
                                 int BT, int IC, int OC) {
    gpu_matmul(gpu, 0, BT, IC, OC, gpu_matrix(dout, OC), gpu_matrix(w, IC), gpu_matrix(dx, IC), 1);
    gpu_matmul(gpu, GEMM_TRANS_A, OC, IC, BT, gpu_matrix(dout, OC), gpu_matrix(x, IC),
               gpu_matrix(dw, IC), 1);
}

/* ---- sums of columns ------------------------------------------------------------------------- */

// Gradients of biases and norms are sums over all rows: first of 16 rows each, where a lane has
// eight columns and a warp 256, then of these groups. 16: so that there are warps enough.
enum { GPU_SUM_ROWS = 16, GPU_SUM_COLUMNS = 256 };

// The part of a matrix that a warp computes.
struct gpu_tile_of {
    int group, top, bottom, left, right;
    GPU_RUN gpu_tile_of(int64_t warp, int rows, int cols) {
        const int wide = (cols + GPU_SUM_COLUMNS - 1) / GPU_SUM_COLUMNS;
        group = (int)(warp / wide);
        top = group * GPU_SUM_ROWS;
        bottom = top + GPU_SUM_ROWS < rows ? top + GPU_SUM_ROWS : rows;
        left = (int)(warp % wide) * GPU_SUM_COLUMNS;
        right = left + GPU_SUM_COLUMNS < cols ? left + GPU_SUM_COLUMNS : cols;
    }
};

static inline int64_t gpu_tiles(int rows, int cols) {
    return gpu_pieces(rows, GPU_SUM_ROWS) * gpu_pieces(cols, GPU_SUM_COLUMNS);
}

// sums(groups, cols): of d
template <class E> struct gpu_sum_bias {
    float *sums;
    const E *d;
    int rows, cols;
    GPU_RUN void run(int64_t warp) const {
        const gpu_tile_of tile(warp, rows, cols);
        for (int c = tile.left + GPU_8 * gpu_lane(); c < tile.right; c += GPU_STRIDE) {
            gpu_8 sum = {};
            for (int i = tile.top; i < tile.bottom; i++) {
                sum = gpu_add(sum, gpu_load(d + (int64_t)i * cols, c, cols));
            }
            gpu_store(sums + (int64_t)tile.group * cols, c, cols, sum);
        }
    }
};

// g(cols) = or += the sum over the groups of the first sums, g_n(cols) that of the second ones; a
// warp has eight columns of one.
template <class E> struct gpu_sum_groups {
    E *g, *g_n;
    const float *sums;
    int cols, groups, add;
    GPU_RUN void run(int64_t warp) const {
        const int64_t pieces = (cols + GPU_8 - 1) / GPU_8;
        const int which = (int)(warp / pieces), c = (int)(warp % pieces) * GPU_8;
        const float *of = sums + (int64_t)which * groups * cols;
        gpu_8 sum = {};
        for (int i = gpu_lane(); i < groups; i += GPU_LANES) {
            sum = gpu_add(sum, gpu_load(of + (int64_t)i * cols, c, cols));
        }
        for (int k = 0; k < GPU_8; k++) sum.at[k] = gpu_join_sum(sum.at[k]);
        if (gpu_lane() != 0) return;
        E *to = which ? g_n : g;
        gpu_store(to, c, cols, add ? gpu_add(gpu_load(to, c, cols), sum) : sum);
    }
};

/* g(cols) and, unless NULL, g_n(cols) = or += the sums of groups of `rows` rows */
template <class E>
static void gpu_join_groups(gpu_math *gpu, E *g, E *g_n, const float *sums, int rows, int cols,
                            int add = 0) {
    const gpu_sum_groups<E> kernel = {g, g_n, sums, cols, (int)gpu_pieces(rows, GPU_SUM_ROWS), add};
    gpu_launch(gpu, gpu_pieces(cols, GPU_8) * (g_n ? 2 : 1), kernel);
}

/* dbias(cols) = or += columns of d(rows, cols) */
template <class E>
static void gpu_bias_backward(gpu_math *gpu, float *sums, E *dbias, const E *d, int rows, int cols,
                              int add = 0) {
    const gpu_sum_bias<E> some = {sums, d, rows, cols};
    gpu_launch(gpu, gpu_tiles(rows, cols), some);
    gpu_join_groups(gpu, dbias, (E *)NULL, sums, rows, cols, add);
}

#endif // EXAMPLES_CUDA_H
