/* test_fully_shard_training.c - upstream's test_fully_shard_training by name: whole trainings on
   thread ranks beside a replicated copy in plain C, and how often the library communicates. What
   stands for torch's modules is in fully_shard.h.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"
#include "fully_shard.h"

enum { ALWAYS = FSDP_RESHARD_ALWAYS, NEVER = FSDP_RESHARD_NEVER };
static const int worlds[] = {1, 2, 3, 4, 8};
#define COUNT(array) (sizeof(array) / sizeof *(array))

/* ---- one unit -------------------------------------------------------------------------------- */

/* The output is the parameter itself. */
static double no_inputs(fs_run *x, int it, int m) {
    double loss = 0, dw[64];
    (void)it, (void)m;
    fs_pre_forward(x, 0);
    const double *w = fs_data(x, 0, 0);
    for (int64_t i = 0; i < 15; i++) {
        double off = w[i] - fs_sample(x, 1, i);
        loss += off * off / 15;
        dw[i] = 2 * off / 15;
    }
    fs_post_forward(x, 0);
    fs_pre_backward(x, 0);
    fs_add_grad(x, 0, 0, dw);
    fs_post_backward(x, 0);
    return loss;
}

TEST(fully_shard_training, root_no_forward_inputs) {
    static fs_net net;
    fs_net_begin(&net, 1, 1);
    fs_param_add(&net, fs_unit_add(&net, "only"), 5, 3, 0);
    for (size_t i = 0; i < COUNT(worlds); i++) {
        fs_conf c = fs_conf_of(&net, 1, worlds[i]);
        c.micro = no_inputs;
        fs_train(&c);
    }
}

/* A linear in the root and an MLP. */
static void root_and_mlp(fs_net *net, int64_t d) {
    fs_net_begin(net, 2, d);
    net->around = 1;
    fs_unit_add(net, "root");
    fs_linear(net, 0, d, d);
    fs_mlp(net, fs_unit_add(net, "mlp"), d, 4);
}

static void check_registered(fs_run *x, int unit, fsdp_storage_state expected) {
    const fs_unit *u = &x->net->units[unit];
    W_CHECK(fsdp_unit_storage(x->unit[unit]) == expected, "unit %d is in state %d, expected %d",
            unit, (int)fsdp_unit_storage(x->unit[unit]), (int)expected);
    if (expected != FSDP_STORAGE_UNSHARDED) return;
    for (int p = 0; p < u->count; p++) {
        const double *data = fs_data(x, unit, p);
        const double *want = x->it ? x->story->param[x->it - 1] + u->params[p].at : NULL;
        for (int64_t e = 0; e < u->params[p].numel; e++)
            fs_check_near(x, "full parameter", unit, p, e, data[e],
                          want ? want[e] : fs_initial(x->net, unit, p, e));
    }
}

static double registration(fs_run *x, int it, int m) {
    static const fsdp_storage_state after[] = {FSDP_STORAGE_SHARDED, FSDP_STORAGE_UNSHARDED,
                                               FSDP_STORAGE_SHARDED_POST_FORWARD};
    const int raf = x->c->raf;
    fsdp_storage_state inner = after[raf == NEVER ? 1 : raf > 1 ? 2 : 0];
    (void)m;
    fs_feed(x, &x->tape[0]);
    if (x->model && it % 2) { /* a forward that is not followed by a backward; resharded by hand */
        CALL(x->world, fsdp_set_grad_enabled(x->model, 0));
        fs_forward(x, &x->tape[0]);
        for (int u = 0; u < 2; u++) {
            check_registered(x, u, !u && !raf ? FSDP_STORAGE_UNSHARDED : inner);
            CALL(x->world, fsdp_reshard(x->unit[u]));
            check_registered(x, u, FSDP_STORAGE_SHARDED);
        }
        CALL(x->world, fsdp_set_grad_enabled(x->model, 1));
    }
    fs_feed(x, &x->tape[0]);
    fs_forward(x, &x->tape[0]);
    for (int u = 0; u < 2 && x->model; u++)
        check_registered(x, u, !u && !raf ? FSDP_STORAGE_UNSHARDED : inner);
    double loss = fs_loss(x, &x->tape[0], 1);
    fs_backward(x, &x->tape[0]);
    return loss;
}
static void sharded_again(fs_run *x, int it, int m) {
    (void)it, (void)m;
    for (int u = 0; u < x->net->count; u++) check_registered(x, u, FSDP_STORAGE_SHARDED);
}

/* After forward: shards where reshard_after_forward says so. */
TEST(fully_shard_training, param_registration_after_forward) {
    static const int modes[] = {0, ALWAYS, NEVER, 2};
    static fs_net net;
    root_and_mlp(&net, 3);
    for (size_t i = 0; i < COUNT(modes); i++) {
        fs_conf c = fs_conf_of(&net, 1, 4);
        c.raf = modes[i], c.micro = registration, c.iters = 4;
        fs_train(&c);
    }
}

TEST(fully_shard_training, param_registration_after_backward) {
    static const int modes[] = {0, ALWAYS, NEVER, 2};
    static fs_net net;
    root_and_mlp(&net, 3);
    for (size_t i = 0; i < COUNT(modes); i++) {
        fs_conf c = fs_conf_of(&net, 1, 4);
        c.raf = modes[i], c.after = sharded_again, c.iters = 4;
        fs_train(&c);
    }
}

/* Here the dtype stands in the desc from the beginning. */
TEST(fully_shard_training, to_float64_after_init) {
    static fs_net net;
    root_and_mlp(&net, 4);
    for (size_t i = 0; i < COUNT(worlds); i++) {
        fs_conf c = fs_conf_of(&net, 1, worlds[i]);
        c.stored = FSDP_F64;
        fs_train(&c);
    }
}

/* Two linears in one unit. */
static void two_linears(fs_net *net, int64_t a, int64_t b, int64_t c) {
    fs_net_begin(net, 4, a);
    fs_unit_add(net, "all");
    fs_linear(net, 0, a, b);
    fs_relu(net);
    fs_linear(net, 0, b, c);
}
static void shard_largest_dim(fs_net *net) {
    for (int u = 0; u < net->count; u++)
        for (int p = 0; p < net->units[u].count; p++) {
            fs_param *q = &net->units[u].params[p];
            q->shard_dim = q->ndim == 2 && q->shape[1] > q->shape[0];
        }
}

TEST(fully_shard_training, train_parity_single_group_shard_dim0) {
    static const int64_t dims[][3] = {{16, 15, 8}, {7, 15, 3}, {16, 17, 8}};
    static fs_net net;
    for (size_t i = 0; i < COUNT(dims); i++)
        for (size_t k = 0; k < COUNT(worlds); k++) {
            two_linears(&net, dims[i][0], dims[i][1], dims[i][2]);
            fs_conf c = fs_conf_of(&net, 1, worlds[k]);
            c.direct_min = (int64_t)(k % 2); /* packed, direct */
            fs_train(&c);
        }
}

TEST(fully_shard_training, train_parity_single_group_shard_largest_dim) {
    static fs_net net;
    two_linears(&net, 32, 16, 8);
    shard_largest_dim(&net);
    CHECK_EQ_INT(net.units[0].params[0].shard_dim, 1);
    for (size_t k = 0; k < COUNT(worlds); k++) { /* 3 ranks: upstream refuses uneven columns */
        fs_conf c = fs_conf_of(&net, 1, worlds[k]);
        fs_train(&c);
    }
}

/* ---- several units --------------------------------------------------------------------------- */

