/* test_norm.c - the norm of all gradients and clipping on meshes of every form: all ways in which
   the dims of a mesh can shard, replicate, or do neither, for a model and for a unit with its own
   mesh info, compared with a sum over the distinct elements in one loop.
   SPDX-License-Identifier: MIT */
#define TAGS AT_NIGHT(ASAN)
#include "harness.h"
#include <math.h> // INFINITY, fabs, pow
#include "lab.h"

enum { UNITS = 2, PARAMS = 2, NUMEL_MAX = 15 };

/* Rows that no group of 2 to 8 ranks divides evenly; some ranks have none. */
static const struct {
    int32_t ndim, shard_dim;
    int64_t rows, cols;
} params[UNITS][PARAMS] = {{{2, 0, 5, 3}, {1, 0, 2, 1}}, {{2, 1, 2, 7}, {1, 0, 9, 1}}};

static int64_t numel_of(int u, int p) { return params[u][p].rows * params[u][p].cols; }

/* A mesh, and the dims that shard and replicate for each unit, as bit masks. Unit 0 is as the
   model. */
typedef struct layout {
    int ndim, numel;
    int32_t shape[3];
    int shard[UNITS], replicate[UNITS];
} layout;

/* Returns a position's coordinate along a set of dims, row-major; 0 along none. */
static int coord(const layout *l, int place, int set) {
    int at = 0;
    for (int d = l->ndim - 1, stride = 1; d >= 0; place /= l->shape[d--]) {
        if (!(set >> d & 1)) continue;
        at += place % l->shape[d] * stride;
        stride *= l->shape[d];
    }
    return at;
}

/* Returns a number that is equal for positions with shards or replicas of the same parameters. */
static int parameters_of(const layout *l, int u, int place) {
    return coord(l, place, ~(l->shard[u] | l->replicate[u]));
}

/* The gradient that a position writes: small integers, so that every sum is exact. The first part is
   one for all positions with the same parameters. */
static double common(int id, int u, int p, int64_t e) {
    return (double)((id * 31 + u * 17 + p * 5 + e * 7) % 23 - 11);
}
static double own(const layout *l, int u, int place) {
    return 2 * coord(l, place, l->shard[u]) + coord(l, place, l->replicate[u]);
}
static double written(const layout *l, int u, int p, int64_t e, int place) {
    return common(parameters_of(l, u, place), u, p, e) + own(l, u, place);
}

/* The positions that share a position's parameters: their number, and the sum of their own parts. */
typedef struct sharers {
    int id, num;
    double own;
} sharers;

static sharers sharers_of(const layout *l, int u, int place) {
    sharers s = {parameters_of(l, u, place), 0, 0};
    for (int i = 0; i < l->numel; i++)
        if (parameters_of(l, u, i) == s.id) s.num++, s.own += own(l, u, i);
    return s;
}
/* Returns the sum over these positions. */
static double gradient(sharers s, int u, int p, int64_t e) {
    return s.num * common(s.id, u, p, e) + s.own;
}

/* Computes the norm by definition: each distinct element once. */
static double norm_of(const layout *l, double power) {
    double sum = 0;
    for (int u = 0; u < UNITS; u++)
        for (int place = 0; place < l->numel; place++) {
            if (coord(l, place, l->shard[u]) || coord(l, place, l->replicate[u])) continue;
            const sharers s = sharers_of(l, u, place);
            for (int p = 0; p < PARAMS; p++)
                for (int64_t e = 0; e < numel_of(u, p); e++) {
                    const double g = fabs(gradient(s, u, p, e));
                    if (power < 1e300) sum += pow(g, power);
                    else if (g > sum) sum = g;
                }
        }
    return power < 1e300 ? pow(sum, 1 / power) : sum;
}

/* ---- a model on one rank --------------------------------------------------------------------- */

typedef struct rig {
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *u[UNITS];
} rig;

static fsdp_mesh *mesh_of(fsdp_world *w, const layout *l, const int32_t *ranks) {
    static const char *const names[3] = {"a", "b", "c"};
    return lab_mesh(w, l->ndim, l->shape, names, ranks);
}

static fsdp_mesh_info info_of(fsdp_world *w, const fsdp_mesh *mesh, int shard, int replicate) {
    fsdp_mesh_info info;
    const int kind = shard < 0       ? FSDP_MESH_INFO_DDP
                     : replicate < 0 ? FSDP_MESH_INFO_FSDP
                                     : FSDP_MESH_INFO_HSDP;
    CALL(w, fsdp_mesh_info_init(mesh, kind, shard, replicate, &info));
    return info;
}

