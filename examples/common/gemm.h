/* gemm.h - a matrix product, and sums, largest values and e^x of arrays of floats

   Programs of examples/ that compute share it. There is no global state. Loops have the shape that
   compilers vectorise without -ffast-math, and each result has the same bits for any alignment.

   Build: include it, and link -lm. Written for -O3 -march=native. Define GEMM_BLAS and link
   OpenBLAS to replace the matrix product; its bits are other ones then.

   SPDX-License-Identifier: MIT */
#ifndef GEMM_H
#define GEMM_H

#include <math.h>   // sqrtf, logf
#include <stddef.h> // ptrdiff_t
#include <stdint.h> // uint32_t
#include <string.h> // memcpy

#ifdef GEMM_BLAS
#include <cblas.h> // cblas_sgemm
#endif

#if defined(__GNUC__) && defined(__AVX512F__) && !defined(GEMM_WIDE)
#define GEMM_WIDE // tiles for registers of 16 floats
#endif

#ifdef __cplusplus
#define GEMM_RESTRICT __restrict__
#else
#define GEMM_RESTRICT restrict
#endif

/* ---- matrix product -------------------------------------------------------------------------- */

enum {
    GEMM_TRANS_A = 1, // a is stored (k, m)
    GEMM_TRANS_B = 2, // b is stored (n, k)
    GEMM_ADD = 4      // c += instead of c =
};

static inline int gemm_min(int a, int b) { return a < b ? a : b; }

#ifndef GEMM_BLAS
enum {
#ifdef GEMM_WIDE
    GEMM_MR = 8,  // rows of a register tile
    GEMM_NR = 32, // columns of a register tile
#else
    GEMM_MR = 6,
    GEMM_NR = 16,
#endif
    GEMM_MC = 384, // rows of a that meet a packed panel of b before the next one is packed
    GEMM_KC = 128, // depth of a panel: 8 or 16 KiB, so that it stays in the first cache
    GEMM_DC = 640  // depth for which a tile of c is completed, before the next panels of b: with
                   // many columns c is in no cache, and all of a(MC, DC) is in the second one
};

#ifdef GEMM_WIDE
// c(8, 32) = or += a(8, k) times b(k, 32) packed, for 32 registers of 16 floats. Element (r, p) of
// a stands at a[r*row + p*dep]. Without a type of that size compilers take half of a register.
typedef float gemm_vec __attribute__((vector_size(64)));

