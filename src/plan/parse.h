/* plan/parse.h - a listing from a text

   A part of fsdp_plan.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_PLAN_H
#include "../../fsdp_plan.h"
#endif
#ifndef FSDPI_PLAN_PARSE_H
#define FSDPI_PLAN_PARSE_H

#include "../core/step.h"
#include "listing.h"
#include "memory.h"
#include "objects.h"
#include "text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Owns: the other way of the format in plan/text.h. What a reader takes is printed again and
// compared, so that a text has one form only, and its reader need not look at blanks.

enum { FSDPI_PLAN_MOST = 64 << 20, FSDPI_PLAN_MOST_UNITS = 1 << 20 };

typedef struct fsdpi_plan_in {
    fsdp_model *model; // whose memory; NULL: malloc
    fsdp_world *world; // for error texts
    const char *text, *at, *end;
    fsdpi_plan_listing *l;
    int ops; // the text has ops
    fsdp_status status;
} fsdpi_plan_in;

// The first fault counts: where, what was expected there, and what stands there.
static void fsdpi_plan_expect(fsdpi_plan_in *in, const char *expected) {
    int line = 1, used = 0;
    char got[48];
    const char *begin = in->text;
    if (in->status) return;
    for (const char *c = in->text; c < in->at; c++)
        if (*c == '\n') {
            line++;
            begin = c + 1;
        }
    for (const char *c = in->at; c < in->end && *c != '\n' && used < 40; c++)
        got[used++] = *c < ' ' || *c > '~' ? '?' : *c;
    got[used] = 0;
    in->status = fsdp_fail(
        in->world, FSDP_ERR_INVALID_ARG,
        "[E982] plan: line %d, column %d: expected %s, got %s%s%s: correct it there, and end an "
        "edited text with 'end 0000000000000000'",
        line, (int)(in->at - begin) + 1, expected, used ? "'" : "",
        used               ? got
        : in->at < in->end ? "the end of the line"
                           : "the last line",
        used ? "'" : "");
}

static int fsdpi_plan_peek(const fsdpi_plan_in *in, const char *word) {
    size_t length = strlen(word);
    return (size_t)(in->end - in->at) >= length && memcmp(in->at, word, length) == 0;
}

// Takes a word, with the blanks in it; 0: it is not there.
static int fsdpi_plan_take(fsdpi_plan_in *in, const char *word) {
    if (in->status || !fsdpi_plan_peek(in, word)) return 0;
    in->at += strlen(word);
    return 1;
}
static void fsdpi_plan_need(fsdpi_plan_in *in, const char *word) {
    if (fsdpi_plan_take(in, word)) return;
    char words[48];
    if (*word == '\n' && !in->status && in->at < in->end && *in->at == '\n') in->at++, word++;
    snprintf(words, sizeof words, "'%s'", word);
    fsdpi_plan_expect(in, *word == '\n' ? "the end of the line" : words);
}

static uint64_t fsdpi_plan_hex(fsdpi_plan_in *in, int digits) {
    uint64_t value = 0;
    for (int i = 0; i < digits && !in->status; i++) {
        int c = in->at < in->end ? *in->at : 0;
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0) fsdpi_plan_expect(in, "a hexadecimal digit");
        else in->at++;
        value = value << 4 | (uint64_t)(digit < 0 ? 0 : digit);
    }
    return value;
}

static int64_t fsdpi_plan_number(fsdpi_plan_in *in, int64_t most) {
    int64_t value = 0;
    const char *first = in->at;
    while (in->at < in->end && *in->at >= '0' && *in->at <= '9' && !in->status) {
        if (value > (most - (*in->at - '0')) / 10) {
            fsdpi_plan_expect(in, "a smaller number");
            return 0;
        }
        value = 10 * value + (*in->at++ - '0');
    }
    if (in->at == first) fsdpi_plan_expect(in, "a number");
    return value;
}
static int fsdpi_plan_int(fsdpi_plan_in *in) { return (int)fsdpi_plan_number(in, INT32_MAX); }

static int fsdpi_plan_index_of(fsdpi_plan_in *in, int count, const char *what) {
    int64_t value = fsdpi_plan_number(in, INT32_MAX);
    if (value >= count) fsdpi_plan_expect(in, what);
    return value < count ? (int)value : 0;
}

// One of several words: the longest that stands there.
static int fsdpi_plan_choose(fsdpi_plan_in *in, const char *const *words, int count,
                             const char *what) {
    int best = -1;
    for (int i = 0; i < count; i++)
        if (words[i] && *words[i] && fsdpi_plan_peek(in, words[i]) &&
            (best < 0 || strlen(words[i]) > strlen(words[best])))
            best = i;
    if (best < 0 || in->status) {
        fsdpi_plan_expect(in, what);
        return 0;
    }
    in->at += strlen(words[best]);
    return best;
}

// A quoted name, into a buffer.
static void fsdpi_plan_name(fsdpi_plan_in *in, char *out, size_t cap) {
    size_t used = 0;
    fsdpi_plan_need(in, "'");
    while (in->at < in->end && *in->at != '\'' && *in->at != '\n' && !in->status) {
        int c = (unsigned char)*in->at++;
        if (c == '\\' && in->at < in->end) {
            c = (unsigned char)*in->at++;
            if (c == 'n') c = '\n';
            else if (c == 'x') {
                int high = in->at < in->end ? *in->at++ : 0, low = in->at < in->end ? *in->at++ : 0;
                high = high >= 'A' ? high - 'A' + 10 : high - '0';
                low = low >= 'A' ? low - 'A' + 10 : low - '0';
                c = (high & 15) << 4 | (low & 15);
            }
        }
        if (used + 1 < cap) out[used++] = (char)c;
        else fsdpi_plan_expect(in, "a shorter name");
    }
    out[used] = 0;
    fsdpi_plan_need(in, "'");
}

// A unit by its name; -1: " model".
static int fsdpi_plan_read_unit(fsdpi_plan_in *in) {
    char name[512];
    if (fsdpi_plan_take(in, " model")) return -1;
    fsdpi_plan_need(in, " ");
    const char *at = in->at;
    fsdpi_plan_name(in, name, sizeof name);
    for (int u = 0; u < in->l->num_units && !in->status; u++)
        if (strcmp(in->l->units[u].name, name) == 0) return u;
    in->at = at;
    fsdpi_plan_expect(in, "the name of a unit");
    return 0;
}

static int fsdpi_plan_place_in(fsdpi_plan_in *in) {
    fsdpi_plan_need(in, " ");
    if (fsdpi_plan_take(in, "slot ")) return fsdpi_plan_index_of(in, in->l->num_slots, "a slot");
    return -1 - fsdpi_plan_choose(in, fsdpi_plan_blocks,
                                  (int)(sizeof fsdpi_plan_blocks / sizeof *fsdpi_plan_blocks),
                                  "slot, shards, grads, host, none, other, or held_ and a pool");
}

static int fsdpi_plan_label_in(fsdpi_plan_in *in) {
    const char *names[FSDP_LABEL_COUNT];
    for (int i = 0; i < FSDP_LABEL_COUNT; i++) names[i] = fsdpi_plan_label(i);
    return fsdpi_plan_choose(in, names, FSDP_LABEL_COUNT, "the name of a label");
}
static int fsdpi_plan_variant_in(fsdpi_plan_in *in) {
    const char *names[FSDP_OP_COUNT];
    for (int i = 0; i < FSDP_OP_COUNT; i++) names[i] = fsdp_op_name(i);
    return fsdpi_plan_choose(in, names, FSDP_OP_COUNT, "the name of an op");
}
static int fsdpi_plan_dtype_in(fsdpi_plan_in *in) {
    const char *names[FSDP_DTYPE_COUNT];
    for (int i = 0; i < FSDP_DTYPE_COUNT; i++) names[i] = fsdp_dtype_name((fsdp_dtype)i);
    return fsdpi_plan_choose(in, names, FSDP_DTYPE_COUNT, "a dtype");
}
static int fsdpi_plan_call_in(fsdpi_plan_in *in) {
    const char *names[FSDP_CALL_FINALIZE + 1];
    for (int i = 0; i <= FSDP_CALL_FINALIZE; i++) names[i] = fsdpi_call_name(i);
    return fsdpi_plan_choose(in, names, FSDP_CALL_FINALIZE + 1, "a call of a step");
}

/* -------------------------------------------------------------------------------------------- */

