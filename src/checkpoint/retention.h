/* checkpoint/retention.h - which directories are checkpoints, and the end of old ones

   Names of checkpoints in a run's directory, and removal of old ones by rank 0's worker. A
   checkpoint is renamed before it is removed, so that no reader finds a partial one.
   Callers: export.h (fsdpi_ck_step_of), save.h (fsdpi_ck_remove_dir) and api.h
     (fsdpi_ck_list_steps).

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_RETENTION_H
#define FSDPI_CHECKPOINT_RETENTION_H

#include "files.h"
#include "manifest.h"
#include "objects.h"
#include "../safetensors/box.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    FSDPI_CK_MOST_STEPS = 4096, // in one pass; a later save handles the rest
    FSDPI_CK_MOST_DEPTH = 16    // levels of directories that another program put there
};

// Returns the number in step-NNNNNNNN if a manifest can hold it, or -1 for another name.
static int64_t fsdpi_ck_step_of(const char *name) {
    char again[FSDPI_CK_LEAF];
    int64_t step = 0;
    if (strncmp(name, "step-", 5) != 0) return -1;
    for (const char *c = name + 5; *c; c++) {
        if (*c < '0' || *c > '9' || step > (FSDPI_ST_MOST - (*c - '0')) / 10) return -1;
        step = 10 * step + (*c - '0');
    }
    fsdpi_ck_step_name(again, step);
    return strcmp(again, name) == 0 ? step : -1;
}

static int fsdpi_ck_by_step(const void *a, const void *b) { // newest first
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x > y ? -1 : x < y;
}
// Notes the step that a name stands for. If the list is full, the newest steps stay.
static int fsdpi_ck_note_step(void *arg, const char *name) {
    fsdpi_ck_listing *l = (fsdpi_ck_listing *)arg;
    int64_t step = fsdpi_ck_step_of(name);
    if (step < 0 || step >= l->below) return 0;
    if (l->num < FSDPI_CK_MOST_STEPS) {
        l->steps[l->num++] = step;
        return 0;
    }
    int32_t oldest = 0;
    for (int32_t i = 1; i < l->num; i++)
        if (l->steps[i] < l->steps[oldest]) oldest = i;
    if (step > l->steps[oldest]) l->steps[oldest] = step;
    return 0;
}
/* Lists the steps in dir, newest first. */
static fsdp_status fsdpi_ck_list_steps(fsdpi_ck_disk *d, const char *dir, fsdpi_ck_listing *l) {
    l->num = 0;
    if (fsdpi_ck_begin(d, "list", dir)) return d->status;
    int error = d->ops->list(d->user, dir, fsdpi_ck_note_step, l);
    if (l->num) qsort(l->steps, (size_t)l->num, sizeof *l->steps, fsdpi_ck_by_step);
    return fsdpi_ck_end(d, error, dir);
}

typedef struct fsdpi_ck_removal {
    fsdpi_ck_disk *d;
    const char *dir;
    int depth; // depth of the entries of `dir`
    char path[FSDP_CHECKPOINT_PATH];
} fsdpi_ck_removal;

static int fsdpi_ck_remove_tree(fsdpi_ck_disk *d, const char *path, int depth);
static int fsdpi_ck_remove_name(void *arg, const char *name) {
    fsdpi_ck_removal *r = (fsdpi_ck_removal *)arg;
    if (r->depth < FSDPI_CK_MOST_DEPTH && fsdpi_ck_join(r->path, r->dir, name))
        (void)fsdpi_ck_remove_tree(r->d, r->path, r->depth);
    return __atomic_load_n(&r->d->left, __ATOMIC_ACQUIRE) != 0;
}
// Removes a file, a link (not its target), or a real directory with its contents. Returns an errno
// value.
static int fsdpi_ck_remove_tree(fsdpi_ck_disk *d, const char *path, int depth) {
    fsdpi_ck_removal r;
    int error = d->ops->remove(d->user, path, 0);
    if (!fsdpi_ck_moved(d)) return EIO;
    if (error != EISDIR) return error;
    r.d = d;
    r.dir = path;
    r.depth = depth + 1;
    error = d->ops->list(d->user, path, fsdpi_ck_remove_name, &r);
    if (!fsdpi_ck_moved(d)) return EIO;
    return error ? error : d->ops->remove(d->user, path, 1);
}
/* Removes a directory and as much of its contents as possible. Returns an errno value. */
static int fsdpi_ck_remove_dir(fsdpi_ck_disk *d, const char *dir) {
    int error = 0;
    for (int tries = 0; tries < 3; tries++) { // a listing may miss names while others are removed
        error = fsdpi_ck_remove_tree(d, dir, 0);
        if (!error || error == ENOENT) return 0;
        if (__atomic_load_n(&d->left, __ATOMIC_ACQUIRE)) break;
    }
    return error;
}

typedef struct fsdpi_ck_leftovers {
    fsdpi_ck_disk *d;
    const char *dir;
    char path[FSDP_CHECKPOINT_PATH];
    int error;
} fsdpi_ck_leftovers;

// Removes leftovers of a killed job or a failed removal. With desc.keep the directory is the
// library's.
static int fsdpi_ck_remove_leftover(void *arg, const char *name) {
    fsdpi_ck_leftovers *l = (fsdpi_ck_leftovers *)arg;
    if (strncmp(name, ".tmp-step-", 10) != 0 && strncmp(name, ".tmp-delete-", 12) != 0) return 0;
    int error = fsdpi_ck_join(l->path, l->dir, name) ? fsdpi_ck_remove_dir(l->d, l->path) : 0;
    if (error) l->error = error;
    return 0;
}

/* Removes old checkpoints that desc.keep does not keep, after the commit of `step`. Returns an
   errno value if one could not be removed. */
static int fsdpi_ck_keep(fsdpi_ck_disk *d, const fsdp_checkpoint_desc *desc, const char *dir,
                         int64_t step, int64_t *steps) {
    fsdpi_ck_listing l = {steps, 0, step};
    fsdpi_ck_leftovers left;
    char from[FSDP_CHECKPOINT_PATH], to[FSDP_CHECKPOINT_PATH], name[FSDPI_CK_LEAF];
    int error = 0;
    if (desc->keep <= 0) return 0;
    if (fsdpi_ck_list_steps(d, dir, &l)) return d->error;
    if (fsdpi_ck_begin(d, "removal of old checkpoints", dir)) return EIO;
    for (int32_t i = 0; i < l.num; i++) {
        if (i < desc->keep - 1) continue; // `step` and these are the newest `keep`
        if (desc->keep_every > 0 && l.steps[i] % desc->keep_every == 0) continue;
        fsdpi_ck_step_name(name, l.steps[i]);
        int fits = fsdpi_ck_join(from, dir, name);
        snprintf(name, sizeof name, ".tmp-delete-%lld", (long long)l.steps[i]);
        fits = fits && fsdpi_ck_join(to, dir, name);
        int failed = fits ? d->ops->rename(d->user, from, to) : ENAMETOOLONG;
        if (failed) error = failed;
        if (!fsdpi_ck_moved(d)) return EIO;
    }
    left.d = d;
    left.dir = dir;
    left.error = 0;
    int failed = d->ops->list(d->user, dir, fsdpi_ck_remove_leftover, &left);
    return failed ? failed : left.error ? left.error : error;
}

#endif // FSDPI_CHECKPOINT_RETENTION_H
