/* trace/record.h - the recorder: records of some steps in memory, then in a file

   An extension of the model, and its memory, which is allocated at the start. Worker threads call
   fsdpi_tr_ran: they take the next entry by an atomic addition, and look names up in a table that
   only the caller's thread extends. Only the caller's thread uses the other state.
   State: fsdp_trace.
   Callers: programs.

   A part of fsdp_trace.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_TRACE_H
#include "../../fsdp_trace.h"
#endif
#ifndef FSDPI_TRACE_RECORD_H
#define FSDPI_TRACE_RECORD_H

#include "format.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

extern int fsdpi_tr_gethostname(char *name, size_t size) __asm__("gethostname");
extern int fsdpi_tr_clock_gettime(int clock, int64_t time[2]) __asm__("clock_gettime");

enum { FSDPI_TR_DEPTH = 8, FSDPI_TR_OTHERS = 64, FSDPI_TR_GROUPS = 1024, FSDPI_TR_KEEPERS = 8 };

typedef struct fsdpi_tr_key { // a text's address; NULL: free
    const char *text;
    uint64_t name;
} fsdpi_tr_key;

typedef struct fsdpi_tr_open { // a call that has begun
    int64_t begin_ns;
    uint32_t seq;
    uint16_t what;
    uint8_t call;
} fsdpi_tr_open;

typedef struct fsdpi_tr_keeper { // an extension that keeps states
    char name[32];
    int64_t bytes;
} fsdpi_tr_keeper;

struct fsdp_trace {
    fsdp_extension extension;
    fsdp_model *model;
    fsdp_world *world;
    char path[1024], job[128];
    int64_t bytes, first_step, last_step;
    int streams;    // bits: streams whose ops the caller's thread runs
    int error;      // errno of the file
    uint32_t is_on; // 1: events are recorded
    int is_of_environment;
    int is_done, is_between, has_other; // is_done: the file is written, or cannot be
    int depth;
    fsdpi_tr_open open[FSDPI_TR_DEPTH], other; // other: a call of an extension
    int64_t host_ns;                           // last time that the caller's thread has read
    uint32_t seq;                              // number of the model's last op
    uint64_t next_record, room;
    uint64_t num_steps, num_meetings, num_names, num_keys;
    fsdpi_tr_event *record;                  // [room]
    fsdpi_tr_step *step;                     // [last_step - first_step + 1]
    fsdpi_tr_key *key;                       // [num_keys], a power of two
    int32_t *rank;                           // [ranks of the world]
    const fsdp_comm *group[FSDPI_TR_GROUPS]; // by number
    fsdpi_tr_meeting meeting[2 * FSDPI_TR_MEETINGS];
    char others[FSDPI_TR_OTHERS][48];  // names after those of the units
    int64_t pool_bytes[FSDP_POOL_MAX]; // states too, see fsdpi_tr_pool
    fsdpi_tr_keeper keeper[FSDPI_TR_KEEPERS];
    int num_keepers, has_memory;
    char block[FSDPI_TR_BLOCK]; // one block of the file
};

/* -------------------------------------------------------------------------------------------- */
// Names, and events in memory.

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

// Notes a name that is no unit's. Units' names are there from the start.
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

// Returns a new event, or NULL if there is no room.
static fsdpi_tr_event *fsdpi_tr_place(fsdp_trace *t) {
    uint64_t at = __atomic_fetch_add(&t->next_record, 1, __ATOMIC_RELAXED);
    return at < t->room ? &t->record[at] : NULL;
}

static void fsdpi_tr_take(fsdp_trace *t, const fsdp_op *op, int64_t begin_ns, int64_t end_ns) {
    const int is_marker = op->kind > FSDP_OP_HOOK;
    const fsdp_buf *buf = op->kind == FSDP_OP_RELEASE ? op->src : op->dst;
    fsdpi_tr_event *r = fsdpi_tr_place(t);
    if (!r) return;
    r->begin_ns = begin_ns, r->end_ns = end_ns > begin_ns ? end_ns : begin_ns;
    r->bytes = is_marker ? (uint64_t)fsdp_buf_nbytes(buf) : op->bytes;
    r->waited_ns = (uint32_t)(op->waited_ns <= 0           ? 0
                              : op->waited_ns < UINT32_MAX ? op->waited_ns
                                                           : UINT32_MAX);
    r->seq = (uint32_t)op->seq;
    r->step = 0; // until the file is written
    r->slot = is_marker ? (uint32_t)op->slot : 0;
    r->what = fsdpi_tr_name_of(t, op->what);
    r->comm = op->comm_number;
    r->kind = op->kind, r->label = is_marker ? op->pool : op->label;
    r->stream = op->stream, r->state = op->state;
}

