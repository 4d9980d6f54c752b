/* test_dtensor.c - redistributions of fsdp_dtensor.h on ranks: each part compared with the elements
   of its spec; the numbers of ops and copies; sizes that change; work next to the caller's stream;
   replicas that differ; every error.

   SPDX-License-Identifier: MIT */
#define TAGS AT_NIGHT(GLOO | NCCL)
#include "harness.h"
#include <math.h> /* fabs */
#include "lab.h"
#include "golden.h"
#include "lab_dtensor.h"
#include "lab_bed.h"
#include "sim.h"
#include "fsdp_dtensor.h"

/* ---- a mesh of ranks ------------------------------------------------------------------------- */

static void bed_open(bed *b, fsdp_world *w, int ndim, const int32_t *shape, int overlap) {
    static const char *const names[DIMS] = {"a", "b", "c", "d"};
    bed_locate(b, w, lab_mesh(w, ndim, shape, names, NULL));
    bed_make(b, NULL, overlap);
}

static double small_value(int64_t i) { return 1 + (double)(i % 13); }
static double index_value(int64_t i) { return (double)i; }

/* Returns 0 with backends of other hosts and devices: their memory is not counted here. */
static int lab_runs_here(void) { return !getenv("FSDP_BACKEND"); }

/* Returns device memory that only this rank uses. */
static void *own(const bed *b, int64_t bytes) {
    void *ptr;
    CALL(b->w, fsdp_alloc(b->model, FSDP_MEMORY_DEVICE, bytes ? bytes : 1, "test", &ptr));
    return ptr;
}
static void own_free(const bed *b, void *ptr, int64_t bytes) {
    fsdp_free(b->model, FSDP_MEMORY_DEVICE, ptr, bytes ? bytes : 1);
}
static float *own_floats(const bed *b, int64_t count) { return (float *)own(b, count * 4); }

/* ---- one redistribution ---------------------------------------------------------------------- */

/* FLUSH: shared, without additional memory */
enum { PRIVATE = 0, SHARED = 1, FLUSH = 2, KINDS_OF_MEMORY = 3 };

/* Reduces partial values over each mesh dim that has some, so that parts are elements. */
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
    int memory[2]; /* memory of src and dst */
    int beside;    /* uses begin and wait */
} trial;

/* Returns memory for a part: with `capacity` bytes, or with as many as the part has. */
static void *part_memory(bed *b, int kind, int64_t bytes, int64_t capacity) {
    void *ptr = NULL;
    if (kind == PRIVATE) return own(b, bytes);
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
        CALL(b->w, fsdp_wait_stream(b->model, FSDP_STREAM_COMPUTE));
        check_part(b, &to, dst, small_value, t->desc.scale != 0 ? t->desc.scale : 1, t->desc.name);
        CHECK_EQ_MEM(src, was, (size_t)(info.from.numel * size)); /* inputs are unchanged */
    }
    free(was);
    if (t->memory[0] == PRIVATE) own_free(b, src, info.from.numel * size);
    if (t->memory[1] == PRIVATE) own_free(b, dst, info.to.numel * size);
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
TEST_P(dtensor, all_pairs, pairs_rows, GLOO | NCCL | AT_NIGHT(ASAN)) {
    lab_how how = FSDP_ZERO;
    if (row->ndim > 2 && !lab_divides()) SKIP("the stub checks races of fewer streams");
    how.lanes = row->lanes;
    lab_run(row->ranks, &how, pairs, (void *)(uintptr_t)row);
}

/* ---- random redistributions ------------------------------------------------------------------ */

/* Random specs, sizes, dtypes, memory and ways to run; the expected data of a rank comes from
   nested chunks that are computed here. All ranks draw equal numbers. */
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
    int kind[2]; /* memory of src and dst */
    int in_place, beside, has_avg;
    uint64_t salt;
} wild;

typedef struct wild_bed {
    bed b;
    char *arena[2];
} wild_bed;

static int is_collective(const fsdp_op *op) {
    return op->kind == FSDP_OP_ALL_GATHER || op->kind == FSDP_OP_ALL_REDUCE ||
           op->kind == FSDP_OP_REDUCE_SCATTER || op->kind == FSDP_OP_ALL_TO_ALL;
}

/* Computes the part of a coordinate by sharding in order, as torch.chunk does. */
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

/* Returns an integer of 4 bits: all results are exact, also in bf16. */
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
        double off = c->has_avg ? 1e-6 * fabs(want) : 0; /* thirds are inexact */
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

/* Draws a random order of the shardings of each tensor dim. */
static void wild_orders(uint64_t *state, int mesh_ndim, fsdp_placement *place) {
    for (int m = 0; m < mesh_ndim; m++) {
        int before = 0;
        for (int k = 0; k < m; k++)
            before += place[k].kind == FSDP_SHARD && place[k].dim == place[m].dim;
        if (place[m].kind != FSDP_SHARD) continue;
        place[m].order = (int8_t)lab_pick(state, before + 1); /* inserts m there */
        for (int k = 0; k < m; k++)
            if (place[k].kind == FSDP_SHARD && place[k].dim == place[m].dim &&
                place[k].order >= place[m].order)
                place[k].order++;
    }
}

/* Partial values in the target are those of the source, or SUM where the source has none. */
static void wild_specs(const bed *b, uint64_t *state, wild *c, fsdp_dtype dtype) {
    static const int ops[] = {FSDP_SUM, FSDP_SUM, FSDP_MAX, FSDP_MIN, FSDP_AVG};
    const int floats = fsdp_dtype_is_float(dtype), ndim = lab_pick(state, 4);
    int op = ops[lab_pick(state, floats ? 5 : 4)];
    int64_t shape[DIMS] = {0};
    fsdp_placement from[DIMS], to[DIMS];
    int kept = 0; /* partial values that stay, with an op that cannot be combined with sums */
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
    static const fsdp_dtype dtypes[] = {FSDP_F32,  FSDP_F32, FSDP_F64,
                                        FSDP_BF16, FSDP_I32, FSDP_I64};
    static const fsdp_dtype comms[] = {FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, FSDP_BF16, FSDP_F32,
                                       FSDP_F64};
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
    for (int k = 0; k < 2; k++) /* FLUSH memory lasts as long as the dmesh */
        if (c->kind[k] == FLUSH && lab_pick(state, 4)) c->kind[k] = SHARED;
    c->beside = lab_pick(state, 2);
    c->in_place = lab_pick(state, 2);
    /* Thirds are rounded to the communication dtype and to the dtype of the result. */
    if (c->has_avg && dtype == FSDP_BF16) c->desc.comm_dtype = FSDP_F32;
}

/* -- running -- */

static char *wild_memory(wild_bed *wb, const wild *c, int side, int64_t bytes) {
    void *ptr = NULL;
    switch (c->kind[side]) {
    case PRIVATE: return (char *)own(&wb->b, bytes + GUARD);
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
            at += snprintf(w_case + at, sizeof w_case - (size_t)at, " %c%d.%d", "RSP"[p->kind],
                           p -> kind == FSDP_PARTIAL ? p -> op : p -> dim, p -> order);
        }
    }
    for (int d = 0; d < c->desc.from.ndim; d++)
        at += snprintf(w_case + at, sizeof w_case - (size_t)at, "%s%d", d ? "x" : ", tensor ",
                       (int)c->desc.from.shape[d]);
}

