/* test_muon.c - Muon on shards: compared with PyTorch and f64; equal bits on any number of ranks
   and on any mesh; owners, buckets, bytes and memory by formula, states, and errors.

   SPDX-License-Identifier: MIT */
#define TAGS BITS | GLOO | NCCL
#include "harness.h"
#include "golden.h"
#include "lab_muon.h"
#include <math.h> /* sqrt */
#include "lab_net.h"

/* ---- PyTorch's numbers ----------------------------------------------------------------------- */

typedef struct { /* a case, and one step of it on all ranks */
    fsdp_muon_desc desc;
    double lr;
    int64_t rows, columns;
    uint64_t param, grad;
    const double *before, *step, *torch, *buffer; /* [rows * columns] each */
    int number;
} muon_step;

enum { GOLDEN_NUMEL = 4096, GOLDEN_STEPS = 3 };

static void golden_rows(void *user, const fsdp_param_view *block) {
    const muon_step *g = (const muon_step *)user;
    for (int64_t k = 0; k < block->numel; k++)
        ((float *)block->data)[k] = (float)golden_value(g->param,
                                                        (uint64_t)fsdp_view_index(block, k), 1);
}

/* Returns the difference of two arrays relative to the length of the update. */
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
    desc.gemm = lab_muon_defaults(r->w).gemm;
    CALL(r->w, fsdp_muon_create(model, &desc, &muon));
    for (const muon_step *g = steps; g < steps + GOLDEN_STEPS && g->number; g++) {
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
        CHECK_MSG(exact < 2e-4 && theirs < 0.06,
                  "step %d, %d ranks: %g of the update from f64, %g "
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
                all[k] = all[0]; /* the last of a step is the first of the next */
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
        if (!numel || g.error[0]) continue; /* a case of EMA */
        cases++;
        for (int world = 1; world <= 3; world += 2) lab_run(world, NULL, train_case, all + 1);
    }
    GOLDEN_CLOSE(&g);
    CHECK(cases > 0);
    h_message("%d matrices, on 1 rank and on 3", cases);
}

/* ---- a net on any number of ranks ------------------------------------------------------------ */

enum { NUM = 12, UNITS = 4, STEPS = 4 };

/* Wide, tall, square, with one row, sharded by columns, with more dims, without elements, with odd
   sizes; and parameters for AdamW. The tag is the group. */
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
    int lanes, replicas, ddp, how; /* replicas: for HSDP; how: see fsdp_muon_desc.replicas */
    int64_t bucket_bytes;
    fsdp_dtype dtype;
    int planned, columns;
} setting;

typedef struct {
    const setting *s;
    uint64_t bits; /* hash of all parameters after each step, on rank 0 */
    int64_t buckets;
} outcome;

static int group_of(void *user, const fsdp_param_view *v) {
    (void)user;
    return ((const lab_param *)v->user)->tag;
}
/* Returns 5 for c.f, which makes it 12 x 5; flattened it would be 4 x 15. */
static int as_columns(void *user, const fsdp_param_view *v) {
    (void)user;
    return v->ndim == 3 ? 5 : v->ndim == 2;
}
static int is_others(void *user, const fsdp_param_view *v) {
    return fsdp_muon_takes((const fsdp_muon *)user, v) ? -1 : 0;
}

static fsdp_muon_desc desc_of_net(const fsdp_world *w, const setting *s) {
    fsdp_muon_desc d = lab_muon_defaults(w);
    d.flatten = !s->columns, d.replicas = s->how, d.num_groups = 2, d.group = group_of;
    d.groups[1].lr_scale = 0.5, d.groups[1].weight_decay = 0;
    if (s->bucket_bytes) d.bucket_bytes = s->bucket_bytes;
    if (s->dtype) d.dtype = s->dtype;
    if (s->columns) d.take = as_columns;
    return d;
}

/* Gradients have few digits, so that the mean over ranks, which have equal ones, is exact. Some
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
        /* with a backend, servers of the store allocate */
        if (step == STEPS - 1 && !getenv("FSDP_BACKEND"))
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

static const setting settings[] = {
    {"inline", 0, 0, 0, 0, 0, 0, 0, 0},
    {"small_buckets", 0, 0, 0, 0, 400, 0, 0, 0},
    {"one_each", 0, 0, 0, 0, 1, 0, 0, 0},
    {"lanes", 2, 0, 0, 0, 400, 0, 0, 0},
    {"planned", 0, 0, 0, 0, 400, 0, 1, 0},
    {"ddp", 0, 0, 1, 0, 400, 0, 0, 0},
    {"ddp_a_part_each", 0, 0, 1, FSDP_MUON_A_PART_EACH, 400, 0, 0, 0}};

TEST_P(muon, same_bits, settings) {
    static const setting plain = {"plain", 0, 0, 0, 0, 0, 0, 0, 0};
    const uint64_t want = bits_by(1, &plain);
    for (int world = 1; world <= 5; world++)
        CHECK_MSG(bits_by(world, row) == want, "%d ranks have other bits than one", world);
}

/* Columns that the caller names give another matrix than the flattened one, on any number of ranks.
   */
TEST(muon, columns_of_take) {
    static const setting plain = {"plain", 0, 0, 0, 0, 0, 0, 0, 0};
    static const setting named = {"named", 0, 0, 0, 0, 400, 0, 0, 1};
    const uint64_t one = bits_by(1, &named);
    CHECK(one != bits_by(1, &plain));
    for (int world = 2; world <= 4; world++) CHECK(bits_by(world, &named) == one);
}

