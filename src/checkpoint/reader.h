/* checkpoint/reader.h - a checkpoint read by one process, without a world

   The reader for tools and bindings. The calling thread makes the file calls, memory comes from the
   C library, and failures go to the caller's text instead of a log.
   Callers: programs and export.h (fsdpi_ck_whole_at).

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_READER_H
#define FSDPI_CHECKPOINT_READER_H

#include "files.h"
#include "objects.h"
#include "open.h"
#include "read.h"
#include "tile.h"

#include <stdio.h>
#include <string.h>

// A tensor and its boxes, which are adjacent in the list.
typedef struct fsdpi_ck_whole_tensor {
    int64_t first, count;         // its boxes
    int64_t shape[FSDP_MAX_DIMS]; // the whole tensor's
} fsdpi_ck_whole_tensor;

struct fsdp_checkpoint_reader {
    fsdpi_ck_disk disk;
    fsdpi_ck_io io;
    fsdpi_ck_opened opened;
    fsdpi_ck_reader reader;
    fsdpi_ck_verify_job verify;
    fsdpi_ck_buffer tensors;
    int64_t num_tensors;
    char path[FSDP_CHECKPOINT_PATH];
};

static fsdpi_ck_whole_tensor *fsdpi_ck_whole_at(const fsdp_checkpoint_reader *r, int64_t index) {
    return (fsdpi_ck_whole_tensor *)r->tensors.ptr + index;
}
static const fsdp_safetensors_entry *fsdpi_ck_entry_of(const fsdp_checkpoint_reader *r,
                                                       int64_t index) {
    return r->opened.boxes[fsdpi_ck_whole_at(r, index)->first].entry;
}
// Returns the index of the tensor with this name, or -1. Tensors are sorted by name.
static int64_t fsdpi_ck_index_of(const fsdp_checkpoint_reader *r, const char *name) {
    int64_t begin = 0, end = r->num_tensors;
    while (begin < end) {
        const int64_t middle = begin + (end - begin) / 2;
        const int order = strcmp(fsdpi_ck_entry_of(r, middle)->name, name);
        if (order == 0) return middle;
        if (order < 0) begin = middle + 1;
        else end = middle;
    }
    return -1;
}

// Sends the reader's later failures to this text.
static void fsdpi_ck_speak(fsdp_checkpoint_reader *r, const char *call, char *text, size_t cap) {
    r->io.call = call;
    r->io.text = text, r->io.cap = text ? cap : 0;
    if (text && cap) text[0] = 0;
}
static fsdp_status fsdpi_ck_no_memory(fsdp_status status, char *text, size_t cap) {
    if (status == FSDP_ERR_OUT_OF_MEMORY && text && cap && !text[0])
        snprintf(text, cap, "%s", fsdp_last_error(NULL));
    return status;
}
static fsdp_status fsdpi_ck_refused(const char *call, const char *what, char *text, size_t cap) {
    if (text && cap)
        snprintf(text, cap, "[E460] %s: %s is NULL, empty, or longer than %d bytes", call, what,
                 FSDP_CHECKPOINT_PATH - 300);
    return FSDP_ERR_INVALID_ARG;
}
static int fsdpi_ck_good_path(const char *path) {
    return path && *path && strlen(path) < FSDP_CHECKPOINT_PATH - 300;
}

// Lists the tensors of all boxes. Boxes are sorted by name.
static fsdp_status fsdpi_ck_list_tensors(fsdp_checkpoint_reader *r) {
    const fsdpi_ck_opened *o = &r->opened;
    fsdp_status status = fsdpi_ck_reserve(
        NULL, &r->tensors, (o->num_boxes + 1) * (int64_t)sizeof(fsdpi_ck_whole_tensor), 0);
    if (status) return status;
    for (int64_t i = 0, end; i < o->num_boxes; i = end) {
        const fsdp_safetensors_entry *e = o->boxes[i].entry;
        fsdpi_ck_whole_tensor *t = fsdpi_ck_whole_at(r, r->num_tensors++);
        for (end = i + 1; end < o->num_boxes; end++)
            if (strcmp(o->boxes[end].entry->name, e->name) != 0) break;
        memset(t, 0, sizeof *t);
        t->first = i, t->count = end - i;
        if (e->ndim <= FSDP_MAX_DIMS) fsdpi_ck_whole(o->boxes + i, (int)t->count, t->shape);
        else memcpy(t->shape, e->shape, sizeof t->shape);
    }
    return FSDP_OK;
}

static fsdp_status fsdpi_ck_open_alone(const char *call, const char *path,
                                       const fsdp_file_ops *files, void *files_user,
                                       fsdp_checkpoint_reader **out, char *text, size_t cap) {
    void *room = NULL;
    *out = NULL;
    if (text && cap) text[0] = 0;
    if (!fsdpi_ck_good_path(path)) return fsdpi_ck_refused(call, "path", text, cap);
    fsdp_status status = fsdpi_ck_alloc(NULL, (int64_t)sizeof **out, &room);
    if (status) return fsdpi_ck_no_memory(status, text, cap);
    fsdp_checkpoint_reader *r = (fsdp_checkpoint_reader *)room;
    fsdpi_ck_disk_init(&r->disk, files, files_user);
    r->io.disk = &r->disk;
    fsdpi_ck_speak(r, call, text, cap);
    snprintf(r->path, sizeof r->path, "%s", path);
    r->opened.dir = r->path;
    status = fsdpi_ck_fetch(&r->io, path, &r->opened.bulk);
    if (!status) status = fsdpi_ck_parse_headers(&r->io, &r->opened);
    if (!status) status = fsdpi_ck_list_tensors(r);
    if (!status) status = fsdpi_ck_reader_init(&r->reader, &r->io, &r->opened, 1);
    r->verify.r = &r->reader;
    r->verify.mine = 0, r->verify.of = 1;
    if (!status && fsdpi_ck_num_twins(&r->opened))
        status = fsdpi_ck_do(&r->io, fsdpi_ck_compare_twins, &r->verify);
    if (!status) *out = r;
    else fsdp_checkpoint_close(r);
    return fsdpi_ck_no_memory(status, text, cap);
}

FSDP_API fsdp_status fsdp_checkpoint_open(const char *path, const fsdp_file_ops *files,
                                          void *files_user, fsdp_checkpoint_reader **reader,
                                          char *text, size_t cap) {
    static const char *const call = "checkpoint_open";
    if (!reader) return fsdpi_ck_refused(call, "reader", text, cap);
    return fsdpi_ck_open_alone(call, path, files, files_user, reader, text, cap);
}

FSDP_API void fsdp_checkpoint_close(fsdp_checkpoint_reader *r) {
    fsdpi_ck_buffer self = {r, 0};
    if (!r) return;
    fsdpi_ck_opened_end(&r->io, &r->opened);
    if (r->reader.io) fsdpi_ck_reader_end(&r->reader);
    fsdpi_ck_free(NULL, &r->tensors);
    fsdpi_ck_free(NULL, &self);
}

FSDP_API fsdp_status fsdp_checkpoint_contents_of(const fsdp_checkpoint_reader *r,
                                                 fsdp_checkpoint_contents *out) {
    if (!r || !out) return FSDP_ERR_INVALID_ARG;
    memset(out, 0, sizeof *out);
    out->step = r->opened.step;
    out->world = r->opened.world;
    out->num_files = r->opened.num_parts;
    out->num_tensors = r->num_tensors;
    out->num_boxes = r->opened.num_boxes;
    out->data_bytes = r->opened.total_bytes;
    out->has_checksums = r->opened.step >= 0;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_checkpoint_tensor_at(const fsdp_checkpoint_reader *r, int64_t index,
                                               fsdp_checkpoint_tensor *out) {
    if (!r || !out || index < 0 || index >= r->num_tensors) return FSDP_ERR_INVALID_ARG;
    const fsdpi_ck_whole_tensor *t = fsdpi_ck_whole_at(r, index);
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(r, index), *before = NULL;
    memset(out, 0, sizeof *out);
    out->name = e->name;
    out->dtype = e->ndim <= FSDP_MAX_DIMS ? e->dtype : FSDP_SAFETENSORS_OTHER;
    out->file_dtype = e->file_dtype;
    out->ndim = e->ndim;
    memcpy(out->shape, t->shape, sizeof out->shape);
    for (int64_t i = t->first; i < t->first + t->count; before = e, i++) {
        e = r->opened.boxes[i].entry;
        if (before && e->ndim <= FSDP_MAX_DIMS && fsdpi_ck_same_box(before, e)) continue;
        out->nbytes += e->end - e->begin;
        out->num_boxes++;
    }
    return FSDP_OK;
}

FSDP_API int64_t fsdp_checkpoint_tensor_find(const fsdp_checkpoint_reader *r, const char *name) {
    int64_t low = 0, end = r && name ? r->num_tensors : 0;
    while (low < end) {
        const int64_t middle = low + (end - low) / 2;
        const int order = strcmp(fsdpi_ck_entry_of(r, middle)->name, name);
        if (!order) return middle;
        if (order < 0) low = middle + 1;
        else end = middle;
    }
    return -1;
}

// Fails if the library cannot read the tensor: too many dims, or elements of another size.
static fsdp_status fsdpi_ck_readable(fsdp_checkpoint_reader *r, int64_t index) {
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(r, index);
    if (e->ndim <= FSDP_MAX_DIMS && fsdpi_ck_carrier(e) != FSDP_DTYPE_KEEP) return FSDP_OK;
    return fsdpi_ck_fail(&r->io, FSDP_ERR_UNSUPPORTED,
                         "[E461] %s: '%.300s' is %s with %d dims, which the library cannot move: "
                         "leave it out (fsdpck: --skip NAME; a program: rename of the desc)",
                         r->io.call, e->name, fsdp_safetensors_dtype_name(e->file_dtype), e->ndim);
}
// Returns 1 if elements of dtype `from` can be read as `to`.
static int fsdpi_ck_converts(fsdp_dtype from, fsdp_dtype to) {
    return from == to || (fsdp_dtype_is_float(from) && fsdp_dtype_is_float(to));
}

// Adds a tensor's box to the list of wanted boxes. Requires checked arguments. pitch: as
// fsdpi_ck_want.
static fsdp_status fsdpi_ck_want_box(fsdp_checkpoint_reader *r, int64_t index, const int64_t *start,
                                     const int64_t *shape, fsdp_dtype dtype, int64_t pitch,
                                     char *to) {
    const fsdpi_ck_whole_tensor *t = fsdpi_ck_whole_at(r, index);
    fsdpi_ck_want w;
    memset(&w, 0, sizeof w);
    w.to = to;
    w.dtype = dtype;
    w.pitch = pitch;
    w.memory = FSDP_MEMORY_HOST;
    w.ndim = fsdpi_ck_entry_of(r, index)->ndim;
    for (int d = 0; d < w.ndim; d++) w.start[d] = start[d], w.shape[d] = shape[d];
    if (!fsdpi_ck_volume(w.ndim, w.shape)) return FSDP_OK;
    return fsdpi_ck_add_want(&r->reader, &w, t->first, t->count);
}

FSDP_API fsdp_status fsdp_checkpoint_read(fsdp_checkpoint_reader *r, int64_t index,
                                          const int64_t *start, const int64_t *shape,
                                          fsdp_dtype dtype, void *to, char *text, size_t cap) {
    static const char *const call = "checkpoint_read";
    static const int64_t zero[FSDP_MAX_DIMS] = {0};
    if (!r || !to) return fsdpi_ck_refused(call, "reader or to", text, cap);
    fsdpi_ck_speak(r, call, text, cap);
    int inside = index >= 0 && index < r->num_tensors;
    fsdp_status status = inside ? fsdpi_ck_readable(r, index) : FSDP_OK;
    if (status) return status;
    const fsdp_safetensors_entry *e = inside ? fsdpi_ck_entry_of(r, index) : NULL;
    const int64_t *whole = inside ? fsdpi_ck_whole_at(r, index)->shape : NULL;
    const fsdp_dtype as_it_is = e ? fsdpi_ck_carrier(e) : FSDP_DTYPE_KEEP;
    const int keeps = dtype == FSDP_DTYPE_KEEP;
    if (keeps) dtype = as_it_is;
    if (!start && !shape) start = zero, shape = whole;
    inside = inside && start && shape && (keeps || fsdpi_ck_converts(e->dtype, dtype));
    for (int d = 0; inside && d < e->ndim; d++)
        inside = start[d] >= 0 && shape[d] >= 0 && start[d] <= whole[d] &&
                 shape[d] <= whole[d] - start[d];
    if (!inside)
        return fsdpi_ck_fail(&r->io, FSDP_ERR_INVALID_ARG,
                             "[E462] %s: tensor %lld of %lld: expected an index below their "
                             "number, a box inside of the tensor, and KEEP or a floating dtype for "
                             "a floating one",
                             call, (long long)index, (long long)r->num_tensors);
    status = fsdpi_ck_want_box(r, index, start, shape, dtype, 0, (char *)to);
    if (!status) status = fsdpi_ck_read_all(&r->reader);
    return fsdpi_ck_no_memory(status, text, cap);
}

FSDP_API fsdp_status fsdp_checkpoint_verify(const char *path, const fsdp_file_ops *files,
                                            void *files_user, char *text, size_t cap) {
    fsdp_checkpoint_reader *r;
    fsdp_status status = fsdpi_ck_open_alone("checkpoint_verify", path, files, files_user, &r, text,
                                             cap);
    if (status) return status;
    status = fsdpi_ck_do(&r->io, fsdpi_ck_verify_blocks, &r->verify);
    if (!status && text && cap && r->opened.step >= 0)
        snprintf(text, cap, "step %lld: %lld tensors in %lld files, %lld checksums of %lld bytes",
                 (long long)r->opened.step, (long long)r->num_tensors,
                 (long long)r->opened.num_parts, (long long)r->verify.num_blocks,
                 (long long)r->opened.total_bytes);
    else if (!status && text && cap)
        snprintf(text, cap,
                 "%lld tensors in %lld files, %lld bytes that have no checksums: only headers were "
                 "checked%s",
                 (long long)r->num_tensors, (long long)r->opened.num_parts,
                 (long long)r->opened.total_bytes,
                 r->opened.untold ? ". They do not tell how large the whole tensors are: if the "
                                    "file with the last parts is missing, nobody can see it"
                                  : "");
    fsdp_checkpoint_close(r);
    return status;
}

#endif // FSDPI_CHECKPOINT_READER_H
