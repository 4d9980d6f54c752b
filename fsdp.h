/* fsdp.h - FSDP2 (ZeRO-3, per-parameter sharding) for C, C++ and CUDA trainers            v0.1.0

   Each rank keeps 1/W of every parameter, of its gradient and of the optimizer's state; a layer is
   gathered just before it is used and freed right after; gradients are averaged while they are
   scattered back to their owners. The behaviour is that of PyTorch's fully_shard.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp.h"
       cc -O2 trainer.c -pthread -lm && tools/fsdprun -n 4 ./a.out     // make tools/fsdprun

   SPDX-License-Identifier: MIT (full text at the end of this file)

TABLE OF CONTENTS (search for the tag); the manual comes first
    >>config     macros that change the build
    >>api        declarations: status, dtype, shard math, world, mesh, model, step, ops, backends
    >>status     names of status codes
    >>dtype      element types, conversions, every loop over elements
    >>layout     shard math
    >>sys        the operating system's calls
    >>alloc      host memory
    >>log        error texts, the world object
    >>device     the device table over host memory
    >>comm       compiled-in backends (and fsdp_spawn); an op record becomes a collective
    >>lanes      inline execution, worker threads, events
    >>world      rank, size, environment, opened tables
    >>mesh       N-d meshes and their groups
    >>param      model, unit and parameter objects and their layout
    >>pool       buffers and slots
    >>ops        fsdpi_emit, the only door to the tables
    >>schedule   actions and the transition table
    >>commit     flat blocks and prebuilt lists
    >>step       finalize, norm, gather to one tensor, prediction
    >>public     public functions

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

IT DOES NOT
    differentiate, run kernels, own your activations, or find the root: the model is the root.

ENVIRONMENT
    RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT  set by tools/fsdprun and torchrun
    FSDP_JOB_ID       name of the job, unique on the host (else from MASTER_ADDR and MASTER_PORT)
    FSDP_TIMEOUT_MS   deadline of every wait, default 60000
    FSDP_LANES        0 inline (default), 1 or 2 worker threads for collectives
    FSDP_BACKEND      which compiled-in backend        FSDP_LOG_LEVEL  error warn info none

ERRORS
    Functions return fsdp_status. The text names rank, unit, operation, expected and got, is logged
    once and kept for fsdp_last_error. Wrong arguments and wrong order change nothing. A failed
    collective aborts the world on all ranks; from then on every call returns that status at once,
    and only fsdp_shutdown and fsdp_last_error are of use. The library never exits or aborts.
    No call waits longer than the deadline.

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
    that this header is compiled with (-Ofast included).

LIMITS OF THIS VERSION
    1-D meshes only (no HSDP); reshard_after_forward always or never; no explicit prefetch lists;
    parameters of one unit share their dtype; f16 reductions are not pre-scaled; no CPU offload.
    Linux; gcc or clang. docs/from-pytorch.md has the whole table.
*/
#ifndef FSDP_H
#define FSDP_H
// The columns of the declarations are set by hand.
// clang-format off

#define FSDP_VERSION_MAJOR 0
#define FSDP_VERSION_MINOR 1
#define FSDP_VERSION_PATCH 0

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
// >>api
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

#ifndef FSDP_MATH_ONLY
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
   desc        NULL or all zero: rank, size and address from the environment: RANK, WORLD_SIZE,
               LOCAL_RANK, MASTER_ADDR, MASTER_PORT (torchrun, tools/fsdprun); nothing set = 1 rank
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
   Blocks      for worker threads that finish their current operation      Allocates no */
FSDP_API fsdp_status fsdp_shutdown(fsdp_world *world);

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

// Values of reshard_after_forward.
enum {
    FSDP_RESHARD_DEFAULT = 0, // in a unit: as the model; in a model: always
    FSDP_RESHARD_ALWAYS = 1,  // free the gathered parameters after forward
    FSDP_RESHARD_NEVER = -1   // keep them until the unit's post_backward
};

#define FSDP_DIRECT_NEVER INT64_MAX // for fsdp_model_desc.direct_min

typedef struct fsdp_model_desc {
    uint32_t size, start_canary;
    const fsdp_mesh *mesh;         // NULL: 1-D over all ranks
    fsdp_dtype param_dtype;        // of gathered parameters and gradients; KEEP: their own
    fsdp_dtype reduce_dtype;       // of the reduction; KEEP: the parameter's own
    int32_t reshard_after_forward; // FSDP_RESHARD_DEFAULT: always
    int32_t grads_overwrite;       // 1: backward stores gradients (=) instead of adding (+=)
    int32_t debug;                 // 1: released buffers are filled with NaN patterns
    int32_t reserved;
    int64_t direct_min;            // bytes of a full parameter from which it is gathered in place,
                                   // 0: 65536; 1: always; FSDP_DIRECT_NEVER
    int64_t fill_bytes;            // 0: 16 MiB. Block of init_params, step of param_full
    uint64_t end_canary;
} fsdp_model_desc;

/* fsdp_model_create - an empty model; units are added by fsdp_fully_shard
   desc        NULL: defaults
   model       owned by the world; fsdp_model_destroy or fsdp_shutdown ends it
   Result      FSDP_OK; INVALID_ARG, UNSUPPORTED, OUT_OF_MEMORY
   Collective  yes: every rank of the mesh, same order      Blocks no      Allocates yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_model_create(fsdp_world *world,
                                                       const fsdp_model_desc *desc,
                                                       fsdp_model **model);

/* fsdp_model_destroy - free a model with its units and buffers; NULL is allowed
   Collective  yes, in the sense of fsdp_model_create      Blocks for operations under way
   Allocates   no */
FSDP_API void fsdp_model_destroy(fsdp_model *model);

