/* fsdp_math.h - status codes, element types and shard math of fsdp.h

   Pure functions of numbers, which fsdp.h builds on; usable alone, without threads or system calls:
       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_math.h"
   (fsdp.h does the same when FSDP_MATH_ONLY is defined.)

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h)

TABLE OF CONTENTS (search for the tag)
    >>config     macros that change the build
    >>numbers    declarations
    >>status     names of status codes
    >>dtype      element types, conversions, the one reduction loop
    >>layout     shard math
*/
#ifndef FSDP_MATH_H
#define FSDP_MATH_H
// The columns of the declarations are set by hand.
// clang-format off

#include <stddef.h> // size_t, NULL
#include <stdint.h> // int64_t, uint64_t

/* -------------------------------------------------------------------------------------------- */
// >>config

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
// >>numbers
/* Status. Zero is success; there is one code per reaction. The text of the last failure, which
   names rank, unit, operation, expected and got, is fsdp_last_error(world).                      */

#define FSDP_STATUS_LIST(X)                                                                       \
    X(OK, 0, "success")                                                                           \
    X(ERR_INVALID_ARG, 1, "an argument or desc field is wrong; nothing was changed")              \
    X(ERR_INVALID_STATE, 2, "the call is not possible in this state; nothing was changed")        \
    X(ERR_OUT_OF_MEMORY, 3, "memory could not be had")                                            \
    X(ERR_UNSUPPORTED, 4, "valid, but this build or backend cannot do it")                        \
    X(ERR_BACKEND, 5, "the backend or the device failed")                                         \
    X(ERR_TIMEOUT, 6, "a peer did not come before the deadline; the world is aborted")            \
    X(ERR_PEER_LOST, 7, "a peer died or left; the world is aborted")                              \
    X(ERR_MISMATCH, 8, "ranks disagree on the operation; the world is aborted")                   \
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

/* fsdp_dtype_size - bytes of one element, 0 for a value that is no dtype
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API size_t fsdp_dtype_size(fsdp_dtype dtype);

/* fsdp_dtype_name - "f32", "bf16", ...; "?" for a value that is no dtype
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_dtype_name(fsdp_dtype dtype);

/* fsdp_dtype_is_float - 1 for f64, f32, f16 and bf16, else 0
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API int fsdp_dtype_is_float(fsdp_dtype dtype);

/* fsdp_convert - convert `count` elements between two floating dtypes, or copy equal dtypes
   dst, src    may be the same address only when the dtypes are equal; any alignment of their dtype
   Result      FSDP_OK; FSDP_ERR_INVALID_ARG (NULL with count > 0, count < 0, or integers of
               different types)
   Rounding    to nearest, ties to even; overflow gives infinity; infinity, NaN (quiet, payload cut)
               and the sign of zero are kept; subnormals are exact
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API fsdp_status fsdp_convert(void *dst, fsdp_dtype dst_dtype, const void *src,
                                  fsdp_dtype src_dtype, int64_t count);

/* fsdp_cast_if_needed - `src` itself when dtype is KEEP or equal, else `dst` filled with the cast
   dst         room for count elements of dtype, owned by the caller; untouched when not needed
   Result      the pointer to use, NULL when the cast is impossible (see fsdp_convert)
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: _to_dtype_if_needed */
FSDP_API const void *fsdp_cast_if_needed(void *dst, fsdp_dtype dtype, const void *src,
                                         fsdp_dtype src_dtype, int64_t count);

/* fsdp_cast_floating - as fsdp_cast_if_needed, but data that are not floating pass through as src
   Result      the pointer to use
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: _cast_fp_tensor */
FSDP_API const void *fsdp_cast_floating(void *dst, fsdp_dtype dtype, const void *src,
                                        fsdp_dtype src_dtype, int64_t count);

