/* test_host_gemm.c - the matrix product of the host: compared with sums in f64, with equal bits for
   vectors of any width, and symmetric where required.

   SPDX-License-Identifier: MIT */
#define TAGS BITS
#include "harness.h"
#include "library.c"
#include "lab.h"
#include <math.h> /* fabs */

enum { MOST = 160 * 320 };
static char room[FSDP_HOST_GEMM_BYTES] __attribute__((aligned(64)));

static void fill(float *x, int64_t count, uint64_t *seed) {
    for (int64_t i = 0; i < count; i++)
        x[i] = (float)((double)(h_rand64(seed) >> 40) / 16777216.0 - 0.5);
}

static const struct {
    const char *name;
    int64_t m, n, k;
} sizes[] = {{"1x1x1", 1, 1, 1},         {"3x5x7", 3, 5, 7},           {"12x32x256", 12, 32, 256},
             {"13x33x257", 13, 33, 257}, {"150x40x300", 150, 40, 300}, {"145x9x513", 145, 9, 90}};

/* Checks each element, with a pitch larger than the row, and that the gaps between rows are
   untouched. */
TEST_P(host_gemm, is_the_sum, sizes) {
    static float a[MOST], b[MOST], c[MOST], was[MOST];
    uint64_t seed = h_seed();
    for (int how = 0; how < 8; how++) {
        const int ta = how & 1, tb = how >> 1 & 1;
        const float alpha = how & 4 ? 1.0f : -0.75f, beta = how & 4 ? 0.0f : 1.5f;
        const int64_t lda = (ta ? row->m : row->k) + 3, ldb = (tb ? row->k : row->n) + 1,
                      ldc = row->n + 2;
        fill(a, MOST, &seed), fill(b, MOST, &seed), fill(c, MOST, &seed);
        if (how & 4) /* must not be read */
            for (int64_t i = 0; i < MOST; i++) c[i] = (float)LAB_NAN;
        memcpy(was, c, sizeof c);
        CHECK_OK(fsdp_host_gemm(room, NULL, row->m, row->n, row->k, alpha, a, lda, ta, b, ldb, tb,
                                beta, c, ldc, FSDP_F32));
        for (int64_t i = 0; i < row->m; i++)
            for (int64_t j = 0; j < ldc; j++) {
                const int64_t at = i * ldc + j;
                if (j >= row->n) CHECK_EQ_MEM(&c[at], &was[at], sizeof *c);
                double sum = 0;
                for (int64_t l = 0; l < row->k && j < row->n; l++)
                    sum += (double)a[ta ? l * lda + i : i * lda + l] *
                           (double)b[tb ? j * ldb + l : l * ldb + j];
                sum = (double)alpha * sum + (how & 4 ? 0 : (double)beta * (double)was[at]);
                if (j < row->n) CHECK(fabs((double)c[at] - sum) < 1e-5);
            }
    }
    CHECK_STATUS(fsdp_host_gemm(room, NULL, 1, 1, 1, 1, a, 1, 0, b, 1, 0, 0, c, 1, FSDP_BF16),
                 FSDP_ERR_UNSUPPORTED);
}

/* Only half of a symmetric result is computed: it has the bits of the full product. */
TEST(host_gemm, symmetric) {
    static float a[MOST], same[MOST], half[MOST], whole[MOST];
    uint64_t seed = h_seed();
    fill(a, MOST, &seed);
    memcpy(same, a, sizeof a);
    for (int64_t n = 1; n < 160; n += 13)
        for (int ta = 0; ta < 2; ta++) {
            const int64_t k = 311, ld = ta ? n : k;
            CHECK_OK(fsdp_host_gemm(room, NULL, n, n, k, 1, a, ld, ta, a, ld, !ta, 0, half, n,
                                    FSDP_F32));
            CHECK_OK(fsdp_host_gemm(room, NULL, n, n, k, 1, a, ld, ta, same, ld, !ta, 0, whole, n,
                                    FSDP_F32));
            CHECK_EQ_MEM(half, whole, (size_t)(n * n) * sizeof *half);
            for (int64_t i = 0; i < n * n; i++)
                CHECK(lab_same((double)half[i], (double)half[i % n * n + i / n]));
        }
}

/* The bits of a sum do not depend on the number of sums computed at a time. */
#if defined(__x86_64__) && !defined(W_SANITIZED)
TEST(host_gemm, width) {
    static float a[12 * 256], b[32 * 256], wide[12 * 32], narrow[6 * 16], aa[6 * 256], bb[16 * 256];
    uint64_t seed = h_seed();
    if (!__builtin_cpu_supports("avx512f")) SKIP("no AVX-512");
    fill(a, 12 * 256, &seed), fill(b, 32 * 256, &seed);
    fsdpi_gemm_tile_avx512(256, a, b, wide);
    for (int part = 0; part < 4; part++) {
        const int row = part / 2 * 6, column = part % 2 * 16;
        for (int d = 0; d < 256; d++) {
            memcpy(aa + d * 6, a + d * 12 + row, 6 * sizeof *a);
            memcpy(bb + d * 16, b + d * 32 + column, 16 * sizeof *b);
        }
        fsdpi_gemm_tile_avx2(256, aa, bb, narrow);
        for (int i = 0; i < 6; i++)
            CHECK_EQ_MEM(narrow + i * 16, wide + (row + i) * 32 + column, 16 * sizeof *wide);
    }
}
#endif

/* The bits with FMA, equal for every compiler and all flags: recorded with gcc -O0. */
TEST(host_gemm, recorded_bits) {
    enum { M = 37, N = 45, K = 300 };
    static const struct {
        float alpha, beta;
        uint64_t hash;
    } want[3] = {{1, 0, 0x5c7e668a949ebc2c},
                 {1.37f, 0, 0x69042ccccd865797},
                 {2.0315f, -4.775f, 0xb1838ba3b3ef2e3b}};
    static float a[M * K], b[K * N], c[M * N];
    float *const all[3] = {a, b, c};
    const int counts[3] = {M * K, K * N, M * N};
    uint32_t s = 1;
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("fma")) SKIP("no FMA");
#elif !defined(__aarch64__)
    SKIP("recorded with FMA");
#endif
    for (int x = 0; x < 3; x++)
        for (int i = 0; i < counts[x]; i++)
            all[x][i] = (float)(int)((s = s * 1664525u + 1013904223u) >> 8) / 16777216.0f - 0.5f;
    for (int t = 0; t < 3; t++) {
        uint64_t h = 1469598103934665603u;
        CHECK_OK(fsdp_host_gemm(room, NULL, M, N, K, want[t].alpha, a, K, 0, b, N, 0, want[t].beta,
                                c, N, FSDP_F32));
        for (size_t i = 0; i < sizeof c; i++) h = (h ^ ((unsigned char *)c)[i]) * 0x100000001B3u;
        CHECK_MSG(h == want[t].hash, "product %d: hash %016llx", t, (unsigned long long)h);
    }
}
