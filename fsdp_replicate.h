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
               forward(l, fsdp_replicate_data(rep, 2 * l), fsdp_replicate_data(rep, 2 * l + 1));
           fsdp_replicate_post_forward(rep);
           for (int l = L - 1; l >= 0; l--) {
               backward(l, fsdp_replicate_data(rep, 2 * l),    // adds to the gradients
                        fsdp_replicate_grad(rep, 2 * l), fsdp_replicate_grad(rep, 2 * l + 1));
               fsdp_replicate_ready(rep, 2 * l, 2);            // a complete bucket is on its way
           }
           fsdp_replicate_post_backward(rep);
           if (fsdp_finalize_backward(model)) break;
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
     gradients ready in different orders. A parameter that no rank used has no gradient afterwards.
     If only some ranks used it, the others count as zeros.
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
     multiple of 64 bytes (GPUs: 256) of its dtype. Behind them comes one number for each of these
     parameters: how many ranks used it. A group of one rank sends nothing.
   ARITHMETIC
     Ranks are summed in f32 (f64 in f64) in rank order, then divided by their number once; NCCL
     sums in an order of its own. The bits do not depend on the buckets. PyTorch divides before it
     sums, in the dtype of the gradient. With two ranks the results are equal to the bit.
   MEMORY
     One copy of the parameters, one of the gradients, and the messages of the buckets that are open
     at a time. fsdp_model_predict counts one message for each size of bucket. If a layer's
     parameters are in two buckets of the same size, both are open, and there is one more. If the
     model also has units that reshard, the prediction counts one message for each bucket. */
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
   Frozen parameters are in buckets of their own, behind the others
   rep         the model owns it: it ends with the model or the world. NULL after a failure
   Result      FSDP_OK; INVALID_ARG (the text names the field or the parameter: order is no
               permutation, a cap < 1, two equal names, mesh_info is not of kind DDP), and what
               fsdp_fully_shard returns. After a failure of fsdp_fully_shard the model has some of
               the buckets: end it
   Collective  yes: every rank of the mesh, same desc. The first collective checks it. Without mesh
               and mesh_info, and in a mesh of several dims: as fsdp_mesh_slice, fsdp_mesh_1d
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
               ready or grad of this backward
   Collective  pre_forward, post_forward: no communication. ready, post_backward: every rank
               reduces the same buckets in the same order; on two ranks that may be in different
               calls
   Blocks, Allocates  as fsdp_pre_forward, fsdp_post_forward, fsdp_post_backward
   Source      torch: Reducer.prepare_for_backward, mark_variable_ready, finalize_backward */
FSDP_API fsdp_status fsdp_replicate_pre_forward(fsdp_replicate *rep);
FSDP_API fsdp_status fsdp_replicate_post_forward(fsdp_replicate *rep);
FSDP_API fsdp_status fsdp_replicate_ready(fsdp_replicate *rep, int first, int count);
FSDP_API fsdp_status fsdp_replicate_post_backward(fsdp_replicate *rep);

/* fsdp_replicate_data - a parameter, as fsdp_data: from pre_forward until its bucket is reduced. So
               you may read it until you say that it is ready
   fsdp_replicate_grad - where you write its gradient, as fsdp_grad: until you say that it is ready.
               It marks the parameter as used. NULL for a frozen one
   param       its index in desc.params
   Result      as fsdp_data, fsdp_grad; NULL and a logged text in a wrong state
   Collective  no      Blocks no      Allocates as fsdp_pre_backward, at the first use of a bucket
   Source      torch: Parameter, Parameter.grad with gradient_as_bucket_view */
FSDP_API void *fsdp_replicate_data(fsdp_replicate *rep, int param);
FSDP_API void *fsdp_replicate_grad(fsdp_replicate *rep, int param);

/* fsdp_replicate_unit        - the unit that a parameter is in, and its index there: for views,
               fsdp_param_load, fsdp_param_full, fsdp_set_requires_grad and hooks
   fsdp_replicate_num_buckets - how many there are; 0 for NULL
   fsdp_replicate_members     - the parameters of a bucket, in the order of its message
   unit, index, out, nbytes   NULL: not wanted. out: room for desc.num_params indices. nbytes: of
               the bucket's parameters as they are stored, which caps count
   Result      unit: FSDP_OK, INVALID_ARG; members: their number, -1: there is no such bucket
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_replicate_unit(const fsdp_replicate *rep, int param, fsdp_unit **unit,
                                         int *index);
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
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle), OUT_OF_MEMORY; collective
               errors
   Collective  yes: every rank of the mesh      Blocks yes, at most timeout_ms for each step
   Allocates   host memory while it runs: the largest parameter, at most 16 MiB
   Source      torch: _sync_module_states, init_sync */
FSDP_API fsdp_status fsdp_replicate_broadcast(fsdp_replicate *rep, int root);

// What a hook gets: where the gradients of a bucket are, and which parameters they belong to.
typedef struct fsdp_replicate_bucket {
    int32_t index, is_last; // is_last: no other bucket is reduced after it
    int32_t num_params;     // trainable ones
    int32_t num_flags;      // numbers behind the gradients: they have to become exact sums
    const int32_t *params;  // [num_params] index of each in desc.params
    const int64_t *offsets; // [num_params] where each begins in data, elements
    const int64_t *numels;  // [num_params] elements of each
    fsdp_dtype dtype;       // of data
    void *data;             // numel elements, with padding between parameters; then the flags
    int64_t numel;
} fsdp_replicate_bucket;