/* Checks that a run issues the collectives of its route, but none in a group without elements. */
static void wild_records(const wild_bed *wb, const fsdp_redistribution_info *info,
                         const fsdp_spec *s) {
    int collectives = 0, even = 1, empty = lab_numel(s->ndim, s->shape) == 0;
    const int ranks = fsdp_world_size(wb->b.w);
    for (int d = 0; d < s->ndim; d++) even &= s->shape[d] % ranks == 0;
    for (int i = 0; i < wb->b.log.num; i++) {
        const fsdp_op *op = &wb->b.log.ops[i];
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
    wb->b.log.num = 0;
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
    if (c->kind[0] == PRIVATE) own_free(b, src, in + GUARD);
    if (c->kind[1] == PRIVATE && !in_place) own_free(b, dst, out + GUARD);
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
    for (int k = 0; k < 2; k++) CALL(b->w, fsdp_dmesh_alloc(b->dm, ARENA, (void **)&wb->arena[k]));
}

static void wild_rank(lab_rank *r) {
    const wild_row *row = (const wild_row *)r->arg;
    const int fewer = !lab_divides() ? 40 : W_SLOW || !lab_runs_here() ? 10 : 1;
    const int cases = row->cases / fewer;
    uint64_t state = row->seed;
    wild_bed *beds = (wild_bed *)lab_zeros(WILD_MESHES, sizeof *beds);
    int checks = 0;
    for (int i = 0; i < WILD_MESHES; i++) {
        bed_open(&beds[i].b, r->w, wild_meshes[row->ranks][i].ndim,
                 wild_meshes[row->ranks][i].shape, 0);
        bed_watch(&beds[i].b);
    }
    for (int done = 0, k = 0; done < cases; k++) {
        wild_bed *wb = &beds[k % WILD_MESHES];
        wild_renew(wb, &state);
        for (int i = 0; i < 40 && done < cases; i++) wild_one(wb, &state, done++);
    }
    for (int i = 0; i < WILD_MESHES; i++) {
        checks += beds[i].b.checks;
        fsdp_model_destroy(beds[i].b.model);
        free(beds[i].b.log.ops);
    }
    CHECK(checks >= cases);
    free(beds);
}

static const wild_row wild_rows[] = {
    {"2 ranks", 1, 2, 3500, 0, 0},
    {"3 ranks", 2, 3, 3500, 0, 0},
    {"4 ranks", 3, 4, 6500, 0, 0},
    {"8 ranks", 4, 8, 900, 0, 0},
    {"6 ranks", 5, 6, 600, 0, 0},
    {"2 ranks, 1 lane", 6, 2, 1500, 1, 0},
    {"3 ranks, 2 lanes", 7, 3, 1200, 2, 0},
    {"4 ranks, 2 lanes", 8, 4, 1500, 2, 0},
    {"4 ranks, 1 lane", 9, 4, 500, 1, 0},
    {"2 processes", 10, 2, 200, 0, 1},
    {"4 processes, 1 lane", 11, 4, 100, 1, 1},
};
TEST_P(dtensor, random, wild_rows, SECONDS(300) | SLOW) {
    lab_how how = FSDP_ZERO;
    if (row->ranks > 4 && !lab_divides()) SKIP("the stub checks races of fewer streams");
    how.lanes = row->lanes, how.processes = row->processes;
    lab_run(row->ranks, &how, wild_rank, (void *)(uintptr_t)row);
}

/* ---- ops ------------------------------------------------------------------------------------- */

/* Letters for the ops of a run on this mesh dim: Z zero, C copy, G all_gather, S reduce_scatter, R
   all_reduce, A all_to_all, U wait, W grads written, F call. */
static char letter_of(const fsdp_op *op) {
    switch (op->kind) {
    case FSDP_OP_ZERO: return 'Z';
    case FSDP_OP_COPY: return 'C';
    case FSDP_OP_ALL_GATHER: return 'G';
    case FSDP_OP_REDUCE_SCATTER: return 'S';
    case FSDP_OP_ALL_REDUCE: return 'R';
    case FSDP_OP_ALL_TO_ALL: return 'A';
    case FSDP_OP_WAIT: return 'U';
    case FSDP_OP_GRADS_WRITTEN: return 'W';
    case FSDP_OP_CALL: return 'F';
    default: return '?';
    }
}

/* Private memory; the start of memory that peers read, with space for padding; and the middle of
   it, with space for the part only. */
typedef struct counts_row {
    const char *name;
    const char *from, *to;
    int ranks;
    int ndim;
    int64_t shape[3];
    int op;                                 /* op of P */
    const char *private_, *shared, *inside; /* ops of most ranks */
    /* ops of the last rank; NULL: as on the others */
    const char *last_private, *last_shared, *last_inside;
    int64_t count; /* elements of the collective; 0: there is none */
    int64_t wire;  /* bytes of f32 on the wire */
} counts_row;

/* Wire bytes of f32, computed by hand: (n-1)*c*rest*4 for a gather, (n-1)/n of the padded full
   tensor for a scatter or an exchange, 2(n-1)/n for a sum. */
static const counts_row counts_rows[] = {
    /* dim 0, even: no copies in memory that peers read */
    {"S0-R even", "S0", "R", 2, 2, {4, 6}, 0, "CG", "G", "G", NULL, NULL, NULL, 12, 1 * 12 * 4},
    {"S0-R even, 4", "S0", "R", 4, 2, {8, 3}, 0, "CG", "G", "G", NULL, NULL, NULL, 6, 3 * 6 * 4},
    /* ragged: space for padding saves the copies; the last part is short */
    {"S0-R ragged", "S0", "R", 2, 2, {5, 3}, 0, "CGC", "G", "GC", "CGC", "G", "CGC", 9, 1 * 9 * 4},
    {"S0-R empty part",
     "S0",
     "R",
     4,
     2,
     {3, 3},
     0,
     "CGC",
     "G",
     "GC",
     "GC",
     "G",
     "GC",
     3,
     3 * 3 * 4},
    /* a sequence dim: one copy after a gather, one before a scatter, also in place */
    {"S1-R even", "S1", "R", 2, 3, {2, 4, 3}, 0, "CGC", "GC", "GC", NULL, NULL, NULL, 12, 12 * 4},
    {"S1-R of (1,S,D)", "S1", "R", 2, 3, {1, 4, 3}, 0, "CG", "G", "G", NULL, NULL, NULL, 6, 6 * 4},
    {"S1-R ragged",
     "S1",
     "R",
     2,
     3,
     {2, 5, 3},
     0,
     "CGC",
     "GC",
     "GC",
     "CGC",
     "GC",
     "CGC",
     18,
     18 * 4},
    {"P-S0 even", "P", "S0", 2, 2, {4, 6}, FSDP_SUM, "CS", "S", "S", NULL, NULL, NULL, 12, 12 * 4},
    {"P-S0 ragged",
     "P",
     "S0",
     2,
     2,
     {5, 3},
     FSDP_SUM,
     "CS",
     "S",
     "CS",
     "CSC",
     "S",
     "CSC",
     9,
     9 * 4},
    {"P-S0 AVG",
     "P",
     "S0",
     2,
     2,
     {4, 6},
     FSDP_AVG,
     "CSC",
     "SC",
     "SC",
     NULL,
     NULL,
     NULL,
     12,
     12 * 4},
    {"P-S1 even",
     "P",
     "S1",
     2,
     3,
     {2, 4, 3},
     FSDP_SUM,
     "CS",
     "CS",
     "CS",
     NULL,
     NULL,
     NULL,
     12,
     12 * 4},
    {"P-S1 ragged",
     "P",
     "S1",
     2,
     2,
     {1, 3},
     FSDP_SUM,
     "CS",
     "S",
     "CS",
     "CSC",
     "S",
     "CSC",
     2,
     2 * 4},
    {"P-R", "P", "R", 2, 2, {4, 6}, FSDP_SUM, "CRC", "CR", "CR", NULL, NULL, NULL, 24, 24 * 4},
    {"P-R of 3", "P", "R", 3, 1, {7}, FSDP_MAX, "CRC", "CR", "CR", NULL, NULL, NULL, 7, 38},
    {"P-R AVG",
     "P",
     "R",
     2,
     2,
     {4, 6},
     FSDP_AVG,
     "CRC",
     "CRC",
     "CRC",
     NULL,
     NULL,
     NULL,
     24,
     24 * 4},
    {"S0-S1 even", "S0", "S1", 2, 2, {4, 6}, 0, "CA", "CA", "CA", NULL, NULL, NULL, 6, 6 * 4},
    {"S1-S0 even", "S1", "S0", 2, 2, {4, 6}, 0, "CAC", "AC", "AC", NULL, NULL, NULL, 6, 6 * 4},
    {"S0-S1 ragged",
     "S0",
     "S1",
     2,
     2,
     {5, 3},
     0,
     "CAC",
     "CA",
     "CAC",
     "CAC",
     "CAC",
     "CAC",
     6,
     6 * 4},
    {"MAX-S0",
     "P",
     "S0",
     2,
     2,
     {4, 6},
     FSDP_MAX,
     "CRC",
     "CRC",
     "CRC",
     NULL,
     NULL,
     NULL,
     24,
     24 * 4},
    /* no communication */
    {"R-S0", "R", "S0", 2, 2, {4, 6}, 0, "C", "C", "C", NULL, NULL, NULL, 0, 0},
    {"R-S0, nothing for the last", "R", "S0", 4, 1, {5}, 0, "C", "C", "C", "", "", "", 0, 0},
    {"S0-P", "S0", "P", 2, 2, {4, 6}, FSDP_SUM, "ZC", "ZC", "ZC", NULL, NULL, NULL, 0, 0},
    {"R-P", "R", "P", 2, 2, {4, 6}, FSDP_SUM, "C", "C", "C", "Z", "Z", "Z", 0, 0},
    {"R-R", "R", "R", 2, 2, {4, 6}, 0, "C", "C", "C", NULL, NULL, NULL, 0, 0},
    {"P-P", "P", "P", 2, 2, {4, 6}, FSDP_MIN, "C", "C", "C", NULL, NULL, NULL, 0, 0},
    {"nothing at all", "S0", "R", 2, 2, {0, 6}, 0, "", "", "", NULL, NULL, NULL, 0, 0},
    /* one rank: all placements are equal */
    {"one rank S0-R", "S0", "R", 1, 2, {4, 6}, 0, "C", "C", "C", NULL, NULL, NULL, 0, 0},
    {"one rank P-S1", "P", "S1", 1, 2, {4, 6}, FSDP_SUM, "C", "C", "C", NULL, NULL, NULL, 0, 0},
};

static fsdp_spec spec_of(const bed *b, const char *words, int op, fsdp_dtype dtype, int ndim,
                         const int64_t *shape) {
    fsdp_placement place[DIMS];
    fsdp_spec s;
    memset(place, 0, sizeof place);
    placements(words, NULL, place);
    for (int m = 0; m < b->ndim; m++)
        if (place[m].kind == FSDP_PARTIAL) place[m].op = (int8_t)op;
    CHECK_OK(fsdp_spec_init(&s, b->ndim, b->shape, place, dtype, ndim, shape));
    return s;
}

static fsdp_redistribution *make(bed *b, const char *name, const char *from, const char *to, int op,
                                 int ndim, const int64_t *shape) {
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *r;
    d.name = name;
    d.from = spec_of(b, from, op, FSDP_F32, ndim, shape);
    d.to = spec_of(b, to, op, FSDP_F32, ndim, shape);
    CALL(b->w, fsdp_redistribution_create(b->dm, &d, &r));
    return r;
}

static void check_counts(bed *b, const counts_row *row, const lab_log *log, int memory) {
    const char *most[] = {row->private_, row->shared, row->inside};
    const char *last[] = {row->last_private, row->last_shared, row->last_inside};
    const int is_last = fsdp_rank(b->w) == row->ranks - 1;
    const char *want = is_last && last[memory] ? last[memory] : most[memory];
    char got[32];
    int collectives = 0;
    for (int i = 0; i < log->num; i++) got[i] = letter_of(&log->ops[i]);
    got[log->num] = 0;
    W_CHECK(!strcmp(got, want), "records '%s', expected '%s'", got, want);
    for (int i = 0; i < log->num; i++) {
        const fsdp_op *op = &log->ops[i];
        CHECK_EQ_STR(op->what, row->name);
        CHECK_EQ_STR(fsdp_op_label(op), "activation");
        CHECK_EQ_INT(op->stream, FSDP_STREAM_COMPUTE);
        if (!is_collective(op)) continue;
        collectives++;
        CHECK_EQ_INT(op->group_size, row->ranks);
        CHECK_EQ_INT(op->count, row->count);
        CHECK_EQ_INT(op->bytes, row->wire);
    }
    CHECK_EQ_INT(collectives, row->count > 0);
}

static void counts(lab_rank *r) {
    const counts_row *row = (const counts_row *)r->arg;
    const int32_t mesh[1] = {row->ranks};
    fsdp_redistribution_info info;
    lab_log log;
    trial t;
    bed b;
    memset(&log, 0, sizeof log), memset(&t, 0, sizeof t);
    bed_open(&b, r->w, 1, mesh, 0);
    b.links.gbytes_per_s[0] = 1e-3; /* otherwise a gather and a slice replace a small exchange */
    bed_renew(&b);
    lab_watch(&log, r->w, b.model);
    fsdp_redistribution *run = make(&b, row->name, row->from, row->to, row->op, row->ndim,
                                    row->shape);
    CALL(b.w, fsdp_redistribution_get(run, &info));
    if (row->shape[0]) CHECK_EQ_INT(info.route.num_collectives, row->count > 0);
    if (row->shape[0]) CHECK_EQ_INT(info.route.wire_bytes, row->wire);
    t.desc.from = spec_of(&b, row->from, row->op, FSDP_F32, row->ndim, row->shape);
    t.desc.to = spec_of(&b, row->to, row->op, FSDP_F32, row->ndim, row->shape);
    t.desc.name = row->name;
    for (int memory = 0; memory < 3; memory++) {
        const int64_t more = memory == 2 ? 128 : 0; /* offset of the part */
        const int kind = memory ? SHARED : PRIVATE;
        char *src = (char *)part_memory(&b, kind, info.from.numel * 4, info.src_capacity + more);
        char *dst = (char *)part_memory(&b, kind, info.to.numel * 4, info.dst_capacity + more);
        src += more, dst += more;
        snprintf(w_case, sizeof w_case, "%s, memory %d", row->name, memory);
        fill_part(&t.desc.from, b.coord, small_value, src);
        log.num = 0;
        CALL(b.w, fsdp_redistribute(run, dst, src));
        check_counts(&b, row, &log, memory);
        CALL(b.w, fsdp_wait_stream(b.model, FSDP_STREAM_COMPUTE));
        check_part(&b, &t.desc.to, dst, small_value, 1, row->name);
        if (memory != PRIVATE) continue;
        own_free(&b, src, info.from.numel * 4), own_free(&b, dst, info.to.numel * 4);
    }
    fsdp_model_destroy(b.model);
    free(log.ops);
}
TEST_P(dtensor, records, counts_rows) { lab_run(row->ranks, NULL, counts, (void *)(uintptr_t)row); }

/* ---- a steady state -------------------------------------------------------------------------- */

/* Compares all fields except the numbers of ops, and of the events that they wait for. */
static void same_records(const lab_log *a, const lab_log *b) {
    CHECK_EQ_INT(a->num, b->num);
    for (int i = 0; i < a->num; i++) {
        fsdp_op x = a->ops[i], y = b->ops[i];
        for (int k = 0; k < x.num_waits && k < y.num_waits; k++)
            CHECK_EQ_INT(x.wait[k].stream, y.wait[k].stream);
        x.seq = y.seq = 0;
        memset(x.wait, 0, sizeof x.wait), memset(y.wait, 0, sizeof y.wait);
        CHECK_EQ_MEM(&x, &y, sizeof x);
    }
}

enum { STEADY = 6 };
static void steady_round(bed *b, fsdp_redistribution *const *runs, char *const *memory,
                         int beside) {
    for (int k = 0; k < STEADY; k++) {
        char *src = memory[k % 2], *dst = memory[2 + k % 2];
        if (k % 2 && beside) {
            CALL(b->w, fsdp_redistribute_begin(runs[k], dst, src));
            CALL(b->w, fsdp_redistribute_wait(runs[k]));
        } else CALL(b->w, fsdp_redistribute(runs[k], dst, src));
    }
    CALL(b->w, fsdp_wait_stream(b->model, -1));
}

static int64_t allocations_of(const lab_rank *r, const fsdp_model *model) {
    fsdp_counters c;
    CALL(r->w, fsdp_model_counters(model, &c));
    return (int64_t)c.allocations + (lib_on_streams(r->w) ? 0 : w_allocations(r->heap));
}

static void steady(lab_rank *r) {
    static const char *const ways[STEADY][2] = {{"S0 S1", "S1 S0"}, {"P P", "S0 R"},
                                                {"S0 S0", "R R"},   {"R P", "S1 R"},
                                                {"S1 P", "R R"},    {"P S0", "S0 S1"}};
    static const int32_t mesh[2] = {2, 2};
    static const int64_t shape[2] = {9, 10};
    const int beside = *(const int *)r->arg;
    fsdp_redistribution *runs[STEADY];
    char *memory[4];
    lab_log log[2];
    bed b;
    memset(log, 0, sizeof log);
    bed_open(&b, r->w, 2, mesh, beside);
    for (int k = 0; k < 4; k++) /* memory of peers, and private memory */
        if (k % 2) memory[k] = (char *)own(&b, 4096);
        else CALL(b.w, fsdp_dmesh_alloc(b.dm, 4096, (void **)&memory[k]));
    for (int k = 0; k < STEADY; k++)
        runs[k] = make(&b, "steady", ways[k][0], ways[k][1], FSDP_SUM, 2, shape);
    for (int k = 0; k < 2; k++) steady_round(&b, runs, memory, beside);
    for (int k = 0; k < 2; k++) {
        lab_watch(&log[k], r->w, b.model);
        const int64_t before = allocations_of(r, b.model);
        steady_round(&b, runs, memory, beside);
        if (lab_runs_here()) CHECK_EQ_INT(allocations_of(r, b.model), before);
        fsdp_extension watcher = FSDP_ZERO;
        watcher.op = lab_saw, watcher.user = &log[k];
        CALL(b.w, fsdp_detach(b.model, &watcher));
    }
    CHECK(log[0].num > STEADY);
    same_records(&log[0], &log[1]);
    for (int k = 0; k < 2; k++) own_free(&b, memory[2 * k + 1], 4096), free(log[k].ops);
    fsdp_model_destroy(b.model);
}
static const struct {
    const char *name;
    int overlap, lanes;
} ways_to_run[] = {
    {"inline", 0, 0}, {"inline, overlap", 1, 0}, {"1 lane", 1, 1}, {"2 lanes", 1, 2}};
TEST_P(dtensor, steady_state, ways_to_run) {
    lab_how how = FSDP_ZERO;
    int beside = row->overlap;
    how.lanes = row->lanes;
    lab_run(4, &how, steady, &beside);
}

/* ---- other sizes ----------------------------------------------------------------------------- */

static void resized(lab_rank *r) {
    static const int32_t mesh[2] = {2, 2};
    static const int64_t shape[2] = {8, 4};
    fsdp_redistribution_info first, now;
    lab_log log;
    bed b;
    void *src, *dst;
    memset(&log, 0, sizeof log);
    bed_open(&b, r->w, 2, mesh, 1);
    fsdp_redistribution *run = make(&b, "tokens", "S0 P", "R S1", FSDP_SUM, 2, shape);
    CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, &src));
    CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, &dst));
    CALL(b.w, fsdp_redistribution_get(run, &first));
    lab_watch(&log, r->w, b.model);
    CALL(b.w, fsdp_redistribute(run, dst, src));
    const int64_t before = allocations_of(r, b.model);
    const int num = log.num;
    for (int64_t rows = 7; rows >= 0; rows--) {
        const int64_t small[2] = {rows, 4};
        const int begin = log.num;
        const fsdp_spec from = spec_of(&b, "S0 P", FSDP_SUM, FSDP_F32, 2, small),
                        to = spec_of(&b, "R S1", FSDP_SUM, FSDP_F32, 2, small);
        CALL(b.w, fsdp_redistribution_resize(run, 0, rows));
        CALL(b.w, fsdp_redistribution_get(run, &now));
        CHECK_EQ_MEM(&now.route, &first.route, sizeof now.route);
        CHECK_EQ_INT(now.routes, first.routes);
        fill_part(&from, b.coord, small_value, src);
        CALL(b.w, fsdp_redistribute(run, dst, src));
        CALL(b.w, fsdp_wait_stream(b.model, FSDP_STREAM_COMPUTE));
        check_part(&b, &to, dst, small_value, 1, "resized");
        for (int i = begin; rows == 4 && i < log.num; i++) { /* as even as 8 rows */
            CHECK_EQ_INT(log.num - begin, num);
            CHECK(log.ops[i].src_ptr == log.ops[i - begin].src_ptr);
            CHECK(log.ops[i].dst_ptr == log.ops[i - begin].dst_ptr);
            CHECK_EQ_INT(2 * log.ops[i].count, log.ops[i - begin].count);
        }
        if (!rows) CHECK_EQ_INT(log.num, begin);
    }
    if (lab_runs_here()) CHECK_EQ_INT(allocations_of(r, b.model), before);
    CALL(b.w, fsdp_redistribution_resize(run, 0, 8));
    REFUSED(b.w, fsdp_redistribution_resize(run, 0, 9), "[E014] redistribution_resize: 'tokens'");
    REFUSED(b.w, fsdp_redistribution_resize(run, 0, -1), "dim 0 is to have -1 rows");
    REFUSED(b.w, fsdp_redistribution_resize(run, 2, 1), "[E014]");
    REFUSED(b.w, fsdp_redistribution_resize(run, -1, 1), "[E014]");
    CALL(b.w, fsdp_redistribute_begin(run, dst, src));
    REFUSED_AS(FSDP_ERR_INVALID_STATE, b.w, fsdp_redistribution_resize(run, 0, 4),
               "[E015] redistribution_resize: 'tokens' is under way");
    CALL(b.w, fsdp_redistribute_wait(run));
    CALL(b.w, fsdp_redistribution_get(run, &now));
    CHECK_EQ_INT(now.from.shape[0], first.from.shape[0]);
    CHECK_EQ_INT(now.runs, 10);
    fsdp_model_destroy(b.model);
    free(log.ops);
}
TEST_P(dtensor, resize, ways_to_run) {
    lab_how how = FSDP_ZERO;
    how.lanes = row->lanes;
    lab_run(4, &how, resized, NULL);
}

