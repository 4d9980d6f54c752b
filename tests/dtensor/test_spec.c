/* test_spec.c - specs of fsdp_dtensor.h: each rank's part of a tensor, compared with PyTorch's own
   examples and with lists of indices that are sharded step by step; strided placements; errors.

   SPDX-License-Identifier: MIT */
#define TAGS AT_NIGHT(ASAN)
#include "harness.h"
#include "lab.h"
#include "lab_dtensor.h"

enum { LONGEST = 512 };

/* ---- the model: lists of indices ------------------------------------------------------------- */

typedef struct list {
    int64_t at[LONGEST];
    int64_t size;
} list;

/* torch.chunk: pieces of the smallest size for which n pieces contain everything. */
static void model_chunk(list *l, int64_t n, int64_t k) {
    list whole = *l;
    int64_t chunk = 0;
    while (chunk * n < whole.size) chunk++;
    l->size = 0;
    for (int64_t i = chunk * k; i < chunk * (k + 1) && i < whole.size; i++)
        l->at[l->size++] = whole.at[i];
}

/* _StridedShard: f pieces, and of each the k-th of n. */
static void model_strided(list *l, int64_t n, int64_t f, int64_t k) {
    static list piece, mine;
    mine.size = 0;
    for (int64_t j = 0; j < f; j++) {
        piece = *l;
        model_chunk(&piece, f, j);
        model_chunk(&piece, n, k);
        for (int64_t i = 0; i < piece.size; i++) mine.at[mine.size++] = piece.at[i];
    }
    *l = mine;
}

static void model_whole(list *l, int64_t size) {
    CHECK(size <= LONGEST);
    for (l->size = 0; l->size < size; l->size++) l->at[l->size] = l->size;
}

/* Computes a coordinate's indices of tensor dim d. */
static void model_list(const fsdp_spec *s, const int32_t *coord, int d, list *l) {
    model_whole(l, s->shape[d]);
    for (int k = 0; k < s->mesh_ndim; k++)
        for (int m = 0; m < s->mesh_ndim; m++)
            if (s->place[m].kind == FSDP_SHARD && s->place[m].dim == d && s->place[m].order == k)
                model_chunk(l, s->mesh_shape[m], coord[m]);
}

static void check_part(const fsdp_spec *s, const int32_t *coord) {
    static list l;
    fsdp_local part;
    int64_t numel = 1;
    CHECK_OK(fsdp_spec_local(s, coord, &part));
    for (int d = 0; d < s->ndim; d++) {
        model_list(s, coord, d, &l);
        CHECK_EQ_INT(part.shape[d], l.size);
        CHECK_EQ_INT(part.start[d], l.size ? l.at[0] : s->shape[d]);
        for (int64_t i = 0; i < l.size; i++) CHECK_EQ_INT(l.at[i], part.start[d] + i);
        numel *= l.size;
    }
    for (int d = s->ndim; d < DIMS; d++) CHECK(!part.shape[d] && !part.start[d]);
    CHECK_EQ_INT(part.numel, numel);
}

/* ---- all small specs ------------------------------------------------------------------------- */

/* Calls `each` for meshes of up to 3 dims with up to 4 ranks each, and shapes of up to 3 dims. */
static void all_small(each_spec *each, void *arg) {
    static const int64_t sizes[] = {0, 1, 2, 3, 5, 7, 8, 13};
    for (int ndim = 1; ndim <= 3; ndim++)
        for (int code = 0; code < 64; code++) {
            int32_t mesh[3] = {1 + code % 4, 1 + code / 4 % 4, 1 + code / 16};
            int mesh_ndim = 1 + (code >= 4) + (code >= 16);
            for (int i = 0; i < 8; i++) {
                int64_t shape[3] = {sizes[i], sizes[(3 * i + 1) % 8], sizes[(5 * i + 3) % 8]};
                if (W_SLOW && (i & 1)) continue;
                all_specs(mesh_ndim, mesh, ndim, shape, each, arg);
            }
        }
}

static void each_part(const fsdp_spec *s, void *arg) {
    int32_t coord[DIMS] = {0};
    int64_t held[3] = {0, 0, 0}, *count = (int64_t *)arg;
    do {
        check_part(s, coord);
        count[1]++;
    } while (next_coord(s->mesh_ndim, s->mesh_shape, coord));
    for (int d = 0; d < s->ndim; d++) { /* in each dim, every index belongs to one part */
        for (int m = 0; m < s->mesh_ndim; m++) coord[m] = 0;
        do {
            fsdp_local part;
            int other = 0;
            for (int m = 0; m < s->mesh_ndim; m++)
                other |= coord[m] && !(s->place[m].kind == FSDP_SHARD && s->place[m].dim == d);
            if (other) continue;
            CHECK_OK(fsdp_spec_local(s, coord, &part));
            held[d] += part.shape[d];
        } while (next_coord(s->mesh_ndim, s->mesh_shape, coord));
        CHECK_EQ_INT(held[d], s->shape[d]);
    }
    count[0]++;
}

