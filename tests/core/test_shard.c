/* test_shard.c - shard math compared with a model that works element by element, and whole units
   gathered and scattered by their lists of segments and blocks, in ordinary memory.

   SPDX-License-Identifier: MIT */
#define TAGS BITS
#include "harness.h"
#include <limits.h> /* INT_MAX */
#include "lab.h"

enum { MAX_WORLD = 9, MAX_PARAMS = 5, GUARD = 40, FREE = -7 };
static int64_t cases, mixed; /* units checked; those with direct and packed parameters */

/* ---- the model: torch.chunk, then one element after another ---------------------------------- */

/* Returns the rows of a piece: the smallest size for which `world` pieces hold all rows. */
static int64_t model_chunk(int64_t rows, int world) {
    int64_t chunk = 0;
    while (chunk * world < rows) chunk++;
    return chunk;
}

static int64_t align_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

/* Returns the rank that owns a row: each piece has `chunk` rows, until none are left. */
static int model_owner(int64_t row, int64_t chunk) {
    int rank = 0;
    while (row >= chunk) row -= chunk, rank++;
    return rank;
}

typedef struct {
    int64_t numel, stored; /* elements of the full tensor; of a stored shard, with padding */
    int *owner;            /* owner of each element, row-major */
    int64_t *place;        /* index of each element in its owner's shard */
    int64_t held[MAX_WORLD];
} model;

static void model_make(model *m, const fsdp_layout_param *p, int world) {
    int64_t inner = 1, chunk = model_chunk(p->shape[p->shard_dim], world);
    m->numel = m->stored = 1;
    for (int d = 0; d < p->ndim; d++) {
        m->numel *= p->shape[d];
        m->stored *= d == p->shard_dim ? chunk : p->shape[d];
        if (d > p->shard_dim) inner *= p->shape[d];
    }
    memset(m->held, 0, sizeof m->held);
    m->owner = (int *)malloc((size_t)(m->numel + 1) * sizeof *m->owner);
    m->place = (int64_t *)malloc((size_t)(m->numel + 1) * sizeof *m->place);
    CHECK(m->owner && m->place);
    for (int64_t i = 0; i < m->numel; i++) {
        m->owner[i] = model_owner(i / inner % p->shape[p->shard_dim], chunk);
        m->place[i] = m->held[m->owner[i]]++;
    }
}

/* ---- single functions ------------------------------------------------------------------------ */

TEST(shard, ranges) {
    for (int64_t rows = 0; rows <= 40; rows++)
        for (int world = 1; world <= MAX_WORLD; world++) {
            int64_t chunk = model_chunk(rows, world), held[MAX_WORLD] = {0}, at = 0;
            for (int64_t row = 0; row < rows; row++) held[model_owner(row, chunk)]++;
            for (int rank = 0; rank < world; rank++) {
                fsdp_range r;
                CHECK_OK(fsdp_shard_range(rows, world, rank, &r));
                CHECK_EQ_INT(r.start, at);
                CHECK_EQ_INT(r.count, held[rank]);
                CHECK_EQ_INT(r.padded, chunk);
                at += r.count;
                cases++;
            }
            CHECK_EQ_INT(at, rows); /* together they have all rows */
        }
    h_message("%lld ranges", (long long)cases);
}