static inline gemm_vec gemm_vec_load(const float *x) {
    gemm_vec v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline void gemm_tile(int k, const float *GEMM_RESTRICT a, ptrdiff_t row, ptrdiff_t dep,
                             const float *GEMM_RESTRICT b, float *GEMM_RESTRICT c, ptrdiff_t ldc,
                             int add) {
    const gemm_vec zero = {0};
    gemm_vec lo[GEMM_MR], hi[GEMM_MR];
    for (int r = 0; r < GEMM_MR; r++) {
        lo[r] = add ? gemm_vec_load(c + r * ldc) : zero;
        hi[r] = add ? gemm_vec_load(c + r * ldc + 16) : zero;
    }
    for (int p = 0; p < k; p++, a += dep, b += GEMM_NR) {
        const gemm_vec b0 = gemm_vec_load(b), b1 = gemm_vec_load(b + 16);
#pragma GCC unroll 8
        for (int r = 0; r < GEMM_MR; r++) {
            lo[r] += a[r * row] * b0;
            hi[r] += a[r * row] * b1;
        }
    }
    for (int r = 0; r < GEMM_MR; r++) {
        memcpy(c + r * ldc, &lo[r], sizeof lo[r]);
        memcpy(c + r * ldc + 16, &hi[r], sizeof hi[r]);
    }
}
#else
// c(6, 16) = or += a(6, k) times b(k, 16) packed. Element (r, p) of a stands at a[r*row + p*dep].
// Six named rows stay in registers; one two-dimensional array would not with every compiler.
static inline void gemm_tile(int k, const float *GEMM_RESTRICT a, ptrdiff_t row, ptrdiff_t dep,
                             const float *GEMM_RESTRICT b, float *GEMM_RESTRICT c, ptrdiff_t ldc,
                             int add) {
    float c0[GEMM_NR] = {0}, c1[GEMM_NR] = {0}, c2[GEMM_NR] = {0};
    float c3[GEMM_NR] = {0}, c4[GEMM_NR] = {0}, c5[GEMM_NR] = {0};
    for (int p = 0; p < k; p++, a += dep, b += GEMM_NR) {
        const float a0 = a[0], a1 = a[row], a2 = a[2 * row];
        const float a3 = a[3 * row], a4 = a[4 * row], a5 = a[5 * row];
        for (int j = 0; j < GEMM_NR; j++) {
            c0[j] += a0 * b[j];
            c1[j] += a1 * b[j];
            c2[j] += a2 * b[j];
            c3[j] += a3 * b[j];
            c4[j] += a4 * b[j];
            c5[j] += a5 * b[j];
        }
    }
    float *r0 = c, *r1 = r0 + ldc, *r2 = r1 + ldc, *r3 = r2 + ldc, *r4 = r3 + ldc, *r5 = r4 + ldc;
    if (add) {
        for (int j = 0; j < GEMM_NR; j++) r0[j] += c0[j];
        for (int j = 0; j < GEMM_NR; j++) r1[j] += c1[j];
        for (int j = 0; j < GEMM_NR; j++) r2[j] += c2[j];
        for (int j = 0; j < GEMM_NR; j++) r3[j] += c3[j];
        for (int j = 0; j < GEMM_NR; j++) r4[j] += c4[j];
        for (int j = 0; j < GEMM_NR; j++) r5[j] += c5[j];
    } else {
        memcpy(r0, c0, sizeof c0);
        memcpy(r1, c1, sizeof c1);
        memcpy(r2, c2, sizeof c2);
        memcpy(r3, c3, sizeof c3);
        memcpy(r4, c4, sizeof c4);
        memcpy(r5, c5, sizeof c5);
    }
}
#endif

// Packs a panel of b, (k, cols) with cols at most NR, to out(k, NR); zeros after the last column.
// Element (p, j) of b stands at b[p*dep + j*col], and one of the two steps is 1: the inner loop
// reads along that dim, for a transposed b four columns at a time.
static inline void gemm_pack(float *GEMM_RESTRICT out, const float *GEMM_RESTRICT b, ptrdiff_t dep,
                             ptrdiff_t col, int k, int cols) {
    if (cols < GEMM_NR) memset(out, 0, (size_t)k * GEMM_NR * sizeof *out);
    if (col == 1) {
        for (int p = 0; p < k; p++)
            memcpy(out + p * GEMM_NR, b + p * dep, (size_t)cols * sizeof *b);
        return;
    }
    int j = 0;
    for (; j + 4 <= cols; j += 4) {
        const float *b0 = b + j * col, *b1 = b0 + col, *b2 = b1 + col, *b3 = b2 + col;
        float *to = out + j;
        for (int p = 0; p < k; p++, to += GEMM_NR) {
            to[0] = b0[p], to[1] = b1[p], to[2] = b2[p], to[3] = b3[p];
        }
    }
    for (; j < cols; j++) {
        for (int p = 0; p < k; p++) out[p * GEMM_NR + j] = b[j * col + p];
    }
}

// Fewer than MR rows or NR columns at the edge of c: a is copied to a full tile, c through one.
static inline void gemm_tile_edge(int k, const float *a, ptrdiff_t row, ptrdiff_t dep, int rows,
                                  const float *b, float *c, ptrdiff_t ldc, int cols, int add) {
    float full_a[GEMM_KC * GEMM_MR], full_c[GEMM_MR * GEMM_NR];
    if (rows < GEMM_MR) {
        for (int p = 0; p < k; p++) {
            for (int r = 0; r < GEMM_MR; r++) {
                full_a[p * GEMM_MR + r] = r < rows ? a[r * row + p * dep] : 0.0f;
            }
        }
        a = full_a, row = 1, dep = GEMM_MR;
    }
    gemm_tile(k, a, row, dep, b, full_c, GEMM_NR, 0);
    for (int r = 0; r < rows; r++) {
        float *to = c + r * ldc;
        const float *from = full_c + r * GEMM_NR;
        for (int j = 0; j < cols; j++) to[j] = add ? to[j] + from[j] : from[j];
    }
}

// c(m, cols) = or += a(m, k) times a packed panel
static inline void gemm_panel(int k, int m, int cols, const float *a, ptrdiff_t row, ptrdiff_t dep,
                              const float *panel, float *c, ptrdiff_t ldc, int add) {
    for (int i = 0; i < m; i += GEMM_MR, a += GEMM_MR * row, c += GEMM_MR * ldc) {
        if (m - i >= GEMM_MR && cols == GEMM_NR) {
            gemm_tile(k, a, row, dep, panel, c, ldc, add);
        } else {
            gemm_tile_edge(k, a, row, dep, gemm_min(GEMM_MR, m - i), panel, c, ldc, cols, add);
        }
    }
}
#endif

/* c(m, n) = or += op(a)(m, k) * op(b)(k, n); row major, ldx is the distance of two rows of x as it
   is stored. Uses 12 to 22 KiB of stack. */
static inline void gemm_f32(int flags, int m, int n, int k, const float *a, int lda, const float *b,
                            int ldb, float *c, int ldc) {
#ifdef GEMM_BLAS
    cblas_sgemm(CblasRowMajor, flags & GEMM_TRANS_A ? CblasTrans : CblasNoTrans,
                flags & GEMM_TRANS_B ? CblasTrans : CblasNoTrans, m, n, k, 1.0f, a, lda, b, ldb,
                flags & GEMM_ADD ? 1.0f : 0.0f, c, ldc);
#else
    float panel[GEMM_KC * GEMM_NR];
    const ptrdiff_t a_row = flags & GEMM_TRANS_A ? 1 : lda, a_dep = flags & GEMM_TRANS_A ? lda : 1;
    const ptrdiff_t b_col = flags & GEMM_TRANS_B ? ldb : 1, b_dep = flags & GEMM_TRANS_B ? 1 : ldb;
    for (int i0 = 0; i0 < m; i0 += GEMM_MC) {
        for (int q0 = 0; q0 < k; q0 += GEMM_DC) {
            for (int j0 = 0; j0 < n; j0 += GEMM_NR) {
                for (int p0 = q0; p0 < k && p0 < q0 + GEMM_DC; p0 += GEMM_KC) {
                    const int kc = gemm_min(GEMM_KC, k - p0), nr = gemm_min(GEMM_NR, n - j0);
                    const float *at = a + i0 * a_row + p0 * a_dep;
                    gemm_pack(panel, b + p0 * b_dep + j0 * b_col, b_dep, b_col, kc, nr);
                    gemm_panel(kc, gemm_min(GEMM_MC, m - i0), nr, at, a_row, a_dep, panel,
                               c + (ptrdiff_t)i0 * ldc + j0, ldc, (flags & GEMM_ADD) || p0 > 0);
                }
            }
        }
    }
#endif
}

/* ---- small vector loops ---------------------------------------------------------------------- */
/* Eight running sums: one alone would force the additions into a chain. */

static inline float gemm_sum(const float *x, int count) {
    float lane[8] = {0};
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        for (int j = 0; j < 8; j++) lane[j] += x[i + j];
    }
    float sum = 0.0f;
    for (int j = 0; j < 8; j++) sum += lane[j];
    for (; i < count; i++) sum += x[i];
    return sum;
}

