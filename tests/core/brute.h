/* brute.h - training of one unit by brute force: each full tensor, and the gradient of each rank
   Finds a shard element by element. A case is a number: the same number and seed give the same
   case.

   Values are integers and halves below 256, which each floating dtype of the library holds exactly.
   Gradients sum to multiples of the number of ranks. So the right result does not depend on the
   dtypes, and every bit is compared. test_dtype.c and test_fully_shard_mixed_precision.c test
   rounding.

   The first b_grid_size() cases have every shape of a unit of one parameter (dims of 0..W+2, 1-D to 3-D, each
   shard dim) on each mesh of up to B_RANKS ranks, in each layout and reshard mode; the other axes are random.
   In later cases all axes are random. Include it after lab.h.

   SPDX-License-Identifier: MIT */
#ifndef BRUTE_H
#define BRUTE_H

enum { B_RANKS = 6, B_PARAMS = 3, B_DIMS = 3, B_NUMEL = 512, B_MICROS = 3, B_STEPS = 2 };

// The axes of a case, and how many values each has. Some values require others: see b_impossible.
#define B_AXIS_LIST(X)                                                                             \
    X(SPLIT, "split", 14)  /* shard x replicate */                                                 \
    X(MESH, "mesh", 5)     /* ways to set it */                                                    \
    X(COUNT, "params", 3)  /* minus 1 */                                                           \
    X(NDIM, "ndim", 3)     /* parameter 0, minus 1 */                                              \
    X(SHARD_DIM, "dim", 3) /* parameter 0 */                                                       \
    X(ROWS, "rows", 9)     /* parameter 0, along that dim */                                       \
    X(STORED, "stored", 6)                                                                         \
    X(PARAM, "param_dtype", 5)                                                                     \
    X(REDUCE, "reduce_dtype", 5)                                                                   \
    X(GRAD, "grad_dtype", 5)                                                                       \
    X(KEEP, "keep_dtype", 2) /* parameter 0 */                                                     \
    X(LAYOUT, "layout", 4)                                                                         \
    X(RESHARD, "reshard", 4)                                                                       \
    X(FROZEN, "frozen", 3)                                                                         \
    X(USAGE, "usage", 4)                                                                           \
    X(MICRO, "micro", 6)                                                                           \
    X(SECOND, "second", 3) /* a second step: none, after zero_grad, with gradients kept */         \
    X(OFFLOAD, "offload", 2)                                                                       \
    X(FACTOR, "factor", 3)                                                                         \
    X(STAY, "stay", 3) /* parameters after backward: freed, kept, or gathered again at once */     \
    X(DEBUG, "debug", 2)                                                                           \
    X(PLAIN, "plain", 2) /* a backend without fused reduction */

enum {
#define B_X(id, name, count) B_##id,
    B_AXIS_LIST(B_X)
#undef B_X
        B_AXES
};
enum { B_VALUES = 14 }; // most of any axis

static const char *const b_axis_names[B_AXES] = {
#define B_X(id, name, count) name,
    B_AXIS_LIST(B_X)
#undef B_X
};
static const int b_axis_counts[B_AXES] = {
#define B_X(id, name, count) count,
    B_AXIS_LIST(B_X)
#undef B_X
};

static const struct {
    int shards, replicas;
} b_splits[14] = {{1, 1}, {2, 1}, {1, 2}, {3, 1}, {1, 3}, {4, 1}, {2, 2},
                  {1, 4}, {5, 1}, {1, 5}, {6, 1}, {3, 2}, {2, 3}, {1, 6}};

enum { B_MESH_PLAIN = 0, B_MESH_INFO, B_MESH_REVERSED, B_MESH_UNIT, B_MESH_SLICE };
enum { B_STORED_SEVERAL = 4, B_STORED_INT };
enum { B_PACKED = 0, B_DIRECT, B_DEFAULT, B_MIXED };
enum { B_ALWAYS = 0, B_NEVER, B_SOME, B_ALL }; // SOME, ALL: 1/n is kept, n < W, n = W
enum { B_FROZEN_NONE = 0, B_FROZEN_FIRST, B_FROZEN_ALL };
enum {
    B_USED = 0, // everything by every rank
    B_USED_AT_RANDOM, // with fsdp_set_reduce_scatter_unused_params 1
    B_USED_NOT_FIRST, // parameter 0 by nobody
    B_USED_ALIKE      // at random, the same on all ranks
};
enum {
    B_ONE = 0,   // one microbatch
    B_SYNC_BOTH, // two, each reduced
    B_SYNC_LAST, // two, gradients are kept unreduced in between
    B_PARTIAL,   // two, sums over the shard group are kept in between
    B_FORWARDS,  // two forwards, then two backwards
    B_LEFT       // one, unreduced; the next finalize reduces it
};
static const fsdp_dtype b_floats[5] = {FSDP_DTYPE_KEEP, FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64};
static const double b_factors[3] = {0, 1, 2};

