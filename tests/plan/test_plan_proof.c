/* test_plan_proof.c - the proof that a plan may run, on texts: what it accepts, and what it finds
   when a text is damaged. SPDX-License-Identifier: MIT */
#include "plan_texts.h"

static fsdp_plan_proof prove(const char *text) {
    fsdp_plan_proof p;
    CHECK(lib_plan_prove(text, &p));
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
    uint64_t means; /* the checker's hash of the text */
} lab_bench;

/* Checks that a damaged text is refused or refuted, or that it computes the same by the checker. */
static void examine(lab_bench *m, int kind, const texts_lines *t, int mends, const char *what) {
    char *text = texts_join(t, mends), why[200];
    fsdp_plan_proof p;
    memset(&p, 0, sizeof p);
    const int reads = lib_plan_prove(text, &p);
    m->tried[kind]++;
    if (!reads || p.refuted) {
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

/* Exchanges each line of an op with the next one, in the same call or in the next call. */
static void exchanged(lab_bench *m) {
    texts_lines *t = texts_split(m->text);
    for (int i = 0; i + 1 < t->num; i++) {
        const char *line = t->at[i];
        int next = i + 1;
        if (!texts_is_op(line)) continue;
        while (next < t->num && texts_is(t->at[next], "  ") && !texts_is_op(t->at[next])) next++;
        if (next + 1 >= t->num) continue;
        if (texts_is(t->at[next], "call ")) /* after its decisions */
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
            at = strchr(strchr(at, ' ') + 1, ' ') + 1; /* after the stream */
            count = strstr(line, " use ") ? 0 : 2;
        }
        for (int n = 0; n < count; n++, at = n < count ? strchr(at, ' ') + 1 : at)
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

/* Moves each all_gather after the next call of its unit that reads, and each release of parameters
   before the last call that needs them. */
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
            texts_move(t, i, to); /* into the next call */
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
    " bound 64 eager 64\ncount gathers " gathers " reductions 0 0 replicas 0 0 ops " ops           \
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
    {"race", FSDP_PROOF_RACE, /* no op waits until the caller has read */
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
    {"memory", FSDP_PROOF_MEMORY, /* both at once, in overlapping memory */
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
    {"next_step", FSDP_PROOF_RACE, /* a slot lasts: found in the second walk */
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
    {"beyond_the_arena", FSDP_PROOF_MEMORY, /* the arena has 64 bytes; the others last */
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
     "eager: 1 gathers of 32 bytes, 0 reductions, 0 over replicas\n"
     "the plan has more: 2 of 64, 0, 0"},
};
TEST_P(plan_proof, counterexample, counters) {
    fsdp_plan_proof p = prove(row->text);
    CHECK_EQ_STR(p.text, row->expected);
    CHECK_EQ_INT(p.refuted, row->refuted);
    char why[200];
    /* The checker walks slots that last once, and reads neither what calls do nor what hooks do. */
    if (!strstr(row->text, " lasts ") && !strstr(row->text, "_hook") &&
        !strstr(row->expected, "eager: "))
        CHECK_EQ_INT(brute_judge(row->text, why, sizeof why) != 0, row->refuted == FSDP_PROOF_OK);
}

/* The head says that a unit's gradients have no elements, but a line moves some. */
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

/* The caller writes gradients once pre_backward has returned, so the slot must be free by then. The
   proof finds this even if the unit's post_backward is missing. */
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
    texts_move(t, zero, post + 1); /* after its decision */
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
            fsdp_plan_proof p, of_text;
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
            CHECK(lib_plan_prove(text, &of_text)); /* the text says all that the proof reads */
            CHECK_EQ_MEM(&p, &of_text, sizeof p);
            free(text);
            W_CHECK(s.races == 0, "%d races: %s", s.races, s.race);
            waits += s.waits;
            fsdp_model_destroy(b.model);
            CHECK_EQ_INT(sim_close(&s), 0);
        }
    CHECK(waits > 0);
}
