/* plan_texts.h - texts of plans for tests: made, split into lines, edited, and judged by a checker
   that shares no code with the library's proof.

   The checker walks a text four times (once if a slot lasts), with its own vector clocks for each 8
   bytes of the slots. For each use of a slot it hashes the history, in order: the ops, and the
   caller's reads and writes. An edited text computes the same bits if its histories are unchanged,
   nothing races, and every op accesses only slots that its units hold.

   SPDX-License-Identifier: MIT */
#ifndef PLAN_TEXTS_H
#define PLAN_TEXTS_H
#include "plan.h"
#include "sim.h"

/* ---- getting texts --------------------------------------------------------------------------- */

typedef struct texts_job {
    plan_net net;
    fsdp_plan_desc desc;
    int what;   /* FSDP_PLAN_TEXT_* */
    char *text; /* from rank 0; equal on all ranks */
} texts_job;

H_FN char *texts_of(const fsdp_plan *plan, int index, int what) {
    size_t length = fsdp_plan_text(plan, index, what, NULL, 0);
    char *text = (char *)lab_zeros(length + 1, 1);
    CHECK_EQ_INT((long long)fsdp_plan_text(plan, index, what, text, length + 1), (long long)length);
    CHECK_EQ_INT((long long)strlen(text), (long long)length);
    return text;
}
H_FN void texts_body(lab_rank *r) {
    texts_job *j = (texts_job *)r->arg;
    plan_bed b;
    plan_result out;
    memset(&out, 0, sizeof out);
    plan_open(&b, &j->net, r->w);
    CALL(r->w, fsdp_plan_create(b.model, &j->desc, &b.plan));
    for (int i = 0; i < 3; i++) plan_step(&b, &out);
    CHECK_MSG(out.mode[2] == FSDP_PLAN_REPLAYING, "%s", out.why[2]);
    if (r->rank == 0) j->text = texts_of(b.plan, 0, j->what);
    fsdp_model_destroy(b.model);
}
/* The caller's work between calls, for the checker of tests/sim.h. */
H_FN void texts_sim_step(sim *s, plan_bed *b, plan_result *out) {
    const plan_net *n = b->net;
    fsdp_param_view v = FSDP_ZERO;
    for (int i = 0; i < n->num_calls; i++) {
        int unit = n->calls[i].unit, call = n->calls[i].call, back = call == FSDP_CALL_PRE_BACKWARD;
        CALL(b->w, plan_hook(b, unit, call));
        if (call != FSDP_CALL_PRE_FORWARD && !back) continue;
        plan_look(b, unit, i, back);
        for (int p = 0; p < n->num_params; p++) {
            int64_t numel = b->numel[unit][p];
            void *grad = back && n->frozen != p + 1 ? fsdp_grad(b->unit[unit], p) : NULL;
            fsdp_dtype dtype = plan_dtype(n, p);
            sim_read(s, "parameters", fsdp_data(b->unit[unit], p),
                     numel * (int64_t)fsdp_dtype_size(dtype));
            if (grad) sim_write(s, "gradients", grad, numel * (int64_t)fsdp_dtype_size(dtype));
        }
    }
    CALL(b->w, fsdp_finalize_backward(b->model));
    while (fsdp_next_param(b->model, &v)) {
        sim_write(s, "shards", v.shard, v.numel * (int64_t)fsdp_dtype_size(v.dtype));
        if (v.shard_grad)
            sim_read(s, "shard gradients", v.shard_grad,
                     v.numel * (int64_t)fsdp_dtype_size(v.grad_dtype));
    }
    out->grads[b->step] = plan_update(b);
    out->hash[b->step] = b->hash;
    if (b->plan) {
        out->mode[b->step] = fsdp_plan_state(b->plan);
        snprintf(out->why[b->step], sizeof out->why[0], "%s", fsdp_plan_why(b->plan));
    }
    b->step++;
}
/* Streams: one rank of `size`. */
H_FN char *texts_on_streams(const plan_net *net, const fsdp_plan_desc *desc, int size, int what) {
    sim s;
    plan_bed b;
    plan_result out;
    memset(&out, 0, sizeof out);
    sim_init(&s, size, 0);
    fsdp_world *w = sim_open(&s);
    CHECK(w != NULL);
    plan_open(&b, net, w);
    CALL(w, fsdp_plan_create(b.model, desc, &b.plan));
    for (int i = 0; i < 3; i++) texts_sim_step(&s, &b, &out);
    CHECK_MSG(out.mode[2] == FSDP_PLAN_REPLAYING, "%s", out.why[2]);
    char *text = texts_of(b.plan, 0, what);
    fsdp_model_destroy(b.model);
    CHECK_EQ_INT(sim_close(&s), 0);
    return text;
}
enum { TEXTS_STREAMS = 3 }; /* other modes are a number of worker threads */
H_FN char *texts_make(const plan_net *net, const fsdp_plan_desc *desc, int size, int mode,
                      int what) {
    texts_job *j = (texts_job *)lab_zeros(1, sizeof *j);
    lab_how how;
    memset(&how, 0, sizeof how);
    if (mode == TEXTS_STREAMS) {
        free(j);
        return texts_on_streams(net, desc, size, what);
    }
    j->net = *net, j->desc = *desc, j->what = what;
    how.lanes = mode;
    lab_run(size, &how, texts_body, j);
    char *text = j->text;
    free(j);
    return text;
}

