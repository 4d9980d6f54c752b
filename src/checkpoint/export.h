/* checkpoint/export.h - whole tensors to a new directory, in the form of Hugging Face or in ours

   Chooses a file for each tensor, and writes into a temporary directory that one rename completes.
   Files are written one after another, from the first byte to the last. A piece is a number of
   boxes that are read into one buffer.
   Callers: programs and tools/fsdpck.c (fsdpi_ck_next_box).

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_EXPORT_H
#define FSDPI_CHECKPOINT_EXPORT_H

#include "reader.h"
#include "files.h"
#include "retention.h"
#include "manifest.h"
#include "objects.h"
#include "open.h"
#include "read.h"
#include "save.h"
#include "table.h"
#include "tile.h"
#include "../safetensors/format.h"
#include "../safetensors/write.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A tensor of the new directory.
typedef struct fsdpi_ck_out {
    const char *name;
    int64_t tensor;   // index in the reader
    int64_t nbytes;   // in the new file
    fsdp_dtype dtype; // dtype as which elements are moved
    int32_t file;
} fsdpi_ck_out;

typedef struct fsdpi_ck_export {
    fsdp_checkpoint_reader *in;
    fsdp_checkpoint_export_desc desc;
    const char *call;
    fsdpi_ck_buffer outs, names, entries, header, data, sizes, crcs, text;
    int64_t num_outs, num_averages, num_crcs, total_bytes, step;
    int32_t num_files;
    int sharded; // 1: boxes, a manifest
    void *file;  // the file that is written
    char out[FSDP_CHECKPOINT_PATH], parent[FSDP_CHECKPOINT_PATH], tmp[FSDP_CHECKPOINT_PATH];
    char path[FSDP_CHECKPOINT_PATH]; // path of that file
} fsdpi_ck_export;

static fsdpi_ck_out *fsdpi_ck_out_at(const fsdpi_ck_export *x, int64_t index) {
    return (fsdpi_ck_out *)x->outs.ptr + index;
}
static int fsdpi_ck_by_out(const void *a, const void *b) {
    return strcmp(((const fsdpi_ck_out *)a)->name, ((const fsdpi_ck_out *)b)->name);
}

/* -------------------------------------------------------------------------------------------- */
// The plan.

// Sets *out to the index of the parameter's average or, if it has none, of the parameter.
static fsdp_status fsdpi_ck_average_of(fsdpi_ck_export *x, int64_t index, int64_t *out) {
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(x->in, index), *average;
    char name[FSDP_CHECKPOINT_NAME + 32];
    int n = snprintf(name, sizeof name, "optim.state.%s.ema%s%s", e->name,
                     x->desc.ema_name ? "." : "", x->desc.ema_name ? x->desc.ema_name : "");
    const int64_t found = n > 0 && n < (int)sizeof name ? fsdpi_ck_index_of(x->in, name) : -1;
    *out = index;
    if (found < 0) return FSDP_OK;
    average = fsdpi_ck_entry_of(x->in, found);
    int same = average->ndim == e->ndim && e->ndim <= FSDP_MAX_DIMS;
    for (int d = 0; d < e->ndim && same; d++)
        same = fsdpi_ck_whole_at(x->in, found)->shape[d] ==
               fsdpi_ck_whole_at(x->in, index)->shape[d];
    if (!same || !fsdp_dtype_is_float(average->dtype) || !fsdp_dtype_is_float(e->dtype))
        return fsdpi_ck_fail(&x->in->io, FSDP_ERR_CORRUPT,
                             "[E481] %s: '%.300s' is no average of '%.300s': expected floating "
                             "tensors of one shape",
                             x->call, name, e->name);
    *out = found;
    x->num_averages++;
    return FSDP_OK;
}

