/* test_muon_buckets.c - buckets of matrices that overlap: on the simulated device without a race,
   with nearly all exchanges hidden by products; with worker threads the next bucket arrives before
   the present one is computed; and the bits do not change if any exchange or product is late.

   SPDX-License-Identifier: MIT */
#define TAGS TSAN
#include "harness.h"
#include "lab_net.h"
#include "sim.h"

/* ---- the simulated device -------------------------------------------------------------------- */

enum { UNITS = 4, NUM = 13, STEPS = 3 };

/* Buckets of the matrices with one row have no elements on any rank but the first. */
static const lab_param rows[NUM] = {
    {0, "a.w", FSDP_F32, 0, 0, 2, 0, {12, 8}}, {0, "a.t", FSDP_F32, 0, 0, 2, 0, {13, 5}},
    {0, "a.b", FSDP_F32, 0, 0, 1, 0, {7}},     {1, "b.w", FSDP_F32, 0, 0, 2, 0, {12, 8}},
    {1, "b.k", FSDP_F32, 0, 0, 2, 1, {6, 10}}, {2, "c.w", FSDP_F32, 0, 0, 2, 0, {12, 8}},
    {2, "c.1", FSDP_F32, 0, 0, 2, 0, {1, 9}},  {2, "c.2", FSDP_F32, 0, 0, 2, 0, {1, 9}},
    {2, "c.3", FSDP_F32, 0, 0, 2, 0, {1, 9}},  {2, "c.4", FSDP_F32, 0, 0, 2, 0, {1, 9}},
    {2, "c.5", FSDP_F32, 0, 0, 2, 0, {1, 9}},  {3, "d.h", FSDP_BF16, 0, 0, 2, 0, {9, 6}},
    {3, "d.w", FSDP_BF16, 0, 0, 2, 0, {12, 8}}};
static const lab_net net = {rows, NUM, UNITS};

typedef struct {
    const char *name;
    /* mixed: units 1 and 3 are not sharded, or over other ranks */
    int world, rank, replicas, mixed;
    fsdp_dtype dtype;
} place;

typedef struct {
    sim s;
    lab_built m;
    fsdp_muon *muon;
    int64_t product_ns;                    /* duration of a product */
    int used;                              /* the only parameter with a gradient, or SOME or ALL */
    uint64_t exchanges, gathers, received; /* in a step of Muon */
} device;
enum { SOME = -1, ALL = -2, NONE = -3 };

/* Runs the host's product at once, on the host memory of the simulated device addresses. */
static fsdp_status product(void *user, void *stream, int64_t m, int64_t n, int64_t k, float alpha,
                           const void *a, int64_t lda, int a_transposed, const void *b, int64_t ldb,
                           int b_transposed, float beta, void *c, int64_t ldc, fsdp_dtype dtype) {
    static char room[FSDP_HOST_GEMM_BYTES] __attribute__((aligned(64)));
    device *d = (device *)user;
    const int64_t size = (int64_t)fsdp_dtype_size(dtype);
    sim_work(&d->s, sim_actor(stream), 0, d->product_ns);
    sim_called(&d->s, stream, "product", a, m * k * size, 0);
    sim_called(&d->s, stream, "product", b, n * k * size, 0);
    sim_called(&d->s, stream, "product", c, m * n * size, 1);
    if (dtype != FSDP_F32) return FSDP_OK; /* the values do not matter */
    return fsdp_host_gemm(room, NULL, m, n, k, alpha, sim_host(&d->s, a), lda, a_transposed,
                          sim_host(&d->s, b), ldb, b_transposed, beta, sim_host(&d->s, c), ldc,
                          dtype);
}

