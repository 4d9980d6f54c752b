/* test_replicate_training.c - upstream's test_replicate_training, test_replicate_with_fsdp,
   test_replicate_mixed_precision and test_replicate, by name: trainings of units that replicate and
   do not shard, and of the buckets of fsdp_replicate.h, compared with a replicated copy in plain C.
   trainings.h has the nets; test_replicate.c has the tests without an upstream counterpart.

   "Units" have a mesh info of the kind FSDP_MESH_INFO_DDP; "buckets" are those of fsdp_replicate.h,
   with small caps, so that there are several. What is compared, and with which tolerance:
   test_fully_shard_training.c.

   SPDX-License-Identifier: MIT */
#define TAGS SLOW | AT_NIGHT(ASAN | GLOO | NCCL)
#include "harness.h"
#include "lab.h"
#include "fully_shard.h"
#include "trainings.h"
#include "trainings_tp.h"

/* ---- test_replicate_training ----------------------------------------------------------------- */

/* After forward nothing is resharded; explicitly, and after the backward, it is. */
/* PyTorch: test_replicate_training.py test_param_registration_after_forward. Done: units. You pass
   FSDP_RESHARD_NEVER, which PyTorch's replicate always means; then the caller reshards. */
TEST(replicate_training, param_registration_after_forward) {
    by_kinds(FS_REPLICATE, 3, registration, NULL);
}
/* PyTorch: test_replicate_training.py test_param_registration_after_backward. Done: units, four
   backwards (PyTorch: one). */
TEST(replicate_training, param_registration_after_backward) {
    by_kinds(FS_REPLICATE, 8, NULL, sharded_again);
}
/* PyTorch: test_replicate_training.py test_to_float64_after_init. Done: units and buckets, with SGD
   (PyTorch: Adam). */
TEST(replicate_training, to_float64_after_init) {
    to_float64(FS_REPLICATE);
    to_float64(FS_BUCKETS);
}
/* PyTorch: test_replicate_training.py test_train_parity_single_group. Done: units and buckets. */
TEST(replicate_training, train_parity_single_group) {
    single_group(FS_REPLICATE);
    single_group(FS_BUCKETS);
}
/* PyTorch: test_replicate_training.py test_train_parity_multi_groups. Done: units and buckets.
   Delays of all-reduces (PyTorch: of reduce-scatters, which replicate never issues). No attention.
   The long_ test has PyTorch's sizes, with SGD. */
TEST(replicate_training, train_parity_multi_groups) {
    with_delays(FS_REPLICATE, 0, 0, 0);
    with_delays(FS_BUCKETS, 0, 0, 0);
}
/* PyTorch: test_replicate_training.py test_train_parity_multi_group_cpu_offload_eager. Done: units
   and buckets. Pinned and other memory are one path on the host. PyTorch's sizes do not run here
   with offload. */
TEST(replicate_training, train_parity_multi_group_cpu_offload_eager) {
    with_delays(FS_REPLICATE, 0, 1, 0);
    with_delays(FS_BUCKETS, 0, 1, 0);
}
/* PyTorch: test_replicate_training.py test_train_parity_multi_groups. Done: units and buckets.
   Delays of all-reduces (PyTorch: of reduce-scatters, which replicate never issues). No attention.
   The long_ test has PyTorch's sizes, with SGD. */
TEST(long_replicate_training, train_parity_multi_groups, SECONDS(300) | NIGHT) {
    with_delays(FS_REPLICATE, 1, 0, 0);
    with_delays(FS_BUCKETS, 1, 0, 0);
}
/* PyTorch: test_replicate_training.py test_non_root_forward_backward. Done: units; the root has a
   linear. */
TEST(replicate_training, non_root_forward_backward) { non_root(FS_REPLICATE); }
/* PyTorch: test_replicate_training.py test_multi_forward_module. Done: units; one
   fsdp_post_backward after the last visit, and one per visit. */