static void fsdpi_tr_take_call(fsdp_trace *t, const fsdpi_tr_open *o, int64_t end_ns) {
    fsdpi_tr_event *r = fsdpi_tr_place(t);
    if (!r) return;
    memset(r, 0, sizeof *r);
    r->begin_ns = o->begin_ns, r->end_ns = end_ns;
    r->seq = o->seq, r->slot = t->seq + 1 - o->seq;
    r->what = o->what;
    r->kind = FSDPI_TR_CALL, r->label = o->call;
}

/* -------------------------------------------------------------------------------------------- */
// Callbacks of the extension.

static void fsdpi_tr_finish(fsdp_trace *t, int meets);
static FSDP_COLD fsdp_status fsdpi_tr_result(const fsdp_trace *t);

// Notes the slots that units hold when the trace begins, as if they were acquired then.
static FSDP_COLD void fsdpi_tr_take_held(fsdp_trace *t) {
    fsdp_param_view v = FSDP_ZERO;
    for (const fsdp_unit *last = NULL; fsdp_next_param(t->model, &v); last = v.unit) {
        fsdp_memory held;
        if (v.unit == last || fsdp_unit_memory(v.unit, &held)) continue;
        for (int pool = 0; pool < FSDP_POOL_COUNT; pool++) {
            fsdpi_tr_event *r = held.pool_slots[pool] ? fsdpi_tr_place(t) : NULL;
            if (!r) continue;
            memset(r, 0, sizeof *r);
            r->begin_ns = r->end_ns = t->host_ns;
            r->bytes = (uint64_t)held.pool_bytes[pool];
            r->seq = t->seq + 1, r->slot = FSDPI_TR_HELD;
            r->what = fsdpi_tr_name_of(t, fsdp_unit_label(v.unit));
            r->kind = FSDP_OP_ACQUIRE, r->label = (uint8_t)pool;
        }
    }
}

// Notes the pools' largest sizes and the extensions' states, once: an optimizer may be destroyed
// before the trace ends. A query of sizes leaves states unchanged.
static FSDP_COLD void fsdpi_tr_note_memory(fsdp_trace *t) {
    fsdp_state_item item = FSDP_ZERO;
    fsdp_memory now;
    if (fsdp_model_memory(t->model, &now)) return;
    for (int p = 0; p < FSDP_POOL_MAX; p++)
        if (now.pool_bytes[p] > t->pool_bytes[p]) t->pool_bytes[p] = now.pool_bytes[p];
    if (t->has_memory) return;
    t->has_memory = item.sizes_only = 1;
    while (!fsdp_next_state(t->model, &item) && item.name) {
        fsdpi_tr_keeper *k = &t->keeper[t->num_keepers];
        if (!t->num_keepers || strncmp(k[-1].name, item.extension, sizeof k->name - 1) != 0) {
            if (t->num_keepers == FSDPI_TR_KEEPERS) return;
            k->bytes = 0, t->num_keepers++;
            strncpy(k->name, item.extension, sizeof k->name - 1);
        } else k--;
        k->bytes += item.numel * (int64_t)fsdp_dtype_size(item.dtype);
    }
}

// Handles the first call of a step.
static FSDP_COLD void fsdpi_tr_begin_step(fsdp_trace *t) {
    fsdp_op op;
    fsdp_op_init(&op, t->model, NULL, FSDP_OP_HOOK, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);
    int64_t number = (int64_t)op.step;
    t->is_between = 0;
    // After a failed finalize the step continues.
    if (t->num_steps && t->step[t->num_steps - 1].number >= (uint32_t)number) return;
    if (number > t->last_step) {
        fsdpi_tr_finish(t, 1);
        (void)fsdpi_tr_result(t); // it is logged, and fsdp_trace_stop returns it
    }
    if (number < t->first_step || number > t->last_step) return;
    int64_t now = fsdp_now(t->world);
    if (t->num_steps) t->step[t->num_steps - 1].end_ns = t->host_ns;
    fsdpi_tr_step *step = &t->step[t->num_steps++];
    step->number = (uint32_t)number, step->first_seq = t->seq + 1;
    step->begin_ns = t->host_ns = now;
    if (t->num_steps == 1) fsdpi_tr_take_held(t);
    __atomic_store_n(&t->is_on, 1u, __ATOMIC_RELAXED);
}

// Ends a call of an extension, which has ended before the program's next one.
static void fsdpi_tr_end_other(fsdp_trace *t, int64_t end_ns) {
    if (t->has_other) fsdpi_tr_take_call(t, &t->other, end_ns);
    t->has_other = 0;
}