typedef struct b_param {
    fsdp_dtype dtype;
    int ndim, shard_dim, frozen, keep;
    int64_t shape[B_DIMS];
    int64_t outer, rows, inner, numel; // rows: size of shard_dim; sizes before, after it
    unsigned used[B_MICROS];           // bit r: rank r writes its gradient
} b_param;

typedef struct b_case {
    int64_t number;
    uint64_t seed;
    int axis[B_AXES];
    int shards, replicas, ranks;
    int reshard; // FSDP_RESHARD_ALWAYS, NEVER or n
    int micros, steps, count;
    int step_of[B_MICROS]; // which step a microbatch belongs to
    b_param param[B_PARAMS];
} b_case;

typedef struct b_truth {
    double value[B_STEPS + 1][B_PARAMS][B_NUMEL]; // before, and after each step
    double average[B_STEPS][B_PARAMS][B_NUMEL];   // gradients at the end of each step
    int has[B_STEPS][B_PARAMS];                   // whether there is one
    signed char grad[B_MICROS][B_RANKS][B_PARAMS][B_NUMEL];
} b_truth;

/* ---- numbers --------------------------------------------------------------------------------- */

// The bits of a number that the dtype holds exactly, normal or zero; by hand, not by fsdp_convert.
static uint64_t b_bits(fsdp_dtype dtype, double x) {
    float f = (float)x;
    uint32_t u;
    uint64_t bits;
    memcpy(&u, &f, sizeof u);
    memcpy(&bits, &x, sizeof bits);
    if (dtype == FSDP_F64) return bits;
    if (dtype == FSDP_F32) return u;
    if (dtype == FSDP_BF16) return u >> 16;
    if (dtype == FSDP_I8) return (uint8_t)(int8_t)x;
    if (!(u << 1)) return u >> 16; // f16, zero
    return (u >> 31) << 15 | (((u >> 23) & 0xffu) - 112u) << 10 | ((u >> 13) & 0x3ffu);
}

static uint64_t b_get(const void *data, fsdp_dtype dtype, int64_t k) {
    uint64_t u64;
    uint32_t u32;
    uint16_t u16;
    const char *at = (const char *)data + (size_t)k * fsdp_dtype_size(dtype);
    switch (fsdp_dtype_size(dtype)) {
    case 8: memcpy(&u64, at, 8); return u64;
    case 4: memcpy(&u32, at, 4); return u32;
    case 2: memcpy(&u16, at, 2); return u16;
    default: return (uint8_t)*at;
    }
}

static void b_put(void *data, fsdp_dtype dtype, int64_t k, double x) {
    uint64_t bits = b_bits(dtype, x);
    uint32_t u32 = (uint32_t)bits;
    uint16_t u16 = (uint16_t)bits;
    uint8_t u8 = (uint8_t)bits;
    size_t size = fsdp_dtype_size(dtype);
    const void *from = size == 8   ? (const void *)&bits
                       : size == 4 ? (const void *)&u32
                       : size == 2 ? (const void *)&u16
                                   : (const void *)&u8;
    memcpy((char *)data + (size_t)k * size, from, size);
}

// The number itself: an integer or a half. Never called for other bits than b_bits gives.
static double b_value(const void *data, fsdp_dtype dtype, int64_t k) {
    uint64_t bits = b_get(data, dtype, k);
    uint32_t u = (uint32_t)bits;
    double x;
    float f;
    if (dtype == FSDP_F64) {
        memcpy(&x, &bits, sizeof x);
        return x;
    }
    if (dtype == FSDP_BF16) u <<= 16;
    if (dtype == FSDP_F16)
        u = u << 1 & 0xffffu
                ? (u >> 15) << 31 | (((u >> 10) & 31u) + 112u) << 23 | (u & 0x3ffu) << 13
                : u << 16;
    memcpy(&f, &u, sizeof f);
    return (double)f;
}

/* ---- shards ---------------------------------------------------------------------------------- */

static int64_t b_chunk(const b_param *p, int shards) {
    return (p->rows + shards - 1) / shards; // rows of every stored shard
}
static int64_t b_rows(const b_param *p, int shards, int rank) {
    int64_t left = p->rows - rank * b_chunk(p, shards);
    return left < 0 ? 0 : left < b_chunk(p, shards) ? left : b_chunk(p, shards);
}
static int64_t b_local_numel(const b_param *p, int shards, int rank) {
    return p->outer * b_rows(p, shards, rank) * p->inner;
}
// Where element e of the full tensor lies in the shard of the rank that has it, whose number is
// stored in *owner.
static int64_t b_local(const b_param *p, int shards, int64_t e, int *owner) {
    int64_t j = e % p->inner, row = e / p->inner % p->rows, o = e / p->inner / p->rows;
    int64_t chunk = b_chunk(p, shards);
    *owner = (int)(row / chunk);
    return (o * b_rows(p, shards, *owner) + row % chunk) * p->inner + j;
}

/* ---- cases ----------------------------------------------------------------------------------- */

// Values of two axes that no case has together.
static int b_impossible(int a, int va, int b, int vb) {
    for (int turn = 0; turn < 2; turn++) {
        int shards = a == B_SPLIT ? b_splits[va].shards : 0;
        if (shards && b == B_ROWS && vb > shards + 2) return 1;
        if (shards && b == B_RESHARD && vb == B_SOME && shards != 4 && shards != 6) return 1;
        if (shards && b == B_RESHARD && vb == B_ALL && shards == 1) return 1;
        if (a == B_NDIM && b == B_SHARD_DIM && vb > va) return 1;
        int swap = a, value = va;
        a = b, va = vb, b = swap, vb = value;
    }
    return 0;
}

static int b_pick(uint64_t *state, int below) {
    *state += 0x9e3779b97f4a7c15u;
    return (int)(lab_hash(*state, 3, 5, 0) % (uint64_t)below);
}

static void b_measure(b_param *p) {
    p->outer = p->inner = 1;
    for (int d = 0; d < p->ndim; d++) {
        if (d < p->shard_dim) p->outer *= p->shape[d];
        if (d > p->shard_dim) p->inner *= p->shape[d];
    }
    p->rows = p->shape[p->shard_dim];
    p->numel = p->outer * p->rows * p->inner;
}

static void b_random_shape(b_case *c, int i, uint64_t *state) {
    b_param *p = &c->param[i];
    int most = c->shards + 3;
    p->ndim = i ? 1 + b_pick(state, B_DIMS) : c->axis[B_NDIM] + 1;
    p->shard_dim = i ? b_pick(state, p->ndim) : c->axis[B_SHARD_DIM];
    for (int d = 0; d < p->ndim; d++)
        p->shape[d] = b_pick(state, 8) ? 1 + b_pick(state, most - 1) : 0;
    if (!i) p->shape[p->shard_dim] = c->axis[B_ROWS];
}

// Draws, for each microbatch and parameter, the ranks that write its gradient.
static void b_random_usage(b_case *c, uint64_t *state) {
    unsigned all = (1u << c->ranks) - 1;
    for (int m = 0; m < c->micros; m++)
        for (int i = 0; i < c->count; i++) {
            unsigned some = (unsigned)b_pick(state, (int)all + 1);
            b_param *p = &c->param[i];
            switch (c->axis[B_USAGE]) {
            case B_USED_AT_RANDOM: p->used[m] = some; break;
            case B_USED_NOT_FIRST: p->used[m] = i ? all : 0; break;
            case B_USED_ALIKE: p->used[m] = some & 1u ? all : 0; break;
            default: p->used[m] = all; break;
            }
            if (p->frozen) p->used[m] = 0;
        }
}

static int b_reshard(const b_case *c, uint64_t *state) {
    switch (c->axis[B_RESHARD]) {
    case B_ALWAYS: return FSDP_RESHARD_ALWAYS;
    case B_NEVER: return FSDP_RESHARD_NEVER;
    case B_ALL: return c->shards;
    default: return c->shards == 6 ? 2 + b_pick(state, 2) : 2;
    }
}

// All that the axes say, and what is left to chance. shape: of parameter 0, or NULL.
static void b_fill(b_case *c, uint64_t *state, const b_param *shape) {
    static const fsdp_dtype stored[4] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64};
    const int *axis = c->axis;
    c->count = axis[B_COUNT] + 1;
    c->reshard = shape ? c->reshard : b_reshard(c, state);
    const fsdp_dtype trained = stored[axis[B_STORED] < 4 ? axis[B_STORED] : b_pick(state, 4)];
    for (int i = 0; i < c->count; i++) {
        b_param *p = &c->param[i];
        if (i || !shape) b_random_shape(c, i, state);
        else *p = *shape;
        b_measure(p);
        p->frozen = axis[B_FROZEN] == B_FROZEN_ALL || (axis[B_FROZEN] == B_FROZEN_FIRST && !i);
        p->dtype = p->frozen && axis[B_STORED] >= 4 ? stored[b_pick(state, 4)] : trained;
        p->keep = axis[B_KEEP] && !i;
        if (axis[B_STORED] == B_STORED_INT && i == c->count - 1) {
            p->dtype = FSDP_I8;
            p->frozen = 1;
        }
    }
    int first = axis[B_MICRO] == B_ONE || axis[B_MICRO] == B_LEFT ? 1 : 2;
    c->steps = axis[B_SECOND] ? 2 : 1;
    c->micros = first + c->steps - 1;
    for (int m = 0; m < c->micros; m++) c->step_of[m] = m >= first;
    b_random_usage(c, state);
}

static void b_split_of(b_case *c) {
    c->shards = b_splits[c->axis[B_SPLIT]].shards;
    c->replicas = b_splits[c->axis[B_SPLIT]].replicas;
    c->ranks = c->shards * c->replicas;
}

// Values of reshard_after_forward for a shard group: always, never, and the ints.
static int b_reshards(int shards, int *out) {
    int n = 0;
    out[n++] = FSDP_RESHARD_ALWAYS;
    out[n++] = FSDP_RESHARD_NEVER;
    for (int k = 2; k <= shards; k++)
        if (shards % k == 0) out[n++] = k;
    return n;
}

static int64_t b_shapes(int shards) { // shapes of one parameter, times its shard dims
    int64_t d = shards + 3;
    return d + 2 * d * d + 3 * d * d * d;
}
static int64_t b_grid_of(int split) {
    int modes[B_RANKS + 2];
    return b_shapes(b_splits[split].shards) * b_reshards(b_splits[split].shards, modes) *
           b_axis_counts[B_LAYOUT];
}
static int64_t b_grid_size(void) {
    int64_t sum = 0;
    for (int s = 0; s < b_axis_counts[B_SPLIT]; s++) sum += b_grid_of(s);
    return sum;
}

// Case `n` of the grid: sets split, shape, layout and reshard mode, and the axes that they decide.
static void b_grid_case(b_case *c, int64_t n, b_param *p) {
    int modes[B_RANKS + 2], *axis = c->axis;
    for (axis[B_SPLIT] = 0; n >= b_grid_of(axis[B_SPLIT]); axis[B_SPLIT]++)
        n -= b_grid_of(axis[B_SPLIT]);
    b_split_of(c);
    int count = b_reshards(c->shards, modes);
    int64_t d = c->shards + 3, size = d;
    c->reshard = modes[n % count];
    axis[B_RESHARD] = c->reshard == FSDP_RESHARD_ALWAYS  ? B_ALWAYS
                      : c->reshard == FSDP_RESHARD_NEVER ? B_NEVER
                      : c->reshard == c->shards          ? B_ALL
                                                         : B_SOME;
    n /= count;
    axis[B_LAYOUT] = (int)(n % b_axis_counts[B_LAYOUT]);
    n /= b_axis_counts[B_LAYOUT];
    memset(p, 0, sizeof *p);
    for (p->ndim = 1; n >= size * p->ndim; p->ndim++, size *= d) n -= size * p->ndim;
    p->shard_dim = (int)(n % p->ndim);
    n /= p->ndim;
    for (int i = 0; i < p->ndim; i++, n /= d) p->shape[i] = n % d;
    axis[B_COUNT] = 0;
    axis[B_NDIM] = p->ndim - 1;
    axis[B_SHARD_DIM] = p->shard_dim;
    axis[B_ROWS] = (int)p->shape[p->shard_dim];
}

