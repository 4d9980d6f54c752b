// Written by tools/amalgamate.py from fsdp_dtensor.h, dtensor/: change those files.
/* fsdp_dtensor.h - tensors that are distributed over the ranks of a mesh: PyTorch's DTensor in
   C; an extension of fsdp.h

   A spec says how the dims of a mesh hold a tensor: each mesh dim cuts it along one of its dims,
   holds it whole, or holds addends of it. From specs alone this header computes which part a rank
   has, how to get from one spec to another with the least cost, and what an operation on such
   tensors gives. That needs no world, no memory and no other rank. With a model it brings tensors
   from one spec to another, and cuts parameters by tensor parallelism and FSDP at the same time.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_dtensor.h"            // includes fsdp.h; link with -lm

       int32_t mesh[2] = {4, 2};                                  // 4 ranks by 2
       fsdp_placement cut[2] = {{FSDP_SHARD, 0, 0, 1}, {FSDP_SHARD, 0, 0, 0}};
       int64_t shape[2] = {50257, 768};
       fsdp_spec spec;
       fsdp_local part;
       int32_t coord[2] = {3, 1};                                 // the last rank
       if (fsdp_spec_init(&spec, 2, mesh, cut, FSDP_F32, 2, shape)) return 1;
       if (fsdp_spec_local(&spec, coord, &part)) return 1;        // 6282 rows, from row 43975 on

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h)

   WHAT IS THERE
     Numbers alone: specs, parts and PyTorch's strided placements; routes; placements of operations;
     the local loops of a loss whose classes are cut. All of this compiles with FSDP_MATH_ONLY; then
     a failure has no text.
     Of a model: redistributions, which carry routes out on your memory (fsdp_dmesh_create,
     fsdp_redistribute), and units whose parameters tensor parallelism cuts and FSDP shards
     (fsdp_tp_fully_shard). No object has a tensor: data are your pointers, specs are your values.
   PARTS
     A part is row-major, contiguous and without padding. Along each dim it is one interval. If a
     dim does not divide evenly, it is cut as torch.chunk cuts it: ceil(size / ranks) for each rank,
     the last ranks have less or nothing.
   ORDERS
     If several mesh dims cut the same tensor dim, fsdp_placement.order says which one cuts first.
     FSDP over tensor parallelism cuts by tp first: its order is (tp, dp). PyTorch writes this order
     as _StridedShard. Both have the same data only if every cut is even, so that this header stores
     the order. */
#ifndef FSDP_DTENSOR_H
#define FSDP_DTENSOR_H

#include "fsdp.h"

#ifdef __cplusplus
extern "C" {
#endif
// The columns of the declarations are set by hand.
// clang-format off

/* -------------------------------------------------------------------------------------------- */
/* Specs: which part of a tensor each rank has.                                                   */

// What one mesh dim does with a tensor. All zero: every rank has all of it.
enum { FSDP_REPLICATE = 0, FSDP_SHARD = 1, FSDP_PARTIAL = 2 };
enum { FSDP_AVG = 3 };                // how addends are joined, in addition to FSDP_SUM, _MAX, _MIN
typedef struct fsdp_placement {
    int8_t kind;                      // FSDP_REPLICATE, FSDP_SHARD, FSDP_PARTIAL
    int8_t dim;                       // SHARD: the tensor dim that is cut; -1: the last one
    int8_t op;                        // PARTIAL: FSDP_SUM, FSDP_MAX, FSDP_MIN, FSDP_AVG
    int8_t order;                     // SHARD: place, from 0, among the mesh dims that cut the same
                                      // tensor dim, in the order in which the cuts are made. All 0:
                                      // mesh dims from left to right
} fsdp_placement;

// A distributed tensor without its data. Values only: equal specs are equal by memcmp.
typedef struct fsdp_spec {
    int32_t mesh_ndim, ndim;
    fsdp_dtype dtype;
    int32_t reserved;
    int32_t mesh_shape[FSDP_MAX_DIMS];
    fsdp_placement place[FSDP_MAX_DIMS]; // [mesh_ndim]: dims >= 0, orders explicit; the rest is 0
    int64_t shape[FSDP_MAX_DIMS];        // [ndim] of the whole tensor; the rest is 0
} fsdp_spec;

// What one coordinate of the mesh has.
typedef struct fsdp_local {
    int64_t shape[FSDP_MAX_DIMS], start[FSDP_MAX_DIMS]; // [ndim]; start: of an empty part the
                                                        // size of the tensor's dim
    int64_t numel;
} fsdp_local;

/* fsdp_spec_init - check and fill a spec
   mesh_shape  [mesh_ndim], 1 .. FSDP_MAX_DIMS sizes >= 1
   place       [mesh_ndim]. Fields that its kind does not use are ignored. dim: -ndim .. ndim - 1
   shape       [ndim], 0 .. FSDP_MAX_DIMS sizes >= 0
   out         unchanged after a failure. place and shape may be its own fields
   Result      FSDP_OK; INVALID_ARG (the text names the mesh dim or the size): a size or a dim out
               of range, a kind, an op or a dtype that is none, orders that are no permutation,
               PARTIAL of two ops (SUM and AVG may stand together), SHARD of a scalar, a mesh of
               more than 2^31 - 1 ranks, a tensor of more than 2^62 bytes
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: DTensorSpec, DTensor.from_local with shape, normalize_to_torch_size */
FSDP_API fsdp_status fsdp_spec_init(fsdp_spec *out, int mesh_ndim, const int32_t *mesh_shape,
                                    const fsdp_placement *place, fsdp_dtype dtype, int ndim,
                                    const int64_t *shape);

/* fsdp_spec_local - the part of one rank; any rank of any world
   coord       [mesh_ndim] its coordinate in the mesh
   Layout      rows are cut in the order of the placements, each time as fsdp_shard_range
   Result      FSDP_OK; INVALID_ARG (a coordinate out of range, a spec that fsdp_spec_init did not
               fill)
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: compute_local_shape_and_global_offset */
FSDP_API fsdp_status fsdp_spec_local(const fsdp_spec *spec, const int32_t *coord, fsdp_local *out);

/* fsdp_spec_infer - as fsdp_spec_init, from the shape of a part. All parts have this shape
   local_shape [ndim]
   Result      as fsdp_spec_init
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: compute_global_tensor_info, DTensor.from_local without shape */
FSDP_API fsdp_status fsdp_spec_infer(fsdp_spec *out, int mesh_ndim, const int32_t *mesh_shape,
                                     const fsdp_placement *place, fsdp_dtype dtype, int ndim,
                                     const int64_t *local_shape);

/* fsdp_spec_to_strided   - the split factors with which PyTorch writes the orders of a spec
   fsdp_spec_from_strided - the orders that have these factors; overwrites those of spec
   factor      [mesh_ndim]: 1 where PyTorch has Shard, Replicate or Partial; else that of
               _StridedShard. from_strided reads it only where spec has SHARD. It may differ from 1
               only by the sizes of mesh dims to the right
   Result      FSDP_OK; INVALID_ARG (a factor < 1, a spec that fsdp_spec_init did not fill);
               from_strided: UNSUPPORTED, if no order has these factors. Then spec is unchanged
   Note        PyTorch's strided parts are these parts only if every cut is even. What FSDP over
               tensor parallelism stores are these parts, always
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: DTensorSpec._convert_shard_order_to_StridedShard and its inverse */
FSDP_API fsdp_status fsdp_spec_to_strided(const fsdp_spec *spec, int64_t *factor);
FSDP_API fsdp_status fsdp_spec_from_strided(fsdp_spec *spec, const int64_t *factor);

/* -------------------------------------------------------------------------------------------- */
/* Routes: how to get from one spec to another.                                                   */

// What the library believes about the mesh; the same on all ranks. All 0: PyTorch's numbers, 6.6 us
// for a collective, 0.6 us for each hop, 87.7 GB/s (GB: 2^30 bytes).
typedef struct fsdp_links {
    double base_us, hop_us[FSDP_MAX_DIMS], gbytes_per_s[FSDP_MAX_DIMS]; // of each mesh dim
    int32_t no_all_to_all;            // 1: there is none; an all-gather and a slice do its work
    int32_t greedy;                   // 1: the steps of PyTorch's default planner instead of the
                                      // cheapest, if all cuts are made from left to right
} fsdp_links;

enum {
    FSDP_STEP_SLICE = 0,              // REPLICATE -> SHARD: keep my part. Local
    FSDP_STEP_PAD,                    // SHARD -> PARTIAL: my part, zeros around it. Local
    FSDP_STEP_OWN,                    // REPLICATE -> PARTIAL of SUM: coordinate 0 keeps it, others
                                      // have zeros; of other ops: all keep it. Local
    FSDP_STEP_ALL_GATHER,             // SHARD -> REPLICATE
    FSDP_STEP_ALL_REDUCE,             // PARTIAL -> REPLICATE
    FSDP_STEP_REDUCE_SCATTER,         // PARTIAL of SUM or AVG -> SHARD
    FSDP_STEP_ALL_TO_ALL              // SHARD -> SHARD of another dim
};
typedef struct fsdp_step {
    int32_t kind, mesh_dim;
    fsdp_placement from, to;          // orders are counted among mesh dims of more than one rank
    double cost_us;
    int64_t wire_bytes;               // that the busiest rank receives, with padding
} fsdp_step;
#define FSDP_ROUTE_STEPS   32
#define FSDP_ROUTE_SCRATCH (1 << 20)  // bytes: enough for 4 mesh dims of more than one rank
typedef struct fsdp_route {
    int32_t num_steps, num_collectives;
    double cost_us;
    int64_t wire_bytes, most_bytes;   // most_bytes: of the largest local part on the way, padded
    fsdp_step steps[FSDP_ROUTE_STEPS];
} fsdp_route;

/* fsdp_route_find - the cheapest way from one spec to another on the same mesh
   links       NULL: defaults
   scratch     [scratch_bytes] memory, aligned to 8; contents undefined afterwards.
               FSDP_ROUTE_SCRATCH is enough for meshes of up to 4 dims
   route       out. A mesh dim of one rank has no step: each placement is the same there
   Costs       of n ranks, L bytes of the largest part, as it is padded for the step: all_gather
               base + (n-1) hop + (n-1) L / bw; reduce_scatter base + (n-1) hop + (n-1)/n L / bw;
               all_to_all the same + 1 us; all_reduce base + 2(n-1) hop + 2(n-1)/n L / bw; local
               steps 0. Each is rounded to 10^-6 us. Of equal costs: fewer collectives, then fewer
               steps, then the smallest sequence of (mesh dim, kind, tensor dim). So all ranks find
               the same route
   Result      FSDP_OK; INVALID_ARG: another mesh, shape or dtype; a negative cost; a target that is
               PARTIAL where the source is neither the same nor, for SUM, SHARD or REPLICATE.
               OUT_OF_MEMORY: more scratch is needed, the text says how much
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: _gen_transform_infos, DTensorRedistributePlanner.find_min_cost_path */
FSDP_API fsdp_status fsdp_route_find(const fsdp_spec *from, const fsdp_spec *to,
                                     const fsdp_links *links, void *scratch, int64_t scratch_bytes,
                                     fsdp_route *route);

/* -------------------------------------------------------------------------------------------- */
/* Loss parallel: cross-entropy of logits whose classes are cut over the ranks.                   */

/* fsdp_loss_parallel_max  - the largest logit of each row on this rank
   fsdp_loss_parallel_sums - what the loss needs to know about each row on this rank
   fsdp_loss_parallel_grad - the gradient of the logits
       fsdp_loss_parallel_max(x, FSDP_BF16, rows, cols, max);              // all-reduce: MAX
       fsdp_loss_parallel_sums(x, FSDP_BF16, rows, cols, first, t, max, sums); // all-reduce: SUM
       loss[i] = logf(sums[i]) - sums[rows + i];                           // of each row
       fsdp_loss_parallel_grad(x, x, FSDP_BF16, rows, cols, first, t, max, sums, dout);
   They are loops over host memory. On a GPU kernels of yours do the same
   logits      [rows][cols] of a floating dtype: this rank's classes first .. first + cols - 1. cols
               may be 0. Arithmetic is in f64, results are rounded once
   targets     [rows] the class of each row. A row whose target no rank has is ignored: give it 0 in
               dout, and leave its loss out
   max         [rows] out of max: -infinity if cols is 0; in of the others: that of all ranks
   sums        [2][rows] out of sums: the sum of exp(x - max); x - max of the target if it is on
               this rank, else 0. In of grad: their sums over all ranks
   dout        [rows] the gradient of each row's loss. If it is 0, the row of grad is 0
   grad        [rows][cols] out: (exp(x - max) / sum - [target]) * dout. It may be logits
   Result      FSDP_OK; INVALID_ARG (not a floating dtype, a negative size, NULL that is not empty)
   Collective  no      Blocks no      Allocates no      Thread any
   Source      torch: torch.distributed.tensor.parallel.loss_parallel; two all-reduces instead of
               three: the logit of the target travels with the sum */
FSDP_API fsdp_status fsdp_loss_parallel_max(const void *logits, fsdp_dtype dtype, int64_t rows,
                                            int64_t cols, float *max);
FSDP_API fsdp_status fsdp_loss_parallel_sums(const void *logits, fsdp_dtype dtype, int64_t rows,
                                             int64_t cols, int64_t first, const int64_t *targets,
                                             const float *max, float *sums);
FSDP_API fsdp_status fsdp_loss_parallel_grad(void *grad, const void *logits, fsdp_dtype dtype,
                                             int64_t rows, int64_t cols, int64_t first,
                                             const int64_t *targets, const float *max,
                                             const float *sums, const float *dout);

/* -------------------------------------------------------------------------------------------- */
/* Propagation: what an operation on distributed tensors needs and gives.                         */

#define FSDP_TENSOR_OP_LIST(X)                                                                     \
    X(MM, "mm")                 /* x(m,k), y(k,n) */                                               \
    X(LINEAR, "linear")         /* x(..,k), w(n,k), or also b(n): x w^T + b */                     \
    X(BMM, "bmm")               /* x(b,m,k), y(b,k,n) */                                           \
    X(ADD, "add")               /* x, y: y may lack dims on the left, or have size 1 there */      \
    X(MUL, "mul")               /* the same */                                                     \
    X(SCALE, "scale")           /* x times a number */                                             \
    X(POINTWISE, "pointwise")   /* a nonlinear function of each element */                         \
    X(TRANSPOSE, "transpose")   /* args.shape: which dim of x each dim is; none: the last two */   \
    X(SLICE, "slice")           /* args.dim; args.shape[0]: its new size. Also a part of split */ \
    X(RESHAPE, "reshape")       /* args.shape: the new shape */                                    \
    X(SUM, "sum")               /* args.shape: dims that go; none: all */                          \
    X(MEAN, "mean")             /* the same */                                                     \
    X(SOFTMAX, "softmax")       /* over the last args.num_dims dims; none: the last one */         \
    X(LOG_SOFTMAX, "log_softmax") /* the same */                                                   \
    X(LAYER_NORM, "layer_norm") /* the same; x, or also weight, or also bias */                    \
    X(RMS_NORM, "rms_norm")     /* the same; x, or also weight */                                  \
    X(CAT, "cat")               /* 1 .. 4 tensors along args.dim */                                \
    X(EMBEDDING, "embedding")   /* w(V,D), ids: rows of w */
enum {
#define FSDP_X(name, text) FSDP_TENSOR_OP_##name,
    FSDP_TENSOR_OP_LIST(FSDP_X)
#undef FSDP_X
    FSDP_TENSOR_OP_COUNT
};

typedef struct fsdp_tensor_op_args {
    int32_t dim, num_dims;            // num_dims: numbers in shape; SOFTMAX and norms: see the list
    int64_t shape[FSDP_MAX_DIMS];
} fsdp_tensor_op_args;

enum { FSDP_TENSOR_OP_INPUTS = 4 };
typedef struct fsdp_propagation {
    fsdp_spec out;
    fsdp_spec in[FSDP_TENSOR_OP_INPUTS];   // what the inputs have to be
    fsdp_spec grad[FSDP_TENSOR_OP_INPUTS]; // how the gradient of each input arrives, if that of the
                                           // output is as out, REPLICATE for PARTIAL. All 0: ids
    double cost_us;                        // of bringing the inputs there
    int32_t num_in;
    int32_t masked;                   // 1: EMBEDDING of rows that are cut: a rank writes 0 for ids
                                      // whose row it does not have
} fsdp_propagation;

/* fsdp_propagate - the placements with which an operation needs no communication of its own, and
   that cost least to bring the inputs to
   op          FSDP_TENSOR_OP_*
   in          [num_in] specs on one mesh
   args        dims and sizes of operations that have some; NULL: all 0
   links       as for fsdp_route_find
   Choice      for each mesh dim a row of a table of the operation, for example of MM: x cut along
               dim 1 and y along dim 0 give addends. A row cuts only if an input is cut there in
               this way already, and cuts no dim anew that is shorter than the number of parts. Of
               equal costs: fewest placements that change, then fewest PARTIAL in the output
   Result      FSDP_OK; INVALID_ARG (number, mesh or shapes of inputs, args, a spec that
               fsdp_spec_init did not fill); UNSUPPORTED (there is no such op); OUT_OF_MEMORY (more
               than 4 mesh dims of more than one rank, or 4 and a tensor of more than 4 dims)
   Collective  no      Blocks no      Allocates 128 KiB of the stack      Thread any
   Source      torch: ShardingPropagator, register_op_strategy; gradients: the backward of each */
FSDP_API fsdp_status fsdp_propagate(int op, const fsdp_spec *const *in, int num_in,
                                    const fsdp_tensor_op_args *args, const fsdp_links *links,
                                    fsdp_propagation *out);

#ifndef FSDP_MATH_ONLY
/* -------------------------------------------------------------------------------------------- */
/* A mesh of a model: where its tensors are distributed.                                          */

typedef struct fsdp_dmesh fsdp_dmesh;

typedef struct fsdp_dmesh_desc {
    uint32_t size, start_canary;
    const fsdp_mesh *mesh;            // the placements of this model's tensors speak of its dims
    const char *tp_dim;               // names of its dims; NULL: "tp",
    const char *shard_dim;            // "dp_shard", else "dp",
    const char *replicate_dim;        // "dp_replicate". A default that is no dim: there is none
    int64_t staging_bytes;            // of each staging buffer; 0: as large as redistributions need
    int32_t overlap;                  // 1: fsdp_redistribute_begin runs beside your stream
    int32_t reserved;
    fsdp_links links;                 // as for fsdp_route_find
    uint64_t end_canary;
} fsdp_dmesh_desc;

/* fsdp_dmesh_create - a mesh that tensors of a model are distributed over: its groups and staging
   memory. If the backend has no all_to_all, its routes do without
   dm          the model owns it; fsdp_dmesh_destroy or the end of the model ends it
   Result      FSDP_OK; INVALID_ARG (the text names the dim or the field): the mesh belongs to
               another world, a dim that desc names does not exist, two names are one dim, this rank
               is outside the mesh, the model's mesh has other ranks, so that norms would leave some
               out; OUT_OF_MEMORY; INVALID_STATE (it failed on another rank); MISMATCH (ranks gave
               other descs); collective errors. After a failure no rank has one
   Collective  yes: every rank of the world, each with a mesh that it is in, of the same shape
   Blocks      yes, at most timeout_ms      Allocates yes      Source torch: init_device_mesh */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_dmesh_create(fsdp_model *model,
                                                       const fsdp_dmesh_desc *desc,
                                                       fsdp_dmesh **dm);

/* fsdp_dmesh_destroy - end it with its redistributions and memory; NULL is allowed. Units of
   fsdp_tp_fully_shard stay
   Collective  as fsdp_model_destroy      Blocks for operations under way      Allocates no */
FSDP_API void fsdp_dmesh_destroy(fsdp_dmesh *dm);

/* fsdp_dmesh_alloc - device memory that peers read in place: what is redistributed from or to its
   begin is not copied if the layout allows that
   ptr         zero-filled, at least nbytes; lives until fsdp_dmesh_destroy. The model's memory
               counts it in the pool "activations"
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY, collective errors
   Collective  as fsdp_model_commit; ranks may give different sizes      Blocks no
   Allocates   yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_dmesh_alloc(fsdp_dmesh *dm, int64_t nbytes, void **ptr);

/* -------------------------------------------------------------------------------------------- */
/* Redistribution: bring a tensor from one spec to another.                                       */

typedef struct fsdp_redistribution fsdp_redistribution;

typedef struct fsdp_redistribution_desc {
    uint32_t size, start_canary;
    const char *name;                 // in texts and records, copied, at most 63 bytes: for example
                                      // "h.3 mlp in". NULL: "redistribute"
    fsdp_spec from, to;               // of one mesh, shape and dtype
    fsdp_dtype comm_dtype;            // parts are cast to it before they travel, and back. KEEP: no
    int32_t reserved;
    double scale;                     // the result is multiplied by it; 0: 1
    uint64_t end_canary;
} fsdp_redistribution_desc;

/* fsdp_redistribution_create - find the route of a tensor, and prepare its records. The same desc
   gives the same object again
   out         dm owns it
   Result      FSDP_OK; INVALID_ARG: as fsdp_spec_init and fsdp_route_find, a mesh shape that is not
               dm's, a name that is too long, a comm_dtype or a factor for integers, a negative
               scale if addends of MAX or MIN stay, staging_bytes that are too few; OUT_OF_MEMORY;
               collective errors
   Collective  yes: every rank of dm's mesh, same descs, same order; the first run compares them
   Blocks      no      Allocates yes      Source torch: DTensor.redistribute */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_redistribution_create(
    fsdp_dmesh *dm, const fsdp_redistribution_desc *desc, fsdp_redistribution **out);

/* fsdp_redistribution_create_backward - the way of the gradient, back from `to` to `from`
   grad        how the gradient of `to` arrives: a spec of its mesh, shape and dtype. NULL: as `to`,
               REPLICATE for PARTIAL
   Effect      it ends as `from`; where that is PARTIAL, as grad if that is PARTIAL, else REPLICATE.
               It has the comm_dtype and the scale of forward, and its name with " backward"
   Result      as fsdp_redistribution_create
   Collective, Blocks, Allocates  as fsdp_redistribution_create
   Source      torch: _redistribute_backward, _normalize_placements_for_grad */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_redistribution_create_backward(
    fsdp_redistribution *forward, const fsdp_spec *grad, fsdp_redistribution **out);

/* fsdp_redistribution_resize - set another size of one dim of the tensor
   size        0 .. the size in the desc. The route stays, even if another were cheaper now
   Result      FSDP_OK; INVALID_ARG; INVALID_STATE (it is begun)
   Collective  no, but every rank has to do the same      Allocates no
   Blocks      on devices with streams for operations under way: they read its lists */
FSDP_API fsdp_status fsdp_redistribution_resize(fsdp_redistribution *r, int dim, int64_t size);

/* fsdp_redistribution_get - the route, this rank's parts, counters
   Result      FSDP_OK; INVALID_ARG
   Collective  no      Blocks no      Allocates no */
typedef struct fsdp_redistribution_info {
    fsdp_route route;                    // its costs: of the sizes in the desc
    fsdp_local from, to;                 // of this rank, of the sizes now
    int64_t src_capacity, dst_capacity;  // bytes. If src or dst is the begin of as much memory of
                                         // fsdp_dmesh_alloc, padding needs no copy
    uint64_t routes;                     // that dm has found, of all its redistributions
    uint64_t runs;                       // of this one
} fsdp_redistribution_info;
FSDP_API fsdp_status fsdp_redistribution_get(const fsdp_redistribution *r,
                                             fsdp_redistribution_info *out);

/* fsdp_redistribute - run it, in the order of your stream
   src, dst    device memory: this rank's parts `from` and `to`. You may write src behind the call.
               dst may be src if the route has no step but all_reduce; else they must not overlap.
               An empty part may be NULL
   Writes      dst; if dst is the begin of memory of fsdp_dmesh_alloc: up to dst_capacity bytes
   Copies      inside of one run the library stages what peers cannot read, and what is not laid out
               as a collective needs it: parts that are cut along a dim behind one that is longer
               than 1, uneven parts without room for padding
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (begun and not waited for); collective errors,
               which abort the world
   Collective  yes: every rank of dm's mesh, same order      Blocks inline and with lanes: until
               done; else no      Allocates no      Source torch: DTensor.redistribute */
FSDP_API fsdp_status fsdp_redistribute(fsdp_redistribution *r, void *dst, const void *src);

/* fsdp_redistribute_begin - the same beside your stream, if dm has overlap; else as
               fsdp_redistribute. Until the wait, dst and src are the library's
   fsdp_redistribute_wait  - from here on your stream may read dst and write src. If nothing was
               begun, it does nothing
   Result      as fsdp_redistribute
   Collective  begin: yes, every rank of dm's mesh, same order. wait: no
   Blocks      begin: no, but inline until done. wait: with lanes until done; else no
   Allocates   no, but the first one on the extensions' stream: a worker thread with lanes
   Source      torch: redistribute(async_op=True), AsyncCollectiveTensor.wait */
FSDP_API fsdp_status fsdp_redistribute_begin(fsdp_redistribution *r, void *dst, const void *src);
FSDP_API fsdp_status fsdp_redistribute_wait(fsdp_redistribution *r);

/* fsdp_dtensor_check - do all ranks that should have equal bytes have them? A hash of the part
   travels, not the data
   data        device memory: this rank's part; NULL if it is empty
   what        its name, for the text
   Result      FSDP_OK; CORRUPT: the text names two ranks that differ; the world goes on.
               INVALID_ARG; collective errors
   Collective  yes: every rank of dm's mesh      Blocks yes, at most timeout_ms for each step
   Allocates   no      Source torch: DTensor.from_local(run_check=True) */
FSDP_API fsdp_status fsdp_dtensor_check(fsdp_dmesh *dm, const fsdp_spec *spec, const void *data,
                                        const char *what);

/* -------------------------------------------------------------------------------------------- */
/* Parameters that tensor parallelism cuts, sharded by FSDP at the same time.                     */

typedef struct fsdp_tp_unit_desc {
    uint32_t size, start_canary;
    fsdp_unit_desc unit;              // its parameters have the shapes of the whole tensors. Leave
                                      // mesh and mesh_info NULL
    const fsdp_placement *tp;         // [unit.num_params] over tp_dim: all SHARD, or all REPLICATE
    int32_t partial_grads;            // REPLICATE: 1: the ranks of tp_dim write addends of the
                                      // gradient (sequence parallel); 0: all write the same
    int32_t reserved;
    uint64_t end_canary;
} fsdp_tp_unit_desc;

/* fsdp_tp_fully_shard - add a unit: fsdp_fully_shard of this rank's tensor-parallel parts
   Cut         (all SHARD) this rank has its part along the placement's dim, and shard_dim shards
               that part. tp ranks have different elements: nothing is summed over them
   Replicated  (all REPLICATE) shard_dim shards the whole, and the ranks of tp_dim are replicas: the
               core sums their gradients once for each unit and step. With partial_grads the sum is
               the gradient, without the mean of equal ones. Recommended: one replicated unit for
               the whole model, made first, with FSDP_RESHARD_NEVER
   Divide      gradients are divided by the ranks of shard_dim and replicate_dim. If you set a
               gradient_divide_factor yourself, set it for each unit and not for all
   Result      as fsdp_fully_shard; INVALID_ARG (the text names the parameters): one is cut and
               another one is not (make two units), PARTIAL, a dim out of range, a mesh in the desc
   Collective  yes: every rank of dm's mesh, same desc
   Blocks, Allocates  as fsdp_fully_shard
   Source      torch: parallelize_module with fully_shard, FSDPParam._init_sharded_param */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_tp_fully_shard(fsdp_dmesh *dm,
                                                         const fsdp_tp_unit_desc *desc,
                                                         fsdp_unit **unit);

/* fsdp_tp_view - a view, or a block of fsdp_init_params, as it lies in the whole tensor: shape and
   start are the whole's, and so is the result of fsdp_view_index
   out         a view of a unit that fsdp_tp_fully_shard did not make is copied as it is. May be
               local
   Result      FSDP_OK; INVALID_ARG
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_tp_view(const fsdp_dmesh *dm, const fsdp_param_view *local,
                                  fsdp_param_view *out);

/* fsdp_tp_param_load - as fsdp_param_load, from the whole tensor
   fsdp_tp_param_full - as fsdp_param_full, or with grad 1 as fsdp_param_full_grad: gathered over
               shard_dim, then over tp_dim
   full        host memory, the whole tensor, row-major. NULL in full: this rank keeps nothing
   Result      as those functions; OUT_OF_MEMORY
   Collective  load: as fsdp_param_load. full: every rank of dm's mesh
   Blocks      as those functions      Allocates memory of one part while it runs
   Source      torch: distribute_tensor, DTensor.full_tensor */
FSDP_API fsdp_status fsdp_tp_param_load(fsdp_dmesh *dm, fsdp_unit *unit, int index,
                                        const void *full);
FSDP_API fsdp_status fsdp_tp_param_full(fsdp_dmesh *dm, fsdp_unit *unit, int index, int grad,
                                        void *full);
#endif // FSDP_MATH_ONLY

// clang-format on
#ifdef __cplusplus
}
#endif
#endif // FSDP_DTENSOR_H

