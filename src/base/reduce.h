/* base/reduce.h - the one reduction: every loop over elements that casts, adds or scales

   Invariants: the same inputs give the same bits with any compiler flags. Sums run in the order of
   the ranks. No expression both multiplies and adds: a compiler may contract the two to an
   operation with one rounding. Loops work on blocks that stay in the first-level cache.
   Callers: programs, backends/fsdp_shm_world.h (fsdpi_reduce), core/host.h (fsdpi_load_f64),
     backends/fsdp_fake.h (fsdpi_reduce) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_BASE_REDUCE_H
#define FSDPI_BASE_REDUCE_H

#include "dtype.h"
#include "float.h"
#include "macros.h"

#include <string.h> // memcpy, memmove

#define FSDPI_BLOCK    512 // elements: with whole pages, aligned sources would share cache lines
#define FSDPI_MAX_SRCS 256 // ranks of one host that a CPU backend reduces over

// Arithmetic is precise, as in float.h, and vectorised even if the program is built with -O0 or
// -O2.
FSDP_PRECISE_BEGIN("O3")

// Converts at most FSDPI_BLOCK elements of any floating dtype to f64. Returns `src` itself if it is
// f64 already, otherwise tmp.
static const double *fsdpi_load_f64(double *tmp, const void *src, fsdp_dtype dtype, size_t count) {
    if (dtype == FSDP_F64) return (const double *)src;
    for (size_t i = 0; i < count; i++) tmp[i] = (double)fsdpi_at((const char *)src, dtype, i, 0);
    return tmp;
}

static void fsdpi_store_f64(void *dst, fsdp_dtype dtype, const double *src, size_t count) {
    if (dtype == FSDP_F64) memcpy(dst, src, count * sizeof *src);
    else
        for (size_t i = 0; i < count; i++)
            fsdpi_put(dst, dtype, i,
                      dtype == FSDP_F32 ? (float)src[i] : fsdpi_f64_to_f32_odd(src[i]));
}

// Computes acc (op)= x, element by element. An f64 sum or product of two f32 that is rounded to f32
// has the bits of the f32 operation.
static void fsdpi_combine(double *acc, const double *x, size_t count, fsdp_redop redop, int wide) {
    if (redop == FSDP_MAX) // ?: and not if: with -Ofast gcc makes fmax and fmin of branches
        for (size_t i = 0; i < count; i++) acc[i] = x[i] > acc[i] ? x[i] : acc[i];
    else if (redop == FSDP_MIN)
        for (size_t i = 0; i < count; i++) acc[i] = x[i] < acc[i] ? x[i] : acc[i];
    else
        for (size_t i = 0; i < count; i++) {
            double sum = acc[i] + x[i];
            acc[i] = wide ? sum : (double)(float)sum;
        }
}

// Computes one block of dst (+)= scale * (src_0 op src_1 op ...), in f64 if wide, otherwise in f32.
// A loop of its own applies the scale to the whole block before dst is added: see the invariants. A
// cast does no arithmetic, because a process that was built with -Ofast may flush subnormals in it.
static FSDPI_NOINLINE void fsdpi_reduce_block(void *dst, fsdp_dtype dst_dtype,
                                              const char *const *srcs, int num_srcs,
                                              fsdp_dtype dtype, size_t count, double scale,
                                              int accumulate, fsdp_redop redop, int wide) {
    double acc[FSDPI_BLOCK], tmp[FSDPI_BLOCK];
    if (num_srcs == 1 && scale == 1.0 && !accumulate && !wide) {
        for (size_t i = 0; i < count; i++)
            fsdpi_put(dst, dst_dtype, i, fsdpi_at(srcs[0], dtype, i, 0));
        return;
    }
    const double *x = fsdpi_load_f64(acc, srcs[0], dtype, count);
    if (x != acc) memcpy(acc, x, count * sizeof *acc);
    for (int k = 1; k < num_srcs; k++)
        fsdpi_combine(acc, fsdpi_load_f64(tmp, srcs[k], dtype, count), count, redop, wide);
    if (scale != 1.0)
        for (size_t i = 0; i < count; i++)
            acc[i] = wide ? acc[i] * scale : (double)(float)(acc[i] * scale);
    if (accumulate)
        fsdpi_combine(acc, fsdpi_load_f64(tmp, dst, dst_dtype, count), count, FSDP_SUM, wide);
    fsdpi_store_f64(dst, dst_dtype, acc, count);
}

// Integers (i32, i64), for an all_reduce of counters. There is no scale and no cast.
static void fsdpi_reduce_ints(void *dst, const char *const *srcs, int num_srcs, fsdp_dtype dtype,
                              size_t count, fsdp_redop redop) {
    for (size_t i = 0; i < count; i++) {
        int64_t acc = 0;
        for (int k = 0; k < num_srcs; k++) {
            int32_t x32 = 0;
            int64_t x = 0;
            if (dtype == FSDP_I32) {
                memcpy(&x32, srcs[k] + i * sizeof x32, sizeof x32);
                x = x32;
            } else {
                memcpy(&x, srcs[k] + i * sizeof x, sizeof x);
            }
            if (k == 0) acc = x;
            else if (redop == FSDP_SUM) acc = (int64_t)((uint64_t)acc + (uint64_t)x);
            else if (redop == FSDP_MAX ? x > acc : x < acc) acc = x;
        }
        int32_t narrow = (int32_t)acc;
        if (dtype == FSDP_I32) memcpy((char *)dst + i * sizeof narrow, &narrow, sizeof narrow);
        else memcpy((char *)dst + i * sizeof acc, &acc, sizeof acc);
    }
}

// The fast loops. They give the bits of the blocks above, which are the reference, and which also
// do what these loops leave: other types and operations, and the last elements.

// A vector store over the end of a page takes a hundred times as long as another one. So arrays on
// the stack begin at a cache line.
#ifdef __GNUC__
#define FSDPI_LINE __attribute__((aligned(64)))
#else
#define FSDPI_LINE
#endif

#define FSDPI_STRIDE 16                  // the number of elements of a loop is a multiple of it
#define FSDPI_STREAM ((size_t)512 << 10) // results from this size bypass the caches

// Tells the compiler that no round of a loop reads what an earlier one has written.
#if defined(__clang__)
#define FSDPI_APART _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define FSDPI_APART _Pragma("GCC ivdep")
#else
#define FSDPI_APART
#endif

// Computes dst = scale * (src_0 + src_1 + ...), in the only loop that compilers vectorise. dtypes,
// num and scaled are constants at each use. A source of the same size may be dst; no other source
// may overlap it.
FSDPI_MERGED void fsdpi_loop(void *dst, fsdp_dtype to, const char *const *srcs, int num,
                             fsdp_dtype from, size_t count, float scale, int scaled) {
    const char *s[8];
    for (int k = 0; k < 8; k++) s[k] = srcs[k < num ? k : 0];
    count = count / FSDPI_STRIDE * FSDPI_STRIDE; // so that compilers know that nothing is left
    FSDPI_APART
    for (size_t i = 0; i < count; i++) {
        float x = fsdpi_at(s[0], from, i, num > 1);
        if (num > 1) x = x + fsdpi_at(s[1], from, i, 1);
        if (num > 2) x = x + fsdpi_at(s[2], from, i, 1);
        if (num > 3) x = x + fsdpi_at(s[3], from, i, 1);
        if (num > 4) x = x + fsdpi_at(s[4], from, i, 1);
        if (num > 5) x = x + fsdpi_at(s[5], from, i, 1);
        if (num > 6) x = x + fsdpi_at(s[6], from, i, 1);
        if (num > 7) x = x + fsdpi_at(s[7], from, i, 1);
        if (scaled) x = x * scale;
        if (to == FSDP_F32) ((float *)dst)[i] = x;
        else ((uint16_t *)dst)[i] = to == FSDP_BF16 ? fsdpi_f32_to_bf16(x) : fsdpi_f32_to_f16(x);
    }
}

// Sums 2, 3, 4 or 8 sources. Always scales: a sum that is multiplied by one keeps its bits.
FSDPI_MERGED void fsdpi_loop_sum(void *dst, const char *const *srcs, int num, fsdp_dtype from,
                                 size_t count, float scale) {
    if (num == 2) fsdpi_loop(dst, FSDP_F32, srcs, 2, from, count, scale, 1);
    else if (num == 3) fsdpi_loop(dst, FSDP_F32, srcs, 3, from, count, scale, 1);
    else if (num == 4) fsdpi_loop(dst, FSDP_F32, srcs, 4, from, count, scale, 1);
    else fsdpi_loop(dst, FSDP_F32, srcs, 8, from, count, scale, 1);
}

// Runs one of the loops: sums of 2, 3, 4 or 8 f32 or bf16 to f32, one f32 scaled to f32, and casts
// between f32 and 16 bits without a scale.
FSDPI_MERGED void fsdpi_loop_table(void *dst, fsdp_dtype to, const char *const *srcs, int num,
                                   fsdp_dtype from, size_t count, float scale) {
    if (to == FSDP_BF16) fsdpi_loop(dst, FSDP_BF16, srcs, 1, FSDP_F32, count, 1, 0);
    else if (to == FSDP_F16) fsdpi_loop(dst, FSDP_F16, srcs, 1, FSDP_F32, count, 1, 0);
    else if (from == FSDP_F16) fsdpi_loop(dst, FSDP_F32, srcs, 1, FSDP_F16, count, 1, 0);
    else if (from == FSDP_BF16 && num == 1)
        fsdpi_loop(dst, FSDP_F32, srcs, 1, FSDP_BF16, count, 1, 0);
    else if (from == FSDP_BF16) fsdpi_loop_sum(dst, srcs, num, FSDP_BF16, count, scale);
    else if (num == 1) fsdpi_loop(dst, FSDP_F32, srcs, 1, FSDP_F32, count, scale, 1);
    else fsdpi_loop_sum(dst, srcs, num, FSDP_F32, count, scale);
}

// Runs a loop that was compiled for every processor of the architecture. The loops are compiled
// once more for AVX2.
static FSDPI_NOINLINE void fsdpi_loop_base(void *dst, fsdp_dtype to, const char *const *srcs,
                                           int num, fsdp_dtype from, size_t count, float scale) {
    fsdpi_loop_table(dst, to, srcs, num, from, count, scale);
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__AVX2__) && !defined(__CUDACC__)
__attribute__((target("avx2"))) static FSDPI_NOINLINE void fsdpi_loop_wide(void *dst, fsdp_dtype to,
                                                                           const char *const *srcs,
                                                                           int num, fsdp_dtype from,
                                                                           size_t count,
                                                                           float scale) {
    fsdpi_loop_table(dst, to, srcs, num, from, count, scale);
}
static int fsdpi_has_wide(void) { return __builtin_cpu_supports("avx2") != 0; }
#else
#define fsdpi_loop_wide fsdpi_loop_base
static int fsdpi_has_wide(void) { return 0; }
#endif

static void fsdpi_loops(void *dst, fsdp_dtype to, const char *const *srcs, int num, fsdp_dtype from,
                        size_t count, float scale) {
    if (fsdpi_has_wide()) fsdpi_loop_wide(dst, to, srcs, num, from, count, scale);
    else fsdpi_loop_base(dst, to, srcs, num, from, count, scale);
}

// Copies with stores that bypass the caches: a line is not read only to be overwritten. dst is
// aligned to 16 bytes, of which `bytes` is a multiple.
static void fsdpi_stream(char *dst, const char *src, size_t bytes) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__)
    typedef long long vector __attribute__((vector_size(16), may_alias));
    for (size_t at = 0; at < bytes; at += sizeof(vector)) {
        vector x;
        memcpy(&x, src + at, sizeof x);
        __asm__ volatile("movntdq %1, %0" : "=m"(*(vector *)(void *)(dst + at)) : "x"(x));
    }
#else
    memcpy(dst, src, bytes);
#endif
}

// Orders streamed writes before later writes of this thread, as other threads see them.
static void fsdpi_stream_end(void) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__)
    __asm__ volatile("sfence" ::: "memory");
#endif
}

static const char *fsdpi_widen(float *room, const char *src, fsdp_dtype dtype, size_t count) {
    if (dtype == FSDP_F32) return src;
    fsdpi_loops(room, FSDP_F32, &src, 1, dtype, count, 1);
    return (const char *)room;
}

// Reduces one block through arrays on the stack, so that dst may be a source. Sums take up to eight
// sources at a time. The last sum applies the scale; then dst is added and the result rounded.
static FSDPI_NOINLINE void fsdpi_loop_block(char *dst, fsdp_dtype to, const char *const *srcs,
                                            int num, fsdp_dtype from, size_t count, float scale,
                                            int accumulate) {
    float wide[8][FSDPI_BLOCK] FSDPI_LINE, sums[2][FSDPI_BLOCK] FSDPI_LINE;
    const char *x[8];
    int cast = num == 1 && from != FSDP_F32 && scale == 1.0f && !accumulate, turn = 0;
    for (int next = cast; next < num; turn = !turn) {
        int k = next > 0, left = num - next + k, most = left >= 8 ? 8 : left > 4 ? 4 : left;
        int as_bf16 = from == FSDP_BF16 && !k && most > 1;
        x[0] = (const char *)sums[!turn];
        for (; k < most; k++, next++)
            x[k] = as_bf16 ? srcs[next] : fsdpi_widen(wide[k], srcs[next], from, count);
        fsdpi_loops(sums[turn], FSDP_F32, x, most, as_bf16 ? FSDP_BF16 : FSDP_F32, count,
                    next == num ? scale : 1);
    }
    if (accumulate) {
        x[0] = fsdpi_widen(wide[0], dst, to, count);
        x[1] = (const char *)sums[!turn];
        fsdpi_loops(sums[turn], FSDP_F32, x, 2, FSDP_F32, count, 1);
        turn = !turn;
    }
    x[0] = cast ? fsdpi_widen(wide[0], srcs[0], from, count) : (const char *)sums[!turn];
    if (to != FSDP_F32) fsdpi_loops(dst, to, x, 1, FSDP_F32, count, 1);
    else memcpy(dst, x[0], count * sizeof(float));
}

// Returns 1 if fsdpi_loop_table has one loop for a reduction; otherwise a block takes several.
static int fsdpi_has_loop(fsdp_dtype to, int num, fsdp_dtype from, float scale) {
    int plain = num == 1 && scale == 1.0f;
    if (to != FSDP_F32) return plain && from == FSDP_F32;
    if (plain) return 1;
    return (num <= 4 || num == 8) && from != FSDP_F16 && (num > 1 || from == FSDP_F32);
}

static FSDPI_NOINLINE void fsdpi_reduce_by_blocks(char *dst, fsdp_dtype to, const char *const *srcs,
                                                  int num, fsdp_dtype from, size_t count,
                                                  float scale, int accumulate) {
    size_t in = fsdp_dtype_size(from), out = fsdp_dtype_size(to);
    for (size_t at = 0; at < count; at += FSDPI_BLOCK) {
        size_t n = count - at < FSDPI_BLOCK ? count - at : FSDPI_BLOCK;
        const char *block[FSDPI_MAX_SRCS];
        for (int k = 0; k < num; k++) block[k] = srcs[k] + at * in;
        fsdpi_loop_block(dst + at * out, to, block, num, from, n, scale, accumulate);
    }
}

/* Reduces with results that bypass the caches (fsdpi_stream). The loop alternates between chunks of
   two pages and prefetches sources: memory is faster then. */
