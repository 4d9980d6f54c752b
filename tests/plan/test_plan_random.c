/* test_plan_random.c - random models, random steps, and random events between them: a plan has the
   bits of eager steps, nothing races, and the only reason for which a plan is refused is that the
   program's steps differ.

       build/tests/test_plan_random --seed=7                                other programs
       PLAN_PROGRAM=123 build/tests/test_plan_random --filter=plan_random   one of them again

   SPDX-License-Identifier: MIT */
#define TAGS SLOW | AT_NIGHT(ASAN)
#include "plan.h"

enum { STEPS = 12, MICRO = 24, FORMS = 3, RANKS = 8, LETTERS = 1400 };
enum { INLINE, LANE, LANES, STREAMS, MODES };
static const char *const mode_names[MODES] = {"inline", "1_lane", "2_lanes", "streams"};

/* Events before a step. */
enum {
    NOTHING,
    FREEZE,  /* or thaw */
    SHAKE,   /* freeze or thaw, and back again */
    SYNC,    /* on or off */
    LAST,    /* is_last_backward, on or off */
    FORWARD, /* reshard_after_forward of a unit: always, or never */
    BACK,    /* reshard_after_backward, on or off */
    KEEP,    /* no zero_grad after the step */
    LOOK,    /* an evaluation */
    RESET,
    PAUSE,  /* for one step */
    FORGET, /* its plans */
    EMPTY,  /* the step is only finalize */
    HALF,   /* the step has no backward */
    EVENTS
};
static const char *const event_names[EVENTS] = {"",        "freeze", "shake", "sync", "last",
                                                "forward", "back",   "keep",  "look", "reset",
                                                "pause",   "forget", "empty", "half"};

typedef struct program {
    plan_net net;
    fsdp_plan_desc desc;
    int size, mode, backward; /* backward: the first call of it */
    int num_steps, events[MICRO], arg[MICRO];
    int starts[FORMS + 1]; /* first call of each form of a step */
    int form[MICRO];
    int is_micro, last, back; /* steps are microbatches; these options follow their sync */
    int syncs[MICRO];
    char words[LETTERS]; /* all of the above, for the text of a failure */
} program;

static int one_in(uint64_t *seed, int n) { return lab_pick(seed, n) == 0; }

static void words_add(program *g, const char *format, ...) H_PRINTF(2, 3);
static void words_add(program *g, const char *format, ...) {
    const size_t used = strlen(g->words);
    va_list args;
    va_start(args, format);
    vsnprintf(g->words + used, sizeof g->words - used, format, args);
    va_end(args);
}

static void random_params(uint64_t *seed, program *g) {
    static const fsdp_dtype stored[] = {FSDP_F32, FSDP_F32, FSDP_BF16, FSDP_F64};
    plan_net *n = &g->net;
    const int mixed = one_in(seed, 3);
    const fsdp_dtype trained = mixed ? stored[lab_pick(seed, 4)] : FSDP_F32;
    n->num_params = 1 + lab_pick(seed, 3);
    if (one_in(seed, 4)) n->frozen = 1 + lab_pick(seed, n->num_params);
    for (int i = 0; i < n->num_params; i++) {
        n->rows[i][0] = one_in(seed, 6) ? 0 : 1 + lab_pick(seed, 12);
        n->rows[i][1] = one_in(seed, 2) ? 1 + lab_pick(seed, 6) : 0;
        n->dtypes[i] = mixed && n->frozen == i + 1 ? stored[lab_pick(seed, 4)] : trained;
        n->keep[i] = mixed && one_in(seed, 2);
        words_add(g, "%lldx%lld %s%s ", (long long)n->rows[i][0], (long long)n->rows[i][1],
                  fsdp_dtype_name(n->dtypes[i]), n->keep[i] ? "!" : "");
    }
    if (one_in(seed, 2)) n->model.param_dtype = FSDP_BF16;
    if (one_in(seed, 2)) n->model.reduce_dtype = FSDP_F32;
    if (one_in(seed, 5)) n->frozen_unit = 1 + lab_pick(seed, n->num_units);
    if (one_in(seed, 5)) n->empty = 1 + lab_pick(seed, n->num_units);
    words_add(g, "param %s reduce %s frozen %d unit %d empty %d ",
              fsdp_dtype_name(n->model.param_dtype), fsdp_dtype_name(n->model.reduce_dtype),
              n->frozen, n->frozen_unit, n->empty);
}