// Adds one tensor of the source under its new name. A tensor that desc leaves out is not added.
static fsdp_status fsdpi_ck_add_out(fsdpi_ck_export *x, int64_t index) {
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(x->in, index);
    char *renamed = (char *)x->names.ptr + x->num_outs * FSDP_CHECKPOINT_NAME;
    const int state = fsdpi_ck_is_reserved(e->name);
    if (state && !x->desc.with_optimizer && !x->sharded) return FSDP_OK;
    if (x->desc.rename) {
        renamed[0] = 0;
        if (!x->desc.rename(x->desc.user, e->name, renamed)) return FSDP_OK;
        renamed[FSDP_CHECKPOINT_NAME - 1] = 0;
    }
    int64_t tensor = index;
    fsdp_status status = fsdpi_ck_readable(x->in, index);
    if (!status && x->desc.ema) status = fsdpi_ck_average_of(x, index, &tensor);
    if (status) return status;
    fsdpi_ck_out *o = fsdpi_ck_out_at(x, x->num_outs++);
    o->name = x->desc.rename ? renamed : e->name;
    o->tensor = tensor;
    o->dtype = x->desc.dtype != FSDP_DTYPE_KEEP && !state && fsdp_dtype_is_float(e->dtype)
                   ? x->desc.dtype
                   : fsdpi_ck_carrier(e);
    o->nbytes = fsdpi_ck_volume(e->ndim, fsdpi_ck_whole_at(x->in, index)->shape) *
                (int64_t)fsdp_dtype_size(o->dtype);
    o->file = 0;
    x->total_bytes += o->nbytes;
    return FSDP_OK;
}

// Chooses the file of each tensor by huggingface_hub's rule, in the order of names. A tensor above
// the limit gets a file of its own; afterwards the file in progress is filled further.
static void fsdpi_ck_split(fsdpi_ck_export *x) {
    const int64_t most = x->desc.max_file_bytes ? x->desc.max_file_bytes : INT64_C(5000000000);
    int64_t filled = 0, first = 0; // bytes, and first tensor, in the file in progress
    int32_t done = 0;              // number of complete files
    int open = 0;
    for (int64_t i = 0; i < x->num_outs; i++) {
        fsdpi_ck_out *o = fsdpi_ck_out_at(x, i);
        if (o->nbytes > most) {
            o->file = done++;
            continue;
        }
        if (open && filled + o->nbytes > most) {
            for (int64_t k = first; k < i; k++)
                if (fsdpi_ck_out_at(x, k)->file < 0) fsdpi_ck_out_at(x, k)->file = done;
            done++, open = 0;
        }
        if (!open) first = i, filled = 0, open = 1;
        o->file = -1; // its number is known when it is complete
        filled += o->nbytes;
    }
    for (int64_t k = first; k < x->num_outs; k++)
        if (fsdpi_ck_out_at(x, k)->file < 0) fsdpi_ck_out_at(x, k)->file = done;
    x->num_files = done + open;
}

static fsdp_status fsdpi_ck_plan_export(fsdpi_ck_export *x) {
    fsdpi_ck_io *io = &x->in->io;
    const int64_t num = x->in->num_tensors + 1;
    fsdp_status status = fsdpi_ck_reserve(NULL, &x->outs, num * (int64_t)sizeof(fsdpi_ck_out), 0);
    if (!status && x->desc.rename)
        status = fsdpi_ck_reserve(NULL, &x->names, num * FSDP_CHECKPOINT_NAME, 0);
    if (!status)
        status = fsdpi_ck_reserve(NULL, &x->entries, num * (int64_t)sizeof(fsdp_safetensors_entry),
                                  0);
    for (int64_t i = 0; i < x->in->num_tensors && !status; i++) status = fsdpi_ck_add_out(x, i);
    if (status) return status;
    if (!x->num_outs)
        return fsdpi_ck_fail(io, FSDP_ERR_INVALID_ARG,
                             "[E467] %s: of %lld tensors in %s none is to be written", x->call,
                             (long long)x->in->num_tensors, x->in->path);
    if (x->desc.ema && !x->num_averages)
        return fsdpi_ck_fail(io, FSDP_ERR_INVALID_ARG,
                             "[E482] %s: %s has no average of a tensor that is to be written "
                             "(state 'ema%s%s'): save it with fsdp_ema_create, choose another by "
                             "--ema=NAME, or leave --ema out",
                             x->call, x->in->path, x->desc.ema_name ? "." : "",
                             x->desc.ema_name ? x->desc.ema_name : "");
    qsort(x->outs.ptr, (size_t)x->num_outs, sizeof(fsdpi_ck_out), fsdpi_ck_by_out);
    for (int64_t i = 1; i < x->num_outs; i++)
        if (!fsdpi_ck_by_out(fsdpi_ck_out_at(x, i - 1), fsdpi_ck_out_at(x, i)))
            return fsdpi_ck_fail(io, FSDP_ERR_INVALID_ARG,
                                 "[E465] %s: two tensors become '%.300s': let rename give one of "
                                 "them another name",
                                 x->call, fsdpi_ck_out_at(x, i)->name);
    if (!x->sharded) fsdpi_ck_split(x);
    else x->num_files = x->desc.num_ranks;
    return fsdpi_ck_reserve(NULL, &x->sizes, 3 * (int64_t)x->num_files * (int64_t)sizeof(int64_t),
                            0);
}

