/* test_train.c - whole training runs: shards, gradients and every bit of them, whatever the number
   of ranks, the layout, the worker threads and the order of calls, against tests/core/oracle.h.

   SPDX-License-Identifier: MIT */
#define TAGS BITS | AT_NIGHT(ASAN | TSAN)
#define RANKS(n) ((n) > 3 ? MANY_RANKS : (n) == 2 ? VALGRIND : 0)
#include "harness.h"
#include <math.h> /* INFINITY, NAN, sqrt */
#include "lab.h"
#include "oracle.h"

enum { MAX_OPS = 4096, MAX_STEPS = 4 };

/* ---- what is trained ------------------------------------------------------------------------- */

typedef struct {
    o_dtypes dtypes;
    const char *name;
    double tolerance; /* of gradients to those in f64, relative to the largest of the net */
} numbers;
static const numbers kinds[] = {
    {{FSDP_F32, 0, 0}, "f32", 1e-4},
    {{FSDP_F32, FSDP_BF16, FSDP_F32}, "bf16_f32", 0.3},
    {{FSDP_F32, FSDP_BF16, FSDP_BF16}, "bf16_bf16", 0.3},
    {{FSDP_F32, FSDP_F32, FSDP_BF16}, "f32_bf16", 0.15},
    {{FSDP_F64, 0, 0}, "f64", 1e-12},
    {{FSDP_F32, FSDP_F16, FSDP_F32}, "f16_f32", 0.05},
    {{FSDP_BF16, 0, 0}, "bf16_stored", 0.5},
};
static const numbers several = {{0, 0, 0}, "several", 0.5}; /* each unit has its own */
enum { NUM_KINDS = (int)(sizeof kinds / sizeof kinds[0]) };

enum {
    T_FORWARDS_FIRST = 1, /* all microbatches' forwards, then their backwards in reverse */
    T_OWN = 2,            /* recompute between pre_ and post_backward */
    T_NESTED = 4,         /* recompute inside the backward of the others */
    T_EVAL = 8,           /* no-grad forwards between steps */
    T_EVAL_GRAD = 16,     /* forwards that no backward follows */
    T_AROUND = 32,        /* unit 0 is open around the others, and used first and last */
    T_AHEAD = 64,         /* the caller unshards the next unit */
    T_LEFT_OPEN = 128,    /* the last unit's backward is ended by finalize */
    T_TOGETHER = 256,     /* the next unit is opened before this one is closed */
    T_KEEP = 512,         /* gradients are added over two steps */
    T_TWICE = 1024,       /* a unit is used twice in a forward */
    T_WAIT = 2048,        /* unshard, wait and reshard where they change nothing */
    T_STAY = 4096,        /* parameters are kept after backward */
    T_SWITCH = 8192,      /* reshard_after_forward changes from step to step */
    T_PARTIAL = 16384,    /* unit 0 is reduced in every microbatch, others in the last only */
    T_LOSS = 32768,       /* an all-reduce of the caller's between forward and backward */
    T_FLAGS = 65536
};

typedef struct {
    o_net net;
    const numbers *kind;
    o_dtypes dtypes[O_UNITS];
    int flags, micros, sync_all, steps, fill_bytes;
} task;

/* How a task is run: must not change a bit. */
typedef struct {
    int lanes, layout, never, plain, mesh;
} place;
enum { MESH_NONE, MESH_WHOLE, MESH_REVERSED, MESHES };
enum { LAYOUT_PACKED, LAYOUT_DIRECT, LAYOUT_MIXED, LAYOUTS };
static const char *const layout_names[] = {"packed", "direct", "mixed"};
static const int64_t layout_min[] = {FSDP_DIRECT_NEVER, 1, 600};

static void add(o_op *ops, int *count, int kind, int a, int m) {
    o_op op = {kind, a, m};
    CHECK(*count < MAX_OPS);
    ops[(*count)++] = op;
}

enum {
    CHECKPOINT = 100,
    SWITCH,
    LOSS
}; /* compare with snapshot a; set reshard_after_forward to a */

static void script_forward(const task *t, o_op *ops, int *n, int m) {
    const o_net *net = &t->net;
    int around = t->flags & T_AROUND, open = -1;
    if (around) add(ops, n, O_PRE_FORWARD, 0, m);
    for (int k = 0; k < net->length; k++) {
        int u = net->seq[k], outer = around && u == 0;
        int next = k + 1 < net->length ? net->seq[k + 1] : -1;
        if (!outer && open != k) add(ops, n, O_PRE_FORWARD, u, m);
        if ((t->flags & T_AHEAD) && next >= 0) add(ops, n, O_UNSHARD, next, m);
        if ((t->flags & T_TOGETHER) && next >= 0 && next != u && !outer && !(around && next == 0)) {
            add(ops, n, O_PRE_FORWARD, next, m);
            open = k + 1;
        }
        if (t->flags & T_WAIT) {
            add(ops, n, O_UNSHARD, u, m);
            add(ops, n, O_WAIT, u, m);
        }
        add(ops, n, O_COMPUTE, k, m);
        if (!outer) add(ops, n, O_POST_FORWARD, u, m);
        if ((t->flags & T_WAIT) && !outer) add(ops, n, O_RESHARD, u, m);
    }
    if (around) add(ops, n, O_POST_FORWARD, 0, m);
}

static void script_backward(const task *t, o_op *ops, int *n, int m) {
    const o_net *net = &t->net;
    int around = t->flags & T_AROUND;
    if (around) add(ops, n, O_PRE_BACKWARD, 0, m);
    for (int k = net->length - 1; k >= 0; k--) {
        int u = net->seq[k], outer = around && u == 0;
        if ((t->flags & T_NESTED) && !outer && (around || k < net->length - 1)) {
            add(ops, n, O_PRE_FORWARD, u, m);
            add(ops, n, O_COMPUTE, k, m);
            add(ops, n, O_POST_FORWARD, u, m);
        }
        if (!outer) add(ops, n, O_PRE_BACKWARD, u, m);
        if (t->flags & T_OWN) {
            add(ops, n, O_PRE_FORWARD, u, m);
            add(ops, n, O_COMPUTE, k, m);
            add(ops, n, O_POST_FORWARD, u, m);
        }
        if ((t->flags & T_AHEAD) && k > 0) add(ops, n, O_UNSHARD, net->seq[k - 1], m);
        add(ops, n, O_GRAD, k, m);
        if (!outer && !((t->flags & T_LEFT_OPEN) && k == 0)) add(ops, n, O_POST_BACKWARD, u, m);
    }
    if (around && !(t->flags & T_LEFT_OPEN)) add(ops, n, O_POST_BACKWARD, 0, m);
}

static void script_micro_end(const task *t, o_op *ops, int *n, int m, int last) {
    if ((t->flags & T_FORWARDS_FIRST) || !last) add(ops, n, O_SET_LAST, last, m);
    add(ops, n, O_FINALIZE, 0, m);
    if (!last) add(ops, n, O_SET_LAST, 1, m);
}

/* All steps; snapshots 2s and 2s+1 are before and after the optimizer of step s. */
static int script(const task *t, o_op *ops) {
    int n = 0, all = t->sync_all || t->micros == 1;
    for (int s = 0; s < t->steps; s++) {
        if (t->flags & T_SWITCH)
            add(ops, &n, SWITCH, s % 2 ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_NEVER, 0);
        if (t->flags & T_EVAL) {
            add(ops, &n, O_SET_GRAD, 0, 0);
            script_forward(t, ops, &n, O_MICROS - 1);
            add(ops, &n, O_SET_GRAD, 1, 0);
        }
        if (t->flags & T_EVAL_GRAD) script_forward(t, ops, &n, O_MICROS - 1);
        for (int m = 0; m < t->micros && (t->flags & T_FORWARDS_FIRST); m++)
            script_forward(t, ops, &n, m);
        for (int i = 0; i < t->micros; i++) {
            int last = i + 1 == t->micros, m = t->flags & T_FORWARDS_FIRST ? t->micros - 1 - i : i;
            add(ops, &n, O_SET_SYNC, all || last, -1);
            if (t->flags & T_PARTIAL) add(ops, &n, O_SET_SYNC, 1, 0);
            if (!(t->flags & T_FORWARDS_FIRST)) script_forward(t, ops, &n, m);
            if (t->flags & T_LOSS) add(ops, &n, LOSS, 0, m);
            script_backward(t, ops, &n, m);
            script_micro_end(t, ops, &n, m, last);
        }
        add(ops, &n, CHECKPOINT, 2 * s, 0);
        add(ops, &n, O_UPDATE, 0, 0);
        add(ops, &n, CHECKPOINT, 2 * s + 1, 0);
        if (!((t->flags & T_KEEP) && s % 2 == 0)) add(ops, &n, O_ZERO_GRAD, 0, 0);
    }
    return n;
}

