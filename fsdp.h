/* fsdp.h - FSDP2 (ZeRO-3, per-parameter sharding) for C, C++ and CUDA trainers            v0.3.0

   W ranks shard a model: each rank keeps 1/W of every parameter, of its gradient and of the
   optimizer's state. The library gathers a layer just before you use it and frees it right after.
   It averages the gradients of all ranks and gives each rank the part that it owns. It behaves as
   PyTorch's fully_shard.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp.h"
       cc -O2 trainer.c -pthread -lm && tools/fsdprun -n 4 ./a.out     // make tools/fsdprun

   With FSDP_STATIC defined as well, everything is static to that file: for a program of one file,
   or a library with a copy of its own. In C++17 fsdp.hpp adds exceptions, owners and scopes.

   SPDX-License-Identifier: MIT (full text at the end of this file)

A PROGRAM

    #define FSDP_IMPLEMENTATION
    #include "fsdp.h"
    #include <math.h>
    #include <stdio.h>

    enum { N = 64, STEPS = 20 };

    static void start(void *user, const fsdp_param_view *block) { // only my own rows
        float *w = fsdp_view_data_f32(block);
        (void)user;
        for (int64_t k = 0; k < block->numel; k++)
            w[k] = 0.01f * (float)(fsdp_view_index(block, k) % 7 - 3);
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
            const float *w = fsdp_data_f32(unit, 0), *b = fsdp_data_f32(unit, 1);
            for (int o = 0; o < N; o++) { // y = w x + b shall become x
                float y = b[o];
                for (int i = 0; i < N; i++) y += w[o * N + i] * x[i];
                dy[o] = y - x[o];
                loss += dy[o] * dy[o] / 2;
            }
            fsdp_post_forward(unit);
            fsdp_pre_backward(unit);
            float *dw = fsdp_grad_f32(unit, 0), *db = fsdp_grad_f32(unit, 1);
            for (int o = 0; o < N; o++) {
                db[o] += dy[o];
                for (int i = 0; i < N; i++) dw[o * N + i] += dy[o] * x[i];
            }
            fsdp_post_backward(unit);
            if (fsdp_finalize_backward(model)) break; // the failure of any hook shows here
            if (fsdp_params_writable(model)) break;   // nobody reads shards any more
            fsdp_param_view v = FSDP_ZERO;
            while (fsdp_next_param(model, &v)) {
                float *p = fsdp_view_shard_f32(&v);
                const float *g = fsdp_view_grad_f32(&v);
                for (int64_t k = 0; k < v.numel; k++) p[k] -= 0.03f * g[k];
            }
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
    comm thread  a thread of the library that runs collectives while your thread computes
    stream     an order in which ops run: a comm thread's, or that of a device's stream
    inline     without comm threads and streams: an op is done when the call returns
    dtype      FSDP_F32 FSDP_F64 FSDP_F16 FSDP_BF16; frozen parameters also FSDP_U8 FSDP_I8 ...
               FSDP_DTYPE_KEEP (0): as the comment of the field says

STEP BY STEP
    1  Call fsdp_init, fsdp_model_create, fsdp_fully_shard for each layer, and fsdp_init_params or
       fsdp_param_load: until then parameters are zero.
    2  Forward of a layer: call fsdp_pre_forward, read fsdp_data_f32, call fsdp_post_forward. If a
       unit stays open while others run (embeddings, final norm, tied head), set its
       reshard_after_forward to FSDP_RESHARD_NEVER. You may close open units in any order, and open
       a unit several times in one forward.
    3  Backward of a layer: call fsdp_pre_backward, read fsdp_data_f32, add to fsdp_grad_f32,
       call fsdp_post_backward. Units may come in any order. At the end call fsdp_finalize_backward.
    4  Call fsdp_clip_grad_norm if you clip. Run the optimizer: fsdp_optim.h, or your own loop over
       fsdp_model_flat or fsdp_next_param. Before your own loop call fsdp_params_writable, since a
       prefetch may still read shards, and after it fsdp_params_changed. Then call fsdp_zero_grad.
    Microbatches: call fsdp_set_requires_gradient_sync(model, NULL, 0) before the first one and
    fsdp_set_requires_gradient_sync(model, NULL, 1) before the last one. Each of them ends with
    fsdp_finalize_backward. Step 4 comes after the last one. The gradients of microbatches are
    added. Without sync each unit keeps a full gradient until the last microbatch: as many bytes as
    the whole model in the dtype of fsdp_grad, or in reduce_dtype if gradients are cast before they
    are reduced (fsdp_model_predict_step). To save this memory leave sync on: each microbatch is
    reduced, and added to the sharded gradient.
    Loss per token: if ranks or microbatches count different numbers of tokens, a mean of their
    means weighs tokens differently. Take gradients of sums, and let the library divide them by the
    tokens of all ranks: fsdp_set_gradient_divide_factor (docs/from-pytorch.md has the program).
    Evaluation: on all ranks call fsdp_set_grad_enabled(model, 0), run forwards, call
    fsdp_set_grad_enabled(model, 1). If more units were open at a time than in training,
    fsdp_pools_trim frees their slots.
    Recompute: between a unit's pre_backward and post_backward call its pre_forward and
    post_forward again (PyTorch: activation checkpointing).
    HSDP: give a 2-D mesh with named dims: dim 0 replicates, dim 1 shards. Else give a mesh_info.
    Freeze and thaw: fsdp_set_requires_grad. Gradients in f16: fsdp_grad_scaler of fsdp_optim.h.
    Step plans: fsdp_plan_create of fsdp_plan.h. The library records a step and replays it with
    fewer collectives and the same bits (docs/plan.md).

MISTAKES
    Memory: compile with -fsanitize=address. Then the program stops at the line that touches a
    parameter or a gradient beyond its end, before pre_* or after post_*. Without it
    fsdp_model_desc.debug fills what you gave back with NaN. Neither sees a program that writes a
    parameter, runs past its end into the next one, or writes a shard while a gather reads it or,
    with comm threads, a gradient while the reduction does. On one rank gradients are written to
    the shards themselves: look for mistakes with two ranks. A pointer that you kept is not seen
    where its memory is in use again: with AddressSanitizer after four uses of a slot, or after one
    with a plan or fsdp_replicate.
    Dtypes: with param_dtype FSDP_BF16 parameters and gradients are no floats. fsdp_data_f32,
    fsdp_data_as(unit, i, FSDP_BF16) and their siblings check that, fsdp_data and fsdp_grad do not.

IT DOES NOT
    differentiate, run kernels, or own your activations. It does not search for a root module as
    PyTorch does: the model is the root.

ENVIRONMENT
    RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT  tools/fsdprun and torchrun set them. If they
                      are not set, the library reads those of mpirun (OMPI_*, PMI_*, MV2_*), srun
                      (SLURM_*) or flux (FLUX_*)
    FSDP_JOB_ID       name of the job of all the launcher's ranks, unique on the host. Default: from
                      the launcher's variables. Other worlds need fsdp_world_desc.job
    FSDP_STORE FSDP_TOKEN FSDP_SOCKET_IFNAME FSDP_GLOO_NEAR   jobs on several hosts: docs/cluster.md
    FSDP_TIMEOUT_MS   deadline of every wait in milliseconds, default 60000; on GPUs 600000
    FSDP_COMM_THREADS 0: inline. 1 or 2: the number of comm threads. Default: over Gloo 1 or 2 if
                      ranks are on several hosts, otherwise 0; fsdp_model_describe says which
    FSDP_BACKEND      name of a compiled-in backend    FSDP_LOG_LEVEL  error, warn, info or none
    FSDP_FLIGHT_RECORD  a directory: each rank keeps its last operations in a file there, which
                      outlives the process: docs/observability.md
    FSDP_NCCL_* FSDP_CUDA_MANAGED   GPUs: docs/gpu.md

ERRORS
    Functions return fsdp_status. The text of an error names the rank, the unit, the operation, the
    expected value and the actual one. Each rank logs it once and keeps it for fsdp_last_error.
    If an argument is wrong or a call comes in a wrong order, nothing changes. If a collective
    fails, the library aborts the world on all ranks. From then on every call returns that status
    at once, and you can only call fsdp_last_error and fsdp_shutdown. A getter that fails gives
    memory all the same, and fsdp_finalize_backward reports its failure: a trainer that looks only
    at what finalize and the optimizer return does not crash before. The library never calls exit
    or abort. (Gloo ends the process if the program closes one of Gloo's descriptors.)
    No call waits longer than the deadline. On devices with streams a call may wait 3
    seconds more, so that the backend, which can name the missing rank, reports first.

MEMORY
    The library allocates shards, their gradients, and slots. A rule that no timing influences
    gives the number of slots, so memory is the same on every rank and in every run.
    fsdp_model_predict returns it to the byte before anything is allocated. From the third step on a
    step allocates nothing. Inline there is one slot for each size of unit. With comm threads or
    streams there are two, if two can be in use at a time. If units stay open around others, there
    are more.

THREADS AND ORDER
    One thread at a time uses a world and all that is made from it. Worlds are independent; if a
    process has several open at a time, give each a name of its own (fsdp_world_desc.job). The
    library may call the logger from worker threads. All ranks of the mesh call a collective
    function, in the same order. If ranks disagree, all of them get FSDP_ERR_MISMATCH with both
    sides in the text; if they wait in different groups, as with two comm threads or HSDP, they may
    get FSDP_ERR_TIMEOUT. A process that a rank forks is no rank: there each call of its world
    returns FSDP_ERR_INVALID_STATE, and fsdp_shutdown and the functions that destroy do nothing.

DETERMINISM
    CPU backends sum in rank order, in f32 (f64 in f64), then scale, then add to what is there. On
    one number of ranks the bits are the same for every run, number of comm threads, layout, ranks
    as threads or processes, and for all compiler flags (-Ofast included). NCCL sums in an order of
    its own.

STREAMS AND GPUS
    -DFSDP_BACKEND_NCCL builds the same program for GPUs: docs/gpu.md. A call returns when its work
    is enqueued. Data is ready in the order of your stream (fsdp_set_stream). fsdp_data, fsdp_grad,
    views and fsdp_model_flat give device memory. fsdp_init_params, fsdp_param_load and
    fsdp_param_full use host memory on every device.

LIMITS OF THIS VERSION
    Linux 4.14 or newer; gcc or clang. Backend shm serves one host. NCCL and CUDA have run on one
    GPU, and not on several (docs/gpu.md).

THE COMMENTS OF FUNCTIONS
    Result      INVALID_ARG stands for FSDP_ERR_INVALID_ARG, and so on. Collective errors are
                TIMEOUT, PEER_LOST, MISMATCH, ABORTED and BACKEND. Errors of commit are those of
                fsdp_model_commit. If the world is aborted, every call returns its status.
    Collective  yes: the call communicates, or later collectives depend on it. "No, but every rank
                has to do the same": it does not communicate. If a rank leaves it out, later
                collectives may disagree. Without this line: no.
    Blocks      how long the call may wait. Without this line it does not.
    Allocates   whether the call takes memory, and when. Without this line it does not.
    Thread      any: every thread may call it. Without this line: the thread that uses the world.
    Source      the function of PyTorch that this one follows. Without this line PyTorch has none.
*/
// The columns of the declarations are set by hand.
// clang-format off
#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 3
#define FSDP_VERSION_PATCH 0

