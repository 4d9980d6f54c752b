/* test_optim_device.c - optimizers, averages and the gradient scaler with updates on the device: on
   the simulated device of sim.h, whose memory the host cannot read, they have the host's bits,
   without a race and without a wait.

   SPDX-License-Identifier: MIT */
#define TAGS AT_NIGHT(ASAN)
#include "harness.h"
#include <math.h> /* HUGE_VAL */
#include "lab_net.h"
#include "sim.h"

enum { UNITS = 5, NUM = 12, STEPS = 5, LAYOUTS = 6, BIG = 1200 };

/* Uneven parameters, empty on some ranks, without elements, sharded by columns, longer than two
   blocks of the loops. The tag is the group. */
static const lab_param net[NUM] = {
    {0, "a.w", FSDP_F32, 0, 0, 2, 0, {7, 5}},   {0, "a.b", FSDP_F32, 1, 0, 1, 0, {3}},
    {0, "a.f", FSDP_F32, 0, 1, 2, 0, {4, 4}},   {0, "a.z", FSDP_F32, 0, 0, 1, 0, {0}},
    {0, "a.k", FSDP_F32, 0, 0, 2, 1, {6, 10}},  {1, "b.w", FSDP_F32, 0, 0, 2, 0, {150, 8}},
    {1, "b.x", FSDP_F32, -1, 0, 1, 0, {5}},     {1, "b.v", FSDP_F32, 2, 0, 2, 0, {16, 4}},
    {2, "c.w", FSDP_F64, 0, 0, 2, 0, {5, 3}},   {2, "c.b", FSDP_F64, 1, 0, 1, 0, {9}},
    {3, "d.w", FSDP_BF16, 0, 0, 2, 0, {90, 4}}, {4, "e.b", FSDP_F16, 1, 0, 1, 0, {2}}};
static const lab_net the_net = {net, NUM, UNITS};

/* Kinds of devices; `native`: the device runs the updates. */
enum { OPAQUE, OPAQUE_INLINE, READABLE, WITHOUT, OFFLOAD, OFFLOAD_WITHOUT, HOST, DEVICES };
static const struct {
    const char *name;
    int async, opaque, no_update, offload, native;
} devices[DEVICES] = {{"opaque", 1, 1, 0, 0, 1},
                      {"opaque, inline", 0, 1, 0, 0, 1},
                      {"readable", 1, 0, 0, 0, 1},
                      {"readable without updates", 1, 0, 1, 0, 0},
                      {"opaque, offload", 1, 1, 0, 1, 0},
                      {"opaque without updates, offload", 1, 1, 1, 1, 0},
                      {"host", 0, 0, 0, 0, 0}};

typedef struct {
    int world, rank, kind, device;
    fsdp_dtype param_dtype, grad_dtype;
    int64_t direct_min;
} config;

typedef struct { /* one training */
    config c;
    sim s;
    w_heap heap;
    fsdp_world *w;
    lab_built m;
    lab_optim o;
    fsdp_grad_scaler *scaler;
    fsdp_ema *ema;
} job;

static int uses(int step, int p) { return (step + p) % 3 != 0 || p == 8; }

static void open_world(job *j) {
    config *c = &j->c;
    snprintf(w_case, sizeof w_case, "%s, %s, rank %d of %d, params %s, grads %s, direct_min %lld",
             lab_optim_kinds[c->kind].name, devices[c->device].name, c->rank, c->world,
             fsdp_dtype_name(c->param_dtype), fsdp_dtype_name(c->grad_dtype),
             (long long)c->direct_min);
    sim_init(&j->s, c->world, c->rank);
    j->s.async = devices[c->device].async;
    j->s.opaque = devices[c->device].opaque;
    j->s.no_update = devices[c->device].no_update;
    j->s.checks = 1;
    if (c->device == HOST && c->world == 1) { /* the library's own device */
        fsdp_world_desc d = w_desc(0, 1, NULL, "optim_device", 0);
        w_heap_use(&j->heap, &d);
        CALL(NULL, fsdp_init(&d, &j->w));
    } else if (c->device == HOST) {
        j->s.no_update = 1;
    }
    if (!j->w) j->w = sim_open(&j->s);
    W_CHECK(j->w != NULL, "%s", fsdp_last_error(NULL));
    j->s.world = j->w;
}

