/* test_fake.c - backends/fsdp_fake.h: the effect of each collective on the memory of its only rank,
   its counts and its errors; meshes, models, steps, plans and redistributions of large worlds; and
   that it makes the checks of the other backends.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"
#include "lab_net.h"
#include "lab_dtensor.h"

enum { LARGE = 4096, LARGEST = 1 << 20 };

/* Returns a description that selects the fake backend by name, with an empty environment. */
static fsdp_world_desc fake_desc(fsdp_fake *fake, int rank, int size) {
    fsdp_world_desc d = w_desc(rank, size, NULL, NULL, 0);
    clearenv();
    d.backend = "fake";
    d.user = fake;
    return d;
}
static fsdp_world *fake_world(fsdp_fake *fake, int rank, int size) {
    fsdp_world_desc d = fake_desc(fake, rank, size);
    fsdp_world *w;
    CALL(NULL, fsdp_init(&d, &w));
    CHECK(fsdp_rank(w) == rank && fsdp_world_size(w) == size);
    return w;
}

/* ---- how it is chosen ------------------------------------------------------------------------ */

TEST(fake, needs_nothing_and_is_never_the_default) {
    fsdp_world_desc d = fake_desc(NULL, 37, LARGE);
    fsdp_world *w = NULL;
    const int64_t start = h_now_ms();
    for (int way = 0; way < 3; way++) { /* by name, by the environment, by the table of functions */
        d.backend = way == 0 ? "fake" : NULL;
        if (way == 1) CHECK_EQ_INT(setenv("FSDP_BACKEND", "fake", 1), 0);
        if (way == 2) clearenv(), d.comm_ops = fsdp_fake_comm_ops();
        CALL(NULL, fsdp_init(&d, &w));
        CHECK_EQ_INT(fsdp_world_size(w), LARGE);
        CALL(w, fsdp_barrier(w));
        CALL(NULL, fsdp_shutdown(w));
    }
    h_message("3 worlds of %d ranks took %lld ms", LARGE, (long long)(h_now_ms() - start));
    d.comm_ops = NULL; /* any other backend needs a job */
    REFUSED(NULL, fsdp_init(&d, &w), "[E504]");
    d.backend = "shm";
    REFUSED(NULL, fsdp_init(&d, &w), "[E504]");
    d.backend = "fake", d.rank = LARGE;
    REFUSED(NULL, fsdp_init(&d, &w), "[E508]");
    d.rank = 0, d.world_size = LARGEST + 1;
    REFUSED_AS(FSDP_ERR_UNSUPPORTED, NULL, fsdp_init(&d, &w), "[E191]");
    CHECK(w == NULL);
    CHECK_EQ_INT(setenv("RANK", "1", 1), 0); /* rank 1 of 4, from a launcher on two hosts */
    CHECK_EQ_INT(setenv("WORLD_SIZE", "4", 1), 0);
    CHECK_EQ_INT(setenv("LOCAL_WORLD_SIZE", "2", 1), 0);
    CHECK_EQ_INT(setenv("MASTER_ADDR", "localhost", 1), 0);
    CHECK_EQ_INT(setenv("MASTER_PORT", "1", 1), 0);
    d.backend = NULL, d.rank = d.world_size = 0;
    REFUSED_AS(FSDP_ERR_UNSUPPORTED, NULL, fsdp_init(&d, &w), "[E520]");
    CHECK_EQ_INT(setenv("FSDP_BACKEND", "fake", 1), 0);
    CALL(NULL, fsdp_init(&d, &w));
    CHECK(fsdp_rank(w) == 1 && fsdp_world_size(w) == 4);
    CALL(NULL, fsdp_shutdown(w));
}

TEST(fake, the_struct_is_checked) {
    fsdp_fake fake = FSDP_ZERO;
    fsdp_world_desc d = fake_desc(&fake, 1, 2);
    fsdp_world *w = NULL;
    fake.size = sizeof fake - 8;
    REFUSED(NULL, fsdp_init(&d, &w), "[E543]");
    fake.size = sizeof fake, fake.start_canary = 1;
    REFUSED(NULL, fsdp_init(&d, &w), "[E544]");
    fake.start_canary = 0, fake.end_canary = 1;
    REFUSED(NULL, fsdp_init(&d, &w), "[E544]");
    fake.end_canary = 0;
    CALL(NULL, fsdp_init(&d, &w));
    CALL(NULL, fsdp_shutdown(w));
}

/* ---- each collective ------------------------------------------------------------------------- */

enum { BYTES = 1 << 15, SEGS = 3 };

typedef struct bed { /* an opened comm, and the expected contents of its memory */
    const fsdp_comm_ops *ops;
    fsdp_fake fake;
    fsdp_comm *comm;
    int rank, size;
    void *src, *dst, *was, *want; /* BYTES each; src and dst from alloc */
} bed;

static int64_t bed_now(void *user) { return (void)user, 0; } /* no deadline applies */

static void bed_open(bed *b, int rank, int size) {
    fsdp_boot boot;
    fsdp_caps caps;
    memset(&boot, 0, sizeof boot), memset(b, 0, sizeof *b);
    b->ops = fsdp_fake_comm_ops(), b->rank = rank, b->size = size;
    boot.rank = rank, boot.size = size, boot.user = &b->fake;
    boot.allocator.alloc = w_alloc, boot.allocator.free = w_free, boot.clock.now_ns = bed_now;
    CHECK_OK(b->ops->open(&boot, &caps, &b->comm));
    CHECK(caps.flags == FSDP_CAP_FUSED_REDUCE && caps.comm_threads == 2);
    CHECK_OK(b->ops->alloc(b->comm, BYTES, &b->src));
    CHECK_OK(b->ops->alloc(b->comm, BYTES, &b->dst));
    b->was = lab_zeros(BYTES, 1), b->want = lab_zeros(BYTES, 1);
    CHECK_EQ_MEM(b->src, b->was, BYTES);
}
static void bed_close(bed *b) {
    free(b->was), free(b->want);
    b->ops->free(b->comm, b->dst, BYTES);
    b->ops->close(b->comm); /* closing the world frees src */
}

