/* test_fully_shard_comm.c - PyTorch's tests of the same names, translated: what is communicated,
   when, how much, in which order, and what comes out of it. Numbers come from ranks that are
   threads, sequences of events from the simulated device of sim.h.

   Most tests use a matrix and a vector for each unit, or a root and two layers, without an
   optimizer. PyTorch's "unshard" is the gather here, with its training state; "post_backward" is
   the reduce-scatter, and "reshard" a change of the unit's storage, both without a state.

   SPDX-License-Identifier: MIT */
#define TAGS TSAN | GLOO | NCCL
#include "harness.h"
#include "lab_net.h"
#include "rig.h"

/* ---- ranks ----------------------------------------------------------------------------------- */

typedef void (*rank_body)(fsdp_world *world, const void *arg);

static void on_lanes(int size, int lanes, const fsdp_comm_ops *ops, rank_body body,
                     const void *arg) {
    lab_how how = FSDP_ZERO;
    how.lanes = lanes, how.comm_ops = ops;
    lab_on_worlds(size, &how, body, arg);
}
static void on_ranks(int size, rank_body body, const void *arg) {
    on_lanes(size, 0, NULL, body, arg);
}

/* ---- a net whose truth is known -------------------------------------------------------------- */

/* The gradients of a rank are small integers from a hash, so that their sum over the ranks is exact
   and everything that follows is known. The root and two layers, f32 masters. */
enum { NET_UNITS = 3, NET_NUMEL = 12 * 5 };
static const lab_param net_rows[NET_UNITS] = {{0, "w", FSDP_F32, 0, 0, 2, 0, {12, 5}},
                                              {1, "w", FSDP_F32, 0, 0, 2, 0, {12, 5}},
                                              {2, "w", FSDP_F32, 0, 0, 2, 0, {12, 5}}};
static const lab_net the_net = {net_rows, NET_UNITS, NET_UNITS};
typedef struct {
    fsdp_world *world;
    lab_built m;
    lab_truth truth;
    int factor[NET_UNITS]; /* gradients are sums divided by this */
    int step;
    fsdp_dtype compute;
} net;

static float net_slope(const net *n, int rank, int u, int e) {
    uint64_t state = (uint64_t)(rank * 64 + n->step * 4096 + u) * 1009 + (uint64_t)e;
    return (float)(h_rand64(&state) >> 40 & 15) - 8;
}

static void net_fill(void *user, const fsdp_param_view *block) {
    const net *n = (const net *)user;
    for (int64_t k = 0; k < block->numel; k++)
        ((float *)block->data)[k] = n->truth.weight[block->ordinal][fsdp_view_index(block, k)];
}

static void net_build(net *n, fsdp_world *world, const fsdp_model_desc *desc) {
    static const char *const names[NET_UNITS] = {"root", "layer0", "layer1"};
    memset(n, 0, sizeof *n);
    n->world = world;
    n->compute = desc && desc->param_dtype ? desc->param_dtype : FSDP_F32;
    lab_begin(&n->m, &the_net, world);
    n->m.model = lab_model(world, desc);
    for (int u = 0; u < NET_UNITS; u++) {
        fsdp_param_desc p[LAB_PARAMS];
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.name = names[u];
        ud.reshard_after_forward = u ? 0 : FSDP_RESHARD_NEVER;
        n->m.unit[u] = lab_unit(world, n->m.model, &ud, p, lab_descs(&n->m, u, p));
        n->factor[u] = fsdp_world_size(world);
        for (int e = 0; e < NET_NUMEL; e++) n->truth.weight[u][e] = (float)((e * 7 + u) % 32);
    }
    CALL(world, fsdp_init_params(n->m.model, net_fill, n));
}

/* Reads the parameters, and in backward writes gradients. */
static void net_use(net *n, int u, int backward) {
    lab_check_data(&n->m, &n->truth, u, n->compute);
    void *grad = backward ? lab_grad(&n->m, u) : NULL;
    for (int e = 0; e < NET_NUMEL && backward; e++) {
        double slope = (double)net_slope(n, fsdp_rank(n->world), u, e);
        lab_put(grad, n->compute, e, lab_get(grad, n->compute, e) + slope);
    }
}

/* What a reduction of the unit has to come to, added to what is there. */
static void net_reduce(net *n, int u) {
    for (int e = 0; e < NET_NUMEL; e++)
        for (int r = 0; r < fsdp_world_size(n->world); r++)
            n->truth.kept[u][e] += (double)net_slope(n, r, u, e);
    lab_reduce(&n->truth, &the_net, u, n->factor[u], 0);
}

/* Gradients, a step of descent on both sides, and shards. */
static void net_update(net *n) {
    lab_check_grads(&n->m, &n->truth);
    lab_update(&n->m, &n->truth, 0.5f);
    lab_check_params(&n->m, &n->truth);
    n->step++;
}
static void net_finish(net *n) {
    CALL(n->world, fsdp_finalize_backward(n->m.model));
    for (int u = 0; u < NET_UNITS; u++) net_reduce(n, u);
    net_update(n);
}
/* After the last step: gathered once more, parameters are what the steps have made of them. */
static void net_end(const net *n) {
    for (int u = 0; u < NET_UNITS; u++) lab_check_full(&n->m, &n->truth, u, 0);
}
static int net_gathers(const net *n) {
    fsdp_counters c = FSDP_ZERO;
    CALL(n->world, fsdp_model_counters(n->m.model, &c));
    return (int)c.calls[FSDP_OP_ALL_GATHER];
}

static void net_step(net *n) {
    CALL(n->world, fsdp_pre_forward(n->m.unit[0]));
    for (int u = 1; u < NET_UNITS; u++) {
        CALL(n->world, fsdp_pre_forward(n->m.unit[u]));
        net_use(n, u, 0);
        CALL(n->world, fsdp_post_forward(n->m.unit[u]));
    }
    net_use(n, 0, 0);
    CALL(n->world, fsdp_post_forward(n->m.unit[0]));
    CALL(n->world, fsdp_pre_backward(n->m.unit[0]));
    for (int u = NET_UNITS - 1; u > 0; u--) {
        CALL(n->world, fsdp_pre_backward(n->m.unit[u]));
        net_use(n, u, 1);
        CALL(n->world, fsdp_post_backward(n->m.unit[u]));
    }
    net_use(n, 0, 1);
    CALL(n->world, fsdp_post_backward(n->m.unit[0]));
    net_finish(n);
}

/* ---- all-gather and reduce-scatter of 128 ranks ---------------------------------------------- */

/* 257 + 1 + 312 + 1 + 64 + 256 + 2 + 297 elements of each rank: 1190 */
enum { WIDE_WORLD = 128, WIDE_SHARD = 1190, WIDE_PARAMS = 8 };
typedef struct {
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *unit;
    uint64_t count; /* of the last gather */
    int group, gathers;
    double scales[2]; /* pre, post */
    fsdp_extension watcher;
} wide;

static float wide_value(int i, int64_t e) { return (float)(i * 100000 + (int)e); }

static void wide_fill(void *user, const fsdp_param_view *block) {
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        ((float *)block->data)[k] = wide_value(block->index, fsdp_view_index(block, k));
}

static int wide_op(void *user, fsdp_model *model, fsdp_op *op) {
    wide *w = (wide *)user;
    (void)model;
    if (op->kind == FSDP_OP_ALL_GATHER && op->label == FSDP_LABEL_GATHER) {
        w->count = op->count;
        w->group = op->group_size;
        w->gathers++;
    }
    if (op->label == FSDP_LABEL_ACC) w->scales[0] = op->scale;
    if (op->label == FSDP_LABEL_REDUCE && op->scale != 1) w->scales[1] = op->scale;
    if (op->label == FSDP_LABEL_RED_OUT && op->scale != 1) w->scales[1] = op->scale;
    return 0;
}

