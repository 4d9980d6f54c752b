/* fsdptrace_json.h - traces in Chrome's JSON, which Perfetto opens

   SPDX-License-Identifier: MIT */
#ifndef FSDP_TOOLS_FSDPTRACE_JSON_H
#define FSDP_TOOLS_FSDPTRACE_JSON_H

#include "../fsdp_trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A process for each rank; its threads: steps, host (the calls of the program), and a stream each.
   A collective that has waited for peers, or for other streams before it began, holds an event for
   that. The slots that units hold are a counter for each pool. */
enum { JSON_STEPS, JSON_HOST, JSON_STREAM };    // threads; JSON_STREAM + FSDP_STREAM_*
enum { JSON_EVENTS = 4, JSON_INEXACT = 50000 }; // most events of an op; nanoseconds
static const char *const json_streams[FSDP_STREAM_COUNT] = {"compute", "gather", "reduce",
                                                            "all_reduce", "extension"};
static const char *const json_states[FSDP_STATE_COUNT] = {"idle", "forward", "pre_backward",
                                                          "post_backward"};

typedef struct json_event {
    int64_t begin, end;
    const fsdpi_tr_event *record;  // NULL: a step
    int64_t peers;                 // INT64_MIN: it is not matched
    int32_t thread, depth, last;   // depth: of two equal spans the outer one has less
    char name[160];
} json_event;

typedef struct json_writer {
    FILE *to;
    const fsdpi_tr_rank *rank;
    int64_t zero;
    int said;
} json_writer;

static int json_by_place(const void *a, const void *b) {
    const json_event *x = (const json_event *)a, *y = (const json_event *)b;
    if (x->thread != y->thread) return x->thread - y->thread;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end > y->end ? -1 : 1;
    return x->depth - y->depth;
}

// Returns the number of bytes of the character that begins here; 0: it is not UTF-8.
static int json_utf8(const unsigned char *c) {
    int num = c[0] < 0x80 ? 1 : c[0] < 0xc2 ? 0 : c[0] < 0xe0 ? 2 : c[0] < 0xf0 ? 3 : 4;
    if (c[0] > 0xf4) return 0;
    for (int k = 1; k < num; k++)
        if ((c[k] & 0xc0) != 0x80) return 0;
    if (c[0] == 0xe0 && c[1] < 0xa0) return 0; // a shorter one says the same
    if (c[0] == 0xf0 && c[1] < 0x90) return 0;
    if (c[0] == 0xed && c[1] > 0x9f) return 0; // half of a pair
    return c[0] == 0xf4 && c[1] > 0x8f ? 0 : num;
}

// Writes a text in quotes. Names are not trusted: control characters are escaped, and bytes that
// are no UTF-8 become U+FFFD.
static void json_text(FILE *to, const char *text) {
    fputc('"', to);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\') fprintf(to, "\\%c", *c);
        else if (*c >= 0x20 && *c < 0x7f) fputc(*c, to);
        else if (*c < 0x80) fprintf(to, "\\u%04x", *c);
        else if (!json_utf8(c)) fputs("\\ufffd", to);
        else {
            int num = json_utf8(c);
            fwrite(c, 1, (size_t)num, to);
            c += num - 1;
        }
    }
    fputc('"', to);
}

// Begins an event. Times are microseconds. Perfetto gives thread 0 of every process to its own idle
// thread, and takes a thread with the number of its process for the main one: so threads are
// numbered above all ranks.
static void json_begin(json_writer *w, const char *phase, int thread, const char *name,
                       int64_t ns) {
    fprintf(w->to, "%s\n{\"ph\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":%lld.%03d,\"name\":",
            w->said++ ? "," : "", phase, w->rank->head.rank,
            thread + w->rank->head.size, (long long)((ns - w->zero) / 1000),
            (int)((ns - w->zero) % 1000));
    json_text(w->to, name);
}

// Writes the name of a process or of a thread.
static void json_named(json_writer *w, const char *what, int thread, const char *name) {
    json_begin(w, "M", thread, what, w->zero);
    fputs(",\"args\":{\"name\":", w->to);
    json_text(w->to, name);
    fputs("}}", w->to);
}

// Prints the name of an event: "h.3 all_gather 14.2 MB".
static void json_name(const fsdpi_tr_rank *r, const fsdpi_tr_event *o, char *out, size_t cap) {
    const char *what = fsdpi_tr_name(r, o->what);
    const char *did = o->kind < FSDPI_TR_CALL ? fsdp_op_name(o->kind)
                      : *what && o->what >= r->num_units ? "" // a span, or a call with its own name
                                                         : fsdpi_tr_call_name(o->label);
    char size[24] = "", letter;
    const double unit = fsdpi_why_unit((int64_t)o->bytes, &letter);
    if (o->kind < FSDPI_TR_CALL && o->bytes)
        snprintf(size, sizeof size, " %.1f %cB", (double)o->bytes / unit, letter);
    snprintf(out, cap, "%s%s%s%s", what, *what && *did ? " " : "", did, size);
}

