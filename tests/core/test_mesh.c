/* test_mesh.c - meshes: positions, groups, slices, flattened and split dims; mesh infos: compared with
   PyTorch's answers and with a model that is a list of ranks. test_exhaustive.c trains on meshes.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO
#include "harness.h"
#include <math.h> // INFINITY, fabs, floor, sqrt
#include "lab.h"
#include "golden.h"

/* One process plays all ranks of larger worlds, one after another; of still larger worlds some
   ranks. */
enum { THREADS_MAX = 16, PLAYED_MAX = 512 };

/* ---- a backend without other ranks, whose groups are noted ----------------------------------- */

typedef struct split {
    int color, index, size, lane;
    int32_t *ranks;
} split;

typedef struct fake { /* of one rank */
    int count;
    split *splits;
} fake;
static fake *notes; /* of the rank that this process plays now */

static fsdp_status fake_split(fsdp_comm *parent, const fsdp_group *g, fsdp_comm **out) {
    fake *f = notes;
    f->splits = (split *)realloc(f->splits, sizeof *f->splits * (size_t)(f->count + 1));
    CHECK(f->splits != NULL);
    split *s = &f->splits[f->count++];
    s->color = g->color, s->index = g->index, s->size = g->size, s->lane = g->stream;
    s->ranks = g->color < 0 ? NULL : (int32_t *)lab_zeros((size_t)g->size, sizeof *s->ranks);
    for (int i = 0; s->ranks && i < g->size; i++) s->ranks[i] = g->ranks[i];
    return fsdp_fake_comm_ops()->split(parent, g, out);
}
static void fake_use(fake *f, fsdp_world_desc *d) {
    static fsdp_comm_ops ops;
    ops = *fsdp_fake_comm_ops();
    ops.split = fake_split;
    d->comm_ops = &ops;
    memset(f, 0, sizeof *f);
    notes = f;
}
static fsdp_world *fake_world(fake *f, int rank, int size) {
    fsdp_world *w;
    fsdp_world_desc d = w_desc(rank, size, NULL, "fake", 0);
    fake_use(f, &d);
    CALL(NULL, fsdp_init(&d, &w));
    return w;
}

/* Checks that the groups of all ranks agree: each rank splits in the same calls, and in each
   call the members of a group name the same list, and their own position in it. */
static void check_splits(const fake *fakes, int world) {
    for (int r = 0; r < world; r++) CHECK_EQ_INT(fakes[r].count, fakes[0].count);
    for (int r = 0; r < world; r++) {
        for (int k = 0; k < fakes[r].count; k++) {
            const split *s = &fakes[r].splits[k];
            CHECK_EQ_INT(s->lane, fakes[0].splits[k].lane);
            if (s->color < 0) continue;
            W_CHECK(s->index >= 0 && s->index < s->size && s->ranks[s->index] == r,
                    "split %d: rank %d has index %d of %d", k, r, s->index, s->size);
            const split *first = &fakes[s->ranks[0]].splits[k];
            W_CHECK(first->color == s->color && first->size == s->size,
                    "split %d: ranks %d and %d disagree", k, r, s->ranks[0]);
            CHECK_EQ_MEM(first->ranks, s->ranks, sizeof *s->ranks * (size_t)s->size);
            for (int q = 0; q < world; q++) { /* other groups have other colors */
                const split *other = &fakes[q].splits[k];
                W_CHECK(other->color != s->color || other->ranks[0] == s->ranks[0],
                        "split %d: ranks %d and %d have color %d", k, r, q, s->color);
            }
        }
    }
}

static void forget_splits(fake *fakes, int world) {
    for (int r = 0; r < world; r++) {
        for (int k = 0; k < fakes[r].count; k++) free(fakes[r].splits[k].ranks);
        free(fakes[r].splits);
    }
}

/* ---- groups, by their collectives ------------------------------------------------------------ */

/* Checks that a sum reaches the ranks of the mesh, given in order of position, and that a
   broadcast from each position sends that rank's number. */
static void talk(fsdp_world *w, const fsdp_mesh *mesh, const int32_t *ranks, int size) {
    const int64_t me = fsdp_rank(w);
    int64_t sum = (int64_t)1 << me, expected = 0;
    for (int i = 0; i < size; i++) expected |= (int64_t)1 << ranks[i];
    CALL(w, fsdp_all_reduce(w, mesh, &sum, 1, FSDP_I64, FSDP_SUM));
    W_CHECK(sum == expected, "a sum reached ranks %llx, expected %llx", (unsigned long long)sum,
            (unsigned long long)expected);
    for (int i = 0; i < size; i++) {
        int64_t who = me;
        CALL(w, fsdp_broadcast(w, mesh, &who, sizeof who, i));
        W_CHECK(who == ranks[i], "rank %d is at position %d, expected %d", (int)who, i, ranks[i]);
    }
}

/* Returns rank r's element k. Sums of it are exact in f64 and integers, and rounded in f32,
   where the order counts. */
static double brought(int r, int k) { return (double)((r * 7919 + k * 104729) % 1000 - 480) / 3; }

/* Returns element k reduced over a mesh dim by dim: each group is summed in order of position. */
static double reduced(const fsdp_mesh *mesh, const int32_t *ranks, int k, int is_f32, fsdp_redop op,
                      double (*value)(int r, int k)) {
    double at[THREADS_MAX];
    const int numel = fsdp_mesh_size(mesh, -1);
    CHECK(numel <= THREADS_MAX);
    for (int i = 0; i < numel; i++) at[i] = value(ranks[i], k);
    for (int d = 0, below = numel; d < fsdp_mesh_ndim(mesh); d++) {
        const int size = fsdp_mesh_size(mesh, d);
        below /= size;
        for (int i = 0; i < numel; i++) {
            if (i / below % size) continue;
            double x = at[i];
            for (int n = 1; n < size; n++) {
                const double y = at[i + n * below];
                if (op == FSDP_SUM) x = is_f32 ? (double)((float)x + (float)y) : x + y;
                else if (op == FSDP_MAX ? y > x : y < x) x = y;
            }
            for (int n = 0; n < size; n++) at[i + n * below] = x;
        }
    }
    return at[0];
}
static double brought_f32(int r, int k) { return (double)(float)brought(r, k); }
static double brought_int(int r, int k) { return floor(brought(r, k)); }