static void wide_build(wide *w, fsdp_world *world, fsdp_dtype reduce, int reshard) {
    static const int64_t shapes[WIDE_PARAMS][2] = {{17, 257}, {17, 0},   {64, 312}, {64, 0},
                                                   {64, 64},  {512, 64}, {256, 0},  {64, 297}};
    fsdp_param_desc p[WIDE_PARAMS];
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    memset(w, 0, sizeof *w);
    w->watcher.op = wide_op;
    w->world = world;
    w->scales[0] = w->scales[1] = 1;
    md.reduce_dtype = reduce;
    CALL(world, fsdp_model_create(world, &md, &w->model));
    for (int i = 0; i < WIDE_PARAMS; i++)
        p[i] = shapes[i][1] ? fsdp_mat(NULL, shapes[i][0], shapes[i][1])
                            : fsdp_vec(NULL, shapes[i][0]);
    ud.params = p;
    ud.num_params = WIDE_PARAMS;
    ud.reshard_after_forward = reshard;
    CALL(world, fsdp_fully_shard(w->model, &ud, &w->unit));
    CALL(world, fsdp_init_params(w->model, wide_fill, NULL));
    w->watcher.user = w;
    CALL(world, fsdp_attach(w->model, &w->watcher));
}

static void wide_look(const wide *w) {
    for (int i = 0; i < WIDE_PARAMS; i++) {
        fsdp_param_view v = lab_view(w->world, w->unit, i);
        const float *data = (const float *)fsdp_data(w->unit, i);
        W_CHECK(data, "%s", fsdp_last_error(w->world));
        int64_t numel = lab_full_numel(&v);
        for (int64_t e = 0; e < numel; e++)
            W_CHECK(data[e] == wide_value(i, e), "parameter %d element %lld is %g", i, (long long)e,
                    (double)data[e]);
    }
}

/* Gathered by the hooks, and ahead by the caller; resharded wholly, and to 8 neighbours. */
static void wide_gather(fsdp_world *world, const void *arg) {
    (void)arg;
    static const int modes[] = {FSDP_RESHARD_ALWAYS, 8};
    int size = fsdp_world_size(world);
    for (int mode = 0; mode < 2; mode++)
        for (int async = 0; async < 2; async++) {
            wide w;
            wide_build(&w, world, FSDP_DTYPE_KEEP, modes[mode]);
            if (async) {
                CALL(world, fsdp_unshard(w.unit));
                CALL(world, fsdp_wait(w.unit));
                wide_look(&w);
            }
            CALL(world, fsdp_pre_forward(w.unit));
            wide_look(&w);
            CHECK_EQ_INT(w.gathers, 1);
            CHECK_EQ_INT(w.group, size);
            if (size == WIDE_WORLD) CHECK_EQ_INT(w.count, WIDE_SHARD);
            CALL(world, fsdp_post_forward(w.unit));
            if (async) CALL(world, fsdp_unshard(w.unit));
            CALL(world, fsdp_pre_backward(w.unit));
            wide_look(&w);
            CHECK_EQ_INT(w.gathers, 2);
            CHECK_EQ_INT(w.group, mode ? 8 : size);
            if (size == WIDE_WORLD)
                CHECK_EQ_INT(w.count, mode ? WIDE_SHARD * WIDE_WORLD / 8 : WIDE_SHARD);
            CALL(world, fsdp_model_reset(w.model));
            CALL(world, fsdp_detach(w.model, &w.watcher));
            fsdp_model_destroy(w.model);
        }
}
/* The same and another stream: inline, and worker threads of each rank (fewer ranks then). */
/* PyTorch: test_fully_shard_comm.py test_all_gather_fp32. Done: on 128 ranks, by the hooks and
   prefetched, resharded fully and to 8 ranks. */
TEST(fully_shard_comm, all_gather_fp32, NO(GLOO | NCCL) | SLOW) {
    on_ranks(W_SLOW ? 16 : WIDE_WORLD, wide_gather, NULL);
    on_lanes(16, 1, NULL, wide_gather, NULL);
    on_lanes(16, 2, NULL, wide_gather, NULL);
}

/* Ones times rank mod 8. Upstream divides f16 by 16 before the sum and by 8 after it, and so does a
   plain backend; one that sums in f32 divides by 128 before it stores the sum. */
typedef struct {
    fsdp_dtype reduce;
    int plain;
} scatter;

static void wide_scatter(fsdp_world *world, const void *arg) {
    const scatter *c = (const scatter *)arg;
    int size = fsdp_world_size(world);
    wide w;
    wide_build(&w, world, c->reduce, 0);
    lab_forward(world, w.unit);
    CALL(world, fsdp_pre_backward(w.unit));
    for (int i = 0; i < WIDE_PARAMS; i++) {
        fsdp_param_view v = lab_view(world, w.unit, i);
        float *grad = (float *)fsdp_grad(w.unit, i);
        int64_t numel = lab_full_numel(&v);
        for (int64_t e = 0; e < numel; e++) grad[e] += (float)(fsdp_rank(world) % 8);
    }
    CALL(world, fsdp_post_backward(w.unit));
    CALL(world, fsdp_finalize_backward(w.model));
    if (size == WIDE_WORLD) {
        CHECK_NEAR(w.scales[0], c->plain ? 1.0 / 16 : 1, 0);
        CHECK_NEAR(w.scales[1], c->plain ? 1.0 / 8 : 1.0 / 128, 0);
    }
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(w.model, &v)) {
        float full[512 * 64];
        CHECK(v.shard_grad);
        for (int64_t k = 0; k < v.numel; k++) CHECK_NEAR(((float *)v.shard_grad)[k], 3.5, 0);
        if (v.index % 3) continue; /* the shards one after another */
        CALL(world, fsdp_param_full_grad(v.unit, v.index, full));
        for (int64_t e = 0; e < lab_full_numel(&v); e++) CHECK_NEAR(full[e], 3.5, 0);
    }
}
static void test_scatter(fsdp_dtype reduce) {
    scatter c = {reduce, 0};
    fsdp_comm_ops plain = w_plain();
    on_ranks(W_SLOW ? 16 : WIDE_WORLD, wide_scatter, &c);
    for (int lanes = 1; lanes < 3; lanes++) on_lanes(16, lanes, NULL, wide_scatter, &c);
    c.plain = 1; /* which f32 does not see */
    if (reduce == FSDP_F16) on_lanes(W_SLOW ? 16 : WIDE_WORLD, 0, &plain, wide_scatter, &c);
}
/* PyTorch: test_fully_shard_comm.py test_reduce_scatter_fp32. Done: on 128 ranks, and with comm
   threads. */
TEST(fully_shard_comm, reduce_scatter_fp32, NO(GLOO | NCCL) | SLOW) { test_scatter(FSDP_F32); }
/* PyTorch: test_fully_shard_comm.py test_reduce_scatter_fp16. Differs: a backend that sums in f32
   divides by 128 before it stores the sum, so that it stays in range (f16.sums_stay_in_range). One
   that does not, like NCCL, divides by 16 before and by 8 after the sum, as PyTorch; its sums can
   overflow (f16.sums_of_a_backend_that_does_not_divide). */
TEST(fully_shard_comm, reduce_scatter_fp16, NO(GLOO | NCCL) | SLOW) { test_scatter(FSDP_F16); }

/* ---- gradients of several dtypes in one reduction -------------------------------------------- */

typedef struct {
    fsdp_dtype dtype[3], reduce; /* of the gradients: f32, in which all is stored, or another one */
} mix;