typedef fsdp_status (*fsdp_replicate_hook)(void *user, const fsdp_replicate_bucket *bucket,
                                           const fsdp_comm_ops *ops, fsdp_comm *comm,
                                           const fsdp_coll *coll);

/* fsdp_replicate_set_hook - communicate every bucket in a way of your own
   hook        makes the elements of data, and the flags, sums over the replicas; the library
               divides. ops->run(comm, coll) does what the library would do. The hook may run other
               collectives on comm: copies of coll with another kind, count, src or dst. All ranks
               have to run the same ones. NULL: no hook
   Runs        where reductions run: at once, in a worker thread with lanes, or on a device with
               streams to enqueue work. If it returns a failure, the world is aborted with it
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a bucket is in use)
   Collective  no, but every rank has to do the same      Blocks for operations under way
   Allocates   no      Source torch: DistributedDataParallel.register_comm_hook */
FSDP_API fsdp_status fsdp_replicate_set_hook(fsdp_replicate *rep, fsdp_replicate_hook hook,
                                             void *user);

/* Uneven inputs. A rank whose data have ended goes on without a batch, so that parameters and
   optimizer states stay equal on all ranks:
       while (!fsdp_replicate_join(rep, batch != NULL, 1, &active) && active > 0) {
           if (batch) train_on(batch); else fsdp_replicate_shadow(rep);
           ...                                         // finalize, optimizer step, zero_grad: all
           if (batch) batch = next();
       }
   If the model has units of fully_shard, every rank also has to call their hooks.

   fsdp_replicate_join   - before each step: has this rank a batch?
   divide      0: gradients are divided by the number of replicas; 1: by the ranks that have a batch
   active      out: how many ranks have one. 0: the data of all ranks have ended
   Effect      sets the divide factor of the buckets
   fsdp_replicate_shadow - the forward and backward of a rank without a batch; uses no parameter
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a bucket is in use); collective errors
   Collective  join: yes, every rank of the mesh, one all-reduce of an integer. shadow: as the
               calls of a step
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
#include <stdlib.h> // qsort
#include <string.h> // memcpy, memset, strcmp

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------------------------------- */
// Which bucket each tensor belongs to.

enum { FSDPI_REPLICATE_KEYS = 64 };

typedef struct fsdpi_assign_open { // the bucket of a key that is not full yet
    int64_t bytes;
    int first, members; // position of its first tensor in the order; tensors
    int cap, number;    // index of its cap; its number if that is known when it opens
} fsdpi_assign_open;

typedef struct fsdpi_assign {
    const int64_t *nbytes, *caps;
    const int32_t *key, *order;
    int num_caps, buckets;
    int32_t *bucket;
    int64_t *cap;
    fsdpi_assign_open open[FSDPI_REPLICATE_KEYS];
} fsdpi_assign;

static int fsdpi_assign_at(const fsdpi_assign *a, int position) {
    return a->order ? a->order[position] : position;
}
static int fsdpi_assign_key(const fsdpi_assign *a, int tensor) {
    return a->key ? a->key[tensor] : 0;
}

// The tensors of a key from its bucket's first position to `last` are a bucket.
static void fsdpi_assign_close(fsdpi_assign *a, int key, int last) {
    fsdpi_assign_open *o = &a->open[key];
    int number = a->order ? a->buckets++ : o->number;
    for (int i = o->first; i <= last; i++)
        if (fsdpi_assign_key(a, fsdpi_assign_at(a, i)) == key)
            a->bucket[fsdpi_assign_at(a, i)] = number;
    if (a->cap) a->cap[number] = a->caps[o->cap];
    if (o->cap + 1 < a->num_caps) o->cap++;
    o->members = 0;
    o->bytes = 0;
}

// bucket serves as marks: each tensor once.
static int fsdpi_assign_valid(const fsdpi_assign *a, int count) {
    for (int i = 0; i < a->num_caps; i++)
        if (a->caps[i] < 0) return 0;
    for (int i = 0; i < count; i++) a->bucket[i] = -1;
    for (int i = 0; i < count; i++) {
        int tensor = fsdpi_assign_at(a, i);
        if (tensor < 0 || tensor >= count || a->bucket[tensor] >= 0) return 0;
        if (a->nbytes[tensor] < 0 || fsdpi_assign_key(a, tensor) < 0 ||
            fsdpi_assign_key(a, tensor) >= FSDPI_REPLICATE_KEYS)
            return 0;
        a->bucket[tensor] = 0;
    }
    return 1;
}

