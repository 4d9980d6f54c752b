/* checkpoint/export_plan.h - what an export writes: each new tensor, and where its rows come from

   Callers: export.h (fsdpi_ck_plan_export) and tools/fsdpck.c (fsdpi_ck_next_box).

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_EXPORT_PLAN_H
#define FSDPI_CHECKPOINT_EXPORT_PLAN_H

#include "files.h"
#include "manifest.h"
#include "objects.h"
#include "open.h"
#include "read.h"
#include "reader.h"
#include "table.h"
#include "tile.h"
#include "../safetensors/box.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Makes the list of new tensors, and compares it with the directory desc.like. A new tensor is made
// of pieces: rows of tensors of the old checkpoint, one under the other. Without desc.source it is
// one piece, an old tensor as a whole.

enum { FSDPI_CK_EMBEDDINGS = 16 }; // more embeddings of a model are not tied to anything

typedef struct fsdpi_ck_piece {
    const char *name;  // of the new tensor
    int64_t name_at;   // its offset in `names`; -1: the old tensor has this name
    int64_t tensor;    // index of the old tensor, or of its average
    int64_t row, rows; // rows of the old tensor
    int64_t first;     // where they begin in the new tensor, before it is transposed
    fsdp_dtype dtype;  // dtype as which elements are moved
    int32_t transpose;
} fsdpi_ck_piece;

// A tensor of the new directory.
typedef struct fsdpi_ck_out {
    const char *name;
    int64_t piece, num_pieces; // index of its first piece
    int64_t nbytes;            // in the new file
    int64_t shape[FSDP_MAX_DIMS];
    fsdp_dtype dtype; // dtype as which elements are moved
    int32_t ndim, transpose, file;
} fsdpi_ck_out;

typedef struct fsdpi_ck_export {
    fsdp_checkpoint_reader *in, *like; // like: NULL without desc.like
    fsdp_checkpoint_export_desc desc;
    const char *call;
    fsdpi_ck_buffer pieces, outs, names, entries, header, data, sizes, crcs, text;
    int64_t num_pieces, num_outs, num_averages, num_crcs, total_bytes, step;
    int32_t num_files;
    int sharded;                             // 1: boxes, a manifest
    void *file;                              // the file that is written
    int64_t embeddings[FSDPI_CK_EMBEDDINGS]; // indices of new tensors that others may be tied to
    int num_embeddings;
    const char *name; // of the file, if there is one
    char out[FSDP_CHECKPOINT_PATH], parent[FSDP_CHECKPOINT_PATH], tmp[FSDP_CHECKPOINT_PATH];
    char path[FSDP_CHECKPOINT_PATH]; // path of that file
    char note[512];                  // tensors with another dtype than in `like`, or ""
} fsdpi_ck_export;

static fsdpi_ck_piece *fsdpi_ck_piece_at(const fsdpi_ck_export *x, int64_t index) {
    return (fsdpi_ck_piece *)x->pieces.ptr + index;
}
static int fsdpi_ck_by_piece(const void *a, const void *b) {
    const fsdpi_ck_piece *x = (const fsdpi_ck_piece *)a, *y = (const fsdpi_ck_piece *)b;
    int order = strcmp(x->name, y->name);
    if (!order) order = x->first < y->first ? -1 : x->first > y->first;
    return order ? order : x->tensor < y->tensor ? -1 : x->tensor > y->tensor;
}
static fsdpi_ck_out *fsdpi_ck_out_at(const fsdpi_ck_export *x, int64_t index) {
    return (fsdpi_ck_out *)x->outs.ptr + index;
}
static int fsdpi_ck_by_out(const void *a, const void *b) {
    return strcmp(((const fsdpi_ck_out *)a)->name, ((const fsdpi_ck_out *)b)->name);
}
static const fsdpi_ck_out *fsdpi_ck_out_of(const fsdpi_ck_export *x, const char *name) {
    fsdpi_ck_out key;
    memset(&key, 0, sizeof key);
    key.name = name;
    return (const fsdpi_ck_out *)bsearch(&key, x->outs.ptr, (size_t)x->num_outs, sizeof key,
                                         fsdpi_ck_by_out);
}
static const fsdp_safetensors_entry *fsdpi_ck_entry_of_out(const fsdpi_ck_export *x,
                                                           const fsdpi_ck_out *o) {
    return fsdpi_ck_entry_of(x->in, fsdpi_ck_piece_at(x, o->piece)->tensor);
}

/* -------------------------------------------------------------------------------------------- */
// Pieces.

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

