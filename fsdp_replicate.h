/* fsdp_replicate.h - PyTorch's DistributedDataParallel: gradients averaged in buckets; an extension
   of fsdp.h

   Each rank holds all parameters and sees a batch of its own. A bucket is a group of parameters
   whose gradients travel in one all-reduce. The all-reduce begins as soon as the last gradient of
   the group is written, while backward continues. Buckets follow sizes, not layers: PyTorch's first
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
     and unused parameters, clipping, optimizers, hooks, comm threads and streams. If one all-reduce
     for each layer is enough, you do not need this header: give fsdp_fully_shard a mesh_info of
     the kind FSDP_MESH_INFO_DDP.
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

#ifndef FSDP_MATH_ONLY
typedef struct fsdp_replicate fsdp_replicate;

typedef struct fsdp_replicate_desc {
    uint32_t size, start_canary;
    const fsdp_param_desc *params; // [num_params] in the order of their definition, copied. Names
                                   // are whole names, for example "h.0.w"; NULL: "p0", "p1", ...
    int32_t num_params;            // >= 1
    int32_t num_caps;              // 0: first_bytes, then bucket_bytes
    const int64_t *caps;           // [num_caps] bytes of the first, second, ... bucket of a dtype.
                                   // The last one repeats
    int64_t first_bytes;           // cap of the first bucket. 0: bucket_bytes if given, or 1 MiB
    int64_t bucket_bytes;          // cap of each other bucket. 0: 25 MiB
    const int32_t *order;          // [num_params] a permutation: the order in which gradients get
                                   // ready. NULL: last defined first
    const fsdp_mesh *mesh;         // 1-D: its ranks are replicas. NULL: mesh_info
    const fsdp_mesh_info *mesh_info; // its kind is DDP. NULL: the model's if its kind is DDP,
                                     // otherwise all ranks of the world
    fsdp_dtype param_dtype;          // KEEP: as the model
    fsdp_dtype reduce_dtype;         // dtype of the message. KEEP: as the model. FSDP_BF16 or
                                     // FSDP_F16 compress f32 gradients
    int32_t late;                    // 1: nothing is reduced before fsdp_replicate_post_backward
    int32_t reserved;
    const char *name; // the units are NAME.0, NAME.1, ...; NULL: "bucket"
    uint64_t end_canary;
} fsdp_replicate_desc;

/* fsdp_replicate_create - add the buckets to a model, one unit each, which are never resharded.
   Frozen parameters follow the others, in one bucket for each dtype, whatever the caps are; they
   stay there if you thaw them
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

// The gradients of a bucket, as a hook gets them, and their parameters. All fields except index may
// change if you freeze, thaw or cast parameters.
typedef struct fsdp_replicate_bucket {
    int32_t index, is_last; // is_last: no other bucket is reduced after it
    int32_t num_params;     // trainable ones
    int32_t reserved;
    const int32_t *params;  // [num_params] index of each in desc.params
    const int64_t *offsets; // [num_params] where each begins in data, elements
    const int64_t *numels;  // [num_params] elements of each
    fsdp_dtype dtype;       // dtype of data
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
   Runs        where reductions run: at once, in a comm thread, or on a device with streams to
               enqueue work. If it returns a failure, the world is aborted with it
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle), errors of commit
   Collective  as fsdp_model_commit at the first use; then no, but every rank has to do the same
   Blocks      for operations under way      Allocates as commit
   Source      torch: DistributedDataParallel.register_comm_hook */
FSDP_API fsdp_status fsdp_replicate_set_hook(fsdp_replicate *rep, fsdp_replicate_hook hook,
                                             void *user);

/* fsdp_replicate_join   - call it before each step: it says if this rank has a batch. For uneven
               inputs
   fsdp_replicate_shadow - the forward and backward of a rank without a batch; uses no parameter
       while (!fsdp_replicate_join(rep, batch != NULL, 0, &active) && active > 0) {
           if (batch) train_on(batch); else fsdp_replicate_shadow(rep);
           ...                                         // finalize, optimizer step, zero_grad: all
           if (batch) batch = next();
       }
   A rank whose data have ended continues without a batch: parameters and states of optimizers stay
   equal on all ranks. If the model has several fsdp_replicate or other units, do not call shadow:
   call pre_forward and post_forward of all, then their post_backward, in the order of other ranks
   divide      0: gradients are divided by the number of replicas (PyTorch by default:
               divide_by_initial_world_size=True); 1: by the ranks that have a batch. If the
               loss is per token, set the number of tokens as divide factor after this call
   active      out: how many ranks have one. 0: the data of all ranks have ended
   Effect      if some ranks have no batch, a plan (fsdp_plan.h) pauses in this step on all
               ranks. If the model has several groups of replicas, all have to find the same. With
               a plan, gradients get ready in the same order on all ranks (docs/plan.md)
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (a unit is not idle); collective errors
   Collective  join: yes, every rank of the mesh, one all-reduce of an integer, and it sets the
               divide factor of the buckets. shadow: as the calls of a step
   Blocks      yes, at most timeout_ms      Allocates as the calls of a step
   Source      torch: Join, DistributedDataParallel.join */
FSDP_API fsdp_status fsdp_replicate_join(fsdp_replicate *rep, int has_batch, int divide,
                                         int *active);
FSDP_API fsdp_status fsdp_replicate_shadow(fsdp_replicate *rep);

#endif // FSDP_MATH_ONLY
#ifdef __cplusplus
}
#endif
#endif // FSDP_REPLICATE_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_REPLICATE_IMPLEMENTED)
#define FSDP_REPLICATE_IMPLEMENTED
#include "src/replicate/assign.h"
#ifndef FSDP_MATH_ONLY
#include "src/replicate/api.h"
#include "src/replicate/create.h"
#endif
#endif // FSDP_IMPLEMENTATION