static inline float gemm_dot(const float *x, const float *y, int count) {
    float lane[8] = {0};
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        for (int j = 0; j < 8; j++) lane[j] += x[i + j] * y[i + j];
    }
    float sum = 0.0f;
    for (int j = 0; j < 8; j++) sum += lane[j];
    for (; i < count; i++) sum += x[i] * y[i];
    return sum;
}

static inline float gemm_max(const float *x, int count) {
    float lane[8];
    for (int j = 0; j < 8; j++) lane[j] = x[0];
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        for (int j = 0; j < 8; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    }
    float max = lane[0];
    for (int j = 1; j < 8; j++) max = lane[j] > max ? lane[j] : max;
    for (; i < count; i++) max = x[i] > max ? x[i] : max;
    return max;
}

static inline uint32_t gemm_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float gemm_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// `bound` if d is negative, else x; chosen by bits, because compilers make a branch of a float ?:
static inline float gemm_bound(float x, float bound, float d) {
    const uint32_t mask = 0u - (gemm_bits(d) >> 31);
    return gemm_float((gemm_bits(x) & ~mask) | (gemm_bits(bound) & mask));
}

// e^x to about 2 units in the last place, without a call and without a branch, so that loops around
// it vectorise: x = n*ln2 + r with |r| <= ln2/2, a Taylor polynomial for e^r, and 2^n written into
// the exponent. Outside [-87, 88] it returns the value at the border.
static inline float gemm_exp(float x) {
    x = gemm_bound(x, -87.0f, x + 87.0f);
    x = gemm_bound(x, 88.0f, 88.0f - x);
    const int biased = (int)(x * 1.44269504f + 127.5f); // n + 127, positive: cutting rounds
    const float n = (float)(biased - 127);
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f; // ln2 in two parts
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * gemm_float((uint32_t)biased << 23);
}

#endif // GEMM_H
