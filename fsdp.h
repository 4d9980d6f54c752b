/* fsdp.h - FSDP2 (ZeRO-3, per-parameter sharding) for C, C++ and CUDA trainers            v0.1.0

   Each rank keeps 1/W of every parameter, of its gradient and of the optimizer's state; a layer is
   gathered just before it is used and freed right after; gradients are averaged while they are
   scattered back to their owners. The behaviour is that of PyTorch's fully_shard.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp.h"
       cc -O2 trainer.c -pthread -lm && tools/fsdprun -n 4 ./a.out     // make tools/fsdprun

   SPDX-License-Identifier: MIT (full text at the end of this file)

CONTENTS
    This file is the manual, the declarations, and the list of what the library is made of. The
    implementation is in files of one subject each, here in the order of the list: leaves first.
    core/dtype.h        status codes, element types, conversions, the one reduction loop
    core/shard_math.h   who owns which rows; where everything lies in a slot
    core/extension.h    the seam for extensions: what they answer, what they may call
    core/backend.h      what a backend and a device are: two tables of functions
    core/sys.h          the operating system's calls, a lock, a hash, a text
    core/route.h        how a unit gathers and reduces: facts in, a route out
    core/objects.h      what a world, a mesh, a model and a unit are made of
    core/error.h        error texts, and the way out for every message
    core/alloc.h        host memory
    core/env.h          the one reader of environment variables
    core/launch.h       rank, size and job from a launcher's environment
    core/attach.h       extensions: who is asked, who sees, who is told
    core/spawn.h        ranks that a program starts itself
    core/comm.h         an op record becomes a collective
    core/host.h         the host as a device
    core/timeline.h     when records ran on a device
    core/lanes.h        how records run: at once, in worker threads, on a device's streams
    core/mesh.h         ranks arranged in N dims, and their groups
    core/world.h        rank, size, environment, opened tables
    core/layout.h       where a unit's parameters and gradients lie in its slots
    core/pool.h         buffers and slots
    core/unit.h         what fully_shard makes of a desc
    core/ops.h          op records; fsdpi_emit, the only door to the tables
    core/templates.h    the records that hooks emit, made once
    core/gather.h       parameters: gathered, waited for, freed, prefetched
    core/usage.h        who used which parameter
    core/grads.h        gradients: written, collected, reduced
    core/commit.h       the flat blocks of a model, and the lists of its units
    core/schedule.h     the transition table, and the calls that look it up
    core/step.h         the end of a step
    core/norm.h         the norm of all gradients, and clipping
    core/params.h       parameters as the caller sees them
    core/predict.h      memory: what is allocated, what will be
    core/options.h      setters
    core/model.h        a model begins and ends
    core/means.h        what extensions do: records, buffers, copies, states
    core/snapshot.h     what a step changes, saved and brought back
    core/init.h         a world begins and ends; collectives on host data
    Backends are in backends/, extensions (fsdp_optim.h, docs/extensions.md) beside this file.

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

#include "core/dtype.h"      // status codes, element types; each with its implementation
#include "core/shard_math.h" // shard math

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
   mesh        NULL: the whole world; else a mesh of any number of dims, reduced dim by dim from dim
               0 on (f16 and bf16 are rounded after each)
   data        host memory, count elements, replaced by the result
   dtype       f32 f64 f16 bf16, i32, i64
   Result      FSDP_OK; INVALID_ARG; TIMEOUT, PEER_LOST, MISMATCH, ABORTED, BACKEND
   Collective  yes: every rank of the mesh, same order      Blocks yes, at most timeout_ms
   Allocates   no */
FSDP_API fsdp_status fsdp_all_reduce(fsdp_world *world, const fsdp_mesh *mesh, void *data,
                                     int64_t count, fsdp_dtype dtype, fsdp_redop op);

/* fsdp_broadcast - copy nbytes of host memory from the rank at position root of the mesh to all
   root        0 .. number of ranks - 1, row-major in a mesh of several dims
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
   Note        ranks of other meshes may make other models */
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

/* fsdp_unit_mesh_info - which ranks shard and replicate a unit, and which part and copy this rank
   has: of the unit's own mesh, or else of the model's
   out         valid as long as the mesh: until fsdp_shutdown; where neither unit nor model were
               given one, until the model's end
   Result      FSDP_OK; INVALID_ARG
   Collective  no      Blocks no      Allocates no
   Source      torch: FSDPParamGroup.mesh_info */
