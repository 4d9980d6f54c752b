/* test_ema.c - the average of the weights: PyTorch's numbers, a slow model bit by bit on 1 to 4
   ranks, swaps that restore the weights bit by bit, calls that are refused meanwhile, checkpoints
   for any number of ranks.

   SPDX-License-Identifier: MIT */
#define TAGS BITS | VALGRIND | AT_NIGHT(ASAN)
#include "harness.h"
#include "golden.h"
#include <math.h> /* fma */
#include "lab_net.h"

enum { NUM = 14, UNITS = 5, BIG = 1300, STEPS = 7 };

/* Uneven parameters, empty on some ranks, without elements, sharded by columns, longer than a block
   of the loops. */
static const lab_param rows[NUM] = {
    {0, "a.w", FSDP_F32, 0, 0, 2, 0, {7, 5}},   {0, "a.b", FSDP_F32, 0, 0, 1, 0, {3}},
    {0, "a.f", FSDP_F32, 0, 1, 2, 0, {4, 4}},   {0, "a.z", FSDP_F32, 0, 0, 1, 0, {0}},
    {0, "a.k", FSDP_F32, 0, 0, 2, 1, {6, 10}},  {1, "b.w", FSDP_F32, 0, 0, 2, 0, {160, 8}},
    {1, "b.b", FSDP_F32, 0, 0, 1, 0, {16}},     {2, "c.w", FSDP_F64, 0, 0, 2, 0, {5, 3}},
    {2, "c.b", FSDP_F64, 0, 0, 1, 0, {9}},      {3, "d.w", FSDP_BF16, 0, 0, 2, 0, {9, 4}},
    {3, "d.f", FSDP_BF16, 0, 1, 2, 0, {3, 4}},  {3, "d.b", FSDP_BF16, 0, 0, 1, 0, {2}},
    {4, "e.w", FSDP_F16, 0, 0, 2, 0, {140, 9}}, {4, "e.b", FSDP_F16, 0, 0, 1, 0, {5}}};
static const lab_net net = {rows, NUM, UNITS};

typedef struct config {
    const char *name;
    int lanes, replicas, offload, planned, toggles, scheduled;
    int64_t direct_min, every, after;
    double decay;
    int64_t from, to; /* steps; from: step of the checkpoint in dir */
    const char *dir;
} config;

/* the last full average, as rank 0 has it swapped in, and the last weights */
typedef struct result {
    char average[NUM][BIG * 8], weights[NUM][BIG * 8];
} result;
static result *the_result;

typedef struct truth { /* expected values; averages of any dtype are exact in f64 */
    char weights[NUM][BIG * 8];
    double average[NUM][BIG];
    int has[NUM];
    int64_t calls;
} truth;

static double decay_at(void *user, int64_t step) {
    CHECK(user == &the_result && step > 2); /* not called while the average is a copy */
    return (double)step / (double)(3 + step);
}

static void backward(lab_built *m, int64_t step) {
    lab_forwards(m);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(m->w, fsdp_pre_backward(m->unit[u]));
        for (int p = 0; p < NUM; p++) {
            if (rows[p].unit != u || m->frozen[p]) continue;
            void *g = lab_grad(m, p);
            for (int64_t i = 0; fsdp_rank(m->w) == 0 && i < lab_numel_of(&net, p); i++)
                lab_put(g, rows[p].dtype, i, lab_value(100 * (step + 1) + p, i));
        }
        CALL(m->w, fsdp_post_backward(m->unit[u]));
    }
    CALL(m->w, fsdp_finalize_backward(m->model));
}

/* ---- the slow model -------------------------------------------------------------------------- */

static double round_to(int wide, double x) {
    volatile float f = (float)x;
    return wide ? x : (double)f;
}
static double slow_lerp(int wide, double a, double w, double decay) {
    volatile double gain = 1 - decay, d = w - a;
    volatile double weight = round_to(wide, gain), difference = round_to(wide, d);
    volatile double rest = weight - 1, factor = weight < 0.5 ? weight : round_to(wide, rest);
    const double end = weight < 0.5 ? a : w;
    return wide ? fma(difference, factor, end)
                : (double)fmaf((float)difference, (float)factor, (float)end);
}