TEST(spec, parts_of_all_small_meshes) {
    int64_t count[2] = {0, 0};
    all_small(each_part, count);
    h_message("%lld specs, %lld parts", (long long)count[0], (long long)count[1]);
}

/* ---- PyTorch's examples ---------------------------------------------------------------------- */

/* parts: each rank's part, row-major: "3@0" along `dim`, with the other dims whole; "5x3@0,3": all
   dims. */
static const struct {
    const char *name;
    int mesh_ndim;
    int32_t mesh[4];
    int ndim;
    int64_t shape[2];
    const char *place;
    int order[4], dim;
    const char *parts;
    int64_t factor[4]; /* 0: a plain Shard */
} vectors[] = {
    {"1", 1, {4}, 1, {16}, "S0", {0}, 0, "4@0 4@4 4@8 4@12", {0}},
    {"2", 1, {4}, 1, {10}, "S0", {0}, 0, "3@0 3@3 3@6 1@9", {0}},
    {"3", 1, {4}, 1, {5}, "S0", {0}, 0, "2@0 2@2 1@4 0@5", {0}},
    {"4", 1, {8}, 1, {2}, "S0", {0}, 0, "1@0 1@1 0@2 0@2 0@2 0@2 0@2 0@2", {0}},
    {"5", 1, {4}, 2, {0, 3}, "S0", {0}, 0, "0@0 0@0 0@0 0@0", {0}},
    {"6", 1, {1}, 2, {7, 3}, "S0", {0}, 0, "7@0", {0}},
    {"7", 1, {4}, 2, {8, 6}, "S1", {0}, 1, "2@0 2@2 2@4 0@6", {0}},
    {"8a", 1, {3}, 2, {7, 5}, "R", {0}, 0, "7@0 7@0 7@0", {0}},
    {"8b", 1, {3}, 2, {7, 5}, "P", {0}, 0, "7@0 7@0 7@0", {0}},
    {"9", 1, {6}, 2, {13, 2}, "S0", {0}, 0, "3@0 3@3 3@6 3@9 1@12 0@13", {0}},
    {"10", 1, {7}, 1, {8}, "S0", {0}, 0, "2@0 2@2 2@4 2@6 0@8 0@8 0@8", {0}},
    {"11", 2, {2, 2}, 2, {8, 8}, "S0 S0", {0, 1}, 0, "2@0 2@2 2@4 2@6", {0}},
    {"12", 2, {2, 4}, 2, {8, 4}, "S0 S0", {0, 1}, 0, "1@0 1@1 1@2 1@3 1@4 1@5 1@6 1@7", {0}},
    {"13", 2, {2, 2}, 2, {10, 5}, "S0 S1", {0}, 0, "5x3@0,0 5x2@0,3 5x3@5,0 5x2@5,3", {0}},
    {"14", 2, {2, 2}, 2, {9, 5}, "S0 S0", {0, 1}, 0, "3@0 2@3 2@5 2@7", {0}},
    {"15", 2, {2, 2}, 2, {3, 5}, "S0 S0", {0, 1}, 0, "1@0 1@1 1@2 0@3", {0}},
    {"16", 2, {2, 2}, 2, {1, 3}, "S0 S0", {0, 1}, 0, "1@0 0@1 0@1 0@1", {0}},
    {"17", 2, {4, 2}, 2, {18, 2}, "S0 S0", {0, 1}, 0, "3@0 2@3 3@5 2@8 3@10 2@13 2@15 1@17", {0}},
    {"18", 2, {4, 2}, 2, {13, 2}, "S0 S0", {0, 1}, 0, "2@0 2@2 2@4 2@6 2@8 2@10 1@12 0@13", {0}},
    {"19", 2, {2, 2}, 2, {2, 5}, "S1 S1", {0, 1}, 1, "2@0 1@2 1@3 1@4", {0}},
    {"20",
     2,
     {2, 4},
     2,
     {7, 9},
     "S1 S0",
     {0},
     0,
     "2x5@0,0 2x5@2,0 2x5@4,0 1x5@6,0 2x4@0,5 2x4@2,5 2x4@4,5 1x4@6,5",
     {0}},
    {"21", 2, {2, 3}, 2, {6, 7}, "R S1", {0}, 1, "3@0 3@3 1@6 3@0 3@3 1@6", {0}},
    {"22", 2, {2, 3}, 2, {7, 6}, "S0 R", {0}, 0, "4@0 4@0 4@0 3@4 3@4 3@4", {0}},
    {"23", 2, {2, 2}, 2, {6, 4}, "P S0", {0}, 0, "3@0 3@3 3@0 3@3", {0}},
    {"24", 2, {1, 4}, 2, {6, 4}, "S0 S0", {0, 1}, 0, "2@0 2@2 2@4 0@6", {0}},
    {"25", 2, {2, 2}, 2, {8, 8}, "S0 S0", {1, 0}, 0, "2@0 2@4 2@2 2@6", {2, 1}},
    {"26", 2, {4, 2}, 2, {16, 2}, "S0 S0", {1, 0}, 0, "2@0 2@8 2@2 2@10 2@4 2@12 2@6 2@14", {2, 1}},
    {"27", 2, {4, 2}, 2, {15, 5}, "S0 S0", {1, 0}, 0, "2@0 2@8 2@2 2@10 2@4 2@12 2@6 1@14", {2, 1}},
    {"28",
     2,
     {4, 2},
     2,
     {18, 2},
     "S0 S0",
     {1, 0},
     0,
     "3@0 3@9 3@3 3@12 3@6 3@15 0@18 0@18",
     {2, 1}},
    {"33",
     3,
     {2, 2, 2},
     2,
     {16, 16},
     "S0 S0 S0",
     {1, 0, 2},
     0,
     "2@0 2@2 2@8 2@10 2@4 2@6 2@12 2@14",
     {2, 1, 1}},
    {"34",
     4,
     {1, 2, 2, 2},
     2,
     {16, 16},
     "S0 S1 S0 S1",
     {1, 1, 0, 0},
     0,
     "8x4@0,0 8x4@0,8 8x4@8,0 8x4@8,8 8x4@0,4 8x4@0,12 8x4@8,4 8x4@8,12",
     {2, 2, 1, 1}},
    {"36",
     3,
     {2, 2, 2},
     2,
     {8, 2},
     "R S0 S0",
     {0, 1, 0},
     0,
     "2@0 2@4 2@2 2@6 2@0 2@4 2@2 2@6",
     {1, 2, 1}},
    {"38", 2, {2, 2}, 2, {2, 4}, "S1 S1", {1, 0}, 1, "1@0 1@2 1@1 1@3", {2, 1}},
    {"39", 2, {3, 2}, 1, {7}, "S0 S0", {1, 0}, 0, "2@0 1@4 2@2 1@5 0@7 1@6", {2, 1}},
    {"40",
     2,
     {4, 2},
     2,
     {50257, 768},
     "S0 S0",
     {1, 0},
     0,
     "6283@0 6282@25129 6283@6283 6282@31411 6283@12566 6282@37693 6280@18849 6282@43975",
     {2, 1}},
    {"41",
     2,
     {2, 4},
     2,
     {12, 16},
     "S0 S1",
     {0},
     0,
     "6x4@0,0 6x4@0,4 6x4@0,8 6x4@0,12 6x4@6,0 6x4@6,4 6x4@6,8 6x4@6,12",
     {0}},
    {"42", 2, {2, 2}, 2, {6, 10}, "S1 S0", {0}, 0, "3x5@0,0 3x5@3,0 3x5@0,5 3x5@3,5", {0}},
    {"43",
     3,
     {2, 2, 2},
     2,
     {8, 6},
     "S1 R S0",
     {0},
     0,
     "4x3@0,0 4x3@4,0 4x3@0,0 4x3@4,0 4x3@0,3 4x3@4,3 4x3@0,3 4x3@4,3",
     {0}},
};

