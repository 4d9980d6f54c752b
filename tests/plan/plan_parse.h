/* plan/plan_parse.h - a plan's text becomes a listing again, for tests of the proof

   Reads texts that fsdp_plan_text has printed with ops, and that a test may have edited. What was
   read is printed again and compared with the text: so a word that does not belong there is found.
   Decisions are skipped, because the proof does not read them. Names must need no escapes.
   tests/library.c includes this file.

   SPDX-License-Identifier: MIT */
#ifndef PLAN_PARSE_H
#define PLAN_PARSE_H
#include "library.h"

typedef struct parser {
    const char *at; /* the next byte of the line */
    char word[512]; /* the last word that was read */
    fsdp_model *model;
    fsdpi_plan_listing *l;
    int bad; /* 1: the text is refused */
} parser;

static const char *parse_word(parser *p) {
    size_t used = 0;
    while (*p->at == ' ') p->at++;
    for (; *p->at && *p->at != ' ' && *p->at != '\n'; p->at++)
        if (used + 1 < sizeof p->word) p->word[used++] = *p->at;
    p->word[used] = 0;
    return p->word;
}
static int parse_is(parser *p, const char *word) { /* takes the next word if it is this one */
    const char *before = p->at;
    if (strcmp(parse_word(p), word) == 0) return 1;
    p->at = before;
    return 0;
}
static int64_t parse_number(parser *p) {
    const int64_t number = strtoll(parse_word(p), NULL, 10);
    p->bad |= number < 0 || number > INT64_MAX / 2;
    return p->bad ? 0 : number;
}
static int64_t parse_field(parser *p) { /* a number after its name */
    (void)parse_word(p);
    return parse_number(p);
}
static int parse_index(parser *p, int count) {
    const int64_t index = parse_number(p);
    p->bad |= index >= count;
    return p->bad ? 0 : (int)index;
}
/* One of several words: given as a list, or by a function. */
static int parse_one_of(parser *p, const char *const *words, const char *(*name)(int), int count) {
    (void)parse_word(p);
    for (int i = 0; i < count; i++)
        if (strcmp(p->word, words ? words[i] : name(i)) == 0) return i;
    p->bad = 1;
    return 0;
}
static const char *parse_dtype_name(int dtype) { return fsdp_dtype_name((fsdp_dtype)dtype); }
static int parse_stream(parser *p) {
    return parse_one_of(p, fsdpi_plan_streams, NULL, FSDP_STREAM_COUNT);
}
/* A unit; -1: the model. */
static int parse_unit(parser *p) {
    if (parse_is(p, "model")) return -1;
    const char *name = parse_word(p);
    const size_t length = strlen(name);
    for (int u = 0; u < p->l->num_units && length > 1; u++)
        if (strncmp(name + 1, p->l->units[u].name, length - 2) == 0 &&
            strlen(p->l->units[u].name) == length - 2)
            return u;
    p->bad = 1;
    return -1;
}
static int parse_place(parser *p) {
    if (parse_is(p, "slot")) return parse_index(p, p->l->num_slots);
    return -1 - parse_one_of(p, fsdpi_plan_blocks, NULL,
                             (int)(sizeof fsdpi_plan_blocks / sizeof *fsdpi_plan_blocks));
}

