/* test_ema_life.c - events in the life of averages: freeze, thaw, loads of all kinds, broadcast,
   reset, swaps, other averages. Random sequences are compared with a model of a few lines, on 1 to
   4 ranks; then each rule of docs/optimizers.md is tested by itself.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO
#include "harness.h"
#include "lab_net.h"

enum { NUM = 5, UNITS = 2, BIG = 64, NAMES = 2 };

/* Trainable, initially frozen, 16-bit and empty parameters. Values are small integers, so that an
   average of a few updates is exact. */
static const lab_param rows[NUM] = {{0, "w", FSDP_F32, 0, 0, 2, 0, {7, 5}},
                                    {0, "late", FSDP_F32, 0, 1, 1, 0, {9}},
                                    {0, "z", FSDP_F32, 0, 0, 1, 0, {0}},
                                    {1, "h", FSDP_BF16, 0, 0, 2, 0, {6, 4}},
                                    {1, "k", FSDP_BF16, 0, 1, 2, 1, {5, 3}}};
static const lab_net net = {rows, NUM, UNITS};
static const lab_net part = {rows, 1, 1}; /* w only */

static __thread char said[4096]; /* log of this rank */
static void note(int level, fsdp_status code, int rank, const char *text, void *user) {
    const size_t used = strlen(said);
    (void)level, (void)code, (void)rank, (void)user;
    snprintf(said + used, sizeof said - used, "%s\n", text);
}

static double number(int64_t seed, int p, int64_t i) {
    return (double)((seed * 5 + p * 3 + i) % 7);
}

/* Writes this rank's shards as an optimizer does, with values that depend on `seed`. */
static void write_all(const lab_built *m, int64_t seed) {
    CALL(m->w, fsdp_params_writable(m->model));
    for (int p = 0; p < m->net->count; p++) {
        const fsdp_param_view v = lab_view_of(m, p);
        for (int64_t k = 0; k < v.numel; k++)
            lab_put(v.shard, v.dtype, k, number(seed, p, fsdp_view_index(&v, k)));
    }
    CALL(m->w, fsdp_params_changed(m->model));
}
static void fill(void *user, const fsdp_param_view *b) {
    const int p = lab_row_of(&net, b);
    for (int64_t k = 0; k < b->numel; k++)
        lab_put(b->data, b->dtype, k, number(*(int64_t *)user, p, fsdp_view_index(b, k)));
}

/* ---- the model ------------------------------------------------------------------------------- */

typedef struct {
    double w[NUM][BIG], average[NAMES][NUM][BIG];
    int has[NAMES][NUM], frozen[NUM];
    int64_t calls[NAMES];
} truth;

static void weights_are(truth *t, int64_t seed, int count) {
    for (int p = 0; p < count; p++)
        for (int64_t i = 0; i < lab_numel_of(&net, p); i++) t->w[p][i] = number(seed, p, i);
}
static void begin(truth *t, int a, int p) {
    t->has[a][p] = 1;
    memcpy(t->average[a][p], t->w[p], sizeof t->w[p]);
}
/* Models a load that replaces the first `count` parameters and has no average of them. */
static void replaced(truth *t, int count) {
    for (int a = 0; a < NAMES; a++) {
        int kept = 0;
        for (int p = 0; p < NUM; p++) kept |= t->has[a][p] && p >= count && p != 2;
        if (!kept) t->calls[a] = 0;
        for (int p = 0; p < count; p++)
            if (t->has[a][p]) begin(t, a, p);
    }
}
static double decay_of(int a, int64_t call) { return a ? 0.75 : call % 2 ? 0.5 : 0.25; }
static void averaged(truth *t, int a) {
    t->calls[a]++;
    for (int p = 0; p < NUM; p++)
        for (int64_t i = 0; t->has[a][p] && i < lab_numel_of(&net, p); i++)
            t->average[a][p][i] += (t->w[p][i] - t->average[a][p][i]) *
                                   (1 - decay_of(a, t->calls[a]));
}

/* ---- random sequences ------------------------------------------------------------------------ */

typedef struct {
    const char *name;
    int world, replicas, offload, planned, lanes;
} row_of;

typedef struct {
    const row_of *row;
    lab_rank *r;
    lab_built m;
    fsdp_ema *ema[NAMES];
    fsdp_checkpoint *ck;
    fsdp_plan *plan;
    truth t, saved;
    int64_t saves;
    const char *dir;
} life;

