/* core/backend.h - the two tables of functions that make a backend and a device

   Callers: backends, devices, host.h (fsdp_device_ops) and others.

   A part of fsdp.h, which includes it. How to write one: backends/README.md.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h" // which includes this file
#endif
#ifndef FSDP_BACKEND_H
#define FSDP_BACKEND_H
// clang-format off

// State that ranks share if they are threads of one process. Set size, and the rest to zero.
struct fsdp_threads {
    uint32_t lock;         // the backend's
    int32_t size;          // ranks
    void *common;          // the first open of the backend sets it
};

// The argument of open of a backend and a device. Pointers are valid until close.
typedef struct fsdp_boot {
    int rank, size, local_rank;
    int64_t timeout_ns;
    uint32_t *hung;        // [release] not 0: the device's work does not end: keep its memory
    const char *job;
    const char *store;     // place where ranks meet, see fsdp_world_desc.store
    fsdp_threads *threads; // not NULL: ranks are threads that share this
    fsdp_allocator allocator;
    fsdp_logger logger;
    int log_level;         // do not give the logger anything more verbose
    fsdp_clock clock;
    void *user;            // fsdp_world_desc.user
} fsdp_boot;

// A new process group. color < 0: this rank is not in it, but makes the call, too.
typedef struct fsdp_group {
    int color, index, size; // index: this rank's place, or -1
    int stream;             // FSDP_STREAM_* that will use the group
    const int32_t *ranks;         // [size], world ranks in the group's order
    const char *name;
} fsdp_group;

enum { FSDP_CAP_FUSED_REDUCE = 1 }; // reductions cast, scale and accumulate, see fsdp_coll

typedef struct fsdp_caps {
    uint32_t kinds;      // bit 1u << FSDP_OP_*
    uint32_t flags;      // FSDP_CAP_*
    int comm_threads;    // streams that may run collectives at the same time: 1 or more
    int default_comm_threads; // if the caller gives no number; equal on all ranks. 0: inline
    const char *mode_reason; // explains default_comm_threads in texts, a clause ("as ..."); or NULL
    const int64_t *comm_bytes; // [release] bytes of device memory that all comms took; or NULL
} fsdp_caps;

/* One collective, as data that every backend can run, with pointers of this process. Only
   fsdpi_run_collective (core/run.h) makes one, from an fsdp_op. Its other two forms:
   docs/architecture.md.

   Offsets of segments count elements: of dtype on the full side and in src of a gather, of
   out_dtype in dst of a scatter.
   all_gather      dst[full + k*count ..] = src_k[shard ..] of rank k. If in_place: the shard of
                   rank k already lies at that place of its own dst, and src is ignored
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
    uint64_t seq;         // the number that the model or the world gave it
    uint64_t fingerprint; // equal on all ranks, or MISMATCH
    uint8_t agree[FSDP_AGREE_COUNT]; // hashes of the fingerprint's parts, for texts; 0: unknown
    const char *what;     // unit or call, for texts
    const char *unused;   // the first parameter that has no gradient here, for texts; NULL: none
    void *stream;         // native stream, or NULL: block until complete
    int64_t *ended_ns;    // not NULL: write the time of boot.clock here when `stream` has ended it
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
    // Zero-filled memory that peers may read. Ranks may ask for other sizes, in another order.
    fsdp_status (*alloc)(fsdp_comm *world, size_t size, void **ptr);
    void (*free)(fsdp_comm *world, void *ptr, size_t size);
    // Text of the comm's last failure, with the rank. comm NULL: that of this thread's failed open.
    const char *(*error_text)(fsdp_comm *comm);
    // Any thread may call it, more than once. why begins with "rank N".
    void (*abort)(fsdp_comm *world, fsdp_status status, const char *why);
    fsdp_status (*poll)(fsdp_comm *world);            // optional: asynchronous errors
};

enum {
    FSDP_DEVICE_ASYNC = 1, // ops are ordered on native streams and return at once
    FSDP_DEVICE_HOST = 2   // its memory is host memory
};

// PINNED: host memory of the device. HOST: memory of the world's allocator, never of a device.
enum { FSDP_MEMORY_DEVICE = 0, FSDP_MEMORY_PINNED = 1, FSDP_MEMORY_HOST };

enum {
    FSDP_UPDATE_ADAMW = 1,
    FSDP_UPDATE_SGD,
    FSDP_UPDATE_UNSCALE,
    FSDP_UPDATE_EMA,
    FSDP_UPDATE_MOMENTUM,
    FSDP_UPDATE_MUON
};

// Kinds of EMA updates.
enum { FSDP_EMA_AVERAGE = 0, FSDP_EMA_COPY, FSDP_EMA_SWAP, FSDP_EMA_SWAP_BACK };

/* One update: an optimizer's of contiguous elements, or a scaler's of their gradients. A step
   is a list of updates, which do not overlap and have the same kind; each has its own scalars and
   dtypes. All pointers are into the device's memory, or to FSDP_MEMORY_PINNED. fsdp_optim.h defines
   the arithmetic, and computes the scalars.
   ADAMW       scalars: decay, lerp, beta2, gain, root, eps, rate; first and second: m and v
   SGD         scalars: lr, momentum, gain, weight_decay, nesterov (0, 1), fresh (1: the first
               update); first: the momentum buffer, or NULL
   UNSCALE     scalars: factor. grad *= factor; if a gradient is infinite or NaN, *found becomes 1,
               unless found is NULL. factor and found are the same in all runs. If first is not
               NULL, it is the address of a sum of squares (f64), and grad is divided by its root,
               which counts as scalars[0] if it is smaller
   EMA         scalars: weight, FSDP_EMA_*; first: the average a of the parameter p; no grad.
               AVERAGE: a = a + (p - a)*weight, as torch.lerp, fused; COPY: a = p. SWAP: p and a
               change places, and with SWAP_BACK again. But of 16-bit ones a stays: SWAP keeps the
               bits of p in second, rounds a into p, and SWAP_BACK takes the bits from second
   MOMENTUM    scalars: weight, momentum, nesterov (0, 1); first: the momentum buffer b.
               b += (grad - b)*weight; param = grad + (b - grad)*momentum with nesterov, else b
   MUON        scalars: decay, rate. param = param*decay - rate*grad
   rounds      1: the parameters are bf16 and are rounded stochastically. The bits come from key and
               the element's index in the whole parameter: at + i / row * pitch + i % row         */