static void b_make_case(b_case *c, int64_t number, uint64_t seed) {
    uint64_t state = lab_hash((uint64_t)number, seed, 1, 0);
    int *axis = c->axis;
    b_param shape;
    memset(c, 0, sizeof *c);
    c->number = number;
    c->seed = seed;
    for (int a = 0; a < B_AXES; a++) axis[a] = b_pick(&state, b_axis_counts[a]);
    if (number < b_grid_size()) {
        b_grid_case(c, number, &shape);
        b_fill(c, &state, &shape);
        return;
    }
    b_split_of(c);
    axis[B_SHARD_DIM] = b_pick(&state, axis[B_NDIM] + 1);
    axis[B_ROWS] = b_pick(&state, c->shards + 3);
    if (axis[B_RESHARD] == B_SOME && c->shards != 4 && c->shards != 6) axis[B_RESHARD] = B_ALL;
    if (axis[B_RESHARD] == B_ALL && c->shards == 1) axis[B_RESHARD] = B_NEVER;
    b_fill(c, &state, NULL);
}

/* ---- what comes out -------------------------------------------------------------------------- */

// Gradients of the ranks for one element: their sum is a multiple of the number of ranks.
static int b_element(const b_case *c, b_truth *t, int m, int i, int64_t e) {
    unsigned used = c->param[i].used[m];
    uint64_t h = lab_hash((uint64_t)c->number * 8 + (uint64_t)m, (uint64_t)e, (uint64_t)i + 9, 0);
    int sum = 0, last = -1;
    for (int r = 0; r < c->ranks; r++, h /= 7) {
        signed char *g = &t->grad[m][r][i][e];
        *g = 0;
        if (!(used >> r & 1)) continue;
        *g = (signed char)((int)(h % 7) - 3);
        sum += *g;
        last = r;
    }
    if (last < 0) return 0;
    int over = (sum % c->ranks + c->ranks) % c->ranks;
    t->grad[m][last][i][e] = (signed char)(t->grad[m][last][i][e] - over);
    return sum - over;
}

static void b_make_truth(const b_case *c, b_truth *t) {
    double factor = b_factors[c->axis[B_FACTOR]];
    if (factor <= 0) factor = c->ranks;
    memset(t->has, 0, sizeof t->has);
    for (int i = 0; i < c->count; i++) {
        const b_param *p = &c->param[i];
        for (int m = 0; m < c->micros; m++)
            if (p->used[m] || (c->axis[B_USAGE] == B_USED_AT_RANDOM && !p->frozen))
                t->has[c->step_of[m]][i] = 1;
        if (c->steps == 2 && c->axis[B_SECOND] == 2) t->has[1][i] |= t->has[0][i];
        for (int64_t e = 0; e < p->numel; e++) {
            double sum[B_STEPS] = {0, 0};
            t->value[0][i][e] =
                (double)(lab_hash((uint64_t)c->number, (uint64_t)e, (uint64_t)i, 0) % 121) - 60;
            for (int m = 0; m < c->micros; m++)
                sum[c->step_of[m]] += b_element(c, t, m, i, e) / factor;
            if (c->axis[B_SECOND] == 2) sum[1] += sum[0];
            for (int s = 0; s < c->steps; s++) {
                t->average[s][i][e] = sum[s];
                t->value[s + 1][i][e] = t->value[s][i][e] - sum[s];
            }
        }
    }
}

// The case as text: its axes, then its parameters.
static void b_describe(const b_case *c, char *text, size_t size) {
    int n = snprintf(text, size, "%dx%d", c->shards, c->replicas);
    for (int a = B_MESH; a < B_AXES; a++)
        n += snprintf(text + n, n < (int)size ? size - (size_t)n : 0, " %s=%d", b_axis_names[a],
                      c->axis[a]);
    for (int i = 0; i < c->count; i++) {
        const b_param *p = &c->param[i];
        n += snprintf(text + n, n < (int)size ? size - (size_t)n : 0, "; %s(",
                      fsdp_dtype_name(p->dtype));
        for (int d = 0; d < p->ndim; d++)
            n += snprintf(text + n, n < (int)size ? size - (size_t)n : 0, "%s%s%lld", d ? "," : "",
                          d == p->shard_dim ? "*" : "", (long long)p->shape[d]);
        n += snprintf(text + n, n < (int)size ? size - (size_t)n : 0, ")%s%s used %x %x %x",
                      p->frozen ? " frozen" : "", p->keep ? " keep" : "", p->used[0], p->used[1],
                      p->used[2]);
    }
}
#endif
