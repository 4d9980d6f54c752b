/* core/extension.h - the seam for extensions: what they answer, and what they may call

   Included by fsdp.h, at the end of its declarations. How to write one: docs/extensions.md.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_EXTENSION_H
#define FSDP_EXTENSION_H
// clang-format off

// One thing that a checkpoint has to write: numbers that an extension keeps.
typedef struct fsdp_state_item {
    const char *extension;        // its name
    const char *name;             // "exp_avg"; NULL: there is no further item
    int32_t ordinal;              // of the parameter that it belongs to; -1: of none
    int32_t sharded;              // 1: this rank's rows of a tensor of the parameter's shape, as
                                  // fsdp_param_view tells them; 0: the same on all ranks
    fsdp_dtype dtype;
    int32_t memory;               // where data is: FSDP_MEMORY_HOST or _DEVICE
    int32_t ndim;
    int64_t shape[FSDP_MAX_DIMS]; // of the whole; a sharded item's is filled in by the library
    int64_t numel;                // elements here, contiguous
    void *data;                   // read, and written by a load
    int32_t at[2];                // where fsdp_next_state goes on
} fsdp_state_item;

/* What an extension does. Every function may be NULL; all get `user`. Extensions are asked in the
   order of attaching, by the thread that uses the world, but for `ran`. */
typedef struct fsdp_extension {
    uint32_t size, start_canary;
    const char *name; // for texts and states, not copied; NULL: "extension"
    void *user;
    // A call of a step, from pre_forward to finalize_backward, or model_reset (unit NULL in both of
    // the model), before the table is asked. Non-zero: the call's work has been done, and *status,
    // FSDP_OK before, is its result; nobody else is asked.
    int (*call)(void *user, fsdp_model *model, fsdp_unit *unit, int call, fsdp_status *status);
    // A record before it runs: a copy, which may be changed; kind, seq, stream, src and dst, from
    // which its waits have been derived, are put back. Non-zero: the record is taken: it does not
    // run, later extensions do not see it, all else goes on as if it had run.
    int (*op)(void *user, fsdp_model *model, fsdp_op *op);
    // released NULL: the unit is about to take a slot of a pool; an answer that is not NULL is used
    // instead of the pool's. Else: a slot is given back, whosever it is; the answer is ignored.
    fsdp_buf *(*buffer)(void *user, fsdp_model *model, fsdp_unit *unit, int pool,
                        fsdp_buf *released);
    // A record has run: nanoseconds on the world's clock. Inline at once; with lanes in the worker
    // thread that ran it; on devices with streams in a later call, from events with times. Must
    // not call functions that take the world, the model or a unit.
    void (*ran)(void *user, fsdp_model *model, const fsdp_op *op, int64_t begin_ns,
                int64_t end_ns);
    // The model has been laid out, for the first time or anew: shards and gradients are elsewhere.
    void (*relayout)(void *user, fsdp_model *model);
    // Item `index`, 0, 1, ...; a name that stays NULL: there is none. item NULL: items have been
    // written, take them up. A failure is the result of fsdp_next_state, fsdp_state_written.
    fsdp_status (*state)(void *user, fsdp_model *model, int index, fsdp_state_item *item);
    void (*destroy)(void *user); // at the model's end or by fsdp_detach; the last attached first
    uint64_t end_canary;
} fsdp_extension;

/* fsdp_attach - add an extension to a model
   extension   copied
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY, UNSUPPORTED (`ran` on a device that cannot tell
               times); INVALID_STATE (a unit is not idle; not asked of one that has neither call,
               op, buffer nor ran). After a failure it is not attached, and destroy not called
   Collective  no      Blocks with `ran`: for operations under way      Allocates yes */
FSDP_API fsdp_status fsdp_attach(fsdp_model *model, const fsdp_extension *extension);

/* fsdp_detach - take out the extension that has been attached with these contents, and call its
   destroy
   Result      FSDP_OK; INVALID_ARG (it is not attached); INVALID_STATE (from a function of an
               extension, or a unit holds a slot that it may own)
   Collective  no      Blocks for operations under way      Allocates no */
