/* test_fully_shard_init.c - PyTorch's tests of the same names, translated: what a unit manages, how
   parameters are sharded, filled, loaded and saved, meshes, hooks, extensions. Ranks are threads.

   Gradients are integers from a hash, so that everything is exact. Parameters are compared in each
   forward and backward, gradients in each step, and shards after it. There are no losses. Units are
   small matrices and MLPs where PyTorch has a transformer, and a step ends with plain descent where
   PyTorch has Adam, AdamW or none. tests/dtensor/test_fully_shard_dtensor.c has PyTorch's tests of
   these files with tensor parallelism, tests/checkpoint/test_checkpoint_train.c those of state dicts.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | NCCL
#include "harness.h"
#include "lab.h"
#include "sim.h"

/* ---- ranks, meshes --------------------------------------------------------------------------- */

static void on_ranks(int size, void (*body)(fsdp_world *world, const void *arg), const void *arg) {
    lab_on_worlds(size, NULL, body, arg);
}
static void call_body(fsdp_world *world, const void *body) {
    (*(void (*const *)(fsdp_world * world)) body)(world);
}
static void on_worlds(int size, void (*body)(fsdp_world *world)) {
    on_ranks(size, call_body, &body);
}

/* ---- a model whose truth is known ------------------------------------------------------------ */

/* The loss of a rank is linear in the parameters, so that its gradient is a small integer that a
   hash gives, and everything is exact in f32: parameters are compared in every forward and every
   backward, gradients and shards after it. */
enum { MAX_UNITS = 8 };
typedef struct {
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *unit[MAX_UNITS];
    int count, step;
    int ranks, place;   /* over which gradients are averaged, and which of them I am */
    fsdp_dtype compute; /* of gathered parameters; KEEP: as stored */
    int quantised;      /* an extension rounds matrices to bf16 as they are gathered */
} toy;

static int toy_hash(int a, int b, int c, int64_t e) {
    uint64_t state = (uint64_t)a * 1000003 + (uint64_t)b * 10007 + (uint64_t)c * 101 +
                     (uint64_t)e * 31 + 5;
    return (int)(h_rand64(&state) >> 40);
}
static double toy_start(int u, int i, int64_t e) { return toy_hash(u, i, 1, e) % 64 / 4.0 - 8; }
static double toy_slope(int rank, int step, int u, int i, int64_t e) {
    return toy_hash(u + 16 * step, i, 2 + rank, e) % 17 - 8;
}
static double toy_mean(const toy *t, int step, int u, int i, int64_t e) {
    double sum = 0;
    for (int r = 0; r < t->ranks; r++) sum += toy_slope(r, step, u, i, e);
    return sum / t->ranks;
}
static double toy_truth(const toy *t, int u, int i, int64_t e) {
    double value = toy_start(u, i, e);
    for (int s = 0; s < t->step; s++) value -= toy_mean(t, s, u, i, e) / 2;
    return value;
}

static int unit_of(const fsdp_param_view *v) { return (int)(intptr_t)v->unit_user; }
/* Bytes (of integer parameters, which are frozen) hold the low ones of four times the value. */
static double as_stored(const fsdp_param_view *v, double value) {
    if (!fsdp_dtype_is_float(v->dtype)) return (double)(uint8_t)(int)(value * 4);
    return lab_round(v->dtype, value);
}

static void toy_fill(void *user, const fsdp_param_view *block) {
    (void)user;
    for (int64_t k = 0; k < block->numel; k++) {
        const double value = toy_start(unit_of(block), block->index, fsdp_view_index(block, k));
        lab_put(block->data, block->dtype, k, as_stored(block, value));
    }
}

static void toy_begin(toy *t, fsdp_world *world, const fsdp_model_desc *md, int ranks, int place) {
    memset(t, 0, sizeof *t);
    t->world = world;
    t->ranks = ranks;
    t->place = place;
    t->compute = md ? md->param_dtype : FSDP_DTYPE_KEEP;
    CALL(world, fsdp_model_create(world, md, &t->model));
}

static void toy_unit(toy *t, const fsdp_unit_desc *desc, const fsdp_param_desc *params, int count) {
    fsdp_unit_desc ud = FSDP_ZERO;
    CHECK(t->count < MAX_UNITS);
    if (desc) ud = *desc;
    ud.params = params;
    ud.num_params = count;
    ud.user = (void *)(intptr_t)t->count;
    CALL(t->world, fsdp_fully_shard(t->model, &ud, &t->unit[t->count]));
    t->count++;
}

static int params_of(const toy *t, int u) {
    fsdp_param_view v = FSDP_ZERO;
    int count = 0;
    while (fsdp_next_param(t->model, &v)) count += unit_of(&v) == u;
    return count;
}

/* The gathered parameters are the true ones, to the bit. */
static void toy_look(const toy *t, int u) {
    for (int i = 0, count = params_of(t, u); i < count; i++) {
        fsdp_param_view v = lab_view(t->world, t->unit[u], i);
        fsdp_dtype dtype = t->compute && fsdp_dtype_is_float(v.dtype) ? t->compute : v.dtype;
        const void *data = fsdp_data(t->unit[u], i);
        W_CHECK(data, "%s has no data: %s", v.name, fsdp_last_error(t->world));
        for (int64_t e = 0; e < lab_full_numel(&v); e++) {
            double truth = as_stored(&v,
                                     v.requires_grad ? toy_truth(t, u, i, e) : toy_start(u, i, e));
            if (t->quantised && v.ndim == 2) truth = lab_round(FSDP_BF16, truth);
            if (fsdp_dtype_is_float(dtype)) truth = lab_round(dtype, truth);
            W_CHECK(lab_get(data, dtype, e) == truth, "step %d: %s.%s element %lld is %g, not %g",
                    t->step, v.unit_name, v.name, (long long)e, lab_get(data, dtype, e), truth);
        }
    }
}

static void toy_slopes(const toy *t, int u) {
    for (int i = 0, count = params_of(t, u); i < count; i++) {
        fsdp_param_view v = lab_view(t->world, t->unit[u], i);
        if (!v.requires_grad) continue;
        fsdp_dtype dtype = t->compute ? t->compute : v.dtype;
        void *grad = fsdp_grad(t->unit[u], i);
        W_CHECK(grad, "%s has no gradient: %s", v.name, fsdp_last_error(t->world));
        for (int64_t e = 0; e < lab_full_numel(&v); e++)
            lab_put(grad, dtype, e,
                    lab_get(grad, dtype, e) + toy_slope(t->place, t->step, u, i, e));
    }
}

static void toy_forward(const toy *t) {
    for (int u = 0; u < t->count; u++) {
        CALL(t->world, fsdp_pre_forward(t->unit[u]));
        toy_look(t, u);
        CALL(t->world, fsdp_post_forward(t->unit[u]));
    }
}

/* My shards are my rows of the true parameters. */
static void toy_shards(const toy *t) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(t->model, &v))
        for (int64_t k = 0; k < v.numel; k++) {
            int64_t e = fsdp_view_index(&v, k);
            double truth = as_stored(&v, v.requires_grad ? toy_truth(t, unit_of(&v), v.index, e)
                                                         : toy_start(unit_of(&v), v.index, e));
            W_CHECK(lab_get(v.shard, v.dtype, k) == truth, "step %d: shard of %s.%s: %g, not %g",
                    t->step, v.unit_name, v.name, lab_get(v.shard, v.dtype, k), truth);
        }
}

/* Forward, backward, gradients compared with the mean of all ranks, one step of descent. */
static void toy_step(toy *t) {
    fsdp_param_view v = FSDP_ZERO;
    toy_forward(t);
    for (int u = t->count - 1; u >= 0; u--) {
        CALL(t->world, fsdp_pre_backward(t->unit[u]));
        toy_look(t, u);
        toy_slopes(t, u);
        CALL(t->world, fsdp_post_backward(t->unit[u]));
    }
    CALL(t->world, fsdp_finalize_backward(t->model));
    while (fsdp_next_param(t->model, &v)) {
        W_CHECK((v.shard_grad != NULL) == v.requires_grad, "%s: gradient", v.name);
        for (int64_t k = 0; v.shard_grad && k < v.numel; k++) {
            double mean = toy_mean(t, t->step, unit_of(&v), v.index, fsdp_view_index(&v, k));
            double grad = lab_get(v.shard_grad, v.grad_dtype, k);
            W_CHECK(grad == mean, "step %d: gradient of %s.%s is %g, not %g", t->step, v.unit_name,
                    v.name, grad, mean);
            lab_put(v.shard, v.dtype, k, lab_get(v.shard, v.dtype, k) - grad / 2);
        }
    }
    CALL(t->world, fsdp_params_changed(t->model));
    CALL(t->world, fsdp_zero_grad(t->model));
    t->step++;
    toy_shards(t);
}

/* A model of one unit, filled. */
static void toy_fill_unit(toy *t, const fsdp_param_desc *params, int count) {
    toy_unit(t, NULL, params, count);
    CALL(t->world, fsdp_init_params(t->model, toy_fill, NULL));
}
static void toy_make(toy *t, fsdp_world *world, int ranks, const fsdp_param_desc *params,
                     int count) {
    toy_begin(t, world, NULL, ranks, fsdp_rank(world));
    toy_fill_unit(t, params, count);
}