static void make_model(job *j) {
    fsdp_model_desc md = FSDP_ZERO;
    md.param_dtype = j->c.param_dtype;
    md.grad_dtype = j->c.grad_dtype;
    md.direct_min = j->c.direct_min;
    md.cpu_offload = devices[j->c.device].offload;
    lab_build(&j->m, &the_net, j->w, &md);
    CALL(j->w, fsdp_init_params(j->m.model, lab_fill, NULL));
}

static job *start(const config *c) {
    job *j = (job *)lab_zeros(1, sizeof *j);
    j->c = *c;
    open_world(j);
    make_model(j);
    return j;
}

static void finish(job *j) {
    W_CHECK(j->s.races == 0, "%d races, first: %s", j->s.races, j->s.race);
    CHECK_EQ_INT(sim_close(&j->s), 0);
    CHECK_EQ_INT(j->heap.live, 0);
    free(j);
}

/* Returns the dtype of gathered parameters and of the gradients that a rank writes. */
static fsdp_dtype whole_dtype(const job *j, int p) {
    return j->c.param_dtype ? j->c.param_dtype : net[p].dtype;
}
static int64_t whole_bytes(const job *j, int p) {
    return lab_numel_of(&the_net, p) * (int64_t)fsdp_dtype_size(whole_dtype(j, p));
}

static void forward(job *j) {
    for (int u = 0; u < UNITS; u++) {
        CALL(j->w, fsdp_pre_forward(j->m.unit[u]));
        for (int p = 0; p < NUM; p++)
            if (net[p].unit == u) sim_read(&j->s, "forward", lab_data(&j->m, p), whole_bytes(j, p));
        CALL(j->w, fsdp_post_forward(j->m.unit[u]));
    }
}

static void backward(job *j, int step, double factor) {
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(j->w, fsdp_pre_backward(j->m.unit[u]));
        for (int p = 0; p < NUM; p++) {
            if (net[p].unit != u || j->m.frozen[p] || !uses(step, p)) continue;
            void *grad = lab_grad(&j->m, p), *g = sim_host(&j->s, grad);
            sim_write(&j->s, "backward", grad, whole_bytes(j, p));
            for (int64_t i = 0; i < lab_numel_of(&the_net, p); i++)
                lab_put(g, whole_dtype(j, p), i, factor * lab_value(100 * (step + 1) + p, i));
        }
        CALL(j->w, fsdp_post_backward(j->m.unit[u]));
    }
    CALL(j->w, fsdp_finalize_backward(j->m.model));
}

static void same(job *a, job *b, int p, const char *what, const void *x, const void *y,
                 int64_t nbytes) {
    W_CHECK(!x == !y, "%s of %s is there in one of them only", what, net[p].name);
    W_CHECK(!x || !memcmp(sim_host(&a->s, x), sim_host(&b->s, y), (size_t)nbytes),
            "%s of %s is not the host's", what, net[p].name);
}

/* Compares shards, gradients and states of two trainings; in b the host runs the updates. */
static void compare(job *a, job *b) {
    for (int p = 0; p < NUM; p++) {
        const fsdp_param_view v = lab_view_of(&a->m, p), w = lab_view_of(&b->m, p);
        CHECK_EQ_INT(v.numel, w.numel);
        same(a, b, p, "shard", v.shard, w.shard, v.numel * (int64_t)fsdp_dtype_size(v.dtype));
        same(a, b, p, "gradient", v.shard_grad, w.shard_grad,
             v.numel * (int64_t)fsdp_dtype_size(v.grad_dtype));
        if (!a->o.adamw && !a->o.sgd) continue;
        const fsdp_optim_state s = lab_optim_state(&a->m, &a->o, p),
                               t = lab_optim_state(&b->m, &b->o, p);
        W_CHECK(s.group == t.group && s.dtype == t.dtype && !s.step == !t.step, "%s", net[p].name);
        if (!s.step) continue;
        W_CHECK(s.numel == v.numel && *s.step == *t.step, "%s", net[p].name);
        same(a, b, p, "first", s.first, t.first, s.numel * (int64_t)fsdp_dtype_size(s.dtype));
        same(a, b, p, "second", s.second, t.second, s.numel * (int64_t)fsdp_dtype_size(s.dtype));
    }
}

/* ---- the host's bits ------------------------------------------------------------------------- */

/* Returns the number of elements that a step updates, without padding. */
static uint64_t elements(job *j) {
    uint64_t sum = 0;
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(j->m.model, &v)) {
        if (v.shard_grad && lab_optim_state(&j->m, &j->o, v.ordinal).group >= 0)
            sum += (uint64_t)v.numel;
    }
    return sum;
}

