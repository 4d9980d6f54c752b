/* test_plan_proof.c - the proof that a plan may run, on texts: what it accepts, and what it finds
   when a text is damaged. SPDX-License-Identifier: MIT */
#include "plan_texts.h"

static fsdp_plan_proof prove(const char *text) {
    fsdp_plan_proof p;
    CALL(NULL, fsdp_plan_prove_texts(&text, 1, &p));
    return p;
}

/* ---- mutations ------------------------------------------------------------------------------- */

#define MUTATIONS(X)                                                                               \
    X(RELEASE, "a release left out")                                                               \
    X(WROTE, "wrote left out")                                                                     \
    X(USE, "a use left out")                                                                       \
    X(ACQUIRE, "an acquire left out")                                                              \
    X(GATHER, "an all_gather left out")                                                            \
    X(REDUCE, "a reduce_scatter left out")                                                         \
    X(REPLICAS, "an all_reduce left out")                                                          \
    X(COPY, "a copy left out")                                                                     \
    X(DOUBLED, "an op doubled")                                                                    \
    X(STREAM, "a release on another stream")                                                       \
    X(EXCHANGED, "neighbours exchanged")                                                           \
    X(SLOT, "another slot")                                                                        \
    X(PLACE, "a slot over another one")                                                            \
    X(NUMBER, "another number of bytes or elements")                                               \
    X(LATE, "a gather behind its use")                                                             \
    X(EARLY, "a free before the last use")
enum {
#define FSDP_X(name, text) M_##name,
    MUTATIONS(FSDP_X)
#undef FSDP_X
        M_COUNT
};
static const char *const mutations[] = {
#define FSDP_X(name, text) text,
    MUTATIONS(FSDP_X)
#undef FSDP_X
};

typedef struct {
    int tried[M_COUNT], found[M_COUNT], defects;
    const char *text;
    uint64_t means; /* what the checker says of the text */
} lab_bench;

/* A text that was damaged: refuted or refused; else the checker says that it does the same. */
static void examine(lab_bench *m, int kind, const texts_lines *t, int mends, const char *what) {
    char *text = texts_join(t, mends), why[200];
    const char *texts[1] = {text};
    fsdp_plan_proof p;
    memset(&p, 0, sizeof p);
    fsdp_status status = fsdp_plan_prove_texts(texts, 1, &p);
    CHECK(status == FSDP_OK || status == FSDP_ERR_INVALID_ARG);
    m->tried[kind]++;
    if (status || p.refuted) {
        m->found[kind]++;
        if (p.refuted) CHECK(strchr(p.text, '\n') && p.text[0] && strlen(p.text) < 511);
    } else if (brute_judge(text, why, sizeof why) != m->means) {
        m->defects++;
        if (m->defects < 12)
            h_message("NOT FOUND: %s: %s: %s: %s", w_case, mutations[kind], what,
                      *why ? why : "something else is computed");
        if (getenv("PLAN_SHOW") && m->defects == atoi(getenv("PLAN_SHOW"))) puts(text);
    }
    free(text);
}

static void leave_out(lab_bench *m, int kind, const char *word, int mends) {
    texts_lines *t = texts_split(m->text);
    int num = t->num;
    for (int i = 0; i < num; i++) {
        const char *line = t->at[i];
        const char *words = texts_is(line, "  op ") ? texts_words(line) + 1 : line;
        if (!texts_is(words, word)) continue;
        texts_move(t, i, -1);
        examine(m, kind, t, mends, line);
        texts_insert(t, i, line);
    }
    texts_free(t);
}

static void doubled(lab_bench *m) {
    texts_lines *t = texts_split(m->text);
    int num = t->num;
    for (int i = 0; i < num; i++) {
        const char *line = t->at[i];
        if (!texts_is_op(line)) continue;
        texts_insert(t, i, line);
        examine(m, M_DOUBLED, t, strstr(line, " copy ") == NULL && strstr(line, " zero ") == NULL, line);
        texts_move(t, i, -1);
    }
    texts_free(t);
}

static void other_stream(lab_bench *m) {
    texts_lines *t = texts_split(m->text);
    for (int i = 0; i < t->num; i++) {
        const char *line = t->at[i], *last = strrchr(line, ' ');
        if (!texts_is(line, "  release ")) continue;
        for (int s = 0; s < 4; s++) {
            char other[TEXTS_LINE];
            if (strcmp(last + 1, brute_streams[s]) == 0) continue;
            snprintf(other, sizeof other, "%.*s %s", (int)(last - line), line, brute_streams[s]);
            t->at[i] = other;
            examine(m, M_STREAM, t, 1, other);
        }
        t->at[i] = line;
    }
    texts_free(t);
}

