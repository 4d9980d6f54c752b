/* test_golden_layout.c - shard math compared with PyTorch's: chunk.txt and layout.txt, exactly.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "golden.h"
#include "lab.h"

enum { MAX_WORLD = 4096, MAX_PARAMS = 1024 };

static int64_t *numbers(int64_t count) {
    int64_t *a = (int64_t *)lab_zeros((size_t)count + 1, sizeof *a);
    return a;
}

/* `chunk D0 W PADDED rows[W] starts[W]` */
static void check_chunk(golden *g) {
    int64_t rows0 = golden_int(g), world = golden_int(g), padded = golden_int(g);
    int64_t *want = numbers(2 * world);
    golden_ints(g, 2 * world, want);
    if (g->error[0]) return;
    for (int r = 0; r < (int)world; r++) {
        fsdp_range range;
        CHECK_OK(fsdp_shard_range(rows0, (int)world, r, &range));
        CHECK(range.start == want[world + r] && range.count == want[r]);
        CHECK_EQ_INT(range.padded * world, padded);
    }
    free(want);
}

/* Computes the shape of a rank's shard, without padding; 0 along the sharded dim if it has no
   elements. */
static void shard_shape(const int64_t *shape, int ndim, int dim, int world, int rank,
                        int64_t *out) {
    fsdp_range range;
    int64_t numel = 1;
    CHECK_OK(fsdp_shard_range(shape[dim], world, rank, &range));
    for (int d = 0; d < ndim; d++) numel *= out[d] = shape[d];
    out[dim] = numel ? range.count : 0;
}

/* `csize ND shape[ND] DIM W R size[ND]` */
static void check_csize(golden *g) {
    int64_t ndim = golden_int(g), shape[FSDP_MAX_DIMS], want[FSDP_MAX_DIMS], out[FSDP_MAX_DIMS];
    int64_t dim, world, rank;
    CHECK(ndim >= 1 && ndim <= FSDP_MAX_DIMS);
    golden_ints(g, ndim, shape);
    dim = golden_int(g), world = golden_int(g), rank = golden_int(g);
    golden_ints(g, ndim, want);
    if (g->error[0]) return;
    shard_shape(shape, (int)ndim, (int)dim, (int)world, (int)rank, out);
    CHECK_EQ_MEM(out, want, (size_t)ndim * sizeof *out);
}

TEST(golden_layout, chunk) {
    golden g;
    int64_t chunks = 0, sizes = 0;
    GOLDEN_OPEN(&g, "chunk.txt", "chunk");
    while (golden_line(&g)) {
        if (golden_is(&g, "chunk")) check_chunk(&g), chunks++;
        else if (golden_is(&g, "csize")) check_csize(&g), sizes++;
    }
    GOLDEN_CLOSE(&g);
    h_message("%lld chunkings, %lld shard sizes", (long long)chunks, (long long)sizes);
}

/* ---- layout.txt ------------------------------------------------------------------------------ */

typedef struct {
    int world, count;
    fsdp_layout layout;
    fsdp_layout_param params[MAX_PARAMS];
    fsdp_seg segs[MAX_PARAMS];
    fsdp_block *blocks; /* [count*world] */
    int64_t *slot;      /* every parameter in its place, then chunk_cat by the blocks */
    int64_t checks;
} group;

/* Lays out a unit as PyTorch does, which packs every parameter: no parameter reaches the
   threshold. */
static void lay_out(group *u, int rank) {
    memset(&u->layout, 0, sizeof u->layout);
    u->layout.world = u->world, u->layout.rank = rank;
    u->layout.direct_numel = INT64_MAX;
    CHECK_OK(fsdp_layout_params(&u->layout, u->params, u->count, u->segs, u->blocks));
}

/* Element i of parameter p holds 1000*(p+1)+i. */
static void fill_slot(group *u) {
    u->slot = numbers(u->layout.slot_end);
    for (int p = 0; p < u->count; p++)
        for (int64_t i = 0; i < u->params[p].numel; i++)
            u->slot[u->params[p].full_offset + i] = 1000 * (p + 1) + i;
    for (int b = 0; b < u->layout.num_blocks; b++) {
        const fsdp_block *c = &u->blocks[b];
        for (int64_t y = 0; y < c->height; y++)
            memcpy(u->slot + c->src + y * c->src_pitch, u->slot + c->dst + y * c->dst_pitch,
                   (size_t)c->width * sizeof *u->slot);
    }
}

