/* fsdp_cuda_gemm.h - a product of matrices on a GPU by cuBLAS, for fsdp_muon.h

   A program that wants it includes it after FSDP_IMPLEMENTATION is defined, with the other headers,
   and links with -lcublas:

       cublasHandle_t blas;
       cublasCreate(&blas);                                    // after fsdp_init
       desc.gemm = fsdp_cuda_gemm, desc.gemm_user = blas;      // of fsdp_muon_desc

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif

#ifndef FSDP_CUDA_GEMM_H
#define FSDP_CUDA_GEMM_H
#ifndef FSDP_MATH_ONLY

#ifdef __cplusplus
extern "C" {
#endif

// clang-format off
/* fsdp_cuda_gemm - an fsdp_gemm_fn of f32 and bf16 in device memory
   user        a cublasHandle_t of the rank's device; its stream becomes `stream`
   Arithmetic  f32: sums of f32, without TF32 unless the handle's math mode allows it. bf16: sums of
               f32
   Result      FSDP_OK; UNSUPPORTED: another dtype, or a size beyond int32_t; BACKEND: cuBLAS failed
   Thread      that of the handle
   Source      cublasGemmStridedBatchedEx */
// clang-format on
FSDP_API fsdp_status fsdp_cuda_gemm(void *user, void *stream, int64_t m, int64_t n, int64_t k,
                                    float alpha, const void *a, int64_t lda, int a_transposed,
                                    const void *b, int64_t ldb, int b_transposed, float beta,
                                    void *c, int64_t ldc, fsdp_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_CUDA_GEMM_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_CUDA_GEMM_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_CUDA_GEMM_IMPLEMENTED

#include <cublas_v2.h>

// cuBLAS stores matrices by columns: for cuBLAS the result is c', which is op(b)' op(a)'.
FSDP_API fsdp_status fsdp_cuda_gemm(void *user, void *stream, int64_t m, int64_t n, int64_t k,
                                    float alpha, const void *a, int64_t lda, int a_transposed,
                                    const void *b, int64_t ldb, int b_transposed, float beta,
                                    void *c, int64_t ldc, fsdp_dtype dtype) {
    const cublasHandle_t blas = (cublasHandle_t)user;
    const cudaDataType type = dtype == FSDP_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    const int64_t sizes[] = {m, n, k, lda, ldb, ldc};
    if (dtype != FSDP_F32 && dtype != FSDP_BF16) return FSDP_ERR_UNSUPPORTED;
    for (int i = 0; i < 6; i++)
        if (sizes[i] > INT32_MAX) return FSDP_ERR_UNSUPPORTED;
    cublasStatus_t status = cublasSetStream(blas, (cudaStream_t)stream);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasGemmStridedBatchedEx(blas, b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                                            a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, (int)n,
                                            (int)m, (int)k, &alpha, b, type, (int)ldb, 0, a, type,
                                            (int)lda, 0, &beta, c, type, (int)ldc, 0, 1,
                                            CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return status == CUBLAS_STATUS_SUCCESS ? FSDP_OK : FSDP_ERR_BACKEND;
}
#endif // FSDP_IMPLEMENTATION
