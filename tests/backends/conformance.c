/* conformance.c - runs the contract of a backend on every backend that is compiled in, with ranks
   as processes and as threads, in worlds of one to five. A new backend adds its rows to `backends`
   and is done when this passes; backends/README.md states the rules.

   The model is a loop over ranks in f32 (f64 for f64), one element at a time. Values are a function
   of rank and index, so that each rank knows every other rank's data and checks all its bits.

   SPDX-License-Identifier: MIT */
#define TAGS tags_of(row)
#include "harness.h"
#include <limits.h> /* INT_MAX */
#include "lab.h"

typedef struct {
    const char *name;
    const fsdp_comm_ops *(*ops)(void);
    int threads, world;
    const char *near; /* FSDP_GLOO_NEAR: number of ranks that seem to share a host; NULL: all */
} backend;
#define ROWS(name, ops)                                                                            \
    {name "/processes/W=1", ops, 0, 1, NULL}, {name "/processes/W=2", ops, 0, 2, NULL},            \
        {name "/processes/W=3", ops, 0, 3, NULL}, {name "/processes/W=4", ops, 0, 4, NULL},        \
        {name "/processes/W=5", ops, 0, 5, NULL}, {name "/threads/W=1", ops, 1, 1, NULL},          \
        {name "/threads/W=2", ops, 1, 2, NULL}, {name "/threads/W=3", ops, 1, 3, NULL}, {          \
        name "/threads/W=4", ops, 1, 4, NULL                                                       \
    }
static const backend backends[] = {
    ROWS("shm", fsdp_shm_comm_ops),
#ifdef FSDP_BACKEND_GLOO
    ROWS("gloo", fsdp_gloo_comm_ops),
    {"gloo/tcp/processes/W=3", fsdp_gloo_comm_ops, 0, 3, "1"},
    {"gloo/mixed/processes/2+2", fsdp_gloo_comm_ops, 0, 4, "2"},
    {"gloo/mixed/threads/2+1", fsdp_gloo_comm_ops, 1, 3, "2"},
#endif
#ifdef FSDP_BACKEND_NCCL
    ROWS("nccl", fsdp_nccl_comm_ops),
#endif
};
/* Shared memory runs in all variants, each other backend in the variants that are about it. The
   cases that take longest and repeat what other rows cover run at night. */
static h_tags tags_of(const backend *row) {
    const int several = row->world > 2, many = row->world > 3 && !row->near;
    const int sanitized = several && !strstr(row->name, "/tcp/");
    if (!strncmp(row->name, "gloo/", 5)) {
        if (many || (row->threads && !several)) return NO(SHM) | AT_NIGHT(GLOO);
        return NO(SHM) | GLOO | (!sanitized ? 0 : row->threads ? GLOO_TSAN : GLOO_ASAN);
    }
    if (!strncmp(row->name, "nccl/", 5)) { /* the GPU build has four devices */
        if (many) return NO(SHM) | GPU;
        return NO(SHM) | STUB | GPU | (!sanitized ? 0 : row->threads ? STUB_TSAN : STUB_ASAN);
    }
    return BITS | (row->threads ? TSAN : AT_NIGHT(TSAN)) | (many ? MANY_RANKS : 0);
}

#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define SANITIZED
#endif
#elif defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED
#endif
#ifdef SANITIZED
/* Sanitizers find nothing more in larger arrays, and take ten times as long. */
enum { BIG = 20000, MANY = 2049 };
#else
enum { BIG = 100000, MANY = BIG };
#endif
enum { MAX_WORLD = 5, MAX_SEGS = 3 };
#define BIG_ARENA   ((size_t)BIG * 2 * MAX_WORLD * sizeof(double)) /* bytes of src and of dst */
#define SMALL_ARENA ((size_t)100000)

/* ---- one rank -------------------------------------------------------------------------------- */

typedef struct rank_state rank_state;
typedef struct {
    const backend *row;
    void (*body)(rank_state *);
    char job[64];
    fsdp_threads threads;
    int64_t timeout_ns;
    size_t arena;
} launch;

struct rank_state {
    int rank, world, cases;
    const fsdp_comm_ops *ops;
    const launch *start;
    fsdp_comm *comm;
    fsdp_caps caps;
    size_t arena;
    char *src, *dst, *model; /* arena bytes each; the backend allocates src and dst */
    uint64_t seq;
};

static fsdp_boot boot_of(const launch *l, int rank) {
    fsdp_boot b;
    memset(&b, 0, sizeof b);
    b.rank = b.local_rank = rank;
    b.size = l->row->world;
    b.timeout_ns = l->timeout_ns;
    b.job = l->job;
    b.threads = l->row->threads ? (fsdp_threads *)(uintptr_t)&l->threads : NULL;
    b.allocator.alloc = w_alloc;
    b.allocator.free = w_free;
    b.clock.now_ns = w_now_ns;
    return b;
}

#define OK_ON(s, comm, call) /* CHECK_OK that shows the backend's text */                          \
    do {                                                                                           \
        fsdp_status got_ = (call);                                                                 \
        CHECK_MSG(got_ == FSDP_OK, "%s: %s", fsdp_status_name(got_), (s)->ops->error_text(comm));  \
    } while (0)

static void on_rank(int rank, int world, void *arg) {
    launch *l = (launch *)arg;
    fsdp_boot boot = boot_of(l, rank);
    rank_state s;
    memset(&s, 0, sizeof s);
    s.rank = rank;
    s.world = world;
    s.start = l;
    s.arena = l->arena;
    s.ops = l->row->ops();
    OK_ON(&s, NULL, s.ops->open(&boot, &s.caps, &s.comm));
    OK_ON(&s, s.comm, s.ops->alloc(s.comm, s.arena, (void **)&s.src));
    OK_ON(&s, s.comm, s.ops->alloc(s.comm, s.arena, (void **)&s.dst));
    CHECK((s.model = (char *)malloc(s.arena)) != NULL);
    l->body(&s);
    s.ops->free(s.comm, s.dst, s.arena);
    s.ops->free(s.comm, s.src, s.arena);
    s.ops->close(s.comm);
    free(s.model);
    if (rank == 0 && s.cases) h_message("%s: %d cases", l->row->name, s.cases);
}

static void start_ranks(launch *l, h_rank_fn fn) {
    const backend *row = l->row;
    if (row->threads && row->world > 1 && strstr(row->name, "nccl/") && lab_shares_gpu())
        SKIP("ranks that are threads need a GPU each");
    if (strstr(row->name, "nccl/")) { /* the host writes src and reads dst */
        setenv("FSDP_CUDA_MANAGED", "1", 1);
        setenv("FSDP_NCCL_CHECK", "1", 1);
    }
    if (row->near) setenv("FSDP_GLOO_NEAR", row->near, 1);
    if (row->threads) h_ranks_thread(row->world, fn, l);
    else h_ranks_proc(row->world, fn, l);
}