static const setting hsdp[] = {{"by_bytes", 0, 2, 0, FSDP_MUON_BY_BYTES, 400, 0, 0, 0},
                               {"all_each", 2, 2, 0, FSDP_MUON_ALL_EACH, 400, 0, 0, 0},
                               {"a_part_each", 2, 2, 0, FSDP_MUON_A_PART_EACH, 400, 0, 0, 0},
                               {"three", 0, 3, 0, FSDP_MUON_A_PART_EACH, 0, 0, 0, 0}};

TEST_P(muon, replicas, hsdp) {
    static const setting plain = {"plain", 0, 0, 0, 0, 0, 0, 0, 0};
    CHECK(bits_by(row->replicas * 2, row) == bits_by(1, &plain));
}

/* Microbatches, a scaler, clipping and changing groups give equal bits on any number of ranks. The
   clipping limit is never reached, as norms differ between numbers of ranks in the last bit. */
typedef struct {
    int with_scaler; /* also with microbatches and clipping */
    uint64_t bits;
} company;
static void train_in_company(lab_rank *r) {
    static const setting s = {"", 0, 0, 0, 0, 400, 0, 0, 0};
    company *c = (company *)r->arg;
    fsdp_muon_desc d = desc_of_net(r->w, &s);
    fsdp_grad_scaler_desc sd = FSDP_ZERO;
    fsdp_grad_scaler *scaler;
    fsdp_optim_group g = fsdp_muon_defaults().groups[0];
    fsdp_muon *muon;
    lab_built m;
    uint64_t bits = 1;
    double norm;
    sd.init_scale = 1024;
    build(r, &s, &m);
    CALL(r->w, fsdp_muon_create(m.model, &d, &muon));
    CALL(r->w, fsdp_grad_scaler_create(m.model, &sd, &scaler));
    CHECK_STATUS(fsdp_muon_set_group(muon, 2, &g), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_muon_set_group(NULL, 0, &g), FSDP_ERR_INVALID_ARG);
    for (int step = 0; step < STEPS; step++) {
        if (c->with_scaler) {
            fsdp_set_requires_gradient_sync(m.model, NULL, 0);
            backward(&m, step + 7, 0);
            fsdp_set_requires_gradient_sync(m.model, NULL, 1);
        }
        backward(&m, step, 0);
        if (c->with_scaler) {
            CALL(r->w, fsdp_grad_scaler_unscale(scaler));
            CALL(r->w, fsdp_clip_grad_norm(m.model, 1e9, &norm));
            CHECK(norm > 0 && !fsdp_grad_scaler_found_inf(scaler));
        }
        const uint64_t before = bits_of(&m, 1);
        for (int k = 0; k < 2 && step == STEPS - 1; k++) { /* in the last step no group learns */
            g.lr_scale = 0, g.weight_decay = 0;
            CALL(r->w, fsdp_muon_set_group(muon, k, &g));
        }
        CALL(r->w, fsdp_muon_step(muon, 0.02));
        if (c->with_scaler) CALL(r->w, fsdp_grad_scaler_update(scaler));
        CALL(r->w, fsdp_zero_grad(m.model));
        CHECK((bits_of(&m, 1) == before) == (step == STEPS - 1));
        bits = bits_of(&m, bits);
    }
    fsdp_muon_destroy(muon);
    if (r->rank == 0) c->bits = bits;
}
TEST(muon, groups_scaler_clipping_microbatches) {
    company one[2] = {{0, 0}, {1, 0}};
    for (int k = 0; k < 2; k++) {
        lab_run(1, NULL, train_in_company, &one[k]);
        for (int world = 2; world <= 3; world++) {
            company c = {k, 0};
            lab_run(world, NULL, train_in_company, &c);
            CHECK_MSG(c.bits == one[k].bits, "%d ranks have other bits than one", world);
        }
    }
    CHECK(one[0].bits != one[1].bits);
}

/* The defaults are those of torch.optim.Muon. */
TEST(muon, defaults) {
    const fsdp_muon_desc d = fsdp_muon_defaults();
    CHECK(d.weight_decay > 0.0999 && d.weight_decay < 0.1001);
    CHECK(d.momentum > 0.9499 && d.momentum < 0.9501 && d.eps > 0.99e-7 && d.eps < 1.01e-7);
    CHECK_EQ_INT(d.nesterov, 1);
    CHECK_EQ_INT(d.ns_steps, 5);
    CHECK_EQ_INT(d.adjust, FSDP_MUON_ORIGINAL);
    CHECK_EQ_INT(d.replicas, FSDP_MUON_BY_BYTES);
    CHECK_EQ_INT(d.dtype, FSDP_F32);
    CHECK_EQ_INT(d.bucket_bytes, 64 << 20);
}

/* A product that fails ends the world with its status. */
static fsdp_status no_gemm(void *user, void *stream, int64_t m, int64_t n, int64_t k, float alpha,
                           const void *a, int64_t lda, int a_transposed, const void *b, int64_t ldb,
                           int b_transposed, float beta, void *c, int64_t ldc, fsdp_dtype dtype) {
    (void)user, (void)stream, (void)m, (void)n, (void)k, (void)alpha, (void)a, (void)lda;
    (void)a_transposed, (void)b, (void)ldb, (void)b_transposed, (void)beta, (void)c, (void)ldc;
    return dtype == FSDP_F32 ? FSDP_ERR_BACKEND : FSDP_OK;
}
static void fail_to_multiply(lab_rank *r) {
    static const setting s = {"", 0, 0, 0, 0, 0, 0, 0, 0};
    fsdp_muon_desc d = desc_of_net(r->w, &s);
    fsdp_muon *muon;
    lab_built m;
    d.gemm = no_gemm;
    build(r, &s, &m);
    CALL(r->w, fsdp_muon_create(m.model, &d, &muon));
    backward(&m, 0, 1);
    fsdp_status status = fsdp_muon_step(muon, 0.02);
    if (!status) status = fsdp_wait_stream(m.model, -1);
    CHECK_STATUS(status, FSDP_ERR_BACKEND);
    CHECK_STATUS(fsdp_world_status(r->w), FSDP_ERR_BACKEND);
}
TEST(muon, failing_product) { lab_run(1, NULL, fail_to_multiply, NULL); }

