/* test_golden_dtensor.c - the part of each rank of a mesh, compared with PyTorch exactly: the local
   cases of dtensor.txt. local_*: shapes, offsets and contents by the shard math only, mesh dim
   after mesh dim. fsdp*_tp*: in addition, a model over the dp dim of a (dp, tp) mesh whose
   parameter is the tp-local tensor. Cases that redistribute, and partial sums, need DTensor: they
   are only counted. The kind of a case follows from its records; its name only makes sure that it
   is not skipped.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"
#include "sim.h"
#include "golden.h"

enum { THREADS_MAX = 12, DIMS = FSDP_MAX_DIMS }; /* larger worlds are only simulated */
enum { REPLICATE, SHARD, STRIDED, PARTIAL };     /* first number of a placement */
enum { IS_LOCAL, IS_FSDP_TP, IS_REDISTRIBUTE, IS_PARTIAL, IS_OTHER, KINDS };

typedef struct placement {
    int64_t kind, dim, factor;
} placement;

typedef struct part { /* the file's data of one rank */
    int has_local, has_shape;
    int64_t local[DIMS], offset[DIMS], shape[DIMS];
    int64_t numel, *content; /* numel -1: not given */
} part;

typedef struct dcase {
    char name[64];
    int kind, world, mesh_ndim, ndim, has_place, has_tp, moves;
    int32_t mesh[DIMS];
    int64_t shape[DIMS], fsdp_dim;
    placement place[DIMS], tp;
    part *parts; /* [world] */
    int64_t elements, views;
} dcase;

static int64_t *numbers(int64_t count) {
    int64_t *a = (int64_t *)lab_zeros((size_t)count + 1, sizeof *a);
    return a;
}

/* ---- reading --------------------------------------------------------------------------------- */

static void read_placement(golden *g, const dcase *c, placement *p) {
    p->kind = golden_int(g), p->dim = golden_int(g), p->factor = golden_int(g);
    CHECK_MSG(g->error[0] || (p->kind >= REPLICATE && p->kind <= PARTIAL), "case %s: placement %d",
              c->name, (int)p->kind);
    if (p->kind == SHARD) p->factor = 1;
    if (p->kind == SHARD || p->kind == STRIDED)
        CHECK_MSG(g->error[0] ||
                      (p->dim >= 0 && p->dim < c->ndim && p->factor >= 1 && p->factor <= INT32_MAX),
                  "case %s: dim %d, factor %d", c->name, (int)p->dim, (int)p->factor);
}

/* Reads `mesh ND shape[ND]` and `tensor N shape[N]`, which give the lengths of the other records.
   */
static void read_sizes(golden *g, dcase *c) {
    c->world = c->mesh_ndim = 0;
    while (golden_line(g)) {
        if (golden_is(g, "mesh")) {
            c->mesh_ndim = (int)golden_int(g);
            CHECK_MSG(c->mesh_ndim >= 1 && c->mesh_ndim <= DIMS, "case %s", c->name);
            c->world = 1;
            for (int i = 0; i < c->mesh_ndim; i++) {
                c->mesh[i] = (int32_t)golden_int(g);
                CHECK_MSG(c->mesh[i] >= 1 && c->world <= INT32_MAX / c->mesh[i], "case %s",
                          c->name);
                c->world *= c->mesh[i];
            }
        } else if (golden_is(g, "tensor")) {
            c->ndim = (int)golden_int(g);
            CHECK_MSG(c->ndim >= 0 && c->ndim <= DIMS, "case %s", c->name);
            golden_ints(g, c->ndim, c->shape);
        }
    }
    c->parts = (part *)lab_zeros((size_t)c->world + 1, sizeof *c->parts);
    for (int r = 0; r < c->world; r++) c->parts[r].numel = -1;
}

static part *part_of(golden *g, dcase *c) {
    int64_t rank = golden_int(g);
    CHECK_MSG(rank >= 0 && rank < c->world, "case %s: rank %d of %d", c->name, (int)rank, c->world);
    return &c->parts[rank];
}

