/* test_plan_text.c - plans as texts: printed, read again, edited, damaged, loaded.

   Golden texts: tests/golden/plan_*.txt. After a change of the format, or of what passes decide,
   PLAN_GOLDEN=write build/tests/test_plan_text --filter=golden writes them anew, in the directory
   in which they are; look at what has changed before you commit it.

   SPDX-License-Identifier: MIT */
#include "plan_texts.h"

/* One rank of a simulated world, with a model and a plan. */
typedef struct {
    sim s;
    fsdp_world *w;
    plan_bed b;
    plan_net net;
    plan_result out;
} bed;
static bed *bed_begin(const plan_net *net, int size, int async) {
    bed *d = (bed *)lab_zeros(1, sizeof *d);
    sim_init(&d->s, size, 0);
    d->s.async = async;
    d->s.checks = async;
    d->net = *net;
    return d;
}
static void bed_plan(bed *d, const fsdp_plan_desc *desc) {
    d->w = sim_open(&d->s);
    CHECK(d->w != NULL);
    plan_open(&d->b, &d->net, d->w);
    CALL(d->w, fsdp_plan_create(d->b.model, desc, &d->b.plan));
}
static bed *bed_open(const plan_net *net, const fsdp_plan_desc *desc, int size, int async) {
    bed *d = bed_begin(net, size, async);
    bed_plan(d, desc);
    return d;
}
static void bed_close(bed *d) {
    W_CHECK(d->s.races == 0, "%s", d->s.race);
    fsdp_model_destroy(d->b.model);
    CHECK_EQ_INT(sim_close(&d->s), 0);
    free(d);
}
static void bed_steps(bed *d, int steps) {
    for (int i = 0; i < steps; i++) texts_sim_step(&d->s, &d->b, &d->out);
}
/* The text of a plan that was recorded; and the bits of four steps. */
static char *recorded(const plan_net *net, const fsdp_plan_desc *desc, int size, int async,
                      int what, plan_result *out) {
    bed *d = bed_open(net, desc, size, async);
    bed_steps(d, 4);
    CHECK_EQ_INT(d->out.mode[3], FSDP_PLAN_REPLAYING);
    char *text = texts_of(d->b.plan, 0, what);
    *out = d->out;
    bed_close(d);
    return text;
}
static fsdp_status read_text(const char *text) {
    fsdp_plan_proof p;
    return fsdp_plan_prove_texts(&text, 1, &p);
}
static char *edited(const char *text, const char *from, const char *to) {
    const char *at = strstr(text, from);
    char *out = (char *)lab_zeros(strlen(text) + strlen(to) + 32, 1);
    CHECK_MSG(at != NULL, "no '%s' in %s", from, text);
    sprintf(out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    strcpy(strstr(out, "\nend ") + 1, "end 0000000000000000\n");
    return out;
}

/* ---- round trips ----------------------------------------------------------------------------- */

typedef struct {
    plan_net net;
    fsdp_plan_desc desc;
    char *ops, *decisions;
    plan_result first[8];
} round_job;
static void round_body(lab_rank *r) {
    round_job *j = (round_job *)r->arg;
    plan_bed b;
    plan_result *first = &j->first[r->rank], again;
    fsdp_plan_report rep[2];
    memset(first, 0, sizeof *first);
    plan_open(&b, &j->net, r->w);
    CALL(r->w, fsdp_plan_create(b.model, &j->desc, &b.plan));
    for (int i = 0; i < 4; i++) plan_step(&b, first);
    W_CHECK(first->mode[3] == FSDP_PLAN_REPLAYING, "%s", first->why[3]);
    CALL(r->w, fsdp_plan_report_get(b.plan, 0, &rep[0]));
    char *ops = texts_of(b.plan, 0, FSDP_PLAN_TEXT_OPS),
         *decisions = texts_of(b.plan, 0, FSDP_PLAN_TEXT_DECISIONS);
    fsdp_model_destroy(b.model);
    for (int what = 0; what < 2; what++) { /* what follows from decisions is what was made */
        const char *text = what ? ops : decisions;
        memset(&again, 0, sizeof again);
        plan_open(&b, &j->net, r->w);
        CALL(r->w, fsdp_plan_create(b.model, &j->desc, &b.plan));
        CALL(r->w, fsdp_plan_load(b.plan, text, strlen(text)));
        CHECK_EQ_INT(fsdp_plan_count(b.plan), 1);
        char *ops_now = texts_of(b.plan, 0, FSDP_PLAN_TEXT_OPS),
             *decisions_now = texts_of(b.plan, 0, FSDP_PLAN_TEXT_DECISIONS);
        CHECK_EQ_STR(ops_now, ops);
        CHECK_EQ_STR(decisions_now, decisions);
        for (int i = 0; i < 4; i++) plan_step(&b, &again);
        for (int i = 0; i < 4 && !j->desc.with; i++) /* `once` changes bits, from where it begins */
            W_CHECK(again.hash[i] == first->hash[i] && again.grads[i] == first->grads[i],
                    "step %d has other bits", i);
        W_CHECK(again.mode[1] == FSDP_PLAN_REPLAYING && again.mode[3] == FSDP_PLAN_REPLAYING, "%s",
                again.why[1]);
        CALL(r->w, fsdp_plan_report_get(b.plan, 0, &rep[1]));
        CHECK_EQ_INT(rep[1].recorded, 0);
        CHECK_EQ_INT((long long)rep[1].hash, (long long)rep[0].hash);
        CHECK_EQ_INT(rep[1].bytes[1], rep[0].bytes[1]);
        CHECK_EQ_INT(rep[1].gathers[0], rep[0].gathers[0]);
        CHECK_EQ_INT(rep[1].gathers[1], rep[0].gathers[1]);
        free(ops_now), free(decisions_now);
        fsdp_model_destroy(b.model);
    }
    free(ops), free(decisions);
}
static const struct {
    const char *name;
    int mode;
} modes[] = {{"inline", 0}, {"1_lane", 1}, {"2_lanes", 2}};
TEST_P(plan_text, round_trip, modes, SLOW) {
    for (int net = 0; net < TEXTS_NETS; net++)
        for (int setting = 0; setting < 3; setting++) {
            static round_job j;
            lab_how how;
            memset(&how, 0, sizeof how);
            memset(&j, 0, sizeof j);
            how.lanes = row->mode;
            j.net = texts_net(net);
            if (setting == 1) j.desc.bucket_bytes = -1, j.desc.without = 1u << FSDP_PASS_KEEP;
            if (setting == 2)
                j.desc.with = 1u << FSDP_PASS_ONCE, j.desc.ahead = 2, j.desc.bucket_bytes = 3000;
            if (W_SLOW && setting) continue;
            snprintf(w_case, sizeof w_case, "%s, setting %d", texts_name(net), setting);
            lab_run(texts_size(net), &how, round_body, &j);
        }
}
TEST(plan_text, round_trip_on_streams, SLOW) {
    for (int net = 0; net < TEXTS_NETS; net++)
        for (int what = 0; what < 2; what++) {
            plan_net n = texts_net(net);
            plan_result first;
            char *text = recorded(&n, NULL, texts_size(net), 1, what, &first);
            bed *d = bed_open(&n, NULL, texts_size(net), 1);
            snprintf(w_case, sizeof w_case, "%s", texts_name(net));
            CALL(d->w, fsdp_plan_load(d->b.plan, text, strlen(text)));
            char *now = texts_of(d->b.plan, 0, what);
            CHECK_EQ_STR(now, text);
            bed_steps(d, 4);
            for (int i = 0; i < 4; i++) CHECK(d->out.hash[i] == first.hash[i]);
            CHECK_EQ_INT(d->out.mode[3], FSDP_PLAN_REPLAYING);
            free(now), free(text);
            bed_close(d);
        }
}

/* Names that a text cannot have as they are, in chains of units. `head`: what stands in the line of
   the unit. A long name is cut, a name that is taken gets numbers until it is not. */
enum { LONG_NAME = 600, KEPT_NAME = 480 };
static char long_names[3][LONG_NAME + 1];
static const struct {
    const char *name, *head;
} named[] = {
    {"it's", "'it\\'s'"},
    {"back\\slash", "'back\\\\slash'"},
    {"two\nlines\\n", "'two\\nlines\\\\n'"},
    {"\x01 \x7f\xc3\xbc", "'\\x01 \\x7F\\xC3\\xBC'"},
    {"model", "'model'"},
    {"h.0#7", "'h.0#7'"},
    {"h.0", "'h.0'"},
    {"h.0", "'h.0#7#7'"},
    {"h.0", "'h.0#8'"},
    {"h.0#8", "'h.0#8#9'"},
    {long_names[0], "'"},
    {long_names[1], "#11'"},
    {long_names[2], "#12'"},
    {"' gather 1 grad", "'\\' gather 1 grad'"},
};
enum { NAMED = sizeof named / sizeof *named };
static plan_net named_net(void) {
    static const char *names[NAMED];
    plan_net n = plan_chain(NAMED, 4, 4);
    for (int i = 0; i < 3; i++) { /* the first two are equal; the third differs where it is cut */
        memset(long_names[i], 'n', LONG_NAME);
        if (i == 2) memcpy(long_names[i] + KEPT_NAME, "other", 5);
    }
    for (int u = 0; u < NAMED; u++) names[u] = named[u].name;
    n.names = names;
    return n;
}
TEST(plan_text, odd_names) {
    const plan_net n = named_net();
    fsdp_plan_desc desc = FSDP_ZERO;
    desc.bucket_bytes = -1;
    for (int async = 0; async < 2; async++)
        for (int what = 0; what < 2; what++) {
            plan_result first;
            char *text = recorded(&n, &desc, 2, async, what, &first), line[64];
            texts_lines *t = texts_split(text);
            for (int u = 0; u < NAMED; u++) {
                sprintf(line, "unit %d '", u);
                const char *at = t->at[texts_find(t, 0, line)] + strlen(line) - 1;
                const char *head = named[u].head;
                if (long_names[0] <= named[u].name && named[u].name <= long_names[2]) {
                    CHECK_EQ_INT(strspn(at + 1, "n"), KEPT_NAME);
                    at += KEPT_NAME + 1;
                }
                CHECK_MSG(!strncmp(at, head, strlen(head)) &&
                              !strncmp(at + strlen(head), " gather ", 8),
                          "unit %d: expected %s: %s", u, head, at);
            }
            texts_free(t);
            bed *d = bed_open(&n, &desc, 2, async);
            CALL(d->w, fsdp_plan_load(d->b.plan, text, strlen(text)));
            char *now = texts_of(d->b.plan, 0, what);
            CHECK_EQ_STR(now, text);
            if (what) CHECK_OK(read_text(text));
            bed_steps(d, 4);
            for (int i = 0; i < 4; i++) CHECK(d->out.hash[i] == first.hash[i]);
            CHECK_EQ_INT(d->out.mode[3], FSDP_PLAN_REPLAYING);
            free(now), free(text);
            bed_close(d);
        }
}

/* A bucket has 64 units, however small they are: a text with more of them in a line is refused. */
TEST(plan_text, more_units_than_are_joined) {
    const plan_net n = plan_chain(66, 4, 2);
    plan_result first;
    char *text = recorded(&n, NULL, 2, 0, FSDP_PLAN_TEXT_DECISIONS, &first);
    bed *d = bed_open(&n, NULL, 2, 0);
    fsdp_plan_report rep;
    CALL(d->w, fsdp_plan_load(d->b.plan, text, strlen(text)));
    CALL(d->w, fsdp_plan_report_get(d->b.plan, 0, &rep));
    CHECK_EQ_INT(rep.reductions[1], 2);
    bed_steps(d, 4);
    for (int i = 0; i < 4; i++) CHECK(d->out.hash[i] == first.hash[i]);
    CHECK_EQ_INT(d->out.mode[3], FSDP_PLAN_REPLAYING);
    free(text);
    bed_close(d);
}

/* ---- golden texts ---------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int gathers, reductions;
} golden[] = {{"nested_17", 17, 12}, {"nested_3", 3, 12}, {"buckets_of_8", 8, 8}};
TEST_P(plan_text, golden, golden) {
    char path[300], *text, *there;
    const char *slash = strrchr(__FILE__, '/');
    fsdp_plan_desc d = FSDP_ZERO;
    plan_net n = row == golden + 2 ? plan_chain(64, 16, 16) : plan_nested();
    snprintf(path, sizeof path, "%.*s/../golden/plan_%s.txt", slash ? (int)(slash - __FILE__) : 1,
             slash ? __FILE__ : ".", row->name);
    d.without = 1u << FSDP_PASS_ARENA;
    d.most_bytes = row == golden ? 4416 : row == golden + 1 ? 4416 + 2 * 2176 : 0;
    if (row == golden + 2) d.bucket_bytes = 8 * 2176;
    text = texts_make(&n, &d, 2, 0, FSDP_PLAN_TEXT_OPS);
    texts_lines *t = texts_split(text);
    int gathers = 0, reductions = 0;
    for (int i = 0; i < t->num; i++) {
        gathers += strstr(t->at[i], " all_gather ") != NULL;
        reductions += strstr(t->at[i], " reduce_scatter ") != NULL;
    }
    texts_free(t);
    if (getenv("PLAN_GOLDEN")) {
        FILE *f = fopen(path, "w");
        CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
    }
    h_message("%s: %d gathers, %d reductions", row->name, gathers, reductions);
    FILE *f = fopen(path, "r");
    CHECK_MSG(f != NULL, "no file %s", path);
    there = (char *)lab_zeros(strlen(text) + 2, 1);
    (void)!fread(there, 1, strlen(text) + 1, f);
    fclose(f);
    CHECK_EQ_STR(text, there);
    CHECK_EQ_INT(gathers, row->gathers);
    CHECK_EQ_INT(reductions, row->reductions);
    free(text), free(there);
}

/* A plan of ranks that are not there: made, proven, printed, and replayed by one of them. */
TEST(plan_text, many_ranks) {
    const plan_net n = plan_chain(34, 8, 4);
    for (int async = 0; async < 2; async++) {
        bed *d = bed_begin(&n, 131072, async);
        fsdp_plan_report rep;
        d->s.null = 1; /* nothing is moved */
        d->s.checks = 0;
        bed_plan(d, NULL);
        const int64_t begun = h_now_ms();
        for (int i = 0; i < 3; i++) {
            plan_calls(&d->b, 0, n.num_calls);
            CALL(d->w, fsdp_finalize_backward(d->b.model));
        }
        char *text = texts_of(d->b.plan, 0, FSDP_PLAN_TEXT_OPS);
        CHECK(strstr(text, " units 34 params 68 shards 131072 replicas 1 ") != NULL);
        CHECK_OK(read_text(text));
        CALL(d->w, fsdp_plan_report_get(d->b.plan, 0, &rep));
        CHECK_EQ_INT(rep.replayed, 1);
        h_message("%s: %d ms", async ? "streams" : "inline", (int)(h_now_ms() - begun));
        free(text);
        bed_close(d);
    }
}

/* ---- damage ---------------------------------------------------------------------------------- */

static char *small_text(int what) {
    plan_net n = plan_chain(2, 8, 4);
    fsdp_plan_desc d = FSDP_ZERO;
    return texts_make(&n, &d, 2, 0, what);
}
/* INVALID_ARG, and where: the line, and within it. */
static void told(fsdp_status status, int line, const char *what) {
    const char *error = fsdp_last_error(NULL), *at = strstr(error, "plan: ");
    int told_line = 0, column = 0;
    W_CHECK(status == FSDP_ERR_INVALID_ARG, "%s is %s", what, fsdp_status_name(status));
    W_CHECK(at && sscanf(at, "plan: line %d, column %d: expected ", &told_line, &column) == 2 &&
                column >= 1 && strstr(at, ", got ") && strstr(at, "end 0000000000000000"),
            "%s: no line and column in '%s'", what, error);
    if (line)
        W_CHECK(told_line == line, "%s: line %d, expected %d: %s", what, told_line, line, error);
}

TEST(plan_text, every_line_damaged) {
    char *text = small_text(FSDP_PLAN_TEXT_OPS);
    texts_lines *t = texts_split(text);
    CHECK_OK(read_text(text));
    for (int i = 0; i < t->num; i++) {
        const char *line = t->at[i];
        char other[TEXTS_LINE + 8], *now;
        for (int how = 0; how < 6; how++) {
            snprintf(other, sizeof other, "%s", line);
            if (how == 0) snprintf(other, sizeof other, "%s ", line); /* a blank too much */
            if (how == 1) other[0] = other[0] == 'x' ? 'y' : 'x';
            if (how == 2) other[strlen(other) - 1] = '@';
            if (how == 3) snprintf(other, sizeof other, " %s", line);
            if (how == 4) snprintf(other, sizeof other, "%s\r", line);
            if (how == 5) snprintf(other, sizeof other, "%s\n", line); /* an empty line */
            t->at[i] = other;
            now = texts_join(t, 0);
            snprintf(w_case, sizeof w_case, "line %d, way %d: %.100s", i + 1, how, line);
            told(read_text(now), how == 5 ? 0 : i + 1, "a damaged line");
            free(now);
        }
        t->at[i] = line;
        if (texts_is_op(line)) continue; /* test_plan_proof.c */
        texts_move(t, i, -1);
        now = texts_join(t, 0);
        fsdp_status status = read_text(now);
        if (!texts_is(line, "  ")) told(status, 0, "a line left out");
        else CHECK_OK(status); /* a decision: what follows from it is load's to say */
        free(now);
        texts_insert(t, i, line);
    }
    texts_free(t);
    free(text);
}
TEST(plan_text, every_byte_flipped) {
    char *text = small_text(FSDP_PLAN_TEXT_OPS);
    size_t length = strlen(text);
    for (size_t i = 0; i < length; i++)
        for (int bit = 0; bit < 8; bit++) {
            char was = text[i];
            text[i] = (char)(was ^ 1 << bit);
            if (text[i]) {
                fsdp_status status = read_text(text);
                CHECK_MSG(status == FSDP_ERR_CORRUPT, "byte %d, bit %d: %s", (int)i, bit,
                          fsdp_status_name(status));
            }
            text[i] = was;
        }
    CHECK_OK(read_text(text));
    free(text);
}
TEST(plan_text, cut_off_at_every_byte) {
    char *text = small_text(FSDP_PLAN_TEXT_OPS);
    size_t length = strlen(text);
    for (size_t i = 0; i < length - 22; i++) {
        char *cut = (char *)lab_zeros(length + 64, 1);
        memcpy(cut, text, i);
        CHECK_STATUS(read_text(cut), FSDP_ERR_CORRUPT);
        strcpy(cut + i,
               i && text[i - 1] == '\n' ? "end 0000000000000000\n" : "\nend 0000000000000000\n");
        snprintf(w_case, sizeof w_case, "cut at %d", (int)i);
        told(read_text(cut), 0, "a text cut off");
        free(cut);
    }
    free(text);
}
TEST(plan_text, odd_texts) {
    static char many[40000], *at = many;
    char *text = small_text(FSDP_PLAN_TEXT_OPS), *now;
    static const char *const huge[][2] = {
        {" units 2 ", " units 99999999999999999999 "},
        {" units 2 ", " units 1048577 "},
        {" units 2 ", " units 1000000 "},
        {" params 4 ", " params 2147483648 "},
        {" shards 2 ", " shards 0 "},
        {" replicas 1 ", " replicas 0 "},
        {" calls 9 ", " calls 2147483647 "},
        {" calls 9 ", " calls 10 "},
        {" shards 2 ", " shards 02 "},
        {" shards 2 ", " shards -2 "},
        {" shards 2 ", " shards +2 "},
        {" bytes ", " bytes 9223372036854775808"},
        {" at 0 ", " at 9223372036854775807 "},
        {"slot 0 ", "slot 4294967296 "},
        {" mode inline", " mode lines"},
        {"fsdp plan 1", "fsdp plan 2"},
    };
    CHECK_STATUS(read_text(""), FSDP_ERR_CORRUPT);
    CHECK_STATUS(read_text("\n"), FSDP_ERR_CORRUPT);
    CHECK_STATUS(read_text("end 0000000000000000"), FSDP_ERR_CORRUPT);
    told(read_text("end 0000000000000000\n"), 1, "nothing but an end");
    for (size_t i = 0; i < sizeof huge / sizeof *huge; i++) {
        now = edited(text, huge[i][0], huge[i][1]);
        snprintf(w_case, sizeof w_case, "%s", huge[i][1]);
        told(read_text(now), 0, "a number");
        free(now);
    }
    for (int i = 0; i < 3; i++) { /* of 511 letters, 512, 30,000 */
        static char name[30100];
        memset(name, 0, sizeof name);
        name[0] = '\'';
        memset(name + 1, 'n', i == 0 ? 511 : i == 1 ? 512 : 30000);
        strcat(name, "'");
        now = edited(text, "'h.0'", name);
        told(read_text(now), 0, "a long name");
        free(now);
    }
    at += sprintf(at, "  gather");
    for (int i = 0; i < 65; i++) at += sprintf(at, " 'h.%d'", i % 2);
    sprintf(at, " why joined");
    texts_lines *t = texts_split(text);
    int line = texts_find(t, 0, "  gather ");
    CHECK(line > 0);
    t->at[line] = many;
    now = (char *)lab_zeros(80000, 1);
    for (int i = 0; i < t->num; i++) strcat(strcat(now, t->at[i]), "\n");
    strcat(now, "end 0000000000000000\n");
    told(read_text(now), line + 1, "65 units in one act");
    free(now);
    texts_free(t);
    free(text);
    text = small_text(FSDP_PLAN_TEXT_DECISIONS);
    REFUSED(NULL, read_text(text), "has no ops");
    free(text);
}

/* ---- loading --------------------------------------------------------------------------------- */

typedef struct {
    fsdp_memory memory;
    char *text;
    int count, mode;
} standing;
static standing stands(bed *d) {
    standing s;
    memset(&s, 0, sizeof s);
    CALL(d->w, fsdp_model_memory(d->b.model, &s.memory));
    s.count = fsdp_plan_count(d->b.plan);
    s.mode = (int)fsdp_plan_state(d->b.plan);
    s.text = texts_of(d->b.plan, 0, FSDP_PLAN_TEXT_OPS);
    return s;
}
/* A load that is refused changes nothing. */
static void load_refused(bed *d, const char *text, fsdp_status expected, const char *word) {
    standing before = stands(d), after;
    fsdp_status status = fsdp_plan_load(d->b.plan, text, strlen(text));
    w_refused(H_HERE("load"), d->w, status, expected, word);
    after = stands(d);
    W_CHECK(before.count == after.count && before.mode == after.mode, "a plan more");
    CHECK_EQ_MEM(&before.memory.pool_bytes, &after.memory.pool_bytes,
                 sizeof before.memory.pool_bytes);
    CHECK_EQ_STR(before.text, after.text);
    free(before.text), free(after.text);
    CHECK_OK(lib_failed(d->w));
}

TEST(plan_text, other_models_and_worlds) {
    plan_net n = plan_chain(3, 8, 4), other;
    plan_result out;
    char *text = recorded(&n, NULL, 2, 0, FSDP_PLAN_TEXT_OPS, &out);
    for (int k = 0; k < 8; k++) {
        static const char *const words[] = {"units is 3, here it is 4",
                                            "params is 6, here it is 9",
                                            "shards is 2, here it is 3",
                                            "replicas is 1, here it is 2",
                                            "runs inline, this one runs streams",
                                            "names, shapes, dtypes",
                                            "names, shapes, dtypes",
                                            "names, shapes, dtypes"};
        other = n;
        if (k == 0) other = plan_chain(4, 8, 4);
        if (k == 1) other.num_params = 3, other.rows[2][0] = 5;
        if (k == 3) other.replicas = 2;
        if (k == 5) other.rows[0][0] = 16;
        if (k == 6) other.frozen = 1;
        if (k == 7) other.rows[0][0] = 4, other.rows[0][1] = 8, other.rows[1][0] = 4;
        bed *d = bed_open(&other, NULL, k == 2 ? 3 : k == 3 ? 4 : 2, k == 4);
        snprintf(w_case, sizeof w_case, "other model %d", k);
        load_refused(d, text, FSDP_ERR_MISMATCH, words[k]);
        bed_steps(d, 4); /* as if nothing had been */
        CHECK_EQ_INT(d->out.mode[3], FSDP_PLAN_REPLAYING);
        bed_close(d);
    }
    bed *d = bed_open(&n, NULL, 2, 0);
    REFUSED(d->w, fsdp_plan_load(d->b.plan, NULL, 3), "NULL");
    REFUSED(NULL, fsdp_plan_load(NULL, text, strlen(text)), "NULL");
    text[200] ^= 1;
    load_refused(d, text, FSDP_ERR_CORRUPT, "16 zeros");
    text[200] ^= 1;
    CALL(d->w, fsdp_pre_forward(d->b.unit[0]));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, d->w, fsdp_plan_load(d->b.plan, text, strlen(text)), "");
    CALL(d->w, fsdp_model_reset(d->b.model));
    for (int i = 0; i < 8; i++) CALL(d->w, fsdp_plan_load(d->b.plan, text, strlen(text)));
    load_refused(d, text, FSDP_ERR_INVALID_STATE, "at most 8");
    bed_close(d);
    free(text);
}

