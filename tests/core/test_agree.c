/* test_agree.c - if ranks describe a unit differently, or are in different steps, the next
   collective fails on all ranks, and its text names the difference.

   SPDX-License-Identifier: MIT */
#define TAGS TSAN | GLOO | NCCL | ONE_GPU
#include "harness.h"
#include "lab.h"
#include <math.h> /* sqrt */

/* Changes that rank 0 makes, and the words for them in the text. */
static const struct {
    const char *name, *text;
} differences[] = {
    {"none", NULL},
    {"names", "(differs in names of parameters)"},
    {"shape", "shapes"},
    {"shard_dim", "shard_dim"},
    {"stored", "dtypes of parameters"},
    {"param_dtype", "dtypes of parameters"},
    {"keep_dtype", "(differs in dtypes of parameters)"},
    {"reduce_dtype", "(differs in reduce_dtype)"},
    {"grad_dtype", "grad_dtype"},
    {"frozen", "(differs in requires_grad)"},
    {"string_bytes", "sizes of a gather extension"},
    {"direct_min", "direct_min"},
};

typedef struct {
    const char *what, *text;
    int replicas; /* the ranks are replicas, without shards */
} agree_job;

static int is(const char *what, const char *name) { return !strcmp(what, name); }

static int string_sizes(void *user, int64_t shard_numel, int64_t nbytes[FSDP_GATHER_TENSORS]) {
    (void)shard_numel;
    nbytes[0] = user ? 40 : 24, nbytes[1] = user ? 24 : 40; // equal in total
    return 2;
}
static fsdp_status no_strings(void *user, const fsdp_param_view *v, void *const *strings,
                              void *stream) {
    lib_wait(stream);
    (void)user, (void)v, (void)strings, (void)stream;
    return FSDP_OK;
}
static fsdp_status no_parameter(void *user, const fsdp_param_view *v, const void *const *gathered,
                                void *full, fsdp_dtype dtype, void *stream) {
    lib_wait(stream);
    (void)user, (void)v, (void)gathered, (void)full, (void)dtype, (void)stream;
    return FSDP_OK;
}

static void make_pair(fsdp_world *w, const char *what, int is_odd, int replicas, fsdp_model **m,
                      fsdp_unit **u) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    const int32_t all = fsdp_world_size(w);
    fsdp_unit_desc ud = FSDP_ZERO;
    const char *mine = is_odd ? what : "none";
    fsdp_param_desc p[2] = {fsdp_mat(is(mine, "names") ? "b" : "a", 8, 2),
                            fsdp_mat(is(mine, "names") ? "a" : "b", 8, 2)};
    fsdp_gather_extension strings = {string_sizes, no_strings, no_parameter, NULL};
    ud.name = "pair";
    p[is(mine, "frozen")].frozen = 1;
    if (is(mine, "shape")) p[0].shape[0] = 2, p[0].shape[1] = 8;
    if (is(mine, "shard_dim")) p[0].shard_dim = 1;
    if (is(mine, "stored")) p[0].dtype = p[1].dtype = FSDP_BF16;
    if (is(mine, "param_dtype")) ud.param_dtype = FSDP_BF16;
    if (is(what, "keep_dtype")) p[0].dtype = p[1].dtype = ud.param_dtype = FSDP_F32;
    if (is(mine, "keep_dtype")) p[0].keep_dtype = p[1].keep_dtype = 1; // changes only the desc
    if (is(mine, "reduce_dtype")) ud.reduce_dtype = FSDP_F64;
    if (is(mine, "grad_dtype")) md.grad_dtype = FSDP_F64;
    if (is(what, "string_bytes")) p[0].extension = &strings, strings.user = is_odd ? w : NULL;
    md.direct_min = is(mine, "direct_min");
    if (replicas) {
        const fsdp_mesh *mesh = lab_mesh(w, 1, &all, NULL, NULL);
        CALL(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &info));
        md.mesh_info = &info;
    }
    *m = lab_model(w, &md);
    *u = lab_unit(w, *m, &ud, p, 2);
}

/* Shuts down the failed world, which returns its failure. */
static void end_with(lab_rank *r, fsdp_status status) {
    CHECK_STATUS(fsdp_shutdown(r->w), status);
    r->w = NULL;
}

