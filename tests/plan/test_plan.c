/* test_plan.c - plans: recorded, replayed, left. Each test compares the bits with those of eager
   steps, for many models, and for programs that leave their plan at any call.

   SPDX-License-Identifier: MIT */
#define TAGS TSAN
#include "harness.h"
#include "library.c"
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
static plan_net net_mixed(void) { /* three dtypes in a unit, of which two are trained */
    plan_net n = plan_chain(4, 10, 6);
    n.num_params = 4;
    n.rows[2][0] = 7, n.rows[2][1] = 3, n.rows[3][0] = 9;
    n.keep[1] = 1;
    n.dtypes[2] = FSDP_F64, n.keep[2] = 1, n.frozen = 3;
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
static plan_net net_unwaited(void) { /* gathered during a backward that waits for nothing */
    plan_net n = net_no_unshard();
    for (int i = n.num_calls - 1; n.calls[i].call != FSDP_CALL_PRE_FORWARD; i--) {
        if (n.calls[i].call != FSDP_CALL_POST_BACKWARD) continue;
        memmove(&n.calls[i + 1], &n.calls[i], (size_t)(n.num_calls - i) * sizeof *n.calls);
        n.calls[i].call = FSDP_CALL_UNSHARD;
        n.num_calls++;
    }
    return n;
}
static plan_net net_recompute(void) { /* a second forward, during the unit's own backward */
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
static plan_net net_recompute_two(void) { /* two units recompute before their backward */
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
static plan_net net_sum_hooks_hsdp(void) {
    plan_net n = net_sum_hooks();
    n.replicas = 2;
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
static plan_net net_no_rows(void) { /* a unit without elements, and casts */
    plan_net n = net_mixed();
    n.empty = 2;
    return n;
}
static plan_net net_packed(void) { /* gathered into a packed buffer, and copied out */
    plan_net n = plan_chain(4, 16, 16);
    n.model.direct_min = FSDP_DIRECT_NEVER;
    return n;
}
static plan_net net_direct(void) {
    plan_net n = plan_chain(4, 16, 16);
    n.model.direct_min = 1;
    return n;
}
static plan_net net_some_used(void) { /* on each rank and in each step other ones */
    plan_net n = plan_chain(5, 16, 8);
    n.num_params = 3;
    n.rows[2][0] = 5, n.rows[2][1] = 4;
    n.sets = PLAN_SOME_USED;
    return n;
}
static plan_net net_some_used_hsdp(void) {
    plan_net n = net_some_used();
    n.replicas = 2;
    n.model.param_dtype = FSDP_BF16;
    n.model.reduce_dtype = FSDP_F32;
    return n;
}
static plan_net net_unused(void) { /* in each step other ones, sometimes none of a unit */
    plan_net n = net_some_used();
    n.num_params = 2;
    n.sets = PLAN_UNUSED;
    return n;
}
static plan_net net_unused_hooks(void) { /* which are not called for parameters without gradient */
    plan_net n = net_unused();
    n.sets |= PLAN_GRAD_HOOK;
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
    /* Units that hold parameters at the end of a step have slots that no other unit uses before. */
    {"no_reshard", net_no_reshard, 3},
    {"no_unshard", net_no_unshard, 0},
    {"unwaited", net_unwaited, 0},
    {"recompute", net_recompute, 0},
    {"recompute_two", net_recompute_two, 0},
    {"explicit", net_explicit, 0},
    {"lists", net_lists, 0},
    {"implicit", net_implicit, 0},
    {"strings", net_strings, 0},
    {"offload", net_offload, 0},
    {"sum_hooks", net_sum_hooks, 0},
    {"sum_hooks_hsdp", net_sum_hooks_hsdp, 0},
    {"grad_hooks", net_grad_hooks, 2},
    {"custom", net_custom, 0},
    {"custom_hsdp", net_custom_hsdp, 0},
    {"few_rows", net_few_rows, 0},
    {"no_rows", net_no_rows, 0},
    {"packed", net_packed, 0},
    {"direct", net_direct, 0},
    {"some_used", net_some_used, 0},
    {"some_used_hsdp", net_some_used_hsdp, 0},
    {"unused", net_unused, 0},
    {"unused_hooks", net_unused_hooks, 2},
};
enum { NETS = sizeof nets / sizeof *nets };

/* ---- modes, and sets of passes --------------------------------------------------------------- */

enum { INLINE, LANE, LANES, STREAMS, PLAIN, MODES };
static const char *const mode_names[MODES] = {"inline", "1_lane", "2_lanes", "streams", "plain"};

enum {
    ALL_PASSES = (1 << FSDP_PASS_COUNT) - 1,
    USUAL_PASSES = ALL_PASSES & ~(1 << FSDP_PASS_ONCE)
};
static const struct {
    const char *name;
    uint32_t without;
    int32_t ahead;
    int tight; /* no more bytes than eagerly */
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

/* ---- the same training, eager and planned ---------------------------------------------------- */

typedef struct pjob {
    const struct named_net *named;
    plan_net net;
    int mode, size, steps, quick;
    plan_result *eager[MOST_RANKS], *planned[MOST_RANKS]; /* results for the current set */
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
        j->eager[r] = (plan_result *)lab_zeros(1, sizeof(plan_result));
        j->planned[r] = (plan_result *)lab_zeros(1, sizeof(plan_result));
    }
    return j;
}
static void end_job(pjob *j) {
    for (int r = 0; r < MOST_RANKS; r++) free(j->eager[r]), free(j->planned[r]);
    free(j);
}

/* Returns 1 if a world of this size can have the net. */
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

/* Checks that the report agrees with the counters and with fsdp_model_memory. */
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
        W_CHECK(plan_slots(&r[i]->memory) == rep->bytes[i],
                "%d: slots have %lld bytes, report %lld, %d kinds", i,
                (long long)plan_slots(&r[i]->memory), (long long)rep->bytes[i], b->count);
    }
    W_CHECK(rep->gathers[1] <= rep->gathers[0] && rep->gather_bytes[1] <= rep->gather_bytes[0] &&
                rep->reductions[1] <= rep->reductions[0] && rep->replicas[1] <= rep->replicas[0],
            "more than by calls");
    W_CHECK(rep->bound <= rep->bytes[1], "less than the bound");
    uint64_t reduced[2] = {last_bytes(a, steps, FSDP_OP_REDUCE_SCATTER),
                           last_bytes(b, steps, FSDP_OP_REDUCE_SCATTER)};
    /* Gradients that are summed before they are sent are sent in the wider dtype. */
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
    int widens = j->net.model.param_dtype &&
                 (j->net.model.param_dtype == FSDP_F16 || j->net.model.reduce_dtype == FSDP_F32);
    same_numbers(a, b, j->steps, widens);
}

static fsdp_plan_desc desc_of(int set, const plan_result *eager) {
    fsdp_plan_desc d = FSDP_ZERO;
    d.without = sets[set].without;
    d.ahead = sets[set].ahead;
    d.bucket_bytes = sets[set].bucket;
    d.first_bucket_bytes = sets[set].first;
    if (sets[set].tight) d.most_bytes = plan_slots(&eager->memory);
    return d;
}

static void with_sets(fsdp_world *w, pjob *j, int rank) {
    int refused = j->named->refused == 1 || (j->named->refused == 2 && lib_on_streams(w));
    plan_result *a = j->eager[rank], *b = j->planned[rank];
    snprintf(w_case, sizeof w_case, "%s, %s, W=%d, by calls", j->named->name, mode_names[j->mode],
             j->size);
    int64_t eager[3], before[3];
    for (int i = 0; i < 3; i++) before[i] = plan_counted(i);
    plan_train(w, &j->net, NULL, 0, j->steps, a);
    for (int i = 0; i < 3; i++) eager[i] = plan_counted(i) - before[i];
    for (int set = 0; set < (j->quick ? 2 : SETS); set++) {
        fsdp_plan_desc d = desc_of(set, a);
        snprintf(w_case, sizeof w_case, "%s, %s, W=%d, %s", j->named->name, mode_names[j->mode],
                 j->size, sets[set].name);
        for (int i = 0; i < 3; i++) before[i] = plan_counted(i);
        plan_train(w, &j->net, &d, 1, j->steps, b);
        for (int i = 0; i < 3 && plan_sim; i++) /* functions of the user: once for each unit */
            W_CHECK(plan_counted(i) - before[i] == eager[i], "%d calls of %d, by calls %d",
                    (int)(plan_counted(i) - before[i]), i, (int)eager[i]);
        int may_not = j->named->refused == 3 && sets[set].tight &&
                      (j->mode != INLINE || lib_on_streams(w) || sets[set].without) &&
                      b->mode[j->steps - 1] == FSDP_PLAN_REFUSED;
        check_planned(j, a, b, refused || may_not);
        if (sets[set].tight && !refused && !may_not)
            W_CHECK(b->report.bytes[1] <= d.most_bytes, "%lld bytes, allowed %lld",
                    (long long)b->report.bytes[1], (long long)d.most_bytes);
    }
}

static void on_lanes(lab_rank *r) { with_sets(r->w, (pjob *)r->arg, r->rank); }

/* Runs one rank of a simulated world, whose device reports races. */
static void on_streams(pjob *j) {
    static sim s;
    sim_init(&s, j->size, 0);
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
TEST_P(plan, net, nets, GLOO | NCCL | AT_NIGHT(TSAN)) {
    int at = (int)(row - nets), size = row->make().replicas ? 4 : 2;
    run_mode(row, at % 2 ? LANES : INLINE, size, 1);
    run_mode(row, STREAMS, size, 1);
}
TEST_P(long_plan, net, nets, SECONDS(300) | NIGHT) {
    for (int mode = 0; mode < MODES; mode++)
        for (int size = 1; size <= 4; size += 1 + W_SLOW) run_mode(row, mode, size, W_SLOW);
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
    SET_RESHARD,
    FREEZE,
    RESET,
    PAUSE,
    FORGET,
    DESTROY,
    DEVIATIONS
};
static const struct {
    const char *name;
    int what, lead;  /* steps that are as usual, before each that is not */
    const char *why; /* a word of it; NULL: the step does not leave its plan by itself */
} deviations[DEVIATIONS] = {
    {"skip_a_visit", SKIP_VISIT, 2, "expected"},
    {"visit_twice", VISIT_TWICE, 1, "expected"},
    {"evaluate", EVALUATE, 1, "options changed"},
    {"unshard", UNSHARD, 1, "expected"},
    {"set_is_last_backward", SET_LAST, 1, "options changed"},
    {"set_divide_factor", SET_FACTOR, 1, NULL}, /* only possible between visits */
    {"set_gradient_sync", SET_SYNC, 2, NULL},
    {"set_reshard_after_backward", SET_RESHARD, 3, NULL},
    {"freeze", FREEZE, 2, NULL}, /* only possible between visits */
    {"reset", RESET, 1, NULL},
    {"pause", PAUSE, 1, NULL},
    {"forget", FORGET, 1, NULL},
    {"destroy", DESTROY, 2, NULL},
};

/* Adds the status of a call to the hash that both runs must agree on, and returns it. */
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
    case SET_RESHARD: attempt(b, fsdp_set_reshard_after_backward(b->model, NULL, 0)); break;
    case FREEZE: b->frozen_now = !attempt(b, fsdp_set_requires_grad(b->unit[1], 0, 0)); break;
    case RESET:
        CALL(b->w, fsdp_model_reset(b->model));
        plan_calls(b, 0, n->num_calls);
        return;
    case PAUSE:
        if (b->plan) CALL(b->w, fsdp_plan_pause(b->plan, 1));
        break;
    case FORGET: /* twice: units hold slots of a plan that is gone */
        for (int i = 0; i < 2 && b->plan; i++) CALL(b->w, fsdp_plan_forget(b->plan));
        break;
    default: fsdp_plan_destroy(b->plan); b->plan = NULL;
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
        W_CHECK(fsdp_plan_state(b->plan) == FSDP_PLAN_EAGER &&
                    strstr(fsdp_plan_why(b->plan), j->why),
                "call %d: mode %d: %s", at, (int)fsdp_plan_state(b->plan), fsdp_plan_why(b->plan));
    if (j->what == SET_FACTOR) attempt(b, fsdp_set_gradient_divide_factor(b->model, NULL, 0));
    if (j->what == SET_SYNC) attempt(b, fsdp_set_requires_gradient_sync(b->model, NULL, 1));
    if (planned && j->what == PAUSE) CALL(b->w, fsdp_plan_pause(b->plan, 0));
    plan_step_end(b, out);
    if (j->what == SET_RESHARD) { /* units stay gathered over two steps */
        plan_step(b, out);
        plan_step(b, out);
        attempt(b, fsdp_set_reshard_after_backward(b->model, NULL, 1));
    }
    if (b->frozen_now) CALL(b->w, fsdp_set_requires_grad(b->unit[1], 0, 1));
    b->frozen_now = 0;
    if (planned && j->what == DESTROY) CALL(b->w, fsdp_plan_create(b->model, &j->desc, &b->plan));
}

static void leave_run(fsdp_world *w, ljob *j, int planned, plan_result *out) {
    plan_bed b;
    memset(out, 0, sizeof *out);
    plan_open(&b, &j->net, w);
    b.s = plan_sim;
    b.is_partial = j->what == SET_SYNC || j->what == SKIP_VISIT || j->what == FREEZE;
    b.rests = j->what == SET_RESHARD;
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
                "step %d (call %d) has other bits: %s", i, (i - 1) / (j->lead + 1) * j->stride,
                b->why[i]);
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
TEST_P(plan, leave_at_every_call, deviations, SLOW | AT_NIGHT(TSAN) | (row->what % 2 ? AT_NIGHT(ASAN) : 0)) {
    for (int mode = INLINE; mode <= STREAMS; mode++)
        leave_mode(net_nested(), row->what, mode, 9 + mode, NULL);
    leave_mode(net_chain(), row->what, INLINE, 3, NULL);
    fsdp_plan_desc once = FSDP_ZERO; /* gradients that wait stay over the end of a step */
    once.with = 1u << FSDP_PASS_ONCE;
    if (row->what == SET_SYNC || row->what == SET_RESHARD)
        leave_mode(net_chain(), row->what, INLINE, 2, &once);
}
TEST_P(long_plan, leave_at_every_call, deviations, SECONDS(300) | NIGHT) {
    fsdp_plan_desc tight = FSDP_ZERO;
    tight.most_bytes = 8192;
    for (int mode = INLINE; mode <= STREAMS && W_SLOW; mode++)
        leave_mode(net_bf16_f32(), row->what, mode, 7, NULL);
    for (int mode = INLINE; mode <= STREAMS && !W_SLOW; mode++) {
        leave_mode(net_nested(), row->what, mode, 1, NULL);
        /* a step that begins with gradients, or parameters, needs more */
        if (mode == INLINE && row->what != SET_SYNC && row->what != SET_RESHARD)
            leave_mode(net_nested(), row->what, mode, 1, &tight);
        leave_mode(net_chain(), row->what, mode, 1, NULL);
        leave_mode(net_bf16_f32(), row->what, mode, 1, NULL);
        leave_mode(net_hsdp_bf16(), row->what, mode, 1, NULL);
        if (row->what != FREEZE) leave_mode(net_frozen(), row->what, mode, 1, NULL);
    }
}

/* ---- the life of a plan ---------------------------------------------------------------------- */

static const struct {
    const char *name;
    int lanes;
} lane_modes[] = {{"inline", 0}, {"1_lane", 1}, {"2_lanes", 2}};

static void life_body(lab_rank *r) {
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    fsdp_memory mem, predicted;
    fsdp_plan_report rep;
    fsdp_plan_desc d = FSDP_ZERO;
    plan_bed b;
    d.warm_up = 2;
    plan_open(&b, &net, r->w);
    CALL(r->w, fsdp_model_predict(b.model, &predicted));
    CALL(r->w, fsdp_plan_create(b.model, &d, &b.plan));
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_WARM_UP);
    plan_step(&b, out);
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_WARM_UP);
    plan_step(&b, out);
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_RECORDING);
    CALL(r->w, fsdp_model_memory(b.model, &mem));
    CHECK_EQ_INT(plan_slots(&mem), plan_slots(&predicted)); /* the eager step's, as predicted */
    CHECK_EQ_INT(fsdp_plan_count(b.plan), 0);
    CHECK_STATUS(fsdp_plan_report_get(b.plan, 0, &rep), FSDP_ERR_INVALID_ARG);
    plan_step(&b, out);
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_REPLAYING);
    CHECK_EQ_INT(fsdp_plan_count(b.plan), 1);
    CALL(r->w, fsdp_plan_report_get(b.plan, 0, &rep));
    CHECK(rep.recorded == 1 && rep.replayed == 0 && rep.left == 0);
    CHECK_EQ_INT(rep.bytes[0], plan_slots(&predicted));
    CHECK_EQ_INT(rep.calls, net.num_calls + 1);
    CHECK_EQ_INT(rep.forward_calls, net.num_calls / 2);
    CHECK_EQ_INT(rep.units, net.num_units);
    plan_step(&b, out);
    for (int i = 1; i <= 3; i++) {
        int64_t allocations = w_allocations(r->heap);
        uint64_t counted = out->counters[b.step - 1].allocations;
        plan_step(&b, out);
        CHECK_EQ_INT(w_allocations(r->heap), allocations);
        CHECK_EQ_INT(out->counters[b.step - 1].allocations, counted);
        CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_REPLAYING);
        CHECK_EQ_STR(fsdp_plan_why(b.plan), "");
        CALL(r->w, fsdp_plan_report_get(b.plan, 0, &rep));
        CHECK(rep.recorded == 1 && rep.replayed == (uint64_t)i + 1 && rep.left == 0);
    }
    CALL(r->w, fsdp_model_memory(b.model, &mem));
    CHECK_EQ_INT(plan_slots(&mem), rep.bytes[1]);
    CHECK(rep.host_bytes > 0 && rep.hash != 0);
    fsdp_plan_destroy(b.plan); /* eager again: the memory as before */
    b.plan = NULL;
    plan_step(&b, out);
    CALL(r->w, fsdp_model_memory(b.model, &mem));
    CHECK_EQ_INT(plan_slots(&mem), plan_slots(&predicted));
    free(out);
}
TEST_P(plan, life, lane_modes) {
    lab_how how;
    memset(&how, 0, sizeof how);
    how.lanes = row->lanes;
    lab_run(2, &how, life_body, NULL);
}

