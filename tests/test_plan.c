/* test_plan.c - plans: recorded, replayed, left. The same bits as by calls, whatever a model has and
   wherever a program leaves its plan.

   SPDX-License-Identifier: MIT */
#include "plan.h"

/* ---- nets ------------------------------------------------------------------------------------ */

static plan_net net_nested(void) { return plan_nested(); }
static plan_net net_chain(void) { return plan_chain(6, 16, 16); }
static plan_net net_scaled(void) {
    plan_net n = plan_chain(6, 8, 12);
    n.scaled = 3;
    return n;
}
static plan_net net_frozen(void) {
    plan_net n = plan_chain(5, 12, 8);
    n.frozen = 1;
    n.frozen_unit = 3;
    return n;
}
static plan_net net_bf16(void) {
    plan_net n = plan_nested();
    n.model.param_dtype = FSDP_BF16;
    return n;
}
static plan_net net_bf16_f32(void) {
    plan_net n = plan_chain(5, 16, 16);
    n.model.param_dtype = FSDP_BF16;
    n.model.reduce_dtype = FSDP_F32;
    return n;
}
static plan_net net_f16(void) {
    plan_net n = plan_chain(4, 16, 16);
    n.model.param_dtype = FSDP_F16;
    return n;
}
static plan_net net_mixed(void) { /* three dtypes in a unit */
    plan_net n = plan_chain(4, 10, 6);
    n.num_params = 4;
    n.rows[2][0] = 7, n.rows[2][1] = 3, n.rows[3][0] = 9;
    n.dtypes[1] = FSDP_F64, n.keep[1] = 1;
    n.dtypes[2] = FSDP_BF16, n.keep[2] = 1;
    n.model.param_dtype = FSDP_BF16;
    n.model.reduce_dtype = FSDP_F32;
    return n;
}
static plan_net net_f64_grads(void) { /* shard gradients are wider than what is reduced */
    plan_net n = plan_nested();
    n.model.grad_dtype = FSDP_F64;
    return n;
}
static plan_net net_hsdp(void) {
    plan_net n = plan_nested();
    n.replicas = 2;
    return n;
}
static plan_net net_hsdp_bf16(void) {
    plan_net n = plan_chain(5, 16, 16);
    n.replicas = 2;
    n.model.param_dtype = FSDP_BF16;
    n.model.reduce_dtype = FSDP_F32;
    return n;
}
static plan_net net_ddp(void) {
    plan_net n = plan_chain(5, 16, 8);
    n.replicas = -1; /* all ranks */
    return n;
}
static plan_net net_never(void) { /* unit 0 stays open around the others */
    plan_net n = plan_chain(4, 16, 16);
    n.never = 1;
    n.num_calls = 0;
    plan_call(&n, 0, FSDP_CALL_PRE_FORWARD);
    for (int u = 1; u < 4; u++) plan_pair(&n, u, 0);
    plan_call(&n, 0, FSDP_CALL_POST_FORWARD);
    plan_call(&n, 0, FSDP_CALL_PRE_BACKWARD);
    for (int u = 3; u > 0; u--) plan_pair(&n, u, 1);
    plan_call(&n, 0, FSDP_CALL_POST_BACKWARD);
    return n;
}
static plan_net net_half(void) { /* half of the parameters stays after forward */
    plan_net n = plan_chain(4, 16, 16);
    n.model.reshard_after_forward = 2;
    return n;
}
static plan_net net_no_reshard(void) {
    plan_net n = plan_chain(4, 16, 16);
    n.sets = PLAN_NO_RESHARD;
    return n;
}
static plan_net net_no_unshard(void) {
    plan_net n = plan_chain(4, 16, 16);
    n.sets = PLAN_NO_UNSHARD;
    return n;
}
static plan_net net_recompute(void) { /* a forward again, inside of the unit's own backward */
    plan_net n = plan_chain(4, 16, 16);
    n.num_calls = 0;
    for (int u = 0; u < 4; u++) plan_pair(&n, u, 0);
    for (int u = 3; u >= 0; u--) {
        plan_call(&n, u, FSDP_CALL_PRE_BACKWARD);
        plan_pair(&n, u, 0);
        plan_call(&n, u, FSDP_CALL_POST_BACKWARD);
    }
    return n;
}
static plan_net net_recompute_two(void) { /* of two units, before their backward */
    plan_net n = plan_chain(5, 16, 16);
    n.num_calls = 0;
    for (int u = 0; u < 5; u++) plan_pair(&n, u, 0);
    plan_pair(&n, 4, 1);
    for (int u = 2; u >= 0; u -= 2) {
        plan_pair(&n, u, 0);
        plan_pair(&n, u + 1, 0);
        plan_pair(&n, u + 1, 1);
        plan_pair(&n, u, 1);
    }
    return n;
}
static plan_net net_explicit(void) { /* the program gathers ahead, waits and frees by itself */
    plan_net n = plan_chain(4, 16, 16);
    n.num_calls = 0;
    plan_call(&n, 0, FSDP_CALL_UNSHARD);
    plan_call(&n, 1, FSDP_CALL_UNSHARD);
    plan_call(&n, 1, FSDP_CALL_WAIT);
    for (int u = 0; u < 4; u++) {
        plan_pair(&n, u, 0);
        if (u == 1) plan_call(&n, 3, FSDP_CALL_UNSHARD);
        if (u == 2) plan_call(&n, 1, FSDP_CALL_RESHARD);
    }
    for (int u = 3; u >= 0; u--) {
        if (u == 2) plan_call(&n, 0, FSDP_CALL_UNSHARD);
        plan_pair(&n, u, 1);
        if (u == 2) plan_call(&n, 0, FSDP_CALL_WAIT);
    }
    return n;
}
static plan_net net_lists(void) {
    plan_net n = plan_chain(5, 16, 16);
    n.sets = PLAN_LISTS;
    return n;
}
static plan_net net_implicit(void) {
    plan_net n = plan_nested();
    n.model.implicit_prefetch = FSDP_PREFETCH_ALWAYS;
    return n;
}
static plan_net net_strings(void) {
    plan_net n = plan_chain(4, 9, 5);
    n.sets = PLAN_STRINGS;
    return n;
}
static plan_net net_offload(void) {
    plan_net n = plan_chain(4, 16, 16);
    n.model.cpu_offload = 1;
    return n;
}
static plan_net net_sum_hooks(void) {
    plan_net n = plan_chain(4, 16, 16);
    n.sets = PLAN_SUM_HOOK;
    return n;
}
static plan_net net_grad_hooks(void) {
    plan_net n = plan_chain(4, 16, 16);
    n.sets = PLAN_GRAD_HOOK;
    return n;
}
static plan_net net_custom(void) {
    plan_net n = plan_chain(5, 16, 16);
    n.sets = PLAN_CUSTOM;
    return n;
}
static plan_net net_custom_hsdp(void) {
    plan_net n = net_custom();
    n.replicas = 2;
    return n;
}
static plan_net net_few_rows(void) { /* ranks without rows, parameters without elements */
    plan_net n = plan_chain(4, 2, 3);
    n.num_params = 4;
    n.rows[2][0] = 0, n.rows[2][1] = 7, n.rows[3][0] = 1;
    return n;
}
static plan_net net_packed(void) { /* gathered beside, and copied out */
    plan_net n = plan_chain(4, 16, 16);
    n.model.direct_min = FSDP_DIRECT_NEVER;
    return n;
}
static plan_net net_direct(void) {
    plan_net n = plan_chain(4, 16, 16);
    n.model.direct_min = 1;
    return n;
}
static plan_net net_unused(void) { /* refused: what is reduced depends on what is used */
    plan_net n = plan_chain(3, 16, 16);
    n.sets = PLAN_UNUSED;
    return n;
}
static plan_net net_overwrite(void) {
    plan_net n = plan_chain(3, 16, 16);
    n.model.grads_overwrite = 1;
    return n;
}

