/* test_fully_shard_compile.c - PyTorch's tests of fully_shard under torch.compile ("traceable
   FSDP2"), for plans. What a compiled graph does there, a replayed step does here. A test trains a
   net by calls and with a plan, on 1 to 4 ranks: losses, shards and gradients are equal to the bit.

   PyTorch removed "Traceable FSDP2": the names are those of the last version that had all tests.
   Its later versions keep disable_compiling_hooks, dynamo_trace_use_training_state,
   trace_fsdp_copy_ and dynamo_recompiles_on_fsdp_layers. PyTorch compares losses, 1e-5 relative.
   Here iteration 0 is the warm-up, 1 is recorded, and 2 to 9 are replayed, without an allocation.
   Counts are those of several ranks without joined collectives.

   SPDX-License-Identifier: MIT */
#define TAGS SLOW | AT_NIGHT(ASAN | GLOO | NCCL)
#include "harness.h"
#include "plan_nets.h"
#include "plan_texts.h"

enum { ALL_PASSES = (1 << FSDP_PASS_COUNT) - 1 };

static nets_job job; /* of this process: a test */

/* Another backend takes longer, and has a way to run of its own. */
static int is_elsewhere(void) { return getenv("FSDP_BACKEND") != NULL; }
static int most_ranks(void) { return is_elsewhere() ? 3 : NETS_RANKS; }

/* Inline and with lanes. */
static void everywhere(void (*then)(int size)) {
    const int lanes = is_elsewhere() ? 0 : 2;
    for (int size = 1; size <= most_ranks(); size++)
        for (int l = 0; l <= lanes; l += 2) {
            nets_run(&job, size, l);
            if (then) then(size);
        }
}
static const fsdp_plan_report *report(void) { return &job.r[1][0].report; }
static int is_inline(void) { return job.r[1][0].run == FSDP_RUN_INLINE; }

/* No passes: the tape is what calls do. Joined collectives would hide what the tables count. */
static void begin(nets_net net, uint32_t without) {
    nets_reset(&job, net);
    job.desc.without = without;
    job.desc.bucket_bytes = -1;
}

/* ---- rows of the table: what a step does in forward and in backward --------------------------- */

typedef struct row {
    int gathers[2], acquired[2], released[2], reductions, crossing; /* forward, backward */
} row;

/* One rank gathers nothing and reduces nothing. */
static void check_row(const row *want) {
    const fsdp_plan_report *rep = report();
    const int middle = rep->forward_calls, end = rep->calls, both = job.size > 1;
    for (int k = 0; k < 2; k++) {
        const int from = k ? middle : 0, to = k ? end : middle;
        CHECK_EQ_INT(nets_lines(job.text, from, to, "op all_gather", NULL),
                     both * want->gathers[k]);
        CHECK_EQ_INT(nets_lines(job.text, from, to, "op reduce_scatter", NULL),
                     k && both ? want->reductions : 0);
        if (!both) continue;
        CHECK_EQ_INT(nets_slots(&job, from, to, "acquire"), want->acquired[k]);
        CHECK_EQ_INT(nets_slots(&job, from, to, "release"), want->released[k]);
    }
    CHECK_EQ_INT(rep->gathers[1], both * (want->gathers[0] + want->gathers[1]));
    CHECK_EQ_INT(rep->reductions[1], both * want->reductions);
    if (both) CHECK_EQ_INT(rep->crossing, want->crossing);
}

static const row mlp_row = {{1, 1}, {6, 6}, {6, 6}, 1, 0};
static const row nested_row = {{12, 12}, {24, 24}, {24, 24}, 12, 0};
static const row whole_row = {{12, 3}, {24, 6}, {24, 6}, 3, 0};
static const row former_row = {{4, 3}, {40, 36}, {36, 40}, 4, 4};
static const row frozen_row = {{4, 3}, {40, 36}, {36, 40}, 3, 4};

/* ---- one by one ------------------------------------------------------------------------------- */

/* Every record of a replayed step is that of a step by calls, in the same order. */
static const row *expected;
static void as_eager(int size) {
    check_row(expected);
    CHECK_EQ_INT(report()->ops[1], report()->ops[0]);
    for (int r = 0; r < size; r++)
        for (int it = 2; it < job.iters; it++) {
            CHECK_EQ_INT(job.r[1][r].num_ops[it], job.r[0][r].num_ops[it]);
            CHECK(job.r[1][r].ops[it] == job.r[0][r].ops[it]);
        }
    CHECK(size == 1 || job.r[1][0].in_place > 0);
}
static void eager(nets_net net, const row *want) {
    begin(net, ALL_PASSES);
    job.watched = 1;
    expected = want;
    everywhere(as_eager);
}