static double decay_at(void *user, int64_t call) { return (void)user, decay_of(0, call); }

static void check(life *l, const truth *t, int swapped) {
    static __thread char full[BIG * 8];
    for (int p = 0; p < NUM; p++) {
        CALL(l->r->w, fsdp_param_full(lab_unit_of(&l->m, p), l->m.index[p], full));
        for (int64_t i = 0; i < lab_numel_of(&net, p); i++) {
            const double want = swapped >= 0 && t->has[swapped][p]
                                    ? lab_round(rows[p].dtype, t->average[swapped][p][i])
                                    : t->w[p][i];
            W_CHECK(lab_same(lab_get(full, rows[p].dtype, i), want),
                    "average %d of %s[%lld]: %g, "
                    "expected %g",
                    swapped, rows[p].name, (long long)i, lab_get(full, rows[p].dtype, i), want);
        }
    }
}

static void look(life *l) {
    fsdp_ema *third;
    for (int a = 0; a < NAMES; a++) {
        CALL(l->r->w, fsdp_ema_swap(l->ema[a]));
        check(l, &l->t, a);
        REFUSED_AS(FSDP_ERR_INVALID_STATE, l->r->w, fsdp_ema_swap(l->ema[!a]),
                   a ? "the model has the average 'slow' of" : "the model has the average of");
        REFUSED_AS(FSDP_ERR_INVALID_STATE, l->r->w, fsdp_ema_update(l->ema[!a]),
                   "[E9034] ema_update: the model has the average");
        REFUSED_AS(FSDP_ERR_INVALID_STATE, l->r->w, fsdp_ema_create(l->m.model, NULL, &third),
                   "[E9034] ema_create: the model has the average");
        CALL(l->r->w, fsdp_ema_swap(l->ema[a]));
    }
    check(l, &l->t, -1);
}

static void load(life *l, const char *name, int64_t step, int params_only, int partial) {
    fsdp_checkpoint_load_desc d = FSDP_ZERO;
    char path[600];
    d.params_only = params_only, d.partial = partial;
    snprintf(path, sizeof path, "%s/%s/step-%08lld", l->dir, name, (long long)step);
    CALL(l->r->w, fsdp_checkpoint_load(l->ck, path, &d));
}

static void toggle(life *l, int p) {
    lab_freeze(&l->m, p, !l->m.frozen[p]);
    for (int a = 0; a < NAMES && !l->m.frozen[p]; a++)
        if (!l->t.has[a][p]) begin(&l->t, a, p);
}

static void train_step_of(const lab_built *m, int64_t step) {
    lab_forwards(m);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(m->w, fsdp_pre_backward(m->unit[u]));
        for (int p = 0; p < NUM; p++)
            for (int64_t i = 0; rows[p].unit == u && !m->frozen[p] && i < lab_numel_of(&net, p);
                 i++)
                lab_put(lab_grad(m, p), rows[p].dtype, i, number(step, p, i));
        CALL(m->w, fsdp_post_backward(m->unit[u]));
    }
    CALL(m->w, fsdp_finalize_backward(m->model));
}

enum { STEP, UPDATE, WRITE, TOGGLE, INIT, ONLY, PART, SAVE, AGAIN, LOAD, RESET, LOOK, KINDS };

static void act(life *l, int kind, uint64_t *random) {
    const int64_t seed = lab_pick(random, 1000);
    const int a = lab_pick(random, NAMES), p = lab_pick(random, 2) ? 1 : lab_pick(random, NUM);
    char dir[600];
    if (kind == STEP) {
        train_step_of(&l->m, seed);
        CALL(l->r->w, fsdp_zero_grad(l->m.model));
    }
    if (kind == UPDATE && l->t.calls[a] < 5) {
        CALL(l->r->w, fsdp_ema_update(l->ema[a]));
        averaged(&l->t, a);
    }
    if (kind == WRITE) write_all(&l->m, seed), weights_are(&l->t, seed, NUM);
    if (kind == TOGGLE) toggle(l, p);
    if (kind == INIT) CALL(l->r->w, fsdp_init_params(l->m.model, fill, (void *)(uintptr_t)&seed));
    if (kind == INIT) weights_are(&l->t, seed, NUM), replaced(&l->t, NUM);
    if (kind == ONLY || kind == PART) {
        load(l, kind == ONLY ? "all" : "part", 1, kind == ONLY, kind == PART);
        weights_are(&l->t, 11, kind == ONLY ? NUM : 1), replaced(&l->t, kind == ONLY ? NUM : 1);
    }
    snprintf(dir, sizeof dir, "%s/own", l->dir);
    if (kind == SAVE) CALL(l->r->w, fsdp_checkpoint_save(l->ck, dir, ++l->saves));
    if (kind == SAVE) l->saved = l->t;
    if (kind == LOAD && l->saves) { /* including states of parameters that are frozen now */
        load(l, "own", l->saves, 0, 0);
        for (int p2 = 0; p2 < NUM; p2++) memcpy(l->t.w[p2], l->saved.w[p2], sizeof l->t.w[p2]);
        for (int b = 0; b < NAMES; b++) {
            l->t.calls[b] = l->saved.calls[b];
            for (int p2 = 0; p2 < NUM; p2++) {
                if (l->t.has[b][p2]) begin(&l->t, b, p2);
                if (!l->saved.has[b][p2]) continue;
                l->t.has[b][p2] = 1;
                memcpy(l->t.average[b][p2], l->saved.average[b][p2], sizeof l->t.w[p2]);
            }
        }
    }
    if (kind == AGAIN && l->saves) { /* loads the weights only */
        load(l, "own", l->saves, 1, 0);
        for (int p2 = 0; p2 < NUM; p2++) memcpy(l->t.w[p2], l->saved.w[p2], sizeof l->t.w[p2]);
        replaced(&l->t, NUM);
    }
    if (kind == RESET) CALL(l->r->w, fsdp_model_reset(l->m.model));
    if (kind == LOOK) look(l);
}

static void make_averages(fsdp_world *w, fsdp_model *m, fsdp_ema **ema) {
    fsdp_ema_desc d = fsdp_ema_defaults();
    char name[8] = "slow";
    d.decay_at = decay_at;
    CALL(w, fsdp_ema_create(m, &d, &ema[0]));
    d.decay_at = NULL, d.decay = 0.75, d.name = name;
    CALL(w, fsdp_ema_create(m, &d, &ema[1]));
    memset(name, 'x', sizeof name); /* the name was copied */
}

/* Saves a checkpoint without an average: of all parameters, or of w only. */
static void save_plain(lab_rank *r, const lab_net *of, const char *name, const char *dir) {
    lab_built m = FSDP_ZERO;
    fsdp_checkpoint *ck;
    char path[600];
    lab_build(&m, of, r->w, NULL);
    write_all(&m, 11);
    CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &ck));
    snprintf(path, sizeof path, "%s/%s", dir, name);
    CALL(r->w, fsdp_checkpoint_save(ck, path, 1));
    fsdp_model_destroy(m.model);
}

static void walk(lab_rank *r) {
    const row_of *row = (const row_of *)r->arg;
    life *l = (life *)lab_zeros(1, sizeof *l);
    uint64_t random = h_seed() * 1000 + (uint64_t)row->world;
    l->row = row, l->r = r, l->dir = h_tmpdir();
    save_plain(r, &net, "all", l->dir);
    save_plain(r, &part, "part", l->dir);
    for (int turn = 0; turn < 8; turn++) {
        fsdp_model_desc md = FSDP_ZERO;
        memset(&l->t, 0, sizeof l->t);
        memset(&l->m, 0, sizeof l->m);
        l->plan = NULL, l->saves = 100 * turn, l->saved = l->t;
        md.cpu_offload = row->offload;
        if (row->replicas) md.mesh = lab_hsdp(r->w, row->replicas, r->size / row->replicas);
        lab_build(&l->m, &net, r->w, &md);
        write_all(&l->m, 3), weights_are(&l->t, 3, NUM);
        make_averages(r->w, l->m.model, l->ema);
        for (int a = 0; a < NAMES; a++)
            for (int p = 0; p < NUM; p++)
                if (!rows[p].frozen) begin(&l->t, a, p);
        if (row->planned) CALL(r->w, fsdp_plan_create(l->m.model, NULL, &l->plan));
        CALL(r->w, fsdp_checkpoint_create(l->m.model, NULL, &l->ck));
        l->saves = 0;
        for (int n = 0; n < 40; n++) {
            const int kind = lab_pick(&random, KINDS);
            snprintf(w_case, sizeof w_case, "%s, rank %d, turn %d, act %d: %d", row->name, r->rank,
                     turn, n, kind);
            act(l, kind, &random);
        }
        look(l);
        fsdp_model_destroy(l->m.model);
        char text[700];
        snprintf(text, sizeof text, "rm -rf %s/own", l->dir);
        CALL(r->w, fsdp_barrier(r->w));
        if (r->rank == 0) CHECK(system(text) == 0);
        CALL(r->w, fsdp_barrier(r->w));
    }
    free(l);
}