/* ============================================================================================ */
/* Implementation, leaves first. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_DTENSOR_IMPLEMENTED)
#define FSDP_DTENSOR_IMPLEMENTED

#include <math.h>   // exp, HUGE_VAL
#include <string.h> // memcmp, memcpy, memset

#ifdef __cplusplus
extern "C" {
#endif


/* ==== dtensor/spec.h ========================================================================
   specs: checks, parts of ranks, strided placements */

// Invariant: a spec that a function has accepted is normal: dims >= 0, orders explicit, all else 0.
// Source: torch/distributed/tensor/_dtensor_spec.py, _utils.py, placement_types.py.

// A failure has no text where there is no world to keep it.
#ifdef FSDP_MATH_ONLY
static fsdp_status fsdpi_dt_fail(fsdp_status status, const char *format, ...) {
    (void)format;
    return status;
}
#else
#define fsdpi_dt_fail(...) fsdp_fail(NULL, __VA_ARGS__)
#endif

#define FSDPI_DT_MOST ((int64_t)1 << 62) // bytes of a tensor

// a * b for a, b >= 0; what is above `most` becomes most + 1.
static int64_t fsdpi_dt_mul(int64_t a, int64_t b, int64_t most) {
    return a && b > most / a ? most + 1 : a * b;
}

static int64_t fsdpi_dt_numel(int ndim, const int64_t *shape) {
    int64_t numel = 1;
    for (int d = 0; d < ndim; d++) // none if one is empty, however long the others are
        if (!shape[d]) return 0;
    for (int d = 0; d < ndim; d++) numel = fsdpi_dt_mul(numel, shape[d], FSDPI_DT_MOST);
    return numel;
}

static int fsdpi_dt_cuts(const fsdp_placement *p, int dim) {
    return p->kind == FSDP_SHARD && p->dim == dim;
}

static int fsdpi_dt_num_cuts(const fsdp_spec *s, int dim) {
    int count = 0;
    for (int m = 0; m < s->mesh_ndim; m++) count += fsdpi_dt_cuts(&s->place[m], dim);
    return count;
}

// The mesh dim that makes the cut number `order` of a tensor dim, or -1.
static int fsdpi_dt_cut_at(const fsdp_spec *s, int dim, int order) {
    for (int m = 0; m < s->mesh_ndim; m++)
        if (fsdpi_dt_cuts(&s->place[m], dim) && s->place[m].order == order) return m;
    return -1;
}

static fsdp_status fsdpi_dt_check_sizes(const char *call, int mesh_ndim, const int32_t *mesh_shape,
                                        fsdp_dtype dtype, int ndim, const int64_t *shape) {
    int64_t ranks = 1, bytes = (int64_t)fsdp_dtype_size(dtype);
    if (mesh_ndim < 1 || mesh_ndim > FSDP_MAX_DIMS || ndim < 0 || ndim > FSDP_MAX_DIMS)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E126] %s: the mesh has %d dims, expected 1..%d, and the tensor %d, "
                             "expected 0..%d",
                             call, mesh_ndim, FSDP_MAX_DIMS, ndim, FSDP_MAX_DIMS);
    if (!bytes)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E127] %s: dtype %d is none: pass FSDP_F32, ...", call, (int)dtype);
    for (int m = 0; m < mesh_ndim; m++) {
        ranks = mesh_shape[m] < 1 ? INT32_MAX + (int64_t)1
                                  : fsdpi_dt_mul(ranks, mesh_shape[m], INT32_MAX);
        if (ranks > INT32_MAX)
            return fsdpi_dt_fail(
                FSDP_ERR_INVALID_ARG,
                "[E128] %s: mesh dim %d has %d ranks: pass sizes >= 1 whose product "
                "is less than 2^31",
                call, m, (int)mesh_shape[m]);
    }
    for (int d = 0; d < ndim; d++)
        if (shape[d] < 0 || shape[d] > FSDPI_DT_MOST)
            return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                                 "[E129] %s: dim %d of the tensor has size %lld: pass 0..2^62",
                                 call, d, (long long)shape[d]);
    if (fsdpi_dt_mul(bytes, fsdpi_dt_numel(ndim, shape), FSDPI_DT_MOST) > FSDPI_DT_MOST)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E133] %s: the tensor has more than 2^62 bytes: pass a smaller shape",
                             call);
    return FSDP_OK;
}

// Checks the placement of mesh dim m, and writes it into out with its dim >= 0 and without fields
// that its kind does not use.
static fsdp_status fsdpi_dt_check_place(const char *call, fsdp_spec *out, int m,
                                        const fsdp_placement *p) {
    fsdp_placement *to = &out->place[m];
    to->kind = p->kind;
    if (p->kind == FSDP_SHARD) {
        if (p->dim < -out->ndim || p->dim >= out->ndim)
            return fsdpi_dt_fail(
                FSDP_ERR_INVALID_ARG,
                "[E134] %s: mesh dim %d cuts tensor dim %d of a tensor of %d dims: "
                "pass a dim that it has; a scalar can only be REPLICATE or PARTIAL",
                call, m, p->dim, out->ndim);
        to->dim = (int8_t)(p->dim < 0 ? p->dim + out->ndim : p->dim);
        to->order = p->order;
    } else if (p->kind == FSDP_PARTIAL) {
        if (p->op < FSDP_SUM || p->op > FSDP_AVG)
            return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                                 "[E135] %s: mesh dim %d is PARTIAL of op %d: pass FSDP_SUM, "
                                 "FSDP_MAX, FSDP_MIN or FSDP_AVG",
                                 call, m, p->op);
        to->op = p->op;
    } else if (p->kind != FSDP_REPLICATE) {
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E136] %s: mesh dim %d has kind %d: pass FSDP_REPLICATE, FSDP_SHARD "
                             "or FSDP_PARTIAL",
                             call, m, p->kind);
    }
    return FSDP_OK;
}

// Addends of two ops may wait side by side only if the result does not depend on which goes first.
static int fsdpi_dt_ops_commute(int a, int b) {
    return a == b || (a == FSDP_SUM && b == FSDP_AVG) || (a == FSDP_AVG && b == FSDP_SUM);
}

// The mesh dim, other than `except`, whose addends do not commute with those of op; -1: none.
static int fsdpi_dt_other_op(const fsdp_spec *s, int op, int except) {
    for (int m = 0; m < s->mesh_ndim; m++)
        if (m != except && s->place[m].kind == FSDP_PARTIAL &&
            !fsdpi_dt_ops_commute(s->place[m].op, op))
            return m;
    return -1;
}

// The orders of one tensor dim: a permutation; all 0 becomes left to right.
static fsdp_status fsdpi_dt_check_orders(const char *call, fsdp_spec *s, int dim) {
    int count = fsdpi_dt_num_cuts(s, dim), given = 0, next = 0;
    for (int m = 0; m < s->mesh_ndim; m++)
        given |= fsdpi_dt_cuts(&s->place[m], dim) && s->place[m].order != 0;
    for (int m = 0; m < s->mesh_ndim && !given; m++)
        if (fsdpi_dt_cuts(&s->place[m], dim)) s->place[m].order = (int8_t)next++;
    for (int order = 0; order < count; order++)
        if (fsdpi_dt_cut_at(s, dim, order) < 0)
            return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                                 "[E137] %s: %d mesh dims cut tensor dim %d, and none of them has "
                                 "order %d: give them the orders 0..%d, or all 0",
                                 call, count, dim, order, count - 1);
    return FSDP_OK;
}

static fsdp_status fsdpi_dt_fill(const char *call, fsdp_spec *out, int mesh_ndim,
                                 const int32_t *mesh_shape, const fsdp_placement *place,
                                 fsdp_dtype dtype, int ndim, const int64_t *shape) {
    fsdp_spec s;
    memset(&s, 0, sizeof s);
    if (!out || !mesh_shape || !place || (ndim > 0 && !shape))
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E138] %s: the spec, a shape or the placements are NULL: pass them",
                             call);
    fsdp_status status = fsdpi_dt_check_sizes(call, mesh_ndim, mesh_shape, dtype, ndim, shape);
    if (status) return status;
    s.mesh_ndim = mesh_ndim, s.ndim = ndim, s.dtype = dtype;
    memcpy(s.mesh_shape, mesh_shape, (size_t)mesh_ndim * sizeof *mesh_shape);
    if (ndim) memcpy(s.shape, shape, (size_t)ndim * sizeof *shape);
    for (int m = 0; m < mesh_ndim && !status; m++) {
        status = fsdpi_dt_check_place(call, &s, m, &place[m]);
        if (status || s.place[m].kind != FSDP_PARTIAL) continue;
        int other = fsdpi_dt_other_op(&s, s.place[m].op, m);
        if (other >= 0)
            return fsdpi_dt_fail(
                FSDP_ERR_INVALID_ARG,
                "[E139] %s: mesh dims %d and %d are PARTIAL of two ops: reduce one "
                "of them first; only SUM and AVG may stand together",
                call, other, m);
    }
    for (int d = 0; d < ndim && !status; d++) status = fsdpi_dt_check_orders(call, &s, d);
    if (!status) *out = s;
    return status;
}

FSDP_API fsdp_status fsdp_spec_init(fsdp_spec *out, int mesh_ndim, const int32_t *mesh_shape,
                                    const fsdp_placement *place, fsdp_dtype dtype, int ndim,
                                    const int64_t *shape) {
    return fsdpi_dt_fill("spec_init", out, mesh_ndim, mesh_shape, place, dtype, ndim, shape);
}

FSDP_API fsdp_status fsdp_spec_infer(fsdp_spec *out, int mesh_ndim, const int32_t *mesh_shape,
                                     const fsdp_placement *place, fsdp_dtype dtype, int ndim,
                                     const int64_t *local_shape) {
    fsdp_spec s;
    memset(&s, 0, sizeof s); // what a failure leaves is not read
    fsdp_status status = fsdpi_dt_fill("spec_infer", out ? &s : NULL, mesh_ndim, mesh_shape, place,
                                       dtype, ndim, local_shape);
    if (status) return status;
    for (int m = 0; m < s.mesh_ndim; m++)
        if (s.place[m].kind == FSDP_SHARD) {
            int64_t *size = &s.shape[s.place[m].dim];
            *size = fsdpi_dt_mul(*size, s.mesh_shape[m], FSDPI_DT_MOST);
        }
    return fsdpi_dt_fill("spec_infer", out, s.mesh_ndim, s.mesh_shape, s.place, dtype, s.ndim,
                         s.shape);
}

// Is this a spec that fsdp_spec_init would have filled? A caller may have changed or forgotten it.
static fsdp_status fsdpi_dt_known(const char *call, const fsdp_spec *spec) {
    fsdp_spec s;
    if (!spec)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG, "[E154] %s: a spec is NULL: pass it", call);
    fsdp_status status = fsdpi_dt_fill(call, &s, spec->mesh_ndim, spec->mesh_shape, spec->place,
                                       spec->dtype, spec->ndim, spec->shape);
    if (!status && memcmp(&s, spec, sizeof s) != 0)
        return fsdpi_dt_fail(
            FSDP_ERR_INVALID_ARG,
            "[E155] %s: the spec has a field that fsdp_spec_init does not leave so: "
            "fill it by fsdp_spec_init",
            call);
    return status;
}

FSDP_API fsdp_status fsdp_spec_local(const fsdp_spec *spec, const int32_t *coord, fsdp_local *out) {
    fsdp_local l;
    fsdp_status status = fsdpi_dt_known("spec_local", spec);
    if (status) return status;
    if (!coord || !out)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E156] spec_local: coord or out is NULL: pass both");
    for (int m = 0; m < spec->mesh_ndim; m++)
        if (coord[m] < 0 || coord[m] >= spec->mesh_shape[m])
            return fsdpi_dt_fail(
                FSDP_ERR_INVALID_ARG,
                "[E157] spec_local: the coordinate in mesh dim %d is %d: pass 0..%d", m,
                (int)coord[m], (int)spec->mesh_shape[m] - 1);
    memset(&l, 0, sizeof l);
    for (int d = 0; d < spec->ndim; d++) {
        fsdp_range range = {0, spec->shape[d], spec->shape[d]};
        for (int k = 0, m; (m = fsdpi_dt_cut_at(spec, d, k)) >= 0 && !status; k++) {
            int64_t begin = range.start;
            status = fsdp_shard_range(range.count, spec->mesh_shape[m], coord[m], &range);
            range.start += begin;
        }
        l.shape[d] = range.count;
        l.start[d] = range.count ? range.start : spec->shape[d];
    }
    l.numel = fsdpi_dt_numel(spec->ndim, l.shape);
    *out = l;
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Strided placements: a mesh dim that cuts after one to its right is written as a _StridedShard,
// whose factor is the number of pieces that are there already.

FSDP_API fsdp_status fsdp_spec_to_strided(const fsdp_spec *spec, int64_t *factor) {
    fsdp_status status = fsdpi_dt_known("spec_to_strided", spec);
    if (status) return status;
    if (!factor)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E158] spec_to_strided: factor is NULL: pass it");
    for (int m = 0; m < spec->mesh_ndim; m++) {
        const fsdp_placement *p = &spec->place[m];
        factor[m] = 1;
        for (int right = m + 1; right < spec->mesh_ndim && p->kind == FSDP_SHARD; right++)
            if (fsdpi_dt_cuts(&spec->place[right], p->dim) && spec->place[right].order < p->order)
                factor[m] *= spec->mesh_shape[right];
    }
    return FSDP_OK;
}

// From right to left each mesh dim gets the first place at which `factor` pieces are there already;
// those behind it move on. The dims to the right of m have their places among themselves.
static int fsdpi_dt_insert(fsdp_spec *s, int m, int64_t factor) {
    int dim = s->place[m].dim, at = 0, right;
    int64_t pieces = 1;
    for (; pieces != factor; at++) {
        for (right = m + 1; right < s->mesh_ndim; right++)
            if (fsdpi_dt_cuts(&s->place[right], dim) && s->place[right].order == at) break;
        if (right == s->mesh_ndim) return 0;
        pieces *= s->mesh_shape[right];
    }
    for (right = m + 1; right < s->mesh_ndim; right++)
        if (fsdpi_dt_cuts(&s->place[right], dim) && s->place[right].order >= at)
            s->place[right].order++;
    s->place[m].order = (int8_t)at;
    return 1;
}