/* Sizes that ordinary programs never have: no overflow, and all rows are covered. */
TEST(shard, ranges_of_large_sizes) {
    static const int64_t sizes[] = {INT64_MAX,  INT64_MAX - 1,          (int64_t)1 << 62,
                                    1000000007, ((int64_t)1 << 31) - 1, (int64_t)1 << 40};
    static const int worlds[] = {1, 2, 3, 7, 64, 1000, 131072};
    for (int s = 0; s < 6; s++)
        for (int w = 0; w < 7; w++) {
            int64_t at = 0, chunk = sizes[s] / worlds[w] + (sizes[s] % worlds[w] ? 1 : 0);
            for (int rank = 0; rank < worlds[w]; rank++) {
                fsdp_range r;
                CHECK_OK(fsdp_shard_range(sizes[s], worlds[w], rank, &r));
                CHECK_MSG(r.start == at && r.padded == chunk && r.count >= 0 && r.count <= chunk,
                          "%lld rows, rank %d of %d", (long long)sizes[s], rank, worlds[w]);
                CHECK(r.count == chunk || r.count == sizes[s] - at);
                at += r.count;
            }
            CHECK(at == sizes[s]);
        }
    fsdp_range r;
    CHECK_OK(fsdp_shard_range(INT64_MAX, INT_MAX, INT_MAX - 1, &r));
    CHECK(r.start <= INT64_MAX - r.count);
    CHECK_OK(fsdp_shard_range(1, INT_MAX, INT_MAX - 1, &r));
    CHECK(r.start == 1 && r.count == 0 && r.padded == 1);
}

/* ---- a unit: gather and scatter -------------------------------------------------------------- */

typedef struct {
    fsdp_layout_param params[MAX_PARAMS];
    int count, world;
    int64_t direct_numel, align;              /* align: also in the layout's desc */
    int64_t shard_base, full_base, final_gap; /* final_gap < 0: final_base 0 */
} unit;

static char title[400];

static void unit_title(const unit *u) {
    int at = snprintf(title, sizeof title, "W=%d direct from %lld, bases %lld %lld %lld:", u->world,
                      (long long)u->direct_numel, (long long)u->shard_base, (long long)u->full_base,
                      (long long)u->final_gap);
    for (int i = 0; i < u->count; i++) {
        at += snprintf(title + at, sizeof title - (size_t)at, " dim %d of (",
                       u->params[i].shard_dim);
        for (int d = 0; d < u->params[i].ndim; d++)
            at += snprintf(title + at, sizeof title - (size_t)at, "%s%lld", d ? "," : "",
                           (long long)u->params[i].shape[d]);
        at += snprintf(title + at, sizeof title - (size_t)at, ")");
    }
}
#define REQUIRE(cond) CHECK_MSG(cond, "%s", title)

/* Returns rank k's gradient of element i of parameter p; rank 0's equals the parameter. */
static int32_t value(int p, int64_t i, int k) {
    return ((p + 1) * 100000 + (int32_t)i + 1) * (k + 1);
}

static int32_t *filled(int64_t numel, int32_t x) {
    int32_t *a = (int32_t *)malloc((size_t)(numel + 1) * sizeof *a);
    CHECK(a != NULL);
    for (int64_t i = 0; i < numel; i++) a[i] = x;
    return a;
}

typedef struct {
    fsdp_layout layout;
    fsdp_layout_param params[MAX_PARAMS];
    fsdp_seg segs[MAX_PARAMS + 1];
    fsdp_block blocks[MAX_PARAMS * MAX_WORLD + 1];
} laid_out;

/* Computes the layout of rank `rank`; then again without lists, for equal numbers. */
static void lay_out(const unit *u, int rank, laid_out *out) {
    fsdp_layout first;
    fsdp_layout_param params[MAX_PARAMS];
    memset(&first, 0, sizeof first);
    first.world = u->world, first.rank = rank;
    first.direct_numel = u->direct_numel, first.align = u->align;
    first.shard_base = u->shard_base, first.full_base = u->full_base;
    for (int pass = 0; pass < 2; pass++) { /* the rest is placed after the gathered size */
        memset(out, 0x55, sizeof *out);
        out->layout = first;
        memcpy(out->params, u->params, sizeof out->params);
        CHECK_OK(fsdp_layout_params(&out->layout, out->params, u->count, out->segs, out->blocks));
        if (u->final_gap < 0) break;
        first.final_base = align_up(u->full_base + u->world * out->layout.shard_numel, u->align) +
                           u->final_gap;
    }
    REQUIRE(out->layout.num_segs <= u->count && out->layout.num_blocks <= u->count * u->world);
    REQUIRE(out->segs[u->count].count == 0x5555555555555555);
    REQUIRE(out->blocks[u->count * u->world].width == 0x5555555555555555);
    memcpy(params, u->params, sizeof params);
    CHECK_OK(fsdp_layout_params(&first, params, u->count, NULL, NULL));
    REQUIRE(!memcmp(&first, &out->layout, sizeof first) &&
            !memcmp(params, out->params, sizeof params));
}

