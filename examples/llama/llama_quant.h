/* llama_quant.h - rows of a matrix as blocks of bytes: Q8_0 and Q4_1 of ggml

   A block has 32 elements of one row. Q8_0: 2 bytes of d in f16, then 32 signed bytes q; an element
   is d*q. Q4_1: 2 bytes of d, 2 of m in f16, then 16 bytes; the low half of byte j is element j,
   and the high half element j + 16; an element is d*q + m. A matrix that came from Q4_1 gives the
   same bytes again.

   SPDX-License-Identifier: MIT */
#ifndef LLAMA_QUANT_H
#define LLAMA_QUANT_H

#include "examples/common/gemm.h" // GEMM_RESTRICT
#include "fsdp.h"                 // fsdp_convert

#include <math.h>   // fabsf, roundf
#include <stdint.h> // uint8_t

enum { LLAMA_BLOCK = 32, LLAMA_Q8_0_BYTES = 34, LLAMA_Q4_1_BYTES = 20, LLAMA_BLOCKS_AT_ONCE = 64 };

static inline void llama_half_put(uint8_t *to, float x) {
    uint16_t half;
    fsdp_convert(&half, FSDP_F16, &x, FSDP_F32, 1);
    to[0] = (uint8_t)half, to[1] = (uint8_t)(half >> 8);
}

/* Sets scales[i] to the half at from + i*stride, for at most LLAMA_BLOCKS_AT_ONCE. */
static inline void llama_halves_get(float *scales, const uint8_t *from, int stride, int count) {
    uint16_t halves[LLAMA_BLOCKS_AT_ONCE];
    for (int i = 0; i < count; i++, from += stride) {
        halves[i] = (uint16_t)(from[0] | from[1] << 8);
    }
    fsdp_convert(scales, FSDP_F32, halves, FSDP_F16, count);
}

/* Returns x as an integer of 0 .. most, or -most .. most; 0 for what is none. */
static inline int llama_quantum(float x, int least, int most) {
    return x >= (float)least && x <= (float)most ? (int)x : x > (float)most ? most : 0;
}

/* Writes count / 32 blocks of 34 bytes. count: a multiple of 32. */
static inline void llama_q8_0_put(uint8_t *to, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LLAMA_BLOCK, x += LLAMA_BLOCK, to += LLAMA_Q8_0_BYTES) {
        float most = 0.0f;
        for (int j = 0; j < LLAMA_BLOCK; j++) most = fabsf(x[j]) > most ? fabsf(x[j]) : most;
        const float d = most / 127.0f, inverse = d > 0.0f ? 1.0f / d : 0.0f;
        llama_half_put(to, d);
        for (int j = 0; j < LLAMA_BLOCK; j++) {
            to[2 + j] = (uint8_t)(int8_t)llama_quantum(roundf(x[j] * inverse), -127, 127);
        }
    }
}

/* Writes count / 32 blocks of 20 bytes. count: a multiple of 32. */
static inline void llama_q4_1_put(uint8_t *to, const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i += LLAMA_BLOCK, x += LLAMA_BLOCK, to += LLAMA_Q4_1_BYTES) {
        float least = x[0], most = x[0];
        int q[LLAMA_BLOCK];
        for (int j = 1; j < LLAMA_BLOCK; j++) {
            least = x[j] < least ? x[j] : least;
            most = x[j] > most ? x[j] : most;
        }
        const float d = (most - least) / 15.0f, inverse = d > 0.0f ? 1.0f / d : 0.0f;
        llama_half_put(to, d), llama_half_put(to + 2, least);
        for (int j = 0; j < LLAMA_BLOCK; j++) {
            const volatile float scaled = (x[j] - least) * inverse; // an FMA has other bits
            q[j] = llama_quantum(scaled + 0.5f, 0, 15);
        }
        for (int j = 0; j < 16; j++) to[4 + j] = (uint8_t)(q[j] | q[j + 16] << 4);
    }
}

