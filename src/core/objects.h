/* core/objects.h - the structs of a world, a mesh, a model and a unit

   A unit's fields are in four structs: fsdpi_desc is fixed by fsdp_fully_shard, fsdpi_options
   changes with setters, fsdpi_unit_layout is computed by fsdp_fully_shard and at commit,
   fsdpi_state changes in each step.
   Callers: unit.h and commit.h (fsdp_unit), world.h (fsdp_world) and others.
   Source: torch: FSDPParam, FSDPParamGroup, FSDPState.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_OBJECTS_H
#define FSDPI_CORE_OBJECTS_H

#include "grad_path.h"

#define FSDPI_TEXT 1024
enum { FSDPI_DIRECT_MIN = 65536 }; // default of fsdp_model_desc.direct_min, in bytes

typedef struct fsdpi_worker fsdpi_worker;
typedef struct fsdpi_subgroup fsdpi_subgroup;
typedef struct fsdpi_timeline fsdpi_timeline;
typedef struct fsdpi_flight_record fsdpi_flight_record;

// A device event that has been recorded on a stream. clock[s]: number of the newest event of stream
// s that it comes after (a vector clock).
#define FSDPI_DEVICE_EVENTS 16u
typedef struct fsdpi_device_event {
    void *event;
    uint64_t clock[FSDP_STREAM_COUNT];
} fsdpi_device_event;

typedef struct fsdpi_stream_clock {
    uint64_t clock[FSDP_STREAM_COUNT];  // newest event of each stream that this one comes after
    uint64_t recorded;                  // number of device events so far: the newest are kept
    uint64_t due;                       // events to record on the device before the next op
    const fsdp_buf *due_buf;            // buffer of that event if it is the only one, or NULL
} fsdpi_stream_clock;

struct fsdp_world {
    fsdp_boot boot;
    int rank, size;
    uint32_t hung;            // [release] 1: work on the device did not end before the deadline
    uint32_t *state;          // [release] fsdpi_fork_word: 1 + status of the first failure
    uint32_t fail_lock;       // fsdpi_lock of `failure`: worker threads fail the world, too
    char failure[FSDPI_TEXT]; // text of the first failure, written once
    char error[FSDPI_TEXT];   // text of the last failed call of the caller's thread
    char job[128], store[320];
    const fsdp_comm_ops *comm_ops; // NULL: one rank
    fsdp_comm *comm, *reduce_comm; // equal unless two streams may run collectives at once
    fsdp_caps caps;
    const fsdp_device_ops *device_ops;
    fsdp_device *device;
    int mode;                             // FSDP_RUN_*
    const char *mode_reason;              // reason for the mode, a clause for texts
    void *streams[FSDP_STREAM_COUNT];     // FSDP_RUN_STREAMS; COMPUTE may be the caller's
    fsdpi_stream_clock order[FSDP_STREAM_COUNT]; // FSDP_RUN_STREAMS
    fsdpi_device_event points[FSDP_STREAM_COUNT * FSDPI_DEVICE_EVENTS]; // a ring for each stream
    void *own_stream;                     // the COMPUTE stream that the device made
    void *fence;                          // device event that the host waits for in fsdpi_sync
    fsdpi_worker *workers[FSDP_STREAM_COUNT]; // thread of each stream, or NULL; may be shared
    fsdpi_timeline *timeline;      // FSDP_RUN_STREAMS: ops whose times are awaited, or NULL
    fsdpi_flight_record *flight;   // the flight record, or NULL
    int32_t num_comms, num_models; // numbers given to communicators and models so far
    void *bounce;                  // comm memory for collectives on host data
    uint64_t seq;              // number of the last op that belongs to no model
    uint64_t id;               // fsdp_world_id; this rank's summand until all ranks have joined
    fsdp_mesh *meshes;         // list of all meshes of the world
    fsdpi_subgroup *subgroups; // list of the subgroups of all meshes
    fsdp_model *models;        // list of all models; empty in the world of a prediction
};

// A backend, and the device whose memory its collectives work on.
typedef struct fsdpi_backend {
    const char *name;
    const fsdp_comm_ops *(*comm_ops)(void);
    const fsdp_device_ops *(*device_ops)(void);
    int one_host; // 1: it serves the ranks of one host only
    int alone;    // 1: one process stands for one rank of a larger world; chosen by name only
} fsdpi_backend;

struct fsdp_mesh {
    fsdp_world *world;
    int ndim;
    int32_t shape[FSDP_MAX_DIMS], coord[FSDP_MAX_DIMS]; // coord: -1 if the rank is outside
    char *names[FSDP_MAX_DIMS];
    int32_t *ranks;                        // [product of shape]
    int root_numel;                        // ranks of the mesh that it was sliced from, or its own
    fsdp_comm *gather_comm[FSDP_MAX_DIMS]; // NULL: a group of one rank, or the rank is outside
    fsdp_comm *reduce_comm[FSDP_MAX_DIMS]; // gather_comm, unless both may run at once
    int32_t comm_number[FSDP_MAX_DIMS];    // number of gather_comm; reduce_comm has the next one
    uint8_t borrowed[FSDP_MAX_DIMS];       // 1: the communicators belong to another mesh
    fsdp_mesh *next;
};

// A communicator that is made at its first use: for n neighbouring ranks, if a unit has
// reshard_after_forward = n; or for all ranks of a dim, if an extension asks for one of a stream.
struct fsdpi_subgroup {
    const fsdp_mesh *mesh;
    int dim, size, stream;
    int32_t number;
    fsdp_comm *comm;
    fsdpi_subgroup *next;
};

enum { FSDPI_UNGUARDED, FSDPI_IS_OPEN, FSDPI_IS_CLOSED }; // fsdp_buf.guard: see guard.h

struct fsdp_buf {
    char *ptr;
    size_t bytes;
    fsdp_event ready; // event of the last write
    fsdp_event avail; // event of the last release; the first write after acquire waits for it
    uint64_t released; // number of the last release in this step; 0: none
    uint8_t held, pool,
        acquired_pool;      // 1: in use; pool that counts its bytes; pool that it is acquired for
    uint8_t pinned;         // 1: pinned host memory, which peers cannot read
    uint8_t is_view;        // 1: it lies inside another buffer, which owns the memory
    uint8_t guard, spot;    // FSDPI_UNGUARDED, ...; index of its present address
    int32_t number;         // number in the order of creation
};

typedef struct fsdpi_slot_class { // slots of equal pool and size
    int pool;
    size_t bytes;
    int units, ahead; // units that gather into it; 1: it begins with two slots, inline with one
    fsdp_buf **slots;
    int count, cap;
} fsdpi_slot_class;

// Marks of a parameter, a set in its byte of fsdp_unit.use. FSDPI_USE_EACH * mark: the mark in each
// of eight bytes.
#define FSDPI_USE_EACH 0x0101010101010101u
enum {
    FSDPI_USE_USED = 1,   // this rank holds an unreduced gradient of it
    FSDPI_USE_REDUCED = 2 // its shard gradient holds a reduced gradient
};

typedef struct fsdpi_param {
    char *name;
    void *user;
    fsdp_dtype dtype;
    int32_t ordinal, requires_grad, keep_dtype;
    int32_t part;             // index in fsdpi_unit_layout.parts
    fsdp_layout_param lay;    // shard_offset in the flat block, full_offset in the GATHER slot
    int64_t grad_offset;      // offset of the full gradient in the GRAD slot, in elements
    fsdp_buf *early;          // the shard, if it was loaded before the first layout; until its move
    int64_t old_offset;       // offset of the shard in the previous layout, for fsdpi_move
    fsdp_dtype old_dtype;     // dtype in the previous layout or of `early`, for fsdpi_move
    fsdp_grad_hook grad_hook; // NULL: none
    void *grad_hook_user;
    fsdp_gather_extension extension;            // extension.sizes is NULL: none
    int32_t num_strings;                        // byte strings that the extension gathers
    int64_t string_bytes[FSDP_GATHER_TENSORS];  // bytes of one rank
    int64_t string_offset[FSDP_GATHER_TENSORS]; // offset in the GATHER slot, in bytes
} fsdpi_param;

// The list of an op: the blocks of a copy, or the segments of a collective.
typedef struct fsdpi_op_list {
    fsdp_block *blocks;
    fsdp_seg *segs;
    int num;
    uint64_t count; // elements in the list
} fsdpi_op_list;

// The trainable or the frozen parameters of a dtype group.
typedef struct fsdpi_param_list {
    int64_t shard_numel;  // S: elements of this rank's shards
    int64_t packed_numel; // K: elements of the packed part of S
    int64_t base;         // offset in the flat block, in elements
} fsdpi_param_list;

/* A unit's parameters with equal stored and gathered dtype. A parameter with an extension has a
   group of its own. Offsets are in elements. Most units have one group. */
