/* core/dtype.h - build macros, status codes, element types, the one loop that reduces

   A part of fsdp.h, which includes it. Pure functions of numbers: no threads, no system calls.
   CUDA kernels use it as well.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_DTYPE_H
#define FSDP_DTYPE_H
// The columns of the declarations are set by hand.
// clang-format off

#include <stddef.h> // size_t, NULL
#include <stdint.h> // int64_t, uint64_t

/* -------------------------------------------------------------------------------------------- */

#ifdef FSDP_STATIC
#if defined(__GNUC__)
#define FSDP_API static __attribute__((unused))
#else
#define FSDP_API static
#endif
#endif
#ifndef FSDP_API
#define FSDP_API extern
#endif

#if defined(__GNUC__)
#define FSDP_MUST_CHECK __attribute__((warn_unused_result))
#define FSDP_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define FSDP_MUST_CHECK
#define FSDP_PRINTF(fmt, args)
#endif

// Initialises a desc or a view: all zero means defaults. C and C++ spell it differently.
#ifdef __cplusplus
#define FSDP_ZERO \
    {}
#else
#define FSDP_ZERO {0}
#endif

#define FSDP_MAX_DIMS 8

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------- */
/* Status. Zero is success; there is one code per reaction. The text of the last failure, which
   names rank, unit, operation, expected and got, is fsdp_last_error(world).                      */

#define FSDP_STATUS_LIST(X)                                                                       \
    X(OK, 0, "success")                                                                           \
    X(ERR_INVALID_ARG, 1, "an argument or desc field is wrong; nothing was changed")              \
    X(ERR_INVALID_STATE, 2, "the call is not possible in this state; nothing was changed")        \
    X(ERR_OUT_OF_MEMORY, 3, "memory could not be allocated")                                      \
    X(ERR_UNSUPPORTED, 4, "the call is valid, but this build, backend or device cannot do it")    \
    X(ERR_BACKEND, 5, "the backend or the device failed")                                         \
    X(ERR_TIMEOUT, 6, "a peer did not come before the deadline; the world is aborted")            \
    X(ERR_PEER_LOST, 7, "a peer died or left; the world is aborted")                              \
    X(ERR_MISMATCH, 8, "ranks disagree about an operation; the world is aborted")                 \
    X(ERR_IO, 9, "a file or socket failed")                                                       \
    X(ERR_CORRUPT, 10, "data read from outside are malformed")                                    \
    X(ERR_ABORTED, 11, "the world was aborted by a rank or by the program")                       \
    X(ERR_INTERNAL, 12, "an invariant of the library does not hold: please report")

typedef enum fsdp_status {
#define FSDP_X(name, value, text) FSDP_##name = value,
    FSDP_STATUS_LIST(FSDP_X)
#undef FSDP_X
} fsdp_status;

/* -------------------------------------------------------------------------------------------- */
/* Element types. 16-bit floats are stored as uint16_t; integers are storage only.                */

#define FSDP_DTYPE_LIST(X)                                                                        \
    X(F32, 1, 4, 1)                                                                               \
    X(F64, 2, 8, 1)                                                                               \
    X(F16, 3, 2, 1)                                                                               \
    X(BF16, 4, 2, 1)                                                                              \
    X(U8, 5, 1, 0)                                                                                \
    X(I8, 6, 1, 0)                                                                                \
    X(I16, 7, 2, 0)                                                                               \
    X(I32, 8, 4, 0)                                                                               \
    X(I64, 9, 8, 0)

typedef int32_t fsdp_dtype;
enum {
    FSDP_DTYPE_KEEP = 0, // in a desc: as the parameter itself (parameters: f32)
#define FSDP_X(name, value, bytes, is_float) FSDP_##name = value,
    FSDP_DTYPE_LIST(FSDP_X)
#undef FSDP_X
    FSDP_DTYPE_COUNT = 10
};

// How sources are joined; sums run in rank order.
typedef int32_t fsdp_redop;
enum { FSDP_SUM = 0, FSDP_MAX, FSDP_MIN };

