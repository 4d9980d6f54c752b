/* test_edges.c - combinations of features that users have run into: counts of users that must stay,
   refusals whose status is ignored, failing user functions, and resets at unusual moments.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | NCCL | ONE_GPU
#include "harness.h"
#include "lab.h"

typedef struct {
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *u;
} rig;

static void rig_open(rig *x, fsdp_world *w, const fsdp_model_desc *md,
                     const fsdp_param_desc *params, int count) {
    x->w = w;
    x->m = lab_model(w, md);
    x->u = lab_unit(w, x->m, NULL, params, count);
}

static void forward(rig *x) { lab_forward(x->w, x->u); }
/* A step without the gradients, which the caller writes between these. */
static void begin_step(rig *x) {
    forward(x);
    CALL(x->w, fsdp_pre_backward(x->u));
}
static void end_step(rig *x) {
    CALL(x->w, fsdp_post_backward(x->u));
    CALL(x->w, fsdp_finalize_backward(x->m));
}

static int two_replicas = 2;

/* ---- parameters that have a gradient --------------------------------------------------------- */

/* 1 / 2^26 is zero in f16: the gradient exists nevertheless. */
static void large_factor(lab_rank *r) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc p[2] = {fsdp_vec("used", 8), fsdp_vec("unused", 8)};
    rig x;
    p[0].dtype = p[1].dtype = FSDP_F16;
    md.reduce_dtype = FSDP_F32;
    rig_open(&x, r->w, &md, p, 2);
    for (int step = 0; step < 3; step++) {
        double factor = step == 1 ? 67108864.0 : 2;
        CALL(x.w, fsdp_set_gradient_divide_factor(x.m, NULL, factor));
        begin_step(&x);
        float value = step == 1 ? 32768 : 1;
        for (int i = 0; i < 8; i++)
            lab_put(fsdp_grad(x.u, 0), FSDP_F16, i, r->rank ? 0 : (double)value);
        end_step(&x);
        CHECK(lab_view(x.w, x.u, 1).shard_grad == NULL);
        fsdp_param_view v = lab_view(x.w, x.u, 0);
        CHECK(v.shard_grad != NULL);
        for (int64_t k = 0; k < v.numel; k++)
            CHECK(lab_same(lab_get(v.shard_grad, FSDP_F16, k), (double)value / factor));
        CALL(x.w, fsdp_zero_grad(x.m));
    }
}
TEST(edges, index_of_no_view) { CHECK_EQ_INT(fsdp_view_index(NULL, 3), -1); }

TEST(edges, large_divide_factor) { lab_run(2, NULL, large_factor, NULL); }

/* Flags of use are read eight at a time. All ranks use the same parameters, for every set of
   some strides; with reduce_unused each rank uses other parameters, and all have a gradient. */
static void many_parameters(lab_rank *r) {
    enum { MANY = 20 };
    for (int unused = 0; unused < 2; unused++)
        for (int stride = 1; stride < 12; stride++) {
            fsdp_param_desc p[MANY];
            rig x;
            for (int i = 0; i < MANY; i++) p[i] = fsdp_vec(NULL, 2), p[i].frozen = i % 7 == 0;
            rig_open(&x, r->w, NULL, p, MANY);
            CALL(x.w, fsdp_set_reduce_scatter_unused_params(x.m, NULL, unused));
            begin_step(&x);
            for (int i = 0; i < MANY; i++)
                if ((i + unused * r->rank) % stride == 0 && !p[i].frozen)
                    CHECK(fsdp_grad(x.u, i) != NULL);
            end_step(&x);
            for (int i = 0; i < MANY; i++)
                CHECK_MSG((lab_view(x.w, x.u, i).shard_grad != NULL) ==
                              (!p[i].frozen && (unused || i % stride == 0)),
                          "parameter %d, stride %d", i, stride);
            fsdp_model_destroy(x.m);
        }
}
/* Gradients that a reset drops in the middle of a backward are in no later gradient. */
static void reset_in_backward(lab_rank *r) {
    fsdp_param_desc p = fsdp_vec("a", 8);
    rig x;
    rig_open(&x, r->w, NULL, &p, 1);
    for (int step = 0; step < 3; step++) {
        begin_step(&x);
        float *grad = (float *)fsdp_grad(x.u, 0);
        for (int i = 0; i < 8; i++) CHECK(lab_same((double)grad[i], 0));
        for (int i = 0; i < 8; i++) grad[i] += 5;
        CALL(x.w, fsdp_model_reset(x.m));
    }
}
TEST(edges, reset_in_backward) {
    lab_run(1, NULL, reset_in_backward, NULL);
    lab_run(2, NULL, reset_in_backward, NULL);
}

TEST(edges, marks_of_many_parameters) { lab_run(2, NULL, many_parameters, NULL); }

/* A unit's trainable parameters have one stored dtype, at creation and after a thaw. A refused
   call changes nothing: the unit trains on, with a frozen parameter of another dtype. */
static void two_dtypes(lab_rank *r) {
    fsdp_param_desc p[3] = {fsdp_vec("a", 8), fsdp_vec("b", 8), fsdp_vec("c", 8)};
    fsdp_unit_desc d = FSDP_ZERO;
    fsdp_unit *u = NULL;
    rig x;
    p[2].dtype = FSDP_F64;
    d.name = "two", d.params = p, d.num_params = 3;
    fsdp_model *other = lab_model(r->w, NULL);
    REFUSED(r->w, fsdp_fully_shard(other, &d, &u),
            "unit 'two': trainable parameters 'a' and 'c' are stored as f32 and f64");
    CHECK(u == NULL);
    fsdp_model_destroy(other);
    p[2].frozen = 1;
    rig_open(&x, r->w, NULL, p, 3);
    REFUSED(x.w, fsdp_set_requires_grad(x.u, 2, 1), "trainable parameters 'a' and 'c'");
    const void *shard = lab_view(x.w, x.u, 0).shard;
    CALL(x.w, fsdp_pre_forward(x.u));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, x.w, fsdp_set_requires_grad(x.u, 2, 1), "not ended");
    CALL(x.w, fsdp_model_reset(x.m));
    REFUSED(x.w, fsdp_set_requires_grad(x.u, 2, 1), "trainable parameters 'a' and 'c'");
    CHECK(lab_view(x.w, x.u, 0).shard == shard); /* no new layout */
    for (int i = 0; i < 2; i++) CALL(x.w, fsdp_set_requires_grad(x.u, i, 0));
    CALL(x.w, fsdp_set_requires_grad(x.u, 2, 1)); /* the only trainable one */
    REFUSED(x.w, fsdp_set_requires_grad(x.u, 0, 1), "trainable parameters 'c' and 'a'");
    CALL(x.w, fsdp_model_cast(x.m, FSDP_BF16)); /* casts all parameters */
    CALL(x.w, fsdp_set_requires_grad(x.u, 0, 1));
}
TEST(edges, trainables_of_two_dtypes) { lab_run(2, NULL, two_dtypes, NULL); }