static void run_with(const backend *row, void (*body)(rank_state *), int64_t timeout_ms,
                     size_t arena) {
    launch *l = (launch *)lab_zeros(1, sizeof *l);
    l->row = row;
    l->body = body;
    l->threads.size = row->world;
    l->timeout_ns = timeout_ms * 1000000;
    l->arena = arena;
    snprintf(l->job, sizeof l->job, "conformance-%d-%lld", (int)getpid(), (long long)h_now_ms());
    start_ranks(l, on_rank);
    free(l);
}
static void run(const backend *row, void (*body)(rank_state *)) {
    run_with(row, body, 30000, SMALL_ARENA);
}
static void run_big(const backend *row, void (*body)(rank_state *)) {
    run_with(row, body, 30000, BIG_ARENA);
}

/* ---- values ---------------------------------------------------------------------------------- */

static const fsdp_dtype floats[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64};
static const fsdp_dtype all_dtypes[] = {FSDP_F32, FSDP_F64, FSDP_F16, FSDP_BF16, FSDP_U8,
                                        FSDP_I8,  FSDP_I16, FSDP_I32, FSDP_I64};
enum { BLOCK = 512 }; // elements per block of fsdpi_reduce
static const int sizes[] = {0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, BIG};
#define LENGTH(a) (int)(sizeof(a) / sizeof(a)[0])

/* Stores `count` elements of a rank's data in round `salt`, from `first` on: floats in (-1, 1), or any
   integers. CHUNK at a time, so that what depends on the dtype is decided once. */
enum { CHUNK = 256 };
static __attribute__((noinline)) void put(char *at, fsdp_dtype dtype, int rank, int64_t first,
                                          int64_t count, uint64_t salt) {
    const int is_float = fsdp_dtype_is_float(dtype);
    const size_t size = fsdp_dtype_size(dtype);
    const uint64_t base = (uint64_t)rank * 0x10001 + salt * 0xABCDEF12345;
    float narrow[CHUNK];
    double wide[CHUNK];
    for (int64_t n; count; first += n, count -= n, at += (size_t)n * size) {
        n = count < CHUNK ? count : CHUNK;
        for (int64_t i = 0; i < n; i++) {
            uint64_t state = base + (uint64_t)(first + i) * 0x9E3779B9, bits = h_rand64(&state);
            if (!is_float) memcpy(at + (size_t)i * size, &bits, size);
            wide[i] = (double)(int64_t)(bits >> 11) / 4503599627370496.0 - 1.0;
            narrow[i] = (float)((double)(bits >> 40) / (double)(1 << 23) - 1.0);
        }
        if (dtype == FSDP_F64) memcpy(at, wide, (size_t)n * sizeof *wide);
        else if (is_float) CHECK_OK(fsdp_convert(at, dtype, narrow, FSDP_F32, n));
    }
}

static void fill(char *at, fsdp_dtype dtype, int64_t start, int64_t count, int rank,
                 uint64_t salt) {
    put(at + (size_t)start * fsdp_dtype_size(dtype), dtype, rank, start, count, salt);
}

/* Rounds x to f32 unless the sum is in f64. A sum or product of two floats that is computed in
   double and then rounded equals the float result. */
static double as_wide(int wide, double x) {
    volatile float narrow = (float)x;
    return wide ? x : (double)narrow;
}