TEST(replicate_training, multi_forward_module) { inner_twice(FS_REPLICATE); }
/* PyTorch: test_replicate_training.py test_explicit_prefetching. Done: units. There is nothing to
   gather, so that the lists change nothing: parity only. */
TEST(replicate_training, explicit_prefetching) { explicit_prefetching(FS_REPLICATE, 2); }

/* Casts of parameters that are kept across the optimizer step are stale; parameters themselves
   cannot be. */
/* PyTorch: test_replicate_training.py test_post_optim_event. Differs: there is no setter:
   fsdp_params_changed is the event. Casts of units that stay over the optimizer have the new values
   in the next forward. */
TEST(replicate_training, post_optim_event) {
    static fs_net net;
    fsdp_comm_ops slow = fs_slow_ops();
    fs_transformer(&net, 2, 16, 8, 1);
    net.batch = 2 * 8;
    for (int k = 0; k < 6; k++) {
        fs_conf c = fs_conf_by(FS_REPLICATE, &net, 2);
        c.comm_ops = &slow, c.raf = NEVER, c.lanes = k / 2;
        c.param = k % 2 ? FSDP_BF16 : 0;
        fs_slow = FS_SLOW_OPTIM | FS_SLOW_REDUCE;
        c.build = kept_after_backward, c.after = still_gathered;
        fs_train(&c);
    }
}

/* PyTorch: test_replicate_training.py test_train_parity_with_activation_checkpointing. Done: units
   and buckets; no gather. The long_ test has PyTorch's sizes, for units. */
TEST(replicate_training, train_parity_with_activation_checkpointing) {
    checkpointing(FS_REPLICATE, 0);
    checkpointing(FS_BUCKETS, 0);
}
TEST(long_replicate_training, train_parity_with_activation_checkpointing, SECONDS(300) | NIGHT) {
    checkpointing(FS_REPLICATE, 1);
}
/* PyTorch: test_replicate_training.py test_train_parity_with_shared_params. Done: units and
   buckets. */
TEST(replicate_training, train_parity_with_shared_params) {
    shared_params(FS_REPLICATE);
    shared_params(FS_BUCKETS);
}

/* Checks the collectives of an iteration with 4 units and 3 microbatches. Delayed reductions are
   all in the last one. After the buckets comes the op for used parameters. */
static void buckets_count(fs_run *x, int it) {
    const int each = x->c->before ? 1 : x->c->micros, buckets = fsdp_replicate_num_buckets(x->rep);
    CHECK(buckets > x->net->count);
    CHECK_EQ_INT(fs_calls(x, FSDP_OP_ALL_REDUCE), (it + 1) * each * (buckets + 1));
    CHECK_EQ_INT(fs_calls(x, FSDP_OP_REDUCE_SCATTER), 0);
    nothing_gathered(x, it, 0);
}
static void accumulate_all(int64_t d, int all) {
    static const int expected[] = {4, 4 + 3 * 2, 4 + 2 * 2}; /* all, root_only, some_mlps */
    static fs_net net;
    linear_and_mlps(&net, d);
    for (int mode = 0; mode < 6; mode++) {
        fs_conf c = fs_conf_by(FS_REPLICATE, &net, 4);
        accumulation a;
        memset(&a, 0, sizeof a);
        a.sync = mode % 3 + (mode < 3 ? 0 : PARTIAL), c.micros = 3, c.raf = NEVER;
        accumulate_expect(&c, &a);
        CHECK(!a.gathers && !a.reductions);
        CHECK_EQ_INT(a.all_reduces, expected[mode % 3]);
        accumulate(FS_REPLICATE, &net, 4, 1, a.sync, all);
    }
    for (int waits = 0; waits < 2; waits++) {
        fs_conf c = fs_conf_by(FS_BUCKETS, &net, 4);
        c.micros = 3, c.iters = 5, c.zero_in_place = 1, c.before = waits ? sync_last : NULL;
        c.end = buckets_count;
        fs_train(&c);
    }
}
/* PyTorch: test_replicate_training.py test_gradient_accumulation. Done: units in PyTorch's three
   modes: 4, 10 and 8 all-reduces; buckets in one. PyTorch's test states these counts, and returns
   before it compares them. The long_ test has PyTorch's width. */
