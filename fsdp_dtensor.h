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

// The placement of a tensor along one mesh dim. All zero: every rank has the full tensor.
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

// The part of a tensor at one coordinate of the mesh.
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
   Thread      any
   Source      torch: DTensorSpec, DTensor.from_local with shape, normalize_to_torch_size */
FSDP_API fsdp_status fsdp_spec_init(fsdp_spec *out, int mesh_ndim, const int32_t *mesh_shape,
                                    const fsdp_placement *place, fsdp_dtype dtype, int ndim,
                                    const int64_t *shape);

/* fsdp_spec_local - the part of one rank; any rank of any world
   coord       [mesh_ndim] its coordinate in the mesh
   Layout      rows are cut in the order of the placements, each time as fsdp_shard_range
   Result      FSDP_OK; INVALID_ARG (a coordinate out of range, a spec that fsdp_spec_init did not
               fill)
   Thread      any
   Source      torch: compute_local_shape_and_global_offset */
FSDP_API fsdp_status fsdp_spec_local(const fsdp_spec *spec, const int32_t *coord, fsdp_local *out);

/* fsdp_spec_infer - as fsdp_spec_init, from the shape of a part. All parts have this shape
   local_shape [ndim]
   Result      as fsdp_spec_init
   Thread      any
   Source      torch: compute_global_tensor_info, DTensor.from_local without shape */
FSDP_API fsdp_status fsdp_spec_infer(fsdp_spec *out, int mesh_ndim, const int32_t *mesh_shape,
                                     const fsdp_placement *place, fsdp_dtype dtype, int ndim,
                                     const int64_t *local_shape);

/* fsdp_spec_to_strided   - the split factors with which PyTorch writes the orders of a spec
   fsdp_spec_from_strided - the orders that have these factors; overwrites those of spec
   factor      [mesh_ndim]: 1 where PyTorch has Shard, Replicate or Partial, otherwise the
               factor of _StridedShard. from_strided reads it only where spec has SHARD. It may
               differ from 1 only by the sizes of mesh dims to the right
   Result      FSDP_OK; INVALID_ARG (a factor < 1, a spec that fsdp_spec_init did not fill);
               from_strided: UNSUPPORTED, if no order has these factors. Then spec is unchanged
   Note        PyTorch's strided parts are these parts only if every cut is even. What FSDP over
               tensor parallelism stores are these parts, always
   Thread      any
   Source      torch: DTensorSpec._convert_shard_order_to_StridedShard and its inverse */
FSDP_API fsdp_status fsdp_spec_to_strided(const fsdp_spec *spec, int64_t *factor);
FSDP_API fsdp_status fsdp_spec_from_strided(fsdp_spec *spec, const int64_t *factor);

/* -------------------------------------------------------------------------------------------- */
/* Routes: how to get from one spec to another.                                                   */