/* One rank of 4 has a gradient, the sum is not divided: what comes out is the gradient, cast. */
static void chunk_cat(fsdp_world *world, const void *arg) {
    const mix *m = (const mix *)arg;
    fsdp_param_desc p[3] = {fsdp_mat("a", 5, 3), fsdp_vec("b", 7), fsdp_mat("c", 2049, 2)};
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_model *model;
    fsdp_unit *unit;
    uint64_t expected[3][2049 * 4];
    p[2].ndim = 3;
    p[2].shape[2] = 2;
    for (int i = 0; i < 3; i++) {
        p[i].keep_dtype = m->dtype[i] == FSDP_F32;
        if (!p[i].keep_dtype) md.param_dtype = m->dtype[i];
    }
    ud.params = p;
    ud.num_params = 3;
    md.reduce_dtype = m->reduce;
    md.grad_dtype = FSDP_F32;
    CALL(world, fsdp_model_create(world, &md, &model));
    CALL(world, fsdp_fully_shard(model, &ud, &unit));
    CALL(world, fsdp_set_gradient_divide_factor(model, unit, 1));
    lab_forward(world, unit);
    CALL(world, fsdp_pre_backward(unit));
    for (int i = 0; i < 3; i++) {
        fsdp_param_view v = lab_view(world, unit, i);
        int64_t numel = lab_full_numel(&v);
        char *grad = (char *)fsdp_grad(unit, i);
        for (int64_t e = 0; e < numel; e++) {
            uint64_t state = (uint64_t)(e * 3 + i), as_grad, as_reduced;
            float value = (float)(h_rand64(&state) >> 41) / 8388608.0f - 0.5f;
            if (value > -0.01f && value < 0.01f) value = 0.3f;
            CHECK_OK(fsdp_convert(&as_grad, m->dtype[i], &value, FSDP_F32, 1));
            CHECK_OK(fsdp_convert(&as_reduced, m->reduce, &as_grad, m->dtype[i], 1));
            CHECK_OK(fsdp_convert(&expected[i][e], FSDP_F32, &as_reduced, m->reduce, 1));
            if (fsdp_rank(world) == 2)
                memcpy(grad + (size_t)e * fsdp_dtype_size(m->dtype[i]), &as_grad,
                       fsdp_dtype_size(m->dtype[i]));
        }
    }
    CALL(world, fsdp_post_backward(unit));
    CALL(world, fsdp_finalize_backward(model));
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(model, &v)) {
        CHECK(v.shard_grad);
        CHECK_EQ_INT(v.grad_dtype, FSDP_F32);
        for (int64_t k = 0; k < v.numel; k++) /* from this dtype to that of the shard gradient */
            CHECK_EQ_MEM((float *)v.shard_grad + k, &expected[v.index][fsdp_view_index(&v, k)], 4);
    }
}
/* PyTorch: test_fully_shard_comm.py test_numerics. Done: PyTorch calls the operator. Here a
   reduction of a backend that does not divide has the bits of a cast followed by a chunk-cat.
   Gradients are row-major: no non-contiguous inputs. */
TEST(fully_shard_comm, ChunkCatMixedDtype_numerics) {
    static const mix mixes[] = {
        {{FSDP_BF16, FSDP_F32, FSDP_BF16}, FSDP_F32}, {{FSDP_F16, FSDP_F32, FSDP_F16}, FSDP_F32},
        {{FSDP_F32, FSDP_BF16, FSDP_BF16}, FSDP_F32}, {{FSDP_F16, FSDP_F16, FSDP_F32}, FSDP_BF16},
        {{FSDP_F32, FSDP_BF16, FSDP_F32}, FSDP_BF16}, {{FSDP_BF16, FSDP_F32, FSDP_F32}, FSDP_F16}};
    for (size_t n = 0; n < sizeof mixes / sizeof *mixes; n++) on_ranks(4, chunk_cat, &mixes[n]);
}

/* ---- events ---------------------------------------------------------------------------------- */

/* names: one letter for each unit, the first is the root. inline_device: upstream's sequence by the
   policy; otherwise streams give it. */
static void rig_open_on(rig *r, int replicas, const char *names, int root, int inner,
                        int inline_device) {
    config c = FSDP_ZERO;
    c.world = 4 * replicas, c.replicas = replicas, c.async = !inline_device;
    c.names = names, c.root = root, c.inner = inner;
    c.prefetch = inline_device ? FSDP_PREFETCH_ALWAYS : FSDP_PREFETCH_DEFAULT;
    rig_open(r, &c);
}

static void open_units(rig *r, const char *names, int root, int inner, int inline_device) {
    rig_open_on(r, 1, names, root, inner, inline_device);
}

static void prefetches(rig *r, char unit, int backward, const char *targets) {
    fsdp_unit *list[MAX_UNITS];
    int n = 0;
    for (; targets[n]; n++) list[n] = named(r, targets[n]);
    CHECK_OK(backward ? fsdp_set_modules_to_backward_prefetch(named(r, unit), list, n)
                      : fsdp_set_modules_to_forward_prefetch(named(r, unit), list, n));
}

static void plays(rig *r, const char *script, const char *expected) {
    r->used = 0;
    r->trace[0] = 0;
    play(r, script);
    CHECK_EQ_STR(r->trace, expected);
}

#define BWDH  "[2 ]2 [1 ]1 [0 ]0 "
#define AGAIN "[2 (2 )2 ]2 [1 (1 )1 ]1 [0 (0 )0 ]0 " /* each layer recomputed in its backward */
#define UB    "U2:B U1:B P2 U0:B P1 P0 Pr"

/* ---- counts ---------------------------------------------------------------------------------- */

/* Collectives that are neither gathers nor reduce-scatters. */
static uint64_t other_ops(rig *r) {
    uint64_t sum = 0;
    for (int kind = FSDP_OP_ALL_GATHER; kind <= FSDP_OP_RECV; kind++)
        if (kind != FSDP_OP_ALL_GATHER && kind != FSDP_OP_REDUCE_SCATTER) sum += ops_of(r, kind);
    return sum;
}

/* All-gathers in forward and in backward, reductions in backward, and nothing else. */
static void counts(rig *r, const char *forward, int gathers, const char *backward, int again,
                   int reductions) {
    uint64_t before = ops_of(r, FSDP_OP_ALL_GATHER), scatters = ops_of(r, FSDP_OP_REDUCE_SCATTER);
    uint64_t others = other_ops(r);
    play(r, forward);
    CHECK_EQ_INT(ops_of(r, FSDP_OP_ALL_GATHER) - before, gathers);
    CHECK_EQ_INT(ops_of(r, FSDP_OP_REDUCE_SCATTER), scatters);
    before = ops_of(r, FSDP_OP_ALL_GATHER);
    play(r, backward);
    CHECK_EQ_INT(ops_of(r, FSDP_OP_ALL_GATHER) - before, again);
    CHECK_EQ_INT(ops_of(r, FSDP_OP_REDUCE_SCATTER) - scatters, reductions);
    CHECK_EQ_INT(other_ops(r), others);
}

static const struct {
    const char *name;
    int root, inner, again; /* again: gathers in backward, of 3 blocks and the root */
} reshards[] = {{"None", NEVER, ALWAYS, 3},
                {"True", ALWAYS, ALWAYS, 4},
                {"2", 2, 2, 4},
                {"False", NEVER, NEVER, 0}};
enum { NONE, TRUE_, TWO, FALSE_, RESHARDS };

/* PyTorch: test_fully_shard_comm.py test_fully_shard_communication_count. Done: and nothing else is
   issued. */
TEST_P(fully_shard_comm, communication_count, reshards) {
    for (int inline_device = 0; inline_device < 2; inline_device++) {
        rig r;
        open_units(&r, "r012", row->root, row->inner, inline_device);
        for (int step = 0; step < 2; step++) counts(&r, FWD, 4, BWD ".", row->again, 4);
        rig_close(&r);
    }
}

/* PyTorch: test_fully_shard_comm.py test_manual_reshard_with_reshard_after_forward_false. Done. */
TEST(fully_shard_comm, manual_reshard_with_reshard_after_forward_false) {
    rig r;
    open_units(&r, "r012", NEVER, NEVER, 0);
    for (int step = 0; step < 2; step++) counts(&r, FWD "sr s0 s1 s2", 4, BWD ".", 4, 4);
    rig_close(&r);
}

/* PyTorch: test_fully_shard_comm.py test_set_reshard_after_forward. Done: for the model and for the
   root only. */
TEST(fully_shard_comm, set_reshard_after_forward) {
    static const struct {
        int made, set, recurse, again;
    } rows[] = {{ALWAYS, NEVER, 1, 0}, /* as if made so */
                {NEVER, ALWAYS, 1, 4},
                {NEVER, ALWAYS, 0, 1}, /* the root alone */
                {ALWAYS, NEVER, 0, 3}};
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        rig r;
        open_units(&r, "r012", rows[n].made, rows[n].made, 0);
        CHECK_OK(fsdp_set_reshard_after_forward(r.model, rows[n].recurse ? NULL : r.units[0],
                                                rows[n].set));
        for (int step = 0; step < 2; step++) counts(&r, FWD, 4, BWD ".", rows[n].again, 4);
        rig_close(&r);
    }
}