static const struct {
    const char *name, *from, *to, *and_from, *and_to; /* of decisions */
    int gathers;                                      /* 0: refused */
    const char *word;
} edits[] = {
    {"keep_becomes_free", "  keep 'h.0' why next use at call 10",
     "  free 'h.0' why memory is needed before its next use at call 10",
     "call 10 pre_backward 'h.0'\n",
     "call 10 pre_backward 'h.0'\n  gather 'h.0' why needed at call 10\n", 4, ""},
    {"free_without_a_gather", "  keep 'h.0' why next use at call 10",
     "  free 'h.0' why memory is needed before its next use at call 10", NULL, NULL, 0,
     "its parameters are not gathered: 'h.0'"},
    {"gather_earlier", "  gather 'h.1' why needed at call 2\n", "", "call 0 pre_forward 'h.0'\n",
     "call 0 pre_forward 'h.0'\n  gather 'h.0' why needed at call 0\n  gather behind 'h.1' why "
     "ahead of its "
     "use at call 2\n",
     3, ""},
    {"free_while_in_use", "call 4 pre_forward 'h.2'\n",
     "call 4 pre_forward 'h.2'\n  free 'h.2' why last use\n", NULL, NULL, 0,
     "not possible where the text has it"},
    {"free_before_use", "call 3 post_forward 'h.1'\n",
     "call 3 post_forward 'h.1'\n  free 'h.2' why last use\n", NULL, NULL, 3, ""},
    {"never_reduced", "call 7 post_backward 'h.2'\n",
     "call 7 post_backward 'h.2'\n  collect 'h.2' why reduced once\n", NULL, NULL, 0,
     "nothing reduces what waits"},
    {"reduced_elsewhere", "call 7 post_backward 'h.2'\n",
     "call 7 post_backward 'h.2'\n  reduce 'h.0' why joined\n", NULL, NULL, 0,
     "its gradients do not wait there"},
    {"never_freed", "  free 'h.1' why last use\n", "", NULL, NULL, 0,
     "'h.1' is not freed after its last use in call 9"},
    {"in_another_order", "call 0 pre_forward 'h.0'\n",
     "call 0 pre_forward 'h.0'\n  free 'h.1' why last use\n", NULL, NULL, 0,
     "it comes before what is done after the call"},
    {"too_late", "call 12 finalize_backward\n",
     "call 12 finalize_backward\n  free 'h.1' why last use\n", NULL, NULL, 0,
     "nothing is decided in finalize_backward"},
    {"another_program", "call 1 post_forward 'h.0'", "call 1 post_backward 'h.0'", NULL, NULL, 0,
     "call 1, post_backward 'h.0', is not possible where the text has it: put the calls in the "
     "order of your program."},
    {"numbers_follow", "count gathers 6 3", "count gathers 6 4", NULL, NULL, 3, ""},
    {"keeps_nothing", "  keep 'h.0' why next use at call 10",
     "  keep 'h.2' why next use at call 10", NULL, NULL, 0, "by calls it is not freed there"},
};
TEST_P(plan_text, edited, edits) {
    plan_net n = plan_chain(3, 8, 4);
    fsdp_plan_desc desc = FSDP_ZERO;
    plan_result first;
    desc.bucket_bytes = -1;
    desc.ahead = -1; /* else gathers are ahead on streams: another text */
    for (int async = 0; async < 2; async++) {
        char *text = recorded(&n, &desc, 2, async, FSDP_PLAN_TEXT_DECISIONS, &first), *now, *two;
        snprintf(w_case, sizeof w_case, "%s, async %d", row->name, async);
        now = edited(text, row->from, row->to);
        two = row->and_from ? edited(now, row->and_from, row->and_to) : edited(now, "fsdp", "fsdp");
        if (!strcmp(row->name, "gather_earlier")) { /* there is one already */
            char *three = edited(two, "use at call 2\n  gather 'h.0' why needed at call 0\n",
                                 "use at call 2\n");
            free(two);
            two = three;
        }
        bed *d = bed_open(&n, &desc, 2, async);
        if (row->gathers) {
            fsdp_plan_report rep;
            CALL(d->w, fsdp_plan_load(d->b.plan, two, strlen(two)));
            CALL(d->w, fsdp_plan_report_get(d->b.plan, 0, &rep));
            CHECK_EQ_INT(rep.gathers[1], row->gathers);
        } else {
            load_refused(d, two, FSDP_ERR_INVALID_ARG, row->word);
            h_message("%.200s", fsdp_last_error(d->w));
        }
        bed_steps(d, 4);
        CHECK_EQ_INT(d->out.mode[3], FSDP_PLAN_REPLAYING);
        for (int i = 0; i < 4; i++)
            W_CHECK(d->out.hash[i] == first.hash[i], "other bits at step %d", i);
        bed_close(d);
        free(text), free(now), free(two);
    }
}

