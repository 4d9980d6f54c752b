/* test_uneven.c - tensor parallelism that divides rows unevenly: ranks that share a group have
   allocated tensors of different sizes. FSDP over dp for the divided parameter, HSDP over (dp, tp)
   for the other, clipping over both, and collectives of activations over tp; compared with one
   process.
   SPDX-License-Identifier: MIT */
#define TAGS GLOO
#include "harness.h"
#include <math.h> // fabs, sqrt
#include "lab.h"

/* 33 and 32 rows over two ranks of tp: their sizes in pages differ. */
enum { ROWS = 65, COLS = 1024, CUT = ROWS * COLS, WHOLE = 257, STEPS = 3, ACTIVATION = 3000 };
enum { PARAM_CUT = 0, PARAM_WHOLE = 1 };

typedef struct form {
    const char *name;
    int threads, lanes, dp, tp;
    int order; /* 0: `whole` has mesh (dp, tp); 1: all ranks shard it; 2: and it is made first */
} form;
#define FORMS(mode, threads)                                                                       \
    {mode "/2x2", threads, 0, 2, 2, 0}, {mode "/2x2/lanes=1", threads, 1, 2, 2, 0},                \
        {mode "/2x2/lanes=2", threads, 2, 2, 2, 0}, {mode "/1x2", threads, 0, 1, 2, 0}, {          \
        mode "/1x3/lanes=2", threads, 2, 1, 3, 0                                                   \
    }
#define FORMS_OF_ALL(mode, threads)                                                                \
    {mode "/2x2/all", threads, 0, 2, 2, 1}, {mode "/2x2/all first", threads, 0, 2, 2, 2},          \
        {mode "/1x2/all", threads, 0, 1, 2, 1}, {                                                  \
        mode "/1x3/all first/lanes=2", threads, 2, 1, 3, 2                                         \
    }
static const form forms[] = {FORMS("processes", 0), FORMS("threads", 1),
                             FORMS_OF_ALL("processes", 0), FORMS_OF_ALL("threads", 1)};

typedef struct training {
    const form *f;
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *cut, *whole;
    int rank, step;
    fsdp_range rows;     /* rows of the cut parameter on this rank's tp group */
    float *weight, *one; /* one process: CUT elements, then WHOLE; and gradients */
} training;

/* Returns a gradient: a small whole number, so that sums are exact; different on each rank. */
static float gradient(const training *t, int rank, int e) {
    uint64_t state = (uint64_t)((t->step * 64 + rank) * 100000 + e);
    return (float)((int)(h_rand64(&state) % 19) - 9);
}

/* Runs the step of one process: means over the ranks that have an element, the norm, a clipped
   update. Returns the norm. */
static double reference(training *t, double max_norm, float rate) {
    double sum = 0;
    for (int e = 0; e < CUT + WHOLE; e++) {
        int holders = 0;
        float total = 0;
        for (int rank = 0; rank < t->f->dp * t->f->tp; rank++) {
            fsdp_range rows;
            CALL(NULL, fsdp_shard_range(ROWS, t->f->tp, rank % t->f->tp, &rows));
            int has = e >= CUT || (e / COLS >= rows.start && e / COLS < rows.start + rows.count);
            if (has) total += gradient(t, rank, e), holders++;
        }
        t->one[e] = total / (float)holders;
        sum += (double)t->one[e] * (double)t->one[e];
    }
    double norm = sqrt(sum), scale = norm > max_norm ? max_norm / (norm + 1e-6) : 1;
    for (int e = 0; e < CUT + WHOLE; e++) t->weight[e] -= rate * (float)((double)t->one[e] * scale);
    return norm;
}

/* Returns the index, in one process's elements, of element e of a unit's parameter. */
static int place_of(const training *t, int param, int64_t e) {
    return (int)(param == PARAM_WHOLE ? CUT + e : t->rows.start * COLS + e);
}

static int param_of(const training *t, const fsdp_unit *unit) {
    return unit == t->cut ? PARAM_CUT : PARAM_WHOLE;
}

