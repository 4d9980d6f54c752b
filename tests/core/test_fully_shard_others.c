/* test_fully_shard_others.c - upstream's test_fully_shard_frozen, _overlap, _memory,
   _clip_grad_norm_, _autograd and _logging by name. What is trained stands in fully_shard.h; time
   and memory are those of the simulated device of sim.h, where one process plays one rank.

   SPDX-License-Identifier: MIT */
#define TAGS AT_NIGHT(GLOO | NCCL | ASAN)
#include "harness.h"
#include "lab.h"
#include "fully_shard.h"
#include "sim.h"

enum { ALWAYS = FSDP_RESHARD_ALWAYS, NEVER = FSDP_RESHARD_NEVER };
#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Three MLPs. */
static void mlps(fs_net *net, int64_t d) {
    fs_net_begin(net, 8, d);
    for (int i = 0; i < 3; i++) fs_mlp(net, fs_unit_add(net, "mlp"), d, 4);
}

/* ---- frozen parameters ----------------------------------------------------------------------- */

/* Units are made with everything trainable; what the net calls frozen is frozen afterwards. */
static void made_trainable(fs_run *x) {
    fs_net *net = (fs_net *)malloc(sizeof *net);
    const fs_net *real = x->net;
    CHECK(net != NULL);
    *net = *real;
    for (int u = 0; u < net->count; u++)
        for (int p = 0; p < net->units[u].count; p++) net->units[u].params[p].frozen = 0;
    x->net = net;
    for (int u = 0; u < net->count; u++) fs_make_unit(x, u, NULL);
    x->net = real;
    free(net);
}
static void freeze(fs_run *x) {
    for (int u = 0; u < x->net->count; u++)
        for (int p = 0; p < x->net->units[u].count; p++)
            if (x->net->units[u].params[p].frozen)
                CALL(x->world, fsdp_set_requires_grad(x->unit[u], p, 0));
    CALL(x->world, fsdp_init_params(x->model, fs_fill, x));
    fs_watch(x);
}

/* Checks that each reduce-scatter has only the trainable parameters, which are biases. */
static void biases_are_reduced(fs_run *x, int it, int m) {
    (void)it, (void)m;
    for (int u = 0; u < x->net->count; u++) {
        const fsdp_op *sum = fs_find(x, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, u);
        const fsdp_op *gather = fs_find(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, u);
        int64_t biases = 0, all = 0;
        for (int p = 0; p < x->net->units[u].count; p++) {
            const fs_param *q = &x->net->units[u].params[p];
            int64_t stored = (q->shape[0] + x->size - 1) / x->size * (q->numel / q->shape[0]);
            all += stored;
            if (q->frozen) continue;
            biases += stored;
        }
        CHECK(sum && gather && biases);
        CHECK_EQ_INT(sum->count, biases);
        CHECK_EQ_INT(gather->count, all);
        CHECK_EQ_INT(fs_seen(x, FSDP_OP_REDUCE_SCATTER, -1, u), 1);
    }
    fs_watch(x);
}

/* PyTorch: test_fully_shard_frozen.py test_train_mixed_requires_grad_per_group. Done: only biases
   are reduced. Post-backward is a call, so that "it runs during autograd" has no counterpart. */
TEST(fully_shard_frozen, mixed_requires_grad_per_group, SLOW) {
    static const int reshards[] = {ALWAYS, NEVER, 2};
    static fs_net net;
    mlps(&net, 32);
    for (int u = 0; u < net.count; u++)
        for (int p = 0; p < net.units[u].count; p++)
            net.units[u].params[p].frozen = net.units[u].params[p].ndim == 2;
    for (int size = 3; size <= 4; size++) {
        fs_conf c = fs_conf_of(&net, 1, size);
        c.after = biases_are_reduced;
        if (size == 3 || W_SLOW) c.iters = 3;
        fs_story *s = fs_tell(&c);
        for (int k = 0; k < 12;
             k++) { /* frozen before or after they are sharded; recomputed or not */
            int after = k / 3 % 2;
            c.raf = reshards[k % 3], c.lanes = (k + size) % 3, c.ac = k / 6;
            if (size == 3 && c.raf == 2) c.raf = 0; /* it does not divide */
            c.make = after ? made_trainable : NULL, c.build = after ? freeze : fs_watch;
            fs_train_and_compare(&c, s);
        }
        fs_story_free(s, &c);
    }
}

/* The second iteration also has a forward without gradients, on the same input: it has the same loss,
   and nothing waits for a backward. In the last one what was frozen is not, or it stays so. */
static void no_grad_and_thaw(fs_run *x, int it, int m) {
    const fsdp_storage_state kept = x->c->raf == NEVER ? FSDP_STORAGE_UNSHARDED
                                    : x->c->raf == 2 && x->size > 2
                                        ? FSDP_STORAGE_SHARDED_POST_FORWARD
                                        : FSDP_STORAGE_SHARDED;
    if (!x->model) return;
    if (it == 1) {
        CALL(x->world, fsdp_set_grad_enabled(x->model, 0));
        fs_feed(x, &x->tape[0]);
        fs_forward(x, &x->tape[0]);
        CHECK_NEAR(fs_loss(x, &x->tape[0], 1), x->story->loss[it][x->rank][m], 1e-6);
        for (int u = 0; u < x->net->count; u++) {
            CHECK_EQ_INT(fsdp_unit_state(x->unit[u]), FSDP_STATE_IDLE);
            CHECK_EQ_INT(fsdp_unit_storage(x->unit[u]), kept);
        }
        CALL(x->world, fsdp_set_grad_enabled(x->model, 1));
    }
    for (int u = 0; it && it == x->c->thaw && u < x->net->count; u++)
        for (int p = 0; p < x->net->units[u].count; p++)
            if (x->net->units[u].params[p].frozen)
                CALL(x->world, fsdp_set_requires_grad(x->unit[u], p, 1));
}
/* One of each unit that is trained, none of the others. */
static void reductions(fs_run *x, int it, int m) {
    (void)it, (void)m;
    for (int u = 0; u < x->net->count; u++)
        CHECK_EQ_INT(fs_seen(x, FSDP_OP_REDUCE_SCATTER, -1, u), !fs_frozen(x, u, 0));
    fs_watch(x);
}

/* PyTorch: test_fully_shard_frozen.py test_train_mixed_requires_grad_across_groups. Done: every
   second linear is frozen (PyTorch's helper reaches only the first one), and thawed in the last
   iteration or never. */
TEST(fully_shard_frozen, across_groups) {
    static const int reshards[] = {ALWAYS, NEVER, 2};
    static fs_net net;
    fs_net_begin(&net, 8, 32);
    for (int u = 0; u < 6; u++) { /* every second unit as a whole */
        fs_linear(&net, fs_unit_add(&net, "linear"), 32, 32);
        fs_relu(&net);
        for (int p = 0; p < 2; p++) net.units[u].params[p].frozen = u % 2 == 0;
    }
    for (int k = 0; k < 12; k++) {
        fs_conf c = fs_conf_of(&net, 1, k < 6 ? 4 : 2);
        c.raf = reshards[k % 3], c.lanes = (k + k / 3) % 3, c.iters = 4;
        c.thaw = k / 3 % 2 ? c.iters - 1 : 0;
        c.before = no_grad_and_thaw, c.build = fs_watch, c.after = reductions;
        fs_train(&c);
    }
}

/* Units: a first linear, a frozen one, a trainable one. Three times: the trainable one and the frozen
   one with gradients, and the trainable one once more without, whose output is added. */
