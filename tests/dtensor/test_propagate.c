/* test_propagate.c - fsdp_propagate: the placements of operations' inputs and outputs, compared
   with PyTorch's and checked with values: each rank computes with its parts, which together are the
   result.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include <math.h> /* HUGE_VAL, exp, fabs, fmax, fmin, sin, sqrt */
#include "lab.h"
#include "lab_dtensor.h"

static int64_t scratch[FSDP_ROUTE_SCRATCH / 8];

/* ---- PyTorch --------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int op;
} named[] = {
    {"mm", FSDP_TENSOR_OP_MM},
    {"linear", FSDP_TENSOR_OP_LINEAR},
    {"bmm", FSDP_TENSOR_OP_BMM},
    {"mul", FSDP_TENSOR_OP_MUL},
    {"add", FSDP_TENSOR_OP_ADD},
    {"add_row", FSDP_TENSOR_OP_ADD},
    {"scale", FSDP_TENSOR_OP_SCALE},
    {"sin", FSDP_TENSOR_OP_POINTWISE},
    {"sum", FSDP_TENSOR_OP_SUM},
    {"sum0", FSDP_TENSOR_OP_SUM},
    {"mean1", FSDP_TENSOR_OP_MEAN},
    {"softmax", FSDP_TENSOR_OP_SOFTMAX},
    {"layer_norm", FSDP_TENSOR_OP_LAYER_NORM},
    {"transpose", FSDP_TENSOR_OP_TRANSPOSE},
    {"view", FSDP_TENSOR_OP_RESHAPE},
    {"flatten", FSDP_TENSOR_OP_RESHAPE},
    {"cat0", FSDP_TENSOR_OP_CAT},
    {"slice0", FSDP_TENSOR_OP_SLICE},
    {"split1", FSDP_TENSOR_OP_SLICE},
    {"embedding", FSDP_TENSOR_OP_EMBEDDING},
};

typedef struct op_case {
    int op, num_in, mesh_ndim, ndim[4];
    int32_t mesh[DIMS];
    int64_t shape[4][DIMS];
    fsdp_tensor_op_args args;
} op_case;

static void args_of(const char *name, op_case *c) {
    memset(&c->args, 0, sizeof c->args);
    c->op = -1;
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        if (!strcmp(named[i].name, name)) c->op = named[i].op;
    CHECK_MSG(c->op >= 0, "an unknown op: %s", name);
    int64_t *s = c->args.shape;
    if (!strcmp(name, "sum0")) c->args.num_dims = 1;
    if (!strcmp(name, "mean1")) c->args.num_dims = 1, s[0] = 1;
    if (!strcmp(name, "view"))
        c->args.num_dims = 3, s[0] = c->shape[0][0], s[1] = 2, s[2] = c->shape[0][1] / 2;
    if (!strcmp(name, "flatten")) c->args.num_dims = 1, s[0] = c->shape[0][0] * c->shape[0][1];
    if (!strcmp(name, "slice0")) c->args.num_dims = 1, s[0] = 2;
    if (!strcmp(name, "split1")) c->args.num_dims = 1, c->args.dim = 1, s[0] = 5;
}

/* Returns the number of elements on the larger side of each collective of a route. */
static int64_t moved(const fsdp_spec *from, const fsdp_spec *to) {
    fsdp_route r;
    int64_t sum = 0;
    CHECK_OK(fsdp_route_find(from, to, NULL, scratch, sizeof scratch, &r));
    for (int k = 0; k < r.num_steps; k++) {
        int64_t n = from->mesh_shape[r.steps[k].mesh_dim];
        int64_t ways = r.steps[k].kind == FSDP_STEP_ALL_REDUCE ? 2 : 1;
        sum += r.steps[k].wire_bytes * n / (ways * (n - 1)) / 4;
    }
    return sum;
}

typedef struct counts {
    int64_t lines, free_lines, equal, same, less, as_much, more;
    int64_t masks;
} counts;