/* On a device with streams, a replayed step waits on the host at most as often as an eager one, and
   logs nothing. */
TEST(plan, no_host_waits) {
    static sim s;
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    const plan_net net = net_chain();
    int64_t syncs[2];
    for (int planned = 0; planned < 2; planned++) {
        plan_bed b;
        sim_init(&s, 4, 1);
        s.checks = 1;
        fsdp_world *w = sim_open(&s);
        plan_open(&b, &net, w);
        b.s = &s;
        if (planned) CALL(w, fsdp_plan_create(b.model, NULL, &b.plan));
        for (int i = 0; i < 4; i++) plan_step(&b, out);
        int64_t before = s.syncs;
        plan_step(&b, out);
        syncs[planned] = s.syncs - before;
        CHECK_EQ_INT(fsdp_plan_state(b.plan), planned ? FSDP_PLAN_REPLAYING : FSDP_PLAN_MODE_COUNT);
        CHECK_MSG(s.num_logged == 0, "%s", s.logged);
        CHECK_MSG(s.races == 0, "%s", s.race);
        CHECK_EQ_INT(sim_close(&s), 0);
    }
    CHECK_MSG(syncs[1] <= syncs[0], "%d waits, by calls %d", (int)syncs[1], (int)syncs[0]);
    free(out);
}

/* ---- kinds of steps -------------------------------------------------------------------------- */

#undef TAGS
#define TAGS NCCL | AT_NIGHT(TSAN)

typedef struct kjob {
    void (*script)(plan_bed *b, const fsdp_plan_desc *d, plan_result *out);
    plan_net net;
    fsdp_plan_desc desc;
    plan_result *r[MOST_RANKS][2];
} kjob;

static void make_plan(plan_bed *b, const fsdp_plan_desc *d) {
    if (d) CALL(b->w, fsdp_plan_create(b->model, d, &b->plan));
}
static fsdp_plan_report report_of(const plan_bed *b) {
    fsdp_plan_report rep;
    memset(&rep, 0, sizeof rep);
    if (fsdp_plan_count(b->plan)) CALL(b->w, fsdp_plan_report_get(b->plan, 0, &rep));
    return rep;
}
static fsdp_plan_report last_report(const plan_bed *b) {
    fsdp_plan_report rep;
    CALL(b->w, fsdp_plan_report_get(b->plan, fsdp_plan_count(b->plan) - 1, &rep));
    return rep;
}

static void steps(plan_bed *b, plan_result *out, int count) {
    for (int i = 0; i < count; i++) plan_step(b, out);
}

static void kinds_run(fsdp_world *w, kjob *j, int rank) {
    for (int planned = 0; planned < 2; planned++) {
        plan_result *out = j->r[rank][planned];
        plan_bed b;
        snprintf(w_case, sizeof w_case, planned ? "planned" : "by calls");
        memset(out, 0, sizeof *out);
        plan_open(&b, &j->net, w);
        b.s = plan_sim;
        make_plan(&b, planned ? &j->desc : NULL);
        j->script(&b, planned ? &j->desc : NULL, out);
        out->count = b.step;
        fsdp_model_destroy(b.model);
    }
    const plan_result *x = j->r[rank][0], *y = j->r[rank][1];
    CHECK_EQ_INT(x->count, y->count);
    for (int i = 0; i < x->count; i++)
        W_CHECK(x->hash[i] == y->hash[i] && x->grads[i] == y->grads[i],
                "step %d has other bits: %s", i, y->why[i]);
}
static void kinds_body(lab_rank *r) { kinds_run(r->w, (kjob *)r->arg, r->rank); }
static void run_kinds_on(int size, plan_net net, const fsdp_plan_desc *desc,
                         void (*script)(plan_bed *, const fsdp_plan_desc *, plan_result *)) {
    kjob *j = (kjob *)lab_zeros(1, sizeof *j);
    lab_how how;
    j->script = script;
    j->net = net;
    if (desc) j->desc = *desc;
    for (int r = 0; r < MOST_RANKS; r++)
        for (int i = 0; i < 2; i++) j->r[r][i] = (plan_result *)lab_zeros(1, sizeof(plan_result));
    for (int lanes = 0; lanes < 3; lanes += 2) {
        memset(&how, 0, sizeof how);
        how.lanes = lanes;
        lab_run(size, &how, kinds_body, j);
    }
    static sim s;
    sim_init(&s, size, size > 1);
    s.checks = 1;
    plan_sim = &s;
    fsdp_world *w = sim_open(&s);
    CHECK(w != NULL);
    kinds_run(w, j, 0);
    CHECK_MSG(s.races == 0, "%d races: %s", s.races, s.race);
    CHECK_EQ_INT(sim_close(&s), 0);
    plan_sim = NULL;
    for (int r = 0; r < MOST_RANKS; r++) free(j->r[r][0]), free(j->r[r][1]);
    free(j);
}
static void run_kinds(plan_net net, const fsdp_plan_desc *desc,
                      void (*script)(plan_bed *, const fsdp_plan_desc *, plan_result *)) {
    run_kinds_on(net.replicas ? 4 : 2, net, desc, script);
}

/* Four microbatches, of which the last one reduces: three kinds of steps. */
static void microbatches(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    enum { CYCLES_OF = 6, BATCHES = 4 };
    fsdp_counters before, after;
    for (int c = 0; c < CYCLES_OF; c++) {
        CALL(b->w, fsdp_model_counters(b->model, &before));
        for (int m = 0; m < BATCHES; m++) {
            CALL(b->w, fsdp_set_requires_gradient_sync(b->model, NULL, m == BATCHES - 1));
            plan_calls(b, 0, b->net->num_calls);
            CALL(b->w, fsdp_finalize_backward(b->model));
            if (d && c + 2 >= CYCLES_OF)
                W_CHECK(fsdp_plan_state(b->plan) == FSDP_PLAN_REPLAYING && !*fsdp_plan_why(b->plan),
                        "cycle %d, batch %d: mode %d: %s", c, m, (int)fsdp_plan_state(b->plan),
                        fsdp_plan_why(b->plan));
        }
        plan_step_end(b, out);
    }
    CALL(b->w, fsdp_model_counters(b->model, &after));
    CHECK_EQ_INT(after.calls[FSDP_OP_REDUCE_SCATTER] - before.calls[FSDP_OP_REDUCE_SCATTER],
                 b->net->num_units);
    if (d) CHECK_EQ_INT(fsdp_plan_count(b->plan), 3);
    if (d) CHECK(report_of(b).left == 0);
}
TEST(plan_kinds, microbatches, TSAN) {
    fsdp_plan_desc d = FSDP_ZERO;
    d.bucket_bytes = -1;
    run_kinds(net_chain(), &d, microbatches);
    run_kinds(net_bf16_f32(), &d, microbatches);
}

/* Some microbatches do not reach unit 0. With sync off unit 1 keeps a slot of the first plan, while
   the plan of "01" needs a larger arena: the first plan is bound again. */