/* in_proj (mult*dim, dim), out_proj (dim, mult*dim), each with a bias. */
static int mlp(fsdp_param_desc *p, int dim, int mult) {
    p[0] = fsdp_mat("in_proj.weight", mult * dim, dim);
    p[1] = fsdp_vec("in_proj.bias", mult * dim);
    p[2] = fsdp_mat("out_proj.weight", dim, mult * dim);
    p[3] = fsdp_vec("out_proj.bias", dim);
    return 4;
}

/* A model of MLPs, filled. */
static void toy_mlps(toy *t, fsdp_world *world, const fsdp_model_desc *md, int ranks, int place,
                     int count, int dim) {
    fsdp_param_desc p[4];
    toy_begin(t, world, md, ranks, place);
    for (int i = 0; i < count; i++) toy_unit(t, NULL, p, mlp(p, dim, 4));
    CALL(world, fsdp_init_params(t->model, toy_fill, NULL));
}

/* ---- where parameters are -------------------------------------------------------------------- */

static int on_the_device(sim *s, const void *ptr) {
    const sim_block *b = sim_find(s, ptr);
    return b && b->kind != FSDP_MEMORY_PINNED; /* the comm's memory is the device's, too */
}

/* Shards, gradients and slots lie in the device's memory. */
/* PyTorch: none. Own: shards, gradients and slots lie in device memory. */
TEST(fully_shard_init, device_arg) {
    sim s;
    toy t;
    sim_init(&s, 4, 1);
    CHECK(sim_open(&s));
    toy_mlps(&t, s.world, NULL, 4, 1, 2, 8);
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(t.model, &v)) CHECK(on_the_device(&s, v.shard));
    CHECK_OK(fsdp_pre_forward(t.unit[1]));
    for (int i = 0; i < 4; i++) CHECK(on_the_device(&s, fsdp_data(t.unit[1], i)));
    CHECK_OK(fsdp_post_forward(t.unit[1]));
    CHECK_OK(fsdp_pre_backward(t.unit[1]));
    for (int i = 0; i < 4; i++) CHECK(on_the_device(&s, fsdp_grad(t.unit[1], i)));
    CHECK_OK(fsdp_post_backward(t.unit[1]));
    CHECK_OK(fsdp_finalize_backward(t.model));
    CHECK_OK(fsdp_param_view_get(t.unit[1], 2, &v));
    CHECK(on_the_device(&s, v.shard_grad));
    CHECK_EQ_INT(sim_close(&s), 0);
}

/* A full tensor in host memory goes to the device's; the tensor itself stays the user's. */
/* PyTorch: test_fully_shard_init.py test_move_states_to_device_tensor. Partly: fsdp_param_load
   copies a full tensor to the device. No buffers of a module: you keep them. */
TEST(fully_shard_init, move_states_tensor) {
    sim s;
    float full[8 * 4];
    fsdp_param_desc p[1] = {fsdp_mat("w", 8, 4)};
    toy t;
    sim_init(&s, 4, 1);
    CHECK(sim_open(&s));
    toy_begin(&t, s.world, NULL, 4, 1);
    toy_unit(&t, NULL, p, 1);
    for (int e = 0; e < 32; e++) full[e] = (float)e;
    CHECK_OK(fsdp_param_load(t.unit[0], 0, full));
    fsdp_param_view v;
    CHECK_OK(fsdp_param_view_get(t.unit[0], 0, &v));
    CHECK(sim_find(&s, v.shard));
    CHECK(!sim_find(&s, full));
    CHECK_EQ_INT(v.numel, 8);
    for (int k = 0; k < 8; k++) CHECK_NEAR(((const float *)v.shard)[k], 8 + k, 0);
    for (int e = 0; e < 32; e++) CHECK_NEAR(full[e], e, 0);
    CHECK_EQ_INT(sim_close(&s), 0);
}

/* A parameter that no unit manages is nowhere in the model. */
/* PyTorch: test_fully_shard_init.py test_move_states_to_device_ignored_param_device. Differs: there
   is no list of ignored parameters. A parameter that no unit lists stays where it is; PyTorch then
   moves it with the model, and no call here does. */
TEST(fully_shard_init, move_states_ignored) {
    sim s;
    float ignored[16], before[16];
    fsdp_param_desc p[4];
    toy t;
    for (int e = 0; e < 16; e++) ignored[e] = before[e] = (float)e / 4;
    sim_init(&s, 1, 0);
    CHECK(sim_open(&s));
    toy_make(&t, s.world, 1, p, mlp(p, 4, 4));
    toy_step(&t);
    CHECK_EQ_INT(fsdp_num_params(t.model), 4);
    CHECK(!sim_find(&s, ignored));
    CHECK_EQ_MEM(ignored, before, sizeof ignored);
    CHECK_EQ_INT(sim_close(&s), 0);
}

/* ---- meshes that are refused ----------------------------------------------------------------- */

static void invalid_mesh(fsdp_world *world, const void *arg) {
    int three = arg != NULL, size = fsdp_world_size(world);
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_model *model;
    static const char *const names[] = {"a", "b", "c"};
    const int32_t cube[3] = {size, 1, 1}, square[2] = {2, size / 2};
    md.mesh = three ? lab_mesh(world, 3, cube, names, NULL)
                    : lab_mesh(world, 2, square, NULL, NULL);
    REFUSED_AS(FSDP_ERR_INVALID_ARG, world, fsdp_model_create(world, &md, &model),
               three ? "mesh_info" : "name");
    CHECK(!model);
    toy t;
    fsdp_param_desc p[1] = {fsdp_vec("b", 3)};
    fsdp_unit_desc ud = FSDP_ZERO;
    toy_begin(&t, world, NULL, size, fsdp_rank(world));
    ud.mesh = md.mesh; /* of a unit too */
    ud.params = p;
    ud.num_params = 1;
    REFUSED_AS(FSDP_ERR_INVALID_ARG, world, fsdp_fully_shard(t.model, &ud, &t.unit[0]),
               three ? "mesh_info" : "name");
    toy_fill_unit(&t, p, 1);
    toy_step(&t);
}
/* PyTorch: test_fully_shard_init.py test_invalid_mesh_ndim. Done: a mesh (4, 1, 1) without a mesh
   info is refused, for a model and for a unit. */
TEST(fully_shard_init, invalid_mesh_ndim) { on_ranks(4, invalid_mesh, "3-D"); }
/* PyTorch: test_fully_shard_init.py test_2d_mesh_without_mesh_dim_names. Done: refused for a model
   and for a unit. */
TEST(fully_shard_init, 2d_mesh_without_mesh_dim_names) { on_ranks(4, invalid_mesh, NULL); }

/* ---- what a unit manages --------------------------------------------------------------------- */

/* Units as text, "name: parameter parameter | ...": what each gathers is the sum of its own. */
typedef struct {
    const char *units, *expected;
    int replicated; /* this unit is replicated, not sharded: DDP; -1: none */
    int twice;      /* this one is opened twice; -1: none */
} managed;

static void managed_build(toy *t, const managed *m, fsdp_world *world) {
    char text[256], *rest = text, *one;
    fsdp_mesh_info ddp;
    fsdp_mesh *mesh;
    snprintf(text, sizeof text, "%s", m->units);
    CALL(world, fsdp_mesh_1d(world, "ranks", &mesh));
    CALL(world, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &ddp));
    toy_begin(t, world, NULL, fsdp_world_size(world), fsdp_rank(world));
    while ((one = strtok_r(rest, "|", &rest))) {
        char *word, *words = one;
        fsdp_param_desc p[8];
        fsdp_unit_desc ud = FSDP_ZERO;
        int n = 0;
        ud.name = strtok_r(words, ": ", &words);
        for (; (word = strtok_r(words, " ", &words)) && n < 8; n++) p[n] = fsdp_mat(word, 4, 2 + n);
        ud.mesh_info = t->count == m->replicated ? &ddp : NULL;
        toy_unit(t, &ud, p, n);
    }
    CALL(world, fsdp_init_params(t->model, toy_fill, NULL));
}

typedef struct {
    const toy *toy;
    int64_t gathered[MAX_UNITS];
} managed_count;

static int managed_op(void *user, fsdp_model *model, fsdp_op *op) {
    managed_count *c = (managed_count *)user;
    (void)model;
    for (int u = 0; op->kind == FSDP_OP_ALL_GATHER && u < c->toy->count; u++)
        if (op->unit == c->toy->unit[u]) c->gathered[u] += (int64_t)op->count;
    return 0;
}

static void manages(fsdp_world *world, const void *arg) {
    const managed *m = (const managed *)arg;
    char text[512] = "";
    toy t;
    managed_count c = {&t, {0}};
    int64_t own[MAX_UNITS] = {0};
    int unit = -1;
    managed_build(&t, m, world);
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(t.model, &v)) {
        size_t used = strlen(text);
        CHECK(v.unit == t.unit[unit_of(&v)]);
        CHECK_EQ_STR(v.unit_name, fsdp_unit_name(v.unit));
        snprintf(text + used, sizeof text - used, "%s%s.%s", used ? " " : "", v.unit_name, v.name);
        CHECK(unit_of(&v) == unit ? v.index > 0 : v.index == 0);
        unit = unit_of(&v);
        if (unit != m->replicated) own[unit] += lab_full_numel(&v) / t.ranks;
    }
    CHECK_EQ_STR(text, m->expected);
    fsdp_extension watcher = FSDP_ZERO;
    watcher.op = managed_op;
    watcher.user = &c;
    CALL(world, fsdp_attach(t.model, &watcher));
    for (int u = 0; u < t.count; u++)
        for (int k = 0; k <= (u == m->twice); k++) {
            CALL(world, fsdp_pre_forward(t.unit[u]));
            toy_look(&t, u);
            CALL(world, fsdp_post_forward(t.unit[u]));
        }
    for (int u = 0; u < t.count; u++)
        W_CHECK(c.gathered[u] == own[u] * (u == m->twice ? 2 : 1), "unit %d gathers %lld, not %lld",
                u, (long long)c.gathered[u], (long long)own[u]);
    CALL(world, fsdp_detach(t.model, &watcher));
    CALL(world, fsdp_model_reset(t.model));
    toy_step(&t);
}

