/* test_fully_shard_training.c - upstream's test_fully_shard_training by name: whole trainings on
   thread ranks, compared with a replicated copy in plain C, and how often the library communicates.
   fully_shard.h has the stand-ins for torch's modules.

   Most tests train ten iterations with Adam, without weight decay, and compare losses, gradients
   and parameters, with a relative tolerance of 1.3e-6 and an absolute one of 1e-6; PyTorch compares
   only losses in most of them. The loss is the mean squared distance to targets from a hash
   (PyTorch: mostly the sum of the output), and every microbatch has a new input (PyTorch: often the
   same). Gradients are dropped after one step, and written to zero after the next.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | NCCL | AT_NIGHT(ASAN | TSAN)
#include "harness.h"
#include "lab.h"
#include "fully_shard.h"
#include "trainings.h"
#include "trainings_tp.h"

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

/* PyTorch: test_fully_shard_training.py test_root_no_forward_inputs. Done: ten iterations (PyTorch:
   one). The output is the parameter (PyTorch: its product with itself). */
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

/* After forward: shards where reshard_after_forward says so. */
/* PyTorch: test_fully_shard_training.py test_param_registration_after_forward,
   test_param_registration_after_backward. Done: "registered" is fsdp_unit_storage. Shards, and what
   fsdp_data returns, have the values of the copy. */
TEST(fully_shard_training, param_registration_after_forward) {
    by_kinds(FS_SHARD, 3, registration, NULL);
}
TEST(fully_shard_training, param_registration_after_backward) {
    by_kinds(FS_SHARD, 8, NULL, sharded_again);
}

/* PyTorch: test_fully_shard_training.py test_to_float64_after_init. Done: made in f32, then
   fsdp_model_cast. SGD (PyTorch: Adam); cast.follows has optimizers. */
TEST(fully_shard_training, to_float64_after_init) { to_float64(FS_SHARD); }

static void shard_largest_dim(fs_net *net) {
    for (int u = 0; u < net->count; u++)
        for (int p = 0; p < net->units[u].count; p++) {
            fs_param *q = &net->units[u].params[p];
            q->shard_dim = q->ndim == 2 && q->shape[1] > q->shape[0];
        }
}

/* PyTorch: test_fully_shard_training.py test_train_parity_single_group_shard_dim0. Done: packed,
   and direct where a shard allows it. */
TEST(fully_shard_training, train_parity_single_group_shard_dim0, SLOW) { single_group(FS_SHARD); }

/* PyTorch: test_fully_shard_training.py test_train_parity_single_group_shard_largest_dim. Done:
   also 3 ranks, with uneven columns, which PyTorch refuses. */
TEST(fully_shard_training, train_parity_single_group_shard_largest_dim, SLOW) {
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

/* PyTorch: test_fully_shard_training.py test_train_parity_multi_group. Done: delays of up to 1.5 ms
   (PyTorch: 100 ms). A block has no attention. The long_ tests have PyTorch's sizes, with SGD. */
TEST(fully_shard_training, train_parity_multi_group, SLOW) { with_delays(FS_SHARD, 0, 0, 0); }
/* PyTorch: test_fully_shard_training.py test_train_parity_multi_group_cpu_offload_eager. Done:
   pinned and other memory are one path on the host. */
TEST(fully_shard_training, train_parity_multi_group_cpu_offload, SLOW) {
    with_delays(FS_SHARD, 0, 1, 0);
}
/* PyTorch: test_fully_shard_training.py test_train_parity_multi_group_unshard_async_op. Done: you
   call fsdp_unshard for the next unit (PyTorch: a flag of the model). */
TEST(fully_shard_training, train_parity_multi_group_unshard_async_op, SLOW) {
    with_delays(FS_SHARD, 0, 0, 1);
}
/* PyTorch: test_fully_shard_training.py test_train_parity_multi_group,
   test_train_parity_multi_group_cpu_offload_eager, test_train_parity_multi_group_unshard_async_op.
   Done: PyTorch's sizes, with SGD. */
TEST(long_fully_shard_training, train_parity_multi_group, SECONDS(300) | NIGHT) {
    with_delays(FS_SHARD, 1, 0, 0);
}
TEST(long_fully_shard_training, train_parity_multi_group_cpu_offload, SECONDS(300) | NIGHT) {
    with_delays(FS_SHARD, 1, 1, 0);
}
TEST(long_fully_shard_training, train_parity_multi_group_unshard_async_op, SECONDS(300) | NIGHT) {
    with_delays(FS_SHARD, 1, 0, 1);
}

/* PyTorch: test_fully_shard_training.py test_non_root_forward_backward. Done: the root has a
   linear. */
TEST(fully_shard_training, non_root_forward_backward) { non_root(FS_SHARD); }

/* PyTorch: test_fully_shard_training.py test_multi_forward_module. Done: one fsdp_post_backward
   after the last visit reduces once, one per visit reduces each time. PyTorch reduces once. */
TEST(fully_shard_training, multi_forward_module) { inner_twice(FS_SHARD); }

/* PyTorch: test_fully_shard_training.py test_explicit_prefetching. Done: 2 ranks, the long_ test
   PyTorch's 8. Adam (PyTorch: AdamW). */
TEST(fully_shard_training, explicit_prefetching) { explicit_prefetching(FS_SHARD, 2); }
TEST(long_fully_shard_training, explicit_prefetching, NIGHT) { explicit_prefetching(FS_SHARD, 8); }

/* fsdp_params_changed is the event: whatever delays the optimizer, gathers come after it. */
/* PyTorch: test_fully_shard_training.py test_post_optim_event. Differs: there is no setter:
   fsdp_params_changed is the event. Parameters that stay gathered over the optimizer are stale, and
   are gathered again. */
TEST(fully_shard_training, post_optim_event) {
    static fs_net net;
    fsdp_comm_ops slow = fs_slow_ops();
    fs_transformer(&net, 2, 16, 8, 1);
    net.batch = 2 * 8;
    fs_conf c = fs_conf_of(&net, 1, 2);
    fs_story *s = fs_tell(&c);
    c.comm_ops = &slow, c.after = slow_optimizer;
    fs_slow = FS_SLOW_OPTIM | FS_SLOW_GATHER;
    for (int lanes = 0; lanes < 3; lanes++) {
        c.lanes = lanes, c.ahead = 1, c.build = NULL, c.after = slow_optimizer;
        fs_train_and_compare(&c, s);
        c.build = kept_after_backward, c.after = still_gathered;
        fs_train_and_compare(&c, s);
    }
    fs_story_free(s, &c);
}

/* ---- activation checkpointing ---------------------------------------------------------------- */

/* PyTorch: test_fully_shard_training.py test_train_parity_with_activation_checkpointing. Done:
   recompute in place of PyTorch's three implementations, in PyTorch's three groupings. The long_
   test has PyTorch's sizes. */
TEST(fully_shard_training, activation_checkpointing, AT_NIGHT(GLOO)) { checkpointing(FS_SHARD, 0); }
TEST(long_fully_shard_training, activation_checkpointing, SECONDS(300) | NIGHT) {
    checkpointing(FS_SHARD, 1);
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

/* A layer: a unit that holds the norms, and inside it a unit of attention (here a linear) and a
   unit of the feed-forward. The layers that follow each other: */
enum { NESTED_LAYER = 10, NESTED_BLOCKS = 3 };
static void nested(fs_net *net, int64_t d, int64_t vocab) {
    static const char *const names[] = {"0", "0.attention", "0.feed_forward",
                                        "1", "1.attention", "1.feed_forward",
                                        "2", "2.attention", "2.feed_forward"};
    fs_net_begin(net, 4, 1);
    fs_unit_add(net, "root");
    net->around = 1, net->vocab = vocab;
    fs_layer_add(net, FS_EMBED, 0, fs_param_add(net, 0, vocab, d, 0), 1, d);
    for (int i = 0; i < NESTED_BLOCKS; i++) {
        int unit[3];
        for (int k = 0; k < 3; k++) unit[k] = fs_unit_add(net, names[3 * i + k]);
        for (int k = 1; k < 3; k++) {
            int from = fs_layer_add(net, FS_SAVE, unit[0], 0, d, d);
            fs_norm(net, unit[0], d);
            fs_linear(net, unit[k], d, k == 1 ? d : 4 * d);
            if (k == 2) fs_relu(net), fs_linear(net, unit[k], 4 * d, d);
            net->layers[fs_layer_add(net, FS_ADD, unit[0], 0, d, d)].from = from;
        }
    }
    fs_norm(net, 0, d);
    fs_layer_add(net, FS_UNEMBED, 0, 0, d, vocab);
}
static void nested_forward(fs_run *x, fs_tape *t, int block) {
    int at = 1 + block * NESTED_LAYER, unit = 1 + 3 * block;
    fs_pre_forward(x, unit);
    for (int l = at, to; l < at + NESTED_LAYER; l = to) {
        int inner = x->net->layers[l].unit;
        for (to = l; to < at + NESTED_LAYER; to++)
            if (x->net->layers[to].unit >= 0 && x->net->layers[to].unit != inner) break;
        if (inner != unit) fs_pre_forward(x, inner);
        fs_layers_forward(x, t, inner, l, to);
        if (inner != unit) fs_post_forward(x, inner);
    }
    fs_post_forward(x, unit);
}
static void nested_backward(fs_run *x, fs_tape *t, int block) {
    int at = 1 + block * NESTED_LAYER, unit = 1 + 3 * block;
    fs_pre_backward(x, unit);
    if (x->c->ac) nested_forward(x, t, block);
    for (int l = at + NESTED_LAYER, from; l > at; l = from) {
        int inner = x->net->layers[l - 1].unit;
        for (from = l - 1; from > at; from--)
            if (x->net->layers[from - 1].unit >= 0 && x->net->layers[from - 1].unit != inner) break;
        if (inner != unit) fs_pre_backward(x, inner);
        fs_layers_backward(x, t, from, l);
        if (inner != unit) fs_post_backward(x, inner);
    }
    fs_post_backward(x, unit);
}
static double two_nested_forwards(fs_run *x, int it, int m) {
    const int end = 1 + NESTED_BLOCKS * NESTED_LAYER;
    double loss = 0;
    (void)it;
    for (int k = 0; k < 2; k++) {
        fs_tape *t = &x->tape[k];
        x->micro = m + 2 * k; /* another input */
        fs_feed(x, t);
        fs_pre_forward(x, 0);
        fs_layers_forward(x, t, 0, 0, 1);
        for (int b = 0; b < NESTED_BLOCKS; b++) {
            nested_forward(x, t, b);
            if (x->c->ac) fs_forget(x, t, 1 + b * NESTED_LAYER, 1 + (b + 1) * NESTED_LAYER);
        }
        fs_layers_forward(x, t, 0, end, end + 2);
        fs_post_forward(x, 0);
    }
    fs_pre_backward(x, 0);
    for (int k = 1; k >= 0; k--) {
        x->micro = m + 2 * k;
        fs_feed(x, &x->tape[FS_TAPES - 1]); /* the targets */
        loss += fs_loss(x, &x->tape[k], 0.5);
        fs_layers_backward(x, &x->tape[k], end, end + 2);
        for (int b = NESTED_BLOCKS - 1; b >= 0; b--) nested_backward(x, &x->tape[k], b);
        fs_layers_backward(x, &x->tape[k], 0, 1);
    }
    x->micro = m;
    return loss;
}

/* Ten iterations of a small net, one with PyTorch's numbers; not nested as well. */
/* PyTorch: test_fully_shard_training.py test_double_forward_with_nested_fsdp_and_checkpoint. Done:
   in parity (PyTorch: gradients are not None). Attention is one linear; the loss is a sum over both
   forwards, not their squared difference. */
TEST(fully_shard_training, double_forward_with_nested_fsdp_and_checkpoint) {
    static fs_net nets[3];
    fs_transformer(&nets[0], 3, 8, 8, 1);
    nested(&nets[1], 8, 8);
    nested(&nets[2], 16, 1024);
    nets[2].batch = 2 * 32;
    for (int n = 0; n < 3 - W_SLOW; n++) {
        fs_conf c = fs_conf_of(&nets[n], 1, 2);
        c.micro = n ? two_nested_forwards : two_forwards, c.iters = n == 2 ? 1 : FS_ITERS;
        fs_story *s = fs_tell(&c);
        for (int ac = 0; ac <= (n ? FS_AC_OWN : FS_AC_NESTED); ac++)
            for (size_t i = 0; i < COUNT(reshards) - (n == 2); i++) {
                c.ac = ac, c.raf = reshards[i], c.lanes = (int)i;
                fs_train_and_compare(&c, s);
            }
        fs_story_free(s, &c);
    }
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

/* PyTorch's model for losses by chunks: embedding, body, norm and head. Grouped: norm and head are
   one unit; tied: the embedding, whose table is the head's, too. */
enum { C_EMBED, C_BODY, C_NORM, C_HEAD, C_END, C_DIM = 32, C_VOCAB = 128 };
enum { C_PLAIN, C_BF16_EVERYWHERE, C_BF16_INNER, C_POLICIES };
static void chunked_net(fs_net *net, int grouped, int tied, int policy) {
    fs_net_begin(net, 2 * 16, 1);
    net->vocab = C_VOCAB;
    int embed = fs_unit_add(net, tied ? "embedding, norm, head" : "embedding");
    int table = fs_param_add(net, embed, C_VOCAB, C_DIM, 0);
    int body = fs_unit_add(net, "body");
    int norm = tied ? embed : fs_unit_add(net, grouped ? "norm, head" : "norm");
    int head = tied ? embed : grouped ? norm : fs_unit_add(net, "head");
    fs_layer_add(net, FS_EMBED, embed, table, 1, C_DIM);
    fs_layer_add(net, FS_UNEMBED, body, fs_param_add(net, body, C_DIM, C_DIM, 0), C_DIM, C_DIM);
    fs_norm(net, norm, C_DIM);
    int weight = tied ? table : fs_param_add(net, head, C_VOCAB, C_DIM, 0);
    fs_layer_add(net, FS_UNEMBED, head, weight, C_DIM, C_VOCAB);
    for (int u = 0; u < net->count && policy != C_PLAIN; u++) {
        int inner = u == norm || u == head;
        net->units[u].param = FSDP_F32;
        net->units[u].output = policy == C_BF16_EVERYWHERE || inner ? FSDP_BF16 : 0;
    }
}
typedef struct {
    int chunks, policy;
    uint64_t bits[FS_ITERS][FS_RANKS];          /* hashes of gradients and parameters */
    double loss[FS_ITERS][FS_RANKS][FS_MICROS]; /* the library's losses */
} chunked;

static uint64_t bits_of_grad(const fs_run *x, int unit, int p) {
    fsdp_param_view v = FSDP_ZERO;
    uint64_t bits = 1469598103934665603u;
    CALL(x->world, fsdp_param_view_get(x->unit[unit], p, &v));
    if (v.shard_grad) lab_fold(&bits, v.shard_grad, (size_t)v.numel * sizeof(float));
    return bits;
}

/* The model's own forward, which leaves out the head. A tied unit is open around the body. */
static void headless_forward(fs_run *x, fs_tape *t) {
    int embed = x->net->layers[C_EMBED].unit, norm = x->net->layers[C_NORM].unit;
    fs_pre_forward(x, embed);
    fs_layers_forward(x, t, embed, C_EMBED, C_BODY);
    if (embed != norm) fs_post_forward(x, embed);
    module_forward(x, t, C_BODY, C_NORM);
    if (x->c->ac) fs_forget(x, t, C_BODY, C_NORM);
    if (embed != norm) fs_pre_forward(x, norm);
    fs_layers_forward(x, t, norm, C_NORM, C_HEAD);
    fs_post_forward(x, norm);
}
/* x->dx: of the norm's output. */
static void headless_backward(fs_run *x, fs_tape *t) {
    int embed = x->net->layers[C_EMBED].unit, norm = x->net->layers[C_NORM].unit;
    fs_pre_backward(x, norm);
    fs_layers_backward(x, t, C_NORM, C_HEAD);
    if (embed != norm) fs_post_backward(x, norm);
    fs_group_backward(x, t, x->net->layers[C_BODY].unit, C_BODY, C_NORM);
    if (embed != norm) fs_pre_backward(x, embed);
    fs_layers_backward(x, t, C_EMBED, C_BODY);
    fs_post_backward(x, embed);
}

/* Head and loss by chunks of the batch, each a forward and a backward of its own, to which
   `between` may look. x->dx: the gradient of the head's input. */
static double by_chunks(fs_run *x, fs_tape *t, void (*between)(fs_run *x, int chunk)) {
    const fs_net *whole = x->net;
    fs_net part = *whole;
    fs_tape *c = &x->tape[1];
    const chunked *h = (const chunked *)x->c->user;
    const int head = whole->layers[C_HEAD].unit, weight = whole->layers[C_HEAD].p;
    const int64_t rows = whole->batch / h->chunks;
    const size_t bytes = (size_t)(rows * C_DIM) * sizeof(double);
    double *target = x->target, loss = 0;
    uint64_t before = 0;
    part.batch = rows, x->net = &part;
    for (int k = 0; k < h->chunks; k++) {
        memcpy(c->in[C_HEAD], t->in[C_HEAD] + k * rows * C_DIM, bytes);
        c->dtype[C_HEAD] = FSDP_F32; /* chunks are cast to it */
        x->target = target + k * rows * C_VOCAB;
        module_forward(x, c, C_HEAD, C_END);
        CHECK_EQ_INT(c->dtype[C_END], h->policy ? FSDP_BF16 : FSDP_F32);
        loss += fs_loss(x, c, 1.0 / h->chunks);
        fs_set_last(x, 0);
        module_backward(x, c, C_HEAD, C_END);
        fs_finalize(x);
        memcpy(x->dy + k * rows * C_DIM, x->dx, bytes);
        if (x->model && x->c->micros == 1) { /* each chunk has added something */
            uint64_t bits = bits_of_grad(x, head, weight);
            CHECK(bits != before);
            before = bits;
        }
        if (between && x->model) between(x, k);
    }
    fs_set_last(x, 1);
    x->net = whole, x->target = target;
    for (int64_t i = 0; i < whole->batch * C_DIM; i++)
        x->dx[i] = lab_round(t->dtype[C_HEAD], x->dy[i]);
    return loss;
}
static double chunked_head(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    fs_feed(x, t);
    headless_forward(x, t);
    CHECK_EQ_INT(t->dtype[C_HEAD], ((const chunked *)x->c->user)->policy ? FSDP_BF16 : FSDP_F32);
    double loss = by_chunks(x, t, NULL);
    if (x->model) ((chunked *)x->c->user)->loss[it][x->rank][m] = loss;
    headless_backward(x, t);
    return loss;
}

/* The bits of all gradients and parameters of this rank: of units however they are grouped. */
static void keep_grad_bits(fs_run *x, int it, int m) {
    chunked *h = (chunked *)x->c->user;
    uint64_t *bits = &h->bits[it][x->rank];
    (void)m;
    for (int u = 0; u < x->net->count; u++)
        for (int p = 0; p < x->net->units[u].count; p++) {
            uint64_t of = bits_of_grad(x, u, p);
            lab_fold(bits, &of, sizeof of);
        }
}
static void keep_param_bits(fs_run *x, int it) {
    chunked *h = (chunked *)x->c->user;
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(x->model, &v))
        lab_fold(&h->bits[it][x->rank], v.shard, (size_t)v.numel * sizeof(float));
}

/* Grouped, and not: the same losses of the copies, the same losses and bits of the library; resharded after
   forward always and never, unless `like` says how. */
static void grouped_and_not(const fs_conf *like, int tied, int policy, int chunks) {
    static fs_net net[2];
    chunked(*h)[2] = (chunked(*)[2])lab_shared(4 * sizeof(chunked));
    fs_story *s[2] = {NULL, NULL};
    for (int grouped = 1; grouped >= tied; grouped--) {
        fs_conf c = *like;
        chunked_net(&net[grouped], grouped, tied, policy);
        c.net = &net[grouped], c.name = grouped ? "grouped" : "not grouped";
        c.sgd = 1; /* Adam makes more of the differences that other orders of sums make */
        c.after = keep_grad_bits, c.end = keep_param_bits;
        for (int never = 0; never < (like->raf ? 1 : 2); never++) {
            h[grouped][never].chunks = chunks, h[grouped][never].policy = policy;
            c.user = &h[grouped][never];
            if (!like->raf) c.raf = never ? NEVER : ALWAYS;
            if (!s[grouped]) s[grouped] = fs_tell(&c);
            fs_train_and_compare(&c, s[grouped]);
        }
    }
    if (s[0]) CHECK_EQ_MEM(s[0]->loss, s[1]->loss, sizeof s[0]->loss);
    for (int never = 0; s[0] && never < 2; never++) {
        CHECK_EQ_MEM(h[0][never].bits, h[1][never].bits, sizeof h[0][never].bits);
        CHECK_EQ_MEM(h[0][never].loss, h[1][never].loss, sizeof h[0][never].loss);
        CHECK(never || h[0][never].loss[0][0][0] > 0);
    }
    for (int k = 0; k < 2; k++)
        if (s[k]) fs_story_free(s[k], like);
    munmap(h, 4 * sizeof(chunked));
}

static fs_conf chunked_conf(int raf) {
    fs_conf c = fs_conf_of(NULL, 1, 2);
    c.raf = raf, c.micro = chunked_head;
    c.iters = W_SLOW ? 3 : FS_ITERS;
    return c;
}
/* PyTorch: test_fully_shard_training.py test_partial_group_forward_then_standalone. Done: same bits
   grouped and not. fsdp_set_is_last_backward is 0 for the chunks (PyTorch: not needed). SGD, and a
   layer norm. */
TEST(fully_shard_training, partial_group_forward_then_standalone, SLOW | AT_NIGHT(GLOO | NCCL)) {
    for (int k = 0; k < 2 * C_POLICIES; k++) {
        fs_conf c = chunked_conf(0);
        c.lanes = k % 3;
        grouped_and_not(&c, k % 2, k / 2, 4);
    }
    fs_conf c = chunked_conf(0);
    c.ac = FS_AC_OWN;
    grouped_and_not(&c, 0, C_PLAIN, 4);
    c = chunked_conf(2); /* a smaller mesh after forward */
    c.shards = 4;
    grouped_and_not(&c, 0, C_PLAIN, 4);
}

/* PyTorch: test_fully_shard_training.py test_partial_group_forward_grad_accum_chunked. Done:
   fsdp_set_is_last_backward is 0 for each chunk, not for each microbatch as in PyTorch. SGD. */
TEST(fully_shard_training, grad_accum_chunked) {
    fs_conf c = chunked_conf(0);
    c.micros = 3, c.before = sync_last, c.iters = 2;
    grouped_and_not(&c, 0, C_PLAIN, 2);
}

/* Both reshards are off for the loop over the chunks: its parameters stay, and at most the first
   forward gathers. Then they are on again, and the caller reshards. */
static void still_open(fs_run *x, int chunk) {
    int head = x->net->layers[C_HEAD].unit;
    W_CHECK(fsdp_unit_storage(x->unit[head]) == FSDP_STORAGE_UNSHARDED,
            "the head was resharded behind chunk %d", chunk);
}
static double toggled(fs_run *x, int it, int m) {
    int head = x->net->layers[C_HEAD].unit, open = it == 0 && x->c->raf == NEVER;
    fs_tape *t = &x->tape[0];
    (void)m;
    fs_feed(x, t);
    headless_forward(x, t);
    if (x->model) {
        CHECK_EQ_INT(fsdp_unit_storage(x->unit[head]),
                     open ? FSDP_STORAGE_UNSHARDED : FSDP_STORAGE_SHARDED);
        CALL(x->world, fsdp_set_reshard_after_forward(x->model, x->unit[head], NEVER));
        CALL(x->world, fsdp_set_reshard_after_backward(x->model, x->unit[head], 0));
        fs_watch(x);
    }
    double loss = by_chunks(x, t, still_open);
    if (x->model) {
        CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, head), !open);
        CALL(x->world, fsdp_set_reshard_after_forward(x->model, x->unit[head], ALWAYS));
        CALL(x->world, fsdp_set_reshard_after_backward(x->model, x->unit[head], 1));
        CALL(x->world, fsdp_reshard(x->unit[head]));
        CHECK_EQ_INT(fsdp_unit_storage(x->unit[head]), FSDP_STORAGE_SHARDED);
        fs_watch(x);
    }
    headless_backward(x, t);
    if (x->model) CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, head), 1);
    return loss;
}
static void default_but_head(fs_run *x) {
    for (int u = 0; u < x->net->count; u++)
        if (u != x->net->layers[C_HEAD].unit)
            CALL(x->world, fsdp_set_reshard_after_forward(x->model, x->unit[u], ALWAYS));
}

/* PyTorch: test_fully_shard_training.py test_partial_group_reshard_toggle. Done. */
TEST(fully_shard_training, reshard_toggle) {
    static fs_net net;
    static chunked h = {4, C_PLAIN, {{0}}, {{{0}}}};
    for (int k = 0; k < 12; k++) {
        chunked_net(&net, 1, k & 1, C_PLAIN);
        fs_conf c = chunked_conf(k & 2 ? ALWAYS : NEVER);
        c.net = &net, c.user = &h, c.micro = toggled, c.build = default_but_head;
        c.lanes = k / 4, c.iters = 5;
        fs_train(&c);
    }
}

/* The norm in two forwards, the head in none. */
static double twice_without_head(fs_run *x, int it, int m) {
    double loss = 0;
    (void)it;
    for (int t = 0; t < 2; t++) {
        x->micro = m + t;
        fs_feed(x, &x->tape[t]);
        headless_forward(x, &x->tape[t]);
    }
    for (int t = 1; t >= 0; t--) {
        x->micro = m + t;
        fs_feed(x, &x->tape[FS_TAPES - 1]); /* the targets */
        loss += fs_loss_at(x, &x->tape[t], C_HEAD, 0.5);
        headless_backward(x, &x->tape[t]);
    }
    x->micro = m;
    return loss;
}
static void head_has_none(fs_run *x, int it, int m) {
    for (int l = 0; l < C_END; l++) {
        fsdp_param_view v = FSDP_ZERO;
        CALL(x->world,
             fsdp_param_view_get(x->unit[x->net->layers[l].unit], x->net->layers[l].p, &v));
        CHECK_EQ_INT(v.shard_grad != NULL, l != C_HEAD);
    }
    keep_grad_bits(x, it, m);
}

/* PyTorch: test_fully_shard_training.py test_double_partial_forward_then_backward. Done: embedding
   and body are units (PyTorch: the root has them). */
TEST(fully_shard_training, double_partial_forward) {
    static fs_net net;
    static chunked h;
    for (int k = 0; k < 6; k++) {
        chunked_net(&net, k & 1, 0, C_PLAIN);
        fs_conf c = chunked_conf(reshards[k / 2]);
        c.net = &net, c.user = &h, c.micro = twice_without_head, c.after = head_has_none;
        c.iters = 4, c.shards = c.raf == 2 ? 4 : 2;
        fs_train(&c);
    }
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

/* PyTorch: test_fully_shard_training.py test_grouped_module_cast_forward_inputs. Done: you call
   fsdp_cast_forward_input for each module. */
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

/* PyTorch: test_fully_shard_training.py test_reset_iter_state_after_exception. Done: left in
   forward, after backward, and after two calls of pre_backward (PyTorch: in forward).
   fsdp_model_reset, then parity. */
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

/* it -1: before the first iteration. */
static void gathered(fs_run *x, int it) {
    for (int u = 0; u < x->net->count; u++)
        for (int p = 0; p < x->net->units[u].count; p++) {
            const fs_param *q = &x->net->units[u].params[p];
            float full[1024];
            CHECK(q->numel <= 1024);
            CALL(x->world, fsdp_param_full(x->unit[u], p, full));
            for (int64_t e = 0; e < q->numel; e++) {
                double want = it < 0 ? fs_initial(x->net, u, p, e) : x->story->param[it][q->at + e];
                fs_check_near(x, "gathered parameter", u, p, e, (double)full[e], want);
            }
        }
}

static void gathered_at_first(fs_run *x) { gathered(x, -1); }

/* PyTorch: test_fully_shard_training.py test_train_parity_shard_placement_fn_shard_largest_dim.
   Done: Adam (PyTorch: AdamW). */
TEST(fully_shard_training, train_parity_shard_placement_fn, SLOW) {
    static fs_net net;
    fs_transformer(&net, 3, 16, 8, 1);
    net.batch = 2 * 16;
    shard_largest_dim(&net);
    int columns = 0;
    for (int u = 0; u < net.count; u++)
        for (int p = 0; p < net.units[u].count; p++) columns += net.units[u].params[p].shard_dim;
    CHECK_EQ_INT(columns, 4); /* the table, and each block's second linear */
    for (size_t k = 1; k < COUNT(worlds); k++) {
        fs_conf c = fs_conf_of(&net, 1, worlds[k]);
        c.iters = 5, c.build = gathered_at_first, c.end = gathered;
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
/* PyTorch: test_fully_shard_training.py test_shard_placement_fn_contiguous_params_grads. Done: one
   unit of two linears (PyTorch: one for each). */
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

/* PyTorch: test_fully_shard_training.py test_train_parity_with_shared_params. Done: a tied
   parameter is one parameter that is used twice. */
TEST(fully_shard_training, train_parity_with_shared_params, SLOW) { shared_params(FS_SHARD); }

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

/* A vocabulary of 4 W + 1, in chunks of 5 rows: the last ranks have fewer, with 8 ranks one has none. */
/* PyTorch: test_fully_shard_training.py test_train_shared_params_uneven_shard. Done: parity
   (PyTorch: cross entropy, compares no loss); every row changes in the first iteration. */
TEST(fully_shard_training, train_parity_with_shared_params_uneven_shard, SLOW) {
    static fs_net net;
    for (size_t k = 1; k < COUNT(worlds); k++) {
        fs_net_begin(&net, 2 * 8, 1);
        net.vocab = 4 * worlds[k] + 1;
        fs_unit_add(&net, "tied");
        fs_layer_add(&net, FS_EMBED, 0, fs_param_add(&net, 0, net.vocab, 16, 0), 1, 16);
        fs_layer_add(&net, FS_UNEMBED, 0, 0, 16, net.vocab);
        fs_conf c = fs_conf_of(&net, 1, worlds[k]);
        c.raf = ALWAYS, c.end = every_row_moved;
        fs_train(&c);
        c.raf = NEVER;
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
        static const char *const names[] = {"norm.w", "norm.b", "linear.w", "linear.b"};
        for (int p = 0; p < from->count; p++) d[p].name = names[p];
        ud.name = "layer", ud.params = d, ud.num_params = from->count;
        ud.user = (void *)(intptr_t)u;
        CALL(x->world, fsdp_fully_shard(x->model, &ud, &x->unit[u]));
        for (int k = 0; k < u; k++) CHECK(x->unit[k] != x->unit[u]);
    }
    memset(d, 0xff, sizeof d);
}

/* PyTorch: test_fully_shard_training.py test_layer_by_layer_shard_no_false_positive. Done: one
   array of descs is overwritten and reused. */
TEST(fully_shard_training, shared_params_layer_by_layer) {
    static fs_net net;
    fs_net_begin(&net, 8, 16);
    for (int i = 0; i < 8; i++) {
        int block = fs_unit_add(&net, "layer");
        fs_norm(&net, block, 16);
        fs_linear(&net, block, 16, 16);
    }
    fs_conf c = fs_conf_of(&net, 1, 4);
    c.make = layer_by_layer;
    fs_train(&c);
}

/* ---- gradient accumulation ------------------------------------------------------------------- */

static void accumulate_all(int64_t d, int all) {
    static fs_net net;
    linear_and_mlps(&net, d);
    for (int sync = 0; sync < EVERY; sync++) {
        accumulate(FS_SHARD, &net, 1, 4, sync, all);
        accumulate(FS_SHARD, &net, 2, 2, sync, all);
        accumulate(FS_SHARD, &net, 2, 2, sync | PARTIAL, all);
    }
}
/* PyTorch: test_fully_shard_training.py test_gradient_accumulation. Done: exact counts after every
   iteration. Half of the settings; the long_ test has all, and PyTorch's width. */
TEST(fully_shard_training, gradient_accumulation, SLOW | AT_NIGHT(GLOO | NCCL) | SECONDS(300)) {
    accumulate_all(16, 0);
}
TEST(long_fully_shard_training, gradient_accumulation, SECONDS(300) | NIGHT) {
    accumulate_all(32, 1);
}

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
    {"hsdp, sync every, raf int", 2, 2, EVERY, 0, 24, 12, 12},
    {"hsdp, sync every, raf false", 2, NEVER, EVERY, 0, 12, 12, 12},
    {"hsdp, sync every, raf default", 2, 0, EVERY, 0, 21, 12, 12},
    {"hsdp, sync last", 2, ALWAYS, ALL_UNITS, 0, 24, 4, 4},
    {"hsdp, sync last, raf false", 2, NEVER, ALL_UNITS, 0, 12, 4, 4},
    {"hsdp, sync last, kept", 2, ALWAYS, ALL_UNITS, 1, 16, 4, 4},
    {"hsdp, sync last, kept, raf false", 2, NEVER, ALL_UNITS, 1, 4, 4, 4},
    {"hsdp, all-reduce last", 2, ALWAYS, ALL_UNITS | PARTIAL, 0, 24, 12, 4},
    {"hsdp, all-reduce last, raf false", 2, NEVER, ALL_UNITS | PARTIAL, 0, 12, 12, 4},
};

/* Between microbatches: gathered parameters, full gradients, sums of the shard group. */
static void accumulate_kept(fs_run *x, int it, int m) {
    const accumulation *a = (const accumulation *)x->c->user;
    const int between = m < x->c->micros - 1;
    (void)it;
    for (int u = 0; u < x->net->count; u++) {
        fsdp_memory now = FSDP_ZERO;
        CHECK_OK(fsdp_unit_memory(x->unit[u], &now));
        CHECK_EQ_INT(now.pool_slots[FSDP_POOL_GATHER], between && a->keep);
        CHECK_EQ_INT(now.pool_slots[FSDP_POOL_GRAD] + now.pool_slots[FSDP_POOL_REDUCE_IN],
                     between && a->sync == ALL_UNITS);
        CHECK_EQ_INT(now.pool_slots[FSDP_POOL_REDUCE_OUT],
                     between && a->sync == (ALL_UNITS | PARTIAL));
    }
}

/* PyTorch: none. Own: the table "How many collectives" of docs/parity.md in whole trainings, with
   the column "kept". */
TEST_P(fully_shard_training, gradient_accumulation_counts, modes, SLOW) {
    static fs_net net;
    accumulation a = *row;
    linear_and_mlps(&net, 8);
    for (int lanes = 0; lanes < 3; lanes++) {
        fs_conf c = fs_conf_of(&net, row->replicas, 2);
        c.name = row->name, c.raf = row->raf, c.micros = 3, c.iters = 2, c.lanes = lanes;
        c.before = accumulate_before, c.end = accumulate_count, c.user = &a;
        c.after = accumulate_kept;
        fs_train(&c);
    }
}

/* PyTorch: test_fully_shard_training.py test_1f1b_microbatching. Done: PyTorch's order and one
   more. Adam (PyTorch: AdamW). */
TEST(fully_shard_training, 1f1b_microbatching) { microbatching(FS_SHARD); }

/* ---- with other parallelism ------------------------------------------------------------------ */

/* (pp, dp, tp): the pipelines train identically, each on its own (dp, tp) slice. */
/* PyTorch: test_fully_shard_training.py test_2d_mlp_with_nd_mesh. Done: units of
   fsdp_tp_fully_shard; the row biases are one unit, which tp replicates (PyTorch: in the unit of
   their MLP). */
TEST(fully_shard_training, 2d_mlp_with_nd_mesh, SECONDS(120) | SLOW | AT_NIGHT(GLOO | NCCL)) {
    static parallel p = {.ndim = 3,
                         .shape = {2, 2, 2},
                         .first = 1,
                         .shard = 1,
                         .replicate = -1,
                         .names = {"pp", "dp", "tp"}};
    train_tp_and_compare(&p);
}

/* PyTorch: test_fully_shard_training.py test_3d_mlp_with_nd_mesh. Done: as 2d_mlp_with_nd_mesh,
   with (dp_replicate, dp_shard, tp). */
TEST(fully_shard_training, 3d, SECONDS(120) | SLOW | AT_NIGHT(GLOO | NCCL)) {
    static parallel p = {.ndim = 3,
                         .shape = {2, 2, 2},
                         .shard = 1,
                         .replicate = 0,
                         .names = {"dp_replicate", "dp_shard", "tp"}};
    train_tp_and_compare(&p);
}

/* An MLP that tp cuts, and a mixture of two experts; row n of a batch goes to expert n % 2. The
   experts' weights are one stacked parameter of the copy; a rank holds that of its place in the mesh
   ep. Two meshes of the same ranks: (dp_replicate, dp_shard, tp), and with dp_shard split into
   (efsdp, ep). */
enum { EP = 2, MOE = 8, MOE_END = 3, MOE_RANKS = 8 };
enum { MOE_SUM, MOE_GATHER, MOE_SCATTER, MOE_SCATTER_BACK };
typedef struct {
    fs_net local[TP];
    int tp;
} moe_case;
typedef struct {
    tp_own dense; /* its ways, also those of tokens */
    bed sparse;
} moe_own;
static int moe_expert(const fs_run *x) { return ((const moe_own *)x->own)->sparse.coord[2]; }

static int64_t moe_global(const fs_run *x, int unit, int p, int64_t element) {
    (void)p;
    return unit == 1 ? element + moe_expert(x) * MOE * MOE : element;
}
static void moe_net(fs_net *net, int experts, int tp, int place) {
    fsdp_range mine;
    CHECK_OK(fsdp_shard_range(2 * MOE, tp, place, &mine));
    fs_net_begin(net, 4, MOE);
    fs_unit_add(net, "dense"), fs_unit_add(net, "experts");
    fs_linear(net, 0, MOE, mine.count);
    fs_relu(net);
    fs_layer_add(net, FS_UNEMBED, 0, fs_param_add(net, 0, MOE, mine.count, 0), mine.count, MOE);
    fs_param_add(net, 1, experts * MOE, MOE, 0);
    net->wide = EP * MOE; /* room for the rows of all ranks of ep */
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

/* in -> out [batch][MOE]. On a rank: `all` becomes the rows of all ranks of ep, of which its expert
   takes its own; the outputs are addends. With dy: its gradient, and that of the input. */
static void moe_run(fs_run *x, const double *in, double *all, const double *dy, double *out,
                    double *dw) {
    const int64_t mine = x->net->batch * MOE, ranks = x->model ? EP : 1;
    const double *w = fs_data(x, 1, 0);
    double part[EP * 4 * MOE], dall[EP * 4 * MOE];
    memset(part, 0, sizeof part);
    CHECK(mine * EP == (int64_t)COUNT(part));
    if (!x->model) memcpy(dy ? dall : all, dy ? dy : in, (size_t)mine * sizeof *all);
    else tp_move(x, MOE_GATHER, dy ? dall : all, EP * mine, dy ? dy : in, mine);
    for (int64_t n = 0; n < x->net->batch * ranks; n++) {
        const int64_t e = n % x->net->batch % EP, at = x->model ? 0 : e * MOE * MOE;
        if (x->model && e != moe_expert(x)) continue;
        if (dy) moe_rows_back(w + at, all + n * MOE, dall + n * MOE, dw + at, part + n * MOE);
        else moe_rows(w + at, all + n * MOE, part + n * MOE);
    }
    if (!x->model) memcpy(out, part, (size_t)mine * sizeof *out);
    else tp_move(x, dy ? MOE_SCATTER_BACK : MOE_SCATTER, out, mine, part, EP * mine);
}

static double moe_micro(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    const int64_t count = x->net->batch * MOE;
    double *all = x->tape[1].in[0], *out = x->tape[1].in[1], *dy = x->tape[1].in[2], loss = 0;
    double dw[EP * MOE * MOE];
    (void)it, (void)m;
    fs_feed(x, t);
    fs_pre_forward(x, 0);
    fs_layers_forward(x, t, 0, 0, MOE_END);
    tp_sum(x, MOE_SUM, t->in[MOE_END]);
    fs_post_forward(x, 0);
    fs_pre_forward(x, 1);
    moe_run(x, t->in[MOE_END], all, NULL, out, NULL);
    fs_post_forward(x, 1);
    for (int64_t i = 0; i < count; i++) {
        double off = out[i] - x->target[i];
        loss += off * off / (double)count;
        dy[i] = 2 * off / (double)count;
    }
    fs_pre_backward(x, 1);
    memset(dw, 0, sizeof dw);
    moe_run(x, NULL, all, dy, x->dx, dw);
    fs_add_grad(x, 1, 0, dw);
    fs_post_backward(x, 1);
    fs_pre_backward(x, 0);
    fs_layers_backward(x, t, 0, MOE_END);
    fs_post_backward(x, 0);
    return loss;
}

static void moe_locate(fs_run *x) {
    static const char *const names[3] = {"dp_replicate", "dp_shard", "tp"};
    static const char *const split[2] = {"efsdp", "ep"};
    const moe_case *c = (const moe_case *)x->c->user;
    const int32_t shape[3] = {x->c->replicas, x->c->shards, c->tp};
    moe_own *own = (moe_own *)lab_zeros(1, sizeof *own);
    fsdp_mesh *sparse;
    x->mesh = lab_mesh(x->world, 3, shape, names, NULL);
    CALL(x->world, fsdp_mesh_unflatten(x->mesh, 1, x->c->shards / EP, split, &sparse));
    bed_locate(&own->dense.on, x->world, x->mesh);
    bed_locate(&own->sparse, x->world, sparse);
    CALL(x->world, fsdp_mesh_info_init(x->mesh, FSDP_MESH_INFO_HSDP, 1, 0, &x->info));
    x->rank = own->dense.on.coord[0] * x->c->shards + own->dense.on.coord[1];
    x->net = &c->local[own->dense.on.coord[2]], x->global = moe_global;
    x->own = own;
}
/* Dense parameters over dp_shard and tp, experts over efsdp alone; the replicas hold both. */
static void moe_make(fs_run *x) {
    const int32_t dims[2] = {0, 1};
    moe_own *own = (moe_own *)x->own;
    bed *on = &own->dense.on, *sparse = &own->sparse;
    fsdp_mesh *mine;
    on->model = sparse->model = x->model;
    bed_renew(on), bed_renew(sparse);
    x->dm = on->dm;
    tp_make_unit(x, 0, tp_cuts, x->net->units[0].raf);
    CALL(x->world, fsdp_mesh_slice(sparse->mesh, dims, 2, &mine));
    fs_make_unit(x, 1, mine);
    fsdp_redistribution **way = own->dense.way;
    const fsdp_spec rows = tp_rows(x, sparse, 2, FSDP_SHARD),
                    all = tp_rows(x, sparse, 2, FSDP_REPLICATE),
                    adds = tp_rows(x, sparse, 2, FSDP_PARTIAL);
    way[MOE_SUM] = tp_way(x, on, "dense out", tp_rows(x, on, 2, FSDP_PARTIAL),
                          tp_rows(x, on, 2, FSDP_REPLICATE));
    way[MOE_GATHER] = tp_way(x, sparse, "tokens to experts", rows, all);
    way[MOE_SCATTER] = tp_way(x, sparse, "tokens from experts", adds, rows);
    CALL(x->world,
         fsdp_redistribution_create_backward(way[MOE_GATHER], &adds, &way[MOE_SCATTER_BACK]));
    tp_alloc(x, sparse, EP * x->net->batch * MOE);
}
/* The gathered expert is its part of the stack; it -1: before the first iteration. */
static void moe_gathered(fs_run *x, int it) {
    const fs_param *experts = &x->whole->units[1].params[0];
    float full[2 * MOE * MOE];
    for (int p = 0; p < 4; p++) {
        const int unit = p == 3;
        const fs_param *q = unit ? experts : &x->whole->units[0].params[p];
        CALL(x->world, fsdp_tp_param_full(x->dm, x->unit[unit], unit ? 0 : p, 0, full));
        for (int64_t i = 0; i < (unit ? MOE * MOE : q->numel); i++) {
            const int64_t e = moe_global(x, unit, 0, i);
            const double want = it < 0 ? fs_initial(x->whole, unit, unit ? 0 : p, e)
                                       : x->story->param[it][q->at + e];
            if (it < 0) CHECK(lab_same((double)full[i], want));
            else fs_check_near(x, "gathered", unit, unit ? 0 : p, e, (double)full[i], want);
        }
    }
    if (it + 1 < x->c->iters) return;
    free(x->own);
    x->own = NULL, x->global = NULL;
}
/* A sum over ep, and an average over dp and ep together. */
static void moe_divide(fs_run *x) {
    CALL(x->world, fsdp_set_gradient_divide_factor(x->model, x->unit[1], x->size));
    moe_gathered(x, -1);
}

/* PyTorch: test_fully_shard_training.py test_shard_placement_fn_tp_ep. Partly: an MLP and two
   experts, in units of their own (PyTorch: one call with a mesh for each parameter). With the
   divide factor of the ranks that have data, the experts' gradient is the mean over them (PyTorch:
   the sum over ep, the mean over the rest). No transformer. */
TEST(fully_shard_training, shard_placement_fn_tp_ep, SECONDS(120) | NO(NCCL)) {
    static fs_net net;
    static moe_case m;
    moe_net(&net, EP, 1, 0);
    for (int k = 0; k < 24; k++) { /* reshard of non-expert units: always, never, 2 */
        const int replicas = k & 2 ? 2 : 1;
        m.tp = k & 4 ? TP : 1;
        const int shards = MOE_RANKS / m.tp / replicas;
        if (reshards[k / 8] == 2 && shards == 2) continue; /* that is always */
        for (int place = 0; place < m.tp; place++) {
            moe_net(&m.local[place], 1, m.tp, place);
            m.local[place].units[0].raf = reshards[k / 8];
            m.local[place].units[1].params[0].shard_dim = k & 1;
        }
        fs_conf c = fs_conf_of(&net, replicas, shards);
        c.threads = MOE_RANKS, c.locate = moe_locate, c.user = &m;
        c.make = moe_make, c.build = moe_divide, c.micro = moe_micro, c.end = moe_gathered;
        c.iters = 5, c.rtol = 1e-5, c.atol = 1e-6;
        fs_train(&c);
    }
}

/* ---- the rest -------------------------------------------------------------------------------- */

/* A norm and three MLPs, the middle one wider. */
static void norm_and_mlps(fs_net *net, int64_t d) {
    fs_net_begin(net, 8, d);
    net->seed += 5; /* with dim 3 relus may be dead from the start */
    fs_norm(net, fs_unit_add(net, "norm"), d);
    for (int i = 0; i < 3; i++) fs_mlp(net, fs_unit_add(net, "mlp"), d, i == 1 ? 4 : 3);
}

/* Offload, recompute, reshard: all of them together, or half. */
static void hsdp(int all) {
    static const int64_t dims[] = {3, 16, 17};
    static fs_net net;
    for (size_t i = 0; i < COUNT(dims); i++)
        for (int last = 0; last < 2; last++) {
            norm_and_mlps(&net, dims[i]);
            fs_conf c = fs_conf_of(&net, 2, 2);
            c.iters = 5, c.micros = 3, c.before = last ? sync_last : NULL, c.keep_grads = last;
            c.zero_in_place = !last;
            fs_story *s = fs_tell(&c);
            for (int k = 0; k < 8; k++) {
                c.offload = k & 1, c.ac = k >> 1 & 1, c.raf = k & 4 ? NEVER : ALWAYS;
                if (!all && (c.offload + c.ac + k / 4) % 2 != last) continue;
                c.lanes = (int)((size_t)(k + k / 3) + i) % 3;
                fs_train_and_compare(&c, s);
            }
            fs_story_free(s, &c);
        }
}
/* PyTorch: test_fully_shard_training.py test_train_parity_hsdp. Done: gradients are dropped,
   zeroed, or kept over two steps. Half of the combinations; the long_ test has all. */
TEST(fully_shard_training, train_parity_hsdp, SLOW) { hsdp(0); }
TEST(long_fully_shard_training, train_parity_hsdp, NIGHT) { hsdp(1); }

/* A and C replicate, B shards, and is open around A, as PyTorch's B is around C. */
enum { DDP_A, FSDP_B, DDP_C };
static double b_around_a(fs_run *x, int it, int m) {
    fs_tape *t = &x->tape[0];
    (void)it, (void)m;
    fs_feed(x, t);
    fs_pre_forward(x, FSDP_B);
    module_forward(x, t, DDP_A, FSDP_B);
    fs_layers_forward(x, t, FSDP_B, FSDP_B, DDP_C);
    fs_post_forward(x, FSDP_B);
    module_forward(x, t, DDP_C, DDP_C + 1);
    double loss = fs_loss(x, t, 1);
    module_backward(x, t, DDP_C, DDP_C + 1);
    fs_pre_backward(x, FSDP_B);
    fs_layers_backward(x, t, FSDP_B, DDP_C);
    module_backward(x, t, DDP_A, FSDP_B);
    fs_post_backward(x, FSDP_B);
    return loss;
}
static void two_replicate(fs_run *x) {
    const int32_t size = x->size;
    fsdp_mesh_info ddp;
    x->other = lab_mesh(x->world, 1, &size, NULL, NULL);
    CALL(x->world, fsdp_mesh_info_init(x->other, FSDP_MESH_INFO_DDP, -1, 0, &ddp));
    for (int u = DDP_A; u <= DDP_C; u++) fs_make_unit_on(x, u, NULL, u == FSDP_B ? NULL : &ddp);
    for (int u = DDP_A; u <= DDP_C; u++) {
        const fsdp_param_view v = lab_view(x->world, x->unit[u], 0);
        CHECK_EQ_INT(v.numel, lab_full_numel(&v) / (u == FSDP_B ? size : 1));
    }
}
/* PyTorch: test_fully_shard_ignore_params.py test_ddp_A_fsdp_B_ddp_C. Done: A and C are units that
   replicate (PyTorch: modules of DDP, whose parameters FSDP ignores). */
TEST(fully_shard_ignore_params, ddp_A_fsdp_B_ddp_C) {
    static const char *const names[] = {"A", "B", "C"};
    static fs_net net;
    fs_net_begin(&net, 4, 8);
    for (int u = DDP_A; u <= DDP_C; u++) fs_linear(&net, fs_unit_add(&net, names[u]), 8, 8);
    fs_conf c = fs_conf_of(&net, 1, 2);
    c.make = two_replicate, c.micro = b_around_a;
    fs_train(&c);
}

/* PyTorch: test_fully_shard_training.py test_register_fsdp_forward_method. Not applicable: there is
   no forward: hooks are calls that any function may make. The test uses the first half of a unit.
   */
TEST(fully_shard_training, register_fsdp_forward_method) { forward_method(FS_SHARD); }

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
        fs_make_optim(x[k]);
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
/* PyTorch: test_fully_shard_training.py test_share_comm_context. Done: all models of a world share
   its streams; fully_shard_overlap.share_comm_context counts them. Nothing here corresponds to
   PyTorch's "no event of a reduction is left". */
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
    keep_param_bits(x, it);
    for (int kind = FSDP_OP_ALL_GATHER; kind <= FSDP_OP_BROADCAST; kind++)
        CHECK_EQ_INT(fs_calls(x, kind), 0);
}

/* Whatever the mesh and the reshard, the bits are the same. */
/* PyTorch: test_fully_shard_training.py test_train_parity_single_worldsize1. Done: no collective;
   the same bits on a 1-D mesh and on (1, 1). */
TEST(fully_shard_training, worldsize1) {
    static fs_net net;
    chunked *h = (chunked *)lab_shared(3 * sizeof *h);
    for (int n = 0; n < 4; n++) { /* PyTorch's three groups of two linears, and a net of blocks */
        if (n < 3) two_linears(&net, linears[n][0], linears[n][1], linears[n][2]);
        else fs_transformer(&net, 3, 8, 8, 1);
        fs_conf c = fs_conf_of(&net, 1, 1);
        fs_story *s = fs_tell(&c);
        memset(h, 0, 3 * sizeof *h);
        for (int k = 0; k < 3; k++) {
            c.raf = k - 1, c.mesh_2d = k == 1, c.user = &h[k];
            c.after = keep_grad_bits, c.end = nothing_was_said;
            fs_train_and_compare(&c, s);
            CHECK_EQ_MEM(h[k].bits, h[0].bits, sizeof h[k].bits);
            CHECK(h[k].bits[FS_ITERS - 1][0] != 0);
        }
        fs_story_free(s, &c);
    }
}