static void microbatches_of_some_units(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    static const char *const batches[] = {"1",  "1!", "1",  "1!", "1", "01", "1!", "1",
                                          "1!", "1",  "01", "1!", "1", "01", "1!"};
    b->is_partial = 1;
    for (int i = 0; i < (int)(sizeof batches / sizeof *batches); i++) {
        const int both = batches[i][0] == '0', sync = strchr(batches[i], '!') != NULL;
        CALL(b->w, fsdp_set_requires_gradient_sync(b->model, NULL, sync));
        plan_calls(b, both ? 0 : 2, both ? 8 : 6); /* forwards of 0 and 1, backwards of 1 and 0 */
        CALL(b->w, fsdp_finalize_backward(b->model));
        b->keeps_grads = b->rests = !sync;
        plan_step_end(b, out);
        if (d)
            W_CHECK(fsdp_plan_state(b->plan) != FSDP_PLAN_REFUSED, "batch %d: %s", i,
                    fsdp_plan_why(b->plan));
    }
    if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
    if (d) CHECK(report_of(b).replayed >= 5);
}
TEST(plan_kinds, microbatches_of_some_units) {
    fsdp_plan_desc d = FSDP_ZERO;
    run_kinds(plan_chain(2, 8, 8), &d, microbatches_of_some_units);
}

/* Replicas sum only in the last microbatch. */
static void microbatches_of_replicas(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    for (int c = 0; c < 6; c++) {
        for (int m = 0; m < 3; m++) {
            CALL(b->w, fsdp_set_requires_all_reduce(b->model, NULL, m == 2));
            plan_calls(b, 0, b->net->num_calls);
            CALL(b->w, fsdp_finalize_backward(b->model));
        }
        plan_step_end(b, out);
    }
    if (d)
        W_CHECK(fsdp_plan_state(b->plan) == FSDP_PLAN_REPLAYING && !*fsdp_plan_why(b->plan),
                "mode %d: %s", (int)fsdp_plan_state(b->plan), fsdp_plan_why(b->plan));
}
TEST(plan_kinds, microbatches_of_replicas) {
    run_kinds(net_hsdp_bf16(), NULL, microbatches_of_replicas);
}

static void without_zero_grad(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    b->keeps_grads = 1; /* the first step stores, the others add */
    steps(b, out, 6);
    CALL(b->w, fsdp_zero_grad(b->model));
    steps(b, out, 6);
    if (d) CHECK_EQ_INT(fsdp_plan_count(b->plan), 2);
    if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
}
TEST(plan_kinds, without_zero_grad, TSAN) { run_kinds(net_chain(), NULL, without_zero_grad); }

/* Between forward and backward the program drops gradients of the step before, as PyTorch's
   zero_grad may stand there, or writes shards. Such steps run eagerly. */
static int between; /* 1: zero_grad, 2: shards */
static void written_inside(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    b->keeps_grads = between == 1;
    steps(b, out, 4);
    for (int i = 0; i < 5; i++) {
        fsdp_param_view v = FSDP_ZERO;
        const int planned = d && fsdp_plan_state(b->plan) == FSDP_PLAN_REPLAYING;
        plan_calls(b, 0, b->net->num_calls / 2);
        CALL(b->w, fsdp_wait_stream(b->model, -1));
        if (between == 1) CALL(b->w, fsdp_zero_grad(b->model));
        while (between == 2 && fsdp_next_param(b->model, &v))
            for (int64_t k = 0; k < v.numel; k++)
                lab_put(v.shard, v.dtype, k, lab_get(v.shard, v.dtype, k) / 2);
        if (between == 2) CALL(b->w, fsdp_params_changed(b->model));
        if (planned)
            W_CHECK(fsdp_plan_state(b->plan) == FSDP_PLAN_EAGER &&
                        strstr(fsdp_plan_why(b->plan), "inside of a step"),
                    "mode %d: %s", (int)fsdp_plan_state(b->plan), fsdp_plan_why(b->plan));
        plan_calls(b, b->net->num_calls / 2, b->net->num_calls);
        CALL(b->w, fsdp_finalize_backward(b->model));
        plan_step_end(b, out);
    }
}
TEST(plan_kinds, written_inside_of_a_step, TSAN) {
    for (between = 1; between < 3; between++) run_kinds(net_chain(), NULL, written_inside);
}

/* Backward runs in the order of forward, so that with lanes the last prefetch stays open to the
   end. */
static plan_net net_same_order(void) {
    plan_net n = plan_chain(2, 8, 8);
    n.num_calls = 0;
    for (int back = 0; back < 2; back++)
        for (int u = 0; u < 2; u++) {
            plan_call(&n, u, back ? FSDP_CALL_PRE_BACKWARD : FSDP_CALL_PRE_FORWARD);
            plan_call(&n, u, back ? FSDP_CALL_POST_BACKWARD : FSDP_CALL_POST_FORWARD);
        }
    return n;
}
static void same_order(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    steps(b, out, 5);
    if (d) W_CHECK(report_of(b).replayed == 3, "%s", fsdp_plan_why(b->plan));
}
TEST(plan_kinds, same_order) { run_kinds(net_same_order(), NULL, same_order); }

/* A unit is gathered after its last use, and only finalize waits for that gather. */
static void open_to_the_end(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    b->rests = 1;
    steps(b, out, 6);
    if (d) W_CHECK(report_of(b).replayed == 4, "%s", fsdp_plan_why(b->plan));
}
TEST(plan_kinds, open_to_the_end, TSAN) {
    plan_net n = plan_chain(1, 8, 8);
    plan_call(&n, 0, FSDP_CALL_UNSHARD);
    run_kinds(n, NULL, open_to_the_end);
}

/* Reduced in its post_backward, and again in finalize: its first gradients do not wait for others. */
static void open_again(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    steps(b, out, 5);
    if (d) W_CHECK(report_of(b).replayed == 3, "%s", fsdp_plan_why(b->plan));
    if (d) CHECK_EQ_INT(report_of(b).reductions[1], 2); /* one for unit 3, one for the others */
}
TEST(plan_kinds, open_again, TSAN) { run_kinds(plan_open_again(4), NULL, open_again); }

/* Twice, and then its neighbour twice: neither's last gradients wait for the other's, since then
   those before would wait, too. */
static void reduced_twice(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    steps(b, out, 5);
    if (d) W_CHECK(report_of(b).replayed == 3, "%s", fsdp_plan_why(b->plan));
    if (d) CHECK_EQ_INT(report_of(b).reductions[1], 4);
}
TEST(plan_kinds, reduced_twice, TSAN) {
    static const int order[4] = {0, 1, 0, 1};
    plan_net n = plan_chain(2, 16, 16);
    n.num_calls = 0;
    plan_visit(&n, order, 4);
    run_kinds(n, NULL, reduced_twice);
}

/* Two sorts of reductions: each has a bucket, and the first unit of the second one is in it. */
static void two_sorts(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    for (int u = 0; u < 3; u++)
        CALL(b->w, fsdp_set_gradient_divide_factor(b->model, b->unit[u], 3));
    steps(b, out, 5);
    if (d) W_CHECK(report_of(b).replayed == 3, "%s", fsdp_plan_why(b->plan));
    if (d) CHECK_EQ_INT(report_of(b).reductions[1], 2);
}
TEST(plan_kinds, two_sorts, TSAN) { run_kinds(net_chain(), NULL, two_sorts); }

/* A bucket closes with the unit that reaches bucket_bytes. */
static void full_buckets(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    fsdp_plan_desc two = FSDP_ZERO;
    fsdp_memory mem;
    for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_GRAD && d; pool++) {
        if (pool == FSDP_POOL_SLICE) continue;
        CALL(b->w, fsdp_unit_memory(b->unit[0], &mem));
        two.bucket_bytes = 2 * mem.pool_bytes[pool];
        two.without = 1u << FSDP_PASS_KEEP;
        fsdp_plan_destroy(b->plan);
        CALL(b->w, fsdp_plan_create(b->model, &two, &b->plan));
        steps(b, out, 3);
        W_CHECK(report_of(b).replayed == 1, "%s", fsdp_plan_why(b->plan));
        if (pool == FSDP_POOL_GATHER) CHECK_EQ_INT(report_of(b).gathers[1], 6); /* 3, and 3 */
        else CHECK_EQ_INT(report_of(b).reductions[1], 3);
    }
    if (!d) steps(b, out, 6);
}
TEST(plan_kinds, full_buckets) { run_kinds(net_chain(), NULL, full_buckets); }

/* A step without a backward leaves units open that do not reshard: their slots outlast the calls, so
   that they lie at other distances on each rank, and no collective has two of them. */
static void forward_alone(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    b->is_partial = 1;
    for (int i = 0; i < 5; i++) {
        plan_calls(b, 0, b->net->num_calls / 2);
        CALL(b->w, fsdp_finalize_backward(b->model));
        plan_step_end(b, out);
    }
    if (d) W_CHECK(report_of(b).replayed == 3, "%s", fsdp_plan_why(b->plan));
    if (d) CHECK_EQ_INT(report_of(b).gathers[1], 3); /* 0 and 1 are joined */
}
TEST(plan_kinds, forward_only) {
    plan_net n = plan_chain(4, 8, 8);
    n.reshard[2] = n.reshard[3] = FSDP_RESHARD_NEVER;
    run_kinds(n, NULL, forward_alone);
}

/* A parameter is frozen and thawed again: options are as before, and the layout is another one. The
   next call is finalize, which commits, of a step that is recorded. */
static void shake(plan_bed *b) {
    for (int grad = 0; grad < 2; grad++) CALL(b->w, fsdp_set_requires_grad(b->unit[1], 0, grad));
}
static void layout_in_finalize(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    fsdp_plan_times times;
    fsdp_plan_cost cost = FSDP_ZERO;
    steps(b, out, 1);
    b->is_partial = 1;
    for (int half = 0; half < 2; half++) { /* only finalize; only a forward */
        if (half && d) CALL(b->w, fsdp_plan_forget(b->plan));
        plan_calls(b, 0, half * b->net->num_calls / 2);
        shake(b);
        CALL(b->w, fsdp_finalize_backward(b->model));
        plan_step_end(b, out);
        steps(b, out, 5); /* three leave the plan of that step, then one is recorded */
        if (d)
            W_CHECK(fsdp_plan_state(b->plan) == FSDP_PLAN_REPLAYING, "mode %d: %s",
                    (int)fsdp_plan_state(b->plan), fsdp_plan_why(b->plan));
    }
    shake(b); /* all plans go with the layout */
    if (d)
        REFUSED(b->w, fsdp_plan_simulate(b->plan, 0, 1, &cost, &times),
                "below the number of plans, which is 0");
    steps(b, out, 2);
}
TEST(plan_kinds, layout_in_finalize) { run_kinds(net_chain(), NULL, layout_in_finalize); }

/* A new layout between two visits of a replayed step, which leaves its plan. */
static void layout_between_visits(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    steps(b, out, 3);
    plan_calls(b, 0, 4);
    shake(b);
    plan_calls(b, 4, b->net->num_calls);
    CALL(b->w, fsdp_finalize_backward(b->model));
    plan_step_end(b, out);
    steps(b, out, 3);
    if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
    if (d) CHECK_EQ_INT(report_of(b).left, 1);
}
TEST(plan_kinds, layout_between_visits) {
    run_kinds(net_chain(), NULL, layout_between_visits);
}

/* A kind that needs less memory than an earlier one: the arena stays as large as that needs it. */
static void smaller_kind(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    for (int i = 0; i < 3; i++) {
        CALL(b->w, fsdp_set_reshard_after_forward(
                       b->model, NULL, i == 1 ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_NEVER));
        steps(b, out, 3);
        if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
    }
    if (d) CHECK_EQ_INT(fsdp_plan_count(b->plan), 2);
    if (d) CHECK(report_of(b).bytes[1] > last_report(b).bytes[1]);
    if (d) CHECK_EQ_INT(report_of(b).replayed, 6);
}
TEST(plan_kinds, smaller_kind) {
    fsdp_plan_desc d = FSDP_ZERO;
    d.bucket_bytes = -1, d.without = 1u << FSDP_PASS_KEEP;
    run_kinds(net_chain(), &d, smaller_kind);
}

/* A kind makes room for another one while units hold its slots. */
static void room_for_another(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    (void)d;
    steps(b, out, 4);
    plan_calls(b, 0, b->net->num_calls / 2);
    CALL(b->w, fsdp_set_reshard_after_backward(b->model, NULL, 0));
    plan_calls(b, b->net->num_calls / 2, b->net->num_calls);
    CALL(b->w, fsdp_finalize_backward(b->model));
    b->rests = 1; /* units stay gathered */
    plan_step_end(b, out);
    steps(b, out, 4);
}
TEST(plan_kinds, room_for_another, TSAN) {
    fsdp_plan_desc d = FSDP_ZERO;
    d.most_kinds = 1;
    run_kinds(net_chain(), &d, room_for_another);
}