FSDP_API fsdp_status fsdp_detach(fsdp_model *model, const fsdp_extension *extension);

/* fsdp_next_state - step through what all extensions of a model keep: start with a zeroed item; its
   name is NULL at the end
   fsdp_state_written - say that items have been written: extensions take them up
   Result      FSDP_OK; INVALID_ARG; what an extension returned
   Note        pointers are good until the model is laid out anew or an extension is detached
   Collective  as fsdp_model_commit at the first use, then no; written: every rank has to do the
               same
   Blocks      no, but as the extensions say      Allocates as commit */
FSDP_API fsdp_status fsdp_next_state(fsdp_model *model, fsdp_state_item *item);
FSDP_API fsdp_status fsdp_state_written(fsdp_model *model);

/* fsdp_op_init - a zeroed record with the labels of a model: who issues it, step, state, scale 1
   unit        NULL: of the model
   kind, label, stream  FSDP_OP_*, FSDP_LABEL_* or a registered one, FSDP_STREAM_*
   Collective  no      Blocks no      Allocates no */
FSDP_API void fsdp_op_init(fsdp_op *op, const fsdp_model *model, const fsdp_unit *unit, int kind,
                           int label, int stream);

/* fsdp_emit - number a record, count it, show it to extensions, and run it in its stream's order
   op          of fsdp_op_init, then the kind's fields: docs/extensions.md lists them. src and dst
               are what it waits for and makes others wait for; src_ptr, dst_ptr NULL: their begin.
               seq, wait and bytes 0 are filled in. A marker is shown, and does what it
               says: ACQUIRE holds dst, RELEASE gives src back behind `stream`, WROTE says that the
               caller has written dst
   Result      FSDP_OK; INVALID_ARG (a field: named), UNSUPPORTED (a collective that the backend has
               not), OUT_OF_MEMORY; collective errors, where it runs at once
   Collective  if the record is one: every rank of op->comm, same order, same what and count
   Blocks      inline: until done; else no
   Allocates   the first record on FSDP_STREAM_EXTENSION: with lanes a worker thread */
FSDP_API fsdp_status fsdp_emit(fsdp_model *model, fsdp_op *op);

/* fsdp_call_begin - begin a call of an extension's own: ask whether it is possible now, and show a
   HOOK marker, before its records
   call        FSDP_CALL_EXTENSION, or the call whose rules it has to keep
   what        its name, for the text and the marker; NULL: that of `call`
   Result      FSDP_OK; INVALID_STATE (the text names what is possible), what commit returns
   Collective  as fsdp_model_commit at the first use, then no      Blocks no
   Allocates as commit */
FSDP_API fsdp_status fsdp_call_begin(fsdp_model *model, int call, const char *what);

/* fsdp_label_register, fsdp_pool_register - a number for a label or a pool of this name in a model;
   equal names give equal numbers. Up to 16 labels and 8 pools, names of up to 31 bytes
   Result      the number; -1, and a logged text: no place left, or the name is empty or too long
   Collective  no, but every rank has to do the same: labels are compared
   Blocks no      Allocates no */
FSDP_API int fsdp_label_register(fsdp_model *model, const char *name);
FSDP_API int fsdp_pool_register(fsdp_model *model, const char *name);

/* fsdp_op_label - why a record is issued, in words, a registered label too
   fsdp_model_pool_name - of a pool, a registered one too; "?" out of range
   Collective  no      Blocks no      Allocates no */
FSDP_API const char *fsdp_op_label(const fsdp_op *op);
FSDP_API const char *fsdp_model_pool_name(const fsdp_model *model, int pool);