/* Three microbatches over three layers and the root. */
enum { EACH = 1, LAST_SYNC, LAST_SYNC_KEEP, LAST_ALL_REDUCE };
static const struct {
    const char *name;
    int mode, root, inner, gathers, scatters, replicas;
} accumulations[] = {
    {"sync_each_True", EACH, ALWAYS, ALWAYS, 24, 12, 12},
    {"sync_each_None", EACH, NEVER, ALWAYS, 21, 12, 12},
    {"sync_each_2", EACH, 2, 2, 24, 12, 12},
    {"sync_each_False", EACH, NEVER, NEVER, 12, 12, 12},
    {"sync_last_True", LAST_SYNC, ALWAYS, ALWAYS, 24, 4, 4},
    {"sync_last_False", LAST_SYNC, NEVER, NEVER, 12, 4, 4},
    {"sync_last_keep_True", LAST_SYNC_KEEP, ALWAYS, ALWAYS, 16, 4, 4},
    {"sync_last_keep_False", LAST_SYNC_KEEP, NEVER, NEVER, 4, 4, 4},
    {"all_reduce_last_True", LAST_ALL_REDUCE, ALWAYS, ALWAYS, 24, 12, 4},
    {"all_reduce_last_False", LAST_ALL_REDUCE, NEVER, NEVER, 12, 12, 4},
};
/* What is kept between microbatches: gathered parameters, full gradients, sums of the shard group. */
static void check_kept(const rig *r, int mode, int replicas) {
    for (int u = 0; u < r->num_units; u++) {
        fsdp_memory m = FSDP_ZERO;
        CHECK_OK(fsdp_unit_memory(r->units[u], &m));
        CHECK_EQ_INT(m.pool_slots[FSDP_POOL_GATHER], mode == LAST_SYNC_KEEP);
        CHECK_EQ_INT(m.pool_slots[FSDP_POOL_GRAD] + m.pool_slots[FSDP_POOL_REDUCE_IN],
                     mode == LAST_SYNC || mode == LAST_SYNC_KEEP);
        CHECK_EQ_INT(m.pool_slots[FSDP_POOL_REDUCE_OUT], mode == LAST_ALL_REDUCE && replicas > 1);
    }
}
/* PyTorch: none. Own: the table "How many collectives" of docs/parity.md for three microbatches. */
TEST_P(fully_shard_comm, accumulation_count, accumulations) {
    for (int replicas = 1; replicas < 3; replicas++) {
        rig r;
        rig_open_on(&r, replicas, "r012", row->root, row->inner, 0);
        for (int step = 1; step < 3; step++) {
            for (int micro = 0; micro < 3; micro++) {
                int last = micro == 2;
                if (row->mode == LAST_SYNC || row->mode == LAST_SYNC_KEEP)
                    CHECK_OK(fsdp_set_requires_gradient_sync(r.model, NULL, last));
                if (row->mode == LAST_SYNC_KEEP)
                    CHECK_OK(fsdp_set_reshard_after_backward(r.model, NULL, last));
                if (row->mode == LAST_ALL_REDUCE)
                    CHECK_OK(fsdp_set_requires_all_reduce(r.model, NULL, last));
                play(&r, FWD BWD ".");
                check_kept(&r, last ? EACH : row->mode, replicas);
            }
            CHECK_EQ_INT(ops_of(&r, FSDP_OP_ALL_GATHER), step * row->gathers);
            CHECK_EQ_INT(ops_of(&r, FSDP_OP_REDUCE_SCATTER), step * row->scatters);
            CHECK_EQ_INT(ops_of(&r, FSDP_OP_ALL_REDUCE), replicas > 1 ? step * row->replicas : 0);
        }
        rig_close(&r);
    }
}

/* ---- sequences ------------------------------------------------------------------------------- */

/* One forward and backward, three times; then two forwards before one backward. Both also with every
   layer recomputed in its backward, which changes no event. */
/* PyTorch: test_fully_shard_comm.py test_fully_shard_backward_prefetch. Done: PyTorch's sequences
   of events. Its part with an unused branch is backward_prefetch_unused_in_backward. */
TEST(fully_shard_comm, backward_prefetch) {
    static const struct {
        const char *back, *again; /* of a backward; of the second half of one over two forwards */
    } expected[RESHARDS] = {{UB, "U2:B U1:B P2 U0:B P1 P0 Pr"},
                            {"Ur:B " UB, "U2:B U1:B P2 U0:B P1 P0 Pr"},
                            {"Ur:B " UB, "U2:B U1:B P2 U0:B P1 P0 Pr"},
                            {"P2 P1 P0 Pr", "U2:B U1:B P2 U0:B P1 P0 Pr"}};
    for (int mode = 0; mode < RESHARDS; mode++)
        for (int inline_device = 0; inline_device < 2; inline_device++) {
            rig r;
            char half[256];
            open_units(&r, "r012", reshards[mode].root, reshards[mode].inner, inline_device);
            snprintf(w_case, sizeof w_case, "reshard %s", reshards[mode].name);
            snprintf(half, sizeof half, "%.*s", (int)strlen(expected[mode].back) - 3,
                     expected[mode].back); /* without Pr */
            for (int step = 0; step < 3; step++) {
                plays(&r, FWD, UF);
                plays(&r, BWD ".", expected[mode].back);
                plays(&r, FWD, UF);
                plays(&r, "[r " AGAIN "]r .", expected[mode].back);
            }
            for (int recompute = 0; recompute < 2; recompute++) {
                plays(&r, FWD, UF);
                plays(&r, FWD, mode == NONE ? "U0:F U1:F U2:F" : mode == FALSE_ ? "" : UF);
                plays(&r, recompute ? "[r " AGAIN : "[r " BWDH, half);
                plays(&r, recompute ? AGAIN "]r ." : BWDH "]r .", expected[mode].again);
            }
            rig_close(&r);
        }
}

/* A layer with two branches after it; a backward of one branch, then, over the same forward, of the
   other. What the first one gathers ahead in vain is there for the second one. */
/* PyTorch: test_fully_shard_comm.py test_fully_shard_backward_prefetch. Done: two backwards over
   one forward that share a layer: PyTorch's events, without its two post-backwards that do nothing.
   */
TEST(fully_shard_comm, backward_prefetch_unused_in_backward) {
    for (int inline_device = 0; inline_device < 2; inline_device++) {
        rig r;
        open_units(&r, "0ab", ALWAYS, ALWAYS,
                   inline_device); /* upstream's root has no parameters */
        for (int step = 0; step < 2; step++) {
            plays(&r, "(0 )0 (a )a (b )b", "U0:F Ua:F Ub:F");
            plays(&r, "l- [b ]b [0 ]0 .", "Ub:B Ua:B Pb U0:B P0");
            CHECK_EQ_INT(fsdp_unit_storage(named(&r, 'a')), FSDP_STORAGE_IN_FLIGHT);
            plays(&r, "l+ [a ]a [0 ]0 .", "U0:B Pa P0");
            for (int u = 0; u < 3; u++) {
                CHECK_EQ_INT(fsdp_unit_storage(r.units[u]), FSDP_STORAGE_SHARDED);
                CHECK_EQ_INT(fsdp_pre_backward(r.units[u]), FSDP_ERR_INVALID_STATE);
            }
            CHECK_EQ_INT(fsdp_finalize_backward(r.model), FSDP_ERR_INVALID_STATE);
        }
        rig_close(&r);
    }
}

/* The gradients of both backwards are added up. */
static void two_backwards(fsdp_world *world, const void *arg) {
    (void)arg;
    net n;
    net_build(&n, world, NULL);
    for (int step = 0; step < 3; step++) {
        for (int u = 0; u < NET_UNITS; u++) {
            CALL(world, fsdp_pre_forward(n.m.unit[u]));
            net_use(&n, u, 0);
            CALL(world, fsdp_post_forward(n.m.unit[u]));
        }
        for (int branch = 2; branch > 0; branch--) {
            CALL(world, fsdp_set_is_last_backward(n.m.model, branch == 1));
            for (int u = branch; u >= 0; u -= branch) {
                CALL(world, fsdp_pre_backward(n.m.unit[u]));
                net_use(&n, u, 1);
                CALL(world, fsdp_post_backward(n.m.unit[u]));
                net_reduce(&n, u);
            }
            CALL(world, fsdp_finalize_backward(n.m.model));
        }
        net_update(&n);
    }
    net_end(&n);
}
/* PyTorch: none. Own: the sums of both backwards. */
TEST(fully_shard_comm, backward_prefetch_unused_in_backward_grads) {
    for (int lanes = 0; lanes < 3; lanes++) on_lanes(2, lanes, NULL, two_backwards, NULL);
}