FSDP_API int fsdp_replicate_assign(const int64_t *nbytes, const int32_t *key, const int32_t *order,
                                   int count, const int64_t *caps, int num_caps, int32_t *bucket,
                                   int32_t *place, int64_t *cap) {
    fsdpi_assign a;
    memset(&a, 0, sizeof a);
    if (!nbytes || !caps || !bucket || num_caps < 1 || count < 0) return -1;
    a.nbytes = nbytes, a.caps = caps, a.key = key, a.order = order;
    a.num_caps = num_caps, a.bucket = bucket, a.cap = cap;
    if (!fsdpi_assign_valid(&a, count)) return -1;
    for (int i = 0; i < count; i++) {
        int tensor = fsdpi_assign_at(&a, i), k = fsdpi_assign_key(&a, tensor);
        fsdpi_assign_open *o = &a.open[k];
        if (o->members == 0) {
            o->first = i;
            if (!order) o->number = a.buckets++; // the smallest index of a bucket opens it
        }
        if (place) place[tensor] = o->members;
        o->members++;
        o->bytes += nbytes[tensor];
        if (o->bytes >= caps[o->cap]) fsdpi_assign_close(&a, k, i);
    }
    for (;;) { // what is left, in the order in which it was opened
        int key_of_first = -1;
        for (int k = 0; k < FSDPI_REPLICATE_KEYS; k++)
            if (a.open[k].members &&
                (key_of_first < 0 || a.open[k].first < a.open[key_of_first].first))
                key_of_first = k;
        if (key_of_first < 0) return a.buckets;
        fsdpi_assign_close(&a, key_of_first, count - 1);
    }
}

/* -------------------------------------------------------------------------------------------- */
// Owns: which gradients of this backward are ready, and which buckets are on their way. Invariants:
// buckets are reduced in the order of their index; a call that fails in a wrong order changes
// nothing. All else is a unit's.

typedef struct fsdpi_replicate_param {
    int32_t bucket, index; // index: in the bucket's unit
    int32_t ready;         // in this backward
} fsdpi_replicate_param;

enum { FSDPI_BUCKET_CLOSED, FSDPI_BUCKET_OPEN, FSDPI_BUCKET_REDUCED }; // in this backward

typedef struct fsdpi_replicate_unit {
    fsdp_replicate *rep;
    fsdp_unit *unit;
    const int32_t *members; // [num_members] parameters, in order
    int64_t nbytes;
    int32_t num_members, pending, state; // pending: members that are not ready
    fsdp_replicate_bucket shown;         // to hooks
} fsdpi_replicate_unit;

struct fsdp_replicate {
    fsdp_model *model;
    fsdp_extension extension;
    const fsdp_mesh *mesh; // 1-D
    fsdp_replicate_hook hook;
    void *hook_user;
    fsdpi_replicate_param *params;
    fsdpi_replicate_unit *buckets;
    int32_t *members, *trainable; // of bucket after bucket
    int64_t *offsets, *numels;    // of the trainable ones
    int32_t *seen, *order;        // parameters as they get ready; those of a complete backward
    int32_t num_params, num_buckets, num_seen, num_order;
    int32_t next;               // the first bucket that is not reduced
    int32_t late, began, moved; // began: a backward; moved: `shown` is to be filled in
    fsdp_status failed;         // the first failure of this backward
};

static fsdp_status fsdpi_replicate_null(const char *call, const char *which) {
    return fsdp_fail(NULL, FSDP_ERR_INVALID_ARG, "[E951] %s: %s is NULL", call, which);
}

static const char *fsdpi_replicate_name(fsdp_replicate *rep, int param, const char **bucket) {
    const fsdpi_replicate_param *p = &rep->params[param];
    fsdp_param_view v = FSDP_ZERO;
    (void)fsdp_param_view_get(rep->buckets[p->bucket].unit, p->index, &v);
    *bucket = v.unit_name ? v.unit_name : "";
    return v.name ? v.name : "";
}

// Nothing of a backward is left: the next one begins.
static void fsdpi_replicate_clear(fsdp_replicate *rep) {
    for (int i = 0; i < rep->num_params; i++) rep->params[i].ready = 0;
    for (int k = 0; k < rep->num_buckets; k++) {
        rep->buckets[k].pending = rep->buckets[k].num_members;
        rep->buckets[k].state = FSDPI_BUCKET_CLOSED;
    }
    rep->next = rep->num_seen = rep->began = 0;
    rep->failed = FSDP_OK;
}

static int fsdpi_replicate_call(void *user, fsdp_model *model, fsdp_unit *unit, int call,
                                fsdp_status *status) {
    fsdp_replicate *rep = (fsdp_replicate *)user;
    (void)unit;
    if (call == FSDP_CALL_RESET) fsdpi_replicate_clear(rep);
    if (call != FSDP_CALL_FINALIZE || !rep->began) return 0;
    *status = fsdp_fail(fsdp_model_world(model), FSDP_ERR_INVALID_STATE,
                        "[E952] finalize_backward: a backward of unit '%s' and the other buckets "
                        "has begun, and %d of %d are reduced: call fsdp_replicate_post_backward "
                        "first",
                        fsdp_unit_name(rep->buckets[0].unit), rep->next, rep->num_buckets);
    return 1;
}

static void fsdpi_replicate_relayout(void *user, fsdp_model *model) {
    (void)model;
    ((fsdp_replicate *)user)->moved = 1;
}

