/* test_fully_shard_mixed_precision.c - upstream's test_fully_shard_mixed_precision by name, and the
   table of dtypes row by row: in which dtype parameters are gathered, gradients arrive, are added
   up, are reduced and are kept, and what the numbers come to. The copy rounds where each dtype
   says.

   Most tests train ten iterations, with Adam where all parameters are stored in f32, else with SGD,
   and compare losses, gradients and parameters.

   SPDX-License-Identifier: MIT */
#define TAGS SLOW | AT_NIGHT(ASAN | GLOO | NCCL)
#include "harness.h"
#include "lab.h"
#include "fully_shard.h"
#include "trainings.h"

/* ---- which dtypes are used ------------------------------------------------------------------- */

/* fsdp2-core.md 3.5. "any" is said by the dtype itself: that of the gradients that arrive. */
static const dtypes table[] = {
    {"f32", F32, 0, 0, 0, F32, F32, F32, F32, F32},
    {"f32_bf16", F32, 0, BF16, 0, BF16, BF16, F32, F32, F32},
    {"f32_f16", F32, 0, F16, 0, F16, F16, F32, F32, F32},
    {"f32_bf16_f32", F32, 0, BF16, F32, BF16, BF16, F32, F32, F32},
    {"f32_bf16_bf16", F32, 0, BF16, BF16, BF16, BF16, BF16, BF16, F32},
    {"f32_none_bf16", F32, 0, 0, BF16, F32, F32, BF16, BF16, F32},
    {"bf16_bf16_bf16", BF16, 0, BF16, BF16, BF16, BF16, BF16, BF16, BF16},
    {"bf16", BF16, 0, 0, 0, BF16, BF16, BF16, BF16, BF16},
    {"bf16_bf16_f32", BF16, 0, BF16, F32, BF16, BF16, F32, F32, BF16},
    {"bf16_grad_f32", BF16, F32, 0, 0, BF16, BF16, F32, F32, F32},
    {"f32_grad_any_bf16", F32, BF16, BF16, 0, BF16, BF16, BF16, BF16, BF16},
    /* beyond upstream's table */
    {"f32_f16_f16", F32, 0, F16, F16, F16, F16, F16, F16, F32},
    {"f64", F64, 0, 0, 0, F64, F64, F64, F64, F64},
    {"f64_f32", F64, 0, F32, 0, F32, F32, F64, F64, F64},
    {"f32_f64_f64", F32, 0, F64, F64, F64, F64, F64, F64, F32},
};

/* Two microbatches, the second is reduced; dtypes of every operation, and the numbers. */
/* PyTorch: none. Own: the table "Dtypes" of docs/parity.md, row by row: the dtype of gathers, of
   accumulation, of the reduction and between microbatches, and the numbers. */
TEST_P(fully_shard_mixed_precision, dtypes, table) {
    static const int meshes[][2] = {{1, 2}, {1, 3}, {2, 2}};
    static fs_net net;
    mlps(&net, 8);
    for (size_t k = 0; k < COUNT(meshes); k++) {
        fs_conf c = conf_of(row, &net, meshes[k][0], meshes[k][1]);
        c.before = sync_last, c.micros = 2, c.build = fs_watch, c.after = check_dtypes;
        fs_story *s = fs_tell(&c);
        for (int plain = 0; plain < 2; plain++)
            for (int direct = 0; direct < 2; direct++) {
                c.plain = plain, c.direct_min = direct;
                fs_train_and_compare(&c, s);
            }
        fs_story_free(s, &c);
    }
}

/* Meshes that gather nothing: one rank, and replicas without shards. */
/* PyTorch: none. Own: only the numbers, on meshes that gather nothing. */
TEST_P(fully_shard_mixed_precision, dtypes_one_shard, table) {
    static fs_net net;
    mlps(&net, 8);
    for (int replicas = 1; replicas <= 2; replicas++) {
        fs_conf c = conf_of(row, &net, replicas, 1);
        c.before = sync_last, c.micros = 2;
        fs_train(&c);
    }
}

/* An integer parameter is frozen and gathered as it is; with others it makes the gather one of
   bytes. It has no gradient and is not reduced. */
static void with_integers(lab_rank *r) {
    for (int mixed = 0; mixed < 2; mixed++) {
        fsdp_param_desc p[2] = {fsdp_mat("codes", 6, 4), fsdp_mat("w", 5, 3)};
        fsdp_model_desc md = FSDP_ZERO;
        const int size = r->size;
        fs_run x;
        int8_t codes[24];
        memset(&x, 0, sizeof x);
        md.param_dtype = BF16;
        x.world = r->w = lab_world(r, mixed, 0, NULL), x.model = lab_model(r->w, &md);
        p[0].dtype = FSDP_I8, p[0].frozen = 1;
        x.unit[0] = lab_unit(r->w, x.model, NULL, p, 1 + mixed);
        for (int i = 0; i < 24; i++) codes[i] = (int8_t)(5 * i - 60);
        CALL(x.world, fsdp_param_load(x.unit[0], 0, codes));
        fs_watch(&x);
        CALL(x.world, fsdp_pre_forward(x.unit[0]));
        CHECK_EQ_MEM(fsdp_data(x.unit[0], 0), codes, sizeof codes);
        const fsdp_op *gather = fs_find(&x, FSDP_OP_ALL_GATHER, -1, 0);
        CHECK(gather != NULL);
        CHECK_EQ_INT(gather->dtype, mixed ? FSDP_U8 : FSDP_I8);
        /* padded rows of a rank: of codes, and of w in bf16 */
        CHECK_EQ_INT(gather->count,
                     (6 + size - 1) / size * 4 + mixed * 2 * ((5 + size - 1) / size) * 3);
        CALL(x.world, fsdp_post_forward(x.unit[0]));
        CALL(x.world, fsdp_pre_backward(x.unit[0]));
        CHECK(!fsdp_grad(x.unit[0], 0));
        if (mixed) CHECK(fsdp_grad(x.unit[0], 1) != NULL);
        CALL(x.world, fsdp_post_backward(x.unit[0]));
        CALL(x.world, fsdp_finalize_backward(x.model));
        CHECK(!lab_view(x.world, x.unit[0], 0).shard_grad);
        const fsdp_op *sum = fs_find(&x, FSDP_OP_REDUCE_SCATTER, -1, 0);
        CHECK_EQ_INT(sum != NULL, mixed);
        /* padded rows of w */
        if (sum) CHECK_EQ_INT(sum->count, (5 + size - 1) / size * 3);
        lab_end(r);
        free(x.log.ops);
    }
}

/* PyTorch: none. Own: the dtype, size and bytes of a gather of frozen integers. */
TEST(fully_shard_mixed_precision, dtypes_int8_frozen) {
    lab_how how = FSDP_ZERO;
    how.bare = 1;
    for (int size = 2; size <= 4; size++) lab_run(size, &how, with_integers, NULL);
}

/* ---- casts are part of the copies ------------------------------------------------------------ */

static void count_copies(fs_run *x, int it, int m) {
    int packed = x->c->direct_min == FSDP_DIRECT_NEVER, cast = x->c->param != 0;
    int fused = !x->c->plain && x->c->reduce != BF16, copies = 0;
    int widened = (cast ? BF16 : F32) != x->c->reduce && !fused;
    (void)it, (void)m;
    for (int u = 0; u < x->net->count; u++) {
        int gathers = fs_seen(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, u);
        int in = fs_seen(x, FSDP_OP_COPY, FSDP_LABEL_COPY_IN, u);
        int out = fs_seen(x, FSDP_OP_COPY, FSDP_LABEL_COPY_OUT, u);
        int acc = fs_seen(x, FSDP_OP_COPY, FSDP_LABEL_ACC, u);
        int red_out = fs_seen(x, FSDP_OP_COPY, FSDP_LABEL_RED_OUT, u);
        CHECK(gathers == 1 || gathers == 2);
        CHECK_EQ_INT(in, cast ? gathers : 0);
        CHECK_EQ_INT(out, packed ? gathers : 0);
        CHECK_EQ_INT(acc, packed || widened ? 1 : 0);
        CHECK_EQ_INT(red_out, fused ? 0 : 1);
        copies += in + out + acc + red_out;
        if (!in) continue;
        const fsdp_op *op = fs_find(x, FSDP_OP_COPY, FSDP_LABEL_COPY_IN, u);
        CHECK_EQ_INT(op->dtype, F32); /* straight from the shard to the slot */
        CHECK_EQ_INT(op->out_dtype, x->c->param);
    }
    CHECK_EQ_INT(fs_seen(x, FSDP_OP_COPY, -1, -1), copies); /* and no other */
    fs_watch(x);
}

/* PyTorch: none. Own: a gather has one copy before it if it casts, one after it if it is packed; a
   reduction at most one before and one after it. */
TEST(fully_shard_mixed_precision, casts_are_fused_into_copies, NO(NCCL)) {
    static fs_net net;
    mlps(&net, 32); /* shards that are whole cells, else none is direct */
    for (int k = 0; k < 16; k++) {
        fs_conf c = fs_conf_of(&net, 1, 2);
        c.param = k & 1 ? BF16 : 0, c.reduce = k & 2 ? BF16 : F32;
        c.direct_min = k & 4 ? FSDP_DIRECT_NEVER : 1;
        c.plain = k >> 3, c.iters = 2, c.build = fs_watch, c.after = count_copies;
        fs_train(&c);
    }
}

/* ---- upstream's tests ------------------------------------------------------------------------ */

/* PyTorch: test_fully_shard_mixed_precision.py test_compute_dtype. Done: the reduction runs in the
   original dtype, as in 2.15. */
TEST(fully_shard_mixed_precision, compute_dtype) {
    static const dtypes both[] = {{"bf16", F32, 0, BF16, 0, BF16, BF16, F32, F32, F32},
                                  {"f16", F32, 0, F16, 0, F16, F16, F32, F32, F32}};
    for (size_t i = 0; i < COUNT(both); i++) {
        by_dtypes(FS_SHARD, &both[i], 1, 2, 1);
        by_dtypes(FS_SHARD, &both[i], 1, 4, 1);
        by_dtypes(FS_SHARD, &both[i], 2, 2, 1);
    }
}

/* PyTorch: test_fully_shard_mixed_precision.py test_reduce_dtype. Done: also (f16, f16). */
TEST(fully_shard_mixed_precision, reduce_dtype) {
    static const dtypes all[] = {{"bf16, f32", F32, 0, BF16, F32, BF16, BF16, F32, F32, F32},
                                 {"f32, bf16", F32, 0, F32, BF16, F32, F32, BF16, BF16, F32},
                                 {"f16, f16", F32, 0, F16, F16, F16, F16, F16, F16, F32}};
    for (size_t i = 0; i < COUNT(all); i++) {
        by_dtypes(FS_SHARD, &all[i], 1, 2, 1);
        by_dtypes(FS_SHARD, &all[i], 1, 4, 1);
        by_dtypes(FS_SHARD, &all[i], 2, 2, 1);
    }
}

/* No gradients before the last microbatch: the copy has none. */
/* PyTorch: test_fully_shard_mixed_precision.py test_grad_acc_with_reduce_dtype. Done: compared
   after each of 4 microbatches. */
TEST(fully_shard_mixed_precision, grad_acc_with_reduce_dtype) {
    static const dtypes d = {"bf16, f32", F32, 0, BF16, F32, BF16, BF16, F32, F32, F32};
    by_dtypes(FS_SHARD, &d, 1, 2, 4);
    by_dtypes(FS_SHARD, &d, 1, 4, 4);
    by_dtypes(FS_SHARD, &d, 2, 2, 4);
}

/* The sums over the shards wait for an all-reduce, in the reduce dtype. */
static void all_reduce_last(fs_run *x, int it, int m) {
    (void)it;
    fs_set_all_reduce(x, -1, m == x->c->micros - 1);
}
/* PyTorch: none. Own: HSDP with the all-reduce in the last microbatch: each partial sum is rounded
   to the reduce dtype. The test reads no dtype of an op. */
TEST_P(fully_shard_mixed_precision, partial_sums, table) {
    static fs_net net;
    mlps(&net, 8);
    fs_conf c = conf_of(row, &net, 2, 2);
    c.before = all_reduce_last, c.micros = 3;
    fs_story *s = fs_tell(&c);
    for (int plain = 0; plain < 2; plain++) {
        c.plain = plain;
        fs_train_and_compare(&c, s);
    }
    fs_story_free(s, &c);
}

static const dtypes wide_grads[] = {
    {"bf16, gradients f32", BF16, F32, 0, 0, BF16, BF16, F32, F32, F32},
    {"bf16, reduced in bf16", BF16, F32, 0, BF16, BF16, BF16, BF16, BF16, F32},
    {"f32, gradients bf16", F32, BF16, BF16, 0, BF16, BF16, BF16, BF16, BF16}};

/* PyTorch: test_fully_shard_mixed_precision.py test_grad_dtype_preserved. Done: one grad_dtype for
   the model (PyTorch: for each parameter). */
TEST(fully_shard_mixed_precision, grad_dtype_preserved) {
    for (size_t i = 0; i < COUNT(wide_grads); i++) by_dtypes(FS_SHARD, &wide_grads[i], 1, 2, 1);
}

/* PyTorch: test_fully_shard_mixed_precision.py test_grad_dtype_preserved_grad_acc. Done: 4
   microbatches. */
TEST(fully_shard_mixed_precision, grad_dtype_preserved_grad_acc) {
    for (size_t i = 0; i < COUNT(wide_grads); i++) by_dtypes(FS_SHARD, &wide_grads[i], 1, 2, 4);
}

/* A single device adds up in f64. */
/* PyTorch: test_fully_shard_mixed_precision.py test_grad_dtype_preserved_numerics. Done: compared
   with sums in f64: absolute 1e-4, relative 8e-3. */
TEST(fully_shard_mixed_precision, grad_dtype_preserved_numerics) {
    static fs_net net;
    mlps(&net, 16);
    fs_conf c = conf_of(&wide_grads[0], &net, 1, 2), single = c;
    single.grad = single.reduce = F64;
    single.micros = c.micros = 3, single.before = c.before = sync_last;
    fs_story *s = fs_tell(&single);
    c.atol = 1e-4, c.rtol = 8e-3;
    fs_train_and_compare(&c, s);
    fs_story_free(s, &c);
}

/* Parameters of one unit in two compute dtypes: reduced in the stored one, which one of them has. */
static void promoted(fs_run *x, int it, int m) {
    (void)it, (void)m;
    for (int u = 0; u < x->net->count; u++) {
        const fsdp_op *sum = fs_find(x, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, u);
        const fsdp_op *gather = fs_find(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, u);
        CHECK(sum && gather);
        CHECK_EQ_INT(sum->dtype, F32);
        CHECK_EQ_INT(gather->dtype, FSDP_U8);
        CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, -1, u), 2);
        CHECK_EQ_INT(fs_seen(x, FSDP_OP_REDUCE_SCATTER, -1, u), 1);
    }
    fs_watch(x);
}

/* PyTorch: test_fully_shard_mixed_precision.py test_grad_dtype_preserved_non_uniform. Partly:
   compute dtypes are mixed in a unit, which gathers bytes. No other gradient dtype for one
   parameter. */
TEST(fully_shard_mixed_precision, grad_dtype_preserved_non_uniform) {
    static fs_net net;
    for (int shards = 2; shards <= 3; shards++) {
        mlps(&net, 8);
        for (int u = 0; u < net.count; u++)
            for (int p = 0; p < net.units[u].count; p++) net.units[u].params[p].keep_dtype = p % 2;
        fs_conf c = fs_conf_of(&net, 1, shards);
        c.param = BF16, c.raf = ALWAYS, c.iters = 5, c.build = fs_watch, c.after = promoted;
        fs_train(&c);
    }
}

/* PyTorch: test_fully_shard_mixed_precision.py test_structured_input_output. Done: you call
   fsdp_cast_forward_input for each member of a struct. Integers pass. */
TEST(fully_shard_mixed_precision, structured_input_output) { structured(FS_SHARD); }

/* PyTorch: test_fully_shard_mixed_precision.py test_float16_on_one_submodule. Done: 3 iterations
   (PyTorch: one forward and backward). */
TEST(fully_shard_mixed_precision, float16_on_one_submodule) { one_in_f16(FS_SHARD); }

/* PyTorch: test_fully_shard_mixed_precision.py test_submodules_with_external_inputs. Done: 3
   iterations (PyTorch: one forward and backward). */
TEST(fully_shard_mixed_precision, submodules_with_external_inputs) {
    with_external_inputs(FS_SHARD);
}

/* PyTorch: test_fully_shard_mixed_precision.py test_norm_modules_bf16, test_norm_modules_fp16.
   Partly: a layer norm under the policy, and under its own. No batch norms: their buffers are
   yours. */
TEST(fully_shard_mixed_precision, norm_modules_bf16) { norms(FS_SHARD, BF16); }
TEST(fully_shard_mixed_precision, norm_modules_fp16) { norms(FS_SHARD, F16); }

/* An activation checkpoint recomputes a linear in its backward: the casts of its input, or of its
   output, are the same as in forward. */
static double recomputed_casts(fs_run *x, int it, int m) {
    const int outputs = *(const int *)x->c->user;
    fs_tape *t = &x->tape[0], *again = &x->tape[1];
    (void)it, (void)m;
    for (int k = 0; k < 2; k++) { /* the input is that of the checkpoint both times */
        fs_feed(x, k ? again : t);
        if (!outputs) continue;
        for (int64_t i = 0; i < x->net->batch; i++)
            (k ? again : t)->in[0][i] = lab_round(BF16, t->in[0][i]);
        (k ? again : t)->dtype[0] = BF16;
    }
    fs_group_forward(x, t, 0, 0, 1);
    double loss = fs_loss(x, t, 1);
    fs_pre_backward(x, 0);
    fs_group_forward(x, again, 0, 0, 1);
    for (int k = 0; k < 2; k++) {
        CHECK_EQ_INT((k ? again : t)->dtype[0], BF16);
        CHECK_EQ_INT((k ? again : t)->dtype[1], outputs ? F32 : BF16);
    }
    fs_layers_backward(x, again, 0, 1);
    fs_post_backward(x, 0);
    return loss;
}
static void recompute_casts(int outputs) {
    static fs_net net;
    fs_net_begin(&net, 8, 1);
    fs_linear(&net, fs_unit_add(&net, "linear1"), 1, 1);
    net.units[0].keep_inputs = outputs, net.units[0].output = outputs ? F32 : 0;
    fs_conf c = fs_conf_of(&net, 1, 2);
    c.param = c.reduce = BF16, c.micro = recomputed_casts, c.user = &outputs;
    fs_train(&c);
}
/* PyTorch: test_fully_shard_mixed_precision.py test_checkpoint_recompute_casts_forward_inputs,
   test_checkpoint_recompute_casts_outputs. Done: the same dtypes in forward and in the recompute.
   */
TEST(fully_shard_mixed_precision, checkpoint_recompute_casts_forward_inputs) { recompute_casts(0); }
TEST(fully_shard_mixed_precision, checkpoint_recompute_casts_outputs) { recompute_casts(1); }

/* All parameters, integers too, are frozen when the first forward runs, without gradients.
   Parameters that are thawed later are still reduced in the policy's dtype. */
static void thawed_later(lab_rank *r) {
    fsdp_param_desc p[5] = {fsdp_mat("0.weight", 16, 16), fsdp_vec("0.bias", 16),
                            fsdp_mat("1.weight", 16, 16), fsdp_vec("1.bias", 16),
                            fsdp_vec("non_float", 16)};
    fsdp_model_desc md = FSDP_ZERO;
    fs_run x;
    memset(&x, 0, sizeof x);
    md.param_dtype = BF16, md.reduce_dtype = F32;
    for (int i = 0; i < 5; i++) p[i].frozen = 1;
    p[4].dtype = FSDP_I64;
    x.world = r->w, x.model = lab_model(r->w, &md);
    x.unit[0] = lab_unit(r->w, x.model, NULL, p, 5);
    CALL(x.world, fsdp_set_grad_enabled(x.model, 0));
    lab_forward(x.world, x.unit[0]);
    CALL(x.world, fsdp_set_grad_enabled(x.model, 1));
    for (int i = 0; i < 4; i++) CALL(x.world, fsdp_set_requires_grad(x.unit[0], i, 1));
    fs_watch(&x);
    lab_forward(x.world, x.unit[0]);
    CALL(x.world, fsdp_pre_backward(x.unit[0]));
    CHECK(fsdp_grad(x.unit[0], 4) == NULL);
    for (int i = 0; i < 4; i++) {
        uint16_t *grad = (uint16_t *)fsdp_grad(x.unit[0], i);
        for (int e = 0; e < (i % 2 ? 16 : 256); e++) lab_put(grad, BF16, e, 1 + r->rank / 128.0);
    }
    CALL(x.world, fsdp_post_backward(x.unit[0]));
    CALL(x.world, fsdp_finalize_backward(x.model));
    const fsdp_op *sum = fs_find(&x, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, 0);
    CHECK(sum && sum->out_dtype == F32 && (sum->dtype == F32 || sum->dtype == BF16));
    for (int i = 0; i < 5; i++) {
        fsdp_param_view v = lab_view(x.world, x.unit[0], i);
        CHECK_EQ_INT(v.shard_grad != NULL, i < 4);
        if (v.shard_grad) CHECK_EQ_INT(v.grad_dtype, F32);
        for (int64_t k = 0; v.shard_grad && k < v.numel; k++)
            CHECK_NEAR(((const float *)v.shard_grad)[k], 1 + (r->size - 1) / 256.0, 0); /* f32 */
    }
    free(x.log.ops);
}
/* PyTorch: test_fully_shard_mixed_precision.py test_reduce_dtype_after_frozen_first_forward. Done:
   the test writes the gradients; no losses and no optimizer. */
TEST(fully_shard_mixed_precision, reduce_dtype_after_frozen_first_forward) {
    for (int size = 2; size <= 4; size += 2) lab_run(size, NULL, thawed_later, NULL);
}

/* PyTorch: test_fully_shard_mixed_precision.py test_clamp_reduce_dtype. Done: PyTorch's case is
   made in bf16, then fsdp_model_cast to f32. */
TEST(fully_shard_mixed_precision, clamp_reduce_dtype) { clamp_reduce_dtype(FS_SHARD, 2); }