/* Stores x. The values, their small sums and halves are exact in every dtype. */
static void set(void *a, fsdp_dtype dtype, int64_t i, double x) {
    const int32_t narrow = (int32_t)x;
    const int64_t wide = (int64_t)x;
    if (dtype == FSDP_I32) memcpy(lab_at(a, dtype, i), &narrow, sizeof narrow);
    else if (dtype == FSDP_I64) memcpy(lab_at(a, dtype, i), &wide, sizeof wide);
    else lab_put(a, dtype, i, x);
}
static double value(fsdp_dtype dtype, int64_t i, int salt) {
    const double x = (double)((i * 7 + salt) % 9);
    return dtype == FSDP_U8 ? x : x - 4;
}

static fsdp_coll coll_of(bed *b, int kind, fsdp_dtype dtype, fsdp_dtype out) {
    fsdp_coll c;
    memset(&c, 0, sizeof c);
    c.kind = (uint8_t)kind, c.dtype = (uint8_t)dtype, c.out_dtype = (uint8_t)out;
    c.scale = 1, c.what = "fake", c.src = b->src, c.dst = b->dst;
    const int64_t in = BYTES / (int64_t)fsdp_dtype_size(dtype),
                  num = BYTES / (int64_t)fsdp_dtype_size(out);
    for (int64_t i = 0; i < in; i++) set(b->src, dtype, i, value(dtype, i, 0));
    for (int64_t i = 0; i < num; i++) set(b->dst, out, i, value(out, i, 5));
    memcpy(b->was, b->src, BYTES), memcpy(b->want, b->dst, BYTES);
    return c;
}
/* Runs an operation: dst has the expected contents, src is unchanged, and `bytes` are counted. */
static void run_as_wanted(bed *b, const fsdp_coll *c, uint64_t bytes) {
    const uint64_t calls = b->fake.calls[c->kind], sent = b->fake.wire_bytes[c->kind];
    const fsdp_status status = b->ops->run(b->comm, c);
    snprintf(w_case, sizeof w_case,
             "%s of %s to %s, rank %d of %d, scale %g, accumulate %d, sum %d",
             fsdp_op_name(c->kind), fsdp_dtype_name(c->dtype), fsdp_dtype_name(c->out_dtype),
             b->rank, b->size, c->scale, c->accumulate, b->fake.sum_all);
    W_CHECK(!status, "%s", b->ops->error_text(b->comm));
    W_CHECK(!memcmp(b->dst, b->want, BYTES), "dst is something else");
    W_CHECK(c->src == c->dst || !memcmp(b->src, b->was, BYTES), "src has changed");
    W_CHECK(b->fake.calls[c->kind] == calls + 1, "calls");
    W_CHECK(b->fake.wire_bytes[c->kind] - sent == bytes, "%llu bytes, expected %llu",
            (unsigned long long)(b->fake.wire_bytes[c->kind] - sent), (unsigned long long)bytes);
}

static const fsdp_dtype any[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64,
                                 FSDP_I32, FSDP_I64,  FSDP_U8};
enum { FLOATS = 4, NUMBERS = 6, ANY = 7 };
static const struct {
    const char *name;
    int rank, size;
} places[] = {{"0 of 2", 0, 2}, {"1 of 3", 1, 3}, {"6 of 7", 6, 7}};

/* Fills in three segments with gaps, one of them empty. Returns the elements of one rank. */
static uint64_t cut(fsdp_coll *c, fsdp_seg *segs, int size) {
    for (int s = 0; s < SEGS; s++) {
        segs[s].count = s == 1 ? 0 : 17 + 8 * s;
        segs[s].shard = s ? segs[s - 1].shard + segs[s - 1].count + 2 : 3;
        segs[s].full = s ? segs[s - 1].full + segs[s - 1].count * size + 4 : 5;
        c->count += (uint64_t)segs[s].count;
    }
    c->segs = segs, c->num_segs = SEGS;
    return c->count;
}

TEST_P(fake, all_gather, places) {
    fsdp_seg segs[SEGS];
    bed b;
    bed_open(&b, row->rank, row->size);
    for (int t = 0; t < 2 * ANY; t++) {
        const fsdp_dtype dtype = any[t / 2];
        fsdp_coll c = coll_of(&b, FSDP_OP_ALL_GATHER, dtype, dtype);
        const uint64_t part = cut(&c, segs, b.size) * fsdp_dtype_size(dtype);
        c.in_place = (uint8_t)(t % 2);
        if (c.in_place) c.src = NULL;
        for (int s = 0; s < SEGS; s++)
            for (int64_t i = 0; i < segs[s].count * b.size; i++) {
                const int64_t k = i % segs[s].count;
                const int64_t at = segs[s].full + b.rank * segs[s].count + k;
                set(b.want, dtype, segs[s].full + i,
                    c.in_place ? value(dtype, at, 5) : value(dtype, segs[s].shard + k, 0));
            }
        run_as_wanted(&b, &c, (uint64_t)(b.size - 1) * part);
    }
    bed_close(&b);
}

TEST_P(fake, reduce_scatter, places) {
    fsdp_seg segs[SEGS];
    bed b;
    bed_open(&b, row->rank, row->size);
    for (int t = 0; t < 8 * NUMBERS * NUMBERS; t++) {
        const fsdp_dtype in = any[t / 8 % NUMBERS], out = any[t / 8 / NUMBERS];
        const int is_float = fsdp_dtype_is_float(in) && fsdp_dtype_is_float(out);
        fsdp_coll c = coll_of(&b, FSDP_OP_REDUCE_SCATTER, in, out);
        const uint64_t part = cut(&c, segs, b.size) * fsdp_dtype_size(in);
        c.scale = t & 1 ? 0.5 : 1, c.accumulate = (uint8_t)(t >> 1 & 1);
        b.fake.sum_all = t >> 2 & 1;
        if (!is_float && (in != out || t & 3)) continue;
        for (int s = 0; s < SEGS; s++)
            for (int64_t i = 0; i < segs[s].count; i++) {
                const int64_t to = segs[s].shard + i;
                set(b.want, out, to,
                    c.scale * (b.fake.sum_all ? b.size : 1) *
                            value(in, segs[s].full + b.rank * segs[s].count + i, 0) +
                        (c.accumulate ? value(out, to, 5) : 0));
            }
        run_as_wanted(&b, &c, (uint64_t)(b.size - 1) * part);
    }
    bed_close(&b);
}

