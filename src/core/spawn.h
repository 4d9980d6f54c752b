/* core/spawn.h - ranks that a program starts itself: fsdp_spawn

   Callers: programs.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_SPAWN_H
#define FSDPI_CORE_SPAWN_H

#include "alloc.h"
#include "error.h"
#include "objects.h"
#include "../base/os.h"
#include "../base/reduce.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

// Processes report the result of fn through a pipe, in records that are written whole. A rank
// reports before it aborts its world: so the first report is the cause of the others.

extern char *fsdpi_strsignal(int sig) __asm__("strsignal");

typedef struct fsdpi_spawn_report {
    int32_t rank, status; // FSDP_OK: fn returned 0
    char text[FSDPI_TEXT];
} fsdpi_spawn_report;

typedef struct fsdpi_spawn {
    fsdp_world_desc world; // desc of every rank, except rank and local_rank
    fsdp_rank_fn fn;
    void *arg;
    int num_ranks, grace_ms;
    int pipe[2];              // if ranks are processes
    fsdp_threads common;      // if ranks are threads
    uint32_t lock;            // if ranks are threads: guards `first`
    fsdpi_spawn_report first; // the first failure; status FSDP_OK: none
} fsdpi_spawn;

typedef struct fsdpi_spawn_rank {
    fsdpi_spawn *spawn;
    pthread_t thread;
    fsdp_world *world;
    int rank, pid, ended, reported, started;
} fsdpi_spawn_rank;

static void fsdpi_spawn_text(fsdpi_spawn_report *r, const char *text) {
    char prefix[24];
    int used = snprintf(prefix, sizeof prefix, "rank %d: ", (int)r->rank);
    int named = strncmp(text, prefix, (size_t)used) == 0;
    snprintf(r->text, sizeof r->text, "%s%.*s", named ? "" : prefix, FSDPI_TEXT - 32, text);
}

static void fsdpi_spawn_tell(fsdpi_spawn *s, const fsdpi_spawn_report *r) {
    if (s->world.threads) {
        fsdpi_lock(&s->lock);
        if (r->status && !s->first.status) s->first = *r;
        fsdpi_unlock(&s->lock);
    } else {
        ssize_t written = write(s->pipe[1], r, sizeof *r); // less than PIPE_BUF: all or nothing
        (void)written; // nothing: the parent has ended, and this process ends with it
    }
}

// Runs one rank: init, fn, report, shutdown.
static fsdp_status fsdpi_spawn_run(fsdpi_spawn_rank *me) {
    fsdpi_spawn *s = me->spawn;
    fsdp_world_desc d = s->world;
    fsdpi_spawn_report r = FSDP_ZERO;
    char text[64];
    d.rank = d.local_rank = r.rank = me->rank;
    r.status = (int32_t)fsdp_init(&d, &me->world);
    fsdp_world *world = me->world;
    if (r.status) {
        fsdpi_spawn_text(&r, fsdp_last_error(NULL));
        fsdpi_spawn_tell(s, &r);
        return (fsdp_status)r.status;
    }
    int value = s->fn(world, s->arg);
    fsdp_status failed = fsdpi_failed(world);
    r.status = (int32_t)failed; // fn has failed for this reason, or has not noticed it
    if (!failed && value)
        r.status = value > 0 && value <= FSDP_ERR_INTERNAL ? value : (int32_t)FSDP_ERR_INTERNAL;
    snprintf(text, sizeof text, "[E512] the rank's function returned %d, expected 0", value);
    int said = (r.status == value || failed) && *fsdp_last_error(world);
    if (r.status) fsdpi_spawn_text(&r, said ? fsdp_last_error(world) : text);
    fsdpi_spawn_tell(s, &r);
    if (r.status && !failed) fsdp_abort(world, text);
    (void)fsdp_shutdown(world);
    return (fsdp_status)r.status;
}

static void fsdpi_spawn_left(void *arg) { // fn has ended its own thread
    fsdpi_spawn_rank *me = (fsdpi_spawn_rank *)arg;
    fsdpi_spawn_report r = {me->rank, FSDP_ERR_PEER_LOST, ""};
    snprintf(r.text, sizeof r.text,
             "[E517] rank %d has ended its thread inside its function: return from it", me->rank);
    fsdpi_spawn_tell(me->spawn, &r);
    fsdp_abort(me->world, r.text);
    (void)fsdp_shutdown(me->world);
}

static void *fsdpi_spawn_thread(void *arg) {
    pthread_cleanup_push(fsdpi_spawn_left, arg);
    (void)fsdpi_spawn_run((fsdpi_spawn_rank *)arg);
    pthread_cleanup_pop(0);
    return NULL;
}

static void fsdpi_spawn_threads(fsdpi_spawn *s, fsdpi_spawn_rank *ranks) {
    s->common.size = s->num_ranks;
    s->world.threads = &s->common;
    for (int k = 0; k < s->num_ranks; k++) {
        int rc = pthread_create(&ranks[k].thread, NULL, fsdpi_spawn_thread, &ranks[k]);
        ranks[k].started = rc == 0;
        if (rc == 0) continue;
        // This rank does not come, so the ranks before it fail by their deadline.
        fsdpi_spawn_report r = {k, FSDP_ERR_OUT_OF_MEMORY, ""};
        snprintf(r.text, sizeof r.text, "rank %d: [E513] the system cannot start its thread: %s", k,
                 strerror(rc));
        fsdpi_spawn_tell(s, &r);
        break;
    }
    for (int k = 0; k < s->num_ranks; k++)
        if (ranks[k].started) (void)pthread_join(ranks[k].thread, NULL);
}

static void fsdpi_spawn_child(fsdpi_spawn_rank *me, int parent) {
    (void)close(me->spawn->pipe[0]);
    fsdpi_end_with_parent(); // the parent may have died before this call
    if (getppid() != parent) _exit(1);
    fsdpi_fill_std_fds(); // a print to a closed 0, 1 or 2 could reach a file of the rank
    fsdp_status status = fsdpi_spawn_run(me);
    (void)fflush(NULL);
    _exit((int)status);
}

static void fsdpi_spawn_kill(const fsdpi_spawn *s, const fsdpi_spawn_rank *ranks, int sig) {
    for (int k = 0; k < s->num_ranks; k++)
        if (ranks[k].pid > 0 && !ranks[k].ended) (void)fsdpi_kill(ranks[k].pid, sig);
}

// Reports a rank that ended without a report: it was killed or called exit. That is the cause of
// reports of lost peers.
static void fsdpi_spawn_lost(fsdpi_spawn *s, int rank, int how) {
    fsdpi_spawn_report r = {rank, FSDP_ERR_PEER_LOST, ""};
    if (s->first.status && s->first.status != (int32_t)FSDP_ERR_PEER_LOST) return;
    if (WIFSIGNALED(how))
        snprintf(r.text, sizeof r.text, "[E514] rank %d was killed by signal %d (%s)", rank,
                 WTERMSIG(how), fsdpi_strsignal(WTERMSIG(how)));
    else
        snprintf(r.text, sizeof r.text,
                 "[E515] rank %d ended with exit code %d inside its function", rank,
                 WEXITSTATUS(how));
    s->first = r;
}

// Asks once which processes have ended, and reads their reports. Returns how many are running.
static int fsdpi_spawn_look(fsdpi_spawn *s, fsdpi_spawn_rank *ranks, int *how, int signalled) {
    int running = 0;
    fsdpi_spawn_report r;
    struct pollfd p = {s->pipe[0], POLLIN, 0};
    for (int k = 0; k < s->num_ranks; k++) {
        if (ranks[k].pid <= 0 || ranks[k].ended) continue;
        int rc = (int)waitpid(ranks[k].pid, &how[k], WNOHANG);
        if (rc == ranks[k].pid) ranks[k].ended = 1;
        else if (rc < 0 && fsdpi_kill(ranks[k].pid, 0))
            ranks[k].ended = 1; // a handler of the program has reaped it
        else running++;
    }
    while (poll(&p, 1, 0) > 0 && read(s->pipe[0], &r, sizeof r) == (ssize_t)sizeof r) {
        if (r.rank < 0 || r.rank >= s->num_ranks) continue; // fn may have written to the pipe
        r.text[sizeof r.text - 1] = 0;
        ranks[r.rank].reported = 1;
        if (r.status && !s->first.status) s->first = r;
    }
    for (int k = 0; k < s->num_ranks; k++) {
        if (!ranks[k].ended || ranks[k].reported) continue;
        ranks[k].reported = 1;
        if (!signalled) fsdpi_spawn_lost(s, k, how[k]);
    }
    return running;
}

static fsdp_status fsdpi_spawn_processes(fsdpi_spawn *s, fsdpi_spawn_rank *ranks, int *how) {
    int parent = (int)getpid(), signalled = 0;
    int64_t failed_at = 0;
    if (fsdpi_pipe(s->pipe))
        return fsdp_fail(NULL, FSDP_ERR_IO, "[E510] fsdp_spawn: the system cannot make a pipe: %s",
                         strerror(errno));
    (void)fflush(NULL); // otherwise every child would print the text buffered here
    for (int k = 0; k < s->num_ranks && !s->first.status; k++) {
        ranks[k].pid = (int)fork();
        if (ranks[k].pid == 0) fsdpi_spawn_child(&ranks[k], parent);
        if (ranks[k].pid > 0) continue;
        s->first.rank = k;
        s->first.status = (int32_t)FSDP_ERR_OUT_OF_MEMORY;
        snprintf(s->first.text, sizeof s->first.text,
                 "rank %d: [E516] the system cannot fork its process: %s", k, strerror(errno));
    }
    struct pollfd p = {s->pipe[0], POLLIN, 0};
    while (fsdpi_spawn_look(s, ranks, how, signalled)) {
        int64_t now = fsdpi_monotonic_ns(NULL);
        if (s->first.status && !failed_at) failed_at = now;
        int64_t since_ms = failed_at ? (now - failed_at) / 1000000 : -1;
        // The others see that the world is aborted, and end by themselves. Ranks that go on
        // computing get SIGTERM after half of grace_ms, and SIGKILL after all of it.
        if (signalled < 1 && since_ms >= s->grace_ms / 2)
            signalled = 1, fsdpi_spawn_kill(s, ranks, 15 /* SIGTERM */);
        if (signalled < 2 && since_ms >= s->grace_ms)
            signalled = 2, fsdpi_spawn_kill(s, ranks, 9 /* SIGKILL */);
        (void)poll(&p, 1, 5); // poll does not report that a process has ended: look again soon
    }
    (void)close(s->pipe[0]);
    (void)close(s->pipe[1]);
    return FSDP_OK;
}