typedef struct fsdp_param_desc {
    uint32_t size, start_canary;
    const char *name;             // NULL: "p0", "p1", ... Copied
    void *user;                   // yours; comes back in views
    fsdp_dtype dtype;             // of the stored shard; KEEP: f32
    int32_t ndim;                 // 1..FSDP_MAX_DIMS
    int64_t shape[FSDP_MAX_DIMS]; // full shape, row-major
    int32_t shard_dim;            // -ndim <= shard_dim < ndim; 0: rows
    int32_t frozen;               // 1: requires no gradient
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
    int32_t reshard_after_forward; // FSDP_RESHARD_*; a unit that stays open around others: NEVER
    fsdp_dtype param_dtype;        // KEEP: as the model
    fsdp_dtype reduce_dtype;       // KEEP: as the model
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
   Blocks      no      Allocates yes: tables only; shards are allocated by fsdp_model_commit
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
typedef struct fsdp_param_view {
    fsdp_unit *unit;
    const char *name, *unit_name;
    void *user, *unit_user;             // from the descs
    int32_t ordinal;                    // place among all parameters of the model
    int32_t index;                      // place in the unit
    fsdp_dtype dtype;                   // of data, shard and shard_grad
    int32_t ndim, shard_dim, requires_grad;
    int64_t shape[FSDP_MAX_DIMS];       // full
    int64_t start[FSDP_MAX_DIMS];       // first index of the block in the full tensor
    int64_t local_shape[FSDP_MAX_DIMS]; // of the block; shard_dim has 0 in an empty shard
    int64_t numel;                      // elements of the block, without padding
    void *data;                         // the block: contiguous, shape local_shape
    void *shard;                        // my whole shard; never NULL
    void *shard_grad;                   // its gradient; NULL: none (frozen, zeroed, nobody used it)
} fsdp_param_view;

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
    fsdp_dtype dtype;
    void *shards, *grads; // numel elements each; padding is zero in both and must stay so
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
               stale and gathered again by the next fsdp_unshard or pre_*
   Result      FSDP_OK; INVALID_STATE (a unit is not idle)
   Collective  no, but every rank has to do the same      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_params_changed(fsdp_model *model);

/* -------------------------------------------------------------------------------------------- */
/* Training step. A call in a wrong order returns INVALID_STATE, names the calls that are possible
   and changes nothing; fsdp_finalize_backward reports the first such failure of the step again, so
   that a trainer may check finalize and the optimizer alone. After a failure of a collective
   (TIMEOUT, PEER_LOST, MISMATCH, ABORTED, BACKEND) the world is aborted: every call returns that
   status at once and fsdp_data/fsdp_grad give valid memory of undefined content.
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
   Collective  yes      Blocks until all reductions are done      Allocates at its first use
   Source      torch: FSDPState._root_post_backward_final_callback, finalize_backward */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_finalize_backward(fsdp_model *model);

/* fsdp_data - full parameter `index`, contiguous, in param_dtype; valid from pre_* to post_*
   fsdp_grad - where its gradient is written (frozen parameter: NULL); valid from pre_ to
               post_backward; marks the parameter as used
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

/* fsdp_clip_grad_norm - 2-norm of all gradients over all ranks; scales them to at most max_norm
   max_norm    > 0; INFINITY: measure only
   norm        out, may be NULL: the norm before clipping, the same on every rank
   Arithmetic  squares are summed in f64, parameter by parameter in order, ranks in rank order:
               the same bits for every layout. Coefficient max_norm/(norm + 1e-6), at most 1
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle); collective errors
   Collective  yes      Blocks yes, at most timeout_ms      Allocates no
   Source      torch: torch.nn.utils.clip_grad_norm_ */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_clip_grad_norm(fsdp_model *model, double max_norm,
                                                         double *norm);

/* fsdp_model_reset - bring every unit back to IDLE and SHARDED after an interrupted step;
   gradients, also those already reduced, and unreduced microbatches are dropped
   Result      FSDP_OK; the stored status if the world is aborted
   Collective  no, but every rank has to do the same      Blocks for operations under way
   Allocates   no      Source torch: reset_iter_state */
FSDP_API fsdp_status fsdp_model_reset(fsdp_model *model);

/* Setters. Those with a unit (NULL: every unit) need it IDLE or POST_BACKWARD; the others any time.
   fsdp_set_grad_enabled           0: forwards are evaluation and are not waited for by a backward
   fsdp_set_is_last_backward       0: finalize keeps the record of forwards for a further backward
   fsdp_set_requires_gradient_sync 0: post_backward keeps gradients here, unreduced (no_sync)
   fsdp_set_reshard_after_forward  FSDP_RESHARD_ALWAYS or _NEVER
   fsdp_set_reshard_after_backward 0: parameters stay gathered after backward
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE
   Collective  no, but every rank has to do the same      Blocks no      Allocates no
   Source      torch: FSDPModule methods of the same names, torch.set_grad_enabled */
FSDP_API fsdp_status fsdp_set_grad_enabled(fsdp_model *model, int enabled);
FSDP_API fsdp_status fsdp_set_is_last_backward(fsdp_model *model, int is_last);
FSDP_API fsdp_status fsdp_set_requires_gradient_sync(fsdp_model *model, fsdp_unit *unit, int sync);
FSDP_API fsdp_status fsdp_set_reshard_after_forward(fsdp_model *model, fsdp_unit *unit, int mode);
FSDP_API fsdp_status fsdp_set_reshard_after_backward(fsdp_model *model, fsdp_unit *unit,
                                                     int reshard);

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
    X(NORM, "norm")                   /* sum of squares of src blocks, f64 */                     \
    X(ALL_GATHER, "all_gather")                                                                   \
    X(REDUCE_SCATTER, "reduce_scatter")                                                           \
    X(ALL_REDUCE, "all_reduce")                                                                   \
    X(BROADCAST, "broadcast")                                                                     \
    X(USE, "use")                     /* marker: the caller's stream waits for src */             \
    X(HOOK, "hook")                   /* marker: a public call begins; label is the call */

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
    X(GRADS, "grads")         /* a fresh gradient slot */                                         \
    X(ACC, "acc")             /* gradients -> reduce input: cast, chunk_cat, accumulate */        \
    X(USERS, "users")         /* which parameters this rank used, rides along */                  \
    X(REDUCE, "reduce")                                                                           \
    X(RED_OUT, "red_out")     /* reduce output -> shard gradient: scale, cast, accumulate */      \
    X(FINAL, "final")         /* the caller's stream waits for shard gradients */                 \
    X(CLIP, "clip")                                                                               \
    X(FULL, "full")           /* gather to one tensor */                                          \
    X(WORLD, "world")         /* fsdp_all_reduce, fsdp_broadcast, fsdp_barrier */

enum {
#define FSDP_X(name, text) FSDP_LABEL_##name,
    FSDP_LABEL_LIST(FSDP_X)
#undef FSDP_X
    FSDP_LABEL_COUNT
};

enum { FSDP_STREAM_COMPUTE = 0, FSDP_STREAM_GATHER, FSDP_STREAM_REDUCE, FSDP_STREAM_COUNT };

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
    int32_t root;             // BROADCAST
    double scale;             // multiplies the (summed) input, in the arithmetic's type; 1: none
    uint32_t list_count;
    const fsdp_unit *unit;    // NULL: of the model
    const char *what;         // the unit's name, or the call's
    uint64_t what_hash, step; // of the unit's desc, and the finalizes so far: ranks must agree
    fsdp_comm *comm;          // collectives: where
    fsdp_buf *src, *dst;      // whose events it waits for and sets; NULL: none
    const void *list;         // fsdp_block[] (COPY, NORM) or fsdp_seg[] (collectives), prebuilt
    const void *src_ptr;      // fixed at issue: a slot may change hands before a worker runs the op
    void *dst_ptr;
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
    X(LOAD, "load")                   /* init_params, param_load */                               \
    X(FULL, "param_full")                                                                         \
    X(ZERO_GRAD, "zero_grad")                                                                     \
    X(CLIP, "clip_grad_norm")                                                                     \
    X(SET, "set")                                                                                 \
    X(RESET, "reset")

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
   nothing on the device
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY, INVALID_STATE (predict: no units)
   Collective  no      Blocks no      Allocates predict: temporary tables */
FSDP_API fsdp_status fsdp_model_memory(const fsdp_model *model, fsdp_memory *out);
FSDP_API fsdp_status fsdp_model_predict(const fsdp_model *model, fsdp_memory *out);

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
/* Backends: two tables of functions. How to write one: backends/README.md.                       */

// What a backend or device is opened with. Pointers are valid until close.
typedef struct fsdp_boot {
    int rank, size, local_rank;
    int64_t timeout_ns;
    const char *job;
    fsdp_threads *threads; // not NULL: ranks are threads that share this
    fsdp_allocator allocator;
    fsdp_logger logger;
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
   Complete means: the result is in place *and* src may be overwritten.                           */
typedef struct fsdp_coll {
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
} fsdp_coll;

#define FSDP_COMM_VERSION 1
struct fsdp_comm_ops {
    uint32_t version, size; // FSDP_COMM_VERSION, sizeof(fsdp_comm_ops)
    const char *name;
    fsdp_status (*open)(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **world);
    // Blocks until every rank of the parent has come. *out is NULL where color < 0.
    fsdp_status (*split)(fsdp_comm *parent, const fsdp_group *group, fsdp_comm **out);
    void (*close)(fsdp_comm *comm);
    fsdp_status (*run)(fsdp_comm *comm, const fsdp_coll *coll);
    // Memory that peers may read: same order and sizes on all ranks of the world; zero-filled.
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

#define FSDP_DEVICE_VERSION 1
struct fsdp_device_ops {
    uint32_t version, size, flags; // FSDP_DEVICE_VERSION, sizeof(fsdp_device_ops), FSDP_DEVICE_*
    const char *name;
    fsdp_status (*open)(const fsdp_boot *boot, fsdp_device **device);
    void (*close)(fsdp_device *device);
    // Memory of worlds of one rank; otherwise buffers come from fsdp_comm_ops.alloc. Zero-filled.
    fsdp_status (*alloc)(fsdp_device *device, size_t size, void **ptr);
    void (*free)(fsdp_device *device, void *ptr, size_t size);
    // Only with FSDP_DEVICE_ASYNC. The stream COMPUTE may be the caller's.
    fsdp_status (*stream)(fsdp_device *device, int stream, void **native);
    fsdp_status (*event)(fsdp_device *device, void **native);
    void (*destroy)(fsdp_device *device, void *stream_or_null, void *event_or_null);
    fsdp_status (*record)(fsdp_device *device, void *stream, void *event);
    fsdp_status (*wait)(fsdp_device *device, void *stream, void *event);
    fsdp_status (*sync)(fsdp_device *device, void *event, int64_t timeout_ns);
    // Work, ordered on `stream` (NULL: done on return).
    fsdp_status (*copy)(fsdp_device *device, void *stream, const fsdp_op *op);
    fsdp_status (*zero)(fsdp_device *device, void *stream, const fsdp_op *op);
    fsdp_status (*norm)(fsdp_device *device, void *stream, const fsdp_op *op);
};

#endif // FSDP_MATH_ONLY
#ifdef __cplusplus
}
#endif
// clang-format on
#endif // FSDP_H

/* ============================================================================================ */
/* Implementation, leaves first. Outside the guard: a header that included fsdp.h before does not
   hide it. Needs nothing that strict C99 hides: hidden calls are reached by fsdpi_syscall. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_IMPLEMENTED)
#define FSDP_IMPLEMENTED

#include <string.h> // memcpy, memset, memcmp, strcmp, strlen

#if defined(__GNUC__) || defined(__clang__)
#define FSDPI_NOINLINE __attribute__((noinline))
#define FSDPI_UNUSED   __attribute__((unused))
#else
#define FSDPI_NOINLINE
#define FSDPI_UNUSED
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

// Precise arithmetic from here on, whatever flags the program is built with (-Ofast included); and
// vectorised even where the program is built with -O0 or -O2.
#if defined(__clang__)
#pragma float_control(precise, on, push)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("O3", "no-fast-math", "fp-contract=off")
#endif

static inline uint32_t fsdpi_f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float fsdpi_f32_of(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float fsdpi_bf16_to_f32(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    uint32_t quiet = (u & 0x7FFFFFFFu) > 0x7F800000u ? 0x00400000u : 0u;
    return fsdpi_f32_of(u | quiet);
}

static inline uint16_t fsdpi_f32_to_bf16(float x) {
    uint32_t u = fsdpi_f32_bits(x);
    uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    uint32_t nan = (u >> 16) | 0x0040u;
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

static inline float fsdpi_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, em = h & 0x7FFFu;
    uint32_t normal = (em << 13) + (112u << 23);
    uint32_t special = (em << 13) | 0x7F800000u | (em > 0x7C00u ? 0x00400000u : 0u);
    uint32_t tiny = fsdpi_f32_bits((float)(int32_t)em *
                                   5.9604644775390625e-8f); // em * 2^-24, exact
    uint32_t u = em >= 0x7C00u ? special : normal;
    return fsdpi_f32_of(sign | (em < 0x0400u ? tiny : u));
}

static inline uint16_t fsdpi_f32_to_f16(float x) {
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

// Sum of squares in f64. Eight running sums, joined in a fixed order: the bits depend on the values
// alone, not on alignment or on how the compiler vectorises.
static FSDPI_UNUSED FSDPI_NOINLINE double fsdpi_sum_squares(const void *src, fsdp_dtype dtype,
                                                            size_t count) {
    double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0}, tmp[FSDPI_BLOCK];
    size_t size = fsdp_dtype_size(dtype);
    for (size_t at = 0; at < count; at += FSDPI_BLOCK) {
        size_t n = count - at < FSDPI_BLOCK ? count - at : FSDPI_BLOCK;
        const double *x = fsdpi_load_f64(tmp, (const char *)src + at * size, dtype, n);
        size_t i = 0;
        // A loop of its own: clang -Ofast fuses a product and a sum in one loop whatever pragmas
        // say.
        for (size_t k = 0; k < n; k++) tmp[k] = x[k] * x[k];
        for (; i + 8 <= n; i += 8)
            for (int k = 0; k < 8; k++) sums[k] += tmp[i + (size_t)k];
        for (int k = 0; i < n; i++, k++) sums[k] += tmp[i];
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif

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

#ifndef FSDP_MATH_ONLY

/* -------------------------------------------------------------------------------------------- */
// >>sys
// Owns: the few calls of the operating system that the library needs. Strict C99 hides some of
// them; a private name for the C library's symbol reaches them without feature macros.

#include <math.h>        // sqrt, isfinite
#include <pthread.h>     // worker threads, ranks as threads
#include <stdarg.h>      // va_list
#include <stdio.h>       // snprintf, stderr
#include <stdlib.h>      // malloc, free, getenv, strtol
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
static void fsdpi_lock(uint32_t *lock) { // 0 free, 1 taken, 2 taken and somebody may sleep on it
    uint32_t none = 0;
    if (__atomic_compare_exchange_n(lock, &none, 1u, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) return;
    while (__atomic_exchange_n(lock, 2u, __ATOMIC_ACQUIRE)) fsdpi_futex_wait(lock, 2, 1000000, 0);
}
static void fsdpi_unlock(uint32_t *lock) {
    if (__atomic_exchange_n(lock, 0u, __ATOMIC_RELEASE) == 2) fsdpi_futex_wake_all(lock, 0);
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

/* -------------------------------------------------------------------------------------------- */
// >>alloc
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

static void fsdpi_free(const fsdp_allocator *a, void *ptr) {
    if (ptr) a->free((char *)ptr - FSDPI_ALIGN, fsdpi_alloc_size(ptr), a->user);
}

/* -------------------------------------------------------------------------------------------- */
// >>log
// Owns: error texts and the way out for every message. Invariant: the first failure of a world
// stays; later calls return it. The only writable static is a thread's text for failures without a
// world.

#define FSDPI_TEXT 1024

enum {
    FSDPI_INLINE,
    FSDPI_LANES,
    FSDPI_NATIVE
}; // how ops run: at once, by worker threads, by the device

typedef struct fsdpi_lane fsdpi_lane;

struct fsdp_threads {
    uint32_t lock; // fsdpi_lock
    int32_t size;  // ranks
    void *common;  // what the backend's first open put here
};

struct fsdp_world {
    fsdp_boot boot;
    int rank, size;
    int log_level;
    uint32_t failed;          // fsdp_status of the first failure of a collective, or 0
    uint32_t fail_lock;       // fsdpi_lock of the first failure: worker threads may have it
    char failure[FSDPI_TEXT]; // its text, written once
    char error[FSDPI_TEXT];   // of the last call of the caller's thread that failed
    char job[128];
    const fsdp_comm_ops *comm_ops; // NULL: one rank
    fsdp_comm *comm,
        *reduce_comm; // reduce_comm: equal to comm unless two streams may run at a time
    fsdp_caps caps;
    const fsdp_device_ops *device_ops;
    fsdp_device *device;
    int mode;                             // FSDPI_INLINE, ...
    void *streams[FSDP_STREAM_COUNT];     // FSDPI_NATIVE
    void *fence;                          // an event to wait for all of them
    fsdpi_lane *lanes[FSDP_STREAM_COUNT]; // FSDPI_LANES; COMPUTE has none; may be the same one
    void *bounce;                         // comm memory for collectives on host data
    uint64_t seq;
    fsdp_mesh *meshes;  // all of this world
    fsdp_model *models; // all of this world
};

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

// By its bits: compilers may assume that there are no NaNs.
static int fsdpi_is_nan(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return (u & 0x7FFFFFFFFFFFFFFFull) > 0x7FF0000000000000ull;
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

/* -------------------------------------------------------------------------------------------- */
// >>device
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

static fsdp_status fsdpi_host_alloc(fsdp_device *device, size_t size, void **ptr) {
    *ptr = fsdpi_alloc(&device->allocator, size);
    return *ptr ? FSDP_OK : FSDP_ERR_OUT_OF_MEMORY;
}

static void fsdpi_host_free(fsdp_device *device, void *ptr, size_t size) {
    (void)size;
    fsdpi_free(&device->allocator, ptr);
}

static fsdp_status fsdpi_host_copy(fsdp_device *device, void *stream, const fsdp_op *op) {
    size_t in = fsdp_dtype_size(op->dtype), out = fsdp_dtype_size(op->out_dtype);
    const fsdp_block *blocks = (const fsdp_block *)op->list;
    (void)device, (void)stream;
    for (uint32_t i = 0; i < op->list_count; i++) {
        fsdp_block b = blocks[i];
        if (b.src_pitch == b.width && b.dst_pitch == b.width) { // no gaps: one long row
            b.width *= b.height;
            b.height = 1;
        }
        for (int64_t row = 0; row < b.height; row++) {
            const char *src = (const char *)op->src_ptr + (size_t)(b.src + row * b.src_pitch) * in;
            char *dst = (char *)op->dst_ptr + (size_t)(b.dst + row * b.dst_pitch) * out;
            fsdpi_reduce(dst, op->out_dtype, &src, 1, op->dtype, (size_t)b.width, op->scale,
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

static fsdp_status fsdpi_host_norm(fsdp_device *device, void *stream, const fsdp_op *op) {
    const fsdp_block *blocks = (const fsdp_block *)op->list;
    size_t in = fsdp_dtype_size(op->dtype);
    double *sum = (double *)op->dst_ptr;
    (void)device, (void)stream;
    if (!op->accumulate) *sum = 0;
    for (uint32_t i = 0; i < op->list_count; i++)
        *sum += fsdpi_sum_squares((const char *)op->src_ptr + (size_t)blocks[i].src * in, op->dtype,
                                  (size_t)blocks[i].width);
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
                                        fsdpi_host_norm};
    return &ops;
}

/* -------------------------------------------------------------------------------------------- */
// >>comm
// Owns: which backends are compiled in, and the one place that turns an op record into a
// collective.

#if !defined(FSDP_BACKEND_SHM) && !defined(FSDP_NO_BACKEND)
#define FSDP_BACKEND_SHM 1
#endif
#ifdef FSDP_BACKEND_SHM
#include "backends/fsdp_shm.h"
#endif
#include "backends/fsdp_spawn.h"

static const fsdp_comm_ops *fsdpi_backend(const char *name) {
#ifdef FSDP_BACKEND_SHM
    if (!name || strcmp(name, "shm") == 0) return fsdp_shm_comm_ops();
#endif
    (void)name;
    return NULL;
}

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
    c.segs = op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER
                 ? (const fsdp_seg *)op->list
                 : NULL;
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
    fsdp_status status = w->comm_ops->run(op->comm, &c);
    if (status) return fsdpi_world_fail(w, status, w->comm_ops->error_text(op->comm));
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// >>lanes
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

// Do what a record says. `stream`: native, or NULL.
static fsdp_status fsdpi_execute(fsdp_world *w, const fsdp_op *op, void *stream) {
    const fsdp_device_ops *d = w->device_ops;
    fsdp_status status = FSDP_OK;
    switch (op->kind) {
    case FSDP_OP_COPY: status = d->copy(w->device, stream, op); break;
    case FSDP_OP_ZERO: status = d->zero(w->device, stream, op); break;
    case FSDP_OP_NORM: status = d->norm(w->device, stream, op); break;
    case FSDP_OP_USE:
    case FSDP_OP_HOOK: break;
    default: return fsdpi_run_collective(w, op, stream);
    }
    if (status == FSDP_OK) return FSDP_OK;
    char text[FSDPI_TEXT];
    snprintf(text, sizeof text, "rank %d: %s (%s) of '%s' failed on device %s: %s", w->rank,
             fsdp_op_name(op->kind), fsdp_label_name(op->label), op->what, d->name,
             fsdp_status_text(status));
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

// *event := now, in the order of `stream`.
static fsdp_status fsdpi_mark(fsdp_world *w, int stream, fsdp_event *event) {
    event->stream = stream;
    event->seq = w->lanes[stream] ? w->lanes[stream]->issued : 1;
    if (w->mode != FSDPI_NATIVE) return FSDP_OK;
    fsdp_status status = w->device_ops->record(w->device, w->streams[stream], event->native);
    return status ? fsdpi_world_fail(w, status, "recording an event failed") : FSDP_OK;
}

// The host waits until everything issued so far on a stream is done.
static fsdp_status fsdpi_sync(fsdp_world *w, int stream) {
    if (w->lanes[stream]) fsdpi_lane_wait(w->lanes[stream], w->lanes[stream]->issued);
    if (!w->fence) return fsdpi_failed(w);
    fsdp_status status = w->device_ops->record(w->device, w->streams[stream], w->fence);
    if (!status) status = w->device_ops->sync(w->device, w->fence, w->boot.timeout_ns);
    return status ? fsdpi_world_fail(w, status, "the device did not finish before the deadline")
                  : fsdpi_failed(w);
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
            if (status) return fsdpi_world_fail(w, status, "waiting for an event failed");
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

/* -------------------------------------------------------------------------------------------- */
// >>world
// Owns: rank, size, the opened tables, lanes, and the objects made from the world.

static fsdp_status fsdpi_env_int(fsdp_world *w, const char *name, int min, int *out, int *found) {
    const char *text = getenv(name);
    *found = text != NULL && *text != 0;
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

// Rank and size from RANK and WORLD_SIZE; neither set: a world of one.
static fsdp_status fsdpi_env_ranks(fsdp_world *w, fsdp_world_desc *d) {
    int rank = 0, size = 1, local = 0, has_rank, has_size, has_local;
    fsdp_status status = fsdpi_env_int(w, "RANK", 0, &rank, &has_rank);
    if (!status) status = fsdpi_env_int(w, "WORLD_SIZE", 1, &size, &has_size);
    if (!status) status = fsdpi_env_int(w, "LOCAL_RANK", 0, &local, &has_local);
    if (status) return status;
    if (has_rank != has_size)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "environment variable %s is set but %s is not: a launcher sets both",
                          has_rank ? "RANK" : "WORLD_SIZE", has_rank ? "WORLD_SIZE" : "RANK");
    d->rank = rank;
    d->world_size = size;
    d->local_rank = has_local ? local : rank;
    return FSDP_OK;
}

// A name that is equal on all ranks of the job and unique on the host.
static fsdp_status fsdpi_job_name(fsdp_world *w, const fsdp_world_desc *d, char *out, size_t cap) {
    const char *job = d->job ? d->job : getenv("FSDP_JOB_ID");
    const char *port = getenv("MASTER_PORT"), *address = getenv("MASTER_ADDR");
    const char *run = getenv("TORCHELASTIC_RUN_ID"),
               *restart = getenv("TORCHELASTIC_RESTART_COUNT");
    int used;
    if (job) used = snprintf(out, cap, "%s", job);
    else
        used = snprintf(out, cap, "%s:%s:%s:%s", address ? address : "", port ? port : "",
                        run ? run : "", restart ? restart : "");
    if (!job && !port && d->world_size > 1)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "%d ranks need a common name: start the program with tools/fsdprun or "
                          "torchrun, or set MASTER_PORT "
                          "or FSDP_JOB_ID, or fsdp_world_desc.job",
                          d->world_size);
    if (used < 0 || (size_t)used >= cap)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "the job's name is longer than %u bytes",
                          (unsigned)cap - 1);
    return FSDP_OK;
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

static fsdp_status fsdpi_world_open_comm(fsdp_world *w, const fsdp_world_desc *d) {
    if (w->size == 1) return FSDP_OK; // one rank needs no backend
    const char *name = d->backend ? d->backend : getenv("FSDP_BACKEND");
    w->comm_ops = d->comm_ops ? d->comm_ops : fsdpi_backend(name);
    if (!w->comm_ops)
        return fsdpi_fail(
            w, FSDP_ERR_UNSUPPORTED,
            "backend '%s' is not compiled in: define FSDP_BACKEND_SHM, or give comm_ops",
            name ? name : "");
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

static fsdp_status fsdpi_world_open_device(fsdp_world *w, const fsdp_world_desc *d) {
    w->device_ops = d->device_ops ? d->device_ops : fsdpi_host_ops();
    fsdp_status status = fsdpi_table_check(w, "a device's", w->device_ops->version,
                                           w->device_ops->size, FSDP_DEVICE_VERSION,
                                           sizeof *w->device_ops);
    if (status) return status;
    if (!(w->device_ops->flags & FSDP_DEVICE_HOST))
        return fsdpi_fail(w, FSDP_ERR_UNSUPPORTED,
                          "device %s: memory that the host cannot read is not supported yet",
                          w->device_ops->name);
    status = w->device_ops->open(&w->boot, &w->device);
    if (status) {
        w->device = NULL;
        return fsdpi_fail(w, status, "device %s could not be opened: %s", w->device_ops->name,
                          fsdp_status_text(status));
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
        if (!status) status = w->device_ops->event(w->device, &w->fence);
        if (status)
            return fsdpi_fail(w, status, "device %s could not make a stream", w->device_ops->name);
    } else if (lanes > 0) {
        w->mode = FSDPI_LANES;
        int two = lanes > 1 && (w->size == 1 || w->caps.lanes > 1);
        status = fsdpi_lane_start(w, FSDP_STREAM_GATHER);
        if (!status && two) status = fsdpi_lane_start(w, FSDP_STREAM_REDUCE);
        if (!status && !two) w->lanes[FSDP_STREAM_REDUCE] = w->lanes[FSDP_STREAM_GATHER];
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
        memcpy(w->bounce, data + (size_t)at * size, (size_t)num * size);
        fsdp_status status = fsdpi_run_collective(w, op, NULL);
        if (status) return status;
        memcpy(data + (size_t)at * size, w->bounce, (size_t)num * size);
        at += num;
    } while (at < count);
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// >>mesh
// Owns: ranks arranged in N dims, row-major, and one process group per dim (two where gathers and
// reductions may run at the same time). Source: torch: DeviceMesh, _fsdp_common.py mesh infos.

struct fsdp_mesh {
    fsdp_world *world;
    int ndim;
    int32_t shape[FSDP_MAX_DIMS], coord[FSDP_MAX_DIMS]; // coord: -1 when this rank is outside
    char *names[FSDP_MAX_DIMS];
    int32_t *ranks;                        // [product of shape]
    fsdp_comm *gather_comm[FSDP_MAX_DIMS]; // NULL: a group of one, or outside
    fsdp_comm *reduce_comm[FSDP_MAX_DIMS]; // equal to gather_comm unless lanes may run both
    fsdp_mesh *next;
};

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
    for (int d = 0; d < mesh->ndim; d++) {
        fsdp_comm *gather = mesh->gather_comm[d], *reduce = mesh->reduce_comm[d];
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

// Split the world into the groups along one dim: ranks that share all other coordinates.
static fsdp_status fsdpi_mesh_split(fsdp_mesh *mesh, int dim, int lane, fsdp_comm **out) {
    fsdp_world *w = mesh->world;
    int size = mesh->shape[dim], stride = 1, mine = -1, numel = fsdpi_mesh_numel(mesh);
    for (int d = dim + 1; d < mesh->ndim; d++) stride *= mesh->shape[d];
    for (int i = 0; i < numel; i++)
        if (mesh->ranks[i] == w->rank) mine = i;
    int32_t *members = (int32_t *)fsdpi_alloc(&w->boot.allocator, (size_t)size * sizeof *members);
    if (!members) return fsdpi_fail(w, FSDP_ERR_OUT_OF_MEMORY, "mesh: no memory for a group");
    int first = mine < 0 ? 0 : mine - mesh->coord[dim] * stride;
    for (int i = 0; i < size; i++) members[i] = mesh->ranks[first + i * stride];
    fsdp_group group = {mine < 0 ? -1 : first,
                        mine < 0 ? -1 : mesh->coord[dim],
                        size,
                        lane,
                        members,
                        mesh->names[dim] ? mesh->names[dim] : "mesh"};
    fsdp_status status = w->comm_ops->split(w->comm, &group, out);
    fsdpi_free(&w->boot.allocator, members);
    return status ? fsdpi_world_fail(w, status, w->comm_ops->error_text(w->comm)) : FSDP_OK;
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
    fsdp_status status = fsdpi_mesh_split(mesh, dim, FSDP_STREAM_GATHER, &mesh->gather_comm[dim]);
    if (!status && two)
        status = fsdpi_mesh_split(mesh, dim, FSDP_STREAM_REDUCE, &mesh->reduce_comm[dim]);
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
// >>param
// Owns: what a model, its units and their parameters are, and where everything lies: the flat
// blocks of the model and the layout of each unit's slots. Invariants: nothing here depends on
// time; the layout is the same on every rank. Source: torch: FSDPParam, FSDPParamGroup.

struct fsdp_buf {
    char *ptr;
    size_t bytes;
    fsdp_event ready; // last write
    fsdp_event avail; // release by the last consumer; the first write after acquire waits for it
    uint64_t released;
    uint8_t held, pool;
};

typedef struct fsdpi_class { // slots of one pool and size
    int pool;
    size_t bytes;
    fsdp_buf **slots;
    int count, cap;
} fsdpi_class;

typedef struct fsdpi_param {
    char *name;
    void *user;
    int32_t ordinal, requires_grad;
    fsdp_layout_param
        lay; // offsets: of the shard in the flat block, of the full tensor in the GATHER slot
    int64_t grad_offset; // of the full gradient in the GRAD slot
    int32_t user_index;  // place among the unit's trainables
    uint8_t written;     // this rank wrote its gradient to the slot that the unit holds
    uint8_t used;        // this rank wrote a gradient that is not reduced yet
    uint8_t flag;        // `used` as it stands in the unit's flags
    uint8_t has_grad;    // somebody did, and it is in the shard gradient
} fsdpi_param;

// One list of parameters (trainables or frozen) in the flat block and in the slots.
typedef struct fsdpi_list {
    int64_t shard_numel;  // S
    int64_t packed_numel; // K
    int64_t base;         // in the flat block
} fsdpi_list;

// What an op carries: the blocks of a copy, or the segments of a collective.
typedef struct fsdpi_work {
    fsdp_block *blocks;
    fsdp_seg *segs;
    int num;
    uint64_t count; // elements
} fsdpi_work;

struct fsdp_unit {
    fsdp_model *model;
    char *name;
    void *user;
    int index, num_params, num_train;
    uint64_t desc_hash; // of the name and of all that ranks must have given alike
    fsdpi_param *params;
    fsdp_dtype dtype, param_dtype, reduce_dtype;
    int reshard_after_forward; // FSDP_RESHARD_ALWAYS or _NEVER
    int reshard_after_backward, sync;
    // State.
    uint8_t state, storage, stale;
    uint8_t has_grad;     // the shard gradient holds a reduced gradient
    uint8_t grad_is_zero; // it holds zeros
    uint8_t grad_alias;   // gradients are written straight into the shard gradient
    int32_t forwards;     // grad-enabled ones that have not run backward: n of the table
    int32_t last_order;   // newest entry in the record of forwards, or -1
    fsdp_buf *gather, *grad, *rin;
    // Layout.
    fsdpi_list train, frozen;
    int64_t slot_numel;           // of GATHER
    int64_t reduce_numel;         // W * (S_t + users): the reduce input, and the first part of GRAD
    int64_t grad_numel;           // of GRAD
    int64_t users_offset;         // in GRAD and RIN: row k of `num_train` flags for rank k
    int classes[FSDP_POOL_COUNT]; // index in model->classes, -1: none
    void *lists;                  // one allocation for what follows, made at commit
    fsdpi_work all_gather, reduce_scatter, to_rout;      // segments
    fsdpi_work copy_in, copy_out, chunk_cat, acc, users; // blocks
    fsdpi_work red_out; // blocks: the trainables, the users, from the reduce output
    fsdpi_work rescale; // the same, in place
    int64_t users_base; // of the counts, in the block of shard gradients
    char *flags,
        *wide_flags;     // num_train flags in param_dtype and in reduce_dtype: what `users` copies
    uint64_t flags_step; // 1 + the step in which they were last copied
    int pad_rin;         // staging has padding that no block covers
};

typedef struct fsdpi_flat_block { // shards and shard gradients of one dtype
    int64_t train_numel;          // with alignment
    int64_t numel;                // train_numel + frozen
    int64_t grad_numel;           // train_numel + user counts
    fsdp_buf *shard, *grad;
    fsdp_block whole; // all trainables: what clip scales
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
    fsdp_comm *gather_comm, *reduce_comm;
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
    fsdpi_forward *order;
    int num_order, cap_order;
    fsdp_status hook_status; // first failed hook since finalize
    char hook_error[FSDPI_TEXT];
    fsdp_buf *scalar;       // one f64: norms
    fsdp_buf *full_scratch; // steps of param_full, from its first call on
    fsdp_seg full_seg;      // of the current step
    void *undefined;        // what getters give in a failed world
    fsdp_block *norm_blocks;
    fsdp_driver driver;
    fsdp_counters counters;
    int64_t host_bytes;
    int32_t pool_slots[FSDP_POOL_COUNT];
    int64_t pool_bytes[FSDP_POOL_COUNT];
    fsdpi_owned *owned;
    fsdp_model *next;
};

static void *fsdpi_model_alloc(fsdp_model *m, size_t size) {
    void *ptr = fsdpi_alloc(&m->world->boot.allocator, size);
    if (!ptr) return NULL;
    m->host_bytes += (int64_t)fsdpi_alloc_size(ptr);
    m->counters.allocations++;
    return ptr;
}

static void fsdpi_model_free(fsdp_model *m, void *ptr) {
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

static int64_t fsdpi_bytes(int64_t numel, fsdp_dtype dtype) {
    return numel * (int64_t)fsdp_dtype_size(dtype);
}

static int fsdpi_group_size(const fsdp_model *m) { return m->info.shard_mesh_size; }

// Elements from which a parameter of this unit is direct.
static int64_t fsdpi_direct_numel(const fsdp_unit *u) {
    int64_t min = u->model->desc.direct_min, size = (int64_t)fsdp_dtype_size(u->param_dtype);
    return min == FSDP_DIRECT_NEVER ? FSDP_DIRECT_NEVER : fsdpi_ceil_div(min, size);
}

/* Lay out the trainable or the frozen parameters of a unit. tmp: room for all its parameters. With
   segs and blocks it fills them; the parameters' offsets are always written to tmp, in their order.
   */
static fsdp_status fsdpi_list_layout(const fsdp_unit *u, int trainable, fsdp_layout *lay,
                                     fsdp_layout_param *tmp, fsdp_seg *segs, fsdp_block *blocks) {
    int count = 0;
    for (int i = 0; i < u->num_params; i++)
        if (u->params[i].requires_grad == trainable) tmp[count++] = u->params[i].lay;
    lay->world = fsdpi_group_size(u->model);
    lay->rank = u->model->info.shard_mesh_rank;
    lay->direct_numel = fsdpi_direct_numel(u);
    return fsdp_layout_params(lay, tmp, count, segs, blocks);
}

static void fsdpi_list_store(fsdp_unit *u, int trainable, const fsdp_layout_param *tmp,
                             int gradients) {
    for (int i = 0, k = 0; i < u->num_params; i++) {
        fsdpi_param *p = &u->params[i];
        if (p->requires_grad != trainable) continue;
        if (gradients) p->grad_offset = tmp[k++].full_offset;
        else p->lay = tmp[k++];
    }
}

/* The layout of a unit's slots, in two uses: with NULL lists it measures (before commit), with
   lists it fills them.
   Slot of parameters: [trainables | frozen | trainables copied out | frozen copied out]
   Slot of gradients:  [reduce input: trainables, users | where the caller writes packed ones] */
static fsdp_status fsdpi_unit_layout(fsdp_unit *u, fsdp_layout_param *tmp) {
    int world = fsdpi_group_size(u->model);
    fsdp_seg *gather = u->all_gather.segs, *reduce = u->reduce_scatter.segs;
    fsdp_block *out = u->copy_out.blocks, *cat = u->chunk_cat.blocks;
    fsdp_layout lay;
    memset(&lay, 0, sizeof lay);
    fsdp_status status = fsdpi_list_layout(u, 1, &lay, tmp, NULL, NULL);
    if (status) return status;
    u->train.shard_numel = lay.shard_numel;
    u->train.packed_numel = lay.packed_numel;
    int64_t train_final = lay.final_numel,
            frozen_full = fsdpi_align_up(world * lay.shard_numel, FSDP_ALIGN_NUMEL);
    status = fsdpi_list_layout(u, 0, &lay, tmp, NULL, NULL);
    if (status) return status;
    u->frozen.shard_numel = lay.shard_numel;
    u->frozen.packed_numel = lay.packed_numel;
    int64_t finals = fsdpi_align_up(frozen_full + world * lay.shard_numel, FSDP_ALIGN_NUMEL);
    u->slot_numel = finals + train_final + lay.final_numel;

    memset(&lay, 0, sizeof lay);
    lay.shard_base = u->train.base;
    lay.final_base = finals;
    (void)fsdpi_list_layout(u, 1, &lay, tmp, gather, out);
    fsdpi_list_store(u, 1, tmp, 0);
    u->all_gather.num = lay.num_segs;
    u->copy_out.num = lay.num_blocks;
    memset(&lay, 0, sizeof lay);
    lay.shard_base = u->frozen.base;
    lay.full_base = frozen_full;
    lay.final_base = finals + train_final;
    (void)fsdpi_list_layout(u, 0, &lay, tmp, gather ? gather + u->all_gather.num : NULL,
                            out ? out + u->copy_out.num : NULL);
    fsdpi_list_store(u, 0, tmp, 0);
    u->all_gather.num += lay.num_segs;
    u->copy_out.num += lay.num_blocks;

    int users = world > 1 ? u->num_train : 0;
    u->users_offset = world * u->train.shard_numel;
    u->reduce_numel = u->users_offset + world * users;
    memset(&lay, 0, sizeof lay);
    lay.shard_base = u->train.base;
    lay.final_base = fsdpi_align_up(u->reduce_numel, FSDP_ALIGN_NUMEL);
    (void)fsdpi_list_layout(u, 1, &lay, tmp, reduce, cat);
    fsdpi_list_store(u, 1, tmp, 1);
    u->grad_numel = lay.final_base + lay.final_numel;
    u->reduce_scatter.num = lay.num_segs;
    u->chunk_cat.num = lay.num_blocks;
    return FSDP_OK;
}

static int fsdpi_class_find(fsdp_model *m, int pool, size_t bytes) {
    bytes = (size_t)fsdpi_align_up((int64_t)(bytes ? bytes : 1), FSDPI_ALIGN);
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

// One rank, no cast: the full parameters are the shards.
static int fsdpi_gather_is_alias(const fsdp_unit *u) {
    return fsdpi_group_size(u->model) == 1 && u->param_dtype == u->dtype;
}

// The backend sums the reduction in f32 or f64 while it reads; a narrower reduce dtype has to be
// rounded to, as upstream does, and cannot be fused.
static int fsdpi_is_wide(fsdp_dtype dtype) { return dtype == FSDP_F32 || dtype == FSDP_F64; }

static int fsdpi_can_fuse(const fsdp_unit *u) {
    const fsdp_world *w = u->model->world;
    return fsdpi_group_size(u->model) == 1 || (w->caps.flags & FSDP_CAP_FUSED_REDUCE) != 0;
}

// Gradients must be brought to the reduce dtype before the reduction, which cannot read them as
// they are.
static int fsdpi_must_convert(const fsdp_unit *u) {
    if (u->param_dtype == u->reduce_dtype) return 0;
    int widens = u->reduce_dtype == FSDP_F32 && fsdp_dtype_size(u->param_dtype) == 2;
    return !(widens && fsdpi_can_fuse(u));
}

static fsdp_status fsdpi_unit_classes(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int64_t bytes[FSDP_POOL_COUNT] = {0};
    bytes[FSDP_POOL_GATHER] = fsdpi_gather_is_alias(u) ? -1
                                                       : fsdpi_bytes(u->slot_numel, u->param_dtype);
    bytes[FSDP_POOL_GRAD] = u->num_train ? fsdpi_bytes(u->grad_numel, u->param_dtype) : -1;
    bytes[FSDP_POOL_RIN] = u->num_train ? fsdpi_bytes(u->reduce_numel, u->reduce_dtype) : -1;
    bytes[FSDP_POOL_ROUT] = u->num_train ? fsdpi_bytes(u->reduce_numel / fsdpi_group_size(m),
                                                       u->reduce_dtype)
                                         : -1;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_ROUT; pool++) {
        u->classes[pool] = -1;
        if (bytes[pool] < 0) continue;
        u->classes[pool] = fsdpi_class_find(m, pool, (size_t)bytes[pool]);
        if (u->classes[pool] < 0) return FSDP_ERR_OUT_OF_MEMORY;
    }
    return FSDP_OK;
}

static void fsdpi_unit_free(fsdp_unit *u) {
    fsdp_model *m = u->model;
    for (int i = 0; u->params && i < u->num_params; i++) fsdpi_model_free(m, u->params[i].name);
    fsdpi_model_free(m, u->params);
    fsdpi_model_free(m, u->name);
    fsdpi_model_free(m, u->lists);
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

// Parameters of a unit from their descs. The array of descs may have an older header's stride.
static fsdp_status fsdpi_unit_params(fsdp_unit *u, const fsdp_unit_desc *d) {
    fsdp_model *m = u->model;
    uint32_t stride = 0;
    for (int i = 0; i < d->num_params; i++) {
        const char *at = (const char *)d->params +
                         (size_t)i * (stride ? stride : sizeof(fsdp_param_desc));
        fsdp_param_desc pd;
        char what[64];
        snprintf(what, sizeof what, "fsdp_unit_desc.params[%d]", i);
        fsdp_status status = fsdpi_desc_read(m->world, &pd, at, sizeof pd, what);
        if (status) return status;
        if (i == 0) stride = pd.size ? pd.size : (uint32_t)sizeof pd;
        char fallback[16];
        snprintf(fallback, sizeof fallback, "p%d", i);
        const char *name = pd.name ? pd.name : fallback;
        status = fsdpi_param_check(m->world, u->name, name, &pd);
        if (status) return status;
        if (i == 0) u->dtype = pd.dtype;
        if (pd.dtype != u->dtype)
            return fsdpi_fail(m->world, FSDP_ERR_UNSUPPORTED,
                              "fully_shard of unit '%s': parameter '%s' is %s, the first one is "
                              "%s: parameters of one unit share their dtype: "
                              "make two units",
                              u->name, name, fsdp_dtype_name(pd.dtype), fsdp_dtype_name(u->dtype));
        fsdpi_param *p = &u->params[i];
        p->name = fsdpi_copy_text(&m->world->boot.allocator, name);
        if (!p->name)
            return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY,
                              "fully_shard of unit '%s': no memory", u->name);
        m->host_bytes += (int64_t)fsdpi_alloc_size(p->name);
        p->user = pd.user;
        p->requires_grad = !pd.frozen;
        p->user_index = p->requires_grad ? u->num_train++ : -1;
        p->lay.ndim = pd.ndim;
        p->lay.shard_dim = pd.shard_dim;
        memcpy(p->lay.shape, pd.shape, sizeof p->lay.shape);
    }
    return FSDP_OK;
}

static fsdp_status fsdpi_unit_dtypes(fsdp_unit *u, const fsdp_unit_desc *d) {
    const fsdp_model_desc *md = &u->model->desc;
    fsdp_dtype param = d->param_dtype ? d->param_dtype : md->param_dtype;
    fsdp_dtype reduce = d->reduce_dtype ? d->reduce_dtype : md->reduce_dtype;
    u->param_dtype = param && fsdp_dtype_is_float(u->dtype) ? param : u->dtype;
    u->reduce_dtype = reduce && fsdp_dtype_is_float(u->dtype) ? reduce : u->dtype;
    if ((param && !fsdp_dtype_is_float(param)) || (reduce && !fsdp_dtype_is_float(reduce)))
        return fsdpi_fail(u->model->world, FSDP_ERR_INVALID_ARG,
                          "fully_shard of unit '%s': param_dtype %d, reduce_dtype %d: expected "
                          "floating dtypes or KEEP",
                          u->name, param, reduce);
    return FSDP_OK;
}

// All that ranks must have given alike: it is part of what every collective compares.
static uint64_t fsdpi_unit_hash(const fsdp_unit *u) {
    const fsdp_model_desc *md = &u->model->desc;
    uint64_t h = fsdpi_hash(fsdpi_hash_text(u->name), (uint64_t)u->num_params);
    h = fsdpi_hash(fsdpi_hash(h, (uint64_t)u->param_dtype), (uint64_t)u->reduce_dtype);
    h = fsdpi_hash(fsdpi_hash(h, (uint64_t)md->grads_overwrite), (uint64_t)md->direct_min);
    for (int i = 0; i < u->num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        h = fsdpi_hash(fsdpi_hash(h, fsdpi_hash_text(p->name)), (uint64_t)p->requires_grad);
        h = fsdpi_hash(fsdpi_hash(h, (uint64_t)p->lay.ndim), (uint64_t)p->lay.shard_dim);
        for (int d = 0; d < p->lay.ndim; d++) h = fsdpi_hash(h, (uint64_t)p->lay.shape[d]);
    }
    return fsdpi_hash(h, (uint64_t)u->dtype);
}

static fsdp_status fsdpi_unit_fill(fsdp_unit *u, const fsdp_unit_desc *d) {
    fsdp_model *m = u->model;
    char fallback[24];
    snprintf(fallback, sizeof fallback, "unit%d", m->num_units);
    u->name = fsdpi_copy_text(&m->world->boot.allocator, d->name ? d->name : fallback);
    u->params = (fsdpi_param *)fsdpi_model_alloc(m, (size_t)d->num_params * sizeof *u->params);
    fsdp_layout_param *tmp = (fsdp_layout_param *)fsdpi_model_alloc(m, (size_t)d->num_params *
                                                                           sizeof *tmp);
    if (u->name) m->host_bytes += (int64_t)fsdpi_alloc_size(u->name);
    fsdp_status status = FSDP_OK;
    if (!u->name || !u->params || !tmp)
        status = fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "fully_shard of unit '%s': no memory",
                            d->name ? d->name : fallback);
    if (!status) {
        u->num_params = d->num_params;
        status = fsdpi_unit_params(u, d);
    }
    if (!status) status = fsdpi_unit_dtypes(u, d);
    if (!status) u->desc_hash = fsdpi_unit_hash(u);
    if (!status) {
        status = fsdpi_unit_layout(u, tmp);
        if (status)
            status = fsdpi_fail(m->world, status,
                                "fully_shard of unit '%s': its size is more than 2^60 elements",
                                u->name);
    }
    fsdpi_model_free(m, tmp);
    if (!status && fsdpi_unit_classes(u))
        status = fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "fully_shard of unit '%s': no memory",
                            u->name);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// >>pool
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
    if (buf->ptr) {
        if (w->comm) w->comm_ops->free(w->comm, buf->ptr, buf->bytes);
        else w->device_ops->free(w->device, buf->ptr, buf->bytes);
    }
    fsdpi_model_free(m, buf);
}

// Device memory, where peers can read it, and its two events.
static fsdp_status fsdpi_buf_alloc(fsdp_model *m, fsdp_buf *buf) {
    fsdp_world *w = m->world;
    void *ptr = NULL;
    fsdp_status status = w->comm ? w->comm_ops->alloc(w->comm, buf->bytes, &ptr)
                                 : w->device_ops->alloc(w->device, buf->bytes, &ptr);
    if (status)
        return fsdpi_fail(w, status, "%llu bytes for %s could not be allocated: %s",
                          (unsigned long long)buf->bytes, fsdp_pool_name(buf->pool),
                          w->comm ? w->comm_ops->error_text(w->comm) : fsdp_status_text(status));
    buf->ptr = (char *)ptr;
    if (w->mode != FSDPI_NATIVE) return FSDP_OK;
    status = w->device_ops->event(w->device, &buf->ready.native);
    if (!status) status = w->device_ops->event(w->device, &buf->avail.native);
    return status ? fsdpi_fail(w, status, "device %s could not make an event", w->device_ops->name)
                  : FSDP_OK;
}

// A buffer of a pool. In a dry run it is only counted.
static fsdp_status fsdpi_buf_new(fsdp_model *m, int pool, size_t bytes, fsdp_buf **out) {
    fsdp_buf *buf = (fsdp_buf *)fsdpi_model_alloc(m, sizeof *buf);
    *out = NULL;
    if (!buf)
        return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "no host memory for a buffer of %s",
                          fsdp_pool_name(pool));
    buf->bytes = (size_t)fsdpi_align_up((int64_t)(bytes ? bytes : 1), FSDPI_ALIGN);
    buf->pool = (uint8_t)pool;
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

static int fsdpi_pool_depth(const fsdp_model *m, int pool) {
    int ahead = pool == FSDP_POOL_GATHER ||
                pool == FSDP_POOL_GRAD; // filled while another is in use
    return ahead && m->world->mode != FSDPI_INLINE ? 2 : 1;
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
    for (int depth = fsdpi_pool_depth(m, c->pool); !status && c->count < depth;)
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

/* -------------------------------------------------------------------------------------------- */
// >>ops
// Owns: fsdpi_emit, the only door to the device and comm tables. It numbers a record, counts it,
// shows it to the observer, derives what it waits for from the buffers it reads and writes, and
// runs it.

// A record with the model's labels; the caller fills in the rest.
static fsdp_op fsdpi_op(const fsdp_model *m, const fsdp_unit *u, int kind, int label, int stream) {
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

/* A copy over blocks or a collective over segments, from src in dtype to dst in out_dtype. The
   caller has set what is special (scale, accumulate, in_place). An empty one is not issued. Of a
   collective a rank reads (W-1) times its own part from the others. */
static fsdp_status fsdpi_emit_work(fsdp_model *m, fsdp_op *op, fsdp_buf *src, fsdp_dtype dtype,
                                   fsdp_buf *dst, fsdp_dtype out_dtype, const fsdpi_work *work) {
    int is_copy = op->kind == FSDP_OP_COPY;
    if (work->count == 0) return FSDP_OK; // in a prediction, where no lists are made, always
    op->count = work->count;
    op->bytes = is_copy ? op->count * fsdp_dtype_size(out_dtype)
                        : (uint64_t)(fsdpi_group_size(m) - 1) * op->count * fsdp_dtype_size(dtype);
    op->dtype = (uint8_t)dtype;
    op->out_dtype = (uint8_t)out_dtype;
    op->list = is_copy ? (const void *)work->blocks : work->segs;
    op->list_count = (uint32_t)work->num;
    op->src = src;
    op->dst = dst;
    op->src_ptr = src->ptr;
    op->dst_ptr = dst->ptr;
    op->comm = op->stream == FSDP_STREAM_REDUCE ? m->reduce_comm : m->gather_comm;
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
    if (!status && !m->dry) status = fsdpi_mark(m->world, stream, &buf->avail);
    buf->held = 0;
    buf->released = ++m->release_seq;
    *slot = NULL;
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// >>schedule
// Owns: the transition table and its actions. A public call looks up one row and runs its actions;
// an action fills op records and never calls a backend. Invariants: a call without a row changes
// nothing; an action that finds its goal reached does nothing. Source: FSDPState, FSDPParamGroup.

// The sharded block a unit's parameters lie in.
static fsdpi_flat_block *fsdpi_flat_of(const fsdp_unit *u) { return &u->model->flats[u->dtype]; }

static fsdp_status fsdpi_do_wait(fsdp_unit *u) {
    if (u->storage != FSDP_STORAGE_IN_FLIGHT) return FSDP_OK;
    fsdp_status status = fsdpi_emit_use(u->model, u, FSDP_LABEL_GATHER,
                                        u->gather ? u->gather : fsdpi_flat_of(u)->shard);
    if (!status) u->storage = FSDP_STORAGE_UNSHARDED;
    return status;
}

// A gather that nobody waited for still reads shards, here and on the peers, which the caller may
// write next: the caller's stream waits for it too.
static fsdp_status fsdpi_do_reshard(fsdp_unit *u) {
    fsdp_status status = fsdpi_do_wait(u);
    u->storage = FSDP_STORAGE_SHARDED;
    u->stale = 0;
    fsdp_status released = fsdpi_release(u, &u->gather, FSDP_STREAM_COMPUTE);
    return status ? status : released;
}

static fsdp_status fsdpi_do_unshard(fsdp_unit *u) {
    fsdp_model *m = u->model;
    fsdp_status status = FSDP_OK;
    if (u->stale) {
        u->stale = 0;
        status = fsdpi_do_reshard(u);
    }
    if (status || u->storage != FSDP_STORAGE_SHARDED) return status;
    if (fsdpi_gather_is_alias(u)) {
        u->storage = FSDP_STORAGE_IN_FLIGHT;
        return FSDP_OK;
    }
    status = fsdpi_acquire(u, FSDP_POOL_GATHER, &u->gather);
    if (status) return status;
    fsdp_buf *shard = fsdpi_flat_of(u)->shard, *slot = u->gather;
    fsdp_dtype dtype = u->param_dtype;
    int cast = dtype != u->dtype;
    if (cast) {
        fsdp_op in = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_COPY_IN, FSDP_STREAM_GATHER);
        status = fsdpi_emit_work(m, &in, shard, u->dtype, slot, dtype, &u->copy_in);
    }
    if (!status && fsdpi_group_size(m) > 1) {
        fsdp_op op = fsdpi_op(m, u, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, FSDP_STREAM_GATHER);
        op.in_place = (uint8_t)cast; // my part is in the slot already
        status = fsdpi_emit_work(m, &op, cast ? slot : shard, dtype, slot, dtype, &u->all_gather);
        if (!status && u->copy_out.num > 0) {
            fsdp_op out = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_COPY_OUT, FSDP_STREAM_GATHER);
            status = fsdpi_emit_work(m, &out, slot, dtype, slot, dtype, &u->copy_out);
        }
    }
    if (!status) u->storage = FSDP_STORAGE_IN_FLIGHT;
    return status;
}

static fsdp_status fsdpi_do_reshard_forward(fsdp_unit *u) {
    return u->reshard_after_forward == FSDP_RESHARD_NEVER ? FSDP_OK : fsdpi_do_reshard(u);
}

// What stays must not be in flight: the caller may write shards next.
static fsdp_status fsdpi_do_reshard_backward(fsdp_unit *u) {
    return u->reshard_after_backward ? fsdpi_do_reshard(u) : fsdpi_do_wait(u);
}

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

/* Implicit backward prefetch: the unit whose forward came before this one's is gathered while this
   one computes. An inline device would only block earlier. */
static fsdp_status fsdpi_do_prefetch(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int at = u->last_order;
    if (at < 0) return FSDP_OK;
    u->last_order = m->order[at].previous;
    if (at == 0 || m->world->mode == FSDPI_INLINE) return FSDP_OK;
    return fsdpi_do_unshard(m->order[at - 1].unit);
}

// Zero what the caller's backward does not store to: padding, in its own slot layout.
static fsdp_status fsdpi_zero_padding(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int world = fsdpi_group_size(m);
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < u->num_params && !status; i++) {
        const fsdpi_param *p = &u->params[i];
        if (!p->requires_grad) continue;
        status = fsdpi_emit_fill(m, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, u->grad,
                                 u->param_dtype, p->grad_offset + p->lay.numel,
                                 world * p->lay.shard_numel - p->lay.numel, 0);
    }
    if (status || !u->pad_rin) return status;
    int64_t direct = world * (u->train.shard_numel - u->train.packed_numel);
    return fsdpi_emit_fill(m, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, u->grad, u->param_dtype,
                           direct, world * u->train.packed_numel, 0);
}

// The caller writes buf next: its stream waits for who used or wrote it last.
static fsdp_status fsdpi_caller_writes(fsdp_unit *u, fsdp_buf *buf) {
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_USE, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE);
    op.dst = buf;
    return fsdpi_emit(u->model, &op);
}

/* Where gradients will be written: zero, or what earlier microbatches left. One rank without casts
   writes straight into the shard gradient, if that is where the gradient would be added anyway. */
static fsdp_status fsdpi_do_grads(fsdp_unit *u) {
    fsdp_model *m = u->model;
    fsdp_buf *sgrad = fsdpi_flat_of(u)->grad;
    int overwrite = m->desc.grads_overwrite;
    if (u->num_train == 0 || u->grad) return FSDP_OK;
    u->grad_alias = fsdpi_group_size(m) == 1 && u->param_dtype == u->dtype &&
                    u->reduce_dtype == u->dtype && u->sync && !u->rin &&
                    !(overwrite && u->has_grad);
    if (u->grad_alias) {
        int fill = !u->has_grad && !u->grad_is_zero;
        u->grad_is_zero = 0;
        return fill ? fsdpi_emit_fill(m, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, sgrad, u->dtype,
                                      u->train.base, u->train.shard_numel, 0)
                    : fsdpi_caller_writes(u, sgrad);
    }
    fsdp_status status = fsdpi_acquire(u, FSDP_POOL_GRAD, &u->grad);
    if (status) return status;
    for (int i = 0; i < u->num_params; i++) u->params[i].written = 0;
    if (!overwrite)
        return fsdpi_emit_fill(m, u, FSDP_LABEL_GRADS, FSDP_STREAM_COMPUTE, u->grad, u->param_dtype,
                               0, u->grad_numel, 0);
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
                                 u->param_dtype, p->grad_offset, p->lay.numel, 0);
    }
    return status;
}

// Bring gradients to the reduce input: cast, chunk_cat, added to what earlier microbatches left.
static fsdp_status fsdpi_accumulate(fsdp_unit *u) {
    fsdp_model *m = u->model;
    int held = u->rin != NULL;
    fsdp_status status = held ? FSDP_OK : fsdpi_acquire(u, FSDP_POOL_RIN, &u->rin);
    if (!status && !held && u->pad_rin)
        status = fsdpi_emit_fill(m, u, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE, u->rin, u->reduce_dtype,
                                 0, u->reduce_numel, 0);
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE);
    op.accumulate = (uint8_t)held;
    if (!status)
        status = fsdpi_emit_work(m, &op, u->grad, u->param_dtype, u->rin, u->reduce_dtype, &u->acc);
    return status ? status : fsdpi_release(u, &u->grad, FSDP_STREAM_REDUCE);
}

/* Who used which parameter rides along: num_train flags for every rank, summed like gradients. The
   flags of a step are mostly those of the step before, so that they are seldom written. */
static fsdp_status fsdpi_emit_users(fsdp_unit *u, fsdp_buf *input, fsdp_dtype dtype) {
    fsdp_model *m = u->model;
    if (m->dry) return FSDP_OK;
    for (int i = 0; i < u->num_params; i++) {
        fsdpi_param *p = &u->params[i];
        if (p->requires_grad && p->used != p->flag) {
            if (u->flags_step == m->step + 1) fsdpi_drain(m->world); // a copy may still read them
            float flag = p->flag = p->used;
            (void)fsdp_convert(u->flags + (size_t)p->user_index * fsdp_dtype_size(u->param_dtype),
                               u->param_dtype, &flag, FSDP_F32, 1);
            (void)fsdp_convert(u->wide_flags +
                                   (size_t)p->user_index * fsdp_dtype_size(u->reduce_dtype),
                               u->reduce_dtype, &flag, FSDP_F32, 1);
        }
        p->used = 0;
    }
    u->flags_step = m->step + 1;
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

// Reduce output -> shard gradients: scale, cast, add to what is there. The trainables and, over
// several ranks, the users.
static fsdp_status fsdpi_red_out(fsdp_unit *u, fsdp_buf *from, fsdp_dtype dtype,
                                 const fsdpi_work *work, double scale, int accumulate) {
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_COPY, FSDP_LABEL_RED_OUT, FSDP_STREAM_REDUCE);
    op.scale = scale;
    op.accumulate = (uint8_t)accumulate;
    return fsdpi_emit_work(u->model, &op, from, dtype, fsdpi_flat_of(u)->grad, u->dtype, work);
}

// Reduce input -> shard gradients, over all ranks: in one fused op, or by way of a reduce output.
static fsdp_status fsdpi_reduce_scatter(fsdp_unit *u, fsdp_buf **input, fsdp_dtype dtype) {
    fsdp_model *m = u->model;
    fsdp_buf *sgrad = fsdpi_flat_of(u)->grad, *rout = NULL;
    double scale = 1.0 / fsdpi_group_size(m);
    int fused = fsdpi_can_fuse(u);
    int straight = fused ? fsdpi_is_wide(u->reduce_dtype)
                         : u->reduce_dtype == u->dtype && !u->has_grad;
    fsdp_op op = fsdpi_op(m, u, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, FSDP_STREAM_REDUCE);
    fsdp_status status = straight ? FSDP_OK : fsdpi_acquire(u, FSDP_POOL_ROUT, &rout);
    if (status) return status;
    if (straight && fused) {
        op.scale = scale;
        op.accumulate = u->has_grad;
    }
    status = fsdpi_emit_work(m, &op, *input, dtype, straight ? sgrad : rout,
                             straight ? u->dtype : u->reduce_dtype,
                             straight ? &u->reduce_scatter : &u->to_rout);
    if (!status) status = fsdpi_release(u, input, FSDP_STREAM_REDUCE);
    if (!status && straight && !fused)
        status = fsdpi_red_out(u, sgrad, u->dtype, &u->rescale, scale, 0);
    if (!status && !straight)
        status = fsdpi_red_out(u, rout, u->reduce_dtype, &u->red_out, scale, u->has_grad);
    fsdp_status released = fsdpi_release(u, &rout, FSDP_STREAM_REDUCE);
    return status ? status : released;
}

/* End of a unit's backward. Without sync the gradients stay, in the slot where they were written
   or, if they are to be widened or would be overwritten, summed in the reduce input. */
static fsdp_status fsdpi_do_reduce(fsdp_unit *u) {
    fsdp_model *m = u->model;
    if (u->num_train == 0) return FSDP_OK;
    if (u->grad_alias) { // other units may have written the block meanwhile: the event is for both
        u->has_grad = 1;
        fsdpi_own_users(u);
        return fsdpi_caller_writes(u, fsdpi_flat_of(u)->grad);
    }
    int overwrite = m->desc.grads_overwrite;
    fsdp_status status = overwrite ? fsdpi_zero_unused(u) : FSDP_OK;
    if (!status && !m->dry) // the caller wrote it
        status = fsdpi_mark(m->world, FSDP_STREAM_COMPUTE, &u->grad->ready);
    int elsewhere = u->rin || fsdpi_must_convert(u) ||
                    (!u->sync && (overwrite || u->param_dtype != u->reduce_dtype));
    if (!status && elsewhere) status = fsdpi_accumulate(u);
    if (status || !u->sync) return status;
    fsdp_buf **input = u->rin ? &u->rin : &u->grad;
    fsdp_dtype dtype = u->rin ? u->reduce_dtype : u->param_dtype;
    if (fsdpi_group_size(m) == 1) { // the sum over one rank is its gradient
        status = fsdpi_red_out(u, *input, dtype, &u->red_out, 1.0, u->has_grad);
        if (!status) status = fsdpi_release(u, input, FSDP_STREAM_REDUCE);
        fsdpi_own_users(u);
    } else {
        fsdp_op cat = fsdpi_op(m, u, FSDP_OP_COPY, FSDP_LABEL_ACC, FSDP_STREAM_REDUCE);
        if (!u->rin)
            status = fsdpi_emit_work(m, &cat, u->grad, dtype, u->grad, dtype, &u->chunk_cat);
        if (!status) status = fsdpi_emit_users(u, *input, dtype);
        if (!status) status = fsdpi_reduce_scatter(u, input, dtype);
    }
    if (status) return status;
    u->has_grad = 1;
    u->grad_is_zero = 0;
    return FSDP_OK;
}

static fsdp_status fsdpi_do_stale(fsdp_unit *u) {
    u->stale = u->storage != FSDP_STORAGE_SHARDED;
    return FSDP_OK;
}

static fsdp_status fsdpi_do_zero_grad(fsdp_unit *u) {
    u->has_grad = 0;
    for (int i = 0; i < u->num_params; i++) u->params[i].has_grad = 0;
    return FSDP_OK;
}

// After reset nothing of a step is left. The streams have been drained.
static fsdp_status fsdpi_do_drop(fsdp_unit *u) {
    fsdp_status status = fsdpi_do_reshard(u);
    fsdp_status grad = fsdpi_release(u, &u->grad, FSDP_STREAM_COMPUTE),
                rin = fsdpi_release(u, &u->rin, FSDP_STREAM_COMPUTE);
    for (int i = 0; i < u->num_params; i++) u->params[i].used = 0;
    u->forwards = 0;
    u->last_order = -1;
    (void)fsdpi_do_zero_grad(u);
    return status ? status : grad ? grad : rin;
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
        {FSDPI_I | FSDPI_F, FSDPI_OUT,  0, FSDP_STATE_FORWARD, {fsdpi_do_unshard, fsdpi_do_wait}},
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
            {fsdpi_do_unshard, fsdpi_do_wait, fsdpi_do_grads, fsdpi_do_prefetch, fsdpi_do_enter}},
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
        {FSDPI_I | FSDPI_B, FSDPI_BOTH, 0, FSDP_STATE_IDLE, {fsdpi_do_reshard_backward}},
    },
    {{FSDPI_ALL,         FSDPI_BOTH, 0, FSDPI_KEEP, {NULL}}}, // data
    {{FSDPI_P,           FSDPI_IN,   0, FSDPI_KEEP, {NULL}}}, // grad
    {{FSDPI_I,           FSDPI_OUT,  0, FSDPI_KEEP, {fsdpi_do_stale}}}, // params_changed
    {{FSDPI_I,           FSDPI_OUT,  0, FSDPI_KEEP, {fsdpi_do_stale}}}, // load
    {{FSDPI_I,           FSDPI_OUT,  0, FSDPI_KEEP, {NULL}}}, // full
    {{FSDPI_I,           FSDPI_OUT,  0, FSDPI_KEEP, {fsdpi_do_zero_grad}}}, // zero_grad
    {{FSDPI_I,           FSDPI_OUT,  0, FSDPI_KEEP, {NULL}}}, // clip
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
static fsdp_status fsdpi_wrong_call(const fsdp_unit *u, int call) {
    static const char *const states[] = {"IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"};
    static const char *const storages[] = {"SHARDED", "IN_FLIGHT", "UNSHARDED"};
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
                      fsdpi_call_name(call), u->name, states[u->state], storages[u->storage],
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

/* -------------------------------------------------------------------------------------------- */
// >>commit
// Owns: the flat blocks of the model and the lists of the units, made once, when all units are
// known.

// Where each unit lies in the flat blocks: trainables of all units, then frozen ones; counts of
// users behind the gradients.
static void fsdpi_place_units(fsdp_model *m) {
    for (int d = 0; d < FSDP_DTYPE_COUNT; d++)
        m->flats[d].train_numel = m->flats[d].numel = m->flats[d].grad_numel = 0;
    for (int i = 0; i < m->num_units; i++) {
        fsdp_unit *u = m->units[i];
        fsdpi_flat_block *flat = &m->flats[u->dtype];
        u->train.base = flat->train_numel;
        flat->train_numel += fsdpi_align_up(u->train.shard_numel, FSDP_ALIGN_NUMEL);
    }
    for (int d = 0; d < FSDP_DTYPE_COUNT; d++)
        m->flats[d].numel = m->flats[d].grad_numel = m->flats[d].train_numel;
    for (int i = 0; i < m->num_units; i++) {
        fsdp_unit *u = m->units[i];
        fsdpi_flat_block *flat = &m->flats[u->dtype];
        u->frozen.base = flat->numel;
        flat->numel += fsdpi_align_up(u->frozen.shard_numel, FSDP_ALIGN_NUMEL);
        u->users_base = flat->grad_numel;
        if (fsdpi_group_size(m) > 1) flat->grad_numel += u->num_train;
    }
}

// One row of width elements, from src to dst.
static fsdp_block fsdpi_run(int64_t src, int64_t dst, int64_t width) {
    fsdp_block b = {src, dst, width, 1, width, width};
    return b;
}

// The lists that need offsets in the flat blocks or another form than the layout's.
static void fsdpi_unit_lists(fsdp_unit *u) {
    int world = fsdpi_group_size(u->model), rank = u->model->info.shard_mesh_rank;
    int64_t shard_numel = u->train.shard_numel;
    for (int i = 0; i < u->all_gather.num; i++) {
        fsdp_seg s = u->all_gather.segs[i];
        u->copy_in.blocks[u->copy_in.num++] = fsdpi_run(s.shard, s.full + rank * s.count, s.count);
    }
    for (int i = 0; i < u->chunk_cat.num; i++) { // the layout's blocks, from right to left
        fsdp_block b = u->chunk_cat.blocks[i];
        fsdp_block reversed = {b.dst, b.src, b.width, b.height, b.dst_pitch, b.src_pitch};
        u->chunk_cat.blocks[i] = u->acc.blocks[u->acc.num++] = reversed;
    }
    for (int i = 0; i < u->num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        if (!p->requires_grad) continue;
        if (p->lay.direct)
            u->acc.blocks[u->acc.num++] = fsdpi_run(p->grad_offset, p->grad_offset,
                                                    world * p->lay.shard_numel);
        else u->pad_rin |= p->lay.shard_dim > 0 && p->lay.shape[p->lay.shard_dim] % world != 0;
    }
    for (int i = 0; i < u->reduce_scatter.num; i++) {
        u->to_rout.segs[i] = u->reduce_scatter.segs[i];
        u->to_rout.segs[i].shard -= u->train.base;
    }
    u->red_out.blocks[u->red_out.num++] = fsdpi_run(0, u->train.base, shard_numel);
    u->rescale.blocks[u->rescale.num++] = fsdpi_run(u->train.base, u->train.base, shard_numel);
    if (world > 1 && u->num_train > 0) { // the counts of users are one segment more
        fsdp_seg counts = {u->users_base, u->users_offset, u->num_train};
        fsdp_block rows = {0, u->users_offset, u->num_train, world, 0, u->num_train};
        u->reduce_scatter.segs[u->reduce_scatter.num++] = counts;
        counts.shard = shard_numel;
        u->to_rout.segs[u->reduce_scatter.num - 1] = counts;
        u->users.blocks[u->users.num++] = rows;
        u->red_out.blocks[u->red_out.num++] = fsdpi_run(shard_numel, u->users_base, u->num_train);
        u->rescale.blocks[u->rescale.num++] = fsdpi_run(u->users_base, u->users_base, u->num_train);
    }
    u->to_rout.num = u->reduce_scatter.num;
}

static void fsdpi_work_count(fsdpi_work *work) {
    for (int i = 0; i < work->num; i++)
        work->count += (uint64_t)(work->blocks ? work->blocks[i].width * work->blocks[i].height
                                               : work->segs[i].count);
}

static fsdp_status fsdpi_unit_build(fsdp_unit *u, fsdp_layout_param *tmp) {
    fsdp_model *m = u->model;
    size_t segs = (size_t)(u->num_params + 1), flags = (size_t)u->num_train * 8;
    fsdpi_work *with_segs[] = {&u->all_gather, &u->reduce_scatter, &u->to_rout};
    fsdpi_work *with_blocks[] = {&u->copy_in, &u->copy_out, &u->chunk_cat, &u->acc,
                                 &u->users,   &u->red_out,  &u->rescale};
    size_t rooms[] = {segs,
                      (size_t)u->copy_out.num,
                      (size_t)u->chunk_cat.num,
                      (size_t)u->chunk_cat.num + segs,
                      1,
                      2,
                      2};
    size_t blocks = 0;
    for (int i = 0; i < 7; i++) blocks += rooms[i];
    char *at = (char *)fsdpi_model_alloc(m, 3 * segs * sizeof(fsdp_seg) +
                                                blocks * sizeof(fsdp_block) + 2 * flags);
    if (!at)
        return fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY,
                          "commit: no memory for the lists of unit '%s'", u->name);
    u->lists = at;
    for (int i = 0; i < 3; i++, at += segs * sizeof(fsdp_seg))
        with_segs[i]->segs = (fsdp_seg *)(void *)at;
    for (int i = 0; i < 7; at += rooms[i++] * sizeof(fsdp_block))
        with_blocks[i]->blocks = (fsdp_block *)(void *)at;
    u->flags = at;
    u->wide_flags = at + flags;
    (void)fsdpi_unit_layout(u, tmp);
    fsdpi_unit_lists(u);
    for (int i = 0; i < 3; i++) fsdpi_work_count(with_segs[i]);
    for (int i = 0; i < 7; i++) fsdpi_work_count(with_blocks[i]);
    return FSDP_OK;
}

// What a unit is before fsdpi_unit_build: sizes measured, no lists.
static void fsdpi_unit_unbuild(fsdp_unit *u) {
    static const fsdpi_work none = {NULL, NULL, 0, 0};
    int copy_out = u->copy_out.num, chunk_cat = u->chunk_cat.num;
    u->all_gather = u->reduce_scatter = u->to_rout = u->copy_in = u->copy_out = none;
    u->chunk_cat = u->acc = u->users = u->red_out = u->rescale = none;
    u->copy_out.num = copy_out;
    u->chunk_cat.num = chunk_cat;
    u->lists = NULL;
    u->pad_rin = 0;
}

static fsdp_status fsdpi_blocks_new(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++) {
        fsdpi_flat_block *flat = &m->flats[d];
        if (flat->numel > 0)
            status = fsdpi_buf_new(m, FSDP_POOL_SHARD, (size_t)fsdpi_bytes(flat->numel, d),
                                   &flat->shard);
        if (!status && flat->grad_numel > 0)
            status = fsdpi_buf_new(m, FSDP_POOL_SGRAD, (size_t)fsdpi_bytes(flat->grad_numel, d),
                                   &flat->grad);
    }
    return status;
}

static void fsdpi_blocks_free(fsdp_model *m) {
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        fsdpi_buf_free(m, m->flats[d].shard);
        fsdpi_buf_free(m, m->flats[d].grad);
        m->flats[d].shard = m->flats[d].grad = NULL;
    }
    fsdpi_buf_free(m, m->scalar);
    fsdpi_buf_free(m, m->full_scratch);
    m->scalar = m->full_scratch = NULL;
}

// A unit whose parameters are all empty still needs an address to point at.
static void fsdpi_need_blocks(fsdp_model *m) {
    for (int i = 0; i < m->num_units; i++) {
        fsdpi_flat_block *flat = fsdpi_flat_of(m->units[i]);
        if (flat->numel == 0) flat->numel = flat->grad_numel = FSDP_ALIGN_NUMEL;
        if (m->units[i]->num_train && flat->grad_numel == 0) flat->grad_numel = FSDP_ALIGN_NUMEL;
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
    m->norm_blocks = (fsdp_block *)fsdpi_model_alloc(m, (size_t)m->num_params *
                                                            sizeof *m->norm_blocks);
    if (!status && !m->norm_blocks)
        status = fsdpi_fail(m->world, FSDP_ERR_OUT_OF_MEMORY, "commit: no memory");
    return status;
}

static void fsdpi_uncommit(fsdp_model *m) {
    for (int i = 0; i < m->num_units; i++) {
        fsdpi_model_free(m, m->units[i]->lists);
        fsdpi_unit_unbuild(m->units[i]);
    }
    fsdpi_model_free(m, m->norm_blocks);
    m->norm_blocks = NULL;
    fsdpi_blocks_free(m);
}

static fsdp_status fsdpi_commit(fsdp_model *m) {
    fsdp_status status = fsdpi_failed(m->world);
    if (status || m->committed) return status;
    if (m->num_units == 0)
        return fsdpi_fail(m->world, FSDP_ERR_INVALID_STATE,
                          "commit: the model has no units: call fsdp_fully_shard first");
    fsdpi_place_units(m);
    fsdpi_need_blocks(m);
    if (!m->dry) status = fsdpi_commit_tables(m);
    if (!status) status = fsdpi_blocks_new(m);
    if (!status) status = fsdpi_buf_new(m, FSDP_POOL_SCRATCH, sizeof(double), &m->scalar);
    if (status) {
        fsdpi_uncommit(m);
        return fsdpi_model_fail(m, status);
    }
    m->committed = 1;
    return FSDP_OK;
}

// Free everything of a model. For a prediction's copy: what the dry run has counted.
static void fsdpi_model_free_buffers(fsdp_model *m) {
    for (int i = 0; i < m->num_classes; i++) {
        for (int k = 0; k < m->classes[i].count; k++) fsdpi_buf_free(m, m->classes[i].slots[k]);
        fsdpi_model_free(m, m->classes[i].slots);
    }
    fsdpi_blocks_free(m);
    fsdpi_model_free(m, m->classes);
    fsdpi_model_free(m, m->order);
    fsdpi_model_free(m, m->undefined);
}

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
    for (int i = 0; i < m->num_units; i++) fsdpi_unit_free(m->units[i]);
    fsdpi_model_free(m, m->units);
    if (m->own_mesh) fsdpi_mesh_free(m->own_mesh);
    fsdpi_free(&w->boot.allocator, m);
}

/* -------------------------------------------------------------------------------------------- */
// >>step
// Owns: model-wide work: finalize, norms, gathering to one tensor, prediction.

// Is the call possible for all units?
static fsdp_status fsdpi_check_units(fsdp_model *m, int call) {
    for (int i = 0; i < m->num_units; i++)
        if (!fsdpi_lookup(m->units[i], call)) return fsdpi_wrong_call(m->units[i], call);
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
    if (!m)
        return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "%s: the model is NULL",
                          fsdpi_call_name(call));
    fsdp_status status = fsdpi_commit(m);
    if (!status) status = fsdpi_check_units(m, call);
    if (!status) status = fsdpi_announce(m, NULL, call, FSDP_STATE_IDLE);
    return status || !run ? status : fsdpi_run_units(m, call);
}

// Shards are as the caller's stream has left them: later gathers come after.
static fsdp_status fsdpi_shards_written(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++)
        if (m->flats[d].shard)
            status = fsdpi_mark(m->world, FSDP_STREAM_COMPUTE, &m->flats[d].shard->ready);
    return status;
}

// The caller's stream waits for all shard gradients; what has none is zero; who used what is read.
static fsdp_status fsdpi_grads_ready(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < m->num_units && !status; i++) {
        fsdp_unit *u = m->units[i];
        if (u->num_train == 0 || u->has_grad || u->grad_is_zero) continue;
        status = fsdpi_emit_fill(m, u, FSDP_LABEL_FINAL, FSDP_STREAM_COMPUTE,
                                 fsdpi_flat_of(u)->grad, u->dtype, u->train.base,
                                 u->train.shard_numel, 0);
        u->grad_is_zero = 1;
    }
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++)
        if (m->flats[d].grad) status = fsdpi_emit_use(m, NULL, FSDP_LABEL_FINAL, m->flats[d].grad);
    if (status || m->dry || fsdpi_group_size(m) == 1) return status;
    status = fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
    for (int i = 0; i < m->num_units && !status; i++) {
        fsdp_unit *u = m->units[i];
        size_t size = fsdp_dtype_size(u->dtype);
        for (int k = 0; k < u->num_params && u->has_grad; k++) {
            fsdpi_param *p = &u->params[k];
            float users;
            if (!p->requires_grad) continue;
            (void)fsdp_convert(&users, FSDP_F32,
                               fsdpi_flat_of(u)->grad->ptr +
                                   (size_t)(u->users_base + p->user_index) * size,
                               u->dtype, 1);
            p->has_grad = users != 0.0f;
        }
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
    if (m->is_last_backward) {
        fsdpi_forget_forwards(m);
        for (int i = 0; i < m->num_units; i++) (void)fsdpi_do_stale(m->units[i]);
        if (!m->dry) status = fsdpi_shards_written(m);
    }
    return status;
}

static fsdp_status fsdpi_norm(fsdp_model *m, double *norm) {
    fsdp_status status = FSDP_OK;
    int num = 0, accumulate = 0;
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++) {
        int first = num;
        for (int i = 0; i < m->num_units; i++) {
            const fsdp_unit *u = m->units[i];
            for (int k = 0; k < u->num_params && u->dtype == d && u->has_grad; k++) {
                const fsdpi_param *p = &u->params[k];
                fsdp_block b = {p->lay.shard_offset, 0, p->lay.local_numel, 1,
                                p->lay.local_numel,  0};
                if (p->has_grad) m->norm_blocks[num++] = b;
            }
        }
        if (!m->flats[d].grad) continue;
        fsdp_op op = fsdpi_op(m, NULL, FSDP_OP_NORM, FSDP_LABEL_CLIP, FSDP_STREAM_COMPUTE);
        op.dtype = (uint8_t)d;
        op.out_dtype = FSDP_F64;
        op.accumulate = (uint8_t)accumulate;
        op.list = m->norm_blocks + first;
        op.list_count = (uint32_t)(num - first);
        for (int i = first; i < num; i++) op.count += (uint64_t)m->norm_blocks[i].width;
        op.src = m->flats[d].grad;
        op.dst = m->scalar;
        op.src_ptr = op.src->ptr;
        op.dst_ptr = op.dst->ptr;
        status = fsdpi_emit(m, &op);
        accumulate = 1;
    }
    if (!accumulate) *(double *)(void *)m->scalar->ptr = 0; // no trainable parameter at all
    if (!status && fsdpi_group_size(m) > 1) {
        fsdp_op op = fsdpi_op(m, NULL, FSDP_OP_ALL_REDUCE, FSDP_LABEL_CLIP, FSDP_STREAM_REDUCE);
        op.dtype = op.out_dtype = FSDP_F64;
        op.in_place = 1;
        op.count = 1;
        op.bytes = (uint64_t)(fsdpi_group_size(m) - 1) * sizeof(double);
        op.src = op.dst = m->scalar;
        op.src_ptr = op.dst_ptr = m->scalar->ptr;
        op.comm = m->reduce_comm;
        status = fsdpi_emit(m, &op);
    }
    if (!status) status = fsdpi_emit_use(m, NULL, FSDP_LABEL_CLIP, m->scalar);
    if (!status) status = fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
    if (!status) *norm = sqrt(*(double *)(void *)m->scalar->ptr);
    return status;
}

// Multiply all gradients. max_norm / (norm + 1e-6) as upstream; a NaN norm makes them NaN.
static fsdp_status fsdpi_scale_grads(fsdp_model *m, double scale) {
    fsdp_status status = FSDP_OK;
    for (int d = 1; d < FSDP_DTYPE_COUNT && !status; d++) {
        int64_t numel = m->flats[d].train_numel;
        if (!m->flats[d].grad || numel == 0) continue;
        m->flats[d].whole = fsdpi_run(0, 0, numel);
        fsdpi_work work = {&m->flats[d].whole, NULL, 1, (uint64_t)numel};
        fsdp_op op = fsdpi_op(m, NULL, FSDP_OP_COPY, FSDP_LABEL_CLIP, FSDP_STREAM_COMPUTE);
        op.scale = scale;
        status = fsdpi_emit_work(m, &op, m->flats[d].grad, d, m->flats[d].grad, d, &work);
    }
    return status;
}

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

// Bytes of the largest parameter, padded.
static int64_t fsdpi_largest_param(const fsdp_model *m) {
    int64_t largest = 0;
    for (int i = 0; i < m->num_units; i++)
        for (int k = 0; k < m->units[i]->num_params; k++) {
            int64_t numel = fsdpi_group_size(m) * m->units[i]->params[k].lay.shard_numel;
            if (fsdpi_bytes(numel, m->units[i]->dtype) > largest)
                largest = fsdpi_bytes(numel, m->units[i]->dtype);
        }
    return largest;
}

/* Gather one parameter, or its gradient, in its own dtype, in pieces that fit the scratch buffer:
   the world's ranks bring piece after piece of their shards. */
static fsdp_status fsdpi_full(fsdp_unit *u, const fsdpi_param *p, fsdp_buf *block, char *full) {
    fsdp_model *m = u->model;
    int world = fsdpi_group_size(m);
    size_t size = fsdp_dtype_size(u->dtype);
    if (world == 1) {
        if (full)
            memcpy(full, block->ptr + (size_t)p->lay.shard_offset * size,
                   (size_t)p->lay.numel * size);
        return FSDP_OK;
    }
    fsdp_status status = FSDP_OK;
    if (!m->full_scratch) {
        int64_t bytes = fsdpi_min(fsdpi_largest_param(m), m->desc.fill_bytes);
        if (bytes < world * 8) bytes = world * 8; // an element of every rank
        status = fsdpi_buf_new(m, FSDP_POOL_SCRATCH, (size_t)bytes, &m->full_scratch);
        if (status) return fsdpi_model_fail(m, status);
    }
    int64_t step = (int64_t)(m->full_scratch->bytes / ((size_t)world * size));
    for (int64_t at = 0; at < p->lay.shard_numel && !status; at += step) {
        fsdp_seg seg = {p->lay.shard_offset + at, 0, fsdpi_min(step, p->lay.shard_numel - at)};
        m->full_seg = seg; // a worker may read it after a failure has ended this call
        fsdp_op op = fsdpi_op(m, u, FSDP_OP_ALL_GATHER, FSDP_LABEL_FULL, FSDP_STREAM_GATHER);
        fsdpi_work work = {NULL, &m->full_seg, 1, (uint64_t)seg.count};
        status = fsdpi_emit_work(m, &op, block, u->dtype, m->full_scratch, u->dtype, &work);
        if (!status) status = fsdpi_emit_use(m, u, FSDP_LABEL_FULL, m->full_scratch);
        if (!status) status = fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
        for (int k = 0; k < world && full && !status; k++)
            fsdpi_scatter_piece(p, world, k, at, seg.count,
                                m->full_scratch->ptr + (size_t)(k * seg.count) * size, full, size);
    }
    return status;
}

// The steps of a prediction: units that never reshard are open around the others.
static fsdp_status fsdpi_rehearse(fsdp_model *m) {
    static const uint8_t calls[] = {FSDP_CALL_PRE_FORWARD, FSDP_CALL_POST_FORWARD,
                                    FSDP_CALL_PRE_BACKWARD, FSDP_CALL_POST_BACKWARD};
    fsdp_status status = FSDP_OK;
    for (int half = 0; half < 2; half++) {
        const uint8_t *call = calls + 2 * half;
        for (int pass = 0; pass < 3;
             pass++) { // open those around, run the others, close those around
            for (int i = 0; i < m->num_units && !status; i++) {
                fsdp_unit *u = m->units[half ? m->num_units - 1 - i : i];
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
    fsdp_unit *copy = (fsdp_unit *)fsdpi_model_alloc(dry, sizeof *copy + (size_t)u->num_params *
                                                                             sizeof *u->params);
    if (!copy) return NULL;
    *copy = *u;
    copy->model = dry;
    copy->params = (fsdpi_param *)(void *)(copy + 1);
    memcpy(copy->params, u->params, (size_t)u->num_params * sizeof *u->params);
    copy->gather = copy->grad = copy->rin = NULL;
    fsdpi_unit_unbuild(copy);
    copy->state = copy->storage = copy->stale = copy->has_grad = copy->grad_alias = 0;
    copy->sync = copy->reshard_after_backward = copy->grad_is_zero = 1;
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
    dry->classes = (fsdpi_class *)fsdpi_model_alloc(dry, (size_t)(m->num_classes + 1) *
                                                             sizeof *dry->classes);
    fsdp_status status = dry->units && dry->classes ? FSDP_OK : FSDP_ERR_OUT_OF_MEMORY;
    for (int i = 0; !status && i < m->num_classes; i++) {
        dry->classes[i].pool = m->classes[i].pool;
        dry->classes[i].bytes = m->classes[i].bytes;
        dry->num_classes++;
    }
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
    for (int i = 0; i < m->num_classes && !status; i++)
        while (m->classes[i].count < dry->classes[i].count && !status)
            status = fsdpi_class_add(m, &m->classes[i]);
    fsdpi_dry_free(dry);
    return status ? fsdpi_model_fail(m, status) : FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// >>public
// Public functions, thin: validate, one internal call, record the error. Internals never call
// these.

static void fsdpi_world_messages(fsdp_world *w, const fsdp_world_desc *d) {
    w->rank = d->world_size > 0 ? d->rank : -1; // -1: not known yet
    w->log_level = d->log_level == FSDP_LOG_NONE ? 0 : d->log_level ? d->log_level : FSDP_LOG_WARN;
    w->boot.logger = d->logger;
    if (!d->logger.log) w->boot.logger.log = fsdpi_stderr_log;
}

static fsdp_status fsdpi_world_make(fsdp_world *early, fsdp_world_desc *d, fsdp_world **out) {
    fsdp_status status = fsdpi_world_resolve(early, d);
    if (!status) status = fsdpi_job_name(early, d, early->job, sizeof early->job);
    if (status) return status;
    fsdp_world *w = (fsdp_world *)fsdpi_alloc(&d->allocator, sizeof *w);
    if (!w) return fsdpi_fail(early, FSDP_ERR_OUT_OF_MEMORY, "fsdp_init: no memory");
    memcpy(w->job, early->job, sizeof w->job);
    fsdpi_world_messages(w, d);
    w->boot.rank = w->rank;
    w->size = w->boot.size = d->world_size;
    w->boot.local_rank = d->local_rank;
    w->boot.timeout_ns = (int64_t)d->timeout_ms * 1000000;
    w->boot.threads = d->threads;
    w->boot.allocator = d->allocator;
    w->boot.clock = d->clock;
    w->boot.user = d->user;
    w->boot.job = w->job;
    status = fsdpi_world_open_comm(w, d);
    if (!status) status = fsdpi_world_open_device(w, d);
    if (!status) status = fsdpi_world_open_streams(w, d->lanes);
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
    if (!w) return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "%s: the world is NULL", what);
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

static fsdp_status fsdpi_mesh_add(fsdp_world *w, const fsdp_mesh_desc *d, fsdp_mesh **out) {
    fsdp_mesh *mesh;
    fsdp_status status = fsdpi_mesh_make(w, d, &mesh);
    for (int dim = 0; !status && dim < mesh->ndim; dim++) {
        status = fsdpi_mesh_groups(mesh, dim);
        if (status) fsdpi_mesh_free(mesh);
    }
    if (status) return fsdpi_failed(w) ? status : fsdpi_fail_together(w, status);
    mesh->next = w->meshes;
    w->meshes = mesh;
    *out = mesh;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_mesh_create(fsdp_world *world, const fsdp_mesh_desc *desc,
                                      fsdp_mesh **mesh) {
    fsdp_mesh_desc d;
    if (!world || !desc || !mesh)
        return fsdpi_fail(world, FSDP_ERR_INVALID_ARG, "mesh_create: an argument is NULL");
    *mesh = NULL;
    fsdp_status status = fsdpi_failed(world);
    if (!status) status = fsdpi_desc_read(world, &d, desc, sizeof d, "fsdp_mesh_desc");
    if (!status) status = fsdpi_mesh_check(world, &d);
    return status ? status : fsdpi_mesh_add(world, &d, mesh);
}

FSDP_API fsdp_status fsdp_mesh_1d(fsdp_world *world, const char *name, fsdp_mesh **mesh) {
    fsdp_mesh_desc d = FSDP_ZERO;
    d.ndim = 1;
    d.shape[0] = world ? world->size : 1;
    d.names[0] = name;
    return fsdp_mesh_create(world, &d, mesh);
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
    if (!mesh || !out)
        return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "mesh_info_init: an argument is NULL");
    fsdp_world *w = mesh->world;
    if (kind < FSDP_MESH_INFO_FSDP || kind > FSDP_MESH_INFO_HSDP)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG, "mesh_info_init: kind is %d", kind);
    int shards = kind != FSDP_MESH_INFO_DDP, replicates = kind != FSDP_MESH_INFO_FSDP;
    if (shard_dim < 0 && replicate_dim < 0)
        return fsdpi_fail(
            w, FSDP_ERR_INVALID_ARG,
            "mesh_info_init: at least one of shard_dim and replicate_dim must be given");
    if (shards != (shard_dim >= 0) || replicates != (replicate_dim >= 0))
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

static fsdp_status fsdpi_model_check(fsdp_world *w, fsdp_model_desc *d) {
    if ((d->param_dtype && !fsdp_dtype_is_float(d->param_dtype)) ||
        (d->reduce_dtype && !fsdp_dtype_is_float(d->reduce_dtype)))
        return fsdpi_fail(
            w, FSDP_ERR_INVALID_ARG,
            "model_create: param_dtype %d, reduce_dtype %d: expected floating dtypes or KEEP",
            d->param_dtype, d->reduce_dtype);
    if (d->reshard_after_forward < FSDP_RESHARD_NEVER ||
        d->reshard_after_forward > FSDP_RESHARD_ALWAYS)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "model_create: reshard_after_forward is %d, expected "
                          "FSDP_RESHARD_DEFAULT, _ALWAYS or _NEVER",
                          d->reshard_after_forward);
    if (d->direct_min < 0 || d->fill_bytes < 0)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "model_create: direct_min %lld, fill_bytes %lld: expected sizes",
                          (long long)d->direct_min, (long long)d->fill_bytes);
    if (d->mesh && d->mesh->world != w)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "model_create: the mesh belongs to another world");
    if (d->mesh && d->mesh->ndim != 1)
        return fsdpi_fail(
            w, FSDP_ERR_UNSUPPORTED,
            "model_create: a %d-D mesh (HSDP) is not supported yet, expected a 1-D mesh",
            d->mesh->ndim);
    if (d->reshard_after_forward == FSDP_RESHARD_DEFAULT)
        d->reshard_after_forward = FSDP_RESHARD_ALWAYS;
    if (d->direct_min == 0) d->direct_min = 65536;
    if (d->fill_bytes == 0) d->fill_bytes = 16 << 20;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_model_create(fsdp_world *world, const fsdp_model_desc *desc,
                                       fsdp_model **model) {
    fsdp_model_desc d;
    if (!world || !model)
        return fsdpi_fail(world, FSDP_ERR_INVALID_ARG, "model_create: an argument is NULL");
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
    if (!d.mesh) {
        fsdp_mesh_desc whole = FSDP_ZERO;
        whole.ndim = 1;
        whole.shape[0] = world->size;
        status = fsdpi_mesh_make(world, &whole, &m->own_mesh);
        if (!status) status = fsdpi_mesh_groups(m->own_mesh, 0);
        m->desc.mesh = m->own_mesh;
    }
    if (!status) status = fsdp_mesh_info_init(m->desc.mesh, FSDP_MESH_INFO_FSDP, 0, -1, &m->info);
    if (status) {
        fsdpi_model_close(m);
        return status;
    }
    m->gather_comm = m->desc.mesh->gather_comm[0];
    m->reduce_comm = m->desc.mesh->reduce_comm[0];
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

FSDP_API fsdp_status fsdp_fully_shard(fsdp_model *model, const fsdp_unit_desc *desc,
                                      fsdp_unit **unit) {
    fsdp_unit_desc d;
    if (!model || !desc || !unit)
        return fsdpi_fail(model ? model->world : NULL, FSDP_ERR_INVALID_ARG,
                          "fully_shard: an argument is NULL");
    *unit = NULL;
    fsdp_world *w = model->world;
    fsdp_status status = fsdpi_failed(w);
    if (!status) status = fsdpi_desc_read(w, &d, desc, sizeof d, "fsdp_unit_desc");
    if (status) return status;
    if (model->committed)
        return fsdpi_fail(w, FSDP_ERR_INVALID_STATE,
                          "fully_shard: the model is committed: make all units before the first "
                          "hook, init or load");
    if (d.num_params < 1 || !d.params)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "fully_shard of unit '%s': num_params is %d, expected >= 1, and params",
                          d.name ? d.name : "", d.num_params);
    if (d.reshard_after_forward < FSDP_RESHARD_NEVER ||
        d.reshard_after_forward > FSDP_RESHARD_ALWAYS)
        return fsdpi_fail(w, FSDP_ERR_INVALID_ARG,
                          "fully_shard of unit '%s': reshard_after_forward is %d, expected "
                          "FSDP_RESHARD_DEFAULT, _ALWAYS or _NEVER",
                          d.name ? d.name : "", d.reshard_after_forward);
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
    u->reshard_after_forward = d.reshard_after_forward ? d.reshard_after_forward
                                                       : model->desc.reshard_after_forward;
    u->reshard_after_backward = u->sync = 1;
    u->grad_is_zero = 1;
    u->last_order = -1;
    status = fsdpi_unit_fill(u, &d);
    if (status) {
        fsdpi_unit_free(u);
        return status;
    }
    for (int i = 0; i < u->num_params; i++) u->params[i].ordinal = model->num_params + i;
    model->num_params += u->num_params;
    model->units[model->num_units++] = u;
    *unit = u;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_model_commit(fsdp_model *model) {
    return model ? fsdpi_commit(model)
                 : fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "model_commit: the model is NULL");
}

FSDP_API fsdp_status fsdp_model_reserve(fsdp_model *model) {
    return model ? fsdpi_reserve(model)
                 : fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "model_reserve: the model is NULL");
}

FSDP_API int fsdp_num_params(const fsdp_model *model) { return model ? model->num_params : 0; }
FSDP_API int fsdp_num_units(const fsdp_model *model) { return model ? model->num_units : 0; }
FSDP_API const char *fsdp_unit_name(const fsdp_unit *unit) { return unit ? unit->name : ""; }

static void fsdpi_view(fsdp_unit *u, int index, fsdp_param_view *v) {
    const fsdpi_param *p = &u->params[index];
    const fsdpi_flat_block *flat = fsdpi_flat_of(u);
    memset(v, 0, sizeof *v);
    v->unit = u;
    v->name = p->name;
    v->unit_name = u->name;
    v->user = p->user;
    v->unit_user = u->user;
    v->ordinal = p->ordinal;
    v->index = index;
    v->dtype = u->dtype;
    v->ndim = p->lay.ndim;
    v->shard_dim = p->lay.shard_dim;
    v->requires_grad = p->requires_grad;
    memcpy(v->shape, p->lay.shape, sizeof v->shape);
    memcpy(v->local_shape, p->lay.shape, sizeof v->local_shape);
    v->start[v->shard_dim] = p->lay.start;
    v->local_shape[v->shard_dim] = p->lay.rows;
    v->numel = p->lay.local_numel;
    size_t offset = (size_t)fsdpi_bytes(p->lay.shard_offset, u->dtype);
    v->data = v->shard = flat->shard->ptr + offset;
    if (u->has_grad && p->has_grad) v->shard_grad = flat->grad->ptr + offset;
}

FSDP_API fsdp_status fsdp_param_view_get(fsdp_unit *unit, int index, fsdp_param_view *out) {
    if (!unit || !out)
        return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "param_view_get: an argument is NULL");
    fsdp_status status = unit->model->committed ? FSDP_OK : fsdpi_commit(unit->model);
    if (status) return status;
    if (index < 0 || index >= unit->num_params)
        return fsdpi_fail(unit->model->world, FSDP_ERR_INVALID_ARG,
                          "param_view_get: unit '%s' has no parameter %d, expected 0..%d",
                          unit->name, index, unit->num_params - 1);
    fsdpi_view(unit, index, out);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_param_at(fsdp_model *model, int ordinal, fsdp_param_view *out) {
    if (!model || !out)
        return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "param_at: an argument is NULL");
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

FSDP_API fsdp_status fsdp_init_params(fsdp_model *model, fsdp_init_fn fn, void *user) {
    fsdp_status status = fsdpi_model_call(model, FSDP_CALL_LOAD, 1);
    if (status) return status;
    if (!fn) return fsdpi_fail(model->world, FSDP_ERR_INVALID_ARG, "init_params: fn is NULL");
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(model, &v)) {
        if (v.numel == 0) continue;
        fsdp_param_view block = v;
        int64_t rows = v.local_shape[0], row_numel = v.numel / rows;
        int64_t step = model->desc.fill_bytes / fsdpi_bytes(row_numel, v.dtype);
        if (step < 1) step = 1;
        for (int64_t row = 0; row < rows; row += step) {
            block.local_shape[0] = fsdpi_min(step, rows - row);
            block.start[0] = v.start[0] + row;
            block.numel = block.local_shape[0] * row_numel;
            block.data = (char *)v.shard + fsdpi_bytes(row * row_numel, v.dtype);
            fn(user, &block);
        }
    }
    return fsdpi_shards_written(model);
}

FSDP_API fsdp_status fsdp_model_flat(fsdp_model *model, fsdp_dtype dtype, fsdp_flat *out) {
    if (!model || !out || !fsdp_dtype_size(dtype))
        return fsdpi_fail(model ? model->world : NULL, FSDP_ERR_INVALID_ARG,
                          "model_flat: an argument is NULL, or dtype %d is none", dtype);
    fsdp_status status = fsdpi_commit(model);
    if (status) return status;
    const fsdpi_flat_block *flat = &model->flats[dtype];
    memset(out, 0, sizeof *out);
    out->dtype = dtype;
    out->numel = flat->train_numel;
    if (flat->train_numel > 0) {
        out->shards = flat->shard->ptr;
        out->grads = flat->grad->ptr;
    }
    return FSDP_OK;
}

static fsdp_status fsdpi_param_call(fsdp_unit *u, int index, int call) {
    if (!u)
        return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "%s: the unit is NULL",
                          fsdpi_call_name(call));
    if (index < 0 || index >= u->num_params)
        return fsdpi_fail(u->model->world, FSDP_ERR_INVALID_ARG,
                          "%s: unit '%s' has no parameter %d, expected 0..%d",
                          fsdpi_call_name(call), u->name, index, u->num_params - 1);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_param_load(fsdp_unit *unit, int index, const void *full) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_LOAD);
    if (!status) status = fsdpi_model_call(unit->model, FSDP_CALL_LOAD, 1);
    if (status) return status;
    const fsdp_layout_param *lay = &unit->params[index].lay;
    if (!full && lay->numel > 0)
        return fsdpi_fail(unit->model->world, FSDP_ERR_INVALID_ARG, "param_load: full is NULL");
    fsdp_param_view v;
    fsdpi_view(unit, index, &v);
    int64_t outer = fsdpi_numel(lay->shape, 0, lay->shard_dim),
            inner = fsdpi_numel(lay->shape, lay->shard_dim + 1, lay->ndim);
    int64_t width = lay->rows * inner, pitch = lay->shape[lay->shard_dim] * inner;
    for (int64_t row = 0; row < outer && width > 0; row++)
        memcpy((char *)v.shard + fsdpi_bytes(row * width, v.dtype),
               (const char *)full + fsdpi_bytes(row * pitch + lay->start * inner, v.dtype),
               (size_t)fsdpi_bytes(width, v.dtype));
    return fsdpi_shards_written(unit->model);
}