/* A line of ops and what comes next, in the same call or in the call behind. */
static void exchanged(lab_bench *m) {
    texts_lines *t = texts_split(m->text);
    for (int i = 0; i + 1 < t->num; i++) {
        const char *line = t->at[i];
        int next = i + 1;
        if (!texts_is_op(line)) continue;
        while (next < t->num && texts_is(t->at[next], "  ") && !texts_is_op(t->at[next])) next++;
        if (next + 1 >= t->num) continue;
        if (texts_is(t->at[next], "call ")) /* behind its decisions */
            while (next + 1 < t->num && texts_is(t->at[next + 1], "  ") && !texts_is_op(t->at[next + 1]))
                next++;
        if (texts_is(t->at[t->num - 1], "call ") && next == t->num - 1) continue; /* not into finalize */
        texts_move(t, i, next);
        examine(m, M_EXCHANGED, t, 1, line);
        texts_move(t, next, i);
    }
    texts_free(t);
}

static void other_slot(lab_bench *m) {
    texts_lines *t = texts_split(m->text);
    int slots = 0;
    for (int i = 0; i < t->num; i++) slots += texts_is(t->at[i], "slot ");
    for (int i = 0; i < t->num; i++) {
        const char *line = t->at[i];
        for (const char *at = line; texts_is_op(line) && (at = strstr(at, " slot ")) != NULL; at++)
            for (int by = 1; by < 3 && by < slots; by++) {
                char other[TEXTS_LINE + 32], *end;
                long slot = strtol(at + 6, &end, 10);
                snprintf(other, sizeof other, "%.*s%ld%s", (int)(at + 6 - line), line,
                         (slot + by) % slots, end);
                t->at[i] = other;
                examine(m, M_SLOT, t, 1, other);
                t->at[i] = line;
            }
    }
    texts_free(t);
}

static void other_places(lab_bench *m) {
    texts_lines *t = texts_split(m->text);
    for (int i = 0; i < t->num; i++) {
        const char *line = t->at[i], *at = strstr(line, " at ");
        long long offset, bytes, o, n;
        if (!texts_is(line, "slot ") || !at) continue;
        CHECK_EQ_INT(sscanf(at, " at %lld bytes %lld", &offset, &bytes), 2);
        for (int k = 0; k < t->num; k++) {
            const char *there = strstr(t->at[k], " at ");
            if (k == i || !texts_is(t->at[k], "slot ") || !there) continue;
            CHECK_EQ_INT(sscanf(there, " at %lld bytes %lld", &o, &n), 2);
            const long long moved[3] = {o, o + 64, o > 64 ? o - 64 : 8};
            for (int w = 0; w < 3; w++) {
                char other[TEXTS_LINE];
                if (moved[w] == offset) continue;
                snprintf(other, sizeof other, "%.*s at %lld bytes %lld", (int)(at - line), line,
                         moved[w], bytes);
                t->at[i] = other;
                examine(m, M_PLACE, t, 1, other);
                t->at[i] = line;
            }
        }
    }
    texts_free(t);
}

/* Numbers of slots, of ops, and of bytes of the head, each a little larger and smaller. */
static void other_numbers(lab_bench *m) {
    texts_lines *t = texts_split(m->text);
    for (int i = 0; i < t->num; i++) {
        const char *line = t->at[i], *at = NULL;
        int count = 0, op = texts_is(line, "  op ");
        if (texts_is(line, "slot ")) at = strstr(line, " bytes ") + 7, count = 1;
        if (texts_is(line, "bytes ")) at = line + 6, count = 1;
        if (op) {
            at = strrchr(line, '\'');
            at = strchr(strchr(at, ' ') + 1, ' ') + 1; /* behind the stream */
            count = strstr(line, " use ") ? 0 : 2;
        }
        for (int n = 0; n < count; n++, at = strchr(at, ' ') + 1)
            for (int by = -1; by < 3; by++) {
                char other[TEXTS_LINE + 32], *end;
                long long number = strtoll(at, &end, 10), now = by == 2 ? 2 * number : number + by;
                if (by == 0 || now < 0 || now == number) continue;
                snprintf(other, sizeof other, "%.*s%lld%s", (int)(at - line), line, now, end);
                t->at[i] = other;
                examine(m, M_NUMBER, t, 0, other);
                t->at[i] = line;
            }
    }
    texts_free(t);
}

static int call_of(const texts_lines *t, int line) {
    while (line >= 0 && !texts_is(t->at[line], "call ")) line--;
    return line;
}

/* Every all_gather behind the next call of its unit that reads; every release of parameters before
   the last call that needs them. */
