/* test_warnings.c - warnings of calls that succeed: unreduced gradients in a call that expects
   none, steps without a gradient, and replicas that start with different parameters. PyTorch has no
   such warnings. Also the broadcast that makes replicas equal.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "fsdp_optim.h"
#include "fsdp_replicate.h"
#include "lab.h"

enum { RANKS = 4 };
static char said[RANKS][1 << 14]; /* each rank's log at the level warn */

static void hear(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)user;
    if (level != FSDP_LOG_WARN) return;
    CHECK_EQ_INT(code, FSDP_OK);
    size_t used = strlen(said[rank]);
    snprintf(said[rank] + used, sizeof said[rank] - used, "%s\n", text);
}

/* Returns the number of times that this rank has logged `word`, and clears its log. */
static int times(const lab_rank *r, const char *word) {
    int n = 0;
    for (const char *at = said[r->rank]; (at = strstr(at, word)) != NULL; at++) n++;
    said[r->rank][0] = 0;
    return n;
}
static int lines(const lab_rank *r) { return times(r, "\n"); }

static void launch(int size, void (*body)(lab_rank *r), void *arg) {
    lab_how how = FSDP_ZERO;
    w_log = hear;
    how.shared = 1;
    memset(said, 0, sizeof said);
    lab_run(size, &how, body, arg);
}

/* ---- gradients that wait for a reduction ----------------------------------------------------- */

typedef struct {
    fsdp_model *m;
    fsdp_unit *u[2];
} rig;

static rig make(const lab_rank *r, const fsdp_mesh *mesh) {
    const fsdp_param_desc p = fsdp_vec("w", 9); /* shards of 9, 5 or 4 numbers */
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc like = FSDP_ZERO;
    rig x;
    md.mesh = mesh;
    x.m = lab_model(r->w, &md);
    for (int i = 0; i < 2; i++) {
        like.name = i ? "second" : "first";
        x.u[i] = lab_unit(r->w, x.m, &like, &p, 1);
    }
    return x;
}

/* Runs a microbatch; `used`: bit mask of the units that have a gradient in it. */
static void micro(const lab_rank *r, const rig *x, int used) {
    for (int i = 0; i < 2; i++) lab_forward(r->w, x->u[i]);
    for (int i = 0; i < 2; i++) {
        if (!(used >> i & 1)) continue;
        CALL(r->w, fsdp_pre_backward(x->u[i]));
        CHECK(fsdp_grad(x->u[i], 0) != NULL);
        CALL(r->w, fsdp_post_backward(x->u[i]));
    }
    CALL(r->w, fsdp_finalize_backward(x->m));
}

/* Each call that ends a gradient accumulation warns once, and names a unit with unreduced
   gradients. */
static void each_call(lab_rank *r) {
    static const char second[] = ": unit 'second' holds gradients that are not reduced";
    fsdp_adamw *adamw = NULL;
    fsdp_sgd *sgd = NULL;
    fsdp_grad_scaler *scaler = NULL;
    double norm;
    char text[128];
    for (int call = 0; call < 6; call++) {
        static const char *const names[] = {"adamw_step",     "sgd_step", "grad_scaler_unscale",
                                            "clip_grad_norm", "zero_grad", "params_changed"};
        rig x = make(r, NULL);
        CALL(r->w, fsdp_adamw_create(x.m, NULL, &adamw));
        CALL(r->w, fsdp_sgd_create(x.m, NULL, &sgd));
        CALL(r->w, fsdp_grad_scaler_create(x.m, NULL, &scaler));
        for (int n = 0; n < 3; n++) { /* 0: nothing waits; afterwards one warning */
            CALL(r->w, fsdp_set_requires_gradient_sync(x.m, NULL, 1));
            micro(r, &x, 3);
            CALL(r->w, fsdp_set_requires_gradient_sync(x.m, NULL, 0));
            if (n) micro(r, &x, 2);
            CHECK_EQ_INT(lines(r), 0);
            if (call == 0) CALL(r->w, fsdp_adamw_step(adamw, 0.1));
            if (call == 1) CALL(r->w, fsdp_sgd_step(sgd, 0.1));
            if (call == 2) CALL(r->w, fsdp_grad_scaler_unscale(scaler));
            if (call == 2) CALL(r->w, fsdp_grad_scaler_update(scaler));
            if (call == 3) CALL(r->w, fsdp_clip_grad_norm(x.m, 1, &norm));
            if (call == 4) CALL(r->w, fsdp_zero_grad(x.m));
            if (call == 5) CALL(r->w, fsdp_params_changed(x.m));
            snprintf(text, sizeof text, "%s%s", names[call], second);
            CHECK_MSG(times(r, text) == (n == 1), "%s, window %d: '%s'", names[call], n,
                      said[r->rank]);
        }
        CALL(r->w, call == 4 ? fsdp_params_changed(x.m) : fsdp_zero_grad(x.m));
        CHECK_EQ_INT(lines(r), 1); /* the other call's */
        CALL(r->w, fsdp_model_reset(x.m));
        CALL(r->w, fsdp_zero_grad(x.m));
        CHECK_EQ_INT(lines(r), 0);
        fsdp_model_destroy(x.m);
    }
}
TEST(warnings, gradients_that_wait) {
    for (int size = 1; size < 3; size++) launch(size, each_call, NULL);
}

