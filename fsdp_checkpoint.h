/* fsdp_checkpoint.h - checkpoints of a model: safetensors files, old or new and never a mixture,
   that any number of ranks loads; an extension of fsdp.h

   Every rank writes its own rows into one file. A checkpoint of W ranks is loaded by any other
   number, on any mesh: each rank reads what it needs. Parameters and all that extensions keep
   (optimizers, scaler) are in it, and memory that you name.

       #define FSDP_IMPLEMENTATION          // in one .c or .cc file of the program
       #include "fsdp_checkpoint.h"         // includes fsdp.h; link with -lm

       fsdp_checkpoint_blob blobs[1] = {{"loader", &loader, sizeof loader, 0, 0}};
       fsdp_checkpoint_desc desc = FSDP_ZERO;
       desc.blobs = blobs, desc.num_blobs = 1, desc.keep = 3;
       if (fsdp_checkpoint_create(model, &desc, &ck)) return 1;  // after the optimizer
       if (fsdp_checkpoint_find(ck, "run", -1, path, sizeof path, &step)) return 1;
       if (step >= 0 && fsdp_checkpoint_load(ck, path, NULL)) return 1;
       for (step++; step < steps; step++) {
           ...                                     // forward, backward, optimizer, zero_grad
           if (step % 1000 == 0 && fsdp_checkpoint_save_async(ck, "run", step)) return 1;
           if (step % 10 == 0 && fsdp_checkpoint_poll(ck, NULL)) return 1;
       }
       if (fsdp_checkpoint_wait(ck)) return 1;

   SPDX-License-Identifier: MIT (full text in fsdp.h)

   WHAT IT PROMISES
     Old or new: whatever kills a job, and whenever, fsdp_checkpoint_find finds a complete
     checkpoint: this one or the one before. All files are on the disk before one rename gives the
     directory its name. With no_sync that holds for a killed job, but not for a power cut; load
     then notices by the checksums.
     A failure of a file on any rank fails the call on all ranks, with the rank, the file and the
     system's reason in the text. The world and the training can continue.
     No rank waits for another one's disk inside a collective: while files are written or read,
     ranks meet at least every 100 ms. So a checkpoint may take longer than the deadline.
     Bits: parameters, states and blobs come back exactly as they were. On CPU backends and on the
     same mesh a run that is resumed computes the same bits as one that was not interrupted.

   FILES
     DIR/step-NNNNNNNN/shard-RRRRR-model-00001-of-00001.safetensors   one for each rank that writes
     DIR/step-NNNNNNNN/manifest.json                                  sizes and checksums
     docs/checkpoints.md has them byte by byte. A data file is safetensors; PyTorch's
     HuggingFaceStorageReader reads such directories, and load reads those of its writer.

   NAMES
     A parameter is UNIT.PARAM; PARAM if its unit's name is "" or with param_names.
     Its states are optim.state.PARAMETER.STATE, for example optim.state.h.0.w.exp_avg.
     What an extension keeps besides is fsdp.EXTENSION.STATE; blobs are fsdp.blob.NAME. */
#include "fsdp.h"
#include "fsdp_safetensors.h" // outside of the guard: its implementation comes with this one's

#ifndef FSDP_CHECKPOINT_H
#define FSDP_CHECKPOINT_H
#ifdef FSDP_MATH_ONLY
#error "fsdp_checkpoint.h has no pure functions: with FSDP_MATH_ONLY leave it out"
#else