static void read_record(golden *g, dcase *c) {
    part *p;
    if (golden_is(g, "place")) {
        for (int i = 0; i < c->mesh_ndim; i++) read_placement(g, c, &c->place[i]);
        c->has_place = 1;
    } else if (golden_is(g, "tp")) {
        read_placement(g, c, &c->tp);
        c->fsdp_dim = golden_int(g);
        c->has_tp = 1;
    } else if (golden_is(g, "from") || golden_is(g, "to")) {
        c->moves = 1;
    } else if (golden_is(g, "local")) {
        p = part_of(g, c);
        golden_ints(g, c->ndim, p->local);
        golden_ints(g, c->ndim, p->offset);
        p->has_local = 1;
    } else if (golden_is(g, "shape")) {
        p = part_of(g, c);
        golden_ints(g, c->ndim, p->shape);
        p->has_shape = 1;
    } else if (golden_is(g, "content")) {
        p = part_of(g, c);
        p->numel = golden_int(g);
        CHECK_MSG(p->numel == golden_left(g), "case %s: length of content", c->name);
        p->content = numbers(p->numel);
        golden_ints(g, p->numel, p->content);
    }
}

static int kind_of(const dcase *c) {
    const int named = !strncmp(c->name, "local_", 6) || !strncmp(c->name, "fsdp", 4);
    int partial = c->has_tp && c->tp.kind == PARTIAL;
    if (c->moves || !strncmp(c->name, "redistribute_", 13)) {
        CHECK_MSG(!named, "case %s redistributes", c->name);
        return IS_REDISTRIBUTE;
    }
    for (int i = 0; c->has_place && i < c->mesh_ndim; i++) partial |= c->place[i].kind == PARTIAL;
    if (partial) return IS_PARTIAL;
    CHECK_MSG(!named || c->has_place, "case %s has no placements", c->name);
    return !c->has_place ? IS_OTHER : c->has_tp ? IS_FSDP_TP : IS_LOCAL;
}

