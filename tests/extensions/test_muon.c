/* test_muon.c - Muon on shards: against PyTorch and f64, the same bits on any number of ranks and on
   any mesh, owners, flights, bytes and memory by formula, states, and what it refuses.

   SPDX-License-Identifier: MIT */
#define TAGS BITS | GLOO | NCCL
#include "harness.h"
#include "golden.h"
#include <math.h> /* sqrt */
#include "lab_net.h"

/* On a device (stand-ins; memory that the host can read) the product of the host, in the order of the
   stream: so results have the bits of the host. */
static fsdp_status gemm_of_host(void *user, void *stream, int64_t m, int64_t n, int64_t k,
                                float alpha, const void *a, int64_t lda, int a_transposed,
                                const void *b, int64_t ldb, int b_transposed, float beta, void *c,
                                int64_t ldc, fsdp_dtype dtype) {
    static __thread char room[FSDP_HOST_GEMM_BYTES] __attribute__((aligned(64)));
    (void)user;
    lib_wait(stream);
    return fsdp_host_gemm(room, NULL, m, n, k, alpha, a, lda, a_transposed, b, ldb, b_transposed,
                          beta, c, ldc, dtype);
}
static fsdp_muon_desc defaults_for(const fsdp_world *w) {
    fsdp_muon_desc d = fsdp_muon_defaults();
    if (lib_on_streams(w)) d.gemm = gemm_of_host;
    return d;
}

/* ---- PyTorch's numbers ----------------------------------------------------------------------- */

typedef struct { /* of a case, and of one step of all ranks */
    fsdp_muon_desc desc;
    double lr;
    int64_t rows, columns;
    uint64_t param, grad;
    const double *before, *step, *torch, *buffer; /* [rows * columns] */
    int number;
} muon_step;

enum { GOLDEN_NUMEL = 4096, GOLDEN_STEPS = 3 };

static void golden_rows(void *user, const fsdp_param_view *block) {
    const muon_step *g = (const muon_step *)user;
    for (int64_t k = 0; k < block->numel; k++)
        ((float *)block->data)[k] =
            (float)golden_value(g->param, (uint64_t)fsdp_view_index(block, k), 1);
}

/* The difference of two arrays relative to the length of the update. */
static double apart(const float *got, const double *want, const double *before, int64_t numel) {
    double difference = 0, update = 0;
    for (int64_t i = 0; i < numel; i++) {
        difference += pow((double)got[i] - want[i], 2);
        update += pow(want[i] - before[i], 2);
    }
    return sqrt(difference / update);
}

static void train_case(lab_rank *r) {
    const muon_step *steps = (const muon_step *)r->arg;
    const int64_t numel = steps->rows * steps->columns;
    fsdp_param_desc p = fsdp_mat("w", steps->rows, steps->columns);
    fsdp_model *model = lab_model(r->w, NULL);
    fsdp_unit *unit = lab_unit(r->w, model, NULL, &p, 1);
    fsdp_muon *muon = NULL;
    float *full = (float *)lab_zeros((size_t)numel, sizeof *full);
    CALL(r->w, fsdp_init_params(model, golden_rows, (void *)(uintptr_t)steps));
    fsdp_muon_desc desc = steps->desc;
    desc.gemm = defaults_for(r->w).gemm;
    CALL(r->w, fsdp_muon_create(model, &desc, &muon));
    for (const muon_step *g = steps; g->number && g < steps + GOLDEN_STEPS; g++) {
        fsdp_state_item item = FSDP_ZERO;
        fsdp_param_view v;
        lab_forward(r->w, unit);
        CALL(r->w, fsdp_pre_backward(unit));
        golden_fill((float *)fsdp_grad(unit, 0), g->grad + (uint64_t)g->number, numel, 2);
        CALL(r->w, fsdp_post_backward(unit));
        CALL(r->w, fsdp_finalize_backward(model));
        CALL(r->w, fsdp_muon_step(muon, g->lr));
        CALL(r->w, fsdp_zero_grad(model));
        CALL(r->w, fsdp_param_full(unit, 0, full));
        const double exact = apart(full, g->step, g->before, numel),
                     theirs = apart(full, g->torch, g->before, numel);
        CHECK_MSG(exact < 2e-4 && theirs < 0.06, "step %d, %d ranks: %g of the update from f64, %g "
                                                 "from PyTorch",
                  g->number, r->size, exact, theirs);
        CALL(r->w, fsdp_next_state(model, &item));
        CHECK(!strcmp(item.name, "momentum_buffer") && item.sharded && item.dtype == FSDP_F32);
        v = lab_view(r->w, unit, 0);
        CHECK_EQ_INT(item.numel, v.numel);
        for (int64_t k = 0; k < v.numel; k++)
            CHECK(fabs((double)((float *)item.data)[k] - g->buffer[fsdp_view_index(&v, k)]) < 1e-6);
    }
    free(full);
}