FSDP_API fsdp_status fsdp_param_full(fsdp_unit *unit, int index, void *full) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_FULL);
    if (!status) status = fsdpi_model_call(unit->model, FSDP_CALL_FULL, 0);
    return status
               ? status
               : fsdpi_full(unit, &unit->params[index], fsdpi_flat_of(unit)->shard, (char *)full);
}

FSDP_API fsdp_status fsdp_param_full_grad(fsdp_unit *unit, int index, void *full) {
    fsdp_status status = fsdpi_param_call(unit, index, FSDP_CALL_FULL);
    if (!status) status = fsdpi_model_call(unit->model, FSDP_CALL_FULL, 0);
    if (status) return status;
    const fsdpi_param *p = &unit->params[index];
    if (!p->requires_grad)
        return fsdpi_fail(unit->model->world, FSDP_ERR_INVALID_STATE,
                          "param_full_grad: parameter '%s' of unit '%s' is frozen", p->name,
                          unit->name);
    if (unit->has_grad) return fsdpi_full(unit, p, fsdpi_flat_of(unit)->grad, (char *)full);
    if (full) memset(full, 0, (size_t)fsdpi_bytes(p->lay.numel, unit->dtype));
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_params_changed(fsdp_model *model) {
    fsdp_status status = fsdpi_model_call(model, FSDP_CALL_PARAMS_CHANGED, 1);
    return status ? status : fsdpi_shards_written(model);
}

// Finalize reports the first failed hook of the step again.
static fsdp_status fsdpi_remember(fsdp_model *m, fsdp_status status) {
    if (status && !m->hook_status) {
        m->hook_status = status;
        snprintf(m->hook_error, sizeof m->hook_error, "%s", fsdp_last_error(m->world));
    }
    return status;
}

static fsdp_status fsdpi_unit_call(fsdp_unit *u, int call) {
    if (!u)
        return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "%s: the unit is NULL",
                          fsdpi_call_name(call));
    fsdp_model *m = u->model;
    fsdp_status status = fsdpi_failed(m->world);
    if (status) return status;
    if (!m->committed) status = fsdpi_commit(m);
    if (status) return fsdpi_remember(m, status);
    if (m->driver.hook && m->driver.hook(m->driver.user, m, u, call)) return FSDP_OK;
    const fsdpi_row *row = fsdpi_lookup(u, call);
    if (!row) return fsdpi_remember(m, fsdpi_wrong_call(u, call));
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
   NULL only where the host has no memory either. */
static void *fsdpi_undefined(fsdp_model *m) {
    int64_t bytes = 1;
    for (int i = 0; i < m->num_units && !m->undefined; i++) {
        const fsdp_unit *u = m->units[i];
        int64_t numel = u->slot_numel > u->grad_numel ? u->slot_numel : u->grad_numel;
        if (fsdpi_bytes(numel, u->param_dtype) > bytes) bytes = fsdpi_bytes(numel, u->param_dtype);
    }
    if (!m->undefined) m->undefined = fsdpi_model_alloc(m, (size_t)bytes);
    return m->undefined;
}

static int fsdpi_getter_ok(fsdp_unit *u, int call) {
    const fsdpi_row *row = fsdpi_lookup(u, call);
    if (row && (call != FSDP_CALL_DATA || u->storage == FSDP_STORAGE_UNSHARDED)) return 1;
    (void)fsdpi_wrong_call(u, call);
    return 0;
}

FSDP_API void *fsdp_data(fsdp_unit *unit, int index) {
    if (fsdpi_param_call(unit, index, FSDP_CALL_DATA)) return NULL;
    if (fsdpi_failed(unit->model->world)) return fsdpi_undefined(unit->model);
    if (!fsdpi_getter_ok(unit, FSDP_CALL_DATA)) return NULL;
    const fsdp_layout_param *lay = &unit->params[index].lay;
    if (fsdpi_gather_is_alias(unit))
        return fsdpi_flat_of(unit)->shard->ptr + fsdpi_bytes(lay->shard_offset, unit->dtype);
    return unit->gather->ptr + fsdpi_bytes(lay->full_offset, unit->param_dtype);
}

FSDP_API void *fsdp_grad(fsdp_unit *unit, int index) {
    if (fsdpi_param_call(unit, index, FSDP_CALL_GRAD)) return NULL;
    fsdpi_param *p = &unit->params[index];
    if (!p->requires_grad) return NULL;
    if (fsdpi_failed(unit->model->world)) return fsdpi_undefined(unit->model);
    if (!fsdpi_getter_ok(unit, FSDP_CALL_GRAD)) return NULL;
    p->used = p->written = 1;
    if (unit->grad_alias)
        return fsdpi_flat_of(unit)->grad->ptr + fsdpi_bytes(p->lay.shard_offset, unit->dtype);
    return unit->grad->ptr + fsdpi_bytes(p->grad_offset, unit->param_dtype);
}

FSDP_API fsdp_status fsdp_zero_grad(fsdp_model *model) {
    return fsdpi_model_call(model, FSDP_CALL_ZERO_GRAD, 1);
}

FSDP_API fsdp_status fsdp_clip_grad_norm(fsdp_model *model, double max_norm, double *norm) {
    fsdp_status status = fsdpi_model_call(model, FSDP_CALL_CLIP, 0);
    if (status) return status;
    if (!(max_norm > 0) || fsdpi_is_nan(max_norm))
        return fsdpi_fail(model->world, FSDP_ERR_INVALID_ARG,
                          "clip_grad_norm: max_norm is %g, expected > 0", max_norm);
    double total;
    status = fsdpi_norm(model, &total);
    if (status) return status;
    if (norm) *norm = total;
    double coefficient = max_norm / (total + 1e-6);
    return coefficient < 1.0 || fsdpi_is_nan(total) ? fsdpi_scale_grads(model, coefficient)
                                                    : FSDP_OK;
}

FSDP_API fsdp_status fsdp_model_reset(fsdp_model *model) {
    if (!model) return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "model_reset: the model is NULL");
    fsdp_status status = fsdpi_failed(model->world);
    if (status || !model->committed) return status;
    fsdpi_drain(model->world);
    status = fsdpi_announce(model, NULL, FSDP_CALL_RESET, FSDP_STATE_IDLE);
    if (!status) status = fsdpi_run_units(model, FSDP_CALL_RESET);
    fsdpi_forget_forwards(model);
    model->backward = 0;
    model->hook_status = FSDP_OK;
    fsdpi_pools_rewind(model);
    return status;
}