/* If take no longer takes a matrix after a cast, the step is refused. */
static int takes_f32(void *user, const fsdp_param_view *v) {
    (void)user;
    return v->dtype == FSDP_F32;
}
static void take_changes(lab_rank *r) {
    fsdp_param_desc p = fsdp_mat("w", 4, 4);
    fsdp_model *model = lab_model(r->w, NULL);
    fsdp_unit *unit = lab_unit(r->w, model, NULL, &p, 1);
    fsdp_muon_desc d = lab_muon_defaults(r->w);
    fsdp_muon *muon;
    d.take = takes_f32;
    CALL(r->w, fsdp_muon_create(model, &d, &muon));
    CALL(r->w, fsdp_model_cast(model, FSDP_BF16));
    lab_forward(r->w, unit);
    CALL(r->w, fsdp_pre_backward(unit));
    CHECK(fsdp_grad(unit, 0));
    CALL(r->w, fsdp_post_backward(unit));
    CALL(r->w, fsdp_finalize_backward(model));
    REFUSED(r->w, fsdp_muon_step(muon, 0.02), "what it did when Muon was made");
}
/* AdamW was made while a matrix was frozen, and has it since the thaw: Muon does not take it as
   well. */
static void thawed_for_both(lab_rank *r) {
    fsdp_param_desc p = fsdp_mat("w", 4, 4);
    p.frozen = 1;
    fsdp_model *model = lab_model(r->w, NULL);
    fsdp_unit *unit = lab_unit(r->w, model, NULL, &p, 1);
    fsdp_muon_desc d = lab_muon_defaults(r->w);
    fsdp_adamw *adamw;
    fsdp_muon *muon;
    CALL(r->w, fsdp_adamw_create(model, NULL, &adamw));
    CALL(r->w, fsdp_set_requires_grad(unit, 0, 1));
    REFUSED(r->w, fsdp_muon_create(model, &d, &muon), "[E9020] muon_create: adamw has");
}
TEST(muon, thawed_for_both) { lab_run(1, NULL, thawed_for_both, NULL); }

/* An optimizer that the library does not know marks the parameters that it updates. */
static fsdp_status marked_item(void *user, fsdp_model *model, int index, fsdp_state_item *item) {
    (void)model;
    if (!item || index) return FSDP_OK;
    item->name = "mine", item->updates = *(int *)user;
    item->ordinal = 0;
    return FSDP_OK;
}
static void marked_by_another(lab_rank *r) {
    fsdp_param_desc p = fsdp_mat("w", 4, 4);
    fsdp_model *model = lab_model(r->w, NULL);
    lab_unit(r->w, model, NULL, &p, 1);
    fsdp_muon_desc d = lab_muon_defaults(r->w);
    fsdp_extension mine = FSDP_ZERO;
    int mark = FSDP_UPDATES_ELEMENTS;
    fsdp_adamw *adamw;
    fsdp_muon *muon;
    mine.name = "mine", mine.state = marked_item, mine.user = &mark;
    CALL(r->w, fsdp_attach(model, &mine));
    REFUSED(r->w, fsdp_muon_create(model, &d, &muon), "[E9020] muon_create: mine has");
    CALL(r->w, fsdp_adamw_create(model, NULL, &adamw)); /* updates in the same way */
    fsdp_adamw_destroy(adamw);
    mark = FSDP_UPDATES_MATRIX;
    REFUSED(r->w, fsdp_adamw_create(model, NULL, &adamw), "[E9020] adamw_create: mine has");
    mark = FSDP_UPDATES_NONE; /* as an average */
    CALL(r->w, fsdp_muon_create(model, &d, &muon));
    fsdp_optim_state state;
    CALL(r->w, fsdp_optim_state_get(muon, 0, &state));
    CHECK(state.first && !state.second && state.numel == 16 && *state.step == 0);
}
TEST(muon, marked_by_another) { lab_run(1, NULL, marked_by_another, NULL); }

TEST(muon, take_changes) { lab_run(1, NULL, take_changes, NULL); }

/* ---- owners, buckets, bytes and memory, computed once more ----------------------------------- */

enum { MATRICES = 10 };

typedef struct {
    const char *name;
    int64_t shapes[MATRICES][2]; /* {0, 0}: end of the list */
    int64_t bucket_bytes;
    fsdp_dtype dtype;
} plan_row;

static const plan_row plans[] = {
    {"equal",
     {{12, 8}, {12, 8}, {12, 8}, {12, 8}, {12, 8}, {12, 8}, {12, 8}, {12, 8}, {12, 8}, {12, 8}},
     1,
     FSDP_F32},
    {"mixed", {{12, 8}, {7, 9}, {24, 8}, {8, 24}, {3, 3}, {16, 16}, {1, 5}}, 2000, FSDP_F32},
    {"one_bucket", {{12, 8}, {7, 9}, {24, 8}, {8, 24}, {3, 3}, {16, 16}, {1, 5}}, 0, FSDP_F32},
    {"bf16", {{12, 8}, {7, 9}, {24, 8}, {8, 24}, {3, 3}, {16, 16}, {1, 5}}, 700, FSDP_BF16}};

