/* test_fully_shard_errors.c - what PyTorch's fully_shard refuses is refused here, with a text that
   says what to do, and so is what PyTorch lets pass but makes no sense; what is accepted on purpose
   works. After a refusal the model is as it was; after every call it trains two steps. What cannot be
   said in C at all stands in docs/parity.md.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"

enum { WORLD = 4, MAX_UNITS = 4 };

typedef struct {
    fsdp_world *world;
    fsdp_model *model;
    fsdp_unit *unit[MAX_UNITS];
    int count, rank;
    double factor[MAX_UNITS]; /* gradients are sums divided by this */
    int ext_count;            /* what an extension says it gathers */
    int64_t ext_nbytes;
    int laid_out, hooked; /* calls of a hook */
} ctx;

/* ---- the model ------------------------------------------------------------------------------- */

/* Parameters are one number each, gradients the rank and that number. */
static double number(int u, int i) { return 2 * u + i + 1; }

static void fill(void *user, const fsdp_param_view *block) {
    double value = number((int)(intptr_t)block->unit_user, block->index);
    (void)user;
    for (int64_t k = 0; k < block->numel; k++) lab_put(block->data, block->dtype, k, value);
}

static fsdp_status add_unit(ctx *x, const fsdp_unit_desc *desc, const fsdp_param_desc *params,
                            int count) {
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_unit *unit = NULL;
    if (desc) ud = *desc;
    ud.params = params;
    ud.num_params = count;
    ud.user = (void *)(intptr_t)x->count;
    fsdp_status status = fsdp_fully_shard(x->model, &ud, &unit);
    if (status) CHECK(!unit);
    else x->unit[x->count] = unit, x->factor[x->count++] = WORLD;
    return status;
}

static fsdp_status add(ctx *x, fsdp_param_desc param) { return add_unit(x, NULL, &param, 1); }

/* Every element of one dtype; within one part in 10^7, for factors that are no powers of two. */
static void all_are(const void *data, fsdp_dtype dtype, int64_t numel, double expected) {
    for (int64_t e = 0; e < numel; e++) {
        double off = lab_get(data, dtype, e) - expected;
        W_CHECK((off < 0 ? -off : off) <= 1e-7 * expected, "%g, expected %g",
                lab_get(data, dtype, e), expected);
    }
}

static void use(ctx *x, int u, int backward) {
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(x->model, &v)) {
        if ((int)(intptr_t)v.unit_user != u) continue;
        const void *data = fsdp_data(v.unit, v.index);
        W_CHECK(data, "no data: %s", fsdp_last_error(x->world));
        all_are(data, v.dtype, lab_full_numel(&v), number(u, v.index));
        if (!backward || !v.requires_grad) continue;
        void *grad = fsdp_grad(v.unit, v.index);
        W_CHECK(grad, "no gradient: %s", fsdp_last_error(x->world));
        for (int64_t e = 0; e < lab_full_numel(&v); e++)
            lab_put(grad, v.dtype, e, lab_get(grad, v.dtype, e) + x->rank + number(u, v.index));
    }
}

/* expected: what finalize says; its work is done all the same. */
static void forward_backward(ctx *x, fsdp_status expected) {
    for (int u = 0; u < x->count; u++) {
        CALL(x->world, fsdp_pre_forward(x->unit[u]));
        use(x, u, 0);
        CALL(x->world, fsdp_post_forward(x->unit[u]));
    }
    for (int u = x->count - 1; u >= 0; u--) {
        CALL(x->world, fsdp_pre_backward(x->unit[u]));
        use(x, u, 1);
        CALL(x->world, fsdp_post_backward(x->unit[u]));
    }
    fsdp_status got = fsdp_finalize_backward(x->model);
    W_CHECK(got == expected, "finalize: %s", fsdp_last_error(x->world));
}

static void train(ctx *x, fsdp_status expected) {
    fsdp_param_view v = FSDP_ZERO;
    forward_backward(x, expected);
    while (fsdp_next_param(x->model, &v)) {
        int u = (int)(intptr_t)v.unit_user;
        double sum = WORLD * (WORLD - 1) / 2 + WORLD * number(u, v.index);
        all_are(v.shard, v.dtype, v.numel, number(u, v.index));
        if (!v.requires_grad) continue;
        W_CHECK(v.shard_grad, "%s.%s has no gradient", v.unit_name, v.name);
        all_are(v.shard_grad, v.grad_dtype, v.numel, sum / x->factor[u]);
    }
    CALL(x->world, fsdp_zero_grad(x->model));
}

/* Where and what parameters and gradients are, what may be trained, and how much memory there is. */
static size_t picture_of_data(const ctx *x, char *text, size_t size) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_memory m = FSDP_ZERO;
    uint64_t hash = 1469598103934665603u;
    while (fsdp_next_param(x->model, &v)) {
        lab_fold(&hash, v.shard, (size_t)v.numel * fsdp_dtype_size(v.dtype));
        lab_fold(&hash, &v.shard, sizeof v.shard);
        lab_fold(&hash, &v.shard_grad, sizeof v.shard_grad);
        lab_fold(&hash, &v.requires_grad, sizeof v.requires_grad);
    }
    CALL(x->world, fsdp_model_memory(x->model, &m));
    for (int k = 0; k < FSDP_POOL_MAX; k++) lab_fold(&hash, &m.pool_slots[k], sizeof m.pool_slots[k]);
    return (size_t)snprintf(text, size, "%llx %lld %lld ", (unsigned long long)hash,
                            (long long)m.total_bytes, (long long)m.host_bytes);
}

