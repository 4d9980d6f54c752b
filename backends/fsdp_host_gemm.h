/* fsdp_host_gemm.h - a product of matrices on the host, for fsdp_muon.h

   It uses vectors of 4, 8 or 16 numbers, by the processor, and one thread. Another product, such as
   cblas_sgemm, can replace it: see fsdp_gemm_fn (src/core/backend.h).

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif

#ifndef FSDP_HOST_GEMM_H
#define FSDP_HOST_GEMM_H

#ifdef __cplusplus
extern "C" {
#endif

#define FSDP_HOST_GEMM_BYTES 1196032 // working memory, for packed rows and columns

// clang-format off
/* fsdp_host_gemm - an fsdp_gemm_fn of f32 in host memory
   user        working memory: FSDP_HOST_GEMM_BYTES for each thread, aligned as malloc does
   stream      ignored: the product is done on return
   Arithmetic  an element is the sum of its products in the order of k, in pieces of 256, each begun
               with 0 and added up with FMA where the processor has it. So its bits depend neither
               on the other elements nor on the width of vectors
   Result      FSDP_OK; UNSUPPORTED: dtype is not f32
   Thread      any
   Source      BLAS: sgemm */
// clang-format on
FSDP_API fsdp_status fsdp_host_gemm(void *user, void *stream, int64_t m, int64_t n, int64_t k,
                                    float alpha, const void *a, int64_t lda, int a_transposed,
                                    const void *b, int64_t ldb, int b_transposed, float beta,
                                    void *c, int64_t ldc, fsdp_dtype dtype);

#ifdef __cplusplus
}
#endif
#endif // FSDP_HOST_GEMM_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_HOST_GEMM_IMPLEMENTED)
#define FSDP_HOST_GEMM_IMPLEMENTED

#include <string.h>

// Tiles of a result, whose sums are in registers, and packed rows and columns for them.

// Numbers that are packed at a time: together FSDP_HOST_GEMM_BYTES.
enum { FSDPI_GEMM_DEPTH = 256, FSDPI_GEMM_ROWS = 144, FSDPI_GEMM_COLUMNS = 1024 };
enum { FSDPI_GEMM_WIDEST = 32 }; // columns of the widest tile
#define FSDPI_GEMM_NOINLINE __attribute__((noinline))

// Sums of products are fused here: one rounding for each.
FSDP_PRECISE_BEGIN("O3")
#if defined(__clang__)
#pragma clang fp contract(on)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=fast")
#endif

// Defines out = the product of `rows` packed rows and two vectors of packed columns.
#define FSDPI_GEMM_TILE(name, kind, bytes, rows)                                                   \
    kind static FSDPI_GEMM_NOINLINE void name(int64_t depth, const float *a, const float *b,       \
                                              float *out) {                                        \
        typedef float vector __attribute__((vector_size(bytes)));                                  \
        vector sums[rows][2], left, right;                                                         \
        memset(sums, 0, sizeof sums);                                                              \
        for (; depth > 0; depth--, a += rows, b += (bytes) / 2) {                                  \
            memcpy(&left, b, sizeof left);                                                         \
            memcpy(&right, b + (bytes) / 4, sizeof right);                                         \
            _Pragma("GCC unroll 12") for (int i = 0; i < (rows); i++) {                            \
                sums[i][0] += a[i] * left;                                                         \
                sums[i][1] += a[i] * right;                                                        \
            }                                                                                      \
        }                                                                                          \
        memcpy(out, sums, sizeof sums);                                                            \
    }

typedef struct fsdpi_gemm_tile {
    void (*run)(int64_t depth, const float *a, const float *b, float *out);
    int rows, columns; // they divide FSDPI_GEMM_ROWS and FSDPI_GEMM_COLUMNS
} fsdpi_gemm_tile;

FSDPI_GEMM_TILE(fsdpi_gemm_tile_any, , 16, 4)
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__)
FSDPI_GEMM_TILE(fsdpi_gemm_tile_avx2, __attribute__((target("avx2,fma"))), 32, 6)
FSDPI_GEMM_TILE(fsdpi_gemm_tile_avx512, __attribute__((target("avx512f,fma"))), 64, 12)

static fsdpi_gemm_tile fsdpi_gemm_best(void) {
    static const fsdpi_gemm_tile any = {fsdpi_gemm_tile_any, 4, 8},
                                 avx2 = {fsdpi_gemm_tile_avx2, 6, 16},
                                 avx512 = {fsdpi_gemm_tile_avx512, 12, 32};
    if (!__builtin_cpu_supports("fma")) return any;
    return __builtin_cpu_supports("avx512f") ? avx512 : __builtin_cpu_supports("avx2") ? avx2 : any;
}
#else
static fsdpi_gemm_tile fsdpi_gemm_best(void) {
    static const fsdpi_gemm_tile any = {fsdpi_gemm_tile_any, 4, 8};
    return any;
}
#endif

FSDP_PRECISE_END
FSDP_PRECISE_BEGIN("O3")

typedef struct fsdpi_gemm_product {
    int64_t m, n, k;
    float alpha, beta;
    const float *a, *b;
    float *c;
    int64_t lda, ldb, ldc;
    int a_transposed, b_transposed;
    int symmetric; // 1: the result is symmetric, so that half of it is enough
} fsdpi_gemm_product;