static const int reshards[] = {ALWAYS, NEVER, 2};

static fs_conf multi_group(fs_net *net, int shards, int raf) {
    fs_transformer(net, 3, 8, 8, 1);
    fs_conf c = fs_conf_of(net, 1, shards);
    c.raf = raf, c.adam = 1, c.lr = 0.01;
    return c;
}

static double slow_micro(fs_run *x, int it, int m) {
    (void)m;
    fs_feed(x, &x->tape[0]);
    fs_forward(x, &x->tape[0]);
    if (x->model && (fs_slow & FS_SLOW_FORWARD)) fs_dawdle((uint64_t)it, (uint64_t)h_rank);
    double loss = fs_loss(x, &x->tape[0], 1);
    fs_backward(x, &x->tape[0]);
    return loss;
}
static void slow_optimizer(fs_run *x, int it, int m) {
    (void)m;
    if (fs_slow & FS_SLOW_OPTIM) fs_dawdle((uint64_t)it + 77, (uint64_t)x->rank);
}

/* Delays before the gathers, before the reductions, after forward, before the optimizer; all. */
TEST(fully_shard_training, train_parity_multi_group) {
    static const int delays[] = {0, FS_SLOW_GATHER, FS_SLOW_REDUCE, FS_SLOW_FORWARD, FS_SLOW_OPTIM,
                                 15};
    static fs_net net;
    fsdp_comm_ops slow = fs_slow_ops();
    fs_conf c = multi_group(&net, 4, 0);
    fs_story *s = fs_tell(&c);
    for (size_t i = 0; i < COUNT(reshards); i++)
        for (size_t k = 0; k < COUNT(delays); k++) {
            fs_slow = delays[k];
            c.raf = reshards[i], c.comm_ops = &slow, c.micro = slow_micro, c.after = slow_optimizer;
            c.lanes = (int)(i + k) % 3, c.prefetch = k & 1 ? FSDP_PREFETCH_ALWAYS : 0;
            fs_train_beside(&c, s);
        }
    fs_story_free(s, &c);
}

static void in_every_way(int offload, int ahead) {
    static fs_net net;
    fs_conf c = multi_group(&net, 4, 0);
    fs_story *s = fs_tell(&c);
    c.offload = offload, c.ahead = ahead;
    for (size_t i = 0; i < COUNT(reshards); i++)
        for (int lanes = 0; lanes < 3; lanes++) {
            c.raf = reshards[i], c.lanes = lanes;
            fs_train_beside(&c, s);
        }
    fs_story_free(s, &c);
}
TEST(fully_shard_training, train_parity_multi_group_cpu_offload) { in_every_way(1, 0); }
TEST(fully_shard_training, train_parity_multi_group_unshard_async_op) { in_every_way(0, 1); }

/* Every second step goes through the first child alone. */
static double child_alone(fs_run *x, int it, int m) {
    if (it % 2 == 0) return fs_micro(x, it, m);
    int unit, from = fs_group(x->net, 0, &unit), to = fs_group(x->net, from, &unit);
    fs_tape *t = &x->tape[0];
    CHECK_EQ_INT(unit, 1);
    fs_feed(x, t);
    for (int64_t i = 0; i < x->net->batch * x->net->layers[from].in; i++)
        t->in[from][i] = fs_sample(x, 0, i);
    t->dtype[from] = t->dtype[0];
    fs_pre_forward(x, 1);
    fs_layers_forward(x, t, 1, from, to);
    fs_post_forward(x, 1);
    double loss = fs_loss_at(x, t, to, 1);
    fs_group_backward(x, t, 1, from, to);
    return loss;
}

TEST(fully_shard_training, non_root_forward_backward) {
    static fs_net net;
    fs_net_begin(&net, 2, 8);
    net.around = 1;
    fs_unit_add(&net, "root");
    fs_linear(&net, 0, 8, 8);
    for (int i = 0; i < 3; i++) fs_mlp(&net, fs_unit_add(&net, "mlp"), 8, 4);
    for (int raf = -1; raf <= 1; raf++) {
        fs_conf c = fs_conf_of(&net, 1, 2);
        c.raf = raf, c.micro = child_alone;
        fs_train(&c);
    }
}

/* The inner unit is used before and after another one. */
static void multi_forward(fs_net *net) {
    fs_net_begin(net, 4, 8);
    fs_unit_add(net, "inner"), fs_unit_add(net, "between"), fs_unit_add(net, "outer");
    fs_linear(net, 0, 8, 8);
    fs_relu(net);
    fs_linear(net, 1, 8, 8);
    fs_layer_add(net, FS_LINEAR, 0, 0, 8, 8);
    fs_relu(net);
    fs_linear(net, 2, 8, 8);
}
/* Its backward ends with the last visit, as in autograd. */
static double one_post_backward(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    (void)it, (void)m;
    fs_feed(x, t);
    fs_forward(x, t);
    double loss = fs_loss(x, t, 1);
    fs_group_backward(x, t, 2, 5, 6);
    fs_pre_backward(x, 0);
    fs_layers_backward(x, t, 3, 5);
    fs_group_backward(x, t, 1, 2, 3);
    fs_pre_backward(x, 0);
    fs_layers_backward(x, t, 0, 2);
    fs_post_backward(x, 0);
    return loss;
}

TEST(fully_shard_training, multi_forward_module) {
    static fs_net net;
    multi_forward(&net);
    for (size_t i = 0; i < COUNT(reshards); i++)
        for (int visits = 0; visits < 2; visits++) {
            fs_conf c = fs_conf_of(&net, 1, 4);
            c.raf = reshards[i], c.micro = visits ? fs_micro : one_post_backward;
            c.lanes = visits;
            fs_train(&c);
        }
}

/* Lists of the next two units in both directions. */
static void prefetch_two(fs_run *x) {
    int count = x->net->count;
    for (int u = 0; u < count; u++) {
        fsdp_unit *next[2], *before[2];
        int n = 0, b = 0;
        for (int k = 1; k <= 2; k++) {
            if (u + k < count) next[n++] = x->unit[u + k];
            if (u - k >= 0) before[b++] = x->unit[u - k];
        }
        CALL(x->world, fsdp_set_modules_to_forward_prefetch(x->unit[u], next, n));
        CALL(x->world, fsdp_set_modules_to_backward_prefetch(x->unit[u], before, b));
    }
}

TEST(fully_shard_training, explicit_prefetching) {
    static fs_net net;
    fs_transformer(&net, 8, 8, 8, 1);
    fs_conf c = fs_conf_of(&net, 1, 2);
    fs_story *s = fs_tell(&c);
    c.build = prefetch_two;
    for (int lanes = 0; lanes < 3; lanes++)
        for (int raf = -1; raf <= 1; raf++) {
            c.lanes = lanes, c.raf = raf;
            fs_train_beside(&c, s);
        }
    fs_story_free(s, &c);
}

/* Nothing is resharded by backward: what is still gathered is stale behind the optimizer. */
static void kept_after_backward(fs_run *x) {
    CALL(x->world, fsdp_set_reshard_after_backward(x->model, NULL, 0));
}
static void still_gathered(fs_run *x, int it, int m) {
    slow_optimizer(x, it, m);
    for (int u = 0; u < x->net->count; u++)
        CHECK_EQ_INT(fsdp_unit_storage(x->unit[u]), FSDP_STORAGE_UNSHARDED);
}