/* PyTorch: test_fully_shard_init.py test_managed_modules_single, test_managed_modules_nested,
   test_managed_modules_nested_fully_shard_and_replicate, test_managed_modules_duplicate,
   test_managed_modules_list_of_mlps, test_managed_states_shared_params_and_buffers,
   test_managed_states_nested_fully_shard, test_managed_states_list_of_mlps,
   test_get_param_module_infos_shared_params, test_get_param_module_infos_duplicates,
   test_get_param_module_infos_list_of_mlps. Not applicable: the library walks no modules, and a
   parameter belongs to one unit. The test shows that a unit gathers the listed parameters, in that
   order, and that units share nothing. */
TEST(fully_shard_init, managed_parameters) {
    static const managed rows[] = {
        {"a: w b v", "a.w a.b a.v", -1, -1},
        {"b: w b | a: v c", "b.w b.b a.v a.c", -1, -1}, /* b inside a: made first, as in PyTorch */
        {"b: w b | c: r | a: v c", "b.w b.b c.r a.v a.c", 1, -1},
        {"a: w b | b: v", "a.w a.b b.v", -1, 0}, /* a layer in two places: one unit, used twice */
        {"a: l0.w l0.b l1.w l1.b", "a.l0.w a.l0.b a.l1.w a.l1.b", -1, -1},
        {"c: w | b: v | a: s", "c.w b.v a.s", -1, -1},
        {"b: l0.w l1.w | a: s", "b.l0.w b.l1.w a.s", -1, -1}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) on_ranks(2, manages, &rows[i]);
}

/* ---- how parameters are sharded -------------------------------------------------------------- */

/* Global shape, placement and contents of every shard: chunk `place` of torch.chunk. */
static void check_chunks(const toy *t) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(t->model, &v)) {
        const int64_t columns = v.ndim == 2 ? v.shape[1] : 1;
        fsdp_range range;
        CHECK_EQ_INT(v.shard_dim, 0);
        CHECK_OK(fsdp_shard_range(v.shape[0], t->ranks, t->place, &range));
        CHECK_EQ_INT(v.local_shape[0], range.count);
        if (v.ndim == 2) CHECK_EQ_INT(v.local_shape[1], columns);
        CHECK_EQ_INT(v.numel, range.count * columns);
        if (v.numel) CHECK_EQ_INT(fsdp_view_index(&v, 0), range.start * columns);
    }
    toy_shards(t);
}

/* Three MLPs of 3 and 9 in one unit; then two of them share their first linear. */
static void shard_tensor(fsdp_world *world) {
    const int rank = fsdp_rank(world);
    for (int shared = 0; shared < 2; shared++) {
        fsdp_param_desc p[12];
        int count = 0;
        toy t;
        for (int m = 0; m < 3; m++) {
            count += mlp(p + count, 3, 3); /* (9, 3), 9, (3, 9), 3 */
            if (!shared || m != 1) continue;
            count -= 2; /* its in_proj is that of the first */
            memmove(p + count - 2, p + count, 2 * sizeof *p);
        }
        for (int i = 0; i < count; i++) p[i].name = NULL;
        toy_make(&t, world, 2, p, count);
        CHECK_EQ_INT(params_of(&t, 0), shared ? 10 : 12);
        for (int step = 0; step < 2; step++) {
            for (int i = 0; i < count; i++) {
                fsdp_param_view v = lab_view(world, t.unit[0], i);
                int64_t rows = p[i].shape[0], first = (rows + 1) / 2;
                CHECK_EQ_MEM(v.shape, p[i].shape, sizeof *v.shape * (size_t)v.ndim); /* global */
                CHECK_EQ_INT(v.local_shape[0], rank ? rows - first : first);
                for (int64_t k = 0; k < v.numel; k++) {
                    int64_t e = k + (rank ? first * (v.ndim == 2 ? v.shape[1] : 1) : 0);
                    CHECK_NEAR(lab_get(v.shard, FSDP_F32, k), toy_truth(&t, 0, i, e), 0);
                }
            }
            check_chunks(&t);
            for (int k = 0; k <= shared; k++) { /* in two places */
                CALL(world, fsdp_pre_forward(t.unit[0]));
                toy_look(&t, 0);
                CALL(world, fsdp_post_forward(t.unit[0]));
            }
            CALL(world, fsdp_model_reset(t.model));
            toy_step(&t);
        }
        check_chunks(&t);
        fsdp_model_destroy(t.model);
    }
}
/* PyTorch: test_fully_shard_init.py test_shard_tensor_parameters. Done: shapes and contents are
   those of PyTorch's chunk, also with a shared linear, before and after two steps. A parameter has no
   strides, and no mesh of its own. */
TEST(fully_shard_init, shard_tensor_parameters) { on_worlds(2, shard_tensor); }

static void raise_scalar(fsdp_world *world) {
    fsdp_param_desc p[2] = {fsdp_vec("weight", 4), FSDP_ZERO};
    fsdp_unit_desc ud = FSDP_ZERO;
    toy t;
    p[1].name = "temperature";
    p[1].shape[0] = 3; /* ndim has been forgotten */
    ud.params = p;
    ud.num_params = 2;
    toy_begin(&t, world, NULL, 2, fsdp_rank(world));
    fsdp_status got = fsdp_fully_shard(t.model, &ud, &t.unit[0]);
    REFUSED_AS(FSDP_ERR_INVALID_ARG, world, got, "temperature");
    REFUSED_AS(FSDP_ERR_INVALID_ARG, world, got, "ndim is 0 and shape[0] is 3: set ndim");
    CHECK_EQ_INT(fsdp_num_units(t.model), 0);
    p[1].shape[0] = 0;
    toy_fill_unit(&t, p, 2);
    toy_step(&t);
}
/* PyTorch: test_fully_shard_init.py test_raise_scalar_parameter. Differs: a scalar is
   taken as a vector of one element. A shape without ndim is refused. */
TEST(fully_shard_init, raise_scalar_parameter) { on_worlds(2, raise_scalar); }

static void invalid_dim(fsdp_world *world) {
    fsdp_param_desc p[2] = {fsdp_mat("weight", 16, 16), fsdp_vec("bias", 16)};
    fsdp_unit_desc ud = FSDP_ZERO;
    toy t;
    p[0].shard_dim = p[1].shard_dim = 1;
    ud.params = p;
    ud.num_params = 2;
    toy_begin(&t, world, NULL, 8, fsdp_rank(world));
    REFUSED_AS(FSDP_ERR_INVALID_ARG, world, fsdp_fully_shard(t.model, &ud, &t.unit[0]), "bias");
    REFUSED_AS(FSDP_ERR_INVALID_ARG, world, fsdp_fully_shard(t.model, &ud, &t.unit[0]),
               "shard_dim is 1");
    p[1].shard_dim = 0;
    toy_fill_unit(&t, p, 2);
    toy_step(&t);
}
/* PyTorch: test_fully_shard_init.py test_invalid_shard_dim. Done: shard_dim 1 of a vector is
   refused by name. */
TEST(fully_shard_init, invalid_shard_dim) { on_worlds(8, invalid_dim); }

/* PyTorch's transformer of width 16 with 4 heads, vocabulary 8, sequences of 16; the output is tied
   to the embedding, so it is no parameter of its own. layer -1: what is in no layer. */
static int transformer(fsdp_param_desc *p, int layer) {
    static const char *const square[] = {"wq", "wk", "wv", "wo"};
    static const char *const norms[] = {"attention_norm.weight", "attention_norm.bias",
                                        "ffn_norm.weight", "ffn_norm.bias"};
    if (layer < 0) {
        p[0] = fsdp_mat("tok_embeddings", 8, 16);
        p[1] = fsdp_mat("pos_embeddings", 16, 16);
        p[2] = fsdp_vec("norm.weight", 16);
        p[3] = fsdp_vec("norm.bias", 16);
        return 4;
    }
    for (int i = 0; i < 4; i++) p[i] = fsdp_mat(square[i], 16, 16);
    p[4] = fsdp_mat("w1.weight", 64, 16);
    p[5] = fsdp_vec("w1.bias", 64);
    p[6] = fsdp_mat("w2.weight", 16, 64);
    p[7] = fsdp_vec("w2.bias", 16);
    for (int i = 0; i < 4; i++) p[8 + i] = fsdp_vec(norms[i], 16);
    return 12;
}

enum { LARGEST = 1, LAST };

static void shard_dims(fsdp_world *world, const void *arg) {
    int rule = *(const int *)arg, beside = 0;
    fsdp_param_desc p[12];
    toy t;
    float full[64 * 16];
    toy_begin(&t, world, NULL, fsdp_world_size(world), fsdp_rank(world));
    for (int layer = -1; layer < 3; layer++) {
        int n = transformer(p, layer);
        for (int i = 0; i < n; i++) /* of equal dims the first one */
            p[i].shard_dim = rule == LAST ? -1 : p[i].shape[1] > p[i].shape[0];
        toy_unit(&t, NULL, p, n);
    }
    CALL(world, fsdp_init_params(t.model, toy_fill, NULL));
    for (int round = 0; round < 2; round++) {
        fsdp_param_view v = FSDP_ZERO;
        while (fsdp_next_param(t.model, &v)) {
            int dim = rule == LAST ? v.ndim - 1 : v.ndim == 2 && v.shape[1] > v.shape[0];
            CHECK_EQ_INT(v.shard_dim, dim);
            CHECK_EQ_INT(v.local_shape[dim] * t.ranks, v.shape[dim]);
            beside += dim == 1;
            CALL(world, fsdp_param_full(v.unit, v.index, full));
            for (int64_t e = 0; e < lab_full_numel(&v); e++)
                CHECK_NEAR(full[e], toy_truth(&t, unit_of(&v), v.index, e), 0);
        }
        toy_step(&t);
    }
    CHECK(beside > 0);
}
/* PyTorch: test_fully_shard_init.py test_init_1d_transformer_shard_largest_dim,
   test_init_1d_transformer_shard_dim_neg1. Done: each parameter gathers to its original, and after
   a step to the exact new one. */
TEST(fully_shard_init, init_1d_transformer_shard_largest_dim) {
    int rule = LARGEST;
    on_ranks(8, shard_dims, &rule);
}
TEST(fully_shard_init, init_1d_transformer_shard_dim_neg1) {
    int rule = LAST;
    on_ranks(8, shard_dims, &rule);
}

/* Upstream refuses; here every dim may be uneven. */
static void uneven_largest(fsdp_world *world) {
    fsdp_param_desc p[3] = {fsdp_mat("wide", 4, 17), fsdp_mat("tall", 17, 4), fsdp_vec("b", 17)};
    float full[17 * 4];
    fsdp_param_view v = FSDP_ZERO;
    toy t;
    p[0].shard_dim = 1;
    toy_make(&t, world, 8, p, 3);
    for (int i = 0; i < 2; i++) toy_step(&t);
    while (fsdp_next_param(t.model, &v)) {
        fsdp_range range;
        CHECK_OK(fsdp_shard_range(17, 8, t.place, &range));
        CHECK_EQ_INT(v.local_shape[v.shard_dim], range.count); /* 3 3 3 3 3 2 0 0 */
        CALL(world, fsdp_param_full(v.unit, v.index, full));
        for (int64_t e = 0; e < lab_full_numel(&v); e++)
            CHECK_NEAR(full[e], toy_truth(&t, 0, v.index, e), 0);
    }
}
/* PyTorch: test_fully_shard_init.py test_init_1d_uneven_shard_largest_dim. Differs: a dim 1 of 17
   over 8 ranks is cut into 3, 3, 3, 3, 3, 2, 0 and 0. PyTorch refuses it. */
TEST(fully_shard_init, init_1d_uneven_shard_largest_dim) { on_worlds(8, uneven_largest); }

/* A frozen parameter of bytes (upstream: fp8) and a trainable one of f32 in one gather. */
static int bytes_op(void *user, fsdp_model *model, fsdp_op *op) {
    (void)model;
    if (op->kind == FSDP_OP_ALL_GATHER) {
        CHECK_EQ_INT(op->dtype, FSDP_U8);
        CHECK_EQ_INT(op->count, 128 * 256 * (1 + 4)); /* rows of one rank, in bytes */
        *(int *)user += 1;
    }
    return 0;
}
static void mixed_dtypes(fsdp_world *world) {
    fsdp_param_desc p[2] = {fsdp_mat("w_fp8", 256, 256), fsdp_mat("w_fp32", 256, 256)};
    fsdp_extension watcher = FSDP_ZERO;
    watcher.op = bytes_op;
    int gathers = 0;
    toy t;
    p[0].dtype = FSDP_U8;
    p[0].frozen = 1;
    toy_make(&t, world, 2, p, 2);
    watcher.user = &gathers;
    CALL(world, fsdp_attach(t.model, &watcher));
    toy_step(&t);
    CHECK_EQ_INT(gathers, 2);
}
/* PyTorch: test_fully_shard_init.py test_mixed_dtypes_no_grad_param. Done: bytes in place of fp8;
   one step (PyTorch: a forward that uses no parameter). */
TEST(fully_shard_init, mixed_dtypes_no_grad_param) { on_worlds(2, mixed_dtypes); }

/* ---- the root, names, the first step --------------------------------------------------------- */

/* PyTorch's model: a root that holds the second of two MLPs, units of both linears of the first. */
static void lazy_model(toy *t, fsdp_world *world) {
    static const char *const names[] = {"0.in_proj", "0.out_proj", "root"};
    fsdp_param_desc p[4] = {fsdp_mat("weight", 32, 8), fsdp_vec("bias", 32)};
    fsdp_unit_desc ud = FSDP_ZERO;
    toy_begin(t, world, NULL, 2, fsdp_rank(world));
    ud.name = names[0];
    toy_unit(t, &ud, p, 2);
    p[0] = fsdp_mat("weight", 8, 32), p[1] = fsdp_vec("bias", 8);
    ud.name = names[1];
    toy_unit(t, &ud, p, 2);
    mlp(p, 8, 4);
    p[0].name = "1.in_proj.weight", p[1].name = "1.in_proj.bias";
    p[2].name = "1.out_proj.weight", p[3].name = "1.out_proj.bias";
    ud.name = names[2], ud.reshard_after_forward = FSDP_RESHARD_NEVER;
    toy_unit(t, &ud, p, 4);
    CALL(world, fsdp_init_params(t->model, toy_fill, NULL));
}

/* No unit is found to be the root: all are of one model, in the order in which they were made, and
   each may be the first that is used. */
static void no_root(fsdp_world *world) {
    for (int first = 0; first < 3; first++) {
        toy t;
        lazy_model(&t, world);
        CALL(world, fsdp_model_commit(t.model));
        CHECK_EQ_INT(fsdp_num_units(t.model), 3);
        lab_forward(world, t.unit[first]);
        for (int u = 0; u < 3; u++) {
            fsdp_param_view v = lab_view(world, t.unit[u], 0);
            CHECK_EQ_INT(v.ordinal, 2 * u);
            CHECK_EQ_INT(fsdp_unit_storage(t.unit[u]),
                         u == first && u == 2 ? FSDP_STORAGE_UNSHARDED : FSDP_STORAGE_SHARDED);
        }
        CALL(world, fsdp_model_reset(t.model));
        toy_step(&t);
        fsdp_model_destroy(t.model);
    }
}
/* PyTorch: test_fully_shard_init.py test_fully_shard_is_root. Differs: no unit is the root. Units
   keep the order in which you made them, and any unit may be used first. */
TEST(fully_shard_init, is_root) { on_worlds(2, no_root); }

static void names_of(fsdp_world *world) {
    static const char *const expected[] = {"0.in_proj.weight",       "0.in_proj.bias",
                                           "0.out_proj.weight",      "0.out_proj.bias",
                                           "root.1.in_proj.weight",  "root.1.in_proj.bias",
                                           "root.1.out_proj.weight", "root.1.out_proj.bias"};
    fsdp_param_view v = FSDP_ZERO;
    toy t;
    lazy_model(&t, world);
    CHECK_EQ_INT(fsdp_num_params(t.model), 8);
    for (int k = 0; k < 8; k++) {
        char text[64];
        CALL(world, fsdp_param_at(t.model, k, &v));
        CHECK_EQ_STR(v.unit_name, fsdp_unit_name(v.unit));
        snprintf(text, sizeof text, "%s.%s", v.unit_name, v.name);
        CHECK_EQ_STR(text, expected[k]);
        CHECK(v.unit == t.unit[k < 4 ? k / 2 : 2]);
    }
    CHECK(fsdp_param_at(t.model, 8, &v) == FSDP_ERR_INVALID_ARG);
    toy_step(&t);
}
/* PyTorch: test_fully_shard_init.py test_fully_shard_module_and_param_fqns. Differs: units and
   parameters have the names that you gave. */
TEST(fully_shard_init, module_and_param_fqns) { on_worlds(2, names_of); }

/* Upstream fails where a child ran before the root. Here a unit may be used alone and first, the
   model is laid out once, and units that come too late are refused. */
static void lazy_init(fsdp_world *world) {
    fsdp_param_desc p[4];
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_param_view a, b;
    fsdp_unit *late;
    toy t;
    toy_mlps(&t, world, NULL, 2, fsdp_rank(world), 2, 3);
    ud.params = p;
    ud.num_params = mlp(p, 3, 4);
    REFUSED_AS(FSDP_ERR_INVALID_STATE, world, fsdp_fully_shard(t.model, &ud, &late),
               "before the first"); /* no forward yet, but laid out */
    CALL(world, fsdp_param_view_get(t.unit[1], 0, &a));
    CALL(world, fsdp_pre_forward(t.unit[1]));
    toy_look(&t, 1);
    CALL(world, fsdp_post_forward(t.unit[1]));
    CALL(world, fsdp_model_commit(t.model));
    CALL(world, fsdp_model_commit(t.model));
    CALL(world, fsdp_param_view_get(t.unit[1], 0, &b));
    CHECK(a.shard == b.shard);
    REFUSED_AS(FSDP_ERR_INVALID_STATE, world, fsdp_fully_shard(t.model, &ud, &late),
               "before the first");
    CHECK_EQ_INT(fsdp_num_units(t.model), 2);
    CALL(world, fsdp_model_reset(t.model));
    toy_step(&t);
}
/* PyTorch: test_fully_shard_init.py test_fully_shard_double_lazy_init. Differs: a unit may run
   before the others, as there is no root. The first call that needs the layout computes it; then a
   new unit is refused. */