static void fsdpi_plan_read_units(fsdpi_plan_in *in) {
    fsdpi_plan_listing *l = in->l;
    if (!in->status)
        in->status = fsdpi_plan_alloc(in->model, (size_t)l->num_units * sizeof *l->units,
                                      (void **)&l->units);
    for (int u = 0; u < l->num_units && !in->status; u++) {
        char name[512];
        fsdpi_plan_need(in, "unit ");
        if (fsdpi_plan_int(in) != u) fsdpi_plan_expect(in, "units in order");
        fsdpi_plan_need(in, " ");
        fsdpi_plan_name(in, name, sizeof name);
        fsdpi_plan_need(in, " gather ");
        l->units[u].gather_bytes = fsdpi_plan_number(in, INT64_MAX);
        fsdpi_plan_need(in, " grad ");
        l->units[u].grad_bytes = fsdpi_plan_number(in, INT64_MAX);
        fsdpi_plan_need(in, " reads ");
        l->units[u].reads = fsdpi_plan_choose(in, fsdpi_plan_readings, 4, "what it reads");
        fsdpi_plan_need(in, "\n");
        if (!in->status)
            in->status = fsdpi_plan_string(in->model, name, strlen(name), &l->units[u].name);
    }
}

static void fsdpi_plan_read_head(fsdpi_plan_in *in) {
    fsdpi_plan_listing *l = in->l;
    fsdpi_plan_need(in, "fsdp plan 1");
    fsdpi_plan_need(in, "\nmodel ");
    l->model = fsdpi_plan_hex(in, 16);
    fsdpi_plan_need(in, " units ");
    l->num_units = (int32_t)fsdpi_plan_number(in, FSDPI_PLAN_MOST_UNITS);
    fsdpi_plan_need(in, " params ");
    l->num_params = fsdpi_plan_int(in);
    fsdpi_plan_need(in, " shards ");
    l->shards = fsdpi_plan_int(in);
    fsdpi_plan_need(in, " replicas ");
    l->replicas = fsdpi_plan_int(in);
    fsdpi_plan_need(in, " mode ");
    l->mode = fsdpi_plan_choose(in, fsdpi_plan_modes, 3, "inline, lanes or streams");
    fsdpi_plan_need(in, "\nkind ");
    l->kind = fsdpi_plan_hex(in, 16);
    fsdpi_plan_need(in, " calls ");
    l->num_calls = fsdpi_plan_int(in);
    fsdpi_plan_need(in, " forward ");
    l->forward_calls = fsdpi_plan_int(in);
    fsdpi_plan_need(in, "\nbytes ");
    l->bytes = fsdpi_plan_number(in, INT64_MAX);
    fsdpi_plan_need(in, " bound ");
    l->bound = fsdpi_plan_number(in, INT64_MAX);
    fsdpi_plan_need(in, " by_calls ");
    l->by_calls = fsdpi_plan_number(in, INT64_MAX);
    static const char *const words[4] = {"\ncount gathers ", " reductions ", " replicas ", " ops "};
    int32_t *const counts[4] = {l->gathers, l->reductions, l->replica_ops, l->ops};
    for (int i = 0; i < 8; i++) {
        fsdpi_plan_need(in, i % 2 ? " " : words[i / 2]);
        counts[i / 2][i % 2] = fsdpi_plan_int(in);
    }
    for (int i = 0; i < 4; i++) {
        fsdpi_plan_need(in, i == 0 ? "\nread gathers " : i == 2 ? " reductions " : " ");
        (i < 2 ? l->gather_bytes : l->reduce_bytes)[i % 2] = (uint64_t)fsdpi_plan_number(in,
                                                                                         INT64_MAX);
    }
    fsdpi_plan_need(in, "\n");
    if (l->shards < 1 || l->replicas < 1) fsdpi_plan_expect(in, "shards and replicas of 1 or more");
    if (l->num_calls > (in->end - in->text) / 8 || l->num_units > (in->end - in->text) / 8)
        fsdpi_plan_expect(in, "as many calls and units as the text has");
    fsdpi_plan_read_units(in);
}

