/* plan/text.h - a plan as text

   Prints the format that docs/plan.md describes: one statement per line, fields with one blank
   between them. All ranks print equal text.
   Callers: programs, make.h (fsdpi_plan_call_hash) and prove.h (fsdpi_plan_put).

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_TEXT_H
#define FSDPI_PLAN_TEXT_H

#include "../core/step.h"
#include "memory.h"
#include "objects.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

// The destination of text: a buffer as far as it fits, a hash, or both.
typedef struct fsdpi_plan_out {
    char *buf;
    size_t cap, used;
    uint64_t hash;
} fsdpi_plan_out;

static void fsdpi_plan_put_bytes(fsdpi_plan_out *o, const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        o->hash = (o->hash ^ (unsigned char)text[i]) * 0x100000001B3u; // FNV-1a
        if (o->used + 1 < o->cap) o->buf[o->used] = text[i];
        o->used++;
    }
    if (o->cap) o->buf[o->used < o->cap ? o->used : o->cap - 1] = 0;
}

static void fsdpi_plan_put(fsdpi_plan_out *o, const char *format, ...) FSDP_PRINTF(2, 3);
static void fsdpi_plan_put(fsdpi_plan_out *o, const char *format, ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (length > 0)
        fsdpi_plan_put_bytes(o, text, length < (int)sizeof text ? (size_t)length : sizeof text - 1);
}

static void fsdpi_plan_put_name(fsdpi_plan_out *o, const char *name) {
    fsdpi_plan_put_bytes(o, " '", 2);
    for (; *name; name++) {
        if (*name == '\'' || *name == '\\') fsdpi_plan_put(o, "\\%c", *name);
        else if (*name == '\n') fsdpi_plan_put(o, "\\n");
        else if ((unsigned char)*name < ' ' || (unsigned char)*name > '~')
            fsdpi_plan_put(o, "\\x%02X", (unsigned char)*name);
        else fsdpi_plan_put_bytes(o, name, 1);
    }
    fsdpi_plan_put_bytes(o, "'", 1);
}

static void fsdpi_plan_put_unit(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int unit) {
    if (unit >= 0) fsdpi_plan_put_name(o, l->units[unit].name);
    else fsdpi_plan_put(o, " model");
}

static const char *const fsdpi_plan_streams[FSDP_STREAM_COUNT] = {"COMPUTE", "GATHER", "REDUCE",
                                                                  "ALLREDUCE", "EXTENSION"};
static const char *const fsdpi_plan_modes[3] = {"inline", "comm_threads", "streams"};
static const char *const fsdpi_plan_blocks[] = {"none",      "shards",      "grads",
                                                "other",     "held_gather", "held_slice",
                                                "held_grad", "held_rin",    "held_rout"};
static const char *const fsdpi_plan_words[FSDPI_PLAN_ACT_COUNT] = {
#define FSDP_X(name, text) text,
    FSDPI_PLAN_ACT_LIST(FSDP_X)
#undef FSDP_X
};
static const char *const fsdpi_plan_reasons[FSDPI_PLAN_WHY_COUNT] = {
#define FSDP_X(name, text) text,
    FSDPI_PLAN_WHY_LIST(FSDP_X)
#undef FSDP_X
};
static const char *const fsdpi_plan_readings[4] = {"none", "forward", "backward", "both"};
// Short names without blanks.
static const char *const fsdpi_plan_pools[] = {"shard", "sgrad", "gather", "slice",
                                               "grad",  "rin",   "rout"};

// Returns the text of a label. NONE has no text.
static const char *fsdpi_plan_label(int label) {
    const char *name = fsdp_label_name(label);
    return *name ? name : "none";
}

static void fsdpi_plan_put_place(fsdpi_plan_out *o, int place) {
    if (place < 0) fsdpi_plan_put(o, " %s", fsdpi_plan_blocks[-1 - place]);
    else fsdpi_plan_put(o, " slot %d", place);
}

// Prints one act, or the acts of a call that share a bucket. Returns the index of the next one.
static int fsdpi_plan_put_act(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int i) {
    const fsdpi_plan_act *acts = l->choice.acts, *first = &acts[i];
    fsdpi_plan_put(o, "  %s%s", fsdpi_plan_words[first->what],
                   first->what == FSDPI_PLAN_GATHER && first->late ? " behind" : "");
    do fsdpi_plan_put_unit(o, l, acts[i++].unit);
    while (first->group >= 0 && i < l->choice.num_acts && acts[i].call == first->call &&
           acts[i].what == first->what && acts[i].group == first->group);
    fsdpi_plan_put(o, " why %s", fsdpi_plan_reasons[first->why]);
    if (first->at >= 0 && first->what != FSDPI_PLAN_REDUCE)
        fsdpi_plan_put(o, " at call %d", first->at);
    fsdpi_plan_put(o, "\n");
    return i;
}

static void fsdpi_plan_put_members(fsdpi_plan_out *o, const fsdpi_plan_listing *l,
                                   const fsdpi_plan_line *line) {
    const fsdpi_plan_member *m = &l->members[line->members];
    for (int i = 0; i < line->num_members; i++) fsdpi_plan_put_unit(o, l, m[i].unit);
}

static void fsdpi_plan_put_op(fsdpi_plan_out *o, const fsdpi_plan_listing *l,
                              const fsdpi_plan_line *line) {
    const fsdpi_plan_member *m = &l->members[line->members];
    fsdpi_plan_put(o, "  op %d %s %s", (int)(line - l->lines), fsdp_op_name(line->kind),
                   fsdpi_plan_label(line->label));
    fsdpi_plan_put_members(o, l, line);
    fsdpi_plan_put(o, " %s %llu %llu %s %s", fsdpi_plan_streams[line->stream],
                   (unsigned long long)line->count, (unsigned long long)line->bytes,
                   fsdp_dtype_name(line->dtype), fsdp_dtype_name(line->out_dtype));
    for (int i = 0; i < line->num_members; i++) {
        fsdpi_plan_put_place(o, m[i].src);
        fsdpi_plan_put_place(o, m[i].dst);
    }
    if (line->scale != 1) fsdpi_plan_put(o, " scale %a", line->scale);
    if (line->accumulate) fsdpi_plan_put(o, " add");
    if (line->in_place) fsdpi_plan_put(o, " in_place");
    if (line->comm >= 0) fsdpi_plan_put(o, " comm %s", l->comms[line->comm]);
    fsdpi_plan_put(o, " #%08x\n", line->digest);
}

static void fsdpi_plan_put_line(fsdpi_plan_out *o, const fsdpi_plan_listing *l,
                                const fsdpi_plan_line *line) {
    const fsdpi_plan_member *m = &l->members[line->members];
    switch (line->kind) {
    case FSDP_OP_ACQUIRE:
        fsdpi_plan_put(o, "  acquire");
        fsdpi_plan_put_members(o, l, line);
        fsdpi_plan_put_place(o, m->dst);
        fsdpi_plan_put(o, "\n");
        break;
    case FSDP_OP_RELEASE:
        fsdpi_plan_put(o, "  release");
        fsdpi_plan_put_members(o, l, line);
        fsdpi_plan_put_place(o, m->src);
        fsdpi_plan_put(o, " %s\n", fsdpi_plan_streams[line->stream]);
        break;
    case FSDP_OP_GRADS_WRITTEN:
        fsdpi_plan_put(o, "  wrote");
        fsdpi_plan_put_members(o, l, line);
        fsdpi_plan_put_place(o, m->dst);
        fsdpi_plan_put(o, "\n");
        break;
    default: fsdpi_plan_put_op(o, l, line);
    }
}

static void fsdpi_plan_put_call(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int call, int *act,
                                int *line, int what) {
    fsdpi_plan_put(o, "call %d %s", call, fsdpi_call_name(l->calls[call].call));
    if (l->calls[call].index >= 0) fsdpi_plan_put_unit(o, l, l->calls[call].index);
    fsdpi_plan_put(o, "\n");
    while (*act < l->choice.num_acts && l->choice.acts[*act].call == call)
        *act = fsdpi_plan_put_act(o, l, *act);
    for (; *line < l->num_lines && l->lines[*line].call == call; ++*line)
        if (what == FSDP_PLAN_TEXT_OPS) fsdpi_plan_put_line(o, l, &l->lines[*line]);
}

static void fsdpi_plan_put_head(fsdpi_plan_out *o, const fsdpi_plan_listing *l) {
    fsdpi_plan_put(o, "fsdp plan 1\n");
    fsdpi_plan_put(o, "model %016llx units %d params %d shards %d replicas %d mode %s\n",
                   (unsigned long long)l->model, l->num_units, l->num_params, l->shards,
                   l->replicas, fsdpi_plan_modes[l->mode]);
    fsdpi_plan_put(o, "kind %016llx calls %d forward %d\n", (unsigned long long)l->kind,
                   l->num_calls, l->forward_calls);
    fsdpi_plan_put(o, "bytes %lld bound %lld eager %lld\n", (long long)l->bytes,
                   (long long)l->bound, (long long)l->eager);
    fsdpi_plan_put(o, "count gathers %d %d reductions %d %d replicas %d %d ops %d %d\n",
                   l->gathers[0], l->gathers[1], l->reductions[0], l->reductions[1],
                   l->replica_ops[0], l->replica_ops[1], l->ops[0], l->ops[1]);
    fsdpi_plan_put(o, "read gathers %llu %llu reductions %llu %llu\n",
                   (unsigned long long)l->gather_bytes[0], (unsigned long long)l->gather_bytes[1],
                   (unsigned long long)l->reduce_bytes[0], (unsigned long long)l->reduce_bytes[1]);
    for (int u = 0; u < l->num_units; u++) {
        fsdpi_plan_put(o, "unit %d", u);
        fsdpi_plan_put_name(o, l->units[u].name);
        fsdpi_plan_put(o, " gather %lld grad %lld reads %s\n", (long long)l->units[u].gather_bytes,
                       (long long)l->units[u].grad_bytes, fsdpi_plan_readings[l->units[u].reads]);
    }
}

static void fsdpi_plan_put_all(fsdpi_plan_out *o, const fsdpi_plan_listing *l, int what) {
    int act = 0, line = 0;
    o->hash = 0xCBF29CE484222325u;
    fsdpi_plan_put_head(o, l);
    for (int i = 0; i < l->num_slots && what == FSDP_PLAN_TEXT_OPS; i++) {
        fsdpi_plan_put(o, "slot %d %s ", i, fsdpi_plan_pools[l->slots[i].pool]);
        if (l->slots[i].offset >= 0) fsdpi_plan_put(o, "at %lld", (long long)l->slots[i].offset);
        else fsdpi_plan_put(o, "lasts");
        fsdpi_plan_put(o, " bytes %lld\n", (long long)l->slots[i].bytes);
    }
    for (int c = 0; c < l->num_calls; c++) fsdpi_plan_put_call(o, l, c, &act, &line, what);
    fsdpi_plan_put(o, "end %016llx\n", (unsigned long long)o->hash);
}

static uint64_t fsdpi_plan_text_hash(const fsdpi_plan_listing *l) {
    fsdpi_plan_out o = {NULL, 0, 0, 0};
    fsdpi_plan_put_all(&o, l, FSDP_PLAN_TEXT_OPS);
    return o.hash ? o.hash : 1;
}

// Returns the hash of one call's text.
static uint64_t fsdpi_plan_call_hash(const fsdpi_plan_listing *l, int call) {
    fsdpi_plan_out o = {NULL, 0, 0, 0xCBF29CE484222325u};
    int act = 0, line = 0;
    while (act < l->choice.num_acts && l->choice.acts[act].call < call) act++;
    while (line < l->num_lines && l->lines[line].call < call) line++;
    fsdpi_plan_put_call(&o, l, call, &act, &line, FSDP_PLAN_TEXT_OPS);
    return o.hash;
}

// Prints a call in one line, for an error text.
static void fsdpi_plan_call_words(const fsdpi_plan_listing *l, int call, char *buf, size_t cap) {
    fsdpi_plan_out o = {buf, cap, 0, 0};
    int act = 0, line = 0;
    if (call >= l->num_calls) {
        fsdpi_plan_put(&o, "no such call");
        return;
    }
    while (act < l->choice.num_acts && l->choice.acts[act].call < call) act++;
    fsdpi_plan_put_call(&o, l, call, &act, &line, FSDP_PLAN_TEXT_DECISIONS);
    for (int i = 0; i < 2; i++) { // without "call N "
        const char *blank = strchr(buf, ' ');
        if (blank) memmove(buf, blank + 1, strlen(blank));
    }
    for (char *at = buf; *at; at++)
        if (*at == '\n') *at = at[1] ? ';' : 0;
}

/* -------------------------------------------------------------------------------------------- */

FSDP_API int fsdp_plan_count(const fsdp_plan *plan) { return plan ? plan->num_kinds : 0; }

FSDP_API size_t fsdp_plan_text(const fsdp_plan *plan, int index, int what, char *buf, size_t cap) {
    fsdpi_plan_out o = {buf, buf ? cap : 0, 0, 0};
    if (o.cap) *buf = 0;
    if (!plan || index < 0 || index >= plan->num_kinds) return 0;
    fsdpi_plan_put_all(&o, &plan->kinds[index]->listing, what);
    return o.used;
}

FSDP_API const char *fsdp_pass_name(int pass) {
    static const char *const names[FSDP_PASS_COUNT] = {
#define FSDP_X(name, text) text,
        FSDP_PASS_LIST(FSDP_X)
#undef FSDP_X
    };
    return pass >= 0 && pass < FSDP_PASS_COUNT ? names[pass] : "?";
}

#endif // FSDPI_PLAN_TEXT_H