static int fsdpi_tr_call(void *user, fsdp_model *model, fsdp_unit *unit, int call,
                         fsdp_status *status) {
    fsdp_trace *t = (fsdp_trace *)user;
    (void)model, (void)status;
    if (t->is_between && call < FSDP_CALL_FINALIZE) fsdpi_tr_begin_step(t);
    int ends = call != FSDP_CALL_SET && call != FSDP_CALL_RESET && call != FSDP_CALL_LOAD;
    if (!t->is_on || !ends || t->depth == FSDPI_TR_DEPTH) return 0;
    if (call != FSDP_CALL_PARAMS_CHANGED || t->other.call != FSDP_CALL_EXTENSION)
        fsdpi_tr_end_other(t, t->host_ns); // the program's optimizer is the caller
    fsdpi_tr_open *o = &t->open[t->depth++];
    o->begin_ns = t->host_ns = fsdp_now(t->world);
    o->seq = t->seq + 1;
    o->what = fsdpi_tr_name_of(t, unit ? fsdp_unit_label(unit) : NULL);
    o->call = (uint8_t)call;
    return 0;
}

static void fsdpi_tr_returned(void *user, fsdp_model *model, fsdp_unit *unit, int call) {
    fsdp_trace *t = (fsdp_trace *)user;
    (void)model, (void)unit;
    if (call == FSDP_CALL_FINALIZE) t->is_between = 1;
    if (!t->is_on) return;
    while (t->depth && t->open[t->depth - 1].call != call) t->depth--; // these calls have failed
    if (!t->depth) return;
    t->host_ns = fsdp_now(t->world);
    fsdpi_tr_take_call(t, &t->open[--t->depth], t->host_ns);
    if (call != FSDP_CALL_PARAMS_CHANGED) return;
    t->other.call = (uint8_t)call; // such a call is a step of an optimizer
    fsdpi_tr_end_other(t, t->host_ns);
    if (!t->has_memory) fsdpi_tr_note_memory(t); // once, at the end, since it takes time
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
    fsdpi_tr_event *r = fsdpi_tr_place(trace);
    if (!r) return;
    memset(r, 0, sizeof *r);
    r->begin_ns = begin_ns, r->end_ns = end_ns > begin_ns ? end_ns : begin_ns;
    r->what = fsdpi_tr_name_of(trace, name);
    r->kind = FSDPI_TR_SPAN;
}

/* -------------------------------------------------------------------------------------------- */
// The file. Its sections are written in order: each pass offers all entries, and takes those of one
// section. The first pass counts them.

typedef struct fsdpi_tr_out {
    FILE *file;
    char *block;
    size_t used;
    int section, error; // section: of fsdpi_tr_section; -1: count
    uint32_t text;      // bytes of TEXT so far
    fsdpi_tr_header head;
} fsdpi_tr_out;

static void fsdpi_tr_flush(fsdpi_tr_out *o) {
    uint64_t sum = fsdpi_tr_sum(o->block, o->used);
    memcpy(o->block + o->used, &sum, sizeof sum);
    if (!o->error && fwrite(o->block, o->used + sizeof sum, 1, o->file) != 1) o->error = errno;
    o->used = 0;
}

static void fsdpi_tr_put(fsdpi_tr_out *o, const void *data, size_t bytes) {
    for (size_t done = 0, piece; done < bytes; done += piece, o->used += piece) {
        if (o->used == FSDPI_TR_BLOCK - sizeof(uint64_t)) fsdpi_tr_flush(o);
        piece = FSDPI_TR_BLOCK - sizeof(uint64_t) - o->used;
        if (piece > bytes - done) piece = bytes - done;
        memcpy(o->block + o->used, (const char *)data + done, piece);
    }
}

// Offers an entry of a section.
static FSDP_COLD void fsdpi_tr_offer(fsdpi_tr_out *o, int section, const void *entry, size_t size) {
    if (o->section < 0) o->head.section[section].count += section == FSDPI_TR_IN_TEXT ? size : 1;
    else if (o->section == section) fsdpi_tr_put(o, entry, size);
}

static FSDP_COLD uint32_t fsdpi_tr_offer_text(fsdpi_tr_out *o, const char *text) {
    uint32_t at = o->text, size = (uint32_t)strlen(text) + 1;
    fsdpi_tr_offer(o, FSDPI_TR_IN_TEXT, text, size);
    o->text += size;
    return at;
}

static FSDP_COLD void fsdpi_tr_offer_name(fsdpi_tr_out *o, int section, const char *name) {
    uint32_t at = fsdpi_tr_offer_text(o, name);
    fsdpi_tr_offer(o, section, &at, sizeof at);
}