FSDP_API FSDP_COLD fsdp_status fsdp_spawn(const fsdp_spawn_desc *desc, fsdp_rank_fn fn, void *arg) {
    fsdp_spawn_desc d;
    fsdpi_spawn s = FSDP_ZERO;
    char job[64];
    fsdp_status status = FSDP_OK;
    FSDPI_TRY(fsdp_desc_read(NULL, &d, desc, sizeof d, "fsdp_spawn_desc"));
    FSDPI_TRY(fsdp_desc_read(NULL, &s.world, d.world, sizeof s.world, "fsdp_world_desc"));
    if (!fn || d.num_ranks < 1 || d.num_ranks > FSDPI_MAX_SRCS || d.grace_ms < 0)
        return fsdpi_invalid_arg(
            NULL,
            "[E511] fsdp_spawn: num_ranks is %d, grace_ms is %d, fn is %s: expected "
            "num_ranks from 1 to %d, grace_ms >= 0 and a function",
            d.num_ranks, d.grace_ms, fn ? "given" : "NULL", FSDPI_MAX_SRCS);
    // Two threads may make this call at once: the address of `s` tells them apart.
    snprintf(job, sizeof job, "spawn-%d-%llx-%p", (int)getpid(),
             (unsigned long long)fsdpi_monotonic_ns(NULL), (void *)&s);
    s.world.world_size = s.num_ranks = d.num_ranks;
    s.world.job = job;
    s.world.store = "host:"; // whatever the environment says
    s.world.threads = NULL;
    s.fn = fn;
    s.arg = arg;
    s.grace_ms = d.grace_ms ? d.grace_ms : 1000;
    fsdp_allocator allocator = s.world.allocator;
    if (!allocator.alloc || !allocator.free)
        allocator.alloc = fsdpi_libc_alloc, allocator.free = fsdpi_libc_free;
    size_t bytes = (size_t)d.num_ranks * (sizeof(fsdpi_spawn_rank) + sizeof(int));
    fsdpi_spawn_rank *ranks = (fsdpi_spawn_rank *)fsdpi_alloc(&allocator, bytes);
    if (!ranks) return fsdpi_no_memory(NULL, "fsdp_spawn", "", bytes);
    for (int k = 0; k < d.num_ranks; k++) ranks[k].spawn = &s, ranks[k].rank = k;
    if (d.threads) fsdpi_spawn_threads(&s, ranks);
    else status = fsdpi_spawn_processes(&s, ranks, (int *)(void *)(ranks + d.num_ranks));
    fsdpi_free(&allocator, ranks);
    if (status || !s.first.status) return status;
    return fsdp_fail(NULL, (fsdp_status)s.first.status, "fsdp_spawn: %s", s.first.text);
}

#endif // FSDPI_CORE_SPAWN_H
