/* test_plan_times.c - the times of fsdp_plan_simulate, compared with numbers computed on paper and
   with the clocks of tests/sim.h, which share no code with it. SPDX-License-Identifier: MIT */
#include "plan_texts.h"

enum { MS = 1000000 };

/* A simulated world with a plan that has been recorded. */
typedef struct {
    sim s;
    plan_bed b;
    plan_net net;
    plan_result out;
    fsdp_world *w;
    int64_t compute[PLAN_CALLS + 1]; /* ns of compute after each call */
} bed;
static void bed_step(bed *d) {
    const plan_net *n = &d->net;
    for (int i = 0; i < n->num_calls; i++) {
        int unit = n->calls[i].unit, call = n->calls[i].call;
        CALL(d->w, plan_hook(&d->b, unit, call));
        if (call == FSDP_CALL_PRE_FORWARD) plan_look(&d->b, unit, i, 0);
        if (call == FSDP_CALL_PRE_BACKWARD) plan_look(&d->b, unit, i, 1);
        sim_compute(&d->s, d->compute[i]);
    }
    CALL(d->w, fsdp_finalize_backward(d->b.model));
}
static void bed_after(bed *d) {
    (void)plan_update(&d->b);
    d->b.step++;
}
static bed *bed_open(const plan_net *net, const fsdp_plan_desc *desc, int size, int async,
                     int plans) {
    bed *d = (bed *)lab_zeros(1, sizeof *d);
    sim_init(&d->s, size, 0);
    d->s.async = async;
    d->net = *net;
    d->s.latency_ns = 500, d->s.coll_bytes_per_ns = 1, d->s.copy_bytes_per_ns = 1;
    d->w = sim_open(&d->s);
    CHECK(d->w != NULL);
    plan_open(&d->b, &d->net, d->w);
    if (plans) CALL(d->w, fsdp_plan_create(d->b.model, desc, &d->b.plan));
    for (int i = 0; i < 3; i++) bed_step(d), bed_after(d);
    if (plans)
        W_CHECK(fsdp_plan_state(d->b.plan) == FSDP_PLAN_REPLAYING, "%s", fsdp_plan_why(d->b.plan));
    return d;
}
static void bed_close(bed *d) {
    fsdp_model_destroy(d->b.model);
    CHECK_EQ_INT(sim_close(&d->s), 0);
    free(d);
}
static fsdp_plan_times times(bed *d, int eager, const fsdp_plan_cost *cost) {
    fsdp_plan_times t;
    CALL(d->w, fsdp_plan_simulate(d->b.plan, 0, eager, cost, &t));
    return t;
}

/* ---- on paper -------------------------------------------------------------------------------- */

static fsdp_plan_cost paper(bed *d, int64_t forward, int64_t backward, int64_t gather,
                            int64_t reduce) {
    fsdp_plan_cost c = FSDP_ZERO;
    for (int i = 0; i < d->net.num_calls; i++)
        d->compute[i] = d->net.calls[i].call == FSDP_CALL_PRE_FORWARD    ? forward
                        : d->net.calls[i].call == FSDP_CALL_PRE_BACKWARD ? backward
                                                                         : 0;
    d->compute[d->net.num_calls] = 0;
    c.gather_latency_ns = (double)gather, c.reduce_latency_ns = (double)reduce;
    c.compute_ns = d->compute, c.num_compute = d->net.num_calls + 1;
    return c;
}