static void json_args(json_writer *w, const json_event *e) {
    const fsdpi_tr_rank *r = w->rank;
    const fsdpi_tr_event *o = e->record;
    fprintf(w->to, "\"step\":%u,\"seq\":%u", o->step, o->seq);
    if (o->kind >= FSDPI_TR_CALL) return;
    fputs(",\"why\":", w->to);
    json_text(w->to, fsdpi_tr_text(r, r->labels[o->label]));
    fputs(",\"state\":", w->to);
    json_text(w->to, json_states[o->state]);
    fprintf(w->to, ",\"bytes\":%llu,\"waited_us\":%.3f", (unsigned long long)o->bytes,
            (double)o->waited_ns / 1000);
    if (o->comm) fprintf(w->to, ",\"group\":%u", o->comm);
    if (e->last >= 0) fprintf(w->to, ",\"last_rank\":%d", e->last);
}

/* Writes the events of a rank, in order. An event of a thread ends before the one around it does:
   returns 0 if that is not so, and the reason. */
static int json_events(json_writer *w, json_event *list, int64_t num, char *why, size_t cap) {
    const json_event *open[16];
    int depth = 0;
    qsort(list, (size_t)num, sizeof *list, json_by_place);
    for (int64_t i = 0; i < num; i++) {
        const json_event *e = &list[i];
        while (depth && (open[depth - 1]->thread != e->thread || open[depth - 1]->end <= e->begin))
            depth--;
        if (depth == 16 || (depth && open[depth - 1]->end < e->end)) {
            snprintf(why, cap, "rank %d: '%s' and '%s' overlap on a thread", w->rank->head.rank,
                     open[depth - 1]->name, e->name);
            return 0;
        }
        open[depth++] = e;
        json_begin(w, "X", e->thread, e->name, e->begin);
        fprintf(w->to, ",\"dur\":%lld.%03d,\"args\":{", (long long)((e->end - e->begin) / 1000),
                (int)((e->end - e->begin) % 1000));
        if (e->record) json_args(w, e);
        fputs("}}", w->to);
    }
    return 1;
}

// Adds an event, or what there is of it from like->begin on.
static void json_add(json_event *list, int64_t *num, const json_event *like, int64_t begin,
                     int64_t end, const char *name) {
    if (begin < like->begin) begin = like->begin;
    if (begin >= end && like->depth) return; // a part that took no time
    json_event *e = &list[(*num)++];
    *e = *like;
    e->begin = begin, e->end = end;
    snprintf(e->name, sizeof e->name, "%s", name);
}

// Makes the events of a record: at most JSON_EVENTS. `ended`: the end of the records before it on
// its stream. A record that begins a little earlier is moved there: times of a device are not
// exact.
static void json_record(const fsdpi_tr_rank *r, uint64_t i, json_event *list, int64_t *num,
                        int64_t *ended) {
    const fsdpi_tr_event *o = &r->records[i];
    json_event e;
    memset(&e, 0, sizeof e);
    e.record = o, e.last = r->last[i];
    e.thread = o->kind == FSDPI_TR_CALL ? JSON_HOST : JSON_STREAM + o->stream;
    json_name(r, o, e.name, sizeof e.name);
    int64_t waited = o->stream == FSDP_STREAM_COMPUTE ? (int64_t)o->waited_ns : 0;
    e.begin = o->begin_ns - waited;
    if (o->kind != FSDPI_TR_CALL) {
        if (e.begin < *ended && *ended < o->end_ns && *ended - e.begin <= JSON_INEXACT)
            e.begin = *ended;
        if (*ended < o->end_ns) *ended = o->end_ns;
    }
    json_add(list, num, &e, o->begin_ns - waited, o->end_ns, e.name);
    e.depth = 1;
    json_add(list, num, &e, o->begin_ns - waited, o->begin_ns, "waits for another stream");
    if (r->last[i] < 0) return;
    int64_t came = r->peers_ns[i] < o->end_ns ? r->peers_ns[i] : o->end_ns;
    char text[40];
    snprintf(text, sizeof text, "waits for rank %d", r->last[i]);
    if (came > o->begin_ns) json_add(list, num, &e, o->begin_ns, came, text);
    if (came > o->begin_ns) json_add(list, num, &e, came, o->end_ns, "transfer");
}

static int json_is_event(const fsdpi_tr_event *o) {
    return o->kind < FSDP_OP_HOOK || o->kind == FSDPI_TR_CALL;
}