#include <stddef.h> // size_t, NULL
#include <stdint.h> // int64_t, uint64_t

#ifndef FSDP_MATH_H
#define FSDP_MATH_H
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
#define FSDP_COLD __attribute__((cold)) // of no step: small rather than fast
#define FSDP_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define FSDP_MUST_CHECK
#define FSDP_COLD
#define FSDP_PRINTF(fmt, args)
#endif

// Between FSDP_PRECISE_BEGIN and FSDP_PRECISE_END, at file scope, arithmetic is rounded as C says,
// with any compiler flags. level: of gcc, "O3". clang for some targets ignores float_control, and
// its pop with it: so FP_CONTRACT is set back, too.
#define FSDP_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define FSDP_PRECISE_BEGIN(level) \
    FSDP_PRAGMA(float_control(precise, on, push)) FSDP_PRAGMA(clang fp contract(off))
#define FSDP_PRECISE_END FSDP_PRAGMA(STDC FP_CONTRACT DEFAULT) FSDP_PRAGMA(float_control(pop))
#elif defined(__GNUC__)
#ifdef __CUDACC__ // nvcc does not know the pragmas of gcc; the host's compiler does
#define FSDP_QUIET_BEGIN FSDP_PRAGMA(nv_diagnostic push) FSDP_PRAGMA(nv_diag_suppress 1675)
#define FSDP_QUIET_END   FSDP_PRAGMA(nv_diagnostic pop)
#else
#define FSDP_QUIET_BEGIN
#define FSDP_QUIET_END
#endif
#define FSDP_PRECISE_BEGIN(level) \
    FSDP_QUIET_BEGIN FSDP_PRAGMA(GCC push_options) \
    FSDP_PRAGMA(GCC optimize(level, "no-fast-math", "fp-contract=off"))
#define FSDP_PRECISE_END FSDP_PRAGMA(GCC pop_options) FSDP_QUIET_END
#else
#define FSDP_PRECISE_BEGIN(level)
#define FSDP_PRECISE_END
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
/* Status. Zero is success; there is one code per reaction. See ERRORS above.                     */

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
/* Element types. 16-bit floats are stored as uint16_t; integers are storage only. The functions of
   this section and of the next one are pure: any thread may call them.                           */

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

// The operation of a reduction; sums run in rank order.
typedef int32_t fsdp_redop;
enum { FSDP_SUM = 0, FSDP_MAX, FSDP_MIN };

/* fsdp_dtype_size - bytes of one element; 0 if the value is not a dtype */
FSDP_API size_t fsdp_dtype_size(fsdp_dtype dtype);

/* fsdp_dtype_name - "f32", "bf16", ...; "?" if the value is not a dtype */
FSDP_API const char *fsdp_dtype_name(fsdp_dtype dtype);

/* fsdp_dtype_is_float - 1 for f64, f32, f16 and bf16, else 0 */
FSDP_API int fsdp_dtype_is_float(fsdp_dtype dtype);

/* fsdp_convert - convert `count` elements between two floating dtypes, or copy equal dtypes
   dst, src    aligned to their dtype. They may be equal only if the dtypes are equal
   Result      FSDP_OK; FSDP_ERR_INVALID_ARG (NULL with count > 0, count < 0, or integers of
               different types)
   Rounding    to nearest, ties to even; overflow gives infinity; infinity, NaN (quiet, payload cut)
               and the sign of zero are kept; subnormals are exact */
FSDP_API fsdp_status fsdp_convert(void *dst, fsdp_dtype dst_dtype, const void *src,
                                  fsdp_dtype src_dtype, int64_t count);

/* fsdp_cast_if_needed - cast src to dtype, unless dtype is KEEP or src_dtype
   dst         room for count elements of dtype; you own it. Untouched if no cast is needed
   Result      the pointer to use, src or dst; NULL if the cast is impossible (see fsdp_convert)
   Source      torch: _to_dtype_if_needed */
FSDP_API const void *fsdp_cast_if_needed(void *dst, fsdp_dtype dtype, const void *src,
                                         fsdp_dtype src_dtype, int64_t count);

/* fsdp_cast_floating - as fsdp_cast_if_needed; if src is not floating, it is not cast
   Result      the pointer to use
   Source      torch: _cast_fp_tensor */
FSDP_API const void *fsdp_cast_floating(void *dst, fsdp_dtype dtype, const void *src,
                                        fsdp_dtype src_dtype, int64_t count);