TEST(fully_shard_init, double_lazy_init) { on_worlds(2, lazy_init); }

/* A group of several layers that is used first is no error: it is a unit like others. */
static void several_first(fsdp_world *world) {
    fsdp_param_desc p[8];
    toy t;
    toy_begin(&t, world, NULL, 2, fsdp_rank(world));
    int n = mlp(p, 3, 2), both = n + mlp(p + n, 5, 2);
    for (int i = n; i < both; i++) p[i].name = NULL;
    toy_unit(&t, NULL, p, both);
    toy_fill_unit(&t, p, n);
    for (int i = 0; i < 2; i++) toy_step(&t);
}
/* PyTorch: test_fully_shard_init.py test_fully_shard_multi_module_root. Differs: a unit of several
   layers may be used first. */
TEST(fully_shard_init, multi_module_root) { on_worlds(2, several_first); }

/* A parameter that is replaced between sharding and the first forward is the one that trains. */
static void replaced(fsdp_world *world) {
    float full[6 * 3];
    fsdp_param_desc p[1] = {fsdp_mat("w", 6, 3)};
    toy t;
    toy_begin(&t, world, NULL, 2, fsdp_rank(world));
    toy_unit(&t, NULL, p, 1);
    for (int e = 0; e < 18; e++) full[e] = 99;
    CALL(world, fsdp_param_load(t.unit[0], 0, full));
    for (int e = 0; e < 18; e++) full[e] = (float)toy_start(0, 0, e);
    CALL(world, fsdp_param_load(t.unit[0], 0, full));
    toy_step(&t);
}
/* PyTorch: test_fully_shard_init.py test_reset_sharded_param_in_lazy_init. Differs: you cannot
   replace a parameter. If it is loaded again before the first forward, the second contents are
   trained. */
TEST(fully_shard_init, reset_sharded_param_in_lazy_init) { on_worlds(2, replaced); }

/* ---- initialisation without the whole model anywhere ----------------------------------------- */

static void fill_const(void *user, const fsdp_param_view *block) {
    for (int64_t k = 0; k < block->numel; k++)
        lab_put(block->data, block->dtype, k, *(const double *)user);
}

static void shards_are(const toy *t, double expected) {
    fsdp_param_view v = FSDP_ZERO;
    int64_t seen = 0;
    for (; fsdp_next_param(t->model, &v); seen++)
        for (int64_t k = 0; k < v.numel; k++) CHECK_NEAR(lab_get(v.shard, v.dtype, k), expected, 0);
    CHECK_EQ_INT(seen, fsdp_num_params(t->model));
}

/* Zero-filled, filled with a constant, then anew: every value of a shard that has any changes; one
   step runs. dims: even, uneven, with empty shards; the last time over the default mesh. */
static void meta_device(fsdp_world *world) {
    static const int dims[] = {8, 3, 1, 8};
    fsdp_mesh *mesh;
    CALL(world, fsdp_mesh_1d(world, "ranks", &mesh));
    for (int n = 0; n < 7; n++) {
        fsdp_model_desc md = FSDP_ZERO;
        fsdp_param_view v = FSDP_ZERO;
        double constant = 1337;
        fsdp_param_desc p[4];
        toy t;
        md.mesh = n < 6 ? mesh : NULL;
        md.param_dtype = n % 2 ? FSDP_BF16 : FSDP_DTYPE_KEEP;
        md.reduce_dtype = n % 2 ? FSDP_F32 : FSDP_DTYPE_KEEP;
        toy_begin(&t, world, &md, 4, fsdp_rank(world));
        for (int l = 0; l < 2; l++) toy_unit(&t, NULL, p, mlp(p, dims[n / 2], n < 6 ? 1 : 4));
        shards_are(&t, 0);
        CALL(world, fsdp_init_params(t.model, fill_const, &constant));
        shards_are(&t, constant);
        CALL(world, fsdp_init_params(t.model, toy_fill, NULL));
        while (fsdp_next_param(t.model, &v))
            for (int64_t k = 0; k < v.numel; k++) CHECK(lab_get(v.shard, v.dtype, k) != constant);
        toy_step(&t);
        fsdp_model_destroy(t.model);
    }
}
/* PyTorch: test_fully_shard_init.py test_meta_device_1d_init. Partly: shards are zero, then filled
   twice; one step. No buffers, and no parameters without data. */
TEST(fully_shard_init, meta_device_1d_init) { on_worlds(4, meta_device); }

/* Upstream names the parameters that were left without data. Here there are none: a parameter that
   nobody filled is zero, on every rank, padding included. */
static void never_filled(fsdp_world *world) {
    fsdp_param_desc p[4];
    toy t;
    toy_begin(&t, world, NULL, 4, fsdp_rank(world));
    toy_unit(&t, NULL, p, mlp(p, 3, 4));
    CALL(world, fsdp_pre_forward(t.unit[0]));
    for (int i = 0; i < 4; i++) {
        fsdp_param_view v = lab_view(world, t.unit[0], i);
        const float *data = (const float *)fsdp_data(t.unit[0], i);
        for (int64_t e = 0; e < lab_full_numel(&v); e++) CHECK_NEAR(data[e], 0, 0);
    }
    CALL(world, fsdp_post_forward(t.unit[0]));
}
/* PyTorch: test_fully_shard_init.py test_invalid_meta_device_init. Differs: no parameter is without
   data: one that you never filled is zero. */
TEST(fully_shard_init, invalid_meta_device_init) { on_worlds(4, never_filled); }

/* Rank 0 has the parameters, the others get them, and each keeps its rows. */
static void rank0_broadcast(fsdp_world *world) {
    float full[64 * 16];
    fsdp_param_desc p[12];
    fsdp_param_view v = FSDP_ZERO;
    toy t;
    toy_begin(&t, world, NULL, 4, fsdp_rank(world));
    for (int layer = -1; layer < 2; layer++) toy_unit(&t, NULL, p, transformer(p, layer));
    while (fsdp_next_param(t.model, &v)) {
        int64_t numel = lab_full_numel(&v);
        for (int64_t e = 0; e < numel; e++)
            full[e] = fsdp_rank(world) ? -1 : (float)toy_start(unit_of(&v), v.index, e);
        CALL(world, fsdp_broadcast(world, NULL, full, numel * 4, 0));
        CALL(world, fsdp_param_load(v.unit, v.index, full));
    }
    toy_shards(&t);
    toy_step(&t);
}
/* PyTorch: test_fully_shard_init.py test_rank0_broadcast_meta_device_init. Done: rank 0 broadcasts
   full parameters, each rank keeps its rows. Compared with the numbers themselves (PyTorch: with a
   second sharded model). */
TEST(fully_shard_init, rank0_broadcast_meta_device_init) { on_worlds(4, rank0_broadcast); }

/* ---- meshes from lists of ranks -------------------------------------------------------------- */

static void same_mesh(const fsdp_mesh *a, const fsdp_mesh *b) {
    CHECK_EQ_INT(fsdp_mesh_ndim(a), fsdp_mesh_ndim(b));
    for (int d = -1; d < fsdp_mesh_ndim(a); d++) {
        int32_t x[16], y[16];
        CHECK_EQ_INT(fsdp_mesh_size(a, d), fsdp_mesh_size(b, d));
        if (d >= 0) CHECK_EQ_INT(fsdp_mesh_rank(a, d), fsdp_mesh_rank(b, d));
        CHECK_EQ_INT(fsdp_mesh_ranks(a, d, x), fsdp_mesh_size(a, d));
        CHECK_EQ_INT(fsdp_mesh_ranks(b, d, y), fsdp_mesh_size(a, d));
        CHECK_EQ_MEM(x, y, sizeof *x * (size_t)fsdp_mesh_size(a, d));
    }
}

/* The same training over both. */
static void trains_over(fsdp_world *world, fsdp_mesh *mesh, int ranks, int place) {
    fsdp_model_desc md = FSDP_ZERO;
    toy t;
    md.mesh = mesh;
    toy_mlps(&t, world, &md, ranks, place, 2, 8);
    for (int k = 0; k < 2; k++) toy_step(&t);
}
/* A mesh from the ranks of a group is the dp slice of a (dp, tp) mesh: two of four ranks, and the
   other two have another one. */