/* Computes elements [first, first + count) of a sum of integers over all ranks, at most CHUNK. */
static void reduce_ints(char *dst, fsdp_dtype dtype, int world, int64_t first, int64_t count,
                        fsdp_redop redop, uint64_t salt) {
    char values[CHUNK * 8];
    int64_t sum[CHUNK], x;
    const size_t size = fsdp_dtype_size(dtype);
    for (int k = 0; k < world; k++) {
        put(values, dtype, k, first, count, salt);
        for (int64_t i = 0; i < count; i++) {
            int32_t narrow;
            memcpy(&narrow, values + (size_t)i * size, sizeof narrow);
            if (dtype == FSDP_I64) memcpy(&x, values + (size_t)i * size, sizeof x);
            else x = narrow;
            if (k == 0 || (redop == FSDP_MAX && x > sum[i]) || (redop == FSDP_MIN && x < sum[i]))
                sum[i] = x;
            else if (redop == FSDP_SUM) sum[i] = (int64_t)((uint64_t)sum[i] + (uint64_t)x);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        const int32_t narrow = (int32_t)sum[i];
        if (dtype == FSDP_I64) memcpy(dst + (size_t)i * size, &sum[i], size);
        else memcpy(dst + (size_t)i * size, &narrow, size);
    }
}

/* The same for floats: dst (op)= ..., in rank order. `volatile` keeps the compiler from fusing a
   product and a sum. */
static void reduce_floats(char *dst, fsdp_dtype out, fsdp_dtype dtype, int world, int64_t first,
                          int64_t count, double scale, int accumulate, fsdp_redop redop,
                          uint64_t salt) {
    char values[CHUNK * 8];
    double sum[CHUNK], x[CHUNK];
    const int wide = dtype == FSDP_F64 || out == FSDP_F64;
    for (int k = 0; k < world; k++) {
        put(values, dtype, k, first, count, salt);
        lab_load(k ? x : sum, values, dtype, count);
        for (int64_t i = 0; i < count && k; i++) {
            if (redop == FSDP_SUM) sum[i] = as_wide(wide, sum[i] + x[i]);
            else if (redop == FSDP_MAX ? x[i] > sum[i] : x[i] < sum[i]) sum[i] = x[i];
        }
    }
    const double by = as_wide(wide, scale);
    for (int64_t i = 0; i < count && scale != 1.0; i++) {
        volatile double product = sum[i] * by;
        sum[i] = as_wide(wide, product);
    }
    if (accumulate) lab_load(x, dst, out, count);
    for (int64_t i = 0; i < count && accumulate; i++) sum[i] = as_wide(wide, x[i] + sum[i]);
    lab_store(dst, out, sum, count);
}

/* Computes `count` elements of a reduction over all ranks, of their elements from `first` on. */
static void reduce(char *dst, fsdp_dtype out, fsdp_dtype dtype, int world, int64_t first,
                   int64_t count, double scale, int accumulate, fsdp_redop redop, uint64_t salt) {
    const int is_float = fsdp_dtype_is_float(dtype);
    const size_t size = fsdp_dtype_size(out);
    for (int64_t n; count; first += n, count -= n, dst += (size_t)n * size) {
        n = count < CHUNK ? count : CHUNK;
        if (!is_float) reduce_ints(dst, dtype, world, first, n, redop, salt);
        else reduce_floats(dst, out, dtype, world, first, n, scale, accumulate, redop, salt);
    }
}

/* ---- collectives ----------------------------------------------------------------------------- */

static fsdp_coll coll(rank_state *s, int kind, fsdp_dtype dtype, const char *what) {
    fsdp_coll c;
    memset(&c, 0, sizeof c);
    c.kind = (uint8_t)kind;
    c.dtype = c.out_dtype = (uint8_t)dtype;
    c.scale = 1.0;
    c.what = what;
    c.seq = ++s->seq;
    c.src = s->src;
    c.dst = s->dst;
    return c;
}

/* Returns the number of segments. With `several` there are three, one of them empty, with gaps
   between them on both sides. */
static uint32_t make_segs(fsdp_seg *segs, int64_t size, int world, int several, uint64_t *count) {
    int64_t shard = several ? 3 : 0, full = several ? 5 : 0;
    uint32_t num = several ? MAX_SEGS : 1;
    *count = 0;
    for (uint32_t i = 0; i < num; i++) {
        int64_t n = i == 0 ? size : i == 1 ? 0 : size / 2;
        segs[i].shard = shard, segs[i].full = full, segs[i].count = n;
        shard += n + 2, full += n * world + 4;
        *count += (uint64_t)n;
    }
    return num;
}

static int64_t extent(const fsdp_seg *segs, uint32_t num, int world) { /* in elements */
    return segs[num - 1].full + segs[num - 1].count * world;
}

static void gather_case(rank_state *s, fsdp_dtype dtype, int size, int several, int in_place) {
    fsdp_seg segs[MAX_SEGS];
    fsdp_coll c = coll(s, FSDP_OP_ALL_GATHER, dtype, "gather");
    c.num_segs = make_segs(segs, size, s->world, several, &c.count);
    c.segs = segs;
    c.in_place = (uint8_t)in_place;
    size_t bytes = fsdp_dtype_size(dtype),
           used = ((size_t)extent(segs, c.num_segs, s->world) + 8) * bytes;
    memset(s->dst, 0x5A, used);
    memset(s->model, 0x5A, used);
    for (uint32_t i = 0; i < c.num_segs; i++) {
        const fsdp_seg *g = &segs[i];
        fill(s->src, dtype, g->shard, g->count, s->rank, s->seq);
        for (int k = 0; k < s->world; k++)
            put(s->model + (size_t)(g->full + k * g->count) * bytes, dtype, k, g->shard, g->count,
                s->seq);
        if (in_place && g->count)
            memcpy(s->dst + (size_t)(g->full + s->rank * g->count) * bytes,
                   s->src + (size_t)g->shard * bytes, (size_t)g->count * bytes);
    }
    if (in_place) c.src = NULL;
    for (uint32_t i = 0; i < c.num_segs && in_place; i++) /* the in-place block of this rank */
        segs[i].shard += s->rank;
    OK_ON(s, s->comm, s->ops->run(s->comm, &c));
    CHECK_EQ_MEM(s->dst, s->model, used);
    s->cases++;
}

static void gather(rank_state *s) {
    for (int d = 0; d < LENGTH(all_dtypes); d++)
        for (int n = 0; n < LENGTH(sizes); n++)
            for (int v = 0; v < 4; v++)
                if (sizes[n] < BIG || d < 2) gather_case(s, all_dtypes[d], sizes[n], v & 1, v >> 1);
}
TEST_P(conformance, all_gather, backends) { run_big(row, gather); }

static void scatter_case(rank_state *s, fsdp_dtype dtype, fsdp_dtype out, int size, int several,
                         int in_place, double scale, int accumulate) {
    fsdp_seg segs[MAX_SEGS];
    fsdp_coll c = coll(s, FSDP_OP_REDUCE_SCATTER, dtype, "scatter");
    size_t in = fsdp_dtype_size(dtype), bytes = fsdp_dtype_size(out);
    c.num_segs = make_segs(segs, size, s->world, several, &c.count);
    c.segs = segs;
    c.out_dtype = (uint8_t)out;
    c.scale = scale;
    c.accumulate = (uint8_t)accumulate;
    for (uint32_t i = 0; i < c.num_segs && !in_place; i++) /* shards may lie anywhere */
        segs[i].shard += s->rank;
    fill(s->src, dtype, 0, extent(segs, c.num_segs, s->world), s->rank, s->seq);
    if (in_place) { /* one segment, equal dtypes: dst is this rank's block of src */
        c.in_place = 1;
        c.dst = s->src + (size_t)(segs[0].full + s->rank * segs[0].count) * in;
    }
    char *dst = (char *)c.dst;
    size_t used = ((size_t)(segs[c.num_segs - 1].shard + segs[c.num_segs - 1].count) +
                   (in_place ? 0 : 8)) *
                  bytes;
    if (!in_place) fill(dst, out, 0, (int64_t)(used / bytes), s->rank + 100, s->seq);
    memcpy(s->model, dst, used);
    for (uint32_t i = 0; i < c.num_segs; i++)
        reduce(s->model + (size_t)segs[i].shard * bytes, out, dtype, s->world,
               segs[i].full + s->rank * segs[i].count, segs[i].count, scale, accumulate, FSDP_SUM,
               s->seq);
    OK_ON(s, s->comm, s->ops->run(s->comm, &c));
    CHECK_EQ_MEM(dst, s->model, used);
    s->cases++;
}

static void scatter(rank_state *s) {
    int fused = (s->caps.flags & FSDP_CAP_FUSED_REDUCE) != 0;
    double scales[3] = {1.0, 1.0 / s->world, 0.37};
    for (int a = 0; a < LENGTH(floats); a++)
        for (int b = 0; b < LENGTH(floats); b++)
            for (int n = 0; n < LENGTH(sizes); n++)
                for (int v = 0; v < 12; v++) {
                    int plain = a == b && v % 3 == 0 && !(v & 1),
                        edge = sizes[n] == BLOCK - 1 || sizes[n] == BLOCK;
                    if (!fused && !plain) continue;
                    if (a == b ? sizes[n] == BIG && v != 3 : sizes[n] == BIG || (edge && v != 5))
                        continue; /* to save time */
                    scatter_case(s, floats[a], floats[b], sizes[n], v >= 6, 0, scales[v % 3],
                                 v & 1);
                    if (a == b && v < 6 && !(v & 1))
                        scatter_case(s, floats[a], floats[b], sizes[n], 0, 1, scales[v % 3], 0);
                }
    for (int n = 0; n < LENGTH(sizes) - 1; n++)
        for (int v = 0; v < 2 && fused; v++) {
            scatter_case(s, FSDP_I32, FSDP_I32, sizes[n], v, 0, 1.0, 0);
            scatter_case(s, FSDP_I64, FSDP_I64, sizes[n], v, 0, 1.0, 0);
        }
}
TEST_P(conformance, reduce_scatter, backends) { run_big(row, scatter); }

static void all_reduce_case(rank_state *s, fsdp_dtype dtype, int64_t count, fsdp_redop redop,
                            double scale) {
    fsdp_coll c = coll(s, FSDP_OP_ALL_REDUCE, dtype, "reduce");
    size_t bytes = fsdp_dtype_size(dtype), used = (size_t)(count + 8) * bytes;
    c.src = c.dst;
    c.count = (uint64_t)count;
    c.redop = (uint8_t)redop;
    c.scale = scale;
    memset(s->dst, 0x5A, used);
    memset(s->model, 0x5A, used);
    fill(s->dst, dtype, 0, count, s->rank, s->seq);
    reduce(s->model, dtype, dtype, s->world, 0, count, scale, 0, redop, s->seq);
    OK_ON(s, s->comm, s->ops->run(s->comm, &c));
    CHECK_EQ_MEM(s->dst, s->model, used);
    s->cases++;
}

/* Counts around the sizes at which a backend may switch algorithms: a block, 16 KiB, a block per
   rank. */
static void all_reduce(rank_state *s) {
    static const fsdp_dtype dtypes[] = {FSDP_F32,  FSDP_F64, FSDP_F16,
                                        FSDP_BF16, FSDP_I32, FSDP_I64};
    static const int counts[] = {0,    1,    7,    1023, 1025, 2047,  2049,
                                 4095, 4096, 4097, 8192, 8193, 16385, BIG};
    for (int d = 0; d < LENGTH(dtypes); d++)
        for (int n = 0; n < LENGTH(counts); n++)
            for (fsdp_redop redop = FSDP_SUM; redop <= FSDP_MIN; redop++)
                if ((d == 0 && redop == FSDP_SUM) ||
                    (counts[n] < BIG && (counts[n] <= MANY || d == 0 || redop == FSDP_SUM)))
                    all_reduce_case(s, dtypes[d], counts[n], redop, 1.0);
    for (int d = 0; d < LENGTH(floats) && s->caps.flags & FSDP_CAP_FUSED_REDUCE; d++)
        for (int n = 0; n < LENGTH(counts); n++)
            if (counts[n] < BIG) all_reduce_case(s, floats[d], counts[n], FSDP_SUM, 0.37);
}
TEST_P(conformance, all_reduce, backends) { run_big(row, all_reduce); }

static void broadcast_case(rank_state *s, fsdp_dtype dtype, int count, int root) {
    fsdp_coll c = coll(s, FSDP_OP_BROADCAST, dtype, "broadcast");
    size_t used = ((size_t)count + 8) * fsdp_dtype_size(dtype);
    c.src = c.dst;
    c.root = root;
    c.count = (uint64_t)count;
    memset(s->dst, 0x5A, used);
    memset(s->model, 0x5A, used);
    fill(s->dst, dtype, 0, count, s->rank, s->seq);
    fill(s->model, dtype, 0, count, root, s->seq);
    OK_ON(s, s->comm, s->ops->run(s->comm, &c));
    CHECK_EQ_MEM(s->dst, s->model, used);
    s->cases++;
}

static void broadcast(rank_state *s) {
    static const fsdp_dtype dtypes[] = {FSDP_U8, FSDP_BF16, FSDP_F32, FSDP_I64};
    for (int d = 0; d < LENGTH(dtypes); d++)
        for (int n = 0; n < LENGTH(sizes); n++)
            for (int root = 0; root < s->world; root++)
                broadcast_case(s, dtypes[d], sizes[n], root);
}
TEST_P(conformance, broadcast, backends) { run_big(row, broadcast); }

static void all_to_all_case(rank_state *s, fsdp_dtype dtype, size_t count) {
    fsdp_coll c = coll(s, FSDP_OP_ALL_TO_ALL, dtype, "all_to_all");
    size_t bytes = fsdp_dtype_size(dtype), used = (count * (size_t)s->world + 8) * bytes;
    c.count = count;
    memset(s->dst, 0x5A, used);
    memset(s->model, 0x5A, used);
    fill(s->src, dtype, 0, (int64_t)count * s->world, s->rank, s->seq);
    for (int k = 0; k < s->world; k++)
        put(s->model + (size_t)k * count * bytes, dtype, k, (int64_t)((size_t)s->rank * count),
            (int64_t)count, s->seq);
    OK_ON(s, s->comm, s->ops->run(s->comm, &c));
    memset(s->src, 0, used - 8 * bytes); /* src may be overwritten as soon as run returns */
    CHECK_EQ_MEM(s->dst, s->model, used);
    s->cases++;
}

static void all_to_all(rank_state *s) {
    CHECK(s->caps.kinds >> FSDP_OP_ALL_TO_ALL & 1);
    for (int d = 0; d < LENGTH(all_dtypes); d++)
        for (int n = 0; n < LENGTH(sizes); n++)
            if (sizes[n] < BIG || d < 2) all_to_all_case(s, all_dtypes[d], (size_t)sizes[n]);
}
TEST_P(conformance, all_to_all, backends) { run_big(row, all_to_all); }

/* Sends from one member of a comm to another; the other members do nothing. */
static void pair_case(rank_state *s, fsdp_dtype dtype, int count, int from, int to, uint64_t salt) {
    int is_send = s->rank == from;
    if (from == to || (!is_send && s->rank != to)) return;
    fsdp_coll c = coll(s, is_send ? FSDP_OP_SEND : FSDP_OP_RECV, dtype, "pair");
    size_t used = ((size_t)count + 8) * fsdp_dtype_size(dtype);
    c.count = (uint64_t)count;
    c.root = is_send ? to : from;
    memset(s->dst, 0x5A, used);
    memset(s->model, 0x5A, used);
    fill(is_send ? s->src : s->model, dtype, 0, count, from, salt);
    OK_ON(s, s->comm, s->ops->run(s->comm, &c));
    if (is_send) memset(s->src, 0, used); /* src may be overwritten as soon as run returns */
    else CHECK_EQ_MEM(s->dst, s->model, used);
    s->cases++;
}

/* Every rank sends to every other one. Collectives of a group run in between and must not be
   disturbed. */
static void pairs(rank_state *s) {
    CHECK(s->caps.kinds >> FSDP_OP_SEND & s->caps.kinds >> FSDP_OP_RECV & 1);
    for (int n = 0; n < LENGTH(sizes); n++)
        for (int from = 0; from < s->world; from++)
            for (int to = 0; to < s->world; to++) {
                pair_case(s, all_dtypes[n], sizes[n], from, to,
                          (uint64_t)(n * 100 + from * 10 + to));
                if (s->world == 2) gather_case(s, FSDP_F32, 100, 0, 0);
            }
    fsdp_coll c = coll(s, FSDP_OP_SEND, FSDP_F32, "pair");
    c.root = s->rank;
    CHECK_STATUS(s->ops->run(s->comm, &c), FSDP_ERR_INVALID_ARG);
    c.root = s->world;
    CHECK_STATUS(s->ops->run(s->comm, &c), FSDP_ERR_INVALID_ARG);
}
TEST_P(conformance, send_and_recv, backends) { run_big(row, pairs); }

/* Pairs of one comm work at the same time, each at its own pace and with its own counts; then all
   ranks form a ring. Meanwhile the last rank of an odd world waits in a collective. */
static void pairs_at_once(rank_state *s) {
    uint64_t dice = (uint64_t)s->rank + h_seed();
    int first = s->rank / 2 * 2, second = first + 1;
    for (int round = 0; round < 300 && second < s->world; round++) {
        int to = round % 3 ? second : first, count = round * (7 + first) % 1500;
        if (h_rand64(&dice) % 16 == 0) w_sleep_ns((int64_t)(h_rand64(&dice) % 300000));
        pair_case(s, FSDP_I32, count, first + second - to, to, (uint64_t)(round * 10 + first));
    }
    s->seq = 1000; /* the values of a case depend on it */
    gather_case(s, FSDP_F32, 50, 0, 0);
    for (int round = 0; round < 20; round++)
        for (int from = 0; from < s->world; from++)
            pair_case(s, FSDP_I64, 10 + round, from, (from + 1) % s->world, (uint64_t)from);
    gather_case(s, FSDP_F32, 50, 0, 0);
}
TEST_P(conformance, pairs_of_one_comm_at_once, backends) { run(row, pairs_at_once); }

static void unlike_pairs(rank_state *s) {
    CHECK(s->caps.kinds >> FSDP_OP_SEND & s->caps.kinds >> FSDP_OP_RECV & 1);
    if (s->world < 2) return;
    fsdp_coll c = coll(s, s->rank ? FSDP_OP_RECV : FSDP_OP_SEND, FSDP_F32, "pair");
    c.root = s->rank ? 0 : 1;
    c.count = s->rank ? 70000 : 50000; /* the larger count would overrun the smaller buffer */
    if (s->rank > 1) c = coll(s, FSDP_OP_ALL_GATHER, FSDP_F32, "none");
    CHECK_STATUS(s->ops->run(s->comm, &c), FSDP_ERR_MISMATCH);
    CHECK_MSG(strstr(s->ops->error_text(s->comm), "elements of f32"), "%s",
              s->ops->error_text(s->comm));
}
TEST_P(conformance, unlike_send_and_recv_are_a_mismatch, backends) { run_big(row, unlike_pairs); }

/* ---- the completion contract ----------------------------------------------------------------- */

static void gather_ints(rank_state *s, fsdp_comm *comm, int index, int size, int32_t *src,
                        int32_t *dst, int32_t count, int32_t base) {
    fsdp_seg seg = {0, 0, count};
    fsdp_coll c = coll(s, FSDP_OP_ALL_GATHER, FSDP_I32, "ints");
    c.src = src, c.dst = dst, c.segs = &seg, c.num_segs = 1, c.count = (uint64_t)count;
    for (int32_t i = 0; i < count; i++) src[i] = base + index * 1000 + i;
    OK_ON(s, comm, s->ops->run(comm, &c));
    for (int32_t i = 0; i < count; i++) src[i] = -1; /* allowed as soon as run returns */
    for (int k = 0; k < size; k++)
        for (int32_t i = 0; i < count; i++) CHECK_EQ_INT(dst[k * count + i], base + k * 1000 + i);
}

static void overwrite(rank_state *s) {
    int32_t *src = (int32_t *)(void *)s->src, *dst = (int32_t *)(void *)s->dst;
    uint64_t dice = (uint64_t)s->rank + h_seed();
    for (int32_t round = 0; round < 150; round++) {
        int32_t count = 1 + round * 37 % 900;
        if (h_rand64(&dice) % 8 == 0)
            w_sleep_ns((int64_t)(h_rand64(&dice) % 300000)); /* so that ranks arrive in any order */
        gather_ints(s, s->comm, s->rank, s->world, src, dst, count, round);

        fsdp_seg seg = {0, 0, count};
        fsdp_coll c = coll(s, FSDP_OP_REDUCE_SCATTER, FSDP_I32, "ints");
        c.segs = &seg, c.num_segs = 1, c.count = (uint64_t)count;
        for (int32_t i = 0; i < count * s->world; i++) src[i] = round + i;
        OK_ON(s, s->comm, s->ops->run(s->comm, &c));
        for (int32_t i = 0; i < count * s->world; i++) src[i] = -1;
        for (int32_t i = 0; i < count; i++)
            CHECK_EQ_INT(dst[i], s->world * (round + s->rank * count + i));

        c = coll(s, FSDP_OP_BROADCAST, FSDP_I32, "ints");
        c.count = (uint64_t)count, c.root = round % s->world, c.src = c.dst;
        for (int32_t i = 0; i < count; i++) dst[i] = s->rank + i;
        OK_ON(s, s->comm, s->ops->run(s->comm, &c));
        CHECK(dst[count - 1] == c.root + count - 1);
        for (int32_t i = 0; i < count; i++) dst[i] = -1;

        c = coll(s, FSDP_OP_ALL_REDUCE, FSDP_I32, "ints");
        c.count = (uint64_t)count * 9, c.src = c.dst;
        for (int32_t i = 0; i < count * 9; i++) dst[i] = round + s->rank;
        OK_ON(s, s->comm, s->ops->run(s->comm, &c));
        CHECK_EQ_INT(dst[count * 9 - 1], s->world * round + s->world * (s->world - 1) / 2);
        for (int32_t i = 0; i < count * 9; i++) dst[i] = -1;
    }
}
TEST_P(conformance, source_may_be_overwritten, backends) { run(row, overwrite); }

/* ---- groups ---------------------------------------------------------------------------------- */

static fsdp_comm *split(rank_state *s, fsdp_comm *parent, int color, const int32_t *ranks, int size,
                        const char *name) {
    fsdp_comm *out = (fsdp_comm *)(void *)s;
    fsdp_group g;
    memset(&g, 0, sizeof g);
    g.color = color, g.size = size, g.ranks = ranks, g.name = name, g.index = -1;
    for (int i = 0; i < size; i++)
        if (ranks[i] == s->rank) g.index = i;
    OK_ON(s, parent, s->ops->split(parent, &g, &out));
    CHECK((out == NULL) == (color < 0));
    return out;
}

static void groups(rank_state *s) {
    int32_t *src = (int32_t *)(void *)s->src, *dst = (int32_t *)(void *)s->dst, ranks[MAX_WORLD],
            all[MAX_WORLD], num = 0;
    for (int k = s->rank % 2; k < s->world; k += 2) ranks[num++] = k;
    for (int k = 0; k < s->world; k++) all[k] = s->world - 1 - k;
    int index = s->rank / 2;
    fsdp_comm *parity = split(s, s->comm, s->rank % 2, ranks, num, "parity");
    gather_ints(s, parity, index, num, src, dst, 5, 1);
    gather_ints(s, s->comm, s->rank, s->world, src, dst, 6, 2);

    fsdp_comm *backwards = split(s, s->comm, 0, all, s->world,
                                 "backwards"); /* reversed order of ranks */
    gather_ints(s, backwards, s->world - 1 - s->rank, s->world, src, dst, 7, 3);

    fsdp_comm *first = split(s, s->comm, s->rank ? -1 : 3, all + s->world - 1, s->rank ? 0 : 1,
                             "first"); /* a group of one rank */
    if (first) gather_ints(s, first, 0, 1, src, dst, 8, 4);

    /* A group of a group. The other group does the same at the same time, at its own pace. */
    fsdp_comm *inner = split(s, parity, index % 2, ranks + index, 1, "inner");
    gather_ints(s, inner, 0, 1, src, dst, 9, 5);
    fsdp_comm *same = split(s, parity, 7, ranks, num, "same");
    for (int32_t i = 0; i < 20; i++) {
        gather_ints(s, i & 1 ? same : parity, index, num, src, dst, 9 + i, 6 + i);
        if (i % 7 == s->rank) gather_ints(s, inner, 0, 1, src, dst, 3, 8);
    }
    s->ops->close(same);
    s->ops->close(inner);
    if (first) s->ops->close(first);
    s->ops->close(parity);
    gather_ints(s, backwards, s->world - 1 - s->rank, s->world, src, dst, 10, 9);
    s->ops->close(backwards);
    gather_ints(s, s->comm, s->rank, s->world, src, dst, 11, 10);
}
TEST_P(conformance, groups, backends) { run(row, groups); }

static void many_groups(rank_state *s) {
    int32_t all[MAX_WORLD];
    for (int k = 0; k < s->world; k++) all[k] = k;
    int32_t many = s->ops == fsdp_shm_comm_ops() ? 300 : 50; /* sockets take time to connect */
    for (int32_t i = 0; i < many; i++) {
        fsdp_comm *group = split(s, s->comm, 0, all, s->world, "again");
        gather_ints(s, group, s->rank, s->world, (int32_t *)(void *)s->src,
                    (int32_t *)(void *)s->dst, 2, i);
        s->ops->close(group);
    }
}
TEST_P(conformance, groups_come_and_go, backends) { run(row, many_groups); }

static void bad_groups(rank_state *s) {
    int32_t twice[2] = {s->rank, s->rank}, outside[2] = {s->rank, 99};
    fsdp_group g = {0, 0, 2, 0, twice, "twice"};
    fsdp_comm *out = NULL;
    if (s->rank > 0) return;
    CHECK_STATUS(s->ops->split(s->comm, &g, &out), FSDP_ERR_INVALID_ARG);
    g.ranks = outside;
    CHECK_STATUS(s->ops->split(s->comm, &g, &out), FSDP_ERR_INVALID_ARG);
    g.size = 1, g.index = 1;
    CHECK_STATUS(s->ops->split(s->comm, &g, &out), FSDP_ERR_INVALID_ARG);
    CHECK(out == NULL && *s->ops->error_text(s->comm));
}
TEST_P(conformance, a_bad_group_is_refused, backends) { run(row, bad_groups); }

/* ---- two comms at once ----------------------------------------------------------------------- */

typedef struct {
    rank_state s;
    fsdp_comm *comm;
    int32_t *src, *dst;
    int32_t salt;
} lane;

static void *lane_main(void *arg) {
    lane *l = (lane *)arg;
    for (int32_t i = 0; i < 150; i++)
        gather_ints(&l->s, l->comm, l->s.rank, l->s.world, l->src, l->dst, 50 + i, l->salt + i);
    return NULL;
}

static void lanes(rank_state *s) {
    int32_t all[MAX_WORLD];
    lane l[2];
    pthread_t thread[2];
    if (s->caps.comm_threads < 2) SKIP("one lane");
    for (int k = 0; k < s->world; k++) all[k] = k;
    for (int i = 0; i < 2; i++) {
        l[i].s = *s;
        l[i].comm = i ? split(s, s->comm, 0, all, s->world, "lane") : s->comm;
        l[i].src = (int32_t *)(void *)(s->src + s->arena / 2 * (size_t)i);
        l[i].dst = (int32_t *)(void *)(s->dst + s->arena / 2 * (size_t)i);
        l[i].salt = 100000 * i;
    }
    for (int i = 0; i < 2; i++) CHECK_EQ_INT(pthread_create(&thread[i], NULL, lane_main, &l[i]), 0);
    for (int i = 0; i < 40; i++) { /* blocks are allocated and freed meanwhile */
        void *p, *q;
        OK_ON(s, s->comm, s->ops->alloc(s->comm, 100, &p));
        OK_ON(s, s->comm, s->ops->alloc(s->comm, 5000, &q));
        s->ops->free(s->comm, i & 1 ? p : q, i & 1 ? 100 : 5000);
        s->ops->free(s->comm, i & 1 ? q : p, i & 1 ? 5000 : 100);
    }
    for (int i = 0; i < 2; i++) pthread_join(thread[i], NULL);
    s->ops->close(l[1].comm);
}
TEST_P(conformance, two_comms_from_two_threads, backends) { run(row, lanes); }

/* ---- memory ---------------------------------------------------------------------------------- */

static void memory(rank_state *s) {
    enum { BLOCKS = 40 };
    char *block[BLOCKS];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < BLOCKS; i++) {
            size_t size = (size_t)i * 997;
            OK_ON(s, s->comm, s->ops->alloc(s->comm, size, (void **)&block[i]));
            CHECK(block[i] != NULL && (uintptr_t)block[i] % 64 == 0);
            for (size_t b = 0; b < size; b++)
                CHECK_MSG(block[i][b] == 0, "byte %zu of a new block of %zu", b, size);
            memset(block[i], 0xFF, size);
        }
        for (int i = 0; i < BLOCKS;
             i++) { /* every block can be a source, wherever the others are */
            int at = (i * 7 + round) % BLOCKS;
            if (at > 4)
                gather_ints(s, s->comm, s->rank, s->world, (int32_t *)(void *)block[at],
                            (int32_t *)(void *)s->dst, 20, i);
            s->ops->free(s->comm, block[at], (size_t)at * 997);
        }
    }
    s->ops->free(s->comm, NULL, 0);
}
TEST_P(conformance, memory_is_zero_and_shared, backends) { run(row, memory); }

