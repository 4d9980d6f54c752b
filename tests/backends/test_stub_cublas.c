/* test_stub_cublas.c - the cuBLAS stub (tests/stubs): its products are right for each type, and it
   rejects calls that cuBLAS rejects

   SPDX-License-Identifier: MIT */
#define TAGS NO(SHM) | STUB
#include "harness.h"
#include "stubs/cublas_v2.h"

#include <math.h> // frexp, ldexp, nearbyint

enum { M = 3, N = 4, K = 5, COUNT = 2, ROOM = 64 };

// A call: c(M, N) = a(M, K) * b(K, N), column-major, twice, with the fields that a test changes.
typedef struct {
    cublasOperation_t op_a, op_b;
    int m, lda, ldc, count;
    size_t off; // misalignment of c in bytes
    cudaDataType type_a, type_b, type_c;
    cublasComputeType_t compute;
    long long stride_c;
    float beta;
} call;

static void *a, *b, *c; // device memory of a test

static void allocate(void) {
    CHECK_STATUS(cudaMalloc(&a, ROOM * sizeof(float)), cudaSuccess);
    CHECK_STATUS(cudaMalloc(&b, ROOM * sizeof(float)), cudaSuccess);
    CHECK_STATUS(cudaMalloc(&c, ROOM * sizeof(float)), cudaSuccess);
}

static cublasStatus_t multiply(const call *x) {
    const float one = 1.0f;
    cublasHandle_t handle;
    CHECK_STATUS(cublasCreate(&handle), CUBLAS_STATUS_SUCCESS);
    CHECK_STATUS(cublasSetMathMode(handle, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION),
                 CUBLAS_STATUS_SUCCESS);
    const cublasStatus_t status = cublasGemmStridedBatchedEx(
        handle, x->op_a, x->op_b, x->m, N, K, &one, a, x->type_a, x->lda, M * K, b, x->type_b,
        x->op_b == CUBLAS_OP_T ? N : K, K * N, &x->beta, (char *)c + x->off, x->type_c, x->ldc,
        x->stride_c, x->count, x->compute, CUBLAS_GEMM_DEFAULT);
    CHECK_STATUS(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_STATUS(cublasDestroy(handle), CUBLAS_STATUS_SUCCESS);
    return status;
}

/* Returns the value rounded to `bits` explicit bits of mantissa. */
static float with_bits(float value, int bits) {
    int exponent;
    const double scale = (double)(2 << bits), mantissa = frexp((double)value, &exponent);
    return (float)ldexp(nearbyint(mantissa * scale) / scale, exponent);
}

static void put(void *to, int i, float value, cudaDataType type) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    if (type == CUDA_R_16BF) ((uint16_t *)to)[i] = (uint16_t)(word >> 16);
    else ((float *)to)[i] = value;
}