/* Runs one step of a training. Unless the layout is new, nothing waits or allocates; with several
   ranks, finalize may wait for the others. */
static void train_step(job *j, int step, int moved) {
    int native = devices[j->c.device].native;
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    int64_t all = j->s.syncs;
    forward(j);
    backward(j, step, 1);
    uint64_t todo = elements(j), updated = j->s.updated;
    int64_t syncs = j->s.syncs;
    CALL(j->w, fsdp_model_counters(j->m.model, &before));
    CALL(j->w, lab_optim_step(&j->o, 0.01 * (step + 1)));
    CALL(j->w, fsdp_model_counters(j->m.model, &after));
    CHECK_EQ_INT(j->s.updated - updated, native ? todo : 0);
    if (moved) return;
    CHECK_EQ_INT(after.allocations, before.allocations);
    if (native) CHECK_EQ_INT(j->s.syncs, j->c.world == 1 ? all : syncs);
    /* otherwise the loops would race */
    else CHECK(j->s.syncs > syncs || !devices[j->c.device].async);
}

static void toggle(job *j, int step) {
    static const int when[NUM] = {0, 3, 2, 0, 1, 2,
                                  0, 4, 1, 0, 3, 0}; /* and back two steps later */
    for (int p = 0; p < NUM; p++) {
        if (!when[p] || (step != when[p] && step != when[p] + 2)) continue;
        lab_freeze(&j->m, p, !j->m.frozen[p]);
    }
}

static void same_training(const config *c, int toggles) {
    config host = *c;
    host.device = HOST;
    job *b = start(&host), *a = start(c);
    CALL(a->w, lab_make_optim(&a->o, &lab_optim_kinds[a->c.kind], &a->m));
    CALL(b->w, lab_make_optim(&b->o, &lab_optim_kinds[b->c.kind], &b->m));
    for (int step = 0; step < (toggles ? LAYOUTS : STEPS); step++) {
        if (toggles) toggle(a, step), toggle(b, step);
        if (toggles && step % 2) compare(a, b); /* reading the state moves it */
        train_step(a, step, toggles), train_step(b, step, toggles);
        compare(a, b);
        CALL(a->w, fsdp_zero_grad(a->m.model));
        CALL(b->w, fsdp_zero_grad(b->m.model));
    }
    finish(a);
    finish(b);
}

static const struct { int world, rank; } places[] = {{1, 0}, {4, 0}, {4, 2}, {4, 3}};
static const fsdp_dtype grads[] = {FSDP_DTYPE_KEEP, FSDP_F32, FSDP_BF16, FSDP_F64};

TEST_P(optim_device, same_bits, lab_optim_kinds) {
    int runs = 0;
    for (int device = 0; device < HOST; device += 1 + W_SLOW)
        for (int at = 0; at < 4; at++)
            for (int g = 0; g < 4; g++, runs++) {
                config c = {places[at].world,
                            places[at].rank,
                            (int)(row - lab_optim_kinds),
                            device,
                            g == 1 ? FSDP_BF16 : FSDP_DTYPE_KEEP,
                            grads[g],
                            at == 1 ? 1 : 0};
                same_training(&c, 0);
            }
    h_message("%s: %d trainings of %d steps", row->name, runs, STEPS);
}

TEST_P(optim_device, freeze_and_thaw, lab_optim_kinds) {
    int runs = 0;
    for (int device = 0; device < HOST; device += 1 + W_SLOW)
        for (int at = 0; at < 4; at++, runs++) {
            config c = {places[at].world, places[at].rank, (int)(row - lab_optim_kinds),
                        device,           FSDP_DTYPE_KEEP, grads[at],
                        at == 1 ? 1 : 0};
            same_training(&c, 1);
        }
    h_message("%s: %d trainings of %d layouts", row->name, runs, LAYOUTS);
}

/* ---- averages -------------------------------------------------------------------------------- */