#define AGAIN4 "[r [3 (3 )3 ]3 [2 (2 )2 ]2 [1 (1 )1 ]1 [0 (0 )0 ]0 ]r ."

static void test_lists(int backward, const char *const expected[3][2]) {
    for (int depth = 0; depth < 3; depth++)
        for (int inline_device = 0; inline_device < 2; inline_device++) {
            rig r;
            open_units(&r, "r0123", ALWAYS, ALWAYS, inline_device);
            r.show_reshard = 1;
            for (int l = 0; l < 4 && depth; l++) {
                char list[4] = "";
                for (int k = 1; k <= depth; k++) {
                    int to = backward ? l - k : l + k;
                    if (to >= 0 && to < 4) list[k - 1] = (char)('0' + to), list[k] = 0;
                }
                prefetches(&r, (char)('0' + l), backward, list);
            }
            for (int step = 0; step < 2; step++) {
                plays(&r, FWD4, expected[depth][0]);
                plays(&r, step ? AGAIN4 : BWD4 ".", expected[depth][1]);
            }
            rig_close(&r);
        }
}

#define FORWARD4  "Ur:F U0:F R0 U1:F R1 U2:F R2 U3:F R3 Rr"
#define BACKWARD4 "Ur:B U3:B U2:B R3 P3 U1:B R2 P2 U0:B R1 P1 R0 P0 Rr Pr"
/* PyTorch: test_fully_shard_comm.py test_set_modules_to_forward_prefetch,
   test_set_modules_to_backward_prefetch. Done: PyTorch's sequences of events, also for depth 0. */
TEST(fully_shard_comm, set_modules_to_forward_prefetch) {
    static const char *const expected[3][2] = {
        {FORWARD4, BACKWARD4},
        {"Ur:F U0:F U1:F R0 U2:F R1 U3:F R2 R3 Rr", BACKWARD4},
        {"Ur:F U0:F U1:F U2:F R0 U3:F R1 R2 R3 Rr", BACKWARD4}};
    test_lists(0, expected);
}
TEST(fully_shard_comm, set_modules_to_backward_prefetch) {
    static const char *const expected[3][2] = {
        {FORWARD4, BACKWARD4},
        {FORWARD4, BACKWARD4},
        {FORWARD4, "Ur:B U3:B U2:B U1:B R3 P3 U0:B R2 P2 R1 P1 R0 P0 Rr Pr"}};
    test_lists(1, expected);
}

/* Embeddings t, blocks 0 1 2 with units a b c inside of them, each block recomputed in its backward,
   and n, the norm and the output. */
/* PyTorch: test_fully_shard_comm.py test_set_modules_to_backward_prefetch_inside_ac. Done:
   PyTorch's sequences of events, and the reductions. Only blocks are recomputed (PyTorch:
   feed-forwards inside, too). */
TEST(fully_shard_comm, backward_prefetch_inside_ac) {
    static const char forward[] = "(t )t (0 (a )a )0 (1 (b )b )1 (2 (c )c )2 (n )n";
    static const char backward[] = "[n ]n [2 (2 (c )c )2 [c ]c ]2 [1 (1 (b )b )1 [b ]b ]1"
                                   "[0 (0 (a )a )0 [a ]a ]0 [t ]t .";
    for (int lists = 0; lists < 2; lists++) {
        rig r;
        open_units(&r, "t0a1b2cn", ALWAYS, ALWAYS, 0);
        r.show_reshard = 1;
        if (lists) prefetches(&r, 'n', 1, "2"), prefetches(&r, '2', 1, "1b");
        if (lists) prefetches(&r, '1', 1, "0a"), prefetches(&r, '0', 1, "t");
        for (int step = 0; step < 2; step++) {
            plays(&r, forward, "Ut:F Rt U0:F Ua:F Ra R0 U1:F Ub:F Rb R1 U2:F Uc:F Rc R2 Un:F Rn");
            plays(&r, backward,
                  lists ? "Un:B U2:B Rn Pn U1:B Ub:B Uc:F Rc Pc R2 P2 U0:B Ua:B Rb Pb R1 P1 Ut:B "
                          "Ra Pa R0 P0 Rt Pt"
                        : "Un:B U2:B Rn Pn Uc:B U1:B Rc Pc R2 P2 Ub:B U0:B Rb Pb R1 P1 Ua:B Ut:B "
                          "Ra Pa R0 P0 Rt Pt");
        }
        rig_close(&r);
    }
}

/* Embeddings t, a layer 0, units 1 and 2 of two layers each, and n, the norm and the output, which
   stays: one event per unit. */
/* PyTorch: test_fully_shard_comm.py test_fully_shard_multi_module_backward_prefetch. Done:
   PyTorch's sequences of events; its test states those of backward and does not compare them. */
TEST(fully_shard_comm, multi_module_backward_prefetch) {
    rig r;
    open_units(&r, "t012n", ALWAYS, ALWAYS, 0);
    CHECK_OK(fsdp_set_reshard_after_forward(r.model, named(&r, 'n'), NEVER));
    for (int step = 0; step < 3; step++) {
        plays(&r, "(t (t )t (0 )0 (1 (1 )1 (2 (2 )2 (n (n )n", "Ut:F U0:F U1:F U2:F Un:F");
        plays(&r,
              step ? "[n ]n [2 (2 )2 ]2 [1 (1 )1 ]1 [0 (0 )0 ]0 [t ]t ." /* recomputed */
                   : "[n ]n [2 ]2 [1 ]1 [0 ]0 [t ]t .",
              "U2:B Pn U1:B P2 U0:B P1 Ut:B P0 Pt");
    }
    rig_close(&r);
}

/* A unit with a layer that never ran: the caller closes it, its backward is ended by finalize, and
   the layer's parameters have no gradient. */
/* PyTorch: test_fully_shard_comm.py test_fully_shard_multi_module_unused_module. Done: you close a
   unit whose layer did not run; PyTorch does so at the end of forward. */
TEST(fully_shard_comm, multi_module_unused_module) {
    rig r;
    open_units(&r, "r01", NEVER, ALWAYS, 0);
    for (int step = 0; step < 3; step++) {
        plays(&r, "(r (0 )0 (1 )1 )r", "Ur:F U0:F U1:F");
        plays(&r, "[r [1 ]1 [0 ]r .", "U1:B U0:B P1 Pr P0");
    }
    rig_close(&r);
}
static void unused_layer(fsdp_world *world, const void *arg) {
    (void)arg;
    fsdp_param_desc p[2] = {fsdp_mat("used", 4, 3), fsdp_mat("unused", 4, 3)};
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_model *model;
    fsdp_unit *unit;
    fsdp_param_view v;
    ud.params = p;
    ud.num_params = 2;
    CALL(world, fsdp_model_create(world, NULL, &model));
    CALL(world, fsdp_fully_shard(model, &ud, &unit));
    lab_forward(world, unit);
    CALL(world, fsdp_pre_backward(unit));
    for (int e = 0; e < 12; e++) ((float *)fsdp_grad(unit, 0))[e] += 2;
    CALL(world, fsdp_finalize_backward(model));
    CALL(world, fsdp_param_view_get(unit, 0, &v));
    CHECK(v.shard_grad);
    for (int64_t k = 0; k < v.numel; k++) CHECK_NEAR(((float *)v.shard_grad)[k], 2, 0);
    CALL(world, fsdp_param_view_get(unit, 1, &v));
    CHECK(!v.shard_grad);
}
/* PyTorch: none. Own: the unused layer has no gradient. */
TEST(fully_shard_comm, multi_module_unused_module_grads) { on_ranks(2, unused_layer, NULL); }