/* All that can be seen of the model, as text. */
static void picture(const ctx *x, char *text, size_t size) {
    fsdp_counters c = FSDP_ZERO;
    size_t used = x->laid_out ? picture_of_data(x, text, size) : 0;
    CALL(x->world, fsdp_model_counters(x->model, &c));
    for (int k = 0; k < FSDP_OP_COUNT; k++)
        if (k != FSDP_OP_HOOK)
            used += (size_t)snprintf(text + used, size - used, "%llu ",
                                     (unsigned long long)c.calls[k]);
    for (int u = 0; u < x->count; u++)
        used += (size_t)snprintf(text + used, size - used, "%d %d ",
                                 (int)fsdp_unit_state(x->unit[u]),
                                 (int)fsdp_unit_storage(x->unit[u]));
    CHECK(used + 1 < size);
    CHECK(fsdp_model_describe(x->model, text + used, size - used) < size - used);
}

/* ---- meshes ---------------------------------------------------------------------------------- */

static fsdp_status mesh_by(ctx *x, int ndim, const int *shape, int names, const int32_t *ranks,
                           fsdp_mesh **out) {
    static const char *const all[] = {"a", "b", "c"};
    fsdp_mesh_desc d = FSDP_ZERO;
    d.ndim = ndim;
    for (int i = 0; i < ndim && i < 3; i++) {
        d.shape[i] = shape[i];
        d.names[i] = names ? all[i] : NULL;
    }
    d.ranks = ranks;
    return fsdp_mesh_create(x->world, &d, out);
}
static fsdp_mesh *mesh(ctx *x, int a, int b, int c, int names) {
    const int shape[3] = {a, b, c};
    fsdp_mesh *out = NULL;
    CALL(x->world, mesh_by(x, c ? 3 : b ? 2 : 1, shape, names, NULL, &out));
    return out;
}

static fsdp_status mesh_too_large(ctx *x) {
    const int shape[2] = {2, 3};
    fsdp_mesh *out;
    return mesh_by(x, 2, shape, 1, NULL, &out);
}
static fsdp_status mesh_rank_twice(ctx *x) {
    const int shape[2] = {2, 2};
    const int32_t ranks[4] = {0, 1, 1, 3};
    fsdp_mesh *out;
    return mesh_by(x, 2, shape, 1, ranks, &out);
}
static fsdp_status mesh_unknown_rank(ctx *x) {
    const int shape[1] = {2};
    const int32_t ranks[2] = {0, 4};
    fsdp_mesh *out;
    return mesh_by(x, 1, shape, 1, ranks, &out);
}
static fsdp_status mesh_no_dims(ctx *x) {
    fsdp_mesh *out;
    return mesh_by(x, 0, NULL, 0, NULL, &out);
}
static fsdp_status mesh_empty_dim(ctx *x) {
    const int shape[2] = {0, 2};
    fsdp_mesh *out;
    return mesh_by(x, 2, shape, 1, NULL, &out);
}
static fsdp_status slice(ctx *x, int first, int second) {
    const int32_t dims[2] = {first, second};
    fsdp_mesh *out;
    return fsdp_mesh_slice(mesh(x, 1, 2, 2, 1), dims, second == -9 ? 1 : 2, &out);
}
static fsdp_status slice_unknown(ctx *x) { return slice(x, 3, -9); }
static fsdp_status slice_order(ctx *x) { return slice(x, 2, 1); }
static fsdp_status slice_overlap(ctx *x) { return slice(x, 1, 1); }
static fsdp_status unflatten(ctx *x) {
    const char *const names[2] = {"x", "y"};
    fsdp_mesh *out;
    return fsdp_mesh_unflatten(mesh(x, 4, 0, 0, 1), 0, 3, names, &out);
}

static fsdp_status info(ctx *x, int kind, int shard, int replicate) {
    fsdp_mesh_info out;
    return fsdp_mesh_info_init(mesh(x, 2, 2, 0, 1), kind, shard, replicate, &out);
}
static fsdp_status info_none(ctx *x) { return info(x, FSDP_MESH_INFO_FSDP, -1, -1); }
static fsdp_status info_fsdp(ctx *x) { return info(x, FSDP_MESH_INFO_FSDP, -1, 0); }
static fsdp_status info_ddp(ctx *x) { return info(x, FSDP_MESH_INFO_DDP, 1, -1); }
static fsdp_status info_hsdp_shard(ctx *x) { return info(x, FSDP_MESH_INFO_HSDP, -1, 0); }
static fsdp_status info_hsdp_replicate(ctx *x) { return info(x, FSDP_MESH_INFO_HSDP, 1, -1); }
static fsdp_status info_same(ctx *x) { return info(x, FSDP_MESH_INFO_HSDP, 1, 1); }
static fsdp_status info_range(ctx *x) { return info(x, FSDP_MESH_INFO_FSDP, 2, -1); }

static fsdp_status model_on(ctx *x, const fsdp_mesh *m) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_model *model;
    md.mesh = m;
    return fsdp_model_create(x->world, &md, &model);
}
static fsdp_status unit_on(ctx *x, const fsdp_mesh *m) {
    fsdp_param_desc p = fsdp_vec("b", 3);
    fsdp_unit_desc ud = FSDP_ZERO;
    ud.mesh = m;
    return add_unit(x, &ud, &p, 1);
}
static fsdp_status info_empty(ctx *x) { /* never filled by fsdp_mesh_info_init */
    fsdp_mesh_info zero = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_model *model;
    md.mesh_info = &zero;
    return fsdp_model_create(x->world, &md, &model);
}
/* Queries answer -1 and have no text. */
static fsdp_status query(int answer) { return answer == -1 ? FSDP_ERR_INVALID_ARG : FSDP_OK; }
static fsdp_status query_name(ctx *x) { return query(fsdp_mesh_dim(mesh(x, 2, 2, 0, 1), "tp")); }
static fsdp_status query_rank(ctx *x) { return query(fsdp_mesh_rank(mesh(x, 2, 2, 0, 1), -1)); }
static fsdp_status query_group(ctx *x) {
    return query(fsdp_mesh_ranks(mesh(x, 2, 2, 0, 1), 2, NULL));
}
static fsdp_status model_3d(ctx *x) { return model_on(x, mesh(x, 1, 2, 2, 1)); }
static fsdp_status model_unnamed(ctx *x) { return model_on(x, mesh(x, 2, 2, 0, 0)); }
static fsdp_status unit_3d(ctx *x) { return unit_on(x, mesh(x, 1, 2, 2, 1)); }
static fsdp_status unit_unnamed(ctx *x) { return unit_on(x, mesh(x, 2, 2, 0, 0)); }