static const struct named_net {
    const char *name;
    plan_net (*make)(void);
    int refused; /* 1: everywhere; 2: on streams; 3: on lanes and streams with the bytes of calls */
} nets[] = {
    {"nested", net_nested, 0},
    {"chain", net_chain, 0},
    {"scaled", net_scaled, 0},
    {"frozen", net_frozen, 0},
    {"bf16", net_bf16, 0},
    {"bf16_f32", net_bf16_f32, 0},
    {"f16", net_f16, 0},
    {"mixed", net_mixed, 0},
    {"f64_grads", net_f64_grads, 0},
    {"hsdp", net_hsdp, 0},
    {"hsdp_bf16", net_hsdp_bf16, 0},
    {"ddp", net_ddp, 0},
    {"never", net_never, 0},
    {"half", net_half, 0},
    /* What is held at the end of a step has slots that others do not use before. */
    {"no_reshard", net_no_reshard, 3},
    {"no_unshard", net_no_unshard, 0},
    {"recompute", net_recompute, 0},
    {"recompute_two", net_recompute_two, 0},
    {"explicit", net_explicit, 0},
    {"lists", net_lists, 0},
    {"implicit", net_implicit, 0},
    {"strings", net_strings, 0},
    {"offload", net_offload, 0},
    {"sum_hooks", net_sum_hooks, 0},
    {"grad_hooks", net_grad_hooks, 2},
    {"custom", net_custom, 0},
    {"custom_hsdp", net_custom_hsdp, 0},
    {"few_rows", net_few_rows, 0},
    {"packed", net_packed, 0},
    {"direct", net_direct, 0},
    {"unused", net_unused, 1},
    {"overwrite", net_overwrite, 1},
};
enum { NETS = sizeof nets / sizeof *nets };