/* While gradients are unreduced, loads and new layouts are refused; after a reset both work. */
static void nothing(void *user, const fsdp_param_view *block) { (void)user, (void)block; }
static void loads(lab_rank *r) {
    static const float full[9] = {1, 2, 3};
    rig x = make(r, NULL);
    CALL(r->w, fsdp_set_requires_gradient_sync(x.m, NULL, 0));
    micro(r, &x, 1);
    REFUSED_AS(FSDP_ERR_INVALID_STATE, r->w, fsdp_param_load(x.u[1], 0, full),
               "[E203] param_load: unit 'first' holds gradients that are not reduced");
    REFUSED_AS(FSDP_ERR_INVALID_STATE, r->w, fsdp_init_params(x.m, nothing, NULL), "unit 'first'");
    REFUSED_AS(FSDP_ERR_INVALID_STATE, r->w, fsdp_set_requires_grad(x.u[1], 0, 0), "unit 'first'");
    REFUSED_AS(FSDP_ERR_INVALID_STATE, r->w, fsdp_model_cast(x.m, FSDP_BF16), "unit 'first'");
    CALL(r->w, fsdp_model_reset(x.m));
    CALL(r->w, fsdp_param_load(x.u[1], 0, full));
    CALL(r->w, fsdp_init_params(x.m, nothing, NULL));
    micro(r, &x, 1);
    CALL(r->w, fsdp_set_requires_gradient_sync(x.m, NULL, 1));
    micro(r, &x, 1); /* reduces both */
    CALL(r->w, fsdp_param_load(x.u[1], 0, full));
    CHECK_EQ_INT(lines(r), 0);
}
TEST(warnings, loads_are_refused) { launch(2, loads, NULL); }

/* HSDP: sums of the shard group that wait for their all-reduce are gradients, too. */
static void sums(lab_rank *r) {
    rig x = make(r, lab_hsdp(r->w, 2, 2));
    CALL(r->w, fsdp_set_requires_all_reduce(x.m, NULL, 0));
    micro(r, &x, 1);
    CALL(r->w, fsdp_zero_grad(x.m));
    CHECK_EQ_INT(times(r, "zero_grad: unit 'first' holds"), 1);
    CALL(r->w, fsdp_set_requires_all_reduce(x.m, NULL, 1));
    micro(r, &x, 1);
    CALL(r->w, fsdp_zero_grad(x.m));
    CALL(r->w, fsdp_params_changed(x.m));
    CHECK_EQ_INT(lines(r), 0);
}
TEST(warnings, sums_that_wait) { launch(4, sums, NULL); }

/* Buckets: join runs a collective in each microbatch, which does not end the gradient
   accumulation. */