/* ---- what has to come out -------------------------------------------------------------------- */

typedef struct {
    int ops, has[2 * MAX_STEPS][O_UNITS][O_PARAMS];
    double *master[2 * MAX_STEPS][O_UNITS][O_PARAMS], *grad[2 * MAX_STEPS][O_UNITS][O_PARAMS];
    double *memory;
    o_op op[MAX_OPS];
} story;

static void snapshot(story *s, int at, const o_model *o, double **memory) {
    for (int u = 0; u < o->net->count; u++)
        for (int i = 0; i < o->net->units[u].count; i++) {
            size_t numel = (size_t)o->net->units[u].params[i].numel;
            s->has[at][u][i] = o->has_grad[u] && o->param_has_grad[u][i];
            s->master[at][u][i] = *memory;
            memcpy(*memory, o->master[u][i], numel * sizeof **memory);
            s->grad[at][u][i] = *memory += numel;
            memcpy(*memory, o->grad[u][i], numel * sizeof **memory);
            *memory += numel;
        }
}

/* f64: the true values instead of those in the task's dtypes. */
static story *tell(const task *t, int world, int f64) {
    story *s = (story *)lab_zeros(1, sizeof *s);
    o_dtypes wide[O_UNITS];
    for (int u = 0; u < O_UNITS; u++) wide[u].stored = wide[u].param = wide[u].reduce = FSDP_F64;
    o_model *o = o_make(&t->net, world, f64 ? wide : t->dtypes);
    double *memory = s ? (double *)malloc((size_t)(4 * MAX_STEPS * o_numel(&t->net) + 1) *
                                          sizeof *memory)
                       : NULL;
    CHECK(o && memory);
    s->memory = memory;
    s->ops = script(t, s->op);
    for (int n = 0, from = 0; n < s->ops; n++) {
        if (s->op[n].kind != CHECKPOINT) continue;
        o_run(o, s->op + from, n - from);
        snapshot(s, s->op[n].a, o, &memory);
        from = n + 1;
    }
    o_free(o);
    return s;
}

static void forget(story *s) {
    if (s) free(s->memory);
    free(s);
}

/* Largest distance of gradients (in units of the largest of the net) and parameters. */
static void distance(const task *t, const story *a, const story *b, double *grads, double *params) {
    *grads = *params = 0;
    for (int at = 0; at < 2 * t->steps; at++) {
        double most = 0.02, off = 0;
        for (int u = 0; u < t->net.count; u++)
            for (int i = 0; i < t->net.units[u].count; i++) {
                W_CHECK(a->has[at][u][i] == b->has[at][u][i], "gradients of different parameters");
                for (int64_t e = 0; e < t->net.units[u].params[i].numel; e++) {
                    double x = a->grad[at][u][i][e], y = b->grad[at][u][i][e];
                    double p = a->master[at][u][i][e] - b->master[at][u][i][e];
                    if (p < 0) p = -p;
                    if (p > *params) *params = p;
                    if (!a->has[at][u][i]) continue;
                    most = y > most ? y : -y > most ? -y : most;
                    off = x - y > off ? x - y : y - x > off ? y - x : off;
                }
            }
        if (off / most > *grads) *grads = off / most;
    }
}

/* ---- the library's run ----------------------------------------------------------------------- */

typedef struct {
    const task *task;
    const story *story;
    fsdp_world *world;
    fsdp_mesh *mesh; /* NULL: all ranks */
    fsdp_model *model;
    fsdp_unit *unit[O_UNITS];
    int rank, size, step; /* rank: place in the mesh */
    o_acts acts[O_MICROS][O_SEQ];
    double *tmp;
    int64_t filled;
} run;

static void fill(void *user, const fsdp_param_view *block) {
    run *x = (run *)user;
    int u = (int)(intptr_t)block->unit_user;
    CHECK(block->numel > 0);
    for (int64_t k = 0; k < block->numel; k++)
        lab_put(block->data, block->dtype, k,
                lab_round(block->dtype,
                          o_initial(&x->task->net, u, block->index, fsdp_view_index(block, k))));
    x->filled += block->numel;
}

static void build(run *x, const task *t, const place *p) {
    fsdp_model_desc md = FSDP_ZERO;
    int64_t mine = 0;
    if (t->kind != &several) { /* else each unit says it */
        md.param_dtype = t->kind->dtypes.param;
        md.reduce_dtype = t->kind->dtypes.reduce;
    }
    md.reshard_after_forward = p->never ? FSDP_RESHARD_NEVER : FSDP_RESHARD_DEFAULT;
    md.debug = 1;
    md.direct_min = layout_min[p->layout];
    md.fill_bytes = t->fill_bytes;
    md.mesh = x->mesh;
    CALL(x->world, fsdp_model_create(x->world, &md, &x->model));
    for (int u = 0; u < t->net.count; u++) {
        const o_unit *spec = &t->net.units[u];
        fsdp_param_desc pd[O_PARAMS];
        fsdp_unit_desc ud = FSDP_ZERO;
        for (int i = 0; i < spec->count; i++) {
            const o_param *q = &spec->params[i];
            pd[i] = lab_desc(q->ndim, q->shape, q->shard_dim - (i % 2 ? q->ndim : 0),
                             t->dtypes[u].stored, q->frozen);
        }
        ud.user = (void *)(intptr_t)u;
        ud.param_dtype = t->kind == &several ? t->dtypes[u].param : 0;
        ud.reduce_dtype = t->kind == &several ? t->dtypes[u].reduce : 0;
        if ((t->flags & T_AROUND) && u == 0) ud.reshard_after_forward = FSDP_RESHARD_NEVER;
        x->unit[u] = lab_unit(x->world, x->model, &ud, pd, spec->count);
    }
    CALL(x->world, fsdp_set_reduce_scatter_unused_params(x->model, NULL, 1)); /* see o_uses */
    CALL(x->world, fsdp_init_params(x->model, fill, x));
    if (t->flags & T_STAY) CALL(x->world, fsdp_set_reshard_after_backward(x->model, NULL, 0));
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(x->model, &v)) mine += v.numel;
    W_CHECK(mine == x->filled, "init_params filled %lld of %lld", (long long)x->filled,
            (long long)mine);
}

static fsdp_dtype compute_dtype(const task *t, int u) {
    return t->dtypes[u].param ? t->dtypes[u].param : t->dtypes[u].stored;
}

/* Full tensors and gradients travel through doubles: exact, and the same code for every dtype. */
static void load_params(run *x, int u, double **out, double *at) {
    const o_unit *spec = &x->task->net.units[u];
    for (int i = 0; i < spec->count; i++) {
        const void *data = fsdp_data(x->unit[u], i);
        W_CHECK(data != NULL, "no data of unit %d: %s", u, fsdp_last_error(x->world));
        lab_load(at, data, compute_dtype(x->task, u), spec->params[i].numel);
        out[i] = at;
        at += spec->params[i].numel;
    }
}

static void store_grad(run *x, int u, int i, const double *dp, double *old) {
    int64_t numel = x->task->net.units[u].params[i].numel;
    fsdp_dtype dtype = compute_dtype(x->task, u);
    void *grad = fsdp_grad(x->unit[u], i);
    W_CHECK(grad != NULL, "no gradient of unit %d", u);
    lab_load(old, grad, dtype, numel);
    for (int64_t e = 0; e < numel; e++)
        old[e] = lab_round(dtype, o_mid(dtype, 0, old[e] + dp[e]));
    lab_store(grad, dtype, old, numel);
}