static void set_up(device *d, const place *p) {
    fsdp_muon_desc md = fsdp_muon_defaults();
    fsdp_mesh *line, *grid = NULL;
    snprintf(w_case, sizeof w_case, "%s", p->name);
    sim_init(&d->s, p->world, p->rank);
    d->s.all_to_all = d->s.checks = d->s.opaque = 1;
    CHECK_MSG(sim_open(&d->s) != NULL, "%s", fsdp_last_error(NULL));
    fsdp_world *w = d->s.world;
    CALL(w, fsdp_mesh_1d(w, "all", &line));
    if (p->replicas) grid = lab_hsdp(w, p->replicas, p->world / p->replicas);
    lab_begin(&d->m, &net, w);
    d->m.model = lab_model(w, NULL);
    for (int u = 0; u < UNITS; u++) {
        fsdp_param_desc params[NUM];
        fsdp_unit_desc ud = FSDP_ZERO;
        fsdp_mesh_info info;
        const int alone = p->mixed && u == 3, plain = !grid || (p->mixed && u != 1);
        CALL(w, fsdp_mesh_info_init(plain ? line : grid,
                                    alone   ? FSDP_MESH_INFO_DDP
                                    : plain ? FSDP_MESH_INFO_FSDP
                                            : FSDP_MESH_INFO_HSDP,
                                    alone   ? -1
                                    : plain ? 0
                                            : 1,
                                    alone || !plain ? 0 : -1, &info));
        ud.mesh_info = &info;
        d->m.unit[u] = lab_unit(w, d->m.model, &ud, params, lab_descs(&d->m, u, params));
    }
    md.gemm = product, md.gemm_user = d, md.bucket_bytes = 1, md.dtype = p->dtype;
    md.replicas = FSDP_MUON_A_PART_EACH;
    CALL(w, fsdp_muon_create(d->m.model, &md, &d->muon));
}

static int uses(const device *d, int step, int p) {
    return d->used == SOME ? (step + p) % 4 : d->used == ALL || d->used == p;
}
static void train_step(device *d, int step) {
    for (int u = 0; u < UNITS; u++) {
        CALL(d->m.w, fsdp_pre_forward(d->m.unit[u]));
        for (int p = 0; p < NUM; p++)
            if (rows[p].unit == u)
                sim_read(&d->s, "forward", lab_data(&d->m, p), (int64_t)lab_nbytes_of(&net, p));
        CALL(d->m.w, fsdp_post_forward(d->m.unit[u]));
    }
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(d->m.w, fsdp_pre_backward(d->m.unit[u]));
        for (int p = 0; p < NUM; p++)
            if (rows[p].unit == u && uses(d, step, p))
                sim_write(&d->s, "backward", lab_grad(&d->m, p), (int64_t)lab_nbytes_of(&net, p));
        CALL(d->m.w, fsdp_post_backward(d->m.unit[u]));
    }
    CALL(d->m.w, fsdp_finalize_backward(d->m.model));
    const uint64_t *colls = d->s.colls, *bytes = d->s.coll_bytes;
    const uint64_t before[] = {colls[FSDP_OP_ALL_TO_ALL], colls[FSDP_OP_ALL_GATHER],
                               bytes[FSDP_OP_ALL_TO_ALL] + bytes[FSDP_OP_ALL_GATHER]};
    CALL(d->m.w, fsdp_muon_step(d->muon, 0.02));
    d->exchanges = colls[FSDP_OP_ALL_TO_ALL] - before[0];
    d->gathers = colls[FSDP_OP_ALL_GATHER] - before[1];
    d->received = bytes[FSDP_OP_ALL_TO_ALL] + bytes[FSDP_OP_ALL_GATHER] - before[2];
    CALL(d->m.w, fsdp_zero_grad(d->m.model));
}

/* Returns the races of a training. The wait number `ignored` of Muon's steps has no effect. */
static int races_of(const place *p, int64_t ignored, int64_t *waits) {
    device *d = (device *)lab_zeros(1, sizeof *d);
    set_up(d, p);
    d->used = SOME;
    d->s.waits = 0, d->s.ignore_wait = ignored;
    for (int step = 0; step < STEPS; step++) train_step(d, step);
    const int races = d->s.races;
    if (ignored < 0) W_CHECK(!races, "%d races, the first: %s", races, d->s.race);
    *waits = d->s.waits;
    CHECK_EQ_INT(sim_close(&d->s), 0);
    free(d);
    return races;
}