static void check_line(golden *g, const op_case *c, counts *n) {
    fsdp_spec spec[4];
    const fsdp_spec *in[4];
    fsdp_placement place[DIMS], want[DIMS];
    fsdp_propagation p;
    int strided = 0, same = 1;
    int64_t cost = 0;
    memset(place, 0, sizeof place), memset(want, 0, sizeof want);
    for (int i = 0; i < c->num_in; i++) {
        for (int m = 0; m < c->mesh_ndim; m++) CHECK(read_placement(g, &place[m]));
        CHECK_OK(fsdp_spec_init(&spec[i], c->mesh_ndim, c->mesh, place, FSDP_F32, c->ndim[i],
                                c->shape[i]));
        in[i] = &spec[i];
    }
    for (int m = 0; m < c->mesh_ndim; m++) strided |= !read_placement(g, &want[m]);
    int64_t mask = golden_int(g), theirs = golden_int(g), collectives = golden_int(g);
    CHECK_OK(fsdp_propagate(c->op, in, c->num_in, &c->args, NULL, &p));
    for (int i = 0; i < c->num_in; i++) cost += moved(in[i], &p.in[i]);
    for (int m = 0; m < c->mesh_ndim; m++)
        same &= p.out.place[m].kind == want[m].kind && p.out.place[m].dim == want[m].dim &&
                p.out.place[m].op == want[m].op;
    same &= !strided;
    n->lines++;
    if (!collectives && !strided) {
        CHECK_MSG(same && p.cost_us == 0, "%s: line %lld: nothing has to move, %g us", g->name,
                  (long long)g->next, p.cost_us);
        CHECK_EQ_INT(p.masked, mask);
        n->free_lines++, n->masks += mask;
    } else n->same += same;
    n->less += cost<theirs, n->as_much += cost == theirs, n->more += cost> theirs;
}

TEST(propagate, golden_placements) {
    golden g;
    counts n;
    memset(&n, 0, sizeof n);
    GOLDEN_OPEN(&g, "prop.txt", "prop");
    while (golden_case(&g)) {
        op_case c;
        char name[32] = "";
        int inputs = 0;
        memset(&c, 0, sizeof c);
        while (golden_line(&g)) {
            if (golden_is(&g, "mesh")) {
                c.mesh_ndim = (int)golden_int(&g);
                CHECK(c.mesh_ndim >= 1 && c.mesh_ndim <= DIMS);
                for (int m = 0; m < c.mesh_ndim; m++) c.mesh[m] = (int32_t)golden_int(&g);
            } else if (golden_is(&g, "op")) {
                snprintf(name, sizeof name, "%s", golden_word(&g));
                c.num_in = (int)golden_int(&g);
                CHECK(c.num_in >= 1 && c.num_in <= 4);
            } else if (golden_is(&g, "in")) {
                CHECK(inputs < c.num_in);
                c.ndim[inputs] = (int)golden_int(&g);
                CHECK(c.ndim[inputs] >= 0 && c.ndim[inputs] <= DIMS);
                golden_ints(&g, c.ndim[inputs], c.shape[inputs]);
                inputs++;
                args_of(name, &c);
            } else if (golden_is(&g, "prop")) check_line(&g, &c, &n);
        }
    }
    h_message(
        "%lld lines; %lld in which nothing moves are equal; of the others %lld have PyTorch's "
        "output; elements moved: less in %lld, as many in %lld, more in %lld",
        (long long)n.lines, (long long)n.free_lines, (long long)n.same, (long long)n.less,
        (long long)n.as_much, (long long)n.more);
    GOLDEN_CLOSE(&g);
    CHECK(n.lines > 0);
    CHECK_MSG(n.more * 20 <= n.lines, "more elements move than in PyTorch in %lld lines",
              (long long)n.more);
    if (strcmp(golden_dir(), GOLDEN_DIR)) return;
    CHECK(n.lines == 720 && n.masks > 0 && n.free_lines == 315 && n.same == 324);
    CHECK(n.less == 74 && n.as_much == 624 && n.more == 22);
}

/* ---- values ---------------------------------------------------------------------------------- */

enum { MOST = 4096 };
typedef struct dense {
    int ndim;
    int64_t shape[DIMS], numel;
    double x[MOST];
} dense;

static void dense_shape(dense *d, int ndim, const int64_t *shape) {
    d->ndim = ndim, d->numel = 1;
    for (int k = 0; k < ndim; k++) d->numel *= d->shape[k] = shape[k];
    CHECK(d->numel <= MOST);
}

/* Returns the index in `other` of element `at`: dim k becomes dim to[k], from `start` on; -1:
   `other` lacks the dim. */
static int64_t index_in(const dense *d, int64_t at, const dense *other, const int *to,
                        const int64_t *start) {
    int64_t place[DIMS] = {0}, index = 0;
    for (int k = d->ndim - 1; k >= 0; k--) {
        if (to[k] >= 0) place[to[k]] = at % d->shape[k] + (start ? start[k] : 0);
        at /= d->shape[k];
    }
    for (int k = 0; k < other->ndim; k++) index = index * other->shape[k] + place[k];
    return index;
}

static void matmul(dense *out, const dense *x, const dense *y, int64_t batch, int64_t m, int64_t k,
                   int64_t n, int transposed) {
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++) {
                double sum = 0;
                for (int64_t q = 0; q < k; q++)
                    sum += x->x[(b * m + i) * k + q] *
                           y->x[transposed ? j * k + q : (b * k + q) * n + j];
                out->x[(b * m + i) * n + j] = sum;
            }
}

static void rows_of(int op, dense *out, int64_t cols) {
    for (int64_t i = 0; i < out->numel; i += cols) {
        double sum = 0, squares = 0;
        for (int64_t k = i; k < i + cols; k++) {
            if (op == FSDP_TENSOR_OP_SOFTMAX) out->x[k] = exp(out->x[k]);
            sum += out->x[k], squares += out->x[k] * out->x[k];
        }
        double mean = sum / (double)cols, dev = sqrt(squares / (double)cols - mean * mean + 1e-5);
        for (int64_t k = i; k < i + cols; k++)
            out->x[k] = op == FSDP_TENSOR_OP_SOFTMAX ? out->x[k] / sum : (out->x[k] - mean) / dev;
    }
}

/* Computes out, whose shape is set, from the inputs, in one process. first: first row of a sharded
   table. */
static void apply(int op, const fsdp_tensor_op_args *args, dense *const *in, int num_in, dense *out,
                  int64_t first) {
    int to[DIMS], lacks = num_in > 1 ? in[0]->ndim - in[1]->ndim : 0, kept = 0;
    int64_t last = in[0]->ndim ? in[0]->shape[in[0]->ndim - 1] : 1, at = 0;
    for (int k = 0; k < DIMS; k++) to[k] = k;
    memset(out->x, 0, sizeof out->x);
    switch (op) {
    case FSDP_TENSOR_OP_MM:
        matmul(out, in[0], in[1], 1, in[0]->shape[0], last, in[1]->shape[1], 0);
        return;
    case FSDP_TENSOR_OP_BMM:
        matmul(out, in[0], in[1], in[0]->shape[0], in[0]->shape[1], last, in[1]->shape[2], 0);
        return;
    case FSDP_TENSOR_OP_LINEAR:
        matmul(out, in[0], in[1], 1, last ? in[0]->numel / last : out->numel / in[1]->shape[0],
               last, in[1]->shape[0], 1);
        for (int64_t i = 0; i < out->numel && num_in > 2; i++)
            out->x[i] += in[2]->x[i % in[2]->numel];
        return;
    case FSDP_TENSOR_OP_ADD:
    case FSDP_TENSOR_OP_MUL:
        for (int k = 0; k < DIMS; k++)
            to[k] = k < lacks || in[1]->shape[k - lacks] == 1 ? -1 : k - lacks;
        for (int64_t i = 0; i < out->numel; i++) {
            double y = in[1]->x[index_in(out, i, in[1], to, NULL)];
            out->x[i] = op == FSDP_TENSOR_OP_ADD ? in[0]->x[i] + y : in[0]->x[i] * y;
        }
        return;
    case FSDP_TENSOR_OP_TRANSPOSE:
        for (int k = 0; k < args->num_dims; k++) to[k] = (int)args->shape[k];
        for (int64_t i = 0; i < out->numel; i++)
            out->x[i] = in[0]->x[index_in(out, i, in[0], to, NULL)];
        return;
    case FSDP_TENSOR_OP_SLICE:
        for (int64_t i = 0; i < out->numel; i++)
            out->x[i] = in[0]->x[index_in(out, i, in[0], to, NULL)];
        return;
    case FSDP_TENSOR_OP_SUM:
    case FSDP_TENSOR_OP_MEAN:
        for (int k = 0; k < in[0]->ndim; k++) {
            int gone = !args->num_dims;
            for (int q = 0; q < args->num_dims; q++) gone |= args->shape[q] == k;
            to[k] = gone ? -1 : kept++;
        }
        for (int64_t i = 0; i < in[0]->numel; i++)
            out->x[index_in(in[0], i, out, to, NULL)] += in[0]->x[i];
        for (int64_t i = 0; i < out->numel && op == FSDP_TENSOR_OP_MEAN; i++)
            out->x[i] *= (double)out->numel / (double)in[0]->numel;
        return;
    case FSDP_TENSOR_OP_CAT: /* along dim 0 */
        for (int i = 0; i < num_in; at += in[i++]->numel)
            memcpy(out->x + at, in[i]->x, (size_t)in[i]->numel * sizeof(double));
        return;
    case FSDP_TENSOR_OP_EMBEDDING:
        for (int64_t i = 0; i < out->numel && last; i++) {
            int64_t id = (int64_t)in[1]->x[i / last] - first;
            out->x[i] = id < 0 || id >= in[0]->shape[0] ? 0 : in[0]->x[id * last + i % last];
        }
        return;
    default:
        memcpy(out->x, in[0]->x, (size_t)in[0]->numel * sizeof(double));
        break; /* also RESHAPE */
    }
    for (int64_t i = 0; i < out->numel; i++) {
        if (op == FSDP_TENSOR_OP_SCALE) out->x[i] *= 3;
        if (op == FSDP_TENSOR_OP_POINTWISE) out->x[i] = sin(out->x[i]);
    }
    if (op == FSDP_TENSOR_OP_SOFTMAX || op == FSDP_TENSOR_OP_LAYER_NORM)
        rows_of(op, out, last ? last : 1);
}

/* Takes the part of a coordinate; with a partial placement, the coordinate's partial value. The
   input determines which rank has which partial value, for example the largest. */
static void take(const dense *whole, const fsdp_spec *s, const int32_t *coord, int input,
                 dense *part, fsdp_local *l) {
    int to[DIMS];
    for (int k = 0; k < DIMS; k++) to[k] = k;
    CHECK_OK(fsdp_spec_local(s, coord, l));
    dense_shape(part, s->ndim, l->shape);
    for (int64_t i = 0; i < part->numel; i++) {
        part->x[i] = whole->x[index_in(part, i, whole, to, l->start)];
        for (int m = 0; m < s->mesh_ndim; m++)
            if (s->place[m].kind == FSDP_PARTIAL)
                part->x[i] = addend(part->x[i], s->place[m].op,
                                    (coord[m] + input) % s->mesh_shape[m], s->mesh_shape[m]);
    }
}

/* Returns the op that reduces the partial values of a spec: FSDP_SUM (also for means), FSDP_MAX or
   FSDP_MIN. */
static int op_of(const fsdp_spec *s) {
    for (int m = 0; m < s->mesh_ndim; m++)
        if (s->place[m].kind == FSDP_PARTIAL && s->place[m].op != FSDP_AVG) return s->place[m].op;
    return FSDP_SUM;
}

/* Adds a part to the full tensor: copies count once, partial values all, means by their share. */
static void give(const dense *part, const fsdp_spec *s, const int32_t *coord, dense *whole) {
    double share = 1;
    int to[DIMS];
    const int op = op_of(s);
    fsdp_local l;
    for (int k = 0; k < DIMS; k++) to[k] = k;
    CHECK_OK(fsdp_spec_local(s, coord, &l));
    CHECK_EQ_MEM(l.shape, part->shape, (size_t)s->ndim * sizeof *l.shape);
    for (int m = 0; m < s->mesh_ndim; m++) {
        if (s->place[m].kind == FSDP_REPLICATE && coord[m]) return;
        if (s->place[m].kind == FSDP_PARTIAL && s->place[m].op == FSDP_AVG)
            share /= s->mesh_shape[m];
    }
    for (int64_t i = 0; i < part->numel; i++) {
        double *at = &whole->x[index_in(part, i, whole, to, l.start)];
        if (op == FSDP_SUM) *at += share * part->x[i];
        else if (op == FSDP_MAX) *at = fmax(*at, part->x[i]);
        else *at = fmin(*at, part->x[i]);
    }
}

static dense whole_in[4], part_in[4], whole_out, part_out, sum_out;

static void check_values(const op_case *c, const fsdp_propagation *p) {
    dense *in[4] = {&whole_in[0], &whole_in[1], &whole_in[2], &whole_in[3]};
    dense *parts[4] = {&part_in[0], &part_in[1], &part_in[2], &part_in[3]};
    int32_t coord[DIMS] = {0};
    dense_shape(&whole_out, p->out.ndim, p->out.shape),
        dense_shape(&sum_out, p->out.ndim, p->out.shape);
    apply(c->op, &c->args, in, c->num_in, &whole_out, 0);
    const int op = op_of(&p->out);
    for (int64_t i = 0; i < MOST; i++)
        sum_out.x[i] = op == FSDP_MAX ? -HUGE_VAL : op == FSDP_MIN ? HUGE_VAL : 0;
    do {
        fsdp_local l[4], out;
        for (int i = 0; i < c->num_in; i++) take(in[i], &p->in[i], coord, i, parts[i], &l[i]);
        CHECK_OK(fsdp_spec_local(&p->out, coord, &out));
        dense_shape(&part_out, p->out.ndim, out.shape);
        apply(c->op, &c->args, parts, c->num_in, &part_out, l[0].start[0]);
        give(&part_out, &p->out, coord, &sum_out);
    } while (next_coord(p->out.mesh_ndim, p->out.mesh_shape, coord));
    for (int64_t i = 0; i < whole_out.numel; i++)
        CHECK_MSG(fabs(sum_out.x[i] - whole_out.x[i]) < 1e-9,
                  "op %d, element %lld: %g, expected %g", c->op, (long long)i, sum_out.x[i],
                  whole_out.x[i]);
}

static const struct {
    const char *name;
    int op, num_in, ndim[3];
    int64_t shape[3][3];
    fsdp_tensor_op_args args;
} valued[] = {
    {"mm", FSDP_TENSOR_OP_MM, 2, {2, 2}, {{5, 6}, {6, 7}}, {0, 0, {0}}},
    {"mm_short", FSDP_TENSOR_OP_MM, 2, {2, 2}, {{3, 1}, {1, 2}}, {0, 0, {0}}},
    {"mm_empty", FSDP_TENSOR_OP_MM, 2, {2, 2}, {{0, 1}, {1, 2}}, {0, 0, {0}}},
    {"linear", FSDP_TENSOR_OP_LINEAR, 3, {3, 2, 1}, {{2, 3, 6}, {5, 6}, {5}}, {0, 0, {0}}},
    {"bmm", FSDP_TENSOR_OP_BMM, 2, {3, 3}, {{3, 2, 5}, {3, 5, 4}}, {0, 0, {0}}},
    {"add", FSDP_TENSOR_OP_ADD, 2, {2, 2}, {{5, 6}, {5, 6}}, {0, 0, {0}}},
    {"add_row", FSDP_TENSOR_OP_ADD, 2, {2, 1}, {{5, 6}, {6}}, {0, 0, {0}}},
    {"mul_column", FSDP_TENSOR_OP_MUL, 2, {2, 2}, {{5, 6}, {5, 1}}, {0, 0, {0}}},
    {"scale", FSDP_TENSOR_OP_SCALE, 1, {2}, {{5, 6}}, {0, 0, {0}}},
    {"sin", FSDP_TENSOR_OP_POINTWISE, 1, {2}, {{5, 6}}, {0, 0, {0}}},
    {"transpose", FSDP_TENSOR_OP_TRANSPOSE, 1, {3}, {{3, 4, 5}}, {0, 3, {2, 0, 1}}},
    {"slice", FSDP_TENSOR_OP_SLICE, 1, {2}, {{5, 6}}, {1, 1, {4}}},
    {"split", FSDP_TENSOR_OP_RESHAPE, 1, {2}, {{5, 12}}, {0, 3, {5, 4, 3}}},
    {"flatten", FSDP_TENSOR_OP_RESHAPE, 1, {3}, {{4, 3, 5}}, {0, 2, {12, 5}}},
    {"regroup", FSDP_TENSOR_OP_RESHAPE, 1, {3}, {{1, 4, 6}}, {0, 3, {8, 1, 3}}},
    {"uneven", FSDP_TENSOR_OP_RESHAPE, 1, {2}, {{3, 2}}, {0, 1, {6}}},
    {"sum", FSDP_TENSOR_OP_SUM, 1, {3}, {{3, 4, 5}}, {0, 2, {0, 2}}},
    {"sum_all", FSDP_TENSOR_OP_SUM, 1, {2}, {{5, 6}}, {0, 0, {0}}},
    {"mean", FSDP_TENSOR_OP_MEAN, 1, {2}, {{6, 4}}, {0, 1, {1}}},
    {"mean_uneven", FSDP_TENSOR_OP_MEAN, 1, {2}, {{5, 7}}, {0, 0, {0}}},
    {"softmax", FSDP_TENSOR_OP_SOFTMAX, 1, {2}, {{5, 6}}, {0, 0, {0}}},
    {"layer_norm", FSDP_TENSOR_OP_LAYER_NORM, 1, {2}, {{5, 6}}, {0, 1, {0}}},
    {"cat", FSDP_TENSOR_OP_CAT, 3, {2, 2, 2}, {{2, 5}, {3, 5}, {1, 5}}, {0, 0, {0}}},
    {"embedding", FSDP_TENSOR_OP_EMBEDDING, 2, {2, 2}, {{10, 6}, {2, 4}}, {0, 0, {0}}},
};

static fsdp_spec specs[512];
static int num_specs;
static void keep_spec(const fsdp_spec *s, void *arg) {
    (void)arg;
    CHECK(num_specs < 512);
    specs[num_specs++] = *s;
}

/* Draws the ops of a spec's partial values: sums, means, sums and means, maximum or minimum; equal
   for all inputs, or independent. */
static void draw_ops(fsdp_spec *s, uint64_t *rng, int all) {
    static const int8_t ops[] = {FSDP_SUM, FSDP_AVG, FSDP_SUM, FSDP_MAX, FSDP_MIN};
    const int kind = all >= 0 ? all : (int)(h_rand64(rng) % 5);
    for (int m = 0; m < s->mesh_ndim; m++)
        if (s->place[m].kind == FSDP_PARTIAL)
            s->place[m].op = kind == 2 ? ops[h_rand64(rng) % 2] : ops[kind];
}

/* All placements and orders of the inputs on (2, 2) and (3), some on (2, 3) and (2, 2, 2). */
TEST_P(propagate, values, valued, SECONDS(120)) {
    static const struct {
        int ndim;
        int32_t shape[3];
        uint64_t most;
    } meshes[] = {{1, {3}, 300}, {2, {2, 2}, 400}, {2, {2, 3}, 300}, {3, {2, 2, 2}, 100}};
    uint64_t rng = h_seed();
    int64_t count = 0;
    op_case c;
    memset(&c, 0, sizeof c);
    c.op = row->op, c.num_in = row->num_in, c.args = row->args;
    for (int i = 0; i < c.num_in; i++) {
        dense_shape(&whole_in[i], row->ndim[i], row->shape[i]);
        for (int64_t k = 0; k < whole_in[i].numel; k++)
            whole_in[i].x[k] = c.op == FSDP_TENSOR_OP_EMBEDDING && i
                                   ? (double)(7 * k % 10)
                                   : golden_value(7 + (uint64_t)i, (uint64_t)k, 2);
    }
    for (int q = 0; q < 4; q++) {
        int begin[5] = {0};
        num_specs = 0;
        for (int i = 0; i < c.num_in; i++) {
            all_specs(meshes[q].ndim, meshes[q].shape, row->ndim[i], row->shape[i], keep_spec,
                      NULL);
            begin[i + 1] = num_specs;
        }
        for (uint64_t n = 0; n < meshes[q].most / (W_SLOW ? 8 : 1); n++) {
            const fsdp_spec *in[4];
            fsdp_spec drawn[4];
            fsdp_propagation p;
            const int all = (int)(h_rand64(&rng) % 6) - 1;
            for (int i = 0; i < c.num_in; i++) do
                    in[i] = &specs[begin[i] +
                                   (int)(h_rand64(&rng) % (uint64_t)(begin[i + 1] - begin[i]))];
                while (c.op == FSDP_TENSOR_OP_EMBEDDING && i && /* ids are not partial */
                       (in[i]->place[0].kind == FSDP_PARTIAL ||
                        in[i]->place[1].kind == FSDP_PARTIAL ||
                        in[i]->place[2].kind == FSDP_PARTIAL));
            for (int i = 0; i < c.num_in; i++) {
                drawn[i] = *in[i], in[i] = &drawn[i];
                draw_ops(&drawn[i], &rng, all);
            }
            CHECK_OK(fsdp_propagate(c.op, in, c.num_in, &c.args, NULL, &p));
            CHECK_EQ_INT(p.num_in, c.num_in);
            for (int i = 0; i < c.num_in; i++) (void)moved(in[i], &p.in[i]); /* there is a route */
            check_values(&c, &p);
            count++;
        }
    }
    h_message("%lld cases", (long long)count);
}

/* ---- gradients, orders, errors --------------------------------------------------------------- */

static const struct {
    const char *name;
    int op, num_in;
    const char *in[3], *need[3], *out, *grad[3];
} graded[] = {
    {"column",
     FSDP_TENSOR_OP_LINEAR,
     3,
     {"R", "S0", "S0"},
     {"R", "S0", "S0"},
     "S1",
     {"P", "S0", "S0"}},
    {"row", FSDP_TENSOR_OP_LINEAR, 3, {"S1", "S1", "R"}, {"S1", "S1", "P"}, "P", {"S1", "S1", "R"}},
    {"tokens",
     FSDP_TENSOR_OP_LINEAR,
     3,
     {"S0", "R", "R"},
     {"S0", "R", "R"},
     "S0",
     {"S0", "P", "P"}},
    {"addends", FSDP_TENSOR_OP_LINEAR, 3, {"P", "R", "R"}, {"P", "R", "P"}, "P", {"R", "P", "R"}},
    {"whole", FSDP_TENSOR_OP_LINEAR, 3, {"R", "R", "R"}, {"R", "R", "R"}, "R", {"R", "R", "R"}},
    {"norm",
     FSDP_TENSOR_OP_LAYER_NORM,
     3,
     {"S0", "R", "R"},
     {"S0", "R", "R"},
     "S0",
     {"S0", "P", "P"}},
    {"norm_cut", FSDP_TENSOR_OP_RMS_NORM, 2, {"S1", "R"}, {"R", "R"}, "R", {"R", "R"}},
    {"columns", FSDP_TENSOR_OP_EMBEDDING, 2, {"S1", "R"}, {"S1", "R"}, "S2", {"S1"}},
    {"rows", FSDP_TENSOR_OP_EMBEDDING, 2, {"S0", "R"}, {"S0", "R"}, "P", {"S0"}},
    {"batch", FSDP_TENSOR_OP_EMBEDDING, 2, {"R", "S0"}, {"R", "S0"}, "S0", {"P"}},
    {"product", FSDP_TENSOR_OP_MUL, 2, {"P", "R"}, {"P", "R"}, "P", {"R", "P"}},
    {"nonlinear", FSDP_TENSOR_OP_POINTWISE, 1, {"P"}, {"R"}, "R", {"R"}},
    {"not_padded", FSDP_TENSOR_OP_ADD, 2, {"S0", "P"}, {"S0", "S0"}, "S0", {"S0", "S0"}},
};

static fsdp_spec word_spec(const char *word, int ndim, const int64_t *shape) {
    const int32_t mesh[1] = {4};
    fsdp_placement place[DIMS];
    fsdp_spec s;
    placements(word, NULL, place);
    CHECK_OK(fsdp_spec_init(&s, 1, mesh, place, FSDP_F32, ndim, shape));
    return s;
}

TEST_P(propagate, gradients, graded) {
    const int64_t square[2] = {8, 8};
    fsdp_spec spec[3];
    const fsdp_spec *in[3] = {&spec[0], &spec[1], &spec[2]};
    fsdp_propagation p;
    int embedding = row->op == FSDP_TENSOR_OP_EMBEDDING;
    int vectors = row->op == FSDP_TENSOR_OP_LAYER_NORM || row->op == FSDP_TENSOR_OP_RMS_NORM;
    for (int i = 0; i < row->num_in; i++)
        spec[i] = word_spec(row->in[i], i == 2 || (i && vectors) ? 1 : 2, square);
    CHECK_OK(fsdp_propagate(row->op, in, row->num_in, NULL, NULL, &p));
    fsdp_spec out = p.out, want = word_spec(row->out, p.out.ndim, p.out.shape);
    CHECK_EQ_MEM(&out, &want, sizeof out);
    for (int i = 0; i < row->num_in; i++) {
        fsdp_spec need = word_spec(row->need[i], spec[i].ndim, square), grad;
        CHECK_EQ_MEM(&p.in[i], &need, sizeof need);
        memset(&grad, 0, sizeof grad);
        if (!embedding || !i) grad = word_spec(row->grad[i], spec[i].ndim, square);
        CHECK_EQ_MEM(&p.grad[i], &grad, sizeof grad);
    }
    CHECK_EQ_INT(p.masked,
                 embedding && spec[0].place[0].kind == FSDP_SHARD && spec[0].place[0].dim == 0);
}

/* A weight that tensor parallelism has sharded before FSDP keeps this order in an operation. */
TEST(propagate, keeps_orders) {
    const int32_t mesh[2] = {2, 2};
    const int64_t shape[2] = {7, 5};
    const int order[2] = {1, 0};
    fsdp_placement place[DIMS];
    fsdp_spec a, b;
    const fsdp_spec *in[2] = {&b, &a};
    fsdp_propagation p;
    placements("S0 S0", order, place);
    CHECK_OK(fsdp_spec_init(&a, 2, mesh, place, FSDP_F32, 2, shape));
    placements("R R", NULL, place);
    CHECK_OK(fsdp_spec_init(&b, 2, mesh, place, FSDP_F32, 2, shape));
    CHECK_OK(fsdp_propagate(FSDP_TENSOR_OP_MUL, in, 2, NULL, NULL, &p));
    CHECK_EQ_MEM(&p.out, &a, sizeof a);
    CHECK_EQ_MEM(&p.in[0], &a, sizeof a);
    CHECK(p.cost_us == 0);
}

TEST(propagate, refuses) {
    const int64_t shape[2] = {8, 8}, other[2] = {8, 9}, scalar[1] = {8};
    const int32_t mesh[1] = {2};
    fsdp_placement whole = {0, 0, 0, 0};
    fsdp_spec a = word_spec("R", 2, shape), b = word_spec("R", 2, other),
              v = word_spec("R", 1, scalar), m;
    fsdp_tensor_op_args args;
    fsdp_propagation p;
    CHECK_OK(fsdp_spec_init(&m, 1, mesh, &whole, FSDP_F32, 2, shape));
#define GO(op, x, y, num, args)                                                                    \
    fsdp_propagate(FSDP_TENSOR_OP_##op, (const fsdp_spec *const[2]){x, y}, num, args, NULL, &p)
    REFUSED_AS(FSDP_ERR_UNSUPPORTED, NULL, GO(COUNT, &a, &a, 1, NULL),
               "[E172] propagate: there is no op 18");
    REFUSED(NULL, GO(MM, &a, &a, 0, NULL), "[E197]");
    REFUSED(NULL, GO(CAT, &a, &a, 5, NULL),
            "[E197] propagate: in or out is NULL, or 5 is no number of inputs");
    REFUSED(NULL, fsdp_propagate(FSDP_TENSOR_OP_SUM, NULL, 1, NULL, NULL, &p), "[E197]");
    REFUSED(NULL, GO(MM, &a, NULL, 2, NULL), "[E154]");
    REFUSED(NULL, GO(MM, &a, &m, 2, NULL),
            "[E198] propagate: inputs 0 and 1 of mm are on different meshes");
    REFUSED(NULL, GO(MM, &b, &a, 2, NULL),
            "[E199] propagate: 2 inputs of these shapes and args do not fit mm");
    REFUSED(NULL, GO(MM, &a, &v, 2, NULL), "[E199]");
    REFUSED(NULL, GO(BMM, &a, &a, 2, NULL), "[E199]");
    REFUSED(NULL, GO(LINEAR, &a, &b, 2, NULL), "[E199]");
    REFUSED(NULL, GO(ADD, &v, &a, 2, NULL), "[E199]");
    REFUSED(NULL, GO(MUL, &a, &b, 2, NULL), "[E199]");
    REFUSED(NULL, GO(SCALE, &a, &a, 2, NULL), "[E199]");
    REFUSED(NULL, GO(LAYER_NORM, &a, &a, 2, NULL), "[E199]");
    REFUSED(NULL, GO(SLICE, &a, &a, 1, NULL), "[E199]");
    REFUSED(NULL, GO(CAT, &a, &v, 2, NULL), "[E199]");
    REFUSED(NULL, GO(EMBEDDING, &v, &a, 2, NULL), "[E199]");
    memset(&args, 0, sizeof args);
    args.num_dims = 2, args.shape[0] = 8, args.shape[1] = 9;
    REFUSED(NULL, GO(RESHAPE, &a, &a, 1, &args), "[E199]");
    args.shape[0] = args.shape[1] = 1;
    REFUSED(NULL, GO(SUM, &a, &a, 1, &args), "[E199]");
    REFUSED(NULL, GO(TRANSPOSE, &a, &a, 1, &args), "[E199]");
    args.num_dims = 1, args.shape[0] = 9;
    REFUSED(NULL, GO(SLICE, &a, &a, 1, &args), "[E199]");
#undef GO
}