/* ---- parameters and units -------------------------------------------------------------------- */

static fsdp_status scalar(ctx *x) {
    fsdp_param_desc p = FSDP_ZERO;
    p.name = "temperature";
    return add(x, p);
}
static fsdp_status dims_many(ctx *x) {
    fsdp_param_desc p = fsdp_vec("p", 1);
    p.ndim = FSDP_MAX_DIMS + 1;
    return add(x, p);
}
static fsdp_status size_negative(ctx *x) { return add(x, fsdp_mat("w", 3, -1)); }
static fsdp_status along(ctx *x, int dim) {
    fsdp_param_desc p = fsdp_vec("bias", 4);
    p.shard_dim = dim;
    return add(x, p);
}
static fsdp_status dim_beyond(ctx *x) { return along(x, 1); }
static fsdp_status dim_before(ctx *x) { return along(x, -2); }
static fsdp_status dtype_none(ctx *x) {
    fsdp_param_desc p = fsdp_vec("p", 4);
    p.dtype = 77;
    return add(x, p);
}
static fsdp_status trainable_bytes(ctx *x) {
    fsdp_param_desc p = fsdp_vec("codes", 4);
    p.dtype = FSDP_U8;
    return add(x, p);
}
static fsdp_status unit_empty(ctx *x) { return add_unit(x, NULL, NULL, 0); }
static fsdp_status unit_no_list(ctx *x) { return add_unit(x, NULL, NULL, 2); }
static fsdp_status unit_late(ctx *x) { return add(x, fsdp_vec("late", 4)); }

static fsdp_status reshard(ctx *x, int n) {
    fsdp_param_desc p = fsdp_mat("w", 5, 3);
    fsdp_unit_desc ud = FSDP_ZERO;
    ud.reshard_after_forward = n;
    return add_unit(x, &ud, &p, 1);
}
static fsdp_status reshard_3(ctx *x) { return reshard(x, 3); }
static fsdp_status reshard_8(ctx *x) { return reshard(x, 8); }
static fsdp_status reshard_less(ctx *x) { return reshard(x, -2); }
static fsdp_status reshard_model(ctx *x) { /* units on other meshes may divide by it */
    fsdp_model_desc md = FSDP_ZERO;
    ctx other = *x;
    other.count = 0;
    md.reshard_after_forward = 3;
    CALL(x->world, fsdp_model_create(x->world, &md, &other.model));
    return add(&other, fsdp_vec("b", 4));
}
static fsdp_status reshard_model_less(ctx *x) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_model *model;
    md.reshard_after_forward = -2;
    return fsdp_model_create(x->world, &md, &model);
}

enum { PARAM, REDUCE, OUTPUT, GRADS };
static fsdp_status unit_dtype(ctx *x, int which, fsdp_dtype dtype) {
    fsdp_param_desc p = fsdp_vec("b", 3);
    fsdp_unit_desc ud = FSDP_ZERO;
    *(which == PARAM    ? &ud.param_dtype
      : which == REDUCE ? &ud.reduce_dtype
                        : &ud.output_dtype) = dtype;
    return add_unit(x, &ud, &p, 1);
}
static fsdp_status model_dtype(ctx *x, int which, fsdp_dtype dtype) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_model *model;
    *(which == PARAM    ? &md.param_dtype
      : which == REDUCE ? &md.reduce_dtype
      : which == OUTPUT ? &md.output_dtype
                        : &md.grad_dtype) = dtype;
    return fsdp_model_create(x->world, &md, &model);
}
static fsdp_status unit_param_int(ctx *x) { return unit_dtype(x, PARAM, FSDP_I32); }
static fsdp_status unit_reduce_int(ctx *x) { return unit_dtype(x, REDUCE, FSDP_U8); }
static fsdp_status unit_output_int(ctx *x) { return unit_dtype(x, OUTPUT, FSDP_I8); }
static fsdp_status model_param_int(ctx *x) { return model_dtype(x, PARAM, FSDP_I32); }
static fsdp_status model_reduce_int(ctx *x) { return model_dtype(x, REDUCE, FSDP_I64); }
static fsdp_status model_output_none(ctx *x) { return model_dtype(x, OUTPUT, 55); }
static fsdp_status model_grad_int(ctx *x) { return model_dtype(x, GRADS, FSDP_I16); }

