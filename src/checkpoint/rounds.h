/* checkpoint/rounds.h - ranks that wait for files meet every 100 ms, and fail together

   In a phase each rank makes its own file calls. Meanwhile all ranks make a small collective, a
   round, every 100 ms until no rank is busy. So no collective waits long for a disk.
   Callers: api.h (fsdpi_ck_agree), save.h (fsdpi_ck_agree), load.h (fsdpi_ck_finish_phase) and
     others.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_ROUNDS_H
#define FSDPI_CHECKPOINT_ROUNDS_H

#include "../base/os.h"
#include "files.h"
#include "objects.h"
#include "worker.h"

#include <stdio.h>
#include <string.h>

#define FSDPI_CK_NAP INT64_C(100000000) // nanoseconds between two rounds of a rank that waits

/* Makes one round. Sets *any_busy and *any_failed if a rank is busy or has failed. */
static fsdp_status fsdpi_ck_round(fsdp_checkpoint *ck, int busy, int failed, int *any_busy,
                                  int *any_failed) {
    int32_t v[2] = {busy, failed};
    fsdp_status status = fsdp_all_reduce(ck->world, NULL, v, 2, FSDP_I32, FSDP_MAX);
    *any_busy = status ? 0 : v[0];
    *any_failed = status ? 1 : v[1];
    return status;
}

// Returns 1 if two texts report the same failure on two ranks. Both begin with "rank N: [E".
static int fsdpi_ck_is_same_text(const char *a, const char *b) {
    const char *x = strchr(a, '['), *y = strchr(b, '[');
    return x && y && strcmp(x, y) == 0;
}

/* Agrees on a failure: if `mine` is one on any rank, all ranks return that of the lowest such
   rank, with the text of its last error. A rank that has logged an equal text does not log it
   again. */
static fsdp_status fsdpi_ck_agree(fsdp_world *world, const char *call, fsdp_status mine) {
    struct {
        int32_t status;
        char text[1024]; // as long as a world's last error
    } told;
    const int32_t rank = fsdp_rank(world), size = fsdp_world_size(world);
    int32_t first = mine ? rank : size;
    fsdp_status status = fsdp_all_reduce(world, NULL, &first, 1, FSDP_I32, FSDP_MIN);
    if (status || first >= size) return status;
    memset(&told, 0, sizeof told);
    told.status = (int32_t)mine;
    if (rank == first) snprintf(told.text, sizeof told.text, "%s", fsdp_last_error(world));
    status = fsdp_broadcast(world, NULL, &told, sizeof told, first);
    if (status) return status;
    if (rank == first || (mine && fsdpi_ck_is_same_text(told.text, fsdp_last_error(world))))
        return (fsdp_status)told.status;
    return fsdp_fail(world, (fsdp_status)told.status, "[E421] %s failed on %s", call, told.text);
}

// The arguments of a save or a load. Each rank compares them with those of rank 0.
typedef struct fsdpi_ck_args {
    uint64_t nonce; // for a save: fsdpi_ck_nonce
    int64_t step;
    int32_t params_only, has_source, verify, reserved;
    char path[FSDP_CHECKPOINT_PATH];
} fsdpi_ck_args;

static fsdp_status fsdpi_ck_same_number(fsdp_checkpoint *ck, const char *call, const char *what,
                                        int64_t mine, int64_t first) {
    return mine == first ? FSDP_OK
                         : fsdp_fail(ck->world, FSDP_ERR_MISMATCH,
                                     "[E448] %s: %s is %lld here and %lld on rank 0: pass the same "
                                     "on all ranks",
                                     call, what, (long long)mine, (long long)first);
}
static fsdp_status fsdpi_ck_same_args(fsdp_checkpoint *ck, const char *call,
                                      const fsdpi_ck_args *mine, const fsdpi_ck_args *first) {
    if (strcmp(mine->path, first->path) != 0)
        return fsdp_fail(ck->world, FSDP_ERR_MISMATCH,
                         "[E449] %s: the path is '%.300s' here and '%.300s' on rank 0: pass the "
                         "same on all ranks",
                         call, mine->path, first->path);
    fsdp_status status = fsdpi_ck_same_number(ck, call, "step", mine->step, first->step);
    if (!status)
        status = fsdpi_ck_same_number(ck, call, "desc.params_only", mine->params_only,
                                      first->params_only);
    if (!status)
        status = fsdpi_ck_same_number(ck, call, "desc.source (1: there is one)", mine->has_source,
                                      first->has_source);
    return status ? status
                  : fsdpi_ck_same_number(ck, call, "desc.verify", mine->verify, first->verify);
}

/* Returns the worker's failure as that of this call, or the failure of a hung worker. A hung
   worker's memory is never freed. */