/* Nets of which texts are made. */
typedef struct texts_case {
    const char *name;
    int net, size;
} texts_case;
enum { TEXTS_NESTED, TEXTS_CHAIN, TEXTS_MIXED, TEXTS_HSDP, TEXTS_DDP, TEXTS_NETS };
H_FN plan_net texts_net(int which) {
    plan_net n = which == TEXTS_NESTED ? plan_nested() : plan_chain(4, 16, 16);
    if (which == TEXTS_MIXED) n.model.param_dtype = FSDP_BF16, n.model.reduce_dtype = FSDP_F32;
    if (which == TEXTS_HSDP) n.replicas = 2;
    if (which == TEXTS_DDP) n.replicas = 4;
    return n;
}
H_FN int texts_size(int which) { return which == TEXTS_HSDP || which == TEXTS_DDP ? 4 : 2; }
H_FN const char *texts_name(int which) {
    static const char *const names[] = {"nested", "chain", "mixed", "hsdp", "ddp"};
    return names[which];
}

/* ---- lines ----------------------------------------------------------------------------------- */

enum { TEXTS_LINES = 4000, TEXTS_LINE = 1024 };
typedef struct texts_lines {
    int num;
    const char *at[TEXTS_LINES]; /* without the end of the line; not the last line of the text */
    char *whole;
} texts_lines;

H_FN texts_lines *texts_split(const char *text) {
    texts_lines *t = (texts_lines *)lab_zeros(1, sizeof *t);
    t->whole = (char *)lab_zeros(strlen(text) + 1, 1);
    strcpy(t->whole, text);
    for (char *line = strtok(t->whole, "\n"); line; line = strtok(NULL, "\n")) {
        CHECK(t->num < TEXTS_LINES && strlen(line) < TEXTS_LINE);
        if (strncmp(line, "end ", 4) != 0) t->at[t->num++] = line;
    }
    return t;
}
H_FN void texts_free(texts_lines *t) {
    free(t->whole);
    free(t);
}
H_FN int texts_is(const char *line, const char *word) {
    return strncmp(line, word, strlen(word)) == 0;
}
/* A line of ops: it has a number. */
H_FN int texts_is_op(const char *line) {
    return texts_is(line, "  op ") || texts_is(line, "  acquire ") ||
           texts_is(line, "  release ") || texts_is(line, "  wrote ");
}
H_FN int texts_find(const texts_lines *t, int from, const char *word) {
    while (from < t->num && !strstr(t->at[from], word)) from++;
    return from < t->num ? from : -1;
}
H_FN const char *texts_words(const char *op) { /* the words after an op's number */
    return strchr(op + 5, ' ');
}
/* Returns a number that follows the op's last unit name: which == 1: count; 2: bytes. */
H_FN long long texts_number(const char *op, int which) {
    const char *at = strrchr(op, '\'');
    for (int i = 0; at && i <= which; i++) at = strchr(at + 1, ' ');
    return at ? strtoll(at + 1, NULL, 10) : 0;
}

/* Returns the lines as a text with new numbers of ops. If `mends` is set, the head's counts are
   replaced by those of the lines. The hash in the last line is 0: the text was edited. */
