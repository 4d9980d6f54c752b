/* trainings.h - nets and trainings that tests with upstream's names share: for units that shard,
   and for the same net replicated, by units or by buckets (fs_conf.how). Include it after
   fully_shard.h.

   SPDX-License-Identifier: MIT */
#ifndef TRAININGS_H
#define TRAININGS_H
#define TR_CONST __attribute__((unused))

enum { ALWAYS = FSDP_RESHARD_ALWAYS, NEVER = FSDP_RESHARD_NEVER };
static const int worlds[] TR_CONST = {1, 2, 3, 4, 8};
#define COUNT(array) (sizeof(array) / sizeof *(array))

static const int reshards[] TR_CONST = {ALWAYS, NEVER, 2};

/* ---- one unit -------------------------------------------------------------------------------- */

/* Makes a net with a linear in the root and an MLP. */
FS_FN void root_and_mlp(fs_net *net, int64_t d) {
    fs_net_begin(net, 2, d);
    net->around = 1;
    fs_unit_add(net, "root");
    fs_linear(net, 0, d, d);
    fs_mlp(net, fs_unit_add(net, "mlp"), d, 4);
}

/* Makes an MLP of a kind: it is one unit, the root; or its linears are units, without a unit for
   the root; or with another MLP in the root. */
enum { ONE_UNIT, TWO_UNITS, TWO_AND_ROOT, MLP_KINDS };
FS_FN void mlp_of_kind(fs_net *net, int kind, int64_t d) {
    fs_net_begin(net, 2, d);
    net->around = kind != TWO_UNITS;
    if (kind != TWO_UNITS) fs_unit_add(net, "root");
    if (kind == ONE_UNIT) fs_mlp(net, 0, d, 4);
    if (kind == ONE_UNIT) return;
    fs_linear(net, fs_unit_add(net, "in_proj"), d, 4 * d);
    fs_relu(net);
    fs_linear(net, fs_unit_add(net, "out_proj"), 4 * d, d);
    fs_relu(net);
    if (kind == TWO_AND_ROOT) fs_mlp(net, 0, d, 4);
}

FS_FN void check_registered(fs_run *x, int unit, fsdp_storage_state expected) {
    const fs_unit *u = &x->net->units[unit];
    W_CHECK(fsdp_unit_storage(x->unit[unit]) == expected, "unit %d is in state %d, expected %d",
            unit, (int)fsdp_unit_storage(x->unit[unit]), (int)expected);
    for (int p = 0; p < u->count; p++) {
        const fsdp_param_view v = lab_view(x->world, x->unit[unit], p);
        const double *data = expected == FSDP_STORAGE_UNSHARDED ? fs_data(x, unit, p) : NULL;
        const double *want = x->it ? x->story->param[x->it - 1] + u->params[p].at : NULL;
        for (int64_t e = 0; data && e < u->params[p].numel; e++)
            fs_check_near(x, "full parameter", unit, p, e, data[e],
                          want ? want[e] : fs_initial(x->net, unit, p, e));
        for (int64_t k = 0; k < v.numel; k++) {
            const int64_t e = fsdp_view_index(&v, k);
            fs_check_near(x, "shard", unit, p, e, lab_get(v.shard, v.dtype, k),
                          want ? want[e] : fs_initial(x->net, unit, p, e));
        }
    }
}

/* Checks that the shards of the smaller mesh have the values, too: a gather from its two ranks
   is full. */
FS_FN void check_post_forward(fs_run *x, int unit) {
    check_registered(x, unit, FSDP_STORAGE_SHARDED_POST_FORWARD);
    fs_watch(x);
    fs_unshard(x, unit);
    CALL(x->world, fsdp_wait(x->unit[unit]));
    CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, -1, -1), 1);
    CHECK_EQ_INT(fs_find(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, unit)->group_size, 2);
    check_registered(x, unit, FSDP_STORAGE_UNSHARDED);
}

FS_FN double registration(fs_run *x, int it, int m) {
    static const fsdp_storage_state after[] = {FSDP_STORAGE_SHARDED, FSDP_STORAGE_UNSHARDED,
                                               FSDP_STORAGE_SHARDED_POST_FORWARD};
    const int raf = x->c->raf, root = x->net->around && !raf; /* the root stays open */
    fsdp_storage_state inner = after[raf == NEVER ? 1 : raf > 1 ? 2 : 0];
    (void)m;
    for (int u = 0; u < x->net->count && x->model; u++) /* also before the first forward */
        check_registered(x, u, FSDP_STORAGE_SHARDED);
    fs_feed(x, &x->tape[0]);
    if (x->model && it % 2) { /* a forward without a backward, then reshard calls */
        CALL(x->world, fsdp_set_grad_enabled(x->model, 0));
        fs_forward(x, &x->tape[0]);
        for (int u = 0; u < x->net->count; u++) {
            if (raf == 2) check_post_forward(x, u);
            else check_registered(x, u, root && !u ? FSDP_STORAGE_UNSHARDED : inner);
            CALL(x->world, fsdp_reshard(x->unit[u]));
            check_registered(x, u, FSDP_STORAGE_SHARDED);
        }
        CALL(x->world, fsdp_set_grad_enabled(x->model, 1));
    }
    fs_feed(x, &x->tape[0]);
    fs_forward(x, &x->tape[0]);
    for (int u = 0; u < x->net->count && x->model; u++)
        check_registered(x, u, root && !u ? FSDP_STORAGE_UNSHARDED : inner);
    double loss = fs_loss(x, &x->tape[0], 1);
    fs_backward(x, &x->tape[0]);
    return loss;
}
FS_FN void sharded_again(fs_run *x, int it, int m) {
    (void)it, (void)m;
    for (int u = 0; u < x->net->count; u++) check_registered(x, u, FSDP_STORAGE_SHARDED);
}

