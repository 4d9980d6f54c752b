/* core/extension.h - extensions: the functions that they give, and those that they may call

   Callers: extensions.

   Included by fsdp.h, at the end of its declarations. docs/extensions.md tells how to write one.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h" // which includes this file
#endif
#ifndef FSDP_EXTENSION_H
#define FSDP_EXTENSION_H
// clang-format off

// How steps of an extension update a parameter. Optimizers refuse a parameter that another one
// updates in another way.
enum { FSDP_UPDATES_NONE = 0, FSDP_UPDATES_ELEMENTS, FSDP_UPDATES_MATRIX };

// One item of the numbers that an extension keeps and a checkpoint must write.
typedef struct fsdp_state_item {
    const char *extension;        // name of the extension
    const char *name;             // for example "exp_avg"; NULL: there is no further item
    int32_t ordinal;              // ordinal of its parameter; -1: none
    int32_t sharded;              // 1: this rank's rows of a tensor of the parameter's shape, see
                                  // fsdp_param_view; 0: the same on all ranks
    fsdp_dtype dtype;
    int32_t memory;               // place of data: FSDP_MEMORY_HOST or FSDP_MEMORY_DEVICE
    int32_t ndim;
    int64_t shape[FSDP_MAX_DIMS]; // shape of the tensor; for a sharded item the library sets it
    int64_t numel;                // elements here, contiguous
    void *data;                   // a checkpoint reads it; a load writes it
    int32_t updates;              // how the extension's steps update the parameter: FSDP_UPDATES_*
    int32_t sizes_only;           // 1: the caller does not read data, so extensions start no work
    int32_t at[2];                // the library's: position of fsdp_next_state
} fsdp_state_item;

// Events of fsdp_extension.values.
enum {
    FSDP_VALUES_MOVED = 0, // the layout is new, and each `relayout` has been called: a parameter
                           // may be thawed, frozen or cast. Values are as before
    FSDP_VALUES_REPLACE,   // fsdp_init_params or the load of a checkpoint is about to replace this
                           // parameter: what you keep of the old values is stale, unless the load
                           // writes it, too
    FSDP_VALUES_REPLACED,  // the values that REPLACE announced are there, and your items are
    FSDP_VALUES_WRITTEN    // fsdp_param_load has written this parameter
};

/* The functions of an extension. Each of them may be NULL; each gets `user`. The library calls
   extensions in the order of attaching, in the thread that uses the world; `ran` may differ. */