/* fsdp_buf_create - memory for records: zeroed, with the two events that order them
   pool        where it is counted: FSDP_POOL_* or a registered one
   memory      FSDP_MEMORY_DEVICE: for collectives too; FSDP_MEMORY_PINNED: host memory
   fsdp_buf_part - a buffer inside of another: events of its own, no memory of its own, not counted
   whole       NULL: addresses from `offset` on without memory, for rehearsals: no record may run
   buf         owned by the extension, until fsdp_buf_destroy, before the model ends; NULL after a
               failure. One that a unit holds is not destroyed: that is logged
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY
   Collective  create of FSDP_MEMORY_DEVICE: every rank of the mesh, same size, same order; else no
   Blocks no      Allocates yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_buf_create(fsdp_model *model, int pool, int memory,
                                                     int64_t nbytes, fsdp_buf **buf);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_buf_part(fsdp_model *model, const fsdp_buf *whole,
                                                   int64_t offset, int64_t nbytes, fsdp_buf **buf);

/* fsdp_buf_destroy - free a buffer; NULL is allowed
   Collective  as fsdp_buf_create      Blocks for operations under way      Allocates no */
FSDP_API void fsdp_buf_destroy(fsdp_model *model, fsdp_buf *buf);

/* fsdp_buf_ptr, fsdp_buf_nbytes, fsdp_buf_held - where it is, its size (at least what was asked
   for), whether a unit holds it
   Collective  no      Blocks no      Allocates no */
FSDP_API void *fsdp_buf_ptr(const fsdp_buf *buf);
FSDP_API int64_t fsdp_buf_nbytes(const fsdp_buf *buf);
FSDP_API int fsdp_buf_held(const fsdp_buf *buf);

/* fsdp_model_snapshot - save what a step changes: states of units, who used what, numbers and
   events of records and slots, counters. Not what buffers contain. A rehearsal is a snapshot, the
   calls of a step with an extension that takes every record and provides every slot, and a restore
   fsdp_unit_snapshot  - of one unit: its states, what its gradients are, which slots it holds.
   Equal states that hold the same slots have equal bytes
   buf         room for cap bytes, or NULL; untouched where they are too few
   Result      bytes of the whole; 0 for NULL, and for a model that is not committed
   Collective  no      Blocks no      Allocates no */
FSDP_API size_t fsdp_model_snapshot(const fsdp_model *model, void *buf, size_t cap);
FSDP_API size_t fsdp_unit_snapshot(const fsdp_unit *unit, void *buf, size_t cap);

/* fsdp_model_restore - bring back what fsdp_model_snapshot saved
   fsdp_unit_restore  - bring a unit into a state that it has been in; it holds that state's slots.
               The extension has emitted the records that lead there. A state of backward
               begins the model's backward, as the call would
   Result      FSDP_OK; INVALID_ARG (the size: laid out anew, or more slots, since it was taken);
               the stored status if the world is aborted
   Collective  no, but every rank has to do the same
   Blocks      model: for operations under way; unit: no      Allocates no */
FSDP_API fsdp_status fsdp_model_restore(fsdp_model *model, const void *buf, size_t nbytes);
FSDP_API fsdp_status fsdp_unit_restore(fsdp_unit *unit, const void *buf, size_t nbytes);

/* fsdp_unit_flag_use - bring the flags of use, which ride along in a unit's reduction, up to date,
   before an extension emits that reduction's records itself
   Result      FSDP_OK; INVALID_ARG; the stored status if the world is aborted
   Collective  no      Blocks on devices with streams, where flags have changed: for copies of them
   Allocates   no */
FSDP_API fsdp_status fsdp_unit_flag_use(fsdp_unit *unit);

/* fsdp_pools_trim - free every slot that no unit holds; the next use allocates anew
   Result      FSDP_OK; the stored status if the world is aborted
   Collective  yes, in the sense of fsdp_model_create      Blocks for operations under way
   Allocates   no */
FSDP_API fsdp_status fsdp_pools_trim(fsdp_model *model);

/* fsdp_transfer - copy bytes between host and device memory, or within either, behind what COMPUTE
   has to do; done on return
   Result      FSDP_OK; INVALID_ARG, collective errors
   Collective  no      Blocks yes, at most timeout_ms      Allocates no */
FSDP_API fsdp_status fsdp_transfer(fsdp_model *model, void *dst, const void *src, int64_t nbytes);

