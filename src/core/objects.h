/* core/objects.h - what a world, a mesh, a model and a unit are made of

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_OBJECTS_H
#define FSDPI_CORE_OBJECTS_H

#include "os.h"
#include "grad_path.h"

#define FSDPI_TEXT 1024

typedef struct fsdpi_worker fsdpi_worker;
typedef struct fsdpi_subgroup fsdpi_subgroup;
typedef struct fsdpi_timeline fsdpi_timeline;
typedef struct fsdpi_flight_record fsdpi_flight_record;

// A recorded event of a device's stream. behind: of each stream, and of its own, the number of the
// last mark before it.
#define FSDPI_DEVICE_EVENTS 16u
typedef struct fsdpi_device_event {
    void *event;
    uint64_t clock[FSDP_STREAM_COUNT];
} fsdpi_device_event;

typedef struct fsdpi_stream_clock {
    uint64_t clock[FSDP_STREAM_COUNT];  // of the stream as it is now
    uint64_t recorded;                  // points so far: the newest are kept
    uint64_t due;                       // marks that are to be recorded before more work comes
    const fsdp_buf *due_buf;            // the buffer of the only one, or NULL
} fsdpi_stream_clock;

struct fsdp_world {
    fsdp_boot boot;
    int rank, size;
    int log_level;
    uint32_t hung;            // work on the device did not end in time
    uint32_t *state;          // 1 + fsdp_status of the first failure; 0: see fsdpi_fork_word
    uint32_t fail_lock;       // fsdpi_lock of the first failure: worker threads may have it
    char failure[FSDPI_TEXT]; // its text, written once
    char error[FSDPI_TEXT];   // of the last call of the caller's thread that failed
    char job[128], store[320];
    const fsdp_comm_ops *comm_ops; // NULL: one rank
    fsdp_comm *comm, *reduce_comm; // equal, unless two streams may run collectives at a time
    fsdp_caps caps;
    const fsdp_device_ops *device_ops;
    fsdp_device *device;
    int mode;                             // FSDP_RUN_*
    const char *mode_reason;              // why: a part of a text
    void *streams[FSDP_STREAM_COUNT];     // FSDP_RUN_STREAMS; COMPUTE may be the caller's
    fsdpi_stream_clock order[FSDP_STREAM_COUNT]; // likewise
    fsdpi_device_event points[FSDP_STREAM_COUNT * FSDPI_DEVICE_EVENTS];
    void *own_stream;                     // the device's COMPUTE
    void *fence;                          // an event to wait for all of them
    fsdpi_worker *lanes[FSDP_STREAM_COUNT]; // FSDP_RUN_LANES; COMPUTE has none; may be the same one
    fsdpi_timeline *timeline;      // FSDP_RUN_STREAMS: records whose times are awaited, or NULL
    fsdpi_flight_record *flight;   // the flight record, or NULL
    int32_t num_comms, num_models; // numbers given to communicators and models so far
    void *bounce;                  // comm memory for collectives on host data
    uint64_t seq;
    uint64_t id;               // fsdp_world_id; until all have joined this rank's summand
    fsdp_mesh *meshes;         // all of this world
    fsdpi_subgroup *subgroups; // of its meshes
    fsdp_model *models;        // all of this world
};

// A backend, and the device whose memory its collectives work on.
typedef struct fsdpi_backend {
    const char *name;
    const fsdp_comm_ops *(*comm_ops)(void);
    const fsdp_device_ops *(*device_ops)(void);
    int one_host; // it serves the ranks of one host only
    int alone;    // a process plays one rank, and there are no others: chosen by name only
} fsdpi_backend;

struct fsdp_mesh {
    fsdp_world *world;
    int ndim;
    int32_t shape[FSDP_MAX_DIMS], coord[FSDP_MAX_DIMS]; // coord: -1 when this rank is outside
    char *names[FSDP_MAX_DIMS];
    int32_t *ranks;                        // [product of shape]
    int root_numel;                        // ranks of the mesh that it was sliced from, or its own
    fsdp_comm *gather_comm[FSDP_MAX_DIMS]; // NULL: a group of one, or outside
    fsdp_comm *reduce_comm[FSDP_MAX_DIMS]; // equal to gather_comm unless lanes may run both
    int32_t comm_number[FSDP_MAX_DIMS];    // of gather_comm; reduce_comm has the next one
    uint8_t borrowed[FSDP_MAX_DIMS];       // the groups of this dim belong to another mesh
    fsdp_mesh *next;
};

// A group that is made at its first use: n neighbouring ranks for reshard_after_forward = n, or a
// whole dim once more, for what extensions run on a stream.
struct fsdpi_subgroup {
    const fsdp_mesh *mesh;
    int dim, size, stream;
    int32_t number;
    fsdp_comm *comm;
    fsdpi_subgroup *next;
};

// Owns: what a model, its units and their parameters are, and where everything lies: the flat
// blocks of the model and the layout of each unit's slots. Invariants: nothing here depends on
// time; the layout is the same on every rank. Source: torch: FSDPParam, FSDPParamGroup.

enum { FSDPI_UNGUARDED, FSDPI_IS_OPEN, FSDPI_IS_CLOSED }; // may the caller touch it? See guard.h

struct fsdp_buf {
    char *ptr;
    size_t bytes;
    fsdp_event ready; // last write
    fsdp_event avail; // release by the last consumer; the first write after acquire waits for it
    uint64_t released;
    uint8_t held, pool,
        acquired_pool;      // pool: which counts its bytes; as: for which a unit takes it
    uint8_t pinned;         // host memory of the device, which peers cannot read
    uint8_t is_view;        // it lies inside of another buffer, which owns the memory
    uint8_t guard, spot;    // FSDPI_UNGUARDED, ...; which of its spots in memory it is at
    int32_t number;         // in the order of making
};

typedef struct fsdpi_slot_class { // slots of one pool and size
    int pool;
    size_t bytes;
    int units, ahead; // ahead: filled while another is in use, so two, unless everything is inline
    fsdp_buf **slots;
    int count, cap;
} fsdpi_slot_class;

// Marks of a parameter, a set in a byte of fsdp_unit.use. EACH times a mark: the mark of eight.
#define FSDPI_USE_EACH 0x0101010101010101u
enum {
    FSDPI_USE_USED = 1,   // this rank has a gradient of it that is not reduced yet
    FSDPI_USE_REDUCED = 2 // it has a gradient: the shard gradient holds it
};

typedef struct fsdpi_param {
    char *name;
    void *user;
    fsdp_dtype dtype;
    int32_t ordinal, requires_grad, keep_dtype;
    int32_t part;             // index in the unit's parts
    fsdp_layout_param lay;    // shard_offset in the flat block, full_offset in the GATHER slot
    int64_t grad_offset;      // of the full gradient in the GRAD slot
    int64_t old_offset;       // of the shard in the layout before, while the model is laid out anew
    fsdp_dtype old_dtype;     // likewise
    fsdp_grad_hook grad_hook; // NULL: none
    void *grad_hook_user;
    fsdp_gather_extension extension;            // sizes NULL: none
    int32_t num_strings;                        // of the extension
    int64_t string_bytes[FSDP_GATHER_TENSORS];  // of one rank
    int64_t string_offset[FSDP_GATHER_TENSORS]; // in the GATHER slot, bytes
} fsdpi_param;

// What an op carries: the blocks of a copy, or the segments of a collective.
typedef struct fsdpi_op_list {
    fsdp_block *blocks;
    fsdp_seg *segs;
    int num;
    uint64_t count; // elements
} fsdpi_op_list;

// Trainables or frozen parameters of a part, in the flat block and in the slots.
typedef struct fsdpi_param_list {
    int64_t shard_numel;  // S
    int64_t packed_numel; // K
    int64_t base;         // in the flat block
} fsdpi_param_list;

/* The parameters of a unit that are stored in one dtype and gathered in one dtype; a parameter with
   an extension is a part of its own. Offsets are in elements of param_dtype. Most units have one
   part. */