/* Every dtype and operation over all dims of a mesh, bit for bit. */
static void talk_numbers(fsdp_world *w, const fsdp_mesh *mesh, const int32_t *ranks) {
    enum { COUNT = 5 };
    const int64_t WIDE = (int64_t)1 << 32; // does not fit an int32_t
    const int me = fsdp_rank(w);
    for (int op = FSDP_SUM; op <= FSDP_MIN; op++) {
        const fsdp_redop redop = (fsdp_redop)op;
        float f[COUNT];
        double d[COUNT];
        int32_t i[COUNT];
        int64_t l[COUNT];
        for (int k = 0; k < COUNT; k++) {
            f[k] = (float)brought(me, k), d[k] = brought(me, k);
            i[k] = (int32_t)brought_int(me, k), l[k] = (int64_t)brought_int(me, k) * WIDE;
        }
        CALL(w, fsdp_all_reduce(w, mesh, f, COUNT, FSDP_F32, redop));
        CALL(w, fsdp_all_reduce(w, mesh, d, COUNT, FSDP_F64, redop));
        CALL(w, fsdp_all_reduce(w, mesh, i, COUNT, FSDP_I32, redop));
        CALL(w, fsdp_all_reduce(w, mesh, l, COUNT, FSDP_I64, redop));
        for (int k = 0; k < COUNT; k++) {
            const double f32 = reduced(mesh, ranks, k, 1, redop, brought_f32);
            const double f64 = reduced(mesh, ranks, k, 0, redop, brought);
            const double whole = reduced(mesh, ranks, k, 0, redop, brought_int);
            W_CHECK(!memcmp(&d[k], &f64, sizeof f64) && (double)f[k] == f32,
                    "operation %d: f32 %a, expected %a; f64 %a, expected %a", op, (double)f[k], f32,
                    d[k], f64);
            W_CHECK(i[k] == (int32_t)whole && l[k] == (int64_t)whole * WIDE,
                    "operation %d: i32 %d, i64 %lld, expected %g", op, i[k], (long long)l[k],
                    whole);
        }
    }
}

static int position(const int32_t *ranks, int count, int rank) {
    for (int i = 0; i < count; i++)
        if (ranks[i] == rank) return i;
    return -1;
}

/* Returns the group of a dim as a list that the caller frees, and checks this rank's position in
   it. */
static int32_t *group_of(const fsdp_mesh *mesh, int dim, int me) {
    const int size = fsdp_mesh_size(mesh, dim);
    int32_t *out = (int32_t *)malloc(sizeof *out * (size_t)(size > 0 ? size : 1));
    CHECK(out != NULL);
    W_CHECK(size >= 1, "size of dim %d is %d", dim, size);
    CHECK_EQ_INT(fsdp_mesh_ranks(mesh, dim, NULL), size);
    CHECK_EQ_INT(fsdp_mesh_ranks(mesh, dim, out), size);
    if (dim >= 0) CHECK_EQ_INT(position(out, size, me), fsdp_mesh_rank(mesh, dim));
    else W_CHECK(position(out, size, me) >= 0, "rank %d is not in its own mesh", me);
    return out;
}

/* ---- golden data ----------------------------------------------------------------------------- */

typedef struct record {
    const char *key;
    int count;
    int64_t *v; /* v[0] is the rank */
} record;

typedef struct grid { /* one case of mesh.txt */
    char name[64];
    int world, ndim, numel, count;
    int32_t shape[FSDP_MAX_DIMS], *ranks;
    record *records;
} grid;

