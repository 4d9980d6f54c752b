/* trace/breakdown.h - where the time of a step went, who came last, what held memory

   Callers: programs, tools/fsdptrace.c (fsdpi_why_say), tools/fsdptrace_helps.h (fsdpi_why_say) and
     tools/fsdptrace_json.h (fsdpi_why_unit).

   A part of fsdp_trace.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_TRACE_H
#include "../../fsdp_trace.h"
#endif
#ifndef FSDPI_TRACE_BREAKDOWN_H
#define FSDPI_TRACE_BREAKDOWN_H

#include "format.h"
#include "read.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The analysis of a job's traces; docs/observability.md has the definitions. Each nanosecond of a
   step belongs to one category, so that the categories sum up to the step. COMPUTE is the caller's
   thread, or that stream on a device with streams. The work and the waits of COMPUTE are a list
   of spans. A span whose category comes later in the list covers those of earlier ones, and a
   wait for late members of a group covers the rest of the same wait. */
#define FSDPI_WHY_CATEGORIES(X)                                                                    \
    X(COMPUTE, "compute")  /* covered by nothing */                                                \
    X(CALLS, "rest")       /* host: in a call */                                                   \
    X(UPDATE, "optimizer") /* host: updates, and other work of an optimizer */                     \
    X(COPY, "copies")      /* host: copies, zeros, norms, functions of the caller */               \
    X(GATHER, "gather")    /* exposed, from here on: COMPUTE waits for it, or runs it */           \
    X(REDUCE, "reduce")                                                                            \
    X(REPLICAS, "all_reduce")                                                                      \
    X(SLOT, "slot") /* a reduction still reads what COMPUTE would write */                         \
    X(CLIP, "clip")                                                                                \
    X(STEP, "optimizer")                                                                           \
    X(OTHERS, "others")
enum {
#define FSDP_X(name, text) FSDPI_WHY_##name,
    FSDPI_WHY_CATEGORIES(FSDP_X)
#undef FSDP_X
        FSDPI_WHY_CATEGORY_COUNT
};

typedef struct fsdpi_why_span {
    int64_t begin, end, own;          // own: nanoseconds that no other span covers
    const fsdpi_tr_event *op, *waits; // op: the cause; waits: the event that waits for it
    uint8_t category, late;           // late: waits for members that came later
} fsdpi_why_span;

typedef struct fsdpi_why_step { // a step of one rank
    const fsdpi_tr_rank *rank;
    uint32_t number;
    int64_t begin, end, category[FSDPI_WHY_CATEGORY_COUNT];
    int64_t comm, hidden, late; // ns: a collective runs; COMPUTE hides it; waits for late ranks
    fsdpi_why_span *spans;      // in the order in which they cover each other
    int32_t num_spans;
    uint64_t first, past; // its events, with those of about one step before and one after
    uint64_t from, to;    // the traced steps in it: microbatches
    int updates;          // 1: it ends in an optimizer or params_changed
    int is_part;          // 1: microbatches from before the trace may be missing
} fsdpi_why_step;