// Returns the number of a tensor's rows in file `file`: the shard that rank `file` would save.
static int64_t fsdpi_ck_file_rows(const fsdpi_ck_export *x, int64_t index, int file,
                                  int64_t *first) {
    const fsdpi_ck_out *o = fsdpi_ck_out_at(x, index);
    const int64_t rows = fsdpi_ck_entry_of(x->in, o->tensor)->ndim
                             ? fsdpi_ck_whole_at(x->in, o->tensor)->shape[0]
                             : 1;
    fsdp_range mine = FSDP_ZERO;
    *first = 0;
    if (!x->sharded) return o->file == file ? rows : -1;
    if (rows < x->num_files || o->nbytes < 65536 * (int64_t)x->num_files)
        return index % x->num_files == file ? rows : -1;
    (void)fsdp_shard_range(rows, x->num_files, file, &mine);
    *first = mine.start;
    return mine.count ? mine.count : -1;
}

// Lists the entries of a file, unsorted. Returns their number.
static int64_t fsdpi_ck_file_entries(const fsdpi_ck_export *x, int file) {
    int64_t num = 0, first;
    for (int64_t i = 0; i < x->num_outs; i++) {
        const fsdpi_ck_out *o = fsdpi_ck_out_at(x, i);
        int64_t rows = fsdpi_ck_file_rows(x, i, file, &first);
        if (rows < 0) continue;
        fsdp_safetensors_entry *e = (fsdp_safetensors_entry *)x->entries.ptr + num++;
        memset(e, 0, sizeof *e);
        const fsdp_safetensors_entry *from = fsdpi_ck_entry_of(x->in, o->tensor);
        e->name = o->name;
        e->dtype = from->dtype == FSDP_SAFETENSORS_OTHER ? from->dtype : o->dtype;
        e->file_dtype = from->file_dtype;
        e->ndim = from->ndim;
        memcpy(e->whole, fsdpi_ck_whole_at(x->in, o->tensor)->shape, sizeof e->whole);
        memcpy(e->shape, e->whole, sizeof e->shape);
        if (e->ndim) e->start[0] = first, e->shape[0] = rows;
    }
    return num;
}

/* -------------------------------------------------------------------------------------------- */
// Files.

static void fsdpi_ck_file_name(const fsdpi_ck_export *x, int file, char out[FSDPI_CK_LEAF]) {
    if (x->sharded) fsdpi_ck_shard_name(out, file);
    else if (x->num_files == 1) snprintf(out, FSDPI_CK_LEAF, "model.safetensors");
    else
        snprintf(out, FSDPI_CK_LEAF, "model-%05d-of-%05d.safetensors", file + 1, (int)x->num_files);
}

