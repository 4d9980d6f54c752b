/* checkpoint/open.h - what is at a path: files, tensors, boxes

   From a path to a sorted list of boxes. One process reads headers into one block of bytes. All
   ranks get that block, and make equal lists from it. Checkpoints of this library, those of PyTorch
   and models of Hugging Face differ only in the source of the file names.
   Callers: api.h (fsdpi_ck_opened_end), reader.h (fsdpi_ck_fail), load.h (fsdpi_ck_boxes_of) and
     others.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_OPEN_H
#define FSDPI_CHECKPOINT_OPEN_H

#include "files.h"
#include "manifest.h"
#include "rounds.h"
#include "objects.h"
#include "tile.h"
#include "worker.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------------------------------- */
// File calls as jobs.

static void fsdpi_ck_try_open(void *arg) {
    fsdpi_ck_open_job *j = (fsdpi_ck_open_job *)arg;
    if (fsdpi_ck_open(j->disk, j->path, 0, &j->file, &j->nbytes)) {
        j->error = j->disk->error;
        if (j->error == ENOENT || j->error == EISDIR || j->error == EINVAL || j->error == ENOTDIR ||
            j->error == ELOOP)
            fsdpi_ck_forget(j->disk);
    }
}
static void fsdpi_ck_read_bytes(void *arg) {
    fsdpi_ck_read_job *j = (fsdpi_ck_read_job *)arg;
    (void)fsdpi_ck_read(j->disk, j->file, j->path, j->to, j->nbytes, j->at);
}
static void fsdpi_ck_close_file(void *arg) {
    fsdpi_ck_open_job *j = (fsdpi_ck_open_job *)arg;
    (void)fsdpi_ck_close(j->disk, j->file, j->path);
    if (j->quiet) fsdpi_ck_forget(j->disk);
}

// Notes names in a directory that is no checkpoint, for the error text: checkpoints in it, of this
// library or of other trainers, or files of torch.save.
static void fsdpi_ck_note_inside(fsdpi_ck_list_job *j, const char *name) {
    static const char *const begins[] = {"step-", "step_", "checkpoint-"};
    static const char *const ends[] = {".bin", ".pt", ".pth"};
    for (int i = 0; i < 3; i++)
        if (strlen(name) < sizeof j->pickle && fsdpi_ck_is_plain(name, ends[i]))
            snprintf(j->pickle, sizeof j->pickle, "%s", name);
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(begins[i]);
        char *end;
        if (strncmp(name, begins[i], n) != 0 || name[n] < '0' || name[n] > '9') continue;
        int64_t step = strtoll(name + n, &end, 10);
        if (*end || strlen(name) >= sizeof j->inside || step <= j->newest) continue;
        j->newest = step;
        snprintf(j->inside, sizeof j->inside, "%s", name);
    }
}
static int fsdpi_ck_note_leaf(void *arg, const char *name) {
    fsdpi_ck_list_job *j = (fsdpi_ck_list_job *)arg;
    int64_t n = (int64_t)strlen(name) + 1;
    if (strcmp(name, "manifest.json") == 0) j->has_manifest = 1;
    fsdpi_ck_note_inside(j, name);
    if (!fsdpi_ck_is_leaf(name) && !fsdpi_ck_index_stem(name)) return 0;
    if (j->used + n <= j->cap) memcpy(j->to + j->used, name, (size_t)n);
    j->used += n;
    j->num++;
    return 0;
}
static void fsdpi_ck_list_leaves(void *arg) {
    fsdpi_ck_list_job *j = (fsdpi_ck_list_job *)arg;
    j->used = j->num = j->has_manifest = 0;
    j->newest = -1;
    j->pickle[0] = 0;
    if (fsdpi_ck_begin(j->disk, "list", j->path)) return;
    (void)fsdpi_ck_end(j->disk, j->disk->ops->list(j->disk->user, j->path, fsdpi_ck_note_leaf, j),
                       j->path);
}