typedef struct {
    int num, buckets, owner[MATRICES], bucket[MATRICES];
    int64_t part[MATRICES], sent, most; /* elements: of each bucket, of all, of the largest */
} expected_plan;

/* The longest matrix goes to the owner with the least work. Then, from the last matrix on, a bucket
   ends where an owner would have too much. */
static void expect_plan(const plan_row *row, int ranks, expected_plan *e) {
    double work[8] = {0};
    int64_t whole[8] = {0}, parts[8] = {0};
    int taken[MATRICES] = {0};
    const int64_t limit = (row->bucket_bytes ? row->bucket_bytes : 64 << 20) /
                          (int64_t)fsdp_dtype_size(row->dtype);
    memset(e, 0, sizeof *e);
    while (e->num < MATRICES && row->shapes[e->num][0]) e->num++;
    for (int n = 0; n < e->num; n++) {
        double longest = -1;
        int which = -1, to = 0;
        for (int i = 0; i < e->num; i++) {
            const double r = (double)row->shapes[i][0], c = (double)row->shapes[i][1];
            if (!taken[i] && r * c * fmin(r, c) > longest) longest = r * c * fmin(r, c), which = i;
        }
        for (int k = 1; k < ranks; k++)
            if (work[k] < work[to]) to = k;
        taken[which] = 1, e->owner[which] = to, work[to] += longest;
    }
    for (int i = e->num - 1; i >= 0; i--) {
        const int64_t numel = row->shapes[i][0] * row->shapes[i][1];
        const int k = e->owner[i];
        if (e->buckets == 0 || (whole[k] && whole[k] + numel > limit)) {
            e->buckets++;
            memset(whole, 0, sizeof whole), memset(parts, 0, sizeof parts);
        }
        whole[k] += numel;
        parts[k] += (row->shapes[i][0] + ranks - 1) / ranks * row->shapes[i][1];
        e->bucket[i] = e->buckets - 1;
        if (parts[k] > e->part[e->buckets - 1]) e->part[e->buckets - 1] = parts[k];
    }
    for (int f = 0; f < e->buckets; f++) {
        e->sent += e->part[f];
        if (e->part[f] > e->most) e->most = e->part[f];
    }
}

static int64_t align_to(int64_t nbytes, int64_t to) { return (nbytes + to - 1) / to * to; }

static void check_plan(lab_rank *r) {
    const plan_row *row = (const plan_row *)r->arg;
    const int64_t size = (int64_t)fsdp_dtype_size(row->dtype), ranks = r->size;
    fsdp_param_desc p[MATRICES];
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_muon_desc d = lab_muon_defaults(r->w);
    fsdp_muon *muon;
    fsdp_unit *unit;
    fsdp_memory before, after;
    expected_plan e;
    lab_log log = {NULL, 0, 0};
    char text[400], want[160];
    uint64_t bytes = 0, calls = 0;
    int mine = 0;
    int64_t square = 0, largest = 0;
    expect_plan(row, r->size, &e);
    for (int i = 0; i < e.num; i++) {
        const int64_t *s = row->shapes[i], least = s[0] < s[1] ? s[0] : s[1];
        p[i] = fsdp_mat(NULL, s[0], s[1]);
        mine += e.owner[i] == r->rank;
        if (least * least > square) square = least * least;
        if (s[0] * s[1] > largest) largest = s[0] * s[1];
    }
    fsdp_model *model = lab_model(r->w, NULL);
    unit = lab_unit(r->w, model, &ud, p, e.num);
    CALL(r->w, fsdp_init_params(model, lab_fill, NULL));
    if (row->bucket_bytes) d.bucket_bytes = row->bucket_bytes;
    d.dtype = row->dtype;
    CALL(r->w, fsdp_model_memory(model, &before));
    CALL(r->w, fsdp_muon_create(model, &d, &muon));
    CALL(r->w, fsdp_model_memory(model, &after));
    /* memory: the pool and nbytes */
    const int pool = fsdp_pool_register(model, "muon");
    const int64_t unit_of = W_ASAN ? 1 : 64,
                  sent = (ranks > 1 ? 4 : 1) * align_to(ranks * e.most * size, unit_of),
                  room = 64 + 2 * align_to(largest * 4, 64) + 2 * align_to(square * 4, 64) +
                         (d.gemm ? 0 : FSDP_HOST_GEMM_BYTES);
    if (!lib_on_streams(r->w) && !W_ASAN) {
        CHECK_EQ_INT(after.pool_bytes[pool], sent + room);
        CHECK_EQ_INT(fsdp_muon_nbytes(muon), after.host_bytes - before.host_bytes + sent + room);
    }
    /* ops and bytes of a step */
    lab_watch(&log, r->w, model);
    lab_forward(r->w, unit);
    CALL(r->w, fsdp_pre_backward(unit));
    for (int i = 0; i < e.num; i++)
        memset(fsdp_grad(unit, i), 1, (size_t)(row->shapes[i][0] * row->shapes[i][1]) * 4);
    CALL(r->w, fsdp_post_backward(unit));
    CALL(r->w, fsdp_finalize_backward(model));
    const int first = log.num;
    CALL(r->w, fsdp_muon_step(muon, 0.1));
    for (int n = first; n < log.num; n++) {
        const fsdp_op *op = &log.ops[n];
        if (op->kind == FSDP_OP_ALL_TO_ALL) bytes += op->bytes, calls++;
        CHECK(op->kind == FSDP_OP_ALL_TO_ALL || op->stream == FSDP_STREAM_COMPUTE ||
              op->kind >= FSDP_OP_HOOK);
    }
    CHECK_EQ_INT((int64_t)calls, ranks > 1 ? 2 * e.buckets : 0);
    CHECK_EQ_INT((int64_t)bytes, 2 * (ranks - 1) * e.sent * size);
    if (!strcmp(row->name, "equal") && 12 % ranks == 0 && e.num % ranks == 0) /* the minimum */
        CHECK_EQ_INT((int64_t)bytes * ranks * ranks, 2 * (ranks - 1) * e.num * 12 * 8 * size);
    CHECK_EQ_INT(lab_count_ops(&log, first, FSDP_OP_CALL, -1, NULL), 2 * 5 * mine);
    /* bucket i+1 is sent before bucket i is computed */
    int sent_at[MATRICES] = {0}, bucket = 0;
    for (int n = first; ranks > 1 && n < log.num && bucket < e.buckets; n++)
        if (log.ops[n].kind == FSDP_OP_ALL_TO_ALL) sent_at[bucket++] = n;
    if (ranks > 1 && e.buckets > 1)
        CHECK(lab_count_ops(&log, first, FSDP_OP_CALL, -1, NULL) == 0 ||
              lab_next_op(&log, first, FSDP_OP_CALL, -1, NULL) > sent_at[1]);
    snprintf(want, sizeof want,
             "%d matrices, of which this rank computes %d; %d buckets; receives %lld bytes", e.num,
             mine, e.buckets, (long long)bytes);
    CHECK(fsdp_muon_describe(muon, text, sizeof text) < sizeof text);
    CHECK_MSG(strstr(text, want), "'%s' has not '%s'", text, want);
    free(log.ops);
}