static int ext_sizes(void *user, int64_t shard_numel, int64_t nbytes[FSDP_GATHER_TENSORS]) {
    const ctx *x = (const ctx *)user;
    nbytes[0] = x->ext_nbytes ? x->ext_nbytes : shard_numel * 4;
    return x->ext_count;
}
static int64_t stored_numel(const fsdp_param_view *v) {
    int64_t rows = (v->shape[v->shard_dim] + WORLD - 1) / WORLD;
    return v->shape[v->shard_dim] ? lab_full_numel(v) / v->shape[v->shard_dim] * rows : 0;
}
static fsdp_status ext_pre(void *user, const fsdp_param_view *view, void *const *strings,
                           void *stream) {
    (void)user, (void)stream;
    memcpy(strings[0], view->shard, (size_t)stored_numel(view) * 4);
    return FSDP_OK;
}
static fsdp_status ext_post(void *user, const fsdp_param_view *view, const void *const *gathered,
                            void *full, fsdp_dtype dtype, void *stream) {
    (void)user, (void)stream;
    memcpy(full, gathered[0], (size_t)lab_full_numel(view) * fsdp_dtype_size(dtype));
    return FSDP_OK;
}
static fsdp_status extended(ctx *x, int without, int count, int64_t nbytes, int n) {
    fsdp_gather_extension e = {ext_sizes, ext_pre, ext_post, NULL};
    fsdp_param_desc p = fsdp_mat("w", 5, 3);
    fsdp_unit_desc ud = FSDP_ZERO;
    e.user = x;
    x->ext_count = count;
    x->ext_nbytes = nbytes;
    if (without == 1) e.post_all_gather = NULL;
    if (without == 2) e.pre_all_gather = NULL;
    if (without == 3) e.sizes = NULL;
    p.extension = &e;
    ud.reshard_after_forward = n;
    return add_unit(x, &ud, &p, 1);
}
static fsdp_status ext_no_post(ctx *x) { return extended(x, 1, 1, 0, 0); }
static fsdp_status ext_no_pre(ctx *x) { return extended(x, 2, 1, 0, 0); }
static fsdp_status ext_no_sizes(ctx *x) { return extended(x, 3, 1, 0, 0); }
static fsdp_status ext_no_strings(ctx *x) { return extended(x, 0, 0, 0, 0); }
static fsdp_status ext_five(ctx *x) { return extended(x, 0, FSDP_GATHER_TENSORS + 1, 0, 0); }
static fsdp_status ext_negative(ctx *x) { return extended(x, 0, 1, -4, 0); }

/* ---- setters --------------------------------------------------------------------------------- */

static fsdp_status set_reshard_int(ctx *x) {
    return fsdp_set_reshard_after_forward(x->model, x->unit[0], 2);
}
static fsdp_status set_other_model(ctx *x) {
    ctx other = *x;
    other.count = 0;
    CALL(x->world, fsdp_model_create(x->world, NULL, &other.model));
    CALL(x->world, add(&other, fsdp_vec("b", 4)));
    return fsdp_set_requires_gradient_sync(x->model, other.unit[0], 0);
}
static fsdp_status prefetch(ctx *x, int backward, int foreign) {
    fsdp_unit *list[2] = {x->unit[1], NULL};
    ctx other = *x;
    other.count = 0;
    if (foreign) {
        CALL(x->world, fsdp_model_create(x->world, NULL, &other.model));
        CALL(x->world, add(&other, fsdp_vec("b", 4)));
        list[1] = other.unit[0];
    }
    return backward ? fsdp_set_modules_to_backward_prefetch(x->unit[0], list, 2)
                    : fsdp_set_modules_to_forward_prefetch(x->unit[0], list, 2);
}
static fsdp_status prefetch_null(ctx *x) { return prefetch(x, 0, 0); }
static fsdp_status prefetch_null_back(ctx *x) { return prefetch(x, 1, 0); }
static fsdp_status prefetch_foreign(ctx *x) { return prefetch(x, 0, 1); }
static fsdp_status prefetch_foreign_back(ctx *x) { return prefetch(x, 1, 1); }
static fsdp_status prefetch_count(ctx *x) {
    return fsdp_set_modules_to_forward_prefetch(x->unit[0], x->unit, -1);
}
static fsdp_status factor_negative(ctx *x) {
    return fsdp_set_gradient_divide_factor(x->model, x->unit[0], -2);
}
static fsdp_status factor_nan(ctx *x) {
    uint64_t bits = 0x7ff8000000000000u;
    double nan;
    memcpy(&nan, &bits, sizeof nan);
    return fsdp_set_gradient_divide_factor(x->model, x->unit[0], nan);
}
static fsdp_status mixed_dtypes(ctx *x) {
    fsdp_param_desc p[2] = {fsdp_mat("w", 5, 3), fsdp_vec("b", 5)};
    p[1].dtype = FSDP_BF16;
    return add_unit(x, NULL, p, 2);
}
static fsdp_status thaw_bytes(ctx *x) { return fsdp_set_requires_grad(x->unit[0], 2, 1); }
static fsdp_status thaw_unknown(ctx *x) { return fsdp_set_requires_grad(x->unit[0], 9, 1); }

/* ---- order of calls -------------------------------------------------------------------------- */

static fsdp_status no_forward(ctx *x) { return fsdp_pre_backward(x->unit[0]); }
static fsdp_status not_open(ctx *x) { return fsdp_post_forward(x->unit[0]); }
static fsdp_status not_open_backward(ctx *x) { return fsdp_post_backward(x->unit[1]); }
static fsdp_status nothing_gathered(ctx *x) {
    if (!lab_undefined(x->model, fsdp_data(x->unit[0], 0))) return FSDP_OK;
    return FSDP_ERR_INVALID_STATE; /* a getter has no status */
}
static fsdp_status not_backward(ctx *x) {
    int failed = lab_undefined(x->model, fsdp_grad(x->unit[0], 0));
    return failed ? FSDP_ERR_INVALID_STATE : FSDP_OK;
}
static fsdp_status clip_nothing(ctx *x) { return fsdp_clip_grad_norm(x->model, -1, NULL); }
static fsdp_status clip_norm(ctx *x) {
    fsdp_clip_desc d = FSDP_ZERO;
    d.max_norm = 1;
    d.norm_type = -2;
    return fsdp_clip_grads(x->model, &d, NULL);
}

/* ---- what is accepted ------------------------------------------------------------------------ */

