/* test_features.c - freezing between steps, extensions, hooks, custom collectives, prefetch budgets, reports
   Threads train a small net, also over Gloo and NCCL. Parameters are compared bit by bit with lab_net.h, ops
   with what an observer sees. Gradients are small integers, so that their sum is exact in any order. A step is
   g = sum/N, p -= lr*g in f32, and the model gets the library's bits in one loop.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | NCCL | AT_NIGHT(TSAN)
#include "harness.h"
#include <math.h> /* fabs, pow */
#include "lab_net.h"

enum { UNITS = 3, PARAMS = 4, ALL = UNITS * PARAMS, MOST = LAB_NUMEL, RANKS = 4 };

/* Uneven, empty on some ranks, without elements, sharded by columns, more than one block. */
static const lab_param net_rows[ALL] = {
    {0, "p0", FSDP_F32, 0, 0, 2, 0, {7, 5}},    {0, "p1", FSDP_F32, 0, 0, 1, 0, {3}},
    {0, "p2", FSDP_F32, 0, 0, 2, 1, {6, 4}},    {0, "p3", FSDP_F32, 0, 0, 1, 0, {0}},
    {1, "p0", FSDP_F32, 0, 0, 2, 0, {40, 16}},  {1, "p1", FSDP_F32, 0, 0, 1, 0, {1}},
    {1, "p2", FSDP_F32, 0, 0, 1, 0, {17}},      {1, "p3", FSDP_F32, 0, 0, 1, 0, {8}},
    {2, "p0", FSDP_F32, 0, 0, 3, 0, {9, 2, 3}}, {2, "p1", FSDP_F32, 0, 0, 1, 0, {5}},
    {2, "p2", FSDP_F32, 0, 0, 2, 1, {2, 9}},    {2, "p3", FSDP_F32, 0, 0, 1, 0, {64}}};
static const lab_net net = {net_rows, ALL, UNITS};
static const char *const unit_names[UNITS] = {"first", "middle", "last"};

/* ---- one rank's test ------------------------------------------------------------------------- */

typedef struct job job;
enum { MESH_1D, MESH_HSDP };

typedef struct config { /* of a run; the same on all ranks */
    int world, lanes, mesh, variant;
    int reduce_unused; /* fsdp_set_reduce_scatter_unused_params */
    fsdp_model_desc md;
    int reshard[UNITS];
    fsdp_gather_extension *extension; /* of params with (u + i) even */
    const fsdp_comm_ops *comm_ops;
    void (*body)(job *j);
} config;

struct job {
    int rank, n;
    config *c;
    w_heap *heap;
    fsdp_world *w;
    const fsdp_mesh *mesh;
    lab_built m;
    lab_truth t;
    int step, born_frozen[ALL];
    int no_data; /* fsdp_data is not looked at */
    /* Seen. */
    lab_log log;
};

/* Ops with this kind and label (negative: any) of a unit (NULL: any), from number `from` on. */
static int count_ops(const job *j, int from, int kind, int label, const fsdp_unit *unit) {
    return lab_count_ops(&j->log, from, kind, label, unit);
}
static int next_op(const job *j, int from, int kind, int label, const fsdp_unit *unit) {
    return lab_next_op(&j->log, from, kind, label, unit);
}
static int gathers(const job *j, int from, const fsdp_unit *unit) {
    return count_ops(j, from, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, unit);
}

/* ---- the net --------------------------------------------------------------------------------- */

static float initial(int p, int64_t k) { return (float)((p * 31 + k * 7) % 63 - 31) / 16; }

/* What a rank uses: with reduce_unused others than other ranks; without all ranks use the same. */
static int used(const job *j, int p, int rank, int step) {
    if (p == 2 * PARAMS + 1) return step % 2; /* by nobody in every other step */
    return (p + (j->c->reduce_unused ? rank : 0) + step) % 4 != 0 || rank < 0;
}
/* Has it a gradient after a backward? With reduce_unused zeros, where nobody used it. */
static int anybody(const job *j, int p) {
    int any = j->c->reduce_unused;
    for (int r = 0; r < j->n; r++) any |= used(j, p, r, j->step);
    return any;
}
static float gradient(int p, int64_t k, int rank, int step) {
    return (float)((p * 5 + k * 3 + rank * 11 + step * 17) % 31 - 15);
}

static void fill_rows(void *user, const fsdp_param_view *block) {
    (void)user;
    int p = lab_row_of(&net, block);
    for (int64_t k = 0; k < block->numel; k++)
        lab_put(block->data, block->dtype, k, (double)initial(p, fsdp_view_index(block, k)));
}

static fsdp_unit *add_unit(job *j, int u, fsdp_unit_desc *ud) {
    fsdp_param_desc d[LAB_PARAMS];
    const int count = lab_descs(&j->m, u, d);
    for (int i = 0; i < count && j->c->extension; i++)
        if ((u + i) % 2 == 0) d[i].extension = j->c->extension;
    ud->name = unit_names[u];
    ud->reshard_after_forward = j->c->reshard[u];
    fsdp_unit *unit = lab_unit(j->w, j->m.model, ud, d, count);
    CALL(j->w, fsdp_set_reduce_scatter_unused_params(j->m.model, unit, j->c->reduce_unused));
    return unit;
}

static void make_reference(job *j) {
    memcpy(j->m.frozen, j->born_frozen, sizeof j->born_frozen);
    for (int p = 0; p < ALL; p++)
        for (int64_t k = 0; k < lab_numel_of(&net, p); k++) j->t.weight[p][k] = initial(p, k);
}

static void make_empty_model(job *j) {
    fsdp_model_desc md = j->c->md;
    if (j->c->mesh == MESH_HSDP && !j->mesh) j->mesh = lab_hsdp(j->w, 2, j->n / 2);
    md.mesh = j->mesh;
    lab_begin(&j->m, &net, j->w);
    j->m.model = lab_model(j->w, &md);
    lab_watch(&j->log, j->w, j->m.model);
    make_reference(j);
}

static void make_model(job *j) {
    make_empty_model(j);
    for (int u = 0; u < UNITS; u++) {
        fsdp_unit_desc ud = FSDP_ZERO;
        j->m.unit[u] = add_unit(j, u, &ud);
    }
    CALL(j->w, fsdp_init_params(j->m.model, fill_rows, NULL));
}

static void check_data(job *j, int u) {
    const fsdp_dtype dtype = j->c->md.param_dtype ? j->c->md.param_dtype : FSDP_F32;
    if (!j->no_data) lab_check_data(&j->m, &j->t, u, dtype);
}

static void forward_unit(job *j, int u) {
    CALL(j->w, fsdp_pre_forward(j->m.unit[u]));
    check_data(j, u);
    CALL(j->w, fsdp_post_forward(j->m.unit[u]));
}
static void forward(job *j) {
    for (int u = 0; u < UNITS; u++) forward_unit(j, u);
}

/* My gradients; the model adds up those of all ranks. */
static void write_grads(job *j, int u) {
    fsdp_dtype dtype = j->c->md.param_dtype ? j->c->md.param_dtype : FSDP_F32;
    for (int i = 0; i < PARAMS; i++) {
        int p = u * PARAMS + i;
        if (j->m.frozen[p]) {
            CHECK(fsdp_grad(j->m.unit[u], i) == NULL);
            continue;
        }
        for (int r = 0; r < j->n; r++)
            for (int64_t k = 0; k < lab_numel_of(&net, u * PARAMS + i) && used(j, p, r, j->step);
                 k++)
                j->t.kept[p][k] += (double)gradient(p, k, r, j->step);
        if (anybody(j, p)) j->t.has_kept[p] = 1;
        if (!used(j, p, j->rank, j->step)) continue;
        void *g = fsdp_grad(j->m.unit[u], i);
        CHECK(g != NULL);
        for (int64_t k = 0; k < lab_numel_of(&net, u * PARAMS + i); k++)
            lab_put(g, dtype, k, lab_get(g, dtype, k) + (double)gradient(p, k, j->rank, j->step));
    }
}

/* The model's reduction of a unit. */
static void reduced(job *j, int u) {
    for (int p = u * PARAMS; p < (u + 1) * PARAMS; p++)
        if (!j->m.frozen[p] && j->t.has_kept[p]) lab_reduce(&j->t, &net, p, j->n, 0);
}

static void backward_unit(job *j, int u) {
    CALL(j->w, fsdp_pre_backward(j->m.unit[u]));
    check_data(j, u);
    write_grads(j, u);
    CALL(j->w, fsdp_post_backward(j->m.unit[u]));
    reduced(j, u);
}
static void backward(job *j) {
    for (int u = UNITS - 1; u >= 0; u--) backward_unit(j, u);
    CALL(j->w, fsdp_finalize_backward(j->m.model));
}

/* One whose gradients are not reduced, or not over all ranks: the model goes on adding. */
static void backward_kept(job *j) {
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(j->w, fsdp_pre_backward(j->m.unit[u]));
        write_grads(j, u);
        CALL(j->w, fsdp_post_backward(j->m.unit[u]));
    }
    CALL(j->w, fsdp_finalize_backward(j->m.model));
}

static const fsdp_sgd_hyper sgd = {0.0625, 0, 0, 0, 0, 0, 1};

static void check_grads(const job *j) { lab_check_grads(&j->m, &j->t); }
static void check_params(const job *j) { lab_check_params(&j->m, &j->t); }
static void update_reference(job *j) {
    lab_descend_truth(&j->m, &j->t, (float)sgd.lr);
    j->step++;
}
static void update(job *j) {
    check_grads(j);
    lab_update(&j->m, &j->t, (float)sgd.lr);
    j->step++;
    check_params(j);
}
static void train_step(job *j) {
    forward(j);
    backward(j);
    update(j);
}

/* ---- starting ranks -------------------------------------------------------------------------- */

static void on_rank(lab_rank *r) {
    config *c = (config *)r->arg;
    job *j = (job *)lab_zeros(1, sizeof *j);
    snprintf(w_case, sizeof w_case, "rank %d of %d, lanes %d, mesh %d, direct_min %lld, variant %d",
             r->rank, r->size, c->lanes, c->mesh, (long long)c->md.direct_min, c->variant);
    j->c = c, j->rank = r->rank, j->n = r->size, j->heap = r->heap, j->w = r->w;
    c->body(j);
    lab_end(r);
    free(j->log.ops);
    free(j);
}