/* Four layers, 3 ms forward and 6 ms backward each; a gather 1 ms, a reduction 2 ms. */
TEST(plan_times, worked_example) {
    plan_net n = plan_chain(4, 16, 16);
    fsdp_plan_desc desc = FSDP_ZERO;
    fsdp_plan_report rep;
    desc.bucket_bytes = -1;
    bed *d = bed_open(&n, &desc, 2, 0, 1);
    fsdp_plan_cost c = paper(d, 3 * MS, 6 * MS, 1 * MS, 2 * MS);
    fsdp_plan_times t = times(d, 1, &c);
    CHECK_EQ_INT(t.step_ns, 52 * MS); /* 4 (1 + 3) + 4 (1 + 6 + 2) */
    CHECK_EQ_INT(t.compute_ns, 36 * MS);
    CHECK_EQ_INT(t.exposed_ns, 16 * MS);
    CHECK_EQ_INT(t.gather_ns, 8 * MS);
    CHECK_EQ_INT(t.reduce_ns, 8 * MS);
    CHECK_EQ_INT(t.replica_ns, 0);
    CHECK_EQ_INT(t.worst_ns, 2 * MS);
    CHECK_EQ_INT(t.worst_call, 9); /* the first post_backward */
    t = times(d, 0, &c);
    CALL(d->w, fsdp_plan_report_get(d->b.plan, 0, &rep));
    CHECK_EQ_INT(t.step_ns, (36 + 8 + rep.gathers[1]) * MS);
    CHECK_EQ_INT(t.peak_bytes, rep.bytes[1]);
    bed_close(d);
    int seen = 0;
    for (int64_t bytes = 10240; bytes < 22000;
         bytes += 2176) { /* from nothing kept to everything */
        desc.most_bytes = bytes;
        d = bed_open(&n, &desc, 2, 1, 1);
        c = paper(d, 3 * MS, 6 * MS, 1 * MS, 2 * MS);
        CALL(d->w, fsdp_plan_report_get(d->b.plan, 0, &rep));
        t = times(d, 0, &c);
        CHECK_EQ_INT(t.bound_ns, 39 * MS);
        CHECK(t.step_ns >= t.bound_ns);
        CHECK_EQ_INT(t.gather_ns, rep.gathers[1] * MS);
        h_message("%lld bytes: %d gathers, %lld us", (long long)bytes, rep.gathers[1],
                  (long long)t.step_ns / 1000);
        if (rep.gathers[1] == 7) {            /* the last layer is kept */
            CHECK_EQ_INT(t.step_ns, 39 * MS); /* 36 + the first gather + the last reduction */
            CHECK_EQ_INT(t.exposed_ns, 3 * MS);
            CHECK_EQ_INT(t.worst_call, 16);
            CHECK_EQ_INT(t.worst_ns, 2 * MS);
            c = paper(d, 0, 0, 1 * MS, 2 * MS);
            t = times(d, 0, &c);
            CHECK_EQ_INT(t.bound_ns, 8 * MS); /* 4 reductions: those of a group do not overlap */
            seen++;
        }
        bed_close(d);
    }
    CHECK(seen > 0);
}

/* A layer of P parameters: a gather takes 2 P / rate, a reduction in f32 4 P / rate, forward 2 P
   tokens / flops, backward twice that. Forward waits for gathers below flops / rate tokens; backward,
   when gathers and reductions share the links, below 1.5 times that. */
TEST(plan_times, thresholds) {
    const double flops = 400e12, rate = 360e9, tokens = flops / rate;
    plan_net n = plan_chain(8, 16, 16);
    fsdp_plan_desc desc = FSDP_ZERO;
    fsdp_plan_report rep;
    CHECK_NEAR(tokens, 1111, 1);
    desc.bucket_bytes = -1, desc.most_bytes = 8 * 2176; /* the last layer is kept */
    bed *d = bed_open(&n, &desc, 2, 1, 1);
    CALL(d->w, fsdp_plan_report_get(d->b.plan, 0, &rep));
    h_message("%d gathers", rep.gathers[1]);
    static const struct {
        int backward, shared;
        double threshold;
    } cases[] = {{0, 0, 1}, {0, 1, 1}, {1, 1, 1.5}, {1, 0, 1}};
    for (int k = 0; k < 4; k++) {
        int64_t exposed[3];
        const double at[3] = {cases[k].threshold * .98, cases[k].threshold * 1.02, 50};
        for (int i = 0; i < 3; i++) {
            int64_t layer = (int64_t)(MS * at[i]), slow = 100 * MS;
            fsdp_plan_cost c = paper(d, cases[k].backward ? slow : layer,
                                     cases[k].backward ? 2 * layer : slow, MS, 2 * MS);
            c.shared_links = cases[k].shared;
            exposed[i] = times(d, 0, &c).exposed_ns;
        }
        h_message("case %d: %lld, %lld, %lld us exposed", k, (long long)exposed[0] / 1000,
                  (long long)exposed[1] / 1000, (long long)exposed[2] / 1000);
        CHECK(exposed[0] > exposed[1]);
        CHECK_EQ_INT(exposed[1], exposed[2]);
    }
    bed_close(d);
}

