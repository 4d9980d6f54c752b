// Written by tools/amalgamate.py from fsdp.h, core/, backends/: change those files.
/* fsdp.h - FSDP2 (ZeRO-3, per-parameter sharding) for C, C++ and CUDA trainers            v0.1.0

   Each rank keeps 1/W of every parameter, of its gradient and of the optimizer's state; a layer is
   gathered just before it is used and freed right after; gradients are averaged while they are
   scattered back to their owners. The behaviour is that of PyTorch's fully_shard.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp.h"
       cc -O2 trainer.c -pthread -lm && tools/fsdprun -n 4 ./a.out     // make tools/fsdprun

   SPDX-License-Identifier: MIT (full text at the end of this file)

CONTENTS
    This file is the manual, the declarations and the implementation, in parts of one subject each.
    A part begins with a line of signs around its name: search for "== core/dtype.h ==". All that a
    program calls is declared in the first part "fsdp.h, continued", behind core/shard_math.h.
    core/dtype.h           status codes, element types, conversions, the one reduction loop
    core/shard_math.h      who owns which rows; where everything lies in a slot
    core/backend.h         what a backend and a device are: two tables of functions
    core/sys.h             the operating system's calls, a lock, a hash, a text
    core/objects.h         what a world, a mesh, a model and a unit are made of
    core/error.h           error texts, and the way out for every message
    core/alloc.h           host memory
    core/launch.h          rank, size and job from a launcher's environment
    backends/fsdp_shm.h    the default backend of fsdp.h
    backends/fsdp_record.h what backends share
    core/spawn.h           ranks that a program starts itself
    core/comm.h            an op record becomes a collective
    core/host.h            the host as a device
    core/lanes.h           how records run: at once, in worker threads, on a device's streams
    core/mesh.h            ranks arranged in N dims, and their groups
    core/world.h           rank, size, environment, opened tables
    core/layout.h          where a unit's parameters and gradients lie in its slots
    core/pool.h            buffers and slots
    core/unit.h            what fully_shard makes of a desc
    core/ops.h             op records; fsdpi_emit, the only door to the tables
    core/gather.h          parameters: gathered, waited for, freed, prefetched
    core/grads.h           gradients: written, collected, reduced
    core/commit.h          the flat blocks of a model, and the lists of its units
    core/schedule.h        the transition table, and the calls that look it up
    core/step.h            the end of a step
    core/norm.h            the norm of all gradients, and clipping
    core/params.h          parameters as the caller sees them
    core/predict.h         memory: what is allocated, what will be
    core/options.h         setters
    core/model.h           a model begins and ends
    core/init.h            a world begins and ends; collectives on host data
    Further backends are in the folder backends/ of the same version, to be put beside this file.
    Extensions (fsdp_optim.h) are one file each, beside this file, too.

A PROGRAM

    #define FSDP_IMPLEMENTATION
    #include "fsdp.h"
    #include <math.h>
    #include <stdio.h>

    enum { N = 64, STEPS = 20 };

    static void start(void *user, const fsdp_param_view *block) { // only my own rows
        (void)user;
        for (int64_t k = 0; k < block->numel; k++)
            ((float *)block->data)[k] = 0.01f * (float)(fsdp_view_index(block, k) % 7 - 3);
    }

    int main(void) {
        fsdp_world *world; // rank and size from the launcher's environment, or a world of one
        if (fsdp_init(NULL, &world)) return 1;
        fsdp_model *model;
        fsdp_unit *unit;
        fsdp_param_desc params[2] = {fsdp_mat("w", N, N), fsdp_vec("b", N)};
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.name = "linear";
        ud.params = params;
        ud.num_params = 2;
        if (fsdp_model_create(world, NULL, &model) || fsdp_fully_shard(model, &ud, &unit)) return 1;
        if (fsdp_init_params(model, start, NULL)) return 1;
        for (int step = 0; step < STEPS; step++) {
            float x[N], dy[N], loss = 0;
            for (int i = 0; i < N; i++) x[i] = (float)((i + fsdp_rank(world)) % 5) / 5;
            fsdp_pre_forward(unit);
            const float *w = (const float *)fsdp_data(unit, 0);
            const float *b = (const float *)fsdp_data(unit, 1);
            for (int o = 0; o < N; o++) { // y = w x + b shall become x
                float y = b[o];
                for (int i = 0; i < N; i++) y += w[o * N + i] * x[i];
                dy[o] = y - x[o];
                loss += dy[o] * dy[o] / 2;
            }
            fsdp_post_forward(unit);
            fsdp_pre_backward(unit);
            float *dw = (float *)fsdp_grad(unit, 0), *db = (float *)fsdp_grad(unit, 1);
            for (int o = 0; o < N; o++) {
                db[o] += dy[o];
                for (int i = 0; i < N; i++) dw[o * N + i] += dy[o] * x[i];
            }
            fsdp_post_backward(unit);
            if (fsdp_finalize_backward(model)) break; // the failure of any hook shows here
            fsdp_param_view v = FSDP_ZERO;
            while (fsdp_next_param(model, &v))
                for (int64_t k = 0; k < v.numel; k++)
                    ((float *)v.shard)[k] -= 0.03f * ((const float *)v.shard_grad)[k];
            fsdp_params_changed(model);
            fsdp_zero_grad(model);
            fsdp_all_reduce(world, NULL, &loss, 1, FSDP_F32, FSDP_SUM);
            if (fsdp_rank(world) == 0) printf("step %d loss %g\n", step, (double)loss);
        }
        return fsdp_shutdown(world);
    }

WORDS
    world      all ranks of the job         mesh     an N-d arrangement of ranks
    unit       what one fully_shard call makes: its parameters are gathered and reduced together
    shard      my part of a parameter       comm     one process group of a backend
    unsharded  the whole of a parameter     op       one thing done, as a record
    slot       a pooled buffer that a unit holds while it is gathered or in backward
    part       the parameters of a unit that are stored in one dtype and gathered in one dtype
    stream     an order in which ops run; on the CPU at once, or by a lane, which is a worker thread

STEP BY STEP
    1  fsdp_init; fsdp_model_create; one fsdp_fully_shard per layer; fsdp_init_params or _load.
    2  Forward of a layer: pre_forward, read fsdp_data, post_forward. A unit that stays open around
       others (embeddings, final norm, tied head) sets reshard_after_forward = FSDP_RESHARD_NEVER.
       Open units form a set, not a stack; a unit may be opened several times in one forward.
    3  Backward: pre_backward, read fsdp_data, add to fsdp_grad, post_backward, units in any order;
       then fsdp_finalize_backward.
    4  fsdp_clip_grad_norm; the optimizer (fsdp_optim.h, or a loop over fsdp_model_flat or
       fsdp_next_param that ends with fsdp_params_changed); fsdp_zero_grad.
    Microbatches: fsdp_set_requires_gradient_sync(model, NULL, 0) for all but the last one.
    Evaluation: fsdp_set_grad_enabled(model, 0), forwards, fsdp_set_grad_enabled(model, 1).
    Recompute: pre_forward and post_forward between a unit's pre_backward and post_backward.
    HSDP: a 2-D mesh whose dims are named; dim 0 replicates, dim 1 shards. Other dims: mesh_info.
    Freeze and thaw: fsdp_set_requires_grad. Gradients in f16: fsdp_grad_scaler of fsdp_optim.h.

IT DOES NOT
    differentiate, run kernels, own your activations, or find the root: the model is the root.

ENVIRONMENT
    RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT  set by tools/fsdprun and torchrun; without
                      them those of mpirun (OMPI_*, PMI_*, MV2_*), srun (SLURM_*), flux (FLUX_*)
    FSDP_JOB_ID       name of the job, unique on the host (else from what the launcher sets)
    FSDP_STORE FSDP_TOKEN FSDP_SOCKET_IFNAME   several hosts: docs/cluster.md
    FSDP_TIMEOUT_MS   deadline of every wait, default 60000
    FSDP_LANES        0 inline (default), 1 or 2 worker threads for collectives
    FSDP_BACKEND      which compiled-in backend        FSDP_LOG_LEVEL  error warn info none
    FSDP_NCCL_* FSDP_CUDA_MANAGED FSDP_FLIGHT_RECORD   GPUs: docs/gpu.md

ERRORS
    Functions return fsdp_status. The text names rank, unit, operation, expected and got, is logged
    once and kept for fsdp_last_error. Wrong arguments and wrong order change nothing. A failed
    collective aborts the world on all ranks; from then on every call returns that status at once,
    and only fsdp_shutdown and fsdp_last_error are of use. The library never exits or aborts.
    No call waits longer than the deadline (on devices with streams: and 3 seconds).

MEMORY
    Shards, their gradients, and slots whose number follows from a rule and not from timing, so that
    memory is the same on every rank and in every run: fsdp_model_predict tells it to the byte
    before anything is allocated. From the third step on a step allocates nothing.
    Slots: one per size of unit when inline, two with lanes or streams, more where units stay open.

THREADS AND ORDER
    A world, with all that is made from it, is used by one thread at a time; worlds are independent.
    Collective functions are called by all ranks of the mesh in the same order; a disagreement is
    FSDP_ERR_MISMATCH on all of them, with both sides in the text (with two lanes it may be
    FSDP_ERR_TIMEOUT). The logger may be called from worker threads.

DETERMINISM
    CPU backends sum in rank order, in f32 (f64 for f64), then scale, then add to what is there: the
    bits do not depend on the run, on lanes, on the layout, on threads or processes, or on the flags
    that this header is compiled with (-Ofast included). NCCL sums in an order of its own.

STREAMS AND GPUS
    -DFSDP_BACKEND_NCCL: the same program on GPUs, see docs/gpu.md. Calls return when their work is
    enqueued; data is ready in the order of the caller's stream (fsdp_set_stream). fsdp_data,
    fsdp_grad, views and fsdp_model_flat give device memory; fsdp_init_params, fsdp_param_load and
    fsdp_param_full take and give host memory, on every device.

LIMITS OF THIS VERSION
    Linux; gcc or clang. Backend shm serves one host. NCCL and CUDA have not run on a GPU yet: they
    are tested on stand-ins for both libraries (docs/gpu.md).
*/
// The columns of the declarations are set by hand.
// clang-format off
#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 1
#define FSDP_VERSION_PATCH 0

#include <stddef.h> // size_t, NULL
#include <stdint.h> // int64_t, uint64_t

/* ==== core/dtype.h ==========================================================================
   build macros, status codes, element types, the one loop that reduces

   Pure functions of numbers: no threads, no system calls. CUDA kernels use it as well. */

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

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION

/* ==== core/shard_math.h =====================================================================
   shard math: who owns which rows, and where everything lies in a slot

   Pure functions of sizes: no threads, no system calls. */

#ifndef FSDP_SHARD_MATH_H
#define FSDP_SHARD_MATH_H
// The columns of the declarations are set by hand.
// clang-format off

#ifdef __cplusplus
extern "C" {
#endif

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
#endif // FSDP_SHARD_MATH_H

/* ============================================================================================ */
/* Implementation. Outside the guard, as in fsdp.h. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_SHARD_MATH_IMPLEMENTED)
#define FSDP_SHARD_MATH_IMPLEMENTED

#include <string.h> // memmove

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------- */
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

// Each parameter by itself, and its place among the direct or the packed ones.
static fsdp_status fsdpi_layout_shards(const fsdp_layout *layout, fsdp_layout_param *params,
                                       int count, int64_t *direct, int64_t *packed) {
    if (layout->world < 1 || layout->rank < 0 || layout->rank >= layout->world)
        return FSDP_ERR_INVALID_ARG;
    *direct = *packed = 0;
    for (int i = 0; i < count; i++) {
        fsdp_status status = fsdpi_layout_param(layout, &params[i]);
        if (status) return status;
        int64_t *sum = params[i].direct ? direct : packed;
        params[i].shard_offset = *sum;
        *sum += params[i].shard_numel;
        if (*sum > FSDPI_NUMEL_MAX / 4 / layout->world) return FSDP_ERR_INVALID_ARG;
    }
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_layout_params(fsdp_layout *layout, fsdp_layout_param *params, int count,
                                        fsdp_seg *segs, fsdp_block *blocks) {
    if (!layout || count < 0 || (count > 0 && !params)) return FSDP_ERR_INVALID_ARG;
    int64_t direct, packed; // elements of one rank's shards
    int num_segs = 0, num_blocks = 0;
    fsdp_status status = fsdpi_layout_shards(layout, params, count, &direct, &packed);
    if (status) return status;
    fsdp_layout_param *only = fsdpi_layout_pack_of_one(params, count);
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

/* ==== fsdp.h, continued ===================================================================== */

#if !defined(FSDP_H) && !defined(FSDP_MATH_ONLY)
#define FSDP_H
#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------- */
/* World: all ranks of the job, and what they are started with.                                   */

typedef struct fsdp_world fsdp_world;
typedef struct fsdp_mesh fsdp_mesh;
typedef struct fsdp_model fsdp_model;
typedef struct fsdp_unit fsdp_unit;
typedef struct fsdp_buf fsdp_buf;
typedef struct fsdp_comm fsdp_comm;       // one process group of a backend
typedef struct fsdp_device fsdp_device;   // what a device table opened
typedef struct fsdp_threads fsdp_threads; // what ranks that are threads of one process share
typedef struct fsdp_comm_ops fsdp_comm_ops;
typedef struct fsdp_coll fsdp_coll;       // one collective, as data
typedef struct fsdp_device_ops fsdp_device_ops;

// Host memory. Both or neither; align is a power of two; free gets the size that alloc got.
typedef struct fsdp_allocator {
    void *(*alloc)(size_t size, size_t align, void *user);
    void (*free)(void *ptr, size_t size, void *user);
    void *user;
} fsdp_allocator;

enum { FSDP_LOG_DEFAULT = 0, FSDP_LOG_ERROR, FSDP_LOG_WARN, FSDP_LOG_INFO, FSDP_LOG_NONE };

// Called with one line of text without prefix or line break; from worker threads too.
typedef struct fsdp_logger {
    void (*log)(int level, fsdp_status code, int rank, const char *text, void *user);
    void *user;
} fsdp_logger;

// Monotonic nanoseconds: deadlines and timestamps. A test may give virtual time.
typedef struct fsdp_clock {
    int64_t (*now_ns)(void *user);
    void *user;
} fsdp_clock;

// Every desc: all zero is valid; size 0 means sizeof of this header's struct; canaries stay 0.
typedef struct fsdp_world_desc {
    uint32_t size, start_canary;
    int32_t rank, world_size; // world_size 0: from the environment (none set: a world of 1)
    int32_t local_rank;       // rank on this host; ignored when world_size is 0
    int32_t timeout_ms;       // 0: FSDP_TIMEOUT_MS, else 60,000. The deadline of every wait
    int32_t lanes;            // 0: FSDP_LANES, else inline; -1: inline whatever that says;
                              // 1 or 2: worker threads that run collectives beside the caller
    int32_t log_level;        // 0: FSDP_LOG_LEVEL (error warn info none), else FSDP_LOG_WARN
    const char *backend;      // NULL: FSDP_BACKEND, else the first one compiled in
    const char *job;          // NULL: from the environment. Equal on all ranks, unique on the host
    const char *store;        // where ranks of several hosts meet: "tcp://HOST:PORT",
                              // "file:///PATH", "host:" this host. NULL: FSDP_STORE, else what the
                              // launcher set
    fsdp_threads *threads;    // NULL: ranks are processes
    fsdp_allocator allocator; // NULL members: malloc, free
    fsdp_logger logger;       // NULL member: stderr as "[fsdp r3] text"
    fsdp_clock clock;         // NULL member: the monotonic clock
    const fsdp_comm_ops *comm_ops;     // NULL: the backend's
    const fsdp_device_ops *device_ops; // NULL: the host
    void *user;                        // handed to comm_ops->open and device_ops->open
    uint64_t end_canary;
} fsdp_world_desc;

/* fsdp_init - join the job
   desc        NULL or all zero: rank, size and the job's name from the environment of torchrun,
               tools/fsdprun, mpirun or srun; nothing set = 1 rank
   world       owned by the caller, ends with fsdp_shutdown; NULL after a failure
   Result      FSDP_OK; INVALID_ARG (field or variable named in the text), UNSUPPORTED (backend not
               compiled in), OUT_OF_MEMORY, TIMEOUT (a rank never came: named), BACKEND.
               The text is fsdp_last_error(NULL), and has been logged
   Collective  yes: every rank      Blocks until all have come, at most timeout_ms
   Allocates   yes      Thread any; one world is used by one thread at a time */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_init(const fsdp_world_desc *desc, fsdp_world **world);

/* fsdp_shutdown - destroy the world with all meshes, models and optimizers made from it
   world       NULL is allowed
   Result      FSDP_OK, or the failure that aborted the world: fit for main's return value
   Collective  no: peers that still wait for this rank get FSDP_ERR_PEER_LOST
   Blocks      for worker threads that finish their current operation, and for the device, at most
               timeout_ms. If work on the device does not end, its memory is left to the end of the
               process      Allocates no */
FSDP_API fsdp_status fsdp_shutdown(fsdp_world *world);

/* fsdp_set_stream - the stream of the caller's own work, on devices that have streams: data is
   ready in its order, and what it wrote is used behind it
   native      the device's own kind of stream, alive until the world has another one or ends (CUDA:
               a cudaStream_t); NULL: the device's default (CUDA:
               cudaStreamLegacy, so that kernels launched without a stream are in order)
   Result      FSDP_OK; INVALID_ARG, UNSUPPORTED (a device without streams), BACKEND
   Collective  no      Blocks no: the new stream waits for the old one      Allocates no
   Source      torch: torch.cuda.stream, the current stream at each hook */
FSDP_API fsdp_status fsdp_set_stream(fsdp_world *world, void *native);

/* fsdp_abort - fail this world on all ranks: every wait ends with FSDP_ERR_ABORTED and `why`
   Collective  no      Blocks no      Allocates no
   Thread any, also while the world is in use */
FSDP_API void fsdp_abort(fsdp_world *world, const char *why);

typedef int (*fsdp_rank_fn)(fsdp_world *world, void *arg); // its result: 0 is success

typedef struct fsdp_spawn_desc {
    uint32_t size, start_canary;
    int32_t num_ranks;            // >= 1
    int32_t threads;              // 1: ranks are threads of this process; 0: forked processes
    int32_t grace_ms;             // 0: 1000. How long the others may take to end after one failed
    const fsdp_world_desc *world; // NULL: defaults. rank, world_size, job and threads are filled in
    uint64_t end_canary;
} fsdp_spawn_desc;

/* fsdp_spawn - start num_ranks ranks in a program without a launcher and wait for their end
   fn          called once per rank with its world, which fsdp_spawn shuts down afterwards
   Result      FSDP_OK when every rank returned 0; else the status of the first rank that failed:
               its own value if it is a status, PEER_LOST when a signal killed it, INTERNAL for
               another value. fsdp_last_error(NULL) names the rank. The others are ended: worlds
               aborted, processes then terminated, after grace_ms killed
   Collective  no: call it outside any world      Blocks until all ranks have ended
   Allocates   yes      Thread any. Processes are forked: call it before starting threads */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_spawn(const fsdp_spawn_desc *desc, fsdp_rank_fn fn,
                                                void *arg);

/* fsdp_rank, fsdp_world_size, fsdp_local_rank - who am I; -1 for NULL
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API int fsdp_rank(const fsdp_world *world);
FSDP_API int fsdp_world_size(const fsdp_world *world);
FSDP_API int fsdp_local_rank(const fsdp_world *world);

/* fsdp_last_error - text of the last failure of this world; NULL: of this thread's last failure
   without a world (fsdp_init, fsdp_spawn). Never NULL; "" when nothing failed
   Lifetime    until the next failing call on that world; the failure that aborted it stays
   Collective  no      Blocks no      Allocates no */
FSDP_API const char *fsdp_last_error(const fsdp_world *world);

/* fsdp_all_reduce - reduce a small host array over all ranks (loss, counters); the result is the
   same on every rank, summed in rank order: f32 and lower in f32, f64 in f64
   mesh        NULL: the whole world; else a 1-D mesh
   data        host memory, count elements, replaced by the result
   dtype       f32 f64 f16 bf16, i32, i64
   Result      FSDP_OK; INVALID_ARG; TIMEOUT, PEER_LOST, MISMATCH, ABORTED, BACKEND
   Collective  yes: every rank of the mesh, same order      Blocks yes, at most timeout_ms
   Allocates   no */
FSDP_API fsdp_status fsdp_all_reduce(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                     int64_t count, fsdp_dtype dtype, fsdp_redop op);

/* fsdp_broadcast - copy nbytes of host memory from the rank at position root of the mesh to all
   Result, Collective, Blocks, Allocates  as fsdp_all_reduce */
FSDP_API fsdp_status fsdp_broadcast(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                    int64_t nbytes, int root);

/* fsdp_barrier - return when every rank of the world has called it
   Result, Collective, Blocks, Allocates  as fsdp_all_reduce */
FSDP_API fsdp_status fsdp_barrier(fsdp_world *world);

/* -------------------------------------------------------------------------------------------- */
/* Mesh: ranks arranged in N dimensions, one process group per dimension.                         */

typedef struct fsdp_mesh_desc {
    uint32_t size, start_canary;
    int32_t ndim;                     // 1..FSDP_MAX_DIMS
    int32_t shape[FSDP_MAX_DIMS];     // sizes >= 1; their product is at most the world's size
    const char *names[FSDP_MAX_DIMS]; // NULL: unnamed
    const int32_t *ranks;             // NULL: 0, 1, 2, ... row-major; else one rank per place
    uint64_t end_canary;
} fsdp_mesh_desc;

/* fsdp_mesh_create - arrange ranks; creates the process groups of all dims, in order of dim
   mesh        owned by the world; also made on ranks outside it (fsdp_mesh_rank is -1 there)
   Result      FSDP_OK; INVALID_ARG (ndim, shape, a rank twice or out of range), OUT_OF_MEMORY,
               and what a collective may return
   Collective  yes: every rank of the world, same desc, same order      Blocks yes
   Allocates   yes      Source torch: init_device_mesh */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_mesh_create(fsdp_world *world, const fsdp_mesh_desc *desc,
                                                      fsdp_mesh **mesh);

/* fsdp_mesh_1d - all ranks in one dimension; issues no communication
   Result, Allocates  as fsdp_mesh_create      Collective no      Blocks no */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_mesh_1d(fsdp_world *world, const char *name,
                                                  fsdp_mesh **mesh);

/* fsdp_mesh_ndim, fsdp_mesh_size, fsdp_mesh_rank - number of dims; size of a dim (dim -1: of the
   whole mesh); my position along a dim (-1: this rank is outside the mesh, or no such dim)
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API int fsdp_mesh_ndim(const fsdp_mesh *mesh);
FSDP_API int fsdp_mesh_size(const fsdp_mesh *mesh, int dim);
FSDP_API int fsdp_mesh_rank(const fsdp_mesh *mesh, int dim);

/* fsdp_mesh_dim   - index of the dim with this name; -1: none
   fsdp_mesh_ranks - world ranks of my group along a dim, in order of position (dim -1: of the whole
   mesh, row-major)
   out         room for fsdp_mesh_size(mesh, dim) ranks, or NULL
   Result      ranks: their number; -1: this rank is outside the mesh, or no such dim
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: DeviceMesh.get_all_groups, .mesh */
FSDP_API int fsdp_mesh_dim(const fsdp_mesh *mesh, const char *name);
FSDP_API int fsdp_mesh_ranks(const fsdp_mesh *mesh, int dim, int32_t *out);

/* fsdp_mesh_slice - the sub-mesh of some dims that this rank is in; shares the mesh's groups
   dims        indices (fsdp_mesh_dim finds one by name), increasing
   Result      FSDP_OK; INVALID_ARG (a dim out of range or not increasing), OUT_OF_MEMORY
   Collective  no      Blocks no      Allocates yes      Source torch: DeviceMesh.__getitem__ */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_mesh_slice(const fsdp_mesh *mesh, const int32_t *dims,
                                                     int num_dims, fsdp_mesh **out);

/* fsdp_mesh_flatten - all dims as one, row-major; of a slice: for each combination of the other
   dims
   fsdp_mesh_unflatten - dim split row-major into two of sizes outer and size/outer
   name, names copied; NULL: unnamed
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY, and what a collective may return
   Collective  yes: every rank of the world, same order      Blocks yes      Allocates yes
   Source      torch: DeviceMesh._flatten, _unflatten */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_mesh_flatten(const fsdp_mesh *mesh, const char *name,
                                                       fsdp_mesh **out);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_mesh_unflatten(const fsdp_mesh *mesh, int dim, int outer,
                                                         const char *const names[2],
                                                         fsdp_mesh **out);

enum { FSDP_MESH_INFO_FSDP = 0, FSDP_MESH_INFO_DDP, FSDP_MESH_INFO_HSDP };

// How a unit uses a mesh: FSDP shards over one dim, DDP replicates over one, HSDP does both.
typedef struct fsdp_mesh_info {
    const fsdp_mesh *mesh;
    int32_t kind;
    int32_t shard_mesh_dim, replicate_mesh_dim;   // -1: none
    int32_t shard_mesh_size, shard_mesh_rank;     // 1, 0 without a shard dim
    int32_t replicate_mesh_size, replicate_mesh_rank;
    fsdp_comm *shard_comm, *replicate_comm;       // NULL: none, or a group of one rank
} fsdp_mesh_info;

/* fsdp_mesh_info_init - check and fill a mesh info
   shard_dim, replicate_dim  a dim of the mesh, or -1 for none
   Result      FSDP_OK; INVALID_ARG: both dims -1, a dim that the kind needs is -1, a dim that it
               does not have is set, a dim out of range, both the same, or this rank is outside the
               mesh
   Collective  no      Blocks no      Allocates no
   Source      torch: DataParallelMeshInfo, FSDPMeshInfo, DDPMeshInfo, HSDPMeshInfo */
FSDP_API fsdp_status fsdp_mesh_info_init(const fsdp_mesh *mesh, int kind, int shard_dim,
                                         int replicate_dim, fsdp_mesh_info *out);

/* -------------------------------------------------------------------------------------------- */
/* Model, units and parameters. A unit is what one fully_shard call makes: its parameters are
   gathered together and reduced together. The model is the root of all units.                    */

// Values of reshard_after_forward. An int n of at least 2 that divides the shard group keeps 1/n of
// the gathered parameters after forward; backward then gathers over n neighbouring ranks.
enum {
    FSDP_RESHARD_DEFAULT = 0, // in a unit: as the model; in a model: always
    FSDP_RESHARD_ALWAYS = 1,  // free the gathered parameters after forward
    FSDP_RESHARD_NEVER = -1   // keep them until the unit's post_backward
};

// Values of implicit_prefetch: gather the unit whose forward came before, in pre_backward.
enum {
    FSDP_PREFETCH_DEFAULT = 0, // where lanes or streams can hide it
    FSDP_PREFETCH_ALWAYS = 1,  // on inline devices too: upstream's sequence of events
    FSDP_PREFETCH_NEVER = -1
};

#define FSDP_DIRECT_NEVER INT64_MAX // for fsdp_model_desc.direct_min

typedef struct fsdp_model_desc {
    uint32_t size, start_canary;
    const fsdp_mesh *mesh;         // NULL: 1-D over all ranks. 1-D: FSDP; 2-D with named dims: HSDP
    const fsdp_mesh_info *mesh_info; // not NULL: instead of mesh (other dims, replicate only)
    fsdp_dtype param_dtype;        // of gathered parameters and gradients; KEEP: their own
    fsdp_dtype reduce_dtype;       // of the reduction; KEEP: the widest of the shard gradients'
    fsdp_dtype grad_dtype;         // of shard gradients; KEEP: the parameter's own
    fsdp_dtype output_dtype;       // of fsdp_cast_forward_output; KEEP: no cast
    int32_t keep_forward_inputs;   // 1: fsdp_cast_forward_input does not cast
    int32_t reshard_after_forward; // FSDP_RESHARD_DEFAULT: always
    int32_t grads_overwrite;       // 1: backward stores gradients (=) instead of adding (+=)
    int32_t cpu_offload;           // 1: shards and their gradients in (pinned) host memory
    int32_t implicit_prefetch;     // FSDP_PREFETCH_*
    int32_t debug;                 // 1: released buffers are filled with NaN patterns
    int64_t prefetch_bytes;        // of slots that prefetches may hold at a time; 0: no limit
    int64_t direct_min;            // bytes of a full parameter from which it is gathered in place,
                                   // 0: 65536; 1: always; FSDP_DIRECT_NEVER
    int64_t fill_bytes;            // 0: 16 MiB. Block of init_params, step of param_full
    uint64_t end_canary;
} fsdp_model_desc;

/* fsdp_model_create - an empty model; units are added by fsdp_fully_shard
   desc        NULL: defaults
   model       owned by the world; fsdp_model_destroy or fsdp_shutdown ends it
   Result      FSDP_OK; INVALID_ARG, UNSUPPORTED, OUT_OF_MEMORY
   Collective  yes: every rank of the mesh, same order      Blocks no      Allocates yes
   Note        ranks of other meshes may make other models; ranks that share one have made the same
               models before it (else its first collective is FSDP_ERR_MISMATCH) */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_model_create(fsdp_world *world,
                                                       const fsdp_model_desc *desc,
                                                       fsdp_model **model);

/* fsdp_model_destroy - free a model with its units and buffers; NULL is allowed
   Collective  yes, in the sense of fsdp_model_create      Blocks for operations under way
   Allocates   no */
FSDP_API void fsdp_model_destroy(fsdp_model *model);

typedef struct fsdp_param_view fsdp_param_view;

/* What is gathered in place of a parameter's shard: up to four byte strings per rank, for example
   quantised values and their scales. Called in the order of the unit's gathers: at once, by a
   worker thread with lanes, and on devices with streams to enqueue work on `stream`. A failure
   aborts the world. Source: torch: fsdp_pre_all_gather, fsdp_post_all_gather. */
enum { FSDP_GATHER_TENSORS = 4 };
typedef struct fsdp_gather_extension {
    // Bytes of each string for a stored shard of shard_numel elements, the same on all ranks;
    // returns how many strings there are, 1..FSDP_GATHER_TENSORS. Called once.
    int (*sizes)(void *user, int64_t shard_numel, int64_t nbytes[FSDP_GATHER_TENSORS]);
    // Writes this rank's strings from its shard (view->shard, whose padding is zero).
    fsdp_status (*pre_all_gather)(void *user, const fsdp_param_view *view, void *const *strings,
                                  void *stream);
    // gathered[i]: nbytes[i] of rank 0, of rank 1, ... Writes the parameter, contiguous in dtype.
    fsdp_status (*post_all_gather)(void *user, const fsdp_param_view *view,
                                   const void *const *gathered, void *full, fsdp_dtype dtype,
                                   void *stream);
    void *user;
} fsdp_gather_extension;

typedef struct fsdp_param_desc {
    uint32_t size, start_canary;
    const char *name;             // NULL: "p0", "p1", ... Copied
    void *user;                   // yours; comes back in views
    fsdp_dtype dtype;             // of the stored shard; KEEP: f32
    int32_t ndim;                 // 1..FSDP_MAX_DIMS
    int64_t shape[FSDP_MAX_DIMS]; // full shape, row-major
    int32_t shard_dim;            // -ndim <= shard_dim < ndim; 0: rows
    int32_t frozen;               // 1: requires no gradient (see fsdp_set_requires_grad)
    int32_t keep_dtype;           // 1: gathered in its own dtype, whatever param_dtype is
    int32_t reserved;
    const fsdp_gather_extension *extension; // NULL: the shard is gathered as it is. Copied
    uint64_t end_canary;
} fsdp_param_desc;

// A vector of n elements, and a matrix (rows, cols), sharded by rows. Inline: not exported.
static inline fsdp_param_desc fsdp_vec(const char *name, int64_t n) {
    fsdp_param_desc d = FSDP_ZERO;
    d.name = name;
    d.ndim = 1;
    d.shape[0] = n;
    return d;
}
static inline fsdp_param_desc fsdp_mat(const char *name, int64_t rows, int64_t cols) {
    fsdp_param_desc d = fsdp_vec(name, rows);
    d.ndim = 2;
    d.shape[1] = cols;
    return d;
}

typedef struct fsdp_unit_desc {
    uint32_t size, start_canary;
    const char *name;              // NULL: "unit0", "unit1", ... Copied
    const fsdp_param_desc *params; // [num_params], copied
    int32_t num_params;            // >= 1
    int32_t reshard_after_forward; // FSDP_RESHARD_*, or n; a unit open around others: NEVER
    fsdp_dtype param_dtype;        // KEEP: as the model
    fsdp_dtype reduce_dtype;       // KEEP: as the model
    fsdp_dtype output_dtype;       // KEEP: as the model
    int32_t keep_forward_inputs;   // 1: fsdp_cast_forward_input does not cast
    const fsdp_mesh *mesh;         // NULL: as the model; else as in fsdp_model_desc
    const fsdp_mesh_info *mesh_info;
    void *user;                    // yours; comes back in views
    uint64_t end_canary;
} fsdp_unit_desc;

/* fsdp_fully_shard - add a unit of parameters that are gathered and reduced together
   unit        owned by the model
   Result      FSDP_OK; INVALID_ARG (scalar, negative size, bad dim, integer parameter that requires
               a gradient, ...: the text names the parameter and the field), UNSUPPORTED,
               INVALID_STATE (the model is committed), OUT_OF_MEMORY. After a failure the model is
               as before
   Collective  yes: every rank of the mesh, same desc, same order (checked at the first collective)
   Blocks      to make a group for the first reshard_after_forward = n, else no
   Allocates   yes: tables only; shards are allocated by fsdp_model_commit
   Source      torch: fully_shard */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_fully_shard(fsdp_model *model, const fsdp_unit_desc *desc,
                                                      fsdp_unit **unit);

/* fsdp_model_commit - lay out and allocate shards and gradients, zero-filled; idempotent. Called by
   the first hook, init_params, load, flat or view if you do not
   Result      FSDP_OK; INVALID_STATE (no units), OUT_OF_MEMORY (sizes in the text), collective
               errors
   Collective  yes: every rank of the mesh      Blocks no      Allocates yes
   Note        a failure on one rank of several aborts the world, so that the others do not wait */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_model_commit(fsdp_model *model);

/* fsdp_model_reserve - allocate the buffers of forward and backward now instead of at their first
   use
   Result      FSDP_OK; OUT_OF_MEMORY, collective errors
   Collective  yes: every rank of the mesh      Blocks no      Allocates yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_model_reserve(fsdp_model *model);

// A parameter, or a block of rows of one, as this rank sees it.
struct fsdp_param_view {
    fsdp_unit *unit;
    const char *name, *unit_name;
    void *user, *unit_user;             // from the descs
    int32_t ordinal;                    // place among all parameters of the model
    int32_t index;                      // place in the unit
    fsdp_dtype dtype, grad_dtype;       // of data and shard; of shard_grad
    int32_t ndim, shard_dim, requires_grad;
    int64_t shape[FSDP_MAX_DIMS];       // full
    int64_t start[FSDP_MAX_DIMS];       // first index of the block in the full tensor
    int64_t local_shape[FSDP_MAX_DIMS]; // of the block; shard_dim has 0 in an empty shard
    int64_t numel;                      // elements of the block, without padding
    void *data;                         // the block: contiguous, shape local_shape
    void *shard;                        // my whole shard; never NULL. Both in device memory
    void *shard_grad;                   // its gradient; NULL: none (frozen, zeroed, nobody used it)
};

/* fsdp_view_index - row-major index in the full tensor of element k of the view's block
   Collective  no      Blocks no      Allocates no */
FSDP_API int64_t fsdp_view_index(const fsdp_param_view *view, int64_t k);

typedef void (*fsdp_init_fn)(void *user, const fsdp_param_view *block);

/* fsdp_init_params - let fn fill the parameters, a block of rows at a time; the whole model is
   never in memory. Ends with fsdp_params_changed
   fn          fills block->data (host memory, block->dtype, block->local_shape at block->start);
               called for consecutive row blocks of this rank's rows of at most fill_bytes (but at
               least one row), never for empty ones
   Result      FSDP_OK; INVALID_STATE (a unit is not idle), what commit returns
   Collective  as fsdp_model_commit      Blocks no      Allocates as commit */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_init_params(fsdp_model *model, fsdp_init_fn fn,
                                                      void *user);

/* fsdp_param_view_get - view of parameter i of a unit; data and shard are the same
   fsdp_param_at       - of parameter `ordinal` of the model
   Result      FSDP_OK; INVALID_ARG, what commit returns
   Collective  as fsdp_model_commit at the first use, then no      Blocks no
   Allocates as commit
   Source      torch: the sharded nn.Parameter(DTensor), _from_local_no_grad */
FSDP_API fsdp_status fsdp_param_view_get(fsdp_unit *unit, int index, fsdp_param_view *out);
FSDP_API fsdp_status fsdp_param_at(fsdp_model *model, int ordinal, fsdp_param_view *out);

/* fsdp_next_param - step through all parameters: start with a zeroed view; 0 at the end
   Collective  as fsdp_model_commit at the first use, then no      Blocks no
   Allocates as commit */
FSDP_API int fsdp_next_param(fsdp_model *model, fsdp_param_view *view);

/* fsdp_num_params, fsdp_num_units - of the model; 0 for NULL
   fsdp_unit_name - for messages; "" for NULL
   Collective  no      Blocks no      Allocates no */
FSDP_API int fsdp_num_params(const fsdp_model *model);
FSDP_API int fsdp_num_units(const fsdp_model *model);
FSDP_API const char *fsdp_unit_name(const fsdp_unit *unit);

// All trainable shards of one dtype and their gradients, at equal offsets: one loop, one launch.
typedef struct fsdp_flat {
    fsdp_dtype dtype, grad_dtype;
    void *shards, *grads; // numel elements each, in device memory (cpu_offload: pinned); padding is
                          // zero in both and must stay so
    int64_t numel;        // with padding
} fsdp_flat;

/* fsdp_model_flat - the flat block of one dtype
   Result      FSDP_OK (numel 0: no trainable parameter of that dtype); INVALID_ARG, what commit
               returns
   Gradients   of parameters that have none are zero after fsdp_finalize_backward
   Collective  as fsdp_model_commit at the first use, then no      Blocks no
   Allocates as commit */
FSDP_API fsdp_status fsdp_model_flat(fsdp_model *model, fsdp_dtype dtype, fsdp_flat *out);

/* fsdp_param_load - take this rank's rows from a full tensor; ends with fsdp_params_changed
   full        host memory, the parameter's shape and dtype, row-major
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle), what commit returns
   Collective  as fsdp_model_commit at the first use, then no      Blocks no
   Allocates as commit */
FSDP_API fsdp_status fsdp_param_load(fsdp_unit *unit, int index, const void *full);

/* fsdp_param_full - gather a parameter to one full tensor, in its own dtype whatever param_dtype is
   fsdp_param_full_grad - gather its gradient; zeros when it has none
   full        host memory, the parameter's shape and dtype; NULL: take part, but keep nothing
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle, frozen), collective errors
   Collective  yes: every rank of the mesh
   Blocks yes, at most timeout_ms per step of fill_bytes
   Allocates   at the first use a scratch buffer: the largest parameter, at most fill_bytes */
FSDP_API fsdp_status fsdp_param_full(fsdp_unit *unit, int index, void *full);
FSDP_API fsdp_status fsdp_param_full_grad(fsdp_unit *unit, int index, void *full);

/* fsdp_params_changed - say that shards have been written (own optimizer, own load)
   Effect      later gathers come after the writes; unsharded copies, also those under way, are
               stale and gathered again by the next fsdp_unshard or pre_*; until then fsdp_data
               gives the old values
   Result      FSDP_OK; INVALID_STATE (a unit is not idle)
   Collective  no, but every rank has to do the same      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_params_changed(fsdp_model *model);

/* -------------------------------------------------------------------------------------------- */
/* Training step. A call in a wrong order returns INVALID_STATE, names the calls that are possible
   and changes nothing; fsdp_finalize_backward reports the first such failure of the step again, of
   setters too, so that a trainer may check finalize and the optimizer alone. After a failure of a
   collective (TIMEOUT, PEER_LOST, MISMATCH, ABORTED, BACKEND) the world is aborted: every call
   returns that status at once and fsdp_data/fsdp_grad give valid memory of undefined content.
   All hooks are collective: every rank of the mesh calls them in the same order.                 */

/* fsdp_pre_forward - parameters are gathered and ready for the caller
   Phase       also the recompute of an activation checkpoint, between pre_ and post_backward of the
               unit itself, or inside the backward of others while a forward of it is outstanding
   Result      FSDP_OK; INVALID_STATE; OUT_OF_MEMORY; collective errors
   Collective  yes      Blocks until gathered, at most timeout_ms      Allocates at its first use
   Source      torch: FSDPState._pre_forward, FSDPParamGroup.pre_forward */
FSDP_API fsdp_status fsdp_pre_forward(fsdp_unit *unit);

/* fsdp_post_forward - the caller has finished reading; frees the parameters (reshard_after_forward)
   Result      FSDP_OK; INVALID_STATE
   Collective  yes      Blocks no      Allocates no, but for the record of forwards as it grows
   Source      torch: FSDPState._post_forward, FSDPParamGroup.post_forward */
FSDP_API fsdp_status fsdp_post_forward(fsdp_unit *unit);

/* fsdp_pre_backward - parameters are gathered again, gradients are zero or hold earlier
   microbatches; on asynchronous devices the unit before in the order of forwards is on its way
   Result      FSDP_OK; INVALID_STATE (no grad-enabled forward of the unit is outstanding, ...);
               OUT_OF_MEMORY; collective errors
   Collective  yes      Blocks until gathered, at most timeout_ms      Allocates at its first use
   Source      torch: FSDPState._pre_backward, FSDPParamGroup.pre_backward */
FSDP_API fsdp_status fsdp_pre_backward(fsdp_unit *unit);

/* fsdp_post_backward - the caller has finished writing gradients; parameters are freed, gradients
   are averaged over the ranks into their owners' shards (added to what is there) if sync is on
   Result      FSDP_OK; INVALID_STATE; OUT_OF_MEMORY; collective errors
   Collective  yes      Blocks inline: until reduced; with lanes or streams: no
   Allocates   at its first use      Source torch: FSDPParamGroup.post_backward, foreach_reduce */
FSDP_API fsdp_status fsdp_post_backward(fsdp_unit *unit);

/* fsdp_finalize_backward - end of backward: units still open in backward are finished, left-overs
   are freed, every sharded gradient is ready
   Result      FSDP_OK; the first failure of a hook since the last finalize that went through (its
               own failures come before); INVALID_STATE (a unit
               is open in forward: named); collective errors
   Collective  yes      Blocks until all reductions are done; on devices with streams only with
               cpu_offload, or to ask whether others used a parameter that this rank did not use
   Allocates   at its first use
   Source      torch: FSDPState._root_post_backward_final_callback, finalize_backward */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_finalize_backward(fsdp_model *model);

/* fsdp_data - full parameter `index`, contiguous, in param_dtype; valid from pre_* to post_*
   fsdp_grad - where its gradient is written (frozen parameter: NULL); valid from pre_ to
               post_backward; marks the parameter as used. Both in device memory, ready in the order
               of the caller's stream
   Result      NULL, and a logged text, in a state where there is none; a zero-size parameter never
               gives NULL. From the second step of the same order of calls on, addresses repeat
   Collective  no      Blocks no      Allocates no (but see the failure rule above) */
FSDP_API void *fsdp_data(fsdp_unit *unit, int index);
FSDP_API void *fsdp_grad(fsdp_unit *unit, int index);

/* fsdp_unshard - start gathering a unit ahead of its use; fsdp_wait - until fsdp_data is valid;
   fsdp_reshard - free the gathered parameters now
   Result      FSDP_OK (also when there is nothing to do); INVALID_STATE; collective errors
   Collective  yes      Blocks unshard: inline devices only; wait: yes; reshard: no
   Allocates   unshard: at its first use
   Source      torch: FSDPModule.unshard, UnshardHandle.wait, FSDPModule.reshard */
FSDP_API fsdp_status fsdp_unshard(fsdp_unit *unit);
FSDP_API fsdp_status fsdp_wait(fsdp_unit *unit);
FSDP_API fsdp_status fsdp_reshard(fsdp_unit *unit);

/* fsdp_zero_grad - forget all sharded gradients: the next reduction stores instead of adding
   Result      FSDP_OK; INVALID_STATE (a unit is not idle)
   Note        gradients of microbatches that were not reduced yet survive, as in PyTorch
   Collective  no, but every rank has to do the same      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_zero_grad(fsdp_model *model);

/* fsdp_clip_grads - norm of all gradients over all ranks; scales them to at most max_norm
   fsdp_clip_grad_norm - the same with defaults: the 2-norm
   fsdp_grad_norm - the norm that the last of these calls found
   norm        out: the norm before clipping, the same on every rank. NULL: on GPUs nobody waits for
               it; it can be asked for later, say where a step's loss is
   Arithmetic  |g|^p is summed in f64, parameter by parameter in order, ranks in rank order: the
               same bits for every layout. Coefficient max_norm/(norm + 1e-6), at most 1
   Meshes      units on the model's mesh: one all-reduce over its shard group. A unit with a mesh of
               its own: one over the whole model's mesh, where ranks beside a unit's mesh count as
               holding other parameters
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle; grad_norm: there was no call
               since the model got its buffers), CORRUPT (error_if_nonfinite: nothing is scaled, the
               world goes on); collective errors
   Collective  yes, but not fsdp_grad_norm      Allocates no; the first calls on a GPU: scratch
   Blocks      at most timeout_ms; on GPUs only for norm, error_if_nonfinite and cpu_offload
   Source      torch: torch.nn.utils.clip_grad_norm_, get_total_norm */
typedef struct fsdp_clip_desc {
    uint32_t size, start_canary;
    double max_norm;            // > 0; INFINITY: measure only
    double norm_type;           // p > 0, INFINITY: largest magnitude; 0: 2
    int32_t error_if_nonfinite; // 1: a norm that is infinite or NaN is an error
    int32_t reserved;
    uint64_t end_canary;
} fsdp_clip_desc;
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_clip_grads(fsdp_model *model, const fsdp_clip_desc *desc,
                                                     double *norm);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_clip_grad_norm(fsdp_model *model, double max_norm,
                                                         double *norm);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_grad_norm(fsdp_model *model, double *norm);

/* fsdp_model_reset - bring every unit back to IDLE and SHARDED after an interrupted step;
   gradients, also those already reduced, and unreduced microbatches are dropped
   Result      FSDP_OK; the stored status if the world is aborted
   Collective  no, but every rank has to do the same      Blocks for operations under way
   Allocates   no      Source torch: reset_iter_state */
FSDP_API fsdp_status fsdp_model_reset(fsdp_model *model);

/* Setters. Those with a unit (NULL: every unit) need it IDLE or POST_BACKWARD; the others any time.
   fsdp_set_grad_enabled           0: forwards are evaluation and are not waited for by a backward
   fsdp_set_is_last_backward       0: finalize keeps the record of forwards for a further backward
   fsdp_set_requires_gradient_sync 0: post_backward keeps gradients here, unreduced (no_sync).
                                   Sets requires_all_reduce to the same
   fsdp_set_requires_all_reduce    0: HSDP: the sums over the shard group are kept and added up, the
                                   all-reduce over the replicas waits for a later post_backward.
                                   With one shard as without sync; without replicas nothing
   fsdp_set_reshard_after_forward  FSDP_RESHARD_ALWAYS or _NEVER
   fsdp_set_reshard_after_backward 0: parameters stay gathered after backward
   fsdp_set_unshard_in_backward    0: pre_backward does not gather (backward needs no parameters)
   fsdp_set_gradient_divide_factor gradients are sums divided by this, from the next post_backward
                                   on; 0: by the number of ranks
   fsdp_set_reduce_scatter_unused_params 1 (default here): every trainable parameter is reduced
                                   whoever used it; 0, upstream's rule: a unit of which nothing was
                                   used is not reduced, and ranks must have used the same parameters
                                   (checked: FSDP_ERR_MISMATCH)
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE
   Collective  no, but every rank has to do the same      Blocks no      Allocates no
   Source      torch: FSDPModule methods of the same names, torch.set_grad_enabled */
FSDP_API fsdp_status fsdp_set_grad_enabled(fsdp_model *model, int enabled);
FSDP_API fsdp_status fsdp_set_is_last_backward(fsdp_model *model, int is_last);
FSDP_API fsdp_status fsdp_set_requires_gradient_sync(fsdp_model *model, fsdp_unit *unit, int sync);
FSDP_API fsdp_status fsdp_set_requires_all_reduce(fsdp_model *model, fsdp_unit *unit, int required);
FSDP_API fsdp_status fsdp_set_reshard_after_forward(fsdp_model *model, fsdp_unit *unit, int mode);
FSDP_API fsdp_status fsdp_set_reshard_after_backward(fsdp_model *model, fsdp_unit *unit,
                                                     int reshard);
FSDP_API fsdp_status fsdp_set_unshard_in_backward(fsdp_model *model, fsdp_unit *unit, int unshard);
FSDP_API fsdp_status fsdp_set_gradient_divide_factor(fsdp_model *model, fsdp_unit *unit,
                                                     double factor);
FSDP_API fsdp_status fsdp_set_reduce_scatter_unused_params(fsdp_model *model, fsdp_unit *unit,
                                                           int reduce);

/* fsdp_set_modules_to_forward_prefetch, fsdp_set_modules_to_backward_prefetch - units whose gather
   pre_forward or pre_backward of this one starts, in this order, after its own; in backward instead
   of the implicit one. A gather that would exceed prefetch_bytes is left out
   targets     [count] units of the same model, copied; count 0: as if never set
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE, OUT_OF_MEMORY
   Collective  no, but every rank has to do the same      Blocks no      Allocates yes
   Source      torch: set_modules_to_forward_prefetch, set_modules_to_backward_prefetch */
FSDP_API fsdp_status fsdp_set_modules_to_forward_prefetch(fsdp_unit *unit,
                                                          fsdp_unit *const *targets, int count);
FSDP_API fsdp_status fsdp_set_modules_to_backward_prefetch(fsdp_unit *unit,
                                                           fsdp_unit *const *targets, int count);

/* fsdp_set_requires_grad - freeze or thaw a parameter between steps
   Effect      the model is laid out anew at the next call that needs it: shards and gradients move,
               earlier views and flats are stale, gathered parameters are freed; both layouts
               exist for a moment. Before the first hook it costs nothing. Freezing drops the
               parameter's gradient
   Result      FSDP_OK; INVALID_ARG (integer parameter), INVALID_STATE (a unit is not idle, or holds
               gradients that are not reduced)
   Collective  no, but every rank has to do the same      Blocks for operations under way
   Allocates   tables; the rest at the next call      Source torch: Tensor.requires_grad_ */
FSDP_API fsdp_status fsdp_set_requires_grad(fsdp_unit *unit, int index, int requires_grad);

/* Hooks of a unit. They run where its reductions run: at once, in a worker thread with lanes (where
   no function that takes the world, the model or the unit may be called), on devices with streams
   to enqueue work on `stream`. A result that is not FSDP_OK aborts the world with that status.
   fsdp_set_all_reduce_hook   on the summed gradients (numel elements of dtype, the order of the
                              shards) before they are divided, after the all-reduce of HSDP
   fsdp_set_post_accumulate_hook  when a parameter's shard gradient is ready (not for one that
                              nobody used); it may write the shard: an optimizer in backward
   fsdp_set_custom_all_gather, fsdp_set_custom_reduce_scatter  instead of ops->run(comm, coll)
   hook        NULL: none
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE
   Collective  no, but every rank has to do the same      Blocks no      Allocates no
   Source      torch: set_all_reduce_hook, register_post_accumulate_grad_hook,
               set_custom_all_gather, set_custom_reduce_scatter */
typedef fsdp_status (*fsdp_all_reduce_hook)(void *user, fsdp_unit *unit, void *data, int64_t numel,
                                            fsdp_dtype dtype, void *stream);
typedef fsdp_status (*fsdp_grad_hook)(void *user, const fsdp_param_view *view, void *stream);
typedef fsdp_status (*fsdp_custom_comm)(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                                        const fsdp_coll *coll);
FSDP_API fsdp_status fsdp_set_all_reduce_hook(fsdp_unit *unit, fsdp_all_reduce_hook hook,
                                              void *user);
FSDP_API fsdp_status fsdp_set_post_accumulate_hook(fsdp_unit *unit, int index, fsdp_grad_hook hook,
                                                   void *user);
FSDP_API fsdp_status fsdp_set_custom_all_gather(fsdp_unit *unit, fsdp_custom_comm hook, void *user);
FSDP_API fsdp_status fsdp_set_custom_reduce_scatter(fsdp_unit *unit, fsdp_custom_comm hook,
                                                    void *user);

/* fsdp_cast_forward_input  - an activation as the unit's policy wants it: floating data are cast to
   param_dtype unless keep_forward_inputs is set
   fsdp_cast_forward_output - to output_dtype
   dst         room for count elements of that dtype, owned by the caller; untouched when not needed
   dtype       in: of src; out: of the result. unit and dtype are not NULL
   Result      the pointer to use: dst or src
   Collective  no      Blocks no      Allocates no
   Source      torch: MixedPrecisionPolicy.cast_forward_inputs, output_dtype */
FSDP_API const void *fsdp_cast_forward_input(const fsdp_unit *unit, void *dst, const void *src,
                                             fsdp_dtype *dtype, int64_t count);
FSDP_API const void *fsdp_cast_forward_output(const fsdp_unit *unit, void *dst, const void *src,
                                              fsdp_dtype *dtype, int64_t count);

typedef enum fsdp_training_state {
    FSDP_STATE_IDLE = 0,
    FSDP_STATE_FORWARD,
    FSDP_STATE_PRE_BACKWARD,
    FSDP_STATE_POST_BACKWARD,
    FSDP_STATE_COUNT
} fsdp_training_state;

typedef enum fsdp_storage_state {
    FSDP_STORAGE_SHARDED = 0,
    FSDP_STORAGE_IN_FLIGHT,
    FSDP_STORAGE_UNSHARDED,
    FSDP_STORAGE_SHARDED_POST_FORWARD, // 1/n is kept: reshard_after_forward = n
    FSDP_STORAGE_COUNT
} fsdp_storage_state;

/* fsdp_unit_state, fsdp_unit_storage - where a unit is
   Collective  no      Blocks no      Allocates no      Source torch: TrainingState, ShardedState */
FSDP_API fsdp_training_state fsdp_unit_state(const fsdp_unit *unit);
FSDP_API fsdp_storage_state fsdp_unit_storage(const fsdp_unit *unit);

/* -------------------------------------------------------------------------------------------- */
/* Ops are data: everything that a call does is an op record. The same record is what an observer
   sees, a lane queues, a collective is checked by, and an error text is made from.               */

#define FSDP_OP_LIST(X)                                                                           \
    X(COPY, "copy")                   /* 2-D blocks: cast, scale, accumulate */                   \
    X(ZERO, "zero")                   /* bytes of dst */                                          \
    X(NORM, "norm")                   /* of src blocks: sum of |x|^p, or maximum */               \
    X(ALL_GATHER, "all_gather")                                                                   \
    X(REDUCE_SCATTER, "reduce_scatter")                                                           \
    X(ALL_REDUCE, "all_reduce")                                                                   \
    X(BROADCAST, "broadcast")                                                                     \
    X(ALL_TO_ALL, "all_to_all")       /* these three: backends that have them, for extensions */  \
    X(SEND, "send")                                                                               \
    X(RECV, "recv")                                                                               \
    X(USE, "use")                     /* marker: the caller's stream waits for src */             \
    X(CALL, "call")                   /* a function of the user, in the stream's order */         \
    X(HOOK, "hook")                   /* marker: a public call begins; count is FSDP_CALL_* */

enum {
#define FSDP_X(name, text) FSDP_OP_##name,
    FSDP_OP_LIST(FSDP_X)
#undef FSDP_X
    FSDP_OP_COUNT
};

// Why an op is issued.
#define FSDP_LABEL_LIST(X)                                                                        \
    X(NONE, "")                                                                                   \
    X(COPY_IN, "copy_in")     /* cast of the shard into its part of the slot */                   \
    X(GATHER, "gather")                                                                           \
    X(COPY_OUT, "copy_out")   /* packed staging -> contiguous tensors */                          \
    X(PRE_GATHER, "pre_all_gather")   /* extension */                                             \
    X(POST_GATHER, "post_all_gather") /* extension */                                             \
    X(SLICE, "slice")         /* my 1/n of the gathered parameters, kept after forward */         \
    X(GRADS, "grads")         /* a fresh gradient slot */                                         \
    X(ACC, "acc")             /* gradients -> reduce input: cast, chunk_cat, accumulate */        \
    X(USERS, "users")         /* which parameters this rank used, rides along */                  \
    X(REDUCE, "reduce")       /* over the shard group */                                          \
    X(PARTIAL, "partial")     /* reduce output -> sums that wait for the all-reduce */            \
    X(REPLICAS, "replicas")   /* over the replicas */                                             \
    X(ALL_REDUCE_HOOK, "all_reduce_hook")                                                         \
    X(RED_OUT, "red_out")     /* reduce output -> shard gradient: scale, cast, accumulate */      \
    X(GRAD_HOOK, "post_accumulate_hook")                                                          \
    X(FINAL, "final")         /* the caller's stream waits for shard gradients */                 \
    X(MOVE, "move")           /* to a new layout, after fsdp_set_requires_grad */                 \
    X(CLIP, "clip")                                                                               \
    X(FULL, "full")           /* gather to one tensor */                                          \
    X(WORLD, "world")         /* fsdp_all_reduce, fsdp_broadcast, fsdp_barrier */

enum {
#define FSDP_X(name, text) FSDP_LABEL_##name,
    FSDP_LABEL_LIST(FSDP_X)
#undef FSDP_X
    FSDP_LABEL_COUNT
};

enum {
    FSDP_STREAM_COMPUTE = 0,
    FSDP_STREAM_GATHER,
    FSDP_STREAM_REDUCE,
    FSDP_STREAM_ALLREDUCE,
    FSDP_STREAM_COUNT
};

// A point in a stream's order. Host lanes: the seq-th op of the stream; native: an event object.
typedef struct fsdp_event {
    void *native;
    uint64_t seq;
    int32_t stream; // FSDP_STREAM_*
} fsdp_event;

typedef struct fsdp_op {
    uint64_t seq;             // of this rank's model; the same on all ranks
    uint64_t bytes;           // read from other ranks (collectives), or written (copies, zero)
    uint64_t count;           // elements: per rank (gather, scatter), of the whole (others)
    uint8_t kind, label, stream, state; // FSDP_OP_*, FSDP_LABEL_*, FSDP_STREAM_*, training state
    uint8_t dtype, out_dtype, accumulate, in_place;
    uint8_t redop, fill;      // ALL_REDUCE: FSDP_SUM, ...; ZERO: the byte that is written
    int32_t root;             // BROADCAST; CALL: index of the parameter, or -1
    int32_t group_size;       // collectives: ranks that take part
    double scale;             // multiplies the (summed) input, in the arithmetic's type; 1: none
    double norm_type;         // NORM, and clip: p; INFINITY: the maximum
    const double *clip;       // COPY, or NULL: what NORM has found, in the device's memory. `scale`
                              // is a largest norm then: times scale/(norm + 1e-6) if < 1, or NaN
    uint32_t list_count;
    const fsdp_unit *unit;    // NULL: of the model
    const char *what;         // the unit's name, or the call's
    uint64_t what_hash, step; // of the unit's desc, and the finalizes so far: ranks must agree
    fsdp_comm *comm;          // collectives: where
    fsdp_buf *src, *dst;      // whose events it waits for and sets; NULL: none
    const void *list;         // fsdp_block[] (COPY, NORM) or fsdp_seg[] (collectives), prebuilt
    const void *src_ptr;      // fixed at issue: a slot may change hands before a worker runs the op
    void *dst_ptr;
    fsdp_status (*call)(const struct fsdp_op *op, void *stream); // CALL
    fsdp_event wait[2];       // derived by emit; all zero: nothing to wait for
} fsdp_op;

// The seam for extensions. hook is asked before the table by the calls of a step, from pre_forward
// to finalize_backward (non-zero: it has done the call's work itself); op sees each record before
// it runs (non-zero: do not run it), and a HOOK marker before the records of every public call.
typedef struct fsdp_driver {
    int (*hook)(void *user, fsdp_model *model, fsdp_unit *unit, int call);
    int (*op)(void *user, fsdp_model *model, const fsdp_op *op);
    void *user;
} fsdp_driver;

/* fsdp_set_driver - install an observer; NULL removes it. The struct is copied
   Result      FSDP_OK; INVALID_STATE (a unit is not idle)
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_set_driver(fsdp_model *model, const fsdp_driver *driver);

/* fsdp_op_name, fsdp_label_name - "reduce_scatter", "copy_in"; "?" out of range
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_op_name(int kind);
FSDP_API const char *fsdp_label_name(int label);

// The public calls, in the order of the transition table; HOOK ops carry one as `count`.
#define FSDP_CALL_LIST(X)                                                                         \
    X(PRE_FORWARD, "pre_forward")                                                                 \
    X(POST_FORWARD, "post_forward")                                                               \
    X(PRE_BACKWARD, "pre_backward")                                                               \
    X(POST_BACKWARD, "post_backward")                                                             \
    X(UNSHARD, "unshard")                                                                         \
    X(WAIT, "wait")                                                                               \
    X(RESHARD, "reshard")                                                                         \
    X(FINALIZE, "finalize_backward")                                                              \
    X(DATA, "data")                                                                               \
    X(GRAD, "grad")                                                                               \
    X(PARAMS_CHANGED, "params_changed")                                                           \
    X(LOAD, "param_load")             /* and init_params */                               \
    X(FULL, "param_full")                                                                         \
    X(ZERO_GRAD, "zero_grad")                                                                     \
    X(CLIP, "clip_grad_norm")                                                                     \
    X(REQUIRES_GRAD, "set_requires_grad")                                                         \
    X(SET, "set_...")                                                                             \
    X(RESET, "model_reset")

enum {
#define FSDP_X(name, text) FSDP_CALL_##name,
    FSDP_CALL_LIST(FSDP_X)
#undef FSDP_X
    FSDP_CALL_COUNT
};

/* -------------------------------------------------------------------------------------------- */
/* Memory and counters.                                                                           */

#define FSDP_POOL_LIST(X)                                                                         \
    X(SHARD, "shards")                                                                            \
    X(SGRAD, "shard gradients")                                                                   \
    X(GATHER, "gathered parameters")                                                              \
    X(SLICE, "parameters kept after forward")                                                     \
    X(GRAD, "full gradients")                                                                     \
    X(RIN, "reduce input")                                                                        \
    X(ROUT, "reduce output")                                                                      \
    X(SCRATCH, "scratch")             /* norms, and the steps of param_full */

enum {
#define FSDP_X(name, text) FSDP_POOL_##name,
    FSDP_POOL_LIST(FSDP_X)
#undef FSDP_X
    FSDP_POOL_COUNT
};

// Bytes of device memory by pool. Pools only grow, so current is also the peak.
typedef struct fsdp_memory {
    int64_t pool_bytes[FSDP_POOL_COUNT];
    int32_t pool_slots[FSDP_POOL_COUNT];
    int32_t reserved;
    int64_t total_bytes;     // of all pools
    int64_t host_bytes;      // tables of the library for this model
    int64_t unsharded_bytes; // parameters and gradients of the whole model, for comparison
} fsdp_memory;

/* fsdp_model_memory - what is allocated now. fsdp_model_predict - what training will have allocated
   after a step: one forward and one backward of every unit, in the order of their creation and
   back; a unit that never reshards in a model that does is open around the others; allocates
   nothing on the device. One rank with grads_overwrite takes a slot of gradients more in steps that
   begin with gradients
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY, INVALID_STATE (predict: no units)
   Collective  no      Blocks no      Allocates predict: temporary tables */
FSDP_API fsdp_status fsdp_model_memory(const fsdp_model *model, fsdp_memory *out);
FSDP_API fsdp_status fsdp_model_predict(const fsdp_model *model, fsdp_memory *out);

/* fsdp_unit_memory - of one unit: bytes of its part of the shards and gradients, of one slot of
   each pool that it takes (pool_slots: how many it holds now), and of its full parameters and
   gradients
   Result      FSDP_OK; INVALID_ARG
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_unit_memory(const fsdp_unit *unit, fsdp_memory *out);

/* fsdp_model_describe - a table of units and parameters as text: shapes, dtypes, layout, bytes
   buf         room for cap bytes, always terminated when cap > 0; may be NULL with cap 0
   Result      length of the whole text without its end, as snprintf; 0 for NULL
   Collective  no      Blocks no      Allocates no */
FSDP_API size_t fsdp_model_describe(const fsdp_model *model, char *buf, size_t cap);

/* fsdp_pool_name - "gathered parameters"; "?" out of range
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_pool_name(int pool);

typedef struct fsdp_counters {
    uint64_t calls[FSDP_OP_COUNT]; // ops issued
    uint64_t bytes[FSDP_OP_COUNT]; // fsdp_op.bytes of them: read from other ranks, or written
    uint64_t allocations;          // host and device allocations of the model
} fsdp_counters;

/* fsdp_model_counters - since creation
   Result      FSDP_OK; INVALID_ARG
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_model_counters(const fsdp_model *model, fsdp_counters *out);

/* -------------------------------------------------------------------------------------------- */
/* What a backend and a device are made of: fsdp_boot, fsdp_coll, fsdp_comm_ops, fsdp_device_ops. */

/* ==== core/backend.h ========================================================================
   the two tables of functions that a backend and a device are

   How to write one: backends/README.md. */

#ifndef FSDP_BACKEND_H
#define FSDP_BACKEND_H
// clang-format off

// What a backend or device is opened with. Pointers are valid until close.
typedef struct fsdp_boot {
    int rank, size, local_rank;
    int64_t timeout_ns;
    uint32_t *stuck;       // not 0: work on the device does not end; to free its memory would hang
    const char *job;
    const char *store;     // where ranks meet, as fsdp_world_desc.store; "host:": on this host
    fsdp_threads *threads; // not NULL: ranks are threads that share this
    fsdp_allocator allocator;
    fsdp_logger logger;
    int log_level;         // what is more verbose is not for the logger
    fsdp_clock clock;
    void *user;            // fsdp_world_desc.user
} fsdp_boot;

// Ranks of a new process group in order; color < 0: this rank is not in it, but takes part in the
// call.
typedef struct fsdp_group {
    int color, index, size, lane; // index: my place, or -1; lane: FSDP_STREAM_* that will use it
    const int32_t *ranks;         // [size], world ranks
    const char *name;
} fsdp_group;

enum { FSDP_CAP_FUSED_REDUCE = 1 }; // reduce_scatter casts, scales and accumulates, see fsdp_coll

typedef struct fsdp_caps {
    uint32_t kinds; // bit 1u << FSDP_OP_*
    uint32_t flags; // FSDP_CAP_*
    int lanes;      // streams that may run collectives at the same time: 1 or more
} fsdp_caps;

/* One collective, as data. Offsets of segments are elements of dtype (full side, and src of a
   gather) and out_dtype (dst of a scatter).
   all_gather      dst[full + k*count ..] = src_k[shard ..] of rank k; in_place: src_k[.] is already
                   at its place in rank k's dst, and src is ignored
   reduce_scatter  dst[shard ..] (+)= scale * sum of src_k[full + me*count ..] over k, in rank
                   order; without FSDP_CAP_FUSED_REDUCE: dtypes equal, scale 1, accumulate 0
   all_reduce      dst = redop over k of src_k, in place (src == dst), count elements
   broadcast       dst of all = dst of root, count elements
   all_to_all      dst[k*count ..] = src_k[me*count ..], count elements for each pair of ranks
   send, recv      count elements from src to member `root`, from it to dst; only these two call
   Complete means: the result is in place *and* src may be overwritten.                           */
struct fsdp_coll {
    uint8_t kind, dtype, out_dtype, redop, in_place, accumulate, label, state;
    double scale;
    int32_t root;
    uint32_t num_segs;
    const fsdp_seg *segs;
    uint64_t count;       // gather, scatter: sum of the segments' counts
    const void *src;
    void *dst;
    uint64_t seq;         // of the model or world that issues it
    uint64_t fingerprint; // equal on all ranks, or MISMATCH
    const char *what;     // unit or call, for texts
    void *stream;         // native stream, or NULL: block until complete
};

#define FSDP_COMM_VERSION 1
struct fsdp_comm_ops {
    uint32_t version, size; // FSDP_COMM_VERSION, sizeof(fsdp_comm_ops)
    const char *name;
    fsdp_status (*open)(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **world);
    // Blocks until every rank of the parent has come. *out is NULL where color < 0.
    fsdp_status (*split)(fsdp_comm *parent, const fsdp_group *group, fsdp_comm **out);
    void (*close)(fsdp_comm *comm);
    fsdp_status (*run)(fsdp_comm *comm, const fsdp_coll *coll);
    // Memory that peers may read, zero-filled: ranks that use it together have allocated the same
    // sizes in the same order; other ranks of the world may have allocated otherwise.
    fsdp_status (*alloc)(fsdp_comm *world, size_t size, void **ptr);
    void (*free)(fsdp_comm *world, void *ptr, size_t size);
    // Text of the last failure of this comm; NULL: of this thread's failed open. Names the rank.
    const char *(*error_text)(fsdp_comm *comm);
    // Thread safe, harmless when repeated; why begins with "rank N".
    void (*abort)(fsdp_comm *world, fsdp_status status, const char *why);
    fsdp_status (*poll)(fsdp_comm *world);            // optional: asynchronous errors
};

enum {
    FSDP_DEVICE_ASYNC = 1, // ops are ordered on native streams and return at once
    FSDP_DEVICE_HOST = 2   // its memory is host memory
};

enum { FSDP_MEMORY_DEVICE = 0, FSDP_MEMORY_PINNED = 1 }; // pinned: host memory

enum { FSDP_UPDATE_ADAMW = 1, FSDP_UPDATE_SGD, FSDP_UPDATE_UNSCALE };

/* A run of elements that an optimizer updates, or whose gradients a scaler divides; all of it in
   the device's memory. The arithmetic is that of fsdp_optim.h, whose settings scalars are.
   ADAMW       scalars: decay, lerp, beta2, gain, root, eps, rate; first and second: m and v
   SGD         scalars: lr, momentum, gain, weight_decay, nesterov (0, 1), fresh (1: the first
               update); first: the momentum buffer, or NULL
   UNSCALE     scalars: factor. grad *= factor; *found becomes 1 if one was infinite or NaN  */
typedef struct fsdp_update {
    uint8_t kind, dtype, grad_dtype, reserved[5]; // FSDP_UPDATE_*; of param; of grad
    int64_t count;
    void *param, *grad, *first, *second;          // states: f64 for f64 parameters, else f32
    int32_t *found;
    double scalars[8];
} fsdp_update;

#define FSDP_DEVICE_VERSION 4
struct fsdp_device_ops {
    uint32_t version, size, flags; // FSDP_DEVICE_VERSION, sizeof(fsdp_device_ops), FSDP_DEVICE_*
    const char *name;
    fsdp_status (*open)(const fsdp_boot *boot, fsdp_device **device);
    void (*close)(fsdp_device *device);
    // FSDP_MEMORY_DEVICE for what peers do not read (buffers of worlds of several ranks come from
    // fsdp_comm_ops.alloc); FSDP_MEMORY_PINNED, host memory that kernels can read. Zero-filled.
    fsdp_status (*alloc)(fsdp_device *device, int kind, size_t size, void **ptr);
    void (*free)(fsdp_device *device, int kind, void *ptr, size_t size);
    // Only with FSDP_DEVICE_ASYNC. The stream COMPUTE may be the caller's.
    fsdp_status (*stream)(fsdp_device *device, int stream, void **native);
    fsdp_status (*event)(fsdp_device *device, void **native);
    void (*destroy)(fsdp_device *device, void *stream_or_null, void *event_or_null);
    fsdp_status (*record)(fsdp_device *device, void *stream, void *event);
    fsdp_status (*wait)(fsdp_device *device, void *stream, void *event);
    fsdp_status (*sync)(fsdp_device *device, void *event, int64_t timeout_ns);
    // Work, ordered on `stream` (NULL: done on return). A copy of one block without arithmetic may
    // have any host memory at one end, valid until the stream has passed it.
    fsdp_status (*copy)(fsdp_device *device, void *stream, const fsdp_op *op);
    fsdp_status (*zero)(fsdp_device *device, void *stream, const fsdp_op *op);
    fsdp_status (*norm)(fsdp_device *device, void *stream, const fsdp_op *op);
    fsdp_status (*update)(fsdp_device *device, void *stream, const fsdp_update *update); // optional
    // Optional: text of the last failure; device NULL: of this thread's failed open.
    const char *(*error_text)(fsdp_device *device);
};

// clang-format on
#endif

/* ==== fsdp.h, continued ===================================================================== */

#ifdef __cplusplus
}
#endif
#endif // FSDP_H
// clang-format on

/* ============================================================================================ */
/* Implementation, leaves first. Outside the guard: a header that included fsdp.h before does not
   hide it. Needs nothing that strict C99 hides: hidden calls are reached by fsdpi_syscall. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_IMPLEMENTED

#include <math.h>    // sqrt, pow, fmod
#include <pthread.h> // worker threads, ranks as threads
#include <stdarg.h>  // va_list
#include <stdio.h>   // snprintf, stderr
#include <stdlib.h>  // malloc, free, getenv, strtol
#include <string.h>  // memcpy, memset, strcmp, strlen

#ifdef __cplusplus
extern "C" {
#endif

/* ==== core/sys.h ============================================================================
   the few calls of the operating system (Linux), a lock, a hash and a text */

// Owns: the few calls of the operating system that the library needs. Strict C99 hides some of
// them; a private name for the C library's symbol reaches them without feature macros.

#include <sys/socket.h>  // getsockopt
#include <asm/socket.h>  // SO_PEERCRED, which the line above hides in strict C99
#include <sys/syscall.h> // SYS_futex and others
#include <sys/wait.h>    // waitpid
#include <unistd.h>      // fork, getpid, _exit

struct fsdpi_timespec {
    long tv_sec, tv_nsec;
};

extern long fsdpi_syscall(long number, ...) __asm__("syscall");
extern int fsdpi_clock_gettime(int clock, struct fsdpi_timespec *out) __asm__("clock_gettime");
extern int fsdpi_nanosleep(const struct fsdpi_timespec *wanted,
                           struct fsdpi_timespec *left) __asm__("nanosleep");
extern int fsdpi_kill(int pid, int sig) __asm__("kill");

static int64_t fsdpi_monotonic_ns(void *user) {
    struct fsdpi_timespec t;
    (void)user;
    (void)fsdpi_clock_gettime(1 /* CLOCK_MONOTONIC */, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static FSDPI_UNUSED void fsdpi_sleep_ns(int64_t ns) {
    struct fsdpi_timespec t;
    t.tv_sec = (long)(ns / 1000000000);
    t.tv_nsec = (long)(ns % 1000000000);
    (void)fsdpi_nanosleep(&t, NULL);
}

// Sleep while *word == expected, at most timeout_ns. May return early for no reason. shared: the
// word is in memory of several processes.
static void fsdpi_futex_wait(uint32_t *word, uint32_t expected, int64_t timeout_ns, int shared) {
    struct fsdpi_timespec t;
    t.tv_sec = (long)(timeout_ns / 1000000000);
    t.tv_nsec = (long)(timeout_ns % 1000000000);
    (void)fsdpi_syscall(SYS_futex, word, shared ? 0 : 128 /* FUTEX_PRIVATE_FLAG */, expected, &t,
                        NULL, 0);
}

static void fsdpi_futex_wake_all(uint32_t *word, int shared) {
    (void)fsdpi_syscall(SYS_futex, word, shared ? 1 : 129, 0x7FFFFFFF, NULL, NULL, 0);
}

static inline void fsdpi_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#define FSDPI_LOAD(p)     __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define FSDPI_STORE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)

// A lock for a few instructions: error texts, lists of ranks as threads.
// 0 free, 1 taken, 2 taken and somebody may sleep on it.
static int fsdpi_try_lock(uint32_t *lock) {
    uint32_t none = 0;
    return __atomic_compare_exchange_n(lock, &none, 1u, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}
static void fsdpi_lock(uint32_t *lock) {
    if (fsdpi_try_lock(lock)) return;
    while (__atomic_exchange_n(lock, 2u, __ATOMIC_ACQUIRE)) fsdpi_futex_wait(lock, 2, 1000000, 0);
}
static FSDPI_NOINLINE void fsdpi_unlock(uint32_t *lock) {
    if (__atomic_exchange_n(lock, 0u, __ATOMIC_RELEASE) == 2) fsdpi_futex_wake_all(lock, 0);
}

// Whether the other end of a unix socket is a process of this user.
static FSDPI_UNUSED int fsdpi_same_user(int fd) {
    int32_t pid_uid_gid[3] = {-1, -1, -1}; // struct ucred, which strict C99 hides, too
    socklen_t size = sizeof pid_uid_gid;
    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, pid_uid_gid, &size) &&
           (uint32_t)pid_uid_gid[1] == (uint32_t)getuid();
}

static uint64_t fsdpi_hash(uint64_t h, uint64_t x) { // splitmix64 of a running value
    h += x + 0x9E3779B97F4A7C15ull;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
    return h ^ (h >> 31);
}

static uint64_t fsdpi_hash_text(const char *text) {
    uint64_t h = 0;
    for (; *text; text++) h = fsdpi_hash(h, (uint64_t)(unsigned char)*text);
    return h;
}

// A text that grows like snprintf's: what does not fit is only counted.
typedef struct fsdpi_text {
    char *buf;
    size_t cap, used;
} fsdpi_text;

static FSDP_PRINTF(2, 3) void fsdpi_say(fsdpi_text *t, const char *format, ...) {
    size_t room = t->used < t->cap ? t->cap - t->used : 0;
    va_list args;
    va_start(args, format);
    int wanted = vsnprintf(room ? t->buf + t->used : NULL, room, format, args);
    va_end(args);
    if (wanted > 0) t->used += (size_t)wanted;
}

/* ==== core/objects.h ========================================================================
   what a world, a mesh, a model and a unit are made of */

#define FSDPI_TEXT 1024

enum {
    FSDPI_INLINE,
    FSDPI_LANES,
    FSDPI_NATIVE
}; // how ops run: at once, by worker threads, by the device

typedef struct fsdpi_lane fsdpi_lane;
typedef struct fsdpi_subgroup fsdpi_subgroup;

struct fsdp_threads {
    uint32_t lock; // fsdpi_lock
    int32_t size;  // ranks
    void *common;  // what the backend's first open put here
};

struct fsdp_world {
    fsdp_boot boot;
    int rank, size;
    int log_level;
    uint32_t stuck;           // work on the device did not end in time
    uint32_t failed;          // fsdp_status of the first failure of a collective, or 0
    uint32_t fail_lock;       // fsdpi_lock of the first failure: worker threads may have it
    char failure[FSDPI_TEXT]; // its text, written once
    char error[FSDPI_TEXT];   // of the last call of the caller's thread that failed
    char job[128], store[320];
    const fsdp_comm_ops *comm_ops; // NULL: one rank
    fsdp_comm *comm,
        *reduce_comm; // reduce_comm: equal to comm unless two streams may run at a time
    fsdp_caps caps;
    const fsdp_device_ops *device_ops;
    fsdp_device *device;
    int mode;                             // FSDPI_INLINE, ...
    void *streams[FSDP_STREAM_COUNT];     // FSDPI_NATIVE; COMPUTE may be the caller's
    void *own_stream;                     // the device's COMPUTE
    void *fence;                          // an event to wait for all of them
    fsdpi_lane *lanes[FSDP_STREAM_COUNT]; // FSDPI_LANES; COMPUTE has none; may be the same one
    void *bounce;                         // comm memory for collectives on host data
    uint64_t seq;
    fsdp_mesh *meshes;         // all of this world
    fsdpi_subgroup *subgroups; // of its meshes
    fsdp_model *models;        // all of this world
};

// A backend, and the device whose memory its collectives work on.
typedef struct fsdpi_backend {
    const char *name;
    const fsdp_comm_ops *(*comm_ops)(void);
    const fsdp_device_ops *(*device_ops)(void);
    int one_host; // it serves the ranks of one host only
} fsdpi_backend;

struct fsdp_mesh {
    fsdp_world *world;
    int ndim;
    int32_t shape[FSDP_MAX_DIMS], coord[FSDP_MAX_DIMS]; // coord: -1 when this rank is outside
    char *names[FSDP_MAX_DIMS];
    int32_t *ranks;                        // [product of shape]
    fsdp_comm *gather_comm[FSDP_MAX_DIMS]; // NULL: a group of one, or outside
    fsdp_comm *reduce_comm[FSDP_MAX_DIMS]; // equal to gather_comm unless lanes may run both
    uint8_t borrowed[FSDP_MAX_DIMS];       // the groups of this dim belong to another mesh
    fsdp_mesh *next;
};

// Part of a shard group: n neighbouring ranks, for reshard_after_forward = n.
struct fsdpi_subgroup {
    const fsdp_mesh *mesh;
    int dim, size;
    fsdp_comm *comm;
    fsdpi_subgroup *next;
};

// Owns: what a model, its units and their parameters are, and where everything lies: the flat
// blocks of the model and the layout of each unit's slots. Invariants: nothing here depends on
// time; the layout is the same on every rank. Source: torch: FSDPParam, FSDPParamGroup.

struct fsdp_buf {
    char *ptr;
    size_t bytes;
    fsdp_event ready; // last write
    fsdp_event avail; // release by the last consumer; the first write after acquire waits for it
    uint64_t released;
    uint8_t held, pool, pinned; // pinned: host memory of the device, which peers cannot read
};

typedef struct fsdpi_class { // slots of one pool and size
    int pool;
    size_t bytes;
    int ahead; // filled while another one is in use: two of them, unless everything runs inline
    fsdp_buf **slots;
    int count, cap;
} fsdpi_class;

typedef struct fsdpi_param {
    char *name;
    void *user;
    fsdp_dtype dtype;
    int32_t ordinal, requires_grad, keep_dtype;
    int32_t part;             // index in unit->parts
    fsdp_layout_param lay;    // shard_offset in the flat block, full_offset in the GATHER slot
    int64_t grad_offset;      // of the full gradient in the GRAD slot
    int64_t old_offset;       // of the shard in the layout before, while the model is laid out anew
    int32_t user_index;       // place among the unit's trainables
    uint8_t written;          // this rank wrote its gradient to the slot that the unit holds
    uint8_t used;             // this rank wrote a gradient that is not reduced yet
    uint8_t flag;             // `used` as it stands in the unit's flags
    uint8_t pending;          // it did, and that is in the sums of a reduction that goes on
    uint8_t has_grad;         // somebody did, and it is in the shard gradient
    fsdp_grad_hook grad_hook; // NULL: none
    void *grad_hook_user;
    fsdp_gather_extension extension;            // sizes NULL: none
    int32_t num_strings;                        // of the extension
    int64_t string_bytes[FSDP_GATHER_TENSORS];  // of one rank
    int64_t string_offset[FSDP_GATHER_TENSORS]; // in the GATHER slot, bytes
} fsdpi_param;

// What an op carries: the blocks of a copy, or the segments of a collective.
typedef struct fsdpi_work {
    fsdp_block *blocks;
    fsdp_seg *segs;
    int num;
    uint64_t count; // elements
} fsdpi_work;

// Trainables or frozen parameters of a part, in the flat block and in the slots.
typedef struct fsdpi_list {
    int64_t shard_numel;  // S
    int64_t packed_numel; // K
    int64_t base;         // in the flat block
} fsdpi_list;

/* The parameters of a unit that are stored in one dtype and gathered in one dtype; a parameter with
   an extension is a part of its own. Offsets are in elements of param_dtype. Most units have one
   part. */
typedef struct fsdpi_part {
    fsdp_dtype dtype, param_dtype;
    fsdpi_param *extended; // its only parameter, or NULL
    int num_train;
    fsdpi_list train, frozen;
    int64_t slot, grad; // where it begins in GATHER and GRAD
    int64_t reduce;     // where its shards begin in one rank's part of the reduction
    int num_gather;     // segments of it in the unit's all_gather
    fsdpi_work copy_in, copy_out, chunk_cat, acc, red_out, rescale; // blocks
} fsdpi_part;

struct fsdp_unit {
    fsdp_model *model;
    char *name;
    void *user;
    int index, num_params, num_train, num_parts, train_parts; // train_parts: with trainables
    uint64_t desc_hash; // of the name and of all that ranks must have given alike
    fsdpi_param *params;
    fsdpi_part *parts; // [num_params] places
    fsdp_mesh_info info;
    fsdp_comm *reduce_comm, *replicate_comm, *slice_comm; // info.shard_comm gathers
    fsdp_dtype policy_dtype, output_dtype;                // param_dtype and output_dtype as given
    int keep_inputs;                                      // activations are not cast
    fsdp_dtype policy_reduce, reduce_dtype;               // as given; as it is
    fsdp_dtype gather_dtype;                              // U8: several parts, gathered as bytes
    // Options.
    int slices;                // n of reshard_after_forward = n, as made; 0: another mode
    int reshard_after_forward; // FSDP_RESHARD_ALWAYS or _NEVER, or n
    uint8_t reshard_after_backward, sync, all_reduce, unshard_in_backward, reduce_unused;
    double divide_factor;    // 0: the number of ranks
    double before;           // what gradients that wait in rin or rout have been divided by
    int32_t *prefetch[2];    // indices of units: forward, backward
    int32_t num_prefetch[2]; // 0: none, or the implicit one
    fsdp_all_reduce_hook all_reduce_hook;
    void *all_reduce_user;
    fsdp_custom_comm custom[2]; // all_gather, reduce_scatter; NULL: the backend's
    void *custom_user[2];
    // State.
    uint8_t state, storage, stale;
    uint8_t ahead;        // gathered by a prefetch that nobody waited for yet
    uint8_t counted;      // counts of users came with this step's reduction
    uint8_t has_grad;     // the shard gradient holds a reduced gradient
    uint8_t grad_is_zero; // it holds zeros
    uint8_t grad_alias;   // gradients are written straight into the shard gradient
    int32_t forwards;     // grad-enabled ones that have not run backward: n of the table
    int32_t last_order;   // newest entry in the record of forwards, or -1
    fsdp_buf *gather, *slice, *grad, *rin, *rout; // slots it holds
    // Layout.
    int64_t slot_bytes, grad_bytes, slice_bytes; // of GATHER, GRAD, SLICE
    int64_t train_numel;                         // shards of the trainables of all parts
    int64_t reduce_numel;         // W * (train_numel + users): RIN, and the first part of GRAD
    int64_t users_offset;         // in GRAD and RIN: row k of `num_train` flags for rank k
    int64_t users_base;           // of the counts, in the block of shard gradients
    int users_part;               // the part in whose block that is: the first with trainables
    int classes[FSDP_POOL_COUNT]; // index in model->classes, -1: none
    void *lists;                  // one allocation for what follows, made at commit
    fsdpi_work all_gather, slice_gather, reduce_scatter, to_rout; // segments
    fsdpi_work slice_copy, partial, users; // blocks; partial: the whole reduce output
    char *flags,
        *wide_flags;   // num_train flags in param_dtype and in reduce_dtype: what `users` copies
    double flag_value; // of those that are not zero
    int flags_read;    // a copy of them may not be done yet
    int pad_rin;       // staging has padding that no block covers
};

typedef struct fsdpi_flat_block { // shards and shard gradients of one dtype
    int64_t train_numel;          // with alignment
    int64_t numel;                // train_numel + frozen
    int64_t grad_numel;           // train_numel + user counts
    fsdp_buf *shard, *grad;
    fsdp_buf *old_shard, *old_grad; // of the layout before, until what they hold has moved
    char *users;                    // the user counts, where the host can read them
} fsdpi_flat_block;

typedef struct fsdpi_forward { // one entry of the record of forwards
    fsdp_unit *unit;
    int32_t previous; // the unit's entry before
} fsdpi_forward;

typedef struct fsdpi_owned { // an extension's object that dies with the model
    void *object;
    void (*destroy)(void *object);
    struct fsdpi_owned *next;
} fsdpi_owned;

struct fsdp_model {
    fsdp_world *world;
    fsdp_model_desc desc; // resolved
    fsdp_mesh *own_mesh;  // made when the desc gave none
    fsdp_mesh_info info;
    fsdp_comm *shard_reduce_comm;
    int mixed;      // a unit has another mesh
    int grad_hooks; // post_accumulate hooks have been set
    fsdp_unit **units;
    int num_units, cap_units, num_params;
    fsdpi_flat_block flats[FSDP_DTYPE_COUNT];
    fsdpi_class *classes;
    int num_classes, cap_classes;
    int committed;
    int dry;      // prediction: count memory, run nothing
    int backward; // the phase
    int grad_enabled, is_last_backward;
    uint8_t call_state; // training state that ops of the current call are labelled with
    uint64_t seq, step, release_seq;
    uint64_t layout;     // commits so far: extensions see by it that everything has moved
    int64_t ahead_bytes; // slots of units that are `ahead`
    fsdpi_forward *order;
    int num_order, cap_order;
    fsdp_status hook_status; // first failed hook since finalize
    char hook_error[FSDPI_TEXT];
    fsdp_buf *scalar;       // one f64: sum or maximum of the last clip
    double norm_type;       // of that; 0: none yet
    fsdp_buf *full_scratch; // steps of param_full, from its first call on
    char *full_copy;        // of full_scratch, where the host cannot read that
    fsdp_seg full_seg;      // of the current step
    fsdp_block full_block;
    void *undefined; // what getters give in a failed world
    size_t undefined_bytes;
    fsdp_block *norm_blocks; // [num_params] of the norm, [num_params] of what clip scales
    fsdp_driver driver;
    fsdp_counters counters;
    int64_t host_bytes;
    int32_t pool_slots[FSDP_POOL_COUNT];
    int64_t pool_bytes[FSDP_POOL_COUNT];
    fsdpi_owned *owned;
    fsdp_model *next;
};

/* ==== core/error.h ==========================================================================
   error texts, and the way out for every message */

// Owns: error texts and the way out for every message. Invariant: the first failure of a world
// stays; later calls return it. The only writable static is a thread's text for failures without a
// world.

static __thread char fsdpi_thread_error[FSDPI_TEXT];

static void fsdpi_stderr_log(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)user;
    if (rank >= 0) fprintf(stderr, "[fsdp r%d] %s\n", rank, text);
    else fprintf(stderr, "[fsdp] %s\n", text);
}

static void fsdpi_log(const fsdp_world *w, int level, fsdp_status code, const char *text) {
    if (w && level > w->log_level) return;
    if (w) (w->boot.logger.log)(level, code, w->rank, text, w->boot.logger.user);
    else fsdpi_stderr_log(level, code, -1, text, NULL);
}

static void fsdpi_set_error(fsdp_world *w, const char *text) {
    snprintf(w ? w->error : fsdpi_thread_error, FSDPI_TEXT, "%s", text);
}

// Record and log a failure; the world goes on. Returns status.
FSDP_PRINTF(3, 4)
static fsdp_status fsdpi_fail(fsdp_world *w, fsdp_status status, const char *fmt, ...) {
    char text[FSDPI_TEXT];
    int used = w && w->rank >= 0 ? snprintf(text, sizeof text, "rank %d: ", w->rank) : 0;
    va_list args;
    va_start(args, fmt);
    vsnprintf(text + used, sizeof text - (size_t)used, fmt, args);
    va_end(args);
    fsdpi_set_error(w, text);
    fsdpi_log(w, FSDP_LOG_ERROR, status, text);
    return status;
}

static fsdp_status fsdpi_null(fsdp_world *w, const char *what) {
    return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "%s: an argument is NULL", what);
}

// Abort the world with a finished text: sticky here, and told to the peers. The first failure
// stays, and its text is there before its status can be seen.
static fsdp_status fsdpi_world_fail(fsdp_world *w, fsdp_status status, const char *text) {
    fsdpi_lock(&w->fail_lock);
    fsdp_status earlier = (fsdp_status)w->failed;
    if (!earlier) {
        snprintf(w->failure, sizeof w->failure, "%s", text);
        FSDPI_STORE(&w->failed, (uint32_t)status);
    }
    fsdpi_unlock(&w->fail_lock);
    if (earlier) return earlier;
    fsdpi_log(w, FSDP_LOG_ERROR, status, text);
    if (w->comm) w->comm_ops->abort(w->comm, status, text);
    return status;
}

// A rank that cannot go on inside a collective call must not leave the others waiting.
static fsdp_status fsdpi_fail_together(fsdp_world *w, fsdp_status status) {
    return status == FSDP_OK || w->size == 1 ? status : fsdpi_world_fail(w, status, w->error);
}

// A device that does not end its work ends the world: frees leave memory alone from then on, and
// fills leave it dirty.
static fsdp_status fsdpi_fail_stuck(fsdp_world *w, fsdp_status status) {
    return FSDPI_LOAD(&w->stuck) ? fsdpi_world_fail(w, status, w->error) : status;
}

static fsdp_status fsdpi_failed(const fsdp_world *w) { return (fsdp_status)FSDPI_LOAD(&w->failed); }

/* Copies a desc into a zeroed struct of this header's size. An older program's struct is shorter:
   its size says so, and its end canary is then the last thing in it. */
static fsdp_status fsdpi_desc_read(fsdp_world *w, void *dst, const void *src, size_t size,
                                   const char *what) {
    uint32_t given, canary;
    uint64_t end;
    memset(dst, 0, size);
    if (!src) return FSDP_OK;
    memcpy(&given, src, sizeof given);
    memcpy(&canary, (const char *)src + sizeof given, sizeof canary);
    if (given == 0) given = (uint32_t)size;
    if (given > size || given < 24)
        return fsdpi_fail(
            w, FSDP_ERR_INVALID_ARG,
            "%s.size is %u, expected 0 or at most %u: zero the struct before filling it, and build "
            "with the header of the library",
            what, given, (unsigned)size);
    memcpy(&end, (const char *)src + given - sizeof end, sizeof end);
    if (canary || end)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "%s: a canary is not 0: zero the struct before filling it", what);
    memcpy(dst, src, given - sizeof end);
    return FSDP_OK;
}

#if defined(__GLIBC__)
extern int fsdpi_backtrace(void **frames, int size) __asm__("backtrace");
extern char **fsdpi_backtrace_symbols(void *const *frames, int size) __asm__("backtrace_symbols");
#endif

/* An invariant of the library does not hold: log "[Rank r]", the text and a backtrace, and abort
   the world. Such a failure usually hits one rank only and would look like a time-out elsewhere.
   Source: torch: _raise_assert_with_print. */
static FSDPI_NOINLINE fsdp_status fsdpi_assert_failed(fsdp_world *w, const char *where,
                                                      const char *what) {
    char text[FSDPI_TEXT];
    snprintf(text, sizeof text, "[Rank %d] %s: %s does not hold", w->rank, where, what);
#if defined(__GLIBC__)
    void *frames[32];
    int num = fsdpi_backtrace(frames, 32);
    char **names = fsdpi_backtrace_symbols(frames, num);
    for (int i = 0; names && i < num; i++)
        fsdpi_log(w, FSDP_LOG_ERROR, FSDP_ERR_INTERNAL, names[i]);
    free(names);
#endif
    return fsdpi_world_fail(w, FSDP_ERR_INTERNAL, text);
}

#ifndef FSDP_ASSERT
#define FSDP_ASSERT(world, condition)                                                              \
    ((condition) ? FSDP_OK : fsdpi_assert_failed((world), __func__, #condition))
#endif

/* ==== core/alloc.h ==========================================================================
   host memory, of a world and of a model */

// Owns: host memory. Every block is zero-filled, aligned to 64 bytes, and remembers its size, so
// that the allocator of the desc gets back what it gave.

#define FSDPI_ALIGN 64

static void *fsdpi_libc_alloc(size_t size, size_t align, void *user) {
    (void)user;
    char *raw = (char *)malloc(size + align + sizeof(void *)); // strict C99 hides posix_memalign
    if (!raw) return NULL;
    uintptr_t at = ((uintptr_t)raw + sizeof(void *) + align - 1) & ~(uintptr_t)(align - 1);
    memcpy((char *)at - sizeof raw, &raw, sizeof raw);
    return (char *)at;
}

static void fsdpi_libc_free(void *ptr, size_t size, void *user) {
    void *raw;
    (void)size, (void)user;
    memcpy(&raw, (char *)ptr - sizeof raw, sizeof raw);
    free(raw);
}

static void *fsdpi_alloc(const fsdp_allocator *a, size_t size) {
    if (size > SIZE_MAX - 2 * FSDPI_ALIGN) return NULL;
    size += FSDPI_ALIGN;
    char *raw = (char *)a->alloc(size, FSDPI_ALIGN, a->user);
    if (!raw) return NULL;
    memset(raw, 0, size);
    memcpy(raw, &size, sizeof size);
    return raw + FSDPI_ALIGN;
}

static size_t fsdpi_alloc_size(const void *ptr) {
    size_t size;
    memcpy(&size, (const char *)ptr - FSDPI_ALIGN, sizeof size);
    return size;
}

static FSDPI_NOINLINE void fsdpi_free(const fsdp_allocator *a, void *ptr) {
    if (ptr) a->free((char *)ptr - FSDPI_ALIGN, fsdpi_alloc_size(ptr), a->user);
}

static void *fsdpi_model_alloc(fsdp_model *m, size_t size) {
    void *ptr = fsdpi_alloc(&m->world->boot.allocator, size);
    if (!ptr) return NULL;
    m->host_bytes += (int64_t)fsdpi_alloc_size(ptr);
    m->counters.allocations++;
    return ptr;
}

static FSDPI_NOINLINE void fsdpi_model_free(fsdp_model *m, void *ptr) {
    if (!ptr) return;
    m->host_bytes -= (int64_t)fsdpi_alloc_size(ptr);
    fsdpi_free(&m->world->boot.allocator, ptr);
}

// Room for one more element; the array may move. On failure nothing changes.
static int fsdpi_grow(fsdp_model *m, void **array, int count, int *cap, size_t size) {
    if (count < *cap) return 1;
    int wanted = *cap ? 2 * *cap : 8;
    void *bigger = fsdpi_model_alloc(m, (size_t)wanted * size);
    if (!bigger) return 0;
    if (count) memcpy(bigger, *array, (size_t)count * size);
    fsdpi_model_free(m, *array);
    *array = bigger;
    *cap = wanted;
    return 1;
}

static FSDPI_UNUSED fsdp_status fsdpi_model_own(fsdp_model *m, void *object,
                                                void (*destroy)(void *object)) {
    fsdpi_owned *entry = (fsdpi_owned *)fsdpi_model_alloc(m, sizeof *entry);
    if (!entry)
        return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "no memory for an extension's object");
    entry->object = object;
    entry->destroy = destroy;
    entry->next = m->owned;
    m->owned = entry;
    return FSDP_OK;
}

static FSDPI_UNUSED void fsdpi_model_disown(fsdp_model *m, void *object) {
    for (fsdpi_owned **at = &m->owned; *at; at = &(*at)->next) {
        if ((*at)->object != object) continue;
        fsdpi_owned *entry = *at;
        *at = entry->next;
        fsdpi_model_free(m, entry);
        return;
    }
}

/* ==== core/launch.h =========================================================================
   who am I, and where do we meet: rank, size, the job's name and the
   store's address from a launcher's environment */

// NULL: not set, or empty.
static const char *fsdpi_env(const char *name) {
    const char *text = name ? getenv(name) : NULL;
    return text && *text ? text : NULL;
}

static fsdp_status fsdpi_env_int(fsdp_world *w, const char *name, int min, int *out, int *found) {
    const char *text = fsdpi_env(name);
    *found = text != NULL;
    if (!*found) return FSDP_OK;
    char *end;
    long value = strtol(text, &end, 10);
    if (*end || value < min || value > 0x7FFFFFFF)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "environment variable %s is '%s', expected an integer of at least %d",
                          name, text, min);
    *out = (int)value;
    return FSDP_OK;
}

// What launchers set. The first one whose rank and `needs` are set is taken: mpirun's variables
// before those of the srun that started its daemons. Slurm sets rank and size for the script of a
// batch job as well; only a step of srun has a step id.
typedef struct fsdpi_launcher {
    const char *rank, *size, *local, *needs;
    const char *here, *hosts; // how many ranks this host has, how many hosts the job; or NULL
    const char *job[4];       // parts of a name that is equal on all ranks and unique on the host
} fsdpi_launcher;

static const fsdpi_launcher fsdpi_launchers[] = {
    {"RANK",
     "WORLD_SIZE",
     "LOCAL_RANK",
     "RANK",
     "LOCAL_WORLD_SIZE",
     NULL,
     {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
    {"OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     NULL,
     {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", NULL, NULL}},
    {"MV2_COMM_WORLD_RANK",
     "MV2_COMM_WORLD_SIZE",
     "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE",
     NULL,
     {"PMI_JOBID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"}},
    {"PMI_RANK",
     "PMI_SIZE",
     "MPI_LOCALRANKID",
     "PMI_RANK",
     "MPI_LOCALNRANKS",
     NULL,
     {"PMI_JOBID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"}},
    {"FLUX_TASK_RANK",
     "FLUX_JOB_SIZE",
     "FLUX_TASK_LOCAL_ID",
     "FLUX_TASK_RANK",
     NULL,
     "FLUX_JOB_NNODES",
     {"FLUX_JOB_ID", NULL, NULL, NULL}},
    {"SLURM_PROCID",
     "SLURM_STEP_NUM_TASKS",
     "SLURM_LOCALID",
     "SLURM_STEP_NUM_TASKS",
     NULL,
     "SLURM_STEP_NUM_NODES",
     {"SLURM_JOB_ID", "SLURM_STEP_ID", NULL, NULL}},
    {"SLURM_PROCID",
     "SLURM_NTASKS",
     "SLURM_LOCALID",
     "SLURM_STEP_ID",
     NULL,
     "SLURM_NNODES",
     {"SLURM_JOB_ID", "SLURM_STEP_ID", NULL, NULL}},
};

static const fsdpi_launcher *fsdpi_launcher_find(void) {
    const size_t count = sizeof fsdpi_launchers / sizeof *fsdpi_launchers;
    for (size_t i = 1; i < count && !fsdpi_env("RANK") && !fsdpi_env("WORLD_SIZE"); i++)
        if (fsdpi_env(fsdpi_launchers[i].rank) && fsdpi_env(fsdpi_launchers[i].needs))
            return &fsdpi_launchers[i];
    return &fsdpi_launchers[0];
}

// Rank and size; neither set: a world of one.
static fsdp_status fsdpi_env_ranks(fsdp_world *w, fsdp_world_desc *d) {
    const fsdpi_launcher *l = fsdpi_launcher_find();
    int rank = 0, size = 1, local = 0, has_rank, has_size, has_local;
    fsdp_status status = fsdpi_env_int(w, l->rank, 0, &rank, &has_rank);
    if (!status) status = fsdpi_env_int(w, l->size, 1, &size, &has_size);
    if (!status) status = fsdpi_env_int(w, l->local, 0, &local, &has_local);
    if (status) return status;
    if (has_rank != has_size)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "environment variable %s is set but %s is not: a launcher sets both",
                          has_rank ? l->rank : l->size, has_rank ? l->size : l->rank);
    if (rank >= size)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "environment variable %s is %d, but %s is %d: expected less", l->rank,
                          rank, l->size, size);
    d->rank = rank;
    d->world_size = size;
    d->local_rank = has_local ? local : rank;
    return FSDP_OK;
}

// A name that is equal on all ranks of the job and unique on the host.
static fsdp_status fsdpi_job_name(fsdp_world *w, const fsdp_world_desc *d, char *out, size_t cap) {
    const char *job = d->job ? d->job : fsdpi_env("FSDP_JOB_ID");
    const fsdpi_launcher *l = fsdpi_launcher_find();
    int used = 0, parts = 0;
    if (job) used = snprintf(out, cap, "%s", job);
    for (int i = 0; i < 4 && !job; i++) {
        const char *part = fsdpi_env(l->job[i]);
        if (used >= 0 && (size_t)used < cap)
            used += snprintf(out + used, cap - (size_t)used, "%s%s", i ? ":" : "",
                             part ? part : "");
        parts += part && strcmp(l->job[i], "MASTER_ADDR") != 0;
    }
    if (!job && !parts) { // a place where ranks meet is as good as a name
        job = d->store ? d->store : fsdpi_env("FSDP_STORE");
        if (job && strcmp(job, "host:") == 0) job = NULL;
        if (job) used = snprintf(out, cap, "%s", job);
    }
    if (!job && !parts && d->world_size > 1)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "%d ranks need a common name: start the program with tools/fsdprun, "
                          "torchrun, mpirun or srun, or set MASTER_PORT or FSDP_JOB_ID, or "
                          "fsdp_world_desc.job",
                          d->world_size);
    if (used < 0 || (size_t)used >= cap)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "the job's name is longer than %u bytes",
                          (unsigned)cap - 1);
    return FSDP_OK;
}

// A count that a launcher tells; 0: it does not, or this is no count.
static long fsdpi_env_count(const char *name) {
    const char *text = fsdpi_env(name);
    long value = text ? strtol(text, NULL, 10) : 0;
    return value > 0 ? value : 0;
}

// Whether the launcher tells that it has started some of `size` ranks on other hosts.
static int fsdpi_launcher_is_spread(const fsdpi_launcher *l, int size) {
    const long here = fsdpi_env_count(l->here);
    return fsdpi_env_count(l->hosts) > 1 || (here && here < size);
}

// The first host of Slurm's list, "n[01-04,7]r[3-4],x7": n01r3. 0: there is none, or no room.
static int fsdpi_first_host(const char *list, char *out, size_t cap) {
    size_t used = 0;
    int depth = 0, skip = 0; // in brackets, and there behind the first element
    for (; *list && (depth || *list != ','); list++) {
        if (*list == '[' && !depth) depth = 1;
        else if (*list == ']' && depth) depth = skip = 0;
        else if (depth && (*list == ',' || *list == '-')) skip = 1;
        else if (!skip && used + 1 < cap) out[used++] = *list;
        else if (!skip) return 0;
    }
    out[used] = 0;
    return used > 0 && !depth;
}

/* Where ranks of a step of srun on several hosts meet: at the first host of its list, where srun
   puts rank 0 unless it is told otherwise, at a port that other steps hardly have,
   below those that the system hands out. */
static int fsdpi_slurm_store(char *out, size_t cap) {
    const char *list = fsdpi_env("SLURM_STEP_NODELIST");
    char host[256];
    if (!list) list = fsdpi_env("SLURM_JOB_NODELIST");
    if (!list || !fsdpi_first_host(list, host, sizeof host)) return 0;
    const uint64_t job = (uint64_t)fsdpi_env_count("SLURM_JOB_ID");
    const uint64_t step = (uint64_t)fsdpi_env_count("SLURM_STEP_ID");
    return snprintf(out, cap, "tcp://%s:%d", host, 20000 + (int)((job * 131 + step) % 12000));
}

/* The address where ranks meet, for backends that need one, in the form of fsdp_world_desc.store.
   "": they are on several hosts and the launcher does not say where; no fault of those who do not
   ask, so who needs an address says what to do: FSDPI_NO_STORE. */
#define FSDPI_NO_STORE                                                                             \
    "ranks are on several hosts and the launcher does not name the one of rank 0: set MASTER_ADDR" \
    " (that host) and MASTER_PORT (a free port there) on all ranks, as in 'mpirun -x "             \
    "MASTER_ADDR=HOST -x MASTER_PORT=29500 ...', or FSDP_STORE=tcp://HOST:PORT"

static fsdp_status fsdpi_store_name(fsdp_world *w, const fsdp_world_desc *d, char *out,
                                    size_t cap) {
    const char *store = d->store && *d->store ? d->store : fsdpi_env("FSDP_STORE");
    const char *host = fsdpi_env("MASTER_ADDR"), *port = fsdpi_env("MASTER_PORT");
    const fsdpi_launcher *l = fsdpi_launcher_find();
    int used = 0;
    if (store) {
        used = snprintf(out, cap, "%s", store);
    } else if (host && port) {
        const int bare = strchr(host, ':') && *host != '['; // an IPv6 address
        used = snprintf(out, cap, "tcp://%s%s%s:%s", bare ? "[" : "", host, bare ? "]" : "", port);
    } else if (fsdpi_launcher_is_spread(l, d->world_size)) {
        if (strcmp(l->rank, "SLURM_PROCID") == 0) used = fsdpi_slurm_store(out, cap);
        if (used == 0) *out = 0;
    } else {
        used = snprintf(out, cap, "host:");
    }
    if (used < 0 || (size_t)used >= cap)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "the address where ranks meet is longer than %u bytes: give a shorter "
                          "fsdp_world_desc.store, FSDP_STORE or MASTER_ADDR",
                          (unsigned)cap - 1);
    return FSDP_OK;
}

// Whether the launcher has started ranks of this world on other hosts too.
static int fsdpi_env_is_spread(const fsdp_world *w, const fsdp_world_desc *d) {
    const fsdpi_launcher *l = fsdpi_launcher_find();
    if (d->threads || d->job || strncmp(w->store, "host:", 5) == 0) return 0;
    return fsdpi_env_count(l->size) == d->world_size && fsdpi_launcher_is_spread(l, d->world_size);
}

static fsdp_status fsdpi_env_log_level(fsdp_world *w, int *out) {
    static const char *const names[] = {"", "error", "warn", "info", "none"};
    const char *text = getenv("FSDP_LOG_LEVEL");
    *out = FSDP_LOG_WARN;
    if (!text || !*text) return FSDP_OK;
    for (int i = FSDP_LOG_ERROR; i <= FSDP_LOG_NONE; i++)
        if (strcmp(text, names[i]) == 0) {
            *out = i;
            return FSDP_OK;
        }
    return fsdpi_fail(
        w, FSDP_ERR_INVALID_ARG,
        "environment variable FSDP_LOG_LEVEL is '%s', expected error, warn, info or none", text);
}

// Backends, and the devices whose memory their collectives work on.
#if !defined(FSDP_BACKEND_SHM) && !defined(FSDP_BACKEND_GLOO) && !defined(FSDP_BACKEND_NCCL) &&    \
    !defined(FSDP_NO_BACKEND)
#define FSDP_BACKEND_SHM 1
#endif
#ifdef FSDP_BACKEND_SHM

/* ==== backends/fsdp_shm.h ===================================================================
   the default backend of fsdp.h: ranks of one Linux host, as processes or as threads

   Nothing to install, nothing to configure, nothing left behind. Included by fsdp.h itself unless
   another backend is selected; including it by hand does no harm.

   How it works
   - All ranks see one block of common memory: processes an anonymous file (memfd) that rank 0 hands
     to the others over an abstract unix socket named from the job's id and the user; threads the
     heap. Both vanish with the last rank, however it ends; the size of /dev/shm does not matter.
   - Ranks that use memory together have allocated it in the same order; then it lies at the same
     place in the arena of each, and a process maps the parts of all ranks side by side, so that a
     peer's copy of my pointer is my pointer plus a multiple of the part's size. Each rank reads its
     peers' memory directly, once.
   - A collective is: publish what I am about to do, wait for all, compare, move data, wait for all.
   - Sums run in rank order (fsdpi_reduce): the same bits whoever computes them, at every run.
   - Waits have a deadline, and every 50 ms look for peers that died: each process holds a record
     lock on its byte of the file, which the kernel drops when the process ends in any way. Unlike a
     process id it cannot be mistaken for a later process, and it needs no /proc. */

#ifndef FSDP_SHM_H
#define FSDP_SHM_H
#ifndef FSDP_MATH_ONLY

#ifdef __cplusplus
extern "C" {
#endif

// clang-format off
/* fsdp_shm_comm_ops - the table of this backend, named "shm"
   Result      never NULL; static
   open        boot->threads NULL: a process per rank; else a thread per rank. After a failure
               error_text(NULL) has the text, for the calling thread
   split       blocks until every rank of the parent has come; OUT_OF_MEMORY there aborts the world
   run         of different comms may be called from different threads of a rank at the same time.
               What peers read (src of gather and scatter, dst of the others and in place) has to
               lie in memory of alloc, unless the comm has one rank. INVALID_ARG and UNSUPPORTED are
               found before anybody is told of the call: the comm goes on, peers that came wait
   alloc       does not wait; takes memory for good, so that its use cannot fail later; zero-filled
   close       groups before their world; peers that wait for this rank get PEER_LOST
   abort       from any thread      poll never blocks
   Limits      FSDPI_MAX_SRCS ranks, one user, Linux
   Collective  no      Blocks no      Allocates no      Thread any */
// clang-format on
FSDP_API const fsdp_comm_ops *fsdp_shm_comm_ops(void);

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_SHM_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_SHM_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_SHM_IMPLEMENTED

/* ==== backends/fsdp_record.h ================================================================
   what backends share: the record of what a rank is about to do and the words in
   which it is told, the part of a comm that every backend has, the checks of a collective's
   arguments, the list of allocations, and how much memory is left

   Included by the backends' headers. It moves no data and waits for nobody. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_RECORD_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_RECORD_IMPLEMENTED

#ifdef __cplusplus
extern "C" {
#endif

// Operations that are not fsdp_coll.
enum { FSDPI_OPEN = FSDP_OP_COUNT + 1, FSDPI_SPLIT, FSDPI_CLOSE };

/* What a rank is about to do. Ranks compare `key`, a hash of everything that has to agree; the rest
   is there to say what differs. Sent and shared as it is: no pointers, no padding. */
typedef struct fsdpi_record {
    uint64_t key, fingerprint, count, segs, seq;
    uint64_t place;          // backends that read peers' memory: where the buffer is
    uint64_t block, members; // split: where the new group's block is, who is in it
    int64_t since_ns;        // when the rank came
    int32_t root;
    uint32_t num_segs;
    uint8_t kind, dtype, out_dtype, redop, in_place, state, reserved[2];
    char what[48], comm[16]; // cut if they are longer
} fsdpi_record;

#define FSDPI_MAX_RANKS    4096 // of a comm; backends that reduce themselves: FSDPI_MAX_SRCS
#define FSDPI_RECORD_WORDS (sizeof(fsdpi_record) / sizeof(uint64_t))
#define FSDPI_REASON       800

// What a rank does, for whoever asks why it is not elsewhere.
typedef struct fsdpi_trace {
    uint64_t last[FSDPI_RECORD_WORDS]; // its last operation on any comm
    uint32_t busy, writing;            // in how many operations it is; last is being written
} fsdpi_trace;

// Why a world has ended. The first one stands, on all ranks.
typedef struct fsdpi_verdict {
    int32_t status, rank; // rank: that told it; -1: the store, or this rank by itself
    int32_t lost;         // the rank that was lost, or -1
    char subject[192], reason[FSDPI_REASON]; // subject: the operation, "" if no single one
} fsdpi_verdict;

// The part of a comm that every backend has; its first member.
typedef struct fsdpi_comm {
    const fsdp_boot *boot;
    int index, size;                // this rank's place among the members
    int32_t ranks[FSDPI_MAX_RANKS]; // world ranks of the members
    fsdpi_record now;
    char error[1280]; // text of the last failure
} fsdpi_comm;

/* -------------------------------------------------------------------------------------------- */
// >>record_text
// Owns: the words.

static int64_t fsdpi_boot_now(const fsdp_boot *boot) {
    return boot->clock.now_ns(boot->clock.user);
}

// Memory of a device that does not end its work is left to the end of the process.
static FSDPI_UNUSED int fsdpi_boot_is_stuck(const fsdp_boot *boot) {
    return boot->stuck && FSDPI_LOAD(boot->stuck);
}

static FSDPI_UNUSED void fsdpi_boot_log(const fsdp_boot *boot, int level, const char *text) {
    if (boot->logger.log && level <= boot->log_level)
        (boot->logger.log)(level, FSDP_OK, boot->rank, text, boot->logger.user);
}

// "all_gather of 'h.3' on 'shard' (forward, op 17)"
static void fsdpi_say_op(fsdpi_text *t, const fsdpi_record *r) {
    static const char *const states[FSDP_STATE_COUNT] = {"", "forward, ", "pre_backward, ",
                                                         "post_backward, "};
    if (r->kind == FSDPI_OPEN) fsdpi_say(t, "open of job '%s'", r->what);
    else if (r->kind == FSDPI_SPLIT) fsdpi_say(t, "split into '%s'", r->what);
    else if (r->kind == FSDPI_CLOSE) fsdpi_say(t, "close");
    else fsdpi_say(t, "%s of '%s'", fsdp_op_name(r->kind), r->what);
    if (r->comm[0]) fsdpi_say(t, " on '%s'", r->comm);
    if (r->kind < FSDP_OP_COUNT)
        fsdpi_say(t, " (%sop %llu)", r->state < FSDP_STATE_COUNT ? states[r->state] : "",
                  (unsigned long long)r->seq);
}

// "rank 2" or "ranks 0, 1, 3": the members that are marked.
static void fsdpi_say_ranks(fsdpi_text *t, const fsdpi_comm *c, const uint8_t *marked) {
    int total = 0, said = 0;
    for (int k = 0; k < c->size; k++) total += marked[k] != 0;
    fsdpi_say(t, total > 1 ? "ranks" : "rank");
    for (int k = 0; k < c->size && said < 16; k++)
        if (marked[k]) fsdpi_say(t, "%s %d", said++ ? "," : "", (int)c->ranks[k]);
    if (total > said) fsdpi_say(t, " and %d more", total - said);
}

/* "ranks 1, 2 have not come within 2.0 s; rank 1: its last operation was ...". say_last tells what
   a rank of the world did last. */
static void fsdpi_say_late(fsdpi_text *t, fsdpi_comm *c, const uint8_t *missing, const char *verb,
                           void (*say_last)(fsdpi_text *t, fsdpi_comm *c, int rank)) {
    int total = 0, said = 0;
    for (int k = 0; k < c->size; k++) total += missing[k] != 0;
    fsdpi_say_ranks(t, c, missing);
    fsdpi_say(t, " %s not %s within %.1f s", total > 1 ? "have" : "has", verb,
              (double)c->boot->timeout_ns * 1e-9);
    for (int k = 0; k < c->size && said < 3; k++) {
        if (!missing[k]) continue;
        fsdpi_say(t, "; ");
        if (total > 1) fsdpi_say(t, "rank %d: ", (int)c->ranks[k]);
        say_last(t, c, c->ranks[k]);
        said++;
    }
}

// "it is in all_gather of 'h.3' (forward, op 17), for 1.2 s"; past: of a rank that is no more.
static void fsdpi_say_done(fsdpi_text *t, int busy, int past, const char *operation,
                           int64_t since_ns) {
    double since = (double)since_ns * 1e-9;
    if (busy) fsdpi_say(t, "it %s in %s, for %.1f s", past ? "was" : "is", operation, since);
    else fsdpi_say(t, "its last operation was %s, %.1f s ago", operation, since);
}

// A failure of this call on this rank alone. The text goes where error_text finds it.
static FSDP_PRINTF(3, 4) fsdp_status
    fsdpi_comm_error(fsdpi_comm *c, fsdp_status status, const char *format, ...) {
    char reason[FSDPI_REASON];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    fsdpi_text t = {c->error, sizeof c->error, 0};
    fsdpi_say(&t, "rank %d: ", c->boot->rank);
    fsdpi_say_op(&t, &c->now);
    fsdpi_say(&t, ": %s", reason);
    return status;
}

// What this rank does, as the subject of a verdict.
static void fsdpi_comm_subject(const fsdpi_comm *c, char *subject, size_t cap) {
    fsdpi_text t = {subject, cap, 0};
    fsdpi_say_op(&t, &c->now);
}

// The status and text of a failed world for this rank: who I am, what I was in, what happened.
static fsdp_status fsdpi_comm_report(fsdpi_comm *c, const fsdpi_verdict *v) {
    char subject[sizeof v->subject];
    fsdpi_comm_subject(c, subject, sizeof subject);
    if (!v->subject[0] || !strcmp(v->subject, subject))
        return fsdpi_comm_error(c, (fsdp_status)v->status, "%s", v->reason);
    return fsdpi_comm_error(c, (fsdp_status)v->status, "rank %d failed in %s: %s", (int)v->rank,
                            v->subject, v->reason);
}

// A verdict for who was in no operation of the world yet.
static FSDPI_UNUSED void fsdpi_say_verdict(fsdpi_text *t, const fsdpi_verdict *v) {
    if (v->subject[0]) fsdpi_say(t, "rank %d failed in %s: ", (int)v->rank, v->subject);
    if (v->reason[0]) fsdpi_say(t, "%s", v->reason);
    else fsdpi_say(t, "rank %d has aborted the job", (int)v->rank);
}

// The reason of an abort that the user or the core asked for.
static void fsdpi_say_abort(fsdpi_text *t, const fsdp_boot *boot, const char *why) {
    if (!why || strncmp(why, "rank ", 5)) fsdpi_say(t, "aborted by rank %d: ", boot->rank);
    fsdpi_say(t, "%s", why ? why : "no reason given");
}

// Fields in which two calls differ.
static void fsdpi_say_differences(fsdpi_text *t, const fsdpi_record *a, const fsdpi_record *b) {
    const struct {
        int differs;
        const char *name;
    } fields[] = {
        {a->kind != b->kind, "operation"},
        {strcmp(a->what, b->what) != 0, "unit"},
        {a->state != b->state, "state"},
        {a->dtype != b->dtype || a->out_dtype != b->out_dtype, "dtype"},
        {a->count != b->count, "count"},
        {a->segs != b->segs, "segments"},
        {a->root != b->root, "root"},
        {a->redop != b->redop, "reduction"},
        {a->in_place != b->in_place, "in_place"},
        {a->fingerprint != b->fingerprint, "fingerprint"},
        {a->place != b->place, "buffer: alloc was called in another order or with other sizes"},
    };
    const char *comma = " (differs in ";
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (!fields[i].differs) continue;
        fsdpi_say(t, "%s%s", comma, fields[i].name);
        comma = ", ";
    }
    if (comma[0] == ',') fsdpi_say(t, ")");
}

/* "ranks disagree: ranks 0, 2: all_gather of ...; rank 1: ...". record_of gives what a member
   showed. */
static FSDPI_UNUSED void fsdpi_say_disagreement(fsdpi_text *t, const fsdpi_comm *c,
                                                fsdpi_record (*record_of)(const fsdpi_comm *c,
                                                                          int k)) {
    fsdpi_record first = record_of(c, 0);
    fsdpi_say(t, "ranks disagree");
    for (int k = 0; k < c->size; k++) {
        fsdpi_record record = record_of(c, k);
        uint8_t equal[FSDPI_MAX_SRCS];
        int is_first = 1;
        for (int j = 0; j < c->size; j++) {
            equal[j] = record_of(c, j).key == record.key;
            is_first &= !(equal[j] && j < k);
        }
        if (!is_first) continue;
        fsdpi_say(t, k ? "; " : ": ");
        fsdpi_say_ranks(t, c, equal);
        fsdpi_say(t, ": ");
        fsdpi_say_op(t, &record);
        if (record.kind < FSDP_OP_COUNT)
            fsdpi_say(t, ", %llu elements of %s", (unsigned long long)record.count,
                      fsdp_dtype_name(record.dtype));
        fsdpi_say_differences(t, &first, &record);
    }
}

/* Word by word, since the author of an error text may read while the owner writes; the text may
   then mix two operations. Ranks that compare are ordered by a barrier and see whole ones. */
static void fsdpi_record_put(uint64_t *to, const fsdpi_record *record) {
    uint64_t words[FSDPI_RECORD_WORDS];
    memcpy(words, record, sizeof words);
    for (size_t i = 0; i < FSDPI_RECORD_WORDS; i++)
        __atomic_store_n(&to[i], words[i], __ATOMIC_RELAXED);
}

static fsdpi_record fsdpi_record_get(const uint64_t *from) {
    fsdpi_record record;
    uint64_t words[FSDPI_RECORD_WORDS];
    for (size_t i = 0; i < FSDPI_RECORD_WORDS; i++)
        words[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
    memcpy(&record, words, sizeof record);
    record.what[sizeof record.what - 1] = record.comm[sizeof record.comm - 1] = 0;
    return record;
}

static FSDPI_UNUSED void fsdpi_trace_begin(fsdpi_trace *trace, const fsdpi_record *record) {
    __atomic_add_fetch(&trace->busy, 1u, __ATOMIC_RELAXED);
    // Two threads of one rank may be here; the trace need not have both.
    if (__atomic_exchange_n(&trace->writing, 1u, __ATOMIC_ACQUIRE)) return;
    fsdpi_record_put(trace->last, record);
    FSDPI_STORE(&trace->writing, 0u);
}

static FSDPI_UNUSED void fsdpi_trace_end(fsdpi_trace *trace) {
    __atomic_sub_fetch(&trace->busy, 1u, __ATOMIC_RELEASE);
}

// Whether the rank is busy; its last operation as text, and when that began.
static FSDPI_UNUSED int fsdpi_trace_read(const fsdpi_trace *trace, char *text, size_t cap,
                                         int64_t *since_ns) {
    fsdpi_record last = fsdpi_record_get(trace->last);
    fsdpi_text t = {text, cap, 0};
    fsdpi_say_op(&t, &last);
    *since_ns = last.since_ns;
    return FSDPI_LOAD(&trace->busy) > 0;
}

/* -------------------------------------------------------------------------------------------- */
// >>record_check
// Owns: what a call says of itself, and whether its arguments make sense.

static FSDPI_NOINLINE void fsdpi_copy_name(char *to, size_t cap, const char *from) {
    size_t length = from ? strlen(from) : 0;
    memset(to, 0, cap);
    if (length) memcpy(to, from, length < cap ? length : cap - 1);
}

// Fills c->now, but for its key.
static void fsdpi_describe(fsdpi_comm *c, const fsdp_coll *op, const char *what) {
    fsdpi_record *r = &c->now;
    fsdpi_copy_name(r->what, sizeof r->what, what);
    r->fingerprint = r->count = r->segs = r->place = r->seq = r->block = r->members = 0;
    r->kind = r->dtype = r->out_dtype = r->redop = r->in_place = r->state = 0;
    r->root = 0, r->num_segs = 0;
    if (!op) return;
    r->kind = op->kind, r->dtype = op->dtype, r->redop = op->redop, r->in_place = op->in_place,
    r->state = op->state;
    r->fingerprint = op->fingerprint, r->count = op->count, r->seq = op->seq,
    r->num_segs = op->num_segs;
    if (op->kind == FSDP_OP_REDUCE_SCATTER) r->out_dtype = op->out_dtype;
    if (op->kind == FSDP_OP_BROADCAST) r->root = op->root;
}

static void fsdpi_make_key(fsdpi_record *r, const fsdp_coll *op) {
    for (uint32_t s = 0; op && s < op->num_segs && op->segs; s++) {
        r->segs = fsdpi_hash(r->segs, (uint64_t)op->segs[s].shard);
        r->segs = fsdpi_hash(r->segs, (uint64_t)op->segs[s].full);
        r->segs = fsdpi_hash(r->segs, (uint64_t)op->segs[s].count);
    }
    uint64_t bytes, h;
    uint8_t kind = r->kind;
    if (kind == FSDP_OP_RECV) r->kind = FSDP_OP_SEND; // which match each other
    memcpy(&bytes, &r->kind, sizeof bytes); // the six bytes from kind to state, and two zeros
    r->kind = kind;
    h = fsdpi_hash(fsdpi_hash_text(r->what), bytes);
    h = fsdpi_hash(fsdpi_hash(h, r->fingerprint), r->count);
    h = fsdpi_hash(fsdpi_hash(h, r->segs), r->place);
    r->key = fsdpi_hash(h, (uint64_t)(uint32_t)r->root);
}

static fsdp_status fsdpi_check_reduction(fsdpi_comm *c, const fsdp_coll *op) {
    int is_int = op->dtype == FSDP_I32 || op->dtype == FSDP_I64,
        is_float = fsdp_dtype_is_float(op->dtype);
    if (op->kind == FSDP_OP_ALL_REDUCE && !is_int && !is_float)
        return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED, "%s cannot be reduced",
                                fsdp_dtype_name(op->dtype));
    if (op->kind != FSDP_OP_REDUCE_SCATTER) return FSDP_OK;
    int plain = op->out_dtype == op->dtype && op->scale == 1.0 && !op->accumulate;
    if (is_float ? fsdp_dtype_is_float(op->out_dtype) : is_int && plain) return FSDP_OK;
    return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED, "%s cannot be reduced to %s%s",
                            fsdp_dtype_name(op->dtype), fsdp_dtype_name(op->out_dtype),
                            plain ? "" : " with a scale or accumulation");
}

/* Whether the arguments make sense, for a backend that knows `kinds`; and the range of elements
   that peers read, after *shared. */
static fsdp_status fsdpi_check(fsdpi_comm *c, uint32_t kinds, const fsdp_coll *op,
                               const void **shared, int64_t *low, int64_t *high) {
    int is_list = op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER;
    int64_t most = INT64_MAX / 32 / c->size; // elements: sums and bytes of them do not overflow
    if (op->kind >= FSDP_OP_COUNT || !(kinds >> op->kind & 1))
        return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED, "this backend does not know operation %d",
                                op->kind);
    if (!fsdp_dtype_size(op->dtype) || op->count > (uint64_t)most ||
        (is_list && op->num_segs && !op->segs))
        return fsdpi_comm_error(
            c, FSDP_ERR_INVALID_ARG, "dtype %d, %llu elements, %u segments at %p", op->dtype,
            (unsigned long long)op->count, op->num_segs, (const void *)op->segs);
    if (op->kind == FSDP_OP_BROADCAST && (op->root < 0 || op->root >= c->size))
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG, "root is %d, expected 0 to %d",
                                (int)op->root, c->size - 1);
    int is_pair = op->kind == FSDP_OP_SEND || op->kind == FSDP_OP_RECV;
    if (is_pair && (op->root < 0 || op->root >= c->size || op->root == c->index))
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                                "the other member is %d, expected 0 to %d, and not %d",
                                (int)op->root, c->size - 1, c->index);
    fsdp_status status = fsdpi_check_reduction(c, op);
    if (status) return status;
    int from_shard = op->kind == FSDP_OP_ALL_GATHER && !op->in_place;
    int from_src = from_shard || op->kind == FSDP_OP_REDUCE_SCATTER ||
                   op->kind == FSDP_OP_ALL_TO_ALL || op->kind == FSDP_OP_SEND;
    *shared = from_src ? op->src : op->dst;
    *low = is_list ? INT64_MAX : 0;
    *high = is_list ? 0 : (int64_t)op->count * (op->kind == FSDP_OP_ALL_TO_ALL ? c->size : 1);
    for (uint32_t s = 0; is_list && s < op->num_segs; s++) {
        const fsdp_seg *seg = &op->segs[s];
        if (seg->shard < 0 || seg->full < 0 || seg->count < 0 || seg->shard > most ||
            seg->full > most || seg->count > most)
            return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG, "segment %u is {%lld, %lld, %lld}", s,
                                    (long long)seg->shard, (long long)seg->full,
                                    (long long)seg->count);
        int64_t start = from_shard ? seg->shard : seg->full;
        int64_t end = start + (from_shard ? 1 : c->size) * seg->count;
        if (seg->count && start < *low) *low = start;
        if (seg->count && end > *high) *high = end;
    }
    if (*high == 0) *low = 0;
    if (*high > 0 && (!*shared || (!op->dst && op->kind != FSDP_OP_SEND)))
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG, "src is %p and dst %p", op->src, op->dst);
    return FSDP_OK;
}

static fsdp_status fsdpi_check_world(fsdpi_comm *c, int most) {
    if (c->boot->size < 1 || c->boot->rank < 0 || c->boot->rank >= c->boot->size)
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG, "rank %d of %d", c->boot->rank,
                                c->boot->size);
    if (c->boot->size > most)
        return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED, "%d ranks, at most %d", c->boot->size,
                                most);
    c->index = c->boot->rank;
    c->size = c->boot->size;
    for (int k = 0; k < c->size; k++) c->ranks[k] = k;
    return FSDP_OK;
}

/* Checks a new group's members, fills the child from them, and the parent's record with a hash of
   them. Returns the first member's index in the parent; -1, with the text: they make no sense. */
static int fsdpi_split_members(fsdpi_comm *parent, const fsdp_group *g, fsdpi_comm *child) {
    uint64_t h = fsdpi_hash((uint64_t)g->color, (uint64_t)g->size);
    int first = -1, wrong = g->size < 1 || g->size > parent->size || g->index < 0 ||
                            g->index >= g->size || !g->ranks ||
                            g->ranks[g->index] != parent->boot->rank;
    for (int i = 0; !wrong && i < g->size; i++) {
        int at = 0, times = 0;
        while (at < parent->size && parent->ranks[at] != g->ranks[i]) at++;
        for (int j = 0; j < g->size; j++) times += g->ranks[j] == g->ranks[i];
        wrong = at == parent->size || times != 1;
        if (i == 0) first = at;
        child->ranks[i] = g->ranks[i];
        h = fsdpi_hash(h, (uint64_t)g->ranks[i]);
    }
    if (wrong) {
        (void)fsdpi_comm_error(parent, FSDP_ERR_INVALID_ARG,
                               "the group's ranks (%d, this one at index %d) are not different "
                               "members of the parent",
                               g->size, g->index);
        return -1;
    }
    parent->now.members = h;
    child->boot = parent->boot;
    child->index = g->index;
    child->size = g->size;
    fsdpi_copy_name(child->now.comm, sizeof child->now.comm, g->name);
    return first;
}

/* What a split begins with, for backends that move messages: the parent's record, and the block of
   `size` bytes of the new comm, filled so far; NULL where this rank is in none. OUT_OF_MEMORY: the
   caller ends the world, for the others are on their way. INVALID_ARG: the text is the parent's. */
static FSDPI_UNUSED fsdp_status fsdpi_split_begin(fsdpi_comm *parent, const fsdp_group *g,
                                                  size_t size, fsdpi_comm **out) {
    *out = NULL;
    parent->now.key = FSDPI_SPLIT; // names and members differ between groups; that it is one not
    if (g->color < 0) return FSDP_OK;
    fsdpi_comm *child = (fsdpi_comm *)fsdpi_alloc(&parent->boot->allocator, size);
    if (!child) return FSDP_ERR_OUT_OF_MEMORY;
    if (fsdpi_split_members(parent, g, child) < 0) {
        fsdpi_free(&parent->boot->allocator, child);
        return FSDP_ERR_INVALID_ARG;
    }
    fsdpi_describe(child, NULL, g->name);
    child->now.kind = FSDPI_SPLIT;
    *out = child;
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// >>record_memory
// Owns: the list of a world's allocations, and how much memory is left.

// An allocation. A backend that maps the parts of all ranks has them side by side from base on.
typedef struct fsdpi_chunk {
    char *base;
    size_t size, part; // asked for; distance from one rank's part to the next one's
    uint64_t at;       // place among this rank's allocations, the same on all that use it together
} fsdpi_chunk;

typedef struct fsdpi_chunks {
    uint32_t lock; // one thread allocates while another is in a collective
    int count, max;
    fsdpi_chunk *list; // by address
} fsdpi_chunks;

// Index of the last chunk that begins at or before p; -1: none.
static int fsdpi_chunk_before(const fsdpi_chunks *chunks, uintptr_t p) {
    int low = 0, high = chunks->count;
    while (low < high) {
        int middle = (low + high) / 2;
        if ((uintptr_t)chunks->list[middle].base <= p) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

static int fsdpi_chunk_insert(fsdpi_chunks *chunks, const fsdp_allocator *a, fsdpi_chunk chunk) {
    int done = 0;
    fsdpi_lock(&chunks->lock);
    if (chunks->count == chunks->max) {
        int max = chunks->max ? 2 * chunks->max : 32;
        fsdpi_chunk *more = (fsdpi_chunk *)fsdpi_alloc(a, (size_t)max * sizeof *more);
        if (more && chunks->count) memcpy(more, chunks->list, (size_t)chunks->count * sizeof *more);
        if (more) {
            fsdpi_free(a, chunks->list);
            chunks->list = more;
            chunks->max = max;
        }
    }
    if (chunks->count < chunks->max) {
        int i = fsdpi_chunk_before(chunks, (uintptr_t)chunk.base) + 1;
        memmove(chunks->list + i + 1, chunks->list + i, (size_t)(chunks->count - i) * sizeof chunk);
        chunks->list[i] = chunk;
        chunks->count++;
        done = 1;
    }
    fsdpi_unlock(&chunks->lock);
    return done;
}

// Takes out the chunk whose part of this rank begins at ptr.
static int fsdpi_chunk_take(fsdpi_chunks *chunks, int rank, const void *ptr, fsdpi_chunk *out) {
    fsdpi_lock(&chunks->lock);
    int i = fsdpi_chunk_before(chunks, (uintptr_t)ptr);
    int known = i >= 0 &&
                chunks->list[i].base + chunks->list[i].part * (size_t)rank == (const char *)ptr;
    if (known) {
        *out = chunks->list[i];
        chunks->count--;
        memmove(chunks->list + i, chunks->list + i + 1, (size_t)(chunks->count - i) * sizeof *out);
    }
    fsdpi_unlock(&chunks->lock);
    return known;
}

// Finds the allocation of bytes [low, high) after p, all of which have to be this rank's.
static fsdp_status fsdpi_chunk_find(fsdpi_comm *c, fsdpi_chunks *chunks, const fsdp_coll *op,
                                    const void *p, size_t low, size_t high, fsdpi_chunk *out) {
    fsdpi_chunk chunk = {NULL, 0, 0, 0};
    fsdpi_lock(&chunks->lock);
    int i = fsdpi_chunk_before(chunks, (uintptr_t)p + low);
    if (i >= 0) chunk = chunks->list[i];
    fsdpi_unlock(&chunks->lock);
    uintptr_t mine = (uintptr_t)chunk.base + chunk.part * (size_t)c->boot->rank, at = (uintptr_t)p;
    *out = chunk;
    if (chunk.base && at + low >= mine && at + high <= mine + chunk.size) return FSDP_OK;
    return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                            "bytes %llu to %llu of %s are read by peers and do not lie in one "
                            "allocation of this backend's alloc",
                            (unsigned long long)low, (unsigned long long)high,
                            p == op->src ? "src" : "dst");
}

// The number after `key` at the start of a line of a small text file, or -1. "": the first line.
static int64_t fsdpi_read_number(const char *path, const char *key) {
    char line[256];
    int64_t value = -1;
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    while (value < 0 && fgets(line, sizeof line, file)) {
        char *end = line + strlen(key);
        if (!strncmp(line, key, strlen(key)) && strspn(end, " \t0123456789") > 0)
            value = (int64_t)strtoull(end, NULL, 10);
        else if (!*key) break;
    }
    (void)fclose(file);
    return value;
}

// Lowers *least to what a control group and those above it still allow; page cache can be dropped.
static void fsdpi_group_limit(const char *root, const char *path, const char *limit_name,
                              const char *usage_name, int64_t *least) {
    char dir[400], name[480];
    if (snprintf(dir, sizeof dir, "%s%s", root, path) >= (int)sizeof dir) return;
    for (;;) {
        (void)snprintf(name, sizeof name, "%s/%s", dir, limit_name);
        int64_t limit = fsdpi_read_number(name, "");
        (void)snprintf(name, sizeof name, "%s/%s", dir, usage_name);
        int64_t used = fsdpi_read_number(name, "");
        (void)snprintf(name, sizeof name, "%s/memory.stat", dir);
        int64_t cache = fsdpi_read_number(name, "inactive_file ") +
                        fsdpi_read_number(name, "active_file ");
        int64_t left = limit - used + (cache > 0 ? cache : 0);
        if (limit >= 0 && used >= 0 && left < *least) *least = left > 0 ? left : 0;
        char *slash = strrchr(dir, '/');
        if (!slash || slash < dir + strlen(root)) return;
        *slash = 0;
    }
}

// Bytes that can be had before the kernel starts to kill, and whose limit that is.
static int64_t fsdpi_memory_left(const char **whose) {
    char line[400];
    int64_t machine = fsdpi_read_number("/proc/meminfo", "MemAvailable:"), least;
    if (machine < 0) machine = INT64_MAX / 1024;
    least = machine *= 1024;
    FILE *file = fopen("/proc/self/cgroup", "r");
    while (file && fgets(line, sizeof line, file)) {
        char *path = strchr(line, '/');
        line[strcspn(line, "\n")] = 0;
        if (!path) continue;
        if (!strncmp(line, "0::", 3))
            fsdpi_group_limit("/sys/fs/cgroup", path, "memory.max", "memory.current", &least);
        else if (strstr(line, ":memory:"))
            fsdpi_group_limit("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes",
                              "memory.usage_in_bytes", &least);
    }
    if (file) (void)fclose(file);
    *whose = least < machine ? "its control group" : "the machine";
    return least;
}

// Failures of alloc leave c->now alone: a lane may be in a collective of the same comm.
static FSDPI_UNUSED fsdp_status fsdpi_no_memory(fsdpi_comm *c, size_t size, const char *what) {
    const char *whose;
    int64_t left = fsdpi_memory_left(&whose);
    fsdpi_text t = {c->error, sizeof c->error, 0};
    fsdpi_say(&t,
              "rank %d: alloc of %llu bytes (%.1f MiB) on each of %d ranks: %s; %s has %.1f MiB "
              "left. Free memory, raise the limit, or shard over more machines",
              c->boot->rank, (unsigned long long)size, (double)size / 1048576, c->boot->size, what,
              whose, (double)left / 1048576);
    return FSDP_ERR_OUT_OF_MEMORY;
}

// The two blocks of a world that is being opened, or the text of why there are none.
static int fsdpi_open_blocks(const fsdp_boot *boot, size_t comm_size, void **comm,
                             size_t world_size, void **world) {
    *comm = fsdpi_alloc(&boot->allocator, comm_size);
    *world = fsdpi_alloc(&boot->allocator, world_size);
    if (*comm && *world) return 1;
    fsdpi_free(&boot->allocator, *comm);
    fsdpi_free(&boot->allocator, *world);
    (void)snprintf(fsdpi_thread_error, sizeof fsdpi_thread_error, "rank %d: the allocator refused",
                   boot->rank);
    return 0;
}

// A failed open: its text goes where error_text(NULL) finds it.
static void fsdpi_open_failed(const fsdpi_comm *c) {
    fsdpi_copy_name(fsdpi_thread_error, sizeof fsdpi_thread_error, c->error);
}

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION

/* ==== backends/fsdp_shm.h, continued ======================================================== */

#include <errno.h>      // errno, EINTR, ECONNREFUSED
#include <fcntl.h>      // fcntl, struct flock: who is alive
#include <poll.h>       // poll
#include <sys/mman.h>   // mmap, munmap
#include <sys/socket.h> // the rendezvous, SCM_RIGHTS
#include <sys/un.h>     // sockaddr_un
#include <asm/socket.h> // SO_PEERCRED, which the line above hides in strict C99

#ifdef __cplusplus
extern "C" {
#endif

extern int fsdpi_shm_fallocate(int fd, int mode, off_t offset, off_t size) __asm__("fallocate");

#define FSDPI_SHM_SLICE_NS  50000000 // longest sleep before aborts and dead peers are looked for
#define FSDPI_SHM_SPIN_MAX  2048     // pauses before sleeping, where every rank has its own core
#define FSDPI_SHM_SMALL     16384    // bytes up to which each rank computes all of an all_reduce
#define FSDPI_SHM_ANON      0x20     // MAP_ANONYMOUS, which strict C99 hides
#define FSDPI_SHM_STEP      ((size_t)256 << 20) // memory is reserved in steps of so many bytes
#define FSDPI_SHM_DATA      ((uint64_t)1 << 40) // file offset of allocations; groups lie before
#define FSDPI_SHM_ARENA     ((uint64_t)1 << 42) // file offsets of one rank's allocations
#define FSDPI_SHM_MAX_BYTES ((size_t)1 << 46)   // of one allocation on all ranks together
#define FSDPI_SHM_MAGIC     "fsdpshm1"
#define FSDPI_SHM_KINDS                                                                            \
    (1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER | 1u << FSDP_OP_ALL_REDUCE |          \
     1u << FSDP_OP_BROADCAST)

enum { FSDPI_SHM_ABSENT = 0, FSDPI_SHM_JOINED, FSDPI_SHM_LEFT };

// One rank in a group; whole cache lines.
typedef struct fsdpi_shm_place {
    uint64_t record[FSDPI_RECORD_WORDS];
    uint32_t arrived; // number of the last barrier this rank has come to
    uint32_t reserved[(64 - (sizeof(fsdpi_record) + 4) % 64) / 4];
} fsdpi_shm_place;

/* Common block of a comm: a central barrier, then a place for each rank. `count` is of all arrivals
   for ever, modulo 2^32; the one that makes it size * number opens barrier `number`. */
typedef struct fsdpi_shm_group {
    uint32_t count, pad0[15];
    uint32_t generation, pad1[15];     // number of the last barrier that all have reached; slept on
    uint32_t sleepers, refs, pad2[14]; // refs: processes
} fsdpi_shm_group;

// One rank in the world.
typedef struct fsdpi_shm_peer {
    fsdpi_trace trace;
    uint32_t state, pid;
} fsdpi_shm_peer;

// Threads: one block of the heap that ranks share.
typedef struct fsdpi_shm_node {
    struct fsdpi_shm_node *next;
    uint64_t number; // place of the allocation, or ~number of the group
    size_t bytes;
    int users, freed; // ranks that asked for it; that no longer use it
    fsdp_allocator allocator;
    char *base;
} fsdpi_shm_node;

/* Common block of the world; the peers and the world's group follow. */
typedef struct fsdpi_shm_control {
    uint64_t top; // file offset of the next group's block; threads: number of groups so far
    uint32_t refs;
    int32_t size;
    uint32_t failed; // 0, 1: a rank is writing the verdict, 2: it stands
    fsdpi_verdict verdict;
    fsdpi_shm_node *nodes; // threads
    fsdp_allocator allocator;
} fsdpi_shm_control;

typedef struct fsdpi_shm_world {
    fsdp_boot boot;
    fsdpi_shm_control *control;
    fsdpi_shm_peer *peers;
    int fd; // -1: threads
    int spin_max, joined;
    size_t page;
    fsdpi_chunks chunks;
    uint64_t next_at;
} fsdpi_shm_world;

typedef struct fsdpi_shm_comm {
    fsdpi_comm base;
    fsdpi_shm_world *world;
    fsdpi_shm_group *group;
    fsdpi_shm_place *places;
    uint64_t block; // place of the group's block
    uint32_t barrier, waits;
    int spin, is_world;
    char small[FSDPI_SHM_SMALL];
} fsdpi_shm_comm;

// The buffer of a collective that peers read.
typedef struct fsdpi_shm_view {
    char *mine;
    size_t part;
} fsdpi_shm_view;

/* -------------------------------------------------------------------------------------------- */
// >>shm_fail
// Owns: the abort record. The first rank that fails writes it, once; from then on every wait ends
// and every call returns its status.

// What a rank of the world did last: it says why the rank is not here.
static void fsdpi_shm_say_last(fsdpi_text *t, fsdpi_comm *base, int rank) {
    fsdpi_shm_comm *c = (fsdpi_shm_comm *)(void *)base;
    fsdpi_shm_peer *peer = &c->world->peers[rank];
    if (FSDPI_LOAD(&peer->state) == FSDPI_SHM_ABSENT) {
        fsdpi_say(t, "it has not joined the job");
        return;
    }
    char operation[160];
    int64_t since_ns;
    int busy = fsdpi_trace_read(&peer->trace, operation, sizeof operation, &since_ns);
    fsdpi_say_done(t, busy, 0, operation, fsdpi_boot_now(base->boot) - since_ns);
}

static void fsdpi_shm_raise(fsdpi_shm_world *w, fsdp_status status, const char *subject,
                            const char *reason) {
    fsdpi_shm_control *control = w->control;
    uint32_t none = 0;
    if (!__atomic_compare_exchange_n(&control->failed, &none, 1u, 0, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
        return;
    control->verdict.status = (int32_t)status;
    control->verdict.rank = w->boot.rank;
    control->verdict.lost = -1;
    fsdpi_copy_name(control->verdict.subject, sizeof control->verdict.subject, subject);
    fsdpi_copy_name(control->verdict.reason, sizeof control->verdict.reason, reason);
    FSDPI_STORE(&control->failed, 2u);
    // Ranks that sleep elsewhere see it at the end of their slice.
    fsdpi_shm_group *group = (fsdpi_shm_group *)(void *)(w->peers + control->size);
    fsdpi_futex_wake_all(&group->generation, w->fd >= 0);
}

// The status and text of a failed world for this rank.
static fsdp_status fsdpi_shm_report(fsdpi_shm_comm *c) {
    fsdpi_shm_control *control = c->world->control;
    for (int i = 0; i < 100 && FSDPI_LOAD(&control->failed) != 2; i++) fsdpi_sleep_ns(100000);
    if (FSDPI_LOAD(&control->failed) == 2) return fsdpi_comm_report(&c->base, &control->verdict);
    return fsdpi_comm_error(&c->base, FSDP_ERR_ABORTED,
                            "a rank ended while it was reporting a failure");
}

// Ends the world because of the operation that this rank is in.
static fsdp_status fsdpi_shm_fail(fsdpi_shm_comm *c, fsdp_status status, const char *reason) {
    char subject[sizeof c->world->control->verdict.subject];
    fsdpi_comm_subject(&c->base, subject, sizeof subject);
    fsdpi_shm_raise(c->world, status, subject, reason);
    if (!c->is_world) fsdpi_futex_wake_all(&c->group->generation, c->world->fd >= 0);
    return fsdpi_shm_report(c);
}

// A failure of this rank alone that ends the call for all: the reason names who it was.
static fsdp_status fsdpi_shm_fail_here(fsdpi_shm_comm *c, fsdp_status status, const char *what) {
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    fsdpi_say(&t, "rank %d: %s", c->world->boot.rank, what);
    return fsdpi_shm_fail(c, status, reason);
}

/* -------------------------------------------------------------------------------------------- */
// >>shm_wait
// Owns: barriers, and everything that may end a wait: all have come, the world failed, a peer is
// gone, the deadline. Barrier numbers and counts are compared modulo 2^32.

static int fsdpi_shm_is_open(fsdpi_shm_comm *c) { // the barrier that this rank came to last
    return (int32_t)(FSDPI_LOAD(&c->group->generation) - c->barrier) >= 0;
}

static struct flock fsdpi_shm_byte(int rank) {
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
}

// Whether the process of a rank has ended without closing: nobody holds its byte any more.
static int fsdpi_shm_is_dead(const fsdpi_shm_world *w, int rank) {
    struct flock lock = fsdpi_shm_byte(rank);
    return w->fd >= 0 && fcntl(w->fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

// OK while all members that have joined are alive; `thorough` also asks the kernel.
static fsdp_status fsdpi_shm_check_peers(fsdpi_shm_comm *c, int thorough) {
    for (int k = 0; k < c->base.size; k++) {
        int rank = c->base.ranks[k];
        fsdpi_shm_peer *peer = &c->world->peers[rank];
        uint32_t state = FSDPI_LOAD(&peer->state);
        int left = state == FSDPI_SHM_LEFT;
        if (rank == c->world->boot.rank || state == FSDPI_SHM_ABSENT) continue;
        if (!left && !(thorough && fsdpi_shm_is_dead(c->world, rank))) continue;
        // It may have gone after it opened the barrier, just now; and a rank that closes says so
        // before it drops its lock.
        if (fsdpi_shm_is_open(c)) return FSDP_OK;
        left = FSDPI_LOAD(&peer->state) == FSDPI_SHM_LEFT;
        char reason[FSDPI_REASON];
        fsdpi_text t = {reason, sizeof reason, 0};
        if (left) fsdpi_say(&t, "rank %d has shut down; ", rank);
        else fsdpi_say(&t, "rank %d has died (process %u); ", rank, peer->pid);
        fsdpi_shm_say_last(&t, &c->base, rank);
        return fsdpi_shm_fail(c, FSDP_ERR_PEER_LOST, reason);
    }
    return FSDP_OK;
}

static int fsdpi_shm_all_busy(const fsdpi_shm_comm *c, const uint8_t *marked) {
    int busy = 1;
    for (int k = 0; k < c->base.size; k++)
        busy &= !marked[k] || FSDPI_LOAD(&c->world->peers[c->base.ranks[k]].trace.busy) > 0;
    return busy;
}

// The deadline has passed: names who is missing. OK if it is nobody, just then.
static fsdp_status fsdpi_shm_late(fsdpi_shm_comm *c, const char *verb) {
    uint8_t missing[FSDPI_MAX_SRCS];
    int total = 0;
    for (int k = 0; k < c->base.size; k++) {
        missing[k] = (int32_t)(FSDPI_LOAD(&c->places[k].arrived) - c->barrier) < 0;
        total += missing[k];
    }
    if (total == 0) return FSDP_OK;
    // Who waits for another rank elsewhere is not to blame, and will tell who is.
    for (int i = 0; i < 100 && fsdpi_shm_all_busy(c, missing); i++) {
        if (FSDPI_LOAD(&c->world->control->failed)) return fsdpi_shm_report(c);
        fsdpi_sleep_ns(1000000);
    }
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    fsdpi_say_late(&t, &c->base, missing, verb, fsdpi_shm_say_last);
    return fsdpi_shm_fail(c, FSDP_ERR_TIMEOUT, reason);
}

static void fsdpi_shm_arrive(fsdpi_shm_comm *c) {
    fsdpi_shm_group *group = c->group;
    c->barrier++;
    __atomic_store_n(&c->places[c->base.index].arrived, c->barrier, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&group->count, 1u, __ATOMIC_ACQ_REL) !=
        c->barrier * (uint32_t)c->base.size)
        return;
    // Either this load sees the sleeper, or the sleeper's futex call sees the new generation.
    __atomic_store_n(&group->generation, c->barrier, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&group->sleepers, __ATOMIC_SEQ_CST))
        fsdpi_futex_wake_all(&group->generation, c->world->fd >= 0);
}

// verb: what the missing ranks have not done, for the text.
static fsdp_status fsdpi_shm_wait(fsdpi_shm_comm *c, const char *verb) {
    fsdpi_shm_world *w = c->world;
    if (fsdpi_shm_is_open(c)) return FSDP_OK;
    // Spin as long as that helps. Where ranks do not run at the same time it never does, and then
    // it costs the peer its core: so less after each failure, but a full try now and then.
    int spin = ++c->waits % 64 ? c->spin : w->spin_max;
    for (int i = 0; i < spin; i++) {
        fsdpi_pause();
        if (!fsdpi_shm_is_open(c)) continue;
        c->spin = w->spin_max;
        return FSDP_OK;
    }
    c->spin /= 4;
    int64_t start = fsdpi_boot_now(&w->boot);
    for (int turn = 0;; turn++) {
        uint32_t seen = FSDPI_LOAD(&c->group->generation);
        if (fsdpi_shm_is_open(c)) return FSDP_OK;
        if (FSDPI_LOAD(&w->control->failed)) return fsdpi_shm_report(c);
        fsdp_status status = fsdpi_shm_check_peers(c, turn > 0);
        int64_t left = w->boot.timeout_ns - (fsdpi_boot_now(&w->boot) - start);
        if (!status && left <= 0) status = fsdpi_shm_late(c, verb);
        if (status) return status;
        __atomic_add_fetch(&c->group->sleepers, 1u, __ATOMIC_SEQ_CST);
        fsdpi_futex_wait(&c->group->generation, seen,
                         left > 0 && left < FSDPI_SHM_SLICE_NS ? left : FSDPI_SHM_SLICE_NS,
                         w->fd >= 0);
        __atomic_sub_fetch(&c->group->sleepers, 1u, __ATOMIC_SEQ_CST);
    }
}

static fsdp_status fsdpi_shm_barrier(fsdpi_shm_comm *c, const char *verb) {
    fsdpi_shm_arrive(c);
    return fsdpi_shm_wait(c, verb);
}

// Shows c->base.now to the members, and to whoever will ask what this rank did last.
static void fsdpi_shm_publish(fsdpi_shm_comm *c) {
    fsdpi_shm_peer *me = &c->world->peers[c->world->boot.rank];
    c->base.now.since_ns = fsdpi_boot_now(&c->world->boot);
    fsdpi_record_put(c->places[c->base.index].record, &c->base.now);
    fsdpi_trace_begin(&me->trace, &c->base.now);
}

static void fsdpi_shm_done(fsdpi_shm_comm *c) {
    fsdpi_trace_end(&c->world->peers[c->world->boot.rank].trace);
}

// All members have published, and no record changes before all have read it.
static fsdpi_record fsdpi_shm_record_of(const fsdpi_comm *base, int k) {
    return fsdpi_record_get(((const fsdpi_shm_comm *)(const void *)base)->places[k].record);
}

static fsdp_status fsdpi_shm_compare(fsdpi_shm_comm *c) {
    int same = 1;
    for (int k = 0; k < c->base.size; k++)
        same &= __atomic_load_n(&c->places[k].record[0], __ATOMIC_RELAXED) ==
                c->base.now.key; // key comes first
    if (same) return FSDP_OK;
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    fsdpi_say_disagreement(&t, &c->base, fsdpi_shm_record_of);
    // Every rank says what it did itself; the subject of the one that fails first is left out.
    fsdpi_shm_raise(c->world, FSDP_ERR_MISMATCH, "", reason);
    return fsdpi_shm_report(c);
}

/* -------------------------------------------------------------------------------------------- */
// >>shm_memory
// Owns: memory that peers may read. Invariants: an allocation has the same place and part on every
// rank that has allocated the same before, also after one that failed; a part is backed by memory
// before anyone can touch it; no
// part of the file is used twice, so that new memory is zero and a late reader sees no new data.

static void fsdpi_shm_give_back(const fsdpi_shm_world *w, uint64_t at, size_t bytes) {
    (void)fsdpi_shm_fallocate(w->fd, 3 /* KEEP_SIZE | PUNCH_HOLE */, (off_t)at, (off_t)bytes);
}

/* Backs a range of the file with memory, in steps, each checked against what is left for all ranks:
   they allocate at the same time, and the kernel would rather kill than refuse. */
static int fsdpi_shm_reserve(const fsdpi_shm_world *w, uint64_t at, size_t bytes) {
    const char *whose;
    int64_t left = bytes < FSDPI_SHM_STEP / 256 ? INT64_MAX : fsdpi_memory_left(&whose);
    if ((int64_t)bytes > left) return 0;
    for (size_t done = 0; done < bytes;) {
        size_t step = bytes - done < FSDPI_SHM_STEP ? bytes - done : FSDPI_SHM_STEP;
        int refused = done > 0 && (int64_t)step * w->boot.size > fsdpi_memory_left(&whose);
        if (!refused && fsdpi_shm_fallocate(w->fd, 0, (off_t)(at + done), (off_t)step) == 0) {
            done += step;
        } else if (refused || errno != EINTR) {
            fsdpi_shm_give_back(w, at, done);
            return 0;
        }
    }
    return 1;
}

static char *fsdpi_shm_map(const fsdpi_shm_world *w, uint64_t at, size_t bytes) {
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, w->fd, (off_t)at);
    return base == MAP_FAILED ? NULL : (char *)base;
}

static size_t fsdpi_shm_round(const fsdpi_shm_world *w, size_t bytes) {
    return (bytes + w->page - 1) / w->page * w->page;
}

/* Threads: a block of `bytes`, made by the first rank that asks for its place. The block keeps the
   allocator that made it, which has to serve until the last rank has closed. */
static fsdpi_shm_node *fsdpi_shm_share(fsdpi_shm_world *w, uint64_t number, size_t bytes) {
    const char *whose;
    fsdpi_lock(&w->boot.threads->lock);
    fsdpi_shm_node *node = w->control->nodes;
    while (node && (node->number != number || node->bytes != bytes)) node = node->next;
    if (!node && (bytes < FSDPI_SHM_STEP / 256 || (int64_t)bytes < fsdpi_memory_left(&whose)))
        node = (fsdpi_shm_node *)fsdpi_alloc(&w->boot.allocator, sizeof *node);
    if (node && !node->base) {
        node->base = (char *)fsdpi_alloc(&w->boot.allocator, bytes);
        if (node->base) {
            node->number = number;
            node->bytes = bytes;
            node->allocator = w->boot.allocator;
            node->next = w->control->nodes;
            w->control->nodes = node;
        } else {
            fsdpi_free(&w->boot.allocator, node);
            node = NULL;
        }
    }
    if (node) node->users++;
    fsdpi_unlock(&w->boot.threads->lock);
    return node;
}

// One of `users` ranks (0: of those who asked for it) has finished with a block; the last one frees
// it.
static void fsdpi_shm_unshare(fsdpi_shm_world *w, const void *base, int users) {
    fsdpi_lock(&w->boot.threads->lock);
    fsdpi_shm_node **link = &w->control->nodes, *node;
    while ((*link)->base != (const char *)base) link = &(*link)->next;
    node = *link;
    if (++node->freed == (users ? users : node->users)) {
        fsdp_allocator allocator = node->allocator;
        *link = node->next;
        fsdpi_free(&allocator, node->base);
        fsdpi_free(&allocator, node);
    }
    fsdpi_unlock(&w->boot.threads->lock);
}

// Where a rank's part is in the file. Each rank has an arena of its own, so that ranks which
// allocate differently, because they are in different groups, do not meet.
static uint64_t fsdpi_shm_offset(const fsdpi_chunk *chunk, int rank) {
    return chunk->at + FSDPI_SHM_ARENA * (uint64_t)rank;
}

// The parts of all ranks, side by side in this process.
static char *fsdpi_shm_map_parts(const fsdpi_shm_world *w, const fsdpi_chunk *chunk) {
    size_t part = chunk->part, ranks = (size_t)w->boot.size;
    void *base = mmap(NULL, part * ranks, PROT_NONE, MAP_PRIVATE | FSDPI_SHM_ANON, -1, 0);
    if (base == MAP_FAILED) return NULL;
    for (size_t r = 0; r < ranks; r++) {
        void *at = mmap((char *)base + r * part, part, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED, w->fd, (off_t)fsdpi_shm_offset(chunk, (int)r));
        if (at != MAP_FAILED) continue;
        (void)munmap(base, part * ranks);
        return NULL;
    }
    return (char *)base;
}

static void fsdpi_shm_release(fsdpi_shm_world *w, const fsdpi_chunk *chunk) {
    size_t ranks = (size_t)w->boot.size;
    if (w->fd < 0) {
        fsdpi_shm_unshare(w, chunk->base, 0);
        return;
    }
    (void)munmap(chunk->base, chunk->part * ranks);
    fsdpi_shm_give_back(w, fsdpi_shm_offset(chunk, w->boot.rank), chunk->part);
}

static fsdp_status fsdpi_shm_alloc(fsdp_comm *comm, size_t size, void **ptr) {
    fsdpi_shm_comm *c = (fsdpi_shm_comm *)(void *)comm;
    fsdpi_shm_world *w = c->world;
    size_t ranks = (size_t)w->boot.size;
    *ptr = NULL;
    if (size > FSDPI_SHM_MAX_BYTES / ranks || w->next_at + size > FSDPI_SHM_ARENA)
        return fsdpi_no_memory(&c->base, size, "that is more than can be addressed");
    fsdpi_chunk chunk = {NULL, size, fsdpi_shm_round(w, size ? size : 1), w->next_at};
    w->next_at += chunk.part;
    if (w->fd < 0) {
        fsdpi_shm_node *node = fsdpi_shm_share(w, chunk.at, chunk.part * ranks);
        if (node) chunk.base = node->base;
    } else {
        uint64_t mine = fsdpi_shm_offset(&chunk, w->boot.rank);
        if (!fsdpi_shm_reserve(w, mine, chunk.part))
            return fsdpi_no_memory(&c->base, size, "memory is short");
        chunk.base = fsdpi_shm_map_parts(w, &chunk);
        if (!chunk.base) fsdpi_shm_give_back(w, mine, chunk.part);
    }
    if (!chunk.base) return fsdpi_no_memory(&c->base, size, "memory or address space is short");
    if (!fsdpi_chunk_insert(&w->chunks, &w->boot.allocator, chunk)) {
        fsdpi_shm_release(w, &chunk);
        return fsdpi_no_memory(&c->base, size, "the allocator refused");
    }
    *ptr = chunk.base + chunk.part * (size_t)w->boot.rank;
    return FSDP_OK;
}

static void fsdpi_shm_free(fsdp_comm *comm, void *ptr, size_t size) {
    fsdpi_shm_world *w = ((fsdpi_shm_comm *)(void *)comm)->world;
    fsdpi_chunk chunk;
    (void)size;
    if (ptr && fsdpi_chunk_take(&w->chunks, w->boot.rank, ptr, &chunk))
        fsdpi_shm_release(w, &chunk);
}

/* -------------------------------------------------------------------------------------------- */
// >>shm_run
// Owns: collectives. Between the two barriers of an operation every rank may read what its peers
// showed; it writes only its own memory, and there only what no peer reads in the same phase.

static char *fsdpi_shm_of(const fsdpi_shm_comm *c, const fsdpi_shm_view *view,
                          int k) { // member k's copy
    return view->mine + (c->base.ranks[k] - c->world->boot.rank) * (ptrdiff_t)view->part;
}

static void fsdpi_shm_all_gather(const fsdpi_shm_comm *c, const fsdp_coll *op,
                                 const fsdpi_shm_view *view) {
    size_t bytes = fsdp_dtype_size(op->dtype);
    for (int i = 0; i < c->base.size; i++) {
        int k = (c->base.index + i) % c->base.size; // everybody begins with another rank
        const char *src = fsdpi_shm_of(c, view, k);
        for (uint32_t s = 0; s < op->num_segs; s++) {
            const fsdp_seg *seg = &op->segs[s];
            size_t full = (size_t)(seg->full + k * seg->count);
            const char *from = src + (op->in_place ? full : (size_t)seg->shard) * bytes;
            char *to = (char *)op->dst + full * bytes;
            if (seg->count && to != from) memcpy(to, from, (size_t)seg->count * bytes);
        }
    }
}

static void fsdpi_shm_reduce_scatter(const fsdpi_shm_comm *c, const fsdp_coll *op,
                                     const fsdpi_shm_view *view) {
    const char *srcs[FSDPI_MAX_SRCS];
    for (uint32_t s = 0; s < op->num_segs; s++) {
        const fsdp_seg *seg = &op->segs[s];
        if (!seg->count) continue;
        size_t at = (size_t)(seg->full + c->base.index * seg->count) * fsdp_dtype_size(op->dtype);
        for (int k = 0; k < c->base.size; k++) srcs[k] = fsdpi_shm_of(c, view, k) + at;
        fsdpi_reduce((char *)op->dst + (size_t)seg->shard * fsdp_dtype_size(op->out_dtype),
                     op->out_dtype, srcs, c->base.size, op->dtype, (size_t)seg->count, op->scale,
                     op->accumulate, op->redop);
    }
}

/* Small: everybody reduces everything aside, and stores it when all have read. Large: member k
   reduces part k in its own place, where nobody else reads; then all collect the parts. */
static fsdp_status fsdpi_shm_all_reduce(fsdpi_shm_comm *c, const fsdp_coll *op,
                                        const fsdpi_shm_view *view) {
    const char *srcs[FSDPI_MAX_SRCS];
    size_t bytes = fsdp_dtype_size(op->dtype), count = (size_t)op->count;
    for (int k = 0; k < c->base.size; k++) srcs[k] = fsdpi_shm_of(c, view, k);
    if (count * bytes <= FSDPI_SHM_SMALL) {
        fsdpi_reduce(c->small, op->dtype, srcs, c->base.size, op->dtype, count, 1.0, 0, op->redop);
        fsdp_status status = fsdpi_shm_barrier(c, "finished");
        if (!status) memcpy(op->dst, c->small, count * bytes);
        return status;
    }
    size_t part = (count / (size_t)c->base.size + 64) / 64 *
                  64; // whole cache lines; the last may be short or empty
    size_t mine = part * (size_t)c->base.index;
    for (int k = 0; k < c->base.size; k++) srcs[k] += mine * bytes;
    if (mine < count)
        fsdpi_reduce((char *)op->dst + mine * bytes, op->dtype, srcs, c->base.size, op->dtype,
                     count - mine < part ? count - mine : part, 1.0, 0, op->redop);
    fsdp_status status = fsdpi_shm_barrier(c, "finished");
    if (status) return status;
    for (int i = 1; i < c->base.size; i++) {
        int k = (c->base.index + i) % c->base.size;
        size_t at = part * (size_t)k;
        if (at >= count) continue;
        memcpy((char *)op->dst + at * bytes, fsdpi_shm_of(c, view, k) + at * bytes,
               (count - at < part ? count - at : part) * bytes);
    }
    return fsdpi_shm_barrier(c, "finished");
}

static fsdp_status fsdpi_shm_run(fsdp_comm *comm, const fsdp_coll *op) {
    fsdpi_shm_comm *c = (fsdpi_shm_comm *)(void *)comm;
    fsdpi_chunk chunk = {NULL, 0, 0, 0};
    const void *shared = NULL;
    int64_t low = 0, high = 0;
    fsdpi_describe(&c->base, op, op->what);
    if (FSDPI_LOAD(&c->world->control->failed)) return fsdpi_shm_report(c);
    fsdp_status status = fsdpi_check(&c->base, FSDPI_SHM_KINDS, op, &shared, &low, &high);
    size_t bytes = fsdp_dtype_size(op->dtype);
    int find = !status && c->base.size > 1 && high > low;
    if (find)
        status = fsdpi_chunk_find(&c->base, &c->world->chunks, op, shared, (size_t)low * bytes,
                                  (size_t)high * bytes, &chunk);
    if (status) return status;
    fsdpi_shm_view view = {(char *)(uintptr_t)shared, chunk.part};
    if (find)
        c->base.now.place = fsdpi_hash(fsdpi_hash(chunk.at, chunk.part),
                                       (uint64_t)((uintptr_t)shared - (uintptr_t)chunk.base) -
                                           chunk.part * (size_t)c->base.boot->rank);
    fsdpi_make_key(&c->base.now, op);

    fsdpi_shm_publish(c);
    status = fsdpi_shm_barrier(c, "come");
    if (!status) status = fsdpi_shm_compare(c);
    if (!status && op->kind == FSDP_OP_ALL_REDUCE) {
        if (c->base.size > 1) status = fsdpi_shm_all_reduce(c, op, &view);
    } else if (!status) {
        if (op->kind == FSDP_OP_ALL_GATHER) fsdpi_shm_all_gather(c, op, &view);
        if (op->kind == FSDP_OP_REDUCE_SCATTER) fsdpi_shm_reduce_scatter(c, op, &view);
        if (op->kind == FSDP_OP_BROADCAST && op->root != c->base.index && op->count)
            memcpy(op->dst, fsdpi_shm_of(c, &view, op->root), (size_t)op->count * bytes);
        status = fsdpi_shm_barrier(c, "finished");
    }
    fsdpi_shm_done(c);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// >>shm_open
// Owns: how ranks find each other, groups, and the end. Invariants: the common block lives until
// the last rank has closed; a rank that left a world of threads never meets its old block again.

typedef struct fsdpi_shm_hello {
    char magic[8];
    int32_t version, rank, size, reserved;
} fsdpi_shm_hello;

typedef struct fsdpi_shm_answer {
    char magic[8];
    int32_t status;
    char reason[244];
} fsdpi_shm_answer;

static size_t fsdpi_shm_group_bytes(int size) {
    return sizeof(fsdpi_shm_group) + (size_t)size * sizeof(fsdpi_shm_place);
}

static size_t fsdpi_shm_control_bytes(int size) {
    return sizeof(fsdpi_shm_control) + (size_t)size * sizeof(fsdpi_shm_peer) +
           fsdpi_shm_group_bytes(size);
}

static void fsdpi_shm_use_group(fsdpi_shm_comm *c, void *block) {
    c->group = (fsdpi_shm_group *)block;
    c->places = (fsdpi_shm_place *)(void *)(c->group + 1);
}

static void fsdpi_shm_use_control(fsdpi_shm_comm *c, void *block) {
    c->world->control = (fsdpi_shm_control *)block;
    c->world->peers = (fsdpi_shm_peer *)(void *)(c->world->control + 1);
    fsdpi_shm_use_group(c, c->world->peers + c->world->boot.size);
}

static fsdp_status fsdpi_shm_open_threads(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = c->world;
    fsdp_threads *threads = w->boot.threads;
    fsdp_status status = FSDP_OK;
    fsdpi_lock(&threads->lock);
    void *block = threads->common;
    if (!block) {
        block = fsdpi_alloc(&w->boot.allocator, fsdpi_shm_control_bytes(w->boot.size));
        if (block) {
            ((fsdpi_shm_control *)block)->size = w->boot.size;
            ((fsdpi_shm_control *)block)->allocator = w->boot.allocator;
            threads->common = block;
        }
    }
    if (!block) {
        status = fsdpi_comm_error(&c->base, FSDP_ERR_OUT_OF_MEMORY,
                                  "the allocator refused the common block");
    } else if (((fsdpi_shm_control *)block)->size != w->boot.size) {
        status = fsdpi_comm_error(&c->base, FSDP_ERR_MISMATCH,
                                  "this rank has a world size of %d, another one of %d",
                                  w->boot.size, (int)((fsdpi_shm_control *)block)->size);
    } else {
        fsdpi_shm_use_control(c, block);
        fsdpi_shm_peer *me = &w->peers[w->boot.rank];
        if (me->state != FSDPI_SHM_ABSENT) {
            status = fsdpi_comm_error(&c->base, FSDP_ERR_INVALID_ARG,
                                      "another thread has joined as rank %d already", w->boot.rank);
            w->control = NULL;
        } else {
            w->control->refs++;
            w->joined = 1;
            FSDPI_STORE(&me->state, (uint32_t)FSDPI_SHM_JOINED);
        }
    }
    fsdpi_unlock(&threads->lock);
    return status;
}

// Maps the common block of the file and takes this rank's byte, by which peers see that it lives.
static fsdp_status fsdpi_shm_enter(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = c->world;
    struct flock lock = fsdpi_shm_byte(w->boot.rank);
    uint64_t limit[2] = {UINT64_MAX, 0}; // struct rlimit64
    (void)fsdpi_syscall(SYS_prlimit64, 0L, 1L /* RLIMIT_FSIZE */, NULL, limit);
    if (limit[0] != UINT64_MAX) // a file that grows beyond it gets the process killed
        return fsdpi_comm_error(&c->base, FSDP_ERR_UNSUPPORTED,
                                "the size of files is limited; ulimit -f unlimited helps");
    char *block = fsdpi_shm_map(w, 0, fsdpi_shm_round(w, fsdpi_shm_control_bytes(w->boot.size)));
    if (!block)
        return fsdpi_comm_error(&c->base, FSDP_ERR_OUT_OF_MEMORY,
                                "the common block cannot be mapped (errno %d)", errno);
    fsdpi_shm_use_control(c, block);
    if (fcntl(w->fd, F_SETLK, &lock))
        return fsdpi_comm_error(&c->base, FSDP_ERR_BACKEND,
                                "the common file cannot be locked (errno %d)", errno);
    w->peers[w->boot.rank].pid = (uint32_t)getpid();
    w->joined = 1;
    FSDPI_STORE(&w->peers[w->boot.rank].state, (uint32_t)FSDPI_SHM_JOINED);
    return FSDP_OK;
}

// An abstract name: it needs no file and goes away with its socket.
static socklen_t fsdpi_shm_name(const fsdpi_shm_world *w, struct sockaddr_un *name) {
    memset(name, 0, sizeof *name);
    name->sun_family = AF_UNIX;
    int used = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "fsdp-shm-%lu-%016llx",
                        (unsigned long)getuid(), (unsigned long long)fsdpi_hash_text(w->boot.job));
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)used);
}

static int fsdpi_shm_readable(int fd, int64_t timeout_ns) {
    struct pollfd p;
    p.fd = fd;
    p.events = POLLIN;
    p.revents = 0;
    return poll(&p, 1, (int)(timeout_ns / 1000000) + 1) > 0;
}

// One message with, if not -1, a descriptor beside it.
static int fsdpi_shm_send(int fd, const void *data, size_t size, int gift) {
    struct iovec io = {(void *)(uintptr_t)data, size};
    struct msghdr m;
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    memset(&m, 0, sizeof m);
    memset(&control, 0, sizeof control);
    m.msg_iov = &io;
    m.msg_iovlen = 1;
    if (gift >= 0) {
        m.msg_control = control.space;
        m.msg_controllen = sizeof control.space;
        struct cmsghdr *h = CMSG_FIRSTHDR(&m);
        h->cmsg_level = SOL_SOCKET;
        h->cmsg_type = SCM_RIGHTS;
        h->cmsg_len = CMSG_LEN(sizeof gift);
        memcpy(CMSG_DATA(h), &gift, sizeof gift);
    }
    return sendmsg(fd, &m, MSG_NOSIGNAL) == (ssize_t)size;
}

static int fsdpi_shm_receive(int fd, void *data, size_t size, int *gift) {
    struct iovec io = {data, size};
    struct msghdr m;
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control;
    memset(&m, 0, sizeof m);
    m.msg_iov = &io;
    m.msg_iovlen = 1;
    m.msg_control = control.space;
    m.msg_controllen = sizeof control.space;
    *gift = -1;
    if (recvmsg(fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != (ssize_t)size) return 0;
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    if (h && h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS)
        memcpy(gift, CMSG_DATA(h), sizeof *gift);
    return 1;
}

/* Rank 0: answers one rank. Who is started with another size or version can never come, so all are
   told; a rank that comes twice belongs to another job and is sent away. */
static fsdp_status fsdpi_shm_admit(fsdpi_shm_comm *c, int listener, uint8_t *admitted) {
    fsdpi_shm_world *w = c->world;
    int fd = accept(listener, NULL, NULL);
    fsdpi_shm_hello hello;
    fsdpi_shm_answer answer;
    fsdpi_text t = {answer.reason, sizeof answer.reason, 0};
    int gift;
    memset(&answer, 0, sizeof answer);
    memcpy(answer.magic, FSDPI_SHM_MAGIC, sizeof answer.magic);
    if (fd < 0) return FSDP_OK;
    if (!fsdpi_same_user(fd) || !fsdpi_shm_readable(fd, 1000000000) ||
        !fsdpi_shm_receive(fd, &hello, sizeof hello, &gift)) {
        (void)close(fd);
        return FSDP_OK;
    }
    if (memcmp(hello.magic, answer.magic, sizeof hello.magic) ||
        hello.version != FSDP_COMM_VERSION) {
        answer.status = FSDP_ERR_MISMATCH;
        fsdpi_say(&t, "rank 0 and rank %d were built from different versions of fsdp.h",
                  (int)hello.rank);
    } else if (hello.size != w->boot.size) {
        answer.status = FSDP_ERR_MISMATCH;
        fsdpi_say(&t, "rank 0 has a world size of %d, rank %d of %d", w->boot.size, (int)hello.rank,
                  (int)hello.size);
    } else if (hello.rank <= 0 || hello.rank >= hello.size || admitted[hello.rank]) {
        answer.status = FSDP_ERR_INVALID_ARG;
        fsdpi_say(&t,
                  "rank %d has joined already: another job on this host has the same id, or "
                  "two processes have "
                  "the same rank",
                  (int)hello.rank);
    }
    if (fsdpi_shm_send(fd, &answer, sizeof answer, answer.status ? -1 : w->fd) && !answer.status)
        admitted[hello.rank] = 1;
    (void)close(fd);
    return answer.status == FSDP_ERR_MISMATCH ? fsdpi_shm_fail(c, FSDP_ERR_MISMATCH, answer.reason)
                                              : FSDP_OK;
}

// Rank 0: makes the file.
static fsdp_status fsdpi_shm_found(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = c->world;
    size_t bytes = fsdpi_shm_round(w, fsdpi_shm_control_bytes(w->boot.size));
    w->fd = (int)fsdpi_syscall(SYS_memfd_create, "fsdp", 1 /* MFD_CLOEXEC */);
    if (w->fd < 0 || !fsdpi_shm_reserve(w, 0, bytes))
        return fsdpi_comm_error(&c->base, FSDP_ERR_OUT_OF_MEMORY,
                                "no memory for the common block (errno %d)", errno);
    fsdp_status status = fsdpi_shm_enter(c);
    if (status) return status;
    w->control->size = w->boot.size;
    w->control->top = bytes;
    return FSDP_OK;
}

// Rank 0, which waits at the first barrier already: gives the file to the others as they come.
static fsdp_status fsdpi_shm_host(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = c->world;
    uint8_t admitted[FSDPI_MAX_SRCS] = {1};
    struct sockaddr_un name;
    socklen_t length = fsdpi_shm_name(w, &name);
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), missing = w->boot.size - 1;
    fsdp_status status = FSDP_OK;
    if (listener < 0 || bind(listener, (struct sockaddr *)(void *)&name, length) ||
        listen(listener, w->boot.size)) {
        if (listener >= 0 && errno == EADDRINUSE)
            status = fsdpi_comm_error(
                &c->base, FSDP_ERR_INVALID_ARG,
                "another job with this id is starting on this host; give each "
                "job its own id (FSDP_JOB_ID, MASTER_PORT)");
        else
            status = fsdpi_comm_error(&c->base, FSDP_ERR_BACKEND, "rank 0 cannot listen (errno %d)",
                                      errno);
    }
    int64_t start = fsdpi_boot_now(&w->boot);
    while (!status && missing > 0) {
        int64_t left = w->boot.timeout_ns - (fsdpi_boot_now(&w->boot) - start);
        if (left <= 0) status = fsdpi_shm_late(c, "come");
        else if (FSDPI_LOAD(&w->control->failed)) status = fsdpi_shm_report(c);
        else if (!fsdpi_shm_readable(listener,
                                     left < FSDPI_SHM_SLICE_NS ? left : FSDPI_SHM_SLICE_NS))
            status = fsdpi_shm_check_peers(c, 1);
        else status = fsdpi_shm_admit(c, listener, admitted);
        missing = w->boot.size;
        for (int k = 0; k < w->boot.size; k++) missing -= admitted[k];
    }
    if (listener >= 0) (void)close(listener);
    return status;
}

// The others: ask rank 0 until it answers. A connection that breaks may be to an earlier world.
static fsdp_status fsdpi_shm_join(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = c->world;
    fsdpi_shm_hello hello = {{0}, FSDP_COMM_VERSION, w->boot.rank, w->boot.size, 0};
    fsdpi_shm_answer answer;
    struct sockaddr_un name;
    socklen_t length = fsdpi_shm_name(w, &name);
    int64_t start = fsdpi_boot_now(&w->boot), nap = 500000;
    memcpy(hello.magic, FSDPI_SHM_MAGIC, sizeof hello.magic);
    while (w->fd < 0) {
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), gift = -1, answered = 0;
        if (fd < 0)
            return fsdpi_comm_error(&c->base, FSDP_ERR_BACKEND, "no socket can be made (errno %d)",
                                    errno);
        if (!connect(fd, (struct sockaddr *)(void *)&name, length) && fsdpi_same_user(fd) &&
            fsdpi_shm_send(fd, &hello, sizeof hello, -1)) {
            while (!fsdpi_shm_readable(fd, FSDPI_SHM_SLICE_NS) &&
                   fsdpi_boot_now(&w->boot) - start < w->boot.timeout_ns) {
            }
            answered = fsdpi_shm_receive(fd, &answer, sizeof answer, &gift) &&
                       !memcmp(answer.magic, FSDPI_SHM_MAGIC, sizeof answer.magic);
        }
        (void)close(fd);
        w->fd = gift;
        if (answered && answer.status)
            return fsdpi_comm_error(&c->base, (fsdp_status)answer.status, "%.*s", 243,
                                    answer.reason);
        if (w->fd < 0 && fsdpi_boot_now(&w->boot) - start >= w->boot.timeout_ns)
            return fsdpi_comm_error(
                &c->base, FSDP_ERR_TIMEOUT,
                "rank 0 has not come within %.1f s; has it been started on this host, "
                "by this user, with this job id?",
                (double)w->boot.timeout_ns * 1e-9);
        if (w->fd < 0) fsdpi_sleep_ns(nap);
        nap = nap < 20000000 ? nap * 2 : nap;
    }
    return fsdpi_shm_enter(c);
}

// Cores that this process may run on.
static int fsdpi_shm_cores(void) {
    uint8_t mask[1024];
    int cores = 0;
    long bytes = fsdpi_syscall(SYS_sched_getaffinity, 0L, (long)sizeof mask, mask);
    for (long i = 0; i < bytes; i++)
        for (int bits = mask[i]; bits; bits &= bits - 1) cores++;
    return cores;
}

static fsdp_status fsdpi_shm_try_open(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = c->world;
    if (!w->boot.job) w->boot.job = "";
    w->fd = -1;
    w->page = (size_t)sysconf(_SC_PAGESIZE);
    w->next_at = FSDPI_SHM_DATA;
    w->spin_max = fsdpi_shm_cores() >= w->boot.size ? FSDPI_SHM_SPIN_MAX : 0;
    c->spin = w->spin_max;
    c->is_world = 1;
    fsdpi_describe(&c->base, NULL, w->boot.job);
    c->base.now.kind = FSDPI_OPEN;
    fsdp_status status = fsdpi_check_world(&c->base, FSDPI_MAX_SRCS);
    if (status) return status;
    int is_host = !w->boot.threads && c->base.index == 0;
    status = w->boot.threads ? fsdpi_shm_open_threads(c)
             : is_host       ? fsdpi_shm_found(c)
                             : fsdpi_shm_join(c);
    if (status) return status;
    fsdpi_shm_publish(c);
    fsdpi_shm_arrive(c);
    if (is_host && c->base.size > 1) status = fsdpi_shm_host(c);
    if (!status) status = fsdpi_shm_wait(c, "come");
    fsdpi_shm_done(c);
    return status;
}

// The group's first member makes its block, and shows the others where.
static void *fsdpi_shm_make_group(fsdpi_shm_comm *parent, int size, uint64_t *block) {
    fsdpi_shm_world *w = parent->world;
    size_t bytes = fsdpi_shm_group_bytes(size);
    fsdpi_shm_group *group;
    if (w->fd < 0) {
        uint64_t number = ~__atomic_fetch_add(&w->control->top, 1u, __ATOMIC_RELAXED);
        fsdpi_shm_node *node = fsdpi_shm_share(w, number, bytes);
        if (node) *block = (uint64_t)(uintptr_t)node->base;
        return node ? node->base : NULL;
    }
    bytes = fsdpi_shm_round(w, bytes);
    *block = __atomic_fetch_add(&w->control->top, bytes, __ATOMIC_RELAXED);
    if (!fsdpi_shm_reserve(w, *block, bytes)) return NULL;
    group = (fsdpi_shm_group *)(void *)fsdpi_shm_map(w, *block, bytes);
    if (group) group->refs = (uint32_t)size;
    return group;
}

static void fsdpi_shm_drop_group(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = c->world;
    size_t bytes = fsdpi_shm_round(w, fsdpi_shm_group_bytes(c->base.size));
    if (w->fd < 0) {
        fsdpi_shm_unshare(w, c->group, c->base.size);
        return;
    }
    int last = __atomic_sub_fetch(&c->group->refs, 1u, __ATOMIC_ACQ_REL) == 0;
    (void)munmap((void *)c->group, bytes);
    if (last) fsdpi_shm_give_back(w, c->block, bytes);
}

static fsdp_status fsdpi_shm_split(fsdp_comm *comm, const fsdp_group *g, fsdp_comm **out) {
    fsdpi_shm_comm *parent = (fsdpi_shm_comm *)(void *)comm, *child = NULL;
    fsdpi_shm_world *w = parent->world;
    void *block = NULL;
    int first = -1;
    *out = NULL;
    fsdpi_describe(&parent->base, NULL, g->name);
    parent->base.now.kind = FSDPI_SPLIT;
    if (FSDPI_LOAD(&w->control->failed)) return fsdpi_shm_report(parent);
    if (g->color >= 0) {
        child = (fsdpi_shm_comm *)fsdpi_alloc(&w->boot.allocator, sizeof *child);
        if (!child)
            return fsdpi_shm_fail_here(parent, FSDP_ERR_OUT_OF_MEMORY, "the allocator refused");
        first = fsdpi_split_members(&parent->base, g, &child->base);
        if (first < 0) {
            fsdpi_free(&w->boot.allocator, child);
            return FSDP_ERR_INVALID_ARG;
        }
        child->world = w;
        child->spin = w->spin_max;
        if (g->index == 0) block = fsdpi_shm_make_group(parent, g->size, &parent->base.now.block);
        if (g->index == 0 && !block) {
            fsdpi_free(&w->boot.allocator, child);
            return fsdpi_shm_fail_here(parent, FSDP_ERR_OUT_OF_MEMORY,
                                       "no memory for the group's block");
        }
    }
    // Names and members differ between the new groups; that it is a split, and which, does not.
    parent->base.now.key = FSDPI_SPLIT;
    fsdpi_shm_publish(parent);
    fsdp_status status = fsdpi_shm_barrier(parent, "come");
    if (!status) status = fsdpi_shm_compare(parent);
    if (!status && child) {
        fsdpi_record leader = fsdpi_record_get(parent->places[first].record);
        child->block = leader.block;
        if (leader.members != parent->base.now.members)
            status = fsdpi_shm_fail(parent, FSDP_ERR_MISMATCH,
                                    "ranks disagree about who is in the group");
        else if (!block && w->fd < 0) block = (void *)(uintptr_t)leader.block;
        else if (!block)
            block = fsdpi_shm_map(w, leader.block,
                                  fsdpi_shm_round(w, fsdpi_shm_group_bytes(child->base.size)));
        if (!status && !block)
            status = fsdpi_shm_fail_here(parent, FSDP_ERR_OUT_OF_MEMORY,
                                         "the group's block cannot be mapped");
    }
    if (child && block) fsdpi_shm_use_group(child, block);
    if (!status) status = fsdpi_shm_barrier(parent, "finished");
    fsdpi_shm_done(parent);
    if (status && child) {
        if (child->group) fsdpi_shm_drop_group(child);
        fsdpi_free(&w->boot.allocator, child);
        child = NULL;
    }
    *out = (fsdp_comm *)(void *)child;
    return status;
}

static void fsdpi_shm_leave_threads(fsdpi_shm_world *w) {
    fsdp_threads *threads = w->boot.threads;
    fsdpi_shm_control *control = w->control;
    fsdpi_lock(&threads->lock);
    if (threads->common == (void *)control)
        threads->common = NULL; // who opens again meets at a new block
    int last = --control->refs == 0;
    fsdpi_unlock(&threads->lock);
    if (!last) return;
    while (control->nodes) {
        fsdpi_shm_node *node = control->nodes;
        fsdp_allocator allocator = node->allocator;
        control->nodes = node->next;
        fsdpi_free(&allocator, node->base);
        fsdpi_free(&allocator, node);
    }
    fsdp_allocator allocator = control->allocator;
    fsdpi_free(&allocator, control);
}

static void fsdpi_shm_close(fsdp_comm *comm) {
    fsdpi_shm_comm *c = (fsdpi_shm_comm *)(void *)comm;
    if (!c) return;
    fsdpi_shm_world *w = c->world;
    fsdp_allocator allocator = w->boot.allocator;
    if (!c->is_world) {
        fsdpi_shm_drop_group(c);
        fsdpi_free(&allocator, c);
        return;
    }
    if (w->joined) { // before memory goes: a peer that waits must not take us for dead
        FSDPI_STORE(&w->peers[w->boot.rank].state, (uint32_t)FSDPI_SHM_LEFT);
        fsdpi_futex_wake_all(&c->group->generation, w->fd >= 0);
    }
    for (int i = 0; i < w->chunks.count; i++) fsdpi_shm_release(w, &w->chunks.list[i]);
    if (w->fd >= 0) {
        if (w->control)
            (void)munmap((void *)w->control,
                         fsdpi_shm_round(w, fsdpi_shm_control_bytes(w->boot.size)));
        (void)close(w->fd);
    } else if (w->joined) {
        fsdpi_shm_leave_threads(w);
    }
    fsdpi_free(&allocator, w->chunks.list);
    fsdpi_free(&allocator, w);
    fsdpi_free(&allocator, c);
}

static fsdp_status fsdpi_shm_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **out) {
    *out = NULL;
    void *comm, *world;
    if (!fsdpi_open_blocks(boot, sizeof(fsdpi_shm_comm), &comm, sizeof(fsdpi_shm_world), &world))
        return FSDP_ERR_OUT_OF_MEMORY;
    fsdpi_shm_comm *c = (fsdpi_shm_comm *)comm;
    fsdpi_shm_world *w = (fsdpi_shm_world *)world;
    c->world = w;
    c->base.boot = &w->boot;
    w->boot = *boot;
    fsdp_status status = fsdpi_shm_try_open(c);
    if (status) {
        fsdpi_open_failed(&c->base);
        fsdpi_shm_close((fsdp_comm *)(void *)c);
        return status;
    }
    caps->kinds = FSDPI_SHM_KINDS;
    caps->flags = FSDP_CAP_FUSED_REDUCE;
    caps->lanes = 2;
    *out = (fsdp_comm *)(void *)c;
    return FSDP_OK;
}
static const char *fsdpi_shm_error_text(fsdp_comm *comm) {
    return comm ? ((fsdpi_shm_comm *)(void *)comm)->base.error : fsdpi_thread_error;
}

static void fsdpi_shm_abort(fsdp_comm *comm, fsdp_status status, const char *why) {
    fsdpi_shm_world *w = ((fsdpi_shm_comm *)(void *)comm)->world;
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    fsdpi_say_abort(&t, &w->boot, why);
    fsdpi_shm_raise(w, status ? status : FSDP_ERR_ABORTED, "", reason);
}

static fsdp_status fsdpi_shm_poll(fsdp_comm *comm) {
    fsdpi_shm_comm *c = (fsdpi_shm_comm *)(void *)comm;
    return FSDPI_LOAD(&c->world->control->failed) ? fsdpi_shm_report(c) : FSDP_OK;
}

FSDP_API const fsdp_comm_ops *fsdp_shm_comm_ops(void) {
    static const fsdp_comm_ops ops = {
        FSDP_COMM_VERSION, sizeof(fsdp_comm_ops), "shm",           fsdpi_shm_open,
        fsdpi_shm_split,   fsdpi_shm_close,       fsdpi_shm_run,   fsdpi_shm_alloc,
        fsdpi_shm_free,    fsdpi_shm_error_text,  fsdpi_shm_abort, fsdpi_shm_poll,
    };
    return &ops;
}

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION

/* ==== fsdp.h, continued ===================================================================== */
#endif
#ifdef FSDP_BACKEND_GLOO
#include "backends/fsdp_gloo.h"
#endif
#ifdef FSDP_BACKEND_NCCL
#include "backends/fsdp_nccl.h"
#endif

static const fsdp_device_ops *fsdpi_host_ops(void);

// In the order in which they are preferred.
static const fsdpi_backend fsdpi_backends[] = {
#ifdef FSDP_BACKEND_SHM
    {"shm", fsdp_shm_comm_ops, fsdpi_host_ops, 1},
#endif
#ifdef FSDP_BACKEND_GLOO
    {"gloo", fsdp_gloo_comm_ops, fsdpi_host_ops, 0},
#endif
#ifdef FSDP_BACKEND_NCCL
    {"nccl", fsdp_nccl_comm_ops, fsdp_cuda_device_ops, 0},
#endif
    {NULL, NULL, NULL, 0}};

/* ==== core/spawn.h ==========================================================================
   ranks that a program starts itself: fsdp_spawn */

// Processes report the result of fn through a pipe, in
// records that are written whole; a rank reports before it aborts its world, so that the first
// record is the cause and later ones are consequences.

#include <errno.h> // errno
#include <fcntl.h> // fcntl, FD_CLOEXEC
#include <poll.h>  // poll

extern char *fsdpi_strsignal(int sig) __asm__("strsignal");

typedef struct fsdpi_spawn_report {
    int32_t rank, status; // FSDP_OK: fn returned 0
    char text[FSDPI_TEXT];
} fsdpi_spawn_report;

typedef struct fsdpi_spawn {
    fsdp_world_desc world; // of every rank, but for rank and local_rank
    fsdp_rank_fn fn;
    void *arg;
    int num_ranks, grace_ms;
    int pipe[2];              // processes
    fsdp_threads common;      // threads
    uint32_t lock;            // threads: of first
    fsdpi_spawn_report first; // the first failure; status FSDP_OK: none
} fsdpi_spawn;

typedef struct fsdpi_spawn_rank {
    fsdpi_spawn *spawn;
    pthread_t thread;
    int rank, pid, ended, reported, started;
} fsdpi_spawn_rank;

static void fsdpi_spawn_text(fsdpi_spawn_report *r, const char *text) {
    char prefix[24];
    int used = snprintf(prefix, sizeof prefix, "rank %d: ", (int)r->rank);
    int named = strncmp(text, prefix, (size_t)used) == 0;
    snprintf(r->text, sizeof r->text, "%s%.*s", named ? "" : prefix, FSDPI_TEXT - 32, text);
}

static void fsdpi_spawn_tell(fsdpi_spawn *s, const fsdpi_spawn_report *r) {
    if (s->world.threads) {
        fsdpi_lock(&s->lock);
        if (r->status && !s->first.status) s->first = *r;
        fsdpi_unlock(&s->lock);
    } else {
        ssize_t written = write(s->pipe[1], r,
                                sizeof *r); // less than PIPE_BUF: whole or not at all
        (void)written;                      // then the parent is gone, and takes this process along
    }
}

// The life of one rank.
static fsdp_status fsdpi_spawn_run(fsdpi_spawn *s, int rank) {
    fsdp_world_desc d = s->world;
    fsdp_world *world = NULL;
    fsdpi_spawn_report r;
    char text[64];
    memset(&r, 0, sizeof r);
    d.rank = d.local_rank = r.rank = rank;
    r.status = (int32_t)fsdp_init(&d, &world);
    if (r.status) {
        fsdpi_spawn_text(&r, fsdp_last_error(NULL));
        fsdpi_spawn_tell(s, &r);
        return (fsdp_status)r.status;
    }
    int value = s->fn(world, s->arg);
    fsdp_status failed = fsdpi_failed(world);
    r.status = (int32_t)failed; // why fn returned what it did, or what it has overlooked
    if (!failed && value)
        r.status = value > 0 && value <= FSDP_ERR_INTERNAL ? value : (int32_t)FSDP_ERR_INTERNAL;
    snprintf(text, sizeof text, "the function of the rank returned %d", value);
    int said = (r.status == value || failed) && *fsdp_last_error(world);
    if (r.status) fsdpi_spawn_text(&r, said ? fsdp_last_error(world) : text);
    fsdpi_spawn_tell(s, &r);
    if (r.status && !failed) fsdp_abort(world, text);
    (void)fsdp_shutdown(world);
    return (fsdp_status)r.status;
}

static void *fsdpi_spawn_thread(void *arg) {
    fsdpi_spawn_rank *me = (fsdpi_spawn_rank *)arg;
    (void)fsdpi_spawn_run(me->spawn, me->rank);
    return NULL;
}

static void fsdpi_spawn_threads(fsdpi_spawn *s, fsdpi_spawn_rank *ranks) {
    s->common.size = s->num_ranks;
    s->world.threads = &s->common;
    for (int k = 0; k < s->num_ranks; k++) {
        int rc = pthread_create(&ranks[k].thread, NULL, fsdpi_spawn_thread, &ranks[k]);
        ranks[k].started = rc == 0;
        if (rc == 0) continue;
        // The ranks that were started fail when this one does not come in time.
        fsdpi_spawn_report r = {k, FSDP_ERR_OUT_OF_MEMORY, ""};
        snprintf(r.text, sizeof r.text, "rank %d: no thread could be started: %s", k, strerror(rc));
        fsdpi_spawn_tell(s, &r);
        break;
    }
    for (int k = 0; k < s->num_ranks; k++)
        if (ranks[k].started) (void)pthread_join(ranks[k].thread, NULL);
}

static void fsdpi_spawn_child(fsdpi_spawn *s, int rank, int parent) {
    (void)close(s->pipe[0]);
    // A rank does not outlive its parent, also if that died before this line.
    (void)fsdpi_syscall(SYS_prctl, 1L /* PR_SET_PDEATHSIG */, 9L /* SIGKILL */, 0L, 0L, 0L);
    if (getppid() != parent) _exit(1);
    fsdp_status status = fsdpi_spawn_run(s, rank);
    (void)fflush(NULL);
    _exit((int)status);
}

static void fsdpi_spawn_kill(const fsdpi_spawn *s, const fsdpi_spawn_rank *ranks, int sig) {
    for (int k = 0; k < s->num_ranks; k++)
        if (ranks[k].pid > 0 && !ranks[k].ended) (void)fsdpi_kill(ranks[k].pid, sig);
}

// A rank that ended without a report was killed, or called exit: the reason of what others report.
static void fsdpi_spawn_lost(fsdpi_spawn *s, int rank, int how) {
    fsdpi_spawn_report r = {rank, FSDP_ERR_PEER_LOST, ""};
    if (s->first.status && s->first.status != (int32_t)FSDP_ERR_PEER_LOST) return;
    if (WIFSIGNALED(how))
        snprintf(r.text, sizeof r.text, "rank %d was killed by signal %d (%s)", rank, WTERMSIG(how),
                 fsdpi_strsignal(WTERMSIG(how)));
    else
        snprintf(r.text, sizeof r.text, "rank %d ended with exit code %d inside its function", rank,
                 WEXITSTATUS(how));
    s->first = r;
}

// One look at all processes: who has ended, what has been reported. Returns how many are running.
static int fsdpi_spawn_look(fsdpi_spawn *s, fsdpi_spawn_rank *ranks, int *how, int signalled) {
    int running = 0;
    fsdpi_spawn_report r;
    struct pollfd p;
    for (int k = 0; k < s->num_ranks; k++) {
        if (ranks[k].pid <= 0 || ranks[k].ended) continue;
        int rc = (int)waitpid(ranks[k].pid, &how[k], WNOHANG);
        if (rc == ranks[k].pid) ranks[k].ended = 1;
        else if (rc < 0 && fsdpi_kill(ranks[k].pid, 0))
            ranks[k].ended = 1; // reaped by the program's own handler
        else running++;
    }
    p.fd = s->pipe[0];
    p.events = POLLIN;
    while (poll(&p, 1, 0) > 0 && read(s->pipe[0], &r, sizeof r) == (ssize_t)sizeof r) {
        ranks[r.rank].reported = 1;
        if (r.status && !s->first.status) s->first = r;
    }
    for (int k = 0; k < s->num_ranks; k++) {
        if (!ranks[k].ended || ranks[k].reported) continue;
        ranks[k].reported = 1;
        if (!signalled) fsdpi_spawn_lost(s, k, how[k]);
    }
    return running;
}

static fsdp_status fsdpi_spawn_processes(fsdpi_spawn *s, fsdpi_spawn_rank *ranks, int *how) {
    int parent = (int)getpid(), signalled = 0;
    int64_t failed_at = 0;
    struct pollfd p;
    if (pipe(s->pipe))
        return fsdpi_fail(NULL, FSDP_ERR_IO, "fsdp_spawn: no pipe: %s", strerror(errno));
    (void)fcntl(s->pipe[0], F_SETFD, FD_CLOEXEC);
    (void)fcntl(s->pipe[1], F_SETFD, FD_CLOEXEC);
    (void)fflush(NULL); // or every child would print what is buffered here
    for (int k = 0; k < s->num_ranks && !s->first.status; k++) {
        ranks[k].pid = (int)fork();
        if (ranks[k].pid == 0) fsdpi_spawn_child(s, k, parent);
        if (ranks[k].pid > 0) continue;
        s->first.rank = k;
        s->first.status = (int32_t)FSDP_ERR_OUT_OF_MEMORY;
        snprintf(s->first.text, sizeof s->first.text, "rank %d could not be forked: %s", k,
                 strerror(errno));
    }
    p.fd = s->pipe[0];
    p.events = POLLIN;
    while (fsdpi_spawn_look(s, ranks, how, signalled)) {
        int64_t now = fsdpi_monotonic_ns(NULL);
        if (s->first.status && !failed_at) failed_at = now;
        int64_t since_ms = failed_at ? (now - failed_at) / 1000000 : -1;
        // The others see that the world is aborted and end by themselves; who computes on is
        // terminated after half of the time, and killed after all of it.
        if (signalled < 1 && since_ms >= s->grace_ms / 2)
            signalled = 1, fsdpi_spawn_kill(s, ranks, 15 /* SIGTERM */);
        if (signalled < 2 && since_ms >= s->grace_ms)
            signalled = 2, fsdpi_spawn_kill(s, ranks, 9 /* SIGKILL */);
        (void)poll(&p, 1, 5); // the end of a process makes no event: look again soon
    }
    (void)close(s->pipe[0]);
    (void)close(s->pipe[1]);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_spawn(const fsdp_spawn_desc *desc, fsdp_rank_fn fn, void *arg) {
    fsdp_spawn_desc d;
    fsdpi_spawn s;
    char job[64];
    memset(&s, 0, sizeof s);
    fsdp_status status = fsdpi_desc_read(NULL, &d, desc, sizeof d, "fsdp_spawn_desc");
    if (!status)
        status = fsdpi_desc_read(NULL, &s.world, d.world, sizeof s.world, "fsdp_world_desc");
    if (status) return status;
    if (!fn || d.num_ranks < 1 || d.grace_ms < 0)
        return fsdpi_fail(
            NULL, FSDP_ERR_INVALID_ARG,
            "fsdp_spawn: num_ranks is %d, grace_ms %d, the function %s: expected num_ranks >= 1, "
            "grace_ms >= 0 and a function",
            d.num_ranks, d.grace_ms, fn ? "given" : "NULL");
    // Two threads may be here at once: their stacks differ.
    snprintf(job, sizeof job, "spawn-%d-%llx-%p", (int)getpid(),
             (unsigned long long)fsdpi_monotonic_ns(NULL), (void *)&s);
    s.world.world_size = s.num_ranks = d.num_ranks;
    s.world.job = job;
    s.world.store = "host:"; // whatever launched this program
    s.world.threads = NULL;
    s.fn = fn;
    s.arg = arg;
    s.grace_ms = d.grace_ms ? d.grace_ms : 1000;
    fsdp_allocator allocator = s.world.allocator;
    if (!allocator.alloc || !allocator.free)
        allocator.alloc = fsdpi_libc_alloc, allocator.free = fsdpi_libc_free;
    size_t bytes = (size_t)d.num_ranks * (sizeof(fsdpi_spawn_rank) + sizeof(int));
    fsdpi_spawn_rank *ranks = (fsdpi_spawn_rank *)fsdpi_alloc(&allocator, bytes);
    if (!ranks)
        return fsdpi_fail(NULL, FSDP_ERR_OUT_OF_MEMORY, "fsdp_spawn: no memory for %d ranks",
                          d.num_ranks);
    for (int k = 0; k < d.num_ranks; k++) ranks[k].spawn = &s, ranks[k].rank = k;
    if (d.threads) fsdpi_spawn_threads(&s, ranks);
    else status = fsdpi_spawn_processes(&s, ranks, (int *)(void *)(ranks + d.num_ranks));
    fsdpi_free(&allocator, ranks);
    if (status || !s.first.status) return status;
    return fsdpi_fail(NULL, (fsdp_status)s.first.status, "fsdp_spawn: %s", s.first.text);
}

/* ==== core/comm.h ===========================================================================
   compiled-in backends, and the one place that turns an op record into a collective */

/* The one with this name; NULL: the first one that can serve the job, on the device of the very
   first, since a program does not move to GPUs by itself. The last entry: there is none. */
static const fsdpi_backend *fsdpi_find_backend(const char *name, int is_spread) {
    const fsdpi_backend *first = fsdpi_backends, *b = first;
    while (b->name && (name ? strcmp(name, b->name) != 0
                            : (is_spread && b->one_host) || b->device_ops != first->device_ops))
        b++;
    return b;
}

// A function of the user's has failed inside an op: the world cannot go on.
static fsdp_status fsdpi_user_fail(fsdp_world *w, const fsdp_op *op, fsdp_status result) {
    char text[FSDPI_TEXT];
    snprintf(text, sizeof text,
             "rank %d: your function for %s (%s) of unit '%s' returned %d (%s), expected FSDP_OK",
             w->rank, fsdp_op_name(op->kind), fsdp_label_name(op->label), op->what, (int)result,
             fsdp_status_name(result));
    int fatal = result > FSDP_ERR_INVALID_STATE && result <= FSDP_ERR_INTERNAL;
    return fsdpi_world_fail(w, fatal ? result : FSDP_ERR_ABORTED, text);
}

static fsdp_custom_comm fsdpi_custom_comm(const fsdp_op *op, void **user) {
    int gather = op->kind == FSDP_OP_ALL_GATHER && op->label == FSDP_LABEL_GATHER;
    if (!op->unit || (!gather && op->kind != FSDP_OP_REDUCE_SCATTER)) return NULL;
    *user = op->unit->custom_user[!gather];
    return op->unit->custom[!gather];
}

static fsdp_status fsdpi_run_collective(fsdp_world *w, const fsdp_op *op, void *stream) {
    fsdp_coll c;
    memset(&c, 0, sizeof c);
    c.kind = op->kind;
    c.dtype = op->dtype;
    c.out_dtype = op->out_dtype;
    c.redop = op->redop;
    c.in_place = op->in_place;
    c.accumulate = op->accumulate;
    c.label = op->label;
    c.state = op->state;
    c.scale = op->scale;
    c.root = op->root;
    c.segs = (const fsdp_seg *)op->list;
    c.num_segs = op->list_count;
    c.count = op->count;
    c.src = op->src_ptr;
    c.dst = op->dst_ptr;
    c.seq = op->seq;
    c.what = op->what;
    c.stream = stream;
    // What all ranks must agree on. seq is left out: ranks may differ in purely local ops.
    uint64_t h = fsdpi_hash(op->kind,
                            ((uint64_t)op->dtype << 40) | ((uint64_t)op->out_dtype << 32) |
                                ((uint64_t)op->redop << 24) | ((uint64_t)op->label << 16) |
                                ((uint64_t)op->state << 8) | op->accumulate);
    h = fsdpi_hash(fsdpi_hash(h, op->count), (uint64_t)(uint32_t)op->root);
    c.fingerprint = fsdpi_hash(fsdpi_hash(h, op->what_hash), op->step);
    void *user;
    fsdp_custom_comm custom = fsdpi_custom_comm(op, &user);
    fsdp_status status = custom ? custom(user, w->comm_ops, op->comm, &c)
                                : w->comm_ops->run(op->comm, &c);
    const char *text = status ? w->comm_ops->error_text(op->comm) : "";
    if (status && custom && !*text) return fsdpi_user_fail(w, op, status);
    return status ? fsdpi_world_fail(w, status, text) : FSDP_OK;
}

/* ==== core/host.h ===========================================================================
   the device table over host memory; the default device of every world */

// Owns: the device table over host memory. Stateless: every op is done when the call returns; lanes
// (see >>lanes) make it asynchronous.

struct fsdp_device {
    fsdp_allocator allocator;
};

static fsdp_status fsdpi_host_open(const fsdp_boot *boot, fsdp_device **out) {
    *out = (fsdp_device *)fsdpi_alloc(&boot->allocator, sizeof **out);
    if (!*out) return FSDP_ERR_OUT_OF_MEMORY;
    (*out)->allocator = boot->allocator;
    return FSDP_OK;
}

static void fsdpi_host_close(fsdp_device *device) {
    fsdp_allocator allocator = device->allocator;
    fsdpi_free(&allocator, device);
}

static fsdp_status fsdpi_host_alloc(fsdp_device *device, int kind, size_t size, void **ptr) {
    (void)kind; // all of it is host memory
    *ptr = fsdpi_alloc(&device->allocator, size);
    return *ptr ? FSDP_OK : FSDP_ERR_OUT_OF_MEMORY;
}

static void fsdpi_host_free(fsdp_device *device, int kind, void *ptr, size_t size) {
    (void)kind, (void)size;
    fsdpi_free(&device->allocator, ptr);
}

// From a sum of |x|^p, or a maximum, to the norm.
static double fsdpi_root(double sum, double p) {
    return !fsdpi_is_finite(p) ? sum : p == 2 ? sqrt(sum) : pow(sum, 1 / p);
}

// What a copy multiplies by.
static double fsdpi_copy_scale(const fsdp_op *op) {
    if (!op->clip) return op->scale;
    double norm = fsdpi_root(*op->clip, op->norm_type), factor = op->scale / (norm + 1e-6);
    return factor < 1.0 || fsdpi_is_nan(norm) ? factor : 1.0;
}

static fsdp_status fsdpi_host_copy(fsdp_device *device, void *stream, const fsdp_op *op) {
    size_t in = fsdp_dtype_size(op->dtype), out = fsdp_dtype_size(op->out_dtype);
    const fsdp_block *blocks = (const fsdp_block *)op->list;
    double scale = fsdpi_copy_scale(op);
    (void)device, (void)stream;
    if (op->clip && scale == 1.0) return FSDP_OK; // in place
    for (uint32_t i = 0; i < op->list_count; i++) {
        fsdp_block b = blocks[i];
        if (b.src_pitch == b.width && b.dst_pitch == b.width) { // no gaps: one long row
            b.width *= b.height;
            b.height = 1;
        }
        for (int64_t row = 0; row < b.height; row++) {
            const char *src = (const char *)op->src_ptr + (size_t)(b.src + row * b.src_pitch) * in;
            char *dst = (char *)op->dst_ptr + (size_t)(b.dst + row * b.dst_pitch) * out;
            fsdpi_reduce(dst, op->out_dtype, &src, 1, op->dtype, (size_t)b.width, scale,
                         op->accumulate, FSDP_SUM);
        }
    }
    return FSDP_OK;
}

static fsdp_status fsdpi_host_zero(fsdp_device *device, void *stream, const fsdp_op *op) {
    (void)device, (void)stream;
    memset(op->dst_ptr, op->fill, (size_t)op->bytes);
    return FSDP_OK;
}

// Precise arithmetic, as in dtype.h; norms are seldom, so that small code is worth more.
#if defined(__clang__)
#pragma float_control(precise, on, push)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("O2", "no-fast-math", "fp-contract=off")
#endif

// Sum of |x|^p in f64. Eight running sums, joined in a fixed order: the bits depend on the values
// alone, not on alignment or on how the compiler vectorises.
static FSDPI_NOINLINE double fsdpi_sum_powers(const void *src, fsdp_dtype dtype, size_t count,
                                              double p) {
    double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0}, tmp[FSDPI_BLOCK];
    size_t size = fsdp_dtype_size(dtype);
    for (size_t at = 0; at < count; at += FSDPI_BLOCK) {
        size_t n = count - at < FSDPI_BLOCK ? count - at : FSDPI_BLOCK;
        const double *x = fsdpi_load_f64(tmp, (const char *)src + at * size, dtype, n);
        size_t i = 0;
        // Loops of their own: clang -Ofast fuses a product and a sum in one loop whatever pragmas
        // say.
        if (p == 2)
            for (size_t k = 0; k < n; k++) tmp[k] = x[k] * x[k];
        else if (p == 1)
            for (size_t k = 0; k < n; k++) tmp[k] = fabs(x[k]);
        else
            for (size_t k = 0; k < n; k++) tmp[k] = pow(fabs(x[k]), p);
        for (; i + 8 <= n; i += 8)
            for (int k = 0; k < 8; k++) sums[k] += tmp[i + (size_t)k];
        for (int k = 0; i < n; i++, k++) sums[k] += tmp[i];
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// *most = max(*most, |x|), by bits: as integers they are in the order of the magnitudes, with NaN
// above infinity, so that a NaN stays.
static FSDPI_NOINLINE void fsdpi_max_abs(double *most, const void *src, fsdp_dtype dtype,
                                         size_t count) {
    double tmp[FSDPI_BLOCK];
    size_t size = fsdp_dtype_size(dtype);
    uint64_t best, bits;
    memcpy(&best, most, sizeof best);
    for (size_t at = 0; at < count; at += FSDPI_BLOCK) {
        size_t n = count - at < FSDPI_BLOCK ? count - at : FSDPI_BLOCK;
        const double *x = fsdpi_load_f64(tmp, (const char *)src + at * size, dtype, n);
        for (size_t i = 0; i < n; i++) {
            memcpy(&bits, &x[i], sizeof bits);
            bits &= 0x7FFFFFFFFFFFFFFFull;
            if (bits > best) best = bits;
        }
    }
    memcpy(most, &best, sizeof best);
}

#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif

static fsdp_status fsdpi_host_norm(fsdp_device *device, void *stream, const fsdp_op *op) {
    const fsdp_block *blocks = (const fsdp_block *)op->list;
    size_t in = fsdp_dtype_size(op->dtype);
    double *norm = (double *)op->dst_ptr;
    (void)device, (void)stream;
    if (!op->accumulate) *norm = 0;
    for (uint32_t i = 0; i < op->list_count; i++) {
        const char *src = (const char *)op->src_ptr + (size_t)blocks[i].src * in;
        size_t count = (size_t)blocks[i].width;
        if (!fsdpi_is_finite(op->norm_type)) fsdpi_max_abs(norm, src, op->dtype, count);
        else *norm += fsdpi_sum_powers(src, op->dtype, count, op->norm_type);
    }
    return FSDP_OK;
}

static const fsdp_device_ops *fsdpi_host_ops(void) {
    static const fsdp_device_ops ops = {FSDP_DEVICE_VERSION,
                                        sizeof(fsdp_device_ops),
                                        FSDP_DEVICE_HOST,
                                        "host",
                                        fsdpi_host_open,
                                        fsdpi_host_close,
                                        fsdpi_host_alloc,
                                        fsdpi_host_free,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL,
                                        fsdpi_host_copy,
                                        fsdpi_host_zero,
                                        fsdpi_host_norm,
                                        NULL,
                                        NULL};
    return &ops;
}

/* ==== core/lanes.h ==========================================================================
   how records run: at once, in worker threads (lanes), on a device's streams */

// Owns: the execution of op records, inline or by worker threads, and events. A lane is one thread
// with a FIFO of records; an event is a place in a lane's order. Invariants: records of one stream
// run in the order of issue; COMPUTE is the caller's own thread, so what it did is done.

#define FSDPI_LANE_OPS 64 // records in flight per lane; issuing one more waits

struct fsdpi_lane {
    fsdp_world *world;
    pthread_t thread;
    uint64_t issued;             // by the caller's thread
    uint32_t head, done;         // published, finished; low 32 bits of counts
    uint32_t asleep, waited_for; // somebody sleeps on head, on done
    uint32_t stop;
    fsdp_op ring[FSDPI_LANE_OPS];
};

// Why a call of the device table has failed.
static const char *fsdpi_device_text(const fsdp_world *w, fsdp_status status) {
    const char *text = w->device_ops->error_text ? w->device_ops->error_text(w->device) : "";
    return *text ? text : fsdp_status_text(status);
}

// Do what a record says. `stream`: native, or NULL.
static fsdp_status fsdpi_execute(fsdp_world *w, const fsdp_op *op, void *stream) {
    const fsdp_device_ops *d = w->device_ops;
    fsdp_status status = FSDP_OK;
    switch (op->kind) {
    case FSDP_OP_COPY: status = d->copy(w->device, stream, op); break;
    case FSDP_OP_ZERO: status = d->zero(w->device, stream, op); break;
    case FSDP_OP_NORM: status = d->norm(w->device, stream, op); break;
    case FSDP_OP_CALL:
        status = op->call(op, stream);
        return status ? fsdpi_user_fail(w, op, status) : FSDP_OK;
    case FSDP_OP_USE:
    case FSDP_OP_HOOK: break;
    default: return fsdpi_run_collective(w, op, stream);
    }
    if (status == FSDP_OK) return FSDP_OK;
    char text[FSDPI_TEXT];
    snprintf(text, sizeof text, "rank %d: %s (%s) of '%s' failed on device %s: %s", w->rank,
             fsdp_op_name(op->kind), fsdp_label_name(op->label), op->what, d->name,
             fsdpi_device_text(w, status));
    return fsdpi_world_fail(w, status, text);
}

// Wait until the lane has finished `seq` records: spin for about the time of a hand-off, then
// sleep.
static void fsdpi_lane_wait(fsdpi_lane *lane, uint64_t seq) {
    for (int spin = 0; spin < 200; spin++) {
        if ((int32_t)(FSDPI_LOAD(&lane->done) - (uint32_t)seq) >= 0) return;
        fsdpi_pause();
    }
    for (;;) {
        __atomic_store_n(&lane->waited_for, 1u, __ATOMIC_SEQ_CST);
        uint32_t done = __atomic_load_n(&lane->done, __ATOMIC_SEQ_CST);
        if ((int32_t)(done - (uint32_t)seq) >= 0) return;
        fsdpi_futex_wait(&lane->done, done, 50000000, 0);
    }
}

static void *fsdpi_lane_main(void *arg) {
    fsdpi_lane *lane = (fsdpi_lane *)arg;
    fsdp_world *w = lane->world;
    uint32_t next = 0;
    for (;;) {
        for (int spin = 0; spin < 200 && FSDPI_LOAD(&lane->head) == next; spin++) fsdpi_pause();
        while (__atomic_load_n(&lane->head, __ATOMIC_SEQ_CST) == next) {
            if (FSDPI_LOAD(&lane->stop)) return NULL;
            __atomic_store_n(&lane->asleep, 1u, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&lane->head, __ATOMIC_SEQ_CST) == next && !FSDPI_LOAD(&lane->stop))
                fsdpi_futex_wait(&lane->head, next, 50000000, 0);
            __atomic_store_n(&lane->asleep, 0u, __ATOMIC_SEQ_CST);
        }
        const fsdp_op *op = &lane->ring[next % FSDPI_LANE_OPS];
        for (int i = 0; i < 2; i++) {
            fsdpi_lane *other = w->lanes[op->wait[i].stream];
            if (other && other != lane) fsdpi_lane_wait(other, op->wait[i].seq);
        }
        if (!fsdpi_failed(w))
            (void)fsdpi_execute(w, op, NULL); // a failure is sticky: seen by the caller
        next++;
        __atomic_store_n(&lane->done, next, __ATOMIC_SEQ_CST);
        if (__atomic_exchange_n(&lane->waited_for, 0u, __ATOMIC_SEQ_CST))
            fsdpi_futex_wake_all(&lane->done, 0);
    }
}

static void fsdpi_lane_push(fsdpi_lane *lane, const fsdp_op *op) {
    if (lane->issued >= FSDPI_LANE_OPS) fsdpi_lane_wait(lane, lane->issued - FSDPI_LANE_OPS + 1);
    lane->ring[lane->issued % FSDPI_LANE_OPS] = *op;
    lane->issued++;
    __atomic_store_n(&lane->head, (uint32_t)lane->issued, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&lane->asleep, __ATOMIC_SEQ_CST)) fsdpi_futex_wake_all(&lane->head, 0);
}

static fsdp_status fsdpi_lane_start(fsdp_world *w, int stream) {
    fsdpi_lane *lane = (fsdpi_lane *)fsdpi_alloc(&w->boot.allocator, sizeof *lane);
    if (!lane) return fsdpi_fail(w, FSDP_ERR_OUT_OF_MEMORY, "no memory for a lane");
    lane->world = w;
    int rc = pthread_create(&lane->thread, NULL, fsdpi_lane_main, lane);
    if (rc) {
        fsdpi_free(&w->boot.allocator, lane);
        return fsdpi_fail(w, FSDP_ERR_OUT_OF_MEMORY, "a lane's thread could not be started: %s",
                          strerror(rc));
    }
    w->lanes[stream] = lane;
    return FSDP_OK;
}

static void fsdpi_lanes_stop(fsdp_world *w) {
    for (int s = 0; s < FSDP_STREAM_COUNT; s++) {
        fsdpi_lane *lane = w->lanes[s];
        if (!lane) continue;
        for (int t = s; t < FSDP_STREAM_COUNT; t++)
            if (w->lanes[t] == lane) w->lanes[t] = NULL;
        __atomic_store_n(&lane->stop, 1u, __ATOMIC_SEQ_CST);
        fsdpi_futex_wake_all(&lane->head, 0);
        (void)pthread_join(lane->thread, NULL);
        fsdpi_free(&w->boot.allocator, lane);
    }
}

// The world's failure that the backend knows of, if there is one.
static fsdp_status fsdpi_backend_poll(fsdp_world *w) {
    fsdp_status status = w->comm && w->comm_ops->poll ? w->comm_ops->poll(w->comm) : FSDP_OK;
    return status ? fsdpi_world_fail(w, status, w->comm_ops->error_text(w->comm)) : FSDP_OK;
}

/* A call of the device table has failed outside an op. A collective that a peer's end has stopped
   looks like that too: then the backend knows more. */
static fsdp_status fsdpi_device_fail(fsdp_world *w, fsdp_status status, const char *what) {
    char text[FSDPI_TEXT];
    fsdp_status known = fsdpi_backend_poll(w);
    if (known) return known;
    snprintf(text, sizeof text, "rank %d: %s device %s failed: %s", w->rank, what,
             w->device_ops->name, fsdpi_device_text(w, status));
    return fsdpi_world_fail(w, status, text);
}

#define FSDPI_FENCE_NS       ((int64_t)50000000)   // from one look at the world to the next
#define FSDPI_FENCE_GRACE_NS ((int64_t)3000000000) // the backend, which knows more, is to be first
#define FSDPI_FENCE_LAST_NS  ((int64_t)500000000)  // in a failed world, whose collectives end

/* The host waits for the fence, at most for the deadline; when the world fails meanwhile, not much
   longer. */
static fsdp_status fsdpi_await_fence(fsdp_world *w) {
    int64_t start = w->boot.clock.now_ns(w->boot.clock.user), waited = 0;
    int64_t limit = w->boot.timeout_ns + FSDPI_FENCE_GRACE_NS;
    for (;;) {
        if (fsdpi_failed(w)) limit = fsdpi_min(limit, FSDPI_FENCE_LAST_NS + waited);
        int64_t slice = fsdpi_min(limit - waited, FSDPI_FENCE_NS);
        fsdp_status status = w->device_ops->sync(w->device, w->fence, slice > 0 ? slice : 0);
        if (status != FSDP_ERR_TIMEOUT) return status;
        waited = w->boot.clock.now_ns(w->boot.clock.user) - start;
        if (waited >= limit) FSDPI_STORE(&w->stuck, 1u);
        if (waited >= limit) return status;
        (void)fsdpi_backend_poll(w);
    }
}

// *event := now, in the order of `stream`.
static fsdp_status fsdpi_mark(fsdp_world *w, int stream, fsdp_event *event) {
    event->stream = stream;
    event->seq = w->lanes[stream] ? w->lanes[stream]->issued : 1;
    if (w->mode != FSDPI_NATIVE) return FSDP_OK;
    fsdp_status status = w->device_ops->record(w->device, w->streams[stream], event->native);
    return status ? fsdpi_device_fail(w, status, "recording an event on") : FSDP_OK;
}

// The host waits until everything issued so far on a stream is done.
static fsdp_status fsdpi_sync(fsdp_world *w, int stream) {
    if (w->lanes[stream]) fsdpi_lane_wait(w->lanes[stream], w->lanes[stream]->issued);
    if (!w->fence) return fsdpi_failed(w);
    fsdp_status status = w->device_ops->record(w->device, w->streams[stream], w->fence);
    if (!status) status = fsdpi_await_fence(w);
    if (status) return fsdpi_device_fail(w, status, "waiting for");
    status = fsdpi_backend_poll(w); // what came meanwhile
    return status ? status : fsdpi_failed(w);
}

static void fsdpi_drain(fsdp_world *w) {
    for (int s = 0; s < FSDP_STREAM_COUNT; s++) (void)fsdpi_sync(w, s);
}

// Run a record in the order of its stream, after the events in wait[].
static fsdp_status fsdpi_issue(fsdp_world *w, const fsdp_op *op) {
    if (w->mode == FSDPI_INLINE) return fsdpi_execute(w, op, NULL);
    if (w->mode == FSDPI_NATIVE) {
        for (int i = 0; i < 2; i++) {
            if (!op->wait[i].native) continue;
            fsdp_status status = w->device_ops->wait(w->device, w->streams[op->stream],
                                                     op->wait[i].native);
            if (status) return fsdpi_device_fail(w, status, "ordering streams of");
        }
        return fsdpi_execute(w, op, w->streams[op->stream]);
    }
    if (w->lanes[op->stream]) {
        fsdpi_lane_push(w->lanes[op->stream], op);
        return FSDP_OK;
    }
    for (int i = 0; i < 2; i++) {
        fsdpi_lane *lane = w->lanes[op->wait[i].stream];
        if (lane) fsdpi_lane_wait(lane, op->wait[i].seq);
    }
    fsdp_status failed = fsdpi_failed(w); // by a record that was waited for
    return failed ? failed : fsdpi_execute(w, op, NULL);
}

static int fsdpi_is_host(const fsdp_world *w) {
    return (w->device_ops->flags & FSDP_DEVICE_HOST) != 0;
}

/* Rows of bytes between host and device memory, or within it, behind what COMPUTE has to do; done
   on return. It waits: for numbers that the host asks for (norms, verdicts), else in no steady
   step. */
static fsdp_status fsdpi_transfer_rows(fsdp_world *w, void *dst, const void *src,
                                       const fsdp_block *rows) {
    fsdp_op op;
    memset(&op, 0, sizeof op);
    op.kind = FSDP_OP_COPY;
    op.label = FSDP_LABEL_WORLD;
    op.stream = FSDP_STREAM_COMPUTE;
    op.what = "transfer";
    op.dtype = op.out_dtype = FSDP_U8;
    op.scale = 1.0;
    op.count = op.bytes = (uint64_t)(rows->width * rows->height);
    op.list = rows;
    op.list_count = 1;
    op.src_ptr = src;
    op.dst_ptr = dst;
    if (op.count == 0) return fsdpi_failed(w);
    fsdp_status status = fsdpi_sync(w, FSDP_STREAM_COMPUTE); // with a deadline: a copy may block
    if (status) return status;
    if (fsdpi_is_host(w)) return fsdpi_host_copy(NULL, NULL, &op);
    status = fsdpi_execute(w, &op, w->streams[FSDP_STREAM_COMPUTE]);
    return status ? status : fsdpi_sync(w, FSDP_STREAM_COMPUTE);
}

static fsdp_status fsdpi_transfer(fsdp_world *w, void *dst, const void *src, size_t nbytes) {
    fsdp_block row = {0, 0, (int64_t)nbytes, 1, (int64_t)nbytes, (int64_t)nbytes};
    return fsdpi_transfer_rows(w, dst, src, &row);
}

/* ==== core/mesh.h ===========================================================================
   ranks arranged in N dims, their process groups, and mesh infos */

// Owns: ranks arranged in N dims, row-major, and one process group per dim (two where gathers and
// reductions may run at the same time). Source: torch: DeviceMesh, _fsdp_common.py mesh infos.

static char *fsdpi_copy_text(const fsdp_allocator *a, const char *text) {
    size_t size = strlen(text) + 1;
    char *copy = (char *)fsdpi_alloc(a, size);
    if (copy) memcpy(copy, text, size);
    return copy;
}

static int fsdpi_mesh_numel(const fsdp_mesh *mesh) {
    int numel = 1;
    for (int d = 0; d < mesh->ndim; d++) numel *= mesh->shape[d];
    return numel;
}

static void fsdpi_mesh_free(fsdp_mesh *mesh) {
    fsdp_world *w = mesh->world;
    const fsdp_allocator *a = &w->boot.allocator;
    for (fsdpi_subgroup **at = &w->subgroups, *sub; (sub = *at) != NULL;) {
        if (sub->mesh != mesh) {
            at = &sub->next;
            continue;
        }
        *at = sub->next;
        w->comm_ops->close(sub->comm);
        fsdpi_free(a, sub);
    }
    for (int d = 0; d < mesh->ndim; d++) {
        fsdp_comm *gather = mesh->gather_comm[d], *reduce = mesh->reduce_comm[d];
        if (mesh->borrowed[d]) gather = reduce = NULL;
        if (reduce && reduce != gather && reduce != w->reduce_comm) w->comm_ops->close(reduce);
        if (gather && gather != w->comm) w->comm_ops->close(gather);
        fsdpi_free(a, mesh->names[d]);
    }
    fsdpi_free(a, mesh->ranks);
    fsdpi_free(a, mesh);
}

static fsdp_status fsdpi_mesh_check(fsdp_world *w, const fsdp_mesh_desc *d) {
    if (d->ndim < 1 || d->ndim > FSDP_MAX_DIMS)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "mesh: ndim is %d, expected 1..%d", d->ndim,
                          FSDP_MAX_DIMS);
    int64_t numel = 1;
    for (int i = 0; i < d->ndim; i++) {
        if (d->shape[i] < 1)
            return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "mesh: size of dim %d is %d, expected >= 1",
                              i, d->shape[i]);
        numel *= d->shape[i];
        if (numel > w->size)
            return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                              "mesh: it has more places than the world has ranks (%d)", w->size);
    }
    for (int64_t i = 0; d->ranks && i < numel; i++) {
        if (d->ranks[i] < 0 || d->ranks[i] >= w->size)
            return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "mesh: rank %d is not in a world of %d",
                              d->ranks[i], w->size);
        for (int64_t j = 0; j < i; j++)
            if (d->ranks[j] == d->ranks[i])
                return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "mesh: rank %d appears twice",
                                  d->ranks[i]);
    }
    return FSDP_OK;
}

static int fsdpi_mesh_stride(const fsdp_mesh *mesh, int dim) {
    int stride = 1;
    for (int d = dim + 1; d < mesh->ndim; d++) stride *= mesh->shape[d];
    return stride;
}

// World ranks of the places that share my coordinates but in these dims, row-major. Outside the
// mesh: those of the first place.
static void fsdpi_mesh_members(const fsdp_mesh *mesh, const int32_t *dims, int num_dims,
                               int32_t *out) {
    int numel = 1, base = 0;
    for (int d = 0; d < mesh->ndim; d++)
        if (mesh->coord[d] > 0) base += mesh->coord[d] * fsdpi_mesh_stride(mesh, d);
    for (int k = 0; k < num_dims; k++) {
        numel *= mesh->shape[dims[k]];
        if (mesh->coord[0] >= 0) base -= mesh->coord[dims[k]] * fsdpi_mesh_stride(mesh, dims[k]);
    }
    for (int i = 0; i < numel; i++) {
        int at = base;
        for (int k = num_dims - 1, rest = i; k >= 0; rest /= mesh->shape[dims[k]], k--)
            at += rest % mesh->shape[dims[k]] * fsdpi_mesh_stride(mesh, dims[k]);
        out[i] = mesh->ranks[at];
    }
}

// Split the world along a dim; or, when `size` is less than the dim's, its group into neighbours.
static fsdp_status fsdpi_mesh_split(const fsdp_mesh *mesh, int dim, int size, int lane,
                                    const char *name, fsdp_comm **out) {
    fsdp_world *w = mesh->world;
    fsdp_comm *parent = size < mesh->shape[dim] ? mesh->gather_comm[dim] : w->comm;
    int32_t d = dim, me = mesh->coord[dim], first = me < 0 ? 0 : me / size * size;
    int32_t *members = (int32_t *)fsdpi_alloc(&w->boot.allocator,
                                              (size_t)mesh->shape[dim] * sizeof *members);
    if (!members) return fsdpi_fail(w, FSDP_ERR_OUT_OF_MEMORY, "mesh: no memory for a group");
    fsdpi_mesh_members(mesh, &d, 1, members);
    fsdp_group group = {
        me < 0 ? -1 : members[first], me < 0 ? -1 : me - first, size, lane, members + first,
        name ? name : "mesh"};
    fsdp_status status = w->comm_ops->split(parent, &group, out);
    fsdpi_free(&w->boot.allocator, members);
    return status ? fsdpi_world_fail(w, status, w->comm_ops->error_text(parent)) : FSDP_OK;
}

// The group of `size` neighbours along a dim that this rank is in, made at its first use.
static fsdp_status fsdpi_mesh_subgroup(const fsdp_mesh *mesh, int dim, int size, fsdp_comm **out) {
    fsdp_world *w = mesh->world;
    fsdpi_subgroup *sub = w->subgroups;
    while (sub && !(sub->mesh == mesh && sub->dim == dim && sub->size == size)) sub = sub->next;
    *out = sub ? sub->comm : NULL;
    if (sub) return FSDP_OK;
    sub = (fsdpi_subgroup *)fsdpi_alloc(&w->boot.allocator, sizeof *sub);
    fsdp_status status = sub ? fsdpi_mesh_split(mesh, dim, size, FSDP_STREAM_GATHER, "post_forward",
                                                &sub->comm)
                             : fsdpi_fail(w, FSDP_ERR_OUT_OF_MEMORY, "mesh: no memory");
    if (status) {
        fsdpi_free(&w->boot.allocator, sub);
        return fsdpi_failed(w) ? status : fsdpi_fail_together(w, status);
    }
    sub->mesh = mesh;
    sub->dim = dim;
    sub->size = size;
    sub->next = w->subgroups;
    w->subgroups = sub;
    *out = sub->comm;
    return FSDP_OK;
}

static fsdp_status fsdpi_mesh_groups(fsdp_mesh *mesh, int dim) {
    fsdp_world *w = mesh->world;
    int two = w->reduce_comm != w->comm, in_order = 1;
    if (mesh->shape[dim] == 1) return FSDP_OK;
    for (int i = 0; i < mesh->shape[dim]; i++) in_order &= mesh->ranks[i] == i;
    if (mesh->ndim == 1 && mesh->shape[0] == w->size && in_order) { // the world's own groups
        mesh->gather_comm[0] = w->comm;
        mesh->reduce_comm[0] = w->reduce_comm;
        return FSDP_OK;
    }
    fsdp_status status = fsdpi_mesh_split(mesh, dim, mesh->shape[dim], FSDP_STREAM_GATHER,
                                          mesh->names[dim], &mesh->gather_comm[dim]);
    if (!status && two)
        status = fsdpi_mesh_split(mesh, dim, mesh->shape[dim], FSDP_STREAM_REDUCE, mesh->names[dim],
                                  &mesh->reduce_comm[dim]);
    if (!status && !two) mesh->reduce_comm[dim] = mesh->gather_comm[dim];
    return status;
}

static fsdp_status fsdpi_mesh_make(fsdp_world *w, const fsdp_mesh_desc *d, fsdp_mesh **out) {
    const fsdp_allocator *a = &w->boot.allocator;
    fsdp_mesh *mesh = (fsdp_mesh *)fsdpi_alloc(a, sizeof *mesh);
    if (!mesh) return fsdpi_fail(w, FSDP_ERR_OUT_OF_MEMORY, "mesh: no memory");
    mesh->world = w;
    mesh->ndim = d->ndim;
    memcpy(mesh->shape, d->shape, sizeof mesh->shape);
    int numel = fsdpi_mesh_numel(mesh), mine = -1, missing = 0;
    mesh->ranks = (int32_t *)fsdpi_alloc(a, (size_t)numel * sizeof *mesh->ranks);
    for (int i = 0; i < d->ndim; i++) {
        if (!d->names[i]) continue;
        mesh->names[i] = fsdpi_copy_text(a, d->names[i]);
        missing |= !mesh->names[i];
    }
    if (!mesh->ranks || missing) {
        fsdpi_mesh_free(mesh);
        return fsdpi_fail(w, FSDP_ERR_OUT_OF_MEMORY, "mesh: no memory");
    }
    for (int i = 0; i < numel; i++) {
        mesh->ranks[i] = d->ranks ? d->ranks[i] : i;
        if (mesh->ranks[i] == w->rank) mine = i;
    }
    for (int i = d->ndim - 1, rest = mine; i >= 0; i--) {
        mesh->coord[i] = mine < 0 ? -1 : rest % mesh->shape[i];
        rest = mine < 0 ? -1 : rest / mesh->shape[i];
    }
    *out = mesh;
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// Owns: the public functions.

// A mesh of the world. Dims that `from` names (-1: none) share the groups of that dim of `parent`.
static fsdp_status fsdpi_mesh_add(fsdp_world *w, const fsdp_mesh_desc *d, const fsdp_mesh *parent,
                                  const int32_t *from, fsdp_mesh **out) {
    fsdp_mesh *mesh;
    int alone = 1; // nobody else is making it
    fsdp_status status = fsdpi_mesh_make(w, d, &mesh);
    for (int dim = 0; dim < d->ndim; dim++) alone &= parent && from[dim] >= 0;
    for (int dim = 0; !status && dim < mesh->ndim; dim++) {
        mesh->borrowed[dim] = parent && from[dim] >= 0;
        if (mesh->borrowed[dim]) {
            mesh->gather_comm[dim] = parent->gather_comm[from[dim]];
            mesh->reduce_comm[dim] = parent->reduce_comm[from[dim]];
            continue;
        }
        status = fsdpi_mesh_groups(mesh, dim);
        if (status) fsdpi_mesh_free(mesh);
    }
    if (status) return fsdpi_failed(w) || alone ? status : fsdpi_fail_together(w, status);
    mesh->next = w->meshes;
    w->meshes = mesh;
    *out = mesh;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_mesh_create(fsdp_world *world, const fsdp_mesh_desc *desc,
                                      fsdp_mesh **mesh) {
    fsdp_mesh_desc d;
    if (!world || !desc || !mesh) return fsdpi_null(world, "mesh_create");
    *mesh = NULL;
    fsdp_status status = fsdpi_failed(world);
    if (!status) status = fsdpi_desc_read(world, &d, desc, sizeof d, "fsdp_mesh_desc");
    if (!status) status = fsdpi_mesh_check(world, &d);
    return status ? status : fsdpi_mesh_add(world, &d, NULL, NULL, mesh);
}

FSDP_API fsdp_status fsdp_mesh_1d(fsdp_world *world, const char *name, fsdp_mesh **mesh) {
    fsdp_mesh_desc d = FSDP_ZERO;
    d.ndim = 1;
    d.shape[0] = world ? world->size : 1;
    d.names[0] = name;
    return fsdp_mesh_create(world, &d, mesh);
}

// Checks that functions which make a mesh from a mesh share.
static fsdp_status fsdpi_mesh_call(const fsdp_mesh *mesh, const char *what, fsdp_mesh **out) {
    if (!mesh || !out) return fsdpi_null(NULL, what);
    *out = NULL;
    return fsdpi_failed(mesh->world);
}

FSDP_API fsdp_status fsdp_mesh_slice(const fsdp_mesh *mesh, const int32_t *dims, int num_dims,
                                     fsdp_mesh **out) {
    fsdp_mesh_desc d = FSDP_ZERO;
    fsdp_status status = fsdpi_mesh_call(mesh, "mesh_slice", out);
    if (status) return status;
    fsdp_world *w = mesh->world;
    int numel = 1;
    for (int i = 0; i < num_dims; i++) {
        if (!dims || dims[i] < 0 || dims[i] >= mesh->ndim || (i > 0 && dims[i] <= dims[i - 1]))
            return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                              "mesh_slice: dims[%d] is %d, expected increasing dims of a %d-D mesh",
                              i, dims ? dims[i] : -1, mesh->ndim);
        d.shape[i] = mesh->shape[dims[i]];
        d.names[i] = mesh->names[dims[i]];
        numel *= d.shape[i];
    }
    if (num_dims < 1)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "mesh_slice: num_dims is %d, expected >= 1",
                          num_dims);
    d.ndim = num_dims;
    int32_t *ranks = (int32_t *)fsdpi_alloc(&w->boot.allocator, (size_t)numel * sizeof *ranks);
    if (!ranks) return fsdpi_fail(w, FSDP_ERR_OUT_OF_MEMORY, "mesh_slice: no memory");
    fsdpi_mesh_members(mesh, dims, num_dims, ranks);
    d.ranks = ranks;
    status = fsdpi_mesh_add(w, &d, mesh, dims, out);
    fsdpi_free(&w->boot.allocator, ranks);
    return status;
}

FSDP_API fsdp_status fsdp_mesh_flatten(const fsdp_mesh *mesh, const char *name, fsdp_mesh **out) {
    fsdp_mesh_desc d = FSDP_ZERO;
    fsdp_status status = fsdpi_mesh_call(mesh, "mesh_flatten", out);
    if (status) return status;
    d.ndim = 1;
    d.shape[0] = fsdpi_mesh_numel(mesh);
    d.names[0] = name;
    d.ranks = mesh->ranks;
    return fsdpi_mesh_add(mesh->world, &d, NULL, NULL, out);
}

FSDP_API fsdp_status fsdp_mesh_unflatten(const fsdp_mesh *mesh, int dim, int outer,
                                         const char *const names[2], fsdp_mesh **out) {
    fsdp_mesh_desc d = FSDP_ZERO;
    int32_t from[FSDP_MAX_DIMS];
    fsdp_status status = fsdpi_mesh_call(mesh, "mesh_unflatten", out);
    if (status) return status;
    if (dim < 0 || dim >= mesh->ndim || mesh->ndim == FSDP_MAX_DIMS || outer < 1 ||
        mesh->shape[dim] % outer != 0)
        return fsdpi_fail(mesh->world, FSDP_ERR_INVALID_ARG,
                          "mesh_unflatten: dim %d into an outer size of %d: expected a dim of the "
                          "%d-D mesh and a divisor of its size %d, and at most %d dims",
                          dim, outer, mesh->ndim, fsdp_mesh_size(mesh, dim), FSDP_MAX_DIMS);
    d.ndim = mesh->ndim + 1;
    for (int i = 0; i < d.ndim; i++) {
        int old = i > dim ? i - 1 : i;
        from[i] = old == dim ? -1 : old;
        d.shape[i] = mesh->shape[old];
        d.names[i] = old != dim ? mesh->names[old] : names ? names[i - dim] : NULL;
    }
    d.shape[dim] = outer;
    d.shape[dim + 1] = mesh->shape[dim] / outer;
    d.ranks = mesh->ranks;
    return fsdpi_mesh_add(mesh->world, &d, mesh, from, out);
}

FSDP_API int fsdp_mesh_dim(const fsdp_mesh *mesh, const char *name) {
    for (int d = 0; mesh && name && d < mesh->ndim; d++)
        if (mesh->names[d] && strcmp(mesh->names[d], name) == 0) return d;
    return -1;
}

FSDP_API int fsdp_mesh_ranks(const fsdp_mesh *mesh, int dim, int32_t *out) {
    int size = fsdp_mesh_size(mesh, dim);
    int32_t d = dim;
    if (size < 0 || mesh->coord[0] < 0) return -1;
    if (out && dim < 0) memcpy(out, mesh->ranks, (size_t)size * sizeof *out);
    else if (out) fsdpi_mesh_members(mesh, &d, 1, out);
    return size;
}

FSDP_API int fsdp_mesh_ndim(const fsdp_mesh *mesh) { return mesh ? mesh->ndim : -1; }

FSDP_API int fsdp_mesh_size(const fsdp_mesh *mesh, int dim) {
    if (!mesh || dim < -1 || dim >= mesh->ndim) return -1;
    return dim < 0 ? fsdpi_mesh_numel(mesh) : mesh->shape[dim];
}

FSDP_API int fsdp_mesh_rank(const fsdp_mesh *mesh, int dim) {
    return !mesh || dim < 0 || dim >= mesh->ndim ? -1 : mesh->coord[dim];
}

FSDP_API fsdp_status fsdp_mesh_info_init(const fsdp_mesh *mesh, int kind, int shard_dim,
                                         int replicate_dim, fsdp_mesh_info *out) {
    static const char *const names[] = {"FSDP", "DDP", "HSDP"};
    if (!mesh || !out) return fsdpi_null(NULL, "mesh_info_init");
    fsdp_world *w = mesh->world;
    if (kind < FSDP_MESH_INFO_FSDP || kind > FSDP_MESH_INFO_HSDP)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "mesh_info_init: kind is %d", kind);
    int shards = kind != FSDP_MESH_INFO_DDP, replicates = kind != FSDP_MESH_INFO_FSDP;
    if (shard_dim < 0 && replicate_dim < 0)
        return fsdpi_fail(
            w, FSDP_ERR_INVALID_ARG,
            "mesh_info_init: at least one of shard_dim and replicate_dim must be given");
    if (shards != (shard_dim >= 0) || replicates != (replicate_dim >= 0) || shard_dim < -1 ||
        replicate_dim < -1)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "mesh_info_init: %s needs %s%s%s, got shard_dim %d, replicate_dim %d",
                          names[kind], shards ? "a shard_dim" : "",
                          shards && replicates ? " and " : "", replicates ? "a replicate_dim" : "",
                          shard_dim, replicate_dim);
    if (shard_dim >= mesh->ndim || replicate_dim >= mesh->ndim || shard_dim == replicate_dim)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "mesh_info_init: shard_dim %d and replicate_dim %d: expected two "
                          "different dims of a %d-D mesh",
                          shard_dim, replicate_dim, mesh->ndim);
    if (mesh->coord[0] < 0)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "mesh_info_init: this rank is outside the mesh");
    memset(out, 0, sizeof *out);
    out->mesh = mesh;
    out->kind = kind;
    out->shard_mesh_dim = shards ? shard_dim : -1;
    out->replicate_mesh_dim = replicates ? replicate_dim : -1;
    out->shard_mesh_size = shards ? mesh->shape[shard_dim] : 1;
    out->shard_mesh_rank = shards ? mesh->coord[shard_dim] : 0;
    out->replicate_mesh_size = replicates ? mesh->shape[replicate_dim] : 1;
    out->replicate_mesh_rank = replicates ? mesh->coord[replicate_dim] : 0;
    out->shard_comm = shards ? mesh->gather_comm[shard_dim] : NULL;
    out->replicate_comm = replicates ? mesh->gather_comm[replicate_dim] : NULL;
    return FSDP_OK;
}

/* ==== core/world.h ==========================================================================
   rank, size, the opened tables, and the objects made from the world */

// Owns: rank, size, the opened tables, lanes, and the objects made from the world.

// Fill in what the desc leaves to the environment, and check the rest.
static fsdp_status fsdpi_world_resolve(fsdp_world *w, fsdp_world_desc *d) {
    fsdp_status status = FSDP_OK;
    int found;
    if (d->world_size == 0) status = fsdpi_env_ranks(w, d);
    if (!status && d->timeout_ms == 0)
        status = fsdpi_env_int(w, "FSDP_TIMEOUT_MS", 1, &d->timeout_ms, &found);
    if (!status && d->lanes == 0) status = fsdpi_env_int(w, "FSDP_LANES", 0, &d->lanes, &found);
    if (!status && d->log_level == FSDP_LOG_DEFAULT) status = fsdpi_env_log_level(w, &d->log_level);
    if (status) return status;
    if (d->timeout_ms == 0) d->timeout_ms = 60000;
    if (d->lanes < 0) d->lanes = 0;
    if (d->world_size < 1 || d->rank < 0 || d->rank >= d->world_size)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "rank %d of a world of %d: expected 0 <= rank < world_size", d->rank,
                          d->world_size);
    if (d->timeout_ms < 0 || d->lanes > 2 || d->local_rank < 0 || d->log_level < 0 ||
        d->log_level > FSDP_LOG_NONE)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "fsdp_world_desc: timeout_ms %d, lanes %d, local_rank %d, log_level %d: "
                          "expected timeout_ms >= 0, lanes -1..2, "
                          "local_rank >= 0, log_level 0..%d",
                          d->timeout_ms, d->lanes, d->local_rank, d->log_level, FSDP_LOG_NONE);
    if (!d->allocator.alloc != !d->allocator.free)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "fsdp_world_desc.allocator: give both functions or neither");
    if (!d->allocator.alloc) {
        d->allocator.alloc = fsdpi_libc_alloc;
        d->allocator.free = fsdpi_libc_free;
    }
    if (!d->logger.log) d->logger.log = fsdpi_stderr_log;
    if (!d->clock.now_ns) d->clock.now_ns = fsdpi_monotonic_ns;
    return FSDP_OK;
}

static fsdp_status fsdpi_table_check(fsdp_world *w, const char *what, uint32_t version,
                                     uint32_t size, uint32_t want_version, size_t want_size) {
    if (version == want_version && size == want_size) return FSDP_OK;
    return fsdpi_fail(
        w, FSDP_ERR_INVALID_ARG,
        "%s table has version %u and size %u, expected %u and %u: build it with this header", what,
        version, size, want_version, (unsigned)want_size);
}

#define FSDPI_BOUNCE 65536 // bytes of a collective on host data that travel at a time

// Chooses backend and device. A world of one rank needs the device only.
static fsdp_status fsdpi_world_choose(fsdp_world *w, const fsdp_world_desc *d) {
    const char *name = d->backend ? d->backend : fsdpi_env("FSDP_BACKEND");
    int is_spread = w->size > 1 && fsdpi_env_is_spread(w, d);
    const fsdpi_backend *b = fsdpi_find_backend(name, is_spread);
    w->device_ops = d->device_ops             ? d->device_ops
                    : b->name && !d->comm_ops ? b->device_ops()
                                              : fsdpi_host_ops();
    int is_missing = !b->name && !d->comm_ops;
    if (w->size == 1 && (!is_missing || !name || d->device_ops)) return FSDP_OK;
    if (is_missing) {
        char text[128];
        fsdpi_text compiled = {text, sizeof text, 0};
        for (b = fsdpi_backends; b->name; b++) fsdpi_say(&compiled, " %s", b->name);
        return fsdpi_fail(w, FSDP_ERR_UNSUPPORTED,
                          "backend '%s'%s is not compiled in: this program has%s. For gloo: "
                          "-DFSDP_BACKEND_GLOO, see docs/cluster.md; for nccl: docs/gpu.md",
                          name        ? name
                          : is_spread ? "gloo"
                                      : "",
                          d->backend || !is_spread ? "" : ", for ranks on several hosts,",
                          b == fsdpi_backends ? " none" : text);
    }
    w->comm_ops = d->comm_ops ? d->comm_ops : b->comm_ops();
    if (!is_spread || d->comm_ops || !b->one_host) return FSDP_OK;
    return fsdpi_fail(w, FSDP_ERR_UNSUPPORTED,
                      "backend '%s' serves one host, and the launcher has started ranks on "
                      "several: FSDP_BACKEND=gloo, see docs/cluster.md",
                      b->name);
}

static fsdp_status fsdpi_world_open_comm(fsdp_world *w) {
    if (!w->comm_ops) return FSDP_OK;
    fsdp_status status = fsdpi_table_check(w, "a backend's", w->comm_ops->version,
                                           w->comm_ops->size, FSDP_COMM_VERSION,
                                           sizeof *w->comm_ops);
    if (status) return status;
    status = w->comm_ops->open(&w->boot, &w->caps, &w->comm);
    if (status) {
        const char *text = w->comm_ops->error_text(NULL);
        w->comm = NULL;
        fsdpi_set_error(w, text);
        fsdpi_log(w, FSDP_LOG_ERROR, status, text);
        return status;
    }
    w->reduce_comm = w->comm;
    uint32_t needed = 1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER |
                      1u << FSDP_OP_ALL_REDUCE | 1u << FSDP_OP_BROADCAST;
    if ((w->caps.kinds & needed) != needed)
        return fsdpi_fail(w, FSDP_ERR_UNSUPPORTED, "backend %s lacks a collective that is needed",
                          w->comm_ops->name);
    status = w->comm_ops->alloc(w->comm, FSDPI_BOUNCE, &w->bounce);
    if (status) {
        w->bounce = NULL;
        return fsdpi_world_fail(w, status, w->comm_ops->error_text(w->comm));
    }
    return FSDP_OK;
}

static fsdp_status fsdpi_world_open_device(fsdp_world *w) {
    fsdp_status status = fsdpi_table_check(w, "a device's", w->device_ops->version,
                                           w->device_ops->size, FSDP_DEVICE_VERSION,
                                           sizeof *w->device_ops);
    if (status) return status;
    status = w->device_ops->open(&w->boot, &w->device);
    if (status) {
        w->device = NULL;
        return fsdpi_fail(w, status, "device %s could not be opened: %s", w->device_ops->name,
                          fsdpi_device_text(w, status));
    }
    return FSDP_OK;
}

// Streams of an asynchronous device, or worker threads; a second communicator where two may run at
// once.
static fsdp_status fsdpi_world_open_streams(fsdp_world *w, int lanes) {
    fsdp_status status = FSDP_OK;
    if (w->device_ops->flags & FSDP_DEVICE_ASYNC) {
        w->mode = FSDPI_NATIVE;
        for (int s = 0; s < FSDP_STREAM_COUNT && !status; s++)
            status = w->device_ops->stream(w->device, s, &w->streams[s]);
        w->own_stream = w->streams[FSDP_STREAM_COMPUTE];
        if (!status) status = w->device_ops->event(w->device, &w->fence);
        if (status)
            return fsdpi_fail(w, status, "device %s could not make a stream: %s",
                              w->device_ops->name, fsdpi_device_text(w, status));
    } else if (lanes > 0) {
        w->mode = FSDPI_LANES;
        int two = lanes > 1 && (w->size == 1 || w->caps.lanes > 1);
        status = fsdpi_lane_start(w, FSDP_STREAM_GATHER);
        if (!status && two) status = fsdpi_lane_start(w, FSDP_STREAM_REDUCE);
        if (!status && !two) w->lanes[FSDP_STREAM_REDUCE] = w->lanes[FSDP_STREAM_GATHER];
        w->lanes[FSDP_STREAM_ALLREDUCE] = w->lanes[FSDP_STREAM_REDUCE];
        if (status) return fsdpi_fail_together(w, status);
    }
    if (w->size == 1 || w->mode == FSDPI_INLINE || w->caps.lanes < 2) return FSDP_OK;
    int32_t *ranks = (int32_t *)fsdpi_alloc(&w->boot.allocator, (size_t)w->size * sizeof *ranks);
    if (!ranks)
        return fsdpi_fail_together(
            w, fsdpi_fail(w, FSDP_ERR_OUT_OF_MEMORY, "no memory for %d ranks", w->size));
    for (int r = 0; r < w->size; r++) ranks[r] = r;
    fsdp_group group = {0, w->rank, w->size, FSDP_STREAM_REDUCE, ranks, "reduce"};
    status = w->comm_ops->split(w->comm, &group, &w->reduce_comm);
    fsdpi_free(&w->boot.allocator, ranks);
    if (!status) return FSDP_OK;
    w->reduce_comm = w->comm;
    return fsdpi_world_fail(w, status, w->comm_ops->error_text(w->comm));
}

static void fsdpi_world_close(fsdp_world *w) {
    fsdpi_lanes_stop(w);
    w->streams[FSDP_STREAM_COMPUTE] = w->own_stream;
    for (int s = 0; s < FSDP_STREAM_COUNT; s++)
        if (w->streams[s]) w->device_ops->destroy(w->device, w->streams[s], NULL);
    if (w->fence) w->device_ops->destroy(w->device, NULL, w->fence);
    if (w->comm && w->reduce_comm != w->comm) w->comm_ops->close(w->reduce_comm);
    if (w->bounce) w->comm_ops->free(w->comm, w->bounce, FSDPI_BOUNCE);
    if (w->comm) w->comm_ops->close(w->comm);
    if (w->device) w->device_ops->close(w->device);
    fsdp_allocator allocator = w->boot.allocator;
    fsdpi_free(&allocator, w);
}

// A collective on host data: through memory that peers may read, FSDPI_BOUNCE bytes at a time.
static fsdp_status fsdpi_host_collective(fsdp_world *w, fsdp_comm *comm, fsdp_op *op, char *data,
                                         int64_t count) {
    size_t size = fsdp_dtype_size(op->dtype);
    int64_t step = (int64_t)(FSDPI_BOUNCE / size);
    op->label = FSDP_LABEL_WORLD;
    op->what_hash = fsdpi_hash_text(op->what);
    op->comm = comm;
    op->src_ptr = op->dst_ptr = w->bounce;
    op->out_dtype = op->dtype;
    op->scale = 1.0;
    fsdpi_drain(w); // lanes may be using the communicator
    int64_t at = 0;
    do {
        int64_t num = fsdpi_min(step, count - at);
        op->count = (uint64_t)num;
        op->seq = ++w->seq;
        char *piece = data + (size_t)at * size;
        fsdp_status status = fsdpi_transfer(w, w->bounce, piece, (size_t)num * size);
        if (!status) status = fsdpi_run_collective(w, op, NULL);
        if (!status) status = fsdpi_transfer(w, piece, w->bounce, (size_t)num * size);
        if (status) return status;
        at += num;
    } while (at < count);
    return FSDP_OK;
}

/* ==== core/layout.h =========================================================================
   where everything lies: the layout of a unit's slots */

static int64_t fsdpi_bytes(int64_t numel, fsdp_dtype dtype) {
    return numel * (int64_t)fsdp_dtype_size(dtype);
}

static int fsdpi_shards(const fsdp_unit *u) { return u->info.shard_mesh_size; }       // W
static int fsdpi_replicas(const fsdp_unit *u) { return u->info.replicate_mesh_size; } // R
static int fsdpi_ranks(const fsdp_unit *u) { return fsdpi_shards(u) * fsdpi_replicas(u); }

static fsdpi_part *fsdpi_part_of(const fsdp_unit *u, const fsdpi_param *p) {
    return &u->parts[p->part];
}

// The block that a part's shards lie in, and the dtype of its gradients.
static fsdpi_flat_block *fsdpi_flat_of(const fsdp_unit *u, const fsdpi_part *part) {
    return &u->model->flats[part->dtype];
}
static fsdp_dtype fsdpi_grad_dtype(const fsdp_model *m, fsdp_dtype dtype) {
    return m->desc.grad_dtype && fsdp_dtype_is_float(dtype) ? m->desc.grad_dtype : dtype;
}

/* Lay out the trainable or the frozen parameters of a part. tmp: room for all parameters of the
   unit. With segs and blocks it fills them; offsets are always written to tmp, in order. */
static fsdp_status fsdpi_list_layout(const fsdp_unit *u, const fsdpi_part *part, int trainable,
                                     fsdp_layout *lay, fsdp_layout_param *tmp, fsdp_seg *segs,
                                     fsdp_block *blocks) {
    int64_t min = u->model->desc.direct_min, size = (int64_t)fsdp_dtype_size(part->param_dtype);
    int count = 0;
    for (int i = 0; i < u->num_params; i++)
        if (fsdpi_part_of(u, &u->params[i]) == part && u->params[i].requires_grad == trainable)
            tmp[count++] = u->params[i].lay;
    lay->world = fsdpi_shards(u);
    lay->rank = u->info.shard_mesh_rank;
    lay->direct_numel = min == FSDP_DIRECT_NEVER ? min : fsdpi_ceil_div(min, size);
    return fsdp_layout_params(lay, tmp, count, segs, blocks);
}

static void fsdpi_list_store(fsdp_unit *u, const fsdpi_part *part, int trainable,
                             const fsdp_layout_param *tmp, int gradients) {
    for (int i = 0, k = 0; i < u->num_params; i++) {
        fsdpi_param *p = &u->params[i];
        if (fsdpi_part_of(u, p) != part || p->requires_grad != trainable) continue;
        if (gradients) p->grad_offset = tmp[k++].full_offset;
        else p->lay = tmp[k++];
    }
}

static int64_t fsdpi_aligned(int64_t bytes) { return fsdpi_align_up(bytes, FSDPI_ALIGN); }

/* Where a part with an extension lies in the slot: its strings, rank after rank, then the parameter
   that is made of them. */
static void fsdpi_extended_layout(fsdp_unit *u, fsdpi_part *part) {
    fsdpi_param *p = part->extended;
    fsdpi_work *gather = &u->all_gather;
    int64_t at = u->slot_bytes;
    for (int i = 0; i < p->num_strings; i++) {
        fsdp_seg seg = {0, at, p->string_bytes[i]};
        if (gather->segs) gather->segs[gather->num] = seg;
        gather->num++;
        part->num_gather++;
        p->string_offset[i] = at;
        at = fsdpi_aligned(at + fsdpi_shards(u) * p->string_bytes[i]);
    }
    p->lay.full_offset = at / (int64_t)fsdp_dtype_size(part->param_dtype);
    u->slot_bytes = fsdpi_aligned(
        at + fsdpi_bytes(fsdpi_shards(u) * p->lay.shard_numel, part->param_dtype));
}

/* The slot of gathered parameters, part after part:
   [trainables | frozen | trainables copied out | frozen copied out] */
static void fsdpi_slot_layout(fsdp_unit *u, fsdpi_part *part, fsdp_layout_param *tmp) {
    int world = fsdpi_shards(u);
    int64_t size = (int64_t)fsdp_dtype_size(part->param_dtype);
    fsdpi_work *gather = &u->all_gather, *out = &part->copy_out;
    part->slot = u->slot_bytes / size;
    part->num_gather = 0;
    int64_t frozen_full = fsdpi_align_up(part->slot + world * part->train.shard_numel,
                                         FSDP_ALIGN_NUMEL);
    int64_t finals = fsdpi_align_up(frozen_full + world * part->frozen.shard_numel,
                                    FSDP_ALIGN_NUMEL);
    int64_t end = finals;
    for (int trainable = 1; trainable >= 0; trainable--) {
        fsdp_layout lay;
        memset(&lay, 0, sizeof lay);
        lay.shard_base = trainable ? part->train.base : part->frozen.base;
        lay.full_base = trainable ? part->slot : frozen_full;
        lay.final_base = end;
        int lists = gather->segs && !part->extended;
        (void)fsdpi_list_layout(u, part, trainable, &lay, tmp,
                                lists ? gather->segs + gather->num : NULL,
                                lists && out->blocks ? out->blocks + out->num : NULL);
        fsdpi_list_store(u, part, trainable, tmp, 0);
        end += lay.final_numel;
        if (part->extended) continue; // its strings are gathered in place of its shard
        gather->num += lay.num_segs;
        part->num_gather += lay.num_segs;
        out->num += lay.num_blocks;
    }
    if (part->extended) fsdpi_extended_layout(u, part);
    else u->slot_bytes = fsdpi_aligned(end * size);
}

/* The slot of gradients, part after part: [reduce input: trainables, users | where the caller
   writes packed ones]. With several the reduce input is a slot of its own, and has the users. */
static void fsdpi_grad_layout(fsdp_unit *u, fsdpi_part *part, fsdp_layout_param *tmp) {
    int64_t size = (int64_t)fsdp_dtype_size(part->param_dtype), reduce = u->reduce_numel;
    fsdp_seg *segs = u->reduce_scatter.segs;
    fsdp_layout lay;
    if (part->num_train == 0) return;
    memset(&lay, 0, sizeof lay);
    part->grad = u->grad_bytes / size;
    if (u->train_parts > 1) reduce = fsdpi_shards(u) * part->train.shard_numel;
    lay.shard_base = part->train.base;
    lay.full_base = part->grad;
    lay.final_base = fsdpi_align_up(part->grad + reduce, FSDP_ALIGN_NUMEL);
    (void)fsdpi_list_layout(u, part, 1, &lay, tmp, segs ? segs + u->reduce_scatter.num : NULL,
                            part->chunk_cat.blocks);
    fsdpi_list_store(u, part, 1, tmp, 1);
    part->chunk_cat.num = lay.num_blocks;
    for (int i = 0; segs && i < lay.num_segs; i++) // its place in the reduce input
        segs[u->reduce_scatter.num + i].full += fsdpi_shards(u) * part->reduce - part->grad;
    u->reduce_scatter.num += lay.num_segs;
    u->grad_bytes = fsdpi_aligned((lay.final_base + lay.final_numel) * size);
}

#define FSDPI_UNIT_MAX ((int64_t)1 << 56) // elements: the bytes of its slots fit 63 bits

/* The layout of a unit's slots, in two uses: with NULL lists it measures (before commit), with
   lists it fills them. */
static fsdp_status fsdpi_unit_layout(fsdp_unit *u, fsdp_layout_param *tmp) {
    int world = fsdpi_shards(u), users = fsdpi_ranks(u) > 1 ? u->num_train : 0;
    int64_t total = 0;
    u->slot_bytes = u->grad_bytes = u->slice_bytes = u->train_numel = 0;
    u->all_gather.num = u->reduce_scatter.num = 0;
    for (int k = 0; k < u->num_parts; k++) {
        fsdpi_part *part = &u->parts[k];
        part->copy_out.num = part->chunk_cat.num = 0;
        part->reduce = u->train_numel;
        for (int trainable = 1; trainable >= 0; trainable--) {
            fsdp_layout lay;
            memset(&lay, 0, sizeof lay);
            fsdp_status status = fsdpi_list_layout(u, part, trainable, &lay, tmp, NULL, NULL);
            if (status) return status;
            fsdpi_list *list = trainable ? &part->train : &part->frozen;
            list->shard_numel = lay.shard_numel;
            list->packed_numel = lay.packed_numel;
            total += lay.shard_numel;
            if (total > FSDPI_UNIT_MAX / world) return FSDP_ERR_INVALID_ARG;
        }
        u->train_numel += part->train.shard_numel;
    }
    u->users_offset = world * u->train_numel;
    u->reduce_numel = u->users_offset + world * users;
    for (int k = 0; k < u->num_parts; k++) {
        fsdpi_slot_layout(u, &u->parts[k], tmp);
        fsdpi_grad_layout(u, &u->parts[k], tmp);
    }
    for (int i = 0; i < u->num_params && u->slices; i++)
        u->slice_bytes += fsdpi_bytes(world * u->params[i].lay.shard_numel / u->slices,
                                      fsdpi_part_of(u, &u->params[i])->param_dtype);
    return FSDP_OK;
}

static int fsdpi_class_find(fsdp_model *m, int pool, size_t bytes) {
    bytes = (size_t)fsdpi_aligned((int64_t)(bytes ? bytes : 1));
    for (int i = 0; i < m->num_classes; i++)
        if (m->classes[i].pool == pool && m->classes[i].bytes == bytes) return i;
    if (!fsdpi_grow(m, (void **)&m->classes, m->num_classes, &m->cap_classes, sizeof *m->classes))
        return -1;
    fsdpi_class *c = &m->classes[m->num_classes];
    memset(c, 0, sizeof *c);
    c->pool = pool;
    c->bytes = bytes;
    return m->num_classes++;
}

// One part that is stored as it is gathered, in memory that peers can read.
static int fsdpi_is_plain(const fsdp_unit *u) {
    return u->num_parts == 1 && u->parts->dtype == u->parts->param_dtype && !u->parts->extended &&
           !u->model->desc.cpu_offload;
}

// One rank: the full parameters are the shards.
static int fsdpi_gather_is_alias(const fsdp_unit *u) {
    return fsdpi_shards(u) == 1 && fsdpi_is_plain(u);
}

// The backend sums the reduction in f32 or f64 while it reads; a narrower reduce dtype has to be
// rounded to, as upstream does, and cannot be fused.
static int fsdpi_is_wide(fsdp_dtype dtype) { return dtype == FSDP_F32 || dtype == FSDP_F64; }

// reduce_scatter casts, scales and adds.
static int fsdpi_can_fuse(const fsdp_unit *u) {
    return (u->model->world->caps.flags & FSDP_CAP_FUSED_REDUCE) != 0;
}

// Gradients must be brought to the reduce dtype before the reduction, which cannot read them as
// they are. What a fused reduction, or the last copy of a single rank, reads may be narrower.
static int fsdpi_must_convert(const fsdp_unit *u, int has_hook) {
    fsdp_dtype dtype = u->parts[u->users_part].param_dtype;
    if (u->train_parts > 1) return 1;
    if (dtype == u->reduce_dtype) return 0;
    int widens = u->reduce_dtype == FSDP_F32 && fsdp_dtype_size(dtype) == 2;
    int reads = fsdpi_shards(u) > 1 ? fsdpi_can_fuse(u) : fsdpi_replicas(u) == 1 && !has_hook;
    return !(widens && reads);
}

static fsdp_status fsdpi_unit_classes(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int64_t bytes[FSDP_POOL_COUNT] = {0};
    int64_t none = u->num_train ? 0 : -1, reduce = fsdpi_bytes(u->reduce_numel, u->reduce_dtype);
    bytes[FSDP_POOL_GATHER] = fsdpi_gather_is_alias(u) ? -1 : u->slot_bytes;
    bytes[FSDP_POOL_SLICE] = u->slices ? u->slice_bytes : -1;
    bytes[FSDP_POOL_GRAD] = none ? none : u->grad_bytes;
    bytes[FSDP_POOL_RIN] = none ? none : reduce;
    bytes[FSDP_POOL_ROUT] = none ? none : reduce / fsdpi_shards(u);
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++) {
        u->classes[pool] = -1;
        if (bytes[pool] < 0) continue;
        int at = fsdpi_class_find(m, pool, (size_t)bytes[pool]);
        if (at < 0) return FSDP_ERR_OUT_OF_MEMORY;
        u->classes[pool] = at;
        m->classes[at].ahead |= pool == FSDP_POOL_GATHER ||
                                (pool == FSDP_POOL_GRAD && !fsdpi_must_convert(u, 0)) ||
                                (pool == FSDP_POOL_ROUT && fsdpi_replicas(u) > 1);
    }
    return FSDP_OK;
}

/* ==== core/pool.h ===========================================================================
   buffers and slots */

// Owns: device memory and its slots. A slot class is (pool, size); its first acquire allocates a
// fixed number of slots, then the least recently released free one is taken, and only if none is
// free is one added. Invariants: no decision looks at an event or the clock, so memory is the same
// on every rank and at every run; a buffer is handed on only after the event of its last consumer.

FSDP_API const char *fsdp_pool_name(int pool) {
    static const char *const names[FSDP_POOL_COUNT] = {
#define FSDP_X(name, text) text,
        FSDP_POOL_LIST(FSDP_X)
#undef FSDP_X
    };
    return pool >= 0 && pool < FSDP_POOL_COUNT ? names[pool] : "?";
}

static void fsdpi_buf_free(fsdp_model *m, fsdp_buf *buf) {
    fsdp_world *w = m->world;
    if (!buf) return;
    m->pool_slots[buf->pool]--;
    m->pool_bytes[buf->pool] -= (int64_t)buf->bytes;
    if (buf->ready.native) w->device_ops->destroy(w->device, NULL, buf->ready.native);
    if (buf->avail.native) w->device_ops->destroy(w->device, NULL, buf->avail.native);
    if (buf->ptr && w->comm && !buf->pinned) w->comm_ops->free(w->comm, buf->ptr, buf->bytes);
    else if (buf->ptr)
        w->device_ops->free(w->device, buf->pinned ? FSDP_MEMORY_PINNED : FSDP_MEMORY_DEVICE,
                            buf->ptr, buf->bytes);
    fsdpi_model_free(m, buf);
}

// Device memory, where peers can read it, and its two events.
static fsdp_status fsdpi_buf_alloc(fsdp_model *m, fsdp_buf *buf) {
    fsdp_world *w = m->world;
    void *ptr = NULL;
    int shared = w->comm && !buf->pinned,
        kind = buf->pinned ? FSDP_MEMORY_PINNED : FSDP_MEMORY_DEVICE;
    fsdp_status status = shared ? w->comm_ops->alloc(w->comm, buf->bytes, &ptr)
                                : w->device_ops->alloc(w->device, kind, buf->bytes, &ptr);
    if (status)
        return fsdpi_fail_stuck(
            w,
            fsdpi_fail(w, status, "%llu bytes for %s could not be allocated: %s",
                       (unsigned long long)buf->bytes, fsdp_pool_name(buf->pool),
                       shared ? w->comm_ops->error_text(w->comm) : fsdpi_device_text(w, status)));
    buf->ptr = (char *)ptr;
    if (w->mode != FSDPI_NATIVE) return FSDP_OK;
    status = w->device_ops->event(w->device, &buf->ready.native);
    if (!status) status = w->device_ops->event(w->device, &buf->avail.native);
    if (!status) return FSDP_OK;
    return fsdpi_fail(w, status, "device %s could not make an event: %s", w->device_ops->name,
                      fsdpi_device_text(w, status));
}

// Can the host read it?
static int fsdpi_is_readable(const fsdp_world *w, const fsdp_buf *buf) {
    return buf->pinned || fsdpi_is_host(w);
}

// A buffer of a pool. In a dry run it is only counted.
static fsdp_status fsdpi_buf_new(fsdp_model *m, int pool, size_t bytes, fsdp_buf **out) {
    fsdp_buf *buf = (fsdp_buf *)fsdpi_model_alloc(m, sizeof *buf);
    *out = NULL;
    if (!buf)
        return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "no host memory for a buffer of %s",
                          fsdp_pool_name(pool));
    buf->bytes = (size_t)fsdpi_aligned((int64_t)(bytes ? bytes : 1));
    buf->pool = (uint8_t)pool;
    buf->pinned = m->desc.cpu_offload && (pool == FSDP_POOL_SHARD || pool == FSDP_POOL_SGRAD);
    m->pool_slots[pool]++;
    m->pool_bytes[pool] += (int64_t)buf->bytes;
    fsdp_status status = m->dry ? FSDP_OK : fsdpi_buf_alloc(m, buf);
    if (status) {
        fsdpi_buf_free(m, buf);
        return status;
    }
    m->counters.allocations++;
    *out = buf;
    return FSDP_OK;
}

static fsdp_status fsdpi_class_add(fsdp_model *m, fsdpi_class *c) {
    if (!fsdpi_grow(m, (void **)&c->slots, c->count, &c->cap, sizeof *c->slots))
        return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "no host memory for a list of %s",
                          fsdp_pool_name(c->pool));
    fsdp_status status = fsdpi_buf_new(m, c->pool, c->bytes, &c->slots[c->count]);
    if (!status) c->count++;
    return status;
}

static fsdp_status fsdpi_class_fill(fsdp_model *m, fsdpi_class *c) {
    fsdp_status status = FSDP_OK;
    for (int depth = c->ahead && m->world->mode != FSDPI_INLINE ? 2 : 1;
         !status && c->count < depth;)
        status = fsdpi_class_add(m, c);
    return status;
}

// A failure inside a collective call: the other ranks must hear of it. A prediction is this rank's
// own.
static fsdp_status fsdpi_model_fail(fsdp_model *m, fsdp_status status) {
    return m->dry || fsdpi_failed(m->world) ? status : fsdpi_fail_together(m->world, status);
}

static fsdp_status fsdpi_acquire(fsdp_unit *u, int pool, fsdp_buf **out) {
    fsdp_model *m = u->model;
    fsdpi_class *c = &m->classes[u->classes[pool]];
    fsdp_status status = c->count ? FSDP_OK : fsdpi_class_fill(m, c);
    fsdp_buf *best = NULL;
    for (int i = 0; i < c->count; i++) {
        fsdp_buf *buf = c->slots[i];
        if (!buf->held && (!best || buf->released < best->released)) best = buf;
    }
    if (!status && !best) {
        status = fsdpi_class_add(m, c);
        if (!status) best = c->slots[c->count - 1];
    }
    if (status) return fsdpi_model_fail(m, status);
    best->held = 1;
    *out = best;
    return FSDP_OK;
}

// Between steps every free slot counts as released at the same time: the next step takes the same
// ones.
static void fsdpi_pools_rewind(fsdp_model *m) {
    for (int i = 0; i < m->num_classes; i++)
        for (int k = 0; k < m->classes[i].count; k++) m->classes[i].slots[k]->released = 0;
    m->release_seq = 0;
}

/* ==== core/unit.h ===========================================================================
   units and parameters: what fully_shard makes of a desc */

static void fsdpi_unit_free(fsdp_unit *u) {
    fsdp_model *m = u->model;
    for (int i = 0; u->params && i < u->num_params; i++) fsdpi_model_free(m, u->params[i].name);
    fsdpi_model_free(m, u->params);
    fsdpi_model_free(m, u->parts);
    fsdpi_model_free(m, u->name);
    fsdpi_model_free(m, u->lists);
    fsdpi_model_free(m, u->prefetch[0]);
    fsdpi_model_free(m, u->prefetch[1]);
    fsdpi_model_free(m, u);
}

static fsdp_status fsdpi_param_check(fsdp_world *w, const char *unit, const char *name,
                                     fsdp_param_desc *d) {
    if (d->ndim == 0)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "fully_shard of unit '%s': parameter '%s' is a scalar (ndim 0), which "
                          "cannot be sharded: "
                          "make it a vector of one element",
                          unit, name);
    if (d->ndim < 0 || d->ndim > FSDP_MAX_DIMS)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "fully_shard of unit '%s': parameter '%s' has ndim %d, expected 1..%d",
                          unit, name, d->ndim, FSDP_MAX_DIMS);
    if (d->shard_dim < -d->ndim || d->shard_dim >= d->ndim)
        return fsdpi_fail(
            w, FSDP_ERR_INVALID_ARG,
            "fully_shard of unit '%s': parameter '%s' has shard_dim %d, invalid for %d dims", unit,
            name, d->shard_dim, d->ndim);
    if (d->shard_dim < 0) d->shard_dim += d->ndim;
    for (int i = 0; i < d->ndim; i++)
        if (d->shape[i] < 0)
            return fsdpi_fail(
                w, FSDP_ERR_INVALID_ARG,
                "fully_shard of unit '%s': parameter '%s' has size %lld in dim %d, expected >= 0",
                unit, name, (long long)d->shape[i], i);
    if (d->dtype == FSDP_DTYPE_KEEP) d->dtype = FSDP_F32;
    if (!fsdp_dtype_size(d->dtype))
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "fully_shard of unit '%s': parameter '%s' has dtype %d, which is none",
                          unit, name, d->dtype);
    if (!d->frozen && !fsdp_dtype_is_float(d->dtype))
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "fully_shard of unit '%s': parameter '%s' is %s and requires a gradient: "
                          "only floating parameters can; set frozen",
                          unit, name, fsdp_dtype_name(d->dtype));
    return FSDP_OK;
}

static fsdp_status fsdpi_param_extension(fsdp_unit *u, fsdpi_param *p,
                                         const fsdp_gather_extension *extension) {
    fsdp_world *w = u->model->world;
    int64_t rest = fsdpi_numel(p->lay.shape, 0, p->lay.shard_dim);
    rest = fsdpi_mul(rest, fsdpi_numel(p->lay.shape, p->lay.shard_dim + 1, p->lay.ndim));
    p->extension = *extension;
    if (!extension->sizes || !extension->pre_all_gather || !extension->post_all_gather)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "fully_shard of unit '%s': the extension of parameter '%s' lacks a "
                          "function: give sizes, pre_all_gather and post_all_gather",
                          u->name, p->name);
    int64_t rows = fsdpi_ceil_div(p->lay.shape[p->lay.shard_dim], fsdpi_shards(u));
    int64_t numel = fsdpi_mul(rest, rows), sum = 0;
    p->num_strings = numel < 0 ? 0 : extension->sizes(extension->user, numel, p->string_bytes);
    int good = p->num_strings >= 1 && p->num_strings <= FSDP_GATHER_TENSORS;
    for (int i = 0; good && i < p->num_strings; i++) {
        good = p->string_bytes[i] >= 0 && p->string_bytes[i] <= FSDPI_NUMEL_MAX / fsdpi_shards(u);
        sum += good ? p->string_bytes[i] : 0;
        good = good && sum <= FSDPI_NUMEL_MAX / fsdpi_shards(u) / 8;
    }
    return good ? FSDP_OK
                : fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                             "fully_shard of unit '%s': the extension of parameter '%s' returned "
                             "%d strings: expected 1..%d, of sizes >= 0",
                             u->name, p->name, p->num_strings, FSDP_GATHER_TENSORS);
}

// Parameters of a unit from their descs. The array of descs may have an older header's stride.
static fsdp_status fsdpi_unit_params(fsdp_unit *u, const fsdp_unit_desc *d) {
    fsdp_model *m = u->model;
    uint32_t stride = 0;
    for (int i = 0; i < d->num_params; i++) {
        const char *at = (const char *)d->params +
                         (size_t)i * (stride ? stride : sizeof(fsdp_param_desc));
        fsdp_param_desc pd;
        char what[64], fallback[16];
        snprintf(what, sizeof what, "fsdp_unit_desc.params[%d]", i);
        fsdp_status status = fsdpi_desc_read(m->world, &pd, at, sizeof pd, what);
        if (status) return status;
        if (i == 0) stride = pd.size ? pd.size : (uint32_t)sizeof pd;
        snprintf(fallback, sizeof fallback, "p%d", i);
        const char *name = pd.name ? pd.name : fallback;
        status = fsdpi_param_check(m->world, u->name, name, &pd);
        if (status) return status;
        fsdpi_param *p = &u->params[i];
        p->name = fsdpi_copy_text(&m->world->boot.allocator, name);
        if (!p->name)
            return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY,
                              "fully_shard of unit '%s': no memory", u->name);
        m->host_bytes += (int64_t)fsdpi_alloc_size(p->name);
        p->user = pd.user;
        p->dtype = pd.dtype;
        p->requires_grad = !pd.frozen;
        p->keep_dtype = pd.keep_dtype;
        p->lay.ndim = pd.ndim;
        p->lay.shard_dim = pd.shard_dim;
        memcpy(p->lay.shape, pd.shape, sizeof p->lay.shape);
        if (pd.extension) status = fsdpi_param_extension(u, p, pd.extension);
        if (status) return status;
    }
    return FSDP_OK;
}

// The narrowest dtype that holds both; KEEP: nothing yet.
static fsdp_dtype fsdpi_promote(fsdp_dtype a, fsdp_dtype b) {
    if (a == FSDP_DTYPE_KEEP || a == b) return b;
    return a == FSDP_F64 || b == FSDP_F64 ? FSDP_F64 : FSDP_F32;
}

// All that ranks must have given alike: it is part of what every collective compares.
static uint64_t fsdpi_unit_hash(const fsdp_unit *u) {
    const fsdp_model_desc *md = &u->model->desc;
    uint64_t h = fsdpi_hash(fsdpi_hash_text(u->name), (uint64_t)u->num_params);
    h = fsdpi_hash(fsdpi_hash(h, (uint64_t)u->policy_dtype), (uint64_t)u->reduce_dtype);
    h = fsdpi_hash(fsdpi_hash(h, (uint64_t)md->grads_overwrite), (uint64_t)md->direct_min);
    h = fsdpi_hash(fsdpi_hash(h, (uint64_t)md->grad_dtype), (uint64_t)u->slices);
    h = fsdpi_hash(fsdpi_hash(h, (uint64_t)fsdpi_shards(u)), (uint64_t)fsdpi_replicas(u));
    for (int i = 0; i < u->num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        h = fsdpi_hash(fsdpi_hash(h, fsdpi_hash_text(p->name)), (uint64_t)p->requires_grad);
        h = fsdpi_hash(fsdpi_hash(h, (uint64_t)p->lay.ndim), (uint64_t)p->lay.shard_dim);
        h = fsdpi_hash(fsdpi_hash(h, (uint64_t)p->dtype), (uint64_t)p->keep_dtype);
        for (int d = 0; d < p->lay.ndim; d++) h = fsdpi_hash(h, (uint64_t)p->lay.shape[d]);
        for (int k = 0; k < p->num_strings; k++) h = fsdpi_hash(h, (uint64_t)p->string_bytes[k]);
    }
    return h;
}

/* Sort the parameters into parts, by their dtypes and by who requires a gradient now, and measure.
   Again after fsdp_set_requires_grad. */
static fsdp_status fsdpi_unit_arrange(fsdp_unit *u) {
    fsdp_model *m = u->model;
    u->num_parts = u->num_train = u->train_parts = u->users_part = 0;
    u->reduce_dtype = FSDP_DTYPE_KEEP;
    for (int i = 0; i < u->num_params; i++) {
        fsdpi_param *p = &u->params[i];
        int casts = u->policy_dtype && fsdp_dtype_is_float(p->dtype) && !p->keep_dtype, k = 0;
        fsdpi_part new_part, *part;
        memset(&new_part, 0, sizeof new_part);
        new_part.dtype = p->dtype;
        new_part.param_dtype = casts ? u->policy_dtype : p->dtype;
        new_part.extended = p->extension.sizes ? p : NULL;
        while (k < u->num_parts && (u->parts[k].dtype != new_part.dtype ||
                                    u->parts[k].param_dtype != new_part.param_dtype ||
                                    u->parts[k].extended || new_part.extended))
            k++;
        part = &u->parts[k];
        if (k == u->num_parts) u->parts[u->num_parts++] = new_part;
        p->part = k;
        p->user_index = p->requires_grad ? u->num_train++ : -1;
        if (!p->requires_grad) continue;
        if (part->num_train++ == 0 && u->train_parts++ == 0) u->users_part = k;
        u->reduce_dtype = fsdpi_promote(u->reduce_dtype, fsdpi_grad_dtype(m, p->dtype));
    }
    if (u->policy_reduce || !u->num_train)
        u->reduce_dtype = u->policy_reduce ? u->policy_reduce : FSDP_F32;
    int bytes = u->num_parts > 1 || u->parts[0].extended;
    u->gather_dtype = bytes ? FSDP_U8 : u->parts[0].param_dtype;
    u->desc_hash = fsdpi_unit_hash(u);
    fsdp_layout_param *tmp = (fsdp_layout_param *)fsdpi_model_alloc(m, (size_t)u->num_params *
                                                                           sizeof *tmp);
    if (!tmp)
        return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "layout of unit '%s': no memory",
                          u->name);
    fsdp_status status = fsdpi_unit_layout(u, tmp);
    fsdpi_model_free(m, tmp);
    if (status)
        return fsdpi_fail(m->world, status,
                          "fully_shard of unit '%s': its size is more than 2^56 elements", u->name);
    status = fsdpi_unit_classes(u);
    return status ? fsdpi_fail(m->world, status, "layout of unit '%s': no memory", u->name)
                  : status;
}

static fsdp_status fsdpi_dtypes_check(fsdp_world *w, const char *what, const char *name,
                                      fsdp_dtype param, fsdp_dtype reduce, fsdp_dtype output) {
    if ((!param || fsdp_dtype_is_float(param)) && (!reduce || fsdp_dtype_is_float(reduce)) &&
        (!output || fsdp_dtype_is_float(output)))
        return FSDP_OK;
    return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                      "%s '%s': param_dtype %d, reduce_dtype %d, output_dtype %d: expected "
                      "floating dtypes or KEEP",
                      what, name, param, reduce, output);
}

// What the desc says about meshes: a mesh info, a mesh, or as `otherwise`.
static fsdp_status fsdpi_resolve_mesh(fsdp_world *w, const fsdp_mesh *mesh,
                                      const fsdp_mesh_info *info, const fsdp_mesh_info *otherwise,
                                      fsdp_mesh_info *out) {
    int kind = FSDP_MESH_INFO_FSDP, shard = 0, replicate = -1;
    if (!mesh && !info) {
        *out = *otherwise;
        return FSDP_OK;
    }
    if (info) {
        mesh = info->mesh;
        kind = info->kind;
        shard = info->shard_mesh_dim;
        replicate = info->replicate_mesh_dim;
    }
    if (!mesh || mesh->world != w)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "the mesh belongs to another world, or the mesh info has none: make the "
                          "mesh from this world");
    if (!info && mesh->ndim > 2)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "a %d-D mesh: expected 1-D (FSDP) or 2-D (HSDP): slice it, or say by "
                          "mesh_info which dims shard and replicate",
                          mesh->ndim);
    if (!info && mesh->ndim == 2) {
        if (!mesh->names[0] || !mesh->names[1])
            return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                              "a 2-D mesh without names of its dims: name them, dim 0 replicates "
                              "and dim 1 shards, or give mesh_info");
        kind = FSDP_MESH_INFO_HSDP;
        replicate = 0;
        shard = 1;
    }
    return fsdp_mesh_info_init(mesh, kind, shard, replicate, out);
}

// Groups of a unit, and what reshard_after_forward comes to.
static fsdp_status fsdpi_unit_groups(fsdp_unit *u, const fsdp_unit_desc *d) {
    fsdp_model *m = u->model;
    const fsdp_mesh_info *info = &u->info;
    int n = d->reshard_after_forward ? d->reshard_after_forward : m->desc.reshard_after_forward;
    if (info->shard_mesh_dim >= 0) u->reduce_comm = info->mesh->reduce_comm[info->shard_mesh_dim];
    if (info->replicate_mesh_dim >= 0)
        u->replicate_comm = info->mesh->reduce_comm[info->replicate_mesh_dim];
    if (n < FSDP_RESHARD_NEVER || (n > 1 && fsdpi_shards(u) % n != 0))
        return fsdpi_fail(m->world, FSDP_ERR_INVALID_ARG,
                          "fully_shard of unit '%s': reshard_after_forward is %d, expected "
                          "FSDP_RESHARD_DEFAULT, _ALWAYS, _NEVER or a divisor of the shard group's "
                          "%d ranks",
                          u->name, n, fsdpi_shards(u));
    if (n > 1 && n == fsdpi_shards(u)) n = FSDP_RESHARD_ALWAYS;
    u->reshard_after_forward = n;
    u->slices = n > 1 ? n : 0;
    return n > 1 ? fsdpi_mesh_subgroup(info->mesh, info->shard_mesh_dim, n, &u->slice_comm)
                 : FSDP_OK;
}

static fsdp_status fsdpi_unit_fill(fsdp_unit *u, const fsdp_unit_desc *d) {
    fsdp_model *m = u->model;
    const fsdp_model_desc *md = &m->desc;
    size_t count = (size_t)d->num_params;
    char fallback[24];
    snprintf(fallback, sizeof fallback, "unit%d", m->num_units);
    u->name = fsdpi_copy_text(&m->world->boot.allocator, d->name ? d->name : fallback);
    if (u->name) m->host_bytes += (int64_t)fsdpi_alloc_size(u->name);
    u->params = (fsdpi_param *)fsdpi_model_alloc(m, count * sizeof *u->params);
    u->parts = (fsdpi_part *)fsdpi_model_alloc(m, count * sizeof *u->parts);
    if (!u->name || !u->params || !u->parts)
        return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "fully_shard of unit '%s': no memory",
                          d->name ? d->name : fallback);
    fsdp_status status = fsdpi_dtypes_check(m->world, "fully_shard of unit", u->name,
                                            d->param_dtype, d->reduce_dtype, d->output_dtype);
    if (!status) status = fsdpi_resolve_mesh(m->world, d->mesh, d->mesh_info, &m->info, &u->info);
    if (status) return status;
    u->policy_dtype = d->param_dtype ? d->param_dtype : md->param_dtype;
    u->policy_reduce = d->reduce_dtype ? d->reduce_dtype : md->reduce_dtype;
    u->output_dtype = d->output_dtype ? d->output_dtype : md->output_dtype;
    u->keep_inputs = d->keep_forward_inputs || md->keep_forward_inputs;
    u->num_params = d->num_params;
    status = fsdpi_unit_params(u, d);
    if (!status) status = fsdpi_unit_groups(u, d);
    return status ? status : fsdpi_unit_arrange(u);
}

FSDP_API fsdp_status fsdp_fully_shard(fsdp_model *model, const fsdp_unit_desc *desc,
                                      fsdp_unit **unit) {
    fsdp_unit_desc d;
    if (!model || !desc || !unit) return fsdpi_null(model ? model->world : NULL, "fully_shard");
    *unit = NULL;
    fsdp_world *w = model->world;
    fsdp_status status = fsdpi_failed(w);
    if (!status) status = fsdpi_desc_read(w, &d, desc, sizeof d, "fsdp_unit_desc");
    if (status) return status;
    if (model->layout > 0)
        return fsdpi_fail(w, FSDP_ERR_INVALID_STATE,
                          "fully_shard: the model is committed: make all units before the first "
                          "hook, init or load");
    if (d.num_params < 1 || !d.params)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "fully_shard of unit '%s': num_params is %d, expected >= 1, and params",
                          d.name ? d.name : "", d.num_params);
    fsdp_unit *u = (fsdp_unit *)fsdpi_model_alloc(model, sizeof *u);
    if (!u || !fsdpi_grow(model, (void **)&model->units, model->num_units, &model->cap_units,
                          sizeof *model->units)) {
        fsdpi_model_free(model, u);
        return fsdpi_fail(w, FSDP_ERR_OUT_OF_MEMORY, "fully_shard of unit '%s': no memory",
                          d.name ? d.name : "");
    }
    u->model = model;
    u->user = d.user;
    u->index = model->num_units;
    u->reshard_after_backward = u->sync = u->all_reduce = 1;
    u->unshard_in_backward = u->reduce_unused = u->grad_is_zero = 1;
    u->last_order = -1;
    status = fsdpi_unit_fill(u, &d);
    if (status) {
        fsdpi_unit_free(u);
        return status;
    }
    for (int i = 0; i < u->num_params; i++) u->params[i].ordinal = model->num_params + i;
    model->num_params += u->num_params;
    model->mixed |= u->info.shard_comm != model->info.shard_comm ||
                    u->info.replicate_comm != model->info.replicate_comm ||
                    u->info.shard_mesh_size != model->info.shard_mesh_size;
    model->units[model->num_units++] = u;
    *unit = u;
    return FSDP_OK;
}

FSDP_API int fsdp_num_params(const fsdp_model *model) { return model ? model->num_params : 0; }
FSDP_API int fsdp_num_units(const fsdp_model *model) { return model ? model->num_units : 0; }
FSDP_API const char *fsdp_unit_name(const fsdp_unit *unit) { return unit ? unit->name : ""; }

FSDP_API fsdp_training_state fsdp_unit_state(const fsdp_unit *unit) {
    return unit ? (fsdp_training_state)unit->state : FSDP_STATE_COUNT;
}
FSDP_API fsdp_storage_state fsdp_unit_storage(const fsdp_unit *unit) {
    return unit ? (fsdp_storage_state)unit->storage : FSDP_STORAGE_COUNT;
}

/* ==== core/ops.h ============================================================================
   op records, and fsdpi_emit, the only door to the tables */

// Owns: fsdpi_emit, the only door to the device and comm tables. It numbers a record, counts it,
// shows it to the observer, derives what it waits for from the buffers it reads and writes, and
// runs it.

FSDP_API const char *fsdp_op_name(int kind) {
    static const char *const names[FSDP_OP_COUNT] = {
#define FSDP_X(name, text) text,
        FSDP_OP_LIST(FSDP_X)
#undef FSDP_X
    };
    return kind >= 0 && kind < FSDP_OP_COUNT ? names[kind] : "?";
}

FSDP_API const char *fsdp_label_name(int label) {
    static const char *const names[FSDP_LABEL_COUNT] = {
#define FSDP_X(name, text) text,
        FSDP_LABEL_LIST(FSDP_X)
#undef FSDP_X
    };
    return label >= 0 && label < FSDP_LABEL_COUNT ? names[label] : "?";
}

// A record with the model's labels; the caller fills in the rest.
static FSDPI_NOINLINE fsdp_op fsdpi_op(const fsdp_model *m, const fsdp_unit *u, int kind, int label,
                                       int stream) {
    fsdp_op op;
    memset(&op, 0, sizeof op);
    op.kind = (uint8_t)kind;
    op.label = (uint8_t)label;
    op.stream = (uint8_t)stream;
    op.state = m->call_state;
    op.scale = 1.0;
    op.unit = u;
    op.what = u ? u->name : fsdp_label_name(label);
    op.what_hash = u ? u->desc_hash : (uint64_t)label;
    op.step = m->step;
    return op;
}

static int fsdpi_must_wait(const fsdp_world *w, const fsdp_event *event, int stream) {
    return w->mode != FSDPI_INLINE && event->seq != 0 && event->stream != stream;
}

/* Three rules. Reading waits for the last write by another stream; writing too (one writer at a
   time); the first write after acquire waits for the last consumer's release. */
static fsdp_status fsdpi_emit(fsdp_model *m, fsdp_op *op) {
    fsdp_world *w = m->world;
    fsdp_status status = fsdpi_failed(w);
    if (status) return status;
    op->seq = ++m->seq;
    m->counters.calls[op->kind]++;
    m->counters.bytes[op->kind] += op->bytes;
    if (m->dry) return FSDP_OK;
    int num = 0;
    if (op->src && fsdpi_must_wait(w, &op->src->ready, op->stream))
        op->wait[num++] = op->src->ready;
    if (op->dst && op->dst != op->src) {
        fsdp_event *event = op->dst->avail.seq ? &op->dst->avail : &op->dst->ready;
        if (fsdpi_must_wait(w, event, op->stream)) op->wait[num++] = *event;
    }
    if (op->dst) op->dst->avail.seq = 0;
    if (!(m->driver.op && m->driver.op(m->driver.user, m, op))) status = fsdpi_issue(w, op);
    if (!status && op->dst) status = fsdpi_mark(w, op->stream, &op->dst->ready);
    return status;
}

// Fill elements [from, from + count) of a buffer with a byte.
static fsdp_status fsdpi_emit_fill(fsdp_model *m, const fsdp_unit *u, int label, int stream,
                                   fsdp_buf *dst, fsdp_dtype dtype, int64_t from, int64_t count,
                                   uint8_t fill) {
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_ZERO, label, stream);
    if (count == 0 || m->dry) return FSDP_OK;
    op.fill = fill;
    op.dtype = op.out_dtype = (uint8_t)dtype;
    op.count = (uint64_t)count;
    op.bytes = (uint64_t)fsdpi_bytes(count, dtype);
    op.dst = dst;
    op.dst_ptr = dst->ptr + fsdpi_bytes(from, dtype);
    return fsdpi_emit(m, &op);
}

/* A copy over blocks, a collective over segments, or an all_reduce of work->count elements, from
   src in dtype to dst in out_dtype. The caller has set what is special (scale, accumulate,
   in_place) and a collective's group. An empty one is not issued. Of a collective a rank reads
   (group_size-1) times its own part from the others. */
static fsdp_status fsdpi_emit_work(fsdp_model *m, fsdp_op *op, fsdp_buf *src, fsdp_dtype dtype,
                                   fsdp_buf *dst, fsdp_dtype out_dtype, const fsdpi_work *work) {
    int is_copy = op->kind == FSDP_OP_COPY;
    if (work->count == 0) return FSDP_OK; // in a prediction, where no lists are made, always
    op->count = work->count;
    op->bytes = is_copy ? op->count * fsdp_dtype_size(out_dtype)
                        : (uint64_t)(op->group_size - 1) * op->count * fsdp_dtype_size(dtype);
    op->dtype = (uint8_t)dtype;
    op->out_dtype = (uint8_t)out_dtype;
    op->list = is_copy ? (const void *)work->blocks : work->segs;
    op->list_count = op->list ? (uint32_t)work->num : 0;
    op->src = src;
    op->dst = dst;
    op->src_ptr = src->ptr;
    op->dst_ptr = dst->ptr;
    return fsdpi_emit(m, op);
}

// COMPUTE, the caller's stream, waits until buf is written.
static fsdp_status fsdpi_emit_use(fsdp_model *m, const fsdp_unit *u, int label, fsdp_buf *buf) {
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_USE, label, FSDP_STREAM_COMPUTE);
    op.src = buf;
    return fsdpi_emit(m, &op);
}

/* Give a slot back; `stream` is its last consumer. With debug, what is released becomes NaN. */
static fsdp_status fsdpi_release(fsdp_unit *u, fsdp_buf **slot, int stream) {
    fsdp_model *m = u->model;
    fsdp_buf *buf = *slot;
    if (!buf) return FSDP_OK;
    fsdp_status status = FSDP_ASSERT(m->world, buf->held);
    if (!status && m->desc.debug)
        status = fsdpi_emit_fill(m, u, FSDP_LABEL_NONE, stream, buf, FSDP_U8, 0,
                                 (int64_t)buf->bytes, 0xFF);
    if (!status && !m->dry && buf->avail.seq == 0) // else nobody has written it meanwhile
        status = fsdpi_mark(m->world, stream, &buf->avail);
    buf->held = 0;
    buf->released = ++m->release_seq;
    *slot = NULL;
    return status;
}

/* ==== core/gather.h =========================================================================
   parameters: gathered, waited for, freed, prefetched */

// The sharded block that a plain unit's gathers read, and what a wait for an alias waits for.
static fsdp_buf *fsdpi_shard_of(const fsdp_unit *u) { return fsdpi_flat_of(u, u->parts)->shard; }

static fsdp_status fsdpi_do_wait(fsdp_unit *u) {
    fsdp_model *m = u->model;
    if (u->storage != FSDP_STORAGE_IN_FLIGHT) return FSDP_OK;
    fsdp_status status = fsdpi_emit_use(m, u, FSDP_LABEL_GATHER,
                                        u->gather ? u->gather : fsdpi_shard_of(u));
    if (status) return status;
    if (u->ahead) m->ahead_bytes -= (int64_t)u->gather->bytes;
    u->ahead = 0;
    u->storage = FSDP_STORAGE_UNSHARDED;
    return FSDP_OK;
}

// A gather that nobody waited for still reads shards, here and on the peers, which the caller may
// write next: the caller's stream waits for it too.
static fsdp_status fsdpi_do_reshard(fsdp_unit *u) {
    fsdp_status status = fsdpi_do_wait(u);
    u->storage = FSDP_STORAGE_SHARDED;
    u->stale = 0;
    fsdp_status gather = fsdpi_release(u, &u->gather, FSDP_STREAM_COMPUTE);
    fsdp_status slice = fsdpi_release(u, &u->slice, FSDP_STREAM_COMPUTE);
    return status ? status : gather ? gather : slice;
}

// Shards have been written: what was gathered before is not used again.
static fsdp_status fsdpi_do_stale(fsdp_unit *u) {
    u->stale = u->storage != FSDP_STORAGE_SHARDED;
    return FSDP_OK;
}

// A view but for the gradient, whose presence is known to the caller's thread only.
static fsdp_param_view fsdpi_view_static(const fsdp_unit *u, int index) {
    const fsdpi_param *p = &u->params[index];
    const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_part_of(u, p));
    fsdp_param_view v;
    memset(&v, 0, sizeof v);
    v.unit = u->model->units[u->index];
    v.name = p->name;
    v.unit_name = u->name;
    v.user = p->user;
    v.unit_user = u->user;
    v.ordinal = p->ordinal;
    v.index = index;
    v.dtype = p->dtype;
    v.grad_dtype = fsdpi_grad_dtype(u->model, p->dtype);
    v.ndim = p->lay.ndim;
    v.shard_dim = p->lay.shard_dim;
    v.requires_grad = p->requires_grad;
    memcpy(v.shape, p->lay.shape, sizeof v.shape);
    memcpy(v.local_shape, p->lay.shape, sizeof v.local_shape);
    v.start[v.shard_dim] = p->lay.start;
    v.local_shape[v.shard_dim] = p->lay.local_numel ? p->lay.rows : 0;
    v.numel = p->lay.local_numel;
    v.data = v.shard = flat->shard->ptr + fsdpi_bytes(p->lay.shard_offset, p->dtype);
    return v;
}

static fsdp_status fsdpi_call_pre_gather(const fsdp_op *op, void *stream) {
    const fsdpi_param *p = &op->unit->params[op->root];
    fsdp_param_view v = fsdpi_view_static(op->unit, op->root);
    void *strings[FSDP_GATHER_TENSORS];
    for (int i = 0; i < p->num_strings; i++)
        strings[i] = (char *)op->dst_ptr + p->string_offset[i] +
                     op->unit->info.shard_mesh_rank * p->string_bytes[i];
    return p->extension.pre_all_gather(p->extension.user, &v, strings, stream);
}

static fsdp_status fsdpi_call_post_gather(const fsdp_op *op, void *stream) {
    const fsdpi_param *p = &op->unit->params[op->root];
    fsdp_param_view v = fsdpi_view_static(op->unit, op->root);
    fsdp_dtype dtype = fsdpi_part_of(op->unit, p)->param_dtype;
    const void *gathered[FSDP_GATHER_TENSORS];
    for (int i = 0; i < p->num_strings; i++)
        gathered[i] = (char *)op->dst_ptr + p->string_offset[i];
    return p->extension.post_all_gather(
        p->extension.user, &v, gathered,
        (char *)op->dst_ptr + fsdpi_bytes(p->lay.full_offset, dtype), dtype, stream);
}

// A user's function about a parameter (or the unit: NULL), in the order of a stream.
static fsdp_status fsdpi_emit_call(fsdp_unit *u, const fsdpi_param *p, int label, int stream,
                                   fsdp_buf *src, fsdp_buf *dst,
                                   fsdp_status (*call)(const fsdp_op *op, void *stream)) {
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_CALL, label, stream);
    op.root = p ? (int32_t)(p - u->params) : -1;
    op.src = src;
    op.dst = dst;
    op.src_ptr = src->ptr;
    op.dst_ptr = dst->ptr;
    op.call = call;
    return fsdpi_emit(u->model, &op);
}

// This rank's own part of the slot: casts, or the strings of extensions.
static fsdp_status fsdpi_copy_in(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < u->num_parts && !status; k++) {
        fsdpi_part *part = &u->parts[k];
        fsdp_buf *shard = fsdpi_flat_of(u, part)->shard;
        fsdp_op in = fsdpi_op(u->model, u, FSDP_OP_COPY, FSDP_LABEL_COPY_IN, FSDP_STREAM_GATHER);
        status = part->extended
                     ? fsdpi_emit_call(u, part->extended, FSDP_LABEL_PRE_GATHER, FSDP_STREAM_GATHER,
                                       shard, u->gather, fsdpi_call_pre_gather)
                     : fsdpi_emit_work(u->model, &in, shard, part->dtype, u->gather,
                                       part->param_dtype, &part->copy_in);
    }
    return status;
}

// What was gathered becomes contiguous parameters.
static fsdp_status fsdpi_copy_out(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < u->num_parts && !status; k++) {
        fsdpi_part *part = &u->parts[k];
        fsdp_op out = fsdpi_op(u->model, u, FSDP_OP_COPY, FSDP_LABEL_COPY_OUT, FSDP_STREAM_GATHER);
        status = part->extended ? fsdpi_emit_call(u, part->extended, FSDP_LABEL_POST_GATHER,
                                                  FSDP_STREAM_GATHER, u->gather, u->gather,
                                                  fsdpi_call_post_gather)
                                : fsdpi_emit_work(u->model, &out, u->gather, part->param_dtype,
                                                  u->gather, part->param_dtype, &part->copy_out);
    }
    return status;
}

static fsdp_status fsdpi_gather_shards(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int staged = !fsdpi_is_plain(u); // my part is brought to the slot before
    fsdp_status status = staged ? fsdpi_copy_in(u) : FSDP_OK;
    if (!status && fsdpi_shards(u) > 1) {
        fsdp_op op = fsdpi_op(m, u, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, FSDP_STREAM_GATHER);
        op.in_place = (uint8_t)staged;
        op.comm = u->info.shard_comm;
        op.group_size = fsdpi_shards(u);
        status = fsdpi_emit_work(m, &op, staged ? u->gather : fsdpi_shard_of(u), u->gather_dtype,
                                 u->gather, u->gather_dtype, &u->all_gather);
    }
    return status ? status : fsdpi_copy_out(u);
}

// From what was kept after forward, over fewer ranks; everything is in its last place already.
static fsdp_status fsdpi_gather_slices(fsdp_unit *u) {
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, FSDP_STREAM_GATHER);
    op.comm = u->slice_comm;
    op.group_size = u->slices;
    fsdp_status status = fsdpi_emit_work(u->model, &op, u->slice, u->gather_dtype, u->gather,
                                         u->gather_dtype, &u->slice_gather);
    fsdp_status released = fsdpi_release(u, &u->slice, FSDP_STREAM_GATHER);
    return status ? status : released;
}

static fsdp_status fsdpi_do_unshard(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    if (u->stale) {
        u->stale = 0;
        status = fsdpi_do_reshard(u);
    }
    if (status || u->storage == FSDP_STORAGE_IN_FLIGHT || u->storage == FSDP_STORAGE_UNSHARDED)
        return status;
    if (!fsdpi_gather_is_alias(u)) {
        status = fsdpi_acquire(u, FSDP_POOL_GATHER, &u->gather);
        if (!status) status = u->slice ? fsdpi_gather_slices(u) : fsdpi_gather_shards(u);
    }
    if (!status) u->storage = FSDP_STORAGE_IN_FLIGHT;
    return status;
}

static fsdp_status fsdpi_do_unshard_backward(fsdp_unit *u) {
    return u->unshard_in_backward ? fsdpi_do_unshard(u) : FSDP_OK;
}

// Keep 1/n of what was gathered, or nothing, or all of it.
static fsdp_status fsdpi_do_reshard_forward(fsdp_unit *u) {
    fsdp_model *m = u->model;
    if (u->reshard_after_forward == FSDP_RESHARD_NEVER) return FSDP_OK;
    if (u->reshard_after_forward == FSDP_RESHARD_ALWAYS) return fsdpi_do_reshard(u);
    fsdp_status status = fsdpi_acquire(u, FSDP_POOL_SLICE, &u->slice);
    if (status) return status;
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_SLICE, FSDP_STREAM_COMPUTE);
    status = fsdpi_emit_work(m, &op, u->gather, u->gather_dtype, u->slice, u->gather_dtype,
                             &u->slice_copy);
    if (!status) status = fsdpi_release(u, &u->gather, FSDP_STREAM_COMPUTE);
    if (!status) u->storage = FSDP_STORAGE_SHARDED_POST_FORWARD;
    return status;
}

// What is still in flight was a prefetch that nobody used.
static fsdp_status fsdpi_do_reshard_backward(fsdp_unit *u) {
    return u->reshard_after_backward || u->storage == FSDP_STORAGE_IN_FLIGHT ? fsdpi_do_reshard(u)
                                                                             : FSDP_OK;
}

// Gather a unit ahead of its use, unless that would hold more memory than prefetches may.
static fsdp_status fsdpi_prefetch(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int idle = u->storage != FSDP_STORAGE_IN_FLIGHT && u->storage != FSDP_STORAGE_UNSHARDED;
    int slot = u->classes[FSDP_POOL_GATHER];
    int64_t bytes = slot < 0 ? 0 : (int64_t)m->classes[slot].bytes, most = m->desc.prefetch_bytes;
    if ((!idle && !u->stale) || (most && m->ahead_bytes + bytes > most)) return FSDP_OK;
    fsdp_status status = fsdpi_do_unshard(u);
    if (status || !u->gather) return status;
    u->ahead = 1;
    m->ahead_bytes += bytes;
    return FSDP_OK;
}

static fsdp_status fsdpi_do_prefetch_forward(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < u->num_prefetch[0] && !status; i++)
        status = fsdpi_prefetch(u->model->units[u->prefetch[0][i]]);
    return status;
}

/* The units that were named; else the one whose forward came before this one's: it is gathered
   while this one computes. An inline device would only block earlier. */
static fsdp_status fsdpi_do_prefetch_backward(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int at = u->last_order, policy = m->desc.implicit_prefetch;
    fsdp_status status = FSDP_OK;
    if (at >= 0) u->last_order = m->order[at].previous;
    for (int i = 0; i < u->num_prefetch[1] && !status; i++) {
        fsdp_unit *target = m->units[u->prefetch[1][i]];
        if (target->unshard_in_backward) status = fsdpi_prefetch(target);
    }
    int hides = policy == FSDP_PREFETCH_DEFAULT ? m->world->mode != FSDPI_INLINE
                                                : policy == FSDP_PREFETCH_ALWAYS;
    if (u->num_prefetch[1] || at <= 0 || !hides || !m->order[at - 1].unit->unshard_in_backward)
        return status;
    return fsdpi_prefetch(m->order[at - 1].unit);
}

/* ==== core/grads.h ==========================================================================
   gradients: written, collected, reduced */

// Zero what the caller's backward does not store to: padding, in its own slot layout.
static fsdp_status fsdpi_zero_padding(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int world = fsdpi_shards(u);
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < u->num_params && !status; i++) {
        const fsdpi_param *p = &u->params[i];
        if (!p->requires_grad) continue;
        status = fsdpi_emit_fill(m, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, u->grad,
                                 fsdpi_part_of(u, p)->param_dtype, p->grad_offset + p->lay.numel,
                                 world * p->lay.shard_numel - p->lay.numel, 0);
    }
    for (int k = 0; k < u->num_parts && u->pad_rin && !status; k++) {
        const fsdpi_part *part = &u->parts[k];
        int64_t packed = part->train.packed_numel;
        status = fsdpi_emit_fill(
            m, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, u->grad, part->param_dtype,
            part->grad + world * (part->train.shard_numel - packed), world * packed, 0);
    }
    return status;
}

// The caller's stream writes a buffer from here on: it waits for those who read it.
static fsdp_status fsdpi_caller_writes(fsdp_unit *u, fsdp_buf *buf) {
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_USE, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE);
    op.dst = buf;
    return fsdpi_emit(u->model, &op);
}

// One rank whose gradient is the shard gradient as it is written.
static int fsdpi_grad_is_alias(const fsdp_unit *u) {
    fsdp_dtype dtype = u->parts->dtype;
    return fsdpi_ranks(u) == 1 && fsdpi_is_plain(u) && u->reduce_dtype == dtype &&
           fsdpi_grad_dtype(u->model, dtype) == dtype && u->sync && !u->rin &&
           (u->divide_factor == 0 || u->divide_factor == 1) && !u->all_reduce_hook &&
           !(u->model->desc.grads_overwrite && u->has_grad);
}

/* Where gradients will be written: zero, or what earlier microbatches left. */
static fsdp_status fsdpi_do_grads(fsdp_unit *u) {
    fsdp_model *m = u->model;
    if (u->num_train == 0 || u->grad) return FSDP_OK;
    u->grad_alias = (uint8_t)fsdpi_grad_is_alias(u);
    if (u->grad_alias) {
        fsdp_buf *sgrad = fsdpi_flat_of(u, u->parts)->grad;
        int fill = !u->has_grad && !u->grad_is_zero;
        u->grad_is_zero = 0;
        return fill ? fsdpi_emit_fill(m, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, sgrad,
                                      u->parts->dtype, u->parts->train.base, u->train_numel, 0)
                    : fsdpi_caller_writes(u, sgrad);
    }
    fsdp_status status = fsdpi_acquire(u, FSDP_POOL_GRAD, &u->grad);
    if (status) return status;
    if (!m->desc.grads_overwrite)
        return fsdpi_emit_fill(m, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, u->grad, FSDP_U8, 0,
                               u->grad_bytes, 0);
    for (int i = 0; i < u->num_params; i++) u->params[i].written = 0;
    status = fsdpi_zero_padding(u);
    return status ? status : fsdpi_caller_writes(u, u->grad);
}

// With grads_overwrite nothing was zeroed: what this rank did not store must not count.
static fsdp_status fsdpi_zero_unused(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < u->num_params && !status; i++) {
        const fsdpi_param *p = &u->params[i];
        if (!p->requires_grad || p->written) continue;
        status = fsdpi_emit_fill(u->model, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, u->grad,
                                 fsdpi_part_of(u, p)->param_dtype, p->grad_offset, p->lay.numel, 0);
    }
    return status;
}

static double fsdpi_factor(const fsdp_unit *u) {
    return u->divide_factor != 0 ? u->divide_factor : (double)fsdpi_ranks(u);
}

/* A reduction divides by `factor` in all: by `before`, a power of two, what goes into an f16 sum,
   so that it stays in range, and by the rest what comes out.
   Source: torch: _get_gradient_divide_factors. */
static double fsdpi_divide_before(const fsdp_unit *u) {
    double before = 1, factor = fsdpi_factor(u);
    if (u->reduce_dtype != FSDP_F16 || fsdpi_ranks(u) == 1) return before;
    while (fmod(factor, before) == 0 && factor / before > before) before *= 2;
    return before;
}

// Gradients as they were written -> `dst` in the reduce dtype: cast, chunk_cat, divided, added.
static fsdp_status fsdpi_emit_acc(fsdp_unit *u, fsdp_buf *dst, int accumulate) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < u->num_parts && !status; k++) {
        fsdpi_part *part = &u->parts[k];
        fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_COPY, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE);
        op.accumulate = (uint8_t)accumulate;
        op.scale = 1.0 / u->before;
        status = fsdpi_emit_work(u->model, &op, u->grad, part->param_dtype, dst, u->reduce_dtype,
                                 &part->acc);
    }
    return status;
}

// Bring gradients to the reduce input, where earlier microbatches may be.
static fsdp_status fsdpi_accumulate(fsdp_unit *u) {
    int held = u->rin != NULL;
    fsdp_status status = held ? FSDP_OK : fsdpi_acquire(u, FSDP_POOL_RIN, &u->rin);
    if (!status && !held && u->pad_rin)
        status = fsdpi_emit_fill(u->model, u, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE, u->rin,
                                 u->reduce_dtype, 0, u->reduce_numel, 0);
    if (!status) status = fsdpi_emit_acc(u, u->rin, held);
    return status ? status : fsdpi_release(u, &u->grad, FSDP_STREAM_REDUCE);
}

// A flag for each trainable, in the two dtypes of a reduction's input. Flags are divided like
// gradients, so that one of `value`, what they are divided by, does not vanish.
static void fsdpi_set_flag(fsdp_unit *u, fsdpi_param *p, double value) {
    fsdp_dtype dtypes[2] = {u->parts[u->users_part].param_dtype, u->reduce_dtype};
    char *flags[2] = {u->flags, u->wide_flags};
    double flag = p->used ? value : 0;
    p->flag = p->used;
    for (int i = 0; i < 2; i++)
        (void)fsdp_convert(flags[i] + (size_t)p->user_index * fsdp_dtype_size(dtypes[i]), dtypes[i],
                           &flag, FSDP_F64, 1);
}

/* Who used which parameter rides along: num_train flags for every rank, summed like gradients. The
   flags of a step are mostly those of the step before, so that they are seldom written. */
static fsdp_status fsdpi_emit_users(fsdp_unit *u, fsdp_buf *input, fsdp_dtype dtype) {
    fsdp_model *m = u->model;
    double value = fsdpi_factor(u) / u->before;
    int anew = value != u->flag_value;
    if (m->dry) return FSDP_OK;
    for (int i = 0; i < u->num_params && !u->reduce_unused; i++)
        u->params[i].pending |= u->params[i].used;
    for (int i = 0; i < u->num_params; i++) {
        fsdpi_param *p = &u->params[i];
        if ((p->used != p->flag || anew) && p->requires_grad) {
            if (u->flags_read) fsdpi_drain(m->world); // a copy may still read them
            u->flags_read = 0;
            fsdpi_set_flag(u, p, value);
        }
        p->used = 0;
    }
    u->flag_value = value;
    u->flags_read = 1;
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_USERS, FSDP_STREAM_REDUCE);
    op.count = u->users.count;
    op.bytes = op.count * fsdp_dtype_size(dtype);
    op.dtype = op.out_dtype = (uint8_t)dtype;
    op.list = u->users.blocks;
    op.list_count = 1;
    op.dst = input;
    op.src_ptr = input == u->rin ? u->wide_flags : u->flags;
    op.dst_ptr = input->ptr;
    return fsdpi_emit(m, &op);
}

// One rank: who used a parameter is known here.
static void fsdpi_own_users(fsdp_unit *u) {
    for (int i = 0; i < u->num_params && !u->model->dry; i++) {
        u->params[i].has_grad |= u->params[i].used;
        u->params[i].used = 0;
    }
}

// What ranks must agree on in a reduction: the unit, the factor; by upstream's rule what was used.
static uint64_t fsdpi_reduce_hash(const fsdp_unit *u, double factor) {
    uint64_t bits;
    memcpy(&bits, &factor, sizeof bits);
    uint64_t h = fsdpi_hash(u->desc_hash, bits);
    for (int i = 0; i < u->num_params && !u->reduce_unused; i++)
        h = fsdpi_hash(h, u->params[i].used | u->params[i].pending);
    return h;
}

// Did any rank use a trainable parameter that has been reduced?
static int fsdpi_was_used(const fsdp_unit *u, const fsdpi_param *p) {
    fsdp_dtype dtype = u->parts[u->users_part].dtype, grad = fsdpi_grad_dtype(u->model, dtype);
    const fsdpi_flat_block *flat = &u->model->flats[dtype];
    int64_t at = fsdpi_bytes(u->users_base - flat->train_numel + p->user_index, grad);
    float users = 0;
    if (p->has_grad || fsdpi_ranks(u) == 1) return p->has_grad;
    (void)fsdp_convert(&users, FSDP_F32, flat->users + at, grad, 1);
    return users != 0.0f;
}

// Bring the counts of users, which have been reduced, to where fsdpi_was_used finds them.
static fsdp_status fsdpi_read_users(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++) {
        const fsdpi_flat_block *flat = &m->flats[d];
        fsdp_dtype grad = fsdpi_grad_dtype(m, d);
        int64_t bytes = fsdpi_bytes(flat->grad_numel - flat->train_numel, grad);
        if (!flat->users) continue;
        const char *counts = flat->grad->ptr + fsdpi_bytes(flat->train_numel, grad);
        if (counts != flat->users)
            status = fsdpi_transfer(m->world, flat->users, counts, (size_t)bytes);
    }
    return status;
}

// Is the sum over the shard group the shard gradient itself: nothing to do behind the reduction?
static int fsdpi_is_straight(const fsdp_unit *u) {
    fsdp_dtype grad = fsdpi_grad_dtype(u->model, u->parts[u->users_part].dtype);
    if (fsdpi_shards(u) == 1 || fsdpi_replicas(u) > 1 || u->train_parts > 1 || u->all_reduce_hook ||
        u->model->desc.cpu_offload)
        return 0;
    return fsdpi_can_fuse(u) ? fsdpi_is_wide(u->reduce_dtype)
                             : u->reduce_dtype == grad && !u->has_grad;
}

/* Reduce input -> the sums over the shard group: to the shard gradient if that is all, else to the
   unit's reduce output, added to what waits there for an all-reduce. */
static fsdp_status fsdpi_reduce_scatter(fsdp_unit *u, fsdp_buf **input, fsdp_dtype dtype,
                                        uint64_t used, int straight, double scale) {
    fsdp_model *m = u->model;
    const fsdpi_part *part = &u->parts[u->users_part];
    fsdp_buf *sgrad = fsdpi_flat_of(u, part)->grad, *fresh = NULL;
    fsdp_dtype grad = fsdpi_grad_dtype(m, part->dtype), out = straight ? grad : u->reduce_dtype;
    int fused = fsdpi_can_fuse(u), adds = u->rout && fused && fsdpi_is_wide(u->reduce_dtype);
    fsdp_status status = straight || adds ? FSDP_OK : fsdpi_acquire(u, FSDP_POOL_ROUT, &fresh);
    if (status) return status;
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, FSDP_STREAM_REDUCE);
    op.comm = u->reduce_comm;
    op.group_size = fsdpi_shards(u);
    op.what_hash = used;
    if (straight && fused) op.scale = scale;
    op.accumulate = (uint8_t)(straight ? fused && u->has_grad : adds);
    status = fsdpi_emit_work(m, &op, *input, dtype,
                             straight ? sgrad
                             : adds   ? u->rout
                                      : fresh,
                             out, straight ? &u->reduce_scatter : &u->to_rout);
    if (!status) status = fsdpi_release(u, input, FSDP_STREAM_REDUCE);
    if (!status && straight && !fused) {
        fsdp_op rescale = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_RED_OUT, FSDP_STREAM_REDUCE);
        rescale.scale = scale;
        status = fsdpi_emit_work(m, &rescale, sgrad, grad, sgrad, grad, &part->rescale);
    }
    if (!status && fresh && u->rout) {
        fsdp_op add = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_PARTIAL, FSDP_STREAM_REDUCE);
        add.accumulate = 1;
        status = fsdpi_emit_work(m, &add, fresh, out, u->rout, out, &u->partial);
        if (!status) status = fsdpi_release(u, &fresh, FSDP_STREAM_REDUCE);
    } else if (fresh) {
        u->rout = fresh;
    }
    return status;
}

static fsdp_status fsdpi_call_all_reduce_hook(const fsdp_op *op, void *stream) {
    fsdp_unit *u = op->unit->model->units[op->unit->index];
    return u->all_reduce_hook(u->all_reduce_user, u, op->dst_ptr, u->train_numel, u->reduce_dtype,
                              stream);
}

// Where the last copy to the shard gradients runs.
static int fsdpi_out_stream(const fsdp_unit *u) {
    return fsdpi_replicas(u) > 1 ? FSDP_STREAM_ALLREDUCE : FSDP_STREAM_REDUCE;
}

// Sums over the shard group -> shard gradients: over the replicas, the user's hook, divide, cast,
// add to what is there.
static fsdp_status fsdpi_red_out(fsdp_unit *u, fsdp_buf **from, fsdp_dtype dtype, uint64_t used,
                                 double scale) {
    fsdp_model *m = u->model;
    int stream = fsdpi_out_stream(u);
    fsdp_status status = FSDP_OK;
    if (fsdpi_replicas(u) > 1) {
        fsdp_op op = fsdpi_op(m, u, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, stream);
        op.comm = u->replicate_comm;
        op.group_size = fsdpi_replicas(u);
        op.what_hash = used;
        op.in_place = 1;
        status = fsdpi_emit_work(m, &op, *from, dtype, *from, dtype, &u->partial);
    }
    if (!status && u->all_reduce_hook)
        status = fsdpi_emit_call(u, NULL, FSDP_LABEL_ALL_REDUCE_HOOK, stream, *from, *from,
                                 fsdpi_call_all_reduce_hook);
    for (int k = 0; k < u->num_parts && !status; k++) {
        const fsdpi_part *part = &u->parts[k];
        fsdp_op op = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_RED_OUT, stream);
        op.scale = scale;
        op.accumulate = u->has_grad;
        if (part->num_train)
            status = fsdpi_emit_work(m, &op, *from, dtype, fsdpi_flat_of(u, part)->grad,
                                     fsdpi_grad_dtype(m, part->dtype), &part->red_out);
    }
    fsdp_status released = fsdpi_release(u, from, stream);
    return status ? status : released;
}

static fsdp_status fsdpi_call_grad_hook(const fsdp_op *op, void *stream) {
    const fsdp_unit *u = op->unit;
    const fsdpi_param *p = &u->params[op->root];
    const fsdpi_part *part = fsdpi_part_of(u, p);
    fsdp_dtype dtype = fsdpi_grad_dtype(u->model, part->dtype);
    fsdp_param_view v = fsdpi_view_static(op->unit, op->root);
    v.shard_grad = fsdpi_flat_of(u, part)->grad->ptr + fsdpi_bytes(p->lay.shard_offset, dtype);
    return fsdpi_was_used(u, p) ? p->grad_hook(p->grad_hook_user, &v, stream) : FSDP_OK;
}

static int fsdpi_has_hooks(const fsdp_unit *u) {
    int any = 0;
    for (int i = 0; i < u->num_params; i++)
        any |= u->params[i].grad_hook && u->params[i].requires_grad;
    return any && !u->model->dry;
}

// The shard gradients of a unit are on their way: whoever waits for a parameter's is told.
static fsdp_status fsdpi_grads_done(fsdp_unit *u, int stream) {
    fsdp_status status = FSDP_OK;
    u->has_grad = u->counted = 1;
    u->grad_is_zero = 0;
    if (fsdpi_ranks(u) == 1) fsdpi_own_users(u);
    if (u->reduce_unused && !u->model->grad_hooks) return FSDP_OK;
    if (u->model->world->mode == FSDPI_NATIVE && fsdpi_has_hooks(u)) { // they are called at once
        status = fsdpi_sync(u->model->world, stream);
        if (!status) status = fsdpi_read_users(u->model);
    }
    for (int i = 0; i < u->num_params && !status; i++) {
        fsdpi_param *p = &u->params[i];
        const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_part_of(u, p));
        p->pending = 0;
        if (!p->grad_hook || !p->requires_grad) continue;
        (void)fsdpi_do_stale(u); // the hook may write shards
        status = fsdpi_emit_call(u, p, FSDP_LABEL_GRAD_HOOK, stream, flat->grad, flat->shard,
                                 fsdpi_call_grad_hook);
    }
    return status;
}

// Is a reduction due now? One shard has no sums to keep but the gradients themselves.
static int fsdpi_syncs(const fsdp_unit *u) {
    return u->sync && (u->all_reduce || fsdpi_shards(u) > 1 || fsdpi_replicas(u) == 1);
}

// What backward wrote goes to where it is summed up, unless it can stay in the slot.
static fsdp_status fsdpi_collect(fsdp_unit *u) {
    int overwrite = u->model->desc.grads_overwrite;
    fsdp_dtype dtype = u->parts[u->users_part].param_dtype;
    fsdp_status status = overwrite ? fsdpi_zero_unused(u) : FSDP_OK;
    if (!u->rin && !u->rout) u->before = fsdpi_divide_before(u); // what waits has been divided
    if (!status && !u->model->dry)                               // the caller wrote it
        status = fsdpi_mark(u->model->world, FSDP_STREAM_COMPUTE, &u->grad->ready);
    int elsewhere = u->rin || fsdpi_must_convert(u, u->all_reduce_hook != NULL) ||
                    (!fsdpi_syncs(u) && (overwrite || dtype != u->reduce_dtype));
    return status || !elsewhere ? status : fsdpi_accumulate(u);
}

// The gradients in the slot become a reduce input where they are.
static fsdp_status fsdpi_chunk_cat(fsdp_unit *u) {
    fsdpi_part *part = &u->parts[u->users_part];
    if (u->before != 1) return fsdpi_emit_acc(u, u->grad, 0);
    fsdp_op cat = fsdpi_op(u->model, u, FSDP_OP_COPY, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE);
    return fsdpi_emit_work(u->model, &cat, u->grad, part->param_dtype, u->grad, part->param_dtype,
                           &part->chunk_cat);
}

static int fsdpi_any_used(const fsdp_unit *u) {
    int any = u->model->dry;
    for (int i = 0; i < u->num_params; i++) any |= u->params[i].used;
    return any;
}

// Reduce what was collected: over the shard group, over the replicas, to the shard gradients.
static fsdp_status fsdpi_reduce_unit(fsdp_unit *u) {
    double factor = fsdpi_factor(u), scale = u->before / factor;
    int straight = fsdpi_is_straight(u), one = fsdpi_shards(u) == 1;
    fsdp_status status = FSDP_OK;
    fsdp_buf **input = u->rin ? &u->rin : &u->grad;
    fsdp_dtype dtype = u->rin ? u->reduce_dtype : u->parts[u->users_part].param_dtype;
    uint64_t used = fsdpi_reduce_hash(u, factor);
    if (*input) {
        if (!u->rin) status = fsdpi_chunk_cat(u);
        if (!status && fsdpi_ranks(u) > 1) status = fsdpi_emit_users(u, *input, dtype);
        if (!status && !one) status = fsdpi_reduce_scatter(u, input, dtype, used, straight, scale);
    }
    if (status || (fsdpi_replicas(u) > 1 && !u->all_reduce)) return status;
    if (!straight)
        status = fsdpi_red_out(u, one ? input : &u->rout, one ? dtype : u->reduce_dtype, used,
                               scale);
    return status ? status : fsdpi_grads_done(u, fsdpi_out_stream(u));
}

/* End of a unit's backward. Without sync gradients stay, in the slot where they were written or, if
   they are to be widened or would be overwritten, summed in the reduce input; without all_reduce,
   in the reduce output. */
static fsdp_status fsdpi_do_reduce(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    if (u->num_train == 0) return FSDP_OK;
    if (!u->reduce_unused && !fsdpi_any_used(u) && !u->rout) {
        status = fsdpi_release(u, &u->rin, FSDP_STREAM_REDUCE);
        fsdp_status grad = fsdpi_release(u, &u->grad, FSDP_STREAM_COMPUTE);
        return status ? status : grad;
    }
    if (u->grad_alias) { // other units may have written the block meanwhile: the event is for both
        status = fsdpi_caller_writes(u, fsdpi_flat_of(u, u->parts)->grad);
        return status ? status : fsdpi_grads_done(u, FSDP_STREAM_COMPUTE);
    }
    if (u->grad) status = fsdpi_collect(u);
    return status || !fsdpi_syncs(u) ? status : fsdpi_reduce_unit(u);
}

// Finalize: gradients of earlier microbatches of a unit that this backward did not reach.
static fsdp_status fsdpi_do_leftovers(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    int waits = u->rout && !u->all_reduce && !u->grad && !u->rin; // for an all-reduce
    if (!u->sync || waits || !(u->grad || u->rin || u->rout)) return FSDP_OK;
    for (int k = 0; k < u->num_parts && !status; k++) // the caller may have read what was reduced
        if (u->parts[k].num_train)
            status = fsdpi_caller_writes(u, fsdpi_flat_of(u, &u->parts[k])->grad);
    return status ? status : fsdpi_do_reduce(u);
}

static fsdp_status fsdpi_do_zero_grad(fsdp_unit *u) {
    u->has_grad = 0;
    for (int i = 0; i < u->num_params; i++) u->params[i].has_grad = 0;
    return FSDP_OK;
}

// After reset nothing of a step is left. The streams have been drained.
static fsdp_status fsdpi_do_drop(fsdp_unit *u) {
    fsdp_buf **slots[3] = {&u->grad, &u->rin, &u->rout};
    fsdp_status status = fsdpi_do_reshard(u);
    for (int i = 0; i < 3; i++) {
        fsdp_status released = fsdpi_release(u, slots[i], FSDP_STREAM_COMPUTE);
        if (!status) status = released;
    }
    for (int i = 0; i < u->num_params; i++) u->params[i].used = u->params[i].pending = 0;
    u->forwards = 0;
    u->last_order = -1;
    u->counted = 0;
    (void)fsdpi_do_zero_grad(u);
    return status;
}

/* ==== core/commit.h =========================================================================
   the flat blocks of the model and the lists of the units */

// Owns: the flat blocks of the model and the lists of the units, made once, when all units are
// known.

// Where each unit lies in the flat blocks: trainables of all units, then frozen ones; counts of
// users behind the gradients.
static void fsdpi_place_units(fsdp_model *m) {
    for (int d = 0; d < FSDP_DTYPE_COUNT; d++)
        m->flats[d].train_numel = m->flats[d].numel = m->flats[d].grad_numel = 0;
    for (int trainable = 1; trainable >= 0; trainable--) {
        for (int i = 0; i < m->num_units; i++) {
            fsdp_unit *u = m->units[i];
            for (int k = 0; k < u->num_parts; k++) {
                fsdpi_flat_block *flat = fsdpi_flat_of(u, &u->parts[k]);
                fsdpi_list *list = trainable ? &u->parts[k].train : &u->parts[k].frozen;
                list->base = flat->numel;
                flat->numel += fsdpi_align_up(list->shard_numel, FSDP_ALIGN_NUMEL);
                if (trainable) flat->train_numel = flat->grad_numel = flat->numel;
            }
        }
    }
    for (int i = 0; i < m->num_units; i++) {
        fsdp_unit *u = m->units[i];
        fsdpi_flat_block *flat = fsdpi_flat_of(u, &u->parts[u->users_part]);
        u->users_base = flat->grad_numel;
        if (fsdpi_ranks(u) > 1) flat->grad_numel += u->num_train;
    }
}

// One row of width elements, from src to dst.
static fsdp_block fsdpi_run(int64_t src, int64_t dst, int64_t width) {
    fsdp_block b = {src, dst, width, 1, width, width};
    return b;
}

static void fsdpi_add_block(fsdpi_work *work, fsdp_block block) {
    work->blocks[work->num++] = block;
    work->count += (uint64_t)(block.width * block.height);
}

// Of lists that the layout has made.
static void fsdpi_count(fsdpi_work *work) {
    work->count = 0;
    for (int i = 0; i < work->num; i++)
        work->count += (uint64_t)(work->blocks ? work->blocks[i].width * work->blocks[i].height
                                               : work->segs[i].count);
}

// Lists of a part that need offsets in the flat blocks or another form than the layout's.
static void fsdpi_part_lists(fsdp_unit *u, fsdpi_part *part, const fsdp_seg *gather) {
    int world = fsdpi_shards(u), rank = u->info.shard_mesh_rank;
    int64_t to_rin = world * part->reduce - part->grad, numel = part->train.shard_numel;
    for (int i = 0; i < part->num_gather && !part->extended; i++) {
        fsdp_seg s = gather[i];
        fsdpi_add_block(&part->copy_in, fsdpi_run(s.shard, s.full + rank * s.count, s.count));
    }
    for (int i = 0; i < part->chunk_cat.num; i++) { // the layout's blocks, from right to left
        fsdp_block b = part->chunk_cat.blocks[i];
        fsdp_block reversed = {b.dst, b.src, b.width, b.height, b.dst_pitch, b.src_pitch};
        part->chunk_cat.blocks[i] = reversed;
        reversed.dst += to_rin;
        fsdpi_add_block(&part->acc, reversed);
    }
    fsdpi_count(&part->chunk_cat);
    fsdpi_count(&part->copy_out);
    for (int i = 0; i < u->num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        if (!p->requires_grad || fsdpi_part_of(u, p) != part) continue;
        if (p->lay.direct)
            fsdpi_add_block(&part->acc, fsdpi_run(p->grad_offset, p->grad_offset + to_rin,
                                                  world * p->lay.shard_numel));
        else u->pad_rin |= p->lay.shard_dim > 0 && p->lay.shape[p->lay.shard_dim] % world != 0;
    }
    fsdpi_add_block(&part->red_out, fsdpi_run(part->reduce, part->train.base, numel));
    fsdpi_add_block(&part->rescale, fsdpi_run(part->train.base, part->train.base, numel));
    if (fsdpi_ranks(u) > 1 && part == &u->parts[u->users_part]) { // the counts of users behind them
        fsdpi_add_block(&part->red_out, fsdpi_run(u->train_numel, u->users_base, u->num_train));
        fsdpi_add_block(&part->rescale, fsdpi_run(u->users_base, u->users_base, u->num_train));
    }
}

// Segments of the reduction, to the flat block and to the reduce output, with the counts of users.
static void fsdpi_reduce_lists(fsdp_unit *u) {
    int num = u->reduce_scatter.num, world = fsdpi_shards(u);
    for (int i = 0; i < num; i++) {
        fsdp_seg s = u->reduce_scatter.segs[i];
        s.shard = s.full / world; // segment by segment, the full side is `world` times as long
        u->to_rout.segs[i] = s;
    }
    if (fsdpi_ranks(u) > 1 && u->num_train > 0) {
        fsdp_seg counts = {u->users_base, u->users_offset, u->num_train};
        fsdp_block rows = {0, u->users_offset, u->num_train, world, 0, u->num_train};
        u->reduce_scatter.segs[num] = counts;
        counts.shard = u->train_numel;
        u->to_rout.segs[num++] = counts;
        fsdpi_add_block(&u->users, rows);
    }
    u->to_rout.num = u->reduce_scatter.num = num;
    fsdpi_count(&u->to_rout);
    fsdpi_count(&u->reduce_scatter);
    fsdpi_add_block(&u->partial, fsdpi_run(0, 0, u->reduce_numel / world));
}

// 1/n of each gathered parameter where it lies, for reshard_after_forward = n.
static void fsdpi_slice_lists(fsdp_unit *u) {
    int64_t at = 0, bytes = u->gather_dtype == FSDP_U8;
    for (int i = 0; i < u->num_params && u->slices; i++) {
        const fsdpi_param *p = &u->params[i];
        int64_t size = bytes ? fsdpi_bytes(1, fsdpi_part_of(u, p)->param_dtype) : 1;
        int64_t count = fsdpi_shards(u) / u->slices * p->lay.shard_numel * size;
        int64_t full = p->lay.full_offset * size, me = u->info.shard_mesh_rank % u->slices;
        fsdp_seg s = {at, full, count};
        u->slice_gather.segs[u->slice_gather.num++] = s;
        fsdpi_add_block(&u->slice_copy, fsdpi_run(full + me * count, at, count));
        at += count;
    }
    fsdpi_count(&u->slice_gather);
}

// All works of a unit: first those of segments, then those of blocks, part after part, each with
// room for what its list may need. With `at` they are placed there. Returns the bytes of all.
enum { FSDPI_SEG_WORKS = 4, FSDPI_PART_WORKS = 6 };
static size_t fsdpi_place_lists(fsdp_unit *u, char *at) {
    size_t params = (size_t)u->num_params, segs = params + 2 * (size_t)u->num_parts + 1, bytes = 0;
    fsdpi_work *with_segs[FSDPI_SEG_WORKS] = {&u->all_gather, &u->slice_gather, &u->reduce_scatter,
                                              &u->to_rout};
    for (int i = 0; i < u->num_params; i++) segs += (size_t)u->params[i].num_strings;
    for (int i = 0; i < FSDPI_SEG_WORKS; i++, bytes += segs * sizeof(fsdp_seg))
        if (at) with_segs[i]->segs = (fsdp_seg *)(void *)(at + bytes);
    fsdpi_work *whole[3] = {&u->slice_copy, &u->partial, &u->users};
    for (int i = 0; i < 3; i++, bytes += (params + 1) * sizeof(fsdp_block))
        if (at) whole[i]->blocks = (fsdp_block *)(void *)(at + bytes);
    for (int k = 0; k < u->num_parts; k++) {
        fsdpi_part *part = &u->parts[k];
        size_t out = (size_t)part->copy_out.num, cat = (size_t)part->chunk_cat.num;
        size_t rooms[FSDPI_PART_WORKS] = {segs, out, cat, cat + params, 2, 2};
        fsdpi_work *works[FSDPI_PART_WORKS] = {&part->copy_in, &part->copy_out, &part->chunk_cat,
                                               &part->acc,     &part->red_out,  &part->rescale};
        for (int i = 0; i < FSDPI_PART_WORKS; bytes += rooms[i++] * sizeof(fsdp_block))
            if (at) works[i]->blocks = (fsdp_block *)(void *)(at + bytes);
    }
    return bytes;
}

// Host memory that copies of the device read in their stream's order.
static size_t fsdpi_flags_bytes(const fsdp_unit *u) { return 2 * (size_t)u->num_train * 8; }

static fsdp_status fsdpi_flags_new(fsdp_unit *u) {
    fsdp_world *w = u->model->world;
    size_t bytes = fsdpi_flags_bytes(u);
    void *flags = NULL;
    if (bytes == 0) return FSDP_OK;
    fsdp_status status = w->device_ops->alloc(w->device, FSDP_MEMORY_PINNED, bytes, &flags);
    if (status)
        return fsdpi_fail(w, status, "commit: no memory for the flags of unit '%s': %s", u->name,
                          fsdpi_device_text(w, status));
    u->flags = (char *)flags;
    u->wide_flags = u->flags + bytes / 2;
    u->model->host_bytes += (int64_t)bytes;
    return FSDP_OK;
}

static void fsdpi_flags_free(fsdp_unit *u) {
    fsdp_world *w = u->model->world;
    if (!u->flags) return;
    w->device_ops->free(w->device, FSDP_MEMORY_PINNED, u->flags, fsdpi_flags_bytes(u));
    u->model->host_bytes -= (int64_t)fsdpi_flags_bytes(u);
    u->flags = u->wide_flags = NULL;
}

static fsdp_status fsdpi_unit_build(fsdp_unit *u, fsdp_layout_param *tmp) {
    fsdp_model *m = u->model;
    char *at = (char *)fsdpi_model_alloc(m, fsdpi_place_lists(u, NULL));
    if (!at)
        return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY,
                          "commit: no memory for the lists of unit '%s'", u->name);
    u->lists = at;
    u->flags_read = 0;
    (void)fsdpi_place_lists(u, at);
    fsdp_status status = fsdpi_flags_new(u);
    if (status) return status;
    (void)fsdpi_unit_layout(u, tmp);
    fsdp_seg *gather = u->all_gather.segs;
    for (int k = 0; k < u->num_parts; k++) {
        fsdpi_part *part = &u->parts[k];
        int bytes = u->gather_dtype == FSDP_U8 && !part->extended; // elements -> bytes
        fsdpi_part_lists(u, part, gather);
        for (int i = 0; i < part->num_gather; i++, gather++) {
            gather->full *= bytes ? fsdpi_bytes(1, part->param_dtype) : 1;
            gather->count *= bytes ? fsdpi_bytes(1, part->param_dtype) : 1;
        }
    }
    fsdpi_reduce_lists(u);
    fsdpi_slice_lists(u);
    for (int i = 0; i < u->num_params; i++) u->params[i].flag = 0;
    fsdpi_count(&u->all_gather);
    return FSDP_OK;
}

// What a unit is before fsdpi_unit_build: sizes measured, no lists.
static void fsdpi_unit_unbuild(fsdp_unit *u) {
    static const fsdpi_work none = {NULL, NULL, 0, 0};
    for (int k = 0; k < u->num_parts; k++) {
        fsdpi_part *part = &u->parts[k];
        part->copy_in = part->acc = part->red_out = part->rescale = none;
        part->copy_out.blocks = part->chunk_cat.blocks = NULL;
        part->copy_out.count = part->chunk_cat.count = 0;
    }
    u->all_gather = u->slice_gather = u->reduce_scatter = u->to_rout = none;
    u->slice_copy = u->partial = u->users = none;
    u->lists = u->flags = u->wide_flags = NULL;
    u->pad_rin = 0;
}

// The counts of users lie behind the shard gradients; a copy of them where the host cannot look.
static fsdp_status fsdpi_users_new(fsdp_model *m, fsdp_dtype dtype) {
    fsdpi_flat_block *flat = &m->flats[dtype];
    fsdp_dtype grad = fsdpi_grad_dtype(m, dtype);
    size_t bytes = (size_t)fsdpi_bytes(flat->grad_numel - flat->train_numel, grad);
    if (m->dry) return FSDP_OK;
    if (fsdpi_is_readable(m->world, flat->grad))
        flat->users = flat->grad->ptr + fsdpi_bytes(flat->train_numel, grad);
    else flat->users = (char *)fsdpi_model_alloc(m, bytes + 1);
    if (flat->users) return FSDP_OK;
    return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "commit: no memory for counts of users");
}

static fsdp_status fsdpi_blocks_new(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++) {
        fsdpi_flat_block *flat = &m->flats[d];
        if (flat->numel > 0)
            status = fsdpi_buf_new(m, FSDP_POOL_SHARD, (size_t)fsdpi_bytes(flat->numel, d),
                                   &flat->shard);
        if (!status && flat->grad_numel > 0)
            status = fsdpi_buf_new(m, FSDP_POOL_SGRAD,
                                   (size_t)fsdpi_bytes(flat->grad_numel, fsdpi_grad_dtype(m, d)),
                                   &flat->grad);
        if (!status && flat->grad) status = fsdpi_users_new(m, d);
    }
    return status;
}

static void fsdpi_users_free(fsdp_model *m, fsdpi_flat_block *flat, const fsdp_buf *grad) {
    if (grad && !fsdpi_is_readable(m->world, grad)) fsdpi_model_free(m, flat->users);
    flat->users = NULL;
}

static void fsdpi_blocks_free(fsdp_model *m) {
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        fsdpi_users_free(m, &m->flats[d], m->flats[d].grad);
        fsdpi_buf_free(m, m->flats[d].shard);
        fsdpi_buf_free(m, m->flats[d].grad);
        m->flats[d].shard = m->flats[d].grad = NULL;
    }
    fsdpi_buf_free(m, m->scalar);
    fsdpi_buf_free(m, m->full_scratch);
    fsdpi_model_free(m, m->full_copy);
    m->scalar = m->full_scratch = NULL;
    m->norm_type = 0;
    m->full_copy = NULL;
}

// A unit whose parameters are all empty still needs an address to point at.
static void fsdpi_need_blocks(fsdp_model *m) {
    for (int i = 0; i < m->num_units; i++) {
        for (int k = 0; k < m->units[i]->num_parts; k++) {
            const fsdpi_part *part = &m->units[i]->parts[k];
            fsdpi_flat_block *flat = fsdpi_flat_of(m->units[i], part);
            if (flat->numel == 0) flat->numel = FSDP_ALIGN_NUMEL;
            if (part->num_train && flat->grad_numel == 0) flat->grad_numel = FSDP_ALIGN_NUMEL;
        }
    }
}

static fsdp_status fsdpi_commit_tables(fsdp_model *m) {
    int most = 1;
    for (int i = 0; i < m->num_units; i++)
        if (m->units[i]->num_params > most) most = m->units[i]->num_params;
    fsdp_layout_param *tmp = (fsdp_layout_param *)fsdpi_model_alloc(m, (size_t)most * sizeof *tmp);
    if (!tmp) return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "commit: no memory");
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < m->num_units && !status; i++) status = fsdpi_unit_build(m->units[i], tmp);
    fsdpi_model_free(m, tmp);
    m->norm_blocks = (fsdp_block *)fsdpi_model_alloc(m, 2 * (size_t)m->num_params *
                                                            sizeof *m->norm_blocks);
    if (!status && !m->norm_blocks)
        status = fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "commit: no memory");
    return status;
}

static void fsdpi_uncommit(fsdp_model *m) {
    for (int i = 0; i < m->num_units; i++) {
        fsdpi_model_free(m, m->units[i]->lists);
        fsdpi_flags_free(m->units[i]);
        fsdpi_unit_unbuild(m->units[i]);
    }
    fsdpi_model_free(m, m->norm_blocks);
    m->norm_blocks = NULL;
    fsdpi_blocks_free(m);
}

static void fsdpi_old_free(fsdp_model *m) {
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        fsdpi_buf_free(m, m->flats[d].old_shard);
        fsdpi_buf_free(m, m->flats[d].old_grad);
        m->flats[d].old_shard = m->flats[d].old_grad = NULL;
    }
}

static fsdp_status fsdpi_move_one(fsdp_unit *u, const fsdpi_param *p, fsdp_buf *from, fsdp_buf *to,
                                  fsdp_dtype dtype, fsdp_block *block) {
    fsdpi_work work = {block, NULL, 1, (uint64_t)p->lay.shard_numel};
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_COPY, FSDP_LABEL_MOVE, FSDP_STREAM_COMPUTE);
    *block = fsdpi_run(p->old_offset, p->lay.shard_offset, p->lay.shard_numel);
    return fsdpi_emit_work(u->model, &op, from, dtype, to, dtype, &work);
}

// From the layout before fsdp_set_requires_grad to the new one.
static fsdp_status fsdpi_move(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < m->num_units; i++) {
        fsdp_unit *u = m->units[i];
        u->grad_is_zero = !u->has_grad; // new blocks are
        for (int k = 0; k < u->num_params && !status; k++) {
            fsdpi_param *p = &u->params[k];
            const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_part_of(u, p));
            fsdp_block *block = &m->norm_blocks[p->ordinal];
            if (!flat->old_shard) continue;
            status = fsdpi_move_one(u, p, flat->old_shard, flat->shard, p->dtype, block);
            p->has_grad &= (uint8_t)p->requires_grad;
            if (!status && u->has_grad && p->has_grad)
                status = fsdpi_move_one(u, p, flat->old_grad, flat->grad,
                                        fsdpi_grad_dtype(m, p->dtype), block);
        }
    }
    if (!status) status = fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
    fsdpi_old_free(m);
    return status;
}

static fsdp_status fsdpi_commit(fsdp_model *m) {
    fsdp_status status = fsdpi_failed(m->world);
    if (status || m->committed) return status;
    if (m->num_units == 0)
        return fsdpi_fail(m->world, FSDP_ERR_INVALID_STATE,
                          "commit: the model has no units: call fsdp_fully_shard first");
    fsdpi_place_units(m);
    fsdpi_need_blocks(m);
    for (int i = 0; i < m->num_classes; i++) m->classes[i].ahead = 0; // of a layout before
    for (int i = 0; i < m->num_units && !status; i++) status = fsdpi_unit_classes(m->units[i]);
    if (status) status = fsdpi_fail(m->world, status, "commit: no memory");
    if (!status && !m->dry) status = fsdpi_commit_tables(m);
    if (!status) status = fsdpi_blocks_new(m);
    if (!status) status = fsdpi_buf_new(m, FSDP_POOL_SCRATCH, sizeof(double), &m->scalar);
    if (!status && !m->dry) status = fsdpi_move(m);
    if (status) {
        fsdpi_uncommit(m);
        return fsdpi_model_fail(m, status);
    }
    m->committed = 1;
    m->layout++;
    return FSDP_OK;
}

/* Take the layout back, because a parameter was frozen or thawed: the next commit makes another and
   moves what the blocks hold. The slots go too, since their sizes change. */
static fsdp_status fsdpi_unsettle(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    fsdpi_drain(m->world);
    for (int i = 0; i < m->num_units && !status; i++) status = fsdpi_do_reshard(m->units[i]);
    if (status) return status;
    fsdpi_drain(m->world);
    for (int i = 0; i < m->num_units; i++)
        for (int k = 0; k < m->units[i]->num_params; k++)
            m->units[i]->params[k].old_offset = m->units[i]->params[k].lay.shard_offset;
    for (int i = 0; i < m->num_classes; i++)
        while (m->classes[i].count) fsdpi_buf_free(m, m->classes[i].slots[--m->classes[i].count]);
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        fsdpi_users_free(m, &m->flats[d], m->flats[d].grad);
        m->flats[d].old_shard = m->flats[d].shard;
        m->flats[d].old_grad = m->flats[d].grad;
        m->flats[d].shard = m->flats[d].grad = NULL;
    }
    fsdpi_uncommit(m);
    m->committed = 0;
    return FSDP_OK;
}

// Free everything of a model. For a prediction's copy: what the dry run has counted.
static void fsdpi_model_free_buffers(fsdp_model *m) {
    for (int i = 0; i < m->num_classes; i++) {
        for (int k = 0; k < m->classes[i].count; k++) fsdpi_buf_free(m, m->classes[i].slots[k]);
        fsdpi_model_free(m, m->classes[i].slots);
    }
    fsdpi_blocks_free(m);
    fsdpi_old_free(m);
    fsdpi_model_free(m, m->classes);
    fsdpi_model_free(m, m->order);
    if (m->undefined)
        m->world->device_ops->free(m->world->device, FSDP_MEMORY_DEVICE, m->undefined,
                                   m->undefined_bytes);
}

/* ==== core/schedule.h =======================================================================
   the transition table and the calls that look it up */

// Owns: the transition table and its actions. A public call looks up one row and runs its actions;
// an action fills op records and never calls a backend. Invariants: a call without a row changes
// nothing; an action that finds its goal reached does nothing. Source: FSDPState, FSDPParamGroup.

// Bound of the record of forwards; behind it prefetches are lost, nothing else.
#define FSDPI_ORDER_PER_UNIT 64

// Remember a forward: its backward is due, and the forward before it is what to prefetch then.
static fsdp_status fsdpi_do_record(fsdp_unit *u) {
    fsdp_model *m = u->model;
    if (!m->grad_enabled) return FSDP_OK;
    if (m->num_order < FSDPI_ORDER_PER_UNIT * m->num_units) {
        if (!fsdpi_grow(m, (void **)&m->order, m->num_order, &m->cap_order, sizeof *m->order))
            return fsdpi_model_fail(
                m, fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY,
                              "post_forward of unit '%s': no memory for the record of forwards",
                              u->name));
        m->order[m->num_order].unit = u;
        m->order[m->num_order].previous = u->last_order;
        u->last_order = m->num_order++;
    }
    u->forwards++;
    return FSDP_OK;
}

static fsdp_status fsdpi_do_enter(fsdp_unit *u) {
    u->forwards--;
    u->model->backward = 1;
    return FSDP_OK;
}

enum { FSDPI_I = 1, FSDPI_F = 2, FSDPI_P = 4, FSDPI_B = 8, FSDPI_ALL = 15 }; // 1 << training state
enum { FSDPI_OUT = 1, FSDPI_IN = 2, FSDPI_BOTH = 3 };                        // of backward
enum { FSDPI_KEEP = 255 };                                                   // next: as it is

typedef struct fsdpi_row {
    uint8_t from, phase;
    uint8_t due;  // 1: the unit must have a forward that has not run backward
    uint8_t next; // training state
    fsdp_status (*actions[6])(fsdp_unit *u); // in order, NULL: end
} fsdpi_row;

// clang-format off
// The rows of each call, in the order of FSDP_CALL_LIST; a row with from 0 is none.
static const fsdpi_row fsdpi_rows[FSDP_CALL_COUNT][3] = {
//   from               phase       due next            actions
    { // pre_forward
        {FSDPI_I | FSDPI_F, FSDPI_OUT,  0, FSDP_STATE_FORWARD,
            {fsdpi_do_unshard, fsdpi_do_wait, fsdpi_do_prefetch_forward}},
        // recompute: of a unit nested in others' backward, of the unit whose backward it is
        {FSDPI_I | FSDPI_B, FSDPI_IN,   1, FSDP_STATE_FORWARD, {fsdpi_do_unshard, fsdpi_do_wait}},
        {FSDPI_P,           FSDPI_IN,   0, FSDPI_KEEP,         {fsdpi_do_unshard, fsdpi_do_wait}},
    },
    { // post_forward
        {FSDPI_F,           FSDPI_OUT,  0, FSDP_STATE_IDLE,
            {fsdpi_do_record, fsdpi_do_reshard_forward}},
        {FSDPI_F,           FSDPI_IN,   0, FSDP_STATE_IDLE, {NULL}},
        {FSDPI_P,           FSDPI_IN,   0, FSDPI_KEEP, {NULL}},
    },
    { // pre_backward
        {FSDPI_I | FSDPI_B, FSDPI_BOTH, 1, FSDP_STATE_PRE_BACKWARD,
            {fsdpi_do_unshard_backward, fsdpi_do_wait, fsdpi_do_grads,
             fsdpi_do_prefetch_backward, fsdpi_do_enter}},
        {FSDPI_P,           FSDPI_IN,   0, FSDPI_KEEP, {NULL}},
    },
    { // post_backward
        {FSDPI_P,           FSDPI_IN,   0, FSDP_STATE_POST_BACKWARD,
            {fsdpi_do_reshard_backward, fsdpi_do_reduce}},
    },
    {{FSDPI_ALL,         FSDPI_BOTH, 0, FSDPI_KEEP, {fsdpi_do_unshard}}}, // unshard
    {{FSDPI_ALL,         FSDPI_BOTH, 0, FSDPI_KEEP, {fsdpi_do_wait}}}, // wait
    {{FSDPI_I | FSDPI_B, FSDPI_BOTH, 0, FSDPI_KEEP, {fsdpi_do_reshard}}}, // reshard
    { // finalize
        {FSDPI_P,           FSDPI_BOTH, 0, FSDP_STATE_IDLE,
            {fsdpi_do_reshard_backward, fsdpi_do_reduce}},
        {FSDPI_I | FSDPI_B, FSDPI_BOTH, 0, FSDP_STATE_IDLE,
            {fsdpi_do_reshard_backward, fsdpi_do_leftovers}},
    },
    {{FSDPI_ALL,         FSDPI_BOTH, 0, FSDPI_KEEP, {NULL}}}, // data
    {{FSDPI_P,           FSDPI_IN,   0, FSDPI_KEEP, {NULL}}}, // grad
    {{FSDPI_I,           FSDPI_OUT,  0, FSDPI_KEEP, {fsdpi_do_stale}}}, // params_changed
    {{FSDPI_I,           FSDPI_OUT,  0, FSDPI_KEEP, {fsdpi_do_stale}}}, // load
    {{FSDPI_I,           FSDPI_OUT,  0, FSDPI_KEEP, {NULL}}}, // full
    {{FSDPI_I,           FSDPI_OUT,  0, FSDPI_KEEP, {fsdpi_do_zero_grad}}}, // zero_grad
    {{FSDPI_I,           FSDPI_OUT,  0, FSDPI_KEEP, {NULL}}}, // clip
    {{FSDPI_I,           FSDPI_OUT,  0, FSDPI_KEEP, {NULL}}}, // set_requires_grad
    {{FSDPI_I | FSDPI_B, FSDPI_BOTH, 0, FSDPI_KEEP, {NULL}}}, // set
    {{FSDPI_ALL,         FSDPI_BOTH, 0, FSDP_STATE_IDLE, {fsdpi_do_drop}}}, // reset
};
// clang-format on

static const char *fsdpi_call_name(int call) {
    static const char *const names[FSDP_CALL_COUNT] = {
#define FSDP_X(name, text) text,
        FSDP_CALL_LIST(FSDP_X)
#undef FSDP_X
    };
    return names[call];
}

static const fsdpi_row *fsdpi_lookup(const fsdp_unit *u, int call) {
    int phase = u->model->backward ? FSDPI_IN : FSDPI_OUT;
    for (int i = 0; i < 3; i++) {
        const fsdpi_row *row = &fsdpi_rows[call][i];
        if ((row->from & (1 << u->state)) && (row->phase & phase) && (!row->due || u->forwards > 0))
            return row;
    }
    return NULL;
}

// The text of a call in a wrong state asks the table what is possible.
static fsdp_status fsdpi_wrong_call(const fsdp_unit *u, const char *what) {
    static const char *const states[] = {"IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"};
    static const char *const storages[] = {"SHARDED", "IN_FLIGHT", "UNSHARDED",
                                           "SHARDED_POST_FORWARD"};
    char possible[256] = "";
    size_t used = 0;
    for (int c = 0; c < FSDP_CALL_COUNT; c++) {
        if (!fsdpi_lookup(u, c) || (c == FSDP_CALL_DATA && u->storage != FSDP_STORAGE_UNSHARDED))
            continue;
        used += (size_t)snprintf(possible + used, sizeof possible - used, "%s%s", used ? ", " : "",
                                 fsdpi_call_name(c));
        if (used >= sizeof possible) break;
    }
    return fsdpi_fail(u->model->world, FSDP_ERR_INVALID_STATE,
                      "%s: unit '%s' is %s and %s, %s backward, with %d forwards that have not run "
                      "backward; possible now: %s",
                      what, u->name, states[u->state], storages[u->storage],
                      u->model->backward ? "inside" : "outside", u->forwards, possible);
}

static uint8_t fsdpi_next_state(const fsdp_unit *u, const fsdpi_row *row) {
    return row->next == FSDPI_KEEP ? u->state : row->next;
}

// Run one row for a unit.
static fsdp_status fsdpi_step(fsdp_unit *u, const fsdpi_row *row) {
    u->model->call_state = fsdpi_next_state(u, row);
    for (int i = 0; row->actions[i]; i++) {
        fsdp_status status = row->actions[i](u);
        if (status) return status;
    }
    u->state = fsdpi_next_state(u, row);
    return FSDP_OK;
}

// Is the call possible for all units?
static fsdp_status fsdpi_check_units(fsdp_model *m, int call) {
    for (int i = 0; i < m->num_units; i++)
        if (!fsdpi_lookup(m->units[i], call))
            return fsdpi_wrong_call(m->units[i], fsdpi_call_name(call));
    return FSDP_OK;
}

// Their rows, once it is.
static fsdp_status fsdpi_run_units(fsdp_model *m, int call) {
    for (int i = 0; i < m->num_units; i++) {
        fsdp_status status = fsdpi_step(m->units[i], fsdpi_lookup(m->units[i], call));
        if (status) return status;
    }
    return FSDP_OK;
}

// A marker for observers, before the ops of a public call.
static fsdp_status fsdpi_announce(fsdp_model *m, fsdp_unit *u, int call, uint8_t state) {
    m->call_state = state;
    if (!m->driver.op) return FSDP_OK;
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_HOOK, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);
    if (!u) op.what = fsdpi_call_name(call);
    op.count = (uint64_t)call;
    return fsdpi_emit(m, &op);
}

// A model-wide call: NULL, a failed world, not yet committed; the table; the marker; the rows.
static fsdp_status fsdpi_model_call(fsdp_model *m, int call, int run) {
    if (!m) return fsdpi_null(NULL, fsdpi_call_name(call));
    fsdp_status status = fsdpi_commit(m);
    if (!status) status = fsdpi_check_units(m, call);
    if (!status) status = fsdpi_announce(m, NULL, call, FSDP_STATE_IDLE);
    return status || !run ? status : fsdpi_run_units(m, call);
}

// Finalize reports the first failed call of the step again.
static fsdp_status fsdpi_remember(fsdp_model *m, fsdp_status status) {
    if (status && !m->hook_status) {
        m->hook_status = status;
        snprintf(m->hook_error, sizeof m->hook_error, "%s", fsdp_last_error(m->world));
    }
    return status;
}

static fsdp_status fsdpi_unit_call(fsdp_unit *u, int call) {
    if (!u) return fsdpi_null(NULL, fsdpi_call_name(call));
    fsdp_model *m = u->model;
    fsdp_status status = fsdpi_failed(m->world);
    if (status) return status;
    if (!m->committed) status = fsdpi_commit(m);
    if (status) return fsdpi_remember(m, status);
    if (m->driver.hook && m->driver.hook(m->driver.user, m, u, call)) return FSDP_OK;
    const fsdpi_row *row = fsdpi_lookup(u, call);
    if (!row) return fsdpi_remember(m, fsdpi_wrong_call(u, fsdpi_call_name(call)));
    status = fsdpi_announce(m, u, call, fsdpi_next_state(u, row));
    if (!status) status = fsdpi_step(u, row);
    return fsdpi_remember(m, status);
}

FSDP_API fsdp_status fsdp_pre_forward(fsdp_unit *unit) {
    return fsdpi_unit_call(unit, FSDP_CALL_PRE_FORWARD);
}
FSDP_API fsdp_status fsdp_post_forward(fsdp_unit *unit) {
    return fsdpi_unit_call(unit, FSDP_CALL_POST_FORWARD);
}
FSDP_API fsdp_status fsdp_pre_backward(fsdp_unit *unit) {
    return fsdpi_unit_call(unit, FSDP_CALL_PRE_BACKWARD);
}
FSDP_API fsdp_status fsdp_post_backward(fsdp_unit *unit) {
    return fsdpi_unit_call(unit, FSDP_CALL_POST_BACKWARD);
}
FSDP_API fsdp_status fsdp_unshard(fsdp_unit *unit) {
    return fsdpi_unit_call(unit, FSDP_CALL_UNSHARD);
}
FSDP_API fsdp_status fsdp_wait(fsdp_unit *unit) { return fsdpi_unit_call(unit, FSDP_CALL_WAIT); }
FSDP_API fsdp_status fsdp_reshard(fsdp_unit *unit) {
    return fsdpi_unit_call(unit, FSDP_CALL_RESHARD);
}

static int fsdpi_getter_ok(fsdp_unit *u, int call) {
    const fsdpi_row *row = fsdpi_lookup(u, call);
    if (row && (call != FSDP_CALL_DATA || u->storage == FSDP_STORAGE_UNSHARDED)) return 1;
    (void)fsdpi_wrong_call(u, fsdpi_call_name(call));
    return 0;
}

static fsdp_status fsdpi_param_call(fsdp_unit *u, int index, int call) {
    if (!u) return fsdpi_null(NULL, fsdpi_call_name(call));
    if (index < 0 || index >= u->num_params)
        return fsdpi_fail(u->model->world, FSDP_ERR_INVALID_ARG,
                          "%s: unit '%s' has no parameter %d, expected 0..%d",
                          fsdpi_call_name(call), u->name, index, u->num_params - 1);
    return FSDP_OK;
}

/* ==== core/step.h ===========================================================================
   the end of a step: finalize, zero_grad, reset */

// The caller's stream will write shards: it comes behind gathers under way, which read them.
static FSDPI_UNUSED fsdp_status fsdpi_shards_writable(fsdp_model *m) {
    fsdp_status status = fsdpi_failed(m->world);
    for (int i = 0; i < m->num_units && !status; i++) {
        fsdp_unit *u = m->units[i];
        if (u->storage == FSDP_STORAGE_IN_FLIGHT && u->gather)
            status = fsdpi_emit_use(m, u, FSDP_LABEL_GATHER, u->gather);
    }
    return status;
}

// Shards are as the caller's stream has left them: later gathers come after.
static fsdp_status fsdpi_shards_written(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++)
        if (m->flats[d].shard)
            status = fsdpi_mark(m->world, FSDP_STREAM_COMPUTE, &m->flats[d].shard->ready);
    return status;
}

/* Whether a parameter has a gradient: yes, if this rank used it. Only for others are the counts
   looked at, for which the host has to wait. */
static int fsdpi_asks_others(fsdp_model *m) {
    int asks = 0;
    for (int i = 0; i < m->num_units; i++) {
        const fsdp_unit *u = m->units[i];
        for (int k = 0; k < u->num_params && u->counted && fsdpi_ranks(u) > 1; k++) {
            fsdpi_param *p = &u->params[k];
            p->has_grad |= p->requires_grad && p->flag;
            asks |= p->requires_grad && !p->has_grad;
        }
    }
    return asks;
}

// The caller's stream waits for all shard gradients; what has none is zero; who used what is read.
static fsdp_status fsdpi_grads_ready(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < m->num_units && !status; i++) {
        fsdp_unit *u = m->units[i];
        if (u->num_train == 0 || u->has_grad || u->grad_is_zero) continue;
        for (int k = 0; k < u->num_parts && !status; k++) {
            const fsdpi_part *part = &u->parts[k];
            if (part->num_train)
                status = fsdpi_emit_fill(
                    m, u, FSDP_LABEL_FINAL, FSDP_STREAM_COMPUTE, fsdpi_flat_of(u, part)->grad,
                    fsdpi_grad_dtype(m, part->dtype), part->train.base, part->train.shard_numel, 0);
        }
        u->grad_is_zero = 1;
    }
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++) {
        if (m->flats[d].grad) status = fsdpi_emit_use(m, NULL, FSDP_LABEL_FINAL, m->flats[d].grad);
        if (!status && m->flats[d].grad && m->grad_hooks) // they may have written shards
            status = fsdpi_emit_use(m, NULL, FSDP_LABEL_FINAL, m->flats[d].shard);
    }
    if (status || m->dry) return status;
    int asks = fsdpi_asks_others(m);
    int waits = asks || m->desc.cpu_offload || m->world->mode != FSDPI_NATIVE;
    if (waits) status = fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
    if (!status && asks) status = fsdpi_read_users(m);
    for (int i = 0; i < m->num_units && !status; i++) {
        fsdp_unit *u = m->units[i];
        for (int k = 0; k < u->num_params && u->counted; k++)
            if (u->params[k].requires_grad)
                u->params[k].has_grad |= (uint8_t)fsdpi_was_used(u, &u->params[k]);
        if (waits && u->counted && !u->rout) u->flags_read = 0; // their copy is done
        u->counted = 0;
    }
    return status;
}

static void fsdpi_forget_forwards(fsdp_model *m) {
    m->num_order = 0;
    for (int i = 0; i < m->num_units; i++) {
        m->units[i]->forwards = 0;
        m->units[i]->last_order = -1;
    }
}

static fsdp_status fsdpi_finalize(fsdp_model *m) {
    fsdp_status status = fsdpi_run_units(m, FSDP_CALL_FINALIZE);
    if (!status) status = fsdpi_grads_ready(m);
    if (status) return status;
    m->backward = 0;
    m->step++;
    fsdpi_pools_rewind(m);
    if (m->is_last_backward) fsdpi_forget_forwards(m);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_params_changed(fsdp_model *model) {
    fsdp_status status = fsdpi_model_call(model, FSDP_CALL_PARAMS_CHANGED, 1);
    if (!status) status = fsdpi_shards_written(model);
    return model ? fsdpi_remember(model, status) : status;
}

FSDP_API fsdp_status fsdp_finalize_backward(fsdp_model *model) {
    const fsdp_driver *driver = model ? &model->driver : NULL;
    fsdp_status status = model ? fsdpi_failed(model->world) : FSDP_OK;
    if (status) return status;
    if (driver && driver->hook && driver->hook(driver->user, model, NULL, FSDP_CALL_FINALIZE))
        return FSDP_OK;
    status = fsdpi_model_call(model, FSDP_CALL_FINALIZE, 0);
    if (!status) status = fsdpi_finalize(model);
    if (status || !model->hook_status) return status;
    status = model->hook_status;
    model->hook_status = FSDP_OK;
    fsdpi_set_error(model->world, model->hook_error);
    return status;
}

/* Memory for a getter in a world that has failed, so that a trainer that looks at statuses later
   does not crash before: one block of this rank alone, as large as the largest slot, for all.
   NULL only where there is no memory either. */
static void *fsdpi_undefined(fsdp_model *m) {
    int64_t bytes = 1;
    for (int i = 0; i < m->num_units && !m->undefined; i++) {
        const fsdp_unit *u = m->units[i];
        if (u->slot_bytes > bytes) bytes = u->slot_bytes;
        if (u->grad_bytes > bytes) bytes = u->grad_bytes;
    }
    fsdp_world *w = m->world;
    if (m->undefined) return m->undefined;
    m->undefined_bytes = (size_t)bytes;
    if (w->device_ops->alloc(w->device, FSDP_MEMORY_DEVICE, (size_t)bytes, &m->undefined))
        m->undefined = NULL;
    return m->undefined;
}

FSDP_API void *fsdp_data(fsdp_unit *unit, int index) {
    if (fsdpi_param_call(unit, index, FSDP_CALL_DATA)) return NULL;
    if (fsdpi_failed(unit->model->world)) return fsdpi_undefined(unit->model);
    if (!fsdpi_getter_ok(unit, FSDP_CALL_DATA)) return NULL;
    const fsdpi_param *p = &unit->params[index];
    if (fsdpi_gather_is_alias(unit))
        return fsdpi_shard_of(unit)->ptr + fsdpi_bytes(p->lay.shard_offset, p->dtype);
    return unit->gather->ptr + fsdpi_bytes(p->lay.full_offset, fsdpi_part_of(unit, p)->param_dtype);
}

FSDP_API void *fsdp_grad(fsdp_unit *unit, int index) {
    if (fsdpi_param_call(unit, index, FSDP_CALL_GRAD)) return NULL;
    fsdpi_param *p = &unit->params[index];
    if (!p->requires_grad) return NULL;
    if (fsdpi_failed(unit->model->world)) return fsdpi_undefined(unit->model);
    if (!fsdpi_getter_ok(unit, FSDP_CALL_GRAD)) return NULL;
    p->used = p->written = 1;
    if (unit->grad_alias)
        return fsdpi_flat_of(unit, unit->parts)->grad->ptr +
               fsdpi_bytes(p->lay.shard_offset, p->dtype);
    return unit->grad->ptr + fsdpi_bytes(p->grad_offset, fsdpi_part_of(unit, p)->param_dtype);
}

FSDP_API fsdp_status fsdp_zero_grad(fsdp_model *model) {
    fsdp_status status = fsdpi_model_call(model, FSDP_CALL_ZERO_GRAD, 1);
    return model ? fsdpi_remember(model, status) : status;
}

FSDP_API fsdp_status fsdp_model_reset(fsdp_model *model) {
    if (!model) return fsdpi_null(NULL, "model_reset");
    fsdp_status status = fsdpi_failed(model->world);
    if (status || model->layout == 0) return status;
    fsdpi_drain(model->world);
    status = fsdpi_announce(model, NULL, FSDP_CALL_RESET, FSDP_STATE_IDLE);
    if (!status) status = fsdpi_run_units(model, FSDP_CALL_RESET);
    fsdpi_forget_forwards(model);
    model->backward = 0;
    model->hook_status = FSDP_OK;
    fsdpi_pools_rewind(model);
    return status;
}

/* ==== core/norm.h ===========================================================================
   the norm of all gradients, and clipping */

// Blocks of the gradients of one dtype; for the norm those that count: with units on meshes of
// their own all ranks add up, and one replica speaks for the others.
static int fsdpi_grad_blocks(fsdp_model *m, fsdp_dtype dtype, int norm, fsdp_block *out) {
    int num = 0;
    for (int i = 0; i < m->num_units; i++) {
        const fsdp_unit *u = m->units[i];
        int silent = !u->has_grad || (norm && m->mixed && u->info.replicate_mesh_rank > 0);
        for (int k = 0; k < u->num_params && !silent; k++) {
            const fsdpi_param *p = &u->params[k];
            int64_t at = p->lay.shard_offset;
            if (p->has_grad && p->dtype == dtype)
                out[num++] = fsdpi_run(at, at, p->lay.local_numel);
        }
    }
    return num;
}

// Sum (or maximum) of m->scalar over one group.
static fsdp_status fsdpi_norm_reduce(fsdp_model *m, fsdp_comm *comm, int size) {
    fsdp_op op = fsdpi_op(m, NULL, FSDP_OP_ALL_REDUCE, FSDP_LABEL_CLIP, FSDP_STREAM_REDUCE);
    fsdpi_work one = {NULL, NULL, 0, 1};
    int is_max = !fsdpi_is_finite(m->norm_type);
    fsdp_dtype dtype = is_max ? FSDP_I64 : FSDP_F64; // magnitudes are in the order of their bits
    if (size == 1) return FSDP_OK;
    op.redop = is_max ? FSDP_MAX : FSDP_SUM;
    op.in_place = 1;
    op.comm = comm;
    op.group_size = size;
    return fsdpi_emit_work(m, &op, m->scalar, dtype, m->scalar, dtype, &one);
}

// Of all gradients: the sum of |g|^p, or the maximum, to m->scalar. Nobody waits.
static fsdp_status fsdpi_norm(fsdp_model *m) {
    const fsdp_mesh *mesh = m->info.mesh;
    fsdp_status status = FSDP_OK;
    int num = 0, accumulate = 0;
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++) {
        if (!m->flats[d].grad) continue;
        fsdp_op op = fsdpi_op(m, NULL, FSDP_OP_NORM, FSDP_LABEL_CLIP, FSDP_STREAM_COMPUTE);
        op.dtype = (uint8_t)fsdpi_grad_dtype(m, d);
        op.out_dtype = FSDP_F64;
        op.norm_type = m->norm_type;
        op.accumulate = (uint8_t)accumulate;
        op.list = m->norm_blocks + num;
        op.list_count = (uint32_t)fsdpi_grad_blocks(m, d, 1, m->norm_blocks + num);
        for (uint32_t i = 0; i < op.list_count; i++)
            op.count += (uint64_t)m->norm_blocks[num++].width;
        op.src = m->flats[d].grad;
        op.dst = m->scalar;
        op.src_ptr = op.src->ptr;
        op.dst_ptr = op.dst->ptr;
        status = fsdpi_emit(m, &op);
        accumulate = 1;
    }
    if (!accumulate) // no trainable parameter at all
        status = fsdpi_emit_fill(m, NULL, FSDP_LABEL_CLIP, FSDP_STREAM_COMPUTE, m->scalar, FSDP_F64,
                                 0, 1, 0);
    if (!status && !m->mixed)
        status = fsdpi_norm_reduce(m, m->shard_reduce_comm, m->info.shard_mesh_size);
    else if (!status && fsdpi_mesh_numel(mesh) == m->world->size)
        status = fsdpi_norm_reduce(m, m->world->reduce_comm, m->world->size);
    else
        for (int d = 0; d < mesh->ndim && !status; d++)
            status = fsdpi_norm_reduce(m, mesh->reduce_comm[d], mesh->shape[d]);
    return status ? status : fsdpi_emit_use(m, NULL, FSDP_LABEL_CLIP, m->scalar);
}

// All gradients are multiplied by what the device finds in m->scalar. A NaN makes them NaN, as
// upstream, but not the padding between them.
static fsdp_status fsdpi_clip(fsdp_model *m, double max_norm) {
    fsdp_block *blocks = m->norm_blocks + m->num_params; // who keeps a step's records has both
    fsdp_status status = FSDP_OK;
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++) {
        if (!m->flats[d].grad) continue;
        fsdpi_work work = {blocks, NULL, fsdpi_grad_blocks(m, d, 0, blocks), 0};
        fsdpi_count(&work);
        blocks += work.num;
        fsdp_op op = fsdpi_op(m, NULL, FSDP_OP_COPY, FSDP_LABEL_CLIP, FSDP_STREAM_COMPUTE);
        fsdp_dtype dtype = fsdpi_grad_dtype(m, d);
        op.scale = max_norm;
        op.norm_type = m->norm_type;
        op.clip = (const double *)(const void *)m->scalar->ptr;
        status = fsdpi_emit_work(m, &op, m->flats[d].grad, dtype, m->flats[d].grad, dtype, &work);
    }
    if (!status && m->desc.cpu_offload) status = fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
    return status;
}

FSDP_API fsdp_status fsdp_clip_grads(fsdp_model *model, const fsdp_clip_desc *desc, double *norm) {
    fsdp_clip_desc d;
    double total = 0;
    fsdp_world *w = model ? model->world : NULL;
    fsdp_status status = w ? fsdpi_failed(w) : FSDP_OK;
    if (!status && (!w || !desc)) status = fsdpi_null(w, "clip_grads");
    if (!status) status = fsdpi_desc_read(w, &d, desc, sizeof d, "fsdp_clip_desc");
    if (status) return status;
    if (!fsdpi_is_nan(d.norm_type) && d.norm_type == 0) d.norm_type = 2;
    if (!(d.max_norm > 0) || fsdpi_is_nan(d.max_norm) || !(d.norm_type > 0) ||
        fsdpi_is_nan(d.norm_type))
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "clip_grads: max_norm is %g, norm_type is %g: expected numbers > 0",
                          d.max_norm, d.norm_type);
    status = fsdpi_model_call(model, FSDP_CALL_CLIP, 0);
    if (status) return status;
    model->norm_type = d.norm_type;
    status = fsdpi_norm(model);
    if (status) model->norm_type = 0;
    if (!status && d.error_if_nonfinite) status = fsdp_grad_norm(model, &total);
    int is_bad = !status && !fsdpi_is_finite(total);
    if (!status && !is_bad && fsdpi_is_finite(d.max_norm)) status = fsdpi_clip(model, d.max_norm);
    if (!status && norm) status = fsdp_grad_norm(model, norm);
    if (status || !is_bad) return status;
    return fsdpi_fail(w, FSDP_ERR_CORRUPT,
                      "clip_grads: the norm of the gradients is %g: nothing was scaled; look for "
                      "infinities, or leave error_if_nonfinite at 0",
                      total);
}

FSDP_API fsdp_status fsdp_grad_norm(fsdp_model *model, double *norm) {
    double total = 0;
    fsdp_world *w = model ? model->world : NULL;
    fsdp_status status = w ? fsdpi_failed(w) : FSDP_OK;
    if (!status && (!w || !norm)) status = fsdpi_null(w, "grad_norm");
    if (!status && !(model->norm_type > 0))
        status = fsdpi_fail(w, FSDP_ERR_INVALID_STATE,
                            "grad_norm: nothing has been measured: call fsdp_clip_grads first");
    if (!status) status = fsdpi_transfer(w, &total, model->scalar->ptr, sizeof total);
    if (!status) *norm = fsdpi_root(total, model->norm_type);
    return status;
}

FSDP_API fsdp_status fsdp_clip_grad_norm(fsdp_model *model, double max_norm, double *norm) {
    fsdp_clip_desc d = FSDP_ZERO;
    d.max_norm = max_norm;
    return fsdp_clip_grads(model, &d, norm);
}

/* ==== core/params.h =========================================================================
   parameters as the caller sees them: views, init, load, full tensors */

// Rank k's piece [from, from + num) of its padded shard, into the full tensor.
static void fsdpi_scatter_piece(const fsdpi_param *p, int world, int k, int64_t from, int64_t num,
                                const char *piece, char *full, size_t size) {
    int dim = p->lay.shard_dim;
    int64_t inner = fsdpi_numel(p->lay.shape, dim + 1, p->lay.ndim);
    fsdp_range range = fsdpi_range(p->lay.shape[dim], world, k);
    int64_t row = range.count * inner,
            pitch = p->lay.shape[dim] * inner; // of my shard, of the tensor
    int64_t outer = fsdpi_numel(p->lay.shape, 0, dim);
    while (num > 0 && from < row * outer) {
        int64_t column = from % row, run = fsdpi_min(row - column, num);
        int64_t to = from / row * pitch + range.start * inner + column;
        memcpy(full + (size_t)to * size, piece, (size_t)run * size);
        piece += (size_t)run * size;
        from += run;
        num -= run;
    }
}

// Bytes of the largest parameter, padded, but no more than a step.
static int64_t fsdpi_full_bytes(const fsdp_model *m) {
    int64_t largest = 0;
    for (int i = 0; i < m->num_units; i++) {
        const fsdp_unit *u = m->units[i];
        for (int k = 0; k < u->num_params; k++) {
            // In the widest dtype; at least an element of every rank.
            int64_t bytes = fsdpi_min(fsdpi_shards(u) * u->params[k].lay.shard_numel * 8,
                                      m->desc.fill_bytes);
            if (bytes < 8 * fsdpi_shards(u)) bytes = 8 * fsdpi_shards(u);
            if (bytes > largest) largest = bytes;
        }
    }
    return largest;
}

/* Gather one parameter, or its gradient, in its own dtype, in pieces that fit the scratch buffer:
   the shard group's ranks bring piece after piece of their shards. */
static fsdp_status fsdpi_full(fsdp_unit *u, const fsdpi_param *p, fsdp_buf *block, fsdp_dtype dtype,
                              char *full) {
    fsdp_model *m = u->model;
    int world = fsdpi_shards(u);
    size_t size = fsdp_dtype_size(dtype);
    if (world == 1) {
        fsdp_status ready = fsdpi_emit_use(m, u, FSDP_LABEL_FULL, block);
        if (!ready && full)
            ready = fsdpi_transfer(m->world, full, block->ptr + (size_t)p->lay.shard_offset * size,
                                   (size_t)p->lay.numel * size);
        return ready;
    }
    fsdp_status status = FSDP_OK;
    if (!m->full_scratch) {
        status = fsdpi_buf_new(m, FSDP_POOL_SCRATCH, (size_t)fsdpi_full_bytes(m), &m->full_scratch);
        if (!status && !fsdpi_is_host(m->world)) {
            m->full_copy = (char *)fsdpi_model_alloc(m, m->full_scratch->bytes);
            if (!m->full_copy)
                status = fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "param_full: no memory");
        }
        if (status) return fsdpi_model_fail(m, status);
    }
    int64_t step = (int64_t)(m->full_scratch->bytes / ((size_t)world * size));
    const char *pieces = m->full_copy ? m->full_copy : m->full_scratch->ptr;
    for (int64_t at = 0; at < p->lay.shard_numel && !status; at += step) {
        int64_t num = fsdpi_min(step, p->lay.shard_numel - at);
        fsdp_seg seg = {0, 0, num};
        m->full_seg = seg; // a worker may read it after a failure has ended this call
        m->full_block = fsdpi_run(p->lay.shard_offset + at, u->info.shard_mesh_rank * num, num);
        fsdp_op in = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_FULL, FSDP_STREAM_GATHER);
        fsdp_op op = fsdpi_op(m, u, FSDP_OP_ALL_GATHER, FSDP_LABEL_FULL, FSDP_STREAM_GATHER);
        fsdpi_work own = {&m->full_block, NULL, 1, (uint64_t)num},
                   all = {NULL, &m->full_seg, 1, (uint64_t)num};
        op.in_place = 1; // peers may not be able to read the shards
        op.comm = u->info.shard_comm;
        op.group_size = world;
        status = fsdpi_emit_work(m, &in, block, dtype, m->full_scratch, dtype, &own);
        if (!status)
            status = fsdpi_emit_work(m, &op, m->full_scratch, dtype, m->full_scratch, dtype, &all);
        if (!status) status = fsdpi_emit_use(m, u, FSDP_LABEL_FULL, m->full_scratch);
        if (!status && m->full_copy)
            status = fsdpi_transfer(m->world, m->full_copy, m->full_scratch->ptr,
                                    (size_t)(world * num) * size);
        else if (!status) status = fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
        for (int k = 0; k < world && full && !status; k++)
            fsdpi_scatter_piece(p, world, k, at, num, pieces + (size_t)(k * num) * size, full,
                                size);
    }
    return status;
}

FSDP_API fsdp_status fsdp_model_commit(fsdp_model *model) {
    return model ? fsdpi_commit(model) : fsdpi_null(NULL, "model_commit");
}

static void fsdpi_view(const fsdp_unit *u, int index, fsdp_param_view *v) {
    const fsdpi_param *p = &u->params[index];
    const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_part_of(u, p));
    *v = fsdpi_view_static(u, index);
    if (u->has_grad && p->has_grad)
        v->shard_grad = flat->grad->ptr + fsdpi_bytes(p->lay.shard_offset, v->grad_dtype);
}

// Before a caller gets an address of shards. Offloaded ones are the host's: what the device still
// does with them is waited for.
static fsdp_status fsdpi_shards_readable(fsdp_model *m) {
    fsdp_status status = m->committed ? FSDP_OK : fsdpi_commit(m);
    if (status || !m->desc.cpu_offload) return status;
    return fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
}

FSDP_API fsdp_status fsdp_param_view_get(fsdp_unit *unit, int index, fsdp_param_view *out) {
    if (!unit || !out) return fsdpi_null(NULL, "param_view_get");
    fsdp_status status = fsdpi_shards_readable(unit->model);
    if (status) return status;
    if (index < 0 || index >= unit->num_params)
        return fsdpi_fail(unit->model->world, FSDP_ERR_INVALID_ARG,
                          "param_view_get: unit '%s' has no parameter %d, expected 0..%d",
                          unit->name, index, unit->num_params - 1);
    fsdpi_view(unit, index, out);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_param_at(fsdp_model *model, int ordinal, fsdp_param_view *out) {
    if (!model || !out) return fsdpi_null(NULL, "param_at");
    for (int i = 0; i < model->num_units; i++) {
        fsdp_unit *u = model->units[i];
        int first = u->params[0].ordinal;
        if (ordinal >= first && ordinal < first + u->num_params)
            return fsdp_param_view_get(u, ordinal - first, out);
    }
    return fsdpi_fail(model->world, FSDP_ERR_INVALID_ARG,
                      "param_at: the model has no parameter %d, expected 0..%d", ordinal,
                      model->num_params - 1);
}

FSDP_API int fsdp_next_param(fsdp_model *model, fsdp_param_view *view) {
    if (!model || !view) return 0;
    fsdp_unit *u = view->unit;
    int index = u ? view->index + 1 : 0;
    if (!u && model->num_units == 0) return 0;
    if (!u) u = model->units[0];
    if (index == u->num_params) {
        if (u->index + 1 == model->num_units) return 0;
        u = model->units[u->index + 1];
        index = 0;
    }
    return fsdp_param_view_get(u, index, view) == FSDP_OK;
}

FSDP_API int64_t fsdp_view_index(const fsdp_param_view *view, int64_t k) {
    int64_t index = 0, stride = 1;
    for (int d = view->ndim - 1; d >= 0; d--) {
        int64_t size = view->local_shape[d] ? view->local_shape[d] : 1;
        index += (view->start[d] + k % size) * stride;
        k /= size;
        stride *= view->shape[d];
    }
    return index;
}

// The host is about to write shards: gathers under way still read them.
static fsdp_status fsdpi_load(fsdp_model *m) {
    fsdp_status status = fsdpi_model_call(m, FSDP_CALL_LOAD, 1);
    if (!status) fsdpi_drain(m->world);
    return status ? status : fsdpi_failed(m->world);
}

// Fills a parameter in place; where the host cannot write, by way of a block of host memory.
static fsdp_status fsdpi_init_param(fsdp_model *m, const fsdp_param_view *v, fsdp_init_fn fn,
                                    void *user) {
    fsdp_param_view block = *v;
    int64_t rows = v->local_shape[0], row_numel = v->numel / rows;
    int64_t step = m->desc.fill_bytes / fsdpi_bytes(row_numel, v->dtype);
    int in_place = fsdpi_is_readable(m->world, m->flats[v->dtype].shard);
    if (step < 1) step = 1;
    int64_t most = fsdpi_bytes(fsdpi_min(step, rows) * row_numel, v->dtype);
    char *staged = in_place ? NULL : (char *)fsdpi_model_alloc(m, (size_t)most);
    fsdp_status status = FSDP_OK;
    if (!in_place && !staged)
        return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "init_params: no memory");
    for (int64_t row = 0; row < rows && !status; row += step) {
        char *place = (char *)v->shard + fsdpi_bytes(row * row_numel, v->dtype);
        block.local_shape[0] = fsdpi_min(step, rows - row);
        block.start[0] = v->start[0] + row;
        block.numel = block.local_shape[0] * row_numel;
        block.data = staged ? staged : place;
        if (staged) memset(staged, 0, (size_t)most); // as a new shard is
        fn(user, &block);
        if (staged)
            status = fsdpi_transfer(m->world, place, staged,
                                    (size_t)fsdpi_bytes(block.numel, v->dtype));
    }
    fsdpi_model_free(m, staged);
    return status;
}

FSDP_API fsdp_status fsdp_init_params(fsdp_model *model, fsdp_init_fn fn, void *user) {
    fsdp_status status = model ? fsdpi_failed(model->world) : FSDP_OK;
    if (!status && !fn)
        status = fsdpi_fail(model ? model->world : NULL, FSDP_ERR_INVALID_ARG,
                            "init_params: fn is NULL");
    if (!status) status = fsdpi_load(model);
    if (status) return status;
    fsdp_param_view v = FSDP_ZERO;
    while (!status && fsdp_next_param(model, &v))
        if (v.numel > 0) status = fsdpi_init_param(model, &v, fn, user);
    return status ? fsdpi_model_fail(model, status) : fsdpi_shards_written(model);
}

FSDP_API fsdp_status fsdp_model_flat(fsdp_model *model, fsdp_dtype dtype, fsdp_flat *out) {
    if (!model || !out || !fsdp_dtype_size(dtype))
        return fsdpi_fail(model ? model->world : NULL, FSDP_ERR_INVALID_ARG,
                          "model_flat: an argument is NULL, or dtype %d is none", dtype);
    fsdp_status status = fsdpi_shards_readable(model);
    if (status) return status;
    const fsdpi_flat_block *flat = &model->flats[dtype];
    memset(out, 0, sizeof *out);
    out->dtype = dtype;
    out->grad_dtype = fsdpi_grad_dtype(model, dtype);
    out->numel = flat->train_numel;
    if (flat->train_numel > 0) {
        out->shards = flat->shard->ptr;
        out->grads = flat->grad->ptr;
    }
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_param_load(fsdp_unit *unit, int index, const void *full) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_LOAD);
    if (!status) status = fsdpi_failed(unit->model->world);
    if (status) return status;
    const fsdp_layout_param *lay = &unit->params[index].lay;
    if (!full && lay->numel > 0)
        return fsdpi_fail(unit->model->world, FSDP_ERR_INVALID_ARG, "param_load: full is NULL");
    status = fsdpi_load(unit->model);
    if (status) return status;
    fsdp_param_view v;
    fsdpi_view(unit, index, &v);
    int64_t outer = fsdpi_numel(lay->shape, 0, lay->shard_dim),
            inner = fsdpi_numel(lay->shape, lay->shard_dim + 1, lay->ndim);
    int64_t width = fsdpi_bytes(lay->rows * inner, v.dtype);
    fsdp_block rows = {fsdpi_bytes(lay->start * inner, v.dtype),
                       0,
                       width,
                       outer,
                       fsdpi_bytes(lay->shape[lay->shard_dim] * inner, v.dtype),
                       width};
    status = fsdpi_transfer_rows(unit->model->world, v.shard, full, &rows);
    return status ? status : fsdpi_shards_written(unit->model);
}

FSDP_API fsdp_status fsdp_param_full(fsdp_unit *unit, int index, void *full) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_FULL);
    if (!status) status = fsdpi_model_call(unit->model, FSDP_CALL_FULL, 0);
    if (status) return status;
    const fsdpi_param *p = &unit->params[index];
    return fsdpi_full(unit, p, fsdpi_flat_of(unit, fsdpi_part_of(unit, p))->shard, p->dtype,
                      (char *)full);
}

FSDP_API fsdp_status fsdp_param_full_grad(fsdp_unit *unit, int index, void *full) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_FULL);
    if (!status) status = fsdpi_failed(unit->model->world);
    if (status) return status;
    const fsdpi_param *p = &unit->params[index];
    fsdp_dtype dtype = fsdpi_grad_dtype(unit->model, p->dtype);
    if (!p->requires_grad)
        return fsdpi_fail(unit->model->world, FSDP_ERR_INVALID_STATE,
                          "param_full_grad: parameter '%s' of unit '%s' is frozen", p->name,
                          unit->name);
    status = fsdpi_model_call(unit->model, FSDP_CALL_FULL, 0);
    if (status) return status;
    if (unit->has_grad)
        return fsdpi_full(unit, p, fsdpi_flat_of(unit, fsdpi_part_of(unit, p))->grad, dtype,
                          (char *)full);
    if (full) memset(full, 0, (size_t)fsdpi_bytes(p->lay.numel, dtype));
    return FSDP_OK;
}

/* ==== core/predict.h ========================================================================
   memory: what is allocated, what will be, and the model in words */

// The steps of a prediction: units that never reshard are open around the others.
static fsdp_status fsdpi_rehearse(fsdp_model *m) {
    static const uint8_t calls[] = {FSDP_CALL_PRE_FORWARD, FSDP_CALL_POST_FORWARD,
                                    FSDP_CALL_PRE_BACKWARD, FSDP_CALL_POST_BACKWARD};
    fsdp_status status = FSDP_OK;
    for (int back = 0; back < 2; back++) {
        const uint8_t *call = calls + 2 * back;
        for (int pass = 0; pass < 3;
             pass++) { // open those around, run the others, close those around
            for (int i = 0; i < m->num_units && !status; i++) {
                fsdp_unit *u = m->units[back ? m->num_units - 1 - i : i];
                int around = u->reshard_after_forward == FSDP_RESHARD_NEVER &&
                             m->desc.reshard_after_forward != FSDP_RESHARD_NEVER;
                if (around != (pass != 1)) continue;
                if (pass < 2) status = fsdpi_step(u, fsdpi_lookup(u, call[0]));
                if (pass > 0 && !status) status = fsdpi_step(u, fsdpi_lookup(u, call[1]));
            }
        }
    }
    return status ? status : fsdpi_finalize(m);
}

// A copy of a unit as it was made, with its own marks of use. NULL: no memory.
static fsdp_unit *fsdpi_unit_copy(fsdp_model *dry, const fsdp_unit *u) {
    size_t parts = (size_t)u->num_parts * sizeof *u->parts,
           params = (size_t)u->num_params * sizeof *u->params;
    fsdp_unit *copy = (fsdp_unit *)fsdpi_model_alloc(dry, sizeof *copy + parts + params);
    if (!copy) return NULL;
    *copy = *u;
    copy->model = dry;
    copy->params = (fsdpi_param *)(void *)(copy + 1);
    copy->parts = (fsdpi_part *)(void *)((char *)copy->params + params);
    memcpy(copy->params, u->params, params);
    memcpy(copy->parts, u->parts, parts);
    for (int k = 0; k < copy->num_parts; k++)
        if (copy->parts[k].extended)
            copy->parts[k].extended = copy->params + (copy->parts[k].extended - u->params);
    copy->gather = copy->slice = copy->grad = copy->rin = copy->rout = NULL;
    fsdpi_unit_unbuild(copy);
    copy->state = copy->storage = copy->stale = copy->has_grad = copy->grad_alias = 0;
    copy->ahead = copy->counted = 0;
    copy->sync = copy->all_reduce = copy->reshard_after_backward = copy->grad_is_zero = 1;
    copy->forwards = 0;
    copy->last_order = -1;
    return copy;
}

static void fsdpi_dry_free(fsdp_model *dry) {
    if (!dry) return;
    fsdpi_model_free_buffers(dry);
    for (int i = 0; i < dry->num_units; i++) fsdpi_model_free(dry, dry->units[i]);
    fsdpi_model_free(dry, dry->units);
    fsdpi_free(&dry->world->boot.allocator, dry);
}

// A copy of the model that has run a step and counted the memory. *out: to be freed in any case.
static fsdp_status fsdpi_dry_run(const fsdp_model *m, fsdp_model **out) {
    fsdp_world *w = m->world;
    if (m->num_units == 0)
        return fsdpi_fail(w, FSDP_ERR_INVALID_STATE, "prediction: the model has no units");
    fsdp_model *dry = (fsdp_model *)fsdpi_alloc(&w->boot.allocator, sizeof *dry);
    if (!dry) return fsdpi_fail(w, FSDP_ERR_OUT_OF_MEMORY, "prediction: no memory");
    *out = dry;
    dry->world = w;
    dry->desc = m->desc;
    dry->info = m->info;
    dry->dry = dry->grad_enabled = dry->is_last_backward = 1;
    dry->num_params = m->num_params;
    dry->units = (fsdp_unit **)fsdpi_model_alloc(dry, (size_t)m->num_units * sizeof *dry->units);
    fsdp_status status = dry->units ? FSDP_OK : FSDP_ERR_OUT_OF_MEMORY;
    for (int i = 0; !status && i < m->num_units; i++) {
        dry->units[i] = fsdpi_unit_copy(dry, m->units[i]);
        if (dry->units[i]) dry->num_units++;
        else status = FSDP_ERR_OUT_OF_MEMORY;
    }
    if (!status) status = fsdpi_commit(dry);
    if (!status) status = fsdpi_rehearse(dry);
    return status ? fsdpi_fail(w, status, "prediction: %s", fsdp_status_text(status)) : FSDP_OK;
}

// Allocate the slots that a step will take, as the prediction counts them.
static fsdp_status fsdpi_reserve(fsdp_model *m) {
    fsdp_model *dry = NULL;
    fsdp_status status = fsdpi_commit(m);
    if (status) return status;
    status = fsdpi_dry_run(m, &dry);
    for (int i = 0; !status && i < dry->num_classes; i++) { // the model's own has been found before
        const fsdpi_class *wanted = &dry->classes[i];
        int at = fsdpi_class_find(m, wanted->pool, wanted->bytes);
        while (m->classes[at].count < wanted->count && !status)
            status = fsdpi_class_add(m, &m->classes[at]);
    }
    fsdpi_dry_free(dry);
    return status ? fsdpi_model_fail(m, status) : FSDP_OK;
}

FSDP_API fsdp_status fsdp_model_reserve(fsdp_model *model) {
    return model ? fsdpi_reserve(model) : fsdpi_null(NULL, "model_reserve");
}

// Bytes of the full parameters of a unit and of their gradients.
static int64_t fsdpi_unsharded(const fsdp_unit *u) {
    int64_t bytes = 0;
    for (int i = 0; i < u->num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        bytes += fsdpi_bytes(p->lay.numel, p->dtype);
        if (p->requires_grad)
            bytes += fsdpi_bytes(p->lay.numel, fsdpi_grad_dtype(u->model, p->dtype));
    }
    return bytes;
}

static void fsdpi_memory(const fsdp_model *m, fsdp_memory *out) {
    memset(out, 0, sizeof *out);
    for (int pool = 0; pool < FSDP_POOL_COUNT; pool++) {
        out->pool_bytes[pool] = m->pool_bytes[pool];
        out->pool_slots[pool] = m->pool_slots[pool];
        out->total_bytes += m->pool_bytes[pool];
    }
    for (int i = 0; i < m->num_units; i++) out->unsharded_bytes += fsdpi_unsharded(m->units[i]);
    out->host_bytes = m->host_bytes;
}

FSDP_API fsdp_status fsdp_model_memory(const fsdp_model *model, fsdp_memory *out) {
    if (!model || !out) return fsdpi_null(NULL, "model_memory");
    fsdpi_memory(model, out);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_unit_memory(const fsdp_unit *unit, fsdp_memory *out) {
    if (!unit || !out) return fsdpi_null(NULL, "unit_memory");
    const fsdp_buf *held[FSDP_POOL_COUNT] = {NULL};
    held[FSDP_POOL_GATHER] = unit->gather;
    held[FSDP_POOL_SLICE] = unit->slice;
    held[FSDP_POOL_GRAD] = unit->grad;
    held[FSDP_POOL_RIN] = unit->rin;
    held[FSDP_POOL_ROUT] = unit->rout;
    memset(out, 0, sizeof *out);
    for (int k = 0; k < unit->num_parts; k++) {
        const fsdpi_part *part = &unit->parts[k];
        fsdp_dtype grad = fsdpi_grad_dtype(unit->model, part->dtype);
        out->pool_bytes[FSDP_POOL_SHARD] += fsdpi_bytes(
            part->train.shard_numel + part->frozen.shard_numel, part->dtype);
        out->pool_bytes[FSDP_POOL_SGRAD] += fsdpi_bytes(part->train.shard_numel, grad);
    }
    for (int pool = 0; pool < FSDP_POOL_COUNT; pool++) {
        int slot = pool >= FSDP_POOL_GATHER && pool <= FSDP_POOL_ROUT ? unit->classes[pool] : -1;
        if (slot >= 0) out->pool_bytes[pool] = (int64_t)unit->model->classes[slot].bytes;
        out->pool_slots[pool] = held[pool] != NULL;
        out->total_bytes += out->pool_bytes[pool];
    }
    out->unsharded_bytes = fsdpi_unsharded(unit);
    return FSDP_OK;
}

static void fsdpi_describe_param(fsdpi_text *t, const fsdp_unit *u, const fsdpi_param *p) {
    fsdpi_say(t, "    %-24s %-4s [", p->name, fsdp_dtype_name(p->dtype));
    for (int d = 0; d < p->lay.ndim; d++)
        fsdpi_say(t, "%s%lld", d ? ", " : "", (long long)p->lay.shape[d]);
    fsdpi_say(t, "] dim %d, rows %lld..%lld of %lld a rank, %s%s%s\n", p->lay.shard_dim,
              (long long)p->lay.start, (long long)(p->lay.start + p->lay.rows),
              (long long)p->lay.chunk,
              p->num_strings  ? "extension"
              : p->lay.direct ? "direct"
                              : "packed",
              p->requires_grad ? "" : ", frozen",
              fsdpi_part_of(u, p)->param_dtype == p->dtype ? "" : ", cast");
}

FSDP_API size_t fsdp_model_describe(const fsdp_model *model, char *buf, size_t cap) {
    fsdpi_text t = {buf, buf ? cap : 0, 0};
    fsdp_memory mem;
    if (buf && cap) buf[0] = 0;
    if (!model) return 0;
    fsdpi_memory(model, &mem);
    fsdpi_say(&t, "model: %d units, %d parameters, rank %d of %d\n", model->num_units,
              model->num_params, model->world->rank, model->world->size);
    for (int i = 0; i < model->num_units; i++) {
        const fsdp_unit *u = model->units[i];
        fsdp_memory own;
        (void)fsdp_unit_memory(u, &own);
        fsdpi_say(&t,
                  "  unit %d '%s': %d shards x %d replicas, gathered as %s, reduced in %s, "
                  "reshard_after_forward %d; bytes: shard %lld, gradient %lld, gathered %lld, "
                  "unsharded %lld\n",
                  i, u->name, fsdpi_shards(u), fsdpi_replicas(u), fsdp_dtype_name(u->gather_dtype),
                  fsdp_dtype_name(u->reduce_dtype), u->reshard_after_forward,
                  (long long)own.pool_bytes[FSDP_POOL_SHARD],
                  (long long)own.pool_bytes[FSDP_POOL_SGRAD],
                  (long long)own.pool_bytes[FSDP_POOL_GATHER], (long long)own.unsharded_bytes);
        for (int k = 0; k < u->num_params; k++) fsdpi_describe_param(&t, u, &u->params[k]);
    }
    fsdpi_say(&t, "  memory:");
    for (int pool = 0; pool < FSDP_POOL_COUNT; pool++)
        if (mem.pool_bytes[pool])
            fsdpi_say(&t, " %s %lld in %d,", fsdp_pool_name(pool), (long long)mem.pool_bytes[pool],
                      mem.pool_slots[pool]);
    fsdpi_say(&t, " total %lld bytes\n", (long long)mem.total_bytes);
    return t.used;
}

FSDP_API fsdp_status fsdp_model_predict(const fsdp_model *model, fsdp_memory *out) {
    fsdp_model *dry = NULL;
    if (!model || !out) return fsdpi_null(NULL, "model_predict");
    fsdp_status status = fsdpi_dry_run(model, &dry);
    if (!status) {
        fsdpi_memory(dry, out);
        out->host_bytes = model->host_bytes;
    }
    fsdpi_dry_free(dry);
    return status;
}

FSDP_API fsdp_status fsdp_model_counters(const fsdp_model *model, fsdp_counters *out) {
    if (!model || !out) return fsdpi_null(NULL, "model_counters");
    *out = model->counters;
    return FSDP_OK;
}

/* ==== core/options.h ========================================================================
   setters */

// A setter for one unit or all (NULL): which ones; none may be between pre and post.
static fsdp_status fsdpi_set(fsdp_model *m, fsdp_unit *u, const char *what, int *first, int *end) {
    if (!m) return fsdpi_null(NULL, what);
    fsdp_status status = fsdpi_failed(m->world);
    if (status) return status;
    if (u && u->model != m)
        return fsdpi_fail(m->world, FSDP_ERR_INVALID_ARG, "%s: the unit belongs to another model",
                          what);
    *first = u ? u->index : 0;
    *end = u ? u->index + 1 : m->num_units;
    for (int i = *first; i < *end; i++)
        if (!fsdpi_lookup(m->units[i], FSDP_CALL_SET))
            return fsdpi_remember(m, fsdpi_wrong_call(m->units[i], what));
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_set_grad_enabled(fsdp_model *model, int enabled) {
    if (!model) return fsdpi_null(NULL, "set_grad_enabled");
    model->grad_enabled = enabled != 0;
    return fsdpi_failed(model->world);
}

FSDP_API fsdp_status fsdp_set_is_last_backward(fsdp_model *model, int is_last) {
    if (!model) return fsdpi_null(NULL, "set_is_last_backward");
    model->is_last_backward = is_last != 0;
    return fsdpi_failed(model->world);
}

static fsdp_status fsdpi_set_option(fsdp_model *m, fsdp_unit *u, const char *what, size_t field,
                                    int value) {
    int i = 0, end = 0;
    fsdp_status status = fsdpi_set(m, u, what, &i, &end);
    for (; !status && i < end; i++) ((uint8_t *)m->units[i])[field] = value != 0;
    return status;
}

FSDP_API fsdp_status fsdp_set_requires_gradient_sync(fsdp_model *model, fsdp_unit *unit, int sync) {
    const char *what = "set_requires_gradient_sync";
    fsdp_status status = fsdpi_set_option(model, unit, what, offsetof(fsdp_unit, all_reduce), sync);
    return status ? status : fsdpi_set_option(model, unit, what, offsetof(fsdp_unit, sync), sync);
}
FSDP_API fsdp_status fsdp_set_requires_all_reduce(fsdp_model *model, fsdp_unit *unit,
                                                  int required) {
    return fsdpi_set_option(model, unit, "set_requires_all_reduce", offsetof(fsdp_unit, all_reduce),
                            required);
}
FSDP_API fsdp_status fsdp_set_reshard_after_backward(fsdp_model *model, fsdp_unit *unit,
                                                     int reshard) {
    return fsdpi_set_option(model, unit, "set_reshard_after_backward",
                            offsetof(fsdp_unit, reshard_after_backward), reshard);
}
FSDP_API fsdp_status fsdp_set_unshard_in_backward(fsdp_model *model, fsdp_unit *unit, int unshard) {
    return fsdpi_set_option(model, unit, "set_unshard_in_backward",
                            offsetof(fsdp_unit, unshard_in_backward), unshard);
}
FSDP_API fsdp_status fsdp_set_reduce_scatter_unused_params(fsdp_model *model, fsdp_unit *unit,
                                                           int reduce) {
    return fsdpi_set_option(model, unit, "set_reduce_scatter_unused_params",
                            offsetof(fsdp_unit, reduce_unused), reduce);
}
FSDP_API fsdp_status fsdp_set_reshard_after_forward(fsdp_model *model, fsdp_unit *unit, int mode) {
    int i = 0, end = 0;
    fsdp_status status = fsdpi_set(model, unit, "set_reshard_after_forward", &i, &end);
    if (!status && mode != FSDP_RESHARD_ALWAYS && mode != FSDP_RESHARD_NEVER)
        return fsdpi_fail(model->world, FSDP_ERR_INVALID_ARG,
                          "set_reshard_after_forward: mode is %d, expected FSDP_RESHARD_ALWAYS or "
                          "FSDP_RESHARD_NEVER; an int only at fully_shard",
                          mode);
    for (; !status && i < end; i++) model->units[i]->reshard_after_forward = mode;
    return status;
}

FSDP_API fsdp_status fsdp_set_gradient_divide_factor(fsdp_model *model, fsdp_unit *unit,
                                                     double factor) {
    int i = 0, end = 0;
    fsdp_status status = fsdpi_set(model, unit, "set_gradient_divide_factor", &i, &end);
    if (!status && (!(factor >= 0) || !fsdpi_is_finite(factor)))
        return fsdpi_fail(model->world, FSDP_ERR_INVALID_ARG,
                          "set_gradient_divide_factor: factor is %g, expected a number > 0, or 0 "
                          "for the number of ranks",
                          factor);
    for (; !status && i < end; i++) model->units[i]->divide_factor = factor;
    return status;
}

static fsdp_status fsdpi_set_prefetch(fsdp_unit *u, int backward, fsdp_unit *const *targets,
                                      int count, const char *what) {
    int first, end;
    fsdp_status status = fsdpi_set(u ? u->model : NULL, u, what, &first, &end);
    if (status) return status;
    fsdp_model *m = u->model;
    for (int i = 0; i < count; i++)
        if (!targets || !targets[i] || targets[i]->model != m)
            return fsdpi_fail(m->world, FSDP_ERR_INVALID_ARG,
                              "%s: target %d is not a unit of this model", what, i);
    if (count < 0)
        return fsdpi_fail(m->world, FSDP_ERR_INVALID_ARG, "%s: count is %d", what, count);
    int32_t *list = (int32_t *)fsdpi_model_alloc(m, (size_t)(count + 1) * sizeof *list);
    if (!list) return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "%s: no memory", what);
    for (int i = 0; i < count; i++) list[i] = targets[i]->index;
    fsdpi_model_free(m, u->prefetch[backward]);
    u->prefetch[backward] = list;
    u->num_prefetch[backward] = count;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_set_modules_to_forward_prefetch(fsdp_unit *unit,
                                                          fsdp_unit *const *targets, int count) {
    return fsdpi_set_prefetch(unit, 0, targets, count, "set_modules_to_forward_prefetch");
}

FSDP_API fsdp_status fsdp_set_modules_to_backward_prefetch(fsdp_unit *unit,
                                                           fsdp_unit *const *targets, int count) {
    return fsdpi_set_prefetch(unit, 1, targets, count, "set_modules_to_backward_prefetch");
}

FSDP_API fsdp_status fsdp_set_requires_grad(fsdp_unit *unit, int index, int requires_grad) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_REQUIRES_GRAD);
    if (!status) status = fsdpi_failed(unit->model->world);
    if (!status)
        status = fsdpi_remember(unit->model,
                                fsdpi_check_units(unit->model, FSDP_CALL_REQUIRES_GRAD));
    if (status) return status;
    fsdp_model *m = unit->model;
    fsdpi_param *p = &unit->params[index];
    if (requires_grad && !fsdp_dtype_is_float(p->dtype))
        return fsdpi_fail(m->world, FSDP_ERR_INVALID_ARG,
                          "set_requires_grad: parameter '%s' of unit '%s' is %s: only floating "
                          "parameters can require a gradient",
                          p->name, unit->name, fsdp_dtype_name(p->dtype));
    for (int i = 0; i < m->num_units; i++)
        if (m->units[i]->grad || m->units[i]->rin || m->units[i]->rout)
            return fsdpi_fail(m->world, FSDP_ERR_INVALID_STATE,
                              "set_requires_grad: unit '%s' holds gradients that are not reduced: "
                              "run a backward with sync, or fsdp_model_reset",
                              m->units[i]->name);
    if (p->requires_grad == (requires_grad != 0)) return FSDP_OK;
    if (m->committed) status = fsdpi_unsettle(m);
    if (status) return status;
    p->requires_grad = requires_grad != 0;
    p->has_grad = 0;
    status = fsdpi_unit_arrange(unit);
    if (status) { // as it was; the sizes of that layout are in the classes still
        p->requires_grad = !p->requires_grad;
        (void)fsdpi_unit_arrange(unit);
    }
    return status;
}

// Hooks may be read by records under way.
static fsdp_status fsdpi_set_hook(fsdp_unit *u, const char *what) {
    int first, end;
    fsdp_status status = fsdpi_set(u ? u->model : NULL, u, what, &first, &end);
    if (!status) fsdpi_drain(u->model->world);
    return status;
}

FSDP_API fsdp_status fsdp_set_all_reduce_hook(fsdp_unit *unit, fsdp_all_reduce_hook hook,
                                              void *user) {
    fsdp_status status = fsdpi_set_hook(unit, "set_all_reduce_hook");
    if (status) return status;
    unit->all_reduce_hook = hook;
    unit->all_reduce_user = user;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_set_post_accumulate_hook(fsdp_unit *unit, int index, fsdp_grad_hook hook,
                                                   void *user) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_SET);
    if (!status) status = fsdpi_set_hook(unit, "set_post_accumulate_hook");
    if (status) return status;
    unit->model->grad_hooks |= hook != NULL;
    unit->params[index].grad_hook = hook;
    unit->params[index].grad_hook_user = user;
    return FSDP_OK;
}

static fsdp_status fsdpi_set_custom(fsdp_unit *u, const char *what, int which,
                                    fsdp_custom_comm hook, void *user) {
    fsdp_status status = fsdpi_set_hook(u, what);
    if (status) return status;
    u->custom[which] = hook;
    u->custom_user[which] = user;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_set_custom_all_gather(fsdp_unit *unit, fsdp_custom_comm hook,
                                                void *user) {
    return fsdpi_set_custom(unit, "set_custom_all_gather", 0, hook, user);
}
FSDP_API fsdp_status fsdp_set_custom_reduce_scatter(fsdp_unit *unit, fsdp_custom_comm hook,
                                                    void *user) {
    return fsdpi_set_custom(unit, "set_custom_reduce_scatter", 1, hook, user);
}

static const void *fsdpi_cast_activation(void *dst, fsdp_dtype to, const void *src,
                                         fsdp_dtype *dtype, int64_t count) {
    const void *out = fsdp_cast_floating(dst, to, src, *dtype, count);
    if (to && fsdp_dtype_is_float(*dtype)) *dtype = to;
    return out;
}

FSDP_API const void *fsdp_cast_forward_input(const fsdp_unit *unit, void *dst, const void *src,
                                             fsdp_dtype *dtype, int64_t count) {
    return fsdpi_cast_activation(dst, unit->keep_inputs ? FSDP_DTYPE_KEEP : unit->policy_dtype, src,
                                 dtype, count);
}

FSDP_API const void *fsdp_cast_forward_output(const fsdp_unit *unit, void *dst, const void *src,
                                              fsdp_dtype *dtype, int64_t count) {
    return fsdpi_cast_activation(dst, unit->output_dtype, src, dtype, count);
}

/* ==== core/model.h ==========================================================================
   a model begins and ends */

static void fsdpi_model_close(fsdp_model *m) {
    fsdp_world *w = m->world;
    while (m->owned) {
        fsdpi_owned *entry = m->owned;
        m->owned = entry->next;
        entry->destroy(entry->object);
        fsdpi_model_free(m, entry);
    }
    fsdpi_model_free_buffers(m);
    fsdpi_model_free(m, m->norm_blocks);
    for (int i = 0; i < m->num_units; i++) {
        fsdpi_flags_free(m->units[i]);
        fsdpi_unit_free(m->units[i]);
    }
    fsdpi_model_free(m, m->units);
    if (m->own_mesh) fsdpi_mesh_free(m->own_mesh);
    fsdpi_free(&w->boot.allocator, m);
}

static fsdp_status fsdpi_model_check(fsdp_world *w, fsdp_model_desc *d) {
    fsdp_status status = fsdpi_dtypes_check(w, "model_create", "", d->param_dtype, d->reduce_dtype,
                                            d->output_dtype);
    if (!status && d->grad_dtype && !fsdp_dtype_is_float(d->grad_dtype))
        status = fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                            "model_create: grad_dtype is %d, expected a floating dtype or KEEP",
                            d->grad_dtype);
    if (status) return status;
    if (d->reshard_after_forward < FSDP_RESHARD_NEVER ||
        d->implicit_prefetch < FSDP_PREFETCH_NEVER || d->implicit_prefetch > FSDP_PREFETCH_ALWAYS)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "model_create: reshard_after_forward is %d, implicit_prefetch %d: "
                          "expected FSDP_RESHARD_* or n >= 2, and FSDP_PREFETCH_*",
                          d->reshard_after_forward, d->implicit_prefetch);
    if (d->direct_min < 0 || d->fill_bytes < 0 || d->prefetch_bytes < 0)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "model_create: direct_min %lld, fill_bytes %lld, prefetch_bytes %lld: "
                          "expected sizes",
                          (long long)d->direct_min, (long long)d->fill_bytes,
                          (long long)d->prefetch_bytes);
    if (d->reshard_after_forward == FSDP_RESHARD_DEFAULT)
        d->reshard_after_forward = FSDP_RESHARD_ALWAYS;
    if (d->direct_min == 0) d->direct_min = 65536;
    if (d->fill_bytes == 0) d->fill_bytes = 16 << 20;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_model_create(fsdp_world *world, const fsdp_model_desc *desc,
                                       fsdp_model **model) {
    fsdp_model_desc d;
    if (!world || !model) return fsdpi_null(world, "model_create");
    *model = NULL;
    fsdp_status status = fsdpi_failed(world);
    if (!status) status = fsdpi_desc_read(world, &d, desc, sizeof d, "fsdp_model_desc");
    if (!status) status = fsdpi_model_check(world, &d);
    if (status) return status;
    fsdp_model *m = (fsdp_model *)fsdpi_alloc(&world->boot.allocator, sizeof *m);
    if (!m) return fsdpi_fail(world, FSDP_ERR_OUT_OF_MEMORY, "model_create: no memory");
    m->world = world;
    m->desc = d;
    m->grad_enabled = m->is_last_backward = 1;
    m->host_bytes = (int64_t)sizeof *m;
    if (!d.mesh && !d.mesh_info) {
        fsdp_mesh_desc whole = FSDP_ZERO;
        whole.ndim = 1;
        whole.shape[0] = world->size;
        status = fsdpi_mesh_make(world, &whole, &m->own_mesh);
        if (!status) status = fsdpi_mesh_groups(m->own_mesh, 0);
        m->desc.mesh = m->own_mesh;
    }
    if (!status)
        status = fsdpi_resolve_mesh(world, m->desc.mesh, m->desc.mesh_info, NULL, &m->info);
    if (status) {
        fsdpi_model_close(m);
        return status;
    }
    m->desc.mesh_info = NULL; // the caller's
    if (m->info.shard_mesh_dim >= 0)
        m->shard_reduce_comm = m->info.mesh->reduce_comm[m->info.shard_mesh_dim];
    m->next = world->models;
    world->models = m;
    *model = m;
    return FSDP_OK;
}

FSDP_API void fsdp_model_destroy(fsdp_model *model) {
    if (!model) return;
    fsdp_world *w = model->world;
    fsdpi_drain(w);
    for (fsdp_model **at = &w->models; *at; at = &(*at)->next) {
        if (*at != model) continue;
        *at = model->next;
        break;
    }
    fsdpi_model_close(model);
}

FSDP_API fsdp_status fsdp_set_driver(fsdp_model *model, const fsdp_driver *driver) {
    static const fsdp_driver none = {NULL, NULL, NULL};
    if (!model) return fsdpi_null(NULL, "set_driver");
    fsdp_status status = fsdpi_failed(model->world);
    if (!status) status = fsdpi_remember(model, fsdpi_check_units(model, FSDP_CALL_PARAMS_CHANGED));
    if (!status) model->driver = driver ? *driver : none;
    return status;
}

/* ==== core/init.h ===========================================================================
   a world begins and ends; collectives on host data */

static void fsdpi_world_messages(fsdp_world *w, const fsdp_world_desc *d) {
    w->rank = d->world_size > 0 ? d->rank : -1; // -1: not known yet
    w->log_level = d->log_level == FSDP_LOG_NONE ? 0 : d->log_level ? d->log_level : FSDP_LOG_WARN;
    w->boot.logger = d->logger;
    w->boot.log_level = w->log_level;
    if (!d->logger.log) w->boot.logger.log = fsdpi_stderr_log;
}

static fsdp_status fsdpi_world_make(fsdp_world *early, fsdp_world_desc *d, fsdp_world **out) {
    fsdp_status status = fsdpi_world_resolve(early, d);
    if (!status) status = fsdpi_job_name(early, d, early->job, sizeof early->job);
    if (!status) status = fsdpi_store_name(early, d, early->store, sizeof early->store);
    if (status) return status;
    fsdp_world *w = (fsdp_world *)fsdpi_alloc(&d->allocator, sizeof *w);
    if (!w) return fsdpi_fail(early, FSDP_ERR_OUT_OF_MEMORY, "fsdp_init: no memory");
    memcpy(w->job, early->job, sizeof w->job);
    memcpy(w->store, early->store, sizeof w->store);
    fsdpi_world_messages(w, d);
    w->boot.rank = w->rank;
    w->size = w->boot.size = d->world_size;
    w->boot.local_rank = d->local_rank;
    w->boot.timeout_ns = (int64_t)d->timeout_ms * 1000000;
    w->boot.stuck = &w->stuck;
    w->boot.threads = d->threads;
    w->boot.allocator = d->allocator;
    w->boot.clock = d->clock;
    w->boot.user = d->user;
    w->boot.job = w->job;
    w->boot.store = w->store;
    status = fsdpi_world_choose(w, d);
    if (!status) status = fsdpi_world_open_comm(w);
    if (!status) status = fsdpi_world_open_device(w);
    if (!status) status = fsdpi_world_open_streams(w, d->lanes);
    if (status && w->comm) status = fsdpi_fail_together(w, status); // the others are in it, too
    if (status) {
        fsdpi_set_error(early, fsdp_last_error(w));
        fsdpi_world_close(w);
        return status;
    }
    *out = w;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_init(const fsdp_world_desc *desc, fsdp_world **world) {
    fsdp_world_desc d;
    fsdp_world early; // speaks for the world until there is one
    if (!world) return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "fsdp_init: world is NULL");
    *world = NULL;
    fsdp_status status = fsdpi_desc_read(NULL, &d, desc, sizeof d, "fsdp_world_desc");
    if (status) return status;
    memset(&early, 0, sizeof early);
    fsdpi_world_messages(&early, &d);
    status = fsdpi_world_make(&early, &d, world);
    if (status) fsdpi_set_error(NULL, early.error);
    return status;
}

FSDP_API fsdp_status fsdp_shutdown(fsdp_world *world) {
    if (!world) return FSDP_OK;
    fsdpi_drain(world);
    while (world->models) {
        fsdp_model *m = world->models;
        world->models = m->next;
        fsdpi_model_close(m);
    }
    while (world->meshes) {
        fsdp_mesh *mesh = world->meshes;
        world->meshes = mesh->next;
        fsdpi_mesh_free(mesh);
    }
    fsdp_status failed = fsdpi_failed(world);
    fsdpi_world_close(world);
    return failed;
}

FSDP_API void fsdp_abort(fsdp_world *world, const char *why) {
    char text[FSDPI_TEXT];
    if (!world) return;
    snprintf(text, sizeof text, "rank %d aborted the world: %s", world->rank,
             why ? why : "no reason given");
    (void)fsdpi_world_fail(world, FSDP_ERR_ABORTED, text);
}

FSDP_API fsdp_status fsdp_set_stream(fsdp_world *world, void *native) {
    if (!world) return fsdpi_null(NULL, "set_stream");
    fsdp_status status = fsdpi_failed(world);
    if (status) return status;
    if (world->mode != FSDPI_NATIVE)
        return fsdpi_fail(world, FSDP_ERR_UNSUPPORTED, "set_stream: device %s has no streams",
                          world->device_ops->name);
    void **compute = &world->streams[FSDP_STREAM_COMPUTE];
    if (!native) native = world->own_stream;
    status = world->device_ops->record(world->device, *compute, world->fence);
    if (!status) status = world->device_ops->wait(world->device, native, world->fence);
    if (status) return fsdpi_device_fail(world, status, "ordering streams of");
    *compute = native;
    return FSDP_OK;
}

FSDP_API int fsdp_rank(const fsdp_world *world) { return world ? world->rank : -1; }
FSDP_API int fsdp_world_size(const fsdp_world *world) { return world ? world->size : -1; }
FSDP_API int fsdp_local_rank(const fsdp_world *world) {
    return world ? world->boot.local_rank : -1;
}
FSDP_API const char *fsdp_last_error(const fsdp_world *world) {
    if (!world) return fsdpi_thread_error;
    return fsdpi_failed(world) ? world->failure : world->error;
}

static fsdp_op fsdpi_host_op(int kind, const char *what, fsdp_dtype dtype) {
    fsdp_op op;
    memset(&op, 0, sizeof op);
    op.kind = (uint8_t)kind;
    op.what = what;
    op.dtype = (uint8_t)dtype;
    op.in_place = 1;
    return op;
}

// Checks that collectives on host data share. *comm: NULL when there is nothing to do.
static fsdp_status fsdpi_host_call(fsdp_world *w, const fsdp_mesh *mesh, const void *data,
                                   int64_t count, const char *what, fsdp_comm **comm) {
    *comm = NULL;
    if (!w) return fsdpi_null(NULL, what);
    fsdp_status status = fsdpi_failed(w);
    if (status) return status;
    if (count < 0 || (count > 0 && !data))
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "%s: count is %lld and data is %s", what,
                          (long long)count, data ? "given" : "NULL");
    if (mesh && (mesh->ndim != 1 || mesh->coord[0] < 0))
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "%s: expected a 1-D mesh that this rank is in",
                          what);
    *comm = mesh ? mesh->gather_comm[0] : w->comm;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_all_reduce(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                     int64_t count, fsdp_dtype dtype, fsdp_redop op) {
    fsdp_comm *comm;
    fsdp_status status = fsdpi_host_call(world, mesh, data, count, "all_reduce", &comm);
    if (status) return status;
    if (!(fsdp_dtype_is_float(dtype) || dtype == FSDP_I32 || dtype == FSDP_I64) || op < FSDP_SUM ||
        op > FSDP_MIN)
        return fsdpi_fail(world, FSDP_ERR_INVALID_ARG,
                          "all_reduce: dtype %s and operation %d: expected f32 f64 f16 bf16 i32 or "
                          "i64, and SUM MAX or MIN",
                          fsdp_dtype_name(dtype), op);
    if (!comm) return FSDP_OK;
    fsdp_op record = fsdpi_host_op(FSDP_OP_ALL_REDUCE, "fsdp_all_reduce", dtype);
    record.redop = (uint8_t)op;
    return fsdpi_host_collective(world, comm, &record, (char *)data, count);
}

FSDP_API fsdp_status fsdp_broadcast(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                    int64_t nbytes, int root) {
    fsdp_comm *comm;
    fsdp_status status = fsdpi_host_call(world, mesh, data, nbytes, "broadcast", &comm);
    if (status) return status;
    int size = mesh ? mesh->shape[0] : world->size;
    if (root < 0 || root >= size)
        return fsdpi_fail(world, FSDP_ERR_INVALID_ARG, "broadcast: root is %d, expected 0..%d",
                          root, size - 1);
    if (!comm) return FSDP_OK;
    fsdp_op record = fsdpi_host_op(FSDP_OP_BROADCAST, "fsdp_broadcast", FSDP_U8);
    record.root = root;
    return fsdpi_host_collective(world, comm, &record, (char *)data, nbytes);
}

FSDP_API fsdp_status fsdp_barrier(fsdp_world *world) {
    fsdp_comm *comm;
    int32_t one = 1;
    fsdp_status status = fsdpi_host_call(world, NULL, &one, 1, "barrier", &comm);
    if (status || !comm) return status;
    fsdp_op record = fsdpi_host_op(FSDP_OP_ALL_REDUCE, "fsdp_barrier", FSDP_I32);
    return fsdpi_host_collective(world, comm, &record, (char *)&one, 1);
}

/* ==== fsdp.h, continued ===================================================================== */

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION

/*
MIT License

Copyright (c) 2026 the fsdp.h authors

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
*/