/* Marks elements of memory as taken, and checks that none was taken before. */
static void take(int32_t *taken, int64_t from, int64_t count, int64_t end) {
    REQUIRE(from >= 0 && count >= 0 && from + count <= end);
    for (int64_t i = from; i < from + count; i++) REQUIRE(taken[i]++ == 0);
}

/* Checks places and sizes: shards are contiguous, nothing overlaps, direct and copied-out
   tensors are aligned. */
static void check_places(const unit *u, const laid_out *l, const model *m) {
    const fsdp_layout *y = &l->layout;
    int64_t base = u->shard_base, gathered = u->world * y->shard_numel, sum = 0, packed = 0,
            final = 0;
    int64_t end = y->slot_end, tensors = u->full_base + gathered;
    int32_t *shards = filled(base + y->shard_numel, 0), *slot = filled(end, 0);
    int many = 0;
    for (int i = 0; i < u->count; i++) {
        const fsdp_layout_param *p = &l->params[i];
        int large = u->world == 1 || (p->shard_dim == 0 && m[i].numel >= u->direct_numel &&
                                      m[i].stored > 0 && m[i].stored % u->align == 0);
        many += !large && m[i].stored > 0;
        sum += m[i].stored;
    }
    REQUIRE(y->shard_numel == sum);
    for (int i = 0; i < u->count; i++) {
        const fsdp_layout_param *p = &l->params[i];
        int large = u->world == 1 || (p->shard_dim == 0 && m[i].numel >= u->direct_numel &&
                                      m[i].stored > 0 && m[i].stored % u->align == 0);
        int lone = !large && many == 1 && m[i].stored > 0 && p->shard_dim == 0;
        REQUIRE(p->numel == m[i].numel && p->shard_numel == m[i].stored);
        REQUIRE(p->chunk == model_chunk(p->shape[p->shard_dim], u->world));
        REQUIRE(p->direct == (large || lone));
        take(shards, p->shard_offset, m[i].stored, base + sum);
        REQUIRE(p->shard_offset >= base);
        if (m[i].stored > 0) {
            if (p->direct) REQUIRE((p->shard_offset - base) % u->align == 0);
            REQUIRE((p->full_offset - u->full_base) % u->align == 0);
        }
        for (int j = 0; j < u->count; j++) /* direct shards come before the packed ones */
            if (large && !l->params[j].direct && l->params[j].shard_numel > 0)
                REQUIRE(p->shard_offset < l->params[j].shard_offset);
        if (!p->direct) packed += m[i].stored;
        /* a full tensor is followed by room for its padding */
        if (p->direct) REQUIRE(p->full_offset + u->world * m[i].stored <= tensors);
        if (p->direct) continue;
        take(slot, p->full_offset, u->world * m[i].stored, end);
        REQUIRE(m[i].stored == 0 || p->full_offset >= tensors);
        final += align_up(u->world * m[i].stored, u->align);
    }
    REQUIRE(y->packed_numel == packed && y->final_numel == final);
    take(slot, u->full_base, gathered, end);
    if (final == 0) REQUIRE(end == tensors);
    else
        REQUIRE(end == align_up(tensors, u->align) + (u->final_gap > 0 ? u->final_gap : 0) + final);
    free(shards);
    free(slot);
}

/* Fills every rank's flat shard by the model, gathers by the segments, and copies out by the
   blocks. */
