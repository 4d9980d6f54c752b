/* core/error.h - reports failures: texts, the log, and the end of a world

   State: fsdp_world.state, failure and error. The first failure of a world stays, and later calls
   return it. For failures without a world each thread has a text, the only writable static here.
   Callers: programs, world.h (fsdpi_invalid_arg), attach.h (fsdpi_null_of), extend.h
     (fsdpi_invalid_arg) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_ERROR_H
#define FSDPI_CORE_ERROR_H

#include "flight.h"
#include "../base/macros.h"
#include "objects.h"
#include "../base/os.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Returns the status of a call from the current function, unless it is FSDP_OK.
#define FSDPI_TRY(call)                                                                            \
    do {                                                                                           \
        fsdp_status fsdpi_tried = (call);                                                          \
        if (fsdpi_tried) return fsdpi_tried;                                                       \
    } while (0)

static __thread char fsdpi_thread_error[FSDPI_TEXT];

static void fsdpi_stderr_log(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)user;
    if (rank >= 0) fprintf(stderr, "[fsdp r%d] %s\n", rank, text);
    else fprintf(stderr, "[fsdp] %s\n", text);
}

static void fsdpi_log(const fsdp_world *w, int level, fsdp_status code, const char *text) {
    if (w && level > w->boot.log_level) return;
    if (w) (w->boot.logger.log)(level, code, w->rank, text, w->boot.logger.user);
    else fsdpi_stderr_log(level, code, -1, text, NULL);
}

static void fsdpi_set_error(fsdp_world *w, const char *text) {
    snprintf(w ? w->error : fsdpi_thread_error, FSDPI_TEXT, "%s", text);
}

static int fsdpi_is_child(const fsdp_world *w) {
    return FSDPI_LOAD(w->state) != 1 && !fsdpi_fork_value(w->state);
}

// Returns the status of a failed world. Fails with E215 in a forked child, whose copy of the world
// is not a rank; logs it once.
static FSDPI_NOINLINE fsdp_status fsdpi_why_failed(const fsdp_world *w) {
    const uint32_t state = fsdpi_fork_value(w->state);
    fsdp_world *copy = (fsdp_world *)(uintptr_t)w;
    if (state) return (fsdp_status)(state - 1);
    snprintf(copy->failure, sizeof copy->failure,
             "rank %d: [E215] process %d is a child that the rank's process has forked: use the "
             "world in the rank's process alone, and call exec or _exit in the child",
             w->rank, (int)getpid());
    fsdpi_log(w, FSDP_LOG_ERROR, FSDP_ERR_INVALID_STATE, w->failure);
    copy->boot.log_level = 0; // log it once
    return FSDP_ERR_INVALID_STATE;
}

static inline fsdp_status fsdpi_failed(const fsdp_world *w) {
    return FSDPI_LOAD(w->state) == 1 ? FSDP_OK : fsdpi_why_failed(w);
}

/* Marks the world as failed, permanently, and aborts it on all ranks. Keeps the first failure,
   whose text is written before its status can be seen. Logs the text if `logs`. Returns the status
   of the first failure. */
static fsdp_status fsdpi_world_end(fsdp_world *w, fsdp_status status, int logs, const char *said) {
    char text[FSDPI_TEXT];
    int used = snprintf(text, sizeof text, "%s", said);
    if (fsdpi_is_child(w)) return fsdpi_failed(w); // the lock may be held by a thread of the parent
    int asks = status == FSDP_ERR_TIMEOUT || status == FSDP_ERR_PEER_LOST ||
               status == FSDP_ERR_MISMATCH;
    if (w->flight && asks && used >= 0 && (size_t)used < sizeof text)
        snprintf(text + used, sizeof text - (size_t)used, " (flight record %s: see fsdptrace hang)",
                 w->flight->path);
    fsdpi_lock(&w->fail_lock);
    fsdp_status earlier = fsdpi_failed(w);
    if (!earlier) {
        snprintf(w->failure, sizeof w->failure, "%s", text);
        if (w->flight) fsdpi_flight_fail(w->flight, fsdpi_now(w), status, text);
        fsdpi_fork_set(w->state, 1 + (uint32_t)status);
    }
    fsdpi_unlock(&w->fail_lock);
    if (earlier) return earlier;
    if (logs) fsdpi_log(w, FSDP_LOG_ERROR, status, text);
    if (w->comm) w->comm_ops->abort(w->comm, status, text);
    return status;
}

