/* base/float.h - one element: conversions between floating dtypes, NaN and infinity

   A part of fsdp.h, and of the CUDA kernels.
   Invariant: the same inputs give the same bits with any compiler flags.
   Callers: backends/fsdp_cuda.cu (fsdpi_f32_bits), reduce.h (fsdpi_at), core/clip.h (fsdpi_is_nan)
     and others.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_BASE_FLOAT_H
#define FSDPI_BASE_FLOAT_H

#include "macros.h"

#include <string.h> // memcpy

// Returns 1 if x is a NaN. Tests bits, because a compiler may assume that there are no NaNs.
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

// Arithmetic is precise from here on, even if the program is built with -Ofast.
FSDP_PRECISE_BEGIN("O3")

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
    uint32_t is_tiny = 0u - (uint32_t)(em < 0x0400u); // compilers make a branch of ?: here
    return fsdpi_f32_of(sign | (tiny & is_tiny) | (u & ~is_tiny));
}

static FSDPI_HD inline uint16_t fsdpi_f32_to_f16(float x) {
    uint32_t u = fsdpi_f32_bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
    uint32_t rebased = a - (112u << 23);
    uint32_t normal = (rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13;
    // Below 2^-14 f16 has steps of 2^-24, as f32 has in [0.5, 1): adding 0.5 rounds to them.
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

// Returns element i of any dtype but f64. In a sum a signalling NaN may stay: addition makes it
// quiet.
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

FSDP_PRECISE_END

#endif // FSDPI_BASE_FLOAT_H