/* fsdp_dtype_size - bytes of one element; 0 if the value is not a dtype
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API size_t fsdp_dtype_size(fsdp_dtype dtype);

/* fsdp_dtype_name - "f32", "bf16", ...; "?" if the value is not a dtype
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_dtype_name(fsdp_dtype dtype);

/* fsdp_dtype_is_float - 1 for f64, f32, f16 and bf16, else 0
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API int fsdp_dtype_is_float(fsdp_dtype dtype);

/* fsdp_convert - convert `count` elements between two floating dtypes, or copy equal dtypes
   dst, src    aligned to their dtype. They may be equal only if the dtypes are equal
   Result      FSDP_OK; FSDP_ERR_INVALID_ARG (NULL with count > 0, count < 0, or integers of
               different types)
   Rounding    to nearest, ties to even; overflow gives infinity; infinity, NaN (quiet, payload cut)
               and the sign of zero are kept; subnormals are exact
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API fsdp_status fsdp_convert(void *dst, fsdp_dtype dst_dtype, const void *src,
                                  fsdp_dtype src_dtype, int64_t count);

/* fsdp_cast_if_needed - cast src to dtype, unless dtype is KEEP or src_dtype
   dst         room for count elements of dtype; you own it. Untouched if no cast is needed
   Result      the pointer to use, src or dst; NULL if the cast is impossible (see fsdp_convert)
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: _to_dtype_if_needed */
FSDP_API const void *fsdp_cast_if_needed(void *dst, fsdp_dtype dtype, const void *src,
                                         fsdp_dtype src_dtype, int64_t count);

/* fsdp_cast_floating - as fsdp_cast_if_needed; if src is not floating, it is not cast
   Result      the pointer to use
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: _cast_fp_tensor */
FSDP_API const void *fsdp_cast_floating(void *dst, fsdp_dtype dtype, const void *src,
                                        fsdp_dtype src_dtype, int64_t count);

/* fsdp_status_name - "FSDP_ERR_TIMEOUT" and so on; "FSDP_?" if the value is not a status
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_status_name(fsdp_status status);

/* fsdp_status_text - one sentence for people, from FSDP_STATUS_LIST
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_status_text(fsdp_status status);

#ifdef __cplusplus
}
#endif
// clang-format on
#endif // FSDP_DTYPE_H

/* ============================================================================================ */
/* Implementation. Outside the guard, as in fsdp.h. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_DTYPE_IMPLEMENTED)
#define FSDP_DTYPE_IMPLEMENTED

#include <string.h> // memcpy, memset, memcmp, strcmp, strlen

#if defined(__clang__)
#define FSDPI_NOINLINE __attribute__((noinline))
#define FSDPI_UNUSED   __attribute__((unused))
#elif defined(__GNUC__)
#define FSDPI_NOINLINE __attribute__((noinline, noclone))
#define FSDPI_UNUSED   __attribute__((unused))
#else
#define FSDPI_NOINLINE
#define FSDPI_UNUSED
#endif
#if defined(__GNUC__)
#define FSDPI_MERGED static inline __attribute__((always_inline))
#else
#define FSDPI_MERGED static inline
#endif

// The conversions are also those of CUDA kernels.
#ifdef __CUDACC__
#pragma nv_diag_suppress 1675 // pragmas of gcc are for the host's compiler
#define FSDPI_HD __host__ __device__
#else
#define FSDPI_HD
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------- */
FSDP_API const char *fsdp_status_name(fsdp_status status) {
#define FSDP_X(name, value, text) "FSDP_" #name,
    static const char *const names[] = {FSDP_STATUS_LIST(FSDP_X)};
#undef FSDP_X
    return (unsigned)status < sizeof names / sizeof *names ? names[status] : "FSDP_?";
}

FSDP_API const char *fsdp_status_text(fsdp_status status) {
#define FSDP_X(name, value, text) text,
    static const char *const texts[] = {FSDP_STATUS_LIST(FSDP_X)};
#undef FSDP_X
    return (unsigned)status < sizeof texts / sizeof *texts ? texts[status] : "no such status";
}

/* -------------------------------------------------------------------------------------------- */
// Owns: element types, their conversions, and every loop over elements: cast, sum, norm.
// Invariants: the same inputs give the same bits with any compiler flags. Sums run in rank order;
// no expression both multiplies and adds, since a compiler may contract that to one rounding. Loops
// work on blocks that stay in the first-level cache.

#define FSDPI_BLOCK    512 // elements: whole pages of page-aligned sources would alias
#define FSDPI_MAX_SRCS 256 // ranks of one host that a CPU backend reduces over

FSDP_API size_t fsdp_dtype_size(fsdp_dtype dtype) {
#define FSDP_X(name, value, bytes, is_float) bytes,
    static const uint8_t bytes[FSDP_DTYPE_COUNT] = {0, FSDP_DTYPE_LIST(FSDP_X)};
#undef FSDP_X
    return dtype > 0 && dtype < FSDP_DTYPE_COUNT ? bytes[dtype] : 0;
}

FSDP_API int fsdp_dtype_is_float(fsdp_dtype dtype) {
    return dtype == FSDP_F32 || dtype == FSDP_F64 || dtype == FSDP_F16 || dtype == FSDP_BF16;
}