static fsdp_status fsdpi_ck_worker_status(fsdp_checkpoint *ck, const char *call) {
    if (ck->hung)
        return fsdp_fail(ck->world, FSDP_ERR_IO,
                         "[E422] %s: no progress for %d ms in %s of %s: the file system hangs; "
                         "this object cannot be used any more",
                         call, ck->desc.stall_ms, ck->disk.doing, ck->disk.path);
    return ck->disk.status
               ? fsdp_fail(ck->world, ck->disk.status, "[E423] %s: %s", call, ck->disk.text)
               : FSDP_OK;
}

// Marks the worker as hung if none of its file calls has ended for stall_ms.
static void fsdpi_ck_look(fsdp_checkpoint *ck, fsdpi_ck_watch *watch) {
    uint32_t moves = FSDPI_LOAD(&ck->disk.moves);
    int64_t now = fsdpi_monotonic_ns(NULL);
    if (!watch->since || moves != watch->moves) {
        watch->moves = moves;
        watch->since = now;
    }
    if (now - watch->since <= (int64_t)ck->desc.stall_ms * 1000000) return;
    ck->hung = 1;
    FSDPI_STORE(&ck->disk.left, 1);
}

/* Begins a job of the worker. */
static fsdp_status fsdpi_ck_submit(fsdp_checkpoint *ck, const char *call, fsdpi_ck_job job,
                                   void *arg) {
    int error = fsdpi_ck_start(&ck->worker);
    if (error)
        return fsdp_fail(ck->world, FSDP_ERR_OUT_OF_MEMORY,
                         "[E424] %s: cannot start a worker thread: %s (%d)", call, strerror(error),
                         error);
    fsdpi_ck_forget(&ck->disk);
    ck->disk.doing = "the start", ck->disk.path = "the worker thread"; // for a stall text
    fsdpi_ck_give(&ck->worker, job, arg);
    return FSDP_OK;
}

/* Waits for the worker, with rounds meanwhile. Other ranks wait for their workers, or for this one.
   */
static fsdp_status fsdpi_ck_await(fsdp_checkpoint *ck) {
    fsdpi_ck_watch watch = {0, 0};
    int any_busy, any_failed;
    fsdp_status status = FSDP_OK;
    while (!ck->hung && fsdpi_ck_is_busy(&ck->worker)) {
        int64_t end = fsdpi_monotonic_ns(NULL) + FSDPI_CK_NAP, now;
        while (fsdpi_ck_is_busy(&ck->worker) && (now = fsdpi_monotonic_ns(NULL)) < end)
            fsdpi_ck_nap(&ck->worker, end - now);
        if (!fsdpi_ck_is_busy(&ck->worker)) break;
        fsdpi_ck_look(ck, &watch);
        if (!ck->hung && !status) status = fsdpi_ck_round(ck, 1, 0, &any_busy, &any_failed);
    }
    return status;
}

// Waits for the worker without rounds: the world has failed, or only this rank ends.
static void fsdpi_ck_await_alone(fsdp_checkpoint *ck) {
    fsdpi_ck_watch watch = {0, 0};
    fsdpi_ck_ring(&ck->worker.to_worker);
    while (!ck->hung && fsdpi_ck_is_busy(&ck->worker)) {
        fsdpi_ck_nap(&ck->worker, FSDPI_CK_NAP);
        fsdpi_ck_look(ck, &watch);
    }
}

/* Runs one job of the worker, as a step of a phase. */
static fsdp_status fsdpi_ck_run(fsdp_checkpoint *ck, const char *call, fsdpi_ck_job job,
                                void *arg) {
    fsdp_status status = fsdpi_ck_submit(ck, call, job, arg);
    if (!status) status = fsdpi_ck_await(ck);
    return status ? status : fsdpi_ck_worker_status(ck, call);
}

/* Makes rounds until all ranks have ended the phase. `mine` is the result of this rank. */
static fsdp_status fsdpi_ck_wait_for_ranks(fsdp_checkpoint *ck, fsdp_status mine, int *any_failed) {
    int any_busy = 1;
    fsdp_status status = FSDP_OK;
    while (!status && any_busy) status = fsdpi_ck_round(ck, 0, mine != 0, &any_busy, any_failed);
    return status;
}
/* Waits as above. All ranks return OK, or the failure of the lowest rank that failed. */
static fsdp_status fsdpi_ck_finish_phase(fsdp_checkpoint *ck, const char *call, fsdp_status mine) {
    int any_failed = 0;
    fsdp_status status = fsdpi_ck_wait_for_ranks(ck, mine, &any_failed);
    return status ? status : any_failed ? fsdpi_ck_agree(ck->world, call, mine) : FSDP_OK;
}

#endif // FSDPI_CHECKPOINT_ROUNDS_H