/* Writes the elements of count / 32 blocks. */
static inline void llama_q8_0_get(float *GEMM_RESTRICT x, const uint8_t *from, int64_t count) {
    float d[LLAMA_BLOCKS_AT_ONCE];
    for (int64_t blocks = count / LLAMA_BLOCK; blocks > 0; blocks -= LLAMA_BLOCKS_AT_ONCE) {
        const int n = blocks < LLAMA_BLOCKS_AT_ONCE ? (int)blocks : LLAMA_BLOCKS_AT_ONCE;
        llama_halves_get(d, from, LLAMA_Q8_0_BYTES, n);
        for (int i = 0; i < n; i++, x += LLAMA_BLOCK, from += LLAMA_Q8_0_BYTES) {
            const int8_t *q = (const int8_t *)(from + 2);
            for (int j = 0; j < LLAMA_BLOCK; j++) x[j] = d[i] * (float)q[j];
        }
    }
}
static inline void llama_q4_1_get(float *GEMM_RESTRICT x, const uint8_t *from, int64_t count) {
    float d[LLAMA_BLOCKS_AT_ONCE], m[LLAMA_BLOCKS_AT_ONCE];
    for (int64_t blocks = count / LLAMA_BLOCK; blocks > 0; blocks -= LLAMA_BLOCKS_AT_ONCE) {
        const int n = blocks < LLAMA_BLOCKS_AT_ONCE ? (int)blocks : LLAMA_BLOCKS_AT_ONCE;
        llama_halves_get(d, from, LLAMA_Q4_1_BYTES, n);
        llama_halves_get(m, from + 2, LLAMA_Q4_1_BYTES, n);
        for (int i = 0; i < n; i++, x += LLAMA_BLOCK, from += LLAMA_Q4_1_BYTES) {
            const uint8_t *q = from + 4;
            for (int j = 0; j < 16; j++) {
                x[j] = d[i] * (float)(q[j] & 15) + m[i];
                x[j + 16] = d[i] * (float)(q[j] >> 4) + m[i];
            }
        }
    }
}

/* ---- dtypes of parameters -------------------------------------------------------------------- */

typedef enum llama_dtype {
    LLAMA_DTYPE_FILE, // of each tensor in the files that the model is loaded from
    LLAMA_DTYPE_F32,
    LLAMA_DTYPE_BF16,
    LLAMA_DTYPE_F16,
    LLAMA_DTYPE_FILES, // those before can be in files
    LLAMA_DTYPE_Q8_0 = LLAMA_DTYPE_FILES,
    LLAMA_DTYPE_Q4_1,
    LLAMA_DTYPES
} llama_dtype;

static const struct {
    fsdp_dtype dtype;
    const char *name; // of an option
    const char *word; // in config.json
    int block_bytes;  // of 32 elements; 0: no blocks
} llama_dtypes[LLAMA_DTYPES] = {
    {FSDP_DTYPE_KEEP, "file", NULL, 0},        {FSDP_F32, "f32", "float32", 0},
    {FSDP_BF16, "bf16", "bfloat16", 0},        {FSDP_F16, "f16", "float16", 0},
    {FSDP_U8, "q8_0", NULL, LLAMA_Q8_0_BYTES}, {FSDP_U8, "q4_1", NULL, LLAMA_Q4_1_BYTES}};

/* llama_acts_desc.convert: kind is a llama_dtype. Blocks begin at multiples of 32. */
static inline void llama_convert(float *to, const void *w, int kind, int64_t first, int64_t count) {
    const uint8_t *bytes = (const uint8_t *)w;
    const int64_t at = first / LLAMA_BLOCK * llama_dtypes[kind].block_bytes;
    if (kind == LLAMA_DTYPE_Q8_0) llama_q8_0_get(to, bytes + at, count);
    else if (kind == LLAMA_DTYPE_Q4_1) llama_q4_1_get(to, bytes + at, count);
    else {
        const fsdp_dtype dtype = llama_dtypes[kind].dtype;
        fsdp_convert(to, FSDP_F32, bytes + first * (int64_t)fsdp_dtype_size(dtype), dtype, count);
    }
}

/* The other way, from the first element on. */
static inline void llama_store(void *to, const float *x, int kind, int64_t count) {
    if (kind == LLAMA_DTYPE_Q8_0) llama_q8_0_put((uint8_t *)to, x, count);
    else if (kind == LLAMA_DTYPE_Q4_1) llama_q4_1_put((uint8_t *)to, x, count);
    else fsdp_convert(to, llama_dtypes[kind].dtype, x, FSDP_F32, count);
}

#endif // LLAMA_QUANT_H