static FSDP_COLD void fsdpi_tr_offer_names(const fsdp_trace *t, fsdpi_tr_out *o) {
    uint64_t units = (uint64_t)fsdp_num_units(t->model);
    fsdp_op op;
    fsdp_op_init(&op, t->model, NULL, FSDP_OP_HOOK, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);
    for (uint64_t k = 0; k + units < t->num_names; k++)
        fsdpi_tr_offer_name(o, FSDPI_TR_IN_NAMES, t->others[k]);
    for (op.label = 0; strcmp(fsdp_op_label(&op), "?") && op.label < UINT8_MAX; op.label++)
        fsdpi_tr_offer_name(o, FSDPI_TR_IN_LABELS, fsdp_op_label(&op));
}

static FSDP_COLD void fsdpi_tr_offer_unit(fsdpi_tr_out *o, const fsdp_unit *unit) {
    fsdpi_tr_unit u = FSDP_ZERO;
    fsdp_unit_desc d = FSDP_ZERO;
    fsdp_mesh_info info = FSDP_ZERO;
    fsdp_memory memory = FSDP_ZERO;
    (void)fsdp_unit_desc_get(unit, &d), (void)fsdp_unit_memory(unit, &memory);
    (void)fsdp_unit_mesh_info(unit, &info);
    u.num_params = d.num_params;
    u.shards = info.shard_mesh_size, u.replicas = info.replicate_mesh_size;
    u.reshard_after_forward = d.reshard_after_forward;
    u.param_dtype = d.param_dtype, u.reduce_dtype = d.reduce_dtype;
    memcpy(u.slot_bytes, memory.pool_bytes, sizeof u.slot_bytes);
    fsdpi_tr_offer(o, FSDPI_TR_IN_UNITS, &u, sizeof u);
    fsdpi_tr_offer_name(o, FSDPI_TR_IN_NAMES, fsdp_unit_label(unit));
}

static FSDP_COLD void fsdpi_tr_offer_model(const fsdp_trace *t, fsdpi_tr_out *o) {
    fsdp_param_view v = FSDP_ZERO;
    const fsdp_unit *last = NULL;
    while (fsdp_next_param(t->model, &v)) {
        fsdpi_tr_param p = FSDP_ZERO;
        if (v.unit != last) fsdpi_tr_offer_unit(o, v.unit);
        last = v.unit;
        p.name = fsdpi_tr_offer_text(o, v.name);
        p.dtype = v.dtype, p.ndim = v.ndim, p.shard_dim = v.shard_dim;
        p.requires_grad = v.requires_grad;
        memcpy(p.shape, v.shape, sizeof p.shape);
        fsdpi_tr_offer(o, FSDPI_TR_IN_PARAMS, &p, sizeof p);
    }
}

static FSDP_COLD void fsdpi_tr_offer_memory(const fsdp_trace *t, fsdpi_tr_out *o) {
    for (int k = 0; k < FSDP_POOL_MAX + t->num_keepers; k++) {
        const fsdpi_tr_keeper *kept = k < FSDP_POOL_MAX ? NULL : &t->keeper[k - FSDP_POOL_MAX];
        fsdpi_tr_pool p = {0, 0, kept ? kept->bytes : t->pool_bytes[k]};
        p.name = fsdpi_tr_offer_text(o, kept ? kept->name : fsdp_model_pool_name(t->model, k));
        fsdpi_tr_offer(o, kept ? FSDPI_TR_IN_KEPT : FSDPI_TR_IN_POOLS, &p, sizeof p);
    }
}

static FSDP_COLD void fsdpi_tr_offer_groups(const fsdp_trace *t, fsdpi_tr_out *o) {
    uint32_t at = 0;
    for (uint32_t k = 0; k < FSDPI_TR_GROUPS; k++) {
        fsdpi_tr_comm c = {k, 0, at};
        c.size = (uint32_t)fsdp_comm_ranks(t->world, t->group[k], NULL);
        if (!c.size) continue;
        (void)fsdp_comm_ranks(t->world, t->group[k], t->rank);
        fsdpi_tr_offer(o, FSDPI_TR_IN_COMMS, &c, sizeof c);
        for (uint32_t i = 0; i < c.size; i++)
            fsdpi_tr_offer(o, FSDPI_TR_IN_RANKS, &t->rank[i], sizeof t->rank[i]);
        at += c.size;
    }
}

/* Sets the step of an event. Spans, and ops of the world, whose numbers differ, get it by time.
   An event of no recorded step gets no kind. */