/* Two segments: nothing is reduced in forward, and one program has both. */
static void partitioned_calls(void) {
    const fsdp_plan_report *rep = report();
    CHECK(rep->forward_calls > 0 && rep->forward_calls < rep->calls);
    CHECK_EQ_INT(nets_lines(job.text, 0, rep->forward_calls, "op reduce_scatter", NULL), 0);
    CHECK_EQ_INT(nets_lines(job.text, 0, rep->forward_calls, "wrote", NULL), 0);
}
static void partitioned(int size) {
    const fsdp_plan_report *rep = report();
    check_row(expected);
    partitioned_calls();
    CHECK_EQ_INT(nets_lines(job.text, rep->forward_calls, rep->calls, "wrote", NULL),
                 size > 1 ? expected->reductions : 0);
}
static void in_segments(nets_net net, const row *want) {
    begin(net, ALL_PASSES);
    expected = want;
    everywhere(partitioned);
}

/* ---- the net's own arithmetic ------------------------------------------------------------------ */

/* Gradients against differences of losses, on one rank. */
static void slope(lab_rank *r) {
    nets_job *j = (nets_job *)r->arg;
    nets_result *out = &j->r[0][0];
    double sides[2], worst = 0;
    nets_bed b;
    nets_begin(&b, j, r->w);
    b.net->forward(&b);
    b.net->backward(&b);
    CALL(r->w, fsdp_finalize_backward(b.m));
    for (int u = 0; u < j->net.num_units; u++)
        for (int i = 0; i < j->net.unit[u].num_params; i++)
            for (int64_t k = 0; k < nets_numel(b.net, u, i); k += 41) {
                const fsdp_param_view v = lab_view(r->w, b.unit[u], i);
                const double got = (double)((const float *)v.shard_grad)[k];
                b.nudge_unit = u, b.nudge_param = i, b.nudge_at = k;
                CALL(r->w, fsdp_set_grad_enabled(b.m, 0));
                for (int s = 0; s < 2; s++) {
                    b.nudge = s ? -1e-5 : 1e-5;
                    sides[s] = b.net->forward(&b);
                }
                CALL(r->w, fsdp_set_grad_enabled(b.m, 1));
                const double want = (sides[0] - sides[1]) / 2e-5;
                const double d = fabs(got - want) / (1 + fabs(want));
                if (d > worst) worst = d;
                CHECK_MSG(d < 1e-5, "%s, unit %d, parameter %d at %lld: %.9g, expected %.9g",
                          j->net.name, u, i, (long long)k, got, want);
            }
    out->loss[0] = worst;
    nets_end(&b);
}
/* PyTorch: none. Own: on one rank, eager: gradients are the slopes of the loss, within 1e-5 of 1
   plus their size. */
TEST(fully_shard_compile, nets_have_slopes) {
    const nets_net nets[] = {nets_simple_mlp(), nets_nested(), nets_transformer(1, 0),
                             nets_transformer(1, 1)};
    for (size_t i = 0; i < sizeof nets / sizeof *nets; i++) {
        nets_reset(&job, nets[i]);
        lab_run(1, NULL, slope, &job);
    }
}

/* ---- hooks, contexts, recompiles --------------------------------------------------------------- */

/* PyTorch's MLP(4): 4 -> 16 -> 4, a relu behind each. */
static nets_net mlp4(void) {
    static const int64_t sizes[3] = {4, 16, 4};
    nets_net n = nets_mlp("MLP(4)", sizes, 2, 2, 4);
    n.relu_last = 1;
    return n;
}

enum { RESUMED = 4 };
static void resumes(nets_bed *b, nets_result *out, int it) {
    if (b->plan && it < RESUMED) {
        CHECK_EQ_INT(fsdp_plan_state(b->plan), FSDP_PLAN_PAUSED);
        CHECK_EQ_INT(fsdp_plan_count(b->plan), 0);
        CHECK(strstr(fsdp_plan_why(b->plan), "paused") != NULL);
    }
    if (b->plan && it == RESUMED) CALL(b->w, fsdp_plan_pause(b->plan, 0));
    nets_step(b, out, it);
}
static void hooks_disabled(int size) {
    for (int r = 0; r < size; r++) {
        const nets_result *a = &job.r[0][r], *b = &job.r[1][r];
        for (int it = 0; it < RESUMED; it++) {
            CHECK_EQ_INT(b->mode[it], FSDP_PLAN_PAUSED);
            CHECK_EQ_INT(b->allocations[it], a->allocations[it]); /* the planner's: none */
            CHECK_EQ_INT(b->num_ops[it], a->num_ops[it]);
            CHECK(b->ops[it] == a->ops[it]);
        }
        CHECK_EQ_INT(b->mode[RESUMED], FSDP_PLAN_RECORDING);
        CHECK_EQ_INT(b->mode[RESUMED + 1], FSDP_PLAN_REPLAYING);
        for (int it = RESUMED + 2; it < job.iters; it++)
            CHECK_EQ_INT(b->mode[it], FSDP_PLAN_REPLAYING);
        CHECK_EQ_INT(b->report.recorded, 1);
        CHECK_EQ_INT(b->report.replayed, job.iters - RESUMED - 2);
        CHECK_EQ_INT(b->report.left, 0);
    }
}
/* PyTorch: test_fully_shard_compile.py test_disable_compiling_hooks. Partly: a paused plan records
   nothing, and its step is the eager one. Nothing traces here: PyTorch counts how often its tracer
   reads FSDP's hooks. */
TEST(fully_shard_compile, disable_compiling_hooks) {
    begin(mlp4(), 0);
    job.passive = job.watched = 1;
    job.step = resumes;
    everywhere(hooks_disabled);
    begin(mlp4(), 0); /* all the time */
    job.passive = 1;
    everywhere(NULL);
    for (int it = 0; it < job.iters; it++) CHECK_EQ_INT(job.r[1][0].mode[it], FSDP_PLAN_PAUSED);
    CHECK_EQ_INT(job.r[1][0].count, 0);
}

/* Nested, and around all of it a unit whose parameters have no elements. */
static double empty_forward(nets_bed *b) {
    nets_open_unit(b, 3, 0);
    const double loss = nets_nested_forward(b);
    nets_close_unit(b, 3, 0);
    return loss;
}
static void empty_backward(nets_bed *b) {
    nets_open_unit(b, 3, 1);
    nets_nested_backward(b);
    nets_close_unit(b, 3, 1);
}
static void has_states(int size) {
    int calls = 0, at = 0, num = 0;
    for (int r = 0; r < size; r++) CHECK_EQ_INT(job.r[1][r].count, 1);
    CHECK_EQ_INT(nets_lines(job.text, 0, report()->calls, "op all_gather", "'h.3'"), 0);
    CHECK_EQ_INT(nets_lines(job.text, 0, report()->calls, "op reduce_scatter", "'h.3'"), 0);
    CHECK_EQ_INT(report()->reductions[0], size > 1 ? 12 : 0);
    for (const char *line = job.text; (line = strstr(line, "\ncall ")) != NULL; line++) {
        char name[32] = "", unit[32] = "";
        CHECK(sscanf(line, "\ncall %d %31s '%31[^']'", &at, name, unit) >= 2);
        CHECK_EQ_INT(at, num++);
        calls += !strcmp(unit, "h.3");
    }
    CHECK_EQ_INT(num, report()->calls);
    CHECK_EQ_INT(calls, 4);
}
/* PyTorch: test_fully_shard_compile.py test_dynamo_trace_use_training_state. Partly: after every
   hook, recorded and replayed, fsdp_unit_state is that of an eager step; a unit without elements is
   planned. No context manager that sets the state. */
TEST(fully_shard_compile, dynamo_trace_use_training_state) {
    nets_net n = nets_nested();
    n.num_units = 4;
    n.unit[3].num_params = 1;
    n.unit[3].shape[0][1] = NETS_DIM; /* 0 x 16 */
    n.forward = empty_forward, n.backward = empty_backward;
    for (int frozen = 0; frozen < 2; frozen++) {
        n.unit[3].frozen = frozen;
        begin(n, 0);
        everywhere(has_states);
    }
}

/* A linear layer; steps come from one function while they are recorded, from another one later. */
static void elsewhere(nets_bed *b, nets_result *out, int it) {
    void (*volatile step)(nets_bed *, nets_result *, int) = nets_step;
    char room[512]; /* another stack */
    memset(room, it, sizeof room);
    step(b, out, it);
    CHECK_EQ_INT(room[511], it);
}
static void here_and_there(nets_bed *b, nets_result *out, int it) {
    if (it < 2) nets_step(b, out, it);
    else elsewhere(b, out, it);
}
/* PyTorch: test_fully_shard_compile.py test_compiled_autograd_ctx. Done: eight replayed steps come
   from another function. */
TEST(fully_shard_compile, compiled_autograd_ctx) {
    static const int64_t sizes[2] = {8, 8};
    begin(nets_mlp("Linear(8, 8)", sizes, 1, 1, 2), 0);
    job.step = here_and_there;
    everywhere(NULL); /* 1 warm-up, 1 recorded, 8 replayed: nets_check_life */
    CHECK_EQ_INT(report()->recorded, 1);
    CHECK_EQ_INT(report()->replayed, 8);
}

/* 784 -> 1024 -> 1024 -> 4096: three forwards without gradients, then five steps; then a second
   model of the same world. */