static void expected_part(const char **text, int ndim, int dim, const int64_t *whole,
                          fsdp_local *want) {
    char *end;
    memset(want, 0, sizeof *want);
    for (int d = 0; d < ndim; d++) want->shape[d] = whole[d];
    want->shape[dim] = strtoll(*text, &end, 10);
    if (*end == 'x') want->shape[0] = want->shape[dim], want->shape[1] = strtoll(end + 1, &end, 10);
    CHECK(*end == '@');
    want->start[dim] = strtoll(end + 1, &end, 10);
    if (*end == ',') want->start[1] = strtoll(end + 1, &end, 10);
    *text = end + (*end == ' ');
    want->numel = ndim > 1 ? want->shape[0] * want->shape[1] : want->shape[0];
}

TEST_P(spec, vectors, vectors) {
    fsdp_spec s, back;
    fsdp_placement place[DIMS];
    int32_t coord[DIMS] = {0};
    int64_t factor[DIMS];
    const char *text = row->parts;
    placements(row->place, row->order, place);
    CHECK_OK(fsdp_spec_init(&s, row->mesh_ndim, row->mesh, place, FSDP_F32, row->ndim, row->shape));
    do {
        fsdp_local part, want;
        expected_part(&text, row->ndim, row->dim, row->shape, &want);
        CHECK_OK(fsdp_spec_local(&s, coord, &part));
        CHECK_MSG(!memcmp(&part, &want, sizeof part), "%lld@%lld, expected %lld@%lld in dim %d",
                  (long long)part.shape[row->dim], (long long)part.start[row->dim],
                  (long long)want.shape[row->dim], (long long)want.start[row->dim], row->dim);
    } while (next_coord(row->mesh_ndim, row->mesh, coord));
    CHECK(!*text);
    CHECK_OK(fsdp_spec_to_strided(&s, factor));
    for (int m = 0; m < row->mesh_ndim; m++)
        CHECK_EQ_INT(factor[m], row->factor[m] ? row->factor[m] : 1);
    placements(row->place, NULL, place);
    CHECK_OK(
        fsdp_spec_init(&back, row->mesh_ndim, row->mesh, place, FSDP_F32, row->ndim, row->shape));
    CHECK_OK(fsdp_spec_from_strided(&back, factor));
    CHECK_EQ_MEM(&back, &s, sizeof s);
}