/* fsdp_status_name - "FSDP_ERR_TIMEOUT" and so on; "FSDP_?" for a value that is no status
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_status_name(fsdp_status status);

/* fsdp_status_text - one sentence for people, from FSDP_STATUS_LIST
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_status_text(fsdp_status status);

/* -------------------------------------------------------------------------------------------- */
/* Shard math: pure functions, usable alone (FSDP_MATH_ONLY compiles nothing but these and the
   dtypes). A dim of D rows over W ranks is cut into chunks of c = ceil(D/W) rows; the last chunks
   are short or empty; every shard is stored padded to c rows. Not the balanced split.            */

typedef struct fsdp_range {
    int64_t start;  // first row, D for an empty range
    int64_t count;  // rows
    int64_t padded; // rows of the stored shard, equal on all ranks
} fsdp_range;

/* fsdp_shard_range - rows of a sharded dimension owned by one rank
   dim_size    rows of the full tensor along the sharded dim, >= 0
   world, rank shard group size >= 1, 0 <= rank < world
   Result      FSDP_OK; FSDP_ERR_INVALID_ARG (dim_size < 0, rank out of range, out NULL)
   Layout      10 rows, world 4: (0,3) (3,3) (6,3) (9,1); 2 rows, world 4: (0,1) (1,1) (2,0) (2,0)
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: torch.chunk semantics, FSDPParam._init_sharded_param */
FSDP_API fsdp_status fsdp_shard_range(int64_t dim_size, int world, int rank, fsdp_range *out);

/* fsdp_chunk_with_empty - rows and starts of all chunks
   rows, starts  int64_t[num_chunks] each, owned by the caller; starts may be NULL
   Result      FSDP_OK; FSDP_ERR_INVALID_ARG (dim_size < 0, num_chunks < 1, rows NULL)
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: _chunk_with_empty */
FSDP_API fsdp_status fsdp_chunk_with_empty(int64_t dim_size, int num_chunks, int64_t *rows,
                                           int64_t *starts);

/* fsdp_dim0_padded_size - shape with dim 0 rounded up to a multiple of world
   shape, out  int64_t[ndim]; may be the same array
   Result      FSDP_OK; FSDP_ERR_INVALID_ARG (ndim < 1 or > FSDP_MAX_DIMS, a negative size, NULL)
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: _get_dim0_padded_size */
FSDP_API fsdp_status fsdp_dim0_padded_size(const int64_t *shape, int ndim, int world, int64_t *out);

/* fsdp_dim_chunked_size - shape of one rank's chunk along `dim`; 0 there when it has no elements
   shape, out  int64_t[ndim]; may be the same array
   dim         -ndim <= dim < ndim
   Result      FSDP_OK; FSDP_ERR_INVALID_ARG
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: _get_dim_chunked_size of the rank's _chunk_with_empty */
FSDP_API fsdp_status fsdp_dim_chunked_size(const int64_t *shape, int ndim, int dim, int world,
                                           int rank, int64_t *out);

// `count` elements at `shard` of a flat block, world*count elements at `full` of a slot.
// all_gather reads a list of these from left to right, reduce_scatter from right to left.
typedef struct fsdp_seg {
    int64_t shard, full, count; // elements
} fsdp_seg;

// height rows of width elements; offsets and pitches in elements. Read in either direction.
typedef struct fsdp_block {
    int64_t src, dst, width, height, src_pitch, dst_pitch;
} fsdp_block;

// One parameter as the layout sees it.
typedef struct fsdp_layout_param {
    int32_t ndim, shard_dim;      // in: 1 <= ndim; 0 <= shard_dim < ndim
    int64_t shape[FSDP_MAX_DIMS]; // in: full shape
    int64_t chunk;                // out: rows of every stored shard along shard_dim
    int64_t start, rows;          // out: my rows along shard_dim
    int64_t numel;                // out: elements of the full tensor
    int64_t local_numel;          // out: my elements, without padding
    int64_t shard_numel;          // out: elements of the stored shard, equal on all ranks
    int64_t shard_offset;         // out: of my shard, in the flat block
    int64_t full_offset;          // out: of the contiguous full tensor, in the slot
    int32_t direct;               // out: 1: gathered straight to its place
} fsdp_layout_param;