static void recompiles(lab_rank *r) {
    nets_job *j = (nets_job *)r->arg;
    for (int model = 0; model < 3; model++) { /* by calls; planned; planned */
        nets_result *out = &j->r[model > 0][r->rank];
        const int planned = model > 0;
        int64_t evaluated = 0; /* bytes that evaluations between replays take from the pools */
        nets_bed b;
        memset(out, 0, sizeof *out);
        nets_begin(&b, j, r->w);
        if (planned) CALL(r->w, fsdp_plan_create(b.m, &j->desc, &b.plan));
        for (int it = 0; it < j->iters; it++) {
            const uint64_t seen = b.seen, states = b.states;
            const int64_t had = nets_slot_bytes(&b);
            CALL(r->w, fsdp_set_grad_enabled(b.m, 0));
            for (int k = 0; k < (it == 0 ? 3 : it == 3) && planned; k++) { /* and between replays */
                b.net->forward(&b);
                CHECK_EQ_INT(fsdp_plan_state(b.plan), it ? FSDP_PLAN_REPLAYING : FSDP_PLAN_WARM_UP);
            }
            CALL(r->w, fsdp_set_grad_enabled(b.m, 1));
            b.seen = seen, b.states = states;
            if (it == 3) evaluated = nets_slot_bytes(&b) - had;
            nets_step(&b, out, it);
        }
        nets_numbers(&b, out, NULL);
        out->slots -= planned ? evaluated : 0;
        if (planned) nets_check_life(out, j->iters);
        if (planned) nets_compare(&j->r[0][r->rank], out, j->iters);
        nets_end(&b);
    }
}
/* An eighth of the sizes, and a batch of 4. */
/* PyTorch: test_fully_shard_compile.py test_dynamo_recompiles_on_fsdp_layers. Partly: forwards
   without gradients are not recorded; each of two models records one step. No compiled layers:
   PyTorch compiles each under FSDP1, and asserts nothing. An eighth of PyTorch's sizes; the long_
   test has them. */
TEST(fully_shard_compile, dynamo_recompiles_on_fsdp_layers) {
    static const int64_t sizes[4] = {98, 128, 128, 512};
    begin(nets_mlp("encoder", sizes, 3, 1, 4), 0);
    job.iters = 5;
    for (int size = 1; size <= most_ranks(); size++) lab_run(size, NULL, recompiles, &job);
    CHECK_EQ_INT(report()->gathers[0], 6);
    CHECK_EQ_INT(report()->gathers[1], 3);
}
TEST(long_fully_shard_compile, dynamo_recompiles_on_fsdp_layers, SECONDS(300) | NIGHT) {
    static const int64_t sizes[4] = {784, 1024, 1024, 4096};
    begin(nets_mlp("encoder", sizes, 3, 1, 8), 0);
    job.iters = 5;
    lab_run(2, NULL, recompiles, &job);
    CHECK_EQ_INT(report()->gathers[0], 6);
}

/* ---- simple_mlp --------------------------------------------------------------------------------- */

/* PyTorch: test_fully_shard_compile.py test_simple_mlp_fullgraph_backend_aot_eager. Done: without
   passes, each op of a replay is that of an eager step. Parameters of open units share no byte. */
TEST(fully_shard_compile, simple_mlp_fullgraph_backend_aot_eager) {
    eager(nets_simple_mlp(), &mlp_row);
}
/* PyTorch: test_fully_shard_compile.py
   test_simple_mlp_fullgraph_backend_aot_eager_decomp_partition. Done: two segments; only backward
   writes gradients, and reduces once. */
TEST(fully_shard_compile, simple_mlp_fullgraph_backend_aot_eager_decomp_partition) {
    in_segments(nets_simple_mlp(), &mlp_row);
}

/* Each gather is where fsdp_data points to, before and after. */
static void in_place(int size) {
    for (int r = 0; r < size && size > 1; r++)
        for (int planned = 0; planned < 2; planned++) CHECK(job.r[planned][r].in_place > 0);
}
static void gathers(int eager, int planned, int reductions, int crossing) {
    const int both = job.size > 1;
    CHECK_EQ_INT(report()->gathers[0], both * eager);
    CHECK_EQ_INT(report()->gathers[1], both * planned);
    CHECK_EQ_INT(report()->reductions[1], both * reductions);
    CHECK_EQ_INT(nets_lines(job.text, 0, report()->calls, "op all_gather", NULL), both * planned);
    if (both) CHECK_EQ_INT(report()->crossing, crossing);
    in_place(job.size);
}
/* As much memory as calls take, and `more` gathered slots. Without the arena a plan on streams may
   hold one more of the smallest slots, the gradients of the root. */
