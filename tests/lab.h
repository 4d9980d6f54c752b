/* lab.h - helpers that tests share: numbers of any dtype, an allocator that counts and fails on
   demand, worlds that log nothing and have a short deadline, ranks as threads or as processes.
   library.h has the library under test; lab_net.h has nets, and the expected results of training
   them.

       static void body(lab_rank *r) { CALL(r->w, fsdp_barrier(r->w)); }
       TEST(a, b) { lab_run(4, NULL, body, NULL); }

   SPDX-License-Identifier: MIT */
#ifndef LAB_H
#define LAB_H
#include "harness.h"
#include "library.h"

/* Sanitizers make everything slower, so there are fewer cases; and they have their own malloc. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define W_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define W_SANITIZED 1
#endif
#if __has_feature(address_sanitizer)
#define W_ASAN 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#define W_ASAN 1
#endif
#ifndef W_ASAN
#define W_ASAN 0 /* otherwise one rank gathers copies, and 4096 bytes follow each buffer: guard.h */
#endif
#ifdef W_SANITIZED
enum { W_SLOW = 1 };
#else
enum { W_SLOW = 0 };
#endif

/* ---- numbers --------------------------------------------------------------------------------- */

H_FN void *lab_at(const void *a, fsdp_dtype dtype, int64_t i) {
    return (char *)(uintptr_t)a + i * (int64_t)fsdp_dtype_size(dtype);
}
/* Returns element i of an array of any float type, or of bytes. */
H_FN double lab_get(const void *a, fsdp_dtype dtype, int64_t i) {
    double x = 0;
    if (dtype == FSDP_F32) return (double)((const float *)a)[i];
    if (dtype == FSDP_U8) return ((const uint8_t *)a)[i];
    CHECK_OK(fsdp_convert(&x, FSDP_F64, lab_at(a, dtype, i), dtype, 1));
    return x;
}
H_FN void lab_put(void *a, fsdp_dtype dtype, int64_t i, double x) {
    if (dtype == FSDP_F32) ((float *)a)[i] = (float)x;
    else if (dtype == FSDP_U8) ((uint8_t *)a)[i] = (uint8_t)(int)x;
    else CHECK_OK(fsdp_convert(lab_at(a, dtype, i), dtype, &x, FSDP_F64, 1));
}
/* Convert arrays to and from doubles. */
H_FN void lab_load(double *to, const void *from, fsdp_dtype dtype, int64_t numel) {
    CHECK_OK(fsdp_convert(to, FSDP_F64, from, dtype, numel));
}
H_FN void lab_store(void *to, fsdp_dtype dtype, const double *from, int64_t numel) {
    CHECK_OK(fsdp_convert(to, dtype, from, FSDP_F64, numel));
}

