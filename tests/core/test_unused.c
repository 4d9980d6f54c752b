/* test_unused.c - parameters that a backward does not use: which have a gradient, its value, and
   whether optimizers step them; and the error texts if ranks use different parameters.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | NCCL | ONE_GPU
#include "harness.h"
#include "lab.h"
#include <math.h> /* sqrt, INFINITY */

enum { PARAMS = 3, ROWS = 8, COLS = 2, NUMEL = ROWS * COLS, MICROS = 3 };
enum { A = 1, B = 2, C = 4, ALL = A | B | C };
enum { UNVISITED = 8 }; /* backward does not reach the unit */

/* ---- parameters that have a gradient --------------------------------------------------------- */

typedef struct {
    uint8_t even, odd; /* used by ranks of even and of odd number */
    uint8_t how, end;  /* WAITS, ...; parameters with a gradient at the step's end */
} micro;
enum { WAITS = 1, SUMS_WAIT = 2, ZEROS = 4 }; /* no sync, no all_reduce, reduce_unused */
enum { END = 8, KEEP = 16 };                  /* KEEP: the gradients stay for the next step */

static const struct {
    const char *name;
    micro micros[MICROS];
} stories[] = {
    {"one_is_used", {{B, B, 0, END | B}, {A, A, 0, END | A}}},
    {"none_is_used", {{0, 0, 0, END}, {C, C, 0, END | C}}},
    {"none_is_used_zeros", {{0, 0, ZEROS, END | ALL}}},
    {"other_ones_zeros", {{A, B, ZEROS, END | ALL}}},
    {"some_ranks_zeros", {{ALL, 0, ZEROS, END | ALL}, {0, ALL, ZEROS, END | ALL}}},
    {"unvisited_zeros", {{UNVISITED, UNVISITED, ZEROS, END}}},
    {"steps_add_up", {{A, A, 0, END | A | KEEP}, {B, B, 0, END | A | B}}},
    {"without_sync", {{A, A, WAITS, 0}, {B, B, 0, END | A | B}}},
    {"without_sync_twice", {{A, A, WAITS, 0}, {C, C, WAITS, 0}, {B, B, 0, END | ALL}}},
    {"without_sync_then_none", {{A, A, WAITS, 0}, {0, 0, 0, END | A}}},
    {"without_sync_then_unvisited", {{A, A, WAITS, 0}, {UNVISITED, UNVISITED, 0, END | A}}},
    {"without_sync_others_zeros", {{A, C, WAITS | ZEROS, 0}, {B, 0, ZEROS, END | ALL}}},
    {"sums_wait", {{A, A, SUMS_WAIT, 0}, {B, B, 0, END | A | B}}},
    {"sums_wait_then_none", {{A, A, SUMS_WAIT, 0}, {0, 0, 0, END | A}}},
    {"sums_wait_then_unvisited", {{A, A, SUMS_WAIT, 0}, {UNVISITED, UNVISITED, 0, END | A}}},
    {"sums_wait_zeros", {{A, B, SUMS_WAIT | ZEROS, 0}, {C, 0, ZEROS, END | ALL}}},
    {"zeros_in_one_step", {{A, A, 0, END | A}, {A, A, ZEROS, END | ALL}, {B, B, 0, END | B}}},
    {"zeros_from_microbatch_2", {{A, A, WAITS, 0}, {0, 0, ZEROS, END | ALL}}},
    {"zeros_of_microbatch_1", {{0, 0, WAITS | ZEROS, 0}, {A, A, 0, END | ALL}}},
};

typedef struct {
    const micro *micros;
    int replicas, shards;
    fsdp_dtype param_dtype;
} story;

/* Returns rank r's gradient of parameter p in microbatch m: exact in bf16, also when it is added
   up. */
static double written(int r, int p, int m) { return 4 * m + 2 * p + 1 + r; }

