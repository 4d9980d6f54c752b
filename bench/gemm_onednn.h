/* gemm_onednn.h - an fsdp_gemm_fn of bf16 on the host by oneDNN, the library that PyTorch
   multiplies bf16 with: sums are f32, by AMX where the processor has it (libdnnl-dev, version 2)

   SPDX-License-Identifier: MIT */
#ifndef BENCH_GEMM_ONEDNN_H
#define BENCH_GEMM_ONEDNN_H
#include "fsdp.h"

#include <dnnl.h>

static dnnl_status_t onednn_matrix(dnnl_memory_desc_t *d, int64_t rows, int64_t columns, int64_t ld,
                                   int transposed) {
    const dnnl_dims_t dims = {rows, columns}, plain = {ld, 1}, across = {1, ld};
    return dnnl_memory_desc_init_by_strides(d, 2, dims, dnnl_bf16, transposed ? across : plain);
}

/* c = alpha * op(a) * op(b), and of that and beta * c the sum. */
static fsdp_status gemm_onednn(void *user, void *stream, int64_t m, int64_t n, int64_t k,
                               float alpha, const void *a, int64_t lda, int a_transposed,
                               const void *b, int64_t ldb, int b_transposed, float beta, void *c,
                               int64_t ldc, fsdp_dtype dtype) {
    static dnnl_engine_t engine;
    static dnnl_stream_t queue;
    const void *ptr[] = {a, b, c};
    const int place[] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST};
    dnnl_memory_desc_t matrix[3];
    dnnl_exec_arg_t args[3] = {{0, NULL}, {0, NULL}, {0, NULL}};
    dnnl_post_ops_t after = NULL;
    dnnl_primitive_attr_t attr = NULL;
    dnnl_matmul_desc_t product;
    dnnl_primitive_desc_t chosen = NULL;
    dnnl_primitive_t primitive = NULL;
    int failed = dtype != FSDP_BF16;
    (void)user, (void)stream;
    if (!engine && !failed)
        failed = dnnl_engine_create(&engine, dnnl_cpu, 0) ||
                 dnnl_stream_create(&queue, engine, dnnl_stream_default_flags);
    failed = failed || onednn_matrix(&matrix[0], m, k, lda, a_transposed) ||
             onednn_matrix(&matrix[1], k, n, ldb, b_transposed) ||
             onednn_matrix(&matrix[2], m, n, ldc, 0) || dnnl_post_ops_create(&after) ||
             dnnl_primitive_attr_create(&attr);
    if (alpha != 1)
        failed = failed || dnnl_post_ops_append_eltwise(after, 1, dnnl_eltwise_linear, alpha, 0);
    if (beta != 0) failed = failed || dnnl_post_ops_append_sum(after, beta);
    failed = failed || dnnl_primitive_attr_set_post_ops(attr, after) ||
             dnnl_matmul_desc_init(&product, &matrix[0], &matrix[1], NULL, &matrix[2]) ||
             dnnl_primitive_desc_create(&chosen, &product, attr, engine, NULL) ||
             dnnl_primitive_create(&primitive, chosen);
    for (int i = 0; i < 3 && !failed; i++) {
        args[i].arg = place[i];
        failed = dnnl_memory_create(&args[i].memory, &matrix[i], engine, (void *)(uintptr_t)ptr[i]);
    }
    failed = failed || dnnl_primitive_execute(primitive, queue, 3, args) ||
             dnnl_stream_wait(queue);
    for (int i = 0; i < 3; i++)
        if (args[i].memory) dnnl_memory_destroy(args[i].memory);
    if (primitive) dnnl_primitive_destroy(primitive);
    if (chosen) dnnl_primitive_desc_destroy(chosen);
    if (attr) dnnl_primitive_attr_destroy(attr);
    if (after) dnnl_post_ops_destroy(after);
    return failed ? FSDP_ERR_BACKEND : FSDP_OK;
}
#endif