static void fsdpi_plan_read_slots(fsdpi_plan_in *in) {
    fsdpi_plan_listing *l = in->l;
    while (!in->status && fsdpi_plan_take(in, "slot ")) {
        fsdpi_plan_slot slot;
        memset(&slot, 0, sizeof slot);
        if (fsdpi_plan_int(in) != l->num_slots) fsdpi_plan_expect(in, "slots in order");
        fsdpi_plan_need(in, " ");
        slot.pool = fsdpi_plan_choose(in, fsdpi_plan_pools, 7, "the name of a pool");
        slot.offset = -1;
        if (fsdpi_plan_take(in, " at ")) slot.offset = fsdpi_plan_number(in, INT64_MAX / 2);
        else fsdpi_plan_need(in, " lasts");
        fsdpi_plan_need(in, " bytes ");
        slot.bytes = fsdpi_plan_number(in, INT64_MAX / 2);
        fsdpi_plan_need(in, "\n");
        if (!in->status)
            in->status = fsdpi_plan_grow(in->model, (void **)&l->slots, l->num_slots, &l->cap_slots,
                                         sizeof slot);
        if (!in->status) l->slots[l->num_slots++] = slot;
        in->ops = 1;
    }
}

// Units of an act, joined in one group; its reason.
static void fsdpi_plan_read_act(fsdpi_plan_in *in, int call, int what) {
    fsdpi_plan_listing *l = in->l;
    int first = l->choice.num_acts, late = what != FSDPI_PLAN_GATHER;
    if (what == FSDPI_PLAN_GATHER && fsdpi_plan_take(in, " behind")) late = 1;
    do {
        fsdpi_plan_act act;
        memset(&act, 0, sizeof act);
        act.call = call;
        act.what = (uint8_t)what;
        act.late = (uint8_t)late;
        act.unit = fsdpi_plan_read_unit(in);
        if (act.unit < 0) fsdpi_plan_expect(in, "the name of a unit");
        if (!in->status)
            in->status = fsdpi_plan_grow(in->model, (void **)&l->choice.acts, l->choice.num_acts,
                                         &l->choice.cap_acts, sizeof act);
        if (!in->status) l->choice.acts[l->choice.num_acts++] = act;
        if (l->choice.num_acts - first > FSDPI_PLAN_JOINED) fsdpi_plan_expect(in, "fewer units");
    } while (!in->status && (fsdpi_plan_peek(in, " '")));
    fsdpi_plan_need(in, " why ");
    int why = fsdpi_plan_choose(in, fsdpi_plan_reasons, FSDPI_PLAN_WHY_COUNT, "a reason");
    int at = fsdpi_plan_take(in, " at call ") ? fsdpi_plan_index_of(in, l->num_calls, "a call")
                                              : -1;
    fsdpi_plan_need(in, "\n");
    for (int i = first; i < l->choice.num_acts && !in->status; i++) {
        l->choice.acts[i].why = (uint8_t)why;
        l->choice.acts[i].at = at;
        l->choice.acts[i].group = l->choice.num_acts - first > 1 ? first : -1;
    }
}

