/* test_exhaustive.c - training of one unit, in each combination of what can vary, by brute force
   Compares every bit with tests/core/brute.h. FSDP_CASE=n repeats one case; it needs the seed of that run.

   Most cases run on a backend of this file, whose ranks are fibers of one thread. The rank that arrives last
   does the collective, so that a case takes microseconds. This backend checks that ranks agree on each
   collective, and that they allocate and free alike. The other cases run on the shared-memory backend: ranks
   are threads or processes, with and without worker threads, and two models take turns.

   SPDX-License-Identifier: MIT */
#define TAGS SLOW
#include "harness.h"
#include <ucontext.h> /* makecontext, swapcontext */
#include "lab.h"
#include "brute.h"

/* What one rank has while it lives. Worlds: with fused reductions, and without. */
typedef struct {
    int rank, ranks; // of worlds of so many
    fsdp_world *world[2];
    const int32_t *members; // the ranks that train, by place; NULL: all
    const fsdp_mesh *line[2], *mesh[2][14], *swapped[2][14], *reversed[2][14],
        *sliced[2][14]; // by split
    const b_case *c;
    const b_truth *truth;
    int shard, blocks; // my place in the shard group of this case; blocks that were filled
    fsdp_model *model;
    fsdp_unit *unit;
    fsdp_memory predicted;
    int64_t fill_bytes, ordinal, row; // of the next block
    fsdp_dtype gathered[B_PARAMS];
    const void *readable; /* address that the unit's callback has got; NULL: none now */
} rank_state;

/* ---- failures -------------------------------------------------------------------------------- */