// Reports a failure: of the world or, without a world, in the caller's text and in no log.
FSDP_PRINTF(3, 4)
static fsdp_status fsdpi_ck_fail(fsdpi_ck_io *io, fsdp_status status, const char *format, ...) {
    char text[FSDP_CHECKPOINT_PATH + 512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (io->ck) return fsdp_fail(io->world, status, "%s", text);
    if (io->cap) snprintf(io->text, io->cap, "%s", text);
    return status;
}
// Returns the disk's failure as that of a call without a worker.
static fsdp_status fsdpi_ck_disk_status(fsdpi_ck_io *io) {
    return io->disk->status
               ? fsdpi_ck_fail(io, io->disk->status, "[E434] %s: %s", io->call, io->disk->text)
               : FSDP_OK;
}
static fsdp_status fsdpi_ck_do(fsdpi_ck_io *io, fsdpi_ck_job job, void *arg) {
    if (io->ck) return fsdpi_ck_run(io->ck, io->call, job, arg);
    fsdpi_ck_forget(io->disk);
    job(arg);
    return fsdpi_ck_disk_status(io);
}
static fsdp_status fsdpi_ck_broken(fsdpi_ck_io *io, fsdp_status status, const char *name,
                                   const char *why) {
    return fsdpi_ck_fail(io, status, "[E435] %s: %s: %s", io->call, name, why);
}

// Fails because of a file in the directory io->dir; NULL: `name` is its path.
static fsdp_status fsdpi_ck_broken_file(fsdpi_ck_io *io, fsdp_status status, const char *name,
                                        const char *why) {
    char path[FSDP_CHECKPOINT_PATH];
    if (io->dir && fsdpi_ck_join(path, io->dir, name)) name = path;
    return fsdpi_ck_broken(io, status, name, why);
}

// Frees memory, unless a hung worker may still use it: in that case it stays until the process
// ends.
static void fsdpi_ck_drop(fsdpi_ck_io *io, fsdpi_ck_buffer *room) {
    if (!io->ck || !io->ck->hung) fsdpi_ck_free(io->model, room);
}

// Opens `path` for the jobs that follow. Sets open.error if there is no such file.
static fsdp_status fsdpi_ck_open_path(fsdpi_ck_io *io, const char *path) {
    memset(&io->open, 0, sizeof io->open);
    if (path != io->path) snprintf(io->path, sizeof io->path, "%s", path);
    io->open.disk = io->read.disk = io->disk;
    io->open.path = io->read.path = io->path;
    return fsdpi_ck_do(io, fsdpi_ck_try_open, &io->open);
}
static fsdp_status fsdpi_ck_read_path(fsdpi_ck_io *io, void *to, int64_t nbytes) {
    io->read.file = io->open.file;
    io->read.to = to, io->read.at = 0, io->read.nbytes = nbytes;
    return fsdpi_ck_do(io, fsdpi_ck_read_bytes, &io->read);
}
// Closes the file. Returns `status` if it is a failure, otherwise the result of closing.
static fsdp_status fsdpi_ck_close_path(fsdpi_ck_io *io, fsdp_status status) {
    if (io->ck && io->ck->hung) return status;
    io->open.quiet = status != 0; // keeps the text of the first failure
    fsdp_status closed = fsdpi_ck_do(io, fsdpi_ck_close_file, &io->open);
    return status ? status : closed;
}

/* -------------------------------------------------------------------------------------------- */
// The block of bytes. Each piece is its number of bytes (-1: no such piece), followed by the bytes,
// padded to 8. Pieces: 1 if the path is a file, not a directory; the manifest; the index, and its
// name; then, per data file, its name, its size as 8 bytes, and its header with the 8 bytes before
// it.

typedef struct fsdpi_ck_headers {
    fsdpi_ck_buffer room;
    int64_t used;
} fsdpi_ck_headers;

// Appends a piece. data NULL: its bytes come later. Sets *where to their address.
static fsdp_status fsdpi_ck_put(fsdpi_ck_io *io, fsdpi_ck_headers *b, const void *data,
                                int64_t nbytes, char **where) {
    int64_t padded = nbytes < 0 ? 0 : (nbytes + 7) / 8 * 8;
    fsdp_status status = fsdpi_ck_reserve(io->model, &b->room, b->used + 8 + padded, b->used);
    if (status) return status;
    char *to = (char *)b->room.ptr + b->used;
    memcpy(to, &nbytes, 8);
    memset(to + 8, 0, (size_t)padded);
    if (data && nbytes > 0) memcpy(to + 8, data, (size_t)nbytes);
    if (where) *where = to + 8;
    b->used += 8 + padded;
    return FSDP_OK;
}
// Returns the number of bytes in the next piece, and sets *where to them.
static int64_t fsdpi_ck_take(const fsdpi_ck_headers *b, int64_t *at, const char **where) {
    int64_t nbytes = 0;
    if (*at + 8 > b->used) return -1;
    memcpy(&nbytes, (const char *)b->room.ptr + *at, 8);
    *where = (const char *)b->room.ptr + *at + 8;
    *at += 8 + (nbytes < 0 ? 0 : (nbytes + 7) / 8 * 8);
    return nbytes;
}

// Appends a complete file as a piece. Sets *there to 0 if the file does not exist. Fails if the
// name is not that of a file: a checkpoint must not seem to lack a manifest.
static fsdp_status fsdpi_ck_fetch_text(fsdpi_ck_io *io, fsdpi_ck_headers *b, const char *dir,
                                       const char *leaf, int *there) {
    char path[FSDP_CHECKPOINT_PATH], *to = NULL;
    *there = 0;
    if (!fsdpi_ck_join(path, dir, leaf))
        return fsdpi_ck_broken(io, FSDP_ERR_INVALID_ARG, dir, "the path is too long");
    fsdp_status status = fsdpi_ck_open_path(io, path);
    if (status) return status;
    if (io->open.error == ENOENT || io->open.error == ENOTDIR)
        return fsdpi_ck_put(io, b, NULL, -1, NULL);
    if (io->open.error)
        return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path,
                               io->open.error == ELOOP ? strerror(ELOOP) : "it is no regular file");
    *there = 1;
    if (io->open.nbytes > FSDPI_CK_MOST_TEXT)
        status = fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path, "it has more than 64 MiB");
    if (!status) status = fsdpi_ck_put(io, b, NULL, io->open.nbytes, &to);
    if (!status) status = fsdpi_ck_read_path(io, to, io->open.nbytes);
    return fsdpi_ck_close_path(io, status);
}