// Assumed speeds of the mesh's links, equal on all ranks. All 0: PyTorch's numbers, 6.6 us
// for a collective, 0.6 us for each hop, 87.7 GB/s (GB: 2^30 bytes).
typedef struct fsdp_links {
    double base_us, hop_us[FSDP_MAX_DIMS], gbytes_per_s[FSDP_MAX_DIMS]; // for each mesh dim
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
   Thread      any
   Source      torch: _gen_transform_infos, DTensorRedistributePlanner.find_min_cost_path */
FSDP_API fsdp_status fsdp_route_find(const fsdp_spec *from, const fsdp_spec *to,
                                     const fsdp_links *links, void *scratch, int64_t scratch_bytes,
                                     fsdp_route *route);

/* -------------------------------------------------------------------------------------------- */
/* Loss parallel: cross-entropy of logits whose classes are cut over the ranks.                   */

/* fsdp_loss_parallel_max  - the largest logit of each row on this rank
   fsdp_loss_parallel_sums - what the loss needs to know about each row on this rank
   fsdp_loss_parallel_grad - the gradient of the logits
       fsdp_loss_parallel_max(x, FSDP_BF16, rows, cols, maxima);           // all-reduce: MAX
       fsdp_loss_parallel_sums(x, FSDP_BF16, rows, cols, first, t, maxima, sums); // all-reduce: SUM
       loss[i] = logf(sums[i]) - sums[rows + i];                           // of each row
       fsdp_loss_parallel_grad(x, x, FSDP_BF16, rows, cols, first, t, maxima, sums, dout);
   They are loops over host memory. On a GPU kernels of yours do the same
   logits      [rows][cols] of a floating dtype: this rank's classes first .. first + cols - 1. cols
               may be 0. Arithmetic is in f64, results are rounded once
   targets     [rows] the class of each row. A row whose target no rank has is ignored: give it 0 in
               dout, and leave its loss out
   maxima      [rows] out of max: -infinity if cols is 0; in of the others: that of all ranks
   sums        [2][rows] out of sums: the sum of exp(x - maximum); x - maximum of the target if it
               is on this rank, else 0. In of grad: their sums over all ranks
   dout        [rows] the gradient of each row's loss. If it is 0, the row of grad is 0
   grad        [rows][cols] out: (exp(x - maximum) / sum - [target]) * dout. It may be logits
   Result      FSDP_OK; INVALID_ARG (not a floating dtype, a negative size, NULL that is not empty)
   Thread      any
   Source      torch: torch.distributed.tensor.parallel.loss_parallel; two all-reduces instead of
               three: the logit of the target travels with the sum */
FSDP_API fsdp_status fsdp_loss_parallel_max(const void *logits, fsdp_dtype dtype, int64_t rows,
                                            int64_t cols, float *maxima);
FSDP_API fsdp_status fsdp_loss_parallel_sums(const void *logits, fsdp_dtype dtype, int64_t rows,
                                             int64_t cols, int64_t first, const int64_t *targets,
                                             const float *maxima, float *sums);
FSDP_API fsdp_status fsdp_loss_parallel_grad(void *grad, const void *logits, fsdp_dtype dtype,
                                             int64_t rows, int64_t cols, int64_t first,
                                             const int64_t *targets, const float *maxima,
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
    fsdp_spec in[FSDP_TENSOR_OP_INPUTS];   // required specs of the inputs
    fsdp_spec grad[FSDP_TENSOR_OP_INPUTS]; // how the gradient of each input arrives, if that of the
                                           // output is as out, REPLICATE for PARTIAL (then it is
                                           // that of a rank's addend). All 0: ids
    double cost_us;                        // cost of redistributing the inputs
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
               this way already, and adds no cut to a dim shorter than the number of parts. Of equal
               costs: fewest placements that change, then fewest PARTIAL in the output
   Result      FSDP_OK; INVALID_ARG (number, mesh or shapes of inputs, args, a spec that
               fsdp_spec_init did not fill); UNSUPPORTED (there is no such op); OUT_OF_MEMORY (more
               than 4 mesh dims of more than one rank, or 4 and a tensor of more than 4 dims)
   Allocates   128 KiB of the stack      Thread any
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
    const fsdp_mesh *mesh;            // placements of this model's tensors refer to its dims
    const char *tp_dim;               // names of its dims. NULL: "tp", if there is one
    const char *shard_dim;            // NULL: that over whose ranks the model's mesh_info does so.
    const char *replicate_dim;        // If one of these is no dim of this mesh: "dp_shard", else
                                      // "dp", and "dp_replicate", if there are such
    int64_t staging_bytes;            // of each staging buffer; 0: as large as redistributions need
    int32_t overlap;                  // 1: fsdp_redistribute_begin overlaps with your stream
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
   Collective  as fsdp_model_destroy      Blocks for operations under way */
FSDP_API void fsdp_dmesh_destroy(fsdp_dmesh *dm);

/* fsdp_dmesh_alloc - device memory that peers read in place: what is redistributed from or to its
   begin is not copied if the layout allows that
   ptr         zero-filled, at least nbytes; lives until fsdp_dmesh_destroy. The model's memory
               counts it in the pool "activations"
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY, collective errors
   Collective  as fsdp_model_commit; ranks may give different sizes
   Allocates   yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_dmesh_alloc(fsdp_dmesh *dm, int64_t nbytes, void **ptr);

/* -------------------------------------------------------------------------------------------- */
/* Redistribution: bring a tensor from one spec to another.                                       */

typedef struct fsdp_redistribution fsdp_redistribution;

typedef struct fsdp_redistribution_desc {
    uint32_t size, start_canary;
    const char *name;                 // in texts and records, copied, at most 63 bytes: for example
                                      // "h.3 mlp in". NULL: "redistribute"
    fsdp_spec from, to;               // with equal mesh, shape and dtype
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
   Allocates   yes      Source torch: DTensor.redistribute */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_redistribution_create(
    fsdp_dmesh *dm, const fsdp_redistribution_desc *desc, fsdp_redistribution **out);

/* fsdp_redistribution_create_backward - the way of the gradient, back from `to` to `from`
   grad        how the gradient of `to` arrives: a spec of its mesh, shape and dtype. NULL: as `to`,
               REPLICATE for PARTIAL
   Effect      it ends as `from`; where that is PARTIAL, as grad if that is PARTIAL, else REPLICATE.
               It has the comm_dtype and the scale of forward, and its name with " backward". What
               comes back to a PARTIAL is the gradient of each rank's addend: where forward joins n
               addends of AVG, 1/n of that of the result (PyTorch leaves out the 1/n)
   Result      as fsdp_redistribution_create; INVALID_ARG: forward joins addends of MAX or MIN,
               whose gradient depends on the values
   Collective, Blocks, Allocates  as fsdp_redistribution_create
   Source      torch: _redistribute_backward, _normalize_placements_for_grad */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_redistribution_create_backward(
    fsdp_redistribution *forward, const fsdp_spec *grad, fsdp_redistribution **out);

/* fsdp_redistribution_resize - set another size of one dim of the tensor
   size        0 .. the size in the desc. The route stays, even if another were cheaper now
   Result      FSDP_OK; INVALID_ARG; INVALID_STATE (it is begun)
   Collective  no, but every rank has to do the same
   Blocks      on devices with streams for operations under way: they read its lists */
FSDP_API fsdp_status fsdp_redistribution_resize(fsdp_redistribution *r, int dim, int64_t size);

/* fsdp_redistribution_get - the route, this rank's parts, counters
   Result      FSDP_OK; INVALID_ARG */
typedef struct fsdp_redistribution_info {
    fsdp_route route;                    // its costs: of the sizes in the desc
    fsdp_local from, to;                 // this rank's parts, of the current sizes
    int64_t src_capacity, dst_capacity;  // bytes. If src or dst begins that much memory of
                                         // fsdp_dmesh_alloc, padding needs no copy
    uint64_t routes;                     // that dm has found, of all its redistributions
    uint64_t runs;                       // runs of this object
} fsdp_redistribution_info;
FSDP_API fsdp_status fsdp_redistribution_get(const fsdp_redistribution *r,
                                             fsdp_redistribution_info *out);

/* fsdp_redistribute - run it, in the order of your stream
   src, dst    device memory: this rank's parts `from` and `to`. You may write src after the call.
               dst may equal src if every step is an all_reduce; otherwise they must not overlap.
               An empty part may be NULL
   Writes      dst; if dst is the beginning of memory of fsdp_dmesh_alloc: up to dst_capacity bytes
   Copies      the library stages data that peers cannot read, and data whose layout does not fit a
               collective: parts that are cut along a dim that follows one longer than 1, and uneven
               parts without room for padding
   Result      FSDP_OK; INVALID_ARG, INVALID_STATE (begun and not waited for); collective errors,
               which abort the world
   Collective  yes: every rank of dm's mesh, same order
   Blocks      inline and with comm threads: until done; otherwise no
   Source      torch: DTensor.redistribute */
FSDP_API fsdp_status fsdp_redistribute(fsdp_redistribution *r, void *dst, const void *src);

/* fsdp_redistribute_begin - run it concurrently with your stream, if dm has overlap; otherwise as
               fsdp_redistribute. Until the wait, dst and src are the library's
   fsdp_redistribute_wait  - from here on your stream may read dst and write src. If nothing was
               begun, it does nothing
   Result      as fsdp_redistribute
   Collective  begin: yes, every rank of dm's mesh, same order. wait: no
   Blocks      begin: no, but inline until done. wait: with comm threads until done; otherwise no
   Allocates   no, but the first one on the extensions' stream: a comm thread
   Source      torch: redistribute(async_op=True), AsyncCollectiveTensor.wait */
FSDP_API fsdp_status fsdp_redistribute_begin(fsdp_redistribution *r, void *dst, const void *src);
FSDP_API fsdp_status fsdp_redistribute_wait(fsdp_redistribution *r);

/* fsdp_dtensor_check - check that ranks with equal parts have equal bytes. A hash of the part
   travels, not the data
   data        device memory: this rank's part; NULL if it is empty
   what        its name, for the text
   Result      FSDP_OK; CORRUPT: the text names two ranks that differ; the world continues.
               INVALID_ARG; collective errors
   Collective  yes: every rank of dm's mesh      Blocks yes, at most timeout_ms for each step
   Source      torch: DTensor.from_local(run_check=True) */
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
               another one is not (make two units), PARTIAL, a dim out of range, a mesh in the desc;
               a cut or partial_grads without a tp_dim (one of 1 rank cuts nothing); the dims of dm
               shard or replicate over other ranks than the model's mesh_info, or over none of a
               dim with several ranks that is called "dp", "dp_shard" or "dp_replicate"
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
   Result      FSDP_OK; INVALID_ARG */
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
/* Implementation: the parts that no other part includes. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_DTENSOR_IMPLEMENTED)
#define FSDP_DTENSOR_IMPLEMENTED
#include "src/dtensor/loss.h"
#include "src/dtensor/propagate.h"
#ifndef FSDP_MATH_ONLY
#include "src/dtensor/units.h"
#endif
#endif // FSDP_IMPLEMENTATION