TEST_P(fake, all_reduce, places) {
    bed b;
    bed_open(&b, row->rank, row->size);
    for (int t = 0; t < 12 * NUMBERS; t++) {
        const fsdp_dtype dtype = any[t / 12];
        fsdp_coll c = coll_of(&b, FSDP_OP_ALL_REDUCE, dtype, dtype);
        c.src = c.dst, c.count = 100, c.redop = (uint8_t)(t % 3);
        c.scale = t / 3 & 1 ? 0.5 : 1;
        b.fake.sum_all = t / 6 & 1;
        if (c.scale != 1 && !fsdp_dtype_is_float(dtype)) continue;
        const int ranks = b.fake.sum_all && c.redop == FSDP_SUM ? b.size : 1;
        for (int64_t i = 0; i < 100; i++)
            set(b.want, dtype, i, c.scale * ranks * value(dtype, i, 5));
        const uint64_t bytes = 100 * fsdp_dtype_size(dtype), n = (uint64_t)b.size;
        run_as_wanted(&b, &c, (2 * (n - 1) * bytes + n - 1) / n);
    }
    bed_close(&b);
}

TEST_P(fake, the_others, places) {
    bed b;
    bed_open(&b, row->rank, row->size);
    for (int t = 0; t < ANY; t++) {
        const uint64_t part = 40 * fsdp_dtype_size(any[t]);
        fsdp_coll c = coll_of(&b, FSDP_OP_ALL_TO_ALL, any[t], any[t]);
        c.count = 40;
        memcpy(b.want, b.was, part * (uint64_t)b.size); /* dst[k] = src[k] */
        run_as_wanted(&b, &c, (uint64_t)(b.size - 1) * part);
        c = coll_of(&b, FSDP_OP_BROADCAST, any[t], any[t]);
        c.count = 40, c.src = NULL;
        for (c.root = 0; c.root < b.size; c.root++) run_as_wanted(&b, &c, part);
        c = coll_of(&b, FSDP_OP_SEND, any[t], any[t]);
        c.count = 40, c.root = (b.rank + 1) % b.size;
        run_as_wanted(&b, &c, 0);
        c.kind = FSDP_OP_RECV;
        run_as_wanted(&b, &c, part);
    }
    bed_close(&b);
}

/* ---- what it refuses ------------------------------------------------------------------------- */

static void refused(bed *b, const fsdp_coll *c, fsdp_status status, const char *id) {
    fsdp_fake before = b->fake;
    CHECK_STATUS(b->ops->run(b->comm, c), status);
    CHECK_MSG(strstr(b->ops->error_text(b->comm), id), "%s: %s", id, b->ops->error_text(b->comm));
    CHECK_EQ_MEM(&b->fake, &before, sizeof before);
    CHECK_EQ_MEM(b->dst, b->want, BYTES);
}

TEST(fake, bad_arguments_change_nothing) {
    static char outside[4096];
    fsdp_seg seg = {0, -4, 4};
    bed b;
    bed_open(&b, 1, 3);
    fsdp_coll c = coll_of(&b, FSDP_OP_COPY, FSDP_F32, FSDP_F32);
    refused(&b, &c, FSDP_ERR_UNSUPPORTED, "[E183]");
    c.kind = FSDP_OP_ALL_GATHER, c.num_segs = 1, c.count = 4;
    refused(&b, &c, FSDP_ERR_INVALID_ARG, "[E184]"); /* no segments */
    c.segs = &seg;
    refused(&b, &c, FSDP_ERR_INVALID_ARG, "[E187]");
    seg.full = 0, c.src = NULL;
    refused(&b, &c, FSDP_ERR_INVALID_ARG, "[E188]");
    c.src = outside;
    refused(&b, &c, FSDP_ERR_INVALID_ARG, "[E189]");
    c.src = (char *)b.src + BYTES - 8; /* begins inside the block and ends after it */
    refused(&b, &c, FSDP_ERR_INVALID_ARG, "[E189]");
    c.src = NULL, c.in_place = 1, c.dst = outside;
    refused(&b, &c, FSDP_ERR_INVALID_ARG, "[E189]");
    c.dtype = 77;
    refused(&b, &c, FSDP_ERR_INVALID_ARG, "[E184]");
    static const int kinds[] = {FSDP_OP_REDUCE_SCATTER, FSDP_OP_ALL_REDUCE, FSDP_OP_BROADCAST,
                                FSDP_OP_ALL_TO_ALL,     FSDP_OP_SEND,       FSDP_OP_RECV};
    for (int i = 0; i < 6; i++) { /* memory that peers would read must come from alloc */
        c = coll_of(&b, kinds[i], FSDP_F32, FSDP_F32);
        c.segs = &seg, c.num_segs = 1, c.count = 4;
        c.src = outside;
        if (i == 1 || i == 2 || i == 5) c.dst = outside;
        refused(&b, &c, FSDP_ERR_INVALID_ARG, "[E189]");
    }
    c = coll_of(&b, FSDP_OP_BROADCAST, FSDP_F32, FSDP_F32);
    c.root = 3;
    refused(&b, &c, FSDP_ERR_INVALID_ARG, "[E185]");
    c.kind = FSDP_OP_SEND, c.root = 1; /* itself */
    refused(&b, &c, FSDP_ERR_INVALID_ARG, "[E186]");
    c.kind = FSDP_OP_ALL_REDUCE, c.dtype = c.out_dtype = FSDP_U8;
    refused(&b, &c, FSDP_ERR_UNSUPPORTED, "[E180]");
    c.dtype = c.out_dtype = FSDP_I32, c.scale = 0.5;
    refused(&b, &c, FSDP_ERR_UNSUPPORTED, "[E181]");
    void *ptr;
    CHECK_STATUS(b.ops->alloc(b.comm, SIZE_MAX / 4, &ptr), FSDP_ERR_OUT_OF_MEMORY);
    CHECK(ptr == NULL && strstr(b.ops->error_text(b.comm), "[E308]"));
    bed_close(&b);
}