static fsdp_status uneven_dim1(ctx *x) {
    fsdp_param_desc p = fsdp_mat("w", 4, 17);
    p.shard_dim = 1;
    return add(x, p);
}
static fsdp_status reshard_1(ctx *x) {
    fsdp_status status = reshard(x, 1);
    lab_forward(x->world, x->unit[2]);
    CHECK_EQ_INT(fsdp_unit_storage(x->unit[2]), FSDP_STORAGE_SHARDED); /* True == 1, as ALWAYS */
    CALL(x->world, fsdp_model_reset(x->model));
    CALL(x->world, fsdp_init_params(x->model, fill, NULL));
    return status;
}
static fsdp_status reshard_extension(ctx *x) { return extended(x, 0, 1, 0, 2); }
static fsdp_status reshard_uneven(ctx *x) {
    fsdp_param_desc p[3] = {fsdp_mat("rows", 5, 3), fsdp_mat("cols", 3, 5), fsdp_vec("one", 1)};
    fsdp_unit_desc ud = FSDP_ZERO;
    p[1].shard_dim = 1;
    ud.reshard_after_forward = 2;
    return add_unit(x, &ud, p, 3);
}
static fsdp_status no_elements(ctx *x) {
    fsdp_param_desc p[2] = {fsdp_mat("none", 0, 5), fsdp_vec("b", 5)};
    CALL(x->world, add(x, fsdp_mat("nothing", 3, 0))); /* alone too */
    return add_unit(x, NULL, p, 2);
}
static fsdp_status frozen_dtypes(ctx *x) {
    fsdp_param_desc p[3] = {fsdp_mat("w", 5, 3), fsdp_vec("b", 5), fsdp_vec("d", 6)};
    p[1].dtype = FSDP_BF16, p[1].frozen = 1;
    p[2].dtype = FSDP_F64, p[2].frozen = 1;
    return add_unit(x, NULL, p, 3);
}
static fsdp_status reduce_dtypes(ctx *x) { return unit_dtype(x, REDUCE, FSDP_BF16); }
static fsdp_status any_factor(ctx *x) {
    x->factor[0] = 3;
    x->factor[1] = 0.5;
    for (int u = 0; u < 2; u++)
        CALL(x->world, fsdp_set_gradient_divide_factor(x->model, x->unit[u], x->factor[u]));
    return FSDP_OK;
}
static fsdp_status other_mesh(ctx *x) {
    double norm, squares = 0;
    fsdp_status status = unit_on(x, mesh(x, 2, 2, 0, 1));
    fsdp_param_view v = FSDP_ZERO;
    CALL(x->world, fsdp_init_params(x->model, fill, NULL));
    forward_backward(x, FSDP_OK);
    while (fsdp_next_param(x->model, &v)) {
        double grad = 1.5 + number((int)(intptr_t)v.unit_user, v.index);
        if (v.requires_grad) squares += grad * grad * (double)lab_full_numel(&v);
    }
    CALL(x->world, fsdp_clip_grad_norm(x->model, 0.5, &norm)); /* less than it is */
    CHECK_NEAR(norm * norm, squares, 1e-6 * squares);
    memset(&v, 0, sizeof v);
    while (fsdp_next_param(x->model, &v)) {
        double grad = (1.5 + number((int)(intptr_t)v.unit_user, v.index)) * 0.5 / (norm + 1e-6);
        for (int64_t k = 0; k < v.numel && v.requires_grad; k++)
            CHECK_NEAR(((const float *)v.shard_grad)[k], grad, 1e-6 * grad);
    }
    CALL(x->world, fsdp_zero_grad(x->model));
    return status;
}
static fsdp_status clip_empty(ctx *x) { /* inf, with shards that are empty on some ranks */
    fsdp_clip_desc d = FSDP_ZERO;
    double norm;
    uint64_t inf = 0x7ff0000000000000u;
    d.max_norm = 1e9;
    memcpy(&d.norm_type, &inf, sizeof inf);
    forward_backward(x, FSDP_OK);
    fsdp_status status = fsdp_clip_grads(x->model, &d, &norm);
    CHECK_NEAR(norm, 1.5 + number(1, 0), 0);
    CALL(x->world, fsdp_zero_grad(x->model));
    return status;
}
static fsdp_status some_unused(ctx *x) { /* each rank in turn uses nothing of unit 1 */
    CALL(x->world, fsdp_set_reduce_scatter_unused_params(x->model, x->unit[1], 1));
    for (int unused = 0; unused < WORLD; unused++) {
        const double want = (6 - unused + (WORLD - 1) * number(1, 0)) / WORLD;
        float full[6];
        lab_forward(x->world, x->unit[1]);
        CALL(x->world, fsdp_pre_backward(x->unit[1]));
        if (x->rank != unused) use(x, 1, 1);
        CALL(x->world, fsdp_post_backward(x->unit[1]));
        CALL(x->world, fsdp_finalize_backward(x->model));
        fsdp_param_view v = lab_view(x->world, x->unit[1], 0);
        CHECK(v.shard_grad);
        all_are(v.shard_grad, v.grad_dtype, v.numel, want);
        CALL(x->world, fsdp_param_full_grad(x->unit[1], 0, full)); /* shards are empty on two ranks */
        all_are(full, FSDP_F32, 6, want);
        CALL(x->world, fsdp_zero_grad(x->model));
    }
    return fsdp_set_reduce_scatter_unused_params(x->model, x->unit[1], 0);
}
static fsdp_status child_first(ctx *x) {
    CALL(x->world, fsdp_pre_forward(x->unit[1]));
    use(x, 1, 0);
    CALL(x->world, fsdp_post_forward(x->unit[1]));
    return fsdp_model_reset(x->model);
}
static fsdp_status sum_hook(void *user, fsdp_unit *unit, void *data, int64_t numel,
                            fsdp_dtype dtype, void *stream) {
    ctx *x = (ctx *)user;
    (void)stream;
    CHECK(unit == x->unit[2] && data && dtype == FSDP_F32);
    x->hooked++;
    return numel > 0 ? FSDP_OK : FSDP_ERR_INTERNAL;
}
static fsdp_status set_replicated(ctx *x) { /* there is nothing to keep or to free */
    fsdp_param_desc p = fsdp_vec("b", 3);
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_mesh_info ddp;
    CALL(x->world, fsdp_mesh_info_init(mesh(x, 4, 0, 0, 1), FSDP_MESH_INFO_DDP, -1, 0, &ddp));
    ud.mesh_info = &ddp;
    CALL(x->world, add_unit(x, &ud, &p, 1));
    return fsdp_set_reshard_after_forward(x->model, x->unit[2], FSDP_RESHARD_ALWAYS);
}
static fsdp_status hook_hsdp(ctx *x) {
    fsdp_status status = unit_on(x, mesh(x, 2, 2, 0, 1));
    return status ? status : fsdp_set_all_reduce_hook(x->unit[2], sum_hook, x);
}
static fsdp_status tied_elsewhere(ctx *x) { /* unit 0 is opened by two layers, as a tied head */
    CALL(x->world, fsdp_set_reshard_after_forward(x->model, x->unit[0], FSDP_RESHARD_NEVER));
    for (int k = 0; k < 2; k++) {
        CALL(x->world, fsdp_pre_forward(x->unit[0]));
        use(x, 0, 0);
        CALL(x->world, fsdp_post_forward(x->unit[0]));
    }
    return fsdp_model_reset(x->model);
}
static fsdp_status sub_mesh_flat(ctx *x) { /* flattening a mesh to a name that is taken */
    fsdp_mesh *m = mesh(x, 2, 2, 0, 1), *out;
    fsdp_status status = fsdp_mesh_flatten(m, "a", &out);
    CHECK_EQ_INT(fsdp_mesh_size(out, 0), WORLD);
    return status;
}