static void compute(run *x, int k, int m, int backward) {
    const o_net *net = &x->task->net;
    int u = net->seq[k], uses[O_PARAMS];
    const o_unit *spec = &net->units[u];
    int64_t numel = o_numel(net);
    double *params[O_PARAMS], *dp[O_PARAMS], dy[O_WIDTH], *at = x->tmp + numel, *rest;
    load_params(x, u, params, x->tmp);
    for (int i = 0; i < spec->count; i++) {
        uses[i] = o_uses(net, x->step, m, x->rank, u, i);
        dp[i] = at;
        at += spec->params[i].numel;
    }
    rest = at;
    if (backward)
        o_feed_back(net, compute_dtype(x->task, u), x->step, m, x->rank, k, x->acts[m], dy);
    else o_feed(net, x->step, m, x->rank, k, x->acts[m]);
    o_apply(net, compute_dtype(x->task, u), u, params, uses, &x->acts[m][k], backward ? dy : NULL,
            dp, rest);
    for (int i = 0; i < spec->count && backward; i++)
        if (uses[i] && !spec->params[i].frozen) store_grad(x, u, i, dp[i], rest);
}

static int64_t count_nonzero(const void *data, fsdp_dtype dtype, int64_t numel) {
    int64_t n = 0;
    for (int64_t k = 0; k < numel; k++) {
        double value = lab_get(data, dtype, k);
        n += value < 0 || value > 0 || h_non_finite(value);
    }
    return n;
}

/* This rank's shards and gradients against a snapshot; and that padding is zero. */
static void compare(run *x, int at) {
    fsdp_param_view v = FSDP_ZERO;
    int64_t shards[FSDP_DTYPE_COUNT] = {0}, grads[FSDP_DTYPE_COUNT] = {0};
    int64_t frozen[FSDP_DTYPE_COUNT] = {0};
    while (fsdp_next_param(x->model, &v)) {
        int u = (int)(intptr_t)v.unit_user, i = v.index;
        int has = x->story->has[at][u][i];
        W_CHECK((v.shard_grad != NULL) == has, "step %d: unit %d parameter %d has %s gradient",
                x->step, u, i, has ? "no" : "a");
        for (int64_t k = 0; k < v.numel; k++) {
            int64_t e = fsdp_view_index(&v, k);
            double value = lab_get(v.shard, v.dtype, k), grad;
            W_CHECK(lab_same(value, x->story->master[at][u][i][e]),
                    "step %d: unit %d parameter %d element %lld is %.17g, expected %.17g", x->step,
                    u, i, (long long)e, value, x->story->master[at][u][i][e]);
            shards[v.dtype] += v.requires_grad && (value < 0 || value > 0);
            frozen[v.dtype] += !v.requires_grad && (value < 0 || value > 0);
            if (!has) continue;
            grad = lab_get(v.shard_grad, v.dtype, k);
            W_CHECK(lab_same(grad, x->story->grad[at][u][i][e]),
                    "step %d: unit %d gradient %d element %lld is %.17g, expected %.17g", x->step,
                    u, i, (long long)e, grad, x->story->grad[at][u][i][e]);
            grads[v.dtype] += grad < 0 || grad > 0;
        }
    }
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        /* frozen parameters lie behind the trainable ones in the same block, which no call shows */
        int64_t behind;
        const void *block = lib_frozen(x->model, (fsdp_dtype)d, &behind);
        fsdp_flat flat;
        CALL(x->world, fsdp_model_flat(x->model, d, &flat));
        W_CHECK(count_nonzero(flat.shards, d, flat.numel) == shards[d],
                "step %d: padding of shards is not zero", x->step);
        W_CHECK(count_nonzero(flat.grads, d, flat.numel) == grads[d],
                "step %d: padding of gradients, or a gradient that nobody has, is not zero",
                x->step);
        if (!behind) continue;
        W_CHECK(count_nonzero(block, d, behind) == frozen[d],
                "step %d: padding of frozen parameters is not zero", x->step);
    }
}

/* The same in one piece: parameter 0 of each unit, and its gradient. */
static void compare_full(run *x, int at) {
    for (int u = 0; u < x->task->net.count; u++) {
        fsdp_dtype dtype = x->task->dtypes[u].stored;
        const o_param *p = &x->task->net.units[u].params[0];
        for (int grad = 0; grad < 2 - p->frozen; grad++) {
            char *full = (char *)malloc((size_t)p->numel * 8 + 1);
            CHECK(full != NULL);
            CALL(x->world, grad ? fsdp_param_full_grad(x->unit[u], 0, full)
                                : fsdp_param_full(x->unit[u], 0, full));
            for (int64_t e = 0; e < p->numel; e++) {
                double value = lab_get(full, dtype, e), expected = x->story->master[at][u][0][e];
                if (grad) expected = x->story->has[at][u][0] ? x->story->grad[at][u][0][e] : 0;
                W_CHECK(lab_same(value, expected), "full: unit %d element %lld is %g, expected %g",
                        u, (long long)e, value, expected);
            }
            free(full);
        }
    }
}

/* A sum over the ranks while lanes may be at work. */
static void loss(run *x, int m) {
    double values[2] = {x->acts[m][x->task->net.length - 1].y[0], (double)(1 << x->rank)};
    CALL(x->world, fsdp_all_reduce(x->world, x->mesh, values, 2, FSDP_F64, FSDP_SUM));
    W_CHECK(lab_same(values[1], (double)((1 << x->size) - 1)), "all_reduce gives %g", values[1]);
}

static void update(run *x) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(x->model, &v))
        for (int64_t k = 0; v.shard_grad && k < v.numel; k++) {
            double p = lab_get(v.shard, v.dtype, k), g = lab_get(v.shard_grad, v.dtype, k);
            lab_put(v.shard, v.dtype, k, o_updated(v.dtype, p, g));
        }
    CALL(x->world, fsdp_params_changed(x->model));
    x->step++;
}

static void play(run *x, o_op op) {
    fsdp_world *w = x->world;
    fsdp_unit *u = op.a >= 0 && op.a < O_UNITS ? x->unit[op.a] : NULL;
    switch (op.kind) {
    case O_PRE_FORWARD: CALL(w, fsdp_pre_forward(u)); break;
    case O_POST_FORWARD: CALL(w, fsdp_post_forward(u)); break;
    case O_PRE_BACKWARD: CALL(w, fsdp_pre_backward(u)); break;
    case O_POST_BACKWARD: CALL(w, fsdp_post_backward(u)); break;
    case O_COMPUTE: compute(x, op.a, op.m, 0); break;
    case O_GRAD: compute(x, op.a, op.m, 1); break;
    case O_FINALIZE: CALL(w, fsdp_finalize_backward(x->model)); break;
    case O_UPDATE: update(x); break;
    case O_ZERO_GRAD: CALL(w, fsdp_zero_grad(x->model)); break;
    case O_SET_SYNC:
        CALL(w, fsdp_set_requires_gradient_sync(x->model, op.m < 0 ? NULL : x->unit[op.m], op.a));
        break;
    case SWITCH: CALL(w, fsdp_set_reshard_after_forward(x->model, NULL, op.a)); break;
    case LOSS: loss(x, op.m); break;
    case O_SET_LAST: CALL(w, fsdp_set_is_last_backward(x->model, op.a)); break;
    case O_SET_GRAD: CALL(w, fsdp_set_grad_enabled(x->model, op.a)); break;
    case O_UNSHARD: CALL(w, fsdp_unshard(u)); break;
    case O_WAIT: CALL(w, fsdp_wait(u)); break;
    case O_RESHARD: CALL(w, fsdp_reshard(u)); break;
    default:
        compare(x, op.a);
        if (op.a % 2) compare_full(x, op.a);
        break;
    }
}

/* One rank's part of one run, in a world that is there already. */
static run *train_begin(fsdp_world *world, fsdp_mesh *mesh, const task *t, const story *s,
                        const place *p) {
    run *x = (run *)lab_zeros(1, sizeof *x);
    x->task = t;
    x->story = s;
    x->world = world;
    x->mesh = mesh;
    x->rank = mesh ? fsdp_mesh_rank(mesh, 0) : fsdp_rank(world);
    x->size = mesh ? fsdp_mesh_size(mesh, 0) : fsdp_world_size(world);
    x->tmp = (double *)malloc((size_t)(4 * o_numel(&t->net) + 1) * sizeof *x->tmp);
    CHECK(x->tmp != NULL);
    build(x, t, p);
    return x;
}

static void train_end(run *x) {
    fsdp_model_destroy(x->model);
    free(x->tmp);
    free(x);
}

static void train(fsdp_world *world, fsdp_mesh *mesh, const task *t, const story *s,
                  const place *p) {
    run *x = train_begin(world, mesh, t, s, p);
    for (int n = 0; n < s->ops; n++) play(x, s->op[n]);
    train_end(x);
}