typedef struct fsdp_update {
    uint8_t kind, dtype, grad_dtype, rounds, reserved[4]; // FSDP_UPDATE_*; of param; of grad
    int64_t count;
    void *param, *grad, *first, *second;          // states: f64 for f64 parameters, else f32
    int32_t *found;
    double scalars[8];
    uint64_t key;
    int64_t at, row, pitch;
} fsdp_update;

#define FSDP_DEVICE_VERSION 8
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
    // Optional, both or none. timer makes an event that has a time; elapsed: from one to another.
    fsdp_status (*timer)(fsdp_device *device, void **native);
    fsdp_status (*elapsed)(fsdp_device *device, void *from, void *to, int64_t *ns);
    // Work in the order of `stream` (NULL: done on return). A copy of one block without arithmetic
    // may have any host memory as one end, which stays valid until the stream has done the copy.
    fsdp_status (*copy)(fsdp_device *device, void *stream, const fsdp_op *op);
    fsdp_status (*zero)(fsdp_device *device, void *stream, const fsdp_op *op);
    fsdp_status (*norm)(fsdp_device *device, void *stream, const fsdp_op *op);
    fsdp_status (*update)(fsdp_device *device, void *stream, const fsdp_update *runs,
                          uint32_t num); // optional
    // Optional: text of the last failure; device NULL: of this thread's failed open.
    const char *(*error_text)(fsdp_device *device);
};

/* A product of matrices, of which the library has one for the host (backends/fsdp_host_gemm.h) and
   one for GPUs (fsdp_cuda_gemm.h): c = alpha * op(a) * op(b) + beta * c, row-major. op(a) is m x k,
   op(b) is k x n, c is m x n; a transposed matrix is stored as k x m, or n x k. ld: elements from
   row to row. If beta is 0, c is not read. All are of dtype, sums are f32. If a and b are one
   matrix, of which one is transposed, c is symmetric, also before: half of it is enough. On a
   device it is enqueued on `stream`, without a wait. The same shape gives the same bits. */
typedef fsdp_status (*fsdp_gemm_fn)(void *user, void *stream, int64_t m, int64_t n, int64_t k,
                                    float alpha, const void *a, int64_t lda, int a_transposed,
                                    const void *b, int64_t ldb, int b_transposed, float beta,
                                    void *c, int64_t ldc, fsdp_dtype dtype);

// clang-format on
#endif