/* What gathers in another way than its neighbour is not joined with it. */
TEST(plan_text, joins_what_differs) {
    plan_net n = plan_chain(2, 8, 4);
    fsdp_plan_desc desc = FSDP_ZERO;
    plan_result first;
    n.sets = PLAN_CUSTOM; /* unit 0 */
    desc.bucket_bytes = desc.ahead = -1;
    char *text = recorded(&n, &desc, 2, 0, FSDP_PLAN_TEXT_DECISIONS, &first);
    char *two = edited(text, "  gather 'h.0' why needed at call 0\n",
                       "  gather 'h.0' 'h.1' why joined at call 0\n");
    char *now = edited(two, "  gather 'h.1' why needed at call 2\n", "");
    bed *d = bed_open(&n, &desc, 2, 0);
    load_refused(d, now, FSDP_ERR_INVALID_ARG,
                 "call 0, gather 'h.1': it cannot be joined with the one before it");
    bed_close(d);
    free(text), free(two), free(now);
}

/* Two decisions more: gradients of a unit wait, and are reduced. */
static void waits(const plan_net *n, const char *post, const char *collect, const char *at,
                  const char *reduce) {
    fsdp_plan_desc desc = FSDP_ZERO;
    plan_result first;
    desc.bucket_bytes = desc.ahead = -1;
    char *text = recorded(n, &desc, 2, 0, FSDP_PLAN_TEXT_DECISIONS, &first);
    char *two = edited(text, post, collect), *now = edited(two, at, reduce);
    bed *d = bed_open(n, &desc, 2, 0);
    load_refused(d, now, FSDP_ERR_INVALID_ARG, "its gradients do not wait there");
    bed_close(d);
    free(text), free(two), free(now);
}
/* Of a unit that is called again behind its post_backward, that has two of them, and before it. */
TEST(plan_text, waits_where_it_cannot) {
    plan_net n = plan_open_again(3);
    waits(&n, "call 9 post_backward 'h.2'\n",
          "call 9 post_backward 'h.2'\n  collect 'h.2' why joined at call 12\n",
          "call 12 post_backward 'h.1'\n",
          "call 12 post_backward 'h.1'\n  reduce 'h.2' why joined\n");
    n = plan_chain(2, 8, 4);
    n.num_calls = 0;
    static const int order[3] = {0, 1, 0};
    plan_visit(&n, order, 3);
    waits(&n, "call 11 post_backward 'h.0'\n",
          "call 11 post_backward 'h.0'\n  collect 'h.0' why joined at call 11\n",
          "why joined at call 11\n",
          "why joined at call 11\n  reduce 'h.0' why joined\n");
    n = plan_chain(3, 8, 4);
    waits(&n, "call 11 post_backward 'h.0'\n",
          "call 11 post_backward 'h.0'\n  collect 'h.0' why joined at call 9\n",
          "call 9 post_backward 'h.1'\n",
          "call 9 post_backward 'h.1'\n  reduce 'h.0' why joined\n");
}