/* ---- factors --------------------------------------------------------------------------------- */

/* The root alone has another factor: 2N, then N. Layers are resharded after forward, or never. */
static void divide_factor(fsdp_world *world, const void *arg) {
    int size = fsdp_world_size(world), bf16 = arg != NULL;
    fsdp_mesh *meshes[3] = {NULL, lab_hsdp(world, size / 2, 2), lab_hsdp(world, size, 1)};
    for (int k = 0; k < 6; k++) {
        fsdp_model_desc md = FSDP_ZERO;
        net n;
        md.mesh = meshes[k % 3];
        md.reshard_after_forward = k < 3 ? ALWAYS : NEVER;
        md.param_dtype = bf16 ? FSDP_BF16 : FSDP_DTYPE_KEEP;
        md.reduce_dtype = bf16 ? FSDP_F32 : FSDP_DTYPE_KEEP;
        net_build(&n, world, &md);
        for (int step = 0; step < 20; step++) {
            n.factor[0] = step < 10 ? 2 * size : size;
            CALL(world, fsdp_set_gradient_divide_factor(n.m.model, n.m.unit[0], n.factor[0]));
            net_step(&n);
        }
        CHECK_EQ_INT(net_gathers(&n),
                     k % 3 == 2 ? 0 : 20 * (k < 3 ? 2 * NET_UNITS - 1 : NET_UNITS));
        net_end(&n);
        fsdp_model_destroy(n.m.model);
    }
}
/* PyTorch: test_fully_shard_comm.py test_set_reduce_scatter_divide_factor. Done: also HSDP and
   bf16. Not in f16: there the first division stays a power of two that follows from the ranks, so
   that results may differ from PyTorch's where they are subnormal or overflow. */
TEST(fully_shard_comm, set_reduce_scatter_divide_factor) {
    on_ranks(4, divide_factor, NULL);
    on_ranks(4, divide_factor, "bf16");
}

/* Upstream lets more reduce inputs wait at a time; here their number follows from the device: one
   inline, two with lanes. No bit depends on it, nor on reshard_after_forward. */
enum { HSDP = 1, KEPT = 2, BUFFERS = 4 };
typedef struct {
    float got[BUFFERS][3][4][NET_UNITS * NET_NUMEL]; /* mesh and reshard, lanes, rank */
    int how, lanes, numel[BUFFERS][4];
} buffers;

static void input_buffers(fsdp_world *world, const void *arg) {
    buffers *b = *(buffers *const *)arg;
    int rank = fsdp_rank(world), at = 0;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_view v;
    net n;
    md.mesh = b->how & HSDP ? lab_hsdp(world, 2, 2) : NULL;
    md.reshard_after_forward = b->how & KEPT ? NEVER : ALWAYS;
    md.param_dtype = FSDP_BF16;
    md.reduce_dtype = FSDP_BF16;
    net_build(&n, world, &md);
    for (int step = 0; step < 3; step++) {
        for (int u = 0; u < NET_UNITS; u++) lab_forward(world, n.m.unit[u]);
        for (int u = NET_UNITS - 1; u >= 0; u--) {
            CALL(world, fsdp_pre_backward(n.m.unit[u]));
            uint16_t *grad = (uint16_t *)fsdp_grad(n.m.unit[u], 0);
            for (int e = 0; e < NET_NUMEL; e++) {
                float value = net_slope(&n, rank, u, e) / 3;
                CHECK_OK(fsdp_convert(&grad[e], FSDP_BF16, &value, FSDP_F32, 1));
            }
            CALL(world, fsdp_post_backward(n.m.unit[u]));
        }
        CALL(world, fsdp_finalize_backward(n.m.model));
        memset(&v, 0, sizeof v);
        while (fsdp_next_param(n.m.model, &v))
            for (int64_t k = 0; k < v.numel; k++)
                ((float *)v.shard)[k] -= 0.1f * ((const float *)v.shard_grad)[k];
        CALL(world, fsdp_params_changed(n.m.model));
        n.step++;
    }
    fsdp_memory now = FSDP_ZERO;
    CHECK_EQ_INT(net_gathers(&n), 3 * (b->how & KEPT ? NET_UNITS : 2 * NET_UNITS - 1));
    CALL(world, fsdp_model_memory(n.m.model, &now));
    CHECK_EQ_INT(now.pool_slots[FSDP_POOL_GRAD], b->lanes || lib_on_streams(world) ? 2 : 1);
    float *out = b->got[b->how][b->lanes][rank];
    memset(&v, 0, sizeof v);
    while (fsdp_next_param(n.m.model, &v))
        for (int64_t k = 0; k < v.numel; k++) {
            CHECK(at + 2 <= NET_UNITS * NET_NUMEL);
            out[at++] = ((const float *)v.shard)[k];
            out[at++] = ((const float *)v.shard_grad)[k];
        }
    CHECK(at > 0);
    b->numel[b->how][rank] = at;
}
/* PyTorch: test_fully_shard_comm.py test_set_reduce_scatter_max_input_buffers. Differs: there is no
   such setter: a rule chooses the number of buffers. The bits do not depend on it. */
TEST(fully_shard_comm, set_reduce_scatter_max_input_buffers) {
    buffers *b = (buffers *)lab_zeros(1, sizeof *b);
    for (b->how = 0; b->how < BUFFERS; b->how++) {
        for (b->lanes = 0; b->lanes < 3; b->lanes++) on_lanes(4, b->lanes, NULL, input_buffers, &b);
        for (int lanes = 0; lanes < 3; lanes++)
            for (int rank = 0; rank < 4; rank++)
                CHECK_EQ_MEM(b->got[b->how][lanes][rank], b->got[b->how & HSDP][0][rank],
                             (size_t)b->numel[b->how][rank] * sizeof(float));
    }
    free(b);
}

/* Every collective of a reduction is a sum; the factor stands in its last op; a rank receives
   numel / W elements, and a count of users for each parameter. */
static void test_force_sum(int hsdp, int fused) {
    enum { W = 4 };
    rig r;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc p[1] = {fsdp_mat("w", 16, 8)};
    fsdp_unit_desc ud = FSDP_ZERO;
    double factor = 1;
    int reductions = 0, replicas = 0;
    memset(&r, 0, sizeof r);
    sim_init(&r.s, hsdp ? 2 * W : W, 1);
    r.s.fused = fused;
    CHECK(sim_open(&r.s));
    md.mesh = hsdp ? lab_hsdp(r.s.world, 2, W) : NULL;
    CHECK_OK(fsdp_model_create(r.s.world, &md, &r.model));
    ud.params = p;
    ud.num_params = 1;
    CHECK_OK(fsdp_fully_shard(r.model, &ud, &r.units[0]));
    CHECK_OK(sim_watch(&r.s, r.model));
    CHECK_OK(fsdp_pre_forward(r.units[0]));
    CHECK_OK(fsdp_post_forward(r.units[0]));
    CHECK_OK(fsdp_pre_backward(r.units[0]));
    CHECK(fsdp_grad(r.units[0], 0));
    CHECK_OK(fsdp_post_backward(r.units[0]));
    CHECK_OK(fsdp_finalize_backward(r.model));
    for (int i = 0; i < r.s.num_ops; i++) {
        const fsdp_op *op = &r.s.ops[i];
        if (op->kind == FSDP_OP_HOOK || op->kind == FSDP_OP_WAIT) continue;
        if (op->label == FSDP_LABEL_REDUCE || op->label == FSDP_LABEL_REPLICAS) {
            CHECK_EQ_INT(op->redop, FSDP_SUM);
            CHECK_EQ_INT(op->count, 16 * 8 / W);
            CHECK_EQ_INT(op->group_size, op->label == FSDP_LABEL_REDUCE ? W : 2);
            reductions += op->label == FSDP_LABEL_REDUCE;
            replicas += op->label == FSDP_LABEL_REPLICAS;
        }
        if (op->label == FSDP_LABEL_ACC || op->label == FSDP_LABEL_REDUCE ||
            op->label == FSDP_LABEL_REPLICAS || op->label == FSDP_LABEL_RED_OUT)
            factor *= op->scale;
    }
    CHECK_EQ_INT(reductions, 1);
    CHECK_EQ_INT(replicas, hsdp);
    CHECK_NEAR(factor, 1.0 / (hsdp ? 2 * W : W), 0);
    CHECK_EQ_INT(sim_close(&r.s), 0);
}
/* PyTorch: test_fully_shard_comm.py test_fully_shard_force_sum_reduce_scatter,
   test_fully_shard_force_sum_both_reductions. Differs: there is no setter: reductions are always
   sums. One unit (PyTorch: a transformer). */
