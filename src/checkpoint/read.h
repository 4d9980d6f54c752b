/* checkpoint/read.h - bytes of boxes, in the order of the files, checked

   Reads a list of items. An item is the intersection of a box in a file and a box in memory. The
   list is sorted by position in the files: each byte is read once, and each block's checksum is
   compared once.
   Callers: reader.h (fsdpi_ck_carrier), load.h (fsdpi_ck_verify_blocks), export.h
     (fsdpi_ck_carrier) and others.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_READ_H
#define FSDPI_CHECKPOINT_READ_H

#include "files.h"
#include "objects.h"
#include "open.h"
#include "tile.h"
#include "../safetensors/format.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    FSDPI_CK_READS = 256,       // reads in one job of the worker
    FSDPI_CK_RUNS = 4096,       // copies after a job
    FSDPI_CK_SLICE = 512 << 10, // bytes that are read, and then checked while they are in the cache
    FSDPI_CK_SHORT = 4096       // bytes; a shorter run is read together with its neighbours
};

// A box in memory, to be filled from one tensor of the files.
typedef struct fsdpi_ck_want {
    char *to; // its first element
    fsdp_dtype dtype;
    int32_t memory, ndim;
    int64_t pitch; // > 0: a matrix is transposed, with this distance of rows, in elements
    int64_t start[FSDP_MAX_DIMS], shape[FSDP_MAX_DIMS]; // in that tensor, before transposing
} fsdpi_ck_want;

typedef struct fsdpi_ck_item {
    int32_t want, part;
    int64_t box, at; // index of the box; offset of its first run in the file's data, in bytes
} fsdpi_ck_item;

typedef struct fsdpi_ck_read_op { // one read of the worker
    int32_t part;
    int64_t at, nbytes; // offset in the file's data, and length, in bytes
    char *to;
} fsdpi_ck_read_op;

typedef struct fsdpi_ck_copy_op { // a copy after the reads
    const char *from;
    char *to;
    int64_t elements, step; // step: distance of two elements in `to`, in elements
    fsdp_dtype from_dtype, to_dtype;
    int32_t memory;
} fsdpi_ck_copy_op;

typedef struct fsdpi_ck_reader {
    fsdpi_ck_io *io;
    const fsdpi_ck_opened *o;
    fsdpi_ck_buffer wants, items, scratch, block, turn; // turn: elements in the order of `to`
    int32_t num_wants;
    int64_t num_items;
    fsdpi_ck_read_op reads[FSDPI_CK_READS];
    fsdpi_ck_copy_op runs[FSDPI_CK_RUNS];
    int32_t num_reads, num_runs;
    int64_t used; // bytes of scratch in use
    int check;    // 1: compare checksums
    int last;     // 1: this is the last job
    int32_t part; // index of the open file; -1: none
    void *file;
    int64_t next; // next byte of the block whose checksum is being computed; -1: none
    uint32_t crc;
    char path[FSDP_CHECKPOINT_PATH];
    int64_t read_bytes, calls;
} fsdpi_ck_reader;

/* -------------------------------------------------------------------------------------------- */
// The worker's side: it reads, and compares the checksum of each block that it reads from.

static void fsdpi_ck_get(fsdpi_ck_reader *r, char *to, int64_t nbytes, int64_t at) {
    (void)fsdpi_ck_read(r->io->disk, r->file, r->path, to, nbytes,
                        r->o->parts[r->part].header + at);
    r->read_bytes += nbytes;
    r->calls++;
}
static int64_t fsdpi_ck_block_end(const fsdpi_ck_reader *r, int64_t at) {
    const fsdpi_ck_data_file *p = &r->o->parts[r->part];
    int64_t end = (at / FSDPI_CK_BLOCK + 1) * FSDPI_CK_BLOCK;
    return end < p->bytes - p->header ? end : p->bytes - p->header;
}