/* So many kinds, recordings and replays; no step leaves; the first kind has slots that last. */
static void check_lasting(const bed *d, const char *mode, int kinds, int recorded, int replayed) {
    fsdp_plan_report rep;
    snprintf(w_case, sizeof w_case, "%s: %s", mode, fsdp_plan_why(d->b.plan));
    CHECK_EQ_INT(fsdp_plan_state(d->b.plan), FSDP_PLAN_REPLAYING);
    CHECK_EQ_INT(fsdp_plan_count(d->b.plan), kinds);
    for (int k = 0; k < kinds; k++) {
        CALL(d->w, fsdp_plan_report_get(d->b.plan, k, &rep));
        char *text = texts_of(d->b.plan, k, FSDP_PLAN_TEXT_OPS);
        W_CHECK((strstr(text, " lasts bytes ") != NULL) == (k == 0), "kind %d of %d", k, kinds);
        free(text);
    }
    CHECK_EQ_INT(rep.recorded, recorded);
    CHECK_EQ_INT(rep.replayed, replayed);
    CHECK_EQ_INT(rep.left, 0);
}

/* Slots that outlast a step, and the model that holds them. */
TEST(plan_text, slots_that_last) {
    plan_net n = plan_chain(3, 8, 4);
    for (int async = 0; async < 2; async++) {
        bed *d = bed_open(&n, NULL, 2, async);
        CALL(d->w, fsdp_set_reshard_after_backward(d->b.model, d->b.unit[1], 0));
        bed_steps(d, 7);
        check_lasting(d, async ? "streams" : "inline", 1, 1, 5);
        bed_close(d); /* nothing is left */
    }
}

