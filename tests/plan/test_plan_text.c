/* test_plan_text.c - plans as texts: the printed text, and slots that texts show.

   Golden texts: tests/golden/plan_*.txt. After a change to the format, or to a pass's decisions,
   PLAN_GOLDEN=write build/tests/test_plan_text --filter=golden writes them again, in their
   directory; review the changes before you commit them.

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

/* Names that a text must change, in a chain of units. `head`: the name in the unit's line. A long
   name is cut; a name that is already in use gets numbers until it is unique. */
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
    for (int async = 0; async < 2; async++) {
        bed *d = bed_open(&n, &desc, 2, async);
        bed_steps(d, 3);
        CHECK_EQ_INT(d->out.mode[2], FSDP_PLAN_REPLAYING);
        for (int what = 0; what < 2; what++) {
            char *text = texts_of(d->b.plan, 0, what), line[64];
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
            free(text);
        }
        bed_close(d);
    }
}

/* A bucket has at most 64 units, however small they are. */
TEST(plan_text, more_units_than_are_joined) {
    const plan_net n = plan_chain(66, 4, 2);
    bed *d = bed_open(&n, NULL, 2, 0);
    fsdp_plan_report rep;
    bed_steps(d, 4);
    CHECK_EQ_INT(d->out.mode[3], FSDP_PLAN_REPLAYING);
    CALL(d->w, fsdp_plan_report_get(d->b.plan, 0, &rep));
    CHECK_EQ_INT(rep.reductions[1], 2);
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

/* A plan for 131072 ranks, of which one runs: it makes, prints, proves and replays the plan. */
TEST(plan_text, many_ranks) {
    const plan_net n = plan_chain(34, 8, 4);
    for (int async = 0; async < 2; async++) {
        bed *d = bed_begin(&n, 131072, async);
        fsdp_plan_report rep;
        fsdp_plan_proof proof;
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
        CALL(d->w, fsdp_plan_prove(d->b.plan, 0, &proof));
        CHECK_EQ_INT(proof.refuted, FSDP_PROOF_OK);
        CALL(d->w, fsdp_plan_report_get(d->b.plan, 0, &rep));
        CHECK_EQ_INT(rep.replayed, 1);
        h_message("%s: %d ms", async ? "streams" : "inline", (int)(h_now_ms() - begun));
        free(text);
        bed_close(d);
    }
}

/* Checks the numbers of step variants, recordings and replays, that no step left the plan, and that
   only the first variant has slots that last. */
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

/* The model ends while unreduced gradients wait in a plan's slot for the next microbatch. */
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