static void fsdpi_plan_read_op(fsdpi_plan_in *in, fsdpi_plan_line *line) {
    fsdpi_plan_listing *l = in->l;
    if (fsdpi_plan_int(in) != l->num_lines) fsdpi_plan_expect(in, "ops numbered in order");
    fsdpi_plan_need(in, " ");
    line->kind = (uint8_t)fsdpi_plan_variant_in(in);
    fsdpi_plan_need(in, " ");
    line->label = (uint8_t)fsdpi_plan_label_in(in);
    do {
        int unit = fsdpi_plan_read_unit(in);
        if (!in->status) in->status = fsdpi_plan_member_add(in->model, l, unit, -1, -1);
        line->num_members++;
    } while (!in->status && fsdpi_plan_peek(in, " '"));
    fsdpi_plan_need(in, " ");
    line->stream = (uint8_t)fsdpi_plan_choose(in, fsdpi_plan_streams, FSDP_STREAM_COUNT,
                                              "a stream");
    fsdpi_plan_need(in, " ");
    line->count = (uint64_t)fsdpi_plan_number(in, INT64_MAX);
    fsdpi_plan_need(in, " ");
    line->bytes = (uint64_t)fsdpi_plan_number(in, INT64_MAX);
    fsdpi_plan_need(in, " ");
    line->dtype = (uint8_t)fsdpi_plan_dtype_in(in);
    fsdpi_plan_need(in, " ");
    line->out_dtype = (uint8_t)fsdpi_plan_dtype_in(in);
    for (int i = 0; i < line->num_members && !in->status; i++) {
        l->members[line->members + i].src = fsdpi_plan_place_in(in);
        l->members[line->members + i].dst = fsdpi_plan_place_in(in);
    }
    if (fsdpi_plan_take(in, " scale ")) {
        char number[64];
        size_t used = 0;
        while (in->at<in->end && * in->at> ' ' && used + 1 < sizeof number)
            number[used++] = *in->at++;
        number[used] = 0;
        line->scale = strtod(number, NULL);
    }
    line->accumulate = (uint8_t)fsdpi_plan_take(in, " add");
    line->in_place = (uint8_t)fsdpi_plan_take(in, " in_place");
    if (fsdpi_plan_take(in, " comm ")) {
        char name[FSDPI_PLAN_COMM];
        size_t used = 0;
        while (in->at<in->end && * in->at> ' ' && used + 1 < sizeof name) name[used++] = *in->at++;
        name[used] = 0;
        line->comm = fsdpi_plan_comm_add(l, name);
        if (line->comm < 0) fsdpi_plan_expect(in, "fewer groups");
    }
    fsdpi_plan_need(in, " #");
    line->digest = (uint32_t)fsdpi_plan_hex(in, 8);
}

