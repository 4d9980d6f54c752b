/* test_scaler.c - the gradient scaler: PyTorch's rule of growth, found-inf on every rank wherever
   the value was, errors, and training with f16 gradients.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | NCCL
#include "harness.h"
#include <math.h> /* fabs */
#include "lab.h"

enum { UNITS = 3, PARAMS = 4, MOST = 1400 };

#define NEG_INF lab_from_bits(0xFFF0000000000000u)
#define NAN_2   lab_from_bits(0xFFF8000000000001u)

/* ---- ranks ----------------------------------------------------------------------------------- */

enum { MESH_1D, MESH_HSDP, MESH_SLICE, MESH_MIXED };

typedef struct job job;
typedef struct {
    int mesh, lanes, variant;
    fsdp_dtype dtype; /* dtype of parameters and gradients */
    void (*body)(job *j);
} start;

struct job { /* test of one rank */
    int rank, world, variant;
    start *s;
    w_heap *heap;
    fsdp_world *w;
    const fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_unit *unit[UNITS];
    fsdp_grad_scaler *scaler;
    fsdp_adamw *opt;
};

static fsdp_comm_ops counting; /* a backend that counts collectives */
static __thread int64_t colls; /* number on this rank: inline, collectives run in its thread */

static fsdp_status count_run(fsdp_comm *comm, const fsdp_coll *c) {
    colls++;
    return fsdp_shm_comm_ops()->run(comm, c);
}

static void make_mesh(job *j) {
    const int hsdp = j->s->mesh == MESH_HSDP;
    if (j->s->mesh == MESH_1D) return;
    j->mesh = lab_mesh2(j->w, 2, j->world / 2, hsdp ? "replicate" : "dp", hsdp ? "shard" : "tp");
    if (!hsdp) j->mesh = lab_slice(j->w, j->mesh, 0);
}

/* Makes three units: with empty shards, a parameter without elements, and more than one block. */
static void make_model(job *j) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc d[UNITS][PARAMS] = {
        {fsdp_mat("w", 7, 5), fsdp_vec("b", 1), fsdp_vec("z", 0), fsdp_vec("f", 6)},
        {fsdp_mat("w", MOST, 1), fsdp_mat("t", 3, 8), fsdp_vec("b", 2), fsdp_vec("c", 513)},
        {fsdp_vec("a", 4), fsdp_vec("b", 5), fsdp_vec("c", 9), fsdp_vec("d", 16)}};
    d[1][1].shard_dim = 1;
    d[0][3].frozen = 1;
    if (j->s->mesh != MESH_MIXED) md.mesh = j->mesh;
    md.cpu_offload = j->variant;
    CALL(j->w, fsdp_model_create(j->w, &md, &j->model));
    for (int u = 0; u < UNITS; u++) {
        fsdp_unit_desc ud = FSDP_ZERO;
        for (int i = 0; i < PARAMS; i++) d[u][i].dtype = j->s->dtype;
        ud.params = d[u], ud.num_params = PARAMS;
        if (j->s->mesh == MESH_MIXED && u == 1) ud.mesh = j->mesh;
        CALL(j->w, fsdp_fully_shard(j->model, &ud, &j->unit[u]));
    }
}

/* Gradients that are exact in every dtype, wherever a rank uses the parameter. */
static double grad_at(int ordinal, int64_t k) { return (double)((ordinal * 7 + k * 3) % 61 - 30); }
static int used(int ordinal) { return ordinal % 4 != 2 || ordinal == 10; }

static void backward(job *j, double factor) {
    for (int u = 0; u < UNITS; u++) lab_forward(j->w, j->unit[u]);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(j->w, fsdp_pre_backward(j->unit[u]));
        for (int i = 0; i < PARAMS; i++) {
            fsdp_param_view v = lab_view(j->w, j->unit[u], i);
            if (!v.requires_grad || !used(v.ordinal)) continue;
            void *g = fsdp_grad(j->unit[u], i);
            CHECK(g != NULL);
            for (int64_t k = 0; k < lab_full_numel(&v); k++)
                lab_put(g, j->s->dtype, k, factor * grad_at(v.ordinal, k));
        }
        CALL(j->w, fsdp_post_backward(j->unit[u]));
    }
    CALL(j->w, fsdp_finalize_backward(j->model));
}

static void on_rank(lab_rank *r) {
    start *s = (start *)r->arg;
    job j;
    memset(&j, 0, sizeof j);
    snprintf(w_case, sizeof w_case, "world %d, mesh %d, %s, lanes %d, variant %d", r->size, s->mesh,
             fsdp_dtype_name(s->dtype), s->lanes, s->variant);
    j.s = s, j.rank = r->rank, j.world = r->size, j.variant = s->variant, j.heap = r->heap;
    j.w = r->w;
    make_mesh(&j);
    s->body(&j);
    lab_end(r);
}

static void launch(int world, int mesh, fsdp_dtype dtype, int lanes, int variant,
                   void (*body)(job *j)) {
    start s = {mesh, lanes, variant, dtype, body};
    lab_how how = FSDP_ZERO;
    how.job = "scaler", how.lanes = lanes, how.comm_ops = &counting;
    counting = *fsdp_shm_comm_ops();
    counting.run = count_run;
    lab_run(world, &how, on_rank, &s);
}