TEST(fake, groups) {
    const int32_t twice[3] = {5, 1, 5}, strange[2] = {5, 12}, good[3] = {9, 5, 1}, pair[2] = {1, 9};
    fsdp_group g = {0, 0, 3, 0, twice, "g"};
    fsdp_comm *out = NULL, *inner = NULL;
    bed b;
    bed_open(&b, 5, 12);
    CHECK_STATUS(b.ops->split(b.comm, &g, &out), FSDP_ERR_INVALID_ARG);
    CHECK(!out && strstr(b.ops->error_text(b.comm), "[E192]"));
    g.ranks = strange, g.size = 2;
    CHECK_STATUS(b.ops->split(b.comm, &g, &out), FSDP_ERR_INVALID_ARG);
    g.ranks = good, g.size = 3; /* this rank has index 1 */
    CHECK_STATUS(b.ops->split(b.comm, &g, &out), FSDP_ERR_INVALID_ARG);
    g.size = 13, g.index = 1;
    CHECK_STATUS(b.ops->split(b.comm, &g, &out), FSDP_ERR_INVALID_ARG);
    g.size = 3;
    CHECK_OK(b.ops->split(b.comm, &g, &out));
    g.ranks = pair, g.size = 2; /* this rank is missing */
    CHECK_STATUS(b.ops->split(out, &g, &inner), FSDP_ERR_INVALID_ARG);
    g.color = -1;
    CHECK_OK(b.ops->split(out, &g, &inner));
    CHECK(inner == NULL);
    g.color = 0, g.ranks = strange; /* rank 12 is not in the parent group */
    CHECK_STATUS(b.ops->split(out, &g, &inner), FSDP_ERR_INVALID_ARG);
    g.ranks = good, g.size = 2; /* ranks 9 and 5 */
    CHECK_OK(b.ops->split(out, &g, &inner));
    fsdp_coll c = coll_of(&b, FSDP_OP_BROADCAST, FSDP_F32, FSDP_F32);
    c.count = 1, c.root = 2; /* 2 is an index of the parent: the group of two has no such root */
    CHECK_OK(b.ops->run(out, &c));
    CHECK_STATUS(b.ops->run(inner, &c), FSDP_ERR_INVALID_ARG);
    b.ops->close(inner), b.ops->close(out);
    bed_close(&b);
}

TEST(fake, refuse_ends_the_world) {
    fsdp_fake fake = FSDP_ZERO;
    fsdp_world *w = fake_world(&fake, 3, LARGE);
    fsdp_model *m = lab_model(w, NULL);
    const int64_t shape[1] = {LARGE};
    const fsdp_param_desc p = lab_desc(1, shape, 0, FSDP_F32, 0);
    fsdp_memory memory;
    CALL(w, fsdp_barrier(w));
    CHECK_EQ_INT(fake.calls[FSDP_OP_ALL_REDUCE], 1);
    fake.refuse = 1; /* proves that these calls do not communicate */
    lab_unit(w, m, NULL, &p, 1);
    CALL(w, fsdp_model_predict(m, &memory));
    REFUSED_AS(FSDP_ERR_UNSUPPORTED, w, fsdp_barrier(w), "[E545] fsdp_fake.refuse");
    fake.refuse = 0; /* too late: the world has failed */
    REFUSED_AS(FSDP_ERR_UNSUPPORTED, w, fsdp_barrier(w), "[E545]");
    CHECK_EQ_INT(fake.calls[FSDP_OP_ALL_REDUCE], 1);
    CHECK_STATUS(fsdp_shutdown(w), FSDP_ERR_UNSUPPORTED);
}

TEST(fake, abort) {
    fsdp_world *w = fake_world(NULL, 3, 8);
    fsdp_abort(w, "enough");
    REFUSED_AS(FSDP_ERR_ABORTED, w, fsdp_barrier(w), "enough");
    CHECK_STATUS(fsdp_shutdown(w), FSDP_ERR_ABORTED);
}

/* ---- large meshes ---------------------------------------------------------------------------- */

/* A group of dim d contains the ranks that differ from this one in d only, and a collective over
   the mesh runs over each dim's group. */
static void check_mesh(fsdp_world *w, fsdp_fake *fake, const fsdp_mesh *mesh,
                       const int32_t *ranks) {
    const int ndim = fsdp_mesh_ndim(mesh), size = fsdp_mesh_size(mesh, -1);
    int32_t *got = (int32_t *)lab_zeros((size_t)size, sizeof *got);
    int64_t sum = 1;
    uint64_t bytes = 0;
    int me = 0, stride = size;
    for (int d = 0; d < ndim; d++) me = me * fsdp_mesh_size(mesh, d) + fsdp_mesh_rank(mesh, d);
    CHECK_EQ_INT(ranks ? ranks[me] : me, fsdp_rank(w));
    for (int d = 0; d < ndim; d++) {
        const int n = fsdp_mesh_ranks(mesh, d, got);
        CHECK_EQ_INT(n, fsdp_mesh_size(mesh, d));
        stride /= n;
        for (int k = 0; k < n; k++) {
            const int at = me + (k - fsdp_mesh_rank(mesh, d)) * stride;
            CHECK_EQ_INT(got[k], ranks ? ranks[at] : at);
        }
        bytes += (uint64_t)((16 * (n - 1) + n - 1) / n);
    }
    free(got);
    memset(fake->wire_bytes, 0, sizeof fake->wire_bytes);
    fake->sum_all = 1;
    CALL(w, fsdp_all_reduce(w, mesh, &sum, 1, FSDP_I64, FSDP_SUM));
    fake->sum_all = 0;
    CHECK_EQ_INT(sum, size);
    CHECK_EQ_INT(fake->wire_bytes[FSDP_OP_ALL_REDUCE], bytes);
}

