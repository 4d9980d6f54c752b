/* test_gpu_first.c - assumptions of the backend about CUDA and NCCL, checked on the machine: which
   calls wait for the device, the order of the legacy stream, whether the host may read managed
   memory, whether two ranks connect, and whether an abort ends a kernel that waits for a peer. Uses
   nothing of the library: a failure here is due to the machine, or to a wrong assumption.

   SPDX-License-Identifier: MIT */
#define TAGS NO(SHM) | STUB | STUB_ASAN | GPU
#include "harness.h"

#include <cuda_runtime_api.h>
#include <nccl.h>

#define CUDA(call)                                                                                 \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        CHECK_MSG(e_ == cudaSuccess, "%s: %s", #call, cudaGetErrorString(e_));                     \
    } while (0)
#define NCCL_OK(call)                                                                                 \
    do {                                                                                           \
        ncclResult_t r_ = (call);                                                                  \
        CHECK_MSG(r_ == ncclSuccess, "%s: %s; %s", #call, ncclGetErrorString(r_),                  \
                  ncclGetLastError(NULL));                                                         \
    } while (0)
enum { BYTES = 1 << 16, SOON_MS = 300, LATE_MS = 20000 };

/* ---- streams that are held up ---------------------------------------------------------------- */

static int gate;
static void wait_at_gate(void *arg) {
    long nap = 0;
    (void)arg;
    while (!__atomic_load_n(&gate, __ATOMIC_SEQ_CST)) h_nap(&nap);
}
static void set_gate(int is_open) { __atomic_store_n(&gate, is_open, __ATOMIC_SEQ_CST); }

static cudaStream_t stream_of(unsigned flags) {
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, flags));
    return stream;
}

/* Returns 1 if all work of a stream ends within SOON_MS. */
static int ends_soon(cudaStream_t stream) {
    int64_t start = h_now_ms();
    long nap = 0;
    while (cudaStreamQuery(stream) == cudaErrorNotReady && h_now_ms() - start < SOON_MS)
        h_nap(&nap);
    cudaError_t e = cudaStreamQuery(stream);
    (void)cudaGetLastError();
    CHECK(e == cudaSuccess || e == cudaErrorNotReady);
    return e == cudaSuccess;
}

/* ---- the machine ----------------------------------------------------------------------------- */

TEST(cuda, machine) {
    int driver = 0, runtime = 0, nccl = 0, devices = 0, sms = 0, major = 0, minor = 0, pitch = 0;
    CUDA(cudaDriverGetVersion(&driver));
    CUDA(cudaRuntimeGetVersion(&runtime));
    CUDA(cudaGetDeviceCount(&devices));
    CHECK(devices > 0);
    NCCL_OK(ncclGetVersion(&nccl));
    CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    CUDA(cudaDeviceGetAttribute(&pitch, cudaDevAttrMaxPitch, 0));
    h_message("%d devices; the first: compute capability %d.%d, %d SMs, pitch at most %d", devices,
              major, minor, sms, pitch);
    h_message("driver %d, runtime %d, NCCL %d (header %d)", driver, runtime, nccl,
              NCCL_VERSION_CODE);
    CHECK_MSG(driver / 1000 >= runtime / 1000, "the driver is of an older major than the runtime");
}

/* The caller's stream is the legacy one. It waits for streams that do not opt out, and they wait
   for it; the library's streams opt out. */
TEST(cuda, legacy_stream) {
    cudaStream_t ordered = stream_of(cudaStreamDefault), apart = stream_of(cudaStreamNonBlocking);
    void *data = NULL;
    CUDA(cudaMalloc(&data, BYTES));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaLaunchHostFunc(ordered, wait_at_gate, NULL));
    CUDA(cudaMemsetAsync(data, 1, BYTES, cudaStreamLegacy));
    CUDA(cudaMemsetAsync(data, 2, BYTES, apart));
    CHECK_MSG(ends_soon(apart), "a non-blocking stream waits for the legacy one");
    CHECK_MSG(!ends_soon(cudaStreamLegacy), "the legacy stream does not wait for an ordinary one");
    set_gate(1);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(data));
}