typedef struct fsdpi_dtype_group {
    fsdp_dtype dtype, param_dtype;
    fsdpi_param *extended; // its only parameter, or NULL
    int num_train;
    fsdpi_param_list train, frozen;
    int64_t slot, grad; // where it begins in GATHER and GRAD
    int64_t reduce;     // where its shards begin in one rank's part of the reduction
    int num_gather;     // segments of it in the unit's all_gather
    fsdpi_op_list copy_in, copy_out, chunk_cat, divide, to_in, to_shard, rescale; // blocks
} fsdpi_dtype_group;

// What fully_shard was told.
typedef struct fsdpi_desc {
    char *name;           // as texts print it: "(root)" for ""
    const char *own_name; // as given
    void *user;
    int index, num_params; // index: in the model
    fsdp_mesh_info info;
    fsdp_comm *reduce_comm, *replicate_comm, *slice_comm; // info.shard_comm gathers
    fsdp_dtype policy_dtype, policy_reduce, output_dtype; // param_dtype, reduce_dtype; KEEP: none
    int keep_inputs;                                      // activations are not cast
    int slices; // n of reshard_after_forward = n, as made; 0: another mode
} fsdpi_desc;

/* The options of a unit that are numbers: type, name, value in a new unit. Fields, defaults and the
   number of all options come from this list. One that decides the route stands in the other. */