static const place places[] = {{"shards", 3, 1, 0, 0, FSDP_F32},
                               {"bf16", 2, 1, 0, 0, FSDP_BF16},
                               {"replicas", 4, 2, 2, 0, FSDP_F32},
                               {"mixed", 4, 3, 2, 1, FSDP_F32}};

TEST_P(muon_buckets, no_race, places, NO(TSAN)) {
    int64_t waits, none, seen = 0;
    CHECK_EQ_INT(races_of(row, -1, &waits), 0);
    for (int64_t k = 0; k < waits; k++) seen += races_of(row, k, &none) > 0;
    h_message("%lld waits, of which %lld are missed if they are left out", (long long)waits,
              (long long)seen);
    CHECK(seen > waits / 2);
}

/* Checks an update as a device and an extension see it. */
static void see_update(void *user, const fsdp_op *op) {
    const fsdp_update *u = (const fsdp_update *)op->list;
    uint64_t count = 0, bytes = 0;
    (void)user;
    if (op->kind != FSDP_OP_UPDATE) return;
    for (uint32_t i = 0; i < op->list_count; i++) {
        CHECK(u[i].kind == FSDP_UPDATE_MOMENTUM || u[i].kind == FSDP_UPDATE_MUON ||
              (u[i].kind == FSDP_UPDATE_UNSCALE && op->list_count == 1));
        CHECK_EQ_INT(u[i].kind, u->kind);
        count += (uint64_t)u[i].count;
        bytes += (uint64_t)u[i].count *
                 fsdp_dtype_size(u[i].kind == FSDP_UPDATE_UNSCALE ? u[i].grad_dtype : u[i].dtype);
    }
    CHECK(count == op->count && bytes == op->bytes && count > 0);
}

/* A bucket without a gradient is not sent; describe states the bytes of all ranks. */
TEST_P(muon_buckets, records, places, NO(TSAN)) {
    device *d = (device *)lab_zeros(1, sizeof *d);
    char text[400], want[80];
    const int gathers = row->replicas > 0 && !row->mixed;
    set_up(d, row);
    d->s.on_op = see_update;
    CALL(d->m.w, sim_watch(&d->s, d->m.model));
    d->used = NUM - 1;
    train_step(d, 0);
    if (!row->mixed) CHECK(d->exchanges == 2 && d->gathers == (uint64_t)gathers);
    if (row->mixed) CHECK(d->exchanges == 0 && d->gathers == 1); /* all ranks are replicas for it */
    d->used = NONE;
    train_step(d, 1);
    CHECK(d->exchanges == 0 && d->gathers == 0 && d->received == 0);
    d->used = ALL;
    train_step(d, 2);
    snprintf(want, sizeof want, "; receives %llu bytes in a step; each replica computes %s",
             (unsigned long long)d->received, row->replicas ? "a part" : "all");
    (void)fsdp_muon_describe(d->muon, text, sizeof text);
    W_CHECK(strstr(text, want), "'%s' has not '%s'", text, want);
    CHECK_EQ_INT(fsdp_muon_describe(d->muon, NULL, 0), (int64_t)strlen(text));
    CHECK_EQ_INT(sim_close(&d->s), 0);
    free(d);
}

/* Six buckets with a matrix for each of two owners. A product takes longer than two exchanges, so
   that products hide all exchanges but the first and the last. The clock is simulated. */
