/* core/timeline.h - measures the times of ops on a device with streams, for extensions

   State: fsdp_world.timeline: the device events of ops whose times have not been reported. There is
   none unless an extension has `ran`. A device measures only from one event to another: all times
   count from a base event, at which the host has read the world's clock.
   Callers: run.h.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_TIMELINE_H
#define FSDPI_CORE_TIMELINE_H

#include "alloc.h"
#include "flight.h"
#include "objects.h"
#include "ext_dispatch.h"

#define FSDPI_TIMES_MAX  256                   // ops whose times are not reported yet
#define FSDPI_TIMES_BASE ((int64_t)8000000000) // ns; long times lose digits: then a new base

enum { FSDPI_TIMED_RUNS, FSDPI_TIMED_ENDS, FSDPI_TIMED_FAILED }; // ENDS: all events are recorded

typedef struct fsdpi_timed {
    fsdp_op op;
    void *reached, *begin, *end; // events before its waits (if any), before its work, after it
    int state;                   // FSDPI_TIMED_*
} fsdpi_timed;

struct fsdpi_timeline {
    void *base; // base event
    int64_t base_ns;
    uint32_t first, next; // number of ops reported and begun so far
    fsdpi_timed *reached; // entry of the op that runs now; NULL: it is not reported
    fsdpi_timed ring[FSDPI_TIMES_MAX];
};

static void fsdpi_timeline_close(fsdp_world *w) {
    fsdpi_timeline *t = w->timeline;
    if (!t) return;
    for (int i = 0; i < FSDPI_TIMES_MAX; i++) {
        void *const events[3] = {t->ring[i].reached, t->ring[i].begin, t->ring[i].end};
        for (int k = 0; k < 3; k++)
            if (events[k]) w->device_ops->destroy(w->device, NULL, events[k]);
    }
    if (t->base) w->device_ops->destroy(w->device, NULL, t->base);
    fsdpi_free(&w->boot.allocator, t);
    w->timeline = NULL;
}

// Records a new base event on COMPUTE, waits for it and reads the world's clock.
static fsdp_status fsdpi_timeline_rebase(fsdp_world *w) {
    fsdpi_timeline *t = w->timeline;
    fsdp_status status = w->device_ops->record(w->device, w->streams[FSDP_STREAM_COMPUTE], t->base);
    if (!status) status = w->device_ops->sync(w->device, t->base, w->boot.timeout_ns);
    t->base_ns = fsdpi_now(w);
    return status;
}

static fsdp_status fsdpi_timeline_open(fsdp_world *w) {
    const fsdp_device_ops *d = w->device_ops;
    if (w->timeline) return FSDP_OK;
    if (!d->timer || !d->elapsed) return FSDP_ERR_UNSUPPORTED;
    fsdpi_timeline *t = (fsdpi_timeline *)fsdpi_alloc(&w->boot.allocator, sizeof *t);
    if (!t) return FSDP_ERR_OUT_OF_MEMORY;
    w->timeline = t;
    fsdp_status status = d->timer(w->device, &t->base);
    for (int i = 0; i < FSDPI_TIMES_MAX && !status; i++) {
        status = d->timer(w->device, &t->ring[i].reached);
        if (!status) status = d->timer(w->device, &t->ring[i].begin);
        if (!status) status = d->timer(w->device, &t->ring[i].end);
    }
    if (!status) status = fsdpi_timeline_rebase(w);
    if (status) fsdpi_timeline_close(w);
    return status;
}

/* Reports ops that have run to the extensions, in the order of issue. Waits for the first one for
   at most wait_ns. Skips ops that the device cannot measure. */
static void fsdpi_timeline_tell(fsdp_world *w, int64_t wait_ns) {
    const fsdp_device_ops *d = w->device_ops;
    fsdpi_timeline *t = w->timeline;
    while (t && t->first != t->next) {
        fsdpi_timed *one = &t->ring[t->first % FSDPI_TIMES_MAX];
        int64_t begin, end, reached = 0;
        if (one->state == FSDPI_TIMED_RUNS) return; // its function issues other ops now
        if (one->state == FSDPI_TIMED_ENDS && d->sync(w->device, one->end, wait_ns)) return;
        wait_ns = 0;
        t->first++;
        if (one->state != FSDPI_TIMED_ENDS || d->elapsed(w->device, t->base, one->begin, &begin) ||
            d->elapsed(w->device, t->base, one->end, &end))
            continue;
        if (one->op.num_waits && !d->elapsed(w->device, t->base, one->reached, &reached))
            one->op.waited_ns = begin - reached;
        fsdpi_tell_ran(w, &one->op, t->base_ns + begin, t->base_ns + end);
    }
}

// Reports the ops that have run, and drops all others that have been issued.
static void fsdpi_timeline_end_all(fsdp_world *w) {
    fsdpi_timeline_tell(w, 0);
    if (w->timeline) w->timeline->first = w->timeline->next;
}

// Records the first event of an op, before its waits. Sets timeline->reached, to NULL if the op is
// not measured.
static void fsdpi_timeline_reach(fsdp_world *w, const fsdp_op *op, void *stream) {
    fsdpi_timeline *t = w->timeline;
    if (!t) return;
    t->reached = NULL;
    fsdpi_timeline_tell(w, t->next - t->first < FSDPI_TIMES_MAX ? 0 : w->boot.timeout_ns);
    if (t->next - t->first == FSDPI_TIMES_MAX) return;
    if (t->next == t->first && fsdpi_now(w) - t->base_ns > FSDPI_TIMES_BASE &&
        fsdpi_timeline_rebase(w))
        return;
    fsdpi_timed *one = &t->ring[t->next % FSDPI_TIMES_MAX];
    one->op = *op;
    one->op.list = NULL; // its memory may be free when the op is reported
    one->op.list_count = 0;
    one->state = FSDPI_TIMED_RUNS;
    void *first = op->num_waits ? one->reached : one->begin;
    if (w->device_ops->record(w->device, stream, first)) return;
    t->next++;
    t->reached = one;
}

#endif // FSDPI_CORE_TIMELINE_H
