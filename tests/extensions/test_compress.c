/* test_compress.c - gradients that are sent as bf16 and summed in f32 (fsdp_compress.h): the bits
   of a sum in rank order, on every backend; bytes, memory, plans and failures.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | NCCL
#include "harness.h"
#include "fsdp_compress.h"
#include "fsdp_plan.h"
#include "lab_net.h"

enum { NUM = 7, UNITS = 3, STEPS = 5, BIG = 640 };

/* Uneven parameters, empty on some ranks, sharded by columns; a unit with a single parameter. */
static const lab_param rows[NUM] = {
    {0, "a.w", FSDP_F32, 0, 0, 2, 0, {7, 5}},  {0, "a.b", FSDP_F32, 0, 0, 1, 0, {3}},
    {0, "a.k", FSDP_F32, 0, 0, 2, 1, {6, 10}}, {0, "a.f", FSDP_F32, 0, 1, 1, 0, {4}},
    {1, "b.w", FSDP_F32, 0, 0, 2, 0, {80, 8}}, {2, "c.w", FSDP_F32, 0, 0, 2, 0, {24, 16}},
    {2, "c.b", FSDP_F32, 0, 0, 1, 0, {17}}};
static const lab_net net = {rows, NUM, UNITS};

typedef struct {
    const char *name;
    fsdp_dtype param, reduce; /* KEEP: f32 */
    /* micro: backwards per step; plain: without the extension */
    int replicas, lanes, micro, planned, plain;
    int64_t direct_min;
    double factor;
    int offload;
} config;

static const config cases[] = {
    {"bf16", FSDP_BF16, FSDP_F32, 0, 0, 1, 0, 0, 0, 0, 0},
    {"bf16_added", FSDP_BF16, FSDP_F32, 0, 0, 3, 0, 0, 0, 0, 0},
    {"bf16_direct_lanes", FSDP_BF16, FSDP_F32, 0, 2, 2, 0, 0, 1, 0, 0},
    {"bf16_factor", FSDP_BF16, FSDP_F32, 0, 1, 1, 0, 0, FSDP_DIRECT_NEVER, 5, 0},
    {"bf16_hsdp", FSDP_BF16, FSDP_F32, 2, 2, 2, 0, 0, 0, 0, 0},
    {"bf16_planned", FSDP_BF16, FSDP_F32, 0, 0, 1, 1, 0, 0, 0, 0},
    {"bf16_planned_lanes", FSDP_BF16, FSDP_F32, 0, 2, 1, 1, 0, 1, 0, 0},
    {"f32", FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0, 0, 2, 0, 0, 0, 0, 0},
    {"f32_direct_lanes", FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0, 2, 1, 0, 0, 1, 0, 0},
    {"f32_planned", FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0, 0, 1, 1, 0, 0, 0, 0},
    {"f32_hsdp", FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 2, 0, 1, 0, 0, 1, 0, 0},
    {"bf16_offload", FSDP_BF16, FSDP_F32, 0, 2, 2, 0, 0, 1, 0, 1},
    {"reduced_in_bf16", FSDP_DTYPE_KEEP, FSDP_BF16, 0, 0, 2, 0, 0, 0, 0, 0},
};

static int uses(int step, int p, int rank) { return p != 1 || (step + rank) % 2; }

/* Returns the gradient of rank `rank`, with more bits than bf16 has. */
static float value(int step, int micro, int rank, int p, int64_t i) {
    uint64_t h = lab_hash((uint64_t)(step * 8 + micro), (uint64_t)rank, (uint64_t)p, (uint64_t)i);
    return (float)((double)(h >> 40) / 16777216.0 - 0.5) * (rank % 2 ? 64.0f : 1.0f);
}
static fsdp_dtype written(const config *c) { return c->param ? c->param : FSDP_F32; }

static void backward(lab_built *m, const config *c, int step, int micro) {
    lab_forwards(m);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(m->w, fsdp_pre_backward(m->unit[u]));
        for (int p = 0; p < NUM; p++) {
            if (rows[p].unit != u || m->frozen[p] || !uses(step, p, fsdp_rank(m->w))) continue;
            void *g = lab_grad(m, p);
            for (int64_t i = 0; i < lab_numel_of(&net, p); i++)
                lab_put(g, written(c), i, (double)value(step, micro, fsdp_rank(m->w), p, i));
        }
        CALL(m->w, fsdp_post_backward(m->unit[u]));
    }
    CALL(m->w, fsdp_finalize_backward(m->model));
}