typedef struct fsdp_extension {
    uint32_t size, start_canary;
    const char *name; // for texts and states, not copied; NULL: "extension"
    void *user;
    // A call of a step begins, from pre_forward to finalize_backward, or model_reset (for both of
    // the model unit is NULL); the transition table is not asked yet. Or FSDP_CALL_SET: a setter is
    // about to change options of a unit (NULL: of all), and does so whatever you return. Or, in the
    // same way, zero_grad, params_changed or load is about to write gradients or shards. Return
    // non-zero if you have done the call's work: then *status (FSDP_OK before) is its result, and
    // the library calls no further extension. Calls of a step that you make go to the extensions
    // after you.
    int (*call)(void *user, fsdp_model *model, fsdp_unit *unit, int call, fsdp_status *status);
    // A call that `call` gets has ended, except for SET, reset and load: the caller's work comes
    // next.
    void (*returned)(void *user, fsdp_model *model, fsdp_unit *unit, int call);
    // An op is about to run. You get a copy and may change it; kind, seq, stream, src, dst and its
    // waits stay. Return non-zero to take the op: it does not run, later extensions do not see it,
    // and all else continues as if it had run.
    int (*op)(void *user, fsdp_model *model, fsdp_op *op);
    // released NULL: the unit is about to take a slot of a pool; if you return a buffer, the unit
    // uses it. Otherwise: a unit releases a slot, yours or the pool's; the result is ignored.
    fsdp_buf *(*buffer)(void *user, fsdp_model *model, fsdp_unit *unit, int pool,
                        fsdp_buf *released);
    // An op has run; nanoseconds on the world's clock. Before, for op->waited_ns, its stream has
    // waited for other streams: so a WAIT shows how long COMPUTE was idle. Inline: called at once;
    // with worker threads: in the thread that ran it; on a device with streams: in a later call,
    // from timed events.
    // It must not call functions that take the world, the model or a unit.
    void (*ran)(void *user, fsdp_model *model, const fsdp_op *op, int64_t begin_ns,
                int64_t end_ns);
    // The model has a layout, the first or a new one: shards and gradients are in another place.
    void (*relayout)(void *user, fsdp_model *model);
    // Parameters are moved, or get values that no step has given them: `event` is FSDP_VALUES_*.
    // ordinal: the parameter; -1 for events of all. Your failure is that of the call. After a
    // failure of MOVED the world ends if it has several ranks; otherwise the next call repeats it.
    // fsdp_model_broadcast copies your items that have an ordinal, and then calls `state`.
    fsdp_status (*values)(void *user, fsdp_model *model, int event, int ordinal);
    // Fill in item `index`, 0, 1, ...; leave its name NULL if there is none. item NULL: a load
    // wrote items; read them. fsdp_next_state or fsdp_state_loaded returns your failure.
    fsdp_status (*state)(void *user, fsdp_model *model, int index, fsdp_state_item *item);
    // Somebody has states of this parameter for you, from a checkpoint: if you keep states for
    // parameters, have items for it from now on, also while it is frozen.
    fsdp_status (*hold)(void *user, fsdp_model *model, int ordinal);
    void (*destroy)(void *user); // the model ends (last attached first), or fsdp_detach
    uint64_t end_canary;
} fsdp_extension;

/* fsdp_attach - add an extension to a model
   extension   copied
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY, UNSUPPORTED (`ran` on a device that cannot
               measure times); INVALID_STATE (a unit is not idle, and the extension has call, op,
               buffer or ran). After a failure it is not attached, and destroy is not called
   Blocks      with `ran`: for operations under way      Allocates yes */
FSDP_API fsdp_status fsdp_attach(fsdp_model *model, const fsdp_extension *extension);

/* fsdp_detach - remove the extension that you attached with these contents, and call its destroy
   Result      FSDP_OK; INVALID_ARG (it is not attached); INVALID_STATE (called from a function of
               an extension, or a unit holds a slot that the extension may own)
   Blocks      for operations under way */
FSDP_API fsdp_status fsdp_detach(fsdp_model *model, const fsdp_extension *extension);

/* fsdp_extension_mute - end the calls of an extension's call, returned, op and ran, and what the
               library does for them only, such as reading the clock
   extension   with the contents with which it was attached; these functions become NULL. Detach it
               with what it has then
   Result      FSDP_OK; INVALID_ARG (it is not attached)
   Thread      the one that uses the world, also in a function of the extension
   Blocks      if an extension of the model has `ran`: for operations under way */
FSDP_API fsdp_status fsdp_extension_mute(fsdp_model *model, fsdp_extension *extension);

/* fsdp_find_extension - `user` of the first attached extension with this name; NULL: none has it */
FSDP_API void *fsdp_find_extension(const fsdp_model *model, const char *name);

/* fsdp_next_state - step through the items of all extensions of a model. Start with an item that is
               zero, but for sizes_only; at the end its name is NULL
   fsdp_state_reserve - ask the extensions to have items of a parameter that they left out,
               because it is frozen. They may leave it out again: look at the items
   fsdp_state_loaded - say that you have written items: the extensions read them
   Result      FSDP_OK; INVALID_ARG; what an extension returned
   Note        pointers are valid until the layout changes or an extension is detached
   Collective  as fsdp_model_commit at the first use, then no. hold, written: every rank has to do
               the same      Blocks no, but an extension may      Allocates as commit
   Source      torch: Optimizer.state_dict, load_state_dict */
FSDP_API fsdp_status fsdp_next_state(fsdp_model *model, fsdp_state_item *item);
FSDP_API fsdp_status fsdp_state_reserve(fsdp_model *model, int ordinal);
FSDP_API fsdp_status fsdp_state_loaded(fsdp_model *model);