/* Checks the result of a reduce-scatter of one rank's slot in rank `rank`'s flat shard. As the
   values are the parameters themselves, it is also that rank's input of an all-gather. */
static void check_row(group *u, golden *g) {
    int64_t rank = golden_int(g), count = golden_int(g);
    int64_t *flat = numbers(u->layout.shard_numel), *want = numbers(count);
    golden_ints(g, count, want);
    if (g->error[0]) return;
    CHECK_EQ_INT(count, u->layout.shard_numel);
    for (int s = 0; s < u->layout.num_segs; s++)
        memcpy(flat + u->segs[s].shard, u->slot + u->segs[s].full + rank * u->segs[s].count,
               (size_t)u->segs[s].count * sizeof *flat);
    CHECK_EQ_MEM(flat, want, (size_t)count * sizeof *flat);
    free(flat), free(want);
    u->checks++;
}

static fsdp_layout_param *param_of(group *u, golden *g) {
    const int64_t index = golden_int(g);
    CHECK(index >= 0 && index < u->count);
    return &u->params[index];
}

/* `slot P OFFSET NUMEL padded_shard_shape[ND]` */
static void check_slot(group *u, golden *g) {
    fsdp_layout_param *p = param_of(u, g);
    CHECK_EQ_INT(p->shard_offset, golden_int(g));
    CHECK_EQ_INT(p->shard_numel, golden_int(g));
    for (int d = 0; d < p->ndim; d++)
        CHECK_EQ_INT(d == p->shard_dim ? p->chunk : p->shape[d], golden_int(g));
    u->checks++;
}

/* `shard R P local_shape[ND]` */
static void check_shard(group *u, golden *g) {
    int rank = (int)golden_int(g);
    fsdp_layout_param *p = param_of(u, g);
    int64_t shape[FSDP_MAX_DIMS], numel = 1;
    shard_shape(p->shape, p->ndim, p->shard_dim, u->world, rank, shape);
    for (int d = 0; d < p->ndim; d++) {
        CHECK_EQ_INT(shape[d], golden_int(g));
        numel *= shape[d];
    }
    lay_out(u, rank);
    CHECK_EQ_INT(p->local_numel, numel);
    u->checks++;
}

static void read_param(group *u, golden *g) {
    fsdp_layout_param *p = param_of(u, g);
    p->shard_dim = (int32_t)golden_int(g);
    p->ndim = (int32_t)golden_int(g);
    CHECK(p->ndim >= 1 && p->ndim <= FSDP_MAX_DIMS);
    golden_ints(g, p->ndim, p->shape);
}

TEST(golden_layout, layout) {
    static group u;
    golden g;
    int64_t cases = 0, checks = 0;
    GOLDEN_OPEN(&g, "layout.txt", "layout");
    for (; golden_case(&g); cases++) {
        memset(&u, 0, sizeof u);
        while (golden_line(&g)) {
            if (golden_is(&g, "group")) {
                u.world = (int)golden_int(&g), u.count = (int)golden_int(&g);
                CHECK(u.world >= 1 && u.world <= MAX_WORLD && u.count >= 0 &&
                      u.count <= MAX_PARAMS);
            } else if (golden_is(&g, "param")) {
                read_param(&u, &g);
            }
        }
        u.blocks = (fsdp_block *)lab_zeros((size_t)(u.count * u.world) + 1, sizeof *u.blocks);
        lay_out(&u, 0);
        fill_slot(&u);
        golden_again(&g);
        while (golden_line(&g)) {
            if (golden_is(&g, "slot")) check_slot(&u, &g);
            else if (golden_is(&g, "shard")) check_shard(&u, &g);
            else if (golden_is(&g, "gather_input") || golden_is(&g, "reduce_input"))
                check_row(&u, &g);
            else if (golden_is(&g, "total")) {
                CHECK_EQ_INT(u.layout.shard_numel, golden_int(&g));
                CHECK_EQ_INT(u.layout.shard_numel * u.world, golden_int(&g));
            }
        }
        checks += u.checks;
        free(u.blocks), free(u.slot);
    }
    GOLDEN_CLOSE(&g);
    h_message("%lld units, %lld lines compared", (long long)cases, (long long)checks);
}