static void agree_rank(lab_rank *r) {
    const agree_job *job = (const agree_job *)r->arg;
    fsdp_model *m;
    fsdp_unit *u;
    make_pair(r->w, job->what, r->rank == 0, 0, &m, &u);
    fsdp_status status = fsdp_pre_forward(u);
    if (!job->text) {
        CHECK_OK(status);
    } else {
        const char *text = fsdp_last_error(r->w);
        CHECK_STATUS(status, FSDP_ERR_MISMATCH);
        CHECK_MSG(strstr(text, "pair") && strstr(text, job->text), "%s", text);
        CHECK_MSG(!strstr(text, "fingerprint"), "%s", text);
    }
    end_with(r, status);
}

TEST_P(agree, units, differences) {
    agree_job job = {row->name, row->text, 0};
    lab_run(2, NULL, agree_rank, &job);
}

/* The groups of 2 ranks exist already, from another unit. After forward rank 0 would keep half
   of the parameters, the other ranks would free all. */
static void slices_rank(lab_rank *r) {
    fsdp_param_desc p[2] = {fsdp_mat("a", 8, 2), fsdp_mat("b", 8, 2)};
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_model *m = lab_model(r->w, NULL);
    ud.name = "first";
    ud.reshard_after_forward = 2;
    fsdp_unit *first = lab_unit(r->w, m, &ud, p, 2);
    ud.name = "pair";
    ud.reshard_after_forward = r->rank ? FSDP_RESHARD_ALWAYS : 2;
    fsdp_unit *u = lab_unit(r->w, m, &ud, p, 2);
    lab_forward(r->w, first);
    fsdp_status status = fsdp_pre_forward(u);
    const char *text = fsdp_last_error(r->w);
    CHECK_STATUS(status, FSDP_ERR_MISMATCH);
    CHECK_MSG(strstr(text, "pair") && strstr(text, "(differs in n of reshard_after_forward)"), "%s",
              text);
    end_with(r, status);
}
TEST(agree, slices) { lab_run(4, NULL, slices_rank, NULL); }

/* ---- in a later step ------------------------------------------------------------------------- */

static const struct {
    const char *name, *text;
} steps[] = {
    {"divide_factor", "(differs in gradient divide factor)"},
    {"used_parameters",
     "(differs in parameters that have a gradient (fsdp_set_reduce_scatter_unused_params))"},
    {"zero_grad", "gradients of earlier steps (zero_grad))"},
    {"used_parameters_of_step_2", "parameters that have a gradient"}};

/* Runs two steps; in the second one rank 0 does something different. */
static void step_rank(lab_rank *r) {
    const agree_job *job = (const agree_job *)r->arg;
    const int rank = r->rank;
    fsdp_status status = FSDP_OK;
    fsdp_model *m;
    fsdp_unit *u;
    make_pair(r->w, "none", 0, job->replicas, &m, &u);
    if (!is(job->what, "divide_factor"))
        CHECK_OK(fsdp_set_requires_grad(u, 0, 1)); // both become trainable
    for (int step = 0; step < 2 && !status; step++) {
        const int is_odd = rank == 0 && step == 1;
        if (is_odd && is(job->what, "divide_factor"))
            CHECK_OK(fsdp_set_gradient_divide_factor(m, NULL, 3.0));
        CHECK_OK(fsdp_pre_forward(u));
        CHECK_OK(fsdp_post_forward(u));
        CHECK_OK(fsdp_pre_backward(u));
        for (int i = 0; i < 2; i++) {
            if (i == 0 && is_odd && is(job->what, "used_parameters")) continue;
            if (i == 0 && is(job->what, "used_parameters_of_step_2") && (step == 0 || rank == 0))
                continue;
            float *g = (float *)fsdp_grad(u, i);
            for (int k = 0; g && k < 16; k++) g[k] += 1;
        }
        status = fsdp_post_backward(u);
        if (!status) status = fsdp_finalize_backward(m);
        if (step == 0) CHECK_OK(status);
        if (step == 0 && !(rank == 0 && is(job->what, "zero_grad"))) CHECK_OK(fsdp_zero_grad(m));
    }
    CHECK_STATUS(status, FSDP_ERR_MISMATCH);
    CHECK_MSG(strstr(fsdp_last_error(r->w), job->text), "%s", fsdp_last_error(r->w));
    end_with(r, status);
}

