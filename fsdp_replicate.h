/* fsdp_replicate.h - PyTorch's DistributedDataParallel: gradients averaged in buckets; an extension
   of fsdp.h

   Each rank holds all parameters and sees a batch of its own. A bucket is a group of parameters
   whose gradients travel in one all-reduce. It is on its way as soon as the last gradient of the
   group is written, while backward goes on. Buckets follow sizes, not layers: PyTorch's first
   bucket has 1 MiB, the others have 25 MiB.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_replicate.h"          // includes fsdp.h; link with -lm

       fsdp_replicate_desc desc = FSDP_ZERO;
       desc.params = params;                                   // all layers: W0, b0, W1, b1, ...
       desc.num_params = 2 * L;
       if (fsdp_replicate_create(model, &desc, &rep)) return 1;
       if (fsdp_replicate_broadcast(rep, 0)) return 1;         // all begin with rank 0's parameters
       for (;;) {
           fsdp_replicate_pre_forward(rep);
           for (int l = 0; l < L; l++)
               forward(l, fsdp_replicate_data_f32(rep, 2 * l),
                       fsdp_replicate_data_f32(rep, 2 * l + 1));
           fsdp_replicate_post_forward(rep);
           for (int l = L - 1; l >= 0; l--) {
               backward(l, fsdp_replicate_data_f32(rep, 2 * l), // adds to the gradients
                        fsdp_replicate_grad_f32(rep, 2 * l),
                        fsdp_replicate_grad_f32(rep, 2 * l + 1));
               fsdp_replicate_ready(rep, 2 * l, 2);            // a complete bucket is on its way
           }
           if (fsdp_replicate_post_backward(rep) || fsdp_finalize_backward(model)) break;
           if (fsdp_adamw_step(opt, lr)) break;
           fsdp_zero_grad(model);
       }

   SPDX-License-Identifier: MIT (full text in fsdp.h)

   HOW IT WORKS
     A bucket is a unit of fsdp.h that replicates and does not shard. So all that fsdp.h says about
     units holds: mixed precision, gradient accumulation (fsdp_set_requires_gradient_sync), frozen
     and unused parameters, clipping, optimizers, hooks, lanes and streams. If one all-reduce for
     each layer is enough, you do not need this header: give fsdp_fully_shard a mesh_info of the
     kind FSDP_MESH_INFO_DDP.
     fsdp_replicate_grad points into the bucket's message: without a change of dtype nothing is
     copied into it.
   ORDER OF REDUCTIONS
     Every rank reduces every bucket once in each backward, in the order of their index, whichever
     is complete first. So ranks may use different parameters, leave out whole layers, or get
     gradients ready in different orders.
   UNUSED PARAMETERS
     A rank uses a parameter if it has called fsdp_replicate_grad for it since the last reduction.
     If no rank used it, it has no gradient after finalize, or keeps the one that it had before. If
     only some ranks used it, the others count as zeros. To find that out, a finalize that ends
     reductions sends one all-reduce, "replicate_used", of one i32 for each parameter. Only a rank
     that did not use a parameter waits for it.
     If parameters of a bucket have post-accumulate hooks (fsdp_set_post_accumulate_hook), the
     bucket sends its numbers before its reduction: a hook does not run if no rank used the
     parameter. All ranks set hooks in the same buckets, and turn sync on before the backward.
     The header sets fsdp_set_reduce_scatter_unused_params of its units: 1, or 0 if a bucket has
     hooks. If you set it to 0, ranks have to use the same parameters.
   OTHER COLLECTIVES BETWEEN THE REDUCTIONS
     A rank starts a bucket when its own gradients are ready. If ranks use different parameters, one
     rank may reduce a bucket in fsdp_replicate_ready, another one in fsdp_replicate_post_backward.
     If something else communicates in between (the backward of a fully_shard unit, an all-reduce of
     tensor parallelism), the two calls meet and the job ends with FSDP_ERR_MISMATCH, or on another
     communicator with FSDP_ERR_TIMEOUT. To avoid that, do one of these:
       - let all ranks use the same parameters, in the same order;
       - let nothing else communicate between the first fsdp_replicate_grad and post_backward;
       - set desc.late = 1: then all buckets are reduced in fsdp_replicate_post_backward.
   THE MESSAGE OF A BUCKET
     has the gradients of the trainable parameters, in the bucket's order. Each one begins at a
     multiple of as many elements as 64 bytes (GPUs: 256) of the parameter's dtype have. A group of
     one rank sends nothing.
   ARITHMETIC
     Ranks are summed in f32 (f64 in f64) in rank order, then divided by their number once; NCCL
     sums in an order of its own. The bits do not depend on the buckets. PyTorch divides before it
     sums, in the dtype of the gradient. With two ranks the averages are equal to the bit. If a
     backward adds to averages of earlier ones, PyTorch averages those again.
   MEMORY
     One copy of the parameters, one of the gradients, and the messages of the buckets that are open
     at a time. fsdp_model_predict counts one message for each size of bucket. If a layer's
     parameters are in two buckets of the same size, both are open, and there is one more. If the
     model also has units that reshard, the prediction counts one message for each bucket.
     The pool "replicate" has 8 bytes for each parameter, for the record "replicate_used"; a group
     of one rank has none. fsdp_model_predict does not count them. */
#include "fsdp.h"

#ifndef FSDP_REPLICATE_H
#define FSDP_REPLICATE_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_replicate fsdp_replicate;

typedef struct fsdp_replicate_desc {
    uint32_t size, start_canary;
    const fsdp_param_desc *params; // [num_params] in the order of their definition, copied. Names
                                   // are whole names, for example "h.0.w"; NULL: "p0", "p1", ...
    int32_t num_params;            // >= 1
    int32_t num_caps;              // 0: first_bytes, then bucket_bytes
    const int64_t *caps;           // [num_caps] bytes of the first, second, ... bucket of a dtype.
                                   // The last one repeats
    int64_t first_bytes;           // of the first bucket. 0: bucket_bytes if given, else 1 MiB
    int64_t bucket_bytes;          // of each other bucket. 0: 25 MiB
    const int32_t *order;          // [num_params] a permutation: the order in which gradients get
                                   // ready. NULL: last defined first
    const fsdp_mesh *mesh;         // 1-D: its ranks are replicas. NULL: mesh_info
    const fsdp_mesh_info *mesh_info; // of kind DDP. NULL: as the model if that is of kind DDP, else
                                     // all ranks of the world
    fsdp_dtype param_dtype;          // KEEP: as the model
    fsdp_dtype reduce_dtype;         // of the message. KEEP: as the model. FSDP_BF16 or FSDP_F16
                                     // compress f32 gradients
    int32_t late;                    // 1: nothing is reduced before fsdp_replicate_post_backward
    int32_t reserved;
    const char *name; // of the units: NAME.0, NAME.1, ...; NULL: "bucket"
    uint64_t end_canary;
} fsdp_replicate_desc;

/* fsdp_replicate_assign - which bucket each tensor belongs to: a pure function. A bucket closes
   with the tensor that reaches its cap
   nbytes      [count] bytes of each tensor, in the order of definition
   key         [count] 0..63: what must not be mixed, for example a dtype. NULL: nothing
   order       [count] a permutation: buckets are numbered as they close. NULL: the order of
               definition; buckets are numbered by their smallest index
   caps        [num_caps >= 1] bytes of the first, second, ... bucket of each key; the last repeats
   bucket      out: [count] the bucket of each tensor
   place       out: [count] its place in the bucket, or NULL
   cap         out: [count] the cap of each bucket, or NULL
   Result      the number of buckets; -1: a NULL, a negative number, a key out of range, or order is
               no permutation
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: compute_bucket_assignment_by_size */
FSDP_API int fsdp_replicate_assign(const int64_t *nbytes, const int32_t *key, const int32_t *order,
                                   int count, const int64_t *caps, int num_caps, int32_t *bucket,
                                   int32_t *place, int64_t *cap);