static float times(float a, float b) {
    volatile float x = a * b;
    return x;
}
static float plus(float a, float b) {
    volatile float x = a + b;
    return x;
}

/* Returns an element after `micro` reductions: bf16 values summed in f32, in rank order; with HSDP,
   then the sums of the replicas. With a bf16 reduction, the sums are rounded to bf16, once. */
static float expected(const config *c, fsdp_world *w, int step, int p, int64_t i) {
    int size = fsdp_world_size(w), replicas = c->replicas ? c->replicas : 1;
    int shards = size / replicas, narrow = c->reduce == FSDP_BF16;
    float factor = (float)(1 / (c->factor > 0 ? c->factor : (double)size)), grad = 0;
    for (int b = 0; b < c->micro; b++) {
        float whole = 0;
        for (int k = 0; k < replicas; k++) {
            float sum = 0;
            for (int s = 0; s < shards; s++) {
                int rank = k * shards + s;
                float x = uses(step, p, rank) ? value(step, b, rank, p, i) : 0;
                x = (float)lab_round(FSDP_BF16, (double)x);
                sum = s ? plus(sum, x) : x;
            }
            if (narrow) sum = (float)lab_round(FSDP_BF16, (double)sum);
            whole = k ? plus(whole, sum) : sum;
        }
        grad = b ? plus(grad, times(whole, factor)) : times(whole, factor);
    }
    return grad;
}

static void check(const lab_built *m, const config *c, int step) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(m->model, &v)) {
        int p = lab_row_of(&net, &v);
        W_CHECK((v.shard_grad != NULL) != m->frozen[p], "%s: gradient %p", v.name, v.shard_grad);
        for (int64_t k = 0; v.shard_grad && k < v.numel; k++) {
            float want = expected(c, m->w, step, p, fsdp_view_index(&v, k));
            lab_check_float(c->name, p, k, ((const float *)v.shard_grad)[k], want);
        }
    }
}

static void make(lab_built *m, lab_rank *r, const config *c) {
    fsdp_model_desc md = FSDP_ZERO;
    md.param_dtype = c->param, md.reduce_dtype = c->reduce, md.direct_min = c->direct_min;
    md.cpu_offload = c->offload;
    if (c->replicas) md.mesh = lab_hsdp(r->w, c->replicas, r->size / c->replicas);
    lab_build(m, &net, r->w, &md);
    CALL(r->w, fsdp_set_reduce_scatter_unused_params(m->model, NULL, 1)); /* see uses */
    CALL(r->w, fsdp_init_params(m->model, lab_fill, NULL));
    if (c->factor > 0) CALL(r->w, fsdp_set_gradient_divide_factor(m->model, NULL, c->factor));
}

/* Checks the counts of a step: no reduce-scatter of the library is left, but the all_to_all that
   replaces it. */
static void check_counts(const fsdp_counters *a, const fsdp_counters *b, const config *c) {
    uint64_t scatters = b->calls[FSDP_OP_REDUCE_SCATTER] - a->calls[FSDP_OP_REDUCE_SCATTER];
    uint64_t sent = b->calls[FSDP_OP_ALL_TO_ALL] - a->calls[FSDP_OP_ALL_TO_ALL];
    uint64_t whole = b->bytes[FSDP_OP_REDUCE_SCATTER] - a->bytes[FSDP_OP_REDUCE_SCATTER];
    uint64_t bytes = b->bytes[FSDP_OP_ALL_TO_ALL] - a->bytes[FSDP_OP_ALL_TO_ALL];
    CHECK_EQ_INT(sent, scatters);
    if (!c->planned) CHECK_EQ_INT(sent, UNITS * c->micro);
    if (whole == bytes && (c->param == FSDP_BF16 || c->reduce == FSDP_BF16))
        return; /* the backend would have sent bf16 anyway */
    CHECK_EQ_INT(2 * bytes, whole);
}