/* fsdp_wait_stream - the host waits until all that was issued on a stream is done; stream -1: on
   all of them
   Result      FSDP_OK; INVALID_ARG, collective errors
   Collective  no      Blocks yes, at most timeout_ms      Allocates no */
FSDP_API fsdp_status fsdp_wait_stream(fsdp_model *model, int stream);

/* fsdp_mesh_comm - the group along a dim of a mesh for records on a stream. Streams may run at the
   same time, and have groups of their own where that needs them
   comm        NULL: a group of one rank
   Result      FSDP_OK; INVALID_ARG (no such dim or stream, this rank is outside the mesh),
               OUT_OF_MEMORY, and what a collective may return
   Collective  for COMPUTE and EXTENSION at the first use of a dim: every rank of the world; else no
   Blocks, Allocates  at that first use */
FSDP_API fsdp_status fsdp_mesh_comm(const fsdp_mesh *mesh, int dim, int stream, fsdp_comm **comm);

/* fsdp_world_status - FSDP_OK, or the failure that has aborted the world
   Result      as said; INVALID_ARG for NULL
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_world_status(const fsdp_world *world);

/* fsdp_model_world    - the world that a model was made from; NULL for NULL
   fsdp_model_settings - how often options of the model or its units have changed: compare it to
                         know that a decision may be stale
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_world *fsdp_model_world(const fsdp_model *model);
FSDP_API uint64_t fsdp_model_settings(const fsdp_model *model);

/* fsdp_params_writable - before shards are written: what reads them has passed. Ends with
   fsdp_params_changed
   Result      FSDP_OK; collective errors. On devices with streams shards may then be written in the
               order of COMPUTE, or by the host if fsdp_update_place says so
   Collective  no      Blocks for operations under way that read shards      Allocates no */
FSDP_API fsdp_status fsdp_params_writable(fsdp_model *model);

/* fsdp_update_place - where shards are updated: in memory of this kind, and by whom
   memory      out: FSDP_MEMORY_HOST: by the host (`call` of an UPDATE record);
               FSDP_MEMORY_DEVICE: by the device table, in the order of the record's stream
   what        who asks, for the text
   Result      FSDP_OK; UNSUPPORTED (the device has no function for updates, and the host cannot
               read its memory: needs cpu_offload), what commit returns
   Collective  as fsdp_model_commit at the first use, then no      Blocks no
   Allocates as commit */
FSDP_API fsdp_status fsdp_update_place(fsdp_model *model, const char *what, int *memory);

/* fsdp_alloc - zeroed memory of an extension: FSDP_MEMORY_HOST, counted in fsdp_memory.host_bytes,
   or FSDP_MEMORY_DEVICE, of this rank alone
   what        for the text: "adamw_create: no memory for a state"
   ptr         until fsdp_free; NULL after a failure
   fsdp_free   with what fsdp_alloc got; NULL is allowed
   Result      FSDP_OK; OUT_OF_MEMORY
   Collective  no      Blocks no      Allocates yes */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_alloc(fsdp_model *model, int memory, int64_t nbytes,
                                                const char *what, void **ptr);
FSDP_API void fsdp_free(fsdp_model *model, int memory, void *ptr, int64_t nbytes);

/* fsdp_fail - fail a call: the text is logged and kept for fsdp_last_error
   world       NULL: of this thread
   Result      status
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_fail(fsdp_world *world, fsdp_status status, const char *format, ...)
    FSDP_PRINTF(3, 4);

/* fsdp_desc_read - copy a caller's desc to a zeroed struct of `size` bytes of this header; src
   NULL: zeros. A desc begins with uint32_t size, start_canary and ends with uint64_t end_canary
   Result      FSDP_OK; INVALID_ARG (size or canaries, named by `what`)
   Collective  no      Blocks no      Allocates no */
FSDP_API fsdp_status fsdp_desc_read(fsdp_world *world, void *dst, const void *src, size_t size,
                                    const char *what);

// clang-format on
#endif