// Adds the next bytes to the block's checksum. Compares it at the end of the block.
static void fsdpi_ck_check_bytes(fsdpi_ck_reader *r, const char *from, int64_t nbytes) {
    while (nbytes > 0 && !r->io->disk->status) {
        int64_t end = fsdpi_ck_block_end(r, r->next), n = end - r->next;
        if (n > nbytes) n = nbytes;
        if (r->next % FSDPI_CK_BLOCK == 0) r->crc = 0;
        r->crc = fsdp_crc32c(r->crc, from, n);
        from += n, nbytes -= n, r->next += n;
        int64_t block = (r->next - 1) / FSDPI_CK_BLOCK;
        uint32_t expected = r->o->parts[r->part].crcs[block];
        if (r->next == end && r->crc != expected)
            (void)fsdpi_ck_fault(r->io->disk, FSDP_ERR_CORRUPT,
                                 "%s: block %lld (bytes %lld..%lld of the data) has CRC %08x, "
                                 "expected %08x: the file was changed, or the disk fails; try an "
                                 "older checkpoint (max_step of fsdp_checkpoint_find)",
                                 r->path, (long long)block, (long long)(block * FSDPI_CK_BLOCK),
                                 (long long)end, (unsigned)r->crc, (unsigned)expected);
    }
}
// Reads the bytes before `to`, only for the checksum of their block.
static void fsdpi_ck_fill_up(fsdpi_ck_reader *r, int64_t to) {
    if (to <= r->next || r->io->disk->status) return;
    fsdpi_ck_get(r, (char *)r->block.ptr, to - r->next, r->next);
    if (!r->io->disk->status) fsdpi_ck_check_bytes(r, (char *)r->block.ptr, to - r->next);
}
// Reads the rest of the block, for its checksum.
static void fsdpi_ck_end_block(fsdpi_ck_reader *r) {
    if (r->next >= 0 && r->next % FSDPI_CK_BLOCK)
        fsdpi_ck_fill_up(r, fsdpi_ck_block_end(r, r->next - 1));
    r->next = -1;
}

static void fsdpi_ck_leave_part(fsdpi_ck_reader *r) {
    if (r->part < 0) return;
    if (r->check && r->o->parts[r->part].crcs) fsdpi_ck_end_block(r);
    (void)fsdpi_ck_close(r->io->disk, r->file, r->path);
    r->part = -1;
    r->file = NULL;
}
static void fsdpi_ck_enter_part(fsdpi_ck_reader *r, int32_t part) {
    int64_t nbytes = 0;
    const fsdpi_ck_data_file *p = &r->o->parts[part];
    if (part == r->part) return;
    fsdpi_ck_leave_part(r);
    int fits = !r->o->is_file ? fsdpi_ck_join(r->path, r->o->dir, p->name)
                              : snprintf(r->path, sizeof r->path, "%s", r->o->dir) > 0;
    if (!fits || fsdpi_ck_open(r->io->disk, r->path, 0, &r->file, &nbytes)) return;
    r->part = part;
    r->next = -1;
    if (nbytes != p->bytes)
        (void)fsdpi_ck_fault(r->io->disk, FSDP_ERR_CORRUPT,
                             "%s has %lld bytes, %lld before: it "
                             "was changed while it was read",
                             r->path, (long long)nbytes, (long long)p->bytes);
}

static void fsdpi_ck_read_ops(void *arg) {
    fsdpi_ck_reader *r = (fsdpi_ck_reader *)arg;
    for (int i = 0; i < r->num_reads && !r->io->disk->status; i++) {
        const fsdpi_ck_read_op *op = &r->reads[i];
        fsdpi_ck_enter_part(r, op->part);
        if (r->io->disk->status) break;
        int check = r->check && r->o->parts[op->part].crcs;
        if (check) {
            int64_t begin = op->at / FSDPI_CK_BLOCK * FSDPI_CK_BLOCK;
            if (r->next < begin || r->next > op->at) { // not in the current block
                fsdpi_ck_end_block(r);
                r->next = begin;
            }
            fsdpi_ck_fill_up(r, op->at);
        }
        int64_t most = check ? (int64_t)FSDPI_CK_SLICE : op->nbytes;
        for (int64_t at = 0, n; at < op->nbytes && !r->io->disk->status; at += n) {
            n = fsdpi_ck_less(op->nbytes - at, most);
            fsdpi_ck_get(r, op->to + at, n, op->at + at);
            if (check && !r->io->disk->status) fsdpi_ck_check_bytes(r, op->to + at, n);
        }
    }
    if (r->last || r->io->disk->status) fsdpi_ck_leave_part(r);
}

/* -------------------------------------------------------------------------------------------- */
// The caller's side: it derives reads and copies from runs.

// Copies a run's elements from scratch to memory: casts, transposes, or copies to a device.
static fsdp_status fsdpi_ck_copy_run(fsdpi_ck_reader *r, const fsdpi_ck_copy_op *op) {
    int64_t size = (int64_t)fsdp_dtype_size(op->to_dtype);
    int64_t from_size = (int64_t)fsdp_dtype_size(op->from_dtype);
    char *to = op->to;
    if (op->step != 1) {
        for (int64_t i = 0; i < op->elements; i++)
            (void)fsdp_convert(to + i * op->step * size, op->to_dtype, op->from + i * from_size,
                               op->from_dtype, 1);
        return FSDP_OK;
    }
    if (op->memory != FSDP_MEMORY_DEVICE)
        return fsdp_convert(to, op->to_dtype, op->from, op->from_dtype, op->elements);
    const char *from = op->from;
    if (op->to_dtype != op->from_dtype) {
        fsdp_status status = fsdpi_ck_reserve(r->io->model, &r->turn, op->elements * size, 0);
        if (status) return status;
        (void)fsdp_convert(r->turn.ptr, op->to_dtype, from, op->from_dtype, op->elements);
        from = (const char *)r->turn.ptr;
    }
    return fsdp_transfer(r->io->model, to, from, op->elements * size);
}

static fsdp_status fsdpi_ck_flush_reads(fsdpi_ck_reader *r, int last) {
    r->last = last;
    fsdp_status status = r->num_reads || last ? fsdpi_ck_do(r->io, fsdpi_ck_read_ops, r) : FSDP_OK;
    for (int i = 0; i < r->num_runs && !status; i++) status = fsdpi_ck_copy_run(r, &r->runs[i]);
    r->num_reads = r->num_runs = 0;
    r->used = 0;
    return status;
}

// Adds a read straight into memory. Extends the previous read if that one ends at this byte.
static fsdp_status fsdpi_ck_read_straight(fsdpi_ck_reader *r, int32_t part, int64_t at,
                                          int64_t nbytes, char *to) {
    fsdpi_ck_read_op *op = r->num_reads ? &r->reads[r->num_reads - 1] : NULL;
    if (op && op->part == part && op->at + op->nbytes == at && op->to + op->nbytes == to) {
        op->nbytes += nbytes;
        return FSDP_OK;
    }
    fsdp_status status = r->num_reads == FSDPI_CK_READS ? fsdpi_ck_flush_reads(r, 0) : FSDP_OK;
    op = &r->reads[r->num_reads++];
    op->part = part, op->at = at, op->nbytes = nbytes, op->to = to;
    return status;
}

// Adds a read into scratch, and the copy that follows it. Short runs near each other share one read
// if at least a quarter of it is wanted.
static fsdp_status fsdpi_ck_read_run(fsdpi_ck_reader *r, int32_t part, int64_t at,
                                     fsdpi_ck_copy_op run, int64_t *wanted) {
    int64_t nbytes = run.elements * (int64_t)fsdp_dtype_size(run.from_dtype);
    fsdpi_ck_read_op *op = r->num_reads ? &r->reads[r->num_reads - 1] : NULL;
    char *scratch = (char *)r->scratch.ptr;
    int joins = op && *wanted && op->part == part && r->num_runs < FSDPI_CK_RUNS &&
                op->at + op->nbytes <= at && at + nbytes - op->at <= 4 * (*wanted + nbytes) &&
                (at - op->at) % (int64_t)fsdp_dtype_size(run.from_dtype) == 0 && // aligned
                op->to - scratch + (at + nbytes - op->at) <= FSDPI_CK_PIECE;
    if (joins) {
        op->nbytes = at + nbytes - op->at;
        *wanted += nbytes;
    } else {
        r->used = (r->used + 63) / 64 * 64;
        if (r->num_reads == FSDPI_CK_READS || r->num_runs == FSDPI_CK_RUNS ||
            r->used + nbytes > FSDPI_CK_PIECE) {
            fsdp_status status = fsdpi_ck_flush_reads(r, 0);
            if (status) return status;
        }
        op = &r->reads[r->num_reads++];
        op->part = part, op->at = at, op->nbytes = nbytes, op->to = scratch + r->used;
        *wanted = nbytes;
    }
    run.from = op->to + (at - op->at);
    r->used = op->to - scratch + op->nbytes;
    r->runs[r->num_runs++] = run;
    return FSDP_OK;
}

/* Returns the dtype as which a tensor's elements are moved: its own or, if the library does not
   have it, an integer of the same size; 0 if there is none. */
static fsdp_dtype fsdpi_ck_carrier(const fsdp_safetensors_entry *e) {
    static const fsdp_dtype carriers[] = {FSDP_U8, FSDP_I16, FSDP_I32, FSDP_I64};
    if (e->dtype != FSDP_SAFETENSORS_OTHER) return e->dtype;
    for (int i = 0; i < 4; i++)
        if (fsdpi_st_dtypes[e->file_dtype].bits == 8 << i) return carriers[i];
    return FSDP_DTYPE_KEEP;
}

static void fsdpi_ck_overlap_of(const fsdpi_ck_reader *r, const fsdpi_ck_want *w, int64_t box,
                                fsdp_box_overlap *out) {
    const fsdp_safetensors_entry *e = r->o->boxes[box].entry;
    fsdp_box_begin(w->ndim, e->start, e->shape, w->start, w->shape, out);
}