static void meshes_of(int rank, int size, int side) {
    static const char *const names[2] = {"x", "y"};
    const int32_t flat[1] = {size}, square[2] = {side, side}, half[1] = {size / 2};
    const int32_t deep[3] = {side, side / 4, 4};
    int32_t *ranks = (int32_t *)lab_zeros((size_t)size, sizeof *ranks);
    fsdp_fake fake = FSDP_ZERO;
    fsdp_world *w = fake_world(&fake, rank, size);
    fsdp_mesh *mesh = lab_mesh(w, 2, square, NULL, NULL), *other;
    fsdp_mesh_desc d = FSDP_ZERO;
    check_mesh(w, &fake, lab_mesh(w, 1, flat, NULL, NULL), NULL);
    check_mesh(w, &fake, mesh, NULL);
    check_mesh(w, &fake, lab_mesh(w, 3, deep, NULL, NULL), NULL);
    CALL(w, fsdp_mesh_flatten(mesh, "all", &other));
    check_mesh(w, &fake, other, NULL);
    CALL(w, fsdp_mesh_unflatten(mesh, 1, side / 4, names, &other));
    check_mesh(w, &fake, other, NULL);
    CHECK_EQ_INT(fsdp_mesh_size(lab_slice(w, mesh, 1), -1), side);
    for (int i = 0; i < size; i++) ranks[i] = i % side * side + i / side; /* column-major */
    check_mesh(w, &fake, lab_mesh(w, 2, square, NULL, ranks), ranks);
    d.ndim = 2, d.shape[0] = d.shape[1] = side, d.ranks = ranks;
    ranks[size - 1] = ranks[1];
    REFUSED(w, fsdp_mesh_create(w, &d, &other), "[E114]");
    ranks[size - 1] = size;
    REFUSED(w, fsdp_mesh_create(w, &d, &other), "[E113]");
    /* the half that lacks this rank */
    for (int i = 0; i < size; i++) ranks[i] = rank < size / 2 ? size - 1 - i : i;
    mesh = lab_mesh(w, 1, half, NULL, ranks);
    CHECK_EQ_INT(fsdp_mesh_rank(mesh, 0), -1);
    REFUSED(w, fsdp_all_reduce(w, mesh, ranks, 1, FSDP_I32, FSDP_SUM), "[E105]");
    free(ranks);
    CALL(NULL, fsdp_shutdown(w));
}
static const struct {
    const char *name;
    int rank;
} of_large[] = {{"first", 0}, {"37", 37}, {"last", LARGE - 1}};
TEST_P(fake, meshes_of_4096_ranks, of_large) { meshes_of(row->rank, LARGE, 64); }
TEST(fake, meshes_of_a_million_ranks) { meshes_of(700000, LARGEST, 1024); }

/* ---- models ---------------------------------------------------------------------------------- */

static int64_t shared; /* bytes from alloc that have not been freed */
static fsdp_status counting_alloc(fsdp_comm *world, size_t size, void **ptr) {
    const fsdp_status status = fsdp_fake_comm_ops()->alloc(world, size, ptr);
    if (!status) shared += (int64_t)size;
    return status;
}
static void counting_free(fsdp_comm *world, void *ptr, size_t size) {
    shared -= (int64_t)size;
    fsdp_fake_comm_ops()->free(world, ptr, size);
}

/* Runs forward of all units, then backward in reverse order. Each gradient is a copy of its
   parameter. */
static void train(fsdp_world *w, fsdp_model *m, fsdp_unit *const *units, int count,
                  fsdp_dtype dtype) {
    for (int u = 0; u < count; u++) lab_forward(w, units[u]);
    for (int u = count - 1; u >= 0; u--) {
        CALL(w, fsdp_pre_backward(units[u]));
        for (fsdp_param_view v = FSDP_ZERO; fsdp_next_param(m, &v);) {
            const fsdp_dtype full = dtype == FSDP_DTYPE_KEEP ? v.dtype : dtype;
            if (v.unit == units[u] && v.requires_grad)
                memcpy(fsdp_grad(v.unit, v.index), fsdp_data(v.unit, v.index),
                       (size_t)lab_full_numel(&v) * fsdp_dtype_size(full));
        }
        CALL(w, fsdp_post_backward(units[u]));
    }
    CALL(w, fsdp_finalize_backward(m));
}

static void predict_one(uint64_t *state, int number) {
    static const int sizes[] = {2, 8, 24, 64, 512, LARGE};
    static const fsdp_dtype dtypes[] = {FSDP_DTYPE_KEEP, FSDP_BF16, FSDP_F16};
    const int size = sizes[lab_pick(state, 6)], lanes = lab_pick(state, 3);
    fsdp_comm_ops ops = *fsdp_fake_comm_ops();
    fsdp_world_desc d = w_desc(lab_pick(state, size), size, NULL, "predict", lanes);
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit *units[6];
    fsdp_memory want, got;
    fsdp_world *w;
    ops.alloc = counting_alloc, ops.free = counting_free, d.comm_ops = &ops;
    CALL(NULL, fsdp_init(&d, &w));
    if (lab_pick(state, 2)) md.mesh = lab_hsdp(w, 2, size / 2);
    md.param_dtype = dtypes[lab_pick(state, 3)];
    md.reduce_dtype = lab_pick(state, 2) ? FSDP_F32 : FSDP_DTYPE_KEEP;
    md.direct_min = lab_pick(state, 2) ? 1 : 0;
    md.reshard_after_forward = lab_pick(state, 4) ? 0 : FSDP_RESHARD_NEVER;
    fsdp_model *m = lab_model(w, &md);
    const int count = 1 + lab_pick(state, 6);
    for (int u = 0; u < count; u++) {
        fsdp_param_desc p[4];
        const int num = 1 + lab_pick(state, 4);
        for (int i = 0; i < num; i++) {
            const int64_t shape[2] = {lab_pick(state, 60), 1 + lab_pick(state, 20)};
            p[i] = lab_desc(2, shape, lab_pick(state, 4) == 0, FSDP_F32, lab_pick(state, 5) == 0);
        }
        units[u] = lab_unit(w, m, NULL, p, num);
    }
    snprintf(w_case, sizeof w_case, "model %d, %d ranks, %d lanes, %d units", number, size, lanes,
             count);
    const int64_t before = shared;
    CALL(w, fsdp_model_predict(m, &want));
    W_CHECK(shared == before, "predict allocates");
    for (int step = 0; step < 2; step++) {
        train(w, m, units, count, md.param_dtype);
        CALL(w, fsdp_zero_grad(m));
    }
    CALL(w, fsdp_model_memory(m, &got));
    for (int pool = 0; pool < FSDP_POOL_COUNT; pool++)
        W_CHECK(want.pool_bytes[pool] == got.pool_bytes[pool], "%s: predicted %lld, has %lld",
                fsdp_pool_name(pool), (long long)want.pool_bytes[pool],
                (long long)got.pool_bytes[pool]);
    W_CHECK(W_ASAN || shared - before == want.total_bytes, "predicted %lld, allocated %lld",
            (long long)want.total_bytes, (long long)(shared - before));
    CALL(NULL, fsdp_shutdown(w));
    CHECK_EQ_INT(shared, 0);
}
TEST(fake, prediction_is_what_is_allocated) {
    uint64_t state = h_seed();
    for (int i = 0; i < (W_SLOW ? 8 : 30); i++) predict_one(&state, i);
}