static void parse_head_unit(parser *p) {
    fsdpi_plan_unit *unit = &p->l->units[p->l->num_units];
    (void)parse_word(p);
    const size_t length = strlen(parse_word(p));
    p->bad |= length < 2 || fsdpi_plan_string(p->model, p->word + 1, length - 2, &unit->name);
    if (p->bad) return;
    p->l->num_units++;
    unit->gather_bytes = parse_field(p);
    unit->grad_bytes = parse_field(p);
    (void)parse_word(p);
    unit->reads = parse_one_of(p, fsdpi_plan_readings, NULL, 4);
}
static void parse_slot(parser *p) {
    fsdpi_plan_slot slot;
    memset(&slot, 0, sizeof slot);
    (void)parse_word(p);
    slot.pool = parse_one_of(p, fsdpi_plan_pools, NULL, 7);
    slot.offset = parse_is(p, "at") ? parse_number(p) : -1;
    if (slot.offset < 0) (void)parse_word(p); /* lasts */
    slot.bytes = parse_field(p);
    p->bad |= fsdpi_plan_grow(p->model, (void **)&p->l->slots, p->l->num_slots, &p->l->cap_slots,
                              sizeof slot) != FSDP_OK;
    if (!p->bad) p->l->slots[p->l->num_slots++] = slot;
}
static void parse_call(parser *p) {
    fsdpi_plan_call *call = &p->l->calls[p->l->num_calls];
    (void)parse_word(p);
    p->bad |= p->l->num_calls && call[-1].call == FSDP_CALL_FINALIZE;
    call->call = parse_one_of(p, NULL, fsdpi_call_name, FSDP_CALL_FINALIZE + 1);
    call->index = call->call == FSDP_CALL_FINALIZE ? -1 : parse_unit(p);
    p->bad |= call->index < 0 && call->call != FSDP_CALL_FINALIZE;
    p->l->num_calls++;
}
static void parse_member(parser *p, fsdpi_plan_line *line) {
    const int unit = parse_unit(p);
    p->bad |= fsdpi_plan_member_add(p->model, p->l, unit, FSDPI_PLAN_NONE, FSDPI_PLAN_NONE) !=
              FSDP_OK;
    line->num_members += !p->bad;
}
static void parse_op(parser *p, fsdpi_plan_line *line) {
    (void)parse_word(p);
    line->kind = (uint8_t)parse_one_of(p, NULL, fsdp_op_name, FSDP_OP_COUNT);
    line->label = (uint8_t)parse_one_of(p, NULL, fsdpi_plan_label, FSDP_LABEL_COUNT);
    do parse_member(p, line);
    while (!p->bad && strncmp(p->at, " '", 2) == 0);
    line->stream = (uint8_t)parse_stream(p);
    line->count = (uint64_t)parse_number(p);
    line->bytes = (uint64_t)parse_number(p);
    line->dtype = (uint8_t)parse_one_of(p, NULL, parse_dtype_name, FSDP_DTYPE_COUNT);
    line->out_dtype = (uint8_t)parse_one_of(p, NULL, parse_dtype_name, FSDP_DTYPE_COUNT);
    for (int i = 0; i < line->num_members; i++) {
        fsdpi_plan_member *member = &p->l->members[line->members + i];
        member->src = parse_place(p);
        member->dst = parse_place(p);
    }
    if (parse_is(p, "scale")) line->scale = strtod(parse_word(p), NULL);
    line->accumulate = (uint8_t)parse_is(p, "add");
    line->in_place = (uint8_t)parse_is(p, "in_place");
    if (parse_is(p, "comm")) {
        line->comm = fsdpi_plan_comm_add(p->l, parse_word(p));
        p->bad |= line->comm < 0;
    }
    if (*parse_word(p) == '#') line->digest = (uint32_t)strtoul(p->word + 1, NULL, 16);
}
/* An op, or an event of a slot. Returns 0 if the line is a decision. */
static int parse_line(parser *p) {
    static const char *const words[] = {"acquire", "release", "wrote"};
    static const uint8_t kinds[] = {FSDP_OP_ACQUIRE, FSDP_OP_RELEASE, FSDP_OP_GRADS_WRITTEN};
    fsdpi_plan_line line;
    int what = 0;
    memset(&line, 0, sizeof line);
    line.call = p->l->num_calls - 1;
    line.members = p->l->num_members;
    line.comm = -1;
    line.scale = 1;
    (void)parse_word(p);
    while (what < 3 && strcmp(p->word, words[what]) != 0) what++;
    if (what < 3) {
        line.kind = kinds[what];
        parse_member(p, &line);
        const int place = parse_place(p);
        if (line.kind == FSDP_OP_RELEASE) line.stream = (uint8_t)parse_stream(p);
        if (p->bad) return 1;
        fsdpi_plan_member *member = &p->l->members[line.members];
        *(line.kind == FSDP_OP_RELEASE ? &member->src : &member->dst) = place;
    } else if (strcmp(p->word, "op") == 0) {
        parse_op(p, &line);
    } else {
        return 0;
    }
    p->bad |= line.call < 0 || fsdpi_plan_line_add(p->model, p->l, &line) != FSDP_OK;
    return 1;
}
static void parse_head(parser *p) {
    fsdpi_plan_listing *l = p->l;
    int32_t *const counts[4] = {l->gathers, l->reductions, l->replica_ops, l->ops};
    if (strcmp(p->word, "model") == 0) {
        l->model = strtoull(parse_word(p), NULL, 16);
        (void)parse_field(p); /* the units follow */
        l->num_params = (int32_t)parse_field(p);
        l->shards = (int32_t)parse_field(p);
        l->replicas = (int32_t)parse_field(p);
        (void)parse_word(p);
        l->mode = parse_one_of(p, fsdpi_plan_modes, NULL, 3);
    } else if (strcmp(p->word, "kind") == 0) {
        l->kind = strtoull(parse_word(p), NULL, 16);
        (void)parse_field(p); /* the calls follow */
        l->forward_calls = (int32_t)parse_field(p);
    } else if (strcmp(p->word, "bytes") == 0) {
        l->bytes = parse_number(p);
        l->bound = parse_field(p);
        l->eager = parse_field(p);
    } else if (strcmp(p->word, "count") == 0) {
        for (int i = 0; i < 4; i++) {
            counts[i][0] = (int32_t)parse_field(p);
            counts[i][1] = (int32_t)parse_number(p);
        }
    } else if (strcmp(p->word, "read") == 0) {
        for (int i = 0; i < 2; i++) {
            uint64_t *bytes = i ? l->reduce_bytes : l->gather_bytes;
            bytes[0] = (uint64_t)parse_field(p);
            bytes[1] = (uint64_t)parse_number(p);
        }
    }
}