// Appends the header of a data file: three pieces.
static fsdp_status fsdpi_ck_fetch_header(fsdpi_ck_io *io, fsdpi_ck_headers *b, const char *path,
                                         const char *leaf) {
    char why[256] = "", *to = NULL;
    int64_t n = 0;
    fsdp_status status = fsdpi_ck_open_path(io, path);
    if (status) return status;
    int64_t bytes = io->open.nbytes;
    if (io->open.error)
        return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path, strerror(io->open.error));
    status = fsdpi_ck_put(io, b, leaf, (int64_t)strlen(leaf) + 1, NULL);
    if (!status) status = fsdpi_ck_put(io, b, &bytes, 8, NULL);
    if (!status) status = fsdpi_ck_put(io, b, NULL, 8, &to); // extended to the header later
    if (!status && bytes >= 8) status = fsdpi_ck_read_path(io, to, 8);
    if (!status && fsdp_safetensors_header_bytes(to, bytes, &n, why, sizeof why))
        status = fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path, why);
    if (!status && b->used + n > INT64_C(1) << 30)
        status = fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path,
                                 "with its header all headers have more than 1 GiB");
    b->used -= 16;
    if (!status) status = fsdpi_ck_put(io, b, NULL, 8 + n, &to);
    if (!status) status = fsdpi_ck_read_path(io, to, 8 + n);
    return fsdpi_ck_close_path(io, status);
}

// Names of data files, distinct and sorted, one after another in `text`.
typedef struct fsdpi_ck_leaves {
    fsdpi_ck_buffer text, list;
    int64_t num;
    const char *index[2]; // the first two names of indices in a directory
    int num_indices;
} fsdpi_ck_leaves;
static int fsdpi_ck_by_text(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}
static int fsdpi_ck_has_leaf(const fsdpi_ck_leaves *l, const char *leaf) {
    return l->num &&
           bsearch((const void *)&leaf, l->list.ptr, (size_t)l->num, sizeof leaf, fsdpi_ck_by_text);
}

// Notes the name of an index. model.safetensors.index.json comes first, so that it is the one that
// counts.
static void fsdpi_ck_note_index(fsdpi_ck_leaves *l, const char *name) {
    int first = strcmp(name, "model.safetensors.index.json") == 0;
    if (first) l->index[1] = l->index[0];
    if (first || l->num_indices < 2) l->index[first ? 0 : l->num_indices] = name;
    l->num_indices++;
}
static fsdp_status fsdpi_ck_leaves_of_dir(fsdpi_ck_io *io, const char *path, fsdpi_ck_leaves *l) {
    fsdpi_ck_list_job *j = &io->list;
    fsdp_status status = FSDP_OK;
    snprintf(io->path, sizeof io->path, "%s", path);
    j->disk = io->disk, j->path = io->path;
    do { // the first pass measures; the directory may grow before the second
        j->to = (char *)l->text.ptr, j->cap = l->text.cap;
        status = fsdpi_ck_do(io, fsdpi_ck_list_leaves, j);
        if (!status && j->used > j->cap) status = fsdpi_ck_reserve(io->model, &l->text, j->used, 0);
    } while (!status && j->used > j->cap);
    if (!status)
        status = fsdpi_ck_reserve(io->model, &l->list, (j->num + 1) * (int64_t)sizeof(char *), 0);
    if (status) return status;
    const char **list = (const char **)l->list.ptr, *at = (const char *)l->text.ptr;
    for (int64_t i = 0; i < j->num; i++, at += strlen(at) + 1)
        if (fsdpi_ck_index_stem(at)) fsdpi_ck_note_index(l, at);
        else list[l->num++] = at;
    qsort((void *)list, (size_t)l->num, sizeof *list, fsdpi_ck_by_text);
    return FSDP_OK;
}