static void check_data(const training *t, fsdp_unit *unit) {
    int param = param_of(t, unit);
    int64_t count = param == PARAM_WHOLE ? WHOLE : t->rows.count * COLS;
    const float *data = (const float *)fsdp_data(unit, 0);
    for (int64_t e = 0; e < count; e++) {
        double wanted = (double)t->weight[place_of(t, param, e)];
        W_CHECK(fabs((double)data[e] - wanted) <= 1e-5 * (1 + fabs(wanted)),
                "step %d: weight %d of parameter %d is %g, expected %g", t->step, (int)e, param,
                (double)data[e], wanted);
    }
}

static void add_gradients(const training *t, fsdp_unit *unit) {
    int param = param_of(t, unit);
    int64_t count = param == PARAM_WHOLE ? WHOLE : t->rows.count * COLS;
    float *grad = (float *)fsdp_grad(unit, 0);
    for (int64_t e = 0; e < count; e++) grad[e] += gradient(t, t->rank, place_of(t, param, e));
}

static void step(training *t, fsdp_unit *const *units, double max_norm) {
    const float rate = 0.25f;
    double norm;
    for (int u = 0; u < 2; u++) {
        CALL(t->w, fsdp_pre_forward(units[u]));
        check_data(t, units[u]);
        CALL(t->w, fsdp_post_forward(units[u]));
    }
    for (int u = 1; u >= 0; u--) {
        CALL(t->w, fsdp_pre_backward(units[u]));
        add_gradients(t, units[u]);
        CALL(t->w, fsdp_post_backward(units[u]));
    }
    CALL(t->w, fsdp_finalize_backward(t->m));
    CALL(t->w, fsdp_clip_grad_norm(t->m, max_norm, &norm));
    double wanted = reference(t, max_norm, rate);
    W_CHECK(fabs(norm - wanted) <= 1e-9 * wanted, "the norm is %.17g, expected %.17g", norm,
            wanted);
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(t->m, &v))
        for (int64_t k = 0; k < v.numel; k++)
            ((float *)v.shard)[k] -= rate * ((const float *)v.shard_grad)[k];
    CALL(t->w, fsdp_params_changed(t->m));
    CALL(t->w, fsdp_zero_grad(t->m));
}

/* Runs collectives of activations, as an extension does, with its own buffers, over the tp
   group, whose members have allocated different sizes before. */
static void activations(const training *t, const fsdp_mesh_info *info) {
    const fsdp_comm_ops *ops;
    fsdp_comm *comm = lib_comm(t->w, &ops);
    int n = info->replicate_mesh_size, me = info->replicate_mesh_rank;
    fsdp_seg seg = {0, 0, ACTIVATION};
    size_t bytes = (size_t)(ACTIVATION * n) * sizeof(float);
    float *src, *dst;
    CALL(t->w, ops->alloc(comm, bytes, (void **)&src));
    CALL(t->w, ops->alloc(comm, bytes, (void **)&dst));
    for (int round = 0; round < 4; round++) {
        fsdp_coll c;
        memset(&c, 0, sizeof c);
        c.kind = (uint8_t)(round == 0   ? FSDP_OP_ALL_GATHER
                           : round == 1 ? FSDP_OP_REDUCE_SCATTER
                           : round == 2 ? FSDP_OP_ALL_TO_ALL
                           : me         ? FSDP_OP_RECV
                                        : FSDP_OP_SEND);
        c.dtype = c.out_dtype = FSDP_F32, c.scale = 1, c.what = "activation";
        c.src = src, c.dst = dst, c.count = ACTIVATION;
        if (round < 2) c.segs = &seg, c.num_segs = 1;
        if (round == 3) c.root = !me;
        if (round == 3 && me > 1) continue;
        for (int i = 0; i < ACTIVATION * n; i++) src[i] = (float)(me * 100000 + i);
        fsdp_status status = ops->run(info->replicate_comm, &c);
        W_CHECK(!status, "%s", ops->error_text(info->replicate_comm));
        for (int i = 0; i < ACTIVATION; i++) {
            int k = n - 1, mine = me * ACTIVATION + i; /* the last member's data */
            float got = dst[round == 1 || round == 3 ? i : k * ACTIVATION + i];
            float wanted = round == 0   ? (float)(k * 100000 + i)
                           : round == 1 ? (float)(n * mine + 100000 * (n * (n - 1) / 2))
                           : round == 2 ? (float)(k * 100000 + mine)
                                        : (float)i;
            if (round == 3 && !me) continue; /* rank 0 has sent */
            W_CHECK(fabs((double)(got - wanted)) < 0.5, "round %d: element %d is %g, expected %g",
                    round, i, (double)got, (double)wanted);
        }
    }
    ops->free(comm, dst, bytes);
    ops->free(comm, src, bytes);
}