static void groups_1d(fsdp_world *world) {
    static const char *const dp_name[] = {"dp"};
    static const int32_t shape[1] = {2}, groups[2][2] = {{0, 2}, {1, 3}};
    fsdp_mesh *both = lab_mesh2(world, 2, 2, "dp", "tp"), *dp = lab_slice(world, both, 0);
    const int mine = fsdp_mesh_rank(both, 1);
    for (int g = 0; g < 2; g++) {
        fsdp_mesh *mesh = lab_mesh(world, 1, shape, dp_name, groups[g]);
        if (g != mine) CHECK_EQ_INT(fsdp_mesh_rank(mesh, 0), -1);
        if (g != mine) continue;
        CHECK_EQ_INT(fsdp_mesh_rank(mesh, 0), fsdp_rank(world) / 2);
        same_mesh(dp, mesh);
        trains_over(world, mesh, 2, fsdp_mesh_rank(mesh, 0));
    }
    trains_over(world, dp, 2, fsdp_mesh_rank(dp, 0));
}
/* The same coordinates and groups, of the slices too. */
static void groups_2d(fsdp_world *world) {
    static const int32_t shape[2] = {2, 2}, ranks[4] = {0, 1, 2, 3};
    static const char *const hsdp_names[] = {"replicate", "shard"};
    fsdp_mesh *mesh[2] = {lab_hsdp(world, 2, 2), lab_mesh(world, 2, shape, hsdp_names, ranks)};
    same_mesh(mesh[0], mesh[1]);
    for (int d = 0; d < 2; d++) {
        fsdp_mesh *slice[2] = {lab_slice(world, mesh[0], d), lab_slice(world, mesh[1], d)};
        same_mesh(slice[0], slice[1]);
    }
    for (int i = 0; i < 2; i++) trains_over(world, mesh[i], 4, fsdp_rank(world));
}
/* PyTorch: test_fully_shard_init.py test_1d_process_group_init, test_2d_process_group_init. Done: a
   mesh from a list of ranks (PyTorch: from process groups) has the coordinates and groups of an
   ordinary mesh, and trains with equal results. */
TEST(fully_shard_init, 1d_process_group_init) { on_worlds(4, groups_1d); }
TEST(fully_shard_init, 2d_process_group_init) { on_worlds(4, groups_2d); }

/* ---- replicas -------------------------------------------------------------------------------- */

/* Are shards, element by element, the same on all replicas? Or do all of them differ? */
static void compare_replicas(const toy *t, const fsdp_mesh *replicas, int same) {
    fsdp_param_view v = FSDP_ZERO;
    float least[20 * 5], most[20 * 5];
    while (fsdp_next_param(t->model, &v)) {
        CHECK(v.numel > 0 && v.numel <= 20 * 5);
        memcpy(least, v.shard, (size_t)v.numel * sizeof *least);
        memcpy(most, v.shard, (size_t)v.numel * sizeof *most);
        CALL(t->world, fsdp_all_reduce(t->world, replicas, least, v.numel, FSDP_F32, FSDP_MIN));
        CALL(t->world, fsdp_all_reduce(t->world, replicas, most, v.numel, FSDP_F32, FSDP_MAX));
        for (int64_t k = 0; k < v.numel; k++)
            CHECK_EQ_INT(lab_bits32(least[k]) == lab_bits32(most[k]), same);
    }
}
static void across_replicas(fsdp_world *world) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_view v = FSDP_ZERO, w = FSDP_ZERO;
    toy t;
    fsdp_mesh *mesh = lab_hsdp(world, 2, 2), *replicas = lab_slice(world, mesh, 0);
    float buffer[5]; /* of the model, and the caller's */
    for (int e = 0; e < 5; e++) buffer[e] = (float)(fsdp_mesh_rank(mesh, 0) ? 1337 : e);
    md.mesh = mesh;
    toy_mlps(&t, world, &md, 4, fsdp_rank(world), 2, 5);
    while (fsdp_next_param(t.model, &v))
        for (int64_t k = 0; fsdp_mesh_rank(mesh, 0) > 0 && k < v.numel; k++)
            lab_put(v.shard, v.dtype, k, 1337);
    compare_replicas(&t, replicas, 0);
    while (fsdp_next_param(t.model, &w)) /* from the first replica */
        CALL(world, fsdp_broadcast(world, replicas, w.shard,
                                   w.numel * (int64_t)fsdp_dtype_size(w.dtype), 0));
    CALL(world, fsdp_broadcast(world, replicas, buffer, sizeof buffer, 0));
    CALL(world, fsdp_params_changed(t.model));
    for (int e = 0; e < 5; e++) CHECK_NEAR(buffer[e], e, 0);
    compare_replicas(&t, replicas, 1);
    toy_shards(&t);
    toy_step(&t);
}
/* PyTorch: test_fully_shard_init.py test_hsdp_broadcast_across_replicas. Done: the buffer is the
   caller's. */
TEST(fully_shard_init, hsdp_broadcast_across_replicas) { on_worlds(4, across_replicas); }

/* ---- hooks on the reduced gradients ---------------------------------------------------------- */

typedef struct {
    sim *s;
    void *stream;
    int calls, seen[3]; /* ops before the hook: reduce_scatter, all_reduce, red_out */
} watched_hook;

static fsdp_status note_stream(void *user, fsdp_unit *unit, void *data, int64_t numel,
                               fsdp_dtype dtype, void *stream) {
    watched_hook *h = (watched_hook *)user;
    CHECK(unit && data && numel > 0 && dtype == FSDP_F32);
    h->stream = stream;
    h->calls++;
    for (int i = 0; i < h->s->num_ops; i++) {
        h->seen[0] += h->s->ops[i].kind == FSDP_OP_REDUCE_SCATTER;
        h->seen[1] += h->s->ops[i].label == FSDP_LABEL_REPLICAS;
        h->seen[2] += h->s->ops[i].label == FSDP_LABEL_RED_OUT;
    }
    return FSDP_OK;
}

/* It runs on the stream of the reduction, after it (HSDP: after the all-reduce, on that stream) and
   before the division. */
/* PyTorch: test_fully_shard_init.py test_custom_hook_custom_stream. Differs: the hook gets the
   stream of the reduction, with HSDP that of the all-reduce. You cannot pass a stream, so that none
   is refused with HSDP. */
TEST(fully_shard_init, custom_hook_custom_stream) {
    for (int hsdp = 0; hsdp < 2; hsdp++) {
        sim s;
        toy t;
        watched_hook h;
        fsdp_model_desc md = FSDP_ZERO;
        memset(&h, 0, sizeof h);
        sim_init(&s, 4, 1);
        CHECK(sim_open(&s));
        h.s = &s;
        md.mesh = hsdp ? lab_hsdp(s.world, 2, 2) : NULL;
        toy_mlps(&t, s.world, &md, 4, 1, 1, 5);
        CHECK_OK(fsdp_set_all_reduce_hook(t.unit[0], note_stream, &h));
        CHECK_OK(sim_watch(&s, t.model));
        CHECK_OK(fsdp_pre_forward(t.unit[0]));
        CHECK_OK(fsdp_post_forward(t.unit[0]));
        CHECK_OK(fsdp_pre_backward(t.unit[0]));
        for (int i = 0; i < 4; i++) CHECK(fsdp_grad(t.unit[0], i));
        CHECK_OK(fsdp_post_backward(t.unit[0]));
        CHECK_OK(fsdp_finalize_backward(t.model));
        CHECK_EQ_INT(h.calls, 1);
        CHECK(h.stream == &s.streams[hsdp ? FSDP_STREAM_ALLREDUCE : FSDP_STREAM_REDUCE]);
        CHECK_EQ_INT(h.seen[0], 1);
        CHECK_EQ_INT(h.seen[1], hsdp);
        CHECK_EQ_INT(h.seen[2], 0);
        CHECK_EQ_INT(sim_close(&s), 0);
    }
}

typedef struct {
    fsdp_world *world;
    const fsdp_mesh *replicas;
    int calls;
} replica_hook;

static fsdp_status mean_over_replicas(void *user, fsdp_unit *unit, void *data, int64_t numel,
                                      fsdp_dtype dtype, void *stream) {
    lib_wait(stream);
    replica_hook *h = (replica_hook *)user;
    (void)unit, (void)stream;
    CHECK_EQ_INT(numel, 20 * 10 + 5 * 40);
    CHECK_EQ_INT(dtype, FSDP_F32);
    h->calls++;
    fsdp_status status = fsdp_all_reduce(h->world, h->replicas, data, numel, dtype, FSDP_SUM);
    for (int64_t k = 0; k < numel; k++) ((float *)data)[k] /= 2;
    return status;
}

/* Sharded over 2 of 4 ranks, averaged over the other dim by the hook: the mean of all ranks. */
static void hsdp_hook(fsdp_world *world) {
    fsdp_mesh *mesh = lab_hsdp(world, 2, 2);
    replica_hook h = {NULL, NULL, 0};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc p[2] = {fsdp_mat("in", 40, 10), fsdp_mat("out", 10, 40)};
    toy t;
    h.world = world;
    h.replicas = lab_slice(world, mesh, 0);
    md.mesh = lab_slice(world, mesh, 1);
    toy_begin(&t, world, &md, 4, fsdp_rank(world));
    toy_fill_unit(&t, p, 2);
    CALL(world, fsdp_set_all_reduce_hook(t.unit[0], mean_over_replicas, &h));
    toy_step(&t);
    CHECK_EQ_INT(h.calls, 1);
}
/* PyTorch: test_fully_shard_init.py test_custom_hsdp_all_reduce_hook. Done: gradients differ per
   rank (PyTorch: weights per replica); the hook sums and halves (PyTorch: AVG). */
TEST(fully_shard_init, custom_hsdp_all_reduce_hook) { on_worlds(4, hsdp_hook); }

/* ---- state ----------------------------------------------------------------------------------- */