/* fsdp_status_name - "FSDP_ERR_TIMEOUT" and so on; "FSDP_?" if the value is not a status */
FSDP_API const char *fsdp_status_name(fsdp_status status);

/* fsdp_status_text - one sentence for people, from FSDP_STATUS_LIST */
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
   Source      torch: torch.chunk semantics, FSDPParam._init_sharded_param */
FSDP_API fsdp_status fsdp_shard_range(int64_t dim_size, int world, int rank, fsdp_range *out);

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
    int64_t direct_numel;    // in: a dim-0 parameter of at least that many elements is direct
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
   Source      torch: foreach_all_gather, foreach_all_gather_copy_out, foreach_reduce (chunk_cat) */
FSDP_API fsdp_status fsdp_layout_params(fsdp_layout *layout, fsdp_layout_param *params, int count,
                                        fsdp_seg *segs, fsdp_block *blocks);

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_H

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

// Zero every desc (FSDP_ZERO) before you fill it: a field of 0 is the default that its comment
// tells; what has no default is refused. Only descs of optimizers begin with a function instead, as
// fsdp_adamw_defaults(). size 0 means sizeof of this header's struct. Canaries stay 0.
typedef struct fsdp_world_desc {
    uint32_t size, start_canary;
    int32_t rank, world_size; // world_size 0: from the environment; if none is set, a world of 1
    int32_t local_rank;       // rank on this host; ignored if world_size is 0
    int32_t timeout_ms;       // deadline of every wait. 0: FSDP_TIMEOUT_MS or its default
    int32_t comm_threads;     // 1 or 2: threads that run collectives. -1: inline.
                              // 0: FSDP_COMM_THREADS or its default (ENVIRONMENT)
    int32_t log_level;        // 0: FSDP_LOG_LEVEL (error warn info none), else FSDP_LOG_WARN
    const char *backend;      // NULL: FSDP_BACKEND, or the first compiled-in one but "fake"
    const char *job;          // equal on all ranks, and no other world's. NULL: that of the
                              // launcher; then rank and world_size have to be the launcher's, too
    const char *store;        // where ranks of several hosts meet: "tcp://HOST:PORT", or
                              // "file:///PATH"; "host:": one host. NULL: FSDP_STORE, launcher's
    fsdp_threads *threads;    // NULL: ranks are processes
    fsdp_allocator allocator; // NULL members: malloc, free
    fsdp_logger logger;       // NULL member: stderr as "[fsdp r3] text"
    fsdp_clock clock;         // NULL member: the monotonic clock
    const fsdp_comm_ops *comm_ops;     // NULL: those of the backend
    const fsdp_device_ops *device_ops; // NULL: the host
    void *user;                        // argument of comm_ops->open and device_ops->open
    const char *flight_record; // directory of the flight record (docs/observability.md), made if
                               // its parent exists. NULL: FSDP_FLIGHT_RECORD, or no record
    uint64_t end_canary;
} fsdp_world_desc;

/* fsdp_init - join the job
   desc        NULL or all zero: rank, size and the job's name are the launcher's (ENVIRONMENT). If
               nothing is set, the world has 1 rank
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
               the end of the process
   Source      torch: torch.distributed.destroy_process_group */
FSDP_API fsdp_status fsdp_shutdown(fsdp_world *world);

/* fsdp_set_stream - say which stream your own work uses, on a device that has streams. Gathered
   data is ready in its order. The library uses what you wrote after the work before it
   native      a stream of the device (CUDA: cudaStream_t). It must live until you set another one
               or the world ends. NULL: the device's default (CUDA: cudaStreamLegacy, which orders
               kernels that you launch without a stream)
   Result      FSDP_OK; INVALID_ARG, UNSUPPORTED (the device has no streams), BACKEND
   Blocks      no: the new stream waits for the old one
   Source      torch: torch.cuda.stream, the current stream at each hook */
FSDP_API fsdp_status fsdp_set_stream(fsdp_world *world, void *native);

/* fsdp_abort - abort this world on all ranks: every wait ends with FSDP_ERR_ABORTED
   why         part of the error text on all ranks; NULL: "no reason given"
   Thread      any, also while another one uses it
   Source      torch: ProcessGroup.abort */
FSDP_API void fsdp_abort(fsdp_world *world, const char *why);

typedef int (*fsdp_rank_fn)(fsdp_world *world, void *arg); // returns 0 for success

typedef struct fsdp_spawn_desc {
    uint32_t size, start_canary;
    int32_t num_ranks;            // 1 .. 256
    int32_t threads;              // 1: ranks are threads of this process; 0: forked processes
    int32_t grace_ms;             // time to end for the others after a rank fails. 0: 1000
    const fsdp_world_desc *world; // NULL: defaults. fsdp_spawn sets rank, world_size, job, threads
    uint64_t end_canary;
} fsdp_spawn_desc;

/* fsdp_spawn - start num_ranks ranks without a launcher and wait until all have ended
   fn          each rank calls it once with its world; fsdp_spawn shuts the world down afterwards
   arg         handed to fn
   Result      FSDP_OK if every rank returned 0. Otherwise that of the first rank that failed: the
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
   Thread      any */
FSDP_API int fsdp_rank(const fsdp_world *world);
FSDP_API int fsdp_world_size(const fsdp_world *world);
FSDP_API int fsdp_local_rank(const fsdp_world *world);

/* fsdp_last_error - text of the last failure of this world
   world       NULL: this thread's last failure without a world (fsdp_init, fsdp_spawn)
   Result      never NULL; "" if nothing failed. The text is valid until the next call on that world
               that fails. After an abort it stays the text of the failure that aborted the world */
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
   Source      torch: torch.distributed.all_reduce */
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
    const int32_t *ranks;             // the rank of each place; NULL: 0, 1, 2, ... row-major
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
   Result, Allocates  as fsdp_mesh_create
   Source      torch: init_device_mesh with one dim */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_mesh_1d(fsdp_world *world, const char *name,
                                                  fsdp_mesh **mesh);

/* fsdp_mesh_ndim - number of dims
   fsdp_mesh_size - number of ranks along a dim; dim -1: in the whole mesh
   fsdp_mesh_rank - this rank's position along a dim; -1: it is outside the mesh, or no such dim
   Thread      any
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
   Thread      any
   Source      torch: DeviceMesh.get_all_groups, .mesh, __eq__ */
FSDP_API int fsdp_mesh_dim(const fsdp_mesh *mesh, const char *name);
FSDP_API int fsdp_mesh_ranks(const fsdp_mesh *mesh, int dim, int32_t *out);
FSDP_API int fsdp_mesh_equal(const fsdp_mesh *a, const fsdp_mesh *b);

/* fsdp_mesh_slice - the sub-mesh of some dims that contains this rank. It shares the mesh's groups
   dims        num_dims indices, increasing (fsdp_mesh_dim finds the index of a name)
   out         the world owns it
   Result      FSDP_OK; INVALID_ARG (a dim out of range or not increasing), OUT_OF_MEMORY
   Allocates   yes      Source torch: DeviceMesh.__getitem__ */
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

// The use of a mesh by a unit: FSDP shards over one dim, DDP replicates over one, HSDP does both.
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
   Source      torch: DataParallelMeshInfo, FSDPMeshInfo, DDPMeshInfo, HSDPMeshInfo */
FSDP_API fsdp_status fsdp_mesh_info_init(const fsdp_mesh *mesh, int kind, int shard_dim,
                                         int replicate_dim, fsdp_mesh_info *out);

/* -------------------------------------------------------------------------------------------- */
/* Model, units and parameters.                                                                   */

// Values of reshard_after_forward. An integer n >= 2 that divides the shard group keeps 1/n of the
// gathered parameters after forward; in backward the unit then gathers over n neighbouring ranks.
enum {
    FSDP_RESHARD_DEFAULT = 0, // in a unit: as the model; in a model: ALWAYS. So `false` is no NEVER
    FSDP_RESHARD_ALWAYS = 1,  // free the gathered parameters after forward
    FSDP_RESHARD_NEVER = -1   // keep them until the unit's post_backward
};

