/* checkpoint/api.h - the public functions of a model's checkpoints

   State: fsdp_checkpoint.
   Callers: programs.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_API_H
#define FSDPI_CHECKPOINT_API_H

#include "../base/os.h"
#include "files.h"
#include "retention.h"
#include "load.h"
#include "manifest.h"
#include "rounds.h"
#include "objects.h"
#include "open.h"
#include "read.h"
#include "save.h"
#include "table.h"
#include "worker.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* -------------------------------------------------------------------------------------------- */
// Creation and destruction.

static int fsdpi_ck_good_blob_name(const char *name) {
    size_t n = name ? strlen(name) : 0;
    if (n < 1 || n > 64) return 0;
    for (; *name; name++)
        if (!((*name >= 'a' && *name <= 'z') || (*name >= 'A' && *name <= 'Z') ||
              (*name >= '0' && *name <= '9') || *name == '_' || *name == '.' || *name == '-'))
            return 0;
    return 1;
}

static fsdp_status fsdpi_ck_copy_blobs(fsdp_checkpoint *ck, const char *call) {
    const fsdp_checkpoint_desc *d = &ck->desc;
    if (d->num_blobs < 0 || (d->num_blobs && !d->blobs))
        return fsdp_fail_null(ck->world, call, "desc.blobs");
    if (!d->num_blobs) return FSDP_OK;
    int64_t size = (int64_t)sizeof(fsdp_checkpoint_blob) + 80;
    fsdp_status status = fsdpi_ck_reserve(ck->model, &ck->blobs, d->num_blobs * size, 0);
    if (status) return status;
    fsdp_checkpoint_blob *to = (fsdp_checkpoint_blob *)ck->blobs.ptr;
    char *names = (char *)(to + d->num_blobs);
    for (int i = 0; i < d->num_blobs; i++) {
        const fsdp_checkpoint_blob *b = &d->blobs[i];
        if (!fsdpi_ck_good_blob_name(b->name) || b->nbytes < 0 || (b->nbytes && !b->data))
            return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                             "[E442] %s: blob %d: expected a name of 1 to 64 letters, digits, '_', "
                             "'.' or '-', and data of nbytes >= 0",
                             call, i);
        for (int k = 0; k < i; k++)
            if (strcmp(to[k].name, b->name) == 0)
                return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                                 "[E443] %s: blobs %d and %d are both called '%s': give one of "
                                 "them another name",
                                 call, k, i, b->name);
        to[i] = *b;
        memcpy(names + 80 * i, b->name, strlen(b->name) + 1);
        to[i].name = names + 80 * i;
    }
    return FSDP_OK;
}

static void fsdpi_ck_free_all(fsdp_checkpoint *ck) {
    fsdpi_ck_save *s = &ck->save;
    fsdpi_ck_buffer *rooms[] = {
        &ck->blobs,      &ck->steps,  &ck->table.tensors, &ck->table.text, &ck->table.order,
        &ck->table.base, &s->entries, &s->names,          &s->header,      &s->spans,
        &s->numbers,     &s->sizes,   &s->crcs,           &s->manifest,    &s->stage};
    fsdp_model *m = ck->model;
    if (ck->hung) { // the thread uses it until its file call returns
        FSDPI_STORE(&ck->worker.stop, 1);
        (void)pthread_detach(ck->worker.thread);
        return;
    }
    fsdpi_ck_stop(&ck->worker);
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) fsdpi_ck_free(m, rooms[i]);
    fsdp_free(m, FSDP_MEMORY_HOST, ck, (int64_t)sizeof *ck);
}
// Ends the object's use of the model: aborts a save in progress. Runs when the model or the
// checkpoint object ends.
static void fsdpi_ck_end_of_model(void *user) {
    fsdp_checkpoint *ck = (fsdp_checkpoint *)user;
    FSDPI_STORE(&ck->save.given_up, 1);
    fsdpi_ck_await_alone(ck);
    fsdpi_ck_free_all(ck);
}