TEST_P(muon, owners_buckets_bytes, plans) {
    for (int world = 1; world <= 5; world++)
        lab_run(world, NULL, check_plan, (void *)(uintptr_t)row);
}

/* The two matrices of each of two owners fill bucket_bytes exactly: one bucket. */
static void full_bucket(lab_rank *r) {
    for (int less = 0; less < 2; less++) {
        fsdp_muon_desc d = lab_muon_defaults(r->w);
        fsdp_param_desc p[4];
        fsdp_muon *muon;
        char text[400];
        for (int i = 0; i < 4; i++) p[i] = fsdp_mat(NULL, 16, 16);
        fsdp_model *m = lab_model(r->w, NULL);
        (void)lab_unit(r->w, m, NULL, p, 4);
        d.bucket_bytes = 2 * 16 * 16 * (int64_t)sizeof(float) - less;
        CALL(r->w, fsdp_muon_create(m, &d, &muon));
        (void)fsdp_muon_describe(muon, text, sizeof text);
        CHECK_MSG(strstr(text, less ? "; 2 buckets;" : "; 1 buckets;"), "%s", text);
        fsdp_model_destroy(m);
    }
}
TEST(muon, full_bucket) { lab_run(2, NULL, full_bucket, NULL); }

/* ---- HSDP: bytes decide ---------------------------------------------------------------------- */

static void check_replicas(lab_rank *r) {
    static const struct {
        int replicas, how, spreads;
    } rows[] = {{2, FSDP_MUON_BY_BYTES, 1},
                {2, FSDP_MUON_ALL_EACH, 0},
                {4, FSDP_MUON_BY_BYTES, 0}, /* nothing is sent if each rank computes all */
                {4, FSDP_MUON_A_PART_EACH, 1}};
    for (int i = 0; i < 4; i++) {
        setting s = {"", 0, rows[i].replicas, 0, rows[i].how, 0, 0, 0, 0};
        fsdp_muon_desc d = desc_of_net(r->w, &s);
        fsdp_muon *muon;
        lab_built m;
        char text[400];
        build(r, &s, &m);
        CALL(r->w, fsdp_muon_create(m.model, &d, &muon));
        (void)fsdp_muon_describe(muon, text, sizeof text);
        CHECK_MSG((strstr(text, "each replica computes a part") != NULL) == rows[i].spreads,
                  "%d: %s", i, text);
        fsdp_model_destroy(m.model);
    }
}
TEST(muon, replicas_by_bytes) { lab_run(4, NULL, check_replicas, NULL); }

/* ---- freeze and thaw; states ----------------------------------------------------------------- */

/* A frozen matrix keeps its momentum, and uses it after a thaw. */
static void freeze(lab_rank *r) {
    static const setting s = {"", 0, 0, 0, 0, 400, 0, 0, 0};
    static __thread char full[2][LAB_NUMEL * 8];
    fsdp_muon_desc d = desc_of_net(r->w, &s);
    fsdp_muon *muon;
    lab_built m;
    build(r, &s, &m);
    CALL(r->w, fsdp_muon_create(m.model, &d, &muon));
    for (int step = 0; step < 6; step++) {
        if (step == 2) lab_freeze(&m, 0, 1), lab_freeze(&m, 9, 0);
        if (step == 4) lab_freeze(&m, 0, 0);
        CALL(r->w, fsdp_param_full(m.unit[0], 0, full[0]));
        backward(&m, step, 1);
        CALL(r->w, fsdp_muon_step(muon, 0.02));
        CALL(r->w, fsdp_zero_grad(m.model));
        CALL(r->w, fsdp_param_full(m.unit[0], 0, full[1]));
        CHECK((memcmp(full[0], full[1], lab_nbytes_of(&the_net, 0)) != 0) == !m.frozen[0]);
    }
    uint64_t *bits = (uint64_t *)r->arg;
    const uint64_t found = bits_of(&m, 1);
    if (r->rank == 0) *bits = found;
}
TEST(muon, freeze_and_thaw) {
    uint64_t one = 0, three = 0;
    lab_run(1, NULL, freeze, &one);
    lab_run(3, NULL, freeze, &three);
    CHECK(one == three);
}