static void with_memory(nets_net net, uint32_t without, int size, int more) {
    begin(net, ALL_PASSES);
    job.iters = 3;
    nets_run(&job, size, 0);
    const int smallest = without >> FSDP_PASS_ARENA & 1 && job.r[0][0].run == FSDP_RUN_STREAMS ? 512 : 0;
    const int64_t most = job.r[0][0].slots + more * job.r[0][0].gather_bytes + smallest;
    begin(net, without);
    job.watched = 1;
    job.desc.most_bytes = most;
    nets_run(&job, size, 0);
    CHECK(report()->bytes[1] <= most || size == 1);
}

static void one_gather(int size) {
    gathers(2, 1, 1, 6);
    (void)size;
}
static void staged_gather(int size) {
    CHECK_EQ_INT(report()->gathers[0], size > 1 ? 2 : 0);
    CHECK_EQ_INT(report()->gathers[1], size > 1);
    if (size > 1) CHECK_EQ_INT(report()->crossing, 6);
}
/* PyTorch: test_fully_shard_compile.py test_simple_mlp_fullgraph_backend_inductor. Done: 1 gather
   instead of 2: parameters stay from forward to backward. Also gathered in bf16, reduced in f32. */
TEST(fully_shard_compile, simple_mlp_fullgraph_backend_inductor) {
    begin(nets_simple_mlp(), 0);
    job.watched = 1;
    everywhere(one_gather);
    begin(nets_simple_mlp(), 0); /* parameters are cast: the gather is staged */
    job.net.dtype = FSDP_BF16, job.net.reduce = FSDP_F32;
    everywhere(staged_gather);
}

/* ---- nested ------------------------------------------------------------------------------------- */

/* PyTorch: test_fully_shard_compile.py test_nested_fully_shard_backend_aot_eager. Done: 12 gathers
   in forward and in backward, 12 reductions; with one backward pair for each unit 12, 3 and 3. */
TEST(fully_shard_compile, nested_fully_shard_backend_aot_eager) {
    nets_net whole = nets_nested();
    eager(nets_nested(), &nested_row);
    whole.whole = 1;
    eager(whole, &whole_row);
}
/* PyTorch: test_fully_shard_compile.py test_nested_fully_shard_backend_aot_eager_decomp_partition.
   Done: 24 gathers, 12 reductions. */
TEST(fully_shard_compile, nested_fully_shard_backend_aot_eager_decomp_partition) {
    in_segments(nets_nested(), &nested_row);
}

static void all_kept(int size) {
    gathers(24, 3, 12, 6);
    (void)size;
}
/* Every unit is used again before the next one: caps let nothing be joined. */
static void kept_alone(int size) {
    all_kept(size);
    CHECK_EQ_INT(report()->buckets, 0);
}
/* Reduced once for each layer, equal to the bit to a run that syncs by hand. */
static void reduced_once(int size) {
    CHECK_EQ_INT(report()->reductions[0], size > 1 ? 12 : 0);
    CHECK_EQ_INT(report()->reductions[1], size > 1 ? 3 : 0);
}
/* PyTorch: test_fully_shard_compile.py test_nested_fully_shard_backend_inductor_fullgraph_True.
   Done: 24 gathers become 17 with the memory of an eager step, 10 and 3 with one and two slots
   more. With `once` 12 reductions become 3, with the bits of requires_gradient_sync set by hand. */
TEST(fully_shard_compile, nested_fully_shard_backend_inductor_fullgraph_True) {
    static const int planned[2][3] = {{17, 10, 3}, {14, 7, 3}}; /* without the arena; with it */
    int counted = 0;
    for (int size = 2; size <= most_ranks(); size++)
        for (int arena = 0; arena < 2; arena++)
            for (int more = 0; more < 3; more++) {
                with_memory(nets_nested(), arena ? 0 : 1u << FSDP_PASS_ARENA, size, more);
                CHECK_EQ_INT(report()->gathers[0], 24);
                CHECK(report()->gathers[1] <= 24);
                if (!is_inline()) continue;
                CHECK(size == 3 || report()->bytes[0] == 4352); /* 16 rows over 3: padding */
                CHECK(size == 3 || job.r[0][0].gather_bytes == 2176);
                gathers(24, planned[arena][more], 12, report()->crossing);
                if (!arena) CHECK_EQ_INT(report()->crossing, 2 * (more + 1));
                counted++;
            }
    if (counted) h_message("gathers of a step: 24 -> 17 -> 10 -> 3");
    begin(nets_nested(), 0);
    job.watched = 1;
    everywhere(all_kept);
    begin(nets_nested(), 0);
    job.desc.with = 1u << FSDP_PASS_ONCE;
    job.by_hand = 1;
    everywhere(reduced_once);
    begin(nets_nested(), 0);
    job.watched = 1;
    job.desc.bucket_bytes = 0; /* as a program has it that gives no desc */
    everywhere(kept_alone);
}