/* ---- found-inf ------------------------------------------------------------------------------- */

typedef struct { /* all shards, shard gradients and optimizer states of one rank */
    double shard[UNITS * PARAMS][MOST], grad[UNITS * PARAMS][MOST], m[UNITS * PARAMS][MOST];
    int64_t step[UNITS * PARAMS];
} snapshot;

static void take(job *j, snapshot *to) {
    fsdp_param_view v = FSDP_ZERO;
    memset(to, 0, sizeof *to);
    while (fsdp_next_param(j->model, &v)) {
        fsdp_optim_state o;
        CALL(j->w, fsdp_adamw_state(j->opt, v.ordinal, &o));
        to->step[v.ordinal] = o.step ? *o.step : -1;
        for (int64_t k = 0; k < v.numel; k++) {
            to->shard[v.ordinal][k] = lab_get(v.shard, v.dtype, k);
            if (v.shard_grad) to->grad[v.ordinal][k] = lab_get(v.shard_grad, v.grad_dtype, k);
            if (o.first) to->m[v.ordinal][k] = lab_get(o.first, o.dtype, k);
        }
    }
}

/* Computes x / scale as documented: the reciprocal in f32, the product in f32 or f64, then the
   dtype. */
static double unscaled(fsdp_dtype dtype, double x, double scale) {
    volatile float inverse = (float)(1 / scale), narrow = (float)x;
    volatile float product = narrow * inverse;
    char stored[8];
    if (dtype == FSDP_F64) return x * (double)inverse;
    lab_put(stored, dtype, 0, (double)product);
    return lab_get(stored, dtype, 0);
}

/* Checks that every gradient was divided, and that nothing else changed. */
static void check_unscaled(job *j, const snapshot *was, snapshot *now, double scale) {
    take(j, now);
    CHECK_EQ_MEM(now->shard, was->shard, sizeof was->shard);
    CHECK_EQ_MEM(now->m, was->m, sizeof was->m);
    for (int p = 0; p < UNITS * PARAMS; p++)
        for (int64_t k = 0; k < MOST; k++) {
            double want = unscaled(j->s->dtype, was->grad[p][k], scale), got = now->grad[p][k];
            W_CHECK((h_non_finite(want) == 2 && h_non_finite(got) == 2) ||
                        lab_bits(want) == lab_bits(got),
                    "parameter %d element %lld: %g, expected %g", p, (long long)k, got, want);
        }
}

/* Finds this rank's last parameter with a gradient and rows; in the mixed case, in unit 1. */
static int target(job *j, fsdp_param_view *out) {
    fsdp_param_view v = FSDP_ZERO;
    int found = 0;
    while (fsdp_next_param(j->model, &v)) {
        if (!v.shard_grad || !v.numel) continue;
        if (j->s->mesh == MESH_MIXED && v.unit != j->unit[1]) continue;
        *out = v;
        found = 1;
    }
    return found;
}

/* Runs one step: every rank finds a value that was injected on rank `bad` only. */
static void scaled_step(job *j, snapshot *was, snapshot *now, int bad, double what) {
    double scale = fsdp_grad_scaler_scale(j->scaler);
    fsdp_param_view v = FSDP_ZERO;
    int found, moved = 0, place = target(j, &v);
    W_CHECK(place, "no gradient");
    if (j->rank == bad) lab_put(v.shard_grad, v.grad_dtype, v.numel / 2, what);
    take(j, was);
    CHECK_EQ_INT(fsdp_grad_scaler_found_inf(j->scaler), -1);
    int64_t before = w_allocations(j->heap);
    CALL(j->w, fsdp_grad_scaler_unscale(j->scaler));
    found = fsdp_grad_scaler_found_inf(j->scaler);
    W_CHECK(found == (bad >= 0), "found_inf is %d, bad rank %d", found, bad);
    check_unscaled(j, was, now, scale);
    if (!found) CALL(j->w, fsdp_adamw_step(j->opt, 0.01));
    CALL(j->w, fsdp_grad_scaler_update(j->scaler));
    CHECK_EQ_INT(w_allocations(j->heap), before);
    CHECK(lab_bits(fsdp_grad_scaler_scale(j->scaler)) == lab_bits(found ? scale * 0.5 : scale));
    take(j, now);
    for (int p = 0; p < UNITS * PARAMS; p++) {
        int steps = p == 3 ? 0 : !found && used(p); /* parameter 3 is frozen */
        W_CHECK(now->step[p] == was->step[p] + steps, "parameter %d: t is %lld", p,
                (long long)now->step[p]);
        moved |= memcmp(now->shard[p], was->shard[p], sizeof was->shard[p]) != 0;
        if (found) CHECK_EQ_MEM(now->m[p], was->m[p], sizeof was->m[p]);
    }
    W_CHECK(moved == !found, "the step was%s done", moved ? "" : " not");
}