// The trainable members of each bucket, and where they lie in its message: as their shards do.
static fsdp_status fsdpi_replicate_follow(fsdp_replicate *rep) {
    int at = 0, last = -1;
    if (!rep->moved) return FSDP_OK;
    for (int k = 0; k < rep->num_buckets; k++) {
        fsdpi_replicate_unit *b = &rep->buckets[k];
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
        b->shown.num_flags = b->shown.num_params;
    }
    if (last >= 0) rep->buckets[last].shown.is_last = 1;
    rep->moved = 0;
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// Creation.

// What is needed only to create, as one allocation.
typedef struct fsdpi_replicate_work {
    fsdp_param_desc *params;
    const char **names;
    int64_t *nbytes;
    int32_t *key, *order, *bucket, *place, *number;
    char (*defaults)[16]; // names "p0", ...
} fsdpi_replicate_work;

static int64_t fsdpi_replicate_carve(int64_t *at, int64_t count, size_t size) {
    int64_t begin = *at;
    *at = (begin + count * (int64_t)size + 63) / 64 * 64;
    return begin;
}

static void *fsdpi_replicate_at(void *room, int64_t offset) {
    return room ? (char *)room + offset : NULL;
}

// Where the arrays of `work` and of `rep` are in their allocations; returns the bytes of one.
static int64_t fsdpi_replicate_work_at(fsdpi_replicate_work *w, void *room, int64_t n) {
    int64_t at = 0;
    w->params = (fsdp_param_desc *)fsdpi_replicate_at( // twice: in order, and of one bucket
        room, fsdpi_replicate_carve(&at, 2 * n, sizeof *w->params));
    w->names = (const char **)fsdpi_replicate_at(room,
                                                 fsdpi_replicate_carve(&at, n, sizeof *w->names));
    w->nbytes = (int64_t *)fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 8));
    w->key = (int32_t *)fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 4));
    w->order = (int32_t *)fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 4));
    w->bucket = (int32_t *)fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 4));
    w->place = (int32_t *)fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 4));
    w->number = (int32_t *)fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 4));
    w->defaults = (char(*)[16])fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 16));
    return at;
}
static int64_t fsdpi_replicate_rep_at(fsdp_replicate *r, void *room, int64_t n) {
    int64_t at = 0;
    (void)fsdpi_replicate_carve(&at, 1, sizeof *r);
    r->params = (fsdpi_replicate_param *)fsdpi_replicate_at(
        room, fsdpi_replicate_carve(&at, n, sizeof *r->params));
    r->buckets = (fsdpi_replicate_unit *)fsdpi_replicate_at(
        room, fsdpi_replicate_carve(&at, n, sizeof *r->buckets));
    r->offsets = (int64_t *)fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 8));
    r->numels = (int64_t *)fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 8));
    r->members = (int32_t *)fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 4));
    r->trainable = (int32_t *)fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 4));
    r->seen = (int32_t *)fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 4));
    r->order = (int32_t *)fsdpi_replicate_at(room, fsdpi_replicate_carve(&at, n, 4));
    return at;
}

static int fsdpi_replicate_by_name(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

// Copies of the descs, whose array may have an older header's stride; sizes and keys of tensors.
static fsdp_status fsdpi_replicate_params(fsdp_world *world, const fsdp_replicate_desc *d,
                                          fsdpi_replicate_work *w) {
    size_t stride = 0;
    for (int i = 0; i < d->num_params; i++) {
        fsdp_param_desc *p = &w->params[i];
        char what[64];
        snprintf(what, sizeof what, "fsdp_replicate_desc.params[%d]", i);
        fsdp_status status = fsdp_desc_read(world, p, (const char *)d->params + (size_t)i * stride,
                                            sizeof *p, what);
        if (status) return status;
        if (i == 0) stride = p->size ? p->size : sizeof *p;
        snprintf(w->defaults[i], sizeof w->defaults[i], "p%d", i);
        if (!p->name) p->name = w->defaults[i];
        w->names[i] = p->name;
        fsdp_dtype dtype = p->dtype ? p->dtype : FSDP_F32;
        w->nbytes[i] = (int64_t)fsdp_dtype_size(dtype);
        for (int k = 0; k < p->ndim && k < FSDP_MAX_DIMS; k++) // fully_shard refuses odd shapes
            w->nbytes[i] = p->shape[k] > 0 && w->nbytes[i] > INT64_MAX / 2 / p->shape[k]
                               ? INT64_MAX / 2 / d->num_params
                               : w->nbytes[i] * (p->shape[k] > 0 ? p->shape[k] : 0);
        w->key[i] = (int32_t)((unsigned)dtype % 16u + 16u * (p->keep_dtype != 0) +
                              32u * (p->frozen != 0));
    }
    qsort((void *)w->names, (size_t)d->num_params, sizeof *w->names, fsdpi_replicate_by_name);
    for (int i = 1; i < d->num_params; i++)
        if (strcmp(w->names[i - 1], w->names[i]) == 0)
            return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                             "[E953] replicate_create: two parameters are named '%s': give each a "
                             "name of its own",
                             w->names[i]);
    return FSDP_OK;
}