/* What is held from one segment to the other are gathered parameters and nothing else: `crossing`
   counts them. Nothing of backward reads or writes another slot that forward has taken. */
static void check_segments(void) {
    const int middle = report()->forward_calls;
    int crossing = 0, holder[256], gathered[256] = {0}, call = -1, slot;
    char word[16], name[64], pool[16];
    for (int i = 0; i < 256; i++) holder[i] = -1;
    for (const char *line = job.text; line && *line;
         line = strchr(line, '\n'), line += line != NULL) {
        if (sscanf(line, "slot %d %15s", &slot, pool) == 2)
            gathered[slot] = !strcmp(pool, "gather");
        if (sscanf(line, "call %d ", &call) == 1 && call == middle)
            for (int i = 0; i < 256; i++) {
                CHECK(holder[i] < 0 || gathered[i]);
                if (holder[i] >= 0) crossing += job.net.unit[holder[i]].num_params;
            }
        if (sscanf(line, "  %15s '%63[^']' slot %d", word, name, &slot) != 3) continue;
        const int u = strcmp(name, "root") ? atoi(name + 2) : 0;
        if (!strcmp(word, "release")) CHECK_EQ_INT(holder[slot], u);
        if (!strcmp(word, "acquire")) CHECK_EQ_INT(holder[slot], -1);
        holder[slot] = strcmp(word, "release") ? u : -1;
    }
    for (int i = 0; i < 256; i++) CHECK_EQ_INT(holder[i], -1);
    CHECK_EQ_INT(crossing, report()->crossing);
}

static fsdp_plan_proof proof_of(texts_lines *t) {
    fsdp_plan_proof proof;
    char *text = texts_join(t, 1);
    CHECK(lib_plan_prove(text, &proof));
    free(text);
    return proof;
}
/* Forward as a program of its own is proven: it needs nothing of backward. It is refuted if a wait
   before the caller reads is left out. */
static void forward_alone(void) {
    texts_lines *t = texts_split(job.text);
    const int middle = report()->forward_calls;
    char call[64], head[128], *end = NULL;
    snprintf(call, sizeof call, "call %d ", middle);
    t->num = texts_find(t, 0, call);
    for (int i = t->num - 1; i >= 0; i--) /* decisions: they name calls of backward */
        if (texts_is(t->at[i], "  ") && !texts_is_op(t->at[i])) texts_move(t, i, -1);
    const int kind = texts_find(t, 0, "kind ");
    (void)strtoull(t->at[kind] + 5, &end, 16);
    snprintf(head, sizeof head, "%.*s calls %d forward %d", (int)(end - t->at[kind]), t->at[kind],
             middle + 1, middle);
    t->at[kind] = head;
    strcat(call, "finalize_backward");
    texts_insert(t, t->num, call);
    fsdp_plan_proof proof = proof_of(t);
    if (proof.refuted) h_fail(H_HERE("forward alone"), "%s", proof.text);
    int wait = 0;
    while (!strstr(t->at[wait = texts_find(t, wait + 1, " use gather ")], " COMPUTE ")) {
    }
    texts_move(t, wait, -1);
    proof = proof_of(t);
    CHECK_EQ_INT(proof.refuted, FSDP_PROOF_USE);
    CHECK(strstr(proof.text, "nobody has waited for the gather") != NULL);
    texts_free(t);
}
/* On streams the pass `ahead` would gather in forward what backward waits for. */
enum { SEGMENTS = 1 << FSDP_PASS_ARENA | 1 << FSDP_PASS_AHEAD };
/* PyTorch: test_fully_shard_compile.py
   test_nested_fully_shard_backend_inductor_fullgraph_True_graph_partition. Partly: only gathered
   parameters are held from forward to backward. Forward as a program of its own is proven, and
   refuted without one of its waits. No proof of backward only. */
TEST(fully_shard_compile, nested_fully_shard_backend_inductor_fullgraph_True_graph_partition) {
    static const int planned[3] = {17, 10, 3};
    for (int more = 0; more < 3; more++) {
        with_memory(nets_nested(), SEGMENTS, 2, more);
        if (is_inline()) gathers(24, planned[more], 12, 2 * (more + 1));
        check_segments();
        forward_alone();
        partitioned_calls();
    }
}