// Values of implicit_prefetch: in pre_backward start to gather the unit whose forward came before.
enum {
    FSDP_PREFETCH_DEFAULT = 0, // if comm threads or streams can hide it
    FSDP_PREFETCH_ALWAYS = 1,  // inline, too: PyTorch's sequence of events
    FSDP_PREFETCH_NEVER = -1
};

#define FSDP_DIRECT_NEVER INT64_MAX // for fsdp_model_desc.direct_min

typedef struct fsdp_model_desc {
    uint32_t size, start_canary;
    const fsdp_mesh *mesh;         // NULL: 1-D over all ranks. 1-D: FSDP; 2-D with named dims: HSDP
    const fsdp_mesh_info *mesh_info; // for other dims, or to replicate only; then mesh is ignored
    fsdp_dtype param_dtype;        // dtype of gathered parameters and gradients; KEEP: their own
    fsdp_dtype reduce_dtype;       // dtype of the reduction; KEEP: that of shard gradients
    fsdp_dtype grad_dtype;         // dtype of shard gradients; KEEP: the parameter's own
    fsdp_dtype output_dtype;       // dtype that fsdp_cast_forward_output makes; KEEP: no cast
    int32_t keep_forward_inputs;   // 1: fsdp_cast_forward_input does not cast
    int32_t reshard_after_forward; // FSDP_RESHARD_*, or n
    int32_t reserved;
    int32_t cpu_offload;           // 1: shards and their gradients are in (pinned) host memory
    int32_t implicit_prefetch;     // FSDP_PREFETCH_*
    int32_t debug;                 // 1: fill released buffers with NaN patterns (MISTAKES)
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
   Allocates   yes      Source torch: fully_shard of the root module */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_model_create(fsdp_world *world,
                                                       const fsdp_model_desc *desc,
                                                       fsdp_model **model);

/* fsdp_model_destroy - free a model with its units and buffers; NULL is allowed
   Collective  yes: every rank of the mesh, same order      Blocks for operations under way */
FSDP_API void fsdp_model_destroy(fsdp_model *model);

typedef struct fsdp_param_view fsdp_param_view;

/* A gather extension gathers something else than a parameter's shard: up to four byte strings of
   each rank, for example quantised values and their scales. The library calls it in the order of
   the unit's gathers: at once, in a comm thread, or on a device with streams to
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
    fsdp_dtype dtype;             // the shard's: one for all trainables of a unit. KEEP: f32
    int32_t ndim;                 // 0..FSDP_MAX_DIMS; 0: a scalar, kept as a vector of one
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
               negative size, an integer parameter that requires a gradient, or one that another
               unit replicates), UNSUPPORTED, INVALID_STATE (the model is committed),
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
   Source      torch: FSDPParamGroup.mesh_info */
FSDP_API fsdp_status fsdp_unit_mesh_info(const fsdp_unit *unit, fsdp_mesh_info *out);
FSDP_API fsdp_status fsdp_model_mesh_info(const fsdp_model *model, fsdp_mesh_info *out);

/* fsdp_model_commit - lay out and allocate shards and gradients, filled with zeros. A second call
   does nothing. If you do not call it, the first hook, init_params, load, flat or view does
   Result      FSDP_OK; INVALID_STATE (no units), OUT_OF_MEMORY (the text has the sizes), collective
               errors. If it fails on one of several ranks, the world is aborted: no rank waits
   Collective  yes: every rank of the mesh      Allocates yes
   Source      torch: FSDPState._lazy_init */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_model_commit(fsdp_model *model);

/* fsdp_model_reserve - allocate the buffers of forward and backward now, not at their first use
   Result      FSDP_OK; OUT_OF_MEMORY, collective errors
   Collective  yes: every rank of the mesh      Allocates yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_model_reserve(fsdp_model *model);

// A parameter, or a block of rows of one, on this rank.
struct fsdp_param_view {
    fsdp_unit *unit;
    const char *name, *unit_name;
    void *user, *unit_user;             // from the descs
    int32_t ordinal;                    // its index among all parameters of the model, in the order
                                        // of units (DDP: of buckets; see fsdp_replicate_param)
    int32_t index;                      // its index in the unit
    fsdp_dtype dtype, grad_dtype;       // that of data and shard; that of shard_grad
    int32_t ndim, shard_dim, requires_grad;
    int32_t has_hook;                   // 1: of fsdp_set_post_accumulate_hook
    int64_t shape[FSDP_MAX_DIMS];       // full
    int64_t start[FSDP_MAX_DIMS];       // first index of the block in the full tensor
    int64_t local_shape[FSDP_MAX_DIMS]; // the block's shape; in an empty shard 0 along shard_dim
    int64_t numel;                      // elements of the block, without padding
    void *data;                         // the block: contiguous, shape local_shape
    void *shard;                        // this rank's whole shard; never NULL. Device memory
    void *shard_grad;                   // its gradient, device memory. NULL: there is none, or (but
                                        // in hooks) finalize_backward has not run yet
};

/* fsdp_view_index - row-major index of element k of the view's block in the full tensor; NULL: -1
   Thread      any */
FSDP_API int64_t fsdp_view_index(const fsdp_param_view *view, int64_t k);

/* fsdp_view_data_f32, fsdp_view_shard_f32, fsdp_view_grad_f32 - data, shard and shard_grad of a
               view as floats
   fsdp_view_data_as, fsdp_view_shard_as, fsdp_view_grad_as - the same in `dtype`; in C++ also
               fsdp_view_data_as<float>(view), ...
   Result      the field of the view. If it has another dtype, valid memory as fsdp_data_as gives,
               and fsdp_finalize_backward reports the failure. NULL: the field or view is NULL */
FSDP_API void *fsdp_view_data_as(const fsdp_param_view *view, fsdp_dtype dtype);
FSDP_API void *fsdp_view_shard_as(const fsdp_param_view *view, fsdp_dtype dtype);
FSDP_API void *fsdp_view_grad_as(const fsdp_param_view *view, fsdp_dtype dtype);
static inline float *fsdp_view_data_f32(const fsdp_param_view *view) {
    return (float *)fsdp_view_data_as(view, FSDP_F32);
}
static inline float *fsdp_view_shard_f32(const fsdp_param_view *view) {
    return (float *)fsdp_view_shard_as(view, FSDP_F32);
}
static inline float *fsdp_view_grad_f32(const fsdp_param_view *view) {
    return (float *)fsdp_view_grad_as(view, FSDP_F32);
}

typedef void (*fsdp_init_fn)(void *user, const fsdp_param_view *block);

/* fsdp_init_params - fill the parameters with your function, a block of rows at a time: the whole
   model is never in memory. Ends with fsdp_params_changed
   fn          fills block->data: host memory, block->dtype, block->local_shape at block->start. The
               library calls it for consecutive blocks of this rank's rows, of at most fill_bytes
               but at least one row, and never for an empty block
   Result      FSDP_OK; INVALID_STATE (a unit is not idle, or holds gradients that are not
               reduced), errors of commit
   Collective  as fsdp_model_commit      Allocates as commit
   Blocks      on GPUs until the rows are copied, at most timeout_ms for each block
   Source      torch: Module.to_empty, reset_parameters on DTensors */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_init_params(fsdp_model *model, fsdp_init_fn fn,
                                                      void *user);

/* fsdp_param_view_get - view of parameter `index` of a unit; data and shard are equal
   fsdp_param_at       - view of parameter `ordinal` of the model
   Result      FSDP_OK; INVALID_ARG, errors of commit
   Collective  as fsdp_model_commit at the first use, then no      Allocates as commit
   Source      torch: the sharded nn.Parameter(DTensor), _from_local_no_grad */
FSDP_API fsdp_status fsdp_param_view_get(fsdp_unit *unit, int index, fsdp_param_view *out);
FSDP_API fsdp_status fsdp_param_at(fsdp_model *model, int ordinal, fsdp_param_view *out);

/* fsdp_next_param - step through all parameters. Start with a zeroed view
   Result      1: the view is the next parameter's; 0: there is none, or commit failed
   Collective  as fsdp_model_commit at the first use, then no
   Allocates as commit      Source torch: Module.parameters */
FSDP_API int fsdp_next_param(fsdp_model *model, fsdp_param_view *view);

/* fsdp_num_params, fsdp_num_units - of the model; 0 for NULL
   fsdp_unit_name  - as it was given; "" for NULL; valid until the model ends
   fsdp_unit_label - the same as texts and fsdp_op.what have it: "(root)" for the name "" */
FSDP_API int fsdp_num_params(const fsdp_model *model);
FSDP_API int fsdp_num_units(const fsdp_model *model);
FSDP_API const char *fsdp_unit_name(const fsdp_unit *unit);
FSDP_API const char *fsdp_unit_label(const fsdp_unit *unit);

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
   Collective  as fsdp_model_commit at the first use, then no      Allocates as commit */
FSDP_API fsdp_status fsdp_model_flat(fsdp_model *model, fsdp_dtype dtype, fsdp_flat *out);

/* fsdp_param_load - copy this rank's rows from a full tensor; ends with fsdp_params_changed, unless
     it comes before the first commit
   full        host memory, the parameter's shape and dtype, row-major. You may free it afterwards
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle, or holds gradients that are
               not reduced), OUT_OF_MEMORY
   Before the first commit   it does not commit: the rows wait in host memory, and fsdp_fully_shard
               may add units. So a model is built with the memory of its shards and one unit. The
               first commit copies the rows, then allocates gradients: trainable units need at most
               one unit more than the model has afterwards. If it fails, the values stay
   Collective  no      Allocates before the first commit: the shard of this parameter
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

/* fsdp_params_writable - wait until nothing reads the shards, here and on the peers: prefetches and
               gathers of fsdp_unshard under way do. Call it before you write shards
   fsdp_params_changed - say that you have written shards (own optimizer, own load)
   Effect      changed: later gathers run after your writes. Unsharded copies, also those under way,
               are stale: the next fsdp_unshard or pre_* gathers again. Until then fsdp_data gives
               the old values
   Result      FSDP_OK; changed: INVALID_STATE (a unit is not idle); writable: collective errors. On
               devices with streams you may then write shards in the order of your stream, or on the
               host if fsdp_update_place gives FSDP_MEMORY_HOST
   Collective  no, but every rank has to do the same
   Blocks      writable: for operations under way that read shards; changed: no */
FSDP_API fsdp_status fsdp_params_writable(fsdp_model *model);
FSDP_API fsdp_status fsdp_params_changed(fsdp_model *model);

/* fsdp_model_broadcast - copy the parameters of one replica, and what optimizers and averages keep
   of them, to all others (HSDP; units that replicate), between steps; ends with
   fsdp_params_changed. Replicas average gradients and not parameters: if they begin with different
   values, they stay different. So the first fsdp_finalize_backward compares them, and logs if they
   differ. What you load later is not compared
   unit        NULL: all units. A unit that does not replicate is left as it is
   root        position of that replica along the replicate dim, 0 .. number of replicas - 1
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle), MISMATCH (a unit has other
               parameters on another rank, or in another order; nothing is copied), errors of
               commit; collective errors
   Collective  yes: every rank of the mesh      Blocks yes, at most timeout_ms for each step
   Allocates   as commit
   Source      torch: _sync_module_states, DistributedDataParallel's init_sync */
FSDP_API fsdp_status fsdp_model_broadcast(fsdp_model *model, fsdp_unit *unit, int root);

/* -------------------------------------------------------------------------------------------- */
/* Training step. A call in a wrong order returns INVALID_STATE: the text names the call that is
   missing (ERRORS says what follows). All hooks are collective: every rank of the mesh calls them
   in the same order.                                                                             */

/* fsdp_pre_forward - gather the unit's parameters: you may read fsdp_data
   Recompute   of an activation checkpoint, too: between pre_backward and post_backward of this
               unit, or in the backward of other units after a forward of this one
   Result      FSDP_OK; INVALID_STATE; OUT_OF_MEMORY; collective errors
   Collective  yes      Blocks until gathered (not with streams)      Allocates at its first use
   Source      torch: FSDPState._pre_forward, FSDPParamGroup.pre_forward */
FSDP_API fsdp_status fsdp_pre_forward(fsdp_unit *unit);

/* fsdp_post_forward - you have finished reading; frees the parameters (reshard_after_forward)
   Result      FSDP_OK; INVALID_STATE
   Collective  yes      Allocates only to grow the record of forwards
   Source      torch: FSDPState._post_forward, FSDPParamGroup.post_forward */
FSDP_API fsdp_status fsdp_post_forward(fsdp_unit *unit);

/* fsdp_pre_backward - gather the unit's parameters again. fsdp_grad is zero or holds gradients of
   earlier microbatches. With comm threads or streams it starts to gather the unit before it
   Result      FSDP_OK; INVALID_STATE (for example, no grad-enabled forward of the unit waits for a
               backward); OUT_OF_MEMORY; collective errors
   Collective  yes      Blocks until gathered (not with streams)      Allocates at its first use
   Source      torch: FSDPState._pre_backward, FSDPParamGroup.pre_backward */
FSDP_API fsdp_status fsdp_pre_backward(fsdp_unit *unit);

/* fsdp_post_backward - you have finished writing gradients. It frees the parameters. If gradient
   sync is on, it averages gradients over the ranks and adds them to the shards' gradients
   Result      FSDP_OK; INVALID_STATE; OUT_OF_MEMORY; collective errors
   Collective  yes      Blocks inline: until reduced; with comm threads or streams: no
   Allocates   at its first use      Source torch: FSDPParamGroup.post_backward, foreach_reduce */
FSDP_API fsdp_status fsdp_post_backward(fsdp_unit *unit);

/* fsdp_finalize_backward - end backward: finish units that are still open in backward, free what is
   left; then every sharded gradient is ready
   Result      FSDP_OK; INVALID_STATE (the text names a unit that is open in forward); collective
               errors. If it succeeds itself, it returns the first failure of a hook or setter
               since the last finalize that succeeded
   Collective  yes      Blocks until all reductions are done; on devices with streams only with
               cpu_offload      Allocates at its first use
   Replicas    the first one compares the shards of replicas (fsdp_model_broadcast). On devices it
               waits, and copies them to the host piece by piece
   Source      torch: FSDPState._root_post_backward_final_callback, finalize_backward */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_finalize_backward(fsdp_model *model);

/* fsdp_data_f32 - the full parameter `index`: contiguous, valid from pre_* to post_*
   fsdp_grad_f32 - where you write its gradient: same shape and dtype, valid from pre_backward to
               post_backward. It marks the parameter as used. NULL for a frozen parameter
   fsdp_data_as, fsdp_grad_as - the same in `dtype`, for example FSDP_BF16. In C++ also
               fsdp_data_as<float>(unit, index), which gives a float *
   fsdp_data, fsdp_grad - the same in whatever dtype it has, unchecked: for code that asks
               fsdp_data_dtype, or takes any dtype
   Result      memory of the library, on GPUs of the device, ready in the order of your stream. In a
               wrong state, with a wrong index or dtype it is valid memory with undefined contents,
               as after an abort (ERRORS); a step logs a text once for each unit and call. NULL:
               unit is NULL, or there is no memory for such contents. Never NULL for a parameter of
               size zero. Addresses are multiples of 64 bytes, on GPUs of 256. If steps have the
               same order of calls, they repeat from the second step on
   Allocates   at the first failure
   Source      torch: FSDPParam.unsharded_param, unsharded_param.grad */
FSDP_API void *fsdp_data_as(fsdp_unit *unit, int index, fsdp_dtype dtype);
FSDP_API void *fsdp_grad_as(fsdp_unit *unit, int index, fsdp_dtype dtype);
static inline float *fsdp_data_f32(fsdp_unit *unit, int index) {
    return (float *)fsdp_data_as(unit, index, FSDP_F32);
}
static inline float *fsdp_grad_f32(fsdp_unit *unit, int index) {
    return (float *)fsdp_grad_as(unit, index, FSDP_F32);
}
FSDP_API void *fsdp_data(fsdp_unit *unit, int index);
FSDP_API void *fsdp_grad(fsdp_unit *unit, int index);

/* fsdp_data_dtype - the dtype of fsdp_data and fsdp_grad: the parameter's own, or param_dtype
   Result      KEEP (0): unit is NULL or has no such parameter, which is logged;
               fsdp_finalize_backward reports the failure
   Source      torch: unsharded_param.dtype */
FSDP_API fsdp_dtype fsdp_data_dtype(fsdp_unit *unit, int index);

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
   keeps gradients of microbatches that are not reduced yet, as PyTorch does, and logs that (below)
   Result      FSDP_OK; INVALID_STATE (a unit is not idle)
   Collective  no, but every rank has to do the same
   Source      torch: Optimizer.zero_grad */
FSDP_API fsdp_status fsdp_zero_grad(fsdp_model *model);

/* fsdp_set_grad_none - drop the sharded gradient of one parameter: optimizers and clipping leave it
   out, and fsdp_param_view.shard_grad is NULL. Its memory is zero from here on, so that the next
   reduction finds nothing to add to. Gradients that are not reduced yet stay
   Result      FSDP_OK, also if it has none; INVALID_ARG; INVALID_STATE (the unit is not idle, or
               the model's backward has not ended)
   Collective  no, but every rank has to do the same      Blocks with cpu_offload: until it is zero
   Allocates   no      Source torch: param.grad = None */
FSDP_API fsdp_status fsdp_set_grad_none(fsdp_unit *unit, int index);

/* fsdp_clip_grads - find the norm of all gradients over all ranks, and scale them to at most
   max_norm
   fsdp_clip_grad_norm - the same with the 2-norm
   fsdp_grad_norm - the norm that the last of these calls found
   norm        out: the norm before clipping, the same on every rank. NULL: on GPUs the host does
               not wait; call fsdp_grad_norm later, for example where you read a step's loss
   Arithmetic  |g|^p is summed in f64, parameter by parameter in order, ranks in rank order: every
               layout gives the same bits. The coefficient is max_norm/(norm + 1e-6), at most 1.
               A GPU adds in another order, which is fixed, too: sums differ from the host's by at
               most 1e-13 (relative), or 1e-12 if f64 is slow there. If p is none of 1, 2 and
               infinity, the root is taken by pow, which differs between processors: clipped
               gradients then differ, after equal sums, by at most one unit in the last place of
               bf16 and f16, two of f32 and eight of f64; otherwise by none
   Meshes      the norm counts each element of all ranks of the model's mesh once. Ranks along a
               unit's replicate dim hold copies, so one of them counts. All other ranks hold other
               elements and count: along the shard dim, along dims that do neither, and ranks that
               the unit's mesh lacks. With tensor parallelism a unit whose parameters are equal on
               all tp ranks (norms, biases) needs a mesh_info that replicates over tp
               (docs/from-pytorch.md). If the model's mesh is a slice, as dp of (dp, tp), the
               library does not know what the other ranks hold, and refuses: give mesh_info on the
               mesh that you sliced. A mesh of fsdp_mesh_create is taken as whole, even if it lacks
               ranks of the world.
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

/* GRADIENTS THAT ARE NOT REDUCED stay in a unit until its next reduction, which adds them to its
   own: those of another window, if you turn sync on in the wrong microbatch or leave a window out.
   So fsdp_zero_grad, fsdp_clip_grads, fsdp_params_changed and the steps of optimizers log once for
   each model and call that a unit holds some. Loads, freezes and casts fail with INVALID_STATE.  */

/* fsdp_model_reset - make every unit IDLE and SHARDED after an interrupted step. It drops
   gradients, reduced ones included, and microbatches that are not reduced
   Result      FSDP_OK; if the world is aborted, its status
   Collective  no, but every rank has to do the same      Blocks for operations under way
   Source      torch: reset_iter_state */
FSDP_API fsdp_status fsdp_model_reset(fsdp_model *model);

/* Setters. Those with a unit (NULL: every unit) need it IDLE or POST_BACKWARD; the others any time.
   fsdp_set_grad_enabled           0: a forward is evaluation, and no backward follows it.
                                   fsdp_is_grad_enabled tells
   fsdp_set_is_last_backward       0: another backward follows, maybe over the same forward:
                                   finalize keeps the record of forwards and gathers under way
   fsdp_set_requires_gradient_sync 0: post_backward does not reduce; the rank keeps its gradients
                                   (no_sync). It sets requires_all_reduce to the same value.
                                   fsdp_requires_gradient_sync: 1 if both are set; NULL: 0
   fsdp_set_requires_all_reduce    0, HSDP: post_backward keeps and adds up the sums of the shard
                                   group; a later one reduces them over the replicas. With one
                                   shard: as without sync. Without replicas: no effect
   fsdp_set_reshard_after_forward  FSDP_RESHARD_ALWAYS or _NEVER, or the n that all of these units
                                   were made with. fsdp_unit_desc_get tells a unit's present one:
                                   for generation keep each, set NEVER, and set each again
   fsdp_set_reshard_after_backward 0: parameters stay gathered after backward
   fsdp_set_unshard_in_backward    0: pre_backward does not gather; backward needs no parameters
   fsdp_set_gradient_divide_factor from the next post_backward on gradients are sums divided by
                                   this factor; 0: by the number of ranks
   fsdp_set_reduce_scatter_unused_params what happens to a parameter that this rank does not use:
                                   it does not call fsdp_grad of it in backward. 0 (default): the
                                   parameter has no gradient, and a unit whose parameters are all
                                   unused is not reduced; all ranks must use the same parameters
                                   (checked: FSDP_ERR_MISMATCH). 1: a backward of a unit gives all
                                   of its trainable parameters a gradient, zeros where this rank
                                   writes none; all ranks must call the unit's hooks
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE
   Collective  no, but every rank has to do the same
   Source      torch: FSDPModule methods of the same names, torch.set_grad_enabled */
FSDP_API fsdp_status fsdp_set_grad_enabled(fsdp_model *model, int enabled);
FSDP_API int fsdp_is_grad_enabled(const fsdp_model *model);
FSDP_API fsdp_status fsdp_set_is_last_backward(fsdp_model *model, int is_last);
FSDP_API fsdp_status fsdp_set_requires_gradient_sync(fsdp_model *model, fsdp_unit *unit, int sync);
FSDP_API int fsdp_requires_gradient_sync(const fsdp_unit *unit);
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
   Collective  no, but every rank has to do the same      Allocates yes
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
   Result      FSDP_OK; INVALID_ARG (integer parameter; trainables of its unit are stored in another
               dtype), INVALID_STATE (a unit is not idle, or holds gradients that are not reduced),
               OUT_OF_MEMORY, collective errors
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

/* Hooks of a unit. They run where its reductions run: at once, in a comm thread, or on a device
   with streams to enqueue work on `stream`. In a comm thread a hook must not call functions that
   take the world, the model or a unit. If a hook does not return FSDP_OK, the world is aborted with
   its status.
   fsdp_set_all_reduce_hook   gets the summed gradients before they are divided (in f16: after, if
                              the backend divides), after the all-reduce of HSDP: numel elements of
                              dtype, in the order of shards
   fsdp_set_post_accumulate_hook  runs when a parameter's shard gradient is ready, but not if no
                              rank used the parameter. It may write the shard: an optimizer in
                              backward
   fsdp_set_custom_all_gather, fsdp_set_custom_reduce_scatter  replace ops->run(comm, coll)
   fsdp_set_custom_all_reduce  replaces it for a unit's all_reduce over its replicas, in place:
                              coll->count elements of coll->dtype at coll->dst, the gradients of
                              the trainable parameters in the order of their shards. The hook makes
                              them sums over the group; the library divides
   hook        NULL: none
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE
   Collective  no, but every rank has to do the same      Blocks for operations under way
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
   Source      torch: TrainingState, ShardedState */
FSDP_API fsdp_training_state fsdp_unit_state(const fsdp_unit *unit);
FSDP_API fsdp_storage_state fsdp_unit_storage(const fsdp_unit *unit);

/* fsdp_set_unit_callback - call fn when the unit's parameters become readable, and before they
     cease to be, for an autograd that keeps pointers to them
   fn          readable 1: fsdp_data works, also in fn; on a device for work on your stream.
               readable 0: the pointers are stale when fn has returned, whatever ends them: post_*,
               finalize, reset, reshard, freezing, a cast, a failure of the world, destroy. fn must
               call nothing but getters. The calling thread calls it, also with a plan. NULL: none.
               If the parameters are readable now, the old fn gets 0 and the new one 1
   Result      FSDP_OK; INVALID_ARG (unit is NULL), the failure of the world
   Collective  no      Allocates no
   Source      torch: FSDPParam.unsafe_setattr_param, which does this for a module in Python */
typedef void (*fsdp_unit_callback)(fsdp_unit *unit, int readable, void *user);
FSDP_API fsdp_status fsdp_set_unit_callback(fsdp_unit *unit, fsdp_unit_callback fn, void *user);

/* -------------------------------------------------------------------------------------------- */
/* Ops are data: everything that a call does is an op. An observer sees it, a comm thread queues it,
   ranks compare signatures that derive from it, and error texts are made of it. */

#define FSDP_OP_LIST(X)                                                                           \
    X(COPY, "copy")                   /* 2-D blocks: cast, scale, accumulate */                   \
    X(ZERO, "zero")                   /* bytes of dst */                                          \
    X(NORM, "norm")                   /* sum of |x|^p over src blocks, or maximum */              \
    X(ALL_GATHER, "all_gather")                                                                   \
    X(REDUCE_SCATTER, "reduce_scatter")                                                           \
    X(ALL_REDUCE, "all_reduce")                                                                   \
    X(BROADCAST, "broadcast")                                                                     \
    X(ALL_TO_ALL, "all_to_all")       /* these three: backends that have them, for extensions */  \
    X(SEND, "send")                                                                               \
    X(RECV, "recv")                                                                               \
    X(WAIT, "use")                    /* marker: the caller's stream waits for src */             \
    X(CALL, "call")                   /* calls a function of the user, in the stream's order */   \
    X(UPDATE, "update")               /* list: fsdp_updates, by `call` or by the device */        \
    X(HOOK, "hook")                   /* marker: a public call begins; count is FSDP_CALL_* */    \
    X(ACQUIRE, "acquire")             /* marker: the unit holds dst from here on */               \
    X(RELEASE, "release")             /* marker: `stream` has used src for the last time */       \
    X(GRADS_WRITTEN, "wrote")         /* marker: the caller has written dst */

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
    FSDP_STREAM_EXTENSION, // used by extensions; begins with its first op
    FSDP_STREAM_COUNT
};