TEST(golden_muon, cases) {
    static double numbers[4][GOLDEN_STEPS + 1][GOLDEN_NUMEL];
    golden g;
    int cases = 0;
    GOLDEN_OPEN(&g, "muon.txt", "muon");
    while (golden_case(&g)) {
        muon_step all[GOLDEN_STEPS + 1], *s = all;
        int64_t numel = 0;
        memset(all, 0, sizeof all);
        s->desc = fsdp_muon_defaults();
        while (golden_line(&g)) {
            if (golden_is(&g, "muon")) {
                s->lr = golden_num(&g), s->desc.weight_decay = golden_num(&g);
                s->desc.momentum = golden_num(&g), s->desc.nesterov = (int)golden_int(&g);
                s->desc.ns_steps = (int)golden_int(&g), s->desc.adjust = (int)golden_int(&g);
            } else if (golden_is(&g, "matrix")) {
                s->rows = golden_int(&g), s->columns = golden_int(&g);
                s->param = golden_seed(&g), s->grad = golden_seed(&g);
                numel = s->rows * s->columns;
                CHECK(numel <= GOLDEN_NUMEL);
                golden_fill_f64(numbers[0][0], s->param, numel, 1);
            } else if (numel && golden_is(&g, "step")) {
                const int k = (int)golden_int(&g);
                CHECK(k >= 1 && k <= GOLDEN_STEPS);
                all[k] = all[0]; /* the last one is the first of the next */
                golden_nums(&g, numel, numbers[0][k]);
            } else if (numel && golden_is(&g, "torch")) {
                const int k = (int)golden_int(&g);
                golden_nums(&g, numel, numbers[1][k]);
            } else if (numel && golden_is(&g, "buf")) {
                const int k = (int)golden_int(&g);
                golden_nums(&g, numel, numbers[2][k]);
                all[k].number = k, all[k].before = numbers[0][k - 1], all[k].step = numbers[0][k];
                all[k].torch = numbers[1][k], all[k].buffer = numbers[2][k];
            }
        }
        if (!numel || g.error[0]) continue; /* EMA */
        cases++;
        for (int world = 1; world <= 3; world += 2) lab_run(world, NULL, train_case, all + 1);
    }
    GOLDEN_CLOSE(&g);
    CHECK(cases > 0);
    h_message("%d matrices, on 1 rank and on 3", cases);
}

/* ---- a net on any number of ranks ------------------------------------------------------------ */

enum { NUM = 12, UNITS = 4, STEPS = 4 };

/* Wide, tall, square, of one row, cut by columns, of more dims, without elements, not a multiple of
   anything; and others, which are AdamW's. The tag is the group. */
static const lab_param rows_of[NUM] = {
    {0, "a.w", FSDP_F32, 0, 0, 2, 0, {7, 12}},  {0, "a.b", FSDP_F32, 0, 0, 1, 0, {7}},
    {0, "a.t", FSDP_F32, 0, 0, 2, 0, {13, 5}},  {1, "b.s", FSDP_F32, 1, 0, 2, 0, {8, 8}},
    {1, "b.k", FSDP_F32, 0, 0, 2, 1, {6, 10}},  {1, "b.r", FSDP_F32, 0, 0, 2, 0, {1, 9}},
    {1, "b.z", FSDP_F32, 0, 0, 2, 0, {0, 4}},   {2, "c.f", FSDP_F32, 0, 0, 3, 1, {4, 3, 5}},
    {2, "c.w", FSDP_F32, 0, 0, 2, 0, {16, 16}}, {2, "c.x", FSDP_F32, 0, 1, 2, 0, {4, 4}},
    {3, "d.h", FSDP_BF16, 0, 0, 2, 0, {9, 6}},  {3, "d.b", FSDP_BF16, 0, 0, 1, 0, {5}}};
static const lab_net the_net = {rows_of, NUM, UNITS};

typedef struct {
    const char *name;
    int lanes, replicas, ddp, how; /* replicas: of HSDP; how: what they do */
    int64_t flight_bytes;
    fsdp_dtype dtype;
    int planned;
} setting;

typedef struct {
    const setting *s;
    uint64_t bits; /* of rank 0: of all parameters after each step */
    int64_t flights;
} outcome;

static int group_of(void *user, const fsdp_param_view *v) {
    (void)user;
    return ((const lab_param *)v->user)->tag;
}
static int is_others(void *user, const fsdp_param_view *v) {
    return fsdp_muon_takes((const fsdp_muon *)user, v) ? -1 : 0;
}

static fsdp_muon_desc desc_of_net(const fsdp_world *w, const setting *s) {
    fsdp_muon_desc d = defaults_for(w);
    d.flatten = 1, d.replicas = s->how, d.num_groups = 2, d.group = group_of;
    d.groups[1].lr_scale = 0.5, d.groups[1].weight_decay = 0;
    if (s->flight_bytes) d.flight_bytes = s->flight_bytes;
    if (s->dtype) d.dtype = s->dtype;
    return d;
}

/* Gradients of few digits, so that the mean over the ranks, who all have the same, is exact. Some
   parameters have none in some steps. */