/* Returns the line after this one; NULL: there is none. */
static const char *parse_next_line(const char *line) {
    line = strchr(line, '\n');
    return line ? line + 1 : NULL;
}
static int parse_ends(const char *line) { return !line || strncmp(line, "end ", 4) == 0; }

/* Reads a text into p->l. kept: room for the text without decisions. */
static void parse_text(parser *p, const char *text, char *kept) {
    fsdpi_plan_listing *l = p->l;
    size_t lines = 2;
    for (const char *c = text; *c; c++) lines += *c == '\n';
    p->bad = fsdpi_plan_alloc(p->model, lines * sizeof *l->units, (void **)&l->units) ||
             fsdpi_plan_alloc(p->model, lines * sizeof *l->calls, (void **)&l->calls);
    for (const char *line = text, *next; !p->bad && !parse_ends(line); line = next) {
        int keeps = 1;
        next = parse_next_line(line);
        p->at = line;
        if (*line == ' ') {
            keeps = parse_line(p);
        } else {
            (void)parse_word(p);
            if (strcmp(p->word, "unit") == 0) parse_head_unit(p);
            else if (strcmp(p->word, "slot") == 0) parse_slot(p);
            else if (strcmp(p->word, "call") == 0) parse_call(p);
            else parse_head(p);
        }
        const size_t length = next ? (size_t)(next - line) : strlen(line);
        if (keeps) memcpy(kept, line, length), kept += length;
    }
    p->bad |= l->shards < 1 || l->replicas < 1 || !l->num_calls ||
              l->calls[l->num_calls - 1].call != FSDP_CALL_FINALIZE;
}

/* Proves a text with ops, without a world. Returns 0 if it is not a text that the library prints;
   then *out is unchanged. */
int lib_plan_prove(const char *text, fsdp_plan_proof *out) {
    static fsdp_world world;
    static fsdp_model model;
    fsdpi_plan_listing l;
    parser p;
    memset(&l, 0, sizeof l);
    memset(&p, 0, sizeof p);
    world.boot.allocator.alloc = fsdpi_libc_alloc, world.boot.allocator.free = fsdpi_libc_free;
    model.world = &world;
    p.model = &model, p.l = &l;
    char *kept = (char *)calloc(2, strlen(text) + 1);
    if (!kept) return 0;
    char *printed = kept + strlen(text) + 1;
    parse_text(&p, text, kept);
    if (!p.bad) {
        fsdpi_plan_out o = {printed, strlen(text) + 1, 0, 0};
        fsdpi_plan_put_all(&o, &l, FSDP_PLAN_TEXT_OPS);
        p.bad = strncmp(kept, printed, strlen(kept)) != 0 || !parse_ends(printed + strlen(kept));
    }
    if (!p.bad) p.bad = fsdpi_plan_prove_one(&model, &l, out) != FSDP_OK;
    fsdpi_plan_listing_end(&model, &l);
    free(kept);
    return !p.bad;
}
#endif