/* ---- next to the caller's stream ------------------------------------------------------------- */

/* Fills with numbers whose sums depend on the order of addition. */
static void fill_any(const lab_rank *r, float *to, int64_t numel, uint64_t seed) {
    uint64_t state = seed * 1000 + (uint64_t)r->rank;
    for (int64_t i = 0; i < numel; i++) to[i] = (float)lab_uniform(&state);
}

enum { BIG = 4096 };
static void beside(lab_rank *r) {
    static const char *const ways[3][2] = {{"P P", "R R"}, {"P S0", "S0 R"}, {"S0 P", "R S1"}};
    static const int32_t mesh[2] = {2, 2};
    static const int64_t shape[2] = {63, 31};
    fsdp_redistribution *runs[3];
    float *src[3], *dst[3], *want[3];
    size_t bytes[3];
    lab_log log;
    bed b;
    memset(&log, 0, sizeof log);
    bed_open(&b, r->w, 2, mesh, 1);
    lab_watch(&log, r->w, b.model);
    for (int k = 0; k < 3; k++) {
        char name[8];
        fsdp_redistribution_info info;
        snprintf(name, sizeof name, "way %d", k);
        runs[k] = make(&b, name, ways[k][0], ways[k][1], FSDP_SUM, 2, shape);
        CALL(b.w, fsdp_redistribution_get(runs[k], &info));
        CALL(b.w, fsdp_dmesh_alloc(b.dm, BIG * 4, (void **)&src[k]));
        bytes[k] = (size_t)info.to.numel * 4;
        dst[k] = own_floats(&b, BIG), want[k] = own_floats(&b, BIG);
        fill_any(r, src[k], info.from.numel, (uint64_t)k);
        CALL(b.w, fsdp_redistribute(runs[k], want[k], src[k]));
        CALL(b.w, fsdp_wait_stream(b.model, -1));
        CALL(b.w, fsdp_redistribute_wait(runs[k])); /* none is under way */
    }
    CHECK_EQ_INT(lab_count_ops(&log, 0, FSDP_OP_WAIT, -1, NULL), 0);
    for (int round = 0; round < 20; round++) {
        for (int k = 0; k < 3; k++) memset(dst[k], 0xff, bytes[k]);
        log.num = 0;
        CALL(b.w, fsdp_redistribute_begin(runs[0], dst[0], src[0]));
        CALL(b.w, fsdp_redistribute_begin(runs[1], dst[1], src[1]));
        for (int i = 0; i < log.num; i++)
            CHECK_EQ_INT(log.ops[i].stream, log.ops[i].kind == FSDP_OP_GRADS_WRITTEN
                                                ? FSDP_STREAM_COMPUTE
                                                : FSDP_STREAM_EXTENSION);
        CALL(b.w, fsdp_redistribute(runs[2], dst[2], src[2])); /* while the others run */
        REFUSED_AS(FSDP_ERR_INVALID_STATE, b.w, fsdp_redistribute(runs[0], dst[0], src[0]),
                   "[E020] redistribute: 'way 0' is under way");
        REFUSED_AS(FSDP_ERR_INVALID_STATE, b.w, fsdp_redistribute_begin(runs[1], dst[1], src[1]),
                   "[E020] redistribute: 'way 1' is under way");
        const int num = log.num;
        for (int k = 1; k >= 0; k--) { /* in reverse order */
            CALL(b.w, fsdp_redistribute_wait(runs[k]));
            CALL(b.w, fsdp_redistribute_wait(runs[k]));
        }
        CHECK_EQ_INT(log.num, num + 2);
        for (int i = num; i < log.num; i++) {
            CHECK_EQ_INT(log.ops[i].kind, FSDP_OP_WAIT);
            CHECK_EQ_INT(log.ops[i].stream, FSDP_STREAM_COMPUTE);
            CHECK_EQ_STR(log.ops[i].what, i == num ? "way 1" : "way 0");
        }
        CALL(b.w, fsdp_wait_stream(b.model, FSDP_STREAM_COMPUTE));
        for (int k = 0; k < 3; k++) CHECK_EQ_MEM(dst[k], want[k], bytes[k]);
    }
    for (int k = 0; k < 3; k++) own_free(&b, dst[k], BIG * 4), own_free(&b, want[k], BIG * 4);
    fsdp_model_destroy(b.model);
    free(log.ops);
}
static const struct {
    const char *name;
    int lanes, processes;
} lanes_rows[] = {{"inline", 0, 0}, {"1 lane", 1, 0}, {"2 lanes", 2, 0}, {"processes", 2, 1}};
TEST_P(dtensor, begin_and_wait, lanes_rows, GLOO | NCCL) {
    lab_how how = FSDP_ZERO;
    how.lanes = row->lanes, how.processes = row->processes;
    lab_run(4, &how, beside, NULL);
}

/* The model is destroyed, or reset, while a redistribution is under way. */
static void ends_under_way(lab_rank *r) {
    static const int32_t mesh[1] = {2};
    static const int64_t shape[2] = {5, 7};
    fsdp_redistribution_info info;
    lab_log log;
    for (int i = 0; i < 6; i++) {
        const int end = i % 3, with_unit = i / 3;
        bed b;
        void *src, *dst;
        memset(&log, 0, sizeof log);
        bed_open(&b, r->w, 1, mesh, 1);
        const fsdp_param_desc param = lab_desc(2, shape, 0, FSDP_F32, 0);
        if (with_unit) lab_unit(r->w, b.model, NULL, &param, 1);
        if (with_unit) CALL(b.w, fsdp_model_commit(b.model));
        fsdp_redistribution *run = make(&b, "late", "P", "R", FSDP_SUM, 2, shape);
        const fsdp_spec from = spec_of(&b, "P", FSDP_SUM, FSDP_F32, 2, shape),
                        to = spec_of(&b, "R", FSDP_SUM, FSDP_F32, 2, shape);
        CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, &src));
        CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, &dst));
        lab_watch(&log, r->w, b.model);
        fill_part(&from, b.coord, small_value, src);
        CALL(b.w, fsdp_redistribute_begin(run, dst, src));
        if (end == 0) fsdp_dmesh_destroy(b.dm);
        if (end == 1) {
            CALL(b.w, fsdp_model_reset(b.model));
            log.num = 0;
            CALL(b.w, fsdp_redistribute_wait(run)); /* none is under way */
            CHECK_EQ_INT(log.num, 0);
            CALL(b.w, fsdp_redistribution_resize(run, 0, 5));
            for (int k = 0; k < 2; k++) {
                CALL(b.w, fsdp_redistribute_begin(run, dst, src));
                CALL(b.w, fsdp_redistribute_wait(run));
            }
            CALL(b.w, fsdp_wait_stream(b.model, FSDP_STREAM_COMPUTE));
            check_part(&b, &to, dst, small_value, 1, "after a reset");
            CALL(b.w, fsdp_redistribution_get(run, &info));
            CHECK_EQ_INT(info.runs, 3);
        }
        fsdp_model_destroy(b.model);
        free(log.ops);
    }
}
TEST_P(dtensor, ends_under_way, lanes_rows) {
    lab_how how = FSDP_ZERO;
    how.lanes = row->lanes, how.processes = row->processes;
    lab_run(2, &how, ends_under_way, NULL);
}

/* ---- simulated streams ----------------------------------------------------------------------- */

enum { READS_EARLY = 1, WRITES_EARLY, READS_OTHER };

/* Runs one rank of 4: writes src, begins, does other work, waits, reads dst. Returns the number of
   races; *waits: the number of waits. */