static void micro_forth_and_back(lab_rank *r, fsdp_model *m, fsdp_unit *u, const micro *of, int k,
                                 fsdp_dtype dtype, double *sum) {
    CALL(r->w, fsdp_set_requires_gradient_sync(m, NULL, !(of->how & WAITS)));
    if (of->how & SUMS_WAIT) CALL(r->w, fsdp_set_requires_all_reduce(m, NULL, 0));
    CALL(r->w, fsdp_set_reduce_scatter_unused_params(m, u, of->how & ZEROS));
    lab_forward(r->w, u);
    if (of->even != UNVISITED) {
        const int used = r->rank % 2 ? of->odd : of->even;
        CALL(r->w, fsdp_pre_backward(u));
        for (int p = 0; p < PARAMS; p++) {
            void *grad = used >> p & 1 ? fsdp_grad(u, p) : NULL;
            for (int i = 0; grad && i < NUMEL; i++)
                lab_put(grad, dtype, i, lab_get(grad, dtype, i) + written(r->rank, p, k));
            for (int rank = 0; rank < r->size; rank++)
                if ((rank % 2 ? of->odd : of->even) >> p & 1) sum[p] += written(rank, p, k);
        }
        CALL(r->w, fsdp_post_backward(u));
    }
    CALL(r->w, fsdp_finalize_backward(m));
}

/* Ends a step: each parameter has the mean over all ranks, or no gradient. A parameter without a
   gradient is in no norm, and no optimizer steps it: weight decay would change it. */
static void step_ends(lab_rank *r, fsdp_model *m, fsdp_unit *u, fsdp_sgd *sgd, int has,
                      const double *sum) {
    double want = 0, norm, before[PARAMS] = {0};
    for (int p = 0; p < PARAMS; p++) {
        const fsdp_param_view v = lab_view(r->w, u, p);
        const double mean = has >> p & 1 ? sum[p] / r->size : 0;
        CHECK_MSG(!v.shard_grad == !(has >> p & 1), "parameter %d has %s gradient", p,
                  v.shard_grad ? "a" : "no");
        for (int64_t i = 0; i < v.numel && v.shard_grad; i++)
            CHECK_NEAR(((const float *)v.shard_grad)[i], mean, 1e-6);
        if (v.numel) before[p] = (double)((const float *)v.shard)[0];
        want += NUMEL * mean * mean;
    }
    CALL(r->w, fsdp_clip_grad_norm(m, (double)INFINITY, &norm));
    CHECK_NEAR(norm, sqrt(want), 1e-5 * sqrt(want));
    CALL(r->w, fsdp_sgd_step(sgd, 0.5));
    for (int p = 0; p < PARAMS; p++) {
        const fsdp_param_view v = lab_view(r->w, u, p);
        if (!v.numel) continue;
        const double after = (double)((const float *)v.shard)[0];
        const double mean = sum[p] / r->size, step = 0.5 * (mean + 0.25 * before[p]);
        CHECK_NEAR(after, has >> p & 1 ? before[p] - step : before[p], 1e-5);
    }
}

static void story_rank(lab_rank *r) {
    const story *s = (const story *)r->arg;
    const fsdp_dtype dtype = s->param_dtype ? s->param_dtype : FSDP_F32;
    fsdp_param_desc params[PARAMS] = {fsdp_mat("a", ROWS, COLS), fsdp_mat("b", ROWS, COLS),
                                      fsdp_mat("c", ROWS, COLS)};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_sgd_desc sd = fsdp_sgd_defaults();
    fsdp_sgd *sgd;
    double sum[PARAMS] = {0};
    if (s->replicas > 1) md.mesh = lab_hsdp(r->w, s->replicas, s->shards);
    ud.param_dtype = s->param_dtype;
    ud.reduce_dtype = FSDP_F32;
    sd.weight_decay = 0.25;
    fsdp_model *m = lab_model(r->w, &md);
    fsdp_unit *u = lab_unit(r->w, m, &ud, params, PARAMS);
    CALL(r->w, fsdp_model_commit(m));
    for (int p = 0; p < PARAMS; p++) {
        const fsdp_param_view v = lab_view(r->w, u, p);
        for (int64_t i = 0; i < v.numel; i++) ((float *)v.shard)[i] = 8;
    }
    CALL(r->w, fsdp_sgd_create(m, &sd, &sgd));
    for (int k = 0; k < MICROS; k++) {
        const micro *of = &s->micros[k];
        micro_forth_and_back(r, m, u, of, k, dtype, sum);
        if (!of->end) continue;
        step_ends(r, m, u, sgd, of->end & ALL, sum);
        if (of->end & KEEP) continue;
        CALL(r->w, fsdp_zero_grad(m));
        memset(sum, 0, sizeof sum);
        for (int p = 0; p < PARAMS; p++) CHECK(!lab_view(r->w, u, p).shard_grad);
    }
    fsdp_sgd_destroy(sgd);
}