static void launch(config *c) {
    lab_how how = FSDP_ZERO;
    how.job = "features", how.lanes = c->lanes;
    how.comm_ops = c->comm_ops;
    lab_run(c->world, &how, on_rank, c);
}

/* The usual settings: worlds of 1 to 4 with both layouts, HSDP, and lanes. */
typedef struct setting {
    int world, lanes, mesh;
    int64_t direct_min;
} setting;
static const setting settings[] = {{1, 0, MESH_1D, 0},
                                   {1, 1, MESH_1D, 1},
                                   {2, 0, MESH_1D, 0},
                                   {2, 1, MESH_1D, 1},
                                   {3, 0, MESH_1D, 1},
                                   {3, 2, MESH_1D, 0},
                                   {4, 0, MESH_1D, FSDP_DIRECT_NEVER},
                                   {4, 2, MESH_1D, 1},
                                   {2, 0, MESH_HSDP, 1},
                                   {4, 0, MESH_HSDP, 0},
                                   {4, 2, MESH_HSDP, 1}};
enum { SETTINGS = sizeof settings / sizeof *settings };

static config *setup(int s, void (*body)(job *j)) {
    config *c = (config *)lab_shared(sizeof *c);
    c->world = settings[s].world, c->lanes = settings[s].lanes, c->mesh = settings[s].mesh;
    c->md.direct_min = settings[s].direct_min;
    c->reduce_unused = s % 3 != 1;
    c->md.debug = 1;
    c->body = body;
    return c;
}
static void launch_at(int s, void (*body)(job *j)) {
    config *c = setup(s, body);
    launch(c);
    munmap(c, sizeof *c);
}
static void everywhere(void (*body)(job *j), int variants) {
    for (int s = 0; s < SETTINGS; s++)
        for (int v = 0; v < variants; v++) {
            config *c = setup(s, body);
            c->variant = v;
            launch(c);
            munmap(c, sizeof *c);
        }
}

/* ---- freeze and thaw ------------------------------------------------------------------------- */

static void set_frozen(job *j, int p, int frozen) { lab_freeze(&j->m, p, frozen); }

static void check_same_memory(job *j, const fsdp_memory *a, const fsdp_memory *b) {
    for (int pool = 0; pool < FSDP_POOL_COUNT; pool++)
        W_CHECK(a->pool_bytes[pool] == b->pool_bytes[pool] &&
                    a->pool_slots[pool] == b->pool_slots[pool],
                "%s: %lld bytes in %d slots, and %lld in %d", fsdp_pool_name(pool),
                (long long)a->pool_bytes[pool], a->pool_slots[pool], (long long)b->pool_bytes[pool],
                b->pool_slots[pool]);
    (void)j;
}

/* Every few steps others are frozen. Views move and are right; gradients that were not zeroed go
   along; nothing is allocated from the third step of a layout on. */
static void freeze_between(job *j) {
    uint64_t rng = h_seed() * 7 + (uint64_t)j->c->variant;
    make_model(j);
    for (int round = 0; round < 8; round++) {
        fsdp_flat flat;
        int64_t trainable = 0;
        if (round % 2 == 0) train_step(j);
        else {
            forward(j); /* a gradient is left that the next step adds to */
            backward(j);
            check_grads(j);
        }
        for (int n = 0; n < 3; n++) {
            int p = (int)(h_rand64(&rng) % ALL);
            set_frozen(j, p, !j->m.frozen[p]); /* also twice: then nothing has happened */
        }
        for (int p = 0; p < ALL; p++)
            if (j->m.frozen[p]) j->t.has[p] = 0;
        check_params(j);
        check_grads(j);
        for (int step = 0; step < 4; step++) {
            int64_t before = w_allocations(j->heap);
            train_step(j);
            int64_t more = w_allocations(j->heap) - before;
            W_CHECK(step < 2 || more == 0, "%lld allocations in step %d of a layout",
                    (long long)more, step);
        }
        CALL(j->w, fsdp_model_flat(j->m.model, FSDP_F32, &flat));
        for (int p = 0; p < ALL; p++) {
            fsdp_param_view v;
            CALL(j->w, fsdp_param_at(j->m.model, p, &v));
            if (v.requires_grad) trainable += v.numel;
            int inside = (float *)v.shard >= (float *)flat.shards &&
                         (float *)v.shard < (float *)flat.shards + flat.numel;
            W_CHECK(!v.numel || inside == v.requires_grad, "parameter %d", p);
        }
        W_CHECK(flat.numel >= trainable, "%lld of %lld", (long long)flat.numel,
                (long long)trainable);
    }
}
TEST(freeze, between_steps, NO(NCCL) | SLOW | AT_NIGHT(ASAN | GLOO)) {
    everywhere(freeze_between, 1 + !W_SLOW);
}

/* Who is frozen loses the gradient: after the thaw there is none, and the next one adds to nothing. */
static void freeze_loses(job *j) {
    make_model(j);
    for (int p = 0; p < ALL; p++) {
        forward(j);
        backward(j);
        check_grads(j);
        set_frozen(j, p, 1);
        CALL(j->w, fsdp_model_commit(j->m.model));
        set_frozen(j, p, 0);
        j->t.has[p] = 0;
        check_grads(j);
        forward(j);
        backward(j);
        check_grads(j);
    }
}
TEST(freeze, loses_the_gradient) { everywhere(freeze_loses, 1); }

/* ---- all-gather extensions ------------------------------------------------------------------- */

/* 8-bit: values scaled to -127..127, and the scale, of each rank's rows. */
typedef struct quantiser {
    int ranks[RANKS]; /* of the shard group, of each rank that asks */
    int pre[RANKS], post[RANKS], sized[RANKS];
    int fail; /* this call fails, counted from 1 */
    int wide; /* how many strings it has */
} quantiser;
static __thread int my_rank; /* of the caller's thread; a lane's thread has one as well */
static quantiser quant;

static int quant_sizes(void *user, int64_t shard_numel, int64_t nbytes[FSDP_GATHER_TENSORS]) {
    const quantiser *q = (const quantiser *)user;
    nbytes[0] = shard_numel;
    nbytes[1] = (int64_t)sizeof(float);
    for (int i = 2; i < q->wide && i < FSDP_GATHER_TENSORS; i++) nbytes[i] = 0;
    return q->wide;
}

/* Not inlined, so that both sides round alike whatever the flags. */
__attribute__((noinline)) static float quant_part(float most) { return most / 127; }
static float quant_scale(const float *x, int64_t numel) {
    float most = 0;
    for (int64_t k = 0; k < numel; k++) {
        float a = x[k] < 0 ? -x[k] : x[k];
        if (a > most) most = a;
    }
    return quant_part(most);
}
__attribute__((noinline)) static int8_t quant_value(float x, float scale) {
    float q = scale > 0 ? x / scale : 0;
    return (int8_t)(q < 0 ? q - 0.5f : q + 0.5f);
}

/* The stored shard is padded with zeros: its size is that of the first string. */
static fsdp_status quant_pre(void *user, const fsdp_param_view *v, void *const *strings,
                             void *stream) {
    lib_wait(stream);
    quantiser *q = (quantiser *)user;
    const float *x = (const float *)v->shard;
    int8_t *to = (int8_t *)strings[0];
    float scale = quant_scale(x, v->numel);
    (void)stream;
    int calls = __atomic_add_fetch(&q->pre[0], 1, __ATOMIC_SEQ_CST);
    if (q->fail && calls == q->fail) return FSDP_ERR_BACKEND;
    for (int64_t k = 0; k < v->numel; k++) to[k] = quant_value(x[k], scale);
    memcpy(strings[1], &scale, sizeof scale);
    return FSDP_OK;
}

/* Rows (or columns) of each rank back to where they were. */
static fsdp_status quant_post(void *user, const fsdp_param_view *v, const void *const *gathered,
                              void *full, fsdp_dtype dtype, void *stream) {
    lib_wait(stream);
    quantiser *q = (quantiser *)user;
    int world = q->ranks[0];
    const int64_t rows = v->shape[v->shard_dim], outer = lab_numel(v->shard_dim, v->shape);
    const int64_t inner = lab_numel(v->ndim - v->shard_dim - 1, v->shape + v->shard_dim + 1);
    int64_t chunk = rows ? (rows + world - 1) / world : 0;
    (void)stream;
    __atomic_add_fetch(&q->post[0], 1, __ATOMIC_SEQ_CST);
    for (int r = 0; r < world; r++) {
        const int8_t *from = (const int8_t *)gathered[0] + (int64_t)r * chunk * outer * inner;
        float scale;
        int64_t start = r * chunk < rows ? r * chunk : rows;
        int64_t mine = rows - start < chunk ? rows - start : chunk;
        memcpy(&scale, (const char *)gathered[1] + (size_t)r * sizeof scale, sizeof scale);
        for (int64_t o = 0; o < outer; o++)
            for (int64_t k = 0; k < mine * inner; k++)
                lab_put(full, dtype, (o * rows + start) * inner + k,
                        (double)((float)from[o * mine * inner + k] * scale));
    }
    return FSDP_OK;
}
static fsdp_gather_extension quantised = {quant_sizes, quant_pre, quant_post, &quant};

/* What a quantised parameter looks like after a gather over `world` shards. */
static void expect_quantised(const job *j, int p, int world, float *out) {
    const lab_param *s = &net.rows[p];
    const int64_t rows = s->shape[s->shard_dim], outer = lab_numel(s->shard_dim, s->shape);
    const int64_t inner = lab_numel(s->ndim - s->shard_dim - 1, s->shape + s->shard_dim + 1);
    for (int r = 0; r < world; r++) {
        fsdp_range range;
        float most = 0;
        CHECK_OK(fsdp_shard_range(rows, world, r, &range));
        for (int pass = 0; pass < 2; pass++)
            for (int64_t o = 0; o < outer; o++)
                for (int64_t k = 0; k < range.count * inner; k++) {
                    int64_t at = (o * rows + range.start) * inner + k;
                    float x = j->t.weight[p][at], scale = quant_part(most);
                    if (pass) out[at] = (float)quant_value(x, scale) * scale;
                    else if ((x < 0 ? -x : x) > most) most = x < 0 ? -x : x;
                }
    }
}

static int shards_of(const job *j) { return j->c->mesh == MESH_HSDP ? j->n / 2 : j->n; }