static void H_PRINTF(4, 5)
    fail(const rank_state *x, int line, const char *what, const char *format, ...) {
    char text[400], described[1200];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    b_describe(x->c, described, sizeof described);
    h_fail(__FILE__, line, what,
           "%s [rank %d of case %lld: %s; alone: FSDP_CASE=%lld %s --seed=%llu]", text, x->rank,
           (long long)x->c->number, described, (long long)x->c->number, h_program,
           (unsigned long long)x->c->seed);
}
#define EXPECT(x, cond, ...)                                                                       \
    do {                                                                                           \
        if (!(cond)) fail(x, __LINE__, "CHECK(" #cond ")", __VA_ARGS__);                           \
    } while (0)
#define DO(x, call)                                                                                \
    do {                                                                                           \
        fsdp_status e_status = (call);                                                             \
        if (e_status)                                                                              \
            fail(x, __LINE__, #call, "%s: %s", fsdp_status_name(e_status),                         \
                 fsdp_last_error(the_world(x)));                                                   \
    } while (0)

static fsdp_world *the_world(const rank_state *x) { return x->world[x->c->axis[B_PLAIN]]; }

/* ---- one case on one rank -------------------------------------------------------------------- */

/* The mesh of the case, said in one of several ways; and where this rank is in it. */
static void choose_mesh(rank_state *x, const fsdp_mesh **mesh, fsdp_mesh_info *info) {
    const b_case *c = x->c;
    int split = c->axis[B_SPLIT], plain = c->axis[B_PLAIN], at = x->rank;
    *mesh = c->replicas == 1 && !x->members ? NULL : x->mesh[plain][split];
    if (c->axis[B_MESH] == B_MESH_SLICE) *mesh = x->sliced[plain][split];
    if (c->axis[B_MESH] == B_MESH_REVERSED) {
        *mesh = x->reversed[plain][split];
        at = c->ranks - 1 - at;
    }
    x->shard = at % c->shards;
    if (c->axis[B_MESH] != B_MESH_INFO) return;
    int kind = c->shards > 1 && c->replicas > 1 ? FSDP_MESH_INFO_HSDP
               : c->replicas > 1                ? FSDP_MESH_INFO_DDP
                                                : FSDP_MESH_INFO_FSDP;
    x->shard = at / c->replicas;
    DO(x, fsdp_mesh_info_init(x->swapped[plain][split], kind, kind == FSDP_MESH_INFO_DDP ? -1 : 0,
                              kind == FSDP_MESH_INFO_FSDP ? -1 : 1, info));
}

static void called_back(fsdp_unit *u, int readable, void *user) {
    rank_state *x = (rank_state *)user;
    EXPECT(x, (x->readable == NULL) == readable, "callback %d twice", readable);
    x->readable = readable ? fsdp_data(u, 0) : NULL;
}

static void build(rank_state *x) {
    static const int64_t direct_min[4] = {FSDP_DIRECT_NEVER, 1, 0, 100};
    const b_case *c = x->c;
    const int *axis = c->axis;
    const fsdp_mesh *mesh = NULL;
    fsdp_mesh_info info;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_param_desc pd[B_PARAMS];
    memset(&info, 0, sizeof info);
    memset(pd, 0, sizeof pd);
    choose_mesh(x, &mesh, &info);
    if (axis[B_MESH] == B_MESH_UNIT) ud.mesh = mesh ? mesh : x->line[axis[B_PLAIN]];
    else if (axis[B_MESH] == B_MESH_INFO) md.mesh_info = &info;
    else md.mesh = mesh;
    fsdp_dtype *by_model[2] = {&md.param_dtype, &md.reduce_dtype},
               *by_unit[2] = {&ud.param_dtype, &ud.reduce_dtype};
    *(c->number % 3 ? by_model : by_unit)[0] = b_floats[axis[B_PARAM]];
    *(c->number % 3 ? by_model : by_unit)[1] = b_floats[axis[B_REDUCE]];
    md.grad_dtype = b_floats[axis[B_GRAD]];
    md.reshard_after_forward = c->reshard;
    md.cpu_offload = axis[B_OFFLOAD];
    md.debug = axis[B_DEBUG];
    md.direct_min = direct_min[axis[B_LAYOUT]];
    md.fill_bytes = c->number % 5 ? 1 + c->number % 97 : 0;
    x->fill_bytes = md.fill_bytes ? md.fill_bytes : INT64_MAX;
    x->ordinal = -1, x->blocks = 0;
    DO(x, fsdp_model_create(the_world(x), &md, &x->model));
    for (int i = 0; i < c->count; i++) {
        const b_param *p = &c->param[i];
        pd[i].dtype = p->dtype;
        pd[i].ndim = p->ndim;
        pd[i].shard_dim = p->shard_dim;
        pd[i].frozen = p->frozen;
        pd[i].keep_dtype = p->keep;
        memcpy(pd[i].shape, p->shape, sizeof p->shape);
        int cast = axis[B_PARAM] && !p->keep && fsdp_dtype_is_float(p->dtype);
        x->gathered[i] = cast ? b_floats[axis[B_PARAM]] : p->dtype;
    }
    ud.params = pd;
    ud.num_params = c->count;
    DO(x, fsdp_fully_shard(x->model, &ud, &x->unit));
    x->readable = NULL;
    DO(x, fsdp_set_unit_callback(x->unit, called_back, x));
    if (axis[B_FACTOR])
        DO(x, fsdp_set_gradient_divide_factor(x->model, NULL, b_factors[axis[B_FACTOR]]));
    if (axis[B_USAGE] == B_USED_AT_RANDOM)
        DO(x, fsdp_set_reduce_scatter_unused_params(x->model, NULL, 1));
    if (axis[B_STAY] == 1) DO(x, fsdp_set_reshard_after_backward(x->model, NULL, 0));
}

/* Fills a block, which has whole rows of dim 0, consecutive ones, and as many as fit into fill_bytes. */
static void start_values(void *user, const fsdp_param_view *block) {
    rank_state *x = (rank_state *)user;
    const b_param *p = &x->c->param[block->index];
    const int64_t bytes = block->numel * (int64_t)fsdp_dtype_size(block->dtype);
    const int64_t first = p->shard_dim ? 0 : b_chunk(p, x->c->shards) * x->shard;
    EXPECT(x, block->numel == lab_numel(block->ndim, block->local_shape) && block->numel > 0,
           "block of %d", block->index);
    EXPECT(x, block->start[0] == (block->ordinal == x->ordinal ? x->row : first),
           "rows are not consecutive");
    EXPECT(x, block->local_shape[0] == 1 || bytes <= x->fill_bytes, "a block of %lld bytes",
           (long long)bytes);
    x->ordinal = block->ordinal, x->row = block->start[0] + block->local_shape[0], x->blocks++;
    for (int64_t k = 0; k < block->numel; k++)
        b_put(block->data, block->dtype, k,
              x->truth->value[0][block->index][fsdp_view_index(block, k)]);
}

/* A stored shard, or its gradient: my elements of `full`, and zeros behind them. */
static void check_shard(const rank_state *x, int i, const void *data, fsdp_dtype dtype,
                        const double *full, const char *what) {
    const b_param *p = &x->c->param[i];
    int64_t mine = b_local_numel(p, x->c->shards, x->shard);
    int64_t stored = p->outer * b_chunk(p, x->c->shards) * p->inner, seen = 0;
    for (int64_t e = 0; e < p->numel; e++) {
        int owner;
        int64_t at = b_local(p, x->c->shards, e, &owner);
        if (owner != x->shard) continue;
        EXPECT(x, b_get(data, dtype, at) == b_bits(dtype, full[e]),
               "%s %d element %lld is %llx, expected %llx (%g)", what, i, (long long)e,
               (unsigned long long)b_get(data, dtype, at),
               (unsigned long long)b_bits(dtype, full[e]), full[e]);
        seen++;
    }
    EXPECT(x, seen == mine, "%s %d: the model is wrong", what, i);
    for (int64_t k = mine; k < stored; k++)
        EXPECT(x, b_get(data, dtype, k) == 0, "%s %d: padding %lld of %lld is not zero", what, i,
               (long long)(k - mine), (long long)(stored - mine));
}

static fsdp_dtype grad_dtype(const rank_state *x, int i) {
    fsdp_dtype asked = b_floats[x->c->axis[B_GRAD]];
    return asked ? asked : x->c->param[i].dtype;
}

static void check_view(const rank_state *x, int i, fsdp_param_view *v) {
    const b_param *p = &x->c->param[i];
    memset(v, 0, sizeof *v);
    DO(x, fsdp_param_view_get(x->unit, i, v));
    EXPECT(x, v->dtype == p->dtype && v->requires_grad == !p->frozen, "view %d", i);
    EXPECT(x, v->numel == b_local_numel(p, x->c->shards, x->shard), "view %d: %lld elements", i,
           (long long)v->numel);
    EXPECT(x, v->local_shape[p->shard_dim] == (v->numel ? b_rows(p, x->c->shards, x->shard) : 0),
           "view %d: %lld rows", i, (long long)v->local_shape[p->shard_dim]);
    EXPECT(x, v->shard != NULL, "view %d: no shard", i);
    EXPECT(x, p->frozen || v->grad_dtype == grad_dtype(x, i), "view %d: gradient is %s", i,
           fsdp_dtype_name(v->grad_dtype));
}

/* All shards after `step` steps. */
static void check_shards(const rank_state *x, int step) {
    for (int i = 0; i < x->c->count; i++) {
        fsdp_param_view v;
        check_view(x, i, &v);
        check_shard(x, i, v.shard, v.dtype, x->truth->value[step][i], "shard");
    }
}

/* The elements of a shard and of its gradient have equal numbers in the model's flat memory. */
static void check_offset(const rank_state *x, const fsdp_param_view *v) {
    fsdp_flat flat = FSDP_ZERO;
    DO(x, fsdp_model_flat(x->model, v->dtype, &flat));
    const size_t at = (size_t)((const char *)v->shard - (const char *)flat.shards) /
                      fsdp_dtype_size(v->dtype);
    EXPECT(x,
           (const char *)v->shard_grad ==
               (const char *)flat.grads + at * fsdp_dtype_size(v->grad_dtype),
           "the gradient of %d is not where its shard is", v->index);
}

/* All gradients after a step; and that nothing else is in the flat gradients. */
static void check_grads(const rank_state *x, int step) {
    int64_t expected[FSDP_DTYPE_COUNT] = {0};
    for (int i = 0; i < x->c->count; i++) {
        const b_param *p = &x->c->param[i];
        const double *full = x->truth->average[step][i];
        fsdp_param_view v;
        int owner, has = x->truth->has[step][i];
        check_view(x, i, &v);
        EXPECT(x, (v.shard_grad != NULL) == has, "parameter %d has %s gradient", i,
               has ? "no" : "a");
        if (!has) continue;
        check_shard(x, i, v.shard_grad, v.grad_dtype, full, "gradient");
        if (v.numel > 0) check_offset(x, &v);
        for (int64_t e = 0; e < p->numel; e++) {
            b_local(p, x->c->shards, e, &owner);
            expected[p->dtype] += owner == x->shard && b_bits(v.grad_dtype, full[e]) != 0;
        }
    }
    for (int i = 0; i < x->c->count; i++) {
        fsdp_flat flat;
        fsdp_dtype dtype = x->c->param[i].dtype;
        int64_t found = 0;
        memset(&flat, 0, sizeof flat);
        if (x->c->param[i].frozen) continue;
        DO(x, fsdp_model_flat(x->model, dtype, &flat));
        for (int64_t k = 0; k < flat.numel; k++)
            found += b_get(flat.grads, flat.grad_dtype, k) != 0;
        EXPECT(x, found == expected[dtype],
               "flat gradients of %s: %lld elements are not zero, expected %lld",
               fsdp_dtype_name(dtype), (long long)found, (long long)expected[dtype]);
    }
}

/* The gathered parameters, after `step` steps. */
/* Loads the values before the model has a layout. */
static void load_early(const rank_state *x) {
    for (int i = 0; i < x->c->count; i++) {
        const b_param *p = &x->c->param[i];
        unsigned char full[8 * B_NUMEL];
        for (int64_t e = 0; e < p->numel; e++) b_put(full, p->dtype, e, x->truth->value[0][i][e]);
        DO(x, fsdp_param_load(x->unit, i, full));
    }
}

static void check_data(const rank_state *x, int step, const char *when) {
    EXPECT(x, x->readable == fsdp_data(x->unit, 0), "%s: the callback has another address", when);
    for (int i = 0; i < x->c->count; i++) {
        const double *full = x->truth->value[step][i];
        const void *data = fsdp_data(x->unit, i);
        EXPECT(x, data != NULL, "%s: no data: %s", when, fsdp_last_error(the_world(x)));
        for (int64_t e = 0; e < x->c->param[i].numel; e++)
            EXPECT(x, b_get(data, x->gathered[i], e) == b_bits(x->gathered[i], full[e]),
                   "%s: parameter %d element %lld is %llx, expected %llx (%g)", when, i,
                   (long long)e, (unsigned long long)b_get(data, x->gathered[i], e),
                   (unsigned long long)b_bits(x->gathered[i], full[e]), full[e]);
    }
}

static void forward(const rank_state *x, int step) {
    DO(x, fsdp_pre_forward(x->unit));
    check_data(x, step, "forward");
    DO(x, fsdp_post_forward(x->unit));
    EXPECT(x, (fsdp_unit_storage(x->unit) == FSDP_STORAGE_UNSHARDED) == (x->readable != NULL),
           "storage %d, and the callback says otherwise", (int)fsdp_unit_storage(x->unit));
}

/* What a kernel does. */
static void backward(const rank_state *x, int m) {
    DO(x, fsdp_pre_backward(x->unit));
    check_data(x, x->c->step_of[m], "backward");
    for (int i = 0; i < x->c->count; i++) {
        const b_param *p = &x->c->param[i];
        const signed char *add = x->truth->grad[m][x->rank][i];
        if (p->frozen && x->c->number % 8 == 0)
            EXPECT(x, fsdp_grad(x->unit, i) == NULL, "frozen parameter %d has a gradient", i);
        if (!(p->used[m] >> x->rank & 1)) continue;
        void *grad = fsdp_grad(x->unit, i);
        EXPECT(x, grad != NULL, "no gradient of %d: %s", i, fsdp_last_error(the_world(x)));
        for (int64_t e = 0; e < p->numel; e++) {
            b_put(grad, x->gathered[i], e, b_value(grad, x->gathered[i], e) + add[e]);
        }
    }
    DO(x, fsdp_post_backward(x->unit));
}

static void finalize(const rank_state *x) { DO(x, fsdp_finalize_backward(x->model)); }

/* The microbatches of one step. */
static void train(const rank_state *x, int step) {
    int mode = step ? B_ONE : x->c->axis[B_MICRO], first = step ? x->c->micros - 1 : 0;
    if (mode == B_FORWARDS) {
        forward(x, step);
        forward(x, step);
        backward(x, first);
        backward(x, first + 1);
        finalize(x);
        return;
    }
    if (mode == B_SYNC_LAST || mode == B_LEFT)
        DO(x, fsdp_set_requires_gradient_sync(x->model, NULL, 0));
    if (mode == B_PARTIAL) DO(x, fsdp_set_requires_all_reduce(x->model, NULL, 0));
    if (mode != B_ONE && x->c->number % 2) DO(x, fsdp_set_is_last_backward(x->model, 0));
    forward(x, step);
    backward(x, first);
    finalize(x);
    if (mode == B_ONE) return;
    DO(x, fsdp_set_requires_gradient_sync(x->model, NULL, 1));
    DO(x, fsdp_set_requires_all_reduce(x->model, NULL, 1));
    DO(x, fsdp_set_is_last_backward(x->model, 1));
    if (mode != B_LEFT) {
        forward(x, step);
        backward(x, first + 1);
    }
    finalize(x);
}

/* What the optimizer does, where there are gradients: the sums are those of the model by now. */
static void update(const rank_state *x, int step) {
    for (int i = 0; i < x->c->count; i++) {
        fsdp_param_view v;
        check_view(x, i, &v);
        for (int64_t k = 0; v.shard_grad && k < v.numel; k++)
            b_put(v.shard, v.dtype, k, x->truth->value[step + 1][i][fsdp_view_index(&v, k)]);
    }
    DO(x, fsdp_params_changed(x->model));
}

/* Predictions are of a step of one microbatch that reduces its gradients. Others may need more for
   reductions; and less if nothing was used. */
static void check_memory(const rank_state *x, const fsdp_memory *predicted, int exact) {
    fsdp_memory now;
    int64_t sum = 0;
    int one = x->c->axis[B_MICRO] == B_ONE, some = x->c->axis[B_USAGE] >= B_USED_NOT_FIRST;
    memset(&now, 0, sizeof now);
    DO(x, fsdp_model_memory(x->model, &now));
    for (int k = 0; k < FSDP_POOL_COUNT; k++) {
        int reduces = k == FSDP_POOL_REDUCE_IN || k == FSDP_POOL_REDUCE_OUT;
        if (x->c->ranks == 1 && k == FSDP_POOL_GRAD) reduces = 1; // else the shard's own gradient
        int64_t more = now.pool_bytes[k] - predicted->pool_bytes[k];
        int more_slots = now.pool_slots[k] - predicted->pool_slots[k];
        sum += now.pool_bytes[k];
        if (reduces && some && more < 0 && more_slots < 0) continue;
        EXPECT(x, reduces && !(exact && one) ? more >= 0 && more_slots >= 0 : !more && !more_slots,
               "%s: %lld bytes in %d slots, predicted %lld in %d", fsdp_pool_name(k),
               (long long)now.pool_bytes[k], now.pool_slots[k], (long long)predicted->pool_bytes[k],
               predicted->pool_slots[k]);
    }
    EXPECT(x, now.total_bytes == sum, "%lld bytes in all, %lld in pools",
           (long long)now.total_bytes, (long long)sum);
}

/* Each parameter and its gradient as one tensor. */
static void check_full(const rank_state *x) {
    static const size_t most = 8 * B_NUMEL + 1;
    char *full = (char *)malloc(most);
    int last = x->c->steps - 1;
    CHECK(full != NULL);
    for (int i = 0; i < x->c->count; i++) {
        const b_param *p = &x->c->param[i];
        for (int grad = 0; grad < 2 - p->frozen; grad++) {
            fsdp_dtype dtype = grad ? grad_dtype(x, i) : p->dtype;
            const double *expected = grad ? x->truth->average[last][i]
                                          : x->truth->value[last + 1][i];
            memset(full, 0x5a, most);
            DO(x,
               grad ? fsdp_param_full_grad(x->unit, i, full) : fsdp_param_full(x->unit, i, full));
            for (int64_t e = 0; e < p->numel; e++)
                EXPECT(x, b_get(full, dtype, e) == b_bits(dtype, expected[e]),
                       "full %s %d element %lld is %llx, expected %g", grad ? "gradient" : "tensor",
                       i, (long long)e, (unsigned long long)b_get(full, dtype, e), expected[e]);
        }
    }
    free(full);
}

/* Loads other values, of any bits: NaN, too; and gathers them. One rank passes no memory. */
static void check_load(const rank_state *x) {
    for (int i = 0; i < x->c->count; i++) {
        const size_t nbytes = (size_t)x->c->param[i].numel * fsdp_dtype_size(x->c->param[i].dtype);
        unsigned char full[8 * B_NUMEL], got[8 * B_NUMEL + 1];
        for (size_t b = 0; b < nbytes; b++)
            full[b] = (unsigned char)lab_hash(x->c->seed, (uint64_t)i, b, 7);
        got[nbytes] = 0x77;
        DO(x, fsdp_param_load(x->unit, i, full));
        const int none = x->c->ranks > 1 && (x->rank + i) % x->c->ranks == 0;
        DO(x, fsdp_param_full(x->unit, i, none ? NULL : got));
        EXPECT(x, none || !memcmp(full, got, nbytes), "parameter %d is not what was loaded", i);
        EXPECT(x, got[nbytes] == 0x77, "parameter %d: too much was written", i);
    }
}

/* The gradients of frozen parameters are refused; those of the others are zeros after zero_grad. */
static void check_no_grad(const rank_state *x) {
    DO(x, fsdp_zero_grad(x->model));
    for (int i = 0; i < x->c->count; i++) {
        char full[8 * B_NUMEL];
        fsdp_param_view v;
        memset(full, 0x5a, sizeof full);
        const fsdp_status status = fsdp_param_full_grad(x->unit, i, full);
        check_view(x, i, &v);
        EXPECT(x, !v.shard_grad, "parameter %d has a gradient after zero_grad", i);
        EXPECT(x, status == (x->c->param[i].frozen ? FSDP_ERR_INVALID_STATE : FSDP_OK),
               "gradient of %d: %s", i, fsdp_last_error(the_world(x)));
        for (int64_t e = 0; e < x->c->param[i].numel && !status; e++)
            EXPECT(x, b_get(full, grad_dtype(x, i), e) == 0, "gradient %d is not zero", i);
    }
}

/* The library's place of this rank is that of the case. */
static void check_info(const rank_state *x) {
    fsdp_mesh_info info = FSDP_ZERO;
    DO(x, fsdp_unit_mesh_info(x->unit, &info));
    EXPECT(x, info.shard_mesh_size == x->c->shards && info.shard_mesh_rank == x->shard,
           "rank %d of %d shards", info.shard_mesh_rank, info.shard_mesh_size);
    EXPECT(x, info.replicate_mesh_size == x->c->replicas, "%d replicas", info.replicate_mesh_size);
    EXPECT(x, info.mesh && (info.shard_comm != NULL) == (x->c->shards > 1), "mesh or group");
}

static void begin_case(rank_state *x) {
    int64_t numel = 0;
    build(x);
    check_info(x);
    memset(&x->predicted, 0, sizeof x->predicted);
    const int early = x->c->number % 4 == 3;
    if (early) load_early(x);
    DO(x, fsdp_model_predict(x->model, &x->predicted));
    if (!early) DO(x, fsdp_init_params(x->model, start_values, x));
    for (int i = 0; i < x->c->count; i++)
        numel += b_local_numel(&x->c->param[i], x->c->shards, x->shard);
    EXPECT(x, (numel > 0 && !early) == (x->blocks > 0), "%d blocks were filled", x->blocks);
    check_shards(x, 0);
}
static void step_case(rank_state *x, int step) {
    const b_case *c = x->c;
    if (step >= c->steps) return;
    train(x, step);
    check_memory(x, &x->predicted, step == 0 || c->axis[B_SECOND] == 1);
    check_grads(x, step);
    check_shards(x, step);
    if (c->axis[B_STAY] == 2) DO(x, fsdp_unshard(x->unit)); // stale by the update
    update(x, step);
    if (c->axis[B_SECOND] == 1 && step == 0) DO(x, fsdp_zero_grad(x->model));
}
static void end_case(rank_state *x) {
    const b_case *c = x->c;
    check_shards(x, c->steps);
    DO(x, fsdp_set_grad_enabled(x->model, 0));
    forward(x, c->steps);
    if (c->number % 4 == 0) check_full(x);
    if (c->number % 4 == 1) check_load(x);
    if (c->number % 4 == 2) check_no_grad(x);
    fsdp_model_destroy(x->model);
    EXPECT(x, !x->readable, "the callback has an address of a model that has ended");
    x->model = NULL;
    x->unit = NULL;
}
static void run_case(rank_state *x) {
    begin_case(x);
    for (int step = 0; step < x->c->steps; step++) step_case(x, step);
    end_case(x);
}

/* ---- a backend whose ranks are fibers -------------------------------------------------------- */

typedef struct fiber_group {
    int size, arrived, joined, left;
    uint64_t turn; // collectives done
    const fsdp_coll *coll[B_RANKS];
    struct fiber_comm *member[B_RANKS];
    const struct fiber_group *parent; // from which split, and which color, it comes
    int nth, color;
    struct fiber_group *next;
} fiber_group;

typedef struct fiber_comm {
    fiber_group *group;
    int index, splits;
    struct fiber_comm *world;
    uint64_t history; // of what was allocated and freed: equal on all ranks
    int64_t live;
} fiber_comm;

typedef struct {
    ucontext_t context;
    char *stack;
    int busy;
    fiber_comm *comm[2]; // of the two worlds
    rank_state state;
} fiber;

/* Worlds of one size, with all their ranks. */
typedef struct {
    int ranks, now, idle_turns;
    fiber rank[B_RANKS];
    ucontext_t caller;
    fiber_group *groups;
    void (*job)(rank_state *x);
} fiber_hub;

static fiber_hub hubs[B_RANKS + 1]; // by number of ranks
static fiber_hub *hub;              // the one that runs
enum { FIBER_STACK = 256 * 1024 };

/* Goes on with the next rank that has something to do, or with the caller. */
static void fiber_next(void) {
    int from = hub->now;
    ucontext_t *to = &hub->caller;
    for (int k = 1; k <= hub->ranks; k++) {
        int next = (from + k) % hub->ranks;
        if (!hub->rank[next].busy) continue;
        if (next == from) return;
        hub->now = next;
        to = &hub->rank[next].context;
        break;
    }
    CHECK_EQ_INT(swapcontext(&hub->rank[from].context, to), 0);
}

static void fiber_main(void) {
    for (;;) {
        hub->job(&hub->rank[hub->now].state);
        hub->rank[hub->now].busy = 0;
        hub->idle_turns = 0;
        fiber_next();
    }
}

/* Runs the job on every rank of the hub. */
static void fiber_run(fiber_hub *h, void (*job)(rank_state *x)) {
    hub = h;
    h->job = job;
    h->now = h->idle_turns = 0;
    for (int r = 0; r < h->ranks; r++) h->rank[r].busy = 1;
    CHECK_EQ_INT(swapcontext(&h->caller, &h->rank[0].context), 0);
}

static fiber_comm *fiber_of(fsdp_comm *comm) { return (fiber_comm *)(void *)comm; }

/* Joins the group of this split and color, which the first rank to come makes. */
static fiber_comm *fiber_join(const fiber_group *parent, int nth, int color, int size, int index) {
    fiber_group *g = hub->groups;
    fiber_comm *c = (fiber_comm *)lab_zeros(1, sizeof *c);
    while (g && (g->parent != parent || g->nth != nth || g->color != color)) g = g->next;
    if (!g) {
        g = (fiber_group *)lab_zeros(1, sizeof *g);
        g->parent = parent;
        g->nth = nth;
        g->color = color;
        g->size = size;
        g->next = hub->groups;
        hub->groups = g;
    }
    CHECK(g->size == size && !g->member[index]);
    g->member[index] = c;
    g->joined++;
    c->group = g;
    c->index = index;
    return c;
}

/* boot->user: NULL, or the world without fused reductions. */
static fsdp_status fiber_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **world) {
    int plain = boot->user != NULL;
    fiber_comm *c = fiber_join(NULL, plain, 0, boot->size, boot->rank);
    c->world = hub->rank[boot->rank].comm[plain] = c;
    caps->kinds = 1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER |
                  1u << FSDP_OP_ALL_REDUCE | 1u << FSDP_OP_BROADCAST;
    caps->flags = plain ? 0 : FSDP_CAP_FUSED_REDUCE;
    caps->comm_threads = 1;
    *world = (fsdp_comm *)(void *)c;
    return FSDP_OK;
}

