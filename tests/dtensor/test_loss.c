/* test_loss.c - the loops of fsdp_loss_parallel: cross-entropy of logits with classes sharded over
   ranks that the test simulates, compared with PyTorch's results and with one process in f64.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include <math.h> /* exp, fabs, log, isnan */
#include "lab.h"
#include "lab_dtensor.h"

enum { ROWS = 64, CLASSES = 700, MEMBERS = 8 };

/* A loss over `ranks` members. The test itself performs their all-reduces. */
typedef struct played {
    int64_t rows, classes;
    int ranks;
    fsdp_dtype dtype;
    double logits[ROWS * CLASSES]; /* rounded to the dtype */
    int64_t targets[ROWS];
    float dout[ROWS];
    float max[ROWS], sums[2 * ROWS];
    double loss[ROWS], grad[ROWS * CLASSES];
} played;

static fsdp_range classes_of(const played *p, int rank) {
    fsdp_range r;
    CHECK_OK(fsdp_shard_range(p->classes, p->ranks, rank, &r));
    return r;
}

/* Returns this rank's columns in memory of exactly that size, so that a sanitizer detects reads
   after it. */
static void *columns(const played *p, int rank) {
    fsdp_range r = classes_of(p, rank);
    void *x = r.count ? lab_zeros((size_t)(p->rows * r.count), fsdp_dtype_size(p->dtype)) : NULL;
    for (int64_t i = 0; i < p->rows * r.count; i++)
        lab_put(x, p->dtype, i, p->logits[i / r.count * p->classes + r.start + i % r.count]);
    return x;
}

static void play_loss(played *p) {
    for (int64_t i = 0; i < p->rows; i++)
        p->max[i] = -INFINITY, p->sums[i] = p->sums[p->rows + i] = 0;
    for (int r = 0; r < p->ranks; r++) {
        float max[ROWS];
        void *x = columns(p, r);
        CHECK_OK(fsdp_loss_parallel_max(x, p->dtype, p->rows, classes_of(p, r).count, max));
        for (int64_t i = 0; i < p->rows; i++)
            if (max[i] > p->max[i] || isnan(max[i])) p->max[i] = max[i];
        free(x);
    }
    for (int r = 0; r < p->ranks; r++) {
        float sums[2 * ROWS];
        fsdp_range range = classes_of(p, r);
        void *x = columns(p, r);
        CHECK_OK(fsdp_loss_parallel_sums(x, p->dtype, p->rows, range.count, range.start, p->targets,
                                         p->max, sums));
        for (int64_t i = 0; i < 2 * p->rows; i++) p->sums[i] += sums[i];
        free(x);
    }
    for (int64_t i = 0; i < p->rows; i++)
        p->loss[i] = log((double)p->sums[i]) - (double)p->sums[p->rows + i];
    for (int r = 0; r < p->ranks; r++) { /* in place on every other rank */
        fsdp_range range = classes_of(p, r);
        void *x = columns(p, r), *other = columns(p, r), *grad = r & 1 ? other : x;
        CHECK_OK(fsdp_loss_parallel_grad(grad, x, p->dtype, p->rows, range.count, range.start,
                                         p->targets, p->max, p->sums, p->dout));
        for (int64_t i = 0; i < p->rows * range.count; i++)
            p->grad[i / range.count * p->classes + range.start + i % range.count] = lab_get(
                grad, p->dtype, i);
        free(x), free(other);
    }
}

static played one;

/* The example of two rows and four classes on two ranks. */
TEST(loss, worked_example) {
    static const double logits[8] = {1, 2, 3, 4, 0, 0, 0, 0};
    static const double grad[8] = {0.016029, 0.043572, 0.118441, -0.178043,
                                   -0.375,   0.125,    0.125,    0.125};
    static const double sums[2][4] = {{0.185122, 2, 0, 0}, {1.367879, 2, 0, 0}};
    one.rows = 2, one.classes = 4, one.ranks = 2, one.dtype = FSDP_F32;
    memcpy(one.logits, logits, sizeof logits);
    one.targets[0] = 3, one.targets[1] = 0;
    one.dout[0] = one.dout[1] = 0.5f; /* the loss is a mean */
    play_loss(&one);
    CHECK(one.max[0] == 4 && one.max[1] == 0);
    for (int r = 0; r < 2; r++) {
        float found[4];
        void *x = columns(&one, r);
        CHECK_OK(fsdp_loss_parallel_sums(x, FSDP_F32, 2, 2, 2 * r, one.targets, one.max, found));
        for (int i = 0; i < 4; i++) CHECK_NEAR((double)found[i], sums[r][i], 1e-6);
        free(x);
    }
    CHECK_NEAR(one.loss[0], 0.440190, 1e-6);
    CHECK_NEAR(one.loss[1], 1.386294, 1e-6);
    CHECK_NEAR((one.loss[0] + one.loss[1]) / 2, 0.913242, 1e-6);
    for (int i = 0; i < 8; i++) CHECK_NEAR(one.grad[i], grad[i], 1e-6);
}