/* A model of 64 TiB with memory that is addresses only. All bytes that the backend hands out are
   counted. */
static const struct {
    const char *name;
    int size, streams;
} of_addresses[] = {{"1", 1, 0}, {"1, streams", 1, 1}, {"8", 8, 0}, {"8, streams", 8, 1}};
TEST_P(fake, memory_that_is_addresses, of_addresses) {
    fsdp_fake fake = FSDP_ZERO;
    fsdp_world_desc d = fake_desc(&fake, 0, row->size);
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit *units[4];
    fsdp_memory memory;
    fsdp_adamw *opt;
    fsdp_world *w;
    fake.addresses = 1, fake.plain = row->streams;
    d.device_ops = fsdp_fake_device_ops(row->streams);
    CALL(NULL, fsdp_init(&d, &w));
    CHECK_EQ_INT(fsdp_model_run_mode(NULL), 0);
    CHECK_EQ_INT(fsdp_model_failure(NULL), 0);
    const int64_t world = fake.given[FSDP_MEMORY_DEVICE];
    CHECK((world > 0) == (row->size > 1));
    md.cpu_offload = row->streams;
    fsdp_model *m = lab_model(w, &md);
    CHECK_EQ_INT(fsdp_model_run_mode(m), row->streams ? FSDP_RUN_STREAMS : FSDP_RUN_INLINE);
    for (int u = 0; u < 4; u++) {
        fsdp_param_desc p = fsdp_mat("w", 1 << 22, 1 << 20); /* 16 TiB */
        units[u] = lab_unit(w, m, NULL, &p, 1);
    }
    for (int step = 0; step < 2; step++) {
        for (int u = 0; u < 4; u++) lab_forward(w, units[u]);
        for (int u = 3; u >= 0; u--) {
            CALL(w, fsdp_pre_backward(units[u]));
            CHECK(fsdp_grad(units[u], 0) != NULL);
            CALL(w, fsdp_post_backward(units[u]));
        }
        CALL(w, fsdp_finalize_backward(m));
        CALL(w, fsdp_zero_grad(m));
    }
    CALL(w, fsdp_model_memory(m, &memory));
    const int64_t shards = (INT64_C(1) << 46) / row->size;
    CHECK_EQ_INT(memory.pool_bytes[FSDP_POOL_SHARD], shards);
    CHECK_EQ_INT(fake.given[FSDP_MEMORY_DEVICE] + fake.given[FSDP_MEMORY_PINNED],
                 memory.total_bytes + world);
    CHECK_EQ_INT(fake.given[FSDP_MEMORY_PINNED], row->streams ? 2 * shards : 0);
    CHECK((fake.bus_bytes > 0) == row->streams); /* shards go to the device, gradients come back */
    if (!row->streams) {
        const int64_t had = fake.given[FSDP_MEMORY_DEVICE];
        CALL(w, fsdp_adamw_create(m, NULL, &opt));
        CALL(w, fsdp_adamw_step(opt, 1e-3));
        CHECK_EQ_INT(fake.given[FSDP_MEMORY_DEVICE] - had, 2 * shards);
    }
    CALL(NULL, fsdp_shutdown(w));
    CHECK(fake.given[FSDP_MEMORY_DEVICE] == 0 && fake.given[FSDP_MEMORY_PINNED] == 0);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static const lab_param rows[] = {{0, "embedding", FSDP_F32, 0, 0, 2, 0, {48, 4, 0}},
                                 {1, "weight", FSDP_F32, 0, 0, 2, 0, {24, 16, 0}},
                                 {1, "bias", FSDP_F32, 0, 0, 1, 0, {24, 0, 0}},
                                 {2, "frozen", FSDP_F32, 0, 1, 2, 0, {10, 3, 0}},
                                 {2, "odd", FSDP_F32, 0, 0, 2, 0, {7, 5, 0}}};
static const lab_net net = {rows, 5, 3};

/* Runs two steps with an optimizer, and logs the ops of the second. */
static void two_steps(fsdp_world *w, const fsdp_model_desc *desc, lab_built *m, lab_log *log) {
    fsdp_sgd *sgd;
    double norm;
    memset(m, 0, sizeof *m);
    lab_build(m, &net, w, desc);
    CALL(w, fsdp_init_params(m->model, lab_fill, NULL));
    CALL(w, fsdp_sgd_create(m->model, NULL, &sgd));
    lab_watch(log, w, m->model);
    for (int step = 0; step < 2; step++) {
        log->num = 0;
        train(w, m->model, m->unit, net.units, desc->param_dtype);
        CALL(w, fsdp_clip_grad_norm(m->model, 1e9, &norm));
        CALL(w, fsdp_sgd_step(sgd, 0.125));
        CALL(w, fsdp_zero_grad(m->model));
    }
}

/* Compares each rank's ops in a real world of 4 with those in a fake one. */
static void same_records(lab_rank *r) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_world_desc d = w_desc(r->rank, r->size, NULL, NULL, *(const int *)r->arg);
    fsdp_world *w;
    lab_built real, fake;
    lab_log a = FSDP_ZERO, b = FSDP_ZERO;
    d.backend = "fake";
    CALL(NULL, fsdp_init(&d, &w));
    for (int hsdp = 0; hsdp < 2; hsdp++) {
        md.param_dtype = hsdp ? FSDP_BF16 : FSDP_DTYPE_KEEP;
        md.mesh = hsdp ? lab_hsdp(r->w, 2, 2) : NULL;
        two_steps(r->w, &md, &real, &a);
        md.mesh = hsdp ? lab_hsdp(w, 2, 2) : NULL;
        two_steps(w, &md, &fake, &b);
        CHECK_EQ_INT(a.num, b.num);
        for (int i = 0; i < a.num; i++) {
            const fsdp_op *x = &a.ops[i], *y = &b.ops[i];
            CHECK_MSG(x->kind == y->kind && x->label == y->label && x->count == y->count &&
                          x->bytes == y->bytes && x->group_size == y->group_size &&
                          x->dtype == y->dtype && x->out_dtype == y->out_dtype &&
                          x->stream == y->stream && x->scale == y->scale,
                      "record %d: %s '%s', on a fake world %s '%s'", i, fsdp_op_name(x->kind),
                      x->what, fsdp_op_name(y->kind), y->what);
        }
        CHECK(lab_next_op(&a, 0, FSDP_OP_REDUCE_SCATTER, -1, NULL) >= 0);
    }
    free(a.ops), free(b.ops);
    CALL(NULL, fsdp_shutdown(w));
}
static const struct {
    const char *name;
    int lanes;
} lanes_of[] = {{"inline", 0}, {"1 lane", 1}, {"2 lanes", 2}};
TEST_P(fake, records_are_those_of_a_real_world, lanes_of) {
    lab_how how = FSDP_ZERO;
    how.lanes = row->lanes, how.comm_ops = fsdp_shm_comm_ops();
    lab_run(4, &how, same_records, (void *)(uintptr_t)&row->lanes);
}