static void gradient_scaler(job *j) {
    snapshot *was = (snapshot *)malloc(sizeof *was), *now = (snapshot *)malloc(sizeof *now);
    const double bad[] = {LAB_INF, NEG_INF, LAB_NAN, NAN_2};
    CHECK(was && now);
    make_model(j);
    CALL(j->w, fsdp_adamw_create(j->model, NULL, &j->opt));
    CALL(j->w, fsdp_grad_scaler_create(j->model, NULL, &j->scaler));
    CHECK(lab_bits(fsdp_grad_scaler_scale(j->scaler)) == lab_bits(65536));
    for (int n = 0; n < 2 * j->world + 2; n++) {
        backward(j, 64);
        scaled_step(j, was, now, n < 2 ? -1 : (n - 2) / 2, bad[n % 4]);
        CALL(j->w, fsdp_zero_grad(j->model));
    }
    free(was);
    free(now);
}

static const struct {
    const char *name;
    int mesh, least, most;
} meshes[] = {{"1-D", MESH_1D, 1, 3},
              {"2-D", MESH_HSDP, 2, 4},
              {"slice", MESH_SLICE, 4, 4},
              {"mixed", MESH_MIXED, 4, 4}};

/* As PyTorch's test: inf on one rank only; 1-D and 2-D. */
/* PyTorch: test_fully_shard_grad_scaler.py test_gradient_scaler. Done: the test writes the
   gradients. You skip the step yourself (PyTorch: the scaler does). */
TEST_P(grad_scaler, gradient_scaler, meshes, SLOW | AT_NIGHT(ASAN)) {
    static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_F16, FSDP_BF16, FSDP_F64};
    int runs = 0;
    for (int world = row->least; world <= row->most; world++) {
        if (row->mesh != MESH_1D && world % 2) continue;
        for (int d = 0; d < 4; d++)
            for (int lanes = 0; lanes <= 2; lanes += 1 + (d > 0), runs++)
                launch(world, row->mesh, dtypes[d], lanes, d == 1, gradient_scaler); /* offload */
    }
    h_message("%s: %d models", row->name, runs);
}

/* Every element of every shard on every rank is tested by its bits: the largest and smallest
   numbers count as finite. */
static void every_place(job *j) {
    static const double largest[FSDP_DTYPE_COUNT] = {
        0, 3.4028234663852886e+38, 1.7976931348623157e+308, 65504, 3.3895313892515355e+38};
    static const double smallest[FSDP_DTYPE_COUNT] = {0, 1.401298464324817e-45,
                                                      4.9406564584124654e-324,
                                                      5.9604644775390625e-8, 9.183549615799121e-41};
    const double bad[] = {LAB_INF, NEG_INF, LAB_NAN, NAN_2};
    fsdp_grad_scaler_state one = {1, 2, 0.5, 2000, 0};
    int64_t places = 0;
    make_model(j);
    backward(j, 1);
    CALL(j->w, fsdp_grad_scaler_create(j->model, NULL, &j->scaler));
    for (int n = 0; n < 2; n++) {
        fsdp_param_view v = FSDP_ZERO;
        while (fsdp_next_param(j->model, &v))
            for (int64_t k = 0; v.shard_grad && k < v.numel; k++)
                lab_put(v.shard_grad, v.grad_dtype, k,
                        (k % 2 ? -1 : 1) * (n ? largest : smallest)[j->s->dtype]);
        CALL(j->w, fsdp_grad_scaler_set_state(j->scaler, &one));
        CALL(j->w, fsdp_grad_scaler_unscale(j->scaler));
        CHECK_EQ_INT(fsdp_grad_scaler_found_inf(j->scaler), 0);
    }
    for (int rank = 0; rank < j->world; rank++) {
        for (int p = 0; p < UNITS * PARAMS; p++) {
            fsdp_param_view v;
            CALL(j->w, fsdp_param_at(j->model, p, &v));
            if (!v.shard_grad) continue;
            int64_t counts[2] = {j->rank == rank ? v.numel : 0, 0};
            CALL(j->w, fsdp_all_reduce(j->w, NULL, counts, 1, FSDP_I64, FSDP_SUM));
            for (int64_t k = 0; k < counts[0]; k++, places++) {
                double was = j->rank == rank ? lab_get(v.shard_grad, v.grad_dtype, k) : 0;
                if (j->rank == rank) lab_put(v.shard_grad, v.grad_dtype, k, bad[places % 4]);
                CALL(j->w, fsdp_grad_scaler_set_state(j->scaler, &one));
                CALL(j->w, fsdp_grad_scaler_unscale(j->scaler));
                W_CHECK(fsdp_grad_scaler_found_inf(j->scaler) == 1, "rank %d parameter %d at %lld",
                        rank, p, (long long)k);
                if (j->rank == rank) lab_put(v.shard_grad, v.grad_dtype, k, was);
            }
        }
    }
    if (j->rank == 0) h_message("%s: %lld places", w_case, (long long)places);
}
static const struct {
    const char *name;
    fsdp_dtype dtype;
} dtypes[] = {{"f32", FSDP_F32}, {"f16", FSDP_F16}, {"bf16", FSDP_BF16}, {"f64", FSDP_F64}};
TEST_P(scaler, every_place, dtypes) {
    launch(1, MESH_1D, row->dtype, 0, 0, every_place);
    launch(2, MESH_1D, row->dtype, 0, 0, every_place);
}