/* Copies the current weights. */
static void look(const lab_built *m, char (*to)[BIG * 8]) {
    for (int p = 0; p < NUM; p++)
        CALL(m->w, fsdp_param_full(lab_unit_of(m, p), m->index[p], to[p]));
}
/* Starts missing averages of trainable parameters. */
static void begin(const lab_built *m, truth *t) {
    look(m, t->weights);
    for (int p = 0; p < NUM; p++) {
        if (t->has[p] || m->frozen[p]) continue;
        t->has[p] = 1;
        for (int64_t i = 0; i < lab_numel_of(&net, p); i++)
            t->average[p][i] = lab_get(t->weights[p], rows[p].dtype, i);
    }
}
static void update(const config *c, const lab_built *m, truth *t) {
    t->calls++;
    if (t->calls % (c->every ? c->every : 1)) {
        look(m, t->weights);
        return;
    }
    begin(m, t);
    const double decay = c->scheduled && t->calls > c->after ? decay_at(&the_result, t->calls)
                                                             : c->decay;
    for (int p = 0; p < NUM; p++)
        for (int64_t i = 0; i < lab_numel_of(&net, p) && t->has[p]; i++) {
            const double w = lab_get(t->weights[p], rows[p].dtype, i);
            t->average[p][i] = t->calls <= c->after ? w
                                                    : slow_lerp(rows[p].dtype == FSDP_F64,
                                                                t->average[p][i], w, decay);
        }
}

/* ---- what is there --------------------------------------------------------------------------- */

/* Checks the state items of the average: this rank's rows, in f32 or f64. */
static void check_items(const lab_built *m, const truth *t) {
    fsdp_state_item item = FSDP_ZERO;
    int seen[NUM] = {0};
    for (;;) {
        CALL(m->w, fsdp_next_state(m->model, &item));
        const int p = item.ordinal;
        if (!item.name) break;
        if (strcmp(item.extension, "ema") != 0) continue;
        if (strcmp(item.name, "ema_step") == 0)
            W_CHECK(*(int64_t *)item.data == t->calls + 1, "%s: %lld", rows[p].name,
                    (long long)*(int64_t *)item.data);
        if (strcmp(item.name, "ema") != 0) continue;
        const fsdp_param_view v = lab_view_of(m, p);
        seen[p] = 1;
        W_CHECK(item.dtype == (rows[p].dtype == FSDP_F64 ? FSDP_F64 : FSDP_F32) && item.sharded &&
                    item.numel == v.numel && item.memory == FSDP_MEMORY_HOST,
                "%s", rows[p].name);
        for (int64_t k = 0; k < v.numel; k++)
            W_CHECK(
                lab_same(lab_get(item.data, item.dtype, k), t->average[p][fsdp_view_index(&v, k)]),
                "%s[%lld]: %.17g, expected %.17g", rows[p].name, (long long)k,
                lab_get(item.data, item.dtype, k), t->average[p][fsdp_view_index(&v, k)]);
    }
    for (int p = 0; p < NUM; p++) W_CHECK(seen[p] == t->has[p], "%s", rows[p].name);
}

/* Checks full parameter p: it has the average if that is swapped in, otherwise the weights. */
static void check_param(const truth *t, int p, int swapped, const void *got) {
    for (int64_t i = 0; i < lab_numel_of(&net, p); i++) {
        const double want = swapped && t->has[p] ? lab_round(rows[p].dtype, t->average[p][i])
                                                 : lab_get(t->weights[p], rows[p].dtype, i);
        W_CHECK(lab_same(lab_get(got, rows[p].dtype, i), want), "%s[%lld]: %g, expected %g",
                rows[p].name, (long long)i, lab_get(got, rows[p].dtype, i), want);
    }
}

/* An evaluation uses the average, also in gathers; then the weights are restored bit by bit. */
static void evaluate(const lab_built *m, fsdp_ema *ema, const truth *t) {
    static __thread char got[NUM][BIG * 8];
    CALL(m->w, fsdp_ema_swap(ema));
    look(m, got);
    for (int p = 0; p < NUM; p++) check_param(t, p, 1, got[p]);
    CALL(m->w, fsdp_set_grad_enabled(m->model, 0));
    for (int u = 0; u < UNITS; u++) {
        CALL(m->w, fsdp_pre_forward(m->unit[u]));
        for (int p = 0; p < NUM; p++)
            if (rows[p].unit == u) check_param(t, p, 1, lab_data(m, p));
        CALL(m->w, fsdp_post_forward(m->unit[u]));
    }
    CALL(m->w, fsdp_set_grad_enabled(m->model, 1));
    if (the_result && fsdp_rank(m->w) == 0) memcpy(the_result->average, got, sizeof got);
    CALL(m->w, fsdp_ema_swap(ema));
    look(m, got);
    for (int p = 0; p < NUM; p++)
        W_CHECK(!memcmp(got[p], t->weights[p], lab_nbytes_of(&net, p)),
                "%s: the weights are not back", rows[p].name);
    if (the_result && fsdp_rank(m->w) == 0) memcpy(the_result->weights, got, sizeof got);
}

static void toggle(lab_built *m, int64_t step) {
    /* each is toggled back two steps later */
    static const int when[NUM] = {0, 0, 2, 0, 1, 4, 0, 1, 0, 3, 2, 0, 0, 3};
    for (int p = 0; p < NUM; p++)
        if (when[p] && (step == when[p] || step == when[p] + 2)) lab_freeze(m, p, !m->frozen[p]);
}

static fsdp_ema *make_ema(const config *c, const lab_built *m) {
    fsdp_ema_desc d = fsdp_ema_defaults();
    fsdp_ema *ema;
    d.decay = c->decay;
    if (c->every) d.every = c->every;
    d.after = c->after;
    if (c->scheduled) d.decay_at = decay_at, d.user = &the_result;
    CALL(m->w, fsdp_ema_create(m->model, &d, &ema));
    return ema;
}

static int64_t host_bytes(const lab_built *m) {
    fsdp_memory memory;
    CALL(m->w, fsdp_model_memory(m->model, &memory));
    return memory.host_bytes;
}

static void train(lab_rank *r) {
    const config *c = (const config *)r->arg;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_checkpoint *ck = NULL;
    fsdp_plan *plan = NULL;
    fsdp_adamw *opt;
    lab_built m = FSDP_ZERO;
    truth *t = (truth *)lab_zeros(1, sizeof *t);
    char path[FSDP_CHECKPOINT_PATH];
    int64_t step = 0;
    md.direct_min = c->direct_min, md.cpu_offload = c->offload;
    if (c->replicas) md.mesh = lab_hsdp(r->w, c->replicas, r->size / c->replicas);
    lab_build(&m, &net, r->w, &md);
    CALL(r->w, fsdp_init_params(m.model, lab_fill, NULL));
    CALL(r->w, fsdp_set_gradient_divide_factor(m.model, NULL, 1));
    CALL(r->w, fsdp_adamw_create(m.model, NULL, &opt));
    const int64_t before = host_bytes(&m);
    fsdp_ema *ema = make_ema(c, &m);
    CHECK_EQ_INT(host_bytes(&m) - before, fsdp_ema_nbytes(ema));
    begin(&m, t);
    if (c->planned) CALL(r->w, fsdp_plan_create(m.model, NULL, &plan));
    if (c->dir) CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &ck));
    if (c->from) {
        for (int i = 0; i < 9; i++) CALL(r->w, fsdp_ema_update(ema)); /* the load overwrites them */
        CALL(r->w, fsdp_checkpoint_find(ck, c->dir, -1, path, sizeof path, &step));
        CALL(r->w, fsdp_checkpoint_load(ck, path, NULL));
        CHECK_EQ_INT(step, c->from);
        t->calls = step;
    }
    for (; step < c->to; step++) {
        snprintf(w_case, sizeof w_case, "%s, rank %d of %d, step %lld", c->name, r->rank, r->size,
                 (long long)step);
        if (c->toggles) {
            toggle(&m, step);
            begin(&m, t); /* at the thaw */
        }
        backward(&m, step);
        CALL(r->w, fsdp_adamw_step(opt, 0.02));
        CALL(r->w, fsdp_zero_grad(m.model));
        const int64_t allocations = w_allocations(r->heap);
        CALL(r->w, fsdp_ema_update(ema));
        W_CHECK(c->toggles || w_allocations(r->heap) == allocations, "an update has allocated");
        if (c->from) continue; /* the slow model does not know the earlier steps */
        update(c, &m, t);
        if (step % 2 || step + 1 == c->to) evaluate(&m, ema, t);
        if (step % 3 == 0) check_items(&m, t);
    }
    if (ck && !c->from) CALL(r->w, fsdp_checkpoint_save(ck, c->dir, step));
    if (plan) CHECK_EQ_INT(fsdp_plan_state(plan), FSDP_PLAN_REPLAYING);
    if (c->from) { /* full tensors, for the comparison */
        CALL(r->w, fsdp_ema_swap(ema));
        look(&m, t->weights);
        if (r->rank == 0) memcpy(the_result->average, t->weights, sizeof t->weights);
        CALL(r->w, fsdp_ema_swap(ema));
        look(&m, t->weights);
        if (r->rank == 0) memcpy(the_result->weights, t->weights, sizeof t->weights);
    }
    const int64_t nbytes = fsdp_ema_nbytes(ema), all = host_bytes(&m);
    fsdp_ema_destroy(ema);
    CHECK_EQ_INT(all - host_bytes(&m), nbytes);
    free(t);
}

static void run(int world, const config *c) {
    lab_how how = FSDP_ZERO;
    how.job = "ema", how.lanes = c->lanes;
    the_result = (result *)lab_shared(sizeof *the_result);
    lab_run(world, &how, train, (void *)(uintptr_t)c);
}

static const config configs[] = {{"plain", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.9, 0, STEPS, NULL},
                                 {"far", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.25, 0, STEPS, NULL},
                                 {"every", 0, 0, 0, 0, 0, 0, 0, 2, 0, 0.9, 0, STEPS, NULL},
                                 {"after", 0, 0, 0, 0, 0, 0, 0, 0, 3, 0.9, 0, STEPS, NULL},
                                 {"schedule", 0, 0, 0, 0, 0, 1, 0, 2, 2, 0.9, 0, STEPS, NULL},
                                 {"offload", 0, 0, 1, 0, 0, 0, 0, 0, 0, 0.9, 0, STEPS, NULL},
                                 {"frozen", 0, 0, 0, 0, 1, 0, 0, 0, 0, 0.9, 0, STEPS, NULL},
                                 {"planned", 0, 0, 0, 1, 0, 0, 0, 0, 0, 0.9, 0, 2 * STEPS, NULL},
                                 {"half", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.5, 0, STEPS, NULL}};

TEST_P(ema, sharded, configs) {
    static const int64_t direct[] = {0, 1, FSDP_DIRECT_NEVER};
    int runs = 0;
    for (int world = 1; world <= 4; world++, runs++) {
        config c = *row;
        c.direct_min = direct[world % 3], c.lanes = world == 3;
        run(world, &c);
    }
    config c = *row;
    for (c.replicas = 2; c.replicas <= 4; c.replicas += 2, runs++) run(4, &c);
    h_message("%s: %d models of %d parameters", row->name, runs, NUM);
}

/* Checks the export of a checkpoint for Hugging Face's readers: the average, in the parameters'
   dtypes. */
static void check_export(const char *dir, int64_t step, const result *want) {
    char path[600], out[600], text[1024], got[BIG * 8];
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    fsdp_checkpoint_reader *r;
    fsdp_checkpoint_tensor t;
    snprintf(path, sizeof path, "%s/step-%08lld", dir, (long long)step);
    snprintf(out, sizeof out, "%s/average", dir);
    d.ema = 1;
    CHECK_OK(fsdp_checkpoint_export(path, out, &d, text, sizeof text));
    CHECK_OK(fsdp_checkpoint_open(out, NULL, NULL, &r, text, sizeof text));
    for (int64_t i = 0; !fsdp_checkpoint_tensor_at(r, i, &t); i++)
        for (int p = 0; p < NUM; p++) {
            const char *dot = strrchr(t.name, '.'); /* UNIT.a.w, with one letter for each part */
            if (strcmp(dot - 1, rows[p].name) != 0) continue;
            CHECK(t.dtype == rows[p].dtype && t.nbytes == (int64_t)lab_nbytes_of(&net, p));
            CHECK_OK(
                fsdp_checkpoint_read(r, i, NULL, NULL, FSDP_DTYPE_KEEP, got, text, sizeof text));
            CHECK_EQ_MEM(got, want->average[p], (size_t)t.nbytes);
        }
    fsdp_checkpoint_close(r);
}

/* A training saved by 2 ranks and resumed by 3 equals one rank's without a checkpoint. */
TEST(ema, resumed) {
    config c = configs[4];
    c.to = 9;
    run(1, &c);
    const result *want = the_result;
    c.to = 5, c.dir = h_tmpdir();
    run(2, &c);
    check_export(c.dir, 5, the_result);
    c.from = 5, c.to = 9;
    run(3, &c);
    for (int p = 0; p < NUM; p++) {
        CHECK_MSG(!memcmp(want->weights[p], the_result->weights[p], lab_nbytes_of(&net, p)), "%s",
                  rows[p].name);
        CHECK_MSG(!memcmp(want->average[p], the_result->average[p], lab_nbytes_of(&net, p)), "%s",
                  rows[p].name);
    }
}

/* ---- PyTorch's numbers ----------------------------------------------------------------------- */

/* Returns the number of steps between two f32 along the representable numbers. */
static int64_t steps_between(float a, float b) {
    const uint32_t bits[2] = {lab_bits32(a), lab_bits32(b)};
    int64_t at[2];
    for (int i = 0; i < 2; i++) {
        const int64_t size = bits[i] & 0x7FFFFFFFu;
        at[i] = bits[i] >> 31 ? -size : size;
    }
    return at[0] > at[1] ? at[0] - at[1] : at[1] - at[0];
}

typedef struct torch_case {
    double decay;
    int64_t numel;
    uint64_t seed;
    float want[3][64];
    int64_t largest[8]; /* by rank: in steps of f32 */
} torch_case;

static void torch_rank(lab_rank *r) {
    torch_case *c = (torch_case *)r->arg;
    fsdp_param_desc d = fsdp_vec("w", c->numel);
    fsdp_ema_desc desc = fsdp_ema_defaults();
    float full[64];
    fsdp_ema *ema;
    desc.decay = c->decay;
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *unit = lab_unit(r->w, m, NULL, &d, 1);
    golden_fill(full, c->seed, c->numel, 1);
    CALL(r->w, fsdp_param_load(unit, 0, full));
    CALL(r->w, fsdp_ema_create(m, &desc, &ema));
    for (int k = 0; k < 3; k++) {
        golden_fill(full, c->seed + (uint64_t)k + 1, c->numel, 1);
        CALL(r->w, fsdp_param_load(unit, 0, full));
        CALL(r->w, fsdp_ema_update(ema));
        CALL(r->w, fsdp_ema_swap(ema));
        CALL(r->w, fsdp_param_full(unit, 0, full));
        CALL(r->w, fsdp_ema_swap(ema));
        for (int64_t i = 0; i < c->numel; i++) {
            const int64_t n = steps_between(full[i], c->want[k][i]);
            W_CHECK(n <= 1, "step %d, element %lld: %a, expected %a", k + 1, (long long)i,
                    (double)full[i], (double)c->want[k][i]);
            if (n > c->largest[r->rank]) c->largest[r->rank] = n;
        }
    }
}

TEST(golden_ema, torch, NO(VALGRIND)) {
    golden g;
    int cases = 0;
    int64_t largest = 0;
    GOLDEN_OPEN(&g, "muon.txt", "muon");
    while (golden_case(&g)) {
        torch_case *c = (torch_case *)lab_shared(sizeof *c);
        while (golden_line(&g)) {
            if (golden_is(&g, "ema")) {
                c->decay = golden_num(&g), c->numel = golden_int(&g), c->seed = golden_seed(&g);
                CHECK(c->numel > 0 && c->numel <= 64);
            } else if (golden_is(&g, "step") && c->numel) {
                const int64_t k = golden_int(&g) - 1;
                CHECK(k >= 0 && k < 3);
                for (int64_t i = 0; i < c->numel; i++) c->want[k][i] = (float)golden_num(&g);
            } else {
                break; /* a case of Muon */
            }
        }
        if (!c->numel) continue;
        snprintf(w_case, sizeof w_case, "%s", g.name);
        for (int world = 1; world <= 3; world++) lab_run(world, NULL, torch_rank, c);
        for (int rank = 0; rank < 3; rank++)
            if (c->largest[rank] > largest) largest = c->largest[rank];
        cases++;
    }
    GOLDEN_CLOSE(&g);
    CHECK(cases > 0);
    h_message("%d cases, at most %lld steps of f32 apart", cases, (long long)largest);
}

/* ---- bits ------------------------------------------------------------------------------------ */

/* Every 16-bit pattern as a weight, including NaNs, with another average; f32 and f64 patterns that
   arithmetic would change. */