/* fsdp_tell_values - tell the extensions of an event, FSDP_VALUES_*: a load of your own tells
               REPLACE of each parameter, writes parameters and items, calls fsdp_state_loaded, and
               tells REPLACED
   ordinal     of the parameter; -1 for REPLACED
   Result      FSDP_OK; INVALID_ARG; what an extension returned
   Collective  no, but every rank has to do the same      Blocks no, but an extension may */
FSDP_API fsdp_status fsdp_tell_values(fsdp_model *model, int event, int ordinal);

/* fsdp_op_init - a zeroed op with the model's entries: unit, step, training state, scale 1
   unit        NULL: the op is the model's
   kind, label, stream  FSDP_OP_*, FSDP_LABEL_* or a registered label, FSDP_STREAM_* */
FSDP_API void fsdp_op_init(fsdp_op *op, const fsdp_model *model, const fsdp_unit *unit, int kind,
                           int label, int stream);

/* fsdp_emit - number and count an op, show it to extensions, run it in its stream's order
   op          from fsdp_op_init, with the fields of its kind (listed in docs/extensions.md). It
               waits for src and dst, and others wait for it through them. src_ptr, dst_ptr NULL:
               their begin. The library fills in seq, wait, and bytes if it is 0. A marker takes
               effect: ACQUIRE holds dst, RELEASE gives src back after `stream`, GRADS_WRITTEN
               says that the caller has written dst
   Result      FSDP_OK; INVALID_ARG (the text names the field), UNSUPPORTED (the backend lacks the
               collective), OUT_OF_MEMORY; if the op runs at once, collective errors
   Collective  if the op is one: every rank of op->comm, same order, same what and count
   Blocks      inline: until done; else no
   Allocates   the first op on FSDP_STREAM_EXTENSION: with comm threads a worker thread */
FSDP_API fsdp_status fsdp_emit(fsdp_model *model, fsdp_op *op);

/* fsdp_call_begin - begin a call of your extension, before its ops: check that the call is
   possible now, and show a HOOK marker. If units hold gradients that are not reduced, it logs that
   or fails as the public call does (fsdp.h: GRADIENTS THAT ARE NOT REDUCED)
   call        FSDP_CALL_EXTENSION, or the public call whose rules yours follows
   what        its name, for the text and the marker; NULL: the name of `call`
   Result      FSDP_OK; INVALID_STATE (the text names the missing call), errors of commit
   Collective  as fsdp_model_commit at the first use, then no      Allocates as commit */
FSDP_API fsdp_status fsdp_call_begin(fsdp_model *model, int call, const char *what);

/* fsdp_label_register, fsdp_pool_register - the number of a label or pool with this name in a
   model; equal names give equal numbers. At most 16 labels and 8 pools, names of 1 to 31 bytes
   Result      the number. -1 and a logged text: no place is left, or the name is empty or too long
   Collective  no, but every rank has to do the same: ranks compare labels */
FSDP_API int fsdp_label_register(fsdp_model *model, const char *name);
FSDP_API int fsdp_pool_register(fsdp_model *model, const char *name);

/* fsdp_op_label        - name of an op's label, also of a registered one
   fsdp_model_pool_name - name of a pool, also of a registered one; "?" out of range */
FSDP_API const char *fsdp_op_label(const fsdp_op *op);
FSDP_API const char *fsdp_model_pool_name(const fsdp_model *model, int pool);