static void add_unit(rig *x, int u, const fsdp_mesh *mesh, const fsdp_mesh_info *info) {
    static const char *const names[UNITS] = {"first", "second"};
    fsdp_param_desc p[PARAMS];
    fsdp_unit_desc d = FSDP_ZERO;
    for (int i = 0; i < PARAMS; i++) {
        p[i] = fsdp_mat(NULL, params[u][i].rows, params[u][i].cols);
        p[i].ndim = params[u][i].ndim;
        p[i].shard_dim = params[u][i].shard_dim;
    }
    d.name = names[u];
    d.params = p;
    d.num_params = PARAMS;
    d.mesh = mesh;
    d.mesh_info = info;
    CALL(x->w, fsdp_fully_shard(x->m, &d, &x->u[u]));
}

/* Runs forward and backward; every gradient is the sum over the members. */
static void backward(rig *x, const layout *l, int place) {
    CALL(x->w, fsdp_set_gradient_divide_factor(x->m, NULL, 1));
    for (int u = 0; u < UNITS; u++) CALL(x->w, fsdp_pre_forward(x->u[u]));
    for (int u = 0; u < UNITS; u++) CALL(x->w, fsdp_post_forward(x->u[u]));
    for (int u = 0; u < UNITS; u++) {
        CALL(x->w, fsdp_pre_backward(x->u[u]));
        for (int p = 0; p < PARAMS; p++) {
            float *grad = (float *)fsdp_grad(x->u[u], p);
            for (int64_t e = 0; e < numel_of(u, p); e++)
                grad[e] = (float)written(l, u, p, e, place);
        }
        CALL(x->w, fsdp_post_backward(x->u[u]));
    }
    CALL(x->w, fsdp_finalize_backward(x->m));
}

/* Checks this rank's gradients against the expected ones times a factor. */
static void check_grads(const rig *x, const layout *l, int place, double factor) {
    fsdp_param_view v = FSDP_ZERO;
    int seen = 0;
    while (fsdp_next_param(x->m, &v)) {
        const int u = v.unit == x->u[1];
        const sharers s = sharers_of(l, u, place);
        for (int64_t k = 0; k < v.numel; k++) {
            const double g = gradient(s, u, v.index, fsdp_view_index(&v, k)) * factor;
            const double got = (double)((const float *)v.shard_grad)[k];
            W_CHECK(fabs(got - g) <= 1e-6 * fabs(g), "gradient %.9g, expected %.9g", got, g);
        }
        seen++;
    }
    CHECK_EQ_INT(seen, UNITS * PARAMS);
}

/* Checks norms of four powers, which must have equal bits on all ranks of the mesh, then
   clipping by the last one. On a mesh of the whole world a norm is one collective, for any
   number of dims. */
static void check_norms(const rig *x, const fsdp_mesh *mesh, const layout *l, int place) {
    static const double powers[] = {1, 3, (double)INFINITY, 2};
    const int whole = l->numel == fsdp_world_size(x->w);
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    double norm = 0;
    for (int n = 0; n < 4; n++) {
        fsdp_clip_desc d = FSDP_ZERO;
        const double want = norm_of(l, powers[n]);
        d.norm_type = powers[n];
        d.max_norm = n < 3 ? (double)INFINITY : want / 2;
        CALL(x->w, fsdp_model_counters(x->m, &before));
        CALL(x->w, fsdp_clip_grads(x->m, &d, &norm));
        CALL(x->w, fsdp_model_counters(x->m, &after));
        const int64_t all_reduces = (int64_t)(after.calls[FSDP_OP_ALL_REDUCE] -
                                              before.calls[FSDP_OP_ALL_REDUCE]);
        W_CHECK(!whole || all_reduces <= 1, "%lld collectives", (long long)all_reduces);
        W_CHECK(fabs(norm - want) <= 1e-12 * want, "norm %.17g, expected %.17g, power %g", norm,
                want, powers[n]);
        int64_t bits[2];
        memcpy(bits, &norm, sizeof norm);
        bits[1] = -bits[0];
        CALL(x->w, fsdp_all_reduce(x->w, mesh, bits, 2, FSDP_I64, FSDP_MAX));
        W_CHECK(bits[0] == -bits[1], "ranks have different norms, power %g", powers[n]);
        if (n == 2) check_grads(x, l, place, 1); /* measured without clipping */
    }
    check_grads(x, l, place, 0.5 * norm / (norm + 1e-6));
}