// Asks desc.source or desc.rename for the new names of a tensor. Returns their number.
static int fsdpi_ck_new_names(const fsdpi_ck_export *x, int64_t index,
                              fsdp_checkpoint_source s[FSDP_CHECKPOINT_SOURCES]) {
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(x->in, index);
    fsdp_param_view v = FSDP_ZERO;
    if (!x->desc.source || fsdpi_ck_is_reserved(e->name))
        return !x->desc.rename || x->desc.rename(x->desc.user, e->name, s[0].name);
    v.name = e->name, v.unit_name = "";
    v.dtype = v.grad_dtype = e->dtype;
    v.ordinal = v.index = -1;
    v.ndim = (int32_t)fsdpi_ck_less(e->ndim, FSDP_MAX_DIMS);
    memcpy(v.shape, fsdpi_ck_whole_at(x->in, index)->shape, sizeof v.shape);
    memcpy(v.local_shape, v.shape, sizeof v.shape);
    v.numel = fsdpi_ck_volume(v.ndim, v.shape);
    snprintf(s[0].name, sizeof s[0].name, "%s", e->name);
    return x->desc.source(x->desc.user, &v, s);
}

// Returns the rows of a source without a number in the tensor of `like`, or 0.
static int64_t fsdpi_ck_rows_there(const fsdpi_ck_export *x, const fsdp_checkpoint_source *s) {
    const int64_t there = x->like ? fsdpi_ck_index_of(x->like, s->name) : -1;
    if (there < 0) return 0;
    return fsdpi_ck_whole_at(x->like, there)->shape[s->transpose != 0] - s->first;
}

// Sets the rows of each source: together they are all rows of the tensor.
static fsdp_status fsdpi_ck_settle_pieces(const fsdpi_ck_export *x, int64_t index,
                                          fsdp_checkpoint_source *s, int num) {
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(x->in, index);
    const int64_t all = e->ndim ? fsdpi_ck_whole_at(x->in, index)->shape[0] : 1;
    int64_t sum = 0, rows = 0;
    int untold = 0;
    int good = num >= 0 && num <= FSDP_CHECKPOINT_SOURCES;
    for (int i = 0; i < num && good; i++) {
        s[i].name[FSDP_CHECKPOINT_NAME - 1] = 0;
        good = s[i].rows >= 0 && s[i].rows <= all - rows && s[i].first >= 0 &&
               s[i].first <= FSDPI_ST_MOST;
        untold += !s[i].rows;
        rows += s[i].rows;
    }
    for (int i = 0; i < num && good; i++) {
        if (!s[i].rows) s[i].rows = untold == 1 ? all - rows : fsdpi_ck_rows_there(x, &s[i]);
        good = (s[i].rows > 0 || !all) && s[i].rows <= all - sum;
        sum += s[i].rows;
    }
    if (good && (!num || sum == all)) return FSDP_OK;
    return fsdpi_ck_fail(&x->in->io, FSDP_ERR_INVALID_ARG,
                         "[E484] %s: source takes '%.300s' apart into %d tensors, whose rows are "
                         "not its %lld: expected at most %d tensors with all rows: set `rows` of "
                         "each, or `like` (fsdpck: --like), which tells them",
                         x->call, e->name, num, (long long)all, FSDP_CHECKPOINT_SOURCES);
}

// Returns the dtype of a floating tensor in the new files.
static fsdp_dtype fsdpi_ck_dtype_of(const fsdpi_ck_export *x, const fsdp_safetensors_entry *e,
                                    const char *name) {
    const int64_t there = x->like && x->desc.like_dtypes ? fsdpi_ck_index_of(x->like, name) : -1;
    if (there >= 0 && fsdp_dtype_is_float(fsdpi_ck_entry_of(x->like, there)->dtype))
        return fsdpi_ck_entry_of(x->like, there)->dtype;
    return x->desc.dtype != FSDP_DTYPE_KEEP ? x->desc.dtype : e->dtype;
}