static void train(lab_rank *r) {
    const config *c = (const config *)r->arg;
    lab_built m = FSDP_ZERO;
    fsdp_plan *plan = NULL;
    int64_t allocations = 0;
    make(&m, r, c);
    if (!c->plain) CALL(r->w, fsdp_compress_create(m.model, NULL));
    if (c->planned) CALL(r->w, fsdp_plan_create(m.model, NULL, &plan));
    for (int step = 0; step < STEPS; step++) {
        fsdp_counters before, after;
        if (step == (c->planned ? 4 : 2)) allocations = w_allocations(r->heap);
        CALL(r->w, fsdp_model_counters(m.model, &before));
        for (int b = 0; b < c->micro; b++) backward(&m, c, step, b);
        CALL(r->w, fsdp_model_counters(m.model, &after));
        check(&m, c, step);
        if (!c->plain) check_counts(&before, &after, c);
        CALL(r->w, fsdp_zero_grad(m.model));
    }
    if (!lib_on_streams(r->w)) /* otherwise the backend's threads may allocate at any time */
        W_CHECK(w_allocations(r->heap) == allocations, "a step has allocated");
    if (plan) CHECK_EQ_INT(fsdp_plan_state(plan), FSDP_PLAN_REPLAYING);
}

static void launch(int world, const config *c) {
    lab_how how = FSDP_ZERO;
    how.job = "compress", how.lanes = c->lanes;
    lab_run(world, &how, train, (void *)(uintptr_t)c);
}

TEST_P(compress, same_bits, cases) {
    for (int world = row->replicas ? 4 : 2; world <= 4; world++) launch(world, row);
}

/* Without the extension the numbers are equal, if the backend itself sums bf16 in f32. */
TEST(compress, bits_of_a_fused_reduction) {
    const char *backend = getenv("FSDP_BACKEND");
    if (backend && strcmp(backend, "nccl") == 0) SKIP("NCCL sums in an order of its own");
    for (int i = 0; i < 5; i++) {
        config c = cases[i];
        c.plain = 1;
        for (int world = 2; world <= 4; world += 2) launch(world, &c);
    }
}

/* ---- what goes over the wire ----------------------------------------------------------------- */

static uint64_t wire[2]; /* bytes of elements that the backend gets: reduce_scatter, all_to_all */

static fsdp_status counted(fsdp_comm *comm, const fsdp_coll *coll) {
    int which = coll->kind == FSDP_OP_ALL_TO_ALL;
    if (which || coll->kind == FSDP_OP_REDUCE_SCATTER)
        __atomic_fetch_add(&wire[which], coll->count * fsdp_dtype_size(coll->dtype),
                           __ATOMIC_SEQ_CST);
    return fsdp_shm_comm_ops()->run(comm, coll);
}
static void measure(const config *c, uint64_t *scattered, uint64_t *exchanged) {
    fsdp_comm_ops ops = *fsdp_shm_comm_ops();
    lab_how how = FSDP_ZERO;
    ops.run = counted;
    how.job = "compress", how.lanes = c->lanes, how.comm_ops = &ops;
    memset(wire, 0, sizeof wire);
    lab_run(3, &how, train, (void *)(uintptr_t)c);
    *scattered = wire[0], *exchanged = wire[1];
}
TEST(compress, bytes_of_the_backend) {
    uint64_t f32, bf16, none, ignored;
    config c = cases[7]; /* the case "f32" */
    CHECK_EQ_STR(c.name, "f32");
    measure(&c, &none, &bf16);
    CHECK_EQ_INT(none, 0);
    c.param = FSDP_BF16, c.reduce = FSDP_F32; /* fused bf16 sends as much as compressed f32 */
    c.plain = 1;
    measure(&c, &f32, &ignored);
    CHECK_EQ_INT(f32, bf16);
    CHECK_EQ_INT(ignored, 0);
    h_message("%llu bytes of bf16", (unsigned long long)bf16);
}

/* ---- order ----------------------------------------------------------------------------------- */

/* The op that writes the result in place of the reduce-scatter waits for the same last reader: with
   HSDP, the all-reduce stream reads the sums. */
