/* checkpoint/worker.h - one thread that makes file calls, so that the caller's need not wait

   Hands jobs to the thread, one at a time. A job is a function with an argument. It uses files and
   memory that the caller has prepared, and neither the world nor the model.
   State: fsdpi_ck_worker: a job, and whether it is done.
   Callers: save.h and rounds.h (fsdpi_ck_ring), api.h (fsdpi_ck_stop) and 2 other files.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_WORKER_H
#define FSDPI_CHECKPOINT_WORKER_H

#include "../base/os.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

// Wakes all threads that wait for the bell, a futex that counts rings. A waiting thread first reads
// the count and then tests its condition. It sleeps only if the count has not changed since.
static void fsdpi_ck_ring(uint32_t *bell) {
    __atomic_add_fetch(bell, 1, __ATOMIC_RELEASE);
    fsdpi_futex_wake_all(bell, 0);
}

typedef void (*fsdpi_ck_job)(void *arg);

typedef struct fsdpi_ck_watch { // since: when the last file call ended, in ns
    uint32_t moves;
    int64_t since;
} fsdpi_ck_watch;

typedef struct fsdpi_ck_worker {
    pthread_t thread;
    int started, pid; // pid: the process that has the thread
    uint32_t to_worker, to_caller; // bells
    uint32_t busy;                 // 1: a job was handed over and has not ended
    uint32_t stop;
    fsdpi_ck_job job;
    void *arg;
} fsdpi_ck_worker;

static void *fsdpi_ck_work(void *arg) {
    fsdpi_ck_worker *w = (fsdpi_ck_worker *)arg;
    // A write beyond the file size limit (ulimit -f) then returns EFBIG without a signal.
    (void)fsdpi_block_signals((uint64_t)1 << (SIGXFSZ - 1));
    for (;;) {
        uint32_t seen = FSDPI_LOAD(&w->to_worker);
        if (FSDPI_LOAD(&w->busy)) {
            w->job(w->arg);
            FSDPI_STORE(&w->busy, 0);
            fsdpi_ck_ring(&w->to_caller);
        } else if (FSDPI_LOAD(&w->stop)) {
            return NULL;
        } else {
            fsdpi_futex_wait(&w->to_worker, seen, 1000000000, 0);
        }
    }
}

// Starts the thread. Returns 0, or an errno value if there is no thread.
static int fsdpi_ck_start(fsdpi_ck_worker *w) {
    if (w->started) return 0;
    int error = pthread_create(&w->thread, NULL, fsdpi_ck_work, w);
    w->started = !error;
    w->pid = (int)getpid();
    return error;
}
static void fsdpi_ck_give(fsdpi_ck_worker *w, fsdpi_ck_job job, void *arg) {
    w->job = job;
    w->arg = arg;
    FSDPI_STORE(&w->busy, 1);
    fsdpi_ck_ring(&w->to_worker);
}
static int fsdpi_ck_is_busy(fsdpi_ck_worker *w) {
    return FSDPI_LOAD(&w->busy) && w->pid == (int)getpid();
}

// Waits until the worker has rung or `ns` nanoseconds have passed. May return early.
static void fsdpi_ck_nap(fsdpi_ck_worker *w, int64_t ns) {
    uint32_t seen = FSDPI_LOAD(&w->to_caller);
    if (fsdpi_ck_is_busy(w)) fsdpi_futex_wait(&w->to_caller, seen, ns, 0);
}
static void fsdpi_ck_stop(fsdpi_ck_worker *w) {
    if (!w->started) return;
    FSDPI_STORE(&w->stop, 1);
    fsdpi_ck_ring(&w->to_worker);
    (void)pthread_join(w->thread, NULL);
    w->started = 0;
}

#endif // FSDPI_CHECKPOINT_WORKER_H