/* Need not wait for the others: whoever uses the group does. */
static fsdp_status fiber_split(fsdp_comm *parent, const fsdp_group *group, fsdp_comm **out) {
    fiber_comm *p = fiber_of(parent), *c = NULL;
    int nth = ++p->splits;
    if (group->color >= 0) {
        c = fiber_join(p->group, nth, group->color, group->size, group->index);
        c->world = p->world;
    }
    *out = (fsdp_comm *)(void *)c;
    return FSDP_OK;
}

static void fiber_close(fsdp_comm *comm) {
    fiber_comm *c = fiber_of(comm);
    fiber_group *g = c->group;
    g->member[c->index] = NULL;
    g->left++;
    for (fiber_group **at = &hub->groups; *at && g->left == g->size; at = &(*at)->next) {
        if (*at != g) continue;
        *at = g->next;
        free(g);
        break;
    }
    free(c);
}

/* Elements of any dtype as doubles, and back. */
static void fiber_load(double *to, const void *from, size_t at, fsdp_dtype dtype, size_t count) {
    const char *p = (const char *)from + at * fsdp_dtype_size(dtype);
    for (size_t k = 0; k < count && (dtype == FSDP_I32 || dtype == FSDP_I64); k++) {
        int64_t wide = 0;
        int32_t narrow = 0;
        memcpy(dtype == FSDP_I32 ? (void *)&narrow : (void *)&wide, p + k * fsdp_dtype_size(dtype),
               fsdp_dtype_size(dtype));
        to[k] = (double)wide + (double)narrow;
    }
    if (fsdp_dtype_is_float(dtype)) CHECK_OK(fsdp_convert(to, FSDP_F64, p, dtype, (int64_t)count));
}
static void fiber_store(const double *from, void *to, size_t at, fsdp_dtype dtype, size_t count) {
    char *p = (char *)to + at * fsdp_dtype_size(dtype);
    for (size_t k = 0; k < count && (dtype == FSDP_I32 || dtype == FSDP_I64); k++) {
        int64_t wide = (int64_t)from[k];
        int32_t narrow = (int32_t)from[k];
        memcpy(p + k * fsdp_dtype_size(dtype), dtype == FSDP_I32 ? (void *)&narrow : (void *)&wide,
               fsdp_dtype_size(dtype));
    }
    if (fsdp_dtype_is_float(dtype))
        CHECK_OK(fsdp_convert(p, dtype, from, FSDP_F64, (int64_t)count));
}