// A setter for one unit or all (NULL): which ones; none may be between pre and post.
static fsdp_status fsdpi_set(fsdp_model *m, fsdp_unit *u, const char *what, int *first, int *end) {
    if (!m) return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "%s: the model is NULL", what);
    fsdp_status status = fsdpi_failed(m->world);
    if (status) return status;
    if (u && u->model != m)
        return fsdpi_fail(m->world, FSDP_ERR_INVALID_ARG, "%s: the unit belongs to another model",
                          what);
    *first = u ? u->index : 0;
    *end = u ? u->index + 1 : m->num_units;
    for (int i = *first; i < *end; i++)
        if (!fsdpi_lookup(m->units[i], FSDP_CALL_SET))
            return fsdpi_wrong_call(m->units[i], FSDP_CALL_SET);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_set_grad_enabled(fsdp_model *model, int enabled) {
    if (!model)
        return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "set_grad_enabled: the model is NULL");
    model->grad_enabled = enabled != 0;
    return fsdpi_failed(model->world);
}

FSDP_API fsdp_status fsdp_set_is_last_backward(fsdp_model *model, int is_last) {
    if (!model)
        return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "set_is_last_backward: the model is NULL");
    model->is_last_backward = is_last != 0;
    return fsdpi_failed(model->world);
}