static fsdp_status fsdpi_ck_init(fsdp_checkpoint *ck, fsdp_model *model,
                                 const fsdp_checkpoint_desc *desc) {
    static const char *const call = "checkpoint_create";
    const uint16_t one = 1;
    ck->model = model;
    ck->world = fsdp_model_world(model);
    ck->rank = fsdp_rank(ck->world);
    ck->size = fsdp_world_size(ck->world);
    fsdp_status status = fsdp_desc_read(ck->world, &ck->desc, desc, sizeof ck->desc,
                                        "fsdp_checkpoint_desc");
    if (status) return status;
    if (!*(const unsigned char *)&one)
        return fsdp_fail(ck->world, FSDP_ERR_UNSUPPORTED,
                         "[E444] %s: this host is big-endian and the files are little-endian",
                         call);
    if (ck->desc.keep < 0 || ck->desc.keep_every < 0 || ck->desc.stall_ms < 0 ||
        ck->desc.stage_bytes < 0 ||
        (ck->desc.files &&
         (ck->desc.files->version != 1 || ck->desc.files->size != sizeof(fsdp_file_ops))))
        return fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                         "[E445] %s: keep, keep_every, stall_ms or stage_bytes is negative, or "
                         "files is not of version 1: zero the desc, then set what you need",
                         call);
    if (!ck->desc.stall_ms) ck->desc.stall_ms = 600000;
    fsdpi_ck_disk_init(&ck->disk, ck->desc.files, ck->desc.files_user);
    status = fsdpi_ck_copy_blobs(ck, call);
    if (!status && ck->rank == 0)
        status = fsdpi_ck_reserve(model, &ck->steps, FSDPI_CK_MOST_STEPS * (int64_t)sizeof(int64_t),
                                  0);
    ck->extension.name = "checkpoint";
    ck->extension.user = ck;
    ck->extension.destroy = fsdpi_ck_end_of_model;
    return status;
}

FSDP_API fsdp_status fsdp_checkpoint_create(fsdp_model *model, const fsdp_checkpoint_desc *desc,
                                            fsdp_checkpoint **out) {
    static const char *const call = "checkpoint_create";
    void *room = NULL;
    int attached = 0;
    if (!model || !out) return fsdp_fail_null(fsdp_model_world(model), call, "model or ck");
    *out = NULL;
    fsdp_status mine = fsdp_alloc(model, FSDP_MEMORY_HOST, (int64_t)sizeof(fsdp_checkpoint),
                                  "checkpoint_create: no memory", &room);
    fsdp_checkpoint *ck = (fsdp_checkpoint *)room;
    fsdp_world *world = fsdp_model_world(model);
    if (!mine) mine = fsdpi_ck_init(ck, model, desc);
    fsdp_status status = fsdpi_ck_agree(world, call, mine); // all ranks commit, or none
    if (!status) {
        mine = fsdp_model_commit(model);
        if (!mine) mine = fsdpi_ck_tabulate(ck, call, 0);
        if (!mine) mine = fsdp_attach(model, &ck->extension);
        attached = !mine;
        status = fsdpi_ck_agree(world, call, mine);
    }
    if (!status) *out = ck;
    else if (attached) (void)fsdp_detach(model, &ck->extension);
    else if (ck) fsdpi_ck_free_all(ck);
    return status;
}

FSDP_API void fsdp_checkpoint_destroy(fsdp_checkpoint *ck) {
    if (ck) (void)fsdp_detach(ck->model, &ck->extension);
}

/* -------------------------------------------------------------------------------------------- */
// Saves.

static fsdp_status fsdpi_ck_finish(fsdp_checkpoint *ck, const char *call) {
    fsdp_status status = fsdp_world_status(ck->world);
    while (!status && ck->save.stage_of != FSDPI_CK_IDLE)
        status = fsdpi_ck_advance(ck, call, FSDPI_CK_NAP);
    return status;
}