// A line about a slot: the unit, and the slot.
static void fsdpi_plan_read_slot_line(fsdpi_plan_in *in, fsdpi_plan_line *line, int kind) {
    int unit = fsdpi_plan_read_unit(in), place = fsdpi_plan_place_in(in);
    line->kind = (uint8_t)kind;
    line->num_members = 1;
    if (kind == FSDP_OP_RELEASE) {
        fsdpi_plan_need(in, " ");
        line->stream = (uint8_t)fsdpi_plan_choose(in, fsdpi_plan_streams, FSDP_STREAM_COUNT,
                                                  "a stream");
    }
    if (!in->status)
        in->status = fsdpi_plan_member_add(in->model, in->l, unit,
                                           kind == FSDP_OP_RELEASE ? place : FSDPI_PLAN_NONE,
                                           kind == FSDP_OP_RELEASE ? FSDPI_PLAN_NONE : place);
}

// One line of a call, without its two blanks; 0: it is none.
static int fsdpi_plan_read_line(fsdpi_plan_in *in, int call) {
    static const char *const words[] = {"op ", "acquire", "release", "wrote"};
    static const uint8_t kinds[] = {0, FSDP_OP_ACQUIRE, FSDP_OP_RELEASE, FSDP_OP_GRADS_WRITTEN};
    fsdpi_plan_line line;
    for (int what = 0; what < FSDPI_PLAN_ACT_COUNT; what++)
        if (fsdpi_plan_take(in, fsdpi_plan_words[what])) {
            fsdpi_plan_read_act(in, call, what);
            return 1;
        }
    memset(&line, 0, sizeof line);
    line.call = call;
    line.members = in->l->num_members;
    line.comm = -1;
    line.scale = 1;
    for (int i = 0; i < 4; i++) {
        if (!fsdpi_plan_take(in, words[i])) continue;
        if (i == 0) fsdpi_plan_read_op(in, &line);
        else fsdpi_plan_read_slot_line(in, &line, kinds[i]);
        fsdpi_plan_need(in, "\n");
        if (!in->status) in->status = fsdpi_plan_line_add(in->model, in->l, &line);
        in->ops = 1;
        return 1;
    }
    return 0;
}

static void fsdpi_plan_read_calls(fsdpi_plan_in *in) {
    fsdpi_plan_listing *l = in->l;
    if (!in->status)
        in->status = fsdpi_plan_alloc(in->model, (size_t)l->num_calls * sizeof *l->calls,
                                      (void **)&l->calls);
    for (int c = 0; c < l->num_calls && !in->status; c++) {
        fsdpi_plan_need(in, "call ");
        if (fsdpi_plan_int(in) != c) fsdpi_plan_expect(in, "calls in order");
        fsdpi_plan_need(in, " ");
        l->calls[c].call = fsdpi_plan_call_in(in);
        l->calls[c].index = -1;
        if ((l->calls[c].call == FSDP_CALL_FINALIZE) != (c + 1 == l->num_calls))
            fsdpi_plan_expect(in, "finalize_backward as the last call, and nowhere else");
        if (c + 1 < l->num_calls) l->calls[c].index = fsdpi_plan_read_unit(in);
        if (c + 1 < l->num_calls && l->calls[c].index < 0)
            fsdpi_plan_expect(in, "the name of a unit");
        fsdpi_plan_need(in, "\n");
        while (!in->status && fsdpi_plan_take(in, "  "))
            if (!fsdpi_plan_read_line(in, c))
                fsdpi_plan_expect(in, "gather, keep, free, collect, reduce, op, acquire, release "
                                      "or wrote");
    }
}