typedef struct fsdpi_dtype_group {
    fsdp_dtype dtype, param_dtype; // stored; gathered
    fsdpi_param *extended; // its only parameter, or NULL
    int num_train;
    fsdpi_param_list train, frozen;
    int64_t slot, grad; // offsets of its first element in GATHER and in GRAD
    int64_t reduce;     // offset of its shards in one rank's chunk of REDUCE_IN
    int num_gather;     // number of its segments in the unit's all_gather
    fsdpi_op_list copy_in, copy_out, chunk_cat, divide, to_in, to_shard, rescale; // blocks
} fsdpi_dtype_group;

// The arguments of fsdp_fully_shard, resolved.
typedef struct fsdpi_desc {
    char *name;           // name as texts print it: "(root)" for ""
    const char *own_name; // name as given
    void *user;
    int index, num_params; // index: in the model
    fsdp_mesh_info info;
    fsdp_comm *slice_comm; // gathers slices: see `slices`; info.shard_comm gathers shards
    fsdp_dtype policy_dtype, policy_reduce, output_dtype; // mixed precision; KEEP: no cast
    int keep_inputs;                                      // 1: activations are not cast
    int slices; // n if the unit was made with reshard_after_forward = n > 1; otherwise 0
} fsdpi_desc;

/* The numeric options of a unit: type, name, value in a new unit. Fields, defaults and the hash of
   all options come from this list and from FSDPI_GRAD_PATH_OPTIONS, which has those that decide the
   gradient path. */
