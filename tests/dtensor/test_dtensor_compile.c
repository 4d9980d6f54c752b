/* test_dtensor_compile.c - PyTorch's tests of DTensor under a compiler. Nothing is compiled here:
   fsdp_redistribution_create makes everything that depends on placements once, and a call issues
   prepared ops. So these tests check ops where PyTorch's check the compiler. A step runs twice: the
   second run has equal ops and equal bits, it allocates nothing and searches no route (`twice`).
   "Compiled again" corresponds to one more route. A backward is
   fsdp_redistribution_create_backward.

   Values are integers, so that sums are exact in any order, and results equal those of one process
   bit by bit. PyTorch's tests run rank 0 of 2 on a fake process group.

   SPDX-License-Identifier: MIT */
#define TAGS AT_NIGHT(GLOO | NCCL)
#include "harness.h"
#include <math.h> /* exp, fabs, log, sqrt */
#include "golden.h"
#include "lab.h"
#include "lab_dtensor.h"
#include "lab_tensor.h"
#include "plan.h"

static const way ways[] = {
    {"inline", 0, 0, RIG_RANKS}, {"lanes", 2, 0, RIG_RANKS}, {"processes", 0, 1, RIG_RANKS}};
/* In some ways one process simulates a rank: then all ranks have equal values. */
static const way all_ways[] = {{"inline", 0, 0, RIG_RANKS},
                               {"lanes", 2, 0, RIG_RANKS},
                               {"processes", 0, 1, RIG_RANKS},
                               {"simulated", 0, 0, RIG_SIM_INLINE},
                               {"simulated,streams", 0, 0, RIG_SIM_STREAMS}};
/* Ways for work next to the caller's stream. */
static const way streams[] = {{"inline", 0, 0, RIG_RANKS},
                              {"1 lane", 1, 0, RIG_RANKS},
                              {"2 lanes", 2, 0, RIG_RANKS},
                              {"simulated,streams", 0, 0, RIG_SIM_STREAMS}};

static const fsdp_tensor_op_args no_args = FSDP_ZERO;

/* Returns the placements of an operation on one or two inputs. */
static fsdp_propagation propagate(int op, const fsdp_spec *a, const fsdp_spec *b,
                                  const fsdp_tensor_op_args *args) {
    const fsdp_spec *in[2];
    fsdp_propagation p;
    in[0] = a, in[1] = b;
    CHECK_OK(fsdp_propagate(op, in, b ? 2 : 1, args, NULL, &p));
    return p;
}
static int cut_along(const fsdp_spec *s, int mesh_dim, int dim) {
    return s->place[mesh_dim].kind == FSDP_SHARD && s->place[mesh_dim].dim == dim;
}
static int same_spec(const fsdp_spec *a, const fsdp_spec *b) { return !memcmp(a, b, sizeof *a); }

/* ---- basics and metadata --------------------------------------------------------------------- */

typedef struct basic {
    fsdp_redistribution *square, *sum, *back; /* none of them has anything to do */
    float *x, *grad;
    int trains;
} basic;
static void basic_step(rig *r, void *arg) {
    basic *b = (basic *)arg;
    float y[16];
    run_redist(r, b->square, b->x, b->x);
    for (int i = 0; i < 16; i++) y[i] = b->x[i] * b->x[i] + 2;
    run_redist(r, b->sum, y, y);
    rig_saw(r, y, 16);
    for (int i = 0; i < 16; i++) W_CHECK(y[i] == (float)(i * i + 2), "%g", (double)y[i]);
    if (!b->trains) return;
    /* gradient of the sum over this rank's part */
    for (int i = 0; i < 16; i++) b->grad[i] = 2 * b->x[i];
    run_redist(r, b->back, b->grad, b->grad);
    rig_saw(r, b->grad, 16);
    for (int i = 0; i < 16; i++) W_CHECK(b->grad[i] == (float)(2 * i), "%g", (double)b->grad[i]);
}
static void basic_body(rig *r) {
    const int64_t local[2] = {4, 4};
    fsdp_placement cut = {FSDP_SHARD, 0, 0, 0};
    basic b = FSDP_ZERO;
    fsdp_spec x;
    CHECK_OK(fsdp_spec_infer(&x, 1, r->b.shape, &cut, FSDP_F32, 2, local));
    CHECK(x.shape[0] == 8 && x.shape[1] == 4);
    const fsdp_propagation square = propagate(FSDP_TENSOR_OP_MUL, &x, &x, &no_args),
                           plus = propagate(FSDP_TENSOR_OP_POINTWISE, &square.out, NULL, &no_args),
                           scaled = propagate(FSDP_TENSOR_OP_SCALE, &x, NULL, &no_args);
    CHECK(square.cost_us == 0 && plus.cost_us == 0 && scaled.cost_us == 0);
    CHECK(same_spec(&square.out, &x) && same_spec(&plus.out, &x) && same_spec(&scaled.out, &x));
    CHECK(same_spec(&square.grad[0], &x) && same_spec(&square.grad[1], &x));
    CHECK(same_spec(&scaled.grad[0], &x));
    b.trains = *(const int *)r->arg;
    b.x = rig_own(r, 16), b.grad = rig_own(r, 16);
    for (int i = 0; i < 16; i++) b.x[i] = (float)i;
    b.square = redist(r, "x", x, square.in[0]);
    b.sum = redist(r, "y", square.out, plus.in[0]);
    b.back = backward_of(r, b.square, &square.grad[0]);
    const int from = twice(r, basic_step, &b);
    CHECK_EQ_STR(records_from(r, from, ALL_RECORDS), "");
    CHECK_EQ_INT(collectives_in(r, from, r->b.log.num), 0);
    CHECK_EQ_INT(routes_of(r), 0);
}
static void basic_task(const way *how, int trains) {
    task t = FSDP_ZERO;
    t.body = basic_body, t.arg = &trains, t.ndim = 1, t.mesh[0] = 2;
    run_task(how, &t);
}
/* PyTorch: test_dtensor_compile.py test_dtensor_basic. Done: no op and no route; the gradient is
   2x. */
TEST_P(dtensor_compile, dtensor_basic, all_ways) { basic_task(row, 1); }
/* PyTorch: test_dtensor_compile.py test_dynamo_dtensor. Done: no op and no route. */
TEST_P(dtensor_compile, dynamo_dtensor, all_ways) { basic_task(row, 0); }

/* Describing issues nothing; specs are plain values. The last lines show that the log sees ops. */
static void export_body(rig *r) {
    fsdp_spec x = spec2(r, "S0", 8, 4), copy, whole = spec2(r, "R", 8, 4);
    const int from = r->b.log.num;
    fsdp_propagation p = propagate(FSDP_TENSOR_OP_ADD, &x, &x, &no_args);
    fsdp_local l;
    memset(&copy, 0x5a, sizeof copy);
    memcpy(&copy, &x, sizeof x);
    CHECK(same_spec(&copy, &x) && same_spec(&p.out, &x) && p.cost_us == 0);
    CHECK_OK(fsdp_spec_local(&copy, r->b.coord, &l));
    CHECK(l.shape[0] == 4 && l.start[0] == 4 * r->b.coord[0] && l.numel == 16);
    fsdp_redistribution *gather = redist(r, "x", copy, whole);
    CHECK_EQ_INT(r->b.log.num, from);
    run_redist(r, gather, rig_shared(r, 32), rig_shared(r, 16));
    CHECK_EQ_STR(records_from(r, from, ALL_RECORDS), "AG 16/2");
}
/* PyTorch: test_dtensor_compile.py test_dtensor_basic_export. Partly: creating a redistribution
   issues no op; specs copied as bytes are equal. No export, so that there is no graph to read. */
TEST_P(dtensor_compile, dtensor_basic_export, all_ways) { run_on(row, 2, export_body); }

/* PyTorch's function of a placement. dim < 0: any dim. */
static int is_shard(const fsdp_placement *p, int dim) {
    return p->kind == FSDP_SHARD && (dim < 0 || p->dim == dim);
}
static int score(const fsdp_placement *p) {
    int a = p->kind == FSDP_REPLICATE;
    if (is_shard(p, -1)) CHECK(p->dim >= 0);
    a += 2 * is_shard(p, -1) + 2 * is_shard(p, 0) + 2 * is_shard(p, 0) + 2 * is_shard(p, -1);
    return a + (p->kind == FSDP_PARTIAL ? 3 : 0);
}
/* PyTorch: test_dtensor_compile.py test_placement_compile. Done: a strided placement is an order
   here: it goes to PyTorch's form and back. */
TEST(dtensor_compile, placement_compile) {
    const int32_t one[1] = {4};
    const int64_t shape[2] = {48, 4};
    const struct {
        fsdp_placement place;
        int score;
    } rows[] = {{{FSDP_SHARD, 0, 0, 0}, 8},
                {{FSDP_SHARD, -2, 0, 0}, 8}, /* the first of two dims */
                {{FSDP_SHARD, -1, 0, 0}, 4},
                {{FSDP_REPLICATE, 0, 0, 0}, 1},
                {{FSDP_PARTIAL, 0, FSDP_SUM, 0}, 3}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fsdp_spec s;
        CHECK_OK(fsdp_spec_init(&s, 1, one, &rows[i].place, FSDP_F32, 2, shape));
        CHECK_EQ_INT(score(&s.place[0]), rows[i].score);
    }
    for (int32_t factor = 2; factor <= 4; factor++) { /* _StridedShard(0, factor) */
        const int32_t mesh[2] = {3, factor};
        const fsdp_placement cuts[2] = {{FSDP_SHARD, 0, 0, 1}, {FSDP_SHARD, 0, 0, 0}};
        const fsdp_placement plain[2] = {{FSDP_SHARD, 0, 0, 0}, {FSDP_SHARD, 0, 0, 1}};
        fsdp_spec s, back;
        int64_t factors[2] = {0, 0};
        CHECK_OK(fsdp_spec_init(&s, 2, mesh, cuts, FSDP_F32, 2, shape));
        CHECK_OK(fsdp_spec_to_strided(&s, factors));
        CHECK(factors[0] == factor && factors[1] == 1);
        CHECK_OK(fsdp_spec_init(&back, 2, mesh, plain, FSDP_F32, 2, shape));
        CHECK_OK(fsdp_spec_from_strided(&back, factors));
        CHECK(same_spec(&back, &s));
        CHECK_OK(fsdp_spec_init(&back, 2, mesh, plain, FSDP_F32, 2, shape));
        CHECK_OK(fsdp_spec_to_strided(&back, factors)); /* sharded from left to right: no factor */
        CHECK(factors[0] == 1 && factors[1] == 1);
    }
}

static int sizes_of(const rig *r) {
    int32_t all[2] = {-1, -1};
    CHECK_EQ_INT(fsdp_mesh_ranks(r->b.mesh, -1, all), 2);
    CHECK(all[0] == 0 && all[1] == 1);
    CHECK_EQ_INT(fsdp_mesh_rank(r->b.mesh, 0), r->rank);
    CHECK_EQ_INT(fsdp_mesh_rank(r->b.mesh, 1), 0);
    return fsdp_mesh_size(r->b.mesh, -1) + fsdp_mesh_size(r->b.mesh, 0) +
           fsdp_mesh_size(r->b.mesh, fsdp_mesh_dim(r->b.mesh, "dp"));
}
static void mesh_body(rig *r) {
    const fsdp_param_desc p = fsdp_mat("w", 4, 4);
    fsdp_unit *unit = lab_unit(r->b.w, r->b.model, NULL, &p, 1);
    fsdp_dmesh_desc d = FSDP_ZERO;
    fsdp_dmesh *other;
    fsdp_redistribution_desc rd = FSDP_ZERO;
    CHECK_EQ_INT(sizes_of(r), 6);
    CALL(r->b.w, fsdp_pre_forward(unit));
    CHECK_EQ_INT(sizes_of(r), 6);
    CALL(r->b.w, fsdp_post_forward(unit));
    d.mesh = lab_mesh2(r->b.w, 2, 1, "dp", "tp");
    CHECK(d.mesh != r->b.mesh && fsdp_mesh_equal(d.mesh, r->b.mesh));
    CALL(r->b.w, fsdp_dmesh_create(r->b.model, &d, &other));
    fsdp_redistribution *a = redist(r, "x", spec2(r, "S0 R", 4, 2), spec2(r, "R R", 4, 2)), *b;
    rd.name = "x", rd.from = spec2(r, "S0 R", 4, 2), rd.to = spec2(r, "R R", 4, 2);
    CALL(r->b.w, fsdp_redistribution_create(other, &rd, &b));
    CHECK(a != b); /* they share nothing, but agree */
    CHECK(info_of(r, a).routes == 1 && info_of(r, b).routes == 1);
    float *x = rig_own(r, 4), *y = rig_own(r, 8), *z = rig_own(r, 8), *whole = values(3, 8);
    put_part(r, &rd.from, whole, x);
    run_redist(r, a, y, x), run_redist(r, b, z, x);
    check_same(y, whole, 8, "gathered");
    check_same(z, whole, 8, "gathered over the other one");
    fsdp_dmesh_destroy(other);
    run_redist(r, a, z, x);
    CHECK(info_of(r, a).runs == 2);
    free(whole);
}
/* PyTorch: test_dtensor_compile.py test_device_mesh_compile. Partly: sizes, rank and ranks. No
   process groups: they are not shown. */
TEST_P(dtensor_compile, device_mesh_compile, ways) { run_on2(row, 2, 1, mesh_body, NULL); }

static void local_rank_body(rig *r) {
    fsdp_dmesh_desc d = FSDP_ZERO;
    fsdp_dmesh *none;
    const int32_t dp = fsdp_mesh_dim(r->b.mesh, "dp");
    fsdp_mesh *alone = lab_slice(r->b.w, r->b.mesh, 0);
    CHECK_EQ_INT(dp, 0);
    CHECK_EQ_INT(fsdp_mesh_rank(r->b.mesh, dp), r->rank / 2);
    CHECK_EQ_INT(fsdp_mesh_rank(r->b.mesh, 0), r->rank / 2);
    CHECK_EQ_INT(fsdp_mesh_rank(r->b.mesh, fsdp_mesh_dim(r->b.mesh, "tp")), r->rank % 2);
    CHECK_EQ_INT(fsdp_mesh_rank(alone, 0), r->rank / 2);
    CHECK_EQ_INT(fsdp_mesh_rank(alone, -1), -1); /* a dim must be named */
    CHECK_EQ_INT(fsdp_mesh_dim(r->b.mesh, "ep"), -1);
    d.mesh = r->b.mesh, d.tp_dim = "ep";
    REFUSED(r->b.w, fsdp_dmesh_create(r->b.model, &d, &none),
            "the mesh has no dim 'ep', which tp_dim names");
    CHECK(none == NULL);
}
/* PyTorch: test_dtensor_compile.py test_get_local_rank_compile. Done: a dim is always named: none,
   -1, gives -1. */
TEST_P(dtensor_compile, get_local_rank_compile, ways) { run_on2(row, 2, 2, local_rank_body, NULL); }