static void random_model(uint64_t *seed, program *g) {
    static const int sizes[] = {1, 1, 2, 2, 3, 4, 6, 8};
    static const int64_t direct[] = {0, FSDP_DIRECT_NEVER, 1};
    plan_net *n = &g->net;
    g->mode = lab_pick(seed, MODES);
    g->size = sizes[lab_pick(seed, 8)];
    if (g->size % 2 == 0 && one_in(seed, 5)) n->replicas = 2;
    if (g->size > 1 && one_in(seed, 10)) n->replicas = g->size;
    const int shards = n->replicas ? g->size / n->replicas : g->size;
    n->scaled = lab_pick(seed, 3);
    for (int u = 0; u < n->num_units; u++) {
        const int slices = 2 + lab_pick(seed, 3);
        if (one_in(seed, 4)) n->reshard[u] = FSDP_RESHARD_NEVER;
        if (one_in(seed, 2) && slices < shards && shards % slices == 0) n->reshard[u] = slices;
        words_add(g, "!%d ", n->reshard[u]);
    }
    n->model.direct_min = direct[lab_pick(seed, 3)];
    n->model.cpu_offload = one_in(seed, 10);
    n->model.implicit_prefetch = lab_pick(seed, 3) - 1;
    if (one_in(seed, 8)) n->sets |= PLAN_NO_RESHARD;
    if (one_in(seed, 8)) n->sets |= PLAN_LISTS;
    else if (one_in(seed, 10)) n->sets |= PLAN_NO_UNSHARD; /* no list gathers for its backward */
    if (one_in(seed, 10)) n->sets |= PLAN_SUM_HOOK;
    if (one_in(seed, 10)) n->sets |= PLAN_CUSTOM;
    if (one_in(seed, 6)) n->sets |= one_in(seed, 2) ? PLAN_UNUSED : PLAN_SOME_USED;
    words_add(g, "W=%d replicas %d %s direct %d offload %d prefetch %d sets %d ", g->size,
              n->replicas, mode_names[g->mode], (int)n->model.direct_min, n->model.cpu_offload,
              n->model.implicit_prefetch, n->sets);
}

/* Adds a visit of a unit, and sometimes a prefetch or an early reshard of another one. */
static void random_visit(uint64_t *seed, program *g, int unit, int backward, int outer) {
    plan_net *n = &g->net;
    const int other = lab_pick(seed, n->num_units);
    if (one_in(seed, 8)) {
        plan_call(n, other, FSDP_CALL_UNSHARD);
        if (one_in(seed, 2)) plan_call(n, other, FSDP_CALL_WAIT);
    } else if (one_in(seed, 12) && !(outer && other == 0)) {
        plan_call(n, other, FSDP_CALL_RESHARD);
    }
    if (!backward || !one_in(seed, 6)) {
        plan_pair(n, unit, backward);
        return;
    }
    plan_call(n, unit, FSDP_CALL_PRE_BACKWARD);
    plan_pair(n, unit, 0); /* recompute */
    plan_call(n, unit, FSDP_CALL_POST_BACKWARD);
}

static void random_calls(uint64_t *seed, program *g) {
    static const char letters[] = "FfBbuwr";
    plan_net *n = &g->net;
    const int outer = one_in(seed, 4), visits = 1 + lab_pick(seed, 6), chain = one_in(seed, 2);
    int order[8];
    if (outer) plan_call(n, 0, FSDP_CALL_PRE_FORWARD);
    for (int i = 0; i < visits; i++) {
        order[i] = chain ? i % n->num_units : lab_pick(seed, n->num_units);
        if (outer && order[i] == 0) order[i] = n->num_units - 1;
        if (outer && order[i] == 0) order[i] = -1; /* there is no other unit */
        if (order[i] >= 0) random_visit(seed, g, order[i], 0, outer);
    }
    if (outer) plan_call(n, 0, FSDP_CALL_POST_FORWARD);
    g->backward = n->num_calls;
    if (outer) plan_call(n, 0, FSDP_CALL_PRE_BACKWARD);
    for (int i = visits - 1; i >= 0; i--)
        if (order[i] >= 0 && !one_in(seed, 16)) random_visit(seed, g, order[i], 1, outer);
    if (outer) plan_call(n, 0, FSDP_CALL_POST_BACKWARD);
    if (one_in(seed, 6)) plan_call(n, lab_pick(seed, n->num_units), FSDP_CALL_UNSHARD);
    for (int i = 0; i < n->num_calls; i++)
        words_add(g, "%c%d", letters[n->calls[i].call], n->calls[i].unit);
}