static const row_of kinds[] = {{"one", 1, 0, 0, 0, 0},    {"two", 2, 0, 0, 0, 0},
                               {"three", 3, 0, 0, 0, 1},  {"hsdp", 4, 2, 0, 0, 0},
                               {"ddp", 2, 2, 0, 0, 0},    {"offload", 2, 0, 1, 0, 0},
                               {"planned", 2, 0, 0, 1, 0}};

TEST_P(ema_life, random, kinds) {
    lab_how how = FSDP_ZERO;
    how.job = "ema_life", how.lanes = row->lanes;
    lab_run(row->world, &how, walk, (void *)(uintptr_t)row);
}

/* ---- broadcast ------------------------------------------------------------------------------- */

/* Returns the largest distance between ranks of a parameter and of its states; ranks are replicas.
   per[0]: unit 0, per[1]: the others. */
static void distances(fsdp_model *m, fsdp_world *w, double *per) {
    fsdp_state_item item = FSDP_ZERO;
    fsdp_param_view v = FSDP_ZERO;
    per[0] = per[1] = 0;
    for (int states = 0; states < 2; states++)
        for (;;) {
            if (states) CALL(w, fsdp_next_state(m, &item));
            if (states ? !item.name : !fsdp_next_param(m, &v)) break;
            const fsdp_dtype dtype = states ? item.dtype : v.dtype;
            const void *data = states ? item.data : v.shard;
            fsdp_param_view of;
            CALL(w, fsdp_param_at(m, states ? item.ordinal : v.ordinal, &of));
            for (int64_t k = 0; k < (states ? item.numel : v.numel); k++) {
                const double x = dtype == FSDP_I64 ? (double)*(const int64_t *)data
                                                   : lab_get(data, dtype, k);
                double most[2] = {x, -x};
                CALL(w, fsdp_all_reduce(w, NULL, most, 2, FSDP_F64, FSDP_MAX));
                double *to = &per[rows[of.ordinal].unit];
                if (most[0] + most[1] > *to) *to = most[0] + most[1];
            }
        }
}

static int others(void *user, const fsdp_param_view *v) {
    return (void)user, v->ndim == 2 ? -1 : 0;
}
static int matrices(void *user, const fsdp_param_view *v) { return (void)user, v->ndim == 2; }

/* Replicas that start with different weights and train have different averages, momenta and step
   counts. A broadcast makes all equal, and they stay equal. */