FSDP_PRINTF(3, 4)
static fsdp_status fsdpi_world_fail(fsdp_world *w, fsdp_status status, const char *fmt, ...) {
    char text[FSDPI_TEXT];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return fsdpi_world_end(w, status, 1, text);
}

/* Reports a failed call: keeps its text, logs it if `logs`, and returns `status`. The world stays
   usable, unless its device is hung: then the world fails, since the library can neither free nor
   clear memory. */
FSDP_PRINTF(4, 0)
static fsdp_status fsdpi_fail_text(fsdp_world *w, fsdp_status status, int logs, const char *fmt,
                                   va_list args) {
    char text[FSDPI_TEXT];
    int used = w && w->rank >= 0 ? snprintf(text, sizeof text, "rank %d: ", w->rank) : 0;
    vsnprintf(text + used, sizeof text - (size_t)used, fmt, args);
    fsdpi_set_error(w, text);
    if (logs) fsdpi_log(w, FSDP_LOG_ERROR, status, text);
    return w && FSDPI_LOAD(&w->hung) ? fsdpi_world_end(w, status, 0, text) : status;
}
FSDP_API fsdp_status fsdp_fail(fsdp_world *w, fsdp_status status, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    status = fsdpi_fail_text(w, status, 1, fmt, args);
    va_end(args);
    return status;
}
FSDP_API void fsdp_warn(const fsdp_world *w, const char *fmt, ...) {
    char text[FSDPI_TEXT];
    int used = w->rank >= 0 ? snprintf(text, sizeof text, "rank %d: ", w->rank) : 0;
    va_list args;
    va_start(args, fmt);
    vsnprintf(text + used, sizeof text - (size_t)used, fmt, args);
    va_end(args);
    fsdpi_log(w, FSDP_LOG_WARN, FSDP_OK, text);
}
// Logs only the first failure of a unit and a call in a step: loops over layers and microbatches
// would repeat it.
FSDP_PRINTF(4, 5)
static fsdp_status fsdpi_fail_once(fsdp_unit *u, int call, fsdp_status status, const char *fmt,
                                   ...) {
    const int is_first = !(u->reported_calls >> call & 1);
    va_list args;
    u->reported_calls |= 1u << call;
    va_start(args, fmt);
    status = fsdpi_fail_text(u->model->world, status, is_first, fmt, args);
    va_end(args);
    return status;
}

// Reports an invalid argument, field of a desc or environment variable.
FSDP_PRINTF(2, 3)
static fsdp_status fsdpi_invalid_arg(fsdp_world *w, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fsdp_status status = fsdpi_fail_text(w, FSDP_ERR_INVALID_ARG, 1, fmt, args);
    va_end(args);
    return status;
}

FSDP_API fsdp_status fsdp_fail_null(fsdp_world *w, const char *call, const char *which) {
    return fsdpi_invalid_arg(w, "[E101] %s: %s is NULL", call, which);
}
static fsdp_status fsdpi_null_of(const fsdp_model *m, const char *call, const char *which) {
    return fsdp_fail_null(m ? m->world : NULL, call, which);
}

// Checks the index of a parameter of unit u.
static fsdp_status fsdpi_check_index(const fsdp_unit *u, int index, const char *call) {
    const int last = u->desc.num_params - 1;
    return index >= 0 && index <= last
               ? FSDP_OK
               : fsdpi_invalid_arg(u->model->world,
                                   "[E170] %s: unit '%s' has no parameter %d, expected 0..%d", call,
                                   u->desc.name, index, last);
}
// Checks that unit u is one of the model, or NULL.
static fsdp_status fsdpi_check_owner(const fsdp_model *m, const fsdp_unit *u, const char *call) {
    return !u || u->model == m
               ? FSDP_OK
               : fsdpi_invalid_arg(m->world, "[E161] %s: the unit belongs to another model", call);
}