/* Upstream's rule: the ranks of all replicas must have used the same parameters. */
static void used_differently(lab_rank *r) {
    const int replicas = *(const int *)r->arg;
    fsdp_param_desc p[2] = {fsdp_vec("a", 8), fsdp_vec("b", 8)};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh *mesh = lab_mesh2(r->w, replicas, r->size / replicas, "a", "b");
    rig x;
    md.mesh = mesh;
    rig_open(&x, r->w, &md, p, 2);
    begin_step(&x);
    CHECK(fsdp_grad(x.u, 0) != NULL);
    if (fsdp_mesh_rank(mesh, 0) == 0) CHECK(fsdp_grad(x.u, 1) != NULL);
    (void)fsdp_post_backward(x.u);
    CHECK_STATUS(fsdp_finalize_backward(x.m), FSDP_ERR_MISMATCH);
    CHECK_STATUS(fsdp_shutdown(r->w), FSDP_ERR_MISMATCH);
    r->w = NULL;
}
TEST(edges, used_sets_of_hsdp) { lab_run(4, NULL, used_differently, &two_replicas); }
TEST(edges, used_sets_of_replicas) { lab_run(2, NULL, used_differently, &two_replicas); }

/* ---- host data during gathers ---------------------------------------------------------------- */

/* A backend that notes two threads in one of its groups. */
typedef struct {
    lab_guard guard; /* first: desc.user */
    fsdp_comm *world;
    int inside, together;
} crowd;
static fsdp_status nothing_before(lab_guard *g, const fsdp_group *group, const fsdp_coll *coll) {
    (void)g, (void)group, (void)coll;
    return FSDP_OK;
}
static fsdp_status crowd_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **out) {
    fsdp_status status = lab_guard_open(boot, caps, out);
    ((crowd *)boot->user)->world = *out;
    return status;
}
static fsdp_status crowd_run(fsdp_comm *comm, const fsdp_coll *coll) {
    crowd *c = (crowd *)(void *)lab_guarded_of(comm)->guard;
    if (comm != c->world) return lab_guard_run(comm, coll);
    if (__atomic_add_fetch(&c->inside, 1, __ATOMIC_SEQ_CST) > 1) c->together = 1;
    if (coll->kind == FSDP_OP_ALL_GATHER) w_sleep_ns(2000000); /* in a worker thread */
    fsdp_status status = lab_guard_run(comm, coll);
    __atomic_sub_fetch(&c->inside, 1, __ATOMIC_SEQ_CST);
    return status;
}

/* Only one thread at a time uses a group: a collective on host data, of any size, waits for the
   gather in a worker thread. */
static void host_data(lab_rank *r) {
    enum { MANY = 20000 };
    crowd c;
    fsdp_comm_ops ops = lab_guard_ops();
    fsdp_threads *threads = (fsdp_threads *)r->arg;
    fsdp_world_desc d = w_desc(r->rank, r->size, threads, "host_data", 2);
    fsdp_param_desc p = fsdp_mat("w", 64, 8);
    double *data = lab_doubles(MANY);
    rig x;
    memset(&c, 0, sizeof c);
    c.guard.before = nothing_before;
    ops.open = crowd_open, ops.run = crowd_run;
    d.comm_ops = &ops;
    d.user = &c;
    CALL(NULL, fsdp_init(&d, &x.w));
    rig_open(&x, x.w, NULL, &p, 1);
    for (int step = 0; step < 5; step++) {
        for (int i = 0; i < MANY; i++) data[i] = i + r->rank;
        CALL(x.w, fsdp_unshard(x.u));
        CALL(x.w, fsdp_all_reduce(x.w, NULL, data, step ? MANY : 1, FSDP_F64, FSDP_SUM));
        for (int i = 0; i < (step ? MANY : 1); i++)
            CHECK_NEAR(data[i], r->size * i + r->size * (r->size - 1) / 2, 0);
        CALL(x.w, fsdp_reshard(x.u));
    }
    CHECK(!c.together);
    CALL(NULL, fsdp_shutdown(x.w));
    free(data);
}
TEST(edges, host_data_during_gathers) {
    static fsdp_threads threads;
    lab_how how = FSDP_ZERO;
    how.bare = how.shared = 1;
    threads.size = 3;
    lab_run(3, &how, host_data, &threads);
}

/* ---- refusals, failures, resets -------------------------------------------------------------- */

static fsdp_status fails(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                         const fsdp_coll *coll) {
    (void)user, (void)ops, (void)comm, (void)coll;
    return FSDP_ERR_CORRUPT;
}