/* Room for what all members bring, so that a result never overwrites what another still reads. */
static double *fiber_room(size_t count) {
    static double *room;
    static size_t size;
    if (count > size) {
        size = 2 * count + 1000;
        free(room);
        room = (double *)malloc(size * sizeof *room);
        CHECK(room != NULL);
    }
    return room;
}

static void fiber_gather(const fiber_group *g) {
    for (uint32_t i = 0; i < g->coll[0]->num_segs; i++) {
        const fsdp_seg *s = &g->coll[0]->segs[i];
        size_t size = fsdp_dtype_size(g->coll[0]->dtype), part = (size_t)s->count * size;
        char *all = (char *)fiber_room((part * (size_t)g->size + 7) / 8);
        for (int k = 0; k < g->size; k++) {
            const fsdp_coll *c = g->coll[k];
            const char *from = c->in_place ? (const char *)c->dst + (size_t)s->full * size +
                                                 (size_t)k * part
                                           : (const char *)c->src + (size_t)s->shard * size;
            memcpy(all + (size_t)k * part, from, part);
        }
        for (int k = 0; k < g->size; k++)
            memcpy((char *)g->coll[k]->dst + (size_t)s->full * size, all, part * (size_t)g->size);
    }
}

static void fiber_scatter(const fiber_group *g) {
    const fsdp_coll *c = g->coll[0];
    size_t total = (size_t)c->count * (size_t)g->size, at = 0;
    double *sums = fiber_room(total + (size_t)c->count), *one = sums + total;
    for (uint32_t i = 0; i < c->num_segs; i++) {
        const fsdp_seg *s = &c->segs[i];
        size_t count = (size_t)s->count;
        for (int me = 0; me < g->size; me++, at += count)
            for (int k = 0; k < g->size; k++) {
                fiber_load(one, g->coll[k]->src, (size_t)s->full + (size_t)me * count, c->dtype,
                           count);
                for (size_t e = 0; e < count; e++) sums[at + e] = one[e] + (k ? sums[at + e] : 0);
            }
    }
    at = 0;
    for (uint32_t i = 0; i < c->num_segs; i++) {
        const fsdp_seg *s = &c->segs[i];
        size_t count = (size_t)s->count;
        for (int me = 0; me < g->size; me++, at += count) {
            void *dst = g->coll[me]->dst;
            if (c->accumulate) fiber_load(one, dst, (size_t)s->shard, c->out_dtype, count);
            for (size_t e = 0; e < count; e++) {
                volatile double scaled = sums[at + e] * c->scale; // rounded before it is added
                sums[at + e] = scaled + (c->accumulate ? one[e] : 0);
            }
            fiber_store(sums + at, dst, (size_t)s->shard, c->out_dtype, count);
        }
    }
}