// Begins a save. On return the worker is writing, and all tensors that need a copy have been
// copied.
static fsdp_status fsdpi_ck_begin_save(fsdp_checkpoint *ck, const char *call, const char *dir,
                                       int64_t step, int is_async) {
    fsdpi_ck_save *s = &ck->save;
    fsdpi_ck_args args, first;
    uint64_t layout = 0;
    int32_t is_new;
    s->begin_ns = fsdpi_monotonic_ns(NULL);
    memset(&args, 0, sizeof args);
    args.nonce = fsdpi_ck_nonce();
    args.step = step;
    snprintf(args.path, sizeof args.path, "%s", dir ? dir : "");
    first = args;
    fsdp_status status = fsdp_broadcast(ck->world, NULL, &first, sizeof first, 0);
    if (status) return status;
    status = fsdpi_ck_agree(ck->world, call,
                            fsdpi_ck_check_save(ck, call, &args, &first, is_async, &layout));
    if (status) return status;
    is_new = layout != s->layout;
    s->layout = 0;
    status = fsdp_all_reduce(ck->world, NULL, &is_new, 1, FSDP_I32, FSDP_MAX);
    if (!status && is_new) status = fsdpi_ck_new_layout(ck, call);
    if (status) return status;
    s->layout = layout;
    memset(s->crcs.ptr, 0, (size_t)(s->num_crcs * 4));
    if (ck->rank == 0) status = fsdpi_ck_run(ck, call, fsdpi_ck_make_dirs, ck);
    status = fsdpi_ck_finish_phase(ck, call, status);
    if (status) return status;
    int any_failed, copies_first = s->stage_bytes && s->stage_bytes == s->data_bytes;
    // If the stage has room for everything, the worker writes only after the copies.
    fsdp_status mine = copies_first ? fsdpi_ck_copy(ck) : FSDP_OK;
    if (!mine) mine = fsdpi_ck_submit(ck, call, fsdpi_ck_write_file, ck);
    if (!mine && !copies_first) mine = fsdpi_ck_copy(ck);
    if (!mine && ck->hung) mine = fsdpi_ck_worker_status(ck, call);
    status = fsdpi_ck_wait_for_ranks(ck, mine, &any_failed);
    if (status) return status;
    if (any_failed) return fsdpi_ck_give_up(ck, call, mine);
    s->stage_of = FSDPI_CK_WRITING;
    return FSDP_OK;
}

static fsdp_status fsdpi_ck_save_call(fsdp_checkpoint *ck, const char *call, const char *dir,
                                      int64_t step, int is_async) {
    if (!ck) return fsdp_fail_null(NULL, call, "ck");
    int64_t begin = fsdpi_monotonic_ns(NULL);
    fsdp_status status = fsdpi_ck_finish(ck, call);
    if (!status) status = fsdpi_ck_begin_save(ck, call, dir, step, is_async);
    if (!status && !is_async) status = fsdpi_ck_finish(ck, call);
    if (!status) ck->report.blocked_ns = fsdpi_monotonic_ns(NULL) - begin;
    return status;
}
FSDP_API fsdp_status fsdp_checkpoint_save(fsdp_checkpoint *ck, const char *dir, int64_t step) {
    return fsdpi_ck_save_call(ck, "checkpoint_save", dir, step, 0);
}
FSDP_API fsdp_status fsdp_checkpoint_save_async(fsdp_checkpoint *ck, const char *dir,
                                                int64_t step) {
    return fsdpi_ck_save_call(ck, "checkpoint_save_async", dir, step, 1);
}
FSDP_API fsdp_status fsdp_checkpoint_poll(fsdp_checkpoint *ck, int *busy) {
    if (!ck) return fsdp_fail_null(NULL, "checkpoint_poll", "ck");
    fsdp_status status = fsdp_world_status(ck->world);
    if (!status && ck->save.stage_of != FSDPI_CK_IDLE)
        status = fsdpi_ck_advance(ck, "checkpoint_poll", 0);
    if (busy) *busy = ck->save.stage_of != FSDPI_CK_IDLE;
    return status;
}
FSDP_API fsdp_status fsdp_checkpoint_wait(fsdp_checkpoint *ck) {
    return ck ? fsdpi_ck_finish(ck, "checkpoint_wait")
              : fsdp_fail_null(NULL, "checkpoint_wait", "ck");
}

/* -------------------------------------------------------------------------------------------- */
// Find and load.

static void fsdpi_ck_io_of(fsdp_checkpoint *ck, const char *call) {
    memset(&ck->io, 0, sizeof ck->io);
    ck->io.ck = ck;
    ck->io.model = ck->model;
    ck->io.world = ck->world;
    ck->io.disk = &ck->disk;
    ck->io.call = call;
}