static void moved(lab_bench *m) {
    texts_lines *t = texts_split(m->text);
    for (int i = 0; i < t->num; i++) {
        const char *line = t->at[i];
        char name[40], word[64];
        int gathers = texts_is(line, "  op ") && texts_is(texts_words(line), " all_gather ");
        int frees = texts_is(line, "  release ") && texts_is(line + strlen("  release "), "'");
        if (!gathers && !frees) continue;
        CHECK_EQ_INT(sscanf(strchr(line, '\''), "%39s", name), 1);
        if (gathers) {
            int pre = -1;
            for (int k = call_of(t, i); k >= 0 && k < t->num && pre < 0; k++)
                if (texts_is(t->at[k], "call ") && strstr(t->at[k], " pre_") && strstr(t->at[k], name))
                    pre = k;
            if (pre < 0) continue;
            int to = pre + 1;
            while (to < t->num && !texts_is(t->at[to], "call ")) to++;
            while (to + 1 < t->num && texts_is(t->at[to + 1], "  ") && !texts_is_op(t->at[to + 1]))
                to++;
            if (to + 1 >= t->num) continue;
            texts_move(t, i, to); /* into the call behind */
            examine(m, M_LATE, t, 1, line);
            texts_move(t, to, i);
        } else {
            snprintf(word, sizeof word, "pre_");
            int pre = call_of(t, i);
            while (pre >= 0 && !(texts_is(t->at[pre], "call ") && strstr(t->at[pre], word) &&
                                 strstr(t->at[pre], name)))
                pre--;
            if (pre < 0 || texts_is(t->at[pre], "call 0 ")) continue;
            texts_move(t, i, pre);
            examine(m, M_EARLY, t, 1, line);
            texts_move(t, pre, i);
        }
    }
    texts_free(t);
}

static void mutate(lab_bench *m, const char *text) {
    char why[200];
    fsdp_plan_proof p = prove(text);
    CHECK_MSG(!p.refuted, "%s: %s", w_case, p.text);
    CHECK(texts_is(p.text, "proven: ") && p.ops > 0 && p.accesses > 0 && p.bytes > 0);
    m->text = text;
    m->means = brute_judge(text, why, sizeof why);
    W_CHECK(m->means != 0, "%s", why);
    texts_lines *t = texts_split(text);
    char *again = texts_join(t, 1);
    W_CHECK(strncmp(again, text, strlen(again) - 21) == 0, "lines are not what the text has");
    CHECK(!prove(again).refuted);
    free(again);
    texts_free(t);
    leave_out(m, M_RELEASE, "  release ", 1);
    leave_out(m, M_WROTE, "  wrote ", 1);
    leave_out(m, M_ACQUIRE, "  acquire ", 1);
    leave_out(m, M_USE, "use ", 1);
    leave_out(m, M_GATHER, "all_gather ", 1);
    leave_out(m, M_REDUCE, "reduce_scatter ", 1);
    leave_out(m, M_REPLICAS, "all_reduce ", 0);
    leave_out(m, M_COPY, "copy ", 0); /* the counts say that there was one */
    leave_out(m, M_COPY, "zero ", 0);
    doubled(m);
    other_stream(m);
    exchanged(m);
    other_slot(m);
    other_places(m);
    other_numbers(m);
    moved(m);
}

static const struct {
    const char *name;
    int mode;
} modes[] = {{"inline", 0}, {"1_lane", 1}, {"2_lanes", 2}, {"streams", TEXTS_STREAMS}};

static void mutate_nets(const char *name, int mode, int from, int to, int sizes) {
    lab_bench m;
    int tried = 0, found = 0;
    memset(&m, 0, sizeof m);
    for (int net = from; net < to; net++)
        for (int small = 0; small < sizes; small++) { /* nothing kept, nothing joined */
            plan_net n = texts_net(net);
            fsdp_plan_desc d = FSDP_ZERO;
            if (small) d.bucket_bytes = -1, d.without = 1u << FSDP_PASS_KEEP;
            snprintf(w_case, sizeof w_case, "%s, %s, %s", name, texts_name(net),
                     small ? "small" : "all passes");
            char *text = texts_make(&n, &d, texts_size(net), mode, FSDP_PLAN_TEXT_OPS);
            mutate(&m, text);
            free(text);
        }
    for (int k = 0; k < M_COUNT; k++) {
        h_message("%s: %d of %d found", mutations[k], m.found[k], m.tried[k]);
        tried += m.tried[k], found += m.found[k];
    }
    h_message("%s: %d of %d found, %d of the others do the same, %d are defects", name, found, tried,
              tried - found - m.defects, m.defects);
    CHECK_EQ_INT(m.defects, 0);
    CHECK(found > tried / 2);
}
TEST_P(plan_proof, mutations, modes) { mutate_nets(row->name, row->mode, TEXTS_CHAIN, TEXTS_CHAIN + 1, 1); }
TEST_P(long_plan_proof, mutations, modes) {
    mutate_nets(row->name, row->mode, 0, W_SLOW ? TEXTS_MIXED : TEXTS_NETS, W_SLOW ? 1 : 2);
}