static void read_case(golden *g, dcase *c) {
    memset(c, 0, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", g->name);
    read_sizes(g, c);
    golden_again(g);
    while (golden_line(g)) read_record(g, c);
    CHECK_MSG(!g->error[0], "%s", g->error);
    c->kind = kind_of(c);
    for (int r = 0, told = 0; c->kind <= IS_FSDP_TP; r++) { /* a case without results is invalid */
        CHECK_MSG(r < c->world, "case %s tells about no rank", c->name);
        told |= c->parts[r].has_local || c->parts[r].has_shape || c->parts[r].numel >= 0;
        if (told) break;
    }
}

static void free_case(dcase *c) {
    for (int r = 0; r < c->world; r++) free(c->parts[r].content);
    free(c->parts);
}

/* ---- placements ------------------------------------------------------------------------------ */

typedef struct held { /* the part of one rank: its global indices in each dim, in any order */
    int ndim;
    int64_t size[DIMS], count[DIMS], *at[DIMS];
} held;

static void hold_all(const dcase *c, held *h) {
    memset(h, 0, sizeof *h);
    h->ndim = c->ndim;
    for (int d = 0; d < h->ndim; d++) {
        h->size[d] = h->count[d] = c->shape[d];
        h->at[d] = numbers(c->shape[d]);
        for (int64_t i = 0; i < c->shape[d]; i++) h->at[d][i] = i;
    }
}

static void free_held(held *h) {
    for (int d = 0; d < h->ndim; d++) free(h->at[d]);
}

static int64_t numel_of(const held *h) {
    int64_t n = 1;
    for (int d = 0; d < h->ndim; d++) n *= h->count[d];
    return n;
}

/* Returns the global index of the k-th element of the part. */
static int64_t index_of(const held *h, int64_t k) {
    int64_t index = 0, stride = 1;
    for (int d = h->ndim - 1; d >= 0; d--) {
        index += h->at[d][k % h->count[d]] * stride;
        k /= h->count[d], stride *= h->size[d];
    }
    return index;
}

/* Keeps the part of coordinate `at` on a mesh dim of `size`: its piece of each of `factor` chunks
   of the dim. A plain shard has one such chunk. */
static void apply(held *h, const placement *p, int size, int at) {
    const int d = (int)p->dim, factor = (int)p->factor;
    int64_t kept = 0;
    fsdp_range chunk, r;
    if (p->kind == REPLICATE) return;
    for (int f = 0; f < factor; f++) {
        CHECK_OK(fsdp_shard_range(h->count[d], factor, f, &chunk));
        CHECK_OK(fsdp_shard_range(chunk.count, size, at, &r));
        memmove(h->at[d] + kept, h->at[d] + chunk.start + r.start,
                (size_t)r.count * sizeof *h->at[d]);
        kept += r.count;
    }
    h->count[d] = kept;
}

/* Ranks are row-major in the mesh; placements apply from left to right. */
static void hold_part(const dcase *c, int rank, held *h) {
    int below = c->world;
    hold_all(c, h);
    for (int i = 0; i < c->mesh_ndim; i++) {
        below /= c->mesh[i];
        apply(h, &c->place[i], c->mesh[i], rank / below % c->mesh[i]);
    }
}

static void check_sizes(const int64_t *got, const int64_t *want, int ndim, const char *what) {
    for (int d = 0; d < ndim; d++)
        W_CHECK(got[d] == want[d], "%s of dim %d: %lld, expected %lld", what, d, (long long)got[d],
                (long long)want[d]);
}

/* Compares placements with the file, for all ranks in it. */
static void check_placements(dcase *c) {
    for (int r = 0; r < c->world; r++) {
        const part *p = &c->parts[r];
        int64_t offset[DIMS];
        held h;
        snprintf(w_case, sizeof w_case, "%s rank %d", c->name, r);
        hold_part(c, r, &h);
        for (int d = 0; d < h.ndim; d++) offset[d] = h.count[d] ? h.at[d][0] : h.size[d];
        if (p->has_local) {
            check_sizes(h.count, p->local, h.ndim, "local size");
            check_sizes(offset, p->offset, h.ndim, "offset");
            c->views++;
        }
        if (p->numel >= 0)
            W_CHECK(numel_of(&h) == p->numel, "%lld elements, expected %lld",
                    (long long)numel_of(&h), (long long)p->numel);
        for (int64_t k = 0; k < p->numel; k++, c->elements++)
            W_CHECK(index_of(&h, k) == p->content[k], "element %lld is %lld, expected %lld",
                    (long long)k, (long long)index_of(&h, k), (long long)p->content[k]);
        free_held(&h);
    }
}

/* ---- a model on the dp dim ------------------------------------------------------------------- */

/* `view` is of the tp-local tensor, of which the rank has part `tp`; the file refers to the global
   one. */
static void check_view(dcase *c, int rank, const held *tp, const fsdp_param_view *view) {
    const part *p = &c->parts[rank];
    const double *shard = (const double *)view->shard;
    int64_t offset[DIMS];
    held h;
    hold_part(c, rank, &h);
    CHECK_EQ_INT(view->ndim, c->ndim);
    CHECK_EQ_INT(view->shard_dim, c->fsdp_dim);
    check_sizes(view->shape, tp->count, c->ndim, "tp-local size");
    W_CHECK(view->numel == numel_of(&h), "%lld elements, expected %lld", (long long)view->numel,
            (long long)numel_of(&h));
    W_CHECK(p->numel < 0 || view->numel == p->numel, "%lld elements, expected %lld",
            (long long)view->numel, (long long)p->numel);
    W_CHECK(shard != NULL && shard == (const double *)view->data, "no shard");
    for (int d = 0; d < c->ndim; d++)
        offset[d] = view->start[d] < tp->count[d] ? tp->at[d][view->start[d]] : c->shape[d];
    if (p->has_local) check_sizes(offset, p->offset, c->ndim, "start");
    /* Without elements PyTorch's shard has size 0 in its dim, whatever the placements are. */
    if (p->has_local && view->numel > 0)
        check_sizes(view->local_shape, p->local, c->ndim, "local_shape");
    if (p->has_shape) check_sizes(view->local_shape, p->shape, c->ndim, "local_shape");
    for (int64_t k = 0; k < view->numel; k++) {
        double want = (double)(p->content ? p->content[k] : index_of(&h, k));
        W_CHECK(!(shard[k] < want || shard[k] > want), "element %lld is %g, expected %g",
                (long long)k, shard[k], want);
    }
    __atomic_add_fetch(&c->elements, view->numel, __ATOMIC_RELAXED);
    __atomic_add_fetch(&c->views, 1, __ATOMIC_RELAXED);
    free_held(&h);
}

/* Checks that the dp ranks of one tp coordinate together have the tp-local tensor. */
static void check_gathered(fsdp_world *w, fsdp_model *model, fsdp_unit *unit, const double *full,
                           int64_t numel) {
    const size_t nbytes = (size_t)numel * sizeof *full;
    double *got = (double *)lab_zeros((size_t)numel + 1, sizeof *got);
    CALL(w, fsdp_param_full(unit, 0, got));
    W_CHECK(!memcmp(got, full, nbytes), "fsdp_param_full");
    CALL(w, fsdp_set_grad_enabled(model, 0));
    CALL(w, fsdp_pre_forward(unit));
    W_CHECK(fsdp_data(unit, 0) != NULL && !memcmp(fsdp_data(unit, 0), full, nbytes), "fsdp_data");
    CALL(w, fsdp_post_forward(unit));
    free(got);
}

/* Runs a case on one rank. Elements are their global indices, which f64 holds exactly. */
static void shard_over_dp(fsdp_world *w, dcase *c, int talks) {
    fsdp_model_desc md = FSDP_ZERO;
    held tp;
    snprintf(w_case, sizeof w_case, "%s rank %d", c->name, fsdp_rank(w));
    const fsdp_mesh *mesh = lab_mesh2(w, (int)c->mesh[0], (int)c->mesh[1], "dp", "tp");
    md.mesh = lab_slice(w, mesh, fsdp_mesh_dim(mesh, "dp"));
    hold_all(c, &tp);
    apply(&tp, &c->tp, c->mesh[1], fsdp_mesh_rank(mesh, fsdp_mesh_dim(mesh, "tp")));

    const int64_t numel = numel_of(&tp);
    double *full = (double *)lab_zeros((size_t)numel + 1, sizeof *full);
    for (int64_t k = 0; k < numel; k++) full[k] = (double)index_of(&tp, k);
    fsdp_param_desc param = lab_desc(c->ndim, tp.count, (int)c->fsdp_dim, FSDP_F64, 0);
    fsdp_model *model = lab_model(w, &md);
    fsdp_unit *unit = lab_unit(w, model, NULL, &param, 1);
    CALL(w, fsdp_param_load(unit, 0, full));
    const fsdp_param_view view = lab_view(w, unit, 0);
    check_view(c, fsdp_rank(w), &tp, &view);
    if (talks) check_gathered(w, model, unit, full, numel);
    free(full);
    free_held(&tp);
}

static void shard_thread(lab_rank *r) { shard_over_dp(r->w, (dcase *)r->arg, 1); }

/* Simulates each rank in turn: no peer is needed before the first gather. */
static void shard_played(dcase *c) {
    for (int r = 0; r < c->world; r++) {
        sim s;
        sim_init(&s, c->world, r);
        s.async = 0;
        CHECK_MSG(sim_open(&s) != NULL, "%s", fsdp_last_error(NULL));
        shard_over_dp(s.world, c, 0);
        CHECK_EQ_INT(sim_close(&s), 0);
    }
}

/* ---- the file -------------------------------------------------------------------------------- */

static void check_case(dcase *c, int64_t *talked) {
    check_placements(c);
    if (c->kind != IS_FSDP_TP) return;
    CHECK_MSG(c->mesh_ndim == 2 && c->ndim >= 1, "case %s has no (dp, tp) mesh", c->name);
    shard_played(c);
    if (c->world < 1 || c->world > THREADS_MAX) return;
    lab_run(c->world, NULL, shard_thread, c);
    ++*talked;
}

/* Other data may lack cases of a kind; the project's data has all. */
static void check_file(int kind, const char *what) {
    int64_t cases[KINDS] = {0}, views = 0, elements = 0, talked = 0;
    golden g;
    GOLDEN_OPEN(&g, "dtensor.txt", "dtensor");
    while (golden_case(&g)) {
        dcase c;
        read_case(&g, &c);
        cases[c.kind]++;
        if (c.kind == kind) check_case(&c, &talked);
        views += c.views, elements += c.elements;
        free_case(&c);
    }
    GOLDEN_CLOSE(&g);
    if (!cases[kind] && strcmp(golden_dir(), GOLDEN_DIR) != 0) SKIP("no such case");
    CHECK(cases[kind] > 0 && views > 0 && elements > 0);
    if (!strcmp(golden_dir(), GOLDEN_DIR)) CHECK_EQ_INT(cases[IS_PARTIAL] + cases[IS_OTHER], 0);
    h_message("%lld %s cases (%lld with communication), %lld parts and %lld elements compared",
              (long long)cases[kind], what, (long long)talked, (long long)views,
              (long long)elements);
    h_message("skipped: %lld redistribute, %lld Partial, %lld unknown",
              (long long)cases[IS_REDISTRIBUTE], (long long)cases[IS_PARTIAL],
              (long long)cases[IS_OTHER]);
}

TEST(golden_dtensor, local) { check_file(IS_LOCAL, "local"); }
TEST(golden_dtensor, fsdp_tp) { check_file(IS_FSDP_TP, "FSDP+TP"); }