/* The error text names the user's function, also on the rank that only waits. */
static void custom_fails(lab_rank *r) {
    fsdp_param_desc p = fsdp_vec("a", 8);
    rig x;
    rig_open(&x, r->w, NULL, &p, 1);
    h_mark(0);
    h_await_marks(0, r->size); /* all ranks have left fsdp_init */
    if (r->rank == 1) CALL(x.w, fsdp_set_custom_all_gather(x.u, fails, NULL));
    fsdp_status status = fsdp_pre_forward(x.u);
    CHECK(status != FSDP_OK);
    if (r->rank == 1) CHECK_STATUS(status, FSDP_ERR_CORRUPT);
    CHECK_MSG(strstr(fsdp_last_error(x.w), "all_gather (gather) of unit 'unit0'"), "%s",
              fsdp_last_error(x.w));
}
TEST(edges, failed_custom_comm_is_named) { lab_run(2, NULL, custom_fails, NULL); }

/* Freezing drops the layout; a reset before the next commit still resets the units. */
static void reset_without_a_layout(lab_rank *r) {
    fsdp_param_desc p[2] = {fsdp_vec("a", 8), fsdp_vec("b", 8)};
    fsdp_param_view v;
    rig x;
    rig_open(&x, r->w, NULL, p, 2);
    begin_step(&x);
    for (int i = 0; i < 2; i++) ((float *)fsdp_grad(x.u, i))[0] += 1;
    end_step(&x);
    forward(&x); /* its backward never comes */
    CALL(x.w, fsdp_set_requires_grad(x.u, 1, 0));
    CALL(x.w, fsdp_model_reset(x.m));
    CALL(x.w, fsdp_param_view_get(x.u, 0, &v));
    CHECK(v.shard_grad == NULL);
    CHECK_STATUS(fsdp_pre_backward(x.u), FSDP_ERR_INVALID_STATE);
}
TEST(edges, reset_without_a_layout) { lab_run(1, NULL, reset_without_a_layout, NULL); }

/* A frozen parameter loses its gradient at once, with or without a commit in between. */
static void freezing_drops_the_gradient(lab_rank *r) {
    for (int commits = 0; commits < 2; commits++) {
        fsdp_param_desc p = fsdp_vec("a", 8);
        fsdp_param_view v;
        rig x;
        rig_open(&x, r->w, NULL, &p, 1);
        begin_step(&x);
        ((float *)fsdp_grad(x.u, 0))[0] += 1;
        end_step(&x);
        CALL(x.w, fsdp_set_requires_grad(x.u, 0, 0));
        if (commits) CALL(x.w, fsdp_model_commit(x.m));
        CALL(x.w, fsdp_set_requires_grad(x.u, 0, 1));
        CALL(x.w, fsdp_param_view_get(x.u, 0, &v));
        CHECK(v.shard_grad == NULL);
        fsdp_model_destroy(x.m);
    }
}
TEST(edges, freezing_drops_the_gradient) { lab_run(1, NULL, freezing_drops_the_gradient, NULL); }

/* A NaN norm makes gradients NaN, but not padding or parameters without a gradient. */
static void nan_norm(lab_rank *r) {
    fsdp_param_desc p[2] = {fsdp_vec("used", 3), fsdp_vec("unused", 5)};
    fsdp_flat flat;
    fsdp_param_view v;
    double norm;
    uint32_t bits = 0x7FC00000u;
    rig x;
    rig_open(&x, r->w, NULL, p, 2);
    begin_step(&x);
    memcpy(fsdp_grad(x.u, 0), &bits, sizeof bits);
    end_step(&x);
    CALL(x.w, fsdp_clip_grad_norm(x.m, 1, &norm));
    CHECK_EQ_INT(h_non_finite(norm), 2);
    CALL(x.w, fsdp_model_flat(x.m, FSDP_F32, &flat));
    CALL(x.w, fsdp_param_view_get(x.u, 0, &v));
    for (int64_t k = 0; k < flat.numel; k++) {
        const float *g = (const float *)flat.grads + k, *mine = (const float *)v.shard_grad;
        int is_mine = g >= mine && g < mine + v.numel;
        CHECK_EQ_INT(h_non_finite((double)*g), is_mine ? 2 : 0);
    }
}
TEST(edges, nan_norm_keeps_padding) { lab_run(2, NULL, nan_norm, NULL); }

/* A norm that is not finite. With error_if_nonfinite nothing is scaled, and an infinite max_norm only
   measures. Otherwise, as in PyTorch, a NaN spreads, and an infinity makes zeros of the others. */
static void nonfinite_norm(lab_rank *r) {
    enum { NUMEL = 8192 }; /* several blocks of a sum on each rank */
    static const double powers[] = {1, 2, 3, 2.5};
    fsdp_param_desc p = fsdp_vec("a", NUMEL);
    rig x;
    rig_open(&x, r->w, NULL, &p, 1);
    for (int n = 0; n < 10; n++) {
        const int is_nan = n % 2, at = n * 800;
        fsdp_clip_desc d = FSDP_ZERO;
        double norm = 0;
        begin_step(&x);
        float *grad = (float *)fsdp_grad(x.u, 0);
        for (int k = 0; k < NUMEL; k++) grad[k] += 2;
        if (r->rank == 0) grad[at] = (float)(is_nan ? LAB_NAN : LAB_INF);
        end_step(&x);
        d.norm_type = n / 2 == 4 ? LAB_INF : powers[n / 2];
        for (int way = 0; way < 3; way++) { /* refused, measured, scaled */
            d.max_norm = way == 1 ? LAB_INF : 1, d.error_if_nonfinite = way == 0;
            CHECK_STATUS(fsdp_clip_grads(x.m, &d, &norm), way ? FSDP_OK : FSDP_ERR_CORRUPT);
            CHECK_EQ_INT(h_non_finite(norm), is_nan ? 2 : 1);
            lab_settle(x.w, x.m);
            const fsdp_param_view v = lab_view(x.w, x.u, 0);
            for (int64_t k = 0; k < v.numel; k++) {
                const double g = (double)((const float *)v.shard_grad)[k];
                if (fsdp_view_index(&v, k) == at)
                    CHECK_EQ_INT(h_non_finite(g), is_nan || way == 2 ? 2 : 1);
                else if (way < 2) CHECK(lab_same(g, 2));
                else CHECK(is_nan ? h_non_finite(g) == 2 : lab_same(g, 0));
            }
        }
        CALL(x.w, fsdp_zero_grad(x.m));
    }
}
TEST(edges, norms_that_are_not_finite) { lab_run(2, NULL, nonfinite_norm, NULL); }