static fsdp_status fsdpi_ck_create_file(fsdpi_ck_export *x, const char *leaf) {
    int64_t ignored;
    fsdpi_ck_forget(&x->in->disk);
    (void)fsdpi_ck_join(x->path, x->tmp, leaf); // `out` is short enough
    (void)fsdpi_ck_open(&x->in->disk, x->path, 1, &x->file, &ignored);
    return fsdpi_ck_disk_status(&x->in->io);
}
static fsdp_status fsdpi_ck_write_bytes(fsdpi_ck_export *x, const void *from, int64_t nbytes,
                                        int64_t at) {
    fsdpi_ck_forget(&x->in->disk);
    (void)fsdpi_ck_write(&x->in->disk, x->file, x->path, from, nbytes, at);
    return fsdpi_ck_disk_status(&x->in->io);
}
// Closes the file. Returns `status` if it is a failure, otherwise the result of closing.
static fsdp_status fsdpi_ck_finish_file(fsdpi_ck_export *x, fsdp_status status) {
    fsdpi_ck_forget(&x->in->disk);
    if (!status) (void)fsdpi_ck_sync(&x->in->disk, x->file, x->path);
    (void)fsdpi_ck_close(&x->in->disk, x->file, x->path);
    x->file = NULL;
    return status ? status : fsdpi_ck_disk_status(&x->in->io);
}
static fsdp_status fsdpi_ck_write_text(fsdpi_ck_export *x, const char *leaf, int64_t nbytes) {
    fsdp_status status = fsdpi_ck_create_file(x, leaf);
    if (status) return status;
    return fsdpi_ck_finish_file(x, fsdpi_ck_write_bytes(x, x->text.ptr, nbytes, 0));
}

/* Finds the largest contiguous box of at most `most` elements that begins with element `at` of a
   tensor. Returns its number of elements. */
static int64_t fsdpi_ck_next_box(int ndim, const int64_t *shape, int64_t at, int64_t most,
                                 int64_t *start, int64_t *size) {
    int64_t inner = fsdpi_ck_volume(ndim, shape), rest = at, n = 1;
    int cut = -1;
    for (int d = 0; d < ndim; d++) {
        inner /= shape[d];
        start[d] = rest / inner;
        rest %= inner;
        size[d] = cut < 0 ? 1 : shape[d];
        if (cut >= 0 || rest || inner > most) continue;
        cut = d;
        size[d] = fsdpi_ck_less(most / inner, shape[d] - start[d]);
        n = size[d] * inner;
    }
    return n;
}

static const fsdpi_ck_out *fsdpi_ck_out_of(const fsdpi_ck_export *x, const char *name) {
    fsdpi_ck_out key;
    memset(&key, 0, sizeof key);
    key.name = name;
    return (const fsdpi_ck_out *)bsearch(&key, x->outs.ptr, (size_t)x->num_outs, sizeof key,
                                         fsdpi_ck_by_out);
}

// Reads the next piece of a file's data, beginning with element *at of entry *next. Sets *used to
// its bytes.
static fsdp_status fsdpi_ck_read_piece(fsdpi_ck_export *x, int64_t num, int64_t *next, int64_t *at,
                                       int64_t *used) {
    fsdp_status status = FSDP_OK;
    for (*used = 0; *next < num && !status;) {
        const fsdp_safetensors_entry *e = (const fsdp_safetensors_entry *)x->entries.ptr + *next;
        const int64_t size = (int64_t)fsdp_dtype_size(fsdpi_ck_carrier(e));
        int64_t start[FSDP_MAX_DIMS], shape[FSDP_MAX_DIMS], room = (FSDPI_CK_PIECE - *used) / size;
        if (*at == fsdpi_ck_volume(e->ndim, e->shape)) {
            (*next)++, *at = 0;
            continue;
        }
        if (!room) break;
        int64_t n = fsdpi_ck_next_box(e->ndim, e->shape, *at, room, start, shape);
        for (int d = 0; d < e->ndim; d++) start[d] += e->start[d];
        status = fsdpi_ck_want_box(x->in, fsdpi_ck_out_of(x, e->name)->tensor, start, shape,
                                   fsdpi_ck_carrier(e), (char *)x->data.ptr + *used);
        *at += n;
        *used += n * size;
    }
    return status ? status : fsdpi_ck_read_all(&x->in->reader);
}