/* Every rank has allocated different sizes, a different number of blocks, in another order, and
   uses another offset. Each kind of collective must still find its peers' data. Blocks are freed
   and allocated again, so that addresses change. */
static void unlike_memory(rank_state *s) {
    char *extra[MAX_WORLD], *src = s->src, *dst = s->dst;
    for (int round = 0; round < 8; round++) {
        int me = (s->rank + round) % s->world, extras = me;
        size_t skip = (size_t)me * 64, arena = s->arena + (size_t)me * 9000;
        for (int i = 0; i < extras; i++)
            OK_ON(s, s->comm, s->ops->alloc(s->comm, 100 + (size_t)i * 5000, (void **)&extra[i]));
        char **first = me & 1 ? &s->dst : &s->src, **second = me & 1 ? &s->src : &s->dst;
        OK_ON(s, s->comm, s->ops->alloc(s->comm, arena + skip, (void **)first));
        OK_ON(s, s->comm, s->ops->alloc(s->comm, arena, (void **)second));
        *first += skip;
        for (int several = 0; several < 2; several++) {
            gather_case(s, FSDP_F32, 700, several, 0);
            gather_case(s, FSDP_U8, 3000, several, 1);
            scatter_case(s, FSDP_F32, FSDP_F32, 700, several, 0, 1.0, 0);
        }
        all_reduce_case(s, FSDP_F32, 1000, FSDP_SUM, 1.0); /* 4,000 and 20,000 bytes */
        all_reduce_case(s, FSDP_F32, 5000, FSDP_MAX, 1.0);
        broadcast_case(s, FSDP_F32, 2000, round % s->world);
        all_to_all_case(s, FSDP_F32, 800);
        for (int from = 0; from < s->world; from++)
            pair_case(s, FSDP_F32, 900, from, (from + 1 + round) % s->world, (uint64_t)round);
        *first -= skip;
        s->ops->free(s->comm, s->src, arena + (first == &s->src ? skip : 0));
        s->ops->free(s->comm, s->dst, arena + (first == &s->dst ? skip : 0));
        for (int i = 0; i < extras; i++) s->ops->free(s->comm, extra[i], 100 + (size_t)i * 5000);
    }
    s->src = src, s->dst = dst;
}
TEST_P(conformance, ranks_allocate_differently, backends) { run(row, unlike_memory); }