static void check_extended(job *j, int u) {
    fsdp_dtype dtype = j->c->md.param_dtype ? j->c->md.param_dtype : FSDP_F32;
    for (int i = 0; i < PARAMS; i++) {
        float want[MOST];
        const void *data = fsdp_data(j->m.unit[u], i);
        int p = u * PARAMS + i;
        CHECK(data != NULL);
        if ((u + i) % 2 == 0) expect_quantised(j, p, shards_of(j), want);
        else memcpy(want, j->t.weight[p], sizeof want);
        for (int64_t k = 0; k < lab_numel_of(&net, u * PARAMS + i); k++) {
            char rounded[8];
            lab_put(rounded, dtype, 0, (double)want[k]);
            W_CHECK(!memcmp(rounded, (const char *)data + (size_t)k * fsdp_dtype_size(dtype),
                            fsdp_dtype_size(dtype)),
                    "step %d, parameter %d at %lld: %g, expected %g (%g)", j->step, p, (long long)k,
                    lab_get(data, dtype, k), lab_get(rounded, dtype, 0), (double)j->t.weight[p][k]);
        }
    }
}

static void extended_step(job *j) {
    int first = j->log.num, extended = 0, expected = 0;
    for (int u = 0; u < UNITS; u++) {
        CALL(j->w, fsdp_pre_forward(j->m.unit[u]));
        check_extended(j, u);
        CALL(j->w, fsdp_post_forward(j->m.unit[u]));
    }
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(j->w, fsdp_pre_backward(j->m.unit[u]));
        check_extended(j, u);
        write_grads(j, u);
        CALL(j->w, fsdp_post_backward(j->m.unit[u]));
        reduced(j, u);
    }
    CALL(j->w, fsdp_finalize_backward(j->m.model));
    for (int u = 0; u < UNITS; u++) { /* before and after each gather of all shards, once */
        int pre = count_ops(j, first, FSDP_OP_CALL, FSDP_LABEL_PRE_GATHER, j->m.unit[u]);
        int post = count_ops(j, first, FSDP_OP_CALL, FSDP_LABEL_POST_GATHER, j->m.unit[u]);
        int members = 0;
        for (int i = 0; i < PARAMS; i++) members += (u + i) % 2 == 0;
        extended += members;
        CHECK_EQ_INT(pre, post);
        int mode = j->c->reshard[u], again = !mode || mode == 1 || mode == shards_of(j);
        expected = (1 + again) * members;
        W_CHECK(pre == expected, "unit %d: %d calls, expected %d", u, pre, expected);
        for (int n = first; n < j->log.num; n++)
            if (j->log.ops[n].unit == j->m.unit[u] && j->log.ops[n].kind == FSDP_OP_ALL_GATHER) {
                W_CHECK(j->log.ops[n].dtype == FSDP_U8 || j->log.ops[n].group_size == 2,
                        "not bytes");
            }
    }
    CHECK_EQ_INT(extended, ALL / 2);
    update(j);
}

static void extension_body(job *j) {
    my_rank = j->rank;
    make_model(j);
    for (int n = 0; n < 3; n++) extended_step(j);
    for (int p = 0; p < ALL; p++) { /* the whole parameter, as it is stored */
        float full[MOST];
        CALL(j->w, fsdp_param_full(j->m.unit[p / PARAMS], p % PARAMS, full));
        CHECK_EQ_MEM(full, j->t.weight[p], (size_t)lab_numel_of(&net, p) * sizeof(float));
    }
    CALL(j->w, fsdp_barrier(j->w));
    W_CHECK(quant.pre[0] > 0 && quant.post[0] > 0, "nobody called");
}

/* Two strings for each parameter; also with a cast, on one rank, and with slices kept. */
TEST(extension, quantised) {
    static const fsdp_dtype dtypes[] = {FSDP_DTYPE_KEEP, FSDP_BF16, FSDP_F16};
    int runs = 0;
    for (int s = 0; s < SETTINGS; s++)
        for (int v = 0; v < 5; v++) {
            config *c = setup(s, extension_body);
            int shards = c->mesh == MESH_HSDP ? c->world / 2 : c->world;
            memset(&quant, 0, sizeof quant);
            quant.ranks[0] = shards, quant.wide = 2;
            c->variant = v;
            c->extension = &quantised;
            /* Gradients in 16 bits: small integers are exact, and reduced in f32. */
            c->md.param_dtype = dtypes[v % 3];
            c->md.reduce_dtype = FSDP_F32;
            if (v == 3) c->reshard[0] = c->reshard[1] = FSDP_RESHARD_NEVER;
            if (v == 4) c->reshard[1] = c->reshard[2] = shards % 2 ? FSDP_RESHARD_ALWAYS : 2;
            if (v < 4 || shards % 2 == 0) launch(c), runs++;
            munmap(c, sizeof *c);
        }
    h_message("%d models", runs);
}

/* A failure of the user's function ends the world on all ranks, with its status. */
static void extension_fails(job *j) {
    make_model(j);
    fsdp_status status = FSDP_OK;
    for (int n = 0; n < 3 && !status; n++) {
        for (int u = 0; u < UNITS && !status; u++) {
            status = fsdp_pre_forward(j->m.unit[u]);
            if (!status) status = fsdp_post_forward(j->m.unit[u]);
        }
        for (int u = UNITS - 1; u >= 0 && !status; u--) {
            status = fsdp_pre_backward(j->m.unit[u]);
            if (!status) status = fsdp_post_backward(j->m.unit[u]);
        }
        if (!status) status = fsdp_finalize_backward(j->m.model);
    }
    W_CHECK(status != FSDP_OK, "no failure");
    CHECK_STATUS(fsdp_barrier(j->w), status);
    if (j->n == 1) CHECK_STATUS(status, FSDP_ERR_BACKEND);
}
TEST(extension, failure) {
    for (int s = 0; s < 6; s++) {
        config *c = setup(s, extension_fails);
        memset(&quant, 0, sizeof quant);
        quant.ranks[0] = c->world, quant.wide = 2, quant.fail = 7;
        c->extension = &quantised;
        launch(c);
        munmap(c, sizeof *c);
    }
}

/* ---- hooks ----------------------------------------------------------------------------------- */

typedef struct hooked { /* of one unit of one rank */
    const job *j;
    int u, calls, fail;
    int64_t numel;
} hooked;

/* Summed, not divided yet: every element an integer. Doubles them. */
static fsdp_status double_sums(void *user, fsdp_unit *unit, void *data, int64_t numel,
                               fsdp_dtype dtype, void *stream) {
    lib_wait(stream);
    hooked *h = (hooked *)user;
    (void)stream;
    CHECK(unit == h->j->m.unit[h->u] && dtype == FSDP_F32);
    h->calls++;
    h->numel = numel;
    for (int64_t k = 0; k < numel; k++) {
        float x = ((float *)data)[k];
        W_CHECK(x == floorf(x), "%g at %lld is no sum", (double)x, (long long)k);
        ((float *)data)[k] = 2 * x;
    }
    return h->fail ? FSDP_ERR_IO : FSDP_OK;
}

static void all_reduce_hook_body(job *j) {
    hooked h[UNITS];
    make_model(j);
    memset(h, 0, sizeof h);
    for (int u = 0; u < UNITS; u++) {
        h[u].j = j, h[u].u = u;
        CALL(j->w, fsdp_set_all_reduce_hook(j->m.unit[u], double_sums, &h[u]));
    }
    for (int n = 0; n < 4; n++) {
        int first = j->log.num;
        if (n == 2) { /* a microbatch that is not reduced calls nobody */
            CALL(j->w, fsdp_set_requires_gradient_sync(j->m.model, NULL, 0));
            forward(j);
            backward_kept(j);
            for (int u = 0; u < UNITS; u++) CHECK_EQ_INT(h[u].calls, 2);
            CALL(j->w, fsdp_set_requires_gradient_sync(j->m.model, NULL, 1));
        }
        if (n == 3)
            for (int u = 0; u < UNITS; u++)
                CALL(j->w, fsdp_set_all_reduce_hook(j->m.unit[u], NULL, NULL));
        forward(j);
        backward(j);
        for (int p = 0; p < ALL && n < 3; p++)
            for (int64_t k = 0; k < MOST; k++) j->t.grad[p][k] *= 2;
        for (int u = 0; u < UNITS; u++) {
            int64_t rows = 0;
            for (int i = 0; i < PARAMS; i++) {
                fsdp_param_view v = lab_view(j->w, j->m.unit[u], i);
                rows += v.numel;
            }
            W_CHECK(h[u].numel >= rows, "%lld elements", (long long)h[u].numel);
            CHECK_EQ_INT(h[u].calls, n < 3 ? n + 1 : 3);
            int reduce = next_op(j, first, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, j->m.unit[u]);
            int sum = next_op(j, first, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, j->m.unit[u]);
            int hook = next_op(j, first, FSDP_OP_CALL, FSDP_LABEL_ALL_REDUCE_HOOK, j->m.unit[u]);
            int out = next_op(j, first, FSDP_OP_COPY, FSDP_LABEL_RED_OUT, j->m.unit[u]);
            W_CHECK(n == 3 ? hook < 0 : hook >= 0 && reduce < hook && sum < hook && hook < out,
                    "reduce %d, replicas %d, hook %d, out %d", reduce, sum, hook, out);
            CHECK((sum >= 0) == (j->c->mesh == MESH_HSDP));
        }
        update(j);
    }
}
/* In a worker thread a call that waits for the worker threads would wait for itself. */
typedef struct {
    fsdp_world *w;
    fsdp_status status;
    int calls;
} asking;
static fsdp_status ask_the_world(void *user, fsdp_unit *unit, void *data, int64_t numel,
                                 fsdp_dtype dtype, void *stream) {
    asking *a = (asking *)user;
    float x = 1;
    (void)unit, (void)data, (void)numel, (void)dtype, (void)stream;
    a->calls++;
    a->status = fsdp_all_reduce(a->w, NULL, &x, 1, FSDP_F32, FSDP_SUM);
    return a->status;
}
static void waiting_hook(lab_rank *r) {
    const int lanes = *(const int *)r->arg;
    fsdp_param_desc p = fsdp_mat("a", 8, 2);
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *u = lab_unit(r->w, m, NULL, &p, 1);
    asking a = {r->w, FSDP_OK, 0};
    CALL(r->w, fsdp_set_all_reduce_hook(u, ask_the_world, &a));
    lab_forward(r->w, u);
    CALL(r->w, fsdp_pre_backward(u));
    CHECK(fsdp_grad(u, 0) != NULL);
    fsdp_status status = fsdp_post_backward(u);
    if (!status) status = fsdp_finalize_backward(m);
    CHECK_STATUS(status, lanes ? FSDP_ERR_INVALID_STATE : FSDP_OK);
    if (lanes)
        CHECK_MSG(strstr(fsdp_last_error(r->w), "[E216] a hook that runs in a worker thread"), "%s",
                  fsdp_last_error(r->w));
    CHECK_STATUS(fsdp_shutdown(r->w), status); /* before, the hook may run, as another rank's failed */
    if (a.calls || !lanes) CHECK_STATUS(a.status, status);
    r->w = NULL;
}
TEST(hooks, that_wait_for_themselves) {
    if (!lab_divides()) SKIP("a device has streams in place of worker threads");
    for (int lanes = 0; lanes <= 2; lanes++) {
        lab_how how = FSDP_ZERO;
        how.lanes = lanes;
        lab_run(2, &how, waiting_hook, &lanes);
    }
}