TEST(fully_shard_comm, force_sum_reduce_scatter) { test_force_sum(0, 1), test_force_sum(0, 0); }
TEST(fully_shard_comm, force_sum_both_reductions) { test_force_sum(1, 1), test_force_sum(1, 0); }

/* ---- one rank -------------------------------------------------------------------------------- */

static int divisions_op(void *user, fsdp_model *model, fsdp_op *op) {
    int *seen = (int *)user;
    (void)model;
    seen[0] += op->kind == FSDP_OP_COPY && op->scale != 1;
    seen[1] += op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_REDUCE_SCATTER ||
               op->kind == FSDP_OP_ALL_REDUCE;
    return 0;
}

/* Factor none, 1 and 2: how many divisions, and what the gradient 3 becomes. */
/* PyTorch: test_fully_shard_comm.py test_singleton_copy_division. Done: factors none, 1 and 2. */
TEST(fully_shard_comm, singleton_copy_division) {
    static const double factors[] = {0, 1, 2};
    static const int divisions[] = {0, 0, 1};
    for (int k = 0; k < 3; k++) {
        fsdp_world_desc d = w_desc(0, 1, NULL, "one", 0);
        fsdp_param_desc p[1] = {fsdp_mat("w", 4, 8)};
        fsdp_extension watcher = FSDP_ZERO;
        watcher.op = divisions_op;
        fsdp_param_view v;
        fsdp_world *world;
        fsdp_model *model;
        fsdp_unit *unit;
        int seen[2] = {0, 0};
        CHECK_OK(fsdp_init(&d, &world));
        CALL(world, fsdp_model_create(world, NULL, &model));
        unit = lab_unit(world, model, NULL, p, 1);
        CALL(world, fsdp_set_gradient_divide_factor(model, unit, factors[k]));
        watcher.user = seen;
        CALL(world, fsdp_attach(model, &watcher));
        lab_forward(world, unit);
        CALL(world, fsdp_pre_backward(unit));
        for (int e = 0; e < 32; e++) ((float *)fsdp_grad(unit, 0))[e] += 3;
        CALL(world, fsdp_post_backward(unit));
        CALL(world, fsdp_finalize_backward(model));
        CHECK_EQ_INT(seen[0], divisions[k]);
        CHECK_EQ_INT(seen[1], 0);
        CALL(world, fsdp_param_view_get(unit, 0, &v));
        for (int e = 0; e < 32; e++)
            CHECK_NEAR(((float *)v.shard_grad)[e], 3 / (factors[k] > 0 ? factors[k] : 1), 0);
        CHECK_OK(fsdp_shutdown(world));
    }
}

/* Groups of one rank: a world of one, and two replicas of one shard, where only sums over the
   replicas are left. */
static int sums_op(void *user, fsdp_model *model, fsdp_op *op) {
    int *replicas = (int *)user;
    (void)model;
    if (op->kind == FSDP_OP_ALL_REDUCE && op->label != FSDP_LABEL_WORLD) {
        CHECK_EQ_INT(op->redop, FSDP_SUM);
        (*replicas)++;
    }
    CHECK(op->kind != FSDP_OP_REDUCE_SCATTER && op->kind != FSDP_OP_ALL_GATHER);
    return 0;
}
static void one_shard(fsdp_world *world, const void *arg) {
    (void)arg;
    int size = fsdp_world_size(world), replicas = 0;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_extension watcher = FSDP_ZERO;
    watcher.op = sums_op;
    net n;
    md.mesh = size > 1 ? lab_hsdp(world, size, 1) : NULL;
    net_build(&n, world, &md);
    watcher.user = &replicas;
    CALL(world, fsdp_attach(n.m.model, &watcher));
    for (int step = 0; step < 3; step++) net_step(&n);
    CHECK_EQ_INT(replicas, size > 1 ? 3 * NET_UNITS : 0);
    CALL(world, fsdp_detach(n.m.model, &watcher));
}
/* PyTorch: test_fully_shard_comm.py test_size1_reduceop. Done: one rank reduces nothing (PyTorch:
   asserts that the op would be a sum). Two replicas of one shard only sum. */
TEST(fully_shard_comm, size1_reduceop) {
    on_ranks(1, one_shard, NULL);
    on_ranks(2, one_shard, NULL);
}

/* ---- gathers by the caller ------------------------------------------------------------------- */

/* Every layer names a wrong unit: nothing hangs, nothing is corrupted. Of the two gathers ahead one
   is in vain, for the last layer has been through its backward, and the root is still whole; what it
   brought is gone in the end. */
static void misprefetch(fsdp_world *world, const void *arg) {
    (void)arg;
    net n;
    net_build(&n, world, NULL);
    CALL(world, fsdp_set_modules_to_backward_prefetch(n.m.unit[1], &n.m.unit[2], 1));
    CALL(world, fsdp_set_modules_to_backward_prefetch(n.m.unit[2], &n.m.unit[0], 1));
    for (int step = 0; step < 3; step++) {
        net_step(&n);
        CHECK_EQ_INT(net_gathers(&n), (step + 1) * (2 * NET_UNITS - 1 + 1));
        for (int u = 0; u < NET_UNITS; u++)
            CHECK_EQ_INT(fsdp_unit_storage(n.m.unit[u]), FSDP_STORAGE_SHARDED);
    }
    net_end(&n);
}
/* PyTorch: test_fully_shard_comm.py test_backward_misprefetch. Done: one gather of a step is
   unused; parameters and gradients are exact (PyTorch compares losses). */
TEST(fully_shard_comm, backward_misprefetch) {
    for (int lanes = 0; lanes < 3; lanes++) on_lanes(2, lanes, NULL, misprefetch, NULL);
}

/* The gathers of all units, each after an all-reduce of the caller's own: forward finds them, and
   gathers nothing again. Layers are resharded after it, or never, as upstream's. */
static void async_unshard(fsdp_world *world, const void *arg) {
    const int each = arg ? NET_UNITS : 2 * NET_UNITS - 1;
    fsdp_model_desc md = FSDP_ZERO;
    net n;
    md.reshard_after_forward = arg ? NEVER : ALWAYS;
    net_build(&n, world, &md);
    for (int step = 0; step < 10; step++) {
        for (int u = 0; u < NET_UNITS; u++) {
            float mine = (float)(fsdp_rank(world) + step + u);
            CALL(world, fsdp_all_reduce(world, NULL, &mine, 1, FSDP_F32, FSDP_SUM));
            CALL(world, fsdp_unshard(n.m.unit[u]));
            CHECK_NEAR(mine, 4 * (step + u) + 6, 0);
            CHECK_EQ_INT(fsdp_unit_storage(n.m.unit[u]), FSDP_STORAGE_IN_FLIGHT);
        }
        CHECK_EQ_INT(net_gathers(&n), step * each + NET_UNITS);
        net_step(&n);
        CHECK_EQ_INT(net_gathers(&n), (step + 1) * each);
    }
    net_end(&n);
}
/* PyTorch: test_fully_shard_comm.py test_unshard_async. Done: the all-reduce before each gather
   blocks (PyTorch: asynchronous). Parameters and gradients are exact (PyTorch compares losses). */
TEST(fully_shard_comm, unshard_async) {
    for (int lanes = 0; lanes < 3; lanes++) {
        on_lanes(4, lanes, NULL, async_unshard, NULL);
        on_lanes(4, lanes, NULL, async_unshard, "never");
    }
}

static int gathers_op(void *user, fsdp_model *model, fsdp_op *op) {
    (void)model;
    *(int *)user += op->kind == FSDP_OP_ALL_GATHER;
    return 0;
}