FSDP_API fsdp_status fsdp_spec_from_strided(fsdp_spec *spec, const int64_t *factor) {
    fsdp_status status = fsdpi_dt_known("spec_from_strided", spec);
    if (status) return status;
    fsdp_spec s = *spec;
    for (int m = s.mesh_ndim - 1; m >= 0; m--) {
        if (s.place[m].kind != FSDP_SHARD) continue;
        if (!factor || factor[m] < 1)
            return fsdpi_dt_fail(
                FSDP_ERR_INVALID_ARG,
                "[E159] spec_from_strided: the factor of mesh dim %d is missing or "
                "less than 1: pass 1 for a plain Shard",
                m);
        if (!fsdpi_dt_insert(&s, m, factor[m]))
            return fsdpi_dt_fail(
                FSDP_ERR_UNSUPPORTED,
                "[E174] spec_from_strided: no order of cuts has the factor %lld at "
                "mesh dim %d: gather such a tensor where it was made",
                (long long)factor[m], m);
    }
    *spec = s;
    return FSDP_OK;
}


/* ==== dtensor/route.h =======================================================================
   the cheapest way from one spec to another, and PyTorch's greedy one */

// A state is a byte for each mesh dim of more than one rank. Moves lead from state to state: the
// last cut of a tensor dim goes or becomes the last cut of another one, addends are reduced.
// Dijkstra's algorithm finds the cheapest sequence. Costs are integers of 10^-6 us, so that sums do
// not depend on the order of addition, and equal costs are equal.
// Source: torch/distributed/tensor/_redistribute.py.

enum { FSDPI_DT_R = 0, FSDPI_DT_P = 1, FSDPI_DT_S = 2 }; // SHARD: S + 8 * dim + order
#define FSDPI_DT_PS_MOST ((int64_t)1 << 56)              // of one step: 32 of them can be added

typedef struct fsdpi_dt_node {
    uint64_t state;
    int64_t ps;              // cost so far
    int32_t parent, heap_at; // heap_at -1: settled
    uint8_t collectives, steps;
    uint16_t move; // that led here: see fsdpi_dt_code
} fsdpi_dt_node;

typedef struct fsdpi_dt_search {
    const fsdp_spec *spec;                          // shape and dtype
    int dims;                                       // mesh dims of more than one rank
    int mesh_dim[FSDP_MAX_DIMS], op[FSDP_MAX_DIMS]; // op: of its addends, if it has some
    int64_t ranks[FSDP_MAX_DIMS];
    fsdp_links links; // without zeros
    uint64_t start, goal;
    fsdpi_dt_node *nodes;
    int32_t *heap, *table; // table: 1 + index of a node, 0: none
    int32_t num, room, heap_num, is_full;
    uint32_t mask;
} fsdpi_dt_search;

static int fsdpi_dt_get(uint64_t state, int i) { return (int)(state >> 8 * i & 255); }
static uint64_t fsdpi_dt_set(uint64_t state, int i, int place) {
    return (state & ~((uint64_t)255 << 8 * i)) | (uint64_t)place << 8 * i;
}
static int fsdpi_dt_dim_of(int place) { return (place - FSDPI_DT_S) / FSDP_MAX_DIMS; }
static int fsdpi_dt_order_of(int place) { return (place - FSDPI_DT_S) % FSDP_MAX_DIMS; }

// How many cuts a tensor dim has in a state; the next one gets this order.
static int fsdpi_dt_count(const fsdpi_dt_search *f, uint64_t state, int dim) {
    int count = 0;
    for (int i = 0; i < f->dims; i++) {
        int place = fsdpi_dt_get(state, i);
        count += place >= FSDPI_DT_S && fsdpi_dt_dim_of(place) == dim;
    }
    return count;
}
static int fsdpi_dt_append(const fsdpi_dt_search *f, uint64_t state, int dim) {
    return FSDPI_DT_S + FSDP_MAX_DIMS * dim + fsdpi_dt_count(f, state, dim);
}

static uint64_t fsdpi_dt_state_of(const fsdpi_dt_search *f, const fsdp_spec *s) {
    uint64_t state = 0;
    for (int i = 0; i < f->dims; i++) {
        const fsdp_placement *p = &s->place[f->mesh_dim[i]];
        int place = p->kind == FSDP_PARTIAL ? FSDPI_DT_P : FSDPI_DT_R;
        if (p->kind == FSDP_SHARD) place = FSDPI_DT_S + FSDP_MAX_DIMS * p->dim;
        for (int k = 0; k < f->dims && p->kind == FSDP_SHARD; k++) {
            const fsdp_placement *q = &s->place[f->mesh_dim[k]];
            place += fsdpi_dt_cuts(q, p->dim) && q->order < p->order;
        }
        state = fsdpi_dt_set(state, i, place);
    }
    return state;
}

static fsdp_placement fsdpi_dt_place_of(const fsdpi_dt_search *f, int i, int place) {
    fsdp_placement p = {FSDP_REPLICATE, 0, 0, 0};
    if (place == FSDPI_DT_P) p.kind = FSDP_PARTIAL, p.op = (int8_t)f->op[i];
    if (place >= FSDPI_DT_S) {
        p.kind = FSDP_SHARD;
        p.dim = (int8_t)fsdpi_dt_dim_of(place), p.order = (int8_t)fsdpi_dt_order_of(place);
    }
    return p;
}

/* -------------------------------------------------------------------------------------------- */
// What a step costs.

static int64_t fsdpi_dt_ceil(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Rows of the largest part along a dim, mesh dim `without` (or -1) left out.
static int64_t fsdpi_dt_length(const fsdpi_dt_search *f, uint64_t state, int dim, int without) {
    int64_t pieces = 1, size = f->spec->shape[dim];
    for (int i = 0; i < f->dims; i++) {
        int place = fsdpi_dt_get(state, i);
        if (i != without && place >= FSDPI_DT_S && fsdpi_dt_dim_of(place) == dim)
            pieces *= f->ranks[i];
    }
    return fsdpi_dt_ceil(size, pieces);
}

// Bytes of the largest part, with dim `padded` (or -1) cut into pieces of equal size once more.
static int64_t fsdpi_dt_bytes(const fsdpi_dt_search *f, uint64_t state, int padded, int64_t pieces,
                              int without) {
    int64_t bytes = (int64_t)fsdp_dtype_size(f->spec->dtype), length[FSDP_MAX_DIMS];
    for (int d = 0; d < f->spec->ndim; d++) {
        length[d] = fsdpi_dt_length(f, state, d, without);
        if (d == padded) length[d] = fsdpi_dt_ceil(length[d], pieces);
    }
    return fsdpi_dt_mul(bytes, fsdpi_dt_numel(f->spec->ndim, length), FSDPI_DT_MOST);
}

static int fsdpi_dt_is_collective(int kind) { return kind >= FSDP_STEP_ALL_GATHER; }

static int fsdpi_dt_kind(int from, int to) {
    if (from == FSDPI_DT_R) return to == FSDPI_DT_P ? FSDP_STEP_OWN : FSDP_STEP_SLICE;
    if (from == FSDPI_DT_P)
        return to == FSDPI_DT_R ? FSDP_STEP_ALL_REDUCE : FSDP_STEP_REDUCE_SCATTER;
    if (to == FSDPI_DT_P) return FSDP_STEP_PAD;
    return to == FSDPI_DT_R ? FSDP_STEP_ALL_GATHER : FSDP_STEP_ALL_TO_ALL;
}

typedef struct fsdpi_dt_cost {
    int kind;
    int64_t ps, wire, most;
} fsdpi_dt_cost;

// Mesh dim i goes from what it is in `state` to `to`.
static fsdpi_dt_cost fsdpi_dt_price(const fsdpi_dt_search *f, uint64_t state, int i, int to) {
    fsdpi_dt_cost c;
    const fsdp_links *l = &f->links;
    int m = f->mesh_dim[i];
    int64_t n = f->ranks[i], bytes = fsdpi_dt_bytes(f, state, -1, 1, -1);
    c.kind = fsdpi_dt_kind(fsdpi_dt_get(state, i), to);
    c.ps = c.wire = 0, c.most = bytes;
    if (c.kind == FSDP_STEP_PAD) c.most = fsdpi_dt_bytes(f, state, -1, 1, i);
    if (!fsdpi_dt_is_collective(c.kind)) return c;
    if (c.kind == FSDP_STEP_REDUCE_SCATTER || c.kind == FSDP_STEP_ALL_TO_ALL)
        bytes = fsdpi_dt_bytes(f, state, fsdpi_dt_dim_of(to), n, -1); // of one of n pieces
    double hops = (double)(n - 1), moved = hops * (double)bytes, extra = 0;
    c.wire = fsdpi_dt_mul(n - 1, bytes, FSDPI_DT_MOST);
    c.most = fsdpi_dt_mul(n, bytes, FSDPI_DT_MOST);
    if (c.kind == FSDP_STEP_ALL_REDUCE) {
        hops *= 2, moved = hops * (double)bytes / (double)n;
        c.wire = 2 * (n - 1) * (bytes / n) + fsdpi_dt_ceil(2 * (n - 1) * (bytes % n), n);
        c.most = bytes;
    }
    if (c.kind == FSDP_STEP_ALL_TO_ALL) extra = 1;
    double us = l->base_us + hops * l->hop_us[m] +
                moved / (l->gbytes_per_s[m] * 1073741824.0) * 1e6 + extra;
    c.ps = us * 1e6 < (double)FSDPI_DT_PS_MOST ? (int64_t)(us * 1e6 + 0.5) : FSDPI_DT_PS_MOST;
    return c;
}

/* -------------------------------------------------------------------------------------------- */
// Dijkstra's algorithm in the caller's memory.

// Moves in the order in which equal routes are told apart: mesh dim, kind, tensor dim.
static uint16_t fsdpi_dt_code(int i, int kind, int to) {
    return (uint16_t)(i << 11 | kind << 8 | to);
}
static int fsdpi_dt_code_dim(uint16_t code) { return code >> 11; }
static int fsdpi_dt_code_to(uint16_t code) { return code & 255; }

// Cost, collectives, steps.
static int fsdpi_dt_compare(const fsdpi_dt_node *a, const fsdpi_dt_node *b) {
    if (a->ps != b->ps) return a->ps < b->ps ? -1 : 1;
    if (a->collectives != b->collectives) return a->collectives - b->collectives;
    return a->steps - b->steps;
}

static void fsdpi_dt_path(const fsdpi_dt_search *f, const fsdpi_dt_node *node, uint16_t *moves) {
    for (int i = node->steps; i > 0; node = &f->nodes[node->parent]) moves[--i] = node->move;
}

static int fsdpi_dt_is_better(const fsdpi_dt_search *f, const fsdpi_dt_node *a,
                              const fsdpi_dt_node *b) {
    uint16_t ours[FSDP_ROUTE_STEPS], theirs[FSDP_ROUTE_STEPS];
    int order = fsdpi_dt_compare(a, b), i = 0;
    if (order) return order < 0;
    fsdpi_dt_path(f, a, ours), fsdpi_dt_path(f, b, theirs);
    while (i < a->steps && ours[i] == theirs[i]) i++;
    return i < a->steps && ours[i] < theirs[i];
}

static void fsdpi_dt_heap_put(fsdpi_dt_search *f, int at, int32_t node) {
    f->heap[at] = node;
    f->nodes[node].heap_at = at;
}

static void fsdpi_dt_heap_up(fsdpi_dt_search *f, int at) {
    int32_t node = f->heap[at];
    for (int up; at > 0; at = up) {
        up = (at - 1) / 2;
        if (fsdpi_dt_compare(&f->nodes[node], &f->nodes[f->heap[up]]) >= 0) break;
        fsdpi_dt_heap_put(f, at, f->heap[up]);
    }
    fsdpi_dt_heap_put(f, at, node);
}

static int32_t fsdpi_dt_heap_pop(fsdpi_dt_search *f) {
    int32_t top = f->heap[0], node = f->heap[--f->heap_num];
    int at = 0, next;
    f->nodes[top].heap_at = -1;
    for (; (next = 2 * at + 1) < f->heap_num; at = next) {
        const fsdpi_dt_node *a = &f->nodes[f->heap[next]];
        if (next + 1 < f->heap_num && fsdpi_dt_compare(&f->nodes[f->heap[next + 1]], a) < 0) next++;
        if (fsdpi_dt_compare(&f->nodes[node], &f->nodes[f->heap[next]]) <= 0) break;
        fsdpi_dt_heap_put(f, at, f->heap[next]);
    }
    if (f->heap_num) fsdpi_dt_heap_put(f, at, node);
    return top;
}

// The place of a state in the table: that of its node, or the free one that it would get.
static int32_t *fsdpi_dt_find(const fsdpi_dt_search *f, uint64_t state) {
    uint32_t at = (uint32_t)((state * 0x9E3779B97F4A7C15u) >> 32);
    for (;; at++) {
        int32_t *entry = &f->table[at & f->mask];
        if (!*entry || f->nodes[*entry - 1].state == state) return entry;
    }
}

// A way to a state: remembered if it is the first or a better one.
static void fsdpi_dt_reach(fsdpi_dt_search *f, const fsdpi_dt_node *way) {
    int32_t *entry = fsdpi_dt_find(f, way->state), node = *entry - 1;
    if (node < 0) {
        if (f->num == f->room) {
            f->is_full = 1;
            return;
        }
        node = f->num++, *entry = f->num;
        f->nodes[node] = *way;
        fsdpi_dt_heap_put(f, f->heap_num++, node);
    } else {
        fsdpi_dt_node *known = &f->nodes[node];
        if (known->heap_at < 0 || !fsdpi_dt_is_better(f, way, known)) return;
        int32_t at = known->heap_at;
        *known = *way, known->heap_at = at;
    }
    fsdpi_dt_heap_up(f, f->nodes[node].heap_at);
}

static void fsdpi_dt_move(fsdpi_dt_search *f, int32_t parent, int i, int to) {
    const fsdpi_dt_node *from = &f->nodes[parent];
    if (from->steps == FSDP_ROUTE_STEPS) return;
    fsdpi_dt_cost cost = fsdpi_dt_price(f, from->state, i, to);
    fsdpi_dt_node way = *from;
    way.state = fsdpi_dt_set(from->state, i, to);
    way.ps += cost.ps;
    way.parent = parent;
    way.collectives = (uint8_t)(way.collectives + fsdpi_dt_is_collective(cost.kind));
    way.steps++;
    way.move = fsdpi_dt_code(i, cost.kind, to);
    fsdpi_dt_reach(f, &way);
}

static int fsdpi_dt_sums(int op) { return op == FSDP_SUM || op == FSDP_AVG; }

// May mesh dim i begin to hold addends? Only on the way to a goal where it does, and beside addends
// of other mesh dims that commute.
static int fsdpi_dt_may_add(const fsdpi_dt_search *f, uint64_t state, int i) {
    for (int k = 0; k < f->dims; k++)
        if (k != i && fsdpi_dt_get(state, k) == FSDPI_DT_P &&
            !fsdpi_dt_ops_commute(f->op[k], f->op[i]))
            return 0;
    return fsdpi_dt_get(f->goal, i) == FSDPI_DT_P;
}

// All moves of mesh dim i.
static void fsdpi_dt_moves(fsdpi_dt_search *f, int32_t node, int i) {
    uint64_t state = f->nodes[node].state;
    int place = fsdpi_dt_get(state, i), cut = place >= FSDPI_DT_S;
    int dim = cut ? fsdpi_dt_dim_of(place) : -1;
    if (cut && fsdpi_dt_order_of(place) + 1 < fsdpi_dt_count(f, state, dim)) return; // not the last
    if (place != FSDPI_DT_R) fsdpi_dt_move(f, node, i, FSDPI_DT_R);
    if (place == FSDPI_DT_R || (cut && f->op[i] == FSDP_SUM))
        if (fsdpi_dt_may_add(f, state, i)) fsdpi_dt_move(f, node, i, FSDPI_DT_P);
    if ((place == FSDPI_DT_P && !fsdpi_dt_sums(f->op[i])) || (cut && f->links.no_all_to_all))
        return;
    for (int d = 0; d < f->spec->ndim; d++)
        if (d != dim) fsdpi_dt_move(f, node, i, fsdpi_dt_append(f, state, d));
}

// How many states there are: j of the mesh dims cut, in so many orders; the others are R or P.
static int64_t fsdpi_dt_states(int dims, int ndim) {
    int64_t sum = 0, ways = 1; // ways: to choose j mesh dims and to arrange them in ndim lists
    for (int j = 0; j <= dims; j++) {
        sum += ways << (dims - j);
        ways = ways * (dims - j) / (j + 1) * (ndim + j);
    }
    return sum;
}

// Bytes for so many nodes, heap and table, and the entries of the table.
static int64_t fsdpi_dt_scratch(int64_t nodes, int64_t *table) {
    for (*table = 16; *table < 2 * nodes;) *table *= 2;
    return nodes * (int64_t)(sizeof(fsdpi_dt_node) + sizeof(int32_t)) +
           *table * (int64_t)sizeof(int32_t);
}

// The moves of the cheapest way, and their number; -1: there are more states than the memory has
// room for.
static int fsdpi_dt_cheapest(fsdpi_dt_search *f, void *scratch, int64_t bytes, uint16_t *moves) {
    int64_t room = fsdpi_dt_states(f->dims, f->spec->ndim), table;
    while (fsdpi_dt_scratch(room, &table) > bytes)
        if ((room /= 2) < 2) return -1;
    f->nodes = (fsdpi_dt_node *)scratch;
    f->heap = (int32_t *)(void *)(f->nodes + room);
    f->table = f->heap + room;
    f->room = (int32_t)room, f->mask = (uint32_t)table - 1;
    memset(f->table, 0, (size_t)table * sizeof *f->table);
    fsdpi_dt_node start;
    memset(&start, 0, sizeof start);
    start.state = f->start;
    fsdpi_dt_reach(f, &start);
    while (f->heap_num && !f->is_full) {
        int32_t node = fsdpi_dt_heap_pop(f);
        if (f->nodes[node].state == f->goal) {
            fsdpi_dt_path(f, &f->nodes[node], moves);
            return f->nodes[node].steps;
        }
        for (int i = 0; i < f->dims; i++) fsdpi_dt_moves(f, node, i);
    }
    return -1;
}

/* -------------------------------------------------------------------------------------------- */
// PyTorch's greedy steps: from the inner mesh dims to the outer ones what has to be undone or can
// change at once, then from the outer ones to the inner ones the rest.

// Which mesh dims to the left of i cut a tensor dim.
static int fsdpi_dt_outer(uint64_t state, int i, int dim) {
    int mask = 0;
    for (int k = 0; k < i; k++) {
        int place = fsdpi_dt_get(state, k);
        mask |= (place >= FSDPI_DT_S && fsdpi_dt_dim_of(place) == dim) << k;
    }
    return mask;
}

typedef struct fsdpi_dt_way {
    uint64_t state;
    uint16_t moves[FSDP_ROUTE_STEPS];
    int num;
} fsdpi_dt_way;

// Mesh dim i becomes R, P or the last cut of `dim`. By two steps, if no collective does it.
static void fsdpi_dt_go(const fsdpi_dt_search *f, fsdpi_dt_way *w, int i, int goal) {
    int from = fsdpi_dt_get(w->state, i), dim = goal < FSDPI_DT_S ? -1 : fsdpi_dt_dim_of(goal);
    int same = from >= FSDPI_DT_S && dim >= 0 ? fsdpi_dt_dim_of(from) == dim : from == goal;
    if (same) return;
    int by_two = (from >= FSDPI_DT_S && f->links.no_all_to_all) ||
                 (from == FSDPI_DT_P && !fsdpi_dt_sums(f->op[i]));
    for (int step = dim >= 0 && by_two ? 0 : 1; step < 2; step++) {
        int to = step == 0 ? FSDPI_DT_R : dim < 0 ? goal : fsdpi_dt_append(f, w->state, dim);
        int kind = fsdpi_dt_kind(fsdpi_dt_get(w->state, i), to);
        w->moves[w->num++] = fsdpi_dt_code(i, kind, to);
        w->state = fsdpi_dt_set(w->state, i, to);
    }
}

static int fsdpi_dt_greedy(const fsdpi_dt_search *f, uint16_t *moves) {
    fsdpi_dt_way w;
    int cut = 0;
    memset(&w, 0, sizeof w);
    w.state = f->start;
    for (int i = 0; i < f->dims; i++) cut |= fsdpi_dt_get(f->start, i) >= FSDPI_DT_S;
    for (int i = f->dims - 1; i >= 0 && cut; i--) {
        int goal = fsdpi_dt_get(f->goal, i), dim = fsdpi_dt_dim_of(goal);
        if (goal >= FSDPI_DT_S &&
            fsdpi_dt_outer(w.state, i, dim) != fsdpi_dt_outer(f->goal, i, dim))
            goal = FSDPI_DT_R;
        fsdpi_dt_go(f, &w, i, goal);
    }
    for (int i = 0; i < f->dims; i++) fsdpi_dt_go(f, &w, i, fsdpi_dt_get(f->goal, i));
    memcpy(moves, w.moves, sizeof w.moves);
    return w.num;
}

// Are all cuts made from left to right?
static int fsdpi_dt_is_plain(const fsdpi_dt_search *f, uint64_t state) {
    for (int i = 0; i < f->dims; i++) {
        int place = fsdpi_dt_get(state, i), before = 0;
        if (place < FSDPI_DT_S) continue;
        for (int mask = fsdpi_dt_outer(state, i, fsdpi_dt_dim_of(place)); mask; mask >>= 1)
            before += mask & 1;
        if (before != fsdpi_dt_order_of(place)) return 0;
    }
    return 1;
}

/* -------------------------------------------------------------------------------------------- */
// The whole.

static int64_t fsdpi_dt_more(int64_t a, int64_t b) { // a + b, at most FSDPI_DT_MOST
    return a > FSDPI_DT_MOST - b ? FSDPI_DT_MOST : a + b;
}

// Writes the steps of a list of moves. Returns the cost.
static int64_t fsdpi_dt_write(const fsdpi_dt_search *f, const uint16_t *moves, int num,
                              fsdp_route *r) {
    uint64_t state = f->start;
    int64_t ps = 0;
    memset(r, 0, sizeof *r);
    r->most_bytes = fsdpi_dt_bytes(f, f->goal, -1, 1, -1);
    int64_t first = fsdpi_dt_bytes(f, f->start, -1, 1, -1);
    if (first > r->most_bytes) r->most_bytes = first;
    for (int k = 0; k < num; k++) {
        fsdp_step *s = &r->steps[r->num_steps++];
        int i = fsdpi_dt_code_dim(moves[k]), to = fsdpi_dt_code_to(moves[k]);
        fsdpi_dt_cost cost = fsdpi_dt_price(f, state, i, to);
        s->kind = cost.kind, s->mesh_dim = f->mesh_dim[i];
        s->from = fsdpi_dt_place_of(f, i, fsdpi_dt_get(state, i));
        s->to = fsdpi_dt_place_of(f, i, to);
        s->cost_us = (double)cost.ps / 1e6, s->wire_bytes = cost.wire;
        ps += cost.ps;
        r->num_collectives += fsdpi_dt_is_collective(cost.kind);
        r->wire_bytes = fsdpi_dt_more(r->wire_bytes, cost.wire);
        if (cost.most > r->most_bytes) r->most_bytes = cost.most;
        state = fsdpi_dt_set(state, i, to);
    }
    r->cost_us = (double)ps / 1e6;
    return ps;
}

// The first mesh dim whose addends cannot come about on the way, or -1.
static int fsdpi_dt_no_way(const fsdp_spec *from, const fsdp_spec *to) {
    for (int m = 0; m < to->mesh_ndim; m++) {
        const fsdp_placement *a = &from->place[m], *b = &to->place[m];
        if (b->kind != FSDP_PARTIAL) continue;
        if (a->kind == FSDP_PARTIAL ? a->op != b->op : b->op != FSDP_SUM) return m;
    }
    return -1;
}

static int fsdpi_dt_cost_is_bad(double x) { return !(x >= 0 && x <= 1e15); }

static fsdp_status fsdpi_dt_read_links(const char *call, const fsdp_links *given, fsdp_links *l) {
    memset(l, 0, sizeof *l);
    if (given) *l = *given;
    int bad = fsdpi_dt_cost_is_bad(l->base_us);
    if (l->base_us == 0) l->base_us = 6.6;
    for (int m = 0; m < FSDP_MAX_DIMS; m++) {
        bad |= fsdpi_dt_cost_is_bad(l->hop_us[m]) || fsdpi_dt_cost_is_bad(l->gbytes_per_s[m]);
        if (l->hop_us[m] == 0) l->hop_us[m] = 0.6;
        if (l->gbytes_per_s[m] == 0) l->gbytes_per_s[m] = 87.7;
    }
    if (!bad) return FSDP_OK;
    return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                         "[E175] %s: a number of fsdp_links is negative or not finite: pass 0 for "
                         "the default",
                         call);
}