TEST(replicate_training, gradient_accumulation) { accumulate_all(16, 0); }
TEST(long_replicate_training, gradient_accumulation, SECONDS(300) | NIGHT) { accumulate_all(32, 1); }
/* PyTorch: test_replicate_training.py test_1f1b_microbatching. Done: units, PyTorch's order and one
   more. Adam (PyTorch: AdamW). */
TEST(replicate_training, 1f1b_microbatching) { microbatching(FS_REPLICATE); }
/* PyTorch: test_replicate_training.py test_register_fsdp_forward_method. Not applicable: there is
   no forward: hooks are calls that any function may make. The test uses the first half of a unit.
   */
TEST(replicate_training, register_fsdp_forward_method) { forward_method(FS_REPLICATE); }

/* PyTorch: test_replicate_training.py test_replicate_tp. Done: units of fsdp_tp_fully_shard on
   (dp_replicate, tp). The rest is as in fully_shard_training.2d_mlp_with_nd_mesh. */
TEST(replicate_training, replicate_tp) {
    static parallel p = {
        .ndim = 2, .shape = {2, 2}, .shard = -1, .replicate = 0, .names = {"dp_replicate", "tp"}};
    train_tp_and_compare(&p);
}

/* ---- test_replicate_with_fsdp ---------------------------------------------------------------- */

/* Checks that a unit's parameters are replicated, or sharded by rows. */
static void check_placed(fs_run *x, int unit, int replicated) {
    fsdp_mesh_info info = FSDP_ZERO;
    CALL(x->world, fsdp_unit_mesh_info(x->unit[unit], &info));
    CHECK_EQ_INT(info.kind, replicated ? FSDP_MESH_INFO_DDP : FSDP_MESH_INFO_FSDP);
    CHECK_EQ_INT(info.replicate_mesh_size, replicated ? x->size : 1);
    CHECK_EQ_INT(info.shard_mesh_size, replicated ? 1 : x->size);
    for (int p = 0; p < x->net->units[unit].count; p++) {
        const fs_param *q = &x->net->units[unit].params[p];
        fsdp_param_view v = lab_view(x->world, x->unit[unit], p);
        fsdp_range rows = {0, q->shape[0], q->shape[0]};
        if (!replicated) CALL(x->world, fsdp_shard_range(q->shape[0], x->size, x->rank, &rows));
        CHECK_EQ_INT(v.numel, q->numel / q->shape[0] * rows.count);
        CHECK_EQ_INT(v.local_shape[0], rows.count);
    }
}

/* Makes units replicate: bit u of a mask. */
static void make_mixed(fs_run *x) {
    const int mask = *(const int *)x->c->user;
    static const char *const name = "replicate";
    const int32_t all = x->size;
    const fsdp_mesh *mesh = lab_mesh(x->world, 1, &all, &name, NULL);
    fsdp_mesh_info info;
    CALL(x->world, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &info));
    for (int u = 0; u < x->net->count; u++)
        fs_make_unit_on(x, u, NULL, mask >> u & 1 ? &info : NULL);
    for (int u = 0; u < x->net->count; u++) check_placed(x, u, mask >> u & 1);
}
static void reductions_of_mixed(fs_run *x, int it, int m) {
    const int mask = *(const int *)x->c->user;
    (void)it, (void)m;
    for (int u = 0; u < x->net->count; u++) {
        const int replicated = mask >> u & 1;
        CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, u), replicated);
        CHECK_EQ_INT(fs_seen(x, FSDP_OP_REDUCE_SCATTER, -1, u), !replicated);
        CHECK_EQ_INT(fs_seen(x, FSDP_OP_ALL_GATHER, -1, u) > 0, !replicated);
    }
    fs_watch(x);
}
static void train_mixed(const fs_net *net, int mask) {
    for (int lanes = 0; lanes < 3; lanes++) {
        fs_conf c = fs_conf_of(net, 1, 4);
        c.make = make_mixed, c.build = fs_watch, c.after = reductions_of_mixed, c.user = &mask;
        c.lanes = lanes, c.iters = 4;
        fs_train(&c);
    }
}