/* The host may read managed memory while other streams run. */
TEST(cuda, managed_memory) {
    int concurrent = 0;
    unsigned char *data = NULL;
    cudaStream_t busy = stream_of(cudaStreamNonBlocking), stream = stream_of(cudaStreamNonBlocking);
    CUDA(cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, 0));
    if (!concurrent)
        SKIP("no concurrent access to managed memory: FSDP_CUDA_MANAGED=1 cannot work");
    CUDA(cudaMallocManaged((void **)&data, BYTES, cudaMemAttachGlobal));
    CUDA(cudaLaunchHostFunc(busy, wait_at_gate, NULL));
    CUDA(cudaMemsetAsync(data, 7, BYTES, stream));
    CUDA(cudaStreamSynchronize(stream));
    for (int i = 0; i < BYTES; i++) CHECK_EQ_INT(data[i], 7);
    for (int i = 0; i < BYTES; i++) data[i] = (unsigned char)i;
    CUDA(cudaMemcpyAsync(data, data + BYTES / 2, BYTES / 2, cudaMemcpyDefault, stream));
    CUDA(cudaStreamSynchronize(stream));
    CHECK_EQ_INT(data[3], (BYTES / 2 + 3) & 255);
    set_gate(1);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(data));
}

/* ---- what waits for the device --------------------------------------------------------------- */

static struct {
    void *device, *other, *pinned, *pageable;
    cudaStream_t stream;
    cudaEvent_t event;
} my;
static void do_malloc(void) { CUDA(cudaMalloc(&my.other, BYTES)); }
static void do_free(void) { CUDA(cudaFree(my.device)); }
static void do_malloc_host(void) { CUDA(cudaMallocHost(&my.other, BYTES)); }
static void do_free_host(void) { CUDA(cudaFreeHost(my.pinned)); }
static void do_mem_info(void) {
    size_t left, total;
    CUDA(cudaMemGetInfo(&left, &total));
}
static void do_stream(void) { (void)stream_of(cudaStreamNonBlocking); }
static void do_event(void) {
    cudaEvent_t event;
    CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CUDA(cudaEventDestroy(event));
}
static void do_record(void) { CUDA(cudaEventRecord(my.event, my.stream)); }
static void do_wait(void) { CUDA(cudaStreamWaitEvent(my.stream, my.event, 0)); }
static void do_query(void) { CUDA(cudaEventQuery(my.event)); }
static void do_set(void) { CUDA(cudaMemsetAsync(my.device, 0, BYTES, my.stream)); }
static void do_copy(void) {
    CUDA(cudaMemcpyAsync(my.device, my.pinned, BYTES, cudaMemcpyDefault, my.stream));
}
static void do_pageable(void) {
    CUDA(cudaMemcpyAsync(my.device, my.pageable, BYTES, cudaMemcpyHostToDevice, my.stream));
}
static void do_pageable_back(void) {
    CUDA(cudaMemcpyAsync(my.pageable, my.device, BYTES, cudaMemcpyDeviceToHost, my.stream));
}
static const struct {
    const char *name;
    void (*fn)(void);
    int returns; /* 1: a step relies on its return */
} calls[] = {{"cudaEventRecord", do_record, 1},
             {"cudaStreamWaitEvent", do_wait, 1},
             {"cudaEventQuery", do_query, 1},
             {"cudaMemsetAsync", do_set, 1},
             {"cudaMemcpyAsync", do_copy, 1},
             {"cudaMemcpyAsync_from_pageable", do_pageable, 0},
             {"cudaMemcpyAsync_to_pageable", do_pageable_back, 0},
             {"cudaEventCreate", do_event, 0},
             {"cudaStreamCreate", do_stream, 0},
             {"cudaMemGetInfo", do_mem_info, 0},
             {"cudaMalloc", do_malloc, 0},
             {"cudaMallocHost", do_malloc_host, 0},
             {"cudaFree", do_free, 0},
             {"cudaFreeHost", do_free_host, 0}};