#define FSDPI_OPTIONS(X)                                                                           \
    X(int, reshard_after_forward, FSDP_RESHARD_ALWAYS) /* or _NEVER, or fsdpi_desc.slices */       \
    X(uint8_t, reshard_after_backward, 1)                                                          \
    X(uint8_t, unshard_in_backward, 1)                                                             \
    X(uint8_t, reduce_unused, 0)                                                                   \
    FSDPI_GRAD_PATH_OPTIONS(X)

enum { FSDPI_FORWARD, FSDPI_BACKWARD };
enum { FSDPI_CUSTOM_GATHER, FSDPI_CUSTOM_SCATTER, FSDPI_CUSTOM_ALL_REDUCE, FSDPI_CUSTOM_COUNT };

// The options of a unit, which setters change.
typedef struct fsdpi_options {
#define FSDP_X(type, name, initial) type name;
    FSDPI_OPTIONS(FSDP_X)
#undef FSDP_X
    int32_t *prefetch[2];    // indices of units; [FSDPI_FORWARD], [FSDPI_BACKWARD]
    int32_t num_prefetch[2]; // 0: none, or implicit prefetch
    fsdp_all_reduce_hook all_reduce_hook;
    void *all_reduce_user;
    fsdp_custom_comm custom[FSDPI_CUSTOM_COUNT]; // NULL: the backend's
    void *custom_user[FSDPI_CUSTOM_COUNT];
} fsdpi_options;

/* An op that is built at commit: the fields that follow from the kind of step and the dtype group.
   fsdpi_emit_step writes the others: see template.h. */
typedef struct fsdpi_template {
    fsdp_op op;
    const fsdpi_dtype_group *part;     // its dtype group; NULL: the op is for the whole unit
    const fsdpi_op_list *work;         // blocks or segments; NULL: none
    fsdp_buf *const *src, *const *dst; // point at the pointers to the buffers it reads and writes
    int64_t begin;                     // offset of the input in its buffer, in bytes
    uint8_t from, to;                  // the places that src, dst and work are set for
    uint8_t is_compared;               // 1: ranks compare which parameters are USED
} fsdpi_template;

