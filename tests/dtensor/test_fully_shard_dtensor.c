/* test_fully_shard_dtensor.c - upstream's test_fully_shard_dtensor by name: an MLP whose parameters
   have placements on one mesh, of which FSDP, HSDP, DDP and tensor parallelism use the dims.

   SPDX-License-Identifier: MIT */
#define TAGS AT_NIGHT(ASAN)
#include "harness.h"
#include "lab.h"
#include "fully_shard.h"
#include "trainings.h"
#include "trainings_tp.h"

enum { D = 16, WIDE = 4 * D };

/* ---- trainings ------------------------------------------------------------------------------- */

/* Several dims that shard, or that replicate, as one: a mesh of fewer dims, of the same ranks. */
static fsdp_mesh *two_that_shard(fsdp_world *w) {
    fsdp_mesh *one = NULL;
    CALL(w, fsdp_mesh_flatten(lab_mesh2(w, 2, 2, "dp0", "dp1"), "dp", &one));
    return one;
}
static fsdp_mesh *two_that_replicate(fsdp_world *w) {
    static const char *const deep[3] = {"ddp1", "ddp2", "fsdp"};
    static const char *const both[2] = {"dp_replicate", "dp_shard"};
    const int32_t shape[3] = {1, 2, 2};
    fsdp_mesh *one = NULL, *two = NULL;
    CALL(w, fsdp_mesh_flatten(lab_mesh(w, 3, shape, deep, NULL), NULL, &one));
    CALL(w, fsdp_mesh_unflatten(one, 0, 2, both, &two));
    return two;
}

static parallel cases[] = {
    {.name = "fsdp", .ndim = 1, .shape = {4}, .replicate = -1, .names = {"dp"}, .no_tp = 1},
    {.name = "ddp", .ndim = 1, .shape = {4}, .shard = -1, .names = {"dp_replicate"}, .no_tp = 1},
    {.name = "hsdp",
     .ndim = 2,
     .shape = {2, 2},
     .shard = 1,
     .names = {"dp_replicate", "dp_shard"},
     .no_tp = 1},
    {.name = "two dims that shard",
     .ndim = 1,
     .shape = {4},
     .replicate = -1,
     .no_tp = 1,
     .merge = two_that_shard},
    {.name = "fsdp, tp", .ndim = 2, .shape = {2, 2}, .replicate = -1, .names = {"dp", "tp"}},
    {.name = "hsdp, tp",
     .ndim = 3,
     .shape = {1, 2, 2},
     .shard = 1,
     .names = {"dp_replicate", "dp_shard", "tp"}},
    {.name = "two dims that replicate",
     .ndim = 2,
     .shape = {2, 2},
     .shard = 1,
     .no_tp = 1,
     .merge = two_that_replicate},
};
/* PyTorch: test_fully_shard_dtensor.py test_dtensor_train_parity. Done: two dims that shard, or
   that replicate, as one: you make that mesh by fsdp_mesh_flatten. With tp the first bias is cut
   (PyTorch: replicated). Larger meshes and uneven sizes: dtensor_tp.parity, dtensor_tp.features. */
TEST(fully_shard_dtensor, dtensor_train_parity, SECONDS(120)) {
    for (size_t i = 0; i < COUNT(cases); i++) {
        cases[i].mlps = 1;
        tp_train(&cases[i], D, 5);
    }
}

/* FSDP shards the dim of the first matrix that tp does not shard, and rows of the second one, 9 of
   which are uneven. Shards, and tensors gathered over both dims, before and after the steps. */
/* PyTorch: test_fully_shard_init.py test_shard_dtensor_parameters,
   test_init_2d_transformer_shard_diff_dim. Done: one MLP (PyTorch: MLPs, a transformer). */
/* PyTorch: test_fully_shard_init.py test_meta_device_2d_init. Partly: filled by fsdp_init_params,
   with three steps of Adam. No buffers, and no parameters without data. */
/* PyTorch: test_fully_shard_state_dict.py test_2d_state_dict_correctness. Partly: (dp, tp) by
   fsdp_tp_param_full. The rest: state_dict.2d_state_dict_correctness. */
