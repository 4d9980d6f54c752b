/* test_gloo.c - the Gloo backend without network faults: the bytes that it sends, its allocations,
   unaligned buffers, the data that still arrives when a rank leaves; and that every failure of the
   transport and every disagreement ends in an error on every rank.

   The backend calls the functions of this file, which count the calls of the transport, fail on
   demand, and otherwise call the real ones. conformance.c has the contract of all backends,
   test_gloo_faults.c the faults of the network and of processes.

   SPDX-License-Identifier: MIT */
#define TAGS NO(SHM) | GLOO
#include "harness.h"
#ifdef FSDP_BACKEND_GLOO
#define fsdp_gloo_error           seen_gloo_error
#define fsdp_gloo_device_create   seen_gloo_device_create
#define fsdp_gloo_device_destroy  seen_gloo_device_destroy
#define fsdp_gloo_context_create  seen_gloo_context_create
#define fsdp_gloo_context_connect seen_gloo_context_connect
#define fsdp_gloo_context_destroy seen_gloo_context_destroy
#define fsdp_gloo_context_overlap seen_gloo_context_overlap
#define fsdp_gloo_buffer_create   seen_gloo_buffer_create
#define fsdp_gloo_buffer_destroy  seen_gloo_buffer_destroy
#define fsdp_gloo_send            seen_gloo_send
#define fsdp_gloo_recv            seen_gloo_recv
#define fsdp_gloo_wait_send       seen_gloo_wait_send
#define fsdp_gloo_wait_recv       seen_gloo_wait_recv
#endif
#define LIBRARY_WHOLE
#include "library.c"
#include "lab.h"
#include <sys/syscall.h> /* SYS_gettid */

#ifndef FSDP_BACKEND_GLOO
TEST(gloo, all) { SKIP("the Gloo backend is not compiled in: libgloo-dev, make gloo"); }
#else

/* ---- the transport, seen and disturbed ------------------------------------------------------- */

enum {
    NOTHING,
    DEVICE_CREATE,
    CONTEXT_CREATE,
    CONNECT,
    BUFFER_CREATE,
    SEND,
    RECV,
    WAIT_SEND,
    WAIT_RECV,
    CALLS
};

/* One rank's use of the transport; the call that fails, and how. */
typedef struct {
    uint64_t bytes;                     /* passed to send */
    int64_t devices, contexts, buffers; /* open now */
    int64_t overlaps, overlapped;       /* now; since the start */
    int64_t calls[CALLS];               /* since the start */
    int fail, with, failed, is_fake;    /* is_fake: there is no transport */
    /* number of the call of `fail` that fails, from 1 */
    int64_t fail_at;
    size_t least_buffer, most_buffer, received; /* buffer sizes in bytes; bytes received */
} transport;
static __thread transport *mine; /* transport of the rank that this thread works for */
static __thread int was_injected;

#define REAL(name) __asm__(#name)
const char *real_error(void) REAL(fsdp_gloo_error);
int real_device_create(fsdp_gloo_device **out) REAL(fsdp_gloo_device_create);
void real_device_destroy(fsdp_gloo_device *device) REAL(fsdp_gloo_device_destroy);
int real_context_create(fsdp_gloo_device *device, int index, int size, fsdp_gloo_context **out)
    REAL(fsdp_gloo_context_create);
int real_context_connect(fsdp_gloo_context *context, int peer, int socket)
    REAL(fsdp_gloo_context_connect);
void real_context_destroy(fsdp_gloo_context *context) REAL(fsdp_gloo_context_destroy);
void real_context_overlap(fsdp_gloo_context *context, int begins) REAL(fsdp_gloo_context_overlap);
int real_buffer_create(fsdp_gloo_context *context, void *memory, size_t bytes,
                       fsdp_gloo_buffer **out) REAL(fsdp_gloo_buffer_create);
void real_buffer_destroy(fsdp_gloo_buffer *buffer) REAL(fsdp_gloo_buffer_destroy);
int real_send(fsdp_gloo_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t bytes)
    REAL(fsdp_gloo_send);
int real_recv(fsdp_gloo_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t bytes)
    REAL(fsdp_gloo_recv);
int real_wait_send(fsdp_gloo_buffer *buffer, int64_t timeout_ms) REAL(fsdp_gloo_wait_send);
int real_wait_recv(fsdp_gloo_buffer *buffer, int64_t timeout_ms) REAL(fsdp_gloo_wait_recv);

/* Counts a call. Returns 0, or the error with which it must fail. Two threads of a rank may be
   here. */
static int disturbed(int call) {
    was_injected = 0;
    if (!mine) return 0;
    int64_t n = __atomic_add_fetch(&mine->calls[call], 1, __ATOMIC_SEQ_CST);
    if (mine->fail != call || n != mine->fail_at) return 0;
    was_injected = mine->failed = 1;
    return mine->with;
}

static void alive(int64_t *objects, int change) {
    (void)__atomic_add_fetch(objects, change, __ATOMIC_SEQ_CST);
}

const char *fsdp_gloo_error(void) { return was_injected ? "injected" : real_error(); }

int fsdp_gloo_device_create(fsdp_gloo_device **out) {
    int result = disturbed(DEVICE_CREATE);
    if (!result) result = real_device_create(out);
    if (!result && mine) alive(&mine->devices, 1);
    return result;
}

void fsdp_gloo_device_destroy(fsdp_gloo_device *device) {
    if (mine && device) alive(&mine->devices, -1);
    real_device_destroy(device);
}

int fsdp_gloo_context_create(fsdp_gloo_device *device, int index, int size,
                             fsdp_gloo_context **out) {
    int result = disturbed(CONTEXT_CREATE);
    if (!result) result = real_context_create(device, index, size, out);
    if (!result && mine) alive(&mine->contexts, 1);
    return result;
}

int fsdp_gloo_context_connect(fsdp_gloo_context *context, int peer, int socket) {
    int result = disturbed(CONNECT);
    if (result) (void)close(socket);
    return result ? result : real_context_connect(context, peer, socket);
}

void fsdp_gloo_context_destroy(fsdp_gloo_context *context) {
    if (mine && context) alive(&mine->contexts, -1);
    real_context_destroy(context);
}

void fsdp_gloo_context_overlap(fsdp_gloo_context *context, int begins) {
    if (mine) alive(&mine->overlaps, begins ? 1 : -1);
    if (mine && begins) alive(&mine->overlapped, 1);
    real_context_overlap(context, begins);
}

int fsdp_gloo_buffer_create(fsdp_gloo_context *context, void *memory, size_t bytes,
                            fsdp_gloo_buffer **out) {
    int result = disturbed(BUFFER_CREATE);
    if (mine && (!mine->least_buffer || bytes < mine->least_buffer)) mine->least_buffer = bytes;
    if (mine && bytes > mine->most_buffer) mine->most_buffer = bytes;
    if (mine && mine->is_fake) return FSDP_GLOO_OK;
    if (!result) result = real_buffer_create(context, memory, bytes, out);
    if (!result && mine) alive(&mine->buffers, 1);
    return result;
}

void fsdp_gloo_buffer_destroy(fsdp_gloo_buffer *buffer) {
    if (mine && buffer) alive(&mine->buffers, -1);
    real_buffer_destroy(buffer);
}

int fsdp_gloo_send(fsdp_gloo_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t bytes) {
    int result = disturbed(SEND);
    if (mine) (void)__atomic_add_fetch(&mine->bytes, bytes, __ATOMIC_SEQ_CST);
    return result ? result : real_send(buffer, peer, slot, offset, bytes);
}

int fsdp_gloo_recv(fsdp_gloo_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t bytes) {
    int result = disturbed(RECV);
    if (mine) mine->received = bytes;
    if (mine && mine->is_fake) return FSDP_GLOO_OK;
    return result ? result : real_recv(buffer, peer, slot, offset, bytes);
}

int fsdp_gloo_wait_send(fsdp_gloo_buffer *buffer, int64_t timeout_ms) {
    int result = disturbed(WAIT_SEND);
    return result ? result : real_wait_send(buffer, timeout_ms);
}

int fsdp_gloo_wait_recv(fsdp_gloo_buffer *buffer, int64_t timeout_ms) {
    int result = disturbed(WAIT_RECV);
    return result ? result : real_wait_recv(buffer, timeout_ms);
}

/* ---- ranks ----------------------------------------------------------------------------------- */

enum { MAX_WORLD = 20, MAX_SEGS = 6, GUARD = 64 };

typedef struct {
    const char *name;
    int threads, world;
    int near; /* ranks that share memory; 0: all of them, so that nothing uses the transport */
} ranks;
static const ranks all_ranks[] = {
    {"processes/W=1", 0, 1, 1}, {"processes/W=2", 0, 2, 1}, {"processes/W=3", 0, 3, 1},
    {"processes/W=4", 0, 4, 1}, {"threads/W=1", 1, 1, 1},   {"threads/W=2", 1, 2, 1},
    {"threads/W=3", 1, 3, 1},   {"threads/W=4", 1, 4, 1},   {"near/W=3", 0, 3, 0},
    {"mixed/2+1", 0, 3, 2},     {"mixed/2+2", 0, 4, 2},
};

static void be_near(int near) {
    char text[16];
    snprintf(text, sizeof text, "%d", near);
    if (near) setenv("FSDP_GLOO_NEAR", text, 1);
    else unsetenv("FSDP_GLOO_NEAR");
}
__attribute__((constructor)) static void nobody_is_near(void) { be_near(1); }

/* The default number of worker threads, by hosts and cores. The host "" is unknown, and so differs
   from every other one. */
static const struct {
    const char *name, *hosts[4];
    int cores[4], lanes;
} clusters[] = {{"one_host", {"a", "a", "a", "a"}, {64, 64, 64, 64}, 0},
                {"alone", {"a"}, {64}, 0},
                {"two_hosts", {"a", "a", "b", "b"}, {3, 3, 8, 8}, 1},
                {"two_cores_for_each", {"a", "a", "b", "b"}, {4, 4, 4, 4}, 2},
                {"one_rank_each", {"a", "b", "c"}, {2, 2, 2}, 2},
                {"one_core", {"a", "b", "c"}, {2, 1, 2}, 1},
                {"uneven", {"a", "b", "b", "b"}, {2, 5, 5, 5}, 1},
                {"not_known", {"a", "", "a"}, {8, 8, 8}, 2},
                {"all_not_known", {"", "", ""}, {4, 4, 4}, 1}};
TEST_P(gloo, comm_threads_by_hosts, clusters) {
    fsdpi_local_shown all[4];
    int size = 0;
    memset(all, 0, sizeof all);
    for (; size < 4 && row->hosts[size]; size++) {
        snprintf(all[size].host, sizeof all[size].host, "%s", row->hosts[size]);
        all[size].cores = row->cores[size];
    }
    CHECK_EQ_INT(fsdpi_local_comm_threads(all, size), row->lanes);
}

typedef struct member member;
typedef struct {
    const ranks *row;
    void (*body)(member *);
    const void *arg;
    size_t room; /* bytes of each arena of a rank */
    fsdp_threads threads;
    char job[64];
} launch;

/* A comm, seen by one of its members. */
struct member {
    const launch *start;
    fsdp_boot boot;
    w_heap heap;
    transport seen;
    fsdp_comm *comm;
    int rank, index, size, cases;
    int32_t of[MAX_WORLD];   /* world ranks of the members */
    char *src, *dst, *model; /* `room` bytes, with GUARD bytes on each side */
    size_t room;
    uint64_t salt;
};

static const fsdp_comm_ops *ops(void) { return fsdp_gloo_comm_ops(); }