// A unit's layout. fsdpi_unit_arrange computes the sizes, commit the lists and the op templates.
typedef struct fsdpi_unit_layout {
    int num_train, num_parts, train_parts;       // train_parts: dtype groups with trainables
    uint64_t hash;                               // hash of everything that ranks must agree on
    uint8_t agree[FSDP_AGREE_COUNT];             // a byte of the hash of each FSDP_AGREE_* item
    fsdpi_dtype_group *parts;                    // dtype groups; room for num_params
    fsdp_dtype reduce_dtype, gather_dtype;       // gather_dtype U8: groups gathered as bytes
    int64_t slot_bytes, grad_bytes, slice_bytes; // sizes of the GATHER, GRAD and SLICE slots
    int64_t train_numel;                         // elements of this rank's trainable shards
    int64_t reduce_numel;         // W * train_numel: elements of REDUCE_IN
    int first_train;              // index of the first dtype group with trainables
    uint8_t gather;               // FSDPI_GATHER_*
    uint8_t grads_ahead;          // 1: a reduction may read GRAD while the next unit writes another
    int classes[FSDP_POOL_COUNT]; // index in model->classes, -1: none
    int pad_in;                   // 1: REDUCE_IN has padding that no block covers
    void *lists;                  // one allocation for the lists and templates below
    int64_t gather_begin; // offset in the flat block from which all_gather's segments count
    fsdpi_op_list all_gather, slice_gather;          // segments
    fsdpi_op_list reduce_scatter[2], to_out[2];      // segments for GRAD [0] and REDUCE_IN [1]
    fsdpi_op_list slice_copy, whole_out;             // blocks
    fsdpi_op_list whole_grad, padded_in;             // only count is set, in bytes
    fsdpi_template *templates[FSDPI_STEP_COUNT + 1]; // first one of each kind; last: the end
} fsdpi_unit_layout;

enum { // what the shard gradient holds
    FSDPI_SHARD_GRAD_NONE,
    FSDPI_SHARD_GRAD_ZERO,
    FSDPI_SHARD_GRAD_REDUCED // a reduced gradient, to which the next reduction adds
};

// The state of a unit, which a step changes. stale: shards were written after the gather.
typedef struct fsdpi_state {
    uint8_t training, storage, stale;
    uint8_t ahead;                // 1: a prefetch has gathered it, and it has not been waited for
    uint8_t shard_grad;           // FSDPI_SHARD_GRAD_*
    int32_t forwards;             // grad-enabled forwards that have not run backward
    int32_t last_order;           // the unit's newest entry in fsdp_model.order, or -1
    fsdp_buf *slot[FSDPI_PLACES]; // the slots that the unit holds, by place
} fsdpi_state;

struct fsdp_unit {
    fsdp_model *model;
    fsdpi_param *params;
    fsdpi_desc desc;
    fsdpi_options options;
    fsdpi_unit_layout layout;
    fsdpi_facts facts;
    fsdpi_grad_path route;   // gradient path of the last reduction: see fsdpi_do_reduce
    fsdp_unit_callback callback; // NULL: none
    void *callback_user;
    int called_readable;     // 1: its last call said that the parameters are readable
    uint32_t reported_calls; // set of calls (bits) that have logged an error in this step
    uint64_t *use;           // FSDPI_USE_* of the parameters, a byte each: see fsdpi_use
    int use_words;
    fsdpi_state state;
};

typedef struct fsdpi_flat_block { // shards and shard gradients of one dtype
    int64_t train_numel;          // elements of trainables, with alignment
    int64_t numel;                // elements: train_numel, and those of frozen parameters
    int64_t grad_numel;           // train_numel, at least 1 if a parameter is trainable
    fsdp_buf *shard, *grad;
    fsdp_buf *old_shard, *old_grad; // previous layout's blocks, until fsdpi_move has copied them
} fsdpi_flat_block;

typedef struct fsdpi_forward { // an entry of fsdp_model.order
    fsdp_unit *unit;
    int32_t previous; // index of the unit's previous entry, or -1
} fsdpi_forward;

// An extension that is attached to a model.
typedef struct fsdpi_attached {
    fsdp_extension e;
    struct fsdpi_attached *next;
} fsdpi_attached;

enum { FSDPI_NAMES = 16, FSDPI_NAME = 32 }; // names that extensions register; bytes with the NUL

typedef struct fsdpi_names {
    int count;
    char text[FSDPI_NAMES][FSDPI_NAME];
} fsdpi_names;