static void backward(const lab_built *m, int step, int all) {
    lab_forwards(m);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(m->w, fsdp_pre_backward(m->unit[u]));
        for (int p = 0; p < NUM; p++) {
            if (rows_of[p].unit != u || m->frozen[p] || (!all && (step + p) % 5 == 0)) continue;
            void *grad = lab_grad(m, p);
            for (int64_t i = 0; i < lab_numel_of(&the_net, p); i++)
                lab_put(grad, rows_of[p].dtype, i,
                        floor(golden_value((uint64_t)(100 * step + p), (uint64_t)i, 64)) / 16);
        }
        CALL(m->w, fsdp_post_backward(m->unit[u]));
    }
    CALL(m->w, fsdp_finalize_backward(m->model));
}

static uint64_t bits_of(const lab_built *m, uint64_t bits) {
    static __thread char full[LAB_NUMEL * 8];
    for (int p = 0; p < NUM; p++) {
        CALL(m->w, fsdp_param_full(lab_unit_of(m, p), m->index[p], full));
        for (size_t i = 0; i < lab_nbytes_of(&the_net, p); i++)
            bits = (bits ^ (unsigned char)full[i]) * 0x100000001B3u;
    }
    return bits;
}

static void build(lab_rank *r, const setting *s, lab_built *m) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    if (s->ddp) {
        fsdp_mesh *mesh;
        CALL(r->w, fsdp_mesh_1d(r->w, "dp", &mesh));
        CALL(r->w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &info));
        md.mesh_info = &info;
    } else if (s->replicas) {
        md.mesh = lab_hsdp(r->w, s->replicas, r->size / s->replicas);
    }
    lab_build(m, &the_net, r->w, &md);
    CALL(r->w, fsdp_init_params(m->model, lab_fill, NULL));
}

static void train_net(lab_rank *r) {
    outcome *o = (outcome *)r->arg;
    fsdp_muon_desc d = desc_of_net(r->w, o->s);
    fsdp_adamw_desc a = fsdp_adamw_defaults();
    fsdp_muon *muon;
    fsdp_adamw *adamw;
    fsdp_plan *plan;
    lab_built m;
    uint64_t bits = 1;
    int64_t before = 0;
    build(r, o->s, &m);
    CALL(r->w, fsdp_muon_create(m.model, &d, &muon));
    a.group = is_others, a.user = muon;
    CALL(r->w, fsdp_adamw_create(m.model, &a, &adamw));
    if (o->s->planned) CALL(r->w, fsdp_plan_create(m.model, NULL, &plan));
    for (int step = 0; step < STEPS; step++) {
        backward(&m, step, 0);
        if (step == STEPS - 1) before = w_allocations(r->heap);
        CALL(r->w, fsdp_muon_step(muon, 0.02 * (step + 1)));
        if (step == STEPS - 1 && !getenv("FSDP_BACKEND")) /* there servers of the store allocate */
            CHECK_EQ_INT(w_allocations(r->heap), before);
        CALL(r->w, fsdp_adamw_step(adamw, 0.01));
        CALL(r->w, fsdp_zero_grad(m.model));
        bits = bits_of(&m, bits);
    }
    if (r->rank == 0) o->bits = bits;
}

static uint64_t bits_by(int world, const setting *s) {
    outcome o = {s, 0, 0};
    lab_how how = FSDP_ZERO;
    how.job = "muon", how.lanes = s->lanes;
    lab_run(world, &how, train_net, &o);
    return o.bits;
}

static const setting settings[] = {{"inline", 0, 0, 0, 0, 0, 0, 0},
                                   {"small_flights", 0, 0, 0, 0, 400, 0, 0},
                                   {"one_each", 0, 0, 0, 0, 1, 0, 0},
                                   {"lanes", 2, 0, 0, 0, 400, 0, 0},
                                   {"planned", 0, 0, 0, 0, 400, 0, 1},
                                   {"ddp", 0, 0, 1, 0, 400, 0, 0},
                                   {"ddp_a_part_each", 0, 0, 1, FSDP_MUON_A_PART_EACH, 400, 0, 0}};

TEST_P(muon, same_bits, settings) {
    static const setting plain = {"plain", 0, 0, 0, 0, 0, 0, 0};
    const uint64_t want = bits_by(1, &plain);
    for (int world = 1; world <= 5; world++)
        CHECK_MSG(bits_by(world, row) == want, "%d ranks have other bits than one", world);
}

static const setting hsdp[] = {{"by_bytes", 0, 2, 0, FSDP_MUON_BY_BYTES, 400, 0, 0},
                               {"all_each", 2, 2, 0, FSDP_MUON_ALL_EACH, 400, 0, 0},
                               {"a_part_each", 2, 2, 0, FSDP_MUON_A_PART_EACH, 400, 0, 0},
                               {"three", 0, 3, 0, FSDP_MUON_A_PART_EACH, 0, 0, 0}};

TEST_P(muon, replicas, hsdp) {
    static const setting plain = {"plain", 0, 0, 0, 0, 0, 0, 0};
    CHECK(bits_by(row->replicas * 2, row) == bits_by(1, &plain));
}