/* ---- modes, and sets of passes --------------------------------------------------------------- */

enum { INLINE, LANE, LANES, STREAMS, PLAIN, MODES };
static const char *const mode_names[MODES] = {"inline", "1_lane", "2_lanes", "streams", "plain"};

enum { ALL_PASSES = (1 << FSDP_PASS_COUNT) - 1, USUAL_PASSES = ALL_PASSES & ~(1 << FSDP_PASS_ONCE) };
static const struct {
    const char *name;
    uint32_t without;
    int32_t ahead;
    int tight; /* no more bytes than by calls */
    int64_t bucket, first;
} sets[] = {
    {"all", 0, 0, 0, 0, 0},
    {"tight", 0, 0, 1, 0, 0},
    {"none", ALL_PASSES, 0, 0, 0, 0},
    {"no_bucket", 1u << FSDP_PASS_BUCKET, 0, 0, 0, 0},
    {"no_keep", 1u << FSDP_PASS_KEEP, 0, 0, 0, 0},
    {"no_ahead", 1u << FSDP_PASS_AHEAD, 0, 0, 0, 0},
    {"no_arena", 1u << FSDP_PASS_ARENA, 0, 0, 0, 0},
    {"two_ahead", 0, 2, 0, 0, 0},
    {"small_buckets", 0, 1, 0, 2500, 1},
    {"arena_alone", USUAL_PASSES & ~(1u << FSDP_PASS_ARENA), 0, 0, 0, 0},
    {"keep_alone", USUAL_PASSES & ~(1u << FSDP_PASS_KEEP), 0, 0, 0, 0},
    {"tight_no_arena", 1u << FSDP_PASS_ARENA, 0, 1, 0, 0},
};
enum { SETS = sizeof sets / sizeof *sets, MOST_RANKS = 8 };

/* ---- the same training, by calls and planned ------------------------------------------------- */

typedef struct pjob {
    const struct named_net *named;
    plan_net net;
    int mode, size, steps, quick;
    plan_result *by_calls[MOST_RANKS], *planned[MOST_RANKS]; /* of the set at hand */
} pjob;

static pjob *new_job(const struct named_net *named, int mode, int size) {
    pjob *j = (pjob *)lab_zeros(1, sizeof *j);
    j->named = named;
    j->net = named->make();
    j->net.name = named->name;
    if (j->net.replicas < 0) j->net.replicas = size;
    j->mode = mode;
    j->size = size;
    j->steps = 5;
    for (int r = 0; r < MOST_RANKS; r++) {
        j->by_calls[r] = (plan_result *)lab_zeros(1, sizeof(plan_result));
        j->planned[r] = (plan_result *)lab_zeros(1, sizeof(plan_result));
    }
    return j;
}
static void end_job(pjob *j) {
    for (int r = 0; r < MOST_RANKS; r++) free(j->by_calls[r]), free(j->planned[r]);
    free(j);
}

/* Does this net exist in a world of this size? */
static int fits(const plan_net *n, int size) {
    if (n->replicas > 0 && (size % n->replicas || size == 1)) return 0;
    int shards = n->replicas > 0 ? size / n->replicas : size;
    return n->model.reshard_after_forward < 2 || shards % n->model.reshard_after_forward == 0;
}

static uint64_t last_calls(const plan_result *r, int steps, int kind) {
    return r->counters[steps - 1].calls[kind] - r->counters[steps - 2].calls[kind];
}
static uint64_t last_bytes(const plan_result *r, int steps, int kind) {
    return r->counters[steps - 1].bytes[kind] - r->counters[steps - 2].bytes[kind];
}

static void same_bits(const plan_result *a, const plan_result *b, int steps) {
    for (int i = 0; i < steps; i++) {
        W_CHECK(a->hash[i] == b->hash[i] && a->grads[i] == b->grads[i],
                "step %d has other bits, mode %d %s", i, (int)b->mode[i], b->why[i]);
        W_CHECK(!i || a->hash[i] != a->hash[i - 1], "step %d changes nothing", i);
    }
}

/* What the report says is what the counters and fsdp_model_memory say. */
static void same_numbers(const plan_result *a, const plan_result *b, int steps, int widens) {
    const fsdp_plan_report *rep = &b->report;
    const plan_result *r[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        uint64_t all_gathers = last_calls(r[i], steps, FSDP_OP_ALL_GATHER);
        W_CHECK(all_gathers == (uint64_t)rep->gathers[i], "%d: %llu gathers, report %d", i,
                (unsigned long long)all_gathers, rep->gathers[i]);
        W_CHECK(last_bytes(r[i], steps, FSDP_OP_ALL_GATHER) == rep->gather_bytes[i],
                "%d: bytes of gathers: %llu, report %llu", i,
                (unsigned long long)last_bytes(r[i], steps, FSDP_OP_ALL_GATHER),
                (unsigned long long)rep->gather_bytes[i]);
        W_CHECK(last_calls(r[i], steps, FSDP_OP_REDUCE_SCATTER) == (uint64_t)rep->reductions[i],
                "%d: %llu reductions, report %d", i,
                (unsigned long long)last_calls(r[i], steps, FSDP_OP_REDUCE_SCATTER),
                rep->reductions[i]);
        W_CHECK(last_calls(r[i], steps, FSDP_OP_ALL_REDUCE) == (uint64_t)rep->replicas[i],
                "%d: %llu all_reduces, report %d", i,
                (unsigned long long)last_calls(r[i], steps, FSDP_OP_ALL_REDUCE), rep->replicas[i]);
        uint64_t reduced = last_bytes(r[i], steps, FSDP_OP_REDUCE_SCATTER) +
                           last_bytes(r[i], steps, FSDP_OP_ALL_REDUCE);
        W_CHECK(reduced == rep->reduce_bytes[i], "%d: bytes of reductions: %llu, report %llu", i,
                (unsigned long long)reduced, (unsigned long long)rep->reduce_bytes[i]);
        W_CHECK(plan_slots(&r[i]->memory) == rep->bytes[i], "%d: slots have %lld bytes, report %lld, %d kinds",
                i, (long long)plan_slots(&r[i]->memory), (long long)rep->bytes[i], b->count);
    }
    W_CHECK(rep->gathers[1] <= rep->gathers[0] && rep->gather_bytes[1] <= rep->gather_bytes[0] &&
                rep->reductions[1] <= rep->reductions[0] && rep->replicas[1] <= rep->replicas[0],
            "more than by calls");
    W_CHECK(rep->bound <= rep->bytes[1], "less than the bound");
    uint64_t reduced[2] = {last_bytes(a, steps, FSDP_OP_REDUCE_SCATTER),
                           last_bytes(b, steps, FSDP_OP_REDUCE_SCATTER)};
    /* What is summed before it is sent is sent in the wider dtype. */
    W_CHECK(reduced[1] == reduced[0] ||
                (widens && reduced[1] > reduced[0] && reduced[1] <= 2 * reduced[0]),
            "%llu bytes are reduced, by calls %llu", (unsigned long long)reduced[1],
            (unsigned long long)reduced[0]);
}

static void check_planned(const pjob *j, const plan_result *a, const plan_result *b, int refused) {
    const fsdp_plan_report *rep = &b->report;
    int last = j->steps - 1;
    same_bits(a, b, j->steps);
    if (refused) {
        W_CHECK(b->mode[last] == FSDP_PLAN_REFUSED && b->why[last][0] && b->count == 0,
                "it was not refused: mode %d", (int)b->mode[last]);
        W_CHECK(plan_slots(&b->memory) == plan_slots(&a->memory), "it has other slots");
        return;
    }
    W_CHECK(b->mode[last] == FSDP_PLAN_REPLAYING && !b->why[last][0], "mode %d: %s",
            (int)b->mode[last], b->why[last]);
    W_CHECK(rep->left == 0 && rep->recorded == (uint64_t)b->count &&
                rep->replayed == (uint64_t)j->steps - 1 - rep->recorded,
            "left %d, recorded %d, replayed %d", (int)rep->left, (int)rep->recorded,
            (int)rep->replayed);
    W_CHECK(b->counters[last].allocations == b->counters[last - 1].allocations,
            "a replayed step allocates");
    int widens = j->net.model.param_dtype && (j->net.model.param_dtype == FSDP_F16 ||
                                              j->net.model.reduce_dtype == FSDP_F32);
    same_numbers(a, b, j->steps, widens);
}

static fsdp_plan_desc desc_of(int set, const plan_result *by_calls) {
    fsdp_plan_desc d = FSDP_ZERO;
    d.without = sets[set].without;
    d.ahead = sets[set].ahead;
    d.bucket_bytes = sets[set].bucket;
    d.first_bucket_bytes = sets[set].first;
    if (sets[set].tight) d.most_bytes = plan_slots(&by_calls->memory);
    return d;
}

static void with_sets(fsdp_world *w, pjob *j, int rank) {
    int refused = j->named->refused == 1 || (j->named->refused == 2 && lib_on_streams(w));
    plan_result *a = j->by_calls[rank], *b = j->planned[rank];
    snprintf(w_case, sizeof w_case, "%s, %s, W=%d, by calls", j->named->name, mode_names[j->mode],
             j->size);
    plan_train(w, &j->net, NULL, 0, j->steps, a);
    for (int set = 0; set < (j->quick ? 2 : SETS); set++) {
        fsdp_plan_desc d = desc_of(set, a);
        snprintf(w_case, sizeof w_case, "%s, %s, W=%d, %s", j->named->name, mode_names[j->mode],
                 j->size, sets[set].name);
        int64_t calls[4];
        memcpy(calls, plan_called, sizeof calls);
        plan_train(w, &j->net, &d, 1, j->steps, b);
        int may_not = j->named->refused == 3 && sets[set].tight && j->mode != INLINE &&
                      b->mode[j->steps - 1] == FSDP_PLAN_REFUSED;
        check_planned(j, a, b, refused || may_not);
        if (sets[set].tight && !refused && !may_not)
            W_CHECK(b->report.bytes[1] <= d.most_bytes, "%lld bytes, allowed %lld",
                    (long long)b->report.bytes[1], (long long)d.most_bytes);
    }
}

static void on_lanes(lab_rank *r) { with_sets(r->w, (pjob *)r->arg, r->rank); }

/* One process plays a rank; the device tells of races. */
static void on_streams(pjob *j) {
    static sim s;
    sim_init(&s, j->size, j->size - 1);
    s.checks = 1;
    plan_sim = &s;
    fsdp_world *w = sim_open(&s);
    CHECK(w != NULL);
    with_sets(w, j, 0);
    W_CHECK(s.races == 0, "%d races: %s", s.races, s.race);
    CHECK_EQ_INT(sim_close(&s), 0);
    plan_sim = NULL;
}

static void run_mode(const struct named_net *named, int mode, int size, int quick) {
    static fsdp_comm_ops plain;
    lab_how how;
    pjob *j = new_job(named, mode, size);
    j->quick = quick;
    memset(&how, 0, sizeof how);
    how.lanes = mode == LANE ? 1 : mode == LANES ? 2 : 0;
    plain = w_plain();
    if (mode == PLAIN) how.comm_ops = &plain;
    if (fits(&j->net, size) && mode == STREAMS) on_streams(j);
    else if (fits(&j->net, size)) lab_run(size, &how, on_lanes, j);
    end_job(j);
}

/* Each net in two modes; all of them are in long_plan. */
TEST_P(plan, net, nets) {
    int at = (int)(row - nets), size = row->make().replicas ? 4 : 2;
    run_mode(row, at % 2 ? LANES : INLINE, size, 1);
    run_mode(row, STREAMS, size, 1);
}
TEST_P_TIMEOUT(long_plan, net, nets, 300) {
    for (int mode = 0; mode < MODES; mode++)
        for (int size = 1; size <= 4; size++) run_mode(row, mode, size, 0);
}

/* ---- steps that leave their plan ------------------------------------------------------------- */

enum {
    SKIP_VISIT,
    VISIT_TWICE,
    EVALUATE,
    UNSHARD,
    SET_LAST,
    SET_FACTOR,
    SET_SYNC,
    RESET,
    PAUSE,
    FORGET,
    DESTROY,
    DEVIATIONS
};
static const struct {
    const char *name;
    int what, lead; /* steps that are as usual, before each that is not */
    const char *why; /* a word of it; NULL: the step does not leave its plan by itself */
} deviations[DEVIATIONS] = {
    {"skip_a_visit", SKIP_VISIT, 2, "expected"},
    {"visit_twice", VISIT_TWICE, 1, "expected"},
    {"evaluate", EVALUATE, 1, "options changed"},
    {"unshard", UNSHARD, 1, "expected"},
    {"set_is_last_backward", SET_LAST, 1, "options changed"},
    {"set_divide_factor", SET_FACTOR, 1, NULL}, /* only possible between visits */
    {"set_gradient_sync", SET_SYNC, 2, NULL},
    {"reset", RESET, 1, NULL},
    {"pause", PAUSE, 1, NULL},
    {"forget", FORGET, 1, NULL},
    {"destroy", DESTROY, 2, NULL},
};

/* What a call returned is part of what has to be the same. */
static fsdp_status attempt(plan_bed *b, fsdp_status status) {
    lab_fold(&b->hash, &status, sizeof status);
    return status;
}
static void attempt_call(plan_bed *b, int i) {
    int u = b->net->calls[i].unit, call = b->net->calls[i].call;
    fsdp_training_state state = fsdp_unit_state(b->unit[u]);
    lab_fold(&b->hash, &state, sizeof state);
    if (call == FSDP_CALL_POST_FORWARD && state == FSDP_STATE_FORWARD) plan_look(b, u, i, 0);
    if (call == FSDP_CALL_POST_BACKWARD && state == FSDP_STATE_PRE_BACKWARD) plan_look(b, u, i, 1);
    if (attempt(b, plan_hook(b, u, call))) return;
    if (call == FSDP_CALL_PRE_FORWARD) plan_look(b, u, i, 0);
    if (call == FSDP_CALL_PRE_BACKWARD) plan_look(b, u, i, 1);
}
static void attempt_forward(plan_bed *b, int u) {
    if (attempt(b, fsdp_pre_forward(b->unit[u]))) return;
    plan_look(b, u, 0, 0);
    attempt(b, fsdp_post_forward(b->unit[u]));
}

typedef struct ljob {
    plan_net net;
    fsdp_plan_desc desc;
    int what, lead, mode, size, stride;
    const char *why;
    plan_result *r[MOST_RANKS][2];
} ljob;