FSDP_API const char *fsdp_dtype_name(fsdp_dtype dtype) {
    static const char *const names[FSDP_DTYPE_COUNT] = {"?",  "f32", "f64", "f16", "bf16",
                                                        "u8", "i8",  "i16", "i32", "i64"};
    return dtype > 0 && dtype < FSDP_DTYPE_COUNT ? names[dtype] : "?";
}

// By their bits: compilers may assume that there are no NaNs.
static FSDPI_UNUSED int fsdpi_is_nan(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return (u & 0x7FFFFFFFFFFFFFFFull) > 0x7FF0000000000000ull;
}

static FSDPI_UNUSED int fsdpi_is_finite(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return (u & 0x7FF0000000000000ull) != 0x7FF0000000000000ull;
}

// Precise arithmetic from here on, whatever flags the program is built with (-Ofast included); and
// vectorised even where the program is built with -O0 or -O2.
#if defined(__clang__)
#pragma float_control(precise, on, push)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("O3", "no-fast-math", "fp-contract=off")
#endif

static FSDPI_HD inline uint32_t fsdpi_f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static FSDPI_HD inline float fsdpi_f32_of(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static FSDPI_HD inline float fsdpi_bf16_to_f32(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    uint32_t quiet = (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x00400000u : 0u;
    return fsdpi_f32_of(u | quiet);
}

static FSDPI_HD inline uint16_t fsdpi_f32_to_bf16(float x) {
    uint32_t u = fsdpi_f32_bits(x);
    uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    uint32_t nan = (u >> 16) | 0x0040u;
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

static FSDPI_HD inline float fsdpi_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, em = h & 0x7FFFu;
    uint32_t normal = (em << 13) + (112u << 23);
    uint32_t special = (em << 13) | 0x7F800000u | (em > 0x7C00u ? 0x00400000u : 0u);
    uint32_t tiny = fsdpi_f32_bits((float)(int32_t)em *
                                   5.9604644775390625e-8f); // em * 2^-24, exact
    uint32_t u = em >= 0x7C00u ? special : normal;
    uint32_t is_tiny = 0u - (uint32_t)(em < 0x0400u); // a choice by ?: would become a branch
    return fsdpi_f32_of(sign | (tiny & is_tiny) | (u & ~is_tiny));
}

static FSDPI_HD inline uint16_t fsdpi_f32_to_f16(float x) {
    uint32_t u = fsdpi_f32_bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
    uint32_t rebased = a - (112u << 23);
    uint32_t normal = (rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13;
    // Below 2^-14 the result's unit is 2^-24, which is also the unit of floats in [0.5, 1).
    uint32_t tiny = fsdpi_f32_bits(fsdpi_f32_of(a < 0x38800000u ? a : 0u) + 0.5f) - 0x3F000000u;
    uint32_t nan = 0x7E00u | ((a >> 13) & 0x3FFu);
    uint32_t big = a > 0x7F800000u ? nan : 0x7C00u;
    uint32_t is_tiny = 0u - (uint32_t)(a < 0x38800000u);
    uint32_t h = (tiny & is_tiny) | (normal & ~is_tiny);
    return (uint16_t)(sign | (a >= 0x47800000u ? big : h));
}

// Rounds to odd, so that a second rounding to 16 bits gives what one rounding would have given.
static inline float fsdpi_f64_to_f32_odd(double d) {
    uint64_t bits;
    memcpy(&bits, &d, sizeof bits);
    uint64_t a = bits & 0x7FFFFFFFFFFFFFFFull;
    float f = (float)d;
    if (a >= 0x7FF0000000000000ull) return f; // infinity, NaN
    uint32_t u = fsdpi_f32_bits(f);
    double back = (double)f;
    uint64_t b;
    memcpy(&b, &back, sizeof b);
    if (b == bits) return f;
    if ((b & 0x7FFFFFFFFFFFFFFFull) > a) u -= 1; // rounded away from zero: step back
    return fsdpi_f32_of(u | 1u);
}

// An element that is no f64; in a sum a signalling NaN may stay one, since the sum is quiet.
FSDPI_MERGED float fsdpi_at(const char *src, fsdp_dtype dtype, size_t i, int in_sum) {
    if (dtype == FSDP_F32) return ((const float *)(const void *)src)[i];
    uint16_t h = ((const uint16_t *)(const void *)src)[i];
    if (dtype == FSDP_BF16 && in_sum) return fsdpi_f32_of((uint32_t)h << 16);
    return dtype == FSDP_BF16 ? fsdpi_bf16_to_f32(h) : fsdpi_f16_to_f32(h);
}

FSDPI_MERGED void fsdpi_put(void *dst, fsdp_dtype dtype, size_t i, float x) {
    if (dtype == FSDP_F32) ((float *)dst)[i] = x;
    else ((uint16_t *)dst)[i] = dtype == FSDP_BF16 ? fsdpi_f32_to_bf16(x) : fsdpi_f32_to_f16(x);
}

/* count <= FSDPI_BLOCK elements of any floating dtype to and from f64. `src` may be returned as it
   is, so that nothing is copied where nothing is converted. */
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

// acc (op)= x, element by element. To round an f64 sum or product of two f32 is to have made it so.
static void fsdpi_combine(double *acc, const double *x, size_t count, fsdp_redop redop, int wide) {
    if (redop == FSDP_MAX) // choices, no branches: with -Ofast gcc takes those for fmax, fmin
        for (size_t i = 0; i < count; i++) acc[i] = x[i] > acc[i] ? x[i] : acc[i];
    else if (redop == FSDP_MIN)
        for (size_t i = 0; i < count; i++) acc[i] = x[i] < acc[i] ? x[i] : acc[i];
    else
        for (size_t i = 0; i < count; i++) {
            double sum = acc[i] + x[i];
            acc[i] = wide ? sum : (double)(float)sum;
        }
}

/* One block of dst (+)= scale * (src_0 op src_1 op ...), in f64 if wide, else in f32. The scale is
   applied to the whole block before anything is added, in loops of their own: see above.
   A cast is no arithmetic: with that a process may flush subnormals (-Ofast). */
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

// Integers (i32, i64): all_reduce of counters. No scale, no cast.
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

// The fast loops, with the bits of the blocks above. Those stay the reference, and take what these
// leave: other types and operations, and the last elements.

// A vector that is stored over the end of a page takes a hundred times as long as another one: what
// lies on the stack begins with a line.
#ifdef __GNUC__
#define FSDPI_LINE __attribute__((aligned(64)))
#else
#define FSDPI_LINE
#endif

#define FSDPI_STRIDE 16                  // elements: a loop takes a multiple of them
#define FSDPI_STREAM ((size_t)512 << 10) // bytes from which on results need not stay in a cache

// Says that no round of a loop reads what an earlier one has written.
#if defined(__clang__)
#define FSDPI_APART _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define FSDPI_APART _Pragma("GCC ivdep")
#else
#define FSDPI_APART
#endif

/* dst = scale * (src_0 + src_1 + ...): the one loop, of which compilers make vectors. dtypes, num
   and scaled are constants where this is used. A source of the same size may be dst; else none lies
   in it. */
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

// A sum that is multiplied by one keeps its bits.
FSDPI_MERGED void fsdpi_loop_sum(void *dst, const char *const *srcs, int num, fsdp_dtype from,
                                 size_t count, float scale) {
    if (num == 2) fsdpi_loop(dst, FSDP_F32, srcs, 2, from, count, scale, 1);
    else if (num == 3) fsdpi_loop(dst, FSDP_F32, srcs, 3, from, count, scale, 1);
    else if (num == 4) fsdpi_loop(dst, FSDP_F32, srcs, 4, from, count, scale, 1);
    else fsdpi_loop(dst, FSDP_F32, srcs, 8, from, count, scale, 1);
}

/* The table: sums of 2, 3, 4 or 8 f32 or bf16, and one f32 scaled, to f32; and casts between f32
   and 16 bits, which know no scale. */
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

// Compiled for every processor of the architecture, and once more for what most of them have.
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

// 64 bytes at a time around the caches, so that a line is not read only to be overwritten.
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

// What has been streamed is written before what this thread writes from now on.
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

/* A block, aside: dst may be a source. By eights, fours and less; the scale comes when all are in
   the sum, dst is added behind it, and the last step rounds. */
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

// Whether the table has a loop for it: else blocks, in several.
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

/* Around the caches: lines are not read only to be overwritten. Of two pages by turns, and what
   they need is asked for ahead: memory is faster so. */
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
                __builtin_prefetch(here[k] + AHEAD * in + line);
        }
        if (has_loop) fsdpi_loops(chunk, to, here, num, from, n, scale);
        else fsdpi_loop_block((char *)chunk, to, here, num, from, n, scale, 0);
        fsdpi_stream(dst + at * out, (const char *)chunk, n * out);
    }
    fsdpi_stream_end();
}

/* Sums of f32 and 16-bit floats; count is a multiple of FSDPI_STRIDE. By blocks where dst is read,
   too, or no loop is made for it. */
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

/* dst[0..count) (+)= scale * (src_0 op src_1 op ...), sources in order. The one reduction of the
   library: casts, scaled copies, fused reduce-scatter and all-reduce of the CPU backends.
   dst may be one of the sources. Sums in f64 when a dtype is f64, else in f32.                   */
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

#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif

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

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION
