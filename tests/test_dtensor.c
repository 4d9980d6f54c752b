/* test_dtensor.c - redistributions of fsdp_dtensor.h on ranks: each part against the elements that
   its spec says; how few records and copies a run takes; sizes that change; what runs beside the
   caller's stream; replicas that differ; every refusal.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include <math.h> /* fabs */
#include "lab.h"
#include "golden.h"
#include "lab_dtensor.h"
#include "fsdp_dtensor.h"

/* ---- a mesh of ranks ------------------------------------------------------------------------- */

typedef struct bed { /* one rank */
    fsdp_world *w;
    fsdp_model *model;
    fsdp_mesh *mesh, *dim[DIMS]; /* dim: each one alone */
    fsdp_dmesh *dm;
    int32_t shape[DIMS], coord[DIMS], ndim;
    int overlap;
    int checks; /* redistributions that were compared */
} bed;

/* Another dmesh, without the redistributions of the one before. */
static void bed_renew(bed *b) {
    fsdp_dmesh_desc d = FSDP_ZERO;
    fsdp_dmesh_destroy(b->dm);
    d.mesh = b->mesh, d.overlap = b->overlap;
    CALL(b->w, fsdp_dmesh_create(b->model, &d, &b->dm));
}

static void bed_open(bed *b, fsdp_world *w, int ndim, const int32_t *shape, int overlap) {
    static const char *const names[DIMS] = {"a", "b", "c", "d"};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    memset(b, 0, sizeof *b);
    b->w = w, b->ndim = ndim;
    b->mesh = lab_mesh(w, ndim, shape, names, NULL);
    CALL(w, fsdp_mesh_info_init(b->mesh, FSDP_MESH_INFO_FSDP, 0, -1, &info));
    md.mesh_info = &info;
    b->model = lab_model(w, &md);
    for (int m = 0; m < ndim; m++) {
        b->shape[m] = shape[m];
        b->coord[m] = fsdp_mesh_rank(b->mesh, m);
        b->dim[m] = lab_slice(w, b->mesh, m);
    }
    b->overlap = overlap;
    bed_renew(b);
}

static double small_value(int64_t i) { return 1 + (double)(i % 13); }
static double index_value(int64_t i) { return (double)i; }

/* ---- one redistribution ---------------------------------------------------------------------- */

enum { PRIVATE = 0, SHARED = 1, FLUSH = 2, KINDS_OF_MEMORY = 3 }; /* FLUSH: shared, without room */

/* Joins addends of every mesh dim that holds some: so parts are elements. */
static void join_addends(bed *b, const fsdp_spec *s, const fsdp_local *l, double *x) {
    for (int32_t m = 0; m < b->ndim; m++) {
        if (s->place[m].kind != FSDP_PARTIAL) continue;
        int op = s->place[m].op;
        CALL(b->w, fsdp_all_reduce(b->w, b->dim[m], x, l->numel, FSDP_F64,
                                   (fsdp_redop)(op == FSDP_AVG ? FSDP_SUM : op)));
        for (int64_t i = 0; i < l->numel && op == FSDP_AVG; i++) x[i] /= b->shape[m];
    }
}

static void check_part(bed *b, const fsdp_spec *s, const void *part, double (*value)(int64_t),
                       double scale, const char *what) {
    fsdp_local l;
    CHECK_OK(fsdp_spec_local(s, b->coord, &l));
    double *x = lab_doubles(l.numel + 1);
    for (int64_t i = 0; i < l.numel; i++) x[i] = lab_get(part, s->dtype, i);
    join_addends(b, s, &l, x);
    for (int64_t i = 0; i < l.numel; i++) {
        double want = scale * value(whole_index(s, &l, i));
        CHECK_MSG(fabs(x[i] - want) <= 1e-6 * fabs(want), "%s: element %lld is %g, expected %g",
                  what, (long long)i, x[i], want);
    }
    free(x);
    b->checks++;
}

typedef struct trial {
    fsdp_redistribution_desc desc;
    int memory[2]; /* of src and dst */
    int beside;    /* begin and wait */
} trial;

/* Memory for a part: with `capacity` bytes, or as many as the part has. */
static void *part_memory(bed *b, int kind, int64_t bytes, int64_t capacity) {
    void *ptr = NULL;
    if (kind == PRIVATE) return lab_zeros((size_t)(bytes ? bytes : 1), 1);
    CALL(b->w, fsdp_dmesh_alloc(b->dm, kind == SHARED ? capacity : bytes, &ptr));
    return ptr;
}

static void try_one(bed *b, const trial *t, fsdp_redistribution *r) {
    fsdp_redistribution_info info;
    fsdp_spec from = t->desc.from, to = t->desc.to;
    CALL(b->w, fsdp_redistribution_get(r, &info));
    int64_t size = (int64_t)fsdp_dtype_size(from.dtype);
    void *src = part_memory(b, t->memory[0], info.from.numel * size, info.src_capacity);
    void *dst = part_memory(b, t->memory[1], info.to.numel * size, info.dst_capacity);
    void *was = lab_zeros((size_t)info.from.numel + 1, (size_t)size);
    fill_part(&from, b->coord, small_value, src);
    memcpy(was, src, (size_t)(info.from.numel * size));
    for (int run = 0; run < 2; run++) {
        if (t->beside) {
            CALL(b->w, fsdp_redistribute_begin(r, dst, src));
            CALL(b->w, fsdp_redistribute_wait(r));
        } else CALL(b->w, fsdp_redistribute(r, dst, src));
        check_part(b, &to, dst, small_value, t->desc.scale != 0 ? t->desc.scale : 1, t->desc.name);
        CHECK_EQ_MEM(src, was, (size_t)(info.from.numel * size)); /* inputs stay */
    }
    free(was);
    if (t->memory[0] == PRIVATE) free(src);
    if (t->memory[1] == PRIVATE) free(dst);
}

/* ---- all pairs of small specs ---------------------------------------------------------------- */

enum { SPECS_MAX = 256 };
typedef struct specs {
    fsdp_spec list[SPECS_MAX];
    int num;
} specs;
static void spec_add(const fsdp_spec *s, void *arg) {
    specs *all = (specs *)arg;
    CHECK(all->num < SPECS_MAX);
    all->list[all->num++] = *s;
}

static int can_be(const fsdp_spec *from, const fsdp_spec *to) {
    int can = 1;
    for (int m = 0; m < to->mesh_ndim; m++)
        can &= to->place[m].kind != FSDP_PARTIAL || from->place[m].kind != FSDP_PARTIAL ||
               from->place[m].op == to->place[m].op;
    return can;
}

typedef struct pairs_row {
    const char *name;
    int ranks, ndim;
    int32_t mesh[DIMS];
    int tensor_ndim;
    int64_t shape[DIMS];
    int overlap, lanes;
} pairs_row;
static void pairs(lab_rank *r) {
    const pairs_row *row = (const pairs_row *)r->arg;
    specs *all = (specs *)lab_zeros(1, sizeof *all);
    bed b;
    bed_open(&b, r->w, row->ndim, row->mesh, row->overlap);
    all_specs(row->ndim, row->mesh, row->tensor_ndim, row->shape, spec_add, all);
    for (int i = 0; i < all->num; i++, bed_renew(&b))
        for (int k = 0; k < all->num; k++) {
            fsdp_redistribution *run;
            trial t;
            if (!can_be(&all->list[i], &all->list[k])) continue;
            memset(&t, 0, sizeof t);
            t.desc.name = "pair";
            t.desc.from = all->list[i], t.desc.to = all->list[k];
            t.memory[0] = (i + k) % KINDS_OF_MEMORY, t.memory[1] = (i + 2 * k) % KINDS_OF_MEMORY;
            t.beside = row->overlap && (i + k) % 2;
            CALL(b.w, fsdp_redistribution_create(b.dm, &t.desc, &run));
            try_one(&b, &t, run);
        }
    CHECK(b.checks > 2 * all->num);
    free(all);
}
static const pairs_row pairs_rows[] = {
    {"2 of (5,3)", 2, 1, {2}, 2, {5, 3}, 0, 0},
    {"3 of (2,4,1)", 3, 1, {3}, 3, {2, 4, 1}, 0, 0},
    {"3 of (0,4)", 3, 1, {3}, 2, {0, 4}, 0, 0},
    {"4 of a vector", 4, 1, {4}, 1, {6}, 1, 0},
    {"2x2 of (5,3)", 4, 2, {2, 2}, 2, {5, 3}, 0, 0},
    {"2x2 of (4,6)", 4, 2, {2, 2}, 2, {4, 6}, 1, 0},
    {"2x1x2 of (3,5)", 4, 3, {2, 1, 2}, 2, {3, 5}, 0, 0},
    {"2 of (5,3), 1 lane", 2, 1, {2}, 2, {5, 3}, 1, 1},
    {"2x2 of (3,4), 2 lanes", 4, 2, {2, 2}, 2, {3, 4}, 1, 2},
};
TEST_P(dtensor, all_pairs, pairs_rows) {
    lab_how how = FSDP_ZERO;
    how.lanes = row->lanes;
    lab_run(row->ranks, &how, pairs, (void *)(uintptr_t)row);
}

/* ---- values of PyTorch ----------------------------------------------------------------------- */

/* redist.txt: element i holds i, a Partial dim times (coordinate + 1). */
static double addend_of_file(double value, int coord) { return value * (coord + 1); }

static void fill_as_file(bed *b, const fsdp_spec *s, void *part) {
    fsdp_local l;
    CHECK_OK(fsdp_spec_local(s, b->coord, &l));
    for (int64_t i = 0; i < l.numel; i++) {
        double x = index_value(whole_index(s, &l, i));
        for (int m = 0; m < s->mesh_ndim; m++)
            if (s->place[m].kind == FSDP_PARTIAL) x = addend_of_file(x, b->coord[m]);
        lab_put(part, s->dtype, i, x);
    }
}

typedef struct file_case {
    char name[64];
    int ranks;
    fsdp_spec from, to;
    int64_t numel[16];
    double *after[16];
} file_case;

static void file_rank(lab_rank *r) {
    const file_case *c = (const file_case *)r->arg;
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *run;
    fsdp_redistribution_info info;
    bed b;
    bed_open(&b, r->w, c->from.mesh_ndim, c->from.mesh_shape, 0);
    d.from = c->from, d.to = c->to, d.name = c->name;
    CALL(b.w, fsdp_redistribution_create(b.dm, &d, &run));
    CALL(b.w, fsdp_redistribution_get(run, &info));
    float *src = (float *)lab_zeros((size_t)info.from.numel + 1, sizeof *src);
    float *dst = (float *)lab_zeros((size_t)info.to.numel + 1, sizeof *dst);
    fill_as_file(&b, &c->from, src);
    CALL(b.w, fsdp_redistribute(run, dst, src));
    CHECK_EQ_INT(info.to.numel, c->numel[r->rank]);
    double *x = lab_doubles(info.to.numel + 1), *want = lab_doubles(info.to.numel + 1);
    for (int64_t i = 0; i < info.to.numel; i++)
        x[i] = (double)dst[i], want[i] = c->after[r->rank][i];
    join_addends(&b, &c->to, &info.to, x); /* which rank holds which addend is free */
    join_addends(&b, &c->to, &info.to, want);
    for (int64_t i = 0; i < info.to.numel; i++)
        CHECK_MSG(fabs(x[i] - want[i]) <= 1e-6 * fabs(want[i]),
                  "%s, rank %d, element %lld: %g, "
                  "PyTorch %g",
                  c->name, r->rank, (long long)i, x[i], want[i]);
    free(x), free(want), free(src), free(dst);
}

static void read_frame(golden *g, fsdp_spec *frame) {
    if (golden_is(g, "mesh")) {
        frame->mesh_ndim = (int32_t)golden_int(g);
        for (int m = 0; m < frame->mesh_ndim; m++) frame->mesh_shape[m] = (int32_t)golden_int(g);
    } else if (golden_is(g, "tensor")) {
        frame->ndim = (int32_t)golden_int(g);
        for (int d = 0; d < frame->ndim; d++) frame->shape[d] = golden_int(g);
    }
}
TEST_TIMEOUT(dtensor, pytorchs_values, 600) {
    golden g;
    int cases = 0;
    CHECK(golden_open(&g, "redist.txt", "redist"));
    while (golden_case(&g)) {
        fsdp_spec frame;
        file_case c;
        fsdp_placement place[2][DIMS];
        memset(&frame, 0, sizeof frame), memset(&c, 0, sizeof c), memset(place, 0, sizeof place);
        frame.dtype = FSDP_F32;
        snprintf(c.name, sizeof c.name, "%s", g.name);
        while (golden_line(&g)) {
            int to = golden_is(&g, "to") || golden_is(&g, "order_to");
            read_frame(&g, &frame);
            if (golden_is(&g, "from") || golden_is(&g, "to"))
                for (int m = 0; m < frame.mesh_ndim; m++) CHECK(read_placement(&g, &place[to][m]));
            if (golden_is(&g, "order_from") || golden_is(&g, "order_to"))
                for (int m = 0; m < frame.mesh_ndim; m++) {
                    int64_t order = golden_int(&g);
                    if (order >= 0) place[to][m].order = (int8_t)order;
                }
            if (!golden_is(&g, "after")) continue;
            int rank = (int)golden_int(&g);
            int64_t numel = 1;
            for (int d = 0; d < frame.ndim; d++) numel *= golden_int(&g);
            CHECK(rank < 16);
            c.ranks = rank + 1 > c.ranks ? rank + 1 : c.ranks;
            c.numel[rank] = numel;
            c.after[rank] = lab_doubles(numel + 1);
            golden_nums(&g, numel, c.after[rank]);
        }
        CHECK_OK(fsdp_spec_init(&c.from, frame.mesh_ndim, frame.mesh_shape, place[0], FSDP_F32,
                                frame.ndim, frame.shape));
        CHECK_OK(fsdp_spec_init(&c.to, frame.mesh_ndim, frame.mesh_shape, place[1], FSDP_F32,
                                frame.ndim, frame.shape));
        lab_run(c.ranks, NULL, file_rank, &c);
        for (int k = 0; k < c.ranks; k++) free(c.after[k]);
        cases++;
    }
    CHECK_MSG(!g.error[0], "%s", g.error);
    CHECK(g.missing || cases > 0);
    golden_close(&g);
}