/* Gradients that wait for the next microbatch, in a slot of a plan, when the model ends. */
TEST(plan_text, gradients_wait_at_the_end) {
    plan_net n = plan_chain(3, 8, 4);
    for (int async = 0; async < 2; async++) {
        bed *d = bed_open(&n, NULL, 2, async);
        for (int i = 0; i < 9; i++) {
            CALL(d->w, fsdp_set_requires_gradient_sync(d->b.model, NULL, i % 2));
            plan_calls(&d->b, 0, n.num_calls);
            CALL(d->w, fsdp_finalize_backward(d->b.model));
            d->b.step++;
        }
        check_lasting(d, async ? "streams" : "inline", 2, 4, 4);
        bed_close(d);
    }
}

/* A text with ops has those that follow from its decisions. */
TEST(plan_text, ops_that_do_not_follow) {
    plan_net n = plan_chain(2, 8, 4);
    plan_result first;
    char *text = recorded(&n, NULL, 2, 0, FSDP_PLAN_TEXT_OPS, &first);
    texts_lines *t = texts_split(text);
    bed *d = bed_open(&n, NULL, 2, 0);
    for (int i = 0; i < t->num; i++) {
        const char *line = t->at[i];
        char word[40];
        if (!texts_is_op(line)) continue;
        texts_move(t, i, -1);
        char *now = texts_join(t, 0);
        snprintf(word, sizeof word, "line %d, ", i + 1);
        snprintf(w_case, sizeof w_case, "without line %d", i + 1);
        load_refused(d, now, FSDP_ERR_INVALID_ARG, word);
        free(now);
        texts_insert(t, i, line);
    }
    bed_close(d);
    texts_free(t);
    free(text);
}