// From one spec to another that are known to be on the same mesh and to have a way. links: read.
static fsdp_status fsdpi_dt_route(const fsdp_spec *from, const fsdp_spec *to,
                                  const fsdp_links *links, void *scratch, int64_t bytes,
                                  fsdp_route *route, int64_t *ps) {
    fsdpi_dt_search f;
    uint16_t moves[FSDP_ROUTE_STEPS];
    memset(&f, 0, sizeof f);
    f.spec = from, f.links = *links;
    for (int m = 0; m < from->mesh_ndim; m++) {
        if (from->mesh_shape[m] == 1) continue;
        const fsdp_placement *p = &from->place[m];
        f.mesh_dim[f.dims] = m, f.ranks[f.dims] = from->mesh_shape[m];
        f.op[f.dims++] = p->kind == FSDP_PARTIAL ? p->op : to->place[m].op;
    }
    f.start = fsdpi_dt_state_of(&f, from), f.goal = fsdpi_dt_state_of(&f, to);
    int greedy = links->greedy && fsdpi_dt_is_plain(&f, f.start) && fsdpi_dt_is_plain(&f, f.goal);
    int num = greedy              ? fsdpi_dt_greedy(&f, moves)
              : f.start == f.goal ? 0
                                  : fsdpi_dt_cheapest(&f, scratch, bytes, moves);
    if (num < 0) {
        int64_t table, need = fsdpi_dt_scratch(fsdpi_dt_states(f.dims, from->ndim), &table);
        return fsdpi_dt_fail(
            FSDP_ERR_OUT_OF_MEMORY,
            "[E176] route_find: %lld bytes of scratch are too few for %d mesh dims "
            "and a tensor of %d dims: pass more; %lld are always enough",
            (long long)bytes, f.dims, from->ndim, (long long)need);
    }
    *ps = fsdpi_dt_write(&f, moves, num, route);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_route_find(const fsdp_spec *from, const fsdp_spec *to,
                                     const fsdp_links *links, void *scratch, int64_t scratch_bytes,
                                     fsdp_route *route) {
    fsdp_links l;
    int64_t ps;
    fsdp_status status = fsdpi_dt_known("route_find", from);
    if (!status) status = fsdpi_dt_known("route_find", to);
    if (!status) status = fsdpi_dt_read_links("route_find", links, &l);
    if (status) return status;
    if (!scratch || ((uintptr_t)scratch & 7) || !route)
        return fsdpi_dt_fail(
            FSDP_ERR_INVALID_ARG,
            "[E177] route_find: scratch or route is NULL, or scratch is not aligned "
            "to 8 bytes: pass both");
    if (from->mesh_ndim != to->mesh_ndim || from->ndim != to->ndim || from->dtype != to->dtype ||
        memcmp(from->mesh_shape, to->mesh_shape, sizeof from->mesh_shape) != 0 ||
        memcmp(from->shape, to->shape, sizeof from->shape) != 0)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E178] route_find: the specs differ in mesh, shape or dtype: only "
                             "placements can change");
    int m = fsdpi_dt_no_way(from, to);
    if (m >= 0)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E179] route_find: the target is PARTIAL in mesh dim %d, and the "
                             "source is neither the same nor, for SUM, SHARD or REPLICATE: "
                             "redistribute to REPLICATE or SHARD instead",
                             m);
    return fsdpi_dt_route(from, to, &l, scratch, scratch_bytes, route, &ps);
}


/* ==== dtensor/loss.h ========================================================================
   the local loops of a cross-entropy whose classes are cut over the ranks */

// Source: torch/distributed/tensor/parallel/loss.py. There a rank without classes fails alone; here
// it joins with -infinity and 0.

// Infinities and NaN have a meaning here, whatever the program is compiled with.
#if defined(__clang__)
#pragma float_control(precise, on, push)
#elif defined(__GNUC__)
#pragma GCC push_options
#pragma GCC optimize("no-fast-math")
#endif

enum { FSDPI_DT_BLOCK = 256 }; // elements that are converted at a time

typedef struct fsdpi_dt_logits {
    const char *at; // of the next element
    fsdp_dtype dtype;
    int64_t rows, cols, first;
    double block[FSDPI_DT_BLOCK];
} fsdpi_dt_logits;

static fsdp_status fsdpi_dt_logits_begin(fsdpi_dt_logits *l, const char *call, const void *logits,
                                         fsdp_dtype dtype, int64_t rows, int64_t cols,
                                         int64_t first) {
    l->at = (const char *)logits, l->dtype = dtype;
    l->rows = rows, l->cols = cols, l->first = first;
    if (!fsdp_dtype_is_float(dtype))
        return fsdpi_dt_fail(
            FSDP_ERR_INVALID_ARG,
            "[E194] %s: dtype %d is no floating one: pass FSDP_F32, F64, F16 or BF16", call,
            (int)dtype);
    if (rows < 0 || cols < 0 || first < 0 || first > FSDPI_DT_MOST ||
        fsdpi_dt_mul(rows, cols, FSDPI_DT_MOST / 8) > FSDPI_DT_MOST / 8)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E195] %s: %lld rows of %lld classes from %lld on: pass sizes >= 0",
                             call, (long long)rows, (long long)cols, (long long)first);
    return FSDP_OK;
}

static fsdp_status fsdpi_dt_loss_null(const char *call) {
    return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                         "[E196] %s: an array is NULL that has elements: pass all arrays", call);
}

// The next elements of a row of which `left` are left, at most a block. Returns their number.
static int fsdpi_dt_logits_next(fsdpi_dt_logits *l, int64_t left) {
    int count = left < FSDPI_DT_BLOCK ? (int)left : FSDPI_DT_BLOCK;
    (void)fsdp_convert(l->block, FSDP_F64, l->at, l->dtype, count); // arguments have been checked
    l->at += (size_t)count * fsdp_dtype_size(l->dtype);
    return count;
}

// Where the target of a row is among this rank's classes; -1: on another rank, or nowhere.
static int64_t fsdpi_dt_target(const fsdpi_dt_logits *l, int64_t target) {
    return target >= l->first && target - l->first < l->cols ? target - l->first : -1;
}