// A list of parameters laid out together: the direct ones first, then the packed ones, tight.
typedef struct fsdp_layout {
    int32_t world, rank;     // in
    int64_t direct_numel;    // in: a dim-0 parameter of at least so many elements is direct
    int64_t shard_base;      // in: where the list begins in the flat block
    int64_t full_base;       // in: where it begins in the slot
    int64_t final_base;      // in: where the copied-out packed tensors begin; 0: after the gathered
    int64_t shard_numel;     // out: S, elements of one rank's padded shards
    int64_t packed_numel;    // out: K, the packed part of S
    int64_t final_numel;     // out: elements of the copied-out tensors, with alignment
    int64_t slot_end;        // out: end of everything in the slot
    int32_t num_segs;        // out
    int32_t num_blocks;      // out: packed staging -> contiguous tensors
} fsdp_layout;

#define FSDP_ALIGN_NUMEL 16 // direct shards and copied-out tensors start at multiples of this

/* fsdp_layout_params - lay out a list of parameters: offsets, segments and copy blocks
   layout      in/out, see above
   params      fsdp_layout_param[count], in/out
   segs        room for count entries, or NULL to ask for num_segs only
   blocks      room for count*world entries, or NULL to ask for num_blocks only
   Layout      flat block: direct shards, then packed shards, tight. Slot: W*S gathered elements
               (rank-major inside each segment), then the packed tensors copied out one by one.
               A block list from left to right is copy-out, from right to left chunk_cat
   Result      FSDP_OK; FSDP_ERR_INVALID_ARG (bad rank, shape or dim; a product above 2^62)
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: foreach_all_gather, foreach_all_gather_copy_out, foreach_reduce (chunk_cat) */
FSDP_API fsdp_status fsdp_layout_params(fsdp_layout *layout, fsdp_layout_param *params, int count,
                                        fsdp_seg *segs, fsdp_block *blocks);

#ifdef __cplusplus
}
#endif
// clang-format on
#endif // FSDP_MATH_H

/* ============================================================================================ */
/* Implementation. Outside the guard, as in fsdp.h. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_MATH_IMPLEMENTED)
#define FSDP_MATH_IMPLEMENTED

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
// >>status
// Owns: names and texts of status codes. Source: FSDP_STATUS_LIST.

FSDP_API const char *fsdp_status_name(fsdp_status status) {
    switch (status) {
#define FSDP_X(name, value, text)                                                                  \
    case FSDP_##name: return "FSDP_" #name;
        FSDP_STATUS_LIST(FSDP_X)
#undef FSDP_X
    }
    return "FSDP_?";
}

FSDP_API const char *fsdp_status_text(fsdp_status status) {
    switch (status) {
#define FSDP_X(name, value, text)                                                                  \
    case FSDP_##name: return text;
        FSDP_STATUS_LIST(FSDP_X)
#undef FSDP_X
    }
    return "no such status";
}

/* -------------------------------------------------------------------------------------------- */
// >>dtype
// Owns: element types, their conversions, and every loop over elements: cast, sum, norm.
// Invariants: the same inputs give the same bits with any compiler flags. Sums run in rank order;
// no expression both multiplies and adds, since a compiler may contract that to one rounding. Loops
// work on blocks that stay in the first-level cache.

#define FSDPI_BLOCK 512 // elements: whole pages of page-aligned sources would alias

FSDP_API size_t fsdp_dtype_size(fsdp_dtype dtype) {
    static const uint8_t bytes[FSDP_DTYPE_COUNT] = {0,
#define FSDP_X(name, value, bytes, is_float) bytes,
                                                    FSDP_DTYPE_LIST(FSDP_X)
#undef FSDP_X
    };
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
    return fsdpi_f32_of(sign | (em < 0x0400u ? tiny : u));
}