static float at(const void *from, int i, cudaDataType type) {
    if (type == CUDA_R_32F) return ((const float *)from)[i];
    const uint32_t word = (uint32_t)((const uint16_t *)from)[i] << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static const struct {
    const char *name;
    cudaDataType type, type_c;
    cublasComputeType_t compute;
    int bits, bits_c; // explicit bits of mantissa: factors, result
} numbers[] = {
    {"f32", CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, 23, 23},
    {"tf32", CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32, 10, 23},
    {"bf16", CUDA_R_16BF, CUDA_R_16BF, CUBLAS_COMPUTE_32F, 7, 7},
    {"bf16_to_f32", CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, 7, 23},
};

/* Both operands transposed or not, twice, added to the old value or not. */
TEST_P(stub_cublas, products, numbers) {
    allocate();
    for (int way = 0; way < 8; way++) {
        const int trans_a = way & 1, trans_b = way >> 1 & 1;
        uint64_t state = h_seed() + (uint64_t)way;
        float wa[ROOM], wb[ROOM];
        const call x = {trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, trans_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                        M, trans_a ? K : M, M, COUNT, 0, row->type, row->type, row->type_c,
                        row->compute, M * N, (float)(way >> 2)};
        for (int i = 0; i < ROOM; i++) {
            wa[i] = (float)(h_rand64(&state) % 100000) / 7e4f - 0.5f;
            wb[i] = (float)(h_rand64(&state) % 100000) / 7e4f - 0.5f;
            if (row->type == CUDA_R_16BF) wa[i] = with_bits(wa[i], 7), wb[i] = with_bits(wb[i], 7);
            put(a, i, wa[i], row->type);
            put(b, i, wb[i], row->type);
            put(c, i, x.beta != 0.0f ? 2.0f : NAN, row->type_c); // c is not read if beta is 0
            wa[i] = with_bits(wa[i], row->bits), wb[i] = with_bits(wb[i], row->bits);
        }
        CHECK_STATUS(multiply(&x), CUBLAS_STATUS_SUCCESS);
        for (int i = 0; i < COUNT * M * N; i++) {
            const int to = i % (M * N), m = to % M, n = to / M;
            const float *ma = wa + i / (M * N) * M * K, *mb = wb + i / (M * N) * K * N;
            float sum = 0.0f;
            for (int k = 0; k < K; k++) {
                sum += ma[trans_a ? m * K + k : k * M + m] * mb[trans_b ? k * N + n : n * K + k];
            }
            sum = with_bits(sum + 2.0f * x.beta, row->bits_c);
            CHECK_MSG(at(c, i, row->type_c) == sum, "%d: %.9g, expected %.9g", i,
                      (double)at(c, i, row->type_c), (double)sum);
        }
    }
}

static const struct {
    const char *name;
    cublasStatus_t status;
    int m, lda, ldc, count, stride_c;
    size_t off;
    cudaDataType type_a, type_b, type_c;
    cublasComputeType_t compute;
} calls[] = {
#define F32S CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F
    {"right", CUBLAS_STATUS_SUCCESS, M, M, M, 2, M * N, 0, F32S},
    {"negative", CUBLAS_STATUS_INVALID_VALUE, -1, M, M, 2, M * N, 0, F32S},
    {"short_a", CUBLAS_STATUS_INVALID_VALUE, M, M - 1, M, 2, M * N, 0, F32S},
    {"short_c", CUBLAS_STATUS_INVALID_VALUE, M, M, M - 1, 2, M * N, 0, F32S},
    {"on_top", CUBLAS_STATUS_INVALID_VALUE, M, M, M, 2, 0, 0, F32S},
    {"on_top_of_none", CUBLAS_STATUS_SUCCESS, M, M, M, 1, 0, 0, F32S},
    {"unaligned", CUBLAS_STATUS_INVALID_VALUE, M, M, M, 2, M * N, 2, F32S},
    {"bf16", CUBLAS_STATUS_SUCCESS, M, M, M, 2, M * N, 2, CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF,
     CUBLAS_COMPUTE_32F},
    {"two_types", CUBLAS_STATUS_NOT_SUPPORTED, M, M, M, 2, M * N, 0, CUDA_R_32F, CUDA_R_16BF,
     CUDA_R_32F, CUBLAS_COMPUTE_32F},
    {"narrowed", CUBLAS_STATUS_NOT_SUPPORTED, M, M, M, 2, M * N, 0, CUDA_R_32F, CUDA_R_32F,
     CUDA_R_16BF, CUBLAS_COMPUTE_32F},
    {"tf32_of_bf16", CUBLAS_STATUS_NOT_SUPPORTED, M, M, M, 2, M * N, 0, CUDA_R_16BF, CUDA_R_16BF,
     CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32},
};

TEST_P(stub_cublas, refuses, calls) {
    const call x = {CUBLAS_OP_N, CUBLAS_OP_N, row->m,      row->lda,     row->ldc,      row->count, row->off,
                    row->type_a, row->type_b, row->type_c, row->compute, row->stride_c, 0.0f};
    allocate();
    CHECK_STATUS(multiply(&x), row->status);
}

TEST(stub_cublas, math_mode) {
    cublasHandle_t handle;
    CHECK_STATUS(cublasCreate(&handle), CUBLAS_STATUS_SUCCESS);
    CHECK_STATUS(cublasSetMathMode(handle, CUBLAS_DEFAULT_MATH), CUBLAS_STATUS_SUCCESS);
    CHECK_STATUS(cublasSetMathMode(handle, (cublasMath_t)1), CUBLAS_STATUS_INVALID_VALUE);
    CHECK_STATUS(cublasSetMathMode(NULL, CUBLAS_DEFAULT_MATH), CUBLAS_STATUS_NOT_INITIALIZED);
    CHECK_STATUS(cublasDestroy(handle), CUBLAS_STATUS_SUCCESS);
}