static void fsdpi_tr_set_step(const fsdp_trace *t, fsdpi_tr_event *r) {
    int by_time = r->kind == FSDPI_TR_SPAN ||
                  (r->kind < FSDPI_TR_CALL &&
                   (r->label == FSDP_LABEL_WORLD || r->label == FSDP_LABEL_TRANSFER));
    uint64_t low = 0, high = t->num_steps; // steps before low had begun, those from high on had not
    while (low < high) {
        uint64_t k = low + (high - low) / 2;
        const fsdpi_tr_step *s = &t->step[k];
        int begun = by_time ? r->begin_ns >= s->begin_ns : (int32_t)(r->seq - s->first_seq) >= 0;
        if (begun) low = k + 1;
        else high = k;
    }
    if (low) r->step = t->step[low - 1].number;
    else r->kind = FSDPI_TR_KINDS;
}

// Returns the number of events recorded.
static uint64_t fsdpi_tr_taken(const fsdp_trace *t) {
    return t->next_record < t->room ? t->next_record : t->room;
}

static FSDP_COLD void fsdpi_tr_offer_all(fsdp_trace *t, fsdpi_tr_out *o) {
    uint64_t records = fsdpi_tr_taken(t);
    o->text = 0;
    fsdpi_tr_offer_model(t, o);
    fsdpi_tr_offer_names(t, o);
    fsdpi_tr_offer_memory(t, o);
    fsdpi_tr_offer_groups(t, o);
    for (uint64_t k = 0; k < t->num_meetings; k++)
        fsdpi_tr_offer(o, FSDPI_TR_IN_MEETINGS, &t->meeting[k], sizeof t->meeting[k]);
    for (uint64_t k = 0; k < t->num_steps; k++)
        fsdpi_tr_offer(o, FSDPI_TR_IN_STEPS, &t->step[k], sizeof t->step[k]);
    for (uint64_t k = 0; k < records; k++)
        if (t->record[k].kind < FSDPI_TR_KINDS)
            fsdpi_tr_offer(o, FSDPI_TR_IN_RECORDS, &t->record[k], sizeof t->record[k]);
}

static int64_t fsdpi_tr_time(int clock) {
    int64_t time[2] = {0, 0};
    (void)fsdpi_tr_clock_gettime(clock, time);
    return time[0] * 1000000000 + time[1];
}

// Returns a hash of the ranks in the model's mesh.
static uint64_t fsdpi_tr_mesh(const fsdp_trace *t) {
    fsdp_mesh_info info = FSDP_ZERO;
    uint64_t hash = 0;
    if (fsdp_model_mesh_info(t->model, &info)) return 0;
    int num = fsdp_mesh_ranks(info.mesh, -1, t->rank);
    for (int k = 0; k < num; k++) hash = (hash ^ (uint64_t)t->rank[k]) * 0x9E3779B97F4A7C15u;
    return hash;
}

static FSDP_COLD void fsdpi_tr_fill(const fsdp_trace *t, fsdpi_tr_header *h) {
    fsdp_model_desc d = FSDP_ZERO;
    (void)fsdp_model_desc_get(t->model, &d);
    memcpy(h->magic, FSDPI_TR_MAGIC, sizeof h->magic);
    (void)fsdpi_tr_gethostname(h->host, sizeof h->host - 1);
    snprintf(h->job, sizeof h->job, "%s", t->job);
    h->clock = fsdp_clock_id(t->world), h->id = fsdp_world_id(t->world), h->mesh = fsdpi_tr_mesh(t);
    h->dropped = t->next_record > t->room ? t->next_record - t->room : 0;
    h->real_ns = fsdpi_tr_time(0 /* CLOCK_REALTIME */), h->clock_ns = fsdp_now(t->world);
    h->rank = fsdp_rank(t->world), h->size = fsdp_world_size(t->world);
    h->run = fsdp_model_run_mode(t->model), h->numbers = FSDPI_TR_NUMBERS;
    h->param_dtype = d.param_dtype, h->reduce_dtype = d.reduce_dtype;
    h->grad_dtype = d.grad_dtype;
    h->reshard_after_forward = d.reshard_after_forward, h->cpu_offload = d.cpu_offload;
    h->implicit_prefetch = d.implicit_prefetch;
    h->prefetch_bytes = d.prefetch_bytes, h->direct_min = d.direct_min;
}