static void check_gather(const unit *u, const laid_out *l, const model *m) {
    int64_t size = u->shard_base + l->layout.shard_numel, end = l->layout.slot_end;
    int32_t *slot = filled(end + GUARD, FREE), *flat[MAX_WORLD];
    int64_t written = 0;
    for (int r = 0; r < u->world; r++) {
        flat[r] = filled(size, FREE);
        for (int i = 0; i < u->count; i++) {
            const fsdp_layout_param *p = &l->params[i];
            for (int64_t k = 0; k < m[i].stored; k++) flat[r][p->shard_offset + k] = 0;
            for (int64_t k = 0; k < m[i].numel; k++)
                if (m[i].owner[k] == r) flat[r][p->shard_offset + m[i].place[k]] = value(i, k, 0);
        }
    }
    for (int s = 0; s < l->layout.num_segs; s++)
        for (int k = 0; k < u->world; k++)
            for (int64_t i = 0; i < l->segs[s].count; i++, written++) {
                const fsdp_seg *g = &l->segs[s];
                REQUIRE(slot[g->full + k * g->count + i] == FREE);
                slot[g->full + k * g->count + i] = flat[k][g->shard + i];
            }
    REQUIRE(written == u->world * l->layout.shard_numel);
    for (int b = 0; b < l->layout.num_blocks; b++) {
        const fsdp_block *c = &l->blocks[b];
        REQUIRE(c->width > 0 && c->height > 0 && c->src_pitch >= c->width &&
                c->dst_pitch >= c->width);
        for (int64_t y = 0; y < c->height; y++)
            for (int64_t x = 0; x < c->width; x++) {
                int32_t *to = &slot[c->dst + y * c->dst_pitch + x];
                REQUIRE(*to == FREE && c->src + y * c->src_pitch + x < u->full_base + written);
                *to = slot[c->src + y * c->src_pitch + x];
            }
    }
    for (int i = 0; i < u->count; i++)
        for (int64_t k = 0; k < m[i].numel; k++)
            REQUIRE(slot[l->params[i].full_offset + k] == value(i, k, 0));
    for (int64_t i = 0; i < u->full_base; i++) REQUIRE(slot[i] == FREE);
    for (int64_t i = end; i < end + GUARD; i++) REQUIRE(slot[i] == FREE);
    for (int r = 0; r < u->world; r++) free(flat[r]);
    free(slot);
}

/* Writes gradients into zeroed slots, packs them by the blocks (chunk_cat), and sums over the
   ranks by the segments. */
static void check_scatter(const unit *u, const laid_out *l, const model *m) {
    int32_t *slot[MAX_WORLD], sum = u->world * (u->world + 1) / 2;
    for (int k = 0; k < u->world; k++) {
        slot[k] = filled(l->layout.slot_end, 0);
        for (int i = 0; i < u->count; i++)
            for (int64_t e = 0; e < m[i].numel; e++)
                slot[k][l->params[i].full_offset + e] = value(i, e, k);
        for (int b = 0; b < l->layout.num_blocks; b++) {
            const fsdp_block *c = &l->blocks[b];
            for (int64_t y = 0; y < c->height; y++)
                for (int64_t x = 0; x < c->width; x++)
                    slot[k][c->src + y * c->src_pitch + x] = slot[k][c->dst + y * c->dst_pitch + x];
        }
    }
    for (int me = 0; me < u->world; me++) {
        int32_t *flat = filled(u->shard_base + l->layout.shard_numel, 0);
        for (int s = 0; s < l->layout.num_segs; s++)
            for (int k = 0; k < u->world; k++)
                for (int64_t i = 0; i < l->segs[s].count; i++)
                    flat[l->segs[s].shard + i] +=
                        slot[k][l->segs[s].full + me * l->segs[s].count + i];
        for (int i = 0; i < u->count; i++) {
            const int32_t *mine = flat + l->params[i].shard_offset;
            for (int64_t e = 0; e < m[i].numel; e++)
                if (m[i].owner[e] == me) REQUIRE(mine[m[i].place[e]] == value(i, e, 0) * sum);
            for (int64_t e = m[i].held[me]; e < m[i].stored; e++)
                REQUIRE(mine[e] == 0); /* padding */
        }
        free(flat);
    }
    for (int k = 0; k < u->world; k++) free(slot[k]);
}

