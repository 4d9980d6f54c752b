// Written by tools/amalgamate.py from fsdp.h, core/, backends/: change those files.
/* fsdp.h - FSDP2 (ZeRO-3, per-parameter sharding) for C, C++ and CUDA trainers            v0.1.0

   W ranks shard a model: each rank keeps 1/W of every parameter, of its gradient and of the
   optimizer's state. The library gathers a layer just before you use it and frees it right after.
   It averages the gradients of all ranks and gives each rank the part that it owns. It behaves as
   PyTorch's fully_shard.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp.h"
       cc -O2 trainer.c -pthread -lm && tools/fsdprun -n 4 ./a.out     // make tools/fsdprun

   SPDX-License-Identifier: MIT (full text at the end of this file)

CONTENTS
    This file is the manual, the declarations and the implementation, in parts of one subject each.
    A part begins with a line of signs around its name: search for "== core/dtype.h ==". All that a
    program calls is declared in the first part "fsdp.h, continued", behind core/shard_math.h.
    core/dtype.h           status codes, element types, conversions, the loops that reduce
    core/shard_math.h      which rows a rank owns; where everything lies in a slot
    core/extension.h       extensions: the functions that they give, and those that they may call
    core/backend.h         the two tables of functions that make a backend and a device
    core/sys.h             the operating system's calls, a lock, a hash, a text
    core/route.h           how a unit gathers and reduces: a pure function from facts to a route
    core/objects.h         the structs of a world, a mesh, a model and a unit
    core/error.h           error texts, and the way out for every message
    core/alloc.h           host memory
    core/env.h             the one reader of environment variables
    core/launch.h          rank, size and job from a launcher's environment
    core/attach.h          the order in which the library calls extensions
    backends/fsdp_shm.h    the default backend of fsdp.h
    backends/fsdp_comm.h   the comm base
    backends/fsdp_memory.h the list of a world's allocations, and how much memory is left
    backends/fsdp_record.h the record of what a rank is about to do, and the words in which it is
                           told
    core/spawn.h           ranks that a program starts itself
    core/comm.h            makes a collective of an op record
    core/host.h            the host as a device
    core/timeline.h        measures when records ran on a device
    core/lanes.h           how records run: at once, in worker threads, on a device's streams
    core/mesh.h            ranks arranged in N dims, and their groups
    core/world.h           rank, size, environment, opened tables
    core/layout.h          where a unit's parameters and gradients lie in its slots
    core/pool.h            buffers and slots
    core/unit.h            makes a unit of the desc of fully_shard
    core/ops.h             op records; fsdpi_emit, the only door to the tables
    core/templates.h       the records that hooks emit, prepared once
    core/gather.h          parameters: gathered, waited for, freed, prefetched
    core/usage.h           which ranks used which parameter
    core/grads.h           gradients: written, collected, reduced
    core/commit.h          the flat blocks of a model, and the lists of its units
    core/schedule.h        the transition table, and the calls that look it up
    core/step.h            the end of a step
    core/norm.h            the norm of all gradients, and clipping
    core/params.h          parameters as the caller sees them
    core/predict.h         memory: what is allocated now, and a prediction
    core/options.h         setters
    core/model.h           a model begins and ends
    core/means.h           what extensions may do: records, buffers, copies, states
    core/snapshot.h        saves what a step changes, and restores it
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
    world      all ranks of the job         mesh   an arrangement of ranks in N dims
    unit       the result of one fully_shard call: parameters that the library gathers together and
               reduces together (PyTorch: FSDPParamGroup)
    shard      this rank's part of a parameter       unsharded  the whole of a parameter
    slot       a buffer of a pool. A unit holds one while it is gathered, and one in backward
    part       the parameters of a unit that share a stored dtype and a gathered dtype
    comm       one process group of a backend        op         one thing done, as a record
    lane       a worker thread that runs collectives beside your thread
    stream     an order in which ops run: a lane's, or that of a device's stream
    inline     without lanes and streams: an op is done when the call returns

STEP BY STEP
    1  Call fsdp_init, fsdp_model_create, fsdp_fully_shard for each layer, and fsdp_init_params or
       fsdp_param_load.
    2  Forward of a layer: call fsdp_pre_forward, read fsdp_data, call fsdp_post_forward. If a unit
       stays open while others run (embeddings, final norm, tied head), set its
       reshard_after_forward to FSDP_RESHARD_NEVER. You may close open units in any order, and open
       a unit several times in one forward.
    3  Backward of a layer: call fsdp_pre_backward, read fsdp_data, add to fsdp_grad, call
       fsdp_post_backward. Units may come in any order. At the end call fsdp_finalize_backward.
    4  Call fsdp_clip_grad_norm if you clip. Run the optimizer: fsdp_optim.h, or your own loop over
       fsdp_model_flat or fsdp_next_param. After your own loop call fsdp_params_changed. Then call
       fsdp_zero_grad.
    Microbatches: call fsdp_set_requires_gradient_sync(model, NULL, 0) before the first one and
    fsdp_set_requires_gradient_sync(model, NULL, 1) before the last one.
    Evaluation: call fsdp_set_grad_enabled(model, 0), run forwards, fsdp_set_grad_enabled(model, 1).
    Recompute: between a unit's pre_backward and post_backward call its pre_forward and
    post_forward again (PyTorch: activation checkpointing).
    HSDP: give a 2-D mesh with named dims: dim 0 replicates, dim 1 shards. Else give a mesh_info.
    Freeze and thaw: fsdp_set_requires_grad. Gradients in f16: fsdp_grad_scaler of fsdp_optim.h.
    Step plans: fsdp_plan_create of fsdp_plan.h. The library records a step and replays it with
    fewer collectives and the same bits (docs/plan.md).

IT DOES NOT
    differentiate, run kernels, or own your activations. It does not search for a root module as
    PyTorch does: the model is the root.

ENVIRONMENT
    RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT  tools/fsdprun and torchrun set them. If they
                      are not set, the library reads those of mpirun (OMPI_*, PMI_*, MV2_*), srun
                      (SLURM_*) or flux (FLUX_*)
    FSDP_JOB_ID       name of the job, unique on the host. Default: from the launcher's variables
    FSDP_STORE FSDP_TOKEN FSDP_SOCKET_IFNAME FSDP_GLOO_NEAR   jobs on several hosts: docs/cluster.md
    FSDP_TIMEOUT_MS   deadline of every wait in milliseconds, default 60000; on GPUs 600000
    FSDP_LANES        0: inline. 1 or 2: so many worker threads run collectives. Default: over Gloo
                      1 or 2 if ranks are on several hosts, else 0; fsdp_model_describe says which
    FSDP_BACKEND      name of a compiled-in backend    FSDP_LOG_LEVEL  error, warn, info or none
    FSDP_NCCL_* FSDP_CUDA_MANAGED FSDP_FLIGHT_RECORD   GPUs: docs/gpu.md

ERRORS
    Functions return fsdp_status. The text of an error names the rank, the unit, the operation, the
    expected value and the actual one. Each rank logs it once and keeps it for fsdp_last_error.
    If an argument is wrong or a call comes in a wrong order, nothing changes. If a collective
    fails, the library aborts the world on all ranks. From then on every call returns that status
    at once, and you can only call fsdp_last_error and fsdp_shutdown. The library never calls exit
    or abort. (Gloo ends the process if the program closes one of Gloo's descriptors.)
    No call waits longer than the deadline. On devices with streams a call may wait 3
    seconds more, so that the backend, which can name the missing rank, reports first.

MEMORY
    The library allocates shards, their gradients, and slots. A rule that no timing influences
    gives the number of slots, so memory is the same on every rank and in every run.
    fsdp_model_predict tells it to the byte before anything is allocated. From the third step on a
    step allocates nothing. Inline there is one slot for each size of unit. With lanes or streams
    there are two, if two can be in use at a time. If units stay open around others, there are more.

THREADS AND ORDER
    One thread at a time uses a world and all that is made from it. Worlds are independent. The
    library may call the logger from worker threads. All ranks of the mesh call a collective
    function, in the same order. If ranks disagree, all of them get FSDP_ERR_MISMATCH with both
    sides in the text; if they wait in different groups, as with two lanes or HSDP, they may get
    FSDP_ERR_TIMEOUT. A process that a rank forks is no rank: there each call of its world returns
    FSDP_ERR_INVALID_STATE, and fsdp_shutdown and the functions that destroy do nothing.

DETERMINISM
    CPU backends sum in rank order, in f32 (f64 in f64), then scale, then add to what is there. The
    bits are the same for every run, number of lanes, layout, threads or processes, and for all
    compiler flags (-Ofast included). NCCL sums in an order of its own.

STREAMS AND GPUS
    -DFSDP_BACKEND_NCCL builds the same program for GPUs: docs/gpu.md. A call returns when its work
    is enqueued. Data is ready in the order of your stream (fsdp_set_stream). fsdp_data, fsdp_grad,
    views and fsdp_model_flat give device memory. fsdp_init_params, fsdp_param_load and
    fsdp_param_full use host memory on every device.

LIMITS OF THIS VERSION
    Linux 4.14 or newer; gcc or clang. Backend shm serves one host. NCCL and CUDA have not run on a
    GPU yet: the tests use stand-ins for both libraries (docs/gpu.md).

THE COMMENTS OF FUNCTIONS
    Result      INVALID_ARG stands for FSDP_ERR_INVALID_ARG, and so on. Collective errors are
                TIMEOUT, PEER_LOST, MISMATCH, ABORTED and BACKEND. Errors of commit are those of
                fsdp_model_commit. If the world is aborted, every call returns its status.
    Collective  yes: the call communicates, or later collectives depend on it. "No, but every rank
                has to do the same": it does not communicate. If a rank leaves it out, later
                collectives may disagree.
    Source      the function of PyTorch that this one follows. Without this line PyTorch has none.
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
    int64_t align;           // in: direct and copied-out tensors start at multiples of it; 0: 1
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
static int64_t fsdpi_layout_align(const fsdp_layout *l) { return l->align > 0 ? l->align : 1; }
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
    // A direct shard keeps its successors aligned. One rank's is the tensor itself, with padding.
    int64_t align = fsdpi_layout_align(layout);
    if (layout->world == 1) p->shard_numel = fsdpi_align_up(p->shard_numel, align);
    p->direct = layout->world == 1 || (p->shard_dim == 0 && p->numel >= layout->direct_numel &&
                                       p->shard_numel > 0 && p->shard_numel % align == 0);
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

// Blocks between a packed parameter's staging rows (row k at stage + k*pitch) and its full tensor.
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
        int64_t to = p->full_offset + range.start * inner, step = p->shape[p->shard_dim] * inner;
        fsdp_block b = {stage + k * pitch, to, width, outer, width, step};
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
    int64_t align = fsdpi_layout_align(layout), direct, packed; // elements of one rank's shards
    int num_segs = 0, num_blocks = 0;
    fsdp_status status = fsdpi_layout_shards(layout, params, count, &direct, &packed);
    if (status) return status;
    fsdp_layout_param *only = fsdpi_layout_pack_of_one(params, count);
    layout->shard_numel = direct + packed;
    layout->packed_numel = only ? 0 : packed;
    int64_t gathered = layout->full_base + layout->world * layout->shard_numel;
    int64_t stage = layout->full_base + layout->world * direct;
    int64_t final_base = layout->final_base ? layout->final_base : fsdpi_align_up(gathered, align);
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
        final = fsdpi_align_up(final + layout->world * p->shard_numel, align);
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
typedef struct fsdp_device fsdp_device;   // an opened device
typedef struct fsdp_threads fsdp_threads; // state that ranks share if they are threads
typedef struct fsdp_comm_ops fsdp_comm_ops;
typedef struct fsdp_coll fsdp_coll;       // one collective, as data
typedef struct fsdp_device_ops fsdp_device_ops;

// Host memory. Give both functions or none. align is a power of two. free gets the size of alloc.
typedef struct fsdp_allocator {
    void *(*alloc)(size_t size, size_t align, void *user);
    void (*free)(void *ptr, size_t size, void *user);
    void *user;
} fsdp_allocator;

enum { FSDP_LOG_DEFAULT = 0, FSDP_LOG_ERROR, FSDP_LOG_WARN, FSDP_LOG_INFO, FSDP_LOG_NONE };

// The library gives one line of text without prefix and line break, also from worker threads.
typedef struct fsdp_logger {
    void (*log)(int level, fsdp_status code, int rank, const char *text, void *user);
    void *user;
} fsdp_logger;

// Monotonic time in nanoseconds, for deadlines and timestamps. A test may give a virtual clock.
typedef struct fsdp_clock {
    int64_t (*now_ns)(void *user);
    void *user;
} fsdp_clock;

// Every desc here: all zero is valid; others may have a function for defaults, as fsdp_adamw_desc.
// size 0 means sizeof of this header's struct. Canaries stay 0.
typedef struct fsdp_world_desc {
    uint32_t size, start_canary;
    int32_t rank, world_size; // world_size 0: from the environment; if none is set, a world of 1
    int32_t local_rank;       // rank on this host; ignored if world_size is 0
    int32_t timeout_ms;       // deadline of every wait. 0: FSDP_TIMEOUT_MS, else its default
    int32_t lanes;            // 1 or 2: so many worker threads run collectives. -1: inline.
                              // 0: FSDP_LANES, else as docs/cluster.md says: lanes over Gloo if
                              // ranks are on several hosts, else inline
    int32_t log_level;        // 0: FSDP_LOG_LEVEL (error warn info none), else FSDP_LOG_WARN
    const char *backend;      // NULL: FSDP_BACKEND, else the first compiled-in one but "fake"
    const char *job;          // equal on all ranks, unique on the host. NULL: from the environment
    const char *store;        // where ranks of several hosts meet: "tcp://HOST:PORT", or
                              // "file:///PATH"; "host:": one host. NULL: FSDP_STORE, launcher's
    fsdp_threads *threads;    // NULL: ranks are processes
    fsdp_allocator allocator; // NULL members: malloc, free
    fsdp_logger logger;       // NULL member: stderr as "[fsdp r3] text"
    fsdp_clock clock;         // NULL member: the monotonic clock
    const fsdp_comm_ops *comm_ops;     // NULL: those of the backend
    const fsdp_device_ops *device_ops; // NULL: the host
    void *user;                        // argument of comm_ops->open and device_ops->open
    uint64_t end_canary;
} fsdp_world_desc;

/* fsdp_init - join the job
   desc        NULL or all zero: the library takes rank, size and the job's name from the
               environment of torchrun, tools/fsdprun, mpirun, srun or flux. If nothing is set, the
               world has 1 rank
   world       you own it: end it with fsdp_shutdown. NULL after a failure
   Result      FSDP_OK; INVALID_ARG (the text names the field or the variable), UNSUPPORTED (the
               backend is not compiled in), OUT_OF_MEMORY, TIMEOUT (the text names a rank that did
               not come), BACKEND. fsdp_last_error(NULL) gives the text; it is logged, too
   Collective  yes: every rank      Blocks until all ranks have come, at most timeout_ms
   Allocates   yes      Thread any; one thread at a time uses a world
   Source      torch: torch.distributed.init_process_group */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_init(const fsdp_world_desc *desc, fsdp_world **world);

/* fsdp_shutdown - end the world and all meshes, models and optimizers made from it
   world       NULL is allowed
   Result      FSDP_OK, or the failure that aborted the world. main can return it. In a process
               that a rank has forked: INVALID_STATE, and nothing is ended
   Collective  no. A peer that still waits for this rank gets FSDP_ERR_PEER_LOST
   Blocks      until worker threads have finished their current operation and the device its work,
               at most timeout_ms. If the device does not finish, the library leaves its memory to
               the end of the process      Allocates no
   Source      torch: torch.distributed.destroy_process_group */
FSDP_API fsdp_status fsdp_shutdown(fsdp_world *world);

/* fsdp_set_stream - say which stream your own work uses, on a device that has streams. Gathered
   data is ready in its order. The library uses what you wrote after the work before it
   native      a stream of the device (CUDA: cudaStream_t). It must live until you set another one
               or the world ends. NULL: the device's default (CUDA: cudaStreamLegacy, which orders
               kernels that you launch without a stream)
   Result      FSDP_OK; INVALID_ARG, UNSUPPORTED (the device has no streams), BACKEND
   Collective  no      Blocks no: the new stream waits for the old one      Allocates no
   Source      torch: torch.cuda.stream, the current stream at each hook */
FSDP_API fsdp_status fsdp_set_stream(fsdp_world *world, void *native);

/* fsdp_abort - abort this world on all ranks: every wait ends with FSDP_ERR_ABORTED
   why         part of the error text on all ranks; NULL: "no reason given"
   Collective  no      Blocks no      Allocates no      Thread any, also while another one uses it
   Source      torch: ProcessGroup.abort */
FSDP_API void fsdp_abort(fsdp_world *world, const char *why);

typedef int (*fsdp_rank_fn)(fsdp_world *world, void *arg); // returns 0 for success

typedef struct fsdp_spawn_desc {
    uint32_t size, start_canary;
    int32_t num_ranks;            // 1 .. 256
    int32_t threads;              // 1: ranks are threads of this process; 0: forked processes
    int32_t grace_ms;             // if one rank fails, the others get so long to end. 0: 1000
    const fsdp_world_desc *world; // NULL: defaults. fsdp_spawn sets rank, world_size, job, threads
    uint64_t end_canary;
} fsdp_spawn_desc;

/* fsdp_spawn - start num_ranks ranks without a launcher and wait until all have ended
   fn          each rank calls it once with its world; fsdp_spawn shuts the world down afterwards
   arg         handed to fn
   Result      FSDP_OK if every rank returned 0. Else the status of the first rank that failed: the
               value of fn if it is a status, PEER_LOST if a signal or fn ended the rank, INTERNAL
               for other values. fsdp_last_error(NULL) names the rank. fsdp_spawn then ends the
               others: it aborts their worlds, terminates processes, and kills them after grace_ms
   Collective  no: call it outside any world      Blocks until all ranks have ended
   Allocates   yes      Thread any. It forks processes: call it before you start threads
   Source      torch: torch.multiprocessing.spawn */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_spawn(const fsdp_spawn_desc *desc, fsdp_rank_fn fn,
                                                void *arg);

/* fsdp_rank, fsdp_world_size, fsdp_local_rank - this rank, the number of ranks, the rank on this
   host; -1 for NULL      Source torch: torch.distributed.get_rank, get_world_size
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API int fsdp_rank(const fsdp_world *world);
FSDP_API int fsdp_world_size(const fsdp_world *world);
FSDP_API int fsdp_local_rank(const fsdp_world *world);

/* fsdp_last_error - text of the last failure of this world
   world       NULL: this thread's last failure without a world (fsdp_init, fsdp_spawn)
   Result      never NULL; "" if nothing failed. The text is valid until the next call on that world
               that fails. After an abort it stays the text of the failure that aborted the world
   Collective  no      Blocks no      Allocates no */
FSDP_API const char *fsdp_last_error(const fsdp_world *world);

/* fsdp_all_reduce - reduce a small host array over all ranks (loss, counters). Every rank gets the
   same bits: the library sums in rank order, f64 in f64 and other floating dtypes in f32
   mesh        NULL: the whole world. A mesh of several dims is reduced dim by dim, from dim 0 on;
               f16 and bf16 are rounded after each dim
   data        host memory, count elements; the result replaces them
   dtype       F32, F64, F16, BF16, I32 or I64
   op          FSDP_SUM, FSDP_MAX or FSDP_MIN
   Result      FSDP_OK; INVALID_ARG; collective errors
   Collective  yes: every rank of the mesh, same order      Blocks yes, at most timeout_ms
   Allocates   no      Source torch: torch.distributed.all_reduce */
FSDP_API fsdp_status fsdp_all_reduce(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                     int64_t count, fsdp_dtype dtype, fsdp_redop op);

/* fsdp_broadcast - copy nbytes of host memory from one rank of the mesh to all others
   root        position of that rank in the mesh, row-major: 0 .. number of ranks - 1
   Result, Collective, Blocks, Allocates  as fsdp_all_reduce
   Source      torch: torch.distributed.broadcast */
FSDP_API fsdp_status fsdp_broadcast(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                    int64_t nbytes, int root);

/* fsdp_barrier - return when every rank of the world has called it
   Result, Collective, Blocks, Allocates  as fsdp_all_reduce
   Source      torch: torch.distributed.barrier */
FSDP_API fsdp_status fsdp_barrier(fsdp_world *world);

/* -------------------------------------------------------------------------------------------- */
/* Mesh: ranks arranged in N dimensions, one process group per dimension.                         */

typedef struct fsdp_mesh_desc {
    uint32_t size, start_canary;
    int32_t ndim;                     // 1..FSDP_MAX_DIMS
    int32_t shape[FSDP_MAX_DIMS];     // sizes >= 1; their product is at most the world's size
    const char *names[FSDP_MAX_DIMS]; // NULL: unnamed
    const int32_t *ranks;             // NULL: 0, 1, 2, ... row-major; else the rank of each place
    uint64_t end_canary;
} fsdp_mesh_desc;

/* fsdp_mesh_create - arrange ranks in dims; creates the process groups of dim 0, dim 1, ...
   mesh        the world owns it. A rank outside the mesh gets one, too: there fsdp_mesh_rank is -1
   Result      FSDP_OK; INVALID_ARG (ndim, shape, a rank twice or out of range), OUT_OF_MEMORY,
               collective errors
   Collective  yes: every rank of the world, same desc, same order
   Blocks      yes, at most timeout_ms      Allocates yes      Source torch: init_device_mesh */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_mesh_create(fsdp_world *world, const fsdp_mesh_desc *desc,
                                                      fsdp_mesh **mesh);

/* fsdp_mesh_1d - all ranks in one dim; it does not communicate
   name        of the dim, copied; NULL: unnamed
   Result, Allocates  as fsdp_mesh_create      Collective no      Blocks no
   Source      torch: init_device_mesh with one dim */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_mesh_1d(fsdp_world *world, const char *name,
                                                  fsdp_mesh **mesh);

/* fsdp_mesh_ndim - number of dims
   fsdp_mesh_size - number of ranks along a dim; dim -1: in the whole mesh
   fsdp_mesh_rank - this rank's position along a dim; -1: it is outside the mesh, or no such dim
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: DeviceMesh.ndim, .size, .get_local_rank */
FSDP_API int fsdp_mesh_ndim(const fsdp_mesh *mesh);
FSDP_API int fsdp_mesh_size(const fsdp_mesh *mesh, int dim);
FSDP_API int fsdp_mesh_rank(const fsdp_mesh *mesh, int dim);

/* fsdp_mesh_dim   - index of the dim with this name; -1: there is none
   fsdp_mesh_ranks - world ranks of this rank's group along a dim, in order of position. dim -1: of
   the whole mesh, row-major
   fsdp_mesh_equal - 1 if two meshes have the same ranks, shape and names of dims, or are both NULL
   out         room for fsdp_mesh_size(mesh, dim) ranks, or NULL
   Result      ranks: their number; -1 if this rank is outside the mesh or there is no such dim
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: DeviceMesh.get_all_groups, .mesh, __eq__ */
FSDP_API int fsdp_mesh_dim(const fsdp_mesh *mesh, const char *name);
FSDP_API int fsdp_mesh_ranks(const fsdp_mesh *mesh, int dim, int32_t *out);
FSDP_API int fsdp_mesh_equal(const fsdp_mesh *a, const fsdp_mesh *b);

/* fsdp_mesh_slice - the sub-mesh of some dims that contains this rank. It shares the mesh's groups
   dims        num_dims indices, increasing (fsdp_mesh_dim finds the index of a name)
   out         the world owns it
   Result      FSDP_OK; INVALID_ARG (a dim out of range or not increasing), OUT_OF_MEMORY
   Collective  no      Blocks no      Allocates yes      Source torch: DeviceMesh.__getitem__ */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_mesh_slice(const fsdp_mesh *mesh, const int32_t *dims,
                                                     int num_dims, fsdp_mesh **out);

/* fsdp_mesh_flatten   - all dims as one, row-major. A slice makes one group for each combination
   of the dims that it lacks
   fsdp_mesh_unflatten - split a dim row-major into two, of sizes outer and size/outer
   name, names copied; NULL: unnamed
   out         the world owns it
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY, collective errors
   Collective  yes: every rank of the world, same order
   Blocks      yes, at most timeout_ms      Allocates yes
   Source      torch: DeviceMesh._flatten, _unflatten */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_mesh_flatten(const fsdp_mesh *mesh, const char *name,
                                                       fsdp_mesh **out);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_mesh_unflatten(const fsdp_mesh *mesh, int dim, int outer,
                                                         const char *const names[2],
                                                         fsdp_mesh **out);

enum { FSDP_MESH_INFO_FSDP = 0, FSDP_MESH_INFO_DDP, FSDP_MESH_INFO_HSDP };

// How a unit uses a mesh. FSDP shards over one dim, DDP replicates over one dim, HSDP does both.
typedef struct fsdp_mesh_info {
    const fsdp_mesh *mesh;
    int32_t kind;
    int32_t shard_mesh_dim, replicate_mesh_dim;   // -1: none
    int32_t shard_mesh_size, shard_mesh_rank;     // 1, 0 without a shard dim
    int32_t replicate_mesh_size, replicate_mesh_rank;
    fsdp_comm *shard_comm, *replicate_comm;       // NULL: none, or a group of one rank
} fsdp_mesh_info;

/* fsdp_mesh_info_init - check the dims and fill a mesh info
   kind        FSDP_MESH_INFO_*
   shard_dim, replicate_dim  a dim of the mesh, or -1 for none
   Result      FSDP_OK; INVALID_ARG: both dims are -1 or equal, the kind needs a dim that is -1 or
               has no use for one that is given, a dim is out of range, or this rank is outside the
               mesh
   Collective  no      Blocks no      Allocates no
   Source      torch: DataParallelMeshInfo, FSDPMeshInfo, DDPMeshInfo, HSDPMeshInfo */
FSDP_API fsdp_status fsdp_mesh_info_init(const fsdp_mesh *mesh, int kind, int shard_dim,
                                         int replicate_dim, fsdp_mesh_info *out);

/* -------------------------------------------------------------------------------------------- */
/* Model, units and parameters. One fully_shard call makes one unit: the library gathers its
   parameters together and reduces them together. The model is the root of all units.             */

// Values of reshard_after_forward. An integer n >= 2 that divides the shard group keeps 1/n of the
// gathered parameters after forward; in backward the unit then gathers over n neighbouring ranks.
enum {
    FSDP_RESHARD_DEFAULT = 0, // in a unit: as the model; in a model: ALWAYS
    FSDP_RESHARD_ALWAYS = 1,  // free the gathered parameters after forward
    FSDP_RESHARD_NEVER = -1   // keep them until the unit's post_backward
};

// Values of implicit_prefetch: in pre_backward start to gather the unit whose forward came before.
enum {
    FSDP_PREFETCH_DEFAULT = 0, // if lanes or streams can hide it
    FSDP_PREFETCH_ALWAYS = 1,  // inline, too: PyTorch's sequence of events
    FSDP_PREFETCH_NEVER = -1
};

#define FSDP_DIRECT_NEVER INT64_MAX // for fsdp_model_desc.direct_min

typedef struct fsdp_model_desc {
    uint32_t size, start_canary;
    const fsdp_mesh *mesh;         // NULL: 1-D over all ranks. 1-D: FSDP; 2-D with named dims: HSDP
    const fsdp_mesh_info *mesh_info; // for other dims, or to replicate only; then mesh is ignored
    fsdp_dtype param_dtype;        // of gathered parameters and gradients; KEEP: their own
    fsdp_dtype reduce_dtype;       // of the reduction; KEEP: one that holds all of the unit's
    fsdp_dtype grad_dtype;         // of shard gradients; KEEP: the parameter's own
    fsdp_dtype output_dtype;       // of fsdp_cast_forward_output; KEEP: no cast
    int32_t keep_forward_inputs;   // 1: fsdp_cast_forward_input does not cast
    int32_t reshard_after_forward; // FSDP_RESHARD_*, or n
    int32_t grads_overwrite;       // 1: your backward stores gradients (=); 0: it adds them (+=)
    int32_t cpu_offload;           // 1: shards and their gradients are in (pinned) host memory
    int32_t implicit_prefetch;     // FSDP_PREFETCH_*
    int32_t debug;                 // 1: the library fills released buffers with NaN patterns
    int64_t prefetch_bytes;        // bytes of slots that prefetches may hold at a time; 0: no limit
    int64_t direct_min;            // bytes. A full parameter of this size or more is gathered in
                                   // place, if it is cut by rows, its padded shard in multiples of
                                   // 64 bytes (streams: 256). 0: 65536; 1: all; FSDP_DIRECT_NEVER
    int64_t fill_bytes;            // bytes of a block of init_params and of a step of param_full;
                                   // 0: 16 MiB
    uint64_t end_canary;
} fsdp_model_desc;

/* fsdp_model_create - an empty model; fsdp_fully_shard adds units
   desc        NULL: defaults
   model       the world owns it; fsdp_model_destroy or fsdp_shutdown ends it
   Result      FSDP_OK; INVALID_ARG, UNSUPPORTED, OUT_OF_MEMORY
   Collective  yes: every rank of the mesh, same order. Ranks of other meshes may make other models
   Blocks      no      Allocates yes      Source torch: fully_shard of the root module */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_model_create(fsdp_world *world,
                                                       const fsdp_model_desc *desc,
                                                       fsdp_model **model);

/* fsdp_model_destroy - free a model with its units and buffers; NULL is allowed
   Collective  yes: every rank of the mesh, same order      Blocks for operations under way
   Allocates   no */
FSDP_API void fsdp_model_destroy(fsdp_model *model);

typedef struct fsdp_param_view fsdp_param_view;

/* A gather extension gathers something else than a parameter's shard: up to four byte strings of
   each rank, for example quantised values and their scales. The library calls it in the order of
   the unit's gathers: at once, in a worker thread with lanes, or on a device with streams to
   enqueue work on `stream`. If a function fails, the world is aborted. Source: torch:
   fsdp_pre_all_gather, fsdp_post_all_gather. */
enum { FSDP_GATHER_TENSORS = 4 };
typedef struct fsdp_gather_extension {
    // Sets the bytes of each string for a stored shard of shard_numel elements, the same on all
    // ranks. Returns the number of strings, 1..FSDP_GATHER_TENSORS. The library calls it once.
    int (*sizes)(void *user, int64_t shard_numel, int64_t nbytes[FSDP_GATHER_TENSORS]);
    // Writes this rank's strings from its shard (view->shard, whose padding is zero).
    fsdp_status (*pre_all_gather)(void *user, const fsdp_param_view *view, void *const *strings,
                                  void *stream);
    // gathered[i]: string i of rank 0, of rank 1, ... Writes the parameter, contiguous, in dtype.
    fsdp_status (*post_all_gather)(void *user, const fsdp_param_view *view,
                                   const void *const *gathered, void *full, fsdp_dtype dtype,
                                   void *stream);
    void *user;
} fsdp_gather_extension;

typedef struct fsdp_param_desc {
    uint32_t size, start_canary;
    const char *name;             // NULL: "p0", "p1", ... Copied
    void *user;                   // yours: views have it
    fsdp_dtype dtype;             // of the stored shard; KEEP: f32
    int32_t ndim;                 // 1..FSDP_MAX_DIMS
    int64_t shape[FSDP_MAX_DIMS]; // full shape, row-major
    int32_t shard_dim;            // -ndim <= shard_dim < ndim; 0: rows
    int32_t frozen;               // 1: requires no gradient (see fsdp_set_requires_grad)
    int32_t keep_dtype;           // 1: gathered in its own dtype; param_dtype does not count
    int32_t reserved;
    const fsdp_gather_extension *extension; // NULL: the shard itself is gathered. Copied
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
    int32_t reshard_after_forward; // FSDP_RESHARD_*, or n. NEVER: the unit stays open around others
    fsdp_dtype param_dtype;        // KEEP: as the model
    fsdp_dtype reduce_dtype;       // KEEP: as the model
    fsdp_dtype output_dtype;       // KEEP: as the model
    int32_t keep_forward_inputs;   // 1: fsdp_cast_forward_input does not cast
    const fsdp_mesh *mesh;         // NULL: as the model; else as in fsdp_model_desc
    const fsdp_mesh_info *mesh_info;
    void *user;                    // yours: views have it
    uint64_t end_canary;
} fsdp_unit_desc;

/* fsdp_fully_shard - add a unit: parameters that are gathered together and reduced together
   unit        the model owns it
   Result      FSDP_OK; INVALID_ARG (the text names the parameter and the field, for example a
               scalar, a negative size, an integer parameter that requires a gradient, or one that
               another unit replicates), UNSUPPORTED, INVALID_STATE (the model is committed),
               OUT_OF_MEMORY. After a failure the model is as before
   Collective  yes: every rank of the mesh, same desc, same order. The first collective checks it
   Blocks      only to make groups for the first reshard_after_forward = n
   Allocates   yes: tables. fsdp_model_commit allocates the shards
   Source      torch: fully_shard */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_fully_shard(fsdp_model *model, const fsdp_unit_desc *desc,
                                                      fsdp_unit **unit);

/* fsdp_unit_mesh_info  - the ranks that shard and replicate a unit, and this rank's place among
   them. It is of the unit's own mesh, else of the model's
   fsdp_model_mesh_info - the same of units without a mesh of their own
   out         valid until fsdp_shutdown; if neither the unit's nor the model's desc gave a mesh,
               until the model ends
   Result      FSDP_OK; INVALID_ARG
   Collective  no      Blocks no      Allocates no
   Source      torch: FSDPParamGroup.mesh_info */
FSDP_API fsdp_status fsdp_unit_mesh_info(const fsdp_unit *unit, fsdp_mesh_info *out);
FSDP_API fsdp_status fsdp_model_mesh_info(const fsdp_model *model, fsdp_mesh_info *out);

/* fsdp_model_commit - lay out and allocate shards and gradients, filled with zeros. A second call
   does nothing. If you do not call it, the first hook, init_params, load, flat or view does
   Result      FSDP_OK; INVALID_STATE (no units), OUT_OF_MEMORY (the text has the sizes), collective
               errors. If it fails on one of several ranks, the world is aborted: no rank waits
   Collective  yes: every rank of the mesh      Blocks no      Allocates yes
   Source      torch: FSDPState._lazy_init */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_model_commit(fsdp_model *model);

/* fsdp_model_reserve - allocate the buffers of forward and backward now, not at their first use
   Result      FSDP_OK; OUT_OF_MEMORY, collective errors
   Collective  yes: every rank of the mesh      Blocks no      Allocates yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_model_reserve(fsdp_model *model);

// A parameter, or a block of rows of one, on this rank.
struct fsdp_param_view {
    fsdp_unit *unit;
    const char *name, *unit_name;
    void *user, *unit_user;             // from the descs
    int32_t ordinal;                    // its index among all parameters of the model
    int32_t index;                      // its index in the unit
    fsdp_dtype dtype, grad_dtype;       // of data and shard; of shard_grad
    int32_t ndim, shard_dim, requires_grad;
    int64_t shape[FSDP_MAX_DIMS];       // full
    int64_t start[FSDP_MAX_DIMS];       // first index of the block in the full tensor
    int64_t local_shape[FSDP_MAX_DIMS]; // of the block; in an empty shard 0 along shard_dim
    int64_t numel;                      // elements of the block, without padding
    void *data;                         // the block: contiguous, shape local_shape
    void *shard;                        // this rank's whole shard; never NULL. Device memory
    void *shard_grad;                   // its gradient, device memory. NULL: there is none, or (but
                                        // in hooks) finalize_backward has not run yet
};

/* fsdp_view_index - row-major index of element k of the view's block in the full tensor; NULL: -1
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API int64_t fsdp_view_index(const fsdp_param_view *view, int64_t k);

typedef void (*fsdp_init_fn)(void *user, const fsdp_param_view *block);

/* fsdp_init_params - fill the parameters with your function, a block of rows at a time: the whole
   model is never in memory. Ends with fsdp_params_changed
   fn          fills block->data: host memory, block->dtype, block->local_shape at block->start. The
               library calls it for consecutive blocks of this rank's rows, of at most fill_bytes
               but at least one row, and never for an empty block
   Result      FSDP_OK; INVALID_STATE (a unit is not idle), errors of commit
   Collective  as fsdp_model_commit      Allocates as commit
   Blocks      on GPUs until the rows are copied, at most timeout_ms for each block
   Source      torch: Module.to_empty, reset_parameters on DTensors */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_init_params(fsdp_model *model, fsdp_init_fn fn,
                                                      void *user);

/* fsdp_param_view_get - view of parameter `index` of a unit; data and shard are equal
   fsdp_param_at       - view of parameter `ordinal` of the model
   Result      FSDP_OK; INVALID_ARG, errors of commit
   Collective  as fsdp_model_commit at the first use, then no      Blocks no
   Allocates as commit
   Source      torch: the sharded nn.Parameter(DTensor), _from_local_no_grad */
FSDP_API fsdp_status fsdp_param_view_get(fsdp_unit *unit, int index, fsdp_param_view *out);
FSDP_API fsdp_status fsdp_param_at(fsdp_model *model, int ordinal, fsdp_param_view *out);

/* fsdp_next_param - step through all parameters. Start with a zeroed view
   Result      1: the view is the next parameter's; 0: there is none, or commit failed
   Collective  as fsdp_model_commit at the first use, then no      Blocks no
   Allocates as commit      Source torch: Module.parameters */
FSDP_API int fsdp_next_param(fsdp_model *model, fsdp_param_view *view);

/* fsdp_num_params, fsdp_num_units - of the model; 0 for NULL
   fsdp_unit_name - "" for NULL; valid until the model ends
   Collective  no      Blocks no      Allocates no */
FSDP_API int fsdp_num_params(const fsdp_model *model);
FSDP_API int fsdp_num_units(const fsdp_model *model);
FSDP_API const char *fsdp_unit_name(const fsdp_unit *unit);

// All trainable shards of one dtype and their gradients, at equal offsets: one loop updates all.
typedef struct fsdp_flat {
    fsdp_dtype dtype, grad_dtype;
    void *shards, *grads; // numel elements each, device memory (cpu_offload: pinned). Keep padding
                          // at zero in both
    int64_t numel;        // with padding
} fsdp_flat;

/* fsdp_model_flat - the flat block of one dtype
   Result      FSDP_OK (numel 0: no trainable parameter has that dtype); INVALID_ARG, errors of
               commit
   Gradients   after fsdp_finalize_backward the gradient of a parameter that has none is zero
   Collective  as fsdp_model_commit at the first use, then no      Blocks no
   Allocates as commit */
FSDP_API fsdp_status fsdp_model_flat(fsdp_model *model, fsdp_dtype dtype, fsdp_flat *out);

/* fsdp_param_load - copy this rank's rows from a full tensor; ends with fsdp_params_changed
   full        host memory, the parameter's shape and dtype, row-major
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle), errors of commit
   Collective  as fsdp_model_commit at the first use, then no      Allocates as commit
   Blocks      on GPUs until the rows are copied, at most timeout_ms
   Source      torch: distribute_tensor, set_model_state_dict */
FSDP_API fsdp_status fsdp_param_load(fsdp_unit *unit, int index, const void *full);

/* fsdp_param_full - gather a parameter to one full tensor, in its own dtype, not in param_dtype
   fsdp_param_full_grad - gather its gradient, in grad_dtype; zeros if it has none
   full        host memory, the parameter's shape, row-major. NULL: this rank keeps nothing
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle, or grad of a frozen
               parameter), collective errors
   Collective  yes: every rank of the mesh
   Blocks      yes, at most timeout_ms for each step of fill_bytes
   Allocates   at the first use scratch memory: the largest parameter, at most fill_bytes
   Source      torch: DTensor.full_tensor */
FSDP_API fsdp_status fsdp_param_full(fsdp_unit *unit, int index, void *full);
FSDP_API fsdp_status fsdp_param_full_grad(fsdp_unit *unit, int index, void *full);

/* fsdp_params_changed - say that you have written shards (own optimizer, own load)
   Effect      later gathers run after your writes. Unsharded copies, also those under way, are
               stale: the next fsdp_unshard or pre_* gathers again. Until then fsdp_data gives the
               old values
   Result      FSDP_OK; INVALID_STATE (a unit is not idle)
   Collective  no, but every rank has to do the same      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_params_changed(fsdp_model *model);

/* -------------------------------------------------------------------------------------------- */
/* Training step. A call in a wrong order returns INVALID_STATE and changes nothing; the text names
   the call that is missing. fsdp_finalize_backward reports the first such failure of the step
   again, setters included: a trainer may check only finalize and the optimizer. After a collective
   error (TIMEOUT, PEER_LOST, MISMATCH, ABORTED, BACKEND) the world is aborted: every call returns
   that status at once, and fsdp_data and fsdp_grad give valid memory with undefined contents.
   All hooks are collective: every rank of the mesh calls them in the same order.                 */

/* fsdp_pre_forward - gather the unit's parameters: you may read fsdp_data
   Recompute   of an activation checkpoint, too: between pre_backward and post_backward of this
               unit, or in the backward of other units after a forward of this one
   Result      FSDP_OK; INVALID_STATE; OUT_OF_MEMORY; collective errors
   Collective  yes      Blocks until gathered (not with streams)      Allocates at its first use
   Source      torch: FSDPState._pre_forward, FSDPParamGroup.pre_forward */
FSDP_API fsdp_status fsdp_pre_forward(fsdp_unit *unit);

/* fsdp_post_forward - you have finished reading; frees the parameters (reshard_after_forward)
   Result      FSDP_OK; INVALID_STATE
   Collective  yes      Blocks no      Allocates only to grow the record of forwards
   Source      torch: FSDPState._post_forward, FSDPParamGroup.post_forward */
FSDP_API fsdp_status fsdp_post_forward(fsdp_unit *unit);

/* fsdp_pre_backward - gather the unit's parameters again. fsdp_grad is zero or holds gradients of
   earlier microbatches; with grads_overwrite it holds anything: store all of it. With lanes or
   streams it starts to gather the unit of the forward before
   Result      FSDP_OK; INVALID_STATE (for example, no grad-enabled forward of the unit waits for a
               backward); OUT_OF_MEMORY; collective errors
   Collective  yes      Blocks until gathered (not with streams)      Allocates at its first use
   Source      torch: FSDPState._pre_backward, FSDPParamGroup.pre_backward */
FSDP_API fsdp_status fsdp_pre_backward(fsdp_unit *unit);

/* fsdp_post_backward - you have finished writing gradients. It frees the parameters. If gradient
   sync is on, it averages gradients over the ranks and adds them to the shards' gradients
   Result      FSDP_OK; INVALID_STATE; OUT_OF_MEMORY; collective errors
   Collective  yes      Blocks inline: until reduced; with lanes or streams: no
   Allocates   at its first use      Source torch: FSDPParamGroup.post_backward, foreach_reduce */
FSDP_API fsdp_status fsdp_post_backward(fsdp_unit *unit);

/* fsdp_finalize_backward - end backward: finish units that are still open in backward, free what is
   left; then every sharded gradient is ready
   Result      FSDP_OK; INVALID_STATE (the text names a unit that is open in forward); collective
               errors. If it succeeds itself, it returns the first failure of a hook or setter
               since the last finalize that succeeded
   Collective  yes      Blocks until all reductions are done. On devices with streams only with
               cpu_offload, or if this rank has to ask whether others used a parameter that it did
               not use      Allocates at its first use
   Source      torch: FSDPState._root_post_backward_final_callback, finalize_backward */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_finalize_backward(fsdp_model *model);

/* fsdp_data - the full parameter `index`: contiguous, param_dtype, valid from pre_* to post_*
   fsdp_grad - where you write its gradient: same shape and dtype, valid from pre_backward to
               post_backward. It marks the parameter as used. NULL for a frozen parameter
   Result      device memory, ready in the order of your stream; the library owns it. In a wrong
               state NULL and a logged text; fsdp_finalize_backward then reports INVALID_STATE.
               Never NULL for a parameter of size zero. Addresses are multiples of 64 bytes, on GPUs
               of 256. If steps have the same order of calls, they repeat from the second step on
   Collective  no      Blocks no      Allocates no, but after an abort (see above)
   Source      torch: FSDPParam.unsharded_param, unsharded_param.grad */
FSDP_API void *fsdp_data(fsdp_unit *unit, int index);
FSDP_API void *fsdp_grad(fsdp_unit *unit, int index);

/* fsdp_unshard - start to gather a unit before its use
   fsdp_wait    - wait until fsdp_data is valid
   fsdp_reshard - free the gathered parameters now
   Result      FSDP_OK (also if there is nothing to do); INVALID_STATE; collective errors
   Collective  yes      Blocks unshard: inline only; wait: not with streams; reshard: no
   Allocates   unshard: at its first use
   Source      torch: FSDPModule.unshard, UnshardHandle.wait, FSDPModule.reshard */
FSDP_API fsdp_status fsdp_unshard(fsdp_unit *unit);
FSDP_API fsdp_status fsdp_wait(fsdp_unit *unit);
FSDP_API fsdp_status fsdp_reshard(fsdp_unit *unit);

/* fsdp_zero_grad - drop all sharded gradients: the next reduction stores instead of adding. It
   keeps gradients of microbatches that are not reduced yet, as PyTorch does
   Result      FSDP_OK; INVALID_STATE (a unit is not idle)
   Collective  no, but every rank has to do the same      Blocks no      Allocates no
   Source      torch: Optimizer.zero_grad */
FSDP_API fsdp_status fsdp_zero_grad(fsdp_model *model);

/* fsdp_clip_grads - find the norm of all gradients over all ranks, and scale them to at most
   max_norm
   fsdp_clip_grad_norm - the same with the 2-norm
   fsdp_grad_norm - the norm that the last of these calls found
   norm        out: the norm before clipping, the same on every rank. NULL: on GPUs the host does
               not wait; call fsdp_grad_norm later, for example where you read a step's loss
   Arithmetic  |g|^p is summed in f64, parameter by parameter in order, ranks in rank order: every
               layout gives the same bits. The coefficient is max_norm/(norm + 1e-6), at most 1
   Meshes      the norm counts each element of all ranks of the model's mesh once. Ranks along a
               unit's replicate dim hold copies, so one of them counts. All other ranks hold other
               elements and count: along the shard dim, along dims that do neither, and ranks that
               the unit's mesh lacks.
               Example: on a mesh (dp, tp) the model has a mesh_info that shards over dp. Its tp
               ranks hold other parameters, as layers do that tensor parallelism has cut. If a
               unit's parameters are equal on all tp ranks (norms, biases), give that unit a
               mesh_info that shards over dp and replicates over tp; else each tp rank counts.
               If the model's mesh is a slice, as dp of (dp, tp), the library does not know what
               the other ranks hold, and refuses: give mesh_info on the mesh that you sliced. A
               mesh of fsdp_mesh_create is taken as whole, even if it lacks ranks of the world.
   Collectives one all-reduce over the shard group if all other ranks hold copies. Else one over
               the world; if the model's mesh lacks ranks of the world, one over each of its dims
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle; grad_norm: no call since
               the model got its buffers), UNSUPPORTED (the model's mesh is a slice, or lacks ranks
               of a unit's mesh), CORRUPT (error_if_nonfinite: nothing is scaled, the world goes
               on); collective errors
   Collective  yes, but not fsdp_grad_norm      Allocates no; the first calls on a GPU: scratch
   Blocks      at most timeout_ms; on GPUs only for norm, error_if_nonfinite and cpu_offload
   Source      torch: torch.nn.utils.clip_grad_norm_, get_total_norm */
typedef struct fsdp_clip_desc {
    uint32_t size, start_canary;
    double max_norm;            // > 0; INFINITY: measure only
    double norm_type;           // p > 0; 0: 2; INFINITY: largest magnitude
    int32_t error_if_nonfinite; // 1: an infinite or NaN norm is an error
    int32_t reserved;
    uint64_t end_canary;
} fsdp_clip_desc;
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_clip_grads(fsdp_model *model, const fsdp_clip_desc *desc,
                                                     double *norm);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_clip_grad_norm(fsdp_model *model, double max_norm,
                                                         double *norm);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_grad_norm(fsdp_model *model, double *norm);

/* fsdp_model_reset - make every unit IDLE and SHARDED after an interrupted step. It drops
   gradients, reduced ones included, and microbatches that are not reduced
   Result      FSDP_OK; if the world is aborted, its status
   Collective  no, but every rank has to do the same      Blocks for operations under way
   Allocates   no      Source torch: reset_iter_state */
FSDP_API fsdp_status fsdp_model_reset(fsdp_model *model);

/* Setters. Those with a unit (NULL: every unit) need it IDLE or POST_BACKWARD; the others any time.
   fsdp_set_grad_enabled           0: a forward is evaluation, and no backward follows it.
                                   fsdp_is_grad_enabled tells
   fsdp_set_is_last_backward       0: another backward follows, maybe over the same forward:
                                   finalize keeps the record of forwards and gathers under way
   fsdp_set_requires_gradient_sync 0: post_backward does not reduce; the rank keeps its gradients
                                   (no_sync). It sets requires_all_reduce to the same value
   fsdp_set_requires_all_reduce    0, HSDP: post_backward keeps and adds up the sums of the shard
                                   group; a later one reduces them over the replicas. With one
                                   shard: as without sync. Without replicas: no effect
   fsdp_set_reshard_after_forward  FSDP_RESHARD_ALWAYS or _NEVER
   fsdp_set_reshard_after_backward 0: parameters stay gathered after backward
   fsdp_set_unshard_in_backward    0: pre_backward does not gather; backward needs no parameters
   fsdp_set_gradient_divide_factor from the next post_backward on gradients are sums divided by
                                   this factor; 0: by the number of ranks
   fsdp_set_reduce_scatter_unused_params 1 (default here): the library reduces every trainable
                                   parameter, used or not. 0 (PyTorch's rule): it does not reduce
                                   a unit without a used parameter; all ranks must have used the
                                   same parameters (checked: FSDP_ERR_MISMATCH)
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE
   Collective  no, but every rank has to do the same      Blocks no      Allocates no
   Source      torch: FSDPModule methods of the same names, torch.set_grad_enabled */
FSDP_API fsdp_status fsdp_set_grad_enabled(fsdp_model *model, int enabled);
FSDP_API int fsdp_is_grad_enabled(const fsdp_model *model);
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

/* fsdp_set_modules_to_forward_prefetch, fsdp_set_modules_to_backward_prefetch - after its own
   gather, pre_forward or pre_backward of this unit starts to gather these units, in this order. In
   backward they replace the implicit prefetch. A gather that would exceed prefetch_bytes is skipped
   targets     [count] units of the same model, copied. count 0: back to the default
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE, OUT_OF_MEMORY
   Collective  no, but every rank has to do the same      Blocks no      Allocates yes
   Source      torch: set_modules_to_forward_prefetch, set_modules_to_backward_prefetch */
FSDP_API fsdp_status fsdp_set_modules_to_forward_prefetch(fsdp_unit *unit,
                                                          fsdp_unit *const *targets, int count);
FSDP_API fsdp_status fsdp_set_modules_to_backward_prefetch(fsdp_unit *unit,
                                                           fsdp_unit *const *targets, int count);

/* fsdp_set_requires_grad - freeze or thaw a parameter between steps
   Effect      the next call that needs the layout makes a new one: it moves shards and gradients
               and frees gathered parameters; for a moment both layouts exist. Earlier views and
               flats are stale. Before the first hook this costs nothing. If you freeze a
               parameter, it loses its gradient
   Result      FSDP_OK; INVALID_ARG (integer parameter), INVALID_STATE (a unit is not idle, or holds
               gradients that are not reduced), OUT_OF_MEMORY, collective errors
   Collective  no, but every rank has to do the same      Blocks for operations under way
   Allocates   tables; the rest at the next call      Source torch: Tensor.requires_grad_ */
FSDP_API fsdp_status fsdp_set_requires_grad(fsdp_unit *unit, int index, int requires_grad);

/* fsdp_model_cast - store all floating parameters of a model in another dtype, between steps
   dtype       floating. param_dtype and reduce_dtype of the descs stay
   Effect      the next call that needs the layout casts shards and shard gradients to the new one,
               and an optimizer its states (f64 for f64, else f32). Earlier views are stale
   Result      as fsdp_set_requires_grad; UNSUPPORTED (a gather extension). After OUT_OF_MEMORY some
               units may be cast: call it again
   Collective  no, but every rank has to do the same      Blocks for operations under way
   Allocates   tables; the rest at the next call      Source torch: Module.to(dtype) */
FSDP_API fsdp_status fsdp_model_cast(fsdp_model *model, fsdp_dtype dtype);

/* Hooks of a unit. They run where its reductions run: at once, in a worker thread with lanes, or on
   a device with streams to enqueue work on `stream`. In a worker thread a hook must not call
   functions that take the world, the model or a unit. If a hook does not return FSDP_OK, the world
   is aborted with its status.
   fsdp_set_all_reduce_hook   gets the summed gradients before they are divided (in f16: after, if
                              the backend divides), after the all-reduce of HSDP: numel elements of
                              dtype, in the order of shards
   fsdp_set_post_accumulate_hook  runs when a parameter's shard gradient is ready, but not if no
                              rank used the parameter. It may write the shard: an optimizer in
                              backward
   fsdp_set_custom_all_gather, fsdp_set_custom_reduce_scatter  replace ops->run(comm, coll)
   fsdp_set_custom_all_reduce  replaces it for a unit's all_reduce over its replicas, in place:
                              coll->count elements of coll->dtype at coll->dst. First come the
                              gradients of the trainable parameters in the order of their shards,
                              then for each of these parameters how often it was used. The hook
                              makes all of them sums over the group; the library divides
   hook        NULL: none
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE
   Collective  no, but every rank has to do the same      Blocks for operations under way
   Allocates   no
   Source      torch: set_all_reduce_hook, register_post_accumulate_grad_hook,
               set_custom_all_gather, set_custom_reduce_scatter; for all_reduce the comm hooks of
               DistributedDataParallel (register_comm_hook) */
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
FSDP_API fsdp_status fsdp_set_custom_all_reduce(fsdp_unit *unit, fsdp_custom_comm hook, void *user);

/* fsdp_cast_forward_input  - cast floating activations to the unit's param_dtype, unless
   keep_forward_inputs is set
   fsdp_cast_forward_output - cast floating activations to output_dtype
   dst         room for count elements of that dtype; you own it. Untouched if no cast is needed
   dtype       in: dtype of src; out: dtype of the result. unit and dtype must not be NULL
   Result      the pointer to use: dst or src
   Collective  no      Blocks no      Allocates no
   Source      torch: MixedPrecisionPolicy.cast_forward_inputs, output_dtype */
FSDP_API const void *fsdp_cast_forward_input(const fsdp_unit *unit, void *dst, const void *src,
                                             fsdp_dtype *dtype, int64_t count);
FSDP_API const void *fsdp_cast_forward_output(const fsdp_unit *unit, void *dst, const void *src,
                                              fsdp_dtype *dtype, int64_t count);

typedef enum fsdp_training_state {
    FSDP_STATE_IDLE = 0, FSDP_STATE_FORWARD, FSDP_STATE_PRE_BACKWARD, FSDP_STATE_POST_BACKWARD,
    FSDP_STATE_COUNT
} fsdp_training_state;

typedef enum fsdp_storage_state {
    FSDP_STORAGE_SHARDED = 0, FSDP_STORAGE_IN_FLIGHT, FSDP_STORAGE_UNSHARDED,
    FSDP_STORAGE_SHARDED_POST_FORWARD, // 1/n is kept: reshard_after_forward = n
    FSDP_STORAGE_COUNT
} fsdp_storage_state;

/* fsdp_unit_state, fsdp_unit_storage - the unit's place in a step; what it holds
   Collective  no      Blocks no      Allocates no      Source torch: TrainingState, ShardedState */
FSDP_API fsdp_training_state fsdp_unit_state(const fsdp_unit *unit);
FSDP_API fsdp_storage_state fsdp_unit_storage(const fsdp_unit *unit);

/* -------------------------------------------------------------------------------------------- */
/* Ops are data: everything that a call does is an op record. An observer sees this record, a lane
   queues it, ranks compare what they derive from it, and error texts are made of it.             */

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
    X(CALL, "call")                   /* calls a function of the user, in the stream's order */   \
    X(UPDATE, "update")               /* list: one fsdp_update, by `call` or by the device */     \
    X(HOOK, "hook")                   /* marker: a public call begins; count is FSDP_CALL_* */    \
    X(ACQUIRE, "acquire")             /* marker: the unit holds dst from here on */               \
    X(RELEASE, "release")             /* marker: `stream` has used src for the last time */       \
    X(WROTE, "wrote")                 /* marker: the caller has written dst */

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
    X(MOVE, "move")           /* to a new layout: fsdp_set_requires_grad, fsdp_model_cast */      \
    X(CLIP, "clip")                                                                               \
    X(FULL, "full")           /* gather to one tensor */                                          \
    X(WORLD, "world")         /* fsdp_all_reduce, fsdp_broadcast, fsdp_barrier */                 \
    X(TRANSFER, "transfer")   /* between host and device, and done on return */

enum {
#define FSDP_X(name, text) FSDP_LABEL_##name,
    FSDP_LABEL_LIST(FSDP_X)
#undef FSDP_X
    FSDP_LABEL_COUNT
};

enum {
    FSDP_STREAM_COMPUTE = 0, FSDP_STREAM_GATHER, FSDP_STREAM_REDUCE, FSDP_STREAM_ALLREDUCE,
    FSDP_STREAM_EXTENSION, // of extensions; begins with its first record
    FSDP_STREAM_COUNT
};

// A point in a stream's order. With lanes: its seq-th op; on a device: its seq-th mark. 0: none.
typedef struct fsdp_event {
    uint64_t seq;
    int32_t stream; // FSDP_STREAM_*
} fsdp_event;

/* Things that ranks must agree on, a byte of hash each: an error text names those that differ.
   what_hash covers all of them; it decides whether ranks agree. */
#define FSDP_AGREE_LIST(X)                                                                        \
    X(NAMES, "names of parameters") X(SHAPES, "shapes") X(SHARD_DIM, "shard_dim")                 \
    X(DTYPES, "dtypes of parameters") X(REDUCE_DTYPE, "reduce_dtype")                             \
    X(GRAD_DTYPE, "grad_dtype") X(REQUIRES_GRAD, "requires_grad")                                 \
    X(STRINGS, "sizes of a gather extension") X(SLICES, "n of reshard_after_forward")             \
    X(OVERWRITE, "grads_overwrite") X(DIRECT_MIN, "direct_min") X(MESH, "sizes of the mesh")      \
    X(FACTOR, "gradient divide factor") X(USED, "parameters that have a gradient")                \
    X(ACCUMULATE, "gradients of earlier steps (zero_grad)") X(STEP, "number of finished steps")   \
    X(GIVEN, "lr or another setting of the optimizer or clip, or how often it stepped (fsdp_agree)")
#define FSDP_X(name, text) FSDP_AGREE_##name,
enum { FSDP_AGREE_LIST(FSDP_X) FSDP_AGREE_COUNT };
#undef FSDP_X

// Markers, HOOK and those behind it, tell what happens and wait for nothing. The library makes them
// only if an extension sees records.
typedef struct fsdp_op {
    uint64_t seq;             // number in this rank's model, or world. Ranks may differ in it
    uint64_t bytes;           // collectives: to be received from other ranks (all_reduce: 2 (R-1)/R
                              // of the whole, rounded up); copies, zero: to be written
    uint64_t count;           // elements: gather, scatter: per rank; others: of the whole
    uint8_t kind, label, stream, state; // FSDP_OP_*, FSDP_LABEL_*, FSDP_STREAM_*, training state
    uint8_t dtype, out_dtype, accumulate, in_place;
    uint8_t redop, fill;      // ALL_REDUCE: FSDP_SUM, ...; ZERO: the byte that is written
    uint8_t timed, pool;      // timed: 1: an extension gets the times when it ran; pool: of slot
    int32_t root;             // BROADCAST: place of the root. CALL: index of the parameter, or -1
    int32_t group_size;       // collectives: number of ranks
    uint16_t comm_number;     // number of comm in the order of creation; 1: the world's; 0: none
    uint8_t num_waits, custom; // of wait; 1: a function of fsdp_set_custom_... runs it
    double scale;             // factor of the (summed) input, in the arithmetic's type; 1: none
    double norm_type;         // NORM, and clip: p; INFINITY: the maximum
    const double *clip;       // COPY: NULL, or what NORM has found, in device memory. Then `scale`
                              // is the largest norm; factor: scale/(norm + 1e-6) if < 1, or NaN
    uint32_t list_count;
    int32_t slot;             // ACQUIRE, RELEASE, WROTE: number of the buffer in FSDP_POOL_* `pool`
    fsdp_model *model;        // NULL: the op is the world's: a collective on host data, a transfer
    const fsdp_unit *unit;    // NULL: the op is the model's
    const char *what;         // name of the unit or of the call
    uint64_t what_hash, step, given; // hash of the unit's desc, number of finalizes, hash of what
                              // fsdp_agree was given: ranks must agree
    uint8_t agree[FSDP_AGREE_COUNT]; // hashes of the parts of what_hash, for texts
    fsdp_comm *comm;          // collectives: where
    fsdp_buf *src, *dst;      // the op waits for their events, and sets them; NULL: none
    const void *list;         // prebuilt: fsdp_block[] (COPY, NORM), fsdp_seg[] (collectives), or
                              // one fsdp_update (UPDATE)
    const void *src_ptr;      // fixed at issue: a slot may change hands before a worker runs the op
    void *dst_ptr;
    fsdp_status (*call)(const struct fsdp_op *op, void *stream); // CALL; UPDATE by the host
    fsdp_event wait[2];       // num_waits of them; the library derives them
} fsdp_op;

/* fsdp_op_name, fsdp_label_name - for example "reduce_scatter", "copy_in"; "?" out of range. For a
   label of an extension "extension": fsdp_op_label gives its name
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_op_name(int kind);
FSDP_API const char *fsdp_label_name(int label);

// The public calls, in the order of the transition table. A HOOK op has one of them as `count`.
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
    X(RESET, "model_reset")                                                                       \
    X(EXTENSION, "extension")         /* an extension's own call: always possible */

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

enum { FSDP_POOL_MAX = FSDP_POOL_COUNT + 8 }; // with those of extensions (fsdp_pool_register)

// Bytes of device memory by pool. Pools only grow, so current is also the peak. Only extensions
// shrink them (fsdp_pools_trim).
typedef struct fsdp_memory {
    int64_t pool_bytes[FSDP_POOL_MAX];
    int32_t pool_slots[FSDP_POOL_MAX];
    int64_t total_bytes;     // of all pools
    int64_t host_bytes;      // host memory: the library's tables for this model, and what its
                             // extensions have from fsdp_alloc (an optimizer's state)
    int64_t unsharded_bytes; // parameters and gradients of the whole model, for comparison
} fsdp_memory;

/* fsdp_model_memory  - what is allocated now
   fsdp_model_predict - what will be allocated after a training step. It assumes one forward of
   every unit in the order of creation and one backward in the reverse order; if the model reshards
   after forward, units that never do are open while those that do run. It allocates nothing on the
   device. It does not count gradients kept without sync, scratch of fsdp_param_full and buffers of
   extensions. On one rank with grads_overwrite, a step that begins without fsdp_zero_grad needs
   one more slot of gradients than it says
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY, INVALID_STATE (predict: no units)
   Collective  no      Blocks no      Allocates predict: temporary tables */
FSDP_API fsdp_status fsdp_model_memory(const fsdp_model *model, fsdp_memory *out);
FSDP_API fsdp_status fsdp_model_predict(const fsdp_model *model, fsdp_memory *out);

/* fsdp_unit_memory - memory of one unit. SHARD, SGRAD: its part of shards and gradients. Other
   pools: bytes of one slot that it takes, and in pool_slots how many it holds now.
   unsharded_bytes: its full parameters and gradients
   Result      FSDP_OK; INVALID_ARG
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_unit_memory(const fsdp_unit *unit, fsdp_memory *out);

/* fsdp_model_describe - a table of units and parameters as text: shapes, dtypes, layout, bytes, and
   the route of each unit: how it gathers, and what happens to gradients after post_backward
   buf         room for cap bytes, always terminated if cap > 0; NULL with cap 0
   Result      length of the whole text without its end, as snprintf; 0 for NULL
   Collective  no      Blocks no      Allocates no */
FSDP_API size_t fsdp_model_describe(const fsdp_model *model, char *buf, size_t cap);

/* fsdp_pool_name - for example "gathered parameters"; "?" out of range. For a pool of an extension
   "extension": fsdp_model_pool_name gives its name
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_pool_name(int pool);

typedef struct fsdp_counters {
    uint64_t calls[FSDP_OP_COUNT]; // ops issued
    uint64_t bytes[FSDP_OP_COUNT]; // fsdp_op.bytes of them: to be received, or written
    uint64_t allocations;          // host and device allocations of the model
} fsdp_counters;

/* fsdp_model_counters - numbers since the model's creation
   Result      FSDP_OK; INVALID_ARG
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_model_counters(const fsdp_model *model, fsdp_counters *out);

/* -------------------------------------------------------------------------------------------- */
/* The seam for extensions: fsdp_extension, and the functions that extensions call.               */

/* ==== core/extension.h ======================================================================
   extensions: the functions that they give, and those that they may call

   Included by fsdp.h, at the end of its declarations. docs/extensions.md tells how to write one. */

#ifndef FSDP_EXTENSION_H
#define FSDP_EXTENSION_H
// clang-format off

// Numbers that an extension keeps and that a checkpoint must write: one item of them.
typedef struct fsdp_state_item {
    const char *extension;        // name of the extension
    const char *name;             // for example "exp_avg"; NULL: there is no further item
    int32_t ordinal;              // of the parameter that it belongs to; -1: of none
    int32_t sharded;              // 1: this rank's rows of a tensor of the parameter's shape, see
                                  // fsdp_param_view; 0: the same on all ranks
    fsdp_dtype dtype;
    int32_t memory;               // place of data: FSDP_MEMORY_HOST or FSDP_MEMORY_DEVICE
    int32_t ndim;
    int64_t shape[FSDP_MAX_DIMS]; // of the whole tensor; for a sharded item the library fills it in
    int64_t numel;                // elements here, contiguous
    void *data;                   // a checkpoint reads it; a load writes it
    int32_t at[2];                // the library's: where fsdp_next_state goes on
} fsdp_state_item;

/* The functions of an extension. Each of them may be NULL; each gets `user`. The library calls
   extensions in the order of attaching, in the thread that uses the world; `ran` may differ. */
typedef struct fsdp_extension {
    uint32_t size, start_canary;
    const char *name; // for texts and states, not copied; NULL: "extension"
    void *user;
    // A call of a step begins, from pre_forward to finalize_backward, or model_reset (for both of
    // the model unit is NULL); the transition table is not asked yet. Or FSDP_CALL_SET: a setter is
    // about to change options of a unit (NULL: of all), and does so whatever you return. Or, in the
    // same way, zero_grad, params_changed or load is about to write gradients or shards. Return
    // non-zero if you have done the call's work: then *status (FSDP_OK before) is its result, and
    // the library calls no further extension. Calls of a step that you make go to those behind you.
    int (*call)(void *user, fsdp_model *model, fsdp_unit *unit, int call, fsdp_status *status);
    // A record is about to run. You get a copy and may change it; kind, seq, stream, src and dst
    // stay, since its waits depend on them. Return non-zero to take the record: it does not run,
    // later extensions do not see it, and all else goes on as if it had run.
    int (*op)(void *user, fsdp_model *model, fsdp_op *op);
    // released NULL: the unit is about to take a slot of a pool; if you return a buffer, the unit
    // uses it. Else: a unit gives back a slot, yours or the pool's; the library ignores the result.
    fsdp_buf *(*buffer)(void *user, fsdp_model *model, fsdp_unit *unit, int pool,
                        fsdp_buf *released);
    // A record has run; nanoseconds on the world's clock. Inline: called at once; with lanes: in
    // the worker thread that ran it; on a device with streams: in a later call, from timed events.
    // It must not call functions that take the world, the model or a unit.
    void (*ran)(void *user, fsdp_model *model, const fsdp_op *op, int64_t begin_ns,
                int64_t end_ns);
    // The model has a layout, the first or a new one: shards and gradients are in another place.
    void (*relayout)(void *user, fsdp_model *model);
    // Fill in item `index`, 0, 1, ...; leave its name NULL if there is none. item NULL: somebody
    // wrote items; read them. fsdp_next_state or fsdp_state_written returns your failure.
    fsdp_status (*state)(void *user, fsdp_model *model, int index, fsdp_state_item *item);
    void (*destroy)(void *user); // the model ends (last attached first), or fsdp_detach
    uint64_t end_canary;
} fsdp_extension;

/* fsdp_attach - add an extension to a model
   extension   copied
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY, UNSUPPORTED (`ran` on a device that cannot
               measure times); INVALID_STATE (a unit is not idle, and the extension has call, op,
               buffer or ran). After a failure it is not attached, and destroy is not called
   Collective  no      Blocks with `ran`: for operations under way      Allocates yes */
FSDP_API fsdp_status fsdp_attach(fsdp_model *model, const fsdp_extension *extension);

/* fsdp_detach - remove the extension that you attached with these contents, and call its destroy
   Result      FSDP_OK; INVALID_ARG (it is not attached); INVALID_STATE (called from a function of
               an extension, or a unit holds a slot that the extension may own)
   Collective  no      Blocks for operations under way      Allocates no */
FSDP_API fsdp_status fsdp_detach(fsdp_model *model, const fsdp_extension *extension);

/* fsdp_find_extension - `user` of the first attached extension with this name; NULL: there is none
   Collective  no      Blocks no      Allocates no */
FSDP_API void *fsdp_find_extension(const fsdp_model *model, const char *name);

/* fsdp_next_state - step through the items of all extensions of a model. Start with a zeroed item;
   at the end its name is NULL
   fsdp_state_written - say that you have written items: the extensions read them
   Result      FSDP_OK; INVALID_ARG; what an extension returned
   Note        pointers are valid until the layout changes or an extension is detached
   Collective  as fsdp_model_commit at the first use, then no. written: every rank has to do the
               same      Blocks no, but an extension may      Allocates as commit
   Source      torch: Optimizer.state_dict, load_state_dict */
FSDP_API fsdp_status fsdp_next_state(fsdp_model *model, fsdp_state_item *item);
FSDP_API fsdp_status fsdp_state_written(fsdp_model *model);

/* fsdp_op_init - a zeroed record with the model's entries: unit, step, training state, scale 1
   unit        NULL: the record is the model's
   kind, label, stream  FSDP_OP_*, FSDP_LABEL_* or a registered label, FSDP_STREAM_*
   Collective  no      Blocks no      Allocates no */
FSDP_API void fsdp_op_init(fsdp_op *op, const fsdp_model *model, const fsdp_unit *unit, int kind,
                           int label, int stream);

/* fsdp_emit - number and count a record, show it to extensions, run it in its stream's order
   op          from fsdp_op_init, with the fields of its kind (listed in docs/extensions.md). It
               waits for src and dst, and others wait for it through them. src_ptr, dst_ptr NULL:
               their begin. The library fills in seq, wait, and bytes if it is 0. A marker takes
               effect: ACQUIRE holds dst, RELEASE gives src back after `stream`, WROTE says that
               the caller has written dst
   Result      FSDP_OK; INVALID_ARG (the text names the field), UNSUPPORTED (the backend lacks the
               collective), OUT_OF_MEMORY; if the record runs at once, collective errors
   Collective  if the record is one: every rank of op->comm, same order, same what and count
   Blocks      inline: until done; else no
   Allocates   the first record on FSDP_STREAM_EXTENSION: with lanes a worker thread */
FSDP_API fsdp_status fsdp_emit(fsdp_model *model, fsdp_op *op);

/* fsdp_emit_again - emit records as they were shown to an extension, or have been emitted: they are
   not checked, and step and what fsdp_agree was given are the model's now
   ops         [count], the caller's; must stay as they are until they have run (see `list`)
   Result      FSDP_OK; INVALID_ARG (NULL); as fsdp_emit
   Collective, Blocks  as fsdp_emit      Allocates no */
FSDP_API fsdp_status fsdp_emit_again(fsdp_model *model, fsdp_op *ops, int count);

/* fsdp_call_begin - begin a call of your extension, before its records: check that the call is
   possible now, and show a HOOK marker
   call        FSDP_CALL_EXTENSION, or the public call whose rules yours follows
   what        its name, for the text and the marker; NULL: the name of `call`
   Result      FSDP_OK; INVALID_STATE (the text names the missing call), errors of commit
   Collective  as fsdp_model_commit at the first use, then no      Blocks no
   Allocates as commit */
FSDP_API fsdp_status fsdp_call_begin(fsdp_model *model, int call, const char *what);

/* fsdp_label_register, fsdp_pool_register - the number of a label or pool with this name in a
   model; equal names give equal numbers. At most 16 labels and 8 pools, names of 1 to 31 bytes
   Result      the number. -1 and a logged text: no place is left, or the name is empty or too long
   Collective  no, but every rank has to do the same: ranks compare labels
   Blocks no      Allocates no */
FSDP_API int fsdp_label_register(fsdp_model *model, const char *name);
FSDP_API int fsdp_pool_register(fsdp_model *model, const char *name);

/* fsdp_op_label        - name of a record's label, also of a registered one
   fsdp_model_pool_name - name of a pool, also of a registered one; "?" out of range
   Collective  no      Blocks no      Allocates no */
FSDP_API const char *fsdp_op_label(const fsdp_op *op);
FSDP_API const char *fsdp_model_pool_name(const fsdp_model *model, int pool);

/* fsdp_buf_create - zeroed memory for records, with the two events that order them
   pool        counts its bytes: FSDP_POOL_* or a registered one
   memory      FSDP_MEMORY_DEVICE: for collectives, too; FSDP_MEMORY_PINNED: host memory
   fsdp_buf_part - a part of another buffer: own events, no own memory, not counted
   whole       NULL: addresses from `offset` on without memory, for rehearsals: no record may run
   buf         you own it: call fsdp_buf_destroy before the model ends. NULL after a failure
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY
   Collective  create of FSDP_MEMORY_DEVICE: every rank of the mesh, same size, same order; else no
   Blocks no      Allocates yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_buf_create(fsdp_model *model, int pool, int memory,
                                                     int64_t nbytes, fsdp_buf **buf);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_buf_part(fsdp_model *model, const fsdp_buf *whole,
                                                   int64_t offset, int64_t nbytes, fsdp_buf **buf);

/* fsdp_buf_destroy - free a buffer; NULL is allowed. If a unit holds it, the library logs that and
   keeps it
   Collective  as fsdp_buf_create      Blocks for operations under way      Allocates no */
FSDP_API void fsdp_buf_destroy(fsdp_model *model, fsdp_buf *buf);

/* fsdp_buf_ptr    - its address
   fsdp_buf_pool   - the pool that counts its bytes; if a unit has taken it from an extension, the
                     pool in whose place it stands; -1 for NULL
   fsdp_buf_nbytes - its size in bytes, at least the requested one
   fsdp_buf_held   - 1 if a unit holds it
   Collective  no      Blocks no      Allocates no */
FSDP_API void *fsdp_buf_ptr(const fsdp_buf *buf);
FSDP_API int fsdp_buf_pool(const fsdp_buf *buf);
FSDP_API int64_t fsdp_buf_nbytes(const fsdp_buf *buf);
FSDP_API int fsdp_buf_held(const fsdp_buf *buf);

/* fsdp_rehearse - make calls of a step that do nothing: an extension sees their records, none runs,
   and afterwards the model is as before
   extension   the only one that is asked meanwhile, attached or not. `op` sees records, and what
               it returns is ignored. `buffer` has to give every slot: fsdp_buf_part makes some
               without memory
   run         makes the calls, hooks or fsdp_unshard and the like, and may restore units to earlier
               states. Setters of options that it calls are undone; prefetch lists it can only take
               away (count 0). What cannot be undone fails: to freeze, thaw, cast, trim, (de)attach
   Result      FSDP_OK; what run returned; INVALID_ARG, INVALID_STATE (a unit is not idle),
               OUT_OF_MEMORY, errors of commit
   Collective  as fsdp_model_commit at the first use, then no      Blocks for operations under way
   Allocates   temporary tables */
FSDP_API fsdp_status fsdp_rehearse(fsdp_model *model, const fsdp_extension *extension,
                                   fsdp_status (*run)(void *user), void *user);

/* fsdp_unit_snapshot - save one unit: its states, the state of its gradients, its slots. Equal
   states with the same slots have equal bytes
   buf         room for cap bytes, or NULL; untouched if cap is too small
   Result      bytes of the whole; 0 for NULL
   Collective  no      Blocks no      Allocates no */
FSDP_API size_t fsdp_unit_snapshot(const fsdp_unit *unit, void *buf, size_t cap);

/* fsdp_unit_restore - put a unit into an earlier state, whose slots it then holds. In the same call
   your extension has to emit the records that lead there. A state of backward begins the model's
   backward, as the call would; a state in which gradients have just been reduced marks the
   parameters whose gradients were written as reduced
   Result      FSDP_OK; INVALID_ARG (another unit's, or the layout has changed since)
   Collective  no, but every rank has to do the same      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_unit_restore(fsdp_unit *unit, const void *buf, size_t nbytes);

/* fsdp_unit_reduce - reduce the gradients of a unit that wait since an earlier post_backward, as
   fsdp_finalize_backward would; nothing if none wait, or if gradient sync is off
   Result      FSDP_OK; INVALID_ARG; OUT_OF_MEMORY; collective errors
   Collective  yes      Blocks inline: until reduced; else no      Allocates at its first use */
FSDP_API fsdp_status fsdp_unit_reduce(fsdp_unit *unit);

/* fsdp_unit_flag_use - update the flags of use, which travel with a unit's reduction. Call it
   before your extension itself emits the records of that reduction
   Result      FSDP_OK; INVALID_ARG; if the world is aborted, its status
   Collective  no      Blocks on devices with streams if flags changed: until they are copied
   Allocates   no */
FSDP_API fsdp_status fsdp_unit_flag_use(fsdp_unit *unit);

/* fsdp_unit_follows_use - 1 if the records of a unit's reduction depend on which parameters were
   used, and not only on options and states: grads_overwrite, and
   fsdp_set_reduce_scatter_unused_params 0. Then fsdp_rehearse does not show what a step would do
   Collective  no      Blocks no      Allocates no */
FSDP_API int fsdp_unit_follows_use(const fsdp_unit *unit);

/* fsdp_pools_trim - free every slot that no unit holds; the next use allocates again
   Result      FSDP_OK; if the world is aborted, its status
   Collective  yes: every rank of the mesh, same order      Blocks for operations under way
   Allocates   no      Source torch: torch.cuda.empty_cache */
FSDP_API fsdp_status fsdp_pools_trim(fsdp_model *model);

/* fsdp_transfer - copy bytes between host and device memory, or within one of them. The copy runs
   after the work issued on COMPUTE and is done on return
   Result      FSDP_OK; INVALID_ARG, collective errors
   Collective  no      Blocks yes, at most timeout_ms      Allocates no */
FSDP_API fsdp_status fsdp_transfer(fsdp_model *model, void *dst, const void *src, int64_t nbytes);

/* fsdp_wait_stream - wait on the host until all work issued on a stream is done; -1: on all streams
   Result      FSDP_OK; INVALID_ARG, collective errors
   Collective  no      Blocks yes, at most timeout_ms      Allocates no
   Source      torch: Stream.synchronize */
FSDP_API fsdp_status fsdp_wait_stream(fsdp_model *model, int stream);

/* fsdp_mesh_comm - the group along a dim of a mesh, for records on a stream. Streams that may run
   at the same time have groups of their own if the backend needs that
   comm        the mesh owns it. NULL: a group of one rank
   Result      FSDP_OK; INVALID_ARG (no such dim or stream, this rank is outside the mesh),
               OUT_OF_MEMORY, collective errors
   Collective  for COMPUTE and EXTENSION at the first use of a dim: every rank of the world; else no
   Blocks, Allocates  at that first use      Source torch: DeviceMesh.get_group */
FSDP_API fsdp_status fsdp_mesh_comm(const fsdp_mesh *mesh, int dim, int stream, fsdp_comm **comm);

/* fsdp_world_status - FSDP_OK, or the failure that aborted the world
   Result      see above; INVALID_ARG for NULL
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_world_status(const fsdp_world *world);

/* fsdp_world_has  - 1 if the world's backend has the collective `kind`, FSDP_OP_*; a world of one
   rank has none
   fsdp_mesh_world - the world of a mesh; NULL for NULL
   Collective  no      Blocks no      Allocates no */
FSDP_API int fsdp_world_has(const fsdp_world *world, int kind);
FSDP_API fsdp_world *fsdp_mesh_world(const fsdp_mesh *mesh);

// How records run: at once, in worker threads, or on a device's streams.
enum { FSDP_RUN_INLINE = 0, FSDP_RUN_LANES, FSDP_RUN_STREAMS };

/* fsdp_model_world    - the world of a model; NULL for NULL
   fsdp_model_run      - how the model's records run: FSDP_RUN_*
   fsdp_model_settings - the options of the model and its units as a number (a hook: whether there
                         is one): if it is the same as before, they are
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_world *fsdp_model_world(const fsdp_model *model);
FSDP_API int fsdp_model_run(const fsdp_model *model);
FSDP_API uint64_t fsdp_model_settings(const fsdp_model *model);

/* fsdp_agree - give bytes that have to be equal on all ranks, for example a learning rate. Ranks
   compare all bytes given so far in the next collective of a unit; different ones are a MISMATCH
   data        nbytes bytes, copied; without padding, which may differ
   Result      FSDP_OK; INVALID_ARG; if the world is aborted, its status
   Collective  no, but every rank has to do the same      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_agree(fsdp_model *model, const void *data, int64_t nbytes);

/* fsdp_params_writable - wait until nothing reads the shards. Then write them, and call
   fsdp_params_changed
   Result      FSDP_OK; collective errors. On devices with streams you may then write shards in the
               order of COMPUTE, or on the host if fsdp_update_place gives FSDP_MEMORY_HOST
   Collective  no      Blocks for operations under way that read shards      Allocates no */
FSDP_API fsdp_status fsdp_params_writable(fsdp_model *model);

/* fsdp_update_place - the memory of the shards, and with it what updates them
   memory      out: FSDP_MEMORY_HOST: the host updates them (`call` of an UPDATE record).
               FSDP_MEMORY_DEVICE: the device table does, in the order of the record's stream
   what        name of your call, for the text
   Result      FSDP_OK; UNSUPPORTED (the device has no function for updates, and the host cannot
               read its memory: set cpu_offload), errors of commit
   Collective  as fsdp_model_commit at the first use, then no      Blocks no
   Allocates as commit */
FSDP_API fsdp_status fsdp_update_place(fsdp_model *model, const char *what, int *memory);

/* fsdp_alloc - zeroed memory for an extension. FSDP_MEMORY_HOST: counted in fsdp_memory.host_bytes.
   FSDP_MEMORY_DEVICE: only this rank uses it
   what        begin of the text, for example "adamw_create: no memory for a state"
   ptr         you own it: call fsdp_free. NULL after a failure
   fsdp_free - free it; memory and nbytes as for fsdp_alloc; NULL is allowed
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY
   Collective  no      Blocks no      Allocates yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_alloc(fsdp_model *model, int memory, int64_t nbytes,
                                                const char *what, void **ptr);
FSDP_API void fsdp_free(fsdp_model *model, int memory, void *ptr, int64_t nbytes);

/* fsdp_fail - let a call fail: the library logs the text and keeps it for fsdp_last_error
   world       NULL: it is this thread's failure without a world
   Result      status
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_fail(fsdp_world *world, fsdp_status status, const char *format, ...)
    FSDP_PRINTF(3, 4);

/* fsdp_desc_read - copy a caller's desc to dst: zeroed, `size` bytes in this header. A desc begins
   with uint32_t size, start_canary and ends with uint64_t end_canary. src NULL: dst is all zero
   Result      FSDP_OK; INVALID_ARG (size or canaries; the text names the desc by `what`)
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_desc_read(fsdp_world *world, void *dst, const void *src, size_t size,
                                    const char *what);

// clang-format on
#endif

/* -------------------------------------------------------------------------------------------- */
/* The tables of a backend and a device: fsdp_boot, fsdp_coll, fsdp_comm_ops, fsdp_device_ops.    */

/* ==== core/backend.h ========================================================================
   the two tables of functions that make a backend and a device

   How to write one: backends/README.md. */

#ifndef FSDP_BACKEND_H
#define FSDP_BACKEND_H
// clang-format off

// State that ranks share if they are threads of one process. Set size; the rest begins at zero.
struct fsdp_threads {
    uint32_t lock;         // of the backend
    int32_t size;          // ranks
    void *common;          // what the backend's first open put here
};

// The argument of open of a backend and a device. Pointers are valid until close.
typedef struct fsdp_boot {
    int rank, size, local_rank;
    int64_t timeout_ns;
    uint32_t *stuck;       // not 0: work on the device does not end; do not free its memory
    const char *job;
    const char *store;     // place where ranks meet, see fsdp_world_desc.store
    fsdp_threads *threads; // not NULL: ranks are threads that share this
    fsdp_allocator allocator;
    fsdp_logger logger;
    int log_level;         // do not give the logger anything more verbose
    fsdp_clock clock;
    void *user;            // fsdp_world_desc.user
} fsdp_boot;

// Ranks of a new process group in order. color < 0: this rank is outside, but makes the call, too.
typedef struct fsdp_group {
    int color, index, size, lane; // index: this rank's place, or -1; lane: the FSDP_STREAM_* for it
    const int32_t *ranks;         // [size], world ranks
    const char *name;
} fsdp_group;

enum { FSDP_CAP_FUSED_REDUCE = 1 }; // reductions cast, scale and accumulate, see fsdp_coll

typedef struct fsdp_caps {
    uint32_t kinds;      // bit 1u << FSDP_OP_*
    uint32_t flags;      // FSDP_CAP_*
    int lanes;           // streams that may run collectives at the same time: 1 or more
    int default_lanes;   // lanes of a world that asks for no number; equal on all ranks. 0: inline
    const char *because; // the reason for them, as a part of a text ("as ..."), or NULL
} fsdp_caps;

/* One collective, as data. It is neither fsdp_op nor what ranks compare, because each of the three
   has a reader of its own: an fsdp_op is also a copy, a norm or a call of the user, with buffers
   and events that a backend must not touch; a collective is what every backend can carry out, with
   pointers of this process; the record that travels (fsdpi_record) has a fixed size and no
   pointers. The first becomes the second in fsdpi_run_collective (core/comm.h), the second the
   third in fsdpi_describe (backends/fsdp_comm.h), and nowhere else.

   Offsets of segments count elements: of dtype on the full side and in src of a gather, of
   out_dtype in dst of a scatter.
   all_gather      dst[full + k*count ..] = src_k[shard ..] of rank k; in_place: src_k[.] is already
                   at its place in rank k's dst, and src is ignored
   reduce_scatter  dst[shard ..] (+)= scale * sum of src_k[full + me*count ..] over k, in rank
                   order; without FSDP_CAP_FUSED_REDUCE: dtypes equal, scale 1, accumulate 0
   all_reduce      dst = scale * redop over k of src_k, in place (src == dst), count elements; scale
                   as above
   broadcast       dst of all = dst of root, count elements
   all_to_all      dst[k*count ..] = src_k[me*count ..], count elements for each pair of ranks
   send, recv      count elements from src to member `root`, from it to dst; both ranks call
   A collective is complete when the result is in place *and* src may be overwritten.             */
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
    uint8_t agree[FSDP_AGREE_COUNT]; // hashes of its parts, for texts; 0: unknown
    const char *what;     // unit or call, for texts
    void *stream;         // native stream, or NULL: block until complete
};

#define FSDP_COMM_VERSION 3
struct fsdp_comm_ops {
    uint32_t version, size; // FSDP_COMM_VERSION, sizeof(fsdp_comm_ops)
    const char *name;
    fsdp_status (*open)(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **world);
    // Blocks until every rank of the parent has come. If color < 0, *out is NULL.
    fsdp_status (*split)(fsdp_comm *parent, const fsdp_group *group, fsdp_comm **out);
    void (*close)(fsdp_comm *comm);
    fsdp_status (*run)(fsdp_comm *comm, const fsdp_coll *coll);
    // Zero-filled memory that peers may read. Ranks may differ in sizes and in their order.
    fsdp_status (*alloc)(fsdp_comm *world, size_t size, void **ptr);
    void (*free)(fsdp_comm *world, void *ptr, size_t size);
    // Text of the last failure of this comm; NULL: of this thread's failed open. Names the rank.
    const char *(*error_text)(fsdp_comm *comm);
    // Any thread may call it, also repeatedly. why begins with "rank N".
    void (*abort)(fsdp_comm *world, fsdp_status status, const char *why);
    fsdp_status (*poll)(fsdp_comm *world);            // optional: asynchronous errors
};

enum {
    FSDP_DEVICE_ASYNC = 1, // ops are ordered on native streams and return at once
    FSDP_DEVICE_HOST = 2   // its memory is host memory
};

// PINNED: host memory of the device. HOST: memory of the world's allocator, never of a device.
enum { FSDP_MEMORY_DEVICE = 0, FSDP_MEMORY_PINNED = 1, FSDP_MEMORY_HOST };

enum { FSDP_UPDATE_ADAMW = 1, FSDP_UPDATE_SGD, FSDP_UPDATE_UNSCALE };

/* A run of elements: an optimizer updates them, or a scaler divides their gradients. All of it is
   in the device's memory. The arithmetic is that of fsdp_optim.h; scalars are its settings.
   ADAMW       scalars: decay, lerp, beta2, gain, root, eps, rate; first and second: m and v
   SGD         scalars: lr, momentum, gain, weight_decay, nesterov (0, 1), fresh (1: the first
               update); first: the momentum buffer, or NULL
   UNSCALE     scalars: factor. grad *= factor; if one was infinite or NaN, *found becomes 1
   rounds      1: parameters, which are bf16, are rounded stochastically, by bits of key and index:
               element i is number at + i / row * pitch + i % row of the whole parameter          */
typedef struct fsdp_update {
    uint8_t kind, dtype, grad_dtype, rounds, reserved[4]; // FSDP_UPDATE_*; of param; of grad
    int64_t count;
    void *param, *grad, *first, *second;          // states: f64 for f64 parameters, else f32
    int32_t *found;
    double scalars[8];
    uint64_t key;
    int64_t at, row, pitch;
} fsdp_update;

#define FSDP_DEVICE_VERSION 6
struct fsdp_device_ops {
    uint32_t version, size, flags; // FSDP_DEVICE_VERSION, sizeof(fsdp_device_ops), FSDP_DEVICE_*
    const char *name;
    fsdp_status (*open)(const fsdp_boot *boot, fsdp_device **device);
    void (*close)(fsdp_device *device);
    // Zero-filled. FSDP_MEMORY_DEVICE: peers do not read it (in a world of several ranks
    // fsdp_comm_ops.alloc gives buffers); FSDP_MEMORY_PINNED: host memory that kernels can read.
    fsdp_status (*alloc)(fsdp_device *device, int kind, size_t size, void **ptr);
    void (*free)(fsdp_device *device, int kind, void *ptr, size_t size);
    // Only with FSDP_DEVICE_ASYNC. The stream COMPUTE may be the caller's. sync with timeout 0 does
    // not wait: it returns FSDP_ERR_TIMEOUT if the event has not happened.
    fsdp_status (*stream)(fsdp_device *device, int stream, void **native);
    fsdp_status (*event)(fsdp_device *device, void **native);
    void (*destroy)(fsdp_device *device, void *stream_or_null, void *event_or_null);
    fsdp_status (*record)(fsdp_device *device, void *stream, void *event);
    fsdp_status (*wait)(fsdp_device *device, void *stream, void *event);
    fsdp_status (*sync)(fsdp_device *device, void *event, int64_t timeout_ns);
    // Optional, both or none: an event that measures time; nanoseconds between two that happened.
    fsdp_status (*timer)(fsdp_device *device, void **native);
    fsdp_status (*elapsed)(fsdp_device *device, void *from, void *to, int64_t *ns);
    // Work, ordered on `stream` (NULL: done on return). One end of a copy of one block without
    // arithmetic may be any host memory that is valid until the stream has passed the copy.
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
/* Implementation, leaves first. It is outside the guard, so that a header that included fsdp.h
   before does not hide it. It needs nothing that strict C99 hides: fsdpi_syscall reaches those. */

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

#define FSDPI_TEXT_OF(name, text) text, // an entry of a list of names

// Owns: the few calls of the operating system that the library needs. Strict C99 hides some of
// them; a private name for the C library's symbol reaches them without feature macros.

#include <errno.h>       // errno
#include <fcntl.h>       // fcntl, open
#include <sys/mman.h>    // mmap, munmap
#include <sys/syscall.h> // SYS_futex and others
#include <sys/wait.h>    // waitpid
#include <unistd.h>      // fork, getpid, _exit

enum { FSDPI_ANON = 0x20, FSDPI_CLOEXEC = 02000000 }; // MAP_ANONYMOUS, O_CLOEXEC

struct fsdpi_timespec {
    long tv_sec, tv_nsec;
};

extern long fsdpi_syscall(long number, ...) __asm__("syscall");
extern int fsdpi_clock_gettime(int clock, struct fsdpi_timespec *out) __asm__("clock_gettime");
extern int fsdpi_kill(int pid, int sig) __asm__("kill");

static int64_t fsdpi_monotonic_ns(void *user) {
    struct fsdpi_timespec t;
    (void)user;
    (void)fsdpi_clock_gettime(1 /* CLOCK_MONOTONIC */, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
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

// What a system call gave for a descriptor of the library's, moved to 3 or above: a program whose
// 0, 1 or 2 is closed prints there all the same. -1: there is none.
static int fsdpi_fd(int fd) {
    if (fd < 0 || fd > 2) return fd;
    int moved = fcntl(fd, 1030 /* F_DUPFD_CLOEXEC */, 3), error = errno;
    (void)close(fd);
    errno = error;
    return moved;
}

// The null device on those of 0 to 2 that are closed, for descriptors that others make.
static void fsdpi_plug(void) {
    int fd = 0;
    while (fd >= 0 && fd < 3) fd = open("/dev/null", O_RDWR);
    if (fd >= 3) (void)close(fd);
}

extern int fsdpi_at_thread_end(void (*call)(void *), void *arg,
                               const void *in_library) __asm__("__cxa_thread_atexit_impl")
    __attribute__((weak)); // glibc's

// Until this thread ends, dlclose leaves the library that holds this code in memory.
static void fsdpi_stay(void) {
    if (fsdpi_at_thread_end) (void)fsdpi_at_thread_end(free, NULL, "here");
}

// A word that holds `value` in this process and 0 in every child that it forks; NULL: no memory.
static uint32_t *fsdpi_own_word(uint32_t value) {
    void *word = mmap(NULL, sizeof value, PROT_READ | PROT_WRITE, MAP_PRIVATE | FSDPI_ANON, -1, 0);
    if (word == MAP_FAILED) return NULL;
    (void)fsdpi_syscall(SYS_madvise, word, sizeof value, 18L /* MADV_WIPEONFORK */);
    *(uint32_t *)word = value;
    return (uint32_t *)word;
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

/* ==== core/route.h ==========================================================================
   how a unit gathers and how it reduces: decided once, by one pure function

   It knows no unit and no memory: facts in, a route out. The layout and the setters fill in the
   facts; everybody else follows the route and asks no fact again. */

// What a route is decided by.
typedef struct fsdpi_facts {
    int32_t shards, replicas; // W, R: ranks that shard, ranks that replicate
    // Of the unit's layout. The dtypes are those of the part whose gradients the flags travel with.
    uint8_t one_part;    // all parameters are stored in one dtype and gathered in one dtype
    uint8_t one_train;   // all trainable ones are
    uint8_t extended;    // a parameter is gathered by functions of the user
    fsdp_dtype stored;   // of the shard
    fsdp_dtype gathered; // of the full parameter, and of the gradient that the caller writes
    fsdp_dtype grad;     // of the shard gradient
    fsdp_dtype reduce;   // of the reduction
    // Of the model and its world.
    uint8_t offload;   // shards and their gradients lie in pinned host memory
    uint8_t overwrite; // backward stores gradients instead of adding them
    uint8_t fuses;     // the backend's reduce_scatter casts, scales and adds
    uint8_t debug;     // what is given back becomes NaN
    // Options.
    uint8_t sync, all_reduce;
    uint8_t hook, custom; // an all-reduce hook is set; the caller all-reduces over replicas itself
    double divide_factor; // 0: the number of ranks
} fsdpi_facts;

enum {                   // where a gather reads
    FSDPI_GATHER_ALIAS,  // nothing is gathered: the full parameters are the shards
    FSDPI_GATHER_SHARDS, // peers read the shards
    FSDPI_GATHER_STAGED  // peers read this rank's part of the slot, which is filled before
};

// What happens to gradients behind post_backward, in the words of fsdp_model_describe.
#define FSDPI_STEP_LIST(X)                                                                         \
    X(END, "")                                                                                     \
    X(ZERO_UNUSED, "zero what was not stored")                                                     \
    X(WROTE, "written")                                                                            \
    X(KEEP, "keep in the slot")                                                                    \
    X(SUM, "add up in the reduce input")                                                           \
    X(FOLD, "chunk_cat in the slot")                                                               \
    X(USERS, "flags of use")                                                                       \
    X(SCATTER_FUSED, "reduce_scatter that casts, divides and adds to the shard gradient")          \
    X(SCATTER, "reduce_scatter into the shard gradient")                                           \
    X(RESCALE, "divide the shard gradient")                                                        \
    X(PARTIAL_FUSED, "reduce_scatter that adds to the sums of the shard group")                    \
    X(PARTIAL, "reduce_scatter to the sums of the shard group")                                    \
    X(REPLICAS, "all_reduce over the replicas")                                                    \
    X(HOOK, "all_reduce_hook")                                                                     \
    X(OUT, "divide, cast and add to the shard gradient")                                           \
    X(DONE, "done")

enum {
#define FSDP_X(name, text) FSDPI_STEP_##name,
    FSDPI_STEP_LIST(FSDP_X)
#undef FSDP_X
        FSDPI_STEP_COUNT
};

enum { FSDPI_COLLECT_STEPS = 4, FSDPI_REDUCE_STEPS = 8 }; // with their END

typedef struct fsdpi_route {
    uint8_t gather;      // FSDPI_GATHER_*
    uint8_t write_shard; // the caller writes the shard gradient itself, which needs no reduction
    uint8_t from_input;  // one shard: what is reduced further is the reduce input itself
    uint8_t grads_ahead; // gradients are read by a reduction while the next unit's are written
    uint8_t collect[FSDPI_COLLECT_STEPS]; // what was written is brought together on this rank
    uint8_t reduce[FSDPI_REDUCE_STEPS];   // and reduced; none: no reduction is due
    // A reduction divides by `factor` in all: what goes in by `before`; sums of the shard group, as
    // the backend stores them, by `sums`; those over the replicas by `replicas`; then by the rest.
    double before, sums, replicas, factor;
} fsdpi_route;

// One part that is stored as it is gathered, in memory that peers can read.
static int fsdpi_facts_plain(const fsdpi_facts *f) {
    return f->one_part && f->stored == f->gathered && !f->extended && !f->offload;
}

/* Must gradients be brought to the reduce dtype before the reduction? Not if it can read narrower
   ones: as a fused reduction does, or the last copy of a single rank where no hook looks on. */
static int fsdpi_facts_convert(const fsdpi_facts *f, int hook) {
    if (!f->one_train) return 1;
    if (f->gathered == f->reduce) return 0;
    int widens = f->reduce == FSDP_F32 && fsdp_dtype_size(f->gathered) == 2;
    int reads = f->shards > 1 ? f->fuses : f->replicas == 1 && !hook;
    return !(widens && reads);
}

/* An f16 sum has to stay in range. A fused backend sums in f32, and divides what it stores: sums
   that go on to the replicas by a power of two, which loses nothing. For another backend a power of
   two divides what goes in. Source: torch: _get_gradient_divide_factors. */
static void fsdpi_facts_divide(const fsdpi_facts *f, fsdpi_route *r) {
    int ranks = f->shards * f->replicas, narrow = f->reduce == FSDP_F16 && ranks > 1;
    int divides = narrow && f->fuses && !f->custom;
    double factor = f->divide_factor != 0 ? f->divide_factor : (double)ranks, before = 1, sums = 1;
    while (narrow && !divides && fmod(factor, before) == 0 && factor / before > before) before *= 2;
    while (divides && sums < f->shards && 2 * sums <= factor) sums *= 2;
    if (divides && f->replicas == 1) sums = factor;
    r->factor = factor;
    r->before = before;
    r->sums = sums;
    r->replicas = divides ? factor / sums : 1;
}

// Can gradients be written where they end? One rank, nothing to convert, divide or show.
static int fsdpi_facts_write_shard(const fsdpi_facts *f, int adds) {
    return f->shards * f->replicas == 1 && fsdpi_facts_plain(f) && f->reduce == f->stored &&
           f->grad == f->stored && f->sync && (f->divide_factor == 0 || f->divide_factor == 1) &&
           !f->hook && !(f->overwrite && adds);
}

// The sums of the shard group, over W > 1 ranks. Returns whether they are the shard gradient.
static int fsdpi_route_scatter(const fsdpi_facts *f, int adds, uint8_t **step) {
    // A fused backend sums in f32 or f64; a narrower reduce dtype has to be rounded to, as upstream
    // does, so that nothing can be fused with it.
    int wide = f->reduce == FSDP_F32 || f->reduce == FSDP_F64;
    int is_last = f->replicas == 1 && f->one_train && !f->hook && !f->offload;
    if (is_last && f->fuses && wide) {
        *(*step)++ = FSDPI_STEP_SCATTER_FUSED;
        return 1;
    }
    if (is_last && !f->fuses && f->reduce == f->grad && !adds) {
        *(*step)++ = FSDPI_STEP_SCATTER;
        *(*step)++ = FSDPI_STEP_RESCALE;
        return 1;
    }
    *(*step)++ = f->fuses && wide ? FSDPI_STEP_PARTIAL_FUSED : FSDPI_STEP_PARTIAL;
    return 0;
}

// The route for these facts. adds: to a reduced gradient that the shard gradient holds already.
static fsdpi_route fsdpi_route_of(const fsdpi_facts *f, int adds) {
    fsdpi_route r;
    uint8_t *step = r.collect;
    int ranks = f->shards * f->replicas, plain = fsdpi_facts_plain(f), reduced = 0;
    int copies = f->debug && f->shards == 1; // on one rank, too, a kept pointer shall find NaN
    int due = f->sync && (f->all_reduce || f->shards > 1 || f->replicas == 1);
    int sum = fsdpi_facts_convert(f, f->hook) ||
              (!due && (f->overwrite || f->gathered != f->reduce));
    memset(&r, 0, sizeof r);
    r.gather = (uint8_t)(!plain || copies ? FSDPI_GATHER_STAGED
                         : f->shards > 1  ? FSDPI_GATHER_SHARDS
                                          : FSDPI_GATHER_ALIAS);
    r.write_shard = (uint8_t)fsdpi_facts_write_shard(f, adds);
    r.from_input = f->shards == 1;
    r.grads_ahead = (uint8_t)!fsdpi_facts_convert(f, 0);
    fsdpi_facts_divide(f, &r);
    if (f->overwrite) *step++ = FSDPI_STEP_ZERO_UNUSED;
    *step++ = FSDPI_STEP_WROTE;
    *step = (uint8_t)(sum ? FSDPI_STEP_SUM : FSDPI_STEP_KEEP);
    if (!due) return r;
    step = r.reduce;
    *step++ = FSDPI_STEP_FOLD;
    if (ranks > 1) *step++ = FSDPI_STEP_USERS;
    if (f->shards > 1) reduced = fsdpi_route_scatter(f, adds, &step);
    if (f->replicas > 1 && !f->all_reduce) return r; // the sums wait for a later all-reduce
    if (f->replicas > 1) *step++ = FSDPI_STEP_REPLICAS;
    if (f->hook) *step++ = FSDPI_STEP_HOOK;
    if (!reduced) *step++ = FSDPI_STEP_OUT;
    *step = FSDPI_STEP_DONE;
    return r;
}

/* ==== core/objects.h ========================================================================
   what a world, a mesh, a model and a unit are made of */

#define FSDPI_TEXT 1024

enum { // ops run at once, in threads, on the device: FSDP_RUN_*
    FSDPI_INLINE = FSDP_RUN_INLINE,
    FSDPI_LANES = FSDP_RUN_LANES,
    FSDPI_NATIVE = FSDP_RUN_STREAMS
};

typedef struct fsdpi_lane fsdpi_lane;
typedef struct fsdpi_subgroup fsdpi_subgroup;
typedef struct fsdpi_timeline fsdpi_timeline;

// A recorded event of a device's stream. behind: of each stream, and of its own, the number of the
// last mark before it.
#define FSDPI_POINTS 16u
typedef struct fsdpi_event {
    void *event;
    uint64_t behind[FSDP_STREAM_COUNT];
} fsdpi_event;

typedef struct fsdpi_order {
    uint64_t behind[FSDP_STREAM_COUNT]; // of the stream as it is now
    uint64_t recorded;                  // points so far: the newest are kept
    uint64_t due;                       // marks that are to be recorded before more work comes
    const fsdp_buf *due_for;            // the buffer of the only one, or NULL
} fsdpi_order;

struct fsdp_world {
    fsdp_boot boot;
    int rank, size;
    int log_level;
    uint32_t stuck;           // work on the device did not end in time
    uint32_t *state;          // 1 + fsdp_status of the first failure; 0: see fsdpi_own_word
    uint32_t fail_lock;       // fsdpi_lock of the first failure: worker threads may have it
    char failure[FSDPI_TEXT]; // its text, written once
    char error[FSDPI_TEXT];   // of the last call of the caller's thread that failed
    char job[128], store[320];
    const fsdp_comm_ops *comm_ops; // NULL: one rank
    fsdp_comm *comm, *reduce_comm; // equal, unless two streams may run collectives at a time
    fsdp_caps caps;
    const fsdp_device_ops *device_ops;
    fsdp_device *device;
    int mode;                             // FSDPI_INLINE, ...
    const char *because;                  // why: a part of a text
    void *streams[FSDP_STREAM_COUNT];     // FSDPI_NATIVE; COMPUTE may be the caller's
    fsdpi_order order[FSDP_STREAM_COUNT]; // likewise
    fsdpi_event points[FSDP_STREAM_COUNT * FSDPI_POINTS];
    void *own_stream;                     // the device's COMPUTE
    void *fence;                          // an event to wait for all of them
    fsdpi_lane *lanes[FSDP_STREAM_COUNT]; // FSDPI_LANES; COMPUTE has none; may be the same one
    fsdpi_timeline *timeline;             // FSDPI_NATIVE: records whose times are awaited, or NULL
    int32_t num_comms;                    // numbers given to communicators so far
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
    int alone;    // a process plays one rank, and there are no others: chosen by name only
} fsdpi_backend;

struct fsdp_mesh {
    fsdp_world *world;
    int ndim;
    int32_t shape[FSDP_MAX_DIMS], coord[FSDP_MAX_DIMS]; // coord: -1 when this rank is outside
    char *names[FSDP_MAX_DIMS];
    int32_t *ranks;                        // [product of shape]
    int root_numel;                        // ranks of the mesh that it was sliced from, or its own
    fsdp_comm *gather_comm[FSDP_MAX_DIMS]; // NULL: a group of one, or outside
    fsdp_comm *reduce_comm[FSDP_MAX_DIMS]; // equal to gather_comm unless lanes may run both
    int32_t comm_number[FSDP_MAX_DIMS];    // of gather_comm; reduce_comm has the next one
    uint8_t borrowed[FSDP_MAX_DIMS];       // the groups of this dim belong to another mesh
    fsdp_mesh *next;
};

// A group that is made at its first use: n neighbouring ranks for reshard_after_forward = n, or a
// whole dim once more, for what extensions run on a stream.
struct fsdpi_subgroup {
    const fsdp_mesh *mesh;
    int dim, size, stream;
    int32_t number;
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
    uint8_t held, pool, as; // pool: which counts its bytes; as: for which a unit takes it
    uint8_t pinned;         // host memory of the device, which peers cannot read
    uint8_t part;           // it lies inside of another buffer, which owns the memory
    int32_t number;         // in the order of making
};

typedef struct fsdpi_class { // slots of one pool and size
    int pool;
    size_t bytes;
    int units, ahead; // ahead: filled while another is in use, so two, unless everything is inline
    fsdp_buf **slots;
    int count, cap;
} fsdpi_class;

enum {                     // what is known of a parameter's use, a set
    FSDPI_USE_WRITTEN = 1, // this rank wrote its gradient to the slot that the unit holds
    FSDPI_USE_USED = 2,    // this rank wrote a gradient that is not reduced yet
    FSDPI_USE_FLAGGED = 4, // USED as it stands in the unit's flags
    FSDPI_USE_PENDING = 8, // it was USED, and that is in the sums of a reduction that goes on
    FSDPI_USE_REDUCED = 16 // a rank used it, and its gradient is in the shard gradient
};

typedef struct fsdpi_param {
    char *name;
    void *user;
    fsdp_dtype dtype;
    int32_t ordinal, requires_grad, keep_dtype;
    int32_t part;             // index in the unit's parts
    int32_t train_index;      // place among the unit's trainables; -1: frozen
    fsdp_layout_param lay;    // shard_offset in the flat block, full_offset in the GATHER slot
    int64_t grad_offset;      // of the full gradient in the GRAD slot
    int64_t old_offset;       // of the shard in the layout before, while the model is laid out anew
    fsdp_dtype old_dtype;     // likewise
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
    fsdpi_work copy_in, copy_out, chunk_cat, divide, sum, red_out, rescale; // blocks
} fsdpi_part;

// What fully_shard was told.
typedef struct fsdpi_desc {
    char *name;
    void *user;
    int index, num_params; // index: in the model
    fsdp_mesh_info info;
    fsdp_comm *reduce_comm, *replicate_comm, *slice_comm; // info.shard_comm gathers
    fsdp_dtype policy_dtype, policy_reduce, output_dtype; // param_dtype, reduce_dtype; KEEP: none
    int keep_inputs;                                      // activations are not cast
    int slices; // n of reshard_after_forward = n, as made; 0: another mode
} fsdpi_desc;

// What setters change.
typedef struct fsdpi_options {
    int reshard_after_forward; // FSDP_RESHARD_ALWAYS or _NEVER, or n
    uint8_t reshard_after_backward, sync, all_reduce, unshard_in_backward, reduce_unused;
    double divide_factor;    // 0: the number of ranks
    int32_t *prefetch[2];    // indices of units: forward, backward
    int32_t num_prefetch[2]; // 0: none, or the implicit one
    fsdp_all_reduce_hook all_reduce_hook;
    void *all_reduce_user;
    fsdp_custom_comm custom[3]; // all_gather, reduce_scatter, all_reduce; NULL: the backend's
    void *custom_user[3];
} fsdpi_options;

// Records that hooks emit, made at commit: each kind stands once, or once for each part.
enum {
    FSDPI_OPS_COPY_IN, // and the calls before a gather
    FSDPI_OPS_GATHER,
    FSDPI_OPS_COPY_OUT, // and the calls behind it
    FSDPI_OPS_SLICE,
    FSDPI_OPS_SLICE_GATHER,
    FSDPI_OPS_WAIT, // the caller's stream, for what is gathered
    FSDPI_OPS_ZERO, // GRAD; from here on gradients
    FSDPI_OPS_SUM,  // GRAD -> RIN
    FSDPI_OPS_FOLD, // in GRAD
    FSDPI_OPS_FOLD_DIVIDED,
    FSDPI_OPS_USERS,
    FSDPI_OPS_SCATTER, // -> shard gradients
    FSDPI_OPS_RESCALE,
    FSDPI_OPS_PARTIAL, // -> ROUT
    FSDPI_OPS_ADD,     // a fresh ROUT -> the one that waits
    FSDPI_OPS_REPLICAS,
    FSDPI_OPS_HOOK,
    FSDPI_OPS_OUT, // -> shard gradients
    FSDPI_OPS_COUNT
};

typedef struct fsdpi_template {
    fsdp_op op;       // all but what a hook fills in
    int64_t begin;    // of what is read, in bytes of its buffer
    uint8_t src, dst; // pools of the unit's slots; SHARD, SGRAD: the buffer is in op already
} fsdpi_template;

// Where everything lies. Measured by arrange, with lists and records from commit on.
typedef struct fsdpi_layout {
    int num_train, num_parts, train_parts;       // train_parts: with trainables
    uint64_t hash;                               // of all that ranks must have given alike
    uint8_t agree[FSDP_AGREE_COUNT];             // of its parts
    fsdpi_part *parts;                           // [num_params] places
    fsdp_dtype reduce_dtype, gather_dtype;       // gather: U8: several parts, gathered as bytes
    int64_t slot_bytes, grad_bytes, slice_bytes; // of GATHER, GRAD, SLICE
    int64_t train_numel;                         // shards of the trainables of all parts
    int64_t reduce_numel;         // W * (train_numel + users): RIN, and the first part of GRAD
    int64_t users_offset;         // in GRAD and RIN: row k of `num_train` flags for rank k
    int64_t users_base;           // of the counts, in the block of shard gradients
    int users_part;               // the part in whose block that is: the first with trainables
    int classes[FSDP_POOL_COUNT]; // index in model->classes, -1: none
    int pad_rin;                  // staging has padding that no block covers
    void *lists;                  // one allocation for what follows
    int64_t gather_begin; // of the unit's shards in their block: from there all_gather counts
    fsdpi_work all_gather, slice_gather;      // segments
    fsdpi_work reduce_scatter[2], to_rout[2]; // segments of GRAD, and of RIN
    fsdpi_work slice_copy, partial, users;    // blocks; partial: the whole reduce output
    fsdpi_template *ops[FSDPI_OPS_COUNT + 1]; // where each kind begins, and the last one ends
} fsdpi_layout;

// Who used which parameter.
typedef struct fsdpi_usage {
    uint64_t *use;      // FSDPI_USE_* of each parameter, a byte for each: see fsdpi_use
    char *flags, *wide; // num_train flags in param_dtype and in reduce_dtype: what ops copy
    double value;       // of those that are not zero
    uint8_t in_flight;  // a copy of them may not be done yet
    uint8_t counted;    // counts of users came with this step's reduction
} fsdpi_usage;

enum { // what the shard gradient holds
    FSDPI_GRADS_NONE,
    FSDPI_GRADS_ZERO,
    FSDPI_GRADS_REDUCED // a reduced gradient, to which the next one is added
};

enum { // where the newest of this rank's gradients are that have not been reduced
    FSDPI_GRADS_NOWHERE,
    FSDPI_GRADS_IN_SHARD, // written into the shard gradient itself
    FSDPI_GRADS_WRITTEN,  // where the caller writes: the slot GRAD
    FSDPI_GRADS_SUMMED    // in the reduce dtype: the slot RIN
};

// Gradients of a unit. Sums of the shard group that wait for an all-reduce are in the slot ROUT.
typedef struct fsdpi_grads {
    uint8_t shard, newest;  // FSDPI_GRADS_*
    uint8_t waits;          // sums were in ROUT when this reduction began
    double divided, summed; // by what those in RIN, and the sums in ROUT, have been divided
} fsdpi_grads;

// What a step changes.
typedef struct fsdpi_state {
    uint8_t training, storage, stale;
    uint8_t ahead;      // gathered by a prefetch that nobody waited for yet
    int32_t forwards;   // grad-enabled ones that have not run backward: n of the table
    int32_t last_order; // newest entry in the record of forwards, or -1
    fsdpi_grads grads;
    fsdp_buf *slot[FSDP_POOL_ROUT + 1]; // that the unit holds, by pool
} fsdpi_state;

static fsdpi_state fsdpi_state_new(void) {
    fsdpi_state s = FSDP_ZERO;
    s.last_order = -1;
    s.grads.shard = FSDPI_GRADS_ZERO; // new blocks are
    s.grads.divided = s.grads.summed = 1;
    return s;
}

struct fsdp_unit {
    fsdp_model *model;
    fsdpi_param *params;
    fsdpi_desc desc;
    fsdpi_options options;
    fsdpi_layout layout;
    fsdpi_route route[2]; // [1]: where the shard gradient holds a reduced gradient
    uint32_t told;        // calls, as bits, that came in a wrong state in this step
    fsdpi_usage usage;
    fsdpi_state state;
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

// What is attached to a model, in order.
typedef struct fsdpi_attached {
    fsdp_extension e;
    struct fsdpi_attached *next;
} fsdpi_attached;

enum { FSDPI_NAMES = 16, FSDPI_NAME = 32 }; // names that extensions register; length with its end

typedef struct fsdpi_names {
    int count;
    char text[FSDPI_NAMES][FSDPI_NAME];
} fsdpi_names;

// What extensions of a model listen to: bits of fsdp_model.watch.
enum { FSDPI_CALLS = 1, FSDPI_OPS = 2, FSDPI_SLOTS = 4, FSDPI_TIMES = 8, FSDPI_RECORDS = 10 };

struct fsdp_model {
    fsdp_world *world;
    fsdp_model_desc desc; // resolved
    fsdp_mesh *own_mesh;  // made when the desc gave none
    fsdp_mesh_info info;
    fsdp_comm *shard_reduce_comm;
    int mixed;      // ranks of the mesh hold different parameters, or a unit has another mesh
    int grad_hooks; // post_accumulate hooks have been set
    const fsdp_unit *outside; // a unit whose mesh has ranks that the model's mesh lacks, or NULL
    fsdp_unit **units;
    int num_units, cap_units, num_params;
    fsdpi_flat_block flats[FSDP_DTYPE_COUNT];
    fsdpi_class *classes;
    int num_classes, cap_classes;
    int committed;
    int backward; // the phase
    int grad_enabled, is_last_backward;
    uint8_t call_state; // training state that ops of the current call are labelled with
    uint64_t seq, step, release_seq;
    uint64_t given;      // hash of what fsdp_agree was given
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
    fsdp_block *norm_blocks;     // [num_params] of the norm, [num_params] of what clip scales
    fsdpi_attached *attached;    // extensions, in the order in which they are asked
    const fsdpi_attached *asked; // whose function `call` is at work, or NULL
    uint8_t watch;               // FSDPI_CALLS, ...: what any of them listens to
    fsdpi_names labels, pools;
    uint64_t settings; // options, as a number: see fsdpi_setting
    int asking;        // calls of functions of extensions that have not returned
    int rehearsing;    // no record runs, and every slot is the extension's
    int32_t num_bufs;  // numbers given to buffers so far
    fsdp_counters counters;
    int64_t host_bytes;
    int32_t pool_slots[FSDP_POOL_MAX];
    int64_t pool_bytes[FSDP_POOL_MAX];
    fsdp_model *next;
};

/* ==== core/error.h ==========================================================================
   error texts, and the way out for every message */

// Invariant: the first failure of a world stays; later calls return it. The only writable static is
// a thread's text for failures without a world.

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

static int fsdpi_is_child(const fsdp_world *w) { return !FSDPI_LOAD(w->state); }

// A process that a rank has forked has a copy of the world, which is nobody's rank.
static FSDPI_NOINLINE fsdp_status fsdpi_why_failed(const fsdp_world *w, uint32_t state) {
    fsdp_world *copy = (fsdp_world *)(uintptr_t)w;
    if (state) return (fsdp_status)(state - 1);
    snprintf(copy->failure, sizeof copy->failure,
             "rank %d: [E215] process %d is a child that the rank's process has forked: use the "
             "world in the rank's process alone, and call exec or _exit in the child",
             w->rank, (int)getpid());
    fsdpi_log(w, FSDP_LOG_ERROR, FSDP_ERR_INVALID_STATE, w->failure);
    copy->log_level = 0; // once
    return FSDP_ERR_INVALID_STATE;
}

static inline fsdp_status fsdpi_failed(const fsdp_world *w) {
    uint32_t state = FSDPI_LOAD(w->state);
    return state == 1 ? FSDP_OK : fsdpi_why_failed(w, state);
}

/* The world fails: sticky here, and told to the peers. The first failure stays, and its text is
   there before its status can be seen. Returns the status that stays. */
FSDP_PRINTF(3, 4)
static fsdp_status fsdpi_world_fail(fsdp_world *w, fsdp_status status, const char *fmt, ...) {
    char text[FSDPI_TEXT];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (fsdpi_is_child(w)) return fsdpi_failed(w); // a thread that it has not may hold the lock
    fsdpi_lock(&w->fail_lock);
    fsdp_status earlier = fsdpi_failed(w);
    if (!earlier) {
        snprintf(w->failure, sizeof w->failure, "%s", text);
        FSDPI_STORE(w->state, 1 + (uint32_t)status);
    }
    fsdpi_unlock(&w->fail_lock);
    if (earlier) return earlier;
    fsdpi_log(w, FSDP_LOG_ERROR, status, text);
    if (w->comm) w->comm_ops->abort(w->comm, status, text);
    return status;
}

/* This call fails: the text is recorded, and logged if `logs`. Returns status. The world goes on,
   but for one whose device does not end its work: there frees leave memory alone, and fills leave
   it dirty. */
FSDP_PRINTF(4, 0)
static fsdp_status fsdpi_fail_text(fsdp_world *w, fsdp_status status, int logs, const char *fmt,
                                   va_list args) {
    char text[FSDPI_TEXT];
    int used = w && w->rank >= 0 ? snprintf(text, sizeof text, "rank %d: ", w->rank) : 0;
    vsnprintf(text + used, sizeof text - (size_t)used, fmt, args);
    fsdpi_set_error(w, text);
    if (logs) fsdpi_log(w, FSDP_LOG_ERROR, status, text);
    return w && FSDPI_LOAD(&w->stuck) ? fsdpi_world_fail(w, status, "%s", text) : status;
}
FSDP_API fsdp_status fsdp_fail(fsdp_world *w, fsdp_status status, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    status = fsdpi_fail_text(w, status, 1, fmt, args);
    va_end(args);
    return status;
}
FSDP_PRINTF(4, 5)
static fsdp_status fsdpi_fail_once(fsdp_world *w, fsdp_status status, int is_first, const char *fmt,
                                   ...) {
    va_list args;
    va_start(args, fmt);
    status = fsdpi_fail_text(w, status, is_first, fmt, args);
    va_end(args);
    return status;
}

// An argument, a field of a desc or an environment variable is wrong.
FSDP_PRINTF(2, 3)
static fsdp_status fsdpi_bad(fsdp_world *w, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fsdp_status status = fsdpi_fail_text(w, FSDP_ERR_INVALID_ARG, 1, fmt, args);
    va_end(args);
    return status;
}

// `which`: the arguments of the call that must not be NULL.
static fsdp_status fsdpi_null(fsdp_world *w, const char *call, const char *which) {
    return fsdpi_bad(w, "[E101] %s: %s is NULL", call, which);
}
static fsdp_status fsdpi_null_of(fsdp_model *m, const char *call, const char *which) {
    return fsdpi_null(m ? m->world : NULL, call, which);
}

// The host's allocator has failed. name: of a unit or an extension, or "".
static fsdp_status fsdpi_no_memory(fsdp_world *w, const char *what, const char *name,
                                   size_t bytes) {
    return fsdp_fail(w, FSDP_ERR_OUT_OF_MEMORY,
                     "[E301] %s%s%s%s: the allocator has returned NULL for %llu bytes of memory",
                     what, *name ? " '" : "", name, *name ? "'" : "", (unsigned long long)bytes);
}

// A call of all ranks has failed on this one, or status is FSDP_OK: the others must not wait.
static fsdp_status fsdpi_fail_together(fsdp_world *w, fsdp_status status) {
    if (status == FSDP_OK || w->size == 1 || fsdpi_failed(w)) return status;
    return fsdpi_world_fail(w, status, "%s", w->error);
}

/* Copies a desc into a zeroed struct of this header's size. An older program's struct is shorter:
   its size says so, and its end canary is then the last thing in it. */
FSDP_API fsdp_status fsdp_desc_read(fsdp_world *w, void *dst, const void *src, size_t size,
                                    const char *what) {
    uint32_t given, canary;
    uint64_t end;
    memset(dst, 0, size);
    if (!src) return FSDP_OK;
    memcpy(&given, src, sizeof given);
    memcpy(&canary, (const char *)src + sizeof given, sizeof canary);
    if (given == 0) given = (uint32_t)size;
    if (given > size || given < 24)
        return fsdpi_bad(w,
                         "[E102] %s.size is %u, expected 0 or 24..%u: zero the struct before you "
                         "fill it, and build with the library's header",
                         what, given, (unsigned)size);
    memcpy(&end, (const char *)src + given - sizeof end, sizeof end);
    if (canary || end)
        return fsdpi_bad(w, "[E103] %s: a canary is not 0: zero the struct before use", what);
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
#if defined(__GLIBC__)
    void *frames[32];
    int num = fsdpi_backtrace(frames, 32);
    char **names = fsdpi_backtrace_symbols(frames, num);
    for (int i = 0; names && i < num; i++)
        fsdpi_log(w, FSDP_LOG_ERROR, FSDP_ERR_INTERNAL, names[i]);
    free(names);
#endif
    return fsdpi_world_fail(w, FSDP_ERR_INTERNAL, "[E299] [Rank %d] %s: %s does not hold", w->rank,
                            where, what);
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
static fsdp_status fsdpi_grow(fsdp_model *m, void **array, int count, int *cap, size_t size,
                              const char *what, const char *name) {
    if (count < *cap) return FSDP_OK;
    int wanted = *cap ? 2 * *cap : 8;
    void *bigger = fsdpi_model_alloc(m, (size_t)wanted * size);
    if (!bigger) return fsdpi_no_memory(m->world, what, name, (size_t)wanted * size);
    if (count) memcpy(bigger, *array, (size_t)count * size);
    fsdpi_model_free(m, *array);
    *array = bigger;
    *cap = wanted;
    return FSDP_OK;
}

/* ==== core/env.h ============================================================================
   the one reader of environment variables

   A variable that is not set, or empty, says nothing; one that is set is right, or fsdp_init
   fails and names it. */

// NULL: not set, or empty.
static const char *fsdpi_env(const char *name) {
    const char *text = name ? getenv(name) : NULL;
    return text && *text ? text : NULL;
}

// An integer from min to max, flags included: 0 or 1. *out stays as it is if the variable says
// nothing. After a failure *error has the text.
static fsdp_status fsdpi_env_int(const char *name, int min, int max, int *out, fsdpi_text *error) {
    const char *text = fsdpi_env(name);
    if (!text) return FSDP_OK;
    char *end;
    long value = strtol(text, &end, 10);
    if (!*end && value >= min && value <= max) {
        *out = (int)value;
        return FSDP_OK;
    }
    fsdpi_say(error, "[E509] variable %s is '%s', expected an integer from %d to %d", name, text,
              min, max);
    return FSDP_ERR_INVALID_ARG;
}

static fsdp_status fsdpi_world_env_int(fsdp_world *w, const char *name, int min, int max,
                                       int *out) {
    char text[FSDPI_TEXT];
    fsdpi_text error = {text, sizeof text, 0};
    fsdp_status status = fsdpi_env_int(name, min, max, out, &error);
    return status ? fsdp_fail(w, status, "%s", text) : FSDP_OK;
}

/* ==== core/launch.h =========================================================================
   rank, size, the job's name and the store's address from a launcher's environment */

// What launchers set. The first one whose rank and `needs` are set is taken: mpirun's variables
// before those of the srun that started its daemons. Slurm sets rank and size for the script of a
// batch job as well; only a step of srun has a step id.
typedef struct fsdpi_launcher {
    const char *rank, *size, *local, *needs;
    const char *here, *hosts; // how many ranks this host has, how many hosts the job; or NULL
    const char *job[4];       // parts of a name that is equal on all ranks and unique on the host
} fsdpi_launcher;

// clang-format off
static const fsdpi_launcher fsdpi_launchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "RANK", "LOCAL_WORLD_SIZE", NULL,
        {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", NULL,
        {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", NULL, NULL}},
    {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", NULL,
        {"PMI_JOBID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"}},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_RANK", "MPI_LOCALNRANKS", NULL,
        {"PMI_JOBID", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID"}},
    {"FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_TASK_RANK", NULL,
        "FLUX_JOB_NNODES", {"FLUX_JOB_ID", NULL, NULL, NULL}},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", NULL,
        "SLURM_STEP_NUM_NODES", {"SLURM_JOB_ID", "SLURM_STEP_ID", NULL, NULL}},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID", NULL,
        "SLURM_NNODES", {"SLURM_JOB_ID", "SLURM_STEP_ID", NULL, NULL}},
};
// clang-format on

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
    int rank = 0, size = 1, has_rank = fsdpi_env(l->rank) != NULL,
        has_size = fsdpi_env(l->size) != NULL;
    fsdp_status status = fsdpi_world_env_int(w, l->rank, 0, 0x7FFFFFFF, &rank);
    if (!status) status = fsdpi_world_env_int(w, l->size, 1, 0x7FFFFFFF, &size);
    int local = rank;
    if (!status) status = fsdpi_world_env_int(w, l->local, 0, 0x7FFFFFFF, &local);
    if (status) return status;
    if (has_rank != has_size)
        return fsdpi_bad(w, "[E502] environment variable %s is set and %s is not: set both or none",
                         has_rank ? l->rank : l->size, has_rank ? l->size : l->rank);
    if (rank >= size)
        return fsdpi_bad(w, "[E503] variable %s is %d, expected less than %s, which is %d", l->rank,
                         rank, l->size, size);
    d->rank = rank;
    d->world_size = size;
    d->local_rank = local;
    return FSDP_OK;
}

// A name that is equal on all ranks of the job and unique on the host; "": nothing tells one, which
// is no fault of ranks that do not meet.
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
    if (!job && !parts) *out = 0;
    if (used < 0 || (size_t)used >= cap)
        return fsdpi_bad(w, "[E505] the job's name is longer than %u bytes: shorten FSDP_JOB_ID",
                         (unsigned)cap - 1);
    return FSDP_OK;
}

// Whether the launcher tells that it has started some of `size` ranks on other hosts.
static fsdp_status fsdpi_launcher_is_spread(fsdp_world *w, const fsdpi_launcher *l, int size,
                                            int *out) {
    int here = size, hosts = 1;
    fsdp_status status = fsdpi_world_env_int(w, l->here, 1, 0x7FFFFFFF, &here);
    if (!status) status = fsdpi_world_env_int(w, l->hosts, 1, 0x7FFFFFFF, &hosts);
    *out = hosts > 1 || here < size;
    return status;
}

// A number that names a job or a step: any will do.
static uint64_t fsdpi_env_id(const char *name) {
    const char *text = fsdpi_env(name);
    long value = text ? strtol(text, NULL, 10) : 0;
    return value > 0 ? (uint64_t)value : 0;
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
    const uint64_t job = fsdpi_env_id("SLURM_JOB_ID");
    const uint64_t step = fsdpi_env_id("SLURM_STEP_ID");
    return snprintf(out, cap, "tcp://%s:%d", host, 20000 + (int)((job * 131 + step) % 12000));
}

/* The address where ranks meet, for backends that need one, in the form of fsdp_world_desc.store.
   "": they are on several hosts and the launcher does not say where; no fault of those who do not
   ask, so who needs an address says what to do: FSDPI_NO_STORE. */
#define FSDPI_NO_STORE                                                                             \
    "[E724] ranks are on several hosts, and the launcher does not name the host of rank 0: set "   \
    "MASTER_ADDR (that host) and MASTER_PORT (a free port there) on all ranks, as in 'mpirun -x "  \
    "MASTER_ADDR=HOST -x MASTER_PORT=29500 ...', or FSDP_STORE=tcp://HOST:PORT"

static fsdp_status fsdpi_store_name(fsdp_world *w, const fsdp_world_desc *d, char *out,
                                    size_t cap) {
    const char *store = d->store && *d->store ? d->store : fsdpi_env("FSDP_STORE");
    const char *host = fsdpi_env("MASTER_ADDR"), *port = fsdpi_env("MASTER_PORT");
    const fsdpi_launcher *l = fsdpi_launcher_find();
    int used = 0, is_spread = 0;
    fsdp_status status = fsdpi_launcher_is_spread(w, l, d->world_size, &is_spread);
    if (status) return status;
    if (store) {
        used = snprintf(out, cap, "%s", store);
    } else if (host && port) {
        const int bare = strchr(host, ':') && *host != '['; // an IPv6 address
        used = snprintf(out, cap, "tcp://%s%s%s:%s", bare ? "[" : "", host, bare ? "]" : "", port);
    } else if (is_spread) {
        if (strcmp(l->rank, "SLURM_PROCID") == 0) used = fsdpi_slurm_store(out, cap);
        if (used == 0) *out = 0;
    } else {
        used = snprintf(out, cap, "host:");
    }
    if (used < 0 || (size_t)used >= cap)
        return fsdpi_bad(w,
                         "[E506] the address where ranks meet is longer than %u bytes: give a "
                         "shorter fsdp_world_desc.store, FSDP_STORE or MASTER_ADDR",
                         (unsigned)cap - 1);
    return FSDP_OK;
}

// Whether the launcher has started ranks of this world on other hosts too.
static fsdp_status fsdpi_env_is_spread(fsdp_world *w, const fsdp_world_desc *d, int *out) {
    const fsdpi_launcher *l = fsdpi_launcher_find();
    int size = 0;
    *out = 0;
    if (w->size == 1 || d->threads || d->job || strncmp(w->store, "host:", 5) == 0) return FSDP_OK;
    fsdp_status status = fsdpi_world_env_int(w, l->size, 1, 0x7FFFFFFF, &size);
    return status || size != w->size ? status : fsdpi_launcher_is_spread(w, l, size, out);
}

static fsdp_status fsdpi_env_log_level(fsdp_world *w, int *out) {
    static const char *const names[] = {"", "error", "warn", "info", "none"};
    const char *text = fsdpi_env("FSDP_LOG_LEVEL");
    *out = FSDP_LOG_WARN;
    if (!text) return FSDP_OK;
    for (int i = FSDP_LOG_ERROR; i <= FSDP_LOG_NONE; i++)
        if (strcmp(text, names[i]) == 0) {
            *out = i;
            return FSDP_OK;
        }
    return fsdpi_bad(
        w, "[E507] variable FSDP_LOG_LEVEL is '%s', expected error, warn, info or none", text);
}

/* ==== core/attach.h =========================================================================
   the order in which the library calls extensions */

// If fsdp_model.watch is 0, nothing of this is called. fsdp_attach itself is in means.h.

/* Has an extension answered a call? *status is the result then. A call that an extension makes
   itself when it is asked goes to those behind it. */
static FSDPI_NOINLINE int fsdpi_answered(fsdp_model *m, fsdp_unit *u, int call,
                                         fsdp_status *status) {
    const fsdpi_attached *asker = m->asked;
    int answered = 0;
    m->asking++;
    for (const fsdpi_attached *a = asker ? asker->next : m->attached; a && !answered; a = a->next) {
        if (!a->e.call) continue;
        m->asked = a;
        answered = a->e.call(a->e.user, m, u, call, status);
    }
    m->asked = asker;
    m->asking--;
    return answered;
}

/* Has an extension taken a record? It may have changed the copy before; what its order was derived
   from, and what it is, stay. */
static int fsdpi_taken(fsdp_model *m, fsdp_op *op) {
    const fsdp_op was = *op;
    int taken = 0;
    m->asking++;
    for (const fsdpi_attached *a = m->attached; a && !taken; a = a->next)
        taken = a->e.op && a->e.op(a->e.user, m, op);
    taken |= m->rehearsing;
    m->asking--;
    op->kind = was.kind;
    op->stream = was.stream;
    op->seq = was.seq;
    op->src = was.src;
    op->dst = was.dst;
    if (!op->call) op->call = was.call;
    return taken;
}

// A slot for a unit from an extension, or NULL; `released`: one that is given back.
static FSDPI_NOINLINE fsdp_buf *fsdpi_other_slot(fsdp_unit *u, int pool, fsdp_buf *released) {
    fsdp_buf *slot = NULL;
    u->model->asking++;
    for (const fsdpi_attached *a = u->model->attached; a && !slot; a = a->next) {
        fsdp_buf *answer = a->e.buffer ? a->e.buffer(a->e.user, u->model, u, pool, released) : NULL;
        if (!released) slot = answer;
    }
    u->model->asking--;
    return slot;
}

static void fsdpi_tell_model(fsdp_model *m, const fsdp_op *op, int64_t begin_ns, int64_t end_ns) {
    for (const fsdpi_attached *a = m->attached; a; a = a->next)
        if (a->e.ran) a->e.ran(a->e.user, m, op, begin_ns, end_ns);
}

// A record has run: its model's extensions are told; of the world's, those of all models. Worker
// threads have records of models only.
static void fsdpi_tell_ran(fsdp_world *w, const fsdp_op *op, int64_t begin_ns, int64_t end_ns) {
    if (op->model) fsdpi_tell_model(op->model, op, begin_ns, end_ns);
    for (fsdp_model *m = op->model ? NULL : w->models; m; m = m->next)
        fsdpi_tell_model(m, op, begin_ns, end_ns);
}

static void fsdpi_tell_layout(fsdp_model *m) {
    for (const fsdpi_attached *a = m->attached; a; a = a->next)
        if (a->e.relayout) a->e.relayout(a->e.user, m);
}

// What the extensions of a model listen to.
static void fsdpi_watch(fsdp_model *m) {
    int watch = 0;
    for (const fsdpi_attached *a = m->attached; a; a = a->next) {
        if (a->e.call) watch |= FSDPI_CALLS;
        if (a->e.op) watch |= FSDPI_OPS;
        if (a->e.buffer) watch |= FSDPI_SLOTS;
        if (a->e.ran) watch |= FSDPI_TIMES;
    }
    if (m->rehearsing) watch |= FSDPI_OPS | FSDPI_SLOTS; // whatever the extension has
    m->watch = (uint8_t)watch;
}

// The place of a communicator in the order of making, and its ranks: 1 is the world's, 0 is none.
static int32_t fsdpi_comm_number(const fsdp_world *w, const fsdp_comm *comm, int32_t *size) {
    *size = w->size;
    if (!comm || comm == w->comm) return comm != NULL;
    if (comm == w->reduce_comm) return 2;
    for (const fsdp_mesh *mesh = w->meshes; mesh; mesh = mesh->next)
        for (int d = 0; d < mesh->ndim; d++) {
            if (mesh->borrowed[d]) continue;
            *size = mesh->shape[d];
            if (comm == mesh->gather_comm[d]) return mesh->comm_number[d];
            if (comm == mesh->reduce_comm[d]) return mesh->comm_number[d] + 1;
        }
    for (const fsdpi_subgroup *sub = w->subgroups; sub; sub = sub->next) {
        *size = sub->size;
        if (comm == sub->comm) return sub->number;
    }
    return 0;
}

static int64_t fsdpi_now(const fsdp_world *w) { return w->boot.clock.now_ns(w->boot.clock.user); }

/* -------------------------------------------------------------------------------------------- */
// Names of records, labels and pools.

FSDP_API const char *fsdp_op_name(int kind) {
    static const char *const names[FSDP_OP_COUNT] = {FSDP_OP_LIST(FSDPI_TEXT_OF)};
    return kind >= 0 && kind < FSDP_OP_COUNT ? names[kind] : "?";
}

FSDP_API const char *fsdp_label_name(int label) {
    static const char *const names[FSDP_LABEL_COUNT] = {FSDP_LABEL_LIST(FSDPI_TEXT_OF)};
    if (label >= FSDP_LABEL_COUNT && label - FSDP_LABEL_COUNT < FSDPI_NAMES) return "extension";
    return label >= 0 && label < FSDP_LABEL_COUNT ? names[label] : "?";
}

FSDP_API const char *fsdp_pool_name(int pool) {
    static const char *const names[FSDP_POOL_COUNT] = {FSDP_POOL_LIST(FSDPI_TEXT_OF)};
    if (pool >= FSDP_POOL_COUNT && pool < FSDP_POOL_MAX) return "extension";
    return pool >= 0 && pool < FSDP_POOL_COUNT ? names[pool] : "?";
}

static const char *fsdpi_label(const fsdp_model *m, int label) {
    int own = label - FSDP_LABEL_COUNT;
    return m && own >= 0 && own < m->labels.count ? m->labels.text[own] : fsdp_label_name(label);
}

FSDP_API const char *fsdp_op_label(const fsdp_op *op) {
    return op ? fsdpi_label(op->model, op->label) : "?";
}

FSDP_API const char *fsdp_model_pool_name(const fsdp_model *model, int pool) {
    int own = pool - FSDP_POOL_COUNT;
    return model && own >= 0 && own < model->pools.count ? model->pools.text[own]
                                                         : fsdp_pool_name(pool);
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
   - A collective is: publish what I am about to do and where my buffer is, wait for all, compare,
     move data, wait for all. Each rank reads its peers' memory directly, once.
   - send and recv concern two ranks alone: each shows its record to the other one and waits for it,
     without a barrier; several pairs of a comm may do so at the same time.
   - Each process has an arena of its own in the file. It maps its new allocation and the same place
     in the arenas of all peers side by side. Where ranks have allocated alike, that is all there is
     to map; an allocation of a peer that lies elsewhere is mapped at its first use.
   - Sums run in rank order (fsdpi_reduce): the same bits whoever computes them, at every run.
   - Waits have a deadline, and every 50 ms look for peers that died: each process holds a lock on
     its byte of the file, which the kernel drops when the process ends in any way. Unlike a process
     id it cannot be mistaken for a later process. fsdpi_shm_live says what keeps it. */

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
               Knows all_to_all, send and recv too. What peers read (src of gather, scatter,
               all_to_all and send, dst of the others and in place) has to lie in memory of alloc,
               unless the comm has one rank. INVALID_ARG and UNSUPPORTED are found before anybody is
               told of the call: the comm goes on, peers that came wait
   alloc       does not wait; takes memory for good, so that its use cannot fail later; zero-filled.
               What a peer has allocated differently is mapped at its first use; if the process has
               no address space for it, that collective is OUT_OF_MEMORY on all ranks
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

/* ==== backends/fsdp_comm.h ==================================================================
   the comm base: what all backends do in the same way

   Each call of fsdp_comm_ops is written once, here. A backend fills one table, fsdpi_transport,
   with four things of its own; the data of a call flows one way through them:

   open       blocks of memory -> the world is checked -> CONNECT
       split      described -> checked -> MOVE: show and hear -> compared -> CONNECT
       run        described -> checked -> MOVE: show and hear -> compared -> moved -> settled
       alloc      MEMORY -> the list of allocations, in which run finds what peers read
       failure    told to VERDICT, where it stands for all ranks -> reported by each of them

   A backend's comm and world begin with fsdpi_comm and fsdpi_comm_world; its fsdp_comm_ops are
   fsdpi_comm_split and so on, and an open of one line that names its table. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_COMM_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_COMM_IMPLEMENTED

/* ==== backends/fsdp_memory.h ================================================================
   the list of a world's allocations, and how much memory is left

   Included by the comm base. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_MEMORY_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_MEMORY_IMPLEMENTED

#ifdef __cplusplus
extern "C" {
#endif

// An allocation. A backend that maps the parts of all ranks has them side by side from base on.
typedef struct fsdpi_chunk {
    char *base;
    size_t size, part; // asked for; distance from one rank's part to the next one's
    uint64_t at;       // of the backend: where it is, or where it came from
    uint64_t number;   // of the backend: among this rank's allocations
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

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION

/* ==== backends/fsdp_record.h ================================================================
   the record of what a rank is about to do, and the words in which it is told

   Ranks compare records before they move data, and every error text is made of them. Included by
   the comm base, the store and the devices. It moves no data and waits for nobody. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_RECORD_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_RECORD_IMPLEMENTED

#include <sys/socket.h> // getsockopt
#include <asm/socket.h> // SO_PEERCRED, which the line above hides in strict C99

#ifdef __cplusplus
extern "C" {
#endif

extern int fsdpi_nanosleep(const struct fsdpi_timespec *wanted,
                           struct fsdpi_timespec *left) __asm__("nanosleep");

static FSDPI_UNUSED void fsdpi_sleep_ns(int64_t ns) {
    struct fsdpi_timespec t;
    t.tv_sec = (long)(ns / 1000000000);
    t.tv_nsec = (long)(ns % 1000000000);
    (void)fsdpi_nanosleep(&t, NULL);
}

// Whether the other end of a unix socket is a process of this user.
static FSDPI_UNUSED int fsdpi_same_user(int fd) {
    int32_t pid_uid_gid[3] = {-1, -1, -1}; // struct ucred, which strict C99 hides, too
    socklen_t size = sizeof pid_uid_gid;
    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, pid_uid_gid, &size) &&
           (uint32_t)pid_uid_gid[1] == (uint32_t)getuid();
}

// Operations that are not fsdp_coll.
enum { FSDPI_OPEN = FSDP_OP_COUNT + 1, FSDPI_SPLIT, FSDPI_CLOSE };

/* What a rank is about to do. Ranks compare `key`, a hash of everything that has to agree; the rest
   is there to say what differs. Sent and shared as it is: no pointers, no padding. */
typedef struct fsdpi_record {
    uint64_t key;
    // Backends that read peers' memory: where the buffer is, in bytes behind the begin of its
    // allocation; that allocation's place, bytes and number. Differs between ranks as it likes.
    uint64_t offset, at, part, number;
    uint64_t fingerprint, count, segs, seq;
    uint64_t block, members; // split: where the new group's block is, who is in it
    int64_t since_ns;        // when the rank came
    int32_t root;            // send, recv: the world rank of the other one, or -1
    uint32_t num_segs;
    uint8_t kind, dtype, out_dtype, redop, in_place, state, reserved;
    uint8_t agree[FSDP_AGREE_COUNT]; // of parts of the fingerprint
    char what[48], comm[16];         // cut if they are longer
} fsdpi_record;

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

static int fsdpi_is_pair(int kind) { return kind == FSDP_OP_SEND || kind == FSDP_OP_RECV; }

// "all_gather of 'h.3' on 'shard' (forward, op 17)", "send of 'h.3' to rank 2 (op 18)"
static void fsdpi_say_op(fsdpi_text *t, const fsdpi_record *r) {
    static const char *const states[FSDP_STATE_COUNT] = {"", "forward, ", "pre_backward, ",
                                                         "post_backward, "};
    if (r->kind == FSDPI_OPEN) fsdpi_say(t, "open of job '%s'", r->what);
    else if (r->kind == FSDPI_SPLIT) fsdpi_say(t, "split into '%s'", r->what);
    else if (r->kind == FSDPI_CLOSE) fsdpi_say(t, "close");
    else fsdpi_say(t, "%s of '%s'", fsdp_op_name(r->kind), r->what);
    if (fsdpi_is_pair(r->kind) && r->root >= 0)
        fsdpi_say(t, " %s rank %d", r->kind == FSDP_OP_SEND ? "to" : "from", (int)r->root);
    if (r->comm[0]) fsdpi_say(t, " on '%s'", r->comm);
    if (r->kind < FSDP_OP_COUNT)
        fsdpi_say(t, " (%sop %llu)", r->state < FSDP_STATE_COUNT ? states[r->state] : "",
                  (unsigned long long)r->seq);
}

// "it is in all_gather of 'h.3' (forward, op 17), for 1.2 s"; past: of a rank that is no more.
static FSDPI_UNUSED void fsdpi_say_done(fsdpi_text *t, int busy, int past, const char *operation,
                                        int64_t since_ns) {
    double since = (double)since_ns * 1e-9;
    if (busy) fsdpi_say(t, "it %s in %s, for %.1f s", past ? "was" : "is", operation, since);
    else fsdpi_say(t, "its last operation was %s, %.1f s ago", operation, since);
}

// A verdict for who was in no operation of the world yet.
static FSDPI_UNUSED void fsdpi_say_verdict(fsdpi_text *t, const fsdpi_verdict *v) {
    if (v->subject[0]) fsdpi_say(t, "rank %d failed in %s: ", (int)v->rank, v->subject);
    if (v->reason[0]) fsdpi_say(t, "%s", v->reason);
    else fsdpi_say(t, "[E408] rank %d has aborted the job", (int)v->rank);
}

// Fields in which two calls differ; of different operations nothing else is worth a word.
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
    };
    static const char *const parts[FSDP_AGREE_COUNT] = {FSDP_AGREE_LIST(FSDPI_TEXT_OF)};
    const char *comma = " (differs in ";
    const size_t most = a->kind == b->kind ? sizeof fields / sizeof *fields : 2;
    for (size_t i = 0; i < most; i++) {
        if (!fields[i].differs) continue;
        fsdpi_say(t, "%s%s", comma, fields[i].name);
        comma = ", ";
    }
    for (size_t i = 0; i < FSDP_AGREE_COUNT && a->fingerprint != b->fingerprint; i++) {
        if (a->kind != b->kind || a->agree[i] == b->agree[i]) continue;
        fsdpi_say(t, "%s%s", comma, parts[i]);
        comma = ", ";
    }
    if (comma[0] == ',') fsdpi_say(t, ")");
    else if (a->fingerprint != b->fingerprint) fsdpi_say(t, " (differs in its settings)");
}

/* Word by word, since the author of an error text may read while the owner writes; the text may
   then mix two operations. Ranks that compare are ordered by a barrier and see whole ones. */
static void fsdpi_record_put(uint64_t *to, const fsdpi_record *record) {
    for (size_t i = 0; i < FSDPI_RECORD_WORDS; i++) {
        uint64_t word;
        memcpy(&word, (const char *)record + i * sizeof word, sizeof word);
        __atomic_store_n(&to[i], word, __ATOMIC_RELAXED);
    }
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

static FSDPI_NOINLINE void fsdpi_copy_name(char *to, size_t cap, const char *from) {
    size_t length = from ? strlen(from) : 0;
    memset(to, 0, cap);
    if (length) memcpy(to, from, length < cap ? length : cap - 1);
}

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION

/* ==== backends/fsdp_comm.h, continued ======================================================= */

#ifdef __cplusplus
extern "C" {
#endif

#define FSDPI_MAX_RANKS 4096 // of a comm that compares; who reduces by itself: FSDPI_MAX_SRCS

typedef struct fsdpi_comm fsdpi_comm;
typedef struct fsdpi_comm_world fsdpi_comm_world;

// The buffer of a collective that peers read.
typedef struct fsdpi_span {
    const void *shared;
    int64_t low, high; // the elements of it that they read
    fsdpi_chunk chunk; // the allocation that these lie in; base NULL: nobody reads any
} fsdpi_span;

/* What a backend is. A function returns FSDP_OK, or what fsdpi_comm_error (this call on this rank)
   or fsdpi_comm_fail (the world) returned; functions that may be NULL say so. */
typedef struct fsdpi_transport {
    size_t comm_bytes, world_bytes; // of the backend's own structs
    int most_ranks;
    fsdp_caps caps; // open may change those of its world

    /* Connect: how ranks find each other. All ranks of the world call open. All members of the
       parent call connect, when they have agreed about the new groups; child is NULL where this
       rank is in none. Before they meet, prepare (may be NULL) makes what the child's first member
       has to show. leave ends a comm; close ends a world when all its comms are gone and its
       allocations given back: 1: its block may be freed, 0: a thread still looks at it. */
    fsdp_status (*open)(fsdpi_comm *c);
    fsdp_status (*prepare)(fsdpi_comm *parent, fsdpi_comm *child);
    fsdp_status (*connect)(fsdpi_comm *parent, fsdpi_comm *child, const fsdp_group *group);
    void (*leave)(fsdpi_comm *c);
    int (*close)(fsdpi_comm_world *w);

    /* Move: how bytes travel. show tells c->now to those whom the call concerns, and may start what
       can be under way meanwhile; hear waits until their records lie at c->shown. op and span are
       NULL for a split. Then move: every argument is checked, every rank calls the same. settle
       (may be NULL) comes last, also after a failure: nothing of this call is under way behind it.
       show and hear NULL: there is nobody to compare with, nor to be late (say_last NULL). */
    fsdp_status (*show)(fsdpi_comm *c, const fsdp_coll *op, const fsdpi_span *span);
    fsdp_status (*hear)(fsdpi_comm *c, const fsdp_coll *op);
    fsdp_status (*move)(fsdpi_comm *c, const fsdp_coll *op, const fsdpi_span *span);
    fsdp_status (*settle)(fsdpi_comm *c, fsdp_status status);

    /* Verdict: where it is kept, and how all ranks learn of it. tell makes it stand, unless one
       does already, and ends all waits; verdict reads it: 0: there is none; say_last says what a
       rank of the world did last. From any thread. */
    void (*tell)(fsdpi_comm *c, fsdp_status status, const char *subject, const char *reason);
    int (*verdict)(fsdpi_comm_world *w, fsdpi_verdict *out);
    void (*say_last)(fsdpi_text *t, fsdpi_comm *c, int rank);

    /* Memory that peers may read, zero-filled. take fills chunk, of which size is set; after a
       failure *why says why. advise adds what helps against a lack of memory. */
    fsdp_status (*take)(fsdpi_comm_world *w, fsdpi_chunk *chunk, const char **why);
    void (*give)(fsdpi_comm_world *w, const fsdpi_chunk *chunk);
    void (*advise)(fsdpi_text *t);
} fsdpi_transport;

// The part of a world that every backend has; its first member.
struct fsdpi_comm_world {
    fsdp_boot boot;
    const fsdpi_transport *transport;
    fsdp_caps caps;
    const uint32_t *failed; // not 0: a verdict stands, or is being told; NULL: not connected yet
    fsdpi_trace *trace;     // what this rank does, for whoever asks; NULL: the backend knows itself
    int64_t open_ns;        // when the world began to open: of one deadline for all of it
    int is_trusting;        // ranks do not compare what they call
    fsdpi_chunks chunks;
};

// The part of a comm that every backend has; its first member.
struct fsdpi_comm {
    fsdpi_comm_world *world;
    const fsdp_boot *boot; // of the world
    int is_world;
    uint32_t splits; // so far
    uint64_t id;     // equal on all members, unique in the world
    int index, size; // this rank's place among the members
    int32_t *ranks;  // [size] world ranks of the members, behind the backend's struct
    fsdpi_record now;
    const char *shown; // where the members' records lie, but for this rank's own
    size_t step;       // from one to the next
    char error[1280];  // text of the last failure
};

/* -------------------------------------------------------------------------------------------- */
// >>comm_fail
// Owns: the two ways to fail. fsdpi_comm_error: this call on this rank, and nobody is told;
// fsdpi_comm_fail: the world, because of what this rank is in. The first failure of a world stands.

static int fsdpi_comm_failed(const fsdpi_comm *c) {
    return c->world->failed && FSDPI_LOAD(c->world->failed);
}

// The text goes where error_text finds it.
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
static fsdp_status fsdpi_comm_report(fsdpi_comm *c) {
    fsdpi_verdict v;
    char subject[sizeof v.subject];
    if (!c->world->transport->verdict(c->world, &v)) {
        (void)fsdpi_comm_error(c, FSDP_ERR_INTERNAL,
                               "[E298] a wait has ended without a reason: please report");
        c->world->transport->tell(c, FSDP_ERR_INTERNAL, "", c->error);
        return FSDP_ERR_INTERNAL;
    }
    fsdpi_comm_subject(c, subject, sizeof subject);
    if (!v.subject[0] || !strcmp(v.subject, subject))
        return fsdpi_comm_error(c, (fsdp_status)v.status, "%s", v.reason);
    return fsdpi_comm_error(c, (fsdp_status)v.status, "[E406] rank %d failed in %s: %s",
                            (int)v.rank, v.subject, v.reason);
}

// A reason that does not begin with ranks is about this one: then its number comes first.
static FSDP_PRINTF(3, 4) fsdp_status
    fsdpi_comm_fail(fsdpi_comm *c, fsdp_status status, const char *format, ...) {
    char text[FSDPI_REASON], reason[FSDPI_REASON], subject[192];
    fsdpi_text t = {reason, sizeof reason, 0};
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const char *said = *text == '[' ? text + strcspn(text, " ") + 1 : text; // behind the id
    if (strncmp(said, "rank", 4) != 0) fsdpi_say(&t, "rank %d: ", c->boot->rank);
    fsdpi_say(&t, "%s", text);
    fsdpi_comm_subject(c, subject, sizeof subject);
    c->world->transport->tell(c, status, subject, reason);
    return fsdpi_comm_report(c);
}

static FSDPI_UNUSED fsdp_status fsdpi_comm_no_memory(fsdpi_comm *c, const char *what,
                                                     size_t bytes) {
    return fsdpi_comm_fail(c, FSDP_ERR_OUT_OF_MEMORY,
                           "[E307] the allocator has returned NULL for %llu bytes of memory: %s",
                           (unsigned long long)bytes, what);
}

// From any thread. c->now is not looked at: a lane may be in a collective of the same comm.
static void fsdpi_comm_abort(fsdp_comm *comm, fsdp_status status, const char *why) {
    fsdpi_comm *c = (fsdpi_comm *)(void *)comm;
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    if (!why || strncmp(why, "rank ", 5) != 0)
        fsdpi_say(&t, "[E409] aborted by rank %d: ", c->boot->rank);
    fsdpi_say(&t, "%s", why ? why : "no reason given");
    c->world->transport->tell(c, status ? status : FSDP_ERR_ABORTED, "", reason);
}

static fsdp_status fsdpi_comm_poll(fsdp_comm *comm) {
    fsdpi_comm *c = (fsdpi_comm *)(void *)comm;
    return fsdpi_comm_failed(c) ? fsdpi_comm_report(c) : FSDP_OK;
}

static const char *fsdpi_comm_error_text(fsdp_comm *comm) {
    return comm ? ((fsdpi_comm *)(void *)comm)->error : fsdpi_thread_error;
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

/* "ranks 1, 2 have not come within 2.0 s; rank 1: its last operation was ...". */
static FSDPI_UNUSED void fsdpi_say_late(fsdpi_text *t, fsdpi_comm *c, const uint8_t *missing,
                                        const char *verb) {
    int total = 0, said = 0;
    for (int k = 0; k < c->size; k++) total += missing[k] != 0;
    fsdpi_say(t, "[E403] ");
    fsdpi_say_ranks(t, c, missing);
    fsdpi_say(t, " %s not %s within %.1f s", total > 1 ? "have" : "has", verb,
              (double)c->boot->timeout_ns * 1e-9);
    for (int k = 0; k < c->size && said < 3; k++) {
        if (!missing[k]) continue;
        fsdpi_say(t, "; ");
        if (total > 1) fsdpi_say(t, "rank %d: ", (int)c->ranks[k]);
        c->world->transport->say_last(t, c, c->ranks[k]);
        said++;
    }
}

/* -------------------------------------------------------------------------------------------- */
// >>comm_check
// Owns: what a call says of itself, and whether its arguments make sense.

/* The one place where a collective becomes a record: c->now, but for its key. core/backend.h says
   why they are two. */
static void fsdpi_describe(fsdpi_comm *c, const fsdp_coll *op, const char *what) {
    fsdpi_record *r = &c->now;
    fsdpi_copy_name(r->what, sizeof r->what, what);
    r->fingerprint = r->count = r->segs = r->seq = r->block = r->members = 0;
    r->offset = r->at = r->part = r->number = 0;
    r->kind = r->dtype = r->out_dtype = r->redop = r->in_place = r->state = 0;
    r->root = 0, r->num_segs = 0;
    memset(r->agree, 0, sizeof r->agree);
    if (!op) return;
    r->kind = op->kind, r->dtype = op->dtype, r->redop = op->redop, r->in_place = op->in_place,
    r->state = op->state;
    r->fingerprint = op->fingerprint, r->count = op->count, r->seq = op->seq,
    r->num_segs = op->num_segs;
    memcpy(r->agree, op->agree, sizeof r->agree);
    if (op->kind == FSDP_OP_REDUCE_SCATTER) r->out_dtype = op->out_dtype;
    if (op->kind == FSDP_OP_BROADCAST) r->root = op->root;
    if (fsdpi_is_pair(op->kind))
        r->root = op->root >= 0 && op->root < c->size ? c->ranks[op->root] : -1;
}

static void fsdpi_make_key(fsdpi_record *r, const fsdp_coll *op) {
    for (uint32_t s = 0; op && s < op->num_segs && op->segs; s++) {
        // Peers read there; where a rank reads or writes alone, it may lie elsewhere on each.
        if (r->kind == FSDP_OP_ALL_GATHER && !r->in_place)
            r->segs = fsdpi_hash(r->segs, (uint64_t)op->segs[s].shard);
        r->segs = fsdpi_hash(r->segs, (uint64_t)op->segs[s].full);
        r->segs = fsdpi_hash(r->segs, (uint64_t)op->segs[s].count);
    }
    uint64_t bytes = 1, h = 0;
    uint8_t kind = r->kind;
    for (size_t i = 0; i < sizeof r->what && bytes; i += sizeof bytes) { // zeros behind the name
        memcpy(&bytes, r->what + i, sizeof bytes);
        h = fsdpi_hash(h, bytes);
    }
    if (kind == FSDP_OP_RECV) r->kind = FSDP_OP_SEND; // which match each other
    bytes = 0;
    memcpy(&bytes, &r->kind, 6); // from kind to state
    r->kind = kind;
    h = fsdpi_hash(h, bytes);
    h = fsdpi_hash(fsdpi_hash(h, r->fingerprint), r->count);
    h = fsdpi_hash(h, r->segs);
    r->key = fsdpi_hash(h, fsdpi_is_pair(kind) ? 0 : (uint64_t)(uint32_t)r->root);
}

static fsdp_status fsdpi_check_reduction(fsdpi_comm *c, const fsdp_coll *op) {
    int is_int = op->dtype == FSDP_I32 || op->dtype == FSDP_I64,
        is_float = fsdp_dtype_is_float(op->dtype);
    if (op->kind == FSDP_OP_ALL_REDUCE && !is_int && !is_float)
        return fsdpi_comm_error(
            c, FSDP_ERR_UNSUPPORTED,
            "[E180] this backend cannot reduce %s, expected a floating dtype, i32 or i64",
            fsdp_dtype_name(op->dtype));
    if (op->kind != FSDP_OP_REDUCE_SCATTER && op->kind != FSDP_OP_ALL_REDUCE) return FSDP_OK;
    int is_list = op->kind == FSDP_OP_REDUCE_SCATTER;
    int plain = op->scale == 1.0 && (!is_list || (op->out_dtype == op->dtype && !op->accumulate));
    if (is_float ? is_list && !fsdp_dtype_is_float(op->out_dtype) : !is_int || !plain)
        return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED,
                                "[E181] this backend cannot reduce %s to %s%s",
                                fsdp_dtype_name(op->dtype), fsdp_dtype_name(op->out_dtype),
                                plain ? "" : " with a scale or accumulation");
    if (plain || c->world->caps.flags & FSDP_CAP_FUSED_REDUCE) return FSDP_OK;
    return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED,
                            "[E182] this backend cannot cast, scale or accumulate in a reduction");
}

static fsdp_status fsdpi_check_form(fsdpi_comm *c, const fsdp_coll *op, int is_list, int64_t most) {
    if (op->kind >= FSDP_OP_COUNT || !(c->world->caps.kinds >> op->kind & 1))
        return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED,
                                "[E183] this backend does not have operation %d", op->kind);
    if (!fsdp_dtype_size(op->dtype) || op->count > (uint64_t)most ||
        (is_list && op->num_segs && !op->segs))
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                                "[E184] dtype is %d, count %llu, %u segments at %p: expected "
                                "FSDP_F32, ..., at most %lld elements, and segments",
                                op->dtype, (unsigned long long)op->count, op->num_segs,
                                (const void *)op->segs, (long long)most);
    int is_member = op->root >= 0 && op->root < c->size;
    if (op->kind == FSDP_OP_BROADCAST && !is_member)
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG, "[E185] root is %d, expected 0 to %d",
                                (int)op->root, c->size - 1);
    if (fsdpi_is_pair(op->kind) && (!is_member || op->root == c->index))
        return fsdpi_comm_error(
            c, FSDP_ERR_INVALID_ARG,
            "[E186] the other member is %d, expected 0 to %d, and not this rank's own %d",
            (int)op->root, c->size - 1, c->index);
    return fsdpi_check_reduction(c, op);
}

// Whether the arguments make sense; and what peers read, but for its allocation.
static fsdp_status fsdpi_check(fsdpi_comm *c, const fsdp_coll *op, fsdpi_span *span) {
    int is_list = op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER;
    int64_t most = INT64_MAX / 32 / c->size; // elements: sums and bytes of them do not overflow
    fsdp_status status = fsdpi_check_form(c, op, is_list, most);
    if (status) return status;
    int from_shard = op->kind == FSDP_OP_ALL_GATHER && !op->in_place;
    int from_src = from_shard || op->kind == FSDP_OP_REDUCE_SCATTER ||
                   op->kind == FSDP_OP_ALL_TO_ALL || op->kind == FSDP_OP_SEND;
    int64_t low = is_list ? INT64_MAX : 0;
    int64_t high = is_list ? 0
                           : (int64_t)op->count * (op->kind == FSDP_OP_ALL_TO_ALL ? c->size : 1);
    for (uint32_t s = 0; is_list && s < op->num_segs; s++) {
        const fsdp_seg *seg = &op->segs[s];
        if (seg->shard < 0 || seg->full < 0 || seg->count < 0 || seg->shard > most ||
            seg->full > most || seg->count > most)
            return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                                    "[E187] segment %u is {%lld, %lld, %lld}, expected 0 to %lld",
                                    s, (long long)seg->shard, (long long)seg->full,
                                    (long long)seg->count, (long long)most);
        int64_t start = from_shard ? seg->shard : seg->full;
        int64_t end = start + (from_shard ? 1 : c->size) * seg->count;
        if (seg->count && start < low) low = start;
        if (seg->count && end > high) high = end;
    }
    span->shared = from_src ? op->src : op->dst;
    span->low = high == 0 ? 0 : low;
    span->high = high;
    if (high > 0 && (!span->shared || (!op->dst && op->kind != FSDP_OP_SEND)))
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                                "[E188] src is %p and dst is %p, expected both", op->src, op->dst);
    return FSDP_OK;
}

// Finds the allocation in which what peers read lies: all of it has to be this rank's.
static fsdp_status fsdpi_find_chunk(fsdpi_comm *c, const fsdp_coll *op, fsdpi_span *span) {
    fsdpi_chunks *chunks = &c->world->chunks;
    uint64_t size = fsdp_dtype_size(op->dtype);
    uintptr_t at = (uintptr_t)span->shared, low = (uintptr_t)span->low * size,
              high = (uintptr_t)span->high * size;
    fsdpi_lock(&chunks->lock);
    int i = fsdpi_chunk_before(chunks, at + low);
    if (i >= 0) span->chunk = chunks->list[i];
    fsdpi_unlock(&chunks->lock);
    uintptr_t mine = (uintptr_t)span->chunk.base + span->chunk.part * (size_t)c->boot->rank;
    if (span->chunk.base && at + low >= mine && at + high <= mine + span->chunk.size)
        return FSDP_OK;
    return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                            "[E189] peers read bytes %llu to %llu of %s, which are not in one "
                            "allocation: allocate them with this backend's alloc",
                            (unsigned long long)low, (unsigned long long)high,
                            span->shared == op->src ? "src" : "dst");
}

static fsdp_status fsdpi_check_world(fsdpi_comm *c) {
    int most = c->world->transport->most_ranks;
    if (c->boot->size < 1 || c->boot->rank < 0 || c->boot->rank >= c->boot->size)
        return fsdpi_comm_error(c, FSDP_ERR_INVALID_ARG,
                                "[E190] rank is %d and size is %d, expected 0 <= rank < size",
                                c->boot->rank, c->boot->size);
    if (c->boot->size > most)
        return fsdpi_comm_error(c, FSDP_ERR_UNSUPPORTED,
                                "[E191] the world has %d ranks, expected at most %d", c->boot->size,
                                most);
    c->index = c->boot->rank;
    c->size = c->boot->size;
    for (int k = 0; k < c->size; k++) c->ranks[k] = k;
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// >>comm_meet
// Owns: the comparison. Before any rank uses what peers sent, all have the same record.

static uint64_t fsdpi_key_of(const fsdpi_comm *c, int k) {
    if (k == c->index) return c->now.key;
    const void *record = c->shown + c->step * (size_t)k; // it begins with its key
    return __atomic_load_n((const uint64_t *)record, __ATOMIC_RELAXED);
}

static fsdpi_record fsdpi_record_of(const fsdpi_comm *c, int k) {
    if (k == c->index) return c->now;
    const void *record = c->shown + c->step * (size_t)k;
    return fsdpi_record_get((const uint64_t *)record);
}

// "all_gather of 'h.3' ..., 64 elements of f32"
static void fsdpi_say_call(fsdpi_text *t, const fsdpi_record *r) {
    fsdpi_say_op(t, r);
    if (r->kind < FSDP_OP_COUNT)
        fsdpi_say(t, ", %llu elements of %s", (unsigned long long)r->count,
                  fsdp_dtype_name(r->dtype));
}

// "ranks disagree: ranks 0, 2: all_gather of ...; rank 1: ..."
static void fsdpi_say_disagreement(fsdpi_text *t, const fsdpi_comm *c) {
    fsdpi_record first = fsdpi_record_of(c, 0);
    fsdpi_say(t, "[E404] ranks disagree");
    for (int k = 0; k < c->size; k++) {
        fsdpi_record record = fsdpi_record_of(c, k);
        uint8_t equal[FSDPI_MAX_RANKS];
        int is_first = 1;
        for (int j = 0; j < c->size; j++) {
            equal[j] = fsdpi_key_of(c, j) == record.key;
            is_first &= !(equal[j] && j < k);
        }
        if (!is_first) continue;
        fsdpi_say(t, k ? "; " : ": ");
        fsdpi_say_ranks(t, c, equal);
        fsdpi_say(t, ": ");
        fsdpi_say_call(t, &record);
        fsdpi_say_differences(t, &first, &record);
    }
}

// Two of them. Of a pair that sends and receives the operations have to differ.
static void fsdpi_say_two(fsdpi_text *t, const fsdpi_comm *c, const fsdpi_record *mine, int k,
                          const fsdpi_record *theirs) {
    fsdpi_record like = *theirs;
    if (fsdpi_is_pair(mine->kind) && fsdpi_is_pair(theirs->kind))
        like.kind = mine->kind, like.root = mine->root;
    fsdpi_say(t, "[E405] ranks disagree: rank %d: ", c->boot->rank);
    fsdpi_say_call(t, mine);
    fsdpi_say(t, "; rank %d: ", (int)c->ranks[k]);
    fsdpi_say_call(t, theirs);
    fsdpi_say_differences(t, mine, &like);
}

// Of a pair one sends and the other receives; else all ranks call the same.
static fsdp_status fsdpi_comm_compare(fsdpi_comm *c, const fsdp_coll *op) {
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    int same = 1;
    if (op && fsdpi_is_pair(op->kind)) {
        fsdpi_record theirs = fsdpi_record_of(c, (int)op->root);
        same = theirs.key == c->now.key && theirs.kind != c->now.kind;
        if (!same) fsdpi_say_two(&t, c, &c->now, (int)op->root, &theirs);
    } else {
        for (int k = 0; k < c->size; k++) same &= fsdpi_key_of(c, k) == c->now.key;
        if (!same) fsdpi_say_disagreement(&t, c);
    }
    if (same) return FSDP_OK;
    // Every rank says what it did itself; the subject of the one that fails first is left out.
    c->world->transport->tell(c, FSDP_ERR_MISMATCH, "", reason);
    return fsdpi_comm_report(c);
}

static fsdp_status fsdpi_comm_meet(fsdpi_comm *c, const fsdp_coll *op, const fsdpi_span *span) {
    if (!c->world->transport->show) return FSDP_OK;
    fsdp_status status = c->world->transport->show(c, op, span);
    if (!status) status = c->world->transport->hear(c, op);
    return status ? status : fsdpi_comm_compare(c, op);
}

// A rank is in an operation from begin to end.
static void fsdpi_comm_begin(fsdpi_comm *c) {
    c->now.since_ns = fsdpi_boot_now(c->boot);
    if (c->world->trace) fsdpi_trace_begin(c->world->trace, &c->now);
}

static fsdp_status fsdpi_comm_end(fsdpi_comm *c, fsdp_status status) {
    const fsdpi_transport *transport = c->world->transport;
    if (transport->settle) status = transport->settle(c, status);
    if (c->world->trace) fsdpi_trace_end(c->world->trace);
    return status;
}

static fsdp_status fsdpi_comm_run(fsdp_comm *comm, const fsdp_coll *op) {
    fsdpi_comm *c = (fsdpi_comm *)(void *)comm;
    const fsdpi_transport *transport = c->world->transport;
    fsdpi_span span = {NULL, 0, 0, {NULL, 0, 0, 0, 0}};
    fsdpi_describe(c, op, op->what);
    if (fsdpi_comm_failed(c)) return fsdpi_comm_report(c);
    fsdp_status status = fsdpi_check(c, op, &span);
    if (!status && c->size > 1 && span.high > span.low) status = fsdpi_find_chunk(c, op, &span);
    if (status) return status;
    fsdpi_make_key(&c->now, op);
    fsdpi_comm_begin(c);
    if (!c->world->is_trusting) status = fsdpi_comm_meet(c, op, &span);
    if (!status) status = transport->move(c, op, &span);
    return fsdpi_comm_end(c, status);
}

/* -------------------------------------------------------------------------------------------- */
// >>comm_connect
// Owns: how a world and its groups begin and end.

// size: it is no member. Near `from` it is found at once.
static int fsdpi_index_from(const fsdpi_comm *c, int rank, int from) {
    if (rank >= 0 && rank < c->size && c->ranks[rank] == rank) return rank;
    for (int k = from; k < c->size; k++)
        if (c->ranks[k] == rank) return k;
    for (int k = 0; k < from && k < c->size; k++)
        if (c->ranks[k] == rank) return k;
    return c->size;
}

static int fsdpi_index_of(const fsdpi_comm *c, int rank) { return fsdpi_index_from(c, rank, 0); }

// A comm's block: the backend's struct, the ranks, and `marks` bytes more. NULL: no memory.
static fsdpi_comm *fsdpi_comm_block(const fsdp_allocator *a, const fsdpi_transport *transport,
                                    int size, size_t marks) {
    const size_t bytes = (transport->comm_bytes + 7) / 8 * 8;
    char *block = (char *)fsdpi_alloc(a, bytes + (size_t)size * sizeof(int32_t) + marks);
    fsdpi_comm *c = (fsdpi_comm *)(void *)block;
    if (c) c->ranks = (int32_t *)(void *)(block + bytes);
    return c;
}

// Checks a new group's members, and fills the child from them; the parent's record gets their hash.
static fsdp_status fsdpi_split_members(fsdpi_comm *parent, const fsdp_group *g, int size,
                                       fsdpi_comm *child) {
    uint64_t h = fsdpi_hash((uint64_t)g->color, (uint64_t)g->size);
    uint8_t *seen = (uint8_t *)(child->ranks + size); // a bit for each member of the parent
    int wrong = !size || g->index < 0 || g->index >= size || !g->ranks ||
                g->ranks[g->index] != parent->boot->rank;
    for (int i = 0, at = 0; !wrong && i < size; i++, at++) {
        at = fsdpi_index_from(parent, (int)g->ranks[i], at);
        wrong = at == parent->size || (seen[at / 8] >> at % 8 & 1);
        if (wrong) break;
        seen[at / 8] = (uint8_t)(seen[at / 8] | 1u << at % 8);
        child->ranks[i] = g->ranks[i];
        h = fsdpi_hash(h, (uint64_t)g->ranks[i]);
    }
    if (wrong)
        return fsdpi_comm_error(parent, FSDP_ERR_INVALID_ARG,
                                "[E192] the group has %d ranks and this one is at index %d: "
                                "expected different members of the parent",
                                g->size, g->index);
    parent->now.members = h;
    child->index = g->index;
    child->size = size;
    return FSDP_OK;
}

// A failed open or split: nothing is left of the comm.
static void fsdpi_comm_close(fsdp_comm *comm);

// The child's block, filled as far as this rank can alone; NULL where it is in no group.
static fsdp_status fsdpi_split_begin(fsdpi_comm *parent, const fsdp_group *g, fsdpi_comm **out) {
    const fsdpi_transport *transport = parent->world->transport;
    fsdpi_describe(parent, NULL, g->name);
    parent->now.kind = FSDPI_SPLIT;
    parent->now.key = FSDPI_SPLIT; // names and members differ between groups; that it is one not
    if (fsdpi_comm_failed(parent)) return fsdpi_comm_report(parent);
    if (g->color < 0) return FSDP_OK;
    const int size = g->size >= 1 && g->size <= parent->size ? g->size : 0;
    const size_t marks = (size_t)parent->size / 8 + 1;
    fsdpi_comm *child = fsdpi_comm_block(&parent->boot->allocator, transport, size, marks);
    if (!child)
        return fsdpi_comm_no_memory(parent, "a group",
                                    transport->comm_bytes + (size_t)size * 4 + marks);
    *out = child;
    child->world = parent->world;
    child->boot = parent->boot;
    fsdp_status status = fsdpi_split_members(parent, g, size, child);
    if (status) return status;
    child->id = fsdpi_hash(fsdpi_hash(parent->id, parent->splits), (uint64_t)g->ranks[0]);
    fsdpi_describe(child, NULL, g->name);
    child->now.kind = FSDPI_SPLIT;
    fsdpi_copy_name(child->now.comm, sizeof child->now.comm, g->name);
    return transport->prepare ? transport->prepare(parent, child) : FSDP_OK;
}

// All ranks of the parent split it; the members of a group have to agree about who is in it.
static fsdp_status fsdpi_split_compare(fsdpi_comm *parent, const fsdpi_comm *child) {
    for (int i = 0; child && parent->world->transport->show && i < child->size; i++) {
        int k = fsdpi_index_of(parent, (int)child->ranks[i]);
        if (fsdpi_record_of(parent, k).members != parent->now.members)
            return fsdpi_comm_fail(parent, FSDP_ERR_MISMATCH,
                                   "[E410] ranks %d and %d disagree about the members of the group",
                                   parent->boot->rank, (int)parent->ranks[k]);
    }
    return FSDP_OK;
}

static fsdp_status fsdpi_comm_split(fsdp_comm *comm, const fsdp_group *g, fsdp_comm **out) {
    fsdpi_comm *parent = (fsdpi_comm *)(void *)comm, *child = NULL;
    *out = NULL;
    fsdp_status status = fsdpi_split_begin(parent, g, &child);
    if (!status) {
        parent->splits++;
        fsdpi_comm_begin(parent);
        status = fsdpi_comm_meet(parent, NULL, NULL);
        if (!status) status = fsdpi_split_compare(parent, child);
        if (!status) status = parent->world->transport->connect(parent, child, g);
        status = fsdpi_comm_end(parent, status);
    }
    if (status && child) {
        if (child->error[0]) fsdpi_copy_name(parent->error, sizeof parent->error, child->error);
        fsdpi_comm_close((fsdp_comm *)(void *)child);
        child = NULL;
    }
    *out = (fsdp_comm *)(void *)child;
    return status;
}

static void fsdpi_comm_close(fsdp_comm *comm) {
    fsdpi_comm *c = (fsdpi_comm *)(void *)comm;
    if (!c) return;
    fsdpi_comm_world *w = c->world;
    const fsdpi_transport *transport = w->transport;
    fsdp_allocator allocator = w->boot.allocator;
    int is_world = c->is_world;
    transport->leave(c);
    fsdpi_free(&allocator, c);
    if (!is_world) return;
    for (int i = 0; i < w->chunks.count; i++) transport->give(w, &w->chunks.list[i]);
    fsdpi_free(&allocator, w->chunks.list);
    if (transport->close(w)) fsdpi_free(&allocator, w);
}

// What is left of the one deadline, while the world opens.
static FSDPI_UNUSED int64_t fsdpi_comm_left_to_open(const fsdpi_comm_world *w) {
    int64_t left = w->open_ns + w->boot.timeout_ns - fsdpi_boot_now(&w->boot);
    return left > 1 ? left : 1;
}

/* The comm of a world of so many ranks, who are still to be named, and the world. NULL: no
   memory. */
static fsdpi_comm *fsdpi_comm_make(const fsdpi_transport *transport, const fsdp_boot *boot,
                                   int size) {
    fsdpi_comm *c = fsdpi_comm_block(&boot->allocator, transport, size, 0);
    fsdpi_comm_world *w = (fsdpi_comm_world *)fsdpi_alloc(&boot->allocator, transport->world_bytes);
    if (!c || !w) {
        fsdpi_free(&boot->allocator, c);
        fsdpi_free(&boot->allocator, w);
        return NULL;
    }
    w->boot = *boot;
    w->transport = transport;
    w->caps = transport->caps;
    c->world = w;
    c->boot = &w->boot;
    c->is_world = 1;
    c->id = FSDPI_OPEN;
    return c;
}

// A failure's text goes where error_text(NULL) finds it.
static fsdp_status fsdpi_comm_open(const fsdpi_transport *transport, const fsdp_boot *boot,
                                   fsdp_caps *caps, fsdp_comm **out) {
    const int size = boot->size >= 1 && boot->size <= transport->most_ranks ? boot->size : 0;
    fsdpi_comm *c = fsdpi_comm_make(transport, boot, size);
    *out = NULL;
    if (!c) {
        (void)snprintf(fsdpi_thread_error, sizeof fsdpi_thread_error,
                       "rank %d: [E309] the allocator has returned NULL for %llu bytes of memory",
                       boot->rank,
                       (unsigned long long)(transport->comm_bytes + transport->world_bytes +
                                            (size_t)size * 4));
        return FSDP_ERR_OUT_OF_MEMORY;
    }
    fsdpi_comm_world *w = c->world;
    if (!w->boot.job) w->boot.job = "";
    fsdpi_describe(c, NULL, w->boot.job);
    c->now.kind = FSDPI_OPEN;
    w->open_ns = fsdpi_boot_now(boot);
    fsdp_status status = fsdpi_check_world(c);
    int opens = !status;
    if (opens) status = transport->open(c);
    if (!status) {
        *caps = w->caps;
        *out = (fsdp_comm *)(void *)c;
        return FSDP_OK;
    }
    fsdpi_copy_name(fsdpi_thread_error, sizeof fsdpi_thread_error, c->error);
    if (opens) {
        fsdpi_comm_close((fsdp_comm *)(void *)c);
        return status;
    }
    fsdpi_free(&boot->allocator, c);
    fsdpi_free(&boot->allocator, w);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// >>comm_memory
// Owns: allocations. A failure leaves c->now alone: a lane may be in a collective of the same comm.

static FSDPI_UNUSED void fsdpi_advise_host(fsdpi_text *t) {
    const char *whose;
    int64_t left = fsdpi_memory_left(&whose);
    fsdpi_say(t,
              "; %s has %.1f MiB left. Free memory, raise the limit, or shard over more machines",
              whose, (double)left / 1048576);
}

// Memory of the world's allocator, for backends that read no memory of other processes.
static FSDPI_UNUSED fsdp_status fsdpi_take_host(fsdpi_comm_world *w, fsdpi_chunk *chunk,
                                                const char **why) {
    const char *whose;
    size_t size = chunk->size;
    if (size >= (size_t)1 << 20 && (int64_t)(size / 2) > fsdpi_memory_left(&whose) / 2) {
        *why = "the host has not enough memory";
        return FSDP_ERR_OUT_OF_MEMORY;
    }
    *why = "the allocator has returned NULL";
    chunk->base = (char *)fsdpi_alloc(&w->boot.allocator, size);
    return chunk->base ? FSDP_OK : FSDP_ERR_OUT_OF_MEMORY;
}

static FSDPI_UNUSED void fsdpi_give_host(fsdpi_comm_world *w, const fsdpi_chunk *chunk) {
    fsdpi_free(&w->boot.allocator, chunk->base);
}

static fsdp_status fsdpi_comm_alloc(fsdp_comm *comm, size_t size, void **ptr) {
    fsdpi_comm *c = (fsdpi_comm *)(void *)comm;
    fsdpi_comm_world *w = c->world;
    fsdpi_chunk chunk = {NULL, size, 0, 0, 0};
    const char *why = "";
    *ptr = NULL;
    fsdp_status status = w->transport->take(w, &chunk, &why);
    if (!status && !fsdpi_chunk_insert(&w->chunks, &w->boot.allocator, chunk)) {
        w->transport->give(w, &chunk);
        status = FSDP_ERR_OUT_OF_MEMORY;
        why = "the allocator has returned NULL";
    }
    if (!status) {
        *ptr = chunk.base + chunk.part * (size_t)c->boot->rank;
        return FSDP_OK;
    }
    fsdpi_text t = {c->error, sizeof c->error, 0};
    fsdpi_say(&t, "rank %d: [E308] alloc of %llu bytes (%.1f MiB) on each of %d ranks: %s",
              c->boot->rank, (unsigned long long)size, (double)size / 1048576, c->boot->size, why);
    if (status == FSDP_ERR_OUT_OF_MEMORY) w->transport->advise(&t);
    return status;
}

static void fsdpi_comm_free(fsdp_comm *comm, void *ptr, size_t size) {
    fsdpi_comm_world *w = ((fsdpi_comm *)(void *)comm)->world;
    fsdpi_chunk chunk;
    (void)size;
    if (ptr && fsdpi_chunk_take(&w->chunks, w->boot.rank, ptr, &chunk))
        w->transport->give(w, &chunk);
}

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION

/* ==== backends/fsdp_shm.h, continued ======================================================== */

#include <fcntl.h>      // fcntl, struct flock: who is alive
#include <poll.h>       // poll
#include <sys/socket.h> // the rendezvous, SCM_RIGHTS
#include <sys/stat.h>   // fstat
#include <sys/un.h>     // sockaddr_un

#ifdef __cplusplus
extern "C" {
#endif

extern int fsdpi_shm_fallocate(int fd, int mode, off_t offset, off_t size) __asm__("fallocate");

#define FSDPI_SHM_SLICE_NS  50000000 // longest sleep before aborts and dead peers are looked for
#define FSDPI_SHM_SPIN_NS   50000    // longest try before sleeping: about what waking a core costs
#define FSDPI_SHM_SPINS     512      // turns of a try, also where the clock stands still
#define FSDPI_SHM_SMALL     16384    // bytes up to which each rank computes all of an all_reduce
#define FSDPI_SHM_PIECE     65536    // of others at a time: peers read them next, from the caches
#define FSDPI_SHM_STREAM    ((size_t)192 << 10) // from here on copies go around the caches
#define FSDPI_SHM_STEP      ((size_t)256 << 20) // memory is reserved in steps of so many bytes
#define FSDPI_SHM_DATA      ((uint64_t)1 << 40) // file offset of allocations; groups lie before
#define FSDPI_SHM_ARENA     ((uint64_t)1 << 42) // file offsets of one rank's allocations
#define FSDPI_SHM_MAX_BYTES ((size_t)1 << 46)   // of one allocation on all ranks together
#define FSDPI_SHM_MAGIC     "fsdpshm1"
#define FSDPI_SHM_KINDS                                                                            \
    (1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER | 1u << FSDP_OP_ALL_REDUCE |          \
     1u << FSDP_OP_BROADCAST | 1u << FSDP_OP_ALL_TO_ALL | 1u << FSDP_OP_SEND | 1u << FSDP_OP_RECV)

enum { FSDPI_SHM_ABSENT = 0, FSDPI_SHM_JOINED, FSDPI_SHM_LEFT };

// One rank in a group; whole cache lines.
typedef struct fsdpi_shm_place {
    uint64_t record[FSDPI_RECORD_WORDS];
    uint32_t arrived; // number of the last barrier this rank has come to
    uint32_t pad0[15 - sizeof(fsdpi_record) / 4 % 16];
    // send and recv
    uint64_t call;         // the last one: its number, and in the low half the other member
    uint32_t done;         // number of the last one in which this rank needs nothing any more
    uint32_t bell, asleep; // another member has news for this rank; which sleeps
    uint32_t closed;       // it has left the group
    uint32_t pad1[10];
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

// Threads: a block of the heap that peers use, too; they do from FSDPI_ALIGN bytes behind it on.
typedef struct fsdpi_shm_block {
    struct fsdpi_shm_block *next;
    fsdp_allocator allocator; // that made it, and has to serve until the last rank has closed
    int users;                // that have to give it back
} fsdpi_shm_block;
typedef char fsdpi_shm_block_has_room[FSDPI_ALIGN >= sizeof(fsdpi_shm_block) ? 1 : -1];

// Processes: an allocation of a peer that lies elsewhere than this rank's own, mapped here.
typedef struct fsdpi_shm_remote {
    char *base;
    uint64_t at;
    size_t part;
} fsdpi_shm_remote;

/* Common block of the world; the peers and the world's group follow. */
typedef struct fsdpi_shm_control {
    uint64_t top; // processes: file offset of the next group's block
    uint32_t refs;
    int32_t size;
    uint32_t failed; // 0, 1: a rank is writing the verdict, 2: it stands
    fsdpi_verdict verdict;
    // threads
    fsdpi_shm_block *blocks;
    fsdp_allocator allocator;
    struct fsdpi_shm_control *next; // of fsdp_threads.common: hosts within one process
    int32_t first;                  // the world rank that the block's ranks begin with
} fsdpi_shm_control;

/* Of a world that is a part of another one (fsdp_near.h) only some ranks are here: boot has the
   numbers of the whole, the world's comm has those that are. */
typedef struct fsdpi_shm_world {
    fsdpi_comm_world base;
    fsdpi_shm_control *control;
    fsdpi_shm_peer *peers;
    int fd;                 // -1: threads
    int members;            // ranks that are here
    int crowded;            // there are fewer cores than ranks
    uint64_t inode, device; // of the common file: the program may have closed fd
    void *life;             // a mapping that keeps this rank's lock; NULL: the process does
    int joined;
    size_t page;
    uint64_t next_at;
    uint32_t lock;             // of the rest
    uint64_t num_numbers;      // of peers' allocations that remotes has room for
    fsdpi_shm_remote *remotes; // [num_numbers][ranks]
} fsdpi_shm_world;

typedef struct fsdpi_shm_comm {
    fsdpi_comm base;
    fsdpi_shm_group *group;
    fsdpi_shm_place *places;
    uint64_t block; // place of the group's block
    uint32_t barrier, waits;
    int64_t spin_ns;        // how long to try before sleeping
    const int64_t *since;   // when the deadline of waits began; NULL: with each wait
    uint32_t calls;         // of send and recv so far
    uint32_t theirs;        // number of the other one's call for this rank; 0: it has not come yet
    fsdpi_shm_place *other; // the member that this rank waits for; NULL: a barrier
    uint64_t small[FSDPI_SHM_SMALL / sizeof(uint64_t)];
    uint32_t met[FSDPI_MAX_SRCS]; // by member: number of its last call that was for this rank
} fsdpi_shm_comm;

static fsdpi_shm_comm *fsdpi_shm_comm_of(fsdpi_comm *base) {
    return (fsdpi_shm_comm *)(void *)base;
}

static fsdpi_shm_world *fsdpi_shm_world_of(const fsdpi_shm_comm *c) {
    return (fsdpi_shm_world *)(void *)c->base.world;
}

/* -------------------------------------------------------------------------------------------- */
// >>shm_fail
// Owns: the verdict, in common memory. The first rank that fails writes it, once; from then on
// every wait ends and every call returns its status.

// What a rank of the world did last: it says why the rank is not here.
static void fsdpi_shm_say_last(fsdpi_text *t, fsdpi_comm *base, int rank) {
    fsdpi_shm_peer *peer = &fsdpi_shm_world_of(fsdpi_shm_comm_of(base))->peers[rank];
    if (FSDPI_LOAD(&peer->state) == FSDPI_SHM_ABSENT) {
        fsdpi_say(t, "it has not joined the job");
        return;
    }
    char operation[160];
    int64_t since_ns;
    int busy = fsdpi_trace_read(&peer->trace, operation, sizeof operation, &since_ns);
    fsdpi_say_done(t, busy, 0, operation, fsdpi_boot_now(base->boot) - since_ns);
}

static void fsdpi_shm_tell(fsdpi_comm *base, fsdp_status status, const char *subject,
                           const char *reason) {
    const fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    const fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    fsdpi_verdict *verdict = &w->control->verdict;
    uint32_t none = 0;
    if (__atomic_compare_exchange_n(&w->control->failed, &none, 1u, 0, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE)) {
        verdict->status = (int32_t)status;
        verdict->rank = base->boot->rank;
        verdict->lost = -1;
        fsdpi_copy_name(verdict->subject, sizeof verdict->subject, subject);
        fsdpi_copy_name(verdict->reason, sizeof verdict->reason, reason);
        FSDPI_STORE(&w->control->failed, 2u);
    }
    // Ranks that sleep elsewhere see it at the end of their slice.
    fsdpi_shm_group *group = (fsdpi_shm_group *)(void *)(w->peers + w->control->size);
    fsdpi_futex_wake_all(&group->generation, w->fd >= 0);
    if (!base->is_world) fsdpi_futex_wake_all(&c->group->generation, w->fd >= 0);
}

static int fsdpi_shm_verdict(fsdpi_comm_world *base, fsdpi_verdict *out) {
    const fsdpi_shm_control *control = ((fsdpi_shm_world *)(void *)base)->control;
    for (int i = 0; i < 100 && FSDPI_LOAD(&control->failed) == 1; i++) fsdpi_sleep_ns(100000);
    uint32_t failed = FSDPI_LOAD(&control->failed);
    if (failed == 2) *out = control->verdict;
    if (failed != 1) return failed == 2;
    memset(out, 0, sizeof *out);
    out->status = FSDP_ERR_ABORTED;
    fsdpi_copy_name(out->reason, sizeof out->reason,
                    "a rank ended while it was reporting a failure");
    return 1;
}

/* -------------------------------------------------------------------------------------------- */
// >>shm_wait
// Owns: barriers, and everything that may end a wait: all have come, the world failed, a peer is
// gone, the deadline. Numbers of barriers and calls, and counts, are compared modulo 2^32.

// The number of the other one's call of send or recv for this rank, 0: it has not come yet. It is
// in that call until this rank has finished, too.
static uint32_t fsdpi_shm_call_of(const fsdpi_shm_comm *c, const fsdpi_shm_place *other) {
    uint64_t call = FSDPI_LOAD(&other->call);
    uint32_t number = (uint32_t)(call >> 32), member = (uint32_t)call;
    return member == (uint32_t)c->base.index && number != c->met[other - c->places] ? number : 0;
}

// Whether what this rank waits for is there: the barrier that it came to last, or the other one of
// a pair.
static int fsdpi_shm_is_open(const fsdpi_shm_comm *c) {
    if (!c->other) return (int32_t)(FSDPI_LOAD(&c->group->generation) - c->barrier) >= 0;
    if (!c->theirs) return fsdpi_shm_call_of(c, c->other) != 0;
    return (int32_t)(FSDPI_LOAD(&c->other->done) - c->theirs) >= 0;
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

/* Takes this rank's byte. The lock belongs to an open file of its own, which only a mapping keeps,
   and children do not inherit that: so nobody's descriptors matter, and no child that lives longer.
   Without /proc it is the process's, and ends when that closes any descriptor of the file. */
static int fsdpi_shm_live(fsdpi_shm_world *w) {
    struct flock lock = fsdpi_shm_byte(w->base.boot.rank);
    char path[40];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", w->fd);
    int fd = fsdpi_fd(open(path, O_RDWR | FSDPI_CLOEXEC));
    void *life = fd < 0 ? MAP_FAILED : mmap(NULL, w->page, PROT_NONE, MAP_SHARED, fd, 0);
    int kept = life != MAP_FAILED &&
               !fsdpi_syscall(SYS_madvise, life, w->page, 10L /* MADV_DONTFORK */) &&
               !fcntl(fd, 37 /* F_OFD_SETLK */, &lock);
    if (kept) w->life = life;
    else if (life != MAP_FAILED) (void)munmap(life, w->page);
    if (fd >= 0) (void)close(fd);
    return kept || !fcntl(w->fd, F_SETLK, &lock);
}

// Whether the process of a rank has ended without closing: nobody holds its byte any more.
static int fsdpi_shm_is_dead(const fsdpi_shm_world *w, int rank) {
    struct flock lock = fsdpi_shm_byte(rank);
    return fcntl(w->fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

// Whether w->fd is still the common file: a program that closes descriptors which it did not open
// may have another file there.
static int fsdpi_shm_has_file(const fsdpi_shm_world *w) {
    struct stat now;
    return w->fd >= 0 && !fstat(w->fd, &now) && (uint64_t)now.st_dev == w->device &&
           (uint64_t)now.st_ino == w->inode;
}

static void fsdpi_shm_set_file(fsdpi_shm_world *w, int fd) {
    struct stat now;
    w->fd = fd;
    if (fd < 0 || fstat(fd, &now)) return;
    w->device = (uint64_t)now.st_dev;
    w->inode = (uint64_t)now.st_ino;
}

#define FSDPI_SHM_CLOSED                                                                           \
    "the program has closed the library's descriptor of the common file: let it close only those " \
    "that it has opened"

static fsdp_status fsdpi_shm_closed(fsdpi_shm_comm *c) {
    return fsdpi_comm_fail(&c->base, FSDP_ERR_BACKEND, "[E621] " FSDPI_SHM_CLOSED " (%d is not it)",
                           fsdpi_shm_world_of(c)->fd);
}

// OK while all that this rank waits for are alive, if they have joined; `thorough` also asks the
// kernel.
static fsdp_status fsdpi_shm_check_peers(fsdpi_shm_comm *c, int thorough) {
    // A verdict is told here, and the word that stands for all does not say so yet.
    if (FSDPI_LOAD(&fsdpi_shm_world_of(c)->control->failed)) {
        c->base.world->transport->tell(&c->base, FSDP_ERR_ABORTED, "", "");
        return fsdpi_comm_report(&c->base);
    }
    thorough = thorough && fsdpi_shm_has_file(fsdpi_shm_world_of(c));
    for (int k = 0; k < c->base.size; k++) {
        int rank = c->base.ranks[k];
        fsdpi_shm_peer *peer = &fsdpi_shm_world_of(c)->peers[rank];
        uint32_t state = FSDPI_LOAD(&peer->state);
        int left = state == FSDPI_SHM_LEFT || FSDPI_LOAD(&c->places[k].closed);
        if (c->other && c->other != &c->places[k]) continue;
        if (rank == c->base.boot->rank || state == FSDPI_SHM_ABSENT) continue;
        if (!left && !(thorough && fsdpi_shm_is_dead(fsdpi_shm_world_of(c), rank))) continue;
        // It may have gone after it opened the barrier, just now; and a rank that closes says so
        // before it drops its lock.
        if (fsdpi_shm_is_open(c)) return FSDP_OK;
        uint32_t has_closed = FSDPI_LOAD(&c->places[k].closed);
        left = FSDPI_LOAD(&peer->state) == FSDPI_SHM_LEFT;
        char reason[FSDPI_REASON];
        fsdpi_text t = {reason, sizeof reason, 0};
        if (left) fsdpi_say(&t, "[E601] rank %d has shut down; ", rank);
        else if (has_closed) fsdpi_say(&t, "[E622] rank %d has closed this group; ", rank);
        else fsdpi_say(&t, "[E602] rank %d has died (process %u); ", rank, peer->pid);
        fsdpi_shm_say_last(&t, &c->base, rank);
        return fsdpi_comm_fail(&c->base, FSDP_ERR_PEER_LOST, "%s", reason);
    }
    return FSDP_OK;
}

static int fsdpi_shm_all_busy(const fsdpi_shm_comm *c, const uint8_t *marked) {
    int busy = 1;
    for (int k = 0; k < c->base.size; k++)
        busy &= !marked[k] ||
                FSDPI_LOAD(&fsdpi_shm_world_of(c)->peers[c->base.ranks[k]].trace.busy) > 0;
    return busy;
}

// The deadline has passed: names who is missing. OK if it is nobody, just then.
static fsdp_status fsdpi_shm_late(fsdpi_shm_comm *c, const char *verb) {
    uint8_t missing[FSDPI_MAX_SRCS];
    int total = 0;
    for (int k = 0; k < c->base.size; k++) {
        missing[k] = c->other ? c->other == &c->places[k] && !fsdpi_shm_is_open(c)
                              : (int32_t)(FSDPI_LOAD(&c->places[k].arrived) - c->barrier) < 0;
        total += missing[k];
    }
    if (total == 0) return FSDP_OK;
    // Who waits for another rank elsewhere is not to blame, and will tell who is.
    for (int i = 0; i < 100 && fsdpi_shm_all_busy(c, missing); i++) {
        if (fsdpi_comm_failed(&c->base)) return fsdpi_comm_report(&c->base);
        fsdpi_sleep_ns(1000000);
    }
    char reason[FSDPI_REASON];
    fsdpi_text t = {reason, sizeof reason, 0};
    fsdpi_say_late(&t, &c->base, missing, verb);
    return fsdpi_comm_fail(&c->base, FSDP_ERR_TIMEOUT, "%s", reason);
}

static void fsdpi_shm_arrive(fsdpi_shm_comm *c) {
    fsdpi_shm_group *group = c->group;
    c->other = NULL;
    c->barrier++;
    __atomic_store_n(&c->places[c->base.index].arrived, c->barrier, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&group->count, 1u, __ATOMIC_ACQ_REL) !=
        c->barrier * (uint32_t)c->base.size)
        return;
    // Either this load sees the sleeper, or the sleeper's futex call sees the new generation.
    __atomic_store_n(&group->generation, c->barrier, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&group->sleepers, __ATOMIC_SEQ_CST))
        fsdpi_futex_wake_all(&group->generation, fsdpi_shm_world_of(c)->fd >= 0);
}

/* Tries as long as that helps: less after each failure, but in full now and then. Where ranks share
   cores, each turn hands the core to the next one that can run; a core that falls asleep instead,
   and has to be woken, costs five times as much. */
static int fsdpi_shm_spin(fsdpi_shm_comm *c) {
    const fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    const fsdp_boot *boot = &w->base.boot;
    int64_t most = ++c->waits % 64 ? c->spin_ns : FSDPI_SHM_SPIN_NS;
    int64_t end = fsdpi_boot_now(boot) + most;
    for (int i = 0; i < FSDPI_SHM_SPINS && (!i || fsdpi_boot_now(boot) < end); i++) {
        if (w->crowded) (void)fsdpi_syscall(SYS_sched_yield);
        for (int k = 0; k < 16 && !w->crowded && !fsdpi_shm_is_open(c); k++) fsdpi_pause();
        if (!fsdpi_shm_is_open(c)) continue;
        c->spin_ns = FSDPI_SHM_SPIN_NS;
        return 1;
    }
    c->spin_ns /= 4;
    return 0;
}

// verb: what the missing ranks have not done, for the text.
static fsdp_status fsdpi_shm_wait(fsdpi_shm_comm *c, const char *verb) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    if (fsdpi_shm_is_open(c)) return FSDP_OK;
    if (fsdpi_shm_spin(c)) return FSDP_OK;
    fsdpi_shm_place *me = &c->places[c->base.index];
    uint32_t *word = c->other ? &me->bell : &c->group->generation,
             *sleepers = c->other ? &me->asleep : &c->group->sleepers;
    int64_t start = c->since ? *c->since : fsdpi_boot_now(&w->base.boot);
    for (int turn = 0;; turn++) {
        uint32_t seen = FSDPI_LOAD(word);
        if (fsdpi_shm_is_open(c)) return FSDP_OK;
        if (fsdpi_comm_failed(&c->base)) return fsdpi_comm_report(&c->base);
        fsdp_status status = fsdpi_shm_check_peers(c, turn > 0);
        int64_t left = w->base.boot.timeout_ns - (fsdpi_boot_now(&w->base.boot) - start);
        if (!status && left <= 0) status = fsdpi_shm_late(c, verb);
        if (status) return status;
        __atomic_add_fetch(sleepers, 1u, __ATOMIC_SEQ_CST);
        fsdpi_futex_wait(word, seen,
                         left > 0 && left < FSDPI_SHM_SLICE_NS ? left : FSDPI_SHM_SLICE_NS,
                         w->fd >= 0);
        __atomic_sub_fetch(sleepers, 1u, __ATOMIC_SEQ_CST);
    }
}

static fsdp_status fsdpi_shm_barrier(fsdpi_shm_comm *c, const char *verb) {
    fsdpi_shm_arrive(c);
    return fsdpi_shm_wait(c, verb);
}

/* -------------------------------------------------------------------------------------------- */
// >>shm_memory
// Owns: memory that peers may read, and where it is in this process. Invariants: a part is backed
// by memory before anyone can touch it; no part of the file is used twice, so that new memory is
// zero, a late reader sees no new data, and a place in the file names one allocation for ever; what
// is freed after a failure stays readable, since a peer may not have noticed yet.

static void fsdpi_shm_give_back(const fsdpi_shm_world *w, uint64_t at, size_t bytes) {
    if (!fsdpi_shm_has_file(w)) return;
    (void)fsdpi_shm_fallocate(w->fd, 3 /* KEEP_SIZE | PUNCH_HOLE */, (off_t)at, (off_t)bytes);
}

/* Backs a range of the file with memory, in steps, each checked against what is left for all ranks:
   they allocate at the same time, and the kernel would rather kill than refuse. */
static int fsdpi_shm_reserve(const fsdpi_shm_world *w, uint64_t at, size_t bytes) {
    const char *whose;
    int is_small = bytes < FSDPI_SHM_STEP / 256;
    if (!fsdpi_shm_has_file(w) || (!is_small && (int64_t)bytes > fsdpi_memory_left(&whose)))
        return 0;
    for (size_t done = 0; done < bytes;) {
        size_t step = bytes - done < FSDPI_SHM_STEP ? bytes - done : FSDPI_SHM_STEP;
        int refused = !is_small && (int64_t)step * w->members > fsdpi_memory_left(&whose);
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
    if (!fsdpi_shm_has_file(w)) return NULL;
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, w->fd, (off_t)at);
    return base == MAP_FAILED ? NULL : (char *)base;
}

static size_t fsdpi_shm_round(const fsdpi_shm_world *w, size_t bytes) {
    return (bytes + w->page - 1) / w->page * w->page;
}

/* Threads: a block that `users` ranks have to give back. Under the lock, so that what is left is
   checked after the others have taken theirs. */
static char *fsdpi_shm_share(fsdpi_shm_world *w, size_t bytes, int users) {
    const char *whose;
    fsdpi_shm_block *block = NULL;
    fsdpi_lock(&w->base.boot.threads->lock);
    if (bytes < FSDPI_SHM_STEP / 256 || (int64_t)bytes < fsdpi_memory_left(&whose))
        block = (fsdpi_shm_block *)fsdpi_alloc(&w->base.boot.allocator, FSDPI_ALIGN + bytes);
    if (block) {
        block->allocator = w->base.boot.allocator;
        block->users = users;
        block->next = w->control->blocks;
        w->control->blocks = block;
    }
    fsdpi_unlock(&w->base.boot.threads->lock);
    return block ? (char *)block + FSDPI_ALIGN : NULL;
}

// The last user frees the block; after a failure the last rank that closes does.
static void fsdpi_shm_unshare(fsdpi_shm_world *w, void *base) {
    fsdpi_shm_block *block = (fsdpi_shm_block *)(void *)((char *)base - FSDPI_ALIGN);
    fsdpi_lock(&w->base.boot.threads->lock);
    if (--block->users == 0 && !FSDPI_LOAD(w->base.failed)) {
        fsdp_allocator allocator = block->allocator;
        fsdpi_shm_block **link = &w->control->blocks;
        while (*link != block) link = &(*link)->next;
        *link = block->next;
        fsdpi_free(&allocator, block);
    }
    fsdpi_unlock(&w->base.boot.threads->lock);
}

// Where a rank's part is in the file. Each rank has an arena of its own, so that ranks which
// allocate differently, because they are in different groups, do not meet.
static uint64_t fsdpi_shm_offset(uint64_t at, int rank) {
    return at + FSDPI_SHM_ARENA * (uint64_t)rank;
}

// The parts of all ranks that are here, side by side in this process.
static char *fsdpi_shm_map_parts(const fsdpi_shm_world *w, const fsdpi_chunk *chunk) {
    size_t part = chunk->part, ranks = (size_t)w->base.boot.size;
    void *base = mmap(NULL, part * ranks, PROT_NONE, MAP_PRIVATE | FSDPI_ANON, -1, 0);
    if (base == MAP_FAILED) return NULL;
    for (size_t r = 0; r < ranks; r++) {
        if (FSDPI_LOAD(&w->peers[r].state) == FSDPI_SHM_ABSENT) continue;
        void *at = mmap((char *)base + r * part, part, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED, w->fd, (off_t)fsdpi_shm_offset(chunk->at, (int)r));
        if (at != MAP_FAILED) continue;
        (void)munmap(base, part * ranks);
        return NULL;
    }
    return (char *)base;
}

static void fsdpi_shm_give(fsdpi_comm_world *base, const fsdpi_chunk *chunk) {
    fsdpi_shm_world *w = (fsdpi_shm_world *)(void *)base;
    size_t ranks = (size_t)w->base.boot.size;
    if (w->fd < 0) {
        fsdpi_shm_unshare(w, chunk->base);
        return;
    }
    (void)munmap(chunk->base, chunk->part * ranks);
    fsdpi_shm_give_back(w, fsdpi_shm_offset(chunk->at, w->base.boot.rank), chunk->part);
}

/* The lowest number that no allocation of this rank has. Peers keep one mapping for each number, so
   that what they map does not grow with what was freed long ago. */
static uint64_t fsdpi_shm_number(const fsdpi_chunks *chunks) {
    uint64_t number = 0;
    for (int i = 0; i < chunks->count; i++)
        if (chunks->list[i].number == number) number++, i = -1;
    return number;
}

// beside: this rank's allocations so far.
static fsdp_status fsdpi_shm_take_beside(fsdpi_comm_world *base, const fsdpi_chunks *beside,
                                         fsdpi_chunk *chunk, const char **why) {
    fsdpi_shm_world *w = (fsdpi_shm_world *)(void *)base;
    const size_t size = chunk->size;
    *why = "that is more than the backend can address";
    if (size > FSDPI_SHM_MAX_BYTES / (size_t)base->boot.size || w->next_at + size > FSDPI_SHM_ARENA)
        return FSDP_ERR_OUT_OF_MEMORY;
    *why = "the host has not enough memory";
    chunk->at = w->next_at;
    chunk->number = fsdpi_shm_number(beside);
    if (w->fd < 0) {
        chunk->base = fsdpi_shm_share(w, size, 1);
    } else {
        chunk->part = fsdpi_shm_round(w, size ? size : 1);
        w->next_at += chunk->part;
        uint64_t mine = fsdpi_shm_offset(chunk->at, base->boot.rank);
        if (!fsdpi_shm_has_file(w)) {
            *why = FSDPI_SHM_CLOSED;
            return FSDP_ERR_BACKEND;
        }
        if (!fsdpi_shm_reserve(w, mine, chunk->part)) return FSDP_ERR_OUT_OF_MEMORY;
        *why = "the process has not enough address space";
        chunk->base = fsdpi_shm_map_parts(w, chunk);
        if (!chunk->base) fsdpi_shm_give_back(w, mine, chunk->part);
    }
    return chunk->base ? FSDP_OK : FSDP_ERR_OUT_OF_MEMORY;
}

static fsdp_status fsdpi_shm_take(fsdpi_comm_world *w, fsdpi_chunk *chunk, const char **why) {
    return fsdpi_shm_take_beside(w, &w->chunks, chunk, why);
}

// Room for allocations of peers up to `number`.
static int fsdpi_shm_grow_remotes(fsdpi_shm_world *w, uint64_t number) {
    size_t ranks = (size_t)w->base.boot.size, num = number < 8 ? 16 : 2 * (size_t)number;
    if (number < w->num_numbers) return 1;
    fsdpi_shm_remote *more = (fsdpi_shm_remote *)fsdpi_alloc(&w->base.boot.allocator,
                                                             num * ranks * sizeof *more);
    if (!more) return 0;
    if (w->remotes) memcpy(more, w->remotes, w->num_numbers * ranks * sizeof *more);
    fsdpi_free(&w->base.boot.allocator, w->remotes);
    w->remotes = more;
    w->num_numbers = num;
    return 1;
}

static void fsdpi_shm_unmap_remote(fsdpi_shm_remote *remote) {
    if (remote->base) (void)munmap(remote->base, remote->part);
    remote->base = NULL;
}

/* Where an allocation of a peer is in this process; mapped if it was not. One that had its number
   before is freed: who uses it has finished, or the world would have failed and not come here. */
static char *fsdpi_shm_map_remote(fsdpi_shm_world *w, int rank, uint64_t at, size_t part,
                                  uint64_t number) {
    char *base = NULL;
    fsdpi_lock(&w->lock);
    if (fsdpi_shm_grow_remotes(w, number)) {
        fsdpi_shm_remote *remote = &w->remotes[number * (size_t)w->base.boot.size + (size_t)rank];
        if (remote->at != at) fsdpi_shm_unmap_remote(remote);
        if (!remote->base) remote->base = fsdpi_shm_map(w, fsdpi_shm_offset(at, rank), part);
        remote->at = at;
        remote->part = part;
        base = remote->base;
    }
    fsdpi_unlock(&w->lock);
    return base;
}

/* -------------------------------------------------------------------------------------------- */
// >>shm_run
// Owns: collectives. Between the two barriers of an operation every rank may read what its peers
// showed; it writes only its own memory, and there only what no peer reads in the same phase.

static uint64_t fsdpi_shm_word(const fsdpi_shm_comm *c, int k, size_t offset) { // of a record
    return __atomic_load_n(&c->places[k].record[offset / sizeof(uint64_t)], __ATOMIC_RELAXED);
}

// Tells a member what this rank has written for it before.
static void fsdpi_shm_ring(fsdpi_shm_comm *c, fsdpi_shm_place *other) {
    // Either this load sees the sleeper, or the sleeper's futex call sees the new number.
    __atomic_add_fetch(&other->bell, 1u, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&other->asleep, __ATOMIC_SEQ_CST))
        fsdpi_futex_wake_all(&other->bell, fsdpi_shm_world_of(c)->fd >= 0);
}

/* send and recv: the two wait for each other, both compare, the receiver reads; then each waits
   until the other one needs its memory and its record no more. No barrier counts this. */
static void fsdpi_shm_call(fsdpi_shm_comm *c, int k) {
    if (++c->calls == 0) c->calls = 1; // 0 is none
    c->other = &c->places[k];
    c->theirs = 0;
    FSDPI_STORE(&c->places[c->base.index].call, (uint64_t)c->calls << 32 | (uint32_t)k);
    fsdpi_shm_ring(c, c->other);
}

// Shows c->base.now to the members, and where this rank's buffer is: no record changes before all
// have read it.
static fsdp_status fsdpi_shm_show(fsdpi_comm *base, const fsdp_coll *op, const fsdpi_span *span) {
    fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    fsdpi_record *now = &base->now;
    if (span && span->chunk.base) {
        const fsdpi_chunk *mine = &span->chunk;
        now->offset = (uint64_t)(uintptr_t)span->shared;
        if (fsdpi_shm_world_of(c)->fd >= 0) {
            now->offset -= (uint64_t)(uintptr_t)mine->base + mine->part * (size_t)base->boot->rank;
            now->at = mine->at, now->part = mine->part, now->number = mine->number;
        }
    }
    fsdpi_record_put(c->places[base->index].record, now);
    if (op && fsdpi_is_pair(op->kind)) fsdpi_shm_call(c, (int)op->root);
    else fsdpi_shm_arrive(c);
    return FSDP_OK;
}

static fsdp_status fsdpi_shm_hear(fsdpi_comm *base, const fsdp_coll *op) {
    fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    fsdp_status status = fsdpi_shm_wait(c, "come");
    if (!status && c->other) c->theirs = c->met[op->root] = fsdpi_shm_call_of(c, c->other);
    return status;
}

// The allocation of member k that its buffer is in, where it lies elsewhere than this rank's own.
static FSDPI_NOINLINE fsdp_status fsdpi_shm_reach(fsdpi_shm_comm *c, int k, const char **out) {
    uint64_t at = fsdpi_shm_word(c, k, offsetof(fsdpi_record, at)),
             number = fsdpi_shm_word(c, k, offsetof(fsdpi_record, number));
    size_t part = (size_t)fsdpi_shm_word(c, k, offsetof(fsdpi_record, part));
    int rank = (int)c->base.ranks[k];
    *out = fsdpi_shm_map_remote(fsdpi_shm_world_of(c), rank, at, part, number);
    if (*out) return FSDP_OK;
    if (!fsdpi_shm_has_file(fsdpi_shm_world_of(c))) return fsdpi_shm_closed(c);
    return fsdpi_comm_fail(&c->base, FSDP_ERR_OUT_OF_MEMORY,
                           "[E603] this process cannot map %llu bytes of rank %d: raise the limits "
                           "of address space (ulimit -v), mappings (vm.max_map_count) or memory",
                           (unsigned long long)part, rank);
}

// Finds member k's buffer, as it has shown. mine: the allocation of this rank's own.
static fsdp_status fsdpi_shm_find(fsdpi_shm_comm *c, const fsdpi_chunk *mine, int k,
                                  const char **out) {
    uint64_t offset = fsdpi_shm_word(c, k, offsetof(fsdpi_record, offset));
    fsdp_status status = FSDP_OK;
    if (fsdpi_shm_world_of(c)->fd < 0) {
        *out = (const char *)(uintptr_t)offset;
        return FSDP_OK;
    }
    if (fsdpi_shm_word(c, k, offsetof(fsdpi_record, at)) == mine->at &&
        fsdpi_shm_word(c, k, offsetof(fsdpi_record, part)) == mine->part)
        *out = mine->base + mine->part * (size_t)c->base.ranks[k];
    else status = fsdpi_shm_reach(c, k, out);
    if (!status) *out += (ptrdiff_t)offset;
    return status;
}

/* What is so large does not stay in a cache: it goes around the caches, of four pages by turns, as
   memory is faster so. It may be empty. */
static void fsdpi_shm_copy(char *to, const char *from, size_t bytes) {
    size_t at = 0;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__)
    enum { PAGE = 4096, PAGES = 4 };
    if (bytes >= FSDPI_SHM_STREAM && (uintptr_t)to % 16 == 0) {
        for (; bytes - at >= PAGE * PAGES; at += PAGE * PAGES)
            for (size_t line = 0; line < PAGE; line += 64)
                for (size_t page = 0; page < PAGES; page++) {
                    size_t here = at + page * PAGE + line;
                    __builtin_prefetch(from + here + PAGES * PAGE);
                    fsdpi_stream(to + here, from + here, 64);
                }
        fsdpi_stream_end();
    }
#endif
    if (bytes > at) memcpy(to + at, from + at, bytes - at);
}

// of: where each member's buffer is.
static void fsdpi_shm_all_gather(const fsdpi_shm_comm *c, const fsdp_coll *op,
                                 const char *const *of) {
    size_t bytes = fsdp_dtype_size(op->dtype);
    for (int i = 0; i < c->base.size; i++) {
        int k = (c->base.index + i) % c->base.size; // everybody begins with another rank
        for (uint32_t s = 0; s < op->num_segs; s++) {
            const fsdp_seg *seg = &op->segs[s];
            size_t full = (size_t)(seg->full + k * seg->count);
            const char *from = of[k] + (op->in_place ? full : (size_t)seg->shard) * bytes;
            char *to = (char *)op->dst + full * bytes;
            if (to != from) fsdpi_shm_copy(to, from, (size_t)seg->count * bytes);
        }
    }
}

static void fsdpi_shm_reduce_scatter(const fsdpi_shm_comm *c, const fsdp_coll *op,
                                     const char *const *of) {
    const char *srcs[FSDPI_MAX_SRCS];
    for (uint32_t s = 0; s < op->num_segs; s++) {
        const fsdp_seg *seg = &op->segs[s];
        if (!seg->count) continue;
        size_t at = (size_t)(seg->full + c->base.index * seg->count) * fsdp_dtype_size(op->dtype);
        for (int k = 0; k < c->base.size; k++) srcs[k] = of[k] + at;
        fsdpi_reduce((char *)op->dst + (size_t)seg->shard * fsdp_dtype_size(op->out_dtype),
                     op->out_dtype, srcs, c->base.size, op->dtype, (size_t)seg->count, op->scale,
                     op->accumulate, op->redop);
    }
}

static void fsdpi_shm_all_to_all(const fsdpi_shm_comm *c, const fsdp_coll *op,
                                 const char *const *of) {
    size_t bytes = (size_t)op->count * fsdp_dtype_size(op->dtype);
    for (int i = 0; i < c->base.size && bytes; i++) {
        int k = (c->base.index + i) % c->base.size;
        fsdpi_shm_copy((char *)op->dst + bytes * (size_t)k, of[k] + bytes * (size_t)c->base.index,
                       bytes);
    }
}

/* Small: everybody reduces everything aside, and stores it when all have read. Large: member k
   reduces part k in its own place, where nobody else reads; then all collect the parts. */
static fsdp_status fsdpi_shm_all_reduce(fsdpi_shm_comm *c, const fsdp_coll *op,
                                        const char *const *of) {
    const char *srcs[FSDPI_MAX_SRCS];
    size_t bytes = fsdp_dtype_size(op->dtype), count = (size_t)op->count;
    if (c->base.size == 1 && op->scale == 1.0) return FSDP_OK;
    if (count * bytes <= FSDPI_SHM_SMALL) {
        fsdpi_reduce(c->small, op->dtype, of, c->base.size, op->dtype, count, op->scale, 0,
                     op->redop);
        fsdp_status status = fsdpi_shm_barrier(c, "finished");
        if (!status) memcpy(op->dst, c->small, count * bytes);
        return status;
    }
    size_t part = (count / (size_t)c->base.size + 64) / 64 *
                  64; // whole cache lines; the last may be short or empty
    size_t mine = part * (size_t)c->base.index;
    size_t piece = FSDPI_SHM_PIECE / bytes, end = count < mine + part ? count : mine + part;
    for (size_t at = mine; at < end; at += piece) {
        for (int k = 0; k < c->base.size; k++) srcs[k] = of[k] + at * bytes;
        fsdpi_reduce((char *)op->dst + at * bytes, op->dtype, srcs, c->base.size, op->dtype,
                     end - at < piece ? end - at : piece, op->scale, 0, op->redop);
    }
    fsdp_status status = fsdpi_shm_barrier(c, "finished");
    if (status) return status;
    for (int i = 1; i < c->base.size; i++) {
        int k = (c->base.index + i) % c->base.size;
        size_t at = part * (size_t)k;
        if (at >= count) continue;
        fsdpi_shm_copy((char *)op->dst + at * bytes, of[k] + at * bytes,
                       (count - at < part ? count - at : part) * bytes);
    }
    return fsdpi_shm_barrier(c, "finished");
}

static fsdp_status fsdpi_shm_move_pair(fsdpi_shm_comm *c, const fsdp_coll *op,
                                       const fsdpi_chunk *mine) {
    const char *src;
    fsdp_status status = FSDP_OK;
    if (op->kind == FSDP_OP_RECV && mine->base) {
        status = fsdpi_shm_find(c, mine, (int)op->root, &src);
        if (!status)
            fsdpi_shm_copy((char *)op->dst, src, (size_t)op->count * fsdp_dtype_size(op->dtype));
    }
    if (status) return status;
    FSDPI_STORE(&c->places[c->base.index].done, c->calls);
    fsdpi_shm_ring(c, c->other);
    return fsdpi_shm_wait(c, "finished");
}

static fsdp_status fsdpi_shm_move(fsdpi_comm *base, const fsdp_coll *op, const fsdpi_span *span) {
    fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    const fsdpi_chunk *mine = &span->chunk;
    const char *of[FSDPI_MAX_SRCS];
    fsdp_status status = FSDP_OK;
    if (c->other) return fsdpi_shm_move_pair(c, op, mine);
    for (int k = 0; k < base->size && !status; k++) {
        int is_read = mine->base && (op->kind != FSDP_OP_BROADCAST || k == op->root);
        of[k] = (const char *)span->shared;
        if (is_read) status = fsdpi_shm_find(c, mine, k, &of[k]);
    }
    if (status) return status;
    if (op->kind == FSDP_OP_ALL_REDUCE) return fsdpi_shm_all_reduce(c, op, of);
    if (op->kind == FSDP_OP_ALL_GATHER) fsdpi_shm_all_gather(c, op, of);
    if (op->kind == FSDP_OP_REDUCE_SCATTER) fsdpi_shm_reduce_scatter(c, op, of);
    if (op->kind == FSDP_OP_ALL_TO_ALL) fsdpi_shm_all_to_all(c, op, of);
    if (op->kind == FSDP_OP_BROADCAST && op->root != base->index)
        fsdpi_shm_copy((char *)op->dst, of[op->root],
                       (size_t)op->count * fsdp_dtype_size(op->dtype));
    return fsdpi_shm_barrier(c, "finished");
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
    c->base.shown = (const char *)c->places; // a place begins with the record
    c->base.step = sizeof *c->places;
}

static void fsdpi_shm_use_control(fsdpi_shm_comm *c, void *block) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    w->control = (fsdpi_shm_control *)block;
    w->peers = (fsdpi_shm_peer *)(void *)(w->control + 1);
    if (!w->base.failed) w->base.failed = &w->control->failed;
    w->base.trace = &w->peers[w->base.boot.rank].trace;
    fsdpi_shm_use_group(c, w->peers + w->base.boot.size);
}

static fsdp_status fsdpi_shm_open_threads(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    fsdp_threads *threads = w->base.boot.threads;
    fsdp_status status = FSDP_OK;
    fsdpi_lock(&threads->lock);
    fsdpi_shm_control *block = (fsdpi_shm_control *)threads->common;
    while (block && block->first != c->base.ranks[0]) block = block->next;
    if (!block) {
        block = (fsdpi_shm_control *)fsdpi_alloc(&w->base.boot.allocator,
                                                 fsdpi_shm_control_bytes(w->base.boot.size));
        if (block) {
            block->size = w->base.boot.size;
            block->allocator = w->base.boot.allocator;
            block->first = c->base.ranks[0];
            block->next = (fsdpi_shm_control *)threads->common;
            threads->common = block;
        }
    }
    if (!block) {
        status = fsdpi_comm_error(
            &c->base, FSDP_ERR_OUT_OF_MEMORY,
            "[E604] the allocator has returned NULL for %llu bytes of the common block",
            (unsigned long long)fsdpi_shm_control_bytes(w->base.boot.size));
    } else if (block->size != w->base.boot.size) {
        status = fsdpi_comm_error(
            &c->base, FSDP_ERR_MISMATCH,
            "[E605] this rank has a world size of %d, another one has %d: give all the same",
            w->base.boot.size, (int)block->size);
    } else {
        fsdpi_shm_use_control(c, block);
        fsdpi_shm_peer *me = &w->peers[w->base.boot.rank];
        if (me->state != FSDPI_SHM_ABSENT) {
            status = fsdpi_comm_error(&c->base, FSDP_ERR_INVALID_ARG,
                                      "[E606] another thread has joined as rank %d already: give "
                                      "each thread its own rank",
                                      w->base.boot.rank);
            w->control = NULL;
            w->base.failed = NULL;
        } else {
            w->control->refs++;
            w->joined = 1;
            FSDPI_STORE(&me->state, (uint32_t)FSDPI_SHM_JOINED);
        }
    }
    fsdpi_unlock(&threads->lock);
    return status;
}

// A file that grows beyond this limit gets the process killed.
static int fsdpi_shm_files_are_limited(void) {
    uint64_t limit[2] = {UINT64_MAX, 0}; // struct rlimit64
    (void)fsdpi_syscall(SYS_prlimit64, 0L, 1L /* RLIMIT_FSIZE */, NULL, limit);
    return limit[0] != UINT64_MAX;
}
#define FSDPI_SHM_LIMITED "[E607] the size of files is limited: run ulimit -f unlimited first"

// Maps the common block of the file and takes this rank's byte, by which peers see that it lives.
static fsdp_status fsdpi_shm_enter(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    char *block = fsdpi_shm_map(w, 0,
                                fsdpi_shm_round(w, fsdpi_shm_control_bytes(w->base.boot.size)));
    if (!block)
        return fsdpi_comm_error(
            &c->base, FSDP_ERR_OUT_OF_MEMORY,
            "[E608] this process cannot map the common block (errno %d): raise ulimit -v", errno);
    fsdpi_shm_use_control(c, block);
    if (!fsdpi_shm_live(w))
        return fsdpi_comm_error(&c->base, FSDP_ERR_BACKEND,
                                "[E609] this process cannot lock the common file (errno %d)",
                                errno);
    w->peers[w->base.boot.rank].pid = (uint32_t)getpid();
    w->joined = 1;
    FSDPI_STORE(&w->peers[w->base.boot.rank].state, (uint32_t)FSDPI_SHM_JOINED);
    return FSDP_OK;
}

// An abstract name: it needs no file and goes away with its socket.
static socklen_t fsdpi_shm_name(const fsdpi_shm_world *w, struct sockaddr_un *name) {
    memset(name, 0, sizeof *name);
    name->sun_family = AF_UNIX;
    int used = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "fsdp-shm-%lu-%016llx",
                        (unsigned long)getuid(),
                        (unsigned long long)fsdpi_hash_text(w->base.boot.job));
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)used);
}

// Nothing that is done with a socket waits, but for this.
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
    *gift = fsdpi_fd(*gift);
    return 1;
}

static int fsdpi_shm_socket(void) {
    return fsdpi_fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

/* The first rank: answers another one, which has so many nanoseconds to say who it is. Who is
   started with another size or version can never come, so all are told; a rank that comes twice
   belongs to another job and is sent away. */
static fsdp_status fsdpi_shm_admit(fsdpi_shm_comm *c, int listener, int64_t left,
                                   uint8_t *admitted) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    int fd = fsdpi_fd((int)fsdpi_syscall(SYS_accept4, listener, NULL, NULL,
                                         (long)(SOCK_CLOEXEC | SOCK_NONBLOCK)));
    fsdpi_shm_hello hello;
    fsdpi_shm_answer answer;
    fsdpi_text t = {answer.reason, sizeof answer.reason, 0};
    int gift, k = 0;
    memset(&answer, 0, sizeof answer);
    memcpy(answer.magic, FSDPI_SHM_MAGIC, sizeof answer.magic);
    if (fd < 0) return FSDP_OK;
    if (!fsdpi_same_user(fd) || !fsdpi_shm_readable(fd, left < 1000000000 ? left : 1000000000) ||
        !fsdpi_shm_receive(fd, &hello, sizeof hello, &gift)) {
        (void)close(fd);
        return FSDP_OK;
    }
    if (memcmp(hello.magic, answer.magic, sizeof hello.magic) ||
        hello.version != FSDP_COMM_VERSION) {
        answer.status = FSDP_ERR_MISMATCH;
        fsdpi_say(&t,
                  "[E610] rank %d and rank %d were built with different versions of fsdp.h: build "
                  "both alike",
                  w->base.boot.rank, (int)hello.rank);
    } else if (hello.size != w->base.boot.size) {
        answer.status = FSDP_ERR_MISMATCH;
        fsdpi_say(&t,
                  "[E611] rank %d has a world size of %d, rank %d has %d: give all ranks the same",
                  w->base.boot.rank, w->base.boot.size, (int)hello.rank, (int)hello.size);
    } else if ((k = fsdpi_index_of(&c->base, hello.rank)) == c->base.size || admitted[k]) {
        answer.status = FSDP_ERR_INVALID_ARG;
        fsdpi_say(&t,
                  "[E612] rank %d has joined already: give each process its own rank, and each job "
                  "on this host its own FSDP_JOB_ID",
                  (int)hello.rank);
    }
    if (fsdpi_shm_send(fd, &answer, sizeof answer, answer.status ? -1 : w->fd) && !answer.status)
        admitted[k] = 1;
    (void)close(fd);
    return answer.status == FSDP_ERR_MISMATCH
               ? fsdpi_comm_fail(&c->base, FSDP_ERR_MISMATCH, "%s", answer.reason)
               : FSDP_OK;
}

// The first rank: makes the file.
static fsdp_status fsdpi_shm_found(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    size_t bytes = fsdpi_shm_round(w, fsdpi_shm_control_bytes(w->base.boot.size));
    if (fsdpi_shm_files_are_limited()) // the common block alone may be too large
        return fsdpi_comm_error(&c->base, FSDP_ERR_UNSUPPORTED, FSDPI_SHM_LIMITED);
    fsdpi_shm_set_file(w, fsdpi_fd((int)fsdpi_syscall(SYS_memfd_create, "fsdp", 1L /* CLOEXEC */)));
    if (w->fd < 0)
        return fsdpi_comm_error(&c->base, FSDP_ERR_BACKEND,
                                "[E620] rank %d cannot make the common file by memfd_create (errno "
                                "%d): if that is %d, raise ulimit -n; else allow the call in the "
                                "sandbox of this program",
                                w->base.boot.rank, errno, EMFILE);
    if (!fsdpi_shm_reserve(w, 0, bytes))
        return fsdpi_comm_error(&c->base, FSDP_ERR_OUT_OF_MEMORY,
                                "[E613] the host has no memory for the common block (errno %d)",
                                errno);
    fsdp_status status = fsdpi_shm_enter(c);
    if (status) return status;
    w->control->size = w->base.boot.size;
    w->control->top = bytes;
    return FSDP_OK;
}

// The first rank, which waits at the first barrier already: gives the file to the others as they
// come.
static fsdp_status fsdpi_shm_host(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    uint8_t admitted[FSDPI_MAX_SRCS] = {1};
    struct sockaddr_un name;
    socklen_t length = fsdpi_shm_name(w, &name);
    int listener = fsdpi_shm_socket(), missing = c->base.size - 1;
    fsdp_status status = FSDP_OK;
    if (listener < 0 || bind(listener, (struct sockaddr *)(void *)&name, length) ||
        listen(listener, c->base.size)) {
        if (listener >= 0 && errno == EADDRINUSE)
            status = fsdpi_comm_error(&c->base, FSDP_ERR_INVALID_ARG,
                                      "[E614] another job with this id is starting on this host: "
                                      "give each job its own id (FSDP_JOB_ID, MASTER_PORT)");
        else
            status = fsdpi_comm_error(&c->base, FSDP_ERR_BACKEND,
                                      "[E615] rank %d cannot listen (errno %d)", w->base.boot.rank,
                                      errno);
    }
    while (!status && missing > 0) {
        int64_t left = w->base.boot.timeout_ns - (fsdpi_boot_now(&w->base.boot) - *c->since);
        if (left <= 0) status = fsdpi_shm_late(c, "come");
        else if (fsdpi_comm_failed(&c->base)) status = fsdpi_comm_report(&c->base);
        else if (!fsdpi_shm_readable(listener,
                                     left < FSDPI_SHM_SLICE_NS ? left : FSDPI_SHM_SLICE_NS))
            status = fsdpi_shm_check_peers(c, 1);
        else status = fsdpi_shm_admit(c, listener, left, admitted);
        missing = c->base.size;
        for (int k = 0; k < c->base.size; k++) missing -= admitted[k];
    }
    if (listener >= 0) (void)close(listener);
    return status;
}

// The others: ask the first rank until it answers. A connection that breaks may be to an earlier
// world.
static fsdp_status fsdpi_shm_join(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    fsdpi_shm_hello hello = {{0}, FSDP_COMM_VERSION, w->base.boot.rank, w->base.boot.size, 0};
    fsdpi_shm_answer answer;
    struct sockaddr_un name;
    socklen_t length = fsdpi_shm_name(w, &name);
    int64_t start = *c->since, nap = 500000;
    memcpy(hello.magic, FSDPI_SHM_MAGIC, sizeof hello.magic);
    while (w->fd < 0) {
        int fd = fsdpi_shm_socket(), gift = -1, answered = 0;
        if (fd < 0)
            return fsdpi_comm_error(
                &c->base, FSDP_ERR_BACKEND,
                "[E616] this process cannot make a socket (errno %d): raise ulimit -n", errno);
        // EAGAIN: many ranks have come, and the first does not look at them, just now.
        if (!connect(fd, (struct sockaddr *)(void *)&name, length) && fsdpi_same_user(fd) &&
            fsdpi_shm_send(fd, &hello, sizeof hello, -1)) {
            while (!fsdpi_shm_readable(fd, FSDPI_SHM_SLICE_NS) &&
                   fsdpi_boot_now(&w->base.boot) - start < w->base.boot.timeout_ns) {
            }
            answered = fsdpi_shm_receive(fd, &answer, sizeof answer, &gift) &&
                       !memcmp(answer.magic, FSDPI_SHM_MAGIC, sizeof answer.magic);
        }
        (void)close(fd);
        fsdpi_shm_set_file(w, gift);
        if (answered && answer.status)
            return fsdpi_comm_error(&c->base, (fsdp_status)answer.status, "%.*s", 243,
                                    answer.reason);
        if (answered && w->fd < 0)
            return fsdpi_comm_error(&c->base, FSDP_ERR_BACKEND,
                                    "[E623] this process has too many open files to take the "
                                    "common file of rank %d: raise ulimit -n",
                                    (int)c->base.ranks[0]);
        if (w->fd < 0 && fsdpi_boot_now(&w->base.boot) - start >= w->base.boot.timeout_ns)
            return fsdpi_comm_error(
                &c->base, FSDP_ERR_TIMEOUT,
                "[E617] rank %d has not come within %.1f s: start it on this host, as this user, "
                "with this job id (FSDP_JOB_ID, MASTER_PORT)",
                (int)c->base.ranks[0], (double)w->base.boot.timeout_ns * 1e-9);
        if (w->fd < 0) fsdpi_sleep_ns(nap);
        nap = nap < 20000000 ? nap * 2 : nap;
    }
    fsdp_status status = fsdpi_shm_enter(c);
    // Behind it the others are told; before, they would wait until the deadline.
    if (!status && fsdpi_shm_files_are_limited())
        return fsdpi_comm_fail(&c->base, FSDP_ERR_UNSUPPORTED, FSDPI_SHM_LIMITED);
    return status;
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

static fsdp_status fsdpi_shm_open_world(fsdpi_comm *base) {
    fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    w->fd = -1;
    w->page = (size_t)sysconf(_SC_PAGESIZE);
    w->next_at = FSDPI_SHM_DATA;
    w->crowded = fsdpi_shm_cores() < base->size;
    c->spin_ns = FSDPI_SHM_SPIN_NS;
    int is_host = !base->boot->threads && base->index == 0;
    w->members = base->size;
    c->since = &base->world->open_ns; // one deadline for all that follows
    fsdp_status status = base->boot->threads ? fsdpi_shm_open_threads(c)
                         : is_host           ? fsdpi_shm_found(c)
                                             : fsdpi_shm_join(c);
    if (status) return status;
    fsdpi_comm_begin(base);
    status = fsdpi_shm_show(base, NULL, NULL);
    if (!status && is_host && base->size > 1) status = fsdpi_shm_host(c);
    if (!status) status = fsdpi_shm_wait(c, "come");
    c->since = NULL;
    return fsdpi_comm_end(base, status);
}

// The group's first member makes its block, and shows the others where.
static void *fsdpi_shm_make_group(fsdpi_shm_comm *parent, int size, uint64_t *block) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(parent);
    size_t bytes = fsdpi_shm_group_bytes(size);
    fsdpi_shm_group *group;
    if (w->fd < 0) {
        char *base = fsdpi_shm_share(w, bytes, size);
        *block = (uint64_t)(uintptr_t)base;
        return base;
    }
    bytes = fsdpi_shm_round(w, bytes);
    *block = __atomic_fetch_add(&w->control->top, bytes, __ATOMIC_RELAXED);
    if (!fsdpi_shm_reserve(w, *block, bytes)) return NULL;
    group = (fsdpi_shm_group *)(void *)fsdpi_shm_map(w, *block, bytes);
    if (group) group->refs = (uint32_t)size;
    return group;
}

static void fsdpi_shm_drop_group(fsdpi_shm_comm *c) {
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    size_t bytes = fsdpi_shm_round(w, fsdpi_shm_group_bytes(c->base.size));
    if (!fsdpi_comm_failed(&c->base)) { // else peers have a better reason than this
        FSDPI_STORE(&c->places[c->base.index].closed, 1u);
        fsdpi_futex_wake_all(&c->group->generation, w->fd >= 0);
    }
    if (w->fd < 0) {
        fsdpi_shm_unshare(w, c->group);
        return;
    }
    int last = __atomic_sub_fetch(&c->group->refs, 1u, __ATOMIC_ACQ_REL) == 0;
    (void)munmap((void *)c->group, bytes);
    if (last) fsdpi_shm_give_back(w, c->block, bytes);
}

static fsdp_status fsdpi_shm_prepare(fsdpi_comm *parent, fsdpi_comm *child) {
    if (child->index != 0) return FSDP_OK;
    void *block = fsdpi_shm_make_group(fsdpi_shm_comm_of(parent), child->size, &parent->now.block);
    if (!block && !parent->boot->threads &&
        !fsdpi_shm_has_file(fsdpi_shm_world_of(fsdpi_shm_comm_of(parent))))
        return fsdpi_shm_closed(fsdpi_shm_comm_of(parent));
    if (!block)
        return fsdpi_comm_fail(parent, FSDP_ERR_OUT_OF_MEMORY,
                               "[E618] the host has no memory for the block of a group of %d ranks",
                               child->size);
    fsdpi_shm_comm_of(child)->block = parent->now.block;
    fsdpi_shm_use_group(fsdpi_shm_comm_of(child), block);
    return FSDP_OK;
}

// Finds the block that the group's first member has shown.
static fsdp_status fsdpi_shm_connect(fsdpi_comm *base, fsdpi_comm *base_child,
                                     const fsdp_group *g) {
    fsdpi_shm_comm *parent = fsdpi_shm_comm_of(base), *child = fsdpi_shm_comm_of(base_child);
    fsdpi_shm_world *w = fsdpi_shm_world_of(parent);
    (void)g;
    if (child) child->spin_ns = FSDPI_SHM_SPIN_NS;
    if (child && !child->group) {
        int first = fsdpi_index_of(base, (int)base_child->ranks[0]);
        child->block = fsdpi_record_of(base, first).block;
        size_t bytes = fsdpi_shm_round(w, fsdpi_shm_group_bytes(base_child->size));
        void *block = w->fd < 0 ? (void *)(uintptr_t)child->block
                                : fsdpi_shm_map(w, child->block, bytes);
        if (!block && !fsdpi_shm_has_file(w)) return fsdpi_shm_closed(parent);
        if (!block)
            return fsdpi_comm_fail(
                base, FSDP_ERR_OUT_OF_MEMORY,
                "[E619] this process cannot map %llu bytes of the group's block (errno %d)",
                (unsigned long long)bytes, errno);
        fsdpi_shm_use_group(child, block);
    }
    return fsdpi_shm_barrier(parent, "finished");
}

static void fsdpi_shm_leave_threads(fsdpi_shm_world *w) {
    fsdp_threads *threads = w->base.boot.threads;
    fsdpi_shm_control *control = w->control;
    fsdpi_lock(&threads->lock);
    fsdpi_shm_control *all = (fsdpi_shm_control *)threads->common, **link = &all;
    while (*link && *link != control) link = &(*link)->next;
    if (*link) *link = control->next; // who opens again meets at a new block
    threads->common = all;
    int last = --control->refs == 0;
    fsdpi_unlock(&threads->lock);
    if (!last) return;
    while (control->blocks) {
        fsdpi_shm_block *block = control->blocks;
        fsdp_allocator allocator = block->allocator;
        control->blocks = block->next;
        fsdpi_free(&allocator, block);
    }
    fsdp_allocator allocator = control->allocator;
    fsdpi_free(&allocator, control);
}

static void fsdpi_shm_leave(fsdpi_comm *base) {
    fsdpi_shm_comm *c = fsdpi_shm_comm_of(base);
    fsdpi_shm_world *w = fsdpi_shm_world_of(c);
    if (!base->is_world && c->group) fsdpi_shm_drop_group(c);
    if (!base->is_world || !w->joined) return;
    // Before memory goes: a peer that waits must not take us for dead.
    FSDPI_STORE(&w->peers[base->boot->rank].state, (uint32_t)FSDPI_SHM_LEFT);
    fsdpi_futex_wake_all(&c->group->generation, w->fd >= 0);
}

static int fsdpi_shm_close(fsdpi_comm_world *base) {
    fsdpi_shm_world *w = (fsdpi_shm_world *)(void *)base;
    for (size_t i = 0; i < w->num_numbers * (size_t)base->boot.size; i++)
        fsdpi_shm_unmap_remote(&w->remotes[i]);
    fsdpi_free(&base->boot.allocator, w->remotes);
    if (w->fd >= 0) {
        if (w->control)
            (void)munmap((void *)w->control,
                         fsdpi_shm_round(w, fsdpi_shm_control_bytes(base->boot.size)));
        if (w->life) (void)munmap(w->life, w->page);
        if (fsdpi_shm_has_file(w)) (void)close(w->fd);
    } else if (w->joined) {
        fsdpi_shm_leave_threads(w);
    }
    return 1;
}

// clang-format off
static const fsdpi_transport fsdpi_shm_transport = {
    sizeof(fsdpi_shm_comm), sizeof(fsdpi_shm_world), FSDPI_MAX_SRCS,
    {FSDPI_SHM_KINDS, FSDP_CAP_FUSED_REDUCE, 2, 0, NULL},
    fsdpi_shm_open_world, fsdpi_shm_prepare, fsdpi_shm_connect, fsdpi_shm_leave, fsdpi_shm_close,
    fsdpi_shm_show, fsdpi_shm_hear, fsdpi_shm_move, NULL,
    fsdpi_shm_tell, fsdpi_shm_verdict, fsdpi_shm_say_last,
    fsdpi_shm_take, fsdpi_shm_give, fsdpi_advise_host};
// clang-format on

static fsdp_status fsdpi_shm_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **out) {
    return fsdpi_comm_open(&fsdpi_shm_transport, boot, caps, out);
}

FSDP_API const fsdp_comm_ops *fsdp_shm_comm_ops(void) {
    static const fsdp_comm_ops ops = {
        FSDP_COMM_VERSION,     sizeof(fsdp_comm_ops), "shm",
        fsdpi_shm_open,        fsdpi_comm_split,      fsdpi_comm_close,
        fsdpi_comm_run,        fsdpi_comm_alloc,      fsdpi_comm_free,
        fsdpi_comm_error_text, fsdpi_comm_abort,      fsdpi_comm_poll,
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
#ifdef FSDP_BACKEND_FAKE
#include "backends/fsdp_fake.h"
#endif

static const fsdp_device_ops *fsdpi_host_ops(void);

// In the order in which they are preferred; the last two: see fsdpi_backend.
static const fsdpi_backend fsdpi_backends[] = {
#ifdef FSDP_BACKEND_SHM
    {"shm", fsdp_shm_comm_ops, fsdpi_host_ops, 1, 0},
#endif
#ifdef FSDP_BACKEND_GLOO
    {"gloo", fsdp_gloo_comm_ops, fsdpi_host_ops, 0, 0},
#endif
#ifdef FSDP_BACKEND_NCCL
    {"nccl", fsdp_nccl_comm_ops, fsdp_cuda_device_ops, 0, 0},
#endif
#ifdef FSDP_BACKEND_FAKE
    {"fake", fsdp_fake_comm_ops, fsdpi_host_ops, 0, 1},
#endif
    {NULL, NULL, NULL, 0, 0}};

/* ==== core/spawn.h ==========================================================================
   ranks that a program starts itself: fsdp_spawn */

// Processes report the result of fn through a pipe, in records that are written whole; a rank
// reports before it aborts its world, so that the first one is the cause, later ones consequences.

#include <poll.h> // poll

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
    fsdp_world *world; // threads
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
        ssize_t written = write(s->pipe[1], r, sizeof *r); // less than PIPE_BUF: whole or not
        (void)written; // at all: then the parent is gone, and takes this process along
    }
}

// The life of one rank.
static fsdp_status fsdpi_spawn_run(fsdpi_spawn_rank *me) {
    fsdpi_spawn *s = me->spawn;
    fsdp_world_desc d = s->world;
    fsdpi_spawn_report r;
    char text[64];
    memset(&r, 0, sizeof r);
    d.rank = d.local_rank = r.rank = me->rank;
    r.status = (int32_t)fsdp_init(&d, &me->world);
    fsdp_world *world = me->world;
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
    snprintf(text, sizeof text, "[E512] the rank's function returned %d, expected 0", value);
    int said = (r.status == value || failed) && *fsdp_last_error(world);
    if (r.status) fsdpi_spawn_text(&r, said ? fsdp_last_error(world) : text);
    fsdpi_spawn_tell(s, &r);
    if (r.status && !failed) fsdp_abort(world, text);
    (void)fsdp_shutdown(world);
    return (fsdp_status)r.status;
}

static void fsdpi_spawn_left(void *arg) { // fn has ended its thread
    fsdpi_spawn_rank *me = (fsdpi_spawn_rank *)arg;
    fsdpi_spawn_report r = {me->rank, FSDP_ERR_PEER_LOST, ""};
    snprintf(r.text, sizeof r.text,
             "[E517] rank %d has ended its thread inside its function: return from it", me->rank);
    fsdpi_spawn_tell(me->spawn, &r);
    fsdp_abort(me->world, r.text);
    (void)fsdp_shutdown(me->world);
}

static void *fsdpi_spawn_thread(void *arg) {
    pthread_cleanup_push(fsdpi_spawn_left, arg);
    (void)fsdpi_spawn_run((fsdpi_spawn_rank *)arg);
    pthread_cleanup_pop(0);
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
        snprintf(r.text, sizeof r.text, "rank %d: [E513] the system cannot start its thread: %s", k,
                 strerror(rc));
        fsdpi_spawn_tell(s, &r);
        break;
    }
    for (int k = 0; k < s->num_ranks; k++)
        if (ranks[k].started) (void)pthread_join(ranks[k].thread, NULL);
}

static void fsdpi_spawn_child(fsdpi_spawn_rank *me, int parent) {
    (void)close(me->spawn->pipe[0]);
    // A rank does not outlive its parent, also if that died before this line.
    (void)fsdpi_syscall(SYS_prctl, 1L /* PR_SET_PDEATHSIG */, 9L /* SIGKILL */, 0L, 0L, 0L);
    if (getppid() != parent) _exit(1);
    fsdpi_plug(); // whoever prints must not print into a file of the rank
    fsdp_status status = fsdpi_spawn_run(me);
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
        snprintf(r.text, sizeof r.text, "[E514] rank %d was killed by signal %d (%s)", rank,
                 WTERMSIG(how), fsdpi_strsignal(WTERMSIG(how)));
    else
        snprintf(r.text, sizeof r.text,
                 "[E515] rank %d ended with exit code %d inside its function", rank,
                 WEXITSTATUS(how));
    s->first = r;
}

// One look at all processes: who has ended, what has been reported. Returns how many are running.
static int fsdpi_spawn_look(fsdpi_spawn *s, fsdpi_spawn_rank *ranks, int *how, int signalled) {
    int running = 0;
    fsdpi_spawn_report r;
    struct pollfd p = {s->pipe[0], POLLIN, 0};
    for (int k = 0; k < s->num_ranks; k++) {
        if (ranks[k].pid <= 0 || ranks[k].ended) continue;
        int rc = (int)waitpid(ranks[k].pid, &how[k], WNOHANG);
        if (rc == ranks[k].pid) ranks[k].ended = 1;
        else if (rc < 0 && fsdpi_kill(ranks[k].pid, 0))
            ranks[k].ended = 1; // reaped by the program's own handler
        else running++;
    }
    while (poll(&p, 1, 0) > 0 && read(s->pipe[0], &r, sizeof r) == (ssize_t)sizeof r) {
        if (r.rank < 0 || r.rank >= s->num_ranks) continue; // whoever wrote it
        r.text[sizeof r.text - 1] = 0;
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
    if (!fsdpi_syscall(SYS_pipe2, s->pipe, (long)FSDPI_CLOEXEC))
        for (int k = 0; k < 2; k++) s->pipe[k] = fsdpi_fd(s->pipe[k]);
    if (s->pipe[0] < 3 || s->pipe[1] < 3)
        return fsdp_fail(NULL, FSDP_ERR_IO, "[E510] fsdp_spawn: the system cannot make a pipe: %s",
                         strerror(errno));
    (void)fflush(NULL); // or every child would print what is buffered here
    for (int k = 0; k < s->num_ranks && !s->first.status; k++) {
        ranks[k].pid = (int)fork();
        if (ranks[k].pid == 0) fsdpi_spawn_child(&ranks[k], parent);
        if (ranks[k].pid > 0) continue;
        s->first.rank = k;
        s->first.status = (int32_t)FSDP_ERR_OUT_OF_MEMORY;
        snprintf(s->first.text, sizeof s->first.text,
                 "rank %d: [E516] the system cannot fork its process: %s", k, strerror(errno));
    }
    struct pollfd p = {s->pipe[0], POLLIN, 0};
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
    fsdp_status status = fsdp_desc_read(NULL, &d, desc, sizeof d, "fsdp_spawn_desc");
    if (!status)
        status = fsdp_desc_read(NULL, &s.world, d.world, sizeof s.world, "fsdp_world_desc");
    if (status) return status;
    if (!fn || d.num_ranks < 1 || d.num_ranks > FSDPI_MAX_SRCS || d.grace_ms < 0)
        return fsdpi_bad(NULL,
                         "[E511] fsdp_spawn: num_ranks is %d, grace_ms is %d, fn is %s: expected "
                         "num_ranks from 1 to %d, grace_ms >= 0 and a function",
                         d.num_ranks, d.grace_ms, fn ? "given" : "NULL", FSDPI_MAX_SRCS);
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
    if (!ranks) return fsdpi_no_memory(NULL, "fsdp_spawn", "", bytes);
    for (int k = 0; k < d.num_ranks; k++) ranks[k].spawn = &s, ranks[k].rank = k;
    if (d.threads) fsdpi_spawn_threads(&s, ranks);
    else status = fsdpi_spawn_processes(&s, ranks, (int *)(void *)(ranks + d.num_ranks));
    fsdpi_free(&allocator, ranks);
    if (status || !s.first.status) return status;
    return fsdp_fail(NULL, (fsdp_status)s.first.status, "fsdp_spawn: %s", s.first.text);
}

/* ==== core/comm.h ===========================================================================
   compiled-in backends, and the one place that turns an op record into a collective */

/* The one with this name; NULL: the first one that can serve the job, on the device of the very
   first, since a program does not move to GPUs by itself. The last entry: there is none. */
static const fsdpi_backend *fsdpi_find_backend(const char *name, int is_spread) {
    const fsdpi_backend *first = fsdpi_backends, *b = first;
    while (b->name && (name ? strcmp(name, b->name) != 0
                            : (is_spread && b->one_host) || b->alone ||
                                  b->device_ops != first->device_ops))
        b++;
    return b;
}

// Do ranks meet, so that they need a name for their job?
static int fsdpi_ranks_meet(const fsdp_comm_ops *ops) {
    const fsdpi_backend *b = fsdpi_backends;
    while (b->name && b->comm_ops() != ops) b++;
    return !b->alone;
}

/* What a rank reads from the others. Of a collective (group_size-1) times its own part; of an
   all_reduce, however a backend does it, what it has to receive at least. */
static inline uint64_t fsdpi_coll_bytes(int kind, uint64_t group_size, uint64_t nbytes) {
    if (kind == FSDP_OP_ALL_GATHER || kind == FSDP_OP_REDUCE_SCATTER || kind == FSDP_OP_ALL_TO_ALL)
        return (group_size - 1) * nbytes;
    if (kind == FSDP_OP_ALL_REDUCE)
        return (2 * (group_size - 1) * nbytes + group_size - 1) / group_size;
    return kind == FSDP_OP_SEND ? 0 : nbytes;
}

// A function of the user's has failed inside an op: the world cannot go on.
static fsdp_status fsdpi_user_fail(fsdp_world *w, const fsdp_op *op, fsdp_status result) {
    int fatal = result > FSDP_ERR_INVALID_STATE && result <= FSDP_ERR_INTERNAL;
    return fsdpi_world_fail(
        w, fatal ? result : FSDP_ERR_ABORTED,
        "rank %d: [E402] your function for %s (%s) of unit '%s' returned %d (%s)", w->rank,
        fsdp_op_name(op->kind), fsdp_op_label(op), op->what, (int)result, fsdp_status_name(result));
}

// The user's function for a unit's collective of a step; not for those of param_full.
static fsdp_custom_comm fsdpi_custom_comm(const fsdp_op *op, void **user) {
    int which = op->label == FSDP_LABEL_GATHER     ? 0
                : op->label == FSDP_LABEL_REDUCE   ? 1
                : op->label == FSDP_LABEL_REPLICAS ? 2
                                                   : -1;
    if (which < 0) return NULL;
    *user = op->unit->options.custom_user[which];
    return op->unit->options.custom[which];
}

static fsdp_status fsdpi_run_collective(fsdp_world *w, const fsdp_op *op, void *stream) {
    fsdp_coll c; // every field is set here
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
    // What ranks must agree on beside kind, dtype and count, which backends compare, too; not seq:
    // they may differ in local ops. Beyond the groups of a unit they may have other optimizers.
    uint64_t root = op->kind == FSDP_OP_BROADCAST ? (uint64_t)(uint32_t)op->root << 40 : 0;
    uint64_t how = root | (uint64_t)op->out_dtype << 32 | (uint64_t)op->redop << 24 |
                   (uint64_t)op->label << 16 | (uint64_t)op->state << 8 | op->accumulate;
    uint64_t given = op->unit || op->label == FSDP_LABEL_CLIP ? op->given : 0;
    c.fingerprint = fsdpi_hash(fsdpi_hash(op->what_hash, how), op->step + given);
    memcpy(c.agree, op->agree, sizeof c.agree);
    c.agree[FSDP_AGREE_STEP] = (uint8_t)op->step;
    c.agree[FSDP_AGREE_GIVEN] = (uint8_t)given;
    void *user;
    fsdp_custom_comm custom = fsdpi_custom_comm(op, &user);
    fsdp_status status = custom ? custom(user, w->comm_ops, op->comm, &c)
                                : w->comm_ops->run(op->comm, &c);
    const char *text = status ? w->comm_ops->error_text(op->comm) : "";
    if (status && custom && !*text) return fsdpi_user_fail(w, op, status);
    return status ? fsdpi_world_fail(w, status, "%s", text) : FSDP_OK;
}

/* ==== core/host.h ===========================================================================
   the device table over host memory; the default device of every world */

// Stateless: every op is done when the call returns; lanes make it asynchronous (core/lanes.h).

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
        // Loops of their own: in one, clang -Ofast fuses product and sum, whatever pragmas say.
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
    // clang-format off
    static const fsdp_device_ops ops = {
        FSDP_DEVICE_VERSION, sizeof(fsdp_device_ops), FSDP_DEVICE_HOST, "host", fsdpi_host_open,
        fsdpi_host_close, fsdpi_host_alloc, fsdpi_host_free, NULL, NULL, NULL, NULL, NULL, NULL,
        NULL, NULL, fsdpi_host_copy, fsdpi_host_zero, fsdpi_host_norm, NULL, NULL};
    // clang-format on
    return &ops;
}

/* ==== core/timeline.h =======================================================================
   when records ran on a device with streams, for extensions that ask */

// Owns: the events between which records run, until both have happened. There is none of it where
// no extension has `ran`. A device tells times as distances between events: of a base, at which the
// host has looked at the world's clock.

#define FSDPI_TIMES_MAX  256                   // records that wait to be told
#define FSDPI_TIMES_BASE ((int64_t)8000000000) // distances lose digits: then a new base

enum { FSDPI_TIMED_RUNS, FSDPI_TIMED_ENDS, FSDPI_TIMED_FAILED }; // between its events, behind them

typedef struct fsdpi_timed {
    fsdp_op op;
    void *begin, *end;
    int state; // FSDPI_TIMED_*
} fsdpi_timed;

struct fsdpi_timeline {
    void *base; // event
    int64_t base_ns;
    uint32_t first, next; // told and begun so far
    fsdpi_timed ring[FSDPI_TIMES_MAX];
};

static void fsdpi_timeline_close(fsdp_world *w) {
    fsdpi_timeline *t = w->timeline;
    if (!t) return;
    for (int i = 0; i < FSDPI_TIMES_MAX; i++) {
        if (t->ring[i].begin) w->device_ops->destroy(w->device, NULL, t->ring[i].begin);
        if (t->ring[i].end) w->device_ops->destroy(w->device, NULL, t->ring[i].end);
    }
    if (t->base) w->device_ops->destroy(w->device, NULL, t->base);
    fsdpi_free(&w->boot.allocator, t);
    w->timeline = NULL;
}

// The device's present is the world's, once COMPUTE has come there.
static fsdp_status fsdpi_timeline_rebase(fsdp_world *w) {
    fsdpi_timeline *t = w->timeline;
    fsdp_status status = w->device_ops->record(w->device, w->streams[FSDP_STREAM_COMPUTE], t->base);
    if (!status) status = w->device_ops->sync(w->device, t->base, w->boot.timeout_ns);
    t->base_ns = fsdpi_now(w);
    return status;
}

static fsdp_status fsdpi_timeline_open(fsdp_world *w) {
    const fsdp_device_ops *d = w->device_ops;
    if (w->timeline) return FSDP_OK;
    if (!d->timer || !d->elapsed) return FSDP_ERR_UNSUPPORTED;
    fsdpi_timeline *t = (fsdpi_timeline *)fsdpi_alloc(&w->boot.allocator, sizeof *t);
    if (!t) return FSDP_ERR_OUT_OF_MEMORY;
    w->timeline = t;
    fsdp_status status = d->timer(w->device, &t->base);
    for (int i = 0; i < FSDPI_TIMES_MAX && !status; i++) {
        status = d->timer(w->device, &t->ring[i].begin);
        if (!status) status = d->timer(w->device, &t->ring[i].end);
    }
    if (!status) status = fsdpi_timeline_rebase(w);
    if (status) fsdpi_timeline_close(w);
    return status;
}

/* Tells of records that have run, in the order of issue; the first one may be waited for. What a
   device cannot tell is left out. */
static void fsdpi_timeline_tell(fsdp_world *w, int64_t wait_ns) {
    const fsdp_device_ops *d = w->device_ops;
    fsdpi_timeline *t = w->timeline;
    while (t && t->first != t->next) {
        fsdpi_timed *one = &t->ring[t->first % FSDPI_TIMES_MAX];
        int64_t begin, end;
        if (one->state == FSDPI_TIMED_RUNS) return; // a function of the user's issues others
        if (one->state == FSDPI_TIMED_ENDS && d->sync(w->device, one->end, wait_ns)) return;
        wait_ns = 0;
        t->first++;
        if (one->state == FSDPI_TIMED_ENDS && !d->elapsed(w->device, t->base, one->begin, &begin) &&
            !d->elapsed(w->device, t->base, one->end, &end))
            fsdpi_tell_ran(w, &one->op, t->base_ns + begin, t->base_ns + end);
    }
}

// Nothing is told any more of what has been issued so far.
static void fsdpi_timeline_end_all(fsdp_world *w) {
    fsdpi_timeline_tell(w, 0);
    if (w->timeline) w->timeline->first = w->timeline->next;
}

// A place for a record that is about to run, behind its first event; NULL: it will not be told.
static fsdpi_timed *fsdpi_timeline_begin(fsdp_world *w, const fsdp_op *op, void *stream) {
    fsdpi_timeline *t = w->timeline;
    if (!t) return NULL;
    fsdpi_timeline_tell(w, t->next - t->first < FSDPI_TIMES_MAX ? 0 : w->boot.timeout_ns);
    if (t->next - t->first == FSDPI_TIMES_MAX) return NULL;
    if (t->next == t->first && fsdpi_now(w) - t->base_ns > FSDPI_TIMES_BASE &&
        fsdpi_timeline_rebase(w))
        return NULL;
    fsdpi_timed *one = &t->ring[t->next % FSDPI_TIMES_MAX];
    one->op = *op;
    one->op.list = NULL; // it may be gone when the record is told
    one->op.list_count = 0;
    one->state = FSDPI_TIMED_RUNS;
    if (w->device_ops->record(w->device, stream, one->begin)) return NULL;
    t->next++;
    return one;
}

// The record has been issued, or has failed.
static void fsdpi_timeline_end(fsdp_world *w, fsdpi_timed *one, void *stream, fsdp_status status) {
    if (!status) status = w->device_ops->record(w->device, stream, one->end);
    one->state = status ? FSDPI_TIMED_FAILED : FSDPI_TIMED_ENDS;
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
    uint32_t stop, is_here;
    fsdp_op ring[FSDPI_LANE_OPS];
};

// Why a call of the device table has failed.
static const char *fsdpi_device_text(const fsdp_world *w, fsdp_status status) {
    const char *text = w->device_ops->error_text ? w->device_ops->error_text(w->device) : "";
    return *text ? text : fsdp_status_text(status);
}

// The device has failed in a call that leaves the world as it is.
static fsdp_status fsdpi_device_error(fsdp_world *w, fsdp_status status, const char *what) {
    return fsdp_fail(w, status, "[E801] the library could not %s on device %s: %s", what,
                     w->device_ops->name, fsdpi_device_text(w, status));
}

static int fsdpi_is_host(const fsdp_world *w) {
    return (w->device_ops->flags & FSDP_DEVICE_HOST) != 0;
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
    case FSDP_OP_UPDATE:
        status = op->call ? op->call(op, stream)
                          : d->update(w->device, stream, (const fsdp_update *)op->list);
        break;
    case FSDP_OP_USE: break;
    default: return fsdpi_run_collective(w, op, stream);
    }
    if (status == FSDP_OK) return FSDP_OK;
    return fsdpi_world_fail(w, status, "rank %d: [E802] %s (%s) of '%s' failed on device %s: %s",
                            w->rank, fsdp_op_name(op->kind), fsdp_op_label(op), op->what, d->name,
                            fsdpi_device_text(w, status));
}

// The same for a record whose times an extension wants: in the caller's or a worker's thread.
static FSDPI_NOINLINE fsdp_status fsdpi_execute_timed(fsdp_world *w, const fsdp_op *op,
                                                      void *stream) {
    fsdpi_timed *one = stream ? fsdpi_timeline_begin(w, op, stream) : NULL;
    int64_t begin = fsdpi_now(w);
    fsdp_status status = fsdpi_execute(w, op, stream);
    if (one) fsdpi_timeline_end(w, one, stream, status);
    if (!stream && !status) fsdpi_tell_ran(w, op, begin, fsdpi_now(w));
    return status;
}

static inline fsdp_status fsdpi_run_op(fsdp_world *w, const fsdp_op *op, void *stream) {
    return op->timed ? fsdpi_execute_timed(w, op, stream) : fsdpi_execute(w, op, stream);
}

// Wait until the lane has finished `seq` records: spin for a hand-off's time, then sleep.
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
    fsdpi_stay();
    FSDPI_STORE(&lane->is_here, 1u);
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
        for (int i = 0; i < op->num_waits; i++) {
            fsdpi_lane *other = w->lanes[op->wait[i].stream];
            if (other && other != lane) fsdpi_lane_wait(other, op->wait[i].seq);
        }
        if (!fsdpi_failed(w))
            (void)fsdpi_run_op(w, op, NULL); // a failure is sticky: seen by the caller
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
    if (!lane) return fsdpi_no_memory(w, "worker thread (lane)", "", sizeof *lane);
    lane->world = w;
    int rc = pthread_create(&lane->thread, NULL, fsdpi_lane_main, lane);
    if (rc) {
        fsdpi_free(&w->boot.allocator, lane);
        return fsdp_fail(w, FSDP_ERR_OUT_OF_MEMORY,
                         "[E302] the system cannot start a worker thread (lane): %s", strerror(rc));
    }
    w->lanes[stream] = lane;
    while (!FSDPI_LOAD(&lane->is_here)) fsdpi_futex_wait(&lane->is_here, 0, 50000, 0);
    return FSDP_OK;
}

/* The stream EXTENSION begins when something is issued on it: on a device with streams another
   stream; with lanes a thread, where collectives of more than one stream may run at a time. */
static fsdp_status fsdpi_extension_stream(fsdp_world *w) {
    const int s = FSDP_STREAM_EXTENSION;
    if (w->mode == FSDPI_NATIVE && !w->streams[s]) {
        fsdp_status status = w->device_ops->stream(w->device, s, &w->streams[s]);
        if (status) w->streams[s] = NULL;
        return status ? fsdpi_device_error(w, status, "make a stream") : FSDP_OK;
    }
    if (w->mode != FSDPI_LANES || w->lanes[s]) return FSDP_OK;
    if (w->size == 1 || w->caps.lanes > 1) return fsdpi_lane_start(w, s);
    w->lanes[s] = w->lanes[FSDP_STREAM_GATHER];
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
    return status ? fsdpi_world_fail(w, status, "%s", w->comm_ops->error_text(w->comm)) : FSDP_OK;
}

/* A call of the device table has failed outside an op. A collective that a peer's end has stopped
   looks like that too: then the backend knows more. */
static fsdp_status fsdpi_device_fail(fsdp_world *w, fsdp_status status, const char *what) {
    fsdp_status known = fsdpi_backend_poll(w);
    if (known) return known;
    return fsdpi_world_fail(w, status, "rank %d: [E804] %s device %s failed: %s", w->rank, what,
                            w->device_ops->name, fsdpi_device_text(w, status));
}

#define FSDPI_FENCE_NS       ((int64_t)50000000)   // from one look at the world to the next
#define FSDPI_FENCE_GRACE_NS ((int64_t)3000000000) // the backend, which knows more, is to be first
#define FSDPI_FENCE_LAST_NS  ((int64_t)500000000)  // in a failed world, whose collectives end

// The host waits for the fence until the deadline; when the world fails meanwhile, not much longer.
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

/* *event := now, in the order of `stream`. A device records it when another stream asks. That comes
   late where more work follows at once: `due` is the buffer of such a mark, else NULL. */
static inline void fsdpi_mark(fsdp_world *w, int stream, fsdp_event *event, const fsdp_buf *due) {
    fsdpi_order *o = &w->order[stream];
    event->stream = stream;
    if (w->mode == FSDPI_NATIVE) event->seq = ++o->behind[stream];
    else event->seq = w->lanes[stream] ? w->lanes[stream]->issued : 1;
    if (due && due->ptr && w->mode == FSDPI_NATIVE) // else a rehearsal's
        o->due_for = o->due++ ? NULL : due;
}

// A point behind all marks of a stream so far.
static fsdp_status fsdpi_record_point(fsdp_world *w, int stream) {
    fsdpi_order *o = &w->order[stream];
    fsdpi_event *p = &w->points[(unsigned)stream * FSDPI_POINTS + o->recorded++ % FSDPI_POINTS];
    memcpy(p->behind, o->behind, sizeof p->behind);
    o->due = 0;
    fsdp_status status = w->device_ops->record(w->device, w->streams[stream], p->event);
    return status ? fsdpi_device_fail(w, status, "recording an event on") : FSDP_OK;
}

// A stream waits for a mark of another one, unless it is behind it: at the first point that has it.
static fsdp_status fsdpi_wait_for(fsdp_world *w, int stream, const fsdp_event *mark) {
    fsdpi_order *o = &w->order[stream], *other = &w->order[mark->stream];
    const fsdpi_event *p = &w->points[(unsigned)mark->stream * FSDPI_POINTS];
    uint64_t at = other->recorded;
    if (o->behind[mark->stream] >= mark->seq) return FSDP_OK;
    for (; at > 0 && other->recorded - at < FSDPI_POINTS; at--)
        if (p[(at - 1) % FSDPI_POINTS].behind[mark->stream] < mark->seq) break;
    fsdp_status status = at == other->recorded ? fsdpi_record_point(w, mark->stream) : FSDP_OK;
    if (status) return status;
    p += at % FSDPI_POINTS;
    for (int s = 0; s < FSDP_STREAM_COUNT; s++)
        if (o->behind[s] < p->behind[s]) o->behind[s] = p->behind[s];
    status = w->device_ops->wait(w->device, w->streams[stream], p->event);
    return status ? fsdpi_device_fail(w, status, "ordering streams of") : FSDP_OK;
}

// A hook in a worker thread has called what waits for the worker threads: it would wait for itself.
static int fsdpi_waits_for_itself(fsdp_world *w) {
    int is_lane = 0;
    for (int s = 0; s < FSDP_STREAM_COUNT; s++)
        is_lane |= w->lanes[s] && pthread_equal(w->lanes[s]->thread, pthread_self());
    if (is_lane)
        (void)fsdpi_world_fail(w, FSDP_ERR_INVALID_STATE,
                               "rank %d: [E216] a hook that runs in a worker thread has called a "
                               "function of the world: communicate by the comm that the hook was "
                               "given, or run inline (FSDP_LANES=0)",
                               w->rank);
    return is_lane;
}

// The host waits until everything issued so far on a stream is done.
static fsdp_status fsdpi_sync(fsdp_world *w, int stream) {
    if (fsdpi_is_child(w) || fsdpi_waits_for_itself(w)) return fsdpi_failed(w);
    if (w->lanes[stream]) fsdpi_lane_wait(w->lanes[stream], w->lanes[stream]->issued);
    if (!w->fence || !w->streams[stream]) return fsdpi_failed(w);
    fsdp_status status = w->device_ops->record(w->device, w->streams[stream], w->fence);
    if (!status) status = fsdpi_await_fence(w);
    if (status) return fsdpi_device_fail(w, status, "waiting for");
    fsdpi_timeline_tell(w, 0);
    status = fsdpi_backend_poll(w); // what came meanwhile
    return status ? status : fsdpi_failed(w);
}

static void fsdpi_drain(fsdp_world *w) {
    for (int s = 0; s < FSDP_STREAM_COUNT; s++) (void)fsdpi_sync(w, s);
}

// Run a record in the order of its stream, after the events in wait[].
static fsdp_status fsdpi_issue(fsdp_world *w, const fsdp_op *op) {
    if (w->mode == FSDPI_INLINE) return fsdpi_run_op(w, op, NULL);
    if (w->mode == FSDPI_NATIVE) {
        const fsdpi_order *o = &w->order[op->stream];
        int again = op->stream == FSDP_STREAM_COMPUTE || (op->dst && o->due_for == op->dst);
        int swap = op->num_waits == 2 && op->wait[0].seq < op->wait[1].seq; // the later one first
        fsdp_status status = o->due && !again ? fsdpi_record_point(w, op->stream) : FSDP_OK;
        for (int i = 0; i < op->num_waits && !status; i++)
            status = fsdpi_wait_for(w, op->stream, &op->wait[i ^ swap]);
        return status ? status : fsdpi_run_op(w, op, w->streams[op->stream]);
    }
    if (w->lanes[op->stream]) {
        fsdpi_lane_push(w->lanes[op->stream], op);
        return FSDP_OK;
    }
    for (int i = 0; i < op->num_waits; i++) {
        fsdpi_lane *lane = w->lanes[op->wait[i].stream];
        if (lane) fsdpi_lane_wait(lane, op->wait[i].seq);
    }
    fsdp_status failed = fsdpi_failed(w); // by a record that was waited for
    return failed ? failed : fsdpi_run_op(w, op, NULL);
}

// A record of the world, which no model has: shown to the extensions of all of them, and run at
// once; what the host can copy it does. `stream`: native, or NULL.
static fsdp_status fsdpi_emit_world(fsdp_world *w, fsdp_op *op, void *stream) {
    fsdp_op seen = *op;
    int32_t size;
    op->seq = seen.seq = ++w->seq;
    seen.comm_number = (uint16_t)fsdpi_comm_number(w, op->comm, &size);
    for (fsdp_model *m = w->models; m; m = m->next) {
        if (m->watch & FSDPI_TIMES) seen.timed = 1;
        if ((m->watch & FSDPI_OPS) && fsdpi_taken(m, &seen)) return FSDP_OK;
    }
    if (seen.kind != FSDP_OP_COPY || !fsdpi_is_host(w)) return fsdpi_run_op(w, &seen, stream);
    int64_t begin = seen.timed ? fsdpi_now(w) : 0;
    fsdp_status status = fsdpi_host_copy(NULL, NULL, &seen);
    if (seen.timed && !status) fsdpi_tell_ran(w, &seen, begin, fsdpi_now(w));
    return status;
}

/* Rows of bytes between host and device memory, or within it, behind what COMPUTE has to do; done
   on return. It waits: for numbers that the host asks for (norms, verdicts), else in no steady
   step. */
static fsdp_status fsdpi_transfer_rows(fsdp_world *w, void *dst, const void *src,
                                       const fsdp_block *rows) {
    fsdp_op op = FSDP_ZERO;
    op.kind = FSDP_OP_COPY;
    op.label = FSDP_LABEL_TRANSFER;
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
    if (fsdpi_is_host(w)) return fsdpi_emit_world(w, &op, NULL);
    status = fsdpi_emit_world(w, &op, w->streams[FSDP_STREAM_COMPUTE]);
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
        if (sub->comm) w->comm_ops->close(sub->comm);
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

// Does each rank exist, and appear once? Increasing ones do; others are marked.
static fsdp_status fsdpi_mesh_check_ranks(fsdp_world *w, const int32_t *ranks, int64_t numel) {
    const size_t bytes = (size_t)w->size / 8 + 1;
    int increasing = 1;
    for (int64_t i = 0; i < numel; i++) {
        if (ranks[i] < 0 || ranks[i] >= w->size)
            return fsdpi_bad(w, "[E113] mesh: ranks has %d, expected 0..%d", ranks[i], w->size - 1);
        increasing &= i == 0 || ranks[i] > ranks[i - 1];
    }
    if (increasing) return FSDP_OK;
    uint8_t *seen = (uint8_t *)fsdpi_alloc(&w->boot.allocator, bytes);
    if (!seen) return fsdpi_fail_together(w, fsdpi_no_memory(w, "mesh: ranks", "", bytes));
    int64_t i = 0;
    for (; i < numel && !(seen[ranks[i] / 8] >> ranks[i] % 8 & 1); i++)
        seen[ranks[i] / 8] = (uint8_t)(seen[ranks[i] / 8] | 1u << ranks[i] % 8);
    fsdpi_free(&w->boot.allocator, seen);
    if (i == numel) return FSDP_OK;
    return fsdpi_bad(w, "[E114] mesh: rank %d appears twice in ranks", ranks[i]);
}

static fsdp_status fsdpi_mesh_check(fsdp_world *w, const fsdp_mesh_desc *d) {
    if (d->ndim < 1 || d->ndim > FSDP_MAX_DIMS)
        return fsdpi_bad(w, "[E110] mesh: ndim is %d, expected 1..%d", d->ndim, FSDP_MAX_DIMS);
    int64_t numel = 1;
    for (int i = 0; i < d->ndim; i++) {
        if (d->shape[i] < 1)
            return fsdpi_bad(w, "[E111] mesh: size of dim %d is %d, expected >= 1", i, d->shape[i]);
        numel *= d->shape[i];
        if (numel > w->size)
            return fsdpi_bad(w, "[E112] mesh: the product of the sizes exceeds %d ranks", w->size);
    }
    return d->ranks ? fsdpi_mesh_check_ranks(w, d->ranks, numel) : FSDP_OK;
}

// Does a mesh have all the ranks of another one? Ranks in the same order are found at once.
static int fsdpi_mesh_contains(const fsdp_mesh *mesh, const fsdp_mesh *part) {
    int num = fsdpi_mesh_numel(mesh), num_part = fsdpi_mesh_numel(part), at = 0;
    for (int i = 0; i < num_part; i++) {
        int tries = 0;
        while (tries < num && mesh->ranks[at] != part->ranks[i]) {
            at = at + 1 < num ? at + 1 : 0;
            tries++;
        }
        if (tries == num) return 0;
    }
    return 1;
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
    const size_t bytes = (size_t)mesh->shape[dim] * sizeof(int32_t);
    int32_t *members = (int32_t *)fsdpi_alloc(&w->boot.allocator, bytes);
    if (!members) return fsdpi_no_memory(w, "mesh: group", "", bytes);
    fsdpi_mesh_members(mesh, &d, 1, members);
    fsdp_group group = {
        me < 0 ? -1 : members[first], me < 0 ? -1 : me - first, size, lane, members + first,
        name ? name : "mesh"};
    w->num_comms++;
    fsdp_status status = w->comm_ops->split(parent, &group, out);
    fsdpi_free(&w->boot.allocator, members);
    return status ? fsdpi_world_fail(w, status, "%s", w->comm_ops->error_text(parent)) : FSDP_OK;
}

// This rank's group of `size` neighbours along a dim, for what runs on a stream; made at first use.
static fsdp_status fsdpi_mesh_subgroup(const fsdp_mesh *mesh, int dim, int size, int stream,
                                       const char *name, fsdp_comm **out) {
    fsdp_world *w = mesh->world;
    fsdpi_subgroup *sub = w->subgroups;
    while (sub &&
           !(sub->mesh == mesh && sub->dim == dim && sub->size == size && sub->stream == stream))
        sub = sub->next;
    *out = sub ? sub->comm : NULL;
    if (sub) return FSDP_OK;
    sub = (fsdpi_subgroup *)fsdpi_alloc(&w->boot.allocator, sizeof *sub);
    fsdp_status status = sub ? fsdpi_mesh_split(mesh, dim, size, stream, name, &sub->comm)
                             : fsdpi_no_memory(w, "mesh: group", "", sizeof *sub);
    if (status) {
        fsdpi_free(&w->boot.allocator, sub);
        return fsdpi_fail_together(w, status);
    }
    sub->mesh = mesh;
    sub->dim = dim;
    sub->size = size;
    sub->stream = stream;
    sub->number = w->num_comms;
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
    mesh->comm_number[dim] = w->num_comms;
    if (!status && two)
        status = fsdpi_mesh_split(mesh, dim, mesh->shape[dim], FSDP_STREAM_REDUCE, mesh->names[dim],
                                  &mesh->reduce_comm[dim]);
    if (!status && !two) mesh->reduce_comm[dim] = mesh->gather_comm[dim];
    return status;
}

static fsdp_status fsdpi_mesh_make(fsdp_world *w, const fsdp_mesh_desc *d, fsdp_mesh **out) {
    const fsdp_allocator *a = &w->boot.allocator;
    fsdp_mesh *mesh = (fsdp_mesh *)fsdpi_alloc(a, sizeof *mesh);
    if (!mesh) return fsdpi_no_memory(w, "mesh", "", sizeof *mesh);
    mesh->world = w;
    mesh->ndim = d->ndim;
    memcpy(mesh->shape, d->shape, sizeof mesh->shape);
    int numel = mesh->root_numel = fsdpi_mesh_numel(mesh), mine = -1, missing = 0;
    mesh->ranks = (int32_t *)fsdpi_alloc(a, (size_t)numel * sizeof *mesh->ranks);
    for (int i = 0; i < d->ndim; i++) {
        if (!d->names[i]) continue;
        mesh->names[i] = fsdpi_copy_text(a, d->names[i]);
        missing |= !mesh->names[i];
    }
    if (!mesh->ranks || missing) {
        fsdpi_mesh_free(mesh);
        return fsdpi_no_memory(w, "mesh: ranks and names", "", (size_t)numel * sizeof(int32_t));
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

// A mesh of the world, made from `parent` (NULL: from none). from[dim] is the dim of `parent` whose
// groups it shares (-1: it makes its own; `from` NULL: all do).
static fsdp_status fsdpi_mesh_add(fsdp_world *w, const fsdp_mesh_desc *d, const fsdp_mesh *parent,
                                  const int32_t *from, fsdp_mesh **out) {
    fsdp_mesh *mesh;
    int alone = 1; // nobody else is making it
    fsdp_status status = fsdpi_mesh_make(w, d, &mesh);
    for (int dim = 0; dim < d->ndim; dim++) alone &= from && from[dim] >= 0;
    if (!status && parent) mesh->root_numel = parent->root_numel;
    for (int dim = 0; !status && dim < mesh->ndim; dim++) {
        mesh->borrowed[dim] = from && from[dim] >= 0;
        if (mesh->borrowed[dim]) {
            mesh->gather_comm[dim] = parent->gather_comm[from[dim]];
            mesh->reduce_comm[dim] = parent->reduce_comm[from[dim]];
            continue;
        }
        status = fsdpi_mesh_groups(mesh, dim);
        if (status) fsdpi_mesh_free(mesh);
    }
    if (status) return alone ? status : fsdpi_fail_together(w, status);
    mesh->next = w->meshes;
    w->meshes = mesh;
    *out = mesh;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_mesh_create(fsdp_world *world, const fsdp_mesh_desc *desc,
                                      fsdp_mesh **mesh) {
    fsdp_mesh_desc d;
    if (!world || !desc || !mesh) return fsdpi_null(world, "mesh_create", "world, desc or mesh");
    *mesh = NULL;
    fsdp_status status = fsdpi_failed(world);
    if (!status) status = fsdp_desc_read(world, &d, desc, sizeof d, "fsdp_mesh_desc");
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
    if (!mesh || !out) return fsdpi_null(NULL, what, "mesh or out");
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
            return fsdpi_bad(w, "[E115] mesh_slice: dims[%d] is %d, expected increasing dims of %d",
                             i, dims ? dims[i] : -1, mesh->ndim);
        d.shape[i] = mesh->shape[dims[i]];
        d.names[i] = mesh->names[dims[i]];
        numel *= d.shape[i];
    }
    if (num_dims < 1)
        return fsdpi_bad(w, "[E116] mesh_slice: num_dims is %d, expected >= 1", num_dims);
    d.ndim = num_dims;
    int32_t *ranks = (int32_t *)fsdpi_alloc(&w->boot.allocator, (size_t)numel * sizeof *ranks);
    if (!ranks) return fsdpi_no_memory(w, "mesh_slice", "", (size_t)numel * sizeof *ranks);
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
    return fsdpi_mesh_add(mesh->world, &d, mesh, NULL, out);
}

FSDP_API fsdp_status fsdp_mesh_unflatten(const fsdp_mesh *mesh, int dim, int outer,
                                         const char *const names[2], fsdp_mesh **out) {
    fsdp_mesh_desc d = FSDP_ZERO;
    int32_t from[FSDP_MAX_DIMS];
    fsdp_status status = fsdpi_mesh_call(mesh, "mesh_unflatten", out);
    if (status) return status;
    if (dim < 0 || dim >= mesh->ndim || mesh->ndim == FSDP_MAX_DIMS || outer < 1 ||
        mesh->shape[dim] % outer != 0)
        return fsdpi_bad(mesh->world,
                         "[E117] mesh_unflatten: dim is %d and outer is %d: expected a dim of the "
                         "%d-D mesh, a divisor of its size %d, and at most %d dims afterwards",
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

FSDP_API int fsdp_mesh_equal(const fsdp_mesh *a, const fsdp_mesh *b) {
    if (!a || !b || a->ndim != b->ndim) return a == b;
    for (int d = 0; d < a->ndim; d++) {
        const char *x = a->names[d] ? a->names[d] : "", *y = b->names[d] ? b->names[d] : "";
        if (a->shape[d] != b->shape[d] || strcmp(x, y) != 0) return 0;
    }
    return memcmp(a->ranks, b->ranks, (size_t)fsdpi_mesh_numel(a) * sizeof *a->ranks) == 0;
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
    static const char *const needs[] = {"a shard_dim only", "a replicate_dim only",
                                        "a shard_dim and a replicate_dim"};
    if (!mesh || !out) return fsdpi_null(NULL, "mesh_info_init", "mesh or out");
    fsdp_world *w = mesh->world;
    if (kind < FSDP_MESH_INFO_FSDP || kind > FSDP_MESH_INFO_HSDP)
        return fsdpi_bad(w, "[E118] mesh_info_init: kind is %d, expected FSDP_MESH_INFO_*", kind);
    int shards = kind != FSDP_MESH_INFO_DDP, replicates = kind != FSDP_MESH_INFO_FSDP;
    if (shard_dim < 0 && replicate_dim < 0)
        return fsdpi_bad(w, "[E119] mesh_info_init: both dims are -1: give at least one of them");
    if (shards != (shard_dim >= 0) || replicates != (replicate_dim >= 0) || shard_dim < -1 ||
        replicate_dim < -1)
        return fsdpi_bad(w, "[E120] mesh_info_init: shard_dim %d, replicate_dim %d: %s needs %s",
                         shard_dim, replicate_dim, names[kind], needs[kind]);
    if (shard_dim >= mesh->ndim || replicate_dim >= mesh->ndim || shard_dim == replicate_dim)
        return fsdpi_bad(w,
                         "[E121] mesh_info_init: shard_dim %d, replicate_dim %d: expected two "
                         "different dims of a %d-D mesh",
                         shard_dim, replicate_dim, mesh->ndim);
    if (mesh->coord[0] < 0)
        return fsdpi_bad(w, "[E122] mesh_info_init: this rank is outside the mesh");
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
    if (d->world_size == 0) status = fsdpi_env_ranks(w, d);
    if (!status && d->timeout_ms == 0)
        status = fsdpi_world_env_int(w, "FSDP_TIMEOUT_MS", 1, 0x7FFFFFFF, &d->timeout_ms);
    const char *lanes = fsdpi_env("FSDP_LANES");
    if (!status && d->lanes == 0 && lanes && *lanes) {
        status = fsdpi_world_env_int(w, "FSDP_LANES", 0, 2, &d->lanes);
        if (d->lanes == 0) d->lanes = -1;
    }
    if (!status && d->log_level == FSDP_LOG_DEFAULT) status = fsdpi_env_log_level(w, &d->log_level);
    if (status) return status;
    if (d->world_size < 1 || d->rank < 0 || d->rank >= d->world_size)
        return fsdpi_bad(w, "[E508] rank is %d, world_size is %d, expected 0 <= rank < world_size",
                         d->rank, d->world_size);
    if (d->timeout_ms < 0 || d->lanes < -1 || d->lanes > 2 || d->local_rank < 0 ||
        d->log_level < 0 || d->log_level > FSDP_LOG_NONE)
        return fsdpi_bad(w,
                         "[E151] fsdp_world_desc: timeout_ms %d, lanes %d, local_rank %d, "
                         "log_level %d: expected >= 0, -1..2, >= 0 and 0..%d",
                         d->timeout_ms, d->lanes, d->local_rank, d->log_level, FSDP_LOG_NONE);
    if (!d->allocator.alloc != !d->allocator.free)
        return fsdpi_bad(
            w, "[E152] fsdp_world_desc.allocator: alloc or free is NULL: give both or none");
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
    return fsdpi_bad(
        w, "[E153] %s table has version %u and size %u, expected %u and %u: use the same fsdp.h",
        what, version, size, want_version, (unsigned)want_size);
}

#define FSDPI_BOUNCE 65536 // bytes of a collective on host data that travel at a time

// Chooses backend and device. A world of one rank needs the device only.
static fsdp_status fsdpi_world_choose(fsdp_world *w, const fsdp_world_desc *d) {
    const char *name = d->backend ? d->backend : fsdpi_env("FSDP_BACKEND");
    int is_spread;
    fsdp_status status = fsdpi_env_is_spread(w, d, &is_spread);
    if (status) return status;
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
        return fsdp_fail(w, FSDP_ERR_UNSUPPORTED,
                         "[E520] backend '%s'%s is not compiled in: this program has%s. For gloo, "
                         "build with -DFSDP_BACKEND_GLOO (docs/cluster.md); for nccl: docs/gpu.md",
                         name        ? name
                         : is_spread ? "gloo"
                                     : "",
                         d->backend || !is_spread ? "" : ", for ranks on several hosts,",
                         b == fsdpi_backends ? " none" : text);
    }
    w->comm_ops = d->comm_ops ? d->comm_ops : b->comm_ops();
    if (!*w->job && fsdpi_ranks_meet(w->comm_ops))
        return fsdpi_bad(w,
                         "[E504] %d ranks need a common job name: use fsdprun, torchrun, mpirun or "
                         "srun, or set MASTER_PORT or FSDP_JOB_ID",
                         w->size);
    if (!is_spread || d->comm_ops || !b->one_host) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_UNSUPPORTED,
                     "[E521] backend '%s' serves one host, the launcher has started ranks on "
                     "several hosts: set FSDP_BACKEND=gloo (docs/cluster.md)",
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
    w->num_comms = 2; // the world's two
    uint32_t needed = 1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER |
                      1u << FSDP_OP_ALL_REDUCE | 1u << FSDP_OP_BROADCAST;
    if ((w->caps.kinds & needed) != needed)
        return fsdp_fail(
            w, FSDP_ERR_UNSUPPORTED,
            "[E522] backend %s lacks all_gather, reduce_scatter, all_reduce or broadcast",
            w->comm_ops->name);
    status = w->comm_ops->alloc(w->comm, FSDPI_BOUNCE, &w->bounce);
    if (status) {
        w->bounce = NULL;
        return fsdpi_world_fail(w, status, "%s", w->comm_ops->error_text(w->comm));
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
        return fsdpi_device_error(w, status, "open a context");
    }
    return FSDP_OK;
}

// How records run, for fsdp_model_describe and the log.
static void fsdpi_say_mode(fsdpi_text *t, const fsdp_world *w) {
    static const char *const texts[] = {"inline", "in a worker thread", "in two worker threads"};
    int lanes = w->mode != FSDPI_INLINE;
    lanes += w->lanes[FSDP_STREAM_GATHER] != w->lanes[FSDP_STREAM_REDUCE];
    if (w->mode == FSDPI_NATIVE) fsdpi_say(t, "on streams of %s", w->device_ops->name);
    else fsdpi_say(t, "%s, %s", texts[lanes], w->because);
}

// Streams of a device, or worker threads; a second communicator where two may run at once.
static fsdp_status fsdpi_world_open_streams(fsdp_world *w, int lanes) {
    fsdp_status status = FSDP_OK;
    w->because = lanes             ? "as fsdp_world_desc.lanes or FSDP_LANES says"
                 : w->caps.because ? w->caps.because
                                   : "by default";
    if (!lanes) lanes = w->caps.default_lanes;
    if (w->device_ops->flags & FSDP_DEVICE_ASYNC) {
        w->mode = FSDPI_NATIVE;
        for (int s = 0; s < FSDP_STREAM_EXTENSION && !status; s++)
            status = w->device_ops->stream(w->device, s, &w->streams[s]);
        w->own_stream = w->streams[FSDP_STREAM_COMPUTE];
        if (!status) status = w->device_ops->event(w->device, &w->fence);
        for (unsigned i = 0; i < FSDP_STREAM_COUNT * FSDPI_POINTS && !status; i++)
            status = w->device_ops->event(w->device, &w->points[i].event);
        if (status) return fsdpi_device_error(w, status, "make a stream");
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
            w, fsdpi_no_memory(w, "list of ranks", "", (size_t)w->size * sizeof *ranks));
    for (int r = 0; r < w->size; r++) ranks[r] = r;
    fsdp_group group = {0, w->rank, w->size, FSDP_STREAM_REDUCE, ranks, "reductions of lanes"};
    status = w->comm_ops->split(w->comm, &group, &w->reduce_comm);
    fsdpi_free(&w->boot.allocator, ranks);
    if (!status) return FSDP_OK;
    w->reduce_comm = w->comm;
    return fsdpi_world_fail(w, status, "%s", w->comm_ops->error_text(w->comm));
}

static void fsdpi_world_close(fsdp_world *w) {
    fsdpi_lanes_stop(w);
    fsdpi_timeline_close(w);
    w->streams[FSDP_STREAM_COMPUTE] = w->own_stream;
    for (int s = 0; s < FSDP_STREAM_COUNT; s++)
        if (w->streams[s]) w->device_ops->destroy(w->device, w->streams[s], NULL);
    if (w->fence) w->device_ops->destroy(w->device, NULL, w->fence);
    for (unsigned i = 0; i < FSDP_STREAM_COUNT * FSDPI_POINTS; i++)
        if (w->points[i].event) w->device_ops->destroy(w->device, NULL, w->points[i].event);
    if (w->comm && w->reduce_comm != w->comm) w->comm_ops->close(w->reduce_comm);
    if (w->bounce) w->comm_ops->free(w->comm, w->bounce, FSDPI_BOUNCE);
    if (w->comm) w->comm_ops->close(w->comm);
    if (w->device) w->device_ops->close(w->device);
    fsdp_allocator allocator = w->boot.allocator;
    (void)munmap(w->state, sizeof *w->state);
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
        op->bytes = fsdpi_coll_bytes(op->kind, (uint64_t)op->group_size, (uint64_t)num * size);
        char *piece = data + (size_t)at * size;
        fsdp_status status = fsdpi_transfer(w, w->bounce, piece, (size_t)num * size);
        if (!status) status = fsdpi_emit_world(w, op, NULL);
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

static int fsdpi_shards(const fsdp_unit *u) { return u->desc.info.shard_mesh_size; }       // W
static int fsdpi_replicas(const fsdp_unit *u) { return u->desc.info.replicate_mesh_size; } // R
static int fsdpi_ranks(const fsdp_unit *u) { return fsdpi_shards(u) * fsdpi_replicas(u); }

static fsdpi_part *fsdpi_part_of(const fsdp_unit *u, const fsdpi_param *p) {
    return &u->layout.parts[p->part];
}

// The block that a part's shards lie in, and the dtype of its gradients.
static fsdpi_flat_block *fsdpi_flat_of(const fsdp_unit *u, const fsdpi_part *part) {
    return &u->model->flats[part->dtype];
}
static fsdp_dtype fsdpi_grad_dtype(const fsdp_model *m, fsdp_dtype dtype) {
    return m->desc.grad_dtype && fsdp_dtype_is_float(dtype) ? m->desc.grad_dtype : dtype;
}

// Full parameters and gradients begin at multiples of a cache line, on GPUs as cudaMalloc does.
static int64_t fsdpi_align_numel(const fsdp_model *m, fsdp_dtype dtype) {
    return (m->world->mode == FSDPI_NATIVE ? 256 : FSDPI_ALIGN) / (int64_t)fsdp_dtype_size(dtype);
}
static int64_t fsdpi_aligned(const fsdp_model *m, int64_t bytes) {
    return fsdpi_align_up(bytes, fsdpi_align_numel(m, FSDP_U8));
}

/* Lay out the trainable or the frozen parameters of a part. tmp: room for all parameters of the
   unit. With segs and blocks it fills them; offsets are always written to tmp, in order. */
static fsdp_status fsdpi_list_layout(const fsdp_unit *u, const fsdpi_part *part, int trainable,
                                     fsdp_layout *lay, fsdp_layout_param *tmp, fsdp_seg *segs,
                                     fsdp_block *blocks) {
    int64_t min = u->model->desc.direct_min, size = (int64_t)fsdp_dtype_size(part->param_dtype);
    int count = 0;
    for (int i = 0; i < u->desc.num_params; i++)
        if (fsdpi_part_of(u, &u->params[i]) == part && u->params[i].requires_grad == trainable)
            tmp[count++] = u->params[i].lay;
    lay->world = fsdpi_shards(u);
    lay->rank = u->desc.info.shard_mesh_rank;
    lay->align = fsdpi_align_numel(u->model, part->param_dtype);
    lay->direct_numel = min == FSDP_DIRECT_NEVER ? min : fsdpi_ceil_div(min, size);
    return fsdp_layout_params(lay, tmp, count, segs, blocks);
}

static void fsdpi_list_store(fsdp_unit *u, const fsdpi_part *part, int trainable,
                             const fsdp_layout_param *tmp, int gradients) {
    for (int i = 0, k = 0; i < u->desc.num_params; i++) {
        fsdpi_param *p = &u->params[i];
        if (fsdpi_part_of(u, p) != part || p->requires_grad != trainable) continue;
        if (gradients) p->grad_offset = tmp[k++].full_offset;
        else p->lay = tmp[k++];
    }
}

/* Where a part with an extension lies in the slot: its strings, rank after rank, then the parameter
   that is made of them. */
static void fsdpi_extended_layout(fsdp_unit *u, fsdpi_part *part) {
    fsdpi_param *p = part->extended;
    fsdpi_work *gather = &u->layout.all_gather;
    int64_t at = u->layout.slot_bytes;
    for (int i = 0; i < p->num_strings; i++) {
        fsdp_seg seg = {0, at, p->string_bytes[i]};
        if (gather->segs) gather->segs[gather->num] = seg;
        gather->num++;
        part->num_gather++;
        p->string_offset[i] = at;
        at = fsdpi_aligned(u->model, at + fsdpi_shards(u) * p->string_bytes[i]);
    }
    p->lay.full_offset = at / (int64_t)fsdp_dtype_size(part->param_dtype);
    u->layout.slot_bytes = fsdpi_aligned(
        u->model, at + fsdpi_bytes(fsdpi_shards(u) * p->lay.shard_numel, part->param_dtype));
}

/* The slot of gathered parameters, part after part:
   [trainables | frozen | trainables copied out | frozen copied out] */
static void fsdpi_slot_layout(fsdp_unit *u, fsdpi_part *part, fsdp_layout_param *tmp) {
    int world = fsdpi_shards(u);
    int64_t size = (int64_t)fsdp_dtype_size(part->param_dtype);
    int64_t align = fsdpi_align_numel(u->model, part->param_dtype);
    fsdpi_work *gather = &u->layout.all_gather, *out = &part->copy_out;
    part->slot = u->layout.slot_bytes / size;
    part->num_gather = 0;
    int64_t frozen_full = fsdpi_align_up(part->slot + world * part->train.shard_numel, align);
    int64_t finals = fsdpi_align_up(frozen_full + world * part->frozen.shard_numel, align);
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
    else u->layout.slot_bytes = fsdpi_aligned(u->model, end * size);
}

/* The slot of gradients, part after part: [reduce input: trainables, users | where the caller
   writes packed ones]. With several the reduce input is a slot of its own, and has the users. */
static void fsdpi_grad_layout(fsdp_unit *u, fsdpi_part *part, fsdp_layout_param *tmp) {
    int64_t size = (int64_t)fsdp_dtype_size(part->param_dtype), reduce = u->layout.reduce_numel;
    fsdpi_work *scatter = &u->layout.reduce_scatter[0];
    fsdp_layout lay;
    if (part->num_train == 0) return;
    memset(&lay, 0, sizeof lay);
    part->grad = u->layout.grad_bytes / size;
    if (u->layout.train_parts > 1) reduce = fsdpi_shards(u) * part->train.shard_numel;
    lay.shard_base = part->train.base;
    lay.full_base = part->grad;
    lay.final_base = fsdpi_align_up(part->grad + reduce,
                                    fsdpi_align_numel(u->model, part->param_dtype));
    (void)fsdpi_list_layout(u, part, 1, &lay, tmp,
                            scatter->segs ? scatter->segs + scatter->num : NULL,
                            part->chunk_cat.blocks);
    fsdpi_list_store(u, part, 1, tmp, 1);
    part->chunk_cat.num = lay.num_blocks;
    for (int i = 0; scatter->segs && i < lay.num_segs; i++) // its place in the reduce input
        scatter->segs[scatter->num + i].full += fsdpi_shards(u) * part->reduce - part->grad;
    scatter->num += lay.num_segs;
    u->layout.grad_bytes = fsdpi_aligned(u->model, (lay.final_base + lay.final_numel) * size);
}

#define FSDPI_UNIT_MAX ((int64_t)1 << 56) // elements: the bytes of its slots fit 63 bits

/* The layout of a unit's slots, in two uses: with NULL lists it measures (before commit), with
   lists it fills them. */
static fsdp_status fsdpi_unit_layout(fsdp_unit *u, fsdp_layout_param *tmp) {
    int world = fsdpi_shards(u), users = fsdpi_ranks(u) > 1 ? u->layout.num_train : 0;
    int64_t total = 0;
    u->layout.slot_bytes = u->layout.grad_bytes = u->layout.slice_bytes = u->layout.train_numel = 0;
    u->layout.all_gather.num = u->layout.reduce_scatter[0].num = 0;
    for (int k = 0; k < u->layout.num_parts; k++) {
        fsdpi_part *part = &u->layout.parts[k];
        part->copy_out.num = part->chunk_cat.num = 0;
        part->reduce = u->layout.train_numel;
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
        u->layout.train_numel += part->train.shard_numel;
    }
    u->layout.users_offset = world * u->layout.train_numel;
    u->layout.reduce_numel = u->layout.users_offset + world * users;
    for (int k = 0; k < u->layout.num_parts; k++) {
        fsdpi_slot_layout(u, &u->layout.parts[k], tmp);
        fsdpi_grad_layout(u, &u->layout.parts[k], tmp);
    }
    for (int i = 0; i < u->desc.num_params && u->desc.slices; i++)
        u->layout.slice_bytes += fsdpi_bytes(world * u->params[i].lay.shard_numel / u->desc.slices,
                                             fsdpi_part_of(u, &u->params[i])->param_dtype);
    return FSDP_OK;
}

static int fsdpi_class_find(fsdp_model *m, int pool, size_t bytes) {
    bytes = (size_t)fsdpi_aligned(m, (int64_t)(bytes ? bytes : 1));
    for (int i = 0; i < m->num_classes; i++)
        if (m->classes[i].pool == pool && m->classes[i].bytes == bytes) return i;
    if (fsdpi_grow(m, (void **)&m->classes, m->num_classes, &m->cap_classes, sizeof *m->classes,
                   "list of pools", ""))
        return -1;
    fsdpi_class *c = &m->classes[m->num_classes];
    memset(c, 0, sizeof *c);
    c->pool = pool;
    c->bytes = bytes;
    return m->num_classes++;
}

// The facts as they are now, and the routes that follow: again when an option has changed.
static void fsdpi_unit_route(fsdp_unit *u) {
    const fsdpi_layout *l = &u->layout;
    const fsdpi_part *part = &l->parts[l->users_part];
    const fsdp_model_desc *md = &u->model->desc;
    fsdpi_facts f = FSDP_ZERO;
    f.shards = fsdpi_shards(u);
    f.replicas = fsdpi_replicas(u);
    f.one_part = l->num_parts == 1;
    f.one_train = l->train_parts <= 1;
    f.extended = l->parts[0].extended != NULL;
    f.stored = part->dtype;
    f.gathered = part->param_dtype;
    f.grad = fsdpi_grad_dtype(u->model, part->dtype);
    f.reduce = l->reduce_dtype;
    f.offload = md->cpu_offload != 0;
    f.overwrite = md->grads_overwrite != 0;
    f.debug = md->debug != 0;
    f.fuses = (u->model->world->caps.flags & FSDP_CAP_FUSED_REDUCE) != 0;
    f.sync = u->options.sync;
    f.all_reduce = u->options.all_reduce;
    f.hook = u->options.all_reduce_hook != NULL;
    f.custom = u->options.custom[2] != NULL;
    f.divide_factor = u->options.divide_factor;
    for (int adds = 0; adds < 2; adds++) u->route[adds] = fsdpi_route_of(&f, adds);
}

static fsdp_status fsdpi_unit_classes(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int64_t bytes[FSDP_POOL_COUNT] = {0};
    int64_t none = u->layout.num_train ? 0 : -1,
            reduce = fsdpi_bytes(u->layout.reduce_numel, u->layout.reduce_dtype);
    const fsdpi_route *route = &u->route[0];
    int alias = route->gather == FSDPI_GATHER_ALIAS;
    bytes[FSDP_POOL_GATHER] = alias ? -1 : u->layout.slot_bytes;
    bytes[FSDP_POOL_SLICE] = u->desc.slices ? u->layout.slice_bytes : -1;
    bytes[FSDP_POOL_GRAD] = none ? none : u->layout.grad_bytes;
    bytes[FSDP_POOL_RIN] = none ? none : reduce;
    bytes[FSDP_POOL_ROUT] = none ? none : reduce / fsdpi_shards(u);
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++) {
        u->layout.classes[pool] = -1;
        if (bytes[pool] < 0) continue;
        int at = fsdpi_class_find(m, pool, (size_t)bytes[pool]);
        if (at < 0) return FSDP_ERR_OUT_OF_MEMORY;
        u->layout.classes[pool] = at;
        m->classes[at].ahead |= (pool == FSDP_POOL_GATHER && m->classes[at].units++ > 0) ||
                                (pool == FSDP_POOL_GRAD && route->grads_ahead) ||
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

static void fsdpi_buf_free(fsdp_model *m, fsdp_buf *buf) {
    fsdp_world *w = m->world;
    if (!buf || fsdpi_is_child(w)) return;
    if (!buf->part) {
        m->pool_slots[buf->pool]--;
        m->pool_bytes[buf->pool] -= (int64_t)buf->bytes;
    }
    if (buf->part) buf->ptr = NULL;
    if (buf->ptr && w->comm && !buf->pinned) w->comm_ops->free(w->comm, buf->ptr, buf->bytes);
    else if (buf->ptr)
        w->device_ops->free(w->device, buf->pinned ? FSDP_MEMORY_PINNED : FSDP_MEMORY_DEVICE,
                            buf->ptr, buf->bytes);
    fsdpi_model_free(m, buf);
}

// Device memory, where peers can read it.
static fsdp_status fsdpi_buf_alloc(fsdp_model *m, fsdp_buf *buf) {
    fsdp_world *w = m->world;
    void *ptr = NULL;
    int shared = w->comm && !buf->pinned,
        kind = buf->pinned ? FSDP_MEMORY_PINNED : FSDP_MEMORY_DEVICE;
    fsdp_status status = shared ? w->comm_ops->alloc(w->comm, buf->bytes, &ptr)
                                : w->device_ops->alloc(w->device, kind, buf->bytes, &ptr);
    if (status)
        return fsdp_fail(w, status, "[E305] the library could not allocate %llu bytes for %s: %s",
                         (unsigned long long)buf->bytes, fsdp_model_pool_name(m, buf->pool),
                         shared ? w->comm_ops->error_text(w->comm) : fsdpi_device_text(w, status));
    buf->ptr = (char *)ptr;
    return FSDP_OK;
}

// Can the host read it?
static int fsdpi_is_readable(const fsdp_world *w, const fsdp_buf *buf) {
    return buf->pinned || fsdpi_is_host(w);
}

// A buffer of a pool.
static fsdp_status fsdpi_buf_make(fsdp_model *m, int pool, size_t bytes, int pinned,
                                  fsdp_buf **out) {
    fsdp_buf *buf = (fsdp_buf *)fsdpi_model_alloc(m, sizeof *buf);
    *out = NULL;
    if (!buf)
        return fsdpi_no_memory(m->world, "a buffer of", fsdp_model_pool_name(m, pool), sizeof *buf);
    buf->bytes = (size_t)fsdpi_aligned(m, (int64_t)(bytes ? bytes : 1));
    buf->pool = buf->as = (uint8_t)pool;
    buf->pinned = (uint8_t)pinned;
    buf->number = ++m->num_bufs;
    m->pool_slots[pool]++;
    m->pool_bytes[pool] += (int64_t)buf->bytes;
    fsdp_status status = fsdpi_buf_alloc(m, buf);
    if (status) {
        fsdpi_buf_free(m, buf);
        return status;
    }
    m->counters.allocations++;
    *out = buf;
    return FSDP_OK;
}

static fsdp_status fsdpi_buf_new(fsdp_model *m, int pool, size_t bytes, fsdp_buf **out) {
    int offloaded = m->desc.cpu_offload && (pool == FSDP_POOL_SHARD || pool == FSDP_POOL_SGRAD);
    return fsdpi_buf_make(m, pool, bytes, offloaded, out);
}

static fsdp_status fsdpi_class_add(fsdp_model *m, fsdpi_class *c) {
    fsdp_status status = fsdpi_grow(m, (void **)&c->slots, c->count, &c->cap, sizeof *c->slots,
                                    "a list of", fsdp_pool_name(c->pool));
    if (!status) status = fsdpi_buf_new(m, c->pool, c->bytes, &c->slots[c->count]);
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

// A free slot of a class: the least recently released one, or a new one.
static inline fsdp_status fsdpi_class_take(fsdp_model *m, fsdpi_class *c, fsdp_buf **out) {
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
    *out = best;
    return status;
}

// Between steps all free slots count as released at one time: the next step takes the same ones.
static void fsdpi_pools_rewind(fsdp_model *m) {
    for (int i = 0; i < m->num_classes; i++)
        for (int k = 0; k < m->classes[i].count; k++) m->classes[i].slots[k]->released = 0;
    m->release_seq = 0;
}

/* ==== core/unit.h ===========================================================================
   units and parameters: what fully_shard makes of a desc */

// Parameters, and behind them the marks of their use, eight in a word.
static int fsdpi_use_words(const fsdp_unit *u) { return (u->desc.num_params + 7) >> 3; }
static size_t fsdpi_params_bytes(const fsdp_unit *u) {
    return (size_t)u->desc.num_params * sizeof *u->params + 8 * (size_t)fsdpi_use_words(u);
}

static void fsdpi_unit_free(fsdp_unit *u) {
    fsdp_model *m = u->model;
    for (int i = 0; u->params && i < u->desc.num_params; i++)
        fsdpi_model_free(m, u->params[i].name);
    fsdpi_model_free(m, u->params);
    fsdpi_model_free(m, u->layout.parts);
    fsdpi_model_free(m, u->desc.name);
    fsdpi_model_free(m, u->layout.lists);
    fsdpi_model_free(m, u->options.prefetch[0]);
    fsdpi_model_free(m, u->options.prefetch[1]);
    fsdpi_model_free(m, u);
}

static fsdp_status fsdpi_param_check(fsdp_world *w, const char *unit, const char *name,
                                     fsdp_param_desc *d) {
    if (d->ndim == 0)
        return fsdpi_bad(
            w, "[E140] unit '%s', parameter '%s' is a scalar: make it a vector of one element",
            unit, name);
    if (d->ndim < 0 || d->ndim > FSDP_MAX_DIMS)
        return fsdpi_bad(w, "[E141] unit '%s', parameter '%s': ndim is %d, expected 1..%d", unit,
                         name, d->ndim, FSDP_MAX_DIMS);
    if (d->shard_dim < -d->ndim || d->shard_dim >= d->ndim)
        return fsdpi_bad(w, "[E142] unit '%s', parameter '%s': shard_dim is %d, expected %d..%d",
                         unit, name, d->shard_dim, -d->ndim, d->ndim - 1);
    if (d->shard_dim < 0) d->shard_dim += d->ndim;
    for (int i = 0; i < d->ndim; i++)
        if (d->shape[i] < 0)
            return fsdpi_bad(
                w, "[E143] unit '%s', parameter '%s': size of dim %d is %lld, expected >= 0", unit,
                name, i, (long long)d->shape[i]);
    if (d->dtype == FSDP_DTYPE_KEEP) d->dtype = FSDP_F32;
    if (!fsdp_dtype_size(d->dtype))
        return fsdpi_bad(w, "[E144] unit '%s', parameter '%s': dtype is %d, expected FSDP_F32, ...",
                         unit, name, d->dtype);
    if (!d->frozen && !fsdp_dtype_is_float(d->dtype))
        return fsdpi_bad(w,
                         "[E145] unit '%s', parameter '%s': dtype is %s and it requires a "
                         "gradient: only floating parameters can: set frozen to 1",
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
        return fsdpi_bad(w,
                         "[E917] unit '%s', parameter '%s': its extension lacks a function: give "
                         "sizes, pre_all_gather and post_all_gather",
                         u->desc.name, p->name);
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
                : fsdpi_bad(w,
                            "[E918] unit '%s', parameter '%s': its extension returned %d strings: "
                            "expected 1..%d, of sizes >= 0",
                            u->desc.name, p->name, p->num_strings, FSDP_GATHER_TENSORS);
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
        fsdp_status status = fsdp_desc_read(m->world, &pd, at, sizeof pd, what);
        if (status) return status;
        if (i == 0) stride = pd.size ? pd.size : (uint32_t)sizeof pd;
        snprintf(fallback, sizeof fallback, "p%d", i);
        const char *name = pd.name ? pd.name : fallback;
        status = fsdpi_param_check(m->world, u->desc.name, name, &pd);
        if (status) return status;
        fsdpi_param *p = &u->params[i];
        p->name = fsdpi_copy_text(&m->world->boot.allocator, name);
        if (!p->name)
            return fsdpi_no_memory(m->world, "fully_shard of unit", u->desc.name, strlen(name) + 1);
        m->host_bytes += (int64_t)fsdpi_alloc_size(p->name);
        for (int k = 0; k < i; k++)
            if (strcmp(u->params[k].name, p->name) == 0)
                return fsdpi_bad(m->world,
                                 "[E146] unit '%s': parameters %d and %d are both named '%s': give "
                                 "each a name of its own",
                                 u->desc.name, k, i, p->name);
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

static int fsdpi_is_whole_name(const char *whole, const char *unit, const char *name) {
    size_t n = strlen(unit);
    return strncmp(whole, unit, n) == 0 && whole[n] == '.' && strcmp(whole + n + 1, name) == 0;
}

// Do two parameters have one whole name? "h.0" and "w", or "h.0.w" in a unit of any name.
static int fsdpi_same_param(const char *unit, const char *name, const char *other_unit,
                            const char *other) {
    return fsdpi_is_whole_name(other, unit, name) || fsdpi_is_whole_name(name, other_unit, other) ||
           (strcmp(unit, other_unit) == 0 && strcmp(name, other) == 0);
}

/* A parameter is sharded or replicated, not both.
   Source: torch: _is_composable_with_fsdp, the registry of composable APIs. */
static fsdp_status fsdpi_unit_composes(const fsdp_unit *u) {
    fsdp_model *m = u->model;
    int replicates = u->desc.info.kind == FSDP_MESH_INFO_DDP;
    for (int k = 0; k < m->num_units; k++) {
        const fsdp_unit *other = m->units[k];
        if ((other->desc.info.kind == FSDP_MESH_INFO_DDP) == replicates) continue;
        for (int i = 0; i < u->desc.num_params; i++)
            for (int j = 0; j < other->desc.num_params; j++)
                if (fsdpi_same_param(u->desc.name, u->params[i].name, other->desc.name,
                                     other->params[j].name))
                    return fsdpi_bad(m->world,
                                     "[E193] unit '%s', parameter '%s': unit '%s' %s it already, "
                                     "and a parameter is sharded or replicated, not both: leave "
                                     "it out of one of the two units",
                                     u->desc.name, u->params[i].name, other->desc.name,
                                     replicates ? "shards" : "replicates");
    }
    return FSDP_OK;
}

// The narrowest dtype that holds both; KEEP: nothing yet.
static fsdp_dtype fsdpi_promote(fsdp_dtype a, fsdp_dtype b) {
    if (a == FSDP_DTYPE_KEEP || a == b) return b;
    return a == FSDP_F64 || b == FSDP_F64 ? FSDP_F64 : FSDP_F32;
}

static void fsdpi_mix(uint64_t *h, uint64_t x) { *h = fsdpi_hash(*h, x); }

// All that ranks must have given alike: it is part of what every collective compares.
static void fsdpi_unit_agree(fsdp_unit *u) {
    const fsdp_model_desc *md = &u->model->desc;
    uint64_t h[FSDP_AGREE_COUNT] = {0};
    h[FSDP_AGREE_NAMES] = fsdpi_hash(fsdpi_hash_text(u->desc.name), (uint64_t)u->desc.num_params);
    h[FSDP_AGREE_DTYPES] = (uint64_t)u->desc.policy_dtype;
    h[FSDP_AGREE_REDUCE_DTYPE] = (uint64_t)u->layout.reduce_dtype;
    h[FSDP_AGREE_GRAD_DTYPE] = (uint64_t)md->grad_dtype;
    h[FSDP_AGREE_SLICES] = (uint64_t)u->desc.slices;
    h[FSDP_AGREE_OVERWRITE] = (uint64_t)md->grads_overwrite;
    h[FSDP_AGREE_DIRECT_MIN] = fsdpi_hash(1, (uint64_t)md->direct_min);
    h[FSDP_AGREE_MESH] = fsdpi_hash((uint64_t)fsdpi_shards(u), (uint64_t)fsdpi_replicas(u));
    for (int i = 0; i < u->desc.num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        fsdpi_mix(&h[FSDP_AGREE_NAMES], fsdpi_hash_text(p->name));
        fsdpi_mix(&h[FSDP_AGREE_SHAPES], (uint64_t)p->lay.ndim);
        for (int d = 0; d < p->lay.ndim; d++)
            fsdpi_mix(&h[FSDP_AGREE_SHAPES], (uint64_t)p->lay.shape[d]);
        fsdpi_mix(&h[FSDP_AGREE_SHARD_DIM], (uint64_t)p->lay.shard_dim);
        fsdpi_mix(&h[FSDP_AGREE_DTYPES], (uint64_t)p->dtype << 1 | (uint64_t)(p->keep_dtype != 0));
        fsdpi_mix(&h[FSDP_AGREE_REQUIRES_GRAD], (uint64_t)p->requires_grad);
        for (int k = 0; k < p->num_strings; k++)
            fsdpi_mix(&h[FSDP_AGREE_STRINGS], (uint64_t)p->string_bytes[k]);
    }
    u->layout.hash = 0;
    for (int k = 0; k < FSDP_AGREE_COUNT; k++) {
        u->layout.hash = fsdpi_hash(u->layout.hash, h[k]);
        u->layout.agree[k] = (uint8_t)h[k];
    }
}

/* Sort the parameters into parts, by their dtypes and by who requires a gradient now, and measure.
   Again after fsdp_set_requires_grad. */
static fsdp_status fsdpi_unit_parts(fsdp_unit *u) {
    fsdp_model *m = u->model;
    u->layout.num_parts = u->layout.num_train = u->layout.train_parts = u->layout.users_part = 0;
    u->layout.reduce_dtype = FSDP_DTYPE_KEEP;
    for (int i = 0; i < u->desc.num_params; i++) {
        fsdpi_param *p = &u->params[i];
        int casts = u->desc.policy_dtype && fsdp_dtype_is_float(p->dtype) && !p->keep_dtype, k = 0;
        fsdpi_part new_part, *part;
        memset(&new_part, 0, sizeof new_part);
        new_part.dtype = p->dtype;
        new_part.param_dtype = casts ? u->desc.policy_dtype : p->dtype;
        new_part.extended = p->extension.sizes ? p : NULL;
        while (k < u->layout.num_parts && (u->layout.parts[k].dtype != new_part.dtype ||
                                           u->layout.parts[k].param_dtype != new_part.param_dtype ||
                                           u->layout.parts[k].extended || new_part.extended))
            k++;
        part = &u->layout.parts[k];
        if (k == u->layout.num_parts) u->layout.parts[u->layout.num_parts++] = new_part;
        p->part = k;
        p->train_index = p->requires_grad ? u->layout.num_train++ : -1;
        if (!p->requires_grad) continue;
        if (part->num_train++ == 0 && u->layout.train_parts++ == 0) u->layout.users_part = k;
        u->layout.reduce_dtype = fsdpi_promote(u->layout.reduce_dtype,
                                               fsdpi_grad_dtype(m, p->dtype));
    }
    if (u->desc.policy_reduce || !u->layout.num_train)
        u->layout.reduce_dtype = u->desc.policy_reduce ? u->desc.policy_reduce : FSDP_F32;
    int bytes = u->layout.num_parts > 1 || u->layout.parts[0].extended;
    u->layout.gather_dtype = bytes ? FSDP_U8 : u->layout.parts[0].param_dtype;
    fsdpi_unit_agree(u);
    const size_t room = (size_t)u->desc.num_params * sizeof(fsdp_layout_param);
    fsdp_layout_param *tmp = (fsdp_layout_param *)fsdpi_model_alloc(m, room);
    if (!tmp) return fsdpi_no_memory(m->world, "layout of unit", u->desc.name, room);
    fsdp_status status = fsdpi_unit_layout(u, tmp);
    fsdpi_model_free(m, tmp);
    if (status)
        return fsdp_fail(m->world, status, "[E147] unit '%s' has more than 2^56 elements: split it",
                         u->desc.name);
    fsdpi_unit_route(u);
    return fsdpi_unit_classes(u);
}

// After a failure commit does it again.
static fsdp_status fsdpi_unit_arrange(fsdp_unit *u) {
    fsdp_status status = fsdpi_unit_parts(u);
    if (status) u->layout.num_parts = 0;
    return status;
}

static fsdp_status fsdpi_dtypes_check(fsdp_world *w, const char *what, const char *name,
                                      fsdp_dtype param, fsdp_dtype reduce, fsdp_dtype output) {
    if ((!param || fsdp_dtype_is_float(param)) && (!reduce || fsdp_dtype_is_float(reduce)) &&
        (!output || fsdp_dtype_is_float(output)))
        return FSDP_OK;
    return fsdpi_bad(w,
                     "[E148] %s%s%s%s: param_dtype is %d, reduce_dtype is %d, output_dtype is %d: "
                     "expected floating dtypes or KEEP",
                     what, *name ? " '" : "", name, *name ? "'" : "", param, reduce, output);
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
        return fsdpi_bad(w, "[E123] the desc's mesh is of another world, or its mesh_info has no "
                            "mesh: make it in this world");
    if (!info && mesh->ndim > 2)
        return fsdpi_bad(w,
                         "[E124] the desc's mesh is %d-D, expected 1-D (FSDP) or 2-D (HSDP): slice "
                         "it, or give a mesh_info with the dims that shard and replicate",
                         mesh->ndim);
    if (!info && mesh->ndim == 2) {
        if (!mesh->names[0] || !mesh->names[1])
            return fsdpi_bad(w, "[E125] the desc's mesh is 2-D and its dims have no names: name "
                                "them (dim 0 replicates, dim 1 shards), or give mesh_info");
        kind = FSDP_MESH_INFO_HSDP;
        replicate = 0;
        shard = 1;
    }
    return fsdp_mesh_info_init(mesh, kind, shard, replicate, out);
}

// Groups of a unit, and what reshard_after_forward comes to.
static fsdp_status fsdpi_unit_groups(fsdp_unit *u, const fsdp_unit_desc *d) {
    fsdp_model *m = u->model;
    const fsdp_mesh_info *info = &u->desc.info;
    int n = d->reshard_after_forward ? d->reshard_after_forward : m->desc.reshard_after_forward;
    if (info->shard_mesh_dim >= 0)
        u->desc.reduce_comm = info->mesh->reduce_comm[info->shard_mesh_dim];
    if (info->replicate_mesh_dim >= 0)
        u->desc.replicate_comm = info->mesh->reduce_comm[info->replicate_mesh_dim];
    if (n < FSDP_RESHARD_NEVER || (n > 1 && fsdpi_shards(u) % n != 0))
        return fsdpi_bad(m->world,
                         "[E149] unit '%s': reshard_after_forward is %d, expected "
                         "FSDP_RESHARD_DEFAULT, _ALWAYS, _NEVER or a divisor of %d shards",
                         u->desc.name, n, fsdpi_shards(u));
    if (n > 1 && n == fsdpi_shards(u)) n = FSDP_RESHARD_ALWAYS;
    u->options.reshard_after_forward = n;
    u->desc.slices = n > 1 ? n : 0;
    return n > 1 ? fsdpi_mesh_subgroup(info->mesh, info->shard_mesh_dim, n, FSDP_STREAM_GATHER,
                                       "post_forward", &u->desc.slice_comm)
                 : FSDP_OK;
}

static fsdp_status fsdpi_unit_fill(fsdp_unit *u, const fsdp_unit_desc *d) {
    fsdp_model *m = u->model;
    const fsdp_model_desc *md = &m->desc;
    size_t count = (size_t)d->num_params;
    char fallback[24];
    snprintf(fallback, sizeof fallback, "unit%d", m->num_units);
    u->desc.name = fsdpi_copy_text(&m->world->boot.allocator, d->name ? d->name : fallback);
    if (u->desc.name) m->host_bytes += (int64_t)fsdpi_alloc_size(u->desc.name);
    u->desc.num_params = d->num_params;
    u->params = (fsdpi_param *)fsdpi_model_alloc(m, fsdpi_params_bytes(u));
    u->layout.parts = (fsdpi_part *)fsdpi_model_alloc(m, count * sizeof *u->layout.parts);
    if (!u->desc.name || !u->params || !u->layout.parts)
        return fsdpi_no_memory(m->world, "fully_shard of unit", d->name ? d->name : fallback,
                               count * (sizeof *u->params + sizeof *u->layout.parts));
    fsdp_status status = fsdpi_dtypes_check(m->world, "fully_shard of unit", u->desc.name,
                                            d->param_dtype, d->reduce_dtype, d->output_dtype);
    if (!status)
        status = fsdpi_resolve_mesh(m->world, d->mesh, d->mesh_info, &m->info, &u->desc.info);
    if (status) return status;
    u->desc.policy_dtype = d->param_dtype ? d->param_dtype : md->param_dtype;
    u->desc.policy_reduce = d->reduce_dtype ? d->reduce_dtype : md->reduce_dtype;
    u->desc.output_dtype = d->output_dtype ? d->output_dtype : md->output_dtype;
    u->desc.keep_inputs = d->keep_forward_inputs || md->keep_forward_inputs;
    u->usage.use = (uint64_t *)(void *)(u->params + count);
    status = fsdpi_unit_params(u, d);
    if (!status) status = fsdpi_unit_composes(u);
    if (!status) status = fsdpi_unit_groups(u, d);
    return status ? status : fsdpi_unit_arrange(u);
}

FSDP_API fsdp_status fsdp_fully_shard(fsdp_model *model, const fsdp_unit_desc *desc,
                                      fsdp_unit **unit) {
    fsdp_unit_desc d;
    if (!model || !desc || !unit) return fsdpi_null_of(model, "fully_shard", "model, desc or unit");
    *unit = NULL;
    fsdp_world *w = model->world;
    fsdp_status status = fsdpi_failed(w);
    if (!status) status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_unit_desc");
    if (status) return status;
    if (model->layout > 0)
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E207] fully_shard: the model is committed: add units before the first "
                         "hook, init or load");
    if (d.num_params < 1 || !d.params)
        return fsdpi_bad(
            w, "[E150] unit '%s': num_params is %d, params is %s, expected >= 1 and an array",
            d.name ? d.name : "", d.num_params, d.params ? "given" : "NULL");
    fsdp_unit *u = (fsdp_unit *)fsdpi_model_alloc(model, sizeof *u);
    const char *name = d.name ? d.name : "";
    if (!u) return fsdpi_no_memory(w, "fully_shard of unit", name, sizeof *u);
    status = fsdpi_grow(model, (void **)&model->units, model->num_units, &model->cap_units,
                        sizeof *model->units, "fully_shard of unit", name);
    if (status) {
        fsdpi_model_free(model, u);
        return status;
    }
    u->model = model;
    u->desc.user = d.user;
    u->desc.index = model->num_units;
    u->options.reshard_after_backward = u->options.sync = u->options.all_reduce = 1;
    u->options.unshard_in_backward = u->options.reduce_unused = 1;
    u->state = fsdpi_state_new();
    status = fsdpi_unit_fill(u, &d);
    if (status) {
        fsdpi_unit_free(u);
        return status;
    }
    for (int i = 0; i < u->desc.num_params; i++) u->params[i].ordinal = model->num_params + i;
    model->num_params += u->desc.num_params;
    model->mixed |= u->desc.info.shard_comm != model->info.shard_comm ||
                    u->desc.info.replicate_comm != model->info.replicate_comm ||
                    u->desc.info.shard_mesh_size != model->info.shard_mesh_size;
    if (u->desc.info.mesh != model->info.mesh &&
        !fsdpi_mesh_contains(model->info.mesh, u->desc.info.mesh))
        model->outside = u;
    model->units[model->num_units++] = u;
    *unit = u;
    return FSDP_OK;
}

FSDP_API int fsdp_num_params(const fsdp_model *model) { return model ? model->num_params : 0; }
FSDP_API int fsdp_num_units(const fsdp_model *model) { return model ? model->num_units : 0; }
FSDP_API const char *fsdp_unit_name(const fsdp_unit *unit) { return unit ? unit->desc.name : ""; }

FSDP_API fsdp_status fsdp_unit_mesh_info(const fsdp_unit *unit, fsdp_mesh_info *out) {
    if (!unit || !out)
        return fsdpi_null_of(unit ? unit->model : NULL, "unit_mesh_info", "unit or out");
    *out = unit->desc.info;
    return FSDP_OK;
}
FSDP_API fsdp_status fsdp_model_mesh_info(const fsdp_model *model, fsdp_mesh_info *out) {
    if (!model || !out) return fsdpi_null(NULL, "model_mesh_info", "model or out");
    *out = model->info;
    return FSDP_OK;
}

FSDP_API fsdp_training_state fsdp_unit_state(const fsdp_unit *unit) {
    return unit ? (fsdp_training_state)unit->state.training : FSDP_STATE_COUNT;
}
FSDP_API fsdp_storage_state fsdp_unit_storage(const fsdp_unit *unit) {
    return unit ? (fsdp_storage_state)unit->state.storage : FSDP_STORAGE_COUNT;
}

/* ==== core/ops.h ============================================================================
   op records, and fsdpi_emit, the only door to the tables */

// fsdpi_emit numbers a record, counts it, shows it to extensions, derives its waits from the
// buffers that it reads and writes, and runs it.

// A record with the model's labels; the caller fills in the rest.
static FSDPI_NOINLINE fsdp_op fsdpi_op(const fsdp_model *m, const fsdp_unit *u, int kind, int label,
                                       int stream) {
    fsdp_op op;
    memset(&op, 0, offsetof(fsdp_op, wait)); // num_waits of them count
    op.kind = (uint8_t)kind;
    op.label = (uint8_t)label;
    op.stream = (uint8_t)stream;
    op.state = m->call_state;
    op.scale = 1.0;
    op.model = (fsdp_model *)(uintptr_t)m;
    op.unit = u;
    op.what = u ? u->desc.name : fsdpi_label(m, label);
    op.what_hash = u ? u->layout.hash : (uint64_t)label;
    if (u) memcpy(op.agree, u->layout.agree, sizeof op.agree);
    op.step = m->step;
    op.given = m->given;
    return op;
}

/* Three rules. Reading waits for the last write by another stream; writing too (one writer at a
   time); the first write after acquire waits for the last consumer's release. */
static inline void fsdpi_derive_waits(fsdp_op *op) {
    const fsdp_buf *src = op->src, *dst = op->dst;
    uint8_t num = 0;
    if (src && src->ready.seq != 0 && src->ready.stream != op->stream) op->wait[num++] = src->ready;
    if (dst && dst != src) {
        const fsdp_event *event = dst->avail.seq ? &dst->avail : &dst->ready;
        if (event->seq != 0 && event->stream != op->stream) op->wait[num++] = *event;
    }
    op->num_waits = num;
}

// Somebody watches: `seen`, a copy, is shown and may come back changed. NULL: it does not run.
static FSDPI_NOINLINE const fsdp_op *fsdpi_watched(fsdp_model *m, const fsdp_op *op,
                                                   fsdp_op *seen) {
    int works = op->kind < FSDP_OP_HOOK && op->kind != FSDP_OP_USE;
    int32_t size;
    *seen = *op;
    seen->comm_number = (uint16_t)fsdpi_comm_number(m->world, op->comm, &size);
    seen->timed = works && (m->watch & FSDPI_TIMES);
    void *user;
    seen->custom = op->comm && op->unit && fsdpi_custom_comm(op, &user);
    return fsdpi_taken(m, seen) || op->kind >= FSDP_OP_HOOK ? NULL : seen;
}

static FSDPI_NOINLINE fsdp_status fsdpi_emit_ordered(fsdp_model *m, fsdp_op *op) {
    fsdp_world *w = m->world;
    fsdp_status status = FSDP_OK;
    if (w->mode != FSDPI_INLINE) fsdpi_derive_waits(op);
    fsdp_op seen;
    const fsdp_op *runs = m->watch & FSDPI_RECORDS ? fsdpi_watched(m, op, &seen) : op;
    if (runs) status = fsdpi_issue(w, runs);
    if (op->dst) op->dst->avail.seq = 0; // what an extension emits in its place waits for it, too
    // Gathers, and what extensions issue, go on while others wait for what is there.
    unsigned due = 1u << op->stream & (1u << FSDP_STREAM_GATHER | 1u << FSDP_STREAM_EXTENSION);
    if (!status && op->dst) fsdpi_mark(w, op->stream, &op->dst->ready, due ? op->dst : NULL);
    return status;
}

// The record is the caller's: it may be one that is issued again and again.
static fsdp_status fsdpi_emit(fsdp_model *m, fsdp_op *op) {
    fsdp_status status = fsdpi_failed(m->world);
    if (status) return status;
    op->seq = ++m->seq;
    m->counters.calls[op->kind]++;
    m->counters.bytes[op->kind] += op->bytes;
    if (m->world->mode == FSDPI_INLINE && !(m->watch & FSDPI_RECORDS))
        return fsdpi_execute(m->world, op, NULL); // no order to keep
    return fsdpi_emit_ordered(m, op);
}

// A marker: numbered, counted and shown. It waits for nothing and sets no event.
static fsdp_status fsdpi_show(fsdp_model *m, fsdp_op *op) {
    fsdp_status status = fsdpi_failed(m->world);
    if (status || !(m->watch & FSDPI_OPS)) return status;
    op->seq = ++m->seq;
    m->counters.calls[op->kind]++;
    fsdp_op seen;
    (void)fsdpi_watched(m, op, &seen);
    return FSDP_OK;
}

// What happens to a buffer, where extensions see records.
static FSDPI_NOINLINE fsdp_status fsdpi_show_buf(fsdp_model *m, const fsdp_unit *u, int kind,
                                                 int stream, fsdp_buf *buf) {
    fsdp_op op = fsdpi_op(m, u, kind, FSDP_LABEL_NONE, stream);
    if (kind == FSDP_OP_RELEASE) op.src = buf;
    else op.dst = buf;
    op.pool = buf->as;
    op.slot = buf->number;
    return fsdpi_show(m, &op);
}

static inline fsdp_status fsdpi_marker(fsdp_unit *u, int kind, int stream, fsdp_buf *buf) {
    return u->model->watch & FSDPI_OPS ? fsdpi_show_buf(u->model, u, kind, stream, buf) : FSDP_OK;
}

// Fill elements [from, from + count) of a buffer with a byte.
static fsdp_status fsdpi_emit_fill(fsdp_model *m, const fsdp_unit *u, int label, int stream,
                                   fsdp_buf *dst, fsdp_dtype dtype, int64_t from, int64_t count,
                                   uint8_t fill) {
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_ZERO, label, stream);
    if (count == 0) return FSDP_OK;
    op.fill = fill;
    op.dtype = op.out_dtype = (uint8_t)dtype;
    op.count = (uint64_t)count;
    op.bytes = (uint64_t)fsdpi_bytes(count, dtype);
    op.dst = dst;
    op.dst_ptr = dst->ptr + fsdpi_bytes(from, dtype);
    return fsdpi_emit(m, &op);
}

// Bytes that a copy writes, or that a rank has to receive.
static uint64_t fsdpi_op_bytes(const fsdp_op *op) {
    if (op->kind == FSDP_OP_COPY) return op->count * fsdp_dtype_size(op->out_dtype);
    return fsdpi_coll_bytes(op->kind, (uint64_t)op->group_size,
                            op->count * fsdp_dtype_size(op->dtype));
}

// The record's work: blocks of a copy, segments of a collective, or a number of elements.
static void fsdpi_op_work(fsdp_op *op, fsdp_dtype dtype, fsdp_dtype out_dtype,
                          const fsdpi_work *work) {
    op->count = work->count;
    op->dtype = (uint8_t)dtype;
    op->out_dtype = (uint8_t)out_dtype;
    op->list = op->kind == FSDP_OP_COPY ? (const void *)work->blocks : work->segs;
    op->list_count = op->list ? (uint32_t)work->num : 0;
    op->bytes = fsdpi_op_bytes(op);
}

// The same work in other dtypes, or mostly the same ones.
static inline void fsdpi_op_cast(fsdp_op *op, fsdp_dtype dtype, fsdp_dtype out_dtype) {
    if (op->dtype == dtype && op->out_dtype == out_dtype) return;
    op->dtype = (uint8_t)dtype;
    op->out_dtype = (uint8_t)out_dtype;
    op->bytes = fsdpi_op_bytes(op);
}

/* A copy over blocks, a collective over segments, or an all_reduce of work->count elements, from
   src in dtype to dst in out_dtype. The caller has set what is special (scale, accumulate,
   in_place) and a collective's group. An empty one is not issued. */
static fsdp_status fsdpi_emit_work(fsdp_model *m, fsdp_op *op, fsdp_buf *src, fsdp_dtype dtype,
                                   fsdp_buf *dst, fsdp_dtype out_dtype, const fsdpi_work *work) {
    if (work->count == 0) return FSDP_OK;
    fsdpi_op_work(op, dtype, out_dtype, work);
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

// `stream` is a slot's last consumer. But for gradients, REDUCE writes again what it gives back.
static void fsdpi_mark_released(fsdp_world *w, int stream, fsdp_buf *buf) {
    int due = stream != FSDP_STREAM_REDUCE || buf->as == FSDP_POOL_GRAD;
    if (buf->avail.seq == 0) // else nobody has written it meanwhile
        fsdpi_mark(w, stream, &buf->avail, due ? buf : NULL);
}

// An extension's slot, or NULL: there is none.
static FSDPI_NOINLINE fsdp_status fsdpi_provided(fsdp_unit *u, int pool, size_t bytes,
                                                 fsdp_buf **out) {
    fsdp_model *m = u->model;
    fsdp_buf *buf = m->watch & FSDPI_SLOTS ? fsdpi_other_slot(u, pool, NULL) : NULL;
    *out = buf;
    if (buf) buf->as = (uint8_t)pool;
    if (buf ? !buf->held && buf->bytes >= bytes : !m->rehearsing) return FSDP_OK;
    return fsdpi_bad(
        m->world, "[E915] an extension gave '%s' a slot of %llu bytes%s for %s, expected %llu free",
        u->desc.name, (unsigned long long)(buf ? buf->bytes : 0), buf && buf->held ? " in use" : "",
        fsdp_pool_name(pool), (unsigned long long)bytes);
}

static fsdp_status fsdpi_acquire(fsdp_unit *u, int pool, fsdp_buf **out) {
    fsdp_model *m = u->model;
    fsdpi_class *c = &m->classes[u->layout.classes[pool]];
    fsdp_buf *buf = NULL;
    fsdp_status status = m->watch ? fsdpi_provided(u, pool, c->bytes, &buf) : FSDP_OK;
    if (!status && !buf) status = fsdpi_class_take(m, c, &buf);
    if (status) return m->rehearsing ? status : fsdpi_fail_together(m->world, status);
    buf->held = 1;
    *out = buf;
    return m->watch ? fsdpi_marker(u, FSDP_OP_ACQUIRE, FSDP_STREAM_COMPUTE, buf) : FSDP_OK;
}

static FSDPI_NOINLINE fsdp_status fsdpi_released(fsdp_unit *u, fsdp_buf *buf, int stream) {
    fsdp_status status = fsdpi_marker(u, FSDP_OP_RELEASE, stream, buf);
    if (u->model->watch & FSDPI_SLOTS) (void)fsdpi_other_slot(u, buf->as, buf);
    return status;
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
    if (m->world->mode != FSDPI_INLINE) fsdpi_mark_released(m->world, stream, buf);
    buf->held = 0;
    buf->released = ++m->release_seq;
    *slot = NULL;
    return m->watch && !status ? fsdpi_released(u, buf, stream) : status;
}

/* ==== core/templates.h ======================================================================
   the records that hooks emit, made once at commit */

// Owns: a unit's templates. A template is a record in which everything that does not change from
// step to step stands already; the hook that emits it says only what has changed. Slots are named
// by their pool, since a unit holds another one at another time.

static fsdp_status fsdpi_call_pre_gather(const fsdp_op *op, void *stream);
static fsdp_status fsdpi_call_post_gather(const fsdp_op *op, void *stream);
static fsdp_status fsdpi_call_all_reduce_hook(const fsdp_op *op, void *stream);

// A dtype, and a group, of the unit or of one of its parts.
enum { FSDPI_STORED, FSDPI_FULL, FSDPI_GATHERED, FSDPI_SHARD_GRAD, FSDPI_REDUCED };
enum { FSDPI_NO_GROUP, FSDPI_SHARDS, FSDPI_SLICES, FSDPI_SUMS, FSDPI_REPLICAS };

typedef struct fsdpi_template_row {
    uint8_t op, label, stream; // stream COUNT: that of the last copy to the shard gradients
    uint8_t src, src_dtype, dst, dst_dtype;
    uint8_t each, grads; // a record for each part; of units with trainables
    uint8_t group;
    uint16_t work; // offset of the blocks or segments, in the part or in the layout; 0: none
    fsdp_status (*call)(const fsdp_op *op, void *stream); // for parts with an extension, or CALL
} fsdpi_template_row;

#define FSDPI_PART_WORK(name) offsetof(fsdpi_part, name)
#define FSDPI_UNIT_WORK(name) offsetof(fsdpi_layout, name)
#define FSDPI_COPY            FSDP_OP_COPY
#define FSDPI_AT(pool, dtype) FSDP_POOL_##pool, FSDPI_##dtype

// clang-format off
// In the order of FSDPI_OPS_*.
static const fsdpi_template_row fsdpi_template_rows[FSDPI_OPS_COUNT] = {
//   op, label, stream, from, to, each part?, of gradients?, group, work, call
    {FSDPI_COPY, FSDP_LABEL_COPY_IN, FSDP_STREAM_GATHER, FSDPI_AT(SHARD, STORED),
        FSDPI_AT(GATHER, FULL), 1, 0, 0, FSDPI_PART_WORK(copy_in), fsdpi_call_pre_gather},
    {FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, FSDP_STREAM_GATHER, FSDPI_AT(SHARD, GATHERED),
        FSDPI_AT(GATHER, GATHERED), 0, 0, FSDPI_SHARDS, FSDPI_UNIT_WORK(all_gather), NULL},
    {FSDPI_COPY, FSDP_LABEL_COPY_OUT, FSDP_STREAM_GATHER, FSDPI_AT(GATHER, FULL),
        FSDPI_AT(GATHER, FULL), 1, 0, 0, FSDPI_PART_WORK(copy_out), fsdpi_call_post_gather},
    {FSDPI_COPY, FSDP_LABEL_SLICE, FSDP_STREAM_COMPUTE, FSDPI_AT(GATHER, GATHERED),
        FSDPI_AT(SLICE, GATHERED), 0, 0, 0, FSDPI_UNIT_WORK(slice_copy), NULL},
    {FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, FSDP_STREAM_GATHER, FSDPI_AT(SLICE, GATHERED),
        FSDPI_AT(GATHER, GATHERED), 0, 0, FSDPI_SLICES, FSDPI_UNIT_WORK(slice_gather), NULL},
    {FSDP_OP_USE, FSDP_LABEL_GATHER, FSDP_STREAM_COMPUTE, FSDPI_AT(GATHER, GATHERED),
        FSDPI_AT(SHARD, GATHERED), 0, 0, 0, 0, NULL},
    {FSDP_OP_ZERO, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, FSDPI_AT(SHARD, FULL),
        FSDPI_AT(GRAD, FULL), 0, 1, 0, 0, NULL},
    {FSDPI_COPY, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE, FSDPI_AT(GRAD, FULL),
        FSDPI_AT(RIN, REDUCED), 1, 1, 0, FSDPI_PART_WORK(sum), NULL},
    {FSDPI_COPY, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE, FSDPI_AT(GRAD, FULL),
        FSDPI_AT(GRAD, FULL), 1, 1, 0, FSDPI_PART_WORK(chunk_cat), NULL},
    {FSDPI_COPY, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE, FSDPI_AT(GRAD, FULL),
        FSDPI_AT(GRAD, REDUCED), 1, 1, 0, FSDPI_PART_WORK(divide), NULL},
    {FSDPI_COPY, FSDP_LABEL_USERS, FSDP_STREAM_REDUCE, FSDPI_AT(SHARD, FULL),
        FSDPI_AT(GRAD, FULL), 0, 1, 0, FSDPI_UNIT_WORK(users), NULL},
    {FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, FSDP_STREAM_REDUCE, FSDPI_AT(GRAD, FULL),
        FSDPI_AT(SGRAD, SHARD_GRAD), 0, 1, FSDPI_SUMS, FSDPI_UNIT_WORK(reduce_scatter), NULL},
    {FSDPI_COPY, FSDP_LABEL_RED_OUT, FSDP_STREAM_REDUCE, FSDPI_AT(SGRAD, SHARD_GRAD),
        FSDPI_AT(SGRAD, SHARD_GRAD), 1, 1, 0, FSDPI_PART_WORK(rescale), NULL},
    {FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, FSDP_STREAM_REDUCE, FSDPI_AT(GRAD, FULL),
        FSDPI_AT(ROUT, REDUCED), 0, 1, FSDPI_SUMS, FSDPI_UNIT_WORK(to_rout), NULL},
    {FSDPI_COPY, FSDP_LABEL_PARTIAL, FSDP_STREAM_REDUCE, FSDPI_AT(ROUT, REDUCED),
        FSDPI_AT(SHARD, REDUCED), 0, 1, 0, FSDPI_UNIT_WORK(partial), NULL},
    {FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, FSDP_STREAM_ALLREDUCE, FSDPI_AT(ROUT, REDUCED),
        FSDPI_AT(ROUT, REDUCED), 0, 1, FSDPI_REPLICAS, FSDPI_UNIT_WORK(partial), NULL},
    {FSDP_OP_CALL, FSDP_LABEL_ALL_REDUCE_HOOK, FSDP_STREAM_COUNT, FSDPI_AT(ROUT, REDUCED),
        FSDPI_AT(ROUT, REDUCED), 0, 1, 0, 0, fsdpi_call_all_reduce_hook},
    {FSDPI_COPY, FSDP_LABEL_RED_OUT, FSDP_STREAM_COUNT, FSDPI_AT(ROUT, REDUCED),
        FSDPI_AT(SGRAD, SHARD_GRAD), 1, 1, 0, FSDPI_PART_WORK(red_out), NULL},
};
// clang-format on

// Where the last copy to the shard gradients runs.
static int fsdpi_out_stream(const fsdp_unit *u) {
    return fsdpi_replicas(u) > 1 ? FSDP_STREAM_ALLREDUCE : FSDP_STREAM_REDUCE;
}

static fsdp_dtype fsdpi_template_dtype(const fsdp_unit *u, const fsdpi_part *part, int which) {
    const fsdp_dtype dtypes[] = {part->dtype, part->param_dtype, u->layout.gather_dtype,
                                 fsdpi_grad_dtype(u->model, part->dtype), u->layout.reduce_dtype};
    return dtypes[which];
}

static void fsdpi_template_group(const fsdp_unit *u, int group, fsdp_op *op) {
    const int sizes[] = {0, fsdpi_shards(u), u->desc.slices, fsdpi_shards(u), fsdpi_replicas(u)};
    fsdp_comm *const comms[] = {NULL, u->desc.info.shard_comm, u->desc.slice_comm,
                                u->desc.reduce_comm, u->desc.replicate_comm};
    op->group_size = sizes[group];
    op->comm = comms[group];
}

// Shards and shard gradients stay where they are; a slot is another one at another time.
static fsdp_buf *fsdpi_template_block(const fsdp_unit *u, const fsdpi_part *part, int pool) {
    const fsdpi_flat_block *flat = fsdpi_flat_of(u, part);
    return pool == FSDP_POOL_SHARD ? flat->shard : pool == FSDP_POOL_SGRAD ? flat->grad : NULL;
}

// One record, for a part or the unit, behind `t`. Returns the next place: `t` if nothing is to do.
static fsdpi_template *fsdpi_template_make(fsdp_unit *u, int kind, const fsdpi_part *part,
                                           fsdpi_template *t) {
    const fsdpi_template_row *row = &fsdpi_template_rows[kind];
    const char *owner = row->each ? (const char *)part : (const char *)&u->layout;
    const fsdpi_work *work = (const fsdpi_work *)(const void *)(owner + row->work);
    int stream = row->stream == FSDP_STREAM_COUNT ? fsdpi_out_stream(u) : row->stream;
    int extended = row->each && row->call && part->extended;
    fsdp_op *op = &t->op;
    *op = fsdpi_op(u->model, u, extended ? (int)FSDP_OP_CALL : row->op, row->label, stream);
    fsdpi_template_group(u, row->group, op);
    if ((row->group && op->group_size < 2) || (row->work && !extended && work->count == 0))
        return t;
    t->begin = 0;
    t->src = row->src;
    t->dst = row->dst;
    if (row->work && !extended)
        fsdpi_op_work(op, fsdpi_template_dtype(u, part, row->src_dtype),
                      fsdpi_template_dtype(u, part, row->dst_dtype), work);
    if (op->kind == FSDP_OP_CALL) {
        op->call = row->call;
        op->root = extended ? (int32_t)(part->extended - u->params) : -1;
    }
    op->src = fsdpi_template_block(u, part, row->src);
    op->dst = fsdpi_template_block(u, part, row->dst);
    return t + 1;
}

// What stands in no row.
static void fsdpi_template_special(fsdp_unit *u, int kind, fsdpi_template *t) {
    fsdp_op *op = &t->op;
    if (kind == FSDPI_OPS_GATHER && u->route[0].gather == FSDPI_GATHER_STAGED) {
        t->src = FSDP_POOL_GATHER;
        op->in_place = 1;
    } else if (kind == FSDPI_OPS_GATHER) {
        t->begin = fsdpi_bytes(u->layout.gather_begin, (fsdp_dtype)op->dtype);
    } else if (kind == FSDPI_OPS_COPY_IN && op->call) {
        op->label = FSDP_LABEL_PRE_GATHER;
    } else if (kind == FSDPI_OPS_COPY_OUT && op->call) {
        op->label = FSDP_LABEL_POST_GATHER;
    } else if (kind == FSDPI_OPS_WAIT) {
        op->dst = NULL;
        if (u->route[0].gather != FSDPI_GATHER_ALIAS) return;
        t->src = FSDP_POOL_SHARD;
        op->src = fsdpi_flat_of(u, u->layout.parts)->shard;
    } else if (kind == FSDPI_OPS_ZERO) {
        op->src = NULL;
        op->dtype = op->out_dtype = FSDP_U8;
        op->count = op->bytes = (uint64_t)u->layout.grad_bytes;
    } else if (kind == FSDPI_OPS_USERS) {
        op->src = NULL; // host memory
    } else if (kind == FSDPI_OPS_ADD) {
        op->accumulate = 1;
    } else if (kind == FSDPI_OPS_REPLICAS) {
        op->in_place = 1;
    }
}

static int fsdpi_templates_max(const fsdp_unit *u) {
    int max = 0;
    for (int kind = 0; kind < FSDPI_OPS_COUNT; kind++)
        max += fsdpi_template_rows[kind].each ? u->layout.num_parts : 1;
    return max;
}

// All records of a unit: its lists and blocks are there.
static void fsdpi_templates_make(fsdp_unit *u) {
    fsdpi_layout *l = &u->layout;
    fsdpi_template *t = l->ops[0];
    for (int kind = 0; kind < FSDPI_OPS_COUNT; kind++) {
        const fsdpi_template_row *row = &fsdpi_template_rows[kind];
        l->ops[kind] = t;
        if (row->grads && l->num_train == 0) continue;
        for (int k = 0; k < (row->each ? l->num_parts : 1); k++) {
            const fsdpi_part *part = &l->parts[row->each ? k : l->users_part];
            fsdpi_template *next = fsdpi_template_make(u, kind, part, t);
            if (next != t) fsdpi_template_special(u, kind, t);
            t = next;
        }
    }
    l->ops[FSDPI_OPS_COUNT] = t;
}

/* Emits the records of one kind. Their slots are those that the unit holds now; whoever names other
   buffers has written them into the template. */
static fsdp_status fsdpi_emit_kind(fsdp_unit *u, int kind) {
    fsdp_model *m = u->model;
    fsdpi_template *t = u->layout.ops[kind], *end = u->layout.ops[kind + 1];
    fsdp_status status = FSDP_OK;
    for (; t != end && !status; t++) {
        fsdp_op *op = &t->op;
        if (t->src >= FSDP_POOL_GATHER) op->src = u->state.slot[t->src];
        if (t->dst >= FSDP_POOL_GATHER) op->dst = u->state.slot[t->dst];
        if (op->src) op->src_ptr = op->src->ptr + t->begin;
        if (op->dst) op->dst_ptr = op->dst->ptr;
        op->state = m->call_state;
        op->step = m->step;
        op->given = m->given;
        status = fsdpi_emit(m, op);
    }
    return status;
}

// What all records of a kind multiply by, and whether they add to what is there.
static void fsdpi_each(fsdp_unit *u, int kind, double scale, int accumulate) {
    for (fsdpi_template *t = u->layout.ops[kind]; t != u->layout.ops[kind + 1]; t++) {
        t->op.scale = scale;
        t->op.accumulate = (uint8_t)accumulate;
    }
}

/* ==== core/gather.h =========================================================================
   parameters: gathered, waited for, freed, prefetched */

static fsdp_status fsdpi_do_wait(fsdp_unit *u) {
    fsdpi_state *s = &u->state;
    if (s->storage != FSDP_STORAGE_IN_FLIGHT) return FSDP_OK;
    fsdp_status status = fsdpi_emit_kind(u, FSDPI_OPS_WAIT);
    if (status) return status;
    if (s->ahead) u->model->ahead_bytes -= (int64_t)s->slot[FSDP_POOL_GATHER]->bytes;
    s->ahead = 0;
    s->storage = FSDP_STORAGE_UNSHARDED;
    return FSDP_OK;
}

// A gather that nobody waited for still reads shards, here and on the peers, which the caller may
// write next: the caller's stream waits for it too.
static fsdp_status fsdpi_do_reshard(fsdp_unit *u) {
    fsdpi_state *s = &u->state;
    fsdp_status status = fsdpi_do_wait(u);
    s->storage = FSDP_STORAGE_SHARDED;
    s->stale = 0;
    fsdp_status gather = fsdpi_release(u, &s->slot[FSDP_POOL_GATHER], FSDP_STREAM_COMPUTE);
    fsdp_status slice = fsdpi_release(u, &s->slot[FSDP_POOL_SLICE], FSDP_STREAM_COMPUTE);
    return status ? status : gather ? gather : slice;
}

// Shards have been written: what was gathered before is not used again.
static fsdp_status fsdpi_do_stale(fsdp_unit *u) {
    u->state.stale = u->state.storage != FSDP_STORAGE_SHARDED;
    return FSDP_OK;
}

// A view but for the gradient, whose presence is known to the caller's thread only.
static fsdp_param_view fsdpi_view_static(const fsdp_unit *u, int index) {
    const fsdpi_param *p = &u->params[index];
    const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_part_of(u, p));
    fsdp_param_view v = FSDP_ZERO;
    v.unit = u->model->units[u->desc.index];
    v.name = p->name;
    v.unit_name = u->desc.name;
    v.user = p->user;
    v.unit_user = u->desc.user;
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
                     op->unit->desc.info.shard_mesh_rank * p->string_bytes[i];
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

// From shards, by way of this rank's own part of the slot where they are not gathered as they are.
static fsdp_status fsdpi_gather_shards(fsdp_unit *u) {
    int staged = u->route[0].gather == FSDPI_GATHER_STAGED;
    fsdp_status status = staged ? fsdpi_emit_kind(u, FSDPI_OPS_COPY_IN) : FSDP_OK;
    if (!status) status = fsdpi_emit_kind(u, FSDPI_OPS_GATHER);
    return status ? status : fsdpi_emit_kind(u, FSDPI_OPS_COPY_OUT);
}

// From what was kept after forward, over fewer ranks; everything is in its last place already.
static fsdp_status fsdpi_gather_slices(fsdp_unit *u) {
    fsdp_status status = fsdpi_emit_kind(u, FSDPI_OPS_SLICE_GATHER);
    fsdp_status released = fsdpi_release(u, &u->state.slot[FSDP_POOL_SLICE], FSDP_STREAM_GATHER);
    return status ? status : released;
}

static int fsdpi_is_gathered(const fsdp_unit *u) { // or under way
    return u->state.storage == FSDP_STORAGE_IN_FLIGHT || u->state.storage == FSDP_STORAGE_UNSHARDED;
}

static fsdp_status fsdpi_do_unshard(fsdp_unit *u) {
    fsdpi_state *s = &u->state;
    fsdp_status status = FSDP_OK;
    if (s->stale) {
        s->stale = 0;
        status = fsdpi_do_reshard(u);
    }
    if (status || fsdpi_is_gathered(u)) return status;
    if (u->route[0].gather != FSDPI_GATHER_ALIAS) {
        status = fsdpi_acquire(u, FSDP_POOL_GATHER, &s->slot[FSDP_POOL_GATHER]);
        if (!status)
            status = s->slot[FSDP_POOL_SLICE] ? fsdpi_gather_slices(u) : fsdpi_gather_shards(u);
    }
    if (!status) s->storage = FSDP_STORAGE_IN_FLIGHT;
    return status;
}

static fsdp_status fsdpi_do_unshard_backward(fsdp_unit *u) {
    return u->options.unshard_in_backward ? fsdpi_do_unshard(u) : FSDP_OK;
}

// Keep 1/n of what was gathered, or nothing, or all of it.
static fsdp_status fsdpi_do_reshard_forward(fsdp_unit *u) {
    fsdp_buf **slot = u->state.slot;
    if (u->options.reshard_after_forward == FSDP_RESHARD_NEVER) return FSDP_OK;
    if (u->options.reshard_after_forward == FSDP_RESHARD_ALWAYS) return fsdpi_do_reshard(u);
    fsdp_status status = fsdpi_acquire(u, FSDP_POOL_SLICE, &slot[FSDP_POOL_SLICE]);
    if (status) return status;
    status = fsdpi_emit_kind(u, FSDPI_OPS_SLICE);
    if (!status) status = fsdpi_release(u, &slot[FSDP_POOL_GATHER], FSDP_STREAM_COMPUTE);
    if (!status) u->state.storage = FSDP_STORAGE_SHARDED_POST_FORWARD;
    return status;
}

// What is still in flight was a prefetch that nobody used: after the last backward nobody will.
// Before that it goes on, and a hook that writes the shard comes behind it.
static fsdp_status fsdpi_do_reshard_backward(fsdp_unit *u) {
    int flies = u->state.storage == FSDP_STORAGE_IN_FLIGHT;
    if (flies ? u->model->is_last_backward : u->options.reshard_after_backward)
        return fsdpi_do_reshard(u);
    return flies && u->model->grad_hooks ? fsdpi_emit_kind(u, FSDPI_OPS_WAIT) : FSDP_OK;
}

// Gather a unit ahead of its use, unless that would hold more memory than prefetches may.
static fsdp_status fsdpi_prefetch(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int slot = u->layout.classes[FSDP_POOL_GATHER];
    int64_t bytes = slot < 0 ? 0 : (int64_t)m->classes[slot].bytes, most = m->desc.prefetch_bytes;
    if ((fsdpi_is_gathered(u) && !u->state.stale) || (most && m->ahead_bytes + bytes > most))
        return FSDP_OK;
    fsdp_status status = fsdpi_do_unshard(u);
    if (status || !u->state.slot[FSDP_POOL_GATHER]) return status;
    u->state.ahead = 1;
    m->ahead_bytes += bytes;
    return FSDP_OK;
}

static fsdp_status fsdpi_do_prefetch_forward(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < u->options.num_prefetch[0] && !status; i++)
        status = fsdpi_prefetch(u->model->units[u->options.prefetch[0][i]]);
    return status;
}

/* The units that were named; else the one whose forward came before this one's: it is gathered
   while this one computes. An inline device would only block earlier. */
static fsdp_status fsdpi_do_prefetch_backward(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int at = u->state.last_order, policy = m->desc.implicit_prefetch;
    fsdp_status status = FSDP_OK;
    if (at >= 0) u->state.last_order = m->order[at].previous;
    for (int i = 0; i < u->options.num_prefetch[1] && !status; i++) {
        fsdp_unit *target = m->units[u->options.prefetch[1][i]];
        if (target->options.unshard_in_backward) status = fsdpi_prefetch(target);
    }
    int hides = policy == FSDP_PREFETCH_DEFAULT ? m->world->mode != FSDPI_INLINE
                                                : policy == FSDP_PREFETCH_ALWAYS;
    if (u->options.num_prefetch[1] || at <= 0 || !hides ||
        !m->order[at - 1].unit->options.unshard_in_backward)
        return status;
    return fsdpi_prefetch(m->order[at - 1].unit);
}

/* ==== core/usage.h ==========================================================================
   who used which parameter */

// Owns: fsdpi_usage. A parameter is used when the caller asks where its gradient is written. Flags
// of use ride along in every reduction, summed like gradients, so that a parameter that no rank
// used is known without another collective. Who used one need not look.

static uint8_t *fsdpi_use(const fsdp_unit *u, int i) { return (uint8_t *)u->usage.use + i; }

// Hooks look at all parameters of a unit: at eight at a time. One set of marks for each of them.
static inline uint64_t fsdpi_uses(int use) { return 0x0101010101010101u * (uint64_t)use; }

// Those that have the mark `from`, with the mark `to` instead.
static inline uint64_t fsdpi_uses_as(uint64_t uses, int from, int to) {
    return (uses & fsdpi_uses(from)) / (uint64_t)from * (uint64_t)to;
}

// All lose the marks `gone`; who had `from` gets `to`.
static inline void fsdpi_usage_turn(fsdp_unit *u, int gone, int from, int to) {
    for (int k = 0; k < fsdpi_use_words(u); k++) {
        uint64_t uses = u->usage.use[k];
        u->usage.use[k] = (uses & ~fsdpi_uses(gone)) | fsdpi_uses_as(uses, from, to);
    }
}
static FSDPI_NOINLINE void fsdpi_usage_clear(fsdp_unit *u, int use) {
    fsdpi_usage_turn(u, use, 1, 0);
}

static int fsdpi_usage_any(const fsdp_unit *u, int use) {
    uint64_t any = 0;
    for (int k = 0; k < fsdpi_use_words(u); k++) any |= u->usage.use[k] & fsdpi_uses(use);
    return any != 0;
}

// A flag for each trainable, in the two dtypes of a reduction's input. Flags are divided like
// gradients, so that one of `value`, what they are divided by, does not vanish.
static FSDPI_NOINLINE void fsdpi_usage_write(fsdp_unit *u, double value) {
    fsdp_dtype dtypes[2] = {u->layout.parts[u->layout.users_part].param_dtype,
                            u->layout.reduce_dtype};
    char *flags[2] = {u->usage.flags, u->usage.wide};
    if (u->usage.in_flight) fsdpi_drain(u->model->world); // a copy may still read them
    for (int i = 0; i < 2 * u->desc.num_params; i++) {
        int at = u->params[i / 2].train_index, k = i % 2;
        double flag = *fsdpi_use(u, i / 2) & FSDPI_USE_USED ? value : 0;
        if (at >= 0)
            (void)fsdp_convert(flags[k] + (size_t)at * fsdp_dtype_size(dtypes[k]), dtypes[k], &flag,
                               FSDP_F64, 1);
    }
    fsdpi_usage_turn(u, FSDPI_USE_FLAGGED, FSDPI_USE_USED, FSDPI_USE_FLAGGED);
}

/* Brings the flags up to date for a reduction that multiplies sums by value's reciprocal. The flags
   of a step are mostly those of the step before, so that they are seldom written. */
static void fsdpi_usage_send(fsdp_unit *u, double value) {
    uint64_t differs = value != u->usage.value;
    for (int k = 0; k < fsdpi_use_words(u); k++) {
        uint64_t uses = u->usage.use[k];
        differs |= (fsdpi_uses_as(uses, FSDPI_USE_USED, FSDPI_USE_FLAGGED) ^ uses) &
                   fsdpi_uses(FSDPI_USE_FLAGGED);
    }
    if (differs) fsdpi_usage_write(u, value);
    fsdpi_usage_turn(u, FSDPI_USE_USED, FSDPI_USE_USED,
                     u->options.reduce_unused ? 0 : FSDPI_USE_PENDING);
    u->usage.value = value;
    u->usage.in_flight = 1;
}

// A reduction is on its way, with the counts of users. One rank: what it used has a gradient.
static void fsdpi_usage_sent(fsdp_unit *u) {
    u->usage.counted = 1;
    if (fsdpi_ranks(u) == 1)
        fsdpi_usage_turn(u, FSDPI_USE_USED, FSDPI_USE_USED, FSDPI_USE_REDUCED);
    if (!u->options.reduce_unused) fsdpi_usage_clear(u, FSDPI_USE_PENDING);
}

// What ranks must agree on in a reduction beside the unit; by upstream's rule what was used, too.
static void fsdpi_usage_agree(const fsdp_unit *u, double factor, fsdp_op *op) {
    const fsdpi_grads *g = &u->state.grads;
    uint64_t bits, used = 0, adds = (g->shard == FSDPI_GRADS_REDUCED) | (uint64_t)g->waits << 1;
    memcpy(&bits, &factor, sizeof bits);
    bits = fsdpi_hash(1, bits);
    for (int k = 0; k < fsdpi_use_words(u) && !u->options.reduce_unused; k++)
        used = fsdpi_hash(used, u->usage.use[k] & fsdpi_uses(FSDPI_USE_PENDING));
    op->what_hash = fsdpi_hash(u->layout.hash, bits + used + adds);
    op->agree[FSDP_AGREE_FACTOR] = (uint8_t)bits;
    op->agree[FSDP_AGREE_USED] = (uint8_t)used;
    op->agree[FSDP_AGREE_ACCUMULATE] = (uint8_t)adds;
}

// The counts of users of the unit's trainables [from, from + count), as the host reads them.
static void fsdpi_usage_counts(const fsdp_unit *u, int from, int count, float *counts) {
    fsdp_dtype dtype = u->layout.parts[u->layout.users_part].dtype;
    fsdp_dtype grad = fsdpi_grad_dtype(u->model, dtype);
    const fsdpi_flat_block *flat = &u->model->flats[dtype];
    int64_t at = fsdpi_bytes(u->layout.users_base - flat->train_numel + from, grad);
    (void)fsdp_convert(counts, FSDP_F32, flat->users + at, grad, count);
}

// Did a rank use a trainable parameter that has been reduced? The counts are read if need be.
static int fsdpi_usage_of(const fsdp_unit *u, const fsdpi_param *p) {
    float users = 0;
    int reduced = *fsdpi_use(u, (int)(p - u->params)) & FSDPI_USE_REDUCED;
    if (reduced || fsdpi_ranks(u) == 1) return reduced != 0;
    fsdpi_usage_counts(u, p->train_index, 1, &users);
    return users != 0.0f;
}

// Brings the counts of users, which have been reduced, to where the host can read them.
static fsdp_status fsdpi_usage_read(fsdp_model *m) {
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

/* Marks what this rank used as reduced. Returns whether something is left, for which the host has
   to look at the counts. */
static int fsdpi_usage_known(fsdp_unit *u) {
    int known = 0;
    fsdpi_usage_turn(u, 0, FSDPI_USE_FLAGGED, FSDPI_USE_REDUCED);
    for (int k = 0; k < fsdpi_use_words(u); k++) // the sum of eight bytes
        known += (int)(fsdpi_uses_as(u->usage.use[k], FSDPI_USE_REDUCED, 1) * fsdpi_uses(1) >> 56);
    return known < u->layout.num_train;
}

// Marks what other ranks used: their counts have been read.
static void fsdpi_usage_learn(fsdp_unit *u) {
    float counts[64];
    for (int i = 0, known = 0; i < u->desc.num_params && fsdpi_ranks(u) > 1; i++) {
        int at = u->params[i].train_index;
        if (at < 0) continue;
        if (at == known) { // trainables are numbered in the order of parameters
            int count = u->layout.num_train - at < 64 ? u->layout.num_train - at : 64;
            fsdpi_usage_counts(u, at, count, counts);
            known += count;
        }
        if (counts[at % 64] != 0.0f) *fsdpi_use(u, i) |= FSDPI_USE_REDUCED;
    }
}

/* ==== core/grads.h ==========================================================================
   gradients: written, collected, reduced */

// Owns: fsdpi_grads. What happens to gradients is decided by the unit's route; here stand its
// steps. Invariants: at most one of the slots GRAD and RIN holds what a reduction will read when it
// begins; whoever gives a slot back names its last reader.
// Source: torch: FSDPParamGroup.post_backward, foreach_reduce.

// The route for what the shard gradient holds now.
static const fsdpi_route *fsdpi_route_now(const fsdp_unit *u) {
    return &u->route[u->state.grads.shard == FSDPI_GRADS_REDUCED];
}

// The pool of the slot that a reduction reads, and the dtype in it.
static int fsdpi_input(const fsdp_unit *u) {
    return u->state.grads.newest == FSDPI_GRADS_SUMMED ? FSDP_POOL_RIN : FSDP_POOL_GRAD;
}
static fsdp_dtype fsdpi_input_dtype(const fsdp_unit *u) {
    return u->state.grads.newest == FSDPI_GRADS_SUMMED
               ? u->layout.reduce_dtype
               : u->layout.parts[u->layout.users_part].param_dtype;
}

// The caller's stream writes a buffer from here on: it waits for those who read it.
static fsdp_status fsdpi_caller_writes(fsdp_unit *u, fsdp_buf *buf) {
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_USE, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE);
    op.dst = buf;
    return fsdpi_emit(u->model, &op);
}

// Zero the padding of the direct parameters of a part, or of the packed ones. What lies between two
// pieces is the caller's, who stores there later: little of it is filled, too, to save a call.
static fsdp_status fsdpi_zero_padding_of(fsdp_unit *u, const fsdpi_part *part, int direct) {
    enum { BETWEEN = 16384 }; // elements
    fsdp_buf *slot = u->state.slot[FSDP_POOL_GRAD];
    int64_t world = fsdpi_shards(u), begin = 0, end = 0;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < u->desc.num_params && !status; i++) {
        const fsdpi_param *p = &u->params[i];
        int64_t at = p->grad_offset + p->lay.numel,
                past = p->grad_offset + world * p->lay.shard_numel;
        if (!p->requires_grad || fsdpi_part_of(u, p) != part || p->lay.direct != direct ||
            at == past)
            continue;
        if (end == begin || at < end || at - end > BETWEEN) {
            status = fsdpi_emit_fill(u->model, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, slot,
                                     part->param_dtype, begin, end - begin, 0);
            begin = at;
        }
        end = past;
    }
    return status ? status
                  : fsdpi_emit_fill(u->model, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, slot,
                                    part->param_dtype, begin, end - begin, 0);
}

// Zero what the caller's backward does not store to: padding, in its own slot layout.
static fsdp_status fsdpi_zero_padding(fsdp_unit *u) {
    fsdp_buf *slot = u->state.slot[FSDP_POOL_GRAD];
    int world = fsdpi_shards(u);
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < 2 * u->layout.num_parts && !status; k++)
        status = fsdpi_zero_padding_of(u, &u->layout.parts[k / 2], k % 2);
    for (int k = 0; k < u->layout.num_parts && u->layout.pad_rin && !status; k++) {
        const fsdpi_part *part = &u->layout.parts[k];
        int64_t packed = part->train.packed_numel;
        status = fsdpi_emit_fill(
            u->model, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, slot, part->param_dtype,
            part->grad + world * (part->train.shard_numel - packed), world * packed, 0);
    }
    return status;
}

// One rank: gradients are written where they end. Zeros are put there before the first ones, unless
// the caller stores: then what it has not stored is zeroed in the end.
static fsdp_status fsdpi_write_shard(fsdp_unit *u) {
    fsdpi_grads *g = &u->state.grads;
    const fsdpi_part *part = u->layout.parts;
    fsdp_buf *shard = fsdpi_flat_of(u, part)->grad;
    int stores = u->model->desc.grads_overwrite, undefined = g->shard == FSDPI_GRADS_NONE;
    if (g->shard == FSDPI_GRADS_ZERO) g->shard = FSDPI_GRADS_NONE;
    g->newest = FSDPI_GRADS_IN_SHARD;
    if (stores) fsdpi_usage_clear(u, FSDPI_USE_WRITTEN);
    return undefined && !stores
               ? fsdpi_emit_fill(u->model, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, shard,
                                 part->dtype, part->train.base, u->layout.train_numel, 0)
               : fsdpi_caller_writes(u, shard);
}

/* Where gradients will be written: zero, or what earlier microbatches left. */
static fsdp_status fsdpi_do_grads(fsdp_unit *u) {
    fsdpi_grads *g = &u->state.grads;
    if (u->layout.num_train == 0 || g->newest == FSDPI_GRADS_WRITTEN) return FSDP_OK;
    if (fsdpi_route_now(u)->write_shard && g->newest != FSDPI_GRADS_SUMMED)
        return fsdpi_write_shard(u);
    fsdp_status status = fsdpi_acquire(u, FSDP_POOL_GRAD, &u->state.slot[FSDP_POOL_GRAD]);
    if (status) return status;
    g->newest = FSDPI_GRADS_WRITTEN;
    if (!u->model->desc.grads_overwrite) return fsdpi_emit_kind(u, FSDPI_OPS_ZERO);
    fsdpi_usage_clear(u, FSDPI_USE_WRITTEN);
    status = fsdpi_zero_padding(u);
    return status ? status : fsdpi_caller_writes(u, u->state.slot[FSDP_POOL_GRAD]);
}

/* -------------------------------------------------------------------------------------------- */
// The steps of a route, in the order of FSDPI_STEP_LIST. Steps that read the reduce input do
// nothing where only sums of the shard group wait for their all-reduce.

// With grads_overwrite nothing was zeroed: what this rank did not store must not count.
static fsdp_status fsdpi_step_zero_unused(fsdp_unit *u) {
    int in_shard = u->state.grads.newest == FSDPI_GRADS_IN_SHARD;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < u->desc.num_params && !status; i++) {
        const fsdpi_param *p = &u->params[i];
        const fsdpi_part *part = fsdpi_part_of(u, p);
        if (!p->requires_grad || (*fsdpi_use(u, i) & FSDPI_USE_WRITTEN)) continue;
        status = fsdpi_emit_fill(
            u->model, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE,
            in_shard ? fsdpi_flat_of(u, part)->grad : u->state.slot[FSDP_POOL_GRAD],
            part->param_dtype, in_shard ? p->lay.shard_offset : p->grad_offset, p->lay.numel, 0);
    }
    return status;
}

// The caller has written the slot.
static fsdp_status fsdpi_step_wrote(fsdp_unit *u) {
    fsdp_buf *slot = u->state.slot[FSDP_POOL_GRAD];
    fsdpi_mark(u->model->world, FSDP_STREAM_COMPUTE, &slot->ready, NULL);
    return fsdpi_marker(u, FSDP_OP_WROTE, FSDP_STREAM_COMPUTE, slot);
}

// Brings gradients to the reduce input, where earlier microbatches may be: cast, divided, added.
static fsdp_status fsdpi_step_sum(fsdp_unit *u) {
    fsdp_buf **input = &u->state.slot[FSDP_POOL_RIN];
    int adds = *input != NULL;
    fsdp_status status = adds ? FSDP_OK : fsdpi_acquire(u, FSDP_POOL_RIN, input);
    if (!status && !adds && u->layout.pad_rin)
        status = fsdpi_emit_fill(u->model, u, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE, *input,
                                 u->layout.reduce_dtype, 0, u->layout.reduce_numel, 0);
    fsdpi_each(u, FSDPI_OPS_SUM, 1.0 / u->state.grads.divided, adds);
    if (!status) status = fsdpi_emit_kind(u, FSDPI_OPS_SUM);
    u->state.grads.newest = FSDPI_GRADS_SUMMED;
    return status ? status : fsdpi_release(u, &u->state.slot[FSDP_POOL_GRAD], FSDP_STREAM_REDUCE);
}

// They stay where they were written, unless earlier ones are in the reduce input.
static fsdp_status fsdpi_step_keep(fsdp_unit *u) {
    return u->state.slot[FSDP_POOL_RIN] ? fsdpi_step_sum(u) : FSDP_OK;
}

// The gradients in the slot become a reduce input where they are.
static fsdp_status fsdpi_step_fold(fsdp_unit *u) {
    if (u->state.grads.newest != FSDPI_GRADS_WRITTEN) return FSDP_OK;
    if (u->state.grads.divided == 1) return fsdpi_emit_kind(u, FSDPI_OPS_FOLD);
    fsdpi_each(u, FSDPI_OPS_FOLD_DIVIDED, 1.0 / u->state.grads.divided, 0);
    return fsdpi_emit_kind(u, FSDPI_OPS_FOLD_DIVIDED);
}

// num_train flags for every rank ride along.
static fsdp_status fsdpi_step_users(fsdp_unit *u) {
    int input = fsdpi_input(u);
    fsdpi_template *t = u->layout.ops[FSDPI_OPS_USERS];
    if (u->state.grads.newest == FSDPI_GRADS_NOWHERE) return FSDP_OK;
    fsdpi_usage_send(u, fsdpi_route_now(u)->factor / u->state.grads.divided);
    t->dst = (uint8_t)input;
    t->op.src_ptr = input == FSDP_POOL_RIN ? u->usage.wide : u->usage.flags;
    fsdpi_op_cast(&t->op, fsdpi_input_dtype(u), fsdpi_input_dtype(u));
    return fsdpi_emit_kind(u, FSDPI_OPS_USERS);
}

// Reads the reduce input, over the shard group, and gives it back.
static fsdp_status fsdpi_scatter(fsdp_unit *u, int kind, double scale, int accumulate) {
    int input = fsdpi_input(u);
    fsdpi_template *t = u->layout.ops[kind];
    if (u->state.grads.newest == FSDPI_GRADS_NOWHERE) return FSDP_OK;
    const fsdpi_work *works = kind == FSDPI_OPS_SCATTER ? u->layout.reduce_scatter
                                                        : u->layout.to_rout;
    const fsdpi_work *work = &works[input == FSDP_POOL_RIN];
    t->src = (uint8_t)input;
    t->op.scale = scale;
    t->op.accumulate = (uint8_t)accumulate;
    t->op.list = work->segs;
    t->op.list_count = (uint32_t)work->num;
    fsdpi_usage_agree(u, fsdpi_route_now(u)->factor, &t->op);
    fsdpi_op_cast(&t->op, fsdpi_input_dtype(u), t->op.out_dtype);
    fsdp_status status = fsdpi_emit_kind(u, kind);
    u->state.grads.newest = FSDPI_GRADS_NOWHERE;
    return status ? status : fsdpi_release(u, &u->state.slot[input], FSDP_STREAM_REDUCE);
}

static double fsdpi_rest(const fsdp_unit *u) { // what sums of the input are to be multiplied by
    return u->state.grads.divided / fsdpi_route_now(u)->factor;
}

static fsdp_status fsdpi_step_scatter_fused(fsdp_unit *u) {
    return fsdpi_scatter(u, FSDPI_OPS_SCATTER, fsdpi_rest(u),
                         u->state.grads.shard == FSDPI_GRADS_REDUCED);
}
static fsdp_status fsdpi_step_scatter(fsdp_unit *u) {
    return fsdpi_scatter(u, FSDPI_OPS_SCATTER, 1, 0);
}

static fsdp_status fsdpi_step_rescale(fsdp_unit *u) {
    fsdpi_each(u, FSDPI_OPS_RESCALE, fsdpi_rest(u), 0);
    return fsdpi_emit_kind(u, FSDPI_OPS_RESCALE);
}

static fsdp_status fsdpi_step_partial_fused(fsdp_unit *u) {
    fsdp_buf **sums = &u->state.slot[FSDP_POOL_ROUT];
    int adds = *sums != NULL;
    if (u->state.grads.newest == FSDPI_GRADS_NOWHERE) return FSDP_OK;
    fsdp_status status = adds ? FSDP_OK : fsdpi_acquire(u, FSDP_POOL_ROUT, sums);
    return status ? status : fsdpi_scatter(u, FSDPI_OPS_PARTIAL, 1, adds);
}

// The backend cannot add: fresh sums, and a copy that adds them to those that wait.
static fsdp_status fsdpi_step_partial(fsdp_unit *u) {
    fsdpi_grads *g = &u->state.grads;
    fsdp_buf **sums = &u->state.slot[FSDP_POOL_ROUT], *waiting = *sums;
    if (g->newest == FSDPI_GRADS_NOWHERE) return FSDP_OK;
    if (!waiting) g->summed = g->divided * fsdpi_route_now(u)->sums; // those that wait decided it
    fsdp_status status = fsdpi_acquire(u, FSDP_POOL_ROUT, sums);
    if (!status) status = fsdpi_scatter(u, FSDPI_OPS_PARTIAL, g->divided / g->summed, 0);
    if (status || !waiting) return status;
    fsdpi_template *const *add = &u->layout.ops[FSDPI_OPS_ADD];
    if (add[0] != add[1]) add[0]->op.dst = waiting;
    status = fsdpi_emit_kind(u, FSDPI_OPS_ADD);
    if (!status) status = fsdpi_release(u, sums, FSDP_STREAM_REDUCE);
    *sums = waiting;
    return status;
}

// What is reduced further: the sums of the shard group, or with one shard the reduce input.
static int fsdpi_sums(const fsdp_unit *u) {
    return fsdpi_route_now(u)->from_input ? fsdpi_input(u) : FSDP_POOL_ROUT;
}
static fsdp_dtype fsdpi_sums_dtype(const fsdp_unit *u) {
    return fsdpi_route_now(u)->from_input ? fsdpi_input_dtype(u) : u->layout.reduce_dtype;
}

static fsdp_status fsdpi_step_replicas(fsdp_unit *u) {
    const fsdpi_route *route = fsdpi_route_now(u);
    fsdpi_grads *g = &u->state.grads;
    fsdpi_template *t = u->layout.ops[FSDPI_OPS_REPLICAS];
    t->src = t->dst = (uint8_t)fsdpi_sums(u);
    t->op.scale = 1 / route->replicas;
    g->summed = (route->from_input ? g->divided : g->summed) * route->replicas;
    fsdpi_usage_agree(u, route->factor, &t->op);
    fsdpi_op_cast(&t->op, fsdpi_sums_dtype(u), fsdpi_sums_dtype(u));
    return fsdpi_emit_kind(u, FSDPI_OPS_REPLICAS);
}

static fsdp_status fsdpi_call_all_reduce_hook(const fsdp_op *op, void *stream) {
    fsdp_unit *u = op->unit->model->units[op->unit->desc.index];
    return u->options.all_reduce_hook(u->options.all_reduce_user, u, op->dst_ptr,
                                      u->layout.train_numel, u->layout.reduce_dtype, stream);
}

static fsdp_status fsdpi_step_hook(fsdp_unit *u) {
    fsdpi_template *t = u->layout.ops[FSDPI_OPS_HOOK];
    t->src = t->dst = (uint8_t)fsdpi_sums(u);
    return fsdpi_emit_kind(u, FSDPI_OPS_HOOK);
}

static fsdp_status fsdpi_step_out(fsdp_unit *u) {
    int sums = fsdpi_sums(u);
    fsdpi_template *const *ops = &u->layout.ops[FSDPI_OPS_OUT];
    double scale = u->state.grads.summed / fsdpi_route_now(u)->factor;
    fsdpi_each(u, FSDPI_OPS_OUT, scale, u->state.grads.shard == FSDPI_GRADS_REDUCED);
    for (fsdpi_template *t = ops[0]; t != ops[1]; t++) {
        t->src = (uint8_t)sums;
        fsdpi_op_cast(&t->op, fsdpi_sums_dtype(u), t->op.out_dtype);
    }
    fsdp_status status = fsdpi_emit_kind(u, FSDPI_OPS_OUT);
    fsdp_status released = fsdpi_release(u, &u->state.slot[sums], fsdpi_out_stream(u));
    return status ? status : released;
}

static fsdp_status fsdpi_call_grad_hook(const fsdp_op *op, void *stream) {
    const fsdp_unit *u = op->unit;
    const fsdpi_param *p = &u->params[op->root];
    const fsdpi_part *part = fsdpi_part_of(u, p);
    fsdp_dtype dtype = fsdpi_grad_dtype(u->model, part->dtype);
    fsdp_param_view v = fsdpi_view_static(op->unit, op->root);
    v.shard_grad = fsdpi_flat_of(u, part)->grad->ptr + fsdpi_bytes(p->lay.shard_offset, dtype);
    return fsdpi_usage_of(u, p) ? p->grad_hook(p->grad_hook_user, &v, stream) : FSDP_OK;
}

// Whoever waits for a parameter's shard gradient is told. On native devices that is at once.
static fsdp_status fsdpi_tell_hooks(fsdp_unit *u, int stream) {
    fsdp_model *m = u->model;
    fsdp_status status = FSDP_OK;
    int any = 0;
    for (int i = 0; i < u->desc.num_params; i++)
        any |= u->params[i].grad_hook && u->params[i].requires_grad;
    if (any && m->world->mode == FSDPI_NATIVE) {
        status = fsdpi_sync(m->world, stream);
        if (!status) status = fsdpi_usage_read(m);
    }
    for (int i = 0; i < u->desc.num_params && any && !status; i++) {
        fsdpi_param *p = &u->params[i];
        const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_part_of(u, p));
        if (!p->grad_hook || !p->requires_grad) continue;
        (void)fsdpi_do_stale(u); // the hook may write shards
        status = fsdpi_emit_call(u, p, FSDP_LABEL_GRAD_HOOK, stream, flat->grad, flat->shard,
                                 fsdpi_call_grad_hook);
    }
    return status;
}

// The shard gradients of a unit are on their way.
static fsdp_status fsdpi_grads_done(fsdp_unit *u, int stream) {
    u->state.grads.shard = FSDPI_GRADS_REDUCED;
    u->state.grads.newest = FSDPI_GRADS_NOWHERE;
    fsdpi_usage_sent(u);
    return u->model->grad_hooks ? fsdpi_tell_hooks(u, stream) : FSDP_OK;
}

static fsdp_status fsdpi_step_done(fsdp_unit *u) {
    return fsdpi_grads_done(u, fsdpi_out_stream(u));
}

static fsdp_status fsdpi_run_steps(fsdp_unit *u, const uint8_t *step) {
    // clang-format off
    static fsdp_status (*const steps[FSDPI_STEP_COUNT])(fsdp_unit *u) = {
        NULL, fsdpi_step_zero_unused, fsdpi_step_wrote, fsdpi_step_keep, fsdpi_step_sum,
        fsdpi_step_fold, fsdpi_step_users, fsdpi_step_scatter_fused, fsdpi_step_scatter,
        fsdpi_step_rescale, fsdpi_step_partial_fused, fsdpi_step_partial, fsdpi_step_replicas,
        fsdpi_step_hook, fsdpi_step_out, fsdpi_step_done};
    // clang-format on
    fsdp_status status = FSDP_OK;
    for (; *step && !status; step++) status = steps[*step](u);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// The actions.

/* End of a unit's backward. Without sync gradients stay, in the slot where they were written or, if
   they are to be widened or would be overwritten, summed in the reduce input; without all_reduce,
   in the reduce output. */
static fsdp_status fsdpi_do_reduce(fsdp_unit *u) {
    fsdpi_grads *g = &u->state.grads;
    fsdp_buf **slot = u->state.slot;
    fsdp_status status = FSDP_OK;
    if (u->layout.num_train == 0) return FSDP_OK;
    if (!u->options.reduce_unused && !fsdpi_usage_any(u, FSDPI_USE_USED) && !slot[FSDP_POOL_ROUT]) {
        status = fsdpi_release(u, &slot[FSDP_POOL_RIN], FSDP_STREAM_REDUCE);
        fsdp_status grad = fsdpi_release(u, &slot[FSDP_POOL_GRAD], FSDP_STREAM_COMPUTE);
        g->newest = FSDPI_GRADS_NOWHERE;
        return status ? status : grad;
    }
    if (g->newest == FSDPI_GRADS_IN_SHARD) { // others may have written the block: one event for all
        status = fsdpi_caller_writes(u, fsdpi_flat_of(u, u->layout.parts)->grad);
        if (!status && u->model->desc.grads_overwrite) status = fsdpi_step_zero_unused(u);
        return status ? status : fsdpi_grads_done(u, FSDP_STREAM_COMPUTE);
    }
    const fsdpi_route *route = fsdpi_route_now(u);
    g->waits = slot[FSDP_POOL_ROUT] != NULL;
    if (!slot[FSDP_POOL_RIN] && !slot[FSDP_POOL_ROUT]) g->divided = g->summed = route->before;
    if (g->newest == FSDPI_GRADS_WRITTEN) status = fsdpi_run_steps(u, route->collect);
    return status ? status : fsdpi_run_steps(u, route->reduce);
}

// Finalize: gradients of earlier microbatches of a unit that this backward did not reach.
static fsdp_status fsdpi_do_leftovers(fsdp_unit *u) {
    fsdp_status status = FSDP_OK;
    int sums = u->state.slot[FSDP_POOL_ROUT] != NULL,
        input = u->state.grads.newest != FSDPI_GRADS_NOWHERE;
    if (!u->options.sync || !(input || (sums && u->options.all_reduce))) return FSDP_OK;
    for (int k = 0; k < u->layout.num_parts && !status; k++) // the caller may have read it
        if (u->layout.parts[k].num_train)
            status = fsdpi_caller_writes(u, fsdpi_flat_of(u, &u->layout.parts[k])->grad);
    return status ? status : fsdpi_do_reduce(u);
}

static fsdp_status fsdpi_do_zero_grad(fsdp_unit *u) {
    fsdpi_grads *g = &u->state.grads;
    if (g->shard == FSDPI_GRADS_REDUCED) g->shard = FSDPI_GRADS_NONE;
    fsdpi_usage_clear(u, FSDPI_USE_REDUCED);
    return FSDP_OK;
}

// After reset nothing of a step is left. The streams have been drained.
static fsdp_status fsdpi_do_drop(fsdp_unit *u) {
    fsdp_status status = fsdpi_do_reshard(u);
    for (int pool = FSDP_POOL_GRAD; pool <= FSDP_POOL_ROUT; pool++) {
        fsdp_status released = fsdpi_release(u, &u->state.slot[pool], FSDP_STREAM_COMPUTE);
        if (!status) status = released;
    }
    fsdpi_usage_clear(u, FSDPI_USE_USED | FSDPI_USE_PENDING);
    u->usage.counted = 0;
    u->told = 0;
    u->state.grads.newest = FSDPI_GRADS_NOWHERE;
    (void)fsdpi_do_zero_grad(u);
    return status;
}

/* ==== core/commit.h =========================================================================
   the flat blocks of a model and the lists of its units, made when all are known */

// Where each unit lies in the flat blocks: trainables of all units, then frozen ones; counts of
// users behind the gradients.
static void fsdpi_place_units(fsdp_model *m) {
    for (int d = 0; d < FSDP_DTYPE_COUNT; d++)
        m->flats[d].train_numel = m->flats[d].numel = m->flats[d].grad_numel = 0;
    for (int trainable = 1; trainable >= 0; trainable--) {
        for (int i = 0; i < m->num_units; i++) {
            fsdp_unit *u = m->units[i];
            for (int k = 0; k < u->layout.num_parts; k++) {
                fsdpi_flat_block *flat = fsdpi_flat_of(u, &u->layout.parts[k]);
                fsdpi_list *list = trainable ? &u->layout.parts[k].train
                                             : &u->layout.parts[k].frozen;
                list->base = flat->numel;
                int64_t align = fsdpi_align_numel(m, u->layout.parts[k].dtype);
                flat->numel += fsdpi_align_up(list->shard_numel, align);
                if (trainable) flat->train_numel = flat->grad_numel = flat->numel;
            }
        }
    }
    for (int i = 0; i < m->num_units; i++) {
        fsdp_unit *u = m->units[i];
        fsdpi_flat_block *flat = fsdpi_flat_of(u, &u->layout.parts[u->layout.users_part]);
        u->layout.users_base = flat->grad_numel;
        if (fsdpi_ranks(u) > 1) flat->grad_numel += u->layout.num_train;
    }
}

// One row of width elements, from src to dst.
static fsdp_block fsdpi_run(int64_t src, int64_t dst, int64_t width) {
    fsdp_block b = {src, dst, width, 1, width, width};
    return b;
}

static fsdp_block fsdpi_reversed(fsdp_block b) {
    fsdp_block r = {b.dst, b.src, b.width, b.height, b.dst_pitch, b.src_pitch};
    return r;
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
    int world = fsdpi_shards(u), rank = u->desc.info.shard_mesh_rank;
    int64_t numel = part->train.shard_numel;
    for (int i = 0; i < part->num_gather && !part->extended; i++) {
        fsdp_seg s = gather[i];
        fsdpi_add_block(&part->copy_in, fsdpi_run(s.shard, s.full + rank * s.count, s.count));
    }
    for (int i = 0; i < part->chunk_cat.num; i++) { // the layout's blocks, from right to left
        part->chunk_cat.blocks[i] = fsdpi_reversed(part->chunk_cat.blocks[i]);
        fsdpi_add_block(&part->divide, part->chunk_cat.blocks[i]);
    }
    fsdpi_count(&part->chunk_cat);
    fsdpi_count(&part->copy_out);
    for (int i = 0; i < u->desc.num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        if (!p->requires_grad || fsdpi_part_of(u, p) != part) continue;
        if (p->lay.direct)
            fsdpi_add_block(&part->divide,
                            fsdpi_run(p->grad_offset, p->grad_offset, world * p->lay.shard_numel));
        else
            u->layout.pad_rin |= p->lay.shard_dim > 0 &&
                                 p->lay.shape[p->lay.shard_dim] % world != 0;
    }
    fsdpi_add_block(&part->red_out, fsdpi_run(part->reduce, part->train.base, numel));
    fsdpi_add_block(&part->rescale, fsdpi_run(part->train.base, part->train.base, numel));
    if (fsdpi_ranks(u) > 1 &&
        part == &u->layout.parts[u->layout.users_part]) { // the counts of users behind them
        fsdpi_add_block(&part->red_out, fsdpi_run(u->layout.train_numel, u->layout.users_base,
                                                  u->layout.num_train));
        fsdpi_add_block(&part->rescale,
                        fsdpi_run(u->layout.users_base, u->layout.users_base, u->layout.num_train));
    }
}

/* Segments of GRAD stay apart, as parameters lie there as wholes. In RIN, to which all are copied,
   neighbours are one segment, so that a reduction has few: if their counts are multiples of 16
   bytes, which copies and networks are fast with. But where a reduction may read either, by what
   this rank did before, both have the same segments, as those of all ranks have to be equal. */
static void fsdpi_join_segs(const fsdp_unit *u, fsdpi_work *to, const fsdpi_work *from) {
    int64_t unit = 16 / (int64_t)fsdp_dtype_size(u->layout.reduce_dtype);
    int joins = !u->route[0].grads_ahead; // what was written is always copied
    to->num = 0;
    for (int i = 0; i < from->num; i++) {
        fsdp_seg s = from->segs[i], *last = to->segs + (i > 0 ? to->num - 1 : 0);
        if (i > 0 && joins && last->count % unit == 0 && s.count % unit == 0)
            last->count += s.count;
        else to->segs[to->num++] = s;
    }
}

// Segments of the reduction, to the flat block and to the reduce output, with the counts of users.
static void fsdpi_reduce_lists(fsdp_unit *u) {
    fsdpi_work *scatter = u->layout.reduce_scatter, *to_rout = u->layout.to_rout;
    int world = fsdpi_shards(u);
    fsdpi_join_segs(u, &scatter[1], &scatter[0]);
    for (int k = 0; k < 2; k++) {
        to_rout[k].num = scatter[k].num;
        for (int i = 0; i < scatter[k].num; i++) {
            fsdp_seg s = scatter[k].segs[i];
            s.shard = s.full / world; // segment by segment, the full side is `world` times as long
            to_rout[k].segs[i] = s;
        }
        if (fsdpi_ranks(u) > 1 && u->layout.num_train > 0) {
            fsdp_seg counts = {u->layout.users_base, u->layout.users_offset, u->layout.num_train};
            scatter[k].segs[scatter[k].num++] = counts;
            counts.shard = u->layout.train_numel;
            to_rout[k].segs[to_rout[k].num++] = counts;
        }
        fsdpi_count(&scatter[k]);
        fsdpi_count(&to_rout[k]);
    }
    if (fsdpi_ranks(u) > 1 && u->layout.num_train > 0) {
        fsdp_block rows = {0, u->layout.users_offset, u->layout.num_train, world,
                           0, u->layout.num_train};
        fsdpi_add_block(&u->layout.users, rows);
    }
    fsdpi_add_block(&u->layout.partial, fsdpi_run(0, 0, u->layout.reduce_numel / world));
}

// From where the caller writes a gradient to the segments of RIN.
static void fsdpi_sum_list(fsdp_unit *u, fsdpi_part *part) {
    fsdp_layout lay;
    memset(&lay, 0, sizeof lay);
    lay.world = fsdpi_shards(u);
    for (int i = 0; i < u->desc.num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        fsdp_layout_param full = p->lay;
        const fsdp_seg *s = u->layout.to_rout[1].segs;
        int64_t at = part->reduce + full.shard_offset - part->train.base;
        if (!p->requires_grad || fsdpi_part_of(u, p) != part || full.shard_numel == 0) continue;
        while (at >= s->shard + s->count) s++;
        full.full_offset = p->grad_offset;
        if (full.direct) full.shard_dim = 0; // one rank's is whole, whatever it would be cut along
        fsdp_block *blocks = part->sum.blocks + part->sum.num;
        int num = fsdpi_layout_blocks(&lay, &full, at + s->full - s->shard, s->count, blocks);
        for (int k = 0; k < num; k++) fsdpi_add_block(&part->sum, fsdpi_reversed(blocks[k]));
    }
}

// 1/n of each gathered parameter where it lies, for reshard_after_forward = n.
static void fsdpi_slice_lists(fsdp_unit *u) {
    int64_t at = 0, bytes = u->layout.gather_dtype == FSDP_U8;
    for (int i = 0; i < u->desc.num_params && u->desc.slices; i++) {
        const fsdpi_param *p = &u->params[i];
        int64_t size = bytes ? fsdpi_bytes(1, fsdpi_part_of(u, p)->param_dtype) : 1;
        int64_t count = fsdpi_shards(u) / u->desc.slices * p->lay.shard_numel * size;
        int64_t full = p->lay.full_offset * size,
                me = u->desc.info.shard_mesh_rank % u->desc.slices;
        fsdp_seg s = {at, full, count};
        u->layout.slice_gather.segs[u->layout.slice_gather.num++] = s;
        fsdpi_add_block(&u->layout.slice_copy, fsdpi_run(full + me * count, at, count));
        at += count;
    }
    fsdpi_count(&u->layout.slice_gather);
}

// All works of a unit: first those of segments, then those of blocks, part after part, each with
// room for what its list may need. With `at` they are placed there. Returns the bytes of all.
enum { FSDPI_SEG_WORKS = 6, FSDPI_PART_WORKS = 7 };
static size_t fsdpi_place_lists(fsdp_unit *u, char *at) {
    size_t params = (size_t)u->desc.num_params, segs = params + 2 * (size_t)u->layout.num_parts + 1,
           bytes = 0;
    fsdpi_work *with_segs[FSDPI_SEG_WORKS] = {
        &u->layout.all_gather,        &u->layout.slice_gather, &u->layout.reduce_scatter[0],
        &u->layout.reduce_scatter[1], &u->layout.to_rout[0],   &u->layout.to_rout[1]};
    for (int i = 0; i < u->desc.num_params; i++) segs += (size_t)u->params[i].num_strings;
    for (int i = 0; i < FSDPI_SEG_WORKS; i++, bytes += segs * sizeof(fsdp_seg))
        if (at) with_segs[i]->segs = (fsdp_seg *)(void *)(at + bytes);
    fsdpi_work *whole[3] = {&u->layout.slice_copy, &u->layout.partial, &u->layout.users};
    for (int i = 0; i < 3; i++, bytes += (params + 1) * sizeof(fsdp_block))
        if (at) whole[i]->blocks = (fsdp_block *)(void *)(at + bytes);
    for (int k = 0; k < u->layout.num_parts; k++) {
        fsdpi_part *part = &u->layout.parts[k];
        size_t out = (size_t)part->copy_out.num, cat = (size_t)part->chunk_cat.num;
        size_t rooms[FSDPI_PART_WORKS] = {segs, out, cat, cat + params, cat + params, 2, 2};
        fsdpi_work *works[FSDPI_PART_WORKS] = {&part->copy_in, &part->copy_out, &part->chunk_cat,
                                               &part->divide,  &part->sum,      &part->red_out,
                                               &part->rescale};
        for (int i = 0; i < FSDPI_PART_WORKS; bytes += rooms[i++] * sizeof(fsdp_block))
            if (at) works[i]->blocks = (fsdp_block *)(void *)(at + bytes);
    }
    if (at) u->layout.ops[0] = (fsdpi_template *)(void *)(at + bytes);
    return bytes + (size_t)fsdpi_templates_max(u) * sizeof(fsdpi_template);
}

// Host memory that copies of the device read in their stream's order.
static size_t fsdpi_flags_bytes(const fsdp_unit *u) { return 2 * (size_t)u->layout.num_train * 8; }

static fsdp_status fsdpi_flags_new(fsdp_unit *u) {
    fsdp_model *m = u->model;
    fsdp_world *w = m->world;
    size_t bytes = fsdpi_flags_bytes(u);
    void *flags = NULL;
    if (bytes == 0) return FSDP_OK;
    fsdp_status status = w->device_ops->alloc(w->device, FSDP_MEMORY_PINNED, bytes, &flags);
    if (status)
        return fsdp_fail(w, status, "[E303] commit: no %llu bytes of pinned memory for '%s': %s",
                         (unsigned long long)bytes, u->desc.name, fsdpi_device_text(w, status));
    u->usage.flags = (char *)flags;
    u->usage.wide = u->usage.flags + bytes / 2;
    m->host_bytes += (int64_t)bytes;
    return FSDP_OK;
}

static void fsdpi_flags_free(fsdp_unit *u) {
    fsdp_model *m = u->model;
    size_t bytes = fsdpi_flags_bytes(u);
    if (!u->usage.flags) return;
    m->world->device_ops->free(m->world->device, FSDP_MEMORY_PINNED, u->usage.flags, bytes);
    m->host_bytes -= (int64_t)bytes;
    u->usage.flags = u->usage.wide = NULL;
}

static fsdp_status fsdpi_unit_build(fsdp_unit *u, fsdp_layout_param *tmp) {
    fsdp_model *m = u->model;
    char *at = (char *)fsdpi_model_alloc(m, fsdpi_place_lists(u, NULL));
    if (!at)
        return fsdpi_no_memory(m->world, "commit: lists of unit", u->desc.name,
                               fsdpi_place_lists(u, NULL));
    u->layout.lists = at;
    u->usage.in_flight = 0;
    (void)fsdpi_place_lists(u, at);
    fsdp_status status = fsdpi_flags_new(u);
    if (status) return status;
    (void)fsdpi_unit_layout(u, tmp);
    fsdp_seg *gather = u->layout.all_gather.segs;
    for (int k = 0; k < u->layout.num_parts; k++) {
        fsdpi_part *part = &u->layout.parts[k];
        int bytes = u->layout.gather_dtype == FSDP_U8 && !part->extended; // elements -> bytes
        fsdpi_part_lists(u, part, gather);
        for (int i = 0; i < part->num_gather; i++, gather++) {
            gather->full *= bytes ? fsdpi_bytes(1, part->param_dtype) : 1;
            gather->count *= bytes ? fsdpi_bytes(1, part->param_dtype) : 1;
        }
    }
    // Ranks may differ in where the unit's shards begin: tensor parallelism may cut others unevenly
    fsdp_seg *first = u->layout.all_gather.segs;
    u->layout.gather_begin = first < gather ? first->shard : 0;
    for (fsdp_seg *s = first; s < gather; s++)
        if (s->shard < u->layout.gather_begin) u->layout.gather_begin = s->shard;
    for (fsdp_seg *s = first; s < gather; s++) s->shard -= u->layout.gather_begin;
    fsdpi_reduce_lists(u);
    for (int k = 0; k < u->layout.num_parts; k++) fsdpi_sum_list(u, &u->layout.parts[k]);
    fsdpi_slice_lists(u);
    fsdpi_usage_clear(u, FSDPI_USE_FLAGGED);
    fsdpi_count(&u->layout.all_gather);
    return FSDP_OK;
}

// What a unit is before fsdpi_unit_build: sizes measured, no lists.
static void fsdpi_unit_unbuild(fsdp_unit *u) {
    static const fsdpi_work none = {NULL, NULL, 0, 0};
    for (int k = 0; k < u->layout.num_parts; k++) {
        fsdpi_part *part = &u->layout.parts[k];
        part->copy_in = part->divide = part->sum = part->red_out = part->rescale = none;
        part->copy_out.blocks = part->chunk_cat.blocks = NULL;
        part->copy_out.count = part->chunk_cat.count = 0;
    }
    u->layout.all_gather = u->layout.slice_gather = none;
    for (int k = 0; k < 2; k++) u->layout.reduce_scatter[k] = u->layout.to_rout[k] = none;
    u->layout.slice_copy = u->layout.partial = u->layout.users = none;
    u->layout.lists = u->usage.flags = u->usage.wide = NULL;
    memset(u->layout.ops, 0, sizeof u->layout.ops);
    u->layout.pad_rin = 0;
}

// The counts of users lie behind the shard gradients; a copy of them where the host cannot look.
static fsdp_status fsdpi_users_new(fsdp_model *m, fsdp_dtype dtype) {
    fsdpi_flat_block *flat = &m->flats[dtype];
    fsdp_dtype grad = fsdpi_grad_dtype(m, dtype);
    size_t bytes = (size_t)fsdpi_bytes(flat->grad_numel - flat->train_numel, grad);
    if (fsdpi_is_readable(m->world, flat->grad))
        flat->users = flat->grad->ptr + fsdpi_bytes(flat->train_numel, grad);
    else flat->users = (char *)fsdpi_model_alloc(m, bytes + 1);
    if (flat->users) return FSDP_OK;
    return fsdpi_no_memory(m->world, "commit: counts of users", "", bytes + 1);
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
        for (int k = 0; k < m->units[i]->layout.num_parts; k++) {
            const fsdpi_part *part = &m->units[i]->layout.parts[k];
            fsdpi_flat_block *flat = fsdpi_flat_of(m->units[i], part);
            if (flat->numel == 0) flat->numel = 1;
            if (part->num_train && flat->grad_numel == 0) flat->grad_numel = 1;
        }
    }
}

static fsdp_status fsdpi_commit_tables(fsdp_model *m) {
    int most = 1;
    for (int i = 0; i < m->num_units; i++)
        if (m->units[i]->desc.num_params > most) most = m->units[i]->desc.num_params;
    fsdp_layout_param *tmp = (fsdp_layout_param *)fsdpi_model_alloc(m, (size_t)most * sizeof *tmp);
    if (!tmp) return fsdpi_no_memory(m->world, "commit", "", (size_t)most * sizeof *tmp);
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < m->num_units && !status; i++) status = fsdpi_unit_build(m->units[i], tmp);
    fsdpi_model_free(m, tmp);
    const size_t bytes = 2 * (size_t)m->num_params * sizeof *m->norm_blocks;
    m->norm_blocks = (fsdp_block *)fsdpi_model_alloc(m, bytes);
    if (!status && !m->norm_blocks) status = fsdpi_no_memory(m->world, "commit", "", bytes);
    return status;
}

static void fsdpi_uncommit(fsdp_model *m) {
    for (int i = 0; i < m->num_units; i++) {
        fsdpi_model_free(m, m->units[i]->layout.lists);
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

static fsdp_status fsdpi_move_one(fsdp_unit *u, const fsdpi_param *p, fsdp_buf *from,
                                  fsdp_dtype from_dtype, fsdp_buf *to, fsdp_dtype to_dtype) {
    fsdp_block *block = &u->model->norm_blocks[p->ordinal];
    // One rank pads by the dtype.
    int64_t numel = fsdpi_shards(u) == 1 ? p->lay.numel : p->lay.shard_numel;
    fsdpi_work work = {block, NULL, 1, (uint64_t)numel};
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_COPY, FSDP_LABEL_MOVE, FSDP_STREAM_COMPUTE);
    *block = fsdpi_run(p->old_offset, p->lay.shard_offset, numel);
    return fsdpi_emit_work(u->model, &op, from, from_dtype, to, to_dtype, &work);
}

// From the layout before fsdp_set_requires_grad or fsdp_model_cast to the new one.
static fsdp_status fsdpi_move(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < m->num_units; i++) {
        fsdp_unit *u = m->units[i];
        if (u->state.grads.shard == FSDPI_GRADS_NONE)
            u->state.grads.shard = FSDPI_GRADS_ZERO; // new blocks are
        for (int k = 0; k < u->desc.num_params && !status; k++) {
            fsdpi_param *p = &u->params[k];
            const fsdpi_flat_block *flat = &m->flats[p->dtype], *old = &m->flats[p->old_dtype];
            if (!old->old_shard) continue;
            status = fsdpi_move_one(u, p, old->old_shard, p->old_dtype, flat->shard, p->dtype);
            if (!p->requires_grad) *fsdpi_use(u, k) &= (uint8_t)~FSDPI_USE_REDUCED;
            if (!status && (*fsdpi_use(u, k) & FSDPI_USE_REDUCED))
                status = fsdpi_move_one(u, p, old->old_grad, fsdpi_grad_dtype(m, p->old_dtype),
                                        flat->grad, fsdpi_grad_dtype(m, p->dtype));
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
        return fsdp_fail(m->world, FSDP_ERR_INVALID_STATE,
                         "[E201] commit: the model has no units: call fsdp_fully_shard first");
    for (int i = 0; i < m->num_units && !status; i++)
        if (!m->units[i]->layout.num_parts) status = fsdpi_unit_arrange(m->units[i]);
    if (status) return fsdpi_fail_together(m->world, status);
    fsdpi_place_units(m);
    fsdpi_need_blocks(m);
    for (int i = 0; i < m->num_classes; i++) m->classes[i].units = m->classes[i].ahead = 0;
    for (int i = 0; i < m->num_units && !status; i++) status = fsdpi_unit_classes(m->units[i]);
    if (!status) status = fsdpi_commit_tables(m);
    if (!status) status = fsdpi_blocks_new(m);
    if (!status) status = fsdpi_buf_new(m, FSDP_POOL_SCRATCH, sizeof(double), &m->scalar);
    for (int i = 0; i < m->num_units && !status; i++) fsdpi_templates_make(m->units[i]);
    if (!status) status = fsdpi_move(m);
    if (status) {
        fsdpi_uncommit(m);
        return fsdpi_fail_together(m->world, status);
    }
    m->committed = 1;
    m->layout++;
    fsdpi_tell_layout(m);
    return FSDP_OK;
}

/* Take the layout back, because a parameter was frozen, thawed or cast: the next commit makes
   another and moves what the blocks hold. The slots go too, since their sizes change. */
static fsdp_status fsdpi_unsettle(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    fsdpi_drain(m->world);
    for (int i = 0; i < m->num_units && !status; i++) status = fsdpi_do_reshard(m->units[i]);
    if (status) return status;
    fsdpi_drain(m->world);
    for (int i = 0; i < m->num_units; i++)
        for (int k = 0; k < m->units[i]->desc.num_params; k++) {
            fsdpi_param *p = &m->units[i]->params[k];
            p->old_offset = p->lay.shard_offset;
            p->old_dtype = p->dtype;
        }
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
        if (m->num_order == m->cap_order) {
            fsdp_status status = fsdpi_grow(m, (void **)&m->order, m->num_order, &m->cap_order,
                                            sizeof *m->order, "post_forward of unit", u->desc.name);
            if (status) return fsdpi_fail_together(m->world, status);
        }
        m->order[m->num_order].unit = u;
        m->order[m->num_order].previous = u->state.last_order;
        u->state.last_order = m->num_order++;
    }
    u->state.forwards++;
    return FSDP_OK;
}

static fsdp_status fsdpi_do_enter(fsdp_unit *u) {
    u->state.forwards -= u->model->is_last_backward; // else another backward of it may come
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
    {{FSDPI_ALL,         FSDPI_BOTH, 0, FSDPI_KEEP, {NULL}}}, // of an extension
};
// clang-format on

static const char *fsdpi_call_name(int call) {
    static const char *const names[FSDP_CALL_COUNT] = {FSDP_CALL_LIST(FSDPI_TEXT_OF)};
    return names[call];
}

// What the table asks of a unit; open: its parameters can be read.
typedef struct fsdpi_point {
    int training, backward, forwards, open;
} fsdpi_point;

static const fsdpi_row *fsdpi_row_at(const fsdpi_point *at, int call) {
    int phase = at->backward ? FSDPI_IN : FSDPI_OUT;
    for (int i = 0; i < 3; i++) {
        const fsdpi_row *row = &fsdpi_rows[call][i];
        if ((row->from & (1 << at->training)) && (row->phase & phase) &&
            (!row->due || at->forwards > 0) && (call != FSDP_CALL_DATA || at->open))
            return row;
    }
    return NULL;
}
static fsdpi_point fsdpi_point_of(const fsdp_unit *u) {
    fsdpi_point at = {u->state.training, u->model->backward, u->state.forwards,
                      u->state.storage == FSDP_STORAGE_UNSHARDED};
    return at;
}
static const fsdpi_row *fsdpi_lookup(const fsdp_unit *u, int call) {
    fsdpi_point at = fsdpi_point_of(u);
    at.open = 1; // the getter itself asks
    return fsdpi_row_at(&at, call);
}

// The first of the hooks, at most `depth` of them, behind which a call is possible; or -1.
static int fsdpi_missing(const fsdpi_point *from, int call, int depth) {
    static const int hooks[] = {FSDP_CALL_PRE_FORWARD, FSDP_CALL_POST_FORWARD,
                                FSDP_CALL_PRE_BACKWARD, FSDP_CALL_POST_BACKWARD,
                                FSDP_CALL_FINALIZE};
    for (int i = 0; i < 5; i++) {
        fsdpi_point at = *from;
        const fsdpi_row *row = fsdpi_row_at(from, hooks[i]);
        if (!row) continue;
        if (row->next != FSDPI_KEEP) at.training = row->next;
        at.open = i == 0 || i == 2;
        at.forwards += (i == 1 && !from->backward) - (i == 2 && row->due);
        at.backward = i == 2 || (from->backward && i != 4);
        if (fsdpi_row_at(&at, call)) return hooks[i];
        if (depth > 1 && fsdpi_missing(&at, call, depth - 1) >= 0) return hooks[i];
    }
    return -1;
}

// The text of a call in a wrong state asks the table what is missing. The first one of a step is
// logged: in a loop over layers and microbatches the others say no more.
static fsdp_status fsdpi_wrong_call(fsdp_unit *u, int call, const char *what) {
    static const char *const states[] = {"IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"};
    static const char *const storages[] = {"SHARDED", "IN_FLIGHT", "UNSHARDED",
                                           "SHARDED_POST_FORWARD"};
    const fsdpi_point at = fsdpi_point_of(u);
    int first = -1, is_new = !(u->told >> call & 1);
    u->told |= 1u << call;
    for (int depth = 1; depth < 5 && first < 0; depth++) first = fsdpi_missing(&at, call, depth);
    return fsdpi_fail_once(u->model->world, FSDP_ERR_INVALID_STATE, is_new,
                           "[E206] %s: unit '%s' is %s and %s, %s backward, and %d of its forwards "
                           "have not run backward: call fsdp_%s first",
                           what, u->desc.name, states[u->state.training],
                           storages[u->state.storage], u->model->backward ? "inside" : "outside",
                           u->state.forwards, first < 0 ? "model_reset" : fsdpi_call_name(first));
}

static uint8_t fsdpi_next_state(const fsdp_unit *u, const fsdpi_row *row) {
    return row->next == FSDPI_KEEP ? u->state.training : row->next;
}

// Run one row for a unit.
static fsdp_status fsdpi_step(fsdp_unit *u, const fsdpi_row *row) {
    uint8_t next = fsdpi_next_state(u, row);
    u->model->call_state = next;
    for (int i = 0; row->actions[i]; i++) {
        fsdp_status status = row->actions[i](u);
        if (status) return status;
    }
    u->state.training = next;
    return FSDP_OK;
}

// Is the call, by the name of `what`, possible for all units?
static fsdp_status fsdpi_check_units(fsdp_model *m, int call, const char *what) {
    for (int i = 0; i < m->num_units; i++)
        if (!fsdpi_lookup(m->units[i], call)) return fsdpi_wrong_call(m->units[i], call, what);
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

// A change that lasts, which a rehearsal could not undo.
static FSDPI_NOINLINE fsdp_status fsdpi_lasting(fsdp_model *m, const char *what) {
    fsdp_status status = fsdpi_failed(m->world);
    if (status || !m->rehearsing) return status;
    return fsdp_fail(m->world, FSDP_ERR_INVALID_STATE,
                     "[E214] %s: a rehearsal cannot undo it: call it before or afterwards", what);
}

// A marker for those who see records, before the ops of a public call.
static FSDPI_NOINLINE fsdp_status fsdpi_show_call(fsdp_model *m, const fsdp_unit *u, int call,
                                                  const char *what) {
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_HOOK, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);
    if (!u) op.what = what;
    op.count = (uint64_t)call;
    return fsdpi_show(m, &op);
}

static inline fsdp_status fsdpi_announce(fsdp_model *m, const fsdp_unit *u, int call,
                                         const char *what, uint8_t state) {
    m->call_state = state;
    return m->watch & FSDPI_OPS ? fsdpi_show_call(m, u, call, what) : FSDP_OK;
}

// A model-wide call: NULL, a failed world, not yet committed; the table; the marker; the rows.
// Extensions are told of those with rows, which write shards or their gradients.
static fsdp_status fsdpi_model_call(fsdp_model *m, int call, int run) {
    if (!m) return fsdpi_null(NULL, fsdpi_call_name(call), "model");
    fsdp_status status = fsdpi_commit(m);
    const char *what = fsdpi_call_name(call);
    if (!status && run && (m->watch & FSDPI_CALLS)) (void)fsdpi_answered(m, NULL, call, &status);
    if (!status) status = fsdpi_check_units(m, call, what);
    if (!status) status = fsdpi_announce(m, NULL, call, what, FSDP_STATE_IDLE);
    return status || !run ? status : fsdpi_run_units(m, call);
}

// Finalize reports the first failure again.
static FSDPI_NOINLINE fsdp_status fsdpi_hook_failed(fsdp_model *m, fsdp_status status) {
    if (m->hook_status) return status;
    snprintf(m->hook_error, sizeof m->hook_error, "%s", fsdp_last_error(m->world));
    return m->hook_status = status;
}

// The end of a call: the caller's work comes next.
static inline fsdp_status fsdpi_remember(fsdp_model *m, fsdp_status status) {
    if (!status && m->world->order[FSDP_STREAM_COMPUTE].due)
        status = fsdpi_record_point(m->world, FSDP_STREAM_COMPUTE);
    return status ? fsdpi_hook_failed(m, status) : FSDP_OK;
}

static fsdp_status fsdpi_unit_call(fsdp_unit *u, int call) {
    if (!u) return fsdpi_null(NULL, fsdpi_call_name(call), "unit");
    fsdp_model *m = u->model;
    fsdp_status status = fsdpi_failed(m->world);
    if (status) return status;
    if (!m->committed) status = fsdpi_commit(m);
    if (status) return fsdpi_hook_failed(m, status);
    if ((m->watch & FSDPI_CALLS) && fsdpi_answered(m, u, call, &status))
        return fsdpi_remember(m, status);
    const fsdpi_row *row = fsdpi_lookup(u, call);
    if (!row) return fsdpi_hook_failed(m, fsdpi_wrong_call(u, call, fsdpi_call_name(call)));
    status = fsdpi_announce(m, u, call, NULL, fsdpi_next_state(u, row));
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
FSDP_API fsdp_status fsdp_unshard(fsdp_unit *u) { return fsdpi_unit_call(u, FSDP_CALL_UNSHARD); }
FSDP_API fsdp_status fsdp_wait(fsdp_unit *unit) { return fsdpi_unit_call(unit, FSDP_CALL_WAIT); }
FSDP_API fsdp_status fsdp_reshard(fsdp_unit *u) { return fsdpi_unit_call(u, FSDP_CALL_RESHARD); }

static int fsdpi_getter_ok(fsdp_unit *u, int call) {
    const fsdpi_row *row = fsdpi_lookup(u, call);
    if (row && (call != FSDP_CALL_DATA || u->state.storage == FSDP_STORAGE_UNSHARDED)) return 1;
    (void)fsdpi_hook_failed(u->model, fsdpi_wrong_call(u, call, fsdpi_call_name(call)));
    return 0;
}

static fsdp_status fsdpi_param_call(fsdp_unit *u, int index, int call) {
    if (!u) return fsdpi_null(NULL, fsdpi_call_name(call), "unit");
    if (index < 0 || index >= u->desc.num_params)
        return fsdpi_bad(u->model->world,
                         "[E170] %s: unit '%s' has no parameter %d, expected 0..%d",
                         fsdpi_call_name(call), u->desc.name, index, u->desc.num_params - 1);
    return FSDP_OK;
}

/* ==== core/step.h ===========================================================================
   the end of a step: finalize, zero_grad, reset */

// The caller's stream will write shards: it comes behind gathers under way, which read them.
static fsdp_status fsdpi_shards_writable(fsdp_model *m) {
    fsdp_status status = fsdpi_failed(m->world);
    for (int i = 0; i < m->num_units && !status; i++) {
        fsdp_unit *u = m->units[i];
        if (u->state.storage == FSDP_STORAGE_IN_FLIGHT && u->state.slot[FSDP_POOL_GATHER])
            status = fsdpi_emit_use(m, u, FSDP_LABEL_GATHER, u->state.slot[FSDP_POOL_GATHER]);
    }
    return status;
}

// Shards are as the caller's stream has left them: later gathers come after.
static void fsdpi_shards_written(fsdp_model *m) {
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++)
        if (m->flats[d].shard)
            fsdpi_mark(m->world, FSDP_STREAM_COMPUTE, &m->flats[d].shard->ready, m->flats[d].shard);
}

// The caller's stream waits for all shard gradients; what has none is zero; who used what is read.
static fsdp_status fsdpi_grads_ready(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < m->num_units && !status; i++) {
        fsdp_unit *u = m->units[i];
        if (u->layout.num_train == 0 || u->state.grads.shard != FSDPI_GRADS_NONE) continue;
        for (int k = 0; k < u->layout.num_parts && !status; k++) {
            const fsdpi_part *part = &u->layout.parts[k];
            if (part->num_train)
                status = fsdpi_emit_fill(
                    m, u, FSDP_LABEL_FINAL, FSDP_STREAM_COMPUTE, fsdpi_flat_of(u, part)->grad,
                    fsdpi_grad_dtype(m, part->dtype), part->train.base, part->train.shard_numel, 0);
        }
        u->state.grads.shard = FSDPI_GRADS_ZERO;
    }
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++) {
        if (m->flats[d].grad) status = fsdpi_emit_use(m, NULL, FSDP_LABEL_FINAL, m->flats[d].grad);
        if (!status && m->flats[d].grad && m->grad_hooks) // they may have written shards
            status = fsdpi_emit_use(m, NULL, FSDP_LABEL_FINAL, m->flats[d].shard);
    }
    if (status) return status;
    int asks = 0;
    for (int i = 0; i < m->num_units; i++)
        if (m->units[i]->usage.counted && fsdpi_ranks(m->units[i]) > 1)
            asks |= fsdpi_usage_known(m->units[i]);
    int waits = asks || m->desc.cpu_offload || m->world->mode != FSDPI_NATIVE;
    if (waits) status = fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
    if (!status && asks) status = fsdpi_usage_read(m);
    for (int i = 0; i < m->num_units && !status; i++) {
        fsdp_unit *u = m->units[i];
        if (!u->usage.counted) continue;
        if (asks) fsdpi_usage_learn(u);
        if (waits && !u->state.slot[FSDP_POOL_ROUT]) u->usage.in_flight = 0; // their copy is done
        u->usage.counted = 0;
    }
    return status;
}

static void fsdpi_forget_forwards(fsdp_model *m) {
    m->num_order = 0;
    for (int i = 0; i < m->num_units; i++) {
        m->units[i]->state.forwards = 0;
        m->units[i]->state.last_order = -1;
    }
}

static fsdp_status fsdpi_finalize(fsdp_model *m) {
    fsdp_status status = fsdpi_run_units(m, FSDP_CALL_FINALIZE);
    if (!status) status = fsdpi_grads_ready(m);
    if (status) return status;
    for (int i = 0; i < m->num_units; i++) m->units[i]->told = 0;
    m->backward = 0;
    m->step++;
    fsdpi_pools_rewind(m);
    if (m->is_last_backward) fsdpi_forget_forwards(m);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_params_changed(fsdp_model *model) {
    fsdp_status status = fsdpi_model_call(model, FSDP_CALL_PARAMS_CHANGED, 1);
    if (!status) fsdpi_shards_written(model);
    return model ? fsdpi_remember(model, status) : status;
}

FSDP_API fsdp_status fsdp_finalize_backward(fsdp_model *model) {
    fsdp_status status = model ? fsdpi_failed(model->world) : FSDP_OK;
    if (status) return status;
    if (model && (model->watch & FSDPI_CALLS) &&
        fsdpi_answered(model, NULL, FSDP_CALL_FINALIZE, &status))
        return status;
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
        if (u->layout.slot_bytes > bytes) bytes = u->layout.slot_bytes;
        if (u->layout.grad_bytes > bytes) bytes = u->layout.grad_bytes;
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
    if (unit->route[0].gather == FSDPI_GATHER_ALIAS)
        return fsdpi_flat_of(unit, unit->layout.parts)->shard->ptr +
               fsdpi_bytes(p->lay.shard_offset, p->dtype);
    return unit->state.slot[FSDP_POOL_GATHER]->ptr +
           fsdpi_bytes(p->lay.full_offset, fsdpi_part_of(unit, p)->param_dtype);
}

FSDP_API void *fsdp_grad(fsdp_unit *unit, int index) {
    if (fsdpi_param_call(unit, index, FSDP_CALL_GRAD)) return NULL;
    const fsdpi_param *p = &unit->params[index];
    if (!p->requires_grad) return NULL;
    if (fsdpi_failed(unit->model->world)) return fsdpi_undefined(unit->model);
    if (!fsdpi_getter_ok(unit, FSDP_CALL_GRAD)) return NULL;
    *fsdpi_use(unit, index) |= FSDPI_USE_USED | FSDPI_USE_WRITTEN;
    if (unit->state.grads.newest == FSDPI_GRADS_IN_SHARD)
        return fsdpi_flat_of(unit, unit->layout.parts)->grad->ptr +
               fsdpi_bytes(p->lay.shard_offset, p->dtype);
    return unit->state.slot[FSDP_POOL_GRAD]->ptr +
           fsdpi_bytes(p->grad_offset, fsdpi_part_of(unit, p)->param_dtype);
}

FSDP_API fsdp_status fsdp_zero_grad(fsdp_model *model) {
    fsdp_status status = fsdpi_model_call(model, FSDP_CALL_ZERO_GRAD, 1);
    return model ? fsdpi_remember(model, status) : status;
}

FSDP_API fsdp_status fsdp_model_reset(fsdp_model *model) {
    if (!model) return fsdpi_null(NULL, "model_reset", "model");
    fsdp_status status = fsdpi_failed(model->world);
    if (status) return status;
    if ((model->watch & FSDPI_CALLS) && fsdpi_answered(model, NULL, FSDP_CALL_RESET, &status))
        return status;
    fsdpi_drain(model->world);
    if (model->layout == 0) return FSDP_OK; // no unit has begun anything; an extension may have
    status = fsdpi_announce(model, NULL, FSDP_CALL_RESET, "model_reset", FSDP_STATE_IDLE);
    if (!status) status = fsdpi_run_units(model, FSDP_CALL_RESET);
    fsdpi_forget_forwards(model);
    model->backward = 0;
    model->hook_status = FSDP_OK;
    fsdpi_pools_rewind(model);
    return status;
}

/* ==== core/norm.h ===========================================================================
   the norm of all gradients, and clipping */

// Blocks of the gradients of one dtype; for the norm those that count: where all ranks of the mesh
// add up, the first replica speaks for the others.
static int fsdpi_grad_blocks(fsdp_model *m, fsdp_dtype dtype, int norm, fsdp_block *out) {
    int num = 0;
    for (int i = 0; i < m->num_units; i++) {
        const fsdp_unit *u = m->units[i];
        int silent = u->state.grads.shard != FSDPI_GRADS_REDUCED ||
                     (norm && m->mixed && u->desc.info.replicate_mesh_rank > 0);
        for (int k = 0; k < u->desc.num_params && !silent; k++) {
            const fsdpi_param *p = &u->params[k];
            int64_t at = p->lay.shard_offset;
            if ((*fsdpi_use(u, k) & FSDPI_USE_REDUCED) && p->dtype == dtype)
                out[num++] = fsdpi_run(at, at, p->lay.local_numel);
        }
    }
    return num;
}

// Sum (or maximum) of m->scalar over one group.
static fsdp_status fsdpi_norm_reduce(fsdp_model *m, uint64_t given, fsdp_comm *comm, int size) {
    fsdp_op op = fsdpi_op(m, NULL, FSDP_OP_ALL_REDUCE, FSDP_LABEL_CLIP, FSDP_STREAM_REDUCE);
    fsdpi_work one = {NULL, NULL, 0, 1};
    int is_max = !fsdpi_is_finite(m->norm_type);
    fsdp_dtype dtype = is_max ? FSDP_I64 : FSDP_F64; // magnitudes are in the order of their bits
    if (size == 1) return FSDP_OK;
    op.redop = is_max ? FSDP_MAX : FSDP_SUM;
    op.in_place = 1, op.given = given;
    op.comm = comm;
    op.group_size = size;
    return fsdpi_emit_work(m, &op, m->scalar, dtype, m->scalar, dtype, &one);
}

// Of all gradients: the sum of |g|^p, or the maximum, to m->scalar. Nobody waits.
static fsdp_status fsdpi_norm(fsdp_model *m, uint64_t given) {
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
        status = fsdpi_norm_reduce(m, given, m->shard_reduce_comm, m->info.shard_mesh_size);
    else if (!status && fsdpi_mesh_numel(mesh) == m->world->size)
        status = fsdpi_norm_reduce(m, given, m->world->reduce_comm, m->world->size);
    else
        for (int d = 0; d < mesh->ndim && !status; d++)
            status = fsdpi_norm_reduce(m, given, mesh->reduce_comm[d], mesh->shape[d]);
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

// Is it known which gradients are copies of each other on all ranks that share the parameters?
static fsdp_status fsdpi_norm_check(const fsdp_model *m) {
    const fsdp_mesh *mesh = m->info.mesh;
    int numel = fsdpi_mesh_numel(mesh);
    if (numel < mesh->root_numel)
        return fsdp_fail(
            m->world, FSDP_ERR_UNSUPPORTED,
            "[E210] clip_grads: the model's mesh is a slice (%d of %d ranks), and the library does "
            "not know what the others hold: give fsdp_model_desc.mesh_info on the whole mesh",
            numel, mesh->root_numel);
    if (m->outside)
        return fsdp_fail(m->world, FSDP_ERR_UNSUPPORTED,
                         "[E211] clip_grads: the model's mesh lacks ranks of unit '%s': give "
                         "fsdp_model_desc a mesh of all ranks that share units",
                         m->outside->desc.name);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_clip_grads(fsdp_model *model, const fsdp_clip_desc *desc, double *norm) {
    fsdp_clip_desc d;
    double total = 0;
    fsdp_world *w = model ? model->world : NULL;
    fsdp_status status = w ? fsdpi_failed(w) : FSDP_OK;
    if (!status && (!w || !desc)) status = fsdpi_null(w, "clip_grads", "world or desc");
    if (!status) status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_clip_desc");
    if (status) return status;
    if (!fsdpi_is_nan(d.norm_type) && d.norm_type == 0) d.norm_type = 2;
    if (!(d.max_norm > 0) || fsdpi_is_nan(d.max_norm) || !(d.norm_type > 0) ||
        fsdpi_is_nan(d.norm_type))
        return fsdpi_bad(w, "[E160] clip_grads: max_norm is %g, norm_type is %g: expected both > 0",
                         d.max_norm, d.norm_type);
    status = fsdpi_norm_check(model);
    if (!status) status = fsdpi_model_call(model, FSDP_CALL_CLIP, 0);
    if (status) return status;
    // Ranks compare this in the norm's collective, and replicas that it leaves out in the next one.
    const double settings[3] = {d.max_norm, d.norm_type, (double)d.error_if_nonfinite};
    uint64_t given = 1, bits[3];
    memcpy(bits, settings, sizeof bits);
    for (int k = 0; k < 3; k++) given = fsdpi_hash(given, bits[k]);
    model->given = fsdpi_hash(model->given, given);
    model->norm_type = d.norm_type;
    status = fsdpi_norm(model, given);
    if (status) model->norm_type = 0;
    if (!status && d.error_if_nonfinite) status = fsdp_grad_norm(model, &total);
    int is_bad = !status && !fsdpi_is_finite(total);
    if (!status && !is_bad && fsdpi_is_finite(d.max_norm)) status = fsdpi_clip(model, d.max_norm);
    if (!status && norm) status = fsdp_grad_norm(model, norm);
    if (status || !is_bad) return status;
    return fsdp_fail(w, FSDP_ERR_CORRUPT,
                     "[E212] clip_grads: the norm is %g, so nothing is scaled: look for infinite "
                     "gradients, or set error_if_nonfinite to 0",
                     total);
}

FSDP_API fsdp_status fsdp_grad_norm(fsdp_model *model, double *norm) {
    double total = 0;
    fsdp_world *w = model ? model->world : NULL;
    fsdp_status status = w ? fsdpi_failed(w) : FSDP_OK;
    if (!status && (!w || !norm)) status = fsdpi_null(w, "grad_norm", "world or norm");
    if (!status && !(model->norm_type > 0))
        status = fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                           "[E202] grad_norm: there is no norm yet: call fsdp_clip_grads first");
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
        for (int k = 0; k < u->desc.num_params; k++) {
            // In the widest dtype; at least an element of every rank.
            int64_t bytes = fsdpi_min(fsdpi_shards(u) * u->params[k].lay.shard_numel * 8,
                                      m->desc.fill_bytes);
            if (bytes < 8 * fsdpi_shards(u)) bytes = 8 * fsdpi_shards(u);
            if (bytes > largest) largest = bytes;
        }
    }
    return largest;
}

// The scratch buffer, and a copy of it where the host cannot read that.
static fsdp_status fsdpi_full_scratch(fsdp_model *m) {
    fsdp_status status = fsdpi_buf_new(m, FSDP_POOL_SCRATCH, (size_t)fsdpi_full_bytes(m),
                                       &m->full_scratch);
    if (status || fsdpi_is_host(m->world)) return status;
    m->full_copy = (char *)fsdpi_model_alloc(m, m->full_scratch->bytes);
    return m->full_copy ? FSDP_OK
                        : fsdpi_no_memory(m->world, "param_full", "", m->full_scratch->bytes);
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
    fsdp_status status = m->full_scratch ? FSDP_OK : fsdpi_full_scratch(m);
    if (status) return fsdpi_fail_together(m->world, status);
    int64_t step = (int64_t)(m->full_scratch->bytes / ((size_t)world * size));
    const char *pieces = m->full_copy ? m->full_copy : m->full_scratch->ptr;
    for (int64_t at = 0; at < p->lay.shard_numel && !status; at += step) {
        int64_t num = fsdpi_min(step, p->lay.shard_numel - at);
        fsdp_seg seg = {0, 0, num};
        m->full_seg = seg; // a worker may read it after a failure has ended this call
        m->full_block = fsdpi_run(p->lay.shard_offset + at, u->desc.info.shard_mesh_rank * num,
                                  num);
        fsdp_op in = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_FULL, FSDP_STREAM_GATHER);
        fsdp_op op = fsdpi_op(m, u, FSDP_OP_ALL_GATHER, FSDP_LABEL_FULL, FSDP_STREAM_GATHER);
        fsdpi_work own = {&m->full_block, NULL, 1, (uint64_t)num},
                   all = {NULL, &m->full_seg, 1, (uint64_t)num};
        op.in_place = 1; // peers may not be able to read the shards
        op.comm = u->desc.info.shard_comm;
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
    return model ? fsdpi_commit(model) : fsdpi_null(NULL, "model_commit", "model");
}

static void fsdpi_view(const fsdp_unit *u, int index, fsdp_param_view *v) {
    const fsdpi_param *p = &u->params[index];
    const fsdpi_flat_block *flat = fsdpi_flat_of(u, fsdpi_part_of(u, p));
    *v = fsdpi_view_static(u, index);
    if ((*fsdpi_use(u, index) & FSDPI_USE_REDUCED) && !u->model->backward) // for any W, R
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
    if (!unit || !out) return fsdpi_null(NULL, "param_view_get", "unit or out");
    fsdp_status status = fsdpi_shards_readable(unit->model);
    if (status) return status;
    if (index < 0 || index >= unit->desc.num_params)
        return fsdpi_bad(unit->model->world,
                         "[E167] param_view_get: unit '%s' has no parameter %d, expected 0..%d",
                         unit->desc.name, index, unit->desc.num_params - 1);
    fsdpi_view(unit, index, out);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_param_at(fsdp_model *model, int ordinal, fsdp_param_view *out) {
    if (!model || !out) return fsdpi_null(NULL, "param_at", "model or out");
    for (int i = 0; i < model->num_units; i++) {
        fsdp_unit *u = model->units[i];
        int first = u->params[0].ordinal;
        if (ordinal >= first && ordinal < first + u->desc.num_params)
            return fsdp_param_view_get(u, ordinal - first, out);
    }
    return fsdpi_bad(model->world, "[E168] param_at: the model has no parameter %d, expected 0..%d",
                     ordinal, model->num_params - 1);
}

FSDP_API int fsdp_next_param(fsdp_model *model, fsdp_param_view *view) {
    if (!model || !view) return 0;
    fsdp_unit *u = view->unit;
    int index = u ? view->index + 1 : 0;
    if (!u && model->num_units == 0) return 0;
    if (!u) u = model->units[0];
    if (index == u->desc.num_params) {
        if (u->desc.index + 1 == model->num_units) return 0;
        u = model->units[u->desc.index + 1];
        index = 0;
    }
    return fsdp_param_view_get(u, index, view) == FSDP_OK;
}

FSDP_API int64_t fsdp_view_index(const fsdp_param_view *view, int64_t k) {
    int64_t index = 0, stride = 1;
    if (!view) return -1;
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
    if (!in_place && !staged) return fsdpi_no_memory(m->world, "init_params", "", (size_t)most);
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
    if (!status && !fn) status = fsdpi_null_of(model, "init_params", "fn");
    if (!status) status = fsdpi_load(model);
    if (status) return status;
    fsdp_param_view v = FSDP_ZERO;
    while (!status && fsdp_next_param(model, &v))
        if (v.numel > 0) status = fsdpi_init_param(model, &v, fn, user);
    if (!status) fsdpi_shards_written(model);
    return fsdpi_fail_together(model->world, status);
}

FSDP_API fsdp_status fsdp_model_flat(fsdp_model *model, fsdp_dtype dtype, fsdp_flat *out) {
    if (!model || !out) return fsdpi_null_of(model, "model_flat", "model or out");
    if (!fsdp_dtype_size(dtype))
        return fsdpi_bad(model->world, "[E169] model_flat: dtype is %d, expected FSDP_*", dtype);
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
    if (!full && lay->numel > 0) return fsdpi_null_of(unit->model, "param_load", "full");
    status = fsdpi_load(unit->model);
    if (status) return status;
    fsdp_param_view v;
    fsdpi_view(unit, index, &v);
    int64_t outer = fsdpi_numel(lay->shape, 0, lay->shard_dim),
            inner = fsdpi_numel(lay->shape, lay->shard_dim + 1, lay->ndim);
    int64_t width = fsdpi_bytes(lay->rows * inner, v.dtype);
    int64_t from = fsdpi_bytes(lay->start * inner, v.dtype);
    int64_t pitch = fsdpi_bytes(lay->shape[lay->shard_dim] * inner, v.dtype);
    fsdp_block rows = {from, 0, width, outer, pitch, width};
    status = fsdpi_transfer_rows(unit->model->world, v.shard, full, &rows);
    if (!status) fsdpi_shards_written(unit->model);
    return status;
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
        return fsdp_fail(unit->model->world, FSDP_ERR_INVALID_STATE,
                         "[E204] param_full_grad: '%s' of unit '%s' is frozen: it has no gradient",
                         p->name, unit->desc.name);
    status = fsdpi_model_call(unit->model, FSDP_CALL_FULL, 0);
    if (status) return status;
    if (unit->state.grads.shard == FSDPI_GRADS_REDUCED)
        return fsdpi_full(unit, p, fsdpi_flat_of(unit, fsdpi_part_of(unit, p))->grad, dtype,
                          (char *)full);
    if (full) memset(full, 0, (size_t)fsdpi_bytes(p->lay.numel, dtype));
    return FSDP_OK;
}

/* ==== core/predict.h ========================================================================
   memory: what is allocated, what will be, and the model in words */

// The steps of a prediction: units that never reshard are open around those that do.
static fsdp_status fsdpi_rehearse(fsdp_model *m) {
    static const uint8_t calls[] = {FSDP_CALL_PRE_FORWARD, FSDP_CALL_POST_FORWARD,
                                    FSDP_CALL_PRE_BACKWARD, FSDP_CALL_POST_BACKWARD};
    fsdp_status status = FSDP_OK;
    int reshards = 0;
    for (int i = 0; i < m->num_units; i++)
        reshards |= m->units[i]->options.reshard_after_forward != FSDP_RESHARD_NEVER;
    for (int back = 0; back < 2; back++) {
        const uint8_t *call = calls + 2 * back;
        for (int pass = 0; pass < 3; pass++) { // open those around, run others, close those around
            for (int i = 0; i < m->num_units && !status; i++) {
                fsdp_unit *u = m->units[back ? m->num_units - 1 - i : i];
                int around = u->options.reshard_after_forward == FSDP_RESHARD_NEVER && reshards &&
                             m->desc.reshard_after_forward != FSDP_RESHARD_NEVER;
                if (around != (pass != 1)) continue;
                if (pass < 2) status = fsdpi_step(u, fsdpi_lookup(u, call[0]));
                for (int k = 0; back && k < u->desc.num_params; k++)
                    *fsdpi_use(u, k) |= FSDPI_USE_USED | FSDPI_USE_WRITTEN;
                if (pass > 0 && !status) status = fsdpi_step(u, fsdpi_lookup(u, call[1]));
            }
        }
    }
    return status ? status : fsdpi_finalize(m);
}

// A copy of a unit as it was made, with its own marks of use. NULL: no memory.
static fsdp_unit *fsdpi_unit_copy(fsdp_model *dry, const fsdp_unit *u) {
    size_t parts = (size_t)u->desc.num_params * sizeof *u->layout.parts,
           params = fsdpi_params_bytes(u);
    fsdp_unit *copy = (fsdp_unit *)fsdpi_model_alloc(dry, sizeof *copy + parts + params);
    if (!copy) return NULL;
    *copy = *u;
    copy->model = dry;
    copy->params = (fsdpi_param *)(void *)(copy + 1);
    copy->layout.parts = (fsdpi_part *)(void *)((char *)copy->params + params);
    memcpy(copy->params, u->params, params);
    memcpy(copy->layout.parts, u->layout.parts, parts);
    for (int k = 0; k < copy->layout.num_parts; k++)
        if (copy->layout.parts[k].extended)
            copy->layout.parts[k].extended = copy->params +
                                             (copy->layout.parts[k].extended - u->params);
    fsdpi_unit_unbuild(copy);
    memset(&copy->usage, 0, sizeof copy->usage);
    copy->usage.use = (uint64_t *)(void *)(copy->params + u->desc.num_params);
    copy->state = fsdpi_state_new();
    copy->options.sync = copy->options.all_reduce = copy->options.reshard_after_backward = 1;
    fsdpi_unit_route(copy);
    return copy;
}

// A device without memory: all that is asked of it while no record runs.
static fsdp_status fsdpi_none_alloc(fsdp_device *device, int kind, size_t size, void **ptr) {
    (void)device, (void)kind, (void)size;
    *ptr = (void *)(uintptr_t)FSDPI_ALIGN; // an address that nobody reads or writes
    return FSDP_OK;
}
static void fsdpi_none_free(fsdp_device *device, int kind, void *ptr, size_t size) {
    (void)device, (void)kind, (void)ptr, (void)size;
}
static fsdp_status fsdpi_none_event(fsdp_device *device, void **native) {
    (void)device;
    *native = NULL;
    return FSDP_OK;
}

// An extension that takes every record: none runs.
static int fsdpi_take_all(void *user, fsdp_model *model, fsdp_op *op) {
    (void)user, (void)model, (void)op;
    return 1;
}

// A copy of a model in a copy of its world, where nothing runs and no memory is had: so it walks
// the same schedule, and counts.
typedef struct fsdpi_rehearsal {
    fsdp_model model; // the first member
    fsdp_world world;
    uint32_t state; // of the world
    fsdp_device_ops device;
    fsdpi_attached taker;
} fsdpi_rehearsal;

static void fsdpi_dry_free(fsdp_model *dry) {
    if (!dry) return;
    for (int i = 0; i < dry->num_units; i++) {
        fsdpi_model_free(dry, dry->units[i]->usage.flags);
        dry->units[i]->usage.flags = NULL;
    }
    fsdpi_uncommit(dry);
    fsdpi_model_free_buffers(dry);
    for (int i = 0; i < dry->num_units; i++) fsdpi_model_free(dry, dry->units[i]);
    fsdpi_model_free(dry, dry->units);
    fsdp_allocator allocator = dry->world->boot.allocator;
    fsdpi_free(&allocator, dry);
}

static void fsdpi_dry_world(fsdpi_rehearsal *r, const fsdp_world *w) {
    r->world.boot = w->boot;
    r->world.rank = w->rank;
    r->world.size = 1; // a failure here is of this rank alone
    r->world.log_level = w->log_level;
    r->world.caps = w->caps;
    r->world.mode = w->mode;
    r->world.state = &r->state;
    r->state = 1;
    r->world.device = w->device;
    r->world.device_ops = &r->device;
    r->device.flags = w->device_ops->flags;
    r->device.alloc = fsdpi_none_alloc;
    r->device.free = fsdpi_none_free;
    r->device.event = fsdpi_none_event;
    r->taker.e.op = fsdpi_take_all;
    r->model.world = &r->world;
    r->model.attached = &r->taker;
    r->model.watch = FSDPI_OPS;
}

// Flags of use are written by the host: they are the only memory that a step touches.
static fsdp_status fsdpi_dry_flags(fsdp_model *dry) {
    for (int i = 0; i < dry->num_units; i++) dry->units[i]->usage.flags = NULL;
    for (int i = 0; i < dry->num_units; i++) {
        fsdp_unit *u = dry->units[i];
        size_t bytes = fsdpi_flags_bytes(u);
        u->usage.flags = bytes ? (char *)fsdpi_model_alloc(dry, bytes) : NULL;
        if (bytes && !u->usage.flags) return FSDP_ERR_OUT_OF_MEMORY;
        u->usage.wide = bytes ? u->usage.flags + bytes / 2 : NULL;
    }
    return FSDP_OK;
}

// A copy of the model that has run a step and counted the memory. *out: to be freed in any case.
static fsdp_status fsdpi_dry_run(const fsdp_model *m, fsdp_model **out) {
    fsdp_world *w = m->world;
    if (m->num_units == 0)
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E205] prediction: the model has no units: call fsdp_fully_shard first");
    fsdpi_rehearsal *r = (fsdpi_rehearsal *)fsdpi_alloc(&w->boot.allocator, sizeof *r);
    if (!r) return fsdpi_no_memory(w, "prediction", "", sizeof *r);
    fsdp_model *dry = *out = &r->model;
    fsdpi_dry_world(r, w);
    dry->desc = m->desc;
    dry->info = m->info;
    dry->grad_enabled = dry->is_last_backward = 1;
    dry->num_params = m->num_params;
    dry->units = (fsdp_unit **)fsdpi_model_alloc(dry, (size_t)m->num_units * sizeof *dry->units);
    fsdp_status status = fsdpi_failed(w);
    if (!dry->units) status = FSDP_ERR_OUT_OF_MEMORY;
    for (int i = 0; !status && i < m->num_units; i++) {
        dry->units[i] = fsdpi_unit_copy(dry, m->units[i]);
        if (dry->units[i]) dry->num_units++;
        else status = FSDP_ERR_OUT_OF_MEMORY;
    }
    if (!status) status = fsdpi_commit(dry);
    if (!status) status = fsdpi_dry_flags(dry);
    if (!status) status = fsdpi_rehearse(dry);
    return status ? fsdp_fail(w, status, "[E306] predict: %s", fsdp_status_text(status)) : FSDP_OK;
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
        if (at < 0) status = FSDP_ERR_OUT_OF_MEMORY;
        while (!status && m->classes[at].count < wanted->count)
            status = fsdpi_class_add(m, &m->classes[at]);
    }
    fsdpi_dry_free(dry);
    return fsdpi_fail_together(m->world, status);
}

FSDP_API fsdp_status fsdp_model_reserve(fsdp_model *model) {
    return model ? fsdpi_reserve(model) : fsdpi_null(NULL, "model_reserve", "model");
}

// Bytes of the full parameters of a unit and of their gradients.
static int64_t fsdpi_unsharded(const fsdp_unit *u) {
    int64_t bytes = 0;
    for (int i = 0; i < u->desc.num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        bytes += fsdpi_bytes(p->lay.numel, p->dtype);
        if (p->requires_grad)
            bytes += fsdpi_bytes(p->lay.numel, fsdpi_grad_dtype(u->model, p->dtype));
    }
    return bytes;
}

static void fsdpi_memory(const fsdp_model *m, fsdp_memory *out) {
    memset(out, 0, sizeof *out);
    for (int pool = 0; pool < FSDP_POOL_MAX; pool++) {
        out->pool_bytes[pool] = m->pool_bytes[pool];
        out->pool_slots[pool] = m->pool_slots[pool];
        out->total_bytes += m->pool_bytes[pool];
    }
    for (int i = 0; i < m->num_units; i++) out->unsharded_bytes += fsdpi_unsharded(m->units[i]);
    out->host_bytes = m->host_bytes;
}

FSDP_API fsdp_status fsdp_model_memory(const fsdp_model *model, fsdp_memory *out) {
    if (!model || !out) return fsdpi_null(NULL, "model_memory", "model or out");
    fsdpi_memory(model, out);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_unit_memory(const fsdp_unit *unit, fsdp_memory *out) {
    if (!unit || !out) return fsdpi_null(NULL, "unit_memory", "unit or out");
    const fsdp_buf *held[FSDP_POOL_COUNT] = {NULL};
    held[FSDP_POOL_GATHER] = unit->state.slot[FSDP_POOL_GATHER];
    held[FSDP_POOL_SLICE] = unit->state.slot[FSDP_POOL_SLICE];
    held[FSDP_POOL_GRAD] = unit->state.slot[FSDP_POOL_GRAD];
    held[FSDP_POOL_RIN] = unit->state.slot[FSDP_POOL_RIN];
    held[FSDP_POOL_ROUT] = unit->state.slot[FSDP_POOL_ROUT];
    memset(out, 0, sizeof *out);
    for (int k = 0; k < unit->layout.num_parts; k++) {
        const fsdpi_part *part = &unit->layout.parts[k];
        fsdp_dtype grad = fsdpi_grad_dtype(unit->model, part->dtype);
        out->pool_bytes[FSDP_POOL_SHARD] += fsdpi_bytes(
            part->train.shard_numel + part->frozen.shard_numel, part->dtype);
        out->pool_bytes[FSDP_POOL_SGRAD] += fsdpi_bytes(part->train.shard_numel, grad);
    }
    for (int pool = 0; pool < FSDP_POOL_COUNT; pool++) {
        int slot = pool >= FSDP_POOL_GATHER && pool <= FSDP_POOL_ROUT ? unit->layout.classes[pool]
                                                                      : -1;
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

// "    gradients: written, keep in the slot; reduced: chunk_cat in the slot, flags of use, ..."
static void fsdpi_describe_steps(fsdpi_text *t, const char *title, const uint8_t *step) {
    static const char *const texts[FSDPI_STEP_COUNT] = {FSDPI_STEP_LIST(FSDPI_TEXT_OF)};
    fsdpi_say(t, "%s", title);
    if (!*step) fsdpi_say(t, " not now");
    for (const char *comma = " "; *step; step++, comma = ", ")
        if (*step != FSDPI_STEP_DONE) fsdpi_say(t, "%s%s", comma, texts[*step]);
}

static void fsdpi_describe_route(fsdpi_text *t, const fsdp_unit *u) {
    static const char *const gathers[] = {"nothing: the full parameters are the shards",
                                          "the shards as they are",
                                          "this rank's part of the slot, which is filled before"};
    const fsdpi_route *r = &u->route[u->state.grads.shard == FSDPI_GRADS_REDUCED];
    fsdpi_say(t, "    gathered: %s\n", gathers[r->gather]);
    if (u->layout.num_train == 0) return;
    if (r->write_shard) {
        fsdpi_say(t, "    gradients: written into the shard gradient\n");
        return;
    }
    fsdpi_describe_steps(t, "    gradients:", r->collect);
    fsdpi_describe_steps(t, "\n    reduction:", r->reduce);
    fsdpi_say(t, "\n");
}

FSDP_API size_t fsdp_model_describe(const fsdp_model *model, char *buf, size_t cap) {
    fsdpi_text t = {buf, buf ? cap : 0, 0};
    fsdp_memory mem;
    if (buf && cap) buf[0] = 0;
    if (!model) return 0;
    fsdpi_memory(model, &mem);
    fsdpi_say(&t, "model: %d units, %d parameters, rank %d of %d; collectives run ",
              model->num_units, model->num_params, model->world->rank, model->world->size);
    fsdpi_say_mode(&t, model->world);
    fsdpi_say(&t, "\n");
    for (int i = 0; i < model->num_units; i++) {
        const fsdp_unit *u = model->units[i];
        fsdp_memory own;
        (void)fsdp_unit_memory(u, &own);
        fsdpi_say(&t,
                  "  unit %d '%s': %d shards x %d replicas, gathered as %s, reduced in %s, "
                  "reshard_after_forward %d; bytes: shard %lld, gradient %lld, gathered %lld, "
                  "unsharded %lld\n",
                  i, u->desc.name, fsdpi_shards(u), fsdpi_replicas(u),
                  fsdp_dtype_name(u->layout.gather_dtype), fsdp_dtype_name(u->layout.reduce_dtype),
                  u->options.reshard_after_forward, (long long)own.pool_bytes[FSDP_POOL_SHARD],
                  (long long)own.pool_bytes[FSDP_POOL_SGRAD],
                  (long long)own.pool_bytes[FSDP_POOL_GATHER], (long long)own.unsharded_bytes);
        fsdpi_describe_route(&t, u);
        for (int k = 0; k < u->desc.num_params; k++) fsdpi_describe_param(&t, u, &u->params[k]);
    }
    fsdpi_say(&t, "  memory:");
    for (int pool = 0; pool < FSDP_POOL_MAX; pool++)
        if (mem.pool_bytes[pool])
            fsdpi_say(&t, " %s %lld in %d,", fsdp_model_pool_name(model, pool),
                      (long long)mem.pool_bytes[pool], mem.pool_slots[pool]);
    fsdpi_say(&t, " total %lld bytes\n", (long long)mem.total_bytes);
    return t.used;
}

FSDP_API fsdp_status fsdp_model_predict(const fsdp_model *model, fsdp_memory *out) {
    fsdp_model *dry = NULL;
    if (!model || !out) return fsdpi_null(NULL, "model_predict", "model or out");
    fsdp_status status = fsdpi_dry_run(model, &dry);
    if (!status) {
        fsdpi_memory(dry, out);
        out->host_bytes = model->host_bytes;
    }
    fsdpi_dry_free(dry);
    return status;
}

FSDP_API fsdp_status fsdp_model_counters(const fsdp_model *model, fsdp_counters *out) {
    if (!model || !out) return fsdpi_null(NULL, "model_counters", "model or out");
    *out = model->counters;
    return FSDP_OK;
}

/* ==== core/options.h ========================================================================
   setters */

enum { // what has been set, beside offsets in fsdpi_options
    FSDPI_SET_ENABLED = 1 << 16,
    FSDPI_SET_LAST,
    FSDPI_SET_HOOKS,
    FSDPI_SET_TRAINS = 1 << 20, // + index of the parameter
    FSDPI_SET_DTYPE = 1 << 24
};

/* fsdp_model.settings is a sum over all options that differ from those at creation, so that it does
   not depend on the way that led there. unit: -1 for the model. */
static void fsdpi_setting(fsdp_model *m, int unit, size_t field, uint64_t was, uint64_t is) {
    uint64_t place = fsdpi_hash((uint64_t)(unit + 1) << 32, field); // the hash adds the two
    m->settings += fsdpi_hash(place, is) - fsdpi_hash(place, was);
}

// A setter for one unit or all (NULL): which ones; none may be between pre and post.
static fsdp_status fsdpi_set(fsdp_model *m, fsdp_unit *u, const char *what, int *first, int *end) {
    if (!m) return fsdpi_null(NULL, what, "model");
    fsdp_status status = fsdpi_failed(m->world);
    if (status) return status;
    if (u && u->model != m)
        return fsdpi_bad(m->world, "[E161] %s: the unit belongs to another model", what);
    *first = u ? u->desc.index : 0;
    *end = u ? u->desc.index + 1 : m->num_units;
    for (int i = *first; i < *end; i++)
        if (!fsdpi_lookup(m->units[i], FSDP_CALL_SET))
            return fsdpi_hook_failed(m, fsdpi_wrong_call(m->units[i], FSDP_CALL_SET, what));
    if (m->watch & FSDPI_CALLS) (void)fsdpi_answered(m, u, FSDP_CALL_SET, &status);
    return status;
}

FSDP_API fsdp_status fsdp_set_grad_enabled(fsdp_model *model, int enabled) {
    if (!model) return fsdpi_null(NULL, "set_grad_enabled", "model");
    fsdpi_setting(model, -1, FSDPI_SET_ENABLED, (uint64_t)model->grad_enabled, enabled != 0);
    model->grad_enabled = enabled != 0;
    return fsdpi_failed(model->world);
}

FSDP_API int fsdp_is_grad_enabled(const fsdp_model *model) { return model && model->grad_enabled; }

FSDP_API fsdp_status fsdp_set_is_last_backward(fsdp_model *model, int is_last) {
    if (!model) return fsdpi_null(NULL, "set_is_last_backward", "model");
    fsdpi_setting(model, -1, FSDPI_SET_LAST, (uint64_t)model->is_last_backward, is_last != 0);
    model->is_last_backward = is_last != 0;
    return fsdpi_failed(model->world);
}

static fsdp_status fsdpi_set_option(fsdp_model *m, fsdp_unit *u, const char *what, size_t field,
                                    int value) {
    int i = 0, end = 0;
    fsdp_status status = fsdpi_set(m, u, what, &i, &end);
    for (; !status && i < end; i++) {
        uint8_t *option = (uint8_t *)&m->units[i]->options + field;
        fsdpi_setting(m, i, field, *option, value != 0);
        *option = value != 0;
        fsdpi_unit_route(m->units[i]);
    }
    return status;
}

FSDP_API fsdp_status fsdp_set_requires_gradient_sync(fsdp_model *model, fsdp_unit *unit, int sync) {
    const char *what = "set_requires_gradient_sync";
    fsdp_status status = fsdpi_set_option(model, unit, what, offsetof(fsdpi_options, all_reduce),
                                          sync);
    return status ? status
                  : fsdpi_set_option(model, unit, what, offsetof(fsdpi_options, sync), sync);
}
FSDP_API fsdp_status fsdp_set_requires_all_reduce(fsdp_model *model, fsdp_unit *unit,
                                                  int required) {
    return fsdpi_set_option(model, unit, "set_requires_all_reduce",
                            offsetof(fsdpi_options, all_reduce), required);
}
FSDP_API fsdp_status fsdp_set_reshard_after_backward(fsdp_model *model, fsdp_unit *unit,
                                                     int reshard) {
    return fsdpi_set_option(model, unit, "set_reshard_after_backward",
                            offsetof(fsdpi_options, reshard_after_backward), reshard);
}
FSDP_API fsdp_status fsdp_set_unshard_in_backward(fsdp_model *model, fsdp_unit *unit, int unshard) {
    return fsdpi_set_option(model, unit, "set_unshard_in_backward",
                            offsetof(fsdpi_options, unshard_in_backward), unshard);
}
FSDP_API fsdp_status fsdp_set_reduce_scatter_unused_params(fsdp_model *model, fsdp_unit *unit,
                                                           int reduce) {
    return fsdpi_set_option(model, unit, "set_reduce_scatter_unused_params",
                            offsetof(fsdpi_options, reduce_unused), reduce);
}
FSDP_API fsdp_status fsdp_set_reshard_after_forward(fsdp_model *model, fsdp_unit *unit, int mode) {
    int i = 0, end = 0;
    fsdp_status status = fsdpi_set(model, unit, "set_reshard_after_forward", &i, &end);
    if (!status && mode != FSDP_RESHARD_ALWAYS && mode != FSDP_RESHARD_NEVER)
        return fsdpi_bad(model->world,
                         "[E162] set_reshard_after_forward: mode is %d, expected "
                         "FSDP_RESHARD_ALWAYS or FSDP_RESHARD_NEVER (an int: in fsdp_unit_desc)",
                         mode);
    for (; !status && i < end; i++) {
        int *option = &model->units[i]->options.reshard_after_forward;
        fsdpi_setting(model, i, offsetof(fsdpi_options, reshard_after_forward), (uint64_t)*option,
                      (uint64_t)mode);
        *option = mode;
    }
    return status;
}

FSDP_API fsdp_status fsdp_set_gradient_divide_factor(fsdp_model *model, fsdp_unit *unit,
                                                     double factor) {
    int i = 0, end = 0;
    fsdp_status status = fsdpi_set(model, unit, "set_gradient_divide_factor", &i, &end);
    if (!status && (!(factor >= 0) || !fsdpi_is_finite(factor)))
        return fsdpi_bad(
            model->world,
            "[E163] set_gradient_divide_factor: factor is %g, expected finite and >= 0", factor);
    for (; !status && i < end; i++) {
        uint64_t was, is;
        memcpy(&was, &model->units[i]->options.divide_factor, sizeof was);
        memcpy(&is, &factor, sizeof is);
        fsdpi_setting(model, i, offsetof(fsdpi_options, divide_factor), was, is);
        model->units[i]->options.divide_factor = factor;
        fsdpi_unit_route(model->units[i]);
    }
    return status;
}

static uint64_t fsdpi_list_hash(const int32_t *list, int count) {
    uint64_t h = (uint64_t)count;
    for (int i = 0; i < count; i++) h = fsdpi_hash(h, (uint64_t)list[i]);
    return h;
}

// An empty list leaves the old one's memory where it is: a rehearsal brings it back.
static fsdp_status fsdpi_set_prefetch(fsdp_unit *u, int backward, fsdp_unit *const *targets,
                                      int count, const char *what) {
    int first, end;
    fsdp_status status = fsdpi_set(u ? u->model : NULL, u, what, &first, &end);
    if (status) return status;
    fsdp_model *m = u->model;
    for (int i = 0; i < count; i++)
        if (!targets || !targets[i] || targets[i]->model != m)
            return fsdpi_bad(m->world, "[E164] %s: target %d is not a unit of this model", what, i);
    if (count < 0) return fsdpi_bad(m->world, "[E165] %s: count is %d, expected >= 0", what, count);
    if (count && m->rehearsing)
        return fsdpi_bad(m->world, "[E173] %s: a rehearsal can only take lists away: count is %d",
                         what, count);
    int32_t **at = &u->options.prefetch[backward];
    int32_t *num = &u->options.num_prefetch[backward];
    int32_t *list = count ? (int32_t *)fsdpi_model_alloc(m, (size_t)count * sizeof *list) : NULL;
    if (count && !list) return fsdpi_no_memory(m->world, what, "", (size_t)count * sizeof *list);
    for (int i = 0; i < count; i++) list[i] = targets[i]->desc.index;
    fsdpi_setting(m, u->desc.index, offsetof(fsdpi_options, prefetch) + (size_t)backward,
                  fsdpi_list_hash(*at, *num), fsdpi_list_hash(list, count));
    if (count) fsdpi_model_free(m, *at);
    if (count) *at = list;
    *num = count;
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

// May the model be laid out anew? All units are idle, and none holds what only its layout knows.
static fsdp_status fsdpi_may_move(fsdp_model *m, const char *what) {
    fsdp_status status = fsdpi_lasting(m, what);
    if (!status) status = fsdpi_remember(m, fsdpi_check_units(m, FSDP_CALL_REQUIRES_GRAD, what));
    for (int i = 0; i < m->num_units && !status; i++)
        if (m->units[i]->state.slot[FSDP_POOL_GRAD] || m->units[i]->state.slot[FSDP_POOL_RIN] ||
            m->units[i]->state.slot[FSDP_POOL_ROUT])
            return fsdp_fail(m->world, FSDP_ERR_INVALID_STATE,
                             "[E203] %s: unit '%s' holds gradients that are not reduced: run a "
                             "backward with sync, or call fsdp_model_reset",
                             what, m->units[i]->desc.name);
    return status;
}

FSDP_API fsdp_status fsdp_set_requires_grad(fsdp_unit *unit, int index, int requires_grad) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_REQUIRES_GRAD);
    if (!status) status = fsdpi_may_move(unit->model, fsdpi_call_name(FSDP_CALL_REQUIRES_GRAD));
    if (status) return status;
    fsdp_model *m = unit->model;
    fsdpi_param *p = &unit->params[index];
    if (requires_grad && !fsdp_dtype_is_float(p->dtype))
        return fsdpi_bad(m->world,
                         "[E166] set_requires_grad: parameter '%s' of unit '%s' is %s: only "
                         "floating parameters can require a gradient",
                         p->name, unit->desc.name, fsdp_dtype_name(p->dtype));
    if (p->requires_grad == (requires_grad != 0)) return FSDP_OK;
    if (m->committed) status = fsdpi_unsettle(m);
    if (status) return status;
    p->requires_grad = requires_grad != 0;
    status = fsdpi_unit_arrange(unit);
    if (status) p->requires_grad = !p->requires_grad;
    if (status) return status;
    fsdpi_setting(m, unit->desc.index, FSDPI_SET_TRAINS + (size_t)index, !requires_grad,
                  requires_grad != 0);
    *fsdpi_use(unit, index) &= (uint8_t)~FSDPI_USE_REDUCED;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_model_cast(fsdp_model *model, fsdp_dtype dtype) {
    static const char *const what = "model_cast";
    if (!model) return fsdpi_null(NULL, what, "model");
    if (!fsdp_dtype_is_float(dtype))
        return fsdpi_bad(model->world, "[E171] %s: dtype is %d, expected a floating dtype", what,
                         dtype);
    fsdp_status status = fsdpi_may_move(model, what);
    for (int i = 0; i < model->num_units && !status; i++)
        for (int k = 0; k < model->units[i]->desc.num_params; k++)
            if (model->units[i]->params[k].extension.sizes)
                return fsdp_fail(model->world, FSDP_ERR_UNSUPPORTED,
                                 "[E213] %s: the gather extension of '%s' in unit '%s' knows one "
                                 "dtype: give the dtype in fsdp_param_desc",
                                 what, model->units[i]->params[k].name, model->units[i]->desc.name);
    if (!status && model->committed) status = fsdpi_unsettle(model);
    for (int i = 0; i < model->num_units && !status; i++) {
        fsdp_unit *u = model->units[i];
        for (int k = 0; k < u->desc.num_params; k++)
            if (fsdp_dtype_is_float(u->params[k].dtype)) {
                fsdpi_setting(model, i, FSDPI_SET_DTYPE + (size_t)k, (uint64_t)u->params[k].dtype,
                              (uint64_t)dtype);
                u->params[k].dtype = dtype;
            }
        status = fsdpi_unit_arrange(u);
    }
    return status;
}

// Hooks may be read by records under way. had, has: whether there is one.
static fsdp_status fsdpi_set_hook(fsdp_unit *u, const char *what, size_t which, int had, int has) {
    int first, end;
    fsdp_status status = fsdpi_set(u ? u->model : NULL, u, what, &first, &end);
    if (status) return status;
    fsdpi_setting(u->model, u->desc.index, FSDPI_SET_HOOKS + which, (uint64_t)had, (uint64_t)has);
    fsdpi_drain(u->model->world);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_set_all_reduce_hook(fsdp_unit *unit, fsdp_all_reduce_hook hook,
                                              void *user) {
    fsdp_status status = fsdpi_set_hook(unit, "set_all_reduce_hook", 3,
                                        unit && unit->options.all_reduce_hook, hook != NULL);
    if (status) return status;
    unit->options.all_reduce_hook = hook;
    unit->options.all_reduce_user = user;
    fsdpi_unit_route(unit);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_set_post_accumulate_hook(fsdp_unit *unit, int index, fsdp_grad_hook hook,
                                                   void *user) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_SET);
    if (!status)
        status = fsdpi_set_hook(unit, "set_post_accumulate_hook", 4 + (size_t)index,
                                unit->params[index].grad_hook != NULL, hook != NULL);
    if (status) return status;
    unit->model->grad_hooks |= hook != NULL;
    unit->params[index].grad_hook = hook;
    unit->params[index].grad_hook_user = user;
    return FSDP_OK;
}

static fsdp_status fsdpi_set_custom(fsdp_unit *u, const char *what, int which,
                                    fsdp_custom_comm hook, void *user) {
    fsdp_status status = fsdpi_set_hook(u, what, (size_t)which, u && u->options.custom[which],
                                        hook != NULL);
    if (status) return status;
    u->options.custom[which] = hook;
    u->options.custom_user[which] = user;
    fsdpi_unit_route(u);
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
FSDP_API fsdp_status fsdp_set_custom_all_reduce(fsdp_unit *unit, fsdp_custom_comm hook,
                                                void *user) {
    return fsdpi_set_custom(unit, "set_custom_all_reduce", 2, hook, user);
}

static const void *fsdpi_cast_activation(void *dst, fsdp_dtype to, const void *src,
                                         fsdp_dtype *dtype, int64_t count) {
    const void *out = fsdp_cast_floating(dst, to, src, *dtype, count);
    if (to && fsdp_dtype_is_float(*dtype)) *dtype = to;
    return out;
}

FSDP_API const void *fsdp_cast_forward_input(const fsdp_unit *unit, void *dst, const void *src,
                                             fsdp_dtype *dtype, int64_t count) {
    return fsdpi_cast_activation(
        dst, unit->desc.keep_inputs ? FSDP_DTYPE_KEEP : unit->desc.policy_dtype, src, dtype, count);
}

FSDP_API const void *fsdp_cast_forward_output(const fsdp_unit *unit, void *dst, const void *src,
                                              fsdp_dtype *dtype, int64_t count) {
    return fsdpi_cast_activation(dst, unit->desc.output_dtype, src, dtype, count);
}

/* ==== core/model.h ==========================================================================
   a model begins and ends */

// Take an extension out and end it. Nothing of it is under way.
static void fsdpi_detach(fsdp_model *m, fsdpi_attached **at) {
    fsdpi_attached *gone = *at;
    *at = gone->next;
    fsdpi_watch(m);
    if (gone->e.destroy) gone->e.destroy(gone->e.user);
    fsdpi_model_free(m, gone);
}

static void fsdpi_model_close(fsdp_model *m) {
    fsdp_world *w = m->world;
    while (m->attached) {
        fsdpi_attached **last = &m->attached;
        while ((*last)->next) last = &(*last)->next;
        fsdpi_detach(m, last);
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
        status = fsdpi_bad(w, "[E130] model_create: grad_dtype is %d, expected floating or KEEP",
                           d->grad_dtype);
    if (status) return status;
    if (d->reshard_after_forward < FSDP_RESHARD_NEVER ||
        d->implicit_prefetch < FSDP_PREFETCH_NEVER || d->implicit_prefetch > FSDP_PREFETCH_ALWAYS)
        return fsdpi_bad(w,
                         "[E131] model_create: reshard_after_forward is %d, implicit_prefetch %d: "
                         "expected FSDP_RESHARD_* or n >= 2, and FSDP_PREFETCH_*",
                         d->reshard_after_forward, d->implicit_prefetch);
    if (d->direct_min < 0 || d->fill_bytes < 0 || d->prefetch_bytes < 0)
        return fsdpi_bad(w,
                         "[E132] model_create: direct_min %lld, fill_bytes %lld, prefetch_bytes "
                         "%lld: expected numbers >= 0",
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
    if (!world || !model) return fsdpi_null(world, "model_create", "world or model");
    *model = NULL;
    fsdp_status status = fsdpi_failed(world);
    if (!status) status = fsdp_desc_read(world, &d, desc, sizeof d, "fsdp_model_desc");
    if (!status) status = fsdpi_model_check(world, &d);
    if (status) return status;
    fsdp_model *m = (fsdp_model *)fsdpi_alloc(&world->boot.allocator, sizeof *m);
    if (!m) return fsdpi_no_memory(world, "model_create", "", sizeof *m);
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
    m->mixed = m->info.shard_mesh_size * m->info.replicate_mesh_size !=
               fsdpi_mesh_numel(m->info.mesh);
    if (m->info.shard_mesh_dim >= 0)
        m->shard_reduce_comm = m->info.mesh->reduce_comm[m->info.shard_mesh_dim];
    m->next = world->models;
    world->models = m;
    *model = m;
    return FSDP_OK;
}

FSDP_API void fsdp_model_destroy(fsdp_model *model) {
    if (!model || fsdpi_is_child(model->world)) return;
    fsdp_world *w = model->world;
    fsdpi_drain(w);
    fsdpi_timeline_end_all(w);
    for (fsdp_model **at = &w->models; *at; at = &(*at)->next) {
        if (*at != model) continue;
        *at = model->next;
        break;
    }
    fsdpi_model_close(model);
}

/* ==== core/means.h ==========================================================================
   what extensions attach and call: records, buffers, copies, groups, states */

FSDP_API fsdp_status fsdp_attach(fsdp_model *model, const fsdp_extension *extension) {
    fsdp_extension e;
    if (!model || !extension) return fsdpi_null_of(model, "attach", "model or extension");
    fsdp_world *w = model->world;
    fsdp_status status = fsdpi_lasting(model, "attach");
    if (!status) status = fsdp_desc_read(w, &e, extension, sizeof e, "fsdp_extension");
    if (status) return status;
    if (e.call || e.op || e.buffer || e.ran)
        status = fsdpi_check_units(model, FSDP_CALL_PARAMS_CHANGED, "attach");
    if (status) return fsdpi_remember(model, status);
    e.size = 0;
    if (!e.name) e.name = "extension";
    if (e.ran || (model->watch & FSDPI_TIMES)) fsdpi_drain(w); // worker threads read who is told
    if (e.ran && w->mode == FSDPI_NATIVE) status = fsdpi_timeline_open(w);
    if (status)
        return fsdp_fail(w, status,
                         "[E901] attach: '%s' has `ran`, but device %s cannot measure times: %s",
                         e.name, w->device_ops->name, fsdpi_device_text(w, status));
    fsdpi_attached *a = (fsdpi_attached *)fsdpi_model_alloc(model, sizeof *a), **last;
    if (!a) return fsdpi_no_memory(w, "attach: extension", e.name, sizeof *a);
    a->e = e;
    for (last = &model->attached; *last;) last = &(*last)->next;
    *last = a;
    fsdpi_watch(model);
    return FSDP_OK;
}

// A unit's slot that is of no pool: an extension gave it. NULL: there is none.
static const fsdp_unit *fsdpi_lodger(const fsdp_model *m) {
    for (int i = 0; i < m->num_units; i++)
        for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++) {
            const fsdp_buf *slot = m->units[i]->state.slot[pool];
            const fsdpi_class *c = slot ? &m->classes[m->units[i]->layout.classes[pool]] : NULL;
            int own = !slot;
            for (int k = 0; !own && k < c->count; k++) own = c->slots[k] == slot;
            if (!own) return m->units[i];
        }
    return NULL;
}

FSDP_API fsdp_status fsdp_detach(fsdp_model *model, const fsdp_extension *extension) {
    fsdp_extension e;
    if (!model || !extension) return fsdpi_null_of(model, "detach", "model or extension");
    fsdp_world *w = model->world;
    fsdp_status status = fsdpi_is_child(w) ? fsdpi_failed(w) : FSDP_OK;
    if (!status) status = fsdp_desc_read(w, &e, extension, sizeof e, "fsdp_extension");
    if (!status && model->rehearsing) status = fsdpi_lasting(model, "detach");
    if (status) return status;
    e.size = 0;
    if (!e.name) e.name = "extension";
    for (fsdpi_attached **at = &model->attached; *at; at = &(*at)->next) {
        if (memcmp(&(*at)->e, &e, sizeof e) != 0) continue;
        const fsdp_unit *lodger = e.buffer ? fsdpi_lodger(model) : NULL;
        if (model->asking || lodger)
            return fsdp_fail(
                w, FSDP_ERR_INVALID_STATE,
                "[E902] detach: '%s' %s%s: detach it between steps, not in an extension", e.name,
                lodger ? "may own a slot of unit " : "is in use", lodger ? lodger->desc.name : "");
        if (model->watch & FSDPI_TIMES) {
            fsdpi_drain(w);
            fsdpi_timeline_end_all(w);
        }
        fsdpi_detach(model, at);
        return FSDP_OK;
    }
    return fsdpi_bad(w, "[E903] detach: '%s' with these contents is not attached to this model",
                     e.name);
}

FSDP_API void *fsdp_find_extension(const fsdp_model *model, const char *name) {
    for (const fsdpi_attached *a = model && name ? model->attached : NULL; a; a = a->next)
        if (strcmp(a->e.name, name) == 0) return a->e.user;
    return NULL;
}

FSDP_API fsdp_status fsdp_next_state(fsdp_model *model, fsdp_state_item *item) {
    if (!model || !item) return fsdpi_null_of(model, "next_state", "model or item");
    fsdp_status status = fsdpi_commit(model);
    int which = item->at[0], index = item->name ? item->at[1] + 1 : 0;
    fsdpi_attached *a = model->attached;
    for (int i = 0; a && i < which; i++) a = a->next;
    memset(item, 0, sizeof *item);
    for (; a && !status; a = a->next, which++, index = 0) {
        if (!a->e.state) continue;
        item->ordinal = -1;
        status = a->e.state(a->e.user, model, index, item);
        if (status || !item->name) continue;
        item->extension = a->e.name;
        item->at[0] = which;
        item->at[1] = index;
        fsdp_param_view v;
        if (item->sharded) status = fsdp_param_at(model, item->ordinal, &v);
        if (status || !item->sharded) return status;
        item->ndim = v.ndim;
        memcpy(item->shape, v.shape, sizeof item->shape);
        item->numel = v.numel;
        return FSDP_OK;
    }
    item->name = NULL;
    return status;
}

FSDP_API fsdp_status fsdp_state_written(fsdp_model *model) {
    if (!model) return fsdpi_null(NULL, "state_written", "model");
    fsdp_status status = fsdpi_failed(model->world);
    for (fsdpi_attached *a = model->attached; a && !status; a = a->next)
        if (a->e.state) status = a->e.state(a->e.user, model, 0, NULL);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Owns: records of extensions.

static int fsdpi_register(fsdp_model *m, fsdpi_names *names, int most, const char *name,
                          const char *what) {
    size_t length = name ? strlen(name) : 0;
    for (int i = 0; i < names->count && length; i++)
        if (strcmp(names->text[i], name) == 0) return i;
    if (length && length < FSDPI_NAME && names->count < most) {
        memcpy(names->text[names->count], name, length + 1);
        return names->count++;
    }
    (void)fsdpi_bad(m->world, "[E904] %s_register: name '%s', expected 1..%d bytes and <= %d names",
                    what, name ? name : "", FSDPI_NAME - 1, most);
    return -1;
}

FSDP_API int fsdp_label_register(fsdp_model *model, const char *name) {
    int i = model ? fsdpi_register(model, &model->labels, FSDPI_NAMES, name, "label") : -1;
    return i < 0 ? -1 : FSDP_LABEL_COUNT + i;
}

FSDP_API int fsdp_pool_register(fsdp_model *model, const char *name) {
    int i = model ? fsdpi_register(model, &model->pools, (int)FSDP_POOL_MAX - (int)FSDP_POOL_COUNT,
                                   name, "pool")
                  : -1;
    return i < 0 ? -1 : FSDP_POOL_COUNT + i;
}

FSDP_API void fsdp_op_init(fsdp_op *op, const fsdp_model *model, const fsdp_unit *unit, int kind,
                           int label, int stream) {
    if (op && model) *op = fsdpi_op(model, unit, kind, label, stream);
}

static int fsdpi_is_collective(int k) { return k >= FSDP_OP_ALL_GATHER && k <= FSDP_OP_RECV; }

// What is wrong with an extension's record, in words; NULL: nothing.
static const char *fsdpi_op_fault(const fsdp_model *m, const fsdp_op *op) {
    const void *src = op->src_ptr, *dst = op->dst_ptr;
    int32_t size;
    int reads = op->kind == FSDP_OP_COPY || op->kind == FSDP_OP_NORM;
    if (op->kind >= FSDP_OP_COUNT) return "kind is not one of FSDP_OP_*";
    if (op->stream >= FSDP_STREAM_COUNT) return "stream is not one of FSDP_STREAM_*";
    if (op->label >= FSDP_LABEL_COUNT + m->labels.count) return "label is not registered";
    if (op->model != m) return "model is not this model: make the record with fsdp_op_init";
    if (!op->what) return "what is NULL, expected the name of a unit or a call";
    if (op->kind == FSDP_OP_CALL && !op->call) return "call is NULL";
    if (op->kind == FSDP_OP_UPDATE && !op->list) return "list is NULL, expected an fsdp_update";
    if (op->kind == FSDP_OP_UPDATE && !op->call && !m->world->device_ops->update)
        return "call is NULL, and the device has no function for updates";
    if ((reads || op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER) &&
        (!op->list || !op->list_count))
        return "list is empty";
    if (reads && (!src || !dst)) return "src or dst is NULL";
    if (reads && (!fsdp_dtype_size(op->dtype) || !fsdp_dtype_size(op->out_dtype)))
        return "dtype or out_dtype is not one of FSDP_F32, ...";
    if (op->kind == FSDP_OP_ZERO && !dst) return "dst is NULL";
    if (op->kind == FSDP_OP_ZERO && op->dst &&
        ((const char *)dst < op->dst->ptr ||
         (uint64_t)((const char *)dst - op->dst->ptr) + op->bytes > op->dst->bytes))
        return "dst_ptr and bytes are not inside of dst";
    if (!fsdpi_is_collective(op->kind)) return NULL;
    if (!op->comm) return "comm is NULL: a group of one rank has no collectives";
    if (op->group_size < 2) return "group_size is less than 2";
    int in_place = op->kind == FSDP_OP_ALL_REDUCE || op->kind == FSDP_OP_BROADCAST;
    if (!fsdp_dtype_size(op->dtype)) return "dtype is not one of FSDP_F32, ...";
    if (op->root < 0 || op->root >= op->group_size) return "root is not a member of the group";
    if (op->kind != FSDP_OP_RECV && !(op->kind == FSDP_OP_ALL_GATHER && op->in_place) && !src)
        return "src is NULL";
    if (op->kind != FSDP_OP_SEND && !dst) return "dst is NULL";
    if (in_place && src != dst) return "src and dst differ, but this operation works in place";
    if (!fsdpi_comm_number(m->world, op->comm, &size))
        return "comm is not a group of this world: get one from fsdp_mesh_comm";
    return op->group_size != size ? "group_size is not the size of comm's group" : NULL;
}

// What a marker says happens: to slots that an extension gives to units.
static void fsdpi_do_marker(fsdp_model *m, const fsdp_op *op) {
    if (op->kind == FSDP_OP_ACQUIRE && op->dst) op->dst->held = 1;
    if (op->kind == FSDP_OP_WROTE && op->dst)
        fsdpi_mark(m->world, FSDP_STREAM_COMPUTE, &op->dst->ready, NULL);
    if (op->kind != FSDP_OP_RELEASE || !op->src) return;
    op->src->held = 0;
    op->src->released = ++m->release_seq;
    fsdpi_mark_released(m->world, op->stream, op->src);
}

FSDP_API fsdp_status fsdp_emit(fsdp_model *model, fsdp_op *op) {
    if (!model || !op) return fsdpi_null_of(model, "emit", "model or op");
    fsdp_world *w = model->world;
    if (op->src && !op->src_ptr) op->src_ptr = op->src->ptr;
    if (op->dst && !op->dst_ptr) op->dst_ptr = op->dst->ptr;
    const char *fault = fsdpi_op_fault(model, op);
    if (fault)
        return fsdpi_bad(w, "[E905] emit: %s (%s) of '%s': %s", fsdp_op_name(op->kind),
                         fsdp_op_label(op), op->what ? op->what : "", fault);
    const int is_marker = op->kind >= FSDP_OP_HOOK;
    if (is_marker) fsdpi_do_marker(model, op);
    if (is_marker) return fsdpi_show(model, op);
    if (op->kind == FSDP_OP_COPY && !op->bytes)
        op->bytes = op->count * fsdp_dtype_size(op->out_dtype);
    if (fsdpi_is_collective(op->kind)) {
        if (!(w->caps.kinds & 1u << op->kind))
            return fsdp_fail(w, FSDP_ERR_UNSUPPORTED, "[E906] emit: backend %s does not have %s",
                             w->comm_ops->name, fsdp_op_name(op->kind));
        if (!op->bytes)
            op->bytes = fsdpi_coll_bytes(op->kind, (uint64_t)op->group_size,
                                         op->count * fsdp_dtype_size(op->dtype));
    }
    fsdp_status status = fsdpi_failed(w);
    if (!status && op->stream == FSDP_STREAM_EXTENSION) status = fsdpi_extension_stream(w);
    if (status) return fsdpi_fail_together(w, status);
    return fsdpi_emit(model, op);
}

// Nobody looks, and nothing is ordered by events: a marker says only who holds a slot.
static fsdp_status fsdpi_emit_alone(fsdp_model *m, fsdp_op *ops, int count) {
    fsdp_status status = fsdpi_failed(m->world);
    for (fsdp_op *op = ops; op < ops + count && !status; op++) {
        if (op->kind >= FSDP_OP_HOOK) {
            if (op->kind == FSDP_OP_ACQUIRE && op->dst) op->dst->held = 1;
            if (op->kind == FSDP_OP_RELEASE && op->src) op->src->held = 0;
            continue;
        }
        op->timed = 0;
        op->step = m->step;
        op->given = m->given;
        op->seq = ++m->seq;
        m->counters.calls[op->kind]++;
        m->counters.bytes[op->kind] += op->bytes;
        status = fsdpi_execute(m->world, op, NULL);
    }
    return status;
}

FSDP_API fsdp_status fsdp_emit_again(fsdp_model *model, fsdp_op *ops, int count) {
    if (!model || (count > 0 && !ops)) return fsdpi_null_of(model, "emit_again", "model or ops");
    if (model->world->mode == FSDPI_INLINE && !(model->watch & FSDPI_RECORDS))
        return fsdpi_emit_alone(model, ops, count);
    fsdp_status status = fsdpi_failed(model->world);
    const int shown = model->watch & FSDPI_OPS;
    for (fsdp_op *op = ops; op < ops + count && !status; op++) {
        op->timed = 0;
        op->step = model->step;
        op->given = model->given;
        const int is_marker = op->kind >= FSDP_OP_HOOK;
        if (is_marker) fsdpi_do_marker(model, op);
        if (!is_marker) status = fsdpi_emit(model, op);
        else if (shown) status = fsdpi_show(model, op);
    }
    return status;
}

FSDP_API fsdp_status fsdp_call_begin(fsdp_model *model, int call, const char *what) {
    if (!model) return fsdpi_null(NULL, what ? what : "call_begin", "model");
    fsdp_status status = fsdpi_commit(model);
    if (status) return status;
    if (call < 0 || call >= FSDP_CALL_COUNT)
        return fsdpi_bad(model->world, "[E907] call_begin: call is %d, expected FSDP_CALL_*", call);
    if (!what) what = fsdpi_call_name(call);
    status = fsdpi_check_units(model, call, what);
    return status ? status
                  : fsdpi_announce(model, NULL, FSDP_CALL_EXTENSION, what, FSDP_STATE_IDLE);
}

/* -------------------------------------------------------------------------------------------- */
// Owns: buffers and memory of extensions.

FSDP_API fsdp_status fsdp_buf_create(fsdp_model *model, int pool, int memory, int64_t nbytes,
                                     fsdp_buf **buf) {
    if (!model || !buf) return fsdpi_null_of(model, "buf_create", "model or buf");
    *buf = NULL;
    fsdp_status status = fsdpi_failed(model->world);
    if (status) return status;
    if (pool < 0 || pool >= FSDP_POOL_COUNT + model->pools.count || nbytes < 0 ||
        (memory != FSDP_MEMORY_DEVICE && memory != FSDP_MEMORY_PINNED))
        return fsdpi_bad(model->world,
                         "[E908] buf_create: pool %d, memory %d, nbytes %lld: expected FSDP_POOL_* "
                         "or a registered one, FSDP_MEMORY_DEVICE or _PINNED, nbytes >= 0",
                         pool, memory, (long long)nbytes);
    return fsdpi_buf_make(model, pool, (size_t)nbytes, memory == FSDP_MEMORY_PINNED, buf);
}

FSDP_API fsdp_status fsdp_buf_part(fsdp_model *model, const fsdp_buf *whole, int64_t offset,
                                   int64_t nbytes, fsdp_buf **buf) {
    if (!model || !buf) return fsdpi_null_of(model, "buf_part", "model or buf");
    *buf = NULL;
    if (offset < 0 || nbytes < 0 || nbytes > INT64_MAX - offset ||
        (whole && offset + nbytes > (int64_t)whole->bytes))
        return fsdpi_bad(model->world, "[E909] buf_part: %lld bytes at %lld exceed %lld bytes",
                         (long long)nbytes, (long long)offset, (long long)fsdp_buf_nbytes(whole));
    fsdp_buf *part = *buf = (fsdp_buf *)fsdpi_model_alloc(model, sizeof *part);
    if (!part) return fsdpi_no_memory(model->world, "buf_part", "", sizeof *part);
    part->part = 1;
    part->bytes = (size_t)nbytes;
    part->number = ++model->num_bufs;
    part->pool = part->as = FSDP_POOL_SCRATCH;
    part->ptr = (char *)(uintptr_t)offset;
    if (whole) {
        part->pool = part->as = whole->pool;
        part->pinned = whole->pinned;
        part->ptr = whole->ptr + offset;
    }
    return FSDP_OK;
}

FSDP_API void fsdp_buf_destroy(fsdp_model *model, fsdp_buf *buf) {
    if (!model || !buf) return;
    if (buf->held) {
        (void)fsdp_fail(model->world, FSDP_ERR_INVALID_STATE,
                        "[E910] buf_destroy: a unit holds it: wait until fsdp_buf_held is 0");
        return;
    }
    fsdpi_drain(model->world);
    fsdpi_buf_free(model, buf);
}

FSDP_API void *fsdp_buf_ptr(const fsdp_buf *buf) { return buf ? buf->ptr : NULL; }
FSDP_API int fsdp_buf_pool(const fsdp_buf *buf) { return buf ? buf->as : -1; }
FSDP_API int64_t fsdp_buf_nbytes(const fsdp_buf *buf) { return buf ? (int64_t)buf->bytes : 0; }
FSDP_API int fsdp_buf_held(const fsdp_buf *buf) { return buf && buf->held; }

FSDP_API fsdp_status fsdp_pools_trim(fsdp_model *model) {
    if (!model) return fsdpi_null(NULL, "pools_trim", "model");
    fsdp_status status = fsdpi_lasting(model, "pools_trim");
    if (status) return status;
    fsdpi_drain(model->world);
    for (int i = 0; i < model->num_classes; i++) {
        fsdpi_class *c = &model->classes[i];
        int kept = 0;
        for (int k = 0; k < c->count; k++) {
            if (c->slots[k]->held) c->slots[kept++] = c->slots[k];
            else fsdpi_buf_free(model, c->slots[k]);
        }
        c->count = kept;
    }
    return fsdpi_failed(model->world);
}

// Do updates run on the device? Where the host cannot read the shards, or would have to wait for
// the device's streams. Offloaded shards are the host's.
static int fsdpi_updates_on_device(const fsdp_model *m) {
    const fsdp_world *w = m->world;
    return !m->desc.cpu_offload && w->device_ops->update &&
           (!fsdpi_is_host(w) || w->mode == FSDPI_NATIVE);
}

FSDP_API fsdp_status fsdp_update_place(fsdp_model *model, const char *what, int *memory) {
    if (!model || !what || !memory)
        return fsdpi_null_of(model, "update_place", "model, what or memory");
    const fsdp_world *w = model->world;
    fsdp_status status = fsdpi_commit(model);
    if (status) return status;
    *memory = fsdpi_updates_on_device(model) ? FSDP_MEMORY_DEVICE : FSDP_MEMORY_HOST;
    if (model->desc.cpu_offload || fsdpi_is_host(w) || w->device_ops->update) return FSDP_OK;
    return fsdp_fail(model->world, FSDP_ERR_UNSUPPORTED,
                     "[E911] %s: device %s has the shards, but no updates: set cpu_offload", what,
                     w->device_ops->name);
}

FSDP_API fsdp_status fsdp_alloc(fsdp_model *model, int memory, int64_t nbytes, const char *what,
                                void **ptr) {
    if (!model || !what || !ptr) return fsdpi_null_of(model, "alloc", "model, what or ptr");
    fsdp_world *w = model->world;
    int device = memory == FSDP_MEMORY_DEVICE;
    fsdp_status status = FSDP_OK;
    *ptr = NULL;
    if ((!device && memory != FSDP_MEMORY_HOST) || nbytes < 0)
        return fsdpi_bad(
            w, "[E912] %s: memory is %d, nbytes %lld: expected FSDP_MEMORY_HOST or _DEVICE, >= 0",
            what, memory, (long long)nbytes);
    if (!device) *ptr = fsdpi_model_alloc(model, (size_t)nbytes);
    else status = w->device_ops->alloc(w->device, memory, (size_t)nbytes, ptr);
    if (!*ptr && !status) status = FSDP_ERR_OUT_OF_MEMORY;
    model->counters.allocations += !status && device;
    if (!status) return FSDP_OK;
    *ptr = NULL;
    return fsdp_fail(w, status, "[E304] %s of %lld bytes%s%s: %s", what, (long long)nbytes,
                     device ? " on device " : "", device ? w->device_ops->name : "",
                     device ? fsdpi_device_text(w, status) : "the allocator returned NULL");
}

FSDP_API void fsdp_free(fsdp_model *model, int memory, void *ptr, int64_t nbytes) {
    if (!model || !ptr) return;
    const fsdp_world *w = model->world;
    if (memory == FSDP_MEMORY_HOST) fsdpi_model_free(model, ptr);
    else w->device_ops->free(w->device, memory, ptr, (size_t)nbytes);
}

/* -------------------------------------------------------------------------------------------- */
// Owns: copies, waits, groups, and what extensions ask of a model.

FSDP_API fsdp_status fsdp_transfer(fsdp_model *model, void *dst, const void *src, int64_t nbytes) {
    if (!model || (nbytes > 0 && (!dst || !src)))
        return fsdpi_null_of(model, "transfer", "model, dst or src");
    if (nbytes < 0)
        return fsdpi_bad(model->world, "[E913] transfer: nbytes is %lld, expected >= 0",
                         (long long)nbytes);
    fsdp_status status = fsdpi_failed(model->world);
    return status ? status : fsdpi_transfer(model->world, dst, src, (size_t)nbytes);
}

FSDP_API fsdp_status fsdp_wait_stream(fsdp_model *model, int stream) {
    if (!model) return fsdpi_null(NULL, "wait_stream", "model");
    if (stream < -1 || stream >= FSDP_STREAM_COUNT)
        return fsdpi_bad(model->world,
                         "[E914] wait_stream: stream is %d, expected FSDP_STREAM_* or -1", stream);
    if (stream >= 0) return fsdpi_sync(model->world, stream);
    fsdpi_drain(model->world);
    return fsdpi_failed(model->world);
}

FSDP_API fsdp_status fsdp_mesh_comm(const fsdp_mesh *mesh, int dim, int stream, fsdp_comm **comm) {
    if (!mesh || !comm) return fsdpi_null(mesh ? mesh->world : NULL, "mesh_comm", "mesh or comm");
    fsdp_world *w = mesh->world;
    fsdp_status status = fsdpi_failed(w);
    *comm = NULL;
    if (status) return status;
    if (dim < 0 || dim >= mesh->ndim || stream < 0 || stream >= FSDP_STREAM_COUNT ||
        mesh->coord[0] < 0)
        return fsdpi_bad(w,
                         "[E108] mesh_comm: dim is %d of a %d-D mesh, stream is %d: expected a "
                         "dim, one of FSDP_STREAM_*, and a rank that is in the mesh",
                         dim, mesh->ndim, stream);
    int own = stream == FSDP_STREAM_COMPUTE || stream == FSDP_STREAM_EXTENSION;
    if (mesh->shape[dim] == 1) return FSDP_OK;
    if (own && w->mode != FSDPI_INLINE && w->caps.lanes > 1)
        return fsdpi_mesh_subgroup(mesh, dim, mesh->shape[dim], stream, "extension", comm);
    *comm = own || stream == FSDP_STREAM_GATHER ? mesh->gather_comm[dim] : mesh->reduce_comm[dim];
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_world_status(const fsdp_world *world) {
    return world ? fsdpi_failed(world) : FSDP_ERR_INVALID_ARG;
}

FSDP_API int fsdp_world_has(const fsdp_world *world, int kind) {
    return world && world->comm_ops && kind >= 0 && kind < FSDP_OP_COUNT &&
           (world->caps.kinds & 1u << kind) != 0;
}

FSDP_API fsdp_world *fsdp_mesh_world(const fsdp_mesh *mesh) { return mesh ? mesh->world : NULL; }

FSDP_API fsdp_world *fsdp_model_world(const fsdp_model *m) { return m ? m->world : NULL; }

FSDP_API fsdp_status fsdp_agree(fsdp_model *model, const void *data, int64_t nbytes) {
    if (!model || (nbytes > 0 && !data))
        return fsdpi_null(fsdp_model_world(model), "agree", "model or data");
    for (int64_t i = 0; i < nbytes; i++)
        model->given = fsdpi_hash(model->given, ((const unsigned char *)data)[i]);
    return fsdpi_failed(model->world);
}

FSDP_API int fsdp_model_run(const fsdp_model *model) { return model ? model->world->mode : 0; }

FSDP_API uint64_t fsdp_model_settings(const fsdp_model *m) { return m ? m->settings : 0; }

FSDP_API fsdp_status fsdp_params_writable(fsdp_model *model) {
    if (!model) return fsdpi_null(NULL, "params_writable", "model");
    fsdp_status status = fsdpi_shards_writable(model);
    if (status || fsdpi_updates_on_device(model)) return status;
    return fsdpi_sync(model->world, FSDP_STREAM_COMPUTE);
}

/* ==== core/snapshot.h =======================================================================
   what a step changes, saved and brought back: rehearsals, states of units */

// Owns: the list of what a step changes, and options. One walk measures, saves and restores, so
// that the three cannot differ. Gathered parameters, gradients and shards themselves are not in it.

enum { FSDPI_SAVE, FSDPI_LOAD };

typedef struct fsdpi_walk {
    char *buf;
    size_t cap, used; // what does not fit is only counted
    int way;          // FSDPI_SAVE, FSDPI_LOAD
} fsdpi_walk;

static void fsdpi_walk_bytes(fsdpi_walk *w, void *field, size_t size) {
    if (size == 0) return;
    if (w->used + size <= w->cap) {
        if (w->way == FSDPI_SAVE) memcpy(w->buf + w->used, field, size);
        else memcpy(field, w->buf + w->used, size);
    }
    w->used += size;
}

static void fsdpi_walk_buf(fsdpi_walk *w, fsdp_buf *buf) {
    if (!buf) return;
    fsdpi_walk_bytes(w, &buf->ready, sizeof buf->ready);
    fsdpi_walk_bytes(w, &buf->avail, sizeof buf->avail);
    fsdpi_walk_bytes(w, &buf->released, sizeof buf->released);
    fsdpi_walk_bytes(w, &buf->held, sizeof buf->held);
}

static void fsdpi_walk_unit(fsdpi_walk *w, fsdp_unit *u) {
    fsdpi_walk_bytes(w, &u->state, sizeof u->state);
    fsdpi_walk_bytes(w, &u->options, sizeof u->options);
    fsdpi_walk_bytes(w, u->route, sizeof u->route);
    fsdpi_walk_bytes(w, u->usage.use, (size_t)fsdpi_use_words(u) * sizeof *u->usage.use);
    fsdpi_walk_bytes(w, &u->usage.value, sizeof u->usage.value);
    fsdpi_walk_bytes(w, &u->usage.in_flight, sizeof u->usage.in_flight);
    fsdpi_walk_bytes(w, &u->usage.counted, sizeof u->usage.counted);
    fsdpi_walk_bytes(w, u->usage.flags, fsdpi_flags_bytes(u));
    fsdpi_walk_bytes(w, &u->told, sizeof u->told);
    for (int i = 0; i < u->desc.num_params; i++) {
        fsdpi_param *p = &u->params[i];
        fsdpi_walk_bytes(w, &p->grad_hook, sizeof p->grad_hook);
        fsdpi_walk_bytes(w, &p->grad_hook_user, sizeof p->grad_hook_user);
    }
}

static void fsdpi_walk_model(fsdpi_walk *w, fsdp_model *m) {
    fsdpi_walk_bytes(w, &m->backward, sizeof m->backward);
    fsdpi_walk_bytes(w, &m->call_state, sizeof m->call_state);
    fsdpi_walk_bytes(w, &m->seq, sizeof m->seq);
    fsdpi_walk_bytes(w, &m->step, sizeof m->step);
    fsdpi_walk_bytes(w, &m->given, sizeof m->given);
    fsdpi_walk_bytes(w, &m->release_seq, sizeof m->release_seq);
    fsdpi_walk_bytes(w, &m->ahead_bytes, sizeof m->ahead_bytes);
    fsdpi_walk_bytes(w, &m->num_order, sizeof m->num_order);
    fsdpi_walk_bytes(w, m->order, (size_t)m->num_order * sizeof *m->order); // it does not shrink
    fsdpi_walk_bytes(w, &m->settings, sizeof m->settings);
    fsdpi_walk_bytes(w, &m->grad_enabled, sizeof m->grad_enabled);
    fsdpi_walk_bytes(w, &m->is_last_backward, sizeof m->is_last_backward);
    fsdpi_walk_bytes(w, &m->grad_hooks, sizeof m->grad_hooks);
    fsdpi_walk_bytes(w, &m->hook_status, sizeof m->hook_status);
    fsdpi_walk_bytes(w, m->hook_error, sizeof m->hook_error);
    fsdpi_walk_bytes(w, &m->norm_type, sizeof m->norm_type);
    fsdpi_walk_bytes(w, &m->counters, sizeof m->counters);
    for (int i = 0; i < m->num_units; i++) fsdpi_walk_unit(w, m->units[i]);
    for (int i = 0; i < m->num_classes; i++)
        for (int k = 0; k < m->classes[i].count; k++) fsdpi_walk_buf(w, m->classes[i].slots[k]);
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        fsdpi_walk_buf(w, m->flats[d].shard);
        fsdpi_walk_buf(w, m->flats[d].grad);
    }
    fsdpi_walk_buf(w, m->scalar);
}

static size_t fsdpi_model_save(fsdp_model *m, char *buf, size_t cap) {
    fsdpi_walk w = {buf, cap, 0, FSDPI_SAVE};
    fsdpi_walk_model(&w, m);
    return w.used;
}

// Slots may be an extension's, which no class lists.
static FSDPI_NOINLINE void fsdpi_hold_slots(const fsdp_model *m, uint8_t held) {
    for (int i = 0; i < m->num_units; i++)
        for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++)
            if (m->units[i]->state.slot[pool]) m->units[i]->state.slot[pool]->held = held;
}

static void fsdpi_model_load(fsdp_model *m, char *buf, size_t size) {
    fsdpi_walk w = {buf, size, 0, FSDPI_LOAD};
    fsdpi_drain(m->world); // flags of use may still be read
    fsdpi_hold_slots(m, 0);
    fsdpi_walk_model(&w, m);
    fsdpi_hold_slots(m, 1);
}

// While `run` is at work, the model has one extension, and no record runs.
FSDP_API fsdp_status fsdp_rehearse(fsdp_model *model, const fsdp_extension *extension,
                                   fsdp_status (*run)(void *user), void *user) {
    if (!model || !extension || !run)
        return fsdpi_null_of(model, "rehearse", "model, extension or run");
    fsdpi_attached only, *others = model->attached;
    const fsdpi_attached *asked = model->asked;
    only.next = NULL;
    fsdp_status status = fsdpi_commit(model);
    if (!status)
        status = fsdp_desc_read(model->world, &only.e, extension, sizeof only.e, "fsdp_extension");
    if (!status) status = fsdpi_check_units(model, FSDP_CALL_PARAMS_CHANGED, "rehearse");
    if (status) return status;
    size_t size = fsdpi_model_save(model, NULL, 0);
    char *saved = (char *)fsdpi_model_alloc(model, size);
    if (!saved) return fsdpi_no_memory(model->world, "rehearse", "", size);
    (void)fsdpi_model_save(model, saved, size);
    fsdpi_drain(model->world); // records under way are told to the others
    model->attached = &only;
    model->asked = NULL;
    model->rehearsing++;
    fsdpi_watch(model);
    status = run(user);
    fsdpi_model_load(model, saved, size);
    model->attached = others;
    model->asked = asked;
    model->rehearsing--;
    fsdpi_watch(model);
    fsdpi_model_free(model, saved);
    return status ? status : fsdpi_failed(model->world);
}

/* -------------------------------------------------------------------------------------------- */
// Owns: saved states of units.

// What stands before it: what it was taken of.
typedef struct fsdpi_unit_head {
    const fsdp_unit *unit;
    uint64_t layout;
} fsdpi_unit_head;

typedef struct fsdpi_unit_saved {
    fsdpi_unit_head head;
    fsdpi_state state;
    uint64_t counted; // of usage; 64 bits, so that no byte is padding
    uint64_t slots;   // which they are: another buffer may later have the address of a freed one
} fsdpi_unit_saved;

FSDP_API size_t fsdp_unit_snapshot(const fsdp_unit *unit, void *buf, size_t cap) {
    fsdpi_unit_saved now;
    if (!unit) return 0;
    if (!buf || cap < sizeof now) return sizeof now;
    memset(&now, 0, sizeof now);
    now.head.unit = unit;
    now.head.layout = unit->model->layout;
    memcpy(&now.state, &unit->state, sizeof now.state);
    now.counted = unit->usage.counted;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++) {
        const fsdp_buf *slot = unit->state.slot[pool];
        now.slots = now.slots * 0x9E3779B97F4A7C15u + (slot ? (uint64_t)slot->number : 0);
    }
    memcpy(buf, &now, sizeof now);
    return sizeof now;
}

// Bytes of the slot of a unit that was gathered ahead: they count towards prefetch_bytes.
static int64_t fsdpi_ahead_bytes(const fsdpi_state *s) {
    return s->ahead ? (int64_t)s->slot[FSDP_POOL_GATHER]->bytes : 0;
}

FSDP_API fsdp_status fsdp_unit_restore(fsdp_unit *unit, const void *buf, size_t nbytes) {
    if (!unit || !buf)
        return fsdpi_null_of(unit ? unit->model : NULL, "unit_restore", "unit or buf");
    fsdp_model *m = unit->model;
    fsdpi_state *s = &unit->state;
    const char *saved = (const char *)buf;
    fsdpi_unit_head head = {NULL, 0};
    uint64_t counted;
    if (nbytes == sizeof(fsdpi_unit_saved)) memcpy(&head, saved, sizeof head);
    if (head.unit != unit || head.layout != m->layout)
        return fsdpi_bad(m->world,
                         "[E916] unit_restore: the snapshot of %llu bytes is of another unit than "
                         "'%s', or the layout has changed since: take it again",
                         (unsigned long long)nbytes, unit->desc.name);
    m->ahead_bytes -= fsdpi_ahead_bytes(s);
    memcpy(s, saved + offsetof(fsdpi_unit_saved, state), sizeof *s);
    memcpy(&counted, saved + offsetof(fsdpi_unit_saved, counted), sizeof counted);
    m->ahead_bytes += fsdpi_ahead_bytes(s);
    s->last_order = -1; // the record of forwards is another one
    if (s->training == FSDP_STATE_PRE_BACKWARD || s->training == FSDP_STATE_POST_BACKWARD)
        m->backward = 1;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++)
        if (s->slot[pool]) s->slot[pool]->held = 1;
    if (counted) fsdpi_usage_sent(unit);
    return FSDP_OK;
}

FSDP_API int fsdp_unit_follows_use(const fsdp_unit *unit) {
    return unit && (unit->model->desc.grads_overwrite || !unit->options.reduce_unused);
}

FSDP_API fsdp_status fsdp_unit_reduce(fsdp_unit *unit) {
    if (!unit) return fsdpi_null(NULL, "unit_reduce", "unit");
    fsdp_status status = fsdpi_failed(unit->model->world);
    if (status || unit->state.training == FSDP_STATE_PRE_BACKWARD) return status;
    return fsdpi_do_leftovers(unit);
}

FSDP_API fsdp_status fsdp_unit_flag_use(fsdp_unit *unit) {
    if (!unit) return fsdpi_null(NULL, "unit_flag_use", "unit");
    fsdp_status status = fsdpi_failed(unit->model->world);
    if (!status && unit->usage.flags && fsdpi_ranks(unit) > 1)
        fsdpi_usage_send(unit, fsdpi_route_now(unit)->factor / unit->state.grads.divided);
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
    if (w) w->state = fsdpi_own_word(1);
    if (!w || !w->state) {
        fsdpi_free(&d->allocator, w);
        return fsdpi_no_memory(early, "fsdp_init", "", sizeof *w);
    }
    memcpy(w->job, early->job, sizeof w->job);
    memcpy(w->store, early->store, sizeof w->store);
    fsdpi_world_messages(w, d);
    w->boot.rank = w->rank;
    w->size = w->boot.size = d->world_size;
    w->boot.local_rank = d->local_rank;
    w->boot.stuck = &w->stuck;
    w->boot.threads = d->threads;
    w->boot.allocator = d->allocator;
    w->boot.clock = d->clock;
    w->boot.user = d->user;
    w->boot.job = w->job;
    w->boot.store = w->store;
    status = fsdpi_world_choose(w, d); // on GPUs, first compilations and connections take long
    if (!status && !d->timeout_ms)
        d->timeout_ms = w->device_ops->flags & FSDP_DEVICE_ASYNC ? 600000 : 60000;
    w->boot.timeout_ns = (int64_t)d->timeout_ms * 1000000;
    if (!status) status = fsdpi_world_open_comm(w);
    if (!status) status = fsdpi_world_open_device(w);
    if (!status) status = fsdpi_world_open_streams(w, d->lanes);
    if (status && w->comm) status = fsdpi_fail_together(w, status); // the others are in it, too
    if (status) {
        fsdpi_set_error(early, fsdp_last_error(w));
        fsdpi_world_close(w);
        return status;
    }
    char text[160];
    fsdpi_text t = {text, sizeof text, 0};
    fsdpi_say(&t, "collectives run ");
    fsdpi_say_mode(&t, w);
    if (w->rank == 0 && w->size > 1) fsdpi_log(w, FSDP_LOG_INFO, FSDP_OK, text);
    *out = w;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_init(const fsdp_world_desc *desc, fsdp_world **world) {
    fsdp_world_desc d;
    fsdp_world early; // speaks for the world until there is one
    if (!world) return fsdpi_null(NULL, "fsdp_init", "world");
    *world = NULL;
    fsdp_status status = fsdp_desc_read(NULL, &d, desc, sizeof d, "fsdp_world_desc");
    if (status) return status;
    memset(&early, 0, sizeof early);
    fsdpi_world_messages(&early, &d);
    status = fsdpi_world_make(&early, &d, world);
    if (status) fsdpi_set_error(NULL, early.error);
    return status;
}

FSDP_API fsdp_status fsdp_shutdown(fsdp_world *world) {
    if (!world) return FSDP_OK;
    if (fsdpi_is_child(world)) return fsdpi_failed(world);
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
    if (!world) return;
    (void)fsdpi_world_fail(world, FSDP_ERR_ABORTED, "rank %d: [E401] it aborted the world: %s",
                           world->rank, why ? why : "no reason given");
}

FSDP_API fsdp_status fsdp_set_stream(fsdp_world *world, void *native) {
    if (!world) return fsdpi_null(NULL, "set_stream", "world");
    fsdp_status status = fsdpi_failed(world);
    if (status) return status;
    if (world->mode != FSDPI_NATIVE)
        return fsdp_fail(world, FSDP_ERR_UNSUPPORTED,
                         "[E803] set_stream: device %s has no streams: omit the call on it",
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
FSDP_API int fsdp_local_rank(const fsdp_world *w) { return w ? w->boot.local_rank : -1; }
FSDP_API const char *fsdp_last_error(const fsdp_world *world) {
    if (!world) return fsdpi_thread_error;
    return fsdpi_failed(world) ? world->failure : world->error;
}

static fsdp_op fsdpi_host_op(int kind, const char *what, fsdp_dtype dtype) {
    fsdp_op op = FSDP_ZERO;
    op.kind = (uint8_t)kind;
    op.what = what;
    op.dtype = (uint8_t)dtype;
    op.in_place = 1;
    return op;
}

// Checks that collectives on host data share.
static fsdp_status fsdpi_host_call(fsdp_world *w, const fsdp_mesh *mesh, const void *data,
                                   int64_t count, const char *what) {
    if (!w) return fsdpi_null(NULL, what, "world");
    fsdp_status status = fsdpi_failed(w);
    if (status) return status;
    if (count < 0 || count > INT64_MAX / 8 || (count > 0 && !data))
        return fsdpi_bad(w, "[E104] %s: count is %lld and data is %s, expected 0..2^60 and data",
                         what, (long long)count, data ? "given" : "NULL");
    if (mesh && (mesh->world != w || mesh->coord[0] < 0))
        return fsdpi_bad(w, "[E105] %s: give a mesh of this world, on a rank that is in the mesh",
                         what);
    return FSDP_OK;
}

/* Over the world (mesh NULL), or over a mesh: dim by dim. A reduction of all dims is one over the
   mesh. A broadcast reaches first those that differ from the root in dim 0 alone, then those that
   differ in dims 0 and 1, and so on; what others send meanwhile is overwritten later. */
static fsdp_status fsdpi_host_mesh(fsdp_world *w, const fsdp_mesh *mesh, fsdp_op *op, int root,
                                   void *data, int64_t count) {
    fsdp_status status = FSDP_OK;
    for (int d = 0; d < (mesh ? mesh->ndim : 1) && !status; d++) {
        fsdp_comm *comm = mesh ? mesh->gather_comm[d] : w->comm; // NULL: a group of one
        op->group_size = mesh ? mesh->shape[d] : w->size;
        op->root = mesh ? root / fsdpi_mesh_stride(mesh, d) % mesh->shape[d] : root;
        if (comm) status = fsdpi_host_collective(w, comm, op, (char *)data, count);
    }
    return status;
}

FSDP_API fsdp_status fsdp_all_reduce(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                     int64_t count, fsdp_dtype dtype, fsdp_redop op) {
    fsdp_status status = fsdpi_host_call(world, mesh, data, count, "all_reduce");
    if (status) return status;
    if (!(fsdp_dtype_is_float(dtype) || dtype == FSDP_I32 || dtype == FSDP_I64) || op < FSDP_SUM ||
        op > FSDP_MIN)
        return fsdpi_bad(world,
                         "[E106] all_reduce: dtype is %s and op is %d, expected f32, f64, f16, "
                         "bf16, i32 or i64, and FSDP_SUM, FSDP_MAX or FSDP_MIN",
                         fsdp_dtype_name(dtype), op);
    fsdp_op record = fsdpi_host_op(FSDP_OP_ALL_REDUCE, "fsdp_all_reduce", dtype);
    record.redop = (uint8_t)op;
    return fsdpi_host_mesh(world, mesh, &record, 0, data, count);
}

FSDP_API fsdp_status fsdp_broadcast(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                    int64_t nbytes, int root) {
    fsdp_status status = fsdpi_host_call(world, mesh, data, nbytes, "broadcast");
    if (status) return status;
    int size = mesh ? fsdpi_mesh_numel(mesh) : world->size;
    if (root < 0 || root >= size)
        return fsdpi_bad(world, "[E107] broadcast: root is %d, expected 0..%d", root, size - 1);
    fsdp_op record = fsdpi_host_op(FSDP_OP_BROADCAST, "fsdp_broadcast", FSDP_U8);
    return fsdpi_host_mesh(world, mesh, &record, root, data, nbytes);
}

FSDP_API fsdp_status fsdp_barrier(fsdp_world *world) {
    int32_t one = 1;
    fsdp_status status = fsdpi_host_call(world, NULL, &one, 1, "barrier");
    if (status) return status;
    fsdp_op record = fsdpi_host_op(FSDP_OP_ALL_REDUCE, "fsdp_barrier", FSDP_I32);
    return fsdpi_host_mesh(world, NULL, &record, 0, &one, 1);
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