/* With debug a released slot is filled with NaN: a kept pointer does not find old values. */
static void kept_pointers(lab_rank *r) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc p[3] = {fsdp_mat("a", 64, 4), fsdp_vec("b", 5), fsdp_mat("c", 32, 32)};
    const int64_t numel[3] = {64 * 4, 5, 32 * 32};
    const unsigned char *kept[2][3];
    rig x;
    md.debug = 1;
    rig_open(&x, r->w, &md, p, 3);
    CALL(x.w, fsdp_pre_forward(x.u));
    for (int i = 0; i < 3; i++) kept[0][i] = (const unsigned char *)fsdp_data(x.u, i);
    CALL(x.w, fsdp_post_forward(x.u));
    CALL(x.w, fsdp_pre_backward(x.u));
    for (int i = 0; i < 3; i++) kept[1][i] = (const unsigned char *)fsdp_grad(x.u, i);
    end_step(&x);
    CALL(x.w, fsdp_wait_stream(x.m, -1));
    for (int k = 0; k < (r->size > 1 ? 2 : 1); k++) /* one rank writes its shard gradients */
        for (int i = 0; i < 3; i++)
            for (int64_t n = 0; n < numel[i] * 4; n++)
                CHECK_MSG(kept[k][i][n] == 0xFF, "byte %lld of parameter %d", (long long)n, i);
    CALL(x.w, fsdp_barrier(x.w)); /* no rank frees earlier */
}
TEST(edges, kept_pointers_find_nan) {
    if (W_ASAN) SKIP("AddressSanitizer stops where they are read: test_guard");
    for (int size = 1; size < 3; size++) lab_run(size, NULL, kept_pointers, NULL);
}

/* A unit's memory while it is open: with debug, one rank has a slot, too. */
static void unit_memory(lab_rank *r) {
    fsdp_param_desc p[2] = {fsdp_mat("a", 6, 4), fsdp_vec("b", 5)};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_memory m;
    int64_t sum = 0;
    rig x;
    md.debug = 1;
    rig_open(&x, r->w, &md, p, 2);
    CALL(x.w, fsdp_pre_forward(x.u));
    CALL(x.w, fsdp_unit_memory(x.u, &m));
    for (int pool = 0; pool < FSDP_POOL_COUNT; pool++) {
        sum += m.pool_bytes[pool];
        CHECK_EQ_INT(m.pool_slots[pool], pool == FSDP_POOL_GATHER);
    }
    CHECK_EQ_INT(m.total_bytes, sum);
    CHECK(m.pool_bytes[FSDP_POOL_SHARD] >= (6 * 4 + 5) * 4 / r->size);
    CHECK(m.pool_bytes[FSDP_POOL_SHARD_GRAD] >= (6 * 4 + 5) * 4 / r->size);
    CHECK_EQ_INT(m.unsharded_bytes, 2 * (6 * 4 + 5) * 4); /* and the gradients */
    CALL(x.w, fsdp_post_forward(x.u));
}
TEST(edges, memory_of_a_unit) {
    for (int size = 1; size < 3; size++) lab_run(size, NULL, unit_memory, NULL);
}

/* f16: gradients that wait for their reduction have been divided; a new factor must not divide
   them by another power of two. */
static void factor_in_between(lab_rank *r) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc p = fsdp_vec("a", 8);
    fsdp_param_view v;
    rig x;
    md.reduce_dtype = FSDP_F16;
    rig_open(&x, r->w, &md, &p, 1);
    for (int micro = 0; micro < 2; micro++) {
        CALL(x.w, fsdp_set_requires_gradient_sync(x.m, NULL, micro));
        CALL(x.w, fsdp_set_gradient_divide_factor(x.m, NULL, micro ? 64 : 4));
        begin_step(&x);
        for (int i = 0; i < 8; i++) ((float *)fsdp_grad(x.u, 0))[i] += 32;
        end_step(&x);
    }
    CALL(x.w, fsdp_param_view_get(x.u, 0, &v));
    for (int64_t k = 0; k < v.numel; k++)
        CHECK(((const float *)v.shard_grad)[k] == 2 * 32.0f * (float)r->size / 64);
}
TEST(edges, divide_factor_between_microbatches) { lab_run(2, NULL, factor_in_between, NULL); }

/* Finalize reduces unreduced gradients, though no backward has reached their unit. It notifies
   extensions of no write, as the caller has written nothing since then. */