static void run(const unit *u) {
    static laid_out mine, l;
    model m[MAX_PARAMS];
    unit_title(u);
    for (int i = 0; i < u->count; i++) {
        model_make(&m[i], &u->params[i], u->world);
        if (u->world == 1) m[i].stored = align_up(m[i].stored, u->align);
    }
    lay_out(u, 0, &l);
    for (int r = 0; r < u->world; r++) { /* equal on all ranks, except for their own rows */
        lay_out(u, r, &mine);
        for (int i = 0; i < u->count; i++) {
            fsdp_layout_param *p = &mine.params[i];
            int64_t chunk = model_chunk(p->shape[p->shard_dim], u->world), rows = 0, start = 0;
            for (int64_t row = 0; row < p->shape[p->shard_dim]; row++) {
                rows += model_owner(row, chunk) == r;
                start += model_owner(row, chunk) < r;
            }
            REQUIRE(p->start == start && p->rows == rows && p->local_numel == m[i].held[r]);
            p->start = l.params[i].start, p->rows = l.params[i].rows;
            p->local_numel = l.params[i].local_numel;
        }
        mine.layout.rank = 0;
        REQUIRE(!memcmp(&mine, &l, sizeof l));
    }
    check_places(u, &l, m);
    mixed += l.layout.num_segs > 1 && l.layout.num_blocks > 0;
    check_gather(u, &l, m);
    check_scatter(u, &l, m);
    for (int i = 0; i < u->count; i++) free(m[i].owner), free(m[i].place);
    cases++;
}

static void unit_init(unit *u, int world, int64_t direct_numel) {
    memset(u, 0, sizeof *u);
    u->world = world;
    u->direct_numel = direct_numel;
    u->final_gap = -1;
    u->align = 16;
}

static fsdp_layout_param *unit_add(unit *u, int shard_dim) {
    fsdp_layout_param *p = &u->params[u->count++];
    p->shard_dim = shard_dim;
    return p;
}

static void param_dim(fsdp_layout_param *p, int64_t size) { p->shape[p->ndim++] = size; }

/* Every number of rows over every world, with and without a small second parameter, packed and
   direct. */
TEST(shard, every_size) {
    static const int64_t inner[] = {0, 1, 2, 3, 7, 16};
    for (int64_t rows = 0; rows <= 40; rows++)
        for (int world = 1; world <= MAX_WORLD; world++)
            for (int n = 0; n < 6 * 2 * 2; n++) {
                unit u;
                unit_init(&u, world, n / 6 % 2 ? INT64_MAX : 1);
                fsdp_layout_param *p = unit_add(&u, 0);
                param_dim(p, rows);
                if (n % 6) param_dim(p, inner[n % 6]);
                if (n / 12) param_dim(unit_add(&u, 0), 3);
                run(&u);
            }
    h_message("%lld units", (long long)cases);
}

TEST(shard, every_size_along_dim_1) {
    static const int64_t around[][2] = {{1, 1}, {3, 1}, {2, 5}, {5, 2}};
    for (int64_t size = 0; size <= 40; size++)
        for (int world = 1; world <= MAX_WORLD; world++)
            for (int n = 0; n < 4 * 2; n++) {
                unit u;
                unit_init(&u, world, 1);
                fsdp_layout_param *p = unit_add(&u, 1);
                param_dim(p, around[n % 4][0]);
                param_dim(p, size);
                param_dim(p, around[n % 4][1]);
                if (n / 4) param_dim(unit_add(&u, 0), 5);
                run(&u);
            }
    h_message("%lld units", (long long)cases);
}