static void random_events(uint64_t *seed, program *g) {
    random_calls(seed, g);
    g->starts[1] = g->net.num_calls;
    g->num_steps = STEPS;
    for (int i = 1; i < STEPS; i++) {
        g->events[i] = one_in(seed, 4) ? lab_pick(seed, EVENTS) : NOTHING;
        g->arg[i] = (int)(h_rand64(seed) % 1000);
        if (g->events[i]) words_add(g, " %d:%s(%d)", i, event_names[g->events[i]], g->arg[i]);
    }
}

/* Gradient accumulation: microbatches of up to three forms, each of which reaches some units. They
   come in windows, of which two are drawn: the last microbatch of a window reduces. */
static void random_microbatches(uint64_t *seed, program *g) {
    plan_net *n = &g->net;
    int windows[2][4], counts[2];
    for (int f = 0; f < FORMS; f++) {
        const int reached = 1 + lab_pick(seed, (1 << n->num_units) - 1);
        words_add(g, " form %d: %x", f, (unsigned)reached);
        for (int u = 0; u < n->num_units; u++)
            if (reached >> u & 1) random_visit(seed, g, u, 0, 0);
        for (int u = n->num_units - 1; u >= 0; u--)
            if (reached >> u & 1) random_visit(seed, g, u, 1, 0);
        g->starts[f + 1] = n->num_calls;
    }
    g->is_micro = 1, g->num_steps = MICRO;
    g->last = one_in(seed, 3), g->back = one_in(seed, 3);
    g->desc.most_kinds = one_in(seed, 4) ? 1 + lab_pick(seed, 4) : MICRO;
    for (int w = 0; w < 2; w++) {
        counts[w] = 1 + lab_pick(seed, 4);
        for (int i = 0; i < counts[w]; i++) windows[w][i] = lab_pick(seed, FORMS);
    }
    words_add(g, " last %d back %d kinds %d", g->last, g->back, g->desc.most_kinds);
    for (int i = 0; i < MICRO;) {
        const int w = lab_pick(seed, 2);
        for (int k = 0; k < counts[w] && i < MICRO; k++, i++) {
            g->form[i] = windows[w][k];
            g->syncs[i] = k + 1 == counts[w];
            words_add(g, " %d%s", g->form[i], g->syncs[i] ? "!" : "");
        }
    }
}

static program random_program(uint64_t seed, void (*steps)(uint64_t *seed, program *g)) {
    program g;
    memset(&g, 0, sizeof g);
    g.net.name = "random";
    g.net.num_units = 1 + lab_pick(&seed, 4);
    random_params(&seed, &g);
    random_model(&seed, &g);
    steps(&seed, &g);
    g.desc.ahead = lab_pick(&seed, 3);
    if (one_in(&seed, 4)) g.desc.without = (uint32_t)lab_pick(&seed, 1 << FSDP_PASS_COUNT);
    if (one_in(&seed, 3)) g.desc.bucket_bytes = 64 << lab_pick(&seed, 6);
    words_add(&g, " ahead %d without %u bucket %d", g.desc.ahead, g.desc.without,
              (int)g.desc.bucket_bytes);
    return g;
}

/* ---- one rank -------------------------------------------------------------------------------- */

typedef struct runner {
    plan_bed b;
    int frozen[8][PLAN_PARAMS], is_off[3], paused, refused;
} runner;