/* Scales that are no power of two; products that are rounded, and that vanish. */
static void rounding(job *j) {
    static const double scales[] = {3, 1000.0 / 3, 65536, 1e-3, 1, 8388608, 7.5e30, 2e-38};
    snapshot *was = (snapshot *)malloc(sizeof *was), *now = (snapshot *)malloc(sizeof *now);
    uint64_t rng = h_seed() + (uint64_t)j->rank;
    CHECK(was && now);
    make_model(j);
    CALL(j->w, fsdp_adamw_create(j->model, NULL, &j->opt));
    CALL(j->w, fsdp_grad_scaler_create(j->model, NULL, &j->scaler));
    backward(j, 1);
    for (size_t n = 0; n < sizeof scales / sizeof *scales; n++) {
        fsdp_param_view v = FSDP_ZERO;
        fsdp_grad_scaler_state state = {0, 2, 0.5, 2000, 0};
        state.scale = scales[n];
        while (fsdp_next_param(j->model, &v))
            for (int64_t k = 0; v.shard_grad && k < v.numel; k++)
                lab_put(v.shard_grad, v.grad_dtype, k,
                        ((double)(h_rand64(&rng) >> 40) / 16777216 - 0.5) *
                            (double)(1 << h_rand64(&rng) % 16));
        take(j, was);
        CALL(j->w, fsdp_grad_scaler_set_state(j->scaler, &state));
        double scale = fsdp_grad_scaler_scale(j->scaler);
        CHECK(lab_bits(scale) == lab_bits((double)(float)scales[n]));
        CALL(j->w, fsdp_grad_scaler_unscale(j->scaler));
        CHECK_EQ_INT(fsdp_grad_scaler_found_inf(j->scaler), 0); /* it tests before it divides */
        check_unscaled(j, was, now, scale);
    }
    free(was);
    free(now);
}
TEST_P(scaler, rounding, dtypes) { launch(2, MESH_1D, row->dtype, 0, 0, rounding); }

/* A device that allocates the gradients of two dtypes contiguously: they must not become one span.
   */
enum { SIDE = 256 };
static char side[SIDE * 6] __attribute__((aligned(64)));
static int side_blocks[2]; /* for 2 and 4 bytes per element: shards, then gradients */
static fsdp_status side_alloc(fsdp_device *device, int kind, size_t size, void **ptr) {
    if ((size != SIDE * 2 && size != SIDE * 4) || ++side_blocks[size / SIDE / 4] != 2)
        return lib_host_ops()->alloc(device, kind, size, ptr);
    *ptr = memset(side + (size == SIDE * 2 ? SIDE * 4 : 0), 0, size);
    return FSDP_OK;
}
static void side_free(fsdp_device *device, int kind, void *ptr, size_t size) {
    if ((char *)ptr < side || (char *)ptr >= side + sizeof side)
        lib_host_ops()->free(device, kind, ptr, size);
}
static void neighbours(lab_rank *r) {
    static const fsdp_dtype stored[2] = {FSDP_F32, FSDP_BF16};
    fsdp_model_desc md = FSDP_ZERO;
    md.cpu_offload = 1; /* so that no backend allocates these blocks */
    fsdp_model *m = lab_model(r->w, &md);
    fsdp_grad_scaler *scaler;
    fsdp_unit *u[2];
    fsdp_param_view v[2];
    for (int i = 0; i < 2; i++) {
        fsdp_param_desc p = fsdp_vec("p", SIDE);
        p.dtype = stored[i];
        u[i] = lab_unit(r->w, m, NULL, &p, 1);
    }
    CALL(r->w, fsdp_grad_scaler_create(m, NULL, &scaler));
    const double scale = fsdp_grad_scaler_scale(scaler); /* a power of two */
    for (int i = 0; i < 2; i++) lab_forward(r->w, u[i]);
    for (int i = 1; i >= 0; i--) {
        CALL(r->w, fsdp_pre_backward(u[i]));
        for (int64_t k = 0; k < SIDE; k++)
            lab_put(fsdp_grad(u[i], 0), stored[i], k, scale * (double)(k % 61 - 30));
        CALL(r->w, fsdp_post_backward(u[i]));
    }
    CALL(r->w, fsdp_finalize_backward(m));
    for (int i = 0; i < 2; i++) v[i] = lab_view(r->w, u[i], 0);
    CHECK(v[0].shard_grad == (void *)side && v[1].shard_grad == (void *)(side + SIDE * 4));
    CALL(r->w, fsdp_grad_scaler_unscale(scaler));
    CHECK_EQ_INT(fsdp_grad_scaler_found_inf(scaler), 0);
    for (int i = 0; i < 2; i++)
        for (int64_t k = 0; k < SIDE; k++)
            W_CHECK(lab_get(v[i].shard_grad, stored[i], k) == (double)(k % 61 - 30), "gradient %d, %d: %g", i,
                    (int)k, lab_get(v[i].shard_grad, stored[i], k));
}
TEST(scaler, neighbours_of_two_dtypes, NO(GLOO | NCCL | ASAN)) { /* there blocks are larger */
    fsdp_device_ops device = *lib_host_ops();
    lab_how how = FSDP_ZERO;
    device.alloc = side_alloc, device.free = side_free;
    how.device_ops = &device;
    lab_run(1, &how, neighbours, NULL);
}

/* ---- the scale ------------------------------------------------------------------------------- */