static int raced(int fault, int64_t ignore, int64_t *waits) {
    static const int32_t mesh[2] = {2, 2};
    static const int64_t shape[2] = {6, 5};
    fsdp_redistribution *runs[3];
    char *src[3], *dst[3];
    sim s;
    bed b;
    sim_init(&s, 4, 1);
    s.checks = 1, s.moves = 0;
    CHECK_MSG(sim_open(&s) != NULL, "%s", fsdp_last_error(NULL));
    bed_open(&b, s.world, 2, mesh, 1);
    runs[0] = make(&b, "a", "S0 P", "R S1", FSDP_SUM, 2, shape);
    runs[1] = make(&b, "b", "P P", "R R", FSDP_SUM, 2, shape);
    runs[2] = make(&b, "c", "S1 S0", "R R", FSDP_SUM, 2, shape);
    for (int k = 0; k < 3; k++) {
        CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, (void **)&src[k]));
        CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, (void **)&dst[k]));
    }
    s.waits = 0, s.ignore_wait = ignore;
    for (int round = 0; round < 2; round++) {
        sim_write(&s, "the caller", src[0], 60);
        CALL(b.w, fsdp_redistribute_begin(runs[0], dst[0], src[0]));
        sim_write(&s, "the caller", src[1], 60);
        CALL(b.w, fsdp_redistribute_begin(runs[1], dst[1], src[1]));
        sim_write(&s, "the caller", src[2], 60);
        CALL(b.w, fsdp_redistribute(runs[2], dst[2], src[2]));
        sim_read(&s, "the caller", dst[2], 60);
        if (fault == READS_EARLY) sim_read(&s, "the caller", dst[0], 60);
        if (fault == WRITES_EARLY) sim_write(&s, "the caller", src[1], 60);
        CALL(b.w, fsdp_redistribute_wait(runs[0]));
        sim_read(&s, "the caller", dst[0], 60);
        if (fault == READS_OTHER) sim_read(&s, "the caller", dst[1], 60);
        CALL(b.w, fsdp_redistribute_wait(runs[1]));
        sim_read(&s, "the caller", dst[1], 60);
    }
    *waits = s.waits;
    const int races = s.races;
    if (races && !fault && ignore < 0) h_message("%s", s.race);
    CHECK_EQ_INT(sim_close(&s), 0);
    return races;
}
TEST(dtensor, no_race) {
    int64_t waits, none;
    int found = 0;
    CHECK_EQ_INT(raced(0, -1, &waits), 0);
    CHECK(raced(READS_EARLY, -1, &none) > 0);
    CHECK(raced(WRITES_EARLY, -1, &none) > 0);
    CHECK(raced(READS_OTHER, -1, &none) > 0);
    for (int64_t k = 0; k < waits; k++) found += raced(0, k, &none) > 0;
    CHECK_MSG(waits >= 4 && found == waits, "%d of %d waits are needed", found, (int)waits);
}

/* Random redistributions on one rank of several: nothing outside their memory is accessed, and
   there are no races. */
static void simulated(int ranks, int which, uint64_t seed, int cases) {
    uint64_t state = seed;
    wild_bed wb;
    sim s;
    memset(&wb, 0, sizeof wb);
    sim_init(&s, ranks, (int)(seed % (uint64_t)ranks));
    s.checks = 1, s.moves = 0;
    CHECK_MSG(sim_open(&s) != NULL, "%s", fsdp_last_error(NULL));
    bed_open(&wb.b, s.world, wild_meshes[ranks][which].ndim, wild_meshes[ranks][which].shape, 0);
    for (int i = 0; i < cases; i++) {
        fsdp_redistribution_info info;
        fsdp_redistribution *r;
        wild c;
        if (i % 20 == 0) wild_renew(&wb, &state);
        wild_draw(&wb.b, &state, i, &c);
        wild_say(&wb.b, &c, "simulated");
        CALL(wb.b.w, fsdp_redistribution_create(wb.b.dm, &c.desc, &r));
        CALL(wb.b.w, fsdp_redistribution_get(r, &info));
        const int64_t size = (int64_t)fsdp_dtype_size(c.desc.from.dtype);
        char *at[2];
        for (int k = 0; k < 2; k++) /* the start or the end */
            at[k] = wb.arena[k] +
                    (c.kind[k] == SHARED ? 0 : ARENA - (k ? info.to : info.from).numel * size);
        sim_write(&s, "src", at[0], info.from.numel * size);
        if (c.beside) CALL(wb.b.w, fsdp_redistribute_begin(r, at[1], at[0]));
        else CALL(wb.b.w, fsdp_redistribute(r, at[1], at[0]));
        CALL(wb.b.w, fsdp_redistribute_wait(r));
        sim_read(&s, "dst", at[1], info.to.numel * size);
        W_CHECK(!s.races, "%s", s.race);
    }
    CHECK_EQ_INT(sim_close(&s), 0);
}
static const int sim_ranks[] = {2, 3, 4, 6, 8};
TEST(dtensor, simulated) {
    for (int k = 0; k < 5; k++)
        for (int which = 0; which < WILD_MESHES; which++)
            for (uint64_t seed = 1; seed < 4; seed++)
                simulated(sim_ranks[k], which, seed, W_SLOW ? 20 : 60);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* PyTorch's table: the gradient has the source's placement, except for partial values. The last
   copy multiplies by the scale. */
static const struct back_row {
    const char *name, *from, *to, *grad, *ends, *records; /* grad NULL: the default */
} back_rows[] = {
    {"gather", "S0", "R", NULL, "S0", "C"},
    {"gather, grad P", "S0", "R", "P", "S0", "CSC"},
    {"slice", "R", "S0", NULL, "R", "CGC"},
    {"slice, grad P", "R", "S0", "P", "R", "CRC"},
    {"sum", "P", "R", NULL, "R", "C"},
    {"sum, grad P", "P", "R", "P", "P", "C"},
    {"scatter", "P", "S0", NULL, "R", "CGC"},
    {"scatter, grad P", "P", "S0", "P", "P", "C"},
    {"exchange", "S0", "S1", NULL, "S0", "CAC"},
    {"exchange, grad P", "S0", "S1", "P", "S0", "CSC"},
    {"nothing", "R", "R", NULL, "R", "C"},
    {"nothing, grad P", "R", "R", "P", "R", "CRC"},
    {"addends", "R", "P", NULL, "R", "C"},
    {"pad", "S0", "P", NULL, "S0", "C"},
    {"pad, grad P", "S0", "P", "P", "S0", "CSC"},
    {"gather, grad cut", "S0", "R", "S1", "S0", "CAC"},
};

static void backward(lab_rank *r) {
    const struct back_row *row = (const struct back_row *)r->arg;
    static const int32_t mesh[1] = {2};
    static const int64_t shape[2] = {4, 6};
    const int defaults_to_r = !strcmp(row->to, "P");
    fsdp_redistribution *forward, *back;
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution_info info;
    lab_log log;
    char got[32], *src, *dst;
    bed b;
    memset(&log, 0, sizeof log);
    bed_open(&b, r->w, 1, mesh, 0);
    b.links.gbytes_per_s[0] = 1e-3; /* so that an exchange is cheaper than a gather */
    bed_renew(&b);
    lab_watch(&log, r->w, b.model);
    d.name = row->name, d.scale = 0.5;
    d.from = spec_of(&b, row->from, 0, FSDP_F32, 2, shape);
    d.to = spec_of(&b, row->to, 0, FSDP_F32, 2, shape);
    CALL(b.w, fsdp_redistribution_create(b.dm, &d, &forward));
    const char *words = row->grad ? row->grad : defaults_to_r ? "R" : row->to;
    const fsdp_spec grad = spec_of(&b, words, 0, FSDP_F32, 2, shape),
                    ends = spec_of(&b, row->ends, 0, FSDP_F32, 2, shape);
    CALL(b.w, fsdp_redistribution_create_backward(forward, row->grad ? &grad : NULL, &back));
    CALL(b.w, fsdp_redistribution_get(back, &info));
    src = (char *)own(&b, info.from.numel * 4), dst = (char *)own(&b, info.to.numel * 4);
    fill_part(&grad, b.coord, small_value, src);
    log.num = 0;
    CALL(b.w, fsdp_redistribute(back, dst, src));
    CALL(b.w, fsdp_wait_stream(b.model, FSDP_STREAM_COMPUTE));
    for (int i = 0; i < log.num; i++) {
        char name[80];
        snprintf(name, sizeof name, "%s backward", row->name);
        CHECK_EQ_STR(log.ops[i].what, name);
        got[i] = letter_of(&log.ops[i]);
    }
    got[log.num] = 0;
    CHECK_EQ_STR(got, row->records);
    check_part(&b, &ends, dst, small_value, 0.5, row->name);
    own_free(&b, src, info.from.numel * 4), own_free(&b, dst, info.to.numel * 4);
    free(log.ops);
}
TEST_P(dtensor, backward, back_rows) { lab_run(2, NULL, backward, (void *)(uintptr_t)row); }

/* The backward is the transpose of the forward: for any x of `from` and any g of `to`, <g,
   forward(x)> equals <backward(g), x>, summed over all ranks. Copies count once, partial values
   each. */
static double product_with(bed *b, const fsdp_spec *s, const float *x, const float *y,
                           int64_t count) {
    double sum = 0;
    int counts = 1;
    for (int m = 0; m < b->ndim; m++) counts &= s->place[m].kind != FSDP_REPLICATE || !b->coord[m];
    for (int64_t i = 0; i < count * counts; i++) sum += (double)x[i] * (double)y[i];
    CALL(b->w, fsdp_all_reduce(b->w, NULL, &sum, 1, FSDP_F64, FSDP_SUM));
    return sum;
}

/* Returns a random tensor of a spec: ranks draw their parts, and equal copies. addends 0: partial
   values are equal, too. */
static float *drawn(bed *b, const fsdp_spec *s, uint64_t seed, int addends, int64_t *count) {
    fsdp_local l;
    CHECK_OK(fsdp_spec_local(s, b->coord, &l));
    for (int m = 0; m < b->ndim; m++)
        if (s->place[m].kind == FSDP_PARTIAL && addends)
            seed = seed * 31 + (uint64_t)b->coord[m] + 1;
    float *x = own_floats(b, l.numel);
    for (int64_t i = 0; i < l.numel; i++)
        lab_put(x, FSDP_F32, i, golden_value(seed, (uint64_t)whole_index(s, &l, i), 2));
    *count = l.numel;
    return x;
}

static int joins_extremes(const fsdp_spec *from, const fsdp_spec *to) {
    int joins = 0;
    for (int m = 0; m < from->mesh_ndim; m++)
        joins |= from->place[m].kind == FSDP_PARTIAL && to->place[m].kind != FSDP_PARTIAL &&
                 from->mesh_shape[m] > 1 &&
                 (from->place[m].op == FSDP_MAX || from->place[m].op == FSDP_MIN);
    return joins;
}

static void transposed(bed *b, const fsdp_spec *from, const fsdp_spec *to, double scale) {
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *there, *back;
    int64_t in, out, k;
    d.name = "there", d.from = *from, d.to = *to, d.scale = scale;
    CALL(b->w, fsdp_redistribution_create(b->dm, &d, &there));
    if (joins_extremes(from, to)) {
        REFUSED(b->w, fsdp_redistribution_create_backward(there, NULL, &back),
                "[E035] redistribution_create_backward: 'there' joins addends of MAX or MIN in");
        CHECK(!back);
        return;
    }
    CALL(b->w, fsdp_redistribution_create_backward(there, NULL, &back));
    float *x = drawn(b, from, 3, 1, &in), *g = drawn(b, to, 5, 0, &out);
    float *y = drawn(b, to, 7, 1, &k), *dx = drawn(b, from, 9, 1, &k);
    CALL(b->w, fsdp_redistribute(there, y, x));
    CALL(b->w, fsdp_redistribute(back, dx, g));
    CALL(b->w, fsdp_wait_stream(b->model, FSDP_STREAM_COMPUTE));
    const double ways[2] = {product_with(b, to, g, y, out), product_with(b, from, dx, x, in)};
    W_CHECK(fabs(ways[0] - ways[1]) <= 1e-5 * (1 + fabs(ways[0])), "there %.9g, back %.9g", ways[0],
            ways[1]);
    own_free(b, x, in * 4), own_free(b, dx, in * 4), own_free(b, g, out * 4);
    own_free(b, y, out * 4);
    b->checks++;
}

/* All pairs of placements, with partial values of each op. */
static void all_ways_back(lab_rank *r) {
    static const int8_t ops[][2] = {{FSDP_SUM, FSDP_SUM}, {FSDP_AVG, FSDP_AVG},
                                    {FSDP_AVG, FSDP_SUM}, {FSDP_SUM, FSDP_AVG},
                                    {FSDP_MAX, FSDP_MAX}, {FSDP_MIN, FSDP_MIN}};
    const pairs_row *row = (const pairs_row *)r->arg;
    specs *all = (specs *)lab_zeros(1, sizeof *all);
    bed b;
    bed_open(&b, r->w, row->ndim, row->mesh, 0);
    all_specs(row->ndim, row->mesh, row->tensor_ndim, row->shape, spec_add, all);
    for (int i = 0; i < all->num; i++, bed_renew(&b))
        for (int k = 0; k < all->num; k++)
            for (int o = 0; o < 6; o++) {
                fsdp_spec from = all->list[i], to = all->list[k];
                int has_addends = 0;
                for (int m = 0; m < row->ndim; m++) {
                    fsdp_placement *p = &from.place[m], *q = &to.place[m];
                    if (p->kind != FSDP_PARTIAL) continue;
                    has_addends = 1, p->op = ops[o][m];
                    if (q->kind == FSDP_PARTIAL) q->op = p->op;
                }
                fsdp_spec checked; /* a spec with two ops may be refused */
                if ((o && !has_addends) || !can_be(&from, &to) ||
                    fsdp_spec_init(&checked, row->ndim, row->mesh, to.place, FSDP_F32,
                                   row->tensor_ndim, row->shape))
                    continue;
                snprintf(w_case, sizeof w_case, "%d to %d, ops %d", i, k, o);
                transposed(&b, &from, &to, (i + k) % 2 ? 0 : 0.25);
            }
    CHECK(b.checks > 3 * all->num);
    free(all);
}
static const pairs_row back_pairs[] = {
    {"3 of (5,3)", 3, 1, {3}, 2, {5, 3}, 0, 0},
    {"1 of (2,3)", 1, 1, {1}, 2, {2, 3}, 0, 0},
    {"2x2 of (3)", 4, 2, {2, 2}, 1, {3}, 0, 0},
    {"2x2 of (4,3)", 4, 2, {2, 2}, 2, {4, 3}, 0, 0},
};
TEST_P(dtensor, ways_back, back_pairs) {
    lab_run(row->ranks, NULL, all_ways_back, (void *)(uintptr_t)row);
}

/* The backward has the comm_dtype of forward and a suitable name, and is made once. */
static void backward_desc(lab_rank *r) {
    static const int32_t mesh[1] = {2};
    static const int64_t shape[1] = {8};
    fsdp_redistribution *forward, *back, *again;
    fsdp_redistribution_desc d = FSDP_ZERO;
    lab_log log;
    float *x;
    bed b;
    memset(&log, 0, sizeof log);
    bed_open(&b, r->w, 1, mesh, 0);
    lab_watch(&log, r->w, b.model);
    d.name = "012345678901234567890123456789012345678901234567890123456789012";
    d.comm_dtype = FSDP_BF16;
    d.from = spec_of(&b, "R", 0, FSDP_F32, 1, shape),
    d.to = spec_of(&b, "S0", 0, FSDP_F32, 1, shape);
    CALL(b.w, fsdp_redistribution_create(b.dm, &d, &forward));
    CALL(b.w, fsdp_redistribution_create_backward(forward, NULL, &back));
    CALL(b.w, fsdp_redistribution_create_backward(forward, NULL, &again));
    CHECK(back == again && back != forward);
    CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, (void **)&x));
    log.num = 0;
    CALL(b.w, fsdp_redistribute(back, x + 64, x));
    const int at = lab_next_op(&log, 0, FSDP_OP_ALL_GATHER, -1, NULL);
    CHECK(at >= 0);
    CHECK_EQ_INT(log.ops[at].dtype, FSDP_BF16);
    CHECK_EQ_INT(log.ops[at].bytes, 4 * 2);
    CHECK_EQ_STR(log.ops[at].what,
                 "012345678901234567890123456789012345678901234567890123 backward");
    free(log.ops);
}
TEST(dtensor, backward_desc) { lab_run(2, NULL, backward_desc, NULL); }