typedef struct {
    const char *dir;
    int load, save;
    uint64_t bits;
} resume;
static void train_and_save(lab_rank *r) {
    static const setting s = {"", 0, 0, 0, 0, 400, 0, 0, 0};
    resume *c = (resume *)r->arg;
    fsdp_muon_desc d = desc_of_net(r->w, &s);
    fsdp_muon *muon;
    fsdp_checkpoint *ck;
    lab_built m;
    build(r, &s, &m);
    CALL(r->w, fsdp_muon_create(m.model, &d, &muon));
    CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &ck));
    if (c->load) {
        char path[4096];
        int64_t step;
        CALL(r->w, fsdp_checkpoint_find(ck, c->dir, 3, path, sizeof path, &step));
        CALL(r->w, fsdp_checkpoint_load(ck, path, NULL));
    }
    for (int step = c->load ? 3 : 0; step < 6; step++) {
        if (step == 3 && c->save) CALL(r->w, fsdp_checkpoint_save(ck, c->dir, 3));
        backward(&m, step, 0);
        CALL(r->w, fsdp_muon_step(muon, 0.02));
        CALL(r->w, fsdp_zero_grad(m.model));
    }
    uint64_t bits = bits_of(&m, 1);
    if (r->rank == 0) c->bits = bits;
}
TEST(muon, checkpoints) {
    resume whole = {h_tmpdir(), 0, 1, 0};
    lab_run(3, NULL, train_and_save, &whole);
    for (int world = 1; world <= 4; world++) {
        resume c = {whole.dir, 1, 0, 0};
        lab_run(world, NULL, train_and_save, &c);
        CHECK_MSG(c.bits == whole.bits, "%d ranks go on with other bits", world);
    }
}

/* The state of torch.optim.Muon is momentum_buffer only: a load needs no more than such a file. */
enum { TORCH_ROWS = 5, TORCH_COLUMNS = 4, TORCH_NUMEL = TORCH_ROWS * TORCH_COLUMNS };
static void write_as_torch(const char *path) {
    float data[2 * TORCH_NUMEL];
    fsdp_safetensors_entry e[2];
    char header[1024];
    memset(e, 0, sizeof e);
    for (int i = 0; i < 2 * TORCH_NUMEL; i++) data[i] = (float)(i - 7) / 8;
    for (int i = 0; i < 2; i++) {
        e[i].name = i ? "optim.state.h.w.momentum_buffer" : "h.w";
        e[i].dtype = FSDP_F32, e[i].ndim = 2;
        e[i].shape[0] = TORCH_ROWS, e[i].shape[1] = TORCH_COLUMNS;
    }
    const int64_t size = fsdp_safetensors_print(e, 2, 0, NULL, NULL, 0, header, sizeof header);
    FILE *f = fopen(path, "wb");
    CHECK(f && size > 0 && size <= (int64_t)sizeof header);
    for (int i = 0; i < 8; i++) fputc((int)((uint64_t)size >> 8 * i & 255), f);
    CHECK(fwrite(header, 1, (size_t)size, f) == (size_t)size);
    CHECK(fwrite(data, sizeof *data, 2 * TORCH_NUMEL, f) == 2 * TORCH_NUMEL && !fclose(f));
}
static void load_of_torch(lab_rank *r) {
    const fsdp_muon_desc d = lab_muon_defaults(r->w);
    fsdp_param_desc p = fsdp_mat("w", TORCH_ROWS, TORCH_COLUMNS);
    fsdp_state_item item = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_checkpoint *ck;
    fsdp_muon *muon;
    fsdp_model *model = lab_model(r->w, NULL);
    ud.name = "h";
    fsdp_unit *unit = lab_unit(r->w, model, &ud, &p, 1);
    CALL(r->w, fsdp_muon_create(model, &d, &muon));
    CALL(r->w, fsdp_checkpoint_create(model, NULL, &ck));
    CALL(r->w, fsdp_checkpoint_load(ck, (const char *)r->arg, NULL));
    const fsdp_param_view v = lab_view(r->w, unit, 0);
    CALL(r->w, fsdp_next_state(model, &item));
    for (int64_t k = 0; k < v.numel; k++) {
        const double at = (double)fsdp_view_index(&v, k);
        CHECK_NEAR((double)((float *)v.shard)[k], (at - 7) / 8, 0);
        CHECK_NEAR((double)((float *)item.data)[k], (at + TORCH_NUMEL - 7) / 8, 0);
    }
    CALL(r->w, fsdp_next_state(model, &item));
    CHECK_MSG(!item.name, "Muon has a state '%s', too, that PyTorch lacks", item.name);
}
TEST(muon, loads_the_state_of_torch) {
    char path[512];
    snprintf(path, sizeof path, "%s/torch.safetensors", h_tmpdir());
    write_as_torch(path);
    for (int world = 1; world <= 3; world++) lab_run(world, NULL, load_of_torch, path);
}

/* ---- what it refuses ------------------------------------------------------------------------- */