static void broadcast_rank(lab_rank *r) {
    const int updates = *(int *)r->arg, ours = r->rank;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_sgd_desc sd = fsdp_sgd_defaults();
    fsdp_muon_desc mud = fsdp_muon_defaults();
    lab_built m = FSDP_ZERO;
    fsdp_ema *ema[NAMES];
    fsdp_sgd *sgd;
    fsdp_muon *muon;
    double apart[2], mine[2] = {0, 0};
    md.mesh = lab_hsdp(r->w, r->size, 1);
    lab_build(&m, &net, r->w, &md);
    write_all(&m, ours);
    sd.momentum = 0.5, sd.weight_decay = 0.25, sd.group = others, mud.take = matrices;
    CALL(r->w, fsdp_sgd_create(m.model, &sd, &sgd));
    CALL(r->w, fsdp_muon_create(m.model, &mud, &muon));
    make_averages(r->w, m.model, ema);
    lab_freeze(&m, 1, 0);
    for (int step = 0; step < 3 + updates; step++) {
        if (step == updates) {                /* first unit 1 only, then all */
            fsdp_state_item item = FSDP_ZERO; /* also other numbers of calls */
            for (;;) {
                CALL(r->w, fsdp_next_state(m.model, &item));
                if (!item.name) break;
                if (!strncmp(item.name, "ema_step", 8)) *(int64_t *)item.data = 4 + ours;
            }
            CALL(r->w, fsdp_state_loaded(m.model));
            distances(m.model, r->w, apart);
            W_CHECK(apart[0] > 0 && apart[1] > 0, "%g, %g", apart[0], apart[1]);
            CALL(r->w, fsdp_model_broadcast(m.model, m.unit[1], 1));
            distances(m.model, r->w, apart);
            W_CHECK(apart[0] > 0 && lab_same(apart[1], 0), "%g, %g", apart[0], apart[1]);
            const fsdp_param_view before = lab_view_of(&m, 0);
            mine[0] = lab_get(before.shard, FSDP_F32, 1);
            CALL(r->w, fsdp_model_broadcast(m.model, NULL, 1));
            mine[1] = lab_get(before.shard, FSDP_F32, 1);
            W_CHECK(r->rank != 1 || lab_same(mine[0], mine[1]), "the root has changed");
        }
        if (step >= updates) {
            distances(m.model, r->w, apart);
            W_CHECK(lab_same(apart[0], 0) && lab_same(apart[1], 0), "step %d: %g, %g", step,
                    apart[0], apart[1]);
        }
        train_step_of(&m, step);
        CALL(r->w, fsdp_sgd_step(sgd, 0.25));
        CALL(r->w, fsdp_muon_step(muon, 0.25));
        for (int a = 0; a < NAMES; a++) CALL(r->w, fsdp_ema_update(ema[a]));
        CALL(r->w, fsdp_zero_grad(m.model));
    }
}
TEST(ema_life, broadcast) {
    for (int updates = 0; updates <= 2; updates += 2)
        for (int world = 2; world <= 3; world++) lab_run(world, NULL, broadcast_rank, &updates);
}

/* ---- names, texts ---------------------------------------------------------------------------- */

static int64_t lines_with(const char *word) {
    int64_t n = 0;
    for (const char *at = said; (at = strstr(at, word)) != NULL; at++) n++;
    return n;
}

static void texts_rank(lab_rank *r) {
    static const char *const bad[] = {"", "a.b", "a b", "x2345678901234567890123456789012",
                                      "\xC3\xA4"};
    lab_built m = FSDP_ZERO;
    fsdp_ema *ema[NAMES] = {NULL, NULL}, *third;
    fsdp_ema_desc d = fsdp_ema_defaults();
    fsdp_checkpoint *ck;
    int64_t seed = 4;
    float full[BIG] = {0};
    lab_build(&m, &net, r->w, NULL);
    for (int i = 0; i < 5; i++) {
        d.name = bad[i];
        REFUSED(r->w, fsdp_ema_create(m.model, &d, &third), "[E9033] ema_create: desc.name is '");
    }
    REFUSED(r->w, fsdp_tell_values(m.model, 4, -1), "[E9030] tell_values: event is 4");
    for (int i = 0; i < 4; i++)
        CHECK_STATUS(fsdp_tell_values(m.model, i % 2 ? FSDP_VALUES_WRITTEN : FSDP_VALUES_REPLACE,
                                      i < 2 ? NUM : -1),
                     FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_tell_values(NULL, FSDP_VALUES_REPLACED, -1), FSDP_ERR_INVALID_ARG);
    make_averages(r->w, m.model, ema);
    said[0] = 0;
    const int64_t lines = r->rank == 0;                 /* one rank logs it */
    CALL(r->w, fsdp_init_params(m.model, fill, &seed)); /* nothing is lost */
    CHECK(!said[0]);
    CALL(r->w, fsdp_param_load(m.unit[0], 1, full)); /* it has no average */
    CHECK(!said[0]);
    CALL(r->w, fsdp_param_load(m.unit[0], 0, full));
    CALL(r->w, fsdp_param_load(m.unit[0], 0, full));
    CHECK_EQ_INT(lines_with("[E9032] param_load: the average was made before"), lines);
    CHECK_EQ_INT(lines_with("[E9032] param_load: the average 'slow' was made before"), lines);
    CALL(r->w, fsdp_ema_update(ema[1]));
    CALL(r->w, fsdp_param_load(m.unit[0], 0, full)); /* as a step would */
    CHECK_EQ_INT(lines_with("[E"), 2 * lines);
    CALL(r->w, fsdp_init_params(m.model, fill, &seed));
    CHECK_EQ_INT(lines_with("[E9031] the average 'slow': parameters were loaded without"), lines);
    CHECK_EQ_INT(lines_with("[E9031]"), lines);
    CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &ck));
    CALL(r->w, fsdp_ema_create(m.model, NULL, &third));
    CHECK_STATUS(fsdp_checkpoint_create(m.model, NULL, &ck), FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(r->w),
                 "two averages have this state of one parameter: give each a "
                 "name, fsdp_ema_desc.name"));
    CALL(r->w, fsdp_ema_update(third));
    said[0] = 0;
    CALL(r->w, fsdp_param_load(m.unit[0], 0, full)); /* as a step would */
    CHECK(!strstr(said, "the average was made before"));
    fsdp_ema_destroy(third);
    d.name = "slow";
    CALL(r->w, fsdp_ema_create(m.model, &d, &third));
    CHECK_STATUS(fsdp_checkpoint_create(m.model, NULL, &ck), FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(r->w), ".ema.slow'") ||
          strstr(fsdp_last_error(r->w), ".ema_step.slow'"));
}
TEST(ema_life, texts) {
    w_log = note;
    lab_run(1, NULL, texts_rank, NULL);
    lab_run(2, NULL, texts_rank, NULL);
}