/* ---- compared with one process --------------------------------------------------------------- */

static const struct {
    const char *name;
    fsdp_dtype dtype;
    double tolerance; /* for a gradient of 1 */
} dtypes[] = {{"f32", FSDP_F32, 1e-6},
              {"f64", FSDP_F64, 3e-7},
              {"f16", FSDP_F16, 5e-4},
              {"bf16", FSDP_BF16, 4e-3}};

static void check_row(const played *p, int64_t i, double tolerance, double *worst) {
    const double *x = p->logits + i * p->classes;
    double max = -(double)INFINITY, sum = 0;
    for (int64_t k = 0; k < p->classes; k++) max = x[k] > max ? x[k] : max;
    for (int64_t k = 0; k < p->classes; k++) sum += exp(x[k] - max);
    int known = p->targets[i] >= 0 && p->targets[i] < p->classes;
    if (known) {
        double off = fabs(p->loss[i] - (log(sum) + max - x[p->targets[i]]));
        *worst = off > *worst ? off : *worst;
    }
    for (int64_t k = 0; k < p->classes; k++) {
        double want = (exp(x[k] - max) / sum - (k == p->targets[i])) * (double)p->dout[i];
        double off = fabs(p->grad[i * p->classes + k] - want);
        CHECK_MSG(off <= tolerance, "row %lld, class %lld: %.9g, expected %.9g", (long long)i,
                  (long long)k, p->grad[i * p->classes + k], want);
        if (p->dout[i] == 0) CHECK(p->grad[i * p->classes + k] == 0);
    }
}

TEST_P(loss, equals_one_process, dtypes) {
    uint64_t rng = h_seed();
    double worst = 0;
    int empty = 0, cases = 0;
    for (int n = 0; n < 60; n++) {
        one.dtype = row->dtype;
        one.rows = 1 + (int64_t)(h_rand64(&rng) % 7);
        one.classes = 1 + (int64_t)(h_rand64(&rng) % (n % 5 ? 20 : CLASSES));
        one.ranks = 1 + (int)(h_rand64(&rng) % MEMBERS);
        for (int64_t i = 0; i < one.rows * one.classes; i++) {
            double x = 8 * golden_value((uint64_t)n, (uint64_t)i, 2);
            uint64_t bits = 0;
            lab_put(&bits, one.dtype, 0, x);
            one.logits[i] = lab_get(&bits, one.dtype, 0);
        }
        for (int64_t i = 0; i < one.rows; i++) {
            one.targets[i] = i % 3 == 2 ? -100 : (int64_t)(h_rand64(&rng) % (uint64_t)one.classes);
            one.dout[i] = one.targets[i] < 0 ? 0 : (float)(0.5 + 0.25 * (double)(i % 3));
            if (i == 4) one.dout[i] = 0; /* an ignored target that is a valid class */
        }
        play_loss(&one);
        for (int64_t i = 0; i < one.rows; i++) check_row(&one, i, row->tolerance, &worst);
        empty += classes_of(&one, one.ranks - 1).count == 0, cases++;
    }
    h_message("%d cases, %d with a rank without classes; losses differ by %.1e", cases, empty,
              worst);
    CHECK(empty > 5 && worst < 2e-6);
}

/* More classes on a rank than are converted at a time, 256: targets on both sides of the block
   edges, and the largest logit of a row somewhere else. */