static int takes_all(void *user, const fsdp_param_view *v) { return (void)user, v != NULL; }
static int takes_seven_columns(void *user, const fsdp_param_view *v) {
    return (void)user, v->ndim > 1 ? 7 : 0;
}
static int takes_matrices(void *user, const fsdp_param_view *v) { return (void)user, v->ndim == 2; }
static void refused(const lab_rank *r, fsdp_model *model, const fsdp_muon_desc *d,
                    fsdp_status status, const char *text) {
    fsdp_muon *muon = (fsdp_muon *)(void *)&muon;
    CHECK_STATUS(fsdp_muon_create(model, d, &muon), status);
    CHECK(muon == NULL);
    CHECK_MSG(strstr(fsdp_last_error(r->w), text), "'%s' has not '%s'", fsdp_last_error(r->w),
              text);
}
static void refuse(lab_rank *r) {
    static const setting s = {"", 0, 0, 0, 0, 0, 0, 0, 0};
    const fsdp_muon_desc good = lab_muon_defaults(r->w);
    const fsdp_status bad = FSDP_ERR_INVALID_ARG;
    fsdp_muon_desc d = FSDP_ZERO;
    fsdp_muon *muon = NULL;
    lab_built m;
    build(r, &s, &m);
    const int64_t live = r->heap->live;
    refused(r, m.model, &d, bad,
            "[E921] muon_create: the desc does not come from fsdp_muon_defaults()");
#define REFUSE(field, value, text) d = good, d.field = value, refused(r, m.model, &d, bad, text)
    REFUSE(momentum, 1, "desc.momentum is 1");
    REFUSE(weight_decay, -1, "desc.weight_decay is -1");
    REFUSE(eps, LAB_NAN, "desc.eps is");
    REFUSE(eps, 0, "[E930] muon_create: desc.eps is 0, expected a finite number >= 1e-30");
    REFUSE(a, LAB_INF, "desc.a is inf");
    REFUSE(c, -LAB_INF, "desc.c is -inf");
    REFUSE(ns_steps, 0,
           "[E930] muon_create: desc.ns_steps is 0, expected a finite number >= 1 and < 100");
    REFUSE(adjust, 3, "desc.adjust is 3");
    REFUSE(replicas, -1, "desc.replicas is -1");
    REFUSE(bucket_bytes, 0, "desc.bucket_bytes is 0");
    REFUSE(dtype, FSDP_F16, "[E9014] muon_create: desc.dtype is f16");
    REFUSE(num_groups, 9, "desc.num_groups is 9");
    REFUSE(take, takes_all,
           "[E9010] muon_create: Muon would take parameter 'a.b' of unit 'unit0' (desc.take: 1), "
           "which "
           "has 1 dims and is f32; expected 2 dims");
    REFUSE(take, takes_seven_columns, "(desc.take: 7)");
    d = good, d.take = takes_all;
    d.flatten = 1;
    refused(r, m.model, &d, bad, "[E9010]");
    CHECK_STATUS(fsdp_muon_create(NULL, NULL, &muon), bad);
    CHECK_STATUS(fsdp_muon_create(m.model, NULL, NULL), bad);
    CHECK_STATUS(fsdp_muon_step(NULL, 1), bad);
    CHECK(!fsdp_muon_takes(NULL, NULL) && fsdp_muon_nbytes(NULL) == 0);
    CHECK_EQ_INT(r->heap->live, live);
    d = good, d.take = takes_matrices;
    CALL(r->w, fsdp_muon_create(m.model, &d, &muon));
    CHECK_STATUS(fsdp_muon_step(muon, LAB_NAN), bad);
    CHECK(strstr(fsdp_last_error(r->w), "[E934] muon_step: lr is"));
    lab_forward(r->w, m.unit[0]);
    CALL(r->w, fsdp_pre_backward(m.unit[0]));
    CHECK_STATUS(fsdp_muon_step(muon, 1), FSDP_ERR_INVALID_STATE);
    CALL(r->w, fsdp_post_backward(m.unit[0]));
    CALL(r->w, fsdp_finalize_backward(m.model));
    fsdp_param_desc wide = fsdp_mat("e.w", 4, 4);
    fsdp_model *other = lab_model(r->w, NULL);
    wide.dtype = FSDP_F64;
    (void)lab_unit(r->w, other, NULL, &wide, 1);
    refused(r, other, &good, bad, "is f64; expected f32, bf16 or f16");
}
TEST(muon, refuses) { lab_run(2, NULL, refuse, NULL); }

static void refuse_tp(lab_rank *r) {
    fsdp_mesh *mesh = lab_mesh2(r->w, 2, 2, "dp", "tp");
    fsdp_mesh_info info;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc p = fsdp_mat("w", 4, 4);
    fsdp_muon_desc d = lab_muon_defaults(r->w);
    CALL(r->w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_FSDP, 0, -1, &info));
    md.mesh_info = &info;
    fsdp_model *model = lab_model(r->w, &md);
    (void)lab_unit(r->w, model, NULL, &p, 1);
    refused(r, model, &d, FSDP_ERR_INVALID_ARG, "tensor parallelism cuts it");
}
TEST(muon, refuses_tensor_parallelism) { lab_run(4, NULL, refuse_tp, NULL); }