static fsdp_status fsdpi_replicate_assign_all(fsdp_world *world, const fsdp_replicate_desc *d,
                                              fsdpi_replicate_work *w, int *num) {
    const int64_t mib = 1 << 20, second = d->bucket_bytes ? d->bucket_bytes : 25 * mib;
    const int64_t first = d->first_bytes ? d->first_bytes : d->bucket_bytes ? second : mib;
    const int64_t two[2] = {first, second}, *caps = d->num_caps > 0 ? d->caps : two;
    int num_caps = d->num_caps > 0 ? d->num_caps : 2, frozen = 0, number = 0;
    if (d->num_caps < 0 || (d->num_caps > 0 && !d->caps))
        return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                         "[E954] replicate_create: num_caps is %d, caps is %s: give as many caps, "
                         "or 0 of them",
                         d->num_caps, d->caps ? "given" : "NULL");
    for (int i = 0; i < num_caps; i++)
        if (caps[i] < 1)
            return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                             "[E955] replicate_create: %s[%d] is %lld, expected >= 1 byte",
                             d->num_caps > 0 ? "caps" : "first_bytes, bucket_bytes", i,
                             (long long)caps[i]);
    memset(w->number, 0, (size_t)d->num_params * sizeof *w->number);
    for (int i = 0; i < d->num_params; i++) {
        w->order[i] = d->order ? d->order[i] : d->num_params - 1 - i;
        int known = w->order[i] >= 0 && w->order[i] < d->num_params;
        if (!known || w->number[w->order[i]]++)
            return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                             "[E956] replicate_create: order[%d] is %d%s, expected a permutation "
                             "of 0..%d",
                             i, w->order[i], known ? " for the second time" : "",
                             d->num_params - 1);
    }
    *num = fsdp_replicate_assign(w->nbytes, w->key, w->order, d->num_params, caps, num_caps,
                                 w->bucket, w->place, NULL);
    for (frozen = 0; frozen < 2; frozen++) // buckets of frozen parameters come last
        for (int k = 0; k < *num; k++)
            for (int i = 0; i < d->num_params; i++)
                if (w->bucket[i] == k && w->place[i] == 0 && w->key[i] / 32 == frozen)
                    w->number[k] = number++;
    for (int i = 0; i < d->num_params; i++) w->bucket[i] = w->number[w->bucket[i]];
    return FSDP_OK;
}

// The mesh info of the buckets, and the 1-D mesh of its replicas.
static fsdp_status fsdpi_replicate_mesh(fsdp_model *model, const fsdp_replicate_desc *d,
                                        fsdp_mesh_info *info, const fsdp_mesh **mesh) {
    fsdp_world *world = fsdp_model_world(model);
    fsdp_status status = FSDP_OK;
    fsdp_mesh *all = NULL;
    const fsdp_mesh *given = d->mesh;
    if (d->mesh_info) {
        *info = *d->mesh_info;
        given = NULL;
    } else if (!d->mesh) {
        status = fsdp_model_mesh_info(model, info);
        if (!status && info->kind != FSDP_MESH_INFO_DDP) {
            status = fsdp_mesh_1d(world, "replicate", &all);
            given = all;
        }
    }
    if (!status && given) {
        if (fsdp_mesh_ndim(given) != 1)
            return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                             "[E957] replicate_create: the mesh is %d-D, expected 1-D: slice it, "
                             "or give a mesh_info of kind DDP",
                             fsdp_mesh_ndim(given));
        status = fsdp_mesh_info_init(given, FSDP_MESH_INFO_DDP, -1, 0, info);
    }
    if (status) return status;
    if (info->kind != FSDP_MESH_INFO_DDP || !info->mesh)
        return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                         "[E958] replicate_create: mesh_info is of kind %s, expected DDP: fill it "
                         "by fsdp_mesh_info_init with FSDP_MESH_INFO_DDP",
                         info->kind == FSDP_MESH_INFO_HSDP ? "HSDP" : "FSDP");
    int32_t dim = info->replicate_mesh_dim;
    *mesh = info->mesh;
    if (fsdp_mesh_ndim(info->mesh) == 1) return FSDP_OK;
    fsdp_mesh *slice = NULL;
    status = fsdp_mesh_slice(info->mesh, &dim, 1, &slice);
    *mesh = slice;
    return status;
}

// One unit for each bucket.
static fsdp_status fsdpi_replicate_units(fsdp_replicate *rep, const fsdp_replicate_desc *d,
                                         const fsdp_mesh_info *info, fsdpi_replicate_work *w) {
    int at = 0;
    for (int k = 0; k < rep->num_buckets; k++) {
        fsdpi_replicate_unit *b = &rep->buckets[k];
        b->rep = rep;
        b->members = rep->members + at;
        b->shown.index = k;
        for (int i = 0; i < d->num_params; i++) {
            if (w->bucket[i] != k) continue;
            rep->members[at + w->place[i]] = i;
            rep->params[i].bucket = k;
            rep->params[i].index = w->place[i];
            b->nbytes += w->nbytes[i];
            b->num_members++;
        }
        at += b->num_members;
    }
    fsdp_param_desc *params = w->params + d->num_params; // those of a bucket, together
    for (int k = 0; k < rep->num_buckets; k++) {
        fsdpi_replicate_unit *b = &rep->buckets[k];
        fsdp_unit_desc ud = FSDP_ZERO;
        char name[128];
        snprintf(name, sizeof name, "%s.%d", d->name ? d->name : "bucket", k);
        for (int i = 0; i < b->num_members; i++) params[i] = w->params[b->members[i]];
        for (int i = 0; i < b->num_members; i++) params[i].size = sizeof *params;
        ud.name = name;
        ud.params = params;
        ud.num_params = b->num_members;
        ud.reshard_after_forward = FSDP_RESHARD_NEVER;
        ud.param_dtype = d->param_dtype;
        ud.reduce_dtype = d->reduce_dtype;
        ud.mesh_info = info;
        fsdp_status status = fsdp_fully_shard(rep->model, &ud, &b->unit);
        if (status) return status;
    }
    return FSDP_OK;
}