/* ---- random nets and tasks ------------------------------------------------------------------- */

/* Sizes around the world's, zero, one and multiples of 16, which can be gathered in place. */
static void random_param(uint64_t *state, int world, o_param *p) {
    const int sizes[] = {0,        1, 2, 3, 5, 7, 16, world - 1, world, world + 1, 2 * world - 1,
                         3 * world};
    p->ndim = 1 + lab_pick(state, O_DIMS);
    p->shard_dim = lab_pick(state, 3) ? 0 : lab_pick(state, p->ndim);
    p->frozen = lab_pick(state, 5) == 0;
    p->numel = 1;
    for (int d = 0; d < p->ndim; d++) {
        p->shape[d] = lab_pick(state, 12) ? sizes[1 + lab_pick(state, 11)] : 0;
        if (d == 1 && lab_pick(state, 2)) p->shape[d] = 16;
        if (d == 2) p->shape[d] = 1 + lab_pick(state, 3);
        p->numel *= p->shape[d];
    }
}

static void random_net(uint64_t *state, int world, o_net *net) {
    memset(net, 0, sizeof *net);
    net->seed = h_rand64(state);
    net->count = 1 + lab_pick(state, 4);
    net->usage = lab_pick(state, 3);
    for (int u = 0; u < net->count; u++) {
        int frozen = lab_pick(state, 8) == 0;
        net->units[u].count = 1 + lab_pick(state, O_PARAMS);
        for (int i = 0; i < net->units[u].count; i++) {
            random_param(state, world, &net->units[u].params[i]);
            if (frozen) net->units[u].params[i].frozen = 1;
        }
        net->seq[net->length++] = u;
    }
}

static void random_task(uint64_t *state, int world, const numbers *kind, int variant, task *t) {
    static const int flags[] = {
        0,       T_FORWARDS_FIRST, T_OWN,      T_NESTED,  T_EVAL,  T_AROUND,
        T_AHEAD, T_LEFT_OPEN,      T_TOGETHER, T_KEEP,    T_TWICE, T_EVAL_GRAD,
        T_WAIT,  T_STAY,           T_SWITCH,   T_PARTIAL, T_LOSS};
    memset(t, 0, sizeof *t);
    random_net(state, world, &t->net);
    t->kind = kind;
    for (int u = 0; u < O_UNITS; u++)
        t->dtypes[u] = kind == &several ? kinds[lab_pick(state, NUM_KINDS)].dtypes : kind->dtypes;
    t->steps = 2 + lab_pick(state, 2);
    t->flags = flags[lab_pick(state, 17)];
    if (lab_pick(state, 2)) t->flags |= (int)h_rand64(state) & (T_FLAGS - 1);
    t->micros = variant < 2 ? 1 : variant < 6 ? 2 : 3;
    t->sync_all = variant / 2 % 2;
    t->fill_bytes = lab_pick(state, 2) ? 1 + lab_pick(state, 200) : 5000;
    if (t->flags & (T_AROUND | T_TWICE)) t->net.seq[t->net.length++] = 0;
    if ((t->flags & T_TWICE) && t->net.count > 1) t->net.seq[t->net.length++] = 1;
    if (!(t->flags & T_AROUND) && t->net.length > t->net.count) t->flags &= ~T_LEFT_OPEN;
}
enum { VARIANTS = 10 };

/* ---- parity ---------------------------------------------------------------------------------- */

enum { MAX_TASKS = 400 };
typedef struct {
    int tasks, places;
    task *task;
    story **story;
} batch;

/* None, all ranks, and all ranks from the last to the first. */
static void make_meshes(fsdp_world *w, fsdp_mesh **out) {
    int32_t ranks[O_WORLD];
    const int32_t size = fsdp_world_size(w);
    for (int i = 0; i < size; i++) ranks[i] = size - 1 - i;
    out[MESH_NONE] = NULL;
    CALL(w, fsdp_mesh_1d(w, "whole", &out[MESH_WHOLE]));
    out[MESH_REVERSED] = lab_mesh(w, 1, &size, NULL, ranks);
}

/* Every layout, with every way to run ops; the rest changes from run to run. */
static void run_batch(lab_rank *r) {
    const batch *b = (const batch *)r->arg;
    fsdp_comm_ops plain = w_plain();
    fsdp_world *worlds[6];
    fsdp_mesh *meshes[6][MESHES];
    for (int i = 0; i < 6; i++) {
        worlds[i] = lab_world(r, i, i / 2, i % 2 ? &plain : NULL);
        make_meshes(worlds[i], meshes[i]);
    }
    for (int n = 0; n < b->tasks; n++)
        for (int k = 0; k < b->places; k++) {
            place p;
            uint64_t h = lab_hash(b->task[n].net.seed, (uint64_t)k, 5, 0);
            p.layout = k % LAYOUTS;
            p.lanes = (k / LAYOUTS + (b->places < 9 ? n : 0)) % 3;
            p.never = h % 2;
            p.plain = h / 2 % 3 == 0;
            p.mesh = (int)(h / 6 % MESHES);
            snprintf(w_case, sizeof w_case,
                     "task %d: W=%d %s flags=%x micros=%d sync_all=%d; %s lanes=%d "
                     "never=%d plain=%d mesh=%d",
                     n, r->size, b->task[n].kind->name, (unsigned)b->task[n].flags,
                     b->task[n].micros, b->task[n].sync_all,
                     layout_names[p.layout], p.lanes, p.never, p.plain, p.mesh);
            int i = 2 * p.lanes + p.plain;
            train(worlds[i], meshes[i][p.mesh], &b->task[n], b->story[n], &p);
        }
    for (int i = 0; i < 6; i++) CALL(NULL, fsdp_shutdown(worlds[i]));
}

/* Makes the tasks of one kind, checks the oracle's numbers against f64, and runs the tasks. */
static void parity(const numbers *kind, int world, int tasks, int places, int threads) {
    batch b;
    lab_how how = FSDP_ZERO;
    uint64_t state = h_seed() * 1000003 + (uint64_t)(world * 64 + kind->name[0] + kind->name[1]);
    double worst = 0, worst_param = 0;
    memset(&b, 0, sizeof b);
    b.tasks = tasks;
    b.places = places;
    b.task = (task *)lab_zeros((size_t)tasks, sizeof *b.task);
    b.story = (story **)lab_zeros((size_t)tasks, sizeof *b.story);
    for (int n = 0; n < tasks; n++) {
        double grads, params;
        random_task(&state, world, kind, n % VARIANTS, &b.task[n]);
        b.story[n] = tell(&b.task[n], world, 0);
        story *truth = tell(&b.task[n], world, 1);
        snprintf(w_case, sizeof w_case, "task %d", n);
        distance(&b.task[n], b.story[n], truth, &grads, &params);
        if (grads > worst) worst = grads;
        if (params > worst_param) worst_param = params;
        forget(truth);
    }
    CHECK_NEAR(worst, 0, kind->tolerance);
    CHECK_NEAR(worst_param, 0, kind->tolerance);
    how.job = "train", how.bare = 1, how.processes = !threads;
    lab_run(world, &how, run_batch, &b);
    h_message("%d runs of %d trainings on %d %s; distance to f64: gradients %.1e, parameters %.1e",
              tasks * places, tasks, world, threads ? "threads" : "processes", worst, worst_param);
    for (int n = 0; n < tasks; n++) forget(b.story[n]);
    free(b.story);
    free(b.task);
}

typedef struct {
    const char *name;
    int world;
    const numbers *kind;
} parity_row;
static const parity_row rows[] = {
#define ROW(w, k, name)                                                                            \
    { "W=" #w "/" name, w, k }
#define ROWS_OF(w)                                                                                 \
    ROW(w, &kinds[0], "f32"), ROW(w, &kinds[1], "bf16_f32"), ROW(w, &kinds[2], "bf16_bf16"),       \
        ROW(w, &kinds[3], "f32_bf16"), ROW(w, &kinds[4], "f64"), ROW(w, &kinds[5], "f16_f32"),     \
        ROW(w, &kinds[6], "bf16_stored"), ROW(w, &several, "several")
    ROWS_OF(1), ROWS_OF(2), ROWS_OF(3), ROWS_OF(4), ROWS_OF(5),
};

TEST_P(train, parity, rows, RANKS(row->world)) { parity(row->kind, row->world, VARIANTS, W_SLOW ? 2 : 4, 1); }
TEST_P(long_train, parity, rows, SECONDS(300) | NIGHT) { parity(row->kind, row->world, 2 * VARIANTS, 9, 1); }

static const parity_row process_rows[] = {{"W=2/f32", 2, &kinds[0]},
                                          {"W=3/bf16_f32", 3, &kinds[1]},
                                          {"W=4/f32_bf16", 4, &kinds[3]},
                                          {"W=5/f64", 5, &kinds[4]},
                                          {"W=3/several", 3, &several}};

TEST_P(train, processes, process_rows, RANKS(row->world)) { parity(row->kind, row->world, VARIANTS, 3, 0); }

/* ---- several models, some of the ranks, many units, many forwards ---------------------------- */

typedef struct {
    task task[2];
    story *story[2];
} pair;

static const lab_how several_worlds = {NULL, 0, 0, 1, 0, NULL, NULL};

/* Two models of one world, op by op in turn. */
static void pair_rank(lab_rank *r) {
    const pair *b = (const pair *)r->arg;
    for (int lanes = 0; lanes < 3; lanes++) {
        fsdp_world *w = r->w = lab_world(r, lanes, lanes, NULL);
        place p = {lanes, lanes, 0, 0, 0};
        run *x[2];
        snprintf(w_case, sizeof w_case, "W=%d lanes=%d", r->size, lanes);
        for (int i = 0; i < 2; i++) x[i] = train_begin(w, NULL, &b->task[i], b->story[i], &p);
        for (int n = 0; n < b->story[0]->ops || n < b->story[1]->ops; n++)
            for (int i = 0; i < 2; i++)
                if (n < b->story[i]->ops) play(x[i], b->story[i]->op[n]);
        for (int i = 0; i < 2; i++) train_end(x[i]);
        lab_end(r);
    }
}

static const struct {
    const char *name;
    int world;
} worlds[] = {{"W=1", 1}, {"W=2", 2}, {"W=3", 3}, {"W=4", 4}, {"W=5", 5}};

TEST_P(train, two_models, worlds, RANKS(row->world)) {
    uint64_t state = h_seed() * 41 + (uint64_t)row->world;
    for (int n = 0; n < 6; n++) {
        pair *b = (pair *)lab_zeros(1, sizeof *b);
        for (int i = 0; i < 2; i++) {
            random_task(&state, row->world, &kinds[lab_pick(&state, NUM_KINDS)], n, &b->task[i]);
            b->story[i] = tell(&b->task[i], row->world, 0);
        }
        lab_run(row->world, &several_worlds, pair_rank, b);
        for (int i = 0; i < 2; i++) forget(b->story[i]);
        free(b);
    }
}

/* A mesh of two of four ranks, in another order; the others go on by themselves. */
static void some_rank(lab_rank *r) {
    const pair *b = (const pair *)r->arg;
    const int rank = r->rank;
    static const int32_t members[2] = {3, 1}, two = 2;
    for (int lanes = 0; lanes < 3; lanes++) {
        fsdp_world *w = r->w = lab_world(r, lanes, lanes, NULL);
        fsdp_mesh *mesh = lab_mesh(w, 1, &two, NULL, members);
        fsdp_model *none;
        fsdp_model_desc outside = FSDP_ZERO;
        place p = {lanes, LAYOUT_MIXED, 0, 0, 0};
        CHECK_EQ_INT(fsdp_mesh_rank(mesh, 0), rank == 3 ? 0 : rank == 1 ? 1 : -1);
        outside.mesh = mesh;
        if (rank % 2) train(w, mesh, &b->task[0], b->story[0], &p);
        else CHECK_STATUS(fsdp_model_create(w, &outside, &none), FSDP_ERR_INVALID_ARG);
        CALL(w, fsdp_barrier(w));
        lab_end(r);
    }
}

TEST(train, some_ranks) {
    uint64_t state = h_seed();
    for (int n = 0; n < 10; n++) {
        pair *b = (pair *)lab_zeros(1, sizeof *b);
        random_task(&state, 2, &kinds[n % NUM_KINDS], n, &b->task[0]);
        b->story[0] = tell(&b->task[0], 2, 0);
        lab_run(4, &several_worlds, some_rank, b);
        forget(b->story[0]);
        free(b);
    }
}

/* More units than a lane holds records, and more forwards than are ever recorded. */
static void many_rank(lab_rank *r) {
    enum { UNITS = 150, FORWARDS = 40000 };
    for (int lanes = 0; lanes < 3; lanes++) {
        fsdp_world *w = r->w = lab_world(r, lanes, lanes, NULL);
        fsdp_model *m = lab_model(w, NULL);
        static __thread fsdp_unit *u[UNITS];
        fsdp_param_desc p = fsdp_mat("w", 3, 16);
        fsdp_memory memory, after;
        for (int i = 0; i < UNITS; i++) u[i] = lab_unit(w, m, NULL, &p, 1);
        for (int step = 0; step < 2; step++) {
            for (int i = 0; i < UNITS; i++) lab_forward(w, u[i]);
            for (int i = UNITS - 1; i >= 0; i--) {
                CALL(w, fsdp_pre_backward(u[i]));
                for (int e = 0; e < 48; e++)
                    ((float *)fsdp_grad(u[i], 0))[e] += (float)(i + e + r->rank);
                CALL(w, fsdp_post_backward(u[i]));
            }
            CALL(w, fsdp_finalize_backward(m));
        }
        for (int i = 0; i < UNITS; i++) {
            const fsdp_param_view v = lab_view(w, u[i], 0);
            for (int64_t k = 0; k < v.numel; k++) {
                float sum = 0, scale = 1.0f / (float)r->size;
                for (int q = 0; q < r->size; q++)
                    sum += (float)(i + (int)fsdp_view_index(&v, k) + q);
                sum = sum * scale;
                CHECK_EQ_INT(lab_same((double)((float *)v.shard_grad)[k], (double)(sum + sum)), 1);
            }
        }
        if (r->size > 1 && lanes) { /* evaluation without saying so: hooks that nothing ends */
            lab_end(r);
            continue;
        }
        for (int n = 0; n < FORWARDS; n++) {
            if (n == FORWARDS / 2) CALL(w, fsdp_model_memory(m, &memory));
            lab_forward(w, u[n % 3]);
        }
        CALL(w, fsdp_model_memory(m, &after));
        CHECK_EQ_INT(memory.host_bytes, after.host_bytes);
        lab_backward(w, u[0]);
        CALL(w, fsdp_finalize_backward(m));
        CHECK_STATUS(fsdp_pre_backward(u[0]), FSDP_ERR_INVALID_STATE);
        lab_end(r);
    }
}

TEST_P(train, many_units, worlds, RANKS(row->world)) {
    if (row->world > 2) return;
    lab_run(row->world, &several_worlds, many_rank, NULL);
}

/* ---- every small unit ------------------------------------------------------------------------ */

enum { WALK_UNITS = 64, WALK_SHAPES = 1200, WALK_WORLD = 4 };
enum {
    WALK_PACKED,
    WALK_DIRECT,
    WALK_WIDE,
    WALK_LAYOUTS
}; /* WIDE: sizes of which more are direct */

typedef struct {
    int world, partners, num_shapes; /* partners: of each shape in units of two; -1: all */
    uint64_t seed;
    o_param shape[WALK_SHAPES];
    int64_t cases, direct, elements;
} walk;

/* All shapes of 1 to 3 dims of 0 to W+2, sharded along each dim. */
static void walk_shapes(walk *w) {
    int top = w->world + 3;
    for (int ndim = 1; ndim <= 3; ndim++)
        for (int code = 0; code < (ndim > 2 ? top * top * top : ndim > 1 ? top * top : top); code++)
            for (int dim = 0; dim < ndim; dim++) {
                CHECK(w->num_shapes < WALK_SHAPES);
                o_param *p = &w->shape[w->num_shapes++];
                p->ndim = ndim;
                p->shard_dim = dim;
                p->shape[0] = code % top;
                p->shape[1] = code / top % top;
                p->shape[2] = code / top / top;
            }
}

typedef struct {
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *unit[WALK_UNITS];
    fsdp_layout_param lay[WALK_UNITS][2];
    int count[WALK_UNITS], units, first, layout, rank, size;
} walk_batch;

/* Integers that f32 holds, also summed over the ranks. */
static float walk_value(int u, int i, int64_t e) {
    return (float)(1 + (u * 37 + i * 101 + e * 7) % 9973);
}
static float walk_grad(int u, int i, int64_t e, int rank) {
    return (float)((1 + (e * 13 + 3 * i + u) % 1009) * (rank + 1));
}

static void walk_fill(void *user, const fsdp_param_view *block) {
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        ((float *)block->data)[k] = walk_value((int)(intptr_t)block->unit_user, block->index,
                                               fsdp_view_index(block, k));
}

static void walk_add(walk_batch *b, const walk *w, int one, int two) {
    int chosen[2] = {one, two}, u = b->units;
    fsdp_param_desc pd[2];
    fsdp_unit_desc ud = FSDP_ZERO;
    b->count[u] = two < 0 ? 1 : 2;
    for (int i = 0; i < b->count[u]; i++) {
        const o_param *p = &w->shape[chosen[i]];
        pd[i] = lab_desc(p->ndim, p->shape, p->shard_dim, FSDP_F32, 0);
        if (b->layout == WALK_WIDE) pd[i].shape[p->ndim - 1] *= 16;
    }
    ud.user = (void *)(intptr_t)u;
    ud.reshard_after_forward = (b->first + u) % 4 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
    b->unit[b->units++] = lab_unit(b->world, b->model, &ud, pd, b->count[u]);
}

/* What the caller sees: the whole parameter, and a gradient of zeros. */
static void walk_look(walk_batch *b, int u, int backward) {
    for (int i = 0; i < b->count[u]; i++) {
        fsdp_param_view v = lab_view(b->world, b->unit[u], i);
        int64_t numel = lab_full_numel(&v);
        const float *data = (const float *)fsdp_data(b->unit[u], i);
        float *grad = backward ? (float *)fsdp_grad(b->unit[u], i) : NULL;
        W_CHECK(data && (!backward || grad), "unit %d parameter %d: NULL", b->first + u, i);
        for (int64_t e = 0; e < numel; e++) {
            W_CHECK(lab_same((double)data[e], (double)walk_value(u, i, e)),
                    "unit %d parameter %d (%d-D, dim %d, %lldx%lldx%lld) element %lld is %g",
                    b->first + u, i, v.ndim, v.shard_dim, (long long)v.shape[0],
                    (long long)v.shape[1], (long long)v.shape[2], (long long)e, (double)data[e]);
            if (!backward) continue;
            W_CHECK(lab_same((double)grad[e], 0), "gradient %lld is %g", (long long)e,
                    (double)grad[e]);
            grad[e] += walk_grad(u, i, e, b->rank);
        }
    }
}

static void walk_check(walk_batch *b, walk *w) {
    float scale = 1.0f / (float)b->size, ranks = (float)(b->size * (b->size + 1)) / 2;
    int64_t shards = 0, elements = 0;
    fsdp_param_view v = FSDP_ZERO;
    fsdp_flat flat;
    while (fsdp_next_param(b->model, &v)) {
        int u = (int)(intptr_t)v.unit_user;
        W_CHECK(v.shard_grad != NULL, "unit %d has no gradient", b->first + u);
        for (int64_t k = 0; k < v.numel; k++) {
            int64_t e = fsdp_view_index(&v, k);
            float sum = walk_grad(u, v.index, e, 0) * ranks;
            W_CHECK(lab_same((double)((float *)v.shard_grad)[k], (double)(sum * scale)),
                    "unit %d parameter %d (%d-D, dim %d, %lldx%lldx%lld): gradient %lld is %g, "
                    "expected %g",
                    b->first + u, v.index, v.ndim, v.shard_dim, (long long)v.shape[0],
                    (long long)v.shape[1], (long long)v.shape[2], (long long)e,
                    (double)((float *)v.shard_grad)[k], (double)(sum * scale));
            W_CHECK(lab_same((double)((float *)v.shard)[k], (double)walk_value(u, v.index, e)),
                    "unit %d: a shard has changed", b->first + u);
        }
        shards += v.numel;
        if (b->rank == 0) elements += lab_full_numel(&v);
    }
    CALL(b->world, fsdp_model_flat(b->model, FSDP_F32, &flat));
    W_CHECK(count_nonzero(flat.shards, FSDP_F32, flat.numel) == shards &&
                count_nonzero(flat.grads, FSDP_F32, flat.numel) == shards,
            "padding is not zero");
    if (b->rank == 0) {
        w->cases += b->units;
        w->elements += elements;
    }
}

/* One training step of all units of the batch, checked, and the next batch begun. */
static void walk_flush(walk_batch *b, walk *w) {
    if (b->units == 0) return;
    CALL(b->world, fsdp_init_params(b->model, walk_fill, NULL));
    for (int u = 0; u < b->units; u++) {
        CALL(b->world, fsdp_pre_forward(b->unit[u]));
        walk_look(b, u, 0);
        CALL(b->world, fsdp_post_forward(b->unit[u]));
    }
    for (int u = b->units - 1; u >= 0; u--) {
        CALL(b->world, fsdp_pre_backward(b->unit[u]));
        walk_look(b, u, 1);
        CALL(b->world, fsdp_post_backward(b->unit[u]));
    }
    CALL(b->world, fsdp_finalize_backward(b->model));
    walk_check(b, w);
    fsdp_model_destroy(b->model);
    b->model = NULL;
    b->first += b->units;
    b->units = 0;
}

static void walk_unit(walk_batch *b, walk *w, int one, int two) {
    if (b->units == WALK_UNITS) walk_flush(b, w);
    if (!b->model) {
        fsdp_model_desc md = FSDP_ZERO;
        md.direct_min = b->layout == WALK_PACKED ? FSDP_DIRECT_NEVER : 1;
        md.debug = 1;
        CALL(b->world, fsdp_model_create(b->world, &md, &b->model));
    }
    walk_add(b, w, one, two);
}

static void walk_rank(lab_rank *r) {
    walk *w = (walk *)r->arg;
    walk_batch *b = (walk_batch *)lab_zeros(1, sizeof *b);
    b->world = r->w;
    b->rank = r->rank;
    b->size = r->size;
    for (b->layout = 0; b->layout < WALK_LAYOUTS; b->layout++) {
        int partners = w->partners < 0 ? w->num_shapes : w->partners;
        uint64_t state = w->seed;
        snprintf(w_case, sizeof w_case, "W=%d layout %d", r->size, b->layout);
        b->first = 0;
        for (int one = 0; one < w->num_shapes; one++) {
            walk_unit(b, w, one, -1);
            for (int k = 0; k < partners; k++)
                walk_unit(b, w, one, w->partners < 0 ? k : lab_pick(&state, w->num_shapes));
        }
        walk_flush(b, w);
    }
    lab_end(r);
    free(b);
}

typedef struct {
    const char *name;
    int world, partners, long_partners;
} walk_row;
static const walk_row walk_rows[] = {
    {"W=1", 1, 40, -1}, {"W=2", 2, 10, 100}, {"W=3", 3, 5, 40}, {"W=4", 4, 3, 20}};

static void walk_all(int world, int partners) {
    walk *w = (walk *)lab_zeros(1, sizeof *w);
    w->world = world;
    w->partners = partners;
    w->seed = h_seed();
    walk_shapes(w);
    lab_run(world, NULL, walk_rank, w);
    h_message("%lld units of one or two parameters, %lld elements", (long long)w->cases,
              (long long)w->elements);
    free(w);
}

TEST_P(train, every_small_unit, walk_rows, SLOW | RANKS(row->world)) {
    walk_all(row->world, W_SLOW ? 0 : row->partners);
}
TEST_P(long_train, every_small_unit, walk_rows, SECONDS(300) | NIGHT) {
    walk_all(row->world, row->long_partners);
}

/* ---- loading, gathering, views, flat blocks -------------------------------------------------- */

enum { LOAD_UNITS = 6 };
typedef struct {
    uint64_t seed;
    int rounds;
    int64_t tensors, blocks;
} loads;

/* One model of units of any dtype, integers included; the same on all ranks. */
typedef struct {
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *unit[LOAD_UNITS];
    o_param param[LOAD_UNITS][O_PARAMS];
    fsdp_dtype dtype[LOAD_UNITS];
    int count[LOAD_UNITS], units, rank, size;
    int64_t fill_bytes;
    uint64_t seed;
    int64_t ordinal, row, seen; /* of fill_block */
} loaded;

static void load_make(loaded *x, uint64_t *state) {
    static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_BF16, FSDP_F64, FSDP_F16, FSDP_I64,
                                        FSDP_U8,  FSDP_I16,  FSDP_I32, FSDP_I8};
    fsdp_model_desc md = FSDP_ZERO;
    x->units = 1 + lab_pick(state, LOAD_UNITS);
    x->seed = h_rand64(state);
    md.direct_min = layout_min[lab_pick(state, LAYOUTS)];
    md.param_dtype = lab_pick(state, 2) ? FSDP_BF16 : FSDP_DTYPE_KEEP;
    x->fill_bytes = md.fill_bytes = 1 + lab_pick(state, 3) * lab_pick(state, 400);
    CALL(x->world, fsdp_model_create(x->world, &md, &x->model));
    for (int u = 0; u < x->units; u++) {
        fsdp_param_desc pd[O_PARAMS];
        fsdp_unit_desc ud = FSDP_ZERO;
        x->dtype[u] = dtypes[lab_pick(state, 9)];
        x->count[u] = 1 + lab_pick(state, O_PARAMS);
        for (int i = 0; i < x->count[u]; i++) {
            o_param *p = &x->param[u][i];
            random_param(state, x->size, p);
            pd[i] = lab_desc(p->ndim, p->shape, p->shard_dim, x->dtype[u],
                             p->frozen || !fsdp_dtype_is_float(x->dtype[u]));
            pd[i].user = p;
        }
        ud.user = (void *)(intptr_t)u;
        x->unit[u] = lab_unit(x->world, x->model, &ud, pd, x->count[u]);
    }
}