/* Layers alternate between replicating and sharding; the root does either. */
/* PyTorch: test_replicate_with_fsdp.py test_replicate_transformer. Done: mesh infos and local
   shapes in place of registry and placements. It also trains (PyTorch: does not). */
TEST(replicate_with_fsdp, replicate_transformer) {
    static fs_net net;
    fs_transformer(&net, 4, 8, 8, 1);
    train_mixed(&net, 1 << 1 | 1 << 3 | 1);
    train_mixed(&net, 1 << 1 | 1 << 3);
}

/* The first layer replicates, the second one shards, and the third one belongs to the root. */
/* PyTorch: test_replicate_with_fsdp.py test_replicate_transformer_managed_modules. Not applicable:
   the library walks no modules. The test trains a layer that replicates and one that shards. */
TEST(replicate_with_fsdp, replicate_transformer_managed_modules) {
    static fs_net net;
    fs_net_begin(&net, 4, 1);
    net.around = 1, net.vocab = 8;
    fs_unit_add(&net, "root");
    fs_layer_add(&net, FS_EMBED, 0, fs_param_add(&net, 0, 8, 8, 0), 1, 8);
    fs_block(&net, fs_unit_add(&net, "0"), 8);
    fs_block(&net, fs_unit_add(&net, "1"), 8);
    fs_block(&net, 0, 8);
    fs_norm(&net, 0, 8);
    fs_layer_add(&net, FS_UNEMBED, 0, 0, 8, 8);
    CHECK_EQ_INT(net.units[0].count, net.units[1].count + 3); /* a layer, the table, the norm */
    train_mixed(&net, 1 << 1 | 1);
}

/* The mesh is a slice of (2, 1, 2), with two ranks. */
static void slice_locate(fs_run *x) {
    static const char *const names[3] = {"replicate", "shard", "tp"};
    static const int32_t shape[3] = {2, 1, 2};
    x->mesh = lab_slice(x->world, lab_mesh(x->world, 3, shape, names, NULL), 0);
    x->rank = fsdp_mesh_rank(x->mesh, 0);
}
static void on_the_slice(fs_run *x) {
    fsdp_mesh_info info = FSDP_ZERO;
    for (int u = 0; u < x->net->count; u++) {
        check_placed(x, u, 1);
        CALL(x->world, fsdp_unit_mesh_info(x->unit[u], &info));
        CHECK_EQ_INT(fsdp_mesh_ndim(info.mesh), 1);
        CHECK_EQ_INT(fsdp_mesh_size(info.mesh, 0), 2);
        CHECK_EQ_INT(fsdp_mesh_dim(info.mesh, "replicate"), 0);
    }
}
static void three_linears(fs_net *net) {
    fs_net_begin(net, 2, 2);
    for (int i = 0; i < 3; i++) fs_linear(net, fs_unit_add(net, "fc"), 2, 2);
}
/* PyTorch: test_replicate_with_fsdp.py test_replicate_tp_device_mesh. Done: the slice `replicate`
   of (2, 1, 2). It also trains (PyTorch: does not). */
TEST(replicate_with_fsdp, replicate_tp_device_mesh) {
    static fs_net net;
    three_linears(&net);
    fs_conf c = fs_conf_by(FS_REPLICATE, &net, 2);
    c.threads = 4, c.locate = slice_locate, c.build = on_the_slice;
    fs_train(&c);
}

/* Gradients are compared as well: with Adam it would not show that upstream's are sums. */
/* PyTorch: test_replicate_with_fsdp.py test_train_replicate_fsdp. Done: gradients are means.
   PyTorch's test compares with sums, which Adam hides. */