static void fsdpi_replicate_destroy(void *user) {
    fsdp_replicate *rep = (fsdp_replicate *)user;
    fsdp_free(rep->model, FSDP_MEMORY_HOST, rep, 0);
}

static fsdp_status fsdpi_replicate_build(fsdp_replicate *rep, const fsdp_replicate_desc *d,
                                         const fsdp_mesh_info *info, fsdpi_replicate_work *w) {
    int num = 0;
    fsdp_world *world = fsdp_model_world(rep->model);
    fsdp_status status = fsdpi_replicate_params(world, d, w);
    if (!status) status = fsdpi_replicate_assign_all(world, d, w, &num);
    if (status) return status;
    rep->num_params = d->num_params;
    rep->num_buckets = num;
    rep->late = d->late != 0;
    rep->moved = 1;
    rep->extension.name = "replicate";
    rep->extension.user = rep;
    rep->extension.call = fsdpi_replicate_call;
    rep->extension.relayout = fsdpi_replicate_relayout;
    rep->extension.destroy = fsdpi_replicate_destroy;
    status = fsdpi_replicate_units(rep, d, info, w);
    if (!status) fsdpi_replicate_clear(rep);
    return status ? status : fsdp_attach(rep->model, &rep->extension);
}

FSDP_API fsdp_status fsdp_replicate_create(fsdp_model *model, const fsdp_replicate_desc *desc,
                                           fsdp_replicate **rep) {
    static const char *const name = "replicate_create";
    if (!model || !desc || !rep) return fsdpi_replicate_null(name, "model, desc or rep");
    *rep = NULL;
    fsdp_replicate_desc d;
    fsdp_mesh_info info;
    fsdpi_replicate_work work;
    fsdp_replicate sizes;
    const fsdp_mesh *mesh = NULL;
    void *room = NULL, *temporary = NULL;
    fsdp_world *world = fsdp_model_world(model);
    memset(&info, 0, sizeof info);
    fsdp_status status = fsdp_desc_read(world, &d, desc, sizeof d, "fsdp_replicate_desc");
    if (status) return status;
    if (d.num_params < 1 || !d.params)
        return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                         "[E959] replicate_create: num_params is %d, params is %s, expected >= 1 "
                         "and an array",
                         d.num_params, d.params ? "given" : "NULL");
    status = fsdpi_replicate_mesh(model, &d, &info, &mesh);
    if (status) return status;
    int64_t nbytes = fsdpi_replicate_work_at(&work, NULL, d.num_params);
    status = fsdp_alloc(model, FSDP_MEMORY_HOST, fsdpi_replicate_rep_at(&sizes, NULL, d.num_params),
                        "replicate_create: no memory for its tables", &room);
    if (!status)
        status = fsdp_alloc(model, FSDP_MEMORY_HOST, nbytes,
                            "replicate_create: no memory to assign buckets", &temporary);
    if (!status) {
        fsdp_replicate *made = (fsdp_replicate *)room;
        made->model = model;
        made->mesh = mesh;
        (void)fsdpi_replicate_rep_at(made, room, d.num_params);
        (void)fsdpi_replicate_work_at(&work, temporary, d.num_params);
        status = fsdpi_replicate_build(made, &d, &info, &work);
        if (!status) *rep = made;
    }
    fsdp_free(model, FSDP_MEMORY_HOST, temporary, nbytes);
    if (status) fsdp_free(model, FSDP_MEMORY_HOST, room, 0);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// A step.

FSDP_API fsdp_status fsdp_replicate_pre_forward(fsdp_replicate *rep) {
    if (!rep) return fsdpi_replicate_null("replicate_pre_forward", "rep");
    fsdp_status status = fsdp_model_commit(rep->model);
    if (!status) status = fsdpi_replicate_follow(rep);
    for (int k = 0; k < rep->num_buckets && !status; k++)
        status = fsdp_pre_forward(rep->buckets[k].unit);
    return status;
}

FSDP_API fsdp_status fsdp_replicate_post_forward(fsdp_replicate *rep) {
    if (!rep) return fsdpi_replicate_null("replicate_post_forward", "rep");
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < rep->num_buckets && !status; k++)
        status = fsdp_post_forward(rep->buckets[k].unit);
    return status;
}

static fsdp_status fsdpi_replicate_keep(fsdp_replicate *rep, fsdp_status status) {
    if (!rep->failed) rep->failed = status;
    return status;
}

static fsdp_status fsdpi_replicate_known(fsdp_replicate *rep, const char *call, int first,
                                         int count) {
    if (!rep) return fsdpi_replicate_null(call, "rep");
    if (first >= 0 && count >= 0 && count <= rep->num_params - first) return FSDP_OK;
    return fsdp_fail(fsdp_model_world(rep->model), FSDP_ERR_INVALID_ARG,
                     "[E960] %s: there are no parameters %d..%d, expected 0..%d", call, first,
                     first + count - 1, rep->num_params - 1);
}