/* Makes the smallest model. */
static void tiny_model(job *j) {
    fsdp_param_desc d = fsdp_vec("p", 1);
    fsdp_unit_desc ud = FSDP_ZERO;
    ud.params = &d, ud.num_params = 1;
    CALL(j->w, fsdp_model_create(j->w, NULL, &j->model));
    CALL(j->w, fsdp_fully_shard(j->model, &ud, &j->unit[0]));
}
static void tiny_backward(job *j, double gradient) {
    lab_forward(j->w, j->unit[0]);
    CALL(j->w, fsdp_pre_backward(j->unit[0]));
    lab_put(fsdp_grad(j->unit[0], 0), FSDP_F32, 0, gradient);
    CALL(j->w, fsdp_post_backward(j->unit[0]));
    CALL(j->w, fsdp_finalize_backward(j->model));
}
static void tiny_step(job *j, int found) {
    tiny_backward(j, found && j->rank == j->world - 1 ? LAB_INF : 1);
    CALL(j->w, fsdp_grad_scaler_unscale(j->scaler));
    CHECK_EQ_INT(fsdp_grad_scaler_found_inf(j->scaler), found);
    CALL(j->w, fsdp_grad_scaler_update(j->scaler));
    CALL(j->w, fsdp_zero_grad(j->model));
}

static void sequence(job *j) {
    static const struct {
        int found, tracker;
        double scale;
    } steps[] = {{0, 1, 65536}, {0, 2, 65536}, {0, 0, 131072}, {1, 0, 65536},
                 {0, 1, 65536}, {0, 2, 65536}, {1, 0, 32768},  {1, 0, 16384},
                 {0, 1, 16384}, {0, 2, 16384}, {0, 0, 32768}};
    fsdp_grad_scaler_desc d = FSDP_ZERO;
    fsdp_grad_scaler *other;
    tiny_model(j);
    d.growth_interval = 3;
    CALL(j->w, fsdp_grad_scaler_create(j->model, &d, &j->scaler));
    for (size_t n = 0; n < sizeof steps / sizeof *steps; n++) {
        fsdp_grad_scaler_state s;
        tiny_step(j, steps[n].found);
        CALL(j->w, fsdp_grad_scaler_get_state(j->scaler, &s));
        W_CHECK(s.growth_tracker == steps[n].tracker &&
                    lab_bits(s.scale) == lab_bits(steps[n].scale),
                "step %d: scale %g, tracker %d", (int)n, s.scale, s.growth_tracker);
        /* Another scaler that gets the state continues with it. */
        if (n % 4 != 3) continue;
        CALL(j->w, fsdp_grad_scaler_create(j->model, NULL, &other));
        CALL(j->w, fsdp_grad_scaler_set_state(other, &s));
        fsdp_grad_scaler_destroy(j->scaler);
        j->scaler = other;
    }
}
TEST(scaler, sequence) {
    for (int world = 1; world <= 3; world++) launch(world, MESH_1D, FSDP_F32, 0, 0, sequence);
}

/* Each unscale issues one all-reduce, and other calls none. */
static void one_collective(job *j) {
    make_model(j);
    CALL(j->w, fsdp_grad_scaler_create(j->model, NULL, &j->scaler));
    for (int n = 0; n < 3; n++) {
        backward(j, 1);
        int64_t before = colls;
        CALL(j->w, fsdp_grad_scaler_unscale(j->scaler));
        CHECK_EQ_INT(colls - before, j->world > 1);
        CHECK_EQ_INT(fsdp_grad_scaler_found_inf(j->scaler), 0);
        CALL(j->w, fsdp_grad_scaler_update(j->scaler));
        CHECK_EQ_INT(colls - before, j->world > 1);
        CALL(j->w, fsdp_zero_grad(j->model));
    }
}
TEST(scaler, one_collective) {
    for (int world = 1; world <= 3; world++) launch(world, MESH_1D, FSDP_F32, 0, 0, one_collective);
    launch(4, MESH_HSDP, FSDP_F32, 0, 0, one_collective);
    launch(4, MESH_MIXED, FSDP_F32, 0, 0, one_collective);
}

/* Rank 0's state differs in one number; in row 0 in none. */
static void different(job *j) {
    static const char *const says[] = {"growth_tracker: it is 0 on one and 1 on another",
                                       "scale: it is 255 on one and 256 on another",
                                       "growth_factor: it is 2 on one and 2.5 on another",
                                       "backoff_factor: it is 0.25 on one and 0.5 on another",
                                       "growth_interval: it is 10 on one and 11 on another"};
    for (int n = 0; n < 6; n++) {
        fsdp_grad_scaler_state s = {256, 2, 0.5, 10, 0};
        make_model(j);
        CALL(j->w, fsdp_grad_scaler_create(j->model, NULL, &j->scaler));
        if (j->rank == 0 && n == 1) s.growth_tracker = 1;
        if (j->rank == 0 && n == 2) s.scale = 255;
        if (j->rank == 0 && n == 3) s.growth_factor = 2.5;
        if (j->rank == 0 && n == 4) s.backoff_factor = 0.25;
        if (j->rank == 0 && n == 5) s.growth_interval = 11;
        CALL(j->w, fsdp_grad_scaler_set_state(j->scaler, &s));
        backward(j, 1);
        const fsdp_status status = fsdp_grad_scaler_unscale(j->scaler);
        CHECK_STATUS(status, n ? FSDP_ERR_MISMATCH : FSDP_OK);
        if (n) {
            CHECK_MSG(strstr(fsdp_last_error(j->w), says[n - 1]), "%s", fsdp_last_error(j->w));
            CHECK_EQ_INT(fsdp_grad_scaler_found_inf(j->scaler), -1);
        }
        fsdp_model_destroy(j->model);
    }
}
TEST(scaler, ranks_that_differ) {
    launch(3, MESH_1D, FSDP_F32, 0, 0, different);
    launch(4, MESH_HSDP, FSDP_F32, 0, 0, different);
}