static void buckets(lab_rank *r) {
    const fsdp_param_desc p[2] = {fsdp_vec("a", 8), fsdp_vec("b", 8)};
    fsdp_replicate_desc d = FSDP_ZERO;
    fsdp_replicate *rep = NULL;
    fsdp_adamw *opt = NULL;
    int active = 0;
    fsdp_model *m = lab_model(r->w, NULL);
    d.params = p, d.num_params = 2;
    CALL(r->w, fsdp_replicate_create(m, &d, &rep));
    CALL(r->w, fsdp_adamw_create(m, NULL, &opt));
    CALL(r->w, fsdp_set_requires_gradient_sync(m, NULL, 0));
    for (int n = 0; n < 2; n++) {
        CALL(r->w, fsdp_replicate_join(rep, 1, 1, &active));
        CALL(r->w, fsdp_replicate_pre_forward(rep));
        CALL(r->w, fsdp_replicate_post_forward(rep));
        CHECK(fsdp_replicate_grad(rep, 0) != NULL);
        CALL(r->w, fsdp_replicate_post_backward(rep));
        CALL(r->w, fsdp_finalize_backward(m));
    }
    CHECK_EQ_INT(lines(r), 0);
    CALL(r->w, fsdp_adamw_step(opt, 0.1));
    CHECK_EQ_INT(times(r, "adamw_step: unit 'bucket.0' holds"), 1);
}
TEST(warnings, buckets_that_wait) { launch(2, buckets, NULL); }

/* ---- a step that updates nothing ------------------------------------------------------------- */

static int only_first(void *user, const fsdp_param_view *v) {
    (void)user;
    return strcmp(v->unit_name, "first") ? -1 : 0;
}
static void no_gradient(lab_rank *r) {
    static const char none[] = "sgd_step: no parameter has a gradient";
    fsdp_sgd_desc d = fsdp_sgd_defaults();
    fsdp_sgd *sgd = NULL;
    rig x = make(r, NULL);
    d.group = only_first;
    CALL(r->w, fsdp_sgd_create(x.m, &d, &sgd));
    micro(r, &x, 2); /* a parameter of another optimizer */
    CALL(r->w, fsdp_sgd_step(sgd, 0.1));
    CHECK_EQ_INT(lines(r), 0);
    for (int n = 0; n < 2; n++) { /* zero_grad before the step; one warning */
        micro(r, &x, 1);
        CALL(r->w, fsdp_zero_grad(x.m));
        CALL(r->w, fsdp_sgd_step(sgd, 0.1));
        CHECK_EQ_INT(times(r, none), !n);
    }
    fsdp_sgd_destroy(sgd);
    CALL(r->w, fsdp_sgd_create(x.m, &d, &sgd));
    CALL(r->w, fsdp_set_requires_gradient_sync(x.m, NULL, 0)); /* and never set again */
    micro(r, &x, 3);
    CALL(r->w, fsdp_sgd_step(sgd, 0.1));
    CHECK_EQ_INT(lines(r), 2); /* unreduced gradients; no update */
}
TEST(warnings, step_without_a_gradient) { launch(2, no_gradient, NULL); }

/* ---- replicas that start with different parameters ------------------------------------------- */

static void by_rank(void *user, const fsdp_param_view *block) {
    const double *add = (const double *)user; /* added to values that are equal on all ranks */
    for (int64_t k = 0; k < block->numel; k++)
        lab_put(block->data, block->dtype, k, (double)(fsdp_view_index(block, k) % 50) + *add);
}
static void expect_values(const lab_rank *r, const rig *x, double add) {
    float full[9];
    for (int i = 0; i < 2; i++) {
        CALL(r->w, fsdp_param_full(x->u[i], 0, full));
        for (int k = 0; k < 9; k++) CHECK((double)full[k] == k + add);
    }
}