static void make_ema(job *j, int cpu) {
    fsdp_ema_desc d = fsdp_ema_defaults();
    const int native = devices[j->c.device].native;
    const int64_t pinned = j->s.live_bytes[FSDP_MEMORY_PINNED],
                  device = j->s.live_bytes[FSDP_MEMORY_DEVICE], host = j->heap.live_bytes;
    fsdp_memory before, after;
    d.decay = 0.75, d.cpu = cpu;
    CALL(j->w, fsdp_model_memory(j->m.model, &before));
    CALL(j->w, fsdp_ema_create(j->m.model, &d, &j->ema));
    CALL(j->w, fsdp_model_memory(j->m.model, &after));
    const int64_t more[2] = {j->s.live_bytes[FSDP_MEMORY_DEVICE] - device,
                             j->s.live_bytes[FSDP_MEMORY_PINNED] - pinned};
    CHECK((more[0] > 0) == (native && !cpu) && (more[1] > 0) == (native && cpu));
    int64_t elements[3] = {0, 0, 0}; /* this rank's: averages in f32, in f64; bits */
    for (int p = 0; p < NUM; p++) {
        const int64_t numel = j->m.frozen[p] ? 0 : lab_view_of(&j->m, p).numel;
        elements[net[p].dtype == FSDP_F64] += numel;
        elements[2] += fsdp_dtype_size(net[p].dtype) == 2 ? numel : 0;
    }
    for (int k = 0; k < 3; k++) elements[k] = (elements[k] + 15) / 16 * 16;
    if (native) CHECK_EQ_INT(more[0] + more[1], 4 * elements[0] + 8 * elements[1] + 2 * elements[2]);
    CHECK_EQ_INT(fsdp_ema_nbytes(j->ema),
                 after.host_bytes - before.host_bytes + more[0] + more[1]);
    CHECK(j->heap.live_bytes >= host);
}

/* Reads the average of each parameter, as a checkpoint does. Returns the number of averages. */
static int averages(job *j, fsdp_state_item *out) {
    fsdp_state_item item = FSDP_ZERO;
    int num = 0;
    memset(out, 0, NUM * sizeof *out);
    for (;;) {
        CALL(j->w, fsdp_next_state(j->m.model, &item));
        if (!item.name) return num;
        if (strcmp(item.name, "ema") == 0) out[item.ordinal] = item, num++;
    }
}
static void compare_averages(job *a, job *b) {
    fsdp_state_item x[NUM], y[NUM];
    const int num = averages(a, x);
    CHECK_EQ_INT(averages(b, y), num);
    CHECK(num >= NUM - 1); /* one is initially frozen */
    for (int p = 0; p < NUM; p++) {
        CHECK(!x[p].name == !y[p].name && x[p].numel == y[p].numel);
        if (x[p].name && x[p].numel)
            same(a, b, p, "average", x[p].data, y[p].data,
                 x[p].numel * (int64_t)fsdp_dtype_size(x[p].dtype));
    }
}

/* Nothing waits for the device, and a step allocates nothing. */
static void averaged_step(job *j, int step, int moved) {
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    forward(j);
    backward(j, step, 1);
    CALL(j->w, lab_optim_step(&j->o, 0.01));
    CALL(j->w, fsdp_zero_grad(j->m.model));
    const int64_t syncs = j->s.syncs;
    const uint64_t updates = j->s.updates;
    CALL(j->w, fsdp_model_counters(j->m.model, &before));
    CALL(j->w, fsdp_ema_update(j->ema));
    CALL(j->w, fsdp_model_counters(j->m.model, &after));
    if (moved) return;
    CHECK_EQ_INT(after.allocations, before.allocations);
    CHECK_EQ_INT(j->s.updates - updates, devices[j->c.device].native);
    if (devices[j->c.device].native) CHECK_EQ_INT(j->s.syncs, syncs);
}

static void same_averages(const config *c, int cpu, int toggles) {
    config host = *c;
    host.device = HOST;
    job *both[2] = {start(c), start(&host)};
    for (int i = 0; i < 2; i++) {
        CALL(both[i]->w,
             lab_make_optim(&both[i]->o, &lab_optim_kinds[both[i]->c.kind], &both[i]->m));
        make_ema(both[i], cpu && i == 0);
    }
    for (int step = 0; step < LAYOUTS; step++) {
        for (int i = 0; i < 2; i++) {
            if (toggles) toggle(both[i], step);
            averaged_step(both[i], step, toggles);
        }
        if (step % 2) compare_averages(both[0], both[1]);
        for (int turn = 0; turn < 2; turn++) {
            for (int i = 0; i < 2; i++) {
                CALL(both[i]->w, fsdp_ema_swap(both[i]->ema));
                CALL(both[i]->w, fsdp_set_grad_enabled(both[i]->m.model, 0));
                forward(both[i]);
                CALL(both[i]->w, fsdp_set_grad_enabled(both[i]->m.model, 1));
            }
            compare(both[0], both[1]);
        }
    }
    if (toggles) fsdp_ema_destroy(both[0]->ema);
    for (int i = 0; i < 2; i++) finish(both[i]);
}