/* At the ends of the range the scale stays. */
static void ends(job *j) {
    static const struct {
        double scale, growth, backoff;
        int found;
        double want;
    } rows[] = {{8.5070591730234616e+37, 2, 0.5, 0, 8.5070591730234616e+37},
                {8.5070591730234616e+37, 2, 0.5, 1, 4.2535295865117308e+37},
                {1.1754943508222875e-38, 2, 0.5, 1, 1.1754943508222875e-38},
                {1.1754943508222875e-38, 2, 0.5, 0, 2.350988701644575e-38},
                {1e30, 1e10, 0.5, 0, 1e30},
                {3, 1.1, 0.3, 0, 3 * 1.1},
                {3, 1.1, 0.3, 1, 3 * 0.3}};
    tiny_model(j);
    CALL(j->w, fsdp_grad_scaler_create(j->model, NULL, &j->scaler));
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        fsdp_grad_scaler_state s = {0, 0, 0, 1, 0}, after;
        s.scale = rows[n].scale, s.growth_factor = rows[n].growth;
        s.backoff_factor = rows[n].backoff;
        CALL(j->w, fsdp_grad_scaler_set_state(j->scaler, &s));
        tiny_step(j, rows[n].found);
        CALL(j->w, fsdp_grad_scaler_get_state(j->scaler, &after));
        W_CHECK(lab_bits(after.scale) == lab_bits((double)(float)rows[n].want), "row %d: %.17g",
                (int)n, after.scale);
        CHECK_EQ_INT(after.growth_tracker, 0);
    }
}
TEST(scaler, ends_of_the_range) { launch(1, MESH_1D, FSDP_F32, 0, 0, ends); }

/* ---- refused --------------------------------------------------------------------------------- */

static void wrong_order(job *j) {
    tiny_model(j);
    CALL(j->w, fsdp_grad_scaler_create(j->model, NULL, &j->scaler));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_grad_scaler_update(j->scaler),
               "call fsdp_grad_scaler_un");
    REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_grad_scaler_unscale(j->scaler),
               "no parameter has a grad");
    CHECK_EQ_INT(fsdp_grad_scaler_found_inf(j->scaler), -1);
    CALL(j->w, fsdp_pre_forward(j->unit[0]));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_grad_scaler_unscale(j->scaler),
               "'unit0' is in forward");
    CALL(j->w, fsdp_post_forward(j->unit[0]));
    CALL(j->w, fsdp_pre_backward(j->unit[0]));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_grad_scaler_unscale(j->scaler),
               "fsdp_finalize_backward");
    lab_put(fsdp_grad(j->unit[0], 0), FSDP_F32, 0, 3);
    CALL(j->w, fsdp_post_backward(j->unit[0]));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_grad_scaler_unscale(j->scaler),
               "fsdp_finalize_backward");
    CALL(j->w, fsdp_finalize_backward(j->model));
    CALL(j->w, fsdp_grad_scaler_unscale(j->scaler));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_grad_scaler_unscale(j->scaler), "already called");
    CHECK_EQ_INT(fsdp_grad_scaler_found_inf(j->scaler), 0);
    fsdp_param_view v = lab_view(j->w, j->unit[0], 0);
    if (v.numel) /* divided once */
        CHECK(lab_bits(lab_get(v.shard_grad, FSDP_F32, 0)) == lab_bits(3.0 / 65536));
    CALL(j->w, fsdp_grad_scaler_update(j->scaler));
    CHECK_EQ_INT(fsdp_grad_scaler_found_inf(j->scaler), -1);
    REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_grad_scaler_update(j->scaler),
               "call fsdp_grad_scaler_un");
    CALL(j->w, fsdp_zero_grad(j->model));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_grad_scaler_unscale(j->scaler),
               "before fsdp_zero_grad");
    /* A step is abandoned: its state is restored, and the next step works as usual. */
    fsdp_grad_scaler_state s;
    tiny_backward(j, 1);
    CALL(j->w, fsdp_grad_scaler_unscale(j->scaler));
    CALL(j->w, fsdp_grad_scaler_get_state(j->scaler, &s));
    CALL(j->w, fsdp_model_reset(j->model));
    CALL(j->w, fsdp_grad_scaler_set_state(j->scaler, &s));
    tiny_step(j, 0);
    tiny_step(j, 1);
    /* An aborted world. */
    tiny_backward(j, 1);
    CALL(j->w, fsdp_barrier(j->w));
    if (j->rank == 0) fsdp_abort(j->w, "a test");
    while (!lib_failed(j->w)) (void)fsdp_barrier(j->w);
    CHECK_STATUS(fsdp_grad_scaler_unscale(j->scaler), FSDP_ERR_ABORTED);
    CHECK_STATUS(fsdp_grad_scaler_update(j->scaler), FSDP_ERR_ABORTED);
    CHECK_EQ_INT(fsdp_grad_scaler_found_inf(j->scaler), -1);
}
TEST(scaler, wrong_order) {
    launch(1, MESH_1D, FSDP_F32, 0, 0, wrong_order);
    launch(2, MESH_1D, FSDP_F32, 0, 0, wrong_order);
    launch(2, MESH_1D, FSDP_F32, 1, 0, wrong_order);
}