// Adds the pieces of one old tensor. A tensor that desc leaves out has none.
static fsdp_status fsdpi_ck_add_pieces(fsdpi_ck_export *x, int64_t index) {
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(x->in, index);
    const int state = fsdpi_ck_is_reserved(e->name), named = x->desc.rename || x->desc.source;
    const int64_t size = (int64_t)sizeof(fsdpi_ck_piece), room = FSDP_CHECKPOINT_NAME;
    fsdp_checkpoint_source s[FSDP_CHECKPOINT_SOURCES];
    if (state && !x->desc.with_optimizer && !x->sharded) return FSDP_OK;
    memset(s, 0, sizeof s);
    const int num = fsdpi_ck_new_names(x, index, s);
    int64_t tensor = index, row = 0;
    if (!num) return FSDP_OK;
    fsdp_status status = fsdpi_ck_readable(x->in, index);
    if (!status) status = fsdpi_ck_settle_pieces(x, index, s, num);
    if (!status && x->desc.ema) status = fsdpi_ck_average_of(x, index, &tensor);
    for (int i = 0; i < num && !status; i++, row += s[i - 1].rows) {
        const int64_t at = x->num_pieces;
        status = fsdpi_ck_reserve(NULL, &x->pieces, (at + 1) * size, at * size);
        if (!status && named)
            status = fsdpi_ck_reserve(NULL, &x->names, (at + 1) * room, at * room);
        if (status) return status;
        fsdpi_ck_piece *p = fsdpi_ck_piece_at(x, x->num_pieces++);
        memset(p, 0, sizeof *p);
        const char *name = e->name;
        p->name = name, p->name_at = -1;
        if (x->desc.rename || (x->desc.source && !state)) {
            name = s[i].name;
            p->name_at = at * room;
            memcpy((char *)x->names.ptr + p->name_at, name, (size_t)room);
        }
        p->tensor = tensor;
        p->row = row, p->rows = s[i].rows, p->first = s[i].first;
        p->transpose = s[i].transpose != 0;
        p->dtype = !state && fsdp_dtype_is_float(e->dtype) ? fsdpi_ck_dtype_of(x, e, name)
                                                           : fsdpi_ck_carrier(e);
    }
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Tensors.

// Returns 1 if piece q continues a tensor that begins with p and has `rows` rows so far.
static int fsdpi_ck_continues(const fsdpi_ck_export *x, const fsdpi_ck_piece *p,
                              const fsdpi_ck_piece *q, int64_t rows) {
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(x->in, p->tensor);
    const fsdp_safetensors_entry *f = fsdpi_ck_entry_of(x->in, q->tensor);
    const int other = e->dtype == FSDP_SAFETENSORS_OTHER || f->dtype == FSDP_SAFETENSORS_OTHER;
    int same = q->first == rows && e->ndim == f->ndim && (f->ndim || p == q) &&
               p->dtype == q->dtype && (!other || e->file_dtype == f->file_dtype) &&
               p->transpose == q->transpose && (!q->transpose || f->ndim == 2);
    for (int d = 1; d < e->ndim && same; d++)
        same = fsdpi_ck_whole_at(x->in, p->tensor)->shape[d] ==
               fsdpi_ck_whole_at(x->in, q->tensor)->shape[d];
    return same;
}

// Makes a new tensor of pieces with one name, in the order of their rows.
static fsdp_status fsdpi_ck_join_pieces(fsdpi_ck_export *x, int64_t piece, int64_t count) {
    const fsdpi_ck_piece *p = fsdpi_ck_piece_at(x, piece);
    fsdpi_ck_out *o = fsdpi_ck_out_at(x, x->num_outs++);
    int64_t rows = 0;
    if (count > 1 && !x->desc.source)
        return fsdpi_ck_fail(&x->in->io, FSDP_ERR_INVALID_ARG,
                             "[E465] %s: two tensors become '%.300s': let rename give one of them "
                             "another name",
                             x->call, p->name);
    for (int64_t k = 0; k < count; rows += p[k++].rows)
        if (!fsdpi_ck_continues(x, p, &p[k], rows))
            return fsdpi_ck_fail(&x->in->io, FSDP_ERR_INVALID_ARG,
                                 "[E486] %s: '%.200s' gives rows %lld..%lld of '%.200s'%s, "
                                 "expected row %lld next, with the dtype, the columns and the "
                                 "transposition of the first piece: correct source (fsdpck: "
                                 "--rename, --transpose), or let it return 0 for a copy",
                                 x->call, fsdpi_ck_entry_of(x->in, p[k].tensor)->name,
                                 (long long)p[k].first, (long long)(p[k].first + p[k].rows),
                                 p->name, p[k].transpose ? ", transposed" : "", (long long)rows);
    memset(o, 0, sizeof *o);
    o->name = p->name;
    o->piece = piece, o->num_pieces = count;
    o->dtype = p->dtype;
    o->transpose = p->transpose;
    o->ndim = fsdpi_ck_entry_of(x->in, p->tensor)->ndim;
    memcpy(o->shape, fsdpi_ck_whole_at(x->in, p->tensor)->shape, sizeof o->shape);
    if (o->ndim) o->shape[0] = rows;
    if (o->transpose) o->shape[0] = o->shape[1], o->shape[1] = rows;
    o->nbytes = fsdpi_ck_volume(o->ndim, o->shape) * (int64_t)fsdp_dtype_size(o->dtype);
    return FSDP_OK;
}

static fsdp_status fsdpi_ck_make_outs(fsdpi_ck_export *x) {
    const int64_t most = x->num_pieces + (x->like ? x->like->num_tensors : 0) + 1;
    fsdp_status status = fsdpi_ck_reserve(NULL, &x->outs, most * (int64_t)sizeof(fsdpi_ck_out), 0);
    for (int64_t i = 0; i < x->num_pieces; i++) // names no longer move
        if (fsdpi_ck_piece_at(x, i)->name_at >= 0)
            fsdpi_ck_piece_at(x, i)->name = (char *)x->names.ptr + fsdpi_ck_piece_at(x, i)->name_at;
    if (x->num_pieces)
        qsort(x->pieces.ptr, (size_t)x->num_pieces, sizeof(fsdpi_ck_piece), fsdpi_ck_by_piece);
    for (int64_t i = 0, end; i < x->num_pieces && !status; i = end) {
        for (end = i + 1; end < x->num_pieces; end++)
            if (strcmp(fsdpi_ck_piece_at(x, end)->name, fsdpi_ck_piece_at(x, i)->name) != 0) break;
        status = fsdpi_ck_join_pieces(x, i, end - i);
    }
    return status;
}

/* Adds a box of a new tensor to the list of wanted boxes. */
static fsdp_status fsdpi_ck_want_out(fsdpi_ck_export *x, const fsdpi_ck_out *o,
                                     const int64_t *start, const int64_t *shape, char *to) {
    const int axis = o->transpose; // the dim in which pieces follow one another
    const int64_t size = (int64_t)fsdp_dtype_size(o->dtype);
    fsdp_status status = FSDP_OK;
    for (int64_t i = o->piece; i < o->piece + o->num_pieces && !status; i++) {
        const fsdpi_ck_piece *p = fsdpi_ck_piece_at(x, i);
        int64_t at[FSDP_MAX_DIMS] = {0}, n[FSDP_MAX_DIMS] = {0}, offset = 0, pitch = 0;
        for (int d = 0; d < o->ndim; d++) at[d] = start[d], n[d] = shape[d];
        if (o->ndim) {
            const int64_t begin = start[axis] > p->first ? start[axis] : p->first;
            n[axis] = fsdpi_ck_less(start[axis] + shape[axis], p->first + p->rows) - begin;
            if (n[axis] <= 0) continue;
            at[axis] = begin - p->first + p->row;
            offset = (begin - start[axis]) * fsdpi_ck_volume(o->ndim - 1 - axis, shape + axis + 1);
        }
        if (o->transpose) {
            const int64_t row = at[0], rows = n[0];
            at[0] = at[1], n[0] = n[1];
            at[1] = row, n[1] = rows;
            pitch = shape[1];
        }
        status = fsdpi_ck_want_box(x->in, p->tensor, at, n, o->dtype, pitch, to + offset * size);
    }
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// The directory that the new one must be like.

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

// Sets *same to 1 if two matrices of a checkpoint have the same shape, dtype and bytes.
static fsdp_status fsdpi_ck_same_values(fsdpi_ck_export *x, fsdp_checkpoint_reader *r, int64_t a,
                                        int64_t b, int *same) {
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(r, a), *f = fsdpi_ck_entry_of(r, b);
    const int64_t *shape = fsdpi_ck_whole_at(r, a)->shape;
    const fsdp_dtype dtype = fsdpi_ck_carrier(e);
    char *data = (char *)x->data.ptr, *other = data + FSDPI_CK_PIECE / 2;
    int64_t start[FSDP_MAX_DIMS], box[FSDP_MAX_DIMS], n;
    fsdp_status status = FSDP_OK;
    *same = e->ndim == 2 && f->ndim == 2 && e->file_dtype == f->file_dtype &&
            dtype != FSDP_DTYPE_KEEP &&
            memcmp(shape, fsdpi_ck_whole_at(r, b)->shape, 2 * sizeof *shape) == 0;
    for (int64_t at = 0; *same && at < shape[0] * shape[1] && !status; at += n) {
        const int64_t size = (int64_t)fsdp_dtype_size(dtype);
        n = fsdpi_ck_next_box(2, shape, at, FSDPI_CK_PIECE / 2 / size, start, box);
        status = fsdpi_ck_want_box(r, a, start, box, dtype, 0, data);
        if (!status) status = fsdpi_ck_want_box(r, b, start, box, dtype, 0, other);
        if (!status) status = fsdpi_ck_read_all(&r->reader);
        *same = !status && memcmp(data, other, (size_t)(n * size)) == 0;
    }
    return status;
}

// Returns the old tensor that a new one is a copy of, or -1.
static int64_t fsdpi_ck_copy_of(const fsdpi_ck_export *x, const fsdpi_ck_out *o) {
    const fsdpi_ck_piece *p = fsdpi_ck_piece_at(x, o->piece);
    return o->num_pieces == 1 && !o->transpose &&
                   p->rows == fsdpi_ck_whole_at(x->in, p->tensor)->shape[0]
               ? p->tensor
               : -1;
}

/* Sets *tied to the embedding that a matrix is tied to, or to NULL. The matrix is tensor `index` of
   `r`, one of the two checkpoints, and has the bytes that the embedding has there. */
static fsdp_status fsdpi_ck_tied_to(fsdpi_ck_export *x, fsdp_checkpoint_reader *r, int64_t index,
                                    const fsdpi_ck_out **tied) {
    fsdp_status status = FSDP_OK;
    int same = 0;
    *tied = NULL;
    for (int i = 0; i < x->num_embeddings && index >= 0 && !status; i++) {
        const fsdpi_ck_out *o = fsdpi_ck_out_at(x, x->embeddings[i]);
        const int64_t other = r == x->like ? fsdpi_ck_index_of(r, o->name) : fsdpi_ck_copy_of(x, o);
        if (other < 0) continue;
        status = fsdpi_ck_same_values(x, r, index, other, &same);
        if (same) *tied = o;
        if (same) break;
    }
    return status;
}

// Fails if a new tensor has another shape than in `like`. Notes another dtype.
static fsdp_status fsdpi_ck_compare_one(fsdpi_ck_export *x, const fsdpi_ck_out *o, int64_t there,
                                        int *num_dtypes) {
    const fsdp_safetensors_entry *e = fsdpi_ck_entry_of(x->like, there);
    const fsdp_safetensors_entry *from = fsdpi_ck_entry_of_out(x, o);
    const int64_t *shape = fsdpi_ck_whole_at(x->like, there)->shape;
    const fsdp_dtype dtype = from->dtype == FSDP_SAFETENSORS_OTHER ? from->dtype : o->dtype;
    char a[160], b[160];
    if (e->dtype != dtype || (dtype == FSDP_SAFETENSORS_OTHER && e->file_dtype != from->file_dtype))
        fsdpi_ck_name_some(x->note, sizeof x->note, ++*num_dtypes, o->name);
    if (e->ndim == o->ndim && !memcmp(shape, o->shape, (size_t)o->ndim * sizeof *shape))
        return FSDP_OK;
    fsdpi_ck_shape_text(a, sizeof a, e->dtype, e->ndim, shape);
    fsdpi_ck_shape_text(b, sizeof b, dtype, o->ndim, o->shape);
    return fsdpi_ck_fail(&x->in->io, FSDP_ERR_INVALID_ARG,
                         "[E491] %s: '%.300s' is %s in %.400s, and would be %s: correct source "
                         "(fsdpck: --rename, --transpose), or choose the directory of this model",
                         x->call, o->name, a, x->like->path, b);
}

/* Compares the new tensors with those of `like`. A matrix that one side lacks, and that is tied to
   an embedding on the other side, is written or left out as in `like`. */
static fsdp_status fsdpi_ck_compare_like(fsdpi_ck_export *x) {
    char missing[420] = "", extra[420] = "";
    int64_t num = x->num_outs, kept = 0;
    int num_missing = 0, num_extra = 0, num_dtypes = 0;
    const fsdpi_ck_out *tied;
    fsdp_status status = FSDP_OK;
    for (int64_t i = 0; i < x->num_outs && x->num_embeddings < FSDPI_CK_EMBEDDINGS; i++)
        if (fsdpi_ck_is_embedding(fsdpi_ck_out_at(x, i)->name) &&
            fsdpi_ck_index_of(x->like, fsdpi_ck_out_at(x, i)->name) >= 0)
            x->embeddings[x->num_embeddings++] = i;
    for (int64_t i = 0; i < x->like->num_tensors && !status; i++) {
        const char *name = fsdpi_ck_entry_of(x->like, i)->name;
        const fsdpi_ck_out *o = fsdpi_ck_out_of(x, name);
        if (o) {
            status = fsdpi_ck_compare_one(x, o, i, &num_dtypes);
            continue;
        }
        if (fsdpi_ck_is_reserved(name) ||
            (x->desc.may_lack && x->desc.may_lack(x->desc.user, name)))
            continue;
        status = fsdpi_ck_tied_to(x, x->like, i, &tied);
        if (tied) {
            *fsdpi_ck_out_at(x, num) = *tied;
            fsdpi_ck_out_at(x, num++)->name = name;
        } else {
            fsdpi_ck_name_some(missing, sizeof missing, ++num_missing, name);
        }
    }
    for (int64_t i = 0; i < num && !status; i++) {
        const fsdpi_ck_out *o = fsdpi_ck_out_at(x, i);
        int is_extra = !fsdpi_ck_is_reserved(o->name) && fsdpi_ck_index_of(x->like, o->name) < 0;
        tied = NULL;
        if (is_extra) status = fsdpi_ck_tied_to(x, x->in, fsdpi_ck_copy_of(x, o), &tied);
        if (is_extra && !tied) fsdpi_ck_name_some(extra, sizeof extra, ++num_extra, o->name);
        fsdpi_ck_out_at(x, i)->file = tied ? -1 : 0; // -1: it is left out
    }
    if (status) return status;
    if (num_missing || num_extra)
        return fsdpi_ck_fail(&x->in->io, FSDP_ERR_INVALID_ARG,
                             "[E490] %s: compared with %.400s, %d tensors are missing%s%s, and %d "
                             "are extra%s%s: correct their names by rename or source (fsdpck: "
                             "--rename, --prefix), or leave them out (may_lack; fsdpck: --skip)",
                             x->call, x->like->path, num_missing, num_missing ? ": " : "", missing,
                             num_extra, num_extra ? ": " : "", extra);
    for (int64_t i = 0; i < num; i++)
        if (!fsdpi_ck_out_at(x, i)->file) *fsdpi_ck_out_at(x, kept++) = *fsdpi_ck_out_at(x, i);
    x->num_outs = kept;
    qsort(x->outs.ptr, (size_t)kept, sizeof(fsdpi_ck_out), fsdpi_ck_by_out);
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// The plan.

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
    fsdp_status status = fsdpi_ck_reserve(NULL, &x->data, FSDPI_CK_PIECE, 0);
    for (int64_t i = 0; i < x->in->num_tensors && !status; i++) status = fsdpi_ck_add_pieces(x, i);
    if (!status) status = fsdpi_ck_make_outs(x);
    if (!status && x->like) status = fsdpi_ck_compare_like(x);
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
    for (int64_t i = 0; i < x->num_outs; i++) x->total_bytes += fsdpi_ck_out_at(x, i)->nbytes;
    if (!x->sharded) fsdpi_ck_split(x);
    else x->num_files = x->desc.num_ranks;
    status = fsdpi_ck_reserve(NULL, &x->entries,
                              x->num_outs * (int64_t)sizeof(fsdp_safetensors_entry), 0);
    if (status) return status;
    return fsdpi_ck_reserve(NULL, &x->sizes, 3 * (int64_t)x->num_files * (int64_t)sizeof(int64_t),
                            0);
}

#endif // FSDPI_CHECKPOINT_EXPORT_PLAN_H