/* Trains the three kinds. Replicated units are not resharded after forward, as upstream's. */
FS_FN void by_kinds(int how, int64_t d, double (*micro)(fs_run *, int, int),
                    void (*after)(fs_run *, int, int)) {
    static const int modes[] = {NEVER, 0, ALWAYS, 2};
    static fs_net net;
    for (int kind = 0; kind < MLP_KINDS; kind++)
        for (size_t i = 0; i < (how == FS_SHARD ? COUNT(modes) : 1); i++) {
            mlp_of_kind(&net, kind, d);
            fs_conf c = fs_conf_by(how, &net, 4);
            c.raf = modes[i], c.micro = micro, c.after = after, c.iters = 4;
            fs_train(&c);
        }
}

/* Made in f32, and cast when it is sharded, as upstream's. */
FS_FN void cast_to_f64(fs_run *x) { CALL(x->world, fsdp_model_cast(x->model, FSDP_F64)); }
FS_FN void all_f64(fs_run *x, int it, int m) {
    fsdp_param_view v = FSDP_ZERO;
    (void)it, (void)m;
    while (fsdp_next_param(x->model, &v)) {
        CHECK_EQ_INT(v.dtype, FSDP_F64);
        CHECK_EQ_INT(v.grad_dtype, FSDP_F64);
        CHECK(v.shard_grad != NULL);
    }
}
FS_FN void to_float64(int how) {
    static fs_net net;
    mlp_of_kind(&net, TWO_UNITS, 4);
    for (size_t i = 0; i < COUNT(worlds); i++) {
        fs_conf c = fs_conf_by(how, &net, worlds[i]);
        c.stored = FSDP_F64, c.after = all_f64;
        c.made = FSDP_F32, c.build = cast_to_f64;
        fs_train(&c);
    }
}
/* Makes a net with two linears in one unit. */
FS_FN void two_linears(fs_net *net, int64_t a, int64_t b, int64_t c) {
    fs_net_begin(net, 4, a);
    fs_unit_add(net, "all");
    fs_linear(net, 0, a, b);
    fs_relu(net);
    fs_linear(net, 0, b, c);
}
static const int64_t linears[][3] TR_CONST = {{16, 15, 8}, {7, 15, 3}, {16, 17, 8}};
FS_FN void single_group(int how) {
    static fs_net net;
    for (size_t i = 0; i < COUNT(linears); i++)
        for (size_t k = 0; k < COUNT(worlds); k++) {
            two_linears(&net, linears[i][0], linears[i][1], linears[i][2]);
            fs_conf c = fs_conf_by(how, &net, worlds[k]);
            fs_story *s = fs_tell(&c);
            for (c.direct_min = 0; c.direct_min < 2; c.direct_min++) /* packed, direct */
                fs_train_and_compare(&c, s);
            fs_story_free(s, &c);
        }
}

/* ---- several units --------------------------------------------------------------------------- */

/* big: PyTorch's sizes. */
FS_FN fs_conf multi_group(int how, fs_net *net, int big) {
    fs_transformer(net, 3, big ? 16 : 8, big ? 1024 : 8, 1);
    if (big) net->batch = 3 * 64;
    fs_conf c = fs_conf_by(how, net, big ? 8 : 4);
    c.sgd = big; /* rows of small gradients */
    return c;
}

FS_FN double slow_micro(fs_run *x, int it, int m) {
    (void)m;
    fs_feed(x, &x->tape[0]);
    fs_forward(x, &x->tape[0]);
    if (x->model && (fs_slow & FS_SLOW_FORWARD)) fs_dawdle((uint64_t)it, (uint64_t)h_rank);
    double loss = fs_loss(x, &x->tape[0], 1);
    fs_backward(x, &x->tape[0]);
    return loss;
}
FS_FN void slow_optimizer(fs_run *x, int it, int m) {
    (void)m;
    if (fs_slow & FS_SLOW_OPTIM) fs_dawdle((uint64_t)it + 77, (uint64_t)x->rank);
}

/* Checks that each unit is gathered once for each use, also with unshards by the caller, and in
   backward before the reduction of the next unit. */
FS_FN void gathered_ahead(fs_run *x, int it, int m) {
    const int each = x->c->raf == NEVER ? 1 : 2;
    slow_optimizer(x, it, m);
    for (int u = 0; u < x->net->count; u++) {
        CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, u), each);
        if (u < 2 || each == 1) continue;
        int at = lab_next_op(&x->log, 0, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, x->unit[u - 1]);
        at = lab_next_op(&x->log, at + 1, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, x->unit[u - 1]);
        CHECK(at < lab_next_op(&x->log, 0, FSDP_OP_REDUCE_SCATTER, -1, x->unit[u]));
    }
    fs_watch(x);
}

/* Trains with delays before gathers, before reductions, after forward, before the optimizer, and
   all. */