// Writes the file. Returns errno. A reader sees the complete file or none.
static FSDP_COLD int fsdpi_tr_write(fsdp_trace *t) {
    static const uint32_t sizes[FSDPI_TR_SECTION_COUNT] = {
#define FSDP_X(number, name, type) sizeof(type),
        FSDPI_TR_SECTIONS(FSDP_X)
#undef FSDP_X
    };
    static const char zeros[8] = {0};
    char path[sizeof t->path + 4];
    fsdpi_tr_out o = FSDP_ZERO;
    snprintf(path, sizeof path, "%s.new", t->path);
    for (uint64_t k = 0; k < fsdpi_tr_taken(t); k++) fsdpi_tr_set_step(t, &t->record[k]);
    o.block = t->block;
    o.section = -1;
    fsdpi_tr_offer_all(t, &o);
    fsdpi_tr_fill(t, &o.head);
    o.head.bytes = sizeof o.head;
    for (int k = 0; k < FSDPI_TR_SECTION_COUNT; k++) {
        fsdpi_tr_section *s = &o.head.section[k];
        s->at = o.head.bytes, s->size = sizes[k];
        o.head.bytes += (s->count * s->size + 7) / 8 * 8;
    }
    o.file = fopen(path, "wb");
    if (!o.file) return errno;
    fsdpi_tr_put(&o, &o.head, sizeof o.head);
    for (o.section = 0; o.section < FSDPI_TR_SECTION_COUNT; o.section++) {
        const fsdpi_tr_section *s = &o.head.section[o.section];
        fsdpi_tr_offer_all(t, &o);
        fsdpi_tr_put(&o, zeros, (size_t)(-(s->count * s->size) % 8));
    }
    if (o.used) fsdpi_tr_flush(&o);
    if (fclose(o.file) && !o.error) o.error = errno;
    if (!o.error && rename(path, t->path)) o.error = errno;
    if (o.error) (void)unlink(path);
    return o.error;
}

/* -------------------------------------------------------------------------------------------- */
// Start and stop.

// Makes all ranks of the mesh meet, so that their clocks can be compared.
static FSDP_COLD fsdp_status fsdpi_tr_meet(fsdp_trace *t) {
    fsdp_mesh_info info = FSDP_ZERO;
    fsdp_status status = fsdp_model_mesh_info(t->model, &info);
    if (status || fsdp_mesh_size(info.mesh, -1) == 1) return status;
    for (int k = 0; k < FSDPI_TR_MEETINGS && !status; k++) {
        fsdpi_tr_meeting *m = &t->meeting[t->num_meetings];
        int32_t one = 1;
        m->came_ns = fsdp_now(t->world);
        status = fsdp_all_reduce(t->world, info.mesh, &one, 1, FSDP_I32, FSDP_MAX);
        m->left_ns = fsdp_now(t->world);
        t->num_meetings += !status;
    }
    return status;
}

static FSDP_COLD fsdp_status fsdpi_tr_result(const fsdp_trace *t) {
    if (!t->error) return FSDP_OK;
    return fsdp_fail(t->world, FSDP_ERR_IO,
                     "[E9001] the trace %s cannot be written: %s. Make room, or give another "
                     "directory, and run these steps again",
                     t->path, strerror(t->error));
}

/* Stops recording, and writes the file. The library then calls no callbacks and reads no clock.
   meets: ranks meet first; at the end of a model a rank may be gone. */
static FSDP_COLD void fsdpi_tr_finish(fsdp_trace *t, int meets) {
    if (t->is_on) fsdpi_tr_end_other(t, t->host_ns);
    // Ops issued so far are reported first. At the end of the model there are no further callbacks.
    if (meets) (void)fsdp_extension_mute(t->model, &t->extension);
    __atomic_store_n(&t->is_on, 0u, __ATOMIC_RELAXED);
    t->is_done = 1;
    if (t->num_steps) t->step[t->num_steps - 1].end_ns = t->host_ns;
    if (meets && fsdpi_tr_meet(t)) return; // the world has failed
    fsdpi_tr_note_memory(t);
    t->error = fsdpi_tr_write(t);
    if (!t->error && t->next_record > t->room)
        fsdp_warn(t->world,
                  "[E9002] the trace %s has no room for %lld of its records: set "
                  "fsdp_trace_desc.records, or record fewer steps (FSDP_TRACE_STEPS)",
                  t->path, (long long)(t->next_record - t->room));
}

static FSDP_COLD void fsdpi_tr_destroy(void *user) {
    fsdp_trace *t = (fsdp_trace *)user;
    if (!t->is_done && t->num_steps && !fsdp_world_status(t->world)) {
        fsdpi_tr_finish(t, 0);
        (void)fsdpi_tr_result(t); // it is logged
    } else if (!t->is_done && !fsdp_world_status(t->world) && fsdp_rank(t->world) == 0)
        fsdp_warn(t->world,
                  "[E9011] no trace %s: the model ended before step %lld; for its first steps set "
                  "FSDP_TRACE_STEPS=0:2, or first_step and last_step of fsdp_trace_desc",
                  t->path, (long long)t->first_step);
    fsdp_free(t->model, FSDP_MEMORY_HOST, t, t->bytes);
}