enum { FIRST, FROZEN, TRAINED, ROUNDS = 3, ROUND = 3 };
static void one_module(fs_run *x, fs_tape *t, int from, int to) {
    int unit = x->net->layers[from].unit;
    fs_pre_forward(x, unit);
    fs_layers_forward(x, t, unit, from, to);
    fs_post_forward(x, unit);
}
static double used_three_times(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0], *aside = &x->tape[1];
    const int64_t count = x->net->batch * x->net->in;
    (void)it, (void)m;
    fs_feed(x, t);
    one_module(x, t, 0, 1);
    for (int k = 0, at = 1; k < ROUNDS; k++, at += ROUND) {
        one_module(x, t, at, at + 2);     /* trainable, with its relu */
        one_module(x, t, at + 2, at + 3); /* frozen */
        if (x->model) CALL(x->world, fsdp_set_grad_enabled(x->model, 0));
        memcpy(aside->in[at], t->in[at + 3], (size_t)count * sizeof(double));
        aside->dtype[at] = t->dtype[at + 3];
        one_module(x, aside, at, at + 2);
        if (x->model) CALL(x->world, fsdp_set_grad_enabled(x->model, 1));
        for (int64_t i = 0; i < count; i++)
            t->in[at + 3][i] = lab_round(FSDP_F32, t->in[at + 3][i] + aside->in[at + 2][i]);
    }
    double loss = fs_loss(x, t, 1);
    for (int k = ROUNDS - 1; k >= 0; k--) {
        fs_group_backward(x, t, FROZEN, 3 + k * ROUND, 4 + k * ROUND);
        fs_group_backward(x, t, TRAINED, 1 + k * ROUND, 3 + k * ROUND);
    }
    fs_group_backward(x, t, FIRST, 0, 1);
    return loss;
}
/* PyTorch: test_fully_shard_frozen.py test_multi_forward_mixed_requires_grad. Done. */
TEST(fully_shard_frozen, multi_forward) {
    static const int reshards[] = {ALWAYS, NEVER, 2};
    static fs_net net;
    fs_net_begin(&net, 8, 5);
    fs_linear(&net, fs_unit_add(&net, "0"), 5, 5);
    fs_unit_add(&net, "no_grad"), fs_unit_add(&net, "with_grad");
    int frozen = fs_param_add(&net, FROZEN, 5, 5, 0), w;
    fs_param_add(&net, FROZEN, 5, 0, 0);
    for (int p = 0; p < 2; p++) net.units[FROZEN].params[p].frozen = 1;
    w = fs_param_add(&net, TRAINED, 5, 5, 0);
    fs_param_add(&net, TRAINED, 5, 0, 0);
    for (int k = 0; k < ROUNDS; k++) {
        fs_layer_add(&net, FS_LINEAR, TRAINED, w, 5, 5);
        fs_relu(&net);
        fs_layer_add(&net, FS_LINEAR, FROZEN, frozen, 5, 5);
    }
    for (int k = 0; k < 6; k++) {
        fs_conf c = fs_conf_of(&net, 1, k < 3 ? 4 : 2);
        c.raf = reshards[k % 3], c.lanes = k % 3, c.micro = used_three_times;
        fs_train(&c);
    }
}

/* ---- what autograd leaves out ---------------------------------------------------------------- */

/* Two linears of the same input, the first one a unit, the second one in the root around it. In the
   first three iterations the loss needs both outputs, then only the first one. */
enum { ROOT_UNIT, FIRST_UNIT, BOTH = 3 };
static double first_output(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    int both = it < BOTH;
    double loss = 0;
    (void)m;
    fs_feed(x, t);
    fs_pre_forward(x, ROOT_UNIT);
    memcpy(t->in[1], t->in[0], (size_t)(x->net->batch * x->net->in) * sizeof(double));
    t->dtype[1] = t->dtype[0];
    fs_layers_forward(x, t, ROOT_UNIT, 1, 2); /* writes in[2], the unit in[1] */
    fs_pre_forward(x, FIRST_UNIT);
    fs_layers_forward(x, t, FIRST_UNIT, 0, 1);
    fs_post_forward(x, FIRST_UNIT);
    fs_post_forward(x, ROOT_UNIT);
    fs_pre_backward(x, ROOT_UNIT);
    fs_pre_backward(x, FIRST_UNIT);
    loss += fs_loss_at(x, t, 1, 0.5);
    fs_layers_backward(x, t, 0, 1);
    fs_post_backward(x, FIRST_UNIT);
    if (!both) return loss;
    loss += fs_loss_at(x, t, 2, 0.5);
    memcpy(t->in[1], t->in[0], (size_t)(x->net->batch * x->net->in) * sizeof(double));
    fs_layers_backward(x, t, 1, 2);
    return loss; /* finalize ends the root's */
}
static void second_has(fs_run *x, int it, int m) {
    (void)m;
    for (int u = ROOT_UNIT; u <= FIRST_UNIT; u++)
        for (int p = 0; p < 2; p++) {
            fsdp_param_view v = FSDP_ZERO;
            CALL(x->world, fsdp_param_view_get(x->unit[u], p, &v));
            CHECK_EQ_INT(v.shard_grad != NULL, u == FIRST_UNIT || it < BOTH);
        }
}
/* PyTorch: test_fully_shard_autograd.py test_unused_forward_output. Done: the loss adds both
   outputs (PyTorch: multiplies them). */
TEST(fully_shard_autograd, unused_forward_output) {
    static const int reshards[] = {ALWAYS, NEVER, 2};
    static fs_net net;
    fs_net_begin(&net, 2, 24);
    fs_unit_add(&net, "root"), fs_unit_add(&net, "lin1");
    fs_linear(&net, FIRST_UNIT, 24, 24);
    fs_linear(&net, ROOT_UNIT, 24, 24);
    for (int k = 0; k < 6; k++) {
        fs_conf c = fs_conf_of(&net, 1, k < 3 ? 4 : 2);
        c.raf = reshards[k % 3], c.micro = first_output, c.after = second_has;
        fs_train(&c);
    }
}

/* A module runs in forward, its output is not used: never, on some ranks, or in the microbatch that
   is reduced, where its backward is not called: the gradients of the first microbatch are still reduced. Or
   it does not even run, which is what upstream's test has. */
enum { NEVER_USED, SOME_RANKS, FIRST_MICROBATCH, NEVER_RUN, USES };
static double unused_module(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    int when = *(const int *)x->c->user;
    int used = (when == SOME_RANKS && x->rank % 2 == it % 2) || (when == FIRST_MICROBATCH && !m);
    double loss;
    fs_feed(x, t);
    fs_pre_forward(x, 0);
    fs_layers_forward(x, t, 0, 0, 2);
    fs_post_forward(x, 0);
    if (when == NEVER_RUN) t->dtype[3] = t->dtype[2];
    else fs_group_forward(x, t, 1, 2, 3);
    if (!used) memcpy(t->in[3], t->in[2], (size_t)(x->net->batch * x->net->in) * sizeof(double));
    fs_pre_forward(x, 2);
    fs_layers_forward(x, t, 2, 3, 4);
    fs_post_forward(x, 2);
    loss = fs_loss(x, t, 1);
    fs_group_backward(x, t, 2, 3, 4);
    if (when == SOME_RANKS ||
        used) { /* hooks are collective: called by all ranks, with gradients or without */
        fs_pre_backward(x, 1);
        if (used) fs_layers_backward(x, t, 2, 3);
        fs_post_backward(x, 1);
    }
    fs_group_backward(x, t, 0, 0, 2);
    return loss;
}
static void sync_last(fs_run *x, int it, int m) {
    (void)it;
    fs_set_sync(x, -1, m == x->c->micros - 1);
}
/* Checks that units are resharded. The last microbatch reduces each unit once, but unit 1 only if
   some rank or microbatch has used it. */