TEST_P(loss, many_classes, dtypes) {
    static const int64_t targets[] = {0, 1, 255, 256, 257, 349, 350, 511, 512, 513, 605, 606, 699};
    double worst = 0;
    one.dtype = row->dtype;
    one.rows = (int64_t)(sizeof targets / sizeof *targets), one.classes = CLASSES;
    memcpy(one.targets, targets, sizeof targets);
    for (one.ranks = 1; one.ranks <= 3; one.ranks++) {
        for (int64_t i = 0; i < one.rows * CLASSES; i++) {
            const int64_t line = i / CLASSES, at = i % CLASSES;
            double x = golden_value(11, (uint64_t)i, 2) + 3 * (at == targets[line]);
            uint64_t bits = 0;
            if (at == targets[one.rows - 1 - line]) x += 5;
            lab_put(&bits, one.dtype, 0, x);
            one.logits[i] = lab_get(&bits, one.dtype, 0);
        }
        for (int64_t i = 0; i < one.rows; i++) one.dout[i] = 1;
        play_loss(&one);
        for (int64_t i = 0; i < one.rows; i++) {
            check_row(&one, i, row->tolerance, &worst);
            CHECK(one.sums[one.rows + i] < 0 || targets[i] == targets[one.rows - 1 - i]);
        }
    }
    CHECK_MSG(worst < 2e-6, "a loss differs by %.1e", worst);
}

/* ---- PyTorch --------------------------------------------------------------------------------- */

typedef struct loss_case {
    char reduction[8];
    uint64_t seed;
    int64_t ignore;
    int weighted;
} loss_case;

static void read_logits(golden *g, loss_case *c) {
    snprintf(c->reduction, sizeof c->reduction, "%s", golden_word(g));
    one.rows = golden_int(g), one.classes = golden_int(g);
    c->seed = golden_seed(g), c->ignore = golden_int(g), c->weighted = (int)golden_int(g);
    CHECK_MSG(one.rows <= ROWS && one.rows * one.classes <= ROWS * CLASSES, "%s", g->name);
    golden_fill_f64(one.logits, c->seed, one.rows * one.classes, 4);
}

/* Sets the gradients of a trainer's loss: weights, ignored rows, the mean. */
static void set_dout(const loss_case *c, double *weight) {
    double total = 0;
    for (int64_t i = 0; i < one.rows; i++) {
        int64_t t = one.targets[i];
        weight[i] = t == c->ignore ? 0 : 1;
        if (c->weighted && weight[i] != 0)
            weight[i] = (double)(float)golden_value(c->seed + 1, (uint64_t)t, 1) + 1;
        total += weight[i];
    }
    for (int64_t i = 0; i < one.rows; i++) {
        if (!strcmp(c->reduction, "mean")) weight[i] /= total;
        double go = strcmp(c->reduction, "none") ? 1 : golden_value(c->seed + 2, (uint64_t)i, 2);
        one.dout[i] = (float)(weight[i] * go);
    }
}

static void check_values(golden *g, const loss_case *c) {
    double weight[ROWS], sum = 0;
    int each = !strcmp(c->reduction, "none");
    set_dout(c, weight);
    play_loss(&one);
    CHECK_EQ_INT(golden_int(g), each ? one.rows : 1);
    for (int64_t i = 0; i < one.rows; i++) {
        double loss = weight[i] != 0 ? one.loss[i] * weight[i] : 0;
        if (each) CHECK_NEAR(loss, golden_num(g), 4e-6);
        sum += loss;
    }
    if (!each) CHECK_NEAR(sum, golden_num(g), 4e-6);
}

TEST(loss, golden_loss) {
    golden g;
    loss_case c = {"", 0, 0, 0};
    int cases = 0;
    GOLDEN_OPEN(&g, "tp.txt", "tp");
    one.dtype = FSDP_F32;
    while (golden_case(&g)) {
        int is_loss = 0;
        while (golden_line(&g)) {
            if (golden_is(&g, "mesh")) (void)golden_int(&g), one.ranks = (int)golden_int(&g);
            else if (golden_is(&g, "loss")) is_loss = 1, read_logits(&g, &c);
            else if (is_loss && golden_is(&g, "targets")) {
                CHECK_EQ_INT(golden_int(&g), one.rows);
                golden_ints(&g, one.rows, one.targets);
            } else if (is_loss && golden_is(&g, "value")) check_values(&g, &c), cases++;
            else if (is_loss && golden_is(&g, "dx")) {
                fsdp_placement place;
                CHECK(read_placement(&g, &place));
                CHECK(place.kind == FSDP_SHARD && place.dim == 1);
                CHECK_EQ_INT(golden_int(&g), one.rows * one.classes);
                for (int64_t i = 0; i < one.rows * one.classes; i++)
                    CHECK_NEAR(one.grad[i], golden_left(&g) ? golden_num(&g) : 0, 2e-6);
            }
        }
    }
    h_message("%d losses", cases);
    GOLDEN_CLOSE(&g);
    CHECK(cases > 0 || strcmp(golden_dir(), GOLDEN_DIR)); /* other data may have styles only */
}