FSDP_COLD FSDP_API fsdp_status fsdp_trace_stop(fsdp_trace *trace) {
    if (!trace) return FSDP_OK;
    fsdp_world *w = trace->world;
    if (!trace->is_done) fsdpi_tr_finish(trace, 1);
    fsdp_status written = fsdpi_tr_result(trace);
    fsdp_status status = fsdp_detach(trace->model, &trace->extension);
    if (!status) status = fsdp_world_status(w);
    return status ? status : written;
}

// Takes directory and steps from the desc or the environment.
static FSDP_COLD fsdp_status fsdpi_tr_settings(fsdp_world *w, fsdp_trace_desc *d) {
    const char *steps = getenv("FSDP_TRACE_STEPS");
    long long first = 3, last = 5;
    int end = 0;
    if (!d->dir) d->dir = getenv("FSDP_TRACE");
    if (!d->dir || !*d->dir)
        return fsdp_fail(
            w, FSDP_ERR_INVALID_ARG,
            "[E9003] trace_start: no directory: set fsdp_trace_desc.dir or FSDP_TRACE");
    if (d->first_step || d->last_step) first = d->first_step, last = d->last_step;
    else if (steps && *steps &&
             (sscanf(steps, "%lld:%lld%n", &first, &last, &end) != 2 || steps[end]))
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E9004] FSDP_TRACE_STEPS is '%s', expected two numbers, as 3:5", steps);
    if (first < 0 || last < first || last - first >= 1000000 || d->records < 0 ||
        d->records > (int64_t)1 << 40)
        return fsdp_fail(
            w, FSDP_ERR_INVALID_ARG,
            "[E9005] trace_start: steps %lld to %lld, %lld records: expected 0 <= first "
            "<= last, at most 1,000,000 steps, and 0 to 2^40 records",
            first, last, (long long)d->records);
    d->first_step = first, d->last_step = last;
    return FSDP_OK;
}

static int64_t fsdpi_tr_part(int64_t *bytes, int64_t count, size_t size) {
    int64_t at = *bytes;
    *bytes += (count * (int64_t)size + 63) / 64 * 64;
    return at;
}

// Allocates the trace in one block.
static FSDP_COLD fsdp_status fsdpi_tr_new(fsdp_model *model, const fsdp_trace_desc *d,
                                          fsdp_trace **out) {
    int64_t bytes = 0, keys = 2, units = fsdp_num_units(model), room = d->records;
    int64_t num_steps = d->last_step - d->first_step + 1;
    fsdp_world *w = fsdp_model_world(model);
    void *memory;
    *out = NULL;
    if (!room) room = 64 * units * num_steps < 65536 ? 65536 : 64 * units * num_steps;
    while (keys < 2 * (units + FSDPI_TR_OTHERS)) keys *= 2;
    (void)fsdpi_tr_part(&bytes, 1, sizeof(fsdp_trace));
    int64_t record = fsdpi_tr_part(&bytes, room, sizeof(fsdpi_tr_event));
    int64_t step = fsdpi_tr_part(&bytes, num_steps, sizeof(fsdpi_tr_step));
    int64_t key = fsdpi_tr_part(&bytes, keys, sizeof(fsdpi_tr_key));
    int64_t rank = fsdpi_tr_part(&bytes, fsdp_world_size(w), sizeof(int32_t));
    fsdp_status status = fsdp_alloc(model, FSDP_MEMORY_HOST, bytes,
                                    "trace_start: no memory for records", &memory);
    if (status) return status;
    char *base = (char *)memory;
    fsdp_trace *t = *out = (fsdp_trace *)memory;
    t->record = (fsdpi_tr_event *)(void *)(base + record);
    t->step = (fsdpi_tr_step *)(void *)(base + step);
    t->key = (fsdpi_tr_key *)(void *)(base + key);
    t->rank = (int32_t *)(void *)(base + rank);
    t->bytes = bytes, t->room = (uint64_t)room, t->num_keys = (uint64_t)keys;
    t->model = model, t->world = w;
    t->first_step = d->first_step, t->last_step = d->last_step, t->is_between = 1;
    int run = fsdp_model_run_mode(model);
    t->streams = run == FSDP_RUN_INLINE  ? (1 << FSDP_STREAM_COUNT) - 1
                 : run == FSDP_RUN_THREADS ? 1 << FSDP_STREAM_COMPUTE
                                         : 0;
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(model, &v)) fsdpi_tr_add_name(t, fsdp_unit_label(v.unit));
    return FSDP_OK;
}