static void foreign(rank_state *s) {
    static char outside[4096];
    fsdp_seg seg = {0, 0, 16};
    for (int v = 0; v < 5 && s->world > 1; v++) {
        fsdp_coll c = coll(s,
                           v == 1   ? FSDP_OP_REDUCE_SCATTER
                           : v == 2 ? FSDP_OP_ALL_REDUCE
                           : v == 3 ? FSDP_OP_BROADCAST
                                    : FSDP_OP_ALL_GATHER,
                           FSDP_F32, "foreign");
        c.segs = &seg, c.num_segs = 1, c.count = 16;
        c.src = v == 4 ? s->src + s->arena - 8
                       : outside; /* 4: begins inside the block and ends after it */
        if (v == 2 || v == 3) c.src = c.dst = outside;
        CHECK_STATUS(s->ops->run(s->comm, &c), FSDP_ERR_INVALID_ARG);
        CHECK_MSG(strstr(s->ops->error_text(s->comm), "foreign"), "%s",
                  s->ops->error_text(s->comm));
    }
    gather_case(s, FSDP_F32, 100, 0, 0); /* the comm still works */
}
TEST_P(conformance, memory_of_others_is_refused, backends) { run(row, foreign); }

static void bad_arguments(rank_state *s) {
    fsdp_seg seg = {0, -4, 4};
    fsdp_coll c = coll(s, FSDP_OP_ALL_GATHER, FSDP_F32, "bad");
    c.segs = &seg, c.num_segs = 1, c.count = 4;
    CHECK_STATUS(s->ops->run(s->comm, &c), FSDP_ERR_INVALID_ARG);
    seg.full = 0;
    c.dtype = 77;
    CHECK_STATUS(s->ops->run(s->comm, &c), FSDP_ERR_INVALID_ARG);
    c = coll(s, FSDP_OP_BROADCAST, FSDP_F32, "bad");
    c.root = s->world;
    CHECK_STATUS(s->ops->run(s->comm, &c), FSDP_ERR_INVALID_ARG);
    c = coll(s, FSDP_OP_ALL_REDUCE, FSDP_U8, "bad");
    CHECK_STATUS(s->ops->run(s->comm, &c), FSDP_ERR_UNSUPPORTED);
    c = coll(s, FSDP_OP_ALL_REDUCE, FSDP_I32, "bad");
    c.scale = 0.5;
    CHECK_STATUS(s->ops->run(s->comm, &c), FSDP_ERR_UNSUPPORTED);
    c.dtype = FSDP_F32; /* c.count is 0 */
    CHECK_STATUS(s->ops->run(s->comm, &c),
                 s->caps.flags & FSDP_CAP_FUSED_REDUCE ? FSDP_OK : FSDP_ERR_UNSUPPORTED);
    c = coll(s, FSDP_OP_COPY, FSDP_F32, "bad");
    CHECK_STATUS(s->ops->run(s->comm, &c), FSDP_ERR_UNSUPPORTED);
    gather_case(s, FSDP_F32, 100, 0, 0);
}
TEST_P(conformance, bad_arguments_change_nothing, backends) { run(row, bad_arguments); }