/* fsdp_buf_create - zeroed memory for ops, with the two events that order them
   pool        counts its bytes: FSDP_POOL_* or a registered one
   memory      FSDP_MEMORY_DEVICE: for collectives, too; FSDP_MEMORY_PINNED: host memory
   fsdp_buf_view - a part of another buffer: own events, no own memory, not counted. whole NULL:
               no bytes, only events
   buf         you own it: call fsdp_buf_destroy before the model ends. NULL after a failure
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY
   Collective  create of FSDP_MEMORY_DEVICE: every rank of the mesh, same size, same order; else no
   Allocates   yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_buf_create(fsdp_model *model, int pool, int memory,
                                                     int64_t nbytes, fsdp_buf **buf);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_buf_view(fsdp_model *model, const fsdp_buf *whole,
                                                   int64_t offset, int64_t nbytes, fsdp_buf **buf);

/* fsdp_buf_destroy - free a buffer; NULL is allowed. If a unit holds it, the library logs that and
   keeps it
   Collective  as fsdp_buf_create      Blocks for operations under way */
FSDP_API void fsdp_buf_destroy(fsdp_model *model, fsdp_buf *buf);

/* fsdp_buf_ptr    - its address
   fsdp_buf_nbytes - its size in bytes, at least the requested one */
FSDP_API void *fsdp_buf_ptr(const fsdp_buf *buf);
FSDP_API int64_t fsdp_buf_nbytes(const fsdp_buf *buf);

/* fsdp_pools_trim - free every slot that no unit holds; the next use allocates again
   Result      FSDP_OK; if the world is aborted, its status
   Collective  yes: every rank of the mesh, same order      Blocks for operations under way
   Source      torch: torch.cuda.empty_cache */
FSDP_API fsdp_status fsdp_pools_trim(fsdp_model *model);

/* fsdp_transfer - copy bytes between host and device memory, or within one of them. The copy runs
   after the work issued on COMPUTE and is done on return
   Result      FSDP_OK; INVALID_ARG, collective errors
   Blocks      yes, at most timeout_ms */
FSDP_API fsdp_status fsdp_transfer(fsdp_model *model, void *dst, const void *src, int64_t nbytes);

/* fsdp_lock_params - say that shards hold something else than the parameters. From now on calls
   that write shards, move them or scale gradients fail with INVALID_STATE: a step of an optimizer,
   fsdp_params_changed, clipping, a load, fsdp_set_requires_grad, fsdp_model_cast
   why         end of their text, what to do. Not copied. NULL: shards are parameters again
   Result      FSDP_OK; INVALID_ARG; INVALID_STATE (they are lent already)
   Collective  no, but every rank has to do the same */
FSDP_API fsdp_status fsdp_lock_params(fsdp_model *model, const char *why);

/* fsdp_lock_reason - `why` of fsdp_lock_params; NULL: shards hold the parameters. Call it before
   you read them as parameters */
FSDP_API const char *fsdp_lock_reason(const fsdp_model *model);

/* fsdp_wait_stream - wait on the host until all work issued on a stream is done; -1: on all streams
   Result      FSDP_OK; INVALID_ARG, collective errors
   Blocks      yes, at most timeout_ms
   Source      torch: Stream.synchronize */
FSDP_API fsdp_status fsdp_wait_stream(fsdp_model *model, int stream);

/* fsdp_mesh_comm - the group along a dim of a mesh, for ops on a stream. Streams that may run
   at the same time have groups of their own if the backend needs that
   comm        the mesh owns it. NULL: a group of one rank
   Result      FSDP_OK; INVALID_ARG (no such dim or stream, this rank is outside the mesh),
               OUT_OF_MEMORY, collective errors
   Collective  for COMPUTE and EXTENSION at the first use of a dim: every rank of the world; else no
   Blocks, Allocates  at that first use      Source torch: DeviceMesh.get_group */
FSDP_API fsdp_status fsdp_mesh_comm(const fsdp_mesh *mesh, int dim, int stream, fsdp_comm **comm);

/* fsdp_world_status - FSDP_OK, or the failure that aborted the world
   Result      see above; INVALID_ARG for NULL */
FSDP_API fsdp_status fsdp_world_status(const fsdp_world *world);

/* fsdp_world_has  - 1 if the world's backend has the collective `kind`, FSDP_OP_*; a world of one
   rank has none
   fsdp_mesh_world - the world of a mesh; NULL for NULL */
FSDP_API int fsdp_world_has(const fsdp_world *world, int kind);
FSDP_API fsdp_world *fsdp_mesh_world(const fsdp_mesh *mesh);