/* From a spec to itself: no step, no op, and the memory may be the same. */
static void identity_step(rig *r, void *arg) {
    float *x = (float *)arg;
    CALL(r->b.w, fsdp_redistribute((fsdp_redistribution *)(uintptr_t)r->any, x, x));
    for (int i = 0; i < 4; i++) W_CHECK(x[i] == (float)i, "%g", (double)x[i]);
}
static void identity_body(rig *r) {
    const fsdp_spec s = spec2(r, "S0", 2 * r->ranks, 2);
    const fsdp_redistribution_info i = info_of(r, redist(r, "x", s, s));
    float *x = rig_own(r, 4);
    for (int k = 0; k < 4; k++) x[k] = (float)k;
    CHECK(i.route.num_steps == 0 && i.route.wire_bytes == 0 && i.from.numel == 4);
    const int from = twice(r, identity_step, x);
    CHECK_EQ_INT(r->b.log.num, from);
    CHECK_EQ_INT((int64_t)info_of(r, r->any).runs, 2);
    CHECK_EQ_INT(routes_of(r), 0);
}
/* PyTorch: test_dtensor_compile.py test_fakify_dtensor. Done: from a spec to itself: no op, in the
   caller's memory. */
TEST_P(dtensor_compile, fakify_dtensor, all_ways) {
    run_on(row, 2, identity_body);
    if (row->played) run_on(row, 4096, identity_body);
}

/* A redistribution must not change its input: checked with canaries, in memory that peers read and
   in other memory. After the call the caller overwrites the input, and the result stays. */
typedef struct mutation {
    const char *from, *to, *wire;
} mutation;
static void mutations_body(rig *r) {
    static const mutation rows[] = {{"S0", "R", "AG 6/2"},
                                    {"P", "R", "AR 10/2"},
                                    {"P", "S0", "RS 6/2"},
                                    {"R", "S1", ""},
                                    {"S1", "S0", NULL}};
    float *whole = values(11, 10), kept[16];
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int shared = 0; shared < 2; shared++) {
            const fsdp_spec from = spec2(r, rows[i].from, 5, 2), to = spec2(r, rows[i].to, 5, 2);
            fsdp_redistribution *run = redist(r, "x", from, to);
            float *x = shared ? rig_shared(r, 16) : rig_own(r, 16);
            float *y = shared ? rig_shared(r, 16) : rig_own(r, 16);
            for (int k = 0; k < 16; k++) x[k] = -77;
            const int64_t n = put_part(r, &from, whole, x);
            for (int64_t k = 0; k < n && rows[i].from[0] == 'P' && r->rank; k++) x[k] = 0;
            memcpy(kept, x, sizeof kept);
            const int at = r->b.log.num;
            run_redist(r, run, y, x);
            if (rows[i].wire) CHECK_EQ_STR(records_from(r, at, COLLECTIVES), rows[i].wire);
            CHECK_EQ_MEM(x, kept, sizeof kept);
            for (int k = 0; k < 16; k++) x[k] += 2;
            check_part(r, &to, whole, y, rows[i].to);
        }
    free(whole);
}
/* PyTorch: test_dtensor_compile.py test_dtensor_input_mutations. Partly: the caller writes the
   input after the call, and the result stays. No gradient of the function. */
TEST_P(dtensor_compile, dtensor_input_mutations, ways) { run_on(row, 2, mutations_body); }

/* The placement of a tensor that does not exist yet decides what is issued. */
static void attribute_body(rig *r) {
    const fsdp_spec ones = spec1(r, "S0", 4);
    const fsdp_propagation p = propagate(FSDP_TENSOR_OP_SCALE, &ones, NULL, &no_args);
    fsdp_redistribution *gather = redist(r, "y", p.out, spec1(r, "R", 4));
    float *y = rig_own(r, 2), *all = rig_own(r, 4);
    CHECK_EQ_STR(records_from(r, 0, ALL_RECORDS), "");
    for (int i = 0; i < 2; i++) y[i] = 1 * 2;
    for (int i = 0; i < 2; i++) y[i] += cut_along(&p.out, 0, 0) ? 2 : 3;
    run_redist(r, gather, all, y);
    for (int i = 0; i < 4; i++) W_CHECK(all[i] == 4, "%g", (double)all[i]);
    CHECK_EQ_STR(records_from(r, 0, COLLECTIVES), "AG 2/2");
}
/* PyTorch: test_dtensor_compile.py test_dtensor_attribute_access_on_intermediate. Done: cut over
   the ranks, then a gather (PyTorch: no gather). */
TEST_P(dtensor_compile, dtensor_attribute_access_on_intermediate, ways) {
    run_on(row, 2, attribute_body);
}

/* Infers a spec from its shape. Two placements do not fit a mesh of one dim. */
static void constructor_body(rig *r) {
    const int64_t local[2] = {64, 32}, whole[2] = {128, 32};
    const int32_t mesh[2] = {1, 2}, coord[2] = {0, r->b.coord[0]};
    const fsdp_placement place[2] = {{FSDP_REPLICATE, 0, 0, 0}, {FSDP_SHARD, 0, 0, 0}};
    fsdp_spec s, inferred;
    fsdp_local l;
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *none;
    CHECK_OK(fsdp_spec_init(&s, 2, mesh, place, FSDP_F32, 2, whole));
    CHECK_OK(fsdp_spec_infer(&inferred, 2, mesh, place, FSDP_F32, 2, local));
    CHECK(same_spec(&s, &inferred));
    CHECK_OK(fsdp_spec_local(&s, coord, &l));
    CHECK(l.shape[0] == 64 && l.shape[1] == 32 && l.start[0] == 64 * r->b.coord[0]);
    d.name = "raw", d.from = d.to = s;
    REFUSED(r->b.w, fsdp_redistribution_create(r->b.dm, &d, &none),
            "'raw': its specs are of a mesh of another shape");
    CHECK(none == NULL);
    CHECK_EQ_INT(r->b.log.num, 0);
}
/* PyTorch: test_dtensor_compile.py test_dtensor_constructor_w_graph_break,
   test_dtensor_constructor_w_dynamo_disable. Differs: PyTorch's constructor takes two placements on
   a mesh of one dim; here the redistribution is refused. Nothing is compiled, so that no region is
   excluded. */
TEST_P(dtensor_compile, dtensor_constructor_w_graph_break, ways) {
    run_on(row, 2, constructor_body);
}
TEST_P(dtensor_compile, dtensor_constructor_w_dynamo_disable, ways) {
    run_on(row, 2, constructor_body);
}

/* One body on a host and on a device with streams: equal ops. */
typedef struct devices {
    char host[600], device[600];
} devices;
static void device_body(rig *r) {
    char *out = r->s ? ((devices *)(uintptr_t)r->arg)->device
                     : ((devices *)(uintptr_t)r->arg)->host;
    fsdp_redistribution *gather = redist(r, "x", spec2(r, "S1", 6, 5), spec2(r, "R", 6, 5));
    const fsdp_spec addends = spec2(r, "P", 6, 5);
    fsdp_redistribution *back = backward_of(r, gather, &addends);
    float *x = rig_own(r, 30), *y = rig_own(r, 30);
    run_redist(r, gather, y, x);
    run_redist(r, back, x, y);
    run_redist(r, redist(r, "z", addends, spec2(r, "R", 6, 5)), x, y);
    if (!r->rank) snprintf(out, 600, "%s", records_from(r, 0, ALL_RECORDS));
}
/* PyTorch: test_dtensor_compile.py test_dtensor_dynamo_device_mesh_attrs. Differs: there is no
   device type to branch on: the same ops on the host and on the simulated device. */
TEST(dtensor_compile, dtensor_dynamo_device_mesh_attrs) {
    const way host = {"inline", 0, 0, RIG_RANKS}, device = {"streams", 0, 0, RIG_SIM_STREAMS};
    static devices d;
    task t = FSDP_ZERO;
    t.body = device_body, t.arg = &d, t.ndim = 1, t.mesh[0] = 2;
    run_task(&host, &t);
    run_task(&device, &t);
    CHECK_EQ_STR(d.host, d.device);
    CHECK(strstr(d.host, "AG 18/2") && strstr(d.host, "RS 18/2") && strstr(d.host, "AR 30/2"));
}

/* ---- redistributions, sizes, gradients ------------------------------------------------------- */

/* Returns a tensor sharded along dim 0 into equal parts; part k is that of rank rig_who(r, k). */
static float *stacked(const rig *r, int64_t seed, int64_t count) {
    float *whole = (float *)lab_zeros((size_t)(r->ranks * count), sizeof *whole);
    for (int k = 0; k < r->ranks; k++)
        for (int64_t i = 0; i < count; i++)
            whole[k * count + i] = unit_value(seed + 100 * rig_who(r, k), i);
    return whole;
}
static void check_text(const rig *r, int from, const char *wire) {
    W_CHECK(!strcmp(records_from(r, from, COLLECTIVES), wire), "records '%s', expected '%s'",
            records_from(r, from, COLLECTIVES), wire);
    int count = 0; /* no other collective: every byte that leaves a rank is in these */
    for (const char *c = wire; *c; c++) count += *c == '/';
    CHECK_EQ_INT(collectives_in(r, from, r->b.log.num), count);
}
/* One size of a step that gathers rows: x * x is gathered; this rank's first row is checked. */
typedef struct dynamic {
    fsdp_redistribution *gather;
    float *x, *y;
    int64_t rows, columns; /* rows: of each rank */
} dynamic;
static void dynamic_step(rig *r, void *arg) {
    const dynamic *d = (const dynamic *)arg;
    const int64_t n = d->rows * d->columns;
    float *whole = stacked(r, 1, n);
    for (int64_t i = 0; i < n; i++) d->x[i] = unit_value(1 + 100 * rig_who(r, r->rank), i);
    for (int64_t i = 0; i < n; i++) d->x[i] *= d->x[i];
    for (int64_t i = 0; i < r->ranks * n; i++) whole[i] *= whole[i];
    run_redist(r, d->gather, d->y, d->x);
    check_same(d->y, whole, r->ranks * n, "gathered");
    rig_saw(r, d->y, r->ranks * n);
    free(whole);
}
static void dynamic_body(rig *r) {
    static const int rows[] = {4, 6, 3, 1, 0, 4};
    dynamic d = FSDP_ZERO;
    char wire[40];
    d.gather = redist(r, "x", spec2(r, "S0", 12, 4), spec2(r, "R", 12, 4));
    d.x = rig_own(r, 24), d.y = rig_own(r, 48), d.columns = 4;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        fsdp_counters was, now;
        d.rows = rows[i];
        CALL(r->b.w, fsdp_model_counters(r->b.model, &was));
        CALL(r->b.w, fsdp_redistribution_resize(d.gather, 0, 2 * d.rows));
        CHECK_EQ_INT(info_of(r, d.gather).to.shape[0], 2 * d.rows);
        const int from = r->b.log.num;
        dynamic_step(r, &d);
        snprintf(wire, sizeof wire, "AG %d/2", (int)d.rows * 4);
        check_text(r, from, d.rows ? wire : "");
        CALL(r->b.w, fsdp_model_counters(r->b.model, &now));
        CHECK_EQ_INT((int64_t)(now.allocations - was.allocations), 0);
        twice(r, dynamic_step, &d);
        CHECK_EQ_INT(routes_of(r), 1);
    }
}
/* PyTorch: test_dtensor_compile.py test_dtensor_dynamic. Done: one route for all sizes; no
   collective for 0 rows. */
TEST_P(dtensor_compile, dtensor_dynamic, all_ways) { run_on(row, 2, dynamic_body); }

/* A split along the sharded dim needs the full tensor: one gather, and both pieces are rows of it.
   */
static void slice_body(rig *r) {
    static const int rows[] = {8, 6, 5};
    fsdp_redistribution *gather = redist(r, "x", spec2(r, "S0", 8, 4), spec2(r, "R", 8, 4));
    float *x = rig_own(r, 16), *y = rig_own(r, 32), *whole = values(7, 32);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const fsdp_spec s = spec2(r, "S0", rows[i], 4), all = spec2(r, "R", rows[i], 4);
        const int first = (rows[i] + 1) / 2; /* torch.tensor_split */
        CALL(r->b.w, fsdp_redistribution_resize(gather, 0, rows[i]));
        for (int piece = 0; piece < 2; piece++) {
            fsdp_tensor_op_args args = FSDP_ZERO;
            args.num_dims = 1, args.shape[0] = piece ? rows[i] - first : first;
            const fsdp_propagation p = propagate(FSDP_TENSOR_OP_SLICE, &s, NULL, &args);
            CHECK(same_spec(&p.in[0], &all) && p.cost_us > 0);
            CHECK(p.out.place[0].kind == FSDP_REPLICATE && p.out.shape[0] == args.shape[0]);
        }
        put_part(r, &s, whole, x);
        const int from = r->b.log.num;
        run_redist(r, gather, y, x);
        check_text(r, from, rows[i] == 8 ? "AG 16/2" : "AG 12/2");
        check_same(y, whole, 4, "row 0 of piece 0");
        check_same(y + 4 * first, whole + 4 * first, 4, "row 0 of piece 1");
    }
    CHECK_EQ_INT(routes_of(r), 1);
    free(whole);
}
/* PyTorch: test_dtensor_compile.py test_dtensor_dynamic_slice. Done: a slice along the cut dim
   needs the whole. */
TEST_P(dtensor_compile, dtensor_dynamic_slice, ways) { run_on(row, 2, slice_body); }

/* log_softmax of logits with sharded classes; then the classes are gathered. */
typedef struct softmax {
    fsdp_redistribution *max, *sum, *gather;
    float *x, *logp, *all, *in, *most, *sums; /* x (4,4) is this rank's part of (4,8) */
} softmax;
static float logit(const rig *r, int row, int column) { /* an element of the full tensor */
    const int at = column % 4, k = rig_who(r, column / 4);
    return (float)(row * 3 + at * 5 + k * 2) / 4 - 1;
}
static void softmax_step(rig *r, void *arg) {
    const softmax *s = (const softmax *)arg;
    const int64_t targets[4] = {0, 5, 3, 7}, first = 4 * r->b.coord[0];
    for (int i = 0; i < 16; i++) s->x[i] = logit(r, i / 4, (int)first + i % 4);
    CHECK_OK(fsdp_loss_parallel_max(s->x, FSDP_F32, 4, 4, s->in));
    run_redist(r, s->max, s->most, s->in);
    CHECK_OK(fsdp_loss_parallel_sums(s->x, FSDP_F32, 4, 4, first, targets, s->most, s->in));
    run_redist(r, s->sum, s->sums, s->in);
    for (int i = 0; i < 16; i++)
        s->logp[i] = (float)((double)(s->x[i] - s->most[i / 4]) - log((double)s->sums[i / 4]));
    run_redist(r, s->gather, s->all, s->logp);
    rig_saw(r, s->all, 32);
    for (int i = 0; i < 4; i++) {
        double total = 0, sum = 0;
        for (int j = 0; j < 8; j++) total += exp((double)logit(r, i, j));
        for (int j = 0; j < 8; j++) {
            const double got = (double)s->all[8 * i + j];
            sum += exp(got);
            W_CHECK(fabs(got - ((double)logit(r, i, j) - log(total))) < 2e-6, "%g", got);
        }
        W_CHECK(fabs(sum - 1) < 1e-6, "probabilities add up to %.9g", sum);
    }
}
static void softmax_body(rig *r) {
    softmax s;
    fsdp_spec most = spec1(r, "P", 4);
    most.place[0].op = FSDP_MAX;
    s.max = redist(r, "max", most, spec1(r, "R", 4));
    s.sum = redist(r, "sums", spec2(r, "P", 2, 4), spec2(r, "R", 2, 4));
    s.gather = redist(r, "log_softmax", spec2(r, "S1", 4, 8), spec2(r, "R", 4, 8));
    s.x = rig_own(r, 16), s.logp = rig_own(r, 16), s.all = rig_own(r, 32);
    s.in = rig_own(r, 8), s.most = rig_own(r, 4), s.sums = rig_own(r, 8);
    const int from = r->b.log.num;
    softmax_step(r, &s);
    check_text(r, from, "AR max 4/2, AR 8/2, AG 16/2");
    twice(r, softmax_step, &s);
    CHECK_EQ_INT(routes_of(r), 3);
}
/* PyTorch: test_dtensor_compile.py test_dtensor_dynamic_loss_parallel_log_softmax. Done: by
   fsdp_loss_parallel_max and _sums; values within 2e-6. */
TEST_P(dtensor_compile, dtensor_dynamic_loss_parallel_log_softmax, all_ways) {
    run_on(row, 2, softmax_body);
}

/* Concatenation along the sharded dim: both inputs are gathered first. */
static void cat_body(rig *r) {
    static const int rows[][2] = {{8, 6}, {6, 4}, {5, 1}, {8, 6}};
    fsdp_redistribution *gather[2] = {redist(r, "a", spec2(r, "S0", 8, 4), spec2(r, "R", 8, 4)),
                                      redist(r, "b", spec2(r, "S0", 6, 4), spec2(r, "R", 6, 4))};
    float *x = rig_own(r, 16), *y = rig_own(r, 56);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const int m = rows[i][0], n = rows[i][1], from = r->b.log.num;
        const fsdp_spec a = spec2(r, "S0", m, 4), b = spec2(r, "S0", n, 4);
        const fsdp_propagation p = propagate(FSDP_TENSOR_OP_CAT, &a, &b, &no_args);
        float *one = values((int64_t)i, 4 * m), *two = values((int64_t)i + 9, 4 * n);
        char wire[40];
        for (int k = 0; k < 2; k++) {
            const fsdp_spec whole = spec2(r, "R", rows[i][k], 4);
            CHECK(same_spec(&p.in[k], &whole));
            CALL(r->b.w, fsdp_redistribution_resize(gather[k], 0, rows[i][k]));
        }
        CHECK(p.out.place[0].kind == FSDP_REPLICATE && p.out.shape[0] == m + n && p.cost_us > 0);
        put_part(r, &a, one, x);
        run_redist(r, gather[0], y, x);
        put_part(r, &b, two, x);
        run_redist(r, gather[1], y + 4 * m, x);
        snprintf(wire, sizeof wire, "AG %d/2, AG %d/2", (m + 1) / 2 * 4, (n + 1) / 2 * 4);
        check_text(r, from, wire);
        check_same(y, one, 4 * m, "the first one");
        check_same(y + 4 * m, two, 4 * n, "the second one");
        CHECK_EQ_INT(routes_of(r), 2);
        free(one), free(two);
    }
}
/* PyTorch: test_dtensor_compile.py test_dtensor_dynamic_cat. Done: one route for each input. */
TEST_P(dtensor_compile, dtensor_dynamic_cat, ways) { run_on(row, 2, cat_body); }

/* Sizes that share a route; and a branch of the caller, whose other side has its own route. */
static void recompiles_body(rig *r) {
    static const int shapes[3][2] = {{4, 4}, {6, 8}, {10, 10}}, rows[] = {8, 16, 128, 16, 128};
    dynamic d = FSDP_ZERO, large = FSDP_ZERO;
    d.gather = redist(r, "x", spec2(r, "S0", 20, 10), spec2(r, "R", 20, 10));
    d.x = rig_own(r, 100), d.y = rig_own(r, 200);
    for (int i = 0; i < 3; i++) {
        d.rows = shapes[i][0], d.columns = shapes[i][1];
        CALL(r->b.w, fsdp_redistribution_resize(d.gather, 0, 2 * d.rows));
        CALL(r->b.w, fsdp_redistribution_resize(d.gather, 1, d.columns));
        twice(r, dynamic_step, &d);
        CHECK_EQ_INT(routes_of(r), 1);
    }
    CALL(r->b.w, fsdp_redistribution_resize(d.gather, 1, d.columns = 4));
    large.columns = 4, large.x = rig_own(r, 256), large.y = rig_own(r, 512);
    for (int i = 0; i < 5; i++) {
        dynamic *taken = rows[i] <= 16 ? &d : &large;
        if (taken == &large)
            large.gather = redist(r, "large", spec2(r, "S0", 128, 4), spec2(r, "R", 128, 4));
        taken->rows = rows[i] / 2;
        CALL(r->b.w, fsdp_redistribution_resize(taken->gather, 0, rows[i]));
        twice(r, dynamic_step, taken);
        CHECK_EQ_INT(routes_of(r), i < 2 ? 1 : 2);
    }
}
/* PyTorch: test_dtensor_compile.py test_dtensor_dynamic_recompiles. Done: the second route comes
   with the caller's other branch. */
TEST_P(dtensor_compile, dtensor_dynamic_recompiles, all_ways) { run_on(row, 2, recompiles_body); }

/* The placements of each operation do not depend on sizes, not even on empty ones. */
/* PyTorch: test_dtensor_compile.py test_dtensor_unbacked_matmuls. Partly: PyTorch's three
   placements for all sizes 0 to 9. No products: no rank runs. */
TEST(dtensor_compile, dtensor_unbacked_matmuls) {
    static const struct {
        const char *x, *y, *out;
    } rows[] = {{"R R", "R R", "R R"}, {"R S1", "R S0", "R P"}, {"R S0", "R R", "R S0"}};
    rig r = FSDP_ZERO;
    int cases = 0;
    r.b.ndim = 2, r.b.shape[0] = r.b.shape[1] = 2;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int m = 0; m < 10; m++)
            for (int k = 0; k < 10; k++)
                for (int n = 0; n < 10; n++) {
                    const fsdp_spec x = spec2(&r, rows[i].x, m, k), y = spec2(&r, rows[i].y, k, n),
                                    out = spec2(&r, rows[i].out, m, n);
                    const fsdp_propagation p = propagate(FSDP_TENSOR_OP_MM, &x, &y, &no_args);
                    CHECK_MSG(same_spec(&p.out, &out) && same_spec(&p.in[0], &x) &&
                                  same_spec(&p.in[1], &y) && p.cost_us == 0,
                              "%s x %s, %d %d %d costs %g us", rows[i].x, rows[i].y, m, k, n,
                              p.cost_us);
                    cases++;
                }
    CHECK_EQ_INT(cases, 3000);
}

/* A rank without a part of k adds zeros; without rows no collective runs. */
static void zero_shards_body(rig *r) {
    fsdp_redistribution *sum = redist(r, "xy", spec2(r, "R P", 3, 1), spec2(r, "R R", 3, 1));
    float *part = rig_own(r, 3), *out = rig_own(r, 3);
    for (int m = 3; m >= 0; m -= 3) {
        const fsdp_spec x = spec2(r, "R S1", m, 1), y = spec2(r, "R S0", 1, 1);
        const fsdp_propagation p = propagate(FSDP_TENSOR_OP_MM, &x, &y, &no_args);
        const float mine[3] = {2, 3, 4}, w = 5;
        fsdp_local l;
        CHECK_OK(fsdp_spec_local(&x, r->b.coord, &l));
        CHECK_EQ_INT(l.shape[1], r->b.coord[1] == 0); /* k of 1 on 2 ranks */
        CALL(r->b.w, fsdp_redistribution_resize(sum, 0, m));
        CHECK(p.out.shape[0] == m && p.out.shape[1] == 1 && p.out.place[1].kind == FSDP_PARTIAL);
        matmul(part, 0, mine, 0, &w, 0, m, l.shape[1], 1);
        const int from = r->b.log.num;
        run_redist(r, sum, m ? out : NULL, m ? part : NULL);
        check_text(r, from, m ? "AR 3/2" : "");
        for (int i = 0; i < m; i++) W_CHECK(out[i] == 5 * mine[i], "%g", (double)out[i]);
        CHECK(info_of(r, sum).to.shape[0] == m && info_of(r, sum).to.shape[1] == 1);
    }
}
/* PyTorch: test_dtensor_compile.py test_dtensor_matmul_zero_size_shards. Done: a rank without a
   part of k adds zeros. */
TEST_P(dtensor_compile, dtensor_matmul_zero_size_shards, ways) {
    run_on2(row, 2, 2, zero_shards_body, NULL);
}

/* Training needs one route more than evaluation, and uses the same forward. */
static void requires_grad_body(rig *r) {
    const fsdp_param_desc p = fsdp_mat("w", 4, 4);
    fsdp_unit *unit = lab_unit(r->b.w, r->b.model, NULL, &p, 1);
    const fsdp_spec cut = spec2(r, "S0", 4, 2), all = spec2(r, "R", 4, 2),
                    sums = spec2(r, "P", 4, 2);
    float *x = rig_own(r, 4), *y = rig_own(r, 8), *dx = rig_own(r, 4), *whole = values(5, 8);
    put_part(r, &cut, whole, x);
    for (int trains = 0; trains < 2; trains++) {
        fsdp_redistribution *forward = redist(r, "x", cut, all);
        CALL(r->b.w, fsdp_set_grad_enabled(r->b.model, trains));
        CALL(r->b.w, fsdp_pre_forward(unit));
        run_redist(r, forward, y, x);
        CALL(r->b.w, fsdp_post_forward(unit));
        check_same(y, whole, 8, "forward");
        CHECK_EQ_INT((int64_t)info_of(r, forward).runs, trains + 1);
        CHECK_EQ_INT(routes_of(r), 1);
        if (!trains) continue;
        fsdp_redistribution *back = backward_of(r, forward, &sums);
        CHECK(back == backward_of(r, forward, &sums));
        CHECK_EQ_INT(routes_of(r), 2);
        CALL(r->b.w, fsdp_pre_backward(unit));
        run_redist(r, back, dx, y);
        CALL(r->b.w, fsdp_post_backward(unit));
        CALL(r->b.w, fsdp_finalize_backward(r->b.model));
        for (int i = 0; i < 4; i++) W_CHECK(dx[i] == 2 * x[i], "%g", (double)dx[i]);
        CHECK_EQ_STR(records_from(r, 0, COLLECTIVES), "AG 4/2, AG 4/2, RS 4/2");
    }
    free(whole);
}
/* PyTorch: test_dtensor_compile.py test_dtensor_requires_grad_recompile. Done: the backward adds
   one route. A gather whose backward runs (PyTorch: `x * x`, without a collective or a backward).
   */
TEST_P(dtensor_compile, dtensor_requires_grad_recompile, ways) {
    run_on(row, 2, requires_grad_body);
}

/* x (4,16,4) is sharded along dim 1 and enters a linear layer transposed: the output is a partial
   value. */
static void noncontiguous_body(rig *r) {
    enum { B = 4, J = 4, K = 16, O = 4, ROWS = B * J };
    const fsdp_spec x = spec3(r, "S1", B, K, J), y = spec2(r, "S1", O, K), z = spec1(r, "R", O);
    fsdp_tensor_op_args turn = FSDP_ZERO;
    turn.num_dims = 3, turn.shape[0] = 0, turn.shape[1] = 2, turn.shape[2] = 1;
    const fsdp_propagation t = propagate(FSDP_TENSOR_OP_TRANSPOSE, &x, NULL, &turn);
    const fsdp_spec *in[3] = {&t.out, &y, &z};
    fsdp_propagation p;
    CHECK_OK(fsdp_propagate(FSDP_TENSOR_OP_LINEAR, in, 3, NULL, NULL, &p));
    CHECK(cut_along(&t.out, 0, 2) && t.cost_us == 0 && p.cost_us == 0);
    CHECK(p.out.place[0].kind == FSDP_PARTIAL && p.in[2].place[0].kind == FSDP_PARTIAL);
    CHECK(cut_along(&p.grad[0], 0, 2) && cut_along(&p.grad[1], 0, 1));
    CHECK(p.grad[2].place[0].kind == FSDP_REPLICATE);
    float *wx = values(1, B * K * J), *wy = values(2, O * K), *wz = values(3, O);
    float turned[ROWS * K], want[ROWS * O], dx[ROWS * K], dy[O * K], ones[ROWS * O];
    for (int i = 0; i < ROWS * K; i++) turned[i] = wx[i / (J * K) * K * J + i % K * J + i / K % J];
    matmul(want, 0, turned, 0, wy, 1, ROWS, K, O);
    add_bias(want, wz, ROWS, O);
    float mx[ROWS * K / 2], my[O * K / 2], part[ROWS * O];
    put_part(r, &p.in[0], turned, mx);
    put_part(r, &y, wy, my);
    float *src = rig_own(r, ROWS * O), *out = rig_own(r, ROWS * O);
    matmul(part, 0, mx, 0, my, 1, ROWS, K / 2, O);
    memcpy(src, part, sizeof part);
    fsdp_redistribution *sum = redist(r, "out", p.out, spec3(r, "R", B, J, O));
    run_redist(r, sum, out, src);
    check_text(r, 0, "AR 64/2");
    add_bias(out, wz, ROWS, O); /* after the sum, so that it counts once */
    check_same(out, want, ROWS * O, "output");
    for (int i = 0; i < ROWS * O; i++) ones[i] = 1; /* the gradient of the sum arrives replicated */
    CHECK_EQ_INT(info_of(r, backward_of(r, sum, NULL)).route.num_steps, 0);
    fsdp_redistribution *addend = redist(r, "z", z,
                                         p.in[2]); /* local; its gradient is replicated, too */
    CHECK(info_of(r, addend).route.num_steps == 1 && !info_of(r, addend).route.num_collectives);
    CHECK_EQ_INT(info_of(r, backward_of(r, addend, NULL)).route.num_steps, 0);
    float gx[ROWS * K / 2], gy[O * K / 2], gz[O] = {0};
    matmul(gx, 0, ones, 0, my, 0, ROWS, O, K / 2);
    matmul(gy, 0, ones, 1, mx, 0, O, ROWS, K / 2);
    bias_grad(gz, ones, ROWS, O);
    matmul(dx, 0, ones, 0, wy, 0, ROWS, O, K);
    matmul(dy, 0, ones, 1, turned, 0, O, ROWS, K);
    check_part(r, &p.grad[0], dx, gx, "dx");
    check_part(r, &p.grad[1], dy, gy, "dy");
    for (int i = 0; i < O; i++) W_CHECK(gz[i] == ROWS, "%g", (double)gz[i]);
    free(wx), free(wy), free(wz);
}
/* PyTorch: test_dtensor_compile.py test_dtensor_noncontiguous_output. Partly: output placements,
   values and gradients. No strides: the caller transposes. */
TEST_P(dtensor_compile, dtensor_noncontiguous_output, ways) { run_on(row, 2, noncontiguous_body); }

/* A partial value of (10,257,160) is sharded along dim 1 over ranks 1 and 3, or 0 and 2, of 4
   ranks: 129 and 128 rows. The run equals the plan, and a part has no padding. Backward gathers. */