static void resharded(fs_run *x, int it, int m) {
    const int when = *(const int *)x->c->user, last = m == x->c->micros - 1;
    const int some = when == SOME_RANKS || when == FIRST_MICROBATCH;
    (void)it;
    for (int u = 0; u < x->net->count; u++) {
        CHECK_EQ_INT(fsdp_unit_storage(x->unit[u]), FSDP_STORAGE_SHARDED);
        CHECK_EQ_INT(fs_seen(x, FSDP_OP_REDUCE_SCATTER, -1, u), last && (u != 1 || some));
    }
    if (when == NEVER_RUN) CHECK_EQ_INT(fs_seen(x, -1, -1, 1), 0); /* nothing at all */
    else CHECK(fs_find(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, 1) != NULL);
    fs_watch(x);
}
/* PyTorch: test_fully_shard_autograd.py test_unused_forward_module. Done: also a unit that only
   some ranks use, and one used in an unreduced microbatch. Each case has only one of 2 and 4 ranks.
   */
TEST(fully_shard_autograd, unused_forward_module) {
    static const int reshards[] = {ALWAYS, NEVER, 2};
    static fs_net net;
    fs_net_begin(&net, 2, 24);
    for (int u = 0; u < 3; u++) {
        fs_linear(&net, fs_unit_add(&net, "linear"), 24, 24);
        if (!u) fs_relu(&net);
    }
    for (int k = 0; k < 9 * USES; k++) {
        int when = k % USES;
        fs_conf c = fs_conf_of(&net, 1, (k + k / USES) % 2 ? 4 : 2);
        c.raf = reshards[k / USES % 3], c.lanes = k / (3 * USES);
        c.micro = unused_module, c.build = fs_watch, c.after = resharded, c.user = &when;
        c.reduce_unused = when == SOME_RANKS;
        c.iters = W_SLOW || k >= 3 * USES ? 4 : FS_ITERS;
        if (when == FIRST_MICROBATCH) c.micros = 2, c.before = sync_last;
        fs_train(&c);
    }
}

/* An optimizer in backward: hooks update the shards, each once in a reduction of its unit, after
   everything else of the unit. One parameter is used by nothing, and one is frozen. */
typedef struct {
    int calls[FS_UNITS][FS_PARAMS], expected[FS_UNITS][FS_PARAMS];
} hook_calls;
static fsdp_status step_in_backward(void *user, const fsdp_param_view *v, void *stream) {
    const fs_run *x = (const fs_run *)user;
    lib_wait(stream);
    ((hook_calls *)x->own)->calls[fs_view_unit(v)][fs_view_param(v)]++;
    CHECK(v->shard_grad != NULL && v->requires_grad && v->grad_dtype == FSDP_F32);
    CHECK(v->unit == x->unit[fs_view_unit(v)] && v->index == fs_view_param(v));
    fs_update_shard(x, v);
    return FSDP_OK;
}
static void hooks_that_step(fs_run *x) {
    x->own = lab_zeros(1, sizeof(hook_calls));
    for (int u = 0; u < x->net->count; u++)
        for (int p = 0; p < x->net->units[u].count; p++)
            CALL(x->world, fsdp_set_post_accumulate_hook(x->unit[u], p, step_in_backward, x));
    fs_watch(x);
}
static void sync_in_the_last(fs_run *x, int it, int m) {
    (void)it;
    fs_set_sync(x, -1, m == x->c->micros - 1);
}
static void hooks_have_stepped(fs_run *x, int it, int m) {
    hook_calls *h = (hook_calls *)x->own;
    if (m < x->c->micros - 1) return;
    for (int u = 0; u < x->net->count; u++) {
        const int n = lab_next_op(&x->log, 0, FSDP_OP_CALL, FSDP_LABEL_GRAD_HOOK, x->unit[u]);
        for (int p = 0; p < FS_PARAMS; p++) h->expected[u][p] += x->story->has[it][m][u][p];
        W_CHECK(n >= 0 && lab_next_op(&x->log, n, -1, FSDP_LABEL_REDUCE, x->unit[u]) < 0 &&
                    lab_next_op(&x->log, n, -1, FSDP_LABEL_RED_OUT, x->unit[u]) < 0,
                "unit %d: the hook comes too early", u);
        const fsdp_op *o = &x->log.ops[n]; /* others wait for it by the blocks that it names */
        CHECK(o->src && o->src_ptr == fsdp_buf_ptr(o->src) && o->dst);
        CHECK(o->dst_ptr == fsdp_buf_ptr(o->dst) && o->dst != o->src);
        if (x->size == 1 && x->c->micros == 1) /* the caller has written what the hook sees */
            CHECK_EQ_INT(o->stream, FSDP_STREAM_COMPUTE);
    }
    CHECK_EQ_MEM(h->calls, h->expected, sizeof h->calls);
    for (int k = 0; k < x->log.num; k++) /* an op that divides says by what */
        if (x->log.ops[k].share != 0) CHECK(x->log.ops[k].factor == x->size);
    x->log.num = 0;
}
static void hooks_end(fs_run *x, int it) {
    if (it + 1 < x->c->iters) return;
    free(x->own);
    x->own = NULL;
}
/* PyTorch: test_fully_shard_autograd.py test_post_acc_grad_hook_runs,
   test_post_acc_grad_hook_optim_parity. Done: once per reduction, not for a parameter without a
   gradient. SGD (PyTorch: AdamW with a schedule). */
TEST(hooks, optimizer_in_backward, GLOO | NCCL | AT_NIGHT(TSAN)) {
    static const int ranks[][2] = {{1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 1}, {2, 2}};
    static fs_net net;
    mlps(&net, 7);
    fs_param_add(&net, 1, 5, 0, 0); /* in no layer */
    net.units[2].params[1].frozen = 1;
    for (size_t k = 0; k < 2 * COUNT(ranks); k++) {
        fs_conf c = fs_conf_of(&net, ranks[k / 2][0], ranks[k / 2][1]);
        c.sgd = c.in_backward = 1, c.zero_in_place = 0, c.iters = 5;
        c.micros = 1 + k % 2, c.before = sync_in_the_last;
        c.build = hooks_that_step, c.after = hooks_have_stepped, c.end = hooks_end;
        c.direct_min = k % 3 ? 1 : 0, c.lanes = (int)(k / 2 % 3);
        fs_train(&c);
    }
}

/* ---- clipping -------------------------------------------------------------------------------- */

/* Every gradient is what it was, times the bound over the norm. (Adam would not tell.) */
static void after_clipping(fs_run *x, int it) {
    const double coef = x->c->max_norm / (x->story->norm[it] + 1e-6);
    fsdp_param_view v = FSDP_ZERO;
    int scaled = 0;
    CHECK(coef < 1);
    while (fsdp_next_param(x->model, &v)) {
        const double *before = x->story->grad[it][0] +
                               x->net->units[(intptr_t)v.unit_user].params[v.index].at;
        CHECK(v.shard_grad != NULL);
        for (int64_t k = 0; k < v.numel; k++, scaled++) {
            const double want = coef * before[fsdp_view_index(&v, k)];
            CHECK_NEAR(((const float *)v.shard_grad)[k], want, 1e-6 * coef + 3e-6 * fabs(want));
        }
    }
    CHECK(scaled);
    /* the reductions of backward, and one for the norm */
    int clips = 0;
    for (int i = 0; i < x->log.num; i++)
        clips += x->log.ops[i].kind == FSDP_OP_ALL_REDUCE && x->log.ops[i].label == FSDP_LABEL_CLIP;
    CHECK_EQ_INT(clips, x->c->shards > 1);
    fs_watch(x);
}