static void fiber_reduce(const fiber_group *g) {
    const fsdp_coll *c = g->coll[0];
    size_t count = (size_t)c->count;
    double *sum = fiber_room(2 * count), *one = sum + count;
    for (int k = 0; k < g->size; k++) {
        fiber_load(one, g->coll[k]->src, 0, c->dtype, count);
        for (size_t e = 0; e < count; e++) {
            int better = c->redop == FSDP_MAX ? one[e] > sum[e] : one[e] < sum[e];
            if (!k || (c->redop != FSDP_SUM && better)) sum[e] = one[e];
            else if (c->redop == FSDP_SUM) sum[e] += one[e];
        }
    }
    for (size_t e = 0; e < count; e++) sum[e] *= c->scale;
    for (int k = 0; k < g->size; k++) fiber_store(sum, g->coll[k]->dst, 0, c->dtype, count);
}

static void fiber_collective(const fiber_group *g) {
    const fsdp_coll *a = g->coll[0];
    for (int k = 1; k < g->size; k++) {
        const fsdp_coll *b = g->coll[k];
        CHECK_MSG(a->kind == b->kind && a->dtype == b->dtype && a->out_dtype == b->out_dtype &&
                      a->count == b->count && a->fingerprint == b->fingerprint &&
                      a->num_segs == b->num_segs && a->redop == b->redop && a->root == b->root &&
                      a->in_place == b->in_place && a->accumulate == b->accumulate &&
                      !(a->scale < b->scale) && !(a->scale > b->scale),
                  "ranks disagree: %s of %s and %s of %s [case %lld]", fsdp_op_name(a->kind),
                  a->what, fsdp_op_name(b->kind), b->what, (long long)hub->rank[0].state.c->number);
        CHECK_MSG(g->member[0]->world->history == g->member[k]->world->history,
                  "ranks have allocated in another order, before %s of %s [case %lld]",
                  fsdp_op_name(a->kind), a->what, (long long)hub->rank[0].state.c->number);
    }
    if (a->kind == FSDP_OP_ALL_GATHER) fiber_gather(g);
    else if (a->kind == FSDP_OP_REDUCE_SCATTER) fiber_scatter(g);
    else if (a->kind == FSDP_OP_ALL_REDUCE) fiber_reduce(g);
    for (int k = 0; a->kind == FSDP_OP_BROADCAST && k < g->size; k++)
        if (k != a->root)
            memcpy(g->coll[k]->dst, g->coll[a->root]->dst,
                   (size_t)a->count * fsdp_dtype_size(a->dtype));
}