// Packs rows, `tile` at a time, element by element of their depth; missing rows are 0.
static void fsdpi_gemm_pack(float *out, const float *from, int64_t pitch, int transposed,
                            int64_t rows, int64_t depth, int64_t tile) {
    for (int64_t i = 0; i < rows; i += tile, out += tile * depth) {
        int64_t num = rows - i < tile ? rows - i : tile;
        if (num < tile) memset(out, 0, (size_t)(tile * depth) * sizeof *out);
        if (transposed)
            for (int64_t d = 0; d < depth; d++)
                memcpy(out + d * tile, from + d * pitch + i, (size_t)num * sizeof *out);
        else
            for (int64_t r = 0; r < num; r++)
                for (int64_t d = 0; d < depth; d++) out[d * tile + r] = from[(i + r) * pitch + d];
    }
}

/* Adds a tile's sums to the result; the first ones of an element begin it. clang -Ofast fuses a
   product with a sum despite the pragmas: so one loop stores the products of a row, and another one
   adds them, as in src/optim/kernels.h. */
static void fsdpi_gemm_store(const fsdpi_gemm_product *p, int64_t row, int64_t column, int begins,
                             const float *sums, fsdpi_gemm_tile tile) {
    int64_t rows = p->m - row < tile.rows ? p->m - row : tile.rows;
    int64_t columns = p->n - column < tile.columns ? p->n - column : tile.columns;
    const int adds = !begins || p->beta < 0 || p->beta > 0;
    float products[FSDPI_GEMM_WIDEST];
    for (int64_t i = 0; i < rows; i++, sums += tile.columns) {
        float *c = p->c + (row + i) * p->ldc + column;
        for (int64_t j = 0; j < columns; j++) products[j] = p->alpha * sums[j];
        if (begins && adds)
            for (int64_t j = 0; j < columns; j++) c[j] = p->beta * c[j];
        if (adds)
            for (int64_t j = 0; j < columns; j++) c[j] = c[j] + products[j];
        else memcpy(c, products, (size_t)columns * sizeof *c);
    }
}

// Computes the tiles of rows first .. first+rows-1 and columns at .. at+columns-1; of a symmetric
// result only tiles that have an element on or below the diagonal.
static void fsdpi_gemm_tiles(const fsdpi_gemm_product *p, int64_t first, int64_t rows, int64_t at,
                             int64_t columns, int64_t depth, int begins, const float *left,
                             const float *right) {
    const fsdpi_gemm_tile tile = fsdpi_gemm_best();
    float sums[12 * FSDPI_GEMM_WIDEST];
    for (int64_t j = 0; j < columns; j += tile.columns)
        for (int64_t i = 0; i < rows; i += tile.rows) {
            if (p->symmetric && first + i + tile.rows <= at + j) continue;
            tile.run(depth, left + i * depth, right + j * depth, sums);
            fsdpi_gemm_store(p, first + i, at + j, begins, sums, tile);
        }
}

static int64_t fsdpi_gemm_least(int64_t a, int64_t b) { return a < b ? a : b; }

static void fsdpi_gemm_multiply(const fsdpi_gemm_product *p, float *room) {
    const fsdpi_gemm_tile tile = fsdpi_gemm_best();
    float *left = room, *right = room + FSDPI_GEMM_DEPTH * FSDPI_GEMM_ROWS;
    for (int64_t j = 0; j < p->n; j += FSDPI_GEMM_COLUMNS)
        for (int64_t d = 0; d < p->k; d += FSDPI_GEMM_DEPTH) {
            const int64_t depth = fsdpi_gemm_least(p->k - d, FSDPI_GEMM_DEPTH);
            const int64_t columns = fsdpi_gemm_least(p->n - j, FSDPI_GEMM_COLUMNS);
            const float *b = p->b + (p->b_transposed ? j * p->ldb + d : d * p->ldb + j);
            fsdpi_gemm_pack(right, b, p->ldb, !p->b_transposed, columns, depth, tile.columns);
            for (int64_t i = 0; i < p->m; i += FSDPI_GEMM_ROWS) {
                const int64_t rows = fsdpi_gemm_least(p->m - i, FSDPI_GEMM_ROWS);
                const float *a = p->a + (p->a_transposed ? d * p->lda + i : i * p->lda + d);
                if (p->symmetric && i + rows <= j) continue;
                fsdpi_gemm_pack(left, a, p->lda, p->a_transposed, rows, depth, tile.rows);
                fsdpi_gemm_tiles(p, i, rows, j, columns, depth, d == 0, left, right);
            }
        }
    for (int64_t i = 0; p->symmetric && i < p->m; i++)
        for (int64_t j = i + 1; j < p->n; j++) p->c[i * p->ldc + j] = p->c[j * p->ldc + i];
}

FSDP_API fsdp_status fsdp_host_gemm(void *user, void *stream, int64_t m, int64_t n, int64_t k,
                                    float alpha, const void *a, int64_t lda, int a_transposed,
                                    const void *b, int64_t ldb, int b_transposed, float beta,
                                    void *c, int64_t ldc, fsdp_dtype dtype) {
    const fsdpi_gemm_product p = {m,
                                  n,
                                  k,
                                  alpha,
                                  beta,
                                  (const float *)a,
                                  (const float *)b,
                                  (float *)c,
                                  lda,
                                  ldb,
                                  ldc,
                                  a_transposed,
                                  b_transposed,
                                  a == b && lda == ldb && !a_transposed != !b_transposed};
    (void)stream;
    if (dtype != FSDP_F32) return FSDP_ERR_UNSUPPORTED;
    fsdpi_gemm_multiply(&p, (float *)user);
    return FSDP_OK;
}

FSDP_PRECISE_END
#endif // FSDP_IMPLEMENTATION