/* ---- edges ----------------------------------------------------------------------------------- */

TEST(loss, infinities_and_nan) {
    const float x[6] = {-INFINITY, -INFINITY, 1, NAN, 2, INFINITY};
    const int64_t targets[3] = {0, 0, 0};
    const float dout[3] = {1, 0, 0};
    float max[3], sums[6], grad[6];
    CHECK_OK(fsdp_loss_parallel_max(x, FSDP_F32, 3, 2, max));
    CHECK(max[0] == -INFINITY && isnan(max[1]) && max[2] == INFINITY);
    max[0] = 3; /* from another rank */
    CHECK_OK(fsdp_loss_parallel_sums(x, FSDP_F32, 3, 2, 4, targets, max, sums));
    CHECK(sums[0] == 0 && sums[3] == 0 && isnan(sums[1]));
    sums[0] = 2;
    CHECK_OK(fsdp_loss_parallel_grad(grad, x, FSDP_F32, 3, 2, 4, targets, max, sums, dout));
    for (int i = 0; i < 6; i++) CHECK(grad[i] == 0);
}

TEST(loss, refuses) {
    float x[4] = {0}, y[4] = {0};
    int64_t t[2] = {0, 0};
    CHECK_OK(fsdp_loss_parallel_max(NULL, FSDP_F32, 2, 0, y)); /* a rank without classes */
    CHECK(y[0] == -INFINITY && y[1] == -INFINITY);
    CHECK_OK(fsdp_loss_parallel_sums(NULL, FSDP_F32, 2, 0, 9, t, x, y));
    CHECK(y[0] == 0 && y[3] == 0);
    CHECK_OK(fsdp_loss_parallel_grad(NULL, NULL, FSDP_F32, 2, 0, 9, t, x, x, x));
    CHECK_OK(fsdp_loss_parallel_max(NULL, FSDP_F32, 0, 5, NULL)); /* no rows */
    CHECK_OK(fsdp_loss_parallel_sums(NULL, FSDP_F32, 0, 5, 0, NULL, NULL, NULL));
    CHECK_OK(fsdp_loss_parallel_grad(NULL, NULL, FSDP_F32, 0, 5, 0, NULL, NULL, NULL, NULL));
    REFUSED(NULL, fsdp_loss_parallel_max(x, FSDP_I32, 2, 2, y),
            "[E194] loss_parallel_max: dtype 8");
    REFUSED(NULL, fsdp_loss_parallel_max(x, FSDP_F32, -1, 2, y),
            "[E195] loss_parallel_max: -1 rows");
    REFUSED(NULL, fsdp_loss_parallel_max(x, FSDP_F32, (int64_t)1 << 40, 1 << 20, y), "[E195]");
    REFUSED(NULL, fsdp_loss_parallel_sums(x, FSDP_F32, 2, 2, -1, t, x, y),
            "[E195] loss_parallel_sums");
    REFUSED(NULL, fsdp_loss_parallel_grad(y, x, FSDP_F32, 2, -2, 0, t, x, x, x),
            "[E195] loss_parallel_grad");
    REFUSED(NULL, fsdp_loss_parallel_max(NULL, FSDP_F32, 2, 2, y), "[E196] loss_parallel_max");
    REFUSED(NULL, fsdp_loss_parallel_max(x, FSDP_F32, 2, 2, NULL), "[E196]");
    REFUSED(NULL, fsdp_loss_parallel_sums(x, FSDP_F32, 2, 2, 0, NULL, x, y),
            "[E196] loss_parallel_sums");
    REFUSED(NULL, fsdp_loss_parallel_grad(NULL, x, FSDP_F32, 2, 2, 0, t, x, x, x),
            "[E196] loss_parallel_grad");
    REFUSED(NULL, fsdp_loss_parallel_grad(y, x, FSDP_F32, 2, 2, 0, t, x, x, NULL), "[E196]");
}