// A bucket's gradients can be written; its message begins.
static fsdp_status fsdpi_replicate_open(fsdpi_replicate_unit *b) {
    if (b->state != FSDPI_BUCKET_CLOSED) return FSDP_OK;
    fsdp_status status = fsdp_pre_backward(b->unit);
    if (status) return status;
    b->state = FSDPI_BUCKET_OPEN;
    b->rep->began = 1;
    return FSDP_OK;
}

// The next bucket is complete, or its backward ends as it is.
static fsdp_status fsdpi_replicate_reduce(fsdp_replicate *rep) {
    fsdpi_replicate_unit *b = &rep->buckets[rep->next];
    fsdp_status status = fsdpi_replicate_open(b);
    if (!status) status = fsdp_post_backward(b->unit);
    if (status) return status;
    b->state = FSDPI_BUCKET_REDUCED;
    rep->next++;
    return FSDP_OK;
}

FSDP_API void *fsdp_replicate_data(fsdp_replicate *rep, int param) {
    if (fsdpi_replicate_known(rep, "replicate_data", param, 1)) return NULL;
    const fsdpi_replicate_param *p = &rep->params[param];
    return fsdp_data(rep->buckets[p->bucket].unit, p->index);
}

FSDP_API void *fsdp_replicate_grad(fsdp_replicate *rep, int param) {
    const char *bucket;
    if (fsdpi_replicate_known(rep, "replicate_grad", param, 1)) return NULL;
    const fsdpi_replicate_param *p = &rep->params[param];
    fsdpi_replicate_unit *b = &rep->buckets[p->bucket];
    if (p->ready) {
        const char *name = fsdpi_replicate_name(rep, param, &bucket);
        (void)fsdpi_replicate_keep(
            rep, fsdp_fail(fsdp_model_world(rep->model), FSDP_ERR_INVALID_STATE,
                           "[E961] replicate_grad: parameter '%s' (unit '%s') was said to be "
                           "ready, and its bucket may be under way: write gradients before "
                           "fsdp_replicate_ready",
                           name, bucket));
        return NULL;
    }
    if (fsdpi_replicate_keep(rep, fsdpi_replicate_open(b))) return NULL;
    return fsdp_grad(b->unit, p->index);
}

FSDP_API fsdp_status fsdp_replicate_ready(fsdp_replicate *rep, int first, int count) {
    const char *bucket;
    fsdp_status status = fsdpi_replicate_known(rep, "replicate_ready", first, count);
    if (status) return rep ? fsdpi_replicate_keep(rep, status) : status;
    for (int i = first; i < first + count; i++)
        if (rep->params[i].ready) {
            const char *name = fsdpi_replicate_name(rep, i, &bucket);
            return fsdpi_replicate_keep(
                rep, fsdp_fail(fsdp_model_world(rep->model), FSDP_ERR_INVALID_STATE,
                               "[E962] replicate_ready: parameter '%s' (unit '%s') is ready "
                               "already in this backward: call it once, after the last use of "
                               "the parameter and its gradient",
                               name, bucket));
        }
    for (int i = first; i < first + count && !status; i++) // is a backward due? Before changes
        status = fsdpi_replicate_open(&rep->buckets[rep->params[i].bucket]);
    if (status) return fsdpi_replicate_keep(rep, status);
    for (int i = first + count - 1; i >= first; i--) {
        rep->params[i].ready = 1;
        rep->buckets[rep->params[i].bucket].pending--;
        rep->seen[rep->num_seen++] = i;
    }
    while (!status && !rep->late && rep->next < rep->num_buckets &&
           rep->buckets[rep->next].pending == 0)
        status = fsdpi_replicate_reduce(rep);
    return fsdpi_replicate_keep(rep, status);
}