/* Units of 1 to 5 parameters with 1 to 4 dims: uneven, empty, without elements, any shard dim,
   direct and packed ones, the list anywhere in its blocks. */
TEST(shard, random_units, SLOW | AT_NIGHT(ASAN)) {
    uint64_t rng = h_seed();
    for (int n = 0; n < (W_SLOW ? 10000 : 60000); n++) {
        static const int64_t thresholds[] = {0, 1, 16, 64, 200, INT64_MAX};
        static const int64_t aligns[] = {1, 16, 32, 128};
        unit u;
        unit_init(&u, 1 + (int)(h_rand64(&rng) % MAX_WORLD), 0);
        u.direct_numel = thresholds[h_rand64(&rng) % 6];
        u.align = aligns[h_rand64(&rng) % 4];
        for (int left = 1 + (int)(h_rand64(&rng) % MAX_PARAMS); left; left--) {
            int ndim = 1 + (int)(h_rand64(&rng) % 4);
            int even = h_rand64(&rng) % 3 == 0; /* rows that may be a multiple of 16 */
            int any_dim = h_rand64(&rng) % 2 == 0;
            fsdp_layout_param *p = unit_add(&u,
                                            any_dim ? (int)(h_rand64(&rng) % (uint64_t)ndim) : 0);
            for (int d = 0; d < ndim; d++) {
                int64_t size = (int64_t)(h_rand64(&rng) % (d == 0 ? 20 : 6));
                if (even) size = d == 0 ? u.world * (1 + size % 3) : d == 1 ? 16 : 1 + size % 2;
                else if (h_rand64(&rng) % 8) size++;
                param_dim(p, size);
            }
        }
        u.shard_base = (int64_t)(h_rand64(&rng) % 4) * u.align;
        u.full_base = (int64_t)(h_rand64(&rng) % 4) * u.align;
        u.final_gap = (int64_t)(h_rand64(&rng) % 4) * u.align - u.align;
        run(&u);
    }
    CHECK(mixed > cases / 60);
    h_message("%lld units, %lld of them with direct and packed parameters", (long long)cases,
              (long long)mixed);
}

/* The rule of direct parameters in an example: the large one first, then the packed ones in
   order. */
TEST(shard, example) {
    fsdp_layout layout;
    fsdp_layout_param p[4];
    fsdp_seg segs[4];
    fsdp_block blocks[16];
    memset(&layout, 0, sizeof layout);
    memset(p, 0, sizeof p);
    layout.world = 4, layout.direct_numel = 128, layout.align = 16;
    p[0].ndim = 1, p[0].shape[0] = 10;                    /* packed: (3) on each rank */
    p[1].ndim = 2, p[1].shape[0] = 16, p[1].shape[1] = 8; /* direct: (4,8) */
    p[2].ndim = 2, p[2].shape[0] = 2, p[2].shape[1] = 6, p[2].shard_dim = 1; /* packed: (2,2) */
    p[3].ndim = 1, p[3].shape[0] = 0;
    CHECK_OK(fsdp_layout_params(&layout, p, 4, segs, blocks));
    CHECK(layout.shard_numel == 32 + 3 + 4 && layout.packed_numel == 7 && layout.num_segs == 2);
    CHECK(p[1].direct && p[1].shard_offset == 0 && p[1].full_offset == 0);
    CHECK(p[0].shard_offset == 32 && p[2].shard_offset == 35 && p[3].shard_offset == 39);
    CHECK(segs[0].shard == 0 && segs[0].full == 0 && segs[0].count == 32);
    CHECK(segs[1].shard == 32 && segs[1].full == 128 && segs[1].count == 7);
    CHECK(p[0].full_offset == 160 && p[2].full_offset == 176 && layout.slot_end == 192);
    CHECK(layout.num_blocks == 4);
    CHECK(blocks[0].src == 128 && blocks[0].dst == 160 && blocks[0].width == 3 &&
          blocks[0].height == 4 && blocks[0].src_pitch == 7 && blocks[0].dst_pitch == 3);
    CHECK(blocks[1].src == 131 && blocks[1].dst == 176 && blocks[1].width == 2 &&
          blocks[1].height == 2 && blocks[1].src_pitch == 2 && blocks[1].dst_pitch == 6);
    CHECK(blocks[3].src == 145 && blocks[3].dst == 180); /* rank 3 has none of the 6 columns */
}