TEST(hooks, all_reduce) { everywhere(all_reduce_hook_body, 1); }

static void hook_fails(job *j) {
    hooked h = {NULL, 0, 0, 1, 0};
    fsdp_status status;
    make_model(j);
    h.j = j, h.u = 1;
    CALL(j->w, fsdp_set_all_reduce_hook(j->m.unit[1], double_sums, &h));
    forward(j);
    (void)fsdp_pre_backward(j->m.unit[1]);
    (void)fsdp_grad(j->m.unit[1], 0);
    (void)fsdp_post_backward(j->m.unit[1]);
    status = fsdp_finalize_backward(j->m.model);
    CHECK(h.calls <= 1 && status != FSDP_OK); /* another rank's may have failed before */
    if (j->n == 1) CHECK_STATUS(status, FSDP_ERR_IO);
    if (j->n == 1) CHECK_EQ_INT(h.calls, 1);
    CHECK_STATUS(fsdp_pre_forward(j->m.unit[0]), status);
}
TEST(hooks, failure) {
    for (int s = 0; s < 6; s++) launch_at(s, hook_fails);
}

/* Fails. INVALID_STATE ends the world as another failure does, with ABORTED, since no call was refused. */
static fsdp_status refuses(void *user, const fsdp_param_view *v, void *stream) {
    (void)v, (void)stream;
    return *(const fsdp_status *)user;
}
static void grad_hook_fails(job *j) {
    fsdp_status of_hook = j->c->variant ? FSDP_ERR_IO : FSDP_ERR_INVALID_STATE;
    const fsdp_status expected = j->c->variant ? FSDP_ERR_IO : FSDP_ERR_ABORTED;
    make_model(j);
    CALL(j->w, fsdp_set_post_accumulate_hook(j->m.unit[1], 0, refuses, &of_hook));
    forward(j);
    (void)fsdp_pre_backward(j->m.unit[1]);
    (void)fsdp_grad(j->m.unit[1], 0);
    (void)fsdp_post_backward(j->m.unit[1]);
    CHECK_STATUS(fsdp_finalize_backward(j->m.model), expected);
    CHECK_STATUS(fsdp_world_status(j->w), expected);
    CHECK_STATUS(fsdp_pre_forward(j->m.unit[0]), expected);
    lib_drain(j->w); /* nobody reads of_hook any more */
}
TEST(hooks, failure_of_an_optimizer_in_backward) { everywhere(grad_hook_fails, 2); }

/* ---- addresses ------------------------------------------------------------------------------- */

/* Odd sizes after each other, in every dtype, stored as they are gathered and not: full parameters
   and their gradients begin at multiples of 64 bytes, on one rank as on several. On streams of a
   device it is 256. */
static void aligned(fsdp_world *w, const void *arg) {
    static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_F64, FSDP_F16, FSDP_BF16};
    static const int64_t shapes[][2] = {{7, 5}, {1, 1}, {64, 3}, {33, 9}, {0, 4}, {128, 128}};
    enum { COUNT = sizeof shapes / sizeof *shapes };
    const uintptr_t bytes = lib_on_streams(w) ? 256 : 64;
    (void)arg;
    for (int c = 0; c < 4 * 5; c++) {
        fsdp_param_desc params[COUNT];
        fsdp_model_desc md = FSDP_ZERO;
        md.param_dtype = c / 4 ? dtypes[c / 4 - 1] : FSDP_DTYPE_KEEP;
        md.direct_min = 1;
        for (int i = 0; i < COUNT; i++)
            params[i] = lab_desc(2, shapes[i], i == 3, dtypes[c % 4], i == 1);
        fsdp_model *m = lab_model(w, &md);
        fsdp_unit *units[2];
        for (int u = 0; u < 2; u++) units[u] = lab_unit(w, m, NULL, params, COUNT - u);
        for (int u = 0; u < 2; u++) lab_forward(w, units[u]);
        for (int u = 1; u >= 0; u--) {
            CALL(w, fsdp_pre_backward(units[u]));
            for (int i = 0; i < COUNT - u; i++) {
                W_CHECK((uintptr_t)fsdp_data(units[u], i) % bytes == 0,
                        "case %d: parameter %d of unit %d is at %p", c, i, u,
                        fsdp_data(units[u], i));
                if (i == 1) continue; /* frozen */
                W_CHECK((uintptr_t)fsdp_grad(units[u], i) % bytes == 0,
                        "case %d: gradient %d of unit %d is at %p", c, i, u,
                        fsdp_grad(units[u], i));
            }
            CALL(w, fsdp_post_backward(units[u]));
        }
        CALL(w, fsdp_finalize_backward(m));
        fsdp_model_destroy(m);
    }
}
TEST(addresses, aligned) {
    for (int size = 1; size <= 4; size++) lab_on_worlds(size, NULL, aligned, NULL);
}

/* ---- sums in f16 ------------------------------------------------------------------------------ */

/* The largest gradients, and the smallest: the mean over the ranks is what each rank has, and must
   neither overflow nor vanish on its way. A backend that does not divide f16 sums itself (upstream's
   NCCL) keeps neither over 4 ranks. */
enum {
    F16_ONCE,
    F16_NO_SYNC,
    F16_NO_ALL_REDUCE,
    F16_HOOK,
    F16_NEW_FACTOR,
    F16_WAITING_FACTOR, /* another one while sums wait for their all-reduce */
    F16_CUSTOM
};
typedef struct {
    int replicas, way, plain;
    fsdp_dtype param;
} f16_case;

static fsdp_status f16_look(void *user, fsdp_unit *u, void *data, int64_t numel, fsdp_dtype dtype,
                            void *stream) {
    lib_wait(stream);
    (void)user, (void)u, (void)stream;
    CHECK_EQ_INT(dtype, FSDP_F16);
    for (int64_t e = 0; e < numel; e++) CHECK(isfinite(lab_get(data, dtype, e)));
    return FSDP_OK;
}

/* An all-reduce of the caller's own makes sums, and divides nothing. */
static fsdp_status f16_custom(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                              const fsdp_coll *coll) {
    (void)user;
    CHECK_NEAR(coll->scale, 1, 0);
    return (ops->run)(comm, coll);
}

static void f16_microbatch(fsdp_world *w, fsdp_model *m, fsdp_unit *unit, fsdp_dtype dtype,
                           double value) {
    lab_forward(w, unit);
    CALL(w, fsdp_pre_backward(unit));
    for (int i = 0; i < 2; i++) {
        const fsdp_param_view v = lab_view(w, unit, i);
        void *grad = fsdp_grad(unit, i);
        for (int64_t e = 0; e < lab_full_numel(&v); e++)
            lab_put(grad, dtype, e, lab_get(grad, dtype, e) + (i ? value : -value));
    }
    CALL(w, fsdp_post_backward(unit));
    CALL(w, fsdp_finalize_backward(m));
}

static double f16_mean(fsdp_world *w, const f16_case *c, double value) {
    const int64_t shape[2] = {5, 3};
    const fsdp_param_desc params[2] = {lab_desc(2, shape, 0, FSDP_F32, 0),
                                       lab_desc(1, shape, 0, FSDP_F32, 0)};
    const fsdp_dtype dtype = c->param ? c->param : FSDP_F32;
    const int waits = c->way == F16_WAITING_FACTOR && c->replicas > 1,
              twice = waits || c->way == F16_NO_SYNC || c->way == F16_NO_ALL_REDUCE;
    double got = 0; /* ranks without rows have the others' */
    fsdp_model_desc md = FSDP_ZERO;
    md.param_dtype = c->param, md.reduce_dtype = FSDP_F16;
    md.mesh = lab_hsdp(w, c->replicas, fsdp_world_size(w) / c->replicas);
    fsdp_model *m = lab_model(w, &md);
    fsdp_unit *unit = lab_unit(w, m, NULL, params, 2);
    if (c->way == F16_HOOK) CALL(w, fsdp_set_all_reduce_hook(unit, f16_look, NULL));
    if (c->way == F16_CUSTOM) CALL(w, fsdp_set_custom_all_reduce(unit, f16_custom, NULL));
    for (int step = 0; step < 2; step++) {
        CALL(w, fsdp_zero_grad(m));
        if (twice) {
            if (c->way == F16_NO_SYNC) CALL(w, fsdp_set_requires_gradient_sync(m, NULL, 0));
            else CALL(w, fsdp_set_requires_all_reduce(m, NULL, 0));
            if (waits) CALL(w, fsdp_set_gradient_divide_factor(m, unit, 1));
            f16_microbatch(w, m, unit, dtype, value / 2);
            CALL(w, fsdp_set_requires_gradient_sync(m, NULL, 1));
            CALL(w, fsdp_set_requires_all_reduce(m, NULL, 1));
        }
        if (waits) CALL(w, fsdp_set_gradient_divide_factor(m, unit, fsdp_world_size(w)));
        if (c->way == F16_NEW_FACTOR) /* flags of use are divided by it, too */
            CALL(w, fsdp_set_gradient_divide_factor(m, unit, (step + 1) * fsdp_world_size(w)));
        f16_microbatch(w, m, unit, dtype, twice ? value / 2 : value);
        int64_t seen = 0;
        for (int i = 0; i < 2; i++) {
            const fsdp_param_view v = lab_view(w, unit, i);
            CHECK(v.shard_grad);
            for (int64_t e = 0; e < v.numel; e++) { /* all elements are alike */
                const double x = lab_get(v.shard_grad, FSDP_F32, e) * (i ? 1 : -1);
                CHECK(seen++ == 0 || lab_same(x, got));
                got = x;
            }
        }
    }
    CALL(w, fsdp_all_reduce(w, NULL, &got, 1, FSDP_F64, FSDP_MAX));
    fsdp_model_destroy(m);
    return got;
}