FSDP_API fsdp_status fsdp_loss_parallel_max(const void *logits, fsdp_dtype dtype, int64_t rows,
                                            int64_t cols, float *max) {
    fsdpi_dt_logits l;
    fsdp_status status = fsdpi_dt_logits_begin(&l, "loss_parallel_max", logits, dtype, rows, cols,
                                               0);
    if (status) return status;
    if (rows && (!max || (cols && !logits))) return fsdpi_dt_loss_null("loss_parallel_max");
    for (int64_t i = 0; i < rows; i++) {
        double most = -HUGE_VAL;
        for (int64_t left = cols; left > 0;) {
            int count = fsdpi_dt_logits_next(&l, left);
            for (int k = 0; k < count; k++) // NaN stays
                if (l.block[k] > most || l.block[k] != l.block[k]) most = l.block[k];
            left -= count;
        }
        max[i] = (float)most;
    }
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_loss_parallel_sums(const void *logits, fsdp_dtype dtype, int64_t rows,
                                             int64_t cols, int64_t first, const int64_t *targets,
                                             const float *max, float *sums) {
    fsdpi_dt_logits l;
    fsdp_status status = fsdpi_dt_logits_begin(&l, "loss_parallel_sums", logits, dtype, rows, cols,
                                               first);
    if (status) return status;
    if (rows && (!targets || !max || !sums || (cols && !logits)))
        return fsdpi_dt_loss_null("loss_parallel_sums");
    for (int64_t i = 0; i < rows; i++) {
        double sum = 0, hit = 0;
        int64_t target = fsdpi_dt_target(&l, targets[i]), at = 0;
        while (at < cols) {
            int count = fsdpi_dt_logits_next(&l, cols - at);
            for (int k = 0; k < count; k++) sum += exp(l.block[k] - (double)max[i]);
            if (target >= at && target < at + count) hit = l.block[target - at] - (double)max[i];
            at += count;
        }
        sums[i] = (float)sum, sums[rows + i] = (float)hit;
    }
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_loss_parallel_grad(void *grad, const void *logits, fsdp_dtype dtype,
                                             int64_t rows, int64_t cols, int64_t first,
                                             const int64_t *targets, const float *max,
                                             const float *sums, const float *dout) {
    fsdpi_dt_logits l;
    char *out = (char *)grad;
    fsdp_status status = fsdpi_dt_logits_begin(&l, "loss_parallel_grad", logits, dtype, rows, cols,
                                               first);
    if (status) return status;
    if (rows && (!targets || !max || !sums || !dout || (cols && (!logits || !grad))))
        return fsdpi_dt_loss_null("loss_parallel_grad");
    for (int64_t i = 0; i < rows; i++) {
        int64_t target = fsdpi_dt_target(&l, targets[i]), at = 0;
        double scale = (double)dout[i];
        while (at < cols) {
            int count = fsdpi_dt_logits_next(&l, cols - at);
            for (int k = 0; k < count; k++) { // a row without a gradient has none, also beside NaN
                double p = exp(l.block[k] - (double)max[i]) / (double)sums[i] - (at + k == target);
                l.block[k] = scale == 0 ? 0 : p * scale;
            }
            (void)fsdp_convert(out, dtype, l.block, FSDP_F64, count);
            out += (size_t)count * fsdp_dtype_size(dtype);
            at += count;
        }
    }
    return FSDP_OK;
}

#if defined(__clang__)
#pragma float_control(pop)
#elif defined(__GNUC__)
#pragma GCC pop_options
#endif


/* ==== dtensor/propagate.h ===================================================================
   what an operation on distributed tensors needs and gives */

// An operation is a list of rows. A row says for one mesh dim what the output is if the inputs are
// such; mesh dims are independent of each other. The first row of each list is the trivial one, all
// whole. Source: torch/distributed/tensor/_ops, _sharding_prop.py.

enum { FSDPI_DT_WHOLE = -1, FSDPI_DT_ADDS = -2 }; // of a row; >= 0: cut along this dim
enum { FSDPI_DT_MASKED = 1, FSDPI_DT_EVEN = 2, FSDPI_DT_MEAN = 4 }; // flags of a row
enum { FSDPI_DT_ROWS = 24, FSDPI_DT_STACK = 128 << 10 };

typedef struct fsdpi_dt_row {
    int8_t out, in[FSDP_TENSOR_OP_INPUTS], flags;
} fsdpi_dt_row;

typedef struct fsdpi_dt_op {
    int op, num_in, num_rows, ndim; // ndim, shape: of the output
    int mesh_ndim;
    const fsdp_spec *const *in;
    fsdp_tensor_op_args args;
    int64_t shape[FSDP_MAX_DIMS];
    fsdpi_dt_row rows[FSDPI_DT_ROWS];
    int order[FSDP_MAX_DIMS]; // of this candidate: mesh dims in the order in which they cut
    const fsdpi_dt_row *chosen[FSDP_MAX_DIMS];
    fsdp_links links;
    int64_t best_ps;
    int best_changes, best_adds, found;
} fsdpi_dt_op;

static fsdpi_dt_row *fsdpi_dt_add(fsdpi_dt_op *o, int out, int a, int b, int c) {
    fsdpi_dt_row *r = &o->rows[o->num_rows++];
    r->out = (int8_t)out, r->flags = 0;
    r->in[0] = (int8_t)a, r->in[1] = (int8_t)b, r->in[2] = (int8_t)c, r->in[3] = (int8_t)c;
    return r;
}

static int64_t fsdpi_dt_size(const fsdpi_dt_op *o, int input, int dim) {
    return o->in[input]->shape[dim];
}

/* -------------------------------------------------------------------------------------------- */
// The rows of each operation, and the shape of its output. They return 0 if the inputs do not fit.

static int fsdpi_dt_rows_mm(fsdpi_dt_op *o) {
    const int R = FSDPI_DT_WHOLE, P = FSDPI_DT_ADDS, batch = o->op == FSDP_TENSOR_OP_BMM;
    int m = batch, k = batch + 1; // dims of x; k is also the last one of y
    if (o->num_in != 2 || o->in[0]->ndim != k + 1 || o->in[1]->ndim != k + 1) return 0;
    if (fsdpi_dt_size(o, 0, k) != fsdpi_dt_size(o, 1, m)) return 0;
    if (batch && fsdpi_dt_size(o, 0, 0) != fsdpi_dt_size(o, 1, 0)) return 0;
    o->ndim = k + 1;
    memcpy(o->shape, o->in[0]->shape, sizeof o->shape);
    o->shape[k] = fsdpi_dt_size(o, 1, k);
    if (batch) fsdpi_dt_add(o, 0, 0, 0, R);
    fsdpi_dt_add(o, P, k, m, R);
    fsdpi_dt_add(o, m, m, R, R);
    fsdpi_dt_add(o, k, R, k, R);
    fsdpi_dt_add(o, P, P, R, R);
    fsdpi_dt_add(o, P, R, P, R);
    return 1;
}

static int fsdpi_dt_rows_linear(fsdpi_dt_op *o) {
    const int R = FSDPI_DT_WHOLE, P = FSDPI_DT_ADDS;
    if (o->num_in < 2 || o->num_in > 3 || o->in[0]->ndim < 1 || o->in[1]->ndim != 2) return 0;
    int k = o->in[0]->ndim - 1;
    int64_t n = fsdpi_dt_size(o, 1, 0);
    if (fsdpi_dt_size(o, 0, k) != fsdpi_dt_size(o, 1, 1)) return 0;
    if (o->num_in == 3 && (o->in[2]->ndim != 1 || fsdpi_dt_size(o, 2, 0) != n)) return 0;
    o->ndim = k + 1;
    memcpy(o->shape, o->in[0]->shape, sizeof o->shape);
    o->shape[k] = n;
    fsdpi_dt_add(o, P, k, 1, P);
    for (int d = 0; d < k; d++) fsdpi_dt_add(o, d, d, R, R);
    fsdpi_dt_add(o, k, R, 0, 0);
    fsdpi_dt_add(o, P, P, R, P);
    fsdpi_dt_add(o, P, R, P, P);
    return 1;
}

static int fsdpi_dt_rows_binary(fsdpi_dt_op *o) {
    const int R = FSDPI_DT_WHOLE, P = FSDPI_DT_ADDS;
    int lacks = o->num_in == 2 ? o->in[0]->ndim - o->in[1]->ndim : -1;
    if (lacks < 0) return 0;
    o->ndim = o->in[0]->ndim;
    memcpy(o->shape, o->in[0]->shape, sizeof o->shape);
    for (int d = 0; d < o->ndim; d++) {
        int64_t size = d < lacks ? 1 : fsdpi_dt_size(o, 1, d - lacks);
        if (size != 1 && size != o->shape[d]) return 0;
        fsdpi_dt_add(o, d, d, d >= lacks && size == o->shape[d] ? d - lacks : R, R);
    }
    if (o->op == FSDP_TENSOR_OP_ADD) fsdpi_dt_add(o, P, P, P, R);
    else fsdpi_dt_add(o, P, P, R, R), fsdpi_dt_add(o, P, R, P, R);
    return 1;
}

// Each element, or each row of the last dims, on its own. Weights are whole.
static int fsdpi_dt_rows_each(fsdpi_dt_op *o) {
    const int R = FSDPI_DT_WHOLE, P = FSDPI_DT_ADDS;
    int most = o->op == FSDP_TENSOR_OP_LAYER_NORM ? 3 : o->op == FSDP_TENSOR_OP_RMS_NORM ? 2 : 1;
    int each = o->op == FSDP_TENSOR_OP_SCALE || o->op == FSDP_TENSOR_OP_POINTWISE;
    int last = each ? 0 : o->args.num_dims ? o->args.num_dims : 1;
    if (o->num_in < 1 || o->num_in > most || last < 0 || last > o->in[0]->ndim) return 0;
    o->ndim = o->in[0]->ndim;
    memcpy(o->shape, o->in[0]->shape, sizeof o->shape);
    for (int i = 1; i < o->num_in; i++) {
        if (o->in[i]->ndim != last) return 0;
        for (int d = 0; d < last; d++)
            if (fsdpi_dt_size(o, i, d) != o->shape[o->ndim - last + d]) return 0;
    }
    for (int d = 0; d < o->ndim - last; d++) fsdpi_dt_add(o, d, d, R, R);
    if (o->op == FSDP_TENSOR_OP_SCALE) fsdpi_dt_add(o, P, P, R, R);
    return 1;
}

static int fsdpi_dt_rows_transpose(fsdpi_dt_op *o) {
    int seen = 0;
    o->ndim = o->in[0]->ndim;
    if (o->num_in != 1 || (o->args.num_dims ? o->args.num_dims != o->ndim : o->ndim < 2)) return 0;
    for (int d = 0; d < o->ndim; d++) {
        int64_t from = o->args.num_dims  ? o->args.shape[d]
                       : d < o->ndim - 2 ? d
                                         : 2 * o->ndim - 3 - d;
        if (from < 0 || from >= o->ndim || seen >> from & 1) return 0;
        seen |= 1 << from;
        o->shape[d] = fsdpi_dt_size(o, 0, (int)from);
        fsdpi_dt_add(o, d, (int)from, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    }
    fsdpi_dt_add(o, FSDPI_DT_ADDS, FSDPI_DT_ADDS, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    return 1;
}

static int fsdpi_dt_rows_slice(fsdpi_dt_op *o) {
    int dim = o->args.dim < 0 ? o->args.dim + o->in[0]->ndim : o->args.dim;
    o->ndim = o->in[0]->ndim;
    if (o->num_in != 1 || dim < 0 || dim >= o->ndim || o->args.num_dims != 1) return 0;
    if (o->args.shape[0] < 0 || o->args.shape[0] > fsdpi_dt_size(o, 0, dim)) return 0;
    memcpy(o->shape, o->in[0]->shape, sizeof o->shape);
    o->shape[dim] = o->args.shape[0];
    for (int d = 0; d < o->ndim; d++)
        if (d != dim || o->shape[d] == fsdpi_dt_size(o, 0, d))
            fsdpi_dt_add(o, d, d, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    fsdpi_dt_add(o, FSDPI_DT_ADDS, FSDPI_DT_ADDS, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    return 1;
}

// The first dim of more than one element in [begin, end), or -1.
static int fsdpi_dt_first(const int64_t *shape, int begin, int end) {
    while (begin < end && shape[begin] == 1) begin++;
    return begin < end ? begin : -1;
}

// Dims fall into groups of equal size on both sides. Of a group the first dims correspond. Parts
// are the same elements if the first dims are equal, or both are cut evenly.
static int fsdpi_dt_rows_reshape(fsdpi_dt_op *o) {
    const int64_t *a = o->in[0]->shape, *b = o->shape;
    int na = o->in[0]->ndim, i = 0, k = 0;
    if (o->num_in != 1 || o->args.num_dims < 0 || o->args.num_dims > FSDP_MAX_DIMS) return 0;
    o->ndim = o->args.num_dims;
    for (int d = 0; d < o->ndim; d++)
        if ((o->shape[d] = o->args.shape[d]) < 0) return 0;
    int64_t numel = fsdpi_dt_numel(na, a);
    if (numel != fsdpi_dt_numel(o->ndim, b)) return 0;
    while (numel && i < na && k < o->ndim) {
        int begin_a = i, begin_b = k;
        int64_t size_a = a[i++], size_b = b[k++];
        while (size_a != size_b)
            if (size_a < size_b) size_a *= a[i++];
            else size_b *= b[k++];
        int from = fsdpi_dt_first(a, begin_a, i), to = fsdpi_dt_first(b, begin_b, k);
        if (from < 0) continue;
        fsdpi_dt_row *r = fsdpi_dt_add(o, to, from, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
        if (a[from] != b[to]) r->flags = FSDPI_DT_EVEN;
    }
    fsdpi_dt_add(o, FSDPI_DT_ADDS, FSDPI_DT_ADDS, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    return 1;
}

static int fsdpi_dt_rows_sum(fsdpi_dt_op *o) {
    int gone = 0, ndim = o->in[0]->ndim, mean = o->op == FSDP_TENSOR_OP_MEAN;
    if (o->num_in != 1 || o->args.num_dims < 0 || o->args.num_dims > ndim) return 0;
    for (int i = 0; i < o->args.num_dims; i++) {
        int64_t d = o->args.shape[i] < 0 ? o->args.shape[i] + ndim : o->args.shape[i];
        if (d < 0 || d >= ndim || gone >> d & 1) return 0;
        gone |= 1 << d;
    }
    if (!o->args.num_dims) gone = (1 << ndim) - 1;
    for (int d = 0; d < ndim; d++) {
        int goes = gone >> d & 1;
        fsdpi_dt_row *r = fsdpi_dt_add(o, goes ? FSDPI_DT_ADDS : o->ndim, d, FSDPI_DT_WHOLE,
                                       FSDPI_DT_WHOLE);
        if (goes && mean) r->flags = FSDPI_DT_EVEN | FSDPI_DT_MEAN;
        if (!goes) o->shape[o->ndim++] = fsdpi_dt_size(o, 0, d);
    }
    fsdpi_dt_add(o, FSDPI_DT_ADDS, FSDPI_DT_ADDS, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    return 1;
}

static int fsdpi_dt_rows_cat(fsdpi_dt_op *o) {
    int dim = o->args.dim < 0 ? o->args.dim + o->in[0]->ndim : o->args.dim;
    o->ndim = o->in[0]->ndim;
    if (dim < 0 || dim >= o->ndim) return 0;
    memcpy(o->shape, o->in[0]->shape, sizeof o->shape);
    for (int i = 1; i < o->num_in; i++) {
        if (o->in[i]->ndim != o->ndim) return 0;
        for (int d = 0; d < o->ndim; d++)
            if (d != dim && fsdpi_dt_size(o, i, d) != o->shape[d]) return 0;
        o->shape[dim] += fsdpi_dt_size(o, i, dim);
    }
    for (int d = 0; d < o->ndim; d++)
        if (d != dim) fsdpi_dt_add(o, d, d, d, d);
    fsdpi_dt_add(o, FSDPI_DT_ADDS, FSDPI_DT_ADDS, FSDPI_DT_ADDS, FSDPI_DT_ADDS);
    return 1;
}

static int fsdpi_dt_rows_embedding(fsdpi_dt_op *o) {
    const int R = FSDPI_DT_WHOLE;
    if (o->num_in != 2 || o->in[0]->ndim != 2 || o->in[1]->ndim >= FSDP_MAX_DIMS) return 0;
    int last = o->in[1]->ndim;
    o->ndim = last + 1;
    memcpy(o->shape, o->in[1]->shape, sizeof o->shape);
    o->shape[last] = fsdpi_dt_size(o, 0, 1);
    fsdpi_dt_add(o, last, 1, R, R);
    fsdpi_dt_add(o, FSDPI_DT_ADDS, 0, R, R)->flags = FSDPI_DT_MASKED;
    for (int d = 0; d < last; d++) fsdpi_dt_add(o, d, R, d, R);
    return 1;
}

static int fsdpi_dt_rows(fsdpi_dt_op *o) {
    fsdpi_dt_add(o, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    switch (o->op) {
    case FSDP_TENSOR_OP_MM:
    case FSDP_TENSOR_OP_BMM: return fsdpi_dt_rows_mm(o);
    case FSDP_TENSOR_OP_LINEAR: return fsdpi_dt_rows_linear(o);
    case FSDP_TENSOR_OP_ADD:
    case FSDP_TENSOR_OP_MUL: return fsdpi_dt_rows_binary(o);
    case FSDP_TENSOR_OP_TRANSPOSE: return fsdpi_dt_rows_transpose(o);
    case FSDP_TENSOR_OP_SLICE: return fsdpi_dt_rows_slice(o);
    case FSDP_TENSOR_OP_RESHAPE: return fsdpi_dt_rows_reshape(o);
    case FSDP_TENSOR_OP_SUM:
    case FSDP_TENSOR_OP_MEAN: return fsdpi_dt_rows_sum(o);
    case FSDP_TENSOR_OP_CAT: return fsdpi_dt_rows_cat(o);
    case FSDP_TENSOR_OP_EMBEDDING: return fsdpi_dt_rows_embedding(o);
    default: return fsdpi_dt_rows_each(o);
    }
}

/* -------------------------------------------------------------------------------------------- */
// Candidates: a row for each mesh dim, and an order of cuts.

// Operations that only move elements go with addends of any op, the others with sums.
static int fsdpi_dt_moves_only(int op) {
    return op == FSDP_TENSOR_OP_TRANSPOSE || op == FSDP_TENSOR_OP_SLICE ||
           op == FSDP_TENSOR_OP_RESHAPE || op == FSDP_TENSOR_OP_CAT;
}

// How inputs that hold addends in mesh dim m are joined: as the first one that is given so.
static int fsdpi_dt_op_of(const fsdpi_dt_op *o, int m) {
    for (int i = 0; i < o->num_in; i++)
        if (o->chosen[m]->in[i] == FSDPI_DT_ADDS && o->in[i]->place[m].kind == FSDP_PARTIAL)
            return o->in[i]->place[m].op;
    return FSDP_SUM;
}

// What a row says of input i, or of the output (-1).
static int fsdpi_dt_code_of(const fsdpi_dt_row *r, int i) { return i < 0 ? r->out : r->in[i]; }

// The spec of input i, or of the output (-1), with the rows that are chosen.
static void fsdpi_dt_spec_of(const fsdpi_dt_op *o, int i, fsdp_spec *s) {
    int8_t cuts[FSDP_MAX_DIMS];
    const fsdp_spec *like = o->in[i < 0 ? 0 : i];
    memset(cuts, 0, sizeof cuts);
    *s = *like;
    memset(s->place, 0, sizeof s->place);
    if (i < 0) s->ndim = o->ndim, memcpy(s->shape, o->shape, sizeof s->shape);
    for (int k = 0; k < s->mesh_ndim; k++) {
        int m = o->order[k], code = fsdpi_dt_code_of(o->chosen[m], i);
        fsdp_placement *p = &s->place[m];
        if (code == FSDPI_DT_ADDS) {
            int mean = i < 0 && (o->chosen[m]->flags & FSDPI_DT_MEAN);
            p->kind = FSDP_PARTIAL, p->op = (int8_t)(mean ? FSDP_AVG : fsdpi_dt_op_of(o, m));
        } else if (code >= 0) {
            p->kind = FSDP_SHARD, p->dim = (int8_t)code, p->order = cuts[code]++;
        }
    }
}

static int64_t fsdpi_dt_pieces(const fsdp_spec *s, int dim) {
    int64_t pieces = 1;
    for (int m = 0; m < s->mesh_ndim; m++)
        if (fsdpi_dt_cuts(&s->place[m], dim)) pieces *= s->mesh_shape[m];
    return pieces;
}

// Do addends of different mesh dims commute?
static int fsdpi_dt_adds_fit(const fsdp_spec *s) {
    for (int m = 0; m < s->mesh_ndim; m++)
        if (s->place[m].kind == FSDP_PARTIAL && fsdpi_dt_other_op(s, s->place[m].op, m) >= 0)
            return 0;
    return 1;
}

// May input i, given so, be brought to what the rows need? A part with zeros around costs nothing
// here and much in the next operation: what is cut does not become addends.
static int fsdpi_dt_fits(const fsdpi_dt_op *o, int i, const fsdp_spec *need) {
    const fsdp_spec *given = o->in[i];
    if (fsdpi_dt_no_way(given, need) >= 0 || !fsdpi_dt_adds_fit(need)) return 0;
    for (int m = 0; m < need->mesh_ndim; m++) {
        const fsdp_placement *p = &need->place[m];
        if (p->kind == FSDP_PARTIAL && (given->place[m].kind == FSDP_SHARD ||
                                        (!fsdpi_dt_sums(p->op) && !fsdpi_dt_moves_only(o->op))))
            return 0;
        if (p->kind != FSDP_SHARD) continue;
        int64_t pieces = fsdpi_dt_pieces(need, p->dim), size = need->shape[p->dim];
        if (!fsdpi_dt_cuts(&given->place[m], p->dim) && size < pieces) return 0;
        if ((o->chosen[m]->flags & FSDPI_DT_EVEN) && size % pieces) return 0;
    }
    return 1;
}

// The output of a reshape has to be cut evenly, too.
static int fsdpi_dt_out_fits(const fsdpi_dt_op *o, const fsdp_spec *out) {
    for (int m = 0; m < out->mesh_ndim; m++)
        if ((o->chosen[m]->flags & FSDPI_DT_EVEN) && out->place[m].kind == FSDP_SHARD &&
            out->shape[out->place[m].dim] % fsdpi_dt_pieces(out, out->place[m].dim))
            return 0;
    return fsdpi_dt_adds_fit(out);
}

// How the gradient of input i arrives: cut as the input is. A whole input beside one that is cut,
// or that holds addends, gets an addend from each rank.
static void fsdpi_dt_grad_of(const fsdpi_dt_op *o, int i, fsdp_spec *grad) {
    for (int m = 0; m < grad->mesh_ndim; m++) {
        fsdp_placement *p = &grad->place[m];
        if (p->kind == FSDP_SHARD) continue;
        int adds = p->kind == FSDP_REPLICATE && o->chosen[m] != o->rows;
        memset(p, 0, sizeof *p);
        if (adds) p->kind = FSDP_PARTIAL;
    }
    if (o->op == FSDP_TENSOR_OP_EMBEDDING && i == 1) memset(grad, 0, sizeof *grad); // integers
}

// Compares the candidate with the best one so far, and keeps the better one.
static fsdp_status fsdpi_dt_weigh(fsdpi_dt_op *o, void *scratch, fsdp_propagation *best) {
    fsdp_propagation c;
    fsdp_route route;
    int changes = 0, adds = 0;
    int64_t sum = 0;
    memset(&c, 0, sizeof c);
    fsdpi_dt_spec_of(o, -1, &c.out);
    if (!fsdpi_dt_out_fits(o, &c.out)) return FSDP_OK;
    for (int i = 0; i < o->num_in; i++) {
        fsdpi_dt_spec_of(o, i, &c.in[i]);
        if (!fsdpi_dt_fits(o, i, &c.in[i])) return FSDP_OK;
        for (int m = 0; m < o->mesh_ndim; m++)
            changes += memcmp(&o->in[i]->place[m], &c.in[i].place[m], sizeof c.in[i].place[m]) != 0;
        c.grad[i] = c.in[i];
        fsdpi_dt_grad_of(o, i, &c.grad[i]);
    }
    for (int i = 0; i < o->num_in; i++) {
        int64_t ps = 0;
        if (!memcmp(o->in[i], &c.in[i], sizeof c.in[i])) continue;
        fsdp_status status = fsdpi_dt_route(o->in[i], &c.in[i], &o->links, scratch, FSDPI_DT_STACK,
                                            &route, &ps);
        if (status) return status;
        sum += ps;
    }
    for (int m = 0; m < o->mesh_ndim; m++) {
        adds += c.out.place[m].kind == FSDP_PARTIAL;
        c.masked |= o->chosen[m]->flags & FSDPI_DT_MASKED;
    }
    int better = sum != o->best_ps            ? sum < o->best_ps
                 : changes != o->best_changes ? changes < o->best_changes
                                              : adds < o->best_adds;
    if (o->found && !better) return FSDP_OK;
    o->found = 1, o->best_ps = sum, o->best_changes = changes, o->best_adds = adds;
    c.cost_us = (double)sum / 1e6, c.num_in = o->num_in;
    *best = c;
    return fsdpi_dt_check_sizes("propagate", o->mesh_ndim, o->in[0]->mesh_shape, o->in[0]->dtype,
                                o->ndim, o->shape);
}

// May a row be taken for mesh dim m? Only if an input is already so; the trivial one always.
static int fsdpi_dt_is_open(const fsdpi_dt_op *o, const fsdpi_dt_row *r, int m) {
    for (int i = 0; i < o->num_in; i++) {
        const fsdp_placement *p = &o->in[i]->place[m];
        if (r->in[i] == FSDPI_DT_ADDS && p->kind == FSDP_PARTIAL) return 1;
        if (r->in[i] >= 0 && fsdpi_dt_cuts(p, r->in[i])) return 1;
    }
    return r == o->rows;
}

// All choices of rows, the last mesh dim moves first.
static fsdp_status fsdpi_dt_choose(fsdpi_dt_op *o, void *scratch, fsdp_propagation *best) {
    int m = 0;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < o->mesh_ndim; i++) o->chosen[i] = o->rows;
    while (m >= 0 && !status) {
        status = fsdpi_dt_weigh(o, scratch, best);
        for (m = o->mesh_ndim - 1; m >= 0; m--) {
            const fsdpi_dt_row *end = o->rows + o->num_rows;
            do o->chosen[m]++;
            while (o->chosen[m] < end && !fsdpi_dt_is_open(o, o->chosen[m], m));
            if (o->chosen[m] < end) break;
            o->chosen[m] = o->rows;
        }
    }
    return status;
}

// An order of all mesh dims in which the cuts of each dim of a spec stand as they are made: again
// and again the leftmost one whose earlier cuts have been taken.
static void fsdpi_dt_order(const fsdp_spec *s, int *order) {
    int taken = 0;
    for (int k = 0; k < s->mesh_ndim; k++)
        for (int m = 0; m < s->mesh_ndim; m++) {
            int ready = !(taken >> m & 1);
            for (int q = 0; q < s->mesh_ndim && s->place[m].kind == FSDP_SHARD; q++)
                if (fsdpi_dt_cuts(&s->place[q], s->place[m].dim) &&
                    s->place[q].order < s->place[m].order)
                    ready &= taken >> q & 1;
            if (!ready) continue;
            order[k] = m, taken |= 1 << m;
            break;
        }
}

static const char *fsdpi_dt_op_name(int op) {
    static const char *const names[FSDP_TENSOR_OP_COUNT] = {
#define FSDP_X(name, text) text,
        FSDP_TENSOR_OP_LIST(FSDP_X)
#undef FSDP_X
    };
    return names[op];
}

static fsdp_status fsdpi_dt_op_begin(fsdpi_dt_op *o, const fsdp_tensor_op_args *args) {
    if (args) o->args = *args;
    for (int i = 0; i < o->num_in; i++) {
        fsdp_status status = fsdpi_dt_known("propagate", o->in[i]);
        if (status) return status;
        if (o->in[i]->mesh_ndim != o->in[0]->mesh_ndim ||
            memcmp(o->in[i]->mesh_shape, o->in[0]->mesh_shape, sizeof o->in[0]->mesh_shape) != 0)
            return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                                 "[E198] propagate: inputs 0 and %d of %s are on different meshes: "
                                 "bring them to one",
                                 i, fsdpi_dt_op_name(o->op));
    }
    o->mesh_ndim = o->in[0]->mesh_ndim;
    if (!fsdpi_dt_rows(o))
        return fsdpi_dt_fail(
            FSDP_ERR_INVALID_ARG,
            "[E199] propagate: %d inputs of these shapes and args do not fit %s: see "
            "FSDP_TENSOR_OP_LIST",
            o->num_in, fsdpi_dt_op_name(o->op));
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_propagate(int op, const fsdp_spec *const *in, int num_in,
                                    const fsdp_tensor_op_args *args, const fsdp_links *links,
                                    fsdp_propagation *out) {
    int64_t scratch[FSDPI_DT_STACK / sizeof(int64_t)];
    fsdpi_dt_op o;
    fsdp_propagation best;
    memset(&o, 0, sizeof o), memset(&best, 0, sizeof best);
    if (op < 0 || op >= FSDP_TENSOR_OP_COUNT)
        return fsdpi_dt_fail(FSDP_ERR_UNSUPPORTED,
                             "[E172] propagate: there is no op %d: pass FSDP_TENSOR_OP_MM, ...",
                             op);
    if (!in || !out || num_in < 1 || num_in > FSDP_TENSOR_OP_INPUTS)
        return fsdpi_dt_fail(
            FSDP_ERR_INVALID_ARG,
            "[E197] propagate: in or out is NULL, or %d is no number of inputs: pass "
            "1..%d of them",
            num_in, FSDP_TENSOR_OP_INPUTS);
    o.op = op, o.in = in, o.num_in = num_in;
    fsdp_status status = fsdpi_dt_op_begin(&o, args);
    if (!status) status = fsdpi_dt_read_links("propagate", links, &o.links);
    for (int i = 0; i < num_in && !status; i++) { // the orders that inputs have, each once
        int known[FSDP_MAX_DIMS], again = i > 0;
        memcpy(known, o.order, sizeof known);
        fsdpi_dt_order(in[i], o.order);
        again = again && !memcmp(known, o.order, sizeof known);
        if (!again) status = fsdpi_dt_choose(&o, scratch, &best);
    }
    if (!status) *out = best;
    return status;
}

#ifndef FSDP_MATH_ONLY

/* ==== dtensor/mesh.h ========================================================================
   a mesh of a model: its groups, staging memory and memory of the caller */

// Owns: fsdp_dmesh. What communicates does so by records of the core on its groups; data are the
// caller's pointers. Records of the caller's stream are ordered by it alone, those beside it by the
// ticket of their redistribution.

enum {
    FSDPI_DT_NAME = 64,
    FSDPI_DT_BACKWARD = sizeof " backward" - 1, // what a name grows by
    FSDPI_DT_STREAMS = 2                        // the caller's, and beside it
};

typedef struct fsdpi_dt_memory { // of fsdp_dmesh_alloc
    fsdp_buf *buf;
    struct fsdpi_dt_memory *next;
} fsdpi_dt_memory;

typedef struct fsdpi_dt_unit { // of fsdp_tp_fully_shard, cut
    fsdp_unit *unit;
    int32_t num_params;
    int32_t *dims;  // [num_params] the dim that tp cuts
    int64_t *sizes; // [num_params] of that dim in the whole tensor
    struct fsdpi_dt_unit *next;
} fsdpi_dt_unit;

struct fsdp_dmesh {
    fsdp_model *model;
    fsdp_world *world;
    const fsdp_mesh *mesh;
    int32_t ndim, shape[FSDP_MAX_DIMS], coord[FSDP_MAX_DIMS];
    int32_t tp, shard, replicate; // dims of the mesh; -1: none
    int32_t overlap, is_fixed;    // is_fixed: staging does not grow
    fsdp_links links;
    fsdp_comm *comm[FSDPI_DT_STREAMS][FSDP_MAX_DIMS];
    fsdp_buf *staging[FSDPI_DT_STREAMS][2];
    int64_t staging_bytes; // of each
    int pool, label;
    uint64_t routes;
    void *scratch;                       // of routes
    fsdp_mesh *dim_mesh[FSDP_MAX_DIMS];  // each dim alone
    fsdp_mesh *unit_mesh, *replica_mesh; // see units.h; NULL: not made
    fsdpi_dt_memory *memory;
    fsdpi_dt_unit *units;
    fsdp_redistribution *redistributions;
    fsdp_extension extension;
};

static uint64_t fsdpi_dt_mix(uint64_t h, uint64_t x) { // splitmix64 of a running value
    h = (h ^ x) * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    return h ^ (h >> 31);
}

static uint64_t fsdpi_dt_hash(uint64_t h, const void *data, int64_t bytes) {
    const unsigned char *at = (const unsigned char *)data;
    for (; bytes >= 8; bytes -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        h = fsdpi_dt_mix(h, word);
    }
    for (; bytes > 0; bytes--) h = fsdpi_dt_mix(h, *at++);
    return h;
}

static fsdp_status fsdpi_dt_alloc(fsdp_model *m, size_t bytes, void **out) {
    return fsdp_alloc(m, FSDP_MEMORY_HOST, (int64_t)bytes, "dtensor: a table", out);
}
static void fsdpi_dt_free(fsdp_model *m, void *ptr) { fsdp_free(m, FSDP_MEMORY_HOST, ptr, 0); }

/* -------------------------------------------------------------------------------------------- */
// Memory.

// Staging buffers of at least so many bytes. Ranks come here alike, since routes are alike.
static fsdp_status fsdpi_dt_staging(fsdp_dmesh *dm, int64_t bytes, const char *name) {
    fsdp_buf *made[FSDPI_DT_STREAMS][2];
    fsdp_status status = FSDP_OK;
    if (bytes <= dm->staging_bytes) return FSDP_OK;
    if (dm->is_fixed)
        return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                         "[E001] redistribution_create: '%s' needs staging buffers of %lld bytes, "
                         "and fsdp_dmesh_desc.staging_bytes is %lld: pass more, or 0",
                         name, (long long)bytes, (long long)dm->staging_bytes);
    memset(made, 0, sizeof made);
    for (int s = 0; s < 1 + dm->overlap; s++)
        for (int i = 0; i < 2 && !status; i++)
            status = fsdp_buf_create(dm->model, dm->pool, FSDP_MEMORY_DEVICE, bytes, &made[s][i]);
    for (int s = 0; s < 1 + dm->overlap; s++) // if one is missing, what was there goes on
        for (int i = 0; i < 2; i++) {
            fsdp_buf_destroy(dm->model, status ? made[s][i] : dm->staging[s][i]);
            if (!status) dm->staging[s][i] = made[s][i];
        }
    if (!status) dm->staging_bytes = bytes;
    return status;
}

FSDP_API fsdp_status fsdp_dmesh_alloc(fsdp_dmesh *dm, int64_t nbytes, void **ptr) {
    fsdpi_dt_memory *memory;
    if (!dm || !ptr || nbytes < 0)
        return fsdp_fail(dm ? dm->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E002] dmesh_alloc: dm or ptr is NULL, or nbytes is negative: pass all");
    *ptr = NULL;
    fsdp_status status = fsdpi_dt_alloc(dm->model, sizeof *memory, (void **)&memory);
    if (status) return status;
    status = fsdp_buf_create(dm->model, dm->pool, FSDP_MEMORY_DEVICE, nbytes, &memory->buf);
    if (status) {
        fsdpi_dt_free(dm->model, memory);
        return status;
    }
    memory->next = dm->memory;
    dm->memory = memory;
    *ptr = fsdp_buf_ptr(memory->buf);
    return FSDP_OK;
}

/* Bytes from ptr to the end of what peers read in place; 0: it is other memory. *begins: ptr is the
   begin, so that all of them are the part's. */
static int64_t fsdpi_dt_room(const fsdp_dmesh *dm, const void *ptr, int *begins) {
    for (const fsdpi_dt_memory *at = dm->memory; at; at = at->next) {
        uintptr_t begin = (uintptr_t)fsdp_buf_ptr(at->buf), p = (uintptr_t)ptr;
        uintptr_t bytes = (uintptr_t)fsdp_buf_nbytes(at->buf);
        *begins = p == begin;
        if (p >= begin && p - begin < bytes) return (int64_t)(bytes - (p - begin));
    }
    *begins = 0;
    return 0;
}

/* -------------------------------------------------------------------------------------------- */
// Making and ending.

static void fsdpi_dt_end_redistribution(fsdp_dmesh *dm, fsdp_redistribution *r);

static void fsdpi_dt_forget(fsdp_dmesh *dm);

// A reset of the model forgets what was begun.
static int fsdpi_dt_call(void *user, fsdp_model *model, fsdp_unit *unit, int call,
                         fsdp_status *status) {
    (void)model, (void)unit, (void)status;
    if (call == FSDP_CALL_RESET) fsdpi_dt_forget((fsdp_dmesh *)user);
    return 0;
}

static void fsdpi_dt_free_unit(const fsdp_dmesh *dm, fsdpi_dt_unit *u) {
    if (!u) return;
    fsdpi_dt_free(dm->model, u->dims);
    fsdpi_dt_free(dm->model, u->sizes);
    fsdpi_dt_free(dm->model, u);
}
static void fsdpi_dt_end_units(fsdp_dmesh *dm) {
    for (fsdpi_dt_unit *u = dm->units, *next; u; u = next) {
        next = u->next;
        fsdpi_dt_free_unit(dm, u);
    }
}

static void fsdpi_dt_end(void *user) {
    fsdp_dmesh *dm = (fsdp_dmesh *)user;
    fsdp_model *m = dm->model;
    (void)fsdp_wait_stream(m, -1); // records under way read the lists
    while (dm->redistributions) fsdpi_dt_end_redistribution(dm, dm->redistributions);
    fsdpi_dt_end_units(dm);
    for (int s = 0; s < FSDPI_DT_STREAMS; s++)
        for (int i = 0; i < 2; i++) fsdp_buf_destroy(m, dm->staging[s][i]);
    for (fsdpi_dt_memory *at = dm->memory, *next; at; at = next) {
        next = at->next;
        fsdp_buf_destroy(m, at->buf);
        fsdpi_dt_free(m, at);
    }
    fsdpi_dt_free(m, dm->scratch);
    fsdpi_dt_free(m, dm);
}

// The dim of a mesh with the name that was given, or one of two usual ones; -1: there is none.
static fsdp_status fsdpi_dt_find_dim(const fsdp_dmesh *dm, const char *field, const char *given,
                                     const char *usual, const char *other, int32_t *dim) {
    *dim = fsdp_mesh_dim(dm->mesh, given ? given : usual);
    if (!given && *dim < 0 && other) *dim = fsdp_mesh_dim(dm->mesh, other);
    if (*dim >= 0 || !given) return FSDP_OK;
    return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                     "[E003] dmesh_create: the mesh has no dim '%s', which %s names: name one of "
                     "its dims, or pass NULL",
                     given, field);
}

// What this rank can check alone.
static fsdp_status fsdpi_dt_check_mesh(fsdp_dmesh *dm, const fsdp_dmesh_desc *d) {
    fsdp_mesh_info info = FSDP_ZERO;
    fsdp_status status = fsdp_model_mesh_info(dm->model, &info);
    if (status) return status;
    if (!d->mesh || fsdp_mesh_world(d->mesh) != dm->world || fsdp_mesh_rank(d->mesh, 0) < 0)
        return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                         "[E004] dmesh_create: mesh is NULL, of another world, or without this "
                         "rank: pass a mesh of the model's world that this rank is in");
    if (fsdp_mesh_size(info.mesh, -1) < fsdp_mesh_size(d->mesh, -1))
        return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                         "[E005] dmesh_create: the model's mesh has %d ranks and this one %d, so "
                         "that norms would leave ranks out: give fsdp_model_desc.mesh_info on the "
                         "whole mesh instead of a slice",
                         fsdp_mesh_size(info.mesh, -1), fsdp_mesh_size(d->mesh, -1));
    dm->mesh = d->mesh;
    dm->ndim = fsdp_mesh_ndim(d->mesh);
    for (int i = 0; i < dm->ndim; i++) {
        dm->shape[i] = fsdp_mesh_size(d->mesh, i);
        dm->coord[i] = fsdp_mesh_rank(d->mesh, i);
    }
    status = fsdpi_dt_find_dim(dm, "tp_dim", d->tp_dim, "tp", NULL, &dm->tp);
    if (!status)
        status = fsdpi_dt_find_dim(dm, "shard_dim", d->shard_dim, "dp_shard", "dp", &dm->shard);
    if (!status)
        status = fsdpi_dt_find_dim(dm, "replicate_dim", d->replicate_dim, "dp_replicate", NULL,
                                   &dm->replicate);
    int twice = (dm->tp >= 0 && (dm->tp == dm->shard || dm->tp == dm->replicate)) ||
                (dm->shard >= 0 && dm->shard == dm->replicate);
    if (!status && twice)
        status = fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                           "[E006] dmesh_create: two of tp_dim, shard_dim and replicate_dim name "
                           "one dim: name three different ones");
    if (!status && d->staging_bytes < 0)
        status = fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                           "[E007] dmesh_create: staging_bytes is %lld: pass 0 or more",
                           (long long)d->staging_bytes);
    return status ? status : fsdpi_dt_read_links("dmesh_create", &d->links, &dm->links);
}

// It failed on another rank, which says there why.
static fsdp_status fsdpi_dt_other_failed(fsdp_world *w) {
    return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                     "[E008] dmesh_create: it failed on another rank: see its log");
}

// Did all ranks get so far? A rank that did not takes part.
static fsdp_status fsdpi_dt_all_did(fsdp_world *w, fsdp_status status) {
    int32_t all = !status;
    fsdp_status reached = fsdp_all_reduce(w, NULL, &all, 1, FSDP_I32, FSDP_MIN);
    if (reached || status) return reached ? reached : status;
    return all ? FSDP_OK : fsdpi_dt_other_failed(w);
}

// The same, and do all ranks give the same desc?
static fsdp_status fsdpi_dt_agree(fsdp_dmesh *dm, const fsdp_dmesh_desc *d, fsdp_status status) {
    int32_t numbers[FSDP_MAX_DIMS + 6];
    memset(numbers, 0, sizeof numbers);
    memcpy(numbers, dm->shape, sizeof dm->shape);
    int32_t *at = numbers + FSDP_MAX_DIMS;
    at[0] = dm->ndim, at[1] = dm->tp, at[2] = dm->shard, at[3] = dm->replicate;
    at[4] = d->overlap != 0, at[5] = d->links.greedy << 1 | d->links.no_all_to_all;
    uint64_t hash = fsdpi_dt_hash(1, numbers, sizeof numbers);
    hash = fsdpi_dt_hash(hash, &d->staging_bytes, sizeof d->staging_bytes);
    hash = fsdpi_dt_hash(hash, &d->links.base_us, sizeof(double));
    hash = fsdpi_dt_hash(hash, d->links.hop_us, sizeof d->links.hop_us);
    hash = fsdpi_dt_hash(hash, d->links.gbytes_per_s, sizeof d->links.gbytes_per_s);
    int64_t values[3] = {!status, (int64_t)hash, (int64_t)~hash};
    fsdp_status reached = fsdp_all_reduce(dm->world, NULL, values, 3, FSDP_I64, FSDP_MIN);
    if (reached || status) return reached ? reached : status;
    if (!values[0]) return fsdpi_dt_other_failed(dm->world);
    if (values[1] == ~values[2]) return FSDP_OK;
    return fsdp_fail(dm->world, FSDP_ERR_MISMATCH,
                     "[E009] dmesh_create: the ranks gave other descs: give all the same names, "
                     "staging_bytes, overlap and links, and a mesh of the same shape");
}

/* Meshes for units. unit_mesh: if neither shard_dim nor replicate_dim is there, with a dim of one
   rank in front, which shards them. replica_mesh: (.., replicate x tp), the replicas of a unit that
   tp replicates. */
static fsdp_status fsdpi_dt_unit_meshes(fsdp_dmesh *dm) {
    static const char *const names[2] = {"one", "rest"};
    int32_t *ranks, at[FSDP_MAX_DIMS];
    fsdp_mesh_desc d = FSDP_ZERO;
    int size = fsdp_mesh_size(dm->mesh, -1);
    if (dm->shard < 0 && dm->replicate < 0)
        return fsdp_mesh_unflatten(dm->mesh, 0, 1, names, &dm->unit_mesh);
    if (dm->replicate < 0 || dm->tp < 0) return FSDP_OK;
    if (size != fsdp_world_size(dm->world))
        return fsdp_fail(dm->world, FSDP_ERR_UNSUPPORTED,
                         "[E025] dmesh_create: a mesh with tp_dim and replicate_dim has %d of %d "
                         "ranks: pass one with all ranks of the world",
                         size, fsdp_world_size(dm->world));
    fsdp_status status = fsdpi_dt_alloc(dm->model, 2 * (size_t)size * sizeof *ranks,
                                        (void **)&ranks);
    if (status) return status;
    (void)fsdp_mesh_ranks(dm->mesh, -1, ranks + size);
    int32_t stride[FSDP_MAX_DIMS], order[FSDP_MAX_DIMS], num = 0;
    for (int i = dm->ndim - 1, step = 1; i >= 0; step *= dm->shape[i--]) stride[i] = step;
    for (int i = 0; i < dm->ndim; i++)
        if (i != dm->replicate && i != dm->tp) order[num++] = i, d.shape[d.ndim++] = dm->shape[i];
    order[num++] = dm->replicate, order[num++] = dm->tp;
    d.shape[d.ndim++] = dm->shape[dm->replicate] * dm->shape[dm->tp];
    memset(at, 0, sizeof at);
    for (int i = 0; i < size; i++) {
        int from = 0, k = num - 1;
        for (int x = 0; x < num; x++) from += at[x] * stride[order[x]];
        ranks[i] = ranks[size + from];
        while (k >= 0 && ++at[k] == dm->shape[order[k]]) at[k--] = 0;
    }
    d.ranks = ranks;
    status = fsdp_mesh_create(dm->world, &d, &dm->replica_mesh);
    fsdpi_dt_free(dm->model, ranks);
    return status;
}

static fsdp_status fsdpi_dt_open(fsdp_dmesh *dm, const fsdp_dmesh_desc *d) {
    static const int streams[FSDPI_DT_STREAMS] = {FSDP_STREAM_COMPUTE, FSDP_STREAM_EXTENSION};
    fsdp_status status = FSDP_OK;
    dm->overlap = d->overlap != 0;
    if (dm->overlap) dm->extension.call = fsdpi_dt_call; // only then is something under way
    for (int32_t i = 0; i < dm->ndim && !status; i++) // not for a desc that is refused: they stay
        status = fsdp_mesh_slice(dm->mesh, &i, 1, &dm->dim_mesh[i]);
    if (!status) status = fsdpi_dt_unit_meshes(dm);
    status = fsdpi_dt_all_did(dm->world, status); // now come groups, which all ranks make together
    for (int s = 0; s < 1 + dm->overlap; s++)
        for (int i = 0; i < dm->ndim && !status; i++)
            status = fsdp_mesh_comm(dm->mesh, i, streams[s], &dm->comm[s][i]);
    if (!fsdp_world_has(dm->world, FSDP_OP_ALL_TO_ALL)) dm->links.no_all_to_all = 1;
    if (!status) status = fsdpi_dt_staging(dm, d->staging_bytes, "");
    dm->is_fixed = d->staging_bytes > 0;
    return status;
}

// A new one with its desc, as far as this rank can make it alone.
static fsdp_status fsdpi_dt_new(fsdp_model *model, const fsdp_dmesh_desc *d, fsdp_dmesh **out) {
    fsdp_dmesh *dm;
    fsdp_status status = fsdpi_dt_alloc(model, sizeof *dm, (void **)&dm);
    *out = dm;
    if (status) return status;
    dm->model = model;
    dm->world = fsdp_model_world(model);
    dm->extension.name = "dtensor";
    dm->extension.user = dm;
    dm->extension.destroy = fsdpi_dt_end;
    status = fsdpi_dt_check_mesh(dm, d);
    dm->pool = fsdp_pool_register(model, "activations");
    dm->label = fsdp_label_register(model, "activation");
    if (!status && (dm->pool < 0 || dm->label < 0)) status = FSDP_ERR_INVALID_ARG;
    return status ? status : fsdpi_dt_alloc(model, FSDP_ROUTE_SCRATCH, &dm->scratch);
}

FSDP_API fsdp_status fsdp_dmesh_create(fsdp_model *model, const fsdp_dmesh_desc *desc,
                                       fsdp_dmesh **out) {
    fsdp_dmesh_desc d;
    fsdp_dmesh *dm = NULL, none;
    if (!model || !out)
        return fsdp_fail(fsdp_model_world(model), FSDP_ERR_INVALID_ARG,
                         "[E010] dmesh_create: model or dm is NULL: pass both");
    *out = NULL;
    fsdp_world *w = fsdp_model_world(model);
    memset(&none, 0, sizeof none); // speaks for a rank that has none
    none.world = w;
    memset(&d, 0, sizeof d);
    fsdp_status status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_dmesh_desc");
    if (!status) status = fsdpi_dt_new(model, &d, &dm);
    status = fsdpi_dt_agree(dm ? dm : &none, &d, status);
    if (!status) {
        status = fsdpi_dt_open(dm, &d);
        if (!status) status = fsdp_attach(model, &dm->extension);
        int is_attached = !status;
        status = fsdpi_dt_all_did(w, status);
        if (status && is_attached) {
            (void)fsdp_detach(model, &dm->extension); // ends it
            return status;
        }
    }
    if (!status) *out = dm;
    else if (dm) fsdpi_dt_end(dm);
    return status;
}

FSDP_API void fsdp_dmesh_destroy(fsdp_dmesh *dm) {
    if (dm) (void)fsdp_detach(dm->model, &dm->extension);
}


/* ==== dtensor/redistribute.h ================================================================
   a route on data: copies and collectives */

/* Owns: fsdp_redistribution. For each step of the route it knows how parts lie in the collective: a
   part is tight, row-major, at the begin of its `count` elements; nobody reads what is behind it.
   So a gather needs no copy before it. The copy behind it is left out if the parts, one after the
   other, are the result: cut along dim 0, or with dims of length 1 before the one that is cut. */

typedef struct fsdpi_dt_copy {
    fsdp_block *blocks;
    int32_t num;
    int64_t count; // elements
} fsdpi_dt_copy;

typedef struct fsdpi_dt_stage { // a step of the route, at the sizes now
    int32_t kind, mesh_dim;
    fsdp_seg seg;          // count: elements for each rank, of each pair of ranks, or of the whole
    int64_t reads, writes; // elements of the collective's two buffers
    int64_t in, out;       // elements of this rank's part before and behind the step
    fsdpi_dt_copy before;  // to the layout that the collective reads; of a local step all its work
    fsdpi_dt_copy behind;  // from the layout that it writes
    int32_t is_packed;     // the part lies as `before` would lay it
    int32_t is_whole;      // and the result as `behind` would
    int32_t redop, keeps;  // keeps: OWN: this rank keeps its part
    double factor;         // of AVG: 1 / ranks
} fsdpi_dt_stage;

struct fsdp_redistribution {
    fsdp_dmesh *dm;
    char name[FSDPI_DT_NAME + FSDPI_DT_BACKWARD];
    fsdp_spec from, to, first_from, first_to; // of the sizes now, and as they were given
    fsdp_local part[2];                       // of from and to
    fsdp_dtype dtype, comm_dtype, desc_dtype; // of src and dst; of what travels; of the desc
    double scale;
    uint64_t hash, runs;
    fsdp_route route;
    fsdpi_dt_stage *stages;      // [route.num_steps]
    fsdp_block *blocks;          // of all stages
    fsdp_buf *ticket;            // orders what runs beside the caller's stream; NULL: nothing does
    fsdp_block whole;            // of the last copy
    int32_t begun, all_in_place; // all_in_place: no step changes the size
    fsdp_redistribution *next;
};

static int64_t fsdpi_dt_bytes_of(fsdp_dtype dtype) { return (int64_t)fsdp_dtype_size(dtype); }

/* -------------------------------------------------------------------------------------------- */
// How parts lie.

// Is a spec of a mesh with dm's shape?
static int fsdpi_dt_is_on(const fsdp_dmesh *dm, const fsdp_spec *s) {
    return s->mesh_ndim == dm->ndim &&
           memcmp(s->mesh_shape, dm->shape, (size_t)dm->ndim * sizeof *dm->shape) == 0;
}

// The length of a dim of this rank's part in a spec, with the cut of mesh dim `without` left out.
static int64_t fsdpi_dt_cut_rows(const fsdp_dmesh *dm, const fsdp_spec *s, int dim, int without) {
    fsdp_range range = {0, s->shape[dim], 0};
    int m;
    for (int order = 0; (m = fsdpi_dt_cut_at(s, dim, order)) >= 0; order++)
        if (m != without) (void)fsdp_shard_range(range.count, dm->shape[m], dm->coord[m], &range);
    return range.count;
}

// Elements of a row of dim `dim`, and how many such dims there are one after the other.
static int64_t fsdpi_dt_inner(int ndim, const int64_t *shape, int dim) {
    return fsdpi_dt_numel(ndim - dim - 1, shape + dim + 1);
}
static int64_t fsdpi_dt_outer_of(const int64_t *shape, int dim) {
    return fsdpi_dt_numel(dim, shape);
}

// The rows that rank k of n has of a tensor's dim: a copy from the tensor to `at` elements behind
// the begin of the pieces, or back.
static void fsdpi_dt_piece(fsdpi_dt_copy *copy, int back, int ndim, const int64_t *shape, int dim,
                           int n, int k, int64_t at) {
    int64_t inner = fsdpi_dt_inner(ndim, shape, dim), height = fsdpi_dt_outer_of(shape, dim);
    fsdp_range r = {0, 0, 0};
    (void)fsdp_shard_range(shape[dim], n, k, &r);
    int64_t tensor = r.start * inner, width = r.count * inner, row = shape[dim] * inner;
    fsdp_block to = {tensor, at, width, height, row, width};
    fsdp_block from = {at, tensor, width, height, width, row};
    if (!width || !height) return;
    copy->blocks[copy->num++] = back ? from : to;
    copy->count += width * height;
}

// The pieces of all ranks, each at a multiple of `count` elements. Returns 1 if a tensor is its
// pieces as it lies.
static int fsdpi_dt_all_pieces(fsdpi_dt_copy *copy, int back, int ndim, const int64_t *shape,
                               int dim, int n, int64_t count) {
    for (int k = 0; k < n; k++) fsdpi_dt_piece(copy, back, ndim, shape, dim, n, k, k * count);
    return fsdpi_dt_outer_of(shape, dim) == 1 &&
           fsdpi_dt_ceil(shape[dim], n) * fsdpi_dt_inner(ndim, shape, dim) == count;
}

/* A step on mesh dim m: tensor dim i ends to be cut by it, j begins to. s: the spec before it;
   afterwards the one behind it. `wide` is this rank's part without m's cuts. */
static void fsdpi_dt_lay(const fsdp_redistribution *r, fsdp_spec *s, const fsdp_step *step,
                         fsdpi_dt_stage *st) {
    const fsdp_dmesh *dm = r->dm;
    int m = step->mesh_dim, n = dm->shape[m], me = dm->coord[m], ndim = s->ndim;
    int i = step->from.kind == FSDP_SHARD ? step->from.dim : -1;
    int j = step->to.kind == FSDP_SHARD ? step->to.dim : -1;
    int64_t wide[FSDP_MAX_DIMS], in[FSDP_MAX_DIMS], out[FSDP_MAX_DIMS];
    fsdp_range mine = {0, 0, 0};
    st->kind = step->kind, st->mesh_dim = m, st->redop = s->place[m].op, st->factor = 1;
    st->is_packed = st->is_whole = 1;
    for (int d = 0; d < ndim; d++) {
        in[d] = out[d] = wide[d] = fsdpi_dt_cut_rows(dm, s, d, m);
        (void)fsdp_shard_range(wide[d], n, me, &mine);
        if (d == i) in[d] = mine.count;
        if (d == j) out[d] = mine.count;
        wide[d] = d == i || d == j ? fsdpi_dt_ceil(wide[d], n) : wide[d];
    }
    int64_t count = fsdpi_dt_numel(ndim, wide); // of the largest piece
    st->in = fsdpi_dt_numel(ndim, in), st->out = fsdpi_dt_numel(ndim, out);
    switch (st->kind) {
    case FSDP_STEP_SLICE: fsdpi_dt_piece(&st->before, 0, ndim, in, j, n, me, 0); break;
    case FSDP_STEP_PAD: fsdpi_dt_piece(&st->before, 1, ndim, out, i, n, me, 0); break;
    case FSDP_STEP_OWN: st->keeps = step->to.op != FSDP_SUM || me == 0; break;
    default:
        if (j >= 0) st->is_packed = fsdpi_dt_all_pieces(&st->before, 0, ndim, in, j, n, count);
        if (i >= 0) st->is_whole = fsdpi_dt_all_pieces(&st->behind, 1, ndim, out, i, n, count);
        st->seg.count = count;
        if (i < 0 && st->redop == FSDP_AVG) st->factor = 1.0 / n;
    }
    st->reads = j >= 0 ? n * count : count;
    st->writes = i >= 0 ? n * count : count;
    s->place[m] = step->to;
}

// A mesh dim of one rank cuts nothing, and routes do not count its order.
static void fsdpi_dt_uncut(fsdp_spec *s, int m) {
    const fsdp_placement was = s->place[m];
    memset(&s->place[m], 0, sizeof was);
    for (int i = 0; i < s->mesh_ndim && was.kind == FSDP_SHARD; i++)
        if (fsdpi_dt_cuts(&s->place[i], was.dim) && s->place[i].order > was.order)
            s->place[i].order--;
}

// Parts and stages at the sizes of r->from.
static void fsdpi_dt_lay_all(fsdp_redistribution *r) {
    const fsdp_dmesh *dm = r->dm;
    fsdp_spec s = r->from;
    fsdp_block *blocks = r->blocks;
    (void)fsdp_spec_local(&r->from, dm->coord, &r->part[0]);
    (void)fsdp_spec_local(&r->to, dm->coord, &r->part[1]);
    for (int m = 0; m < dm->ndim; m++) // routes count orders without dims of one rank
        if (dm->shape[m] == 1) fsdpi_dt_uncut(&s, m);
    r->all_in_place = 1;
    for (int k = 0; k < r->route.num_steps; k++) {
        fsdpi_dt_stage *st = &r->stages[k];
        int n = dm->shape[r->route.steps[k].mesh_dim];
        memset(st, 0, sizeof *st);
        st->before.blocks = blocks, st->behind.blocks = blocks + n;
        blocks += 2 * n;
        fsdpi_dt_lay(r, &s, &r->route.steps[k], st);
        r->all_in_place &= st->kind == FSDP_STEP_ALL_REDUCE;
    }
}

/* -------------------------------------------------------------------------------------------- */
// Making and ending.

static void fsdpi_dt_end_redistribution(fsdp_dmesh *dm, fsdp_redistribution *r) {
    fsdp_redistribution **at = &dm->redistributions;
    while (*at && *at != r) at = &(*at)->next;
    if (*at) *at = r->next;
    fsdp_buf_destroy(dm->model, r->ticket);
    fsdpi_dt_free(dm->model, r->stages);
    fsdpi_dt_free(dm->model, r->blocks);
    fsdpi_dt_free(dm->model, r);
}

static void fsdpi_dt_forget(fsdp_dmesh *dm) {
    for (fsdp_redistribution *r = dm->redistributions; r; r = r->next) r->begun = 0;
}

static fsdp_status fsdpi_dt_check_desc(const fsdp_dmesh *dm, const fsdp_redistribution_desc *d) {
    const char *why = NULL;
    int avg = 0, extreme = 0, whole = !fsdp_dtype_is_float(d->from.dtype);
    fsdp_status status = fsdpi_dt_known("redistribution_create", &d->from);
    if (!status) status = fsdpi_dt_known("redistribution_create", &d->to);
    if (status) return status;
    for (int m = 0; m < d->from.mesh_ndim; m++) {
        const fsdp_placement *p = &d->to.place[m]; // its addends are those of `from`
        avg |= d->from.place[m].kind == FSDP_PARTIAL && d->from.place[m].op == FSDP_AVG;
        extreme |= p->kind == FSDP_PARTIAL && (p->op == FSDP_MAX || p->op == FSDP_MIN);
    }
    if (!fsdpi_dt_is_on(dm, &d->from))
        why = "its specs are of a mesh of another shape: make them with the shape of dm's mesh";
    else if (d->name && strlen(d->name) >= FSDPI_DT_NAME) why = "its name has more than 63 bytes";
    else if (d->comm_dtype && (whole || !fsdp_dtype_is_float(d->comm_dtype)))
        why = "comm_dtype is for tensors of a floating dtype, and is one";
    else if (whole && (avg || d->scale != 0))
        why = "integers have neither a scale nor addends of AVG: use SUM, and divide yourself";
    else if (!(d->scale - d->scale == 0)) why = "scale is not finite: pass 0 for 1";
    else if (d->scale < 0 && extreme)
        why = "a negative scale turns addends of MAX into those of MIN: reduce them first";
    if (!why) return FSDP_OK;
    return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG, "[E011] redistribution_create: '%.63s': %s",
                     d->name ? d->name : "redistribute", why);
}

static int fsdpi_dt_same(const fsdp_spec *a, const fsdp_spec *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

// What ranks have to agree on. The sizes now are part of it: others may give as many elements.
static void fsdpi_dt_set_hash(fsdp_redistribution *r) {
    r->hash = fsdpi_dt_hash(2, r->name, (int64_t)strlen(r->name));
    r->hash = fsdpi_dt_hash(r->hash, &r->from, sizeof r->from);
    r->hash = fsdpi_dt_hash(r->hash, &r->to, sizeof r->to);
    r->hash = fsdpi_dt_hash(r->hash, &r->scale, sizeof r->scale);
    r->hash = fsdpi_dt_mix(r->hash, (uint64_t)r->desc_dtype);
}

// The route: that of an earlier redistribution between the same specs, or a new one.
static fsdp_status fsdpi_dt_find_route(fsdp_redistribution *r) {
    fsdp_dmesh *dm = r->dm;
    for (const fsdp_redistribution *at = dm->redistributions; at; at = at->next)
        if (fsdpi_dt_same(&at->first_from, &r->from) && fsdpi_dt_same(&at->first_to, &r->to)) {
            r->route = at->route;
            return FSDP_OK;
        }
    fsdp_status status = fsdp_route_find(&r->from, &r->to, &dm->links, dm->scratch,
                                         FSDP_ROUTE_SCRATCH, &r->route);
    dm->routes += !status && r->route.num_steps > 0;
    return status;
}

// Tables, staging memory and the ticket of a redistribution that has a route.
static fsdp_status fsdpi_dt_prepare(fsdp_redistribution *r) {
    fsdp_dmesh *dm = r->dm;
    int64_t size = fsdpi_dt_bytes_of(r->dtype), comm = fsdpi_dt_bytes_of(r->comm_dtype);
    int blocks = 0;
    for (int k = 0; k < r->route.num_steps; k++)
        blocks += 2 * dm->shape[r->route.steps[k].mesh_dim];
    fsdp_status status = fsdpi_dt_alloc(dm->model, (size_t)r->route.num_steps * sizeof *r->stages,
                                        (void **)&r->stages);
    if (!status)
        status = fsdpi_dt_alloc(dm->model, (size_t)blocks * sizeof *r->blocks, (void **)&r->blocks);
    if (!status) fsdpi_dt_lay_all(r);
    if (!status && r->route.num_steps)
        status = fsdpi_dt_staging(dm, r->route.most_bytes / size * (comm > size ? comm : size),
                                  r->name);
    if (!status && r->route.num_collectives && dm->overlap)
        status = fsdp_buf_part(dm->model, dm->staging[1][0], 0, 0, &r->ticket);
    return status;
}

FSDP_API fsdp_status fsdp_redistribution_create(fsdp_dmesh *dm,
                                                const fsdp_redistribution_desc *desc,
                                                fsdp_redistribution **out) {
    fsdp_redistribution_desc d;
    fsdp_redistribution *r;
    if (!dm || !desc || !out)
        return fsdp_fail(dm ? dm->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E012] redistribution_create: dm, desc or out is NULL: pass all");
    *out = NULL;
    fsdp_status status = fsdp_desc_read(dm->world, &d, desc, sizeof d, "fsdp_redistribution_desc");
    if (!status) status = fsdpi_dt_check_desc(dm, &d);
    if (status) return status;
    const char *name = d.name ? d.name : "redistribute";
    if (d.scale == 0) d.scale = 1;
    for (r = dm->redistributions; r; r = r->next)
        if (fsdpi_dt_same(&r->first_from, &d.from) && fsdpi_dt_same(&r->first_to, &d.to) &&
            r->desc_dtype == d.comm_dtype && r->scale == d.scale && !strcmp(r->name, name)) {
            *out = r;
            return FSDP_OK;
        }
    status = fsdpi_dt_alloc(dm->model, sizeof *r, (void **)&r);
    if (status) return status;
    r->dm = dm;
    snprintf(r->name, sizeof r->name, "%s", name);
    r->from = r->first_from = d.from;
    r->to = r->first_to = d.to;
    r->dtype = d.from.dtype;
    r->desc_dtype = d.comm_dtype;
    r->scale = d.scale;
    fsdpi_dt_set_hash(r);
    status = fsdpi_dt_find_route(r);
    r->comm_dtype = d.comm_dtype && r->route.num_collectives ? d.comm_dtype : r->dtype;
    if (!status) status = fsdpi_dt_prepare(r);
    if (status) {
        fsdpi_dt_end_redistribution(dm, r);
        return status;
    }
    r->next = dm->redistributions;
    dm->redistributions = *out = r;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_redistribution_create_backward(fsdp_redistribution *forward,
                                                         const fsdp_spec *grad,
                                                         fsdp_redistribution **out) {
    fsdp_redistribution_desc d;
    char name[FSDPI_DT_NAME];
    if (!forward || !out)
        return fsdp_fail(forward ? forward->dm->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E013] redistribution_create_backward: forward or out is NULL: pass "
                         "both");
    *out = NULL;
    memset(&d, 0, sizeof d);
    d.from = grad ? *grad : forward->first_to;
    d.to = forward->first_from;
    fsdp_status status = fsdpi_dt_known("redistribution_create_backward", &d.from);
    if (status) return status;
    for (int m = 0; m < d.to.mesh_ndim; m++) {
        int adds = d.from.place[m].kind == FSDP_PARTIAL;
        if (!grad && adds) memset(&d.from.place[m], 0, sizeof d.from.place[m]), adds = 0;
        if (d.to.place[m].kind != FSDP_PARTIAL) continue;
        memset(&d.to.place[m], 0, sizeof d.to.place[m]);
        if (adds) d.to.place[m] = d.from.place[m];
    }
    snprintf(name, sizeof name, "%.*s backward", FSDPI_DT_NAME - FSDPI_DT_BACKWARD - 1,
             forward->name);
    d.name = name;
    d.comm_dtype = forward->desc_dtype;
    d.scale = fsdp_dtype_is_float(forward->dtype) ? forward->scale : 0;
    return fsdp_redistribution_create(forward->dm, &d, out);
}

FSDP_API fsdp_status fsdp_redistribution_resize(fsdp_redistribution *r, int dim, int64_t size) {
    if (!r || dim < 0 || dim >= r->from.ndim || size < 0 || size > r->first_from.shape[dim])
        return fsdp_fail(r ? r->dm->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E014] redistribution_resize: '%s': dim %d is to have %lld rows, "
                         "expected a dim of the tensor and at most the rows in the desc, %lld: "
                         "create it with the largest size",
                         r ? r->name : "NULL", dim, (long long)size,
                         r && dim >= 0 && dim < r->from.ndim ? (long long)r->first_from.shape[dim]
                                                             : 0);
    if (r->begun)
        return fsdp_fail(r->dm->world, FSDP_ERR_INVALID_STATE,
                         "[E015] redistribution_resize: '%s' is under way: call "
                         "fsdp_redistribute_wait first",
                         r->name);
    fsdp_status status = fsdp_wait_stream(r->dm->model, FSDP_STREAM_COMPUTE);
    if (status) return status;
    r->from.shape[dim] = r->to.shape[dim] = size;
    fsdpi_dt_set_hash(r);
    fsdpi_dt_lay_all(r);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_redistribution_get(const fsdp_redistribution *r,
                                             fsdp_redistribution_info *out) {
    if (!r || !out)
        return fsdp_fail(r ? r->dm->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E016] redistribution_get: r or out is NULL: pass both");
    memset(out, 0, sizeof *out);
    int num = r->route.num_steps;
    const fsdpi_dt_stage *first = r->stages, *last = r->stages + num - 1;
    int64_t size = fsdpi_dt_bytes_of(r->dtype), reads = r->part[0].numel, writes = r->part[1].numel;
    if (num && first->is_packed && first->reads > reads) reads = first->reads;
    if (num && last->is_whole && last->writes > writes) writes = last->writes;
    out->route = r->route;
    out->from = r->part[0];
    out->to = r->part[1];
    out->src_capacity = reads * size;
    out->dst_capacity = writes * size;
    out->routes = r->dm->routes;
    out->runs = r->runs;
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// Running: the part goes from src over staging memory to dst.

typedef struct fsdpi_dt_run {
    fsdp_redistribution *r;
    char *src, *dst, *at, *staging[2]; // at: where the part is now
    int stream;                        // 0: the caller's; 1: beside it
    int is_loose;                      // the last record does not move the ticket
    double factor;                     // that the part still has to be multiplied by
    fsdp_status status;
} fsdpi_dt_run;

// Elements that peers may read, or the library write, at src or dst, of which `part` are a part's.
static int64_t fsdpi_dt_elements(const fsdpi_dt_run *run, const char *at, int64_t part) {
    int begins;
    int64_t room = fsdpi_dt_room(run->r->dm, at, &begins) / fsdpi_dt_bytes_of(run->r->dtype);
    return begins || room < part ? room : part;
}

static int fsdpi_dt_is_staged(const fsdpi_dt_run *run, const char *at) {
    return at == run->staging[0] || at == run->staging[1];
}

static fsdp_dtype fsdpi_dt_dtype_at(const fsdpi_dt_run *run, const char *at) {
    return fsdpi_dt_is_staged(run, at) ? run->r->comm_dtype : run->r->dtype;
}

static char *fsdpi_dt_other(const fsdpi_dt_run *run, const char *at) {
    return run->staging[at == run->staging[0]];
}

static void fsdpi_dt_begin_op(const fsdpi_dt_run *run, fsdp_op *op, int kind, const char *src,
                              char *dst) {
    const fsdp_redistribution *r = run->r;
    fsdp_op_init(op, r->dm->model, NULL, kind, r->dm->label,
                 run->stream ? FSDP_STREAM_EXTENSION : FSDP_STREAM_COMPUTE);
    op->what = r->name;
    op->what_hash = r->hash;
    op->src_ptr = src;
    op->dst_ptr = dst;
}

static void fsdpi_dt_emit(fsdpi_dt_run *run, fsdp_op *op) {
    run->is_loose = op->kind == FSDP_OP_ZERO;
    if (run->stream) op->src = run->r->ticket;
    if (run->stream && !run->is_loose) op->dst = run->r->ticket;
    if (!run->status) run->status = fsdp_emit(run->r->dm->model, op);
}

// The part, or its pieces, to another place; what comes to dst as the last is multiplied there.
static void fsdpi_dt_copy_to(fsdpi_dt_run *run, char *to, const fsdpi_dt_copy *copy, int is_last) {
    fsdp_op op;
    fsdpi_dt_begin_op(run, &op, FSDP_OP_COPY, run->at, to);
    op.dtype = (uint8_t)fsdpi_dt_dtype_at(run, run->at);
    op.out_dtype = (uint8_t)fsdpi_dt_dtype_at(run, to);
    op.list = copy->blocks;
    op.list_count = (uint32_t)copy->num;
    op.count = (uint64_t)copy->count;
    if (is_last) op.scale = run->factor, run->factor = 1;
    run->at = to;
    if (copy->count) fsdpi_dt_emit(run, &op);
}

// All of a part as it lies. whole: a block for the list, which lasts as long as the redistribution.
static void fsdpi_dt_copy_all(fsdpi_dt_run *run, char *to, fsdp_block *whole, int64_t count,
                              int is_last) {
    fsdp_block block = {0, 0, count, 1, count, count};
    fsdpi_dt_copy copy = {whole, 1, count};
    *whole = block;
    fsdpi_dt_copy_to(run, to, &copy, is_last);
}

static void fsdpi_dt_zero(fsdpi_dt_run *run, char *to, int64_t count) {
    fsdp_op op;
    fsdpi_dt_begin_op(run, &op, FSDP_OP_ZERO, NULL, to);
    op.dtype = op.out_dtype = (uint8_t)fsdpi_dt_dtype_at(run, to);
    op.count = (uint64_t)count;
    op.bytes = op.count * fsdp_dtype_size(op.dtype);
    if (count) fsdpi_dt_emit(run, &op);
}

static void fsdpi_dt_local(fsdpi_dt_run *run, fsdpi_dt_stage *st, int is_last) {
    char *to = is_last ? run->dst : fsdpi_dt_other(run, run->at);
    if (st->keeps) return;
    if (st->kind != FSDP_STEP_SLICE) fsdpi_dt_zero(run, to, st->out);
    if (st->kind != FSDP_STEP_OWN) fsdpi_dt_copy_to(run, to, &st->before, is_last);
    run->at = to;
}

static void fsdpi_dt_collective(fsdpi_dt_run *run, const fsdpi_dt_stage *st, int kind, char *to) {
    const fsdp_dmesh *dm = run->r->dm;
    fsdp_op op;
    fsdpi_dt_begin_op(run, &op, kind, run->at, to);
    op.comm = dm->comm[run->stream][st->mesh_dim];
    op.group_size = dm->shape[st->mesh_dim];
    op.dtype = op.out_dtype = (uint8_t)run->r->comm_dtype;
    op.redop = (uint8_t)(st->redop == FSDP_AVG ? FSDP_SUM : st->redop);
    op.in_place = run->at == to;
    op.count = (uint64_t)st->seg.count;
    op.list = &st->seg;
    op.list_count = kind == FSDP_OP_ALL_GATHER || kind == FSDP_OP_REDUCE_SCATTER;
    run->factor *= st->factor;
    run->at = to;
    fsdpi_dt_emit(run, &op);
}

// In place where the part comes to lie, if peers may read there.
static void fsdpi_dt_all_reduce(fsdpi_dt_run *run, fsdpi_dt_stage *st, int is_last) {
    const fsdp_redistribution *r = run->r;
    char *home = fsdpi_dt_is_staged(run, run->at) ? run->at : run->staging[0];
    if (is_last && r->comm_dtype == r->dtype &&
        fsdpi_dt_elements(run, run->dst, st->out) >= st->out)
        home = run->dst;
    if (home != run->at) fsdpi_dt_copy_all(run, home, st->before.blocks, st->in, 0);
    fsdpi_dt_collective(run, st, FSDP_OP_ALL_REDUCE, home);
}

static void fsdpi_dt_exchange(fsdpi_dt_run *run, fsdpi_dt_stage *st, int is_last) {
    int kind = st->kind == FSDP_STEP_ALL_GATHER       ? FSDP_OP_ALL_GATHER
               : st->kind == FSDP_STEP_REDUCE_SCATTER ? FSDP_OP_REDUCE_SCATTER
                                                      : FSDP_OP_ALL_TO_ALL;
    const fsdp_redistribution *r = run->r;
    int cast = r->comm_dtype != r->dtype, first = run->at == run->src;
    int64_t room = first ? fsdpi_dt_elements(run, run->at, st->in) : st->reads;
    if (!st->is_packed) fsdpi_dt_copy_to(run, fsdpi_dt_other(run, run->at), &st->before, 0);
    else if (room < st->reads || (first && cast))
        fsdpi_dt_copy_all(run, fsdpi_dt_other(run, run->at), st->before.blocks, st->in, 0);
    int fits = st->writes == st->out || fsdpi_dt_elements(run, run->dst, st->out) >= st->writes;
    char *other = fsdpi_dt_other(run, run->at);
    fsdpi_dt_collective(run, st, kind, is_last && st->is_whole && fits && !cast ? run->dst : other);
    if (!st->is_whole)
        fsdpi_dt_copy_to(run, is_last ? run->dst : fsdpi_dt_other(run, run->at), &st->behind,
                         is_last);
}

static fsdp_status fsdpi_dt_nothing(const fsdp_op *op, void *stream) {
    (void)op, (void)stream;
    return FSDP_OK;
}

// The records of all steps.
static fsdp_status fsdpi_dt_run_all(fsdp_redistribution *r, int stream, void *dst,
                                    const void *src) {
    fsdpi_dt_run run;
    memset(&run, 0, sizeof run);
    run.r = r;
    run.src = run.at = (char *)(uintptr_t)src;
    run.dst = (char *)dst;
    run.stream = stream;
    run.factor = r->scale;
    for (int i = 0; i < 2; i++) run.staging[i] = (char *)fsdp_buf_ptr(r->dm->staging[stream][i]);
    for (int k = 0; k < r->route.num_steps && !run.status; k++) {
        fsdpi_dt_stage *st = &r->stages[k];
        int is_last = k + 1 == r->route.num_steps;
        if (!fsdpi_dt_is_collective(st->kind)) fsdpi_dt_local(&run, st, is_last);
        // Where no rank of the group has an element, a later step may bring the sums of others.
        else if (!st->seg.count) run.factor *= st->factor;
        else if (st->kind == FSDP_STEP_ALL_REDUCE) fsdpi_dt_all_reduce(&run, st, is_last);
        else fsdpi_dt_exchange(&run, st, is_last);
    }
    if (run.at != run.dst || run.factor != 1)
        fsdpi_dt_copy_all(&run, run.dst, &r->whole, r->part[1].numel, 1);
    if (stream && run.is_loose && !run.status) {
        fsdp_op op;
        fsdpi_dt_begin_op(&run, &op, FSDP_OP_CALL, NULL, NULL);
        op.call = fsdpi_dt_nothing;
        fsdpi_dt_emit(&run, &op);
    }
    r->runs += !run.status;
    return run.status;
}

static fsdp_status fsdpi_dt_check_run(const fsdp_redistribution *r, const void *dst,
                                      const void *src) {
    if (!r) return fsdp_fail(NULL, FSDP_ERR_INVALID_ARG, "[E017] redistribute: r is NULL: pass it");
    fsdp_world *w = r->dm->world;
    int64_t in = r->part[0].numel, out = r->part[1].numel;
    if ((in && !src) || (out && !dst))
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E018] redistribute: '%s': %s is NULL and its part has %lld elements: "
                         "pass memory for them",
                         r->name, in && !src ? "src" : "dst", (long long)(in && !src ? in : out));
    uintptr_t a = (uintptr_t)src, b = (uintptr_t)dst, size = (uintptr_t)fsdpi_dt_bytes_of(r->dtype);
    int apart = !in || !out || a + (uintptr_t)in * size <= b || b + (uintptr_t)out * size <= a;
    if (!apart && !(a == b && r->all_in_place))
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E019] redistribute: '%s': dst overlaps src: that is possible only if "
                         "both are equal and each step is an all_reduce: pass other memory",
                         r->name);
    if (r->begun)
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E020] redistribute: '%s' is under way: call fsdp_redistribute_wait "
                         "first, or create another one with a name of its own",
                         r->name);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_redistribute(fsdp_redistribution *r, void *dst, const void *src) {
    fsdp_status status = fsdpi_dt_check_run(r, dst, src);
    return status ? status : fsdpi_dt_run_all(r, 0, dst, src);
}