/* Single coordinates in larger meshes. */
static const struct {
    const char *name;
    int mesh_ndim;
    int32_t mesh[3];
    int64_t rows;
    int order[3];
    int32_t coord[3];
    int64_t count, start;
} far_away[] = {
    {"29a", 2, {30, 8}, 4096, {1, 0}, {0, 0}, 18, 0},
    {"29b", 2, {30, 8}, 4096, {1, 0}, {0, 7}, 18, 3584},
    {"29c", 2, {30, 8}, 4096, {1, 0}, {1, 0}, 18, 18},
    {"29d", 2, {30, 8}, 4096, {1, 0}, {27, 3}, 18, 2022},
    {"29e", 2, {30, 8}, 4096, {1, 0}, {28, 0}, 8, 504},
    {"29f", 2, {30, 8}, 4096, {1, 0}, {28, 7}, 8, 4088},
    {"29g", 2, {30, 8}, 4096, {1, 0}, {29, 5}, 0, 4096},
    {"44a", 3, {4, 3, 2}, 48, {1, 2, 0}, {0, 0, 0}, 2, 0},
    {"44b", 3, {4, 3, 2}, 48, {1, 2, 0}, {0, 0, 1}, 2, 24},
    {"44c", 3, {4, 3, 2}, 48, {1, 2, 0}, {0, 1, 0}, 2, 2},
    {"44d", 3, {4, 3, 2}, 48, {1, 2, 0}, {1, 0, 0}, 2, 6},
    {"44e", 3, {4, 3, 2}, 48, {1, 2, 0}, {3, 2, 1}, 2, 46},
};

TEST_P(spec, far_away, far_away) {
    fsdp_spec s;
    fsdp_local part;
    fsdp_placement place[DIMS];
    int64_t shape[2] = {row->rows, 4096}, factor[DIMS];
    placements(row->mesh_ndim == 2 ? "S0 S0" : "S0 S0 S0", row->order, place);
    CHECK_OK(fsdp_spec_init(&s, row->mesh_ndim, row->mesh, place, FSDP_BF16, 2, shape));
    CHECK_OK(fsdp_spec_local(&s, row->coord, &part));
    CHECK_EQ_INT(part.shape[0], row->count);
    CHECK_EQ_INT(part.start[0], row->start);
    CHECK_EQ_INT(part.numel, row->count * 4096);
    CHECK_OK(fsdp_spec_to_strided(&s, factor));
    CHECK(factor[0] == row->mesh[row->mesh_ndim - 1]);
    if (row->mesh_ndim == 3) CHECK(factor[1] == 2 && factor[2] == 1);
}

/* ---- strided placements ---------------------------------------------------------------------- */

static void each_strided(const fsdp_spec *s, void *arg) {
    int64_t factor[DIMS], again[DIMS];
    int ones = 0;
    fsdp_spec back = *s;
    int32_t coord[DIMS] = {0};
    CHECK_OK(fsdp_spec_to_strided(s, factor));
    for (int m = 0; m < s->mesh_ndim; m++) {
        back.place[m].order = 0; /* PyTorch's form has no orders */
        ones |= s->mesh_shape[m] == 1;
    }
    CHECK_OK(fsdp_spec_init(&back, s->mesh_ndim, s->mesh_shape, back.place, s->dtype, s->ndim,
                            s->shape));
    CHECK_OK(fsdp_spec_from_strided(&back, factor));
    CHECK_OK(fsdp_spec_to_strided(&back, again));
    CHECK_EQ_MEM(again, factor, (size_t)s->mesh_ndim * sizeof *factor);
    /* a sharding over one rank may have any order */
    if (!ones) CHECK_EQ_MEM(&back, s, sizeof back);
    do {
        fsdp_local a, b;
        CHECK_OK(fsdp_spec_local(s, coord, &a));
        CHECK_OK(fsdp_spec_local(&back, coord, &b));
        CHECK_EQ_MEM(&a, &b, sizeof a);
    } while (next_coord(s->mesh_ndim, s->mesh_shape, coord));
    ++*(int64_t *)arg;
}

TEST(spec, strided_round_trips) {
    int64_t count = 0;
    all_small(each_strided, &count);
    h_message("%lld specs", (long long)count);
}

/* Factors that correspond to no order; nothing changes. */
TEST(spec, strided_without_an_order) {
    static const struct {
        int mesh_ndim;
        int32_t mesh[4];
        const char *place;
        int64_t factor[4];
    } none[] = {
        {2, {4, 2}, "S0 S0", {3, 4}},
        {2, {4, 2}, "S0 S0", {1, 2}},
        {2, {4, 2}, "S0 S0", {3, 1}},
        {3, {4, 2, 3}, "S0 S0 S0", {1, 2, 1}},
        {4, {1, 2, 2, 2}, "S0 S1 S0 S0", {2, 2, 1, 1}},
        {1, {4}, "S0", {2}},
        {2, {4, 2}, "S0 S1", {2, 1}},
        {2, {4, 2}, "S0 R", {2, 1}},
    };
    int64_t shape[2] = {39, 16};
    for (int i = 0; i < 8; i++) {
        fsdp_spec s, before;
        fsdp_placement place[DIMS];
        placements(none[i].place, NULL, place);
        CHECK_OK(fsdp_spec_init(&s, none[i].mesh_ndim, none[i].mesh, place, FSDP_F32, 2, shape));
        before = s;
        CHECK_STATUS(fsdp_spec_from_strided(&s, none[i].factor), FSDP_ERR_UNSUPPORTED);
        CHECK_MSG(strstr(fsdp_last_error(NULL), "[E174]"), "%s", fsdp_last_error(NULL));
        CHECK_EQ_MEM(&s, &before, sizeof s);
    }
}

/* FSDP over tensor parallelism stores parts in the order (tp, dp). PyTorch's formula for its
   strided placement gives equal parts if tp divides the rows, and may give others if it does not.
   */
TEST(spec, strided_formula_differs_where_cuts_are_uneven) {
    static list formula, order;
    int64_t same = 0, other = 0;
    for (int64_t rows = 0; rows < (W_SLOW ? 60 : 260); rows++)
        for (int32_t dp = 1; dp < 10; dp++)
            for (int32_t tp = 1; tp < 10; tp++) {
                int differs = 0;
                for (int32_t d = 0; d < dp; d++)
                    for (int32_t t = 0; t < tp; t++) {
                        model_whole(&formula, rows), model_whole(&order, rows);
                        model_strided(&formula, dp, tp, d);
                        model_chunk(&formula, tp, t);
                        model_chunk(&order, tp, t), model_chunk(&order, dp, d);
                        differs |= formula.size != order.size ||
                                   memcmp(formula.at, order.at,
                                          (size_t)order.size * sizeof *order.at);
                    }
                CHECK_MSG(!differs || rows % tp, "%d rows over (%d, %d)", (int)rows, dp, tp);
                if (rows == 7 && dp == 3 && tp == 2) CHECK(differs);
                same += !differs, other += differs;
            }
    h_message("%lld equal, %lld not", (long long)same, (long long)other);
    CHECK(other > 0);
}

/* ---- shapes from parts ----------------------------------------------------------------------- */