static void f16_body(fsdp_world *w, const void *arg) {
    const f16_case *c = (const f16_case *)arg;
    const double smallest = 0x1p-24, size = fsdp_world_size(w);
    const double half = c->way == F16_NEW_FACTOR ? 0.5 : 1;
    const int fits = (!c->plain && c->way != F16_CUSTOM) || size < 4;
    CHECK_NEAR(f16_mean(w, c, 1000), 1000 * half, 0);
    if (c->way == F16_WAITING_FACTOR) return;
    const double large = f16_mean(w, c, 60000);
    if (fits) CHECK_NEAR(large, 60000 * half, 0);
    else CHECK(isinf(large));
    if (c->way != F16_ONCE && c->way != F16_HOOK) return; /* halves of it are 0 */
    const double small = f16_mean(w, c, smallest);
    if (!c->plain) CHECK_NEAR(small, smallest, 0);
}

TEST(f16, sums_stay_in_range) {
    static const int sizes[] = {1, 2, 4};
    for (int s = 0; s < 3; s++)
        for (int replicas = 1; replicas <= sizes[s]; replicas *= 2)
            for (int way = 0; way < (lab_divides() ? F16_CUSTOM : 1); way++)
                for (int param = 0; param < 2; param++) {
                    f16_case c = {replicas, way, !lab_divides(),
                                  param ? FSDP_F16 : FSDP_DTYPE_KEEP};
                    lab_on_worlds(sizes[s], NULL, f16_body, &c);
                }
}
TEST(f16, sums_of_a_backend_that_does_not_divide) {
    fsdp_comm_ops plain = w_plain();
    lab_how how = FSDP_ZERO;
    how.comm_ops = &plain;
    for (int replicas = 1; replicas <= 4; replicas *= 2) {
        const f16_case c = {replicas, F16_ONCE, 1, FSDP_F16};
        lab_on_worlds(4, &how, f16_body, &c);
    }
    for (int replicas = 2; replicas <= 4; replicas *= 2) {
        const f16_case c = {replicas, F16_CUSTOM, 0, FSDP_F16};
        lab_on_worlds(4, NULL, f16_body, &c);
    }
}

/* ---- an optimizer in backward ---------------------------------------------------------------- */

typedef struct inner { /* of one rank */
    const job *j;
    int calls[ALL];
} inner;
static fsdp_status step_in_backward(void *user, const fsdp_param_view *v, void *stream) {
    lib_wait(stream);
    inner *in = (inner *)user;
    int p = lab_row_of(&net, v);
    (void)stream;
    in->calls[p]++;
    CHECK(v->shard_grad != NULL && v->requires_grad && v->grad_dtype == FSDP_F32);
    CHECK(v->unit == in->j->m.unit[p / PARAMS] && v->index == p % PARAMS);
    fsdp_sgd_update((float *)v->shard, (const float *)v->shard_grad, NULL, v->numel, &sgd);
    return FSDP_OK;
}

static void in_backward(job *j) {
    inner in;
    memset(&in, 0, sizeof in);
    in.j = j;
    make_model(j);
    set_frozen(j, 10, 1); /* and 9 is used by nobody in every other step */
    for (int p = 0; p < ALL; p++)
        CALL(j->w, fsdp_set_post_accumulate_hook(j->m.unit[p / PARAMS], p % PARAMS,
                                                 step_in_backward, &in));
    for (int n = 0; n < 5; n++) {
        int expected[ALL], first = j->log.num;
        memcpy(expected, in.calls, sizeof expected);
        if (j->c->variant) { /* two microbatches: the hook runs when they are reduced */
            CALL(j->w, fsdp_set_requires_gradient_sync(j->m.model, NULL, 0));
            forward(j);
            backward_kept(j);
            CHECK_EQ_MEM(in.calls, expected, sizeof expected);
            CALL(j->w, fsdp_set_requires_gradient_sync(j->m.model, NULL, 1));
        }
        forward(j);
        backward(j);
        for (int p = 0; p < ALL; p++) expected[p] += !j->m.frozen[p] && j->t.has[p];
        for (int p = 0; p < ALL; p++)
            W_CHECK(in.calls[p] == expected[p], "parameter %d: %d calls, expected %d", p,
                    in.calls[p], expected[p]);
        for (int u = 0; u < UNITS; u++) { /* behind everything else of the unit */
            int hook = next_op(j, first, FSDP_OP_CALL, FSDP_LABEL_GRAD_HOOK, j->m.unit[u]);
            W_CHECK(hook >= 0 && next_op(j, hook, -1, FSDP_LABEL_REDUCE, j->m.unit[u]) < 0 &&
                        next_op(j, hook, -1, FSDP_LABEL_RED_OUT, j->m.unit[u]) < 0,
                    "unit %d: the hook comes too early", u);
            const fsdp_op *o = &j->log.ops[hook]; /* others wait for it by the blocks that it names */
            CHECK(o->src && o->src_ptr == fsdp_buf_ptr(o->src) && o->dst);
            CHECK(o->dst_ptr == fsdp_buf_ptr(o->dst) && o->dst != o->src);
            if (j->n == 1 && !j->c->variant) /* the caller has written what the hook sees */
                CHECK_EQ_INT(o->stream, FSDP_STREAM_COMPUTE);
        }
        for (int k = first; k < j->log.num; k++) /* a record that divides says by what */
            if (j->log.ops[k].share != 0) CHECK(j->log.ops[k].factor == j->n);
        check_grads(j);
        CALL(j->w, fsdp_zero_grad(j->m.model));
        update_reference(j); /* SGD after backward: the same bits */
        check_params(j);
    }
}
/* PyTorch: test_fully_shard_autograd.py test_post_acc_grad_hook_runs,
   test_post_acc_grad_hook_optim_parity. Done: once per reduction, not for a parameter without a
   gradient. SGD (PyTorch: AdamW with a schedule); the test writes the gradients. */
TEST(hooks, optimizer_in_backward) { everywhere(in_backward, 2); }

/* ---- custom collectives ---------------------------------------------------------------------- */

typedef struct custom { /* of one rank */
    int world, rank;
    int gathers, scatters;
} custom;

static fsdp_status through_gather(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                                  const fsdp_coll *c) {
    ((custom *)user)->gathers++;
    CHECK_EQ_INT(c->kind, FSDP_OP_ALL_GATHER);
    return ops->run(comm, c);
}
static fsdp_status through_scatter(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                                   const fsdp_coll *c) {
    ((custom *)user)->scatters++;
    CHECK_EQ_INT(c->kind, FSDP_OP_REDUCE_SCATTER);
    return ops->run(comm, c);
}

/* A sum of what everybody has, zeros where I have nothing. */
static fsdp_status sum_of(const fsdp_comm_ops *ops, fsdp_comm *comm, const fsdp_coll *c, void *data,
                          int64_t count) {
    fsdp_coll sum = *c;
    sum.kind = FSDP_OP_ALL_REDUCE, sum.redop = FSDP_SUM;
    sum.out_dtype = sum.dtype;
    sum.in_place = 1, sum.accumulate = 0, sum.scale = 1;
    sum.segs = NULL, sum.num_segs = 0, sum.count = (uint64_t)count;
    sum.src = sum.dst = data;
    return ops->run(comm, &sum);
}
static fsdp_status gather_by_sum(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                                 const fsdp_coll *c) {
    lib_wait(c->stream);
    custom *my = (custom *)user;
    fsdp_status status = FSDP_OK;
    my->gathers++;
    CHECK(c->dtype == FSDP_F32 && c->dtype == c->out_dtype);
    for (uint32_t i = 0; i < c->num_segs && !status; i++) {
        const fsdp_seg *s = &c->segs[i];
        float *full = (float *)c->dst + s->full, *mine = full + my->rank * s->count;
        if (!c->in_place)
            memcpy(mine, (const float *)c->src + s->shard, (size_t)s->count * sizeof *mine);
        for (int64_t k = 0; k < my->world * s->count; k++)
            if (k / (s->count ? s->count : 1) != my->rank) full[k] = 0;
        status = sum_of(ops, comm, c, full, my->world * s->count);
    }
    return status;
}
static fsdp_status scatter_by_sum(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                                  const fsdp_coll *c) {
    lib_wait(c->stream);
    custom *my = (custom *)user;
    fsdp_status status = FSDP_OK;
    my->scatters++;
    CHECK(c->dtype == FSDP_F32 && c->out_dtype == FSDP_F32);
    for (uint32_t i = 0; i < c->num_segs && !status; i++) {
        const fsdp_seg *s = &c->segs[i];
        float *full = (float *)(uintptr_t)c->src + s->full;
        float *to = (float *)c->dst + s->shard;
        status = sum_of(ops, comm, c, full, my->world * s->count);
        lib_wait(c->stream);
        for (int64_t k = 0; k < s->count && !status; k++) {
            volatile float part = full[my->rank * s->count + k] * (float)c->scale;
            to[k] = c->accumulate ? to[k] + part : part;
        }
    }
    return status;
}

static void custom_body(job *j) {
    custom my[UNITS];
    make_model(j);
    for (int u = 0; u < UNITS; u++) {
        my[u].world = shards_of(j), my[u].gathers = my[u].scatters = 0;
        my[u].rank = j->c->mesh == MESH_HSDP ? j->rank % shards_of(j) : j->rank;
        int by_sum = (j->c->variant + u) % 2;
        CALL(j->w, fsdp_set_custom_all_gather(j->m.unit[u], by_sum ? gather_by_sum : through_gather,
                                              &my[u]));
        if (u != 1)
            CALL(j->w, fsdp_set_custom_reduce_scatter(
                           j->m.unit[u], by_sum ? scatter_by_sum : through_scatter, &my[u]));
    }
    for (int n = 0; n < 4; n++) {
        int first = j->log.num, before[UNITS][2];
        for (int u = 0; u < UNITS; u++) before[u][0] = my[u].gathers, before[u][1] = my[u].scatters;
        if (n == 3)
            for (int u = 0; u < UNITS; u++) {
                CALL(j->w, fsdp_set_custom_all_gather(j->m.unit[u], NULL, NULL));
                CALL(j->w, fsdp_set_custom_reduce_scatter(j->m.unit[u], NULL, NULL));
            }
        forward(j);
        backward(j);
        for (int u = 0; u < UNITS; u++) { /* each collective of these kinds, and nothing else */
            int in = count_ops(j, first, FSDP_OP_ALL_GATHER, -1, j->m.unit[u]);
            int out = count_ops(j, first, FSDP_OP_REDUCE_SCATTER, -1, j->m.unit[u]);
            CHECK_EQ_INT(my[u].gathers - before[u][0], n < 3 ? in : 0);
            CHECK_EQ_INT(my[u].scatters - before[u][1], n < 3 && u != 1 ? out : 0);
            CHECK_EQ_INT(in, shards_of(j) > 1 ? 2 : 0);
            CHECK_EQ_INT(out, shards_of(j) > 1);
        }
        update(j);
    }
}
TEST(custom, collectives) { everywhere(custom_body, 2); }
static void custom_unfused(job *j) { custom_body(j); }
TEST(custom, collectives_without_fused_reduction) {
    fsdp_comm_ops plain = w_plain();
    for (int s = 2; s < SETTINGS; s++) {
        config *c = setup(s, custom_unfused);
        c->comm_ops = &plain;
        launch(c);
        munmap(c, sizeof *c);
    }
}