enum { A = 10, N = 257, C = 160, WIDE = (N + 1) / 2 };
static const int forward_only = 0, and_back = 1;
static void unbalanced_on(rig *r, int back) {
    const fsdp_spec from = spec3(r, "P", A, N, C), to = spec3(r, "S1", A, N, C);
    fsdp_redistribution *scatter = redist(r, "y", from, to);
    const fsdp_redistribution_info info = info_of(r, scatter);
    const int last = r->b.coord[0] == 1, rows = last ? WIDE - 1 : WIDE;
    float *x = rig_own(r, A * N * C), *y = rig_own(r, A * WIDE * C);
    float *whole = (float *)lab_zeros(A * N * C, sizeof *whole);
    CHECK(info.to.shape[0] == A && info.to.shape[1] == rows && info.to.shape[2] == C);
    CHECK_EQ_INT(info.to.numel, A * rows * C);
    for (int64_t i = 0; i < A * N * C; i++) {
        float sum = 0;
        for (int k = 0; k < 2; k++) sum += unit_value(rig_who(r, k), i);
        x[i] = unit_value(rig_who(r, r->b.coord[0]), i), whole[i] = sum;
    }
    int at = r->b.log.num;
    run_redist(r, scatter, y, x);
    check_text(r, at, "RS 206400/2"); /* 10 x 129 x 160 of 10 x 258 x 160 */
    /* With identical ranks, a rank's part still follows from its coordinate. */
    check_part(r, &to, whole, y, "scattered");
    if (back) {
        fsdp_redistribution *gather = backward_of(r, scatter, NULL);
        at = r->b.log.num;
        run_redist(r, gather, x, y);
        check_text(r, at, "AG 206400/2");
        check_same(x, whole, A * N * C, "gathered"); /* no padding: 257 x 160 */
    }
    free(whole);
}
static void unbalanced_body(rig *r) {
    const int back = *(const int *)r->arg;
    const int32_t ranks[4] = {0, 2, 1, 3}, shape[2] = {2, 2};
    rig *own = (rig *)lab_zeros(1, sizeof *own);
    if (!r->s) {
        fsdp_mesh *both = lab_mesh(r->b.w, 2, shape, NULL, ranks),
                  *mine = lab_slice(r->b.w, both, 1);
        rig_begin(own, r->b.w, mine, NULL, 0, NULL);
        CHECK(own->ranks == 2 && own->b.coord[0] == r->rank / 2);
        unbalanced_on(own, back);
        rig_close(own);
    } else unbalanced_on(r, back);
    free(own);
}
static void unbalanced(const way *how, const int *back) {
    task t = FSDP_ZERO;
    t.body = unbalanced_body, t.arg = back, t.ndim = 1, t.mesh[0] = how->played ? 2 : 4;
    run_task(how, &t);
}
/* PyTorch: test_dtensor_compile.py
   test_dtensor_partial_placement_redistribute_unbalanced_correct_strides. Done: a tight result
   (PyTorch: strides as planned). */
TEST_P(dtensor_compile, dtensor_partial_placement_redistribute_unbalanced_correct_strides, all_ways) {
    unbalanced(row, &forward_only);
}
/* PyTorch: test_dtensor_compile.py test_dtensor_contiguous_dtensor_noncontiguous_local_as_tangent.
   Partly: the same with its backward. No local part that is not contiguous. */
TEST_P(dtensor_compile, dtensor_contiguous_dtensor_noncontiguous_local_as_tangent, ways) {
    unbalanced(row, &and_back);
}

/* The spec of a gradient from placements in any kind of memory, which is then overwritten. */
enum { LITERAL, OF_A_SPEC, ON_HEAP, AS_ARGUMENT, BY_NAME };
static void grad_step(rig *r, void *arg) {
    fsdp_redistribution *const *run = (fsdp_redistribution *const *)arg;
    float *x = (float *)r->memory[0], *y = (float *)r->memory[1], *dx = (float *)r->memory[2];
    for (int i = 0; i < 2; i++) x[i] = 1;
    run_redist(r, run[0], y, x);
    for (int i = 0; i < 4; i++) W_CHECK(y[i] + 2 == 3, "%g", (double)y[i]);
    for (int i = 0; i < 4; i++) y[i] = (float)(r->b.coord[0] + 1 + 4 * i);
    run_redist(r, run[1], dx, y);
    for (int i = 0; i < 2; i++) /* the sum of 1 and 2 */
        W_CHECK(dx[i] == (float)(3 + 8 * (2 * r->b.coord[0] + i)), "%g", (double)dx[i]);
    rig_saw(r, dx, 2);
}
static void grad_placements_body(rig *r) {
    const int kind = *(const int *)r->arg;
    const fsdp_placement literal[1] = {{FSDP_PARTIAL, 0, FSDP_SUM, 0}};
    fsdp_placement *heap = (fsdp_placement *)lab_zeros(1, sizeof *heap), on_stack[1];
    const fsdp_spec from = spec1(r, "S0", 4), to = spec1(r, "R", 4);
    fsdp_spec grad = to, sums = spec1(r, "P", 4);
    fsdp_redistribution *run[2];
    *heap = on_stack[0] = literal[0];
    if (kind == BY_NAME) /* place may be the spec's own array */
        grad.place[0].kind = FSDP_PARTIAL;
    CHECK_OK(fsdp_spec_init(&grad, 1, r->b.shape,
                            kind == LITERAL       ? literal
                            : kind == OF_A_SPEC   ? sums.place
                            : kind == ON_HEAP     ? heap
                            : kind == AS_ARGUMENT ? on_stack
                                                  : grad.place,
                            FSDP_F32, 1, to.shape));
    memset(heap, 0x5a, sizeof *heap), memset(on_stack, 0x5a, sizeof on_stack);
    free(heap);
    CHECK(same_spec(&grad, &sums));
    memset(&sums, 0x5a, sizeof sums);
    run[0] = redist(r, "x", from, to);
    run[1] = backward_of(r, run[0], &grad);
    memset(&grad, 0x5a, sizeof grad);
    (void)rig_own(r, 2), (void)rig_own(r, 4), (void)rig_own(r, 2);
    const int at = twice(r, grad_step, run);
    CHECK_EQ_STR(records_from(r, at, COLLECTIVES), "AG 2/2, RS 2/2, AG 2/2, RS 2/2");
    CHECK_EQ_INT(routes_of(r), 2);
}
static void grad_placements(const way *how, int kind) {
    task t = FSDP_ZERO;
    t.body = grad_placements_body, t.arg = &kind, t.ndim = 1, t.mesh[0] = 2;
    run_task(how, &t);
}
/* PyTorch: test_dtensor_compile.py test_dynamo_to_local_grad_placements_sequence,
   test_dynamo_to_local_grad_placements_sequence_intermediate,
   test_dynamo_from_local_grad_placements_sequence_intermediate,
   test_dynamo_from_local_grad_placements_sequence_intermediate_as_args,
   test_dynamo_to_local_kwargs. Differs: C has one kind of sequence: placements from a constant, a
   spec, the heap, the stack, all overwritten after the call. */
TEST_P(dtensor_compile, dynamo_to_local_grad_placements_sequence, ways) {
    grad_placements(row, LITERAL);
}
TEST_P(dtensor_compile, dynamo_to_local_grad_placements_sequence_intermediate, ways) {
    grad_placements(row, OF_A_SPEC);
}
TEST_P(dtensor_compile, dynamo_from_local_grad_placements_sequence_intermediate, ways) {
    grad_placements(row, ON_HEAP);
}
TEST_P(dtensor_compile, dynamo_from_local_grad_placements_sequence_intermediate_as_args, ways) {
    grad_placements(row, AS_ARGUMENT);
}
TEST_P(dtensor_compile, dynamo_to_local_kwargs, ways) { grad_placements(row, BY_NAME); }

/* Partial values that are divided: AVG, or a factor of the redistribution. */
static void custom_partial_body(rig *r) {
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *scaled;
    fsdp_spec mean = spec1(r, "P", 4);
    const fsdp_spec cut = spec1(r, "S0", 4), all = spec1(r, "R", 4), sum = spec1(r, "P", 4);
    float *x = rig_own(r, 4), *y = rig_own(r, 4), *z = rig_own(r, 2);
    mean.place[0].op = FSDP_AVG;
    for (int i = 0; i < 4; i++)
        x[i] = (float)((r->b.coord[0] + 1) * (i + 1)); /* multiplied by 1, 2, 3, 4 */
    run_redist(r, redist(r, "mean", mean, all), y, x);
    for (int i = 0; i < 4; i++) W_CHECK(y[i] == 2.5f * (float)(i + 1), "%g", (double)y[i]);
    d.name = "scaled", d.from = sum, d.to = all, d.scale = 1.0 / r->ranks;
    CALL(r->b.w, fsdp_redistribution_create(r->b.dm, &d, &scaled));
    memset(y, 0, 4 * sizeof *y);
    run_redist(r, scaled, y, x);
    for (int i = 0; i < 4; i++) W_CHECK(y[i] == 2.5f * (float)(i + 1), "%g", (double)y[i]);
    fsdp_redistribution *gather = redist(r, "x", cut, all); /* as the placement of a gradient */
    run_redist(r, backward_of(r, gather, &mean), z, x);
    W_CHECK(z[0] == 2.5f * (float)(r->b.coord[0] + 1), "%g", (double)z[0]);
    check_text(r, 0, "AR 4/4, AR 4/4, RS 1/4");
}
/* PyTorch: test_dtensor_compile.py test_dynamo_to_local_custom_partial_placement. Differs: no
   placements of your own: FSDP_AVG, and the factor `scale`. */
TEST_P(dtensor_compile, dynamo_to_local_custom_partial_placement, ways) {
    run_on(row, 4, custom_partial_body);
}

/* A hook's work on local parts stands between two redistributions, and needs no call. */
typedef struct hooked {
    fsdp_redistribution *in, *out, *all;
    float *x, *y, *z, *whole, *want, *w;
} hooked;
static void hook_step(rig *r, void *arg) {
    const hooked *h = (const hooked *)arg;
    run_redist(r, h->in, h->y, h->x);
    matmul(h->z, 0, h->y, 0, h->w, 1, 2, 4, 4); /* this rank's two rows of a linear layer */
    for (int i = 0; i < 8; i++) h->z[i] += 2;
    run_redist(r, h->out, h->y, h->z);
    run_redist(r, h->all, h->want, h->y);
    rig_saw(r, h->want, 16);
}
static void hook_body(rig *r) {
    const fsdp_spec x = spec2(r, "S0", 4, 4), w = spec2(r, "R", 4, 4);
    const fsdp_propagation p = propagate(FSDP_TENSOR_OP_LINEAR, &x, &w, &no_args);
    hooked h;
    float want[16];
    CHECK(p.cost_us == 0 && cut_along(&p.out, 0, 0));
    h.in = redist(r, "in", x, p.in[0]), h.out = redist(r, "out", p.out, p.out);
    h.all = redist(r, "all", p.out, w);
    h.x = rig_own(r, 8), h.y = rig_own(r, 8), h.z = rig_own(r, 8), h.want = rig_own(r, 16);
    h.whole = values(1, 16), h.w = values(2, 16);
    put_part(r, &x, h.whole, h.x);
    const int at = twice(r, hook_step, &h);
    CHECK_EQ_STR(records_from(r, at, COLLECTIVES), "AG 8/2, AG 8/2"); /* one in each run */
    matmul(want, 0, h.whole, 0, h.w, 1, 4, 4, 4);
    for (int i = 0; i < 16; i++) want[i] += 2;
    check_same(h.want, want, 16, "output");
    free(h.whole), free(h.w);
}
/* PyTorch: test_dtensor_compile.py test_dynamo_to_local_kwargs_forward_hook. Partly: local work
   between two redistributions without a step. No hook. */
TEST_P(dtensor_compile, dynamo_to_local_kwargs_forward_hook, ways) { run_on(row, 2, hook_body); }

/* A norm over a dim that was sharded. The gradient may arrive partial, sharded, or replicated. */
static void layer_norm(const float *x, float *y, int rows, int n) {
    for (int i = 0; i < rows; i++) {
        double mean = 0, var = 0;
        for (int j = 0; j < n; j++) mean += (double)x[i * n + j] / n;
        for (int j = 0; j < n; j++)
            var += ((double)x[i * n + j] - mean) * ((double)x[i * n + j] - mean) / n;
        for (int j = 0; j < n; j++)
            y[i * n + j] = (float)(((double)x[i * n + j] - mean) / sqrt(var + 1e-5));
    }
}
static void different_grad_body(rig *r) {
    static const char *const arrives[] = {"P", "S2", "R"}, *const wires[] = {"RS 24/2", "", ""};
    const fsdp_spec x = spec3(r, "S2", 2, 3, 8);
    const fsdp_propagation p = propagate(FSDP_TENSOR_OP_LAYER_NORM, &x, NULL, &no_args);
    float *mine = rig_own(r, 24), *all = rig_own(r, 48), *grad = rig_own(r, 48);
    float *dx = rig_own(r, 24), *whole = values(1, 48), *dout = values(2, 48), y[48], want[48];
    CHECK(p.cost_us > 0 && p.in[0].place[0].kind == FSDP_REPLICATE);
    fsdp_redistribution *gather = redist(r, "x", x, p.in[0]);
    put_part(r, &x, whole, mine);
    run_redist(r, gather, all, mine);
    check_text(r, 0, "AG 24/2");
    layer_norm(all, y, 6, 8), layer_norm(whole, want, 6, 8);
    CHECK_EQ_MEM(y, want, sizeof y);
    for (int i = 0; i < 3; i++) {
        const fsdp_spec g = spec3(r, arrives[i], 2, 3, 8);
        fsdp_redistribution *back = backward_of(r, gather, &g);
        const int at = r->b.log.num;
        put_part(r, &g, dout, grad);
        for (int k = 0; k < 48 && !i; k++) /* its partial values */
            grad[k] = r->b.coord[0] ? dout[k] - 3 : 3;
        memset(dx, 0x5a, 24 * sizeof *dx);
        run_redist(r, back, dx, grad);
        check_text(r, at, wires[i]);
        check_part(r, &x, dout, dx, arrives[i]);
    }
    free(whole), free(dout);
}
/* PyTorch: test_dtensor_compile.py test_dtensor_different_gradient_placement. Partly: a layer norm
   over a gathered dim; the gradient comes back as the same part. No backward of the norm. */
TEST_P(dtensor_compile, dtensor_different_gradient_placement, ways) {
    run_on(row, 2, different_grad_body);
}

static void ones_step(rig *r, void *arg) {
    float *x = (float *)r->memory[0], *y = (float *)r->memory[1];
    x[0] = 1;
    run_redist(r, (fsdp_redistribution *)arg, y, x);
    for (int i = 0; i < 2; i++) W_CHECK(y[i] + 2 == 3, "%g", (double)y[i]);
    rig_saw(r, y, 2);
}
static void ones_body(rig *r) {
    (void)rig_own(r, 1), (void)rig_own(r, 2);
    twice(r, ones_step, redist(r, "x", spec1(r, "S0", 2), spec1(r, "R", 2)));
    check_text(r, 0, "AG 1/2, AG 1/2"); /* in both runs */
    CHECK_EQ_INT(routes_of(r), 1);
}
/* PyTorch: test_dtensor_compile.py test_dynamo_dtensor_from_local_redistribute. Done. */
TEST_P(dtensor_compile, dynamo_dtensor_from_local_redistribute, all_ways) {
    run_on(row, 2, ones_body);
}