static fsdp_boot boot_of(int rank, int size, fsdp_threads *threads, const char *job, w_heap *heap) {
    fsdp_world_desc desc = FSDP_ZERO;
    fsdp_boot b;
    memset(&b, 0, sizeof b);
    w_heap_use(heap, &desc);
    b.rank = b.local_rank = rank;
    b.size = size;
    b.timeout_ns = (int64_t)30000 * 1000000;
    b.job = job;
    b.store = "host:";
    b.threads = threads;
    b.allocator = desc.allocator;
    b.clock.now_ns = fsdpi_monotonic_ns;
    return b;
}

#define OK_ON(comm, call) /* CHECK_OK that shows the backend's text */                             \
    do {                                                                                           \
        fsdp_status got_ = (call);                                                                 \
        CHECK_MSG(got_ == FSDP_OK, "%s: %s [%s]", fsdp_status_name(got_), ops()->error_text(comm), \
                  w_case);                                                                         \
    } while (0)

static void take_room(member *m, size_t room) {
    m->room = room;
    OK_ON(m->comm, ops()->alloc(m->comm, room + 2 * GUARD, (void **)&m->src));
    OK_ON(m->comm, ops()->alloc(m->comm, room + 2 * GUARD, (void **)&m->dst));
    CHECK((m->model = (char *)malloc(room + 2 * GUARD)) != NULL);
    m->src += GUARD, m->dst += GUARD, m->model += GUARD;
}

static void leave_room(member *m) {
    ops()->free(m->comm, m->src - GUARD, m->room + 2 * GUARD);
    ops()->free(m->comm, m->dst - GUARD, m->room + 2 * GUARD);
    free(m->model - GUARD);
}

static void nothing_is_left(const w_heap *heap, const transport *seen) {
    CHECK_MSG(!heap->live && !heap->live_bytes, "%lld blocks, %lld bytes are left [%s]",
              (long long)heap->live, (long long)heap->live_bytes, w_case);
    CHECK_MSG(!seen->devices && !seen->contexts && !seen->buffers,
              "%lld devices, %lld contexts, %lld buffers are left [%s]", (long long)seen->devices,
              (long long)seen->contexts, (long long)seen->buffers, w_case);
}

static void on_rank(int rank, int world, void *arg) {
    launch *l = (launch *)arg;
    member *m = (member *)lab_zeros(1, sizeof *m);
    fsdp_caps caps;
    mine = &m->seen;
    m->start = l;
    m->boot = boot_of(rank, world, l->row->threads ? &l->threads : NULL, l->job, &m->heap);
    m->rank = m->index = rank;
    m->size = world;
    for (int k = 0; k < world; k++) m->of[k] = k;
    OK_ON(NULL, ops()->open(&m->boot, &caps, &m->comm));
    take_room(m, l->room);
    l->body(m);
    leave_room(m);
    ops()->close(m->comm);
    nothing_is_left(&m->heap, &m->seen);
    if (rank == 0 && m->cases) h_message("%s: %d cases", l->row->name, m->cases);
    mine = NULL;
    free(m);
}

static void run_ranks(const ranks *row, void (*body)(member *), const void *arg, size_t room) {
    static int runs;
    launch *l = (launch *)lab_zeros(1, sizeof *l);
    l->row = row, l->body = body, l->arg = arg, l->room = room;
    l->threads.size = row->world;
    snprintf(l->job, sizeof l->job, "gloo-%d-%d", (int)getpid(), runs++);
    be_near(row->near);
    if (row->threads) h_ranks_thread(row->world, on_rank, l);
    else h_ranks_proc(row->world, on_rank, l);
    free(l);
}

/* Makes a group, with its own arenas. */
static member *make_group(const member *m, int color, const int32_t *of, int size, const char *name,
                          size_t room) {
    member *g = (member *)malloc(sizeof *g);
    CHECK(g != NULL);
    *g = *m;
    fsdp_group group = {color, -1, size, 0, of, name};
    for (int k = 0; k < size; k++)
        if (of[k] == m->rank) group.index = k;
    OK_ON(m->comm, ops()->split(m->comm, &group, &g->comm));
    memcpy(g->of, of, (size_t)size * sizeof *of);
    g->index = group.index, g->size = size;
    if (room) take_room(g, room);
    return g;
}

static void drop_group(member *g, int has_room) {
    if (has_room) leave_room(g);
    ops()->close(g->comm);
    free(g);
}

/* ---- values ---------------------------------------------------------------------------------- */

/* Returns bits for element i of a world rank in an operation. They become any integer, or a float
   in [-1, 1) that is exact in narrow dtypes. */
#define ALWAYS_INLINE static inline __attribute__((always_inline))
ALWAYS_INLINE uint64_t draw(int rank, uint64_t salt, int64_t i) {
    uint64_t z = ((uint64_t)i + 1) * 0x9e3779b97f4a7c15u + salt * 0xbf58476d1ce4e5b9u +
                 (uint64_t)rank * 0x94d049bb133111ebu;
    z = (z ^ (z >> 29)) * 0xd6e8feb86659fd93u;
    return z ^ (z >> 32);
}

ALWAYS_INLINE float f32_of(uint64_t z) {
    return (float)((int)(z & 0xffffff) - 0x800000) * (1.0f / 0x800000); /* both are exact */
}

static double float_of(uint64_t z, int dtype) {
    if (dtype == FSDP_F64) return (double)(int64_t)(z >> 11) / 4503599627370496.0 - 1.0;
    if (dtype == FSDP_F32) return (double)f32_of(z);
    return (double)((int)(z & 255) - 128) / 128;
}

static void put(char *at, int dtype, int rank, uint64_t salt, int64_t i) {
    uint64_t z = draw(rank, salt, i);
    double x = float_of(z, dtype);
    float narrow = (float)x;
    if (dtype == FSDP_F32) memcpy(at, &narrow, sizeof narrow);
    else if (dtype == FSDP_F64) memcpy(at, &x, sizeof x);
    else if (!fsdp_dtype_is_float((fsdp_dtype)dtype))
        memcpy(at, &z, fsdp_dtype_size((fsdp_dtype)dtype));
    else CHECK_OK(fsdp_convert(at, (fsdp_dtype)dtype, &narrow, FSDP_F32, 1));
}

static void fill(char *at, int dtype, int rank, uint64_t salt, int64_t first, int64_t count) {
    size_t size = fsdp_dtype_size((fsdp_dtype)dtype);
    if (dtype == FSDP_F32) { /* most data: nothing to decide for each element */
        float x[256];
        for (int64_t n; count; first += n, count -= n, at += (size_t)n * sizeof *x) {
            n = count < 256 ? count : 256;
            for (int64_t i = 0; i < n; i++) x[i] = f32_of(draw(rank, salt, first + i));
            memcpy(at, x, (size_t)n * sizeof *x);
        }
        return;
    }
    for (int64_t i = 0; i < count; i++) put(at + (size_t)i * size, dtype, rank, salt, first + i);
}

/* Reduces one element, i32 or i64. */
static void reduce_int(char *dst, int dtype, const member *m, uint64_t salt, int64_t i, int redop) {
    uint64_t sum = 0;
    for (int k = 0; k < m->size; k++) {
        uint64_t z = draw(m->of[k], salt, i);
        int64_t x = dtype == FSDP_I32 ? (int32_t)(uint32_t)z : (int64_t)z, so_far = (int64_t)sum;
        if (k && redop == FSDP_SUM) sum += (uint64_t)x;
        else if (!k || (redop == FSDP_MAX ? x > so_far : x < so_far)) sum = (uint64_t)x;
    }
    memcpy(dst, &sum, fsdp_dtype_size((fsdp_dtype)dtype));
}

typedef struct {
    int kind, dtype, out, redop, in_place, accumulate, root, num;
    double scale;
    int64_t count; /* for kinds without segments */
    fsdp_seg segs[MAX_SEGS];
    size_t shift; /* offset in bytes from an aligned address */
} shape;

/* Reduces one float element, in rank order. `volatile` keeps the compiler from fusing a product and
   a sum. */
static void reduce_float(char *dst, const shape *s, const member *m, uint64_t salt, int64_t i) {
    int is_wide = s->dtype == FSDP_F64 || s->out == FSDP_F64;
    volatile double sum = 0;
    volatile float narrow = 0;
    for (int k = 0; k < m->size; k++) {
        double x = float_of(draw(m->of[k], salt, i), s->dtype);
        if (!k || (s->redop == FSDP_MAX && x > sum) || (s->redop == FSDP_MIN && x < sum)) sum = x;
        else if (s->redop == FSDP_SUM && is_wide) sum = sum + x;
        else if (s->redop == FSDP_SUM) narrow = (float)sum + (float)x, sum = (double)narrow;
    }
    if (is_wide) {
        sum = sum * s->scale;
    } else {
        narrow = (float)sum * (float)s->scale;
        sum = (double)narrow;
    }
    if (s->accumulate) {
        double old;
        CHECK_OK(fsdp_convert(&old, FSDP_F64, dst, (fsdp_dtype)s->out, 1));
        if (is_wide) sum = old + sum;
        else narrow = (float)old + (float)sum, sum = (double)narrow;
    }
    double result = sum;
    float result32 = (float)result;
    if (s->out == FSDP_F32 && !is_wide) memcpy(dst, &result32, sizeof result32);
    else if (is_wide) CHECK_OK(fsdp_convert(dst, (fsdp_dtype)s->out, &result, FSDP_F64, 1));
    else CHECK_OK(fsdp_convert(dst, (fsdp_dtype)s->out, &result32, FSDP_F32, 1));
}

/* As reduce_float, for sums of f32 that are neither scaled nor added to others. */
static void sum_f32(char *dst, const member *m, uint64_t salt, int64_t first, int64_t count) {
    float sum[256];
    for (int64_t n; count; first += n, count -= n, dst += (size_t)n * sizeof *sum) {
        n = count < 256 ? count : 256;
        for (int64_t i = 0; i < n; i++) sum[i] = f32_of(draw(m->of[0], salt, first + i));
        for (int k = 1; k < m->size; k++)
            for (int64_t i = 0; i < n; i++) sum[i] += f32_of(draw(m->of[k], salt, first + i));
        memcpy(dst, sum, (size_t)n * sizeof *sum);
    }
}

static void reduce(char *dst, const shape *s, const member *m, uint64_t salt, int64_t first,
                   int64_t count) {
    size_t size = fsdp_dtype_size((fsdp_dtype)s->out);
    if (s->dtype == FSDP_F32 && s->out == FSDP_F32 && s->redop == FSDP_SUM && !s->accumulate &&
        s->scale == 1) {
        sum_f32(dst, m, salt, first, count);
        return;
    }
    int is_float = fsdp_dtype_is_float((fsdp_dtype)s->dtype);
    for (int64_t i = 0; i < count; i++, dst += size)
        if (is_float) reduce_float(dst, s, m, salt, first + i);
        else reduce_int(dst, s->dtype, m, salt, first + i, s->redop);
}

/* ---- one operation, and what has to come of it ----------------------------------------------- */

static shape plain(int kind, int dtype, int64_t count) {
    shape s;
    memset(&s, 0, sizeof s);
    s.kind = kind, s.dtype = s.out = dtype, s.count = count;
    s.scale = 1;
    return s;
}

static int is_list(const shape *s) {
    return s->kind == FSDP_OP_ALL_GATHER || s->kind == FSDP_OP_REDUCE_SCATTER;
}