// Adds the reads of all runs of an item.
static fsdp_status fsdpi_ck_read_item(fsdpi_ck_reader *r, const fsdpi_ck_item *item,
                                      int64_t *wanted) {
    const fsdpi_ck_want *w = (const fsdpi_ck_want *)r->wants.ptr + item->want;
    const fsdp_safetensors_entry *e = r->o->boxes[item->box].entry;
    const fsdp_dtype from = fsdpi_ck_carrier(e);
    const int64_t size = (int64_t)fsdp_dtype_size(from);
    const int64_t to_size = (int64_t)fsdp_dtype_size(w->dtype);
    fsdp_status status = FSDP_OK;
    fsdp_box_overlap o;
    fsdpi_ck_overlap_of(r, w, item->box, &o);
    int straight = w->memory != FSDP_MEMORY_DEVICE && w->dtype == from && !w->pitch;
    do {
        int64_t most = FSDPI_CK_PIECE / (size > to_size ? size : to_size);
        for (int64_t k = 0, n; k < o.elements && !status; k += n) {
            int64_t at = e->begin + (o.src + k) * size, dst = o.dst + k;
            n = o.elements - k < most ? o.elements - k : most;
            if (w->pitch) n = fsdpi_ck_less(n, w->shape[1] - dst % w->shape[1]); // in a row
            if (straight && o.elements * size >= FSDPI_CK_SHORT) n = o.elements;
            if (straight && (o.rows == 1 || o.elements * size >= FSDPI_CK_SHORT)) {
                status = fsdpi_ck_read_straight(r, item->part, at, n * size, w->to + dst * size);
                *wanted = 0;
                continue;
            }
            fsdpi_ck_copy_op run = {NULL, w->to, n, 1, from, w->dtype, w->memory};
            if (w->pitch) { // element (c, r) of the file is (r, c) in memory
                dst = dst % w->shape[1] * w->pitch + dst / w->shape[1];
                run.step = w->pitch;
            }
            run.to += dst * to_size;
            status = fsdpi_ck_read_run(r, item->part, at, run, wanted);
        }
    } while (!status && fsdp_box_next(&o));
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// The list of wanted boxes.

/* Adds a box to the list. It is read from the boxes first .. first + count - 1 of a tensor. */
static fsdp_status fsdpi_ck_add_want(fsdpi_ck_reader *r, const fsdpi_ck_want *w, int64_t first,
                                     int64_t count) {
    const int64_t size = (int64_t)sizeof *w, item = (int64_t)sizeof(fsdpi_ck_item);
    fsdp_status status = fsdpi_ck_reserve(r->io->model, &r->wants, (r->num_wants + 1) * size,
                                          r->num_wants * size);
    if (status) return status;
    memcpy((fsdpi_ck_want *)r->wants.ptr + r->num_wants, w, sizeof *w);
    for (int64_t i = first; i < first + count; i++) {
        const fsdp_safetensors_entry *e = r->o->boxes[i].entry;
        fsdp_box_overlap o;
        if (i > first && fsdpi_ck_same_box(r->o->boxes[i - 1].entry, e)) continue;
        fsdpi_ck_overlap_of(r, w, i, &o);
        if (!o.rows) continue;
        status = fsdpi_ck_reserve(r->io->model, &r->items, (r->num_items + 1) * item,
                                  r->num_items * item);
        if (status) return status;
        fsdpi_ck_item *x = (fsdpi_ck_item *)r->items.ptr + r->num_items++;
        x->want = r->num_wants;
        x->part = r->o->boxes[i].file;
        x->box = i;
        x->at = e->begin + o.src * (int64_t)fsdp_dtype_size(fsdpi_ck_carrier(e));
    }
    r->num_wants++;
    return FSDP_OK;
}

static int fsdpi_ck_by_place(const void *a, const void *b) {
    const fsdpi_ck_item *x = (const fsdpi_ck_item *)a, *y = (const fsdpi_ck_item *)b;
    if (x->part != y->part) return x->part < y->part ? -1 : 1;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return x->want < y->want ? -1 : x->want > y->want;
}

static fsdp_status fsdpi_ck_reader_init(fsdpi_ck_reader *r, fsdpi_ck_io *io,
                                        const fsdpi_ck_opened *o, int check) {
    memset(r, 0, sizeof *r);
    r->io = io, r->o = o, r->check = check;
    r->part = -1, r->next = -1;
    fsdp_status status = fsdpi_ck_reserve(io->model, &r->scratch, FSDPI_CK_PIECE, 0);
    return status ? status : fsdpi_ck_reserve(io->model, &r->block, FSDPI_CK_BLOCK, 0);
}
static void fsdpi_ck_reader_end(fsdpi_ck_reader *r) {
    fsdpi_ck_buffer *rooms[] = {&r->wants, &r->items, &r->scratch, &r->block, &r->turn};
    for (int i = 0; i < 5; i++) fsdpi_ck_drop(r->io, rooms[i]);
}

/* Reads all wanted boxes, and empties the list. */
static fsdp_status fsdpi_ck_read_all(fsdpi_ck_reader *r) {
    fsdpi_ck_item *items = (fsdpi_ck_item *)r->items.ptr;
    fsdp_status status = FSDP_OK;
    int64_t wanted = 0;
    if (r->num_items) qsort(items, (size_t)r->num_items, sizeof *items, fsdpi_ck_by_place);
    for (int64_t i = 0; i < r->num_items && !status; i++)
        status = fsdpi_ck_read_item(r, &items[i], &wanted);
    if (!status) status = fsdpi_ck_flush_reads(r, 1);
    else if (r->part >= 0) { // a copy failed while the file was open
        r->num_reads = r->num_runs = 0;
        (void)fsdpi_ck_flush_reads(r, 1);
    }
    r->num_items = 0, r->num_wants = 0;
    return status;
}

// Arguments of a job that verifies every `of`-th block of all files, from block `mine` on.
typedef struct fsdpi_ck_verify_job {
    fsdpi_ck_reader *r;
    int64_t mine, of, num_blocks;
} fsdpi_ck_verify_job;
static void fsdpi_ck_verify_blocks(void *arg) {
    fsdpi_ck_verify_job *v = (fsdpi_ck_verify_job *)arg;
    fsdpi_ck_reader *r = v->r;
    int64_t number = 0;
    for (int32_t i = 0; i < r->o->num_parts && !r->io->disk->status; i++) {
        const fsdpi_ck_data_file *p = &r->o->parts[i];
        for (int64_t at = 0; at < p->bytes - p->header && p->crcs; at += FSDPI_CK_BLOCK) {
            if (number++ % v->of != v->mine || r->io->disk->status) continue;
            fsdpi_ck_enter_part(r, i);
            if (r->io->disk->status) break;
            int64_t n = fsdpi_ck_block_end(r, at) - at;
            r->next = at;
            fsdpi_ck_get(r, (char *)r->block.ptr, n, at);
            if (!r->io->disk->status) fsdpi_ck_check_bytes(r, (const char *)r->block.ptr, n);
            r->next = -1;
            v->num_blocks++;
        }
    }
    fsdpi_ck_leave_part(r);
}

// Returns 1 if the box is identical to the one before it: two files hold it.
static int fsdpi_ck_is_twin(const fsdpi_ck_opened *o, int64_t box) {
    const fsdp_safetensors_entry *a = o->boxes[box - 1].entry, *b = o->boxes[box].entry;
    return strcmp(a->name, b->name) == 0 && a->ndim <= FSDP_MAX_DIMS && fsdpi_ck_same_box(a, b) &&
           fsdpi_ck_volume(b->ndim, b->shape) > 0;
}
static int64_t fsdpi_ck_num_twins(const fsdpi_ck_opened *o) {
    int64_t num = 0;
    for (int64_t i = 1; i < o->num_boxes; i++) num += fsdpi_ck_is_twin(o, i);
    return num;
}
// Reads bytes of a box, beginning with byte `at` of its data.
static void fsdpi_ck_get_piece(fsdpi_ck_reader *r, int64_t box, int64_t at, int64_t nbytes,
                               void *to) {
    fsdpi_ck_enter_part(r, r->o->boxes[box].file);
    if (!r->io->disk->status)
        fsdpi_ck_get(r, (char *)to, nbytes, r->o->boxes[box].entry->begin + at);
}
/* Compares boxes that two files of another program both hold: pairs mine, mine + of, ... Their
   bytes must be equal, since nothing says which file counts. A job. */
static void fsdpi_ck_compare_twins(void *arg) {
    fsdpi_ck_verify_job *v = (fsdpi_ck_verify_job *)arg;
    fsdpi_ck_reader *r = v->r;
    fsdpi_ck_disk *d = r->io->disk;
    int64_t number = 0;
    for (int64_t i = 1; i < r->o->num_boxes && !d->status; i++) {
        const fsdpi_ck_box *a = &r->o->boxes[i - 1], *b = a + 1;
        const int64_t nbytes = b->entry->end - b->entry->begin;
        if (!fsdpi_ck_is_twin(r->o, i) || number++ % v->of != v->mine) continue;
        for (int64_t at = 0, n; at < nbytes && !d->status; at += n) {
            n = fsdpi_ck_less(nbytes - at, FSDPI_CK_BLOCK);
            fsdpi_ck_get_piece(r, i - 1, at, n, r->scratch.ptr);
            if (!d->status) fsdpi_ck_get_piece(r, i, at, n, r->block.ptr);
            if (!d->status && memcmp(r->scratch.ptr, r->block.ptr, (size_t)n) != 0)
                (void)fsdpi_ck_fault(d, FSDP_ERR_CORRUPT,
                                     "tensor '%.300s' is in %s and in %s with other values: keep "
                                     "the file that is meant, or pass it as the path",
                                     b->entry->name, r->o->parts[a->file].name,
                                     r->o->parts[b->file].name);
        }
    }
    fsdpi_ck_leave_part(r);
}

#endif // FSDPI_CHECKPOINT_READ_H