/* Two Muons that have the same matrix cannot be saved; with disjoint matrices, by desc.take, both
   can. */
static int first_matrix(void *user, const fsdp_param_view *v) {
    return v->ndim == 2 && (v->ordinal == 0) == (user == NULL);
}
static void two_muons(lab_rank *r) {
    fsdp_muon_desc d = fsdp_muon_defaults();
    lab_built m = FSDP_ZERO;
    fsdp_muon *one, *two;
    fsdp_checkpoint *ck;
    lab_build(&m, &net, r->w, NULL);
    CALL(r->w, fsdp_muon_create(m.model, NULL, &one));
    CALL(r->w, fsdp_muon_create(m.model, NULL, &two));
    CHECK_STATUS(fsdp_checkpoint_create(m.model, NULL, &ck), FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(r->w), "let desc.take of one return 0 for it"));
    fsdp_muon_destroy(two), fsdp_muon_destroy(one);
    d.take = first_matrix;
    CALL(r->w, fsdp_muon_create(m.model, &d, &one));
    d.user = &d;
    CALL(r->w, fsdp_muon_create(m.model, &d, &two));
    CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &ck));
}
/* Names of 31 letters that differ only in the last one: no two items share a name. */
static void long_names(lab_rank *r) {
    static const char *const names[2] = {"abcdefghijklmnopqrstuvwxyz1234x",
                                         "abcdefghijklmnopqrstuvwxyz1234y"};
    fsdp_param_desc p = fsdp_mat("w", 4, 4);
    fsdp_state_item item = FSDP_ZERO;
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_ema *ema;
    int found[2] = {0, 0};
    (void)lab_unit(r->w, m, NULL, &p, 1);
    for (int i = 0; i < 2; i++) {
        fsdp_ema_desc d = fsdp_ema_defaults();
        d.name = names[i];
        CALL(r->w, fsdp_ema_create(m, &d, &ema));
    }
    for (;;) {
        CALL(r->w, fsdp_next_state(m, &item));
        if (!item.name) break;
        for (int i = 0; i < 2; i++) found[i] += strstr(item.name, names[i]) != NULL;
    }
    for (int i = 0; i < 2; i++) CHECK_EQ_INT(found[i], 2); /* the average and its step */
}
TEST(ema_life, long_names) { lab_run(2, NULL, long_names, NULL); }

TEST(ema_life, two_muons) { lab_run(2, NULL, two_muons, NULL); }