TEST(fully_shard_dtensor, sharded_by_tp_then_fsdp) {
    static parallel both = {.name = "fsdp, tp",
                            .ndim = 2,
                            .shape = {2, 2},
                            .replicate = -1,
                            .names = {"dp", "tp"},
                            .mlps = 1};
    static parallel four = {.name = "4 of fsdp, 2 of tp",
                            .ndim = 2,
                            .shape = {4, 2},
                            .replicate = -1,
                            .names = {"dp", "tp"},
                            .mlps = 1};
    tp_train(&both, 9, 3);
    tp_train(&four, D, 3);
}

/* PyTorch refuses an int here. */
/* PyTorch: test_fully_shard_dtensor.py test_validation_reshard_after_forward_int_spmd. Differs:
   reshard_after_forward 2 works, in parity. PyTorch refuses it. */
TEST(fully_shard_dtensor, validation_reshard_after_forward_int_spmd) {
    static parallel alone = {
        .ndim = 1, .shape = {4}, .replicate = -1, .names = {"dp"}, .no_tp = 1, .mlps = 1, .raf = 2};
    static parallel both = {
        .ndim = 2, .shape = {4, 2}, .replicate = -1, .names = {"dp", "tp"}, .mlps = 1, .raf = 2};
    tp_train(&alone, D, 3);
    tp_train(&both, D, 3);
}

/* ---- where parameters lie -------------------------------------------------------------------- */

enum { W1, B1, W2, B2, KINDS };
static const int64_t shapes[KINDS][2] = {{WIDE, D}, {WIDE, 0}, {D, WIDE}, {D, 0}};

/* The MLP: what tp cuts, and the bias that it does not. FSDP shards dim 1 of w1. */
static void mlp_units(bed *b, fsdp_unit *unit[2]) {
    static const fsdp_placement whole = {FSDP_REPLICATE, 0, 0, 0};
    fsdp_param_desc d[KINDS];
    for (int k = 0; k < KINDS; k++)
        d[k] = lab_desc(shapes[k][1] ? 2 : 1, shapes[k], k == W1, FSDP_F32, 0);
    unit[0] = bed_unit(b, d + B2, &whole, 1, 0);
    unit[1] = bed_unit(b, d, tp_cuts, B2, 0);
}
static void check_lies(bed *b, fsdp_unit *unit, int index, int kind, const int64_t *start,
                       const int64_t *local) {
    const fsdp_param_view v = lab_view(b->w, unit, index);
    fsdp_param_view whole;
    CALL(b->w, fsdp_tp_view(b->dm, &v, &whole));
    for (int d = 0; d < whole.ndim; d++) {
        CHECK_EQ_INT(whole.shape[d], shapes[kind][d]);
        CHECK_EQ_INT(whole.start[d], start[d]);
        CHECK_EQ_INT(whole.local_shape[d], local[d]);
    }
}

/* FSDP without tensor parallelism: each parameter has one placement, Shard(0). */
static void lie_1d(lab_rank *r) {
    static const char *const name = "dp";
    const int32_t ranks = r->size;
    const fsdp_placement rows = {FSDP_SHARD, 0, 0, 0};
    fsdp_unit *unit;
    fsdp_param_desc d[KINDS];
    bed b;
    bed_begin(&b, r->w, lab_mesh(r->w, 1, &ranks, &name, NULL), NULL);
    CHECK_EQ_INT(b.ndim, 1);
    for (int k = 0; k < KINDS; k++)
        d[k] = lab_desc(shapes[k][1] ? 2 : 1, shapes[k], 0, FSDP_F32, 0);
    const fsdp_placement none[KINDS] = {{0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}};
    unit = bed_unit(&b, d, none, KINDS, 0);
    for (int k = 0; k < KINDS; k++) {
        fsdp_spec s;
        fsdp_local l;
        CHECK_OK(fsdp_spec_init(&s, 1, &ranks, &rows, FSDP_F32, d[k].ndim, shapes[k]));
        CHECK_OK(fsdp_spec_local(&s, b.coord, &l));
        check_lies(&b, unit, k, k, l.start, l.shape);
        CHECK_EQ_INT(l.shape[0], shapes[k][0] / r->size);
        CALL(r->w, fsdp_dtensor_check(b.dm, &s, lab_view(r->w, unit, k).shard, "a parameter"));
    }
}
/* PyTorch: test_fully_shard_dtensor.py test_sharded_param_correctness_1d. Done. */
TEST(fully_shard_dtensor, sharded_param_correctness_1d) { lab_run(4, NULL, lie_1d, NULL); }