/* PyTorch: test_fully_shard_clip_grad_norm_.py test_clip_grad_norm_1d. Done: every gradient is
   scaled by the bound over the norm. One all-reduce; none where no rank shards. */
TEST(fully_shard_clip_grad_norm_, 1d) {
    static const double norms[] = {2, 1, 3, 0.5, HUGE_VAL};
    static const int meshes[][2] = {{1, 2}, {1, 3}, {2, 2}, {2, 1}};
    static fs_net net;
    mlps(&net, 8);
    for (size_t i = 0; i < COUNT(norms); i++)
        for (size_t k = 0; k < COUNT(meshes); k++) {
            fs_conf c = fs_conf_of(&net, meshes[k][0], meshes[k][1]);
            c.clip_p = norms[i], c.max_norm = 0.001;
            if (W_SLOW) c.iters = 5;
            c.build = fs_watch, c.clipped = after_clipping;
            fs_train(&c);
        }
}

/* Rows of one parameter over tp, sharded over dp; another parameter over all ranks; a third one
   sharded over dp and the same on all ranks of tp. The gradient of element e is e/8 - 3 times 1 or
   2, by the place in dp. */
enum { ROWS = 10, COLS = 3, OTHER = 7, SAME = 5 };
static double clip_value(int64_t e) { return ((double)e / 8 - 3) * 1.5; }

static void clip_2d(lab_rank *r) {
    const double p = *(const double *)r->arg;
    const fsdp_mesh *all = lab_mesh2(r->w, 2, 2, "dp", "tp"), *dp = lab_slice(r->w, all, 0);
    const int64_t numel[] = {ROWS * COLS, OTHER, SAME},
                  start[] = {fsdp_mesh_rank(all, 1) * ROWS * COLS, 100, 200};
    fsdp_param_desc tp = fsdp_mat("tp", ROWS, COLS), whole = fsdp_vec("whole", OTHER),
                    same = fsdp_vec("same", SAME);
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_clip_desc clip = FSDP_ZERO;
    fs_run x;
    double sum = 0, norm;
    memset(&x, 0, sizeof x);
    snprintf(w_case, sizeof w_case, "p %g", p);
    x.world = r->w, x.model = lab_model(r->w, NULL);
    ud.mesh = dp;
    x.unit[0] = lab_unit(r->w, x.model, &ud, &tp, 1);
    x.unit[1] = lab_unit(r->w, x.model, NULL, &whole, 1);
    CHECK_OK(fsdp_mesh_info_init(all, FSDP_MESH_INFO_HSDP, 0, 1, &info));
    ud.mesh = NULL, ud.mesh_info = &info;
    x.unit[2] = lab_unit(r->w, x.model, &ud, &same, 1);
    for (int u = 0; u < 3; u++) CALL(x.world, fsdp_pre_forward(x.unit[u]));
    for (int u = 0; u < 3; u++) CALL(x.world, fsdp_post_forward(x.unit[u]));
    for (int u = 2; u >= 0; u--) {
        CALL(x.world, fsdp_pre_backward(x.unit[u]));
        float *grad = (float *)fsdp_grad(x.unit[u], 0);
        for (int64_t e = 0; e < numel[u]; e++)
            grad[e] = (float)(clip_value(start[u] + e) / 1.5 * (1 + fsdp_mesh_rank(all, 0)));
        CALL(x.world, fsdp_post_backward(x.unit[u]));
    }
    CALL(x.world, fsdp_finalize_backward(x.model));
    for (int64_t e = 0; e < 2 * ROWS * COLS + OTHER + SAME; e++) {
        int64_t past = e - 2 * ROWS * COLS;
        double a = fabs(clip_value(past < 0 ? e : past < OTHER ? past + 100 : past - OTHER + 200));
        sum = isinf(p) ? (a > sum ? a : sum) : sum + pow(a, p);
    }
    double want = isinf(p) ? sum : pow(sum, 1 / p);
    clip.max_norm = 0.5, clip.norm_type = p;
    fs_watch(&x);
    CALL(x.world, fsdp_clip_grads(x.model, &clip, &norm));
    W_CHECK(fabs(norm - want) <= 1e-12 * want, "norm %.17g, expected %.17g", norm, want);
    CHECK_EQ_INT(fs_seen(&x, FSDP_OP_ALL_REDUCE, FSDP_LABEL_CLIP, -1), 1);
    CHECK_EQ_INT(fs_seen(&x, FSDP_OP_ALL_REDUCE, -1, -1), 1);
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(x.model, &v))
        for (int64_t k = 0; k < v.numel; k++) {
            double g = clip_value(start[v.ordinal] + fsdp_view_index(&v, k)) * 0.5 / (want + 1e-6);
            CHECK_NEAR(((float *)v.shard_grad)[k], g, 1e-6 * fabs(g));
        }
    lab_end(r);
    free(x.log.ops);
}

/* PyTorch: test_fully_shard_clip_grad_norm_.py test_clip_grad_norm_2d. Done: the test writes the
   gradients, in one step (PyTorch: 10 steps of MLPs). One all-reduce in all (PyTorch: one for each
   mesh dim). norm.every_assignment has meshes of up to 3 dims. */
TEST(fully_shard_clip_grad_norm_, 2d) {
    static const double norms[] = {2, 1, 3, HUGE_VAL};
    for (size_t i = 0; i < COUNT(norms); i++)
        lab_run(4, NULL, clip_2d, (void *)(uintptr_t)&norms[i]);
}

/* ---- the simulated device -------------------------------------------------------------------- */

enum { MS = 1000000, RIG_UNITS = 24 };
typedef struct {
    sim s;
    fsdp_model *model;
    fsdp_unit *unit[RIG_UNITS];
    int count, around; /* unit 0 is open around the others */
    int64_t forward_ns, backward_ns;
} rig;

static void rig_open(rig *r, int world, int async) {
    memset(r, 0, sizeof *r);
    sim_init(&r->s, world, 0);
    r->s.async = async, r->s.moves = 0;
    r->s.latency_ns = 0, r->s.coll_bytes_per_ns = r->s.copy_bytes_per_ns = 0;
    CHECK(sim_open(&r->s));
}
static fsdp_unit *rig_unit(rig *r, const fsdp_param_desc *p, int count, const fsdp_mesh *mesh) {
    fsdp_unit_desc ud = FSDP_ZERO;
    ud.params = p, ud.num_params = count, ud.mesh = mesh;
    CHECK(r->count < RIG_UNITS);
    CALL(r->s.world, fsdp_fully_shard(r->model, &ud, &r->unit[r->count]));
    return r->unit[r->count++];
}
static void rig_forward(rig *r) {
    if (r->around) CALL(r->s.world, fsdp_pre_forward(r->unit[0]));
    for (int u = r->around; u < r->count; u++) {
        CALL(r->s.world, fsdp_pre_forward(r->unit[u]));
        sim_compute(&r->s, r->forward_ns);
        CALL(r->s.world, fsdp_post_forward(r->unit[u]));
    }
    if (r->around) CALL(r->s.world, fsdp_post_forward(r->unit[0]));
}
static void rig_end_backward(rig *r, fsdp_unit *u) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(r->model, &v))
        if (v.unit == u && v.requires_grad) CHECK(fsdp_grad(u, v.index));
    sim_compute(&r->s, r->backward_ns);
    CALL(r->s.world, fsdp_post_backward(u));
}
static void rig_backward(rig *r) {
    if (r->around) CALL(r->s.world, fsdp_pre_backward(r->unit[0]));
    for (int u = r->count - 1; u >= r->around; u--) {
        CALL(r->s.world, fsdp_pre_backward(r->unit[u]));
        rig_end_backward(r, r->unit[u]);
    }
    if (r->around) rig_end_backward(r, r->unit[0]);
    CALL(r->s.world, fsdp_finalize_backward(r->model));
}
static void rig_close(rig *r) { CHECK_EQ_INT(sim_close(&r->s), 0); }

static int64_t elapsed(rig *r) {
    static int64_t last;
    int64_t now, before = last;
    sim_host_waits(&r->s);
    now = sim_end(&r->s);
    last = now;
    return now - (before > now ? 0 : before);
}

/* ---- overlap --------------------------------------------------------------------------------- */

/* Compute 25 ms, communication 10 ms per layer. */
/* PyTorch: test_fully_shard_overlap.py test_fully_shard_training_overlap. Done: on the simulated
   clock, equal to the ideal formulas (PyTorch: at most the baseline's time). */
TEST(fully_shard_overlap, training_overlap) {
    enum { LAYERS = 10, COMPUTE = 25 * MS, COMM = 10 * MS };
    int64_t forward[2], both[2];
    for (int async = 0; async < 2; async++) {
        fsdp_param_desc p = fsdp_mat("w", 64, 64);
        fsdp_model_desc md = FSDP_ZERO;
        rig r;
        rig_open(&r, 2, async);
        r.s.latency_ns = COMM, r.forward_ns = COMPUTE, r.backward_ns = 2 * COMPUTE;
        md.direct_min = 1;
        CALL(r.s.world, fsdp_model_create(r.s.world, &md, &r.model));
        for (int i = 0; i < LAYERS; i++) rig_unit(&r, &p, 1, NULL);
        CALL(r.s.world, fsdp_model_reserve(r.model));
        for (int step = 0; step < 3; step++) {
            (void)elapsed(&r);
            rig_forward(&r);
            forward[async] = elapsed(&r);
            rig_backward(&r);
            both[async] = forward[async] + elapsed(&r);
            CALL(r.s.world, fsdp_params_changed(r.model));
            CALL(r.s.world, fsdp_zero_grad(r.model));
            if (async) { /* the first gather; the first gather and the last reduction */
                CHECK_EQ_INT(forward[1], COMM + LAYERS * COMPUTE);
                CHECK_EQ_INT(both[1] - forward[1], 2 * COMM + 2 * LAYERS * COMPUTE);
            } else { /* the baseline: one after the other */
                CHECK_EQ_INT(forward[0], LAYERS * (COMM + COMPUTE));
                CHECK_EQ_INT(both[0] - forward[0], LAYERS * (2 * COMM + 2 * COMPUTE));
            }
        }
        rig_close(&r);
    }
    CHECK(forward[1] <= forward[0] && both[1] <= both[0]);
}

/* A layer of the caller's own comes before the unit. The gather waits for the optimizer, not for
   later work of the caller: it is hidden. If the caller says only then that parameters
   have changed, it is not. */
/* PyTorch: test_fully_shard_overlap.py test_fully_shard_post_optim_event_overlap. Done: the event
   is fsdp_params_changed. With it no gather is exposed, also not the first one, which PyTorch's
   bound allows. */
TEST(fully_shard_overlap, post_optim_event_overlap) {
    enum { STEPS = 5, COMPUTE = 25 * MS, COMM = 10 * MS };
    int64_t bound = STEPS * (3 * COMPUTE + 4 * MS) + COMM, serial = bound + (STEPS - 1) * COMM;
    int64_t total[2];
    for (int early = 0; early < 2; early++) {
        fsdp_param_desc p = fsdp_mat("w", 64, 64);
        fsdp_model_desc md = FSDP_ZERO;
        rig r;
        rig_open(&r, 2, 1);
        r.s.latency_ns = COMM;
        md.direct_min = 1, md.reshard_after_forward = NEVER;
        CALL(r.s.world, fsdp_model_create(r.s.world, &md, &r.model));
        rig_unit(&r, &p, 1, NULL);
        CALL(r.s.world, fsdp_model_reserve(r.model));
        (void)elapsed(&r);
        for (int step = 0; step < STEPS; step++) {
            sim_compute(&r.s, COMPUTE); /* the layer before */
            if (!early) CALL(r.s.world, fsdp_params_changed(r.model));
            r.forward_ns = MS, r.backward_ns = 2 * MS;
            rig_forward(&r);
            CALL(r.s.world, fsdp_pre_backward(r.unit[0]));
            rig_end_backward(&r, r.unit[0]);
            sim_compute(&r.s, 2 * COMPUTE); /* the backward of the layer before */
            CALL(r.s.world, fsdp_finalize_backward(r.model));
            sim_compute(&r.s, MS); /* the optimizer */
            if (early) CALL(r.s.world, fsdp_params_changed(r.model));
            CALL(r.s.world, fsdp_zero_grad(r.model));
        }
        total[early] = elapsed(&r);
        rig_close(&r);
    }
    CHECK_EQ_INT(total[0], serial);
    CHECK_EQ_INT(total[1], bound - COMM); /* the first one is hidden, too */
}

/* Modules of two units, one over all ranks and one over half of them; both are open in the forward
   and in the backward of the module. Forward sees the gathers of the first module, or, if they take
   longer, all of them and the last computation. Units of two sizes have two slots of gradients each,
   so that the next module need not wait for reductions: only the last two are seen, if they are
   short. Units of one size, as upstream's, share two slots, which the next module needs: all are
   seen, one after another. */
/* PyTorch: test_fully_shard_overlap.py test_fully_shard_per_param_mesh_training_overlap. Differs:
   if both units of a module have one size, the next module waits for both reductions; in PyTorch
   one group does not wait. Nothing is resharded (PyTorch: resharded, with prefetch lists, compared
   with replicate). */
TEST(fully_shard_overlap, per_param_mesh_training_overlap) {
    enum { WORLD = 8, MODULES = 5, COMPUTE = 50 * MS, SHORT = 10 * MS, LONG = 500 * MS };
    const int64_t all = MODULES * COMPUTE, both = 2 * (int64_t)SHORT, longer = 2 * (int64_t)LONG;
    const struct {
        int64_t rows, comm, forward, want;
    } cases[] = {{128, SHORT, both + all, all + both},
                 {64, SHORT, both + all, all + MODULES * both},
                 {64, LONG, MODULES * longer + COMPUTE, all + MODULES * longer}};
    for (size_t n = 0; n < COUNT(cases); n++) {
        fsdp_param_desc p = fsdp_mat("a", 64, 64), q = fsdp_mat("b", cases[n].rows, 64);
        fsdp_model_desc md = FSDP_ZERO;
        fsdp_mesh *half;
        rig r;
        rig_open(&r, WORLD, 1);
        half = lab_slice(r.s.world, lab_mesh2(r.s.world, WORLD / 2, 2, "efsdp", "ep"), 0);
        md.direct_min = 1, md.reshard_after_forward = NEVER;
        CALL(r.s.world, fsdp_model_create(r.s.world, &md, &r.model));
        for (int i = 0; i < MODULES; i++) rig_unit(&r, &p, 1, NULL), rig_unit(&r, &q, 1, half);
        CALL(r.s.world, fsdp_model_reserve(r.model));
        for (int step = 0; step < 3; step++) {
            (void)elapsed(&r);
            r.s.latency_ns = cases[n].comm;
            for (int u = 0; u < 2 * MODULES; u += 2) {
                for (int k = 0; k < 2; k++) CALL(r.s.world, fsdp_pre_forward(r.unit[u + k]));
                sim_compute(&r.s, COMPUTE);
                for (int k = 0; k < 2; k++) CALL(r.s.world, fsdp_post_forward(r.unit[u + k]));
            }
            CHECK_EQ_INT(elapsed(&r), cases[n].forward);
            for (int u = 2 * MODULES - 1; u >= 0; u -= 2) {
                for (int k = 0; k < 2; k++) CALL(r.s.world, fsdp_pre_backward(r.unit[u - k]));
                sim_compute(&r.s, COMPUTE);
                for (int k = 0; k < 2; k++) rig_end_backward(&r, r.unit[u - k]);
            }
            CALL(r.s.world, fsdp_finalize_backward(r.model));
            CHECK_EQ_INT(elapsed(&r), cases[n].want);
            CALL(r.s.world, fsdp_params_changed(r.model));
            CALL(r.s.world, fsdp_zero_grad(r.model));
        }
        rig_close(&r);
    }
}

/* Three roots: the streams of the world, and no more. */
/* PyTorch: none. Own: all models of a world use the same streams. */
TEST(fully_shard_overlap, share_comm_context) {
    fsdp_param_desc p = fsdp_mat("w", 64, 64);
    int64_t streams = 0;
    rig r;
    rig_open(&r, 2, 1);
    for (int k = 0; k < 3; k++) {
        r.count = 0;
        CALL(r.s.world, fsdp_model_create(r.s.world, NULL, &r.model));
        for (int i = 0; i < 3; i++) rig_unit(&r, &p, 1, NULL);
        rig_forward(&r);
        rig_backward(&r);
        if (k == 0) streams = r.s.live_streams;
        CHECK_EQ_INT(r.s.live_streams, streams);
    }
    CHECK(streams > 0 && streams <= FSDP_STREAM_COUNT);
    rig_close(&r);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* A block of a transformer: four projections, two linears, two norms. */
static int block_params(fsdp_param_desc *p, int64_t d) {
    int n = 0;
    for (int i = 0; i < 4; i++) p[n++] = fsdp_mat(NULL, d, d);
    p[n++] = fsdp_mat("w1", 4 * d, d), p[n++] = fsdp_vec("b1", 4 * d);
    p[n++] = fsdp_mat("w2", d, 4 * d), p[n++] = fsdp_vec("b2", d);
    for (int i = 0; i < 4; i++) p[n++] = fsdp_vec(NULL, d);
    return n;
}

static int64_t numel_of(const fsdp_param_desc *p, int count) {
    int64_t sum = 0;
    for (int i = 0; i < count; i++) sum += lab_numel(p[i].ndim, p[i].shape);
    return sum;
}

typedef struct {
    int64_t m, nb, u, s; /* elements of a block, of the root, of all, of this rank's shards */
} sizes;

/* Root of embeddings and norm, blocks. */
static sizes memory_model(rig *r, int layers, int64_t d, const fsdp_model_desc *md) {
    fsdp_param_desc p[16], root[4] = {fsdp_mat("tokens", 32, d), fsdp_mat("positions", 64, d),
                                      fsdp_vec("norm", d), fsdp_vec("bias", d)};
    sizes z;
    int count = block_params(p, d);
    CALL(r->s.world, fsdp_model_create(r->s.world, md, &r->model));
    r->around = 1;
    rig_unit(r, root, 4, NULL);
    for (int i = 0; i < layers; i++) rig_unit(r, p, count, NULL);
    z.m = numel_of(p, count), z.nb = numel_of(root, 4), z.u = layers * z.m + z.nb;
    z.s = (z.u + r->s.world_size - 1) / r->s.world_size;
    return z;
}

/* Elements of f32: all; without shards and their gradients. */
static int64_t all_of(const rig *r) {
    fsdp_memory now;
    CHECK_OK(fsdp_model_memory(r->model, &now));
    return now.total_bytes / 4;
}
static int64_t working(const rig *r) {
    fsdp_memory now;
    CHECK_OK(fsdp_model_memory(r->model, &now));
    return (now.total_bytes - now.pool_bytes[FSDP_POOL_SHARD] -
            now.pool_bytes[FSDP_POOL_SHARD_GRAD]) /
           4;
}
static int64_t on_device(const rig *r) {
    return r->s.live_bytes[SIM_MEMORY_COMM] + r->s.live_bytes[FSDP_MEMORY_DEVICE];
}
#define AT_MOST(got, limit)                                                                        \
    CHECK_MSG((got) <= (limit), "%s: " #got " is %lld, at most " #limit ", %lld", name,            \
              (long long)(got), (long long)(limit))

/* fsdp2-core.md 9.3. Gradients of shards are laid out with the shards, so they are compared by
   themselves: upstream has (L-2)/W blocks of them at its peak of backward, which with offload are
   on their way to the host, as ours. */
static void training_memory(int raf, int async, int offload) {
    enum { LAYERS = 3, DIM = 768, WORLD = 2 };
    fsdp_memory now, predicted;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_adamw *adam;
    char name[64];
    rig r;
    snprintf(name, sizeof name, "raf %d, async %d, offload %d", raf, async, offload);
    rig_open(&r, WORLD, async);
    md.reshard_after_forward = raf, md.cpu_offload = offload;
    sizes z = memory_model(&r, LAYERS, DIM, &md);
    int64_t m = z.m, nb = z.nb, u = z.u, s = z.s, slack = 16 * 1024 * 1024 / 4;
    int64_t small = 4 * nb + 65536, g = offload ? 0 : (LAYERS - 2) * m / WORLD;
    CHECK_EQ_INT(m, 7084800);
    int64_t base = on_device(&r);
    CALL(r.s.world, fsdp_model_predict(r.model, &predicted));
    CHECK_EQ_INT(on_device(&r), base);
    CALL(r.s.world, fsdp_model_commit(r.model));
    CALL(r.s.world, fsdp_model_memory(r.model, &now));
    AT_MOST(now.pool_bytes[FSDP_POOL_SHARD] / 4, s + 4096); /* upstream: s + m */
    AT_MOST(now.pool_bytes[FSDP_POOL_SHARD_GRAD] / 4, s + 4096);
    AT_MOST(working(&r), 4096);
    rig_forward(&r);
    AT_MOST(working(&r), raf == NEVER ? u + m : 3 * m + nb);
    if (!offload) AT_MOST(all_of(&r), (raf == NEVER ? s + u + m : 3 * m + nb + s) + slack);
    rig_backward(&r);
    AT_MOST(working(&r), (raf == NEVER ? u + m + m / 2 : 3 * m + nb + s) - g + small +
                             (raf == NEVER && async ? m : 0)); /* a second slot overlaps */
    if (!offload && !async && raf != NEVER) AT_MOST(all_of(&r), 3 * m + nb + 2 * s + slack);
    if (!async && raf != NEVER) AT_MOST(working(&r), 2 * m + (offload ? m / WORLD : 0) + 2 * small);
    CALL(r.s.world, fsdp_model_memory(r.model, &now));
    CHECK_EQ_INT(now.total_bytes, predicted.total_bytes);
    if (!offload) CHECK_EQ_INT(on_device(&r) - base, now.total_bytes); /* the device's own count */
    /* the optimizer: parameters, gradients, two states, and nothing on the way */
    int64_t before = now.host_bytes, working_before = working(&r), device = on_device(&r);
    CALL(r.s.world, fsdp_adamw_create(r.model, NULL, &adam));
    CALL(r.s.world, fsdp_adamw_step(adam, 0.01));
    CALL(r.s.world, fsdp_model_memory(r.model, &now));
    const int on = async && !offload; /* where the states are */
    AT_MOST((now.host_bytes - before) / 4, on ? 4096 : 2 * s + 4096);
    AT_MOST((on_device(&r) - device) / 4, on ? 2 * s + 4096 : 0);
    CHECK(now.host_bytes - before + on_device(&r) - device >= 8 * s);
    CALL(r.s.world, fsdp_zero_grad(r.model));
    AT_MOST((on_device(&r) - base) / 4, (offload ? 0 : (2 + 2 * on) * s + 12288) + working_before);
    for (int step = 0; step < 3; step++) {
        rig_forward(&r);
        rig_backward(&r);
        CALL(r.s.world, fsdp_adamw_step(adam, 0.01));
        CALL(r.s.world, fsdp_zero_grad(r.model));
    }
    CHECK_EQ_INT(working(&r), working_before);
    /* the elements that offload leaves on the device */
    if (offload) {
        AT_MOST(on_device(&r) / 4, (raf == NEVER ? u + 2 * m : 3 * m + nb + s) + slack);
        CHECK(r.s.live_bytes[FSDP_MEMORY_PINNED] / 4 >= 2 * s);
    }
    h_message("%s: %.2f blocks forward and backward above %.2f of shards and gradients", name,
              (double)working_before / (double)m, 2 * (double)s / (double)m);
    rig_close(&r);
}

/* Not with AddressSanitizer: there each slot has room for more, guard.h. */
/* PyTorch: test_fully_shard_memory.py test_fully_shard_training_memory. Differs: shard gradients
   and working memory are kept: 2s after sharding (PyTorch: s + m), 4s and the working memory after
   zero_grad with Adam (PyTorch: 3s). With streams and no reshard one block more. No optimizer in
   backward: it would free nothing. */
TEST(fully_shard_memory, training_memory, SLOW | NO(ASAN)) {
    for (int k = 0; k < 8; k++) training_memory(k & 1 ? NEVER : ALWAYS, k >> 1 & 1, k >> 2);
}

/* Ten more steps allocate nothing. */
static void ten_more_steps(rig *r) {
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    int64_t blocks = 0, bytes = 0;
    for (int step = 0; step < 12; step++) {
        rig_forward(r);
        rig_backward(r);
        CALL(r->s.world, fsdp_params_changed(r->model));
        CALL(r->s.world, fsdp_zero_grad(r->model));
        if (step != 1) continue;
        CALL(r->s.world, fsdp_model_counters(r->model, &before));
        blocks = r->s.num_blocks, bytes = all_of(r);
    }
    CALL(r->s.world, fsdp_model_counters(r->model, &after));
    CHECK_EQ_INT(after.allocations, before.allocations);
    CHECK_EQ_INT(r->s.num_blocks, blocks);
    CHECK_EQ_INT(all_of(r), bytes);
}

/* Six layers of dim 2048, attention, MLP and norms of each a unit of its own. */
/* PyTorch: test_fully_shard_memory.py test_fully_shard_training_memory_no_gc. Done: ten more steps
   allocate nothing (PyTorch: up to 2 MB). No optimizer (PyTorch: Adam). */
TEST(fully_shard_memory, training_memory_no_gc, SLOW) {
    enum { DIM = 2048 };
    for (int async = 0; async < 2; async++) {
        fsdp_param_desc p[16], root = fsdp_mat("tokens", 32, DIM);
        rig r;
        rig_open(&r, 2, async);
        CALL(r.s.world, fsdp_model_create(r.s.world, NULL, &r.model));
        int count = block_params(p, DIM);
        r.around = 1;
        rig_unit(&r, &root, 1, NULL);
        for (int l = 0; l < 6; l++) {
            rig_unit(&r, p, 4, NULL);
            rig_unit(&r, p + 4, 4, NULL);
            rig_unit(&r, p + 8, count - 8, NULL);
        }
        ten_more_steps(&r);
        rig_close(&r);
    }
}

/* Building costs no device memory, and deleting gives all of it back. */
/* PyTorch: test_fully_shard_memory.py test_fully_shard_del_memory. Differs: sharding allocates s
   for the shards and s for their gradients (PyTorch: s). Deleting returns all of it. */
TEST(fully_shard_memory, del_memory, SLOW) {
    for (int async = 0; async < 2; async++) {
        static const char name[] = "del";
        fsdp_memory now;
        rig r;
        rig_open(&r, 2, async);
        int64_t base = r.s.live_blocks, bytes = on_device(&r);
        sizes z = memory_model(&r, 3, 768, NULL);
        CHECK_EQ_INT(r.s.live_blocks, base);
        CALL(r.s.world, fsdp_model_commit(r.model));
        CALL(r.s.world, fsdp_model_memory(r.model, &now));
        AT_MOST(now.pool_bytes[FSDP_POOL_SHARD] / 4, z.s + 4096);
        AT_MOST(now.pool_bytes[FSDP_POOL_SHARD_GRAD] / 4, z.s + 4096);
        AT_MOST((on_device(&r) - bytes) / 4, 2 * z.s + 8192);
        CHECK((on_device(&r) - bytes) / 4 >= 2 * z.s);
        rig_forward(&r);
        rig_backward(&r);
        fsdp_model_destroy(r.model);
        CHECK_EQ_INT(r.s.live_blocks, base);
        CHECK_EQ_INT(on_device(&r), bytes);
        rig_close(&r);
    }
}

/* Adam's two states, which inline lie on the host, and the gradients are shards, too; the working
   memory of a step stays. */
static void adam_memory(rig *r, const char *name, int64_t s, int64_t small, int async) {
    fsdp_adamw *adam;
    const int64_t device = on_device(r), all = all_of(r), work = working(r);
    CALL(r->s.world, fsdp_adamw_create(r->model, NULL, &adam));
    for (int step = 0; step < 2; step++) {
        rig_forward(r);
        rig_backward(r);
        CALL(r->s.world, fsdp_adamw_step(adam, 0.01));
        AT_MOST((on_device(r) - device) / 4 + all, (2 + 2 * async) * s + work + small);
        CALL(r->s.world, fsdp_zero_grad(r->model));
        CHECK_EQ_INT(all_of(r), all);
        CHECK_EQ_INT(working(r), work);
    }
    CHECK((on_device(r) - device) / 4 >= 2 * s * async);
    fsdp_adamw_destroy(adam);
    CHECK_EQ_INT(on_device(r), device);
}

/* Experts are sharded over half of the ranks. */
/* PyTorch: test_fully_shard_memory.py test_per_param_mesh_training_memory_no_gc. Differs: the bound
   of forward is PyTorch's and s, as gradients are laid out with the shards. At most 4s and the
   working memory after zero_grad (PyTorch: 3s). */
TEST(fully_shard_memory, per_param_mesh_training_memory_no_gc, SLOW) {
    enum { WORLD = 8, LAYERS = 3, DIM = 256 };
    for (int async = 0; async < 2; async++) {
        fsdp_param_desc p[16], root = fsdp_mat("tokens", 32, DIM);
        fsdp_mesh *dp;
        char name[16];
        rig r;
        snprintf(name, sizeof name, "async %d", async);
        rig_open(&r, WORLD, async);
        dp = lab_slice(r.s.world, lab_mesh2(r.s.world, WORLD / 2, 2, "dp", "ep"), 0);
        CALL(r.s.world, fsdp_model_create(r.s.world, NULL, &r.model));
        int count = block_params(p, DIM);
        r.around = 1;
        rig_unit(&r, &root, 1, NULL);
        for (int l = 0; l < LAYERS; l++) {
            rig_unit(&r, p, 4, NULL);
            rig_unit(&r, p + 4, count - 4, dp);
        }
        int64_t m = numel_of(p, count), nb = numel_of(&root, 1), small = nb + 32768;
        int64_t s = nb / WORLD +
                    LAYERS * (numel_of(p, 4) / WORLD + numel_of(p + 4, count - 4) / (WORLD / 2));
        CALL(r.s.world, fsdp_model_commit(r.model));
        AT_MOST(all_of(&r), 2 * s + small);
        rig_forward(&r);
        AT_MOST(all_of(&r), 3 * m + nb + s + s); /* with the gradients of the shards */
        rig_backward(&r);
        AT_MOST(all_of(&r), 4 * m + nb + 2 * s + small);
        ten_more_steps(&r);
        adam_memory(&r, name, s, small, async);
        rig_close(&r);
    }
}

/* fsdp2-core.md 9.2: peaks above shards and their gradients, in blocks; and ours where they are
   other. Pools are kept, so that backward never has less than forward. */
static const struct peak {
    const char *name;
    int layers, world, raf, async, prefetch, mixed, plain;
    double forward, backward, ours_forward, ours_backward;
} peaks[] = {
    {"L=3 W=2", 3, 2, ALWAYS, 1, 0, 0, 0, 2, 4, 2, 4},
    {"L=8 W=8", 8, 8, ALWAYS, 1, 0, 0, 0, 2, 4, 2, 4},
    {"L=8 W=2", 8, 2, ALWAYS, 1, 0, 0, 0, 2, 4, 2, 4},
    {"L=8 W=2 plain", 8, 2, ALWAYS, 1, 0, 0, 1, 2, 4, 2, 4},
    {"L=8 W=2 inline", 8, 2, ALWAYS, 0, 0, 0, 0, 2, 4, 1, 2},
    {"prefetch 1", 6, 2, ALWAYS, 1, 1, 0, 0, 3, 4, 2, 4},
    /* above upstream: the third slot of forward is not used for gradients */
    {"prefetch 2", 6, 2, ALWAYS, 1, 2, 0, 0, 4, 4, 3, 5},
    {"RAF False inline", 8, 8, NEVER, 0, 0, 0, 0, 9, 9, 8, 9},
    /* above upstream: a second slot of gradients, which overlaps */
    {"RAF False", 8, 8, NEVER, 1, 0, 0, 0, 9, 9, 8, 10},
    {"mixed L=6 W=4", 6, 4, ALWAYS, 1, 0, 1, 0, 1.125, 2.5, 1, 2},
    {"mixed L=6 W=4 inline", 6, 4, ALWAYS, 0, 0, 1, 0, 1.125, 2.5, 0.5, 1},
    {"mixed L=6 W=4 inline plain", 6, 4, ALWAYS, 0, 0, 1, 1, 1.125, 2.5, 0.5, 2},
    {"mixed L=6 W=4 plain", 6, 4, ALWAYS, 1, 0, 1, 1, 1.125, 2.5, 1, 2.5},
};

/* PyTorch: none. Own: peaks above shards and their gradients, to 0.01 block. Two are above
   PyTorch's, with streams: forward prefetch of depth 2 (5 blocks, PyTorch 4), and no reshard (L+2,
   PyTorch L+1). */
TEST_P(fully_shard_memory, table_9_2, peaks, SLOW) {
    enum { SIDE = 256 };
    fsdp_param_desc p = fsdp_mat("w", SIDE, SIDE);
    fsdp_model_desc md = FSDP_ZERO;
    rig r;
    memset(&r, 0, sizeof r);
    sim_init(&r.s, row->world, 0);
    r.s.async = row->async, r.s.moves = 0, r.s.fused = !row->plain;
    CHECK(sim_open(&r.s));
    md.reshard_after_forward = row->raf;
    if (row->mixed) md.param_dtype = FSDP_BF16, md.reduce_dtype = FSDP_F32;
    CALL(r.s.world, fsdp_model_create(r.s.world, &md, &r.model));
    for (int i = 0; i < row->layers; i++) rig_unit(&r, &p, 1, NULL);
    for (int i = 0; i < row->layers && row->prefetch; i++) {
        fsdp_unit *next[2];
        int n = 0;
        while (n < row->prefetch && i + n + 1 < row->layers) next[n] = r.unit[i + n + 1], n++;
        CALL(r.s.world, fsdp_set_modules_to_forward_prefetch(r.unit[i], next, n));
    }
    rig_forward(&r);
    double forward = (double)working(&r) / (SIDE * SIDE);
    rig_backward(&r);
    double backward = (double)working(&r) / (SIDE * SIDE);
    h_message("%.3f blocks in forward, %.3f in backward; upstream %.3f, %.3f", forward, backward,
              row->forward, row->backward);
    CHECK_NEAR(forward, row->ours_forward, 0.01);
    CHECK_NEAR(backward, row->ours_backward, 0.01);
    rig_close(&r);
}

/* ---- what an observer receives --------------------------------------------------------------- */

static const char *const call_names[] = {
#define FSDP_X(name, text) text,
    FSDP_CALL_LIST(FSDP_X)
#undef FSDP_X
};
typedef struct {
    char text[4096];
    int length;
} diary;
static int write_diary(void *user, fsdp_model *model, fsdp_op *op) {
    diary *d = (diary *)user;
    (void)model;
    if (op->kind != FSDP_OP_HOOK) return 0;
    d->length += snprintf(d->text + d->length, sizeof d->text - (size_t)d->length, "%s(%s)\n",
                          call_names[op->count], op->unit ? fsdp_unit_name(op->unit) : "model");
    CHECK(d->length < (int)sizeof d->text);
    return 0;
}

/* PyTorch: test_fully_shard_logging.py test_fsdp_logging. Differs: an observer sees ops of kind
   HOOK, which name the call and the unit. */
TEST(fully_shard_logging, fsdp_logging) {
    static const char expected[] =
        "pre_forward(root)\n"
        "pre_forward(mlp.0)\npost_forward(mlp.0)\npre_forward(mlp.1)\npost_forward(mlp.1)\n"
        "post_forward(root)\n"
        "pre_backward(root)\n"
        "pre_backward(mlp.1)\npost_backward(mlp.1)\npre_backward(mlp.0)\npost_backward(mlp.0)\n"
        "post_backward(root)\n"
        "finalize_backward(model)\n";
    static const char *const names[] = {"root", "mlp.0", "mlp.1"};
    fsdp_param_desc p = fsdp_mat("w", 8, 8);
    fsdp_extension watcher = FSDP_ZERO;
    watcher.op = write_diary;
    static diary d;
    rig r;
    rig_open(&r, 2, 0);
    CALL(r.s.world, fsdp_model_create(r.s.world, NULL, &r.model));
    for (int i = 0; i < 3; i++) {
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.name = names[i], ud.params = &p, ud.num_params = 1;
        CALL(r.s.world, fsdp_fully_shard(r.model, &ud, &r.unit[r.count++]));
    }
    r.around = 1, watcher.user = &d;
    CALL(r.s.world, fsdp_attach(r.model, &watcher));
    rig_forward(&r);
    rig_backward(&r);
    CHECK_EQ_STR(d.text, expected);
    rig_close(&r);
}