/* Each call of fully_shard has a state of its own. */
static void states(fsdp_world *world) {
    toy t;
    toy_mlps(&t, world, NULL, 2, fsdp_rank(world), 3, 3);
    for (int u = 0; u < 3; u++) {
        for (int k = 0; k < u; k++) CHECK(t.unit[u] != t.unit[k]);
        CALL(world, fsdp_pre_forward(t.unit[u]));
        for (int k = 0; k < 3; k++) {
            CHECK_EQ_INT(fsdp_unit_state(t.unit[k]), k == u ? FSDP_STATE_FORWARD : FSDP_STATE_IDLE);
            CHECK_EQ_INT(fsdp_unit_storage(t.unit[k]),
                         k == u ? FSDP_STORAGE_UNSHARDED : FSDP_STORAGE_SHARDED);
        }
        CALL(world, fsdp_post_forward(t.unit[u]));
    }
    CALL(world, fsdp_model_reset(t.model));
    CALL(world, fsdp_set_reshard_after_forward(t.model, t.unit[1], FSDP_RESHARD_NEVER));
    toy_forward(&t); /* the setter of one is not that of another */
    CHECK_EQ_INT(fsdp_unit_storage(t.unit[0]), FSDP_STORAGE_SHARDED);
    CHECK_EQ_INT(fsdp_unit_storage(t.unit[1]), FSDP_STORAGE_UNSHARDED);
    CALL(world, fsdp_model_reset(t.model));
    toy_step(&t);
}
/* PyTorch: test_fully_shard_state.py test_fully_shard_state. Done: each unit has its own state. */
TEST(fully_shard_state, state) { on_worlds(2, states); }

/* ---- what a checkpoint reads and writes ------------------------------------------------------ */

/* All views of a model are its state dict: names, and shards that alias the parameters. */
enum { MAX_KEYS = 16 };
typedef struct {
    fsdp_param_view at[MAX_KEYS];
    int count;
} dict;

static void dict_of(const toy *t, dict *d) {
    fsdp_param_view v = FSDP_ZERO;
    memset(d, 0, sizeof *d);
    while (fsdp_next_param(t->model, &v)) d->at[d->count++] = v;
    CHECK_EQ_INT(d->count, fsdp_num_params(t->model));
}

static void same_dict(const dict *a, const dict *b) {
    CHECK_EQ_INT(a->count, b->count);
    for (int k = 0; k < a->count; k++) {
        CHECK_EQ_STR(a->at[k].unit_name, b->at[k].unit_name);
        CHECK_EQ_STR(a->at[k].name, b->at[k].name);
        CHECK(a->at[k].shard == b->at[k].shard && a->at[k].shard);
        CHECK_EQ_INT(a->at[k].numel, b->at[k].numel);
        CHECK_EQ_MEM(a->at[k].local_shape, b->at[k].local_shape, sizeof a->at[k].local_shape);
    }
}

/* Views that are kept show the parameters as they are after later steps. */
static void cached_dict(fsdp_world *world) {
    for (int dim = 2; dim <= 5; dim++) {
        toy t;
        dict d, now;
        toy_mlps(&t, world, NULL, 8, fsdp_rank(world), 2, dim);
        dict_of(&t, &d);
        for (int step = 0; step < 5; step++) {
            toy_step(&t);
            dict_of(&t, &now);
            same_dict(&d, &now);
            for (int k = 0; k < d.count; k++)
                for (int64_t i = 0; i < d.at[k].numel; i++) {
                    int64_t e = fsdp_view_index(&d.at[k], i);
                    double truth = toy_truth(&t, unit_of(&d.at[k]), d.at[k].index, e);
                    CHECK_NEAR(lab_get(d.at[k].shard, FSDP_F32, i), truth, 0);
                }
        }
        fsdp_model_destroy(t.model);
    }
}
/* PyTorch: test_fully_shard_state_dict.py test_cached_state_dict. Partly: views that you keep show
   the parameters after later steps. PyTorch then moves the model to the host and back: no call here
   moves shards. */
TEST(fully_shard_state_dict, cached) { on_worlds(8, cached_dict); }

/* With cpu_offload shards and gradients are host memory; a part of the model may be loaded, the
   rest stays. Upstream refuses to load shards from another device than the CPU: here values are
   copied into the shards, which cannot be replaced. */
static void offloaded_dict(fsdp_world *world) {
    float full[20 * 5];
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_view v = FSDP_ZERO;
    toy t;
    dict before, after;
    md.cpu_offload = 1;
    toy_mlps(&t, world, &md, 4, fsdp_rank(world), 2, 5);
    dict_of(&t, &before);
    for (int i = 0; i < 2; i++) { /* of unit 1 a part, with other values and back */
        CALL(world, fsdp_param_view_get(t.unit[1], i, &v));
        for (int round = 0; round < 2; round++) {
            for (int64_t e = 0; e < lab_full_numel(&v); e++)
                full[e] = round ? (float)toy_start(1, i, e) : 55;
            CALL(world, fsdp_param_load(t.unit[1], i, full));
            if (!round && v.numel) CHECK_NEAR(lab_get(v.shard, v.dtype, 0), 55, 0);
        }
    }
    dict_of(&t, &after);
    same_dict(&before, &after);
    for (int step = 0; step < 3; step++) toy_step(&t);
    dict_of(&t, &after);
    same_dict(&before, &after);
}
/* PyTorch: test_fully_shard_state_dict.py test_dp_state_dict_cpu_offload. Partly: a part of the
   model is loaded, the rest stays. The test does not look where shards lie:
   fully_shard_memory.training_memory counts pinned bytes. You cannot load from another device,
   which PyTorch refuses; no parameter is without data. */
TEST(fully_shard_state_dict, cpu_offload) { on_worlds(4, offloaded_dict); }

/* ---- extensions of the all-gather ------------------------------------------------------------ */

enum { HALVES, BFLOAT }; /* two strings of the high and the low bits; one of bf16 */

typedef struct {
    int kind, sized, pres, posts, tag, delays;
    int tags;           /* how many are kept in seen */
    int64_t stored;     /* elements of a stored shard */
    int64_t rows, cols; /* of the whole parameter; 0: not compared */
    int seen[8];        /* tags of the ranks that were gathered */
    uint64_t seed;
} ext;

static int ext_sizes(void *user, int64_t shard_numel, int64_t nbytes[FSDP_GATHER_TENSORS]) {
    ext *x = (ext *)user;
    x->sized++;
    x->stored = shard_numel;
    nbytes[0] = shard_numel * 2;
    nbytes[1] = shard_numel * 2;
    nbytes[2] = 4; /* a tag of the rank */
    if (x->kind == BFLOAT) nbytes[1] = 4;
    return x->kind == HALVES ? 3 : 2;
}

static void ext_delay(ext *x) {
    if (x->delays && h_rand64(&x->seed) % 4 == 0) usleep((unsigned)(h_rand64(&x->seed) % 3000));
}

static fsdp_status ext_pre(void *user, const fsdp_param_view *view, void *const *strings,
                           void *stream) {
    lib_wait(stream);
    ext *x = (ext *)user;
    const float *shard = (const float *)view->shard;
    (void)stream;
    if (x->rows) CHECK(view->shape[0] == x->rows && view->shape[1] == x->cols);
    CHECK(view->numel <= x->stored); /* a short shard is padded with zeros, for every hook alike */
    for (int64_t k = 0; k < x->stored; k++) {
        uint32_t bits;
        memcpy(&bits, &shard[k], 4);
        if (k >= view->numel) CHECK(bits == 0);
        if (x->kind == HALVES) {
            ((uint16_t *)strings[0])[k] = (uint16_t)(bits >> 16);
            ((uint16_t *)strings[1])[k] = (uint16_t)bits;
        } else {
            CHECK_OK(fsdp_convert((uint16_t *)strings[0] + k, FSDP_BF16, &shard[k], FSDP_F32, 1));
        }
    }
    memcpy(strings[x->kind == HALVES ? 2 : 1], &x->tag, 4);
    x->pres++;
    ext_delay(x);
    return FSDP_OK;
}

/* Shards along dim 0: the padded strings one after another begin with the whole parameter. */
static fsdp_status ext_post(void *user, const fsdp_param_view *view, const void *const *gathered,
                            void *full, fsdp_dtype dtype, void *stream) {
    lib_wait(stream);
    ext *x = (ext *)user;
    const uint16_t *high = (const uint16_t *)gathered[0], *low = (const uint16_t *)gathered[1];
    (void)stream;
    if (x->rows) CHECK(view->shape[0] == x->rows && view->shape[1] == x->cols);
    for (int64_t e = 0; e < lab_full_numel(view); e++) {
        float value;
        uint32_t bits = (uint32_t)high[e] << 16 | (x->kind == HALVES ? low[e] : 0u);
        memcpy(&value, &bits, 4);
        CHECK_OK(fsdp_convert((char *)full + (size_t)e * fsdp_dtype_size(dtype), dtype, &value,
                              FSDP_F32, 1));
    }
    memcpy(x->seen, gathered[x->kind == HALVES ? 2 : 1], (size_t)x->tags * sizeof *x->seen);
    x->posts++;
    ext_delay(x);
    return FSDP_OK;
}