static FSDPI_NOINLINE void fsdpi_reduce_around(char *dst, fsdp_dtype to, const char *const *srcs,
                                               int num, fsdp_dtype from, size_t count,
                                               float scale) {
    enum { CHUNK = 64, PAGE = 1024, PAIR = 2 * PAGE, AHEAD = 4096 }; // elements
    size_t in = fsdp_dtype_size(from), out = fsdp_dtype_size(to), pairs = count / PAIR * PAIR;
    int has_loop = fsdpi_has_loop(to, num, from, scale);
    float chunk[CHUNK] FSDPI_LINE;
    for (size_t i = 0; i < count; i += CHUNK) {
        size_t turn = i / CHUNK % 2 * PAGE + i % PAIR / (2 * CHUNK) * CHUNK;
        size_t at = i < pairs ? i / PAIR * PAIR + turn : i;
        size_t n = count - at;
        if (n > CHUNK) n = CHUNK;
        const char *here[FSDPI_MAX_SRCS];
        for (int k = 0; k < num; k++) {
            here[k] = srcs[k] + at * in;
            for (size_t line = 0; line < CHUNK * in; line += 64)
                FSDPI_PREFETCH(here[k] + AHEAD * in + line);
        }
        if (has_loop) fsdpi_loops(chunk, to, here, num, from, n, scale);
        else fsdpi_loop_block((char *)chunk, to, here, num, from, n, scale, 0);
        fsdpi_stream(dst + at * out, (const char *)chunk, n * out);
    }
    fsdpi_stream_end();
}