TEST(replicate_with_fsdp, train_replicate_fsdp) {
    static fs_net net;
    three_linears(&net);
    for (int how = FS_REPLICATE; how <= FS_BUCKETS; how++) {
        fs_conf c = fs_conf_by(how, &net, 4);
        fs_train(&c);
    }
}

/* PyTorch: test_replicate_with_fsdp.py test_train_parity_2d_mlp. Done: HSDP with tensor
   parallelism, compared with the copy (PyTorch: with replicate without tensor parallelism). */
TEST(replicate_with_fsdp, train_parity_2d_mlp) {
    static parallel p = {.ndim = 3,
                         .shape = {2, 1, 2},
                         .shard = 1,
                         .replicate = 0,
                         .names = {"dp_replicate", "dp_shard", "tp"}};
    train_tp_and_compare(&p);
}

/* ---- test_replicate_mixed_precision ---------------------------------------------------------- */

static void replicated_dtypes(const dtypes *d, int micros) {
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        by_dtypes(FS_REPLICATE, d, ranks, 1, micros);
        by_dtypes(FS_BUCKETS, d, ranks, 1, micros);
    }
}
/* PyTorch: test_replicate_mixed_precision.py test_compute_dtype. Done: units and buckets. PyTorch
   reads the dtype of reduce-scatters, which replicate never issues; here that of the all-reduce. */
TEST(replicate_mixed_precision, compute_dtype) {
    static const dtypes both[] = {{"bf16", F32, 0, BF16, 0, BF16, BF16, F32, F32, F32},
                                  {"f16", F32, 0, F16, 0, F16, F16, F32, F32, F32}};
    for (size_t i = 0; i < COUNT(both); i++) replicated_dtypes(&both[i], 1);
}
/* PyTorch: test_replicate_mixed_precision.py test_reduce_dtype. Done: also (f16, f16). */
TEST(replicate_mixed_precision, reduce_dtype) {
    static const dtypes all[] = {{"bf16, f32", F32, 0, BF16, F32, BF16, BF16, F32, F32, F32},
                                 {"f32, bf16", F32, 0, F32, BF16, F32, F32, BF16, BF16, F32},
                                 {"f16, f16", F32, 0, F16, F16, F16, F16, F16, F16, F32}};
    for (size_t i = 0; i < COUNT(all); i++) replicated_dtypes(&all[i], 1);
}
/* PyTorch: test_replicate_mixed_precision.py test_grad_acc_with_reduce_dtype. Done: gradients are
   kept in f32 until the last of 4 microbatches. */
TEST(replicate_mixed_precision, grad_acc_with_reduce_dtype) {
    static const dtypes d = {"bf16, f32", F32, 0, BF16, F32, BF16, BF16, F32, F32, F32};
    replicated_dtypes(&d, 4);
}
/* PyTorch: test_replicate_mixed_precision.py test_float16_on_one_submodule. Done: units, 3
   iterations (PyTorch: one forward and backward). */
TEST(replicate_mixed_precision, float16_on_one_submodule) { one_in_f16(FS_REPLICATE); }
/* PyTorch: test_replicate_mixed_precision.py test_submodules_with_external_inputs. Done: units, 3
   iterations (PyTorch: one forward and backward). */
TEST(replicate_mixed_precision, submodules_with_external_inputs) {
    with_external_inputs(FS_REPLICATE);
}
/* PyTorch: test_replicate_mixed_precision.py test_norm_modules_bf16, test_norm_modules_fp16.
   Partly: units, a layer norm under the policy and under its own. No batch norms: their buffers are
   yours. */
TEST(replicate_mixed_precision, norm_modules_bf16) { norms(FS_REPLICATE, BF16); }
TEST(replicate_mixed_precision, norm_modules_fp16) { norms(FS_REPLICATE, F16); }
/* PyTorch: test_replicate_mixed_precision.py test_clamp_reduce_dtype. Done: units and buckets.
   PyTorch's case is made in bf16, then fsdp_model_cast to f32. */