static fsdp_status fiber_coll(fsdp_comm *comm, const fsdp_coll *coll) {
    fiber_comm *c = fiber_of(comm);
    fiber_group *g = c->group;
    uint64_t turn = g->turn;
    g->coll[c->index] = coll;
    if (++g->arrived == g->size) {
        fiber_collective(g);
        g->arrived = 0;
        g->turn++;
        hub->idle_turns = 0;
        return FSDP_OK;
    }
    while (g->turn == turn) {
        CHECK_MSG(hub->idle_turns++ < 4 * hub->ranks, "nobody comes to %s of %s [case %lld]",
                  fsdp_op_name(coll->kind), coll->what, (long long)hub->rank[0].state.c->number);
        fiber_next();
    }
    return FSDP_OK;
}

static fsdp_status fiber_alloc(fsdp_comm *world, size_t size, void **ptr) {
    fiber_comm *c = fiber_of(world);
    c->history = lab_hash(c->history, size, 1, 0);
    c->live++;
    *ptr = calloc(1, size + 1);
    return *ptr ? FSDP_OK : FSDP_ERR_OUT_OF_MEMORY;
}
static void fiber_free(fsdp_comm *world, void *ptr, size_t size) {
    fiber_comm *c = fiber_of(world);
    c->history = lab_hash(c->history, size, 2, 0);
    c->live -= ptr != NULL;
    free(ptr);
}
static const char *fiber_error(fsdp_comm *comm) {
    (void)comm;
    return "fibers do not fail";
}
static void fiber_abort(fsdp_comm *world, fsdp_status status, const char *why) {
    (void)world;
    CHECK_MSG(0, "aborted: %s: %s", fsdp_status_name(status), why);
}
static const fsdp_comm_ops fiber_ops = {
    FSDP_COMM_VERSION, sizeof(fsdp_comm_ops), "fibers",   fiber_open,  fiber_split, fiber_close,
    fiber_coll,        fiber_alloc,           fiber_free, fiber_error, fiber_abort, NULL};

/* ---- worlds and meshes ----------------------------------------------------------------------- */

static const fsdp_mesh *make_mesh(fsdp_world *w, int outer, int inner, const int32_t *ranks,
                                  int named) {
    static const char *const names[2] = {"replicate", "shard"};
    const int32_t shape[2] = {outer, inner};
    return lab_mesh(w, 2, shape, named ? names : NULL, ranks);
}