FSDP_API fsdp_status fsdp_set_requires_gradient_sync(fsdp_model *model, fsdp_unit *unit, int sync) {
    int i = 0, end = 0;
    fsdp_status status = fsdpi_set(model, unit, "set_requires_gradient_sync", &i, &end);
    for (; !status && i < end; i++) model->units[i]->sync = sync != 0;
    return status;
}

FSDP_API fsdp_status fsdp_set_reshard_after_forward(fsdp_model *model, fsdp_unit *unit, int mode) {
    int i = 0, end = 0;
    fsdp_status status = fsdpi_set(model, unit, "set_reshard_after_forward", &i, &end);
    if (!status && mode != FSDP_RESHARD_ALWAYS && mode != FSDP_RESHARD_NEVER)
        return fsdpi_fail(model->world, FSDP_ERR_INVALID_ARG,
                          "set_reshard_after_forward: mode is %d, expected FSDP_RESHARD_ALWAYS or "
                          "FSDP_RESHARD_NEVER",
                          mode);
    for (; !status && i < end; i++) model->units[i]->reshard_after_forward = mode;
    return status;
}

FSDP_API fsdp_status fsdp_set_reshard_after_backward(fsdp_model *model, fsdp_unit *unit,
                                                     int reshard) {
    int i = 0, end = 0;
    fsdp_status status = fsdpi_set(model, unit, "set_reshard_after_backward", &i, &end);
    for (; !status && i < end; i++) model->units[i]->reshard_after_backward = reshard != 0;
    return status;
}