/* Each visit opens and closes its layer twice. */
static double losses[NETS_RANKS][NETS_RANKS][NETS_ITERS]; /* of the net that opens them once */
static void same_losses(int size) {
    for (int r = 0; r < size; r++)
        for (int it = 0; it < job.iters; it++)
            CHECK(lab_same(losses[size - 1][r][it], job.r[1][r].loss[it]));
}
static void note_losses(int size) {
    for (int r = 0; r < size; r++)
        memcpy(losses[size - 1][r], job.r[1][r].loss, sizeof losses[size - 1][r]);
}
/* PyTorch: test_fully_shard_compile.py test_nested_fully_shard_backend_inductor_fullgraph_False.
   Done: every visit opens its layer twice: 48 eager gathers, 17 planned; the bits of a plan that
   opens them once. PyTorch skipped its test. */
TEST(fully_shard_compile, nested_fully_shard_backend_inductor_fullgraph_False) {
    nets_net n = nets_nested();
    begin(n, 0);
    everywhere(note_losses);
    n.twice = 1;
    begin(n, 0);
    everywhere(same_losses);
    CHECK_EQ_INT(report()->calls, 96 + 1); /* and finalize */
    for (int size = 2; size <= most_ranks(); size++) {
        with_memory(n, 1u << FSDP_PASS_ARENA, size, 0);
        same_losses(size);
        CHECK_EQ_INT(report()->gathers[0], 48);
        if (is_inline()) gathers(48, 17, 24, 2);
    }
}

/* ---- transformer -------------------------------------------------------------------------------- */

/* PyTorch: test_fully_shard_compile.py test_transformer_backend_aot_eager. Done: without passes, op
   by op: 4 gathers in forward, 3 in backward, 4 reductions, or 3 with `wv` only. */
TEST(fully_shard_compile, transformer_backend_aot_eager) {
    eager(nets_transformer(1, 0), &former_row);
    eager(nets_transformer(0, 0), &frozen_row);
}
/* PyTorch: test_fully_shard_compile.py test_transformer_backend_aot_eager_decomp_partition. Done:
   two segments, with dropout from the caller's generator. */
TEST(fully_shard_compile, transformer_backend_aot_eager_decomp_partition) {
    for (int trains = 0; trains < 2; trains++) {
        nets_net n = nets_transformer(trains, 0);
        n.dropout = 1;
        in_segments(n, trains ? &former_row : &frozen_row);
        CHECK(job.r[1][0].draws[0] != 0 && job.r[1][0].draws[1] != job.r[1][0].draws[0]);
    }
}

/* All trainable or only wv, with recompute and without: neither changes what is gathered. */
static void kept_layers(int size) { /* everything stays: 3 layers and the root */
    gathers(7, 4, job.net.unit[0].frozen ? 3 : 4, 40);
    (void)size;
}
/* PyTorch: test_fully_shard_compile.py test_transformer_backend_inductor_fullgraph_True. Done:
   without shared slots 7 gathers become 6, with more memory 4. With recompute and without. PyTorch
   skipped its test. */
TEST(fully_shard_compile, transformer_backend_inductor_fullgraph_True) {
    for (int setting = 0; setting < 4; setting++) {
        const nets_net n = nets_transformer(setting & 1, setting >> 1);
        for (int size = 2; size <= most_ranks(); size++) {
            with_memory(n, 1u << FSDP_PASS_ARENA, size, 0);
            CHECK_EQ_INT(report()->gathers[0], 7);
            if (is_inline()) gathers(7, 6, setting & 1 ? 4 : 3, 16);
        }
        begin(n, 0);
        job.watched = 1;
        if (setting == 1 || setting == 2) everywhere(kept_layers);
    }
}
/* PyTorch: test_fully_shard_compile.py
   test_transformer_backend_inductor_fullgraph_True_graph_partition. Partly: forward is proven as a
   program of its own. No proof of backward only. PyTorch skipped its test. */
TEST(fully_shard_compile, transformer_backend_inductor_fullgraph_True_graph_partition) {
    for (int setting = 0; setting < 4; setting++) {
        with_memory(nets_transformer(setting & 1, setting >> 1), SEGMENTS, 2, 0);
        if (is_inline()) gathers(7, 6, setting & 1 ? 4 : 3, 16);
        check_segments();
        forward_alone();
        partitioned_calls();
    }
}

/* Attention runs between two openings of its layer. */
/* PyTorch: test_fully_shard_compile.py test_transformer_backend_inductor_fullgraph_False. Done: 13
   eager gathers, 6 planned, as if each layer was opened once, with the bits of that net. PyTorch
   skipped its test. */
TEST(fully_shard_compile, transformer_backend_inductor_fullgraph_False) {
    for (int trains = 0; trains < 2; trains++) {
        nets_net n = nets_transformer(trains, 0);
        begin(n, 0);
        everywhere(note_losses);
        n.twice = 1;
        begin(n, 0);
        everywhere(same_losses);
        for (int size = 2; size <= most_ranks(); size++) {
            with_memory(n, 1u << FSDP_PASS_ARENA, size, 0);
            CHECK_EQ_INT(report()->gathers[0], 1 + 4 * NETS_LAYERS);
            if (is_inline()) gathers(1 + 4 * NETS_LAYERS, 6, 2 * NETS_LAYERS + trains, 16);
        }
    }
}