static int64_t fsdpi_why_less(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t fsdpi_why_more(int64_t a, int64_t b) { return a > b ? a : b; }

/* -------------------------------------------------------------------------------------------- */
// The categories of a step.

static int fsdpi_why_by_time(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int fsdpi_why_floor(const fsdpi_why_span *s) {
    return s->category >= FSDPI_WHY_GATHER ? 3 + s->late : s->category >= FSDPI_WHY_UPDATE ? 2 : 1;
}

// Orders spans by coverage, covered ones first. COMPUTE does one thing at a time, so spans of one
// level do not overlap.
static int fsdpi_why_by_floor(const void *a, const void *b) {
    return fsdpi_why_floor((const fsdpi_why_span *)a) - fsdpi_why_floor((const fsdpi_why_span *)b);
}

// Returns the lower bound: the index of the first entry that begins at `time` or later. Entries
// have `size` bytes and are sorted by begin.
static uint64_t fsdpi_why_find(const void *list, size_t size, uint64_t num, int64_t time) {
    uint64_t low = 0, high = num;
    while (low < high) {
        uint64_t mid = low + (high - low) / 2;
        if (*(const int64_t *)(const void *)((const char *)list + mid * size) < time) low = mid + 1;
        else high = mid;
    }
    return low;
}

/* Assigns each nanosecond of the step to the last span that contains it: step->category,
   spans[].own. comms: times at which collectives run, as pairs of begin and end. Returns 0, or
   -1 without memory. */
static int fsdpi_why_share(fsdpi_why_step *step, const int64_t *comms, int32_t num_comms) {
    const size_t most = 2 * ((size_t)step->num_spans + (size_t)num_comms + 1);
    int64_t *cuts = (int64_t *)calloc(most, sizeof *cuts + sizeof(int32_t) + 1);
    int32_t *owner = (int32_t *)(void *)(cuts + most);
    uint64_t num = 0;
    char *under = (char *)(owner + most);
    if (!cuts) return -1;
    memset(step->category, 0, sizeof step->category);
    step->comm = step->hidden = step->late = 0;
    if (step->num_spans)
        qsort(step->spans, (size_t)step->num_spans, sizeof *step->spans, fsdpi_why_by_floor);
    cuts[num++] = step->begin, cuts[num++] = step->end;
    for (int32_t i = 0; i < step->num_spans; i++)
        cuts[num++] = step->spans[i].begin, cuts[num++] = step->spans[i].end;
    for (int32_t i = 0; i < 2 * num_comms; i++) cuts[num++] = comms[i];
    qsort(cuts, num, sizeof *cuts, fsdpi_why_by_time);
    for (int32_t i = 0; i < step->num_spans; i++) {
        const fsdpi_why_span *s = &step->spans[i];
        for (uint64_t k = fsdpi_why_find(cuts, sizeof *cuts, num, s->begin);
             k < num && cuts[k] < s->end; k++)
            owner[k] = i + 1;
    }
    for (int32_t i = 0; i < num_comms; i++)
        for (uint64_t k = fsdpi_why_find(cuts, sizeof *cuts, num, comms[2 * i]);
             k < num && cuts[k] < comms[2 * i + 1]; k++)
            under[k] = 1;
    for (uint64_t k = 0; k + 1 < num; k++) {
        fsdpi_why_span *s = owner[k] ? &step->spans[owner[k] - 1] : NULL;
        const int64_t ns = cuts[k + 1] - cuts[k];
        if (cuts[k] < step->begin || cuts[k] >= step->end) continue;
        step->category[s ? s->category : (uint8_t)FSDPI_WHY_COMPUTE] += ns;
        if (s) s->own += ns;
        if (s && s->late) step->late += ns;
        if (under[k]) step->comm += ns;
        if (under[k] && !(s && s->category >= FSDPI_WHY_GATHER)) step->hidden += ns;
    }
    free(cuts);
    return 0;
}

static int64_t fsdpi_why_exposed(const fsdpi_why_step *s) {
    int64_t ns = 0;
    for (int p = FSDPI_WHY_GATHER; p < FSDPI_WHY_CATEGORY_COUNT; p++) ns += s->category[p];
    return ns;
}
static int64_t fsdpi_why_host(const fsdpi_why_step *s) {
    return s->category[FSDPI_WHY_CALLS] + s->category[FSDPI_WHY_UPDATE] +
           s->category[FSDPI_WHY_COPY];
}

/* -------------------------------------------------------------------------------------------- */
// From events to spans.

static int fsdpi_why_is_comm(const fsdpi_tr_event *r) {
    return r->kind >= FSDP_OP_ALL_GATHER && r->kind <= FSDP_OP_RECV;
}
static int fsdpi_why_on_compute(const fsdpi_tr_rank *rank, const fsdpi_tr_event *r) {
    return r->kind < FSDP_OP_HOOK &&
           (r->stream == FSDP_STREAM_COMPUTE || rank->head.run == FSDP_RUN_INLINE);
}

// Returns 1 for an operation of the world, whose number is not one of the model's. A marker's label
// is a pool.
static int fsdpi_tr_is_world(const fsdpi_tr_event *r) {
    return r->kind <= FSDP_OP_HOOK &&
           (r->label == FSDP_LABEL_WORLD || r->label == FSDP_LABEL_TRANSFER);
}

// Returns 1 if a call has issued an event.
static int fsdpi_why_has(const fsdpi_tr_event *call, const fsdpi_tr_event *r) {
    return !fsdpi_tr_is_world(r) && r->seq - call->seq < call->slot;
}

// Returns the call that issued an event, the innermost of nested ones, or NULL. Searches first ..
// past.
static const fsdpi_tr_event *fsdpi_why_call_of(const fsdpi_tr_rank *rank, uint64_t first,
                                               uint64_t past, const fsdpi_tr_event *of) {
    const fsdpi_tr_event *found = NULL;
    for (uint64_t i = first; i < past; i++) {
        const fsdpi_tr_event *r = &rank->records[i];
        if (r->kind == FSDPI_TR_CALL && fsdpi_why_has(r, of)) found = r;
    }
    return found;
}

// Returns 1 for an optimizer's event: an update, or an op of an extension in its step, as Muon's
// products.
static int fsdpi_why_is_update(const fsdpi_why_step *step, const fsdpi_tr_event *r) {
    if (r->kind == FSDP_OP_UPDATE || r->label < FSDP_LABEL_COUNT) return r->kind == FSDP_OP_UPDATE;
    const fsdpi_tr_event *call = fsdpi_why_call_of(step->rank, step->first, step->past, r);
    return call && call->label == FSDP_CALL_PARAMS_CHANGED;
}

// Returns the category of running an event, or of waiting for it.
static int fsdpi_why_part_of(const fsdpi_why_step *step, const fsdpi_tr_event *r) {
    if (r->label == FSDP_LABEL_CLIP) return FSDPI_WHY_CLIP;
    if (fsdpi_why_is_update(step, r)) return FSDPI_WHY_STEP;
    switch (r->stream) {
    case FSDP_STREAM_GATHER: return FSDPI_WHY_GATHER;
    case FSDP_STREAM_REDUCE: return FSDPI_WHY_REDUCE;
    case FSDP_STREAM_ALLREDUCE: return FSDPI_WHY_REPLICAS;
    default: return FSDPI_WHY_OTHERS;
    }
}

// Returns the event that ended a wait: of those issued earlier on the streams in question, the last
// one that had ended by then.
static const fsdpi_tr_event *fsdpi_why_awaited(const fsdpi_why_step *step,
                                               const fsdpi_tr_event *r) {
    const fsdpi_tr_rank *rank = step->rank;
    const fsdpi_tr_event *found = NULL;
    for (uint64_t i = step->first; i < step->past; i++) {
        const fsdpi_tr_event *o = &rank->records[i];
        const int gathers = o->stream == FSDP_STREAM_GATHER;
        const int alike = !fsdpi_tr_is_world(o) && !fsdpi_tr_is_world(r); // comparable numbers
        if (o->begin_ns > r->begin_ns) break;                             // sorted by begin
        if (o->kind >= FSDP_OP_HOOK || fsdpi_why_on_compute(rank, o) || o->end_ns > r->begin_ns ||
            (alike && (int32_t)(o->seq - r->seq) > 0))
            continue;
        if (r->label == FSDP_LABEL_GATHER && !gathers) continue;
        if ((r->label == FSDP_LABEL_GRADS || r->label == FSDP_LABEL_FINAL) && gathers) continue;
        if (!found || o->end_ns >= found->end_ns) found = o;
    }
    return found;
}

typedef struct fsdpi_why_spans {
    fsdpi_why_step *step;
    int32_t cap;
    int failed;
} fsdpi_why_spans;

static void fsdpi_why_add(fsdpi_why_spans *all, int category, int late, int64_t begin, int64_t end,
                          const fsdpi_tr_event *op, const fsdpi_tr_event *waits) {
    fsdpi_why_step *step = all->step;
    begin = fsdpi_why_more(begin, step->begin), end = fsdpi_why_less(end, step->end);
    if (begin >= end) return;
    if (step->num_spans == all->cap) {
        const int32_t cap = all->cap ? 2 * all->cap : 256;
        void *more = realloc(step->spans, (size_t)cap * sizeof *step->spans);
        if (!more) all->failed = 1;
        if (!more) return;
        step->spans = (fsdpi_why_span *)more;
        all->cap = cap;
    }
    const fsdpi_why_span s = {begin, end, 0, op, waits, (uint8_t)category, (uint8_t)late};
    step->spans[step->num_spans++] = s;
}

// Adds a span in which COMPUTE runs an event or waits for it. Until the last member came, it waits
// for that member.
static void fsdpi_why_expose(fsdpi_why_spans *all, int category, int64_t begin, int64_t end,
                             const fsdpi_tr_event *op, const fsdpi_tr_event *waits) {
    const fsdpi_tr_rank *rank = all->step->rank;
    fsdpi_why_add(all, category, 0, begin, end, op, waits);
    if (!op || !fsdpi_why_is_comm(op) || rank->last[op - rank->records] < 0) return;
    fsdpi_why_add(all, category, 1, fsdpi_why_more(begin, op->begin_ns),
                  fsdpi_why_less(end, rank->peers_ns[op - rank->records]), op, waits);
}

// Adds the spans of an event on COMPUTE: its waits, and its own work.
static void fsdpi_why_record(fsdpi_why_spans *all, const fsdpi_tr_event *r) {
    const int64_t reached = r->begin_ns - r->waited_ns;
    if (reached < all->step->end && r->begin_ns > all->step->begin && r->waited_ns) {
        const fsdpi_tr_event *op = fsdpi_why_awaited(all->step, r);
        const int category = r->label == FSDP_LABEL_GRADS ? (int)FSDPI_WHY_SLOT
                             : op                         ? fsdpi_why_part_of(all->step, op)
                                                          : (int)FSDPI_WHY_OTHERS;
        fsdpi_why_expose(all, category, reached, r->begin_ns, op, r);
    }
    if (fsdpi_why_is_comm(r))
        fsdpi_why_expose(all, fsdpi_why_part_of(all->step, r), r->begin_ns, r->end_ns, r, r);
    else if (r->kind != FSDP_OP_WAIT)
        fsdpi_why_add(all, fsdpi_why_is_update(all->step, r) ? FSDPI_WHY_UPDATE : FSDPI_WHY_COPY, 0,
                      r->begin_ns, r->end_ns, r, NULL);
}

/* -------------------------------------------------------------------------------------------- */
// Calls and steps.

// Returns the lower bound: the index of the first event that begins at `time` or later.
static uint64_t fsdpi_why_at(const fsdpi_tr_rank *rank, int64_t time) {
    return fsdpi_why_find(rank->records, sizeof *rank->records, rank->num_records, time);
}

// Returns 1 if the device keeps up with the host. On streams the host runs ahead: if COMPUTE
// reached an event of a call before the call ended, it had nothing else to do.
static int fsdpi_why_keeps_up(const fsdpi_why_step *step, const fsdpi_tr_event *call) {
    int came = step->rank->head.run != FSDP_RUN_STREAMS;
    for (uint64_t i = step->first; i < step->past && !came; i++) {
        const fsdpi_tr_event *r = &step->rank->records[i];
        came = fsdpi_why_on_compute(step->rank, r) && fsdpi_why_has(call, r) &&
               r->begin_ns - r->waited_ns <= call->end_ns;
    }
    return came;
}

// Returns 1 if a call belongs to steps i .. to, by the number of its first event. A call without
// events has the number of the next event, perhaps in the next step: there the time decides.
static int fsdpi_why_is_of(const fsdpi_tr_rank *rank, uint64_t i, uint64_t to,
                           const fsdpi_tr_event *call) {
    const fsdpi_tr_step *s = &rank->steps[i], *next = &rank->steps[to + 1];
    const int is_last = to + 1 == rank->num_steps;
    const uint32_t length = is_last ? UINT32_MAX / 2 : next->first_seq - s->first_seq;
    const uint32_t at = call->seq - s->first_seq;
    if (!call->slot && !at) return !i || call->begin_ns >= s->begin_ns;
    return at < length || (!is_last && !call->slot && at == length &&
                           call->begin_ns < next->begin_ns && call->begin_ns >= s->begin_ns);
}

/* Sets the end of a step on streams: its last event on COMPUTE, which runs events in the order
   of their numbers. records: number of events in the step, up to the last call that ends it. */
static void fsdpi_why_last(fsdpi_why_step *out, uint32_t first_seq, uint32_t records) {
    const fsdpi_tr_rank *rank = out->rank;
    int64_t next = INT64_MAX; // when COMPUTE reaches the first event after the step
    for (uint64_t k = out->first; k < rank->num_records; k++) {
        const fsdpi_tr_event *r = &rank->records[k];
        const uint32_t at = r->seq - first_seq;
        if (r->begin_ns > next) break;
        if (!fsdpi_why_on_compute(rank, r) || fsdpi_tr_is_world(r)) continue;
        if (at < records) out->end = fsdpi_why_more(out->end, r->end_ns);
        else if (at < UINT32_MAX / 2) next = fsdpi_why_less(next, r->begin_ns);
    }
}

// Finds the bounds of steps i .. to on a rank. Returns 0 if the steps are incomplete.
static int fsdpi_why_bounds(const fsdpi_tr_rank *rank, uint64_t i, uint64_t to, int64_t not_before,
                            fsdpi_why_step *out) {
    const fsdpi_tr_step *s = &rank->steps[i];
    uint32_t records = 0; // up to the last call that ends the step
    memset(out, 0, sizeof *out);
    out->rank = rank, out->number = s->number, out->from = i, out->to = to;
    out->begin = INT64_MAX, out->end = INT64_MIN;
    out->first = i ? fsdpi_why_at(rank, s[-1].begin_ns) : 0;
    out->past = to + 2 < rank->num_steps ? fsdpi_why_at(rank, rank->steps[to + 2].begin_ns + 1)
                                         : rank->num_records;
    for (uint64_t k = out->first; k < out->past; k++) {
        const fsdpi_tr_event *r = &rank->records[k];
        if (r->kind != FSDPI_TR_CALL || !fsdpi_why_is_of(rank, i, to, r)) continue;
        out->begin = fsdpi_why_less(out->begin, r->begin_ns);
        if (r->label != FSDP_CALL_FINALIZE && r->label != FSDP_CALL_CLIP &&
            r->label != FSDP_CALL_PARAMS_CHANGED)
            continue;
        out->updates |= r->label == FSDP_CALL_PARAMS_CHANGED;
        out->end = fsdpi_why_more(out->end, r->end_ns);
        if (r->seq + r->slot - s->first_seq > records) records = r->seq + r->slot - s->first_seq;
    }
    if (rank->head.run == FSDP_RUN_STREAMS) fsdpi_why_last(out, s->first_seq, records);
    out->begin = fsdpi_why_more(out->begin, not_before);
    if (out->begin >= out->end) return 0;
    const int64_t ns = out->end - out->begin;
    const uint64_t first = fsdpi_why_at(rank, out->begin - ns);
    out->first = first < out->first ? first : out->first;
    out->past = fsdpi_why_at(rank, out->end + ns);
    return 1;
}

// Combines steps i .. to of a rank. Returns 1, 0 if they are incomplete, -1 without memory.
static int fsdpi_why_make_step(const fsdpi_tr_rank *rank, uint64_t i, uint64_t to,
                               int64_t not_before, fsdpi_why_step *out) {
    fsdpi_why_spans all = {out, 0, 0};
    int32_t num_comms = 0;
    if (!fsdpi_why_bounds(rank, i, to, not_before, out)) return 0;
    int64_t *comms = (int64_t *)calloc((size_t)(out->past - out->first) + 1, 2 * sizeof *comms);
    if (!comms) return -1;
    for (uint64_t k = out->first; k < out->past; k++) {
        const fsdpi_tr_event *r = &rank->records[k];
        if (r->end_ns <= out->begin || r->begin_ns - r->waited_ns >= out->end) continue;
        if (fsdpi_why_on_compute(rank, r)) fsdpi_why_record(&all, r);
        if (r->kind == FSDPI_TR_CALL && fsdpi_why_keeps_up(out, r))
            fsdpi_why_add(&all, FSDPI_WHY_CALLS, 0, r->begin_ns, r->end_ns, r, NULL);
        if (!fsdpi_why_is_comm(r)) continue;
        comms[2 * num_comms] = r->begin_ns, comms[2 * num_comms++ + 1] = r->end_ns;
    }
    if (all.failed || fsdpi_why_share(out, comms, num_comms)) all.failed = 1;
    free(comms);
    if (all.failed) free(out->spans);
    return all.failed ? -1 : 1;
}

/* -------------------------------------------------------------------------------------------- */
// The report: the median step of the middle rank.

typedef struct fsdpi_why {
    const fsdpi_tr_job *job;
    fsdpi_why_step step;
    int32_t num_steps;
    int64_t shortest, longest; // among the ranks' median steps
} fsdpi_why;

static void fsdpi_why_end(fsdpi_why *y) {
    free(y->step.spans);
    memset(y, 0, sizeof *y);
}

static int fsdpi_why_by_length(const void *a, const void *b) {
    const fsdpi_why_step *x = (const fsdpi_why_step *)a, *y = (const fsdpi_why_step *)b;
    const int64_t left = x->end - x->begin, right = y->end - y->begin;
    return left != right ? (left > right) - (left < right)
                         : (x->number > y->number) - (x->number < y->number);
}

// Keeps the median step, of an even number the shorter one. Returns the number of steps.
static int32_t fsdpi_why_middle(fsdpi_why_step *steps, int32_t num, fsdpi_why_step *out) {
    if (num) qsort(steps, (size_t)num, sizeof *steps, fsdpi_why_by_length);
    for (int32_t i = 0; i < num; i++)
        if (i == (num - 1) / 2) *out = steps[i];
        else free(steps[i].spans);
    return num;
}

// Returns 1 if a step of the trace ends in an optimizer.
static int fsdpi_why_updates(const fsdpi_tr_rank *rank, uint64_t i) {
    fsdpi_why_step step;
    (void)fsdpi_why_bounds(rank, i, i, INT64_MIN, &step);
    return step.updates;
}

/* Finds the median step of a rank. If some traced steps end in an optimizer, the others are
   microbatches of the next one that does. In that case the first step counts only if there is no
   other, as the trace may have begun in its middle. Returns 0 without a complete step, -1
   without memory. */
static int32_t fsdpi_why_rank(const fsdpi_tr_rank *rank, fsdpi_why_step *out) {
    fsdpi_why_step *steps = (fsdpi_why_step *)calloc((size_t)rank->num_steps + 1, sizeof *steps);
    int32_t num = 0;
    int64_t end = INT64_MIN;
    uint64_t updates = 0, from = 0;
    int made = steps ? 1 : -1;
    for (uint64_t i = 0; i < rank->num_steps; i++) updates += fsdpi_why_updates(rank, i) != 0;
    const int has_parts = updates && updates < rank->num_steps;
    for (uint64_t i = 0; i < rank->num_steps && made >= 0; i++) {
        if (has_parts && !fsdpi_why_updates(rank, i)) continue;
        made = fsdpi_why_make_step(rank, from, i, end, &steps[num]);
        if (made > 0) {
            steps[num].is_part = has_parts && !from && rank->steps[0].number > 0;
            end = steps[num++].end;
        }
        from = i + 1;
    }
    if (num > 1 && steps[0].is_part) {
        free(steps[0].spans);
        memmove(steps, steps + 1, (size_t)--num * sizeof *steps);
    }
    if (steps) num = fsdpi_why_middle(steps, num, out);
    free(steps);
    return made < 0 ? -1 : num;
}

// Makes the analysis. Returns 1, 0 without a step, -1 without memory. Call fsdpi_why_end in any
// case.
static int fsdpi_why_make(const fsdpi_tr_job *job, fsdpi_why *y) {
    memset(y, 0, sizeof *y);
    y->job = job;
    fsdpi_why_step *steps = (fsdpi_why_step *)calloc((size_t)job->num + 1, sizeof *steps);
    int32_t num = 0, got = steps ? 0 : -1;
    for (int32_t k = 0; k < job->num && got >= 0; k++) {
        got = fsdpi_why_rank(&job->rank[k], &steps[num]);
        if (got > y->num_steps) y->num_steps = got;
        num += got > 0;
    }
    for (int32_t i = 0; i < num; i++) {
        const int64_t ns = steps[i].end - steps[i].begin;
        y->shortest = i ? fsdpi_why_less(y->shortest, ns) : ns;
        y->longest = fsdpi_why_more(y->longest, ns);
    }
    if (steps) (void)fsdpi_why_middle(steps, num, &y->step);
    free(steps);
    return got < 0 ? -1 : num > 0;
}

/* -------------------------------------------------------------------------------------------- */
// The report as text.

enum { FSDPI_WHY_COLUMNS = 100 };

typedef struct fsdpi_why_text {
    char *at;
    size_t cap, used;
    int digits;         // after the point, in milliseconds
    size_t line, space; // where this line begins; where it may break, 0: nowhere
    size_t indent;      // indent of a continued line; 0: 4 more than this line
} fsdpi_why_text;

static void fsdpi_why_put(fsdpi_why_text *t, char c) {
    if (t->used + 1 < t->cap) t->at[t->used] = c, t->at[t->used + 1] = 0;
    t->used++;
}

// Moves the text after the last blank to the next line, which is indented.
static void fsdpi_why_wrap(fsdpi_why_text *t) {
    size_t from = t->space ? t->space : t->used;
    if (t->used >= t->cap) return;
    for (size_t k = t->line; !t->indent || (t->at[k] == ' ' && t->indent < 12); k++)
        t->indent += t->indent ? 1 : t->at[k] == ' ' ? 5 : 4;
    const size_t indent = t->indent, tail = t->used - from, gap = indent + 1 - (t->space > 0);
    for (size_t k = 0; k < gap; k++) fsdpi_why_put(t, ' ');
    if (t->used >= t->cap) return;
    memmove(t->at + from + gap, t->at + from, tail);
    from -= t->space > 0; // the blank is removed
    memset(t->at + from, ' ', indent + 1);
    t->at[from] = '\n', t->line = from + 1, t->space = 0;
}

// Returns 1 if a line may break at a blank before `next`: not between a number and its unit.
static int fsdpi_why_may_break(const fsdpi_why_text *t, const char *next) {
    static const char *const units[] = {"ms", "%", "B", "kB", "MB", "GB", "TB"};
    const size_t length = strcspn(next, " ,;:.)\n");
    const char before = t->used > 1 && t->used < t->cap ? t->at[t->used - 2] : ' ';
    for (size_t i = 0; i < sizeof units / sizeof *units && before >= '0' && before <= '9'; i++)
        if (length == strlen(units[i]) && !strncmp(next, units[i], length)) return 0;
    return t->used - t->line > 16;
}

// Adds text, in lines of at most FSDPI_WHY_COLUMNS. Names are untrusted: characters that move a
// cursor are escaped.
static void fsdpi_why_say(fsdpi_why_text *t, const char *format, ...) FSDP_PRINTF(2, 3);
static void fsdpi_why_say(fsdpi_why_text *t, const char *format, ...) {
    char text[4096], escaped[8];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (const char *c = text; *c; c++) {
        const unsigned code = (unsigned char)*c;
        const int is_plain = *c == '\n' || (code >= 0x20 && code < 0x7f);
        snprintf(escaped, sizeof escaped, *c == '\\' ? "\\\\" : is_plain ? "%c" : "\\x%02x", code);
        const size_t length = strlen(escaped);
        if (*c == '\n') fsdpi_why_put(t, *c), t->line = t->used, t->space = t->indent = 0;
        else {
            if (t->used + length - t->line > FSDPI_WHY_COLUMNS) fsdpi_why_wrap(t);
            for (size_t k = 0; k < length; k++) fsdpi_why_put(t, escaped[k]);
            if (*c == ' ' && fsdpi_why_may_break(t, c + 1)) t->space = t->used;
        }
    }
}

#define FSDPI_WHY_MS(t, ns) (t)->digits, (double)(ns)*1e-6 // for %.*f

// Returns the divisor and sets the letter with which bytes are printed, as %.1f %cB.
static double fsdpi_why_unit(int64_t bytes, char *letter) {
    const int big = (bytes >= 1000000) + (bytes >= (int64_t)10000000000);
    *letter = "kMG"[big];
    return big == 0 ? 1e3 : big == 1 ? 1e6 : 1e9;
}

// Returns 1 for the step's first gather or last reduction, which nothing can hide.
static int fsdpi_why_is_edge(const fsdpi_why_step *step, const fsdpi_tr_event *op, int gathers) {
    const fsdpi_tr_rank *rank = step->rank;
    const fsdpi_tr_event *edge = NULL;
    for (uint64_t i = step->first; i < step->past; i++) {
        const fsdpi_tr_event *r = &rank->records[i];
        const int reduces = r->kind == FSDP_OP_REDUCE_SCATTER || r->label == FSDP_LABEL_REPLICAS;
        if (r->end_ns <= step->begin || r->begin_ns >= step->end) continue;
        if (gathers ? r->kind != FSDP_OP_ALL_GATHER || edge : !reduces) continue;
        if (r->kind < FSDP_OP_WAIT) edge = r;
    }
    return edge && edge->what == op->what &&
           fsdpi_why_call_of(rank, step->first, step->past, edge) ==
               fsdpi_why_call_of(rank, step->first, step->past, op);
}

// Adds the reason for COMPUTE's longest wait for a unit. late: mostly for a member of its group.
static void fsdpi_why_reason(const fsdpi_why *y, const fsdpi_why_span *s, int late,
                             fsdpi_why_text *t) {
    const fsdpi_tr_rank *rank = y->step.rank;
    const fsdpi_tr_event *op = s->op;
    const fsdpi_tr_event *call = fsdpi_why_call_of(rank, y->step.first, y->step.past, s->waits);
    const int gathers = s->category == FSDPI_WHY_GATHER;
    const int64_t reached = op ? op->begin_ns - op->waited_ns : 0, mid = (s->end - s->begin) / 2;
    if (!op) return;
    if (late) fsdpi_why_say(t, " (rank %d came late)", (int)rank->last[op - rank->records]);
    else if (gathers && fsdpi_why_is_edge(&y->step, op, 1))
        fsdpi_why_say(t, " (first of the step: nothing to hide it behind)");
    else if ((s->category == FSDPI_WHY_REDUCE || s->category == FSDPI_WHY_REPLICAS) &&
             fsdpi_why_is_edge(&y->step, op, 0))
        fsdpi_why_say(t, " (last of the step)");
    else if (rank->head.run == FSDP_RUN_INLINE || op == s->waits) return; // nothing can hide it
    else if (s->end - op->end_ns > mid) fsdpi_why_say(t, " (COMPUTE went on later than it ended)");
    else if (s->category == FSDPI_WHY_SLOT)
        fsdpi_why_say(t, " (the reduction still reads the slot for gradients)");
    else if (fsdpi_why_less(op->begin_ns, s->end) - fsdpi_why_more(reached, s->begin) > mid)
        fsdpi_why_say(t, " (it waits for a slot)");
    else if (gathers && call && fsdpi_why_has(call, op))
        fsdpi_why_say(t, rank->head.prefetch_bytes ? " (not prefetched: prefetch_bytes)"
                                                   : " (not prefetched)");
    else if (op->begin_ns - s->begin > mid) fsdpi_why_say(t, " (its stream is busy before it)");
    else
        fsdpi_why_say(t, " (takes %.*f, longer than what it hides behind)",
                      FSDPI_WHY_MS(t, op->end_ns - op->begin_ns));
}

static uint16_t fsdpi_why_what(const fsdpi_why_span *s) {
    return s->op ? s->op->what : s->waits->what;
}

// Adds the two units for which COMPUTE waits longest, if each has at least a tenth of the wait.
static void fsdpi_why_say_worst(const fsdpi_why *y, int category, fsdpi_why_text *t) {
    const fsdpi_why_step *step = &y->step;
    const fsdpi_why_span *said = NULL;
    for (int turn = 0; turn < 2; turn++) {
        const fsdpi_why_span *worst = NULL;
        int64_t most = 0, most_late = 0;
        for (int32_t i = 0; i < step->num_spans; i++) {
            const fsdpi_why_span *s = &step->spans[i], *longest = s;
            int64_t ns = 0, late = 0;
            if (s->category != category || (said && fsdpi_why_what(said) == fsdpi_why_what(s)))
                continue;
            for (int32_t k = 0; k < step->num_spans; k++) {
                const fsdpi_why_span *o = &step->spans[k];
                if (o->category != category || fsdpi_why_what(o) != fsdpi_why_what(s)) continue;
                ns += o->own, late += o->late ? o->own : 0;
                if (!o->late && o->end - o->begin > longest->end - longest->begin) longest = o;
            }
            if (ns > most || (ns == most && worst && s->begin < worst->begin))
                worst = longest, most = ns, most_late = late;
        }
        if (!worst || most * 10 < step->category[category]) return;
        fsdpi_why_say(t, "%s %s %.*f",
                      turn ? "," : "   worst:", fsdpi_tr_name(step->rank, fsdpi_why_what(worst)),
                      FSDPI_WHY_MS(t, most));
        fsdpi_why_reason(y, worst, most_late * 2 > most, t);
        said = worst;
    }
}

static void fsdpi_why_say_step(const fsdpi_why *y, fsdpi_why_text *t) {
    static const char *const names[] = {
#define FSDP_X(name, text) text,
        FSDPI_WHY_CATEGORIES(FSDP_X)
#undef FSDP_X
    };
    const fsdpi_why_step *s = &y->step;
    const int64_t all = s->end - s->begin;
    t->digits = all < 1000000 ? 4 : all < 10000000 ? 3 : 2;
    fsdpi_why_say(t, "step %.*f ms (median of %d", FSDPI_WHY_MS(t, all), (int)y->num_steps);
    if (s->to > s->from || s->is_part)
        fsdpi_why_say(t, "; %d microbatch%s", (int)(s->to - s->from) + 1,
                      s->to > s->from ? "es" : "");
    if (s->is_part) fsdpi_why_say(t, ", others may be before the trace: FSDP_TRACE_STEPS");
    if (y->job->num > 1)
        fsdpi_why_say(t, "; ranks %.*f .. %.*f", FSDPI_WHY_MS(t, y->shortest),
                      FSDPI_WHY_MS(t, y->longest));
    if (y->job->num < y->job->size)
        fsdpi_why_say(t, "; traces of %d of %d ranks", (int)y->job->num, (int)y->job->size);
    if (s->rank->head.dropped)
        fsdpi_why_say(t, "; %llu records had no room", (unsigned long long)s->rank->head.dropped);
    fsdpi_why_say(t, ")\n  compute  %10.*f   caller's time between calls\n",
                  FSDPI_WHY_MS(t, s->category[FSDPI_WHY_COMPUTE]));
    // If it is more, COMPUTE continued later than the end of the communication.
    fsdpi_why_say(
        t, "  exposed  %10.*f   %s %.*f ms of communication", FSDPI_WHY_MS(t, fsdpi_why_exposed(s)),
        fsdpi_why_exposed(s) > s->comm ? "more than the" : "of", FSDPI_WHY_MS(t, s->comm));
    if (s->rank->head.run == FSDP_RUN_INLINE) fsdpi_why_say(t, " (inline: nothing is hidden)");
    else if (s->comm)
        fsdpi_why_say(t, " (%.0f %% hidden)", 100.0 * (double)s->hidden / (double)s->comm);
    if (s->late) fsdpi_why_say(t, ", %.*f for ranks that came late", FSDPI_WHY_MS(t, s->late));
    fsdpi_why_say(t, "\n");
    for (int p = FSDPI_WHY_GATHER; p < FSDPI_WHY_CATEGORY_COUNT; p++) {
        if (s->category[p] * 1000 < all) continue; // it would be printed as 0.0 %
        fsdpi_why_say(t, "    %-10s%7.*f", names[p], FSDPI_WHY_MS(t, s->category[p]));
        fsdpi_why_say_worst(y, p, t);
        fsdpi_why_say(t, "\n");
    }
    fsdpi_why_say(t, "  host     %10.*f   in calls:", FSDPI_WHY_MS(t, fsdpi_why_host(s)));
    for (int p = FSDPI_WHY_COPY; p >= FSDPI_WHY_CALLS; p--)
        fsdpi_why_say(t, " %s %.*f%s", names[p], FSDPI_WHY_MS(t, s->category[p]),
                      p > FSDPI_WHY_CALLS ? "," : "\n");
}

// Returns 1 if in every step rank `who` of the job is last in more collectives than others are; 0
// if not; -1 without memory. Events and steps are sorted by time.
static int fsdpi_why_is_steady(const fsdpi_tr_job *job, int32_t who) {
    const uint64_t num = job->rank[who].num_steps;
    int64_t *more = (int64_t *)calloc((size_t)num + 1, sizeof *more); // own ones less others
    int steady = 1;
    if (!more) return -1;
    for (int32_t k = 0; k < job->num; k++) {
        const fsdpi_tr_rank *r = &job->rank[k];
        for (uint64_t i = 0, step = 0; i < r->num_records; i++) {
            const int64_t begin = r->records[i].begin_ns;
            while (step < r->num_steps && r->steps[step].end_ns < begin) step++;
            if (step >= r->num_steps || step >= num) break;
            if (r->last[i] == r->head.rank && begin >= r->steps[step].begin_ns)
                more[step] += k == who ? 1 : -1;
        }
    }
    for (uint64_t step = 0; step < num; step++) steady &= more[step] > 0;
    free(more);
    return steady;
}

// Returns the largest possible error of times compared between ranks; -1: unknown.
static int64_t fsdpi_why_error(const fsdpi_tr_job *job) {
    int64_t error = 0;
    for (int32_t k = 0; k < job->num && error >= 0; k++)
        error = job->rank[k].error_ns < 0 ? -1 : fsdpi_why_more(error, job->rank[k].error_ns);
    return error;
}

// Adds which rank came last, over collectives whose members are all there; each counts for its last
// one.
static void fsdpi_why_say_last(const fsdpi_why *y, fsdpi_why_text *t) {
    const fsdpi_tr_job *job = y->job;
    uint64_t all = 0, most = 0;
    int32_t who = -1;
    int64_t num = 0;
    for (int32_t k = 0; k < job->num; k++) {
        const fsdpi_tr_rank *r = &job->rank[k];
        uint64_t own = 0;
        for (uint64_t i = 0; i < r->num_records; i++) own += r->last[i] == r->head.rank;
        all += own;
        if (own > most) most = own, who = k;
        num += (int64_t)r->num_records;
    }
    int64_t *waits = who < 0 ? NULL : (int64_t *)calloc((size_t)num, sizeof *waits);
    if (!waits) return;
    const fsdpi_tr_rank *w = &job->rank[who];
    num = 0;
    for (int32_t k = 0; k < job->num; k++)
        for (uint64_t i = 0; i < job->rank[k].num_records; i++)
            if (k != who && job->rank[k].last[i] == w->head.rank)
                waits[num++] = job->rank[k].peers_ns[i] - job->rank[k].records[i].begin_ns;
    qsort(waits, (size_t)num, sizeof *waits, fsdpi_why_by_time);
    const int64_t median = num ? waits[num / 2] : 0, error = fsdpi_why_error(job);
    const int known = error >= 0 && error <= median, steady = fsdpi_why_is_steady(job, who);
    free(waits);
    if (steady < 0) return;
    fsdpi_why_say(t,
                  "who came last: rank %d in %.0f %% of the collectives, by %.*f ms in the "
                  "median (%s",
                  (int)w->head.rank, 100.0 * (double)most / (double)all, FSDPI_WHY_MS(t, median),
                  !steady               ? "moving"
                  : known || error == 0 ? "steady"
                                        : "perhaps");
    if (error < 0) fsdpi_why_say(t, "; clocks were not compared: hosts' time of day, by --force");
    if (error > 0) fsdpi_why_say(t, "; clocks may be wrong by %.*f ms", FSDPI_WHY_MS(t, error));
    fsdpi_why_say(t, ")\n");
}

// Slots that units hold.
typedef struct fsdpi_why_held {
    uint64_t names, *bytes;            // [pool * names + unit's name], one slot of a pool
    int64_t all, pool[UINT8_MAX + 1u]; // sums
} fsdpi_why_held;

static int fsdpi_why_begin_held(const fsdpi_tr_rank *rank, fsdpi_why_held *h) {
    memset(h, 0, sizeof *h);
    h->names = rank->num_names + 1;
    h->bytes = (uint64_t *)calloc(rank->num_pools * h->names + 1, sizeof *h->bytes);
    return h->bytes != NULL;
}

// Applies an event to the sums. Returns 0 if it neither acquires nor releases. The last name means
// none.
static int fsdpi_why_hold(fsdpi_why_held *h, const fsdpi_tr_event *r) {
    if (r->kind != FSDP_OP_ACQUIRE && r->kind != FSDP_OP_RELEASE) return 0;
    const uint64_t name = r->what < h->names ? r->what : h->names - 1;
    uint64_t *place = &h->bytes[r->label * h->names + name];
    const uint64_t had = *place;
    *place = r->kind == FSDP_OP_ACQUIRE ? r->bytes : 0;
    h->pool[r->label] += (int64_t)(*place - had);
    h->all += (int64_t)(*place - had);
    return 1;
}

// Returns a rank's first event at which units held most, and sums what they held; NULL: nothing.
static const fsdpi_tr_event *fsdpi_why_peak(const fsdpi_tr_rank *rank, fsdpi_why_held *h) {
    const fsdpi_tr_event *peak = NULL;
    int64_t most = 0;
    for (uint64_t i = 0; i < rank->num_records; i++)
        if (fsdpi_why_hold(h, &rank->records[i]) && h->all > most)
            most = h->all, peak = &rank->records[i];
    memset(h->pool, 0, sizeof h->pool), memset(h->bytes, 0, rank->num_pools * h->names * 8);
    for (const fsdpi_tr_event *r = rank->records; peak && r <= peak; r++) fsdpi_why_hold(h, r);
    return peak;
}

static void fsdpi_why_say_memory(const fsdpi_why *y, fsdpi_why_text *t) {
    const fsdpi_tr_rank *rank = y->step.rank;
    fsdpi_why_held held;
    if (!fsdpi_why_begin_held(rank, &held)) return;
    const fsdpi_tr_event *at = fsdpi_why_peak(rank, &held);
    const fsdpi_tr_event *call = at ? fsdpi_why_call_of(rank, 0, rank->num_records, at) : NULL;
    const int offloads = rank->head.cpu_offload && rank->head.run == FSDP_RUN_STREAMS;
    int64_t all = 0, rest = 0;
    int32_t said = 0;
    for (uint64_t p = 0; p < rank->num_pools; p++) all += rank->pools[p].bytes;
    for (uint64_t k = 0; k < rank->num_kept; k++) all += rank->kept[k].bytes;
    char letter;
    const double unit = fsdpi_why_unit(all, &letter);
    fsdpi_why_say(t, "memory");
    if (call)
        fsdpi_why_say(t, " at the peak (step %u, %s of %s)", (unsigned)at->step,
                      fsdpi_tr_call_name(call->label), fsdpi_tr_name(rank, at->what));
    fsdpi_why_say(t, ": %.1f %cB =", (double)all / unit, letter);
    for (uint64_t p = 0; p < rank->num_pools; p++) {
        const int is_slots = p >= FSDP_POOL_GATHER && p <= FSDP_POOL_REDUCE_OUT;
        int64_t bytes = is_slots ? held.pool[p] : rank->pools[p].bytes;
        rest += is_slots ? rank->pools[p].bytes - bytes : 0;
        if (p >= FSDP_POOL_COUNT && rest < 0) { // held slots are in an extension's memory
            const int64_t theirs = fsdpi_why_less(bytes, -rest);
            rest += theirs, bytes -= theirs;
        }
        if (bytes * 1000 < all) continue;
        fsdpi_why_say(t, "%s %s %.1f", said++ ? " +" : "", fsdpi_tr_text(rank, rank->pools[p].name),
                      (double)bytes / unit);
        for (uint32_t k = 0, n = 0; k < held.names && is_slots; k++)
            if (held.bytes[p * held.names + k])
                fsdpi_why_say(t, "%s%s", n++ ? ", " : " (", fsdpi_tr_name(rank, k));
        if (is_slots) fsdpi_why_say(t, ")");
        if (offloads && p < FSDP_POOL_GATHER) fsdpi_why_say(t, " (host)");
    }
    for (uint64_t k = 0; k < rank->num_kept; k++)
        fsdpi_why_say(t, " + states of %s %.1f%s", fsdpi_tr_text(rank, rank->kept[k].name),
                      (double)rank->kept[k].bytes / unit, offloads ? " (host)" : "");
    if (rest > 0) fsdpi_why_say(t, " + slots that nobody holds %.1f", (double)rest / unit);
    fsdpi_why_say(t, "\n");
    free(held.bytes);
}

static void fsdpi_why_screen(const fsdpi_why *y, fsdpi_why_text *t) {
    fsdpi_why_say_step(y, t);
    fsdpi_why_say_last(y, t);
    fsdpi_why_say_memory(y, t);
}

FSDP_API fsdp_status fsdp_trace_report(const char *dir, char *buf, size_t cap) {
    fsdpi_tr_job job;
    fsdpi_why y;
    fsdpi_why_text t = {buf, cap, 0, 0, 0, 0, 0};
    char why[512];
    if (!dir) dir = getenv("FSDP_TRACE");
    if (!buf || !cap) return FSDP_ERR_INVALID_ARG;
    if (fsdpi_tr_read(dir ? dir : "", NULL, 0, &job, why, sizeof why)) {
        fsdpi_why_say(&t, "%s: %s", dir ? dir : "FSDP_TRACE is not set", why);
        return FSDP_ERR_IO;
    }
    const int made = fsdpi_why_make(&job, &y);
    if (made > 0) fsdpi_why_screen(&y, &t);
    fsdpi_why_say(&t, "%s%s", *job.notes.text ? "left out:\n" : "", job.notes.text);
    fsdpi_why_end(&y);
    fsdpi_tr_free(&job);
    if (made <= 0) fsdpi_why_say(&t, made ? "no memory" : "no rank has a whole step in its trace");
    return made > 0 ? FSDP_OK : made ? FSDP_ERR_OUT_OF_MEMORY : FSDP_ERR_INVALID_STATE;
}

#endif // FSDPI_TRACE_BREAKDOWN_H