// How ops run: at once, in worker threads, or on a device's streams.
enum { FSDP_RUN_INLINE = 0, FSDP_RUN_THREADS, FSDP_RUN_STREAMS };

/* fsdp_model_world - the world of a model; NULL for NULL
   fsdp_model_run_mode   - how the model's ops run: FSDP_RUN_*
   fsdp_model_failure    - the number, from 1, of the failure that fsdp_finalize_backward reports
               once it succeeds itself: the first of a hook or setter since then. 0: none */
FSDP_API fsdp_world *fsdp_model_world(const fsdp_model *model);
FSDP_API int fsdp_model_run_mode(const fsdp_model *model);
FSDP_API int64_t fsdp_model_failure(const fsdp_model *model);

/* fsdp_set_uneven_inputs - 1: in steps from now on ranks make other hooks than each other, which
               end in the same reductions, as where a rank has no batch. Such steps are not
               planned. 0: the default
   fsdp_has_uneven_inputs  - what was set
   Result      FSDP_OK; INVALID_ARG; if the world is aborted, its status
   Collective  no, but every rank has to do the same
   Source      torch: Join (uneven inputs) */
FSDP_API fsdp_status fsdp_set_uneven_inputs(fsdp_model *model, int uneven);
FSDP_API int fsdp_has_uneven_inputs(const fsdp_model *model);

/* fsdp_now          - nanoseconds on the world's clock, as `ran` gets them
   fsdp_world_job    - the name of the job, or ""; valid until fsdp_shutdown
   fsdp_world_id     - a random number that the ranks of a world have in common, and no other world
   fsdp_clock_id     - ranks with the same one have the same clock (fsdp_now)
   fsdp_model_number - how many models of its world were made before it
   fsdp_comm_ranks   - world ranks of the members of a group, in order of position
   out         room for them, or NULL
   Result      ranks: their number; 0: it is no group of this world */
FSDP_API int64_t fsdp_now(const fsdp_world *world);
FSDP_API const char *fsdp_world_job(const fsdp_world *world);
FSDP_API uint64_t fsdp_world_id(const fsdp_world *world);
FSDP_API uint64_t fsdp_clock_id(const fsdp_world *world);
FSDP_API int fsdp_model_number(const fsdp_model *model);
FSDP_API int fsdp_comm_ranks(const fsdp_world *world, const fsdp_comm *comm, int32_t *out);

/* fsdp_model_desc_get - the options of a model, with defaults filled in; mesh as the desc gave it
   fsdp_unit_desc_get  - those of a unit as they are now, without params, mesh and mesh_info
   fsdp_param_desc_get - those of a parameter, without its extension. No commit
   Result      FSDP_OK; INVALID_ARG */
FSDP_API fsdp_status fsdp_model_desc_get(const fsdp_model *model, fsdp_model_desc *out);
FSDP_API fsdp_status fsdp_unit_desc_get(const fsdp_unit *unit, fsdp_unit_desc *out);
FSDP_API fsdp_status fsdp_param_desc_get(const fsdp_unit *unit, int index, fsdp_param_desc *out);

/* fsdp_on_commit - from now on call fn at the end of every model's first commit in this process: it
   may attach extensions, and communicate over the model's mesh. So an extension comes to models
   of programs that do not call it
   hook        not copied: it lives as long as the process. Give it before the first world is made
   Thread      any, one at a time */
typedef struct fsdp_commit_hook {
    void (*fn)(fsdp_model *model);
    struct fsdp_commit_hook *next; // the library's
} fsdp_commit_hook;
FSDP_API void fsdp_on_commit(fsdp_commit_hook *hook);

/* fsdp_agree - give bytes that have to be equal on all ranks, for example a learning rate. Ranks
   compare all bytes given so far in the next collective of a unit; different ones are a MISMATCH
   data        nbytes bytes, copied; without padding, which may differ
   Result      FSDP_OK; INVALID_ARG; if the world is aborted, its status
   Collective  no, but every rank has to do the same */