static void refuse_settings(job *j) {
    const struct {
        double scale, growth, backoff;
        int interval, tracker;
        const char *text;
    } rows[] = {{-1, 2, 0.5, 9, 0, "scale is -1"},
                {1e39, 2, 0.5, 9, 0, "scale is 1e+39"},
                {1e-39, 2, 0.5, 9, 0, "scale is 1e-39"},
                {LAB_INF, 2, 0.5, 9, 0, "scale is inf"},
                {LAB_NAN, 2, 0.5, 9, 0, "scale is "},
                {1, 1, 0.5, 9, 0, "growth_factor is 1, expected a finite number > 1"},
                {1, 0.5, 0.5, 9, 0, "growth_factor is 0.5"},
                {1, LAB_INF, 0.5, 9, 0, "growth_factor is inf"},
                {1, NAN_2, 0.5, 9, 0, "growth_factor is "},
                {1, 2, 1, 9, 0, "backoff_factor is 1, expected > 0 and < 1"},
                {1, 2, -0.5, 9, 0, "backoff_factor is -0.5"},
                {1, 2, LAB_NAN, 9, 0, "backoff_factor is "},
                {1, 2, 0.5, -1, 0, "growth_interval is -1"},
                {1, 2, 0.5, 9, 9, "growth_tracker is 9"},
                {1, 2, 0.5, 9, -1, "growth_tracker is -1"},
                {0, 2, 0.5, 9, 0, "scale is 0"}, /* in a desc, the following are defaults */
                {1, 0, 0.5, 9, 0, "growth_factor is 0"},
                {1, 2, 0, 9, 0, "backoff_factor is 0"},
                {1, 2, 0.5, 0, 0, "growth_interval is 0"}};
    fsdp_grad_scaler *other = NULL;
    fsdp_grad_scaler_state s, after;
    tiny_model(j);
    CALL(j->w, fsdp_grad_scaler_create(j->model, NULL, &j->scaler));
    int64_t live = j->heap->live;
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        fsdp_grad_scaler_desc d = FSDP_ZERO;
        d.init_scale = rows[n].scale, d.growth_factor = rows[n].growth;
        d.backoff_factor = rows[n].backoff, d.growth_interval = rows[n].interval;
        s.scale = rows[n].scale, s.growth_factor = rows[n].growth;
        s.backoff_factor = rows[n].backoff, s.growth_interval = rows[n].interval;
        s.growth_tracker = rows[n].tracker;
        REFUSED_AS(FSDP_ERR_INVALID_ARG, j->w, fsdp_grad_scaler_set_state(j->scaler, &s),
                   rows[n].text);
        if (n >= 13) continue;
        REFUSED_AS(FSDP_ERR_INVALID_ARG, j->w, fsdp_grad_scaler_create(j->model, &d, &other),
                   rows[n].text);
        CHECK(other == NULL);
    }
    CALL(j->w, fsdp_grad_scaler_get_state(j->scaler, &after)); /* no value was taken over */
    CHECK(lab_bits(after.scale) == lab_bits(65536) &&
          lab_bits(after.growth_factor) == lab_bits(2) &&
          lab_bits(after.backoff_factor) == lab_bits(0.5) && after.growth_interval == 2000 &&
          after.growth_tracker == 0);
    fsdp_grad_scaler_desc d = FSDP_ZERO;
    d.end_canary = 1;
    CHECK_STATUS(fsdp_grad_scaler_create(j->model, &d, &other), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_grad_scaler_create(NULL, NULL, &other), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_grad_scaler_create(j->model, NULL, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_grad_scaler_unscale(NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_grad_scaler_update(NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_grad_scaler_get_state(NULL, &after), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_grad_scaler_get_state(j->scaler, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_grad_scaler_set_state(NULL, &after), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_grad_scaler_set_state(j->scaler, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_EQ_INT(fsdp_grad_scaler_found_inf(NULL), -1);
    CHECK(lab_bits(fsdp_grad_scaler_scale(NULL)) == lab_bits(1));
    fsdp_grad_scaler_destroy(NULL);
    for (int n = 0; n < 2; n++) { /* the object, and the model's entry for it */
        w_fail(j->heap, n);
        CHECK_STATUS(fsdp_grad_scaler_create(j->model, NULL, &other), FSDP_ERR_OUT_OF_MEMORY);
        w_fail(j->heap, -1);
        CHECK(other == NULL);
    }
    CHECK_EQ_INT(j->heap->live, live);
    CALL(j->w, fsdp_grad_scaler_create(j->model, NULL, &other));
    fsdp_grad_scaler_destroy(other);
    CHECK_EQ_INT(j->heap->live, live);
}
TEST(scaler, refuses) { launch(1, MESH_1D, FSDP_F32, 0, 0, refuse_settings); }

/* A caller that asks for sizes only gets no address, and so cannot have written. */
static void sizes(lab_rank *r) {
    fsdp_param_desc p = fsdp_vec("w", 8);
    fsdp_grad_scaler *scaler;
    fsdp_state_item item = FSDP_ZERO;
    fsdp_model *m = lab_model(r->w, NULL);
    (void)lab_unit(r->w, m, NULL, &p, 1);
    CALL(r->w, fsdp_grad_scaler_create(m, NULL, &scaler));
    item.sizes_only = 1;
    CALL(r->w, fsdp_next_state(m, &item));
    CHECK(strcmp(item.name, "state") == 0 && item.numel == 5);
    CALL(r->w, fsdp_state_loaded(m));
    CHECK(lab_same(fsdp_grad_scaler_scale(scaler), 65536));
}
TEST(scaler, sizes_only) { lab_run(1, NULL, sizes, NULL); }

/* ---- training -------------------------------------------------------------------------------- */

enum { SIZE = 97, TRAIN = 150 };

static double aim(int64_t k) { return (double)(k * 5 % 23) / 16 - 0.6875; }
static void at_zero(void *user, const fsdp_param_view *block) {
    (void)user;
    memset(block->data, 0, (size_t)block->numel * fsdp_dtype_size(block->dtype));
}

/* Gradients of 1e-6 * (p - aim) in f16: most of their bits are lost without a scale, and a scale
   that is too large overflows. SGD with a rate of 1e5 leaves 0.9 of the distance in each step. */
static void train(job *j) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_param_desc d = fsdp_vec("p", SIZE);
    fsdp_grad_scaler_desc sd = FSDP_ZERO;
    fsdp_sgd *opt;
    fsdp_param_view v;
    int found = 0, done = 0, grown = 0;
    double worst = 0;
    md.param_dtype = FSDP_F16;
    md.reduce_dtype = j->variant ? FSDP_F16 : FSDP_F32;
    ud.params = &d, ud.num_params = 1;
    CALL(j->w, fsdp_model_create(j->w, &md, &j->model));
    CALL(j->w, fsdp_fully_shard(j->model, &ud, &j->unit[0]));
    CALL(j->w, fsdp_init_params(j->model, at_zero, NULL));
    CALL(j->w, fsdp_sgd_create(j->model, NULL, &opt));
    sd.init_scale = 1099511627776.0, sd.growth_interval = 10;
    CALL(j->w, fsdp_grad_scaler_create(j->model, &sd, &j->scaler));
    for (int step = 0; step < TRAIN; step++) {
        double scale = fsdp_grad_scaler_scale(j->scaler), same[2] = {scale, -scale};
        CALL(j->w, fsdp_all_reduce(j->w, NULL, same, 2, FSDP_F64, FSDP_MAX));
        CHECK(lab_bits(same[0]) == lab_bits(scale) && lab_bits(same[1]) == lab_bits(-scale));
        lab_forward(j->w, j->unit[0]);
        CALL(j->w, fsdp_pre_backward(j->unit[0]));
        for (int64_t k = 0; k < SIZE; k++) {
            double p = lab_get(fsdp_data(j->unit[0], 0), FSDP_F16, k);
            lab_put(fsdp_grad(j->unit[0], 0), FSDP_F16, k, scale * 1e-6 * (p - aim(k)));
        }
        CALL(j->w, fsdp_post_backward(j->unit[0]));
        CALL(j->w, fsdp_finalize_backward(j->model));
        CALL(j->w, fsdp_grad_scaler_unscale(j->scaler));
        found += fsdp_grad_scaler_found_inf(j->scaler);
        if (!fsdp_grad_scaler_found_inf(j->scaler)) {
            CALL(j->w, fsdp_sgd_step(opt, 1e5));
            done++;
        }
        CALL(j->w, fsdp_grad_scaler_update(j->scaler));
        CALL(j->w, fsdp_zero_grad(j->model));
        grown += fsdp_grad_scaler_scale(j->scaler) > scale;
    }
    CALL(j->w, fsdp_param_view_get(j->unit[0], 0, &v));
    for (int64_t k = 0; k < v.numel; k++) {
        double off = fabs(lab_get(v.shard, FSDP_F32, k) - aim(fsdp_view_index(&v, k)));
        if (off > worst) worst = off;
    }
    W_CHECK(found >= 2 && grown >= 2 && done > 60, "%d found, %d grown, %d steps done", found,
            grown, done);
    W_CHECK(worst < 1.5e-3, "%g from the aim", worst);
    if (j->rank == 0)
        h_message("%s: %d steps left out, off by %.1g, last scale %g", w_case, found, worst,
                  fsdp_grad_scaler_scale(j->scaler));
}
TEST(scaler, train_f16) {
    for (int world = 1; world <= 3; world++)
        for (int lanes = 0; lanes <= 2; lanes++)
            launch(world, MESH_1D, FSDP_F16, lanes, lanes == 0, train);
    launch(4, MESH_HSDP, FSDP_F16, 0, 0, train);
}