TEST(spec, inferred_from_equal_parts) {
    const int32_t mesh[3] = {8, 8, 4};
    const int64_t shape[3] = {256, 512, 768};
    for (int code = 0; code < 64; code++) {
        fsdp_spec s, back;
        fsdp_local part;
        fsdp_placement place[3];
        int32_t coord[3] = {code % 8, code / 8, code % 4};
        memset(place, 0, sizeof place);
        for (int m = 0, c = code; m < 3; m++, c /= 4)
            if (c % 4) place[m].kind = FSDP_SHARD, place[m].dim = (int8_t)(c % 4 - 1);
        CHECK_OK(fsdp_spec_init(&s, 3, mesh, place, FSDP_F32, 3, shape));
        CHECK_OK(fsdp_spec_local(&s, coord, &part));
        CHECK_OK(fsdp_spec_infer(&back, 3, mesh, place, FSDP_F32, 3, part.shape));
        CHECK_EQ_MEM(&s, &back, sizeof s);
    }
    /* (4, 8, 2), the last dim sharded over two ranks; given as -1 */
    fsdp_spec s;
    const int32_t two = 2;
    const int64_t local[3] = {4, 8, 2};
    fsdp_placement last = {FSDP_SHARD, -1, 0, 0};
    CHECK_OK(fsdp_spec_infer(&s, 1, &two, &last, FSDP_F32, 3, local));
    CHECK(s.shape[0] == 4 && s.shape[1] == 8 && s.shape[2] == 4 && s.place[0].dim == 2);
}

/* Thousands of ranks, by coordinates only. */
TEST(spec, thousands_of_ranks) {
    const int32_t mesh[3] = {16, 32, 8};
    const int order[3] = {1, 2, 0};
    int64_t shape[2] = {99991, 3}, held = 0;
    int32_t coord[3] = {0, 0, 0};
    fsdp_placement place[3];
    fsdp_spec s;
    placements("S0 S0 S0", order, place);
    CHECK_OK(fsdp_spec_init(&s, 3, mesh, place, FSDP_F32, 2, shape));
    do {
        fsdp_local part;
        CHECK_OK(fsdp_spec_local(&s, coord, &part));
        held += part.numel;
    } while (next_coord(3, mesh, coord));
    CHECK_EQ_INT(held, 3 * 99991);
}

/* ---- valid specs, and errors ----------------------------------------------------------------- */

TEST(spec, is_a_value) {
    fsdp_spec a, b, c;
    const int32_t mesh[2] = {2, 3};
    const int64_t shape[2] = {4, 6};
    fsdp_placement place[2] = {{FSDP_REPLICATE, 7, 9, 5}, {FSDP_SHARD, -2, 77, 0}};
    fsdp_placement plain[2] = {{FSDP_REPLICATE, 0, 0, 0}, {FSDP_SHARD, 0, 0, 0}};
    memset(&a, 0xff, sizeof a), memset(&b, 0, sizeof b);
    CHECK_OK(fsdp_spec_init(&a, 2, mesh, place, FSDP_F32, 2, shape));
    CHECK_OK(fsdp_spec_init(&b, 2, mesh, plain, FSDP_F32, 2, shape));
    CHECK_EQ_MEM(&a, &b, sizeof a); /* independent of old contents and of unused fields */
    memcpy(&c, &a, sizeof c);
    CHECK_OK(fsdp_spec_init(&c, 2, c.mesh_shape, c.place, c.dtype, 2, c.shape));
    CHECK_EQ_MEM(&a, &c, sizeof a);
    CHECK_OK(fsdp_spec_init(&c, 1, mesh, &plain[0], FSDP_F32, 0, NULL)); /* a scalar */
    CHECK(c.ndim == 0);
    check_part(&c, (const int32_t[1]){1});
}

/* A score of placements: PyTorch's predicates, and dims that are never negative. */
TEST(spec, kinds_and_dims) {
    const int32_t mesh[3] = {2, 2, 2};
    const int64_t shape[3] = {8, 8, 8};
    for (int dim = -3; dim < 3; dim++) {
        fsdp_placement place[3] = {
            {FSDP_SHARD, (int8_t)dim, 0, 0}, {0, 0, 0, 0}, {FSDP_PARTIAL, 0, 0, 0}};
        fsdp_spec s;
        CHECK_OK(fsdp_spec_init(&s, 3, mesh, place, FSDP_F32, 3, shape));
        CHECK(s.place[0].kind == FSDP_SHARD && s.place[0].dim == (dim + 3) % 3);
        CHECK(s.place[1].kind == FSDP_REPLICATE && s.place[2].kind == FSDP_PARTIAL);
    }
}