/* ---- replicas -------------------------------------------------------------------------------- */

enum { ROWS = 6, COLUMNS = 5 };

/* Checks a part of `words` whose elements are those of the full tensor, except for one on a rank.
   */
static fsdp_status check_replicas(bed *b, const char *words, int64_t rows, int odd_rank) {
    const int64_t shape[2] = {rows, COLUMNS};
    const fsdp_spec s = spec_of(b, words, FSDP_SUM, FSDP_F32, 2, shape);
    fsdp_local l;
    CHECK_OK(fsdp_spec_local(&s, b->coord, &l));
    float *data = own_floats(b, l.numel);
    for (int64_t i = 0; i < l.numel; i++) data[i] = (float)small_value(whole_index(&s, &l, i));
    if (fsdp_rank(b->w) == odd_rank && l.numel) data[l.numel - 1] += 1;
    fsdp_status status = fsdp_dtensor_check(b->dm, &s, l.numel ? data : NULL, "norm.weight");
    own_free(b, data, l.numel * 4);
    return status;
}

static void replicas(lab_rank *r) {
    static const int32_t mesh[2] = {2, 2}; /* ranks 0 1 / 2 3 */
    bed b;
    bed_open(&b, r->w, 2, mesh, 0);
    for (int rank = -1; rank < 4; rank++) { /* rank -1: all are equal */
        const int odd = rank >= 0;
        char both[32];
        CHECK_STATUS(check_replicas(&b, "R R", ROWS, rank), odd ? FSDP_ERR_CORRUPT : FSDP_OK);
        snprintf(both, sizeof both, "ranks %d and %d ", rank ? 0 : 1, rank ? rank : 0);
        if (odd) {
            const char *text = fsdp_last_error(b.w);
            char turned[32];
            snprintf(turned, sizeof turned, "ranks %d and %d ", rank ? rank : 0, rank ? 0 : 1);
            CHECK_MSG(strstr(text, "[E024] dtensor_check: 'norm.weight'"), "%s", text);
            CHECK_MSG(strstr(text, both) || strstr(text, turned), "%s, expected %s", text, both);
        }
        CHECK_OK(fsdp_world_status(b.w)); /* the world still works */
        /* Sharded by one dim: only the ranks of the other dim are compared. */
        const int mine = rank >= 0 && rank / 2 == r->rank / 2;
        CHECK_STATUS(check_replicas(&b, "S0 R", ROWS, rank), mine ? FSDP_ERR_CORRUPT : FSDP_OK);
        if (mine) {
            char pair[2][32];
            for (int k = 0; k < 2; k++)
                snprintf(pair[k], sizeof pair[k], "ranks %d and %d ", rank / 2 * 2 + k,
                         rank / 2 * 2 + 1 - k);
            CHECK(strstr(fsdp_last_error(b.w), pair[0]) || strstr(fsdp_last_error(b.w), pair[1]));
        }
        /* Parts and partial values always differ. */
        CHECK_STATUS(check_replicas(&b, "S0 S1", ROWS, rank), FSDP_OK);
        CHECK_STATUS(check_replicas(&b, "S1 P", ROWS, rank), FSDP_OK);
        /* With one row, the second half of the ranks has nothing. */
        const int has = rank >= 0 && rank < 2 && r->rank < 2;
        CHECK_STATUS(check_replicas(&b, "S0 R", 1, rank), has ? FSDP_ERR_CORRUPT : FSDP_OK);
        CHECK_STATUS(check_replicas(&b, "R R", 0, rank), FSDP_OK);
    }
    CALL(b.w, fsdp_barrier(b.w));
}
TEST(dtensor, replicas) { lab_run(4, NULL, replicas, NULL); }

/* All bytes count, also in a part of many chunks, and so does their place. */
static void replicas_of_bytes(lab_rank *r) {
    enum { MANY = 3 * 4096 + 5 };
    static const int32_t mesh[1] = {2};
    const int64_t shape[1] = {MANY};
    bed b;
    bed_open(&b, r->w, 1, mesh, 0);
    char *data = (char *)own(&b, MANY);
    const fsdp_spec s = spec_of(&b, "R", FSDP_SUM, FSDP_U8, 1, shape);
    for (int at = 0; at < MANY; at += 4096 / 3) {
        data[at] = (char)(r->rank + 1);
        CHECK_STATUS(fsdp_dtensor_check(b.dm, &s, data, "bytes"), FSDP_ERR_CORRUPT);
        data[at] = 7;
        CHECK_STATUS(fsdp_dtensor_check(b.dm, &s, data, "bytes"), FSDP_OK);
    }
    data[MANY - 1] = (char)r->rank; /* the last one */
    CHECK_STATUS(fsdp_dtensor_check(b.dm, &s, data, "bytes"), FSDP_ERR_CORRUPT);
    data[MANY - 1] = 0;
    data[3] = (char)r->rank, data[4] = (char)(1 - r->rank); /* equal bytes in another place */
    CHECK_STATUS(fsdp_dtensor_check(b.dm, &s, data, "bytes"), FSDP_ERR_CORRUPT);
    own_free(&b, data, MANY);
}
TEST(dtensor, replicas_of_bytes) { lab_run(2, NULL, replicas_of_bytes, NULL); }

/* ---- errors ---------------------------------------------------------------------------------- */

/* A mesh is refused for a model on all ranks: nothing is made. */
static void refuse_mesh(const bed *b, const fsdp_dmesh_desc *d, fsdp_status status,
                        const char *word) {
    fsdp_dmesh *dm = b->dm;
    REFUSED_AS(status, b->w, fsdp_dmesh_create(b->model, d, &dm), word);
    CHECK(!dm);
}

/* Only one rank has a wrong desc, and the others get an error; or one rank has a different desc. */
static void refused_alone(const bed *b, const lab_rank *r) {
    fsdp_dmesh_desc d = FSDP_ZERO;
    d.mesh = b->mesh;
    d.tp_dim = r->rank == 1 ? "tensor" : "tp";
    refuse_mesh(b, &d, r->rank == 1 ? FSDP_ERR_INVALID_ARG : FSDP_ERR_INVALID_STATE,
                r->rank == 1 ? "[E003]" : "[E008] dmesh_create: it failed on another rank");
    d.tp_dim = NULL;
    for (int k = 0; k < 7; k++) { /* or a different one */
        fsdp_dmesh_desc other = d;
        if (k == 0) other.overlap = 1;
        if (k == 1) other.staging_bytes = 4096;
        if (k == 2) other.links.greedy = 1;
        if (k == 3) other.links.no_all_to_all = 1;
        if (k == 4) other.links.hop_us[1] = 3;
        if (k == 5) other.links.gbytes_per_s[0] = 3;
        if (k == 6) other.shard_dim = "tp", other.tp_dim = "dp";
        refuse_mesh(b, r->rank == 2 ? &other : &d, FSDP_ERR_MISMATCH,
                    "[E009] dmesh_create: the ranks gave other descs");
    }
}

/* A mesh without some ranks, a model on a slice, replicas over tp on half of the world. */
static void refused_slices(const bed *all, lab_rank *r) {
    static const int32_t deep[3] = {2, 2, 1}, two[1] = {2}, pair[2] = {0, 1}, inner[2] = {1, 2};
    static const char *const parts[3] = {"pp", "dp_replicate", "tp"};
    fsdp_dmesh_desc d = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh *half;
    fsdp_dmesh *dm;
    bed b = *all;
    d.mesh = lab_mesh(r->w, 1, two, NULL, pair);
    refuse_mesh(&b, &d, r->rank > 1 ? FSDP_ERR_INVALID_ARG : FSDP_ERR_INVALID_STATE,
                r->rank > 1 ? "[E004]" : "[E008]");
    md.mesh = lab_slice(r->w, b.mesh, 0);
    b.model = lab_model(r->w, &md);
    d.mesh = b.mesh;
    refuse_mesh(&b, &d, FSDP_ERR_INVALID_ARG,
                "[E005] dmesh_create: the model's mesh has 2 ranks and this one 4");
    d.mesh = md.mesh;
    CALL(r->w, fsdp_dmesh_create(b.model, &d, &dm)); /* valid for the same ranks */
    b.model = all->model;
    CALL(r->w, fsdp_mesh_slice(lab_mesh(r->w, 3, deep, parts, NULL), inner, 2, &half));
    d.mesh = half;
    refuse_mesh(&b, &d, FSDP_ERR_UNSUPPORTED,
                "[E025] dmesh_create: a mesh with tp_dim and replicate_dim has 2 of 4 ranks");
}

static void refused_meshes(lab_rank *r) {
    static const int32_t shape[2] = {2, 2};
    static const char *const names[2] = {"dp", "tp"};
    fsdp_dmesh_desc d = FSDP_ZERO;
    fsdp_dmesh *dm;
    bed b;
    memset(&b, 0, sizeof b);
    b.w = r->w;
    b.dm = (fsdp_dmesh *)&b; /* must become NULL */
    b.mesh = lab_mesh(r->w, 2, shape, names, NULL);
    b.model = lab_model(r->w, NULL);
    const int64_t live = r->heap->live;
    refuse_mesh(&b, NULL, FSDP_ERR_INVALID_ARG, "[E004] dmesh_create");
    refuse_mesh(&b, &d, FSDP_ERR_INVALID_ARG, "[E004] dmesh_create");
    REFUSED(r->w, fsdp_dmesh_create(b.model, &d, NULL), "[E101] dmesh_create");
    REFUSED(NULL, fsdp_dmesh_create(NULL, &d, &dm), "[E101] dmesh_create");
    d.mesh = b.mesh;
    d.tp_dim = "tensor";
    refuse_mesh(&b, &d, FSDP_ERR_INVALID_ARG,
                "[E003] dmesh_create: the mesh has no dim 'tensor', which tp_dim names");
    d.tp_dim = NULL, d.shard_dim = "fsdp";
    refuse_mesh(&b, &d, FSDP_ERR_INVALID_ARG, "'fsdp', which shard_dim names");
    d.shard_dim = NULL, d.replicate_dim = "ddp";
    refuse_mesh(&b, &d, FSDP_ERR_INVALID_ARG, "'ddp', which replicate_dim names");
    d.replicate_dim = "dp";
    refuse_mesh(&b, &d, FSDP_ERR_INVALID_ARG, "[E006] dmesh_create");
    d.replicate_dim = "tp";
    refuse_mesh(&b, &d, FSDP_ERR_INVALID_ARG, "[E006] dmesh_create");
    d.replicate_dim = NULL, d.shard_dim = "tp";
    refuse_mesh(&b, &d, FSDP_ERR_INVALID_ARG, "[E006] dmesh_create");
    d.shard_dim = NULL, d.staging_bytes = -1;
    refuse_mesh(&b, &d, FSDP_ERR_INVALID_ARG, "[E007] dmesh_create: staging_bytes is -1");
    d.staging_bytes = 0, d.links.base_us = -1;
    refuse_mesh(&b, &d, FSDP_ERR_INVALID_ARG, "dmesh_create");
    d.links.base_us = 0, d.start_canary = 1;
    refuse_mesh(&b, &d, FSDP_ERR_INVALID_ARG, "fsdp_dmesh_desc");
    d.start_canary = 0;
    refused_alone(&b, r);
    if (lab_runs_here()) CHECK_EQ_INT(r->heap->live, live); /* nothing leaks */
    refused_slices(&b, r);
    d.mesh = b.mesh;
    CALL(r->w, fsdp_dmesh_create(b.model, &d, &dm)); /* still works */
    fsdp_dmesh_destroy(dm);
    fsdp_dmesh_destroy(NULL);
}
TEST(dtensor_errors, meshes, GLOO) { lab_run(4, NULL, refused_meshes, NULL); }