/* Next to the caller's stream: the bits and the collectives of the blocking call. */
typedef struct async {
    fsdp_redistribution *run;
    float *x, *y;
    int64_t out;
    int beside;
} async;
static void async_step(rig *r, void *arg) {
    const async *a = (const async *)arg;
    for (int i = 0; i < 60; i++) a->x[i] = unit_value(3 + 100 * rig_who(r, r->rank), i) / 3;
    memset(a->y, 0x5a, 60 * sizeof *a->y);
    if (a->beside) run_async(r, a->run, a->y, a->x);
    else run_redist(r, a->run, a->y, a->x);
    rig_saw(r, a->y, a->out);
}
static void async_body(rig *r) {
    static const char *const pairs[][2] = {
        {"S0", "R"}, {"S1", "R"}, {"P", "R"}, {"P", "S1"}, {"S0", "S1"}};
    async a = FSDP_ZERO;
    a.x = rig_own(r, 60), a.y = rig_own(r, 60);
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        char wire[80];
        a.run = redist(r, "x", spec2(r, pairs[i][0], 5, 12), spec2(r, pairs[i][1], 5, 12));
        a.out = info_of(r, a.run).to.numel;
        a.beside = 0;
        int at = r->b.log.num;
        twice(r, async_step, &a);
        const uint64_t bits = r->hash;
        snprintf(wire, sizeof wire, "%s", records_from(r, at, COLLECTIVES));
        a.beside = 1;
        at = r->b.log.num;
        async_step(r, &a); /* the first one may start a worker thread */
        async_step(r, &a);
        CHECK_EQ_STR(records_from(r, at, COLLECTIVES), wire);
        for (int k = at; k < r->b.log.num; k++)
            if (r->b.log.ops[k].label == r->b.label && r->b.log.ops[k].kind <= FSDP_OP_ALL_TO_ALL)
                CHECK_EQ_INT(r->b.log.ops[k].stream, FSDP_STREAM_EXTENSION);
        twice(r, async_step, &a);
        W_CHECK(r->hash == bits, "%s to %s: other bits beside the stream", pairs[i][0],
                pairs[i][1]);
    }
}
/* PyTorch: test_dtensor_compile.py test_dynamo_dtensor_from_local_redistribute_async. Done: the
   bits and collectives of the blocking call, with which values are compared. */
TEST_P(dtensor_compile, dynamo_dtensor_from_local_redistribute_async, streams) {
    run_with_overlap(row, 2, async_body);
}

/* The first use of a gather under way waits for it, once. */
static void in_flight_body(rig *r) {
    fsdp_redistribution *gather = redist(r, "x", spec1(r, "S0", 4), spec1(r, "R", 4));
    float *x = rig_shared(r, 2), *y = rig_shared(r, 4), z[4];
    const float value[2] = {(float)(1 + rig_who(r, 0)), (float)(1 + rig_who(r, 1))};
    for (int run = 0; run < 2; run++) {
        int at = r->b.log.num;
        x[0] = x[1] = value[r->rank];
        CALL(r->b.w, fsdp_redistribute_begin(gather, y, x));
        CHECK_EQ_STR(records_from(r, at, ALL_RECORDS), "wrote 0, AG 2/2");
        const int sent = lab_next_op(&r->b.log, at, FSDP_OP_ALL_GATHER, r->b.label, NULL);
        CHECK_EQ_INT(r->b.log.ops[sent].stream, FSDP_STREAM_EXTENSION);
        CHECK_EQ_INT(lab_count_ops(&r->b.log, at, FSDP_OP_WAIT, -1, NULL), 0);
        at = r->b.log.num;
        CALL(r->b.w, fsdp_redistribute_wait(gather));
        CHECK_EQ_INT(r->b.log.num, at + 1);
        CHECK_EQ_INT(r->b.log.ops[at].kind, FSDP_OP_WAIT);
        CHECK_EQ_INT(r->b.log.ops[at].stream, FSDP_STREAM_COMPUTE);
        CALL(r->b.w, fsdp_redistribute_wait(gather));
        CHECK_EQ_INT(r->b.log.num, at + 1);
        settle(r);
        for (int i = 0; i < 4; i++) z[i] = (float)sin(sin((double)y[i]));
        for (int i = 0; i < 4; i++)
            W_CHECK(z[i] == (float)sin(sin((double)value[i / 2])), "%g", (double)z[i]);
    }
}
/* PyTorch: test_dtensor_compile.py test_graph_input_is_async. Done: nothing waits after the start;
   a second wait issues no op. */
TEST_P(dtensor_compile, graph_input_is_async, streams) { run_with_overlap(row, 2, in_flight_body); }

/* Two gradients are under way, and are waited for in reverse order. Then the model ends with one
   under way. */
static void tangents_body(rig *r) {
    fsdp_redistribution *a = redist(r, "a", spec1(r, "S0", 6), spec1(r, "R", 6)),
                        *b = redist(r, "b", spec1(r, "P", 6), spec1(r, "S0", 6));
    const fsdp_spec sums = spec1(r, "P", 6);
    fsdp_redistribution *first = backward_of(r, a, &sums), *second = backward_of(r, b, NULL);
    float *x = rig_shared(r, 6), *dx = rig_shared(r, 3), *y = rig_shared(r, 3),
          *dy = rig_shared(r, 6);
    for (int run = 0; run < 2; run++) {
        for (int i = 0; i < 6; i++) x[i] = (float)((i + 1) * (1 + rig_who(r, r->rank)));
        for (int i = 0; i < 3; i++) y[i] = (float)(10 * rig_who(r, r->rank) + i);
        CALL(r->b.w, fsdp_redistribute_begin(first, dx, x));
        CALL(r->b.w, fsdp_redistribute_begin(second, dy, y));
        CALL(r->b.w, fsdp_redistribute_wait(second));
        settle(r);
        for (int i = 0; i < 6; i++)
            W_CHECK(dy[i] == (float)(10 * rig_who(r, i / 3) + i % 3), "%g", (double)dy[i]);
        CALL(r->b.w, fsdp_redistribute_wait(first));
        settle(r);
        for (int i = 0; i < 3; i++)
            W_CHECK(dx[i] == (float)((i + 1 + 3 * r->rank) * (2 + rig_who(r, 0) + rig_who(r, 1))),
                    "%g", (double)dx[i]);
    }
    CALL(r->b.w, fsdp_redistribute_begin(first, dx, x));
}
/* PyTorch: test_dtensor_compile.py test_unwrap_async_collective_tensor_tangent. Partly: two
   gradients under way, waited for in the other order. No tensor of two tensors. */
TEST_P(dtensor_compile, unwrap_async_collective_tensor_tangent, streams) {
    run_with_overlap(row, 2, tangents_body);
}

/* Partial values stay partial in a sum and in a product with a replicated factor. */
static void partial_output_body(rig *r) {
    const fsdp_spec x = spec2(r, "P", 2, 2), w = spec2(r, "R", 2, 2);
    const fsdp_propagation add = propagate(FSDP_TENSOR_OP_ADD, &x, &x, &no_args),
                           mm = propagate(FSDP_TENSOR_OP_MM, &add.out, &w, &no_args);
    fsdp_redistribution *sum = redist(r, "out", mm.out, w);
    const float y[4] = {1, 2, 3, 4}, ones[4] = {1, 1, 1, 1};
    float *out = rig_own(r, 4), *part = rig_own(r, 4), *mine = values(r->rank, 4);
    float *one = values(0, 4), *two = values(1, 4), twofold[4], want[4], dx[4];
    CHECK(same_spec(&add.out, &x) && same_spec(&mm.out, &x) && add.cost_us == 0 && mm.cost_us == 0);
    CHECK(same_spec(&add.grad[0], &w) && same_spec(&mm.grad[0], &w));
    for (int i = 0; i < 4; i++) mine[i] += mine[i];
    matmul(part, 0, mine, 0, y, 0, 2, 2, 2);
    run_redist(r, sum, out, part);
    check_text(r, 0, "AR 4/2");
    for (int i = 0; i < 4; i++) twofold[i] = 2 * (one[i] + two[i]);
    matmul(want, 0, twofold, 0, y, 0, 2, 2, 2);
    check_same(out, want, 4, "(x + x) y");
    CHECK_EQ_INT(info_of(r, backward_of(r, sum, NULL)).route.num_steps, 0);
    matmul(dx, 0, ones, 0, y, 1, 2, 2, 2); /* each summand's gradient is that of the full tensor */
    for (int i = 0; i < 4; i++) W_CHECK(2 * dx[i] == (i % 2 ? 14 : 6), "%g", (double)dx[i]);
    free(mine), free(one), free(two);
}
/* PyTorch: test_dtensor_compile.py test_dtensor_partial_placement_graph_output. Done: one
   all-reduce, at the end. */
TEST_P(dtensor_compile, dtensor_partial_placement_graph_output, ways) {
    run_on(row, 2, partial_output_body);
}

/* ---- routes that are searched once ----------------------------------------------------------- */

static void from_local_body(rig *r) {
    const fsdp_spec all = spec1(r, "R", 4), sums = spec1(r, "P", 4);
    fsdp_redistribution *stays = redist(r, "x", all, all);
    float *x = rig_own(r, 4), *dx = rig_own(r, 4);
    for (int call = 0; call < 2; call++) { /* placements by position, and by name: equal descs */
        fsdp_redistribution_desc d = FSDP_ZERO;
        fsdp_redistribution *again;
        d.name = "x", d.from = d.to = call ? spec1(r, "R", 4) : all;
        CALL(r->b.w, fsdp_redistribution_create(r->b.dm, &d, &again));
        CHECK(again == stays);
        for (int i = 0; i < 4; i++) x[i] = (float)(r->rank + i);
        run_redist(r, again, x, x);
        for (int i = 0; i < 4; i++) W_CHECK(x[i] == (float)(r->rank + i), "%g", (double)x[i]);
    }
    CHECK_EQ_STR(records_from(r, 0, ALL_RECORDS), "");
    CHECK(routes_of(r) == 0 && info_of(r, stays).route.num_steps == 0);
    run_redist(r, backward_of(r, stays, &sums), dx, x);
    check_text(r, 0, "AR 4/2");
    for (int i = 0; i < 4; i++) W_CHECK(dx[i] == (float)(1 + 2 * i), "%g", (double)dx[i]);
    CHECK_EQ_INT(routes_of(r), 1);
}
/* PyTorch: test_dtensor_compile.py test_dynamo_dtensor_from_local. Done. */
TEST_P(dtensor_compile, dynamo_dtensor_from_local, ways) { run_on(row, 2, from_local_body); }

/* Resizes each dim in turn, two at once, all: one route. A size above the desc's changes nothing.
   */
typedef struct sized {
    fsdp_redistribution *gather;
    float *x, *y, *whole;
    int64_t shape[3];
} sized;
static void sized_step(rig *r, void *arg) {
    const sized *z = (const sized *)arg;
    const fsdp_spec s = spec3(r, "S1", z->shape[0], z->shape[1], z->shape[2]);
    const fsdp_redistribution_info info = info_of(r, z->gather);
    const int64_t numel = lab_numel(3, z->shape);
    CHECK_EQ_MEM(info.to.shape, z->shape, sizeof z->shape);
    CHECK_EQ_INT(put_part(r, &s, z->whole, z->x), info.from.numel);
    run_redist(r, z->gather, z->y, z->x);
    check_same(z->y, z->whole, numel, "gathered");
    rig_saw(r, z->y, numel);
}
static void dynamic_shapes_body(rig *r) {
    static const int64_t shapes[][3] = {{6, 8, 4}, {3, 8, 4}, {6, 5, 4}, {6, 8, 2}, {1, 7, 4},
                                        {6, 1, 3}, {2, 3, 1}, {0, 8, 4}, {6, 8, 4}};
    sized z;
    z.gather = redist(r, "x", spec3(r, "S1", 6, 8, 4), spec3(r, "R", 6, 8, 4));
    z.x = rig_own(r, 96), z.y = rig_own(r, 192), z.whole = values(4, 192);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        memcpy(z.shape, shapes[i], sizeof z.shape);
        for (int d = 0; d < 3; d++)
            CALL(r->b.w, fsdp_redistribution_resize(z.gather, d, z.shape[d]));
        twice(r, sized_step, &z);
        CHECK_EQ_INT(routes_of(r), 1);
    }
    for (int d = 0; d < 3; d++) {
        REFUSED(r->b.w, fsdp_redistribution_resize(z.gather, d, z.shape[d] + 1),
                "at most the rows");
        REFUSED(r->b.w, fsdp_redistribution_resize(z.gather, d, -1), "at most the rows");
    }
    REFUSED(r->b.w, fsdp_redistribution_resize(z.gather, 3, 1), "expected a dim of the tensor");
    twice(r, sized_step, &z); /* nothing changed */
    free(z.whole);
}
/* PyTorch: test_dtensor_compile.py test_dynamo_dtensor_from_local_dynamic_shapes. Done: nine
   shapes; a size above the desc's is refused. */
TEST_P(dtensor_compile, dynamo_dtensor_from_local_dynamic_shapes, ways) {
    run_on(row, 2, dynamic_shapes_body);
}

static void recompile_body(rig *r) {
    const fsdp_spec all = spec2(r, "R", 4, 4);
    fsdp_redistribution *rows = redist(r, "x", spec2(r, "S0", 4, 4), all);
    CHECK(redist(r, "x", spec2(r, "S0", 4, 4), all) == rows);
    CHECK_EQ_INT(routes_of(r), 1);
    fsdp_redistribution *columns = redist(r, "x", spec2(r, "S1", 4, 4), all);
    CHECK(columns != rows);
    CHECK_EQ_INT(routes_of(r), 2);
    float *x = rig_own(r, 8), *y = rig_own(r, 16), *whole = values(2, 16);
    for (int i = 0; i < 2; i++) {
        const fsdp_spec s = spec2(r, i ? "S1" : "S0", 4, 4);
        put_part(r, &s, whole, x);
        run_redist(r, i ? columns : rows, y, x);
        check_same(y, whole, 16, i ? "columns" : "rows");
    }
    CHECK_EQ_INT(routes_of(r), 2);
    free(whole);
}
/* PyTorch: test_dtensor_compile.py test_dynamo_dtensor_recompile. Done: an equal desc returns the
   same object. */
TEST_P(dtensor_compile, dynamo_dtensor_recompile, ways) { run_on(row, 2, recompile_body); }

/* Equal specs are equal, wherever they are in memory and whatever mesh object they come from. */
static void same_mesh_body(rig *r) {
    static const char *const one[1] = {"tp"};
    fsdp_redistribution *first[2] = {NULL, NULL}, *run;
    for (int pass = 0; pass < 3; pass++) {
        fsdp_mesh *mesh = lab_mesh(r->b.w, 1, r->b.shape, one, NULL);
        for (int kind = 0; kind < 2; kind++) {
            fsdp_placement *place = (fsdp_placement *)lab_zeros(1, sizeof *place);
            fsdp_redistribution_desc *d = (fsdp_redistribution_desc *)lab_zeros(1, sizeof *d);
            const int32_t size = fsdp_mesh_size(mesh, 0);
            const int64_t shape[2] = {4, 4};
            char name[2] = {'x', 0}; /* compared by content */
            /* fields that a kind does not use are ignored */
            memset(place, kind ? 0 : 0x5a, sizeof *place);
            place->kind = FSDP_REPLICATE;
            CHECK_OK(fsdp_spec_init(&d->to, 1, &size, place, FSDP_F32, 2, shape));
            place->kind = kind ? FSDP_PARTIAL : FSDP_SHARD;
            place->dim = 1, place->op = FSDP_SUM, place->order = 0;
            CHECK_OK(fsdp_spec_init(&d->from, 1, &size, place, FSDP_F32, 2, shape));
            d->name = name;
            CALL(r->b.w, fsdp_redistribution_create(r->b.dm, d, &run));
            if (!pass) first[kind] = run;
            CHECK(run == first[kind]);
            r->any = run;
            CHECK_EQ_INT(routes_of(r), pass || kind ? 2 : 1);
            free(place), free(d);
        }
    }
    CHECK(first[0] != first[1]);
    CHECK(redist(r, "y", spec2(r, "S1", 4, 4), spec2(r, "R", 4, 4)) != first[0]);
    CHECK_EQ_INT(routes_of(r), 2); /* another name, the same route */
}
/* PyTorch: test_dtensor_compile.py test_dtensor_dont_recompile_on_same_placement_devicemesh. Done:
   also with other names of meshes and specs. */