H_FN uint64_t lab_bits(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
H_FN uint32_t lab_bits32(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
H_FN double lab_from_bits(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}
H_FN float lab_from_bits32(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}
H_FN int lab_same(double a, double b) { return lab_bits(a) == lab_bits(b); }
#define LAB_INF lab_from_bits(0x7FF0000000000000u)
#define LAB_NAN lab_from_bits(0x7FF8000000000000u)

/* Precise arithmetic, with any compiler options. */
#if defined(__clang__)
#define LAB_PRECISE_BEGIN                                                                          \
    _Pragma("float_control(precise, on, push)") _Pragma("clang fp contract(off)")
#define LAB_PRECISE_END _Pragma("float_control(pop)")
#elif defined(__GNUC__)
#define LAB_PRECISE_BEGIN                                                                          \
    _Pragma("GCC push_options") _Pragma("GCC optimize(\"no-fast-math\", \"fp-contract=off\")")
#define LAB_PRECISE_END _Pragma("GCC pop_options")
#endif

LAB_PRECISE_BEGIN
/* Returns the nearest value of a float type, ties to even, rounded once; without fsdp_convert. A
   value below the smallest normal number is a multiple of the smallest subnormal one, and a
   double near 1.5 * 2^52 times that has no lower bits. */
H_FN double lab_round(fsdp_dtype dtype, double x) {
    const int half = dtype == FSDP_F16, drop = half ? 42 : 45; /* dropped bits of the mantissa */
    const double normal = half ? 6.103515625e-05 : 1.1754943508222875e-38;
    const double unit = normal / (half ? 1024 : 128);
    const double beyond = half ? 65536 : 3.402823669209385e+38;
    const double size = x < 0 ? -x : x;
    uint64_t u = lab_bits(x), sign = u & 0x8000000000000000u;
    volatile double r = size;
    if (dtype == FSDP_F64 || h_non_finite(x)) return x;
    if (dtype != FSDP_F16 && dtype != FSDP_BF16) return (double)(float)x;
    if (size < normal) {
        r = size + 6755399441055744.0 * unit;
        r = r - 6755399441055744.0 * unit;
    } else {
        u &= ~sign;
        u += ((uint64_t)1 << (drop - 1)) - 1 + (u >> drop & 1);
        r = lab_from_bits(u >> drop << drop);
        if (r >= beyond) r = LAB_INF;
    }
    return lab_from_bits(lab_bits(r) | sign);
}
LAB_PRECISE_END

/* Returns 64 pseudo-random bits. */
H_FN uint64_t lab_hash(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    uint64_t z = a * 0x9e3779b97f4a7c15u + b * 0xbf58476d1ce4e5b9u + c * 0x94d049bb133111ebu + d +
                 1;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
H_FN int lab_pick(uint64_t *state, int below) { return (int)(h_rand64(state) % (uint64_t)below); }
/* [0, 1) */
H_FN double lab_uniform(uint64_t *state) {
    return (double)(h_rand64(state) >> 11) / 9007199254740992.0;
}
/* Adds bytes to a hash, which may start with any number. */
H_FN void lab_fold(uint64_t *hash, const void *data, size_t nbytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t k = 0; k < nbytes; k++) *hash = (*hash ^ p[k]) * 1099511628211u;
}

/* The same, eight bytes at a time: for hashes that are compared in one run, and recorded nowhere. */
H_FN void lab_fold_fast(uint64_t *hash, const void *data, size_t nbytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (uint64_t word; nbytes >= sizeof word; p += sizeof word, nbytes -= sizeof word) {
        memcpy(&word, p, sizeof word);
        *hash = (*hash ^ word) * 1099511628211u;
        *hash ^= *hash >> 29; /* the product carries no bit down */
    }
    lab_fold(hash, p, nbytes);
}

/* Returns the number of elements of a shape. */
H_FN int64_t lab_numel(int ndim, const int64_t *shape) {
    int64_t numel = 1;
    for (int d = 0; d < ndim; d++) numel *= shape[d];
    return numel;
}
/* Returns 1 if a getter returned its fallback memory, because it failed. */
H_FN int lab_undefined(fsdp_model *m, const void *got) {
    return got && got == fsdp_fallback_ptr(m, FSDP_OK);
}
/* Returns the number of elements of a view's full parameter. */
H_FN int64_t lab_full_numel(const fsdp_param_view *v) { return lab_numel(v->ndim, v->shape); }

/* Returns zeros, never NULL. */
H_FN void *lab_zeros(size_t count, size_t size) {
    void *ptr = calloc(count ? count : 1, size);
    CHECK(ptr != NULL);
    return ptr;
}
/* Returns zeros that the test shares with ranks in processes, until it ends. */
H_FN void *lab_shared(size_t size) {
    void *ptr = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(ptr != MAP_FAILED);
    return ptr;
}
H_FN double *lab_doubles(int64_t count) {
    return (double *)lab_zeros((size_t)count, sizeof(double));
}

/* ---- worlds ---------------------------------------------------------------------------------- */

#define CALL(world, call)                                                                          \
    do {                                                                                           \
        fsdp_status w_status = (call);                                                             \
        if (w_status)                                                                              \
            h_fail(H_HERE(#call), "%s: %s [%s]", fsdp_status_name(w_status),                       \
                   fsdp_last_error(world), w_case);                                                \
    } while (0)
#define W_CHECK(cond, ...) /* ... is a format and its values; adds w_case */                       \
    do {                                                                                           \
        char w_text[1600];                                                                         \
        if (cond) break;                                                                           \
        snprintf(w_text, sizeof w_text, __VA_ARGS__);                                              \
        h_fail(H_HERE("CHECK(" #cond ")"), "%s [%s]", w_text, w_case);                             \
    } while (0)

/* Checks that a call fails with a status, and that its text contains a word. */
#define REFUSED_AS(status, world, call, word) w_refused(H_HERE(#call), world, call, status, word)
#define REFUSED(world, call, word)            REFUSED_AS(FSDP_ERR_INVALID_ARG, world, call, word)

/* The current case, for the text of a failure. */
static __thread __attribute__((unused)) char w_case[256];

H_FN void w_refused(const char *file, int line, const char *what, fsdp_world *w, fsdp_status got,
                    fsdp_status expected, const char *word) {
    const char *text = fsdp_last_error(w);
    if (got != expected)
        h_fail(file, line, what, "%s, expected %s; %s [%s]", fsdp_status_name(got),
               fsdp_status_name(expected), text, w_case);
    if (!strstr(text, word))
        h_fail(file, line, what, "the text '%s' does not say '%s' [%s]", text, word, w_case);
}

H_FN void w_quiet(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)rank, (void)text, (void)user;
}

/* The logger of all worlds; a test may set its own. */
static void (*w_log)(int, fsdp_status, int, const char *, void *) __attribute__((unused)) = w_quiet;

/* Returns a world desc. threads NULL: a process. lanes 0: inline. */
H_FN fsdp_world_desc w_desc(int rank, int world, fsdp_threads *threads, const char *job,
                            int lanes) {
    fsdp_world_desc d = FSDP_ZERO;
    d.rank = d.local_rank = rank;
    d.world_size = world;
    d.threads = threads;
    d.job = job;
    d.comm_threads = lanes ? lanes : -1;
    d.timeout_ms = 30000;
    d.logger.log = w_log;
    return d;
}

/* For a test's own boot. */
H_FN void *w_alloc(size_t size, size_t align, void *user) {
    void *ptr = NULL;
    (void)user;
    return posix_memalign(&ptr, align, size) ? NULL : ptr;
}
H_FN void w_free(void *ptr, size_t size, void *user) {
    (void)size, (void)user;
    free(ptr);
}
H_FN int64_t w_now_ns(void *user) {
    struct timespec t;
    (void)user;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}
H_FN void w_sleep_ns(int64_t ns) {
    struct timespec t = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    nanosleep(&t, NULL);
}

/* Returns a job name for the ranks that one test starts as processes. */
H_FN const char *w_job(const char *what) {
    static __thread char job[100];
    snprintf(job, sizeof job, "test-%s-%d-%d", what, (int)getppid(), (int)getuid());
    return job;
}

/* Opens the backend without its fused reduction: reductions work as on other backends. */
H_FN fsdp_status w_plain_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **out) {
    fsdp_status status = fsdp_shm_comm_ops()->open(boot, caps, out);
    caps->flags &= ~(uint32_t)FSDP_CAP_FUSED_REDUCE;
    return status;
}
H_FN fsdp_comm_ops w_plain(void) {
    fsdp_comm_ops ops = *fsdp_shm_comm_ops();
    ops.open = w_plain_open;
    ops.name = "plain";
    return ops;
}

/* ---- an allocator that counts, and fails ----------------------------------------------------- */

typedef struct w_heap {
    int64_t live, live_bytes, total; /* blocks and bytes now, allocations so far */
    int64_t peak_bytes;              /* the most live_bytes so far, or since a test set it */
    int64_t fail_at;                 /* this allocation fails; -1: none */
    int persistent, failures;        /* persistent: and all after it */
} w_heap;

H_FN int64_t w_allocations(const w_heap *heap) {
    return __atomic_load_n(&heap->total, __ATOMIC_SEQ_CST);
}
/* Makes the n-th allocation from now on fail; -1: none. */
H_FN void w_fail(w_heap *heap, int64_t n) {
    __atomic_store_n(&heap->fail_at, n < 0 ? -1 : w_allocations(heap) + n, __ATOMIC_SEQ_CST);
}
/* Fills a block, or both ends of a large one: to touch each page costs more than most tests do. */
H_FN void w_fill(void *block, int byte, size_t size) {
    const size_t end = size < ((size_t)1 << 18) ? size : (size_t)1 << 17;
    memset(block, byte, end);
    memset((char *)block + size - end, byte, end);
}
H_FN void *w_heap_alloc(size_t size, size_t align, void *user) {
    w_heap *heap = (w_heap *)user;
    int64_t n = __atomic_fetch_add(&heap->total, 1, __ATOMIC_SEQ_CST);
    int64_t at = __atomic_load_n(&heap->fail_at, __ATOMIC_SEQ_CST);
    void *ptr = NULL;
    if (at >= 0 && (n == at || (n > at && heap->persistent))) {
        __atomic_add_fetch(&heap->failures, 1, __ATOMIC_SEQ_CST);
        return NULL;
    }
    if (size >> 40 || posix_memalign(&ptr, align, size)) return NULL;
    w_fill(ptr, 0xa5, size); /* no code may count on zeros */
    __atomic_add_fetch(&heap->live, 1, __ATOMIC_SEQ_CST);
    const int64_t now = __atomic_add_fetch(&heap->live_bytes, (int64_t)size, __ATOMIC_SEQ_CST);
    int64_t peak = __atomic_load_n(&heap->peak_bytes, __ATOMIC_SEQ_CST);
    while (now > peak && !__atomic_compare_exchange_n(&heap->peak_bytes, &peak, now, 0,
                                                      __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return ptr;
}
H_FN void w_heap_free(void *ptr, size_t size, void *user) {
    w_heap *heap = (w_heap *)user;
    if (!ptr) return;
    w_fill(ptr, 0x5a, size); /* freed memory is not read; the size is right */
    __atomic_sub_fetch(&heap->live, 1, __ATOMIC_SEQ_CST);
    __atomic_sub_fetch(&heap->live_bytes, (int64_t)size, __ATOMIC_SEQ_CST);
    free(ptr);
}
H_FN fsdp_allocator w_heap_allocator(w_heap *heap) {
    fsdp_allocator a = FSDP_ZERO;
    a.alloc = w_heap_alloc, a.free = w_heap_free, a.user = heap;
    return a;
}
H_FN void w_heap_use(w_heap *heap, fsdp_world_desc *desc) {
    memset(heap, 0, sizeof *heap);
    heap->fail_at = -1;
    desc->allocator = w_heap_allocator(heap);
}

/* Returns 1 if the backend under test sums f16 in f32 and divides before it stores. NCCL does
   not. */
H_FN int lab_divides(void) {
    const char *backend = getenv("FSDP_BACKEND");
    return !backend || strcmp(backend, "nccl") != 0;
}

/* Returns 1 if ranks share a GPU (tools/one_gpu.sh). Then each must be a process: NCCL takes the
   ranks of a process as one host, which needs a GPU for each of them. */
H_FN int lab_shares_gpu(void) {
    return !lab_divides() && (getenv("NCCL_HOSTID") || getenv("NCCL_MULTI_RANK_GPU_ENABLE"));
}

/* ---- ranks ----------------------------------------------------------------------------------- */

enum { LAB_WORLDS = 64 }; /* most worlds of a rank, one after the other or together */

typedef struct lab_how { /* zeros, or NULL: threads, inline, over shared memory */
    const char *job;
    int processes, lanes;
    int bare;   /* no world is made: the body calls lab_world */
    int shared; /* ranks read each other's memory: they must be threads */
    const fsdp_comm_ops *comm_ops;
    const fsdp_device_ops *device_ops;
} lab_how;

typedef struct lab_rank {
    int rank, size;
    fsdp_world *w; /* lab_end shuts it down, unless the body did */
    void *arg;
    w_heap *heap; /* heap of all its worlds; empty at the end */
    struct lab_start *start;
} lab_rank;

typedef struct lab_start {
    lab_how how;
    void (*body)(lab_rank *r);
    void *arg;
    fsdp_threads threads[LAB_WORLDS];
    w_heap *heaps;
    int number; /* number of this start in its test */
} lab_start;

/* Opens world number k, which allocates from this rank's heap. */
H_FN fsdp_world *lab_world(const lab_rank *r, int k, int lanes, const fsdp_comm_ops *comm_ops) {
    lab_start *s = r->start;
    char name[120];
    fsdp_world *w;
    snprintf(name, sizeof name, "%s-%d-%d", w_job(s->how.job ? s->how.job : "lab"), s->number, k);
    fsdp_world_desc d = w_desc(r->rank, r->size, s->how.processes ? NULL : &s->threads[k], name,
                               lanes);
    d.allocator = w_heap_allocator(r->heap);
    d.comm_ops = comm_ops;
    d.device_ops = s->how.device_ops;
    CALL(NULL, fsdp_init(&d, &w));
    return w;
}

/* Shuts down the world, if it is open. The shutdown must succeed if the world had not failed. */
H_FN void lab_end(lab_rank *r) {
    const int failed = r->w && lib_failed(r->w);
    const fsdp_status status = r->w ? fsdp_shutdown(r->w) : FSDP_OK;
    r->w = NULL;
    if (!failed) CHECK_OK(status);
}

H_FN void lab_on_rank(int rank, int size, void *arg) {
    lab_start *s = (lab_start *)arg;
    lab_rank r = {rank, size, NULL, s->arg, &s->heaps[rank], s};
    if (!s->how.bare) r.w = lab_world(&r, 0, s->how.lanes, s->how.comm_ops);
    s->body(&r);
    lab_end(&r);
    if (s->how.processes) CHECK_EQ_INT(r.heap->live, 0);
}

/* Starts the ranks, calls the body on each, and waits for them. */
H_FN void lab_run(int size, const lab_how *how, void (*body)(lab_rank *r), void *arg) {
    static int started;
    lab_start *s = (lab_start *)lab_zeros(1, sizeof *s);
    if (how) s->how = *how;
    if (!s->how.comm_ops && lab_shares_gpu()) { /* one rank, too: CUDA does not survive a fork */
        if (s->how.shared && size > 1) SKIP("ranks that are threads need a GPU each");
        s->how.processes = !s->how.shared;
    }
    s->number = started++;
    s->body = body;
    s->arg = arg;
    s->heaps = (w_heap *)lab_zeros((size_t)size, sizeof *s->heaps);
    for (int r = 0; r < size; r++) s->heaps[r].fail_at = -1;
    for (int k = 0; k < LAB_WORLDS; k++) s->threads[k].size = size;
    if (s->how.processes) h_ranks_proc(size, lab_on_rank, s);
    else h_ranks_thread(size, lab_on_rank, s);
    for (int r = 0; r < size; r++)
        CHECK_MSG(!s->heaps[r].live && !s->heaps[r].live_bytes,
                  "rank %d has left %lld blocks, %lld bytes", r, (long long)s->heaps[r].live,
                  (long long)s->heaps[r].live_bytes);
    free(s->heaps);
    free(s);
}

/* Runs a body that needs only its world. */
typedef struct lab_world_call {
    void (*body)(fsdp_world *world, const void *arg);
    const void *arg;
} lab_world_call;
H_FN void lab_call_body(lab_rank *r) {
    const lab_world_call *c = (const lab_world_call *)r->arg;
    c->body(r->w, c->arg);
}
H_FN void lab_on_worlds(int size, const lab_how *how,
                        void (*body)(fsdp_world *world, const void *arg), const void *arg) {
    lab_world_call c = {body, arg};
    lab_run(size, how, lab_call_body, &c);
}

/* ---- a guard before every call of a comm ----------------------------------------------------- */

/* Called before a split (group), a collective (coll) or an allocation (neither). It may count,
   delay, or fail the call with its own status and a text. desc.user is the guard. */
typedef struct lab_guard {
    fsdp_status (*before)(struct lab_guard *g, const fsdp_group *group, const fsdp_coll *coll);
    int plain;        /* without fused reductions */
    const char *text; /* text of a failure */
} lab_guard;

typedef struct lab_guarded { /* a comm of shared memory */
    fsdp_comm *real;
    lab_guard *guard;
    int failed;
} lab_guarded;

H_FN lab_guarded *lab_guarded_of(fsdp_comm *comm) { return (lab_guarded *)(void *)comm; }
H_FN fsdp_status lab_ask(lab_guarded *c, const fsdp_group *group, const fsdp_coll *coll) {
    const fsdp_status status = c->guard->before(c->guard, group, coll);
    if (status) c->failed = 1;
    return status;
}
H_FN fsdp_comm *lab_wrap(fsdp_comm *real, lab_guard *guard) {
    lab_guarded *c = real ? (lab_guarded *)lab_zeros(1, sizeof *c) : NULL;
    if (c) c->real = real, c->guard = guard;
    return (fsdp_comm *)(void *)c;
}
H_FN fsdp_status lab_guard_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **out) {
    lab_guard *guard = (lab_guard *)boot->user;
    fsdp_comm *real;
    fsdp_status status = fsdp_shm_comm_ops()->open(boot, caps, &real);
    if (guard->plain) caps->flags &= ~(uint32_t)FSDP_CAP_FUSED_REDUCE;
    *out = status ? NULL : lab_wrap(real, guard);
    return status;
}
H_FN fsdp_status lab_guard_split(fsdp_comm *comm, const fsdp_group *group, fsdp_comm **out) {
    lab_guarded *c = lab_guarded_of(comm);
    fsdp_comm *real = NULL;
    fsdp_status status = lab_ask(c, group, NULL);
    if (!status) status = fsdp_shm_comm_ops()->split(c->real, group, &real);
    *out = status ? NULL : lab_wrap(real, c->guard);
    return status;
}
H_FN void lab_guard_close(fsdp_comm *comm) {
    fsdp_shm_comm_ops()->close(lab_guarded_of(comm)->real);
    free(lab_guarded_of(comm));
}
H_FN fsdp_status lab_guard_run(fsdp_comm *comm, const fsdp_coll *coll) {
    const fsdp_status status = lab_ask(lab_guarded_of(comm), NULL, coll);
    return status ? status : fsdp_shm_comm_ops()->run(lab_guarded_of(comm)->real, coll);
}
H_FN fsdp_status lab_guard_alloc(fsdp_comm *comm, size_t size, void **out) {
    const fsdp_status status = lab_ask(lab_guarded_of(comm), NULL, NULL);
    return status ? status : fsdp_shm_comm_ops()->alloc(lab_guarded_of(comm)->real, size, out);
}
H_FN void lab_guard_free(fsdp_comm *comm, void *ptr, size_t size) {
    fsdp_shm_comm_ops()->free(lab_guarded_of(comm)->real, ptr, size);
}
H_FN const char *lab_guard_text(fsdp_comm *comm) {
    lab_guarded *c = lab_guarded_of(comm);
    return c && c->failed ? c->guard->text : fsdp_shm_comm_ops()->error_text(c ? c->real : NULL);
}
H_FN void lab_guard_abort(fsdp_comm *comm, fsdp_status status, const char *why) {
    fsdp_shm_comm_ops()->abort(lab_guarded_of(comm)->real, status, why);
}
H_FN fsdp_status lab_guard_poll(fsdp_comm *comm) {
    return fsdp_shm_comm_ops()->poll(lab_guarded_of(comm)->real);
}
H_FN fsdp_comm_ops lab_guard_ops(void) {
    fsdp_comm_ops ops = *fsdp_shm_comm_ops();
    ops.name = "guarded";
    ops.open = lab_guard_open, ops.split = lab_guard_split, ops.close = lab_guard_close;
    ops.run = lab_guard_run, ops.alloc = lab_guard_alloc, ops.free = lab_guard_free;
    ops.error_text = lab_guard_text, ops.abort = lab_guard_abort, ops.poll = lab_guard_poll;
    return ops;
}

/* ---- parameters and units -------------------------------------------------------------------- */

H_FN fsdp_param_desc lab_desc(int ndim, const int64_t *shape, int shard_dim, fsdp_dtype dtype,
                              int frozen) {
    fsdp_param_desc d = FSDP_ZERO;
    d.ndim = ndim, d.shard_dim = shard_dim, d.dtype = dtype, d.frozen = frozen;
    memcpy(d.shape, shape, (size_t)ndim * sizeof *shape);
    return d;
}
/* Makes a unit of these parameters; `like`, or NULL, has the other fields of its desc. */
H_FN fsdp_unit *lab_unit(fsdp_world *w, fsdp_model *m, const fsdp_unit_desc *like,
                         const fsdp_param_desc *params, int count) {
    fsdp_unit_desc d = FSDP_ZERO;
    fsdp_unit *unit = NULL;
    if (like) d = *like;
    d.params = params, d.num_params = count;
    CALL(w, fsdp_fully_shard(m, &d, &unit));
    return unit;
}
H_FN fsdp_model *lab_model(fsdp_world *w, const fsdp_model_desc *desc) {
    fsdp_model *m = NULL;
    CALL(w, fsdp_model_create(w, desc, &m));
    return m;
}
H_FN fsdp_param_view lab_view(fsdp_world *w, fsdp_unit *unit, int index) {
    fsdp_param_view v = FSDP_ZERO;
    CALL(w, fsdp_param_view_get(unit, index, &v));
    return v;
}
/* On a device with streams, waits for them before the host reads or writes their data. */
H_FN void lab_settle(const fsdp_world *w, fsdp_model *m) {
    if (lib_on_streams(w)) CALL(w, fsdp_wait_stream(m, -1));
}
/* Run a forward, or a backward, without computation. */
H_FN void lab_forward(fsdp_world *w, fsdp_unit *unit) {
    CALL(w, fsdp_pre_forward(unit));
    CALL(w, fsdp_post_forward(unit));
}
H_FN void lab_backward(fsdp_world *w, fsdp_unit *unit) {
    CALL(w, fsdp_pre_backward(unit));
    CALL(w, fsdp_post_backward(unit));
}

/* The setters of one number: of a unit, or (NULL) of all units. */
static const struct {
    const char *name;
    fsdp_status (*set)(fsdp_model *m, fsdp_unit *u, int value);
} lab_setters[] __attribute__((unused)) = {
    {"set_requires_gradient_sync", fsdp_set_requires_gradient_sync},
    {"set_requires_all_reduce", fsdp_set_requires_all_reduce},
    {"set_reshard_after_forward", fsdp_set_reshard_after_forward},
    {"set_reshard_after_backward", fsdp_set_reshard_after_backward},
    {"set_unshard_in_backward", fsdp_set_unshard_in_backward},
    {"set_reduce_scatter_unused_params", fsdp_set_reduce_scatter_unused_params}};
enum { LAB_SYNC, LAB_ALL_REDUCE, LAB_RAF, LAB_RAB, LAB_UNSHARD, LAB_UNUSED, LAB_SETTERS };

/* ---- the ops that a model emits -------------------------------------------------------------- */

typedef struct lab_log {
    fsdp_op *ops;
    int num, cap;
} lab_log;

H_FN int lab_saw(void *user, fsdp_model *model, fsdp_op *op) {
    lab_log *log = (lab_log *)user;
    (void)model;
    if (log->num == log->cap) {
        log->cap *= 2;
        log->ops = (fsdp_op *)realloc(log->ops, (size_t)log->cap * sizeof *log->ops);
        CHECK(log->ops != NULL);
    }
    log->ops[log->num++] = *op;
    return 0;
}
H_FN void lab_watch(lab_log *log, fsdp_world *w, fsdp_model *model) {
    fsdp_extension watcher = FSDP_ZERO;
    watcher.op = lab_saw, watcher.user = log;
    if (!log->ops) log->cap = 256, log->ops = (fsdp_op *)lab_zeros(256, sizeof *log->ops);
    CALL(w, fsdp_attach(model, &watcher));
}
/* Returns the first op from number `from` on with this kind and label (negative: any) of a unit
   (NULL: any); -1: none. */
H_FN int lab_next_op(const lab_log *log, int from, int kind, int label, const fsdp_unit *unit) {
    for (int n = from; n < log->num; n++)
        if ((kind < 0 || log->ops[n].kind == kind) && (label < 0 || log->ops[n].label == label) &&
            (!unit || log->ops[n].unit == unit))
            return n;
    return -1;
}
H_FN int lab_count_ops(const lab_log *log, int from, int kind, int label, const fsdp_unit *unit) {
    int count = 0;
    while ((from = lab_next_op(log, from, kind, label, unit)) >= 0) count++, from++;
    return count;
}

/* ---- meshes ---------------------------------------------------------------------------------- */

/* Makes a mesh; names: one for each dim, or NULL. ranks NULL: in order. */
H_FN fsdp_mesh *lab_mesh(fsdp_world *w, int ndim, const int32_t *shape, const char *const *names,
                         const int32_t *ranks) {
    fsdp_mesh_desc d = FSDP_ZERO;
    fsdp_mesh *mesh = NULL;
    d.ndim = ndim;
    for (int i = 0; i < ndim; i++) d.shape[i] = shape[i], d.names[i] = names ? names[i] : NULL;
    d.ranks = ranks;
    CALL(w, fsdp_mesh_create(w, &d, &mesh));
    return mesh;
}
H_FN fsdp_mesh *lab_mesh2(fsdp_world *w, int rows, int columns, const char *a, const char *b) {
    const int32_t shape[2] = {rows, columns};
    const char *const names[2] = {a, b};
    return lab_mesh(w, 2, shape, names, NULL);
}
H_FN fsdp_mesh *lab_hsdp(fsdp_world *w, int replicas, int shards) {
    return lab_mesh2(w, replicas, shards, "replicate", "shard");
}
H_FN fsdp_mesh *lab_slice(fsdp_world *w, const fsdp_mesh *mesh, int dim) {
    const int32_t dims[1] = {dim};
    fsdp_mesh *out = NULL;
    CALL(w, fsdp_mesh_slice(mesh, dims, 1, &out));
    return out;
}
#endif