static void add_units(training *t, const fsdp_mesh_info *whole, const fsdp_mesh_info *dp) {
    fsdp_param_desc cut = fsdp_mat("cut", t->rows.count, COLS), vec = fsdp_vec("whole", WHOLE);
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO, wd = FSDP_ZERO;
    fsdp_param_view v = FSDP_ZERO;
    md.mesh_info = whole;
    md.debug = 1;
    t->m = lab_model(t->w, &md);
    ud.mesh_info = dp;
    if (t->f->order) {
        fsdp_mesh *all;
        CALL(t->w, fsdp_mesh_1d(t->w, NULL, &all));
        wd.mesh = all;
    }
    for (int u = 0; u < 2; u++)
        if (u == (t->f->order == 2)) t->cut = lab_unit(t->w, t->m, &ud, &cut, 1);
        else t->whole = lab_unit(t->w, t->m, &wd, &vec, 1);
    CALL(t->w, fsdp_model_commit(t->m));
    for (int e = 0; e < CUT + WHOLE; e++) t->weight[e] = (float)(e % 31 - 15) / 8;
    while (fsdp_next_param(t->m, &v))
        for (int64_t k = 0; k < v.numel; k++)
            ((float *)v.shard)[k] =
                t->weight[place_of(t, param_of(t, v.unit), fsdp_view_index(&v, k))];
    CALL(t->w, fsdp_params_changed(t->m));
}

static void train(lab_rank *r) {
    const form *f = (const form *)r->arg;
    const fsdp_mesh *mesh = lab_mesh2(r->w, f->dp, f->tp, "dp", "tp");
    fsdp_mesh_info whole, dp;
    training t;
    memset(&t, 0, sizeof t);
    t.f = f, t.w = r->w, t.rank = r->rank;
    snprintf(w_case, sizeof w_case, "%s rank %d", f->name, r->rank);
    t.weight = (float *)lab_zeros(2 * (CUT + WHOLE), sizeof(float));
    t.one = t.weight + CUT + WHOLE;
    CALL(t.w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_HSDP, 0, 1, &whole));
    CALL(t.w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_FSDP, 0, -1, &dp));
    CALL(t.w, fsdp_shard_range(ROWS, f->tp, r->rank % f->tp, &t.rows));
    add_units(&t, &whole, &dp);
    fsdp_unit *units[2] = {t.cut, t.whole};
    for (; t.step < STEPS; t.step++) {
        step(&t, units, t.step == 1 ? 1e9 : 50); /* clipped, not clipped, clipped */
        activations(&t, &whole);
    }
    for (int u = 0; u < 2; u++) {
        CALL(t.w, fsdp_pre_forward(units[u]));
        check_data(&t, units[u]);
        CALL(t.w, fsdp_post_forward(units[u]));
    }
    lab_end(r);
    free(t.weight);
}

TEST_P(uneven, tensor_parallel_parts, forms) {
    lab_how how = FSDP_ZERO;
    how.job = "uneven", how.processes = !row->threads, how.lanes = row->lanes;
    lab_run(row->dp * row->tp, &how, train, (void *)(uintptr_t)row);
}