// A position in a stream's order. With comm threads: its seq-th op; on a device: its seq-th mark.
// 0: none.
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
    X(DIRECT_MIN, "direct_min") X(MESH, "sizes of the mesh")                                      \
    X(FACTOR, "gradient divide factor")                                                           \
    X(USED, "parameters that have a gradient (fsdp_set_reduce_scatter_unused_params)")            \
    X(ACCUMULATE, "gradients of earlier steps (zero_grad)") X(STEP, "number of finished steps")   \
    X(GIVEN, "lr or another setting of the optimizer or clip, or how often it stepped (fsdp_agree)")
#define FSDP_X(name, text) FSDP_AGREE_##name,
enum { FSDP_AGREE_LIST(FSDP_X) FSDP_AGREE_COUNT };
#undef FSDP_X

// Markers, HOOK and those after it, show what happens and wait for nothing. The library makes them
// only if an extension sees records.
typedef struct fsdp_op {
    uint64_t seq;             // number in this rank's model, or world. Ranks may differ in it
    uint64_t bytes;           // collectives: to be received from other ranks (all_reduce: 2 (R-1)/R
                              // of the whole, rounded up); copies, zero: to be written
    int64_t waited_ns;        // in fsdp_extension.ran: its stream waited here for other streams
    uint64_t count;           // elements: gather, scatter: per rank; others: of the whole
    uint8_t kind, label, stream, state; // FSDP_OP_*, FSDP_LABEL_*, FSDP_STREAM_*, training state
    uint8_t dtype, out_dtype, accumulate, in_place;
    uint8_t redop, fill;      // ALL_REDUCE: FSDP_SUM, ...; ZERO: the byte that is written
    uint8_t timed, pool;      // timed: 1: an extension gets the times when it ran; pool: of slot
    int32_t root;             // BROADCAST: place of the root. CALL: index of the parameter, or -1
    int32_t group_size;       // collectives: number of ranks
    uint16_t comm_number;     // number of comm in the order of creation; 1: the world's; 0: none
    uint8_t num_waits, custom; // used elements of wait; 1: fsdp_set_custom_... gave its function
    double scale;             // factor of the (summed) input, in the arithmetic's type; 1: none
    double factor, share;     // reductions: the unit's gradient divide factor, 0: none. If share is
                              // not 0, scale is share / factor: a replay renews both
    double norm_type;         // NORM, and clip: p; INFINITY: the maximum
    const double *clip;       // COPY: NULL, or what NORM has found, in device memory. Then `scale`
                              // is the largest norm; factor: scale/(norm + 1e-6) if < 1, or NaN
    uint32_t list_count;
    int32_t slot;             // ACQUIRE, RELEASE, GRADS_WRITTEN: the buffer's number in its pool
    fsdp_model *model;        // NULL: the op is the world's: a collective on host data, a transfer
    const fsdp_unit *unit;    // NULL: the op is the model's
    const char *what;         // name of the unit or of the call
    uint64_t what_hash, step, given; // hash of the unit's desc, number of finalizes, hash of what
                              // fsdp_agree was given: ranks must agree
    uint8_t agree[FSDP_AGREE_COUNT]; // hashes of the parts of what_hash, for texts
    const char *unused;       // reductions: name of the first parameter without a gradient, or NULL
    fsdp_comm *comm;          // collectives: where
    fsdp_buf *src, *dst;      // the op waits for their events, and sets them; NULL: none
    const void *list;         // prebuilt: fsdp_block[] (COPY, NORM), fsdp_seg[] (collectives), or
                              // fsdp_update[] (UPDATE)
    const void *src_ptr;      // fixed at issue: a slot may change hands before a worker runs the op
    void *dst_ptr;
    fsdp_status (*call)(const struct fsdp_op *op, void *stream); // CALL; UPDATE by the host
    fsdp_event wait[2];       // num_waits of them; the library derives them
} fsdp_op;