TEST(optim_device, ema) {
    int runs = 0;
    for (int device = 0; device < HOST; device += 1 + W_SLOW)
        for (int at = 0; at < 4; at++)
            for (int toggles = 0; toggles < 2; toggles++, runs++) {
                config c = {places[at].world, places[at].rank, 0,
                            device,           grads[2 * (at % 2)], FSDP_DTYPE_KEEP,
                            at == 1};
                same_averages(&c, at % 2, toggles);
            }
    h_message("%d trainings of %d steps", runs, LAYOUTS);
}

/* ---- the scaler ------------------------------------------------------------------------------ */

/* Makes one gradient of this rank infinite or NaN. */
static void spoil(job *j, int p, double what) {
    const fsdp_param_view v = lab_view_of(&j->m, p);
    W_CHECK(v.shard_grad && v.numel > 0, "%s", net[p].name);
    sim_write(&j->s, "a test", v.shard_grad, v.numel * (int64_t)fsdp_dtype_size(v.grad_dtype));
    lab_put(sim_host(&j->s, v.shard_grad), v.grad_dtype, v.numel / 2, what);
}

/* Returns the result of a scaler whose updates run where the config says. It waits for the result,
   and once more to reset a bad one, each time before a copy and after it. */
static int scaled_step(job *j, int step, int bad) {
    forward(j);
    backward(j, step, fsdp_grad_scaler_scale(j->scaler));
    if (bad >= 0) spoil(j, bad, step % 2 ? HUGE_VAL : HUGE_VAL - HUGE_VAL);
    int64_t syncs = j->s.syncs;
    uint64_t updates = j->s.updates;
    CALL(j->w, fsdp_grad_scaler_unscale(j->scaler));
    CHECK((j->s.updates > updates) == devices[j->c.device].native);
    int found = fsdp_grad_scaler_found_inf(j->scaler);
    if (j->c.device == WITHOUT) CHECK(j->s.syncs > syncs); /* the host reads the gradients */
    if (j->c.device == OPAQUE && j->c.world == 1) CHECK_EQ_INT(j->s.syncs - syncs, found ? 4 : 2);
    return found;
}

static void same_results(const config *c) {
    static const int bad[] = {-1, 5, -1, 8, 10, -1, 11, -1}; /* a parameter of each dtype */
    config host = *c;
    fsdp_grad_scaler_desc d = FSDP_ZERO;
    d.init_scale = 1000, d.growth_interval = 2;
    host.device = HOST;
    job *b = start(&host), *a = start(c), *both[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        CALL(both[i]->w,
             lab_make_optim(&both[i]->o, &lab_optim_kinds[both[i]->c.kind], &both[i]->m));
        CALL(both[i]->w, fsdp_grad_scaler_create(both[i]->m.model, &d, &both[i]->scaler));
    }
    for (int step = 0; step < 8; step++) {
        int spoilt = bad[step] >= 0 && uses(step, bad[step]) && (bad[step] != 11 || c->rank == 0);
        for (int i = 0; i < 2; i++) {
            int found = scaled_step(both[i], step, spoilt ? bad[step] : -1);
            W_CHECK(found == spoilt, "step %d: found %d", step, found);
        }
        compare(a, b);
        for (int i = 0; i < 2; i++) {
            if (!spoilt) CALL(both[i]->w, lab_optim_step(&both[i]->o, 0.01));
            CALL(both[i]->w, fsdp_grad_scaler_update(both[i]->scaler));
            CALL(both[i]->w, fsdp_zero_grad(both[i]->m.model));
        }
        fsdp_grad_scaler_state of_a, of_b;
        CALL(a->w, fsdp_grad_scaler_get_state(a->scaler, &of_a));
        CALL(b->w, fsdp_grad_scaler_get_state(b->scaler, &of_b));
        CHECK(!memcmp(&of_a, &of_b, sizeof of_a));
    }
    fsdp_grad_scaler_destroy(a->scaler);
    finish(a);
    finish(b);
}
TEST(optim_device, scaler) {
    for (int device = 0; device < HOST; device++)
        for (int at = 0; at < 3; at++)
            for (int g = 0; g < 4; g++) {
                config c = {places[at].world, places[at].rank, 0, device,
                            FSDP_DTYPE_KEEP,  grads[g],        0};
                same_results(&c);
            }
}