static void other_world(lab_rank *r) {
    static const int32_t shape[1] = {2};
    fsdp_world *other = lab_world(r, 1, 0, NULL);
    fsdp_dmesh_desc d = FSDP_ZERO;
    bed b;
    memset(&b, 0, sizeof b);
    b.w = r->w, b.model = lab_model(r->w, NULL), b.dm = (fsdp_dmesh *)&b;
    d.mesh = lab_mesh(other, 1, shape, NULL, NULL);
    refuse_mesh(&b, &d, FSDP_ERR_INVALID_ARG, "[E004] dmesh_create");
    CHECK_OK(fsdp_shutdown(other));
}
TEST(dtensor_errors, another_world, GLOO) { lab_run(2, NULL, other_world, NULL); }

static void refuse(bed *b, const fsdp_redistribution_desc *d, const char *word) {
    fsdp_redistribution *out = (fsdp_redistribution *)b;
    fsdp_status status = fsdp_redistribution_create(b->dm, d, &out);
    const char *text = fsdp_last_error(b->w); /* the world is known: its log has the failure */
    CHECK_STATUS(status, FSDP_ERR_INVALID_ARG);
    W_CHECK(strstr(text, word), "'%s' does not say '%s'", text, word);
    CHECK(!out);
}

static const char long_name[] = "012345678901234567890123456789012345678901234567890123456789012";

/* Refused descs have changed nothing, and an equal desc gives the same object. */
static void same_object(const bed *at, const fsdp_redistribution_desc *desc) {
    fsdp_redistribution_desc d = *desc;
    fsdp_redistribution *run, *again;
    fsdp_redistribution_info info;
    bed b = *at;
    CALL(b.w, fsdp_redistribution_create(b.dm, &d, &run));
    CALL(b.w, fsdp_redistribution_get(run, &info));
    CHECK_EQ_INT(info.routes, 1);
    CALL(b.w, fsdp_redistribution_create(b.dm, &d, &again));
    CHECK(again == run);
    d.scale = 1; /* equivalent to 0 */
    CALL(b.w, fsdp_redistribution_create(b.dm, &d, &again));
    CHECK(again == run);
    d.name = long_name;
    CALL(b.w, fsdp_redistribution_create(b.dm, &d, &again));
    CHECK(again != run);
    CALL(b.w, fsdp_redistribution_get(again, &info));
    CHECK_EQ_INT(info.routes, 1); /* the route was searched once */
    d.name = "mlp in", d.scale = 2;
    CALL(b.w, fsdp_redistribution_create(b.dm, &d, &again));
    CHECK(again != run);
    d.scale = 0, d.comm_dtype = FSDP_BF16;
    CALL(b.w, fsdp_redistribution_create(b.dm, &d, &again));
    CHECK(again != run);
    d.name = NULL;
    CALL(b.w, fsdp_redistribution_create(b.dm, &d, &again));
}

static void refused_descs(lab_rank *r) {
    static const int32_t mesh[2] = {2, 1}, turned[2] = {1, 2};
    static const int64_t shape[2] = {4, 6}, longer[2] = {5, 6};
    fsdp_redistribution_desc d = FSDP_ZERO, x;
    fsdp_redistribution *run;
    fsdp_placement cut[2] = {{FSDP_SHARD, 0, 0, 0}, {FSDP_REPLICATE, 0, 0, 0}};
    char name[70];
    bed b;
    bed_open(&b, r->w, 2, mesh, 0);
    d.name = "mlp in";
    d.from = spec_of(&b, "S0 R", FSDP_SUM, FSDP_F32, 2, shape);
    d.to = spec_of(&b, "R R", FSDP_SUM, FSDP_F32, 2, shape);
    REFUSED(NULL, fsdp_redistribution_create(NULL, &d, &run), "[E101] redistribution_create");
    REFUSED(b.w, fsdp_redistribution_create(b.dm, &d, NULL), "[E101] redistribution_create");
    REFUSED(b.w, fsdp_redistribution_create(b.dm, NULL, &run), "[E101] redistribution_create");
    x = d, x.end_canary = 1;
    refuse(&b, &x, "fsdp_redistribution_desc");
    x = d, memset(&x.from, 0, sizeof x.from);
    refuse(&b, &x, "redistribution_create");
    x = d, x.to.place[0].kind = 7;
    refuse(&b, &x, "[E136] redistribution_create: mesh dim 0 has kind 7");
    x = d, x.to.place[1].dim = 1; /* dim of a REPLICATE */
    refuse(&b, &x, "[E155] redistribution_create");
    x = d;
    CHECK_OK(fsdp_spec_init(&x.from, 2, turned, cut, FSDP_F32, 2, shape));
    x.to = x.from;
    refuse(&b, &x,
           "[E011] redistribution_create: 'mlp in': its specs are of a mesh of another shape");
    x = d, x.to = spec_of(&b, "R R", FSDP_SUM, FSDP_F32, 2, longer);
    refuse(&b, &x, "route_find");
    x = d, x.to = spec_of(&b, "R R", FSDP_SUM, FSDP_F64, 2, shape);
    refuse(&b, &x, "route_find");
    x = d, x.to = spec_of(&b, "P R", FSDP_MAX, FSDP_F32, 2, shape);
    refuse(&b, &x, "route_find");
    snprintf(name, sizeof name, "%s!", long_name);
    x = d, x.name = name;
    refuse(&b, &x, "more than 63 bytes");
    x = d, x.comm_dtype = FSDP_I32;
    refuse(&b, &x, "[E011] redistribution_create: 'mlp in': comm_dtype");
    x = d, x.comm_dtype = (fsdp_dtype)99;
    refuse(&b, &x, "comm_dtype");
    x = d, x.scale = LAB_NAN;
    refuse(&b, &x, "scale is not finite");
    x.scale = -LAB_INF;
    refuse(&b, &x, "scale is not finite");
    x = d, x.from = spec_of(&b, "S0 R", FSDP_SUM, FSDP_I64, 2, shape);
    x.to = spec_of(&b, "R R", FSDP_SUM, FSDP_I64, 2, shape);
    x.scale = 2;
    refuse(&b, &x, "integers have neither a scale nor addends of AVG");
    x.scale = 0, x.comm_dtype = FSDP_F32;
    refuse(&b, &x, "comm_dtype is for tensors of a floating dtype");
    x.comm_dtype = FSDP_DTYPE_KEEP, x.from = spec_of(&b, "P R", FSDP_AVG, FSDP_I64, 2, shape);
    refuse(&b, &x, "integers have neither");
    x = d, x.from = x.to = spec_of(&b, "P R", FSDP_MAX, FSDP_F32, 2, shape);
    x.scale = -1;
    refuse(&b, &x, "a negative scale");
    same_object(&b, &d);
}
TEST(dtensor_errors, descs, GLOO) { lab_run(2, NULL, refused_descs, NULL); }

/* Staging memory of a given size. */
static void refused_staging(const bed *at, const int64_t *shape) {
    fsdp_redistribution *out;
    fsdp_dmesh_desc d = FSDP_ZERO;
    fsdp_dmesh *small;
    bed b = *at;
    d.mesh = b.mesh, d.staging_bytes = 31; /* 32 are needed */
    CALL(b.w, fsdp_dmesh_create(b.model, &d, &small));
    fsdp_redistribution_desc rd = FSDP_ZERO;
    rd.name = "mlp in", rd.from = spec_of(&b, "S0", FSDP_SUM, FSDP_F32, 1, shape),
    rd.to = spec_of(&b, "R", FSDP_SUM, FSDP_F32, 1, shape);
    REFUSED(b.w, fsdp_redistribution_create(small, &rd, &out),
            "[E001] redistribution_create: 'mlp in' needs staging buffers of 32 bytes, and "
            "fsdp_dmesh_desc.staging_bytes is 31");
    CHECK(!out);
    fsdp_dmesh_destroy(small);
    d.staging_bytes = 32;
    CALL(b.w, fsdp_dmesh_create(b.model, &d, &small));
    CALL(b.w, fsdp_redistribution_create(small, &rd, &out));
    rd.comm_dtype = FSDP_F64; /* needs twice as many */
    REFUSED(b.w, fsdp_redistribution_create(small, &rd, &out), "needs staging buffers of 64 bytes");
    fsdp_dmesh_destroy(small);
}

static void refused_calls(lab_rank *r) {
    static const int32_t mesh[1] = {2}, none[2] = {1, 2};
    static const int64_t shape[1] = {8};
    fsdp_placement place[2] = {{FSDP_REPLICATE, 0, 0, 0}, {FSDP_REPLICATE, 0, 0, 0}};
    fsdp_redistribution_info info;
    fsdp_redistribution *out;
    fsdp_spec other, s;
    float *x;
    void *ptr;
    bed b;
    bed_open(&b, r->w, 1, mesh, 0);
    fsdp_redistribution *run = make(&b, "mlp in", "S0", "R", FSDP_SUM, 1, shape);
    CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, (void **)&x));
    fsdp_redistribution *sum = make(&b, "mlp out", "P", "R", FSDP_SUM, 1, shape);
    REFUSED(b.w, fsdp_dmesh_alloc(b.dm, 8, NULL), "[E002] dmesh_alloc");
    REFUSED(b.w, fsdp_dmesh_alloc(b.dm, -8, &ptr), "[E002] dmesh_alloc");
    REFUSED(NULL, fsdp_dmesh_alloc(NULL, 8, &ptr), "[E002] dmesh_alloc");
    REFUSED(NULL, fsdp_redistribution_create_backward(NULL, NULL, &out),
            "[E101] redistribution_create_backward");
    REFUSED(b.w, fsdp_redistribution_create_backward(run, NULL, NULL),
            "[E101] redistribution_create_backward");
    REFUSED(NULL, fsdp_redistribution_resize(NULL, 0, 1), "[E014]");
    REFUSED(NULL, fsdp_redistribution_get(NULL, &info), "[E101] redistribution_get");
    REFUSED(b.w, fsdp_redistribution_get(run, NULL), "[E101] redistribution_get");
    REFUSED(NULL, fsdp_redistribute(NULL, x, x), "[E101] redistribute");
    REFUSED(NULL, fsdp_redistribute_begin(NULL, x, x), "[E101] redistribute");
    REFUSED(NULL, fsdp_redistribute_wait(NULL), "[E101] redistribute_wait");
    REFUSED(b.w, fsdp_redistribute(run, x, NULL),
            "[E018] redistribute: 'mlp in': src is NULL and its part has 4 elements");
    REFUSED(b.w, fsdp_redistribute_begin(run, NULL, x),
            "[E018] redistribute: 'mlp in': dst is NULL and its part has 8 elements");
    REFUSED(b.w, fsdp_redistribute(run, x, x), "[E019] redistribute: 'mlp in': dst overlaps src");
    REFUSED(b.w, fsdp_redistribute(run, x, x + 7), "[E019]");
    REFUSED(b.w, fsdp_redistribute(run, x + 3, x), "[E019]");
    REFUSED(b.w, fsdp_redistribute(sum, x, x + 1), "[E019]");
    CALL(b.w, fsdp_redistribute(run, x, x + 8)); /* adjacent */
    CALL(b.w, fsdp_redistribute(run, x + 4, x));
    CALL(b.w, fsdp_redistribute(sum, x, x));
    CALL(b.w, fsdp_redistribution_get(run, &info));
    CHECK_EQ_INT(info.runs, 2);

    s = spec_of(&b, "R", FSDP_SUM, FSDP_F32, 1, shape);
    CHECK_OK(fsdp_spec_init(&other, 2, none, place, FSDP_F32, 1, shape));
    REFUSED(NULL, fsdp_dtensor_check(NULL, &s, x, "w"), "[E101] dtensor_check");
    REFUSED(b.w, fsdp_dtensor_check(b.dm, &s, x, NULL), "[E101] dtensor_check");
    REFUSED(b.w, fsdp_dtensor_check(b.dm, &other, x, "w"), "[E023] dtensor_check: 'w'");
    REFUSED(b.w, fsdp_dtensor_check(b.dm, &s, NULL, "w"), "[E023]");
    REFUSED(b.w, fsdp_dtensor_check(b.dm, NULL, x, "w"), "[E154] dtensor_check");
    refused_staging(&b, shape);
}
/* A part without elements needs no memory. */
static void null_parts(lab_rank *r) {
    static const int32_t mesh[1] = {2};
    static const int64_t shape[1] = {1};
    const int is_empty = fsdp_rank(r->w) == 1;
    float *x;
    bed b;
    bed_open(&b, r->w, 1, mesh, 0);
    CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, (void **)&x));
    fsdp_redistribution *whole = make(&b, "whole", "S0", "R", FSDP_SUM, 1, shape);
    fsdp_redistribution *part = make(&b, "part", "R", "S0", FSDP_SUM, 1, shape);
    if (is_empty)
        REFUSED(b.w, fsdp_redistribute(whole, NULL, NULL), "dst is NULL and its part has 1 element");
    x[0] = 7;
    CALL(b.w, fsdp_redistribute(whole, x + 8, is_empty ? NULL : x));
    CALL(b.w, fsdp_wait_stream(b.model, FSDP_STREAM_COMPUTE));
    CHECK(x[8] == 7);
    CALL(b.w, fsdp_redistribute(part, is_empty ? NULL : x + 16, x + 8));
    CALL(b.w, fsdp_wait_stream(b.model, FSDP_STREAM_COMPUTE));
    CHECK(is_empty || x[16] == 7);
}
TEST(dtensor_errors, null_parts, GLOO) { lab_run(2, NULL, null_parts, NULL); }
TEST(dtensor_errors, calls, GLOO) { lab_run(2, NULL, refused_calls, NULL); }