/* A mesh dim of one rank shards nothing. */
static void tp_of_one(lab_rank *r) {
    fsdp_mesh *mesh = lab_mesh2(r->w, r->size, 1, "dp", "tp");
    fsdp_mesh_info info;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc p = fsdp_mat("w", 4, 4);
    fsdp_muon_desc d = lab_muon_defaults(r->w);
    fsdp_muon *muon;
    CALL(r->w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_FSDP, 0, -1, &info));
    md.mesh_info = &info;
    fsdp_model *model = lab_model(r->w, &md);
    (void)lab_unit(r->w, model, NULL, &p, 1);
    CALL(r->w, fsdp_muon_create(model, &d, &muon));
}
TEST(muon, tensor_parallelism_of_one_rank) { lab_run(2, NULL, tp_of_one, NULL); }

/* Without a matrix there is nothing to update, and no warning. */
static __thread int warnings;
static void count_warnings(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)code, (void)rank, (void)text, (void)user;
    warnings += level <= FSDP_LOG_WARN;
}
static void no_matrix(lab_rank *r) {
    fsdp_param_desc p = fsdp_vec("v", 4);
    fsdp_muon_desc d = lab_muon_defaults(r->w);
    fsdp_muon *muon;
    fsdp_model *model = lab_model(r->w, NULL);
    (void)lab_unit(r->w, model, NULL, &p, 1);
    CALL(r->w, fsdp_muon_create(model, &d, &muon));
    warnings = 0;
    for (int step = 0; step < 2; step++) CALL(r->w, fsdp_muon_step(muon, 0.1));
    CHECK_EQ_INT(warnings, 0);
}
TEST(muon, no_matrix) {
    w_log = count_warnings;
    lab_run(2, NULL, no_matrix, NULL);
}

/* A matrix has one optimizer: the second one is refused, and the text names both. */
static void both_have(lab_rank *r) {
    static const setting s = {"", 0, 0, 0, 0, 0, 0, 0, 0};
    const fsdp_muon_desc d = desc_of_net(r->w, &s);
    fsdp_adamw_desc a = fsdp_adamw_defaults();
    const char *const advice =
        "desc.group of AdamW or SGD returns -1 where fsdp_muon_takes returns 1";
    fsdp_adamw *adamw, *second;
    fsdp_checkpoint *ck;
    fsdp_muon *muon;
    fsdp_sgd *sgd;
    fsdp_ema *ema;
    lab_built m;
    build(r, &s, &m);
    CALL(r->w, fsdp_ema_create(m.model, NULL, &ema)); /* it updates no weights */
    CALL(r->w, fsdp_adamw_create(m.model, NULL, &adamw));
    refused(
        r, m.model, &d, FSDP_ERR_INVALID_ARG,
        "[E9020] muon_create: adamw has parameter 'a.w' of unit 'unit0' already, and muon would");
    CHECK(strstr(fsdp_last_error(r->w), advice));
    fsdp_adamw_destroy(adamw);
    CALL(r->w, fsdp_muon_create(m.model, &d, &muon));
    CHECK_STATUS(fsdp_adamw_create(m.model, NULL, &adamw), FSDP_ERR_INVALID_ARG);
    CHECK(!adamw &&
          strstr(fsdp_last_error(r->w), "[E9020] adamw_create: muon has parameter 'a.w'"));
    CHECK_STATUS(fsdp_sgd_create(m.model, NULL, &sgd), FSDP_ERR_INVALID_ARG);
    CHECK(!sgd && strstr(fsdp_last_error(r->w), "[E9020] sgd_create: muon has parameter 'a.w'"));
    a.group = is_others, a.user = muon;
    CALL(r->w, fsdp_adamw_create(m.model, &a, &adamw));
    CALL(r->w, fsdp_adamw_create(m.model, &a, &second));
    CHECK_STATUS(fsdp_checkpoint_create(m.model, NULL, &ck), FSDP_ERR_INVALID_ARG);
    CHECK_MSG(strstr(fsdp_last_error(r->w), "two optimizers have this state of one parameter"),
              "%s", fsdp_last_error(r->w));
    fsdp_adamw_destroy(second);
    CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &ck));
}
TEST(muon, one_optimizer_each) { lab_run(2, NULL, both_have, NULL); }

/* Each allocation of create fails once: create fails, and leaves nothing. */
static void short_of_memory(lab_rank *r) {
    static const setting s = {"", 0, 0, 0, 0, 400, 0, 0, 0};
    const fsdp_muon_desc d = desc_of_net(r->w, &s);
    fsdp_muon *muon = NULL;
    lab_built m;
    int n = 0;
    build(r, &s, &m);
    for (fsdp_status status = FSDP_ERR_OUT_OF_MEMORY; status; n++) {
        const int64_t live = r->heap->live;
        w_fail(r->heap, n);
        status = fsdp_muon_create(m.model, &d, &muon);
        w_fail(r->heap, -1);
        if (status) CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
        if (status) CHECK(!muon && r->heap->live == live);
    }
    CHECK(n > 3);
    backward(&m, 0, 1);
    CALL(r->w, fsdp_muon_step(muon, 0.1));
    /* If an allocation of a step after a freeze fails, nothing has changed, and the next step works. */
    CALL(r->w, fsdp_zero_grad(m.model));
    lab_freeze(&m, 0, 1);
    backward(&m, 1, 1);
    n = 0;
    for (fsdp_status status = FSDP_ERR_OUT_OF_MEMORY; status; n++) {
        const uint64_t bits = bits_of(&m, 1);
        w_fail(r->heap, n);
        status = fsdp_muon_step(muon, 0.1);
        w_fail(r->heap, -1);
        if (status) CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
        CHECK((bits_of(&m, 1) == bits) == (status != FSDP_OK));
    }
    CHECK(n > 1);
}
TEST(muon, out_of_memory, NO(GLOO | NCCL)) { lab_run(1, NULL, short_of_memory, NULL); }