static const struct {
    const char *name;
    int mesh_ndim;
    int32_t mesh[2];
    fsdp_placement place[2];
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[2];
    const char *text;
} refused[] = {
    {"no_mesh", 0, {2, 2}, {{0}}, FSDP_F32, 2, {4, 4}, "[E126] spec_init: the mesh has 0 dims"},
    {"mesh_dims", 9, {2, 2}, {{0}}, FSDP_F32, 2, {4, 4}, "[E126] spec_init: the mesh has 9 dims"},
    {"dims", 1, {2}, {{0}}, FSDP_F32, 9, {4, 4}, "the tensor 9, expected 0..8"},
    {"negative_dims", 1, {2}, {{0}}, FSDP_F32, -1, {4, 4}, "the tensor -1, expected 0..8"},
    {"dtype", 1, {2}, {{0}}, FSDP_DTYPE_KEEP, 2, {4, 4}, "[E127] spec_init: dtype 0 is none"},
    {"no_ranks", 2, {2, 0}, {{0}}, FSDP_F32, 2, {4, 4}, "[E128] spec_init: mesh dim 1 has 0 ranks"},
    {"ranks",
     2,
     {65536, 32768},
     {{0}},
     FSDP_F32,
     2,
     {4, 4},
     "[E128] spec_init: mesh dim 1 has 32768"},
    {"size",
     1,
     {2},
     {{0}},
     FSDP_F32,
     2,
     {4, -1},
     "[E129] spec_init: dim 1 of the tensor has size -1"},
    {"bytes",
     1,
     {2},
     {{0}},
     FSDP_F64,
     2,
     {(int64_t)1 << 31, (int64_t)1 << 29},
     "[E133] spec_init: the "},
    {"dim",
     1,
     {2},
     {{FSDP_SHARD, 2, 0, 0}},
     FSDP_F32,
     2,
     {4, 4},
     "[E134] spec_init: mesh dim 0 cuts tensor dim 2"},
    {"below",
     1,
     {2},
     {{FSDP_SHARD, -3, 0, 0}},
     FSDP_F32,
     2,
     {4, 4},
     "[E134] spec_init: mesh dim 0 cuts tensor dim -3"},
    {"scalar", 1, {2}, {{FSDP_SHARD, 0, 0, 0}}, FSDP_F32, 0, {0}, "of a tensor of 0 dims"},
    {"op",
     1,
     {2},
     {{FSDP_PARTIAL, 0, 4, 0}},
     FSDP_F32,
     2,
     {4, 4},
     "[E135] spec_init: mesh dim 0 is PARTIAL of op 4"},
    {"kind",
     1,
     {2},
     {{3, 0, 0, 0}},
     FSDP_F32,
     2,
     {4, 4},
     "[E136] spec_init: mesh dim 0 has kind 3"},
    {"orders",
     2,
     {2, 2},
     {{FSDP_SHARD, 0, 0, 1}, {FSDP_SHARD, 0, 0, 1}},
     FSDP_F32,
     2,
     {4, 4},
     "[E137] spec_init: 2 mesh dims cut tensor dim 0, and none of them has order 0"},
    {"order_alone",
     1,
     {2},
     {{FSDP_SHARD, 0, 0, 1}},
     FSDP_F32,
     2,
     {4, 4},
     "give them the orders 0..0"},
    {"two_ops",
     2,
     {2, 2},
     {{FSDP_PARTIAL, 0, FSDP_SUM, 0}, {FSDP_PARTIAL, 0, FSDP_MAX, 0}},
     FSDP_F32,
     2,
     {4, 4},
     "[E139] spec_init: mesh dims 0 and 1 are PARTIAL of two ops"},
};

/* All pairs of ops, in both orders: only SUM and AVG may be combined. */
TEST(spec, pairs_of_ops) {
    static const int8_t ops[] = {FSDP_SUM, FSDP_AVG, FSDP_MAX, FSDP_MIN};
    const int32_t mesh[2] = {2, 2};
    const int64_t shape[1] = {4};
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++) {
            const fsdp_placement place[2] = {{FSDP_PARTIAL, 0, ops[a], 0},
                                             {FSDP_PARTIAL, 0, ops[b], 0}};
            fsdp_spec s;
            const fsdp_status status = fsdp_spec_init(&s, 2, mesh, place, FSDP_F32, 1, shape);
            CHECK_EQ_INT(status, a == b || (a < 2 && b < 2) ? FSDP_OK : FSDP_ERR_INVALID_ARG);
        }
}

