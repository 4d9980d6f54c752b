/* stub_cublas.c - implements cublas_v2.h of this folder: products as plain loops in a stream's
   order

   Rejects the shapes and combinations of types that cuBLAS rejects. It also rejects unaligned
   elements and batches with overlapping results, which give no product there. Sums are f32, with
   every math mode.

   SPDX-License-Identifier: MIT */
#include "cublas_v2.h"

#include <stdint.h> /* uint16_t, uint32_t */
#include <stdlib.h> /* abort, calloc, free, malloc */
#include <string.h> /* memcpy */

struct cublasContext {
    cudaStream_t stream;
};

typedef struct {
    const char *data;
    cudaDataType type;
    int tf32;                  /* 1: read as TF32 */
    int trans, rows, cols, ld; /* rows, cols: as stored, column-major */
    long long stride;
} operand;

typedef struct {
    operand a, b, c;
    float alpha, beta;
    int m, n, k;
} product;

static size_t type_size(cudaDataType type) { return type == CUDA_R_16BF ? 2 : 4; }

/* Clears the last `bits` bits: rounds to nearest, ties to even; a NaN stays a NaN. */
static float round_off(float value, int bits) {
    const uint32_t rest = (1u << bits) - 1;
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    if ((word & 0x7fffffffu) > 0x7f800000u) word |= 0x400000u;
    else word += (rest >> 1) + (word >> bits & 1u);
    word &= ~rest;
    memcpy(&value, &word, sizeof value);
    return value;
}

enum { NOT_IN_BF16 = 16, NOT_IN_TF32 = 13 }; /* numbers of bits */

static float get(const operand *x, const char *matrix, int row, int col) {
    const long long at = x->trans ? (long long)row * x->ld + col : (long long)col * x->ld + row;
    float value;
    if (x->type == CUDA_R_16BF) {
        uint16_t half;
        memcpy(&half, matrix + 2 * at, sizeof half);
        const uint32_t word = (uint32_t)half << 16;
        memcpy(&value, &word, sizeof value);
    } else {
        memcpy(&value, matrix + 4 * at, sizeof value);
    }
    return x->tf32 ? round_off(value, NOT_IN_TF32) : value;
}

static void put(const operand *x, char *matrix, int row, int col, float value) {
    const long long at = (long long)col * x->ld + row;
    uint32_t word;
    if (x->type == CUDA_R_16BF) {
        value = round_off(value, NOT_IN_BF16);
        memcpy(&word, &value, sizeof word);
        const uint16_t half = (uint16_t)(word >> 16);
        memcpy(matrix + 2 * at, &half, sizeof half);
    } else {
        memcpy(matrix + 4 * at, &value, sizeof value);
    }
}

/* Reports a product's reads or writes to the race checker. */
static void touch(const operand *x, const char *matrix, int write) {
    const size_t size = type_size(x->type);
    if (x->ld == x->rows) {
        fsdp_stub_touch(matrix, (size_t)x->rows * (size_t)x->cols * size, write);
        return;
    }
    for (int col = 0; col < x->cols; col++) {
        fsdp_stub_touch(matrix + (size_t)col * (size_t)x->ld * size, (size_t)x->rows * size, write);
    }
}

static void multiply(const void *params, unsigned index) {
    const product *p = (const product *)params;
    const char *a = p->a.data + (long long)index * p->a.stride * (long long)type_size(p->a.type);
    const char *b = p->b.data + (long long)index * p->b.stride * (long long)type_size(p->b.type);
    const long long to = (long long)index * p->c.stride * (long long)type_size(p->c.type);
    char *c = (char *)(uintptr_t)p->c.data + to;
    touch(&p->a, a, 0);
    touch(&p->b, b, 0);
    if (p->beta != 0.0f) touch(&p->c, c, 0);
    touch(&p->c, c, 1);
    /* op(a) as f32, and the sums of a column: each sum adds its k products in their order. */
    const size_t rows = (size_t)p->m;
    float *left = (float *)malloc((rows * (size_t)p->k + rows) * sizeof(float));
    if (!left) abort();
    float *sums = left + rows * (size_t)p->k;
    for (int i = 0; i < p->k; i++) {
        for (int row = 0; row < p->m; row++) {
            left[(size_t)i * rows + (size_t)row] = get(&p->a, a, row, i);
        }
    }
    for (int col = 0; col < p->n; col++) {
        for (size_t row = 0; row < rows; row++) sums[row] = 0.0f;
        for (int i = 0; i < p->k; i++) {
            const float factor = get(&p->b, b, i, col), *from = left + (size_t)i * rows;
            for (size_t row = 0; row < rows; row++) sums[row] += from[row] * factor;
        }
        for (int row = 0; row < p->m; row++) {
            float sum = sums[row] * p->alpha;
            /* with beta 0 it must not be read: it may be a NaN */
            if (p->beta != 0.0f) sum += p->beta * get(&p->c, c, row, col);
            put(&p->c, c, row, col, sum);
        }
    }
    free(left);
}

cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    int device;
    if (cudaGetDevice(&device) != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = (cublasHandle_t)calloc(1, sizeof **handle);
    return *handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (mode != CUBLAS_DEFAULT_MATH && mode != CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "unknown";
}

static operand operand_of(const void *data, cudaDataType type, cublasOperation_t op, int rows,
                          int cols, int ld, long long stride) {
    operand x;
    x.data = (const char *)data;
    x.type = type;
    x.tf32 = 0;
    x.trans = op == CUBLAS_OP_T;
    x.rows = x.trans ? cols : rows;
    x.cols = x.trans ? rows : cols;
    x.ld = ld;
    x.stride = stride;
    return x;
}

static int is_bad(const operand *x) {
    return x->ld < 1 || x->ld < x->rows || !x->data || (uintptr_t)x->data % type_size(x->type) != 0;
}

/* Returns 1 if cublasGemmEx's table has this combination. */
static int go_together(cudaDataType type_a, cudaDataType type_b, cudaDataType type_c,
                       cublasComputeType_t compute) {
    if (type_a != type_b) return 0;
    if (type_a == CUDA_R_32F && type_c == CUDA_R_32F) {
        return compute == CUBLAS_COMPUTE_32F || compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    }
    return type_a == CUDA_R_16BF && (type_c == CUDA_R_16BF || type_c == CUDA_R_32F) &&
           compute == CUBLAS_COMPUTE_32F;
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a,
                                          cublasOperation_t op_b, int m, int n, int k,
                                          const void *alpha, const void *a, cudaDataType type_a,
                                          int lda, long long stride_a, const void *b,
                                          cudaDataType type_b, int ldb, long long stride_b,
                                          const void *beta, void *c, cudaDataType type_c, int ldc,
                                          long long stride_c, int count,
                                          cublasComputeType_t compute, cublasGemmAlgo_t algo) {
    product p;
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (m < 0 || n < 0 || k < 0 || count < 0 || !alpha || !beta) return CUBLAS_STATUS_INVALID_VALUE;
    if (!go_together(type_a, type_b, type_c, compute) || algo != CUBLAS_GEMM_DEFAULT) {
        return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    memset(&p, 0, sizeof p);
    p.a = operand_of(a, type_a, op_a, m, k, lda, stride_a);
    p.b = operand_of(b, type_b, op_b, k, n, ldb, stride_b);
    p.c = operand_of(c, type_c, CUBLAS_OP_N, m, n, ldc, stride_c);
    p.a.tf32 = p.b.tf32 = compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    memcpy(&p.alpha, alpha, sizeof p.alpha);
    memcpy(&p.beta, beta, sizeof p.beta);
    p.m = m;
    p.n = n;
    p.k = k;
    if (is_bad(&p.a) || is_bad(&p.b) || is_bad(&p.c) || (count > 1 && stride_c == 0)) {
        return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (m == 0 || n == 0 || count == 0) return CUBLAS_STATUS_SUCCESS;
    if (fsdp_stub_launch(multiply, &p, sizeof p, (unsigned)count, handle->stream) != cudaSuccess) {
        return CUBLAS_STATUS_EXECUTION_FAILED;
    }
    return CUBLAS_STATUS_SUCCESS;
}