/* ---- the table ------------------------------------------------------------------------------- */

enum { ARG = FSDP_ERR_INVALID_ARG, STATE = FSDP_ERR_INVALID_STATE };
enum { HOOK = 2 };

typedef struct {
    const char *name;     /* condition */
    const char *upstream; /* what PyTorch 2.15 raises or does */
    fsdp_status (*call)(ctx *);
    int expected;     /* status */
    const char *word; /* of the text */
    int late; /* the call comes after a step of training; HOOK: and is told again by finalize */
} row_type;

static const row_type rows[] = {
    /* 2: meshes */
    {"mesh_larger_than_world", "RuntimeError", mesh_too_large, ARG, "the product of the sizes exceeds", 0},
    {"mesh_rank_twice", "RuntimeError on that rank", mesh_rank_twice, ARG, "rank 1 appears twice", 0},
    {"mesh_unknown_rank", "ValueError", mesh_unknown_rank, ARG, "ranks has 4, expected 0..3", 0},
    {"mesh_without_dims", "(nothing)", mesh_no_dims, ARG, "expected 1..", 0},
    {"mesh_dim_of_size_0", "AssertionError", mesh_empty_dim, ARG, "expected >= 1", 0},
    {"slice_unknown_dim", "KeyError", slice_unknown, ARG, "dims[0] is 3", 0},
    {"slice_dims_out_of_order", "KeyError", slice_order, ARG, "increasing", 0},
    {"slice_dims_overlap", "RuntimeError", slice_overlap, ARG, "increasing", 0},
    {"unflatten_no_divisor", "ValueError", unflatten, ARG, "divisor", 0},
    /* 1.1: mesh infos */
    {"mesh_info_no_dim", "AssertionError", info_none, ARG, "at least one", 0},
    {"mesh_info_fsdp_without_shard_dim", "AssertionError", info_fsdp, ARG, "shard_dim", 0},
    {"mesh_info_ddp_without_replicate_dim", "AssertionError", info_ddp, ARG, "replicate_dim", 0},
    {"mesh_info_hsdp_without_shard_dim", "AssertionError", info_hsdp_shard, ARG, "shard_dim", 0},
    {"mesh_info_hsdp_without_replicate_dim", "AssertionError", info_hsdp_replicate, ARG,
     "replicate_dim", 0},
    {"mesh_info_same_dim", "(nothing)", info_same, ARG, "different dims", 0},
    {"mesh_info_dim_beyond", "IndexError", info_range, ARG, "2-D mesh", 0},
    {"mesh_info_not_filled", "TypeError", info_empty, ARG, "its mesh_info has no mesh", 0},
    {"mesh_unknown_name", "KeyError", query_name, ARG, "", 0},
    {"mesh_rank_without_dim", "RuntimeError", query_rank, ARG, "", 0},
    {"mesh_group_of_unknown_dim", "IndexError", query_group, ARG, "", 0},
    /* 6.1: the mesh of a model and of a unit */
    {"model_mesh_ndim", "ValueError", model_3d, ARG, "mesh_info", 0},
    {"model_mesh_unnamed", "AssertionError", model_unnamed, ARG, "name", 0},
    {"unit_mesh_ndim", "ValueError", unit_3d, ARG, "mesh_info", 0},
    {"unit_mesh_unnamed", "AssertionError", unit_unnamed, ARG, "name", 0},
    /* 3.1, 6.1: parameters */
    {"scalar_parameter", "ValueError", scalar, ARG, "vector of one element", 0},
    {"scalar_parameter_is_named", "ValueError", scalar, ARG, "temperature", 0},
    {"too_many_dims", "(nothing)", dims_many, ARG, "expected 1..", 0},
    {"negative_size", "RuntimeError", size_negative, ARG, "expected >= 0", 0},
    {"shard_dim_beyond", "AssertionError", dim_beyond, ARG, "bias': shard_dim is 1", 0},
    {"shard_dim_before", "AssertionError", dim_before, ARG, "shard_dim is -2", 0},
    {"dtype_unknown", "(a type)", dtype_none, ARG, "77", 0},
    {"integer_requires_grad", "RuntimeError", trainable_bytes, ARG, "set frozen", 0},
    {"mixed_original_dtypes", "AssertionError", mixed_dtypes, ARG, "two units", 0},
    {"unit_without_parameters", "(nothing)", unit_empty, ARG, "num_params", 0},
    {"unit_without_list", "(nothing)", unit_no_list, ARG, "params", 0},
    {"unit_after_first_step", "(nothing)", unit_late, STATE, "before the first", 1},
    /* 4.7: reshard_after_forward */
    {"reshard_no_factor", "ValueError", reshard_3, ARG, "divisor", 0},
    {"reshard_more_than_ranks", "ValueError", reshard_8, ARG, "divisor", 0},
    {"reshard_negative", "ValueError", reshard_less, ARG, "_NEVER", 0},
    {"reshard_negative_model", "ValueError", reshard_model_less, ARG, "n >= 2", 0},
    {"reshard_no_factor_model", "ValueError", reshard_model, ARG, "divisor", 0},
    /* 6.1: policies */
    {"param_dtype_integer", "RuntimeError in forward", unit_param_int, ARG, "floating", 0},
    {"reduce_dtype_integer", "RuntimeError in backward", unit_reduce_int, ARG, "floating", 0},
    {"output_dtype_integer", "RuntimeError in backward", unit_output_int, ARG, "floating", 0},
    {"model_param_dtype_integer", "RuntimeError in forward", model_param_int, ARG, "floating", 0},
    {"model_reduce_dtype_integer", "RuntimeError in backward", model_reduce_int, ARG, "floating", 0},
    {"model_output_dtype_unknown", "(a type)", model_output_none, ARG, "floating", 0},
    {"model_grad_dtype_integer", "RuntimeError in backward", model_grad_int, ARG, "floating", 0},
    /* 3.8: extensions */
    {"extension_without_post", "AssertionError", ext_no_post, ARG, "post_all_gather", 0},
    {"extension_without_pre", "AssertionError", ext_no_pre, ARG, "pre_all_gather", 0},
    {"extension_without_sizes", "(no such function)", ext_no_sizes, ARG, "sizes", 0},
    {"extension_without_tensors", "IndexError", ext_no_strings, ARG, "1..4", 0},
    {"extension_five_tensors", "(nothing)", ext_five, ARG, "1..4", 0},
    {"extension_negative_size", "(no such function)", ext_negative, ARG, "of sizes >= 0", 0},
    /* 6.4: setters */
    {"set_reshard_int", "ValueError", set_reshard_int, ARG, "FSDP_RESHARD_ALWAYS", 1},
    {"set_on_another_model", "(nothing)", set_other_model, ARG, "another model", 1},
    {"prefetch_no_unit", "ValueError", prefetch_null, ARG, "not a unit of", 1},
    {"prefetch_no_unit_backward", "ValueError", prefetch_null_back, ARG, "not a unit of", 1},
    {"prefetch_another_model", "(nothing)", prefetch_foreign, ARG, "of this model", 1},
    {"prefetch_another_model_backward", "(nothing)", prefetch_foreign_back, ARG, "of this model", 1},
    {"prefetch_negative_count", "TypeError", prefetch_count, ARG, "count", 1},
    {"divide_factor_negative", "(nothing)", factor_negative, ARG, "factor", 1},
    {"divide_factor_nan", "(nothing)", factor_nan, ARG, "factor", 1},
    {"thaw_integer", "RuntimeError", thaw_bytes, ARG, "floating", 1},
    {"thaw_unknown", "(nothing)", thaw_unknown, ARG, "expected 0..2", 1},
    /* 1.3, 6.2, 6.3: order; there by autograd, which calls nothing in a wrong order */
    {"pre_backward_without_forward", "(autograd)", no_forward, STATE,
     "call fsdp_pre_forward first", HOOK},
    {"post_forward_without_pre", "(autograd)", not_open, STATE, "call fsdp_pre_forward first", HOOK},
    {"post_backward_without_pre", "(autograd)", not_open_backward, STATE,
     "call fsdp_pre_forward first", HOOK},
    {"data_of_a_sharded_unit", "(wrong size)", nothing_gathered, STATE,
     "call fsdp_pre_forward first", HOOK},
    {"grad_outside_of_backward", "None", not_backward, STATE, "call fsdp_p", HOOK},
    {"clip_to_a_negative_norm", "(nothing)", clip_nothing, ARG, "max_norm", 1},
    {"clip_negative_norm_type", "(p of any sign)", clip_norm, ARG, "norm_type", 1},
    /* Accepted here. */
    {"works_uneven_shard_dim_1", "NotImplementedError", uneven_dim1, FSDP_OK, "", 0},
    {"works_reshard_1", "warning, then False", reshard_1, FSDP_OK, "", 0},
    {"works_reshard_int_extension", "NotImplementedError", reshard_extension, FSDP_OK, "", 0},
    {"works_reshard_int_uneven_and_dim_1", "RuntimeError or IndexError", reshard_uneven, FSDP_OK, "", 0},
    {"works_no_elements", "RuntimeError in the reduction", no_elements, FSDP_OK, "", 0},
    {"works_frozen_of_other_dtypes", "(works)", frozen_dtypes, FSDP_OK, "", 0},
    {"works_reduce_dtype_of_one_unit", "(works)", reduce_dtypes, FSDP_OK, "", 0},
    {"works_any_divide_factor", "RuntimeError of Gloo", any_factor, FSDP_OK, "", 1},
    {"works_clip_over_meshes", "error in stack", other_mesh, FSDP_OK, "", 0},
    {"works_clip_inf_empty_shards", "RuntimeError on one rank", clip_empty, FSDP_OK, "", 1},
    {"works_unused_on_one_rank", "hang", some_unused, FSDP_OK, "", 1},
    {"works_child_before_root", "RuntimeError", child_first, FSDP_OK, "", 1},
    {"works_all_reduce_hook_hsdp", "(works, but ValueError with a stream)", hook_hsdp, FSDP_OK, "", 0},
    {"works_set_reshard_replicated", "AssertionError", set_replicated, FSDP_OK, "", 0},
    {"works_tied_parameter", "ValueError in two groups", tied_elsewhere, FSDP_OK, "", 1},
    {"works_flatten_to_a_taken_name", "ValueError", sub_mesh_flat, FSDP_OK, "", 0},
};