/* Sums of f32 and 16-bit floats; count is a multiple of FSDPI_STRIDE. They go by blocks if dst is
   read, too, or if there is no loop for them. */
static void fsdpi_reduce_by_loops(char *dst, fsdp_dtype to, const char *const *srcs, int num,
                                  fsdp_dtype from, size_t count, float scale, int accumulate) {
    size_t in = count * fsdp_dtype_size(from), out = count * fsdp_dtype_size(to);
    int by_blocks = accumulate || !fsdpi_has_loop(to, num, from, scale);
    for (int k = 0; k < num; k++) {
        uintptr_t s = (uintptr_t)srcs[k], d = (uintptr_t)dst;
        by_blocks |= s + in > d && d + out > s && !(s == d && in == out);
    }
    if (!accumulate && out >= FSDPI_STREAM && (uintptr_t)dst % 16 == 0)
        fsdpi_reduce_around(dst, to, srcs, num, from, count, scale);
    else if (by_blocks) fsdpi_reduce_by_blocks(dst, to, srcs, num, from, count, scale, accumulate);
    else fsdpi_loops(dst, to, srcs, num, from, count, scale);
}

// Computes dst[0..count) (+)= scale * (src_0 op src_1 op ...), sources in order. All casts, scaled
// copies, fused reduce-scatters and all-reduces of the CPU backends call it. dst may be one of the
// sources. Sums are in f64 if a dtype is f64, otherwise in f32.
static FSDPI_UNUSED void fsdpi_reduce(void *dst, fsdp_dtype dst_dtype, const char *const *srcs,
                                      int num_srcs, fsdp_dtype dtype, size_t count, double scale,
                                      int accumulate, fsdp_redop redop) {
    size_t in = fsdp_dtype_size(dtype), out = fsdp_dtype_size(dst_dtype), done = 0;
    int wide = dtype == FSDP_F64 || dst_dtype == FSDP_F64;
    int is_one = scale == 1.0 || (dtype == FSDP_F32 && !wide && (float)scale == 1.0f);
    if (!wide) scale = (double)(float)scale;
    if (num_srcs == 1 && dtype == dst_dtype && is_one && !accumulate) {
        if (dst != (const void *)srcs[0]) memmove(dst, srcs[0], count * in);
        return;
    }
    if (!fsdp_dtype_is_float(dtype)) {
        fsdpi_reduce_ints(dst, srcs, num_srcs, dtype, count, redop);
        return;
    }
    if (!wide && redop == FSDP_SUM) {
        done = count / FSDPI_STRIDE * FSDPI_STRIDE;
        fsdpi_reduce_by_loops((char *)dst, dst_dtype, srcs, num_srcs, dtype, done, (float)scale,
                              accumulate);
    }
    for (size_t at = done; at < count; at += FSDPI_BLOCK) {
        size_t n = count - at < FSDPI_BLOCK ? count - at : FSDPI_BLOCK;
        const char *block[FSDPI_MAX_SRCS];
        for (int k = 0; k < num_srcs; k++) block[k] = srcs[k] + at * in;
        fsdpi_reduce_block((char *)dst + at * out, dst_dtype, block, num_srcs, dtype, n, scale,
                           accumulate, redop, wide);
    }
}