/* ---- order ----------------------------------------------------------------------------------- */

/* A gather of `unit`, or of all units, reads shards that a step is about to write. With `ignore`
   the first wait within the step has no effect. Returns the number of waits. */
static int64_t gather_under_way(int unit, int reshard, int ignore, int *races) {
    config c = {4, 1, 0, OPAQUE, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0};
    job *j = start(&c);
    CALL(j->w, lab_make_optim(&j->o, &lab_optim_kinds[j->c.kind], &j->m));
    forward(j);
    backward(j, 0, 1);
    for (int u = 0; u < UNITS; u++) {
        if (unit >= 0 && u != unit) continue;
        CALL(j->w, fsdp_unshard(j->m.unit[u]));
        if (reshard) CALL(j->w, fsdp_reshard(j->m.unit[u]));
    }
    int64_t waits = j->s.waits;
    if (ignore) j->s.ignore_wait = waits;
    CALL(j->w, lab_optim_step(&j->o, 0.1));
    waits = j->s.waits - waits;
    CALL(j->w, fsdp_zero_grad(j->m.model));
    forward(j);
    *races = j->s.races;
    j->s.races = 0;
    finish(j);
    return waits;
}

TEST(optim_device, gathers_under_way) {
    int races;
    for (int u = -1; u < UNITS; u++) {
        CHECK_EQ_INT(gather_under_way(u, 0, 0, &races), u < 0 ? UNITS : 1);
        CHECK_EQ_INT(races, 0);
        (void)gather_under_way(u, 0, 1, &races);
        CHECK((races > 0) == (u >= 0)); /* for all units, the wait for the last one is enough */
        (void)gather_under_way(u, 1, 0, &races);
        CHECK_EQ_INT(races, 0);
    }
}

/* An optimizer is destroyed while the device still updates, and its memory is freed. */
TEST(optim_device, destroy) {
    config c = {1, 0, 0, OPAQUE, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0};
    fsdp_memory before, after;
    for (c.kind = 0; c.kind < 5; c.kind++) {
        job *j = start(&c);
        int64_t device = j->s.live_bytes[FSDP_MEMORY_DEVICE];
        CALL(j->w, lab_make_optim(&j->o, &lab_optim_kinds[j->c.kind], &j->m));
        int64_t held = j->s.live_bytes[FSDP_MEMORY_DEVICE] - device,
                nbytes = lab_optim_nbytes(&j->o);
        CHECK((held > 0) == (!j->o.sgd || lab_optim_kinds[c.kind].momentum > 0));
        forward(j);
        backward(j, 0, 1);
        CALL(j->w, lab_optim_step(&j->o, 0.1));
        device = j->s.live_bytes[FSDP_MEMORY_DEVICE];
        CALL(j->w, fsdp_model_memory(j->m.model, &before));
        lab_optim_destroy(&j->o);
        CALL(j->w, fsdp_model_memory(j->m.model, &after));
        CHECK_EQ_INT(device - j->s.live_bytes[FSDP_MEMORY_DEVICE], held);
        CHECK_EQ_INT(before.host_bytes - after.host_bytes, nbytes - held);
        finish(j);
    }
}

/* ---- failures -------------------------------------------------------------------------------- */

static fsdp_status no_memory(fsdp_device *device, int kind, size_t size, void **ptr) {
    (void)device, (void)kind, (void)size;
    *ptr = NULL;
    return FSDP_ERR_OUT_OF_MEMORY;
}
static fsdp_status bad_update(fsdp_device *device, void *stream, const fsdp_update *runs,
                              uint32_t num) {
    (void)device, (void)stream, (void)runs, (void)num;
    return FSDP_ERR_BACKEND;
}
static fsdp_status bad_copy(fsdp_device *device, void *stream, const fsdp_op *op) {
    (void)device, (void)stream, (void)op;
    return FSDP_ERR_BACKEND;
}
static const char *bad_text(fsdp_device *device) {
    (void)device;
    return "a launch that went wrong";
}