H_FN char *texts_join(const texts_lines *t, int mends) {
    char *text = (char *)lab_zeros((size_t)t->num * TEXTS_LINE / 4 + 65536, 1), *to = text;
    long long gathers = 0, reductions = 0, replicas = 0, ops = 0, read = 0, reduced = 0, old[4];
    int number = 0;
    for (int i = 0; i < t->num; i++) {
        const char *line = t->at[i], *words = texts_is(line, "  op ") ? texts_words(line) : NULL;
        if (!words) continue;
        int gather = texts_is(words, " all_gather "), reduce = texts_is(words, " reduce_scatter "),
            replica = texts_is(words, " all_reduce ");
        gathers += gather, reductions += reduce, replicas += replica, ops++;
        if (gather) read += texts_number(line, 2);
        if (reduce || replica) reduced += texts_number(line, 2);
    }
    for (int i = 0; i < t->num; i++) {
        const char *line = t->at[i];
        if (mends &&
            sscanf(line, "count gathers %lld %*d reductions %lld %*d replicas %lld %*d ops %lld",
                   &old[0], &old[1], &old[2], &old[3]) == 4) {
            to += sprintf(
                to,
                "count gathers %lld %lld reductions %lld %lld replicas %lld %lld ops %lld "
                "%lld\n",
                old[0], gathers, old[1], reductions, old[2], replicas, old[3], ops);
        } else if (mends &&
                   sscanf(line, "read gathers %lld %*d reductions %lld", &old[0], &old[1]) == 2) {
            to += sprintf(to, "read gathers %lld %lld reductions %lld %lld\n", old[0], read, old[1],
                          reduced);
        } else if (texts_is(line, "  op ")) {
            to += sprintf(to, "  op %d%s\n", number, texts_words(line));
        } else {
            to += sprintf(to, "%s\n", line);
        }
        number += texts_is_op(line);
    }
    strcpy(to, "end 0000000000000000\n");
    return text;
}
/* Moves line `from`: it gets index `to` after its removal. to < 0: only removes it. */
H_FN void texts_move(texts_lines *t, int from, int to) {
    const char *line = t->at[from];
    t->num--;
    memmove(&t->at[from], &t->at[from + 1], (size_t)(t->num - from) * sizeof *t->at);
    if (to < 0) return;
    memmove(&t->at[to + 1], &t->at[to], (size_t)(t->num - to) * sizeof *t->at);
    t->at[to] = line;
    t->num++;
}
H_FN void texts_insert(texts_lines *t, int at, const char *line) {
    CHECK(t->num < TEXTS_LINES);
    memmove(&t->at[at + 1], &t->at[at], (size_t)(t->num - at) * sizeof *t->at);
    t->at[at] = line;
    t->num++;
}

/* ---- the checker ----------------------------------------------------------------------------- */

enum {
    BRUTE_ACTORS = 5,
    BRUTE_UNITS = 80,
    BRUTE_SLOTS = 300,
    BRUTE_WORDS = 300,
    BRUTE_GRAIN = 8,
    BRUTE_ORDERS = 64
};
typedef struct brute_event {
    int set, stream;
    uint32_t clock[BRUTE_ACTORS];
} brute_event;
typedef struct brute_cell {
    uint32_t writer, written, read[BRUTE_ACTORS];
} brute_cell;
typedef struct brute_slot {
    int64_t begin, bytes; /* in the cells */
    int pool, lasts, holder, filled;
    uint64_t chain, users; /* hashes: the history of this use */
    brute_event ready, avail;
} brute_slot;
typedef struct brute {
    int modes, num_units, num_slots, walk, bad, can_last;
    char name[BRUTE_UNITS][32];
    int64_t gather[BRUTE_UNITS], grad[BRUTE_UNITS], arena, held, bytes;
    int opened[BRUTE_UNITS], reads[BRUTE_UNITS], uses[BRUTE_UNITS][2],
        at[BRUTE_UNITS][2]; /* [gather, grad]: slots */
    brute_slot slot[BRUTE_SLOTS];
    brute_event shards, grads;
    uint64_t block[BRUTE_UNITS], total;
    uint32_t now[BRUTE_ACTORS][BRUTE_ACTORS];
    brute_cell *cells;
    int64_t num_cells;
    uint64_t order[BRUTE_ORDERS][2]; /* group and label; stream */
    int num_orders;
    char why[200];
} brute;
enum { BRUTE_INLINE, BRUTE_LANES, BRUTE_STREAMS_MODE };
static const char *const brute_streams[BRUTE_ACTORS] = {"COMPUTE", "GATHER", "REDUCE", "ALLREDUCE",
                                                        "EXTENSION"};