/* fsdp_replicate_create - add the buckets to a model, one unit each, which are never resharded.
   Frozen parameters are behind the others, in one bucket for each dtype, whatever the caps are;
   they stay there if you thaw them
   rep         the model owns it: it ends with the model or the world. NULL after a failure
   Result      FSDP_OK; INVALID_ARG (the text names the field or the parameter: order is no
               permutation, a cap < 1, two equal names, mesh_info is not of kind DDP), and what
               fsdp_fully_shard returns. After a failure of fsdp_fully_shard the model has some of
               the buckets: end it
   Collective  yes: every rank of the mesh, same desc. A bucket's first reduction compares it;
               fsdp_replicate_broadcast and the first finalize compare buckets without a reduction
   Blocks      no      Allocates tables
   Source      torch: torch.distributed._composable.replicate, DistributedDataParallel.__init__ */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_replicate_create(fsdp_model *model,
                                                           const fsdp_replicate_desc *desc,
                                                           fsdp_replicate **rep);

/* fsdp_replicate_pre_forward   - before the forward: you may read fsdp_replicate_data
   fsdp_replicate_post_forward  - the forward has ended. Parameters stay readable for the backward
   fsdp_replicate_ready         - for parameters first .. first + count - 1: this backward reads
               them and writes their gradients no more. Say so for all of them, also for those that
               have no gradient. The call reduces the buckets that are complete, in the order of
               their index
   fsdp_replicate_post_backward - reduces every bucket that is left. Then call
               fsdp_finalize_backward, which refuses if you leave this call out
   Result      FSDP_OK, or as the hooks of fsdp.h; ready: INVALID_ARG, INVALID_STATE (a parameter is
               ready already; nothing changes). post_backward also returns the first failure of a
               ready or grad since pre_forward; fsdp_finalize_backward knows of those that come from
               fsdp.h
   Collective  pre_forward, post_forward: no communication. ready, post_backward: every rank
               reduces the same buckets in the same order; on two ranks that may be in different
               calls
   Blocks, Allocates  as fsdp_pre_forward, fsdp_post_forward, fsdp_post_backward
   Source      torch: Reducer.prepare_for_backward, mark_variable_ready, finalize_backward */
FSDP_API fsdp_status fsdp_replicate_pre_forward(fsdp_replicate *rep);
FSDP_API fsdp_status fsdp_replicate_post_forward(fsdp_replicate *rep);
FSDP_API fsdp_status fsdp_replicate_ready(fsdp_replicate *rep, int first, int count);
FSDP_API fsdp_status fsdp_replicate_post_backward(fsdp_replicate *rep);

/* fsdp_replicate_data_f32 - a parameter, as fsdp_data_f32: from pre_forward until its bucket is
               reduced. So you may read it until you say that it is ready
   fsdp_replicate_grad_f32 - where you write its gradient: until you say that it is ready. It marks
               the parameter as used. NULL for a frozen one
   fsdp_replicate_data_as, fsdp_replicate_grad_as - the same in `dtype`
   fsdp_replicate_data, fsdp_replicate_grad - the same in whatever dtype it has, unchecked
   param       its index in desc.params
   Result      as fsdp_data_as, fsdp_grad_as: in a wrong state, with another dtype and after an
               abort valid memory with undefined contents. NULL: rep is NULL, or there is no memory
   Collective  no      Blocks no      Allocates as fsdp_pre_backward, at the first use of a bucket
   Source      torch: Parameter, Parameter.grad with gradient_as_bucket_view */
FSDP_API void *fsdp_replicate_data_as(fsdp_replicate *rep, int param, fsdp_dtype dtype);
FSDP_API void *fsdp_replicate_grad_as(fsdp_replicate *rep, int param, fsdp_dtype dtype);
static inline float *fsdp_replicate_data_f32(fsdp_replicate *rep, int param) {
    return (float *)fsdp_replicate_data_as(rep, param, FSDP_F32);
}
static inline float *fsdp_replicate_grad_f32(fsdp_replicate *rep, int param) {
    return (float *)fsdp_replicate_grad_as(rep, param, FSDP_F32);
}
FSDP_API void *fsdp_replicate_data(fsdp_replicate *rep, int param);
FSDP_API void *fsdp_replicate_grad(fsdp_replicate *rep, int param);

/* fsdp_replicate_unit        - the unit that a parameter is in, and its index there: for views,
               fsdp_param_load, fsdp_param_full, fsdp_set_requires_grad and hooks
   fsdp_replicate_param       - the other way: the index in desc.params of a view's parameter, also
               of a block of fsdp_init_params. The view's ordinal and index count in the order of
               the buckets
   fsdp_replicate_num_buckets - how many there are; 0 for NULL
   fsdp_replicate_members     - the parameters of a bucket, in the order of its message
   unit, index, out, nbytes   NULL: not wanted. out: room for desc.num_params indices. nbytes: of
               the bucket's parameters as they are stored
   Result      unit: FSDP_OK, INVALID_ARG; param: -1 for a parameter of another unit, and for NULL;
               members: their number, -1: there is no such bucket
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_replicate_unit(const fsdp_replicate *rep, int param, fsdp_unit **unit,
                                         int *index);
FSDP_API int fsdp_replicate_param(const fsdp_replicate *rep, const fsdp_param_view *view);
FSDP_API int fsdp_replicate_num_buckets(const fsdp_replicate *rep);
FSDP_API int fsdp_replicate_members(const fsdp_replicate *rep, int bucket, int32_t *out,
                                    int64_t *nbytes);

/* fsdp_replicate_order - the order in which parameters got ready in the last backward that said so
   of all of them. Parameters of one fsdp_replicate_ready count as ready last to first. Give it to
   the next run as desc.order, on all ranks that of rank 0
   order       out: [desc.num_params]
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (there was no such backward)
   Collective  no: ranks may differ      Blocks no      Allocates no
   Source      torch: Reducer.rebuild_buckets */
FSDP_API fsdp_status fsdp_replicate_order(const fsdp_replicate *rep, int32_t *order);

/* fsdp_replicate_broadcast - copy the parameters of one replica to all others; ends with
   fsdp_params_changed
   root        position of that replica in the mesh, 0 .. number of replicas - 1
   Result      as fsdp_model_broadcast, which it calls for each bucket: MISMATCH if a bucket has
               other parameters on another rank, or in another order, frozen ones included; the
               buckets before it have been copied
   Collective  yes: every rank of the mesh      Blocks yes, at most timeout_ms for each step
   Allocates   as commit
   Source      torch: _sync_module_states, init_sync */
FSDP_API fsdp_status fsdp_replicate_broadcast(fsdp_replicate *rep, int root);

// What a hook gets: where the gradients of a bucket are, and which parameters they belong to. All
// but index may change if you freeze, thaw or cast parameters.
typedef struct fsdp_replicate_bucket {
    int32_t index, is_last; // is_last: no other bucket is reduced after it
    int32_t num_params;     // trainable ones
    int32_t reserved;
    const int32_t *params;  // [num_params] index of each in desc.params
    const int64_t *offsets; // [num_params] where each begins in data, elements
    const int64_t *numels;  // [num_params] elements of each
    fsdp_dtype dtype;       // of data
    void *data;             // numel elements, with padding between parameters
    int64_t numel;
} fsdp_replicate_bucket;

typedef fsdp_status (*fsdp_replicate_hook)(void *user, const fsdp_replicate_bucket *bucket,
                                           const fsdp_comm_ops *ops, fsdp_comm *comm,
                                           const fsdp_coll *coll);

/* fsdp_replicate_set_hook - communicate every bucket in a way of your own
   hook        makes the elements of data, and the flags, sums over the replicas; the library
               divides. ops->run(comm, coll) does what the library would do. The hook may run other
               collectives on comm: copies of coll with another kind, count, src or dst, inside the
               message or in memory of ops->alloc. All ranks have to run the same ones. One rank
               never calls it. NULL: none
   Runs        where reductions run: at once, in a worker thread with lanes, or on a device with
               streams to enqueue work. If it returns a failure, the world is aborted with it
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle), errors of commit
   Collective  as fsdp_model_commit at the first use; then no, but every rank has to do the same
   Blocks      for operations under way      Allocates as commit
   Source      torch: DistributedDataParallel.register_comm_hook */