// Reads the manifest or the index in the piece `text`: one pass measures, a second one reads.
static fsdp_status fsdpi_ck_get_manifest(fsdpi_ck_io *io, const char *text, int64_t nbytes,
                                         fsdpi_ck_manifest *m, fsdpi_ck_buffer *room) {
    char why[256] = "";
    memset(m, 0, sizeof *m);
    fsdp_status status = fsdpi_ck_parse_manifest(m, text, nbytes, why, sizeof why);
    if (!status) {
        int64_t files = m->num_files * (int64_t)sizeof(fsdpi_ck_file), crcs = m->num_crcs * 4;
        status = fsdpi_ck_reserve(io->model, room, files + crcs + m->text_bytes + 1, 0);
        if (status) return status;
        m->files = (fsdpi_ck_file *)room->ptr;
        m->crcs = (uint32_t *)(void *)((char *)room->ptr + files);
        m->text = (char *)room->ptr + files + crcs;
        status = fsdpi_ck_parse_manifest(m, text, nbytes, why, sizeof why);
    }
    return status ? fsdpi_ck_broken_file(io, status, "manifest.json", why) : FSDP_OK;
}
static fsdp_status fsdpi_ck_get_index(fsdpi_ck_io *io, const char *name, const char *text,
                                      int64_t nbytes, fsdpi_ck_index *x, fsdpi_ck_buffer *room) {
    char why[256] = "";
    memset(x, 0, sizeof *x);
    fsdp_status status = fsdpi_ck_parse_index(x, text, nbytes, why, sizeof why);
    if (!status) {
        int64_t list = (x->num + 1) * (int64_t)sizeof(fsdpi_ck_where);
        status = fsdpi_ck_reserve(io->model, room, list + x->text_bytes + 1, 0);
        if (status) return status;
        x->list = (fsdpi_ck_where *)room->ptr;
        x->text = (char *)room->ptr + list;
        status = fsdpi_ck_parse_index(x, text, nbytes, why, sizeof why);
    }
    return status ? fsdpi_ck_broken_file(io, status, name, why) : FSDP_OK;
}

// Lists the data files in a manifest or an index. index: its name; NULL: a manifest.
static fsdp_status fsdpi_ck_told_leaves(fsdpi_ck_io *io, const char *text, int64_t nbytes,
                                        const char *index, fsdpi_ck_leaves *l) {
    fsdpi_ck_manifest m;
    fsdpi_ck_index x;
    fsdp_status status = index ? fsdpi_ck_get_index(io, index, text, nbytes, &x, &l->text)
                               : fsdpi_ck_get_manifest(io, text, nbytes, &m, &l->text);
    if (status) return status;
    int64_t num = index ? x.num : m.num_files;
    status = fsdpi_ck_reserve(io->model, &l->list, (num + 1) * (int64_t)sizeof(char *), 0);
    if (status) return status;
    const char **list = (const char **)l->list.ptr;
    for (int64_t i = 0; i < num; i++) list[i] = index ? x.list[i].leaf : m.files[i].name;
    qsort((void *)list, (size_t)num, sizeof *list, fsdpi_ck_by_text);
    l->num = 0;
    for (int64_t i = 0; i < num; i++)
        if (!i || strcmp(list[l->num - 1], list[i]) != 0) list[l->num++] = list[i];
    return FSDP_OK;
}

// Returns the part of a path after its last slash.
static const char *fsdpi_ck_last_part(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// A name with the number of files that belong together: model-00002-of-00003.safetensors.
typedef struct fsdpi_ck_shard {
    const char *name, *rest;    // rest: the text after the second number
    int64_t before, number, of; // before: bytes before the first number
    int32_t digits, own;        // digits: length of the first number; own: bytes of "shard-00001-",
} fsdpi_ck_shard;               // which each rank of PyTorch writes

// Reads digits at `text`. Returns how many there are; 0: none, or too many.
static int fsdpi_ck_digits(const char *text, int64_t *number) {
    int n = 0;
    for (*number = 0; n < 10 && text[n] >= '0' && text[n] <= '9'; n++)
        *number = 10 * *number + (text[n] - '0');
    return n < 10 ? n : 0;
}
static int fsdpi_ck_is_shard(const char *name, fsdpi_ck_shard *out) {
    const char *of = NULL, *first;
    int64_t ignored;
    memset(out, 0, sizeof *out);
    for (const char *at = name; (at = strstr(at, "-of-")) != NULL; at++) of = at;
    if (!of) return 0;
    first = of;
    while (first > name && first[-1] >= '0' && first[-1] <= '9') first--;
    out->name = name;
    out->before = first - name;
    out->digits = fsdpi_ck_digits(first, &out->number);
    int second = fsdpi_ck_digits(of + 4, &out->of);
    out->rest = of + 4 + second;
    int own = strncmp(name, "shard-", 6) == 0 ? fsdpi_ck_digits(name + 6, &ignored) : 0;
    if (own && name[6 + own] == '-' && out->before > 6 + own) out->own = 7 + own;
    return out->digits && first + out->digits == of && second && out->number <= out->of;
}
static int fsdpi_ck_by_set(const void *a, const void *b) { // by set, then by number
    const fsdpi_ck_shard *x = (const fsdpi_ck_shard *)a, *y = (const fsdpi_ck_shard *)b;
    int64_t n = x->before - x->own, k = y->before - y->own;
    int order = strncmp(x->name + x->own, y->name + y->own, (size_t)fsdpi_ck_less(n, k));
    if (!order) order = n < k ? -1 : n > k;
    if (!order) order = strcmp(x->rest, y->rest);
    if (!order) order = x->of < y->of ? -1 : x->of > y->of;
    return order;
}
static int fsdpi_ck_by_shard(const void *a, const void *b) {
    const fsdpi_ck_shard *x = (const fsdpi_ck_shard *)a, *y = (const fsdpi_ck_shard *)b;
    int order = fsdpi_ck_by_set(a, b);
    return order ? order : x->number < y->number ? -1 : x->number > y->number;
}

// Fails if names give the number of files that belong together, and one of these is missing.
static fsdp_status fsdpi_ck_check_shards(fsdpi_ck_io *io, const char *path,
                                         const fsdpi_ck_leaves *l) {
    fsdpi_ck_buffer room = {NULL, 0};
    char why[700];
    int64_t num = 0, first = 0, next = 0;
    int last = 1;
    fsdp_status status = fsdpi_ck_reserve(io->model, &room,
                                          (l->num + 1) * (int64_t)sizeof(fsdpi_ck_shard), 0);
    if (status) return status;
    fsdpi_ck_shard *list = (fsdpi_ck_shard *)room.ptr;
    for (int64_t i = 0; i < l->num; i++)
        num += fsdpi_ck_is_shard(((const char *const *)l->list.ptr)[i], &list[num]);
    if (num) qsort(list, (size_t)num, sizeof *list, fsdpi_ck_by_shard);
    for (int64_t i = 0; i < num && !status; i++) {
        if (last) next = first = list[i].number > 0; // a set is numbered from 1 or from 0
        last = i + 1 == num || fsdpi_ck_by_set(&list[i], &list[i + 1]) != 0;
        int lacks = list[i].number > next;
        if (list[i].number == next) next++;
        lacks = lacks || (last && next < first + list[i].of);
        if (lacks) {
            snprintf(
                why, sizeof why,
                "it lacks %.*s%0*lld%s: its names tell of %lld files: add it, or pass one file "
                "as the path",
                (int)list[i].before, list[i].name, list[i].digits, (long long)next,
                list[i].name + list[i].before + list[i].digits, (long long)list[i].of);
            status = fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path, why);
        }
    }
    fsdpi_ck_free(io->model, &room);
    return status;
}