/* Returns a shape with segments of these counts and gaps between them on both sides. */
static shape listed(int kind, int dtype, int world, const int64_t *counts, int num) {
    shape s = plain(kind, dtype, 0);
    int64_t shard = num > 1 ? 3 : 0, full = num > 1 ? 5 : 0;
    s.num = num;
    for (int i = 0; i < num; i++) {
        s.segs[i].shard = shard, s.segs[i].full = full, s.segs[i].count = counts[i];
        shard += counts[i] + 2, full += counts[i] * world + 3;
        s.count += counts[i];
    }
    return s;
}

static int64_t shard_side(const shape *s) { /* elements up to the end of the last segment */
    return s->segs[s->num - 1].shard + s->segs[s->num - 1].count;
}
static int64_t full_side(const shape *s, int size) {
    return s->segs[s->num - 1].full + s->segs[s->num - 1].count * size;
}

static fsdp_coll coll_of(const shape *s, char *src, char *dst, const char *what) {
    fsdp_coll c;
    memset(&c, 0, sizeof c);
    c.kind = (uint8_t)s->kind, c.dtype = (uint8_t)s->dtype, c.out_dtype = (uint8_t)s->out;
    c.redop = (uint8_t)s->redop, c.in_place = (uint8_t)s->in_place;
    c.accumulate = (uint8_t)s->accumulate;
    c.scale = s->scale;
    c.root = s->root;
    c.count = (uint64_t)s->count;
    c.segs = s->segs, c.num_segs = (uint32_t)s->num;
    c.src = s->kind == FSDP_OP_ALL_REDUCE || s->kind == FSDP_OP_BROADCAST ? dst : src;
    c.dst = dst;
    c.what = what;
    return c;
}

/* Sets the number of bytes of src and dst that an operation reads or writes. */
static void extents(const shape *s, int size, size_t *src, size_t *dst) {
    size_t in = fsdp_dtype_size((fsdp_dtype)s->dtype), out = fsdp_dtype_size((fsdp_dtype)s->out);
    int64_t count = s->kind == FSDP_OP_ALL_TO_ALL ? s->count * size : s->count;
    *src = *dst = (size_t)count * in;
    if (s->kind == FSDP_OP_ALL_GATHER) {
        *src = s->in_place ? 0 : (size_t)shard_side(s) * in;
        *dst = (size_t)full_side(s, size) * in;
    } else if (s->kind == FSDP_OP_REDUCE_SCATTER) {
        *src = (size_t)full_side(s, size) * in;
        *dst = (size_t)shard_side(s) * out;
    }
    if (s->kind == FSDP_OP_ALL_REDUCE || s->kind == FSDP_OP_BROADCAST || s->kind == FSDP_OP_RECV)
        *src = 0;
    if (s->kind == FSDP_OP_SEND) *dst = 0;
}

static void prepare_gather(const member *m, const shape *s, uint64_t salt, char *src, char *dst,
                           char *model) {
    size_t size = fsdp_dtype_size((fsdp_dtype)s->dtype);
    for (int i = 0; i < s->num; i++) {
        const fsdp_seg *g = &s->segs[i];
        char *own = s->in_place ? dst + (size_t)(g->full + m->index * g->count) * size
                                : src + (size_t)g->shard * size;
        fill(own, s->dtype, m->rank, salt, g->shard, g->count);
        for (int k = 0; k < m->size; k++)
            fill(model + (size_t)(g->full + k * g->count) * size, s->dtype, m->of[k], salt,
                 g->shard, g->count);
    }
}

static void prepare_scatter(const member *m, const shape *s, uint64_t salt, char *src,
                            char *model) {
    fill(src, s->dtype, m->rank, salt, 0, full_side(s, m->size));
    for (int i = 0; i < s->num; i++) {
        const fsdp_seg *g = &s->segs[i];
        reduce(model + (size_t)g->shard * fsdp_dtype_size((fsdp_dtype)s->out), s, m, salt,
               g->full + m->index * g->count, g->count);
    }
}

/* Fills src and dst before an operation, and model with the expected contents of dst. */
static void prepare(const member *m, const shape *s, uint64_t salt, char *src, char *dst,
                    char *model) {
    size_t size = fsdp_dtype_size((fsdp_dtype)s->dtype), from, to;
    extents(s, m->size, &from, &to);
    memset(dst - GUARD, 0x5a, to + 2 * GUARD);
    if (s->accumulate) fill(dst, s->out, m->rank + 100, salt, 0, shard_side(s));
    memcpy(model - GUARD, dst - GUARD, to + 2 * GUARD);
    switch (s->kind) {
    case FSDP_OP_ALL_GATHER: prepare_gather(m, s, salt, src, dst, model); break;
    case FSDP_OP_REDUCE_SCATTER: prepare_scatter(m, s, salt, src, model); break;
    case FSDP_OP_ALL_REDUCE:
        fill(dst, s->dtype, m->rank, salt, 0, s->count);
        reduce(model, s, m, salt, 0, s->count);
        break;
    case FSDP_OP_BROADCAST:
        fill(dst, s->dtype, m->rank, salt, 0, s->count);
        fill(model, s->dtype, m->of[s->root], salt, 0, s->count);
        break;
    case FSDP_OP_ALL_TO_ALL:
        fill(src, s->dtype, m->rank, salt, 0, s->count * m->size);
        for (int k = 0; k < m->size; k++)
            fill(model + (size_t)(s->count * k) * size, s->dtype, m->of[k], salt,
                 s->count * m->index, s->count);
        break;
    case FSDP_OP_SEND: fill(src, s->dtype, m->rank, salt, 0, s->count); break;
    default: fill(model, s->dtype, m->of[s->root], salt, 0, s->count); break;
    }
}

/* Runs an operation. On success all bits of dst must be right, and the memory around it unchanged.
   */
static fsdp_status try_shape(member *m, const shape *s) {
    char *src = m->src + s->shift, *dst = m->dst + s->shift, *model = m->model + s->shift;
    uint64_t salt = ++m->salt;
    size_t from, to;
    extents(s, m->size, &from, &to);
    CHECK_MSG(from + s->shift <= m->room && to + s->shift <= m->room, "no room: %zu, %zu [%s]",
              from, to, w_case);
    prepare(m, s, salt, src, dst, model);
    fsdp_coll c = coll_of(s, src, dst, "unit");
    c.seq = salt;
    fsdp_status status = ops()->run(m->comm, &c);
    if (status) return status;
    memset(src, 0xee, from); /* src may be overwritten as soon as run returns */
    if (memcmp(dst - GUARD, model - GUARD, to + 2 * GUARD)) {
        fprintf(stderr, "in %s\n", w_case);
        CHECK_EQ_MEM(dst - GUARD, model - GUARD, to + 2 * GUARD);
    }
    m->cases++;
    return FSDP_OK;
}

static void run_shape(member *m, const shape *s) {
    snprintf(w_case, sizeof w_case,
             "%s dtype %d to %d, %lld elements in %d segments, in_place %d, root %d, redop %d, "
             "scale %g, accumulate %d, shift %zu, W=%d",
             fsdp_op_name(s->kind), s->dtype, s->out, (long long)s->count, s->num, s->in_place,
             s->root, s->redop, s->scale, s->accumulate, s->shift, m->size);
    OK_ON(m->comm, try_shape(m, s));
}

/* ---- closed groups --------------------------------------------------------------------------- */

/* Rank 0 closes two groups that rank 1 keeps. It waits for rank 1 once, until its timeout, and not
   for the second group. Rank 1 still learns of the close, in collectives and in pairs. */
static void closed_groups(member *m) {
    const int uses_pair = *(const int *)m->start->arg;
    int32_t of[2] = {0, 1};
    member *first = make_group(m, 0, of, 2, "first", 0),
           *second = make_group(m, 0, of, 2, "second", 0);
    if (m->rank == 0) {
        drop_group(first, 0);
        drop_group(second, 0);
        for (int i = 0; i < 1000 && !ops()->poll(m->comm); i++) fsdpi_sleep_ns(5000000);
        CHECK_STATUS(ops()->poll(m->comm), FSDP_ERR_PEER_LOST);
        return;
    }
    fsdpi_sleep_ns(900000000);
    fsdp_coll c;
    memset(&c, 0, sizeof c);
    c.kind = uses_pair ? FSDP_OP_RECV : FSDP_OP_ALL_REDUCE;
    c.dtype = c.out_dtype = FSDP_F32;
    c.what = "late";
    c.count = 4;
    c.src = c.dst = m->dst;
    int64_t start = h_calm_ms();
    CHECK_STATUS(ops()->run(second->comm, &c), FSDP_ERR_PEER_LOST);
    CHECK_MSG(strstr(ops()->error_text(second->comm), "rank 0 has closed this group"), "%s",
              ops()->error_text(second->comm));
    CHECK_MSG(h_calm_ms() - start < 800, "after %lld ms", (long long)(h_calm_ms() - start));
    drop_group(second, 0);
    drop_group(first, 0);
}
static const ranks two_ranks[] = {
    {"processes/W=2", 0, 2, 1}, {"threads/W=2", 1, 2, 1}, {"near/W=2", 0, 2, 0}};
TEST_P(gloo, a_closed_group_is_named, two_ranks) {
    for (int uses_pair = 0; uses_pair < 2; uses_pair++)
        run_ranks(row, closed_groups, &uses_pair, 4096);
}

/* ---- bytes and memory ------------------------------------------------------------------------ */

/* Returns the size of rank k's region. These functions compute the bytes that member `me` must
   send, from the specification: a signature of 256 bytes to each member on another host, with small
   data after it, at multiples of 64 bytes and up to 32 KiB. Of the other data, each byte is sent
   once to each member that needs it. A large all_reduce or broadcast is cut into a region for each
   rank, in whole groups of 64 elements. The regions of an all_reduce may be small enough to follow
   the signature. The root of a broadcast deals out the regions; ranks on its host read all of them
   from shared memory. */
static uint64_t region(uint64_t count, uint64_t size, uint64_t k) {
    uint64_t each = ((count + size - 1) / size + 63) / 64 * 64;
    return each * k >= count ? 0 : count - each * k < each ? count - each * k : each;
}

static int is_far(const member *m, int a, int b) {
    int near = m->start->row->near;
    return near && m->of[a] / near != m->of[b] / near;
}

static uint64_t bytes_of_item(const member *m, const shape *s, uint64_t count, int me) {
    uint64_t size = fsdp_dtype_size((fsdp_dtype)s->dtype), sum = 0;
    for (int k = 0; k < m->size; k++) {
        uint64_t own = region(count, (uint64_t)m->size, (uint64_t)me),
                 theirs = region(count, (uint64_t)m->size, (uint64_t)k);
        if (!is_far(m, me, k)) continue;
        if (s->kind == FSDP_OP_ALL_REDUCE) sum += theirs + own;
        else if (s->kind != FSDP_OP_BROADCAST) sum += count;
        else sum += (me == s->root ? theirs : 0) + (is_far(m, s->root, k) ? own : 0);
    }
    return sum * size;
}

static uint64_t bytes_of(const member *m, const shape *s, int me) {
    uint64_t size = fsdp_dtype_size((fsdp_dtype)s->dtype), behind = 0, alone = 0, far = 0;
    int is_pair = s->kind == FSDP_OP_SEND || s->kind == FSDP_OP_RECV;
    for (int k = 0; k < m->size; k++) far += is_far(m, me, k) && (!is_pair || k == s->root);
    if (s->kind == FSDP_OP_RECV) return far * sizeof(fsdpi_signature);
    if (s->kind == FSDP_OP_SEND) return far * (sizeof(fsdpi_signature) + size * (uint64_t)s->count);
    for (int i = 0; i < (is_list(s) ? s->num : 1); i++) {
        uint64_t count = (uint64_t)(is_list(s) ? s->segs[i].count : s->count);
        uint64_t end = (behind + count * size + 63) / 64 * 64;
        uint64_t part = region(count, (uint64_t)m->size, 0) * size; /* region 0 has full size */
        if (end <= 32768) {
            behind = end;
        } else if (s->kind == FSDP_OP_ALL_REDUCE && part <= 32768) {
            behind = part;
            alone += far * region(count, (uint64_t)m->size, (uint64_t)me) * size;
        } else {
            alone += bytes_of_item(m, s, count, me);
        }
    }
    if (s->kind == FSDP_OP_BROADCAST && me != s->root) behind = 0;
    return far * (256 + behind) + alone;
}