FSDP_API fsdp_status fsdp_replicate_set_hook(fsdp_replicate *rep, fsdp_replicate_hook hook,
                                             void *user);

/* fsdp_replicate_join   - before each step: has this rank a batch? For uneven inputs
   fsdp_replicate_shadow - the forward and backward of a rank without a batch; uses no parameter
       while (!fsdp_replicate_join(rep, batch != NULL, 0, &active) && active > 0) {
           if (batch) train_on(batch); else fsdp_replicate_shadow(rep);
           ...                                         // finalize, optimizer step, zero_grad: all
           if (batch) batch = next();
       }
   A rank whose data have ended goes on without a batch: parameters and states of optimizers stay
   equal on all ranks. If the model has several fsdp_replicate or other units, do not call shadow:
   call pre_forward and post_forward of all, then their post_backward, in the order of other ranks
   divide      0: gradients are divided by the number of replicas (PyTorch by default:
               divide_by_initial_world_size=True); 1: by the ranks that have a batch. If the
               loss is per token, set the number of tokens as divide factor after this call
   active      out: how many ranks have one. 0: the data of all ranks have ended
   Effect      if some ranks have no batch, a plan (fsdp_plan.h) pauses in this step on all
               ranks. If the model has several groups of replicas, all have to find the same. Beside
               a plan, gradients get ready in the same order on all ranks (docs/plan.md)
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle); collective errors
   Collective  join: yes, every rank of the mesh, one all-reduce of an integer, and it sets the
               divide factor of the buckets. shadow: as the calls of a step
   Blocks      yes, at most timeout_ms      Allocates as the calls of a step
   Source      torch: Join, DistributedDataParallel.join */
FSDP_API fsdp_status fsdp_replicate_join(fsdp_replicate *rep, int has_batch, int divide,
                                         int *active);
FSDP_API fsdp_status fsdp_replicate_shadow(fsdp_replicate *rep);

#ifdef __cplusplus
}
#endif
#endif // FSDP_REPLICATE_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_REPLICATE_IMPLEMENTED)
#define FSDP_REPLICATE_IMPLEMENTED

#include <stdio.h>  // snprintf
#include <string.h> // memcpy, memset, strcmp

/* -------------------------------------------------------------------------------------------- */
// Assignment of tensors to buckets.

enum { FSDPI_REP_KEYS = 64 };

typedef struct fsdpi_assign {
    const int32_t *key, *order;
    const int64_t *caps;
    int32_t *bucket;
    int64_t *cap;
    int num_caps, buckets;
    struct { // the bucket of a key that is still open
        int64_t bytes;
        int first, members, cap, number; // first: position in the order; cap: index of its cap
    } open[FSDPI_REP_KEYS];
} fsdpi_assign;

static int fsdpi_assign_at(const fsdpi_assign *a, int i) { return a->order ? a->order[i] : i; }
static int fsdpi_assign_key(const fsdpi_assign *a, int t) { return a->key ? a->key[t] : 0; }

// Closes a bucket: the tensors of a key from its bucket's first position to `last`. Without an
// order the number is known: a bucket is opened by its smallest index.
static void fsdpi_assign_close(fsdpi_assign *a, int key, int last) {
    int number = a->order ? a->buckets++ : a->open[key].number, cap = a->open[key].cap;
    for (int i = a->open[key].first; i <= last; i++)
        if (fsdpi_assign_key(a, fsdpi_assign_at(a, i)) == key)
            a->bucket[fsdpi_assign_at(a, i)] = number;
    if (a->cap) a->cap[number] = a->caps[cap];
    a->open[key].cap += cap + 1 < a->num_caps;
    a->open[key].members = 0;
    a->open[key].bytes = 0;
}

FSDP_API int fsdp_replicate_assign(const int64_t *nbytes, const int32_t *key, const int32_t *order,
                                   int count, const int64_t *caps, int num_caps, int32_t *bucket,
                                   int32_t *place, int64_t *cap) {
    fsdpi_assign a;
    memset(&a, 0, sizeof a);
    if (!nbytes || !caps || !bucket || num_caps < 1 || count < 0) return -1;
    a.key = key, a.order = order, a.caps = caps, a.num_caps = num_caps;
    a.bucket = bucket, a.cap = cap;
    for (int i = 0; i < num_caps; i++)
        if (caps[i] < 0) return -1;
    for (int i = 0; i < count; i++) bucket[i] = -1;
    for (int i = 0; i < count; i++) { // bucket marks the tensors that were met
        int t = fsdpi_assign_at(&a, i), known = t >= 0 && t < count && bucket[t] < 0;
        int k = known ? fsdpi_assign_key(&a, t) : -1;
        if (k < 0 || k >= FSDPI_REP_KEYS || nbytes[t] < 0) return -1;
        bucket[t] = 0;
    }
    for (int i = 0; i < count; i++) {
        int t = fsdpi_assign_at(&a, i), k = fsdpi_assign_key(&a, t);
        if (a.open[k].members == 0) {
            a.open[k].first = i;
            a.open[k].number = order ? 0 : a.buckets++;
        }
        if (place) place[t] = a.open[k].members;
        a.open[k].members++;
        int64_t room = INT64_MAX - a.open[k].bytes;
        a.open[k].bytes += nbytes[t] < room ? nbytes[t] : room;
        if (a.open[k].bytes >= caps[a.open[k].cap]) fsdpi_assign_close(&a, k, i);
    }
    for (int oldest = 0; oldest >= 0;) { // the open buckets, in the order in which they were opened
        oldest = -1;
        for (int k = 0; k < FSDPI_REP_KEYS; k++)
            if (a.open[k].members && (oldest < 0 || a.open[k].first < a.open[oldest].first))
                oldest = k;
        if (oldest >= 0) fsdpi_assign_close(&a, oldest, count - 1);
    }
    return a.buckets;
}

/* -------------------------------------------------------------------------------------------- */
// State: which gradients of this backward are ready, and which buckets are being reduced. Units
// have all other state. Invariants: buckets are reduced in the order of their index; a call in a
// wrong order changes nothing.

typedef struct fsdpi_rep_unit {
    fsdp_replicate *rep;
    fsdp_unit *unit;
    int32_t *members; // [num_members] parameters, in order
    int64_t nbytes;
    int32_t num_members, pending, open; // in this backward: members not ready; 1: writable
    int32_t has_hooks;                  // 1: a trainable member has a post-accumulate hook
    int32_t due;                        // 1: a backward has ended, its use is not settled
    int32_t sends;                      // 1: its use must be sent with its reduction
    fsdp_block part;                    // range in the use of all parameters, in bytes
    fsdp_replicate_bucket shown;        // passed to hooks
} fsdpi_rep_unit;

typedef struct fsdpi_rep_param {
    int32_t bucket, index; // index: in the bucket's unit
    uint8_t ready, had;    // in this backward: had: 1: it began with a gradient
    uint8_t used;
} fsdpi_rep_param;

struct fsdp_replicate {
    fsdp_model *model;
    fsdp_extension extension;
    const fsdp_mesh *mesh; // 1-D
    fsdp_replicate_hook hook;
    void *hook_user;
    fsdpi_rep_unit *buckets;
    fsdpi_rep_param *params;
    int64_t *offsets, *numels;    // trainable parameters, bucket after bucket
    int32_t *members, *trainable; // bucket after bucket
    int32_t *seen, *order;        // parameters as they get ready; those in a complete backward
    int32_t num_params, num_buckets, num_seen, num_order;
    int32_t next;               // first bucket that is not reduced
    int32_t late, began, moved; // began: a backward has; moved: `shown` must be filled in
    int32_t inside, changed;    // inside: in the model's backward; changed: `has_hooks` is stale
    int32_t witness, each;      // witness: has a gradient if any has, or -1; each: 1: test all
    fsdp_status failed;         // the first failure of this backward
    // Use of parameters: an i32 per parameter, bucket after bucket; 1: used.
    fsdp_buf *mine, *ours;        // this rank's, in host memory; the maximum over the replicas
    int32_t *found;               // the host's copy of `ours`
    fsdp_block whole;             // range of all, in bytes
    fsdp_comm *comm;              // NULL: one rank
    int32_t label, sent, copying; // sent: 1: all, in this finalize; copying: an op reads `mine`
};