// Prints the header of a file, and computes its sizes.
static fsdp_status fsdpi_ck_print_file(fsdpi_ck_export *x, int file, int64_t num) {
    fsdp_safetensors_entry *entries = (fsdp_safetensors_entry *)x->entries.ptr;
    int64_t *sizes = (int64_t *)x->sizes.ptr + 3 * (int64_t)file;
    int64_t n = fsdpi_ck_print_begin(entries, num, x->sharded, file, (int)x->num_files, NULL, 0);
    if (n < 0)
        return fsdpi_ck_fail(&x->in->io, FSDP_ERR_INVALID_ARG,
                             "[E466] %s: the header of %lld tensors cannot be written: a name is "
                             "empty, not UTF-8 or '__metadata__', or the header has more than "
                             "100,000,000 bytes",
                             x->call, (long long)num);
    fsdp_status status = fsdpi_ck_reserve(NULL, &x->header, n, 0);
    if (status) return status;
    (void)fsdpi_ck_print_begin(entries, num, x->sharded, file, (int)x->num_files,
                               (char *)x->header.ptr, n);
    sizes[0] = n;
    sizes[1] = entries[num - 1].end;
    sizes[2] = (int64_t)fsdp_crc32c(0, x->header.ptr, n);
    int64_t crcs = x->num_crcs + fsdpi_ck_blocks(sizes[1]) + 1;
    status = fsdpi_ck_reserve(NULL, &x->crcs, 4 * crcs, 4 * x->num_crcs);
    if (!status) memset((uint32_t *)x->crcs.ptr + x->num_crcs, 0, 4 * (size_t)(crcs - x->num_crcs));
    return status;
}

static fsdp_status fsdpi_ck_write_one(fsdpi_ck_export *x, int file) {
    char leaf[FSDPI_CK_LEAF];
    int64_t *sizes = (int64_t *)x->sizes.ptr + 3 * (int64_t)file;
    int64_t num = fsdpi_ck_file_entries(x, file), next = 0, at = 0, n = 0;
    memset(sizes, 0, 3 * sizeof *sizes);
    if (!num) return FSDP_OK; // more ranks than tensors
    fsdp_status status = fsdpi_ck_print_file(x, file, num);
    if (status) return status;
    fsdpi_ck_file_name(x, file, leaf);
    status = fsdpi_ck_create_file(x, leaf);
    if (status) return status;
    status = fsdpi_ck_write_bytes(x, x->header.ptr, sizes[0], 0);
    for (int64_t done = 0; done < sizes[1] && !status; done += n) {
        status = fsdpi_ck_read_piece(x, num, &next, &at, &n);
        if (status) break;
        fsdpi_ck_sum((uint32_t *)x->crcs.ptr + x->num_crcs, done, (const char *)x->data.ptr, n);
        status = fsdpi_ck_write_bytes(x, x->data.ptr, n, sizes[0] + done);
    }
    x->num_crcs += fsdpi_ck_blocks(sizes[1]);
    return fsdpi_ck_finish_file(x, status);
}

/* -------------------------------------------------------------------------------------------- */
// Manifest or index.

// Prints a string as Python's json does, in ASCII. Returns the number of bytes. `to` has room for
// them, or is NULL.
static int64_t fsdpi_ck_put_ascii(char *to, const char *s) {
    char one[16];
    int64_t used = 0;
    for (int size; *s; s += size) {
        const unsigned char *u = (const unsigned char *)s;
        size = fsdpi_st_character(u, (int64_t)strlen(s));
        uint32_t c = size == 2   ? (u[0] & 31u) << 6 | (u[1] & 63u)
                     : size == 3 ? (u[0] & 15u) << 12 | (u[1] & 63u) << 6 | (u[2] & 63u)
                     : size == 4
                         ? (u[0] & 7u) << 18 | (u[1] & 63u) << 12 | (u[2] & 63u) << 6 | (u[3] & 63u)
                         : 0;
        int n = fsdpi_st_escape(*s, one);
        if (size < 1) size = 1; // a guard: names have been checked
        if (*u == 127) c = 127;
        if (c >= 0x10000)
            n = snprintf(one, sizeof one, "\\u%04x\\u%04x", 0xD800u + ((c - 0x10000) >> 10),
                         0xDC00u + ((c - 0x10000) & 1023));
        else if (c) n = snprintf(one, sizeof one, "\\u%04x", c);
        if (to) memcpy(to + used, one, (size_t)n);
        used += n;
    }
    return used;
}