/* While units hold gradients in slots of a dropped kind, steps that begin with these get no plan: the
   slots go when the units free them. */
static void batch(plan_bed *b, int sync, plan_result *out) {
    CALL(b->w, fsdp_set_requires_gradient_sync(b->model, NULL, sync));
    b->keeps_grads = b->rests = !sync;
    steps(b, out, 1);
}
static void slots_of_a_dropped_kind(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    b->is_partial = 1;
    for (int i = 0; i < 8; i++) batch(b, i % 2, out);
    if (d) CHECK_EQ_INT(fsdp_plan_count(b->plan), 2);
    batch(b, 0, out); /* replayed: its slots are held now */
    batch(b, 0, out); /* a new kind, for which the other one goes */
    if (d) CHECK_EQ_INT(fsdp_plan_count(b->plan), 2);
    CALL(b->w, fsdp_set_reshard_after_forward(b->model, NULL, FSDP_RESHARD_NEVER));
    for (int i = 0; i < 3; i++) { /* for this one both go */
        batch(b, 0, out);
        if (d) CHECK_EQ_INT(fsdp_plan_count(b->plan), 0);
    }
    for (int i = 1; i < 8; i++) batch(b, i % 2, out);
    if (d) CHECK(fsdp_plan_count(b->plan) == 2 && report_of(b).replayed > 0);
}
TEST(plan_kinds, slots_of_a_dropped_kind) {
    fsdp_plan_desc d = FSDP_ZERO;
    d.most_kinds = 2;
    run_kinds(net_chain(), &d, slots_of_a_dropped_kind);
}

static void frozen_between(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    for (int frozen = 0; frozen < 4; frozen++) {
        steps(b, out, 3);
        if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
        b->frozen_now = frozen % 2 == 0;
        CALL(b->w, fsdp_set_requires_grad(b->unit[1], 0, frozen % 2));
        fsdp_plan_report before = report_of(b);
        steps(b, out, 1);
        if (d) CHECK_EQ_INT(report_of(b).recorded, before.recorded + 1);
        if (d) CHECK_EQ_INT(fsdp_plan_count(b->plan), 1);
        if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
    }
    steps(b, out, 2);
}
TEST(plan_kinds, frozen_between_steps) { run_kinds(net_chain(), NULL, frozen_between); }

static void evaluation_between(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    for (int i = 0; i < 5; i++) {
        steps(b, out, 2);
        fsdp_plan_report before = report_of(b);
        CALL(b->w, fsdp_set_grad_enabled(b->model, 0));
        for (int u = 0; u < b->net->num_units; u++) attempt_forward(b, u);
        CALL(b->w, fsdp_set_grad_enabled(b->model, 1));
        CHECK_EQ_INT(report_of(b).recorded, before.recorded);
    }
    steps(b, out, 1);
    fsdp_plan_report rep = report_of(b);
    if (d) CHECK(rep.recorded == 1 && rep.replayed == 9 && rep.left == 0);
}
TEST(plan_kinds, evaluation_between_steps) { run_kinds(net_nested(), NULL, evaluation_between); }

/* Two kinds in turn, and how many may be kept. */
static void two_kinds(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    for (int i = 0; i < 9; i++) {
        CALL(b->w, fsdp_set_reshard_after_forward(
                       b->model, NULL, i % 2 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS));
        steps(b, out, 1);
    }
    fsdp_plan_report rep = report_of(b);
    if (!d) return;
    CHECK_EQ_INT(fsdp_plan_count(b->plan), d->most_kinds == 2 ? 2 : 0);
    CHECK(d->most_kinds < 2 || (rep.recorded == 2 && rep.replayed == 6));
    if (d->most_kinds < 2) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REFUSED); /* useless */
}
/* Three kinds, two places: what was used last stays. */
static void three_kinds(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    static const int order[] = {0, 0, 1, 0, 2, 0, 1, 0}; /* 0: warm-up, then A B A C A B A */
    for (int i = 0; i < 8; i++) {
        CALL(b->w, fsdp_set_reshard_after_forward(b->model, NULL, FSDP_RESHARD_ALWAYS));
        CALL(b->w,
             fsdp_set_reshard_after_forward(b->model, b->unit[order[i]], FSDP_RESHARD_NEVER));
        steps(b, out, 1);
    }
    fsdp_plan_report rep = report_of(b);
    if (d) CHECK(rep.recorded == 4 && rep.replayed == 3); /* A is never recorded again */
}
TEST(plan_kinds, least_recently_used) {
    fsdp_plan_desc d = FSDP_ZERO;
    for (d.most_kinds = 1; d.most_kinds <= 2; d.most_kinds++) run_kinds(net_chain(), &d, two_kinds);
    d.most_kinds = 2;
    run_kinds(net_chain(), &d, three_kinds);
}

static void cast_between(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    steps(b, out, 4);
    CALL(b->w, fsdp_model_cast(b->model, FSDP_BF16));
    steps(b, out, 4);
    uint64_t recorded = report_of(b).recorded; /* the first step of a layout may begin otherwise */
    if (d) CHECK(recorded >= 2 && recorded <= 3);
    if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
}
TEST(plan_kinds, cast_between_steps) {
    plan_net n = net_chain();
    n.model.param_dtype = FSDP_F32; /* gathered parameters' dtype, before and after */
    run_kinds(n, NULL, cast_between);
}

/* Paused, an evaluation, and on again: the next step is a whole one, and replays. */
static void evaluation_in_a_pause(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    steps(b, out, 3);
    for (int i = 0; i < 2; i++) {
        if (d) CALL(b->w, fsdp_plan_pause(b->plan, 1));
        if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_PAUSED);
        CALL(b->w, fsdp_set_grad_enabled(b->model, 0));
        for (int u = 0; u < b->net->num_units; u++) attempt_forward(b, u);
        CALL(b->w, fsdp_set_grad_enabled(b->model, 1));
        if (i == 1) steps(b, out, 1); /* an eager step */
        if (d) CALL(b->w, fsdp_plan_pause(b->plan, 0));
        if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
        if (d) CHECK_EQ_STR(fsdp_plan_why(b->plan), "");
        steps(b, out, 1);
        if (d) CHECK_EQ_INT(report_of(b).replayed, i + 2);
    }
    plan_calls(b, 0, b->net->num_calls / 2); /* in a step, whose rest is eager */
    if (d) CALL(b->w, fsdp_plan_pause(b->plan, 1));
    CALL(b->w, fsdp_set_grad_enabled(b->model, 0));
    attempt_forward(b, 0);
    CALL(b->w, fsdp_set_grad_enabled(b->model, 1));
    if (d) CALL(b->w, fsdp_plan_pause(b->plan, 0));
    if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_EAGER);
    plan_calls(b, b->net->num_calls / 2, b->net->num_calls);
    CALL(b->w, fsdp_finalize_backward(b->model));
    plan_step_end(b, out);
    steps(b, out, 1);
    if (d) CHECK_EQ_INT(report_of(b).replayed, 4);
    if (d) CALL(b->w, fsdp_plan_forget(b->plan));
    if (d) CHECK_EQ_INT(fsdp_plan_count(b->plan), 0);
    if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_RECORDING);
    steps(b, out, 2);
}
TEST(plan_kinds, evaluation_in_a_pause) { run_kinds(net_chain(), NULL, evaluation_in_a_pause); }

/* Another model of the same world, in between. */
static void two_models(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    const plan_net other = net_nested();
    plan_result *second = (plan_result *)lab_zeros(1, sizeof *second);
    plan_bed c;
    plan_open(&c, &other, b->w);
    make_plan(&c, d);
    for (int i = 0; i < 6; i++) {
        plan_calls(b, 0, b->net->num_calls / 2); /* one of them is in its step meanwhile */
        plan_step(&c, second);
        plan_calls(b, b->net->num_calls / 2, b->net->num_calls);
        CALL(b->w, fsdp_finalize_backward(b->model));
        b->hash ^= c.hash;
        plan_step_end(b, out);
    }
    if (d) CHECK(report_of(b).replayed == 4 && report_of(&c).replayed == 4);
    fsdp_model_destroy(c.model);
    free(second);
}
TEST(plan_kinds, two_models, TSAN) { run_kinds(net_chain(), NULL, two_models); }

/* Every step is another one. */
static void never_the_same(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    for (int i = 0; i < 16; i++) {
        for (int k = 0; k < i; k++) attempt_forward(b, 0);
        steps(b, out, 1);
    }
    if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REFUSED);
    if (d) CHECK_MSG(strstr(fsdp_plan_why(b->plan), "differ"), "%s", fsdp_plan_why(b->plan));
}
/* Or it changes an option within each step. */
static void always_set(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    for (int i = 0; i < 6; i++) {
        plan_calls(b, 0, 4);
        CALL(b->w, fsdp_set_is_last_backward(b->model, i % 2));
        plan_calls(b, 4, b->net->num_calls);
        CALL(b->w, fsdp_finalize_backward(b->model));
        plan_step_end(b, out);
    }
    if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REFUSED);
    if (d)
        CHECK_MSG(strstr(fsdp_plan_why(b->plan), "options changed"), "%s", fsdp_plan_why(b->plan));
}
/* Or has options that no step before had: plans are made, dropped for others, and never replayed. */
static void always_another_kind(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    fsdp_memory mem;
    for (int i = 0; i < 16; i++) {
        for (int u = 0; u < 4; u++)
            CALL(b->w, fsdp_set_reshard_after_forward(
                           b->model, b->unit[u],
                           i >> u & 1 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS));
        steps(b, out, 1);
        if (d && i == 11) CHECK_EQ_INT(fsdp_plan_count(b->plan), 0); /* 1, 8 kept, 3 for nothing */
        if (d && i == 10) CHECK_EQ_INT(fsdp_plan_count(b->plan), 8);
    }
    if (!d) return;
    CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REFUSED);
    CHECK_MSG(strstr(fsdp_plan_why(b->plan), "another kind"), "%s", fsdp_plan_why(b->plan));
    CALL(b->w, fsdp_model_memory(b->model, &mem));
    for (int pool = FSDP_POOL_COUNT; pool < (int)FSDP_POOL_MAX; pool++)
        CHECK_EQ_INT(mem.pool_bytes[pool], 0); /* it keeps no arena */
}
TEST(plan_kinds, steps_that_differ) {
    run_kinds(net_nested(), NULL, never_the_same);
    run_kinds(net_nested(), NULL, always_set);
    run_kinds(net_chain(), NULL, always_another_kind);
}

/* Deviations that happen sometimes, but not in a row, keep the plan and planning. */
static void now_and_then(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    steps(b, out, 3);
    for (int i = 0; i < 5; i++) {
        plan_calls(b, 0, 4); /* leaves the plan */
        attempt_forward(b, b->net->calls[4].unit);
        plan_calls(b, 4, b->net->num_calls);
        CALL(b->w, fsdp_finalize_backward(b->model));
        plan_step_end(b, out);
        steps(b, out, 1);
        if (d) CHECK_EQ_INT(out->mode[b->step - 1], FSDP_PLAN_REPLAYING);
    }
    if (d) CHECK(report_of(b).recorded == 1 && report_of(b).left == 5);
    for (int i = 0; i < 5; i++) {
        CALL(b->w, fsdp_set_reshard_after_forward(b->model, b->unit[i], FSDP_RESHARD_NEVER));
        plan_calls(b, 0, 2); /* a recording of no use */
        CALL(b->w, fsdp_zero_grad(b->model));
        plan_calls(b, 2, b->net->num_calls);
        CALL(b->w, fsdp_finalize_backward(b->model));
        CALL(b->w, fsdp_set_reshard_after_forward(b->model, b->unit[i], FSDP_RESHARD_ALWAYS));
        plan_step_end(b, out);
        steps(b, out, 1);
    }
    if (d) CHECK(report_of(b).recorded == 1 && report_of(b).replayed == 11);
    if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
}
TEST(plan_kinds, now_and_then, TSAN) { run_kinds(net_chain(), NULL, now_and_then); }

/* ---- divide factors -------------------------------------------------------------------------- */

#undef TAGS
#define TAGS TSAN

/* Token weights: each step divides by another number, and one plan serves all. */
static void token_weights(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    for (int i = 0; i < 9; i++) {
        CALL(b->w, fsdp_set_gradient_divide_factor(b->model, NULL, 3 + 4.0 * (double)(7 * i % 9)));
        steps(b, out, 1);
        if (d && i > 1) CHECK_EQ_INT(out->mode[i], FSDP_PLAN_REPLAYING);
        if (d && i > 2) CHECK_EQ_STR(out->why[i], "");
        if (i > 2) CHECK_EQ_INT(out->counters[i].allocations, out->counters[2].allocations);
    }
    if (d) CHECK_EQ_INT(fsdp_plan_count(b->plan), 1);
    if (d) CHECK(last_report(b).recorded == 1 && last_report(b).replayed == 7);
}
/* Set between forward and backward, where a trainer has counted the tokens. */
static void token_weights_late(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    const int half = b->net->num_calls / 2;
    for (int i = 0; i < 9; i++) {
        plan_calls(b, 0, half);
        CALL(b->w, fsdp_set_gradient_divide_factor(b->model, NULL, 3 + 4.0 * (double)(7 * i % 9)));
        plan_calls(b, half, b->net->num_calls);
        CALL(b->w, fsdp_finalize_backward(b->model));
        if (d && i > 1) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
        plan_step_end(b, out);
    }
    if (d) CHECK_EQ_INT(fsdp_plan_count(b->plan), 1);
    if (d) CHECK(last_report(b).recorded == 1 && last_report(b).replayed == 7 && !last_report(b).left);
}
/* Others are set between microbatches, of which the last one reduces. */
static void token_weights_of_microbatches(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    for (int c = 0; c < 6; c++) {
        for (int m = 0; m < 3; m++) {
            CALL(b->w, fsdp_set_requires_gradient_sync(b->model, NULL, m == 2));
            CALL(b->w, fsdp_set_gradient_divide_factor(b->model, NULL, 5 + 3 * c + m));
            plan_calls(b, 0, b->net->num_calls);
            CALL(b->w, fsdp_finalize_backward(b->model));
            if (d && c > 3) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
        }
        plan_step_end(b, out);
    }
    if (d) CHECK_EQ_INT(fsdp_plan_count(b->plan), 3);
}
/* Factors that f16 splits in other ways are other kinds; here some come back. */
static void factors_of_all_sorts(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    static const double factors[] = {1, 2, 6, 6, 0, 0, 0.5, 0.5, 24, 7, 7, 100, 4, 4, 4, 0};
    for (int i = 0; i < (int)(sizeof factors / sizeof *factors); i++) {
        CALL(b->w, fsdp_set_gradient_divide_factor(b->model, NULL, factors[i]));
        steps(b, out, 1);
    }
    if (d) CHECK(last_report(b).replayed > 0);
}
/* Units that are bucketed because they have equal divide factors, and later have different ones. */
static void factors_of_units(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    for (int i = 0; i < 12; i++) {
        CALL(b->w, fsdp_set_gradient_divide_factor(b->model, NULL, 3 + i));
        if (i / 3 % 2) CALL(b->w, fsdp_set_gradient_divide_factor(b->model, b->unit[1], 2));
        if (i == 11) CALL(b->w, fsdp_set_gradient_divide_factor(b->model, b->unit[2], 2));
        steps(b, out, 1);
        if (d && (i == 2 || i == 4 || i == 7)) CHECK_EQ_STR(out->why[i], "");
    }
    if (!d) return;
    CHECK_EQ_INT(fsdp_plan_count(b->plan), 3);
    fsdp_plan_report rep; /* plan 1: unit 1 is not bucketed, so unit 0 is not */
    CALL(b->w, fsdp_plan_report_get(b->plan, 1, &rep));
    CHECK_EQ_INT(b->net->replicas ? rep.replicas[1] : rep.reductions[1], 3);
}
/* A setter within a step applies from the next reduction on, even if other units wait for it. */
static void factor_inside(plan_bed *b, const fsdp_plan_desc *d, plan_result *out) {
    const int half = b->net->num_calls / 2, last = b->net->calls[half].unit;
    steps(b, out, 3);
    plan_calls(b, 0, half + 1); /* nothing waits yet, and what is set is what it was */
    CALL(b->w, fsdp_set_gradient_divide_factor(b->model, b->unit[0], 0));
    plan_calls(b, half + 1, b->net->num_calls);
    CALL(b->w, fsdp_finalize_backward(b->model));
    if (d) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
    plan_step_end(b, out);
    for (int at = half; at <= b->net->num_calls; at++) { /* odd: in another unit's backward */
        steps(b, out, 2);
        plan_calls(b, 0, at);
        if (at % 2 == 0) CALL(b->w, fsdp_set_gradient_divide_factor(b->model, NULL, 5));
        else if (at > half + 2) /* the gradients of this one wait for the last post_backward */
            CALL(b->w, fsdp_set_gradient_divide_factor(b->model, b->unit[last], 5));
        plan_calls(b, at, b->net->num_calls);
        CALL(b->w, fsdp_finalize_backward(b->model));
        if (d && at > half + 1) CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_EAGER);
        CALL(b->w, fsdp_set_gradient_divide_factor(b->model, NULL, 0));
        plan_step_end(b, out);
    }
}
static plan_net net_hsdp_f16(void) {
    plan_net n = net_hsdp();
    n.model.reduce_dtype = FSDP_F16;
    return n;
}
static plan_net net_sums_f16(void) {
    plan_net n = net_chain();
    n.model.reduce_dtype = FSDP_F16;
    return n;
}
static plan_net net_ddp_4(void) {
    plan_net n = net_ddp();
    n.replicas = 4;
    return n;
}
static plan_net net_ddp_f16(void) {
    plan_net n = net_ddp_4();
    n.model.reduce_dtype = FSDP_F16;
    return n;
}
static const struct factor_net {
    const char *name;
    plan_net (*make)(void);
} factor_nets[] = {{"chain", net_chain},         {"nested", net_nested},
                   {"bf16_f32", net_bf16_f32},   {"mixed", net_mixed},
                   {"f64_grads", net_f64_grads}, {"hsdp", net_hsdp},
                   {"hsdp_bf16", net_hsdp_bf16}, {"ddp", net_ddp_4},
                   {"custom", net_custom},       {"sum_hooks_hsdp", net_sum_hooks_hsdp},
                   {"offload", net_offload},     {"f16", net_f16},
                   {"sums_f16", net_sums_f16},
                   {"hsdp_f16", net_hsdp_f16},   {"ddp_f16", net_ddp_f16}};
TEST_P(plan_factors, each_step, factor_nets, row == factor_nets ? 0 : AT_NIGHT(TSAN)) {
    run_kinds(row->make(), NULL, token_weights);
}
TEST_P(plan_factors, of_all_sorts, factor_nets, row == factor_nets ? 0 : AT_NIGHT(TSAN)) {
    run_kinds(row->make(), NULL, factors_of_all_sorts);
}
/* Two factors make another step variant if they differ in which units have equal factors and, on
   one rank, in whether the factor is 1. */
static uint64_t kind_with(plan_bed *b, double factor) {
    CALL(b->w, fsdp_set_gradient_divide_factor(b->model, NULL, factor));
    return fsdpi_plan_options(b->model);
}
static void kinds_of_factors(lab_rank *r) {
    const int fuses = !r->arg, alone = fsdp_world_size(r->w) == 1;
    const plan_net nets_of[] = {net_chain(), net_sums_f16(), net_hsdp_f16()};
    for (int n = 0; n < (alone ? 1 : 3); n++) {
        plan_bed b;
        plan_open(&b, &nets_of[n], r->w);
        uint64_t first = fsdpi_plan_settings(b.model), seven = kind_with(&b, 7);
        CHECK(fsdpi_plan_settings(b.model) != first && kind_with(&b, 0) == first);
        CHECK(kind_with(&b, 9) == seven);
        CHECK(kind_with(&b, 6) == seven);
        snprintf(w_case, sizeof w_case, "net %d, fuses %d", n, fuses);
        W_CHECK((kind_with(&b, 1) == seven) == !alone, "factor 1");
        (void)kind_with(&b, 7);
        for (int u = 0; u < 2; u++) /* unit 0 divides by another number, then unit 1 by this, too */
            CALL(r->w, fsdp_set_gradient_divide_factor(b.model, b.unit[u], 9));
        uint64_t two = fsdpi_plan_options(b.model);
        CALL(r->w, fsdp_set_gradient_divide_factor(b.model, b.unit[1], 11));
        CHECK(two != seven && fsdpi_plan_options(b.model) != two);
        fsdp_model_destroy(b.model);
    }
}
TEST(plan_factors, kinds) {
    static fsdp_comm_ops plain;
    lab_how how;
    memset(&how, 0, sizeof how);
    lab_run(4, NULL, kinds_of_factors, NULL);
    lab_run(1, NULL, kinds_of_factors, NULL);
    plain = w_plain();
    how.comm_ops = &plain;
    lab_run(4, &how, kinds_of_factors, &plain);
}
TEST(plan_factors, one_rank) { /* that stores gradients where they end, if it does not divide */
    run_kinds_on(1, net_chain(), NULL, factors_of_all_sorts);
    run_kinds_on(1, net_sums_f16(), NULL, factors_of_all_sorts);
}
TEST(plan_factors, between_forward_and_backward) {
    run_kinds(net_chain(), NULL, token_weights_late);
    run_kinds(net_bf16_f32(), NULL, token_weights_late);
    run_kinds(net_ddp_4(), NULL, token_weights_late);
}
TEST(plan_factors, microbatches) {
    fsdp_plan_desc d = FSDP_ZERO;
    d.bucket_bytes = -1;
    run_kinds(net_chain(), &d, token_weights_of_microbatches);
    run_kinds(net_bf16_f32(), &d, token_weights_of_microbatches);
    run_kinds(net_sums_f16(), &d, token_weights_of_microbatches);
}
TEST(plan_factors, units) {
    run_kinds(net_chain(), NULL, factors_of_units);
    run_kinds(net_ddp_4(), NULL, factors_of_units);
}
TEST(plan_factors, inside_of_a_step) {
    run_kinds(net_chain(), NULL, factor_inside);
    run_kinds(net_bf16_f32(), NULL, factor_inside);
}

/* ---- `once` ---------------------------------------------------------------------------------- */

/* The same bits as those of a program that collects by hand, and one reduction of each unit. */
static void once_body(lab_rank *r) {
    plan_net net = net_nested();
    plan_result *x = (plan_result *)lab_zeros(1, sizeof *x),
                *y = (plan_result *)lab_zeros(1, sizeof *y);
    fsdp_plan_desc d = FSDP_ZERO;
    plan_bed a, b;
    d.with = 1u << FSDP_PASS_ONCE;
    plan_open(&a, &net, r->w);
    plan_open(&b, &net, r->w);
    CALL(r->w, fsdp_plan_create(b.model, &d, &b.plan));
    for (int i = 0; i < 6; i++) {
        int left[3] = {0, 0, 0};
        for (int c = net.num_calls / 2; c < net.num_calls; c++)
            left[net.calls[c].unit] += net.calls[c].call == FSDP_CALL_PRE_BACKWARD;
        for (int c = 0; c < net.num_calls; c++) {
            int u = net.calls[c].unit;
            if (net.calls[c].call == FSDP_CALL_PRE_BACKWARD && i >= 2) /* from the third step on */
                CALL(r->w, fsdp_set_requires_gradient_sync(a.model, a.unit[u], --left[u] == 0));
            plan_calls(&a, c, c + 1);
        }
        CALL(r->w, fsdp_finalize_backward(a.model));
        plan_step_end(&a, x);
        plan_step(&b, y);
        CHECK_MSG(x->hash[i] == y->hash[i] && x->grads[i] == y->grads[i], "step %d", i);
    }
    fsdp_plan_report rep = report_of(&b);
    CHECK(rep.reductions[0] == 12 && rep.reductions[1] == 3 && rep.replayed == 4);
    CHECK_EQ_INT(last_calls(y, 6, FSDP_OP_REDUCE_SCATTER), 3);
    free(x), free(y);
}
TEST(plan, once) { lab_run(2, NULL, once_body, NULL); }

/* ---- other extensions ------------------------------------------------------------------------ */

typedef struct watcher {
    uint64_t seq, counts[FSDP_OP_COUNT];
    struct {
        char unit[16];
        int call;
    } hooks[PLAN_CALLS * 8];
    int num_hooks;
} watcher;

static int watch_op(void *user, fsdp_model *model, fsdp_op *op) {
    watcher *w = (watcher *)user;
    if (op->model != model) return 0;
    CHECK_EQ_INT(op->seq, w->seq + 1); /* none twice, none left out, none from a dry run */
    w->seq = op->seq;
    w->counts[op->kind]++;
    if (op->kind == FSDP_OP_HOOK && w->num_hooks < PLAN_CALLS * 8) {
        snprintf(w->hooks[w->num_hooks].unit, sizeof w->hooks[0].unit, "%s",
                 op->unit ? fsdp_unit_name(op->unit) : "");
        w->hooks[w->num_hooks++].call = (int)op->count;
    }
    return 0;
}
static void watch(watcher *w, plan_bed *b) {
    fsdp_extension e = FSDP_ZERO;
    fsdp_counters c;
    e.op = watch_op, e.user = w;
    CALL(b->w, fsdp_model_counters(b->model, &c));
    for (int k = 0; k < FSDP_OP_COUNT; k++) w->counts[k] = c.calls[k], w->seq += c.calls[k];
    CALL(b->w, fsdp_attach(b->model, &e));
}
static void watched_body(lab_rank *r) {
    const fsdp_plan_desc defaults = FSDP_ZERO;
    plan_net net = *(const plan_net *)r->arg;
    plan_result *out[2];
    watcher *w[3];
    for (int i = 0; i < 3; i++) w[i] = (watcher *)lab_zeros(1, sizeof *w[i]);
    for (int planned = 0; planned < 2; planned++) {
        plan_bed b;
        fsdp_counters c;
        out[planned] = (plan_result *)lab_zeros(1, sizeof(plan_result));
        plan_open(&b, &net, r->w);
        CALL(r->w, fsdp_model_commit(b.model));
        watch(w[planned], &b);
        make_plan(&b, planned ? &defaults : NULL);
        if (planned) watch(w[2], &b);
        steps(&b, out[planned], 5);
        if (planned) CHECK(report_of(&b).replayed == 3);
        CALL(r->w, fsdp_model_counters(b.model, &c));
        for (int i = planned; i <= 2 * planned; i++)
            for (int k = 0; k < FSDP_OP_COUNT; k++) CHECK_EQ_INT(w[i]->counts[k], c.calls[k]);
        fsdp_model_destroy(b.model);
    }
    same_bits(out[0], out[1], 5);
    for (int i = 1; i < 3; i++) { /* calls are announced as in eager steps */
        CHECK_EQ_INT(w[i]->num_hooks, w[0]->num_hooks);
        for (int k = 0; k < w[0]->num_hooks; k++) {
            CHECK_EQ_INT(w[i]->hooks[k].call, w[0]->hooks[k].call);
            CHECK_EQ_STR(w[i]->hooks[k].unit, w[0]->hooks[k].unit);
        }
    }
    CHECK(w[0]->num_hooks > 5 * net.num_calls);
    for (int i = 0; i < 3; i++) free(w[i]);
    free(out[0]), free(out[1]);
}
TEST(plan, watched) {
    plan_net n = net_chain();
    lab_how how;
    memset(&how, 0, sizeof how);
    for (how.lanes = 0; how.lanes < 3; how.lanes += 2)
        for (n.model.debug = 0; n.model.debug < 2;
             n.model.debug++) /* released slots are poisoned */
            lab_run(2, &how, watched_body, &n);
}

/* ---- errors ---------------------------------------------------------------------------------- */

#undef TAGS
#define TAGS GLOO | AT_NIGHT(TSAN)

static void refused_descs(lab_rank *r) {
    const plan_net net = net_chain();
    const uint32_t beyond = 1u << FSDP_PASS_COUNT;
    plan_bed b;
    fsdp_plan *second = (fsdp_plan *)&b;
    fsdp_plan_report rep;
    fsdp_plan_desc d;
    plan_open(&b, &net, r->w);
#define BAD(field, value)                                                                          \
    memset(&d, 0, sizeof d);                                                                       \
    d.field = value;                                                                               \
    REFUSED(r->w, fsdp_plan_create(b.model, &d, &b.plan), #field);                                 \
    CHECK(b.plan == NULL)
    BAD(without, beyond);
    BAD(with, beyond);
    BAD(warm_up, -1);
    BAD(ahead, -2);
    BAD(most_kinds, -1);
    BAD(most_bytes, -1);
    BAD(bucket_bytes, -2);
    BAD(first_bucket_bytes, -1);
    memset(&d, 0, sizeof d);
    d.end_canary = 1;
    REFUSED(r->w, fsdp_plan_create(b.model, &d, &b.plan), "fsdp_plan_desc");
    REFUSED(NULL, fsdp_plan_create(NULL, NULL, &b.plan), "NULL");
    REFUSED(r->w, fsdp_plan_create(b.model, NULL, NULL), "NULL");
    CHECK_STATUS(fsdp_plan_pause(NULL, 1), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_plan_forget(NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_plan_report_get(NULL, 0, &rep), FSDP_ERR_INVALID_ARG);
    CHECK_EQ_INT(fsdp_plan_state(NULL), FSDP_PLAN_MODE_COUNT);
    CHECK_EQ_STR(fsdp_plan_why(NULL), "");
    CHECK_EQ_INT(fsdp_plan_count(NULL), 0);
    CHECK_EQ_INT(fsdp_plan_text(NULL, 0, FSDP_PLAN_TEXT_OPS, NULL, 0), 0);
    fsdp_plan_destroy(NULL);
    CALL(r->w, fsdp_pre_forward(b.unit[0])); /* a unit is not idle */
    REFUSED_AS(FSDP_ERR_INVALID_STATE, r->w, fsdp_plan_create(b.model, NULL, &b.plan), "h.0");
    CHECK(b.plan == NULL);
    CALL(r->w, fsdp_post_forward(b.unit[0]));
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_INVALID_STATE); /* says it again */
    CALL(r->w, fsdp_plan_create(b.model, NULL, &b.plan));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, r->w, fsdp_plan_create(b.model, NULL, &second),
               "has a plan");
    CHECK(second == NULL);
    CHECK_STATUS(fsdp_plan_report_get(b.plan, 0, &rep), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_plan_report_get(b.plan, -1, &rep), FSDP_ERR_INVALID_ARG);
    for (int index = -1; index <= 0; index++) /* it has no plan yet */
        CHECK_EQ_INT(fsdp_plan_text(b.plan, index, FSDP_PLAN_TEXT_OPS, NULL, 0), 0);
    fsdp_plan_destroy(b.plan);
    CALL(r->w, fsdp_plan_create(b.model, NULL, &b.plan)); /* but after it, it is possible */
}
TEST(plan_errors, descs) { lab_run(2, NULL, refused_descs, NULL); }

static int says(const char *text, const char *const *words) {
    for (; *words; words++)
        if (!strstr(text, *words)) return 0;
    return 1;
}

/* A plan needs more bytes than it may have. */
static void too_small(lab_rank *r) {
    static const char *const words[] = {"call ", "'h.", "slots need", " bytes, 1000 are allowed",
                                        NULL};
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    fsdp_plan_desc d = FSDP_ZERO;
    plan_bed b;
    d.most_bytes = 1000;
    plan_open(&b, &net, r->w);
    make_plan(&b, &d);
    steps(&b, out, 4);
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_REFUSED);
    CHECK_MSG(says(fsdp_plan_why(b.plan), words), "%s", fsdp_plan_why(b.plan));
    CHECK_MSG(says(fsdp_last_error(r->w), words), "not in the log: %s", fsdp_last_error(r->w));
    free(out);
}
TEST(plan_errors, too_small) { lab_run(2, NULL, too_small, NULL); }

/* Rank 1 makes an extra call; the error names both sides, and the world continues. */
static void other_ranks(lab_rank *r) {
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    fsdp_plan_desc d = FSDP_ZERO;
    plan_bed b;
    d.without = ALL_PASSES; /* decisions follow from calls: an earlier one may differ */
    plan_open(&b, &net, r->w);
    make_plan(&b, &d);
    steps(&b, out, 1);
    plan_calls(&b, 0, 3);
    if (r->rank == 1) CALL(r->w, fsdp_wait(b.unit[1])); /* no collective */
    plan_calls(&b, 3, net.num_calls);
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_MISMATCH);
    const char *text = fsdp_last_error(r->w);
    CHECK_MSG(strstr(text, "rank 1 differs") && strstr(text, "call ") && strstr(text, "expected"),
              "%s", text);
    CHECK_MSG(strstr(text, "wait 'h.1', expected post_forward 'h.1'"), "%s", text);
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_REFUSED);
    CHECK_OK(fsdp_world_status(r->w));
    (void)plan_update(&b);
    steps(&b, out, 3); /* eager */
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_REFUSED);
    free(out);
}
TEST(plan_errors, ranks_differ, TSAN) {
    lab_run(2, NULL, other_ranks, NULL);
    lab_run(4, NULL, other_ranks, NULL);
}

/* In a replayed step rank 1 leaves a parameter out, of a unit in the middle of a joined reduction. */
static void other_uses(lab_rank *r) {
    const plan_net net = net_unused();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    fsdp_plan_desc d = FSDP_ZERO;
    fsdp_status status = FSDP_OK;
    plan_bed b;
    plan_open(&b, &net, r->w);
    make_plan(&b, &d);
    steps(&b, out, 3);
    const fsdp_plan_report rep = report_of(&b);
    CHECK(rep.reductions[1] == 1 && fsdp_plan_state(b.plan) == FSDP_PLAN_REPLAYING);
    for (int i = 0; i < net.num_calls && !status; i++) {
        const int unit = net.calls[i].unit, call = net.calls[i].call;
        for (int k = 0; k < 2 && call == FSDP_CALL_POST_BACKWARD; k++)
            if (r->rank == 0 || unit != 2 || k == 0) (void)fsdp_grad(b.unit[unit], k);
        status = plan_hook(&b, unit, call);
    }
    CHECK_STATUS(status ? status : fsdp_finalize_backward(b.model), FSDP_ERR_MISMATCH);
    W_CHECK(strstr(fsdp_last_error(r->w), "parameters that have a gradient") != NULL, "%s",
            fsdp_last_error(r->w));
    free(out);
}
TEST(plan_errors, uses_differ, TSAN) { lab_run(2, NULL, other_uses, NULL); }

/* Rank 1 has a hook more: the same calls, but one of them does something else there. */
static fsdp_status no_hook(void *user, const fsdp_param_view *v, void *stream) {
    (void)user, (void)v, (void)stream;
    return FSDP_OK;
}
static void other_records(lab_rank *r) {
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    fsdp_plan_desc d = FSDP_ZERO;
    plan_bed b;
    d.without = ALL_PASSES; /* which decide otherwise about such a unit */
    plan_open(&b, &net, r->w);
    if (r->rank == 1) CALL(r->w, fsdp_set_post_accumulate_hook(b.unit[1], 0, no_hook, NULL));
    make_plan(&b, &d);
    steps(&b, out, 1);
    plan_calls(&b, 0, net.num_calls);
    REFUSED_AS(FSDP_ERR_MISMATCH, r->w, fsdp_finalize_backward(b.model),
               "rank 1 differs from the mesh's first rank at call 21: post_backward 'h.1'");
    free(out);
}
TEST(plan_errors, ranks_differ_within_a_call, TSAN) { lab_run(2, NULL, other_records, NULL); }

/* Ranks have not the same slots: here rank 1 alone has freed its own. What counts is the least of all
   ranks, so that the plan is the same. */
static void trimmed(lab_rank *r) {
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    fsdp_memory mem;
    plan_bed b;
    plan_open(&b, &net, r->w);
    CALL(r->w, fsdp_plan_create(b.model, NULL, &b.plan));
    CALL(r->w, fsdp_set_reshard_after_forward(b.model, NULL, FSDP_RESHARD_NEVER));
    steps(&b, out, 1);
    CALL(r->w, fsdp_set_reshard_after_forward(b.model, NULL, FSDP_RESHARD_ALWAYS));
    if (r->rank == 1) CALL(r->w, fsdp_pools_trim(b.model));
    plan_calls(&b, 0, net.num_calls);
    CALL(r->w, fsdp_model_memory(b.model, &mem));
    int64_t taken[2] = {plan_slots(&mem), -plan_slots(&mem)};
    CALL(r->w, fsdp_all_reduce(r->w, NULL, taken, 2, FSDP_I64, FSDP_MIN));
    CHECK(taken[0] < -taken[1]);
    CALL(r->w, fsdp_finalize_backward(b.model));
    plan_step_end(&b, out);
    W_CHECK(fsdp_plan_count(b.plan) == 1, "%s", fsdp_plan_why(b.plan));
    CHECK_EQ_INT(report_of(&b).bytes[0], taken[0]);
    steps(&b, out, 1);
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_REPLAYING);
    free(out);
}
TEST(plan_errors, one_rank_has_fewer_slots, TSAN) { lab_run(2, NULL, trimmed, NULL); }

/* Rank 1 gives another desc: each field is named, and no rank has a plan. */
static void other_desc(lab_rank *r) {
    const plan_net net = net_chain();
    const int64_t times[2] = {3, 4};
    fsdp_plan_cost cost = FSDP_ZERO, second;
    fsdp_plan_desc d;
    plan_bed b;
    plan_open(&b, &net, r->w);
    cost.compute_ns = &times[r->rank], cost.num_compute = 1;
#define OTHER(field, value)                                                                        \
    memset(&d, 0, sizeof d);                                                                       \
    if (r->rank == 1) d.field = value;                                                             \
    REFUSED_AS(FSDP_ERR_MISMATCH, r->w, fsdp_plan_create(b.model, &d, &b.plan), #field " is ");    \
    CHECK(b.plan == NULL)
    OTHER(without, 1);
    OTHER(with, 1);
    OTHER(warm_up, 2);
    OTHER(ahead, 1);
    OTHER(most_kinds, 7);
    OTHER(strict, 1);
    OTHER(most_bytes, INT64_MAX);
    OTHER(bucket_bytes, -1);
    OTHER(first_bucket_bytes, 4);
    second = cost;
    OTHER(cost, &second);
    memset(&d, 0, sizeof d);
    d.cost = &cost; /* other times, with equal numbers */
    REFUSED_AS(FSDP_ERR_MISMATCH, r->w, fsdp_plan_create(b.model, &d, &b.plan), "cost is ");
    /* A field of one rank is wrong: the other one does not wait. */
    memset(&d, 0, sizeof d);
    if (r->rank == 1) d.ahead = -2;
    CHECK_STATUS(fsdp_plan_create(b.model, &d, &b.plan),
                 r->rank == 1 ? FSDP_ERR_INVALID_ARG : FSDP_ERR_OUT_OF_MEMORY);
    CHECK(b.plan == NULL);
    d.ahead = 0, d.strict = 1 + r->rank, d.cost = &cost; /* equal in what they mean */
    cost.compute_ns = &times[0];
    CALL(r->w, fsdp_plan_create(b.model, &d, &b.plan));
}
TEST(plan_errors, ranks_give_other_descs, TSAN) { lab_run(2, NULL, other_desc, NULL); }

/* Rank 1 makes a call that fails in the recorded step: the others do not wait for it, and a later
   step is recorded. */
static void fails_on_one(lab_rank *r) {
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    plan_bed b;
    plan_open(&b, &net, r->w);
    CALL(r->w, fsdp_plan_create(b.model, NULL, &b.plan));
    steps(&b, out, 1);
    plan_calls(&b, 0, 4);
    if (r->rank == 1) CHECK_STATUS(fsdp_post_forward(b.unit[3]), FSDP_ERR_INVALID_STATE);
    plan_calls(&b, 4, net.num_calls);
    CHECK_STATUS(fsdp_finalize_backward(b.model), r->rank == 1 ? FSDP_ERR_INVALID_STATE : FSDP_OK);
    CHECK_EQ_INT(fsdp_plan_count(b.plan), 0);
    plan_step_end(&b, out);
    steps(&b, out, 2);
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_REPLAYING);
    CHECK_EQ_INT(report_of(&b).replayed, 1);
    free(out);
}
TEST(plan_errors, a_call_fails_on_one_rank) { lab_run(2, NULL, fails_on_one, NULL); }

/* A strict plan that has been replayed, and the first calls of its next step. */
static void strict_open(plan_bed *b, const plan_net *net, fsdp_world *w, plan_result *out,
                        int calls) {
    fsdp_plan_desc d = FSDP_ZERO;
    d.strict = 1;
    plan_open(b, net, w);
    make_plan(b, &d);
    steps(b, out, 4);
    plan_calls(b, 0, calls);
}

/* The rest of that step: finalize says again what was wrong, and the next one is replayed. */
static void strict_close(plan_bed *b, plan_result *out, int call) {
    plan_calls(b, call, b->net->num_calls);
    CHECK_STATUS(fsdp_finalize_backward(b->model), FSDP_ERR_INVALID_STATE);
    CALL(b->w, fsdp_set_gradient_divide_factor(b->model, NULL, 0));
    plan_step_end(b, out);
    steps(b, out, 2);
    CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_REPLAYING);
    free(out);
}

/* A strict plan also reports a setter that changes options while gradients wait. */
static void strict_setter(lab_rank *r) {
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    plan_bed b;
    strict_open(&b, &net, r->w, out, net.num_calls - 2); /* gradients are joined: others' wait */
    CALL(r->w, fsdp_set_gradient_divide_factor(b.model, NULL, 3));
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_EAGER);
    REFUSED_AS(FSDP_ERR_INVALID_STATE, r->w, fsdp_pre_backward(b.unit[0]),
               "while gradients waited");
    strict_close(&b, out, net.num_calls - 2);
}
TEST(plan_errors, strict_setter) { lab_run(2, NULL, strict_setter, NULL); }

/* An error that a strict plan has not reported yet is dropped when the step is reset. */
static void strict_reset(lab_rank *r) {
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    plan_bed b;
    strict_open(&b, &net, r->w, out, net.num_calls - 2);
    CALL(r->w, fsdp_set_gradient_divide_factor(b.model, NULL, 3)); /* it leaves the plan */
    CALL(r->w, fsdp_model_reset(b.model));
    CALL(r->w, fsdp_set_gradient_divide_factor(b.model, NULL, 0));
    CALL(r->w, fsdp_set_reshard_after_forward(b.model, NULL, FSDP_RESHARD_NEVER));
    steps(&b, out, 3); /* a new step variant */
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_REPLAYING);
    free(out);
}
TEST(plan_errors, strict_reset) { lab_run(2, NULL, strict_reset, NULL); }

/* A strict plan also reports a new layout within a step. */
static void strict_layout(lab_rank *r) {
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    plan_bed b;
    strict_open(&b, &net, r->w, out, 4);
    shake(&b);
    REFUSED_AS(FSDP_ERR_INVALID_STATE, r->w, fsdp_pre_forward(b.unit[2]), "a new layout");
    strict_close(&b, out, 4);
}
TEST(plan_errors, strict_layout) { lab_run(2, NULL, strict_layout, NULL); }

/* strict: a call that the plan does not expect is an error, and the step continues eagerly. */
static void strict(lab_rank *r) {
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    plan_bed b;
    strict_open(&b, &net, r->w, out, 4);
    REFUSED_AS(FSDP_ERR_INVALID_STATE, r->w, fsdp_pre_forward(b.unit[3]),
               "expected pre_forward 'h.2' (call 4 of 25), got pre_forward 'h.3'");
    CHECK_EQ_INT(fsdp_unit_state(b.unit[3]), FSDP_STATE_IDLE);
    strict_close(&b, out, 4);
}
TEST(plan_errors, strict) { lab_run(2, NULL, strict, NULL); }

/* ---- memory ---------------------------------------------------------------------------------- */

/* The n-th allocation in the step that makes a plan fails, from its first call on, on one rank or on
   all. */
typedef struct mjob {
    int stride, everywhere;
    int64_t done; /* how many allocations that step makes */
} mjob;

static void starved(lab_rank *r) {
    mjob *j = (mjob *)r->arg;
    const plan_net net = plan_chain(3, 16, 4);
    plan_result *a = (plan_result *)lab_zeros(1, sizeof *a),
                *b = (plan_result *)lab_zeros(1, sizeof *b);
    plan_train(r->w, &net, NULL, 0, 5, a);
    for (int64_t n = 0;; n += j->stride) {
        plan_bed bed;
        snprintf(w_case, sizeof w_case, "allocation %d", (int)n);
        memset(b, 0, sizeof *b);
        plan_open(&bed, &net, r->w);
        CALL(r->w, fsdp_plan_create(bed.model, NULL, &bed.plan));
        plan_step(&bed, b);
        int64_t before = w_allocations(r->heap), failures = r->heap->failures;
        if (j->everywhere || r->rank == 1) w_fail(r->heap, n);
        plan_calls(&bed, 0, net.num_calls);
        fsdp_status status = fsdp_finalize_backward(bed.model);
        w_fail(r->heap, -1);
        W_CHECK(!status || status == FSDP_ERR_OUT_OF_MEMORY, "%s", fsdp_last_error(r->w));
        CHECK_OK(fsdp_world_status(r->w));
        int64_t made = w_allocations(r->heap) - before;
        plan_step_end(&bed, b);
        steps(&bed, b, 3);
        int32_t failed = r->heap->failures > failures;
        CALL(r->w, fsdp_all_reduce(r->w, NULL, &failed, 1, FSDP_I32, FSDP_MAX));
        W_CHECK(fsdp_plan_state(bed.plan) == (failed ? FSDP_PLAN_REFUSED : FSDP_PLAN_REPLAYING),
                "mode %d: %s", (int)fsdp_plan_state(bed.plan), fsdp_plan_why(bed.plan));
        if (failed) W_CHECK(*fsdp_plan_why(bed.plan), "no reason");
        same_bits(a, b, 5);
        fsdp_model_destroy(bed.model);
        if (!failed && n > made) break;
        if (r->rank == 1) j->done = n;
    }
    free(a), free(b);
}
static void run_starved(int stride) {
    mjob j = {stride, 0, 0};
    for (j.everywhere = 0; j.everywhere < 2; j.everywhere++) lab_run(2, NULL, starved, &j);
    CHECK(j.done > 20);
    h_message("up to allocation %d", (int)j.done);
}
TEST(plan_errors, allocations) { run_starved(29); }
TEST(long_plan, allocations, SECONDS(300) | NIGHT) { run_starved(W_SLOW ? 3 : 1); }

/* Memory for collectives may end a little later, when a thread of the backend no longer looks at it:
   before and after. A call that loses a block each time is found. */
static void check_nothing_lost(const w_heap *heap, int64_t live) {
    for (int i = 0; i < 10000 && __atomic_load_n(&heap->live, __ATOMIC_SEQ_CST) > live; i++)
        usleep(1000);
    CHECK_MSG(__atomic_load_n(&heap->live, __ATOMIC_SEQ_CST) <= live, "%lld blocks, %lld before",
              (long long)__atomic_load_n(&heap->live, __ATOMIC_SEQ_CST), (long long)live);
}

/* fsdp_plan_create likewise: nothing changes then, on no rank. */
static void create_starved(lab_rank *r) {
    const plan_net net = plan_chain(3, 16, 4);
    plan_bed b;
    plan_open(&b, &net, r->w);
    CALL(r->w, fsdp_model_commit(b.model));
    int64_t live = r->heap->live;
    for (int64_t n = 0;; n++) {
        if (r->rank == r->size - 1) w_fail(r->heap, n);
        fsdp_status status = fsdp_plan_create(b.model, NULL, &b.plan);
        w_fail(r->heap, -1);
        CHECK(status || n > 0); /* the other rank's failure is reported */
        if (!status) break;
        CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
        check_nothing_lost(r->heap, live);
        CHECK(n < 100 && b.plan == NULL);
    }
    fsdp_plan_destroy(b.plan);
    check_nothing_lost(r->heap, live);
}
TEST(plan_errors, create_without_memory) {
    lab_run(1, NULL, create_starved, NULL);
    lab_run(2, NULL, create_starved, NULL);
}

/* Ranks differ, and one has no memory: both refuse the plan, and neither rank hangs. */
static void differ_starved(lab_rank *r) {
    const plan_net net = plan_chain(3, 16, 4);
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    int32_t told = 0;
    for (int64_t n = 0; told < 2; n++) {
        plan_bed b;
        plan_open(&b, &net, r->w);
        CALL(r->w, fsdp_plan_create(b.model, NULL, &b.plan));
        steps(&b, out, 1);
        plan_calls(&b, 0, 3);
        if (r->rank == 1) CALL(r->w, fsdp_wait(b.unit[1]));
        plan_calls(&b, 3, net.num_calls);
        if (r->rank == 1) w_fail(r->heap, n);
        fsdp_status status = fsdp_finalize_backward(b.model);
        w_fail(r->heap, -1);
        told = status == FSDP_ERR_MISMATCH ? 2 : !status || status == FSDP_ERR_OUT_OF_MEMORY;
        CHECK(told);
        CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_REFUSED);
        CHECK_OK(fsdp_world_status(r->w));
        b.step = 0;
        fsdp_model_destroy(b.model);
    }
    free(out);
}
TEST(plan_errors, ranks_differ_without_memory, TSAN) { lab_run(2, NULL, differ_starved, NULL); }

/* A variant's arena has been replaced, and one rank has no memory to make its tape again: all ranks
   continue eagerly. */
static void bind_starved(lab_rank *r) {
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    fsdp_plan_desc d = FSDP_ZERO;
    d.bucket_bytes = -1, d.without = 1u << FSDP_PASS_KEEP;
    for (int64_t n = 0, bound = 0; !bound; n += 9) {
        plan_bed b;
        fsdp_plan_report rep;
        memset(&rep, 0, sizeof rep);
        plan_open(&b, &net, r->w);
        CALL(r->w, fsdp_set_reshard_after_forward(b.model, NULL, FSDP_RESHARD_ALWAYS));
        CALL(r->w, fsdp_plan_create(b.model, &d, &b.plan));
        steps(&b, out, 3);
        CALL(r->w, fsdp_set_reshard_after_forward(b.model, NULL, FSDP_RESHARD_NEVER));
        steps(&b, out, 2); /* its arena is larger */
        CHECK_EQ_INT(fsdp_plan_count(b.plan), 2);
        CALL(r->w, fsdp_set_reshard_after_forward(b.model, NULL, FSDP_RESHARD_ALWAYS));
        int64_t failures = r->heap->failures;
        if (r->rank == 1) w_fail(r->heap, n);
        CALL(r->w, fsdp_pre_forward(b.unit[0]));
        w_fail(r->heap, -1);
        int32_t failed = r->heap->failures > failures;
        CALL(r->w, fsdp_all_reduce(r->w, NULL, &failed, 1, FSDP_I32, FSDP_MAX));
        CHECK_EQ_INT(fsdp_plan_state(b.plan), failed ? FSDP_PLAN_EAGER : FSDP_PLAN_REPLAYING);
        CHECK_EQ_INT(fsdp_plan_count(b.plan), failed ? 1 : 2);
        if (failed) CHECK(strstr(fsdp_plan_why(b.plan), "new arena"));
        CHECK(n > 0 || failed);
        plan_look(&b, 0, 0, 0);
        plan_calls(&b, 1, net.num_calls);
        CALL(r->w, fsdp_finalize_backward(b.model));
        plan_step_end(&b, out);
        steps(&b, out, 2);
        CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_REPLAYING);
        bound = !failed;
        fsdp_model_destroy(b.model);
    }
    free(out);
}
TEST(plan_errors, no_memory_for_a_new_tape) { lab_run(2, NULL, bind_starved, NULL); }

/* One rank gets no memory for the arena: all ranks stay eager. */
static int64_t arena_allocs;
static fsdp_status arena_guard(lab_guard *g, const fsdp_group *group, const fsdp_coll *coll) {
    (void)g;
    if (group || coll) return FSDP_OK;
    return __atomic_fetch_sub(&arena_allocs, 1, __ATOMIC_SEQ_CST) == 1 ? FSDP_ERR_OUT_OF_MEMORY
                                                                       : FSDP_OK;
}
static void no_arena(lab_rank *r) {
    static fsdp_comm_ops ops;
    lab_guard guard = {arena_guard, 0, "no memory for it"};
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    fsdp_world_desc d = w_desc(r->rank, r->size, &r->start->threads[0], "arena", 0);
    plan_bed b;
    if (r->rank == 1) ops = lab_guard_ops();
    d.allocator = w_heap_allocator(r->heap);
    d.comm_ops = r->rank == 1 ? &ops : fsdp_shm_comm_ops();
    d.user = &guard;
    CALL(NULL, fsdp_init(&d, &r->w));
    plan_open(&b, &net, r->w);
    CALL(r->w, fsdp_plan_create(b.model, NULL, &b.plan));
    steps(&b, out, 1);
    plan_calls(&b, 0, net.num_calls);
    if (r->rank == 1) __atomic_store_n(&arena_allocs, 1, __ATOMIC_SEQ_CST);
    CALL(r->w, fsdp_finalize_backward(b.model));
    plan_step_end(&b, out);
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_REFUSED);
    CHECK(strstr(fsdp_plan_why(b.plan), r->rank == 1 ? "no memory for it" : "another rank"));
    steps(&b, out, 2);
    CHECK_EQ_INT(b.step, 4);
    free(out);
    lab_end(r);
}
TEST(plan_errors, no_memory_for_the_arena) {
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1;
    if (getenv("FSDP_BACKEND") && strcmp(getenv("FSDP_BACKEND"), "shm") != 0) SKIP("shared memory");
    lab_run(2, &how, no_arena, NULL);
}

/* A model, or the world, ends in the middle of a replayed step. */
static void ends_inside(lab_rank *r) {
    const plan_net net = net_chain();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    for (int at = 1; at < net.num_calls; at += 2) {
        plan_bed b;
        plan_open(&b, &net, r->w);
        CALL(r->w, fsdp_plan_create(b.model, NULL, &b.plan));
        steps(&b, out, 3);
        plan_calls(&b, 0, at);
        if (at % 4 == 3) fsdp_plan_destroy(b.plan); /* units hold slots of it until the end */
        CHECK_STATUS(fsdp_world_status(r->w), FSDP_OK);
        if (at + 2 < net.num_calls) fsdp_model_destroy(b.model);
    }
    free(out);
}
TEST_P(plan_errors, ends_inside_of_a_step, lane_modes, TSAN) {
    lab_how how;
    memset(&how, 0, sizeof how);
    how.lanes = row->lanes;
    lab_run(2, &how, ends_inside, NULL);
}

/* A rank that dies in a replayed step is named by the others. */
static void killed(lab_rank *r) {
    const plan_net net = net_nested();
    plan_result *out = (plan_result *)lab_zeros(1, sizeof *out);
    plan_bed b;
    fsdp_status status = FSDP_OK;
    plan_open(&b, &net, r->w);
    CALL(r->w, fsdp_plan_create(b.model, NULL, &b.plan));
    steps(&b, out, 4);
    CHECK_EQ_INT(fsdp_plan_state(b.plan), FSDP_PLAN_REPLAYING);
    for (int i = 0; i < 1000 && !status; i++) {
        for (int c = 0; c < net.num_calls && !status; c++) {
            if (r->rank == 1 && i == 1 && c == 27) h_die(SIGKILL);
            status = plan_hook(&b, net.calls[c].unit, net.calls[c].call);
        }
        if (!status) status = fsdp_finalize_backward(b.model);
    }
    CHECK_STATUS(status, FSDP_ERR_PEER_LOST);
    CHECK_MSG(strstr(fsdp_last_error(r->w), "rank 1"), "%s", fsdp_last_error(r->w));
    CHECK_STATUS(fsdp_world_status(r->w), FSDP_ERR_PEER_LOST);
    CHECK_STATUS(fsdp_pre_forward(b.unit[0]), FSDP_ERR_PEER_LOST);
    free(out);
}
TEST_P(plan_errors, a_rank_dies, lane_modes) {
    lab_how how;
    memset(&how, 0, sizeof how);
    how.lanes = row->lanes, how.processes = 1;
    lab_run(3, &how, killed, NULL);
}

/* The pass `once` skips a unit whose reduction cannot be bucketed: its hook is called for each
   backward, as in the eager step. */
static fsdp_status counts_calls(void *user, const fsdp_param_view *v, void *stream) {
    (void)v, (void)stream;
    ++*(int *)user;
    return FSDP_OK;
}
static void once_with_a_hook(lab_rank *r) {
    const fsdp_param_desc p = fsdp_mat("w", 4, 4);
    fsdp_unit_desc like = FSDP_ZERO;
    fsdp_plan_desc d = FSDP_ZERO;
    fsdp_plan *plan;
    int calls = 0;
    like.name = "u";
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *u = lab_unit(r->w, m, &like, &p, 1);
    CALL(r->w, fsdp_set_post_accumulate_hook(u, 0, counts_calls, &calls));
    d.with = 1u << FSDP_PASS_ONCE;
    CALL(r->w, fsdp_plan_create(m, &d, &plan));
    for (int step = 0; step < 5; step++) {
        calls = 0;
        for (int k = 0; k < 2; k++) lab_forward(r->w, u);
        for (int k = 0; k < 2; k++) {
            CALL(r->w, fsdp_pre_backward(u));
            ((float *)fsdp_grad(u, 0))[0] += 1;
            CALL(r->w, fsdp_post_backward(u));
        }
        CALL(r->w, fsdp_finalize_backward(m));
        CHECK_EQ_INT(calls, 2);
        CALL(r->w, fsdp_zero_grad(m));
    }
    CHECK_EQ_INT(fsdp_plan_state(plan), FSDP_PLAN_REPLAYING);
}
TEST(plan_once, hooks_are_called_for_each_backward) { lab_run(2, NULL, once_with_a_hook, NULL); }

/* Six units in order; the gathers that the first pre_forward issues. */
enum { LISTED = 6 };
static int gathers_of_a_step(fsdp_world *w, fsdp_model *m, fsdp_unit *const *u) {
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    CALL(w, fsdp_model_counters(m, &before));
    for (int i = 0; i < LISTED; i++) {
        CALL(w, fsdp_pre_forward(u[i]));
        if (i == 0) CALL(w, fsdp_model_counters(m, &after));
        CALL(w, fsdp_post_forward(u[i]));
    }
    for (int i = LISTED - 1; i >= 0; i--) {
        CALL(w, fsdp_pre_backward(u[i]));
        (void)fsdp_grad(u[i], 0);
        CALL(w, fsdp_post_backward(u[i]));
    }
    CALL(w, fsdp_finalize_backward(m));
    CALL(w, fsdp_zero_grad(m));
    return (int)(after.calls[FSDP_OP_ALL_GATHER] - before.calls[FSDP_OP_ALL_GATHER]);
}
static void listed_units(const lab_rank *r, fsdp_model *m, fsdp_unit **u) {
    const fsdp_param_desc p = fsdp_mat("w", 16, 16); /* its slot has 1,024 bytes */
    static const char *const names[LISTED] = {"0", "1", "2", "3", "4", "5"};
    for (int i = 0; i < LISTED; i++) {
        fsdp_unit_desc like = FSDP_ZERO;
        like.name = names[i];
        u[i] = lab_unit(r->w, m, &like, &p, 1);
    }
}

/* The units that a list names are a setting: another list makes another step variant. */
static void lists_are_settings(lab_rank *r) {
    fsdp_unit *u[LISTED];
    fsdp_plan *plan;
    fsdp_plan_report report;
    fsdp_model *m = lab_model(r->w, NULL);
    listed_units(r, m, u);
    CALL(r->w, fsdp_set_modules_to_forward_prefetch(u[0], &u[1], 1));
    CALL(r->w, fsdp_plan_create(m, NULL, &plan));
    for (int step = 0; step < 4; step++) (void)gathers_of_a_step(r->w, m, u);
    CHECK_EQ_INT(fsdp_plan_count(plan), 1);
    CALL(r->w, fsdp_set_modules_to_forward_prefetch(u[0], &u[3], 1));
    (void)gathers_of_a_step(r->w, m, u);
    CHECK_EQ_INT(fsdp_plan_count(plan), 2);
    CALL(r->w, fsdp_plan_report_get(plan, 0, &report));
    CHECK(report.recorded == 2 && report.replayed == 2);
}
TEST(plan_kinds, prefetch_lists_are_settings) { lab_run(2, NULL, lists_are_settings, NULL); }

/* Replays count prefetched bytes: in later eager steps, prefetches have the budget that they would
   have without a plan. */
static void budget_after_replays(lab_rank *r) {
    fsdp_unit *u[LISTED];
    fsdp_plan *plan;
    fsdp_plan_desc d = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    md.prefetch_bytes = 1024; /* one unit */
    fsdp_model *m = lab_model(r->w, &md);
    listed_units(r, m, u);
    for (int i = 0; i + 1 < LISTED; i++)
        CALL(r->w, fsdp_set_modules_to_forward_prefetch(u[i], &u[i + 1],
                                                        LISTED - 1 - i < 3 ? LISTED - 1 - i : 3));
    d.without = 1u << FSDP_PASS_BUCKET | 1u << FSDP_PASS_KEEP | 1u << FSDP_PASS_AHEAD |
                1u << FSDP_PASS_ARENA;
    const int eager = gathers_of_a_step(r->w, m, u);
    CHECK_EQ_INT(eager, 2); /* its own, and one ahead */
    CALL(r->w, fsdp_plan_create(m, &d, &plan));
    for (int step = 0; step < 5; step++) (void)gathers_of_a_step(r->w, m, u);
    CHECK_EQ_INT(fsdp_plan_state(plan), FSDP_PLAN_REPLAYING);
    fsdp_plan_destroy(plan);
    for (int step = 0; step < 2; step++) CHECK_EQ_INT(gathers_of_a_step(r->w, m, u), eager);
}
TEST(plan_kinds, budget_after_replays) {
    lab_how how = FSDP_ZERO;
    how.lanes = 2;
    lab_run(2, &how, budget_after_replays, NULL);
}