static fsdp_status fsdpi_rep_view(const fsdp_replicate *rep, int param, fsdp_param_view *out) {
    const fsdpi_rep_param *p = &rep->params[param];
    return fsdp_param_view_get(rep->buckets[p->bucket].unit, p->index, out);
}

// Reports a NULL argument. m: a model that was passed, or NULL.
static fsdp_status fsdpi_rep_null(const fsdp_model *m, const char *call, const char *which) {
    return fsdp_fail(fsdp_model_world(m), FSDP_ERR_INVALID_ARG, "[E951] %s: %s is NULL", call,
                     which);
}

static void fsdpi_rep_clear(fsdp_replicate *rep) { // for the next backward
    for (int i = 0; i < rep->num_params; i++) rep->params[i].ready = 0;
    for (int k = 0; k < rep->num_buckets; k++) {
        rep->buckets[k].pending = rep->buckets[k].num_members;
        rep->buckets[k].open = 0;
    }
    rep->next = rep->num_seen = rep->began = 0;
    rep->failed = FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// Finds which parameters were used. A reduced bucket has gradients of all its trainable parameters,
// zeros where no rank wrote. While the reductions run, the replicas find the maximum of their use,
// and after finalize the gradients that no rank wrote are dropped. A rank that used all parameters
// knows the result. With post-accumulate hooks that is too late: such a bucket finds the use before
// its reduction, and leaves unused parameters out.
// Source: torch: Reducer.all_reduce_local_used_map, finalize_bucket_dense.

// Makes an op. Ranks compare states of ops, and may come here after different calls.
static fsdp_op fsdpi_rep_op(const fsdp_replicate *rep, int kind, int stream) {
    fsdp_op op;
    fsdp_op_init(&op, rep->model, NULL, kind, rep->label, stream);
    op.state = FSDP_STATE_POST_BACKWARD;
    return op;
}

// Sends the use of a part: copies this rank's to `mine` and `ours`, then takes the maximum.
static fsdp_status fsdpi_rep_send(fsdp_replicate *rep, const fsdp_block *part) {
    int32_t *mine = (int32_t *)fsdp_buf_ptr(rep->mine);
    int64_t count = part->width / 4, first = part->src / 4;
    fsdp_status status = FSDP_OK;
    for (int64_t i = first; i < first + count && !status; i++) {
        int32_t used = rep->params[rep->members[i]].used;
        if (mine[i] == used) continue;
        if (rep->copying) status = fsdp_wait_stream(rep->model, FSDP_STREAM_ALLREDUCE);
        rep->copying = 0;
        mine[i] = used;
    }
    fsdp_op op = fsdpi_rep_op(rep, FSDP_OP_COPY, FSDP_STREAM_ALLREDUCE);
    op.dtype = op.out_dtype = FSDP_U8;
    op.count = (uint64_t)part->width;
    op.list = part;
    op.list_count = 1;
    op.src = rep->mine;
    op.dst = rep->ours;
    if (!status) status = fsdp_emit(rep->model, &op);
    rep->copying = 1;
    op = fsdpi_rep_op(rep, FSDP_OP_ALL_REDUCE, FSDP_STREAM_ALLREDUCE);
    op.dtype = op.out_dtype = FSDP_I32;
    op.count = (uint64_t)count;
    op.redop = FSDP_MAX;
    op.in_place = 1;
    op.comm = rep->comm;
    op.group_size = fsdp_mesh_size(rep->mesh, 0);
    op.src = op.dst = rep->ours;
    op.src_ptr = op.dst_ptr = (char *)fsdp_buf_ptr(rep->ours) + part->dst;
    return status ? status : fsdp_emit(rep->model, &op);
}

// Waits for the replicas' use of a part, and reads it. A world of one rank knows it.
static fsdp_status fsdpi_rep_receive(fsdp_replicate *rep, const fsdp_block *part) {
    int64_t first = part->src / 4;
    for (int64_t i = first; i < first + part->width / 4 && !rep->comm; i++)
        rep->found[i] = rep->params[rep->members[i]].used;
    if (!rep->comm) return FSDP_OK;
    fsdp_op op = fsdpi_rep_op(rep, FSDP_OP_WAIT, FSDP_STREAM_COMPUTE);
    op.src = rep->ours;
    fsdp_status status = fsdp_emit(rep->model, &op);
    if (!status)
        status = fsdp_transfer(rep->model, rep->found + first,
                               (char *)fsdp_buf_ptr(rep->ours) + part->dst, part->width);
    rep->copying = 0;
    return status;
}

// Returns 1 if this rank did not use all trainable parameters of a bucket.
static int fsdpi_rep_lacks(const fsdpi_rep_unit *b) {
    for (int i = 0; i < b->shown.num_params; i++)
        if (!b->rep->params[b->shown.params[i]].used) return 1;
    return 0;
}

static int32_t fsdpi_rep_found(const fsdpi_rep_unit *b, const fsdpi_rep_param *p) {
    return b->rep->found[b->members - b->rep->members + p->index];
}

// Marks parameters that another rank used as used here, before the reduction of a bucket with
// hooks.
static fsdp_status fsdpi_rep_join_use(fsdpi_rep_unit *b) {
    fsdp_replicate *rep = b->rep;
    if (!rep->comm || !b->has_hooks || !fsdp_requires_gradient_sync(b->unit)) return FSDP_OK;
    fsdp_status status = fsdpi_rep_send(rep, &b->part);
    if (status || !fsdpi_rep_lacks(b)) return status;
    status = fsdpi_rep_receive(rep, &b->part);
    for (int i = 0; i < b->shown.num_params && !status; i++) {
        const fsdpi_rep_param *p = &rep->params[b->shown.params[i]];
        if (!p->used && fsdpi_rep_found(b, p)) (void)fsdp_grad(b->unit, p->index);
    }
    return status;
}

static uint8_t fsdpi_rep_has_grad(const fsdp_replicate *rep, int param) {
    fsdp_param_view v = FSDP_ZERO;
    (void)fsdpi_rep_view(rep, param, &v);
    return v.shard_grad != NULL;
}

/* Notes, when the model's backward begins, which parameters have gradients of earlier ones. If
   zero_grad has dropped that of `witness`, it has dropped all, so that one test is usually
   enough. */
static void fsdpi_rep_enter(fsdp_replicate *rep) {
    int none = !rep->each && (rep->witness < 0 || !fsdpi_rep_has_grad(rep, rep->witness));
    rep->witness = -1;
    for (int i = 0; i < rep->num_params; i++) {
        rep->params[i].had = none ? 0 : fsdpi_rep_has_grad(rep, i);
        if (rep->params[i].had) rep->witness = i;
    }
    rep->each = 0;
    rep->inside = 1;
}

// Returns 1 if a backward of the bucket has ended since use was settled, and its gradients are
// reduced.
static int fsdpi_rep_is_reduced(const fsdpi_rep_unit *b) {
    fsdp_memory m = FSDP_ZERO;
    if (!b->due || fsdp_unit_memory(b->unit, &m)) return 0;
    return !m.pool_slots[FSDP_POOL_GRAD] && !m.pool_slots[FSDP_POOL_REDUCE_IN] &&
           !m.pool_slots[FSDP_POOL_REDUCE_OUT];
}

// Drops gradients in reduced buckets that no rank wrote.
static fsdp_status fsdpi_rep_settle(fsdp_replicate *rep) {
    fsdp_status status = FSDP_OK;
    int lacks = 0;
    for (int k = 0; k < rep->num_buckets; k++) {
        const fsdpi_rep_unit *b = &rep->buckets[k];
        lacks |= !b->has_hooks && fsdpi_rep_is_reduced(b) && fsdpi_rep_lacks(b);
    }
    if (lacks) status = fsdpi_rep_receive(rep, &rep->whole);
    for (int k = 0; k < rep->num_buckets && !status; k++) {
        fsdpi_rep_unit *b = &rep->buckets[k];
        if (!fsdpi_rep_is_reduced(b)) continue;
        for (int i = 0; i < b->shown.num_params && !status; i++) {
            fsdpi_rep_param *p = &rep->params[b->shown.params[i]];
            if (!b->has_hooks && !p->used && !p->had && !fsdpi_rep_found(b, p))
                status = fsdp_set_grad_none(b->unit, p->index);
            if (p->used) rep->witness = b->shown.params[i];
            else rep->each = 1;
            p->used = 0;
        }
        b->due = b->sends = 0;
    }
    return status;
}

/* Handles finalize. Use is sent before the core finalizes, which waits for all reductions, and
   which may reduce buckets with unreduced gradients of a backward without sync. */
static fsdp_status fsdpi_rep_finalize(fsdp_replicate *rep) {
    fsdp_status status = FSDP_OK;
    int sends = 0;
    if (!rep->inside) fsdpi_rep_enter(rep);
    for (int k = 0; k < rep->num_buckets; k++) {
        fsdpi_rep_unit *b = &rep->buckets[k];
        b->sends |= b->due && fsdp_requires_gradient_sync(b->unit);
        sends |= b->sends && !b->has_hooks && b->shown.num_params > 0;
    }
    if (sends && rep->comm && !rep->sent) {
        rep->sent = 1;
        status = fsdpi_rep_send(rep, &rep->whole);
    }
    if (status) return status;
    status = fsdp_finalize_backward(rep->model); // calls later extensions, then the core
    int ended = !status;                         // or an earlier call failed
    for (int k = 0; k < rep->num_buckets; k++)
        ended |= rep->buckets[k].due && fsdp_unit_state(rep->buckets[k].unit) == FSDP_STATE_IDLE;
    if (!ended || fsdp_world_status(fsdp_model_world(rep->model))) return status;
    rep->sent = rep->inside = 0;
    fsdp_status settled = fsdpi_rep_settle(rep);
    return status ? status : settled;
}

static void fsdpi_rep_reset(fsdp_replicate *rep) {
    fsdpi_rep_clear(rep);
    rep->inside = rep->sent = 0;
    for (int i = 0; i < rep->num_params; i++) rep->params[i].used = 0;
    for (int k = 0; k < rep->num_buckets; k++) rep->buckets[k].due = rep->buckets[k].sends = 0;
}

static int fsdpi_rep_call(void *user, fsdp_model *model, fsdp_unit *unit, int call,
                          fsdp_status *status) {
    fsdp_replicate *rep = (fsdp_replicate *)user;
    if (call == FSDP_CALL_RESET) fsdpi_rep_reset(rep);
    if (call == FSDP_CALL_ZERO_GRAD && unit) rep->each = 1;
    if (call == FSDP_CALL_SET) rep->changed = 1;
    if (call == FSDP_CALL_PRE_BACKWARD && !rep->inside) fsdpi_rep_enter(rep);
    if (call != FSDP_CALL_FINALIZE) return 0;
    *status = !rep->began
                  ? fsdpi_rep_finalize(rep)
                  : fsdp_fail(fsdp_model_world(model), FSDP_ERR_INVALID_STATE,
                              "[E952] finalize_backward: a backward of unit '%s' and the other "
                              "buckets has begun, and %d of %d are reduced: call "
                              "fsdp_replicate_post_backward first",
                              fsdp_unit_label(rep->buckets[0].unit), rep->next, rep->num_buckets);
    return 1;
}

static void fsdpi_rep_relayout(void *user, fsdp_model *model) {
    (void)model;
    fsdp_replicate *rep = (fsdp_replicate *)user;
    rep->moved = rep->each = 1;
}

static void fsdpi_rep_destroy(void *user) {
    fsdp_replicate *rep = (fsdp_replicate *)user;
    fsdp_buf_destroy(rep->model, rep->mine);
    fsdp_buf_destroy(rep->model, rep->ours);
    fsdp_free(rep->model, FSDP_MEMORY_HOST, rep, 0);
}

// Finds the trainable members of each bucket, and their offsets in its message: those of their
// shards.
static fsdp_status fsdpi_rep_apply_layout(fsdp_replicate *rep) {
    int at = 0, last = 0;
    if (!rep->moved) return FSDP_OK;
    for (int k = 0; k < rep->num_buckets; k++) {
        fsdpi_rep_unit *b = &rep->buckets[k];
        const char *base = NULL;
        b->shown.params = rep->trainable + at;
        b->shown.offsets = rep->offsets + at;
        b->shown.numels = rep->numels + at;
        b->shown.num_params = b->shown.is_last = 0;
        for (int i = 0; i < b->num_members; i++) {
            fsdp_param_view v = FSDP_ZERO;
            fsdp_status status = fsdp_param_view_get(b->unit, i, &v);
            if (status) return status;
            if (!v.requires_grad) continue;
            if (!base) base = (const char *)v.shard;
            rep->trainable[at] = b->members[i];
            rep->numels[at] = v.numel;
            rep->offsets[at++] = ((const char *)v.shard - base) / (int64_t)fsdp_dtype_size(v.dtype);
            b->shown.num_params++;
            last = k;
        }
    }
    rep->buckets[last].shown.is_last = 1;
    rep->moved = 0;
    rep->changed = 1;
    return FSDP_OK;
}

// Finds the buckets with hooks after options have changed. In such a bucket the core leaves out
// parameters that no rank used.
static fsdp_status fsdpi_rep_find_hooks(fsdp_replicate *rep) {
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < rep->num_buckets && rep->changed && !status; k++) {
        fsdpi_rep_unit *b = &rep->buckets[k];
        int has_hooks = 0;
        for (int i = 0; i < b->num_members; i++) {
            fsdp_param_view v = FSDP_ZERO;
            (void)fsdp_param_view_get(b->unit, i, &v);
            has_hooks |= v.has_hook && v.requires_grad;
        }
        if (has_hooks != b->has_hooks)
            status = fsdp_set_reduce_scatter_unused_params(rep->model, b->unit, !has_hooks);
        b->has_hooks = has_hooks;
    }
    rep->changed = 0;
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Creation.

typedef struct fsdpi_rep_work { // needed only during creation
    fsdp_param_desc *params;    // [2 * num_params] in order; then those of one bucket
    int64_t *nbytes, *counts;   // counts: bytes that count towards caps
    int32_t *key, *order, *bucket, *place;
    char (*names)[16]; // "p0", ...
} fsdpi_rep_work;

// Copies the descs, whose array may have an older header's stride. Finds sizes and keys of tensors.
static fsdp_status fsdpi_rep_params(fsdp_world *world, const fsdp_replicate_desc *d,
                                    fsdpi_rep_work *w) {
    size_t stride = 0;
    for (int i = 0; i < d->num_params; i++) {
        fsdp_param_desc *p = &w->params[i];
        const char *at = (const char *)d->params + (size_t)i * stride;
        char what[64];
        snprintf(what, sizeof what, "fsdp_replicate_desc.params[%d]", i);
        fsdp_status status = fsdp_desc_read(world, p, at, sizeof *p, what);
        if (status) return status;
        if (i == 0) stride = p->size ? p->size : sizeof *p;
        p->size = sizeof *p;
        if (!p->dtype) p->dtype = FSDP_F32;
        snprintf(w->names[i], sizeof w->names[i], "p%d", i);
        if (!p->name) p->name = w->names[i];
        for (int k = 0; k < i; k++)
            if (strcmp(w->params[k].name, p->name) == 0)
                return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                                 "[E953] replicate_create: parameters %d and %d are both named "
                                 "'%s': give each a name of its own",
                                 k, i, p->name);
        double nbytes = (double)fsdp_dtype_size(p->dtype); // fully_shard refuses odd shapes
        for (int k = 0; k < p->ndim && k < FSDP_MAX_DIMS; k++) nbytes *= (double)p->shape[k];
        w->nbytes[i] = nbytes > 0 && nbytes < 9e18 / d->num_params ? (int64_t)nbytes : 0;
        w->counts[i] = p->frozen ? 0 : w->nbytes[i];
        w->key[i] = (int32_t)((uint32_t)p->dtype % 16u) + 16 * (p->keep_dtype != 0) +
                    32 * (p->frozen != 0);
    }
    return FSDP_OK;
}