/* On one rank, sharded, over replicas, and both: gradients with and without a cast. */
TEST_P(unused, gradients, stories) {
    static const int worlds[][2] = {{1, 1}, {1, 2}, {2, 1}, {2, 2}, {1, 3}};
    for (int k = 0; k < 4 * (int)(sizeof worlds / sizeof *worlds); k++) {
        story s = {row->micros, worlds[k / 4][0], worlds[k / 4][1], k % 2 ? FSDP_BF16 : 0};
        lab_how how = FSDP_ZERO;
        how.lanes = k / 2 % 2;
        lab_run(s.replicas * s.shards, &how, story_rank, &s);
    }
}

/* ---- ranks that use different parameters ----------------------------------------------------- */

/* Returns rank k's part of the message: from its name to the next one. */
static const char *part_of_rank(const char *text, int k, size_t *length) {
    const char *first = strstr(text, "disagree: rank 0: ");
    const char *second = first ? strstr(first, "; rank 1: ") : NULL;
    CHECK_MSG(second, "%s", text);
    *length = k ? strlen(second) : (size_t)(second - first);
    return k ? second : first;
}

static int says(const char *part, size_t length, const char *word) {
    const char *at = strstr(part, word);
    return at && at + strlen(word) <= part + length;
}

typedef struct {
    int used[2], replicas;
} pair;

static void pair_rank(lab_rank *r) {
    static const char *const unused[] = {"a", "b", "a", "c", "a", "b", "a"}; /* by mask of used */
    const pair *job = (const pair *)r->arg;
    fsdp_param_desc params[PARAMS] = {fsdp_mat("a", ROWS, COLS), fsdp_mat("b", ROWS, COLS),
                                      fsdp_mat("c", ROWS, COLS)};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    if (job->replicas) md.mesh = lab_hsdp(r->w, 2, 1);
    ud.name = "three";
    fsdp_model *m = lab_model(r->w, &md);
    fsdp_unit *u = lab_unit(r->w, m, &ud, params, PARAMS);
    lab_forward(r->w, u);
    CALL(r->w, fsdp_pre_backward(u));
    for (int p = 0; p < PARAMS; p++)
        if (job->used[r->rank] >> p & 1) CHECK(fsdp_grad(u, p));
    fsdp_status status = fsdp_post_backward(u);
    if (!status) status = fsdp_barrier(r->w); /* meets the rank that has used none */
    if (job->used[0] == job->used[1]) {
        CHECK_OK(status);
        return;
    }
    CHECK_STATUS(status, FSDP_ERR_MISMATCH);
    const char *text = fsdp_last_error(r->w);
    CHECK_MSG(strstr(text, "fsdp_set_reduce_scatter_unused_params"), "%s", text);
    const int both = job->used[0] && job->used[1];
    CHECK_MSG(!both || strstr(text, "(differs in parameters that have a gradient ("), "%s", text);
    for (int k = 0; k < 2; k++) {
        char word[64];
        size_t length;
        const char *part = part_of_rank(text, k, &length);
        if (!job->used[k]) continue;
        CHECK_MSG(says(part, length, " of 'three'"), "%s", text);
        snprintf(word, sizeof word, ", without a gradient of '%s'",
                 job->used[k] == ALL ? "" : unused[job->used[k]]);
        if (job->used[k] == ALL) word[strlen(word) - 2] = 0; /* no name follows */
        CHECK_MSG(says(part, length, word) == (job->used[k] != ALL), "%s", text);
    }
    CHECK_STATUS(fsdp_shutdown(r->w), FSDP_ERR_MISMATCH);
    r->w = NULL;
}

static const struct {
    const char *name;
    int replicas;
} groups[] = {{"shards", 0}, {"replicas", 1}};

/* All pairs of sets, also those with the same first parameter without a gradient. */
TEST_P(unused, ranks_disagree, groups) {
    /* An all-reduce over replicas, and with NCCL each reduction, is in another group than the
       barrier of a rank that used none. */
    const char *backend = getenv("FSDP_BACKEND");
    const int least = row->replicas || (backend && !strcmp(backend, "nccl"));
    for (int a = least; a <= ALL; a++)
        for (int b = least; b <= a; b++) {
            pair job = {{a, b}, row->replicas};
            lab_run(2, NULL, pair_rank, &job);
        }
}