TEST_P(agree, steps, steps) {
    agree_job job = {row->name, row->text, 0};
    lab_run(2, NULL, step_rank, &job);
}

/* ---- settings of optimizers ------------------------------------------------------------------ */

static const struct {
    const char *name;
} settings[] = {{"same"},      {"lr"},        {"beta2"},    {"eps"},      {"weight_decay"},
                {"lr_scale"},  {"momentum"},  {"nesterov"}, {"left_out"}, {"set_group"},
                {"ema_decay"}, {"ema_calls"}, {"ema_swap"}, {"seed"},     {"unused_seed"}};

/* Runs a step of an optimizer with another setting on rank 0: the next gather fails. */
static void optim_rank(lab_rank *r) {
    const agree_job *job = (const agree_job *)r->arg;
    const char *what = r->rank ? "same" : job->what;
    const int sgd = is(job->what, "momentum") || is(job->what, "nesterov");
    fsdp_adamw_desc ad = fsdp_adamw_defaults();
    fsdp_sgd_desc sd = fsdp_sgd_defaults();
    fsdp_adamw *adamw = NULL;
    fsdp_sgd *sgd_opt = NULL;
    fsdp_model *m;
    fsdp_unit *u;
    ad.num_groups = 1;
    sd.momentum = 0.9;
    ad.stochastic_rounding = is(job->what, "seed");
    if (is(what, "seed") || is(what, "unused_seed")) ad.seed = 7;
    if (is(what, "beta2")) ad.beta2 = 0.99;
    if (is(what, "eps")) ad.eps = 1e-7;
    if (is(what, "weight_decay")) ad.weight_decay = 0;
    if (is(what, "lr_scale")) ad.groups[0].lr_scale = 0.5;
    if (is(what, "momentum")) sd.momentum = 0.8;
    if (is(what, "nesterov")) sd.nesterov = 1;
    make_pair(r->w, "none", 0, 0, &m, &u);
    if (sgd) CHECK_OK(fsdp_sgd_create(m, &sd, &sgd_opt));
    else CHECK_OK(fsdp_adamw_create(m, &ad, &adamw));
    fsdp_ema_desc ed = fsdp_ema_defaults();
    fsdp_ema *ema;
    if (is(what, "ema_decay")) ed.decay = 0.99;
    CHECK_OK(fsdp_ema_create(m, &ed, &ema));
    if (is(what, "set_group")) {
        fsdp_optim_group g = ad.groups[0];
        g.weight_decay = 0.02;
        CHECK_OK(fsdp_adamw_set_group(adamw, 0, &g));
    }
    fsdp_status status = FSDP_OK;
    for (int step = 0; step < 2 && !status; step++) {
        status = fsdp_pre_forward(u);
        if (!status) status = fsdp_post_forward(u);
        if (!status) status = fsdp_pre_backward(u);
        for (int i = 0; i < 2 && !status; i++) (void)fsdp_grad(u, i);
        if (!status) status = fsdp_post_backward(u);
        if (!status) status = fsdp_finalize_backward(m);
        if (status || is(what, "left_out")) continue;
        const double lr = is(what, "lr") ? 0.1000001 : 0.1;
        CHECK_OK(sgd ? fsdp_sgd_step(sgd_opt, lr) : fsdp_adamw_step(adamw, lr));
        if (!is(what, "ema_calls")) CHECK_OK(fsdp_ema_update(ema));
        for (int i = 0; i < 2 && is(what, "ema_swap"); i++) CHECK_OK(fsdp_ema_swap(ema));
    }
    CHECK_STATUS(status, is(job->what, "same") || is(job->what, "unused_seed") ? FSDP_OK
                                                                               : FSDP_ERR_MISMATCH);
    if (status)
        CHECK_MSG(strstr(fsdp_last_error(r->w), "(differs in lr or another setting of the"), "%s",
                  fsdp_last_error(r->w));
    fsdp_adamw_destroy(adamw);
    fsdp_sgd_destroy(sgd_opt);
    end_with(r, status);
}