static void read_grid(golden *g, grid *c) {
    memset(c, 0, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", g->name);
    while (golden_line(g)) {
        if (golden_is(g, "mesh")) {
            c->world = (int)golden_int(g);
            c->ndim = (int)golden_int(g);
            CHECK(c->ndim >= 1 && c->ndim <= FSDP_MAX_DIMS);
            c->numel = 1;
            for (int i = 0; i < c->ndim; i++) c->numel *= c->shape[i] = (int32_t)golden_int(g);
            CHECK_EQ_INT(golden_left(g), c->numel);
            c->ranks = (int32_t *)malloc(sizeof *c->ranks * (size_t)c->numel);
            for (int i = 0; i < c->numel; i++) c->ranks[i] = (int32_t)golden_int(g);
            continue;
        }
        c->records = (record *)realloc(c->records, sizeof *c->records * (size_t)(c->count + 1));
        CHECK(c->records != NULL);
        record *r = &c->records[c->count++];
        r->key = g->key;
        r->count = (int)golden_left(g);
        r->v = (int64_t *)lab_zeros((size_t)r->count + 1, sizeof *r->v);
        golden_ints(g, r->count, r->v);
    }
    W_CHECK(c->ranks != NULL, "case %s has no mesh", c->name);
}

static void free_grid(grid *c) {
    for (int i = 0; i < c->count; i++) free(c->records[i].v);
    free(c->records);
    free(c->ranks);
}

static int is(const record *r, const char *key) { return !strcmp(r->key, key); }

/* Returns the number of values after the rank that describe the request; the answer follows
   them. */
static int asked(const record *r) {
    return is(r, "flatten") || is(r, "slice") ? 1 + (int)r->v[1] : is(r, "unflatten") ? 3 : 0;
}

static int same_request(const record *a, const record *b) {
    const int n = asked(a);
    return !strcmp(a->key, b->key) && asked(b) == n &&
           !memcmp(a->v + 1, b->v + 1, (size_t)n * sizeof *a->v);
}

static void check_list(const int32_t *got, const int64_t *expected, int count, const char *what) {
    for (int i = 0; i < count; i++)
        W_CHECK(got[i] == expected[i], "%s: rank %d at place %d, expected %d", what, got[i], i,
                (int)expected[i]);
}

/* Checks a group of this rank. `ascending` has the members in PyTorch's order; place -1: not
   given. */
static void check_group(const fsdp_mesh *mesh, int dim, int me, int size, int64_t place,
                        const int64_t *ascending) {
    int32_t *got = group_of(mesh, dim, me);
    int in_order = 1;
    CHECK_EQ_INT(fsdp_mesh_size(mesh, dim), size);
    for (int i = 0; i < size; i++) {
        W_CHECK(position(got, size, (int)ascending[i]) >= 0, "rank %d is missing in dim %d",
                (int)ascending[i], dim);
        in_order &= !i || got[i] > got[i - 1];
    }
    if (in_order) check_list(got, ascending, size, "group");
    if (in_order && place >= 0) CHECK_EQ_INT(fsdp_mesh_rank(mesh, dim), place);
    free(got);
}

/* slice R K dims[K] shape[K] ranks[..]; flatten R K dims[K] SIZE INDEX ranks[SIZE] */
static fsdp_mesh *slice_of(fsdp_world *w, const fsdp_mesh *mesh, const record *r) {
    int32_t dims[FSDP_MAX_DIMS];
    fsdp_mesh *out;
    CHECK(r->v[1] >= 1 && r->v[1] <= FSDP_MAX_DIMS);
    for (int i = 0; i < r->v[1]; i++) dims[i] = (int32_t)r->v[2 + i];
    CALL(w, fsdp_mesh_slice(mesh, dims, (int)r->v[1], &out));
    CHECK_EQ_INT(fsdp_mesh_ndim(out), r->v[1]);
    return out;
}

static void check_slice(fsdp_world *w, const fsdp_mesh *mesh, const record *r) {
    const int k = (int)r->v[1], me = fsdp_rank(w);
    const int64_t *shape = r->v + 2 + k, *ranks = shape + k;
    fsdp_mesh *slice = slice_of(w, mesh, r);
    int numel = 1;
    for (int i = 0; i < k; i++) {
        int dim = (int)r->v[2 + i];
        CHECK_EQ_INT(fsdp_mesh_size(slice, i), shape[i]);
        CHECK_EQ_INT(fsdp_mesh_rank(slice, i), fsdp_mesh_rank(mesh, dim));
        int32_t *whole = group_of(mesh, dim, me), *part = group_of(slice, i, me);
        CHECK_EQ_MEM(whole, part, sizeof *whole * (size_t)shape[i]);
        free(whole);
        free(part);
        numel *= (int)shape[i];
    }
    CHECK_EQ_INT(r->count, 2 + 2 * k + numel);
    CHECK_EQ_INT(fsdp_mesh_size(slice, -1), numel);
    int32_t *got = group_of(slice, -1, me);
    check_list(got, ranks, numel, "slice");
    free(got);
}

static void check_flat(const fsdp_mesh *flat, const record *r, int me) {
    const int64_t *at = r->v + 2 + r->v[1];
    const int size = (int)at[0];
    int32_t *got = group_of(flat, 0, me);
    CHECK_EQ_INT(fsdp_mesh_ndim(flat), 1);
    CHECK_EQ_INT(fsdp_mesh_size(flat, 0), size);
    CHECK_EQ_INT(r->count, 4 + (int)r->v[1] + size);
    check_list(got, at + 2, size, "flattened");
    int in_order = 1;
    for (int i = 1; i < size; i++) in_order &= at[2 + i] > at[1 + i];
    if (in_order) CHECK_EQ_INT(fsdp_mesh_rank(flat, 0), at[1]);
    free(got);
}

/* unflatten R DIM A B coordinate[ND+1] uranks[A] vranks[B] */
static void check_split(const grid *c, const fsdp_mesh *mesh, const record *r, int me) {
    const int dim = (int)r->v[1], a = (int)r->v[2], b = (int)r->v[3], nd = c->ndim + 1;
    CHECK_EQ_INT(r->count, 4 + nd + a + b);
    CHECK_EQ_INT(fsdp_mesh_ndim(mesh), nd);
    for (int i = 0; i < nd; i++) CHECK_EQ_INT(fsdp_mesh_rank(mesh, i), r->v[4 + i]);
    check_group(mesh, dim, me, a, -1, r->v + 4 + nd);
    check_group(mesh, dim + 1, me, b, -1, r->v + 4 + nd + a);
    int32_t *all = group_of(mesh, -1, me);
    for (int i = 0; i < c->numel; i++) CHECK_EQ_INT(all[i], c->ranks[i]);
    free(all);
}

/* Sends over all dims together, and over each dim. */
static void talk_dims(fsdp_world *w, const fsdp_mesh *mesh) {
    if (fsdp_mesh_rank(mesh, 0) >= 0) {
        int32_t *all = group_of(mesh, -1, fsdp_rank(w));
        talk(w, mesh, all, fsdp_mesh_size(mesh, -1));
        talk_numbers(w, mesh, all);
        free(all);
    }
    for (int32_t d = 0; d < fsdp_mesh_ndim(mesh); d++) {
        fsdp_mesh *line;
        CALL(w, fsdp_mesh_slice(mesh, &d, 1, &line));
        if (fsdp_mesh_rank(mesh, 0) < 0) continue;
        int32_t *ranks = group_of(line, 0, fsdp_rank(w));
        talk(w, line, ranks, fsdp_mesh_size(line, 0));
        free(ranks);
    }
}

/* Makes the record's mesh on every rank, and checks it on the ranks that the records name. */
static void check_made(fsdp_world *w, const grid *c, const fsdp_mesh *mesh, const record *r,
                       int talks) {
    static const char *const uv[2] = {"u", "v"};
    const int me = fsdp_rank(w);
    fsdp_mesh *made;
    if (is(r, "flatten")) CALL(w, fsdp_mesh_flatten(slice_of(w, mesh, r), "flat", &made));
    else CALL(w, fsdp_mesh_unflatten(mesh, (int)r->v[1], (int)r->v[2], uv, &made));
    for (int i = 0; i < c->count; i++) {
        const record *mine = &c->records[i];
        if (mine->v[0] != me || !same_request(mine, r)) continue;
        if (is(r, "flatten")) check_flat(made, mine, me);
        else check_split(c, made, mine, me);
    }
    if (fsdp_mesh_rank(mesh, 0) < 0) CHECK_EQ_INT(fsdp_mesh_rank(made, 0), -1);
    if (is(r, "unflatten")) CHECK_EQ_INT(fsdp_mesh_dim(made, "v"), r->v[1] + 1);
    else CHECK_EQ_INT(fsdp_mesh_dim(made, "flat"), 0);
    if (talks) talk_dims(w, made);
}

/* Checks a whole case on one rank. */
static void check_grid(fsdp_world *w, const grid *c, int talks) {
    static const char *const names[FSDP_MAX_DIMS] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    const int me = fsdp_rank(w);
    fsdp_mesh *mesh = lab_mesh(w, c->ndim, c->shape, names, c->ranks);
    int told = 0;
    snprintf(w_case, sizeof w_case, "%s rank %d", c->name, me);
    CHECK_EQ_INT(fsdp_mesh_ndim(mesh), c->ndim);
    CHECK_EQ_INT(fsdp_mesh_size(mesh, -1), c->numel);
    for (int i = 0; i < c->count; i++) {
        const record *r = &c->records[i];
        if (r->v[0] != me) continue;
        told++;
        if (is(r, "outside")) {
            for (int k = -1; k < c->ndim; k++) {
                CHECK_EQ_INT(fsdp_mesh_rank(mesh, k), -1);
                CHECK_EQ_INT(fsdp_mesh_ranks(mesh, k, NULL), -1);
            }
        } else if (is(r, "rank")) {
            for (int k = 0; k < c->ndim; k++) CHECK_EQ_INT(fsdp_mesh_rank(mesh, k), r->v[1 + k]);
        } else if (is(r, "group")) {
            CHECK_EQ_INT(r->count, 4 + r->v[2]);
            check_group(mesh, (int)r->v[1], me, (int)r->v[2], r->v[3], r->v + 4);
        } else if (is(r, "slice")) {
            check_slice(w, mesh, r);
        }
    }
    W_CHECK(told > 0, "no record of rank %d", me);
    if (talks) talk_dims(w, mesh);
    for (int i = 0, k; i < c->count; i++) {
        const record *r = &c->records[i];
        if (!is(r, "flatten") && !is(r, "unflatten")) continue;
        for (k = 0; k < i && !same_request(&c->records[k], r); k++) {
        }
        if (k == i) check_made(w, c, mesh, r, talks);
    }
}

static void grid_rank(lab_rank *r) { check_grid(r->w, (const grid *)r->arg, 1); }

/* One process plays each rank in turn; in a very large world only some ranks. */
static void grid_played(const grid *c) {
    fake *fakes = (fake *)lab_zeros((size_t)c->world, sizeof *fakes);
    const int all = c->world <= PLAYED_MAX, stride = all ? 1 : c->world / 64;
    for (int r = 0; r < c->world; r += stride) {
        fsdp_world *w = fake_world(&fakes[r], r, c->world);
        check_grid(w, c, 0);
        CALL(NULL, fsdp_shutdown(w));
    }
    if (all) check_splits(fakes, c->world);
    forget_splits(fakes, c->world);
    free(fakes);
}

TEST(mesh, golden) {
    golden g;
    int cases = 0, talked = 0;
    GOLDEN_OPEN(&g, "mesh.txt", "mesh");
    while (golden_case(&g)) {
        grid c;
        read_grid(&g, &c);
        CHECK_MSG(!g.error[0], "%s", g.error);
        grid_played(&c);
        if (c.world <= THREADS_MAX) lab_run(c.world, NULL, grid_rank, &c), talked++;
        free_grid(&c);
        cases++;
    }
    CHECK(cases > 0);
    h_message("%d cases, %d of them with communication", cases, talked);
    GOLDEN_CLOSE(&g);
}

/* ---- a model: every rank's mesh as a list of ranks ------------------------------------------- */

enum { RANKS_MAX = 48, STEPS_MAX = 5 };

typedef struct family { /* one shape; a rank outside the mesh has no list */
    int world, ndim;
    int32_t shape[FSDP_MAX_DIMS];
    int inside[RANKS_MAX];
    int32_t ranks[RANKS_MAX][RANKS_MAX];
} family;

static int numel_of(const family *f) {
    int n = 1;
    for (int d = 0; d < f->ndim; d++) n *= f->shape[d];
    return n;
}

static int stride_of(const family *f, int dim) {
    int n = 1;
    for (int d = dim + 1; d < f->ndim; d++) n *= f->shape[d];
    return n;
}

static int coord_of(const family *f, int rank, int dim) {
    int at = position(f->ranks[rank], numel_of(f), rank);
    return at / stride_of(f, dim) % f->shape[dim];
}

/* Keeps the dims in `set` (bits); the others are fixed at each rank's own coordinates. */
static void family_slice(family *f, int set) {
    family old = *f;
    f->ndim = 0;
    for (int d = 0; d < old.ndim; d++)
        if (set >> d & 1) f->shape[f->ndim++] = old.shape[d];
    for (int r = 0; r < old.world; r++) {
        int count = 0;
        for (int i = 0; old.inside[r] && i < numel_of(&old); i++) {
            int same = 1;
            for (int d = 0; d < old.ndim; d++)
                same &= (set >> d & 1) ||
                        i / stride_of(&old, d) % old.shape[d] == coord_of(&old, r, d);
            if (same) f->ranks[r][count++] = old.ranks[r][i];
        }
    }
}

static void family_flatten(family *f) {
    f->shape[0] = numel_of(f);
    f->ndim = 1;
}

static void family_unflatten(family *f, int dim, int outer) {
    for (int d = f->ndim++; d > dim; d--) f->shape[d] = f->shape[d - 1];
    f->shape[dim + 1] = f->shape[dim] / outer;
    f->shape[dim] = outer;
}

enum { DO_SLICE, DO_FLATTEN, DO_UNFLATTEN };
typedef struct chain { /* a mesh, and the steps that change it */
    uint64_t seed;
    int steps;
    struct {
        int what, set, dim, outer;
    } step[STEPS_MAX];
    family stage[STEPS_MAX + 1];
} chain;

/* Makes a random shape of at most `most` positions. */
static void random_shape(uint64_t *state, family *f, int most) {
    f->ndim = 1 + lab_pick(state, lab_pick(state, 4) ? 4 : FSDP_MAX_DIMS);
    for (int d = 0, n = 1; d < f->ndim; d++) {
        f->shape[d] = 1 + lab_pick(state, 4);
        if (n * f->shape[d] > most) f->shape[d] = 1;
        n *= f->shape[d];
    }
}

static void random_chain(uint64_t seed, int most, chain *c) {
    uint64_t state = seed;
    family *f = &c->stage[0];
    int32_t order[RANKS_MAX];
    memset(c, 0, sizeof *c);
    c->seed = seed;
    random_shape(&state, f, most);
    const int numel = numel_of(f),
              spare = lab_pick(&state, 3) ? 0 : lab_pick(&state, most - numel + 1);
    f->world = numel + spare;
    for (int i = 0; i < f->world; i++) order[i] = i;
    for (int i = f->world - 1, mix = lab_pick(&state, 2); mix && i > 0; i--) {
        int k = lab_pick(&state, i + 1), swap = order[i];
        order[i] = order[k], order[k] = swap;
    }
    for (int r = 0; r < f->world; r++) {
        f->inside[r] = position(order, numel, r) >= 0;
        memcpy(f->ranks[r], order, sizeof order);
    }
    for (c->steps = 0; c->steps < STEPS_MAX; c->steps++) {
        family *next = &c->stage[c->steps + 1];
        *next = c->stage[c->steps];
        c->step[c->steps].what = lab_pick(&state, 3);
        if (c->step[c->steps].what == DO_SLICE) {
            int set = 1 + lab_pick(&state, (1 << next->ndim) - 1);
            family_slice(next, c->step[c->steps].set = set);
        } else if (c->step[c->steps].what == DO_FLATTEN) {
            family_flatten(next);
        } else {
            int dim = lab_pick(&state, next->ndim), outer = 1 + lab_pick(&state, next->shape[dim]);
            if (next->ndim == FSDP_MAX_DIMS || next->shape[dim] % outer) break;
            c->step[c->steps].dim = dim;
            family_unflatten(next, dim, c->step[c->steps].outer = outer);
        }
    }
}

static void check_family(fsdp_world *w, const family *f, const fsdp_mesh *mesh) {
    const int me = fsdp_rank(w), numel = numel_of(f);
    CHECK_EQ_INT(fsdp_mesh_ndim(mesh), f->ndim);
    CHECK_EQ_INT(fsdp_mesh_size(mesh, -1), numel);
    CHECK_EQ_INT(fsdp_mesh_size(mesh, f->ndim), -1);
    for (int d = 0; d < f->ndim; d++) CHECK_EQ_INT(fsdp_mesh_size(mesh, d), f->shape[d]);
    for (int d = -1; d < f->ndim && !f->inside[me]; d++) {
        W_CHECK(fsdp_mesh_rank(mesh, d) == -1 && fsdp_mesh_ranks(mesh, d, NULL) == -1,
                "rank %d is outside, but not in dim %d", me, d);
    }
    if (!f->inside[me]) return;
    int32_t *all = group_of(mesh, -1, me);
    CHECK_EQ_MEM(all, f->ranks[me], sizeof *all * (size_t)numel);
    free(all);
    for (int d = 0; d < f->ndim; d++) {
        const int at = position(f->ranks[me], numel, me), stride = stride_of(f, d);
        const int coord = at / stride % f->shape[d];
        int32_t *group = group_of(mesh, d, me);
        W_CHECK(fsdp_mesh_rank(mesh, d) == coord, "position %d in dim %d, expected %d",
                fsdp_mesh_rank(mesh, d), d, coord);
        for (int i = 0; i < f->shape[d]; i++)
            W_CHECK(group[i] == f->ranks[me][at + (i - coord) * stride], "dim %d: place %d is %d",
                    d, i, group[i]);
        free(group);
    }
    CHECK_EQ_INT(fsdp_mesh_rank(mesh, f->ndim), -1);
    CHECK_EQ_INT(fsdp_mesh_ranks(mesh, f->ndim, NULL), -1);
}

static void check_chain(fsdp_world *w, const chain *c, int talks) {
    static const char *const two[2] = {"outer", NULL};
    const family *whole = &c->stage[0];
    fsdp_mesh *mesh = lab_mesh(w, whole->ndim, whole->shape, NULL, whole->ranks[0]);
    for (int n = 0; n <= c->steps; n++) {
        snprintf(w_case, sizeof w_case, "chain %llu step %d rank %d of %d",
                 (unsigned long long)c->seed, n, fsdp_rank(w), fsdp_world_size(w));
        if (n > 0 && c->step[n - 1].what == DO_SLICE) {
            int32_t dims[FSDP_MAX_DIMS];
            int count = 0;
            for (int k = 0; k < c->stage[n - 1].ndim; k++)
                if (c->step[n - 1].set >> k & 1) dims[count++] = k;
            CALL(w, fsdp_mesh_slice(mesh, dims, count, &mesh));
        } else if (n > 0 && c->step[n - 1].what == DO_FLATTEN) {
            CALL(w, fsdp_mesh_flatten(mesh, NULL, &mesh));
        } else if (n > 0) {
            int dim = c->step[n - 1].dim;
            CALL(w, fsdp_mesh_unflatten(mesh, dim, c->step[n - 1].outer, two, &mesh));
            CHECK_EQ_INT(fsdp_mesh_dim(mesh, "outer") >= 0, 1);
        }
        check_family(w, &c->stage[n], mesh);
        if (talks) talk_dims(w, mesh);
    }
}

static void chain_rank(lab_rank *r) { check_chain(r->w, (const chain *)r->arg, 1); }

/* Random meshes, cut and joined in random ways; one process plays all ranks. */
static void played_chains(int count) {
    static chain c;
    static fake fakes[RANKS_MAX];
    int ranks = 0;
    for (int n = 0; n < count; n++) {
        random_chain(h_seed() * 1000003 + (uint64_t)n, n % 8 ? 16 : RANKS_MAX, &c);
        for (int r = 0; r < c.stage[0].world; r++) {
            fsdp_world *w = fake_world(&fakes[r], r, c.stage[0].world);
            check_chain(w, &c, 0);
            CALL(NULL, fsdp_shutdown(w));
        }
        check_splits(fakes, c.stage[0].world);
        forget_splits(fakes, c.stage[0].world);
        ranks += c.stage[0].world;
    }
    h_message("%d meshes of %d ranks together", count, ranks);
}

TEST(mesh, random_forms, SLOW | AT_NIGHT(GLOO)) { played_chains(W_SLOW ? 100 : 800); }
TEST(long_mesh, random_forms, SECONDS(300) | NIGHT) { played_chains(20000); }

TEST(mesh, random_forms_talk, SLOW | AT_NIGHT(GLOO) | SECONDS(300)) {
    static chain c;
    for (int n = 0; n < (W_SLOW ? 15 : 60); n++) {
        random_chain(h_seed() * 7919 + (uint64_t)n, 10, &c);
        lab_run(c.stage[0].world, NULL, chain_rank, &c);
    }
}

/* ---- names, errors, memory ------------------------------------------------------------------- */

/* Makes a mesh of this shape, with names "a", "b", ...; ranks NULL: in order. */
static fsdp_mesh *make(fsdp_world *w, int ndim, const int32_t *shape, const int32_t *ranks,
                       int named) {
    static const char *const names[FSDP_MAX_DIMS] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    return lab_mesh(w, ndim, shape, named ? names : NULL, ranks);
}

/* Meshes are equal by value: a slice equals a mesh made with its shape, names and ranks. */
TEST(mesh, equal) {
    static const int32_t shape[2] = {2, 3}, turned[2] = {3, 2}, other[6] = {0, 1, 2, 3, 5, 4},
                         row[3] = {3, 4, 5};
    static const char *const names[2] = {"dp", "tp"}, *const swapped[2] = {"tp", "dp"};
    fake f;
    fsdp_world *w = fake_world(&f, 5, 6);
    const fsdp_mesh *a = lab_mesh(w, 2, shape, names, NULL),
                    *b = lab_mesh(w, 2, shape, names, NULL);
    fsdp_mesh *line = NULL;
    fsdp_mesh_desc d = FSDP_ZERO;
    CHECK(fsdp_mesh_equal(a, a) && fsdp_mesh_equal(a, b) && fsdp_mesh_equal(NULL, NULL));
    CHECK(!fsdp_mesh_equal(a, NULL) && !fsdp_mesh_equal(NULL, a));
    CHECK(!fsdp_mesh_equal(a, lab_mesh(w, 2, turned, names, NULL)));
    CHECK(!fsdp_mesh_equal(a, lab_mesh(w, 2, shape, swapped, NULL)));
    CHECK(!fsdp_mesh_equal(a, lab_mesh(w, 2, shape, NULL, NULL)));
    CHECK(!fsdp_mesh_equal(a, lab_mesh(w, 2, shape, names, other)));
    CHECK(fsdp_mesh_equal(lab_mesh(w, 2, shape, NULL, NULL), lab_mesh(w, 2, shape, NULL, NULL)));
    CHECK(!fsdp_mesh_equal(a, lab_slice(w, a, 1)));
    CHECK(fsdp_mesh_equal(lab_slice(w, a, 1), lab_slice(w, b, 1))); /* this rank's row: 3 4 5 */
    CHECK(!fsdp_mesh_equal(lab_slice(w, a, 0), lab_slice(w, a, 1)));
    d.ndim = 1, d.shape[0] = 3, d.names[0] = "tp", d.ranks = row;
    CALL(w, fsdp_mesh_create(w, &d, &line));
    CHECK(fsdp_mesh_equal(line, lab_slice(w, a, 1)));
    CALL(NULL, fsdp_shutdown(w));
    forget_splits(&f, 1);
}

TEST(mesh, names) {
    static const int32_t shape[3] = {2, 3, 2}, dims[2] = {0, 2};
    char dp[] = "dp", out[] = "outer";
    const char *const two[2] = {out, "inner"};
    fake f;
    fsdp_world *w = fake_world(&f, 5, 12);
    fsdp_mesh *mesh, *slice, *flat, *other;
    fsdp_mesh_desc d = FSDP_ZERO;
    d.ndim = 3;
    memcpy(d.shape, shape, sizeof shape);
    d.names[0] = dp, d.names[2] = "tp";
    CALL(w, fsdp_mesh_create(w, &d, &mesh));
    dp[0] = out[0] = '!'; /* names are copied */
    CHECK(fsdp_mesh_dim(mesh, "dp") == 0 && fsdp_mesh_dim(mesh, "tp") == 2);
    CHECK(fsdp_mesh_dim(mesh, "!p") == -1 && fsdp_mesh_dim(mesh, "cp") == -1);
    CHECK(fsdp_mesh_dim(mesh, NULL) == -1 && fsdp_mesh_dim(NULL, "dp") == -1);
    CALL(w, fsdp_mesh_slice(mesh, dims, 2, &slice));
    CHECK(fsdp_mesh_dim(slice, "dp") == 0 && fsdp_mesh_dim(slice, "tp") == 1);
    CALL(w, fsdp_mesh_flatten(slice, "dp_tp", &flat));
    CHECK(fsdp_mesh_dim(flat, "dp_tp") == 0 && fsdp_mesh_dim(flat, "dp") == -1);
    CALL(w, fsdp_mesh_flatten(mesh, NULL, &flat));
    CHECK_EQ_INT(fsdp_mesh_dim(flat, "dp"), -1);
    out[0] = 'o';
    CALL(w, fsdp_mesh_unflatten(mesh, 0, 2, two, &other));
    out[0] = '!';
    CHECK(fsdp_mesh_dim(other, "outer") == 0 && fsdp_mesh_dim(other, "inner") == 1 &&
          fsdp_mesh_dim(other, "tp") == 3 && fsdp_mesh_dim(other, "dp") == -1);
    CALL(w, fsdp_mesh_unflatten(mesh, 1, 3, NULL, &other));
    CHECK(fsdp_mesh_dim(other, "dp") == 0 && fsdp_mesh_dim(other, "tp") == 3);
    CALL(w, fsdp_mesh_1d(w, "all", &other));
    CHECK(fsdp_mesh_dim(other, "all") == 0 && fsdp_mesh_rank(other, 0) == 5 &&
          fsdp_mesh_size(other, -1) == 12);
    CALL(NULL, fsdp_shutdown(w));
    forget_splits(&f, 1);
}

TEST(mesh, refused) {
    static const int32_t shape[3] = {2, 3, 2}, over[2] = {3, 5}, twice[4] = {0, 1, 2, 1},
                         none[4] = {0, 1, 12, 3}, minus[4] = {0, -1, 2, 3};
    static const int32_t back[2] = {2, 0}, equal[2] = {1, 1}, far[2] = {0, 3}, low[2] = {-1, 1},
                         four[4] = {0, 1, 2, 3}, one = 1;
    fake f;
    fake g;
    fsdp_world *w = fake_world(&f, 5, 12), *other = fake_world(&g, 5, 12);
    fsdp_mesh *mesh = make(w, 3, shape, NULL, 1), *out = mesh;
    fsdp_mesh *away = make(w, 1, &one, NULL, 1), *foreign = make(other, 3, shape, NULL, 1);
    fsdp_mesh_desc d = FSDP_ZERO;
    double x = 0;
    const int before = f.count + g.count;
    d.ndim = 2;
    memcpy(d.shape, over, sizeof over);
    REFUSED(w, fsdp_mesh_create(w, &d, &out), "12"); /* more positions than ranks */
    d.shape[0] = d.shape[1] = 2;
    d.ranks = twice;
    REFUSED(w, fsdp_mesh_create(w, &d, &out), "rank 1 appears twice");
    d.ranks = none;
    REFUSED(w, fsdp_mesh_create(w, &d, &out), "ranks has 12, expected 0..11");
    d.ranks = minus;
    REFUSED(w, fsdp_mesh_create(w, &d, &out), "ranks has -1");
    d.shape[0] = 65536, d.shape[1] = 65536; /* the product is 0 in 32 bits */
    d.ranks = NULL;
    REFUSED(w, fsdp_mesh_create(w, &d, &out), "12");
    REFUSED(w, fsdp_mesh_slice(mesh, back, 2, &out), "dims[1] is 0");
    REFUSED(w, fsdp_mesh_slice(mesh, equal, 2, &out), "dims[1] is 1");
    REFUSED(w, fsdp_mesh_slice(mesh, far, 2, &out), "dims[1] is 3");
    REFUSED(w, fsdp_mesh_slice(mesh, low, 2, &out), "dims[0] is -1");
    REFUSED(w, fsdp_mesh_slice(mesh, far, 0, &out), "num_dims is 0");
    REFUSED(w, fsdp_mesh_slice(mesh, four, 4, &out), "dims[3]");
    REFUSED(w, fsdp_mesh_slice(mesh, NULL, 1, &out), "dims");
    REFUSED(w, fsdp_mesh_unflatten(mesh, 1, 2, NULL, &out), "outer is 2:");
    REFUSED(w, fsdp_mesh_unflatten(mesh, 1, 0, NULL, &out), "outer is 0:");
    REFUSED(w, fsdp_mesh_unflatten(mesh, 1, -3, NULL, &out), "outer is -3:");
    REFUSED(w, fsdp_mesh_unflatten(mesh, 3, 1, NULL, &out), "dim is 3 ");
    REFUSED(w, fsdp_mesh_unflatten(mesh, -1, 1, NULL, &out), "dim is -1 ");
    CHECK(out == NULL); /* as after each failed call that makes an object */
    REFUSED(w, fsdp_mesh_slice(mesh, far, 1, NULL), "NULL");
    REFUSED(w, fsdp_mesh_flatten(mesh, "f", NULL), "NULL");
    REFUSED(w, fsdp_mesh_unflatten(mesh, 1, 3, NULL, NULL), "NULL");
    REFUSED(NULL, fsdp_mesh_slice(NULL, far, 1, &out), "NULL");
    REFUSED(NULL, fsdp_mesh_flatten(NULL, "f", &out), "NULL");
    REFUSED(NULL, fsdp_mesh_unflatten(NULL, 1, 3, NULL, &out), "NULL");
    REFUSED(w, fsdp_all_reduce(w, away, &x, 1, FSDP_F64, FSDP_SUM), "a rank that is in the mesh");
    REFUSED(w, fsdp_broadcast(w, away, &x, 8, 0), "a rank that is in the mesh");
    REFUSED(w, fsdp_all_reduce(w, foreign, &x, 1, FSDP_F64, FSDP_SUM), "of this world");
    REFUSED(w, fsdp_broadcast(w, foreign, &x, 8, 0), "of this world");
    REFUSED(w, fsdp_broadcast(w, mesh, &x, 8, 12), "0..11");
    CHECK_EQ_INT(f.count + g.count, before); /* no call reached the backend */
    CHECK(fsdp_mesh_rank(mesh, 1) == 2 && fsdp_mesh_ranks(NULL, 0, NULL) == -1);
    CALL(NULL, fsdp_shutdown(w));
    CALL(NULL, fsdp_shutdown(other));
    forget_splits(&f, 1);
    forget_splits(&g, 1);
}

TEST(mesh, eight_dims_cannot_be_split) {
    static const int32_t shape[8] = {1, 1, 1, 2, 1, 1, 1, 1};
    fake f;
    fsdp_world *w = fake_world(&f, 1, 2);
    fsdp_mesh *mesh = make(w, 8, shape, NULL, 0), *out;
    CHECK_EQ_INT(fsdp_mesh_rank(mesh, 3), 1);
    REFUSED(w, fsdp_mesh_unflatten(mesh, 3, 2, NULL, &out), "8");
    CALL(NULL, fsdp_shutdown(w));
    forget_splits(&f, 1);
}

TEST(mesh, refused_by_models) {
    static const int32_t square[2] = {2, 2}, some[2] = {0, 3};
    fake f, g;
    fsdp_world *w = fake_world(&f, 1, 4), *other = fake_world(&g, 1, 4);
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_model *m;
    fsdp_unit *u;
    md.mesh = make(w, 1, square, some, 1);
    REFUSED(w, fsdp_model_create(w, &md, &m), "outside");
    md.mesh = make(other, 2, square, NULL, 1);
    REFUSED(w, fsdp_model_create(w, &md, &m), "another world");
    CALL(w, fsdp_mesh_info_init(md.mesh, FSDP_MESH_INFO_HSDP, 0, 1, &info));
    md.mesh = NULL;
    md.mesh_info = &info;
    REFUSED(w, fsdp_model_create(w, &md, &m), "another world");
    md.mesh = make(w, 2, square, NULL, 1);
    CALL(w, fsdp_mesh_info_init(md.mesh, FSDP_MESH_INFO_HSDP, 0, 1, &info));
    info.kind = 17;
    md.mesh = NULL;
    REFUSED(w, fsdp_model_create(w, &md, &m), "17");
    CALL(w, fsdp_model_create(w, NULL, &m));
    fsdp_param_desc p = fsdp_vec("p", 4);
    fsdp_unit_desc ud = FSDP_ZERO;
    ud.params = &p;
    ud.num_params = 1;
    ud.mesh = make(w, 1, square, some, 1);
    REFUSED(w, fsdp_fully_shard(m, &ud, &u), "outside");
    CHECK_EQ_INT(fsdp_num_units(m), 0);
    CALL(NULL, fsdp_shutdown(other));
    CALL(NULL, fsdp_shutdown(w));
    forget_splits(&f, 1);
    forget_splits(&g, 1);
}

/* Makes a world of `size` ranks, and in it the object of number `what` while the n-th allocation
   fails. Returns 0 if there is no n-th allocation. */
static int fails_at(int size, int what, int n) {
    static const int32_t dims[1] = {1};
    static const char *const two[2] = {"x", "y"};
    const int32_t shape[2] = {size / 3 ? size / 3 : 1, size < 3 ? size : 3};
    w_heap heap;
    fake f;
    fsdp_world *w;
    fsdp_mesh_desc d = FSDP_ZERO;
    fsdp_world_desc wd = w_desc(size - 1, size, NULL, "memory", 0);
    w_heap_use(&heap, &wd);
    fake_use(&f, &wd);
    CALL(NULL, fsdp_init(&wd, &w));
    fsdp_mesh *mesh = make(w, 2, shape, NULL, 1), *line, *out = mesh;
    CALL(w, fsdp_mesh_slice(mesh, dims, 1, &line));
    d.ndim = 2, d.shape[0] = shape[1], d.shape[1] = shape[0], d.names[1] = "name";
    const int64_t live = heap.live;
    heap.fail_at = heap.total + n;
    const fsdp_status status = what == 0   ? fsdp_mesh_create(w, &d, &out)
                               : what == 1 ? fsdp_mesh_slice(mesh, dims, 1, &out)
                               : what == 2 ? fsdp_mesh_flatten(line, "flat", &out)
                                           : fsdp_mesh_unflatten(mesh, 1, shape[1], two, &out);
    heap.fail_at = -1;
    const int failed = heap.failures;
    CHECK_STATUS(status, failed ? FSDP_ERR_OUT_OF_MEMORY : FSDP_OK);
    if (failed) CHECK_MSG(out == NULL && heap.live == live, "call %d, allocation %d", what, n);
    else CHECK(out != NULL && heap.live > live);
    if (failed && size == 1) { /* no rank waits for this one: it continues */
        CALL(w, fsdp_mesh_create(w, &d, &out));
        CALL(NULL, fsdp_shutdown(w));
    } else if (what == 1) { /* not collective: the world can continue */
        fsdp_shutdown(w);
    } else {
        CHECK_STATUS(fsdp_shutdown(w), status);
    }
    CHECK_EQ_INT(heap.live, 0);
    forget_splits(&f, 1);
    return failed;
}

TEST(mesh, out_of_memory) {
    for (int what = 0; what < 4; what++) {
        int n[2] = {0, 0};
        for (int i = 0; i < 2; i++)
            while (fails_at(i ? 6 : 1, what, n[i])) n[i]++;
        CHECK(n[0] > 1 && n[1] > 1);
    }
}

/* ---- mesh infos ------------------------------------------------------------------------------ */

/* Every kind with every pair of dims on one rank of a mesh. */
static void check_infos(fsdp_world *w, const fsdp_mesh *mesh, int inside) {
    const int nd = fsdp_mesh_ndim(mesh);
    for (int kind = 0; kind < 3; kind++)
        for (int s = -2; s <= nd; s++)
            for (int r = -2; r <= nd; r++) {
                const int shards = kind != FSDP_MESH_INFO_DDP;
                const int copies = kind != FSDP_MESH_INFO_FSDP;
                const int ok = (shards ? s >= 0 && s < nd : s == -1) &&
                               (copies ? r >= 0 && r < nd : r == -1) && s != r && inside;
                fsdp_mesh_info i;
                memset(&i, 0x77, sizeof i);
                const fsdp_status status = fsdp_mesh_info_init(mesh, kind, s, r, &i);
                snprintf(w_case, sizeof w_case, "%d-D kind %d shard %d replicate %d rank %d", nd,
                         kind, s, r, fsdp_rank(w));
                W_CHECK(status == (ok ? FSDP_OK : FSDP_ERR_INVALID_ARG), "status %d", (int)status);
                W_CHECK(ok || strstr(fsdp_last_error(w), "mesh"), "\"%s\"", fsdp_last_error(w));
                if (!ok) continue;
                W_CHECK(i.mesh == mesh && i.kind == kind && i.shard_mesh_dim == s &&
                            i.replicate_mesh_dim == r,
                        "it holds kind %d, dims %d and %d", i.kind, i.shard_mesh_dim,
                        i.replicate_mesh_dim);
                CHECK_EQ_INT(i.shard_mesh_size, s < 0 ? 1 : fsdp_mesh_size(mesh, s));
                CHECK_EQ_INT(i.shard_mesh_rank, s < 0 ? 0 : fsdp_mesh_rank(mesh, s));
                CHECK_EQ_INT(i.replicate_mesh_size, r < 0 ? 1 : fsdp_mesh_size(mesh, r));
                CHECK_EQ_INT(i.replicate_mesh_rank, r < 0 ? 0 : fsdp_mesh_rank(mesh, r));
                CHECK_EQ_INT(i.shard_comm != NULL, i.shard_mesh_size > 1);
                CHECK_EQ_INT(i.replicate_comm != NULL, i.replicate_mesh_size > 1);
            }
}

static const struct {
    const char *name;
    int world, ndim;
    int32_t shape[4], ranks[8]; /* ranks all 0: in order */
} info_rows[] = {
    {"4", 4, 1, {4}, {0}},           {"1", 3, 1, {1}, {0}},
    {"2x3", 6, 2, {2, 3}, {0}},      {"1x4", 4, 2, {1, 4}, {0}},
    {"4x1", 5, 2, {4, 1}, {0}},      {"1x1", 2, 2, {1, 1}, {0}},
    {"2x1x3", 6, 3, {2, 1, 3}, {0}}, {"2x2x2x1", 8, 4, {2, 2, 2, 1}, {7, 3, 5, 1, 6, 2, 4, 0}}};

TEST_P(mesh_info, kinds, info_rows) {
    fake *fakes = (fake *)lab_zeros((size_t)row->world, sizeof *fakes);
    int numel = 1;
    for (int d = 0; d < row->ndim; d++) numel *= row->shape[d];
    for (int r = 0; r < row->world; r++) {
        fsdp_world *w = fake_world(&fakes[r], r, row->world);
        const int32_t *ranks = row->ranks[0] ? row->ranks : NULL;
        const fsdp_mesh *mesh = make(w, row->ndim, row->shape, ranks, 0);
        check_infos(w, mesh, r < numel);
        CALL(NULL, fsdp_shutdown(w));
    }
    check_splits(fakes, row->world);
    forget_splits(fakes, row->world);
    free(fakes);
}

/* The checks of upstream's constructors, and the error texts. */
TEST(mesh_info, refused) {
    static const int32_t shape[2] = {2, 2};
    fake f;
    fsdp_world *w = fake_world(&f, 3, 4);
    const fsdp_mesh *mesh = make(w, 2, shape, NULL, 1);
    fsdp_mesh_info i;
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_FSDP, -1, -1, &i), "E120");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, -1, &i), "E120");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_HSDP, -1, -1, &i), "E120");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_FSDP, -1, 0, &i), "FSDP");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_FSDP, 0, 1, &i), "FSDP");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, 0, -1, &i), "DDP");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, 0, 1, &i), "DDP");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_HSDP, 0, -1, &i), "HSDP");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_HSDP, -1, 1, &i), "HSDP");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_HSDP, 1, 1, &i), "two different");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_HSDP, 2, 1, &i), "shard_dim 2");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_HSDP, 0, 2, &i), "replicate_dim 2");
    REFUSED(w, fsdp_mesh_info_init(mesh, 3, 0, 1, &i), "kind is 3");
    REFUSED(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_HSDP, 0, 1, NULL), "NULL");
    REFUSED(NULL, fsdp_mesh_info_init(NULL, FSDP_MESH_INFO_HSDP, 0, 1, &i), "NULL");
    CALL(NULL, fsdp_shutdown(w));
    forget_splits(&f, 1);
}