static const char *const brute_pools[] = {"shard", "sgrad", "gather", "slice",
                                          "grad",  "rin",   "rout"};
enum { BRUTE_GATHER = 2, BRUTE_GRAD = 4 };

H_FN void brute_wrong(brute *b, const char *what, const char *line) {
    if (!b->bad) snprintf(b->why, sizeof b->why, "walk %d: %s: %.120s", b->walk, what, line);
    b->bad = 1;
}
H_FN uint64_t brute_hash(uint64_t h, const char *text) {
    lab_fold(&h, text, strlen(text) + 1);
    return h;
}
H_FN int brute_actor(const brute *b, int stream) { return b->modes == BRUTE_INLINE ? 0 : stream; }
H_FN void brute_wait(brute *b, int actor, const brute_event *e) {
    for (int a = 0; e->set && a < BRUTE_ACTORS; a++)
        if (e->clock[a] > b->now[actor][a]) b->now[actor][a] = e->clock[a];
}
H_FN void brute_mark(const brute *b, int actor, brute_event *e) {
    e->set = 1, e->stream = actor;
    memcpy(e->clock, b->now[actor], sizeof e->clock);
}
/* Notes an access of `actor` to cells [begin, end), and reports a race. The first cells are the
   slots'; the last 2 * num_units are each unit's shards and gradients. */