/* Two step variants: the eager calls of one cannot be simulated with the options of the other. */
TEST(plan_times, calls_of_another_kind) {
    plan_net n = plan_chain(2, 8, 4);
    fsdp_plan_times t, again;
    bed *d = bed_open(&n, NULL, 2, 0, 1);
    fsdp_plan_cost c = paper(d, MS, MS, MS, MS);
    t = times(d, 1, &c);
    CALL(d->w, fsdp_set_requires_gradient_sync(d->b.model, NULL, 0));
    bed_step(d), bed_step(d), bed_step(d);
    CHECK(fsdp_plan_count(d->b.plan) > 1);
    REFUSED_AS(FSDP_ERR_INVALID_STATE, d->w, fsdp_plan_simulate(d->b.plan, 0, 1, &c, &again),
               "options");
    CALL(d->w, fsdp_plan_simulate(d->b.plan, 0, 0, &c, &again));
    CALL(d->w, fsdp_set_requires_gradient_sync(d->b.model, NULL, 1));
    again = times(d, 1, &c);
    CHECK(memcmp(&t, &again, sizeof t) == 0);
    /* Not in a step: units are not idle. */
    CALL(d->w, plan_hook(&d->b, 0, FSDP_CALL_PRE_FORWARD));
    CHECK_EQ_INT(fsdp_plan_simulate(d->b.plan, 0, 1, &c, &again), FSDP_ERR_INVALID_STATE);
    bed_close(d);
}

/* ---- plans that are chosen by costs ----------------------------------------------------------- */

static const struct {
    const char *name;
    int async;
} modes[] = {{"inline", 0}, {"streams", 1}};

/* If latency counts, bucketing pays. If bytes count, it does not: a use awaits the whole bucket. */
TEST(plan_times, cost_of_joining) {
    plan_net n = plan_chain(8, 16, 16);
    int64_t work = 1088; /* as long as a gather of 2 x 136 x 4 bytes takes */
    for (int bytes_count = 0; bytes_count < 2; bytes_count++) {
        fsdp_plan_desc desc = FSDP_ZERO;
        fsdp_plan_cost c = FSDP_ZERO;
        fsdp_plan_report rep[2];
        int64_t took[2];
        if (bytes_count) c.gather_bytes_per_ns = c.reduce_bytes_per_ns = 1;
        else c.gather_latency_ns = c.reduce_latency_ns = 1e6;
        c.compute_ns = &work, c.num_compute = 1;
        for (int weighs = 0; weighs < 2; weighs++) {
            desc.cost = weighs ? &c : NULL;
            bed *d = bed_open(&n, &desc, 2, 1, 1);
            took[weighs] = times(d, 0, &c).step_ns;
            CALL(d->w, fsdp_plan_report_get(d->b.plan, 0, &rep[weighs]));
            h_message("bytes count %d, weighs %d: %lld ns, %d joined", bytes_count, weighs,
                      (long long)took[weighs], rep[weighs].buckets);
            bed_close(d);
        }
        CHECK(rep[0].buckets > 0);
        CHECK_EQ_INT(rep[1].buckets > 0, !bytes_count);
        if (bytes_count) CHECK(took[1] < took[0]);
        else CHECK_EQ_INT(took[1], took[0]);
    }
}

/* A pass that neither costs nor saves time is taken, as without costs. */
TEST(plan_times, cost_of_nothing) {
    plan_net n = plan_chain(4, 16, 16);
    fsdp_plan_desc desc = FSDP_ZERO;
    const fsdp_plan_cost c = FSDP_ZERO;
    desc.cost = &c, desc.bucket_bytes = -1;
    char *text = texts_make(&n, &desc, 2, TEXTS_STREAMS, FSDP_PLAN_TEXT_DECISIONS);
    CHECK(strstr(text, "  gather behind 'h.") != NULL);
    free(text);
}