FSDP_API fsdp_status fsdp_unit_mesh_info(const fsdp_unit *unit, fsdp_mesh_info *out);

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
    void *shard_grad;                   // its gradient; NULL: none, or (but in hooks) not finalized
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
   Meshes      the norm is over all gradients on all ranks of the model's mesh, each element once.
               Ranks along a unit's replicate dim hold copies: one of them counts. All other ranks
               hold other elements, and count: along the shard dim, along dims that do neither, and
               outside of the unit's own mesh.
               Example: on a mesh (dp, tp) the model has a mesh_info that shards over dp. Its tp
               ranks hold other parameters, as layers do that tensor parallelism has cut. If a
               unit's parameters are equal on all tp ranks (norms, biases), give that unit a
               mesh_info that shards over dp and replicates over tp; else each tp rank counts.
               If the model's mesh is a slice, as dp of (dp, tp), nothing says what the ranks beside
               it hold, and the call is refused: give mesh_info on the mesh that was sliced. A mesh
               of fsdp_mesh_create stands for itself, also if it lacks ranks of the world.
   Collectives one all-reduce over the shard group if all other ranks hold copies; else one over the
               world, or one over each dim of a model's mesh that lacks ranks of the world
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle; grad_norm: there was no call
               since the model got its buffers), UNSUPPORTED (the model's mesh is a slice, or lacks
               ranks of a unit's mesh), CORRUPT (error_if_nonfinite: nothing is scaled, the world
               goes on); collective errors
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
   fsdp_set_is_last_backward       0: finalize keeps the forwards for a further backward over them
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
   fsdp_set_custom_all_reduce  the same for the all_reduce of a unit over its replicas, in place:
                              coll->count elements of coll->dtype at coll->dst. The first ones are
                              the gradients of the trainable parameters in the order of their
                              shards. The last ones, one for each trainable parameter, tell how
                              often it was used. The hook makes all of them sums over the group;
                              the library divides
   hook        NULL: none
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE
   Collective  no, but every rank has to do the same      Blocks no      Allocates no
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
    X(MOVE, "move")           /* to a new layout, after fsdp_set_requires_grad */                 \
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
    FSDP_STREAM_COMPUTE = 0,
    FSDP_STREAM_GATHER,
    FSDP_STREAM_REDUCE,
    FSDP_STREAM_ALLREDUCE,
    FSDP_STREAM_EXTENSION, // of extensions; begins with its first record
    FSDP_STREAM_COUNT
};

// A point in a stream's order. Host lanes: the seq-th op of the stream; native: an event object.
typedef struct fsdp_event {
    void *native;
    uint64_t seq;
    int32_t stream; // FSDP_STREAM_*
} fsdp_event;

/* What ranks have to agree on, thing by thing: a byte of hash each, so that a text can name what
   differs. Whether they agree is asked of what_hash. */
#define FSDP_AGREE_LIST(X)                                                                        \
    X(NAMES, "names of parameters") X(SHAPES, "shapes") X(SHARD_DIM, "shard_dim")                 \
    X(DTYPES, "dtypes of parameters") X(REDUCE_DTYPE, "reduce_dtype")                             \
    X(GRAD_DTYPE, "grad_dtype") X(REQUIRES_GRAD, "requires_grad")                                 \
    X(STRINGS, "sizes of a gather extension") X(SLICES, "slices")                                 \
    X(OVERWRITE, "grads_overwrite") X(DIRECT_MIN, "direct_min") X(MESH, "sizes of the mesh")      \
    X(FACTOR, "gradient divide factor") X(USED, "parameters that have a gradient")                \
    X(ACCUMULATE, "gradients of earlier steps: zero_grad") X(STEP, "number of finished steps")
#define FSDP_X(name, text) FSDP_AGREE_##name,
enum { FSDP_AGREE_LIST(FSDP_X) FSDP_AGREE_COUNT };
#undef FSDP_X

// Markers, HOOK and those behind it, say what happens: they wait for nothing. The library makes
// them only where an extension sees records.
typedef struct fsdp_op {
    uint64_t seq;             // of this rank's model, or world; ranks may differ in local records
    uint64_t bytes;           // to be received from other ranks (of all_reduce 2 (R-1)/R of the
                              // whole, rounded up), or written (copies, zero)
    uint64_t count;           // elements: per rank (gather, scatter), of the whole (others)
    uint8_t kind, label, stream, state; // FSDP_OP_*, FSDP_LABEL_*, FSDP_STREAM_*, training state
    uint8_t dtype, out_dtype, accumulate, in_place;
    uint8_t redop, fill;      // ALL_REDUCE: FSDP_SUM, ...; ZERO: the byte that is written
    uint8_t timed, pool;      // timed: somebody is told when it ran; pool: of slot
    int32_t root;             // BROADCAST; CALL: index of the parameter, or -1
    int32_t group_size;       // collectives: ranks that take part
    uint16_t comm_number;     // of comm, in the order of making: 1 the world's; 0: none
    uint8_t num_waits, reserved; // of wait
    double scale;             // multiplies the (summed) input, in the arithmetic's type; 1: none
    double norm_type;         // NORM, and clip: p; INFINITY: the maximum
    const double *clip;       // COPY, or NULL: what NORM has found, in the device's memory. `scale`
                              // is a largest norm then: times scale/(norm + 1e-6) if < 1, or NaN
    uint32_t list_count;
    int32_t slot;             // ACQUIRE, RELEASE, WROTE: number of the buffer, of FSDP_POOL_* pool
    fsdp_model *model;        // NULL: of the world: a collective on host data, a transfer
    const fsdp_unit *unit;    // NULL: of the model
    const char *what;         // the unit's name, or the call's
    uint64_t what_hash, step; // of the unit's desc, and the finalizes so far: ranks must agree
    uint8_t agree[FSDP_AGREE_COUNT]; // of the parts of what_hash, for texts
    fsdp_comm *comm;          // collectives: where
    fsdp_buf *src, *dst;      // whose events it waits for and sets; NULL: none
    const void *list;         // fsdp_block[] (COPY, NORM) or fsdp_seg[] (collectives), prebuilt;
                              // UPDATE: a fsdp_update
    const void *src_ptr;      // fixed at issue: a slot may change hands before a worker runs the op
    void *dst_ptr;
    fsdp_status (*call)(const struct fsdp_op *op, void *stream); // CALL; UPDATE by the host
    fsdp_event wait[2];       // num_waits of them, derived by emit
} fsdp_op;