static void fsdpi_ck_find_steps(void *arg) {
    fsdp_checkpoint *ck = (fsdp_checkpoint *)arg;
    fsdpi_ck_disk *d = &ck->disk;
    if (!fsdpi_ck_list_steps(d, ck->io.path, &ck->found) || d->error != ENOENT) return;
    fsdpi_ck_forget(d); // no run directory yet: a save creates it, but not its parent
    fsdpi_ck_parent(ck->save.scratch, ck->io.path);
    if (fsdpi_ck_begin(d, "list", ck->save.scratch)) return;
    int error = d->ops->list(d->user, ck->save.scratch, fsdpi_ck_stop_at_once, NULL);
    if (fsdpi_ck_moved(d) && (error == ENOENT || error == ENOTDIR))
        fsdpi_ck_no_parent(d, ck->io.path);
}

// Sets *complete if the checkpoint has a valid manifest, and all its files with the sizes listed
// there.
static fsdp_status fsdpi_ck_look_at(fsdp_checkpoint *ck, const char *path, int *complete) {
    fsdpi_ck_opened o;
    fsdpi_ck_manifest m;
    char file[FSDP_CHECKPOINT_PATH];
    int there = 0;
    memset(&o, 0, sizeof o);
    *complete = 0;
    fsdp_status status = fsdpi_ck_fetch_text(&ck->io, &o.bulk, path, "manifest.json", &there);
    if (!status && there) {
        const char *text = NULL;
        int64_t at = 0, nbytes = fsdpi_ck_take(&o.bulk, &at, &text);
        status = fsdpi_ck_get_manifest(&ck->io, text, nbytes, &m, &o.told);
        *complete = !status;
        for (int64_t i = 0; i < m.num_files && !status && *complete; i++) {
            *complete = fsdpi_ck_join(file, path, m.files[i].name);
            if (*complete) status = fsdpi_ck_open_path(&ck->io, file);
            if (status || !*complete) break;
            *complete = !ck->io.open.error && ck->io.open.nbytes == m.files[i].bytes;
            if (!ck->io.open.error) status = fsdpi_ck_close_path(&ck->io, status);
        }
    }
    fsdpi_ck_opened_end(&ck->io, &o);
    // A broken checkpoint is skipped. A failure of the file system, or a lack of memory, fails the
    // call.
    return status == FSDP_ERR_CORRUPT || status == FSDP_ERR_UNSUPPORTED ? FSDP_OK : status;
}

static fsdp_status fsdpi_ck_find_here(fsdp_checkpoint *ck, const char *dir, int64_t max_step,
                                      char *path, int64_t *step) {
    char leaf[FSDPI_CK_LEAF];
    int complete = 0;
    ck->found.steps = (int64_t *)ck->steps.ptr;
    ck->found.below = max_step < 0 || max_step == INT64_MAX ? INT64_MAX : max_step + 1;
    snprintf(ck->io.path, sizeof ck->io.path, "%s", dir);
    fsdp_status status = fsdpi_ck_run(ck, ck->io.call, fsdpi_ck_find_steps, ck);
    for (int32_t i = 0; i < ck->found.num && !status && !complete; i++) {
        *step = ck->found.steps[i];
        fsdpi_ck_step_name(leaf, *step);
        if (fsdpi_ck_join(path, dir, leaf)) status = fsdpi_ck_look_at(ck, path, &complete);
    }
    if (!complete) *step = -1;
    return status;
}