/* No plan that was chosen by costs is slower under them than one without the passes they choose. */
TEST_P(plan_times, cost_chooses, modes) {
    const uint32_t weighed = 1u << FSDP_PASS_BUCKET | 1u << FSDP_PASS_KEEP | 1u << FSDP_PASS_AHEAD;
    int faster = 0;
    for (int net = 0; net < TEXTS_NETS; net++)
        for (int seed = 0; seed < 3; seed++) {
            plan_net n = texts_net(net);
            fsdp_plan_desc desc = FSDP_ZERO;
            fsdp_plan_cost c = FSDP_ZERO;
            int64_t took[3], work[PLAN_CALLS + 1];
            for (int k = 0; k <= n.num_calls; k++)
                work[k] = (int64_t)(lab_hash((uint64_t)seed, (uint64_t)k, 3, 4) % 2000);
            c.gather_latency_ns = c.reduce_latency_ns = c.replica_latency_ns = seed ? 10 : 1000;
            c.gather_bytes_per_ns = c.reduce_bytes_per_ns = c.replica_bytes_per_ns = 1;
            c.copy_bytes_per_ns = 4, c.issue_ns = 5;
            c.compute_ns = work, c.num_compute = n.num_calls + 1;
            for (int way = 0; way < 3; way++) { /* all passes, none of the three, by costs */
                desc.without = way == 1 ? weighed : 0;
                desc.cost = way == 2 ? &c : NULL;
                bed *d = bed_open(&n, &desc, texts_size(net), row->async, 1);
                took[way] = times(d, 0, &c).step_ns;
                bed_close(d);
            }
            snprintf(w_case, sizeof w_case, "%s, seed %d: %lld, %lld, %lld ns", texts_name(net),
                     seed, (long long)took[0], (long long)took[1], (long long)took[2]);
            W_CHECK(took[2] <= took[1], "costs have chosen a slower plan");
            faster += took[2] < took[0];
        }
    h_message("%s: %d of %d are faster than with all passes", row->name, faster, 3 * TEXTS_NETS);
    CHECK(row->async ? faster > 0 : 1);
}

/* The costs of a desc are checked and copied: the caller may free compute_ns. */
TEST(plan_times, cost_of_a_desc) {
    plan_net n = plan_chain(4, 16, 16);
    fsdp_plan_desc desc = FSDP_ZERO;
    fsdp_plan_cost c = FSDP_ZERO;
    char *texts[2];
    bed *d = bed_open(&n, NULL, 2, 1, 0);
    desc.cost = &c;
    c.copy_bytes_per_ns = -1;
    REFUSED(d->w, fsdp_plan_create(d->b.model, &desc, &d->b.plan), "not finite");
    c.copy_bytes_per_ns = 0, c.num_compute = 1;
    REFUSED(d->w, fsdp_plan_create(d->b.model, &desc, &d->b.plan), "compute_ns");
    int64_t *work = (int64_t *)lab_zeros(1, sizeof *work);
    c.compute_ns = work, *work = 1088, c.gather_bytes_per_ns = c.reduce_bytes_per_ns = 1;
    CALL(d->w, fsdp_plan_create(d->b.model, &desc, &d->b.plan));
    *work = -1;
    free(work);
    for (int i = 0; i < 3; i++) bed_step(d), bed_after(d);
    CHECK_EQ_INT(fsdp_plan_state(d->b.plan), FSDP_PLAN_REPLAYING);
    bed_close(d);
    /* Ranks of a real world make the same choice; otherwise their plans would not agree. */
    const int64_t same = 1088;
    c.compute_ns = &same;
    for (int i = 0; i < 2; i++)
        texts[i] = texts_make(&n, &desc, 2, 2 * i, FSDP_PLAN_TEXT_DECISIONS);
    CHECK(strstr(texts[0], "gather 'h.0'") && strstr(texts[1], "gather 'h.0'"));
    free(texts[0]), free(texts[1]);
}