static void waits_for_finalize(lab_rank *r) {
    fsdp_param_desc p = fsdp_vec("a", 8);
    lab_log log = FSDP_ZERO;
    fsdp_param_view v;
    int markers = 0;
    float full[8];
    rig x;
    rig_open(&x, r->w, NULL, &p, 1);
    lab_watch(&log, x.w, x.m);
    CALL(x.w, fsdp_set_requires_gradient_sync(x.m, NULL, 0));
    begin_step(&x);
    for (int i = 0; i < 8; i++) ((float *)fsdp_grad(x.u, 0))[i] += 3;
    CALL(x.w, fsdp_post_backward(x.u));
    for (int sync = 0; sync < 2; sync++) {
        CALL(x.w, fsdp_set_requires_gradient_sync(x.m, NULL, sync));
        CHECK_STATUS(fsdp_param_full(x.u, 1, full), FSDP_ERR_INVALID_ARG);
        CALL(x.w, fsdp_finalize_backward(x.m)); /* no new failure: the older text stays */
        CHECK(strstr(fsdp_last_error(x.w), "param_full"));
        CHECK_EQ_INT(lab_count_ops(&log, 0, FSDP_OP_GRADS_WRITTEN, -1, x.u), 1);
        CHECK_EQ_INT(lab_count_ops(&log, 0, FSDP_OP_REDUCE_SCATTER, -1, x.u), sync);
    }
    CHECK_EQ_INT(log.ops[lab_next_op(&log, 0, FSDP_OP_GRADS_WRITTEN, -1, x.u)].stream,
                 FSDP_STREAM_COMPUTE);
    for (int n = 0; n < log.num; n++) { /* ops that finalize emits have no training state */
        if (log.ops[n].kind != FSDP_OP_HOOK || log.ops[n].count != FSDP_CALL_FINALIZE) continue;
        CHECK_EQ_INT(log.ops[n].state, FSDP_STATE_IDLE);
        markers++;
    }
    CHECK_EQ_INT(markers, 2);
    CALL(x.w, fsdp_param_view_get(x.u, 0, &v));
    for (int64_t k = 0; k < v.numel; k++) CHECK(((const float *)v.shard_grad)[k] == 3);
    CALL(x.w, fsdp_set_grad_none(x.u, 0));
    CALL(x.w, fsdp_wait_stream(x.m, -1));
    for (int64_t k = 0; k < v.numel; k++) CHECK(((const float *)v.shard_grad)[k] == 0);
    const int num = log.num;
    CALL(x.w, fsdp_set_grad_none(x.u, 0)); /* there is no gradient any more: no op is issued */
    CHECK_EQ_INT(log.num, num);
    fsdp_model_destroy(x.m);
    free(log.ops);
}
TEST(edges, finalize_reduces_what_waits) { lab_run(2, NULL, waits_for_finalize, NULL); }

/* Different factors would make ranks drift apart. */
static void factors_differ(lab_rank *r) {
    fsdp_param_desc p = fsdp_vec("a", 8);
    rig x;
    rig_open(&x, r->w, NULL, &p, 1);
    CALL(x.w, fsdp_set_gradient_divide_factor(x.m, NULL, r->rank ? 3 : 2));
    begin_step(&x);
    CHECK(fsdp_grad(x.u, 0) != NULL);
    (void)fsdp_post_backward(x.u);
    CHECK_STATUS(fsdp_finalize_backward(x.m), FSDP_ERR_MISMATCH);
}
TEST(edges, divide_factors_must_agree) { lab_run(2, NULL, factors_differ, NULL); }

static void keep_forward_inputs(lab_rank *r) {
    for (int keep = 0; keep < 2; keep++) {
        fsdp_model_desc md = FSDP_ZERO;
        fsdp_param_desc p = fsdp_vec("a", 8);
        float src[2] = {1, 2};
        uint16_t dst[2];
        fsdp_dtype dtype = FSDP_F32;
        rig x;
        md.param_dtype = FSDP_BF16;
        md.keep_forward_inputs = keep;
        rig_open(&x, r->w, &md, &p, 1);
        const void *got = fsdp_cast_forward_input(x.u, dst, src, &dtype, 2);
        CHECK(got == (keep ? (const void *)src : (const void *)dst));
        CHECK_EQ_INT(dtype, keep ? FSDP_F32 : FSDP_BF16);
        fsdp_model_destroy(x.m);
    }
}
TEST(edges, keep_forward_inputs) { lab_run(1, NULL, keep_forward_inputs, NULL); }

/* ---- equal results on any number of ranks ---------------------------------------------------- */

/* A view has no gradient before finalize, also on one rank, which could show it. */
static void gradient_of_views(lab_rank *r) {
    fsdp_param_desc p = fsdp_mat("w", 6, 4);
    fsdp_param_view v;
    rig x;
    rig_open(&x, r->w, NULL, &p, 1);
    for (int step = 0; step < 3; step++) { /* step 2 keeps the gradients of step 1 */
        begin_step(&x);
        float *g = (float *)fsdp_grad(x.u, 0);
        CHECK(g != NULL);
        g[0] += 1;
        CALL(x.w, fsdp_param_view_get(x.u, 0, &v));
        CHECK(!v.shard_grad);
        CALL(x.w, fsdp_post_backward(x.u));
        CALL(x.w, fsdp_param_view_get(x.u, 0, &v));
        CHECK(!v.shard_grad);
        CALL(x.w, fsdp_finalize_backward(x.m));
        CALL(x.w, fsdp_param_view_get(x.u, 0, &v));
        CHECK(v.shard_grad && v.grad_dtype == FSDP_F32);
        if (step == 0) CALL(x.w, fsdp_zero_grad(x.m));
        CALL(x.w, fsdp_param_view_get(x.u, 0, &v));
        CHECK(!v.shard_grad == !step);
    }
}
TEST(edges, no_gradient_before_finalize) {
    for (int world = 1; world < 4; world++) lab_run(world, NULL, gradient_of_views, NULL);
}

/* Two backwards of one forward add their gradients; the last one ends the forward. */
static void two_backwards(lab_rank *r) {
    fsdp_param_desc p = fsdp_mat("w", 6, 4);
    fsdp_param_view v;
    rig x;
    rig_open(&x, r->w, NULL, &p, 1);
    for (int step = 0; step < 2; step++) {
        forward(&x);
        for (int n = 1; n <= 3; n++) {
            CALL(x.w, fsdp_set_is_last_backward(x.m, n == 3));
            CALL(x.w, fsdp_pre_backward(x.u));
            float *g = (float *)fsdp_grad(x.u, 0);
            CHECK(g && fsdp_data(x.u, 0));
            for (int i = 0; i < 24; i++) g[i] += (float)n;
            end_step(&x);
            CALL(x.w, fsdp_param_view_get(x.u, 0, &v));
            for (int64_t k = 0; k < v.numel; k++)
                CHECK((double)((const float *)v.shard_grad)[k] == n * (n + 1) / 2.0);
        }
        REFUSED_AS(FSDP_ERR_INVALID_STATE, x.w, fsdp_pre_backward(x.u), "call fsdp_pre_forward");
        CHECK_STATUS(fsdp_finalize_backward(x.m), FSDP_ERR_INVALID_STATE);
        CALL(x.w, fsdp_zero_grad(x.m));
    }
}
TEST(edges, two_backwards_over_one_forward) {
    for (int world = 1; world < 4; world++) lab_run(world, NULL, two_backwards, NULL);
}