TEST(replicate_mixed_precision, clamp_reduce_dtype) {
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        clamp_reduce_dtype(FS_REPLICATE, ranks);
        clamp_reduce_dtype(FS_BUCKETS, ranks);
    }
}
/* PyTorch: test_replicate_mixed_precision.py test_dataclass_input. Done: units. You call
   fsdp_cast_forward_input for each member: the library does not look into structs. */
TEST(replicate_mixed_precision, dataclass_input) { structured(FS_REPLICATE); }

/* ---- test_replicate -------------------------------------------------------------------------- */

/* The reference trains on the whole batch on one device, which equals the mean over ranks. */
static void one_bucket(fs_run *x) { CHECK_EQ_INT(fsdp_replicate_num_buckets(x->rep), 1); }
static void several_buckets(fs_run *x) {
    CHECK_EQ_INT(fsdp_replicate_num_buckets(x->rep), x->net->count);
}
static void compare_module(int how, int64_t bucket_bytes) {
    static fs_net net;
    three_linears(&net);
    net.batch = 1;
    fs_conf c = fs_conf_by(how, &net, 2);
    c.iters = 2, c.sgd = 1, c.bucket_bytes = bucket_bytes;
    c.build = how == FS_REPLICATE ? NULL : bucket_bytes > 64 ? one_bucket : several_buckets;
    fs_train(&c);
}
/* PyTorch: test_replicate.py test_replicate_single_module. Done: one bucket, and one unit for each
   layer. */
TEST(replicate, replicate_single_module, NO(SLOW)) { compare_module(FS_BUCKETS, 25 << 20); }
/* PyTorch: test_replicate.py test_replicate_multi_module. Done: also a bucket for each layer. */
TEST(replicate, replicate_multi_module, NO(SLOW)) {
    compare_module(FS_REPLICATE, 0);
    compare_module(FS_BUCKETS, 16);
}
/* PyTorch: test_replicate.py test_replicate_with_kwargs. Done: bucket_bytes.
   `gradient_as_bucket_view` needs no option: gradients of one dtype that are not cast are written
   into the bucket's message. */
TEST(replicate, replicate_with_kwargs, NO(SLOW)) { compare_module(FS_BUCKETS, 1 << 20); }

enum { FCS = 3, FC = 4 };
static const char *const fc_names[2 * FCS] = {"fc1.weight", "fc1.bias",   "fc2.weight",
                                              "fc2.bias",   "fc3.weight", "fc3.bias"};
static fsdp_replicate *make_fcs(lab_rank *r, int first, const int64_t *caps, fsdp_model **model) {
    fsdp_param_desc d[2 * FCS];
    fsdp_replicate_desc rd = FSDP_ZERO;
    fsdp_replicate *rep;
    *model = lab_model(r->w, NULL);
    for (int p = 0; p < 2 * FCS; p++)
        d[p] = p % 2 ? fsdp_vec(fc_names[p], 2) : fsdp_mat(fc_names[p], 2, 2);
    rd.params = d + first, rd.num_params = 2 * FCS - first, rd.caps = caps, rd.num_caps = !!caps;
    CALL(r->w, fsdp_replicate_create(*model, &rd, &rep));
    return rep;
}
/* Names and contents are those of the module without buckets, whatever the buckets are. */
static void save_and_load(lab_rank *r) {
    const int64_t *caps = (const int64_t *)r->arg;
    fsdp_model *model;
    fsdp_replicate *rep = make_fcs(r, 0, caps, &model);
    float value[2 * FCS][FC], got[FC];
    CHECK_EQ_INT(fsdp_replicate_num_buckets(rep), caps ? 2 * FCS : 1);
    for (int p = 0; p < 2 * FCS; p++) {
        fsdp_unit *unit;
        int index;
        for (int e = 0; e < FC; e++) value[p][e] = (float)(10 * p + e);
        CALL(r->w, fsdp_replicate_unit(rep, p, &unit, &index));
        CALL(r->w, fsdp_param_load(unit, index, value[p]));
    }
    for (int p = 0; p < 2 * FCS; p++) {
        fsdp_unit *unit;
        int index;
        CALL(r->w, fsdp_replicate_unit(rep, p, &unit, &index));
        fsdp_param_view v = lab_view(r->w, unit, index);
        CHECK_EQ_STR(v.name, fc_names[p]);
        CHECK_EQ_INT(v.numel, p % 2 ? 2 : FC);
        CHECK_EQ_MEM(v.shard, value[p], (size_t)v.numel * sizeof(float));
        CALL(r->w, fsdp_param_full(unit, index, got));
        CHECK_EQ_MEM(got, value[p], (size_t)v.numel * sizeof(float));
    }
}
/* PyTorch: test_replicate.py test_replicate_single_module_save_load,
   test_replicate_non_root_multiple_save_load. Done: one bucket, and one for each parameter
   (PyTorch: for each layer). */