/* ---- failure --------------------------------------------------------------------------------- */

static fsdp_status one_sum(rank_state *s, fsdp_comm *comm, uint64_t fingerprint, uint64_t count) {
    fsdp_coll c = coll(s, FSDP_OP_ALL_REDUCE, FSDP_F32, "unit.3");
    c.count = count;
    c.src = c.dst;
    c.fingerprint = fingerprint;
    return s->ops->run(comm, &c);
}

static void disagree(rank_state *s) {
    int odd = s->rank == s->world - 1 && s->world > 1;
    const char *text;
    OK_ON(s, s->comm, one_sum(s, s->comm, 5, 10));
    if (s->world == 1) return;
    CHECK_STATUS(one_sum(s, s->comm, odd ? 6 : 5, 10), FSDP_ERR_MISMATCH);
    text = s->ops->error_text(s->comm);
    CHECK_MSG(strstr(text, "unit.3") && strstr(text, "all_reduce"), "%s", text);
    CHECK_STATUS(one_sum(s, s->comm, 5, 10), FSDP_ERR_MISMATCH); /* the failure is permanent */
}
TEST_P(conformance, disagreement_is_a_mismatch, backends) { run(row, disagree); }

static void miscount(rank_state *s) {
    if (s->world == 1) return;
    CHECK_STATUS(one_sum(s, s->comm, 5, s->rank == 0 ? 11 : 10), FSDP_ERR_MISMATCH);
}
TEST_P(conformance, another_count_is_a_mismatch, backends) { run(row, miscount); }

/* Peers read a shard at the same offset on all ranks: another offset is a mismatch. */
static void misplace(rank_state *s) {
    fsdp_coll c = coll(s, FSDP_OP_ALL_GATHER, FSDP_F32, "gather");
    fsdp_seg seg = {0, 0, 10};
    seg.shard = s->rank == 0;
    c.segs = &seg, c.num_segs = 1, c.count = 10;
    CHECK_STATUS(s->ops->run(s->comm, &c), s->world > 1 ? FSDP_ERR_MISMATCH : FSDP_OK);
}
TEST_P(conformance, another_place_of_a_shard_is_a_mismatch, backends) { run(row, misplace); }

static void aborted(rank_state *s) {
    OK_ON(s, s->comm, one_sum(s, s->comm, 0, 10));
    if (s->ops->poll) CHECK_OK(s->ops->poll(s->comm));
    h_mark(0);
    if (s->rank == s->world - 1) {
        h_await_marks(0, s->world);
        w_sleep_ns(20000000); /* so that the others most likely sleep */
        s->ops->abort(s->comm, FSDP_ERR_CORRUPT, "the data ran out");
        s->ops->abort(s->comm, FSDP_ERR_IO, "too late");
    }
    int64_t start = h_calm_ms();
    for (int i = 0; i < 2; i++) {
        CHECK_STATUS(one_sum(s, s->comm, 0, 10), FSDP_ERR_CORRUPT);
        CHECK_MSG(strstr(s->ops->error_text(s->comm), "the data ran out"), "%s",
                  s->ops->error_text(s->comm));
    }
    CHECK(h_calm_ms() - start < 1000);
    if (s->ops->poll) CHECK_STATUS(s->ops->poll(s->comm), FSDP_ERR_CORRUPT);
}
TEST_P(conformance, abort_reaches_all_ranks, backends) { run(row, aborted); }