TEST(optim_device, unsupported) {
    config c = {1, 0, 0, OPAQUE, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0};
    for (c.kind = 0; c.kind < 5; c.kind += 2) {
        job *j = start(&c);
        int64_t live = j->s.live_blocks;
        j->s.device.update = NULL;
        fsdp_status status = c.kind == 4
                                 ? fsdp_grad_scaler_create(j->m.model, NULL, &j->scaler)
                                 : lab_make_optim(&j->o, &lab_optim_kinds[j->c.kind], &j->m);
        CHECK_STATUS(status, FSDP_ERR_UNSUPPORTED);
        CHECK(strstr(fsdp_last_error(j->w), "device sim") &&
              strstr(fsdp_last_error(j->w), "set cpu_offload"));
        CHECK(!j->o.adamw && !j->o.sgd && !j->scaler && j->s.live_blocks == live);
        finish(j);
    }
}

/* Without device memory create fails, and a step after a thaw changes nothing. */
TEST(optim_device, out_of_memory) {
    config c = {1, 0, 0, OPAQUE, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0}, host = c;
    fsdp_memory before, after;
    host.device = HOST;
    job *a = start(&c), *b = start(&host);
    CALL(a->w, fsdp_model_memory(a->m.model, &before));
    int64_t live = a->s.live_blocks;
    a->s.device.alloc = no_memory;
    CHECK_STATUS(lab_make_optim(&a->o, &lab_optim_kinds[a->c.kind], &a->m), FSDP_ERR_OUT_OF_MEMORY);
    CHECK(strstr(fsdp_last_error(a->w), "adamw_create: no memory for a state of "));
    CHECK_STATUS(fsdp_grad_scaler_create(a->m.model, NULL, &a->scaler), FSDP_ERR_OUT_OF_MEMORY);
    CHECK(!a->o.adamw && !a->scaler && a->s.live_blocks == live);
    CALL(a->w, fsdp_model_memory(a->m.model, &after));
    CHECK_EQ_INT(after.host_bytes, before.host_bytes);
    a->s.device.alloc = sim_device_alloc;
    CALL(a->w, lab_make_optim(&a->o, &lab_optim_kinds[a->c.kind], &a->m));
    CALL(b->w, lab_make_optim(&b->o, &lab_optim_kinds[b->c.kind], &b->m));
    for (int step = 2; step < 4; step++) { /* parameter 2 is thawed before the first */
        toggle(a, step), toggle(b, step);
        forward(a), forward(b);
        backward(a, step, 1), backward(b, step, 1);
        a->s.device.alloc = no_memory;
        CHECK_STATUS(lab_optim_step(&a->o, 0.1), FSDP_ERR_OUT_OF_MEMORY);
        CHECK(strstr(fsdp_last_error(a->w), "adamw_step: no memory for a state of "));
        a->s.device.alloc = sim_device_alloc;
        CALL(a->w, lab_optim_step(&a->o, 0.1));
        CALL(b->w, lab_optim_step(&b->o, 0.1));
        compare(a, b);
    }
    finish(a);
    finish(b);
}

/* The error has the device's own text, and the world has failed: in a step, in the scaler, and when
   states move after a thaw. */
TEST(optim_device, device_fails) {
    config c = {1, 0, 0, OPAQUE, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0};
    for (int where = 0; where < 3; where++) {
        job *j = start(&c);
        CALL(j->w, lab_make_optim(&j->o, &lab_optim_kinds[j->c.kind], &j->m));
        CALL(j->w, fsdp_grad_scaler_create(j->m.model, NULL, &j->scaler));
        if (where == 2) toggle(j, 2);
        forward(j);
        backward(j, 0, 1);
        if (where == 2) j->s.device.copy = bad_copy;
        else j->s.device.update = bad_update;
        j->s.device.error_text = bad_text;
        CHECK_STATUS(where == 1 ? fsdp_grad_scaler_unscale(j->scaler) : lab_optim_step(&j->o, 0.1),
                     FSDP_ERR_BACKEND);
        W_CHECK(strstr(fsdp_last_error(j->w), "rank 0: ") &&
                    strstr(fsdp_last_error(j->w), " device sim") &&
                    strstr(fsdp_last_error(j->w), "a launch that went wrong"),
                "%s", fsdp_last_error(j->w));
        if (where < 2) CHECK(strstr(fsdp_last_error(j->w), "] update (optimizer) of '"));
        CHECK_EQ_INT(fsdp_grad_scaler_found_inf(j->scaler), -1);
        CHECK_STATUS(lab_optim_step(&j->o, 0.1), FSDP_ERR_BACKEND);
        finish(j);
    }
}