/* If all ranks have equal data, the mean is each rank's data, with sum_all or without. */
TEST_P(fake, a_step_as_rank_37_of_4096, lanes_of) {
    fsdp_fake fake = FSDP_ZERO;
    fsdp_world_desc d = fake_desc(&fake, 37, LARGE);
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_world *w;
    lab_built m;
    lab_log log = FSDP_ZERO;
    uint64_t bytes[FSDP_OP_COUNT], calls[FSDP_OP_COUNT];
    fsdp_counters c = FSDP_ZERO;
    fake.sum_all = 1, d.comm_threads = row->lanes ? row->lanes : -1;
    CALL(NULL, fsdp_init(&d, &w));
    memcpy(bytes, fake.wire_bytes, sizeof bytes), memcpy(calls, fake.calls, sizeof calls);
    two_steps(w, &md, &m, &log);
    log.num = 0;
    train(w, m.model, m.unit, net.units, FSDP_DTYPE_KEEP);
    for (int p = 0; p < net.count; p++) {
        const fsdp_param_view v = lab_view_of(&m, p);
        CHECK_EQ_INT(v.numel, rows[p].shape[0] > 37 ? rows[p].shape[1] : 0); /* one row or none */
        for (int64_t i = 0; i < v.numel && v.requires_grad; i++)
            CHECK_EQ_INT(lab_bits32(((float *)v.shard_grad)[i]), lab_bits32(((float *)v.shard)[i]));
    }
    CALL(w, fsdp_model_counters(m.model, &c));
    /* all_reduce and broadcast also serve agreements */
    for (int k = FSDP_OP_ALL_GATHER; k <= FSDP_OP_RECV; k++) {
        CHECK(fake.calls[k] - calls[k] >= c.calls[k]);
        CHECK(fake.wire_bytes[k] - bytes[k] >= c.bytes[k]);
        if (k == FSDP_OP_ALL_REDUCE || k == FSDP_OP_BROADCAST) continue;
        CHECK_EQ_INT(fake.calls[k] - calls[k], c.calls[k]);
        CHECK_EQ_INT(fake.wire_bytes[k] - bytes[k], c.bytes[k]);
    }
    /* One step: each unit is gathered twice. Each of the 4,095 peers sends one row. */
    CHECK_EQ_INT(lab_count_ops(&log, 0, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, NULL), 6);
    CHECK_EQ_INT(lab_count_ops(&log, 0, FSDP_OP_REDUCE_SCATTER, -1, NULL), 3);
    int64_t gathered = 0, reduced = 0;
    for (int i = 0; i < log.num; i++) {
        if (log.ops[i].kind == FSDP_OP_ALL_GATHER) gathered += (int64_t)log.ops[i].bytes;
        if (log.ops[i].kind == FSDP_OP_REDUCE_SCATTER) reduced += (int64_t)log.ops[i].bytes;
    }
    CHECK_EQ_INT(gathered, 2 * 4095 * 4 * (4 + 16 + 1 + 3 + 5));
    CHECK_EQ_INT(reduced, 4095 * 4 * (4 + 16 + 1 + 5));
    free(log.ops);
    CALL(NULL, fsdp_shutdown(w));
}

TEST(fake, a_plan_of_4096_ranks) {
    fsdp_world *w = fake_world(NULL, 37, LARGE);
    fsdp_plan *plan;
    lab_built m = FSDP_ZERO;
    lab_build(&m, &net, w, NULL);
    CALL(w, fsdp_init_params(m.model, lab_fill, NULL));
    CALL(w, fsdp_plan_create(m.model, NULL, &plan));
    for (int step = 0; step < 4; step++) {
        train(w, m.model, m.unit, net.units, FSDP_DTYPE_KEEP);
        CALL(w, fsdp_zero_grad(m.model));
    }
    CHECK_MSG(fsdp_plan_state(plan) == FSDP_PLAN_REPLAYING, "%s", fsdp_plan_why(plan));
    CALL(NULL, fsdp_shutdown(w));
}

TEST(fake, a_model_of_a_million_ranks) {
    fsdp_fake fake = FSDP_ZERO;
    fsdp_world *w = fake_world(&fake, LARGEST - 1, LARGEST);
    fsdp_model_desc md = FSDP_ZERO;
    const int64_t shape[1] = {100};
    const fsdp_param_desc p = lab_desc(1, shape, 0, FSDP_F32, 0);
    md.mesh = lab_hsdp(w, 1024, 1024);
    fsdp_model *m = lab_model(w, &md);
    fsdp_unit *unit = lab_unit(w, m, NULL, &p, 1);
    train(w, m, &unit, 1, FSDP_DTYPE_KEEP);
    CHECK_EQ_INT(fake.wire_bytes[FSDP_OP_ALL_GATHER], 2 * 1023 * 4);
    CHECK_EQ_INT(fake.wire_bytes[FSDP_OP_REDUCE_SCATTER], 1023 * 4);
    CALL(NULL, fsdp_shutdown(w));
}

/* ---- redistributions ------------------------------------------------------------------------- */

static const struct {
    const char *name, *from, *to;
    int kind;
    int64_t bytes; /* tensor of 128 x 192 f32 on 64 x 64 ranks: 2 rows or 3 columns each */
} routes[] = {{"S0 to R", "R S0", "R R", FSDP_OP_ALL_GATHER, 63 * 2 * 192 * 4},
              {"P to R", "R P", "R R", FSDP_OP_ALL_REDUCE, 2 * 63 * 2 * 192 * 4},
              {"P to S0", "P R", "S0 R", FSDP_OP_REDUCE_SCATTER, 63 * 2 * 192 * 4},
              {"S0 to S1", "R S0", "R S1", FSDP_OP_ALL_TO_ALL, 63 * 2 * 3 * 4},
              {"S0 S1 to R S1", "S0 S1", "R S1", FSDP_OP_ALL_GATHER, 63 * 2 * 3 * 4},
              {"R to S0 S1", "R R", "S0 S1", FSDP_OP_COUNT, 0}};
TEST_P(fake, redistributions_on_64x64, routes) {
    static const char *const names[2] = {"dp", "tp"};
    const int32_t side[2] = {64, 64};
    const int64_t shape[2] = {128, 192};
    fsdp_fake fake = FSDP_ZERO;
    fsdp_world *w = fake_world(&fake, 37 * 64 + 5, LARGE);
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_dmesh_desc dd = FSDP_ZERO;
    fsdp_redistribution_desc rd = FSDP_ZERO;
    fsdp_redistribution_info got;
    fsdp_dmesh *dm;
    fsdp_redistribution *r;
    fsdp_placement place[2];
    dd.mesh = lab_mesh(w, 2, side, names, NULL);
    CALL(w, fsdp_mesh_info_init(dd.mesh, FSDP_MESH_INFO_FSDP, 0, -1, &info));
    md.mesh_info = &info;
    CALL(w, fsdp_dmesh_create(lab_model(w, &md), &dd, &dm));
    placements(row->from, NULL, place);
    CHECK_OK(fsdp_spec_init(&rd.from, 2, side, place, FSDP_F32, 2, shape));
    placements(row->to, NULL, place);
    CHECK_OK(fsdp_spec_init(&rd.to, 2, side, place, FSDP_F32, 2, shape));
    CALL(w, fsdp_redistribution_create(dm, &rd, &r));
    CALL(w, fsdp_redistribution_get(r, &got));
    float *src = (float *)lab_zeros((size_t)got.from.numel, sizeof *src);
    float *dst = (float *)lab_zeros((size_t)got.to.numel, sizeof *dst);
    memset(fake.calls, 0, sizeof fake.calls), memset(fake.wire_bytes, 0, sizeof fake.wire_bytes);
    CALL(w, fsdp_redistribute(r, dst, src));
    for (int k = 0; k < FSDP_OP_COUNT; k++) {
        CHECK_EQ_INT(fake.calls[k], k == row->kind);
        CHECK_EQ_INT(fake.wire_bytes[k], k == row->kind ? row->bytes : 0);
    }
    free(src), free(dst);
    CALL(NULL, fsdp_shutdown(w));
}

/* ---- memory ---------------------------------------------------------------------------------- */

static fsdp_status whole_life(const fsdp_world_desc *d) {
    const int64_t shape[2] = {64, 3};
    const fsdp_param_desc p = lab_desc(2, shape, 0, FSDP_F32, 0);
    int32_t ranks[16];
    fsdp_mesh_desc hsdp = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_world *w;
    fsdp_mesh *mesh = NULL;
    fsdp_model *m = NULL;
    fsdp_unit *unit = NULL;
    ud.params = &p, ud.num_params = 1;
    hsdp.ndim = 2, hsdp.shape[0] = hsdp.shape[1] = 4, hsdp.ranks = ranks;
    hsdp.names[0] = "replicate", hsdp.names[1] = "shard";
    for (int i = 0; i < 16; i++) ranks[i] = i % 4 * 4 + i / 4;
    fsdp_status status = fsdp_init(d, &w);
    if (status) return status;
    status = fsdp_mesh_create(w, &hsdp, &mesh);
    md.mesh = mesh;
    if (!status) status = fsdp_model_create(w, &md, &m);
    if (!status) status = fsdp_fully_shard(m, &ud, &unit);
    if (!status) status = fsdp_model_commit(m);
    for (int step = 0; step < 2 && !status; step++) {
        status = fsdp_pre_forward(unit);
        if (!status) status = fsdp_post_forward(unit);
        if (!status) status = fsdp_pre_backward(unit);
        if (!status) status = fsdp_post_backward(unit);
        if (!status) status = fsdp_finalize_backward(m);
    }
    const fsdp_status ended = fsdp_shutdown(w);
    if (ended) CHECK_STATUS(ended, status);
    return status;
}
TEST_P(fake, every_allocation_may_fail, lanes_of) {
    fsdp_world_desc d = fake_desc(NULL, 5, 16);
    fsdp_status status = FSDP_ERR_OUT_OF_MEMORY;
    w_heap heap;
    int failures = 0;
    d.comm_threads = row->lanes ? row->lanes : -1;
    for (int n = 0; status; n++, failures++) {
        w_heap_use(&heap, &d);
        w_fail(&heap, n);
        status = whole_life(&d);
        if (status) CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
        CHECK(heap.failures == (status != FSDP_OK));
        CHECK(heap.live == 0 && heap.live_bytes == 0);
    }
    CHECK(failures > 15);
}