static void flips(int by) {
    plan_net n = plan_chain(2, 8, 4);
    plan_result first;
    char *text = recorded(&n, NULL, 2, 0, FSDP_PLAN_TEXT_OPS, &first);
    size_t length = strlen(text);
    int taken = 0, tried = 0;
    bed *d = bed_open(&n, NULL, 2, 0);
    strcpy(text + length - 21, "end 0000000000000000\n");
    for (size_t i = 0; i < length - 22; i += (size_t)by) {
        char was = text[i];
        text[i] = (char)(was >= '0' && was <= '8' ? was + 1 : was ^ 1);
        fsdp_status status = fsdp_plan_load(d->b.plan, text, length);
        tried++;
        CHECK_MSG(status == FSDP_OK || status == FSDP_ERR_INVALID_ARG ||
                      status == FSDP_ERR_MISMATCH,
                  "byte %d: %s", (int)i, fsdp_status_name(status));
        if (!status) { /* words for a reader, and what steps by calls hold */
            size_t line = i;
            while (line && text[line - 1] != '\n') line--;
            const char *why = strstr(text + line, " why "),
                       *calls = strstr(text + line, " by_calls "), *end = strchr(text + line, '\n');
            CHECK_MSG((why && why < end && text + i > why) ||
                          (calls && calls < end && text + i > calls),
                      "byte %d: %.*s", (int)i, (int)(end - text) - (int)line, text + line);
            bed_close(d);
            d = bed_open(&n, NULL, 2, 0);
            taken++;
        }
        text[i] = was;
    }
    h_message("%d of %d taken, in reasons and numbers of calls", taken, tried);
    CALL(d->w, fsdp_plan_load(d->b.plan, text, length));
    bed_steps(d, 4);
    for (int i = 0; i < 4; i++) CHECK(d->out.hash[i] == first.hash[i]);
    bed_close(d);
    free(text);
}
TEST(plan_text, flips_in_edited_texts) { flips(W_SLOW ? 97 : 13); }
TEST(long_plan_text, flips_in_edited_texts, NIGHT) { flips(W_SLOW ? 7 : 1); }