/* Makes the meshes of one of a rank's worlds: in order, reversed, with dims swapped, and as slices of three dims. */
static void make_meshes(rank_state *x, int plain) {
    static const char *const names[3] = {"replicate", "one", "shard"};
    static const int32_t ends[2] = {0, 2};
    fsdp_world *w = x->world[plain];
    int32_t back[B_RANKS];
    for (int r = 0; r < x->ranks; r++)
        back[r] = x->members ? x->members[x->ranks - 1 - r] : x->ranks - 1 - r;
    x->line[plain] = lab_mesh(w, 1, &x->ranks, &names[2], x->members);
    for (int s = 0; s < b_axis_counts[B_SPLIT]; s++) {
        int shards = b_splits[s].shards, replicas = b_splits[s].replicas;
        if (shards * replicas != x->ranks) continue;
        const int32_t shape[3] = {replicas, 1, shards};
        fsdp_mesh *slice = NULL;
        x->mesh[plain][s] = make_mesh(w, replicas, shards, x->members, 1);
        x->reversed[plain][s] = make_mesh(w, replicas, shards, back, 1);
        x->swapped[plain][s] = make_mesh(w, shards, replicas, x->members, 0);
        CALL(w, fsdp_mesh_slice(lab_mesh(w, 3, shape, names, x->members), ends, 2, &slice));
        x->sliced[plain][s] = slice;
    }
}

static void close_worlds(rank_state *x) {
    for (int plain = 0; plain < 2; plain++) CALL(NULL, fsdp_shutdown(x->world[plain]));
}

static void fiber_begin(rank_state *x) {
    fsdp_world_desc d = w_desc(x->rank, x->ranks, NULL, "fibers", 0);
    d.comm_ops = &fiber_ops;
    for (int plain = 0; plain < 2; plain++) {
        d.user = plain ? x : NULL;
        CALL(NULL, fsdp_init(&d, &x->world[plain]));
        make_meshes(x, plain);
    }
}

static void fiber_case(rank_state *x) {
    const fiber_comm *comm = hub->rank[x->rank].comm[x->c->axis[B_PLAIN]]; // NULL: one rank
    int64_t live = comm ? comm->live : 0;
    run_case(x);
    EXPECT(x, !comm || comm->live == live, "%lld blocks of device memory are left",
           (long long)(comm->live - live));
}

static void fiber_make(fiber *f) { // alone, as getcontext may return twice
    f->stack = (char *)malloc(FIBER_STACK);
    CHECK(f->stack != NULL);
    CHECK_EQ_INT(getcontext(&f->context), 0);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = FIBER_STACK;
    makecontext(&f->context, fiber_main, 0);
}

static void open_hub(int ranks) {
    fiber_hub *h = &hubs[ranks];
    h->ranks = ranks;
    for (int r = 0; r < ranks; r++) {
        h->rank[r].state.rank = r;
        h->rank[r].state.ranks = ranks;
        fiber_make(&h->rank[r]);
    }
    fiber_run(h, fiber_begin);
}

static void close_hub(int ranks) {
    fiber_run(&hubs[ranks], close_worlds);
    for (int r = 0; r < ranks; r++) free(hubs[ranks].rank[r].stack);
    CHECK(!hubs[ranks].groups);
}

/* ---- which cases ----------------------------------------------------------------------------- */

typedef struct {
    int64_t cases[B_RANKS + 1]; // run so far, by number of ranks
    unsigned char seen[B_AXES][B_AXES][B_VALUES][B_VALUES];
} coverage;

static void note_case(coverage *seen, const b_case *c) {
    __atomic_add_fetch(&seen->cases[c->ranks], 1, __ATOMIC_RELAXED);
    for (int a = 0; a < B_AXES; a++)
        for (int b = 0; b < B_AXES; b++) seen->seen[a][b][c->axis[a]][c->axis[b]] = 1;
}

/* -1: all. */
static int64_t only_case(void) {
    const char *text = getenv("FSDP_CASE");
    return text && *text ? strtoll(text, NULL, 10) : -1;
}

enum { PLAYERS = 2 };
enum { SOME_CASES = 60000, WALK_MS = 420000 };

typedef struct {
    coverage *seen;
    int64_t from, end; // case numbers
    uint64_t share;    // one of so many is run
    int64_t least;     // up to this number all run; those behind it while there is time
    int64_t until_ms;
} walk;

static long long crash_case = -1;
static void on_crash(int sig) {
    char text[100];
    int length = snprintf(text, sizeof text, "signal %d in case %lld\n", sig, crash_case);
    h_write(text, length);
    signal(sig, SIG_DFL);
    raise(sig);
}

/* One process: its part of the cases, with the ranks of all worlds in it. */
static void play(int player, int players, void *arg) {
    const walk *w = (const walk *)arg;
    static b_case c;
    static b_truth truth;
    h_rank = -1; // of the harness: a failure names the rank of the world
    signal(SIGSEGV, on_crash);
    signal(SIGABRT, on_crash);
    for (int n = 1; n <= B_RANKS; n++) open_hub(n);
    for (int64_t k = w->from; k < w->end && (k < w->least || h_now_ms() < w->until_ms); k++) {
        uint64_t h = lab_hash((uint64_t)k, h_seed(), 23, 0);
        if (h % w->share || h / w->share % (uint64_t)players != (uint64_t)player) continue;
        b_make_case(&c, k, h_seed());
        b_make_truth(&c, &truth);
        crash_case = k;
        for (int r = 0; r < c.ranks; r++) {
            hubs[c.ranks].rank[r].state.c = &c;
            hubs[c.ranks].rank[r].state.truth = &truth;
        }
        fiber_run(&hubs[c.ranks], fiber_case);
        note_case(w->seen, &c);
    }
    for (int n = 1; n <= B_RANKS; n++) close_hub(n);
}

/* Each pair of values of two axes has come; prints what ran. */
static void report(const coverage *seen, int whole, int64_t ms) {
    int64_t pairs = 0, cases = 0;
    for (int n = 0; n <= B_RANKS; n++) cases += seen->cases[n];
    for (int a = 0; a < B_AXES; a++)
        for (int b = a + 1; b < B_AXES; b++)
            for (int va = 0; va < b_axis_counts[a]; va++)
                for (int vb = 0; vb < b_axis_counts[b]; vb++) {
                    if (b_impossible(a, va, b, vb)) continue;
                    pairs++;
                    CHECK_MSG(!whole || seen->seen[a][b][va][vb], "no case has %s=%d and %s=%d",
                              b_axis_names[a], va, b_axis_names[b], vb);
                }
    h_message("%lld cases (%lld %lld %lld %lld %lld %lld on 1 to 6 ranks), %lld a second",
              (long long)cases, (long long)seen->cases[1], (long long)seen->cases[2],
              (long long)seen->cases[3], (long long)seen->cases[4], (long long)seen->cases[5],
              (long long)seen->cases[6], (long long)(cases * 1000 / (ms + 1)));
    if (whole) h_message("all %lld pairs of values of two axes", (long long)pairs);
}