static void patterns_rank(lab_rank *r) {
    static const fsdp_dtype dtypes[] = {FSDP_BF16, FSDP_F16, FSDP_F32, FSDP_F64};
    static const char *const names[] = {"bf16", "f16", "f32", "f64"};
    const int64_t numel = 65536;
    fsdp_param_desc d[4];
    fsdp_ema *ema;
    char *was[4], *got = (char *)lab_zeros((size_t)numel, 8);
    for (int i = 0; i < 4; i++) {
        d[i] = fsdp_vec(NULL, numel);
        d[i].dtype = dtypes[i], d[i].name = names[i];
        was[i] = (char *)lab_zeros((size_t)numel, 8);
        for (uint32_t k = 0; k < 65536; k++) {
            const uint16_t narrow = (uint16_t)k;
            const uint32_t single = k << 16 | k * 40503u % 65536;
            const uint64_t wide = (uint64_t)k << 48 | k * 40503u;
            const void *bits = i < 2    ? (const void *)&narrow
                               : i == 2 ? (const void *)&single
                                        : &wide;
            memcpy(was[i] + k * fsdp_dtype_size(dtypes[i]), bits, fsdp_dtype_size(dtypes[i]));
        }
    }
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *unit[4];
    for (int i = 0; i < 4; i++) unit[i] = lab_unit(r->w, m, NULL, &d[i], 1);
    CALL(r->w, fsdp_ema_create(m, NULL, &ema)); /* average of zeros */
    for (int i = 0; i < 4; i++) CALL(r->w, fsdp_param_load(unit[i], 0, was[i]));
    for (int turn = 0; turn < 3; turn++) {
        CALL(r->w, fsdp_ema_swap(ema));
        CALL(r->w, fsdp_param_full(unit[turn], 0, got));
        if (turn == 0) CHECK(lab_same(lab_get(got, dtypes[turn], 3), 0));
        if (turn > 0) CHECK(memcmp(got, was[turn], (size_t)numel * fsdp_dtype_size(dtypes[turn])));
        CALL(r->w, fsdp_ema_swap(ema));
        for (int i = 0; i < 4; i++) {
            CALL(r->w, fsdp_param_full(unit[i], 0, got));
            CHECK_EQ_MEM(got, was[i], (size_t)numel * fsdp_dtype_size(dtypes[i]));
        }
        CALL(r->w, fsdp_ema_update(ema));
    }
    fsdp_ema_destroy(ema);
    CALL(r->w, fsdp_ema_create(m, NULL, &ema)); /* a copy, also of signed zeros and NaNs */
    CALL(r->w, fsdp_ema_swap(ema));
    for (int i = 2; i < 4; i++) {
        CALL(r->w, fsdp_param_full(unit[i], 0, got));
        CHECK_EQ_MEM(got, was[i], (size_t)numel * fsdp_dtype_size(dtypes[i]));
    }
    for (int i = 0; i < 4; i++) free(was[i]);
    free(got);
}
TEST(ema, weights_come_back_to_the_bit, NO(VALGRIND)) {
    lab_run(1, NULL, patterns_rank, NULL);
    lab_run(3, NULL, patterns_rank, NULL);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static double no_decay(void *user, int64_t step) { return step < 3 ? 0.5 : *(double *)user; }

static void descs_rank(lab_rank *r) {
    static const double bad[] = {-0.1, 1.0000001, 2};
    lab_built m = FSDP_ZERO;
    fsdp_ema *ema = NULL;
    double given = lab_from_bits(0x7FF8000000000000u);
    float full[35]; /* a.w */
    lab_build(&m, &net, r->w, NULL);
    const int64_t live = r->heap->live;
    for (int i = 0; i < 5; i++) {
        fsdp_ema_desc d = fsdp_ema_defaults();
        d.decay = i < 3 ? bad[i]
                        : lab_from_bits(i == 3 ? 0x7FF0000000000000u : 0x7FF8000000000000u);
        REFUSED(r->w, fsdp_ema_create(m.model, &d, &ema), "[E926] ema_create: desc.decay is ");
    }
    fsdp_ema_desc d = fsdp_ema_defaults(), zeroed = FSDP_ZERO;
    CHECK(lab_same(d.decay, 0.999) && d.every == 1 && d.after == 0 && !d.cpu);
    REFUSED(r->w, fsdp_ema_create(m.model, &zeroed, &ema), "begin with fsdp_ema_defaults()");
    d.every = 0;
    REFUSED(r->w, fsdp_ema_create(m.model, &d, &ema), "[E927] ema_create: desc.every is 0");
    d.every = 1, d.after = -1;
    REFUSED(r->w, fsdp_ema_create(m.model, &d, &ema), "desc.after -1");
    d.after = 0, d.end_canary = 1;
    REFUSED(r->w, fsdp_ema_create(m.model, &d, &ema), "a canary is not 0");
    CHECK_STATUS(fsdp_ema_create(NULL, NULL, &ema), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_ema_create(m.model, NULL, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_ema_update(NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_ema_swap(NULL), FSDP_ERR_INVALID_ARG);
    CHECK(fsdp_ema_nbytes(NULL) == 0 && ema == NULL);
    fsdp_ema_destroy(NULL);
    CALL(r->w, fsdp_model_commit(m.model));
    CHECK(r->heap->live >= live);
    d = fsdp_ema_defaults();
    d.decay_at = no_decay, d.user = &given;
    CALL(r->w, fsdp_pre_forward(m.unit[0]));
    CHECK_STATUS(fsdp_ema_create(m.model, &d, &ema), FSDP_ERR_INVALID_STATE);
    CALL(r->w, fsdp_model_reset(m.model));
    CALL(r->w, fsdp_ema_create(m.model, &d, &ema));
    for (int i = 0; i < 2; i++) CALL(r->w, fsdp_ema_update(ema));
    for (int i = 0; i < 2; i++) /* it counts as the third call both times */
        REFUSED(r->w, fsdp_ema_update(ema), "[E926] ema_update: what decay_at returned is ");
    given = 1;
    CALL(r->w, fsdp_ema_update(ema));
    CALL(r->w, fsdp_init_params(m.model, lab_fill, NULL)); /* the average has zeros */
    CALL(r->w, fsdp_pre_forward(m.unit[0]));
    CHECK_STATUS(fsdp_ema_update(ema), FSDP_ERR_INVALID_STATE);
    CHECK_STATUS(fsdp_ema_swap(ema), FSDP_ERR_INVALID_STATE);
    CALL(r->w, fsdp_model_reset(m.model));
    CALL(r->w, fsdp_param_full(m.unit[0], 0, full));
    for (int i = 0; i < 35; i++) CHECK(lab_same((double)full[i], (double)(float)lab_value(0, i)));
}
TEST(ema, descs_are_refused) { lab_run(1, NULL, descs_rank, NULL); }

/* A parameter is thawed before a save: the first item that the save reads already has the weights.
   */
static void thawed_rank(lab_rank *r) {
    fsdp_param_desc d[2] = {fsdp_vec("a", 6), fsdp_vec("b", 5)};
    const float values[6] = {1, 2, 3, 4, 5, 6};
    fsdp_state_item item = FSDP_ZERO;
    fsdp_ema *ema;
    d[0].frozen = 1;
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *unit = lab_unit(r->w, m, NULL, d, 2);
    CALL(r->w, fsdp_param_load(unit, 0, values));
    CALL(r->w, fsdp_ema_create(m, NULL, &ema));
    CALL(r->w, fsdp_set_requires_grad(unit, 0, 1));
    CALL(r->w, fsdp_model_commit(m));
    CALL(r->w, fsdp_next_state(m, &item));
    CHECK(item.ordinal == 0 && strcmp(item.name, "ema") == 0);
    const fsdp_param_view v = lab_view(r->w, unit, 0);
    CHECK_EQ_INT(item.numel, v.numel);
    for (int64_t k = 0; k < v.numel; k++)
        CHECK(lab_same((double)((float *)item.data)[k], (double)values[fsdp_view_index(&v, k)]));
}
TEST(ema, thawed_before_a_save) {
    lab_run(1, NULL, thawed_rank, NULL);
    lab_run(2, NULL, thawed_rank, NULL);
}

#define SWAPPED(call) REFUSED_AS(FSDP_ERR_INVALID_STATE, r->w, call, "call fsdp_ema_swap first")

static void meanwhile_rank(lab_rank *r) {
    lab_built m = FSDP_ZERO;
    fsdp_adamw *opt;
    fsdp_grad_scaler *scaler;
    fsdp_checkpoint *ck;
    fsdp_ema *ema, *second;
    fsdp_checkpoint_load_desc only = FSDP_ZERO;
    static __thread truth t;
    static __thread char got[NUM][BIG * 8];
    char path[FSDP_CHECKPOINT_PATH];
    double norm;
    int64_t step;
    memset(&t, 0, sizeof t);
    only.params_only = 1;
    lab_build(&m, &net, r->w, NULL);
    CALL(r->w, fsdp_init_params(m.model, lab_fill, NULL));
    CALL(r->w, fsdp_adamw_create(m.model, NULL, &opt));
    CALL(r->w, fsdp_grad_scaler_create(m.model, NULL, &scaler));
    CALL(r->w, fsdp_ema_create(m.model, NULL, &ema));
    CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &ck));
    CALL(r->w, fsdp_checkpoint_save(ck, (const char *)r->arg, r->size));
    CALL(r->w, fsdp_checkpoint_find(ck, (const char *)r->arg, -1, path, sizeof path, &step));
    backward(&m, 0);
    CALL(r->w, fsdp_adamw_step(opt, 0.1));
    CALL(r->w, fsdp_ema_update(ema));
    look(&m, t.weights);
    CALL(r->w, fsdp_ema_create(m.model, NULL, &second));
    CALL(r->w, fsdp_ema_swap(ema));
    SWAPPED(fsdp_adamw_step(opt, 0.1));
    SWAPPED(fsdp_clip_grad_norm(m.model, 1, &norm));
    SWAPPED(fsdp_grad_scaler_unscale(scaler));
    SWAPPED(fsdp_ema_update(ema));
    SWAPPED(fsdp_ema_swap(second));
    SWAPPED(fsdp_checkpoint_save(ck, (const char *)r->arg, 9));
    SWAPPED(fsdp_checkpoint_load(ck, path, NULL));
    SWAPPED(fsdp_checkpoint_load(ck, path, &only));
    SWAPPED(fsdp_params_changed(m.model));
    SWAPPED(fsdp_init_params(m.model, lab_fill, NULL));
    SWAPPED(fsdp_param_load(m.unit[0], 0, t.weights[0]));
    SWAPPED(fsdp_model_broadcast(m.model, NULL, 0));
    SWAPPED(fsdp_set_requires_grad(m.unit[0], 0, 0));
    SWAPPED(fsdp_model_cast(m.model, FSDP_BF16));
    CALL(r->w, fsdp_model_reset(m.model)); /* clears failures that finalize would report */
    backward(&m, 1);                       /* computed with the average */
    CALL(r->w, fsdp_zero_grad(m.model));
    if (r->size == 1) CALL(r->w, fsdp_ema_swap(ema));
    else fsdp_ema_destroy(ema); /* restores the weights */
    look(&m, got);
    for (int p = 0; p < NUM; p++) CHECK_EQ_MEM(got[p], t.weights[p], lab_nbytes_of(&net, p));
    backward(&m, 2);
    CALL(r->w, fsdp_adamw_step(opt, 0.1));
    CALL(r->w, fsdp_ema_update(second));
    fsdp_ema_destroy(second);
    CALL(r->w, fsdp_checkpoint_load(ck, path, &only));
    CALL(r->w, fsdp_ema_create(m.model, NULL, &second));
    CALL(r->w, fsdp_ema_swap(second)); /* the model is destroyed in this state */
}
TEST(ema, refused_while_swapped) {
    lab_run(1, NULL, meanwhile_rank, (void *)(uintptr_t)h_tmpdir());
    lab_run(2, NULL, meanwhile_rank, (void *)(uintptr_t)h_tmpdir());
}

/* An optimizer may be created while the average is swapped in: it does not need the weights. */
static void made_meanwhile(lab_rank *r) {
    fsdp_param_desc p = fsdp_mat("w", 4, 4);
    fsdp_model *model = lab_model(r->w, NULL);
    fsdp_ema *ema;
    fsdp_sgd *sgd;
    (void)lab_unit(r->w, model, NULL, &p, 1);
    CALL(r->w, fsdp_ema_create(model, NULL, &ema));
    CALL(r->w, fsdp_ema_swap(ema));
    CALL(r->w, fsdp_sgd_create(model, NULL, &sgd));
    CALL(r->w, fsdp_ema_swap(ema));
}
TEST(ema, optimizer_made_while_swapped) { lab_run(2, NULL, made_meanwhile, NULL); }

/* Each allocation of create fails once, and so does that of the first update after a thaw. */
static void memory_rank(lab_rank *r) {
    lab_built m = FSDP_ZERO;
    fsdp_ema *ema = NULL;
    static __thread truth t;
    int64_t n = 0;
    memset(&t, 0, sizeof t);
    lab_build(&m, &net, r->w, NULL);
    CALL(r->w, fsdp_init_params(m.model, lab_fill, NULL));
    const int64_t before = host_bytes(&m);
    for (;; n++) {
        const int64_t live = r->heap->live;
        w_fail(r->heap, n);
        const fsdp_status status = fsdp_ema_create(m.model, NULL, &ema);
        w_fail(r->heap, -1);
        if (!status) break;
        CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
        CHECK(ema == NULL && r->heap->live == live);
        CHECK_EQ_INT(host_bytes(&m), before);
    }
    CHECK_EQ_INT(n, 3); /* table, average, and the model's entry for it */
    begin(&m, &t);
    check_items(&m, &t);
    lab_freeze(&m, 2, 0); /* the commit starts the average, or fails */
    int told = 0;
    for (fsdp_status status = FSDP_ERR_OUT_OF_MEMORY; status; n++) {
        w_fail(r->heap, told ? 0 : n - 3);
        status = fsdp_model_commit(m.model);
        w_fail(r->heap, -1);
        if (!status) break;
        CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
        told += strstr(fsdp_last_error(r->w), "] ema: no memory for a state of ") != NULL;
        if (told == 3) break; /* each call tries again */
    }
    CHECK_EQ_INT(told, 3);
    begin(&m, &t);
    evaluate(&m, ema, &t);
    CALL(r->w, fsdp_model_cast(m.model, FSDP_F32)); /* the averages of f64 and f16 become f32 */
    CALL(r->w, fsdp_ema_update(ema));
    fsdp_ema_destroy(ema);
}
TEST(ema, out_of_memory) {
    the_result = NULL;
    lab_run(1, NULL, memory_rank, NULL);
}