// Writes model.safetensors.index.json as huggingface_hub and transformers print it, sorted by name.
static fsdp_status fsdpi_ck_write_index(fsdpi_ck_export *x) {
    int64_t most = 256;
    for (int64_t i = 0; i < x->num_outs; i++)
        most += fsdpi_ck_put_ascii(NULL, fsdpi_ck_out_at(x, i)->name) + FSDPI_CK_LEAF + 16;
    fsdp_status status = fsdpi_ck_reserve(NULL, &x->text, most, 0);
    if (status) return status;
    fsdpi_ck_print p = {(char *)x->text.ptr, 0};
    fsdpi_ck_say(&p, "{\n  \"metadata\": {\n    \"total_size\": %lld\n  },\n  \"weight_map\": {\n",
                 (long long)x->total_bytes);
    for (int64_t i = 0; i < x->num_outs; i++) {
        const fsdpi_ck_out *o = fsdpi_ck_out_at(x, i);
        char leaf[FSDPI_CK_LEAF];
        fsdpi_ck_file_name(x, o->file, leaf);
        fsdpi_ck_say(&p, "    \"");
        p.used += fsdpi_ck_put_ascii(p.buf + p.used, o->name);
        fsdpi_ck_say(&p, "\": \"%s\"%s\n", leaf, i + 1 < x->num_outs ? "," : "");
    }
    fsdpi_ck_say(&p, "  }\n}");
    return fsdpi_ck_write_text(x, "model.safetensors.index.json", p.used);
}
static fsdp_status fsdpi_ck_write_manifest(fsdpi_ck_export *x) {
    fsdp_status status = fsdpi_ck_reserve(NULL, &x->text,
                                          fsdpi_ck_manifest_room(x->num_files, x->num_crcs), 0);
    if (status) return status;
    int64_t n = fsdpi_ck_print_manifest((char *)x->text.ptr, x->step, x->in->opened.world,
                                        x->num_files, (const int64_t *)x->sizes.ptr,
                                        (const uint32_t *)x->crcs.ptr);
    return fsdpi_ck_write_text(x, "manifest.json", n);
}

/* -------------------------------------------------------------------------------------------- */
// Directories.

// Derives three paths: OUT without slashes at its end, its parent, and a temporary directory next
// to it.
static fsdp_status fsdpi_ck_export_paths(fsdpi_ck_export *x, const char *out) {
    char leaf[FSDPI_CK_LEAF];
    snprintf(x->out, sizeof x->out, "%s", out);
    for (size_t n = strlen(x->out); n > 1 && x->out[n - 1] == '/'; n--) x->out[n - 1] = 0;
    const char *last = fsdpi_ck_last_part(x->out);
    size_t before = (size_t)(last - x->out);
    snprintf(x->parent, sizeof x->parent, "%.*s", before > 1 ? (int)before - 1 : (int)before,
             before ? x->out : ".");
    if (!before) snprintf(x->parent, sizeof x->parent, ".");
    snprintf(leaf, sizeof leaf, ".tmp-export-%016llx", (unsigned long long)fsdpi_ck_nonce());
    (void)fsdpi_ck_join(x->tmp, x->parent, leaf);
    int64_t step = fsdpi_ck_step_of(last);
    x->step = step >= 0 ? step : x->in->opened.step >= 0 ? x->in->opened.step : 0;
    return FSDP_OK;
}

static fsdp_status fsdpi_ck_make_export(fsdpi_ck_export *x) {
    fsdpi_ck_disk *d = &x->in->disk;
    fsdpi_ck_forget(d);
    (void)fsdpi_ck_begin(d, "list", x->out);
    int error = d->ops->list(d->user, x->out, fsdpi_ck_stop_at_once, NULL);
    if (!error || error == ENOTDIR)
        return fsdpi_ck_fail(&x->in->io, FSDP_ERR_INVALID_ARG,
                             "[E464] %s: %s is there already: choose another name", x->call,
                             x->out);
    if (error != ENOENT) (void)fsdpi_ck_end(d, error, x->out);
    if (!fsdpi_ck_begin(d, "mkdir", x->tmp))
        (void)fsdpi_ck_end(d, d->ops->make_dir(d->user, x->tmp), x->tmp);
    return fsdpi_ck_disk_status(&x->in->io);
}

static fsdp_status fsdpi_ck_publish(fsdpi_ck_export *x) {
    fsdpi_ck_disk *d = &x->in->disk;
    fsdpi_ck_forget(d);
    (void)fsdpi_ck_sync_dir(d, x->tmp);
    (void)fsdpi_ck_rename(d, x->tmp, x->out);
    (void)fsdpi_ck_sync_dir(d, x->parent);
    return fsdpi_ck_disk_status(&x->in->io);
}

static fsdp_status fsdpi_ck_export_all(fsdpi_ck_export *x, const char *out) {
    fsdp_status status = fsdpi_ck_export_paths(x, out);
    if (!status) status = fsdpi_ck_plan_export(x);
    if (!status) status = fsdpi_ck_reserve(NULL, &x->data, FSDPI_CK_PIECE, 0);
    if (!status) status = fsdpi_ck_make_export(x);
    if (status) return status;
    for (int32_t i = 0; i < x->num_files && !status; i++) status = fsdpi_ck_write_one(x, i);
    if (!status && x->sharded) status = fsdpi_ck_write_manifest(x);
    else if (!status && x->num_files > 1) status = fsdpi_ck_write_index(x);
    if (!status) status = fsdpi_ck_publish(x);
    if (status) (void)fsdpi_ck_remove_dir(&x->in->disk, x->tmp); // after a rename it is gone
    return status;
}

static fsdp_status fsdpi_ck_check_export(const fsdp_checkpoint_export_desc *desc,
                                         fsdp_checkpoint_export_desc *own, const char *call,
                                         const char *out, char *text, size_t cap) {
    fsdp_status status = fsdp_desc_read(NULL, own, desc, sizeof *own,
                                        "fsdp_checkpoint_export_desc");
    if (status && text && cap) snprintf(text, cap, "%s", fsdp_last_error(NULL));
    if (status) return status;
    if (!fsdpi_ck_good_path(out)) return fsdpi_ck_refused(call, "out", text, cap);
    int good = own->num_ranks >= 0 && own->num_ranks <= FSDPI_CK_MOST_FILES &&
               own->max_file_bytes >= 0 && !(own->ema && own->num_ranks) &&
               (own->dtype == FSDP_DTYPE_KEEP || fsdp_dtype_is_float(own->dtype)) &&
               (!own->files ||
                (own->files->version == 1 && own->files->size == sizeof(fsdp_file_ops)));
    if (!good && text && cap)
        snprintf(text, cap,
                 "[E463] %s: expected num_ranks 0 to %d, and 0 with ema, max_file_bytes >= 0, "
                 "dtype KEEP or a floating one, and files of version 1: zero the desc, then set "
                 "what you need",
                 call, FSDPI_CK_MOST_FILES);
    return good ? FSDP_OK : FSDP_ERR_INVALID_ARG;
}

FSDP_API fsdp_status fsdp_checkpoint_export(const char *path, const char *out,
                                            const fsdp_checkpoint_export_desc *desc, char *text,
                                            size_t cap) {
    static const char *const call = "checkpoint_export";
    fsdp_checkpoint_export_desc own;
    void *room = NULL;
    if (text && cap) text[0] = 0;
    fsdp_status status = fsdpi_ck_check_export(desc, &own, call, out, text, cap);
    if (!status) status = fsdpi_ck_alloc(NULL, (int64_t)sizeof(fsdpi_ck_export), &room);
    if (status) return fsdpi_ck_no_memory(status, text, cap);
    fsdpi_ck_export *x = (fsdpi_ck_export *)room;
    x->desc = own;
    x->call = call;
    x->sharded = own.num_ranks > 0;
    status = fsdpi_ck_open_alone(call, path, own.files, own.files_user, &x->in, text, cap);
    if (!status) status = fsdpi_ck_no_memory(fsdpi_ck_export_all(x, out), text, cap);
    fsdpi_ck_buffer *rooms[] = {&x->outs, &x->names, &x->entries, &x->header,
                                &x->data, &x->sizes, &x->crcs,    &x->text};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) fsdpi_ck_free(NULL, rooms[i]);
    fsdp_checkpoint_close(x->in);
    free(room);
    return status;
}

#endif // FSDPI_CHECKPOINT_EXPORT_H
