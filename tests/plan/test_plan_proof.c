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
    X(COLLECTIVE, "a collective on another stream")                                                \
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
        examine(m, M_DOUBLED, t, strstr(line, " copy ") == NULL && strstr(line, " zero ") == NULL,
                line);
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

static void collective_on_another_stream(lab_bench *m) {
    texts_lines *t = texts_split(m->text);
    for (int i = 0; i < t->num; i++) {
        const char *line = t->at[i];
        if (!texts_is(line, "  op ") || !strstr(line, " comm ")) continue;
        const char *at = strchr(strrchr(line, '\''), ' ') + 1, *end = strchr(at, ' ');
        for (int s = 0; s < 4; s++) {
            char other[TEXTS_LINE + 32];
            size_t length = strlen(brute_streams[s]);
            if ((size_t)(end - at) == length && !strncmp(at, brute_streams[s], length)) continue;
            snprintf(other, sizeof other, "%.*s%s%s", (int)(at - line), line, brute_streams[s],
                     end);
            t->at[i] = other;
            examine(m, M_COLLECTIVE, t, 1, other);
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
            while (next + 1 < t->num && texts_is(t->at[next + 1], "  ") &&
                   !texts_is_op(t->at[next + 1]))
                next++;
        if (texts_is(t->at[t->num - 1], "call ") && next == t->num - 1)
            continue; /* not into finalize */
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
                if (texts_is(t->at[k], "call ") && strstr(t->at[k], " pre_") &&
                    strstr(t->at[k], name))
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
            do pre++; /* and in the call in which they are read */
            while (pre + 1 < i && !texts_is(t->at[pre + 1], "call "));
            if (pre + 1 >= i) continue;
            texts_move(t, i, pre + 1);
            examine(m, M_EARLY, t, 1, line);
            texts_move(t, pre + 1, i);
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
    collective_on_another_stream(m);
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
    h_message("%s: %d of %d found, %d of the others do the same, %d are defects", name, found,
              tried, tried - found - m.defects, m.defects);
    CHECK_EQ_INT(m.defects, 0);
    CHECK(found > tried / 2);
}
TEST_P(plan_proof, mutations, modes, row == modes ? 0 : AT_NIGHT(ASAN)) {
    mutate_nets(row->name, row->mode, TEXTS_CHAIN, TEXTS_CHAIN + 1, 2);
}
TEST_P(long_plan_proof, mutations, modes, NIGHT) {
    mutate_nets(row->name, row->mode, 0, W_SLOW ? TEXTS_MIXED : TEXTS_NETS, W_SLOW ? 1 : 2);
}

/* ---- counterexamples, letter by letter ------------------------------------------------------- */

#define HEAD(units, mode, calls, bytes, gathers, ops, read)                                        \
    "fsdp plan 1\nmodel 0000000000000001 units " units " params 2 shards 2 replicas 1 mode " mode  \
    "\nkind 0000000000000002 calls " calls " forward 4\nbytes " bytes                              \
    " bound 64 by_calls 64\ncount gathers " gathers " reductions 0 0 replicas 0 0 ops " ops        \
    "\nread gathers " read " reductions 0 0\n"
#define UNITS                                                                                      \
    "unit 0 'a' gather 64 grad 64 reads forward\nunit 1 'b' gather 64 grad 64 reads forward\n"
#define GATHER(number, unit, count, bytes, slot)                                                   \
    "  op " number " all_gather gather '" unit "' GATHER " count " " bytes                         \
    " f32 f32 shards slot " slot " comm group0 #00000000\n"
#define USE(number, unit, slot)                                                                    \
    "  op " number " use gather '" unit "' COMPUTE 0 0 ? ? slot " slot " none #00000000\n"
#define END "end 0000000000000000\n"

static const struct {
    const char *name;
    int refuted;
    const char *text, *expected;
} counters[] = {
    {"proven", FSDP_PROOF_OK,
     HEAD("2", "streams", "5", "64", "2 2", "4 4", "64 64") UNITS
     "slot 0 gather at 0 bytes 64\n"
     "call 0 pre_forward 'a'\n"
     "  acquire 'a' slot 0\n" GATHER("1", "a", "8", "32", "0")
         USE("2", "a", "0") "call 1 post_forward 'a'\n"
                            "  release 'a' slot 0 COMPUTE\n"
                            "call 2 pre_forward 'b'\n"
                            "  acquire 'b' slot 0\n" GATHER("5", "b", "8", "32", "0")
                                USE("6", "b", "0") "call 3 post_forward 'b'\n"
                                                   "  release 'b' slot 0 COMPUTE\n"
                                                   "call 4 finalize_backward\n" END,
     "proven: 12 ops and 42 accesses in 3 walks, 64 bytes of 64"},
    {"race", FSDP_PROOF_RACE, /* nobody waits until the caller has read */
     HEAD("2", "streams", "5", "64", "2 2", "4 4", "64 64") UNITS
     "slot 0 gather at 0 bytes 64\n"
     "call 0 pre_forward 'a'\n"
     "  acquire 'a' slot 0\n" GATHER("1", "a", "8", "32", "0")
         USE("2", "a", "0") "call 1 post_forward 'a'\n"
                            "  release 'a' slot 0 GATHER\n"
                            "call 2 pre_forward 'b'\n"
                            "  acquire 'b' slot 0\n" GATHER("5", "b", "8", "32", "0")
                                USE("6", "b", "0") "call 3 post_forward 'b'\n"
                                                   "  release 'b' slot 0 COMPUTE\n"
                                                   "call 4 finalize_backward\n" END,
     "call 2 pre_forward 'b': op 5 all_gather 'b' on GATHER writes slot 0 [0, 64)\n"
     "call 1 post_forward 'a': the caller on COMPUTE has read it last, and no event lies between"},
    {"memory", FSDP_PROOF_MEMORY, /* both at a time in one place */
     HEAD("2", "streams", "5", "128", "2 2", "4 4", "64 64") UNITS
     "slot 0 gather at 0 bytes 64\n"
     "slot 1 gather at 32 bytes 64\n"
     "call 0 pre_forward 'a'\n"
     "  acquire 'a' slot 0\n" GATHER("1", "a", "8", "32", "0")
         USE("2", "a", "0") "call 1 pre_forward 'b'\n"
                            "  acquire 'b' slot 1\n" GATHER("4", "b", "8", "32", "1")
                                USE("5", "b", "1") "call 2 post_forward 'b'\n"
                                                   "  release 'b' slot 1 COMPUTE\n"
                                                   "call 3 post_forward 'a'\n"
                                                   "  release 'a' slot 0 COMPUTE\n"
                                                   "call 4 finalize_backward\n" END,
     "call 1 pre_forward 'b': op 3 acquire 'b'\n"
     "its memory is held by 'a' slot 0 [0, 64)"},
    {"use", FSDP_PROOF_USE, /* nobody has waited for the second gather */
     HEAD("2", "streams", "5", "64", "2 2", "3 3", "64 64") UNITS
     "slot 0 gather at 0 bytes 64\n"
     "call 0 pre_forward 'a'\n"
     "  acquire 'a' slot 0\n" GATHER("1", "a", "8", "32", "0")
         USE("2", "a", "0") "call 1 post_forward 'a'\n"
                            "  release 'a' slot 0 COMPUTE\n"
                            "call 2 pre_forward 'b'\n"
                            "  acquire 'b' slot 0\n" GATHER("5", "b", "8", "32",
                                                            "0") "call 3 post_forward 'b'\n"
                                                                 "  release 'b' slot 0 COMPUTE\n"
                                                                 "call 4 finalize_backward\n" END,
     "call 2 pre_forward 'b'\n"
     "nobody has waited for the gather of 'b' slot 0 [0, 64)"},
    {"deadlock", FSDP_PROOF_DEADLOCK, /* the second gather is in the order of another stream */
     HEAD("2", "streams", "5", "64", "2 2", "4 4", "64 64") UNITS
     "slot 0 gather at 0 bytes 64\n"
     "call 0 pre_forward 'a'\n"
     "  acquire 'a' slot 0\n" GATHER("1", "a", "8", "32", "0") USE(
         "2", "a", "0") "call 1 post_forward 'a'\n"
                        "  release 'a' slot 0 COMPUTE\n"
                        "call 2 pre_forward 'b'\n"
                        "  acquire 'b' slot 0\n"
                        "  op 5 all_gather gather 'b' REDUCE 8 32 f32 f32 shards slot 0 comm "
                        "group0 #00000000\n" USE("6", "b", "0") "call 3 post_forward 'b'\n"
                                                                "  release 'b' slot 0 COMPUTE\n"
                                                                "call 4 finalize_backward\n" END,
     "call 2 pre_forward 'b': op 5 all_gather 'b' on REDUCE runs on group0\n"
     "call 0 pre_forward 'a': op 1 all_gather 'a' on GATHER is of the same sort, and nothing "
     "orders the two on all ranks"},
    {"next_step", FSDP_PROOF_RACE, /* of a kind with a slot that lasts: found in the second walk */
     HEAD("2", "streams", "5", "128", "1 1", "3 3", "32 32") UNITS
     "slot 0 gather at 0 bytes 64\nslot 1 grad lasts bytes 64\n"
     "call 0 pre_forward 'a'\n"
     "  acquire 'a' slot 0\n" GATHER("1", "a", "8", "32", "0")
         USE("2", "a", "0") "call 1 post_forward 'a'\n"
                            "  op 3 copy slice 'a' REDUCE 8 32 f32 f32 slot 0 other #00000000\n"
                            "  release 'a' slot 0 GATHER\n"
                            "call 2 pre_backward 'a'\n"
                            "  acquire 'a' slot 1\n"
                            "call 3 post_backward 'a'\n"
                            "  wrote 'a' slot 1\n"
                            "call 4 finalize_backward\n" END,
     "call 0 pre_forward 'a': op 1 all_gather 'a' on GATHER writes slot 0 [0, 64)\n"
     "call 1 post_forward 'a': op 3 copy 'a' on REDUCE has read it last, and no event lies "
     "between"},
    {"extension_reads", FSDP_PROOF_RACE, /* on the last of the streams */
     HEAD("2", "streams", "5", "128", "1 1", "3 3", "32 32") UNITS
     "slot 0 gather at 0 bytes 64\nslot 1 grad lasts bytes 64\n"
     "call 0 pre_forward 'a'\n"
     "  acquire 'a' slot 0\n" GATHER("1", "a", "8", "32", "0")
         USE("2", "a", "0") "call 1 post_forward 'a'\n"
                            "  op 3 copy slice 'a' EXTENSION 8 32 f32 f32 slot 0 other #00000000\n"
                            "  release 'a' slot 0 GATHER\n"
                            "call 2 pre_backward 'a'\n"
                            "  acquire 'a' slot 1\n"
                            "call 3 post_backward 'a'\n"
                            "  wrote 'a' slot 1\n"
                            "call 4 finalize_backward\n" END,
     "call 0 pre_forward 'a': op 1 all_gather 'a' on GATHER writes slot 0 [0, 64)\n"
     "call 1 post_forward 'a': op 3 copy 'a' on EXTENSION has read it last, and no event lies "
     "between"},
    {"small_gradients", FSDP_PROOF_MEMORY, /* the head says how many bytes they need */
     HEAD("2", "streams", "3", "32", "0 0", "0 0", "0 0") UNITS "slot 0 grad lasts bytes 32\n"
                                                                "call 0 pre_backward 'a'\n"
                                                                "  acquire 'a' slot 0\n"
                                                                "call 1 post_backward 'a'\n"
                                                                "  wrote 'a' slot 0\n"
                                                                "call 2 finalize_backward\n" END,
     "call 0 pre_backward 'a': op 0 acquire 'a'\n"
     "the slot is too small for 'a' slot 0"},
    {"beyond_the_arena", FSDP_PROOF_MEMORY, /* of 64 bytes; the others last */
     HEAD("2", "streams", "5", "128", "1 1", "2 2", "32 32") UNITS
     "slot 0 gather at 1 bytes 64\nslot 1 grad lasts bytes 64\n"
     "call 0 pre_forward 'a'\n"
     "  acquire 'a' slot 0\n" GATHER("1", "a", "8", "32", "0")
         USE("2", "a", "0") "call 1 post_forward 'a'\n"
                            "  release 'a' slot 0 COMPUTE\n"
                            "call 2 pre_backward 'a'\n"
                            "  acquire 'a' slot 1\n"
                            "call 3 post_backward 'a'\n"
                            "  wrote 'a' slot 1\n"
                            "call 4 finalize_backward\n" END,
     "call 0 pre_forward 'a': op 0 acquire 'a'\n"
     "the arena ends before slot 0 [1, 65)"},
    {"open_to_the_end", FSDP_PROOF_OK, /* finalize closes it for the next step */
     HEAD("2", "streams", "3", "64", "1 1", "2 2", "32 32") UNITS
     "slot 0 gather at 0 bytes 64\n"
     "call 0 post_forward 'a'\n"
     "call 1 pre_forward 'a'\n"
     "  acquire 'a' slot 0\n" GATHER("1", "a", "8", "32", "0")
         USE("2", "a", "0") "call 2 finalize_backward\n" END,
     "proven: 6 ops and 24 accesses in 3 walks, 64 bytes of 64"},
    {"old_shards", FSDP_PROOF_USE, /* a hook has updated them since they were gathered */
     HEAD("2", "streams", "5", "64", "1 1", "3 3", "32 32") UNITS
     "slot 0 gather at 0 bytes 64\n"
     "call 0 pre_forward 'a'\n"
     "  acquire 'a' slot 0\n" GATHER("1", "a", "8", "32", "0")
         USE("2", "a", "0") "call 1 post_forward 'a'\n"
                            "  op 3 call post_accumulate_hook 'a' COMPUTE 8 0 f32 f32 grads shards "
                            "#00000000\n"
                            "call 2 pre_forward 'a'\n"
                            "call 3 post_forward 'a'\n"
                            "  release 'a' slot 0 COMPUTE\n"
                            "call 4 finalize_backward\n" END,
     "call 2 pre_forward 'a'\n"
     "shards were written after the gather of 'a' slot 0 [0, 64)"},
    {"more_than_calls", FSDP_PROOF_USE, /* the second gather is none of the calls' */
     HEAD("2", "streams", "5", "64", "1 2", "4 4", "32 64") UNITS
     "slot 0 gather at 0 bytes 64\n"
     "call 0 pre_forward 'a'\n"
     "  acquire 'a' slot 0\n" GATHER("1", "a", "8", "32", "0")
         USE("2", "a", "0") "call 1 post_forward 'a'\n"
                            "  release 'a' slot 0 COMPUTE\n"
                            "call 2 pre_forward 'b'\n"
                            "  acquire 'b' slot 0\n" GATHER("5", "b", "8", "32", "0")
                                USE("6", "b", "0") "call 3 post_forward 'b'\n"
                                                   "  release 'b' slot 0 COMPUTE\n"
                                                   "call 4 finalize_backward\n" END,
     "by calls: 1 gathers of 32 bytes, 0 reductions, 0 over replicas\n"
     "the plan has more: 2 of 64, 0, 0"},
};
TEST_P(plan_proof, counterexample, counters) {
    fsdp_plan_proof p = prove(row->text);
    CHECK_EQ_STR(p.text, row->expected);
    CHECK_EQ_INT(p.refuted, row->refuted);
    char why[200];
    /* The checker walks slots that last once, and reads neither what calls do nor what hooks do. */
    if (!strstr(row->text, " lasts ") && !strstr(row->text, "_hook") &&
        !strstr(row->expected, "by calls"))
        CHECK_EQ_INT(brute_judge(row->text, why, sizeof why) != 0, row->refuted == FSDP_PROOF_OK);
}

/* ---- several ranks --------------------------------------------------------------------------- */

/* A text whose collectives are those of `letters`: a, b, ..: the shards gather unit 0, 1, ..;
   A, B, ..: the replicas sum its gradients. */
static char *program_text(const char *letters, int shards, int replicas) {
    int num = (int)strlen(letters), gathers = 0, line = 0;
    char *text = (char *)lab_zeros((size_t)num * 600 + 8192, 1), *to = text;
    for (int i = 0; i < num; i++) gathers += letters[i] >= 'a';
    const int part = 8 * 4, reduced = (2 * (replicas - 1) * part + replicas - 1) / replicas;
    to += sprintf(to,
                  "fsdp plan 1\nmodel 0000000000000001 units 4 params 4 shards %d replicas %d mode "
                  "inline\nkind 0000000000000002 calls %d forward %d\nbytes %d bound 0 by_calls 0\n"
                  "count gathers %d %d reductions 0 0 replicas %d %d ops %d %d\n"
                  "read gathers %d %d reductions %d %d\n",
                  shards, replicas, 2 * num + 1, 2 * num, part * shards, gathers, gathers,
                  num - gathers, num - gathers, num + gathers, num + gathers,
                  gathers * part * (shards - 1), gathers * part * (shards - 1),
                  (num - gathers) * reduced, (num - gathers) * reduced);
    for (int u = 0; u < 4; u++)
        to += sprintf(to, "unit %d 'u%d' gather %d grad 64 reads none\n", u, u, part * shards);
    to += sprintf(to, "slot 0 gather at 0 bytes %d\n", part * shards);
    for (int i = 0; i < num; i++) {
        int u = letters[i] >= 'a' ? letters[i] - 'a' : letters[i] - 'A';
        to += sprintf(to, "call %d pre_forward 'u%d'\n", 2 * i, u);
        if (letters[i] >= 'a') {
            to += sprintf(
                to,
                "  acquire 'u%d' slot 0\n  op %d all_gather gather 'u%d' GATHER 8 %d f32 f32 "
                "shards slot 0 comm group0 #00000000\n",
                u, line + 1, u, part * (shards - 1));
            to += sprintf(to,
                          "  op %d use gather 'u%d' COMPUTE 0 0 ? ? slot 0 none #00000000\n"
                          "  release 'u%d' slot 0 COMPUTE\n",
                          line + 2, u, u);
            line += 4;
        } else {
            to += sprintf(to,
                          "  op %d all_reduce replicas 'u%d' ALLREDUCE 8 %d f32 f32 grads grads "
                          "in_place comm group1 #00000000\n",
                          line++, u, reduced);
        }
        to += sprintf(to, "call %d post_forward 'u%d'\n", 2 * i + 1, u);
    }
    sprintf(to, "call %d finalize_backward\nend 0000000000000000\n", 2 * num);
    return text;
}

/* A text tells up to 16 groups of ranks apart. */
TEST(plan_proof, many_groups) {
    char letters[18] = "abcdabcdabcdabcda";
    for (int num = 17; num > 15; num--) {
        fsdp_plan_proof p;
        letters[num] = 0;
        char *text = program_text(letters, 2, 1), *at = text, name[16];
        for (int i = 0; (at = strstr(at, "group0")) != NULL; i++) {
            snprintf(name, sizeof name, "pair%02d", i);
            memcpy(at, name, 6);
        }
        const char *const both[2] = {text, text};
        if (num == 16) CALL(NULL, fsdp_plan_prove_texts(both, 2, &p));
        else CHECK_STATUS(fsdp_plan_prove_texts(both, 2, &p), FSDP_ERR_INVALID_ARG);
        if (num == 16) CHECK_EQ_INT(p.refuted, FSDP_PROOF_OK);
        if (num == 16) CHECK_EQ_INT(p.comms, 16);
        free(text);
    }
}

TEST(plan_proof, deadlock_is_told) {
    char *texts[2] = {program_text("ab", 2, 1), program_text("ba", 2, 1)};
    fsdp_plan_proof p;
    CALL(NULL, fsdp_plan_prove_texts((const char *const *)texts, 2, &p));
    CHECK_EQ_INT(p.refuted, FSDP_PROOF_DEADLOCK);
    CHECK_EQ_STR(p.text,
                 "rank 0: call 0 pre_forward 'u0', op 1 all_gather 'u0' on group0, which differs "
                 "in unit from\nrank 1: call 0 pre_forward 'u1', op 1 all_gather 'u1' on group0");
    free(texts[1]);
    texts[1] = program_text("a", 2, 1);
    CALL(NULL, fsdp_plan_prove_texts((const char *const *)texts, 2, &p));
    CHECK_EQ_INT(p.refuted, FSDP_PROOF_DEADLOCK);
    CHECK_EQ_STR(p.text,
                 "rank 0: call 2 pre_forward 'u1', op 5 all_gather 'u1' on group0 waits for rank "
                 "1\nrank 1: has ended its step");
    free(texts[0]), free(texts[1]);
    /* Two groups, each of which waits for the other. */
    char *square[4] = {program_text("aA", 2, 2), program_text("Aa", 2, 2), program_text("Aa", 2, 2),
                       program_text("aA", 2, 2)};
    CALL(NULL, fsdp_plan_prove_texts((const char *const *)square, 4, &p));
    CHECK_EQ_INT(p.refuted, FSDP_PROOF_DEADLOCK);
    CHECK_EQ_STR(p.text,
                 "rank 0: call 0 pre_forward 'u0', op 1 all_gather 'u0' on group0 waits for rank "
                 "1\nrank 1: call 0 pre_forward 'u0', op 0 all_reduce 'u0' on group1 waits for "
                 "rank 3");
    /* Texts of different worlds cannot be run against each other; nor can some ranks alone. */
    REFUSED(NULL, fsdp_plan_prove_texts((const char *const *)square, 3, &p), "expected 4 texts");
    free(square[1]);
    square[1] = program_text("aA", 4, 1);
    REFUSED(NULL, fsdp_plan_prove_texts((const char *const *)square, 4, &p), "text 1 is of");
    for (int i = 0; i < 4; i++) free(square[i]);
}

/* Rank 1's text is the other's with one thing changed. */
static const struct {
    const char *name, *from, *to, *and_from, *and_to, *expected;
} differences[] = {
    {"elements", "GATHER 8 32 f32 f32", "GATHER 4 16 f32 f32", "read gathers 32 32",
     "read gathers 16 16", "number of elements"},
    {"dtypes", "GATHER 8 32 f32 f32", "GATHER 8 32 i32 i32", "", "", "dtypes"},
    {"result", "GATHER 8 32 f32 f32", "GATHER 8 32 f32 i32", "", "", "dtypes"},
    {"label", "all_gather gather", "all_gather copy_in", "", "", "kind"},
    {"adds", "comm group0", "add comm group0", "", "", "whether it adds"},
    {"segments", "group0 #00000000", "group0 #00000001", "", "", "segments"},
    {"unit", "units 4", "units 4", "'u0'", "'v0'", "unit"},
    {"units", "gather 'u0' GATHER 8 32 f32 f32 shards slot 0",
     "gather 'u0' 'u1' GATHER 8 32 f32 f32 shards slot 0 shards other", "", "", "number of units"},
};
static char *replaced(const char *text, const char *from, const char *to) { /* all of them */
    char *out = (char *)lab_zeros(2 * strlen(text) + 64, 1), *end = out;
    for (const char *at; *from && (at = strstr(text, from)) != NULL; text = at + strlen(from))
        end += sprintf(end, "%.*s%s", (int)(at - text), text, to);
    strcpy(end, text);
    return out;
}
TEST_P(plan_proof, differs_in, differences) {
    char *one = program_text("a", 2, 1), *step = replaced(one, row->from, row->to),
         *two = replaced(step, row->and_from, row->and_to), word[64];
    const char *texts[2] = {one, two};
    fsdp_plan_proof p;
    CALL(NULL, fsdp_plan_prove_texts(texts, 2, &p));
    CHECK_EQ_INT(p.refuted, FSDP_PROOF_DEADLOCK);
    snprintf(word, sizeof word, "which differs in %s from\nrank 1: call 0", row->expected);
    CHECK_MSG(strstr(p.text, word), "%s", p.text);
    free(one), free(step), free(two);
}

/* Runs what can run until nothing can. */
static int gets_stuck(const char *const *letters, int num, int shards) {
    int at[64] = {0}, left = 0;
    for (int moved = 1; moved;) {
        moved = 0;
        for (int i = 0; i < num; i++) {
            char letter = letters[i][at[i]];
            int runs = letter != 0;
            for (int k = 0; k < num && runs; k++)
                if (letter >= 'a' ? i / shards == k / shards : i % shards == k % shards)
                    runs = letters[k][at[k]] == letter;
            for (int k = 0; k < num && runs; k++)
                if (letter >= 'a' ? i / shards == k / shards : i % shards == k % shards) at[k]++;
            moved |= runs;
        }
    }
    for (int i = 0; i < num; i++) left |= letters[i][at[i]] != 0;
    return left;
}

/* One of the ranks has its collectives in another order, one less, or one twice. */
TEST(plan_proof, one_rank_differs) {
    static const char *const same = "abAcBC";
    static const struct {
        const char *what, *letters;
    } others[] = {{"exchanged", "baAcBC"}, {"exchanged", "abcABC"}, {"left out", "bAcBC"},
                  {"left out", "abAcB"},   {"doubled", "aabAcBC"},  {"doubled", "abAcBCC"},
                  {"left out", "abcBC"},   {"exchanged", "abAcCB"}};
    static const int sizes[][2] = {{2, 1}, {1, 2}, {2, 2}, {4, 1}, {4, 2}, {2, 4}, {8, 8}, {64, 1}};
    const char *texts[64];
    int stuck = 0;
    for (int s = 0; s < 8; s++)
        for (int o = 0; o < 8; o++) {
            int shards = sizes[s][0], replicas = sizes[s][1], size = shards * replicas;
            char *all = program_text(same, shards, replicas),
                 *other = program_text(others[o].letters, shards, replicas);
            for (int k = 0; k<size; k += size> 8 ? 7 : 1) {
                char name[24], sees[24];
                fsdp_plan_proof p;
                for (int i = 0; i < size; i++) texts[i] = i == k ? other : all;
                CALL(NULL, fsdp_plan_prove_texts(texts, size, &p));
                CHECK_EQ_INT(p.ranks, size);
                CHECK_EQ_INT(p.programs, 2);
                snprintf(name, sizeof name, "rank %d: ", k);
                snprintf(sees, sizeof sees, "rank %d\n", k);
                snprintf(w_case, sizeof w_case, "%d x %d, rank %d: %s %s: %d %.200s", replicas,
                         shards, k, others[o].what, others[o].letters, p.refuted, p.text);
                const char *letters[64];
                for (int i = 0; i < size; i++) letters[i] = i == k ? others[o].letters : same;
                int differs = gets_stuck(letters, size, shards);
                W_CHECK(p.refuted == (differs ? FSDP_PROOF_DEADLOCK : FSDP_PROOF_OK), "refuted %d",
                        p.refuted);
                stuck += differs;
                if (differs)
                    W_CHECK(strstr(p.text, name) || strstr(p.text, sees), "rank %d is not named",
                            k);
            }
            free(all), free(other);
        }
    CHECK(stuck > 100);
}

TEST(plan_proof, a_thousand_ranks) {
    static const char *texts[1000];
    char *all = program_text("abAcBC", 250, 4);
    fsdp_plan_proof one, p;
    for (int i = 0; i < 1000; i++) texts[i] = all;
    CALL(NULL, fsdp_plan_prove_texts(texts, 1, &one));
    CALL(NULL, fsdp_plan_prove_texts(texts, 1000, &p));
    CHECK_EQ_INT(p.refuted, FSDP_PROOF_OK);
    CHECK_EQ_INT(p.ranks, 1000);
    CHECK_EQ_INT(p.programs, 1);
    CHECK_EQ_INT(p.ops, one.ops); /* looked at once */
    free(all);
}

/* What ranks can do, by search: each waits at its next collective until its group is there. */
typedef struct {
    const char *letters[4];
    int num, shards, seen[5 * 5 * 5 * 5], stuck, ends;
} search;
static int same_group(const search *s, int shard, int a, int b) {
    return shard ? a / s->shards == b / s->shards : a % s->shards == b % s->shards;
}
static void explore(search *s, const int *at) {
    int key = 0, moves = 0, ended = 1;
    for (int i = 0; i < s->num; i++) key = 5 * key + at[i];
    if (s->seen[key]++) return;
    for (int i = 0; i < s->num; i++) {
        char letter = s->letters[i][at[i]];
        int runs = letter != 0, next[4];
        ended &= letter == 0;
        for (int k = 0; k < s->num; k++) {
            int is_in = letter && same_group(s, letter >= 'a', i, k);
            next[k] = at[k] + is_in;
            runs &= !is_in || s->letters[k][at[k]] == letter;
        }
        if (!runs) continue;
        moves++;
        explore(s, next);
    }
    s->stuck |= !moves && !ended;
    s->ends |= ended;
}
static void compare(const char *const *letters, const char *const *texts, int num, int shards) {
    static const int start[4];
    search s;
    fsdp_plan_proof p;
    memset(&s, 0, sizeof s);
    for (int i = 0; i < num; i++) s.letters[i] = letters[i];
    s.num = num, s.shards = shards;
    explore(&s, start);
    CHECK(s.stuck != s.ends); /* what happens does not depend on who is fast */
    CALL(NULL, fsdp_plan_prove_texts(texts, num, &p));
    if (p.refuted != (s.stuck ? FSDP_PROOF_DEADLOCK : FSDP_PROOF_OK))
        CHECK_MSG(0, "%d ranks, %d shards, %s|%s|%s: %d, expected %d: %s", num, shards, letters[0],
                  letters[1], num > 2 ? letters[2] : "", p.refuted, s.stuck, p.text);
}
/* All programs of up to `longest` letters. */
static int programs_of(const char *alphabet, int longest, char (*out)[5]) {
    int num = 1, begin = 0, base = (int)strlen(alphabet);
    out[0][0] = 0;
    for (int length = 1; length <= longest; length++) {
        int end = num;
        for (int i = begin; i < end; i++)
            for (int a = 0; a < base; a++) {
                snprintf(out[num], 5, "%s", out[i]);
                out[num][length - 1] = alphabet[a];
                out[num++][length] = 0;
            }
        begin = end;
    }
    return num;
}
static void all_programs(int longest, int samples) {
    static char letters[400][5];
    static char *texts[400];
    static const int shapes[][2] = {{2, 1}, {1, 2}, {3, 1}, {1, 3}, {2, 2}};
    for (int shape = 0; shape < 5; shape++) {
        int shards = shapes[shape][0], replicas = shapes[shape][1], size = shards * replicas;
        /* two that differ, one of the others */
        int num = programs_of(shape % 2 ? "aAB" : "abA", longest, letters);
        uint64_t state = h_seed() + (uint64_t)shape;
        for (int i = 0; i < num; i++) texts[i] = program_text(letters[i], shards, replicas);
        for (int i = 0; i < (size == 2 ? num * num : samples); i++) {
            const char *l[4], *t[4];
            int which[4] = {i / num % num, i % num, 0, 0};
            for (int k = 0; k < size; k++) {
                if (size > 2)
                    which[k] = k && lab_pick(&state, 3) ? which[0] : lab_pick(&state, num);
                l[k] = letters[which[k]], t[k] = texts[which[k]];
            }
            compare(l, t, size, shards);
        }
        for (int i = 0; i < num; i++) free(texts[i]);
    }
}
TEST(plan_proof, all_programs) { all_programs(W_SLOW ? 1 : 2, 300); }
TEST(long_plan_proof, all_programs, NIGHT) { all_programs(W_SLOW ? 2 : 4, W_SLOW ? 300 : 5000); }

/* A head that says of a unit that its gradients have no elements, and a line that moves some. */
TEST(plan_proof, head_of_gradients) {
    fsdp_plan_desc d = FSDP_ZERO;
    plan_net n = plan_chain(2, 8, 4);
    char *text = texts_make(&n, &d, 2, TEXTS_STREAMS, FSDP_PLAN_TEXT_OPS), line[TEXTS_LINE];
    texts_lines *t = texts_split(text);
    const int at = texts_find(t, 0, "unit 1 ");
    const char *grad = strstr(t->at[at], " grad ");
    snprintf(line, sizeof line, "%.*s grad 0 reads both", (int)(grad - t->at[at]), t->at[at]);
    t->at[at] = line;
    char *edited = texts_join(t, 1);
    const fsdp_plan_proof p = prove(edited);
    CHECK_EQ_INT(p.refuted, FSDP_PROOF_USE);
    CHECK_MSG(strstr(p.text, " copy 'h.1'\nits gradients have no elements, says the head: 'h.1'"),
              "%s", p.text);
    texts_free(t);
    free(text), free(edited);
}

/* The caller writes gradients as soon as pre_backward has returned: not before the slot is free. That
   the unit's post_backward is missing does not hide it. */
TEST(plan_proof, gradients_are_written_at_once) {
    fsdp_plan_desc d = FSDP_ZERO;
    plan_net n = plan_chain(3, 8, 4);
    d.bucket_bytes = -1;
    d.without = 1u << FSDP_PASS_KEEP;
    char *text = texts_make(&n, &d, 2, TEXTS_STREAMS, FSDP_PLAN_TEXT_OPS), line[TEXTS_LINE];
    texts_lines *t = texts_split(text);
    const int zero = texts_find(t, 0, " zero grads 'h.0'"),
              post = texts_find(t, 0, " post_backward 'h.0'");
    CHECK(zero > 0 && zero < post);
    snprintf(line, sizeof line, "%.*s'h.2'", (int)strlen(t->at[post]) - 5, t->at[post]);
    t->at[post] = line;
    texts_move(t, zero, post + 1); /* behind its decision */
    char *edited = texts_join(t, 1);
    const fsdp_plan_proof p = prove(edited);
    CHECK_MSG(p.refuted == FSDP_PROOF_RACE, "%s", p.text);
    CHECK_MSG(strstr(p.text, "pre_backward 'h.0': the caller on COMPUTE writes slot"), "%s",
              p.text);
    texts_free(t);
    free(text), free(edited);
}

/* ---- what is proven runs without a race ------------------------------------------------------ */

TEST(plan_proof, proven_plans_do_not_race) {
    int64_t waits = 0;
    for (int net = 0; net < TEXTS_NETS; net++)
        for (int setting = 0; setting < 4; setting++) {
            sim s;
            plan_bed b;
            plan_result out;
            plan_net n = texts_net(net);
            fsdp_plan_desc d = FSDP_ZERO;
            fsdp_plan_proof p;
            memset(&out, 0, sizeof out);
            if (setting == 1) d.bucket_bytes = -1, d.without = 1u << FSDP_PASS_KEEP;
            if (setting == 2) d.bucket_bytes = -1, d.ahead = 2;
            if (setting == 3) d.with = 1u << FSDP_PASS_ONCE, d.most_bytes = 12000;
            snprintf(w_case, sizeof w_case, "%s, setting %d", texts_name(net), setting);
            sim_init(&s, texts_size(net), 0);
            s.checks = 1;
            fsdp_world *w = sim_open(&s);
            CHECK(w != NULL);
            plan_open(&b, &n, w);
            CALL(w, fsdp_plan_create(b.model, &d, &b.plan));
            for (int i = 0; i < 6; i++) texts_sim_step(&s, &b, &out);
            W_CHECK(out.mode[5] == FSDP_PLAN_REPLAYING, "%s", out.why[5]);
            CALL(w, fsdp_plan_prove(b.plan, 0, &p));
            W_CHECK(!p.refuted, "%s", p.text);
            char *text = texts_of(b.plan, 0, FSDP_PLAN_TEXT_OPS), why[200];
            W_CHECK(brute_judge(text, why, sizeof why), "%s", why);
            free(text);
            W_CHECK(s.races == 0, "%d races: %s", s.races, s.race);
            waits += s.waits;
            fsdp_model_destroy(b.model);
            CHECK_EQ_INT(sim_close(&s), 0);
        }
    CHECK(waits > 0);
}
