/* checkpoint/export.h - whole tensors to a new directory, in the form of Hugging Face or in ours

   Chooses a file for each tensor, and writes into a temporary directory that one rename completes.
   Files are written one after another, from the first byte to the last. A piece is a number of
   boxes that are read into one buffer.
   Callers: programs.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_EXPORT_H
#define FSDPI_CHECKPOINT_EXPORT_H

#include "reader.h"
#include "export_plan.h"
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

// Writes into a temporary directory, which one rename completes. Files are written one after
// another, from the first byte to the last. A buffer holds a number of boxes.

// Returns the number of a tensor's rows in file `file`: the shard that rank `file` would save.
static int64_t fsdpi_ck_file_rows(const fsdpi_ck_export *x, int64_t index, int file,
                                  int64_t *first) {
    const fsdpi_ck_out *o = fsdpi_ck_out_at(x, index);
    const int64_t rows = o->ndim ? o->shape[0] : 1;
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
        const fsdp_safetensors_entry *from = fsdpi_ck_entry_of_out(x, o);
        e->name = o->name;
        e->dtype = from->dtype == FSDP_SAFETENSORS_OTHER ? from->dtype : o->dtype;
        e->file_dtype = from->file_dtype;
        e->ndim = o->ndim;
        memcpy(e->whole, o->shape, sizeof e->whole);
        memcpy(e->shape, e->whole, sizeof e->shape);
        if (e->ndim) e->start[0] = first, e->shape[0] = rows;
    }
    return num;
}

/* -------------------------------------------------------------------------------------------- */
// Files.

static void fsdpi_ck_file_name(const fsdpi_ck_export *x, int file, char out[FSDPI_CK_LEAF]) {
    if (x->sharded) fsdpi_ck_shard_name(out, file);
    else if (x->num_files == 1) snprintf(out, FSDPI_CK_LEAF, "%s", x->name);
    else
        snprintf(out, FSDPI_CK_LEAF, "%.*s-%05d-of-%05d.safetensors",
                 (int)(strlen(x->name) - strlen(".safetensors")), x->name, file + 1,
                 (int)x->num_files);
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
        status = fsdpi_ck_want_out(x, fsdpi_ck_out_of(x, e->name), start, shape,
                                   (char *)x->data.ptr + *used);
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

// Writes the index, model.safetensors.index.json, as huggingface_hub and transformers print it:
// sorted by name.
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
    char leaf[FSDPI_CK_LEAF];
    snprintf(leaf, sizeof leaf, "%s.index.json", x->name);
    return fsdpi_ck_write_text(x, leaf, p.used);
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

/* -------------------------------------------------------------------------------------------- */
// The other files of `like`.

enum { FSDPI_CK_COPY_DEPTH = 4 }; // levels of directories in `like`

typedef struct fsdpi_ck_copying {
    fsdpi_ck_export *x;
    int depth; // of the directory whose names are copied
    char from[FSDP_CHECKPOINT_PATH], to[FSDP_CHECKPOINT_PATH];
} fsdpi_ck_copying;

// Returns 1 for a name that is not copied: a hidden file, an index, a manifest, or weights in
// the format of any program.
static int fsdpi_ck_is_left_out(const char *name) {
    static const char *const weights[] = {
        ".safetensors", ".bin",  ".pt",        ".pth", ".ckpt", ".gguf", ".ggml",   ".h5",
        ".msgpack",     ".onnx", ".onnx_data", ".npz", ".npy",  ".ot",   ".tflite", ".distcp"};
    const size_t n = strlen(name);
    if (name[0] == '.' || !strcmp(name, "manifest.json")) return 1;
    if (strstr(name, ".index.") && n > 5 && !strcmp(name + n - 5, ".json")) return 1;
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) {
        const size_t k = strlen(weights[i]);
        if (n > k && !strcmp(name + n - k, weights[i])) return 1;
    }
    return 0;
}

static void fsdpi_ck_copy_file(fsdpi_ck_copying *c) {
    fsdpi_ck_disk *d = &c->x->in->disk;
    void *from = NULL, *to = NULL, *data = c->x->data.ptr;
    int64_t nbytes = 0, ignored = 0;
    if (!fsdpi_ck_open(d, c->from, 0, &from, &nbytes))
        (void)fsdpi_ck_open(d, c->to, 1, &to, &ignored);
    for (int64_t at = 0, n; at < nbytes && !d->status; at += n) {
        n = fsdpi_ck_less(nbytes - at, FSDPI_CK_PIECE);
        if (!fsdpi_ck_read(d, from, c->from, data, n, at))
            (void)fsdpi_ck_write(d, to, c->to, data, n, at);
    }
    if (!d->status) (void)fsdpi_ck_sync(d, to, c->to);
    (void)fsdpi_ck_close(d, to, c->to);
    (void)fsdpi_ck_close(d, from, c->from);
}