static FSDPI_HD inline uint16_t fsdpi_f32_to_f16(float x) {
    uint32_t u = fsdpi_f32_bits(x), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
    uint32_t rebased = a - (112u << 23);
    uint32_t normal = (rebased + 0xFFFu + ((rebased >> 13) & 1u)) >> 13;
    // Below 2^-14 the result's unit is 2^-24, which is also the unit of floats in [0.5, 1).
    uint32_t tiny = fsdpi_f32_bits(fsdpi_f32_of(a < 0x38800000u ? a : 0u) + 0.5f) - 0x3F000000u;
    uint32_t nan = 0x7E00u | ((a >> 13) & 0x3FFu);
    uint32_t big = a > 0x7F800000u ? nan : 0x7C00u;
    uint32_t h = a < 0x38800000u ? tiny : normal;
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

// count <= FSDPI_BLOCK elements of any floating dtype to and from one arithmetic type. `src` may be
// returned as it is, so that nothing is copied where nothing is converted.
static const float *fsdpi_load_f32(float *tmp, const void *src, fsdp_dtype dtype, size_t count) {
    if (dtype == FSDP_F32) return (const float *)src;
    if (dtype == FSDP_BF16) {
        const uint16_t *s = (const uint16_t *)src;
        for (size_t i = 0; i < count; i++) tmp[i] = fsdpi_bf16_to_f32(s[i]);
    } else {
        const uint16_t *s = (const uint16_t *)src;
        for (size_t i = 0; i < count; i++) tmp[i] = fsdpi_f16_to_f32(s[i]);
    }
    return tmp;
}

static void fsdpi_store_f32(void *dst, fsdp_dtype dtype, const float *src, size_t count) {
    if (dtype == FSDP_F32) {
        if (dst != (const void *)src) memcpy(dst, src, count * sizeof *src);
    } else if (dtype == FSDP_BF16) {
        uint16_t *d = (uint16_t *)dst;
        for (size_t i = 0; i < count; i++) d[i] = fsdpi_f32_to_bf16(src[i]);
    } else {
        uint16_t *d = (uint16_t *)dst;
        for (size_t i = 0; i < count; i++) d[i] = fsdpi_f32_to_f16(src[i]);
    }
}

static const double *fsdpi_load_f64(double *tmp, const void *src, fsdp_dtype dtype, size_t count) {
    if (dtype == FSDP_F64) return (const double *)src;
    float block[FSDPI_BLOCK];
    const float *s = fsdpi_load_f32(block, src, dtype, count);
    for (size_t i = 0; i < count; i++) tmp[i] = (double)s[i];
    return tmp;
}

static void fsdpi_store_f64(void *dst, fsdp_dtype dtype, const double *src, size_t count) {
    if (dtype == FSDP_F64) {
        if (dst != (const void *)src) memcpy(dst, src, count * sizeof *src);
        return;
    }
    float block[FSDPI_BLOCK];
    if (dtype == FSDP_F32) {
        for (size_t i = 0; i < count; i++) block[i] = (float)src[i];
    } else {
        for (size_t i = 0; i < count; i++) block[i] = fsdpi_f64_to_f32_odd(src[i]);
    }
    fsdpi_store_f32(dst, dtype, block, count);
}

// acc (op)= x, element by element.
#define FSDPI_COMBINE(type, acc, x, count, redop)                                                  \
    do {                                                                                           \
        if ((redop) == FSDP_SUM)                                                                   \
            for (size_t i_ = 0; i_ < (count); i_++) (acc)[i_] = (type)((acc)[i_] + (x)[i_]);       \
        else if ((redop) == FSDP_MAX)                                                              \
            for (size_t i_ = 0; i_ < (count); i_++)                                                \
                (acc)[i_] = (x)[i_] > (acc)[i_] ? (x)[i_] : (acc)[i_];                             \
        else                                                                                       \
            for (size_t i_ = 0; i_ < (count); i_++)                                                \
                (acc)[i_] = (x)[i_] < (acc)[i_] ? (x)[i_] : (acc)[i_];                             \
    } while (0)

// One block of dst (+)= scale * (src_0 op src_1 op ...), in f32. The scale is applied to the whole
// block before anything is added, in loops of their own: see the invariants above.
static FSDPI_NOINLINE void fsdpi_reduce_block_f32(void *dst, fsdp_dtype dst_dtype,
                                                  const char *const *srcs, int num_srcs,
                                                  fsdp_dtype dtype, size_t count, float scale,
                                                  int accumulate, fsdp_redop redop) {
    float acc[FSDPI_BLOCK], tmp[FSDPI_BLOCK];
    const float *x = fsdpi_load_f32(acc, srcs[0], dtype, count);
    if (num_srcs == 1 && scale == 1.0f && !accumulate) {
        fsdpi_store_f32(dst, dst_dtype, x, count); // a plain cast
        return;
    }
    int next = 1;
    if (dtype == FSDP_F32 && num_srcs > 1 && redop == FSDP_SUM) { // the usual case: fewer passes
        const float *y = (const float *)(const void *)srcs[next++], *z;
        for (size_t i = 0; i < count; i++) acc[i] = x[i] + y[i];
        for (; next + 1 < num_srcs; next += 2) {
            y = (const float *)(const void *)srcs[next];
            z = (const float *)(const void *)srcs[next + 1];
            for (size_t i = 0; i < count; i++) acc[i] = (acc[i] + y[i]) + z[i];
        }
    } else if (x != acc) {
        memcpy(acc, x, count * sizeof *acc);
    }
    for (int k = next; k < num_srcs; k++) {
        x = fsdpi_load_f32(tmp, srcs[k], dtype, count);
        FSDPI_COMBINE(float, acc, x, count, redop);
    }
    if (scale != 1.0f)
        for (size_t i = 0; i < count; i++) acc[i] *= scale;
    if (accumulate) {
        x = fsdpi_load_f32(tmp, dst, dst_dtype, count);
        for (size_t i = 0; i < count; i++) acc[i] = x[i] + acc[i];
    }
    fsdpi_store_f32(dst, dst_dtype, acc, count);
}

static FSDPI_NOINLINE void fsdpi_reduce_block_f64(void *dst, fsdp_dtype dst_dtype,
                                                  const char *const *srcs, int num_srcs,
                                                  fsdp_dtype dtype, size_t count, double scale,
                                                  int accumulate, fsdp_redop redop) {
    double acc[FSDPI_BLOCK], tmp[FSDPI_BLOCK];
    const double *x = fsdpi_load_f64(acc, srcs[0], dtype, count);
    if (x != acc) memcpy(acc, x, count * sizeof *acc);
    for (int k = 1; k < num_srcs; k++) {
        x = fsdpi_load_f64(tmp, srcs[k], dtype, count);
        FSDPI_COMBINE(double, acc, x, count, redop);
    }
    if (scale != 1.0)
        for (size_t i = 0; i < count; i++) acc[i] *= scale;
    if (accumulate) {
        x = fsdpi_load_f64(tmp, dst, dst_dtype, count);
        for (size_t i = 0; i < count; i++) acc[i] = x[i] + acc[i];
    }
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

#define FSDPI_MAX_SRCS 256 // ranks of one host that a CPU backend reduces over

/* dst[0..count) (+)= scale * (src_0 op src_1 op ...), sources in order. The one reduction of the
   library: casts, scaled copies, fused reduce-scatter and all-reduce of the CPU backends.
   dst may be one of the sources. Sums in f64 when a dtype is f64, else in f32.                   */
static FSDPI_UNUSED void fsdpi_reduce(void *dst, fsdp_dtype dst_dtype, const char *const *srcs,
                                      int num_srcs, fsdp_dtype dtype, size_t count, double scale,
                                      int accumulate, fsdp_redop redop) {
    size_t in = fsdp_dtype_size(dtype), out = fsdp_dtype_size(dst_dtype);
    if (num_srcs == 1 && dtype == dst_dtype && scale == 1.0 && !accumulate) {
        if (dst != (const void *)srcs[0]) memmove(dst, srcs[0], count * in);
        return;
    }
    if (!fsdp_dtype_is_float(dtype)) {
        fsdpi_reduce_ints(dst, srcs, num_srcs, dtype, count, redop);
        return;
    }
    int wide = dtype == FSDP_F64 || dst_dtype == FSDP_F64;
    for (size_t at = 0; at < count; at += FSDPI_BLOCK) {
        size_t n = count - at < FSDPI_BLOCK ? count - at : FSDPI_BLOCK;
        const char *block[FSDPI_MAX_SRCS];
        for (int k = 0; k < num_srcs; k++) block[k] = srcs[k] + at * in;
        char *d = (char *)dst + at * out;
        if (wide)
            fsdpi_reduce_block_f64(d, dst_dtype, block, num_srcs, dtype, n, scale, accumulate,
                                   redop);
        else
            fsdpi_reduce_block_f32(d, dst_dtype, block, num_srcs, dtype, n, (float)scale,
                                   accumulate, redop);
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

/* -------------------------------------------------------------------------------------------- */
// >>layout
// Owns: shard math. Pure functions of sizes. Invariants: every stored shard of a parameter has the
// same size on all ranks; chunk k starts at row k*c of the padded tensor, so the W shards one after
// another are the padded tensor, all padding at its end.
// Source: torch.chunk; _fsdp_common.py; _fsdp_collectives.py (all_gather copy-out, chunk_cat).

#define FSDPI_NUMEL_MAX ((int64_t)1 << 62)

static int64_t fsdpi_ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static int64_t fsdpi_align_up(int64_t a, int64_t to) { return fsdpi_ceil_div(a, to) * to; }
static int64_t fsdpi_min(int64_t a, int64_t b) { return a < b ? a : b; }

// a * b for a, b >= 0, or -1 when it exceeds FSDPI_NUMEL_MAX (or a is -1 already).
static int64_t fsdpi_mul(int64_t a, int64_t b) {
    if (a < 0 || (b > 0 && a > FSDPI_NUMEL_MAX / b)) return -1;
    return a * b;
}

// Elements of dims [from, to), or -1.
static int64_t fsdpi_numel(const int64_t *shape, int from, int to) {
    int64_t numel = 1;
    for (int d = from; d < to; d++) {
        if (shape[d] < 0) return -1;
        numel = fsdpi_mul(numel, shape[d]);
    }
    return numel;
}

static fsdp_range fsdpi_range(int64_t dim_size, int world, int rank) {
    fsdp_range range;
    range.padded = fsdpi_ceil_div(dim_size, world);
    // rank * padded may exceed what fits; a rank whose chunk would begin behind the end is empty.
    int past = range.padded > 0 && rank > dim_size / range.padded;
    range.start = past ? dim_size : fsdpi_min(rank * range.padded, dim_size);
    range.count = fsdpi_min(range.padded, dim_size - range.start);
    return range;
}

FSDP_API fsdp_status fsdp_shard_range(int64_t dim_size, int world, int rank, fsdp_range *out) {
    if (dim_size < 0 || world < 1 || rank < 0 || rank >= world || !out) return FSDP_ERR_INVALID_ARG;
    *out = fsdpi_range(dim_size, world, rank);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_chunk_with_empty(int64_t dim_size, int num_chunks, int64_t *rows,
                                           int64_t *starts) {
    if (!rows) return FSDP_ERR_INVALID_ARG;
    for (int k = 0; k < num_chunks || k == 0; k++) {
        fsdp_range range;
        fsdp_status status = fsdp_shard_range(dim_size, num_chunks, k, &range);
        if (status) return status;
        rows[k] = range.count;
        if (starts) starts[k] = range.start;
    }
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_dim0_padded_size(const int64_t *shape, int ndim, int world,
                                           int64_t *out) {
    if (!shape || !out || ndim < 1 || ndim > FSDP_MAX_DIMS || world < 1)
        return FSDP_ERR_INVALID_ARG;
    for (int d = 0; d < ndim; d++)
        if (shape[d] < 0) return FSDP_ERR_INVALID_ARG;
    int64_t padded = fsdpi_mul(fsdpi_ceil_div(shape[0], world), world);
    if (padded < 0) return FSDP_ERR_INVALID_ARG;
    memmove(out, shape, (size_t)ndim * sizeof *out);
    out[0] = padded;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_dim_chunked_size(const int64_t *shape, int ndim, int dim, int world,
                                           int rank, int64_t *out) {
    if (!shape || !out || ndim < 1 || ndim > FSDP_MAX_DIMS) return FSDP_ERR_INVALID_ARG;
    if (dim < -ndim || dim >= ndim) return FSDP_ERR_INVALID_ARG;
    if (dim < 0) dim += ndim;
    int empty = 0;
    for (int d = 0; d < ndim; d++) {
        if (shape[d] < 0) return FSDP_ERR_INVALID_ARG;
        empty |= shape[d] == 0;
    }
    fsdp_range range;
    fsdp_status status = fsdp_shard_range(shape[dim], world, rank, &range);
    if (status) return status;
    memmove(out, shape, (size_t)ndim * sizeof *out);
    out[dim] = empty ? 0 : range.count;
    return FSDP_OK;
}

// Chunk, sizes and kind of one parameter; its offsets come later.
static fsdp_status fsdpi_layout_param(const fsdp_layout *layout, fsdp_layout_param *p) {
    if (p->ndim < 1 || p->ndim > FSDP_MAX_DIMS || p->shard_dim < 0 || p->shard_dim >= p->ndim)
        return FSDP_ERR_INVALID_ARG;
    for (int d = 0; d < p->ndim; d++)
        if (p->shape[d] < 0) return FSDP_ERR_INVALID_ARG;
    fsdp_range range;
    fsdp_status status = fsdp_shard_range(p->shape[p->shard_dim], layout->world, layout->rank,
                                          &range);
    if (status) return status;
    int64_t outer = fsdpi_numel(p->shape, 0, p->shard_dim);
    int64_t inner = fsdpi_numel(p->shape, p->shard_dim + 1, p->ndim);
    int64_t around = outer < 0 || inner < 0 ? -1 : fsdpi_mul(outer, inner);
    p->numel = fsdpi_numel(p->shape, 0, p->ndim);
    p->shard_numel = fsdpi_mul(around, range.padded);
    if (p->numel < 0 || p->shard_numel < 0 || fsdpi_mul(p->shard_numel, layout->world) < 0)
        return FSDP_ERR_INVALID_ARG;
    p->chunk = range.padded;
    p->start = range.start;
    p->rows = range.count;
    p->local_numel = around * range.count;
    // One rank's shard is the tensor itself. Elsewhere a direct shard keeps its successors aligned.
    p->direct = layout->world == 1 ||
                (p->shard_dim == 0 && p->numel >= layout->direct_numel && p->shard_numel > 0 &&
                 p->shard_numel % FSDP_ALIGN_NUMEL == 0);
    return FSDP_OK;
}

// The only packed parameter, if there is just one and it is sharded by rows: its staging is the
// tensor already. It stays behind the direct ones, which need aligned successors.
static fsdp_layout_param *fsdpi_layout_pack_of_one(fsdp_layout_param *params, int count) {
    fsdp_layout_param *only = NULL;
    for (int i = 0; i < count; i++) {
        if (params[i].direct || params[i].shard_numel == 0) continue;
        if (only) return NULL;
        only = &params[i];
    }
    return only && only->shard_dim == 0 ? only : NULL;
}

// Blocks between one packed parameter's staging rows (row k at stage + k*pitch) and its full
// tensor.
static int fsdpi_layout_blocks(const fsdp_layout *layout, const fsdp_layout_param *p, int64_t stage,
                               int64_t pitch, fsdp_block *out) {
    if (p->shard_numel == 0) return 0;
    if (p->shard_dim == 0) { // the shards one after another are the tensor
        fsdp_block b = {stage,         p->full_offset, p->shard_numel,
                        layout->world, pitch,          p->shard_numel};
        if (out) out[0] = b;
        return 1;
    }
    int64_t outer = fsdpi_numel(p->shape, 0, p->shard_dim);
    int64_t inner = fsdpi_numel(p->shape, p->shard_dim + 1, p->ndim);
    int num = 0;
    for (int k = 0; k < layout->world; k++) {
        fsdp_range range = fsdpi_range(p->shape[p->shard_dim], layout->world, k);
        int64_t width = range.count * inner;
        if (width == 0) continue;
        fsdp_block b = {stage + k * pitch,
                        p->full_offset + range.start * inner,
                        width,
                        outer,
                        width,
                        p->shape[p->shard_dim] * inner};
        if (out) out[num] = b;
        num++;
    }
    return num;
}

FSDP_API fsdp_status fsdp_layout_params(fsdp_layout *layout, fsdp_layout_param *params, int count,
                                        fsdp_seg *segs, fsdp_block *blocks) {
    if (!layout || count < 0 || (count > 0 && !params)) return FSDP_ERR_INVALID_ARG;
    if (layout->world < 1 || layout->rank < 0 || layout->rank >= layout->world)
        return FSDP_ERR_INVALID_ARG;
    int64_t direct = 0, packed = 0; // elements of one rank's shards so far
    int num_segs = 0, num_blocks = 0;
    for (int i = 0; i < count; i++) {
        fsdp_status status = fsdpi_layout_param(layout, &params[i]);
        if (status) return status;
    }
    fsdp_layout_param *only = fsdpi_layout_pack_of_one(params, count);
    for (int i = 0; i < count; i++) {
        int64_t *sum = params[i].direct ? &direct : &packed;
        params[i].shard_offset = *sum;
        *sum += params[i].shard_numel;
        if (*sum > FSDPI_NUMEL_MAX / 4 / layout->world) return FSDP_ERR_INVALID_ARG;
    }
    layout->shard_numel = direct + packed;
    layout->packed_numel = only ? 0 : packed;
    int64_t gathered = layout->full_base + layout->world * layout->shard_numel;
    int64_t stage = layout->full_base + layout->world * direct;
    int64_t final_base = layout->final_base ? layout->final_base
                                            : fsdpi_align_up(gathered, FSDP_ALIGN_NUMEL);
    int64_t final = final_base;
    for (int i = 0; i < count; i++) {
        fsdp_layout_param *p = &params[i];
        if (p->direct) {
            fsdp_seg seg = {layout->shard_base + p->shard_offset,
                            layout->full_base + layout->world * p->shard_offset, p->shard_numel};
            p->full_offset = seg.full;
            if (segs) segs[num_segs] = seg;
            num_segs++;
            p->shard_offset = seg.shard;
            continue;
        }
        int64_t in_pack = p->shard_offset;
        p->shard_offset += layout->shard_base + direct;
        if (p == only) {
            p->full_offset = stage;
            p->direct = 1;
            continue;
        }
        p->full_offset = p->shard_numel > 0 ? final : layout->full_base; // inside the slot
        final = fsdpi_align_up(final + layout->world * p->shard_numel, FSDP_ALIGN_NUMEL);
        num_blocks += fsdpi_layout_blocks(layout, p, stage + in_pack, packed,
                                          blocks ? blocks + num_blocks : NULL);
    }
    if (packed > 0) {
        fsdp_seg seg = {layout->shard_base + direct, stage, packed};
        if (segs) segs[num_segs] = seg;
        num_segs++;
    }
    layout->final_numel = final - final_base;
    layout->slot_end = final > final_base ? final : gathered;
    layout->num_segs = num_segs;
    layout->num_blocks = num_blocks;
    return FSDP_OK;
}

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION
