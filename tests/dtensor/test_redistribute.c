/* test_redistribute.c - routes of fsdp_dtensor.h: as cheap as those of PyTorch's graph planner and
   of an exhaustive search, and never more expensive than greedy steps, which are PyTorch's; and
   that each route, on ranks that the test simulates, ends with the parts of the target.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include <math.h> /* fabs, NAN */
#include "lab.h"
#include "golden.h"
#include "lab_dtensor.h"

static int64_t scratch[FSDP_ROUTE_SCRATCH / 8];
static fsdp_route route_of(const fsdp_spec *from, const fsdp_spec *to, const fsdp_links *links) {
    fsdp_route r;
    CHECK_OK(fsdp_route_find(from, to, links, scratch, sizeof scratch, &r));
    CHECK(r.num_steps >= 0 && r.num_steps <= FSDP_ROUTE_STEPS);
    return r;
}

/* ---- simulated ranks ------------------------------------------------------------------------- */

enum { RANKS_MAX = 16, ELEMENTS_MAX = 4096 };
typedef struct play {
    fsdp_spec spec; /* current; without mesh dims of one rank */
    int ranks;
    int32_t coord[RANKS_MAX][DIMS];
    fsdp_local part[RANKS_MAX];
    double *data[RANKS_MAX];
} play;

/* Returns the spec on a mesh without dims of one rank; dim[m]: the new index of mesh dim m, or -1.
   */
static fsdp_spec without_ones(const fsdp_spec *s, int *dim) {
    fsdp_spec out;
    int32_t mesh[DIMS] = {1};
    fsdp_placement place[DIMS];
    int count = 0;
    memset(place, 0, sizeof place);
    for (int m = 0; m < s->mesh_ndim; m++) {
        dim[m] = -1;
        if (s->mesh_shape[m] == 1) continue;
        dim[m] = count;
        mesh[count] = s->mesh_shape[m], place[count] = s->place[m];
        for (int k = 0; k < s->mesh_ndim && place[count].kind == FSDP_SHARD; k++)
            place[count].order = (int8_t)(place[count].order -
                                          (s->mesh_shape[k] == 1 &&
                                           s->place[k].kind == FSDP_SHARD &&
                                           s->place[k].dim == s->place[m].dim &&
                                           s->place[k].order < s->place[m].order));
        count++;
    }
    CHECK_OK(fsdp_spec_init(&out, count ? count : 1, mesh, place, s->dtype, s->ndim, s->shape));
    return out;
}

static double join(double a, double b, int op) {
    if (op == FSDP_MAX) return a > b ? a : b;
    if (op == FSDP_MIN) return a < b ? a : b;
    return a + b;
}

static void play_begin(play *p, const fsdp_spec *from) {
    int dim[DIMS];
    memset(p, 0, sizeof *p);
    p->spec = without_ones(from, dim);
    int32_t coord[DIMS] = {0};
    do {
        CHECK(p->ranks < RANKS_MAX);
        fsdp_local *l = &p->part[p->ranks];
        memcpy(p->coord[p->ranks], coord, sizeof coord);
        CHECK_OK(fsdp_spec_local(&p->spec, coord, l));
        CHECK(l->numel <= ELEMENTS_MAX);
        double *x = p->data[p->ranks++] = (double *)lab_zeros((size_t)l->numel + 1, sizeof *x);
        for (int64_t i = 0; i < l->numel; i++) {
            x[i] = 1 + (double)whole_index(&p->spec, l, i);
            for (int m = 0; m < p->spec.mesh_ndim; m++)
                if (p->spec.place[m].kind == FSDP_PARTIAL)
                    x[i] = addend(x[i], p->spec.place[m].op, coord[m], p->spec.mesh_shape[m]);
        }
    } while (next_coord(p->spec.mesh_ndim, p->spec.mesh_shape, coord));
}

static void play_end(play *p) {
    for (int r = 0; r < p->ranks; r++) free(p->data[r]);
}

/* Returns the rank with coordinate c in mesh dim m, and r's coordinates in all others. */
static int member(const play *p, int r, int m, int c) {
    int32_t want[DIMS];
    int found = 0;
    memcpy(want, p->coord[r], sizeof want);
    want[m] = c;
    while (memcmp(p->coord[found], want, sizeof want) != 0) found++;
    return found;
}

typedef struct block { /* data with its shape, during a step */
    int64_t shape[DIMS], numel;
    double *x;
} block;

static block block_new(int ndim, const int64_t *shape) {
    block b;
    memset(&b, 0, sizeof b);
    b.numel = 1;
    for (int d = 0; d < ndim; d++) b.numel *= b.shape[d] = shape[d];
    b.x = (double *)lab_zeros((size_t)b.numel + 1, sizeof *b.x);
    return b;
}

/* Copies rows of dim between a block and a larger one, from `first` on. */
static void rows(block *few, block *many, int ndim, int dim, int64_t first, int out) {
    int64_t inner = 1, outer = 1, count = few->shape[dim];
    for (int d = dim + 1; d < ndim; d++) inner *= few->shape[d];
    for (int d = 0; d < dim; d++) outer *= few->shape[d];
    CHECK(first + count <= many->shape[dim]);
    for (int64_t o = 0; o < outer; o++) {
        double *a = few->x + o * count * inner;
        double *b = many->x + (o * many->shape[dim] + first) * inner;
        if (few->numel) memcpy(out ? a : b, out ? b : a, (size_t)(count * inner) * sizeof *a);
    }
}

static block part_block(const play *p, int r) {
    block b = block_new(p->spec.ndim, p->part[r].shape);
    if (b.numel) memcpy(b.x, p->data[r], (size_t)b.numel * sizeof *b.x);
    return b;
}

/* Returns all members' parts, concatenated along dim. */
static block gathered(const play *p, int r, int m, int dim) {
    int64_t shape[DIMS], first = 0;
    memcpy(shape, p->part[r].shape, sizeof shape);
    shape[dim] = 0;
    for (int c = 0; c < p->spec.mesh_shape[m]; c++)
        shape[dim] += p->part[member(p, r, m, c)].shape[dim];
    block all = block_new(p->spec.ndim, shape);
    for (int c = 0; c < p->spec.mesh_shape[m]; c++) {
        block one = part_block(p, member(p, r, m, c));
        rows(&one, &all, p->spec.ndim, dim, first, 0);
        first += one.shape[dim];
        free(one.x);
    }
    return all;
}

static block reduced(const play *p, int r, int m, int op) {
    int n = p->spec.mesh_shape[m];
    block sum = part_block(p, member(p, r, m, 0));
    for (int c = 1; c < n; c++) {
        const double *x = p->data[member(p, r, m, c)];
        for (int64_t i = 0; i < sum.numel; i++) sum.x[i] = join(sum.x[i], x[i], op);
    }
    for (int64_t i = 0; i < sum.numel && op == FSDP_AVG; i++) sum.x[i] /= n;
    return sum;
}

/* Returns this rank's rows of a block, sharded into chunks. */
static block sliced(const play *p, block whole, int dim, int n, int c) {
    fsdp_range range;
    int64_t shape[DIMS];
    CHECK_OK(fsdp_shard_range(whole.shape[dim], n, c, &range));
    memcpy(shape, whole.shape, sizeof shape);
    shape[dim] = range.count;
    block mine = block_new(p->spec.ndim, shape);
    rows(&mine, &whole, p->spec.ndim, dim, range.start, 1);
    free(whole.x);
    return mine;
}

static block step_of_rank(const play *p, int r, int m, const fsdp_step *s) {
    int n = p->spec.mesh_shape[m], c = p->coord[r][m], op = s->from.op, dim = s->from.dim;
    block b;
    switch (s->kind) {
    case FSDP_STEP_ALL_GATHER: return gathered(p, r, m, dim);
    case FSDP_STEP_ALL_TO_ALL: return sliced(p, gathered(p, r, m, dim), s->to.dim, n, c);
    case FSDP_STEP_ALL_REDUCE: return reduced(p, r, m, op);
    case FSDP_STEP_REDUCE_SCATTER:
        CHECK(op == FSDP_SUM || op == FSDP_AVG);
        return sliced(p, reduced(p, r, m, op), s->to.dim, n, c);
    case FSDP_STEP_SLICE: return sliced(p, part_block(p, r), s->to.dim, n, c);
    case FSDP_STEP_OWN:
        b = part_block(p, r);
        if (s->to.op == FSDP_SUM && c)
            for (int64_t i = 0; i < b.numel; i++) b.x[i] = 0;
        return b;
    default: break;
    }
    CHECK(s->kind == FSDP_STEP_PAD && s->to.op == FSDP_SUM);
    b = gathered(p, r, m, dim); /* only its shape matters */
    for (int64_t i = 0; i < b.numel; i++) b.x[i] = 0;
    block mine = part_block(p, r);
    fsdp_range range;
    CHECK_OK(fsdp_shard_range(b.shape[dim], n, c, &range));
    rows(&mine, &b, p->spec.ndim, dim, range.start, 0);
    free(mine.x);
    return b;
}

static void play_step(play *p, int m, const fsdp_step *s) {
    fsdp_placement place[DIMS];
    double *next[RANKS_MAX];
    fsdp_spec spec;
    CHECK_MSG(!memcmp(&p->spec.place[m], &s->from, sizeof s->from), "the step begins elsewhere");
    for (int k = 0; k < p->spec.mesh_ndim && s->from.kind == FSDP_SHARD; k++)
        CHECK_MSG(!(p->spec.place[k].kind == FSDP_SHARD && p->spec.place[k].dim == s->from.dim &&
                    p->spec.place[k].order > s->from.order),
                  "the cut is not the last one");
    memcpy(place, p->spec.place, sizeof place);
    place[m] = s->to;
    CHECK_OK(fsdp_spec_init(&spec, p->spec.mesh_ndim, p->spec.mesh_shape, place, p->spec.dtype,
                            p->spec.ndim, p->spec.shape));
    for (int r = 0; r < p->ranks; r++) {
        fsdp_local l;
        block b = step_of_rank(p, r, m, s);
        CHECK_OK(fsdp_spec_local(&spec, p->coord[r], &l));
        CHECK_EQ_MEM(b.shape, l.shape, sizeof l.shape);
        next[r] = b.x;
    }
    p->spec = spec;
    for (int r = 0; r < p->ranks; r++) {
        free(p->data[r]);
        p->data[r] = next[r];
        CHECK_OK(fsdp_spec_local(&spec, p->coord[r], &p->part[r]));
    }
}

/* Carries out a route on tensors of different shapes; at the end partial values are reduced, and
   each rank must have the elements of its part. */
static void play_route(const fsdp_spec *from, const fsdp_spec *to, const fsdp_route *route) {
    play p;
    int dim[DIMS];
    play_begin(&p, from);
    fsdp_spec goal = without_ones(to, dim), same = goal;
    (void)without_ones(from, dim);
    for (int k = 0; k < route->num_steps; k++) {
        CHECK(dim[route->steps[k].mesh_dim] >= 0);
        play_step(&p, dim[route->steps[k].mesh_dim], &route->steps[k]);
    }
    for (int m = 0; m < goal.mesh_ndim; m++) /* on a mesh of one rank all placements are equal */
        if (goal.mesh_shape[m] == 1) same.place[m] = p.spec.place[m];
    CHECK_MSG(!memcmp(&p.spec, &same, sizeof same), "the route ends elsewhere");
    for (int m = 0; m < goal.mesh_ndim; m++) {
        fsdp_step last;
        memset(&last, 0, sizeof last);
        last.kind = FSDP_STEP_ALL_REDUCE, last.from = p.spec.place[m];
        if (p.spec.place[m].kind == FSDP_PARTIAL) play_step(&p, m, &last);
    }
    for (int r = 0; r < p.ranks; r++)
        for (int64_t i = 0; i < p.part[r].numel; i++)
            CHECK_MSG(p.data[r][i] == 1 + (double)whole_index(&p.spec, &p.part[r], i),
                      "rank %d, element %lld: %g", r, (long long)i, p.data[r][i]);
    play_end(&p);
}

/* Returns a spec with equal placements and another shape. */
static fsdp_spec reshaped(const fsdp_spec *s, int64_t a, int64_t b, int64_t c) {
    fsdp_spec out;
    int64_t shape[DIMS] = {a, b, c};
    CHECK_OK(fsdp_spec_init(&out, s->mesh_ndim, s->mesh_shape, s->place, s->dtype, s->ndim, shape));
    return out;
}

/* ---- PyTorch's planners ---------------------------------------------------------------------- */

/* Reads `COST n (mesh_dim from[3] to[3])*n`. Returns the cost; with `route` its steps must be
   these. */
static double read_plan(golden *g, const fsdp_route *route) {
    double cost = golden_num(g);
    int64_t num = golden_int(g);
    if (route) CHECK_EQ_INT(route->num_steps, num);
    for (int64_t k = 0; k < num; k++) {
        fsdp_placement from, to;
        int64_t m = golden_int(g);
        read_placement(g, &from), read_placement(g, &to);
        if (!route) continue;
        const fsdp_step *s = &route->steps[k];
        CHECK_EQ_INT(s->mesh_dim, m);
        CHECK(s->from.kind == from.kind && s->from.dim == from.dim && s->from.op == from.op);
        CHECK(s->to.kind == to.kind && s->to.dim == to.dim && s->to.op == to.op);
    }
    return cost;
}

/* Returns 1 if a mesh dim is sharded after one to its right. Such specs have no greedy steps. */
static int is_strided(const fsdp_spec *s) {
    int64_t factor[DIMS];
    int found = 0;
    CHECK_OK(fsdp_spec_to_strided(s, factor));
    for (int m = 0; m < s->mesh_ndim; m++) found |= factor[m] > 1;
    return found;
}

static void check_pair(golden *g, const fsdp_spec *frame, const fsdp_links *links, int64_t *count) {
    fsdp_spec from, to;
    fsdp_links greedy = *links;
    read_spec(g, frame, &from), read_spec(g, frame, &to);
    fsdp_route best = route_of(&from, &to, links), plain;
    greedy.greedy = 1;
    plain = route_of(&from, &to, &greedy);
    const char *word = golden_peek(g);
    int given = word && strcmp(word, "-") != 0;
    if (given) {
        double cost = read_plan(g, &plain);
        CHECK_MSG(fabs(plain.cost_us - cost) <= 1e-6 * cost, "greedy costs %.9g, PyTorch's %.9g",
                  plain.cost_us, cost);
        count[1]++, count[2] += cost > best.cost_us * (1 + 1e-6);
    } else {
        (void)golden_word(g);
        if (is_strided(&from) || is_strided(&to)) CHECK_EQ_MEM(&plain, &best, sizeof best);
    }
    double cost = read_plan(g, NULL);
    CHECK_MSG(fabs(best.cost_us - cost) <= 1e-6 * cost, "costs %.9g, PyTorch's %.9g", best.cost_us,
              cost);
    CHECK(best.cost_us <= plain.cost_us);
    fsdp_spec a = reshaped(&from, 5, 7, 3), b = reshaped(&to, 5, 7, 3);
    play_route(&a, &b, &best), play_route(&a, &b, &plain);
    count[0]++;
}

TEST(redistribute, golden_plans) {
    golden g;
    int64_t count[3] = {0, 0, 0};
    GOLDEN_OPEN(&g, "redist_plan.txt", "redist_plan");
    while (golden_case(&g)) {
        fsdp_spec frame;
        fsdp_links links;
        memset(&frame, 0, sizeof frame), memset(&links, 0, sizeof links);
        frame.dtype = FSDP_F32;
        while (golden_line(&g)) {
            read_frame(&g, &frame);
            if (golden_is(&g, "topology")) {
                golden_nums(&g, frame.mesh_ndim, links.gbytes_per_s);
                golden_nums(&g, frame.mesh_ndim, links.hop_us);
            } else if (golden_is(&g, "pair")) check_pair(&g, &frame, &links, count);
        }
    }
    h_message("%lld pairs; of %lld with greedy steps %lld are dearer than the cheapest route",
              (long long)count[0], (long long)count[1], (long long)count[2]);
    GOLDEN_CLOSE(&g);
    CHECK(count[0] > 0);
}

/* ---- an exhaustive search -------------------------------------------------------------------- */

enum { STATES_MAX = 512 };
typedef struct known {
    fsdp_spec spec;
    double cost; /* less than 0: not reached */
    int collectives, steps;
} known;
static known states[STATES_MAX];
static int num_states;

static void add_state(const fsdp_spec *s, void *arg) {
    (void)arg;
    CHECK(num_states < STATES_MAX);
    states[num_states++].spec = *s;
}

static int last_cut(const fsdp_spec *s, int m) {
    for (int k = 0; k < s->mesh_ndim; k++)
        if (s->place[k].kind == FSDP_SHARD && s->place[k].dim == s->place[m].dim &&
            s->place[k].order > s->place[m].order)
            return 0;
    return 1;
}

/* Returns the only mesh dim in which two specs differ, if one move changes it; otherwise -1. */
static int one_move(const fsdp_spec *a, const fsdp_spec *b, const fsdp_spec *goal) {
    int found = -1;
    for (int m = 0; m < a->mesh_ndim; m++)
        if (memcmp(&a->place[m], &b->place[m], sizeof a->place[m])) {
            if (found >= 0) return -1;
            found = m;
        }
    if (found < 0) return -1;
    const fsdp_placement *p = &a->place[found], *q = &b->place[found];
    if (p->kind == FSDP_SHARD && !last_cut(a, found)) return -1;
    if (q->kind == FSDP_SHARD && !last_cut(b, found)) return -1;
    if (p->kind == FSDP_SHARD && q->kind == FSDP_SHARD && p->dim == q->dim) return -1;
    if (q->kind == FSDP_PARTIAL && goal->place[found].kind != FSDP_PARTIAL) return -1;
    return found;
}

/* Returns the cost of a move, by the parts of coordinate 0, which are the largest. */
static double model_cost(const fsdp_spec *a, const fsdp_spec *b, int m, const fsdp_links *l,
                         int *collective) {
    const fsdp_placement *p = &a->place[m], *q = &b->place[m];
    fsdp_local part;
    int32_t coord[DIMS] = {0};
    double n = a->mesh_shape[m], size = (double)fsdp_dtype_size(a->dtype), hops, moved;
    CHECK_OK(fsdp_spec_local(a, coord, &part));
    for (int d = 0; d < a->ndim; d++) size *= (double)part.shape[d];
    *collective = p->kind != FSDP_REPLICATE && q->kind != FSDP_PARTIAL && n > 1;
    if (!*collective) return 0;
    if (q->kind == FSDP_SHARD && part.shape[q->dim]) { /* padded to n equal pieces */
        size /= (double)part.shape[q->dim];
        size *= n * (double)((part.shape[q->dim] + a->mesh_shape[m] - 1) / a->mesh_shape[m]);
    }
    hops = n - 1, moved = (n - 1) / n * size;
    if (p->kind == FSDP_SHARD && q->kind == FSDP_REPLICATE) moved = (n - 1) * size;
    if (p->kind == FSDP_PARTIAL && q->kind == FSDP_REPLICATE) hops *= 2, moved *= 2;
    return l->base_us + hops * l->hop_us[m] + moved / l->gbytes_per_s[m] / 1073741824.0 * 1e6 +
           (p->kind == FSDP_SHARD && q->kind == FSDP_SHARD);
}

static int improves(const known *k, double cost, int collectives, int steps) {
    if (k->cost < 0 || cost < k->cost - 1e-7) return 1;
    if (cost > k->cost + 1e-7) return 0;
    if (collectives != k->collectives) return collectives < k->collectives;
    return steps < k->steps;
}

/* Bellman-Ford: relaxes every move of every state until nothing improves. */
static const known *search(const fsdp_spec *from, const fsdp_spec *to, const fsdp_links *links) {
    int goal = -1, changed = 1;
    for (int i = 0; i < num_states; i++) {
        states[i].cost = memcmp(&states[i].spec, from, sizeof *from) ? -1 : 0;
        states[i].collectives = states[i].steps = 0;
        if (!memcmp(&states[i].spec, to, sizeof *to)) goal = i;
    }
    while (changed) {
        changed = 0;
        for (int i = 0; i < num_states; i++)
            for (int k = 0; k < num_states && states[i].cost >= 0; k++) {
                int collective, m = one_move(&states[i].spec, &states[k].spec, to);
                if (m < 0) continue;
                double cost = states[i].cost +
                              model_cost(&states[i].spec, &states[k].spec, m, links, &collective);
                if (!improves(&states[k], cost, states[i].collectives + collective,
                              states[i].steps + 1))
                    continue;
                states[k].cost = cost, states[k].steps = states[i].steps + 1;
                states[k].collectives = states[i].collectives + collective;
                changed = 1;
            }
    }
    return &states[goal];
}

static const struct {
    const char *name;
    int mesh_ndim;
    int32_t mesh[3];
    int ndim, every; /* every: tests one in `every` pairs */
    int64_t shape[2];
    double hop, gbytes;
} searched[] = {
    {"2x2", 2, {2, 2}, 2, 1, {24, 20}, 0.6, 87.7},
    {"uneven", 2, {2, 3}, 2, 1, {7, 5}, 0.6, 87.7},
    {"short", 2, {3, 4}, 2, 1, {2, 1}, 0.6, 87.7},
    {"empty", 2, {2, 2}, 2, 1, {0, 5}, 0.6, 87.7},
    {"large", 2, {2, 2}, 2, 1, {8192, 8192}, 0.6, 87.7},
    {"slow", 2, {4, 2}, 2, 1, {4099, 515}, 2.7, 19.3},
    {"one_dim", 1, {5}, 2, 1, {12, 7}, 0.6, 87.7},
    {"vector", 3, {2, 2, 3}, 1, 3, {100}, 0.6, 87.7},
    {"2x2x2", 3, {2, 2, 2}, 2, 83, {4096, 1024}, 0.6, 87.7},
    {"uneven3", 3, {3, 2, 2}, 2, 97, {1001, 513}, 2.7, 19.3},
};

TEST_P(redistribute, exhaustive, searched, SECONDS(120)) {
    fsdp_links links, greedy;
    int64_t pairs = 0, dearer = 0, at = 0;
    memset(&links, 0, sizeof links);
    links.base_us = 6.6;
    for (int m = 0; m < DIMS; m++) links.hop_us[m] = row->hop, links.gbytes_per_s[m] = row->gbytes;
    links.hop_us[0] *= 2; /* mesh dims that differ */
    greedy = links, greedy.greedy = 1;
    num_states = 0;
    all_specs(row->mesh_ndim, row->mesh, row->ndim, row->shape, add_state, NULL);
    for (int i = 0; i < num_states; i++)
        for (int k = 0; k < num_states; k++) {
            fsdp_spec from = states[i].spec, to = states[k].spec;
            if (at++ % (row->every * (W_SLOW ? 7 : 1))) continue;
            fsdp_route r = route_of(&from, &to, &links), plain = route_of(&from, &to, &greedy);
            const known *best = search(&from, &to, &links);
            CHECK_MSG(fabs(r.cost_us - best->cost) < 1e-6 * (1 + best->cost),
                      "pair %d %d: %.9g us, the search finds %.9g", i, k, r.cost_us, best->cost);
            CHECK_EQ_INT(r.num_collectives, best->collectives);
            CHECK_EQ_INT(r.num_steps, best->steps);
            CHECK(r.cost_us <= plain.cost_us);
            fsdp_spec a = reshaped(&from, 5, 4, 0), b = reshaped(&to, 5, 4, 0);
            play_route(&a, &b, &r), play_route(&a, &b, &plain);
            pairs++, dearer += plain.cost_us > r.cost_us;
        }
    h_message("%d states, %lld pairs; greedy steps are dearer in %lld", num_states,
              (long long)pairs, (long long)dearer);
}

/* ---- many pairs ------------------------------------------------------------------------------ */

static int random_below(uint64_t *rng, int n) { return (int)(h_rand64(rng) % (uint64_t)n); }

/* Returns random placements; op: of all partial values. */
static fsdp_spec random_spec(uint64_t *rng, int mesh_ndim, const int32_t *mesh, int ndim,
                             const int64_t *shape, int op) {
    fsdp_placement place[DIMS];
    fsdp_spec s;
    int cut[DIMS] = {0};
    memset(place, 0, sizeof place);
    int mesh_dims[DIMS];
    for (int m = 0; m < mesh_ndim; m++) mesh_dims[m] = m;
    for (int m = mesh_ndim - 1; m > 0; m--) { /* order of the shardings */
        int k = random_below(rng, m + 1), other = mesh_dims[m];
        mesh_dims[m] = mesh_dims[k], mesh_dims[k] = other;
    }
    for (int i = 0; i < mesh_ndim; i++) {
        fsdp_placement *p = &place[mesh_dims[i]];
        int choice = random_below(rng, 2 + 2 * ndim);
        if (choice == 1) p->kind = FSDP_PARTIAL, p->op = (int8_t)op;
        if (choice < 2) continue;
        p->kind = FSDP_SHARD, p->dim = (int8_t)(choice % ndim);
        p->order = (int8_t)cut[p->dim]++;
    }
    CHECK_OK(fsdp_spec_init(&s, mesh_ndim, mesh, place, FSDP_F32, ndim, shape));
    return s;
}

TEST(redistribute, random_pairs, SECONDS(120)) {
    static const int64_t sizes[] = {0, 1, 2, 3, 4, 5, 7, 8, 9};
    uint64_t rng = h_seed();
    int64_t steps = 0, num = W_SLOW ? 2000 : 20000;
    for (int64_t n = 0; n < num; n++) {
        int mesh_ndim = 1 + random_below(&rng, 4), ndim = 1 + random_below(&rng, 3);
        int op = random_below(&rng, 4);
        int32_t mesh[4];
        int64_t shape[3];
        for (int m = 0; m < 4; m++) mesh[m] = 1 + random_below(&rng, mesh_ndim > 2 ? 2 : 4);
        for (int d = 0; d < 3; d++) shape[d] = sizes[random_below(&rng, 9)];
        fsdp_spec from = random_spec(&rng, mesh_ndim, mesh, ndim, shape, op);
        fsdp_spec to = random_spec(&rng, mesh_ndim, mesh, ndim, shape, op);
        fsdp_links links;
        fsdp_route r, again, plain;
        memset(&links, 0, sizeof links);
        links.base_us = 0.01 + random_below(&rng, 3), links.no_all_to_all = random_below(&rng, 2);
        for (int m = 0; m < mesh_ndim; m++) /* either bytes dominate, or calls */
            links.gbytes_per_s[m] = random_below(&rng, 2) ? 1e-3 : 100;
        int refused = 0;
        for (int m = 0; m < mesh_ndim; m++)
            refused |= to.place[m].kind == FSDP_PARTIAL && op != FSDP_SUM &&
                       from.place[m].kind != FSDP_PARTIAL;
        fsdp_status status = fsdp_route_find(&from, &to, &links, scratch, sizeof scratch, &r);
        CHECK_STATUS(status, refused ? FSDP_ERR_INVALID_ARG : FSDP_OK);
        if (refused) continue;
        memset(scratch, 0xa5, sizeof scratch / 64); /* its contents must not matter */
        again = route_of(&from, &to, &links);
        CHECK_EQ_MEM(&again, &r, sizeof r);
        links.greedy = 1;
        plain = route_of(&from, &to, &links);
        CHECK(r.cost_us <= plain.cost_us);
        for (int k = 0; k < r.num_steps; k++)
            CHECK(!links.no_all_to_all || r.steps[k].kind != FSDP_STEP_ALL_TO_ALL);
        play_route(&from, &to, &r);
        play_route(&from, &to, &plain);
        steps += r.num_steps;
    }
    h_message("%lld pairs, %lld steps", (long long)num, (long long)steps);
}

/* ---- known routes ---------------------------------------------------------------------------- */

static const char *route_text(const fsdp_route *r) {
    static const char *const names[] = {"slice", "pad", "own", "AG", "AR", "RS", "A2A"};
    static char text[400];
    int used = 0;
    text[0] = 0;
    for (int k = 0; k < r->num_steps; k++) {
        const fsdp_step *s = &r->steps[k];
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%d:%s", k ? " " : "",
                         s->mesh_dim, names[s->kind]);
        if (s->to.kind == FSDP_SHARD)
            used += snprintf(text + used, sizeof text - (size_t)used, "(%d)", s->to.dim);
    }
    return text;
}

/* Among equal costs, the smallest sequence of mesh dims and kinds. */
static const struct {
    const char *name;
    int32_t mesh[2];
    const char *from, *to;
    int from_order[2], to_order[2];
    const char *small, *large; /* for 64 x 64, for 8192 x 8192 */
} planned[] = {
    {"S0S0_RS0",
     {2, 2},
     "S0 S0",
     "R S0",
     {0, 1},
     {0},
     "1:AG 0:AG 1:slice(0)",
     "1:A2A(1) 0:AG 1:A2A(0)"},
    {"S0P_RS0", {2, 2}, "S0 P", "R S0", {0}, {0}, "0:AG 1:RS(0)", "0:A2A(1) 1:RS(0) 0:AG"},
    {"PR_RS0", {2, 2}, "P R", "R S0", {0}, {0}, "1:slice(0) 0:AR", "1:slice(0) 0:AR"},
    {"PP_RR", {2, 2}, "P P", "R R", {0}, {0}, "0:AR 1:AR", "0:RS(0) 1:AR 0:AG"},
    {"S0S1_S1S0",
     {2, 2},
     "S0 S1",
     "S1 S0",
     {0},
     {0},
     "0:AG 1:AG 0:slice(1) 1:slice(0)",
     "0:AG 1:A2A(0) 0:slice(1)"},
    {"orders",
     {4, 2},
     "S0 S0",
     "S0 S0",
     {1, 0},
     {0, 1},
     "0:AG 1:AG 0:slice(0) 1:slice(0)",
     "0:A2A(1) 1:AG 0:A2A(0) 1:slice(0)"},
    {"fsdp_tp", {4, 2}, "S0 S0", "R R", {1, 0}, {0}, "0:AG 1:AG", "0:AG 1:AG"},
    {"fsdp_gather", {4, 2}, "S0 S0", "R S0", {1, 0}, {0}, "0:AG", "0:AG"},
    {"nothing", {4, 2}, "S0 S0", "S0 S0", {1, 0}, {1, 0}, "", ""},
    {"own", {4, 2}, "R S1", "P P", {0}, {0}, "0:own 1:pad", "0:own 1:pad"},
    {"ones", {4, 1}, "R P", "S0 S1", {0}, {0}, "0:slice(0)", "0:slice(0)"},
};

TEST_P(redistribute, planned, planned) {
    for (int large = 0; large < 2; large++) {
        fsdp_placement a[DIMS], b[DIMS];
        fsdp_spec from, to;
        int64_t shape[2] = {large ? 8192 : 64, large ? 8192 : 64};
        placements(row->from, row->from_order, a), placements(row->to, row->to_order, b);
        CHECK_OK(fsdp_spec_init(&from, 2, row->mesh, a, FSDP_F32, 2, shape));
        CHECK_OK(fsdp_spec_init(&to, 2, row->mesh, b, FSDP_F32, 2, shape));
        fsdp_route r = route_of(&from, &to, NULL);
        CHECK_EQ_STR(route_text(&r), large ? row->large : row->small);
    }
}

/* Bytes of uneven shardings: rank 3 of 10 x 257 x 160 gets 128 of 129 columns, and all ranks pad.
   */
TEST(redistribute, bytes_of_uneven_cuts) {
    const int32_t mesh[2] = {1, 3}, two[1] = {2};
    int64_t shape[3] = {10, 257, 160}, vector[1] = {3};
    fsdp_placement a[DIMS], b[DIMS];
    fsdp_spec from, to;
    placements("R P", NULL, a), placements("R S1", NULL, b);
    CHECK_OK(fsdp_spec_init(&from, 2, mesh, a, FSDP_F32, 3, shape));
    CHECK_OK(fsdp_spec_init(&to, 2, mesh, b, FSDP_F32, 3, shape));
    fsdp_route r = route_of(&from, &to, NULL);
    CHECK_EQ_STR(route_text(&r), "1:RS(1)");
    CHECK_EQ_INT(r.wire_bytes, 2 * 10 * 86 * 160 * 4);
    CHECK_EQ_INT(r.most_bytes, 10 * 258 * 160 * 4);
    CHECK(r.steps[0].mesh_dim == 1 && r.steps[0].wire_bytes == r.wire_bytes);
    r = route_of(&to, &to, NULL);
    CHECK(r.num_steps == 0 && r.cost_us == 0 && r.most_bytes == 10 * 86 * 160 * 4);
    placements("P", NULL, a), placements("R", NULL, b);
    CHECK_OK(fsdp_spec_init(&from, 1, two, a, FSDP_F16, 1, vector));
    CHECK_OK(fsdp_spec_init(&to, 1, two, b, FSDP_F16, 1, vector));
    r = route_of(&from, &to, NULL);
    CHECK(r.wire_bytes == 6 && r.most_bytes == 6 && r.num_collectives == 1);
}

/* ---- limits and errors ----------------------------------------------------------------------- */

/* The largest search for which the usual scratch suffices, and one for which it does not. */
TEST(redistribute, scratch) {
    const int32_t mesh[5] = {2, 3, 2, 2, 2};
    int64_t shape[8] = {16, 16, 16, 16, 16, 16, 16, 16};
    fsdp_placement a[DIMS], b[DIMS];
    fsdp_spec from, to;
    fsdp_route r;
    placements("S0 S1 S2 S3 S4", NULL, a), placements("S1 S2 S3 S0 S4", NULL, b);
    CHECK_OK(fsdp_spec_init(&from, 4, mesh, a, FSDP_F32, 8, shape));
    CHECK_OK(fsdp_spec_init(&to, 4, mesh, b, FSDP_F32, 8, shape));
    int64_t begin = h_now_ms();
    r = route_of(&from, &to, NULL);
    h_message("a route on 4 mesh dims, 8 tensor dims: %lld ms, %s", (long long)(h_now_ms() - begin),
              route_text(&r));
    CHECK_STATUS(fsdp_route_find(&from, &to, NULL, scratch, 4096, &r), FSDP_ERR_OUT_OF_MEMORY);
    CHECK_MSG(strstr(fsdp_last_error(NULL),
                     "[E176] route_find: 4096 bytes of scratch are too few for 4 mesh dims "
                     "and a tensor of 8 dims: pass more; 695552 are always enough"),
              "%s", fsdp_last_error(NULL));
    CHECK_OK(fsdp_route_find(&from, &to, NULL, scratch, 695552, &r));
    CHECK_OK(fsdp_spec_init(&from, 5, mesh, a, FSDP_F32, 8, shape));
    b[4].dim = 5;
    CHECK_OK(fsdp_spec_init(&to, 5, mesh, b, FSDP_F32, 8, shape));
    fsdp_status status = fsdp_route_find(&from, &to, NULL, scratch, sizeof scratch, &r);
    CHECK(status == FSDP_OK || status == FSDP_ERR_OUT_OF_MEMORY);
}

TEST(redistribute, refuses) {
    const int32_t mesh[2] = {2, 2}, other_mesh[2] = {2, 4};
    int64_t shape[2] = {8, 8}, other_shape[2] = {8, 9};
    fsdp_placement a[DIMS], b[DIMS];
    fsdp_spec from, to;
    fsdp_links links;
    fsdp_route r;
    placements("S0 R", NULL, a), placements("R S0", NULL, b);
    CHECK_OK(fsdp_spec_init(&from, 2, mesh, a, FSDP_F32, 2, shape));
    CHECK_OK(fsdp_spec_init(&to, 2, mesh, b, FSDP_F32, 2, shape));
#define FIND(from, to, links, memory) fsdp_route_find(from, to, links, memory, sizeof scratch, &r)
    REFUSED(NULL, FIND(NULL, &to, NULL, scratch), "[E154]");
    REFUSED(NULL, FIND(&from, NULL, NULL, scratch), "[E154]");
    REFUSED(NULL, FIND(&from, &to, NULL, NULL), "[E177]");
    REFUSED(NULL, FIND(&from, &to, NULL, (char *)scratch + 4), "[E177]");
    REFUSED(NULL, fsdp_route_find(&from, &to, NULL, scratch, sizeof scratch, NULL), "[E177]");
    memset(&links, 0, sizeof links);
    links.hop_us[7] = -1;
    REFUSED(NULL, FIND(&from, &to, &links, scratch), "[E175]");
    links.hop_us[7] = 0, links.base_us = (double)NAN;
    REFUSED(NULL, FIND(&from, &to, &links, scratch), "[E175]");
    CHECK_OK(fsdp_spec_init(&to, 2, other_mesh, b, FSDP_F32, 2, shape));
    REFUSED(NULL, FIND(&from, &to, NULL, scratch), "[E178]");
    CHECK_OK(fsdp_spec_init(&to, 2, mesh, b, FSDP_F32, 2, other_shape));
    REFUSED(NULL, FIND(&from, &to, NULL, scratch), "[E178]");
    CHECK_OK(fsdp_spec_init(&to, 2, mesh, b, FSDP_BF16, 2, shape));
    REFUSED(NULL, FIND(&from, &to, NULL, scratch), "[E178]");
    CHECK_OK(fsdp_spec_init(&to, 1, mesh, b, FSDP_F32, 2, shape));
    REFUSED(NULL, FIND(&from, &to, NULL, scratch), "[E178]");
    placements("R P", NULL, b), b[1].op = FSDP_AVG;
    CHECK_OK(fsdp_spec_init(&to, 2, mesh, b, FSDP_F32, 2, shape));
    REFUSED(NULL, FIND(&from, &to, NULL, scratch),
            "[E179] route_find: the target is PARTIAL in mesh dim 1");
    b[1].op = FSDP_SUM;
    CHECK_OK(fsdp_spec_init(&from, 2, mesh, b, FSDP_F32, 2, shape));
    REFUSED(NULL, FIND(&from, &to, NULL, scratch), "[E179]");
#undef FIND
}

/* Reports the time of a search as a message; there is no limit. */
TEST(redistribute, times) {
    for (int mesh_ndim = 2; mesh_ndim <= 3; mesh_ndim++) {
        const int32_t mesh[3] = {2, 4, 2};
        const int64_t shape[2] = {4096, 1024};
        int64_t num = 0, begin;
        num_states = 0;
        all_specs(mesh_ndim, mesh, 2, shape, add_state, NULL);
        begin = h_now_ms();
        for (int n = 0; n < 20; n++)
            for (int i = n % 3; i < num_states; i += 3)
                for (int k = 0; k < num_states; k += mesh_ndim == 2 ? 1 : 5, num++)
                    (void)route_of(&states[i].spec, &states[k].spec, NULL);
        h_message("%d-D meshes: %.1f us for a route", mesh_ndim,
                  1e3 * (double)(h_now_ms() - begin) / (double)num);
    }
}