/* fsdp_op_name, fsdp_label_name - "reduce_scatter", "copy_in"; "?" out of range; of a label that an
   extension has registered "extension": fsdp_op_label knows its name
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
    X(RESET, "model_reset")                                                                       \
    X(EXTENSION, "extension")         /* an extension's own: always possible */

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

// Bytes of device memory by pool. Pools only grow, so current is also the peak; fsdp_pools_trim, of
// extensions, shrinks them.
typedef struct fsdp_memory {
    int64_t pool_bytes[FSDP_POOL_MAX];
    int32_t pool_slots[FSDP_POOL_MAX];
    int64_t total_bytes;     // of all pools
    int64_t host_bytes;      // tables of the library for this model
    int64_t unsharded_bytes; // parameters and gradients of the whole model, for comparison
} fsdp_memory;

/* fsdp_model_memory - what is allocated now. fsdp_model_predict - what training will have allocated
   after a step: one forward and one backward of every unit, in the order of their creation and
   back; a unit that never reshards in a model that does is open around the others; allocates
   nothing on the device. Not in it: gradients kept without sync, scratch of fsdp_param_full, and
   buffers of extensions. One rank with grads_overwrite takes a slot of gradients more in steps that
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

/* fsdp_model_describe - a table of units and parameters as text: shapes, dtypes, layout, bytes, and
   the route of each unit: how it gathers, and what happens to gradients behind post_backward
   buf         room for cap bytes, always terminated when cap > 0; may be NULL with cap 0
   Result      length of the whole text without its end, as snprintf; 0 for NULL
   Collective  no      Blocks no      Allocates no */
FSDP_API size_t fsdp_model_describe(const fsdp_model *model, char *buf, size_t cap);

/* fsdp_pool_name - "gathered parameters"; "?" out of range; of a pool that an extension has
   registered "extension": fsdp_model_pool_name knows its name
   Collective  no      Blocks no      Allocates no      Thread any */
FSDP_API const char *fsdp_pool_name(int pool);

typedef struct fsdp_counters {
    uint64_t calls[FSDP_OP_COUNT]; // ops issued
    uint64_t bytes[FSDP_OP_COUNT]; // fsdp_op.bytes of them: to be received, or written
    uint64_t allocations;          // host and device allocations of the model
} fsdp_counters;

/* fsdp_model_counters - since creation
   Result      FSDP_OK; INVALID_ARG
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_model_counters(const fsdp_model *model, fsdp_counters *out);

/* -------------------------------------------------------------------------------------------- */
/* The seam for extensions: fsdp_extension, and the functions that they call.                     */
#include "core/extension.h"

/* -------------------------------------------------------------------------------------------- */
/* What a backend and a device are made of: fsdp_boot, fsdp_coll, fsdp_comm_ops, fsdp_device_ops. */
#include "core/backend.h"

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

#include "core/sys.h"
#include "core/route.h"
#include "core/objects.h"
#include "core/error.h"
#include "core/alloc.h"
#include "core/env.h"
#include "core/launch.h"
#include "core/attach.h"

// Backends, and the devices whose memory their collectives work on.
#if !defined(FSDP_BACKEND_SHM) && !defined(FSDP_BACKEND_GLOO) && !defined(FSDP_BACKEND_NCCL) &&    \
    !defined(FSDP_NO_BACKEND)
#define FSDP_BACKEND_SHM 1
#endif
#ifdef FSDP_BACKEND_SHM
#include "backends/fsdp_shm.h"
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

#include "core/spawn.h"
#include "core/comm.h"
#include "core/host.h"
#include "core/timeline.h"
#include "core/lanes.h"
#include "core/mesh.h"
#include "core/world.h"
#include "core/layout.h"
#include "core/pool.h"
#include "core/unit.h"
#include "core/ops.h"
#include "core/templates.h"
#include "core/gather.h"
#include "core/usage.h"
#include "core/grads.h"
#include "core/commit.h"
#include "core/schedule.h"
#include "core/step.h"
#include "core/norm.h"
#include "core/params.h"
#include "core/predict.h"
#include "core/options.h"
#include "core/model.h"
#include "core/means.h"
#include "core/snapshot.h"
#include "core/init.h"

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