/* fsdp_params_changed is the event: whatever delays the optimizer, gathers come after it. */
TEST(fully_shard_training, post_optim_event) {
    static fs_net net;
    fsdp_comm_ops slow = fs_slow_ops();
    fs_transformer(&net, 3, 8, 8, 1);
    fs_conf c = fs_conf_of(&net, 1, 2);
    fs_story *s = fs_tell(&c);
    c.comm_ops = &slow, c.after = slow_optimizer;
    fs_slow = FS_SLOW_OPTIM | FS_SLOW_GATHER;
    for (int lanes = 0; lanes < 3; lanes++) {
        c.lanes = lanes, c.ahead = 1, c.build = NULL, c.after = slow_optimizer;
        fs_train_beside(&c, s);
        c.build = kept_after_backward, c.after = still_gathered;
        fs_train_beside(&c, s);
    }
    fs_story_free(s, &c);
    c.adam = 1, c.lr = 0.01;
    fs_train(&c);
}

/* ---- activation checkpointing ---------------------------------------------------------------- */

/* Embedding; blocks; norm and head; each a unit. */
static void three_parts(fs_net *net) {
    fs_net_begin(net, 4, 1);
    net->vocab = 8;
    fs_unit_add(net, "embeddings");
    fs_layer_add(net, FS_EMBED, 0, fs_param_add(net, 0, 8, 8, 0), 1, 8);
    for (int i = 0; i < 3; i++) fs_block(net, fs_unit_add(net, "block"), 8);
    int last = fs_unit_add(net, "norm and output");
    fs_norm(net, last, 8);
    fs_layer_add(net, FS_UNEMBED, last, fs_param_add(net, last, 8, 8, 0), 8, 8);
}
/* Embedding and head are one tied unit, used first and last; the norm belongs to the root. */
static void tied_group(fs_net *net) {
    fs_net_begin(net, 4, 1);
    net->vocab = 8;
    fs_unit_add(net, "embedding and output");
    net->units[0].raf = NEVER;
    fs_layer_add(net, FS_EMBED, 0, fs_param_add(net, 0, 8, 8, 0), 1, 8);
    for (int i = 0; i < 3; i++) fs_block(net, fs_unit_add(net, "block"), 8);
    fs_norm(net, fs_unit_add(net, "norm"), 8);
    fs_layer_add(net, FS_UNEMBED, 0, 0, 8, 8);
}
/* The backward of an embedding needs no parameters. */
static void no_unshard_in_backward(fs_run *x) {
    CALL(x->world, fsdp_set_unshard_in_backward(x->model, x->unit[0], 0));
    fs_watch(x);
}
static void gathers_of_embeddings(fs_run *x, int it, int m) {
    (void)it, (void)m;
    int per_step = x->c->ac ? 2 : 1; /* recompute gathers in any case */
    CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, 0), per_step);
    CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, 1), 2);
    fs_watch(x);
}

TEST(fully_shard_training, activation_checkpointing) {
    static fs_net nets[3];
    fs_transformer(&nets[0], 3, 8, 8, 1);
    three_parts(&nets[1]);
    tied_group(&nets[2]);
    for (int n = 0; n < 3; n++) {
        fs_conf c = fs_conf_of(&nets[n], 1, 4);
        fs_story *s = fs_tell(&c);
        for (int ac = 0; ac <= FS_AC_NESTED; ac++)
            for (size_t i = 0; i < COUNT(reshards); i++) {
                c.ac = ac, c.raf = reshards[i], c.lanes = n == 1 ? 0 : (ac + (int)i) % 3;
                c.build = n == 1 ? no_unshard_in_backward : NULL;
                c.after = n == 1 && c.raf != NEVER ? gathers_of_embeddings : NULL;
                fs_train_beside(&c, s);
            }
        fs_story_free(s, &c);
    }
}

/* Two forwards, one loss of both, nested units, recompute inside the backward of others. */
static double two_forwards(fs_run *x, int it, int m) {
    double loss = 0;
    for (int t = 0; t < 2; t++) {
        x->micro = m + 2 * t; /* another input */
        fs_feed(x, &x->tape[t]);
        fs_forward(x, &x->tape[t]);
    }
    for (int t = 1; t >= 0; t--) {
        x->micro = m + 2 * t;
        fs_feed(x, &x->tape[FS_TAPES - 1]); /* the targets */
        loss += fs_loss(x, &x->tape[t], 0.5);
        int unit, from;
        if (t == 1 && x->net->around) fs_pre_backward(x, 0);
        for (int to = x->net->num_layers; to > 0; to = from) {
            from = fs_group_before(x->net, to, &unit);
            fs_group_backward(x, &x->tape[t], unit, from, to);
        }
    }
    x->micro = m;
    (void)it;
    return loss;
}

TEST(fully_shard_training, double_forward_with_nested_fsdp_and_checkpoint) {
    static fs_net net;
    fs_transformer(&net, 3, 8, 8, 1);
    fs_conf c = fs_conf_of(&net, 1, 2);
    c.micro = two_forwards;
    fs_story *s = fs_tell(&c);
    for (int ac = 0; ac <= FS_AC_NESTED; ac++)
        for (size_t i = 0; i < COUNT(reshards); i++) {
            c.ac = ac, c.raf = reshards[i], c.lanes = (int)i;
            fs_train_beside(&c, s);
        }
    fs_story_free(s, &c);
}

/* ---- a unit of several modules --------------------------------------------------------------- */

/* A body; a norm and a head, in one unit or in two. */
static void norm_and_head(fs_net *net, int grouped) {
    fs_net_begin(net, 4, 8);
    fs_mlp(net, fs_unit_add(net, "body"), 8, 2);
    int norm = fs_unit_add(net, "norm"), head = grouped ? norm : fs_unit_add(net, "head");
    fs_norm(net, norm, 8);
    fs_linear(net, head, 8, 6);
}
enum { BODY_END = 4, NORM_END = 5 };
static int head_of(const fs_run *x) { return x->net->layers[NORM_END].unit; }

/* A module is run in an opening of its own. */
static void module_forward(fs_run *x, fs_tape *t, int from, int to) {
    int unit = x->net->layers[from].unit;
    fs_pre_forward(x, unit);
    fs_layers_forward(x, t, unit, from, to);
    fs_post_forward(x, unit);
}
static void module_backward(fs_run *x, fs_tape *t, int from, int to) {
    int unit = x->net->layers[from].unit;
    fs_pre_backward(x, unit);
    fs_layers_backward(x, t, from, to);
    fs_post_backward(x, unit);
}

/* The norm alone; then the head by itself. */
static double partial_forward(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    (void)it, (void)m;
    fs_feed(x, t);
    module_forward(x, t, 0, BODY_END);
    module_forward(x, t, BODY_END, NORM_END);
    module_forward(x, t, NORM_END, NORM_END + 1);
    double loss = fs_loss(x, t, 1);
    module_backward(x, t, NORM_END, NORM_END + 1);
    module_backward(x, t, BODY_END, NORM_END);
    module_backward(x, t, 0, BODY_END);
    return loss;
}

static void grouped_and_not(double (*micro)(fs_run *, int, int), int micros,
                            void (*before)(fs_run *, int, int), void (*after)(fs_run *, int, int)) {
    static fs_net net[2];
    for (int grouped = 0; grouped < 2; grouped++)
        for (int raf = -1; raf <= 1; raf++) {
            norm_and_head(&net[grouped], grouped);
            fs_conf c = fs_conf_of(&net[grouped], 1, 2);
            c.name = grouped ? "grouped" : "not grouped";
            c.micro = micro, c.raf = raf, c.micros = micros, c.before = before, c.after = after;
            c.iters = 5;
            fs_train(&c);
        }
}