TEST(replicate, replicate_single_module_save_load, NO(SLOW)) { lab_run(2, NULL, save_and_load, NULL); }
TEST(replicate, replicate_non_root_multiple_save_load, NO(SLOW)) {
    int64_t small = 1;
    lab_run(2, NULL, save_and_load, &small);
}

/* Tensors that are not among the parameters are the trainer's: their gradients stay those of the
   rank. */
static void ignores(lab_rank *r) {
    fsdp_model *model;
    fsdp_replicate *rep = make_fcs(r, 2, NULL, &model);
    float own[FC] = {0}, least[FC], most[FC];
    CALL(r->w, fsdp_replicate_pre_forward(rep));
    CALL(r->w, fsdp_replicate_post_forward(rep));
    for (int p = 2 * FCS - 1; p >= 0; p--) {
        float *grad = p < 2 ? own : (float *)fsdp_replicate_grad(rep, p - 2);
        CHECK(grad != NULL);
        for (int e = 0; e < (p % 2 ? 2 : FC); e++) grad[e] += (float)((p + 1) * (r->rank + 1) + e);
        if (p >= 2) CALL(r->w, fsdp_replicate_ready(rep, p - 2, 1));
    }
    CALL(r->w, fsdp_replicate_post_backward(rep));
    CALL(r->w, fsdp_finalize_backward(model));
    fsdp_param_view v = FSDP_ZERO;
    for (int count = 0; count < 2 * (FCS - 1) + 1; count++) {
        const int has = fsdp_next_param(model, &v);
        const float *grad = has ? (const float *)v.shard_grad : own;
        const int64_t numel = has ? v.numel : FC;
        CHECK_EQ_INT(has, count < 2 * (FCS - 1));
        memcpy(least, grad, (size_t)numel * sizeof *grad);
        memcpy(most, grad, (size_t)numel * sizeof *grad);
        CALL(r->w, fsdp_all_reduce(r->w, NULL, least, numel, FSDP_F32, FSDP_MIN));
        CALL(r->w, fsdp_all_reduce(r->w, NULL, most, numel, FSDP_F32, FSDP_MAX));
        CHECK_EQ_INT(!memcmp(least, most, (size_t)numel * sizeof *grad), has);
        CHECK(!has || !strncmp(v.name, "fc", 2));
        for (int64_t e = 0; has && e < numel; e++) {
            int p = 0;
            while (strcmp(fc_names[p], v.name)) p++;
            CHECK_NEAR((double)grad[e], (p + 1) * (r->size + 1) / 2.0 + (double)e, 1e-6);
        }
    }
}
/* PyTorch: test_replicate.py test_replicate_ignore_module. Done: gradients of the ignored layer are
   the trainer's. */
TEST(replicate, replicate_ignore_module, NO(SLOW)) { lab_run(2, NULL, ignores, NULL); }