H_FN void brute_touch(brute *b, int actor, int64_t begin, int64_t end, int writes,
                      const char *line) {
    for (int64_t i = begin; i < end && i < b->num_cells; i++) {
        brute_cell *c = &b->cells[i];
        int bad = c->written > b->now[actor][c->writer];
        for (int a = 0; a < BRUTE_ACTORS && writes; a++) bad |= c->read[a] > b->now[actor][a];
        if (bad) brute_wrong(b, "a race", line);
        if (!writes) c->read[actor] = b->now[actor][actor];
        else c->writer = (uint32_t)actor, c->written = b->now[actor][actor];
    }
}
H_FN void brute_touch_slot(brute *b, int actor, int slot, int writes, const char *line) {
    const brute_slot *s = &b->slot[slot];
    brute_touch(b, actor, s->begin / BRUTE_GRAIN,
                (s->begin + s->bytes + BRUTE_GRAIN - 1) / BRUTE_GRAIN, writes, line);
}
H_FN int brute_word(const char *word, const char *const *words, int count) {
    for (int i = 0; i < count; i++)
        if (strcmp(word, words[i]) == 0) return i;
    return -1;
}
H_FN int brute_unit(const brute *b, const char *word) {
    for (int u = 0; u < b->num_units; u++)
        if (strcmp(b->name[u], word) == 0) return u;
    return -1;
}
/* Ends a use of a slot, and adds the hash of its history to the total. */
H_FN void brute_ends(brute *b, brute_slot *s, int unit) {
    uint64_t h = lab_hash(s->chain, s->users, (uint64_t)unit, (uint64_t)s->pool);
    b->total += lab_hash(h, (uint64_t)b->uses[unit][s->pool == BRUTE_GATHER]++, (uint64_t)b->walk,
                         5);
    s->holder = -1;
    for (int k = 0; k < 2; k++)
        if (b->at[unit][k] >= 0 && &b->slot[b->at[unit][k]] == s) b->at[unit][k] = -1;
    b->held -= s->lasts ? 0 : s->bytes;
}
H_FN void brute_acquire(brute *b, int unit, int slot, const char *line) {
    if (unit < 0) brute_wrong(b, "no unit", line);
    if (unit < 0) return;
    brute_slot *s = &b->slot[slot];
    int64_t needs = s->pool == BRUTE_GATHER ? b->gather[unit]
                    : s->pool == BRUTE_GRAD ? b->grad[unit]
                                            : 0;
    for (int i = 0; i < b->num_slots; i++) {
        const brute_slot *o = &b->slot[i];
        if (o->holder >= 0 && o->begin < s->begin + s->bytes && s->begin < o->begin + o->bytes)
            brute_wrong(b, "memory is held", line);
    }
    if (!s->lasts && s->begin + s->bytes > b->arena) brute_wrong(b, "beyond the arena", line);
    if (s->bytes < needs) brute_wrong(b, "too small", line);
    s->holder = unit, s->filled = 0, s->chain = 1, s->users = 0;
    b->held += s->lasts ? 0 : s->bytes;
    if (b->held > b->arena) brute_wrong(b, "more bytes than there are", line);
    if (s->pool == BRUTE_GATHER) b->at[unit][0] = slot;
    if (s->pool == BRUTE_GRAD) b->at[unit][1] = slot;
}
H_FN void brute_release(brute *b, int unit, int slot, int actor, const char *line) {
    brute_slot *s = &b->slot[slot];
    if (s->holder < 0) brute_wrong(b, "nobody holds it", line);
    if (s->holder < 0) return;
    if (s->holder != unit) brute_wrong(b, "another unit holds it", line);
    if (!s->avail.set) brute_mark(b, actor, &s->avail);
    brute_ends(b, s, s->holder);
}
/* Reports an error if collectives `what`, which all ranks must order equally, use two streams. */
H_FN void brute_order(brute *b, uint64_t what, uint64_t stream, const char *line) {
    int i = 0;
    while (i < b->num_orders && b->order[i][0] != what) i++;
    if (i == b->num_orders) {
        CHECK(i < BRUTE_ORDERS);
        b->order[b->num_orders][0] = what, b->order[b->num_orders++][1] = stream;
    }
    if (b->order[i][1] != stream) brute_wrong(b, "two streams for one group", line);
}
/* An op: words[0] is "op", then number, kind, label, units, stream, count, ... */
H_FN void brute_op(brute *b, char **words, int num, const char *line) {
    int unit[BRUTE_UNITS], units = 0, at = 4, is_use = strcmp(words[2], "use") == 0,
                           is_users = strcmp(words[3], "users") == 0,
                           is_acc = strcmp(words[3], "acc") == 0;
    while (at < num && (words[at][0] == '\'' || strcmp(words[at], "model") == 0))
        unit[units++] = brute_unit(b, words[at++]);
    int actor = brute_actor(b, brute_word(words[at], brute_streams, BRUTE_ACTORS));
    uint64_t what = brute_hash(brute_hash(7, words[2]), words[3]);
    for (int i = 0; i < units; i++) what = lab_hash(what, (uint64_t)unit[i], 0, 0);
    const char *stream = words[at];
    for (int i = at + 1; i < at + 5; i++) what = brute_hash(what, words[i]);
    at += 5;
    b->now[actor][actor]++;
    int place[2 * BRUTE_UNITS]; /* slots; -2: shards, -3: grads */
    for (int i = 0; i < 2 * units; i++, at++)
        place[i] = strcmp(words[at], "slot") == 0     ? atoi(words[++at])
                   : strcmp(words[at], "shards") == 0 ? -2
                   : strcmp(words[at], "grads") == 0  ? -3
                                                      : -1;
    for (int i = at; i < num; i++) what = brute_hash(what, words[i]);
    for (int i = at; i + 1 < num; i++) /* the stream of each group and label */
        if (strcmp(words[i], "comm") == 0)
            brute_order(b, brute_hash(brute_hash(3, words[i + 1]), words[3]), brute_hash(5, stream),
                        line);
    int src = place[0], dst = place[1];
    if (src != -1)
        brute_wait(b, actor, src >= 0 ? &b->slot[src].ready : src == -2 ? &b->shards : &b->grads);
    if (dst != src && dst >= 0)
        brute_wait(b, actor, b->slot[dst].avail.set ? &b->slot[dst].avail : &b->slot[dst].ready);
    if (dst != src && dst == -3) brute_wait(b, actor, &b->grads);
    if (dst != src && dst == -2) brute_wait(b, actor, &b->shards);
    if (dst >= 0) b->slot[dst].avail.set = 0;
    for (int i = 0; i < 2 * units; i++) {
        int p = place[i], u = unit[i / 2], writes = i % 2;
        if (p >= 0 && b->slot[p].holder < 0) brute_wrong(b, "nobody holds it", line);
        if (p >= 0 && b->slot[p].holder >= 0 && u >= 0 && b->slot[p].holder != u)
            brute_wrong(b, "another unit holds it", line);
        if (is_use) continue;
        if (p >= 0) brute_touch_slot(b, actor, p, writes, line);
        if (p <= -2 && u >= 0) {
            int64_t cell = b->num_cells - 2 * b->num_units + 2 * u + (p == -3);
            brute_touch(b, actor, cell, cell + 1, writes, line);
            if (p == -3) b->block[u] = lab_hash(b->block[u], what, (uint64_t)i, 1);
        }
        if (p < 0) continue;
        brute_slot *s = &b->slot[p]; /* flags do not lie where sums do: they may change places */
        if (is_users) s->users += what;
        else {
            if (!is_acc && s->users) s->chain = lab_hash(s->chain, s->users, 2, 2), s->users = 0;
            s->chain = lab_hash(s->chain, what, (uint64_t)i, 3);
        }
        if (writes && s->pool == BRUTE_GATHER) s->filled = 1;
    }
    if (dst >= 0) brute_mark(b, actor, &b->slot[dst].ready);
    if (dst == -3) brute_mark(b, actor, &b->grads);
    if (dst == -2) brute_mark(b, actor, &b->shards);
}
/* The caller, between the pre_ and the post_ call of a unit. */
H_FN void brute_caller(brute *b, int unit, int backward, int ends, const char *line) {
    if (unit < 0) return;
    int slot = b->at[unit][0];
    int grad = b->grad[unit] ? b->at[unit][1] : -1; /* 0: there is nothing to write */
    b->now[0][0]++;
    if (b->reads[unit] & (backward ? 2 : 1)) {
        if ((!ends || b->opened[unit]) && (slot < 0 || !b->slot[slot].filled))
            brute_wrong(b, "parameters are not there", line);
        b->opened[unit] = !ends;
        if (slot >= 0) {
            brute_slot *s = &b->slot[slot];
            brute_touch_slot(b, 0, slot, 0, line);
            s->chain = lab_hash(s->chain, 11, (uint64_t)ends, (uint64_t)backward);
        }
    }
    if (backward && grad >= 0) {
        brute_touch_slot(b, 0, grad, 1, line);
        b->slot[grad].chain = lab_hash(b->slot[grad].chain, 13, (uint64_t)ends, 0);
    }
}
H_FN void brute_line(brute *b, const char *line, int *pending, int *call_unit) {
    char copy[TEXTS_LINE], *words[BRUTE_WORDS];
    int num = 0;
    strcpy(copy, line);
    for (char *w = strtok(copy, " "); w && num < BRUTE_WORDS; w = strtok(NULL, " "))
        words[num++] = w;
    if (num < 2) return;
    if (strcmp(words[0], "call") == 0) {
        if (*pending)
            brute_caller(b, *call_unit, *pending == 2, 0, line); /* after the pre_ call */
        *pending = num > 2 && strcmp(words[2], "pre_forward") == 0    ? 1
                   : num > 2 && strcmp(words[2], "pre_backward") == 0 ? 2
                                                                      : 0;
        *call_unit = num > 3 ? brute_unit(b, words[3]) : -1;
        if (num > 3 && texts_is(words[2], "post_"))
            brute_caller(b, *call_unit, strcmp(words[2], "post_backward") == 0, 1, line);
    } else if (line[0] != ' ') {
        return;
    } else if (strcmp(words[0], "acquire") == 0 && strcmp(words[2], "slot") == 0) {
        brute_acquire(b, brute_unit(b, words[1]), atoi(words[3]), line);
    } else if (strcmp(words[0], "release") == 0 && strcmp(words[2], "slot") == 0) {
        brute_release(b, brute_unit(b, words[1]), atoi(words[3]),
                      brute_actor(b, brute_word(words[4], brute_streams, BRUTE_ACTORS)), line);
    } else if (strcmp(words[0], "wrote") == 0 && strcmp(words[2], "slot") == 0) {
        brute_slot *s = &b->slot[atoi(words[3])];
        b->now[0][0]++;
        brute_mark(b, 0, &s->ready);
        if (s->holder < 0) brute_wrong(b, "nobody holds it", line);
    } else if (strcmp(words[0], "op") == 0) {
        brute_op(b, words, num, line);
    }
}
H_FN void brute_head(brute *b, const texts_lines *t) {
    int64_t lasting = 0, most = 0;
    for (int i = 0; i < t->num && !texts_is(t->at[i], "call "); i++) {
        const char *line = t->at[i];
        char a[64], c[64];
        long long x, y;
        if (texts_is(line, "model "))
            b->modes = strstr(line, "mode inline") ? BRUTE_INLINE : BRUTE_STREAMS_MODE;
        if (sscanf(line, "bytes %lld", &x) == 1) b->bytes = x;
        if (sscanf(line, "unit %*d %31s gather %lld grad %lld reads %63s", a, &x, &y, c) == 4) {
            CHECK(b->num_units < BRUTE_UNITS);
            b->at[b->num_units][0] = b->at[b->num_units][1] = -1;
            memcpy(b->name[b->num_units], a, 32);
            b->gather[b->num_units] = x, b->grad[b->num_units] = y;
            b->reads[b->num_units++] = strcmp(c, "both") == 0       ? 3
                                       : strcmp(c, "backward") == 0 ? 2
                                                                    : strcmp(c, "forward") == 0;
        }
        if (!texts_is(line, "slot ")) continue;
        CHECK(b->num_slots < BRUTE_SLOTS);
        brute_slot *s = &b->slot[b->num_slots++];
        s->holder = -1;
        s->lasts = sscanf(line, "slot %*d %63s at %lld bytes %lld", a, &x, &y) != 3;
        if (s->lasts) CHECK_EQ_INT(sscanf(line, "slot %*d %63s lasts bytes %lld", a, &y), 2);
        s->pool = brute_word(a, brute_pools, 7);
        s->begin = s->lasts ? -1 : x, s->bytes = y;
        lasting += s->lasts ? y : 0;
        if (!s->lasts && x + y > most) most = x + y;
        b->can_last |= s->lasts;
    }
    b->arena = b->bytes - lasting;
    if (b->arena > most) most = b->arena;
    for (int i = 0; i < b->num_slots; i++)
        if (b->slot[i].lasts) b->slot[i].begin = most, most += (b->slot[i].bytes + 63) / 64 * 64;
    b->num_cells = most / BRUTE_GRAIN + 2 + 2 * b->num_units;
    CHECK(b->num_cells < 1 << 24);
    b->cells = (brute_cell *)lab_zeros((size_t)b->num_cells, sizeof *b->cells);
}
/* Returns 0 if something is wrong, with the reason in `why`; otherwise a hash of all histories. */
H_FN uint64_t brute_judge(const char *text, char *why, size_t room) {
    texts_lines *t = texts_split(text);
    brute *b = (brute *)lab_zeros(1, sizeof *b);
    brute_head(b, t);
    for (b->walk = 0; b->walk < 4 && !b->bad && !(b->walk && b->can_last); b->walk++) {
        int pending = 0, unit = -1;
        for (int i = 0; i < t->num; i++) brute_line(b, t->at[i], &pending, &unit);
        brute_wait(b, 0, &b->grads); /* finalize; then the caller reads gradients, writes shards */
        b->now[0][0]++;
        for (int u = 0; u < b->num_units; u++) {
            int64_t cell = b->num_cells - 2 * b->num_units + 2 * u;
            brute_touch(b, 0, cell, cell + 1, 1, "the end");
            brute_touch(b, 0, cell + 1, cell + 2, 1, "the end");
        }
        brute_mark(b, 0, &b->shards);
        for (int i = 0; i < b->num_slots; i++) {
            brute_slot *s = &b->slot[i];
            if (s->holder < 0 || s->lasts) continue;
            if (s->pool != BRUTE_GATHER) brute_wrong(b, "held at the end", "slot");
            brute_release(b, s->holder, i, 0, "the end");
        }
        memset(b->uses, 0, sizeof b->uses);
        memset(b->opened, 0, sizeof b->opened);
    }
    for (int u = 0; u < b->num_units; u++)
        b->total = lab_hash(b->total, b->block[u], (uint64_t)u, 9);
    uint64_t total = b->bad ? 0 : b->total | 1;
    snprintf(why, room, "%s", b->why);
    free(b->cells);
    free(b);
    texts_free(t);
    return total;
}
#endif