/* ---- ranks that disagree --------------------------------------------------------------------- */

enum {
    OTHER_NAME,
    OTHER_SPECS,
    OTHER_SIZE,
    SAME_COUNT,
    OTHER_SCALE,
    OTHER_COMM,
    OTHER_ORDER,
    BESIDE
};
static const struct odd_row {
    const char *name;
    int what, lanes, processes;
    const char *says[2]; /* in the texts of all ranks */
} odd_rows[] = {
    {"another name", OTHER_NAME, 0, 0, {"'in'", "'odd'"}},
    {"other specs", OTHER_SPECS, 0, 0, {"all_gather of 'in'", "'in'"}},
    {"another size", OTHER_SIZE, 0, 0, {"12 elements", "9 elements"}},
    {"a size of as many elements", SAME_COUNT, 0, 0, {"'in'", "'in'"}},
    {"another scale", OTHER_SCALE, 0, 0, {"'in'", "'in'"}},
    {"another comm_dtype", OTHER_COMM, 0, 0, {"f32", "bf16"}},
    {"another order", OTHER_ORDER, 0, 0, {"'in'", "'out'"}},
    {"another order, processes", OTHER_ORDER, 0, 1, {"'in'", "'out'"}},
    {"another order, 2 lanes", OTHER_ORDER, 2, 0, {"'in'", "'out'"}},
    {"another order, begun", BESIDE, 2, 0, {"'in'", "'out'"}},
};

static void disagree(lab_rank *r) {
    const struct odd_row *row = (const struct odd_row *)r->arg;
    static const int32_t mesh[1] = {3};
    static const int64_t shape[2] = {12, 3};
    const int odd = r->rank == 1, orders = row->what == OTHER_ORDER || row->what == BESIDE;
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *in, *out;
    float *src, *dst;
    bed b;
    bed_open(&b, r->w, 1, mesh, row->what == BESIDE);
    d.name = odd && row->what == OTHER_NAME ? "odd" : "in";
    d.from = spec_of(&b, "S0", 0, FSDP_F32, 2, shape),
    d.to = spec_of(&b, "R", 0, FSDP_F32, 2, shape);
    if (odd && row->what == OTHER_SPECS) d.from = spec_of(&b, "S1", 0, FSDP_F32, 2, shape);
    if (odd && row->what == OTHER_SCALE) d.scale = 3;
    if (odd && row->what == OTHER_COMM) d.comm_dtype = FSDP_BF16;
    CALL(b.w, fsdp_redistribution_create(b.dm, &d, &in));
    out = make(&b, "out", "S0", "R", 0, 2, shape);
    CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, (void **)&src));
    CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, (void **)&dst));
    memset(dst, 0x55, 1024);
    if (odd && row->what == OTHER_SIZE) CALL(b.w, fsdp_redistribution_resize(in, 0, 9));
    if (odd && row->what == SAME_COUNT) CALL(b.w, fsdp_redistribution_resize(in, 0, 11));
    fsdp_redistribution *first = odd && orders ? out : in;
    fsdp_status status = row->what == BESIDE ? fsdp_redistribute_begin(first, dst, src)
                                             : fsdp_redistribute(first, dst, src);
    if (!status && row->what == BESIDE) status = fsdp_redistribute_wait(first);
    if (!status) status = fsdp_wait_stream(b.model, -1);
    CHECK_MSG(status == FSDP_ERR_MISMATCH, "%s: %s", fsdp_status_name(status),
              fsdp_last_error(b.w));
    for (int k = 0; k < 2; k++)
        CHECK_MSG(strstr(fsdp_last_error(b.w), row->says[k]), "'%s' does not say %s",
                  fsdp_last_error(b.w), row->says[k]);
    CHECK_MSG(strstr(fsdp_last_error(b.w), "rank 1"), "%s", fsdp_last_error(b.w));
    for (int k = 0; k < 1024; k++) CHECK_EQ_INT(((char *)dst)[k], 0x55); /* no byte has moved */
    CHECK_STATUS(fsdp_redistribute(in, dst, src), FSDP_ERR_MISMATCH);
    CHECK_STATUS(fsdp_redistribute_wait(in), FSDP_ERR_MISMATCH);
    CHECK_STATUS(fsdp_redistribution_resize(in, 0, 3), FSDP_ERR_MISMATCH);
}
TEST_P(dtensor_errors, ranks_disagree, odd_rows, GLOO) {
    lab_how how = FSDP_ZERO;
    how.lanes = row->lanes, how.processes = row->processes;
    lab_run(3, &how, disagree, (void *)(uintptr_t)row);
}

/* A rank leaves out a redistribution, and then runs the next one, or nothing, or dies. */
enum { DOES_THE_NEXT, DOES_NOTHING, DIES };
static const struct left_row {
    const char *name;
    int what, lanes;
} left_rows[] = {{"does the next", DOES_THE_NEXT, 0},
                 {"does nothing", DOES_NOTHING, 0},
                 {"does nothing, 2 lanes", DOES_NOTHING, 2},
                 {"dies", DIES, 0},
                 {"dies, 2 lanes", DIES, 2}};

static void leaves_out(lab_rank *r) {
    const struct left_row *row = (const struct left_row *)r->arg;
    static const int32_t mesh[1] = {3};
    static const int64_t shape[2] = {6, 5};
    const int odd = r->rank == 1;
    fsdp_status status = FSDP_OK;
    fsdp_world_desc wd = w_desc(r->rank, r->size, row->what == DIES ? NULL : &r->start->threads[0],
                                w_job("left"), row->lanes);
    float *src, *dst;
    bed b;
    wd.timeout_ms = row->what == DOES_NOTHING ? 1500 : 30000;
    wd.allocator = w_heap_allocator(r->heap);
    CALL(NULL, fsdp_init(&wd, &r->w));
    bed_open(&b, r->w, 1, mesh, row->lanes > 0);
    fsdp_redistribution *in = make(&b, "in", "S0", "R", 0, 2, shape),
                        *out = make(&b, "out", "S0", "R", 0, 2, shape);
    CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, (void **)&src));
    CALL(b.w, fsdp_dmesh_alloc(b.dm, 1024, (void **)&dst));
    for (int k = 0; k < 3; k++) CALL(b.w, fsdp_redistribute(in, dst, src));
    lab_settle(b.w, b.model);
    h_mark(1);
    h_await_marks(1, r->size); /* no rank is in these any more */
    if (odd && row->what == DIES) h_die(SIGKILL);
    if (odd && row->what == DOES_NOTHING) h_await_marks(0, 2); /* until the others know */
    if (!odd && row->lanes) {
        status = fsdp_redistribute_begin(in, dst, src);
        if (!status) status = fsdp_redistribute_wait(in);
        if (!status) status = fsdp_wait_stream(b.model, -1);
    } else if (!odd) status = fsdp_redistribute(in, dst, src);
    if (!status) status = fsdp_redistribute(out, dst, src);
    if (!status) status = fsdp_wait_stream(b.model, -1);
    if (!odd) h_mark(0);
    const char *text = fsdp_last_error(b.w);
    const fsdp_status want = row->what == DOES_THE_NEXT  ? FSDP_ERR_MISMATCH
                             : row->what == DOES_NOTHING ? FSDP_ERR_TIMEOUT
                                                         : FSDP_ERR_PEER_LOST;
    CHECK_MSG(status == want, "%s: %s", fsdp_status_name(status), text);
    if (row->what != DOES_NOTHING || lab_divides()) /* NCCL does not know the missing rank */
        CHECK_MSG(strstr(text, "rank 1"), "%s", text);
    CHECK_MSG(odd || strstr(text, "'in'"), "%s", text);
}
TEST_P(dtensor_errors, a_rank_leaves_one_out, left_rows, SLOW | GLOO) {
    lab_how how = FSDP_ZERO;
    how.bare = 1, how.processes = row->what == DIES;
    lab_run(3, &how, leaves_out, (void *)(uintptr_t)row);
}

/* ---- lack of memory -------------------------------------------------------------------------- */

/* Mesh, memory and redistributions that are made while the n-th allocation fails. */
typedef struct starved {
    fsdp_dmesh *dm;
    fsdp_redistribution *run, *back;
    void *ptr;
} starved;

static fsdp_status starve(bed *b, const fsdp_dmesh_desc *d, const fsdp_redistribution_desc *rd,
                          starved *s) {
    memset(s, 0, sizeof *s);
    fsdp_status status = fsdp_dmesh_create(b->model, d, &s->dm);
    if (!status) status = fsdp_dmesh_alloc(s->dm, 4096, &s->ptr);
    if (!status) status = fsdp_redistribution_create(s->dm, rd, &s->run);
    if (!status) status = fsdp_redistribution_create_backward(s->run, NULL, &s->back);
    return status;
}

static fsdp_redistribution_desc gather_of(bed *b, const char *name, const int64_t *shape) {
    fsdp_redistribution_desc d = FSDP_ZERO;
    d.name = name;
    d.from = spec_of(b, "S1 R", 0, FSDP_F32, 2, shape);
    d.to = spec_of(b, "R R", 0, FSDP_F32, 2, shape);
    return d;
}

/* If staging memory for a larger redistribution cannot grow, existing ones still work; later it can
   grow. */
static void grow(bed *b, lab_rank *r, starved *s, const fsdp_redistribution_desc *rd, int64_t n) {
    static const int64_t large[2] = {60, 50};
    const fsdp_redistribution_desc more = gather_of(b, "large", large);
    fsdp_redistribution *big;
    float *src = own_floats(b, 3000), *dst = own_floats(b, 3000);
    w_fail(r->heap, n);
    fsdp_status status = fsdp_redistribution_create(s->dm, &more, &big);
    w_fail(r->heap, -1);
    W_CHECK(!status || (status == FSDP_ERR_OUT_OF_MEMORY && !big), "%s", fsdp_last_error(b->w));
    fill_part(&rd->from, b->coord, small_value, src);
    for (int k = 0; k < 2; k++) {
        memset(dst, 0, 30 * 4);
        if (k) CALL(b->w, fsdp_redistribute_begin(s->run, dst, src));
        else CALL(b->w, fsdp_redistribute(s->run, dst, src));
        CALL(b->w, fsdp_redistribute_wait(s->run));
        CALL(b->w, fsdp_wait_stream(b->model, FSDP_STREAM_COMPUTE));
        check_part(b, &rd->to, dst, small_value, 1, "after a failure");
    }
    CALL(b->w, fsdp_redistribution_create(s->dm, &more, &big));
    fill_part(&more.from, b->coord, small_value, src);
    CALL(b->w, fsdp_redistribute(big, dst, src));
    CALL(b->w, fsdp_wait_stream(b->model, FSDP_STREAM_COMPUTE));
    check_part(b, &more.to, dst, small_value, 1, "the large one");
    own_free(b, src, 3000 * 4), own_free(b, dst, 3000 * 4);
}

