/* trace/record.h - the recorder: records of some steps in memory, then in a file

   A part of fsdp_trace.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_TRACE_H
#include "../fsdp_trace.h"
#endif
#ifndef FSDPI_TRACE_RECORD_H
#define FSDPI_TRACE_RECORD_H

#include "format.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// Owns: an extension of the model, and its memory, which is made at the start. Worker threads call
// fsdpi_tr_ran: they take the next place by an atomic addition, and look names up in a table to
// which only the caller's thread adds. All else is the caller's thread's.

enum { FSDPI_TR_DEPTH = 8, FSDPI_TR_OTHERS = 64, FSDPI_TR_GROUPS = 1024, FSDPI_TR_MEETINGS = 32 };

typedef struct fsdpi_tr_key { // of a text: where it lies. NULL: free
    const char *text;
    uint64_t name;
} fsdpi_tr_key;

typedef struct fsdpi_tr_open { // a call that has begun
    int64_t begin_ns;
    uint32_t seq;
    uint16_t what;
    uint8_t call;
} fsdpi_tr_open;

struct fsdp_trace {
    fsdp_extension extension;
    fsdp_model *model;
    fsdp_world *world;
    fsdp_trace *next; // in fsdpi_tr_all
    const char *dir;  // of the environment or the caller until `path` is made
    char path[1024], job[128];
    int64_t bytes, first_step, last_step;
    int number, streams; // of the traces of this world; a bit for each that the caller's thread is
    fsdp_status written; // the result of writing
    uint32_t is_on;      // records are taken now
    int is_done, is_between, has_other;
    int depth;
    fsdpi_tr_open open[FSDPI_TR_DEPTH], other; // other: a call of an extension
    int64_t host_ns;                           // last time that the caller's thread has seen
    uint32_t seq;                              // of the model's last record
    uint64_t next_record, room;
    uint64_t num_steps, num_meetings, num_names, num_keys;
    fsdpi_tr_record *record; // [room]
    fsdpi_tr_step *step;     // [last_step - first_step + 1]
    fsdpi_tr_key *key;       // [num_keys], a power of two
    char *block;             // of the file
    const fsdp_comm *group[FSDPI_TR_GROUPS]; // by number
    fsdpi_tr_meeting meeting[2 * FSDPI_TR_MEETINGS];
    char others[FSDPI_TR_OTHERS][48]; // names behind those of the units
};

/* -------------------------------------------------------------------------------------------- */
// Names, and records in memory.

static fsdpi_tr_key *fsdpi_tr_key_of(const fsdp_trace *t, const char *text) {
    uint64_t at = (uint64_t)(uintptr_t)text * 0x9E3779B97F4A7C15u >> 32;
    for (;; at++) {
        fsdpi_tr_key *key = &t->key[at & (t->num_keys - 1)];
        const char *had = __atomic_load_n(&key->text, __ATOMIC_ACQUIRE);
        if (had == text || !had) return key;
    }
}

static void fsdpi_tr_add_name(fsdp_trace *t, const char *text) {
    fsdpi_tr_key *key = fsdpi_tr_key_of(t, text);
    if (key->text || t->num_names == FSDPI_TR_NO_NAME) return;
    key->name = t->num_names++;
    __atomic_store_n(&key->text, text, __ATOMIC_RELEASE);
}

// A name that is no unit's. The units' are there from the start.
static void fsdpi_tr_note_name(fsdp_trace *t, const char *text) {
    uint64_t units = (uint64_t)fsdp_num_units(t->model);
    if (!text || fsdpi_tr_key_of(t, text)->text || t->num_names - units >= FSDPI_TR_OTHERS) return;
    strncpy(t->others[t->num_names - units], text, sizeof t->others[0] - 1);
    fsdpi_tr_add_name(t, text);
}

static uint16_t fsdpi_tr_name_of(const fsdp_trace *t, const char *text) {
    const fsdpi_tr_key *key = text ? fsdpi_tr_key_of(t, text) : NULL;
    return key && key->text ? (uint16_t)key->name : (uint16_t)FSDPI_TR_NO_NAME;
}

// The place of a new record, or NULL: there is no room.
static fsdpi_tr_record *fsdpi_tr_place(fsdp_trace *t) {
    uint64_t at = __atomic_fetch_add(&t->next_record, 1, __ATOMIC_RELAXED);
    return at < t->room ? &t->record[at] : NULL;
}

static void fsdpi_tr_take(fsdp_trace *t, const fsdp_op *op, int64_t begin_ns, int64_t end_ns) {
    const int is_marker = op->kind > FSDP_OP_HOOK;
    const fsdp_buf *buf = op->kind == FSDP_OP_RELEASE ? op->src : op->dst;
    fsdpi_tr_record *r = fsdpi_tr_place(t);
    if (!r) return;
    r->begin_ns = begin_ns, r->end_ns = end_ns;
    r->bytes = is_marker ? (uint64_t)fsdp_buf_nbytes(buf) : op->bytes;
    r->waited_ns = (uint32_t)(op->waited_ns < UINT32_MAX ? op->waited_ns : UINT32_MAX);
    r->seq = (uint32_t)op->seq;
    r->step = 0; // until it is written
    r->slot = is_marker ? (uint32_t)op->slot : 0;
    r->what = fsdpi_tr_name_of(t, op->what);
    r->comm = op->comm_number;
    r->kind = op->kind, r->label = is_marker ? op->pool : op->label;
    r->stream = op->stream, r->state = op->state;
}