#ifdef __cplusplus
extern "C" {
#endif
// clang-format off

typedef struct fsdp_checkpoint fsdp_checkpoint;
enum { FSDP_CHECKPOINT_NAME = 512, FSDP_CHECKPOINT_SOURCES = 8, FSDP_CHECKPOINT_PATH = 4096 };

/* The file calls, as functions that return 0 or an errno value: a test injects faults, a program
   keeps checkpoints elsewhere. The library calls them from the caller's thread or from one worker
   thread of the object, one call at a time. */
typedef struct fsdp_file_ops {
    uint32_t version, size; // 1, sizeof(fsdp_file_ops)
    // create 1: for writing; EEXIST if it is there. 0: for reading, regular files only; never waits
    int (*open)(void *user, const char *path, int create, void **file, int64_t *nbytes);
    int (*read)(void *user, void *file, void *data, int64_t nbytes, int64_t at,
                int64_t *done);                          // may be short; 0 bytes: the end
    int (*write)(void *user, void *file, const void *data, int64_t nbytes, int64_t at,
                 int64_t *done);                         // may be short
    int (*sync)(void *user, void *file);                 // on the disk when it returns
    int (*close)(void *user, void *file);
    int (*make_dir)(void *user, const char *path);       // EEXIST if it is there
    int (*sync_dir)(void *user, const char *path);       // the names in it are on the disk
    int (*rename)(void *user, const char *from, const char *to); // fails if `to` is there
    // is_dir 0: a file; a link itself; EISDIR for a directory. 1: an empty directory
    int (*remove)(void *user, const char *path, int is_dir);
    int (*list)(void *user, const char *path, int (*each)(void *arg, const char *name), void *arg);
} fsdp_file_ops;

// Memory of yours that belongs to a checkpoint: the place in the data, random numbers, a schedule.
// Save reads it before it returns, load writes it.
typedef struct fsdp_checkpoint_blob {
    const char *name;  // [A-Za-z0-9_.-]{1,64}
    void *data;
    int64_t nbytes;    // load wants as many
    int32_t per_rank;  // 1: each rank has its own. 0: rank 0's, which load gives to all ranks
    int32_t optional;  // 1: load leaves it as it is if the checkpoint has none
} fsdp_checkpoint_blob;

// The name of a parameter in files, and the position of this rank's part in the full tensor.
typedef struct fsdp_checkpoint_place {
    char name[FSDP_CHECKPOINT_NAME];   // in: see NAMES. out: "" leaves the parameter out. UTF-8
    int64_t shape[FSDP_MAX_DIMS];      // in: the parameter's. out: the whole tensor's
    int64_t start[FSDP_MAX_DIMS];      // in: 0. out: where the parameter begins in the whole
    int32_t replica, num_replicas;     // in: 0, 1. out: num_replicas groups of ranks outside of the
                                       // unit's mesh have equal data; replica: this rank's group
} fsdp_checkpoint_place;
typedef void (*fsdp_checkpoint_place_fn)(void *user, const fsdp_param_view *param,
                                         fsdp_checkpoint_place *place);

typedef struct fsdp_checkpoint_desc {
    uint32_t size, start_canary;
    fsdp_checkpoint_place_fn place;    // NULL: a parameter is the whole tensor. With tensor
                                       // parallelism call fsdp_tp_view in it
    const fsdp_checkpoint_blob *blobs; // [num_blobs], copied, but not what they point at
    int32_t num_blobs;
    int32_t skip_frozen;               // 1: frozen parameters are neither saved nor asked for
    int32_t param_names;               // 1: names of parameters alone (fsdp_replicate.h, whose
                                       // units are buckets)
    int32_t no_sync;                   // 1: no fsync: see WHAT IT PROMISES
    int32_t keep, keep_every;          // keep > 0: the newest `keep` checkpoints stay, and those
                                       // whose step is a multiple of keep_every. Then only one
                                       // job at a time may use the directory
    int32_t stall_ms;                  // the call fails if a file call of a rank makes no progress
                                       // for that many ms. 0: 600,000
    int32_t reserved;
    int64_t stage_bytes;               // host memory that a save may take for copies. 0: what
                                       // save_async needs to return at once, see there
    const fsdp_file_ops *files;        // NULL: the operating system
    void *files_user, *user;           // user: of place
    uint64_t end_canary;
} fsdp_checkpoint_desc;

/* fsdp_checkpoint_create - say what save and load of a model mean; commits the model
   desc        NULL: defaults
   ck          the model owns it: it ends with fsdp_checkpoint_destroy or the model
   Result      FSDP_OK; INVALID_ARG (the text names the field, the blob or the parameter: two of one
               name, no name, a name that is not UTF-8, that is "__metadata__" or begins with
               "optim.state." or "fsdp.", a place outside of the whole), UNSUPPORTED (a host that is
               not little endian), OUT_OF_MEMORY, errors of commit. It fails on all ranks or on none
   Collective  yes: every rank of the world, each with its own model
   Allocates   tables      Source torch: torch.distributed.checkpoint, get_state_dict */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_create(fsdp_model *model,
                                                            const fsdp_checkpoint_desc *desc,
                                                            fsdp_checkpoint **ck);

/* fsdp_checkpoint_destroy - end it; NULL is allowed. A save that nobody has waited for is given up:
   its directory with a name that begins with a dot stays
   Blocks      for the worker's file call under way, at most stall_ms */
FSDP_API void fsdp_checkpoint_destroy(fsdp_checkpoint *ck);

/* fsdp_checkpoint_save       - write DIR/step-NNNNNNNN and return when it is complete
   fsdp_checkpoint_save_async - return when everything is copied; from then on you may change it.
               poll or wait completes the save. If an earlier one is under way, it is completed
               first
   fsdp_checkpoint_poll       - continue a save under way without waiting for files. busy: out: 1:
               it is not complete yet; may be NULL
   fsdp_checkpoint_wait       - complete the save under way
   dir         made if it is not there, but not its parent; equal on all ranks. step, too: 0 to 2^62
   Result      FSDP_OK (poll, wait: also if no save is under way). The same failure on every rank:
               MISMATCH (dir or step differ between ranks; the text says how), INVALID_STATE (a unit
               is not idle, or holds gradients that are not reduced), INVALID_ARG (the step is there
               already; ranks or replicas write the same rows: the text names the tensor), IO,
               OUT_OF_MEMORY: there is no such checkpoint, nothing of it is left if files can be
               removed, and the world continues. Collective errors
   Collective  yes: every rank of the world
   Blocks      save: until it is complete. save_async: until everything is copied; if stage_bytes is
               less than what this rank writes, until the rest is written. poll: no longer than the
               collectives
   Allocates   at the first use: save on host memory: tables only. On devices 8 MiB for copies, or
               stage_bytes if less. save_async: what this rank writes, or stage_bytes if less
   Source      torch: torch.distributed.checkpoint.save, async_save */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_save(fsdp_checkpoint *ck, const char *dir,
                                                          int64_t step);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_save_async(fsdp_checkpoint *ck,
                                                                const char *dir, int64_t step);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_poll(fsdp_checkpoint *ck, int *busy);
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_wait(fsdp_checkpoint *ck);

/* fsdp_checkpoint_find - the newest complete checkpoint in dir: its manifest is right, and its
               files are there with their sizes
   max_step    not newer than this step; -1: any
   path        out: [cap] the checkpoint for load; "" if there is none
   step        out: its step; -1 if there is none (that is no failure)
   Result      FSDP_OK; INVALID_ARG, OUT_OF_MEMORY; IO: also if the directory that dir is in is not
               there, so that no save can make dir; the same on every rank. Collective errors
   Collective  yes: every rank of the world; rank 0 looks, all get its answer
   Blocks      while files are read      Allocates while it runs */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_find(fsdp_checkpoint *ck, const char *dir,
                                                          int64_t max_step, char *path, size_t cap,
                                                          int64_t *step);

// The source of a parameter in files of other programs.
typedef struct fsdp_checkpoint_source {
    char name[FSDP_CHECKPOINT_NAME];   // in: of the first: the name in files of ours
    int32_t transpose, reserved;       // 1: a matrix that is stored the other way round
    int64_t first, rows;               // rows of dim 0, after transposing; rows 0: all
} fsdp_checkpoint_source;
// Returns how many sources, 1..FSDP_CHECKPOINT_SOURCES: one under the other they are the whole
// tensor. 0: the parameter keeps its value. out is zeroed but for out[0].name.
typedef int (*fsdp_checkpoint_source_fn)(void *user, const fsdp_param_view *param,
                                         fsdp_checkpoint_source *out);

enum { FSDP_VERIFY_READ = 0, FSDP_VERIFY_ALL, FSDP_VERIFY_NONE };

typedef struct fsdp_checkpoint_load_desc {
    uint32_t size, start_canary;
    int32_t params_only;               // 1: no states of extensions, no blobs
    int32_t partial;                   // 1: what the checkpoint lacks keeps its value, also a
                                       // parameter whose name is wrong; one rank logs the names
    int32_t convert;                   // 1: floating dtypes may differ
    int32_t verify;                    // READ: checksums of the blocks that this rank reads as a
                                       // whole. ALL: first of all blocks, shared by the ranks
    fsdp_checkpoint_source_fn source;  // NULL: names of ours. With it states are not loaded
    void *user;                        // argument of source
    uint64_t end_canary;
} fsdp_checkpoint_load_desc;

/* fsdp_checkpoint_load - fill parameters, states of extensions and blobs; ends with
               fsdp_params_changed
   path        a checkpoint directory of ours, one of PyTorch's in safetensors form, a directory of
               Hugging Face, or one .safetensors file; equal on all ranks
   desc        NULL: defaults. Equal on all ranks: params_only, verify, whether there is a source
   States      if a parameter has no state in the checkpoint although others have (it was frozen, or
               never updated), its states become zero; an average begins with its weights. If a
               frozen parameter has some, its optimizer holds them for the thaw, and a save writes
               them again. If nothing takes states of a parameter, one rank logs it
   Result      FSDP_OK; the same failure on every rank. MISMATCH: what has to be equal on all ranks
               differs; the text says what. INVALID_ARG: it is of another model: the text names what
               is missing or has another shape or dtype. INVALID_STATE: a unit is
               not idle, or holds gradients that are not reduced. UNSUPPORTED: a format that it does
               not read. OUT_OF_MEMORY. CORRUPT, IO.
               If the failure is found before the first parameter is read, nothing has changed; if
               a file fails while it is read, parameters and states are undefined. Collective errors
   Collective  yes: every rank of the world      Blocks while files are read
   Allocates   while it runs: the headers of all files, tables, 8 MiB
   Source      torch: torch.distributed.checkpoint.load, set_state_dict */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_load(fsdp_checkpoint *ck, const char *path,
                                                          const fsdp_checkpoint_load_desc *desc);

typedef struct fsdp_checkpoint_report { // figures of an object's last save or load
    int64_t step;                       // save: the step. load: that of the manifest, else -1
    int64_t bytes, total_bytes;         // data: written or read by this rank; in the whole
    int64_t blocked_ns, total_ns;       // how long the call took; and save_async to its completion
    int64_t num_reads;                  // load: file calls that read data
    int32_t num_missing, num_extra;     // load: tensors (with desc.source: sources) that the files
                                        // lack, so that partial left what they are for as it was;
                                        // and tensors that nobody asked for
    int32_t per_rank_blobs;             // load: 1: blobs of each rank were loaded (or there are
                                        // none): the checkpoint is of as many ranks
    int32_t verified;                   // load: 1: checksums of all bytes that were read are right
} fsdp_checkpoint_report;

/* fsdp_checkpoint_last_report - of the last save or load that succeeded
   fsdp_checkpoint_nbytes      - host memory for copies that a save_async takes on this rank, tables
               left out
   Result      report: FSDP_OK; INVALID_ARG. nbytes: -1 for NULL */
FSDP_API fsdp_status fsdp_checkpoint_last_report(const fsdp_checkpoint *ck,
                                                 fsdp_checkpoint_report *out);
FSDP_API int64_t fsdp_checkpoint_nbytes(fsdp_checkpoint *ck);

/* Without a world, in one process: what tools/fsdpck does. All of these calls:
   path        as for load
   files       NULL: the operating system
   text        [cap] out: why it failed; else "". May be NULL. Nothing is logged
   Collective  no: one process, without or with a world. In a running job the other ranks wait
   Thread any: one at a time for the same reader */

typedef struct fsdp_checkpoint_reader fsdp_checkpoint_reader;

typedef struct fsdp_checkpoint_contents {
    int64_t step;                       // the manifest's; -1: there is none
    int64_t world;                      // ranks whose blobs it has; 0: not told
    int64_t num_files, num_tensors, num_boxes;
    int64_t data_bytes;                 // in all files, without headers
    int32_t has_checksums, reserved;
} fsdp_checkpoint_contents;

typedef struct fsdp_checkpoint_tensor { // a whole tensor, in however many boxes
    const char *name;                   // untrusted; lives as long as the reader
    fsdp_dtype dtype;                   // FSDP_SAFETENSORS_OTHER: read gives its bytes, with KEEP
    int32_t ndim, file_dtype;           // file_dtype: for fsdp_safetensors_dtype_name
    int32_t num_boxes;                  // copies count once
    int64_t shape[FSDP_MAX_DIMS], nbytes;
} fsdp_checkpoint_tensor;

/* fsdp_checkpoint_open  - read and check manifest, index and headers: every tensor is covered, and
               files of others are all there. What two of these hold is read and compared
   fsdp_checkpoint_close - NULL is allowed
   reader      out: you own it: end it with fsdp_checkpoint_close. NULL after a failure
   Result      FSDP_OK; CORRUPT, IO, UNSUPPORTED, INVALID_ARG, OUT_OF_MEMORY
   Blocks      while files are read      Allocates headers, tables, 5 MiB */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_open(const char *path,
                                                          const fsdp_file_ops *files,
                                                          void *files_user,
                                                          fsdp_checkpoint_reader **reader,
                                                          char *text, size_t cap);
FSDP_API void fsdp_checkpoint_close(fsdp_checkpoint_reader *reader);

/* fsdp_checkpoint_contents_of - what there is
   fsdp_checkpoint_tensor_at   - a tensor: 0 .. num_tensors - 1, by the bytes of their names
   fsdp_checkpoint_tensor_find - the index of a tensor. -1: there is none, or NULL
   Result      FSDP_OK; INVALID_ARG (NULL, no such tensor) */
FSDP_API fsdp_status fsdp_checkpoint_contents_of(const fsdp_checkpoint_reader *reader,
                                                 fsdp_checkpoint_contents *out);
FSDP_API fsdp_status fsdp_checkpoint_tensor_at(const fsdp_checkpoint_reader *reader, int64_t index,
                                               fsdp_checkpoint_tensor *out);
FSDP_API int64_t fsdp_checkpoint_tensor_find(const fsdp_checkpoint_reader *reader,
                                             const char *name);

/* fsdp_checkpoint_read - a box of a tensor, row-major; checksums of the blocks that it touches are
               checked
   start, shape  [ndim] in the tensor; both NULL: all of it
   dtype       KEEP: as it is; a floating tensor as another floating dtype is converted
   to          out: room for the box, aligned to dtype
   Result      FSDP_OK; CORRUPT, IO; UNSUPPORTED (elements of less than a byte, or more dims than
               the library has);
               INVALID_ARG; OUT_OF_MEMORY. After a failure the content of `to` is undefined
   Blocks      while files are read      Allocates tables */
FSDP_API FSDP_MUST_CHECK fsdp_status fsdp_checkpoint_read(fsdp_checkpoint_reader *reader,
                                                          int64_t index, const int64_t *start,
                                                          const int64_t *shape, fsdp_dtype dtype,
                                                          void *to, char *text, size_t cap);

// A file that an export writes next to the tensors, in place of that of `like` with its name.
typedef struct fsdp_checkpoint_text {
    const char *name;  // [A-Za-z0-9_.-]{1,64}, of no file that like's copies leave out
    const void *data;
    int64_t nbytes;
} fsdp_checkpoint_text;

typedef struct fsdp_checkpoint_export_desc {
    uint32_t size, start_canary;
    fsdp_dtype dtype;                   // for floating tensors, except states; KEEP: as they are
    int32_t with_optimizer;             // 0: no names that begin with "optim.state." or "fsdp.".
                                        // With num_ranks they are always written
    int32_t num_ranks;                  // > 0: a checkpoint of this library in num_ranks files
    int32_t ema;                        // 1: parameters that have an average (fsdp_ema_create) are
                                        // written as that, in their dtype. Not with num_ranks
    int64_t max_file_bytes;             // most bytes of data in a file, or one larger tensor.
                                        // 0: 5,000,000,000
                                        // Not with num_ranks
    // The name there: 1, out is [FSDP_CHECKPOINT_NAME]. 0: leave the tensor out. NULL: as it is.
    int (*rename)(void *user, const char *name, char *out);
    void *user;
    const fsdp_file_ops *files;         // NULL: the operating system
    void *files_user;
    const char *ema_name;               // if there are several averages: fsdp_ema_desc.name of one;
                                        // NULL: the one without a name
    // The source of a load, called with `user`: a parameter goes back to the rows from which it was
    // loaded. param has only the name in the file, dtype and shape. 0: leave the parameter out.
    // NULL, and for states: rename. Not with num_ranks, nor are the fields below
    fsdp_checkpoint_source_fn source;
    const char *like;                   // a directory of Hugging Face, or a file: out has the same
                                        // tensors, and gets the other files. NULL: none
    int (*may_lack)(void *user, const char *name); // 1: out may lack this tensor of like. NULL: 0
    const char *file_name;              // NULL: model.safetensors
    const fsdp_checkpoint_text *texts;  // [num_texts]: for example a config.json that tells dtype
    int32_t num_texts;
    int32_t like_dtypes;                // 1: a floating tensor of like gets its dtype there, not
                                        // `dtype`
    uint64_t end_canary;
} fsdp_checkpoint_export_desc;

/* fsdp_checkpoint_verify - check manifest, headers, coverage of every tensor, and every checksum
   fsdp_checkpoint_export - write the tensors to a new directory.
               In the form of Hugging Face: model.safetensors, the bytes that safetensors' save_file
               writes; or model-0000i-of-0000n.safetensors and an index, split as huggingface_hub
               splits tensors in the order of their names.
               Tensors of dtypes that the library does not have pass through as they are.
               With like: names and shapes are compared before anything is written. A matrix that
               only one side has, with the bytes of an embedding of that side (wte, embed or shared
               in its name), is tied: it is written or left out as in like. All files of like are
               copied, except for weights, indices and hidden ones
               With num_ranks as a checkpoint of ours: each file has its rows of every tensor;
               tensors with few rows or bytes are in one file. The step comes from the name
               step-NNNNNNNN of out, or if it has none, of path, or is 0. Blobs stay those of
               the ranks that saved them
   out         made; its parent must be there. It gets its name when it is complete
   text        verify: also what was checked, if nothing is wrong. export: also tensors that have
               another dtype than in like, unless texts has a config.json
   Result      FSDP_OK; CORRUPT, IO, UNSUPPORTED (elements of less than a byte; too many
               dims), INVALID_ARG (out is there already; two tensors of one name; nothing to write;
               sources that do not make whole tensors; other names or shapes than in like),
               OUT_OF_MEMORY. After a failure out does not exist, and no other file remains if
               files can be removed. Only if the last sync of its parent fails (IO) it is there
   Blocks      while files are read and written      Allocates headers, tables, 9 MiB
   Source      torch: consolidate_safetensors_files */
FSDP_API fsdp_status fsdp_checkpoint_verify(const char *path, const fsdp_file_ops *files,
                                            void *files_user, char *text, size_t cap);
FSDP_API fsdp_status fsdp_checkpoint_export(const char *path, const char *out,
                                            const fsdp_checkpoint_export_desc *desc, char *text,
                                            size_t cap);

/* fsdp_checkpoint_export_model - export the parameters as they are now, as fsdp_checkpoint_export
               does those of a checkpoint: the files have the same bytes. Rank 0 writes
   desc        NULL: its defaults. Its files are not used: those of ck are. num_ranks,
               with_optimizer and ema are refused; for averages call fsdp_ema_swap before and after.
               Only rank 0 reads texts. rename, source and may_lack are called on a worker thread
               of rank 0
   Result      FSDP_OK; as fsdp_checkpoint_export, on all ranks; INVALID_STATE (a unit is not idle),
               UNSUPPORTED (a parameter is a part of a tensor: tensor parallelism). A dtype that
               differs from like is logged
   Collective  yes      Blocks while files are written
   Allocates   rank 0: headers, tables, 9 MiB and the largest parameter
   Source      torch: get_model_state_dict(full_state_dict), save_file */
FSDP_API fsdp_status fsdp_checkpoint_export_model(fsdp_checkpoint *ck, const char *out,
                                                  const fsdp_checkpoint_export_desc *desc);

// clang-format on
#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_CHECKPOINT_H

/* ============================================================================================ */
/* Implementation: the parts that no other part includes. */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_CHECKPOINT_IMPLEMENTED) && \
    !defined(FSDP_MATH_ONLY)
#define FSDP_CHECKPOINT_IMPLEMENTED
#include "src/checkpoint/live.h"
#endif // FSDP_IMPLEMENTATION