/* Byte b of element e of a parameter; turn: which contents. Any bits: NaNs too must survive. */
static unsigned char load_byte(const loaded *x, int u, int i, int64_t at, int turn) {
    return (unsigned char)lab_hash(x->seed, (uint64_t)(u * 64 + i), (uint64_t)at, (uint64_t)turn);
}
static void load_tensor(const loaded *x, int u, int i, int turn, unsigned char *out) {
    size_t bytes = (size_t)x->param[u][i].numel * fsdp_dtype_size(x->dtype[u]);
    for (size_t b = 0; b < bytes; b++) out[b] = load_byte(x, u, i, (int64_t)b, turn);
}

static void fill_block(void *user, const fsdp_param_view *block) {
    loaded *x = (loaded *)user;
    const o_param *p = (const o_param *)block->user;
    int u = (int)(intptr_t)block->unit_user;
    size_t size = fsdp_dtype_size(block->dtype);
    int64_t numel = 1, first = block->ordinal != x->ordinal ? block->start[0] : x->row;
    for (int d = 0; d < block->ndim; d++) {
        numel *= block->local_shape[d];
        W_CHECK(block->shape[d] == p->shape[d], "shape");
        W_CHECK(d == 0 || d == block->shard_dim || block->local_shape[d] == p->shape[d],
                "local shape");
    }
    W_CHECK(numel == block->numel && numel > 0 && block->data && block->unit == x->unit[u] &&
                block->dtype == x->dtype[u] && p == &x->param[u][block->index],
            "block of unit %d parameter %d", u, block->index);
    W_CHECK(block->start[0] == first, "rows are not consecutive");
    W_CHECK(block->local_shape[0] == 1 || numel * (int64_t)size <= x->fill_bytes,
            "a block of %lld rows has %lld bytes, fill_bytes is %lld",
            (long long)block->local_shape[0], (long long)(numel * (int64_t)size),
            (long long)x->fill_bytes);
    x->ordinal = block->ordinal;
    x->row = block->start[0] + block->local_shape[0];
    x->seen++;
    for (int64_t k = 0; k < numel; k++)
        for (size_t b = 0; b < size; b++)
            ((unsigned char *)block->data)[(size_t)k * size + b] = load_byte(
                x, u, block->index, fsdp_view_index(block, k) * (int64_t)size + (int64_t)b, 0);
}

/* Every shard holds what the full tensor has at the places that the view names. */
static void load_check(loaded *x, int turn) {
    fsdp_param_view v = FSDP_ZERO;
    int64_t ordinal = 0;
    while (fsdp_next_param(x->model, &v)) {
        int u = (int)(intptr_t)v.unit_user;
        size_t size = fsdp_dtype_size(v.dtype);
        fsdp_param_view same;
        fsdp_range range;
        W_CHECK(v.ordinal == ordinal++ && v.data == v.shard && v.shard && !v.shard_grad, "view");
        CALL(x->world, fsdp_param_at(x->model, v.ordinal, &same));
        W_CHECK(!memcmp(&same, &v, sizeof v), "param_at differs from next_param");
        CHECK_OK(fsdp_shard_range(v.shape[v.shard_dim], x->size, x->rank, &range));
        W_CHECK(v.start[v.shard_dim] == range.start &&
                    v.local_shape[v.shard_dim] == (v.numel ? range.count : 0),
                "unit %d parameter %d: rows", u, v.index);
        for (int64_t k = 0; k < v.numel; k++)
            for (size_t b = 0; b < size; b++)
                W_CHECK(((unsigned char *)v.shard)[(size_t)k * size + b] ==
                            load_byte(x, u, v.index,
                                      fsdp_view_index(&v, k) * (int64_t)size + (int64_t)b, turn),
                        "unit %d parameter %d element %lld", u, v.index, (long long)k);
    }
    W_CHECK(ordinal == fsdp_num_params(x->model), "number of parameters");
}

/* Shards and gradients of a dtype's trainables lie at equal offsets, in order, without overlap. */
static void flat_check(loaded *x) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_flat flat[FSDP_DTYPE_COUNT];
    char *taken[FSDP_DTYPE_COUNT] = {NULL};
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        CALL(x->world, fsdp_model_flat(x->model, d, &flat[d]));
        taken[d] = (char *)lab_zeros((size_t)flat[d].numel + 1, 1);
        W_CHECK(flat[d].dtype == d && (flat[d].numel > 0) == (flat[d].shards != NULL) &&
                    (flat[d].numel > 0) == (flat[d].grads != NULL),
                "flat of %s", fsdp_dtype_name(d));
    }
    while (fsdp_next_param(x->model, &v)) {
        const fsdp_flat *f = &flat[v.dtype];
        size_t size = fsdp_dtype_size(v.dtype);
        int64_t at = ((char *)v.shard - (char *)f->shards) / (int64_t)size;
        if (v.numel == 0) continue;
        if (!v.requires_grad) {
            W_CHECK(!f->shards || at < 0 || at >= f->numel,
                    "a frozen parameter is in the flat block");
            continue;
        }
        W_CHECK(f->shards && at >= 0 && at + v.numel <= f->numel, "outside the flat block");
        W_CHECK(((char *)v.shard - (char *)f->shards) % (int64_t)size == 0, "alignment");
        for (int64_t k = at; k < at + v.numel; k++)
            W_CHECK(!taken[v.dtype][k]++, "parameters overlap");
    }
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) free(taken[d]);
}

static void loads_rank(lab_rank *r) {
    loads *l = (loads *)r->arg;
    uint64_t state = l->seed;
    fsdp_world *w = r->w;
    const int rank = r->rank, world = r->size;
    for (int n = 0; n < l->rounds; n++) {
        loaded *x = (loaded *)lab_zeros(1, sizeof *x);
        x->world = w;
        x->rank = rank;
        x->size = world;
        x->ordinal = -1;
        snprintf(w_case, sizeof w_case, "W=%d round %d", world, n);
        load_make(x, &state);
        CALL(w, fsdp_init_params(x->model, fill_block, x));
        load_check(x, 0);
        flat_check(x);
        for (int u = 0; u < x->units; u++)
            for (int i = 0; i < x->count[u]; i++) {
                size_t bytes = (size_t)x->param[u][i].numel * fsdp_dtype_size(x->dtype[u]);
                unsigned char *full = (unsigned char *)malloc(2 * bytes + 2),
                              *got = full + bytes + 1;
                int none = (u + i + n) % 3 == 0 && rank != n % world; /* some take part only */
                CHECK(full != NULL);
                got[bytes] = 0x77;
                load_tensor(x, u, i, 0, full);
                CALL(w, fsdp_param_full(x->unit[u], i, none ? NULL : got));
                W_CHECK(none || !memcmp(full, got, bytes), "param_full of unit %d parameter %d", u,
                        i);
                load_tensor(x, u, i, 1, full);
                CALL(w, fsdp_param_load(x->unit[u], i, full));
                CALL(w, fsdp_param_full(x->unit[u], i, got));
                W_CHECK(!memcmp(full, got, bytes), "param_load of unit %d parameter %d", u, i);
                W_CHECK(got[bytes] == 0x77, "param_full has written too much");
                if (rank == 0) l->tensors++;
                free(full);
            }
        load_check(x, 1);
        if (rank == 0) l->blocks += x->seen;
        fsdp_model_destroy(x->model);
        free(x);
    }
}

static void loads_all(int world, int rounds) {
    loads l;
    memset(&l, 0, sizeof l);
    l.seed = h_seed() + (uint64_t)world;
    l.rounds = rounds;
    lab_run(world, NULL, loads_rank, &l);
    h_message("%lld tensors loaded and gathered, %lld blocks filled by rank 0",
              (long long)l.tensors, (long long)l.blocks);
}

TEST_P(train, load_and_gather, worlds, RANKS(row->world)) { loads_all(row->world, 120 / row->world); }

/* The same numbers at the same offsets of shards and gradients, and what param_full_grad gives. */
static void grads_rank(lab_rank *rank) {
    fsdp_world *w = rank->w;
    const int world = rank->size;
    for (int layout = 0; layout < LAYOUTS; layout++) {
        fsdp_flat flat;
        fsdp_param_view v = FSDP_ZERO;
        fsdp_model_desc md = FSDP_ZERO;
        fsdp_unit_desc ud = FSDP_ZERO;
        fsdp_param_desc pd[5] = {fsdp_mat("a", 7, 16), fsdp_vec("b", 5), fsdp_mat("c", 3, 6),
                                 fsdp_mat("frozen", 4, 4), fsdp_mat("unused", 5, 2)};
        static const int64_t numel[5] = {112, 5, 18, 16, 10};
        float full[112];
        pd[2].shard_dim = 1;
        pd[3].frozen = 1;
        md.direct_min = layout_min[layout];
        md.fill_bytes = 100;
        ud.name = "unit";
        fsdp_model *m = lab_model(w, &md);
        fsdp_unit *u = lab_unit(w, m, &ud, pd, 5);
        lab_forward(w, u);
        CALL(w, fsdp_pre_backward(u));
        for (int i = 0; i < 3; i++)
            for (int64_t e = 0; e < numel[i]; e++)
                ((float *)fsdp_grad(u, i))[e] = (float)(rank->rank * 100 + (int)e * (i + 1));
        CHECK(fsdp_grad(u, 3) == NULL);
        CALL(w, fsdp_post_backward(u));
        CALL(w, fsdp_finalize_backward(m));
        for (int i = 0; i < 3; i++) {
            CALL(w, fsdp_param_full_grad(u, i, full));
            for (int64_t e = 0; e < numel[i]; e++) {
                float sum = 0;
                for (int r = 0; r < world; r++) sum += (float)(r * 100 + (int)e * (i + 1));
                CHECK_EQ_INT(lab_same((double)full[e], (double)(sum * (1.0f / (float)world))), 1);
            }
        }
        CHECK_STATUS(fsdp_param_full_grad(u, 3, full), FSDP_ERR_INVALID_STATE);
        CHECK(strstr(fsdp_last_error(w), "frozen") != NULL);
        CALL(w, fsdp_param_full_grad(u, 4, full)); /* nobody used it: zeros */
        for (int e = 0; e < 10; e++) CHECK(lab_same((double)full[e], 0));
        CALL(w, fsdp_model_flat(m, FSDP_F32, &flat));
        while (fsdp_next_param(m, &v)) {
            CHECK((v.shard_grad != NULL) == (v.index < 3));
            if (v.shard_grad)
                CHECK((char *)v.shard_grad - (char *)flat.grads ==
                      (char *)v.shard - (char *)flat.shards);
        }
        CALL(w, fsdp_zero_grad(m));
        CALL(w, fsdp_param_full_grad(u, 0, full));
        for (int e = 0; e < 112; e++) CHECK(lab_same((double)full[e], 0));
        fsdp_model_destroy(m);
    }
}

TEST_P(train, gradients_in_full, worlds, RANKS(row->world)) { lab_run(row->world, NULL, grads_rank, NULL); }

/* ---- clipping -------------------------------------------------------------------------------- */

typedef struct {
    const task *task;
    const story *story;
    double norm[3][LAYOUTS][O_WORLD];
} clips;

/* Up to the first snapshot, then clipping: the norm is right and the same everywhere. */
static void clip_rank(lab_rank *r) {
    clips *c = (clips *)r->arg;
    for (int lanes = 0; lanes < 3; lanes++) {
        fsdp_world *w = r->w = lab_world(r, lanes, lanes, NULL);
        for (int layout = 0; layout < LAYOUTS; layout++) {
            run x;
            place p = {lanes, layout, 0, 0, 0};
            double norm, again, limit, sum = 0;
            int n = 0;
            memset(&x, 0, sizeof x);
            x.task = c->task, x.story = c->story, x.world = w;
            x.rank = r->rank, x.size = r->size;
            x.tmp = (double *)malloc((size_t)(4 * o_numel(&c->task->net) + 1) * sizeof *x.tmp);
            CHECK(x.tmp != NULL);
            build(&x, c->task, &p);
            while (c->story->op[n].kind != CHECKPOINT) play(&x, c->story->op[n++]);
            for (int u = 0; u < c->task->net.count; u++)
                for (int i = 0; i < c->task->net.units[u].count; i++)
                    for (int64_t e = 0;
                         c->story->has[0][u][i] && e < c->task->net.units[u].params[i].numel; e++)
                        sum += c->story->grad[0][u][i][e] * c->story->grad[0][u][i][e];
            CALL(w, fsdp_clip_grad_norm(x.model, (double)INFINITY, &norm));
            compare(&x, 0); /* measured only */
            CHECK_NEAR(norm, sqrt(sum), 1e-12 * (1 + sqrt(sum)));
            c->norm[lanes][layout][r->rank] = norm;
            CALL(w, fsdp_clip_grad_norm(x.model, norm + 1, NULL));
            compare(&x, 0); /* nothing to clip */
            limit = norm > 0 ? norm / 3 : 1;
            CALL(w, fsdp_clip_grad_norm(x.model, limit, &again));
            CHECK(lab_same(norm, again));
            double factor = limit / (norm + 1e-6);
            fsdp_param_view v = FSDP_ZERO;
            while (fsdp_next_param(x.model, &v))
                for (int64_t k = 0; v.shard_grad && k < v.numel; k++) {
                    double wide = v.dtype == FSDP_F64 ? factor : (double)(float)factor;
                    double was =
                        c->story->grad[0][(intptr_t)v.unit_user][v.index][fsdp_view_index(&v, k)];
                    CHECK_NEAR(lab_get(v.shard_grad, v.dtype, k),
                               lab_round(v.dtype, o_mid(v.dtype, 0, was * wide)), norm > 0 ? 0 : 1);
                }
            CHECK_STATUS(fsdp_clip_grad_norm(x.model, 0, &again), FSDP_ERR_INVALID_ARG);
            CHECK_STATUS(fsdp_clip_grad_norm(x.model, -1, &again), FSDP_ERR_INVALID_ARG);
            CHECK_STATUS(fsdp_clip_grad_norm(x.model, (double)NAN, &again), FSDP_ERR_INVALID_ARG);
            fsdp_model_destroy(x.model);
            free(x.tmp);
        }
        lab_end(r);
    }
}

TEST_P(train, clip, rows, RANKS(row->world)) {
    uint64_t state = h_seed() * 31 + (uint64_t)row->world;
    for (int n = 0; n < 3; n++) {
        clips *c = (clips *)lab_zeros(1, sizeof *c);
        task t;
        random_task(&state, row->world, row->kind, 0, &t);
        c->task = &t;
        story *s = tell(&t, row->world, 0);
        c->story = s;
        lab_run(row->world, &several_worlds, clip_rank, c);
        for (int i = 0; i < 3 * LAYOUTS * row->world; i++) {
            int r = i % row->world, k = i / row->world;
            CHECK_MSG(lab_same(c->norm[0][0][0], c->norm[k / LAYOUTS][k % LAYOUTS][r]),
                      "norm of lanes %d, layout %s, rank %d differs", k / LAYOUTS,
                      layout_names[k % LAYOUTS], r);
        }
        forget(s);
        free(c);
    }
}