FSDP_API fsdp_status fsdp_checkpoint_find(fsdp_checkpoint *ck, const char *dir, int64_t max_step,
                                          char *path, size_t cap, int64_t *step) {
    static const char *const call = "checkpoint_find";
    char found[FSDP_CHECKPOINT_PATH] = "", leaf[FSDPI_CK_LEAF];
    int64_t newest = -1;
    fsdp_status mine = FSDP_OK;
    if (!ck) return fsdp_fail_null(NULL, call, "ck");
    fsdp_status status = fsdpi_ck_finish(ck, call);
    if (status) return status;
    if (ck->hung) mine = fsdpi_ck_worker_status(ck, call);
    else if (!dir || !path || !step || !cap)
        mine = fsdp_fail_null(ck->world, call, "dir, path or step");
    else if (strlen(dir) + FSDPI_CK_LEAF > cap || strlen(dir) + FSDPI_CK_LEAF > sizeof found)
        mine = fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                         "[E446] %s: a path in dir does not fit: pass room for %llu bytes", call,
                         (unsigned long long)(strlen(dir) + FSDPI_CK_LEAF));
    status = fsdpi_ck_agree(ck->world, call, mine);
    if (status) return status;
    fsdpi_ck_io_of(ck, call);
    if (ck->rank == 0) mine = fsdpi_ck_find_here(ck, dir, max_step, found, &newest);
    status = fsdpi_ck_finish_phase(ck, call, mine);
    if (!status) status = fsdp_broadcast(ck->world, NULL, &newest, 8, 0);
    path[0] = 0;
    *step = -1;
    if (status || newest < 0) return status;
    *step = newest;
    fsdpi_ck_step_name(leaf, newest);
    snprintf(path, cap, "%s/%s", dir, leaf);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_checkpoint_load(fsdp_checkpoint *ck, const char *path,
                                          const fsdp_checkpoint_load_desc *desc) {
    static const char *const call = "checkpoint_load";
    fsdpi_ck_buffer room = {NULL, 0};
    fsdpi_ck_args args, first;
    int64_t begin = fsdpi_monotonic_ns(NULL);
    if (!ck) return fsdp_fail_null(NULL, call, "ck");
    fsdp_status status = fsdpi_ck_finish(ck, call);
    if (status) return status;
    fsdp_status mine = fsdpi_ck_reserve(ck->model, &room, (int64_t)sizeof(fsdpi_ck_load), 0);
    fsdpi_ck_load *l = (fsdpi_ck_load *)room.ptr;
    if (!mine) memset(l, 0, sizeof *l);
    if (!ck->hung) fsdpi_ck_io_of(ck, call); // otherwise the hung thread still uses ck->io
    if (!mine)
        mine = fsdp_desc_read(ck->world, &l->desc, desc, sizeof l->desc,
                              "fsdp_checkpoint_load_desc");
    if (!mine && (!path || !*path || strlen(path) >= FSDP_CHECKPOINT_PATH - 300))
        mine = fsdp_fail(ck->world, FSDP_ERR_INVALID_ARG,
                         "[E447] %s: path is empty or too long: pass a checkpoint's directory, or "
                         "a .safetensors file",
                         call);
    if (!mine)
        mine = ck->hung ? fsdpi_ck_worker_status(ck, call)
                        : fsdp_call_begin(ck->model, FSDP_CALL_LOAD, call);
    fsdpi_ck_load_args(l, path, &args);
    first = args;
    status = fsdp_broadcast(ck->world, NULL, &first, sizeof first, 0);
    if (!mine && !status) mine = fsdpi_ck_same_args(ck, call, &args, &first);
    if (!status) status = fsdpi_ck_agree(ck->world, call, mine);
    int began = !status; // otherwise no worker can be using the memory
    if (began) {
        l->ck = ck;
        l->io = &ck->io;
        status = fsdpi_ck_load_all(l, path);
        if (!status) fsdpi_ck_report_load(l, begin);
        fsdpi_ck_opened_end(l->io, &l->opened);
        if (l->reader.io) fsdpi_ck_reader_end(&l->reader);
        fsdpi_ck_drop(l->io, &l->numbers);
        fsdpi_ck_drop(l->io, &l->flags);
    }
    if (!ck->hung || !began) fsdpi_ck_free(ck->model, &room);
    return status;
}

FSDP_API fsdp_status fsdp_checkpoint_last_report(const fsdp_checkpoint *ck,
                                                 fsdp_checkpoint_report *out) {
    if (!ck || !out)
        return fsdp_fail_null(ck ? ck->world : NULL, "checkpoint_last_report", "ck or out");
    *out = ck->report;
    return FSDP_OK;
}

FSDP_API int64_t fsdp_checkpoint_nbytes(fsdp_checkpoint *ck) {
    uint64_t layout;
    if (!ck || ck->hung) return -1;
    if (ck->save.stage_of != FSDPI_CK_IDLE) return ck->save.stage_bytes;
    if (fsdpi_ck_prepare(ck, "checkpoint_nbytes", &layout)) return -1;
    return fsdpi_ck_stage_for(ck, 1);
}

#endif // FSDPI_CHECKPOINT_API_H