#define FSDPI_OPTIONS(X)                                                                           \
    X(int, reshard_after_forward, FSDP_RESHARD_ALWAYS) /* or _NEVER, or n: the desc says */        \
    X(uint8_t, reshard_after_backward, 1)                                                          \
    X(uint8_t, unshard_in_backward, 1)                                                             \
    X(uint8_t, reduce_unused, 0)                                                                   \
    FSDPI_GRAD_PATH_OPTIONS(X)

enum { FSDPI_FORWARD, FSDPI_BACKWARD };

// What setters change.
typedef struct fsdpi_options {
#define FSDP_X(type, name, initial) type name;
    FSDPI_OPTIONS(FSDP_X)
#undef FSDP_X
    int32_t *prefetch[2];    // indices of units: FSDPI_FORWARD, FSDPI_BACKWARD
    int32_t num_prefetch[2]; // 0: none, or the implicit one
    fsdp_all_reduce_hook all_reduce_hook;
    void *all_reduce_user;
    fsdp_custom_comm custom[3]; // all_gather, reduce_scatter, all_reduce; NULL: the backend's
    void *custom_user[3];
} fsdpi_options;

/* A record in which everything stands that its kind of step and its part of the unit decide. The
   rest is written when it is emitted: see template.h. */
typedef struct fsdpi_template {
    fsdp_op op;
    const fsdpi_dtype_group *part;     // NULL: of the whole unit
    const fsdpi_op_list *work;         // blocks or segments; NULL: none
    fsdp_buf *const *src, *const *dst; // where the pointers to what it reads and writes stand
    int64_t begin;                     // of what is read, in bytes of its buffer
    uint8_t from, to;                  // the places that are set
    uint8_t is_compared;               // ranks compare which parameters are used
} fsdpi_template;

// Where everything lies. Measured by arrange, with lists and records from commit on.
typedef struct fsdpi_unit_layout {
    int num_train, num_parts, train_parts;       // train_parts: with trainables
    uint64_t hash;                               // of all that ranks must have given alike
    uint8_t agree[FSDP_AGREE_COUNT];             // of its parts
    fsdpi_dtype_group *parts;                    // [num_params] places
    fsdp_dtype reduce_dtype, gather_dtype;       // gather: U8: several parts, gathered as bytes
    int64_t slot_bytes, grad_bytes, slice_bytes; // of GATHER, GRAD, SLICE
    int64_t train_numel;                         // shards of the trainables of all parts
    int64_t reduce_numel;         // W * train_numel: REDUCE_IN, and the first part of GRAD
    int first_train;              // the first part with trainables
    uint8_t gather;               // FSDPI_GATHER_*
    uint8_t grads_ahead;          // a reduction reads gradients while the next unit's are written
    int classes[FSDP_POOL_COUNT]; // index in model->classes, -1: none
    int pad_in;                   // staging has padding that no block covers
    void *lists;                  // one allocation for what follows
    int64_t gather_begin; // of the unit's shards in their block: from there all_gather counts
    fsdpi_op_list all_gather, slice_gather;          // segments
    fsdpi_op_list reduce_scatter[2], to_out[2];      // segments of GRAD, and of REDUCE_IN
    fsdpi_op_list slice_copy, whole_out;             // blocks
    fsdpi_op_list whole_grad, padded_in;             // bytes: counts alone
    fsdpi_template *templates[FSDPI_STEP_COUNT + 1]; // where each kind begins, the last one ends
} fsdpi_unit_layout;

enum { // what the shard gradient holds
    FSDPI_SHARD_GRAD_NONE,
    FSDPI_SHARD_GRAD_ZERO,
    FSDPI_SHARD_GRAD_REDUCED // a reduced gradient, to which the next one is added
};

// What a step changes.
typedef struct fsdpi_state {
    uint8_t training, storage, stale;
    uint8_t ahead;                // gathered by a prefetch, and not waited for yet
    uint8_t shard_grad;           // FSDPI_SHARD_GRAD_*
    int32_t forwards;             // grad-enabled ones that have not run backward: n of the table
    int32_t last_order;           // newest entry in the record of forwards, or -1
    fsdp_buf *slot[FSDPI_PLACES]; // that the unit holds, by place
} fsdpi_state;

struct fsdp_unit {
    fsdp_model *model;
    fsdpi_param *params;
    fsdpi_desc desc;
    fsdpi_options options;
    fsdpi_unit_layout layout;
    fsdpi_facts facts;
    fsdpi_grad_path route;   // the last one that was asked for: see fsdpi_do_reduce
    uint32_t reported_calls; // calls, as bits, that came in a wrong state in this step
    uint64_t *use;           // FSDPI_USE_* of each parameter, a byte for each: see fsdpi_use
    int use_words;
    fsdpi_state state;
};