// Assigns parameters to buckets. Frozen ones come last and fill no bucket, so their buckets are
// last.
static fsdp_status fsdpi_rep_assign(fsdp_world *world, const fsdp_replicate_desc *d,
                                    fsdpi_rep_work *w, int32_t *num_buckets) {
    int64_t two[2] = {d->first_bytes, d->bucket_bytes ? d->bucket_bytes : 25 << 20};
    if (!two[0]) two[0] = d->bucket_bytes ? two[1] : 1 << 20;
    const int64_t *caps = d->num_caps ? d->caps : two;
    int n = d->num_params, num_caps = d->num_caps ? d->num_caps : 2, at = 0;
    if (num_caps < 0 || !caps)
        return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                         "[E954] replicate_create: num_caps is %d, caps is %s: give as many caps, "
                         "or 0 of them",
                         d->num_caps, d->caps ? "given" : "NULL");
    for (int i = 0; i < num_caps; i++)
        if (caps[i] < 1)
            return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                             "[E955] replicate_create: %s[%d] is %lld, expected >= 1 byte",
                             d->num_caps ? "caps" : "first_bytes, bucket_bytes", i,
                             (long long)caps[i]);
    for (int i = 0; i < n; i++) {
        int t = d->order ? d->order[i] : n - 1 - i, known = t >= 0 && t < n;
        if (!known || w->place[t]++)
            return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                             "[E956] replicate_create: order[%d] is %d%s, expected a permutation "
                             "of 0..%d",
                             i, t, known ? " for the second time" : "", n - 1);
    }
    for (int frozen = 0; frozen < 2; frozen++)
        for (int i = 0; i < n; i++) {
            int t = d->order ? d->order[i] : n - 1 - i;
            if ((w->params[t].frozen != 0) == frozen) w->order[at++] = t;
        }
    *num_buckets = fsdp_replicate_assign(w->counts, w->key, w->order, n, caps, num_caps, w->bucket,
                                         w->place, NULL);
    return FSDP_OK;
}