static void absent(rank_state *s) {
    int64_t start = h_now_ms(), calm = h_calm_ms(), deadline = s->start->timeout_ns / 1000000;
    OK_ON(s, s->comm, one_sum(s, s->comm, 0, 10));
    if (s->world == 1) return;
    if (s->rank == s->world - 1) { /* does not take part, but keeps the comm open */
        while (s->ops->poll && !s->ops->poll(s->comm) && h_calm_ms() - calm < 5000)
            w_sleep_ns(5000000);
        CHECK_STATUS(one_sum(s, s->comm, 0, 10), FSDP_ERR_TIMEOUT);
    } else {
        CHECK_STATUS(one_sum(s, s->comm, 0, 10), FSDP_ERR_TIMEOUT);
        CHECK(h_now_ms() - start >= deadline);
    }
    CHECK(h_calm_ms() - calm < deadline + 1500);
    char name[32];
    snprintf(name, sizeof name, "rank %d", s->world - 1);
    CHECK_MSG(strstr(s->ops->error_text(s->comm), name), "%s", s->ops->error_text(s->comm));
}
TEST_P(conformance, an_absent_rank_is_a_timeout, backends) {
    /* This is also the deadline of open, which takes longer over sockets. */
    run_with(row, absent, row->ops == fsdp_shm_comm_ops ? 300 : 1500, SMALL_ARENA);
}

static void leaves(rank_state *s) {
    OK_ON(s, s->comm, one_sum(s, s->comm, 0, 10));
    if (s->rank == s->world - 1) return; /* closes */
    int64_t start = h_calm_ms();
    CHECK_STATUS(one_sum(s, s->comm, 0, 10), FSDP_ERR_PEER_LOST);
    CHECK(h_calm_ms() - start < 1000);
    char name[32];
    snprintf(name, sizeof name, "rank %d", s->world - 1);
    CHECK_MSG(strstr(s->ops->error_text(s->comm), name), "%s", s->ops->error_text(s->comm));
}
TEST_P(conformance, a_rank_that_closes_is_lost, backends) { run(row, leaves); }

/* ---- nothing is left behind ------------------------------------------------------------------ */

static int64_t live_bytes;

static void *counting_alloc(size_t size, size_t align, void *user) {
    __atomic_fetch_add(&live_bytes, (int64_t)size, __ATOMIC_SEQ_CST);
    return w_alloc(size, align, user);
}
static void counting_free(void *ptr, size_t size, void *user) {
    __atomic_fetch_sub(&live_bytes, (int64_t)size, __ATOMIC_SEQ_CST);
    w_free(ptr, size, user);
}

static int count_shared_maps(void) { /* maps of files only: the heap may grow */
    FILE *f = fopen("/proc/self/maps", "r");
    char line[512];
    int n = 0;
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f)) n += strstr(line, "rw-s") != NULL;
    fclose(f);
    return n;
}

static void cycle_once(int rank, launch *l) {
    fsdp_boot boot = boot_of(l, rank);
    rank_state s;
    int32_t all[MAX_WORLD];
    memset(&s, 0, sizeof s);
    boot.allocator.alloc = counting_alloc;
    boot.allocator.free = counting_free;
    s.rank = rank, s.world = l->row->world, s.ops = l->row->ops();
    for (int k = 0; k < s.world; k++) all[k] = k;
    OK_ON(&s, NULL, s.ops->open(&boot, &s.caps, &s.comm));
    fsdp_comm *group = split(&s, s.comm, 0, all, s.world, "group");
    OK_ON(&s, s.comm, s.ops->alloc(s.comm, 10000, (void **)&s.src));
    OK_ON(&s, s.comm, s.ops->alloc(s.comm, 60000, (void **)&s.dst));
    gather_ints(&s, s.comm, rank, s.world, (int32_t *)(void *)s.src, (int32_t *)(void *)s.dst, 20,
                1);
    gather_ints(&s, group, rank, s.world, (int32_t *)(void *)s.src, (int32_t *)(void *)s.dst, 20,
                2);
    s.ops->free(s.comm, s.src, 10000); /* closing the world frees the other block */
    s.ops->close(group);
    s.ops->close(s.comm);
}

/* Returns the number of threads of this process. Threads that are ending get a moment to do so. */
static int settled_threads(int most) {
    int now = h_entries("/proc/self/task");
    for (int i = 0; i < 200 && (now > most || (most == INT_MAX && i < 10)); i++) {
        w_sleep_ns(5000000);
        now = h_entries("/proc/self/task");
    }
    return now;
}

static void cycles(int rank, int world, void *arg) {
    launch *l = (launch *)arg;
    int descriptors = 0, maps = 0, threads = 0;
    int many = l->row->ops == fsdp_shm_comm_ops || world == 2 ? 100 : 20;
    if (strstr(l->row->name, "nccl/")) many = 5; /* each cycle takes a second on a GPU */
    for (int i = 0; i < many; i++) {
        cycle_once(rank, l);
        if (i == 1) descriptors = h_entries("/proc/self/fd"), maps = count_shared_maps();
        if (i == 1) threads = settled_threads(INT_MAX);
    }
    if (l->row->threads) return; /* other ranks of this process may still be busy */
    CHECK_EQ_INT(h_entries("/proc/self/fd"), descriptors);
    CHECK(settled_threads(threads) <= threads);
    CHECK_EQ_INT(count_shared_maps(), maps);
    CHECK_EQ_INT(live_bytes, 0);
}

static void first_cycle(int rank, int world, void *arg) {
    (void)world;
    cycle_once(rank, (launch *)arg);
}

TEST_P(conformance, cycles_leak_nothing, backends) {
    launch *l = (launch *)lab_zeros(1, sizeof *l);
    l->row = row;
    l->threads.size = row->world;
    l->timeout_ns = 30000000000;
    snprintf(l->job, sizeof l->job, "cycles-%d", (int)getpid());
    if (row->threads) start_ranks(l, first_cycle); /* a driver keeps descriptors open */
    int descriptors = h_entries("/proc/self/fd");
    start_ranks(l, cycles);
    if (row->threads) CHECK_EQ_INT(h_entries("/proc/self/fd"), descriptors);
    CHECK_EQ_INT(live_bytes, 0);
    free(l);
}