TEST_P(dtensor_compile, dtensor_dont_recompile_on_same_placement_devicemesh, ways) {
    run_on(row, 2, same_mesh_body);
}

/* ---- the order of collectives ---------------------------------------------------------------- */

/* Attention of PyTorch's test: q, k and v are added and projected. Tokens are sharded over ranks,
   and each of q, k, v has half of the columns there; the projection gives partial values. */
enum { TOKENS = 20, DIM = 16, HEAD = DIM / 2 };
enum { WQ, WK, WV, WO, WEIGHTS };
typedef struct attention {
    fsdp_redistribution *in, *out, *back_in, *back_out;
    float *x, *full, *y, *part, *dy, *dfull, *dpart, *dx;  /* as they are sent */
    float w[WEIGHTS][DIM * HEAD], dw[WEIGHTS][DIM * HEAD]; /* this rank's: wo (DIM, HEAD) */
    float heads[2 * TOKENS * HEAD], dheads[2 * TOKENS * HEAD];
    float *want_y, *want_dx, *want_dw[WEIGHTS]; /* results of one process */
    int split;
} attention;
static void attention_begin(rig *r, attention *a) {
    const int rows = 2 * TOKENS;
    const fsdp_spec tokens = spec2(r, "S0", rows, DIM), all = spec2(r, "R", rows, DIM),
                    sums = spec2(r, "P", rows, DIM);
    float *x = values(1, rows * DIM), *dy = values(2, rows * DIM), *w[WEIGHTS];
    float *h = values(0, rows * DIM), *dh = values(0, rows * DIM);
    a->in = redist(r, "attention in", tokens, all),
    a->out = redist(r, "attention out", sums, tokens);
    a->back_in = backward_of(r, a->in, &sums), a->back_out = backward_of(r, a->out, NULL);
    a->x = rig_shared(r, TOKENS * DIM), a->full = rig_shared(r, rows * DIM);
    a->y = rig_shared(r, TOKENS * DIM), a->part = rig_shared(r, rows * DIM);
    a->dy = rig_shared(r, TOKENS * DIM), a->dfull = rig_shared(r, rows * DIM);
    a->dx = rig_shared(r, TOKENS * DIM), a->dpart = rig_shared(r, rows * DIM);
    put_part(r, &tokens, x, a->x), put_part(r, &tokens, dy, a->dy);
    a->want_y = values(0, rows * DIM), a->want_dx = values(0, rows * DIM);
    for (int k = 0; k < WEIGHTS; k++) {
        const fsdp_spec cut = spec2(r, k == WO ? "S1" : "S0", DIM, DIM);
        w[k] = values(10 + k, DIM * DIM), a->want_dw[k] = values(0, DIM * DIM);
        put_part(r, &cut, w[k], a->w[k]);
        if (k < WO) matmul(h, k > 0, x, 0, w[k], 1, rows, DIM, DIM);
    }
    matmul(a->want_y, 0, h, 0, w[WO], 1, rows, DIM, DIM);
    matmul(a->want_dw[WO], 0, dy, 1, h, 0, DIM, rows, DIM);
    matmul(dh, 0, dy, 0, w[WO], 0, rows, DIM, DIM);
    for (int k = 0; k < WO; k++) {
        matmul(a->want_dx, k > 0, dh, 0, w[k], 0, rows, DIM, DIM);
        matmul(a->want_dw[k], 0, dh, 1, x, 0, DIM, rows, DIM);
    }
    for (int k = 0; k < WEIGHTS; k++) free(w[k]);
    free(x), free(dy), free(h), free(dh);
}
/* The forward, in one function or in two. */
static void attention_qkv(rig *r, attention *a) {
    run_redist(r, a->in, a->full, a->x); /* one gather for all three */
    for (int k = 0; k < WO; k++)
        matmul(a->heads, k > 0, a->full, 0, a->w[k], 1, 2 * TOKENS, DIM, HEAD);
}
static void attention_out(rig *r, attention *a) {
    matmul(a->part, 0, a->heads, 0, a->w[WO], 1, 2 * TOKENS, HEAD, DIM);
    run_redist(r, a->out, a->y, a->part);
}
static void attention_forward(rig *r, attention *a) {
    run_redist(r, a->in, a->full, a->x);
    for (int k = 0; k < WO; k++)
        matmul(a->heads, k > 0, a->full, 0, a->w[k], 1, 2 * TOKENS, DIM, HEAD);
    matmul(a->part, 0, a->heads, 0, a->w[WO], 1, 2 * TOKENS, HEAD, DIM);
    run_redist(r, a->out, a->y, a->part);
}
static void attention_step(rig *r, void *arg) {
    attention *a = (attention *)arg;
    int at = r->b.log.num;
    if (a->split) attention_qkv(r, a), attention_out(r, a);
    else attention_forward(r, a);
    check_text(r, at, "AG 320/2, RS 320/2");
    at = r->b.log.num;
    run_redist(r, a->back_out, a->dfull, a->dy);
    matmul(a->dw[WO], 0, a->dfull, 1, a->heads, 0, DIM, 2 * TOKENS, HEAD);
    matmul(a->dheads, 0, a->dfull, 0, a->w[WO], 0, 2 * TOKENS, DIM, HEAD);
    for (int k = 0; k < WO; k++) { /* the three dX are added before the reduction */
        matmul(a->dpart, k > 0, a->dheads, 0, a->w[k], 0, 2 * TOKENS, HEAD, DIM);
        matmul(a->dw[k], 0, a->dheads, 1, a->full, 0, HEAD, 2 * TOKENS, DIM);
    }
    run_redist(r, a->back_in, a->dx, a->dpart);
    check_text(r, at, "AG 320/2, RS 320/2");
    rig_saw(r, a->y, TOKENS * DIM), rig_saw(r, a->dx, TOKENS * DIM);
    for (int k = 0; k < WEIGHTS; k++) rig_saw(r, a->dw[k], DIM * HEAD);
}
static void attention_body(rig *r) {
    const fsdp_spec tokens = spec2(r, "S0", 2 * TOKENS, DIM);
    attention *a = (attention *)lab_zeros(1, sizeof *a);
    a->split = *(const int *)r->arg;
    attention_begin(r, a);
    const int from = twice(r, attention_step, a);
    /* in this memory parts have the layout in which they are sent: no copies */
    CHECK_EQ_STR(records_from(r, from, ALL_RECORDS), records_from(r, from, COLLECTIVES));
    check_part(r, &tokens, a->want_y, a->y, "y");
    check_part(r, &tokens, a->want_dx, a->dx, "dx");
    for (int k = 0; k < WEIGHTS; k++) {
        const fsdp_spec cut = spec2(r, k == WO ? "S1" : "S0", DIM, DIM);
        check_part(r, &cut, a->want_dw[k], a->dw[k], k == WO ? "dwo" : "dw of q, k or v");
        free(a->want_dw[k]);
    }
    free(a->want_y), free(a->want_dx), free(a);
}
static void attend(const way *how, int split) {
    task t = FSDP_ZERO;
    t.body = attention_body, t.arg = &split, t.ndim = 1, t.mesh[0] = 2;
    run_task(how, &t);
}
/* PyTorch: test_dtensor_compile.py test_tp_compile_comm_reordering. Done: PyTorch's compiler finds
   the order; here it is the program's. No biases (PyTorch: with). */
TEST_P(dtensor_compile, tp_compile_comm_reordering, ways) { attend(row, 0); }
/* PyTorch: test_dtensor_compile.py test_tp_compile_comm_reordering_graph_partition. Partly: the
   forward in two functions. No graph that is cut in parts. */
TEST_P(dtensor_compile, tp_compile_comm_reordering_graph_partition, ways) { attend(row, 1); }

/* A redistribution that a step runs twice; with its backward. */
typedef struct nested {
    fsdp_redistribution *gather, *back;
    float *x, *y, *z, *dx, *whole;
} nested;
static void nested_step(rig *r, void *arg) {
    const nested *n = (const nested *)arg;
    const fsdp_spec cut = spec2(r, "S0", 8, 4);
    put_part(r, &cut, n->whole, n->x);
    run_redist(r, n->gather, n->y, n->x);
    run_redist(r, n->gather, n->z, n->x);
    check_same(n->y, n->whole, 32, "first"), check_same(n->z, n->whole, 32, "second");
    for (int i = 0; i < 32; i++) n->y[i] += n->z[i];
    rig_saw(r, n->y, 32);
    if (!n->back) return;
    run_redist(r, n->back, n->dx, n->y); /* each rank passes twice the full tensor */
    for (int i = 0; i < 16; i++)
        W_CHECK(n->dx[i] == 4 * n->x[i], "%g, expected %g", (double)n->dx[i], 4 * (double)n->x[i]);
    rig_saw(r, n->dx, 16);
}
static void nested_body(rig *r) {
    const int trains = *(const int *)r->arg;
    const fsdp_spec cut = spec2(r, "S0", 8, 4), all = spec2(r, "R", 8, 4),
                    sums = spec2(r, "P", 8, 4);
    nested n = FSDP_ZERO;
    n.gather = redist(r, "inner", cut, all);
    if (trains) n.back = backward_of(r, n.gather, &sums);
    n.x = rig_own(r, 16), n.y = rig_own(r, 32), n.z = rig_own(r, 32), n.dx = rig_own(r, 16);
    n.whole = values(6, 32);
    nested_step(r, &n);
    check_text(r, 0, trains ? "AG 16/2, AG 16/2, RS 16/2" : "AG 16/2, AG 16/2");
    CHECK_EQ_INT((int64_t)info_of(r, n.gather).runs, 2);
    twice(r, nested_step, &n);
    CHECK_EQ_INT((int64_t)info_of(r, n.gather).runs, 6);
    if (trains) CHECK_EQ_INT((int64_t)info_of(r, n.back).runs, 3);
    CHECK_EQ_INT(routes_of(r), 1 + trains);
    free(n.whole);
}
static void nest(const way *how, int trains) {
    task t = FSDP_ZERO;
    t.body = nested_body, t.arg = &trains, t.ndim = 1, t.mesh[0] = 2;
    run_task(how, &t);
}
/* PyTorch: test_dtensor_compile.py test_make_fx_with_invoke_subgraph_dtensor,
   test_aot_autograd_over_dynamo_dtensor_requires_grad. Partly: one redistribution that a step runs
   twice, the second test with its backward. No captured regions. */
TEST_P(dtensor_compile, make_fx_with_invoke_subgraph_dtensor, ways) { nest(row, 0); }
TEST_P(dtensor_compile, aot_autograd_over_dynamo_dtensor_requires_grad, ways) { nest(row, 1); }

/* ---- two layers, with tensor parallelism and FSDP -------------------------------------------- */

/* PyTorch's SimpleModel: two MLPs 10-16-10. Ranks of tp shard the 16; row biases are replicated.
   With sequence parallelism (sp) they also shard tokens between the layers. */
enum { D = 10, H = 16, ROWS = 20, LAYERS = 2, MLP_PARAMS = 3, STEPS = 3 };
enum { W1, B1, W2, B2, KINDS };
typedef struct setup {
    const char *name;
    way how;
    int dp, tp; /* dp 0: no such dim */
    int sp, no_bias, checkpoint, planned;
    int apart; /* apart: the ranks of tp are not replicas of the model */
} setup;
typedef struct simple {
    const setup *c;
    int64_t full, wide; /* rows of a gathered input; this rank's columns of 16 */
    fsdp_unit *rest, *mlp[LAYERS];
    fsdp_redistribution *in[LAYERS], *out[LAYERS], *slice, *back_slice, *back_in, *back_out;
    float *x, *dout;                                                     /* inputs of this rank */
    float *act[LAYERS], *y[LAYERS], *part, *result, *dfull, *dmid, *dy0; /* as they are sent */
    float *h[LAYERS], *dh;
    float *whole[LAYERS][KINDS], *want[LAYERS][KINDS], *want_out; /* results of one process */
    /* hash of this rank's shard gradients */
    uint64_t grads;
    int compares; /* compares the gathered gradients with those of one process */
} simple;

static const int64_t kind_shapes[KINDS][2] = {{H, D}, {H, 0}, {D, H}, {D, 0}};
static int64_t kind_numel(int kind) {
    return kind_shapes[kind][0] * (kind_shapes[kind][1] ? kind_shapes[kind][1] : 1);
}
static fsdp_param_desc kind_desc(const char *name, int kind) {
    return kind_shapes[kind][1] ? fsdp_mat(name, kind_shapes[kind][0], kind_shapes[kind][1])
                                : fsdp_vec(name, kind_shapes[kind][0]);
}

static void simple_units(rig *r, simple *m) {
    static const char *const names[LAYERS] = {"mlp_0", "mlp_1"};
    static const fsdp_placement cut[MLP_PARAMS] = {
        {FSDP_SHARD, 0, 0, 0}, {FSDP_SHARD, 0, 0, 0}, {FSDP_SHARD, 1, 0, 0}};
    static const fsdp_placement whole[LAYERS] = {{FSDP_REPLICATE, 0, 0, 0},
                                                 {FSDP_REPLICATE, 0, 0, 0}};
    fsdp_tp_unit_desc d = FSDP_ZERO;
    fsdp_param_desc p[MLP_PARAMS];
    if (!m->c->no_bias) { /* one unit for all replicated parameters, open around the others */
        p[0] = kind_desc("mlp_0.b2", B2), p[1] = kind_desc("mlp_1.b2", B2);
        d.unit.name = "rest", d.unit.params = p, d.unit.num_params = LAYERS, d.tp = whole;
        d.unit.reshard_after_forward = FSDP_RESHARD_NEVER;
        CALL(r->b.w, fsdp_tp_fully_shard(r->b.dm, &d, &m->rest));
    }
    for (int l = 0; l < LAYERS; l++) {
        memset(&d, 0, sizeof d);
        p[W1] = kind_desc("w1", W1), p[B1] = kind_desc("b1", B1), p[W2] = kind_desc("w2", W2);
        d.unit.name = names[l], d.unit.params = p, d.unit.num_params = MLP_PARAMS, d.tp = cut;
        CALL(r->b.w, fsdp_tp_fully_shard(r->b.dm, &d, &m->mlp[l]));
    }
    for (int l = 0; l < LAYERS; l++) { /* FSDP shards this rank's part */
        const fsdp_param_view w1 = lab_view(r->b.w, m->mlp[l], W1),
                              b1 = lab_view(r->b.w, m->mlp[l], B1),
                              w2 = lab_view(r->b.w, m->mlp[l], W2);
        CHECK(w1.shape[0] == m->wide && w1.shape[1] == D && b1.shape[0] == m->wide);
        CHECK(w2.shape[0] == D && w2.shape[1] == m->wide);
    }
    for (int l = 0; l < LAYERS; l++)
        for (int k = 0; k < KINDS; k++) {
            if (k == B2 && !m->rest) continue;
            CALL(r->b.w, fsdp_tp_param_load(r->b.dm, k == B2 ? m->rest : m->mlp[l], k == B2 ? l : k,
                                            m->whole[l][k]));
        }
}