/* Two averages on three ranks are saved, and exported by name. */
static void save_two(lab_rank *r) {
    lab_built m = FSDP_ZERO;
    fsdp_ema *ema[NAMES];
    fsdp_checkpoint *ck;
    lab_build(&m, &net, r->w, NULL);
    write_all(&m, 3);
    make_averages(r->w, m.model, ema);
    write_all(&m, 11);
    for (int a = 0; a < NAMES; a++) CALL(r->w, fsdp_ema_update(ema[a]));
    CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &ck));
    CALL(r->w, fsdp_checkpoint_save(ck, (const char *)r->arg, 1));
}
TEST(ema_life, export_by_name) {
    static const char *const names[] = {NULL, "slow", "other"};
    const char *dir = h_tmpdir();
    char path[600], out[600], text[1024];
    lab_run(3, NULL, save_two, (void *)(uintptr_t)dir);
    snprintf(path, sizeof path, "%s/step-00000001", dir);
    for (int a = 0; a < 3; a++) {
        fsdp_checkpoint_export_desc d = FSDP_ZERO;
        fsdp_checkpoint_reader *reader;
        fsdp_checkpoint_tensor t;
        float got[BIG];
        int seen = 0;
        snprintf(out, sizeof out, "%s/out%d", dir, a);
        d.ema = 1, d.ema_name = names[a];
        const fsdp_status status = fsdp_checkpoint_export(path, out, &d, text, sizeof text);
        CHECK_STATUS(status, a == 2 ? FSDP_ERR_INVALID_ARG : FSDP_OK);
        if (a == 2) CHECK_MSG(strstr(text, "(state 'ema.other')"), "%s", text);
        if (a == 2) break;
        CHECK_OK(fsdp_checkpoint_open(out, NULL, NULL, &reader, text, sizeof text));
        for (int64_t i = 0; !fsdp_checkpoint_tensor_at(reader, i, &t); i++) {
            if (strcmp(strrchr(t.name, '.'), ".w") != 0) continue;
            CHECK_OK(fsdp_checkpoint_read(reader, i, NULL, NULL, FSDP_F32, got, text, sizeof text));
            for (int64_t k = 0; k < 35; k++, seen++)
                CHECK(lab_same((double)got[k],
                               number(3, 0, k) +
                                   (number(11, 0, k) - number(3, 0, k)) * (1 - decay_of(a, 1))));
        }
        CHECK_EQ_INT(seen, 35);
        fsdp_checkpoint_close(reader);
    }
}

/* ---- at the thaw, whatever comes next -------------------------------------------------------- */

/* A user's optimizer writes through views, right after the thaw. */
static void thaw_rank(lab_rank *r) {
    for (int look_first = 0; look_first < 4; look_first++) {
        lab_built m = FSDP_ZERO;
        fsdp_ema *ema[NAMES];
        float full[9];
        lab_build(&m, &net, r->w, NULL);
        write_all(&m, 3);
        make_averages(r->w, m.model, ema);
        lab_freeze(&m, 1, 0);
        if (look_first == 1) CALL(r->w, fsdp_model_reset(m.model));
        if (look_first == 2) CALL(r->w, fsdp_model_commit(m.model));
        /* frozen again, the average stays */
        if (look_first == 3) lab_freeze(&m, 1, 1), write_all(&m, 3);
        write_all(&m, 11);
        CALL(r->w, fsdp_ema_update(ema[1]));
        CALL(r->w, fsdp_ema_swap(ema[1]));
        CALL(r->w, fsdp_param_full(m.unit[0], 1, full));
        CALL(r->w, fsdp_ema_swap(ema[1]));
        for (int64_t i = 0; i < 9; i++) {
            const double was = number(3, 1, i), is = number(11, 1, i);
            const double want = look_first == 3 ? is : was + (is - was) * 0.25;
            W_CHECK(lab_same((double)full[i], want), "way %d, [%lld]: %g, expected %g", look_first,
                    (long long)i, (double)full[i], want);
        }
        fsdp_model_destroy(m.model);
    }
}
TEST(ema_life, begins_at_the_thaw) {
    lab_run(1, NULL, thaw_rank, NULL);
    lab_run(2, NULL, thaw_rank, NULL);
}

/* ---- items ----------------------------------------------------------------------------------- */