// Orders what runs beside the caller's stream and that stream: WROTE before, USE behind it.
static fsdp_status fsdpi_dt_mark(const fsdp_redistribution *r, int kind) {
    fsdp_op op;
    fsdp_op_init(&op, r->dm->model, NULL, kind, r->dm->label, FSDP_STREAM_COMPUTE);
    op.what = r->name;
    if (kind == FSDP_OP_WROTE) op.dst = r->ticket;
    else op.src = r->ticket;
    return fsdp_emit(r->dm->model, &op);
}

FSDP_API fsdp_status fsdp_redistribute_begin(fsdp_redistribution *r, void *dst, const void *src) {
    fsdp_status status = fsdpi_dt_check_run(r, dst, src);
    if (status || !r->ticket) return status ? status : fsdpi_dt_run_all(r, 0, dst, src);
    status = fsdpi_dt_mark(r, FSDP_OP_WROTE);
    if (!status) status = fsdpi_dt_run_all(r, 1, dst, src);
    r->begun = !status;
    return status;
}

FSDP_API fsdp_status fsdp_redistribute_wait(fsdp_redistribution *r) {
    if (!r)
        return fsdp_fail(NULL, FSDP_ERR_INVALID_ARG,
                         "[E021] redistribute_wait: r is NULL: pass it");
    if (!r->begun) return fsdp_world_status(r->dm->world);
    r->begun = 0;
    return fsdpi_dt_mark(r, FSDP_OP_USE);
}

