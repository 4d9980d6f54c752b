/* checkpoint/objects.h - what a checkpoint object is made of

   Callers: export.h (fsdpi_ck_reserve), load.h (fsdpi_ck_tensor_at), reader.h (fsdpi_ck_free) and
     others.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_OBJECTS_H
#define FSDPI_CHECKPOINT_OBJECTS_H

#include "files.h"
#include "worker.h"

#include <stdlib.h>
#include <string.h>

// Memory from the model's allocator, or from calloc if there is no model. A buffer only grows.
typedef struct fsdpi_ck_buffer {
    void *ptr;
    int64_t cap;
} fsdpi_ck_buffer;

static fsdp_status fsdpi_ck_alloc(fsdp_model *m, int64_t bytes, void **out) {
    if (m) return fsdp_alloc(m, FSDP_MEMORY_HOST, bytes, "checkpoint: no memory", out);
    *out = calloc(bytes > 0 ? (size_t)bytes : 1, 1);
    return *out ? FSDP_OK
                : fsdp_fail(NULL, FSDP_ERR_OUT_OF_MEMORY,
                            "[E420] checkpoint: no memory for %lld bytes", (long long)bytes);
}
static void fsdpi_ck_free(fsdp_model *m, fsdpi_ck_buffer *room) {
    if (m) fsdp_free(m, FSDP_MEMORY_HOST, room->ptr, room->cap);
    else free(room->ptr);
    room->ptr = NULL, room->cap = 0;
}
// Ensures a capacity of `bytes`. Keeps the first `used` bytes.
static fsdp_status fsdpi_ck_reserve(fsdp_model *m, fsdpi_ck_buffer *room, int64_t bytes,
                                    int64_t used) {
    fsdpi_ck_buffer larger = {NULL, bytes};
    if (bytes <= room->cap) return FSDP_OK;
    if (used && larger.cap < 2 * room->cap) larger.cap = 2 * room->cap;
    fsdp_status status = fsdpi_ck_alloc(m, larger.cap, &larger.ptr);
    if (status) return status;
    if (used) memcpy(larger.ptr, room->ptr, (size_t)used);
    fsdpi_ck_free(m, room);
    *room = larger;
    return FSDP_OK;
}

// One tensor of this rank: its box in the whole tensor, and the memory of the box.
typedef struct fsdpi_ck_tensor {
    const char *name; // in the files
    int64_t name_at;  // offset in the table's text, in bytes
    const char *extension; // name of its extension; NULL: no state
    fsdp_dtype dtype; // in memory
    fsdp_dtype
        file_dtype; // in the files: an extension's I64 is stored as F64, as PyTorch's step
    int32_t ndim;
    int32_t memory;              // FSDP_MEMORY_* of its data
    int32_t ordinal;             // its parameter's; -1: none
    int32_t place;               // 0: a parameter; 1, 2, ...: the states of that parameter
    int32_t blob;                // index of a blob; -1: no blob
    int32_t holder, num_holders; // index among the ranks that hold the same box, and their number
    int64_t start[FSDP_MAX_DIMS], shape[FSDP_MAX_DIMS], whole[FSDP_MAX_DIMS];
    int64_t numel; // elements in the box
    void *data;
    fsdp_param_view view; // the parameter's, for `source`
} fsdpi_ck_tensor;

// All tensors of a rank: a save writes them, and a load fills them.
typedef struct fsdpi_ck_table {
    fsdpi_ck_buffer tensors, text, order, base; // order: by name; base: parameters' indices
    int32_t num;
    int64_t text_used;
} fsdpi_ck_table;

// A run of bytes that a save writes, in the order of the file.
typedef struct fsdpi_ck_span {
    const char *from;
    int64_t nbytes;
    int32_t memory;
} fsdpi_ck_span;

typedef struct fsdpi_ck_listing {
    int64_t *steps; // [FSDPI_CK_MOST_STEPS], newest first
    int32_t num;
    int64_t below; // only steps less than this one are listed
} fsdpi_ck_listing;

// The file calls of a find or a load, as jobs of the worker.
typedef struct fsdpi_ck_open_job { // opens a file, or finds that it does not exist
    fsdpi_ck_disk *disk;
    const char *path;
    void *file;
    int64_t nbytes;
    int error, quiet; // quiet: ignore a failure of close
} fsdpi_ck_open_job;

typedef struct fsdpi_ck_read_job {
    fsdpi_ck_disk *disk;
    const char *path;
    void *file, *to;
    int64_t at, nbytes;
} fsdpi_ck_read_job;

typedef struct fsdpi_ck_list_job { // lists the names of data files and indices, one after another,
    fsdpi_ck_disk *disk;           // each ends with 0
    const char *path;
    char *to;
    int64_t cap, used, num, has_manifest;
    int64_t newest;  // newest checkpoint inside the directory; -1: none
    char inside[64]; // name of that checkpoint
    char pickle[64]; // a name that torch.save uses; "": none
} fsdpi_ck_list_job;

// How file calls are made: by an object's worker, with rounds of all ranks, or by the calling
// thread. It contains the jobs, since a hung worker must not write into a stack that is gone.
typedef struct fsdpi_ck_io {
    fsdp_checkpoint *ck; // NULL: the calling thread makes the calls
    fsdp_model *model;   // supplies the allocator; NULL: calloc
    fsdp_world *world;   // for error texts; NULL: none
    char *text;          // without ck: receives the text of a failure; may be NULL
    size_t cap;
    fsdpi_ck_disk *disk;
    const char *call;
    const char *dir; // the directory of a file that a text names without it; NULL: the file itself
    fsdpi_ck_open_job open;
    fsdpi_ck_read_job read;
    fsdpi_ck_list_job list;
    char path[FSDP_CHECKPOINT_PATH]; // of these jobs
} fsdpi_ck_io;

enum { FSDPI_CK_IDLE = 0, FSDPI_CK_WRITING, FSDPI_CK_COMMITTING }; // the next phase of a save

typedef struct fsdpi_ck_save {
    int stage_of; // FSDPI_CK_*
    int64_t step, begin_ns;
    fsdpi_ck_buffer entries, names, header, spans, numbers;
    int32_t num_entries, num_spans;
    int64_t header_bytes, data_bytes; // bytes of this rank's file: 8 + N, and the rest
    uint32_t header_crc;
    uint64_t layout;     // hash of the last layout that was checked; 0: none
    fsdpi_ck_buffer sizes; // [3 ranks]: header bytes, data bytes and header CRC of each rank
    fsdpi_ck_buffer crcs;  // one per block; each rank fills in its own
    int64_t num_crcs, first_crc;
    fsdpi_ck_buffer manifest;   // only on rank 0
    fsdpi_ck_buffer stage;      // a ring of copies; empty: the worker writes from the tensors
    int64_t stage_bytes;        // bytes of the stage that this save uses
    int64_t produced, consumed; // bytes copied into the stage and written from it
    uint32_t given_up;          // 1: copying has failed
    char dir[FSDP_CHECKPOINT_PATH], tmp[FSDP_CHECKPOINT_PATH], final[FSDP_CHECKPOINT_PATH];
    char file[FSDP_CHECKPOINT_PATH], scratch[FSDP_CHECKPOINT_PATH];
    fsdpi_ck_watch watch; // for polls
    int warned;           // 1: the checkpoint is complete, but its directory was not synced, or
                          // an old checkpoint was not removed
} fsdpi_ck_save;

struct fsdp_checkpoint {
    fsdp_extension extension; // it ends with the model
    fsdp_model *model;
    fsdp_world *world;
    int32_t rank, size;
    fsdp_checkpoint_desc desc;
    fsdpi_ck_buffer blobs; // copies of desc.blobs, and their names
    fsdpi_ck_disk disk;
    fsdpi_ck_worker worker;
    int hung; // 1: the worker hangs, and its memory is never freed
    fsdpi_ck_table table;
    fsdpi_ck_save save;
    fsdpi_ck_io io;      // for find and load
    fsdpi_ck_buffer steps; // for keep and find
    fsdpi_ck_listing found;
    fsdp_checkpoint_report report;
};

static const fsdp_checkpoint_blob *fsdpi_ck_blob(const fsdp_checkpoint *ck, int index) {
    return (const fsdp_checkpoint_blob *)ck->blobs.ptr + index;
}
static fsdpi_ck_tensor *fsdpi_ck_tensor_at(const fsdpi_ck_table *t, int index) {
    return (fsdpi_ck_tensor *)t->tensors.ptr + index;
}

#endif // FSDPI_CHECKPOINT_OBJECTS_H