static int has_returned;
static void *call_it(void *arg) {
    CUDA(cudaSetDevice(0));
    calls[*(const size_t *)arg].fn();
    __atomic_store_n(&has_returned, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

/* Reports which of these calls wait for a kernel on another stream that waits for a peer. */
TEST_P(cuda, next_to_a_busy_stream, calls) {
    size_t which = (size_t)(row - calls);
    cudaStream_t busy = stream_of(cudaStreamNonBlocking);
    pthread_t thread;
    long nap = 0;
    my.stream = stream_of(cudaStreamNonBlocking);
    CUDA(cudaMalloc(&my.device, BYTES));
    CUDA(cudaMallocHost(&my.pinned, BYTES));
    CHECK((my.pageable = calloc(1, BYTES)) != NULL);
    CUDA(cudaEventCreateWithFlags(&my.event, cudaEventDisableTiming));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaLaunchHostFunc(busy, wait_at_gate, NULL));
    CHECK(!pthread_create(&thread, NULL, call_it, &which));
    int64_t start = h_now_ms(), limit = row->returns ? LATE_MS : SOON_MS;
    while (!__atomic_load_n(&has_returned, __ATOMIC_SEQ_CST) && h_now_ms() - start < limit)
        h_nap(&nap);
    int returned = __atomic_load_n(&has_returned, __ATOMIC_SEQ_CST);
    set_gate(1);
    CHECK(!pthread_join(thread, NULL));
    h_message("%s %s", row->name, returned ? "returns" : "waits for the device");
    CHECK_MSG(returned || !row->returns, "%s waits for another stream: steps would", row->name);
}

/* ---- two ranks of NCCL alone ----------------------------------------------------------------- */

enum { FLOATS = 1 << 20, ROUNDS = 20 };

static ncclComm_t connect_pair(int rank, int world, ncclUniqueId *id) {
    int devices = 0;
    ncclComm_t comm;
    CUDA(cudaGetDeviceCount(&devices));
    CUDA(cudaSetDevice(rank % devices));
    if (rank == 0) NCCL_OK(ncclGetUniqueId(id));
    if (rank == 0) h_mark(0);
    h_await_marks(0, 1);
    int64_t start = h_now_ms();
    NCCL_OK(ncclCommInitRank(&comm, world, *id, rank));
    if (rank == 0) h_message("init: %lld ms", (long long)(h_now_ms() - start));
    return comm;
}

static ncclUniqueId *shared_id(void) {
    void *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return (ncclUniqueId *)at;
}

static void sums(int rank, int world, void *arg) {
    ncclComm_t comm = connect_pair(rank, world, (ncclUniqueId *)arg);
    cudaStream_t stream = stream_of(cudaStreamNonBlocking);
    float *host = (float *)malloc(FLOATS * sizeof *host), *data = NULL;
    CHECK(host != NULL);
    CUDA(cudaMalloc((void **)&data, FLOATS * sizeof *data));
    for (int i = 0; i < FLOATS; i++) host[i] = (float)(i % 1000 + rank);
    CUDA(cudaMemcpy(data, host, FLOATS * sizeof *data, cudaMemcpyHostToDevice));
    NCCL_OK(ncclAllReduce(data, data, FLOATS, ncclFloat32, ncclSum, comm, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(host, data, FLOATS * sizeof *data, cudaMemcpyDeviceToHost));
    for (int i = 0; i < FLOATS; i++) CHECK_NEAR(host[i], 2 * (i % 1000) + 1, 0);
    int64_t start = h_now_ms();
    for (int i = 0; i < ROUNDS; i++) {
        NCCL_OK(ncclAllReduce(data, data, 1024, ncclFloat32, ncclMax, comm, stream));
        CUDA(cudaStreamSynchronize(stream));
    }
    if (rank == 0) h_message("all-reduce of 4 KiB: %.2f ms", (double)(h_now_ms() - start) / ROUNDS);
    NCCL_OK(ncclCommDestroy(comm));
    CUDA(cudaFree(data));
    free(host);
}
TEST(nccl_alone, sums, SECONDS(120)) { h_ranks_proc(2, sums, shared_id()); }

static void *abort_soon(void *arg) {
    usleep(500000);
    NCCL_OK(ncclCommAbort((ncclComm_t)arg));
    return NULL;
}
/* Rank 1 does not take part in the second one: an abort from another thread ends the kernel, and
   the device stays usable. */
static void aborted(int rank, int world, void *arg) {
    ncclComm_t comm = connect_pair(rank, world, (ncclUniqueId *)arg);
    cudaStream_t stream = stream_of(cudaStreamNonBlocking);
    pthread_t thread;
    float *data = NULL;
    long nap = 0;
    CUDA(cudaMalloc((void **)&data, BYTES));
    NCCL_OK(ncclAllReduce(data, data, 1024, ncclFloat32, ncclSum, comm, stream));
    CUDA(cudaStreamSynchronize(stream));
    int64_t start = h_now_ms();
    if (rank == 0) NCCL_OK(ncclAllReduce(data, data, 1024, ncclFloat32, ncclSum, comm, stream));
    int64_t call_ms = h_now_ms() - start;
    CHECK(!pthread_create(&thread, NULL, abort_soon, comm));
    while (cudaStreamQuery(stream) == cudaErrorNotReady && h_now_ms() - start < LATE_MS)
        h_nap(&nap);
    int64_t took = h_now_ms() - start;
    CUDA(cudaStreamQuery(stream));
    CHECK(rank != 0 || took >= 490);
    CHECK(!pthread_join(thread, NULL));
    if (rank == 0)
        h_message(
            "the call returned within %lld ms, its kernel ended %lld ms after the abort began",
            (long long)call_ms, (long long)(took - 500));
    CUDA(cudaMemset(data, 0, BYTES));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(data));
}
TEST(nccl_alone, abort, SECONDS(120)) { h_ranks_proc(2, aborted, shared_id()); }
