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
    fsdp_links links;
    int checks; /* redistributions that were compared */
} bed;

/* Another dmesh, without the redistributions of the one before. */
static void bed_renew(bed *b) {
    fsdp_dmesh_desc d = FSDP_ZERO;
    fsdp_dmesh_destroy(b->dm);
    d.mesh = b->mesh, d.overlap = b->overlap, d.links = b->links;
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

/* ---- random redistributions ------------------------------------------------------------------ */

/* Specs, sizes, dtypes, memory and ways of running at random; what a rank should have comes from
   nested chunks that are computed here. All ranks draw the same numbers. */
enum { ARENA = 1 << 15, GUARD = 64, INSIDE = KINDS_OF_MEMORY, WILD_KINDS, WILD_MESHES = 4 };
enum { GUARD_BYTE = 0xC7 };

typedef struct wild_row {
    const char *name;
    uint64_t seed;
    int ranks, cases, lanes, processes;
} wild_row;

typedef struct wild { /* one case */
    fsdp_redistribution_desc desc;
    char name[32];
    int kind[2]; /* of src and dst */
    int in_place, beside, has_avg;
    uint64_t salt;
} wild;

typedef struct wild_bed {
    bed b;
    char *arena[2];
    lab_log log;
} wild_bed;

static int is_collective(const fsdp_op *op) {
    return op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_ALL_REDUCE ||
           op->kind == FSDP_OP_REDUCE_SCATTER || op->kind == FSDP_OP_ALL_TO_ALL;
}

/* The part of a coordinate: each cut in its order, as torch.chunk cuts. */
static void brute_part(const fsdp_spec *s, const int32_t *coord, fsdp_local *l) {
    memset(l, 0, sizeof *l);
    l->numel = 1;
    for (int d = 0; d < s->ndim; d++) {
        int64_t begin = 0, end = s->shape[d];
        for (int order = 0; order < s->mesh_ndim; order++)
            for (int m = 0; m < s->mesh_ndim; m++) {
                const fsdp_placement *p = &s->place[m];
                if (p->kind != FSDP_SHARD || p->dim != d || p->order != order) continue;
                int64_t rows = (end - begin + s->mesh_shape[m] - 1) / s->mesh_shape[m];
                int64_t first = begin + rows * coord[m], last = first + rows;
                begin = first < end ? first : end;
                end = last < end ? last : end;
            }
        l->shape[d] = end - begin;
        l->start[d] = end > begin ? begin : s->shape[d];
        l->numel *= end - begin;
    }
}

static void put_number(void *a, fsdp_dtype dtype, int64_t i, double x) {
    if (dtype == FSDP_I32) ((int32_t *)a)[i] = (int32_t)x;
    else if (dtype == FSDP_I64) ((int64_t *)a)[i] = (int64_t)x;
    else lab_put(a, dtype, i, x);
}
static double get_number(const void *a, fsdp_dtype dtype, int64_t i) {
    if (dtype == FSDP_I32) return (double)((const int32_t *)a)[i];
    if (dtype == FSDP_I64) return (double)((const int64_t *)a)[i];
    return lab_get(a, dtype, i);
}

/* Integers of 4 bits: all that becomes of them is exact in bf16 too. */
static double wild_value(const wild *c, int64_t index) {
    return 1 + (double)(lab_hash(c->salt, (uint64_t)index, 0, 0) % 13);
}

static void wild_fill(const bed *b, const wild *c, const fsdp_spec *s, void *part) {
    fsdp_local l;
    brute_part(s, b->coord, &l);
    for (int64_t i = 0; i < l.numel; i++) {
        double x = wild_value(c, whole_index(s, &l, i));
        for (int m = 0; m < s->mesh_ndim; m++)
            if (s->place[m].kind == FSDP_PARTIAL)
                x = addend(x, s->place[m].op, b->coord[m], s->mesh_shape[m]);
        put_number(part, s->dtype, i, x);
    }
}

static void wild_check(bed *b, const wild *c, const fsdp_spec *s, const void *part) {
    const double scale = c->desc.scale != 0 ? c->desc.scale : 1;
    fsdp_local l;
    brute_part(s, b->coord, &l);
    double *x = lab_doubles(l.numel + 1);
    for (int64_t i = 0; i < l.numel; i++) x[i] = get_number(part, s->dtype, i);
    join_addends(b, s, &l, x);
    for (int64_t i = 0; i < l.numel; i++) {
        double want = scale * wild_value(c, whole_index(s, &l, i));
        double off = c->has_avg ? 1e-6 * fabs(want) : 0; /* thirds */
        W_CHECK(fabs(x[i] - want) <= off, "element %lld is %.17g, expected %.17g", (long long)i,
                x[i], want);
    }
    free(x);
    b->checks++;
}

/* -- drawing -- */

static fsdp_placement wild_place(uint64_t *state, int ndim, int op) {
    fsdp_placement p;
    int what = lab_pick(state, ndim ? 4 : 2);
    memset(&p, 0, sizeof p);
    if (what == 1) p.kind = FSDP_PARTIAL, p.op = (int8_t)op;
    if (what > 1) p.kind = FSDP_SHARD, p.dim = (int8_t)lab_pick(state, ndim);
    return p;
}

/* A random order of the cuts of each tensor dim. */
static void wild_orders(uint64_t *state, int mesh_ndim, fsdp_placement *place) {
    for (int m = 0; m < mesh_ndim; m++) {
        int before = 0;
        for (int k = 0; k < m; k++)
            before += place[k].kind == FSDP_SHARD && place[k].dim == place[m].dim;
        if (place[m].kind != FSDP_SHARD) continue;
        place[m].order = (int8_t)lab_pick(state, before + 1); /* insert m there */
        for (int k = 0; k < m; k++)
            if (place[k].kind == FSDP_SHARD && place[k].dim == place[m].dim &&
                place[k].order >= place[m].order)
                place[k].order++;
    }
}

/* Addends at the end are those of the source, or of SUM from what is no addend. */
static void wild_specs(const bed *b, uint64_t *state, wild *c, fsdp_dtype dtype) {
    static const int ops[] = {FSDP_SUM, FSDP_SUM, FSDP_MAX, FSDP_MIN, FSDP_AVG};
    const int floats = fsdp_dtype_is_float(dtype), ndim = lab_pick(state, 4);
    int op = ops[lab_pick(state, floats ? 5 : 4)];
    int64_t shape[DIMS] = {0};
    fsdp_placement from[DIMS], to[DIMS];
    int kept = 0; /* addends that stay, of an op that does not go with sums */
    memset(from, 0, sizeof from), memset(to, 0, sizeof to);
    for (int d = 0; d < ndim; d++)
        shape[d] = lab_pick(state, 12) ? 1 + lab_pick(state, ndim == 1 ? 20 : 7) : 0;
    for (int m = 0; m < b->ndim; m++) {
        from[m] = wild_place(state, ndim, op);
        to[m] = wild_place(state, ndim, FSDP_SUM);
        if (from[m].kind == FSDP_PARTIAL && op == FSDP_SUM && floats && !lab_pick(state, 4))
            from[m].op = FSDP_AVG;
        if (from[m].kind != FSDP_PARTIAL || to[m].kind != FSDP_PARTIAL) continue;
        to[m].op = from[m].op;
        kept |= op == FSDP_MAX || op == FSDP_MIN;
    }
    for (int m = 0; m < b->ndim; m++)
        if (kept && from[m].kind != FSDP_PARTIAL && to[m].kind == FSDP_PARTIAL)
            memset(&to[m], 0, sizeof to[m]);
    wild_orders(state, b->ndim, from), wild_orders(state, b->ndim, to);
    CHECK_OK(fsdp_spec_init(&c->desc.from, b->ndim, b->shape, from, dtype, ndim, shape));
    CHECK_OK(fsdp_spec_init(&c->desc.to, b->ndim, b->shape, to, dtype, ndim, shape));
    for (int m = 0; m < b->ndim; m++) c->has_avg |= from[m].op == FSDP_AVG;
}

static void wild_draw(const bed *b, uint64_t *state, int number, wild *c) {
    static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_F32, FSDP_F64, FSDP_BF16, FSDP_I32, FSDP_I64};
    static const fsdp_dtype comms[] = {FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, FSDP_BF16, FSDP_F32, FSDP_F64};
    static const double scales[] = {0, 1, 0.5, 2, 0.25};
    memset(c, 0, sizeof *c);
    snprintf(c->name, sizeof c->name, "wild %d", number);
    c->salt = h_rand64(state);
    const fsdp_dtype dtype = dtypes[lab_pick(state, 6)];
    wild_specs(b, state, c, dtype);
    c->desc.name = c->name;
    if (fsdp_dtype_is_float(dtype)) {
        c->desc.comm_dtype = comms[lab_pick(state, 5)];
        c->desc.scale = scales[lab_pick(state, 5)];
    }
    for (int k = 0; k < 2; k++) c->kind[k] = lab_pick(state, WILD_KINDS);
    for (int k = 0; k < 2; k++) /* it lasts as long as the dmesh */
        if (c->kind[k] == FLUSH && lab_pick(state, 4)) c->kind[k] = SHARED;
    c->beside = lab_pick(state, 2);
    c->in_place = lab_pick(state, 2);
    /* Thirds are rounded to the dtype that travels, and to that of the result. */
    if (c->has_avg && dtype == FSDP_BF16) c->desc.comm_dtype = FSDP_F32;
}

/* -- running -- */

static char *wild_memory(wild_bed *wb, const wild *c, int side, int64_t bytes) {
    void *ptr = NULL;
    switch (c->kind[side]) {
    case PRIVATE: return (char *)lab_zeros((size_t)bytes + GUARD, 1);
    case SHARED: return wb->arena[side];
    case INSIDE: return wb->arena[side] + 128;
    default: CALL(wb->b.w, fsdp_dmesh_alloc(wb->b.dm, bytes, &ptr)); return (char *)ptr;
    }
}

static void wild_say(const bed *b, const wild *c, const char *when) {
    int at = snprintf(w_case, sizeof w_case, "%s %s: %s, mesh", c->name, when,
                      fsdp_dtype_name(c->desc.from.dtype));
    for (int m = 0; m < b->ndim; m++)
        at += snprintf(w_case + at, sizeof w_case - (size_t)at, " %d", (int)b->shape[m]);
    for (int side = 0; side < 2; side++) {
        const fsdp_spec *s = side ? &c->desc.to : &c->desc.from;
        at += snprintf(w_case + at, sizeof w_case - (size_t)at, side ? " to" : ", from");
        for (int m = 0; m < b->ndim; m++) {
            const fsdp_placement *p = &s->place[m];
            at += snprintf(w_case + at, sizeof w_case - (size_t)at, " %c%d.%d",
                           "RSP"[p->kind], p->kind == FSDP_PARTIAL ? p->op : p->dim, p->order);
        }
    }
    for (int d = 0; d < c->desc.from.ndim; d++)
        at += snprintf(w_case + at, sizeof w_case - (size_t)at, "%s%d", d ? "x" : ", tensor ",
                       (int)c->desc.from.shape[d]);
}