TEST(muon_buckets, travel_during_products, NO(TSAN)) {
    enum { MATRICES = 12, TRAVEL_NS = 1000000, PRODUCT_NS = 200000 };
    device *d = (device *)lab_zeros(1, sizeof *d);
    fsdp_param_desc p[MATRICES];
    fsdp_muon_desc md = fsdp_muon_defaults();
    sim *s = &d->s;
    sim_init(s, 2, 1);
    s->all_to_all = s->checks = 1, s->latency_ns = TRAVEL_NS;
    CHECK_MSG(sim_open(s) != NULL, "%s", fsdp_last_error(NULL));
    d->product_ns = PRODUCT_NS;
    for (int i = 0; i < MATRICES; i++) p[i] = fsdp_mat(NULL, 8, 12);
    fsdp_model *model = lab_model(s->world, NULL);
    fsdp_unit *unit = lab_unit(s->world, model, NULL, p, MATRICES);
    md.gemm = product, md.gemm_user = d, md.bucket_bytes = 1;
    CALL(s->world, fsdp_muon_create(model, &md, &d->muon));
    lab_forward(s->world, unit);
    CALL(s->world, fsdp_pre_backward(unit));
    for (int i = 0; i < MATRICES; i++) memset(fsdp_grad(unit, i), 1, 8 * 12 * 4);
    CALL(s->world, fsdp_post_backward(unit));
    CALL(s->world, fsdp_finalize_backward(model));
    CALL(s->world, fsdp_wait_stream(model, -1));
    const int64_t begin = sim_end(s),
                  busy[2] = {s->busy[FSDP_STREAM_COMPUTE], s->busy[FSDP_STREAM_EXTENSION]};
    CALL(s->world, fsdp_muon_step(d->muon, 0.02));
    const int64_t computes = s->busy[FSDP_STREAM_COMPUTE] - busy[0],
                  travels = s->busy[FSDP_STREAM_EXTENSION] - busy[1], takes = sim_end(s) - begin;
    CHECK(computes >= (int64_t)6 * 15 * PRODUCT_NS && travels >= (int64_t)12 * TRAVEL_NS);
    h_message("products %lld us, travels %lld us, both %lld us", (long long)computes / 1000,
              (long long)travels / 1000, (long long)takes / 1000);
    CHECK(takes <= computes + travels * 2 / 12);
    CHECK_EQ_INT(s->races, 0);
    CHECK_EQ_INT(sim_close(s), 0);
    free(d);
}

/* ---- lanes ----------------------------------------------------------------------------------- */

/* LATE: number of places at which something may be late */
enum { MATRICES = 8, SIDE = 6, LATE = 24 };

typedef struct {
    lab_guard guard; /* for its comms */
    /* the rank waits before exchange number `late`, or before the products of bucket `late` -
       LATE/2 */
    int rank, late;
    int arrived, begun, buckets, products, waits;
    uint64_t bits;
} traveller;

static traveller *travellers; /* one for each rank */
static int late_rank;

static int is_late(const traveller *t, int number) {
    return t->rank == late_rank && t->late == number;
}
static fsdp_status before_exchange(lab_guard *guard, const fsdp_group *group,
                                   const fsdp_coll *coll) {
    traveller *t = (traveller *)(void *)guard;
    (void)group;
    if (coll && coll->kind == FSDP_OP_ALL_TO_ALL && is_late(t, t->begun++ % (2 * t->buckets)))
        w_sleep_ns(3000000);
    return FSDP_OK;
}
static fsdp_status run_exchange(fsdp_comm *comm, const fsdp_coll *coll) {
    traveller *t = (traveller *)(void *)lab_guarded_of(comm)->guard;
    const fsdp_status status = lab_guard_run(comm, coll);
    if (coll->kind == FSDP_OP_ALL_TO_ALL) __atomic_add_fetch(&t->arrived, 1, __ATOMIC_SEQ_CST);
    return status;
}

/* Before the first product of bucket i, with `waits`, waits until all sent data has arrived: u of
   buckets 0 to i+1, and x of those before i. */
static fsdp_status patient_product(void *user, void *stream, int64_t m, int64_t n, int64_t k,
                                   float alpha, const void *a, int64_t lda, int a_transposed,
                                   const void *b, int64_t ldb, int b_transposed, float beta,
                                   void *c, int64_t ldc, fsdp_dtype dtype) {
    static __thread char room[FSDP_HOST_GEMM_BYTES] __attribute__((aligned(64)));
    traveller *t = (traveller *)user;
    const int step = t->products / 15 / t->buckets, bucket = t->products / 15 % t->buckets;
    const int sent = 2 * (step * t->buckets + bucket) + (bucket + 1 < t->buckets ? 2 : 1);
    long ns = 0;
    if (t->products++ % 15 == 0) {
        while (t->waits && __atomic_load_n(&t->arrived, __ATOMIC_SEQ_CST) < sent) h_nap(&ns);
        if (is_late(t, LATE / 2 + bucket)) w_sleep_ns(3000000);
    }
    return fsdp_host_gemm(room, stream, m, n, k, alpha, a, lda, a_transposed, b, ldb, b_transposed,
                          beta, c, ldc, dtype);
}