/* FSDP and tp: w1 (S1, S0), b1 (S0, S0), w2 (S0, S1), b2 (S0, R). */
static void lie_2d(lab_rank *r) {
    fsdp_unit *unit[2];
    bed b;
    bed_begin(&b, r->w, lab_mesh2(r->w, 2, 2, "dp", "tp"), NULL);
    const int64_t dp = b.coord[0], tp = b.coord[1], half = WIDE / 2;
    const int64_t start[KINDS][2] = {{tp * half, dp * D / 2},
                                     {tp * half + dp * half / 2, 0},
                                     {dp * D / 2, tp * half},
                                     {dp * D / 2, 0}};
    const int64_t local[KINDS][2] = {{half, D / 2}, {half / 2, 0}, {D / 2, half}, {D / 2, 0}};
    mlp_units(&b, unit);
    for (int k = 0; k < KINDS; k++)
        check_lies(&b, unit[k != B2], k == B2 ? 0 : k, k, start[k], local[k]);
}
/* PyTorch: test_fully_shard_dtensor.py test_fsdp_tp_dtensor_sharded_params. Done: the first bias is
   (S0, S0) (PyTorch: (S0, R)). */
TEST(fully_shard_dtensor, fsdp_tp_dtensor_sharded_params) { lab_run(4, NULL, lie_2d, NULL); }

/* ---- a parameter that is not used ------------------------------------------------------------ */

/* Two parameters of one unit, cut over ep. The unused one has zeros if no rank uses it, and the mean
   over all ranks if one does. */
static void unused(lab_rank *r) {
    static const fsdp_placement rows[2] = {{FSDP_SHARD, 0, 0, 0}, {FSDP_SHARD, 0, 0, 0}};
    const fsdp_param_desc d[2] = {fsdp_mat("used", 8, 4), fsdp_mat("unused", 8, 4)};
    fsdp_dmesh_desc dd = FSDP_ZERO;
    bed b;
    bed_begin(&b, r->w, lab_mesh2(r->w, 2, 2, "dp", "ep"), NULL);
    fsdp_dmesh_destroy(b.dm);
    dd.mesh = b.mesh, dd.tp_dim = "ep";
    CALL(r->w, fsdp_dmesh_create(b.model, &dd, &b.dm));
    fsdp_unit *unit = bed_unit(&b, d, rows, 2, 0);
    CALL(r->w, fsdp_set_reduce_scatter_unused_params(b.model, NULL, 1));
    for (int step = 0; step < 3; step++) { /* in the second one rank 0 of dp uses both */
        const int second = step == 1;
        lab_forward(r->w, unit);
        CALL(r->w, fsdp_pre_backward(unit));
        for (int i = 0; i < 1 + (second && !b.coord[0]); i++) {
            float *grad = (float *)fsdp_grad(unit, i);
            CHECK(grad != NULL);
            for (int k = 0; k < 16; k++) grad[k] += (float)(1 + k + b.coord[1]);
        }
        CALL(r->w, fsdp_post_backward(unit));
        CALL(r->w, fsdp_finalize_backward(b.model));
        for (int i = 0; i < 2; i++) {
            const fsdp_param_view v = lab_view(r->w, unit, i);
            CHECK_EQ_INT(v.numel, 8);
            CHECK(v.shard_grad != NULL);
            for (int k = 0; k < 8; k++) {
                const int mean = i == 0 || second ? 1 + k + 8 * b.coord[0] + b.coord[1] : 0;
                CHECK(((const float *)v.shard_grad)[k] * (float)(1 + i) == (float)mean);
            }
        }
        CALL(r->w, fsdp_zero_grad(b.model));
    }
}
/* PyTorch: test_fully_shard_dtensor.py test_reduce_scatter_unused_dtensor_param. Done. */
TEST(fully_shard_dtensor, reduce_scatter_unused_dtensor_param) { lab_run(4, NULL, unused, NULL); }