/* -------------------------------------------------------------------------------------------- */
// Do replicas hold the same bytes?

static fsdp_status fsdpi_dt_hash_part(fsdp_dmesh *dm, const void *data, int64_t bytes,
                                      uint64_t *hash) {
    char chunk[4096];
    fsdp_status status = FSDP_OK;
    *hash = 3;
    for (int64_t at = 0; at < bytes && !status; at += (int64_t)sizeof chunk) {
        int64_t now = bytes - at < (int64_t)sizeof chunk ? bytes - at : (int64_t)sizeof chunk;
        status = fsdp_transfer(dm->model, chunk, (const char *)data + at, now);
        *hash = fsdpi_dt_hash(*hash, chunk, now);
    }
    return status;
}

// The least of each number over the ranks that should hold the same.
static fsdp_status fsdpi_dt_least(const fsdp_dmesh *dm, const fsdp_spec *spec, int64_t *values,
                                  int count) {
    fsdp_status status = FSDP_OK;
    for (int m = 0; m < dm->ndim && !status; m++)
        if (spec->place[m].kind == FSDP_REPLICATE && dm->shape[m] > 1)
            status = fsdp_all_reduce(dm->world, dm->dim_mesh[m], values, count, FSDP_I64, FSDP_MIN);
    return status;
}