// Finds the mesh info of the buckets, and the 1-D mesh of its replicas.
static fsdp_status fsdpi_rep_mesh(fsdp_model *model, const fsdp_replicate_desc *d,
                                  fsdp_mesh_info *info, const fsdp_mesh **replicas) {
    fsdp_world *world = fsdp_model_world(model);
    fsdp_mesh *all = NULL;
    fsdp_status status = fsdp_model_mesh_info(model, info);
    if (d->mesh_info) *info = *d->mesh_info;
    if (!status && !d->mesh_info && (d->mesh || info->kind != FSDP_MESH_INFO_DDP)) {
        if (!d->mesh) status = fsdp_mesh_1d(world, "replicate", &all);
        const fsdp_mesh *mesh = d->mesh ? d->mesh : all;
        if (!status && fsdp_mesh_ndim(mesh) != 1)
            status = fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                               "[E957] replicate_create: the mesh is %d-D, expected 1-D: slice "
                               "it, or give a mesh_info of kind DDP",
                               fsdp_mesh_ndim(mesh));
        if (!status) status = fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, info);
    }
    if (!status && (info->kind != FSDP_MESH_INFO_DDP || !info->mesh))
        status = fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                           "[E958] replicate_create: mesh_info is of kind %s and its mesh is %s, "
                           "expected DDP and a mesh: fill it by fsdp_mesh_info_init with "
                           "FSDP_MESH_INFO_DDP",
                           info->kind == FSDP_MESH_INFO_HSDP  ? "HSDP"
                           : info->kind == FSDP_MESH_INFO_DDP ? "DDP"
                                                              : "FSDP",
                           info->mesh ? "given" : "NULL");
    if (status) return status;
    *replicas = info->mesh;
    if (fsdp_mesh_ndim(info->mesh) == 1) return FSDP_OK;
    int32_t dim = info->replicate_mesh_dim;
    status = fsdp_mesh_slice(info->mesh, &dim, 1, &all);
    *replicas = all;
    return status;
}

// Makes a bucket's unit from its parameters.
static fsdp_status fsdpi_rep_bucket_unit(fsdp_replicate *rep, const fsdp_replicate_desc *d,
                                         const fsdp_mesh_info *info, const fsdpi_rep_work *w,
                                         fsdpi_rep_unit *b) {
    int k = (int)(b - rep->buckets);
    fsdp_param_desc *params = w->params + d->num_params;
    fsdp_unit_desc ud = FSDP_ZERO;
    char name[128];
    snprintf(name, sizeof name, "%.100s.%d", d->name ? d->name : "bucket", k);
    b->rep = rep;
    b->members = k ? b[-1].members + b[-1].num_members : rep->members;
    b->shown.index = k;
    for (int i = 0; i < d->num_params; i++) {
        if (w->bucket[i] != k) continue;
        b->members[w->place[i]] = i;
        params[w->place[i]] = w->params[i];
        rep->params[i].bucket = k;
        rep->params[i].index = w->place[i];
        b->nbytes += w->nbytes[i];
        b->num_members++;
    }
    b->part.src = b->part.dst = 4 * (b->members - rep->members);
    b->part.width = b->part.src_pitch = b->part.dst_pitch = 4 * (int64_t)b->num_members;
    b->part.height = 1;
    ud.name = name;
    ud.params = params;
    ud.num_params = b->num_members;
    ud.reshard_after_forward = FSDP_RESHARD_NEVER;
    ud.param_dtype = d->param_dtype;
    ud.reduce_dtype = d->reduce_dtype;
    ud.mesh_info = info;
    fsdp_status status = fsdp_fully_shard(rep->model, &ud, &b->unit);
    if (!status) status = fsdp_set_reduce_scatter_unused_params(rep->model, b->unit, 1);
    // Ranks open a bucket at different times, so it must not start to gather another unit.
    return status ? status : fsdp_set_modules_to_backward_prefetch(b->unit, &b->unit, 1);
}

// Allocates the buffers and the communicator of the op "replicate_used".
static fsdp_status fsdpi_rep_exchange(fsdp_replicate *rep, int num_params) {
    fsdp_model *m = rep->model;
    int pool = fsdp_pool_register(m, "replicate");
    int64_t nbytes = 4 * (int64_t)num_params;
    const fsdp_block whole = {0, 0, nbytes, 1, nbytes, nbytes};
    rep->whole = whole;
    rep->label = fsdp_label_register(m, "replicate_used");
    if (pool < 0 || rep->label < 0) return FSDP_ERR_INVALID_ARG;
    fsdp_status status = fsdp_mesh_comm(rep->mesh, 0, FSDP_STREAM_ALLREDUCE, &rep->comm);
    if (status || !rep->comm) return status;
    status = fsdp_buf_create(m, pool, FSDP_MEMORY_PINNED, nbytes, &rep->mine);
    return status ? status : fsdp_buf_create(m, pool, FSDP_MEMORY_DEVICE, nbytes, &rep->ours);
}