/* Runs an operation three times: only the first run may allocate. The store's thread may allocate
   on rank 0 at any time, so that one clean run of the other two is enough. */
static void exactly(member *m, const shape *s) {
    int clean = 0;
    for (int pass = 0; pass < 3; pass++) {
        int64_t buffers = m->seen.buffers, total = m->heap.total;
        uint64_t bytes = m->seen.bytes;
        uint64_t expected = bytes_of(m, s, m->index);
        run_shape(m, s);
        bytes = m->seen.bytes - bytes;
        W_CHECK(bytes == expected, "%llu bytes were sent, expected %llu", (unsigned long long)bytes,
                (unsigned long long)expected);
        clean |= pass && total == m->heap.total;
        W_CHECK(!pass || m->seen.buffers == buffers, "%lld buffers of the transport are left",
                (long long)(m->seen.buffers - buffers));
    }
    W_CHECK(clean, "it allocates each time");
}

/* Checks that the sum over ranks is the minimum: every byte that is sent is needed. */
static void sums_are_least(const member *m, const shape *s) {
    uint64_t sum = 0, all = (uint64_t)s->count * fsdp_dtype_size((fsdp_dtype)s->dtype);
    for (int k = 0; k < m->size; k++) sum += bytes_of_item(m, s, (uint64_t)s->count, k);
    if (m->start->row->near == 1)
        CHECK_EQ_INT(sum, all * (uint64_t)(m->size - 1) * (s->kind == FSDP_OP_ALL_REDUCE ? 2 : 1));
}

static void all_pairs(member *m, int64_t count) { /* between neighbours */
    for (int from = 0; from < m->size && m->size > 1; from++) {
        int to = (from + 1) % m->size;
        shape s = plain(m->index == from ? FSDP_OP_SEND : FSDP_OP_RECV, FSDP_F32, count);
        s.root = m->index == from ? to : from;
        if (m->index == from || m->index == to) {
            uint64_t salt = m->salt;
            m->salt = (uint64_t)(from * 1000) + (uint64_t)count; /* equal on both ranks */
            exactly(m, &s);
            m->salt = salt;
        }
    }
}

static void exact_lists(member *m, int64_t count) {
    int64_t lists[3][MAX_SEGS] = {
        {count}, {count, 0, count / 2}, {3, count, 100, count / 2, 17, 9000}};
    static const int nums[3] = {1, 3, 6};
    for (int v = 0; v < 3; v++) {
        shape s = listed(FSDP_OP_ALL_GATHER, FSDP_F32, m->size, lists[v], nums[v]);
        exactly(m, &s);
        s.in_place = 1;
        exactly(m, &s);
        s = listed(FSDP_OP_REDUCE_SCATTER, FSDP_F32, m->size, lists[v], nums[v]);
        exactly(m, &s);
        s = listed(FSDP_OP_REDUCE_SCATTER, FSDP_BF16, m->size, lists[v], nums[v]);
        s.out = FSDP_F32, s.accumulate = 1, s.scale = 0.25;
        if (v == 2) exactly(m, &s);
    }
}

static void exact_bytes(member *m) {
    static const int64_t sizes[] = {4 << 10, 64 << 10, 1 << 20, (3 << 20) + 20};
    for (int n = 0; n < *(const int *)m->start->arg; n++) {
        int64_t count = sizes[n] / 4;
        exact_lists(m, count);
        shape s = plain(FSDP_OP_ALL_REDUCE, FSDP_F32, count);
        exactly(m, &s);
        sums_are_least(m, &s);
        s = plain(FSDP_OP_BROADCAST, FSDP_F32, count);
        for (s.root = 0; s.root < m->size; s.root++) {
            exactly(m, &s);
            sums_are_least(m, &s);
        }
        s = plain(FSDP_OP_ALL_TO_ALL, FSDP_F32, count);
        exactly(m, &s);
        all_pairs(m, count);
    }
}
TEST_P(gloo, exact_bytes_and_no_allocations, all_ranks) {
    int sizes = row->world == 2 && !row->threads && !W_SLOW ? 4
                : row->world == 3 && row->near == 1         ? 3
                                                            : 2;
    run_ranks(row, exact_bytes, &sizes, (size_t)row->world * (5 << 20));
}
TEST_P(long_gloo, exact_bytes_and_no_allocations, all_ranks, AT_NIGHT(GLOO)) {
    int sizes = 4;
    run_ranks(row, exact_bytes, &sizes, (size_t)row->world * (5 << 20));
}

/* Reductions in several pieces, to which local ranks add their parts without a message. */
static void many_pieces(member *m) {
    int64_t count = ((3 << 20) + 20) / 4;
    shape s = listed(FSDP_OP_REDUCE_SCATTER, FSDP_F32, m->size, &count, 1);
    exactly(m, &s);
    s = plain(FSDP_OP_ALL_REDUCE, FSDP_F32, 3 * count);
    exactly(m, &s);
}
static const ranks mixed_ranks[] = {{"mixed/2+1", 0, 3, 2}};
TEST_P(gloo, many_pieces_with_local_ranks, mixed_ranks) {
    run_ranks(row, many_pieces, NULL, (size_t)row->world * (5 << 20));
}

/* Returns how often all other threads of this process have slept. */
static int64_t sleeps_of_others(void) {
    char path[64], line[256];
    int64_t sum = 0, own = syscall(SYS_gettid);
    long long here;
    DIR *all = opendir("/proc/self/task");
    CHECK(all != NULL);
    for (struct dirent *d; (d = readdir(all)) != NULL;) {
        snprintf(path, sizeof path, "/proc/self/task/%d/status", atoi(d->d_name));
        FILE *f = atoi(d->d_name) && atoi(d->d_name) != own ? fopen(path, "r") : NULL;
        while (f && fgets(line, sizeof line, f))
            if (sscanf(line, "voluntary_ctxt_switches: %lld", &here) == 1) sum += here;
        if (f) fclose(f);
    }
    closedir(all);
    return sum;
}

/* Runs an operation `rounds` times. Returns how often the other threads have slept; *ms: the time
   that it took. */
static int64_t sleeps_in(member *m, const shape *s, int rounds, int64_t *ms) {
    for (int i = 0; i < 4; i++) run_shape(m, s);
    const fsdp_coll c = coll_of(s, m->src, m->dst, "unit");
    int64_t sleeps = sleeps_of_others(), start = fsdpi_monotonic_ns(NULL);
    for (int i = 0; i < rounds; i++) OK_ON(m->comm, ops()->run(m->comm, &c));
    *ms = (fsdpi_monotonic_ns(NULL) - start) / 1000000;
    sleeps = sleeps_of_others() - sleeps;
    h_message("%s of %lld: others have slept %lld times in %d, %lld ms", fsdp_op_name(s->kind),
              (long long)s->count, (long long)sleeps, rounds, (long long)*ms);
    run_shape(m, s);
    return sleeps;
}

/* A rank that waits for short messages reads them itself and wakes no other thread. (Idle threads
   look around every 10 ms.) Gloo's thread reads long messages, and those of a rank that also waits
   for local ranks. */
static void who_wakes(member *m) {
    const int64_t counts[] = {1024, 16384 / m->size, 1 << 20};
    const int rounds[] = {400, 400, 4};
    int has_near = m->start->row->near > 1 && m->rank < 2; /* 2 of the 3 ranks */
    for (int n = 0; n < 3; n++)
        for (int kind = FSDP_OP_ALL_GATHER; kind <= FSDP_OP_REDUCE_SCATTER; kind++) {
            shape s = listed(kind, FSDP_F32, m->size, &counts[n], 1);
            int is_left = n == 2 || has_near;
            int64_t ms, before = m->seen.overlapped, sleeps = sleeps_in(m, &s, rounds[n], &ms);
            W_CHECK(is_left || sleeps < rounds[n] / 8 + ms / 2, "%lld times", (long long)sleeps);
            CHECK_EQ_INT(m->seen.overlapped - before, is_left ? rounds[n] + 5 : 0);
            CHECK_EQ_INT(m->seen.overlaps, 0);
        }
}
static const ranks sleepy_ranks[] = {
    {"processes/W=2", 0, 2, 1}, {"processes/W=4", 0, 4, 1}, {"mixed/2+1", 0, 3, 2}};
TEST_P(gloo, a_short_collective_wakes_no_other_thread, sleepy_ranks) {
    run_ranks(row, who_wakes, NULL, (size_t)row->world * (5 << 20));
}

/* Up to 2 MiB in all count as short, and not one element more. Depending on the kind, `count` is
   per rank or in all; the two ranks of a pair behave like a world of two. */
static void limits(member *m) {
    for (int kind = FSDP_OP_ALL_GATHER; kind <= FSDP_OP_RECV; kind++)
        for (int more = 0; more < 2; more++) {
            int of_each = kind <= FSDP_OP_REDUCE_SCATTER || kind == FSDP_OP_ALL_TO_ALL;
            int is_pair = kind == FSDP_OP_SEND || kind == FSDP_OP_RECV;
            int64_t most = (int64_t)FSDPI_GLOO_SHORT / (of_each ? m->size : 1) / 4;
            int64_t count = most + more, before = m->seen.overlapped;
            shape s = kind <= FSDP_OP_REDUCE_SCATTER ? listed(kind, FSDP_F32, m->size, &count, 1)
                                                     : plain(kind, FSDP_F32, count);
            if (is_pair && m->index > 1) continue;
            if (is_pair) s.kind = m->index == (kind == FSDP_OP_RECV) ? FSDP_OP_SEND : FSDP_OP_RECV;
            if (is_pair) s.root = 1 - m->index;
            exactly(m, &s);
            CHECK_EQ_INT(m->seen.overlapped > before, more);
            CHECK_EQ_INT(m->seen.overlaps, 0);
        }
}
static const ranks limit_ranks[] = {{"W=2", 0, 2, 1}, {"W=4", 0, 4, 1}};
TEST_P(gloo, the_limit_of_what_is_short, limit_ranks) {
    run_ranks(row, limits, NULL, (size_t)row->world * (5 << 20));
}

/* Data follows a signature up to 32 KiB and not one element more, in one segment or several, and in
   the regions of an all_reduce, of which the last ones are shorter, or empty with many ranks. */