TEST_P(agree, optimizers, settings) {
    agree_job job = {row->name, NULL, 0};
    lab_run(2, NULL, optim_rank, &job);
}

/* Settings of Muon and averages, at the first step. The values of parameters do not matter. */
static const struct {
    const char *name;
} muon_settings[] = {{"same"},
                     {"lr"},
                     {"weight_decay"},
                     {"momentum"},
                     {"eps"},
                     {"a"},
                     {"b"},
                     {"c"},
                     {"ns_steps"},
                     {"nesterov"},
                     {"adjust"},
                     {"dtype"},
                     {"bucket_bytes"},
                     {"take"},
                     {"columns"},
                     {"lr_scale"},
                     {"set_group"},
                     {"ema_every"},
                     {"ema_after"},
                     {"ema_schedule"},
                     {"ema_name"}};

static fsdp_status no_product(void *user, void *stream, int64_t m, int64_t n, int64_t k,
                              float alpha, const void *a, int64_t lda, int a_transposed,
                              const void *b, int64_t ldb, int b_transposed, float beta, void *c,
                              int64_t ldc, fsdp_dtype dtype) {
    (void)user, (void)stream, (void)m, (void)n, (void)k, (void)alpha, (void)a, (void)lda;
    (void)a_transposed, (void)b, (void)ldb, (void)b_transposed, (void)beta, (void)c, (void)ldc;
    return dtype == FSDP_F32 || dtype == FSDP_BF16 ? FSDP_OK : FSDP_ERR_UNSUPPORTED;
}
static int takes_three(void *user, const fsdp_param_view *v) { return (void)user, v->index < 3; }
static int takes_as_squares(void *user, const fsdp_param_view *v) { return (void)user, v ? 4 : 0; }
static double schedule(void *user, int64_t step) { return (void)user, step ? 0.999 : 0; }

static fsdp_muon_desc muon_desc_of(const char *what) {
    fsdp_muon_desc d = fsdp_muon_defaults();
    d.num_groups = 1, d.gemm = no_product;
    if (is(what, "weight_decay")) d.weight_decay = 0;
    if (is(what, "momentum")) d.momentum = 0.9;
    if (is(what, "eps")) d.eps = 1e-8;
    if (is(what, "a")) d.a = 3;
    if (is(what, "b")) d.b = -4;
    if (is(what, "c")) d.c = 2;
    if (is(what, "ns_steps")) d.ns_steps = 6;
    if (is(what, "nesterov")) d.nesterov = 0;
    if (is(what, "adjust")) d.adjust = FSDP_MUON_SPECTRAL;
    if (is(what, "dtype")) d.dtype = FSDP_BF16;
    if (is(what, "bucket_bytes")) d.bucket_bytes = 1;
    if (is(what, "take")) d.take = takes_three;
    if (is(what, "columns")) d.take = takes_as_squares;
    if (is(what, "lr_scale")) d.groups[0].lr_scale = 0.5;
    return d;
}

static void muon_rank(lab_rank *r) {
    const agree_job *job = (const agree_job *)r->arg;
    const char *what = r->rank ? "same" : job->what;
    fsdp_param_desc p[4];
    fsdp_muon_desc d = muon_desc_of(what);
    fsdp_ema_desc ed = fsdp_ema_defaults();
    fsdp_muon *muon;
    fsdp_ema *ema;
    for (int i = 0; i < 4; i++) p[i] = fsdp_mat(NULL, 8, 2);
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *u = lab_unit(r->w, m, NULL, p, 4);
    CHECK_OK(fsdp_muon_create(m, &d, &muon));
    if (is(what, "ema_every")) ed.every = 2;
    if (is(what, "ema_after")) ed.after = 2;
    if (is(what, "ema_schedule")) ed.decay_at = schedule;
    if (is(what, "ema_name")) ed.name = "slow";
    CHECK_OK(fsdp_ema_create(m, &ed, &ema));
    if (is(what, "set_group")) {
        fsdp_optim_group g = d.groups[0];
        g.weight_decay = 0.02;
        CHECK_OK(fsdp_muon_set_group(muon, 0, &g));
    }
    fsdp_status status = fsdp_pre_forward(u);
    if (!status) status = fsdp_post_forward(u);
    if (!status) status = fsdp_pre_backward(u);
    for (int i = 0; i < 4 && !status; i++) (void)fsdp_grad(u, i);
    if (!status) status = fsdp_post_backward(u);
    if (!status) status = fsdp_finalize_backward(m);
    if (!status) status = fsdp_muon_step(muon, is(what, "lr") ? 0.1000001 : 0.1);
    if (!status) status = fsdp_wait_stream(m, -1);
    CHECK_STATUS(status, is(job->what, "same") ? FSDP_OK : FSDP_ERR_MISMATCH);
    if (status)
        CHECK_MSG(strstr(fsdp_last_error(r->w), "(differs in lr or another setting of the"), "%s",
                  fsdp_last_error(r->w));
    end_with(r, status);
}