/* The all_reduce over replicas, in pieces: several collectives in one call. */
typedef struct summed { /* of one rank and unit */
    int calls, fail;
    int64_t count;
    float sums[2048]; /* of the last call */
} summed;

static fsdp_status sum_in_pieces(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                                 const fsdp_coll *c) {
    lib_wait(c->stream);
    summed *s = (summed *)user;
    const int64_t count = (int64_t)c->count, piece = count / 3 + 1;
    float *data = (float *)c->dst;
    fsdp_status status = FSDP_OK;
    s->calls++;
    CHECK(c->kind == FSDP_OP_ALL_REDUCE && c->label == FSDP_LABEL_REPLICAS && c->in_place);
    CHECK(c->dtype == FSDP_F32 && c->redop == FSDP_SUM && c->src == c->dst && count <= 2048);
    if (s->fail) return FSDP_ERR_IO;
    for (int64_t at = 0; at < count && !status; at += piece)
        status = sum_of(ops, comm, c, data + at, at + piece < count ? piece : count - at);
    s->count = count;
    lib_wait(c->stream);
    memcpy(s->sums, data, (size_t)count * sizeof *data);
    return status;
}

/* The call was given the gradients of the trainables in the order of their shards. */
static void check_sums(job *j, int u, const summed *s) {
    fsdp_param_view v[PARAMS];
    const float *first = NULL;
    for (int i = 0; i < PARAMS; i++) {
        CALL(j->w, fsdp_param_view_get(j->m.unit[u], i, &v[i]));
        if (v[i].requires_grad && (!first || (const float *)v[i].shard < first))
            first = (const float *)v[i].shard;
    }
    for (int i = 0; i < PARAMS; i++) {
        if (!v[i].requires_grad) continue;
        const int64_t at = (const float *)v[i].shard - first;
        CHECK(at >= 0 && at + v[i].numel <= s->count);
        for (int64_t k = 0; k < v[i].numel && v[i].shard_grad; k++) {
            volatile float mean = s->sums[at + k] * (1.0f / (float)j->n);
            CHECK(mean == ((const float *)v[i].shard_grad)[k]);
        }
    }
}

static void custom_sums(job *j) {
    summed *s = (summed *)lab_zeros(UNITS, sizeof *s);
    double norm, one = 1;
    make_model(j);
    set_frozen(j, 9, 1);
    for (int u = 0; u < UNITS; u += 2)
        CALL(j->w, fsdp_set_custom_all_reduce(j->m.unit[u], sum_in_pieces, &s[u]));
    for (int n = 0; n < 5; n++) {
        if (n == 2) { /* sums over the shard group wait for the next microbatch */
            CALL(j->w, fsdp_set_requires_all_reduce(j->m.model, NULL, 0));
            forward(j);
            backward_kept(j);
            CALL(j->w, fsdp_set_requires_all_reduce(j->m.model, NULL, 1));
        }
        if (n == 4) CALL(j->w, fsdp_set_custom_all_reduce(j->m.unit[2], NULL, NULL));
        forward(j);
        backward(j);
        for (int u = 0; u < UNITS; u++) {
            CHECK_EQ_INT(s[u].calls, u == 1 ? 0 : u == 2 && n == 4 ? 4 : n + 1);
            if (s[u].calls == n + 1) check_sums(j, u, &s[u]);
        }
        /* No other collective is theirs. */
        CALL(j->w, fsdp_clip_grad_norm(j->m.model, LAB_INF, &norm));
        CALL(j->w, fsdp_param_full(j->m.unit[0], 0, NULL));
        CALL(j->w, fsdp_param_full_grad(j->m.unit[0], 0, NULL));
        CALL(j->w, fsdp_all_reduce(j->w, NULL, &one, 1, FSDP_F64, FSDP_MAX));
        CHECK_EQ_INT(s[0].calls, n + 1);
        update(j);
    }
    free(s);
}
static void failing_sums(job *j) {
    summed *s = (summed *)lab_zeros(1, sizeof *s);
    s->fail = 1;
    make_model(j);
    if (j->rank == 0) CALL(j->w, fsdp_set_custom_all_reduce(j->m.unit[1], sum_in_pieces, s));
    forward(j);
    fsdp_status status = fsdp_barrier(j->w); /* no rank is still in forward when it fails */
    if (!status) {                           /* who leaves the barrier late hears it there */
        (void)fsdp_pre_backward(j->m.unit[1]);
        (void)fsdp_grad(j->m.unit[1], 0);
        (void)fsdp_post_backward(j->m.unit[1]);
        status = fsdp_finalize_backward(j->m.model);
    }
    if (!status)
        status = fsdp_barrier(j->w);   /* a rank that shares no group with it hears it here */
    CHECK_STATUS(status, FSDP_ERR_IO); /* on all ranks */
    CHECK_MSG(strstr(fsdp_last_error(j->w), "all_reduce (replicas) of unit 'middle'"), "%s",
              fsdp_last_error(j->w));
    CHECK_STATUS(fsdp_pre_forward(j->m.unit[0]), status);
    lib_drain(j->w); /* nobody calls the hook any more */
    CHECK_EQ_INT(s->calls, j->rank == 0);
    free(s);
}
static void with_replicas(void (*body)(job *j)) {
    for (int s = 0; s < SETTINGS; s++) {
        if (settings[s].mesh != MESH_HSDP) continue;
        launch_at(s, body);
    }
}
TEST(custom, all_reduce) { with_replicas(custom_sums); }
TEST(custom, all_reduce_fails) { with_replicas(failing_sums); }

/* ---- prefetch -------------------------------------------------------------------------------- */

enum { DEEP = 6 };

/* Units of equal size, lists of this depth in each direction. */
static void make_deep(job *j, fsdp_unit **units, int forward_depth, int backward_depth) {
    for (int u = 0; u < DEEP; u++) {
        fsdp_param_desc d = fsdp_mat("w", 8, 32);
        units[u] = lab_unit(j->w, j->m.model, NULL, &d, 1);
    }
    for (int u = 0; u < DEEP; u++) {
        fsdp_unit *ahead[DEEP], *back[DEEP];
        int num = 0, num_back = 0;
        for (int k = 1; k <= forward_depth && u + k < DEEP; k++) ahead[num++] = units[u + k];
        for (int k = 1; k <= backward_depth && u - k >= 0; k++) back[num_back++] = units[u - k];
        CALL(j->w, fsdp_set_modules_to_forward_prefetch(units[u], ahead, num));
        CALL(j->w, fsdp_set_modules_to_backward_prefetch(units[u], back, num_back));
    }
}

static void deep_forward(job *j, fsdp_unit **units) {
    for (int u = 0; u < DEEP; u++) {
        CALL(j->w, fsdp_pre_forward(units[u]));
        CHECK(fsdp_data(units[u], 0) != NULL);
        CALL(j->w, fsdp_post_forward(units[u]));
    }
}
static void deep_backward(job *j, fsdp_unit **units) {
    for (int u = DEEP - 1; u >= 0; u--) {
        CALL(j->w, fsdp_pre_backward(units[u]));
        CHECK(fsdp_data(units[u], 0) && fsdp_grad(units[u], 0));
        CALL(j->w, fsdp_post_backward(units[u]));
    }
    CALL(j->w, fsdp_finalize_backward(j->m.model));
}

/* Each unit is gathered once, in this order, and when the k-th is used, the expected number has
   been issued: the list of the unit before, but no more than the budget. */
static void check_prefetched(job *j, int first, fsdp_unit **units, int backward, int depth,
                             int budget) {
    int issued = 0, uses = 0, ahead = depth < budget ? depth : budget;
    for (int n = first; n < j->log.num; n++) {
        const fsdp_op *op = &j->log.ops[n];
        if (op->kind == FSDP_OP_ALL_GATHER) {
            int unit = backward ? DEEP - 1 - issued : issued;
            W_CHECK(issued < DEEP && op->unit == units[unit], "gather %d is of another unit",
                    issued);
            issued++;
        }
        if (op->kind != FSDP_OP_WAIT || op->label != FSDP_LABEL_GATHER) continue;
        int most = uses ? uses + ahead : 1;
        if (most < uses + 1) most = uses + 1;
        if (most > DEEP) most = DEEP;
        W_CHECK(issued == most, "%s: when the %dth unit is used, %d are issued, expected %d",
                backward ? "backward" : "forward", uses, issued, most);
        CHECK(op->unit == units[backward ? DEEP - 1 - uses : uses]);
        uses++;
    }
    CHECK(issued == DEEP && uses == DEEP);
}

/* variant: depth of the lists; reshard[0]: how many slots the budget holds. */
static void prefetch_body(job *j) {
    int hides = j->c->lanes > 0 || lib_on_streams(j->w);
    fsdp_unit *units[DEEP] = {NULL};
    fsdp_memory memory;
    int depth = j->c->variant, budget = j->c->reshard[0];
    int sees = j->n > 1;
    make_empty_model(j);
    make_deep(j, units, depth, depth);
    for (int n = 0; n < 3; n++) {
        int first = j->log.num;
        deep_forward(j, units);
        if (sees) check_prefetched(j, first, units, 0, depth, budget);
        first = j->log.num;
        deep_backward(j, units);
        /* Without a list the implicit prefetch is there where it can hide something. */
        int implicit = depth == 0 && hides;
        if (sees) check_prefetched(j, first, units, 1, implicit ? 1 : depth, budget);
        CALL(j->w, fsdp_zero_grad(j->m.model));
    }
    CALL(j->w, fsdp_model_memory(j->m.model, &memory));
    if (!sees) return;
    int ahead = depth < budget ? depth : budget, base = hides ? 2 : 1;
    W_CHECK(memory.pool_slots[FSDP_POOL_GATHER] <= base + ahead &&
                memory.pool_slots[FSDP_POOL_GATHER] >= 1 + ahead,
            "%d slots for a depth of %d", memory.pool_slots[FSDP_POOL_GATHER], ahead);
}

TEST(prefetch, depth_and_budget, AT_NIGHT(ASAN)) {
    int runs = 0;
    int64_t slot = 8 * 32 * (int64_t)sizeof(float); /* what all shards of a unit take */
    for (int s = 0; s < SETTINGS; s++) {
        if (settings[s].mesh == MESH_HSDP || settings[s].world == 3) continue; /* padded there */
        for (int depth = 0; depth <= 3; depth++)
            for (int budget = 0; budget <= 4; budget++, runs++) {
                config *c = setup(s, prefetch_body);
                c->md.direct_min = 1; /* nothing is copied out: the slot is W shards */
                c->variant = depth;
                c->reshard[0] = budget < 4 ? budget : DEEP; /* 4: no budget */
                c->md.prefetch_bytes = budget < 4 ? 1 + budget * slot + (depth % 2 ? slot / 2 : 0) : 0;
                launch(c);
                munmap(c, sizeof *c);
            }
    }
    h_message("%d models", runs);
}

/* ---- norms ----------------------------------------------------------------------------------- */

static const double powers[] = {1, 2, 3, 2.5, 0};

/* One element that is not finite, in one place of the shard group. */
static float *spoil(job *j, double what, int holder) {
    fsdp_param_view v = lab_view(j->w, j->m.unit[1], 0);
    float *at = (float *)v.shard_grad + v.numel / 2;
    CHECK(v.shard_grad && v.numel > 0);
    if (j->rank % shards_of(j) != holder % shards_of(j)) return NULL;
    *at = (float)what;
    return at;
}

static void clip_nonfinite(job *j) {
    make_model(j);
    j->step = 1; /* in odd ones somebody uses the parameter that is spoilt */
    for (int n = 0; n < 10; n++) {
        fsdp_clip_desc d = FSDP_ZERO;
        double power = n / 2 == 4 ? LAB_INF : powers[n / 2], what = n % 2 ? LAB_NAN : LAB_INF,
               norm = 0;
        forward(j);
        backward(j);
        float *at = spoil(j, what, n);
        d.norm_type = power, d.max_norm = 1, d.error_if_nonfinite = 1;
        CHECK_STATUS(fsdp_clip_grads(j->m.model, &d, &norm), FSDP_ERR_CORRUPT);
        W_CHECK(n % 2 ? h_non_finite(norm) == 2 : h_non_finite(norm) == 1, "p %g: norm %g", power,
                norm);
        fsdp_param_view v = FSDP_ZERO;
        while (fsdp_next_param(j->m.model, &v)) /* nothing was scaled */
            for (int64_t k = 0; v.shard_grad && k < v.numel; k++) {
                const float *g = (const float *)v.shard_grad + k;
                W_CHECK(g == at || *g == j->t.grad[lab_row_of(&net, &v)][fsdp_view_index(&v, k)],
                        "an element has changed");
            }
        d.error_if_nonfinite = 0, d.max_norm = LAB_INF; /* measured only: not scaled either */
        norm = 0;
        CALL(j->w, fsdp_clip_grads(j->m.model, &d, &norm));
        W_CHECK(n % 2 ? h_non_finite(norm) == 2 : h_non_finite(norm) == 1, "p %g: norm %g", power,
                norm);
        memset(&v, 0, sizeof v);
        while (fsdp_next_param(j->m.model, &v))
            for (int64_t k = 0; v.shard_grad && k < v.numel; k++) {
                const float *g = (const float *)v.shard_grad + k;
                W_CHECK(g == at || *g == j->t.grad[lab_row_of(&net, &v)][fsdp_view_index(&v, k)],
                        "max_norm infinite has changed an element");
            }
        d.max_norm = 1; /* as PyTorch: NaN spreads, an infinity makes zeros of the others */
        CALL(j->w, fsdp_clip_grads(j->m.model, &d, &norm));
        memset(&v, 0, sizeof v);
        while (fsdp_next_param(j->m.model, &v))
            for (int64_t k = 0; v.shard_grad && k < v.numel; k++) {
                const float *g = (const float *)v.shard_grad + k;
                W_CHECK(n % 2 || g == at ? h_non_finite((double)*g) == 2 : *g == 0, "p %g: %g",
                        power, (double)*g);
            }
        CALL(j->w, fsdp_zero_grad(j->m.model));
        memset(j->t.has, 0, sizeof j->t.has);
        j->step += 2;
    }
    train_step(j); /* the world goes on */
}
TEST(clip, nonfinite) { everywhere(clip_nonfinite, 1); }

/* ---- several meshes in one model ------------------------------------------------------------- */

/* On 4 ranks: all shard the first unit, pairs the middle one, so that two copies of it are trained, and the
   last one is in HSDP. The gradients of the middle one are those of its pair. */
static int pair_of(int rank) { return rank % 2; }

static void mixed_backward(job *j) {
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(j->w, fsdp_pre_backward(j->m.unit[u]));
        check_data(j, u);
        for (int i = 0; i < PARAMS; i++) {
            int p = u * PARAMS + i, n = u == 1 ? 2 : 4;
            float *g = (float *)fsdp_grad(j->m.unit[u], i);
            for (int64_t k = 0; k < lab_numel_of(&net, u * PARAMS + i); k++) {
                volatile float sum = 0, part = 1.0f / (float)n;
                for (int r = 0; r < RANKS; r++)
                    if (u != 1 || pair_of(r) == pair_of(j->rank))
                        sum = sum + gradient(p, k, r, j->step);
                g[k] += gradient(p, k, j->rank, j->step);
                j->t.grad[p][k] = sum * part;
            }
            j->t.has[p] = 1;
        }
        CALL(j->w, fsdp_post_backward(j->m.unit[u]));
    }
    CALL(j->w, fsdp_finalize_backward(j->m.model));
}

/* The square of the norm of all gradients: of the middle unit, those of both pairs. */
static double mixed_squares(const job *j) {
    double sum = 0;
    for (int p = 0; p < ALL; p++)
        for (int64_t k = 0; k < lab_numel_of(&net, p); k++)
            for (int pair = 0; pair < (p / PARAMS == 1 ? 2 : 1); pair++) {
                const float two = gradient(p, k, pair, j->step) + gradient(p, k, pair + 2, j->step);
                const double g = p / PARAMS == 1 ? (double)(two * 0.5f) : (double)j->t.grad[p][k];
                sum += g * g;
            }
    return sum;
}

static void mixed_body(job *j) {
    const fsdp_mesh *grid = lab_mesh2(j->w, 2, 2, "dp", "ep"), *pairs = lab_slice(j->w, grid, 0);
    make_empty_model(j);
    for (int u = 0; u < UNITS; u++) {
        fsdp_unit_desc ud = FSDP_ZERO;
        if (u == 1) ud.mesh = pairs;
        if (u == 2) ud.mesh = grid;
        j->m.unit[u] = add_unit(j, u, &ud);
    }
    CALL(j->w, fsdp_init_params(j->m.model, fill_rows, NULL));
    for (int n = 0; n < 3; n++) {
        forward(j);
        int first = j->log.num;
        mixed_backward(j);
        for (int u = 0; u < UNITS; u++) {
            int scatter = next_op(j, first, FSDP_OP_REDUCE_SCATTER, -1, j->m.unit[u]);
            int sum = next_op(j, first, FSDP_OP_ALL_REDUCE, -1, j->m.unit[u]);
            CHECK(scatter >= 0 && (sum >= 0) == (u == 2));
            CHECK_EQ_INT(j->log.ops[scatter].group_size, u == 0 ? 4 : 2);
            if (u == 2) CHECK_EQ_INT(j->log.ops[sum].group_size, 2);
        }
        double norm;
        const double squares = mixed_squares(j);
        CALL(j->w, fsdp_clip_grad_norm(j->m.model, LAB_INF, &norm));
        W_CHECK(fabs(norm * norm - squares) <= 1e-9 * squares, "norm %.17g, squares %.17g", norm, squares);
        update(j);
    }
}
TEST(meshes, mixed) {
    for (int s = 6; s < 8; s++) launch_at(s, mixed_body);
}

/* ---- reports --------------------------------------------------------------------------------- */