static fsdp_status fsdpi_rep_build(fsdp_replicate *rep, const fsdp_replicate_desc *d,
                                   const fsdp_mesh_info *info, fsdpi_rep_work *w) {
    fsdp_world *world = fsdp_model_world(rep->model);
    fsdp_status status = fsdpi_rep_params(world, d, w);
    if (!status) status = fsdpi_rep_assign(world, d, w, &rep->num_buckets);
    for (int k = 0; k < rep->num_buckets && !status; k++)
        status = fsdpi_rep_bucket_unit(rep, d, info, w, &rep->buckets[k]);
    if (!status) status = fsdpi_rep_exchange(rep, d->num_params);
    if (status) return status;
    rep->num_params = d->num_params;
    rep->late = d->late != 0;
    rep->moved = 1;
    rep->witness = -1;
    fsdpi_rep_clear(rep);
    rep->extension.name = "replicate";
    rep->extension.user = rep;
    rep->extension.call = fsdpi_rep_call;
    rep->extension.relayout = fsdpi_rep_relayout;
    rep->extension.destroy = fsdpi_rep_destroy;
    return fsdp_attach(rep->model, &rep->extension);
}

FSDP_API fsdp_status fsdp_replicate_create(fsdp_model *model, const fsdp_replicate_desc *desc,
                                           fsdp_replicate **rep) {
    if (!model || !desc || !rep)
        return fsdpi_rep_null(model, "replicate_create", "model, desc or rep");
    fsdp_world *world = fsdp_model_world(model);
    fsdp_replicate_desc d;
    fsdpi_rep_work w;
    fsdp_mesh_info info;
    const fsdp_mesh *mesh = NULL;
    void *room = NULL, *temporary = NULL;
    *rep = NULL;
    fsdp_status status = fsdp_desc_read(world, &d, desc, sizeof d, "fsdp_replicate_desc");
    if (!status && (d.num_params < 1 || !d.params))
        status = fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                           "[E959] replicate_create: num_params is %d, params is %s, expected "
                           ">= 1 and an array",
                           d.num_params, d.params ? "given" : "NULL");
    if (!status) status = fsdpi_rep_mesh(model, &d, &info, &mesh);
    if (status) return status;
    int64_t n = d.num_params,
            each = (int64_t)(sizeof(fsdpi_rep_unit) + sizeof(fsdpi_rep_param)) + 2 * 8 + 5 * 4;
    int64_t work = n * ((int64_t)(2 * sizeof(fsdp_param_desc) + sizeof *w.names) + 2 * 8 + 4 * 4);
    status = fsdp_alloc(model, FSDP_MEMORY_HOST, (int64_t)sizeof **rep + n * each,
                        "replicate_create: no memory for its tables", &room);
    if (!status)
        status = fsdp_alloc(model, FSDP_MEMORY_HOST, work,
                            "replicate_create: no memory to assign buckets", &temporary);
    if (!status) {
        fsdp_replicate *made = (fsdp_replicate *)room;
        made->model = model;
        made->mesh = mesh;
        made->buckets = (fsdpi_rep_unit *)(void *)(made + 1);
        made->offsets = (int64_t *)(void *)(made->buckets + n);
        made->numels = made->offsets + n;
        made->params = (fsdpi_rep_param *)(void *)(made->numels + n);
        made->members = (int32_t *)(void *)(made->params + n);
        made->trainable = made->members + n;
        made->seen = made->trainable + n;
        made->order = made->seen + n;
        made->found = made->order + n;
        w.params = (fsdp_param_desc *)temporary;
        w.nbytes = (int64_t *)(void *)(w.params + 2 * n);
        w.counts = w.nbytes + n;
        w.key = (int32_t *)(void *)(w.counts + n);
        w.order = w.key + n;
        w.bucket = w.order + n;
        w.place = w.bucket + n;
        w.names = (char(*)[16])(void *)(w.place + n);
        status = fsdpi_rep_build(made, &d, &info, &w);
        if (status) fsdpi_rep_destroy(made);
        else *rep = made;
    } else fsdp_free(model, FSDP_MEMORY_HOST, room, 0);
    fsdp_free(model, FSDP_MEMORY_HOST, temporary, work);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// A step.

static fsdp_status fsdpi_rep_each(fsdp_replicate *rep, const char *name,
                                  fsdp_status (*call)(fsdp_unit *unit)) {
    if (!rep) return fsdpi_rep_null(NULL, name, "rep");
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < rep->num_buckets && !status; k++) status = call(rep->buckets[k].unit);
    return status;
}
FSDP_API fsdp_status fsdp_replicate_pre_forward(fsdp_replicate *rep) {
    fsdp_status status = rep ? fsdp_model_commit(rep->model) : FSDP_OK;
    if (rep && !rep->began) rep->failed = FSDP_OK;
    if (rep && !status) status = fsdpi_rep_apply_layout(rep);
    if (rep && !status) status = fsdpi_rep_find_hooks(rep);
    return status ? status : fsdpi_rep_each(rep, "replicate_pre_forward", fsdp_pre_forward);
}
FSDP_API fsdp_status fsdp_replicate_post_forward(fsdp_replicate *rep) {
    return fsdpi_rep_each(rep, "replicate_post_forward", fsdp_post_forward);
}

static fsdp_status fsdpi_rep_keep(fsdp_replicate *rep, fsdp_status status) {
    if (rep && !rep->failed) rep->failed = status;
    return status;
}

// Checks that the parameters exist. If `fresh`, also that none of them is ready yet.
static fsdp_status fsdpi_rep_check(const fsdp_replicate *rep, const char *call, int first,
                                   int count, int fresh) {
    if (!rep) return fsdpi_rep_null(NULL, call, "rep");
    fsdp_world *world = fsdp_model_world(rep->model);
    if (first < 0 || count < 0 || count > rep->num_params - first)
        return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                         "[E960] %s: first is %d, count is %d, expected parameters of 0..%d", call,
                         first, count, rep->num_params - 1);
    for (int i = first; fresh && i < first + count; i++) {
        fsdp_param_view v = FSDP_ZERO;
        if (!rep->params[i].ready) continue;
        (void)fsdpi_rep_view(rep, i, &v);
        return fsdp_fail(world, FSDP_ERR_INVALID_STATE,
                         "[E961] %s: parameter '%s' (%s) is ready already in this backward: write "
                         "its gradient first, then call fsdp_replicate_ready once",
                         call, v.name, fsdp_unit_label(v.unit));
    }
    return FSDP_OK;
}

// Opens a bucket: its message begins, and its gradients can be written.
static fsdp_status fsdpi_rep_open(fsdpi_rep_unit *b) {
    if (b->open) return FSDP_OK;
    fsdp_status status = fsdpi_rep_find_hooks(b->rep);
    if (!status) status = fsdp_pre_backward(b->unit);
    if (status) return status;
    b->open = b->rep->began = 1;
    return FSDP_OK;
}

// Reduces the next bucket: it is complete, or the backward ends.
static fsdp_status fsdpi_rep_reduce(fsdp_replicate *rep) {
    fsdpi_rep_unit *b = &rep->buckets[rep->next];
    fsdp_status status = fsdpi_rep_open(b);
    if (!status) status = fsdpi_rep_join_use(b);
    if (!status) status = fsdp_post_backward(b->unit);
    if (status) return status;
    b->due = 1;
    b->sends |= fsdp_requires_gradient_sync(b->unit);
    rep->next++;
    return FSDP_OK;
}

// Returns the result of a getter that fails, as those of fsdp.h do.
static void *fsdpi_rep_undefined(fsdp_replicate *rep, fsdp_status status) {
    return rep ? fsdp_fallback_ptr(rep->model, fsdpi_rep_keep(rep, status)) : NULL;
}