/* fsdp_op_name, fsdp_label_name - for example "reduce_scatter", "copy_in"; "?" out of range. For a
   label of an extension "extension": fsdp_op_label gives its name
   Thread      any */
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
    X(SHARD_GRAD, "shard gradients")                                                              \
    X(GATHER, "gathered parameters")                                                              \
    X(SLICE, "parameters kept after forward")                                                     \
    X(GRAD, "full gradients")                                                                     \
    X(REDUCE_IN, "reduce input")                                                                  \
    X(REDUCE_OUT, "reduce output")                                                                \
    X(SCRATCH, "scratch")             /* norms, and the steps of param_full */

enum {
#define FSDP_X(name, text) FSDP_POOL_##name,
    FSDP_POOL_LIST(FSDP_X)
#undef FSDP_X
    FSDP_POOL_COUNT
};

enum { FSDP_POOL_MAX = FSDP_POOL_COUNT + 8 }; // with those of extensions (fsdp_pool_register)

// Bytes of device memory by pool. Pools only grow, so current is also the peak; only
// fsdp_pools_trim shrinks them.
typedef struct fsdp_memory {
    int64_t pool_bytes[FSDP_POOL_MAX];
    int32_t pool_slots[FSDP_POOL_MAX];
    int64_t total_bytes;     // bytes of all pools
    int64_t host_bytes;      // host memory: the library's tables for this model, and what its
                             // extensions have from fsdp_alloc (an optimizer's state)
    int64_t comm_bytes;      // device memory of the world's communicators, not in total_bytes, when
                             // they were made; 0: the backend does not know (NCCL before 2.29.7)
    int64_t unsharded_bytes; // parameters and gradients of the whole model, for comparison
} fsdp_memory;