/* A unit has parameters; one whose parameters are all empty gathers nothing. */
static void no_group(fsdp_world *world, const void *arg) {
    (void)arg;
    fsdp_param_desc p[1] = {fsdp_mat("none", 0, 5)};
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_extension watcher = FSDP_ZERO;
    watcher.op = gathers_op;
    fsdp_model *model;
    fsdp_unit *unit;
    int gathers = 0;
    CALL(world, fsdp_model_create(world, NULL, &model));
    CHECK(fsdp_fully_shard(model, &ud, &unit) == FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(world), "num_params"));
    unit = lab_unit(world, model, &ud, p, 1);
    watcher.user = &gathers;
    CALL(world, fsdp_attach(model, &watcher));
    CALL(world, fsdp_unshard(unit));
    CALL(world, fsdp_wait(unit));
    CHECK(fsdp_data(unit, 0)); /* valid, and nothing there */
    CALL(world, fsdp_reshard(unit));
    CHECK_EQ_INT(gathers, 0);
}
/* PyTorch: test_fully_shard_comm.py test_unshard_no_param_group. Differs: a unit without parameters
   is refused. One whose parameters have no elements gathers nothing. */
TEST(fully_shard_comm, unshard_no_param_group) { on_ranks(2, no_group, NULL); }

/* The call that lays the model out gathers zeros; after a fill and before any hook, what was filled. */
static void at_once(fsdp_world *world, const void *arg) {
    (void)arg;
    fsdp_param_desc p[1] = {fsdp_mat("w", 12, 5)};
    fsdp_model *model = lab_model(world, NULL);
    fsdp_unit *unit = lab_unit(world, model, NULL, p, 1);
    net n;
    CALL(world, fsdp_unshard(unit));
    CALL(world, fsdp_wait(unit));
    for (int e = 0; e < NET_NUMEL; e++) CHECK_NEAR(((const float *)fsdp_data(unit, 0))[e], 0, 0);
    CALL(world, fsdp_reshard(unit));
    net_build(&n, world, NULL);
    for (int u = 0; u < NET_UNITS; u++) CALL(world, fsdp_unshard(n.m.unit[u]));
    for (int u = 0; u < NET_UNITS; u++) {
        CALL(world, fsdp_wait(n.m.unit[u]));
        net_use(&n, u, 0);
        CALL(world, fsdp_reshard(n.m.unit[u]));
    }
    net_step(&n);
}
/* PyTorch: test_fully_shard_comm.py test_unshard_without_lazy_init. Done: if fsdp_unshard is the
   first call, it computes the layout, and gathers zeros. */
TEST(fully_shard_comm, unshard_without_lazy_init) { on_ranks(2, at_once, NULL); }

/* ---- where buffers come from, and comms of the user ------------------------------------------ */

/* A backend that knows its memory: every address of a collective lies in it, at the same place on
   every rank. Ranks are threads that run collectives themselves, so each has a list of its own. */
enum { MAX_BLOCKS = 64 };
static __thread struct {
    const char *at[MAX_BLOCKS];
    size_t size[MAX_BLOCKS];
    int count, inside, outside;
    int64_t places; /* of all addresses, as a hash */
} memory;

static fsdp_status memory_alloc(fsdp_comm *world, size_t size, void **ptr) {
    fsdp_status status = fsdp_shm_comm_ops()->alloc(world, size, ptr);
    CHECK(memory.count < MAX_BLOCKS);
    memory.at[memory.count] = (const char *)*ptr;
    memory.size[memory.count++] = size;
    return status;
}
static void memory_free(fsdp_comm *world, void *ptr, size_t size) {
    for (int i = 0; i < memory.count; i++)
        if (memory.at[i] == (const char *)ptr) memory.at[i] = NULL;
    fsdp_shm_comm_ops()->free(world, ptr, size);
}
static void memory_look(const void *ptr) {
    for (int i = 0; i < memory.count; i++) {
        const char *at = memory.at[i];
        if (!at || (const char *)ptr < at || (const char *)ptr >= at + memory.size[i]) continue;
        memory.inside++;
        memory.places = memory.places * 31 % 1000003 + i * 4096 + (int64_t)((const char *)ptr - at);
        return;
    }
    memory.outside++;
}
static fsdp_status memory_run(fsdp_comm *comm, const fsdp_coll *c) {
    if (c->kind == FSDP_OP_ALL_GATHER || c->kind == FSDP_OP_REDUCE_SCATTER) {
        if (!c->in_place) memory_look(c->src);
        memory_look(c->dst);
    }
    return fsdp_shm_comm_ops()->run(comm, c);
}

static void buffers_from_backend(fsdp_world *world, const void *arg) {
    fsdp_model_desc md = FSDP_ZERO;
    net n;
    memset(&memory, 0, sizeof memory);
    md.param_dtype = arg ? FSDP_BF16 : FSDP_DTYPE_KEEP;
    md.reduce_dtype = arg ? FSDP_F32 : FSDP_DTYPE_KEEP;
    net_build(&n, world, &md);
    for (int step = 0; step < 3; step++) net_step(&n);
    CHECK(memory.inside >= 3 * 3 * NET_UNITS);
    CHECK_EQ_INT(memory.outside, 0);
    int64_t low = memory.places, high = memory.places;
    CALL(world, fsdp_all_reduce(world, NULL, &low, 1, FSDP_I64, FSDP_MIN));
    CALL(world, fsdp_all_reduce(world, NULL, &high, 1, FSDP_I64, FSDP_MAX));
    CHECK_EQ_INT(low, high);
    fsdp_model_destroy(n.m.model);
}
static void test_memory(const char *mixed) {
    fsdp_comm_ops ops = *fsdp_shm_comm_ops();
    ops.alloc = memory_alloc;
    ops.free = memory_free;
    ops.run = memory_run;
    on_lanes(4, 0, &ops, buffers_from_backend, mixed);
}
/* PyTorch: test_fully_shard_comm.py test_fully_shard_alloc_from_pg. Differs: there is no setter:
   every buffer of a gather or a reduce-scatter comes from the backend. NCCL registers buffers only
   with FSDP_NCCL_REGISTER. */
TEST(fully_shard_comm, alloc_from_pg) { test_memory(NULL); }
/* PyTorch: test_fully_shard_comm.py test_fully_shard_symm_mem. Differs: there is no setter. Where
   ranks made the same allocations, each buffer lies at the same place on every rank. NCCL has
   symmetric windows only with FSDP_NCCL_REGISTER=2. */
TEST(fully_shard_comm, symm_mem) { test_memory("mixed"); } /* symmetric: the same places */

/* Comm functions of the user's own, one unit's, for one step; order and memory do not matter. */
static fsdp_status own_comm(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                            const fsdp_coll *coll) {
    const int is_reduction = coll->kind == FSDP_OP_REDUCE_SCATTER;
    CHECK_EQ_INT(coll->label, is_reduction ? FSDP_LABEL_REDUCE : FSDP_LABEL_GATHER);
    (*(int *)user)++;
    return ops->run(comm, coll);
}
static void own_comms(fsdp_world *world, const void *arg) {
    int first = arg == NULL, calls[2] = {0, 0};
    net n;
    net_build(&n, world, NULL);
    for (int k = 0; k < 2; k++)
        if (first == (k == 0))
            CALL(world, fsdp_set_custom_all_gather(n.m.unit[1], own_comm, &calls[0]));
        else CALL(world, fsdp_set_custom_reduce_scatter(n.m.unit[1], own_comm, &calls[1]));
    net_step(&n);
    CHECK_EQ_INT(calls[0], 2);
    CHECK_EQ_INT(calls[1], 1);
    CALL(world, fsdp_set_custom_all_gather(n.m.unit[1], NULL, NULL));
    CALL(world, fsdp_set_custom_reduce_scatter(n.m.unit[1], NULL, NULL));
    net_step(&n);
    CHECK_EQ_INT(calls[0] + calls[1], 3);
}
/* PyTorch: test_fully_shard_comm.py test_exception_when_used_together_with_comm_hooks. Differs: you
   may set the comm functions in any order. PyTorch refuses memory of the process group after them;
   here there is no such setter. */
TEST(fully_shard_comm, exception_with_comm_hooks) {
    on_ranks(2, own_comms, NULL);
    on_ranks(2, own_comms, "the other order");
}