static void run_row(lab_rank *r) {
    const row_type *row = (const row_type *)r->arg;
    fsdp_param_desc p[3] = {fsdp_mat("w", 6, 4), fsdp_vec("b", 3), fsdp_vec("codes", 5)};
    char before[8192], after[8192];
    ctx x;
    memset(&x, 0, sizeof x);
    x.rank = r->rank, x.world = r->w;
    p[2].dtype = FSDP_U8;
    p[2].frozen = 1;
    snprintf(w_case, sizeof w_case, "%s, upstream: %s", row->name, row->upstream);
    CALL(x.world, fsdp_model_create(x.world, NULL, &x.model));
    CALL(x.world, add_unit(&x, NULL, p, 3));
    CALL(x.world, add(&x, fsdp_mat("w", 2, 3))); /* empty on two ranks */
    if (row->late) {
        CALL(x.world, fsdp_init_params(x.model, fill, NULL));
        train(&x, FSDP_OK);
        x.laid_out = 1;
    }
    picture(&x, before, sizeof before);
    int count = x.count;
    fsdp_status got = row->call(&x);
    W_CHECK((int)got == row->expected, "%s, expected %s: %s", fsdp_status_name(got),
            fsdp_status_name((fsdp_status)row->expected), fsdp_last_error(x.world));
    if (got) {
        const char *text = fsdp_last_error(x.world);
        W_CHECK(strstr(text, row->word), "'%s' does not say '%s'", text, row->word);
        CHECK_EQ_INT(x.count, count);
        CHECK_EQ_INT(fsdp_num_units(x.model), count);
        picture(&x, after, sizeof after);
        CHECK_EQ_STR(after, before);
    }
    if (!row->late) CALL(x.world, fsdp_init_params(x.model, fill, NULL));
    for (int step = 0; step < 2; step++) /* a wrong order is told again by finalize, once */
        train(&x, step == 0 && row->late == HOOK ? got : FSDP_OK);
    CHECK_EQ_INT(x.hooked, row->call == hook_hsdp ? 2 : 0);
    lab_end(r);
}