/* The memory of failed getters has room for the largest parameter, also after a cast. */
TEST(edges, failed_getters_after_a_cast) {
    fsdp_world_desc d = w_desc(0, 1, NULL, "cast", 0);
    fsdp_param_desc p = fsdp_vec("w", 4096);
    fsdp_world *w;
    rig x;
    CHECK_OK(fsdp_init(&d, &w));
    rig_open(&x, w, NULL, &p, 1);
    for (int wide = 0; wide < 2; wide++) {
        memset(fsdp_data(x.u, 0), 1, 4096 * (wide ? sizeof(double) : sizeof(float)));
        CHECK_STATUS(fsdp_finalize_backward(x.m), FSDP_ERR_INVALID_STATE);
        CHECK_OK(fsdp_model_cast(x.m, FSDP_F64));
    }
    CHECK_OK(fsdp_shutdown(w));
}

/* Views and flats of failed calls are empty: a loop over them does nothing. */
static void empty_views(lab_rank *r) {
    fsdp_param_desc p = fsdp_vec("w", 8);
    fsdp_param_view v;
    fsdp_flat flat;
    rig x;
    rig_open(&x, r->w, NULL, &p, 1);
    memset(&v, 0xFF, sizeof v);
    memset(&flat, 0xFF, sizeof flat);
    REFUSED(x.w, fsdp_param_view_get(x.u, 1, &v), "[E170]");
    CHECK(!v.numel && !v.shard && !v.unit);
    memset(&v, 0xFF, sizeof v);
    REFUSED(x.w, fsdp_param_at(x.m, 1, &v), "[E168]");
    CHECK(!v.numel && !v.shard);
    REFUSED(x.w, fsdp_model_flat(x.m, FSDP_DTYPE_COUNT, &flat), "[E169]");
    CHECK(!flat.numel && !flat.shards);
}
TEST(edges, failed_views_are_empty) { lab_run(1, NULL, empty_views, NULL); }

/* The dtype that a unit computes in, before and after its gather. */
static void dtypes_of_data(lab_rank *r) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc p[3] = {fsdp_vec("w", 8), fsdp_vec("kept", 8), fsdp_vec("ids", 8)};
    const fsdp_dtype want[3] = {FSDP_BF16, FSDP_F32, FSDP_I64};
    rig x;
    md.param_dtype = FSDP_BF16;
    p[1].keep_dtype = 1;
    p[2].dtype = FSDP_I64, p[2].frozen = 1;
    rig_open(&x, r->w, &md, p, 3);
    for (int i = 0; i < 3; i++) CHECK_EQ_INT(fsdp_data_dtype(x.u, i), want[i]);
    CALL(x.w, fsdp_pre_forward(x.u));
    for (int i = 0; i < 3; i++) CHECK(fsdp_data_as(x.u, i, want[i]) == fsdp_data(x.u, i));
    CALL(x.w, fsdp_post_forward(x.u));
    CALL(x.w, fsdp_pre_backward(x.u));
    for (int i = 0; i < 3; i++) CHECK(fsdp_grad_as(x.u, i, want[i]) == fsdp_grad(x.u, i));
    CHECK(!fsdp_grad_as(x.u, 2, FSDP_F32)); /* frozen: no gradient in any dtype */
    CALL(x.w, fsdp_finalize_backward(x.m));
    CHECK_EQ_INT(fsdp_data_dtype(x.u, 3), FSDP_DTYPE_KEEP);
    REFUSED(x.w, fsdp_finalize_backward(x.m), "[E170] data: unit 'unit0' has no parameter 3");
    CHECK_EQ_INT(fsdp_data_dtype(NULL, 0), FSDP_DTYPE_KEEP);
}
TEST(edges, dtype_of_data) { lab_run(2, NULL, dtypes_of_data, NULL); }

/* bf16 parameters through getters of floats: each checked getter names rank, unit, parameter and
   both dtypes, returns memory with room for floats, and makes finalize fail. With the right
   dtype it returns the same pointer as the unchecked getter. */
typedef struct rank_count {
    const char *name;
    int ranks;
} rank_count;
static const rank_count ranks_1_to_3[] = {{"W=1", 1}, {"W=2", 2}, {"W=3", 3}};
enum { CHECKED = 12 * 4 };
static void *getter(rig *x, const fsdp_param_view *v, int which, int f32, fsdp_dtype dtype) {
    switch (2 * which + f32) {
    case 0: return fsdp_data_as(x->u, 0, dtype);
    case 1: return fsdp_data_f32(x->u, 0);
    case 2: return fsdp_grad_as(x->u, 0, dtype);
    case 3: return fsdp_grad_f32(x->u, 0);
    case 4: return fsdp_view_data_as(v, dtype);
    case 5: return fsdp_view_data_f32(v);
    case 6: return fsdp_view_shard_as(v, dtype);
    case 7: return fsdp_view_shard_f32(v);
    case 8: return fsdp_view_grad_as(v, dtype);
    default: return fsdp_view_grad_f32(v);
    }
}
static void checked_getters(lab_rank *r) {
    static const char *const says[] = {"data_as: parameter 'w' of unit 'unit0' is gathered as",
                                       "grad_as: parameter 'w' of unit 'unit0' is gathered as",
                                       "view_data_as: parameter 'w' of unit 'unit0' is stored as",
                                       "view_shard_as: parameter 'w' of unit 'unit0' is stored as",
                                       ("view_grad_as: parameter 'w' of unit 'unit0' has a "
                                        "gradient in")};
    fsdp_param_desc p = fsdp_mat("w", 12, 4);
    fsdp_param_view v;
    rig x;
    p.dtype = FSDP_BF16; /* gathered and reduced in bf16, too */
    rig_open(&x, r->w, NULL, &p, 1);
    begin_step(&x);
    memset(fsdp_grad_as(x.u, 0, FSDP_BF16), 0, CHECKED * 2);
    end_step(&x);
    v = lab_view(x.w, x.u, 0);
    CHECK(v.dtype == FSDP_BF16 && v.grad_dtype == FSDP_BF16 && v.shard_grad);
    for (int which = 0; which < 5; which++)
        for (int f32 = 0; f32 < 2; f32++) {
            const fsdp_dtype asked = f32 ? FSDP_F32 : FSDP_F64;
            char text[256];
            begin_step(&x);
            void *const right[] = {fsdp_data(x.u, 0), fsdp_grad(x.u, 0), v.data, v.shard,
                                   v.shard_grad};
            CHECK(getter(&x, &v, which, 0, FSDP_BF16) == right[which]);
            char *got = (char *)getter(&x, &v, which, f32, asked);
            CHECK(lab_undefined(x.m, got));
            memset(got, 1,
                   CHECKED * fsdp_dtype_size(asked)); /* the parameter's size in the wrong dtype */
            CALL(x.w, fsdp_post_backward(x.u));
            snprintf(text, sizeof text, "rank %d: [E230] %s bf16, but you ask for %s: ask for bf16",
                     r->rank, says[which], f32 ? "f32" : "f64");
            REFUSED(x.w, fsdp_finalize_backward(x.m), text);
            CALL(x.w, fsdp_finalize_backward(x.m)); /* once */
        }
    memset(&v, 0, sizeof v); /* a view of a failed call, and NULL */
    for (int which = 4; which < 10; which += 2) CHECK(!getter(&x, &v, which / 2, 0, FSDP_F32));
    for (int which = 4; which < 10; which += 2) CHECK(!getter(&x, NULL, which / 2, 1, FSDP_F32));
}
TEST_P(edges, checked_getters, ranks_1_to_3) { lab_run(row->ranks, NULL, checked_getters, NULL); }