// The callbacks that extensions of a model have: bits of fsdp_model.listeners.
enum {
    FSDPI_LISTEN_CALLS = 1,
    FSDPI_LISTEN_OPS = 2,
    FSDPI_LISTEN_SLOTS = 4,
    FSDPI_LISTEN_TIMES = 8,
    FSDPI_LISTEN_RETURNS = 16
};
enum { FSDPI_LISTEN_RECORDS = FSDPI_LISTEN_OPS | FSDPI_LISTEN_TIMES };

// The options of a model, each 0 or 1: name, value in a new model. Fields, defaults and the hash of
// plans come from this list.
#define FSDPI_MODEL_OPTIONS(X) X(grad_enabled, 1) X(is_last_backward, 1) X(uneven, 0)
typedef struct fsdpi_model_options {
#define FSDP_X(name, initial) int name;
    FSDPI_MODEL_OPTIONS(FSDP_X)
#undef FSDP_X
} fsdpi_model_options;
#define FSDP_X(name, initial) initial,
static const fsdpi_model_options fsdpi_first_options = {FSDPI_MODEL_OPTIONS(FSDP_X)};
#undef FSDP_X

struct fsdp_model {
    fsdp_world *world;
    fsdp_model_desc desc; // resolved
    fsdp_mesh *own_mesh;  // mesh of all ranks if the desc has none
    fsdp_mesh_info info;
    int mixed;      // 1: ranks of the mesh hold different parameters, or a unit has another mesh
    int grad_hooks; // 1: a post_accumulate hook has been set
    int unit_callbacks; // 1: a unit callback has been set
    const fsdp_unit *outside; // unit whose mesh has ranks that the model's mesh lacks, or NULL
    fsdp_unit **units;
    int num_units, cap_units, num_params, number; // number: its number in the world
    fsdpi_flat_block flats[FSDP_DTYPE_COUNT];
    fsdpi_slot_class *classes;
    int num_classes, cap_classes;
    int laid_out;  // 1: there is a layout
    int committed; // 1: and the extensions have been notified of it
    int backward;  // 1 from the first pre_backward until finalize: the column of fsdpi_rows
    fsdpi_model_options options;
    uint8_t call_state; // training state that the ops of the current call carry
    uint64_t seq, step, release_seq; // numbers of the last op, of the step, of the last release
    uint64_t agreed_hash; // hash of the values given to fsdp_agree
    uint64_t num_commits; // number of layouts so far: it tells extensions that memory has moved
    int64_t ahead_bytes; // bytes of the GATHER slots of units that are `ahead`
    fsdpi_forward *order; // the forwards since the last backward ended, in order
    int num_order, cap_order;
    uint32_t reported_calls; // set of calls (bits) that have warned of unreduced gradients
    fsdp_status hook_status; // status of the first hook that failed since finalize
    char hook_error[FSDPI_TEXT];
    int64_t hook_failures; // number of such first failures so far
    fsdp_buf *scalar;       // one f64: sum or maximum of the last norm
    double norm_type;       // order of that norm; 0: none yet
    fsdp_buf *full_scratch; // slot for fsdp_param_full, from its first call on
    char *full_copy;        // host copy of full_scratch, if the host cannot read that
    fsdp_seg full_seg;      // segment of the current piece of param_full
    fsdp_block full_block;
    void *fallback; // memory that failed getters return: fsdp_fallback_ptr
    size_t fallback_bytes;
    fsdp_block *norm_blocks;     // 2 * num_params: those of the norm, then those that clip scales
    fsdpi_attached *attached;    // list of extensions, in the order of their calls
    const fsdpi_attached *offered_to; // extension whose `call` is running, or NULL
    uint8_t listeners; // FSDPI_LISTEN_CALLS, ...: callbacks that at least one extension has
    fsdpi_names labels, pools;
    uint64_t settings; // hash of all options, kept by plans; 0: one has changed since
    const char
        *write_lock_text; // reason why shards must not be written now, for texts; NULL: none
    int ext_depth;        // nesting depth of calls to extensions
    int dry_run;       // 1: no op runs, and an extension supplies every slot
    int32_t num_bufs;  // numbers given to buffers so far
    fsdp_counters counters;
    int64_t host_bytes; // host memory of the model's tables, in bytes
    int32_t pool_slots[FSDP_POOL_MAX];
    int64_t pool_bytes[FSDP_POOL_MAX];
    fsdp_model *next;
};

#endif // FSDPI_CORE_OBJECTS_H