/* ---- the reader itself ----------------------------------------------------------------------- */

TEST(golden_reader, numbers) {
    static const char *const texts[4] = {"-0x1.95b03p-1", "0x1.95f794p-1", "-0x1.4724p-9",
                                         "-0x1.663388p-1"}; /* README.md */
    double want[4];
    for (int i = 0; i < 4; i++) want[i] = strtod(texts[i], NULL);
    CHECK(golden_splitmix64(0) == 0xe220a8397b1dcdafu);
    CHECK(golden_splitmix64(1) == 0x910a2dec89025cc1u);
    for (uint64_t i = 0; i < 4; i++) CHECK_NEAR(golden_value(5000, i, 2), want[i], 0);
    float f[4];
    golden_fill(f, 5000, 4, 2);
    for (int i = 0; i < 4; i++) CHECK_NEAR(f[i], want[i], 0);
}

static void write_file(const char *text) {
    char path[400];
    snprintf(path, sizeof path, "%s/some.txt", h_tmpdir());
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
    CHECK_EQ_INT(setenv("FSDP_GOLDEN_DIR", h_tmpdir(), 1), 0);
}

TEST(golden_reader, records) {
    golden g;
    write_file("fsdp-golden 1 kind\nfree 1\n\ncase a\nx 2 -3 0x1.8p1 inf\nskipped what ever\ny z\n"
               "\ncase b\n\ncase c\nx 7"); /* no line end */
    CHECK(golden_open(&g, "some.txt", "kind"));
    CHECK(golden_line(&g) && golden_is(&g, "free") && golden_int(&g) == 1 && golden_left(&g) == 0);
    CHECK(!golden_line(&g) && !golden_line(&g));
    CHECK(golden_case(&g));
    CHECK_EQ_STR(g.name, "a");
    for (int pass = 0; pass < 2; pass++) {
        CHECK(golden_line(&g) && golden_is(&g, "x") && golden_left(&g) == 4);
        CHECK(golden_int(&g) == 2 && golden_int(&g) == -3);
        CHECK_NEAR(golden_num(&g), 3, 0);
        CHECK_EQ_INT(h_non_finite(golden_num(&g)), 1);
        CHECK(golden_line(&g) && golden_line(&g) && golden_is(&g, "y"));
        CHECK_EQ_STR(golden_word(&g), "z");
        CHECK(!golden_line(&g));
        golden_again(&g);
    }
    CHECK(golden_case(&g) && !strcmp(g.name, "b") && !golden_line(&g));
    CHECK(golden_case(&g) && golden_line(&g) && golden_int(&g) == 7 && !golden_line(&g));
    CHECK(!golden_case(&g) && !g.error[0]);
    golden_close(&g);
}

static const struct {
    const char *name, *text, *error;
} mistakes[] = {
    {"header", "fsdp-golden 2 kind\n", "the first line is not"},
    {"kind", "fsdp-golden 1 other\n", "the first line is not"},
    {"empty", "", "the first line is not"},
    {"missing", "fsdp-golden 1 kind\nx\n", "some.txt:2: x: a value is missing"},
    {"integer", "fsdp-golden 1 kind\nx 1.5\n", "some.txt:2: x: '1.5' is not an integer"},
    {"word", "fsdp-golden 1 kind\nx one\n", "some.txt:2: x: 'one' is not an integer"}};
TEST_P(golden_reader, mistake, mistakes) {
    golden g;
    write_file(row->text);
    if (golden_open(&g, "some.txt", "kind") && golden_line(&g)) (void)golden_int(&g);
    CHECK_MSG(strstr(g.error, row->error) != NULL, "%s", g.error);
    CHECK(!g.missing && !golden_line(&g) && !golden_case(&g));
    golden_close(&g);
}

TEST(golden_reader, missing_file) {
    golden g;
    write_file("");
    CHECK(!golden_open(&g, "other.txt", "kind") && g.missing && strstr(g.error, "other.txt"));
    golden_close(&g);
    CHECK_EQ_INT(setenv("FSDP_GOLDEN_DIR", GOLDEN_DIR, 1), 0); /* the project's own are complete */
    CHECK(!golden_open(&g, "other.txt", "kind") && !g.missing);
    golden_close(&g);
}