static void fsdpi_tr_take_call(fsdp_trace *t, const fsdpi_tr_open *o, int64_t end_ns) {
    fsdpi_tr_record *r = fsdpi_tr_place(t);
    if (!r) return;
    memset(r, 0, sizeof *r);
    r->begin_ns = o->begin_ns, r->end_ns = end_ns;
    r->seq = o->seq, r->slot = t->seq + 1 - o->seq;
    r->what = o->what;
    r->kind = FSDPI_TR_CALL, r->label = o->call;
}

/* -------------------------------------------------------------------------------------------- */
// What the library tells.

static void fsdpi_tr_finish(fsdp_trace *t);

// The first call of a step.
static void fsdpi_tr_begin_step(fsdp_trace *t) {
    fsdp_op op;
    fsdp_op_init(&op, t->model, NULL, FSDP_OP_HOOK, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);
    int64_t number = (int64_t)op.step;
    t->is_between = 0;
    if (number > t->last_step) fsdpi_tr_finish(t);
    if (number < t->first_step || number > t->last_step) return;
    int64_t now = fsdp_now(t->world);
    if (t->num_steps) t->step[t->num_steps - 1].end_ns = t->host_ns;
    fsdpi_tr_step *step = &t->step[t->num_steps++];
    step->number = (uint32_t)number, step->first_seq = t->seq + 1;
    step->begin_ns = t->host_ns = now;
    __atomic_store_n(&t->is_on, 1u, __ATOMIC_RELAXED);
}

// A call of an extension has ended before the program's next one.
static void fsdpi_tr_end_other(fsdp_trace *t, int64_t end_ns) {
    if (t->has_other) fsdpi_tr_take_call(t, &t->other, end_ns);
    t->has_other = 0;
}

static int fsdpi_tr_call(void *user, fsdp_model *model, fsdp_unit *unit, int call,
                         fsdp_status *status) {
    fsdp_trace *t = (fsdp_trace *)user;
    (void)model, (void)status;
    if (t->is_done) return 0;
    if (t->is_between && call < FSDP_CALL_FINALIZE) fsdpi_tr_begin_step(t);
    if (!t->is_on || t->depth == FSDPI_TR_DEPTH) return 0;
    if (call != FSDP_CALL_PARAMS_CHANGED) fsdpi_tr_end_other(t, t->host_ns);
    fsdpi_tr_open *o = &t->open[t->depth++];
    o->begin_ns = t->host_ns = fsdp_now(t->world);
    o->seq = t->seq + 1;
    o->what = fsdpi_tr_name_of(t, unit ? fsdp_unit_name(unit) : NULL);
    o->call = (uint8_t)call;
    return 0;
}

static void fsdpi_tr_returned(void *user, fsdp_model *model, fsdp_unit *unit, int call) {
    fsdp_trace *t = (fsdp_trace *)user;
    (void)model, (void)unit;
    if (call == FSDP_CALL_FINALIZE) t->is_between = 1;
    if (!t->is_on) return;
    while (t->depth && t->open[t->depth - 1].call != call) t->depth--; // that have failed
    if (!t->depth) return;
    t->host_ns = fsdp_now(t->world);
    fsdpi_tr_take_call(t, &t->open[--t->depth], t->host_ns);
    if (call == FSDP_CALL_PARAMS_CHANGED) fsdpi_tr_end_other(t, t->host_ns);
}

static int fsdpi_tr_op(void *user, fsdp_model *model, fsdp_op *op) {
    fsdp_trace *t = (fsdp_trace *)user;
    (void)model;
    if (op->model) t->seq = (uint32_t)op->seq;
    if (!t->is_on) return 0;
    if (op->comm && op->comm_number < FSDPI_TR_GROUPS) t->group[op->comm_number] = op->comm;
    fsdpi_tr_note_name(t, op->what);
    if (op->kind > FSDP_OP_HOOK) fsdpi_tr_take(t, op, t->host_ns, t->host_ns);
    if (op->kind != FSDP_OP_HOOK || t->depth) return 0;
    fsdpi_tr_end_other(t, t->host_ns);
    t->has_other = 1;
    t->other.begin_ns = t->host_ns = fsdp_now(t->world);
    t->other.seq = t->seq;
    t->other.what = fsdpi_tr_name_of(t, op->what);
    t->other.call = (uint8_t)op->count;
    return 0;
}

static void fsdpi_tr_ran(void *user, fsdp_model *model, const fsdp_op *op, int64_t begin_ns,
                         int64_t end_ns) {
    fsdp_trace *t = (fsdp_trace *)user;
    (void)model;
    if (!__atomic_load_n(&t->is_on, __ATOMIC_RELAXED)) return;
    if (t->streams >> op->stream & 1) t->host_ns = end_ns;
    fsdpi_tr_take(t, op, begin_ns, end_ns);
}

FSDP_API void fsdp_trace_span(fsdp_trace *trace, const char *name, int64_t begin_ns,
                              int64_t end_ns) {
    if (!trace || !trace->is_on) return;
    fsdpi_tr_note_name(trace, name);
    fsdpi_tr_record *r = fsdpi_tr_place(trace);
    if (!r) return;
    memset(r, 0, sizeof *r);
    r->begin_ns = begin_ns, r->end_ns = end_ns > begin_ns ? end_ns : begin_ns;
    r->what = fsdpi_tr_name_of(trace, name);
    r->kind = FSDPI_TR_SPAN;
}