/* Fields that are no numbers. */
TEST(plan_times, bad_costs) {
    plan_net n = plan_chain(2, 8, 4);
    bed *d = bed_open(&n, NULL, 2, 0, 1);
    fsdp_plan_times t;
    for (int k = 0; k < 10; k++) {
        fsdp_plan_cost c = FSDP_ZERO;
        int64_t minus[2] = {5, -1};
        double *const fields[7] = {&c.gather_latency_ns,  &c.gather_bytes_per_ns,
                                   &c.reduce_latency_ns,  &c.reduce_bytes_per_ns,
                                   &c.replica_latency_ns, &c.replica_bytes_per_ns,
                                   &c.copy_bytes_per_ns};
        if (k < 7) *fields[k] = k % 2 ? -1 : LAB_NAN;
        if (k == 7) c.num_compute = 1;
        if (k == 9) c.issue_ns = LAB_NAN;
        if (k == 8) c.num_compute = 2, c.compute_ns = minus;
        REFUSED(d->w, fsdp_plan_simulate(d->b.plan, 0, 0, &c, &t), "not finite");
    }
    fsdp_plan_cost c = FSDP_ZERO;
    REFUSED(d->w, fsdp_plan_simulate(d->b.plan, 1, 0, &c, &t), "index 1");
    REFUSED(d->w, fsdp_plan_simulate(d->b.plan, -1, 0, &c, &t), "index -1");
    REFUSED(d->w, fsdp_plan_simulate(d->b.plan, 0, 0, NULL, &t), "NULL");
    REFUSED(NULL, fsdp_plan_simulate(NULL, 0, 0, &c, &t), "NULL");
    c.issue_ns = 10;
    CALL(d->w, fsdp_plan_simulate(d->b.plan, 0, 0, &c, &t));
    CHECK(t.step_ns > 0 && t.step_ns % 10 == 0);
    bed_close(d);
}

/* ---- the clocks of tests/sim.h --------------------------------------------------------------- */

/* Returns the ns of a step on the clocks of tests/sim.h, with all streams idle at its start. */
static int64_t measured(bed *d) {
    int64_t begin = sim_end(&d->s);
    for (int a = 0; a < SIM_ACTORS; a++) d->s.now[a] = begin;
    bed_step(d);
    int64_t took = sim_end(&d->s) - begin;
    bed_after(d);
    return took;
}
static void agree(int net, int async, int setting, int seed) {
    plan_net n = texts_net(net);
    fsdp_plan_desc desc = FSDP_ZERO;
    fsdp_plan_cost c = FSDP_ZERO;
    int size = net == TEXTS_DDP ? 2
                                : texts_size(net); /* groups of two: full is twice what is read */
    if (net == TEXTS_DDP) n.replicas = 2;
    if (setting == 1) desc.bucket_bytes = -1, desc.without = 1u << FSDP_PASS_KEEP;
    if (setting == 2) desc.bucket_bytes = 3000, desc.ahead = 2;
    if (setting == 3) desc.bucket_bytes = -1, desc.most_bytes = 13000;
    c.gather_latency_ns = c.reduce_latency_ns = c.replica_latency_ns = 500;
    c.gather_bytes_per_ns = c.reduce_bytes_per_ns = 2;
    c.replica_bytes_per_ns = 1, c.copy_bytes_per_ns = 1;
    snprintf(w_case, sizeof w_case, "%s, async %d, setting %d, seed %d", texts_name(net), async,
             setting, seed);
    for (int planned = 0; planned < 2; planned++) {
        bed *d = bed_open(&n, &desc, size, async, 1);
        bed *run = planned ? d : bed_open(&n, &desc, size, async, 0);
        for (int k = 0; k < n.num_calls; k++)
            d->compute[k] = run->compute[k] =
                (int64_t)(lab_hash((uint64_t)seed, (uint64_t)k, 1, 2) % 4000);
        c.compute_ns = d->compute, c.num_compute = n.num_calls + 1;
        (void)measured(run);
        int64_t there = measured(run);
        fsdp_plan_times t = times(d, !planned, &c);
        W_CHECK(t.step_ns == there, "planned %d: simulated %lld ns, the clocks say %lld", planned,
                (long long)t.step_ns, (long long)there);
        W_CHECK(t.bound_ns <= t.step_ns, "%lld is the bound of %lld", (long long)t.bound_ns,
                (long long)t.step_ns);
        if (!planned) bed_close(run);
        bed_close(d);
    }
}
TEST_P(plan_times, as_the_clocks, modes, AT_NIGHT(ASAN)) {
    for (int net = 0; net < TEXTS_NETS; net++)
        for (int setting = 0; setting < 4; setting++)
            for (int seed = 0; seed < 2; seed++) agree(net, row->async, setting, seed);
}