/* fsdp_model_memory  - what is allocated now
   fsdp_model_predict - what will be allocated after a training step. It assumes one forward of
   every unit in the order of creation and one backward in the reverse order; if the model reshards
   after forward, units that never do are open while those that do run, as a root or a tied
   embedding is. It cannot know that a unit which never reshards opens after others have closed, as
   a head is open around the loss only: then it may count a slot too many, unless in_order is set.
   It allocates nothing on the device. It does not count scratch of fsdp_param_full and buffers of
   extensions: plans, states of optimizers, averages
   fsdp_model_predict_step - the same of a step of microbatches that differ from the last one
   desc        NULL: one microbatch. What the model is set to now does not count
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY, INVALID_STATE (predict: no units)
   Allocates   predict: temporary tables */
FSDP_API fsdp_status fsdp_model_memory(const fsdp_model *model, fsdp_memory *out);
typedef struct fsdp_predict_desc {
    uint32_t size, start_canary;
    int32_t without_sync;       // 1: fsdp_set_requires_gradient_sync 0 before the last microbatch
    int32_t without_all_reduce; // 1: fsdp_set_requires_all_reduce 0
    int32_t without_reshard;    // 1: fsdp_set_reshard_after_backward 0
    int32_t in_order; // 1: each unit opens at its place in the order of creation, also one that
                      // never reshards
    uint64_t end_canary;
} fsdp_predict_desc;
FSDP_API fsdp_status fsdp_model_predict(const fsdp_model *model, fsdp_memory *out);
FSDP_API fsdp_status fsdp_model_predict_step(const fsdp_model *model, const fsdp_predict_desc *desc,
                                             fsdp_memory *out);