/* ---- refused --------------------------------------------------------------------------------- */

TEST(shard, functions_refuse) {
    fsdp_range r = {1, 2, 3};
    CHECK_STATUS(fsdp_shard_range(-1, 2, 0, &r), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_shard_range(INT64_MIN, 2, 0, &r), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_shard_range(5, 0, 0, &r), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_shard_range(5, -1, 0, &r), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_shard_range(5, 2, 2, &r), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_shard_range(5, 2, -1, &r), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_shard_range(5, 2, 0, NULL), FSDP_ERR_INVALID_ARG);
    CHECK(r.start == 1 && r.count == 2 && r.padded == 3);
}

/* Layouts that one changed field makes invalid. */
typedef struct {
    const char *name;
    int world, rank, count, ndim, dim;
    int64_t a, b;
} wrong_layout;
static const wrong_layout wrong[] = {
    {"count", 2, 0, -1, 2, 0, 4, 4},
    {"world_0", 0, 0, 1, 2, 0, 4, 4},
    {"world_negative", -2, -3, 1, 2, 0, 4, 4},
    {"world_0_of_none", 0, 0, 0, 2, 0, 4, 4},
    {"rank", 2, 2, 1, 2, 0, 4, 4},
    {"rank_negative", 2, -1, 1, 2, 0, 4, 4},
    {"scalar", 2, 0, 1, 0, 0, 4, 4},
    {"ndim", 2, 0, 1, 9, 0, 4, 4},
    {"dim", 2, 0, 1, 2, 2, 4, 4},
    {"dim_negative", 2, 0, 1, 2, -1, 4, 4},
    {"size", 2, 0, 1, 2, 0, -4, 4},
    {"size_1", 2, 0, 1, 2, 0, 4, -1},
    {"numel", 2, 0, 1, 2, 0, (int64_t)1 << 32, (int64_t)1 << 32},
    {"numel_max", 1, 0, 1, 2, 0, INT64_MAX, 2},
    {"one_too_large", 1, 0, 1, 2, 0, INT64_MAX, 1},
    {"padded", 4, 0, 1, 2, 0, 1, (int64_t)1 << 61}, /* one row, stored by each of four ranks */
    {"inner", 2, 0, 1, 2, 0, 0, INT64_MAX},
    {"sum", 2, 0, 2, 2, 0, (int64_t)1 << 30, (int64_t)1 << 30},
};

TEST_P(shard, layout_refuses, wrong) {
    fsdp_layout layout;
    fsdp_layout_param p[2];
    memset(&layout, 0, sizeof layout);
    memset(p, 0, sizeof p);
    layout.world = row->world, layout.rank = row->rank;
    for (int i = 0; i < 2; i++) {
        p[i].ndim = row->ndim, p[i].shard_dim = row->dim;
        p[i].shape[0] = row->a, p[i].shape[1] = row->b;
    }
    CHECK_STATUS(fsdp_layout_params(&layout, p, row->count, NULL, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_layout_params(NULL, p, 1, NULL, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_layout_params(&layout, NULL, 1, NULL, NULL), FSDP_ERR_INVALID_ARG);
}

TEST(shard, layout_of_nothing) {
    fsdp_layout layout;
    memset(&layout, 0, sizeof layout);
    layout.world = 3;
    CHECK_OK(fsdp_layout_params(&layout, NULL, 0, NULL, NULL));
    CHECK(layout.shard_numel == 0 && layout.num_segs == 0 && layout.num_blocks == 0);
    CHECK(layout.slot_end == 0);
}