TEST_P(agree, muon, muon_settings) {
    agree_job job = {row->name, NULL, 0};
    lab_run(2, NULL, muon_rank, &job);
}

/* Replicas that share the matrices: the gather over them compares lr, also without shards. */
static void muon_replicas_rank(lab_rank *r) {
    const int differs = *(int *)r->arg;
    fsdp_param_desc p = fsdp_mat("w", 16, 16);
    fsdp_muon_desc d = fsdp_muon_defaults();
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_muon *muon;
    md.mesh = lab_hsdp(r->w, 2, r->size / 2);
    d.replicas = FSDP_MUON_A_PART_EACH, d.gemm = no_product;
    fsdp_model *m = lab_model(r->w, &md);
    fsdp_unit *u = lab_unit(r->w, m, NULL, &p, 1);
    CALL(r->w, fsdp_muon_create(m, &d, &muon));
    lab_forward(r->w, u);
    CALL(r->w, fsdp_pre_backward(u));
    (void)fsdp_grad(u, 0);
    CALL(r->w, fsdp_post_backward(u));
    CALL(r->w, fsdp_finalize_backward(m));
    fsdp_status status = fsdp_muon_step(muon, differs && r->rank < r->size / 2 ? 0.02 : 0.01);
    if (!status) status = fsdp_wait_stream(m, -1);
    CHECK_STATUS(status, differs ? FSDP_ERR_MISMATCH : FSDP_OK);
    if (status) CHECK(strstr(fsdp_last_error(r->w), "(differs in lr or another setting of the"));
    end_with(r, status);
}
TEST(agree, muon_of_replicas) {
    for (int differs = 0; differs < 2; differs++)
        for (int world = 2; world <= 4; world += 2)
            lab_run(world, NULL, muon_replicas_rank, &differs);
}

/* Averages whose decay function returns another value on each rank. */
static double by_rank(void *user, int64_t step) { return (void)step, *(double *)user; }
static void ema_decay_rank(lab_rank *r) {
    double decay = *(int *)r->arg && r->rank == 0 ? 0.25 : 0.5;
    fsdp_param_desc p = fsdp_mat("w", 4, 4);
    fsdp_ema_desc d = fsdp_ema_defaults();
    fsdp_ema *ema;
    d.decay_at = by_rank, d.user = &decay;
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *u = lab_unit(r->w, m, NULL, &p, 1);
    CALL(r->w, fsdp_ema_create(m, &d, &ema));
    CALL(r->w, fsdp_ema_update(ema));
    fsdp_status status = fsdp_pre_forward(u);
    if (!status) status = fsdp_wait_stream(m, -1);
    CHECK_STATUS(status, *(int *)r->arg ? FSDP_ERR_MISMATCH : FSDP_OK);
    if (status) CHECK(strstr(fsdp_last_error(r->w), "(differs in lr or another setting of the"));
    if (!status) CALL(r->w, fsdp_post_forward(u));
    end_with(r, status);
}
TEST(agree, ema_decay) {
    for (int differs = 0; differs < 2; differs++) lab_run(2, NULL, ema_decay_rank, &differs);
}

/* Settings of fsdp_clip_grads; rank 0 differs. With replicas clipping has no collective, and the
   next one fails. */
static const struct {
    const char *name;
    double max_norm, norm_type;
    int32_t error_if_nonfinite, replicas;
} clips[] = {{"same", 1, 0, 0, 0},
             {"max_norm", 4, 2, 0, 0},
             {"norm_type", 1, 3, 0, 0},
             {"error_if_nonfinite", 1, 2, 1, 0},
             {"same_of_replicas", 1, 2, 0, 1},
             {"max_norm_of_replicas", 4, 2, 0, 1}};