// The end of a text: its hash, or zeros, which say that it was edited.
static fsdp_status fsdpi_plan_check_end(fsdp_world *w, const char *text, size_t length) {
    static const char word[] = "end 0123456789abcdef\n";
    const size_t size = sizeof word - 1;
    uint64_t hash = 0xCBF29CE484222325u, given = 0;
    int bad = length < size || memcmp(text + length - size, "end ", 4) != 0 ||
              text[length - 1] != '\n' || (length > size && text[length - size - 1] != '\n');
    for (size_t i = length - size + 4; i + 1 < length && !bad; i++) {
        int c = text[i], digit = c >= '0' && c <= '9' ? c - '0' : c - 'a' + 10;
        bad = digit < 0 || digit > 15;
        given = given << 4 | (uint64_t)digit;
    }
    for (size_t i = 0; i + size < length && !bad; i++)
        hash = (hash ^ (unsigned char)text[i]) * 0x100000001B3u;
    if (!bad && (given == hash || given == 0)) return FSDP_OK;
    return fsdp_fail(w, FSDP_ERR_CORRUPT,
                     bad ? "[E983] plan: the text does not end with 'end' and its hash"
                         : "[E984] plan: the text has hash %016llx, and ends with %016llx: if you "
                           "have edited it, end it with 16 zeros",
                     (unsigned long long)hash, (unsigned long long)given);
}

// Where two texts differ first: as if that had been expected.
static void fsdpi_plan_same_text(fsdpi_plan_in *in, const char *printed, size_t length,
                                 const char *expected) {
    size_t size = (size_t)(in->end - in->text), i = 0;
    while (i < size && i < length && in->text[i] == printed[i]) i++;
    if (i == size && i == length) return;
    size_t line = i;
    while (line > 0 && printed[line - 1] != '\n') line--;
    char words[200];
    const char *stop = (const char *)memchr(printed + line, '\n', length - line);
    snprintf(words, sizeof words, "%s'%.*s'", expected,
             (int)(stop ? stop - printed - (ptrdiff_t)line : (ptrdiff_t)(length - line)) > 150
                 ? 150
                 : (int)(stop ? stop - printed - (ptrdiff_t)line : (ptrdiff_t)(length - line)),
             printed + line);
    in->at = in->text + (i < size ? i : size);
    fsdpi_plan_expect(in, words);
}

// Prints a listing into memory of its own; the text without its last line.
static fsdp_status fsdpi_plan_print(fsdp_model *m, const fsdpi_plan_listing *l, int what,
                                    char **out, size_t *length) {
    fsdpi_plan_out o = {NULL, 0, 0, 0};
    fsdpi_plan_put_all(&o, l, what);
    size_t size = o.used;
    fsdp_status status = fsdpi_plan_alloc(m, size + 1, (void **)out);
    if (status) return status;
    o.buf = *out;
    o.cap = size + 1;
    o.used = 0;
    fsdpi_plan_put_all(&o, l, what);
    *length = size - (sizeof "end 0123456789abcdef\n" - 1);
    return FSDP_OK;
}

/* A listing from a text. *ops: whether it has ops. m NULL: memory from malloc. The caller ends the
   listing, after a failure, too. */
static fsdp_status fsdpi_plan_parse(fsdp_model *m, const char *text, size_t length,
                                    fsdpi_plan_listing *l, int *ops) {
    fsdpi_plan_in in;
    char *printed = NULL;
    size_t size = 0;
    memset(l, 0, sizeof *l);
    memset(&in, 0, sizeof in);
    in.model = m;
    in.world = fsdp_model_world(m);
    if (length > FSDPI_PLAN_MOST)
        return fsdp_fail(in.world, FSDP_ERR_INVALID_ARG,
                         "[E985] plan: the text has %llu bytes, expected at most 64 MiB",
                         (unsigned long long)length);
    in.status = fsdpi_plan_check_end(in.world, text, length);
    if (in.status) return in.status;
    in.text = in.at = text;
    in.end = text + length - (sizeof "end 0123456789abcdef\n" - 1);
    in.l = l;
    fsdpi_plan_read_head(&in);
    fsdpi_plan_read_slots(&in);
    fsdpi_plan_read_calls(&in);
    if (!in.status && in.at != in.end) fsdpi_plan_expect(&in, "a call, or the end");
    if (!in.status)
        in.status = fsdpi_plan_print(m, l, in.ops ? FSDP_PLAN_TEXT_OPS : FSDP_PLAN_TEXT_DECISIONS,
                                     &printed, &size);
    if (!in.status) fsdpi_plan_same_text(&in, printed, size, "");
    fsdpi_plan_free(m, printed);
    *ops = in.ops;
    return in.status;
}

#endif // FSDPI_PLAN_PARSE_H
