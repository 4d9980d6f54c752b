/* lab.h - what tests share: worlds with a desc that is quiet and has a short deadline, ranks as
   threads or as processes, an allocator that counts and fails on demand. The library that they
   test is in library.h.

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
#endif
#ifdef W_SANITIZED
enum { W_SLOW = 1 };
#else
enum { W_SLOW = 0 };
#endif

/* ---- worlds ---------------------------------------------------------------------------------- */

#define CALL(world, call)                                                                          \
    do {                                                                                           \
        fsdp_status w_status = (call);                                                             \
        if (w_status)                                                                              \
            h_fail(H_HERE(#call), "%s: %s [%s]", fsdp_status_name(w_status),                       \
                   fsdp_last_error(world), w_case);                                                \
    } while (0)
#define W_CHECK(cond, ...) /* ... is a format and its values; adds which case it is */             \
    do {                                                                                           \
        char w_text[1600];                                                                         \
        if (cond) break;                                                                           \
        snprintf(w_text, sizeof w_text, __VA_ARGS__);                                              \
        h_fail(H_HERE("CHECK(" #cond ")"), "%s [%s]", w_text, w_case);                             \
    } while (0)

/* What is being tested, for the text of a failure. */
static __thread __attribute__((unused)) char w_case[256];

H_FN void w_quiet(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)rank, (void)text, (void)user;
}

/* threads NULL: a process. lanes 0: inline. */
H_FN fsdp_world_desc w_desc(int rank, int world, fsdp_threads *threads, const char *job,
                            int lanes) {
    fsdp_world_desc d = FSDP_ZERO;
    d.rank = d.local_rank = rank;
    d.world_size = world;
    d.threads = threads;
    d.job = job;
    d.lanes = lanes ? lanes : -1;
    d.timeout_ms = 30000;
    d.logger.log = w_quiet;
    return d;
}

/* For a boot of one's own. */
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

/* A name for the ranks that one test starts as processes. */
H_FN const char *w_job(const char *what) {
    static __thread char job[100];
    snprintf(job, sizeof job, "test-%s-%d-%d", what, (int)getppid(), (int)getuid());
    return job;
}

/* The backend without its fused reduction: reductions then go the way of other backends. */
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
    int64_t fail_at;                 /* this allocation fails; -1: none */
    int persistent, failures;        /* persistent: and all after it */
} w_heap;

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
    memset(ptr, 0xa5, size); /* nobody may count on zeros */
    __atomic_add_fetch(&heap->live, 1, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&heap->live_bytes, (int64_t)size, __ATOMIC_SEQ_CST);
    return ptr;
}
H_FN void w_heap_free(void *ptr, size_t size, void *user) {
    w_heap *heap = (w_heap *)user;
    if (!ptr) return;
    memset(ptr, 0x5a, size); /* what is freed is not read; and the size is right */
    __atomic_sub_fetch(&heap->live, 1, __ATOMIC_SEQ_CST);
    __atomic_sub_fetch(&heap->live_bytes, (int64_t)size, __ATOMIC_SEQ_CST);
    free(ptr);
}
H_FN void w_heap_use(w_heap *heap, fsdp_world_desc *desc) {
    memset(heap, 0, sizeof *heap);
    heap->fail_at = -1;
    desc->allocator.alloc = w_heap_alloc;
    desc->allocator.free = w_heap_free;
    desc->allocator.user = heap;
}
#endif