static void edges(member *m) {
    static const int64_t around[] = {8191, 8192, 8193};
    for (int n = -1; n < 2; n++) {
        shape s = plain(FSDP_OP_ALL_REDUCE, FSDP_F32, (int64_t)m->size * 8192 + n);
        exactly(m, &s);
        s = plain(FSDP_OP_ALL_REDUCE, FSDP_F64, 4096 + 64 + n);
        exactly(m, &s);
    }
    for (int n = 0; n < 3; n++) {
        int64_t parts[2] = {16, around[n] - 16}, odd[3] = {1, around[n] - 16, 15};
        shape s = listed(FSDP_OP_ALL_GATHER, FSDP_F32, m->size, &around[n], 1);
        exactly(m, &s);
        s = listed(FSDP_OP_ALL_GATHER, FSDP_F32, m->size, parts, 2);
        exactly(m, &s);
        s = listed(FSDP_OP_REDUCE_SCATTER, FSDP_F32, m->size, odd, 3);
        exactly(m, &s);
        s = plain(FSDP_OP_ALL_REDUCE, FSDP_F32, around[n]);
        exactly(m, &s);
        s = plain(FSDP_OP_BROADCAST, FSDP_F32, around[n]);
        exactly(m, &s);
        s = plain(FSDP_OP_ALL_TO_ALL, FSDP_F32, around[n]);
        exactly(m, &s);
    }
    int64_t none = 0;
    for (int kind = FSDP_OP_ALL_GATHER; kind <= FSDP_OP_ALL_TO_ALL; kind++) {
        shape s = listed(kind, FSDP_F32, m->size, &none, 1);
        exactly(m, &s); /* without data, each rank sends a signature only */
    }
}
static const ranks some_ranks[] = {
    {"processes/W=1", 0, 1, 1}, {"processes/W=3", 0, 3, 1}, {"threads/W=2", 1, 2, 1},
    {"threads/W=4", 1, 4, 1},   {"near/W=3", 0, 3, 0},      {"mixed/2+1", 0, 3, 2},
    {"mixed/2+2", 0, 4, 2},
};
TEST_P(gloo, edges_of_what_is_small, some_ranks) {
    run_ranks(row, edges, NULL, (size_t)row->world * (64 << 10));
}

/* ---- buffers that lie anywhere --------------------------------------------------------------- */

static void unaligned(member *m) {
    static const struct {
        int dtype;
        size_t shift;
    } places[] = {{FSDP_U8, 1},  {FSDP_BF16, 2}, {FSDP_F16, 2}, {FSDP_F32, 4},
                  {FSDP_F64, 8}, {FSDP_I32, 4},  {FSDP_I64, 8}, {FSDP_F32, 36}};
    for (size_t p = 0; p < sizeof places / sizeof *places; p++)
        for (int big = 0; big < 2; big++) {
            int64_t count = big ? 30011 : 501, lists[3] = {7, count, 33};
            int dtype = places[p].dtype;
            shape s = listed(FSDP_OP_ALL_GATHER, dtype, m->size, lists, 3);
            s.shift = places[p].shift;
            run_shape(m, &s);
            s.in_place = 1;
            run_shape(m, &s);
            s = plain(FSDP_OP_BROADCAST, dtype, count);
            s.shift = places[p].shift, s.root = m->size - 1;
            run_shape(m, &s);
            s.kind = FSDP_OP_ALL_TO_ALL;
            run_shape(m, &s);
            s.kind = FSDP_OP_ALL_REDUCE;
            if (dtype != FSDP_U8) run_shape(m, &s);
            s = listed(FSDP_OP_REDUCE_SCATTER, dtype, m->size, lists, 3);
            s.shift = places[p].shift;
            if (dtype != FSDP_U8) run_shape(m, &s);
            s.out = dtype == FSDP_F64 ? FSDP_F64 : FSDP_F32, s.accumulate = 1, s.scale = 0.37;
            s.shift = s.out == FSDP_F64 ? 8 : 4;
            if (fsdp_dtype_is_float((fsdp_dtype)dtype)) run_shape(m, &s);
        }
}
TEST_P(gloo, unaligned_buffers, some_ranks) {
    run_ranks(row, unaligned, NULL, (size_t)row->world * (300 << 10));
}

/* ---- worlds of many ranks -------------------------------------------------------------------- */

/* The maximum size of a message shrinks with the world size, and so do the pieces of a reduction.
   */
static void twenty(member *m) {
    int64_t lists[3] = {5, 9001, 70};
    int64_t small = 40;
    shape s = listed(FSDP_OP_ALL_GATHER, FSDP_F32, m->size, lists, 3);
    exactly(m, &s);
    s = listed(FSDP_OP_ALL_GATHER, FSDP_BF16, m->size, &small, 1);
    exactly(m, &s);
    s = listed(FSDP_OP_REDUCE_SCATTER, FSDP_F32, m->size, lists, 3);
    s.scale = 0.05;
    exactly(m, &s);
    s = plain(FSDP_OP_ALL_REDUCE, FSDP_F32, 70001);
    exactly(m, &s);
    /* 16 regions of 256 elements, one of 1, 3 of 0 */
    s = plain(FSDP_OP_ALL_REDUCE, FSDP_F64, 4097);
    exactly(m, &s);
    s = plain(FSDP_OP_ALL_REDUCE, FSDP_BF16, 3);
    exactly(m, &s);
    s = plain(FSDP_OP_BROADCAST, FSDP_I32, 50021);
    s.root = 13;
    exactly(m, &s);
    s = plain(FSDP_OP_ALL_TO_ALL, FSDP_U8, 40000);
    exactly(m, &s);
}
static const ranks many_ranks[] = {{"threads/W=20", 1, 20, 1}};
TEST_P(gloo, many_ranks, many_ranks) { run_ranks(row, twenty, NULL, (size_t)1 << 20); }

/* Memory of comms of all sizes, without a transport: at most what the header states. */
TEST(gloo, memory_of_comms_of_all_sizes) {
    transport fake;
    w_heap heap;
    fsdp_boot boot = boot_of(0, 1, NULL, "none", &heap);
    fsdpi_gloo_comm *c = (fsdpi_gloo_comm *)lab_zeros(1, sizeof *c);
    fsdpi_gloo_world *w = (fsdpi_gloo_world *)lab_zeros(1, sizeof *w);
    mine = &fake;
    for (int size = 2; size <= FSDPI_MAX_SRCS; size += W_SLOW && size > 4 ? 9 : 1) {
        memset(&fake, 0, sizeof fake);
        fake.is_fake = 1;
        memset(c, 0, sizeof *c);
        memset(c->at, 0xFF, sizeof c->at); /* no rank is local */
        w->base.base.boot = boot;
        c->base.world = &w->base.base, c->base.boot = &w->base.base.boot, c->base.size = size;
        CHECK_OK(fsdpi_gloo_make_messages(c));
        int64_t bytes = heap.live_bytes;
        snprintf(w_case, sizeof w_case, "W=%d: %lld bytes, %zu small", size, (long long)bytes,
                 c->small_bytes);
        W_CHECK(c->small_bytes >= 2048 && c->small_bytes <= 32768 && c->small_bytes % 64 == 0,
                "small");
        W_CHECK(fake.calls[BUFFER_CREATE] == 3 * (size - 1), "buffers");
        W_CHECK(fake.most_buffer == c->small_bytes + 256 && fake.least_buffer == fake.most_buffer,
                "%zu to %zu bytes", fake.least_buffer, fake.most_buffer);
        W_CHECK(fake.received == fake.most_buffer, "%zu bytes are expected", fake.received);
        W_CHECK(bytes >= (int64_t)(3 * (size_t)size * fake.most_buffer), "too short");
        W_CHECK(c->small_bytes == 2048 || bytes < (4 << 20) + size * 800 + 64, "too much");
        fake.least_buffer = fake.most_buffer = 0;
        CHECK_OK(fsdpi_gloo_make_scratch(c));
        bytes = heap.live_bytes - bytes;
        snprintf(w_case, sizeof w_case, "W=%d: %lld bytes, pieces %zu * %zu", size,
                 (long long)bytes, c->piece, c->depth);
        W_CHECK(c->piece >= 4096 && c->piece % 64 == 0 && c->piece <= 1 << 20, "piece");
        W_CHECK(c->depth >= 2, "nothing arrives while a piece is reduced");
        W_CHECK(fake.least_buffer == c->piece * c->depth && fake.most_buffer == fake.least_buffer,
                "%zu to %zu bytes", fake.least_buffer, fake.most_buffer);
        W_CHECK(bytes >= (int64_t)((size_t)(size - 1) * c->piece * c->depth), "too short");
        W_CHECK(bytes <= (8 << 20) + 64, "too much");
        fsdpi_free(&c->base.boot->allocator, c->scratch);
        fsdpi_free(&c->base.boot->allocator, c->messages);
        CHECK_EQ_INT(heap.live_bytes, 0);
    }
    mine = NULL;
    free(c);
    free(w);
}

/* ---- the gate -------------------------------------------------------------------------------- */

/* Two members of a comm that is about to open, without a world. */
typedef struct {
    w_heap heap;
    fsdpi_store store;
    fsdpi_gloo_world world;
    fsdpi_gloo_comm comm[2];
    fsdpi_gloo_connector gate[2]; /* member 0 listens, member 1 connects */
} gates;

static gates *make_gates(void) {
    gates *s = (gates *)lab_zeros(1, sizeof *s);
    s->world.base.base.boot = boot_of(0, 2, NULL, "gates", &s->heap);
    s->world.base.store = &s->store;
    s->store.desc.boot = s->world.base.base.boot;
    snprintf(s->store.address, sizeof s->store.address, "127.0.0.1");
    for (int k = 0; k < 2; k++) {
        fsdpi_gloo_comm *c = &s->comm[k];
        c->base.world = &s->world.base.base, c->base.boot = &s->world.base.base.boot;
        c->base.size = 2, c->base.index = k, c->base.id = 77;
        c->at[0] = c->at[1] = -1;
        CHECK_OK(fsdpi_gloo_open_gate(&s->gate[k], c));
    }
    s->gate[1].doors[0] = s->gate[0].doors[0];
    return s;
}

static void free_gates(gates *s) {
    for (int k = 0; k < 2; k++) fsdpi_gloo_close_gate(&s->gate[k]);
    CHECK_EQ_INT(s->heap.live_bytes, 0);
    free(s);
}

static void pair_of(int fd[2]) {
    CHECK_EQ_INT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fd), 0);
}

/* Forwards received bytes with one bit of byte number *at changed. Returns their number. */
static size_t pass_on(int from, int to, long *at) {
    uint8_t bytes[256];
    ssize_t got = recv(from, bytes, sizeof bytes, 0);
    if (got <= 0) return 0;
    if (*at >= 0 && *at < got) bytes[*at] ^= (uint8_t)(1 << *at % 8);
    *at -= (long)got;
    CHECK_EQ_INT(send(to, bytes, (size_t)got, MSG_NOSIGNAL), got);
    return (size_t)got;
}

/* Changes byte number `at` of all bytes that both ends send; -1: none. Returns 1 if the listener
   has accepted the caller as a member. */
static int has_admitted(gates *s, long at) {
    fsdpi_gloo_link *caller = &s->gate[1].links[0], *called = &s->gate[0].links[1];
    int to[2], from[2], fd[2];
    pair_of(to);
    pair_of(from);
    caller->fd = to[0], called->fd = from[0];
    caller->member = 0, called->member = -1, called->step = FSDPI_GLOO_WANTS_HELLO;
    called->used = 0;
    int goes_on = fsdpi_gloo_introduce(&s->gate[1], caller);
    size_t passed = 0, sum = 0;
    do {
        passed = pass_on(to[1], from[1], &at);
        if (goes_on) goes_on = fsdpi_gloo_listen(&s->gate[0], called);
        passed += pass_on(from[1], to[1], &at);
        if (goes_on) goes_on = fsdpi_gloo_listen(&s->gate[1], caller);
        sum += passed;
    } while (passed);
    for (int k = 0; k < 2; k++) {
        fd[k] = s->gate[k].fds[!k];
        s->gate[k].fds[!k] = -1, s->gate[k].missing = 1;
    }
    CHECK(fd[0] < 0 || sum == 52 + 64 + 32 + 1);
    close(to[0]), close(to[1]), close(from[0]), close(from[1]);
    caller->fd = called->fd = -1;
    return fd[0] >= 0;
}