/* A trainer that takes bf16 for floats: finalize stops it in its first step, each getter logs
   one line, and no parameter has changed. */
static int lines_of_dtypes;
static void count_dtypes(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)rank, (void)user;
    lines_of_dtypes += strstr(text, "[E230]") != NULL;
}
static void fill_wrongly(void *user, const fsdp_param_view *block) {
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        ((double *)fsdp_view_data_as(block, FSDP_F64))[k] = 1;
}
TEST(edges, bf16_taken_for_floats_stops_at_finalize) {
    fsdp_world_desc d = w_desc(0, 1, NULL, "dtypes", 0);
    fsdp_param_desc p = fsdp_mat("w", 64, 3);
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_world *w;
    rig x;
    float before[64 * 3], after[64 * 3];
    d.logger.log = count_dtypes;
    md.param_dtype = FSDP_BF16;
    CHECK_OK(fsdp_init(&d, &w));
    rig_open(&x, w, &md, &p, 1);
    for (int i = 0; i < 64 * 3; i++) before[i] = (float)i / 8;
    CALL(w, fsdp_param_load(x.u, 0, before));
    CALL(w, fsdp_pre_forward(x.u));
    for (int i = 0; i < 64 * 3; i++) fsdp_data_f32(x.u, 0)[i] += 1; /* its fallback memory */
    CALL(w, fsdp_post_forward(x.u));
    CALL(w, fsdp_pre_backward(x.u));
    for (int i = 0; i < 64 * 3; i++) fsdp_grad_f32(x.u, 0)[i] += 1;
    CALL(w, fsdp_post_backward(x.u));
    REFUSED(w, fsdp_finalize_backward(x.m), "[E230]");
    CHECK_EQ_INT(lines_of_dtypes, 2);
    CALL(w, fsdp_param_full(x.u, 0, after));
    CHECK_EQ_MEM(before, after, sizeof before);
    CALL(w, fsdp_init_params(x.m, fill_wrongly, NULL)); /* shards are f32 */
    REFUSED(w, fsdp_finalize_backward(x.m), "view_data_as: parameter 'w' of unit 'unit0'");
    CHECK_EQ_INT(lines_of_dtypes, 3);
    CHECK_OK(fsdp_shutdown(w));
}

/* A custom gather that starts when the test allows it, and reads the shard last. */
typedef struct {
    int goes, done;
} slow_gather;
static fsdp_status gather_slowly(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                                 const fsdp_coll *coll) {
    slow_gather *s = (slow_gather *)user;
    long ns = 0;
    while (!__atomic_load_n(&s->goes, __ATOMIC_SEQ_CST)) h_nap(&ns);
    for (int k = 0; k < 3; k++) h_nap(&ns); /* a rank that does not wait gets here first */
    fsdp_status status = ops->run(comm, coll);
    __atomic_store_n(&s->done, 1, __ATOMIC_SEQ_CST);
    return status;
}

/* Shards are written only after a worker thread and the peers have read them: in a gather by the
   program, in the prefetch of another backward, and in a gather that finalize ends. */
static void waits_for_gathers(lab_rank *r) {
    fsdp_param_desc p = fsdp_vec("w", 64);
    for (int n = 0; n < 3; n++) {
        slow_gather slow = {1, 0};
        rig x;
        rig_open(&x, r->w, NULL, &p, 1);
        fsdp_unit *last = lab_unit(x.w, x.m, NULL, &p, 1);
        CALL(x.w, fsdp_set_custom_all_gather(x.u, gather_slowly, &slow));
        CALL(x.w, fsdp_set_is_last_backward(x.m, n != 1));
        forward(&x);
        lab_forward(x.w, last);
        if (n > 0) slow.goes = slow.done = 0;
        CALL(x.w, fsdp_pre_backward(last)); /* prefetches x.u */
        if (n == 0) { /* its backward uses that; then the program gathers again */
            CALL(x.w, fsdp_pre_backward(x.u));
            CALL(x.w, fsdp_finalize_backward(x.m));
            slow.goes = slow.done = 0;
            CALL(x.w, fsdp_unshard(x.u));
        }
        __atomic_store_n(&slow.goes, 1, __ATOMIC_SEQ_CST);
        if (n > 0) CALL(x.w, fsdp_finalize_backward(x.m));
        if (n < 2) CALL(x.w, fsdp_params_writable(x.m));
        CHECK_MSG(__atomic_load_n(&slow.done, __ATOMIC_SEQ_CST), "case %d: it reads shards", n);
        CALL(x.w, fsdp_params_changed(x.m));
        CALL(x.w, fsdp_model_reset(x.m));
        CALL(x.w, fsdp_barrier(x.w));
    }
}
TEST(edges, params_writable_waits_for_gathers) {
    lab_how how;
    memset(&how, 0, sizeof how);
    if (!lab_divides()) SKIP("a device has streams in place of worker threads");
    how.lanes = 1;
    lab_run(2, &how, waits_for_gathers, NULL);
}