TEST_P(fully_shard_errors, table, rows) { lab_run(WORLD, NULL, run_row, (void *)(uintptr_t)row); }

/* ---- failures that are no refusals ----------------------------------------------------------- */

typedef struct {
    void (*body)(ctx *x);
} pair_run;

static void pair_rank(lab_rank *r) {
    ctx x;
    memset(&x, 0, sizeof x);
    x.rank = r->rank, x.world = r->w;
    CALL(x.world, fsdp_model_create(x.world, NULL, &x.model));
    ((const pair_run *)r->arg)->body(&x);
    lab_end(r);
}
static void on_ranks(void (*body)(ctx *x)) {
    pair_run shared = {body};
    lab_run(WORLD, NULL, pair_rank, &shared);
}

/* error_if_nonfinite: nothing is scaled, every rank is told, the world goes on. Upstream:
   RuntimeError. */
static void nonfinite(ctx *x) {
    fsdp_clip_desc d = FSDP_ZERO;
    fsdp_param_view v;
    uint32_t inf = 0x7f800000u;
    double norm;
    CALL(x->world, add(x, fsdp_mat("w", 8, 3)));
    CALL(x->world, fsdp_init_params(x->model, fill, NULL));
    forward_backward(x, FSDP_OK);
    CALL(x->world, fsdp_param_view_get(x->unit[0], 0, &v));
    if (x->rank == 3) memcpy(v.shard_grad, &inf, sizeof inf);
    d.max_norm = 0.001;
    d.error_if_nonfinite = 1;
    CHECK_STATUS(fsdp_clip_grads(x->model, &d, &norm), FSDP_ERR_CORRUPT);
    CHECK(strstr(fsdp_last_error(x->world), "norm"));
    CHECK_NEAR(((float *)v.shard_grad)[1], 1.5 + number(0, 0), 0);
    CALL(x->world, fsdp_zero_grad(x->model));
    train(x, FSDP_OK);
}
TEST(fully_shard_errors, nonfinite_norm) { on_ranks(nonfinite); }

/* Upstream's ranks that used different parameters hang; here all of them are told, and the world is
   aborted. */
static void different_params(ctx *x) {
    fsdp_param_desc p[2] = {fsdp_mat("even", 4, 3), fsdp_mat("odd", 4, 3)};
    CALL(x->world, add_unit(x, NULL, p, 2));
    lab_forward(x->world, x->unit[0]);
    CALL(x->world, fsdp_pre_backward(x->unit[0]));
    CHECK(fsdp_grad(x->unit[0], x->rank % 2));
    CHECK_STATUS(fsdp_post_backward(x->unit[0]), FSDP_ERR_MISMATCH);
    CHECK(strstr(fsdp_last_error(x->world), "unit0"));
    CHECK_STATUS(fsdp_finalize_backward(x->model), FSDP_ERR_MISMATCH);
}
TEST(fully_shard_errors, unused_rule_disagreement) { on_ranks(different_params); }

/* A rank outside a mesh cannot have a model on it; those inside go on. */
static void outside(ctx *x) {
    const int shape[1] = {2};
    const int32_t ranks[2] = {2, 0};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh *pair;
    fsdp_model *model;
    CALL(x->world, mesh_by(x, 1, shape, 1, ranks, &pair));
    md.mesh = pair;
    CHECK_EQ_INT(fsdp_mesh_rank(pair, 0), x->rank % 2 ? -1 : 1 - x->rank / 2);
    fsdp_status status = fsdp_model_create(x->world, &md, &model);
    CHECK_STATUS(status, x->rank % 2 ? FSDP_ERR_INVALID_ARG : FSDP_OK);
    if (status) CHECK(strstr(fsdp_last_error(x->world), "outside"));
    CALL(x->world, add(x, fsdp_mat("w", 8, 3)));
    CALL(x->world, fsdp_init_params(x->model, fill, NULL));
    train(x, FSDP_OK);
}
TEST(fully_shard_errors, rank_outside_mesh) { on_ranks(outside); }