/* Every allocation of a load fails once: no leak, nothing changes; then it is taken. */
static void no_memory(lab_rank *r) {
    const char *text = (const char *)r->arg;
    plan_net n = plan_chain(3, 8, 4);
    plan_bed b;
    plan_result out;
    int64_t at;
    memset(&out, 0, sizeof out);
    plan_open(&b, &n, r->w);
    CALL(r->w, fsdp_plan_create(b.model, NULL, &b.plan));
    for (at = 0;; at++) {
        int64_t blocks = r->heap->live, bytes = r->heap->live_bytes;
        w_fail(r->heap, at);
        fsdp_status status = fsdp_plan_load(b.plan, text, strlen(text));
        int failed = r->heap->failures;
        w_fail(r->heap, -1);
        r->heap->failures = 0;
        CHECK_OK(lib_failed(r->w));
        if (!failed) {
            CALL(r->w, status);
            break;
        }
        snprintf(w_case, sizeof w_case, "allocation %d", (int)at);
        W_CHECK(status == FSDP_ERR_OUT_OF_MEMORY, "%s: %s", fsdp_status_name(status),
                fsdp_last_error(r->w));
        CHECK_EQ_INT(fsdp_plan_count(b.plan), 0);
        /* lists that grow may stay, once */
        W_CHECK(r->heap->live <= blocks + 1 && r->heap->live_bytes <= bytes + 4096,
                "%d blocks, %d bytes more", (int)(r->heap->live - blocks),
                (int)(r->heap->live_bytes - bytes));
    }
    h_message("%d allocations", (int)at);
    CHECK(at > 20);
    for (int i = 0; i < 3; i++) plan_step(&b, &out);
    CHECK_EQ_INT(out.mode[2], FSDP_PLAN_REPLAYING);
    fsdp_model_destroy(b.model);
}
TEST(plan_text, every_allocation_fails_once) {
    plan_net n = plan_chain(3, 8, 4);
    fsdp_plan_desc d = FSDP_ZERO;
    char *text = texts_make(&n, &d, 1, 0, FSDP_PLAN_TEXT_OPS);
    lab_run(1, NULL, no_memory, text);
    free(text);
}