FSDP_API fsdp_status fsdp_dtensor_check(fsdp_dmesh *dm, const fsdp_spec *spec, const void *data,
                                        const char *what) {
    fsdp_local part;
    uint64_t hash;
    if (!dm || !what)
        return fsdp_fail(dm ? dm->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E022] dtensor_check: dm or what is NULL: pass both");
    fsdp_status status = fsdpi_dt_known("dtensor_check", spec);
    if (status) return status;
    int other = !fsdpi_dt_is_on(dm, spec);
    if (!other) status = fsdp_spec_local(spec, dm->coord, &part);
    if (!other && !status && part.numel && !data) other = 1;
    if (other)
        return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                         "[E023] dtensor_check: '%s': the spec is of a mesh of another shape, or "
                         "data is NULL: pass a spec of dm's mesh, and this rank's part",
                         what);
    if (!status)
        status = fsdpi_dt_hash_part(dm, data, part.numel * fsdpi_dt_bytes_of(spec->dtype), &hash);
    if (status) return status;
    int64_t mine = (int64_t)hash, ends[2] = {mine, ~mine}, rank = fsdp_rank(dm->world);
    status = fsdpi_dt_least(dm, spec, ends, 2);
    if (status || ends[0] == ~ends[1]) return status;
    int64_t ranks[2] = {mine == ends[0] ? rank : INT64_MAX, mine == ~ends[1] ? rank : INT64_MAX};
    status = fsdpi_dt_least(dm, spec, ranks, 2);
    if (status) return status;
    return fsdp_fail(dm->world, FSDP_ERR_CORRUPT,
                     "[E024] dtensor_check: '%s': ranks %lld and %lld should hold the same bytes "
                     "and do not: look for what they computed differently, or broadcast it again",
                     what, (long long)ranks[0], (long long)ranks[1]);
}


/* ==== dtensor/units.h =======================================================================
   units whose parameters tensor parallelism cuts or replicates */

/* Owns: the way from parameters with the shapes of whole tensors to fsdp_fully_shard. A cut unit is
   one of this rank's parts; FSDP shards those, so that the order of cuts is (tp, dp). A replicated
   unit has the ranks of tp among its replicas, so that the core sums its gradients over them, and
   norms count it once. */

static int fsdpi_dt_tp_size(const fsdp_dmesh *dm) { return dm->tp < 0 ? 1 : dm->shape[dm->tp]; }
static int fsdpi_dt_tp_rank(const fsdp_dmesh *dm) { return dm->tp < 0 ? 0 : dm->coord[dm->tp]; }

// The rows that this rank of tp has of so many. A negative number stays: fully_shard refuses it.
static fsdp_range fsdpi_dt_tp_rows(const fsdp_dmesh *dm, int64_t size) {
    fsdp_range mine = {0, size, 0};
    (void)fsdp_shard_range(size, fsdpi_dt_tp_size(dm), fsdpi_dt_tp_rank(dm), &mine);
    return mine;
}

static const fsdpi_dt_unit *fsdpi_dt_find_unit(const fsdp_dmesh *dm, const fsdp_unit *unit) {
    const fsdpi_dt_unit *u = dm->units;
    while (u && u->unit != unit) u = u->next;
    return u;
}

// The ranks that shard and replicate a unit.
static fsdp_status fsdpi_dt_unit_info(const fsdp_dmesh *dm, int is_cut, fsdp_mesh_info *info) {
    const fsdp_mesh *mesh = dm->mesh;
    int shard = dm->shard, replicate = dm->replicate;
    if (!is_cut && dm->tp >= 0 && replicate >= 0) {
        mesh = dm->replica_mesh;
        if (shard >= 0) shard -= (shard > dm->tp) + (shard > replicate);
        replicate = fsdp_mesh_ndim(mesh) - 1;
    } else if (!is_cut && dm->tp >= 0) replicate = dm->tp;
    if (shard < 0 && replicate < 0) mesh = dm->unit_mesh, shard = 0;
    int kind = shard < 0       ? FSDP_MESH_INFO_DDP
               : replicate < 0 ? FSDP_MESH_INFO_FSDP
                               : FSDP_MESH_INFO_HSDP;
    return fsdp_mesh_info_init(mesh, kind, shard, replicate, info);
}

// Is every parameter cut, or every one replicated? *is_cut is the answer.
static fsdp_status fsdpi_dt_check_tp(const fsdp_dmesh *dm, const fsdp_tp_unit_desc *d,
                                     int *is_cut) {
    const fsdp_unit_desc *u = &d->unit;
    const char *name = u->name ? u->name : "a unit without name";
    if (!u->params || u->num_params < 1 || !d->tp || u->mesh || u->mesh_info)
        return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                         "[E026] tp_fully_shard: '%.200s': params or tp is NULL, num_params is %d, "
                         "or a mesh is given: pass a placement for each of 1 or more parameters, "
                         "and no mesh: dm has it",
                         name, u->num_params);
    *is_cut = d->tp[0].kind == FSDP_SHARD;
    for (int i = 0; i < u->num_params; i++) {
        const fsdp_param_desc *p = &u->params[i];
        const fsdp_placement *tp = &d->tp[i];
        int cut = tp->kind == FSDP_SHARD;
        if (tp->kind != FSDP_REPLICATE && !cut)
            return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                             "[E027] tp_fully_shard: '%.200s': parameter %d has placement %d, "
                             "expected FSDP_SHARD or FSDP_REPLICATE",
                             name, i, tp->kind);
        if (cut && (p->ndim > FSDP_MAX_DIMS || tp->dim < -p->ndim || tp->dim >= p->ndim))
            return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                             "[E028] tp_fully_shard: '%.200s': parameter %d is cut along dim %d "
                             "and has %d dims: name one of them",
                             name, i, tp->dim, p->ndim);
        if (cut != *is_cut)
            return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                             "[E029] tp_fully_shard: '%.200s': parameter 0 ('%.100s') is %s and "
                             "parameter %d ('%.100s') is %s: make two units, one of those that tp "
                             "cuts and one of those that it replicates",
                             name, u->params[0].name ? u->params[0].name : "",
                             *is_cut ? "cut" : "replicated", i, p->name ? p->name : "",
                             cut ? "cut" : "replicated");
    }
    return FSDP_OK;
}

// Each parameter becomes this rank's part of it. u: what remembers the whole.
static void fsdpi_dt_cut_params(const fsdp_dmesh *dm, const fsdp_tp_unit_desc *d,
                                fsdp_param_desc *params, fsdpi_dt_unit *u) {
    for (int i = 0; i < d->unit.num_params; i++) {
        fsdp_param_desc *p = &params[i];
        int dim = d->tp[i].dim < 0 ? d->tp[i].dim + p->ndim : d->tp[i].dim;
        u->dims[i] = dim;
        u->sizes[i] = p->shape[dim];
        p->shape[dim] = fsdpi_dt_tp_rows(dm, p->shape[dim]).count;
    }
}

static fsdp_status fsdpi_dt_unit_new(fsdp_dmesh *dm, int num_params, fsdpi_dt_unit **out) {
    fsdpi_dt_unit *u;
    fsdp_status status = fsdpi_dt_alloc(dm->model, sizeof *u, (void **)out);
    if (status) return status;
    u = *out;
    u->num_params = num_params;
    status = fsdpi_dt_alloc(dm->model, (size_t)num_params * sizeof *u->dims, (void **)&u->dims);
    return status ? status
                  : fsdpi_dt_alloc(dm->model, (size_t)num_params * sizeof *u->sizes,
                                   (void **)&u->sizes);
}

// Gradients that are addends over tp become their sum instead of the mean.
static fsdp_status fsdpi_dt_set_factor(const fsdp_dmesh *dm, fsdp_unit *unit, int partial) {
    int ranks = (dm->shard < 0 ? 1 : dm->shape[dm->shard]) *
                (dm->replicate < 0 ? 1 : dm->shape[dm->replicate]);
    if (!partial || fsdpi_dt_tp_size(dm) == 1) return FSDP_OK;
    return fsdp_set_gradient_divide_factor(dm->model, unit, ranks);
}

FSDP_API fsdp_status fsdp_tp_fully_shard(fsdp_dmesh *dm, const fsdp_tp_unit_desc *desc,
                                         fsdp_unit **unit) {
    fsdp_tp_unit_desc d;
    fsdp_mesh_info info;
    fsdp_param_desc *params = NULL;
    fsdpi_dt_unit *u = NULL;
    int is_cut = 0;
    if (!dm || !desc || !unit)
        return fsdp_fail(dm ? dm->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E030] tp_fully_shard: dm, desc or unit is NULL: pass all");
    *unit = NULL;
    fsdp_status status = fsdp_desc_read(dm->world, &d, desc, sizeof d, "fsdp_tp_unit_desc");
    if (!status) status = fsdpi_dt_check_tp(dm, &d, &is_cut);
    if (!status) status = fsdpi_dt_unit_info(dm, is_cut, &info);
    if (status) return status;
    d.unit.mesh_info = &info;
    if (is_cut) {
        size_t bytes = (size_t)d.unit.num_params * sizeof *params;
        status = fsdpi_dt_alloc(dm->model, bytes, (void **)&params);
        if (!status) status = fsdpi_dt_unit_new(dm, d.unit.num_params, &u);
        if (!status) {
            memcpy(params, d.unit.params, bytes);
            fsdpi_dt_cut_params(dm, &d, params, u);
            d.unit.params = params;
        }
    }
    if (!status) status = fsdp_fully_shard(dm->model, &d.unit, unit);
    if (!status && !is_cut) status = fsdpi_dt_set_factor(dm, *unit, d.partial_grads);
    fsdpi_dt_free(dm->model, params);
    if (!*unit) fsdpi_dt_free_unit(dm, u);
    else if (u) {
        u->unit = *unit;
        u->next = dm->units;
        dm->units = u;
    }
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Whole tensors.

FSDP_API fsdp_status fsdp_tp_view(const fsdp_dmesh *dm, const fsdp_param_view *local,
                                  fsdp_param_view *out) {
    if (!dm || !local || !out)
        return fsdp_fail(dm ? dm->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E031] tp_view: dm, local or out is NULL: pass all");
    const fsdpi_dt_unit *u = fsdpi_dt_find_unit(dm, local->unit);
    *out = *local;
    if (!u || local->index < 0 || local->index >= u->num_params) return FSDP_OK;
    int dim = u->dims[local->index];
    fsdp_range mine = fsdpi_dt_tp_rows(dm, u->sizes[local->index]);
    out->shape[dim] = u->sizes[local->index];
    out->start[dim] += mine.start;
    return FSDP_OK;
}

// The part of tp rank k of a parameter, tight, and its place in the whole. copy: one block.
static int64_t fsdpi_dt_tp_part(const fsdp_dmesh *dm, const fsdp_param_view *whole, int dim, int k,
                                fsdp_block *block) {
    fsdpi_dt_copy copy = {block, 0, 0};
    fsdpi_dt_piece(&copy, 0, whole->ndim, whole->shape, dim, fsdpi_dt_tp_size(dm), k, 0);
    return copy.count;
}

// Rows between a whole tensor and a tight part of it.
static void fsdpi_dt_move_part(char *to, const char *from, const fsdp_block *b, int back,
                               int64_t size) {
    for (int64_t i = 0; i < b->height; i++) {
        int64_t whole = (b->src + i * b->src_pitch) * size, part = i * b->width * size;
        memcpy(to + (back ? whole : part), from + (back ? part : whole), (size_t)(b->width * size));
    }
}

// The parameter as a view with the shape of the whole, and the dim that tp cuts; *dim -1: none.
static fsdp_status fsdpi_dt_tp_param(fsdp_dmesh *dm, fsdp_unit *unit, int index, const char *call,
                                     fsdp_param_view *view, int *dim) {
    fsdp_param_view local;
    *dim = -1;
    if (!dm || !unit)
        return fsdp_fail(dm ? dm->world : NULL, FSDP_ERR_INVALID_ARG,
                         "[E032] %s: dm or unit is NULL: pass both", call);
    fsdp_status status = fsdp_param_view_get(unit, index, &local);
    const fsdpi_dt_unit *u = fsdpi_dt_find_unit(dm, unit);
    if (u && !status) *dim = u->dims[index];
    return status ? status : fsdp_tp_view(dm, &local, view);
}

FSDP_API fsdp_status fsdp_tp_param_load(fsdp_dmesh *dm, fsdp_unit *unit, int index,
                                        const void *full) {
    fsdp_param_view v;
    fsdp_block block = {0, 0, 0, 0, 0, 0};
    char *part;
    int dim;
    fsdp_status status = fsdpi_dt_tp_param(dm, unit, index, "tp_param_load", &v, &dim);
    if (status || dim < 0 || !full) return status ? status : fsdp_param_load(unit, index, full);
    int64_t size = fsdpi_dt_bytes_of(v.dtype);
    int64_t count = fsdpi_dt_tp_part(dm, &v, dim, fsdpi_dt_tp_rank(dm), &block);
    status = fsdp_alloc(dm->model, FSDP_MEMORY_HOST, count * size,
                        "tp_param_load: no memory for a part", (void **)&part);
    if (status) return status;
    fsdpi_dt_move_part(part, (const char *)full, &block, 0, size);
    status = fsdp_param_load(unit, index, part);
    fsdpi_dt_free(dm->model, part);
    return status;
}

FSDP_API fsdp_status fsdp_tp_param_full(fsdp_dmesh *dm, fsdp_unit *unit, int index, int grad,
                                        void *full) {
    fsdp_param_view v;
    fsdp_block block = {0, 0, 0, 0, 0, 0};
    char *parts = NULL;
    int dim;
    fsdp_status status = fsdpi_dt_tp_param(dm, unit, index, "tp_param_full", &v, &dim);
    if (status) return status;
    if (dim < 0)
        return grad ? fsdp_param_full_grad(unit, index, full) : fsdp_param_full(unit, index, full);
    int64_t size = fsdpi_dt_bytes_of(grad ? v.grad_dtype : v.dtype);
    int64_t largest = fsdpi_dt_tp_part(dm, &v, dim, 0, &block) * size;
    status = fsdp_alloc(dm->model, FSDP_MEMORY_HOST, 2 * largest,
                        "tp_param_full: no memory for two parts", (void **)&parts);
    if (status) return status;
    status = grad ? fsdp_param_full_grad(unit, index, parts) : fsdp_param_full(unit, index, parts);
    for (int k = 0; k < fsdpi_dt_tp_size(dm) && !status; k++) { // each rank's part in turn
        char *part = k == fsdpi_dt_tp_rank(dm) ? parts : parts + largest;
        int64_t bytes = fsdpi_dt_tp_part(dm, &v, dim, k, &block) * size;
        if (bytes && dm->tp >= 0)
            status = fsdp_broadcast(dm->world, dm->dim_mesh[dm->tp], part, bytes, k);
        if (bytes && full && !status) fsdpi_dt_move_part((char *)full, part, &block, 1, size);
    }
    fsdpi_dt_free(dm->model, parts);
    return status;
}

#endif

#ifdef __cplusplus
}
#endif
#endif // FSDP_IMPLEMENTATION