// The getters. dtype KEEP: any.
static void *fsdpi_rep_data(fsdp_replicate *rep, int param, fsdp_dtype dtype) {
    fsdp_status status = fsdpi_rep_check(rep, "replicate_data", param, 1, 0);
    if (status) return fsdpi_rep_undefined(rep, status);
    const fsdpi_rep_param *p = &rep->params[param];
    fsdp_unit *unit = rep->buckets[p->bucket].unit;
    return dtype ? fsdp_data_as(unit, p->index, dtype) : fsdp_data(unit, p->index);
}
static void *fsdpi_rep_grad(fsdp_replicate *rep, int param, fsdp_dtype dtype) {
    int alive = rep && !fsdp_world_status(fsdp_model_world(rep->model));
    fsdp_status status = fsdpi_rep_check(rep, "replicate_grad", param, 1, alive);
    if (status) return fsdpi_rep_undefined(rep, status);
    fsdpi_rep_param *p = &rep->params[param];
    fsdpi_rep_unit *b = &rep->buckets[p->bucket];
    if (alive) (void)fsdpi_rep_keep(rep, fsdpi_rep_open(b)); // the next call fails too
    void *grad = dtype ? fsdp_grad_as(b->unit, p->index, dtype) : fsdp_grad(b->unit, p->index);
    p->used |= grad != NULL;
    return grad;
}
FSDP_API void *fsdp_replicate_data(fsdp_replicate *rep, int param) {
    return fsdpi_rep_data(rep, param, FSDP_DTYPE_KEEP);
}
FSDP_API void *fsdp_replicate_grad(fsdp_replicate *rep, int param) {
    return fsdpi_rep_grad(rep, param, FSDP_DTYPE_KEEP);
}
FSDP_API void *fsdp_replicate_data_as(fsdp_replicate *rep, int param, fsdp_dtype dtype) {
    return fsdpi_rep_data(rep, param, dtype);
}
FSDP_API void *fsdp_replicate_grad_as(fsdp_replicate *rep, int param, fsdp_dtype dtype) {
    return fsdpi_rep_grad(rep, param, dtype);
}

FSDP_API fsdp_status fsdp_replicate_ready(fsdp_replicate *rep, int first, int count) {
    fsdp_status status = rep ? fsdp_world_status(fsdp_model_world(rep->model)) : FSDP_OK;
    if (!status) status = fsdpi_rep_check(rep, "replicate_ready", first, count, 1);
    for (int i = first; !status && i < first + count; i++) // before any change
        status = fsdpi_rep_open(&rep->buckets[rep->params[i].bucket]);
    if (status) return fsdpi_rep_keep(rep, status);
    for (int i = first + count - 1; i >= first; i--) {
        rep->params[i].ready = 1;
        rep->buckets[rep->params[i].bucket].pending--;
        rep->seen[rep->num_seen++] = i;
    }
    while (!status && !rep->late && rep->next < rep->num_buckets &&
           rep->buckets[rep->next].pending == 0)
        status = fsdpi_rep_reduce(rep);
    return fsdpi_rep_keep(rep, status);
}

FSDP_API fsdp_status fsdp_replicate_post_backward(fsdp_replicate *rep) {
    if (!rep) return fsdpi_rep_null(NULL, "replicate_post_backward", "rep");
    fsdp_status status = FSDP_OK;
    while (!status && rep->next < rep->num_buckets) status = fsdpi_rep_reduce(rep);
    if (status) return status;
    status = rep->failed;
    if (rep->num_seen == rep->num_params) {
        memcpy(rep->order, rep->seen, (size_t)rep->num_params * sizeof *rep->order);
        rep->num_order = rep->num_params;
    }
    fsdpi_rep_clear(rep);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Queries, and calls between steps.

FSDP_API fsdp_status fsdp_replicate_unit(const fsdp_replicate *rep, int param, fsdp_unit **unit,
                                         int *index) {
    fsdp_status status = fsdpi_rep_check(rep, "replicate_unit", param, 1, 0);
    if (status) return status;
    if (unit) *unit = rep->buckets[rep->params[param].bucket].unit;
    if (index) *index = rep->params[param].index;
    return FSDP_OK;
}

FSDP_API int fsdp_replicate_param(const fsdp_replicate *rep, const fsdp_param_view *view) {
    for (int k = 0; rep && view && k < rep->num_buckets; k++)
        if (rep->buckets[k].unit == view->unit) return rep->buckets[k].members[view->index];
    return -1;
}

FSDP_API int fsdp_replicate_num_buckets(const fsdp_replicate *rep) {
    return rep ? rep->num_buckets : 0;
}

FSDP_API int fsdp_replicate_members(const fsdp_replicate *rep, int bucket, int32_t *out,
                                    int64_t *nbytes) {
    if (!rep || bucket < 0 || bucket >= rep->num_buckets) return -1;
    const fsdpi_rep_unit *b = &rep->buckets[bucket];
    if (out) memcpy(out, b->members, (size_t)b->num_members * sizeof *out);
    if (nbytes) *nbytes = b->nbytes;
    return b->num_members;
}

FSDP_API fsdp_status fsdp_replicate_order(const fsdp_replicate *rep, int32_t *order) {
    if (!rep || !order)
        return fsdpi_rep_null(rep ? rep->model : NULL, "replicate_order", "rep or order");
    if (!rep->num_order)
        return fsdp_fail(fsdp_model_world(rep->model), FSDP_ERR_INVALID_STATE,
                         "[E963] replicate_order: no backward has said of all %d parameters that "
                         "they are ready: call fsdp_replicate_ready for each of them",
                         rep->num_params);
    memcpy(order, rep->order, (size_t)rep->num_params * sizeof *order);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_replicate_broadcast(fsdp_replicate *rep, int root) {
    fsdp_status status = FSDP_OK;
    if (!rep) return fsdpi_rep_null(NULL, "replicate_broadcast", "rep");
    for (int k = 0; k < rep->num_buckets && !status; k++)
        status = fsdp_model_broadcast(rep->model, rep->buckets[k].unit, root);
    return status;
}

// Runs a hook in place of a bucket's all-reduce.
static fsdp_status fsdpi_rep_custom(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                                    const fsdp_coll *coll) {
    fsdpi_rep_unit *b = (fsdpi_rep_unit *)user;
    fsdp_replicate_bucket shown = b->shown;
    shown.dtype = (fsdp_dtype)coll->dtype;
    shown.data = coll->dst;
    shown.numel = (int64_t)coll->count;
    return b->rep->hook(b->rep->hook_user, &shown, ops, comm, coll);
}

FSDP_API fsdp_status fsdp_replicate_set_hook(fsdp_replicate *rep, fsdp_replicate_hook hook,
                                             void *user) {
    if (!rep) return fsdpi_rep_null(NULL, "replicate_set_hook", "rep");
    fsdp_custom_comm custom = hook ? fsdpi_rep_custom : NULL;
    fsdp_status status = fsdp_call_begin(rep->model, FSDP_CALL_FULL, "replicate_set_hook");
    for (int k = 0; k < rep->num_buckets && !status; k++)
        status = fsdp_set_custom_all_reduce(rep->buckets[k].unit, custom, &rep->buckets[k]);
    if (status) return status;
    rep->hook = hook;
    rep->hook_user = user;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_replicate_join(fsdp_replicate *rep, int has_batch, int divide,
                                         int *active) {
    if (!rep || !active)
        return fsdpi_rep_null(rep ? rep->model : NULL, "replicate_join", "rep or active");
    fsdp_model *m = rep->model;
    int32_t ranks = has_batch != 0;
    *active = 0;
    fsdp_status status = fsdp_call_begin(m, FSDP_CALL_FULL, "replicate_join"); // all units are idle
    if (!status)
        status = fsdp_all_reduce(fsdp_model_world(m), rep->mesh, &ranks, 1, FSDP_I32, FSDP_SUM);
    for (int k = 0; k < rep->num_buckets && !status; k++)
        status = fsdp_set_gradient_divide_factor(m, rep->buckets[k].unit, divide ? ranks : 0);
    if (!status)
        status = fsdp_set_uneven_inputs(m, ranks > 0 && ranks < fsdp_mesh_size(rep->mesh, 0));
    if (!status) *active = ranks;
    return status;
}

FSDP_API fsdp_status fsdp_replicate_shadow(fsdp_replicate *rep) {
    fsdp_status status = fsdp_replicate_pre_forward(rep);
    if (!status) status = fsdp_replicate_post_forward(rep);
    return status ? status : fsdp_replicate_post_backward(rep);
}
#endif // FSDP_IMPLEMENTATION