TEST(edges, names_of_parameters_are_unique) {
    fsdp_world_desc d = w_desc(0, 1, NULL, "names", 0);
    fsdp_param_desc p[3] = {fsdp_vec("a", 4), fsdp_vec(NULL, 4), fsdp_vec("a", 4)};
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_unit *u;
    fsdp_world *w;
    CHECK_OK(fsdp_init(&d, &w));
    ud.name = "pair", ud.params = p, ud.num_params = 3;
    REFUSED(w, fsdp_fully_shard(lab_model(w, NULL), &ud, &u),
            "unit 'pair': parameters 0 and 2 are both named 'a'");
    p[2].name = "p1"; /* the default name of the unnamed one */
    REFUSED(w, fsdp_fully_shard(lab_model(w, NULL), &ud, &u), "1 and 2 are both named 'p1'");
    p[2].name = "b";
    CHECK_OK(fsdp_fully_shard(lab_model(w, NULL), &ud, &u));
    CHECK_OK(fsdp_shutdown(w));
}

/* The bytes of all parameters together must fit an offset. */
TEST(edges, units_have_a_largest_size) {
    fsdp_world_desc d = w_desc(0, 1, NULL, "large", 0);
    fsdp_param_desc p[3] = {fsdp_vec("a", 4), fsdp_vec("b", 4), fsdp_vec("c", 4)};
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_unit *u;
    fsdp_world *w;
    CHECK_OK(fsdp_init(&d, &w));
    for (int i = 0; i < 3; i++) p[i].shape[0] = (int64_t)1 << (i ? 55 : 54);
    p[1].frozen = p[2].frozen = 1, p[1].dtype = FSDP_BF16; /* in separate lists */
    ud.name = "large", ud.params = p, ud.num_params = 3;
    REFUSED(w, fsdp_fully_shard(lab_model(w, NULL), &ud, &u), "more than 2^56 elements");
    p[0].shape[0] = p[2].shape[0] = 4;
    CHECK_OK(fsdp_fully_shard(lab_model(w, NULL), &ud, &u));
    CHECK_OK(fsdp_shutdown(w));
}

/* The first failure of a world stays, and only it is logged. */
static void count_aborts(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)rank, (void)text;
    if (code == FSDP_ERR_ABORTED) ++*(int *)user;
}
TEST(edges, the_first_failure_stays) {
    fsdp_world_desc d = w_desc(0, 1, NULL, "first", 0);
    fsdp_world *w;
    int lines = 0;
    d.logger.log = count_aborts, d.logger.user = &lines;
    CHECK_OK(fsdp_init(&d, &w));
    fsdp_abort(w, "out of data");
    fsdp_abort(w, "again");
    CHECK_EQ_INT(lines, 1);
    CHECK_STATUS(fsdp_barrier(w), FSDP_ERR_ABORTED);
    CHECK(strstr(fsdp_last_error(w), "out of data"));
    CHECK_STATUS(fsdp_shutdown(w), FSDP_ERR_ABORTED);
}

/* If a collective call fails on one rank, the other ranks get its status, and do not wait for
   it. */
static void fails_alone(lab_rank *r) {
    fsdp_param_desc p = fsdp_vec("a", 64);
    fsdp_model *m = lab_model(r->w, NULL);
    (void)lab_unit(r->w, m, NULL, &p, 1);
    h_mark(0);
    h_await_marks(0, r->size);            /* no rank is in a call */
    if (r->rank == 1) w_fail(r->heap, 0); /* no host memory for the tables */
    fsdp_status status = fsdp_model_commit(m);
    if (!status) status = fsdp_barrier(r->w); /* the others may be done before it fails */
    CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
    CHECK(strstr(fsdp_last_error(r->w), "rank 1"));
    CHECK_STATUS(fsdp_shutdown(r->w), FSDP_ERR_OUT_OF_MEMORY);
    r->w = NULL;
}
TEST(edges, all_get_the_failure_of_one) { lab_run(3, NULL, fails_alone, NULL); }

/* A failed assertion logs the rank and the place, and ends the world. */
static char asserted[4096];
static void keep_lines(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)rank, (void)user;
    if (code == FSDP_ERR_INTERNAL)
        snprintf(asserted + strlen(asserted), sizeof asserted - strlen(asserted), "%s\n", text);
}
TEST(edges, a_failed_assertion_ends_the_world) {
    fsdp_world_desc d = w_desc(0, 1, NULL, "assert", 0);
    fsdp_world *w;
    int lines = 0;
    d.logger.log = keep_lines;
    CHECK_OK(fsdp_init(&d, &w));
    CHECK_OK(lib_assert(w, 1));
    CHECK_EQ_STR(asserted, "");
    CHECK_STATUS(lib_assert(w, 0), FSDP_ERR_INTERNAL);
    CHECK_MSG(strstr(asserted, "[Rank 0] lib_assert: holds does not hold"), "%s", asserted);
    for (const char *at = asserted; *at; at++) lines += *at == '\n';
    CHECK_MSG(lines > 2, "no backtrace: %s", asserted);
    CHECK_STATUS(fsdp_barrier(w), FSDP_ERR_INTERNAL);
    CHECK_STATUS(fsdp_shutdown(w), FSDP_ERR_INTERNAL);
}