static void unit_memory(job *j) {
    fsdp_memory model, own[UNITS], predicted;
    int64_t unsharded = 0, shards = 0, grads = 0, align = 0;
    make_model(j);
    CALL(j->w, fsdp_model_predict(j->m.model, &predicted));
    train_step(j);
    train_step(j);
    CALL(j->w, fsdp_model_memory(j->m.model, &model));
    check_same_memory(j, &model, &predicted);
    for (int u = 0; u < UNITS; u++) {
        int64_t full = 0;
        CALL(j->w, fsdp_unit_memory(j->m.unit[u], &own[u]));
        for (int i = 0; i < PARAMS; i++)
            full += lab_numel_of(&net, u * PARAMS + i) * (int64_t)sizeof(float);
        CHECK_EQ_INT(own[u].unsharded_bytes, 2 * full); /* and the gradients */
        unsharded += own[u].unsharded_bytes;
        shards += own[u].pool_bytes[FSDP_POOL_SHARD];
        grads += own[u].pool_bytes[FSDP_POOL_SHARD_GRAD];
        align += 64;
        CHECK(own[u].pool_bytes[FSDP_POOL_SHARD] >= full / shards_of(j));
        if (shards_of(j) > 1) CHECK(own[u].pool_bytes[FSDP_POOL_GATHER] >= full);
        int64_t sum = 0;
        for (int pool = 0; pool < FSDP_POOL_COUNT; pool++) {
            sum += own[u].pool_bytes[pool];
            CHECK_EQ_INT(own[u].pool_slots[pool], 0); /* none is held between steps */
        }
        CHECK_EQ_INT(own[u].total_bytes, sum);
    }
    CHECK_EQ_INT(model.unsharded_bytes, unsharded);
    /* The model's blocks are those of its units, aligned, and the counts of users. */
    W_CHECK(shards <= model.pool_bytes[FSDP_POOL_SHARD] &&
                model.pool_bytes[FSDP_POOL_SHARD] <= shards + align + 4096,
            "%lld, units %lld", (long long)model.pool_bytes[FSDP_POOL_SHARD], (long long)shards);
    W_CHECK(grads <= model.pool_bytes[FSDP_POOL_SHARD_GRAD] &&
                model.pool_bytes[FSDP_POOL_SHARD_GRAD] <= grads + align + 4096,
            "%lld, units %lld", (long long)model.pool_bytes[FSDP_POOL_SHARD_GRAD],
            (long long)grads);
    CALL(j->w, fsdp_pre_forward(j->m.unit[1])); /* what it holds while it is open */
    CALL(j->w, fsdp_unit_memory(j->m.unit[1], &own[1]));
    const int copied = shards_of(j) > 1 || j->c->md.debug; /* with debug one rank copies, too */
    CHECK_EQ_INT(own[1].pool_slots[FSDP_POOL_GATHER], copied);
    CALL(j->w, fsdp_post_forward(j->m.unit[1]));
    CALL(j->w, fsdp_pre_backward(j->m.unit[1]));
    CALL(j->w, fsdp_unit_memory(j->m.unit[1], &own[1]));
    CHECK_EQ_INT(own[1].pool_slots[FSDP_POOL_GRAD], j->n > 1);
    CALL(j->w, fsdp_post_backward(j->m.unit[1]));
    CALL(j->w, fsdp_finalize_backward(j->m.model));
    CHECK_STATUS(fsdp_unit_memory(NULL, &own[0]), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_unit_memory(j->m.unit[0], NULL), FSDP_ERR_INVALID_ARG);
}
TEST(report, unit_memory) { everywhere(unit_memory, 1); }

/* Every unit, parameter and shape is in the text; and it is cut as snprintf cuts. */
static void describe(job *j) {
    char name[64], *text, *cut;
    make_empty_model(j);
    size_t length = fsdp_model_describe(j->m.model, NULL, 0);
    CHECK(length > 0); /* without units, too */
    for (int u = 0; u < UNITS; u++) {
        fsdp_unit_desc ud = FSDP_ZERO;
        j->m.frozen[4] = j->born_frozen[4] = 1;
        j->m.unit[u] = add_unit(j, u, &ud);
        CHECK(fsdp_model_describe(j->m.model, NULL, 0) > length);
        length = fsdp_model_describe(j->m.model, NULL, 0);
    }
    make_reference(j);
    CALL(j->w, fsdp_init_params(j->m.model, fill_rows, NULL));
    train_step(j);
    length = fsdp_model_describe(j->m.model, NULL, 0);
    text = (char *)malloc(length + 2), cut = (char *)malloc(length + 2);
    CHECK(text && cut);
    memset(text, 'x', length + 2);
    CHECK_EQ_INT(fsdp_model_describe(j->m.model, text, length + 1), (long long)length);
    CHECK(strlen(text) == length && text[length + 1] == 'x');
    const char *at = text;
    for (int u = 0; u < UNITS; u++) { /* in order, each with its parameters behind it */
        snprintf(name, sizeof name, "'%s'", unit_names[u]);
        at = strstr(at, name);
        W_CHECK(at, "no unit %s in:\n%s", name, text);
        for (int i = 0; i < PARAMS; i++) {
            const lab_param *s = &net.rows[u * PARAMS + i];
            char line[256];
            snprintf(name, sizeof name, "\n    p%d ", i);
            at = strstr(at, name);
            W_CHECK(at, "no parameter %s in:\n%s", name + 1, text);
            snprintf(line, sizeof line, "%.*s", (int)strcspn(at + 1, "\n"), at + 1);
            snprintf(name, sizeof name,
                     s->ndim == 1   ? "[%lld]"
                     : s->ndim == 2 ? "[%lld, %lld]"
                                    : "[%lld, %lld, %lld]",
                     (long long)s->shape[0], (long long)s->shape[1], (long long)s->shape[2]);
            W_CHECK(strstr(line, name) && strstr(line, "f32"), "no %s in: %s", name, line);
            CHECK((strstr(line, "frozen") != NULL) == (u == 1 && i == 0));
        }
    }
    for (size_t cap = 0; cap <= length + 1; cap++) {
        memset(cut, 'x', length + 2);
        CHECK_EQ_INT(fsdp_model_describe(j->m.model, cut, cap), (long long)length);
        if (cap) CHECK(!memcmp(cut, text, cap - 1) && cut[cap > length ? length : cap - 1] == 0);
        for (size_t k = cap; k < length + 2; k++) CHECK(cut[k] == 'x');
    }
    CHECK_EQ_INT(fsdp_model_describe(NULL, cut, 5), 0);
    CHECK_EQ_INT(cut[0], 0);
    free(text);
    free(cut);
}
TEST(report, describe) {
    for (int s = 0; s < 4; s++) launch_at(s, describe);
}

/* ---- use ------------------------------------------------------------------------------------- */

/* Recompute: of the unit whose backward it is, and of a unit nested in it; gathers are counted. */
static void recompute(job *j) {
    int many = shards_of(j) > 1;
    make_model(j);
    for (int n = 0; n < 3; n++) {
        forward_unit(j, 0);
        CALL(j->w, fsdp_pre_forward(j->m.unit[1])); /* 2 is nested in 1 */
        forward_unit(j, 2);
        check_data(j, 1);
        CALL(j->w, fsdp_post_forward(j->m.unit[1]));
        int first = j->log.num;
        CALL(j->w, fsdp_pre_backward(j->m.unit[1]));
        CALL(j->w, fsdp_pre_forward(j->m.unit[1])); /* its own checkpoint */
        check_data(j, 1);
        CALL(j->w, fsdp_pre_forward(j->m.unit[2])); /* and the nested one's */
        CHECK(fsdp_unit_state(j->m.unit[2]) == FSDP_STATE_FORWARD);
        check_data(j, 2);
        CALL(j->w, fsdp_post_forward(j->m.unit[2]));
        CHECK(fsdp_unit_storage(j->m.unit[2]) == FSDP_STORAGE_UNSHARDED); /* its backward is next */
        CALL(j->w, fsdp_post_forward(j->m.unit[1]));
        CHECK(fsdp_unit_state(j->m.unit[1]) == FSDP_STATE_PRE_BACKWARD);
        backward_unit(j, 2);
        check_data(j, 1);
        write_grads(j, 1);
        CALL(j->w, fsdp_post_backward(j->m.unit[1]));
        reduced(j, 1);
        backward_unit(j, 0);
        CALL(j->w, fsdp_finalize_backward(j->m.model));
        for (int u = 0; u < UNITS; u++) CHECK_EQ_INT(gathers(j, first, j->m.unit[u]), many);
        update(j);
    }
}
TEST(use, recompute) { everywhere(recompute, 1); }

/* Evaluation between steps, before and after the update; it leaves nothing behind. */
static void no_grad(job *j) {
    fsdp_memory before, after;
    int64_t allocated = 0;
    make_model(j);
    for (int n = 0; n < 6; n++) {
        CALL(j->w, fsdp_set_grad_enabled(j->m.model, 0));
        for (int k = 0; k < n; k++) forward(j);
        CHECK_STATUS(fsdp_pre_backward(j->m.unit[0]), FSDP_ERR_INVALID_STATE);
        CALL(j->w, fsdp_set_grad_enabled(j->m.model, 1));
        if (n == 3) allocated = w_allocations(j->heap);
        if (n == 3) CALL(j->w, fsdp_model_memory(j->m.model, &before));
        forward(j);
        backward_unit(j, 2);
        backward_unit(j, 1);
        backward_unit(j, 0);
        /* It tells of the call that was refused. */
        CHECK_STATUS(fsdp_finalize_backward(j->m.model), FSDP_ERR_INVALID_STATE);
        update(j);
    }
    CALL(j->w, fsdp_model_memory(j->m.model, &after));
    check_same_memory(j, &before, &after);
    CHECK_EQ_INT(w_allocations(j->heap), allocated);
    /* Evaluation with a unit that stays gathered: the update is seen all the same. */
    CALL(j->w, fsdp_set_reshard_after_forward(j->m.model, j->m.unit[1], FSDP_RESHARD_NEVER));
    for (int n = 0; n < 3; n++) {
        CALL(j->w, fsdp_set_grad_enabled(j->m.model, 0));
        forward(j);
        CALL(j->w, fsdp_set_grad_enabled(j->m.model, 1));
        train_step(j);
    }
}
TEST(use, evaluation) { everywhere(no_grad, 1); }

/* A unit opened around others and several times in one forward; several forwards, one backward;
   backward in another order. Its gradients are written by the last visit of each. */
static void nested_and_repeated(job *j) {
    int many = shards_of(j) > 1;
    make_model(j);
    for (int n = 0; n < 6; n++) {
        int first = j->log.num;
        CALL(j->w, fsdp_pre_forward(j->m.unit[0]));
        CALL(j->w, fsdp_pre_forward(j->m.unit[0])); /* opened again while it is open */
        forward_unit(j, 1);
        CALL(j->w, fsdp_pre_forward(j->m.unit[2])); /* overlaps, nested in nothing */
        check_data(j, 0);
        CALL(j->w, fsdp_post_forward(j->m.unit[0]));
        check_data(j, 2);
        CALL(j->w, fsdp_post_forward(j->m.unit[2]));
        forward_unit(j, 1);
        CHECK_EQ_INT(gathers(j, first, j->m.unit[0]), many);
        CHECK_EQ_INT(gathers(j, first, j->m.unit[1]), 2 * many);
        static const int orders[6][3] = {{0, 1, 2}, {2, 1, 0}, {1, 0, 2},
                                         {1, 2, 0}, {0, 2, 1}, {2, 0, 1}};
        for (int k = 0; k < UNITS; k++) {
            int u = orders[n][k];
            if (u == 1) { /* the first visit: nobody writes */
                CALL(j->w, fsdp_pre_backward(j->m.unit[u]));
                CALL(j->w, fsdp_pre_backward(j->m.unit[u])); /* again: nothing to do */
                CALL(j->w, fsdp_post_backward(j->m.unit[u]));
            }
            backward_unit(j, u);
        }
        CALL(j->w, fsdp_finalize_backward(j->m.model));
        update(j);
    }
}
TEST(use, nested_and_repeated) { everywhere(nested_and_repeated, 1); }