TEST(gloo, a_changed_handshake_is_refused) {
    gates *s = make_gates();
    CHECK(has_admitted(s, -1));
    for (long at = 0; at < 52 + 64 + 32; at++)
        CHECK_MSG(!has_admitted(s, at), "with byte %ld changed", at);
    CHECK(has_admitted(s, 52 + 64 + 32)); /* the bytes of WELCOME are not checked */
    /* Both know the ticket. One does not know the token, or belongs to another comm. */
    s->comm[1].base.id = 78;
    CHECK(!has_admitted(s, -1));
    s->comm[1].base.id = 77;
    fsdpi_store other = s->store;
    fsdpi_gloo_world elsewhere = s->world;
    other.desc.boot.job = "another";
    elsewhere.base.store = &other;
    s->comm[1].base.world = &elsewhere.base.base;
    CHECK(!has_admitted(s, -1));
    free_gates(s);
}

/* Many untrusted peers connect: they send nothing, a little, or nonsense, and hang up at once or
   never; or they have seen the ticket, and stop after it. Then a member connects. */
static void gets_past_untrusted(int have_heard) {
    enum { UNTRUSTED = 400 };
    gates *s = make_gates();
    const fsdpi_store_place *at = &s->gate[0].doors[0].place;
    struct linger reset = {1, 0};
    int fd[UNTRUSTED];
    uint8_t noise[100], heard[52];
    memset(noise, 0x5A, sizeof noise);
    memcpy(noise, s->gate[0].doors[0].ticket, 15); /* only the last byte differs */
    noise[15] = (uint8_t)~s->gate[0].doors[0].ticket[15];
    /* as an eavesdropper would send it, posing as member 1 */
    memcpy(heard, s->gate[0].doors[0].ticket, 16);
    memset(heard + 16, 0, sizeof heard - 16);
    heard[16] = 1;
    for (int i = 0; i < UNTRUSTED; i++) {
        fd[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        CHECK_EQ_INT(connect(fd[i], &at->at.any, at->size), 0);
        if (have_heard) CHECK_EQ_INT(send(fd[i], heard, sizeof heard, MSG_NOSIGNAL), sizeof heard);
        else if (i % 4) CHECK(send(fd[i], noise, i % 4 == 1 ? 51 : sizeof noise, MSG_NOSIGNAL) > 0);
        if (i % 8 == 7) setsockopt(fd[i], SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        if (i % 8 == 7) close(fd[i]), fd[i] = -1;
    }
    for (int turn = 0; turn < 1000 && s->gate[0].missing + s->gate[1].missing; turn++) {
        CHECK_OK(fsdpi_gloo_turn(&s->gate[0]));
        CHECK_OK(fsdpi_gloo_turn(&s->gate[1]));
    }
    CHECK_EQ_INT(s->gate[0].missing + s->gate[1].missing, 0);
    CHECK_EQ_INT(send(s->gate[1].fds[0], "x", 1, 0), 1);
    struct pollfd p = {s->gate[0].fds[1], POLLIN, 0};
    CHECK_EQ_INT(poll(&p, 1, 5000), 1);
    CHECK_EQ_INT(recv(s->gate[0].fds[1], noise, sizeof noise, 0), 1);
    CHECK_EQ_INT(noise[0], 'x');
    int open_links = 0;
    for (int i = 0; i < s->gate[0].num_links; i++) open_links += s->gate[0].links[i].fd >= 0;
    CHECK(open_links <= FSDPI_GLOO_CALLERS + 2);
    for (int i = 0; i < UNTRUSTED; i++)
        if (fd[i] >= 0) close(fd[i]);
    free_gates(s);
}

TEST(gloo, a_member_gets_past_untrusted_peers) { gets_past_untrusted(0); }
TEST(gloo, a_member_gets_past_who_has_heard_the_ticket) { gets_past_untrusted(1); }
TEST(long_gloo, a_member_gets_past_untrusted_peers_300_times, SECONDS(600) | AT_NIGHT(GLOO)) {
    for (int i = 0; i < 300; i++) gets_past_untrusted(0);
}

/* ---- the last words of a rank that leaves ---------------------------------------------------- */

enum { LAST_BYTES = 64 << 20 };

/* Checks that all of [p, p + bytes) is `value`, faster than a loop. */
static void all_are(const char *p, size_t bytes, int value) {
    CHECK_EQ_INT(*(const unsigned char *)p, (unsigned char)value);
    W_CHECK(!memcmp(p, p + 1, bytes - 1), "bytes are not all %d", value);
}

/* Runs an operation of 64 MiB in its own world, which one rank closes at once. */
static void last_words(const launch *l, int rank, int round, fsdp_threads *threads) {
    w_heap heap;
    transport seen;
    fsdp_comm *comm;
    fsdp_caps caps;
    char job[100], *data;
    int world = l->row->world, kind = round % 3, leaver = round / 3 % world;
    uint64_t dice = h_seed() + (uint64_t)(round * 64 + rank);
    shape s;
    memset(&seen, 0, sizeof seen);
    mine = &seen;
    snprintf(job, sizeof job, "%s-%d", l->job, round);
    snprintf(w_case, sizeof w_case, "round %d: kind %d, rank %d leaves", round, kind, leaver);
    fsdp_boot boot = boot_of(rank, world, threads, job, &heap);
    OK_ON(NULL, ops()->open(&boot, &caps, &comm));
    OK_ON(comm, ops()->alloc(comm, LAST_BYTES, (void **)&data));
    int64_t count = LAST_BYTES / world;
    if (kind == 0) {
        s = listed(FSDP_OP_ALL_GATHER, FSDP_U8, world, &count, 1);
        s.in_place = 1;
        memset(data + count * rank, round * 8 + rank, (size_t)count);
    } else if (kind == 1) {
        count /= 4;
        s = listed(FSDP_OP_REDUCE_SCATTER, FSDP_I32, world, &count, 1);
        memset(data, 1 + rank, LAST_BYTES); /* no carries: the sums of bytes fit */
    } else {
        s = plain(FSDP_OP_BROADCAST, FSDP_U8, LAST_BYTES);
        s.root = leaver;
        memset(data, round * 8 + rank, LAST_BYTES);
    }
    fsdp_coll c = coll_of(&s, data, data, "last");
    if (kind == 1) c.dst = data + (size_t)count * 4 * (size_t)rank;
    if (h_rand64(&dice) % 2) usleep((useconds_t)(h_rand64(&dice) % 3000));
    OK_ON(comm, ops()->run(comm, &c));
    if (rank != leaver) { /* once, longer than the close handshake's timeout */
        usleep((useconds_t)(round == 2 ? 700000 : h_rand64(&dice) % 5000));
        OK_ON(comm, ops()->poll(comm));
        for (int k = 0; k < world && kind == 0; k++)
            all_are(data + count * k, (size_t)count, round * 8 + k);
        if (kind == 1) all_are((char *)c.dst, (size_t)count * 4, world * (world + 1) / 2);
        if (kind == 2) all_are(data, LAST_BYTES, round * 8 + leaver);
    }
    ops()->free(comm, data, LAST_BYTES);
    ops()->close(comm);
    nothing_is_left(&heap, &seen);
    mine = NULL;
}

enum { MOST_ROUNDS = 30 };

static fsdp_threads last_threads[MOST_ROUNDS];
static int rounds;

static void all_last_words(int rank, int world, void *arg) {
    const launch *l = (const launch *)arg;
    (void)world;
    for (int i = 0; i < rounds; i++)
        last_words(l, rank, i, l->row->threads ? &last_threads[i] : NULL);
}
static const ranks few_ranks[] = {{"processes/W=3", 0, 3, 1}, {"threads/W=2", 1, 2, 1}};
static void run_last_words(const ranks *row, int count) {
    launch l;
    memset(&l, 0, sizeof l);
    l.row = row;
    rounds = count;
    snprintf(l.job, sizeof l.job, "gloo-last-%d", (int)getpid());
    for (int i = 0; i < rounds; i++) last_threads[i].size = row->world;
    if (row->threads) h_ranks_thread(row->world, all_last_words, &l);
    else h_ranks_proc(row->world, all_last_words, &l);
    h_message("%d rounds of 64 MiB", rounds);
}
TEST_P(gloo, what_is_sent_before_a_rank_leaves_arrives, few_ranks) { run_last_words(row, 6); }
TEST_P(long_gloo, what_is_sent_before_a_rank_leaves_arrives, few_ranks,
       SECONDS(300) | AT_NIGHT(GLOO)) {
    run_last_words(row, MOST_ROUNDS);
}

/* ---- a thread that is held while its message arrives and the sender leaves ------------------- */

static struct {
    fsdp_gloo_context *context;
    pthread_t thread;
    long id;
} held; /* the thread that waits */

/* Holds the waiting thread until Gloo's thread has read everything, and has checked once more for
   closed connections. */
static void hold(int number) {
    long ns = 0;
    (void)number;
    while (fsdp_gloo_context_first_lost(held.context) < 0) h_nap(&ns);
    usleep(100000);
}

static int is_asleep(long id) {
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/self/task/%ld/stat", id);
    FILE *f = fopen(path, "r");
    CHECK(f && fscanf(f, "%*d (%*[^)]) %c", &state) == 1);
    (void)fclose(f);
    return state == 'S';
}

static void waits_and_is_held(member *m) {
    fsdpi_gloo_comm *c = fsdpi_gloo_of((fsdpi_comm *)(void *)m->comm);
    shape s = plain(FSDP_OP_ALL_REDUCE, FSDP_F32, 1);
    fsdp_coll op = coll_of(&s, m->src, m->dst, "held");
    op.src = op.dst;
    *(float *)(void *)m->dst = (float)(1 + m->rank);
    if (m->rank == 0) { /* makes Gloo's thread read */
        CHECK(signal(SIGUSR1, hold) != SIG_ERR);
        held.thread = pthread_self(), held.id = syscall(SYS_gettid);
        fsdp_gloo_context_overlap(c->context, 1);
        __atomic_store_n(&held.context, c->context, __ATOMIC_SEQ_CST);
    } else {
        for (int asleep = 0; asleep < 20; usleep(1000))
            asleep = __atomic_load_n(&held.context, __ATOMIC_SEQ_CST) && is_asleep(held.id)
                         ? asleep + 1
                         : 0;
        CHECK_EQ_INT(pthread_kill(held.thread, SIGUSR1), 0);
    }
    OK_ON(m->comm, ops()->run(m->comm, &op));
    CHECK(*(float *)(void *)m->dst == 3);
    if (m->rank == 0) fsdp_gloo_context_overlap(c->context, 0);
}
TEST(gloo, what_has_arrived_when_its_sender_leaves_counts) {
    static const ranks two = {"threads/W=2", 1, 2, 1};
    run_ranks(&two, waits_and_is_held, NULL, 64);
}

/* ---- many small worlds at once, of which each fails ------------------------------------------ */

enum { TRIO = 3, TEXT = 1400 };

/* Result of one rank. */
typedef struct {
    w_heap heap;
    transport seen;
    int step, status; /* the step that failed, and its status */
    int64_t ns;       /* from the victim's failure to the end */
    char text[TEXT];
} outcome;

typedef struct {
    fsdp_threads threads;
    int call, with, victim, variant, is_large;
    int64_t at;
    outcome rank[TRIO];
} trial;

typedef struct {
    trial *list;
    void (*body)(trial *t, int rank);
} trials;

static void on_trial(int thread, int world, void *arg) {
    trials *all = (trials *)arg;
    (void)world;
    h_rank = thread % TRIO;
    all->body(&all->list[thread / TRIO], thread % TRIO);
}

static void run_trials(trial *list, int count, void (*body)(trial *, int)) {
    enum { BATCH = 24 }; /* worlds at a time: mostly they wait */
    trials all = {list, body};
    for (int i = 0; i < count; i += BATCH, all.list += BATCH)
        h_ranks_thread(TRIO * (count - i < BATCH ? count - i : BATCH), on_trial, &all);
}

static void open_trial(trial *t, int rank, member *m, outcome *o) {
    memset(m, 0, sizeof *m);
    mine = &o->seen;
    t->threads.size = TRIO;
    m->boot = boot_of(rank, TRIO, &t->threads, "trial", &o->heap);
    /* a rank that waits for this deadline fails the test */
    m->boot.timeout_ns = (int64_t)3600 * 1000000000;
    m->rank = m->index = rank;
    m->size = TRIO;
    for (int k = 0; k < TRIO; k++) m->of[k] = k;
}

static int descriptors(void) { return h_entries("/proc/self/fd"); }

/* Returns 1 if the text begins with this rank's name. */
static int is_from(const char *text, int rank) {
    char name[16];
    snprintf(name, sizeof name, "rank %d: ", rank);
    return !strncmp(text, name, strlen(name));
}

/* Returns 1 if the text names a rank after the rank's own prefix. */
static int says_rank(const char *text, int rank) {
    char name[16];
    const char *rest = strstr(text, ": ");
    snprintf(name, sizeof name, "rank %d", rank);
    return rest && strstr(rest, name);
}

/* ---- the transport fails --------------------------------------------------------------------- */

enum { OPEN, SPLIT, GATHERS, SCATTERS, REDUCES, BROADCASTS, TO_ALL, IN_GROUP, STEPS };

static fsdp_status one_step(member *m, member *g, int step) {
    int64_t lists[3] = {5, 20000, 1}, one = 40;
    fsdp_status status = FSDP_OK;
    shape s = listed(FSDP_OP_ALL_GATHER, FSDP_F32, m->size, lists, 3);
    if (step == SCATTERS) s = listed(FSDP_OP_REDUCE_SCATTER, FSDP_F32, m->size, lists, 3);
    if (step == REDUCES) s = plain(FSDP_OP_ALL_REDUCE, FSDP_F32, 20000);
    if (step == BROADCASTS) s = plain(FSDP_OP_BROADCAST, FSDP_F32, 20000);
    if (step == TO_ALL) s = plain(FSDP_OP_ALL_TO_ALL, FSDP_F32, 10000);
    if (step == IN_GROUP) s = listed(FSDP_OP_ALL_GATHER, FSDP_F32, m->size, &one, 1);
    status = try_shape(step == IN_GROUP ? g : m, &s);
    return status;
}

/* Runs all steps until one fails; then closes everything. */
static void program(trial *t, int rank) {
    static const int32_t backwards[TRIO] = {2, 1, 0};
    fsdp_group group = {0, TRIO - 1 - rank, TRIO, 0, backwards, "group"};
    outcome *o = &t->rank[rank];
    member m, g;
    fsdp_caps caps;
    int is_victim = rank == t->victim;
    open_trial(t, rank, &m, o);
    o->seen.fail = is_victim ? t->call : NOTHING, o->seen.fail_at = t->at, o->seen.with = t->with;
    int64_t start = fsdpi_monotonic_ns(NULL);
    o->status = (int)ops()->open(&m.boot, &caps, &m.comm);
    if (!o->status) take_room(&m, (size_t)512 << 10);
    g = m;
    g.comm = NULL;
    if (!o->status && (o->status = (int)ops()->split(m.comm, &group, &g.comm)) != 0)
        o->step = SPLIT;
    g.index = group.index;
    memcpy(g.of, backwards, sizeof backwards);
    for (int i = GATHERS; i < STEPS && !o->status; i++) {
        o->step = i;
        o->status = (int)one_step(&m, &g, i);
    }
    if (o->status)
        snprintf(o->text, sizeof o->text, "%s",
                 ops()->error_text(o->step == IN_GROUP ? g.comm : m.comm));
    else o->step = STEPS;
    if (g.comm) ops()->close(g.comm);
    if (m.comm) leave_room(&m);
    if (m.comm) ops()->close(m.comm);
    o->ns = fsdpi_monotonic_ns(NULL) - start;
    mine = NULL;
}

typedef struct {
    const char *name;
    int call, is_own; /* is_own: the cause is never a peer */
} failing_call;
static const failing_call failing_calls[] = {
    {"device_create", DEVICE_CREATE, 1},
    {"context_create", CONTEXT_CREATE, 1},
    {"connect", CONNECT, 0},
    {"buffer_create", BUFFER_CREATE, 1},
    {"send", SEND, 0},
    {"recv", RECV, 0},
    {"wait_send", WAIT_SEND, 0},
    {"wait_recv", WAIT_RECV, 0},
};

static void check_failure(const trial *t, const failing_call *row) {
    const outcome *v = &t->rank[t->victim];
    for (int k = 0; k < TRIO; k++) {
        const outcome *o = &t->rank[k];
        snprintf(w_case, sizeof w_case, "%s number %lld of rank %d fails with %d", row->name,
                 (long long)t->at, t->victim, t->with);
        nothing_is_left(&o->heap, &o->seen);
        W_CHECK(v->seen.failed, "it was not called that often");
        W_CHECK(o->step <= v->step + 1, "rank %d went on from step %d to %d", k, v->step, o->step);
        if (!o->status) {
            W_CHECK(v->step >= STEPS - 1 && (k != t->victim || v->step == STEPS),
                    "rank %d has seen no failure, rank %d in step %d: %s", k, t->victim, v->step,
                    v->text);
            continue;
        }
        W_CHECK(is_from(o->text, k), "rank %d says '%s'", k, o->text);
        W_CHECK(says_rank(o->text, 0) || says_rank(o->text, 1) || says_rank(o->text, 2),
                "no culprit: %s", o->text);
        int is_own = row->is_own || t->with == FSDP_GLOO_NO_MEMORY || t->with == FSDP_GLOO_INTERNAL;
        W_CHECK(!is_own || says_rank(o->text, t->victim), "rank %d: its own fault, but '%s'", k,
                o->text);
        W_CHECK(t->with != FSDP_GLOO_TIMEOUT || o->status == FSDP_ERR_TIMEOUT || o->step > v->step,
                "status %d: %s", o->status, o->text);
    }
}

/* Runs trials of failures of this call: up to `most` places for each error, with the victim in
   turn. */
static void fail_everywhere(const failing_call *row, int most) {
    static const int ways[] = {FSDP_GLOO_NO_MEMORY, FSDP_GLOO_INTERNAL, FSDP_GLOO_LOST,
                               FSDP_GLOO_TIMEOUT};
    trial *list = (trial *)lab_zeros((size_t)(4 * most + 1), sizeof *list);
    int count = 0, before = descriptors();
    uint64_t dice = h_seed();
    run_trials(list, 1, program); /* without a failure: counts the calls */
    for (int k = 0; k < TRIO; k++)
        CHECK_MSG(list->rank[k].step == STEPS, "rank %d: %s", k, list->rank[k].text);
    int64_t total[TRIO], longest = 0;
    for (int k = 0; k < TRIO; k++) {
        total[k] = list->rank[k].seen.calls[row->call];
        CHECK(total[k] > 0);
    }
    memset(list, 0, sizeof *list);
    for (int w = 0; w < (row->is_own ? 2 : 4); w++)
        for (int i = 0; i < most; i++) {
            trial *t = &list[count];
            t->call = row->call, t->with = ways[w], t->victim = (i + w) % TRIO;
            int64_t places = total[t->victim];
            t->at = places > most ? 1 + (int64_t)(h_rand64(&dice) % (uint64_t)places) : i + 1;
            count += t->at <= places;
        }
    run_trials(list, count, program);
    for (int i = 0; i < count; i++) {
        check_failure(&list[i], row);
        for (int k = 0; k < TRIO; k++)
            if (list[i].rank[k].ns > longest) longest = list[i].rank[k].ns;
    }
    h_message("%s: %d trials, called %lld times by rank 0, the longest took %.2f s", row->name,
              count, (long long)total[0], (double)longest * 1e-9);
    CHECK_EQ_INT(descriptors(), before);
    free(list);
}
TEST_P(gloo, a_failing_transport_ends_the_world, failing_calls) {
    fail_everywhere(row, W_SLOW ? 3 : 6);
}
TEST_P(long_gloo, a_failing_transport_ends_the_world, failing_calls,
       SECONDS(300) | AT_NIGHT(GLOO)) {
    fail_everywhere(row, 300);
}

/* ---- ranks disagree -------------------------------------------------------------------------- */

typedef struct {
    const char *name, *word; /* word: name of the field in the error */
} field;
static const field fields[] = {
    {"gather_or_scatter", "operation"},
    {"gather_or_reduce", "operation"},
    {"reduce_or_broadcast", "operation"},
    {"gather_or_all_to_all", "operation"},
    {"dtype_of_the_same_size", "dtype"},
    {"dtype_of_another_size", "dtype"},
    {"dtype_of_a_reduction", "dtype"},
    {"out_dtype", "dtype"},
    {"less", "count"},
    {"more", "count"},
    {"small_or_large", "count"},
    {"segments", "segments"},
    {"number_of_segments", "segments"},
    {"root", "root"},
    {"redop", "reduction"},
    {"in_place", "in_place"},
    {"fingerprint", "settings"},
    {"unit", "unit"},
    {"state", "state"},
};
enum { FIELDS = sizeof fields / sizeof *fields };

static int field_is(const trial *t, const char *name) {
    return !strcmp(fields[t->variant].name, name);
}

/* Returns the operation of a rank; is_odd: of the rank that differs. */
static shape disputed(const trial *t, int is_odd) {
    int64_t n = t->is_large ? 20000 : 100, two[2] = {n / 2, n / 2};
    if (is_odd && field_is(t, "less")) n -= 60;
    if (is_odd && field_is(t, "more")) n += 60;
    if (is_odd && field_is(t, "small_or_large")) n = t->is_large ? 100 : 20000;
    shape s = listed(FSDP_OP_ALL_GATHER, FSDP_F32, TRIO, &n, 1);
    if (field_is(t, "segments") || field_is(t, "number_of_segments"))
        s = listed(FSDP_OP_ALL_GATHER, FSDP_F32, TRIO, two, 2);
    if (is_odd && field_is(t, "number_of_segments"))
        s = listed(FSDP_OP_ALL_GATHER, FSDP_F32, TRIO, &n, 1);
    if (field_is(t, "dtype_of_a_reduction") || field_is(t, "out_dtype"))
        s = listed(FSDP_OP_REDUCE_SCATTER, FSDP_F32, TRIO, &n, 1);
    if (field_is(t, "root") || field_is(t, "reduce_or_broadcast"))
        s = plain(FSDP_OP_BROADCAST, FSDP_F32, n);
    if (field_is(t, "redop")) s = plain(FSDP_OP_ALL_REDUCE, FSDP_F32, n);
    if (!is_odd) return s;
    if (field_is(t, "gather_or_scatter")) s.kind = FSDP_OP_REDUCE_SCATTER;
    if (field_is(t, "gather_or_reduce") || field_is(t, "reduce_or_broadcast"))
        s.kind = FSDP_OP_ALL_REDUCE;
    if (field_is(t, "gather_or_all_to_all")) s.kind = FSDP_OP_ALL_TO_ALL;
    if (field_is(t, "dtype_of_the_same_size")) s.dtype = s.out = FSDP_I32;
    if (field_is(t, "dtype_of_another_size") || field_is(t, "dtype_of_a_reduction"))
        s.dtype = s.out = FSDP_BF16;
    if (field_is(t, "out_dtype")) s.out = FSDP_BF16;
    if (field_is(t, "segments")) s.segs[1].full += 1;
    if (field_is(t, "root")) s.root = 2;
    if (field_is(t, "redop")) s.redop = FSDP_MAX;
    if (field_is(t, "in_place")) s.in_place = 1;
    return s;
}

/* Runs two operations on which all ranks agree, then one on which they do not. */
static void disagree(trial *t, int rank) {
    outcome *o = &t->rank[rank];
    member m;
    fsdp_caps caps;
    int is_odd = rank == t->victim;
    size_t from, to;
    open_trial(t, rank, &m, o);
    OK_ON(NULL, ops()->open(&m.boot, &caps, &m.comm));
    take_room(&m, (size_t)512 << 10);
    OK_ON(m.comm, one_step(&m, NULL, GATHERS));
    OK_ON(m.comm, one_step(&m, NULL, SCATTERS));
    shape s = disputed(t, is_odd);
    fsdp_coll c = coll_of(&s, m.src, m.dst, is_odd && field_is(t, "unit") ? "other" : "unit");
    if (is_odd && field_is(t, "fingerprint")) c.fingerprint = 77;
    if (is_odd && field_is(t, "state")) c.state = FSDP_STATE_PRE_BACKWARD;
    extents(&s, TRIO, &from, &to);
    memset(m.dst - GUARD, 0x5a, m.room + 2 * GUARD);
    o->status = (int)ops()->run(m.comm, &c);
    snprintf(o->text, sizeof o->text, "%s", ops()->error_text(m.comm));
    all_are(m.dst - GUARD, GUARD, 0x5a); /* nothing is written outside the expected range */
    all_are(m.dst + to, m.room - to + GUARD, 0x5a);
    CHECK_STATUS(ops()->run(m.comm, &c), FSDP_ERR_MISMATCH);
    leave_room(&m);
    ops()->close(m.comm);
    mine = NULL;
}

static void check_disagreement(const trial *t) {
    char differs[64];
    snprintf(w_case, sizeof w_case, "%s, large %d, rank %d differs", fields[t->variant].name,
             t->is_large, t->victim);
    for (int k = 0; k < TRIO; k++) {
        const outcome *o = &t->rank[k];
        const char *text = o->text, *list = strstr(text, "(differs in "), *side;
        W_CHECK(o->status == FSDP_ERR_MISMATCH, "rank %d: status %d: %s", k, o->status, text);
        W_CHECK(is_from(text, k) && strstr(text, "ranks disagree: rank"), "%s", text);
        W_CHECK(says_rank(text, t->victim) || t->victim == 1, "%s", text);
        side = strstr(text, " elements of ");
        W_CHECK(side && strstr(side + 1, " elements of "), "one side only: %s", text);
        snprintf(differs, sizeof differs, "%s", list ? list : "");
        W_CHECK(strstr(differs, fields[t->variant].word), "'%s' is not named: %s",
                fields[t->variant].word, text);
        nothing_is_left(&o->heap, &o->seen);
    }
}
TEST_P(gloo, a_disagreement_is_a_mismatch_on_all, fields) {
    enum { WORLDS = 4 };
    trial *list = (trial *)lab_zeros(WORLDS, sizeof *list);
    for (int i = 0; i < WORLDS; i++) {
        list[i].variant = (int)(row - fields);
        list[i].is_large = i & 1;
        list[i].victim = (list[i].variant + i / 2) % TRIO;
    }
    run_trials(list, WORLDS, disagree);
    for (int i = 0; i < WORLDS; i++) check_disagreement(&list[i]);
    free(list);
}

/* ---- anything, in any order ------------------------------------------------------------------ */

static int one_of(uint64_t *dice, const int *list, size_t count) {
    return list[h_rand64(dice) % count];
}

static int64_t some(uint64_t *dice) { /* elements; 8 * 6 * W of them fit into RANDOM_ROOM */
    uint64_t z = h_rand64(dice);
    switch (h_rand64(dice) % 6) {
    case 0: return (int64_t)(z % 3);
    case 1: return 4090 + (int64_t)(z % 12);
    case 2: return 8185 + (int64_t)(z % 14);
    case 3: return (int64_t)(z % 20000);
    default: return (int64_t)(z % 300);
    }
}

static shape random_shape(uint64_t *dice, int size) {
    static const int kinds[] = {FSDP_OP_ALL_GATHER, FSDP_OP_ALL_GATHER,     FSDP_OP_REDUCE_SCATTER,
                                FSDP_OP_ALL_REDUCE, FSDP_OP_REDUCE_SCATTER, FSDP_OP_BROADCAST,
                                FSDP_OP_ALL_TO_ALL};
    static const int floats[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64};
    static const int numbers[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64, FSDP_I32, FSDP_I64};
    static const int any[] = {FSDP_F32, FSDP_BF16, FSDP_F64, FSDP_U8, FSDP_I8, FSDP_I16, FSDP_I64};
    int64_t counts[MAX_SEGS];
    int kind = one_of(dice, kinds, sizeof kinds / sizeof *kinds);
    int num = 1 + (int)(h_rand64(dice) % MAX_SEGS);
    for (int i = 0; i < num; i++) counts[i] = some(dice);
    shape s = listed(kind, one_of(dice, any, sizeof any / sizeof *any), size, counts, num);
    if (!is_list(&s)) s = plain(kind, s.dtype, some(dice) * 3);
    s.root = (int)(h_rand64(dice) % (uint64_t)size);
    if (kind == FSDP_OP_ALL_GATHER) s.in_place = (int)(h_rand64(dice) & 1);
    if (kind == FSDP_OP_ALL_REDUCE) {
        s.dtype = s.out = one_of(dice, numbers, sizeof numbers / sizeof *numbers);
        s.redop = (int)(h_rand64(dice) % 3);
    }
    if (kind == FSDP_OP_REDUCE_SCATTER) {
        s.dtype = one_of(dice, floats, 4), s.out = one_of(dice, floats, 4);
        s.accumulate = (int)(h_rand64(dice) & 1);
        s.scale = h_rand64(dice) & 1 ? 1.0 : 0.37;
    }
    s.shift = 8 * (size_t)(h_rand64(dice) % 8);
    return s;
}

enum { RANDOM_ROOM = 8 * (MAX_SEGS * 20000 + 60000) * 4 };

typedef struct {
    member *team;
    transport *seen;
    int rank, steps;
} lane;

static void *second_lane(void *arg) {
    lane *l = (lane *)arg;
    uint64_t dice = h_seed() + 5;
    mine = l->seen;
    h_rank = l->rank;
    for (int i = 0; i < l->steps; i++) {
        shape s = random_shape(&dice, l->team->size);
        run_shape(l->team, &s);
    }
    return NULL;
}

/* Runs random operations on the world, on a group of all ranks in reverse order, and on groups of
   every second rank; at the same time a second thread uses another group. */
static void anything(member *m) {
    int steps = *(const int *)m->start->arg, parity = m->rank % 2, size = 0;
    int32_t all[MAX_WORLD], backwards[MAX_WORLD], half[MAX_WORLD];
    for (int k = 0; k < m->size; k++) all[k] = k, backwards[k] = m->size - 1 - k;
    for (int k = parity; k < m->size; k += 2) half[size++] = k;
    member *teams[3], *beside = make_group(m, 0, all, m->size, "lane", RANDOM_ROOM);
    teams[0] = m;
    teams[1] = make_group(m, 0, backwards, m->size, "backwards", RANDOM_ROOM);
    teams[2] = make_group(m, parity, half, size, "half", RANDOM_ROOM);
    lane l = {beside, &m->seen, m->rank, steps / 3};
    pthread_t thread;
    CHECK_EQ_INT(pthread_create(&thread, NULL, second_lane, &l), 0);
    uint64_t dice = h_seed();
    for (int i = 0; i < steps - l.steps; i++) {
        int which = (int)(h_rand64(&dice) % 3);
        uint64_t own = h_rand64(&dice) + (which == 2 ? (uint64_t)parity : 0);
        shape s = random_shape(&own, teams[which]->size);
        run_shape(teams[which], &s);
    }
    pthread_join(thread, NULL);
    m->cases += teams[1]->cases + teams[2]->cases + beside->cases;
    drop_group(teams[2], 1);
    drop_group(teams[1], 1);
    drop_group(beside, 1);
}
static const ranks random_ranks[] = {
    {"processes/W=3", 0, 3, 1}, {"threads/W=4", 1, 4, 1}, {"processes/W=4", 0, 4, 1},
    {"near/W=4", 0, 4, 0},      {"mixed/2+1", 0, 3, 2},   {"mixed/2+2", 0, 4, 2},
};
TEST_P(gloo, anything, random_ranks) {
    int steps = W_SLOW ? 100 : 170;
    run_ranks(row, anything, &steps, RANDOM_ROOM);
}
TEST_P(long_gloo, anything, random_ranks, SECONDS(900) | AT_NIGHT(GLOO)) {
    int steps = W_SLOW ? 700 : 2000;
    run_ranks(row, anything, &steps, RANDOM_ROOM);
}

/* ---- more elements than 32 bits have --------------------------------------------------------- */

enum { WORD = sizeof(uint64_t) };

static void fill_words(char *at, size_t bytes, uint64_t salt) {
    for (size_t i = 0; i < bytes / WORD; i++) {
        uint64_t word = (i + salt) * 0x9e3779b97f4a7c15u;
        memcpy(at + i * WORD, &word, WORD);
    }
}

static void check_words(const char *at, size_t bytes, uint64_t salt) {
    for (size_t i = 0; i < bytes / WORD; i++) {
        uint64_t word = (i + salt) * 0x9e3779b97f4a7c15u, got;
        memcpy(&got, at + i * WORD, WORD);
        CHECK_MSG(got == word, "at byte %zu of %zu [%s]", i * WORD, bytes, w_case);
    }
}

static void huge(member *m) {
    int64_t count = ((int64_t)1 << 31) + 40; /* per rank; together more than 2^32 */
    size_t part = (size_t)count, bytes = 2 * part;
    char *data;
    OK_ON(m->comm, ops()->alloc(m->comm, bytes, (void **)&data));
    shape s = listed(FSDP_OP_ALL_GATHER, FSDP_U8, 2, &count, 1);
    s.in_place = 1;
    fsdp_coll c = coll_of(&s, NULL, data, "huge");
    snprintf(w_case, sizeof w_case, "all_gather");
    fill_words(data + part * (size_t)m->rank, part, (uint64_t)m->rank << 40);
    OK_ON(m->comm, ops()->run(m->comm, &c));
    for (uint64_t k = 0; k < 2; k++) check_words(data + part * k, part, k << 40);
    snprintf(w_case, sizeof w_case, "broadcast");
    s = plain(FSDP_OP_BROADCAST, FSDP_U8, (int64_t)bytes);
    s.root = 1;
    c = coll_of(&s, NULL, data, "huge");
    fill_words(data, bytes, m->rank ? 7 : 8);
    OK_ON(m->comm, ops()->run(m->comm, &c));
    check_words(data, bytes, 7);
    ops()->free(m->comm, data, bytes);
}
TEST(long_gloo, counts_beyond_32_bits, SECONDS(300) | AT_NIGHT(GLOO)) {
    static const ranks pair = {"processes/W=2", 0, 2, 1};
    const char *whose;
    if (W_SLOW) SKIP("a sanitizer would take too long");
    if (fsdpi_memory_left(&whose) < (int64_t)12 << 30) SKIP("needs 12 GiB of free memory");
    run_ranks(&pair, huge, NULL, 64);
}
#endif
