/* checkpoint/tile.h - do the boxes of all files tile every tensor?

   Checks coverage before a save is committed and before a load reads. It finds holes, overlaps, and
   boxes that disagree about their tensor.
   Callers: reader.h (fsdpi_ck_whole), load.h (fsdpi_ck_volume), read.h (fsdpi_ck_same_box) and
     others.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_TILE_H
#define FSDPI_CHECKPOINT_TILE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// A box of a tensor in one of the files.
typedef struct fsdpi_ck_box {
    const fsdp_safetensors_entry *entry;
    int32_t file;
} fsdpi_ck_box;

static int fsdpi_ck_by_box(const void *a, const void *b) {
    const fsdp_safetensors_entry *x = ((const fsdpi_ck_box *)a)->entry;
    const fsdp_safetensors_entry *y = ((const fsdpi_ck_box *)b)->entry;
    int order = strcmp(x->name, y->name);
    int dims = x->ndim < FSDP_MAX_DIMS ? x->ndim : FSDP_MAX_DIMS;
    for (int d = 0; !order && d < dims && x->ndim == y->ndim; d++)
        order = x->start[d] < y->start[d] ? -1 : x->start[d] > y->start[d];
    if (!order)
        order = ((const fsdpi_ck_box *)a)->file < ((const fsdpi_ck_box *)b)->file
                    ? -1
                    : ((const fsdpi_ck_box *)a)->file > ((const fsdpi_ck_box *)b)->file;
    return order;
}

static int64_t fsdpi_ck_volume(int ndim, const int64_t *shape) {
    int64_t n = 1;
    for (int d = 0; d < ndim; d++) n *= shape[d];
    return n;
}
static int fsdpi_ck_same_box(const fsdp_safetensors_entry *x, const fsdp_safetensors_entry *y) {
    size_t bytes = (size_t)x->ndim * sizeof(int64_t);
    return !memcmp(x->start, y->start, bytes) && !memcmp(x->shape, y->shape, bytes);
}
static int fsdpi_ck_meet_boxes(const fsdp_safetensors_entry *x, const fsdp_safetensors_entry *y) {
    for (int d = 0; d < x->ndim; d++)
        if (x->start[d] >= y->start[d] + y->shape[d] || y->start[d] >= x->start[d] + x->shape[d])
            return 0;
    return 1;
}

// Returns the first dim in which starts differ. Sorted boxes ascend in this dim.
static int fsdpi_ck_sweep_dim(const fsdpi_ck_box *boxes, int count) {
    const fsdp_safetensors_entry *first = boxes[0].entry, *last = boxes[count - 1].entry;
    int d = 0;
    while (d + 1 < first->ndim && first->start[d] == last->start[d]) d++;
    return d;
}

/* Computes the shape of the whole tensor: from the files, or from the end of the last box. */
static void fsdpi_ck_whole(const fsdpi_ck_box *boxes, int count, int64_t *whole) {
    int ndim = boxes[0].entry->ndim;
    for (int d = 0; d < ndim; d++) whole[d] = 0;
    for (int i = 0; i < count; i++)
        for (int d = 0; d < ndim; d++) {
            const fsdp_safetensors_entry *e = boxes[i].entry;
            int64_t end = e->whole[d] > 0 ? e->whole[d] : e->start[d] + e->shape[d];
            if (end > whole[d]) whole[d] = end;
        }
}

typedef struct fsdpi_ck_tiling {
    const char *const *files; // names, for texts
    int allow_twice;          // 1: a box that two files hold counts once (files of other programs)
    char why[1024];
} fsdpi_ck_tiling;

static fsdp_status fsdpi_ck_overlap(fsdpi_ck_tiling *t, const fsdpi_ck_box *a,
                                    const fsdpi_ck_box *b, int dim) {
    snprintf(t->why, sizeof t->why, "tensor '%s': %s and %s both hold row %lld of dim %d: %s",
             a->entry->name, t->files[a->file], t->files[b->file],
             (long long)(a->entry->start[dim] > b->entry->start[dim] ? a->entry->start[dim]
                                                                     : b->entry->start[dim]),
             dim,
             t->allow_twice ? "are they of one save? Keep the files that are meant"
                            : "give desc.place. If tensor parallelism cuts the tensor, it says "
                              "where each part begins in the whole (fsdp_tp_view); if ranks hold "
                              "copies, it tells replicas apart");
    return FSDP_ERR_CORRUPT;
}

// Checks that the boxes of one tensor, sorted by start, tile it. Empty boxes do not count.
static fsdp_status fsdpi_ck_tile_one(fsdpi_ck_tiling *t, const fsdpi_ck_box *boxes, int count) {
    const fsdp_safetensors_entry *first = boxes[0].entry;
    int64_t whole[FSDP_MAX_DIMS], volume = 0;
    if (first->ndim > FSDP_MAX_DIMS) return FSDP_OK; // no call can read such a tensor
    for (int i = 1; i < count; i++)
        if (boxes[i].entry->ndim != first->ndim ||
            boxes[i].entry->file_dtype != first->file_dtype ||
            memcmp(boxes[i].entry->whole, first->whole, (size_t)first->ndim * sizeof *whole) != 0) {
            snprintf(t->why, sizeof t->why,
                     "tensor '%s' has another dtype, rank or whole shape in %s than in %s%s",
                     first->name, t->files[boxes[i].file], t->files[boxes[0].file],
                     t->allow_twice ? ""
                                    : ": if tensor parallelism cuts it, desc.place gives the whole "
                                      "shape (fsdp_tp_view)");
            return FSDP_ERR_CORRUPT;
        }
    fsdpi_ck_whole(boxes, count, whole);
    int dim = fsdpi_ck_sweep_dim(boxes, count);
    for (int i = 0; i < count; i++) {
        const fsdp_safetensors_entry *x = boxes[i].entry;
        int64_t mine = fsdpi_ck_volume(x->ndim, x->shape);
        int twice = 0;
        for (int k = i + 1; k < count && mine && !twice; k++) {
            const fsdp_safetensors_entry *y = boxes[k].entry;
            if (first->ndim && y->start[dim] >= x->start[dim] + x->shape[dim]) break;
            if (!fsdpi_ck_volume(y->ndim, y->shape) || !fsdpi_ck_meet_boxes(x, y)) continue;
            if (!t->allow_twice || !fsdpi_ck_same_box(x, y))
                return fsdpi_ck_overlap(t, &boxes[i], &boxes[k], dim);
            twice = 1;
        }
        volume += twice ? 0 : mine;
    }
    if (volume == fsdpi_ck_volume(first->ndim, whole)) return FSDP_OK;
    snprintf(t->why, sizeof t->why,
             "tensor '%s': its boxes hold %lld of %lld elements, so some rows are in no file",
             first->name, (long long)volume, (long long)fsdpi_ck_volume(first->ndim, whole));
    return FSDP_ERR_CORRUPT;
}

/* Sorts all boxes by name and start, and checks each tensor. On CORRUPT `why` holds the reason. */
static fsdp_status fsdpi_ck_tile(fsdpi_ck_tiling *t, fsdpi_ck_box *boxes, int count) {
    fsdp_status status = FSDP_OK;
    qsort(boxes, (size_t)count, sizeof *boxes, fsdpi_ck_by_box);
    for (int i = 0, end; i < count && !status; i = end) {
        for (end = i + 1; end < count; end++)
            if (strcmp(boxes[end].entry->name, boxes[i].entry->name) != 0) break;
        status = fsdpi_ck_tile_one(t, boxes + i, end - i);
    }
    return status;
}

#endif // FSDPI_CHECKPOINT_TILE_H