typedef struct {
    fsdp_clip_desc odd;
    int replicas, differs;
} clip_job;
static void clip_rank(lab_rank *r) {
    const clip_job *job = (const clip_job *)r->arg;
    fsdp_clip_desc d = FSDP_ZERO;
    fsdp_model *m;
    fsdp_unit *u;
    d.max_norm = 1, d.norm_type = 2;
    make_pair(r->w, "none", 0, job->replicas, &m, &u);
    lab_forward(r->w, u);
    lab_backward(r->w, u);
    CHECK_OK(fsdp_finalize_backward(m));
    fsdp_status status = fsdp_clip_grads(m, r->rank ? &d : &job->odd, NULL);
    if (job->replicas) {
        CHECK_OK(status);
        CALL(r->w, fsdp_zero_grad(m));
        lab_forward(r->w, u);
        CALL(r->w, fsdp_pre_backward(u));
        for (int i = 0; i < 2; i++) (void)fsdp_grad(u, i);
        status = fsdp_post_backward(u);
        if (!status) status = fsdp_finalize_backward(m);
    }
    CHECK_STATUS(status, job->differs ? FSDP_ERR_MISMATCH : FSDP_OK);
    if (status)
        CHECK_MSG(strstr(fsdp_last_error(r->w), "setting of the optimizer or clip"), "%s",
                  fsdp_last_error(r->w));
    end_with(r, status);
}

TEST_P(agree, clip, clips) {
    clip_job job = {FSDP_ZERO, row->replicas, strncmp(row->name, "same", 4) != 0};
    job.odd.max_norm = row->max_norm, job.odd.norm_type = row->norm_type;
    job.odd.error_if_nonfinite = row->error_if_nonfinite;
    lab_run(2, NULL, clip_rank, &job);
}

/* Stages of a pipeline have their own models and optimizers, and clip together. */
static void stages_rank(lab_rank *r) {
    const fsdp_mesh *mesh = lab_mesh2(r->w, 2, 2, "pp", "dp");
    const int stage = r->rank / 2;
    fsdp_param_desc p = fsdp_mat("a", 8, 2);
    fsdp_adamw_desc d = fsdp_adamw_defaults();
    fsdp_clip_desc clip = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_adamw *adamw = NULL;
    double norm;
    CALL(r->w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_FSDP, 1, -1, &info));
    md.mesh_info = &info;
    d.weight_decay = 0.1 * stage;
    clip.max_norm = 1;
    fsdp_model *m = lab_model(r->w, &md);
    fsdp_unit *u = lab_unit(r->w, m, NULL, &p, 1);
    CALL(r->w, fsdp_adamw_create(m, &d, &adamw));
    for (int step = 0; step < 3; step++) {
        lab_forward(r->w, u);
        CALL(r->w, fsdp_pre_backward(u));
        for (int k = 0; k < 16; k++) ((float *)fsdp_grad(u, 0))[k] = 1;
        CALL(r->w, fsdp_post_backward(u));
        CALL(r->w, fsdp_finalize_backward(m));
        CALL(r->w, fsdp_clip_grads(m, &clip, &norm));
        CHECK_NEAR(norm, sqrt(32), 1e-6); /* over both stages */
        CALL(r->w, fsdp_adamw_step(adamw, 0.1 + stage));
        CALL(r->w, fsdp_zero_grad(m));
    }
    fsdp_adamw_destroy(adamw);
    fsdp_model_destroy(m);
}
TEST(agree, optimizers_of_stages) { lab_run(4, NULL, stages_rank, NULL); }

TEST_P(agree, steps_of_replicas, steps) { /* the all-reduce is the only collective */
    agree_job job = {row->name, row->text, 1};
    lab_run(2, NULL, step_rank, &job);
}

