/* plan/simulate.h - the time of a step under given costs

   Callers: api.h (fsdpi_plan_time) and make.h (fsdpi_plan_time_kind).

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_SIMULATE_H
#define FSDPI_PLAN_SIMULATE_H

#include "../core/run.h"
#include "listing.h"
#include "memory.h"
#include "objects.h"

#include <string.h>

// Clocks. An op begins when the host has issued it, its stream is free, the events that it waits
// for have happened and, for a collective, its group is free. The core's rule gives those events:
// here an event is a time in nanoseconds, plus 1, as 0 is no event. Times are integers, so that all
// ranks get equal ones. In inline mode the host does all work; with worker threads it is COMPUTE.

typedef struct fsdpi_plan_clocks {
    const fsdpi_plan_listing *l;
    const fsdp_plan_cost *cost;
    fsdp_plan_times *out;
    int64_t host, stream[FSDP_STREAM_COUNT], comm[FSDPI_PLAN_COMMS], busy[FSDPI_PLAN_COMMS], link;
    fsdp_buf *bufs; // [fsdpi_plan_events]; only their events are used
    int64_t waited; // ns that the caller has waited in this call
    int64_t first_gather, last_reduction;
} fsdpi_plan_clocks;

static int64_t fsdpi_plan_later(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t fsdpi_plan_duration(double latency, uint64_t bytes, double rate) {
    return (int64_t)(latency + (rate > 0 ? (double)bytes / rate : 0) + 0.5);
}

// Returns the time of a collective, from its full side: the bytes from others, and this rank's own
// part.
static int64_t fsdpi_plan_takes(const fsdp_plan_cost *c, const fsdpi_plan_line *line) {
    uint64_t part = line->count * fsdp_dtype_size(line->dtype);
    switch (line->kind) {
    case FSDP_OP_ALL_GATHER:
        return fsdpi_plan_duration(c->gather_latency_ns, line->bytes + part,
                                   c->gather_bytes_per_ns);
    case FSDP_OP_REDUCE_SCATTER:
        return fsdpi_plan_duration(c->reduce_latency_ns, line->bytes + part,
                                   c->reduce_bytes_per_ns);
    case FSDP_OP_ALL_REDUCE:
        return fsdpi_plan_duration(c->replica_latency_ns, part, c->replica_bytes_per_ns);
    case FSDP_OP_COPY:
    case FSDP_OP_ZERO: return fsdpi_plan_duration(0, line->bytes, c->copy_bytes_per_ns);
    default: return 0;
    }
}

// Returns the clock of a stream: the host's in inline mode, and for COMPUTE with worker threads.
static int64_t *fsdpi_plan_clock_of(fsdpi_plan_clocks *k, int stream) {
    int is_host = k->l->mode == FSDP_RUN_INLINE ||
                  (k->l->mode == FSDP_RUN_THREADS && stream == FSDP_STREAM_COMPUTE);
    return is_host ? &k->host : &k->stream[stream];
}

// Returns the buffer whose events belong to a place; NULL: none.
static fsdp_buf *fsdpi_plan_buf_at(const fsdpi_plan_clocks *k, int unit, int place) {
    int event = fsdpi_plan_event_of(k->l, unit, place);
    return event >= 0 ? &k->bufs[event] : NULL;
}

static fsdp_event fsdpi_plan_event_at(int64_t time, int stream) {
    fsdp_event event = {(uint64_t)time + 1, stream};
    return event;
}

static void fsdpi_plan_run_line(fsdpi_plan_clocks *k, const fsdpi_plan_line *line) {
    const fsdpi_plan_member *m = &k->l->members[line->members];
    fsdp_buf *src = fsdpi_plan_buf_at(k, m->unit, m->src),
             *dst = fsdpi_plan_buf_at(k, m->unit, m->dst);
    int64_t *clock = fsdpi_plan_clock_of(k, line->stream), takes;
    if (line->kind == FSDP_OP_ACQUIRE) return;
    if (line->kind == FSDP_OP_RELEASE) {
        if (src && !src->avail.seq) src->avail = fsdpi_plan_event_at(*clock, line->stream);
        return;
    }
    if (line->kind == FSDP_OP_GRADS_WRITTEN) {
        int64_t now = *fsdpi_plan_clock_of(k, FSDP_STREAM_COMPUTE);
        if (dst) dst->ready = fsdpi_plan_event_at(now, FSDP_STREAM_COMPUTE);
        return;
    }
    k->host += (int64_t)k->cost->issue_ns;
    int64_t begin = fsdpi_plan_later(k->host, *clock), free_at = begin;
    fsdp_op op = FSDP_ZERO;
    op.stream = line->stream;
    op.src = src;
    op.dst = dst;
    fsdpi_derive_waits(&op);
    for (int i = 0; i < op.num_waits; i++)
        begin = fsdpi_plan_later(begin, (int64_t)op.wait[i].seq - 1);
    if (dst) dst->avail.seq = 0;
    takes = fsdpi_plan_takes(k->cost, line);
    if (fsdpi_plan_is_collective(line->kind)) {
        int64_t *of = line->kind == FSDP_OP_ALL_GATHER       ? &k->out->gather_ns
                      : line->kind == FSDP_OP_REDUCE_SCATTER ? &k->out->reduce_ns
                                                             : &k->out->replica_ns;
        if (line->comm >= 0) begin = fsdpi_plan_later(begin, k->comm[line->comm]);
        if (k->cost->shared_links) begin = fsdpi_plan_later(begin, k->link);
        if (line->comm >= 0) k->busy[line->comm] += takes;
        if (line->comm >= 0) k->comm[line->comm] = begin + takes;
        k->link = begin + takes;
        *of += takes;
        if (line->kind == FSDP_OP_ALL_GATHER && !k->first_gather) k->first_gather = takes;
        if (line->kind != FSDP_OP_ALL_GATHER) k->last_reduction = takes;
    }
    // The caller waits for another stream's work and, in inline mode, for the collective itself.
    if (line->kind == FSDP_OP_WAIT && line->stream == FSDP_STREAM_COMPUTE)
        k->waited += begin - free_at;
    if (k->l->mode == FSDP_RUN_INLINE && fsdpi_plan_is_collective(line->kind)) k->waited += takes;
    *clock = begin + takes;
    if (dst) dst->ready = fsdpi_plan_event_at(begin + takes, line->stream);
}

static void fsdpi_plan_run_calls(fsdpi_plan_clocks *k) {
    const fsdp_plan_cost *c = k->cost;
    int line = 0;
    for (int i = 0; i < k->l->num_calls; i++) {
        int64_t work = c->num_compute > 0
                           ? c->compute_ns[i < c->num_compute ? i : c->num_compute - 1]
                           : 0;
        int64_t *clock = fsdpi_plan_clock_of(k, FSDP_STREAM_COMPUTE);
        k->waited = 0;
        for (; line < k->l->num_lines && k->l->lines[line].call == i; line++)
            fsdpi_plan_run_line(k, &k->l->lines[line]);
        if (i + 1 == k->l->num_calls) { // finalize waits for shard gradients
            int64_t now = fsdpi_plan_later(*clock, k->host);
            int64_t grads = (int64_t)fsdpi_plan_buf_at(k, -1, FSDPI_PLAN_GRADS)->ready.seq - 1;
            k->waited += grads > now ? grads - now : 0;
            *clock = fsdpi_plan_later(now, grads);
        }
        k->out->exposed_ns += k->waited;
        if (k->waited > k->out->worst_ns) {
            k->out->worst_ns = k->waited;
            k->out->worst_call = i;
        }
        *clock = fsdpi_plan_later(*clock, k->host) + work;
        k->out->compute_ns += work;
    }
}

static fsdp_status fsdpi_plan_time(fsdp_model *m, const fsdpi_plan_listing *l,
                                   const fsdp_plan_cost *cost, fsdp_plan_times *out) {
    fsdpi_plan_clocks k;
    memset(&k, 0, sizeof k);
    memset(out, 0, sizeof *out);
    k.l = l;
    k.cost = cost;
    k.out = out;
    fsdp_status status = fsdpi_plan_alloc(m, (size_t)fsdpi_plan_events(l) * sizeof *k.bufs,
                                          (void **)&k.bufs);
    if (!status) {
        fsdpi_plan_run_calls(&k);
        out->step_ns = k.host;
        for (int s = 0; s < FSDP_STREAM_COUNT; s++)
            out->step_ns = fsdpi_plan_later(out->step_ns, k.stream[s]);
        out->bound_ns = k.first_gather + out->compute_ns + k.last_reduction;
        for (int i = 0; i < l->num_comms; i++)
            out->bound_ns = fsdpi_plan_later(out->bound_ns, k.busy[i]);
        out->peak_bytes = l->bytes;
    }
    fsdpi_plan_free(m, k.bufs);
    return status;
}

static fsdp_status fsdpi_plan_check_cost(fsdp_world *w, const fsdp_plan_cost *c) {
    const double numbers[8] = {c->gather_latency_ns,  c->gather_bytes_per_ns,
                               c->reduce_latency_ns,  c->reduce_bytes_per_ns,
                               c->replica_latency_ns, c->replica_bytes_per_ns,
                               c->copy_bytes_per_ns,  c->issue_ns};
    int bad = c->num_compute < 0 || (c->num_compute > 0 && !c->compute_ns);
    for (int i = 0; i < 8; i++) bad |= !(numbers[i] >= 0 && numbers[i] < 1e18);
    for (int i = 0; i < c->num_compute && !bad; i++) bad |= c->compute_ns[i] < 0;
    if (!bad) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                     "[E997] plan: fsdp_plan_cost has a number that is negative or not finite, or "
                     "num_compute numbers are not at compute_ns");
}

// Copies the costs into the plan, with their list of the caller's work. cost: checked, or NULL.
static fsdp_status fsdpi_plan_copy_cost(fsdp_plan *p, const fsdp_plan_cost *cost) {
    if (!cost) return FSDP_OK;
    size_t bytes = (size_t)cost->num_compute * sizeof *cost->compute_ns;
    fsdp_status status = fsdpi_plan_alloc(p->model, bytes, (void **)&p->compute_ns);
    if (status) return status;
    if (bytes) memcpy(p->compute_ns, cost->compute_ns, bytes);
    p->cost = *cost;
    p->cost.compute_ns = p->compute_ns;
    p->desc.cost = &p->cost;
    return FSDP_OK;
}

// Computes time and number of collectives of a variant that has a tape and places, under the plan's
// costs.
static fsdp_status fsdpi_plan_time_kind(fsdp_plan *p, const fsdpi_plan_variant *k, int64_t *takes,
                                        int64_t *collectives) {
    fsdpi_plan_listing l;
    fsdp_plan_times times;
    memset(&l, 0, sizeof l);
    l.slots = k->listing.slots; // the variant's
    l.num_slots = k->listing.num_slots;
    fsdp_status status = fsdpi_plan_list(p, k, &k->tape, &l);
    if (!status) status = fsdpi_plan_time(p->model, &l, &p->cost, &times);
    if (!status) *takes = times.step_ns;
    for (int i = 0; i < l.num_lines; i++) *collectives += fsdpi_plan_is_collective(l.lines[i].kind);
    l.slots = NULL;
    fsdpi_plan_listing_end(p->model, &l);
    return status;
}

#endif // FSDPI_PLAN_SIMULATE_H