// Checks the index, which decides which files are read. Fails if a file with the index's base name
// is next to it, which other programs would read. told: the files that the index names. single:
// receives the name of the only file to read.
static fsdp_status fsdpi_ck_check_index(fsdpi_ck_io *io, const char *path, const fsdpi_ck_leaves *l,
                                        const fsdpi_ck_leaves *told, char single[256]) {
    const char *index = l->index[0], *lacks = NULL;
    char why[900];
    int there = 0;
    snprintf(single, 256, "%.*s", (int)fsdpi_ck_index_stem(index), index);
    for (int64_t i = 0; i < told->num; i++) {
        const char *leaf = ((const char *const *)told->list.ptr)[i];
        if (fsdpi_ck_has_leaf(l, leaf)) there++;
        else if (!lacks) lacks = leaf;
    }
    const int beside = fsdpi_ck_has_leaf(l, single) && !fsdpi_ck_has_leaf(told, single);
    if (beside && !there) return FSDP_OK; // the files of the index are gone
    if (beside)
        snprintf(why, sizeof why,
                 "it has %.250s and %.250s, which names other files: one of the two is of another "
                 "save: remove it",
                 single, index);
    else if (l->num_indices > 1 && strcmp(index, "model.safetensors.index.json") != 0)
        snprintf(why, sizeof why,
                 "it has %d indices, among them %.250s and %.250s: put the files of one of them "
                 "into a directory of their own",
                 l->num_indices, index, l->index[1]);
    else if (lacks) snprintf(why, sizeof why, "it lacks %.250s, which %.250s names", lacks, index);
    else why[0] = 0;
    single[0] = 0;
    return why[0] ? fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path, why) : FSDP_OK;
}

// Reports a path without data files and manifest: the text says what is there.
static fsdp_status fsdpi_ck_no_checkpoint(fsdpi_ck_io *io, const char *path, fsdpi_ck_headers *b) {
    char why[400];
    int pickled = 0;
    int64_t used = b->used;
    if (io->list.newest >= 0) {
        snprintf(why, sizeof why,
                 "it is no checkpoint, but has some in it: pass one of them, for example "
                 "%s/%.64s (fsdp_checkpoint_find gives the newest one of ours)",
                 fsdpi_ck_last_part(path), io->list.inside);
        return fsdpi_ck_broken(io, FSDP_ERR_INVALID_ARG, path, why);
    }
    fsdp_status status = fsdpi_ck_fetch_text(io, b, path, ".metadata", &pickled);
    b->used = used;
    if (status) return status;
    if (!pickled && io->list.pickle[0]) {
        snprintf(why, sizeof why,
                 "it has %.64s and no .safetensors file: if torch.save has written it, write its "
                 "tensors with safetensors.torch.save_file",
                 io->list.pickle);
        return fsdpi_ck_broken(io, FSDP_ERR_UNSUPPORTED, path, why);
    }
    return pickled ? fsdpi_ck_broken(io, FSDP_ERR_UNSUPPORTED, path,
                                     "a checkpoint of PyTorch in pickled form: save it with "
                                     "HuggingFaceStorageWriter(save_distributed=True)")
                   : fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path,
                                     "it has no manifest.json and no .safetensors file: is it a "
                                     "checkpoint?");
}