/* Collectives of a run: as many as its route says, but none of a group that has no element. */
static void wild_records(const wild_bed *wb, const fsdp_redistribution_info *info,
                         const fsdp_spec *s) {
    int collectives = 0, even = 1, empty = lab_numel(s->ndim, s->shape) == 0;
    const int ranks = fsdp_world_size(wb->b.w);
    for (int d = 0; d < s->ndim; d++) even &= s->shape[d] % ranks == 0;
    for (int i = 0; i < wb->log.num; i++) {
        const fsdp_op *op = &wb->log.ops[i];
        if (!is_collective(op)) continue;
        W_CHECK(op->group_size > 1, "a collective of one rank");
        collectives++;
    }
    const int most = empty ? 0 : info->route.num_collectives;
    W_CHECK(even ? collectives == most : collectives <= most, "%d collectives, expected %d",
            collectives, most);
}

static void wild_run(wild_bed *wb, const wild *c, fsdp_redistribution *r, const fsdp_spec *from,
                     const fsdp_spec *to) {
    bed *b = &wb->b;
    fsdp_redistribution_info info;
    fsdp_local parts[2];
    int only_sums = 1;
    CALL(b->w, fsdp_redistribution_get(r, &info));
    brute_part(from, b->coord, &parts[0]), brute_part(to, b->coord, &parts[1]);
    W_CHECK(!memcmp(&info.from, &parts[0], sizeof info.from), "the part of src");
    W_CHECK(!memcmp(&info.to, &parts[1], sizeof info.to), "the part of dst");
    for (int k = 0; k < info.route.num_steps; k++)
        only_sums &= info.route.steps[k].kind == FSDP_STEP_ALL_REDUCE;
    const int64_t size = (int64_t)fsdp_dtype_size(from->dtype);
    const int64_t in = info.from.numel * size, out = info.to.numel * size;
    const int in_place = only_sums && c->in_place && c->kind[0] != FLUSH;
    const int guard = c->kind[1] == FLUSH && !in_place ? 0 : GUARD;
    const int64_t room = c->kind[1] == SHARED && !in_place ? info.dst_capacity : out;
    W_CHECK(info.src_capacity >= in && info.dst_capacity >= out && info.dst_capacity < ARENA / 2 &&
                info.src_capacity < ARENA / 2,
            "capacities %lld, %lld", (long long)info.src_capacity, (long long)info.dst_capacity);
    char *src = wild_memory(wb, c, 0, in), *was = (char *)lab_zeros((size_t)in + 1, 1);
    char *dst = in_place ? src : wild_memory(wb, c, 1, out);
    if (!in_place) memset(dst, GUARD_BYTE, (size_t)out);
    memset(dst + room, GUARD_BYTE, (size_t)guard);
    wild_fill(b, c, from, src);
    memcpy(was, src, (size_t)in);
    wb->log.num = 0;
    if (c->beside) {
        CALL(b->w, fsdp_redistribute_begin(r, dst, src));
        CALL(b->w, fsdp_redistribute_wait(r));
    } else CALL(b->w, fsdp_redistribute(r, dst, src));
    CALL(b->w, fsdp_wait_stream(b->model, FSDP_STREAM_COMPUTE));
    wild_records(wb, &info, from);
    wild_check(b, c, to, dst);
    if (!in_place) W_CHECK(!memcmp(src, was, (size_t)in), "src has changed");
    for (int k = 0; k < guard; k++)
        W_CHECK(((unsigned char *)dst)[room + k] == GUARD_BYTE, "byte %d behind dst was written",
                k);
    free(was);
    if (c->kind[0] == PRIVATE) free(src);
    if (c->kind[1] == PRIVATE && !in_place) free(dst);
}

static void wild_one(wild_bed *wb, uint64_t *state, int number) {
    fsdp_redistribution *r;
    wild c;
    wild_draw(&wb->b, state, number, &c);
    const int ndim = c.desc.from.ndim, resizes = ndim && !lab_pick(state, 3);
    const int dim = ndim ? lab_pick(state, ndim) : 0;
    fsdp_spec from = c.desc.from, to = c.desc.to;
    const int64_t whole = ndim ? from.shape[dim] : 0;
    const int64_t less = lab_pick(state, (int)whole + 1);
    wild_say(&wb->b, &c, "whole");
    CALL(wb->b.w, fsdp_redistribution_create(wb->b.dm, &c.desc, &r));
    wild_run(wb, &c, r, &from, &to);
    if (!resizes) return;
    wild_say(&wb->b, &c, "smaller");
    from.shape[dim] = to.shape[dim] = less;
    CALL(wb->b.w, fsdp_redistribution_resize(r, dim, less));
    wild_run(wb, &c, r, &from, &to);
    wild_say(&wb->b, &c, "again");
    from.shape[dim] = to.shape[dim] = whole;
    CALL(wb->b.w, fsdp_redistribution_resize(r, dim, whole));
    wild_run(wb, &c, r, &from, &to);
}

static const struct {
    int ndim;
    int32_t shape[3];
} wild_meshes[9][WILD_MESHES] = {
    {{0, {0}}},
    {{0, {0}}},
    {{1, {2}}, {2, {1, 2}}, {3, {1, 2, 1}}, {1, {2}}},
    {{1, {3}}, {2, {3, 1}}, {1, {3}}, {2, {1, 3}}},
    {{1, {4}}, {2, {2, 2}}, {3, {2, 1, 2}}, {2, {2, 2}}},
    {{0, {0}}},
    {{2, {3, 2}}, {2, {2, 3}}, {3, {2, 1, 3}}, {1, {6}}},
    {{0, {0}}},
    {{3, {2, 2, 2}}, {2, {2, 4}}, {1, {8}}, {2, {4, 2}}},
};

static void wild_renew(wild_bed *wb, uint64_t *state) {
    bed *b = &wb->b;
    memset(&b->links, 0, sizeof b->links);
    b->links.no_all_to_all = !lab_pick(state, 4);
    b->links.greedy = !lab_pick(state, 4);
    for (int m = 0; m < b->ndim; m++) { /* from costly hops to costly bytes */
        b->links.hop_us[m] = lab_pick(state, 3) ? 0.01 : 0;
        b->links.gbytes_per_s[m] = lab_pick(state, 2) ? 1e-3 : 0;
    }
    b->overlap = lab_pick(state, 2);
    bed_renew(b);
    for (int k = 0; k < 2; k++)
        CALL(b->w, fsdp_dmesh_alloc(b->dm, ARENA, (void **)&wb->arena[k]));
}

static void wild_rank(lab_rank *r) {
    const wild_row *row = (const wild_row *)r->arg;
    const int cases = W_SLOW ? row->cases / 10 : row->cases;
    uint64_t state = row->seed;
    wild_bed *beds = (wild_bed *)lab_zeros(WILD_MESHES, sizeof *beds);
    int checks = 0;
    for (int i = 0; i < WILD_MESHES; i++) {
        bed_open(&beds[i].b, r->w, wild_meshes[row->ranks][i].ndim,
                 wild_meshes[row->ranks][i].shape, 0);
        lab_watch(&beds[i].log, r->w, beds[i].b.model);
    }
    for (int done = 0, k = 0; done < cases; k++) {
        wild_bed *wb = &beds[k % WILD_MESHES];
        wild_renew(wb, &state);
        for (int i = 0; i < 40 && done < cases; i++) wild_one(wb, &state, done++);
    }
    for (int i = 0; i < WILD_MESHES; i++) {
        checks += beds[i].b.checks;
        fsdp_model_destroy(beds[i].b.model);
        free(beds[i].log.ops);
    }
    CHECK(checks >= cases);
    free(beds);
}

static const wild_row wild_rows[] = {
    {"2 ranks", 1, 2, 3500, 0, 0},         {"3 ranks", 2, 3, 3500, 0, 0},
    {"4 ranks", 3, 4, 6500, 0, 0},         {"8 ranks", 4, 8, 900, 0, 0},
    {"6 ranks", 5, 6, 600, 0, 0},          {"2 ranks, 1 lane", 6, 2, 1500, 1, 0},
    {"3 ranks, 2 lanes", 7, 3, 1200, 2, 0}, {"4 ranks, 2 lanes", 8, 4, 1500, 2, 0},
    {"4 ranks, 1 lane", 9, 4, 500, 1, 0},  {"2 processes", 10, 2, 200, 0, 1},
    {"4 processes, 1 lane", 11, 4, 100, 1, 1},
};
TEST_P_TIMEOUT(dtensor, random, wild_rows, 300) {
    lab_how how = FSDP_ZERO;
    how.lanes = row->lanes, how.processes = row->processes;
    lab_run(row->ranks, &how, wild_rank, (void *)(uintptr_t)row);
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