FSDP_API fsdp_status fsdp_replicate_post_backward(fsdp_replicate *rep) {
    if (!rep) return fsdpi_replicate_null("replicate_post_backward", "rep");
    fsdp_status status = FSDP_OK;
    while (!status && rep->next < rep->num_buckets) status = fsdpi_replicate_reduce(rep);
    if (status) return status;
    status = rep->failed;
    if (rep->num_seen == rep->num_params) {
        memcpy(rep->order, rep->seen, (size_t)rep->num_params * sizeof *rep->order);
        rep->num_order = rep->num_params;
    }
    fsdpi_replicate_clear(rep);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// What is asked of a rep, and done between steps.

FSDP_API fsdp_status fsdp_replicate_unit(const fsdp_replicate *rep, int param, fsdp_unit **unit,
                                         int *index) {
    fsdp_status status = fsdpi_replicate_known((fsdp_replicate *)(uintptr_t)rep, "replicate_unit",
                                               param, 1);
    if (status) return status;
    if (unit) *unit = rep->buckets[rep->params[param].bucket].unit;
    if (index) *index = rep->params[param].index;
    return FSDP_OK;
}

FSDP_API int fsdp_replicate_num_buckets(const fsdp_replicate *rep) {
    return rep ? rep->num_buckets : 0;
}

FSDP_API int fsdp_replicate_members(const fsdp_replicate *rep, int bucket, int32_t *out,
                                    int64_t *nbytes) {
    if (!rep || bucket < 0 || bucket >= rep->num_buckets) return -1;
    const fsdpi_replicate_unit *b = &rep->buckets[bucket];
    if (out) memcpy(out, b->members, (size_t)b->num_members * sizeof *out);
    if (nbytes) *nbytes = b->nbytes;
    return b->num_members;
}

FSDP_API fsdp_status fsdp_replicate_order(const fsdp_replicate *rep, int32_t *order) {
    if (!rep || !order) return fsdpi_replicate_null("replicate_order", "rep or order");
    if (!rep->num_order)
        return fsdp_fail(fsdp_model_world(rep->model), FSDP_ERR_INVALID_STATE,
                         "[E963] replicate_order: no backward has said of all %d parameters that "
                         "they are ready: call fsdp_replicate_ready for each of them",
                         rep->num_params);
    memcpy(order, rep->order, (size_t)rep->num_params * sizeof *order);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_replicate_broadcast(fsdp_replicate *rep, int root) {
    static const char *const name = "replicate_broadcast";
    if (!rep) return fsdpi_replicate_null(name, "rep");
    fsdp_model *m = rep->model;
    fsdp_world *world = fsdp_model_world(m);
    int64_t most = 1;
    void *room = NULL;
    if (root < 0 || root >= fsdp_mesh_size(rep->mesh, 0))
        return fsdp_fail(world, FSDP_ERR_INVALID_ARG, "[E964] %s: root is %d, expected 0..%d", name,
                         root, fsdp_mesh_size(rep->mesh, 0) - 1);
    fsdp_status status = fsdp_call_begin(m, FSDP_CALL_PARAMS_CHANGED, name);
    if (!status) status = fsdp_params_writable(m);
    for (int pass = 0; pass < 2 && !status; pass++) { // measure, then copy
        if (pass && most > 16 << 20) most = 16 << 20;
        if (pass)
            status = fsdp_alloc(m, FSDP_MEMORY_HOST, most,
                                "replicate_broadcast: no memory for a step", &room);
        for (int i = 0; i < rep->num_params && !status; i++) {
            fsdp_param_view v = FSDP_ZERO;
            status = fsdp_param_view_get(rep->buckets[rep->params[i].bucket].unit,
                                         rep->params[i].index, &v);
            int64_t nbytes = v.numel * (int64_t)fsdp_dtype_size(v.dtype);
            if (!pass && nbytes > most) most = nbytes;
            for (int64_t at = 0; pass && at < nbytes && !status; at += most) {
                int64_t step = nbytes - at < most ? nbytes - at : most;
                status = fsdp_transfer(m, room, (char *)v.shard + at, step);
                if (!status) status = fsdp_broadcast(world, rep->mesh, room, step, root);
                if (!status) status = fsdp_transfer(m, (char *)v.shard + at, room, step);
            }
        }
    }
    fsdp_free(m, FSDP_MEMORY_HOST, room, most);
    return status ? status : fsdp_params_changed(m);
}

// In place of a bucket's all-reduce: the user's hook is shown what it needs.
static fsdp_status fsdpi_replicate_custom(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                                          const fsdp_coll *coll) {
    fsdpi_replicate_unit *b = (fsdpi_replicate_unit *)user;
    fsdp_replicate_bucket shown = b->shown;
    shown.dtype = (fsdp_dtype)coll->dtype;
    shown.data = coll->dst;
    shown.numel = (int64_t)coll->count - shown.num_flags;
    return b->rep->hook(b->rep->hook_user, &shown, ops, comm, coll);
}

FSDP_API fsdp_status fsdp_replicate_set_hook(fsdp_replicate *rep, fsdp_replicate_hook hook,
                                             void *user) {
    if (!rep) return fsdpi_replicate_null("replicate_set_hook", "rep");
    fsdp_status status = FSDP_OK;
    for (int k = 0; k < rep->num_buckets && !status; k++)
        status = fsdp_set_custom_all_reduce(rep->buckets[k].unit,
                                            hook ? fsdpi_replicate_custom : NULL, &rep->buckets[k]);
    if (status) return status;
    rep->hook = hook;
    rep->hook_user = user;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_replicate_join(fsdp_replicate *rep, int has_batch, int divide,
                                         int *active) {
    if (!rep || !active) return fsdpi_replicate_null("replicate_join", "rep or active");
    int32_t ranks = has_batch != 0;
    *active = 0;
    fsdp_status status = fsdp_call_begin(rep->model, FSDP_CALL_ZERO_GRAD, "replicate_join");
    if (!status)
        status = fsdp_all_reduce(fsdp_model_world(rep->model), rep->mesh, &ranks, 1, FSDP_I32,
                                 FSDP_SUM);
    int all = !divide || ranks == 0 || ranks == fsdp_mesh_size(rep->mesh, 0);
    for (int k = 0; k < rep->num_buckets && !status; k++)
        status = fsdp_set_gradient_divide_factor(rep->model, rep->buckets[k].unit,
                                                 all ? 0 : (double)ranks);
    if (!status) *active = ranks;
    return status;
}

FSDP_API fsdp_status fsdp_replicate_shadow(fsdp_replicate *rep) {
    fsdp_status status = fsdp_replicate_pre_forward(rep);
    if (!status) status = fsdp_replicate_post_forward(rep);
    return status ? status : fsdp_replicate_post_backward(rep);
}

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION
