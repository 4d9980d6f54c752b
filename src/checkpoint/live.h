/* checkpoint/live.h - the export of a model's parameters as they are now

   Rank 0's worker runs fsdp_checkpoint_export over a file that is not on a disk: a header made from
   the table of parameters, and their data, which the ranks gather when the worker reads them. All
   other file calls go to the object's file functions, and are watched as those of a save.
   Callers: programs.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_LIVE_H
#define FSDPI_CHECKPOINT_LIVE_H

#include "../base/os.h"
#include "api.h"
#include "export.h"
#include "files.h"
#include "manifest.h"
#include "objects.h"
#include "rounds.h"
#include "table.h"
#include "tile.h"
#include "worker.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define FSDPI_CK_LIVE "the parameters of the model.safetensors" // a path that no disk has

enum { FSDPI_CK_NOTHING = -1, FSDPI_CK_ENDS = -2 }; // told to the ranks in place of a parameter

enum { FSDPI_CK_LIVE_FILES = 4 }; // most files that an export has open, and some

// An export that runs: rank 0's worker, and this thread, which gathers for it.
typedef struct fsdpi_ck_live {
    fsdp_checkpoint *ck;
    const char *out;
    fsdp_checkpoint_export_desc desc;
    fsdpi_ck_buffer entries, header, whole; // whole: the last parameter that was gathered
    int64_t num, header_bytes, data_bytes;
    int32_t gathered;  // its ordinal; -1: none
    int32_t wanted;    // [release] ordinal that the worker waits for; -1: none
    uint32_t failed;   // [release] 1: the world has failed, and gathers no more
    struct {
        void *file; // NULL: none
        const char *path;
    } open[FSDPI_CK_LIVE_FILES];
    fsdp_status status; // of the export, when the worker has ended
    char text[1024];
} fsdpi_ck_live;

static const fsdp_safetensors_entry *fsdpi_ck_live_entry(const fsdpi_ck_live *l, int64_t at) {
    const fsdp_safetensors_entry *e = (const fsdp_safetensors_entry *)l->entries.ptr;
    for (int64_t i = 0; i < l->num; i++)
        if (at < e[i].end) return &e[i];
    return NULL;
}

// Waits until the calling thread has gathered a parameter. Returns an errno value.
static int fsdpi_ck_live_want(fsdpi_ck_live *l, int32_t ordinal) {
    fsdpi_ck_worker *w = &l->ck->worker;
    if (l->gathered == ordinal) return 0;
    FSDPI_STORE(&l->wanted, ordinal);
    fsdpi_ck_ring(&w->to_caller);
    while (FSDPI_LOAD(&l->wanted) >= 0) {
        const uint32_t seen = FSDPI_LOAD(&w->to_worker);
        if (FSDPI_LOAD(&l->ck->disk.left) || FSDPI_LOAD(&l->failed)) return EIO;
        if (FSDPI_LOAD(&l->wanted) >= 0) fsdpi_futex_wait(&w->to_worker, seen, FSDPI_CK_NAP, 0);
    }
    return l->gathered == ordinal ? 0 : EIO; // the world has failed
}

static int fsdpi_ck_live_bytes(fsdpi_ck_live *l, char *to, int64_t nbytes, int64_t at,
                               int64_t *done) {
    const char *from = (const char *)l->header.ptr + at;
    int64_t left = l->header_bytes - at;
    if (left <= 0) {
        const fsdp_safetensors_entry *e = fsdpi_ck_live_entry(l, at - l->header_bytes);
        *done = 0;
        if (!e) return 0; // the end
        const fsdpi_ck_tensor *x = fsdpi_ck_find_tensor(&l->ck->table, e->name);
        const int error = fsdpi_ck_live_want(l, x->ordinal);
        if (error) return error;
        from = (const char *)l->whole.ptr + (at - l->header_bytes - e->begin);
        left = e->end - (at - l->header_bytes);
    }
    *done = fsdpi_ck_less(nbytes, left);
    memcpy(to, from, (size_t)*done);
    return 0;
}

// The file functions of the export. Each notes its call for the watch, and ends at once if nobody
// waits any more.
#define FSDPI_CK_LIVE_CALL(doing, path, call)                                                      \
    fsdpi_ck_live *l = (fsdpi_ck_live *)user;                                                      \
    fsdpi_ck_disk *d = &l->ck->disk;                                                               \
    if (fsdpi_ck_begin(d, doing, path)) return EIO;                                                \
    const int error = call;                                                                        \
    return fsdpi_ck_moved(d) ? error : EIO

// Returns the path of an open file, for the text of a stall.
static const char *fsdpi_ck_live_path(const fsdpi_ck_live *l, const void *file) {
    for (int i = 0; i < FSDPI_CK_LIVE_FILES; i++)
        if (l->open[i].file == file) return l->open[i].path;
    return "a file";
}
// Replaces an open file by another one; NULL: none.
static void fsdpi_ck_live_note(fsdpi_ck_live *l, const void *old, void *file, const char *path) {
    int i = 0;
    while (i < FSDPI_CK_LIVE_FILES && l->open[i].file != old) i++;
    if (i == FSDPI_CK_LIVE_FILES) return;
    l->open[i].file = file;
    l->open[i].path = path;
}

static int fsdpi_ck_live_do_open(fsdpi_ck_live *l, const char *path, int create, void **file,
                                 int64_t *nbytes) {
    if (create || strcmp(path, FSDPI_CK_LIVE) != 0) {
        const int error = l->ck->disk.ops->open(l->ck->disk.user, path, create, file, nbytes);
        if (!error) fsdpi_ck_live_note(l, NULL, *file, path);
        return error;
    }
    *file = l;
    *nbytes = l->header_bytes + l->data_bytes;
    return 0;
}
static int fsdpi_ck_live_open(void *user, const char *path, int create, void **file,
                              int64_t *nbytes) {
    FSDPI_CK_LIVE_CALL(create ? "create" : "open", path,
                       fsdpi_ck_live_do_open(l, path, create, file, nbytes));
}
static int fsdpi_ck_live_read(void *user, void *file, void *data, int64_t nbytes, int64_t at,
                              int64_t *done) {
    FSDPI_CK_LIVE_CALL("read", fsdpi_ck_live_path(l, file),
                       file == l ? fsdpi_ck_live_bytes(l, (char *)data, nbytes, at, done)
                                 : d->ops->read(d->user, file, data, nbytes, at, done));
}
static int fsdpi_ck_live_write(void *user, void *file, const void *data, int64_t nbytes, int64_t at,
                               int64_t *done) {
    FSDPI_CK_LIVE_CALL("write", fsdpi_ck_live_path(l, file),
                       d->ops->write(d->user, file, data, nbytes, at, done));
}
static int fsdpi_ck_live_sync(void *user, void *file) {
    FSDPI_CK_LIVE_CALL("fsync", fsdpi_ck_live_path(l, file), d->ops->sync(d->user, file));
}
static int fsdpi_ck_live_do_close(fsdpi_ck_live *l, void *file) {
    if (file == l) return 0;
    const int error = l->ck->disk.ops->close(l->ck->disk.user, file);
    fsdpi_ck_live_note(l, file, NULL, NULL);
    return error;
}
static int fsdpi_ck_live_close(void *user, void *file) {
    FSDPI_CK_LIVE_CALL("close", fsdpi_ck_live_path(l, file), fsdpi_ck_live_do_close(l, file));
}
static int fsdpi_ck_live_make_dir(void *user, const char *path) {
    FSDPI_CK_LIVE_CALL("mkdir", path, d->ops->make_dir(d->user, path));
}
static int fsdpi_ck_live_sync_dir(void *user, const char *path) {
    FSDPI_CK_LIVE_CALL("fsync of the directory", path, d->ops->sync_dir(d->user, path));
}
static int fsdpi_ck_live_rename(void *user, const char *from, const char *to) {
    FSDPI_CK_LIVE_CALL("rename", to, d->ops->rename(d->user, from, to));
}
static int fsdpi_ck_live_remove(void *user, const char *path, int is_dir) {
    FSDPI_CK_LIVE_CALL("remove", path, d->ops->remove(d->user, path, is_dir));
}
static int fsdpi_ck_live_list(void *user, const char *path,
                              int (*each)(void *arg, const char *name), void *arg) {
    FSDPI_CK_LIVE_CALL("list", path, d->ops->list(d->user, path, each, arg));
}

static const fsdp_file_ops fsdpi_ck_live_files = {
    1,
    sizeof(fsdp_file_ops),
    fsdpi_ck_live_open,
    fsdpi_ck_live_read,
    fsdpi_ck_live_write,
    fsdpi_ck_live_sync,
    fsdpi_ck_live_close,
    fsdpi_ck_live_make_dir,
    fsdpi_ck_live_sync_dir,
    fsdpi_ck_live_rename,
    fsdpi_ck_live_remove,
    fsdpi_ck_live_list,
};

static void fsdpi_ck_live_job(void *arg) {
    fsdpi_ck_live *l = (fsdpi_ck_live *)arg;
    fsdp_checkpoint_export_desc d = l->desc;
    d.files = &fsdpi_ck_live_files, d.files_user = l;
    l->status = fsdp_checkpoint_export(FSDPI_CK_LIVE, l->out, &d, l->text, sizeof l->text);
}

// Lists the parameters as entries of a file, and prints its header. All ranks do.
static fsdp_status fsdpi_ck_live_list_all(fsdpi_ck_live *l, const char *call) {
    fsdp_checkpoint *ck = l->ck;
    int64_t most = 0;
    fsdp_status status = fsdpi_ck_tabulate(ck, call, 1);
    if (!status)
        status = fsdpi_ck_reserve(ck->model, &l->entries,
                                  (ck->table.num + 1) * (int64_t)sizeof(fsdp_safetensors_entry), 0);
    for (int i = 0; i < ck->table.num && !status; i++) {
        const fsdpi_ck_tensor *x = fsdpi_ck_tensor_at(&ck->table, i);
        fsdp_safetensors_entry *e = (fsdp_safetensors_entry *)l->entries.ptr + l->num;
        if (x->ordinal < 0 || x->place || !fsdpi_ck_volume(x->ndim, x->whole)) continue;
        for (int d = 0; d < x->ndim && !status; d++)
            if (x->whole[d] != x->view.shape[d])
                status = fsdp_fail(ck->world, FSDP_ERR_UNSUPPORTED,
                                   "[E568] %s: '%s' is a part of a tensor, as with tensor "
                                   "parallelism: save a checkpoint, then export that",
                                   call, x->name);
        memset(e, 0, sizeof *e);
        e->name = x->name;
        e->dtype = x->dtype;
        e->ndim = x->ndim;
        memcpy(e->shape, x->whole, sizeof e->shape);
        const int64_t nbytes = fsdpi_ck_volume(x->ndim, x->whole) *
                               (int64_t)fsdp_dtype_size(x->dtype);
        if (nbytes > most) most = nbytes;
        l->num++;
    }
    if (status || ck->rank) return status;
    if (!l->num)
        return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                         "[E569] %s: no parameter has a name in files: place and skip_frozen "
                         "leave out each of them",
                         call);
    fsdp_safetensors_entry *e = (fsdp_safetensors_entry *)l->entries.ptr;
    l->header_bytes = fsdpi_ck_print_begin(e, l->num, 0, 0, 1, NULL, 0);
    l->data_bytes = e[l->num - 1].end;
    status = fsdpi_ck_reserve(ck->model, &l->header, l->header_bytes, 0);
    if (!status) status = fsdpi_ck_reserve(ck->model, &l->whole, most, 0);
    if (!status)
        (void)fsdpi_ck_print_begin(e, l->num, 0, 0, 1, (char *)l->header.ptr, l->header_bytes);
    return status;
}

// Gathers a parameter on all ranks; rank 0 gets it in l->whole.
static fsdp_status fsdpi_ck_live_gather(fsdpi_ck_live *l, int32_t ordinal) {
    fsdp_param_view v;
    fsdp_status status = fsdp_param_at(l->ck->model, ordinal, &v);
    return status ? status : fsdp_param_full(v.unit, v.index, l->ck->rank ? NULL : l->whole.ptr);
}

// Serves the worker of rank 0 until it has ended. Every 100 ms all ranks meet.
static fsdp_status fsdpi_ck_live_serve(fsdpi_ck_live *l) {
    fsdp_checkpoint *ck = l->ck;
    fsdpi_ck_watch watch = {0, 0};
    int32_t told = FSDPI_CK_NOTHING;
    fsdp_status status = FSDP_OK;
    while (told != FSDPI_CK_ENDS && !status) {
        if (!ck->rank) {
            const int64_t end = fsdpi_monotonic_ns(NULL) + FSDPI_CK_NAP;
            while (fsdpi_ck_is_busy(&ck->worker) && FSDPI_LOAD(&l->wanted) < 0 &&
                   fsdpi_monotonic_ns(NULL) < end)
                fsdpi_ck_nap(&ck->worker, FSDPI_CK_NAP);
            fsdpi_ck_look(ck, &watch);
            told = ck->hung || !fsdpi_ck_is_busy(&ck->worker) ? FSDPI_CK_ENDS
                                                              : FSDPI_LOAD(&l->wanted);
        }
        status = fsdp_broadcast(ck->world, NULL, &told, sizeof told, 0);
        if (!status && told >= 0) status = fsdpi_ck_live_gather(l, told);
        if (ck->rank || told < 0) continue;
        l->gathered = status ? -1 : told;
        FSDPI_STORE(&l->wanted, -1);
        fsdpi_ck_ring(&ck->worker.to_worker);
    }
    return status;
}

// Waits for the worker. If the world has failed, it gets no parameter any more, and cleans up.
static void fsdpi_ck_live_end(fsdpi_ck_live *l, int failed) {
    fsdp_checkpoint *ck = l->ck;
    if (failed) FSDPI_STORE(&l->failed, 1u);
    fsdpi_ck_await_alone(ck);
    if (ck->hung) return;
    fsdpi_ck_forget(&ck->disk);
}

static fsdp_status fsdpi_ck_live_run(fsdpi_ck_live *l, const char *call) {
    fsdp_checkpoint *ck = l->ck;
    fsdp_status mine = FSDP_OK;
    if (l->desc.with_optimizer || l->desc.num_ranks || l->desc.ema)
        mine = fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                         "[E570] %s: with_optimizer, num_ranks and ema are for checkpoints: save "
                         "one, or call fsdp_ema_swap around this call",
                         call);
    if (!mine) mine = fsdpi_ck_live_list_all(l, call);
    fsdp_status status = fsdpi_ck_agree(ck->world, call, mine);
    if (status) return status; // no worker has begun
    if (!ck->rank) mine = fsdpi_ck_submit(ck, call, fsdpi_ck_live_job, l);
    status = fsdpi_ck_live_serve(l);
    if (ck->rank == 0) fsdpi_ck_live_end(l, status != FSDP_OK);
    if (status) return status;
    if (ck->hung) mine = fsdpi_ck_worker_status(ck, call);
    else if (!mine && l->status) mine = fsdp_fail(ck->world, l->status, "%s", l->text);
    return fsdpi_ck_agree(ck->world, call, mine);
}

FSDP_API fsdp_status fsdp_checkpoint_export_model(fsdp_checkpoint *ck, const char *out,
                                                  const fsdp_checkpoint_export_desc *desc) {
    static const char *const call = "checkpoint_export_model";
    void *room = NULL;
    if (!ck) return fsdp_fail_null(NULL, call, "ck");
    fsdp_model *m = ck->model;
    fsdp_status status = fsdp_checkpoint_wait(ck);
    if (status) return status;
    status = fsdp_call_begin(m, FSDP_CALL_FULL, call);
    if (!status)
        status = fsdp_alloc(m, FSDP_MEMORY_HOST, (int64_t)sizeof(fsdpi_ck_live),
                            "checkpoint_export_model: no memory", &room);
    fsdpi_ck_live *l = (fsdpi_ck_live *)room;
    if (l) {
        l->ck = ck, l->out = out;
        l->gathered = l->wanted = -1;
        status = fsdp_desc_read(ck->world, &l->desc, desc, sizeof l->desc,
                                "fsdp_checkpoint_export_desc");
    }
    status = fsdpi_ck_agree(ck->world, call, status);
    if (!status) status = fsdpi_ck_live_run(l, call);
    if (!l || ck->hung) return status; // a hung worker uses its memory until its call returns
    if (l->text[0] && !status) fsdp_warn(ck->world, "%s", l->text);
    fsdpi_ck_buffer *const rooms[] = {&l->entries, &l->header, &l->whole};
    for (size_t i = 0; i < 3; i++) fsdpi_ck_free(m, rooms[i]);
    fsdp_free(m, FSDP_MEMORY_HOST, l, (int64_t)sizeof *l);
    return status;
}

#endif // FSDPI_CHECKPOINT_LIVE_H