/* One allocation fails on all ranks, each time in a new world: a failure while a group is made
   aborts the world. */
static void no_memory(lab_rank *r) {
    const int32_t mesh[2] = {r->size, 1};
    static const int64_t shape[2] = {6, 5};
    static const char *const names[2] = {"dp_replicate", "tp"};
    fsdp_status status = FSDP_ERR_OUT_OF_MEMORY;
    int failures = 0, aborted = 0;
    for (int n = 0; status; n++) {
        fsdp_dmesh_desc d = FSDP_ZERO;
        starved s;
        bed b;
        CHECK(n < LAB_WORLDS);
        memset(&b, 0, sizeof b);
        snprintf(w_case, sizeof w_case, "allocation %d", n);
        b.w = lab_world(r, n, 0, NULL), b.ndim = 2;
        d.mesh = b.mesh = lab_mesh(b.w, 2, mesh, names, NULL), d.overlap = 1;
        for (int m = 0; m < 2; m++) b.shape[m] = mesh[m], b.coord[m] = fsdp_mesh_rank(b.mesh, m);
        const fsdp_redistribution_desc rd = gather_of(&b, "in", shape);
        b.model = lab_model(b.w, NULL);
        w_fail(r->heap, n);
        status = starve(&b, &d, &rd, &s);
        w_fail(r->heap, -1);
        const char *text = fsdp_last_error(b.w);
        W_CHECK(!status || status == FSDP_ERR_OUT_OF_MEMORY, "%s: %s", fsdp_status_name(status),
                text);
        W_CHECK(!status || strstr(text, "allocat"), "%s", text);
        if (status) failures++;
        if (fsdp_world_status(b.w)) aborted++;
        else {
            if (status) {
                fsdp_dmesh_destroy(s.dm);
                CALL(b.w, starve(&b, &d, &rd, &s)); /* then another try works */
            }
            grow(&b, r, &s, &rd, n);
        }
        (void)fsdp_shutdown(b.w);
    }
    CHECK(failures > 10 && aborted < failures / 2);
    if (r->rank == 0) h_message("%d allocations failed, %d aborted the world", failures, aborted);
}
TEST(dtensor_errors, no_memory, GLOO) {
    lab_how how = FSDP_ZERO;
    how.bare = 1;
    lab_run(1, &how, no_memory, NULL);
    lab_run(2, &how, no_memory, NULL);
}

/* Only one rank has no memory for a mesh: no rank gets one, and none hangs. If that rank could not
   take part in making a group, the world is aborted. */
static void one_without_memory(lab_rank *r) {
    static const int32_t mesh[2] = {2, 1};
    static const char *const names[2] = {"dp_replicate", "tp"};
    fsdp_status status = FSDP_ERR_OUT_OF_MEMORY;
    int goes_on = 0, hears = 0;
    for (int n = 0; status; n++) {
        fsdp_dmesh_desc d = FSDP_ZERO;
        fsdp_dmesh *dm;
        CHECK(n < LAB_WORLDS);
        fsdp_world *w = lab_world(r, n, 0, NULL);
        d.mesh = lab_mesh(w, 2, mesh, names, NULL), d.overlap = 1;
        fsdp_model *model = lab_model(w, NULL);
        snprintf(w_case, sizeof w_case, "allocation %d", n);
        if (r->rank == 1) w_fail(r->heap, n);
        status = fsdp_dmesh_create(model, &d, &dm);
        w_fail(r->heap, -1);
        if (r->rank == 1)
            W_CHECK(!status || status == FSDP_ERR_OUT_OF_MEMORY, "%s", fsdp_last_error(w));
        if (!fsdp_world_status(w)) {
            int32_t failed = status != FSDP_OK;
            CALL(w, fsdp_all_reduce(w, NULL, &failed, 1, FSDP_I32, FSDP_SUM));
            W_CHECK(failed != 1, "one rank has a mesh and the other one not");
            hears += status == FSDP_ERR_INVALID_STATE;
            if (failed) goes_on++;
            if (failed) CALL(w, fsdp_dmesh_create(model, &d, &dm)); /* another try works */
        }
        (void)fsdp_shutdown(w);
    }
    CHECK(goes_on > 5);
    CHECK_EQ_INT(hears, r->rank ? 0 : goes_on);
    if (r->rank == 0) h_message("the world went on after %d failures", goes_on);
}
TEST(dtensor_errors, one_without_memory, GLOO) {
    lab_how how = FSDP_ZERO;
    how.bare = 1;
    lab_run(2, &how, one_without_memory, NULL);
}

/* ---- values of PyTorch ----------------------------------------------------------------------- */

/* redist.txt: element i has the value i, multiplied by (coordinate + 1) for a Partial dim. */
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

enum { FILE_RANKS = 256 };
typedef struct file_case {
    char name[64];
    int ranks;
    fsdp_spec from, to;
    int64_t numel[FILE_RANKS];
    double *after[FILE_RANKS];
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
    float *src = own_floats(&b, info.from.numel), *dst = own_floats(&b, info.to.numel);
    fill_as_file(&b, &c->from, src);
    CALL(b.w, fsdp_redistribute(run, dst, src));
    CALL(b.w, fsdp_wait_stream(b.model, FSDP_STREAM_COMPUTE));
    CHECK_EQ_INT(info.to.numel, c->numel[r->rank]);
    double *x = lab_doubles(info.to.numel + 1), *want = lab_doubles(info.to.numel + 1);
    for (int64_t i = 0; i < info.to.numel; i++)
        x[i] = (double)dst[i], want[i] = c->after[r->rank][i];
    join_addends(&b, &c->to, &info.to, x); /* any rank may hold any partial value */
    join_addends(&b, &c->to, &info.to, want);
    for (int64_t i = 0; i < info.to.numel; i++)
        CHECK_MSG(fabs(x[i] - want[i]) <= 1e-6 * fabs(want[i]),
                  "%s, rank %d, element %lld: %g, "
                  "PyTorch %g",
                  c->name, r->rank, (long long)i, x[i], want[i]);
    free(x), free(want);
    own_free(&b, src, info.from.numel * 4), own_free(&b, dst, info.to.numel * 4);
}

TEST(dtensor, pytorchs_values, SECONDS(600) | SLOW) {
    golden g;
    int cases = 0;
    GOLDEN_OPEN(&g, "redist.txt", "redist");
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
            CHECK(rank >= 0 && rank < FILE_RANKS);
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
    GOLDEN_CLOSE(&g);
    CHECK(cases > 0);
}

/* The redistribute_* cases of dtensor.txt: a rank's elements before and after. A strided placement
   has PyTorch's elements only if it shards evenly: otherwise its side is checked against the spec.
   */
typedef struct old_case {
    char name[64];
    int ranks, is_strided[2], even, unknown; /* unknown: no order of shardings has its factors */
    fsdp_spec spec[2];
    int64_t numel[2][FILE_RANKS];
    double *has[2][FILE_RANKS];
    int sides; /* sides that were compared with the file */
} old_case;

static void old_side(bed *b, old_case *c, int side, const float *part) {
    const fsdp_spec *s = &c->spec[side];
    fsdp_local l;
    CHECK_OK(fsdp_spec_local(s, b->coord, &l));
    double *x = lab_doubles(l.numel + 1), *want = lab_doubles(l.numel + 1);
    const int rank = fsdp_rank(b->w), told = !c->is_strided[side] || c->even;
    if (told) CHECK_EQ_INT(l.numel, c->numel[side][rank]);
    for (int64_t i = 0; i < l.numel; i++) {
        x[i] = (double)part[i];
        want[i] = told ? c->has[side][rank][i] : index_value(whole_index(s, &l, i));
        for (int m = 0; m < s->mesh_ndim && !told && side == 1; m++) /* sums of c + 1 */
            if (c->spec[0].place[m].kind == FSDP_PARTIAL)
                want[i] *= s->mesh_shape[m] * (s->mesh_shape[m] + 1) / 2;
    }
    if (side) join_addends(b, s, &l, x);
    if (side && told) join_addends(b, s, &l, want);
    for (int64_t i = 0; i < l.numel; i++)
        W_CHECK(lab_same(x[i], want[i]), "side %d, element %lld: %g, expected %g", side,
                (long long)i, x[i], want[i]);
    if (told) __atomic_add_fetch(&c->sides, 1, __ATOMIC_RELAXED);
    free(x), free(want);
}

static void old_rank(lab_rank *r) {
    old_case *c = (old_case *)r->arg;
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *run;
    fsdp_redistribution_info info;
    bed b;
    snprintf(w_case, sizeof w_case, "%s", c->name);
    bed_open(&b, r->w, c->spec[0].mesh_ndim, c->spec[0].mesh_shape, 0);
    d.from = c->spec[0], d.to = c->spec[1], d.name = c->name;
    CALL(b.w, fsdp_redistribution_create(b.dm, &d, &run));
    CALL(b.w, fsdp_redistribution_get(run, &info));
    float *src = own_floats(&b, info.from.numel), *dst = own_floats(&b, info.to.numel);
    fill_as_file(&b, &c->spec[0], src);
    old_side(&b, c, 0, src);
    CALL(b.w, fsdp_redistribute(run, dst, src));
    CALL(b.w, fsdp_wait_stream(b.model, FSDP_STREAM_COMPUTE));
    old_side(&b, c, 1, dst);
    own_free(&b, src, info.from.numel * 4), own_free(&b, dst, info.to.numel * 4);
}

/* Reads a placement with its factor, `2 D F`. */
static int old_place(golden *g, fsdp_placement *p, int64_t *factor) {
    const int64_t kind = golden_int(g), dim = golden_int(g), more = golden_int(g);
    memset(p, 0, sizeof *p);
    *factor = kind == 2 ? more : 1;
    if (kind == 1 || kind == 2) p->kind = FSDP_SHARD, p->dim = (int8_t)dim;
    if (kind == 3) {
        static const int8_t ops[] = {FSDP_SUM, FSDP_AVG, FSDP_MAX, FSDP_MIN};
        CHECK(more >= 0 && more < 4);
        p->kind = FSDP_PARTIAL, p->op = ops[more];
    }
    return kind == 2;
}

static void old_read(golden *g, old_case *c) {
    fsdp_spec frame;
    memset(c, 0, sizeof *c), memset(&frame, 0, sizeof frame);
    snprintf(c->name, sizeof c->name, "%s", g->name);
    while (golden_line(g)) {
        const int side = golden_is(g, "to") || golden_is(g, "after");
        read_frame(g, &frame);
        if (golden_is(g, "from") || golden_is(g, "to")) {
            fsdp_placement place[DIMS];
            int64_t factor[DIMS];
            for (int m = 0; m < frame.mesh_ndim; m++)
                c->is_strided[side] |= old_place(g, &place[m], &factor[m]);
            CHECK_OK(fsdp_spec_init(&c->spec[side], frame.mesh_ndim, frame.mesh_shape, place,
                                    FSDP_F32, frame.ndim, frame.shape));
            const fsdp_status status = fsdp_spec_from_strided(&c->spec[side], factor);
            if (status == FSDP_ERR_UNSUPPORTED) c->unknown = 1;
            else CHECK_OK(status);
        } else if (golden_is(g, "before") || golden_is(g, "after")) {
            const int64_t rank = golden_int(g), numel = golden_int(g);
            CHECK(rank >= 0 && rank < FILE_RANKS);
            c->ranks = rank + 1 > c->ranks ? (int)rank + 1 : c->ranks;
            c->numel[side][rank] = numel;
            c->has[side][rank] = lab_doubles(numel + 1);
            golden_nums(g, numel, c->has[side][rank]);
        }
    }
    c->even = 1;
    for (int d = 0; d < frame.ndim; d++) c->even &= frame.shape[d] % c->ranks == 0;
}
TEST(dtensor, pytorchs_older_values, SECONDS(300) | SLOW) {
    golden g;
    int cases = 0, sides = 0, all = 0, unknown = 0;
    GOLDEN_OPEN(&g, "dtensor.txt", "dtensor");
    while (golden_case(&g)) {
        old_case c;
        if (strncmp(g.name, "redistribute_", 13)) continue;
        old_read(&g, &c);
        unknown += c.unknown;
        if (!c.unknown) lab_run(c.ranks, NULL, old_rank, &c);
        for (int k = 0; k < c.ranks; k++) free(c.has[0][k]), free(c.has[1][k]);
        cases++, sides += c.sides, all += 2 * c.ranks;
    }
    CHECK(strcmp(golden_dir(), GOLDEN_DIR) || (cases == 91 && !unknown && sides > all * 9 / 10));
    h_message(
        "%d cases, %d of %d parts compared with the file; %d cases with factors that no order "
        "of cuts has",
        cases, sides, all, unknown);
    GOLDEN_CLOSE(&g);
}