TEST(fully_shard_training, partial_group_forward_then_standalone) {
    grouped_and_not(partial_forward, 1, NULL, NULL);
}

/* Head and loss by halves of the batch, each a backward of its own: the gradients are added. */
static double chunked_head(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    int64_t rows = x->net->batch, outs = fs_width(x->net), ins = x->net->layers[NORM_END].in;
    double loss = 0;
    (void)it, (void)m;
    fs_feed(x, t);
    module_forward(x, t, 0, BODY_END);
    module_forward(x, t, BODY_END, NORM_END);
    memset(x->dy, 0, (size_t)(rows * ins) * sizeof(double));
    for (int half = 0; half < 2; half++) {
        module_forward(x, t, NORM_END, NORM_END + 1);
        double all = fs_loss(x, t, 1);
        for (int64_t i = 0; i < rows * outs; i++)
            if (i / outs * 2 / rows != half) x->dx[i] = 0;
        loss = all;
        module_backward(x, t, NORM_END, NORM_END + 1);
        fs_set_last(x, 0);
        fs_finalize(x);
        for (int64_t i = 0; i < rows * ins; i++) x->dy[i] += x->dx[i];
    }
    fs_set_last(x, 1);
    memcpy(x->dx, x->dy, (size_t)(rows * ins) * sizeof(double));
    module_backward(x, t, BODY_END, NORM_END);
    module_backward(x, t, 0, BODY_END);
    return loss;
}
static void sync_last(fs_run *x, int it, int m) {
    (void)it;
    fs_set_sync(x, -1, m == x->c->micros - 1);
}

TEST(fully_shard_training, grad_accum_chunked) {
    grouped_and_not(chunked_head, 1, NULL, NULL);
    grouped_and_not(chunked_head, 3, sync_last, NULL);
}

/* While it is off, parameters stay between the chunks, and nothing is gathered again. */
static double toggled(fs_run *x, int it, int m) {
    int head = head_of(x);
    if (x->model) {
        CALL(x->world, fsdp_set_reshard_after_backward(x->model, x->unit[head], 0));
        fs_watch(x);
    }
    double loss = chunked_head(x, it, m);
    if (x->model) {
        int always = x->c->raf >= 0, grouped = head == x->net->layers[BODY_END].unit;
        W_CHECK(fsdp_unit_storage(x->unit[head]) == FSDP_STORAGE_UNSHARDED,
                "the head was resharded");
        /* forwards of norm and head reshard it when they may; backward never does */
        CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, head),
                     always ? 3 + grouped : 1);
        CALL(x->world, fsdp_set_reshard_after_backward(x->model, x->unit[head], 1));
        CALL(x->world, fsdp_reshard(x->unit[head]));
    }
    return loss;
}

TEST(fully_shard_training, reshard_toggle) { grouped_and_not(toggled, 1, NULL, NULL); }

/* The norm in two forwards, the head in none. */
static double twice_without_head(fs_run *x, int it, int m) {
    double loss = 0;
    (void)it;
    for (int t = 0; t < 2; t++) {
        x->micro = m + t;
        fs_feed(x, &x->tape[t]);
        module_forward(x, &x->tape[t], 0, BODY_END);
        module_forward(x, &x->tape[t], BODY_END, NORM_END);
    }
    for (int t = 1; t >= 0; t--) {
        loss += fs_loss_at(x, &x->tape[t], NORM_END, 0.5);
        module_backward(x, &x->tape[t], BODY_END, NORM_END);
        module_backward(x, &x->tape[t], 0, BODY_END);
    }
    x->micro = m;
    return loss;
}
static void head_has_none(fs_run *x, int it, int m) {
    fsdp_param_view v = FSDP_ZERO;
    int p = head_of(x) == 1 ? 2 : 0; /* the weight of the head */
    (void)it, (void)m;
    CALL(x->world, fsdp_param_view_get(x->unit[head_of(x)], p, &v));
    CHECK(!v.shard_grad);
    CALL(x->world, fsdp_param_view_get(x->unit[1], 0, &v));
    CHECK(v.shard_grad);
}

TEST(fully_shard_training, double_partial_forward) {
    grouped_and_not(twice_without_head, 1, NULL, head_has_none);
}

/* Each module's input is cast, not the first one's only. */
static double casts_of_both(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    fsdp_dtype want = x->c->param;
    (void)it, (void)m;
    fs_feed(x, t);
    CHECK_EQ_INT(t->dtype[0], FSDP_F32);
    module_forward(x, t, 0, BODY_END);
    t->dtype[BODY_END] = FSDP_F32; /* as if other code had been between */
    module_forward(x, t, BODY_END, NORM_END);
    CHECK_EQ_INT(t->dtype[BODY_END], want);
    t->dtype[NORM_END] = FSDP_F32;
    module_forward(x, t, NORM_END, NORM_END + 1);
    CHECK_EQ_INT(t->dtype[NORM_END], want);
    double loss = fs_loss(x, t, 1);
    module_backward(x, t, NORM_END, NORM_END + 1);
    module_backward(x, t, BODY_END, NORM_END);
    module_backward(x, t, 0, BODY_END);
    return loss;
}

TEST(fully_shard_training, grouped_module_cast_forward_inputs) {
    static fs_net net;
    norm_and_head(&net, 1);
    fs_conf c = fs_conf_of(&net, 1, 2);
    c.param = FSDP_BF16, c.micro = casts_of_both;
    fs_train(&c);
}

/* ---- an interrupted step --------------------------------------------------------------------- */

/* Left in the middle of forward, of backward, or with a gather under way. */
static void interrupted(fs_run *x, int it, int m) {
    (void)m;
    if (!x->model) return;
    fs_feed(x, &x->tape[0]);
    if (it % 3 == 0) {
        fs_pre_forward(x, 0);
        fs_pre_forward(x, 1);
        fs_unshard(x, 2);
    } else {
        fs_forward(x, &x->tape[0]);
        fs_loss(x, &x->tape[0], 1);
        if (it % 3 == 1) fs_backward(x, &x->tape[0]);
        else fs_pre_backward(x, 0), fs_pre_backward(x, 2);
    }
    CALL(x->world, fsdp_model_reset(x->model));
    for (int u = 0; u < x->net->count; u++) {
        fsdp_param_view v = FSDP_ZERO;
        CHECK_EQ_INT(fsdp_unit_state(x->unit[u]), FSDP_STATE_IDLE);
        CHECK_EQ_INT(fsdp_unit_storage(x->unit[u]), FSDP_STORAGE_SHARDED);
        CALL(x->world, fsdp_param_view_get(x->unit[u], 0, &v));
        CHECK(!v.shard_grad);
    }
}

TEST(fully_shard_training, reset_iter_state_after_exception) {
    static fs_net net;
    fs_transformer(&net, 3, 8, 8, 1);
    for (int lanes = 0; lanes < 3; lanes++) {
        fs_conf c = fs_conf_of(&net, 1, 2);
        c.before = interrupted, c.lanes = lanes;
        fs_train(&c);
    }
}

/* ---- placements and shared parameters -------------------------------------------------------- */

static void gathered(fs_run *x, int it) {
    for (int u = 0; u < x->net->count; u++)
        for (int p = 0; p < x->net->units[u].count; p++) {
            const fs_param *q = &x->net->units[u].params[p];
            float full[1024];
            CHECK(q->numel <= 1024);
            CALL(x->world, fsdp_param_full(x->unit[u], p, full));
            for (int64_t e = 0; e < q->numel; e++)
                fs_check_near(x, "gathered parameter", u, p, e, (double)full[e],
                              x->story->param[it][q->at + e]);
        }
}