/* ---- every mesh, every assignment ------------------------------------------------------------ */

/* Sets `out` to the pairs (shard, replicate) of dims, of which at most one is -1. Returns their
   number. */
static int assignments(int ndim, int out[][2]) {
    int num = 0;
    for (int s = -1; s < ndim; s++)
        for (int r = -1; r < ndim; r++)
            if (s != r) out[num][0] = s, out[num++][1] = r;
    return num;
}

static int bit_of(int dim) { return dim < 0 ? 0 : 1 << dim; }

/* Sets `out` to the shapes of up to three dims with `numel` positions. Returns their number. */
static int shapes(int numel, layout *out) {
    int num = 0;
    for (int ndim = 1; ndim <= 3; ndim++)
        for (int a = 1; a <= numel; a++)
            for (int b = 1; a * b <= numel; b++) {
                const int c = numel / (a * b);
                const int32_t shape[3] = {a, b, c};
                if (a * b * c != numel || (ndim < 3 && c > 1) || (ndim < 2 && b > 1)) continue;
                memset(&out[num], 0, sizeof out[num]);
                out[num].ndim = ndim, out[num].numel = numel;
                memcpy(out[num++].shape, shape, sizeof shape);
            }
    return num;
}
enum { SHAPES_MAX = 20, ASSIGNMENTS_MAX = 12 };

/* With `spare` the world has one rank more, and the mesh has the others in another order. */
static const struct row {
    const char *name;
    int ranks, spare, lanes;
} rows[] = {{"1", 1, 0, 0},       {"2", 2, 0, 0},       {"3", 3, 0, 0},      {"4", 4, 0, 0},
            {"5", 5, 0, 0},       {"6", 6, 0, 0},       {"7", 7, 0, 0},      {"8", 8, 0, 0},
            {"4,spare", 4, 1, 0}, {"6,spare", 6, 1, 0}, {"4,lanes", 4, 0, 2}};

typedef struct job {
    const struct row *row;
    int cases; /* counted at position 0 */
} job;

static void on_mesh(job *j, fsdp_world *w, layout *l, const int32_t *ranks, int place) {
    int pairs[ASSIGNMENTS_MAX][2];
    const int num = assignments(l->ndim, pairs);
    const fsdp_mesh *mesh = mesh_of(w, l, ranks);
    for (int n = 0; n < num * num && place >= 0; n++) {
        const int *of[UNITS] = {pairs[n / num], pairs[n % num]};
        if (W_SLOW && n % 7) continue;
        rig x;
        fsdp_model_desc md = FSDP_ZERO;
        fsdp_mesh_info info[UNITS];
        for (int u = 0; u < UNITS; u++) {
            l->shard[u] = bit_of(of[u][0]), l->replicate[u] = bit_of(of[u][1]);
            info[u] = info_of(w, mesh, of[u][0], of[u][1]);
        }
        snprintf(w_case, sizeof w_case, "%d x %d x %d, model %d %d, unit %d %d, rank %d",
                 l->shape[0], l->shape[1], l->shape[2], of[0][0], of[0][1], of[1][0], of[1][1],
                 fsdp_rank(w));
        x.w = w;
        md.mesh_info = &info[0];
        CALL(w, fsdp_model_create(w, &md, &x.m));
        add_unit(&x, 0, NULL, NULL);
        add_unit(&x, 1, NULL, &info[1]);
        backward(&x, l, place);
        check_norms(&x, mesh, l, place);
        fsdp_model_destroy(x.m);
        if (place == 0) j->cases++;
    }
}

static void every_mesh(lab_rank *r) {
    job *j = (job *)r->arg;
    layout all[SHAPES_MAX];
    const int num = shapes(j->row->ranks, all);
    int32_t ranks[8];
    for (int i = 0; i < j->row->ranks; i++) ranks[i] = j->row->ranks - i;
    for (int n = 0; n < num; n++) {
        int place = -1;
        for (int i = 0; i < j->row->ranks; i++)
            if ((j->row->spare ? ranks[i] : i) == r->rank) place = i;
        on_mesh(j, r->w, &all[n], j->row->spare ? ranks : NULL, place);
    }
    CALL(r->w, fsdp_barrier(r->w));
}