FSDP_API fsdp_status fsdp_agree(fsdp_model *model, const void *data, int64_t nbytes);

/* fsdp_fallback_ptr - memory for a getter of an extension that fails, as fsdp_data gives it: room
   for the largest parameter of the model in any dtype, which the host and kernels may touch, of
   undefined contents, the same until a later unit needs more room
   status      the failure, whose text has been logged: fsdp_finalize_backward reports it again
   Result      NULL: model is NULL, or there is no memory
   Allocates   at its first use */
FSDP_API void *fsdp_fallback_ptr(fsdp_model *model, fsdp_status status);

/* fsdp_update_place - the memory of the shards, and with it what updates them
   memory      out: FSDP_MEMORY_HOST: the host updates them (`call` of an UPDATE op).
               FSDP_MEMORY_DEVICE: the device table does, in the order of the record's stream
   what        name of your call, for the text
   Result      FSDP_OK; UNSUPPORTED (the device has no function for updates, and the host cannot
               read its memory: set cpu_offload), errors of commit
   Collective  as fsdp_model_commit at the first use, then no
   Allocates as commit */
FSDP_API fsdp_status fsdp_update_place(fsdp_model *model, const char *what, int *memory);

/* fsdp_alloc - zeroed memory for an extension. FSDP_MEMORY_HOST: counted in fsdp_memory.host_bytes.
   FSDP_MEMORY_DEVICE: only this rank uses it. FSDP_MEMORY_PINNED: host memory for updates, too
   what        begin of the text, for example "adamw_create: no memory for a state"
   ptr         you own it: call fsdp_free. NULL after a failure
   fsdp_free - free it; memory and nbytes as for fsdp_alloc; NULL is allowed
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY
   Allocates   yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_alloc(fsdp_model *model, int memory, int64_t nbytes,
                                                const char *what, void **ptr);
FSDP_API void fsdp_free(fsdp_model *model, int memory, void *ptr, int64_t nbytes);

/* fsdp_fail - let a call fail: the library logs the text and keeps it for fsdp_last_error
   fsdp_fail_null - fail since an argument is NULL. which: the names of those that may not be NULL
   world       NULL: it is this thread's failure without a world
   Result      status; of fsdp_fail_null INVALID_ARG */
FSDP_API fsdp_status fsdp_fail(fsdp_world *world, fsdp_status status, const char *format, ...)
    FSDP_PRINTF(3, 4);
FSDP_API fsdp_status fsdp_fail_null(fsdp_world *world, const char *call, const char *which);

/* fsdp_warn - log a line that is no failure, at the level FSDP_LOG_WARN */
FSDP_API void fsdp_warn(const fsdp_world *world, const char *format, ...) FSDP_PRINTF(2, 3);

/* fsdp_desc_read - copy a caller's desc to dst: zeroed, `size` bytes in this header. A desc begins
   with uint32_t size, start_canary and ends with uint64_t end_canary. src NULL: dst is all zero
   Result      FSDP_OK; INVALID_ARG (size or canaries; the text names the desc by `what`) */
FSDP_API fsdp_status fsdp_desc_read(fsdp_world *world, void *dst, const void *src, size_t size,
                                    const char *what);

// Names of version 0.1, until 0.4.
#define FSDP_OP_USE         FSDP_OP_WAIT
#define FSDP_OP_WROTE       FSDP_OP_GRADS_WRITTEN
#define FSDP_RUN_LANES      FSDP_RUN_THREADS
#define fsdp_buf_part       fsdp_buf_view
#define fsdp_is_uneven      fsdp_has_uneven_inputs
#define fsdp_lend           fsdp_lock_params
#define fsdp_model_run      fsdp_model_run_mode
#define fsdp_retire         fsdp_extension_mute
#define fsdp_set_uneven     fsdp_set_uneven_inputs
#define fsdp_state_hold     fsdp_state_reserve
#define fsdp_state_written  fsdp_state_loaded
#define fsdp_undefined      fsdp_fallback_ptr

// clang-format on
#endif