/* All ranks warn once, in the first finalize; a broadcast makes replicas equal. */
static void hsdp_differs(lab_rank *r) {
    static const char told[] = "finalize_backward: replicas hold different parameters in unit 'first'";
    fsdp_mesh *mesh = lab_hsdp(r->w, 2, 2);
    const int replica = fsdp_mesh_rank(mesh, 0);
    for (int root = -1; root < 2; root++) { /* -1: no broadcast */
        rig x = make(r, mesh);
        double add = 100 * replica;
        CALL(r->w, fsdp_init_params(x.m, by_rank, &add));
        if (root >= 0) CALL(r->w, fsdp_model_broadcast(x.m, NULL, root));
        expect_values(r, &x, root < 0 ? 100 * replica : 100 * root);
        for (int n = 0; n < 2; n++) {
            micro(r, &x, 3);
            CHECK_EQ_INT(times(r, told), root < 0 && !n);
        }
        fsdp_model_destroy(x.m);
    }
    rig x = make(r, mesh); /* one unit differs, in one element */
    double add = 0;
    CALL(r->w, fsdp_init_params(x.m, by_rank, &add));
    fsdp_param_view v = lab_view(r->w, x.u[1], 0);
    if (r->rank == 2) ((float *)v.shard)[v.numel - 1] = 7.5f; /* 5 elements */
    CALL(r->w, fsdp_params_changed(x.m));
    micro(r, &x, 3);
    const int mine = fsdp_mesh_rank(mesh, 1) == 0; /* the group of rank 2 */
    CHECK_EQ_INT(times(r, "parameters in unit 'second' (1 such units)"), mine);
    CALL(r->w, fsdp_model_broadcast(x.m, x.u[1], 0));
    expect_values(r, &x, 0);
    REFUSED(r->w, fsdp_model_broadcast(x.m, NULL, 2),
            "[E100] model_broadcast: root is 2, expected 0..1 of unit 'first'");
    REFUSED(r->w, fsdp_model_broadcast(x.m, x.u[1], -1), "of unit 'second'");
    rig y = make(r, mesh);
    REFUSED(r->w, fsdp_model_broadcast(y.m, x.u[1], 0), "[E161] model_broadcast");
    REFUSED(NULL, fsdp_model_broadcast(NULL, NULL, 0), "model is NULL");
    CALL(r->w, fsdp_pre_forward(x.u[0]));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, r->w, fsdp_model_broadcast(x.m, NULL, 0), "unit 'first'");
}
TEST(warnings, replicas_that_differ) { launch(4, hsdp_differs, NULL); }

/* Without replicas there is nothing to compare or to copy. */
static void sharded(lab_rank *r) {
    rig x = make(r, NULL);
    double add = 100 * r->rank;
    lab_log log = {0};
    lab_watch(&log, r->w, x.m);
    CALL(r->w, fsdp_init_params(x.m, by_rank, &add));
    CALL(r->w, fsdp_model_broadcast(x.m, NULL, 1));
    micro(r, &x, 3);
    CHECK_EQ_INT(lab_count_ops(&log, 0, -1, FSDP_LABEL_WORLD, NULL), 0);
    CHECK_EQ_INT(lines(r), 0);
    free(log.ops);
}
TEST(warnings, no_replicas) { launch(2, sharded, NULL); }

/* Frozen parameters in another order on one rank, which no reduction compares: a warning says
   so, and a broadcast, which would mix them, is refused on all ranks. */
static void frozen_order(lab_rank *r) {
    fsdp_param_desc p[3] = {fsdp_vec("w", 8), fsdp_vec("a", 8), fsdp_vec("b", 8)};
    fsdp_replicate_desc d = FSDP_ZERO;
    fsdp_replicate *rep = NULL;
    fsdp_model *m = lab_model(r->w, NULL);
    p[1].frozen = p[2].frozen = 1;
    if (r->rank == 1) p[1].name = "b", p[2].name = "a";
    d.params = p, d.num_params = 3;
    CALL(r->w, fsdp_replicate_create(m, &d, &rep));
    REFUSED_AS(FSDP_ERR_MISMATCH, r->w, fsdp_replicate_broadcast(rep, 0),
               "[E217] model_broadcast: replicas describe unit 'bucket.1' differently");
    CALL(r->w, fsdp_replicate_pre_forward(rep));
    CALL(r->w, fsdp_replicate_post_forward(rep));
    CHECK(fsdp_replicate_grad(rep, 0) != NULL);
    CALL(r->w, fsdp_replicate_post_backward(rep));
    CALL(r->w, fsdp_finalize_backward(m));
    CHECK_EQ_INT(times(r, "replicas hold different parameters in unit 'bucket.1'"), 1);
}
TEST(warnings, frozen_parameters_in_another_order) { launch(2, frozen_order, NULL); }