/* ---- trace_fsdp_copy_ ---------------------------------------------------------------------------- */

static void touched(void *user, int writes, void *ptr, int64_t nbytes) {
    if (writes) sim_write((sim *)user, "backward", ptr, nbytes);
    else sim_read((sim *)user, "the caller", ptr, nbytes);
}
/* A training on the simulated device: how many accesses raced, and which waits iteration `it` has.
   ignored: the wait that is left out; -1: none. */
static int races_of(nets_net net, int planned, int64_t bucket, int64_t ignored, int it,
                    int64_t waits[2]) {
    nets_result *out = &job.r[planned][0];
    nets_bed b;
    sim s;
    sim_init(&s, 2, 0);
    s.checks = 1, s.ignore_wait = ignored;
    CHECK(sim_open(&s) != NULL);
    nets_reset(&job, net);
    job.desc.bucket_bytes = bucket;
    job.touch = touched, job.touch_user = &s;
    memset(out, 0, sizeof *out);
    nets_begin(&b, &job, s.world);
    if (planned) CALL(s.world, fsdp_plan_create(b.m, &job.desc, &b.plan));
    job.iters = it + 2; /* what a step leaves to the next one is seen there */
    for (int i = 0; i < job.iters; i++) {
        if (i == it) waits[0] = s.waits;
        nets_step(&b, out, i);
        if (i == it) waits[1] = s.waits;
    }
    nets_numbers(&b, out, planned ? job.text : NULL);
    nets_end(&b);
    CHECK_EQ_INT(sim_close(&s), 0);
    if (s.races && ignored < 0) h_fail(H_HERE("races"), "%d: %s", s.races, s.race);
    return s.races;
}
/* PyTorch: test_fully_shard_compile.py test_trace_fsdp_copy_. Done: PyTorch traces an op that
   copies. Here no access races, eager or replayed; without any one wait the checker finds a race.
   The proof refutes a copy before its event. */
TEST(fully_shard_compile, trace_fsdp_copy_) {
    const nets_net nets[] = {nets_simple_mlp(), nets_nested(), nets_transformer(1, 0),
                             nets_transformer(0, 1)};
    int64_t waits[2] = {0, 0}, unused[2];
    for (size_t n = 0; n < sizeof nets / sizeof *nets; n++)
        for (int cast = 0; cast < 2; cast++)
            for (int64_t bucket = -1; bucket < 1; bucket++) {
                nets_net net = nets[n];
                if (cast) net.dtype = FSDP_BF16, net.reduce = FSDP_F32;
                races_of(net, 0, bucket, -1, 3, unused);
                const nets_result eager = job.r[0][0];
                races_of(net, 1, bucket, -1, 3, waits);
                nets_compare(&eager, &job.r[1][0], job.iters);
                nets_check_life(&job.r[1][0], job.iters);
                CHECK_EQ_INT(job.r[1][0].run, FSDP_RUN_STREAMS);
            }
    /* Staged gathers copy from one stream's slot into another: a wait that is left out is a race. */
    nets_net net = nets_nested();
    net.dtype = FSDP_BF16, net.reduce = FSDP_F32;
    races_of(net, 1, -1, -1, 3, waits);
    int found = 0;
    for (int64_t k = waits[0]; k < waits[1]; k++) found += races_of(net, 1, -1, k, 3, unused) > 0;
    h_message("%d of %d waits of a replayed step are needed", found, (int)(waits[1] - waits[0]));
    CHECK_EQ_INT(waits[1] - waits[0], 27); /* of 34 that records name, the others are given */
    CHECK_EQ_INT(found, 27);
    /* The same without running: gradients are copied before the event that says they are there. */
    texts_lines *t = texts_split(job.text);
    CHECK_EQ_INT(proof_of(t).refuted, FSDP_PROOF_OK);
    const int wrote = texts_find(t, 0, "  wrote "), copy = texts_find(t, wrote, " copy acc ");
    texts_move(t, wrote, copy);
    const fsdp_plan_proof proof = proof_of(t);
    CHECK_EQ_INT(proof.refuted, FSDP_PROOF_RACE);
    CHECK(strstr(proof.text, " copy 'h.2' on REDUCE reads slot ") != NULL);
    CHECK(strstr(proof.text, "\ncall ") != NULL);
    CHECK(strstr(proof.text, "the caller on COMPUTE has written it last, and no event lies") !=
          NULL);
    texts_free(t);
}