// Reads a directory that another program wrote. Appends two pieces to b, the index and its name
// (-1: there is none), and lists the data files in `told`.
static fsdp_status fsdpi_ck_fetch_others(fsdpi_ck_io *io, const char *path, fsdpi_ck_headers *b,
                                         fsdpi_ck_leaves *l, fsdpi_ck_leaves *told) {
    char single[256] = "";
    const char *text = NULL;
    const int64_t index_at = b->used;
    int there = 0;
    fsdp_status status = fsdpi_ck_leaves_of_dir(io, path, l);
    if (!status && io->list.has_manifest)
        return fsdpi_ck_broken(io, FSDP_ERR_CORRUPT, path,
                               "there is a manifest.json that cannot be opened: does it point at "
                               "nothing?");
    const char *index = l->num_indices ? l->index[0] : NULL;
    if (!status && index) status = fsdpi_ck_fetch_text(io, b, path, index, &there);
    if (!status && there) {
        int64_t at = index_at, nbytes = fsdpi_ck_take(b, &at, &text);
        status = fsdpi_ck_told_leaves(io, text, nbytes, index, told);
        if (!status) status = fsdpi_ck_check_index(io, path, l, told, single);
        if (!status && !single[0])
            return fsdpi_ck_put(io, b, index, (int64_t)strlen(index) + 1, NULL);
    }
    if (status) return status;
    b->used = index_at; // no index is used
    status = fsdpi_ck_put(io, b, NULL, -1, NULL);
    if (!status) status = fsdpi_ck_put(io, b, NULL, -1, NULL);
    if (!status && !l->num) return fsdpi_ck_no_checkpoint(io, path, b);
    if (!status && !single[0]) status = fsdpi_ck_check_shards(io, path, l);
    const char **list = (const char **)l->list.ptr;
    for (int64_t i = 0; i < l->num && single[0]; i++)
        if (strcmp(list[i], single) == 0) list[0] = list[i];
    if (single[0]) l->num = 1;
    fsdpi_ck_leaves swapped = *told;
    *told = *l, *l = swapped;
    return status;
}

static fsdp_status fsdpi_ck_fetch_dir(fsdpi_ck_io *io, const char *path, fsdpi_ck_headers *b,
                                      fsdpi_ck_leaves *l, fsdpi_ck_leaves *told) {
    char file[FSDP_CHECKPOINT_PATH];
    const char *text = NULL;
    int manifest = 0;
    int64_t at = b->used;
    io->dir = path;
    fsdp_status status = fsdpi_ck_fetch_text(io, b, path, "manifest.json", &manifest);
    if (!status && manifest) {
        int64_t nbytes = fsdpi_ck_take(b, &at, &text);
        status = fsdpi_ck_told_leaves(io, text, nbytes, NULL, told);
        if (!status) status = fsdpi_ck_put(io, b, NULL, -1, NULL);
        if (!status) status = fsdpi_ck_put(io, b, NULL, -1, NULL);
    } else if (!status) {
        status = fsdpi_ck_fetch_others(io, path, b, l, told);
    }
    for (int64_t i = 0; i < told->num && !status; i++) {
        const char *leaf = ((const char *const *)told->list.ptr)[i];
        if (!fsdpi_ck_join(file, path, leaf))
            return fsdpi_ck_broken(io, FSDP_ERR_INVALID_ARG, path, "the path is too long");
        status = fsdpi_ck_fetch_header(io, b, file, leaf);
    }
    return status;
}

