/* checkpoint/worker.h - one thread that makes file calls, so that the caller's need not wait

   Hands jobs to the thread, one at a time. A job is a function with an argument. It uses files and
   memory that the caller has prepared, and neither the world nor the model.
   State: fsdpi_ck_worker: a job, and whether it is done.
   Callers: save.h (fsdpi_ck_now), api.h (fsdpi_ck_now), rounds.h (fsdpi_ck_now) and others.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_WORKER_H
#define FSDPI_CHECKPOINT_WORKER_H

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

struct fsdpi_ck_timespec {
    long tv_sec, tv_nsec;
};
extern long fsdpi_ck_syscall(long number, ...) __asm__("syscall");
extern int fsdpi_ck_clock(int clock, struct fsdpi_ck_timespec *out) __asm__("clock_gettime");

static int64_t fsdpi_ck_now(void) { // monotonic, in nanoseconds
    struct fsdpi_ck_timespec t;
    (void)fsdpi_ck_clock(1 /* CLOCK_MONOTONIC */, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#define FSDPI_CK_GET(p)    __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define FSDPI_CK_PUT(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)

// Wakes all threads that wait for the bell, a futex that counts rings. A waiting thread first reads
// the count and then tests its condition. It sleeps only if the count has not changed since.
static void fsdpi_ck_ring(uint32_t *bell) {
    __atomic_add_fetch(bell, 1, __ATOMIC_RELEASE);
    (void)fsdpi_ck_syscall(SYS_futex, bell, 129 /* wake, private */, 0x7FFFFFFF, NULL, NULL, 0);
}
static void fsdpi_ck_listen(uint32_t *bell, uint32_t seen, int64_t ns) {
    struct fsdpi_ck_timespec t;
    t.tv_sec = (long)(ns / 1000000000);
    t.tv_nsec = (long)(ns % 1000000000);
    (void)fsdpi_ck_syscall(SYS_futex, bell, 128 /* wait, private */, seen, &t, NULL, 0);
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
    uint64_t signals = (uint64_t)1 << (SIGXFSZ - 1);
    (void)fsdpi_ck_syscall(SYS_rt_sigprocmask, 0 /* SIG_BLOCK */, &signals, NULL, sizeof signals);
    for (;;) {
        uint32_t seen = FSDPI_CK_GET(&w->to_worker);
        if (FSDPI_CK_GET(&w->busy)) {
            w->job(w->arg);
            FSDPI_CK_PUT(&w->busy, 0);
            fsdpi_ck_ring(&w->to_caller);
        } else if (FSDPI_CK_GET(&w->stop)) {
            return NULL;
        } else {
            fsdpi_ck_listen(&w->to_worker, seen, 1000000000);
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
    FSDPI_CK_PUT(&w->busy, 1);
    fsdpi_ck_ring(&w->to_worker);
}
static int fsdpi_ck_is_busy(fsdpi_ck_worker *w) {
    return FSDPI_CK_GET(&w->busy) && w->pid == (int)getpid();
}

// Waits until the worker has rung or `ns` nanoseconds have passed. May return early.
static void fsdpi_ck_nap(fsdpi_ck_worker *w, int64_t ns) {
    uint32_t seen = FSDPI_CK_GET(&w->to_caller);
    if (fsdpi_ck_is_busy(w)) fsdpi_ck_listen(&w->to_caller, seen, ns);
}
static void fsdpi_ck_stop(fsdpi_ck_worker *w) {
    if (!w->started) return;
    FSDPI_CK_PUT(&w->stop, 1);
    fsdpi_ck_ring(&w->to_worker);
    (void)pthread_join(w->thread, NULL);
    w->started = 0;
}

#endif // FSDPI_CHECKPOINT_WORKER_H