// Returns the caller's file of that name, or NULL.
static const fsdp_checkpoint_text *fsdpi_ck_text_of(const fsdpi_ck_export *x, const char *name) {
    for (int i = 0; i < x->desc.num_texts; i++)
        if (!strcmp(x->desc.texts[i].name, name)) return &x->desc.texts[i];
    return NULL;
}

// Copies a file, or what is in a directory. Its name is added to both paths meanwhile.
static int fsdpi_ck_copy_name(void *arg, const char *name) {
    fsdpi_ck_copying *c = (fsdpi_ck_copying *)arg;
    fsdpi_ck_disk *d = &c->x->in->disk;
    const size_t from = strlen(c->from), to = strlen(c->to), n = strlen(name);
    if (fsdpi_ck_is_left_out(name)) return 0;
    if (fsdpi_ck_begin(d, "list", c->from)) return 1; // without a caller there are no texts
    if (!c->depth && fsdpi_ck_text_of(c->x, name)) return 0;
    if (from + n + 2 > sizeof c->from || to + n + 2 > sizeof c->to) {
        (void)fsdpi_ck_fault(d, FSDP_ERR_INVALID_ARG, "%s/%s: the path is too long", c->from, name);
        return 1;
    }
    snprintf(c->from + from, sizeof c->from - from, "/%s", name);
    snprintf(c->to + to, sizeof c->to - to, "/%s", name);
    (void)fsdpi_ck_begin(d, "list", c->from);
    const int error = d->ops->list(d->user, c->from, fsdpi_ck_stop_at_once, NULL);
    if (error == ENOTDIR) {
        fsdpi_ck_copy_file(c);
    } else if (fsdpi_ck_end(d, error, c->from) == FSDP_OK && c->depth < FSDPI_CK_COPY_DEPTH) {
        c->depth++;
        if (!fsdpi_ck_begin(d, "mkdir", c->to))
            (void)fsdpi_ck_end(d, d->ops->make_dir(d->user, c->to), c->to);
        if (!fsdpi_ck_begin(d, "list", c->from))
            (void)fsdpi_ck_end(d, d->ops->list(d->user, c->from, fsdpi_ck_copy_name, c), c->from);
        if (d->ops->remove(d->user, c->to, 1)) // it is not empty
            (void)fsdpi_ck_sync_dir(d, c->to);
        c->depth--;
    }
    c->from[from] = c->to[to] = 0;
    return d->status != FSDP_OK;
}

static fsdp_status fsdpi_ck_copy_others(fsdpi_ck_export *x) {
    fsdpi_ck_disk *d = &x->in->disk;
    fsdpi_ck_copying c;
    c.x = x, c.depth = 0;
    snprintf(c.from, sizeof c.from, "%s", x->desc.like);
    snprintf(c.to, sizeof c.to, "%s", x->tmp);
    fsdpi_ck_forget(d);
    if (!fsdpi_ck_begin(d, "list", c.from))
        (void)fsdpi_ck_end(d, d->ops->list(d->user, c.from, fsdpi_ck_copy_name, &c), c.from);
    return fsdpi_ck_disk_status(&x->in->io);
}

static fsdp_status fsdpi_ck_write_texts(fsdpi_ck_export *x) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < x->desc.num_texts && !status; i++) {
        const fsdp_checkpoint_text *t = &x->desc.texts[i];
        status = fsdpi_ck_reserve(NULL, &x->text, t->nbytes, 0);
        if (status) return status;
        if (t->nbytes) memcpy(x->text.ptr, t->data, (size_t)t->nbytes);
        status = fsdpi_ck_write_text(x, t->name, t->nbytes);
    }
    return status;
}

static fsdp_status fsdpi_ck_export_all(fsdpi_ck_export *x, const char *out) {
    fsdp_status status = fsdpi_ck_export_paths(x, out);
    if (!status) status = fsdpi_ck_plan_export(x);
    if (!status) status = fsdpi_ck_make_export(x);
    if (status) return status;
    for (int32_t i = 0; i < x->num_files && !status; i++) status = fsdpi_ck_write_one(x, i);
    if (!status && x->sharded) status = fsdpi_ck_write_manifest(x);
    else if (!status && x->num_files > 1) status = fsdpi_ck_write_index(x);
    if (!status && x->like && !x->like->opened.is_file) status = fsdpi_ck_copy_others(x);
    if (!status) status = fsdpi_ck_write_texts(x);
    if (!status) status = fsdpi_ck_publish(x);
    if (status) (void)fsdpi_ck_remove_dir(&x->in->disk, x->tmp); // after a rename it is gone
    return status;
}