static void freeze(runner *x, int arg) {
    plan_bed *b = &x->b;
    const int u = arg % b->net->num_units, i = arg / 8 % b->net->num_params;
    const fsdp_status status = fsdp_set_requires_grad(b->unit[u], i, x->frozen[u][i]);
    x->frozen[u][i] ^= status == FSDP_OK; /* refused: its dtype would change, or */
    x->refused |= status == FSDP_ERR_INVALID_STATE; /* gradients wait: finalize fails, too */
}

static void look(plan_bed *b, int u) {
    CALL(b->w, fsdp_set_grad_enabled(b->model, 0));
    CALL(b->w, fsdp_pre_forward(b->unit[u]));
    plan_look(b, u, 0, 0);
    CALL(b->w, fsdp_post_forward(b->unit[u]));
    CALL(b->w, fsdp_set_grad_enabled(b->model, 1));
}

static void before_step(runner *x, int event, int arg) {
    plan_bed *b = &x->b;
    fsdp_unit *unit = b->unit[arg % b->net->num_units];
    if (x->paused && b->plan) CALL(b->w, fsdp_plan_pause(b->plan, 0));
    x->paused = event == PAUSE;
    switch (event) {
    case FREEZE: freeze(x, arg); break;
    case SHAKE: freeze(x, arg), freeze(x, arg); break;
    case SYNC:
        x->is_off[0] ^= 1;
        CALL(b->w, fsdp_set_requires_gradient_sync(b->model, arg % 2 ? unit : NULL, !x->is_off[0]));
        break;
    case LAST:
        x->is_off[1] ^= 1;
        CALL(b->w, fsdp_set_is_last_backward(b->model, !x->is_off[1]));
        break;
    case FORWARD:
        CALL(b->w, fsdp_set_reshard_after_forward(
                       b->model, unit, arg / 8 % 2 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS));
        break;
    case BACK:
        x->is_off[2] ^= 1;
        CALL(b->w, fsdp_set_reshard_after_backward(b->model, unit, !x->is_off[2]));
        break;
    case LOOK: look(b, arg % b->net->num_units); break;
    case RESET: CALL(b->w, fsdp_model_reset(b->model)); break;
    case PAUSE:
        if (b->plan) CALL(b->w, fsdp_plan_pause(b->plan, 1));
        break;
    case FORGET:
        if (b->plan) CALL(b->w, fsdp_plan_forget(b->plan));
        break;
    default: break;
    }
    b->keeps_grads = event == KEEP;
}

static void before_microbatch(plan_bed *b, const program *g, int sync) {
    CALL(b->w, fsdp_set_requires_gradient_sync(b->model, NULL, sync));
    if (g->last) CALL(b->w, fsdp_set_is_last_backward(b->model, sync));
    if (g->back) CALL(b->w, fsdp_set_reshard_after_backward(b->model, NULL, sync));
    b->keeps_grads = b->rests = !sync;
}

static void run(fsdp_world *w, const program *g, int planned, plan_result *out) {
    runner x;
    plan_bed *b = &x.b;
    memset(out, 0, sizeof *out);
    memset(&x, 0, sizeof x);
    plan_open(b, &g->net, w);
    b->s = plan_sim;
    b->is_partial = b->freezes = 1;
    for (int u = 0; u < g->net.num_units; u++)
        for (int i = 0; i < g->net.num_params; i++)
            x.frozen[u][i] = g->net.frozen == i + 1 || g->net.frozen_unit == u + 1;
    if (planned) CALL(w, fsdp_plan_create(b->model, &g->desc, &b->plan));
    for (int i = 0; i < g->num_steps; i++) {
        const int event = g->events[i], from = g->starts[g->form[i]],
                  to = g->starts[g->form[i] + 1];
        before_step(&x, event, g->arg[i]);
        if (g->is_micro) before_microbatch(b, g, g->syncs[i]);
        plan_calls(b, from, event == EMPTY ? from : event == HALF ? g->backward : to);
        CHECK_STATUS(fsdp_finalize_backward(b->model),
                     x.refused ? FSDP_ERR_INVALID_STATE : FSDP_OK);
        x.refused = 0;
        if (!b->rests) CALL(w, fsdp_params_writable(b->model)); /* gathers may be under way */
        plan_step_end(b, out);
    }
    if (b->plan && fsdp_plan_count(b->plan))
        CALL(w, fsdp_plan_report_get(b->plan, 0, &out->report));
    out->count = fsdp_plan_count(b->plan);
    fsdp_model_destroy(b->model);
}