static void travel(lab_rank *r) {
    traveller *t = &travellers[r->rank];
    fsdp_comm_ops ops = lab_guard_ops();
    fsdp_world_desc wd = w_desc(r->rank, r->size, &r->start->threads[0], "buckets",
                                t->waits ? 2 : t->late % 3);
    fsdp_param_desc p[MATRICES];
    fsdp_muon_desc md = fsdp_muon_defaults();
    fsdp_muon *muon;
    fsdp_world *w;
    float full[SIDE * SIDE];
    t->guard.before = before_exchange, t->rank = r->rank;
    t->buckets = MATRICES / r->size;
    ops.run = run_exchange;
    wd.comm_ops = &ops, wd.user = t, wd.allocator = w_heap_allocator(r->heap);
    CALL(NULL, fsdp_init(&wd, &w));
    for (int i = 0; i < MATRICES; i++) p[i] = fsdp_mat(NULL, SIDE, SIDE);
    fsdp_model *model = lab_model(w, NULL);
    fsdp_unit *unit = lab_unit(w, model, NULL, p, MATRICES);
    CALL(w, fsdp_init_params(model, lab_fill, NULL));
    md.gemm = patient_product, md.gemm_user = t, md.bucket_bytes = 1;
    CALL(w, fsdp_muon_create(model, &md, &muon));
    for (int step = 0; step < 2; step++) {
        lab_forward(w, unit);
        CALL(w, fsdp_pre_backward(unit));
        for (int i = 0; i < MATRICES; i++)
            for (int k = 0; k < SIDE * SIDE; k++)
                ((float *)fsdp_grad(unit, i))[k] = (float)(lab_value(i + 10 * step, k) > 0 ? 2
                                                                                           : -1);
        CALL(w, fsdp_post_backward(unit));
        CALL(w, fsdp_finalize_backward(model));
        CALL(w, fsdp_muon_step(muon, 0.02));
        CALL(w, fsdp_zero_grad(model));
    }
    t->bits = 1;
    for (int i = 0; i < MATRICES; i++) {
        CALL(w, fsdp_param_full(unit, i, full));
        lab_fold(&t->bits, full, sizeof full);
    }
    CALL(w, fsdp_shutdown(w));
}

static uint64_t travel_by(int world, int waits, int rank, int late) {
    lab_how how = FSDP_ZERO;
    how.bare = how.shared = 1;
    late_rank = rank;
    travellers = (traveller *)lab_zeros((size_t)world, sizeof *travellers);
    for (int k = 0; k < world; k++) travellers[k].late = late, travellers[k].waits = waits;
    lab_run(world, &how, travel, NULL);
    const uint64_t bits = travellers[0].bits;
    free(travellers);
    return bits;
}

/* If no bucket were sent while another is computed, this would wait forever. */
TEST(muon_buckets, arrive_while_computed) {
    const uint64_t one = travel_by(1, 0, -1, 0);
    CHECK(travel_by(2, 1, -1, 0) == one);
    CHECK(travel_by(4, 1, -1, 0) == one);
}

/* Each exchange and each bucket's products in turn are late, on each rank in turn. */
TEST(muon_buckets, late, SLOW) {
    const uint64_t one = travel_by(1, 0, -1, 0);
    for (int rank = 0; rank < 2; rank++)
        for (int number = 0; number < LATE; number++)
            CHECK_MSG(travel_by(2, 0, rank, number) == one, "%d is late on rank %d", number, rank);
}