FSDP_API fsdp_training_state fsdp_unit_state(const fsdp_unit *unit) {
    return unit ? (fsdp_training_state)unit->state : FSDP_STATE_COUNT;
}
FSDP_API fsdp_storage_state fsdp_unit_storage(const fsdp_unit *unit) {
    return unit ? (fsdp_storage_state)unit->storage : FSDP_STORAGE_COUNT;
}

FSDP_API fsdp_status fsdp_set_driver(fsdp_model *model, const fsdp_driver *driver) {
    static const fsdp_driver none = {NULL, NULL, NULL};
    if (!model) return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "set_driver: the model is NULL");
    fsdp_status status = fsdpi_failed(model->world);
    if (!status) status = fsdpi_check_units(model, FSDP_CALL_PARAMS_CHANGED);
    if (!status) model->driver = driver ? *driver : none;
    return status;
}

static void fsdpi_memory(const fsdp_model *m, fsdp_memory *out) {
    memset(out, 0, sizeof *out);
    for (int pool = 0; pool < FSDP_POOL_COUNT; pool++) {
        out->pool_bytes[pool] = m->pool_bytes[pool];
        out->pool_slots[pool] = m->pool_slots[pool];
        out->total_bytes += m->pool_bytes[pool];
    }
    for (int i = 0; i < m->num_units; i++)
        for (int k = 0; k < m->units[i]->num_params; k++) {
            const fsdpi_param *p = &m->units[i]->params[k];
            out->unsharded_bytes += fsdpi_bytes(p->lay.numel, m->units[i]->dtype) *
                                    (p->requires_grad ? 2 : 1);
        }
    out->host_bytes = m->host_bytes;
}

FSDP_API fsdp_status fsdp_model_memory(const fsdp_model *model, fsdp_memory *out) {
    if (!model || !out)
        return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "model_memory: an argument is NULL");
    fsdpi_memory(model, out);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_model_predict(const fsdp_model *model, fsdp_memory *out) {
    fsdp_model *dry = NULL;
    if (!model || !out)
        return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "model_predict: an argument is NULL");
    fsdp_status status = fsdpi_dry_run(model, &dry);
    if (!status) {
        fsdpi_memory(dry, out);
        out->host_bytes = model->host_bytes;
    }
    fsdpi_dry_free(dry);
    return status;
}

FSDP_API fsdp_status fsdp_model_counters(const fsdp_model *model, fsdp_counters *out) {
    if (!model || !out)
        return fsdpi_fail(NULL, FSDP_ERR_INVALID_ARG, "model_counters: an argument is NULL");
    *out = model->counters;
    return FSDP_OK;
}

#endif // FSDP_MATH_ONLY
#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION
