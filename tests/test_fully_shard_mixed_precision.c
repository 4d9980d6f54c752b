/* test_fully_shard_mixed_precision.c - upstream's test_fully_shard_mixed_precision by name, and the
   table of dtypes row by row: in which dtype parameters are gathered, gradients arrive, are added
   up, are reduced and are kept, and what the numbers come to. The copy rounds where each dtype
   says.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"
#include "fully_shard.h"

enum { ALWAYS = FSDP_RESHARD_ALWAYS, NEVER = FSDP_RESHARD_NEVER };
enum { F32 = FSDP_F32, F64 = FSDP_F64, F16 = FSDP_F16, BF16 = FSDP_BF16 };
#define COUNT(array) (sizeof(array) / sizeof *(array))
static const int reshards[] = {ALWAYS, NEVER, 2};

/* A linear in the root and three MLPs. */
static void mlps(fs_net *net, int64_t d) {
    fs_net_begin(net, 4, d);
    net->around = 1;
    fs_unit_add(net, "root");
    fs_linear(net, 0, d, d);
    for (int i = 0; i < 3; i++) fs_mlp(net, fs_unit_add(net, "mlp"), d, 2);
}
static void sync_last(fs_run *x, int it, int m) {
    (void)it;
    fs_set_sync(x, -1, m == x->c->micros - 1);
}

/* As upstream's: what forward does not reshard, backward reshards in the last microbatch only. */
static void sync_and_reshard_last(fs_run *x, int it, int m) {
    sync_last(x, it, m);
    if (x->model && x->c->raf == NEVER)
        CALL(x->world, fsdp_set_reshard_after_backward(x->model, NULL, m == x->c->micros - 1));
}

/* ---- which dtypes are used ------------------------------------------------------------------- */

typedef struct {
    const char *name;
    int stored, grad, param, reduce;             /* 0: not said */
    int gathered, arrives, added, reduced, kept; /* what has to be */
} dtypes;

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

/* Without a reduction the gradients stay as they arrive, or are moved to where they are added. */
static void check_unreduced(fs_run *x, const dtypes *d) {
    for (int u = 0; u < x->net->count; u++) {
        const fsdp_op *acc = fs_find(x, FSDP_OP_COPY, FSDP_LABEL_ACC, u);
        CHECK(!fs_find(x, FSDP_OP_REDUCE_SCATTER, -1, u));
        W_CHECK((acc != NULL) == (d->arrives != d->added), "%s: unit %d: %s", d->name, u,
                acc ? "added elsewhere" : "not added elsewhere");
        if (acc) CHECK_EQ_INT(acc->dtype, d->arrives);
        if (acc) CHECK_EQ_INT(acc->out_dtype, d->added);
    }
}
/* The dtype of the sums. A backend that casts as it reduces reads what has arrived, sums in f32 or
   f64, and may write what is kept; others are given the dtype itself. */
static void check_reduced(fs_run *x, const dtypes *d) {
    int widens = !x->c->plain && (d->reduced == F32 || d->reduced == F64);
    for (int u = 0; u < x->net->count; u++) {
        const fsdp_op *sum = fs_find(x, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, u);
        const fsdp_op *over = fs_find(x, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, u);
        const fsdp_op *out = fs_find(x, FSDP_OP_COPY, FSDP_LABEL_RED_OUT, u);
        CHECK(sum && (over != NULL) == (x->c->replicas > 1));
        CHECK(sum->dtype == d->reduced || (widens && sum->dtype == d->arrives));
        CHECK(sum->out_dtype == d->reduced || (widens && !out && sum->out_dtype == d->kept));
        if (over) CHECK_EQ_INT(over->dtype, d->reduced);
        if (out) CHECK_EQ_INT(out->dtype, d->reduced);
        if (out) CHECK_EQ_INT(out->out_dtype, d->kept);
    }
}
static void check_dtypes(fs_run *x, int it, int m) {
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
    CHECK_EQ_INT(fs_find(x, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, 1) == NULL, kept);
    if (m == x->c->micros - 1) check_reduced(x, d);
    else check_unreduced(x, d);
    fs_watch(x);
}

static fs_conf conf_of(const dtypes *d, const fs_net *net, int replicas, int shards) {
    fs_conf c = fs_conf_of(net, replicas, shards);
    c.name = d->name, c.stored = d->stored, c.grad = d->grad, c.param = d->param;
    c.reduce = d->reduce, c.user = (void *)(uintptr_t)d;
    c.iters = W_SLOW ? 2 : 4;
    return c;
}

/* Two microbatches, the second is reduced; dtypes of every operation, and the numbers. */
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
                fs_train_beside(&c, s);
            }
        fs_story_free(s, &c);
    }
}

/* The same with one rank and with replicas alone: nothing is gathered. */
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
        /* padded rows of w, and its user */
        if (sum) CHECK_EQ_INT(sum->count, (5 + size - 1) / size * 3 + 1);
        lab_end(r);
        free(x.log.ops);
    }
}

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
        int users = fs_seen(x, FSDP_OP_COPY, FSDP_LABEL_USERS, u);
        CHECK(gathers == 1 || gathers == 2);
        CHECK_EQ_INT(in, cast ? gathers : 0);
        CHECK_EQ_INT(out, packed ? gathers : 0);
        CHECK(users <= 1);
        CHECK_EQ_INT(acc, packed || widened ? 1 : 0);
        CHECK_EQ_INT(red_out, fused ? 0 : 1);
        copies += in + out + acc + red_out + users;
        if (!in) continue;
        const fsdp_op *op = fs_find(x, FSDP_OP_COPY, FSDP_LABEL_COPY_IN, u);
        CHECK_EQ_INT(op->dtype, F32); /* straight from the shard to the slot */
        CHECK_EQ_INT(op->out_dtype, x->c->param);
    }
    CHECK_EQ_INT(fs_seen(x, FSDP_OP_COPY, -1, -1), copies); /* and no other */
    fs_watch(x);
}

TEST(fully_shard_mixed_precision, casts_are_fused_into_copies) {
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

/* Sharded by rows; with two ranks and one microbatch also along the largest dim, as upstream's. */
static void by_dtypes(const dtypes *d, int replicas, int shards, int micros) {
    const int by_columns = replicas == 1 && shards == 2 && micros == 1;
    static fs_net net;
    mlps(&net, 16);
    fs_conf c = conf_of(d, &net, replicas, shards);
    c.micros = micros, c.before = micros > 1 ? sync_and_reshard_last : NULL;
    c.iters = W_SLOW ? 3 : FS_ITERS;
    c.build = fs_watch, c.after = check_dtypes;
    fs_story *s = fs_tell(&c);
    for (int columns = 0; columns <= by_columns; columns++) {
        for (int u = 0; u < net.count; u++)
            for (int p = 0; p < net.units[u].count; p++) {
                fs_param *q = &net.units[u].params[p];
                q->shard_dim = columns && q->ndim == 2 && q->shape[1] > q->shape[0];
            }
        for (size_t i = 0; i < COUNT(reshards); i++) {
            c.raf = reshards[i], c.plain = i == 1, c.lanes = (int)i;
            fs_train_beside(&c, s);
        }
    }
    fs_story_free(s, &c);
}

TEST(fully_shard_mixed_precision, compute_dtype) {
    static const dtypes both[] = {{"bf16", F32, 0, BF16, 0, BF16, BF16, F32, F32, F32},
                                  {"f16", F32, 0, F16, 0, F16, F16, F32, F32, F32}};
    for (size_t i = 0; i < COUNT(both); i++) {
        by_dtypes(&both[i], 1, 2, 1);
        by_dtypes(&both[i], 1, 4, 1);
        by_dtypes(&both[i], 2, 2, 1);
    }
}

TEST(fully_shard_mixed_precision, reduce_dtype) {
    static const dtypes all[] = {{"bf16, f32", F32, 0, BF16, F32, BF16, BF16, F32, F32, F32},
                                 {"f32, bf16", F32, 0, F32, BF16, F32, F32, BF16, BF16, F32},
                                 {"f16, f16", F32, 0, F16, F16, F16, F16, F16, F16, F32}};
    for (size_t i = 0; i < COUNT(all); i++) {
        by_dtypes(&all[i], 1, 2, 1);
        by_dtypes(&all[i], 1, 4, 1);
        by_dtypes(&all[i], 2, 2, 1);
    }
}

/* No gradients before the last microbatch: the copy has none. */
TEST(fully_shard_mixed_precision, grad_acc_with_reduce_dtype) {
    static const dtypes d = {"bf16, f32", F32, 0, BF16, F32, BF16, BF16, F32, F32, F32};
    by_dtypes(&d, 1, 2, 4);
    by_dtypes(&d, 1, 4, 4);
    by_dtypes(&d, 2, 2, 4);
}

/* The sums over the shards wait for an all-reduce, in the reduce dtype. */
static void all_reduce_last(fs_run *x, int it, int m) {
    (void)it;
    fs_set_all_reduce(x, -1, m == x->c->micros - 1);
}
TEST_P(fully_shard_mixed_precision, partial_sums, table) {
    static fs_net net;
    mlps(&net, 8);
    fs_conf c = conf_of(row, &net, 2, 2);
    c.before = all_reduce_last, c.micros = 3;
    fs_story *s = fs_tell(&c);
    for (int plain = 0; plain < 2; plain++) {
        c.plain = plain;
        fs_train_beside(&c, s);
    }
    fs_story_free(s, &c);
}

static const dtypes wide_grads[] = {
    {"bf16, gradients f32", BF16, F32, 0, 0, BF16, BF16, F32, F32, F32},
    {"bf16, reduced in bf16", BF16, F32, 0, BF16, BF16, BF16, BF16, BF16, F32},
    {"f32, gradients bf16", F32, BF16, BF16, 0, BF16, BF16, BF16, BF16, BF16}};

TEST(fully_shard_mixed_precision, grad_dtype_preserved) {
    for (size_t i = 0; i < COUNT(wide_grads); i++) by_dtypes(&wide_grads[i], 1, 2, 1);
}

TEST(fully_shard_mixed_precision, grad_dtype_preserved_grad_acc) {
    for (size_t i = 0; i < COUNT(wide_grads); i++) by_dtypes(&wide_grads[i], 1, 2, 4);
}

/* A single device adds up in f64. */
TEST(fully_shard_mixed_precision, grad_dtype_preserved_numerics) {
    static fs_net net;
    mlps(&net, 16);
    fs_conf c = conf_of(&wide_grads[0], &net, 1, 2), single = c;
    single.grad = single.reduce = F64;
    single.micros = c.micros = 3, single.before = c.before = sync_last;
    fs_story *s = fs_tell(&single);
    c.atol = 1e-4, c.rtol = 8e-3;
    fs_train_beside(&c, s);
    fs_story_free(s, &c);
}

/* Parameters of several dtypes in one unit: reduced in the widest, each kept in its own. */
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

TEST(fully_shard_mixed_precision, grad_dtype_preserved_non_uniform) {
    static fs_net net;
    for (int param = 0; param < 2; param++)
        for (int shards = 2; shards <= 3; shards++) {
            mlps(&net, 8);
            for (int u = 0; u < net.count; u++)
                for (int p = 0; p < net.units[u].count; p++) {
                    fs_param *q = &net.units[u].params[p];
                    if (param) q->keep_dtype = p % 2; /* a policy that one parameter is out of */
                    else q->stored = p % 2 ? F32 : BF16;
                }
            fs_conf c = fs_conf_of(&net, 1, shards);
            c.param = param ? BF16 : 0;
            c.raf = ALWAYS, c.iters = 5, c.build = fs_watch, c.after = promoted;
            fs_train(&c);
        }
}

/* Two linears, a unit each. */
static void two_units(fs_net *net, int64_t d) {
    fs_net_begin(net, 2, d);
    fs_linear(net, fs_unit_add(net, "c1"), d, d);
    fs_linear(net, fs_unit_add(net, "c2"), d, d);
}

/* A struct of activations: each floating member is cast, the others pass. */
typedef struct {
    float x[6];
    int32_t ids[4];
    struct {
        float a[3];
        double b[2];
    } pair;
} activations;

static const void *cast(const fs_run *x, const void *src, fsdp_dtype *type, int64_t count) {
    static __thread uint64_t room[8];
    const void *out = fsdp_cast_forward_input(x->unit[0], room, src, type, count);
    CHECK(out == src || out == room);
    return out;
}
static void struct_of_inputs(fs_run *x, int it, int m) {
    activations a;
    fsdp_dtype f32 = F32, f64 = F64, i32 = FSDP_I32, to = x->c->param ? x->c->param : F32;
    double back;
    (void)it, (void)m;
    memset(&a, 0, sizeof a);
    for (int i = 0; i < 6; i++) a.x[i] = 1.0f + (float)i / 1024;
    a.pair.b[0] = 1 + 1.0 / 512;
    const char *out = (const char *)cast(x, a.x, &f32, 6);
    CHECK_EQ_INT(f32, to);
    CHECK((out == (const char *)a.x) == (to == F32)); /* nothing is moved that need not be */
    CHECK_OK(fsdp_convert(&back, F64, out + fsdp_dtype_size(to), to, 1));
    CHECK_NEAR(back, lab_round(to, (double)a.x[1]), 0);
    CHECK(cast(x, a.ids, &i32, 4) == a.ids);
    CHECK_EQ_INT(i32, FSDP_I32);
    out = (const char *)cast(x, a.pair.b, &f64, 2);
    CHECK_EQ_INT(f64, x->c->param ? x->c->param : F64);
    CHECK_OK(fsdp_convert(&back, F64, out, f64, 1));
    CHECK_NEAR(back, lab_round(f64, a.pair.b[0]), 0);
}

/* A struct of two or three activations: each unit's linear is applied to each member, one after the
   other; the outputs are added up. */
static double containers(fs_run *x, int it, int m) {
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

TEST(fully_shard_mixed_precision, structured_input_output) {
    static const fsdp_dtype policies[][2] = {{0, 0}, {BF16, BF16}, {BF16, F32}, {F32, 0}, {F16, 0}};
    static fs_net net;
    two_units(&net, 16);
    for (size_t i = 0; i < COUNT(policies); i++)
        for (int members = 2; members <= 3; members++) {
            fs_conf c = fs_conf_of(&net, 1, 4);
            c.param = policies[i][0], c.reduce = policies[i][1];
            c.micro = containers, c.after = struct_of_inputs, c.user = &members;
            fs_train(&c);
        }
}

static const int *wanted_inputs; /* dtypes of the inputs of the layers, and of the output */
static double seen_inputs(fs_run *x, int it, int m) {
    double loss = fs_micro(x, it, m);
    for (int l = 0; l <= x->net->num_layers; l++)
        W_CHECK(x->tape[0].dtype[l] == wanted_inputs[l], "input of layer %d is %s, expected %s", l,
                fsdp_dtype_name(x->tape[0].dtype[l]), fsdp_dtype_name(wanted_inputs[l]));
    return loss;
}

/* The module of the second unit, whose inputs the policy leaves alone, casts its input itself. */
static double own_cast(fs_run *x, int it, int m) {
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

/* The second unit computes in f16; the same, but its module casts; the first one, whose output is
   cast back, so that the second one's input is f32. */
TEST(fully_shard_mixed_precision, float16_on_one_submodule) {
    static const int second[] = {F32, F16, F16}, first[] = {F16, F32, F32};
    static fs_net net;
    for (int k = 0; k < 3; k++) {
        two_units(&net, 100);
        net.units[k < 2].param = F16;
        if (k == 1) net.units[1].keep_inputs = 1;
        if (k == 2) net.units[0].output = F32;
        wanted_inputs = k ? first : second;
        fs_conf c = fs_conf_of(&net, 1, 2);
        c.micro = k == 1 ? own_cast : seen_inputs, c.iters = 3;
        fs_train(&c);
    }
}

/* A module of two inputs, the second one from outside: it is cast, or left alone. */
static void external_inputs(fs_run *x, int it, int m) {
    float y[4] = {1.0009765625f, 2, 3, 4};
    uint16_t room[4];
    fsdp_dtype type = F32;
    int keeps = x->net->units[1].keep_inputs;
    (void)it, (void)m;
    const void *out = fsdp_cast_forward_input(x->unit[1], room, y, &type, 4);
    CHECK_EQ_INT(type, keeps ? F32 : F16);
    CHECK(out == (keeps ? (const void *)y : (const void *)room));
}
TEST(fully_shard_mixed_precision, submodules_with_external_inputs) {
    static const int halves[] = {F16, F16, F16};
    static fs_net net;
    for (int keeps = 0; keeps < 2; keeps++) {
        two_units(&net, 100);
        net.units[0].param = net.units[1].param = F16, net.units[1].keep_inputs = keeps;
        wanted_inputs = halves;
        fs_conf c = fs_conf_of(&net, 1, 2);
        c.micro = seen_inputs, c.after = external_inputs, c.iters = 3;
        fs_train(&c);
    }
}

/* Linear, norm, linear: the norm under the same policy, or its own, with outputs cast back. */
static void norm_between(fs_net *net, int64_t d, fsdp_dtype param, int own) {
    fs_net_begin(net, 4, d);
    fs_linear(net, fs_unit_add(net, "in"), d, d);
    fs_norm(net, fs_unit_add(net, "norm"), d);
    fs_linear(net, fs_unit_add(net, "out"), d, d);
    for (int u = 0; u < 3; u++) net->units[u].param = param;
    if (own) net->units[1].param = F32, net->units[1].output = param;
}
static void norms(fsdp_dtype param) {
    static fs_net net;
    for (int own = 0; own < 2; own++)
        for (int shards = 2; shards <= 4; shards += 2) {
            /* the input of the norm is cast to f32, its output back */
            int inputs[] = {param, own ? F32 : param, param, param};
            norm_between(&net, 8, param, own);
            wanted_inputs = inputs;
            fs_conf c = fs_conf_of(&net, 1, shards);
            c.micro = seen_inputs;
            fs_train(&c);
        }
}
TEST(fully_shard_mixed_precision, norm_modules_bf16) { norms(BF16); }
TEST(fully_shard_mixed_precision, norm_modules_fp16) { norms(F16); }

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
TEST(fully_shard_mixed_precision, checkpoint_recompute_casts_forward_inputs) { recompute_casts(0); }
TEST(fully_shard_mixed_precision, checkpoint_recompute_casts_outputs) { recompute_casts(1); }

/* All is frozen, integers among it, when the first forward runs, without gradients; what is thawed
   then is reduced in the policy's dtype all the same. */
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
TEST(fully_shard_mixed_precision, reduce_dtype_after_frozen_first_forward) {
    for (int size = 2; size <= 4; size += 2) lab_run(size, NULL, thawed_later, NULL);
}

/* The policy's reduce dtype rules, whatever the parameters are stored in; also if they are made in
   bf16, and cast to f32 when they are sharded. */
static void cast_to_f32(fs_run *x) {
    CALL(x->world, fsdp_model_cast(x->model, FSDP_F32));
    CALL(x->world, fsdp_init_params(x->model, fs_fill, x)); /* all bits of the initial values */
    fs_watch(x);
}
TEST(fully_shard_mixed_precision, clamp_reduce_dtype) {
    static const dtypes both[] = {{"bf16", BF16, 0, BF16, BF16, BF16, BF16, BF16, BF16, BF16},
                                  {"f32", F32, 0, BF16, BF16, BF16, BF16, BF16, BF16, F32}};
    for (size_t i = 0; i < COUNT(both); i++) by_dtypes(&both[i], 1, 2, 1);
    static fs_net net;
    mlps(&net, 8);
    fs_conf c = conf_of(&both[1], &net, 1, 2);
    c.made = BF16, c.sgd = 1, c.build = cast_to_f32, c.after = check_dtypes;
    fs_train(&c);
}