static void simple_redistributions(rig *r, simple *m) {
    const char *const all = r->b.ndim == 1 ? "R" : "R R",
                      *const sums = r->b.ndim == 1 ? "P" : "R P",
                      *const cut = r->b.ndim == 1 ? "S0" : "R S0";
    const fsdp_spec whole = spec2(r, all, m->full, D), addends = spec2(r, sums, m->full, D),
                    tokens = spec2(r, m->c->sp ? cut : all, m->full, D);
    m->in[0] = redist(r, "mlp_0 in", tokens, whole);
    m->out[0] = redist(r, "mlp_0 out", addends, tokens);
    m->in[1] = redist(r, "mlp_1 in", tokens, whole);
    m->out[1] = redist(r, "mlp_1 out", addends, whole);
    m->slice = redist(r, "result", whole, tokens);
    m->back_slice = backward_of(r, m->slice, NULL);
    m->back_in = backward_of(r, m->in[1], &addends);
    m->back_out = backward_of(r, m->out[0], NULL);
    for (int l = 0; l < LAYERS; l++) {
        m->act[l] = rig_shared(r, m->full * D), m->y[l] = rig_shared(r, m->full * D);
        m->h[l] = values(0, m->full * m->wide);
    }
    m->dh = values(0, m->full * m->wide);
    m->part = rig_shared(r, m->full * D), m->result = rig_shared(r, m->full * D);
    m->dfull = rig_shared(r, m->full * D), m->dmid = rig_shared(r, m->full * D);
    m->dy0 = rig_shared(r, m->full * D);
    m->x = rig_shared(r, m->full * D), m->dout = rig_shared(r, m->full * D);
}

/* Computes the step in one process, on the rows of every rank of dp; gradients are their mean. */
static void simple_reference(rig *r, simple *m) {
    const int dp = m->c->dp ? m->c->dp : 1, mine = m->c->dp ? r->b.coord[0] : 0;
    const fsdp_spec tokens = spec2(r, !m->c->sp ? r->b.ndim == 1 ? "R" : "R R" : "S0", m->full, D);
    float *y[LAYERS], *h[LAYERS], *dh = values(0, m->full * H), *dx = values(0, m->full * D);
    for (int l = 0; l < LAYERS; l++) {
        y[l] = values(0, m->full * D), h[l] = values(0, m->full * H);
        for (int k = 0; k < KINDS; k++)
            m->want[l][k] = (float *)lab_zeros((size_t)kind_numel(k), sizeof(float));
    }
    for (int g = 0; g < dp; g++) {
        float *x = values(100 + g, m->full * D), *dout = values(200 + g, m->full * D);
        for (int l = 0; l < LAYERS; l++) {
            float *const *p = m->whole[l];
            mlp_forward(p[W1], p[B1], p[W2], l ? y[0] : x, h[l], y[l], m->full, D, H);
            add_bias(y[l], m->rest ? p[B2] : NULL, m->full, D);
        }
        for (int l = LAYERS - 1; l >= 0; l--) {
            float *const *p = m->whole[l], *const *g_ = m->want[l], *const dy = l ? dout : dx;
            bias_grad(g_[B2], dy, m->full, D);
            mlp_backward(p[W1], p[W2], l ? y[0] : x, h[l], dy, dh, g_[W1], g_[B1], g_[W2],
                         l ? dx : NULL, m->full, D, H);
        }
        if (g == mine) {
            put_part(r, &tokens, x, m->x), put_part(r, &tokens, dout, m->dout);
            memcpy(m->want_out, y[1], (size_t)(m->full * D) * sizeof(float));
        }
        free(x), free(dout);
    }
    for (int l = 0; l < LAYERS; l++) {
        for (int k = 0; k < KINDS; k++)
            for (int64_t i = 0; i < kind_numel(k); i++) m->want[l][k][i] /= (float)dp;
        free(y[l]), free(h[l]);
    }
    free(dh), free(dx);
}

static simple *simple_begin(rig *r, const setup *c) {
    simple *m = (simple *)lab_zeros(1, sizeof *m);
    m->c = c, m->full = c->sp ? ROWS * c->tp : ROWS, m->wide = H / c->tp;
    for (int l = 0; l < LAYERS; l++)
        for (int k = 0; k < KINDS; k++) m->whole[l][k] = values(10 * l + k, kind_numel(k));
    m->want_out = values(0, m->full * D);
    simple_units(r, m);
    simple_redistributions(r, m);
    simple_reference(r, m);
    return m;
}
static void simple_end(simple *m) {
    for (int l = 0; l < LAYERS; l++) {
        for (int k = 0; k < KINDS; k++) free(m->whole[l][k]), free(m->want[l][k]);
        free(m->h[l]);
    }
    free(m->dh), free(m->want_out), free(m);
}

static const float *data_of(const rig *r, fsdp_unit *unit, int i) {
    const float *data = (const float *)fsdp_data(unit, i);
    W_CHECK(data != NULL, "no data: %s", fsdp_last_error(r->b.w));
    return data;
}
static float *grad_of(const rig *r, fsdp_unit *unit, int i) {
    float *grad = (float *)fsdp_grad(unit, i);
    W_CHECK(grad != NULL, "no gradient: %s", fsdp_last_error(r->b.w));
    return grad;
}

/* Runs a layer, in forward or recomputed in backward; `whole`: its output is needed. */
static void simple_layer(rig *r, simple *m, int l, int whole) {
    fsdp_unit *u = m->mlp[l];
    const float *in = l ? m->y[0] : m->x;
    CALL(r->b.w, fsdp_pre_forward(u));
    run_redist(r, m->in[l], m->act[l], in);
    settle(r);
    mlp_forward(data_of(r, u, W1), data_of(r, u, B1), data_of(r, u, W2), m->act[l], m->h[l],
                whole ? m->part : NULL, m->full, D, m->wide);
    if (whole) {
        run_redist(r, m->out[l], m->y[l], m->part);
        add_bias(m->y[l], m->rest ? data_of(r, m->rest, l) : NULL,
                 info_of(r, m->out[l]).to.shape[0], D);
    }
    CALL(r->b.w, fsdp_post_forward(u));
}
static void simple_forward(rig *r, simple *m) {
    if (m->rest) CALL(r->b.w, fsdp_pre_forward(m->rest));
    simple_layer(r, m, 0, 1);
    simple_layer(r, m, 1, 1);
    run_redist(r, m->slice, m->result, m->y[1]);
    if (m->rest) CALL(r->b.w, fsdp_post_forward(m->rest));
    for (int l = 0; l < LAYERS && m->c->checkpoint; l++) { /* only the input is kept */
        memset(m->h[l], 0xff, (size_t)(m->full * m->wide) * sizeof(float));
        memset(m->act[l], 0xff, (size_t)(m->full * D) * sizeof(float));
        memset(m->y[l], 0xff, (size_t)(m->full * D) * sizeof(float));
    }
}
static void simple_layer_backward(rig *r, simple *m, int l, const float *dy, float *dx) {
    fsdp_unit *u = m->mlp[l];
    if (m->rest) bias_grad(grad_of(r, m->rest, l), dy, m->full, D);
    mlp_backward(data_of(r, u, W1), data_of(r, u, W2), m->act[l], m->h[l], dy, m->dh,
                 grad_of(r, u, W1), grad_of(r, u, B1), grad_of(r, u, W2), dx, m->full, D, m->wide);
    CALL(r->b.w, fsdp_post_backward(u));
}
static void simple_backward(rig *r, simple *m) {
    if (m->rest) CALL(r->b.w, fsdp_pre_backward(m->rest));
    CALL(r->b.w, fsdp_pre_backward(m->mlp[1]));
    if (m->c->checkpoint) { /* the output of mlp_1 is not needed again */
        CALL(r->b.w, fsdp_pre_backward(m->mlp[0]));
        simple_layer(r, m, 0, 1);
        simple_layer(r, m, 1, 0);
    }
    run_redist(r, m->back_slice, m->dfull, m->dout);
    settle(r);
    simple_layer_backward(r, m, 1, m->dfull, m->part);
    run_redist(r, m->back_in, m->dmid, m->part);
    if (!m->c->checkpoint) CALL(r->b.w, fsdp_pre_backward(m->mlp[0]));
    run_redist(r, m->back_out, m->dy0, m->dmid);
    settle(r);
    simple_layer_backward(r, m, 0, m->dy0, NULL);
    if (m->rest) CALL(r->b.w, fsdp_post_backward(m->rest));
    CALL(r->b.w, fsdp_finalize_backward(r->b.model));
    settle(r);
}

/* Checks the collectives over tp, separately for forward and backward. */
static void check_tp(const rig *r, const simple *m, int from, int half, int end) {
    const int tp = m->c->tp, mine = ROWS * D;
    char forward[160], backward[160];
    if (m->c->sp) {
        snprintf(forward, sizeof forward, "AG %d/%d, RS %d/%d, AG %d/%d, AR %d/%d", mine, tp, mine,
                 tp, mine, tp, mine * tp, tp);
        snprintf(backward, sizeof backward, "AG %d/%d, RS %d/%d, AG %d/%d", mine, tp, mine, tp,
                 mine, tp);
    } else {
        snprintf(forward, sizeof forward, "AR %d/%d, AR %d/%d", mine, tp, mine, tp);
        snprintf(backward, sizeof backward, m->c->checkpoint ? "AR %d/%d, AR %d/%d" : "AR %d/%d",
                 mine, tp, mine, tp);
    }
    CHECK_EQ_STR(records_in(r, from, half, COLLECTIVES), forward);
    CHECK_EQ_STR(records_in(r, half, end, COLLECTIVES), backward);
}
static int unit_ops(const rig *r, int from, int end, int kind, int label, const fsdp_unit *unit) {
    return lab_count_ops(&r->b.log, from, kind, label, unit) -
           lab_count_ops(&r->b.log, end, kind, label, unit);
}
/* Checks the collectives of FSDP over dp, and the sum of replicated parameters over tp; there are
   no others. Groups of dp and of tp are never mixed. */
static void check_dp(const rig *r, const simple *m, int from, int half, int end) {
    const int dp = m->c->dp > 1, reduced = m->c->sp ? 7 : 3 + m->c->checkpoint;
    for (int l = 0; l < LAYERS; l++) {
        const fsdp_unit *u = m->mlp[l];
        CHECK_EQ_INT(unit_ops(r, from, half, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, u), dp);
        CHECK_EQ_INT(unit_ops(r, half, end, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, u), dp);
        CHECK_EQ_INT(unit_ops(r, half, end, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, u), dp);
        CHECK_EQ_INT(unit_ops(r, from, end, FSDP_OP_ALL_REDUCE, -1, u), 0);
    }
    if (m->rest) {
        CHECK_EQ_INT(unit_ops(r, from, half, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, m->rest), dp);
        CHECK_EQ_INT(unit_ops(r, half, end, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, m->rest), 0);
        CHECK_EQ_INT(unit_ops(r, half, end, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, m->rest),
                     dp);
        CHECK_EQ_INT(unit_ops(r, half, end, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, m->rest), 1);
    }
    /* In the first step replicas compare their parameters. */
    const int compared = unit_ops(r, from, end, -1, FSDP_LABEL_WORLD, NULL);
    CHECK(compared <= (m->rest != NULL));
    CHECK_EQ_INT(collectives_in(r, from, end) - compared,
                 reduced + 6 * dp + (m->rest ? 2 * dp + 1 : 0));
    fsdp_comm *tp;
    CALL(r->b.w, fsdp_mesh_comm(r->b.mesh, r->b.ndim - 1, FSDP_STREAM_COMPUTE, &tp));
    for (int i = from; i < end; i++) {
        const fsdp_op *a = &r->b.log.ops[i];
        if (a->kind < FSDP_OP_ALL_GATHER || a->kind > FSDP_OP_RECV) continue;
        const int over_tp = a->label == r->b.label || a->label == FSDP_LABEL_REPLICAS ||
                            a->label == FSDP_LABEL_WORLD;
        CHECK_EQ_INT(a->group_size, over_tp ? m->c->tp : m->c->dp);
        if (a->label == r->b.label) CHECK(a->comm == tp);
        for (int k = from; k < end && !over_tp; k++)
            if (r->b.log.ops[k].label == r->b.label || r->b.log.ops[k].label == FSDP_LABEL_REPLICAS)
                CHECK(r->b.log.ops[k].kind > FSDP_OP_RECV ||
                      r->b.log.ops[k].kind < FSDP_OP_ALL_GATHER ||
                      (r->b.log.ops[k].comm != a->comm &&
                       r->b.log.ops[k].comm_number != a->comm_number));
    }
}

/* Compares full gradients, which are gathered in a step whose ops are not compared. */
static void simple_compare(rig *r, const simple *m) {
    float full[H * D];
    for (int l = 0; l < LAYERS; l++)
        for (int k = 0; k < KINDS; k++) {
            if (k == B2 && !m->rest) continue;
            CALL(r->b.w, fsdp_tp_param_full(r->b.dm, k == B2 ? m->rest : m->mlp[l], k == B2 ? l : k,
                                            1, full));
            check_same(full, m->want[l][k], kind_numel(k), "gradient");
        }
}

/* Runs one step, and checks its ops unless it is planned, its result and this rank's shard
   gradients. */
static void simple_step(rig *r, void *arg) {
    simple *m = (simple *)arg;
    const fsdp_spec tokens = spec2(r, !m->c->sp ? r->b.ndim == 1 ? "R" : "R R" : "S0", m->full, D);
    fsdp_param_view v = FSDP_ZERO;
    const int from = r->b.log.num;
    simple_forward(r, m);
    const int half = r->b.log.num;
    simple_backward(r, m);
    check_tp(r, m, from, half, r->b.log.num);
    if (!m->c->planned) check_dp(r, m, from, half, r->b.log.num);
    check_part(r, &tokens, m->want_out, m->result, "result");
    rig_saw(r, m->result, info_of(r, m->slice).to.numel);
    m->grads = 1;
    while (fsdp_next_param(r->b.model, &v)) {
        W_CHECK(v.shard_grad != NULL || !v.numel, "%s has no gradient", v.name);
        lab_fold(&m->grads, v.shard_grad, (size_t)v.numel * sizeof(float));
    }
    lab_fold(&r->hash, &m->grads, sizeof m->grads);
    if (m->compares) simple_compare(r, m);
    CALL(r->b.w, fsdp_zero_grad(r->b.model));
}

/* Three eager steps have equal bits; the second and the third have equal ops (the first has no
   gradients to zero). */
static uint64_t simple_eager(rig *r, simple *m) {
    m->compares = 1;
    r->hash = 1;
    simple_step(r, m);
    const uint64_t bits = r->hash;
    m->compares = 0;
    twice(r, simple_step, m);
    W_CHECK(r->hash == bits, "the first step has other bits");
    return bits;
}