TEST(fully_shard_training, train_parity_shard_placement_fn) {
    static fs_net net;
    fs_transformer(&net, 3, 8, 8, 1);
    shard_largest_dim(&net);
    int columns = 0;
    for (int u = 0; u < net.count; u++)
        for (int p = 0; p < net.units[u].count; p++) columns += net.units[u].params[p].shard_dim;
    CHECK_EQ_INT(columns, 3);
    for (size_t k = 1; k < COUNT(worlds); k++) {
        fs_conf c = fs_conf_of(&net, 1, worlds[k]);
        c.iters = 5, c.end = gathered;
        fs_train(&c);
    }
}

/* Element k of a shard of columns is in row k / columns: the shard has no holes. */
static void contiguous(fs_run *x, int it, int m) {
    fsdp_param_view v = FSDP_ZERO;
    (void)it, (void)m;
    while (fsdp_next_param(x->model, &v)) {
        if (v.ndim < 2) continue;
        CHECK_EQ_INT(v.shard_dim, 1);
        CHECK_EQ_INT(v.numel, v.local_shape[0] * v.local_shape[1]);
        CHECK_EQ_INT(v.local_shape[0], v.shape[0]);
        for (int64_t k = 0; k < v.numel; k++)
            CHECK_EQ_INT(fsdp_view_index(&v, k),
                         k / v.local_shape[1] * v.shape[1] + v.start[1] + k % v.local_shape[1]);
    }
}

/* fs_compare has read the values in that order. */
TEST(fully_shard_training, shard_placement_fn_contiguous_params_grads) {
    static fs_net net;
    two_linears(&net, 16, 8, 8);
    for (int p = 0; p < 4; p += 2) net.units[0].params[p].shard_dim = 1;
    for (size_t k = 0; k < COUNT(worlds); k++) {
        fs_conf c = fs_conf_of(&net, 1, worlds[k]);
        c.iters = 3, c.after = contiguous;
        fs_train(&c);
    }
}

TEST(fully_shard_training, train_parity_with_shared_params) {
    static fs_net net;
    fs_transformer(&net, 3, 8, 8, 1);
    for (int raf = -1; raf <= 1; raf++)
        for (int k = 0; k < 2; k++) {
            fs_conf c = fs_conf_of(&net, 1, 2 + 2 * k);
            c.raf = raf, c.ac = k ? FS_AC_OWN : FS_AC_NONE;
            fs_train(&c);
        }
}

static void every_row_moved(fs_run *x, int it) {
    const fs_param *q = &x->net->units[0].params[0];
    float full[1024];
    if (it) return;
    CALL(x->world, fsdp_param_full(x->unit[0], 0, full));
    for (int64_t row = 0; row < q->shape[0]; row++) {
        int moved = 0;
        for (int64_t e = row * q->shape[1]; e < (row + 1) * q->shape[1]; e++)
            moved |= fabs((double)full[e] - fs_initial(x->net, 0, 0, e)) > 1e-6;
        W_CHECK(moved, "row %d of the tied table did not move", (int)row);
    }
}

/* A vocabulary of 4 W + 1: the last rank has one row. */
TEST(fully_shard_training, train_parity_with_shared_params_uneven_shard) {
    static fs_net net;
    for (size_t k = 1; k < COUNT(worlds); k++) {
        fs_transformer(&net, 3, 8, 4 * worlds[k] + 1, 1);
        fs_conf c = fs_conf_of(&net, 1, worlds[k]);
        c.iters = 3, c.end = every_row_moved;
        fs_train(&c);
    }
}

/* The desc of a layer may stand where the desc of the last one stood, with the same names. */
static void layer_by_layer(fs_run *x) {
    fsdp_param_desc d[FS_PARAMS];
    for (int u = 0; u < x->net->count; u++) {
        fsdp_unit_desc ud = FSDP_ZERO;
        const fs_unit *from = &x->net->units[u];
        memset(d, 0, sizeof d);
        for (int p = 0; p < from->count; p++) d[p] = fs_param_desc_of(x, u, p);
        for (int p = 0; p < from->count; p++) d[p].name = p ? "bias" : "weight";
        ud.name = "layer", ud.params = d, ud.num_params = from->count;
        ud.user = (void *)(intptr_t)u;
        CALL(x->world, fsdp_fully_shard(x->model, &ud, &x->unit[u]));
        for (int k = 0; k < u; k++) CHECK(x->unit[k] != x->unit[u]);
    }
    memset(d, 0xff, sizeof d);
}

TEST(fully_shard_training, shared_params_layer_by_layer) {
    static fs_net net;
    fs_net_begin(&net, 2, 8);
    for (int i = 0; i < 6; i++) fs_linear(&net, fs_unit_add(&net, "layer"), 8, 8);
    fs_conf c = fs_conf_of(&net, 1, 2);
    c.make = layer_by_layer;
    fs_train(&c);
}

/* ---- gradient accumulation ------------------------------------------------------------------- */

enum { ALL_UNITS, ROOT_ONLY, SOME_MLPS, REDUCE_SCATTER_ONLY, EVERY };
static const char *const sync_names[] = {"all", "root_only", "some_mlps", "reduce_scatter_only"};
typedef struct {
    const char *name;
    int replicas, raf;
    int sync, keep; /* keep: reshard_after_backward is off before the last microbatch */
    int gathers, reductions, all_reduces; /* expected of an iteration */
} accumulation;

static int waits_for_last(const accumulation *a, int unit) {
    return a->sync == ALL_UNITS || a->sync == REDUCE_SCATTER_ONLY ||
           (a->sync == ROOT_ONLY && unit == 0) ||
           (a->sync == SOME_MLPS && (unit == 1 || unit == 2));
}
static void accumulate_before(fs_run *x, int it, int m) {
    const accumulation *a = (const accumulation *)x->c->user;
    int last = m == x->c->micros - 1;
    (void)it;
    for (int u = 0; u < x->net->count; u++) {
        if (!waits_for_last(a, u)) continue;
        if (a->sync == REDUCE_SCATTER_ONLY) fs_set_all_reduce(x, u, last);
        else fs_set_sync(x, u, last);
        if (x->model && a->keep)
            CALL(x->world, fsdp_set_reshard_after_backward(x->model, x->unit[u], last));
    }
}

/* 7.1, unit by unit: a forward and a backward gather unless the unit is still whole. */
static void accumulate_expect(const fs_conf *c, accumulation *a) {
    int micros = c->micros, never = c->raf == NEVER;
    a->gathers = a->reductions = a->all_reduces = 0;
    for (int u = 0; u < c->net->count; u++) {
        int waits = waits_for_last(a, u), kept = a->keep && waits;
        a->gathers += kept ? 1 + (never ? 0 : micros) : micros * (never ? 1 : 2);
        a->reductions += waits && a->sync != REDUCE_SCATTER_ONLY ? 1 : micros;
        a->all_reduces += c->replicas == 1 ? 0 : waits ? 1 : micros;
    }
}
static void accumulate_count(fs_run *x, int it) {
    const accumulation *a = (const accumulation *)x->c->user;
    int kinds[3] = {FSDP_OP_ALL_GATHER, FSDP_OP_REDUCE_SCATTER, FSDP_OP_ALL_REDUCE};
    int expected[3] = {a->gathers, a->reductions, a->all_reduces};
    for (int k = 0; k < 3; k++)
        W_CHECK(fs_calls(x, kinds[k]) == (it + 1) * expected[k], "%d %s in %d iterations of %d",
                fs_calls(x, kinds[k]), fsdp_op_name(kinds[k]), it + 1, expected[k]);
}

/* Every setting, or offload in every second one. */
static void accumulate(fs_net *net, int replicas, int shards, int sync, int all) {
    accumulation a;
    char name[64];
    memset(&a, 0, sizeof a);
    a.sync = sync;
    fs_conf c = fs_conf_of(net, replicas, shards);
    c.micros = 3, c.iters = 5, c.zero_in_place = 1, c.before = accumulate_before, c.user = &a;
    c.end = accumulate_count, c.name = name;
    fs_story *s = fs_tell(&c);
    for (int setting = 0; setting < 12; setting++) {
        c.raf = reshards[setting % 3], a.keep = setting / 3 % 2, c.offload = setting / 6;
        if (!all && (setting + setting / 6) % 2) continue;
        c.plain = setting % 4 < 2; /* reductions that cannot cast, scale and add */
        accumulate_expect(&c, &a);
        snprintf(name, sizeof name, "%s raf %d keep %d offload %d", sync_names[sync], c.raf, a.keep,
                 c.offload);
        fs_train_beside(&c, s);
    }
    fs_story_free(s, &c);
}

/* The root's linear and three MLPs. */
static void linear_and_mlps(fs_net *net, int64_t d) {
    root_and_mlp(net, d);
    for (int i = 0; i < 2; i++) fs_mlp(net, fs_unit_add(net, "mlp"), d, 4);
}

static void accumulate_all(int64_t d, int all) {
    static fs_net net;
    linear_and_mlps(&net, d);
    for (int sync = 0; sync < EVERY; sync++) {
        if (sync != REDUCE_SCATTER_ONLY) accumulate(&net, 1, 4, sync, all);
        accumulate(&net, 2, 2, sync, all);
    }
}
TEST(fully_shard_training, gradient_accumulation) { accumulate_all(16, 0); }
TEST_TIMEOUT(long_fully_shard_training, gradient_accumulation, 300) { accumulate_all(32, 1); }

/* The numbers of the specification themselves: 4 units, 3 microbatches. */
static const accumulation modes[] = {
    {"sync every", 1, ALWAYS, EVERY, 0, 24, 12, 0},
    {"sync every, raf int", 1, 2, EVERY, 0, 24, 12, 0},
    {"sync every, raf false", 1, NEVER, EVERY, 0, 12, 12, 0},
    {"sync every, raf default", 1, 0, EVERY, 0, 21, 12, 0},
    {"sync last", 1, ALWAYS, ALL_UNITS, 0, 24, 4, 0},
    {"sync last, raf false", 1, NEVER, ALL_UNITS, 0, 12, 4, 0},
    {"sync last, kept, raf false", 1, NEVER, ALL_UNITS, 1, 4, 4, 0},
    {"sync last, kept", 1, ALWAYS, ALL_UNITS, 1, 16, 4, 0},
    {"hsdp, sync every", 2, ALWAYS, EVERY, 0, 24, 12, 12},
    {"hsdp, sync last", 2, ALWAYS, ALL_UNITS, 0, 24, 4, 4},
    {"hsdp, sync last, kept, raf false", 2, NEVER, ALL_UNITS, 1, 4, 4, 4},
    {"hsdp, all-reduce last", 2, ALWAYS, REDUCE_SCATTER_ONLY, 0, 24, 12, 4},
    {"hsdp, all-reduce last, raf false", 2, NEVER, REDUCE_SCATTER_ONLY, 0, 12, 12, 4},
};

TEST_P(fully_shard_training, gradient_accumulation_counts, modes) {
    static fs_net net;
    accumulation a = *row;
    linear_and_mlps(&net, 8);
    for (int lanes = 0; lanes < 3; lanes++) {
        fs_conf c = fs_conf_of(&net, row->replicas, 2);
        c.name = row->name, c.raf = row->raf, c.micros = 3, c.iters = 2, c.lanes = lanes;
        c.before = accumulate_before, c.end = accumulate_count, c.user = &a;
        fs_train(&c);
    }
}

/* One forward, one backward: forwards run ahead of backwards by one. */
static double one_forward_one_backward(fs_run *x, int it, int m) {
    static const struct {
        char what;
        int tape;
    } order[] = {{'F', 0}, {'F', 1}, {'B', 0}, {'F', 2}, {'B', 1}, {'B', 2}};
    double loss = 0;
    if (x->model && it % 2)
        for (int u = 0; u < x->net->count; u++) fs_unshard(x, u);
    for (size_t i = 0; i < COUNT(order); i++) {
        fs_tape *t = &x->tape[order[i].tape];
        int last = order[i].tape == 2;
        x->micro = m + order[i].tape;
        if (order[i].what == 'F') {
            fs_feed(x, t);
            fs_forward(x, t);
            continue;
        }
        fs_set_sync(x, -1, last);
        fs_set_last(x, last);
        fs_feed(x, &x->tape[FS_TAPES - 1]); /* the targets */
        loss += fs_loss(x, t, 1);
        fs_backward(x, t);
        if (!last) fs_finalize(x);
    }
    x->micro = m;
    return loss;
}

TEST(fully_shard_training, 1f1b_microbatching) {
    static fs_net net;
    fs_transformer(&net, 3, 8, 8, 1);
    for (int lanes = 0; lanes < 3; lanes++) {
        fs_conf c = fs_conf_of(&net, 1, 2);
        c.raf = NEVER, c.micro = one_forward_one_backward, c.lanes = lanes;
        fs_train(&c);
    }
}

/* ---- other parallelism beside ---------------------------------------------------------------- */

/* MLPs whose hidden width is split over the ranks of a tensor-parallel mesh: rows of the first
   weight and of its bias, columns of the second weight; its bias is everywhere. */
enum { TP = 2 };
static int64_t tp_hidden(const fs_net *net, int unit) {
    return net->units[unit].params[0].shape[0];
}

static int64_t tp_global(const fs_run *x, int unit, int p, int64_t element) {
    const fs_param *q = &x->net->units[unit].params[p];
    int64_t first = fsdp_mesh_rank(x->other, 0) * tp_hidden(x->net, unit);
    if (p == 0) return element + first * q->shape[1];
    if (p == 1) return element + first;
    if (p == 2) return element / q->shape[1] * TP * q->shape[1] + first + element % q->shape[1];
    return element;
}
static void tp_net(fs_net *net, int64_t d, int64_t hidden) {
    fs_net_begin(net, 2, d);
    for (int u = 0; u < 2; u++) {
        fs_unit_add(net, "mlp");
        fs_linear(net, u, d, hidden);
        fs_relu(net);
        fs_linear(net, u, hidden, d);
    }
}
static void tp_sum(fs_run *x, double *a) {
    CALL(x->world,
         fsdp_all_reduce(x->world, x->other, a, x->net->batch * x->net->in, FSDP_F64, FSDP_SUM));
}
/* Each part of the second linear has added the bias. */
static double tp_micro(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    int64_t count = x->net->batch * x->net->in;
    (void)it, (void)m;
    fs_feed(x, t);
    for (int u = 0; u < 2; u++) {
        fs_pre_forward(x, u);
        fs_layers_forward(x, t, u, 3 * u, 3 * u + 3);
        if (x->model) {
            const double *bias = fs_data(x, u, 3);
            tp_sum(x, t->in[3 * u + 3]);
            for (int64_t i = 0; i < count; i++)
                t->in[3 * u + 3][i] -= (TP - 1) * bias[i % x->net->in];
        }
        fs_post_forward(x, u);
    }
    double loss = fs_loss(x, t, 1);
    for (int u = 1; u >= 0; u--) {
        fs_pre_backward(x, u);
        fs_layers_backward(x, t, 3 * u, 3 * u + 3);
        if (x->model) tp_sum(x, x->dx);
        fs_post_backward(x, u);
    }
    return loss;
}

typedef struct {
    fs_net local;
    int tp_dim, num_dp, dp_dims[2];
    const char *names[3];
} parallel;

/* The data-parallel mesh is a slice of the whole one. */
static void tp_locate(fs_run *x) {
    const parallel *p = (const parallel *)x->c->user;
    fsdp_mesh_desc d = FSDP_ZERO;
    fsdp_mesh *all;
    int32_t tp = p->tp_dim, dp[2] = {p->dp_dims[0], p->dp_dims[1]};
    d.ndim = 3;
    for (int i = 0; i < 3; i++) d.shape[i] = 2, d.names[i] = p->names[i];
    CALL(x->world, fsdp_mesh_create(x->world, &d, &all));
    CHECK_EQ_INT(fsdp_mesh_dim(all, "tp"), tp);
    CALL(x->world, fsdp_mesh_slice(all, &tp, 1, &x->other));
    CALL(x->world, fsdp_mesh_slice(all, dp, p->num_dp, &x->mesh));
    CHECK_EQ_INT(fsdp_mesh_ndim(x->mesh), p->num_dp);
    x->rank = fsdp_mesh_rank(x->mesh, 0);
    if (p->num_dp == 2) x->rank = 2 * x->rank + fsdp_mesh_rank(x->mesh, 1);
    x->net = &p->local, x->global = tp_global;
}

static void train_beside_tp(parallel *p) {
    static const int64_t dims[] = {3, 5, 16, 17};
    static fs_net net;
    for (size_t i = 0; i < COUNT(dims); i++) {
        tp_net(&net, dims[i], 4 * dims[i]);
        tp_net(&p->local, dims[i], 4 * dims[i] / TP);
        fs_conf c = fs_conf_of(&net, p->num_dp == 2 ? 2 : 1, 2);
        c.threads = 8, c.locate = tp_locate, c.micro = tp_micro, c.user = p;
        c.rtol = 1e-5, c.atol = 1e-6; /* parts of sums are rounded before they are added */
        c.iters = 5;
        fs_train(&c);
    }
}

/* (pp, dp, tp): the pipelines train alike, for each takes its own dp slice. */
TEST(fully_shard_training, 2d_mlp_with_nd_mesh) {
    static parallel p = {.tp_dim = 2, .num_dp = 1, .dp_dims = {1, 0}, .names = {"pp", "dp", "tp"}};
    train_beside_tp(&p);
}

TEST(fully_shard_training, 3d) {
    static parallel p = {
        .tp_dim = 2, .num_dp = 2, .dp_dims = {0, 1}, .names = {"dp_replicate", "dp_shard", "tp"}};
    train_beside_tp(&p);
}

/* A mixture of two experts; row n of a batch goes to expert n % 2. The experts' weights are one
   stacked parameter of the copy; a rank holds that of its place in the mesh ep. */
enum { EP = 2, MOE = 8 };
static int64_t moe_global(const fs_run *x, int unit, int p, int64_t element) {
    (void)p;
    return unit == 1 ? element + fsdp_mesh_rank(x->other, 0) * MOE * MOE : element;
}
static void moe_net(fs_net *net, int experts) {
    fs_net_begin(net, 4, MOE);
    fs_unit_add(net, "dense"), fs_unit_add(net, "experts");
    fs_linear(net, 0, MOE, MOE);
    fs_relu(net);
    fs_param_add(net, 1, experts * MOE, MOE, 0);
    net->wide = EP * MOE; /* room for the rows of all ranks of ep */
}

/* Rows of all ranks of ep beside each other. */
static void moe_exchange(fs_run *x, const double *mine, double *all) {
    int64_t count = x->net->batch * MOE;
    memset(all, 0, (size_t)(EP * count) * sizeof *all);
    memcpy(all + fsdp_mesh_rank(x->other, 0) * count, mine, (size_t)count * sizeof *all);
    CALL(x->world, fsdp_all_reduce(x->world, x->other, all, EP * count, FSDP_F64, FSDP_SUM));
}
static void moe_rows(const double *w, const double *in, double *out) {
    for (int o = 0; o < MOE; o++)
        for (int i = 0; i < MOE; i++) out[o] += w[o * MOE + i] * in[i];
}
static void moe_rows_back(const double *w, const double *in, const double *dy, double *dw,
                          double *dx) {
    for (int o = 0; o < MOE; o++)
        for (int i = 0; i < MOE; i++) {
            dw[o * MOE + i] += dy[o] * in[i];
            dx[i] += w[o * MOE + i] * dy[o];
        }
}

/* in -> out [ranks of ep][batch][MOE]; the copy: its own rows, by all experts. */
static void moe_run(fs_run *x, const double *in, const double *dy, double *out, double *dw) {
    int64_t rows = x->net->batch * (x->model ? EP : 1);
    const double *w = fs_data(x, 1, 0);
    memset(out, 0, (size_t)(rows * MOE) * sizeof *out);
    for (int64_t n = 0; n < rows; n++) {
        int64_t e = n % x->net->batch % EP, at = x->model ? 0 : e * MOE * MOE;
        if (x->model && e != fsdp_mesh_rank(x->other, 0)) continue;
        if (dy) moe_rows_back(w + at, in + n * MOE, dy + n * MOE, dw + at, out + n * MOE);
        else moe_rows(w + at, in + n * MOE, out + n * MOE);
    }
    if (!x->model) return;
    CALL(x->world, fsdp_all_reduce(x->world, x->other, out, rows * MOE, FSDP_F64, FSDP_SUM));
}

static double moe_micro(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    int64_t count = x->net->batch * MOE, mine = x->model ? fsdp_mesh_rank(x->other, 0) * count : 0;
    double *in = x->tape[1].in[0], *out = x->tape[1].in[1], *dy = x->tape[1].in[2], loss = 0;
    double dw[EP * MOE * MOE];
    (void)it, (void)m;
    fs_feed(x, t);
    fs_pre_forward(x, 0);
    fs_layers_forward(x, t, 0, 0, 2);
    fs_post_forward(x, 0);
    fs_pre_forward(x, 1);
    if (x->model) moe_exchange(x, t->in[2], in);
    else memcpy(in, t->in[2], (size_t)count * sizeof *in);
    moe_run(x, in, NULL, out, NULL);
    fs_post_forward(x, 1);
    for (int64_t i = 0; i < count; i++) {
        double off = out[mine + i] - x->target[i];
        loss += off * off / (double)count;
        x->dx[i] = 2 * off / (double)count;
    }
    fs_pre_backward(x, 1);
    if (x->model) moe_exchange(x, x->dx, dy);
    else memcpy(dy, x->dx, (size_t)count * sizeof *dy);
    memset(dw, 0, sizeof dw);
    moe_run(x, in, dy, out, dw);
    fs_add_grad(x, 1, 0, dw);
    fs_post_backward(x, 1);
    memcpy(x->dx, out + mine, (size_t)count * sizeof *out);
    fs_pre_backward(x, 0);
    fs_layers_backward(x, t, 0, 2);
    fs_post_backward(x, 0);
    return loss;
}
/* (dp, ep): dense parameters over all ranks, experts over dp alone. */
static void moe_make(fs_run *x) {
    static const char *const names[2] = {"dp", "ep"};
    fsdp_mesh_desc d = FSDP_ZERO;
    fsdp_mesh *all, *dp;
    int32_t dims[2] = {0, 1};
    d.ndim = 2;
    for (int i = 0; i < 2; i++) d.shape[i] = 2, d.names[i] = names[i];
    CALL(x->world, fsdp_mesh_create(x->world, &d, &all));
    CALL(x->world, fsdp_mesh_slice(all, &dims[0], 1, &dp));
    CALL(x->world, fsdp_mesh_slice(all, &dims[1], 1, &x->other));
    x->net = (const fs_net *)x->c->user, x->global = moe_global;
    fs_make_unit(x, 0, NULL);
    fs_make_unit(x, 1, dp);
}
/* A sum over ep, and an average over dp and ep together. */
static void moe_divide(fs_run *x) {
    CALL(x->world, fsdp_set_gradient_divide_factor(x->model, x->unit[1], x->size));
}
/* The gathered expert is its part of the stack. */
static void moe_gathered(fs_run *x, int it) {
    float full[MOE * MOE];
    CALL(x->world, fsdp_param_full(x->unit[1], 0, full));
    for (int64_t e = 0; e < MOE * MOE; e++)
        fs_check_near(
            x, "gathered expert", 1, 0, e, (double)full[e],
            x->story->param[it][x->whole->units[1].params[0].at + moe_global(x, 1, 0, e)]);
}

TEST(fully_shard_training, shard_placement_fn_tp_ep) {
    static fs_net net, local;
    moe_net(&net, EP);
    moe_net(&local, 1);
    for (int column = 0; column < 2; column++) {
        local.units[1].params[0].shard_dim = column;
        fs_conf c = fs_conf_of(&net, 1, 4);
        c.make = moe_make, c.build = moe_divide, c.micro = moe_micro, c.end = moe_gathered;
        c.user = &local, c.iters = 5, c.rtol = 1e-5, c.atol = 1e-6;
        fs_train(&c);
    }
}

/* ---- the rest -------------------------------------------------------------------------------- */

/* A root with a norm, and MLPs. */
static void norm_and_mlps(fs_net *net, int64_t d) {
    fs_net_begin(net, 2, d);
    net->around = 1;
    fs_unit_add(net, "root");
    fs_norm(net, 0, d);
    for (int i = 0; i < 3; i++) fs_mlp(net, fs_unit_add(net, "mlp"), d, 4);
}

TEST(fully_shard_training, train_parity_hsdp) {
    static const int64_t dims[] = {3, 16, 17};
    static fs_net net;
    for (size_t i = 0; i < COUNT(dims); i++)
        for (int last = 0; last < 2; last++) {
            norm_and_mlps(&net, dims[i]);
            fs_conf c = fs_conf_of(&net, 2, 2);
            c.iters = 5, c.micros = 3, c.before = last ? sync_last : NULL, c.keep_grads = last;
            fs_story *s = fs_tell(&c);
            for (int offload = 0; offload < 2; offload++)
                for (int ac = 0; ac < 2; ac++) {
                    c.offload = offload, c.ac = ac, c.lanes = (offload + ac) % 3;
                    fs_train_beside(&c, s);
                }
            fs_story_free(s, &c);
        }
}

/* Another function than the layer's forward: the first half of the unit's parameters. */
static double encode(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    (void)it, (void)m;
    fs_feed(x, t);
    fs_pre_forward(x, 0);
    fs_layers_forward(x, t, 0, 0, 2);
    fs_post_forward(x, 0);
    double loss = fs_loss_at(x, t, 2, 1);
    fs_pre_backward(x, 0);
    fs_layers_backward(x, t, 0, 2);
    fs_post_backward(x, 0);
    return loss;
}

TEST(fully_shard_training, register_fsdp_forward_method) {
    static fs_net net;
    two_linears(&net, 16, 8, 4);
    for (int raf = -1; raf <= 1; raf++) {
        fs_conf c = fs_conf_of(&net, 1, 2);
        c.raf = raf, c.micro = encode;
        fs_train(&c);
    }
}

/* Three models of one world, used in turn. */
enum { ROOTS = 3 };
static void three_roots(lab_rank *r) {
    const fs_job *j = (const fs_job *)r->arg;
    fs_run *x[ROOTS];
    double loss[ROOTS];
    for (int k = 0; k < ROOTS; k++) {
        x[k] = (fs_run *)lab_zeros(1, sizeof *x[k]);
        if (k == 0) {
            fs_rank_begin(x[k], r, &j[k]);
            continue;
        }
        fs_run_init(x[k], j[k].c, r->rank);
        x[k]->world = r->w, x[k]->story = j[k].story;
        fs_make_model(x[k]);
        for (int u = 0; u < x[k]->net->count; u++) fs_make_unit(x[k], u, NULL);
        CALL(x[k]->world, fsdp_init_params(x[k]->model, fs_fill, x[k]));
    }
    for (int it = 0; it < j->c->iters; it++) {
        for (int k = 0; k < ROOTS; k++) {
            x[k]->it = it;
            fs_feed(x[k], &x[k]->tape[0]);
            fs_forward(x[k], &x[k]->tape[0]);
            loss[k] = fs_loss(x[k], &x[k]->tape[0], 1);
        }
        for (int k = ROOTS - 1; k >= 0; k--) fs_backward(x[k], &x[k]->tape[0]);
        for (int k = 0; k < ROOTS; k++) {
            CALL(x[k]->world, fsdp_finalize_backward(x[k]->model));
            CHECK_NEAR(loss[k], x[k]->story->loss[it][r->rank][0], 1e-6);
            fs_compare_grads(x[k]);
            fs_update(x[k]);
            fs_compare_params(x[k]);
            CALL(x[k]->world, fsdp_zero_grad(x[k]->model));
        }
    }
    lab_end(r);
    for (int k = 0; k < ROOTS; k++) fs_run_free(x[k]), free(x[k]);
}

/* The streams of a world serve all of its models; that there are no more: test_fully_shard_others,
   share_comm_context. */
TEST(fully_shard_training, share_comm_context) {
    static fs_net net[ROOTS];
    fs_conf c[ROOTS];
    for (int lanes = 0; lanes < 3; lanes++) {
        fs_job j[ROOTS];
        memset(j, 0, sizeof j);
        for (int k = 0; k < ROOTS; k++) {
            linear_and_mlps(&net[k], 8);
            net[k].seed += (uint64_t)(100 * k);
            c[k] = fs_conf_of(&net[k], 1, 2);
            c[k].lanes = lanes;
            j[k].c = &c[k], j[k].story = fs_tell(&c[k]);
        }
        fs_on_ranks(&c[0], three_roots, j);
        for (int k = 0; k < ROOTS; k++) fs_story_free((fs_story *)(uintptr_t)j[k].story, &c[k]);
    }
}

static void nothing_was_said(fs_run *x, int it) {
    (void)it;
    for (int kind = FSDP_OP_ALL_GATHER; kind <= FSDP_OP_BROADCAST; kind++)
        CHECK_EQ_INT(fs_calls(x, kind), 0);
}

TEST(fully_shard_training, worldsize1) {
    static fs_net net;
    fs_transformer(&net, 3, 8, 8, 1);
    for (int raf = -1; raf <= 1; raf++) {
        fs_conf c = fs_conf_of(&net, 1, 1);
        c.raf = raf, c.end = nothing_was_said, c.mesh_2d = raf == 0;
        fs_train(&c);
    }
}