// Spans of the program may overlap.
static void json_span(json_writer *w, uint64_t i) {
    const fsdpi_tr_event *o = &w->rank->records[i];
    char name[160];
    json_name(w->rank, o, name, sizeof name);
    for (int end = 0; end < 2; end++) {
        json_begin(w, end ? "e" : "b", JSON_HOST, name, end ? o->end_ns : o->begin_ns);
        fprintf(w->to, ",\"cat\":\"program\",\"id\":\"%d.%llu\"}", w->rank->head.rank,
                (unsigned long long)i);
    }
}

static void json_counter(json_writer *w, uint64_t pool, int64_t ns, int64_t bytes) {
    json_begin(w, "C", JSON_STEPS, fsdpi_tr_text(w->rank, w->rank->pools[pool].name), ns);
    fprintf(w->to, ",\"args\":{\"bytes\":%lld}}", (long long)bytes);
}

// Writes the bytes that units hold, in the order of the markers. Pools without markers have the
// bytes after the first traced step of an optimizer.
static int json_memory(json_writer *w) {
    const fsdpi_tr_rank *r = w->rank;
    fsdpi_why_held held;
    uint8_t marked[UINT8_MAX + 1] = {0};
    if (!fsdpi_why_begin_held(r, &held)) return 0;
    for (uint64_t i = 0; i < r->num_records; i++) {
        const fsdpi_tr_event *o = &r->records[i];
        if (!fsdpi_why_hold(&held, o)) continue;
        json_counter(w, o->label, o->begin_ns, held.pool[o->label]);
        marked[o->label] = 1;
    }
    for (uint64_t p = 0; p < r->num_pools; p++)
        if (r->pools[p].bytes && (p > UINT8_MAX || !marked[p]))
            json_counter(w, p, w->zero, r->pools[p].bytes);
    free(held.bytes);
    return 1;
}

static int json_rank(json_writer *w, char *why, size_t cap) {
    const fsdpi_tr_rank *r = w->rank;
    json_event *list = (json_event *)calloc(JSON_EVENTS * r->num_records + r->num_steps + 1,
                                            sizeof *list);
    int64_t num = 0, ended[FSDP_STREAM_COUNT];
    char text[160];
    if (!list) return 0;
    for (int k = 0; k < FSDP_STREAM_COUNT; k++) ended[k] = INT64_MIN;
    snprintf(text, sizeof text, "rank %d (%.63s)", r->head.rank, r->head.host);
    json_named(w, "process_name", JSON_STEPS, text);
    json_named(w, "thread_name", JSON_STEPS, "steps");
    json_named(w, "thread_name", JSON_HOST, "host");
    for (int k = 0; k < FSDP_STREAM_COUNT; k++)
        json_named(w, "thread_name", JSON_STREAM + k, json_streams[k]);
    for (uint64_t k = 0; k < r->num_steps; k++) {
        json_event *e = &list[num++];
        e->begin = r->steps[k].begin_ns, e->end = r->steps[k].end_ns, e->last = -1;
        snprintf(e->name, sizeof e->name, "step %u", r->steps[k].number);
    }
    for (uint64_t i = 0; i < r->num_records; i++) {
        const fsdpi_tr_event *o = &r->records[i];
        if (json_is_event(o)) json_record(r, i, list, &num, &ended[o->stream]);
        else if (o->kind == FSDPI_TR_SPAN) json_span(w, i);
    }
    int done = json_memory(w) && json_events(w, list, num, why, cap);
    free(list);
    return done;
}

// Returns 0, or -1 with the reason.
static int json_write(const fsdpi_tr_job *job, FILE *to, char *why, size_t cap) {
    json_writer w = {to, NULL, INT64_MAX, 0};
    for (int k = 0; k < job->num; k++) {
        const fsdpi_tr_rank *r = &job->rank[k];
        for (uint64_t i = 0; i < r->num_records; i++) {
            int64_t begin = r->records[i].begin_ns - (int64_t)r->records[i].waited_ns;
            if (begin < w.zero) w.zero = begin;
        }
        for (uint64_t i = 0; i < r->num_steps; i++)
            if (r->steps[i].begin_ns < w.zero) w.zero = r->steps[i].begin_ns;
    }
    if (w.zero == INT64_MAX) w.zero = 0;
    snprintf(why, cap, "no memory");
    fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[", to);
    for (int k = 0; k < job->num; k++) {
        w.rank = &job->rank[k];
        if (!json_rank(&w, why, cap)) return -1;
    }
    fputs("\n]}\n", to);
    return 0;
}

#endif // FSDP_TOOLS_FSDPTRACE_JSON_H