/* Something else happens before call `at`. */
static void deviate(plan_bed *b, const ljob *j, int at) {
    const plan_net *n = b->net;
    int visit = at, skipped[2] = {-9, -9};
    int v = at < n->num_calls ? n->calls[at].unit : 0;
    if (fsdp_unit_state(b->unit[v]) != FSDP_STATE_IDLE) v = (v + 1) % n->num_units;
    switch (j->what) {
    case SKIP_VISIT:
        while (visit < n->num_calls && n->calls[visit].call != FSDP_CALL_PRE_FORWARD &&
               n->calls[visit].call != FSDP_CALL_PRE_BACKWARD)
            visit++;
        if (visit >= n->num_calls) break;
        skipped[0] = visit;
        if (n->calls[visit].call == FSDP_CALL_PRE_FORWARD) skipped[1] = n->num_calls - 2 - visit;
        break;
    case VISIT_TWICE: attempt_forward(b, v); break;
    case EVALUATE:
        CALL(b->w, fsdp_set_grad_enabled(b->model, 0));
        attempt_forward(b, v);
        CALL(b->w, fsdp_set_grad_enabled(b->model, 1));
        break;
    case UNSHARD: attempt(b, fsdp_unshard(b->unit[v])); break;
    case SET_LAST: CALL(b->w, fsdp_set_is_last_backward(b->model, 0)); break;
    case SET_FACTOR: attempt(b, fsdp_set_gradient_divide_factor(b->model, NULL, 3)); break;
    case SET_SYNC: attempt(b, fsdp_set_requires_gradient_sync(b->model, NULL, 0)); break;
    case RESET:
        CALL(b->w, fsdp_model_reset(b->model));
        plan_calls(b, 0, n->num_calls);
        return;
    case PAUSE:
        if (b->plan) CALL(b->w, fsdp_plan_pause(b->plan, 1));
        break;
    case FORGET:
        if (b->plan) CALL(b->w, fsdp_plan_forget(b->plan));
        break;
    default:
        fsdp_plan_destroy(b->plan);
        b->plan = NULL;
    }
    for (int i = at; i < n->num_calls; i++)
        if (i / 2 != skipped[0] / 2 && i / 2 != skipped[1] / 2) attempt_call(b, i);
}

static void step_aside(plan_bed *b, const ljob *j, int at, int planned, plan_result *out) {
    plan_calls(b, 0, at);
    if (planned && at > 0)
        W_CHECK(fsdp_plan_state(b->plan) == FSDP_PLAN_REPLAYING, "call %d: mode %d: %s", at,
                (int)fsdp_plan_state(b->plan), fsdp_plan_why(b->plan));
    deviate(b, j, at);
    if (j->what == SET_LAST) CALL(b->w, fsdp_set_is_last_backward(b->model, 1));
    attempt(b, fsdp_finalize_backward(b->model));
    int inside = at > 0 && at + 1 < b->net->num_calls;
    if (planned && j->why && inside)
        W_CHECK(fsdp_plan_state(b->plan) == FSDP_PLAN_BY_CALLS &&
                    strstr(fsdp_plan_why(b->plan), j->why),
                "call %d: mode %d: %s", at, (int)fsdp_plan_state(b->plan), fsdp_plan_why(b->plan));
    if (j->what == SET_FACTOR) attempt(b, fsdp_set_gradient_divide_factor(b->model, NULL, 0));
    if (j->what == SET_SYNC) attempt(b, fsdp_set_requires_gradient_sync(b->model, NULL, 1));
    if (planned && j->what == PAUSE) CALL(b->w, fsdp_plan_pause(b->plan, 0));
    plan_step_end(b, out);
    if (planned && j->what == DESTROY) CALL(b->w, fsdp_plan_create(b->model, &j->desc, &b->plan));
}