static int waits_for(const fsdp_op *op, int stream, uint64_t *seq) {
    for (int i = 0; i < op->num_waits; i++)
        if (op->wait[i].stream == stream) return *seq = op->wait[i].seq, 1;
    return 0;
}
static void order(lab_rank *r) {
    const config *c = (const config *)r->arg;
    lab_built m = FSDP_ZERO;
    lab_log before = FSDP_ZERO, behind = FSDP_ZERO;
    int waits = 0;
    make(&m, r, c);
    lab_watch(&before, r->w, m.model);
    CALL(r->w, fsdp_compress_create(m.model, NULL));
    lab_watch(&behind, r->w, m.model);
    for (int step = 0; step < STEPS; step++) {
        backward(&m, c, step, 0);
        CALL(r->w, fsdp_zero_grad(m.model));
    }
    CHECK_EQ_INT(lab_count_ops(&behind, 0, FSDP_OP_REDUCE_SCATTER, -1, NULL), 0);
    for (int n = 0; n < before.num; n++) {
        const fsdp_op *scatter = &before.ops[n], *last = NULL;
        uint64_t want, got = 0;
        if (scatter->kind != FSDP_OP_REDUCE_SCATTER) continue;
        for (int k = 0; k < behind.num; k++)
            if (behind.ops[k].seq > scatter->seq && behind.ops[k].dst == scatter->dst)
                if (!last) last = &behind.ops[k];
        W_CHECK(last && last->kind == FSDP_OP_COPY, "nothing writes for %s", scatter->what);
        if (!waits_for(scatter, FSDP_STREAM_ALLREDUCE, &want)) continue;
        W_CHECK(waits_for(last, FSDP_STREAM_ALLREDUCE, &got) && got == want,
                "the result of %s waits for %llu, expected %llu", scatter->what,
                (unsigned long long)got, (unsigned long long)want);
        waits++;
    }
    W_CHECK(waits > 0, "no reduction has waited");
    free(before.ops), free(behind.ops);
}
TEST(compress, order) {
    lab_how how = FSDP_ZERO;
    config c = cases[4]; /* bf16_hsdp, with worker threads */
    c.reduce = FSDP_F32, c.micro = 1;
    how.job = "compress", how.lanes = c.lanes;
    lab_run(4, &how, order, &c);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int64_t pool_bytes(const fsdp_model *m) {
    fsdp_memory memory;
    CHECK_OK(fsdp_model_memory(m, &memory));
    for (int pool = FSDP_POOL_COUNT; pool < FSDP_POOL_MAX; pool++)
        if (strcmp(fsdp_model_pool_name(m, pool), "compress") == 0) return memory.pool_bytes[pool];
    return -1;
}
static void memory(lab_rank *r) {
    config c = cases[7];
    lab_built m = FSDP_ZERO;
    fsdp_compress *z;
    fsdp_memory first, last;
    make(&m, r, &c);
    CALL(r->w, fsdp_model_commit(m.model));
    backward(&m, &c, 0, 0);
    CALL(r->w, fsdp_zero_grad(m.model));
    CALL(r->w, fsdp_model_memory(m.model, &first));
    CALL(r->w, fsdp_compress_create(m.model, &z));
    CHECK_EQ_INT(pool_bytes(m.model), 0);
    backward(&m, &c, 1, 0);
    CALL(r->w, fsdp_zero_grad(m.model));
    /* the largest is b.w, 27 rows of 8 per rank: 4 bytes per element, and 2 and 2 for each rank */
    CHECK(pool_bytes(m.model) >= 216 * 16 && pool_bytes(m.model) < 216 * 16 + 4096);
    fsdp_compress_destroy(z);
    CHECK_EQ_INT(pool_bytes(m.model), 0);
    c.plain = 1;
    CALL(r->w, fsdp_model_memory(m.model, &last));
    CHECK_EQ_INT(last.host_bytes, first.host_bytes);
    CHECK_EQ_INT(last.total_bytes, first.total_bytes);
    fsdp_counters before, after;
    CALL(r->w, fsdp_model_counters(m.model, &before));
    backward(&m, &c, 2, 0);
    CALL(r->w, fsdp_model_counters(m.model, &after));
    CHECK_EQ_INT(after.calls[FSDP_OP_ALL_TO_ALL], before.calls[FSDP_OP_ALL_TO_ALL]);
}
TEST(compress, memory) { lab_run(3, NULL, memory, NULL); }

/* ---- what is left alone, and failures -------------------------------------------------------- */

static fsdp_status own_scatter(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                               const fsdp_coll *coll) {
    __atomic_fetch_add((int *)user, 1, __ATOMIC_SEQ_CST);
    return ops->run(comm, coll);
}
/* f16 reductions, and units with a user's reduce function, are not compressed. */
static void left_alone(lab_rank *r) {
    for (int own = 0; own < 2; own++) {
        int calls = 0;
        config c = cases[0];
        lab_built m = FSDP_ZERO;
        fsdp_counters counters;
        if (!own) c.param = c.reduce = FSDP_F16;
        make(&m, r, &c);
        for (int u = 0; u < UNITS && own; u++)
            CALL(r->w, fsdp_set_custom_reduce_scatter(m.unit[u], own_scatter, &calls));
        CALL(r->w, fsdp_compress_create(m.model, NULL));
        backward(&m, &c, 0, 0);
        lib_drain(r->w);
        CALL(r->w, fsdp_model_counters(m.model, &counters));
        CHECK_EQ_INT(counters.calls[FSDP_OP_ALL_TO_ALL], 0);
        CHECK_EQ_INT(calls, own ? UNITS : 0);
    }
}
TEST(compress, unchanged_reductions) { lab_run(2, NULL, left_alone, NULL); }

static fsdp_status try_backward(lab_built *m) {
    fsdp_status status = FSDP_OK;
    lab_forwards(m);
    for (int u = UNITS - 1; u >= 0 && !status; u--) {
        status = fsdp_pre_backward(m->unit[u]);
        if (!status) (void)lab_grad(m, lab_first_of(&net, u));
        if (!status) status = fsdp_post_backward(m->unit[u]);
    }
    return status ? status : fsdp_finalize_backward(m->model);
}
static void one_rank_alone(lab_rank *r) {
    config c = cases[7];
    lab_built m = FSDP_ZERO;
    make(&m, r, &c);
    if (r->rank) CALL(r->w, fsdp_compress_create(m.model, NULL));
    CHECK_STATUS(try_backward(&m), FSDP_ERR_MISMATCH);
}
TEST(compress, a_rank_does_not) { lab_run(2, NULL, one_rank_alone, NULL); }

/* Ranks compare the replacement in the same way as a reduction. */
static void other_factor(lab_rank *r) {
    config c = cases[0];
    lab_built m = FSDP_ZERO;
    c.factor = 2 + r->rank;
    make(&m, r, &c);
    CALL(r->w, fsdp_compress_create(m.model, NULL));
    CHECK_STATUS(try_backward(&m), FSDP_ERR_MISMATCH);
    CHECK_MSG(strstr(fsdp_last_error(r->w), "divide factor"), "%s", fsdp_last_error(r->w));
}
TEST(compress, other_factor) { lab_run(2, NULL, other_factor, NULL); }

/* If a rank has no memory for its buffer, the world fails on all ranks. */
static void no_memory(lab_rank *r) {
    config c = cases[7];
    lab_built m = FSDP_ZERO;
    make(&m, r, &c);
    CALL(r->w, fsdp_compress_create(m.model, NULL));
    CALL(r->w, fsdp_model_reserve(m.model));
    lab_forwards(&m);
    CALL(r->w, fsdp_pre_backward(m.unit[2]));
    (void)lab_grad(&m, lab_first_of(&net, 2));
    if (r->rank) w_fail(r->heap, 0);
    fsdp_status status = fsdp_post_backward(m.unit[2]);
    if (!status) status = fsdp_finalize_backward(m.model);
    w_fail(r->heap, -1);
    CHECK(status == FSDP_ERR_MISMATCH || status == FSDP_ERR_OUT_OF_MEMORY);
}
TEST(compress, no_memory) { lab_run(2, NULL, no_memory, NULL); }

static fsdp_status without(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **out) {
    fsdp_status status = fsdp_shm_comm_ops()->open(boot, caps, out);
    caps->kinds &= ~(1u << FSDP_OP_ALL_TO_ALL);
    return status;
}
static void refused(lab_rank *r) {
    config c = cases[0];
    lab_built m = FSDP_ZERO;
    fsdp_compress *z = (fsdp_compress *)&m;
    make(&m, r, &c);
    CHECK_STATUS(fsdp_compress_create(m.model, &z), FSDP_ERR_UNSUPPORTED);
    CHECK(!z && strstr(fsdp_last_error(r->w), "[E920]"));
    backward(&m, &c, 0, 0);
}
TEST(compress, refuses) {
    fsdp_comm_ops ops = *fsdp_shm_comm_ops();
    lab_how how = FSDP_ZERO;
    fsdp_compress *z = (fsdp_compress *)&ops;
    CHECK_STATUS(fsdp_compress_create(NULL, &z), FSDP_ERR_INVALID_ARG);
    CHECK(!z);
    fsdp_compress_destroy(NULL);
    ops.open = without;
    how.comm_ops = &ops;
    lab_run(2, &how, refused, NULL);
}