TEST_P(norm, every_assignment, rows, SECONDS(120) | SLOW | (row->ranks == 4 && !row->spare && !row->lanes ? GLOO : 0)) {
    job j = {row, 0};
    lab_how how = FSDP_ZERO;
    how.lanes = row->lanes;
    lab_run(row->ranks + row->spare, &how, every_mesh, &j);
    CHECK(j.cases > 0);
    h_message("%d pairs of a model and a unit", j.cases);
}

/* ---- parameters of several dtypes ------------------------------------------------------------ */

/* One norm over all dtypes, in any order. */
static void several_dtypes(lab_rank *r) {
    static const fsdp_dtype dtypes[3] = {FSDP_F64, FSDP_F32, FSDP_BF16};
    fsdp_param_desc p[3];
    fsdp_model *m = lab_model(r->w, NULL);
    double norm = 0, want = 0;
    for (int i = 0; i < 3; i++) p[i] = fsdp_vec(NULL, 3 + i), p[i].dtype = dtypes[i];
    fsdp_unit *u[3];
    for (int i = 0; i < 3; i++) u[i] = lab_unit(r->w, m, NULL, &p[i], 1);
    for (int i = 0; i < 3; i++) lab_forward(r->w, u[i]);
    for (int i = 0; i < 3; i++) {
        CALL(r->w, fsdp_pre_backward(u[i]));
        for (int k = 0; k < 3 + i; k++) {
            const double g = (i + 1) * (k % 2 ? -1 : 1);
            lab_put(fsdp_grad(u[i], 0), dtypes[i], k, g);
            want += g * g;
        }
        CALL(r->w, fsdp_post_backward(u[i]));
    }
    CALL(r->w, fsdp_finalize_backward(m));
    CALL(r->w, fsdp_clip_grad_norm(m, 1e9, &norm));
    CHECK_NEAR(norm, sqrt(want), 1e-12);
    CALL(r->w, fsdp_clip_grad_norm(m, norm / 2, &norm));
    for (int i = 0; i < 3; i++) { /* all are scaled */
        const fsdp_param_view v = lab_view(r->w, u[i], 0);
        for (int64_t k = 0; k < v.numel; k++)
            CHECK_NEAR(fabs(lab_get(v.shard_grad, v.grad_dtype, k)), 0.5 * (i + 1), 1e-2);
    }
}
TEST(norm, several_dtypes) {
    for (int ranks = 1; ranks <= 3; ranks++) lab_run(ranks, NULL, several_dtypes, NULL);
}

/* ---- slices ---------------------------------------------------------------------------------- */

/* The slice of some dims, and meshes made from it. */
enum { AS_IT_IS, FLAT, SPLIT, FORMS };

/* Returns a mesh info on the slice: its first dim shards, its second one replicates. */
static fsdp_mesh_info use_of(fsdp_world *w, const fsdp_mesh *mesh) {
    return info_of(w, mesh, 0, fsdp_mesh_ndim(mesh) > 1 ? 1 : -1);
}

static fsdp_mesh *slice_of(fsdp_world *w, const fsdp_mesh *mesh, int set, int form) {
    fsdp_mesh *out;
    int32_t dims[3];
    int num = 0;
    for (int32_t d = 0; d < fsdp_mesh_ndim(mesh); d++)
        if (set >> d & 1) dims[num++] = d;
    CALL(w, fsdp_mesh_slice(mesh, dims, num, &out));
    if (form == FLAT) CALL(w, fsdp_mesh_flatten(out, "flat", &out));
    if (form == SPLIT) CALL(w, fsdp_mesh_unflatten(out, 0, 1, NULL, &out));
    return out;
}

/* Checks a model whose mesh is a slice, or made from one. If the mesh lacks ranks of the whole
   one, the norm is refused, and nothing is scaled. */
static void model_on_slice(fsdp_world *w, const layout *l, const fsdp_mesh *mesh, int lacks,
                           int *refused) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info = use_of(w, mesh);
    rig x;
    double norm = -1;
    x.w = w;
    md.mesh_info = &info;
    CALL(w, fsdp_model_create(w, &md, &x.m));
    for (int u = 0; u < UNITS; u++) add_unit(&x, u, NULL, NULL);
    backward(&x, l, fsdp_rank(w));
    if (!lacks) {
        check_norms(&x, NULL, l, fsdp_rank(w));
    } else {
        CHECK_STATUS(fsdp_clip_grad_norm(x.m, 1e-3, &norm), FSDP_ERR_UNSUPPORTED);
        W_CHECK(norm == -1 && strstr(fsdp_last_error(w), "mesh_info"), "norm %g, \"%s\"", norm,
                fsdp_last_error(w));
        check_grads(&x, l, fsdp_rank(w), 1);
        CHECK_STATUS(fsdp_grad_norm(x.m, &norm), FSDP_ERR_INVALID_STATE); /* no norm was measured */
        ++*refused;
    }
    fsdp_model_destroy(x.m);
}