static void leave_run(fsdp_world *w, ljob *j, int planned, plan_result *out) {
    plan_bed b;
    memset(out, 0, sizeof *out);
    plan_open(&b, &j->net, w);
    b.s = plan_sim;
    b.is_partial = j->what == SET_SYNC || j->what == SKIP_VISIT;
    if (planned) CALL(w, fsdp_plan_create(b.model, &j->desc, &b.plan));
    plan_step(&b, out);
    for (int at = 0; at <= j->net.num_calls; at += j->stride) {
        snprintf(w_case, sizeof w_case, "%s, %s, '%s' before call %d, %s", j->net.name,
                 mode_names[j->mode], deviations[j->what].name, at,
                 planned ? "planned" : "by calls");
        for (int i = 0; i < j->lead; i++) plan_step(&b, out);
        step_aside(&b, j, at, planned, out);
    }
    for (int i = 0; i < 4; i++) plan_step(&b, out);
    out->count = b.step;
    if (planned)
        W_CHECK(out->mode[b.step - 1] == FSDP_PLAN_REPLAYING, "plans do not go on: mode %d: %s",
                (int)out->mode[b.step - 1], out->why[b.step - 1]);
    fsdp_model_destroy(b.model);
}

static void leave_body(fsdp_world *w, ljob *j, int rank) {
    plan_result *a = j->r[rank][0], *b = j->r[rank][1];
    leave_run(w, j, 0, a);
    leave_run(w, j, 1, b);
    for (int i = 0; i < a->count; i++)
        W_CHECK(a->hash[i] == b->hash[i] && a->grads[i] == b->grads[i],
                "step %d (call %d) has other bits: %s", i,
                (i - 1) / (j->lead + 1) * j->stride, b->why[i]);
}
static void leave_on_lanes(lab_rank *r) { leave_body(r->w, (ljob *)r->arg, r->rank); }

static void leave_mode(plan_net net, int what, int mode, int stride, const fsdp_plan_desc *desc) {
    ljob *j = (ljob *)lab_zeros(1, sizeof *j);
    lab_how how;
    j->net = net;
    j->what = what, j->lead = deviations[what].lead, j->why = deviations[what].why;
    j->mode = mode, j->stride = stride;
    j->size = net.replicas ? 4 : 2;
    if (desc) j->desc = *desc;
    memset(&how, 0, sizeof how);
    how.lanes = mode == LANE ? 1 : mode == LANES ? 2 : 0;
    for (int r = 0; r < MOST_RANKS; r++)
        for (int i = 0; i < 2; i++) j->r[r][i] = (plan_result *)lab_zeros(1, sizeof(plan_result));
    if (mode == STREAMS) {
        static sim s;
        sim_init(&s, j->size, 0);
        s.checks = 1;
        plan_sim = &s;
        fsdp_world *w = sim_open(&s);
        CHECK(w != NULL);
        leave_body(w, j, 0);
        W_CHECK(s.races == 0, "%d races: %s", s.races, s.race);
        CHECK_EQ_INT(sim_close(&s), 0);
        plan_sim = NULL;
    } else {
        lab_run(j->size, &how, leave_on_lanes, j);
    }
    for (int r = 0; r < MOST_RANKS; r++) free(j->r[r][0]), free(j->r[r][1]);
    free(j);
}

/* Every call of the nested step is in long_plan. */
TEST_P(plan, leave_at_every_call, deviations) {
    for (int mode = INLINE; mode <= STREAMS; mode++)
        leave_mode(net_nested(), row->what, mode, 9 + mode, NULL);
    leave_mode(net_chain(), row->what, INLINE, 3, NULL);
}
TEST_P_TIMEOUT(long_plan, leave_at_every_call, deviations, 300) {
    fsdp_plan_desc tight = FSDP_ZERO;
    tight.most_bytes = 8192;
    for (int mode = INLINE; mode <= STREAMS; mode++) {
        leave_mode(net_nested(), row->what, mode, 1, NULL);
        leave_mode(net_nested(), row->what, mode, 1, mode == INLINE ? &tight : NULL);
        leave_mode(net_chain(), row->what, mode, 1, NULL);
        leave_mode(net_bf16_f32(), row->what, mode, 1, NULL);
        leave_mode(net_hsdp_bf16(), row->what, mode, 1, NULL);
        leave_mode(net_frozen(), row->what, mode, 1, NULL);
    }
}