/* One MLP per unit; its matrices have extensions. x: [2 * count] */
static void ext_build(toy *t, fsdp_world *world, const fsdp_model_desc *md, int ranks, int place,
                      ext *x, int kind, int count, int dim) {
    toy_begin(t, world, md, ranks, place);
    memset(x, 0, sizeof *x * (size_t)(2 * count));
    for (int u = 0; u < count; u++) {
        fsdp_param_desc p[4];
        fsdp_gather_extension e[2];
        mlp(p, dim, 4);
        for (int i = 0; i < 2; i++) {
            ext *at = &x[2 * u + i];
            at->kind = kind;
            at->tag = 100 + fsdp_rank(world);
            at->seed = (uint64_t)fsdp_rank(world) + 7;
            e[i].sizes = ext_sizes;
            e[i].pre_all_gather = ext_pre;
            e[i].post_all_gather = ext_post;
            e[i].user = at;
            p[2 * i].extension = &e[i];
        }
        toy_unit(t, NULL, p, 4);
    }
    CALL(world, fsdp_init_params(t->model, toy_fill, NULL));
}

/* Two strings per parameter; the parameters are those of a model without extensions. */
static void ext_parity(fsdp_world *world, const void *arg) {
    const int never = arg != NULL;
    ext x[6];
    fsdp_model_desc md = FSDP_ZERO;
    toy t;
    md.reshard_after_forward = never ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
    lab_log log = FSDP_ZERO;
    ext_build(&t, world, &md, 2, fsdp_rank(world), x, HALVES, 3, 8);
    lab_watch(&log, world, t.model);
    for (int step = 0; step < 10; step++) toy_step(&t);
    for (int label = FSDP_LABEL_PRE_GATHER; label <= FSDP_LABEL_POST_GATHER; label++)
        CHECK_EQ_INT(lab_count_ops(&log, 0, FSDP_OP_CALL, label, NULL), never ? 60 : 120);
    free(log.ops);
    for (int k = 0; k < 6; k++) {
        CHECK_EQ_INT(x[k].sized, 1);
        CHECK_EQ_INT(x[k].pres, never ? 10 : 20); /* forward and backward */
        CHECK_EQ_INT(x[k].posts, never ? 10 : 20);
    }
}
/* PyTorch: test_fully_shard_extensions.py test_all_gather_extensions_train_parity. Done: matrices
   gather the halves of their bits, biases have no extension (PyTorch: no biases). Gradients come
   from a hash, a step is plain descent (PyTorch: Adam). */
TEST(fully_shard_extensions, train_parity) {
    on_ranks(2, ext_parity, NULL);
    on_ranks(2, ext_parity, "never");
}

/* Nothing is whole anywhere, parameters are computed in bf16, and gathered as the extension says:
   half the bytes of the masters. */
static void ext_end_to_end(fsdp_world *world, const void *arg) {
    const int never = arg != NULL;
    ext x[6];
    fsdp_model_desc md = FSDP_ZERO;
    toy t;
    md.param_dtype = FSDP_BF16;
    md.reduce_dtype = FSDP_F32;
    md.reshard_after_forward = never ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
    ext_build(&t, world, &md, 8, fsdp_rank(world), x, BFLOAT, 3, 8);
    for (int step = 0; step < 3; step++) toy_step(&t);
    for (int k = 0; k < 6; k++) CHECK_EQ_INT(x[k].posts, never ? 3 : 6);
}
/* PyTorch: test_fully_shard_extensions.py test_all_gather_extensions_end_to_end. Done: gathers
   bf16, reduces in f32 (PyTorch: no reduce dtype). fsdp_init_params fills the shards (PyTorch: from
   the meta device). */
TEST(fully_shard_extensions, end_to_end) {
    on_ranks(8, ext_end_to_end, NULL);
    on_ranks(8, ext_end_to_end, "never");
}

/* A quantising extension runs in every gather; f32 parameters come out rounded to bf16. */
static void ext_quantised(fsdp_world *world) {
    enum { NUMEL = 32 * 8 };
    ext x[6];
    toy t;
    fsdp_param_view v;
    ext_build(&t, world, NULL, 8, fsdp_rank(world), x, BFLOAT, 3, 8);
    t.quantised = 1;
    for (int step = 0; step < 3; step++) toy_step(&t);
    for (int k = 0; k < 6; k++) CHECK_EQ_INT(x[k].pres, 6);
    float third[NUMEL];
    for (int e = 0; e < NUMEL; e++) third[e] = (float)(e + 1) / 3;
    CALL(world, fsdp_param_load(t.unit[0], 0, third));
    CALL(world, fsdp_pre_forward(t.unit[0]));
    CALL(world, fsdp_param_view_get(t.unit[0], 0, &v));
    const float *data = (const float *)fsdp_data(t.unit[0], 0);
    for (int e = 0; e < NUMEL; e++) CHECK_NEAR(data[e], lab_round(FSDP_BF16, (double)third[e]), 0);
    for (int64_t k = 0; k < v.numel; k++) /* the master is not */
        CHECK_NEAR(lab_get(v.shard, FSDP_F32, k), third[fsdp_view_index(&v, k)], 0);
    CALL(world, fsdp_post_forward(t.unit[0]));
    CHECK_EQ_INT(x[0].pres, 7);
    CHECK_EQ_INT(x[0].posts, 7);
}
/* PyTorch: test_fully_shard_extensions.py test_all_gather_extensions_monkey_patch. Differs: PyTorch
   adds hooks to tensors that are already sharded. Here a quantising extension is a field of the
   desc: it runs in every gather, and the shard stays as it was. */
TEST(fully_shard_extensions, monkey_patch) { on_worlds(8, ext_quantised); }

/* The hooks know the whole shape, and a stored shard has one size on all ranks: 9 rows over 8 ranks
   are 2 2 2 2 1 0 0 0, 3 are 1 1 1 0 ..., each padded to the first. */
static void ext_outer_size(fsdp_world *world) {
    enum { DIM = 3, WIDE = 9 };
    ext x[2];
    fsdp_gather_extension e[2];
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_param_desc p[4];
    toy t;
    memset(x, 0, sizeof x);
    mlp(p, DIM, WIDE / DIM);
    for (int i = 0; i < 2; i++) {
        fsdp_gather_extension of = {ext_sizes, ext_pre, ext_post, NULL};
        of.user = &x[i], e[i] = of, p[2 * i].extension = &e[i];
        x[i].kind = BFLOAT, x[i].rows = i ? DIM : WIDE, x[i].cols = i ? WIDE : DIM;
    }
    md.reshard_after_forward = FSDP_RESHARD_NEVER;
    toy_begin(&t, world, &md, 8, fsdp_rank(world));
    t.quantised = 1;
    toy_fill_unit(&t, p, 4);
    for (int step = 0; step < 2; step++) toy_step(&t);
    for (int i = 0; i < 2; i++) {
        const int chunk = i ? 1 : 2, left = (int)x[i].rows - t.place * chunk;
        fsdp_param_view v = lab_view(world, t.unit[0], 2 * i);
        CHECK_EQ_INT(x[i].stored, chunk * x[i].cols);
        CHECK_EQ_INT(v.local_shape[0], left < 0 ? 0 : left < chunk ? left : chunk);
        CHECK_EQ_INT(x[i].pres, 2);
        CHECK_EQ_INT(x[i].posts, 2);
    }
}
/* PyTorch: test_fully_shard_extensions.py test_all_gather_extension_outer_size_stride. Done: both
   hooks see the whole shape, the library pads the shards to one size (PyTorch: the hook pads); a
   desc has no strides. */
TEST(fully_shard_extensions, outer_size_stride) { on_worlds(8, ext_outer_size); }

/* What is gathered comes from the ranks of the shard dim alone. */
static void ext_hsdp_mesh(fsdp_world *world) {
    ext x[6];
    fsdp_model_desc md = FSDP_ZERO;
    int32_t ranks[4];
    toy t;
    fsdp_mesh *mesh = lab_hsdp(world, 2, 4);
    md.mesh = mesh;
    ext_build(&t, world, &md, 8, fsdp_rank(world), x, HALVES, 3, 8);
    for (int k = 0; k < 6; k++) x[k].tags = 4;
    toy_step(&t);
    CHECK_EQ_INT(fsdp_mesh_ranks(mesh, 1, ranks), 4);
    for (int k = 0; k < 6 * 4; k++) CHECK_EQ_INT(x[k / 4].seen[k % 4], 100 + ranks[k % 4]);
}
/* PyTorch: test_fully_shard_extensions.py test_all_gather_extension_hsdp_mesh. Done: the hooks get
   no mesh: the test compares from which ranks strings arrive. */
TEST(fully_shard_extensions, hsdp_mesh) { on_worlds(8, ext_hsdp_mesh); }

/* HSDP, with delays in every hook, with and without offload, ten steps. */
static void ext_hsdp(fsdp_world *world) {
    fsdp_mesh *mesh = lab_hsdp(world, 2, 2);
    for (int offload = 0; offload < 2; offload++) {
        ext x[4];
        fsdp_model_desc md = FSDP_ZERO;
        toy t;
        md.mesh = mesh;
        md.cpu_offload = offload;
        ext_build(&t, world, &md, 4, fsdp_rank(world), x, HALVES, 2, 3);
        for (int k = 0; k < 4; k++) x[k].delays = 1;
        for (int step = 0; step < 10; step++) toy_step(&t);
        CHECK_EQ_INT(x[1].posts, 20);
    }
}
/* PyTorch: none. Own: an extension on 2x2 with random delays in both hooks, with and without
   offload. */
TEST(fully_shard_extensions, hsdp_variants) { on_worlds(4, ext_hsdp); }