/* A trainer writes items itself: the number of calls is that of a parameter with elements. */
static double step_seen(void *user, int64_t step) { return *(int64_t *)user = step, 0.5; }
static void own_load_rank(lab_rank *r) {
    fsdp_param_desc p[2] = {fsdp_vec("w", 8), fsdp_vec("z", 0)};
    fsdp_ema_desc d = fsdp_ema_defaults();
    fsdp_state_item item = FSDP_ZERO;
    int64_t seen = 0;
    fsdp_checkpoint_load_desc only = FSDP_ZERO;
    fsdp_checkpoint *ck;
    char path[FSDP_CHECKPOINT_PATH];
    fsdp_ema *ema;
    d.decay_at = step_seen, d.user = &seen;
    fsdp_model *m = lab_model(r->w, NULL);
    (void)lab_unit(r->w, m, NULL, p, 2);
    CALL(r->w, fsdp_ema_create(m, &d, &ema));
    for (;;) {
        CALL(r->w, fsdp_next_state(m, &item));
        if (!item.name) break;
        if (!strcmp(item.name, "ema_step") && item.ordinal == 0) *(int64_t *)item.data = 6;
    }
    CALL(r->w, fsdp_state_loaded(m));
    CALL(r->w, fsdp_ema_update(ema));
    CHECK_EQ_INT(seen, 6);
    CALL(r->w, fsdp_checkpoint_create(m, NULL, &ck));
    CALL(r->w, fsdp_checkpoint_save(ck, (const char *)r->arg, r->size));
    CALL(r->w, fsdp_checkpoint_find(ck, (const char *)r->arg, -1, path, sizeof path, &seen));
    only.params_only = 1;
    CALL(r->w, fsdp_checkpoint_load(ck, path, &only)); /* all averages restart, also that of z */
    CALL(r->w, fsdp_ema_update(ema));
    CHECK_EQ_INT(seen, 1);
}
TEST(ema_life, own_load) {
    lab_run(1, NULL, own_load_rank, (void *)(uintptr_t)h_tmpdir());
    lab_run(2, NULL, own_load_rank, (void *)(uintptr_t)h_tmpdir());
}

/* While the average is swapped in, states of frozen parameters are reserved: the 16-bit weights
   that the average keeps move with it. */
static void hold_rank(lab_rank *r) {
    lab_built m = FSDP_ZERO;
    fsdp_ema *ema[NAMES];
    life *l = (life *)lab_zeros(1, sizeof *l);
    lab_build(&m, &net, r->w, NULL);
    write_all(&m, 3);
    make_averages(r->w, m.model, ema);
    write_all(&m, 11), weights_are(&l->t, 11, NUM);
    CALL(r->w, fsdp_ema_swap(ema[0]));
    for (int p = 1; p < NUM; p += 3) CALL(r->w, fsdp_state_reserve(m.model, p));
    CALL(r->w, fsdp_ema_swap(ema[0]));
    l->r = r, l->m = m;
    check(l, &l->t, -1);
    free(l);
}
TEST(ema_life, hold_while_swapped) {
    lab_run(1, NULL, hold_rank, NULL);
    lab_run(2, NULL, hold_rank, NULL);
}

/* A parameter without elements is in no file and loses nothing: a load with averages logs nothing,
   and one without counts the other parameters only. */
static void lost_rank(lab_rank *r) {
    fsdp_checkpoint_load_desc only = FSDP_ZERO;
    lab_built m = FSDP_ZERO;
    fsdp_ema *ema[NAMES];
    fsdp_checkpoint *ck;
    char path[600];
    const char *gone =
        "what 1 calls of fsdp_ema_update had averaged is gone (2 parameters of this rank)";
    lab_build(&m, &net, r->w, NULL);
    write_all(&m, 3);
    make_averages(r->w, m.model, ema);
    for (int a = 0; a < NAMES; a++) CALL(r->w, fsdp_ema_update(ema[a]));
    CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &ck));
    CALL(r->w, fsdp_checkpoint_save(ck, (const char *)r->arg, r->size));
    snprintf(path, sizeof path, "%s/step-%08d", (const char *)r->arg, r->size);
    said[0] = 0;
    CALL(r->w, fsdp_checkpoint_load(ck, path, NULL));
    CHECK_MSG(!said[0], "%s", said);
    only.params_only = 1;
    CALL(r->w, fsdp_checkpoint_load(ck, path, &only)); /* w and h */
    CHECK_EQ_INT(lines_with("[E9031]"), r->rank == 0 ? NAMES : 0);
    CHECK_MSG(lines_with(gone) == lines_with("[E9031]"), "%s", said);
}
TEST(ema_life, no_elements_no_loss) {
    w_log = note;
    lab_run(1, NULL, lost_rank, (void *)(uintptr_t)h_tmpdir());
    lab_run(2, NULL, lost_rank, (void *)(uintptr_t)h_tmpdir());
}