// Sets the path: DIR/JOB.RANK.trace, or DIR/JOB-1.RANK.trace for later models of the world. Makes
// the directory, checks that files can be made there, and deletes the file of an earlier run, so
// that the two are not mixed.
static FSDP_COLD fsdp_status fsdpi_tr_place_file(fsdp_trace *t, const char *dir) {
    const char *job = fsdp_world_job(t->world);
    char turn[16] = "";
    int number = fsdp_model_number(t->model);
    if (number) snprintf(turn, sizeof turn, "-%d", number);
    snprintf(t->job, sizeof t->job, "%.*s%s", (int)(sizeof t->job - sizeof turn),
             *job ? job : "job", turn);
    for (char *c = t->job; *c; c++)
        if (*c == '/' || *c == ':') *c = '-';
    size_t used = (size_t)snprintf(t->path, sizeof t->path, "%s/%s.%d.trace", dir, t->job,
                                   fsdp_rank(t->world));
    int error = used >= sizeof t->path ? ENAMETOOLONG : 0;
    if (!error && mkdir(dir, 0777) && errno != EEXIST) error = errno;
    FILE *file = error ? NULL : fopen(t->path, "wb");
    if (file) (void)fclose(file), (void)unlink(t->path);
    if (file) return FSDP_OK;
    if (!error) error = errno;
    return fsdp_fail(t->world, FSDP_ERR_IO, "[E9006] trace_start: directory '%s': %s%s", dir,
                     strerror(error), error == ENOENT ? "; its parent has to be there" : "");
}

static FSDP_COLD fsdp_status fsdpi_tr_attach(fsdp_trace *t) {
    fsdp_extension *e = &t->extension;
    e->name = "trace", e->user = t;
    e->call = fsdpi_tr_call, e->returned = fsdpi_tr_returned, e->op = fsdpi_tr_op;
    e->ran = fsdpi_tr_ran, e->destroy = fsdpi_tr_destroy;
    return fsdp_attach(t->model, e);
}

FSDP_COLD FSDP_API fsdp_status fsdp_trace_start(fsdp_model *model, const fsdp_trace_desc *desc,
                                                fsdp_trace **trace) {
    fsdp_trace_desc d;
    fsdp_mesh_info info = FSDP_ZERO;
    fsdp_trace *t = NULL;
    if (trace) *trace = NULL;
    fsdp_world *w = fsdp_model_world(model);
    fsdp_status status = fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_trace_desc");
    if (!status) status = fsdp_model_commit(model);
    if (!status) status = fsdp_model_mesh_info(model, &info);
    if (status) return status;
    fsdp_trace *had = (fsdp_trace *)fsdp_find_extension(model, "trace");
    if (had && had->is_of_environment) {
        had->is_of_environment = 0;
        if (trace) *trace = had;
        return FSDP_OK;
    }
    if (had || fsdp_find_extension(model, "plan"))
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E9008] trace_start: the model has a %s already: start the trace before",
                         had ? "trace" : "plan");
    status = fsdpi_tr_settings(w, &d);
    if (!status) status = fsdpi_tr_new(model, &d, &t);
    if (!status) status = fsdpi_tr_place_file(t, d.dir);
    int is_attached = !status && !(status = fsdpi_tr_attach(t));
    int32_t worst = (int32_t)status; // no rank waits for a failed one
    fsdp_status met = fsdp_all_reduce(w, info.mesh, &worst, 1, FSDP_I32, FSDP_MAX);
    if (!met && !worst) met = fsdpi_tr_meet(t);
    if (!status) status = met;
    if (!status && worst)
        status = fsdp_fail(w, (fsdp_status)worst, "[E9009] trace_start: another rank has failed");
    if (!status && trace) *trace = t;
    if (!status || !t) return status;
    t->is_done = 1; // no file is written
    if (is_attached) (void)fsdp_detach(model, &t->extension);
    else fsdpi_tr_destroy(t);
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// FSDP_TRACE: every model of the program. A failure is logged, and the program continues.

static FSDP_COLD void fsdpi_tr_committed(fsdp_model *model) {
    const char *dir = getenv("FSDP_TRACE");
    fsdp_trace *trace;
    if (dir && *dir && !fsdp_trace_start(model, NULL, &trace)) trace->is_of_environment = 1;
}

// Runs before other constructors, which may make models.
static __attribute__((constructor(101))) void fsdpi_tr_begin(void) {
    static fsdp_commit_hook hook = {fsdpi_tr_committed, NULL};
    fsdp_on_commit(&hook);
}

#endif // FSDPI_TRACE_RECORD_H