typedef struct fsdpi_flat_block { // shards and shard gradients of one dtype
    int64_t train_numel;          // with alignment
    int64_t numel;                // train_numel + frozen
    int64_t grad_numel;           // train_numel, at least 1 if a parameter is trainable
    fsdp_buf *shard, *grad;
    fsdp_buf *old_shard, *old_grad; // of the layout before, until what they hold has moved
} fsdpi_flat_block;

typedef struct fsdpi_forward { // one entry of the record of forwards
    fsdp_unit *unit;
    int32_t previous; // the unit's entry before
} fsdpi_forward;

// What is attached to a model, in order.
typedef struct fsdpi_attached {
    fsdp_extension e;
    struct fsdpi_attached *next;
} fsdpi_attached;

enum { FSDPI_NAMES = 16, FSDPI_NAME = 32 }; // names that extensions register; length with its end

typedef struct fsdpi_names {
    int count;
    char text[FSDPI_NAMES][FSDPI_NAME];
} fsdpi_names;

// What extensions of a model listen to: bits of fsdp_model.watch.
enum {
    FSDPI_LISTEN_CALLS = 1,
    FSDPI_LISTEN_OPS = 2,
    FSDPI_LISTEN_SLOTS = 4,
    FSDPI_LISTEN_TIMES = 8,
    FSDPI_LISTEN_RETURNS = 16
};
enum { FSDPI_LISTEN_RECORDS = FSDPI_LISTEN_OPS | FSDPI_LISTEN_TIMES };

struct fsdp_model {
    fsdp_world *world;
    fsdp_model_desc desc; // resolved
    fsdp_mesh *own_mesh;  // made when the desc gave none
    fsdp_mesh_info info;
    fsdp_comm *shard_reduce_comm;
    int mixed;      // ranks of the mesh hold different parameters, or a unit has another mesh
    int grad_hooks; // post_accumulate hooks have been set
    const fsdp_unit *outside; // a unit whose mesh has ranks that the model's mesh lacks, or NULL
    fsdp_unit **units;
    int num_units, cap_units, num_params, number; // number: in the world
    fsdpi_flat_block flats[FSDP_DTYPE_COUNT];
    fsdpi_slot_class *classes;
    int num_classes, cap_classes;
    int laid_out;  // there is a layout
    int committed; // and the extensions have been told of it
    int backward;  // the phase
    int grad_enabled, is_last_backward, uneven;
    uint8_t call_state; // training state that ops of the current call are labelled with
    uint64_t seq, step, release_seq;
    uint64_t agreed_hash; // hash of what fsdp_agree was given
    uint64_t num_commits; // commits so far: extensions see by it that everything has moved
    int64_t ahead_bytes; // slots of units that are `ahead`
    fsdpi_forward *order;
    int num_order, cap_order;
    uint32_t reported_calls; // calls, as bits, that have warned of gradients that are not reduced
    fsdp_status hook_status; // first failed hook since finalize
    char hook_error[FSDPI_TEXT];
    fsdp_buf *scalar;       // one f64: sum or maximum of the last clip
    double norm_type;       // of that; 0: none yet
    fsdp_buf *full_scratch; // steps of param_full, from its first call on
    char *full_copy;        // of full_scratch, where the host cannot read that
    fsdp_seg full_seg;      // of the current step
    fsdp_block full_block;
    void *fallback; // what getters give that fail
    size_t fallback_bytes;
    fsdp_block *norm_blocks;     // [num_params] of the norm, [num_params] of what clip scales
    fsdpi_attached *attached;    // extensions, in the order in which they are asked
    const fsdpi_attached *offered_to; // whose function `call` is at work, or NULL
    void (*explain)(const fsdp_model *m, int64_t extra, fsdpi_text *t); // see predict.h
    uint8_t listeners; // FSDPI_LISTEN_CALLS, ...: what any of them listens to
    fsdpi_names labels, pools;
    uint64_t settings; // plans keep here: all options as a number; 0: one has changed since
    const char
        *write_lock_text; // why shards are not to be written now, for texts; NULL: they may be
    int ext_depth;        // calls of functions of extensions that have not returned
    int dry_run;       // no record runs, and every slot is the extension's
    int32_t num_bufs;  // numbers given to buffers so far
    fsdp_counters counters;
    int64_t host_bytes;
    int32_t pool_slots[FSDP_POOL_MAX];
    int64_t pool_bytes[FSDP_POOL_MAX];
    fsdp_model *next;
};

#endif // FSDPI_CORE_OBJECTS_H