/* Ranks that load different texts are told; the world stays. */
typedef struct {
    char *text[2];
} two_texts;
static void different(lab_rank *r) {
    two_texts *j = (two_texts *)r->arg;
    plan_net n = plan_chain(3, 8, 4);
    plan_bed b;
    plan_result out;
    memset(&out, 0, sizeof out);
    plan_open(&b, &n, r->w);
    CALL(r->w, fsdp_plan_create(b.model, NULL, &b.plan));
    const char *mine = j->text[r->rank == 1];
    REFUSED_AS(FSDP_ERR_MISMATCH, r->w, fsdp_plan_load(b.plan, mine, strlen(mine)),
               "rank 1 differs from the mesh's first rank at call");
    /* One cannot read its text: all are told. */
    fsdp_status status = fsdp_plan_load(b.plan, mine, r->rank == 1 ? 30 : strlen(mine));
    CHECK_STATUS(status, r->rank == 1 ? FSDP_ERR_CORRUPT : FSDP_ERR_OUT_OF_MEMORY);
    CHECK_OK(lib_failed(r->w));
    CHECK_EQ_INT(fsdp_plan_count(b.plan), 0);
    CALL(r->w, fsdp_plan_load(b.plan, j->text[0], strlen(j->text[0])));
    for (int i = 0; i < 3; i++) plan_step(&b, &out);
    CHECK_EQ_INT(out.mode[2], FSDP_PLAN_REPLAYING);
    fsdp_model_destroy(b.model);
}
TEST(plan_text, ranks_load_different_texts) {
    plan_net n = plan_chain(3, 8, 4);
    fsdp_plan_desc d = FSDP_ZERO;
    two_texts j;
    j.text[0] = texts_make(&n, &d, 2, 0, FSDP_PLAN_TEXT_DECISIONS);
    d.bucket_bytes = -1;
    j.text[1] = texts_make(&n, &d, 2, 0, FSDP_PLAN_TEXT_DECISIONS);
    lab_run(2, NULL, different, &j);
    free(j.text[0]), free(j.text[1]);
}