TEST_P(spec, refuses, refused) {
    fsdp_spec s, before;
    int32_t mesh[9] = {2, 2, 2, 2, 2, 2, 2, 2, 2};
    fsdp_placement place[9];
    int64_t shape[9] = {4, 4, 4, 4, 4, 4, 4, 4, 4};
    memset(place, 0, sizeof place);
    memset(&s, 0x5a, sizeof s);
    before = s;
    memcpy(mesh, row->mesh, sizeof row->mesh), memcpy(place, row->place, sizeof row->place);
    memcpy(shape, row->shape, sizeof row->shape);
    CHECK_STATUS(fsdp_spec_init(&s, row->mesh_ndim, mesh, place, row->dtype, row->ndim, shape),
                 FSDP_ERR_INVALID_ARG);
    CHECK_MSG(strstr(fsdp_last_error(NULL), row->text), "%s", fsdp_last_error(NULL));
    CHECK_EQ_MEM(&s, &before, sizeof s);
    CHECK_STATUS(fsdp_spec_infer(&s, row->mesh_ndim, mesh, place, row->dtype, row->ndim, shape),
                 FSDP_ERR_INVALID_ARG);
    CHECK_EQ_MEM(&s, &before, sizeof s);
}

TEST(spec, refuses_missing_arguments) {
    fsdp_spec s, bad;
    fsdp_local part;
    const int32_t mesh[2] = {2, 3};
    const int64_t shape[2] = {4, 6}, large[1] = {(int64_t)1 << 60};
    int64_t factor[2] = {1, 0};
    int32_t coord[2] = {0, 3};
    fsdp_placement place[2] = {{FSDP_SHARD, 0, 0, 0}, {FSDP_SHARD, 0, 0, 0}};
    fsdp_placement both[2] = {{FSDP_PARTIAL, 0, FSDP_SUM, 0}, {FSDP_PARTIAL, 0, FSDP_AVG, 0}};
    CHECK_OK(fsdp_spec_init(&s, 2, mesh, both, FSDP_F32, 2, shape)); /* these two commute */
    CHECK_OK(fsdp_spec_init(&s, 2, mesh, place, FSDP_F32, 2, shape));
    REFUSED(NULL, fsdp_spec_init(NULL, 2, mesh, place, FSDP_F32, 2, shape), "[E138]");
    REFUSED(NULL, fsdp_spec_init(&s, 2, NULL, place, FSDP_F32, 2, shape), "[E138]");
    REFUSED(NULL, fsdp_spec_init(&s, 2, mesh, NULL, FSDP_F32, 2, shape), "[E138]");
    REFUSED(NULL, fsdp_spec_init(&s, 2, mesh, place, FSDP_F32, 2, NULL), "[E138]");
    REFUSED(NULL, fsdp_spec_infer(NULL, 2, mesh, place, FSDP_F32, 2, shape), "[E138] spec_infer");
    REFUSED(NULL, fsdp_spec_infer(&bad, 2, mesh, place, FSDP_F32, 1, large), "spec_infer");
    REFUSED(NULL, fsdp_spec_local(NULL, coord, &part), "[E154]");
    REFUSED(NULL, fsdp_spec_local(&s, NULL, &part), "[E156]");
    REFUSED(NULL, fsdp_spec_local(&s, coord, NULL), "[E156]");
    REFUSED(NULL, fsdp_spec_local(&s, coord, &part),
            "[E157] spec_local: the coordinate in mesh dim 1 is 3: pass 0..2");
    coord[1] = -1;
    REFUSED(NULL, fsdp_spec_local(&s, coord, &part), "[E157]");
    REFUSED(NULL, fsdp_spec_to_strided(&s, NULL), "[E158]");
    REFUSED(NULL, fsdp_spec_from_strided(&s, factor),
            "[E159] spec_from_strided: the factor of mesh dim 1");
    REFUSED(NULL, fsdp_spec_from_strided(&s, NULL), "[E159]");
    REFUSED(NULL, fsdp_spec_from_strided(NULL, factor), "[E154]");
    bad = s, bad.place[0].op = FSDP_MAX;
    REFUSED(NULL, fsdp_spec_to_strided(&bad, factor), "[E155] spec_to_strided");
    bad = s, bad.shape[5] = 1;
    REFUSED(NULL, fsdp_spec_local(&bad, coord, &part), "[E155]");
    memset(&bad, 0, sizeof bad);
    REFUSED(NULL, fsdp_spec_local(&bad, coord, &part), "[E126]");
}