/* Rank 0 has finished one more step: its next collective fails. */
static void finished_rank(lab_rank *r) {
    fsdp_model *m;
    fsdp_unit *u;
    make_pair(r->w, "none", 0, 0, &m, &u);
    for (int step = 0; step < 2; step++) { /* the same collectives on all ranks */
        lab_forward(r->w, u);
        lab_backward(r->w, u);
        CALL(r->w, fsdp_finalize_backward(m));
    }
    if (r->rank == 0) CALL(r->w, fsdp_finalize_backward(m));
    fsdp_status status = fsdp_pre_forward(u);
    CHECK_STATUS(status, FSDP_ERR_MISMATCH);
    CHECK_MSG(strstr(fsdp_last_error(r->w), "(differs in number of finished steps)"), "%s",
              fsdp_last_error(r->w));
    end_with(r, status);
}
TEST(agree, finished_steps) { lab_run(2, NULL, finished_rank, NULL); }

/* Rank 0 drops its shard group's sums, which wait for the all-reduce, while the other rank adds
   to its sums. If the backend adds them, its op compares that. */
static void sums_rank(lab_rank *r) {
    fsdp_param_desc p = fsdp_mat("a", 8, 2);
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_status status = FSDP_OK;
    md.mesh = lab_hsdp(r->w, 2, 2);
    fsdp_model *m = lab_model(r->w, &md);
    fsdp_unit *u = lab_unit(r->w, m, NULL, &p, 1);
    CALL(r->w, fsdp_set_requires_all_reduce(m, NULL, 0));
    for (int micro = 0; micro < 2; micro++) {
        if (micro == 1 && r->rank > 1) break; /* the other group takes no part */
        lab_forward(r->w, u);
        CALL(r->w, fsdp_pre_backward(u));
        CHECK(fsdp_grad(u, 0) != NULL);
        status = fsdp_post_backward(u);
        if (!status) status = fsdp_finalize_backward(m);
        if (micro == 0) CHECK_OK(status);
        if (micro == 0) h_mark(0), h_await_marks(0, r->size); /* all ranks have come this far */
        if (micro == 0 && r->rank == 0) CALL(r->w, fsdp_model_reset(m));
    }
    if (r->rank > 1) status = fsdp_barrier(r->w);
    CHECK_STATUS(status, FSDP_ERR_MISMATCH);
    CHECK_MSG(strstr(fsdp_last_error(r->w), "differs in gradients of earlier steps"), "%s",
              fsdp_last_error(r->w));
    end_with(r, status);
}
TEST(agree, sums_that_wait) { lab_run(4, NULL, sums_rank, NULL); }

/* A reduction has the same segments on all ranks, though a rank may read the slot or the reduce
   input depending on its earlier microbatches: rank 0 has unreduced gradients, the others used
   nothing. */
static void sums_of_one_rank(lab_rank *r) {
    fsdp_param_desc p[2] = {fsdp_mat("a", 64, 16), fsdp_mat("b", 64, 16)};
    fsdp_model_desc md = FSDP_ZERO;
    md.direct_min = 1;
    fsdp_model *m = lab_model(r->w, &md);
    fsdp_unit *u = lab_unit(r->w, m, NULL, p, 2);
    fsdp_param_view v = FSDP_ZERO;
    for (int micro = 0; micro < 2; micro++) {
        CALL(r->w, fsdp_set_requires_gradient_sync(m, NULL, micro == 1));
        lab_forward(r->w, u);
        CALL(r->w, fsdp_pre_backward(u));
        for (int i = 0; i < 2 && (micro == 1 || r->rank == 0); i++) {
            float *grad = (float *)fsdp_grad(u, i);
            for (int k = 0; k < 64 * 16; k++) grad[k] += (float)(1 + i + 10 * micro);
        }
        CALL(r->w, fsdp_post_backward(u));
        CALL(r->w, fsdp_finalize_backward(m));
    }
    for (int i = 0; fsdp_next_param(m, &v); i++) /* the mean: 1 + i from rank 0, 11 + i from all */
        for (int64_t k = 0; k < v.numel; k++)
            CHECK_EQ_INT((int)(2 * ((const float *)v.shard_grad)[k]), 2 * (11 + i) + 1 + i);
}
TEST(agree, sums_of_one_rank) {
    for (int lanes = 0; lanes <= 2; lanes++) {
        lab_how how = FSDP_ZERO;
        how.lanes = lanes;
        lab_run(2, &how, sums_of_one_rank, NULL);
    }
}