FS_FN void with_delays(int how, int big, int offload, int ahead) {
    static const int delays[] = {0, FS_SLOW_GATHER, FS_SLOW_REDUCE, FS_SLOW_FORWARD, FS_SLOW_OPTIM,
                                 15};
    static fs_net net;
    fsdp_comm_ops slow = fs_slow_ops();
    fs_conf c = multi_group(how, &net, big);
    const int once = how != FS_SHARD || (!big && (offload || ahead));
    fs_story *s = fs_tell(&c);
    c.offload = offload, c.ahead = ahead, c.comm_ops = &slow;
    c.micro = slow_micro, c.after = ahead ? gathered_ahead : slow_optimizer;
    c.build = ahead ? fs_watch : NULL;
    for (size_t i = 0; i < (once ? 1 : COUNT(reshards)); i++)
        for (size_t k = 0; k < COUNT(delays); k++) {
            fs_slow = delays[k];
            c.raf = how ? NEVER : reshards[i];
            c.lanes = (int)(i + k) % 3, c.prefetch = k & 1 ? FSDP_PREFETCH_ALWAYS : 0;
            fs_train_and_compare(&c, s);
        }
    fs_story_free(s, &c);
}
/* Every second step uses only the first child. */
FS_FN double child_alone(fs_run *x, int it, int m) {
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
FS_FN void non_root(int how) {
    static fs_net net;
    fs_net_begin(&net, 8, 32);
    net.around = 1;
    fs_unit_add(&net, "root");
    fs_linear(&net, 0, 32, 32);
    for (int i = 0; i < 3; i++) fs_mlp(&net, fs_unit_add(&net, "mlp"), 32, 4);
    fs_slow = FS_SLOW_OPTIM;
    for (int ranks = 2; ranks <= 8; ranks *= 4) {
        fs_conf c = fs_conf_by(how, &net, ranks);
        c.micro = child_alone, c.after = slow_optimizer, c.iters = 4;
        fs_story *s = fs_tell(&c);
        for (c.raf = -1; c.raf <= (how ? -1 : 1); c.raf++) fs_train_and_compare(&c, s);
        fs_story_free(s, &c);
    }
}

/* Makes a net whose inner unit is used before and after another one. */
FS_FN void multi_forward(fs_net *net) {
    fs_net_begin(net, 4, 8);
    fs_unit_add(net, "inner"), fs_unit_add(net, "between"), fs_unit_add(net, "outer");
    fs_linear(net, 0, 8, 8);
    fs_relu(net);
    fs_linear(net, 1, 8, 8);
    fs_layer_add(net, FS_LINEAR, 0, 0, 8, 8);
    fs_relu(net);
    fs_linear(net, 2, 8, 8);
}
/* The inner unit's backward ends with its last visit, as in autograd. */
FS_FN double one_post_backward(fs_run *x, int it, int m) {
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
/* Checks that each post_backward of a unit has one reduction. */
FS_FN void reductions_of_visits(fs_run *x, int it, int m) {
    const int kind = x->c->how ? FSDP_OP_ALL_REDUCE : FSDP_OP_REDUCE_SCATTER;
    (void)it, (void)m;
    for (int u = 0; u < x->net->count; u++)
        CHECK_EQ_INT(fs_seen(x, kind, -1, u), !u && x->c->micro == fs_micro ? 2 : 1);
    fs_watch(x);
}
FS_FN void inner_twice(int how) {
    static fs_net net;
    multi_forward(&net);
    for (size_t i = 0; i < (how ? 1 : COUNT(reshards)); i++)
        for (int visits = 0; visits < 2; visits++) {
            fs_conf c = fs_conf_by(how, &net, visits ? 8 : 4);
            c.raf = how ? NEVER : reshards[i], c.micro = visits ? fs_micro : one_post_backward;
            c.lanes = visits;
            c.build = fs_watch, c.after = reductions_of_visits;
            fs_train(&c);
        }
}

/* Sets prefetch lists of the next two units in both directions. */
FS_FN void prefetch_two(fs_run *x) {
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

FS_FN void nothing_gathered(fs_run *x, int it, int m) {
    (void)it, (void)m;
    CHECK_EQ_INT(fs_calls(x, FSDP_OP_ALL_GATHER), 0);
}

FS_FN void explicit_prefetching(int how, int ranks) {
    static fs_net net;
    fs_transformer(&net, 8, 16, 8, 1);
    net.batch = 2 * 8;
    fs_conf c = fs_conf_by(how, &net, ranks);
    fs_story *s = fs_tell(&c);
    c.build = prefetch_two, c.after = how ? nothing_gathered : NULL;
    for (int lanes = 0; lanes < 3; lanes++)
        for (int raf = -1; raf <= 1; raf++) {
            c.lanes = lanes, c.raf = raf;
            fs_train_and_compare(&c, s);
        }
    fs_story_free(s, &c);
}

/* Backward reshards nothing: the gathered parameters are stale after the optimizer. */
FS_FN void kept_after_backward(fs_run *x) {
    CALL(x->world, fsdp_set_reshard_after_backward(x->model, NULL, 0));
}
FS_FN void still_gathered(fs_run *x, int it, int m) {
    slow_optimizer(x, it, m);
    for (int u = 0; u < x->net->count; u++)
        CHECK_EQ_INT(fsdp_unit_storage(x->unit[u]), FSDP_STORAGE_UNSHARDED);
}

FS_FN void shared_params(int how) {
    static fs_net net;
    fs_transformer(&net, 3, 16, 8, 1);
    net.batch = 2 * 16;
    fs_conf c = fs_conf_by(how, &net, 4);
    fs_story *s = fs_tell(&c);
    for (c.raf = -1; c.raf <= (how ? -1 : 1); c.raf++)
        for (c.ac = FS_AC_NONE; c.ac <= FS_AC_OWN; c.ac++) fs_train_and_compare(&c, s);
    fs_story_free(s, &c);
}
/* ---- activation checkpointing ---------------------------------------------------------------- */

/* Makes a net of four units: embedding; a block; two blocks; norm and head. */
FS_FN void three_parts(fs_net *net, int64_t d, int64_t vocab) {
    fs_net_begin(net, 4, 1);
    net->vocab = vocab;
    fs_unit_add(net, "embeddings");
    fs_layer_add(net, FS_EMBED, 0, fs_param_add(net, 0, vocab, d, 0), 1, d);
    fs_block(net, fs_unit_add(net, "block"), d);
    int two = fs_unit_add(net, "two blocks");
    fs_block(net, two, d);
    fs_block(net, two, d);
    int last = fs_unit_add(net, "norm and output");
    fs_norm(net, last, d);
    fs_layer_add(net, FS_UNEMBED, last, fs_param_add(net, last, vocab, d, 0), d, vocab);
}
/* Makes a net whose embedding and head are one tied unit: open around the blocks, from its first
   module to its last, or opened for each. */
FS_FN void tied_group(fs_net *net, int64_t d, int64_t vocab, int around) {
    fs_net_begin(net, 4, 1);
    net->vocab = vocab, net->around = around;
    fs_unit_add(net, "embedding and output");
    fs_layer_add(net, FS_EMBED, 0, fs_param_add(net, 0, vocab, d, 0), 1, d);
    for (int i = 0; i < 3; i++) fs_block(net, fs_unit_add(net, "block"), d);
    fs_norm(net, fs_unit_add(net, "norm"), d);
    fs_layer_add(net, FS_UNEMBED, 0, 0, d, vocab);
}
/* The backward of an embedding needs no parameters. */
FS_FN void no_unshard_in_backward(fs_run *x) {
    CALL(x->world, fsdp_set_unshard_in_backward(x->model, x->unit[0], 0));
    fs_watch(x);
}
FS_FN void gathers_of_embeddings(fs_run *x, int it, int m) {
    (void)it, (void)m;
    int each = x->c->raf == NEVER ? 1 : 2,
        of_embeddings = fs_recompute(x, 0) ? each : 1; /* recompute: all */
    CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, 0), of_embeddings);
    CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, 1), each);
    fs_watch(x);
}

FS_FN void gathers_of_tied(fs_run *x, int it, int m) {
    (void)it, (void)m;
    CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, 0), x->c->raf == NEVER ? 1 : 2);
    fs_watch(x);
}

FS_FN void checkpointing(int how, int big) {
    static fs_net nets[4];
    const int64_t d = big ? 16 : 8, vocab = big ? 1024 : 8;
    fs_transformer(&nets[0], 3, d, vocab, 1);
    three_parts(&nets[1], d, vocab);
    tied_group(&nets[2], d, vocab, 1);
    tied_group(&nets[3], d, vocab, 0);
    for (int n = 0; n < 4; n++) {
        fs_conf c = fs_conf_by(how, &nets[n], big ? 2 : 4);
        if (big) nets[n].batch = 3 * 64;
        fs_story *s = fs_tell(&c);
        for (int ac = 0; ac <= FS_AC_NESTED; ac++)
            for (size_t i = 0; i < (how ? 1 : COUNT(reshards)); i++) {
                c.ac = ac, c.raf = how ? NEVER : reshards[i];
                c.ac_blocks = (ac + (int)i) % 2; /* only the blocks, as upstream's, or every unit */
                c.lanes = n == 1 ? 0 : (ac + (int)i) % 3;
                c.build = n == 1 ? no_unshard_in_backward : n == 2 ? fs_watch : NULL;
                c.after = how      ? nothing_gathered
                          : n == 1 ? gathers_of_embeddings
                          : n == 2 ? gathers_of_tied
                                   : NULL;
                fs_train_and_compare(&c, s);
            }
        fs_story_free(s, &c);
    }
}
/* ---- gradient accumulation ------------------------------------------------------------------- */

FS_FN void sync_last(fs_run *x, int it, int m) {
    (void)it;
    fs_set_sync(x, -1, m == x->c->micros - 1);
}

/* Units that wait for the last microbatch; PARTIAL: with their all-reduces only. */
enum { ALL_UNITS, ROOT_ONLY, SOME_MLPS, EVERY, PARTIAL = 8 };
static const char *const sync_names[] TR_CONST = {"all", "root_only", "some_mlps", "none"};
typedef struct {
    const char *name;
    int replicas, raf;
    int sync, keep; /* keep: no reshard_after_backward until the last microbatch */
    int gathers, reductions, all_reduces; /* expected in an iteration */
} accumulation;

FS_FN int waits_for_last(const accumulation *a, int unit) {
    const int who = a->sync % PARTIAL;
    return who == ALL_UNITS || (who == ROOT_ONLY && unit == 0) ||
           (who == SOME_MLPS && (unit == 1 || unit == 2));
}
FS_FN void accumulate_before(fs_run *x, int it, int m) {
    const accumulation *a = (const accumulation *)x->c->user;
    int last = m == x->c->micros - 1;
    (void)it;
    for (int u = 0; u < x->net->count; u++) {
        if (!waits_for_last(a, u)) continue;
        if (a->sync & PARTIAL) fs_set_all_reduce(x, u, last);
        else fs_set_sync(x, u, last);
        if (x->model && a->keep)
            CALL(x->world, fsdp_set_reshard_after_backward(x->model, x->unit[u], last));
    }
}

/* Computes the expected calls, fsdp2-core.md 7.1, unit by unit: forward and backward gather
   unless the unit is still gathered. */
FS_FN void accumulate_expect(const fs_conf *c, accumulation *a) {
    int micros = c->micros, never = c->raf == NEVER;
    a->gathers = a->reductions = a->all_reduces = 0;
    for (int u = 0; u < c->net->count; u++) {
        int waits = waits_for_last(a, u), kept = a->keep && waits;
        a->gathers += c->shards == 1 ? 0
                      : kept         ? 1 + (never ? 0 : micros)
                                     : micros * (never ? 1 : 2);
        a->reductions += c->shards == 1 ? 0 : waits && !(a->sync & PARTIAL) ? 1 : micros;
        a->all_reduces += c->replicas == 1 ? 0 : waits ? 1 : micros;
    }
}
FS_FN void accumulate_count(fs_run *x, int it) {
    const accumulation *a = (const accumulation *)x->c->user;
    int kinds[3] = {FSDP_OP_ALL_GATHER, FSDP_OP_REDUCE_SCATTER, FSDP_OP_ALL_REDUCE};
    int expected[3] = {a->gathers, a->reductions, a->all_reduces};
    for (int k = 0; k < 3; k++)
        W_CHECK(fs_calls(x, kinds[k]) == (it + 1) * expected[k], "%d %s in %d iterations of %d",
                fs_calls(x, kinds[k]), fsdp_op_name(kinds[k]), it + 1, expected[k]);
}

/* Trains with every setting; without `all` with every second one. */
FS_FN void accumulate(int how, fs_net *net, int replicas, int shards, int sync, int all) {
    accumulation a;
    char name[64];
    memset(&a, 0, sizeof a);
    a.sync = sync;
    fs_conf c = fs_conf_of(net, replicas, shards);
    c.how = how;
    c.micros = 3, c.iters = 5, c.before = accumulate_before, c.user = &a;
    c.end = accumulate_count, c.name = name;
    fs_story *s = fs_tell(&c);
    for (int setting = 0; setting < 12; setting++) {
        c.raf = reshards[setting % 3], a.keep = setting / 3 % 2, c.offload = setting / 6;
        if (how && c.raf != NEVER) continue;
        if (!all && (setting + setting / 6) % 2) continue;
        c.plain = setting % 4 < 2; /* reductions that cannot cast, scale and add */
        accumulate_expect(&c, &a);
        snprintf(name, sizeof name, "%s%s raf %d keep %d offload %d", sync_names[sync % PARTIAL],
                 sync & PARTIAL ? ", all-reduces only" : "", c.raf, a.keep, c.offload);
        fs_train_and_compare(&c, s);
    }
    fs_story_free(s, &c);
}

/* Makes a net with the root's linear and three MLPs. */
FS_FN void linear_and_mlps(fs_net *net, int64_t d) {
    root_and_mlp(net, d);
    for (int i = 0; i < 2; i++) fs_mlp(net, fs_unit_add(net, "mlp"), d, 4);
}

/* Runs microbatches: forward and backward alternate, or forwards run ahead of backwards by one. */
enum { UP_FRONT = 1, KEPT = 2, AHEAD = 4 };
FS_FN double pipelined(fs_run *x, int it, int m) {
    static const char *const orders[] = {"F0 B0 F1 B1 F2 B2", "F0 F1 B0 F2 B1 B2"};
    const int how = *(const int *)x->c->user;
    double loss = 0;
    (void)it;
    for (int u = 0; x->model && (how & UP_FRONT) && u < x->net->count; u++) fs_unshard(x, u);
    for (const char *at = orders[how / AHEAD]; *at; at += at[2] ? 3 : 2) {
        fs_tape *t = &x->tape[at[1] - '0'];
        int last = at[1] == '2';
        x->micro = m + at[1] - '0';
        if (at[0] == 'F') {
            fs_feed(x, t);
            fs_forward(x, t);
            continue;
        }
        fs_set_sync(x, -1, last);
        fs_set_last(x, last);
        if (x->model && (how & KEPT))
            CALL(x->world, fsdp_set_reshard_after_backward(x->model, NULL, last));
        fs_feed(x, &x->tape[FS_TAPES - 1]); /* the targets */
        loss += fs_loss(x, t, 1);
        fs_backward(x, t);
        if (!last) fs_finalize(x);
    }
    x->micro = m;
    return loss;
}
/* Checks the gathers: one for each unit if parameters are kept, otherwise one for each forward. */
FS_FN void gathers_of_pipeline(fs_run *x, int it, int m) {
    const int how = *(const int *)x->c->user, each = x->c->how ? 0 : how & KEPT ? 1 : 3;
    (void)it, (void)m;
    for (int u = 0; u < x->net->count; u++) {
        CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, u), each);
        CHECK_EQ_INT(fs_seen(x, x->c->how ? FSDP_OP_ALL_REDUCE : FSDP_OP_REDUCE_SCATTER, -1, u), 1);
    }
    fs_watch(x);
}
FS_FN void microbatching(int how) {
    static fs_net net;
    fs_transformer(&net, 2, 16, 8, 1);
    net.batch = 2 * 16;
    for (int k = 0; k < 2 * AHEAD; k++) {
        fs_conf c = fs_conf_by(how, &net, 4);
        c.raf = NEVER, c.micro = pipelined, c.user = &k, c.iters = 2;
        c.build = fs_watch, c.after = gathers_of_pipeline;
        c.lanes = k % 3;
        fs_train(&c);
    }
}

/* ---- a forward of another name --------------------------------------------------------------- */

/* Runs a function other than the layer's forward: the first half of the unit's parameters. */
FS_FN double encode(fs_run *x, int it, int m) {
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
FS_FN void forward_method(int how) {
    static fs_net net;
    two_linears(&net, 16, 8, 4);
    for (int raf = -1; raf <= (how ? -1 : 1); raf++) {
        fs_conf c = fs_conf_by(how, &net, 2);
        c.raf = raf, c.micro = encode;
        fs_train(&c);
    }
}

enum { F32 = FSDP_F32, F64 = FSDP_F64, F16 = FSDP_F16, BF16 = FSDP_BF16 };
/* ---- dtypes ---------------------------------------------------------------------------------- */

/* As upstream's: backward reshards only in the last microbatch, unless forward reshards. */
FS_FN void sync_and_reshard_last(fs_run *x, int it, int m) {
    sync_last(x, it, m);
    if (x->model && x->c->raf == NEVER)
        CALL(x->world, fsdp_set_reshard_after_backward(x->model, NULL, m == x->c->micros - 1));
}

/* Makes a net with a linear in the root and three MLPs. */
FS_FN void mlps(fs_net *net, int64_t d) {
    fs_net_begin(net, 4, d);
    net->around = 1;
    fs_unit_add(net, "root");
    fs_linear(net, 0, d, d);
    for (int i = 0; i < 3; i++) fs_mlp(net, fs_unit_add(net, "mlp"), d, 2);
}
typedef struct {
    const char *name;
    int stored, grad, param, reduce;             /* 0: not set */
    int gathered, arrives, added, reduced, kept; /* expected */
} dtypes;

/* Checks that unreduced gradients stay as written, or are copied once to the dtype of the sums. */
FS_FN void check_unreduced(fs_run *x, const dtypes *d) {
    for (int u = 0; u < x->net->count; u++) {
        const fsdp_op *acc = fs_find(x, FSDP_OP_COPY, FSDP_LABEL_ACC, u);
        CHECK(!fs_find(x, FSDP_OP_REDUCE_SCATTER, -1, u));
        W_CHECK((acc != NULL) == (d->arrives != d->added), "%s: unit %d: %s", d->name, u,
                acc ? "added elsewhere" : "not added elsewhere");
        if (acc) CHECK_EQ_INT(acc->dtype, d->arrives);
        if (acc) CHECK_EQ_INT(acc->out_dtype, d->added);
    }
}
/* Checks the dtype of the sums. A backend that casts in the reduction reads gradients as
   written, sums in f32 or f64, and may write the dtype of the shard gradient; others read and
   write the sums' dtype. */
FS_FN void check_reduced(fs_run *x, const dtypes *d) {
    int widens = !x->c->plain && (d->reduced == F32 || d->reduced == F64);
    const int scattered = x->c->shards > 1;
    for (int u = 0; u < x->net->count; u++) {
        const fsdp_op *sum = fs_find(x, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, u);
        const fsdp_op *over = fs_find(x, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, u);
        const fsdp_op *out = fs_find(x, FSDP_OP_COPY, FSDP_LABEL_RED_OUT, u);
        CHECK((sum != NULL) == scattered && (over != NULL) == (x->c->replicas > 1));
        CHECK(!sum || sum->dtype == d->reduced || (widens && sum->dtype == d->arrives));
        CHECK(!sum || sum->out_dtype == d->reduced ||
              (widens && !out && sum->out_dtype == d->kept));
        if (over) CHECK_EQ_INT(over->dtype, d->reduced);
        if (out) CHECK_EQ_INT(out->dtype, d->reduced);
        if (out) CHECK_EQ_INT(out->out_dtype, d->kept);
    }
}
FS_FN void check_dtypes(fs_run *x, int it, int m) {
    const dtypes *d = (const dtypes *)x->c->user;
    fsdp_param_view v = FSDP_ZERO;
    (void)it;
    while (fsdp_next_param(x->model, &v)) {
        CHECK_EQ_INT(v.dtype, d->stored);
        CHECK_EQ_INT(v.grad_dtype, d->kept);
    }
    for (int i = 0; i < x->log.num; i++)
        if (x->log.ops[i].kind == FSDP_OP_ALL_GATHER)
            CHECK_EQ_INT(x->log.ops[i].dtype, d->gathered);
    int kept = m > 0 && x->c->raf == NEVER && x->c->before == sync_and_reshard_last;
    CHECK_EQ_INT(fs_find(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, 1) == NULL,
                 kept || x->c->shards == 1);
    if (m == x->c->micros - 1) check_reduced(x, d);
    else check_unreduced(x, d);
    fs_watch(x);
}

FS_FN fs_conf conf_of(const dtypes *d, const fs_net *net, int replicas, int shards) {
    fs_conf c = fs_conf_of(net, replicas, shards);
    c.name = d->name, c.stored = d->stored, c.grad = d->grad, c.param = d->param;
    c.reduce = d->reduce, c.user = (void *)(uintptr_t)d;
    c.iters = W_SLOW ? 2 : 4;
    return c;
}

/* Trains by rows; with two shards and one microbatch also along the largest dim, as upstream's. */
FS_FN void by_dtypes(int how, const dtypes *d, int replicas, int shards, int micros) {
    const int by_columns = replicas == 1 && shards == 2 && micros == 1;
    static fs_net net;
    mlps(&net, 16);
    fs_conf c = conf_of(d, &net, replicas, shards);
    c.micros = micros, c.before = micros > 1 ? sync_and_reshard_last : NULL;
    c.iters = W_SLOW ? 3 : FS_ITERS;
    c.build = fs_watch, c.after = check_dtypes, c.how = how;
    fs_story *s = fs_tell(&c);
    for (int columns = 0; columns <= by_columns; columns++) {
        for (int u = 0; u < net.count; u++)
            for (int p = 0; p < net.units[u].count; p++) {
                fs_param *q = &net.units[u].params[p];
                q->shard_dim = columns && q->ndim == 2 && q->shape[1] > q->shape[0];
            }
        for (size_t i = 0; i < COUNT(reshards); i++) { /* without shards: three times NEVER */
            c.raf = how ? NEVER : reshards[i], c.plain = i == 1, c.lanes = (int)i;
            fs_train_and_compare(&c, s);
        }
    }
    fs_story_free(s, &c);
}

/* The policy's reduce dtype is used for any stored dtype; also if the parameters are made in
   bf16, and cast to f32 when they are sharded. */
FS_FN void cast_to_f32(fs_run *x) {
    CALL(x->world, fsdp_model_cast(x->model, FSDP_F32));
    CALL(x->world, fsdp_init_params(x->model, fs_fill, x)); /* all bits of the initial values */
    fs_watch(x);
}
FS_FN void clamp_reduce_dtype(int how, int ranks) {
    static const dtypes both[] = {{"bf16", BF16, 0, BF16, BF16, BF16, BF16, BF16, BF16, BF16},
                                  {"f32", F32, 0, BF16, BF16, BF16, BF16, BF16, BF16, F32}};
    const int replicas = how ? ranks : 1, shards = how ? 1 : ranks;
    static fs_net net;
    for (size_t i = 0; i < COUNT(both); i++) by_dtypes(how, &both[i], replicas, shards, 1);
    mlps(&net, 16);
    fs_conf c = conf_of(&both[1], &net, replicas, shards);
    c.how = how, c.raf = how ? NEVER : 0;
    c.made = BF16, c.sgd = 1, c.build = cast_to_f32, c.after = check_dtypes;
    fs_train(&c);
}

/* Makes a net with two linears, a unit each. */
FS_FN void two_units(fs_net *net, int64_t d) {
    fs_net_begin(net, 2, d);
    fs_linear(net, fs_unit_add(net, "c1"), d, d);
    fs_linear(net, fs_unit_add(net, "c2"), d, d);
}

/* A struct of activations: each floating member is cast, the others are unchanged. */
typedef struct {
    float x[6];
    int32_t ids[4];
    struct {
        float a[3];
        double b[2];
    } pair;
} activations;

FS_FN const void *cast(const fs_run *x, const void *src, fsdp_dtype *type, int64_t count) {
    static __thread uint64_t room[8];
    const void *out = fsdp_cast_forward_input(x->unit[0], room, src, type, count);
    CHECK(out == src || out == room);
    return out;
}
FS_FN void struct_of_inputs(fs_run *x, int it, int m) {
    activations a;
    fsdp_dtype f32 = F32, f64 = F64, i32 = FSDP_I32, to = x->c->param ? x->c->param : F32;
    double back;
    (void)it, (void)m;
    memset(&a, 0, sizeof a);
    for (int i = 0; i < 6; i++) a.x[i] = 1.0f + (float)i / 1024;
    a.pair.b[0] = 1 + 1.0 / 512;
    const char *out = (const char *)cast(x, a.x, &f32, 6);
    CHECK_EQ_INT(f32, to);
    CHECK((out == (const char *)a.x) == (to == F32)); /* no copy without need */
    CHECK_OK(fsdp_convert(&back, F64, out + fsdp_dtype_size(to), to, 1));
    CHECK_NEAR(back, lab_round(to, (double)a.x[1]), 0);
    CHECK(cast(x, a.ids, &i32, 4) == a.ids);
    CHECK_EQ_INT(i32, FSDP_I32);
    out = (const char *)cast(x, a.pair.b, &f64, 2);
    CHECK_EQ_INT(f64, x->c->param ? x->c->param : F64);
    CHECK_OK(fsdp_convert(&back, F64, out, f64, 1));
    CHECK_NEAR(back, lab_round(f64, a.pair.b[0]), 0);
}

/* Trains with a struct of two or three activations: each unit's linear is applied to each member
   in turn, and the outputs are added. */
FS_FN double containers(fs_run *x, int it, int m) {
    const int members = *(const int *)x->c->user;
    const size_t bytes = (size_t)(x->net->batch * x->net->in) * sizeof(double);
    double *sum = x->tape[0].in[2];
    (void)it, (void)m;
    for (int k = 0; k < members; k++) fs_feed(x, &x->tape[k]);
    for (int u = 0; u < 2; u++) {
        fs_pre_forward(x, u);
        for (int k = 0; k < members; k++) fs_layers_forward(x, &x->tape[k], u, u, u + 1);
        fs_post_forward(x, u);
    }
    for (int k = 1; k < members; k++)
        for (int64_t i = 0; i < x->net->batch * x->net->in; i++)
            sum[i] = lab_round(x->tape[0].dtype[2], sum[i] + x->tape[k].in[2][i]);
    double loss = fs_loss(x, &x->tape[0], 1);
    for (int k = 0; k < members; k++) memcpy(x->tape[k].in[2], x->dx, bytes); /* their gradients */
    for (int u = 1; u >= 0; u--) {
        fs_pre_backward(x, u);
        for (int k = 0; k < members; k++) {
            memcpy(x->dx, x->tape[k].in[2], bytes);
            fs_layers_backward(x, &x->tape[k], u, u + 1);
            memcpy(x->tape[k].in[2], x->dx, bytes);
        }
        fs_post_backward(x, u);
    }
    return loss;
}
FS_FN void structured(int how) {
    static const fsdp_dtype policies[][2] = {{0, 0}, {BF16, BF16}, {BF16, F32}, {F32, 0}, {F16, 0}};
    static fs_net net;
    two_units(&net, 16);
    for (size_t i = 0; i < COUNT(policies); i++)
        for (int members = 2; members <= 3; members++) {
            fs_conf c = fs_conf_by(how, &net, 4);
            c.param = policies[i][0], c.reduce = policies[i][1];
            c.micro = containers, c.after = struct_of_inputs, c.user = &members;
            fs_train(&c);
        }
}

static const int *wanted_inputs
    TR_CONST; /* dtypes of the inputs of the layers, and of the output */
FS_FN double seen_inputs(fs_run *x, int it, int m) {
    double loss = fs_micro(x, it, m);
    for (int l = 0; l <= x->net->num_layers; l++)
        W_CHECK(x->tape[0].dtype[l] == wanted_inputs[l], "input of layer %d is %s, expected %s", l,
                fsdp_dtype_name(x->tape[0].dtype[l]), fsdp_dtype_name(wanted_inputs[l]));
    return loss;
}

/* The second unit's policy does not cast inputs; its module casts its input itself. */
FS_FN double own_cast(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    const int64_t count = x->net->batch * x->net->layers[1].in;
    (void)it, (void)m;
    fs_feed(x, t);
    fs_group_forward(x, t, 0, 0, 1);
    fs_pre_forward(x, 1);
    fs_cast_in(x, 1, t->in[1], &t->dtype[1], count);
    CHECK_EQ_INT(t->dtype[0], F32);
    CHECK_EQ_INT(t->dtype[1], F32);
    for (int64_t i = 0; i < count; i++) t->in[1][i] = lab_round(F16, t->in[1][i]);
    t->dtype[1] = F16;
    fs_layer_forward(x, t, 1);
    fs_post_forward(x, 1);
    CHECK_EQ_INT(t->dtype[2], F16);
    double loss = fs_loss(x, t, 1);
    fs_backward(x, t);
    return loss;
}
/* One unit computes in f16: the second one; the second one, whose module casts; the first one,
   whose output is cast back, so that the second one's input is f32. */
FS_FN void one_in_f16(int how) {
    static const int second[] = {F32, F16, F16}, first[] = {F16, F32, F32};
    static fs_net net;
    for (int k = 0; k < 3; k++) {
        two_units(&net, 100);
        net.units[k < 2].param = F16;
        if (k == 1) net.units[1].keep_inputs = 1;
        if (k == 2) net.units[0].output = F32;
        wanted_inputs = k ? first : second;
        fs_conf c = fs_conf_by(how, &net, 2);
        c.micro = k == 1 ? own_cast : seen_inputs, c.iters = 3;
        fs_train(&c);
    }
}

/* A module with two inputs, one from outside, which the policy casts or not. */
FS_FN void external_inputs(fs_run *x, int it, int m) {
    float y[4] = {1.0009765625f, 2, 3, 4};
    uint16_t room[4];
    fsdp_dtype type = F32;
    int keeps = x->net->units[1].keep_inputs;
    (void)it, (void)m;
    const void *out = fsdp_cast_forward_input(x->unit[1], room, y, &type, 4);
    CHECK_EQ_INT(type, keeps ? F32 : F16);
    CHECK(out == (keeps ? (const void *)y : (const void *)room));
}
FS_FN void with_external_inputs(int how) {
    static const int halves[] = {F16, F16, F16};
    static fs_net net;
    for (int keeps = 0; keeps < 2; keeps++) {
        two_units(&net, 100);
        net.units[0].param = net.units[1].param = F16, net.units[1].keep_inputs = keeps;
        wanted_inputs = halves;
        fs_conf c = fs_conf_by(how, &net, 2);
        c.micro = seen_inputs, c.after = external_inputs, c.iters = 3;
        fs_train(&c);
    }
}
/* Makes linear, norm, linear: the norm with the same policy, or with its own, and outputs cast
   back. */
FS_FN void norm_between(fs_net *net, int64_t d, fsdp_dtype param, int own) {
    fs_net_begin(net, 4, d);
    fs_linear(net, fs_unit_add(net, "in"), d, d);
    fs_norm(net, fs_unit_add(net, "norm"), d);
    fs_linear(net, fs_unit_add(net, "out"), d, d);
    for (int u = 0; u < 3; u++) net->units[u].param = param;
    if (own) net->units[1].param = F32, net->units[1].output = param;
}
FS_FN void norms(int how, fsdp_dtype param) {
    static fs_net net;
    for (int own = 0; own < 2; own++)
        for (int ranks = 2; ranks <= 4; ranks += 2) {
            /* the norm's input is cast to f32, its output back */
            int inputs[] = {param, own ? F32 : param, param, param};
            norm_between(&net, 8, param, own);
            wanted_inputs = inputs;
            fs_conf c = fs_conf_by(how, &net, ranks);
            c.micro = seen_inputs;
            fs_train(&c);
        }
}
#endif