static void run_walk(int64_t from, int64_t end, uint64_t share, int whole) {
    walk w = {NULL, from, end, share, b_grid_size() + SOME_CASES, h_now_ms() + WALK_MS};
    int64_t start = h_now_ms(), only = only_case();
    w.seen = (coverage *)mmap(NULL, sizeof *w.seen, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK((void *)w.seen != MAP_FAILED);
    if (only >= 0) w.from = only, w.end = only + 1, w.share = 1;
    h_ranks_proc(only >= 0 ? 1 : PLAYERS, play, &w);
    report(w.seen, whole && only < 0, h_now_ms() - start);
    munmap(w.seen, sizeof *w.seen);
}

/* ---- on the shared-memory backend ------------------------------------------------------------ */

typedef struct {
    const char *name;
    int ranks, cases, lanes, processes;
    int size;                 // of the world, if some of its ranks do not train; else 0
    int32_t members[B_RANKS]; // and those that do
} place;

typedef struct {
    const place *at;
    int64_t cases;
    coverage *seen;
} real_walk;

static void next_case(const real_walk *w, rank_state *x, b_case *c, b_truth *truth,
                      int64_t *number) {
    do b_make_case(c, (*number)++, h_seed());
    while (c->ranks != w->at->ranks && only_case() < 0);
    b_make_truth(c, truth);
    x->c = c, x->truth = truth;
    if (!x->rank) note_case(w->seen, c);
}

/* Two models of one world in turn, of other cases. */
static void real_rank(lab_rank *r) {
    const real_walk *w = (const real_walk *)r->arg;
    fsdp_comm_ops plain = w_plain();
    rank_state *x = (rank_state *)lab_zeros(2, sizeof *x);
    b_case *c = (b_case *)lab_zeros(2, sizeof *c);
    b_truth *truth = (b_truth *)lab_zeros(2, sizeof *truth);
    const int64_t only = only_case();
    int64_t number = only >= 0 ? only : b_grid_size();
    x->rank = r->rank, x->ranks = w->at->ranks;
    if (w->at->size) {
        x->members = w->at->members;
        for (x->rank = 0; x->rank < x->ranks && x->members[x->rank] != r->rank;) x->rank++;
    }
    for (int k = 0; k < 2; k++) {
        x->world[k] = lab_world(r, k, w->at->lanes, k ? &plain : NULL);
        make_meshes(x, k);
    }
    x[1] = x[0];
    for (int64_t done = 0, models = 1; done < w->cases && x->rank < x->ranks; done += models) {
        models = only < 0 ? 3 - models : 1;
        for (int k = 0; k < models; k++)
            next_case(w, &x[k], &c[k], &truth[k], &number), begin_case(&x[k]);
        for (int step = 0; step < B_STEPS; step++)
            for (int k = 0; k < models; k++) step_case(&x[k], step);
        for (int k = 0; k < models; k++) end_case(&x[k]);
        if (only >= 0) break;
    }
    close_worlds(x);
    free(truth);
    free(c);
    free(x);
}

static void run_real(const place *at, int64_t cases) {
    real_walk w = {at, cases, NULL};
    lab_how how = FSDP_ZERO;
    const int64_t start = h_now_ms();
    w.seen = (coverage *)lab_shared(sizeof *w.seen);
    how.job = "exhaustive", how.bare = 1, how.processes = at->processes;
    lab_run(at->size ? at->size : at->ranks, &how, real_rank, &w);
    report(w.seen, 0, h_now_ms() - start);
    munmap(w.seen, sizeof *w.seen);
}

/* ---- the tests ------------------------------------------------------------------------------- */

TEST(exhaustive, shapes) { // of units of one parameter: a third of all
    if (W_SLOW) SKIP("sanitizers do not know fibers");
    run_walk(0, b_grid_size(), 3, 0);
}

TEST(exhaustive, walk) {
    if (W_SLOW) SKIP("sanitizers do not know fibers");
    run_walk(b_grid_size(), b_grid_size() + SOME_CASES, 1, 1);
}

// All those shapes, and up to a million others: as many as a busy machine runs in WALK_MS.
TEST(long_exhaustive, walk, SECONDS(1200) | NIGHT) {
    if (W_SLOW) SKIP("sanitizers do not know fibers");
    run_walk(0, 1200000, 1, 1);
}

static const place places[] = {
    {"N=1", 1, 2000, 0, 0, 0, {0}},
    {"N=2", 2, 1000, 0, 0, 0, {0}},
    {"N=3", 3, 300, 0, 0, 0, {0}},
    {"N=4", 4, 200, 0, 0, 0, {0}},
    {"N=5", 5, 80, 0, 0, 0, {0}},
    {"N=6", 6, 80, 0, 0, 0, {0}},
    {"N=1/lanes=1", 1, 300, 1, 0, 0, {0}},
    {"N=2/lanes=1", 2, 300, 1, 0, 0, {0}},
    {"N=3/lanes=2", 3, 80, 2, 0, 0, {0}},
    {"N=4/lanes=2", 4, 40, 2, 0, 0, {0}},
    {"N=2/processes", 2, 200, 0, 1, 0, {0}},
    {"N=3/processes", 3, 60, 1, 1, 0, {0}},
    {"N=2/of_3", 2, 200, 0, 0, 3, {2, 0}},
    {"N=4/of_6", 4, 60, 0, 0, 6, {4, 1, 0, 5}},
    {"N=4/processes/of_5", 4, 40, 0, 1, 5, {3, 1, 0, 4}},
};

TEST_P(exhaustive, ranks, places,
       BITS |
           (row->ranks > 3    ? MANY_RANKS
            : row->ranks == 2 ? VALGRIND
                              : 0) |
           (row->lanes ? 0 : GLOO)) {
    run_real(row, W_SLOW ? row->cases / 3 : row->cases);
}
TEST_P(long_exhaustive, ranks, places, SECONDS(300) | NIGHT) {
    run_real(row, row->cases * (W_SLOW ? 2 : 20));
}