/* Checks a unit on a slice of the model's mesh: ranks outside the slice hold other parameters. */
static void unit_on_slice(fsdp_world *w, layout *l, const fsdp_mesh *mesh, const fsdp_mesh *slice) {
    fsdp_model_desc md = FSDP_ZERO;
    const int last = l->ndim - 1;
    fsdp_mesh_info whole = info_of(w, mesh, last, -1), info = use_of(w, slice);
    rig x;
    l->shard[0] = bit_of(last), l->replicate[0] = 0;
    x.w = w;
    md.mesh_info = &whole;
    CALL(w, fsdp_model_create(w, &md, &x.m));
    add_unit(&x, 0, NULL, NULL);
    add_unit(&x, 1, NULL, &info);
    backward(&x, l, fsdp_rank(w));
    check_norms(&x, mesh, l, fsdp_rank(w));
    fsdp_model_destroy(x.m);
}

static void every_slice(lab_rank *r) {
    job *j = (job *)r->arg;
    const int world = r->size, rank = r->rank;
    layout all[SHAPES_MAX];
    const int num = shapes(world, all);
    int refused = 0;
    fsdp_world *w = r->w;
    for (int n = 0; n < num; n++) {
        layout *l = &all[n];
        const fsdp_mesh *mesh = mesh_of(w, l, NULL);
        for (int set = 1; set < 1 << l->ndim; set++)
            for (int form = 0; form < FORMS; form++) {
                const fsdp_mesh *slice = slice_of(w, mesh, set, form);
                int dims[2] = {-1, -1}, found = 0;
                snprintf(w_case, sizeof w_case, "%d x %d x %d, slice %d, form %d, rank %d",
                         l->shape[0], l->shape[1], l->shape[2], set, form, rank);
                for (int k = 0; k < l->ndim; k++)
                    if (set >> k & 1 && found < 2) dims[found++] = k;
                for (int u = 0; u < UNITS; u++) { /* the roles that use_of gives */
                    l->shard[u] = form == FLAT ? set : form == SPLIT ? 0 : bit_of(dims[0]);
                    l->replicate[u] = form == FLAT ? 0 : bit_of(dims[form == AS_IT_IS]);
                }
                model_on_slice(w, l, slice, fsdp_mesh_size(slice, -1) < world, &refused);
                unit_on_slice(w, l, mesh, slice);
                if (rank == 0) j->cases++;
            }
    }
    CHECK(refused > 0 || world < 4);
}

TEST(norm, slices, SECONDS(120) | SLOW) {
    for (int world = 1; world <= 8; world++) {
        job j = {NULL, 0};
        lab_run(world, NULL, every_slice, &j);
        CHECK(j.cases > 0);
    }
}

/* Two models of two ranks each share a unit over all four. */
static void unit_outside(lab_rank *r) {
    static const layout four = {1, 4, {4}, {1, 1}, {0, 0}};
    static const int32_t pairs[2][2] = {{0, 1}, {2, 3}};
    static const int32_t two = 2;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh *mesh[2], *whole;
    double norm;
    rig x;
    x.w = r->w;
    for (int n = 0; n < 2; n++) mesh[n] = lab_mesh(x.w, 1, &two, NULL, pairs[n]);
    whole = mesh_of(x.w, &four, NULL);
    md.mesh = mesh[r->rank / 2];
    CALL(x.w, fsdp_model_create(x.w, &md, &x.m));
    add_unit(&x, 0, whole, NULL);
    add_unit(&x, 1, NULL, NULL);
    backward(&x, &four, r->rank);
    CHECK_STATUS(fsdp_clip_grad_norm(x.m, 1, &norm), FSDP_ERR_UNSUPPORTED);
    CHECK_MSG(strstr(fsdp_last_error(x.w), "'first'"), "%s", fsdp_last_error(x.w));
    CALL(x.w, fsdp_barrier(x.w));
}

TEST(norm, unit_outside_of_the_model) { lab_run(4, NULL, unit_outside, NULL); }