static int fsdpi_ck_good_texts(const fsdp_checkpoint_export_desc *desc) {
    if (desc->num_texts < 0 || (desc->num_texts && !desc->texts)) return 0;
    for (int i = 0; i < desc->num_texts; i++) {
        const fsdp_checkpoint_text *t = &desc->texts[i];
        if (!t->name || !fsdpi_ck_is_plain(t->name, "") || strlen(t->name) > 64) return 0;
        if (fsdpi_ck_is_left_out(t->name) || t->nbytes < 0 || (t->nbytes && !t->data)) return 0;
    }
    return 1;
}

// Returns the first field that is wrong, and its rule. NULL: there is none.
static const char *fsdpi_ck_wrong_field(const fsdp_checkpoint_export_desc *d) {
    const int of_whole = d->ema || d->source || d->like || d->file_name || d->num_texts;
    if (d->num_ranks < 0 || d->num_ranks > FSDPI_CK_MOST_FILES)
        return "num_ranks: expected 0 to 1000000";
    if (d->num_ranks && (of_whole || d->like_dtypes))
        return "num_ranks: expected 0 with ema, source, like, file_name, texts or like_dtypes";
    if (d->max_file_bytes < 0) return "max_file_bytes: expected 0 or more";
    if (d->dtype != FSDP_DTYPE_KEEP && !fsdp_dtype_is_float(d->dtype))
        return "dtype: expected KEEP or a floating one";
    if (d->file_name && (!fsdpi_ck_is_leaf(d->file_name) || strlen(d->file_name) > 64))
        return "file_name: expected NULL or NAME.safetensors with at most 64 letters, digits, "
               "'.', '_' and '-'";
    if (!fsdpi_ck_good_texts(d))
        return "texts: expected names with at most 64 letters, digits, '.', '_' and '-' that are "
               "none of weights, and their bytes";
    if (d->files && (d->files->version != 1 || d->files->size != sizeof(fsdp_file_ops)))
        return "files: expected NULL or operations of version 1";
    return NULL;
}

static fsdp_status fsdpi_ck_check_export(const fsdp_checkpoint_export_desc *desc,
                                         fsdp_checkpoint_export_desc *own, const char *call,
                                         const char *out, char *text, size_t cap) {
    fsdp_status status = fsdp_desc_read(NULL, own, desc, sizeof *own,
                                        "fsdp_checkpoint_export_desc");
    if (status && text && cap) snprintf(text, cap, "%s", fsdp_last_error(NULL));
    if (status) return status;
    if (!fsdpi_ck_good_path(out)) return fsdpi_ck_refused(call, "out", text, cap);
    if (own->like && !fsdpi_ck_good_path(own->like))
        return fsdpi_ck_refused(call, "like", text, cap);
    const char *wrong = fsdpi_ck_wrong_field(own);
    if (wrong && text && cap)
        snprintf(text, cap, "[E463] %s: %s: zero the desc, then set what you need", call, wrong);
    return wrong ? FSDP_ERR_INVALID_ARG : FSDP_OK;
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
    x->name = own.file_name ? own.file_name : "model.safetensors";
    x->sharded = own.num_ranks > 0;
    status = fsdpi_ck_open_alone(call, path, own.files, own.files_user, &x->in, text, cap);
    if (!status && own.like)
        status = fsdpi_ck_open_alone(call, own.like, own.files, own.files_user, &x->like, text,
                                     cap);
    if (!status) status = fsdpi_ck_no_memory(fsdpi_ck_export_all(x, out), text, cap);
    if (!status && x->note[0] && !fsdpi_ck_text_of(x, "config.json") && text && cap)
        snprintf(text, cap,
                 "[E493] %s: tensors with another dtype than in %.400s: %s: choose dtype (fsdpck: "
                 "--dtype), or correct the dtype in config.json",
                 call, own.like, x->note);
    fsdpi_ck_buffer *rooms[] = {&x->pieces, &x->outs,  &x->names, &x->entries, &x->header,
                                &x->data,   &x->sizes, &x->crcs,  &x->text};
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) fsdpi_ck_free(NULL, rooms[i]);
    fsdp_checkpoint_close(x->in);
    fsdp_checkpoint_close(x->like);
    free(room);
    return status;
}

#endif // FSDPI_CHECKPOINT_EXPORT_H