typedef struct outcome {
    int replayed, refused, differ;
    char why[200]; /* from the last program that was refused */
} outcome;
typedef struct job {
    program g;
    plan_result *r[RANKS][2];
} job;

static void body(fsdp_world *w, job *j, int rank) {
    plan_result *x = j->r[rank][0], *y = j->r[rank][1];
    snprintf(w_case, sizeof w_case, "%.250s", j->g.words);
    run(w, &j->g, 0, x);
    run(w, &j->g, 1, y);
    for (int i = 0; i < j->g.num_steps; i++)
        W_CHECK(x->hash[i] == y->hash[i] && x->grads[i] == y->grads[i],
                "step %d has other bits: mode %d %s: %s", i, (int)y->mode[i], y->why[i],
                j->g.words);
}
static void on_lanes(lab_rank *r) { body(r->w, (job *)r->arg, r->rank); }

/* Runs one program eagerly and with a plan, compares them, and counts the result in *o. */
static void try_program(uint64_t seed, void (*steps)(uint64_t *seed, program *g), outcome *o) {
    static sim s;
    job *j = (job *)lab_zeros(1, sizeof *j);
    lab_how how;
    memset(&how, 0, sizeof how);
    j->g = random_program(seed, steps);
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < 2; i++) j->r[r][i] = (plan_result *)lab_zeros(1, sizeof(plan_result));
    how.lanes = j->g.mode == STREAMS ? 0 : j->g.mode;
    if (j->g.mode == STREAMS) {
        sim_init(&s, j->g.size, 0);
        s.checks = 1;
        plan_sim = &s;
        fsdp_world *w = sim_open(&s);
        CHECK(w != NULL);
        body(w, j, 0);
        W_CHECK(s.races == 0, "%d races: %s: %s", s.races, s.race, w_case);
        CHECK_EQ_INT(sim_close(&s), 0);
        plan_sim = NULL;
    } else {
        lab_run(j->g.size, &how, on_lanes, j);
    }
    const plan_result *y = j->r[0][1];
    o->replayed += y->report.replayed > 0;
    const char *why = y->why[j->g.num_steps - 1];
    const int refused = y->mode[j->g.num_steps - 1] == FSDP_PLAN_REFUSED;
    const int differ = strstr(why, "steps differ") != NULL;
    o->differ += refused && differ;
    o->refused += refused && !differ;
    if (refused && !differ) {
        snprintf(o->why, sizeof o->why, "%s", why);
        h_message("program %llu: %s: %s", (unsigned long long)seed, why, j->g.words);
    }
    for (int r = 0; r < RANKS; r++) free(j->r[r][0]), free(j->r[r][1]);
    free(j);
}

static void many(int programs, void (*steps)(uint64_t *seed, program *g)) {
    const char *one = getenv("PLAN_PROGRAM");
    outcome o;
    memset(&o, 0, sizeof o);
    if (one) programs = 0, try_program(strtoull(one, NULL, 10), steps, &o);
    for (int i = 0; i < programs; i++)
        try_program(lab_hash(h_seed(), (uint64_t)i, 41, 0), steps, &o);
    h_message("%d programs: %d replayed, %d whose steps differ", programs, o.replayed, o.differ);
    CHECK_MSG(!o.refused, "%d refused, the last one: %s", o.refused, o.why);
    CHECK(2 * o.replayed >= programs);
}
TEST(plan_random, programs) { many(W_SLOW ? 40 : 150, random_events); }
TEST(long_plan_random, programs, SECONDS(600) | NIGHT) { many(W_SLOW ? 400 : 4000, random_events); }
TEST(plan_random, microbatches) { many(W_SLOW ? 40 : 250, random_microbatches); }
TEST(long_plan_random, microbatches, SECONDS(600) | NIGHT) {
    many(W_SLOW ? 400 : 4000, random_microbatches);
}
