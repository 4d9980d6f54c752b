/* checkpoint/save.h - a save: what this rank writes, and the way to one rename

   The protocol of a save. All ranks write and sync their files in a directory whose name begins
   with a dot. Then rank 0 writes the manifest, syncs, and renames the directory: this is the
   commit. If the job ends before the rename, the earlier checkpoints are intact.
   State: fsdp_checkpoint.save.
   Callers: api.h (fsdpi_ck_copy) and export.h (fsdpi_ck_sum).

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_SAVE_H
#define FSDPI_CHECKPOINT_SAVE_H

#include "../base/hash.h"
#include "../base/os.h"
#include "files.h"
#include "retention.h"
#include "manifest.h"
#include "rounds.h"
#include "objects.h"
#include "table.h"
#include "tile.h"
#include "worker.h"
#include "../safetensors/box.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#ifdef __SSE2__
#include <emmintrin.h> // _mm_stream_si128
#endif

/* -------------------------------------------------------------------------------------------- */
// The data of this rank: a header, and spans in the order of the header.

static fsdp_safetensors_entry *fsdpi_ck_entries(const fsdpi_ck_save *s) {
    return (fsdp_safetensors_entry *)s->entries.ptr;
}
static fsdpi_ck_span *fsdpi_ck_spans(const fsdpi_ck_save *s) {
    return (fsdpi_ck_span *)s->spans.ptr;
}

// Lists the entries of this rank's file, unsorted.
static void fsdpi_ck_list_entries(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    s->num_entries = 0;
    for (int i = 0; i < ck->table.num; i++) {
        const fsdpi_ck_tensor *x = fsdpi_ck_tensor_at(&ck->table, i);
        int64_t first, rows = fsdpi_ck_my_rows(x, &first);
        if (!rows) continue;
        fsdp_safetensors_entry *e = fsdpi_ck_entries(s) + s->num_entries++;
        memset(e, 0, sizeof *e);
        e->name = x->name;
        e->dtype = x->file_dtype;
        e->ndim = x->ndim;
        memcpy(e->start, x->start, sizeof e->start);
        memcpy(e->shape, x->shape, sizeof e->shape);
        memcpy(e->whole, x->whole, sizeof e->whole);
        if (x->ndim) e->start[0] += first, e->shape[0] = rows;
    }
}

// Lists the memory of each entry. Converts numbers that files store as F64.
static void fsdpi_ck_list_spans(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    double *numbers = (double *)s->numbers.ptr;
    s->data_bytes = 0;
    for (int i = 0; i < s->num_entries; i++) {
        const fsdp_safetensors_entry *e = fsdpi_ck_entries(s) + i;
        const fsdpi_ck_tensor *x = fsdpi_ck_find_tensor(&ck->table, e->name);
        fsdpi_ck_span *span = fsdpi_ck_spans(s) + i;
        int64_t skipped = x->ndim ? (e->start[0] - x->start[0]) *
                                        fsdpi_ck_volume(x->ndim - 1, x->shape + 1)
                                  : 0;
        span->from = (const char *)x->data + skipped * (int64_t)fsdp_dtype_size(x->dtype);
        span->nbytes = e->end - e->begin;
        span->memory = x->memory;
        if (x->file_dtype != x->dtype) {
            numbers[i] = (double)*(const int64_t *)x->data;
            span->from = (const char *)&numbers[i];
            span->memory = FSDP_MEMORY_HOST;
        }
        s->data_bytes += span->nbytes;
    }
    s->num_spans = s->num_entries;
}

/* Makes this rank's table, header and spans. The header is identical in all saves of one layout. */
static fsdp_status fsdpi_ck_prepare(fsdp_checkpoint *ck, const char *call, uint64_t *layout) {
    fsdpi_ck_save *s = &ck->save;
    fsdp_model *m = ck->model;
    fsdp_status status = fsdpi_ck_tabulate(ck, call, 0);
    int64_t num = (int64_t)ck->table.num + 1;
    if (!status)
        status = fsdpi_ck_reserve(m, &s->entries, num * (int64_t)sizeof(fsdp_safetensors_entry), 0);
    if (!status) status = fsdpi_ck_reserve(m, &s->spans, num * (int64_t)sizeof(fsdpi_ck_span), 0);
    if (!status) status = fsdpi_ck_reserve(m, &s->numbers, num * (int64_t)sizeof(double), 0);
    if (status) return status;
    fsdpi_ck_list_entries(ck);
    s->header_bytes = 0;
    if (s->num_entries) {
        fsdp_safetensors_entry *e = fsdpi_ck_entries(s);
        s->header_bytes = fsdpi_ck_print_begin(e, s->num_entries, 1, ck->rank, ck->size, NULL, 0);
        if (s->header_bytes < 0)
            return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                             "[E427] %s: the header of %d tensors cannot be written: it is larger "
                             "than 100,000,000 bytes",
                             call, s->num_entries);
        status = fsdpi_ck_reserve(m, &s->header, s->header_bytes, 0);
        if (status) return status;
        char *header = (char *)s->header.ptr;
        (void)fsdpi_ck_print_begin(e, s->num_entries, 1, ck->rank, ck->size, header,
                                   s->header_bytes);
        s->header_crc = fsdp_crc32c(0, header, s->header_bytes);
    }
    fsdpi_ck_list_spans(ck);
    *layout = fsdpi_hash_bytes(0, s->header.ptr, (size_t)s->header_bytes) | 1;
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// The first save of a layout: ranks exchange the sizes of their files, and rank 0 checks that all
// boxes tile the tensors.

/* Gathers the headers of all ranks on rank 0, one after another. */
static fsdp_status fsdpi_ck_gather_headers(fsdp_checkpoint *ck, const char *call,
                                           fsdpi_ck_buffer *text, int64_t *at) {
    const int64_t *sizes = (const int64_t *)ck->save.sizes.ptr;
    fsdpi_ck_buffer mine = {NULL, 0};
    int64_t total = 0, most = 0;
    for (int r = 0; r < ck->size; r++) {
        total += sizes[3 * r];
        if (r && sizes[3 * r] > most) most = sizes[3 * r];
    }
    fsdp_status status = ck->rank == 0 ? fsdpi_ck_reserve(ck->model, text, total + 1, 0)
                                       : fsdpi_ck_reserve(ck->model, &mine, most + 1, 0);
    status = fsdpi_ck_agree(ck->world, call, status);
    int64_t begin = 0;
    for (int r = 0; r < ck->size && !status; begin += sizes[3 * r++]) {
        char *to = ck->rank == 0 ? (char *)text->ptr + begin : (char *)mine.ptr;
        at[r] = begin;
        if (ck->rank == r && sizes[3 * r]) memcpy(to, ck->save.header.ptr, (size_t)sizes[3 * r]);
        if (r && sizes[3 * r]) status = fsdp_broadcast(ck->world, NULL, to, sizes[3 * r], r);
    }
    fsdpi_ck_free(ck->model, &mine);
    return status;
}

// Parses the headers of all ranks, and checks that their boxes tile every tensor. Rank 0 calls it.
static fsdp_status fsdpi_ck_check_headers(fsdp_checkpoint *ck, const char *call, const char *text,
                                          const int64_t *at, fsdpi_ck_buffer *work) {
    const int64_t *sizes = (const int64_t *)ck->save.sizes.ptr;
    int64_t num = 0, chars = 0, files = ck->size;
    fsdp_safetensors_info info;
    char why[256] = "";
    fsdp_status status = FSDP_OK;
    for (int pass = 0; pass < 2 && !status; pass++) {
        int64_t boxes_at = num * (int64_t)sizeof(fsdp_safetensors_entry);
        int64_t names_at = boxes_at + num * (int64_t)sizeof(fsdpi_ck_box);
        int64_t leaves_at = names_at + files * (int64_t)sizeof(char *);
        int64_t chars_at = leaves_at + files * FSDPI_CK_LEAF;
        if (pass) status = fsdpi_ck_reserve(ck->model, work, chars_at + chars, 0);
        if (status) return status;
        char *room = (char *)work->ptr;
        fsdp_safetensors_entry *entry = (fsdp_safetensors_entry *)(void *)room;
        fsdpi_ck_box *box = pass ? (fsdpi_ck_box *)(void *)(room + boxes_at) : NULL;
        const char **names = pass ? (const char **)(void *)(room + names_at) : NULL;
        char *to = pass ? room + chars_at : NULL;
        for (int r = 0; r < ck->size && !status; r++) {
            if (pass) names[r] = room + leaves_at + r * FSDPI_CK_LEAF;
            if (pass) snprintf(room + leaves_at + r * FSDPI_CK_LEAF, FSDPI_CK_LEAF, "rank %d", r);
            if (!sizes[3 * r]) continue;
            status = fsdp_safetensors_parse(text + at[r] + 8, sizes[3 * r] - 8, sizes[3 * r + 1],
                                            pass ? entry : NULL, to, &info, why, sizeof why);
            if (!pass) num += info.num_entries, chars += info.text_bytes;
            for (int64_t i = 0; pass && !status && i < info.num_entries; i++, box++, entry++)
                box->entry = entry, box->file = r;
            if (pass) to += info.text_bytes;
        }
        if (status)
            return fsdp_fail(ck->world, status, "[E428] %s: the header of a rank: %s", call, why);
        if (!pass) continue;
        fsdpi_ck_tiling tiling = {names, 0, ""};
        if (fsdpi_ck_tile(&tiling, (fsdpi_ck_box *)(void *)(room + boxes_at), (int)num))
            return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG, "[E429] %s: %s", call, tiling.why);
    }
    return FSDP_OK;
}

// Exchanges the sizes of all ranks' files. Reserves memory for all checksums and, on rank 0, for
// the manifest.
static fsdp_status fsdpi_ck_share_sizes(fsdp_checkpoint *ck, const char *call) {
    fsdpi_ck_save *s = &ck->save;
    int64_t num = 3 * (int64_t)ck->size;
    fsdp_status status = fsdpi_ck_agree(
        ck->world, call, fsdpi_ck_reserve(ck->model, &s->sizes, num * (int64_t)sizeof(int64_t), 0));
    if (status) return status;
    int64_t *sizes = (int64_t *)s->sizes.ptr;
    memset(sizes, 0, (size_t)num * sizeof *sizes);
    sizes[3 * ck->rank] = s->header_bytes;
    sizes[3 * ck->rank + 1] = s->data_bytes;
    sizes[3 * ck->rank + 2] = s->header_bytes ? (int64_t)s->header_crc : 0;
    status = fsdp_all_reduce(ck->world, NULL, sizes, num, FSDP_I64, FSDP_SUM);
    s->num_crcs = s->first_crc = 0;
    for (int r = 0; r < ck->size && !status; r++) {
        if (r == ck->rank) s->first_crc = s->num_crcs;
        s->num_crcs += fsdpi_ck_blocks(sizes[3 * r + 1]);
    }
    if (status) return status;
    status = fsdpi_ck_reserve(ck->model, &s->crcs, (s->num_crcs + 1) * (int64_t)sizeof(uint32_t),
                              0);
    if (!status && ck->rank == 0)
        status = fsdpi_ck_reserve(ck->model, &s->manifest,
                                  fsdpi_ck_manifest_room(ck->size, s->num_crcs), 0);
    return fsdpi_ck_agree(ck->world, call, status);
}

static fsdp_status fsdpi_ck_new_layout(fsdp_checkpoint *ck, const char *call) {
    fsdpi_ck_buffer text = {NULL, 0}, work = {NULL, 0}, at = {NULL, 0};
    fsdp_status status = fsdpi_ck_share_sizes(ck, call);
    if (status) return status;
    status = fsdpi_ck_agree(
        ck->world, call, fsdpi_ck_reserve(ck->model, &at, ck->size * (int64_t)sizeof(int64_t), 0));
    if (!status) status = fsdpi_ck_gather_headers(ck, call, &text, (int64_t *)at.ptr);
    if (!status) {
        fsdp_status mine = FSDP_OK;
        if (ck->rank == 0)
            mine = fsdpi_ck_check_headers(ck, call, (const char *)text.ptr, (const int64_t *)at.ptr,
                                          &work);
        status = fsdpi_ck_agree(ck->world, call, mine);
    }
    fsdpi_ck_free(ck->model, &text);
    fsdpi_ck_free(ck->model, &work);
    fsdpi_ck_free(ck->model, &at);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// The worker's jobs.

static int fsdpi_ck_stop_at_once(void *arg, const char *name) {
    (void)arg, (void)name;
    return 1;
}
// Sets `out` to the parent directory of `path`.
static void fsdpi_ck_parent(char out[FSDP_CHECKPOINT_PATH], const char *path) {
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    while (n > 0 && path[n - 1] != '/') n--;
    while (n > 1 && path[n - 1] == '/') n--;
    memcpy(out, n ? path : ".", n ? n : 1);
    out[n ? n : 1] = 0;
}
static void fsdpi_ck_no_parent(fsdpi_ck_disk *d, const char *dir) {
    char parent[FSDP_CHECKPOINT_PATH];
    fsdpi_ck_parent(parent, dir);
    d->error = ENOENT;
    (void)fsdpi_ck_fault(d, FSDP_ERR_IO,
                         "%s cannot be made, since there is no directory %s: make that first "
                         "(mkdir -p)",
                         dir, parent);
}
static void fsdpi_ck_is_there(fsdpi_ck_disk *d, const char *path) {
    (void)fsdpi_ck_fault(d, FSDP_ERR_INVALID_ARG,
                         "%s is there already: choose another step or directory", path);
}
/* Makes the run's directory and the temporary one, on rank 0. Fails if the step exists. */
static void fsdpi_ck_make_dirs(void *arg) {
    fsdp_checkpoint *ck = (fsdp_checkpoint *)arg;
    fsdpi_ck_save *s = &ck->save;
    fsdpi_ck_disk *d = &ck->disk;
    if (fsdpi_ck_begin(d, "mkdir", s->dir)) return;
    int error = d->ops->make_dir(d->user, s->dir);
    if (error == ENOENT) fsdpi_ck_no_parent(d, s->dir);
    if (error != EEXIST && fsdpi_ck_end(d, error, s->dir)) return;
    if (!error && !ck->desc.no_sync) {
        fsdpi_ck_parent(s->scratch, s->dir);
        if (fsdpi_ck_sync_dir(d, s->scratch)) return;
    }
    if (fsdpi_ck_begin(d, "list", s->final)) return;
    error = d->ops->list(d->user, s->final, fsdpi_ck_stop_at_once, NULL);
    if (!error || error == ENOTDIR) {
        fsdpi_ck_is_there(d, s->final);
        return;
    }
    if (error != ENOENT && fsdpi_ck_end(d, error, s->final)) return;
    if (fsdpi_ck_begin(d, "mkdir", s->tmp)) return;
    (void)fsdpi_ck_end(d, d->ops->make_dir(d->user, s->tmp), s->tmp);
}

/* Sets *from to the next bytes to write: in a tensor, or in the ring once the caller has copied
   them. Returns their number, or 0 if the caller has given up. */
static int64_t fsdpi_ck_next_bytes(fsdp_checkpoint *ck, int64_t done, int *span, int64_t *in_span,
                                   const char **from) {
    fsdpi_ck_save *s = &ck->save;
    if (!s->stage_bytes) {
        const fsdpi_ck_span *x = fsdpi_ck_spans(s) + *span;
        int64_t n = x->nbytes - *in_span;
        if (n > FSDPI_CK_PIECE) n = FSDPI_CK_PIECE;
        *from = x->from + *in_span;
        *in_span += n;
        if (*in_span == x->nbytes) (*span)++, *in_span = 0;
        return n;
    }
    for (;;) {
        uint32_t seen = FSDPI_LOAD(&ck->worker.to_worker);
        int64_t there = FSDPI_LOAD(&s->produced) - done, at = done % s->stage_bytes;
        if (there > s->stage_bytes - at) there = s->stage_bytes - at;
        if (there > FSDPI_CK_PIECE) there = FSDPI_CK_PIECE;
        *from = (const char *)s->stage.ptr + at;
        if (there > 0) return there;
        if (FSDPI_LOAD(&s->given_up)) return 0;
        fsdpi_futex_wait(&ck->worker.to_worker, seen, 1000000000, 0);
        __atomic_add_fetch(&ck->disk.moves, 1, __ATOMIC_RELEASE); // not a stall
    }
}

// Joins small spans into one write.
typedef struct fsdpi_ck_joiner {
    int64_t at, used; // offset in the file; bytes in `room`
    char room[65536];
} fsdpi_ck_joiner;

static void fsdpi_ck_flush(fsdp_checkpoint *ck, fsdpi_ck_joiner *j, void *file) {
    (void)fsdpi_ck_write(&ck->disk, file, ck->save.file, j->room, j->used, j->at);
    j->at += j->used;
    j->used = 0;
}

// Adds bytes to the checksums of their blocks.
static void fsdpi_ck_sum(uint32_t *crcs, int64_t at, const char *from, int64_t nbytes) {
    while (nbytes > 0) {
        int64_t n = FSDPI_CK_BLOCK - at % FSDPI_CK_BLOCK;
        if (n > nbytes) n = nbytes;
        uint32_t *crc = crcs + at / FSDPI_CK_BLOCK;
        *crc = fsdp_crc32c(*crc, from, n);
        from += n, at += n, nbytes -= n;
    }
}

static void fsdpi_ck_write_data(fsdp_checkpoint *ck, void *file) {
    fsdpi_ck_save *s = &ck->save;
    uint32_t *crcs = (uint32_t *)s->crcs.ptr + s->first_crc;
    fsdpi_ck_joiner j;
    int span = 0;
    int64_t in_span = 0;
    const char *from = NULL;
    j.at = s->header_bytes, j.used = 0;
    for (int64_t done = 0; done < s->data_bytes && !ck->disk.status;) {
        int64_t n = fsdpi_ck_next_bytes(ck, done, &span, &in_span, &from);
        if (!n) return;
        fsdpi_ck_sum(crcs, done, from, n);
        if (j.used + n > (int64_t)sizeof j.room) fsdpi_ck_flush(ck, &j, file);
        if (n <= (int64_t)sizeof j.room) {
            memcpy(j.room + j.used, from, (size_t)n);
            j.used += n;
        } else {
            (void)fsdpi_ck_write(&ck->disk, file, s->file, from, n, j.at);
            j.at += n;
        }
        done += n;
        FSDPI_STORE(&s->consumed, done);
        if (s->stage_bytes) fsdpi_ck_ring(&ck->worker.to_caller);
    }
    fsdpi_ck_flush(ck, &j, file);
}

/* Writes and syncs the file of this rank; runs on every rank. On a network file system the
   directory that rank 0 has made may appear later: the call waits for it. */
static void fsdpi_ck_write_file(void *arg) {
    fsdp_checkpoint *ck = (fsdp_checkpoint *)arg;
    fsdpi_ck_save *s = &ck->save;
    fsdpi_ck_disk *d = &ck->disk;
    int64_t nbytes, give_up = fsdpi_monotonic_ns(NULL) + INT64_C(10000000000);
    void *file = NULL;
    if (!s->header_bytes) return;
    while (fsdpi_ck_open(d, s->file, 1, &file, &nbytes) && d->error == ENOENT &&
           fsdpi_monotonic_ns(NULL) < give_up) {
        uint32_t nobody = 0;
        fsdpi_ck_forget(d);
        fsdpi_futex_wait(&nobody, 0, 10000000, 0);
    }
    (void)fsdpi_ck_write(d, file, s->file, s->header.ptr, s->header_bytes, 0);
    if (!d->status) fsdpi_ck_write_data(ck, file);
    if (!ck->desc.no_sync) (void)fsdpi_ck_sync(d, file, s->file);
    (void)fsdpi_ck_close(d, file, s->file);
}

/* Writes the manifest and renames the directory, on rank 0. A failure after the rename is only a
   warning. */
static void fsdpi_ck_commit(void *arg) {
    fsdp_checkpoint *ck = (fsdp_checkpoint *)arg;
    fsdpi_ck_save *s = &ck->save;
    fsdpi_ck_disk *d = &ck->disk;
    int64_t nbytes = fsdpi_ck_print_manifest((char *)s->manifest.ptr, s->step, ck->size, ck->size,
                                             (const int64_t *)s->sizes.ptr,
                                             (const uint32_t *)s->crcs.ptr);
    int64_t ignored;
    void *file = NULL;
    (void)fsdpi_ck_join(s->scratch, s->tmp, "manifest.json");
    (void)fsdpi_ck_open(d, s->scratch, 1, &file, &ignored);
    (void)fsdpi_ck_write(d, file, s->scratch, s->manifest.ptr, nbytes, 0);
    if (!ck->desc.no_sync) (void)fsdpi_ck_sync(d, file, s->scratch);
    (void)fsdpi_ck_close(d, file, s->scratch);
    if (!ck->desc.no_sync) (void)fsdpi_ck_sync_dir(d, s->tmp);
    if (fsdpi_ck_rename(d, s->tmp, s->final)) {
        if (d->error != EEXIST) return;
        fsdpi_ck_forget(d); // another object has saved the step in the meantime
        fsdpi_ck_is_there(d, s->final);
        return;
    }
    if (!ck->desc.no_sync && fsdpi_ck_sync_dir(d, s->dir)) s->warned = 1;
    int error = s->warned ? 0
                          : fsdpi_ck_keep(d, &ck->desc, s->dir, s->step, (int64_t *)ck->steps.ptr);
    if (error) {
        (void)fsdpi_ck_fault(d, FSDP_ERR_IO, "removing old checkpoints in %s: %s (%d)", s->dir,
                             strerror(error), error);
        s->warned = 1;
    }
}

/* Removes the files of a failed save, on rank 0. */
static void fsdpi_ck_clean(void *arg) {
    fsdp_checkpoint *ck = (fsdp_checkpoint *)arg;
    (void)fsdpi_ck_begin(&ck->disk, "removal", ck->save.tmp);
    (void)fsdpi_ck_remove_dir(&ck->disk, ck->save.tmp);
}

/* -------------------------------------------------------------------------------------------- */
// The calls.

/* Ends a save that failed on some rank; `mine` is the status of this rank. Rank 0 removes the
   files once all workers have stopped. Returns the failure of the lowest rank that failed. */
static fsdp_status fsdpi_ck_give_up(fsdp_checkpoint *ck, const char *call, fsdp_status mine) {
    int any_failed;
    ck->save.stage_of = FSDPI_CK_IDLE;
    FSDPI_STORE(&ck->save.given_up, 1);
    fsdpi_ck_ring(&ck->worker.to_worker);
    fsdp_status status = fsdpi_ck_await(ck);
    if (!status) status = fsdpi_ck_wait_for_ranks(ck, FSDP_OK, &any_failed);
    if (!status && ck->rank == 0 && !ck->hung && ck->worker.started) {
        fsdpi_ck_forget(&ck->disk);
        fsdpi_ck_give(&ck->worker, fsdpi_ck_clean, ck);
        status = fsdpi_ck_await(ck);
    }
    if (!status) status = fsdpi_ck_wait_for_ranks(ck, FSDP_OK, &any_failed);
    return status ? status : fsdpi_ck_agree(ck->world, call, mine);
}

static fsdp_status fsdpi_ck_check_units(fsdp_checkpoint *ck, const char *call) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_memory memory;
    fsdp_status status = fsdp_call_begin(ck->model, FSDP_CALL_FULL, call);
    while (!status && fsdp_next_param(ck->model, &v)) {
        status = fsdp_unit_memory(v.unit, &memory);
        if (!status &&
            (memory.pool_slots[FSDP_POOL_GRAD] || memory.pool_slots[FSDP_POOL_REDUCE_IN] ||
             memory.pool_slots[FSDP_POOL_REDUCE_OUT]))
            return fsdp_fail(ck->world, FSDP_ERR_INVALID_STATE,
                             "[E430] %s: unit '%s' holds gradients that are not reduced: save "
                             "after a backward with gradient sync",
                             call, fsdp_unit_label(v.unit));
    }
    return status;
}

static fsdp_status fsdpi_ck_set_paths(fsdp_checkpoint *ck, const char *call, const char *dir,
                                      int64_t step, uint64_t nonce) {
    fsdpi_ck_save *s = &ck->save;
    char leaf[FSDPI_CK_LEAF], tmp[FSDPI_CK_LEAF + 32];
    fsdpi_ck_step_name(leaf, step);
    snprintf(tmp, sizeof tmp, ".tmp-%s-%016llx", leaf, (unsigned long long)nonce);
    int fits = snprintf(s->dir, sizeof s->dir, "%s", dir) < FSDP_CHECKPOINT_PATH - 160;
    fits = fits && fsdpi_ck_join(s->final, dir, leaf) && fsdpi_ck_join(s->tmp, dir, tmp);
    fsdpi_ck_shard_name(leaf, ck->rank);
    fits = fits && fsdpi_ck_join(s->file, s->tmp, leaf);
    if (!fits)
        return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                         "[E431] %s: the path of the directory is longer than %d bytes: choose a "
                         "shorter one",
                         call, FSDP_CHECKPOINT_PATH - 160);
    s->step = step;
    return FSDP_OK;
}

// Returns a number that is unique to this job, made from the process and the time.
static uint64_t fsdpi_ck_nonce(void) {
    struct fsdpi_timespec wall;
    (void)fsdpi_clock_gettime(0 /* CLOCK_REALTIME */, &wall);
    uint64_t part[4] = {(uint64_t)wall.tv_sec, (uint64_t)wall.tv_nsec,
                        (uint64_t)fsdpi_monotonic_ns(NULL), (uint64_t)getpid()};
    return fsdpi_hash_bytes(0, part, sizeof part);
}

// Returns the bytes of copies that a save needs. 0: the caller waits, so the worker writes from the
// tensors.
static int64_t fsdpi_ck_stage_for(const fsdp_checkpoint *ck, int is_async) {
    int64_t all = ck->save.data_bytes, most = ck->desc.stage_bytes;
    int device = 0;
    for (int i = 0; i < ck->save.num_spans; i++)
        device = device || fsdpi_ck_spans(&ck->save)[i].memory == FSDP_MEMORY_DEVICE;
    if (!is_async && !device) return 0;
    if (!is_async && !most) most = 2 * FSDPI_CK_PIECE;
    return most > 0 && most < all ? most : all;
}

// Makes the checks that need no other rank, before the first file call.
static fsdp_status fsdpi_ck_check_save(fsdp_checkpoint *ck, const char *call,
                                       const fsdpi_ck_args *args, const fsdpi_ck_args *first,
                                       int is_async, uint64_t *layout) {
    fsdpi_ck_save *s = &ck->save;
    if (!*args->path || args->step < 0 || args->step > FSDPI_ST_MOST)
        return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                         "[E432] %s: dir is empty or step is %lld: pass a directory and a step of "
                         "0 to 2^62",
                         call, (long long)args->step);
    fsdp_status status = ck->hung ? fsdpi_ck_worker_status(ck, call)
                                  : fsdpi_ck_same_args(ck, call, args, first);
    if (!status) status = fsdpi_ck_check_units(ck, call);
    if (!status) status = fsdpi_ck_set_paths(ck, call, args->path, args->step, first->nonce);
    if (!status) status = fsdpi_ck_prepare(ck, call, layout);
    if (!status) status = fsdp_wait_stream(ck->model, -1);
    if (status) return status;
    s->stage_bytes = fsdpi_ck_stage_for(ck, is_async);
    s->produced = s->consumed = 0;
    s->given_up = 0;
    s->warned = 0;
    memset(&s->watch, 0, sizeof s->watch);
    return fsdpi_ck_reserve(ck->model, &s->stage, s->stage_bytes, 0);
}

#ifdef __SSE2__
static void fsdpi_ck_stream_line(char *to, const char *from) {
    const __m128i *x = (const __m128i *)(const void *)from;
    __m128i a = _mm_loadu_si128(x), b = _mm_loadu_si128(x + 1), c = _mm_loadu_si128(x + 2),
            d = _mm_loadu_si128(x + 3), *y = (__m128i *)(void *)to;
    _mm_stream_si128(y, a);
    _mm_stream_si128(y + 1, b);
    _mm_stream_si128(y + 2, c);
    _mm_stream_si128(y + 3, d);
}
#endif
// Copies with stores that bypass the caches, since the copy is not read soon: the training data
// stays cached. Copying two pages side by side is faster than one after the other.
static void fsdpi_ck_stream(char *to, const char *from, int64_t nbytes) {
#ifdef __SSE2__
    enum { PAGE = 4096 };
    for (; nbytes > 0 && (uintptr_t)to % 16; nbytes--) *to++ = *from++;
    for (; nbytes >= 2 * PAGE; to += 2 * PAGE, from += 2 * PAGE, nbytes -= 2 * PAGE)
        for (int i = 0; i < PAGE; i += 64) {
            fsdpi_ck_stream_line(to + i, from + i);
            fsdpi_ck_stream_line(to + PAGE + i, from + PAGE + i);
        }
    _mm_sfence(); // the stores must be visible before the worker reads
#endif
    memcpy(to, from, (size_t)nbytes);
}

// Copies spans into the ring while it has room. Returns 1 once all are copied.
static int fsdpi_ck_copy_some(fsdp_checkpoint *ck, int *span, int64_t *in_span,
                              fsdp_status *status) {
    fsdpi_ck_save *s = &ck->save;
    while (*span < s->num_spans && !*status) {
        const fsdpi_ck_span *x = fsdpi_ck_spans(s) + *span;
        int64_t produced = s->produced, at = produced % s->stage_bytes;
        int64_t n = s->stage_bytes - (produced - FSDPI_LOAD(&s->consumed));
        if (n > s->stage_bytes - at) n = s->stage_bytes - at;
        if (n > FSDPI_CK_PIECE) n = FSDPI_CK_PIECE;
        if (n > x->nbytes - *in_span) n = x->nbytes - *in_span;
        if (n <= 0) return 0;
        char *to = (char *)s->stage.ptr + at;
        if (x->memory == FSDP_MEMORY_DEVICE)
            *status = fsdp_transfer(ck->model, to, x->from + *in_span, n);
        else fsdpi_ck_stream(to, x->from + *in_span, n);
        *in_span += n;
        if (*in_span == x->nbytes) (*span)++, *in_span = 0;
        FSDPI_STORE(&s->produced, produced + n);
        fsdpi_ck_ring(&ck->worker.to_worker);
    }
    return *span == s->num_spans;
}

// Waits until the worker has freed room in the ring, or has ended.
static void fsdpi_ck_wait_room(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    int64_t end = fsdpi_monotonic_ns(NULL) + FSDPI_CK_NAP, now;
    while ((now = fsdpi_monotonic_ns(NULL)) < end && fsdpi_ck_is_busy(&ck->worker)) {
        uint32_t seen = FSDPI_LOAD(&ck->worker.to_caller);
        if (s->produced - FSDPI_LOAD(&s->consumed) < s->stage_bytes) return;
        fsdpi_futex_wait(&ck->worker.to_caller, seen, end - now, 0);
    }
    fsdpi_ck_look(ck, &s->watch);
}

/* Copies all spans while the worker writes. If the ring is full, it waits for the worker, and
   takes part in rounds meanwhile. */
static fsdp_status fsdpi_ck_copy(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    int span = 0, any_busy, any_failed;
    int64_t in_span = 0;
    fsdp_status status = FSDP_OK;
    while (s->stage_bytes && !fsdpi_ck_copy_some(ck, &span, &in_span, &status) && !status &&
           fsdpi_ck_is_busy(&ck->worker) && !ck->hung) {
        fsdpi_ck_wait_room(ck);
        if (s->produced - FSDPI_LOAD(&s->consumed) == s->stage_bytes)
            status = fsdpi_ck_round(ck, 1, 0, &any_busy, &any_failed);
    }
    return status;
}

// Gathers all checksums on all ranks: each rank has filled in its own.
static fsdp_status fsdpi_ck_share_crcs(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    return s->num_crcs
               ? fsdp_all_reduce(ck->world, NULL, s->crcs.ptr, s->num_crcs, FSDP_I32, FSDP_SUM)
               : FSDP_OK;
}

static void fsdpi_ck_report_save(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    const int64_t *sizes = (const int64_t *)s->sizes.ptr;
    int64_t blocked = ck->report.blocked_ns;
    memset(&ck->report, 0, sizeof ck->report);
    ck->report.step = s->step;
    ck->report.bytes = s->data_bytes;
    for (int r = 0; r < ck->size; r++) ck->report.total_bytes += sizes[3 * r + 1];
    ck->report.blocked_ns = blocked;
    ck->report.total_ns = fsdpi_monotonic_ns(NULL) - s->begin_ns;
    ck->report.per_rank_blobs = ck->report.verified = 1;
}

/* Enters the next phase of a save, after a round in which no rank was busy. First all ranks have
   written, then rank 0 has committed. */
static fsdp_status fsdpi_ck_next_phase(fsdp_checkpoint *ck, const char *call, int any_failed) {
    fsdpi_ck_save *s = &ck->save;
    if (any_failed)
        return fsdpi_ck_give_up(ck, call, s->warned ? FSDP_OK : fsdpi_ck_worker_status(ck, call));
    if (s->stage_of == FSDPI_CK_WRITING) {
        fsdp_status status = fsdpi_ck_share_crcs(ck);
        if (!status && ck->rank == 0) status = fsdpi_ck_submit(ck, call, fsdpi_ck_commit, ck);
        s->stage_of = FSDPI_CK_COMMITTING;
        memset(&s->watch, 0, sizeof s->watch); // stall_ms starts again for the commit
        return status;
    }
    if (s->warned)
        (void)fsdp_fail(ck->world, FSDP_OK, "[E433] %s: %s is complete, but: %s", call, s->final,
                        ck->disk.text);
    fsdpi_ck_report_save(ck);
    s->stage_of = FSDPI_CK_IDLE;
    return FSDP_OK;
}

/* Makes one round of a save. If the worker is busy, it first waits for it, for at most `nap` ns. */
static fsdp_status fsdpi_ck_advance(fsdp_checkpoint *ck, const char *call, int64_t nap) {
    int64_t end = fsdpi_monotonic_ns(NULL) + nap, now;
    int any_busy, any_failed;
    while (fsdpi_ck_is_busy(&ck->worker) && (now = fsdpi_monotonic_ns(NULL)) < end)
        fsdpi_ck_nap(&ck->worker, end - now);
    int busy = fsdpi_ck_is_busy(&ck->worker);
    if (busy) fsdpi_ck_look(ck, &ck->save.watch);
    busy = busy && !ck->hung;
    int failed = ck->hung || (!busy && ck->disk.status && !ck->save.warned);
    fsdp_status status = fsdpi_ck_round(ck, busy, failed, &any_busy, &any_failed);
    return status || any_busy ? status : fsdpi_ck_next_phase(ck, call, any_failed);
}

#endif // FSDPI_CHECKPOINT_SAVE_H