/* Reads all headers of a path, on rank 0 or without a world. */
static fsdp_status fsdpi_ck_fetch(fsdpi_ck_io *io, const char *path, fsdpi_ck_headers *b) {
    fsdpi_ck_leaves l[2]; // names in the directory, and those that are read
    memset(l, 0, sizeof l);
    b->used = 0;
    fsdp_status status = fsdpi_ck_open_path(io, path);
    if (status) return status;
    if (io->open.error == ENOENT || io->open.error == ENOTDIR)
        return fsdpi_ck_broken(io, FSDP_ERR_IO, path, "there is no such file or directory");
    int64_t is_file = !io->open.error;
    if (is_file) status = fsdpi_ck_close_path(io, FSDP_OK);
    if (!status) status = fsdpi_ck_put(io, b, &is_file, 8, NULL);
    if (!status && !is_file) {
        status = fsdpi_ck_fetch_dir(io, path, b, &l[0], &l[1]);
    } else if (!status) {
        for (int i = 0; i < 3 && !status; i++) status = fsdpi_ck_put(io, b, NULL, -1, NULL);
        if (!status) status = fsdpi_ck_fetch_header(io, b, path, fsdpi_ck_last_part(path));
    }
    for (int i = 0; i < 2; i++) fsdpi_ck_drop(io, &l[i].text), fsdpi_ck_drop(io, &l[i].list);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Parsing the block.

typedef struct fsdpi_ck_data_file {
    const char *name;
    int64_t bytes, header; // bytes of the file; 8 + N
    int64_t first, num;    // its entries
    const char *text;      // header, from the first byte of the file
    const uint32_t *crcs;  // NULL: none
} fsdpi_ck_data_file;

typedef struct fsdpi_ck_opened {
    fsdpi_ck_headers bulk;
    fsdpi_ck_buffer told, work; // manifest or index; entries, boxes, parts, names
    int64_t step;             // -1: no manifest
    int64_t world;            // number of ranks that saved it; 0: unknown
    int64_t num_parts, num_boxes, total_bytes;
    fsdpi_ck_data_file *parts;
    fsdp_safetensors_entry *entries;
    fsdpi_ck_box *boxes; // sorted by name and start
    const char *dir;     // the path
    int64_t is_file;     // 1: the path is itself the only file
    int untold;          // 1: files lack the whole shape of a box's tensor, as PyTorch's
} fsdpi_ck_opened;

static void fsdpi_ck_opened_end(fsdpi_ck_io *io, fsdpi_ck_opened *o) {
    fsdpi_ck_drop(io, &o->bulk.room);
    fsdpi_ck_drop(io, &o->told);
    fsdpi_ck_drop(io, &o->work);
}

// Parses the pieces of one data file. Without memory, it measures.
static fsdp_status fsdpi_ck_parse_part(fsdpi_ck_io *io, fsdpi_ck_opened *o, int64_t *at, int pass,
                                       char **text, int64_t *chars) {
    const char *name = "", *size = NULL, *header = NULL;
    char why[256] = "";
    fsdp_safetensors_info info;
    int64_t bytes = 0;
    (void)fsdpi_ck_take(&o->bulk, at, &name);
    (void)fsdpi_ck_take(&o->bulk, at, &size);
    memcpy(&bytes, size, 8);
    int64_t n = fsdpi_ck_take(&o->bulk, at, &header);
    fsdp_status status = fsdp_safetensors_parse(header + 8, n - 8, bytes - n,
                                                pass ? o->entries + o->num_boxes : NULL, *text,
                                                &info, why, sizeof why);
    if (status) return fsdpi_ck_broken_file(io, status, o->is_file ? o->dir : name, why);
    if (pass) {
        fsdpi_ck_data_file *p = &o->parts[o->num_parts];
        memset(p, 0, sizeof *p);
        p->name = name, p->bytes = bytes, p->header = n, p->text = header;
        p->first = o->num_boxes, p->num = info.num_entries;
        *text += info.text_bytes;
        for (int64_t i = 0; i < p->num; i++) {
            const fsdp_safetensors_entry *e = o->entries + o->num_boxes + i;
            o->boxes[o->num_boxes + i].entry = e;
            o->boxes[o->num_boxes + i].file = (int32_t)o->num_parts;
            if (info.has_sharding && e->ndim > 0 && e->shape[0] && !e->whole[0]) o->untold = 1;
        }
    }
    o->total_bytes += bytes - n;
    o->num_parts++;
    o->num_boxes += info.num_entries;
    *chars += info.text_bytes;
    return FSDP_OK;
}

// Checks the files against the manifest, if any: their sizes, headers and ranks must be equal.
static fsdp_status fsdpi_ck_match_manifest(fsdpi_ck_io *io, fsdpi_ck_opened *o, const char *text,
                                           int64_t nbytes) {
    fsdpi_ck_manifest m;
    fsdp_status status = fsdpi_ck_get_manifest(io, text, nbytes, &m, &o->told);
    if (status) return status;
    o->step = m.step;
    o->world = m.world;
    for (int64_t i = 0; i < m.num_files; i++) { // sorted by name in both
        fsdpi_ck_data_file *p = &o->parts[i];
        const fsdpi_ck_file *f = &m.files[i];
        if (p->bytes != f->bytes || p->header != f->header + 8)
            return fsdpi_ck_broken_file(io, FSDP_ERR_CORRUPT, p->name,
                                        p->bytes < f->bytes
                                            ? "the file is cut off: the manifest tells a larger one"
                                            : "its size is not that of the manifest");
        if (fsdp_crc32c(0, p->text, p->header) != f->header_crc)
            return fsdpi_ck_broken_file(io, FSDP_ERR_CORRUPT, p->name,
                                        "its header is not the one that the manifest was written "
                                        "for");
        p->crcs = f->crcs;
    }
    return FSDP_OK;
}

static int fsdpi_ck_by_where(const void *a, const void *b) {
    return strcmp(((const fsdpi_ck_where *)a)->name, ((const fsdpi_ck_where *)b)->name);
}
// Applies the index, if any. It must name every tensor in the files, and each file must contain the
// tensors listed for it. Boxes of a tensor in other files are dropped.
static fsdp_status fsdpi_ck_match_index(fsdpi_ck_io *io, fsdpi_ck_opened *o, const char *name,
                                        const char *text, int64_t nbytes) {
    fsdpi_ck_index x;
    char why[320] = "";
    int64_t kept = 0;
    fsdp_status status = fsdpi_ck_get_index(io, name, text, nbytes, &x, &o->told);
    if (status) return status;
    qsort(x.list, (size_t)x.num, sizeof *x.list, fsdpi_ck_by_where);
    for (int64_t i = 1; i < x.num && !why[0]; i++)
        if (strcmp(x.list[i - 1].name, x.list[i].name) == 0)
            snprintf(why, sizeof why, "it names tensor '%.200s' twice", x.list[i].name);
    for (int64_t k = 0; k < o->num_boxes && !why[0]; k++) {
        fsdpi_ck_where key = {o->boxes[k].entry->name, NULL, 0};
        fsdpi_ck_where *w = (fsdpi_ck_where *)bsearch(&key, x.list, (size_t)x.num, sizeof key,
                                                      fsdpi_ck_by_where);
        if (!w)
            snprintf(why, sizeof why,
                     "tensor '%.200s' is in a file, and the index does not name it", key.name);
        else if (strcmp(w->leaf, o->parts[o->boxes[k].file].name) == 0)
            w->there = 2, o->boxes[kept++] = o->boxes[k];
        else if (!w->there) w->there = 1;
    }
    o->num_boxes = kept;
    for (int64_t i = 0; i < x.num && !why[0]; i++)
        if (x.list[i].there < 2)
            snprintf(why, sizeof why,
                     x.list[i].there ? "tensor '%.200s' is in another file than the index says"
                                     : "it names tensor '%.200s', which is in no file",
                     x.list[i].name);
    return why[0] ? fsdpi_ck_broken_file(io, FSDP_ERR_CORRUPT, name, why) : FSDP_OK;
}

/* Makes and checks files, entries and boxes, on all ranks. */
static fsdp_status fsdpi_ck_parse_headers(fsdpi_ck_io *io, fsdpi_ck_opened *o) {
    const char *manifest = NULL, *index = NULL, *index_name = NULL, *form = NULL;
    int64_t at = 0, chars = 0;
    o->step = -1, o->world = 0, o->untold = 0;
    (void)fsdpi_ck_take(&o->bulk, &at, &form);
    memcpy(&o->is_file, form, 8);
    io->dir = o->is_file ? NULL : o->dir;
    int64_t manifest_bytes = fsdpi_ck_take(&o->bulk, &at, &manifest);
    int64_t index_bytes = fsdpi_ck_take(&o->bulk, &at, &index);
    (void)fsdpi_ck_take(&o->bulk, &at, &index_name);
    const int64_t files_at = at;
    fsdp_status status = FSDP_OK;
    for (int pass = 0; pass < 2 && !status; pass++) {
        int64_t entries = (o->num_boxes + 1) * (int64_t)sizeof *o->entries;
        int64_t boxes = (o->num_boxes + 1) * (int64_t)sizeof *o->boxes;
        int64_t parts = (o->num_parts + 1) * (int64_t)sizeof *o->parts;
        char *text = NULL;
        if (pass)
            status = fsdpi_ck_reserve(io->model, &o->work, entries + boxes + parts + chars + 1, 0);
        if (status) return status;
        if (pass) {
            text = (char *)o->work.ptr;
            o->entries = (fsdp_safetensors_entry *)(void *)text;
            o->boxes = (fsdpi_ck_box *)(void *)(text + entries);
            o->parts = (fsdpi_ck_data_file *)(void *)(text + entries + boxes);
            text += entries + boxes + parts;
        }
        o->num_boxes = o->num_parts = o->total_bytes = chars = 0;
        for (at = files_at; at < o->bulk.used && !status;)
            status = fsdpi_ck_parse_part(io, o, &at, pass, &text, &chars);
    }
    if (!status && manifest_bytes >= 0)
        status = fsdpi_ck_match_manifest(io, o, manifest, manifest_bytes);
    if (!status && index_bytes >= 0)
        status = fsdpi_ck_match_index(io, o, index_name, index, index_bytes);
    if (status) return status;
    fsdpi_ck_buffer names = {NULL, 0};
    status = fsdpi_ck_reserve(io->model, &names, (o->num_parts + 1) * (int64_t)sizeof(char *), 0);
    if (status) return status;
    for (int64_t i = 0; i < o->num_parts; i++) ((const char **)names.ptr)[i] = o->parts[i].name;
    fsdpi_ck_tiling tiling = {(const char *const *)names.ptr, manifest_bytes < 0, ""};
    status = fsdpi_ck_tile(&tiling, o->boxes, (int)o->num_boxes);
    fsdpi_ck_free(io->model, &names);
    return status ? fsdpi_ck_broken(io, status, o->dir, tiling.why) : FSDP_OK;
}

/* Returns the number of a tensor's boxes, and sets *first. 0: there is no such tensor. */
static int64_t fsdpi_ck_boxes_of(const fsdpi_ck_opened *o, const char *name, int64_t *first) {
    int64_t low = 0, high = o->num_boxes;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (strcmp(o->boxes[middle].entry->name, name) < 0) low = middle + 1;
        else high = middle;
    }
    *first = low;
    while (high < o->num_boxes && strcmp(o->boxes[high].entry->name, name) == 0) high++;
    return high - low;
}

#endif // FSDPI_CHECKPOINT_OPEN_H