// Reports that the host's allocator has failed. name: a unit's or an extension's, or "". The text
// says how much memory the models of this rank hold, but names no remedy: that would need memory.
static FSDPI_NOINLINE fsdp_status fsdpi_no_memory(fsdp_world *w, const char *what, const char *name,
                                                  size_t bytes) {
    int64_t tables = 0, buffers = 0;
    for (const fsdp_model *m = w ? w->models : NULL; m; m = m->next) {
        tables += m->host_bytes;
        for (int pool = 0; pool < FSDP_POOL_MAX && !w->comm; pool++)
            buffers += w->device_ops->flags & FSDP_DEVICE_HOST ? m->pool_bytes[pool] : 0;
    }
    return fsdp_fail(w, FSDP_ERR_OUT_OF_MEMORY,
                     "[E301] %s%s%.64s%s: the allocator has returned NULL for %llu bytes of "
                     "memory; it has given %lld bytes for tables of models, %lld for their buffers",
                     what, *name ? " '" : "", name, *name ? "'" : "", (unsigned long long)bytes,
                     (long long)tables, (long long)buffers);
}

// Ends a call that all ranks make. If it failed here, the world fails: the peers would wait for
// this rank. Returns `status`.
static fsdp_status fsdpi_fail_together(fsdp_world *w, fsdp_status status) {
    if (status == FSDP_OK || w->size == 1 || fsdpi_failed(w)) return status;
    return fsdpi_world_end(w, status, 0, w->error); // the text is logged already
}

/* Copies a desc into a zeroed struct of this header's size, without its end canary. The struct of a
   program that was built with an older header is shorter: its field `size` has its size. */
FSDP_API fsdp_status fsdp_desc_read(fsdp_world *w, void *dst, const void *src, size_t size,
                                    const char *what) {
    uint32_t given, canary;
    uint64_t end;
    memset(dst, 0, size);
    if (!src) return FSDP_OK;
    memcpy(&given, src, sizeof given);
    memcpy(&canary, (const char *)src + sizeof given, sizeof canary);
    if (given == 0) given = (uint32_t)size;
    if (given > size || given < 24)
        return fsdpi_invalid_arg(
            w,
            "[E102] %s.size is %u, expected 0 or 24..%u: zero the struct before you "
            "fill it, and build with the library's header",
            what, given, (unsigned)size);
    memcpy(&end, (const char *)src + given - sizeof end, sizeof end);
    if (canary || end)
        return fsdpi_invalid_arg(w, "[E103] %s: a canary is not 0: zero the struct before use",
                                 what);
    memcpy(dst, src, given - sizeof end);
    return FSDP_OK;
}

#if defined(__GLIBC__)
extern int fsdpi_backtrace(void **frames, int size) __asm__("backtrace");
extern char **fsdpi_backtrace_symbols(void *const *frames, int size) __asm__("backtrace_symbols");
#endif

/* Reports a broken invariant of the library: logs a backtrace, the text and "[Rank r]", and aborts
   the world. Such a failure usually hits one rank only, and peers would report a timeout.
   Source: torch: _raise_assert_with_print. */
static FSDPI_NOINLINE fsdp_status fsdpi_assert_failed(fsdp_world *w, const char *where,
                                                      const char *what) {
#if defined(__GLIBC__)
    void *frames[32];
    int num = fsdpi_backtrace(frames, 32);
    char **names = fsdpi_backtrace_symbols(frames, num);
    for (int i = 0; names && i < num; i++)
        fsdpi_log(w, FSDP_LOG_ERROR, FSDP_ERR_INTERNAL, names[i]);
    free(names);
#endif
    return fsdpi_world_fail(w, FSDP_ERR_INTERNAL, "[E299] [Rank %d] %s: %s does not hold", w->rank,
                            where, what);
}

#ifndef FSDP_ASSERT
#define FSDP_ASSERT(world, condition)                                                              \
    ((condition) ? FSDP_OK : fsdpi_assert_failed((world), __func__, #condition))
#endif

#endif // FSDPI_CORE_ERROR_H