FSDP_PRECISE_END

FSDP_API fsdp_status fsdp_convert(void *dst, fsdp_dtype dst_dtype, const void *src,
                                  fsdp_dtype src_dtype, int64_t count) {
    if (count < 0 || !fsdp_dtype_size(dst_dtype) || !fsdp_dtype_size(src_dtype))
        return FSDP_ERR_INVALID_ARG;
    if (count > 0 && (!dst || !src)) return FSDP_ERR_INVALID_ARG;
    if (dst_dtype != src_dtype &&
        !(fsdp_dtype_is_float(dst_dtype) && fsdp_dtype_is_float(src_dtype)))
        return FSDP_ERR_INVALID_ARG;
    const char *srcs[1] = {(const char *)src};
    if (count > 0)
        fsdpi_reduce(dst, dst_dtype, srcs, 1, src_dtype, (size_t)count, 1.0, 0, FSDP_SUM);
    return FSDP_OK;
}

FSDP_API const void *fsdp_cast_if_needed(void *dst, fsdp_dtype dtype, const void *src,
                                         fsdp_dtype src_dtype, int64_t count) {
    if (dtype == FSDP_DTYPE_KEEP || dtype == src_dtype) return src;
    return fsdp_convert(dst, dtype, src, src_dtype, count) == FSDP_OK ? dst : NULL;
}

FSDP_API const void *fsdp_cast_floating(void *dst, fsdp_dtype dtype, const void *src,
                                        fsdp_dtype src_dtype, int64_t count) {
    if (!fsdp_dtype_is_float(src_dtype)) return src;
    return fsdp_cast_if_needed(dst, dtype, src, src_dtype, count);
}

#endif // FSDPI_BASE_REDUCE_H