/* fsdp_unit_memory - memory of one unit. SHARD, SHARD_GRAD: its part of shards and gradients. Other
   pools: bytes of one slot that it takes, and in pool_slots how many it holds now.
   unsharded_bytes: its full parameters and gradients
   Result      FSDP_OK; INVALID_ARG */
FSDP_API fsdp_status fsdp_unit_memory(const fsdp_unit *unit, fsdp_memory *out);

/* fsdp_model_describe - a table of units and parameters as text: shapes, dtypes, layout, bytes, and
   the route of each unit: how it gathers, and what happens to gradients after post_backward
   buf         room for cap bytes, always terminated if cap > 0; NULL with cap 0
   Result      length of the whole text without its end, as snprintf; 0 for NULL */
FSDP_API size_t fsdp_model_describe(const fsdp_model *model, char *buf, size_t cap);

/* fsdp_pool_name - for example "gathered parameters"; "?" out of range. For a pool of an extension
   "extension": fsdp_model_pool_name gives its name
   Thread      any */
FSDP_API const char *fsdp_pool_name(int pool);

typedef struct fsdp_counters {
    uint64_t calls[FSDP_OP_COUNT]; // ops issued
    uint64_t bytes[FSDP_OP_COUNT]; // fsdp_op.bytes of them: to be received, or written
    uint64_t allocations;          // host and device allocations of the model
} fsdp_counters;

/* fsdp_model_counters - numbers since the model's creation
   Result      FSDP_OK; INVALID_ARG */
FSDP_API fsdp_status fsdp_model_counters(const fsdp_model *model, fsdp_counters *out);

/* -------------------------------------------------------------------------------------------- */
/* The seam for extensions: fsdp_extension, and the functions that extensions call.               */
#include "src/core/extension.h"

/* -------------------------------------------------------------------------------------------- */
/* The tables of a backend and a device: fsdp_boot, fsdp_coll, fsdp_comm_ops, fsdp_device_ops.    */
#include "src/core/backend.h"

#ifdef __cplusplus
}
// The dtype of a type. Say it of types of 16 bits, as __nv_bfloat16 or a struct of your own:
//     template <> struct fsdp_dtype_of<my_bf16> : fsdp_dtype_is<FSDP_BF16> {};
template <int Dtype> struct fsdp_dtype_is {
    static const fsdp_dtype value = Dtype;
};
template <class T> struct fsdp_dtype_of {
    static_assert(sizeof(T) == 0, "fsdp.h does not know the dtype of this type: specialise "
                                  "fsdp_dtype_of for it, as the comment above shows");
};
template <> struct fsdp_dtype_of<float> : fsdp_dtype_is<FSDP_F32> {};
template <> struct fsdp_dtype_of<double> : fsdp_dtype_is<FSDP_F64> {};
template <> struct fsdp_dtype_of<uint8_t> : fsdp_dtype_is<FSDP_U8> {};
template <> struct fsdp_dtype_of<int8_t> : fsdp_dtype_is<FSDP_I8> {};
template <> struct fsdp_dtype_of<int16_t> : fsdp_dtype_is<FSDP_I16> {};
template <> struct fsdp_dtype_of<int32_t> : fsdp_dtype_is<FSDP_I32> {};
template <> struct fsdp_dtype_of<int64_t> : fsdp_dtype_is<FSDP_I64> {};

template <class T> inline T *fsdp_data_as(fsdp_unit *unit, int index) {
    return static_cast<T *>(fsdp_data_as(unit, index, fsdp_dtype_of<T>::value));
}
template <class T> inline T *fsdp_grad_as(fsdp_unit *unit, int index) {
    return static_cast<T *>(fsdp_grad_as(unit, index, fsdp_dtype_of<T>::value));
}
template <class T> inline T *fsdp_view_data_as(const fsdp_param_view *view) {
    return static_cast<T *>(fsdp_view_data_as(view, fsdp_dtype_of<T>::value));
}
template <class T> inline T *fsdp_view_shard_as(const fsdp_param_view *view) {
    return static_cast<T *>(fsdp_view_shard_as(view, fsdp_dtype_of<T>::value));
}
template <class T> inline T *fsdp_view_grad_as(const fsdp_param_view *view) {
    return static_cast<T *>(fsdp_view_grad_as(view, fsdp_dtype_of<T>::value));
}
#endif
#endif // FSDP_H
// clang-format on

/* ============================================================================================ */
/* Implementation: the pure functions, then the parts that no other part includes. It is outside the
   guard, so that a header that included fsdp.h before does not hide it. It needs nothing that
   strict C99 hides: fsdpi_syscall reaches those. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_IMPLEMENTED)
#include "src/base/platform.h" // undefines FSDP_IMPLEMENTATION where the library does not run
#endif
#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_IMPLEMENTED)
#define FSDP_IMPLEMENTED
#include "src/base/reduce.h"
#include "src/core/shard_math.h"
#ifndef FSDP_MATH_ONLY
#include "src/core/attach.h"
#include "src/core/clip.h"
#include "src/core/extend.h"
#include "src/core/options.h"
#include "src/core/predict.h"
#include "src/core/spawn.h"
#include "src/trace/record.h" // an extension of every program: FSDP_TRACE, docs/observability.md
#endif                    // FSDP_MATH_ONLY
#endif                    // FSDP_IMPLEMENTATION

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
