/* lab_muon.h - a matrix product on devices, for tests of Muon.

   SPDX-License-Identifier: MIT */
#ifndef LAB_MUON_H
#define LAB_MUON_H
#include "lab.h"

/* Computes the host's product, in the order of the stream, on a device whose memory the host can
   read (stand-ins): results have the bits of the host. */
H_FN fsdp_status lab_gemm(void *user, void *stream, int64_t m, int64_t n, int64_t k, float alpha,
                          const void *a, int64_t lda, int a_transposed, const void *b, int64_t ldb,
                          int b_transposed, float beta, void *c, int64_t ldc, fsdp_dtype dtype) {
    static __thread char room[FSDP_HOST_GEMM_BYTES] __attribute__((aligned(64)));
    (void)user;
    lib_wait(stream);
    for (int64_t i = 0; dtype == FSDP_BF16 && i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = beta < 0 || beta > 0 ? (double)beta * lab_get(c, dtype, i * ldc + j) : 0;
            for (int64_t l = 0; l < k; l++)
                sum += (double)alpha * lab_get(a, dtype, a_transposed ? l * lda + i : i * lda + l) *
                       lab_get(b, dtype, b_transposed ? j * ldb + l : l * ldb + j);
            lab_put(c, dtype, i * ldc + j, sum);
        }
    if (dtype == FSDP_BF16) return FSDP_OK;
    return fsdp_host_gemm(room, NULL, m, n, k, alpha, a, lda, a_transposed, b, ldb, b_transposed,
                          beta, c, ldc, dtype);
}
H_FN fsdp_muon_desc lab_muon_defaults(const fsdp_world *w) {
    fsdp_muon_desc d = fsdp_muon_defaults();
    if (lib_on_streams(w)) d.gemm = lab_gemm;
    return d;
}

#endif