/* With a plan. Parameters that are replicated over tp are in one more group than sharded ones. */
static void simple_planned(rig *r, simple *m, uint64_t bits) {
    fsdp_plan *plan;
    fsdp_plan_report report;
    setup again = *m->c;
    again.planned = 1;
    m->c = &again;
    CALL(r->b.w, fsdp_plan_create(r->b.model, NULL, &plan));
    for (int step = 0; step < 2 + STEPS; step++) {
        fsdp_counters was, now;
        r->hash = 1;
        CALL(r->b.w, fsdp_model_counters(r->b.model, &was));
        simple_step(r, m);
        CALL(r->b.w, fsdp_model_counters(r->b.model, &now));
        W_CHECK(r->hash == bits, "step %d with a plan has other bits", step);
        if (step >= 2) CHECK_EQ_INT((int64_t)(now.allocations - was.allocations), 0);
        /* the mode is that of the next step */
        const fsdp_plan_mode want = step < 1 ? FSDP_PLAN_RECORDING : FSDP_PLAN_REPLAYING;
        W_CHECK(fsdp_plan_state(plan) == want, "step %d: mode %d: %s", step, fsdp_plan_state(plan),
                fsdp_plan_why(plan));
    }
    CALL(r->b.w, fsdp_plan_report_get(plan, 0, &report));
    CHECK(report.recorded == 1 && report.replayed == STEPS && report.left == 0);
    const int rest = m->rest != NULL, shards = m->c->dp > 1;
    CHECK_EQ_INT(report.gathers[0], shards * (4 + rest));
    /* inline and with worker threads; where recompute opens both at once, they are not bucketed */
    CHECK_EQ_INT(report.gathers[1], shards * (1 + m->c->checkpoint + rest));
    CHECK_EQ_INT(report.reductions[0], shards * (2 + rest));
    CHECK_EQ_INT(report.reductions[1], shards * (1 + rest));
    CHECK(report.replicas[0] == rest && report.replicas[1] == rest);
    fsdp_plan_destroy(plan);
}
static void simple_body(rig *r) {
    const setup *c = (const setup *)r->arg;
    simple *m = simple_begin(r, c);
    const uint64_t bits = simple_eager(r, m);
    const uint64_t grads = m->grads;
    if (c->checkpoint) { /* without it the gradients are equal */
        setup plain = *c;
        plain.checkpoint = 0, m->c = &plain;
        W_CHECK(simple_eager(r, m) == bits && m->grads == grads, "other bits without recompute");
        m->c = c;
    }
    simple_planned(r, m, bits);
    simple_end(m);
}
static void simple_run(const setup *c) {
    task t = FSDP_ZERO;
    t.body = simple_body, t.arg = c, t.ndim = c->dp ? 2 : 1, t.apart = c->apart;
    t.mesh[0] = c->dp ? c->dp : c->tp, t.mesh[1] = c->dp ? c->tp : 0;
    run_task(&c->how, &t);
}
#define INLINE                                                                                     \
    { "", 0, 0, RIG_RANKS }
#define LANES                                                                                      \
    { "", 2, 0, RIG_RANKS }
#define PROCESSES                                                                                  \
    { "", 0, 1, RIG_RANKS }
static const setup fullgraphs[] = {{"plain", INLINE, 0, 4, 0, 0, 0, 0, 0},
                                   {"plain,lanes", LANES, 0, 4, 0, 0, 0, 0, 0},
                                   {"plain,processes", PROCESSES, 0, 4, 0, 0, 0, 0, 0},
                                   {"plain,cut units", INLINE, 0, 4, 0, 1, 0, 0, 0},
                                   {"sequence", INLINE, 0, 4, 1, 0, 0, 0, 0},
                                   {"sequence,lanes", LANES, 0, 4, 1, 0, 0, 0, 0},
                                   {"sequence,processes", PROCESSES, 0, 4, 1, 0, 0, 0, 0},
                                   {"sequence,cut units", INLINE, 0, 4, 1, 1, 0, 0, 0}};
static const setup both[] = {{"inline", INLINE, 2, 2, 0, 0, 0, 0, 0},
                             {"lanes", LANES, 2, 2, 0, 0, 0, 0, 0},
                             {"processes", PROCESSES, 2, 2, 0, 0, 0, 0, 0},
                             {"model shards alone", INLINE, 2, 2, 0, 0, 0, 0, 1},
                             {"cut units", INLINE, 2, 2, 0, 1, 0, 0, 0},
                             {"cut units,lanes", LANES, 2, 2, 0, 1, 0, 0, 0}};
static const setup checkpoints[] = {{"inline", INLINE, 2, 2, 0, 0, 1, 0, 0},
                                    {"lanes", LANES, 2, 2, 0, 0, 1, 0, 0},
                                    {"processes", PROCESSES, 2, 2, 0, 0, 1, 0, 0},
                                    {"cut units", INLINE, 2, 2, 0, 1, 1, 0, 0},
                                    {"cut units,lanes", LANES, 2, 2, 0, 1, 1, 0, 0}};
/* PyTorch: test_dtensor_compile.py test_tp_compile_fullgraph. Done: plain and with sequence
   parallel; all gradients (PyTorch: the output). */
TEST_P(dtensor_compile, tp_compile_fullgraph, fullgraphs) { simple_run(row); }
/* PyTorch: test_dtensor_compile.py test_2d_fsdp_tp_compile. Done: per-parameter FSDP (PyTorch:
   FSDP1), eager and with a plan: counts and bits. */
TEST_P(dtensor_compile, 2d_fsdp_tp_compile, both) { simple_run(row); }
/* PyTorch: test_dtensor_compile.py test_2d_fsdp_tp_ac_compile. Done: one all-reduce over tp more;
   gradients and output have the bits of the step without recompute. */
TEST_P(dtensor_compile, 2d_fsdp_tp_ac_compile, checkpoints) { simple_run(row); }

/* x (8,4) sharded along dim 0 times y (4,8) sharded along dim 1, with equal parts on all ranks: one
   operand is gathered, then the output; the backward of the gather is a reduce-scatter. */
typedef struct product {
    fsdp_propagation p;
    fsdp_redistribution *operand, *out, *back_out, *back;
    float *x, *y, *full, *local, *z, *dz, *dlocal, *dfull, *dpart;
    int gathers_x;
} product;
static void product_step(rig *r, void *arg) {
    const product *q = (const product *)arg;
    const int n = q->gathers_x ? 2 : 8; /* columns of this rank's output, or all */
    int at = r->b.log.num;
    run_redist(r, q->operand, q->full, q->gathers_x ? q->x : q->y);
    if (q->gathers_x) matmul(q->local, 0, q->full, 0, q->y, 0, 8, 4, 2);
    else matmul(q->local, 0, q->x, 0, q->full, 0, 2, 4, 8);
    run_redist(r, q->out, q->z, q->local);
    check_text(r, at, "AG 8/4, AG 16/4");
    for (int i = 0; i < 64; i++) { /* 4 x 4 tiles */
        static const float tile[4] = {28, 34, 76, 98};
        W_CHECK(q->z[i] == tile[i / 8 % 2 * 2 + i % 2], "out %d is %g", i, (double)q->z[i]);
    }
    at = r->b.log.num;
    for (int i = 0; i < 64; i++) q->dz[i] = 1;
    run_redist(r, q->back_out, q->dlocal, q->dz);
    float *dx = q->gathers_x ? q->dfull : q->dpart, *dy = q->gathers_x ? q->dpart : q->dfull;
    if (q->gathers_x) { /* dx is partial, dy is this rank's */
        matmul(q->dfull, 0, q->dlocal, 0, q->y, 1, 8, n, 4);
        matmul(dy, 0, q->full, 1, q->dlocal, 0, 4, 8, n);
        run_redist(r, q->back, q->full, q->dfull), dx = q->full;
    } else {
        matmul(dx, 0, q->dlocal, 0, q->full, 1, 2, n, 4);
        matmul(q->dfull, 0, q->x, 1, q->dlocal, 0, 4, 2, n);
        run_redist(r, q->back, q->full, q->dfull), dy = q->full;
    }
    check_text(r, at, "RS 8/4");
    for (int i = 0; i < 8; i++) {
        static const float want_x[4] = {4, 20, 36, 52}, want_y[4] = {16, 24, 32, 40};
        W_CHECK(dx[i] == want_x[i % 4], "dx %d is %g", i, (double)dx[i]);
        W_CHECK(dy[i] == want_y[i / 2], "dy %d is %g", i, (double)dy[i]);
    }
    rig_saw(r, q->z, 64), rig_saw(r, dx, 8), rig_saw(r, dy, 8);
}
static void product_body(rig *r) {
    const fsdp_spec x = spec2(r, "S0", 8, 4), y = spec2(r, "S1", 4, 8), all = spec2(r, "R", 8, 8);
    product q;
    q.p = propagate(FSDP_TENSOR_OP_MM, &x, &y, &no_args);
    q.gathers_x = q.p.in[0].place[0].kind == FSDP_REPLICATE;
    const fsdp_spec *given = q.gathers_x ? &x : &y, *kept = q.gathers_x ? &y : &x;
    CHECK(same_spec(&q.p.in[q.gathers_x], kept)); /* the other operand stays */
    CHECK(q.p.in[!q.gathers_x].place[0].kind == FSDP_REPLICATE && q.p.cost_us > 0);
    CHECK(cut_along(&q.p.out, 0, q.gathers_x ? 1 : 0));
    CHECK(q.p.grad[!q.gathers_x].place[0].kind == FSDP_PARTIAL);
    q.operand = redist(r, "operand", *given, q.p.in[!q.gathers_x]);
    q.out = redist(r, "out", q.p.out, all);
    q.back_out = backward_of(r, q.out, NULL);
    q.back = backward_of(r, q.operand, &q.p.grad[!q.gathers_x]);
    q.x = rig_own(r, 8), q.y = rig_own(r, 8), q.full = rig_own(r, 32), q.local = rig_own(r, 16);
    q.z = rig_own(r, 64), q.dz = rig_own(r, 64), q.dlocal = rig_own(r, 16);
    q.dfull = rig_own(r, 32), q.dpart = rig_own(r, 8);
    for (int i = 0; i < 8; i++) q.x[i] = q.y[i] = (float)i;
    twice(r, product_step, &q);
}
/* PyTorch: test_dtensor_compile.py test_compile_dtensor_redistribute_backward. Done. */
TEST_P(dtensor_compile, compile_dtensor_redistribute_backward, ways) {
    run_on(row, 4, product_body);
}

/* Rows of an embedding are sharded over ranks; most of 16 ranks have none. Rows that a rank lacks
   are zero; the sum is sharded along the columns. */
enum { VOCAB = 10, WIDTH = 20, IDS = 8 };
typedef struct embedding {
    fsdp_redistribution *out, *back;
    fsdp_local part;
    float *w, *sum, *y, *dy, *dout, mine[VOCAB * WIDTH], dw[VOCAB * WIDTH];
} embedding;
static const int64_t ids[IDS] = {0, 9, 3, 3, 6, 8, 0, 5};
static void embedding_step(rig *r, void *arg) {
    embedding *e = (embedding *)arg;
    const int64_t first = e->part.start[0], rows = e->part.shape[0];
    for (int i = 0; i < IDS * WIDTH; i++) {
        const int64_t at = ids[i / WIDTH] - first;
        e->sum[i] = at >= 0 && at < rows ? e->mine[at * WIDTH + i % WIDTH] : 0;
    }
    run_redist(r, e->out, e->y, e->sum);
    rig_saw(r, e->y, info_of(r, e->out).to.numel);
    run_redist(r, e->back, e->dout, e->dy);
    memset(e->dw, 0, sizeof e->dw);
    for (int i = 0; i < IDS * WIDTH; i++) {
        const int64_t at = ids[i / WIDTH] - first;
        if (at >= 0 && at < rows) e->dw[at * WIDTH + i % WIDTH] += e->dout[i];
    }
    rig_saw(r, e->dw, rows * WIDTH);
}
static void embedding_body(rig *r) {
    const fsdp_spec w = spec2(r, "S0", VOCAB, WIDTH), which = spec1(r, "R", IDS);
    const fsdp_propagation p = propagate(FSDP_TENSOR_OP_EMBEDDING, &w, &which, &no_args);
    const fsdp_spec columns = spec2(r, "S1", IDS, WIDTH);
    embedding *e = (embedding *)lab_zeros(1, sizeof *e);
    float *whole = values(1, VOCAB * WIDTH), *dout = values(2, IDS * WIDTH);
    float want[IDS * WIDTH], dw[VOCAB * WIDTH] = {0};
    char text[60];
    CHECK(p.masked && p.cost_us == 0 && p.out.place[0].kind == FSDP_PARTIAL);
    e->out = redist(r, "embedding", p.out, columns), e->back = backward_of(r, e->out, NULL);
    CHECK_OK(fsdp_spec_local(&w, r->b.coord, &e->part));
    if (r->ranks == 4) CHECK_EQ_INT(e->part.shape[0], r->rank < 3 ? 3 : 1);
    else CHECK_EQ_INT(e->part.shape[0], r->rank < VOCAB);
    put_part(r, &w, whole, e->mine);
    const int each = (WIDTH + r->ranks - 1) / r->ranks * IDS;
    e->sum = rig_own(r, IDS * WIDTH), e->dout = rig_own(r, IDS * WIDTH);
    e->y = rig_own(r, each), e->dy = rig_own(r, each);
    put_part(r, &columns, dout, e->dy);
    embedding_step(r, e);
    snprintf(text, sizeof text, "RS %d/%d, AG %d/%d", each, r->ranks, each, r->ranks);
    check_text(r, 0, text);
    twice(r, embedding_step, e);
    for (int i = 0; i < IDS * WIDTH; i++) want[i] = whole[ids[i / WIDTH] * WIDTH + i % WIDTH];
    for (int i = 0; i < IDS * WIDTH; i++) dw[ids[i / WIDTH] * WIDTH + i % WIDTH] += dout[i];
    check_part(r, &columns, want, e->y, "embedding");
    check_part(r, &w, dw, e->dw, "dw");
    run_redist(r, redist(r, "all", columns, spec2(r, "R", IDS, WIDTH)), e->sum, e->y);
    check_same(e->sum, want, IDS * WIDTH, "gathered");
    free(whole), free(dout), free(e);
}
static const struct {
    const char *name;
    way how;
    int ranks;
} embeddings[] = {{"W=4", INLINE, 4},
                  {"W=4,lanes", LANES, 4},
                  {"W=4,processes", PROCESSES, 4},
                  {"W=16", INLINE, 16}};
/* PyTorch: test_dtensor_compile.py test_compile_embedding_redistribute. Done: also the gradient
   (PyTorch: the output), and 16 ranks of which six have no row. */
TEST_P(dtensor_compile, compile_embedding_redistribute, embeddings, MANY_RANKS | (row->ranks > 4 ? NO(NCCL) : 0)) {
    run_on(&row->how, row->ranks, embedding_body);
}

/* torch.split of a replicated tensor: its pieces are rows of the caller's buffer. */
static void split_body(rig *r) {
    static const int counts[5] = {0, 0, 4, 3, 2};
    const fsdp_spec x = spec2(r, "R", 8, 8);
    float *whole = values(1, 64);
    for (int size = 2; size <= 4; size++) {
        int pieces = 0;
        for (int at = 0; at < 8; at += size, pieces++) {
            fsdp_tensor_op_args args = FSDP_ZERO;
            args.num_dims = 1, args.shape[0] = size < 8 - at ? size : 8 - at;
            const fsdp_propagation p = propagate(FSDP_TENSOR_OP_SLICE, &x, NULL, &args);
            const fsdp_spec want = spec2(r, "R", args.shape[0], 8);
            CHECK(p.cost_us == 0 && same_spec(&p.in[0], &x) && same_spec(&p.out, &want));
            fsdp_redistribution *none = redist(r, "piece", p.out, p.out);
            run_redist(r, none, whole + 8 * at, whole + 8 * at);
            for (int i = 0; i < 8 * p.out.shape[0]; i++)
                CHECK(whole[8 * at + i] == unit_value(1, 8 * at + i));
        }
        CHECK_EQ_INT(pieces, counts[size]);
    }
    CHECK_EQ_STR(records_from(r, 0, ALL_RECORDS), "");
    CHECK_EQ_INT(collectives_in(r, 0, r->b.log.num), 0);
    free(whole);
}
/* PyTorch: test_dtensor_compile.py test_split_with_symint_split_size. Done. */
TEST_P(dtensor_compile, split_with_symint_split_size, ways) { run_on(row, 4, split_body); }
